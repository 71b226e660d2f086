/* READs of cached blocks: finds them in the table, reads the slab files and compares checksums.
 *
 * The array `files` owns the descriptors of the slab files. It has no lock (see
 * `relay_close_file`). `ahead_lock` protects the blocks that are queued for read-ahead. A worker's
 * buffers belong to its thread alone; its `lock` protects the copy of a READ that waits for a disk,
 * which `look_after` may take.
 */
#define _GNU_SOURCE
#include "cached_reads.h"
#include "forwarding.h"
#include "sums.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST_PIECES 3          /* a READ of 1 MiB touches two blocks */
#define SPARE_THREADS 1        /* threads that never wait for a disk, to answer other requests */
#define DISK_WAIT_LIMIT_NS 250000000ull /* after this wait for a disk, a READ goes to the daemon */
#define SEQUENTIAL_BYTES (512u << 10) /* a READ of this size or more counts as sequential */
#define AHEAD_BLOCKS 4         /* distance of read-ahead */

enum { IDLE, WAITING, HANDED_OVER };

/* The part of a READ that lies in one block. */
struct piece {
    struct rt_found found;
    uint32_t within, length;      /* bytes in the block */
    uint64_t opened;              /* the value in `files` when the piece was read */
};

int init_cached_reads(struct relay *relay) {
    relay->files = calloc(RT_FILES, sizeof *relay->files);
    sem_init(&relay->has_ahead, 0, 0);
    pthread_mutex_init(&relay->ahead_lock, NULL);
    return relay->files == NULL ? ENOMEM : 0;
}

/* -- reading ----------------------------------------------------------------------------------- */

/* Finds the pieces of a READ. Returns its length in bytes, less than `size` only at the end of the
 * file; -1 unless all of it is in the table. */
static ssize_t locate(struct relay *relay, uint64_t ino, uint64_t offset, uint32_t size,
                      struct piece *pieces, int *count) {
    uint64_t block = offset >> RT_BLOCK_SHIFT;
    uint32_t within = (uint32_t)(offset & (BLOCK_BYTES - 1)), done = 0;
    *count = 0;
    while (size > 0) {
        struct piece *piece = &pieces[*count];
        if (*count == MOST_PIECES || block > UINT32_MAX) return -1;
        if (!rt_find(&relay->table, ino, (uint32_t)block, &piece->found)) return -1;
        uint32_t length = piece->found.length;
        if (within >= length) return piece->found.is_last ? (ssize_t)done : -1;
        piece->within = within;
        piece->length = length - within < size ? length - within : size;
        ++*count;
        done += piece->length;
        size -= piece->length;
        if (size > 0 && piece->found.is_last) break;
        if (size > 0 && length != BLOCK_BYTES) return -1;
        within = 0;
        block++;
    }
    return done;
}

/* True if the relay has all files of the pieces open. */
static bool are_open(struct relay *relay, const struct piece *pieces, int count) {
    for (int i = 0; i < count; i++)
        if (opened_file(relay, pieces[i].found.file) == 0) return false;
    return true;
}

/* True if the descriptor belonged to the piece's file during the whole read. Must be called
 * after the bytes were copied, and after a fence. */
static bool is_same_file(struct relay *relay, const struct piece *piece) {
    return GET(relay->files[piece->found.file]) == piece->opened;
}

/* Reads one piece. Disks may corrupt or lose data, and no program can find out which pages of a
 * slab the kernel has read from the disk since the last comparison. So bytes from a file on a
 * disk are compared on every read, after they were copied to memory of this process. */
static bool read_piece(struct worker *worker, struct piece *piece, int disk_flags, char *data) {
    struct rt_table *table = &worker->relay->table;
    uint64_t opened = piece->opened = opened_file(worker->relay, piece->found.file);
    if (opened == 0) return false;
    if (opened & ON_DISK || GET(table->header->verify_all))
        return sums_read(table, fd_of(opened), &piece->found, piece->within, piece->length,
                         opened & ON_DISK ? disk_flags : 0, data, worker->scratch);
    off_t position = (off_t)piece->found.slot * RT_SLOT_UNIT + piece->within;
    return pread(fd_of(opened), data, piece->length, position) == (ssize_t)piece->length;
}

/* Reads all pieces into `worker->data`. True if all were read and are right. `disk_flags`:
 * RWF_NOWAIT reads only from memory; 0 waits for the disk, however long that takes. */
static bool read_pieces(struct worker *worker, struct piece *pieces, int count, int disk_flags) {
    char *data = worker->data;
    for (int i = 0; i < count; i++) {
        if (!read_piece(worker, &pieces[i], disk_flags, data)) return false;
        data += pieces[i].length;
    }
    return true;
}

/* Queues a block for `tell_disk`, or drops it if the queue is full.
 *
 * The kernel reads ahead in the file of a sequential reader, but the file's blocks are spread
 * over slabs. So the relay requests the next blocks from the disk: `AHEAD_BLOCKS` at first, then
 * one more each time. A separate thread does this, because a failing disk may block it. */
static void want_ahead(struct relay *relay, const struct rt_found *found) {
    pthread_mutex_lock(&relay->ahead_lock);
    bool has_room = relay->ahead_count < AHEAD_MOST;
    if (has_room) relay->ahead[(relay->ahead_first + relay->ahead_count++) % AHEAD_MOST] = *found;
    pthread_mutex_unlock(&relay->ahead_lock);
    if (has_room) sem_post(&relay->has_ahead);
}

void *tell_disk(void *argument) {
    struct relay *relay = argument;
    while (!GET(relay->stopping)) {
        while (sem_wait(&relay->has_ahead) < 0) {}
        pthread_mutex_lock(&relay->ahead_lock);
        bool has_one = relay->ahead_count > 0;
        struct rt_found found = relay->ahead[relay->ahead_first];
        if (has_one) {
            relay->ahead_first = (relay->ahead_first + 1) % AHEAD_MOST;
            relay->ahead_count--;
        }
        pthread_mutex_unlock(&relay->ahead_lock);
        uint64_t opened = has_one ? opened_file(relay, found.file) : 0;
        if (opened & ON_DISK)
            posix_fadvise(fd_of(opened), (off_t)found.slot * RT_SLOT_UNIT, found.length,
                          POSIX_FADV_WILLNEED);
    }
    return NULL;
}

/* Queues the blocks after a sequential READ, if they are cached on a disk. With `has_waited`, all
 * `AHEAD_BLOCKS`; otherwise only the last one, because earlier READs have queued the others. */
static void read_ahead(struct relay *relay, uint64_t ino, uint64_t offset, bool has_waited) {
    uint64_t block = offset >> RT_BLOCK_SHIFT;
    for (unsigned ahead = has_waited ? 1 : AHEAD_BLOCKS; ahead <= AHEAD_BLOCKS; ahead++) {
        struct rt_found found;
        if (block + ahead > UINT32_MAX ||
            !rt_find(&relay->table, ino, (uint32_t)(block + ahead), &found))
            return;
        if (opened_file(relay, found.file) & ON_DISK) want_ahead(relay, &found);
    }
}

/* Counts a hit in the table. */
static void account(struct relay *relay, const struct piece *pieces, int count, size_t bytes,
                    uint32_t user, uint64_t began_ns) {
    struct rt_header *h = relay->table.header;
    uint64_t lasted_ns = now_ns() - began_ns, rest = lasted_ns >> 13;
    for (int i = 0; i < count; i++)
        rt_note_hit(&relay->table, &pieces[i].found, pieces[i].length);
    ADD(h->hits, 1);
    ADD(h->hit_bytes, bytes);
    ADD(h->hit_ns, lasted_ns);
    ADD(h->hit_times[rest ? 64 - __builtin_clzll(rest) : 0], 1);
    ADD(relay->table.user_bytes[user], bytes);
}

/* Reads the pieces from a disk. If too many threads wait for disks, it returns false, and the
 * daemon, which has threads for that, does it. During the wait, `look_after` may hand the
 * request over to the daemon. */
static bool read_slowly(struct worker *worker, struct piece *pieces, int count,
                        const char *request, size_t length) {
    struct relay *relay = worker->relay;
    if (length > SMALL_REQUEST) return false;
    if (ADD(relay->at_disk_count, 1) + SPARE_THREADS >= relay->thread_count) {
        ADD(relay->at_disk_count, -1);
        return false;
    }
    waiting_note(&relay->waiting, (const struct fuse_in_header *)request);
    if (worker->leads) { /* another thread answers new requests meanwhile */
        worker->leads = false;
        sem_post(&relay->lead);
    }
    pthread_mutex_lock(&worker->lock);
    memcpy(worker->at_disk_request, request, length);
    worker->at_disk_length = length;
    worker->since_ns = now_ns();
    worker->state = WAITING;
    pthread_mutex_unlock(&worker->lock);
    bool is_read = read_pieces(worker, pieces, count, 0);
    ADD(relay->at_disk_count, -1);
    if (is_read) ADD(relay->table.header->waited, 1);
    return is_read;
}

/* Ends the wait. True if `look_after` has handed the READ over, so it must not be answered here. */
static bool was_handed_over(struct worker *worker) {
    pthread_mutex_lock(&worker->lock);
    int state = worker->state;
    worker->state = IDLE;
    pthread_mutex_unlock(&worker->lock);
    return state == HANDED_OVER;
}

bool answer_read(struct worker *worker, char *request, size_t length) {
    struct relay *relay = worker->relay;
    struct rt_header *h = relay->table.header;
    struct fuse_in_header *in = (struct fuse_in_header *)request;
    struct fuse_read_in *read_in = (struct fuse_read_in *)(in + 1);
    struct piece pieces[MOST_PIECES];
    int count;

    if (length < sizeof *in + sizeof *read_in) return false;
    uint64_t began_ns = now_ns();
    uint32_t user = rt_user(&relay->table, in->uid);
    read_in->fh = in->nodeid | (uint64_t)user << RT_INO_BITS;
    if (GET(h->paused) || GET(relay->table.limited[user])) return false;
    if (read_in->size > BLOCK_BYTES) return false;
    ssize_t bytes = locate(relay, in->nodeid, read_in->offset, read_in->size, pieces, &count);
    if (bytes < 0 || !are_open(relay, pieces, count)) return false;

    /* 1. Without waiting. 2. If bytes are missing or wrong: again, and now wait for the disk; bytes
     * that are wrong twice go to the daemon. 3. Is it still the same block? 4. Has `look_after`
     * handed the READ over meanwhile? */
    bool is_read = read_pieces(worker, pieces, count, RWF_NOWAIT);
    bool must_wait = !is_read;
    if (read_in->size >= SEQUENTIAL_BYTES)
        read_ahead(relay, in->nodeid, read_in->offset, must_wait);
    if (must_wait) is_read = read_slowly(worker, pieces, count, request, length);
    for (int i = 0; i < count && is_read; i++) {
        if (!rt_still(&relay->table, &pieces[i].found) || !is_same_file(relay, &pieces[i])) {
            ADD(h->changed, 1);
            is_read = false;
        }
    }
    if (must_wait && was_handed_over(worker)) return true;
    if (!is_read) return false;
    account(relay, pieces, count, (size_t)bytes, user, began_ns);
    reply(relay, in->unique, 0, worker->data, (size_t)bytes);
    return true;
}

/* Takes the READ of a worker that has waited too long for a disk. Copies it to `copy`
 * (SMALL_REQUEST bytes), and returns its length; 0 if the worker has not. */
static size_t take_over(struct worker *worker, char *copy) {
    size_t length = 0;
    pthread_mutex_lock(&worker->lock);
    if (worker->state == WAITING && now_ns() > worker->since_ns + DISK_WAIT_LIMIT_NS) {
        worker->state = HANDED_OVER;
        length = worker->at_disk_length;
        memcpy(copy, worker->at_disk_request, length);
    }
    pthread_mutex_unlock(&worker->lock);
    return length;
}

void *look_after(void *argument) {
    struct relay *relay = argument;
    struct timespec pause = {0, WAITING_LOOK_NS};
    char copy[SMALL_REQUEST];
    while (!GET(relay->stopping)) {
        nanosleep(&pause, NULL);
        if (GET(relay->waiting.looked_at) > 0) waiting_look(&relay->waiting);
        if (GET(relay->at_disk_count) == 0) continue;
        for (unsigned i = 0; i < relay->thread_count + HELPERS; i++) {
            size_t length = take_over(&relay->workers[i], copy);
            if (length == 0) continue;
            ADD(relay->table.header->late, 1);
            forward(relay, copy, length);
        }
    }
    return NULL;
}

/* -- slab files -------------------------------------------------------------------------------- */

int relay_set_file(struct relay *relay, uint32_t file, int fd, bool on_disk) {
    if (file >= RT_FILES) {
        close(fd);
        return -EINVAL;
    }
    uint64_t number = ADD(relay->opened_count, 1);
    uint64_t opened = number << 32 | (on_disk ? ON_DISK : 0) | (uint32_t)(fd + 1);
    uint64_t before = atomic_exchange(&relay->files[file], opened);
    if (before != 0) close(fd_of(before));
    return 0;
}

/* A thread may use the descriptor at this moment, and its number may soon belong to another
 * file. So each thread checks afterwards whether the file is still open (`is_same_file`). If
 * not, it discards the bytes. */
void relay_close_file(struct relay *relay, uint32_t file) {
    if (file >= RT_FILES) return;
    uint64_t before = atomic_exchange(&relay->files[file], 0);
    if (before != 0) close(fd_of(before));
}

void relay_drop_files(struct relay *relay) {
    for (uint32_t file = 0; file < RT_FILES; file++)
        if (GET(relay->files[file]) != 0) relay_close_file(relay, file);
}

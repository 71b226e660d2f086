#define _GNU_SOURCE
#include "relay.h"
#include "sums.h"
#include "waiting.h"

#include <errno.h>
#include <linux/fuse.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define GET(x) atomic_load_explicit(&(x), memory_order_relaxed)
#define PUT(x, value) atomic_store_explicit(&(x), (value), memory_order_relaxed)
#define ADD(x, value) atomic_fetch_add_explicit(&(x), (value), memory_order_relaxed)

/* From linux/fuse.h of Linux 6.9; older headers lack them. */
#define NOTIFY_RESEND 7
#define INIT_EXT (1u << 30)
#define HAS_RESEND_HIGH (1u << (39 - 32))

#define INO_BITS 48            /* of a handle; the user number is above (uid_limits.py) */
#define BLOCK_BYTES (1u << RT_BLOCK_SHIFT)
#define MOST_PIECES 3          /* a READ of 1 MiB touches two blocks */
#define NOTICE_BYTES 2048      /* a name has at most 1,024 */
#define REQUEST_BYTES (BLOCK_BYTES + 65536) /* at least max_write and a header: the kernel's rule */
#define SMALL_REQUEST 512      /* a READ has at most 80 bytes */
#define UNIQUES (1u << 16)

#define MOST_THREADS 64
#define HELPERS 1              /* with the leader, two CPUs serve hits; no load has needed more */
#define SPARE_THREADS 1        /* threads that never wait for a disk, to answer other requests */
#define PATIENCE_NS 250000000ull /* after this wait for a disk, a READ goes to the daemon */
#define LOOK_NS 50000000ull    /* interval of `look_after` */
#define SPIN_NS 100000ull      /* how long the leader polls before it sleeps; see `await_request` */
#define SEQUENTIAL_BYTES (512u << 10) /* a READ of this size or more counts as sequential */
#define AHEAD_BLOCKS 4         /* distance of read-ahead */
#define AHEAD_MOST 64          /* blocks queued for read-ahead; further ones are dropped */
#define QUICK_NS 500000ull     /* after a wait below this, the leader polls for the next request */

#define WAITS (1u << 31)       /* flag in `files`: reads may wait for a disk */

enum { IDLE, WAITING, HANDED_OVER };

/* The part of a READ that lies in one block. */
struct piece {
    struct rt_found found;
    uint32_t within, length;      /* bytes in the block */
    uint64_t opened;              /* the value in `files` when the piece was read */
};

/* A thread that answers requests. It owns its buffers, and alone uses the fields above `lock`. */
struct worker {
    struct relay *relay;
    pthread_t thread;
    char *request, *data, *scratch; /* REQUEST_BYTES, BLOCK_BYTES and BLOCK_BYTES long */
    bool leads;

    pthread_mutex_t lock;         /* protects all fields below, which `look_after` also uses */
    int state;
    uint64_t since_ns;
    size_t waiting_length;
    char waiting[SMALL_REQUEST];  /* copy of the READ while `state` is WAITING */
};

/* A request or notice in a list. Allocated by `message_of`; the code that unlinks it frees it. */
struct message {
    struct message *next;
    size_t length;
    char bytes[];
};

/* A relay and its memory are never freed. Fields without a lock are atomic, or constant once the
 * threads run, or have a lock of their own. No thread holds two of the locks at a time. */
struct relay {
    int device_fd, ended_fd;        /* borrowed; owned */
    struct rt_table table;
    struct waiting waiting;         /* requests that are not answered at once */
    unsigned thread_count;
    struct worker *workers;         /* [thread_count + HELPERS] */
    pthread_t looker;               /* runs `look_after` */
    _Atomic bool stopping;
    _Atomic unsigned waiting_count; /* threads that wait for a disk */
    sem_t lead, help;               /* each post wakes one thread in `lead` or `help` */

    pthread_t ahead_thread;
    sem_t has_ahead;
    pthread_mutex_t ahead_lock;     /* protects the three fields below: a ring */
    struct rt_found ahead[AHEAD_MOST];
    unsigned ahead_first, ahead_count;

    _Atomic int idle_helpers;
    _Atomic uint64_t *files;        /* [RT_FILES] low half: fd + 1 and WAITS; high half: the number
                                       of the opening, unique until it wraps; 0: not open here. The
                                       code that replaces a value closes the value's descriptor. */
    _Atomic uint32_t opened_count;

    pthread_mutex_t lock;           /* protects all fields below */
    pthread_cond_t has_queue;
    int requests_fd;                /* owned; -1: no daemon */
    bool can_resend, pretends_not;  /* the kernel's ability; `relay_pretend_no_resend` was called */
    struct message *init;           /* the kernel's INIT; owned */
    struct message *first, **last;  /* requests that the socket had no room for */
    uint64_t uniques[UNIQUES];      /* ring of the latest forwarded requests, for kernels that */
    uint64_t unique_count;          /* cannot send them again */
    pthread_t queue_thread;
    struct message *first_notice, **last_notice; /* notices of a dead daemon for the kernel */
    bool says_nothing;              /* the daemon's end of the socket is closed */
    pthread_cond_t has_daemon;
    pthread_t notice_thread;
};

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

/* -- replies ----------------------------------------------------------------------------------- */

/* Writes a reply to the kernel. `error` is 0 or a negative errno. ENOENT from the kernel is no
 * failure: the request was aborted, or it was sent again and now has another number. */
static void reply(struct relay *relay, uint64_t unique, int error, const void *data, size_t length) {
    struct fuse_out_header out = {(uint32_t)(sizeof out + length), error, unique};
    struct iovec parts[2] = {{&out, sizeof out}, {(void *)data, length}};
    while (writev(relay->device_fd, parts, length ? 2 : 1) < 0 && errno == EINTR) {}
}

/* -- forwarding -------------------------------------------------------------------------------- */

/* Returns a copy of the bytes, which the caller owns. */
static struct message *message_of(const void *bytes, size_t length) {
    struct message *message = malloc(sizeof *message + length);
    if (message == NULL) abort(); /* a lost request would block its process for ever */
    message->next = NULL;
    message->length = length;
    memcpy(message->bytes, bytes, length);
    return message;
}

/* Appends a copy of a request to the queue. The caller must hold `lock`. */
static void enqueue(struct relay *relay, const void *bytes, size_t length) {
    *relay->last = message_of(bytes, length);
    relay->last = &(*relay->last)->next;
    pthread_cond_signal(&relay->has_queue);
}

/* Unlinks the first request of the queue, which the caller then owns; NULL if the queue is
 * empty. The caller must hold `lock`. */
static struct message *dequeue(struct relay *relay) {
    struct message *message = relay->first;
    if (message == NULL) return NULL;
    relay->first = message->next;
    if (relay->first == NULL) relay->last = &relay->first;
    return message;
}

/* Receives a notice from the daemon without waiting; NULL if there is none. The caller must hold
 * `lock`, and owns the result. */
static struct message *receive_notice(struct relay *relay) {
    char bytes[NOTICE_BYTES];
    if (relay->requests_fd < 0 || relay->says_nothing) return NULL;
    ssize_t length = recv(relay->requests_fd, bytes, sizeof bytes, MSG_DONTWAIT);
    if (length >= (ssize_t)sizeof(struct fuse_out_header)) return message_of(bytes, (size_t)length);
    if (length == 0 || (length < 0 && errno != EAGAIN && errno != EINTR)) relay->says_nothing = true;
    return NULL;
}

/* Closes the socket, after its notices have been saved. The caller must hold `lock`. */
static void lose_daemon(struct relay *relay) {
    if (relay->requests_fd < 0) return;
    struct message *notice;
    while ((notice = receive_notice(relay)) != NULL) {
        *relay->last_notice = notice;
        relay->last_notice = &notice->next;
    }
    shutdown(relay->requests_fd, SHUT_RDWR); /* wakes `pass_notices_on` from its poll */
    close(relay->requests_fd);
    relay->requests_fd = -1;
    /* No daemon has received the queued requests. The kernel sends them again if it can. */
    while (relay->can_resend && relay->first != NULL) free(dequeue(relay));
}

/* Gives a request to the daemon, or to the queue while the socket is full. Without a daemon, the
 * request stays in the kernel if the kernel can send it again, else in the queue. Any thread. */
static void forward(struct relay *relay, const void *bytes, size_t length) {
    const struct fuse_in_header *in = bytes;
    ADD(relay->table.header->forwarded, 1);
    waiting_note(&relay->waiting, in);
    pthread_mutex_lock(&relay->lock);
    if (!relay->can_resend) relay->uniques[relay->unique_count++ % UNIQUES] = in->unique;
    if (relay->requests_fd >= 0 && relay->first == NULL) {
        ssize_t sent;
        do
            sent = send(relay->requests_fd, bytes, length, MSG_DONTWAIT | MSG_NOSIGNAL);
        while (sent < 0 && errno == EINTR);
        if (sent < 0 && (errno == EAGAIN || errno == ENOBUFS))
            enqueue(relay, bytes, length);
        else if (sent < 0)
            lose_daemon(relay);
    } else if (relay->requests_fd >= 0 || !relay->can_resend) {
        enqueue(relay, bytes, length);
    }
    if (relay->requests_fd < 0 && !relay->can_resend && relay->first == NULL)
        enqueue(relay, bytes, length); /* the send above found the daemon gone */
    pthread_mutex_unlock(&relay->lock);
}

/* A thread: sends the queue whenever the socket has room. */
static void *send_queue(void *argument) {
    struct relay *relay = argument;
    pthread_mutex_lock(&relay->lock);
    while (!GET(relay->stopping)) {
        if (relay->first == NULL || relay->requests_fd < 0) {
            pthread_cond_wait(&relay->has_queue, &relay->lock);
            continue;
        }
        struct message *message = relay->first;
        ssize_t sent = send(relay->requests_fd, message->bytes, message->length,
                            MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent >= 0) {
            free(dequeue(relay));
        } else if (errno == EAGAIN || errno == ENOBUFS) {
            /* Short wait without the lock, because the socket may be replaced meanwhile. */
            struct pollfd room = {relay->requests_fd, POLLOUT, 0};
            pthread_mutex_unlock(&relay->lock);
            poll(&room, 1, 10);
            pthread_mutex_lock(&relay->lock);
        } else if (errno != EINTR) {
            lose_daemon(relay);
        }
    }
    pthread_mutex_unlock(&relay->lock);
    return NULL;
}

/* Returns the next notice, first those of a dead daemon. The caller must hold `lock`, and owns
 * it. */
static struct message *next_notice(struct relay *relay) {
    struct message *notice = relay->first_notice;
    if (notice == NULL) return receive_notice(relay);
    relay->first_notice = notice->next;
    if (relay->first_notice == NULL) relay->last_notice = &relay->first_notice;
    return notice;
}

/* A thread: writes the daemon's notices (names to drop) to the kernel. The kernel drops a name
 * only when no look-up is under way in its directory. Until then it blocks the writer, in a
 * sleep that not even SIGKILL ends. So the daemon must not be the writer: a blocked daemon could
 * not die, so no new daemon could start and answer that look-up. */
static void *pass_notices_on(void *argument) {
    struct relay *relay = argument;
    pthread_mutex_lock(&relay->lock);
    while (!GET(relay->stopping)) {
        struct message *notice = next_notice(relay);
        struct pollfd said = {relay->requests_fd, POLLIN, 0};
        if (notice == NULL && (relay->requests_fd < 0 || relay->says_nothing)) {
            pthread_cond_wait(&relay->has_daemon, &relay->lock);
            continue;
        }
        pthread_mutex_unlock(&relay->lock);
        if (notice == NULL)
            poll(&said, 1, -1);
        else if (write(relay->device_fd, notice->bytes, notice->length) < 0) {
            /* ENOENT: the kernel has not cached the name */
        }
        free(notice);
        pthread_mutex_lock(&relay->lock);
    }
    pthread_mutex_unlock(&relay->lock);
    return NULL;
}

/* -- reading cached blocks --------------------------------------------------------------------- */

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

static uint64_t opened_file(struct relay *relay, uint32_t file) {
    return atomic_load_explicit(&relay->files[file], memory_order_acquire);
}

static int fd_of(uint64_t opened) { return (int)(opened & (WAITS - 1)) - 1; }

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
 * disk are compared on every read, in the memory from which they are sent. */
static bool read_piece(struct worker *worker, struct piece *piece, int disk_flags, char *data) {
    struct rt_table *table = &worker->relay->table;
    uint64_t opened = piece->opened = opened_file(worker->relay, piece->found.file);
    if (opened == 0) return false;
    if (opened & WAITS || GET(table->header->verify_all))
        return sums_read(table, fd_of(opened), &piece->found, piece->within, piece->length,
                         opened & WAITS ? disk_flags : 0, data, worker->scratch);
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

/* A thread: requests the queued blocks by posix_fadvise(2). */
static void *tell_disk(void *argument) {
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
        if (opened & WAITS)
            posix_fadvise(fd_of(opened), (off_t)found.slot * RT_SLOT_UNIT, found.length, POSIX_FADV_WILLNEED);
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
        if (opened_file(relay, found.file) & WAITS) want_ahead(relay, &found);
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
    if (ADD(relay->waiting_count, 1) + SPARE_THREADS >= relay->thread_count) {
        ADD(relay->waiting_count, -1);
        return false;
    }
    waiting_note(&relay->waiting, (const struct fuse_in_header *)request);
    if (worker->leads) { /* another thread answers new requests meanwhile */
        worker->leads = false;
        sem_post(&relay->lead);
    }
    pthread_mutex_lock(&worker->lock);
    memcpy(worker->waiting, request, length);
    worker->waiting_length = length;
    worker->since_ns = now_ns();
    worker->state = WAITING;
    pthread_mutex_unlock(&worker->lock);
    bool is_read = read_pieces(worker, pieces, count, 0);
    ADD(relay->waiting_count, -1);
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

/* Answers a READ from slab files. True if it was answered, or was handed over to the daemon.
 * False if the caller must forward it; the handle in `request` then holds inode and user number. */
static bool answer_read(struct worker *worker, char *request, size_t length) {
    struct relay *relay = worker->relay;
    struct rt_header *h = relay->table.header;
    struct fuse_in_header *in = (struct fuse_in_header *)request;
    struct fuse_read_in *read_in = (struct fuse_read_in *)(in + 1);
    struct piece pieces[MOST_PIECES];
    int count;

    if (length < sizeof *in + sizeof *read_in) return false;
    uint64_t began_ns = now_ns();
    uint32_t user = rt_user(&relay->table, in->uid);
    read_in->fh = in->nodeid | (uint64_t)user << INO_BITS;
    if (GET(h->paused) || GET(relay->table.limited[user])) return false;
    if (read_in->size > BLOCK_BYTES) return false;
    ssize_t bytes = locate(relay, in->nodeid, read_in->offset, read_in->size, pieces, &count);
    if (bytes < 0 || !are_open(relay, pieces, count)) return false;

    bool is_read = read_pieces(worker, pieces, count, RWF_NOWAIT);
    bool waited = !is_read;
    if (read_in->size >= SEQUENTIAL_BYTES)
        read_ahead(relay, in->nodeid, read_in->offset, waited);
    if (waited) is_read = read_slowly(worker, pieces, count, request, length);
    for (int i = 0; i < count && is_read; i++) {
        if (!rt_still(&relay->table, &pieces[i].found) || !is_same_file(relay, &pieces[i])) {
            ADD(h->changed, 1);
            is_read = false;
        }
    }
    if (waited && was_handed_over(worker)) return true;
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
    if (worker->state == WAITING && now_ns() > worker->since_ns + PATIENCE_NS) {
        worker->state = HANDED_OVER;
        length = worker->waiting_length;
        memcpy(copy, worker->waiting, length);
    }
    pthread_mutex_unlock(&worker->lock);
    return length;
}

/* A thread: hands READs that wait too long for a disk over to the daemon, which may have the bytes
 * elsewhere; and answers the requests of killed processes. */
static void *look_after(void *argument) {
    struct relay *relay = argument;
    struct timespec pause = {0, LOOK_NS};
    char copy[SMALL_REQUEST];
    while (!GET(relay->stopping)) {
        nanosleep(&pause, NULL);
        if (GET(relay->waiting.looked_at) > 0) waiting_look(&relay->waiting);
        if (GET(relay->waiting_count) == 0) continue;
        for (unsigned i = 0; i < relay->thread_count + HELPERS; i++) {
            size_t length = take_over(&relay->workers[i], copy);
            if (length == 0) continue;
            ADD(relay->table.header->late, 1);
            forward(relay, copy, length);
        }
    }
    return NULL;
}

/* -- requests ---------------------------------------------------------------------------------- */

/* Stores a copy of the kernel's INIT for later daemons, and notes whether the kernel can resend. */
static void keep_init(struct relay *relay, const char *request, size_t length) {
    const struct fuse_in_header *in = (const struct fuse_in_header *)request;
    const uint32_t *fields = (const uint32_t *)(in + 1); /* major, minor, readahead, flags, flags2 */
    pthread_mutex_lock(&relay->lock);
    free(relay->init);
    relay->init = message_of(request, length);
    if (length >= sizeof *in + 5 * sizeof *fields && (fields[3] & INIT_EXT))
        relay->can_resend = (fields[4] & HAS_RESEND_HIGH) != 0 && !relay->pretends_not;
    pthread_mutex_unlock(&relay->lock);
}

/* Answers the request in `worker->request`, or forwards it. */
static void handle(struct worker *worker, size_t length) {
    struct relay *relay = worker->relay;
    char *request = worker->request;
    struct fuse_in_header *in = (struct fuse_in_header *)request;
    switch (in->opcode) {
    case FUSE_READ:
        if (answer_read(worker, request, length)) return;
        ADD(relay->table.header->missed, 1);
        break;
    case FUSE_OPEN:      /* ENOSYS: the kernel sends each of the three only once per mount */
    case FUSE_OPENDIR:
    case FUSE_FLUSH:
        reply(relay, in->unique, -ENOSYS, NULL, 0);
        return;
    case FUSE_IOCTL:     /* Python's open() sends it for every file: isatty() */
        reply(relay, in->unique, -ENOTTY, NULL, 0);
        return;
    case FUSE_READDIR:
    case FUSE_READDIRPLUS:
        if (length >= sizeof *in + sizeof(struct fuse_read_in))
            ((struct fuse_read_in *)(in + 1))->fh = in->nodeid;
        break;
    case FUSE_FORGET:    /* no state per look-up; FORGET and BATCH_FORGET have no answer */
    case FUSE_BATCH_FORGET:
        return;
    case FUSE_INTERRUPT:
        if (length >= sizeof *in + sizeof(struct fuse_interrupt_in))
            waiting_interrupt(&relay->waiting, in);
        return;
    case FUSE_INIT:
        keep_init(relay, request, length);
        break;
    }
    forward(relay, request, length);
}

/* Wakes all threads, fails unanswered requests, and makes `ended_fd` readable. Runs once. */
static void end(struct relay *relay) {
    uint64_t one = 1;
    pthread_mutex_lock(&relay->lock);
    if (relay->requests_fd >= 0) shutdown(relay->requests_fd, SHUT_RDWR);
    pthread_cond_signal(&relay->has_queue);
    pthread_cond_signal(&relay->has_daemon);
    pthread_mutex_unlock(&relay->lock);
    waiting_fail(&relay->waiting, -ENOTCONN);
    for (unsigned i = 0; i < relay->thread_count; i++) sem_post(&relay->lead);
    for (unsigned i = 0; i < HELPERS; i++) sem_post(&relay->help);
    sem_post(&relay->has_ahead);
    while (write(relay->ended_fd, &one, sizeof one) < 0 && errno == EINTR) {}
}

/* Reads a request into `worker->request`. Returns its length in bytes; 0 if there is none.
 * Begins the end of the relay if the mount has ended. */
static ssize_t next_request(struct worker *worker) {
    struct relay *relay = worker->relay;
    ssize_t length = read(relay->device_fd, worker->request, REQUEST_BYTES);
    if (length >= (ssize_t)sizeof(struct fuse_in_header)) return length;
    if (length < 0 && errno != EINTR && errno != EAGAIN && errno != ENOENT)
        if (!atomic_exchange(&relay->stopping, true)) end(relay);
    return 0;
}

/* Waits for a request. Returns its length in bytes; 0 if there is none after all.
 *
 * A process that reads file after file sends its next request sooner than a sleeping CPU wakes
 * (fuse/loop.py has the figures). So this thread polls for SPIN_NS before it sleeps. With half
 * of SPIN_NS and QUICK_NS, a slow pace persisted: two wake-ups and the reader's own work took
 * longer than QUICK_NS. Measured in a virtual machine with Python's open(): 3 k files/s with
 * half, 8-9 k now. */
static ssize_t await_request(struct worker *worker, bool *is_quick) {
    struct relay *relay = worker->relay;
    struct pollfd awaited[2] = {{relay->device_fd, POLLIN, 0}, {relay->ended_fd, POLLIN, 0}};
    uint64_t began_ns = now_ns();
    ssize_t length;
    do {
        length = next_request(worker);
        if (length > 0 || GET(relay->stopping)) {
            *is_quick = true;
            return length;
        }
    } while (*is_quick && now_ns() < began_ns + SPIN_NS);
    poll(awaited, 2, -1);
    *is_quick = now_ns() < began_ns + QUICK_NS;
    return next_request(worker);
}

/* A thread. One leader at a time waits for requests, and answers those that need no wait. When it
 * must wait for a disk, it posts the semaphore `lead`, and another thread becomes the leader. */
static void *lead(void *argument) {
    struct worker *worker = argument;
    struct relay *relay = worker->relay;
    struct pollfd device = {relay->device_fd, POLLIN, 0};
    while (!GET(relay->stopping)) {
        while (sem_wait(&relay->lead) < 0) {}
        worker->leads = true;
        bool is_quick = false;
        while (worker->leads && !GET(relay->stopping)) {
            ssize_t length = await_request(worker, &is_quick);
            if (length <= 0) continue;
            if (GET(relay->idle_helpers) > 0 && poll(&device, 1, 0) == 1) sem_post(&relay->help);
            handle(worker, (size_t)length);
        }
    }
    return NULL;
}

/* A thread: works while there is more than one request, and sleeps when there is none. */
static void *help(void *argument) {
    struct worker *worker = argument;
    struct relay *relay = worker->relay;
    while (!GET(relay->stopping)) {
        ADD(relay->idle_helpers, 1);
        while (sem_wait(&relay->help) < 0) {}
        ADD(relay->idle_helpers, -1);
        ssize_t length;
        while ((length = next_request(worker)) > 0) handle(worker, (size_t)length);
    }
    return NULL;
}

/* -- life -------------------------------------------------------------------------------------- */

struct relay *relay_new(int device_fd, int table_fd, unsigned threads, int *error) {
    struct relay *relay = calloc(1, sizeof *relay);
    *error = ENOMEM;
    if (relay == NULL) return NULL;
    relay->device_fd = device_fd;
    relay->requests_fd = -1;
    relay->last = &relay->first;
    relay->last_notice = &relay->first_notice;
    relay->thread_count = threads < 2 ? 2 : threads > MOST_THREADS ? MOST_THREADS : threads;
    relay->workers = calloc(relay->thread_count + HELPERS, sizeof *relay->workers);
    relay->files = calloc(RT_FILES, sizeof *relay->files);
    relay->ended_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&relay->lock, NULL);
    pthread_cond_init(&relay->has_queue, NULL);
    pthread_cond_init(&relay->has_daemon, NULL);
    sem_init(&relay->lead, 0, 1);
    sem_init(&relay->help, 0, 0);
    sem_init(&relay->has_ahead, 0, 0);
    pthread_mutex_init(&relay->ahead_lock, NULL);
    *error = relay->ended_fd < 0 ? errno : -rt_open(&relay->table, table_fd);
    if (*error == 0) *error = waiting_init(&relay->waiting, device_fd);
    /* The daemon shares the open file, but O_NONBLOCK does not disturb it: it only writes. */
    if (*error == 0 && fcntl(device_fd, F_SETFL, fcntl(device_fd, F_GETFL) | O_NONBLOCK) < 0)
        *error = errno;
    if (relay->workers == NULL || relay->files == NULL) *error = ENOMEM;
    for (unsigned i = 0; i < relay->thread_count + HELPERS && *error == 0; i++) {
        struct worker *worker = &relay->workers[i];
        worker->relay = relay;
        pthread_mutex_init(&worker->lock, NULL);
        worker->request = malloc(REQUEST_BYTES);
        worker->data = malloc(BLOCK_BYTES);
        worker->scratch = malloc(BLOCK_BYTES);
        if (worker->request == NULL || worker->data == NULL || worker->scratch == NULL) *error = ENOMEM;
    }
    return *error == 0 ? relay : NULL; /* on failure, memory is freed only with the process */
}

int relay_start(struct relay *relay) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the main thread handles all signals */
    int error = pthread_create(&relay->queue_thread, NULL, send_queue, relay);
    if (error == 0) error = pthread_create(&relay->looker, NULL, look_after, relay);
    if (error == 0) error = pthread_create(&relay->ahead_thread, NULL, tell_disk, relay);
    if (error == 0) error = pthread_create(&relay->notice_thread, NULL, pass_notices_on, relay);
    for (unsigned i = 0; i < relay->thread_count + HELPERS && error == 0; i++)
        error = pthread_create(&relay->workers[i].thread, NULL,
                               i < relay->thread_count ? lead : help, &relay->workers[i]);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return -error;
}

int relay_attach(struct relay *relay, int requests_fd) {
    int error = 0, fd = dup(requests_fd);
    if (fd < 0) return -errno;
    pthread_mutex_lock(&relay->lock);
    lose_daemon(relay);
    if (relay->init != NULL) {
        struct message *init = message_of(relay->init->bytes, relay->init->length);
        ((struct fuse_in_header *)init->bytes)->unique = RELAY_INIT_UNIQUE;
        if (send(fd, init->bytes, init->length, MSG_NOSIGNAL) < 0) error = -errno;
        free(init);
    }
    if (error == 0) relay->requests_fd = fd;
    relay->says_nothing = false;
    pthread_cond_signal(&relay->has_queue);
    pthread_cond_signal(&relay->has_daemon);
    pthread_mutex_unlock(&relay->lock);
    if (error != 0) close(fd);
    return error;
}

void relay_detach(struct relay *relay) {
    pthread_mutex_lock(&relay->lock);
    lose_daemon(relay);
    pthread_mutex_unlock(&relay->lock);
}

bool relay_resend(struct relay *relay) {
    pthread_mutex_lock(&relay->lock);
    bool can_resend = relay->can_resend;
    uint64_t count = relay->unique_count < UNIQUES ? relay->unique_count : UNIQUES;
    /* No daemon has received the queued requests yet. The next one will answer them. */
    if (!can_resend) {
        for (uint64_t i = 0; i < count; i++) {
            bool is_queued = false;
            for (struct message *m = relay->first; m != NULL && !is_queued; m = m->next)
                is_queued = ((struct fuse_in_header *)m->bytes)->unique == relay->uniques[i];
            if (!is_queued) reply(relay, relay->uniques[i], -EIO, NULL, 0);
        }
        relay->unique_count = 0;
    }
    pthread_mutex_unlock(&relay->lock);
    if (can_resend) {
        struct fuse_out_header out = {sizeof out, NOTIFY_RESEND, 0};
        if (write(relay->device_fd, &out, sizeof out) < 0) return false;
    }
    return can_resend;
}

int relay_set_file(struct relay *relay, uint32_t file, int fd, bool blocks) {
    if (file >= RT_FILES) {
        close(fd);
        return -EINVAL;
    }
    uint64_t number = ADD(relay->opened_count, 1);
    uint64_t opened = number << 32 | (blocks ? WAITS : 0) | (uint32_t)(fd + 1);
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

int relay_ended_fd(struct relay *relay) { return relay->ended_fd; }

void relay_stop(struct relay *relay) {
    if (!atomic_exchange(&relay->stopping, true)) end(relay);
}

void relay_pretend_no_resend(struct relay *relay) {
    pthread_mutex_lock(&relay->lock);
    relay->pretends_not = true;
    relay->can_resend = false;
    pthread_mutex_unlock(&relay->lock);
}

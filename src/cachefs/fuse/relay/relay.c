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

/* Of linux/fuse.h of Linux 6.9; older headers lack them. */
#define NOTIFY_RESEND 7
#define INIT_EXT (1u << 30)
#define HAS_RESEND_HIGH (1u << (39 - 32))

#define INO_BITS 48            /* of a handle; the user's number stands above (uid_limits.py) */
#define BLOCK_BYTES (1u << RT_BLOCK_SHIFT)
#define MOST_PIECES 3          /* a READ of 1 MiB touches two blocks */
#define NOTICE_BYTES 2048      /* a name has 1,024 at most */
#define REQUEST_BYTES (BLOCK_BYTES + 65536) /* the kernel refuses less than max_write and a header */
#define SMALL_REQUEST 512      /* of a READ there is no more than 80 bytes */
#define UNIQUES (1u << 16)

#define MOST_THREADS 64
#define HELPERS 1              /* more than two processors' worth of hits nobody has asked for yet */
#define SPARE_THREADS 1        /* that never wait for a disk: somebody must answer the rest */
#define PATIENCE_NS 250000000ull
#define LOOK_NS 50000000ull
#define SPIN_NS 100000ull
#define SEQUENTIAL_BYTES (512u << 10)
#define AHEAD_BLOCKS 4
#define AHEAD_MOST 64          /* blocks that are to be read ahead; more are forgotten */
#define QUICK_NS 500000ull

#define WAITS (1u << 31)       /* in `files`: reads may wait for a disk */

enum { IDLE, WAITING, HANDED_OVER };

struct piece {
    struct rt_found found;
    uint32_t within, length;
    uint64_t opened;              /* what `files` said when it was read */
};

struct worker {
    struct relay *relay;
    pthread_t thread;
    char *request, *data, *scratch;
    bool leads;

    pthread_mutex_t lock;         /* of what follows: for `look_after` */
    int state;
    uint64_t since_ns;
    size_t waiting_length;
    char waiting[SMALL_REQUEST];  /* the READ, while `state` is WAITING */
};

struct message {
    struct message *next;
    size_t length;
    char bytes[];
};

struct relay {
    int device_fd, ended_fd;
    struct rt_table table;
    struct waiting waiting;         /* what is not answered at once */
    unsigned thread_count;
    struct worker *workers;         /* [thread_count + HELPERS] */
    pthread_t looker;
    _Atomic bool stopping;
    _Atomic unsigned waiting_count; /* threads that wait for a disk */
    sem_t lead, help;

    pthread_t ahead_thread;
    sem_t has_ahead;
    pthread_mutex_t ahead_lock;     /* of what follows: a ring */
    struct rt_found ahead[AHEAD_MOST];
    unsigned ahead_first, ahead_count;

    _Atomic int idle_helpers;
    _Atomic uint64_t *files;        /* [RT_FILES] fd + 1, WAITS, and above a number that never comes
                                       again; 0: it is not open here */
    _Atomic uint32_t opened_count;

    pthread_mutex_t lock;           /* of what follows */
    pthread_cond_t has_queue;
    int requests_fd;                /* -1: no daemon */
    bool can_resend, pretends_not;
    struct message *init;           /* as the kernel sent it */
    struct message *first, **last;  /* what the socket had no room for */
    uint64_t uniques[UNIQUES];      /* of the latest forwarded requests; for kernels that can't */
    uint64_t unique_count;          /* resend */
    pthread_t queue_thread;
    struct message *first_notice, **last_notice; /* for the kernel, of a daemon that has gone */
    bool says_nothing;              /* the daemon's end of the socket is closed */
    pthread_cond_t has_daemon;
    pthread_t notice_thread;
};

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

/* -- replies ------------------------------------------------------------------------------------ */

/* ENOENT is no failure: the request was broken off, or is to be answered under another number
 * since it was sent again. */
static void reply(struct relay *relay, uint64_t unique, int error, const void *data, size_t length) {
    struct fuse_out_header out = {(uint32_t)(sizeof out + length), error, unique};
    struct iovec parts[2] = {{&out, sizeof out}, {(void *)data, length}};
    while (writev(relay->device_fd, parts, length ? 2 : 1) < 0 && errno == EINTR) {}
}

/* -- forwarding --------------------------------------------------------------------------------- */

static struct message *message_of(const void *bytes, size_t length) {
    struct message *message = malloc(sizeof *message + length);
    if (message == NULL) abort(); /* a lost request would hang its caller for ever */
    message->next = NULL;
    message->length = length;
    memcpy(message->bytes, bytes, length);
    return message;
}

static void enqueue(struct relay *relay, const void *bytes, size_t length) {
    *relay->last = message_of(bytes, length);
    relay->last = &(*relay->last)->next;
    pthread_cond_signal(&relay->has_queue);
}

static struct message *dequeue(struct relay *relay) {
    struct message *message = relay->first;
    if (message == NULL) return NULL;
    relay->first = message->next;
    if (relay->first == NULL) relay->last = &relay->first;
    return message;
}

/* A notice from the daemon, if there is one. */
static struct message *receive_notice(struct relay *relay) {
    char bytes[NOTICE_BYTES];
    if (relay->requests_fd < 0 || relay->says_nothing) return NULL;
    ssize_t length = recv(relay->requests_fd, bytes, sizeof bytes, MSG_DONTWAIT);
    if (length >= (ssize_t)sizeof(struct fuse_out_header)) return message_of(bytes, (size_t)length);
    if (length == 0 || (length < 0 && errno != EAGAIN && errno != EINTR)) relay->says_nothing = true;
    return NULL;
}

static void lose_daemon(struct relay *relay) {
    if (relay->requests_fd < 0) return;
    struct message *notice;
    while ((notice = receive_notice(relay)) != NULL) {
        *relay->last_notice = notice;
        relay->last_notice = &notice->next;
    }
    shutdown(relay->requests_fd, SHUT_RDWR); /* whoever polls it looks again */
    close(relay->requests_fd);
    relay->requests_fd = -1;
    /* What is queued was not taken by anybody. The kernel sends it again if it can. */
    while (relay->can_resend && relay->first != NULL) free(dequeue(relay));
}

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
        enqueue(relay, bytes, length); /* the one that found the daemon gone */
    pthread_mutex_unlock(&relay->lock);
}

/* Sends what the socket had no room for, as it gets room. */
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
            /* A short wait, without the lock: the socket may be another one afterwards. */
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

static struct message *next_notice(struct relay *relay) {
    struct message *notice = relay->first_notice;
    if (notice == NULL) return receive_notice(relay);
    relay->first_notice = notice->next;
    if (relay->first_notice == NULL) relay->last_notice = &relay->first_notice;
    return notice;
}

/* The kernel drops a name only when nobody looks anything up in its directory, and until then it
 * holds whoever told it so, in a sleep that not even SIGKILL ends. So that is not the daemon: one that
 * could not die would keep the next from coming, which is to answer that very look-up. */
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
            /* ENOENT: the kernel does not know the name */
        }
        free(notice);
        pthread_mutex_lock(&relay->lock);
    }
    pthread_mutex_unlock(&relay->lock);
    return NULL;
}

/* -- reading cached blocks ------------------------------------------------------------------------ */

/* The pieces of a READ, if all of it is cached. Returns how many bytes there are, or -1. */
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

static bool are_open(struct relay *relay, const struct piece *pieces, int count) {
    for (int i = 0; i < count; i++)
        if (opened_file(relay, pieces[i].found.file) == 0) return false;
    return true;
}

/* After the bytes were copied, and after a fence: the descriptor was that file's all the time. */
static bool is_same_file(struct relay *relay, const struct piece *piece) {
    return GET(relay->files[piece->found.file]) == piece->opened;
}

/* Disks forget, and lose what was written to them; and nobody can tell which pages of a slab the
 * kernel has read from the disk since they were compared last. So whatever comes from a file on a
 * disk is compared in the memory from which it is sent, each time. */
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

/* True if all of it could be read, and is right. `disk_flags`: RWF_NOWAIT for what is in memory, 0
 * for what a disk has to read, in whatever time that takes. */
static bool read_pieces(struct worker *worker, struct piece *pieces, int count, int disk_flags) {
    char *data = worker->data;
    for (int i = 0; i < count; i++) {
        if (!read_piece(worker, &pieces[i], disk_flags, data)) return false;
        data += pieces[i].length;
    }
    return true;
}

/* The kernel reads ahead of a sequential reader in large pieces, and knows one file; its blocks lie
 * here and there in slabs. So the disk is told which come next: all of them at first, and then one
 * more each time. A thread of its own tells it: a disk that is sick may keep that thread. */
static void want_ahead(struct relay *relay, const struct rt_found *found) {
    pthread_mutex_lock(&relay->ahead_lock);
    bool has_room = relay->ahead_count < AHEAD_MOST;
    if (has_room) relay->ahead[(relay->ahead_first + relay->ahead_count++) % AHEAD_MOST] = *found;
    pthread_mutex_unlock(&relay->ahead_lock);
    if (has_room) sem_post(&relay->has_ahead);
}

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

/* Waits for a disk, unless too many do: the daemon, too, has threads for that. While it waits the
 * request may be handed over to the daemon by `look_after`. */
static bool read_slowly(struct worker *worker, struct piece *pieces, int count,
                        const char *request, size_t length) {
    struct relay *relay = worker->relay;
    if (length > SMALL_REQUEST) return false;
    if (ADD(relay->waiting_count, 1) + SPARE_THREADS >= relay->thread_count) {
        ADD(relay->waiting_count, -1);
        return false;
    }
    waiting_note(&relay->waiting, (const struct fuse_in_header *)request);
    if (worker->leads) { /* somebody else answers what comes meanwhile */
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

static bool was_handed_over(struct worker *worker) {
    pthread_mutex_lock(&worker->lock);
    int state = worker->state;
    worker->state = IDLE;
    pthread_mutex_unlock(&worker->lock);
    return state == HANDED_OVER;
}

/* True if the READ was answered, or is somebody else's business now. */
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

/* The READ of a worker that has waited too long for a disk, if it has. */
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

/* Requests that wait too long for a disk go to the daemon, which knows other places; and who is
 * killed waits no longer. */
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

/* -- requests ------------------------------------------------------------------------------------ */

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

static void handle(struct worker *worker, size_t length) {
    struct relay *relay = worker->relay;
    char *request = worker->request;
    struct fuse_in_header *in = (struct fuse_in_header *)request;
    switch (in->opcode) {
    case FUSE_READ:
        if (answer_read(worker, request, length)) return;
        ADD(relay->table.header->missed, 1);
        break;
    case FUSE_OPEN:      /* once each: the kernel does not send them again on this mount */
    case FUSE_OPENDIR:
    case FUSE_FLUSH:
        reply(relay, in->unique, -ENOSYS, NULL, 0);
        return;
    case FUSE_IOCTL:     /* Python's open() asks of every file whether it is a terminal */
        reply(relay, in->unique, -ENOTTY, NULL, 0);
        return;
    case FUSE_READDIR:
    case FUSE_READDIRPLUS:
        if (length >= sizeof *in + sizeof(struct fuse_read_in))
            ((struct fuse_read_in *)(in + 1))->fh = in->nodeid;
        break;
    case FUSE_FORGET:    /* nothing is held per look-up; these two want no answer */
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

/* The next request, if there is one. */
static ssize_t next_request(struct worker *worker) {
    struct relay *relay = worker->relay;
    ssize_t length = read(relay->device_fd, worker->request, REQUEST_BYTES);
    if (length >= (ssize_t)sizeof(struct fuse_in_header)) return length;
    if (length < 0 && errno != EINTR && errno != EAGAIN && errno != ENOENT)
        if (!atomic_exchange(&relay->stopping, true)) end(relay);
    return 0;
}

/* A process that reads file after file sends its next request sooner than a sleeping CPU wakes
 * (fuse/loop.py has the figures): look for it a while before going to sleep. With half of these
 * times the slow pace kept itself up: two wake-ups and the reader's own work took longer than
 * QUICK_NS (in a virtual machine; Python's open(): 3 k files/s, and 8-9 k with these). */
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

/* One thread waits for requests, and answers those that take no waiting. When it has to wait for a
 * disk, the next one takes its place. */
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

/* The others come when there is more than one request, and go when there is none. */
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

/* -- life ----------------------------------------------------------------------------------------- */

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
    /* The daemon shares the descriptor, but only writes to it. */
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
    return *error == 0 ? relay : NULL; /* what a failed one leaves is freed with the process */
}

int relay_start(struct relay *relay) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the main thread */
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
    /* What waits in the queue has not been taken yet, and will be answered. */
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

/* A thread may be about to read from it, or in the middle. It looks afterwards whether the file is
 * still open, and throws away what it has read, from whatever has the descriptor by then, if not. */
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

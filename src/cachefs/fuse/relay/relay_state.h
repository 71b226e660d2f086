/* The state of a relay and of its threads, for relay.c, forwarding.c, cached_reads.c and opens.c
 * only.
 *
 * A relay and its memory are never freed. Fields without a lock are atomic, or constant once the
 * threads run, or have a lock of their own. No thread holds two of the locks at a time.
 */
#ifndef CACHEFS_RELAY_STATE_H
#define CACHEFS_RELAY_STATE_H

#include "atomics.h"
#include "relay.h"
#include "waiting.h"

#include <errno.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/uio.h>
#include <time.h>

#define BLOCK_BYTES (1u << RT_BLOCK_SHIFT)
#define SMALL_REQUEST 512      /* a READ has at most 80 bytes */
#define UNIQUES (1u << 16)
#define HELPERS 1              /* with the leader, two CPUs serve hits; no load has needed more */
#define AHEAD_MOST 64          /* blocks queued for read-ahead; further ones are dropped */
#define ON_DISK (1u << 31)     /* flag in `files`: a read may wait for a disk, and its bytes are compared */

/* A thread that answers requests. It owns its buffers, and alone uses the fields above `lock`. */
struct worker {
    struct relay *relay;
    pthread_t thread;
    char *request, *data, *scratch; /* REQUEST_BYTES, BLOCK_BYTES and BLOCK_BYTES long */
    bool leads;

    pthread_mutex_t lock;         /* protects all fields below, which `look_after` also uses */
    int state;
    uint64_t since_ns;
    size_t at_disk_length;
    char at_disk_request[SMALL_REQUEST]; /* copy of the READ while `state` is WAITING */
};

/* Messages in order of arrival, for forwarding.c. The list owns them. */
struct message_list {
    struct message *first, **last; /* `last`: where the next one is linked */
};

struct relay {
    int device_fd, ended_fd;        /* borrowed; owned */
    struct rt_table table;
    struct waiting waiting;         /* requests that are not answered at once */
    unsigned thread_count;
    struct worker *workers;         /* [thread_count + HELPERS] */
    pthread_t looker, ahead_thread, queue_thread, notice_thread, ending_thread; /* run `look_after`,
                                       `tell_disk`, `send_queue`, `pass_notices_on` and
                                       `end_registrations` */
    _Atomic bool stopping;
    _Atomic bool reads_no_more;     /* workers end, and all other threads go on unless `stopping` */
    sem_t lead, help;               /* each post wakes one thread in `lead` or `help` */
    _Atomic int idle_helpers;

    /* For cached_reads.c: */
    _Atomic unsigned at_disk_count; /* threads that wait for a disk */
    _Atomic uint64_t *files;        /* [RT_FILES] low half: fd + 1 and ON_DISK; high half: the number
                                       of the opening, unique until it wraps; 0: not open here. The
                                       code that replaces a value closes the value's descriptor.
                                       For opens.c, too. */
    _Atomic uint32_t opened_count;
    sem_t has_ahead;
    pthread_mutex_t ahead_lock;     /* protects the three fields below: a ring */
    struct rt_found ahead[AHEAD_MOST];
    unsigned ahead_first, ahead_count;

    /* For opens.c: */
    pthread_mutex_t opens_lock;     /* protects the two fields below */
    struct open_inode **opens;      /* a hash table of the inodes that are open */
    struct open_inode *ended;       /* those whose registration `end_registrations` will end */
    sem_t has_ended;

    /* For forwarding.c: */
    pthread_mutex_t lock;           /* protects all fields below */
    pthread_cond_t has_queue;
    int requests_fd;                /* owned; -1: no daemon */
    size_t packet_bytes;            /* the most bytes of one packet; the socket takes two */
    bool can_resend, pretends_not;  /* the kernel's ability; `relay_pretend_no_resend` was called */
    struct message *init;           /* the kernel's INIT; owned */
    struct message_list queue;      /* requests that the socket had no room for */
    uint64_t uniques[UNIQUES];      /* ring of the latest forwarded requests, for kernels that */
    uint64_t unique_count;          /* cannot send them again */
    struct message_list notices;    /* of a dead daemon, for the kernel */
    bool says_nothing;              /* the daemon's end of the socket is closed */
    pthread_cond_t has_daemon;
};

static inline uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

/* The value in `files`; 0 if the file is not open here. */
static inline uint64_t opened_file(struct relay *relay, uint32_t file) {
    return atomic_load_explicit(&relay->files[file], memory_order_acquire);
}

static inline int fd_of(uint64_t opened) { return (int)(opened & (ON_DISK - 1)) - 1; }

/* Writes a reply to the kernel. `error` is 0 or a negative errno. False if the kernel didn't take it.
 * For most requests this is no failure: the request was aborted, or it was sent again and now has
 * another number (ENOENT). */
static inline bool reply(struct relay *relay, uint64_t unique, int error, const void *data,
                         size_t length) {
    struct fuse_out_header out = {(uint32_t)(sizeof out + length), error, unique};
    struct iovec parts[2] = {{&out, sizeof out}, {(void *)data, length}};
    ssize_t written;
    do {
        written = writev(relay->device_fd, parts, length ? 2 : 1);
    } while (written < 0 && errno == EINTR);
    return written >= 0;
}

#endif

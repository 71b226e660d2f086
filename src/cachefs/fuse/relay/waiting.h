/* Unanswered requests. The request of a killed process is answered with EINTR.
 *
 * The kernel reports once, by FUSE_INTERRUPT, that the waiting process has got a signal, but not
 * which one. Only a dying process may receive EINTR: a program that handles the signal goes on, and
 * no program expects EINTR from a file system on a disk. So this code looks the process up in
 * /proc. It repeats this until the request has been answered, because a fatal signal may follow a
 * harmless one.
 *
 * For direct reads (O_DIRECT) the kernel reports no signals, so their processes are checked each
 * time.
 *
 * All functions but `waiting_init` may run in any thread.
 */
#ifndef CACHEFS_WAITING_H
#define CACHEFS_WAITING_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define WAITING_LOOK_NS 50000000 /* interval of `waiting_look` */

struct fuse_in_header;
struct waiting_entry;

struct waiting {
    pthread_mutex_t lock;          /* protects all fields below; held during each write */
    int device_fd;                 /* borrowed; -1 after `waiting_end` */
    struct waiting_entry *entries; /* owned; by request number: a new one replaces an old one */
    _Atomic unsigned looked_at;    /* entries for `waiting_look`; readable without the lock */
};

/* Allocates the entries, which are never freed. `device_fd` stays the caller's. 0 or an errno. */
int waiting_init(struct waiting *waiting, int device_fd);

/* Notes a request that is not answered at once. Call it before the request goes elsewhere. */
void waiting_note(struct waiting *waiting, const struct fuse_in_header *in);

/* Handles a FUSE_INTERRUPT: answers the interrupted request with EINTR if its process is dying. */
void waiting_interrupt(struct waiting *waiting, const struct fuse_in_header *in);

/* Checks interrupted requests and direct reads again. Must be called every WAITING_LOOK_NS. */
void waiting_look(struct waiting *waiting);

/* Returns how many of the noted requests the kernel still waits for, at most one of every 65,536
 * that were noted at about the same time. */
unsigned waiting_count(struct waiting *waiting);

/* Answers all noted requests with `error` (negative), because no answer will come any more. */
void waiting_fail(struct waiting *waiting, int error);

/* Stops all writes to the descriptor. After the return, the caller may close it. */
void waiting_end(struct waiting *waiting);

#endif

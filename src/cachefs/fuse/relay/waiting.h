/* Requests that somebody waits for, and those of them whose waiter has been killed.
 *
 * The kernel says once that a signal has come for a waiter (FUSE_INTERRUPT), whatever the signal. Only
 * who dies may be given EINTR: a program that handles the signal goes on, and expects EINTR from no
 * file system on a disk. So who waits is looked up in /proc, and looked at again until the request has
 * been answered: a fatal signal may follow a harmless one.
 *
 * Of direct reads (O_DIRECT) the kernel says nothing: their processes are looked at every time.
 */
#ifndef CACHEFS_WAITING_H
#define CACHEFS_WAITING_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct fuse_in_header;
struct waiting_entry;

struct waiting {
    pthread_mutex_t lock;          /* of what follows */
    int device_fd;                 /* -1: the end */
    struct waiting_entry *entries; /* by number of the request; a later one takes an old one's place */
    _Atomic unsigned looked_at;    /* those that `waiting_look` has something to do for */
};

int waiting_init(struct waiting *waiting, int device_fd);  /* 0 or an errno */

/* Somebody else is to answer this request, now or soon. Any thread. */
void waiting_note(struct waiting *waiting, const struct fuse_in_header *in);

/* A FUSE_INTERRUPT has come. Answers the request that it speaks of with EINTR if the waiter dies. */
void waiting_interrupt(struct waiting *waiting, const struct fuse_in_header *in);

/* The same for those who were not dying, and for direct reads: to be called every 50 ms. */
void waiting_look(struct waiting *waiting);

/* Nobody will answer them any more. */
void waiting_fail(struct waiting *waiting, int error);

/* Nothing is written to the descriptor any more. */
void waiting_end(struct waiting *waiting);

#endif

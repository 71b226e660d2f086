/* Bounds how many READs of each user the daemon handles at once ("in hand").
 *
 * The kernel allows a bounded number of read-ahead READs per mount; above it every reader waits. So
 * no user may fill this queue. A READ above the user's share is deferred until an earlier one has
 * been answered. If too many are deferred, READs without a waiting thread fail. A thread that waits
 * for a READ sends no further request, so all its READs before the latest were read-ahead. If a
 * reader needs a page of a failed read-ahead, the kernel requests the page again.
 *
 * All state is process-wide, lives until the process ends, and has no lock: only the daemon's loop
 * thread may call these functions.
 */
#ifndef CACHEFS_READS_H
#define CACHEFS_READS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Allocates the state on the first call. Returns an eventfd, which this module owns and which is
 * readable while `reads_take` has a READ; -errno on failure. */
int reads_init(void);

/* Starts to defer READs. Does nothing unless `reads_init` was called before. Failed READs are
 * answered on `device_fd`, which stays the caller's. */
void reads_begin(int device_fd);

/* Allows at most `most` READs of this user number in hand (0: the default). `is_slow` says that the
 * user has a bandwidth limit: then few of its READs are deferred. */
void reads_share(uint32_t user, uint32_t most, bool is_slow);

/* Takes a new request of any kind, which is copied if it is deferred. True: the caller must handle
 * it now. False: it is deferred, or has already been answered with an error. */
bool reads_admit(const void *request, size_t length);

/* Copies a deferred READ that is due into `buffer` (at least 128 bytes), and returns its length in
 * bytes. Returns 0 if none is due. */
size_t reads_take(void *buffer);

/* Whether `reads_take` has a READ. */
bool reads_are_due(void);

/* Takes back a READ that is in hand and has not been answered. It is due at once. */
void reads_return(const void *request, size_t length);

/* Ends the count of a READ that was in hand; a deferred READ of the same user may become due. Must
 * be called after each reply. Other requests are ignored. */
void reads_answered(uint64_t unique);

#endif

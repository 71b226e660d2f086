/* How many READs of each user the daemon has in hand.
 *
 * The kernel keeps a bounded number of READs ahead of readers under way for the whole mount, and who
 * wants one more waits, whoever it is. So no user's may fill it. A READ above the user's share is kept
 * here until one before it is answered. Of what is kept too many of, those go that nobody waits for:
 * a thread that waits for a READ sends nothing more, so what it sent before its latest was read-ahead.
 * The kernel asks again for a page that a reader turns out to want.
 *
 * All in the daemon, in the thread of its loop.
 */
#ifndef CACHEFS_READS_H
#define CACHEFS_READS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

int reads_init(void);               /* an eventfd, readable when `reads_take` has something; -errno */
void reads_begin(int device_fd);    /* if `reads_init` was called: else nothing is kept */

/* At most `most` READs of this user at a time (there is a default), and whether the user is slow on
 * purpose: then little is kept. */
void reads_share(uint32_t user, uint32_t most, bool is_slow);

/* A request has come. False: it is kept for later, or answered. */
bool reads_admit(const void *request, size_t length);

/* Copies a kept one whose turn has come. 0: there is none. */
size_t reads_take(void *buffer);

void reads_answered(uint64_t unique);

#endif

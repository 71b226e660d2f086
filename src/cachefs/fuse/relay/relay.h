/* The relay: threads between /dev/fuse and the daemon.
 *
 * They answer READs of cached blocks from the slab files (table.h says where blocks lie), and a few
 * requests that have a fixed answer or none. All other requests go to the daemon over a SEQPACKET
 * socket, a long one (WRITE) in several packets that follow one another. The daemon writes its replies directly to /dev/fuse. The daemon may die, and a new one
 * may take its place. The kernel then sends the requests again that the old one had not answered
 * (FUSE_NOTIFY_RESEND, Linux 6.9).
 *
 * A relay is never freed, because its threads may live as long as the process. All functions below
 * may run in any thread once `relay_new` has returned. This code does not use Python.
 */
#ifndef CACHEFS_RELAY_H
#define CACHEFS_RELAY_H

#include "table.h"

/* `unique` of the INIT that is replayed to a new daemon. Its answer is dropped. */
#define RELAY_INIT_UNIQUE 0x7fffffffffffff00ull

struct relay;

/* Makes a relay without starting its threads. `device_fd` becomes non-blocking, stays the caller's,
 * and must stay open for the relay's life. `table_fd` may be closed afterwards. With `passthrough`,
 * the kernel reads whole files directly, if it can and the mount is not `writable` (opens.h). NULL on
 * failure, with a positive errno in `*error`. */
struct relay *relay_new(int device_fd, int table_fd, unsigned threads, bool writable,
                        bool passthrough, int *error);

/* Starts the threads. 0 or -errno. */
int relay_start(struct relay *relay);

/* Forwards to a duplicate of this socket from now on, which the relay owns. A new daemon receives
 * the kernel's INIT first. 0 or -errno. */
int relay_attach(struct relay *relay, int requests_fd);

/* Stops forwarding. Until the next `relay_attach`, requests wait in the kernel (if it can send them
 * again) or in the relay's queue. */
void relay_detach(struct relay *relay);

/* Makes the kernel send unanswered requests again. If it can't, answers those that the last daemon
 * had taken with EIO, and returns false. */
bool relay_resend(struct relay *relay);

/* Uses `fd`, which the relay then owns, for a slab file. `on_disk` says that reads may wait for a
 * disk. 0 or -errno; on failure `fd` is closed. */
int relay_set_file(struct relay *relay, uint32_t file, int fd, bool on_disk);

/* Closes one slab file, or all of them. */
void relay_close_file(struct relay *relay, uint32_t file);
void relay_drop_files(struct relay *relay);

/* Returns an eventfd, which the relay owns and which is readable once the mount has ended. */
int relay_ended_fd(struct relay *relay);

/* Makes the threads end as soon as they can, and fails unanswered requests with ENOTCONN. Does not
 * wait for the threads. A second call does nothing. */
void relay_stop(struct relay *relay);

/* Copies the kernel's INIT to `*bytes`, which the caller frees. Returns its length; 0 if there was
 * none yet. */
size_t relay_kept_init(struct relay *relay, char **bytes);

/* Returns whether the kernel can send unanswered requests again (Linux 6.9). */
bool relay_can_resend(struct relay *relay);

/* Takes over a mount that another relay has left: `init` is what its `relay_kept_init` returned.
 * Call it before `relay_start`, and `relay_resend` afterwards. 0, or -EINVAL if it is no INIT. */
int relay_adopt(struct relay *relay, const char *init, size_t length);

/* Ends all threads that read requests, and waits for their end. The daemon still gets what was
 * read. A second call does nothing. */
void relay_stop_reading(struct relay *relay);

/* Returns how many forwarded requests have no answer yet. */
unsigned relay_unanswered(struct relay *relay);

/* Makes the threads end as soon as they can, as `relay_stop` does, but leaves all unanswered
 * requests to the relay that takes over. If the kernel can't send them again, they fail with EIO. */
void relay_leave(struct relay *relay);

/* For tests: behaves as on Linux before 6.9. */
void relay_pretend_no_resend(struct relay *relay);

#endif

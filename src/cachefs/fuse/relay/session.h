/* The libfuse session of the daemon, which pyfuse3 makes (session.c). Only the daemon's loop thread
 * may call these functions. */
#ifndef CACHEFS_RELAY_SESSION_H
#define CACHEFS_RELAY_SESSION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Connects the next session to the relay: it reads requests from `requests_fd`, which it then owns,
 * and writes replies to `device_fd`, which stays the caller's. With `takes_notices`, invalidations
 * of names go to the socket. */
void session_connect(int requests_fd, int device_fd, bool takes_notices);

/* Negotiates a writable mount in all later answers to INIT (see `edit_init_reply`). */
void session_accept_writes(void);

/* Negotiates passthrough, if the kernel offers it, in all later answers to INIT. Not for a writable
 * mount, whose files are written through this process. */
void session_pass_through(void);

/* Returns the process (the id of its first thread) that sent the request which was read last; 0 if
 * it is not known: the kernel wrote on its own, the process has ended, or it is not visible from this
 * process's pid namespace. Handlers call it before they first wait. */
uint32_t session_request_process(void);

/* Returns the thread that sent the request which was read last, as above, and its user and group. */
uint32_t session_request_caller(uint32_t *uid, uint32_t *gid);

/* What `session_next_read` finds: nothing yet; a READ; or libfuse must read the next request, of any
 * other kind, or the end. */
enum next_request { NEXT_NONE, NEXT_READ, NEXT_FOR_LIBFUSE };

struct next_read {
    const void *request; /* valid until the next call */
    size_t request_bytes;
    uint64_t unique, handle, offset;
    uint32_t size;
};

/* Receives the next request if it is a READ, and sets `*found`. libfuse takes it, unless
 * `session_take_read` is called first: then the caller answers it, and calls `reads_answered`, or
 * gives it back by `reads_return`. Only for a session behind the relay; others get
 * NEXT_FOR_LIBFUSE. */
enum next_request session_next_read(struct next_read *found);
void session_take_read(void);

/* True if a session was connected since the last `session_connect`. */
bool session_is_connected(void);

#endif

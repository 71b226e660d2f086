/* The libfuse session of the daemon, which pyfuse3 makes (session.c). Only the daemon's loop thread
 * may call these functions. */
#ifndef CACHEFS_RELAY_SESSION_H
#define CACHEFS_RELAY_SESSION_H

#include <stdbool.h>
#include <stdint.h>

/* Connects the next session to the relay: it reads requests from `requests_fd`, which it then owns,
 * and writes replies to `device_fd`, which stays the caller's. With `takes_notices`, invalidations
 * of names go to the socket. */
void session_connect(int requests_fd, int device_fd, bool takes_notices);

/* Negotiates a writable mount in all later answers to INIT (see `edit_init_reply`). */
void session_accept_writes(void);

/* Returns the process (the id of its first thread) that sent the request which was read last; 0 if
 * it is not known: the kernel wrote on its own, the process has ended, or it is not visible from this
 * process's pid namespace. Handlers call it before they first wait. */
uint32_t session_request_process(void);

/* Returns the thread that sent the request which was read last, as above, and its user and group. */
uint32_t session_request_caller(uint32_t *uid, uint32_t *gid);

/* True if a session was connected since the last `session_connect`. */
bool session_is_connected(void);

#endif

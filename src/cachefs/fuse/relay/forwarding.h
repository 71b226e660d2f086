/* Requests to the daemon, and its notices to the kernel (forwarding.c). For relay.c and
 * cached_reads.c; relay.h declares the functions that attach and detach a daemon.
 */
#ifndef CACHEFS_RELAY_FORWARDING_H
#define CACHEFS_RELAY_FORWARDING_H

#include "relay_state.h"

/* Must be called once, before the threads start. */
void init_forwarding(struct relay *relay);

/* Wakes the two threads below, which then end if `stopping` is set, and shuts the socket down. */
void end_forwarding(struct relay *relay);

/* Gives a request to the daemon, or to the queue while the socket is full. Without a daemon, the
 * request stays in the kernel if the kernel can send it again, else in the queue. Any thread. */
void forward(struct relay *relay, const void *bytes, size_t length);

/* Stores a copy of the kernel's INIT for later daemons, and notes whether the kernel can resend. */
void keep_init(struct relay *relay, const char *request, size_t length);

/* A thread (`argument`: the relay): sends the queue whenever the socket has room. */
void *send_queue(void *argument);

/* A thread: writes the daemon's notices (names to drop) to the kernel. */
void *pass_notices_on(void *argument);

#endif

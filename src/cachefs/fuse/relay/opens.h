/* OPEN and RELEASE of files (opens.c). For relay.c.
 *
 * Without passthrough, OPEN is answered with ENOSYS. The kernel then sends no other OPEN, and no
 * RELEASE, for as long as the mount lasts, which makes each open(2) much cheaper. With passthrough
 * (FUSE_PASSTHROUGH, Linux 6.9), all OPENs are answered, and the kernel reads a file that lies as a
 * whole in a slab file directly from there.
 */
#ifndef CACHEFS_RELAY_OPENS_H
#define CACHEFS_RELAY_OPENS_H

#include "relay_state.h"

/* Must be called once, before the threads start. With `passthrough`, the first OPEN decides whether
 * it is possible here. 0 or an errno. */
int init_opens(struct relay *relay, bool passthrough);

/* A thread (`argument`: the relay): ends the registrations of files that are open no more. */
void *end_registrations(void *argument);

/* Answers an OPEN (not OPENDIR). Any thread. */
void answer_open(struct relay *relay, const char *request, size_t length);

/* Answers a RELEASE (not RELEASEDIR), of whatever open. Any thread. */
void answer_release(struct relay *relay, const struct fuse_in_header *in);

#endif

/* READs of cached blocks (cached_reads.c). For relay.c; relay.h declares the functions that set and
 * close slab files.
 */
#ifndef CACHEFS_RELAY_CACHED_READS_H
#define CACHEFS_RELAY_CACHED_READS_H

#include "relay_state.h"

/* Must be called once, before the threads start. 0 or an errno. */
int init_cached_reads(struct relay *relay);

/* Answers a READ from slab files. True if it was answered, or was handed over to the daemon.
 * False if the caller must forward it; the handle in `request` then holds inode and user number. */
bool answer_read(struct worker *worker, char *request, size_t length);

/* A thread (`argument`: the relay): requests the blocks that are queued for read-ahead from their
 * disks. */
void *tell_disk(void *argument);

/* A thread: hands READs that wait too long for a disk over to the daemon, which may have the bytes
 * elsewhere; and answers the requests of killed processes. */
void *look_after(void *argument);

#endif

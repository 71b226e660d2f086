/* The relay: threads that stand between /dev/fuse and the daemon.
 *
 * They answer READs of cached blocks from the slab files, as table.h says where these lie, and what
 * needs no answer from anybody; everything else goes to the daemon over a SEQPACKET socket. The
 * daemon writes its replies straight to /dev/fuse. The daemon may die and come again: requests that
 * it had taken are sent again by the kernel (FUSE_NOTIFY_RESEND, Linux 6.9).
 *
 * No Python here.
 */
#ifndef CACHEFS_RELAY_H
#define CACHEFS_RELAY_H

#include "table.h"

/* `unique` of the INIT that is played to a new daemon: nobody waits for its answer. */
#define RELAY_INIT_UNIQUE 0x7fffffffffffff00ull

struct relay;

struct relay *relay_new(int device_fd, int table_fd, unsigned threads, int *error);
int relay_start(struct relay *relay);                      /* 0 or -errno */
int relay_attach(struct relay *relay, int requests_fd);    /* takes a duplicate; 0 or -errno */
void relay_detach(struct relay *relay);
bool relay_resend(struct relay *relay);
int relay_set_file(struct relay *relay, uint32_t file, int fd, bool blocks); /* takes fd over */
void relay_close_file(struct relay *relay, uint32_t file);
void relay_drop_files(struct relay *relay);
int relay_ended_fd(struct relay *relay);
void relay_stop(struct relay *relay);                      /* once; the threads end if they can */
void relay_pretend_no_resend(struct relay *relay);         /* for tests: as on Linux before 6.9 */

#endif

/* Which files are open in the kernel, and how: through the relay ("cached"), or passed through to
 * the slab file that is their content.
 *
 * `opens_lock` protects the table of open inodes and the list of those that are open no more. Files are
 * registered with the kernel while it is held. An inode is in the table from its first OPEN to its
 * last RELEASE.
 *
 * The rules of the kernel (fs/fuse/iomode.c and passthrough.c, Linux 6.9 and later):
 *
 *  - A backing file is registered by an ioctl on /dev/fuse, which needs CAP_SYS_ADMIN and returns a
 *    number, the backing id (fuse_backing_open). The kernel holds the file from then on, so this
 *    process may close it, and it may be unlinked.
 *  - The answer to OPEN decides for the open file: FOPEN_PASSTHROUGH with a backing id, or not.
 *    FOPEN_KEEP_CACHE must not be set with it (FOPEN_PASSTHROUGH_MASK).
 *  - While an inode has an open of one kind, an open of the other kind fails with EIO
 *    (fuse_file_io_open), and so does one with another backing id, even of the same file
 *    (fuse_inode_uncached_io_start). So all opens of an inode that overlap get the same answer.
 *  - The kernel ends an open before it sends its RELEASE (fuse_file_put), and looks the backing id
 *    up after the answer to OPEN. So it never has more opens of an inode than this file counts, and
 *    the id may be closed when the count is 0.
 *  - A read-only backing file doesn't prevent writes: the kernel opens it anew by its path, with the
 *    flags of the open file (backing_file_open). So no OPEN for writing is accepted here.
 *  - A mapping refers to the backing file (backing_file_mmap), not to the open file, and stays after
 *    the RELEASE.
 *
 * Each successful OPEN has exactly one RELEASE. This file counts a request when the kernel has taken
 * the answer, because only then the request has happened:
 *
 *  - A process that is killed waits until an OPEN that was read has been answered, and then closes
 *    the file (fs/fuse/dev.c, request_wait_answer). waiting.h never answers an OPEN with EINTR,
 *    because only forwarded requests are noted there.
 *  - After FUSE_NOTIFY_RESEND, the kernel takes no answer to the old number of a request (ENOENT), and
 *    sends the request again by another number (fs/fuse/dev.c, fuse_resend). Answered requests
 *    are not sent again.
 */
#define _GNU_SOURCE
#include "opens.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

/* From linux/fuse.h of Linux 6.9; older headers lack them. */
#define OPEN_PASSTHROUGH (1u << 7)
#define BACKING_OPEN _IOW(229, 1, struct backing_map)
#define BACKING_CLOSE _IOW(229, 2, uint32_t)

struct backing_map {
    int32_t fd;
    uint32_t flags;
    uint64_t padding;
};

struct open_out {
    uint64_t fh;
    uint32_t open_flags;
    int32_t backing_id;
};

#define BUCKETS 4096u
#define WRITING (O_ACCMODE | O_TRUNC) /* flags of an OPEN that are not O_RDONLY */

/* An inode that is open. Allocated by `enter`, freed by `leave` or `end_registrations`. */
struct open_inode {
    struct open_inode *next; /* in the bucket, or in the list `ended` */
    uint64_t ino;
    uint32_t count;          /* opens, and OPENs that are being answered */
    int32_t backing_id;      /* 0: cached */
};

int init_opens(struct relay *relay, bool passthrough) {
    pthread_mutex_init(&relay->opens_lock, NULL);
    sem_init(&relay->has_ended, 0, 0);
    relay->opens = calloc(BUCKETS, sizeof *relay->opens);
    PUT(relay->table.header->opens_state, passthrough ? RT_OPENS_UNDECIDED : RT_OPENS_OFF);
    return relay->opens == NULL ? ENOMEM : 0;
}

/* -- registrations ------------------------------------------------------------------------------ */

/* Registers a file with the kernel. Returns its backing id, or -errno. */
static int32_t register_file(struct relay *relay, int fd) {
    struct backing_map map = {.fd = fd};
    int id = ioctl(relay->device_fd, BACKING_OPEN, &map);
    return id < 0 ? -errno : id;
}

static void end_registration(struct relay *relay, int32_t backing_id) {
    uint32_t id = (uint32_t)backing_id;
    ioctl(relay->device_fd, BACKING_CLOSE, &id);
}

/* True if OPENs are answered. Decides it at the first call, by registering an empty file in memory:
 * the kernel refuses if it or the answer to INIT lacks FUSE_PASSTHROUGH, or if this process lacks
 * CAP_SYS_ADMIN in the first user namespace. The caller holds `opens_lock`. */
static bool are_opens_answered(struct relay *relay) {
    struct rt_header *h = relay->table.header;
    if (GET(h->opens_state) != RT_OPENS_UNDECIDED) return GET(h->opens_state) == RT_OPENS_ON;
    int fd = memfd_create("cachefs-probe", MFD_CLOEXEC);
    int32_t id = fd < 0 ? -errno : register_file(relay, fd);
    if (fd >= 0) close(fd);
    if (id > 0) end_registration(relay, id);
    PUT(h->through_error, id > 0 ? 0 : (uint32_t)-id);
    PUT(h->opens_state, id > 0 ? RT_OPENS_ON : RT_OPENS_OFF);
    return id > 0;
}

/* Returns 0 if a file can be opened with O_DIRECT, too, else -errno. The kernel opens the backing
 * file with the flags of each open, and would fail with EIO for a reader that asks for it. */
static int32_t try_direct(int fd) {
    char name[40];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    int direct_fd = open(name, O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (direct_fd < 0) return -errno;
    close(direct_fd);
    return 0;
}

/* True if the slab file of block 0 is the content of the inode, and may be passed through. */
static bool is_whole(struct relay *relay, const struct rt_found *first) {
    struct rt_header *h = relay->table.header;
    return GET(h->passes_through) && !GET(h->paused) && first->slot == 0 &&
           GET(relay->table.whole[first->file]);
}

/* Registers the slab file that is the content of an inode. Returns its backing id; 0 if there is none
 * or the kernel refuses it. The caller holds `opens_lock`. */
static int32_t register_inode(struct relay *relay, uint64_t ino) {
    struct rt_found first;
    if (!rt_find(&relay->table, ino, 0, &first) || !is_whole(relay, &first)) return 0;
    uint64_t opened = opened_file(relay, first.file);
    if (opened == 0) return 0;
    int32_t id = try_direct(fd_of(opened));
    if (id == 0) id = register_file(relay, fd_of(opened));
    /* As for a READ: has the number of the descriptor or of the file stood for another one? The
     * bytes of a whole file never change, so it may be withdrawn at any later time. */
    bool is_same = rt_still(&relay->table, &first) && is_whole(relay, &first) &&
                   opened_file(relay, first.file) == opened;
    if (id > 0 && is_same) {
        PUT(relay->table.header->through_error, 0);
        return id;
    }
    if (id > 0) end_registration(relay, id);
    if (id < 0 && is_same) PUT(relay->table.header->through_error, (uint32_t)-id);
    return 0;
}

/* -- open inodes -------------------------------------------------------------------------------- */

/* Returns where the inode is linked, or where it would be. The caller holds `opens_lock`. */
static struct open_inode **place_of(struct relay *relay, uint64_t ino) {
    struct open_inode **place = &relay->opens[(ino * 0x9e3779b97f4a7c15ull >> 32) % BUCKETS];
    while (*place != NULL && (*place)->ino != ino) place = &(*place)->next;
    return place;
}

/* Counts an open of the inode, and returns how it is opened: a backing id, 0 for a cached open. The
 * caller holds `opens_lock`. */
static int32_t enter(struct relay *relay, uint64_t ino) {
    struct open_inode **place = place_of(relay, ino);
    if (*place == NULL) {
        struct open_inode *made = malloc(sizeof *made);
        if (made == NULL) abort(); /* a lost request would block its process for ever */
        *made = (struct open_inode){NULL, ino, 0, register_inode(relay, ino)};
        *place = made;
    }
    (*place)->count++;
    return (*place)->backing_id;
}

/* Ends the count of an open. After the last one of its inode, `end_registrations` ends the
 * registration: if the file was unlinked meanwhile, this frees all its pages and blocks, which takes
 * up to seconds for a large one. */
static void leave(struct relay *relay, uint64_t ino) {
    pthread_mutex_lock(&relay->opens_lock);
    struct open_inode **place = place_of(relay, ino), *inode = *place;
    if (inode != NULL && --inode->count == 0) {
        *place = inode->next;
        if (inode->backing_id > 0) {
            inode->next = relay->ended;
            relay->ended = inode;
            sem_post(&relay->has_ended);
        } else {
            free(inode);
        }
    }
    pthread_mutex_unlock(&relay->opens_lock);
}

void *end_registrations(void *argument) {
    struct relay *relay = argument;
    while (!GET(relay->stopping)) {
        while (sem_wait(&relay->has_ended) < 0) {}
        pthread_mutex_lock(&relay->opens_lock);
        struct open_inode *ended = relay->ended;
        if (ended != NULL) relay->ended = ended->next;
        pthread_mutex_unlock(&relay->opens_lock);
        if (ended != NULL) end_registration(relay, ended->backing_id);
        free(ended);
    }
    return NULL;
}

/* Counts an OPEN, before its answer, and shows the daemon that the inode is used, as READs do. An
 * OPEN that is sent again may count twice. */
static void note_open(struct relay *relay, uint64_t ino, bool is_through) {
    struct rt_found first;
    ADD(relay->table.header->opens, 1);
    if (!is_through) return;
    ADD(relay->table.header->opens_through, 1);
    if (rt_find(&relay->table, ino, 0, &first)) rt_note_hit(&relay->table, &first, 0);
}

void answer_open(struct relay *relay, const char *request, size_t length) {
    const struct fuse_in_header *in = (const struct fuse_in_header *)request;
    const struct fuse_open_in *open_in = (const struct fuse_open_in *)(in + 1);
    pthread_mutex_lock(&relay->opens_lock);
    int error = !are_opens_answered(relay)                ? -ENOSYS
                : length < sizeof *in + sizeof *open_in   ? -EIO
                : (open_in->flags & (uint32_t)WRITING)    ? -EROFS /* remounted, by root */
                                                          : 0;
    int32_t id = error == 0 ? enter(relay, in->nodeid) : 0;
    pthread_mutex_unlock(&relay->opens_lock);
    if (error != 0) {
        reply(relay, in->unique, error, NULL, 0);
        return;
    }
    /* FOPEN_NOFLUSH: FLUSH has nothing to do. FOPEN_KEEP_CACHE: as without OPEN. */
    struct open_out out = {
        in->nodeid, FOPEN_NOFLUSH | (id > 0 ? OPEN_PASSTHROUGH : FOPEN_KEEP_CACHE), id};
    note_open(relay, in->nodeid, id > 0);
    if (!reply(relay, in->unique, 0, &out, sizeof out)) leave(relay, in->nodeid);
}

void answer_release(struct relay *relay, const struct fuse_in_header *in) {
    if (reply(relay, in->unique, 0, NULL, 0)) leave(relay, in->nodeid);
}

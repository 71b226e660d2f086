#define _GNU_SOURCE
#include "waiting.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ENTRIES (1u << 16)
#define INTERRUPT_BIT 1ull /* of the number of an interrupt: the others are even */
#define EXITING 0x4u       /* among the flags of a process, in /proc/PID/stat */

/* Those that end a process unless it handles, ignores or blocks them. */
#define BIT(number) (1ull << ((number) - 1))
#define HARMLESS                                                                                   \
    (BIT(SIGCHLD) | BIT(SIGCONT) | BIT(SIGURG) | BIT(SIGWINCH) | BIT(SIGSTOP) | BIT(SIGTSTP) |     \
     BIT(SIGTTIN) | BIT(SIGTTOU))

enum { INTERRUPTED = 1, DIRECT = 2 };

struct waiting_entry {
    uint64_t unique;
    uint32_t pid; /* of the thread; 0: not known, or not seen from here */
    uint32_t flags;
};

int waiting_init(struct waiting *waiting, int device_fd) {
    waiting->device_fd = device_fd;
    waiting->looked_at = 0;
    waiting->entries = calloc(ENTRIES, sizeof *waiting->entries);
    pthread_mutex_init(&waiting->lock, NULL);
    return waiting->entries == NULL ? ENOMEM : 0;
}

/* With the lock. The number of a request that is sent again differs in the highest bit. */
static struct waiting_entry *place_of(struct waiting *waiting, uint64_t unique) {
    return &waiting->entries[(unique >> 1) % ENTRIES];
}

static void set_flags(struct waiting *waiting, struct waiting_entry *entry, uint32_t flags) {
    waiting->looked_at += (flags != 0) - (entry->flags != 0);
    entry->flags = flags;
}

void waiting_note(struct waiting *waiting, const struct fuse_in_header *in) {
    const struct fuse_read_in *read_in = (const struct fuse_read_in *)(in + 1);
    pthread_mutex_lock(&waiting->lock);
    struct waiting_entry *entry = place_of(waiting, in->unique);
    /* The interrupt may have been faster than the request. */
    uint32_t flags = entry->unique == in->unique ? entry->flags : 0;
    if (in->opcode == FUSE_READ && (read_in->flags & O_DIRECT)) flags |= DIRECT;
    entry->unique = in->unique;
    entry->pid = in->pid;
    set_flags(waiting, entry, flags);
    pthread_mutex_unlock(&waiting->lock);
}

static bool read_file(const char *format, uint32_t pid, char *text, size_t size) {
    char name[64];
    snprintf(name, sizeof name, format, pid);
    int fd = open(name, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t length = read(fd, text, size - 1);
    close(fd);
    if (length <= 0) return false;
    text[length] = 0;
    return true;
}

static uint64_t mask_in(const char *status, const char *name) {
    const char *line = strstr(status, name);
    return line == NULL ? 0 : strtoull(line + strlen(name), NULL, 16);
}

/* What cannot be seen counts as alive. */
static bool is_dying(uint32_t pid) {
    char text[16384]; /* the groups of a process may be many */
    unsigned flags = 0;
    if (pid == 0) return false;
    if (!read_file("/proc/%u/status", pid, text, sizeof text)) return false;
    uint64_t own = mask_in(text, "\nSigPnd:"), pending = own | mask_in(text, "\nShdPnd:");
    if (own & BIT(SIGKILL)) return true; /* so the kernel marks all threads of who gets a fatal one */
    uint64_t kept = mask_in(text, "\nSigBlk:") | mask_in(text, "\nSigIgn:") |
                    mask_in(text, "\nSigCgt:") | HARMLESS;
    const char *tracer = strstr(text, "\nTracerPid:");
    if ((pending & ~kept) && (tracer == NULL || atoi(tracer + 11) == 0)) return true;
    if (!read_file("/proc/%u/stat", pid, text, sizeof text)) return false;
    const char *rest = strrchr(text, ')'); /* then: state, five numbers, flags */
    return rest != NULL && sscanf(rest, ") %*c %*d %*d %*d %*d %*d %u", &flags) == 1 &&
           (flags & EXITING);
}

/* 0, or the errno that the kernel has for it. */
static int answer(struct waiting *waiting, uint64_t unique, int error) {
    struct fuse_out_header out = {sizeof out, error, unique};
    int failure = ENOENT;
    pthread_mutex_lock(&waiting->lock); /* the descriptor stays what it is */
    if (waiting->device_fd >= 0)
        failure = write(waiting->device_fd, &out, sizeof out) < 0 ? errno : 0;
    pthread_mutex_unlock(&waiting->lock);
    return failure;
}

void waiting_fail(struct waiting *waiting, int error) {
    for (unsigned i = 0; i < ENTRIES; i++) {
        pthread_mutex_lock(&waiting->lock);
        uint64_t unique = waiting->entries[i].unique;
        pthread_mutex_unlock(&waiting->lock);
        if (unique != 0) answer(waiting, unique, error);
    }
}

void waiting_end(struct waiting *waiting) {
    pthread_mutex_lock(&waiting->lock);
    waiting->device_fd = -1;
    pthread_mutex_unlock(&waiting->lock);
}

void waiting_interrupt(struct waiting *waiting, const struct fuse_in_header *in) {
    uint64_t unique = ((const struct fuse_interrupt_in *)(in + 1))->unique;
    pthread_mutex_lock(&waiting->lock);
    struct waiting_entry *entry = place_of(waiting, unique);
    if (entry->unique != unique) {
        entry->unique = unique;
        entry->pid = 0;
        set_flags(waiting, entry, 0);
    }
    uint32_t pid = entry->pid;
    set_flags(waiting, entry, entry->flags | INTERRUPTED);
    pthread_mutex_unlock(&waiting->lock);
    if (is_dying(pid)) answer(waiting, unique, -EINTR);
}

/* True while the kernel waits for an answer to it. */
static bool still_waits(struct waiting *waiting, struct waiting_entry entry) {
    if (is_dying(entry.pid)) {
        answer(waiting, entry.unique, -EINTR);
        return false;
    }
    /* This asks for the interrupt again, if there was one; else the kernel calls it wrong (EINVAL). */
    return answer(waiting, entry.unique | INTERRUPT_BIT, -EAGAIN) != ENOENT;
}

void waiting_look(struct waiting *waiting) {
    pthread_mutex_lock(&waiting->lock);
    unsigned left = waiting->looked_at;
    for (unsigned i = 0; i < ENTRIES && left > 0; i++) {
        struct waiting_entry entry = waiting->entries[i];
        if (entry.flags == 0) continue;
        left--;
        pthread_mutex_unlock(&waiting->lock);
        bool waits = still_waits(waiting, entry);
        pthread_mutex_lock(&waiting->lock);
        struct waiting_entry *now = &waiting->entries[i];
        if (!waits && now->unique == entry.unique) set_flags(waiting, now, 0);
    }
    pthread_mutex_unlock(&waiting->lock);
}

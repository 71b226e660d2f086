/* See waiting.h. `lock` of each `struct waiting` protects its entries, which it owns. */
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
#define INTERRUPT_BIT 1ull /* set in an interrupt's number; all other numbers are even */
#define EXITING 0x4u       /* PF_EXITING in the flags field of /proc/PID/stat */

/* Signals outside HARMLESS end a process unless it handles, ignores or blocks them. */
#define BIT(number) (1ull << ((number) - 1))
#define HARMLESS                                                                                   \
    (BIT(SIGCHLD) | BIT(SIGCONT) | BIT(SIGURG) | BIT(SIGWINCH) | BIT(SIGSTOP) | BIT(SIGTSTP) |     \
     BIT(SIGTTIN) | BIT(SIGTTOU))

enum { INTERRUPTED = 1, DIRECT = 2 };

struct waiting_entry {
    uint64_t unique;
    uint32_t pid; /* of the thread; 0: unknown, or in a PID namespace not visible here */
    uint32_t flags; /* if not 0, `waiting_look` checks the entry */
};

int waiting_init(struct waiting *waiting, int device_fd) {
    waiting->device_fd = device_fd;
    waiting->looked_at = 0;
    waiting->entries = calloc(ENTRIES, sizeof *waiting->entries);
    pthread_mutex_init(&waiting->lock, NULL);
    return waiting->entries == NULL ? ENOMEM : 0;
}

/* Returns the place for a request. The caller must hold the lock. A request that the kernel sends
 * again has the highest bit of its number set, which does not change its place. */
static struct waiting_entry *place_of(struct waiting *waiting, uint64_t unique) {
    return &waiting->entries[(unique >> 1) % ENTRIES];
}

/* Sets the flags, and keeps `looked_at` equal to the number of entries with flags. The caller must
 * hold the lock. */
static void set_flags(struct waiting *waiting, struct waiting_entry *entry, uint32_t flags) {
    waiting->looked_at += (flags != 0) - (entry->flags != 0);
    entry->flags = flags;
}

void waiting_note(struct waiting *waiting, const struct fuse_in_header *in) {
    const struct fuse_read_in *read_in = (const struct fuse_read_in *)(in + 1);
    pthread_mutex_lock(&waiting->lock);
    struct waiting_entry *entry = place_of(waiting, in->unique);
    /* Another thread may have handled the interrupt before this request: keep its flag. */
    uint32_t flags = entry->unique == in->unique ? entry->flags : 0;
    if (in->opcode == FUSE_READ && (read_in->flags & O_DIRECT)) flags |= DIRECT;
    entry->unique = in->unique;
    entry->pid = in->pid;
    set_flags(waiting, entry, flags);
    pthread_mutex_unlock(&waiting->lock);
}

/* Reads a file of /proc/PID into `text`, with a final 0. False if there is nothing to read. */
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

/* Returns the signal mask after `name` in the text of /proc/PID/status; 0 if it is missing. */
static uint64_t mask_in(const char *status, const char *name) {
    const char *line = strstr(status, name);
    return line == NULL ? 0 : strtoull(line + strlen(name), NULL, 16);
}

/* True if the thread's process ends, or has a pending signal that will end it. A process that this
 * one cannot see counts as alive. */
static bool is_dying(uint32_t pid) {
    char text[16384]; /* a process may have many groups */
    unsigned flags = 0;
    if (pid == 0) return false;
    if (!read_file("/proc/%u/status", pid, text, sizeof text)) return false;
    uint64_t own = mask_in(text, "\nSigPnd:"), pending = own | mask_in(text, "\nShdPnd:");
    if (own & BIT(SIGKILL)) return true; /* set in all threads after a fatal signal */
    uint64_t survived = mask_in(text, "\nSigBlk:") | mask_in(text, "\nSigIgn:") |
                        mask_in(text, "\nSigCgt:") | HARMLESS;
    const char *tracer = strstr(text, "\nTracerPid:");
    if ((pending & ~survived) && (tracer == NULL || atoi(tracer + 11) == 0)) return true;
    if (!read_file("/proc/%u/stat", pid, text, sizeof text)) return false;
    const char *rest = strrchr(text, ')'); /* after it: state, five numbers, flags */
    return rest != NULL && sscanf(rest, ") %*c %*d %*d %*d %*d %*d %u", &flags) == 1 &&
           (flags & EXITING);
}

/* Writes an answer with `error` to the kernel. Returns 0 or the kernel's errno; ENOENT if the
 * kernel no longer waits, or after `waiting_end`. */
static int answer(struct waiting *waiting, uint64_t unique, int error) {
    struct fuse_out_header out = {sizeof out, error, unique};
    int failure = ENOENT;
    pthread_mutex_lock(&waiting->lock); /* keeps `waiting_end` from returning */
    if (waiting->device_fd >= 0)
        failure = write(waiting->device_fd, &out, sizeof out) < 0 ? errno : 0;
    pthread_mutex_unlock(&waiting->lock);
    return failure;
}

/* Returns whether the kernel still waits for the answer to a request. */
static bool is_awaited(struct waiting *waiting, uint64_t unique) {
    /* EAGAIN makes the kernel repeat the interrupt, or fail with EINVAL if there was none. Only
     * ENOENT means that the request has been answered. */
    return answer(waiting, unique | INTERRUPT_BIT, -EAGAIN) != ENOENT;
}

void waiting_fail(struct waiting *waiting, int error) {
    for (unsigned i = 0; i < ENTRIES; i++) {
        pthread_mutex_lock(&waiting->lock);
        uint64_t unique = waiting->entries[i].unique;
        pthread_mutex_unlock(&waiting->lock);
        if (unique != 0) answer(waiting, unique, error);
    }
}

unsigned waiting_count(struct waiting *waiting) {
    unsigned count = 0;
    for (unsigned i = 0; i < ENTRIES; i++) {
        struct waiting_entry *entry = &waiting->entries[i];
        pthread_mutex_lock(&waiting->lock);
        uint64_t unique = entry->unique;
        pthread_mutex_unlock(&waiting->lock);
        if (unique == 0) continue;
        if (is_awaited(waiting, unique)) {
            count++;
            continue;
        }
        pthread_mutex_lock(&waiting->lock);
        if (entry->unique == unique && entry->flags == 0) entry->unique = 0; /* never asked again */
        pthread_mutex_unlock(&waiting->lock);
    }
    return count;
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

/* Answers the request if its process is dying. True while the kernel waits for an answer. */
static bool still_waits(struct waiting *waiting, struct waiting_entry entry) {
    if (is_dying(entry.pid)) {
        answer(waiting, entry.unique, -EINTR);
        return false;
    }
    return is_awaited(waiting, entry.unique);
}

void waiting_look(struct waiting *waiting) {
    /* The lock is released for each check, because a check reads /proc and writes to the kernel.
     * The entry may change meanwhile, so its number is compared afterwards. */
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

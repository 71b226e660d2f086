/* See reads.h. The static variable `reads` owns all memory here; only the daemon's loop thread uses
 * it, so it has no lock. */
#define _GNU_SOURCE
#include "reads.h"
#include "table.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define IN_HAND_PLACES (1u << 13) /* places for READs in hand; about 1,000 are the most */
#define LARGEST 128        /* bytes of a request; a READ has 80 */
#define RESENT (1ull << 63) /* the kernel sets this bit of `unique` when it sends a request again */

#define USUAL_SHARE 256
#define SLOW_MOST 64       /* READs in hand and deferred of a user with a bandwidth limit */
#define MOST 768           /* READs of all users: 3/4 of `max_background` (session.py) */
#define SURELY 2           /* with so many later requests of its thread, a READ is read-ahead */

/* A READ that is held back: allocated by `defer`, freed by `drop`. */
struct deferred_read {
    struct deferred_read *next, *before;
    uint64_t unique;
    uint32_t pid, user, later; /* `later`: requests of the same thread that came after it */
    bool is_direct, is_due;
    size_t length;
    char request[LARGEST];
};

struct user {
    uint32_t in_hand, deferred, share;
    bool is_slow;
};

static struct {
    int device_fd, ready_fd;
    struct user *users;
    /* READs in hand: a hash table with linear probing; unique 0 is a free place. */
    struct { uint64_t unique; uint32_t user; } *in_hand;
    struct deferred_read list; /* head of a ring of deferred READs, the oldest first */
    uint32_t total;   /* in hand and deferred, of all users */
    uint32_t due;     /* deferred READs that are due (`is_due`); `ready_fd` is readable if not 0 */
} reads = {-1, -1, NULL, NULL, {0}, 0, 0};

/* The body must not go on after `drop` of the same READ. */
#define FOR_EACH_DEFERRED(read)                                                                    \
    for (struct deferred_read *read = reads.list.next; read != &reads.list; read = read->next)

int reads_init(void) {
    if (reads.users == NULL) {
        reads.users = calloc(RT_USERS, sizeof *reads.users);
        reads.in_hand = calloc(IN_HAND_PLACES, sizeof *reads.in_hand);
        reads.ready_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        reads.list.next = reads.list.before = &reads.list;
        if (reads.users == NULL || reads.in_hand == NULL || reads.ready_fd < 0) return -ENOMEM;
    }
    return reads.ready_fd;
}

void reads_begin(int device_fd) {
    if (reads.users != NULL) reads.device_fd = device_fd;
}

static bool are_on(void) { return reads.device_fd >= 0; }

void reads_share(uint32_t user, uint32_t most, bool is_slow) {
    if (reads.users == NULL || user >= RT_USERS) return;
    reads.users[user].share = most;
    reads.users[user].is_slow = is_slow;
}

static uint32_t share_of(const struct user *user) {
    return user->share ? user->share : USUAL_SHARE;
}

/* -- READs in hand ----------------------------------------------------------------------------- */

static uint32_t home_of(uint64_t unique) {
    return (uint32_t)((unique * 0x9e3779b97f4a7c15ull) >> 51) % IN_HAND_PLACES;
}

static void take_in_hand(uint64_t unique, uint32_t user) {
    uint32_t place = home_of(unique);
    if (reads.total >= IN_HAND_PLACES / 2) return; /* not counted; only the shares get less exact */
    while (reads.in_hand[place].unique != 0) place = (place + 1) % IN_HAND_PLACES;
    reads.in_hand[place].unique = unique;
    reads.in_hand[place].user = user;
    reads.users[user].in_hand++;
    reads.total++;
}

/* Moves later entries of the probe sequence into a place that became free, so that a search from
 * their home place still finds them. */
static void close_gap(uint32_t gap) {
    for (uint32_t place = (gap + 1) % IN_HAND_PLACES; reads.in_hand[place].unique != 0;
         place = (place + 1) % IN_HAND_PLACES) {
        uint32_t home = home_of(reads.in_hand[place].unique);
        if ((place - home) % IN_HAND_PLACES < (place - gap) % IN_HAND_PLACES) continue;
        reads.in_hand[gap] = reads.in_hand[place];
        reads.in_hand[place].unique = 0;
        gap = place;
    }
}

/* Ends the count of a READ in hand. Returns its user; NULL if it was not counted. */
static struct user *put_down(uint64_t unique) {
    for (uint32_t place = home_of(unique); reads.in_hand[place].unique != 0;
         place = (place + 1) % IN_HAND_PLACES) {
        if (reads.in_hand[place].unique != unique) continue;
        struct user *user = &reads.users[reads.in_hand[place].user];
        reads.in_hand[place].unique = 0;
        close_gap(place);
        user->in_hand--;
        reads.total--;
        return user;
    }
    return NULL;
}

/* -- deferred READs ---------------------------------------------------------------------------- */

/* Unlinks and frees a deferred READ. */
static void drop(struct deferred_read *deferred) {
    deferred->before->next = deferred->next;
    deferred->next->before = deferred->before;
    reads.users[deferred->user].deferred--;
    reads.total--;
    if (deferred->is_due) reads.due--;
    free(deferred);
}

/* Appends a copy of the READ to the list. False if it is too long or memory is short. */
static bool defer(const struct fuse_in_header *in, size_t length, uint32_t user) {
    const struct fuse_read_in *read_in = (const struct fuse_read_in *)(in + 1);
    struct deferred_read *deferred = length <= LARGEST ? calloc(1, sizeof *deferred) : NULL;
    if (deferred == NULL) return false;
    deferred->unique = in->unique;
    deferred->pid = in->pid;
    deferred->user = user;
    deferred->is_direct = (read_in->flags & O_DIRECT) != 0;
    deferred->length = length;
    memcpy(deferred->request, in, length);
    deferred->before = reads.list.before;
    deferred->next = &reads.list;
    deferred->before->next = reads.list.before = deferred;
    reads.users[user].deferred++;
    reads.total++;
    return true;
}

/* Counts a new request for all deferred READs of the same thread that are older. */
static void note_later(const struct fuse_in_header *in) {
    FOR_EACH_DEFERRED(deferred)
        if (deferred->pid == in->pid && (in->unique & ~RESENT) > (deferred->unique & ~RESENT))
            deferred->later++;
}

/* True if no thread waits for the READ. With `look`, true only if its thread has ended. */
static bool is_for_nobody(const struct deferred_read *deferred, bool look) {
    if (deferred->is_direct || deferred->is_due || deferred->pid == 0) return false;
    return look ? kill((pid_t)deferred->pid, 0) < 0 && errno == ESRCH : deferred->later >= SURELY;
}

/* Fails (EINTR) this user's oldest deferred READ without a waiting thread. Read-ahead of living
 * threads comes first, then READs of threads that have ended. */
static void shed(uint32_t user) {
    for (int look = 0; look < 2; look++) {
        FOR_EACH_DEFERRED(deferred) {
            if (deferred->user != user || !is_for_nobody(deferred, look)) continue;
            struct fuse_out_header out = {sizeof out, -EINTR, deferred->unique};
            while (write(reads.device_fd, &out, sizeof out) < 0 && errno == EINTR) {}
            drop(deferred);
            return;
        }
    }
}

/* Returns the user with the most deferred READs. The list must not be empty. */
static uint32_t user_with_most_deferred(void) {
    uint32_t found = reads.list.next->user;
    FOR_EACH_DEFERRED(deferred)
        if (reads.users[deferred->user].deferred > reads.users[found].deferred)
            found = deferred->user;
    return found;
}

static void set_due(struct deferred_read *deferred) {
    uint64_t one = 1;
    deferred->is_due = true;
    if (reads.due++ == 0 && write(reads.ready_fd, &one, sizeof one) < 0) { /* readable */ }
}

/* Makes the oldest deferred READ of this user due. */
static void make_due(uint32_t user) {
    FOR_EACH_DEFERRED(deferred) {
        if (deferred->user != user || deferred->is_due) continue;
        set_due(deferred);
        return;
    }
}

/* -- public functions (reads.h) ---------------------------------------------------------------- */

bool reads_admit(const void *request, size_t length) {
    const struct fuse_in_header *in = request;
    if (!are_on()) return true;
    if (in->pid != 0 && reads.list.next != &reads.list) note_later(in);
    if (in->opcode != FUSE_READ || length < sizeof *in + sizeof(struct fuse_read_in)) return true;
    uint64_t handle = ((const struct fuse_read_in *)(in + 1))->fh;
    uint32_t number = (uint32_t)(handle >> RT_INO_BITS) % RT_USERS;
    struct user *user = &reads.users[number];
    if (user->in_hand + user->deferred < share_of(user) || !defer(in, length, number)) {
        take_in_hand(in->unique, number);
        return true;
    }
    if (user->is_slow && user->in_hand + user->deferred > SLOW_MOST)
        shed(number);
    else if (reads.total > MOST)
        shed(user_with_most_deferred());
    return false;
}

bool reads_are_due(void) { return reads.due > 0; }

size_t reads_take(void *buffer) {
    uint64_t count;
    if (reads.due == 0) return 0;
    FOR_EACH_DEFERRED(deferred) {
        if (!deferred->is_due) continue;
        size_t length = deferred->length;
        uint64_t unique = deferred->unique;
        uint32_t user = deferred->user;
        memcpy(buffer, deferred->request, length);
        drop(deferred);
        take_in_hand(unique, user);
        if (reads.due == 0 && read(reads.ready_fd, &count, sizeof count) < 0) { /* none */ }
        return length;
    }
    return 0;
}

void reads_answered(uint64_t unique) {
    struct user *user = are_on() ? put_down(unique) : NULL;
    if (user != NULL && user->deferred > 0 && user->in_hand < share_of(user))
        make_due((uint32_t)(user - reads.users));
}

void reads_return(const void *request, size_t length) {
    const struct fuse_in_header *in = request;
    uint64_t handle = ((const struct fuse_read_in *)(in + 1))->fh;
    uint32_t number = (uint32_t)(handle >> RT_INO_BITS) % RT_USERS;
    if (defer(in, length, number)) {
        put_down(in->unique); /* it keeps its place in the share: no other READ is due for it */
        set_due(reads.list.before);
        return;
    }
    struct fuse_out_header out = {sizeof out, -EINTR, in->unique}; /* the reader asks again */
    while (write(reads.device_fd, &out, sizeof out) < 0 && errno == EINTR) {}
    reads_answered(in->unique);
}

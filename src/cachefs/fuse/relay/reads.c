#define _GNU_SOURCE
#include "reads.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define INO_BITS 48
#define USERS (1u << 15)
#define FLIGHTS (1u << 13) /* places for READs in hand; about 1,000 are the most */
#define LARGEST 128        /* bytes of a request; a READ has 80 */
#define RESENT (1ull << 63) /* the kernel sets this bit of `unique` when it sends a request again */

#define USUAL_SHARE 256
#define SLOW_MOST 64       /* READs in hand and kept of a user with a bandwidth limit */
#define MOST 768           /* READs of all users: 3/4 of `max_background` (session.py) */
#define SURELY 2           /* with so many later requests of its thread, a READ is read-ahead */

/* A READ that is kept back: allocated by `keep`, freed by `drop`. */
struct kept {
    struct kept *next, *before;
    uint64_t unique;
    uint32_t pid, user, later; /* `later`: requests of the same thread that came after it */
    bool is_direct, has_turn;
    size_t length;
    char request[LARGEST];
};

struct user {
    uint32_t in_hand, kept, share;
    bool is_slow;
};

static struct {
    int device_fd, ready_fd;
    struct user *users;
    /* READs in hand: a hash table with linear probing; unique 0 is a free place. */
    struct { uint64_t unique; uint32_t user; } *flights;
    struct kept list; /* head of a ring of kept READs, the oldest first */
    uint32_t total;   /* in hand and kept, of all users */
    uint32_t ready;   /* kept READs that are due (`has_turn`); `ready_fd` is readable if not 0 */
} reads = {-1, -1, NULL, NULL, {0}, 0, 0};

int reads_init(void) {
    if (reads.users == NULL) {
        reads.users = calloc(USERS, sizeof *reads.users);
        reads.flights = calloc(FLIGHTS, sizeof *reads.flights);
        reads.ready_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        reads.list.next = reads.list.before = &reads.list;
        if (reads.users == NULL || reads.flights == NULL || reads.ready_fd < 0) return -ENOMEM;
    }
    return reads.ready_fd;
}

void reads_begin(int device_fd) {
    if (reads.users != NULL) reads.device_fd = device_fd;
}

static bool are_on(void) { return reads.device_fd >= 0; }

void reads_share(uint32_t user, uint32_t most, bool is_slow) {
    if (reads.users == NULL || user >= USERS) return;
    reads.users[user].share = most;
    reads.users[user].is_slow = is_slow;
}

static uint32_t share_of(const struct user *user) { return user->share ? user->share : USUAL_SHARE; }

/* -- READs in hand ----------------------------------------------------------------------------- */

static uint32_t home_of(uint64_t unique) {
    return (uint32_t)((unique * 0x9e3779b97f4a7c15ull) >> 51) % FLIGHTS;
}

static void take_in_hand(uint64_t unique, uint32_t user) {
    uint32_t place = home_of(unique);
    if (reads.total >= FLIGHTS / 2) return; /* not counted; only the shares get less exact */
    while (reads.flights[place].unique != 0) place = (place + 1) % FLIGHTS;
    reads.flights[place].unique = unique;
    reads.flights[place].user = user;
    reads.users[user].in_hand++;
    reads.total++;
}

/* Moves later entries of the probe sequence into a place that became free, so that a search from
 * their home place still finds them. */
static void close_gap(uint32_t gap) {
    for (uint32_t place = (gap + 1) % FLIGHTS; reads.flights[place].unique != 0;
         place = (place + 1) % FLIGHTS) {
        uint32_t home = home_of(reads.flights[place].unique);
        if ((place - home) % FLIGHTS < (place - gap) % FLIGHTS) continue;
        reads.flights[gap] = reads.flights[place];
        reads.flights[place].unique = 0;
        gap = place;
    }
}

/* -- kept READs -------------------------------------------------------------------------------- */

/* Unlinks and frees a kept READ. */
static void drop(struct kept *kept) {
    kept->before->next = kept->next;
    kept->next->before = kept->before;
    reads.users[kept->user].kept--;
    reads.total--;
    if (kept->has_turn) reads.ready--;
    free(kept);
}

/* Appends a copy of the READ to the list. False if it is too long or memory is short. */
static bool keep(const struct fuse_in_header *in, size_t length, uint32_t user) {
    const struct fuse_read_in *read_in = (const struct fuse_read_in *)(in + 1);
    struct kept *kept = length <= LARGEST ? calloc(1, sizeof *kept) : NULL;
    if (kept == NULL) return false;
    kept->unique = in->unique;
    kept->pid = in->pid;
    kept->user = user;
    kept->is_direct = (read_in->flags & O_DIRECT) != 0;
    kept->length = length;
    memcpy(kept->request, in, length);
    kept->before = reads.list.before;
    kept->next = &reads.list;
    kept->before->next = reads.list.before = kept;
    reads.users[user].kept++;
    reads.total++;
    return true;
}

/* Counts a new request for all kept READs of the same thread that are older. */
static void note_later(const struct fuse_in_header *in) {
    for (struct kept *kept = reads.list.next; kept != &reads.list; kept = kept->next)
        if (kept->pid == in->pid && (in->unique & ~RESENT) > (kept->unique & ~RESENT)) kept->later++;
}

/* True if no thread waits for the READ. With `look`, true only if its thread has ended. */
static bool is_for_nobody(const struct kept *kept, bool look) {
    if (kept->is_direct || kept->has_turn || kept->pid == 0) return false;
    return look ? kill((pid_t)kept->pid, 0) < 0 && errno == ESRCH : kept->later >= SURELY;
}

/* Fails (EINTR) this user's oldest kept READ without a waiting thread. Read-ahead of living threads
 * comes first, then READs of threads that have ended. */
static void shed(uint32_t user) {
    for (int look = 0; look < 2; look++) {
        for (struct kept *kept = reads.list.next; kept != &reads.list; kept = kept->next) {
            if (kept->user != user || !is_for_nobody(kept, look)) continue;
            struct fuse_out_header out = {sizeof out, -EINTR, kept->unique};
            while (write(reads.device_fd, &out, sizeof out) < 0 && errno == EINTR) {}
            drop(kept);
            return;
        }
    }
}

/* Returns the user with the most kept READs. The list must not be empty. */
static uint32_t largest_keeper(void) {
    uint32_t found = reads.list.next->user;
    for (struct kept *kept = reads.list.next; kept != &reads.list; kept = kept->next)
        if (reads.users[kept->user].kept > reads.users[found].kept) found = kept->user;
    return found;
}

/* Makes the oldest kept READ of this user due. */
static void give_turn(uint32_t user) {
    uint64_t one = 1;
    for (struct kept *kept = reads.list.next; kept != &reads.list; kept = kept->next) {
        if (kept->user != user || kept->has_turn) continue;
        kept->has_turn = true;
        if (reads.ready++ == 0 && write(reads.ready_fd, &one, sizeof one) < 0) { /* readable */ }
        return;
    }
}

/* -- public functions (reads.h) ---------------------------------------------------------------- */

bool reads_admit(const void *request, size_t length) {
    const struct fuse_in_header *in = request;
    if (!are_on()) return true;
    if (in->pid != 0 && reads.list.next != &reads.list) note_later(in);
    if (in->opcode != FUSE_READ || length < sizeof *in + sizeof(struct fuse_read_in)) return true;
    uint32_t number = (uint32_t)(((const struct fuse_read_in *)(in + 1))->fh >> INO_BITS) % USERS;
    struct user *user = &reads.users[number];
    if (user->in_hand + user->kept < share_of(user) || !keep(in, length, number)) {
        take_in_hand(in->unique, number);
        return true;
    }
    if (user->is_slow && user->in_hand + user->kept > SLOW_MOST)
        shed(number);
    else if (reads.total > MOST)
        shed(largest_keeper());
    return false;
}

size_t reads_take(void *buffer) {
    uint64_t count;
    if (reads.ready == 0) return 0;
    for (struct kept *kept = reads.list.next; kept != &reads.list; kept = kept->next) {
        if (!kept->has_turn) continue;
        size_t length = kept->length;
        uint64_t unique = kept->unique;
        uint32_t user = kept->user;
        memcpy(buffer, kept->request, length);
        drop(kept);
        take_in_hand(unique, user);
        if (reads.ready == 0 && read(reads.ready_fd, &count, sizeof count) < 0) { /* none */ }
        return length;
    }
    return 0;
}

void reads_answered(uint64_t unique) {
    if (!are_on()) return;
    for (uint32_t place = home_of(unique); reads.flights[place].unique != 0;
         place = (place + 1) % FLIGHTS) {
        if (reads.flights[place].unique != unique) continue;
        struct user *user = &reads.users[reads.flights[place].user];
        uint32_t number = reads.flights[place].user;
        reads.flights[place].unique = 0;
        close_gap(place);
        user->in_hand--;
        reads.total--;
        if (user->kept > 0 && user->in_hand < share_of(user)) give_turn(number);
        return;
    }
}

/* OPENs and RELEASEs of a few inodes from many threads, beside a writer that withdraws files and marks
 * them, and a model of the kernel that knows its rules (opens.c). Built with and without
 * ThreadSanitizer by test_table_race.py, with `ioctl` and `writev` renamed to those of the model.
 *
 * The model refuses some answers, as the kernel does when it sends a request again.
 */
#define _GNU_SOURCE
#include "opens.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#define THREADS 8
#define INODES 3
#define FILES 8
#define IDS (1 << 20)
#define BACKING_OPEN_SIZE 16

struct answer {
    uint64_t fh;
    uint32_t open_flags;
    int32_t backing_id;
};

/* The kernel's side of an inode: fs/fuse/iomode.c. */
static struct {
    int cached, through;
    int32_t backing_id;
} inodes[INODES];
static bool is_registered[IDS];
static int32_t latest_id;
static pthread_mutex_t kernel = PTHREAD_MUTEX_INITIALIZER; /* protects the three above */

static struct relay relay;
static _Atomic bool stop;
static _Atomic uint64_t through, cached, refused, wrong;
static __thread uint64_t state, asked_ino;
static __thread bool is_open_asked, is_answered;

static uint64_t random_number(void) { /* xorshift64 */
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

int model_ioctl(int fd, unsigned long request, ...) {
    va_list rest;
    (void)fd;
    va_start(rest, request);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    int result = 0;
    pthread_mutex_lock(&kernel);
    if (_IOC_SIZE(request) == BACKING_OPEN_SIZE) {
        result = ++latest_id;
        is_registered[result % IDS] = true;
    } else {
        uint32_t id = *(uint32_t *)argument;
        if (!is_registered[id % IDS]) atomic_fetch_add(&wrong, 1);
        is_registered[id % IDS] = false;
    }
    pthread_mutex_unlock(&kernel);
    return result;
}

/* fuse_file_io_open. */
static void open_in_kernel(const struct answer *answer) {
    int i = (int)asked_ino - 1;
    bool is_through = (answer->open_flags & (1u << 7)) != 0;
    pthread_mutex_lock(&kernel);
    if (is_through) {
        bool is_another = inodes[i].through > 0 && inodes[i].backing_id != answer->backing_id;
        if (inodes[i].cached > 0 || is_another || !is_registered[answer->backing_id % IDS])
            atomic_fetch_add(&wrong, 1);
        inodes[i].backing_id = answer->backing_id;
        inodes[i].through++;
    } else {
        if (inodes[i].through > 0) atomic_fetch_add(&wrong, 1);
        inodes[i].cached++;
    }
    pthread_mutex_unlock(&kernel);
    atomic_fetch_add(is_through ? &through : &cached, 1);
}

ssize_t model_writev(int fd, const struct iovec *parts, int count) {
    (void)fd;
    if (random_number() % 4 == 0) {
        atomic_fetch_add(&refused, 1);
        errno = ENOENT;
        return -1;
    }
    if (is_open_asked && count == 2) open_in_kernel(parts[1].iov_base);
    is_answered = true;
    return 1;
}

/* Sends a request until its answer is taken. */
static void ask(uint64_t ino, bool is_open) {
    struct {
        struct fuse_in_header in;
        struct fuse_open_in open;
    } request = {.in = {.nodeid = ino, .opcode = is_open ? FUSE_OPEN : FUSE_RELEASE}};
    asked_ino = ino;
    is_open_asked = is_open;
    for (is_answered = false; !is_answered;) {
        if (is_open)
            answer_open(&relay, (const char *)&request, sizeof request);
        else
            answer_release(&relay, &request.in);
    }
}

static void *open_and_close(void *argument) {
    state = 1 + (uint64_t)(uintptr_t)argument;
    while (!atomic_load(&stop)) {
        uint64_t ino = 1 + random_number() % INODES;
        ask(ino, true);
        if (random_number() % 4 == 0) usleep(50);
        pthread_mutex_lock(&kernel); /* the kernel ends an open before it sends RELEASE */
        if (inodes[ino - 1].through > 0)
            inodes[ino - 1].through--;
        else
            inodes[ino - 1].cached--;
        pthread_mutex_unlock(&kernel);
        ask(ino, false);
    }
    return NULL;
}

int main(int argc, char **argv) {
    double seconds = argc > 1 ? atof(argv[1]) : 1;
    pthread_t threads[THREADS], ending;
    state = 42;
    int table_fd = rt_create(64), slab_fd = memfd_create("slab", 0);
    relay.files = calloc(RT_FILES, sizeof *relay.files);
    if (table_fd < 0 || slab_fd < 0 || relay.files == NULL) return 2;
    if (rt_open(&relay.table, table_fd) < 0 || init_opens(&relay, true) != 0) return 2;
    struct rt_table *table = &relay.table;
    pthread_create(&ending, NULL, end_registrations, &relay);
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, open_and_close, (void *)(uintptr_t)(i + 1));
    time_t end = time(NULL) + (time_t)(seconds + 1);
    while (time(NULL) < end) {
        uint64_t what = random_number();
        uint32_t file = (uint32_t)(what >> 8) % FILES;
        if (what % 256 == 0) rt_begin_epoch(table); /* a daemon is started anew */
        if (what % 16 == 1) rt_withdraw_file(table, file);
        if (what % 16 == 2) atomic_store(&relay.files[file], 0);
        if (what % 16 == 3) atomic_store(&relay.files[file], what << 32 | (uint32_t)(slab_fd + 1));
        if (what % 16 == 4) rt_publish(table, 1 + (what >> 32) % INODES, 0, file, 0, 512, true, 0);
        if (what % 16 == 5) atomic_store(&table->header->passes_through, (what >> 32) % 8 != 0);
        if (what % 16 == 6) rt_revive(table, file);
        if (what % 16 == 7) rt_mark_whole(table, file, (what >> 32) % 4 != 0);
        while (rt_drain(table) != NULL) {}
        if (what % 32 == 9) usleep(20);
    }
    atomic_store(&stop, true);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    atomic_store(&relay.stopping, true);
    sem_post(&relay.has_ended);
    pthread_join(ending, NULL);
    printf("through %llu cached %llu refused %llu wrong %llu\n", (unsigned long long)through,
           (unsigned long long)cached, (unsigned long long)refused, (unsigned long long)wrong);
    return wrong ? 1 : through && cached && refused ? 0 : 3;
}

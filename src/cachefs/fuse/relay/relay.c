/* Takes requests from /dev/fuse: the threads, and what they do with each request.
 *
 * Each worker owns its buffers. The semaphores `lead` and `help` decide which workers run. This
 * file needs no lock.
 */
#define _GNU_SOURCE
#include "cached_reads.h"
#include "forwarding.h"
#include "opens.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define REQUEST_BYTES (BLOCK_BYTES + 65536) /* at least max_write and a header: the kernel's rule */
#define MOST_THREADS 64
#define SPIN_NS 100000ull      /* how long the leader polls before it sleeps; see `await_request` */
#define QUICK_NS 500000ull     /* after a wait below this, the leader polls for the next request */

/* Whether a GETXATTR asks for an attribute whose name does not begin with "user.". None exists. */
static bool is_foreign_attribute(const struct fuse_in_header *in, size_t length) {
    static const char user[] = "user.";
    const char *name = (const char *)(in + 1) + sizeof(struct fuse_getxattr_in);
    size_t before = sizeof *in + sizeof(struct fuse_getxattr_in);
    return length >= before + sizeof user - 1 && memcmp(name, user, sizeof user - 1) != 0;
}

/* Answers the request in `worker->request`, or forwards it. */
static void handle(struct worker *worker, size_t length) {
    struct relay *relay = worker->relay;
    char *request = worker->request;
    struct fuse_in_header *in = (struct fuse_in_header *)request;
    bool is_writable = GET(relay->table.header->writable);
    switch (in->opcode) {
    case FUSE_READ:
        if (answer_read(worker, request, length)) return;
        ADD(relay->table.header->missed, 1);
        break;
    case FUSE_OPEN:
        answer_open(relay, request, length);
        return;
    case FUSE_RELEASE:   /* without passthrough only of files that CREATE has opened */
        answer_release(relay, in);
        return;
    case FUSE_OPENDIR:   /* ENOSYS: the kernel sends each of these only once per mount */
    case FUSE_FSYNCDIR:
        reply(relay, in->unique, -ENOSYS, NULL, 0);
        return;
    case FUSE_FLUSH:
        if (is_writable && length >= sizeof *in + sizeof(struct fuse_flush_in) &&
            rt_may_be_unsent(&relay->table, in->nodeid)) {
            ((struct fuse_flush_in *)(in + 1))->fh = in->nodeid;
            break;
        }
        reply(relay, in->unique, is_writable ? 0 : -ENOSYS, NULL, 0);
        return;
    case FUSE_WRITE:     /* a writable mount answers no OPEN, so the kernel has no handles */
        if (length >= sizeof *in + sizeof(struct fuse_write_in))
            ((struct fuse_write_in *)(in + 1))->fh = in->nodeid;
        break;
    case FUSE_FSYNC:
        if (length >= sizeof *in + sizeof(struct fuse_fsync_in))
            ((struct fuse_fsync_in *)(in + 1))->fh = in->nodeid;
        break;
    case FUSE_RELEASEDIR:
        reply(relay, in->unique, 0, NULL, 0);
        return;
    case FUSE_GETXATTR:  /* for "security.capability", once for each new file that is written */
        if (is_foreign_attribute(in, length)) {
            reply(relay, in->unique, -EOPNOTSUPP, NULL, 0);
            return;
        }
        break;
    case FUSE_IOCTL:     /* Python's open() sends it for every file: isatty() */
        reply(relay, in->unique, -ENOTTY, NULL, 0);
        return;
    case FUSE_READDIR:
    case FUSE_READDIRPLUS:
        if (length >= sizeof *in + sizeof(struct fuse_read_in))
            ((struct fuse_read_in *)(in + 1))->fh = in->nodeid;
        break;
    case FUSE_FORGET:    /* they have no answer; a writable mount frees unlinked files then */
    case FUSE_BATCH_FORGET:
        if (!is_writable) return;
        break;
    case FUSE_INTERRUPT:
        if (length >= sizeof *in + sizeof(struct fuse_interrupt_in))
            waiting_interrupt(&relay->waiting, in);
        return;
    case FUSE_INIT:
        keep_init(relay, request, length);
        break;
    }
    forward(relay, request, length);
}

/* Makes `ended_fd` readable, and wakes all threads that read requests, which then end. */
static void end_reading(struct relay *relay) {
    uint64_t one = 1;
    atomic_store(&relay->reads_no_more, true);
    while (write(relay->ended_fd, &one, sizeof one) < 0 && errno == EINTR) {}
    for (unsigned i = 0; i < relay->thread_count; i++) sem_post(&relay->lead);
    for (unsigned i = 0; i < HELPERS; i++) sem_post(&relay->help);
}

/* Makes `ended_fd` readable, wakes all threads, and fails unanswered requests with `error` unless
 * that is 0. Runs once. The order matters: the daemon ends when it gets no more requests, and the
 * supervisor must know by then that this is no failure of the daemon. */
static void end(struct relay *relay, int error) {
    end_reading(relay);
    end_forwarding(relay);
    if (error != 0) waiting_fail(&relay->waiting, error);
    sem_post(&relay->has_ahead);
    sem_post(&relay->has_ended);
}

/* Reads a request into `worker->request`. Returns its length in bytes; 0 if there is none.
 * Begins the end of the relay if the mount has ended. */
static ssize_t next_request(struct worker *worker) {
    struct relay *relay = worker->relay;
    ssize_t length = read(relay->device_fd, worker->request, REQUEST_BYTES);
    if (length >= (ssize_t)sizeof(struct fuse_in_header)) return length;
    if (length < 0 && errno != EINTR && errno != EAGAIN && errno != ENOENT)
        if (!atomic_exchange(&relay->stopping, true)) end(relay, -ENOTCONN);
    return 0;
}

/* Waits for a request. Returns its length in bytes; 0 if there is none after all.
 *
 * A process that reads file after file sends its next request sooner than a sleeping CPU wakes
 * (fuse/loop.py has the figures). So this thread polls for SPIN_NS before it sleeps. With half
 * of SPIN_NS and QUICK_NS, a slow pace persisted: two wake-ups and the reader's own work took
 * longer than QUICK_NS. Measured in a virtual machine with Python's open(): 3 k files/s with
 * half, 8-9 k now. */
static ssize_t await_request(struct worker *worker, bool *is_quick) {
    struct relay *relay = worker->relay;
    struct pollfd awaited[2] = {{relay->device_fd, POLLIN, 0}, {relay->ended_fd, POLLIN, 0}};
    uint64_t began_ns = now_ns();
    ssize_t length;
    do {
        length = next_request(worker);
        if (length > 0 || GET(relay->reads_no_more)) {
            *is_quick = true;
            return length;
        }
    } while (*is_quick && now_ns() < began_ns + SPIN_NS);
    poll(awaited, 2, -1);
    *is_quick = now_ns() < began_ns + QUICK_NS;
    return next_request(worker);
}

/* A thread. One leader at a time waits for requests, and answers those that need no wait. When it
 * must wait for a disk, it posts the semaphore `lead`, and another thread becomes the leader. */
static void *lead(void *argument) {
    struct worker *worker = argument;
    struct relay *relay = worker->relay;
    struct pollfd device = {relay->device_fd, POLLIN, 0};
    while (!GET(relay->reads_no_more)) {
        while (sem_wait(&relay->lead) < 0) {}
        worker->leads = true;
        bool is_quick = false;
        while (worker->leads && !GET(relay->reads_no_more)) {
            ssize_t length = await_request(worker, &is_quick);
            if (length <= 0) continue;
            if (GET(relay->idle_helpers) > 0 && poll(&device, 1, 0) == 1) sem_post(&relay->help);
            handle(worker, (size_t)length);
        }
    }
    return NULL;
}

/* A thread: works while there is more than one request, and sleeps when there is none. */
static void *help(void *argument) {
    struct worker *worker = argument;
    struct relay *relay = worker->relay;
    while (!GET(relay->reads_no_more)) {
        ADD(relay->idle_helpers, 1);
        while (sem_wait(&relay->help) < 0) {}
        ADD(relay->idle_helpers, -1);
        ssize_t length;
        while ((length = next_request(worker)) > 0) handle(worker, (size_t)length);
    }
    return NULL;
}

/* -- life -------------------------------------------------------------------------------------- */

struct relay *relay_new(int device_fd, int table_fd, unsigned threads, bool writable,
                        bool passthrough, int *error) {
    struct relay *relay = calloc(1, sizeof *relay);
    *error = ENOMEM;
    if (relay == NULL) return NULL;
    relay->device_fd = device_fd;
    relay->thread_count = threads < 2 ? 2 : threads > MOST_THREADS ? MOST_THREADS : threads;
    relay->workers = calloc(relay->thread_count + HELPERS, sizeof *relay->workers);
    relay->ended_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    init_forwarding(relay);
    sem_init(&relay->lead, 0, 1);
    sem_init(&relay->help, 0, 0);
    *error = relay->ended_fd < 0 ? errno : -rt_open(&relay->table, table_fd);
    if (*error == 0) atomic_store(&relay->table.header->writable, (uint32_t)writable);
    if (*error == 0) *error = init_cached_reads(relay);
    if (*error == 0) *error = init_opens(relay, passthrough && !writable);
    if (*error == 0) *error = waiting_init(&relay->waiting, device_fd);
    /* The daemon shares the open file, but O_NONBLOCK does not disturb it: it only writes. */
    if (*error == 0 && fcntl(device_fd, F_SETFL, fcntl(device_fd, F_GETFL) | O_NONBLOCK) < 0)
        *error = errno;
    if (relay->workers == NULL) *error = ENOMEM;
    for (unsigned i = 0; i < relay->thread_count + HELPERS && *error == 0; i++) {
        struct worker *worker = &relay->workers[i];
        worker->relay = relay;
        pthread_mutex_init(&worker->lock, NULL);
        worker->request = malloc(REQUEST_BYTES);
        worker->data = malloc(BLOCK_BYTES);
        worker->scratch = malloc(BLOCK_BYTES);
        if (worker->request == NULL || worker->data == NULL || worker->scratch == NULL)
            *error = ENOMEM;
    }
    return *error == 0 ? relay : NULL; /* on failure, memory is freed only with the process */
}

int relay_start(struct relay *relay) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the main thread handles all signals */
    int error = pthread_create(&relay->queue_thread, NULL, send_queue, relay);
    if (error == 0) error = pthread_create(&relay->looker, NULL, look_after, relay);
    if (error == 0) error = pthread_create(&relay->ahead_thread, NULL, tell_disk, relay);
    if (error == 0) error = pthread_create(&relay->notice_thread, NULL, pass_notices_on, relay);
    if (error == 0 && GET(relay->table.header->opens_state) != RT_OPENS_OFF)
        error = pthread_create(&relay->ending_thread, NULL, end_registrations, relay);
    for (unsigned i = 0; i < relay->thread_count + HELPERS && error == 0; i++)
        error = pthread_create(&relay->workers[i].thread, NULL,
                               i < relay->thread_count ? lead : help, &relay->workers[i]);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return -error;
}

int relay_ended_fd(struct relay *relay) { return relay->ended_fd; }

void relay_stop(struct relay *relay) {
    if (!atomic_exchange(&relay->stopping, true)) end(relay, -ENOTCONN);
}

void relay_stop_reading(struct relay *relay) {
    if (GET(relay->reads_no_more)) return;
    end_reading(relay);
    for (unsigned i = 0; i < relay->thread_count + HELPERS; i++)
        pthread_join(relay->workers[i].thread, NULL);
}

unsigned relay_unanswered(struct relay *relay) { return waiting_count(&relay->waiting); }

void relay_leave(struct relay *relay) {
    if (!atomic_exchange(&relay->stopping, true)) end(relay, relay_can_resend(relay) ? 0 : -EIO);
}

/* The daemon's end of the relay: libfuse reads requests from the relay's socket, and writes replies
 * to /dev/fuse. Without a relay, libfuse reads and writes /dev/fuse through this file, too.
 *
 * There is one session per process, so the state is static. The functions that libfuse calls run in
 * the daemon's loop thread, with one exception: a thread (fuse/notices.py) writes invalidations of
 * names by `write_reply` or `write_plainly`. It only reads the static variables, and only the loop
 * thread changes them, so they need no lock. `plain_waiting` has a lock of its own.
 */
#define _GNU_SOURCE
#define FUSE_USE_VERSION 312
#include "session.h"

#include "reads.h"
#include "relay.h"
#include "waiting.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <linux/fuse.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MOST_TRIES 64 /* requests taken for one that reaches libfuse */
#define MOST_REQUEST_BYTES ((1u << 20) + 65536)
#define REST_MS 2 /* how long to wait at once for the other packets of a request */
/* The most bytes of a WRITE, and how large the buffer of the relay's socket must be for the longest.
 * The default buffer takes two packets; for more of them, the relay's queue would copy the request
 * once more. */
#define MOST_WRITE_BYTES (1u << 20)
#define SMALL_WRITE_BYTES (256u << 10)
#define BUFFER_BYTES (2 << 20)
/* From linux/fuse.h of Linux 6.9; older headers lack them: FUSE_INIT_EXT and FUSE_PASSTHROUGH, and
 * where flags2 and max_stack_depth are in struct fuse_init_out. */
#define INIT_EXT (1u << 30)
#define PASSTHROUGH_HIGH (1u << (37 - 32))
#define FLAGS2_AT 32
#define STACK_DEPTH_AT 36
/* How long the process of a thread is remembered. The kernel gives the number of a thread that ended
 * out again after all other numbers, of which there are at least 32,768. */
#define PROCESS_NS 20000000ull
#define MOST_READ_BYTES 128 /* of a READ; it has 80 */
#define RESENT (1ull << 63) /* the kernel sets this bit of `unique` when it sends a request again */
#define RESENT_PID (1u << 30)

/* Set by `session_connect`. The session then owns the socket; `device_fd` stays the caller's. */
static int wanted_requests_fd = -1, requests_fd = -1, device_fd = -1;
static int notices_fd = -1; /* the relay's socket if it takes notices, else -1 */
static bool connected;
static uint64_t init_unique; /* of an unanswered INIT, else 0 */
static bool accepts_writes;
static bool passes_through;
static bool kernel_passes_through; /* the kernel's INIT offers it */
static uint32_t request_pid; /* the thread that sent the request which was read last */
static uint32_t request_uid, request_gid; /* its user and group for files */
static uint32_t most_write_bytes = MOST_WRITE_BYTES;
static char *begun;        /* the first packets of a request whose others have not arrived */
static size_t begun_bytes; /* in `begun` */
/* A READ that `session_next_read` has received, and that libfuse takes unless somebody else does. */
static char kept[MOST_READ_BYTES];
static size_t kept_bytes;

static void note_request(const struct fuse_in_header *in) {
    request_pid = in->pid;
    request_uid = in->uid;
    request_gid = in->gid;
    if (in->opcode != FUSE_INIT) return;
    const uint32_t *fields = (const uint32_t *)(in + 1); /* major, minor, readahead, flags, flags2 */
    init_unique = in->unique;
    kernel_passes_through = in->len >= sizeof *in + 5 * sizeof *fields &&
                            (fields[3] & INIT_EXT) && (fields[4] & PASSTHROUGH_HIGH);
}

/* Negotiates FUSE_PASSTHROUGH in an answer to INIT of `length` bytes. Files in another stacked file
 * system (overlayfs) can't be passed through then, and only one may be stacked on this mount
 * (fs/fuse/inode.c, process_init_reply). */
static void negotiate_passthrough(struct fuse_init_out *init, size_t length) {
    uint32_t high, depth = 1;
    char *bytes = (char *)init;
    if (length < STACK_DEPTH_AT + sizeof depth) return;
    init->flags |= INIT_EXT;
    memcpy(&high, bytes + FLAGS2_AT, sizeof high);
    high |= PASSTHROUGH_HIGH;
    memcpy(bytes + FLAGS2_AT, &high, sizeof high);
    memcpy(bytes + STACK_DEPTH_AT, &depth, sizeof depth);
}

/* Edits the answer to INIT, because pyfuse3 gives no access to these flags.
 *
 * FUSE_PARALLEL_DIROPS: without it, the kernel sends look-ups in one directory one at a time
 * (libfuse before 3.17 can't set it: libfuse #861).
 *
 * A writable mount also clears FUSE_ATOMIC_O_TRUNC: without OPEN, the kernel would truncate its own
 * pages for O_TRUNC and tell nobody; now it sends SETATTR. It clears FUSE_AUTO_INVAL_DATA, because
 * only writes of this mount change the mtime of an inode. The size of a WRITE is limited if the
 * buffer of the relay's socket is small.
 * It clears FUSE_ASYNC_DIO: the kernel drops the pages of a file when an asynchronous O_DIRECT write
 * is sent, and not when it is answered. So a buffered read meanwhile left old pages for good
 * (xfstests generic/451). Without the flag the write is done, and the pages are dropped, before
 * io_submit(2) returns.
 * FUSE_HANDLE_KILLPRIV_V2 says that a write removes set-user-ID bits and capabilities: no file here
 * has any. Without it, the kernel asks for "security.capability" before each write(2). */
static void edit_init_reply(const struct iovec *parts, int count) {
    const struct fuse_out_header *out = parts[0].iov_base;
    if (init_unique == 0 || out->unique != init_unique) return;
    init_unique = 0;
    if (out->error != 0 || count < 2 || parts[1].iov_len < FUSE_COMPAT_22_INIT_OUT_SIZE) return;
    struct fuse_init_out *init = parts[1].iov_base;
    init->flags |= FUSE_PARALLEL_DIROPS;
    if (passes_through && kernel_passes_through) negotiate_passthrough(init, parts[1].iov_len);
    if (!accepts_writes) return;
    init->flags &= ~(uint32_t)(FUSE_ATOMIC_O_TRUNC | FUSE_AUTO_INVAL_DATA | FUSE_ASYNC_DIO);
    init->flags |= FUSE_HANDLE_KILLPRIV_V2;
    if (init->max_write > most_write_bytes) init->max_write = most_write_bytes;
}

/* Tells the handler that the kernel sends this request again: the daemon before may have done it
 * already. pyfuse3 hides the request's number, so the bit is set in the pid, which is below 2^22.
 * Only for requests that must not be done twice. */
static void tell_of_resend(struct fuse_in_header *in) {
    if (!(in->unique & RESENT)) return;
    switch (in->opcode) {
    case FUSE_CREATE:
    case FUSE_MKNOD:
    case FUSE_MKDIR:
    case FUSE_UNLINK:
    case FUSE_RMDIR:
    case FUSE_RENAME:
    case FUSE_RENAME2:
        in->pid |= RESENT_PID;
    }
}

/* Receives all packets of a request. Returns its length in bytes; -1 with EINTR if there is none
 * yet, and with ENODEV at the end. The relay sends the packets of a request one after the other. If
 * some are late, because the socket is full, what has come is kept in `begun`. */
static ssize_t receive_request(int fd, char *buffer, size_t length) {
    const struct fuse_in_header *in = (struct fuse_in_header *)buffer;
    size_t got = begun_bytes;
    memcpy(buffer, begun, got);
    begun_bytes = 0;
    while (got < sizeof *in || got < in->len) {
        struct pollfd rest = {fd, POLLIN, 0};
        ssize_t more = recv(fd, buffer + got, length - got, MSG_DONTWAIT);
        if (more > 0) {
            got += (size_t)more;
        } else if (more == 0 || (errno != EAGAIN && errno != EINTR)) {
            errno = ENODEV; /* the relay is gone, or the mount has ended */
            return -1;
        } else if (got == 0) {
            errno = EINTR;
            return -1;
        } else if (errno == EAGAIN && poll(&rest, 1, REST_MS) == 0) {
            memcpy(begun, buffer, got);
            begun_bytes = got;
            errno = EINTR;
            return -1;
        }
    }
    return (ssize_t)got;
}

/* libfuse's read function behind a relay. Copies a request into `buffer`, either a deferred one
 * that is due or a new one. Returns its length in bytes; -1 with EINTR if there is none. EAGAIN
 * would end the caller's loop; after EINTR the caller waits for the next request. */
static ssize_t read_request(int fd, void *buffer, size_t length, void *unused) {
    (void)unused;
    if (kept_bytes) {
        size_t got = kept_bytes;
        memcpy(buffer, kept, got);
        kept_bytes = 0;
        return (ssize_t)got;
    }
    for (int tries = 0; tries < MOST_TRIES; tries++) {
        ssize_t got = (ssize_t)reads_take(buffer);
        if (got > 0) return got;
        got = receive_request(fd, buffer, length);
        if (got < 0) return -1; /* ENODEV ends the session */
        note_request(buffer);
        tell_of_resend(buffer);
        if (reads_admit(buffer, (size_t)got)) return got;
    }
    errno = EINTR;
    return -1;
}

enum next_request session_next_read(struct next_read *found) {
    for (int tries = 0; tries < MOST_TRIES; tries++) {
        const struct fuse_in_header *in = (struct fuse_in_header *)kept;
        const struct fuse_read_in *read_in = (const struct fuse_read_in *)(in + 1);
        if (!connected || begun_bytes || kept_bytes || reads_are_due()) return NEXT_FOR_LIBFUSE;
        ssize_t got = recv(requests_fd, kept, sizeof kept, MSG_DONTWAIT | MSG_PEEK);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return NEXT_NONE;
        bool is_read = got >= (ssize_t)(sizeof *in + sizeof *read_in) && in->opcode == FUSE_READ;
        if (!is_read || in->len != (size_t)got) return NEXT_FOR_LIBFUSE;
        got = recv(requests_fd, kept, sizeof kept, MSG_DONTWAIT); /* the same one: nobody else reads */
        note_request(in);
        if (!reads_admit(kept, (size_t)got)) continue;
        kept_bytes = (size_t)got;
        *found = (struct next_read){kept, kept_bytes, in->unique, read_in->fh, read_in->offset,
                                    read_in->size};
        return NEXT_READ;
    }
    return NEXT_NONE;
}

void session_take_read(void) { kept_bytes = 0; }

/* Writes a reply to the kernel. If the kernel has no such request (ENOENT), because its process was
 * killed and it was answered already, this counts as success. */
static ssize_t write_parts(int fd, const struct iovec *parts, int count) {
    const struct fuse_out_header *out = parts[0].iov_base;
    ssize_t written = writev(fd, parts, count);
    if (out->unique != 0) reads_answered(out->unique);
    return written < 0 && errno == ENOENT && out->unique != 0 ? (ssize_t)out->len : written;
}

/* libfuse's write function behind a relay. Drops the answer to a replayed INIT, sends
 * invalidations of names to the relay if it takes them, and writes all other replies to
 * /dev/fuse. */
static ssize_t write_reply(int fd, struct iovec *parts, int count, void *unused) {
    (void)fd;
    (void)unused;
    const struct fuse_out_header *out = parts[0].iov_base;
    if (out->unique == RELAY_INIT_UNIQUE) return out->len; /* to a replayed INIT */
    if (out->unique == 0 && out->error == FUSE_NOTIFY_INVAL_ENTRY && notices_fd >= 0) {
        /* See pass_notices_on in forwarding.c. Errors do not matter: a relay that has closed the
         * socket ends this daemon. */
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
        while (sendmsg(notices_fd, &message, MSG_NOSIGNAL) < 0 && errno == EINTR) {}
        return out->len;
    }
    edit_init_reply(parts, count);
    return write_parts(device_fd, parts, count);
}

/* The same two functions without a relay: requests and replies both use /dev/fuse. Killed
 * readers are then answered by a thread of this process. */
static struct waiting plain_waiting;

static ssize_t read_plainly(int fd, void *buffer, size_t length, void *unused) {
    (void)unused;
    const struct fuse_in_header *in = buffer;
    ssize_t got = (ssize_t)reads_take(buffer);
    if (got > 0) return got;
    got = read(fd, buffer, length);
    if (got < 0 && errno == EAGAIN) errno = EINTR; /* the request was taken by an earlier call */
    if (got < (ssize_t)sizeof *in) return got;
    note_request(in);
    if (in->opcode == FUSE_INTERRUPT)
        waiting_interrupt(&plain_waiting, in);
    else
        waiting_note(&plain_waiting, in);
    if (in->opcode != FUSE_INTERRUPT && reads_admit(in, (size_t)got)) return got;
    errno = EINTR;
    return -1;
}

static ssize_t write_plainly(int fd, struct iovec *parts, int count, void *unused) {
    (void)unused;
    edit_init_reply(parts, count);
    return write_parts(fd, parts, count);
}

/* A thread: answers the requests of killed processes. Reads `looked_at`, which is atomic,
 * unlocked. */
static void *look_for_killed(void *unused) {
    (void)unused;
    struct timespec pause = {0, WAITING_LOOK_NS};
    for (;;) {
        nanosleep(&pause, NULL);
        if (plain_waiting.looked_at > 0) waiting_look(&plain_waiting);
    }
    return NULL;
}

/* Starts `look_for_killed`, which runs for as long as the process. Signals are blocked in it,
 * because the main thread handles them. False on failure. */
static bool watch_plainly(int fd) {
    pthread_t thread;
    sigset_t all, before;
    if (waiting_init(&plain_waiting, fd) != 0) return false;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool began = pthread_create(&thread, NULL, look_for_killed, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (began) pthread_detach(thread);
    return began;
}

/* Returns libfuse's own function of this name; NULL if libfuse is not loaded. */
static void *of_libfuse(const char *name) {
    void *found = NULL, *libfuse = dlopen("libfuse3.so.3", RTLD_LAZY | RTLD_NOLOAD);
    if (libfuse == NULL) libfuse = dlopen("libfuse3.so.4", RTLD_LAZY | RTLD_NOLOAD);
    if (libfuse != NULL) {
        found = dlsym(libfuse, name);
        dlclose(libfuse); /* it stays loaded: this module links to it */
    }
    return found;
}

/* Replaces libfuse's function for pyfuse3, whose session is not accessible in another way. pyfuse3
 * resolves the name to this function, because this module is loaded first, with RTLD_GLOBAL (see
 * __init__.py). After `session_connect`, it connects the session to the relay. Otherwise it calls
 * libfuse's function, and then sets the plain read and write functions. */
__attribute__((visibility("default"))) int fuse_session_mount(struct fuse_session *session,
                                                              const char *mountpoint) {
    static const struct fuse_custom_io io = {.writev = write_reply, .read = read_request};
    static const struct fuse_custom_io plain = {.writev = write_plainly, .read = read_plainly};
    if (wanted_requests_fd >= 0) {
        int fd = requests_fd = wanted_requests_fd;
        wanted_requests_fd = -1;
        int result = fuse_session_custom_io(session, &io, fd);
        connected = result == 0;
        reads_begin(device_fd);
        return result;
    }
    int (*real)(struct fuse_session *, const char *) = NULL;
    *(void **)&real = of_libfuse("fuse_session_mount");
    int result = real == NULL ? -1 : real(session, mountpoint);
    int fd = result == 0 ? fuse_session_fd(session) : -1;
    if (fd < 0 || !watch_plainly(fd)) return result;
    fuse_session_custom_io(session, &plain, fd);
    reads_begin(fd);
    return result;
}

/* Replaces libfuse's function in the same way, to stop writes before the descriptor is closed. */
__attribute__((visibility("default"))) void fuse_session_unmount(struct fuse_session *session) {
    void (*real)(struct fuse_session *) = NULL;
    *(void **)&real = of_libfuse("fuse_session_unmount");
    if (plain_waiting.entries != NULL) waiting_end(&plain_waiting);
    if (real != NULL) real(session);
}

void session_connect(int requests, int device, bool takes_notices) {
    wanted_requests_fd = requests;
    device_fd = device;
    notices_fd = takes_notices ? requests : -1;
    connected = false;
    if (begun == NULL && (begun = malloc(MOST_REQUEST_BYTES)) == NULL) abort();
    begun_bytes = kept_bytes = 0;
    int buffer_bytes = 0; /* the other end has the same */
    socklen_t size = sizeof buffer_bytes;
    getsockopt(requests, SOL_SOCKET, SO_SNDBUF, &buffer_bytes, &size);
    most_write_bytes = buffer_bytes >= BUFFER_BYTES ? MOST_WRITE_BYTES : SMALL_WRITE_BYTES;
}

void session_accept_writes(void) { accepts_writes = true; }

void session_pass_through(void) { passes_through = true; }

/* Returns the process of a thread; 0 if it is not known. */
static uint32_t process_of(uint32_t pid) {
    char path[32], text[512], *found;
    uint32_t process = 0;
    int fd = (int)syscall(SYS_pidfd_open, pid, 0); /* fails for all threads but the first one */
    if (fd >= 0) {
        close(fd);
        return pid;
    }
    snprintf(path, sizeof path, "/proc/%u/status", pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    text[got > 0 ? got : 0] = 0;
    found = strstr(text, "\nTgid:");
    if (found != NULL) process = (uint32_t)strtoul(found + 6, NULL, 10);
    return process;
}

uint32_t session_request_caller(uint32_t *uid, uint32_t *gid) {
    *uid = request_uid;
    *gid = request_gid;
    return request_pid & ~RESENT_PID;
}

uint32_t session_request_process(void) {
    static uint32_t known_pid, known_process;
    static uint64_t known_ns;
    uint32_t pid = request_pid & ~RESENT_PID;
    struct timespec at;
    if (pid == 0) return 0;
    clock_gettime(CLOCK_MONOTONIC, &at);
    uint64_t now_ns = (uint64_t)at.tv_sec * 1000000000u + (uint64_t)at.tv_nsec;
    if (pid != known_pid || known_process == 0 || now_ns > known_ns + PROCESS_NS) {
        known_process = process_of(pid);
        known_pid = pid;
        known_ns = now_ns;
    }
    return known_process;
}

bool session_is_connected(void) { return connected; }

/* The Python interface of the relay (documented in _relay.pyi), and the daemon's end of it:
 * libfuse reads requests from the relay's socket, and writes replies to /dev/fuse.
 *
 * The supervisor uses only Relay and `create_table`. The daemon uses only Table and the
 * functions for its session. The functions that libfuse calls run in the daemon's loop thread,
 * with one exception: pyfuse3's notify thread writes invalidations of names by `write_reply` or
 * `write_plainly`.
 *
 * `attach`, `detach` and `resend` of Relay release the GIL, because they may wait for the relay's
 * lock or for the kernel. The threads of a relay never take the GIL. */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#define FUSE_USE_VERSION 312
#include <Python.h>

#include <dlfcn.h>
#include <errno.h>
#include <fuse_lowlevel.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "reads.h"
#include "relay.h"
#include "sums.h"
#include "waiting.h"

/* -- errors ------------------------------------------------------------------------------------ */

/* Raises OSError for a positive or negative errno. Returns NULL. */
static PyObject *os_error(int error) {
    errno = error < 0 ? -error : error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

/* -- the daemon's end -------------------------------------------------------------------------- */

#define MOST_TRIES 64 /* requests taken for one that reaches libfuse */

/* Set by `connect`. The session then owns the socket; `device_fd` stays the caller's. */
static int wanted_requests_fd = -1, device_fd = -1;
static int notices_fd = -1; /* the relay's socket if it takes notices, else -1 */
static bool connected;
static uint64_t init_unique; /* of an unanswered INIT, else 0 */

static void note_init(const struct fuse_in_header *in) {
    if (in->opcode == FUSE_INIT) init_unique = in->unique;
}

/* Sets FUSE_PARALLEL_DIROPS in the answer to INIT. Without this flag, the kernel sends look-ups
 * in one directory one at a time. pyfuse3 does not set it, and libfuse before 3.17 can't
 * (libfuse #861). */
static void ask_for_parallel_lookups(const struct iovec *parts, int count) {
    const struct fuse_out_header *out = parts[0].iov_base;
    if (init_unique == 0 || out->unique != init_unique) return;
    init_unique = 0;
    if (out->error == 0 && count > 1 && parts[1].iov_len >= FUSE_COMPAT_22_INIT_OUT_SIZE)
        ((struct fuse_init_out *)parts[1].iov_base)->flags |= FUSE_PARALLEL_DIROPS;
}

/* libfuse's read function behind a relay. Copies a request into `buffer`, either a kept one that is
 * due or a new one. Returns its length in bytes; -1 with EINTR if there is none. EAGAIN would end
 * the caller's loop; after EINTR the caller waits for the next request. */
static ssize_t read_request(int fd, void *buffer, size_t length, void *unused) {
    (void)unused;
    for (int tries = 0; tries < MOST_TRIES; tries++) {
        ssize_t got = (ssize_t)reads_take(buffer);
        if (got > 0) return got;
        got = recv(fd, buffer, length, MSG_DONTWAIT);
        if (got <= 0) {
            /* ENODEV ends the session: the relay is gone, or the mount has ended. */
            errno = got < 0 && (errno == EAGAIN || errno == EINTR) ? EINTR : ENODEV;
            return -1;
        }
        note_init(buffer);
        if (reads_admit(buffer, (size_t)got)) return got;
    }
    errno = EINTR;
    return -1;
}

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
        /* See pass_notices_on in relay.c. Errors do not matter: a relay that has closed the socket
         * ends this daemon. */
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
        while (sendmsg(notices_fd, &message, MSG_NOSIGNAL) < 0 && errno == EINTR) {}
        return out->len;
    }
    ask_for_parallel_lookups(parts, count);
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
    note_init(in);
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
    ask_for_parallel_lookups(parts, count);
    return write_parts(fd, parts, count);
}

/* A thread: answers the requests of killed processes. Reads `looked_at`, which is atomic,
 * unlocked. */
static void *look_for_killed(void *unused) {
    (void)unused;
    struct timespec pause = {0, 50000000};
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
 * __init__.py). After `connect`, it connects the session to the relay. Otherwise it calls libfuse's
 * function, and then sets the plain read and write functions. */
__attribute__((visibility("default"))) int fuse_session_mount(struct fuse_session *session,
                                                              const char *mountpoint) {
    static const struct fuse_custom_io io = {.writev = write_reply, .read = read_request};
    static const struct fuse_custom_io plain = {.writev = write_plainly, .read = read_plainly};
    if (wanted_requests_fd >= 0) {
        int fd = wanted_requests_fd;
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

static PyObject *connect_session(PyObject *module, PyObject *args) {
    (void)module;
    int takes_notices;
    if (!PyArg_ParseTuple(args, "iip", &wanted_requests_fd, &device_fd, &takes_notices)) return NULL;
    notices_fd = takes_notices ? wanted_requests_fd : -1;
    connected = false;
    Py_RETURN_NONE;
}

static PyObject *bound_reads(PyObject *module, PyObject *args) {
    (void)module;
    unsigned user, most;
    int is_slow;
    if (!PyArg_ParseTuple(args, "IIp", &user, &most, &is_slow)) return NULL;
    reads_share(user, most, is_slow);
    Py_RETURN_NONE;
}

static PyObject *reads_ready_fd(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    int fd = reads_init();
    return fd < 0 ? os_error(fd) : PyLong_FromLong(fd);
}

static PyObject *is_connected(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    return PyBool_FromLong(connected);
}

/* -- Relay ------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    struct relay *relay; /* never freed, because its threads may live as long as the process */
} RelayObject;

static int Relay_init(RelayObject *self, PyObject *args, PyObject *kwds) {
    static char *names[] = {"device_fd", "table_fd", "threads", NULL};
    int device, table, error;
    unsigned threads;
    if (!PyArg_ParseTupleAndKeywords(args, kwds, "iiI", names, &device, &table, &threads)) return -1;
    self->relay = relay_new(device, table, threads, &error);
    if (self->relay == NULL) {
        os_error(error);
        return -1;
    }
    return 0;
}

/* Stops the relay, but does not free it. */
static void Relay_dealloc(RelayObject *self) {
    if (self->relay != NULL) relay_stop(self->relay);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *Relay_start(RelayObject *self, PyObject *none) {
    (void)none;
    int result = relay_start(self->relay);
    if (result < 0) return os_error(result);
    Py_RETURN_NONE;
}

static PyObject *Relay_attach(RelayObject *self, PyObject *args) {
    int fd, result;
    if (!PyArg_ParseTuple(args, "i", &fd)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    result = relay_attach(self->relay, fd);
    Py_END_ALLOW_THREADS
    if (result < 0) return os_error(result);
    Py_RETURN_NONE;
}

static PyObject *Relay_detach(RelayObject *self, PyObject *none) {
    (void)none;
    Py_BEGIN_ALLOW_THREADS
    relay_detach(self->relay);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *Relay_resend(RelayObject *self, PyObject *none) {
    (void)none;
    bool result;
    Py_BEGIN_ALLOW_THREADS
    result = relay_resend(self->relay);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(result);
}

static PyObject *Relay_set_file(RelayObject *self, PyObject *args) {
    unsigned file;
    int fd, blocks;
    if (!PyArg_ParseTuple(args, "Iip", &file, &fd, &blocks)) return NULL;
    int result = relay_set_file(self->relay, file, fd, blocks);
    if (result < 0) return os_error(result);
    Py_RETURN_NONE;
}

static PyObject *Relay_close_file(RelayObject *self, PyObject *args) {
    unsigned file;
    if (!PyArg_ParseTuple(args, "I", &file)) return NULL;
    relay_close_file(self->relay, file);
    Py_RETURN_NONE;
}

static PyObject *Relay_drop_files(RelayObject *self, PyObject *none) {
    (void)none;
    relay_drop_files(self->relay);
    Py_RETURN_NONE;
}

static PyObject *Relay_stop(RelayObject *self, PyObject *none) {
    (void)none;
    relay_stop(self->relay);
    Py_RETURN_NONE;
}

static PyObject *Relay_pretend_no_resend(RelayObject *self, PyObject *none) {
    (void)none;
    relay_pretend_no_resend(self->relay);
    Py_RETURN_NONE;
}

static PyObject *Relay_ended_fd(RelayObject *self, void *closure) {
    (void)closure;
    return PyLong_FromLong(relay_ended_fd(self->relay));
}

static PyMethodDef relay_methods[] = {
    {"start", (PyCFunction)Relay_start, METH_NOARGS, NULL},
    {"attach", (PyCFunction)Relay_attach, METH_VARARGS, NULL},
    {"detach", (PyCFunction)Relay_detach, METH_NOARGS, NULL},
    {"resend", (PyCFunction)Relay_resend, METH_NOARGS, NULL},
    {"set_file", (PyCFunction)Relay_set_file, METH_VARARGS, NULL},
    {"close_file", (PyCFunction)Relay_close_file, METH_VARARGS, NULL},
    {"drop_files", (PyCFunction)Relay_drop_files, METH_NOARGS, NULL},
    {"stop", (PyCFunction)Relay_stop, METH_NOARGS, NULL},
    {"pretend_no_resend", (PyCFunction)Relay_pretend_no_resend, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef relay_attributes[] = {
    {"ended_fd", (getter)Relay_ended_fd, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject RelayType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cachefs.fuse.relay._relay.Relay",
    .tp_basicsize = sizeof(RelayObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Relay_init,
    .tp_dealloc = (destructor)Relay_dealloc,
    .tp_methods = relay_methods,
    .tp_getset = relay_attributes,
};

/* -- Table ------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    struct rt_table table; /* the mapping is owned */
} TableObject;

static int Table_init(TableObject *self, PyObject *args, PyObject *kwds) {
    static char *names[] = {"fd", NULL};
    int fd;
    if (!PyArg_ParseTupleAndKeywords(args, kwds, "i", names, &fd)) return -1;
    rt_close(&self->table);
    if (rt_open(&self->table, fd) < 0) {
        PyErr_SetString(PyExc_ValueError, "not a relay's table, or one of another format");
        return -1;
    }
    rt_begin_epoch(&self->table);
    return 0;
}

static void Table_dealloc(TableObject *self) {
    rt_close(&self->table);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* True if file number and offset (bytes) are in range; otherwise raises ValueError. */
static bool is_place(unsigned long file, unsigned long long offset) {
    if (file < RT_FILES && offset % RT_SLOT_UNIT == 0 && offset / RT_SLOT_UNIT <= UINT32_MAX)
        return true;
    PyErr_SetString(PyExc_ValueError, "no such place in a slab file");
    return false;
}

static PyObject *Table_publish(TableObject *self, PyObject *args) {
    unsigned long long ino, offset, checksum;
    unsigned long block, file, length;
    int is_last;
    if (!PyArg_ParseTuple(args, "KkkKkpK", &ino, &block, &file, &offset, &length, &is_last,
                          &checksum))
        return NULL;
    if (!is_place(file, offset)) return NULL;
    if (length == 0 || length > 1u << RT_BLOCK_SHIFT || block > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "no such block");
        return NULL;
    }
    rt_publish(&self->table, ino, (uint32_t)block, (uint32_t)file, (uint32_t)(offset / RT_SLOT_UNIT),
               (uint32_t)length, is_last, checksum);
    Py_RETURN_NONE;
}

static PyObject *Table_withdraw(TableObject *self, PyObject *args) {
    unsigned long long offset;
    unsigned long file;
    if (!PyArg_ParseTuple(args, "kK", &file, &offset)) return NULL;
    if (!is_place(file, offset)) return NULL;
    rt_withdraw(&self->table, (uint32_t)file, (uint32_t)(offset / RT_SLOT_UNIT));
    Py_RETURN_NONE;
}

static PyObject *Table_revive(TableObject *self, PyObject *args) {
    unsigned long file;
    if (!PyArg_ParseTuple(args, "k", &file) || !is_place(file, 0)) return NULL;
    rt_revive(&self->table, (uint32_t)file);
    Py_RETURN_NONE;
}

static PyObject *Table_withdraw_file(TableObject *self, PyObject *args) {
    unsigned long file;
    if (!PyArg_ParseTuple(args, "k", &file) || !is_place(file, 0)) return NULL;
    rt_withdraw_file(&self->table, (uint32_t)file);
    Py_RETURN_NONE;
}

static PyObject *Table_find(TableObject *self, PyObject *args) {
    unsigned long long ino;
    unsigned long block;
    struct rt_found found;
    if (!PyArg_ParseTuple(args, "Kk", &ino, &block)) return NULL;
    if (!rt_find(&self->table, ino, (uint32_t)block, &found)) Py_RETURN_NONE;
    return Py_BuildValue("kKkO", (unsigned long)found.file,
                         (unsigned long long)found.slot * RT_SLOT_UNIT, (unsigned long)found.length,
                         found.is_last ? Py_True : Py_False);
}

static PyObject *Table_drain(TableObject *self, PyObject *args) {
    unsigned most;
    if (!PyArg_ParseTuple(args, "I", &most)) return NULL;
    PyObject *hits = PyList_New(0);
    if (hits == NULL) return NULL;
    const struct rt_entry *entry;
    for (; most > 0 && (entry = rt_drain(&self->table)) != NULL; most--) {
        PyObject *hit = Py_BuildValue(
            "KkkK", (unsigned long long)entry->ino, (unsigned long)entry->block,
            (unsigned long)entry->file, (unsigned long long)entry->slot * RT_SLOT_UNIT);
        if (hit == NULL || PyList_Append(hits, hit) < 0) {
            Py_XDECREF(hit);
            Py_DECREF(hits);
            return NULL;
        }
        Py_DECREF(hit);
    }
    return hits;
}

static PyObject *Table_pause(TableObject *self, PyObject *args) {
    int paused;
    if (!PyArg_ParseTuple(args, "p", &paused)) return NULL;
    atomic_store(&self->table.header->paused, (uint32_t)paused);
    Py_RETURN_NONE;
}

static PyObject *Table_verify_all(TableObject *self, PyObject *args) {
    int all;
    if (!PyArg_ParseTuple(args, "p", &all)) return NULL;
    atomic_store(&self->table.header->verify_all, (uint32_t)all);
    Py_RETURN_NONE;
}

static PyObject *Table_note_sums(TableObject *self, PyObject *args) {
    unsigned long long checksum;
    Py_buffer block;
    if (!PyArg_ParseTuple(args, "Ky*", &checksum, &block)) return NULL;
    bool fits = block.len <= 1 << RT_BLOCK_SHIFT;
    Py_BEGIN_ALLOW_THREADS
    if (fits) sums_note(&self->table, checksum, block.buf, (uint32_t)block.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&block);
    Py_RETURN_NONE;
}

static PyObject *Table_has_sums(TableObject *self, PyObject *args) {
    unsigned long long checksum;
    if (!PyArg_ParseTuple(args, "K", &checksum)) return NULL;
    return PyBool_FromLong(sums_are_known(&self->table, checksum));
}

static PyObject *Table_sums_agree(TableObject *self, PyObject *args) {
    unsigned long long checksum;
    unsigned long from;
    Py_buffer bytes;
    if (!PyArg_ParseTuple(args, "Kky*", &checksum, &from, &bytes)) return NULL;
    bool agree = from % RT_PART_BYTES == 0 && from + bytes.len <= 1 << RT_BLOCK_SHIFT &&
                 sums_agree(&self->table, checksum, (uint32_t)from, bytes.buf, (uint32_t)bytes.len);
    PyBuffer_Release(&bytes);
    return PyBool_FromLong(agree);
}

static PyObject *Table_user(TableObject *self, PyObject *args) {
    unsigned uid;
    if (!PyArg_ParseTuple(args, "I", &uid)) return NULL;
    return PyLong_FromUnsignedLong(rt_user(&self->table, uid));
}

static PyObject *Table_limit_user(TableObject *self, PyObject *args) {
    unsigned user;
    int limited;
    if (!PyArg_ParseTuple(args, "Ip", &user, &limited)) return NULL;
    if (user < RT_USERS) atomic_store(&self->table.limited[user], (uint8_t)limited);
    Py_RETURN_NONE;
}

static PyObject *Table_users(TableObject *self, PyObject *none) {
    (void)none;
    PyObject *users = PyList_New(0);
    for (unsigned user = 0; users != NULL && user < RT_USERS; user++) {
        uint32_t uid = atomic_load(&self->table.users[user]);
        if (uid == 0 && user != 0) continue;
        PyObject *item = Py_BuildValue("IIK", user, uid - 1,
                                       (unsigned long long)atomic_load(&self->table.user_bytes[user]));
        if (item == NULL || PyList_Append(users, item) < 0) Py_CLEAR(users);
        Py_XDECREF(item);
    }
    return users;
}

static PyObject *Table_take_file_hits(TableObject *self, PyObject *args) {
    unsigned long file;
    if (!PyArg_ParseTuple(args, "k", &file) || !is_place(file, 0)) return NULL;
    /* Two separate exchanges: a hit in between is reported by the next call. */
    uint32_t hits = atomic_exchange(&self->table.file_hits[file], 0);
    uint64_t bytes = atomic_exchange(&self->table.file_bytes[file], 0);
    return Py_BuildValue("kK", (unsigned long)hits, (unsigned long long)bytes);
}

static PyObject *Table_counters(TableObject *self, PyObject *none) {
    (void)none;
    struct rt_header *h = self->table.header;
#define COUNT(name) #name, (unsigned long long)atomic_load(&h->name)
    return Py_BuildValue("{sKsKsKsKsKsKsKsKsK}", COUNT(hits), COUNT(hit_bytes), COUNT(forwarded),
                         COUNT(missed), COUNT(waited), COUNT(late), COUNT(changed), COUNT(unnoted),
                         COUNT(hit_ns));
#undef COUNT
}

static PyObject *Table_hit_times(TableObject *self, PyObject *none) {
    (void)none;
    PyObject *times = PyList_New(RT_BUCKETS);
    for (int i = 0; times != NULL && i < RT_BUCKETS; i++) {
        PyObject *count =
            PyLong_FromUnsignedLongLong(atomic_load(&self->table.header->hit_times[i]));
        if (count == NULL)
            Py_CLEAR(times);
        else
            PyList_SET_ITEM(times, i, count);
    }
    return times;
}

static PyMethodDef table_methods[] = {
    {"publish", (PyCFunction)Table_publish, METH_VARARGS, NULL},
    {"withdraw", (PyCFunction)Table_withdraw, METH_VARARGS, NULL},
    {"revive", (PyCFunction)Table_revive, METH_VARARGS, NULL},
    {"withdraw_file", (PyCFunction)Table_withdraw_file, METH_VARARGS, NULL},
    {"find", (PyCFunction)Table_find, METH_VARARGS, NULL},
    {"drain", (PyCFunction)Table_drain, METH_VARARGS, NULL},
    {"pause", (PyCFunction)Table_pause, METH_VARARGS, NULL},
    {"verify_all", (PyCFunction)Table_verify_all, METH_VARARGS, NULL},
    {"note_sums", (PyCFunction)Table_note_sums, METH_VARARGS, NULL},
    {"has_sums", (PyCFunction)Table_has_sums, METH_VARARGS, NULL},
    {"sums_agree", (PyCFunction)Table_sums_agree, METH_VARARGS, NULL},
    {"user", (PyCFunction)Table_user, METH_VARARGS, NULL},
    {"limit_user", (PyCFunction)Table_limit_user, METH_VARARGS, NULL},
    {"users", (PyCFunction)Table_users, METH_NOARGS, NULL},
    {"take_file_hits", (PyCFunction)Table_take_file_hits, METH_VARARGS, NULL},
    {"counters", (PyCFunction)Table_counters, METH_NOARGS, NULL},
    {"hit_times", (PyCFunction)Table_hit_times, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject TableType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cachefs.fuse.relay._relay.Table",
    .tp_basicsize = sizeof(TableObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Table_init,
    .tp_dealloc = (destructor)Table_dealloc,
    .tp_methods = table_methods,
};

/* -- the module -------------------------------------------------------------------------------- */

static PyObject *create_table(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long entries;
    if (!PyArg_ParseTuple(args, "K", &entries)) return NULL;
    int fd = rt_create(entries);
    return fd < 0 ? os_error(fd) : PyLong_FromLong(fd);
}

static PyMethodDef functions[] = {
    {"create_table", create_table, METH_VARARGS, NULL},
    {"connect", connect_session, METH_VARARGS, NULL},
    {"is_connected", is_connected, METH_NOARGS, NULL},
    {"bound_reads", bound_reads, METH_VARARGS, NULL},
    {"reads_ready_fd", reads_ready_fd, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_relay",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__relay(void) {
    if (PyType_Ready(&RelayType) < 0 || PyType_Ready(&TableType) < 0) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || PyModule_AddObjectRef(module, "Relay", (PyObject *)&RelayType) < 0 ||
        PyModule_AddObjectRef(module, "Table", (PyObject *)&TableType) < 0 ||
        PyModule_AddIntConstant(module, "FORMAT", RT_FORMAT) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}

/* The Python type Relay, which only the supervisor uses.
 *
 * The object refers to a relay, which is never freed. `attach`, `detach`, `resend` and `stop`
 * release the GIL, because they may wait for the relay's lock or for the kernel. The threads of a
 * relay never take the GIL.
 */
#include "python_types.h"

#include "relay.h"

typedef struct {
    PyObject_HEAD
    struct relay *relay; /* never freed, because its threads may live as long as the process */
} RelayObject;

static int Relay_init(RelayObject *self, PyObject *args, PyObject *kwds) {
    static char *names[] = {"device_fd", "table_fd", "threads", "writable", "passthrough", NULL};
    int device, table, error, writable = false, passthrough = false;
    unsigned threads;
    if (!PyArg_ParseTupleAndKeywords(args, kwds, "iiI|pp", names, &device, &table, &threads,
                                     &writable, &passthrough))
        return -1;
    self->relay = relay_new(device, table, threads, writable, passthrough, &error);
    if (self->relay == NULL) {
        os_error(error);
        return -1;
    }
    return 0;
}

/* Stops the relay, but does not free it. */
static void Relay_dealloc(RelayObject *self) {
    if (self->relay != NULL) {
        Py_BEGIN_ALLOW_THREADS
        relay_stop(self->relay);
        Py_END_ALLOW_THREADS
    }
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
    int fd, on_disk;
    if (!PyArg_ParseTuple(args, "Iip", &file, &fd, &on_disk)) return NULL;
    int result = relay_set_file(self->relay, file, fd, on_disk);
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
    Py_BEGIN_ALLOW_THREADS
    relay_stop(self->relay);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *Relay_leave(RelayObject *self, PyObject *none) {
    (void)none;
    Py_BEGIN_ALLOW_THREADS
    relay_leave(self->relay);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *Relay_stop_reading(RelayObject *self, PyObject *none) {
    (void)none;
    Py_BEGIN_ALLOW_THREADS
    relay_stop_reading(self->relay);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *Relay_unanswered(RelayObject *self, PyObject *none) {
    (void)none;
    unsigned count;
    Py_BEGIN_ALLOW_THREADS
    count = relay_unanswered(self->relay);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLong(count);
}

static PyObject *Relay_kept_init(RelayObject *self, PyObject *none) {
    (void)none;
    char *bytes = NULL;
    size_t length = relay_kept_init(self->relay, &bytes);
    if (length == 0) Py_RETURN_NONE;
    PyObject *result = PyBytes_FromStringAndSize(bytes, (Py_ssize_t)length);
    free(bytes);
    return result;
}

static PyObject *Relay_adopt(RelayObject *self, PyObject *args) {
    const char *init;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "y#", &init, &length)) return NULL;
    int result = relay_adopt(self->relay, init, (size_t)length);
    if (result < 0) return os_error(result);
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

static PyObject *Relay_can_resend(RelayObject *self, void *closure) {
    (void)closure;
    return PyBool_FromLong(relay_can_resend(self->relay));
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
    {"leave", (PyCFunction)Relay_leave, METH_NOARGS, NULL},
    {"stop_reading", (PyCFunction)Relay_stop_reading, METH_NOARGS, NULL},
    {"unanswered", (PyCFunction)Relay_unanswered, METH_NOARGS, NULL},
    {"kept_init", (PyCFunction)Relay_kept_init, METH_NOARGS, NULL},
    {"adopt", (PyCFunction)Relay_adopt, METH_VARARGS, NULL},
    {"pretend_no_resend", (PyCFunction)Relay_pretend_no_resend, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef relay_attributes[] = {
    {"ended_fd", (getter)Relay_ended_fd, NULL, NULL, NULL},
    {"can_resend", (getter)Relay_can_resend, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject RelayType = {
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

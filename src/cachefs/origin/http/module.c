/* The Python module `_engine`, documented in _engine.pyi.
 *
 * A `Transfer` owns its buffers until the engine has told that it has ended. So the engine's
 * threads may write into them without the GIL. `Engine.collect` alone takes transfers from the
 * engine.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "engine.h"
#include "python_md5.h"

typedef struct {
    PyObject_HEAD
    struct engine *engine; /* NULL: closed */
} EngineObject;

typedef struct {
    PyObject_HEAD
    EngineObject *engine; /* keeps the engine, and with it `transfer->worker`, alive */
    struct transfer *transfer;
    bool is_ended;
    Py_buffer sink, body;
    PyObject *waiter;
} TransferObject;

/* Memory for what will be received. It is not cleared, so only what was received may be read. */
typedef struct {
    PyObject_HEAD
    char *bytes;
    Py_ssize_t size_bytes;
} RoomObject;

static PyTypeObject EngineType, TransferType, RoomType;

static bool copy_text(char **to, const char *from) {
    if (from == NULL || (*to = strdup(from)) != NULL) return true;
    PyErr_NoMemory();
    return false;
}

static bool add_header(struct transfer *transfer, const char *line) {
    struct curl_slist *longer = curl_slist_append(transfer->headers, line);
    if (longer == NULL) {
        PyErr_NoMemory();
        return false;
    }
    transfer->headers = longer;
    return true;
}

/* Whether a text can be a part of a head: no line of it can be another header. */
static bool is_clean(const char *text) {
    for (; *text; text++)
        if ((unsigned char)*text < ' ' || *text == 0x7f) return false;
    return true;
}

static bool set_headers(struct transfer *transfer, PyObject *headers) {
    bool has_type = false;
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(headers); at++) {
        Py_ssize_t size;
        const char *line = PyUnicode_AsUTF8AndSize(PyTuple_GET_ITEM(headers, at), &size);
        if (line == NULL) return false;
        if (strlen(line) != (size_t)size || !is_clean(line)) {
            PyErr_SetString(PyExc_ValueError, "a header of the request is not printable");
            return false;
        }
        has_type |= !strncasecmp(line, "content-type:", 13);
        if (!add_header(transfer, line)) return false;
    }
    /* What libcurl would add itself. */
    return add_header(transfer, "Accept:") && add_header(transfer, "Expect:") &&
           (has_type || add_header(transfer, "Content-Type:"));
}

static bool set_expected(struct transfer *transfer, PyObject *expected) {
    PyObject *headers;
    if (expected == Py_None) return true;
    if (!PyArg_ParseTuple(expected, "iO!", &transfer->expected_status, &PyTuple_Type, &headers))
        return false;
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(headers); at++) {
        const char *name, *value;
        if (at == MOST_EXPECTED) {
            PyErr_SetString(PyExc_ValueError, "too many headers are expected");
            return false;
        }
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(headers, at), "ss", &name, &value)) return false;
        struct expected *each = &transfer->expected[transfer->expected_count++];
        if (!copy_text(&each->value, value)) return false;
        if (asprintf(&each->name, "%s:", name) < 0) {
            each->name = NULL;
            PyErr_NoMemory();
            return false;
        }
    }
    return true;
}

static bool set_ends(TransferObject *self, PyObject *body, PyObject *sink) {
    struct transfer *transfer = self->transfer;
    transfer->has_body = body != Py_None;
    transfer->has_sink = sink != Py_None;
    if (PyLong_Check(body)) {
        Py_ssize_t body_bytes = PyLong_AsSsize_t(body);
        if (body_bytes < 0) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a length is negative");
            return false;
        }
        transfer->is_fed = true;
        transfer->body_bytes = body_bytes;
    } else if (transfer->has_body) {
        if (PyObject_GetBuffer(body, &self->body, PyBUF_SIMPLE) < 0) return false;
        transfer->body = self->body.buf;
        transfer->body_bytes = self->body.len;
    }
    if (!transfer->has_sink) return true;
    if (PyObject_GetBuffer(sink, &self->sink, PyBUF_WRITABLE) < 0) return false;
    transfer->room = self->sink.buf;
    transfer->room_bytes = self->sink.len;
    return true;
}

/* Take (unique, offset, length, MD5 or None). The sink must be memory that has these bytes. */
static bool set_reply(struct transfer *transfer, PyObject *reply) {
    unsigned long long unique;
    Py_ssize_t offset, length, md5_bytes;
    const char *md5;
    if (reply == Py_None) return true;
    if (!PyArg_ParseTuple(reply, "Knnz#", &unique, &offset, &length, &md5, &md5_bytes)) return false;
    Py_ssize_t room_bytes = transfer->room == NULL ? 0 : (Py_ssize_t)transfer->room_bytes;
    bool fits = offset >= 0 && length >= 0 && offset <= room_bytes && length <= room_bytes - offset;
    if (!fits || (md5 != NULL && md5_bytes != MD5_BYTES)) {
        PyErr_SetString(PyExc_ValueError, "a reply must be a part of the sink");
        return false;
    }
    transfer->has_reply = true;
    transfer->reply_unique = unique;
    transfer->reply_offset = offset;
    transfer->reply_bytes = length;
    transfer->has_told_md5 = md5 != NULL;
    if (md5 != NULL) memcpy(transfer->told_md5, md5, MD5_BYTES);
    return true;
}

static bool set_all(TransferObject *self, PyObject *args) {
    struct transfer *transfer = self->transfer;
    const char *method, *url, *proxy, *ca_file, *ca_path;
    PyObject *headers, *body, *sink, *expected, *reply;
    int wants_md5, is_patient;
    if (!PyArg_ParseTuple(args, "ssO!OOOpOp(nllll)(zzzl):start", &method, &url, &PyTuple_Type,
                          &headers, &body, &sink, &expected, &wants_md5, &reply, &is_patient,
                          &transfer->most_bytes, &transfer->connect_ms, &transfer->idle_ms,
                          &transfer->total_ms, &transfer->patience_ms, &proxy, &ca_file, &ca_path,
                          &transfer->most_idle_s))
        return false;
    if (!is_clean(url) || !is_clean(method)) {
        PyErr_SetString(PyExc_ValueError, "the address of the request is not printable");
        return false;
    }
    transfer->wants_md5 = wants_md5;
    transfer->is_patient = is_patient;
    return copy_text(&transfer->method, method) && copy_text(&transfer->url, url) &&
           copy_text(&transfer->proxy, proxy) && copy_text(&transfer->ca_file, ca_file) &&
           copy_text(&transfer->ca_path, ca_path) && set_headers(transfer, headers) &&
           set_expected(transfer, expected) && set_ends(self, body, sink) &&
           set_reply(transfer, reply);
}

/* Make a transfer, let `set` take its parts from `args`, and give it to the engine. */
static PyObject *begin(EngineObject *self, PyObject *args,
                       bool (*set)(TransferObject *made, PyObject *args)) {
    if (self->engine == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the engine is closed");
        return NULL;
    }
    TransferObject *made = PyObject_New(TransferObject, &TransferType);
    if (made == NULL) return NULL;
    made->engine = (EngineObject *)Py_NewRef(self);
    made->transfer = transfer_new();
    made->is_ended = true; /* until the engine has it */
    made->sink.obj = made->body.obj = NULL;
    made->waiter = NULL;
    if (made->transfer == NULL) PyErr_NoMemory();
    if (made->transfer == NULL || !set(made, args)) {
        Py_DECREF(made);
        return NULL;
    }
    made->is_ended = false;
    made->transfer->owner = Py_NewRef(made); /* the engine's, until `collect` */
    engine_start(self->engine, made->transfer);
    return (PyObject *)made;
}

static PyObject *Engine_start(EngineObject *self, PyObject *args) {
    return begin(self, args, set_all);
}

static bool set_reply_only(TransferObject *self, PyObject *args) {
    struct transfer *transfer = self->transfer;
    unsigned long long unique;
    if (!PyArg_ParseTuple(args, "y*y*K:reply", &self->sink, &self->body, &unique)) return false;
    transfer->has_sink = transfer->has_reply = transfer->is_patient = true;
    transfer->room = self->sink.buf; /* which is only read */
    transfer->room_bytes = transfer->reply_bytes = self->sink.len;
    transfer->more = self->body.buf;
    transfer->more_bytes = self->body.len;
    atomic_store(&transfer->filled, transfer->room_bytes);
    transfer->reply_unique = unique;
    return true;
}

static PyObject *Engine_reply(EngineObject *self, PyObject *args) {
    return begin(self, args, set_reply_only);
}

/* The engine does not use the buffers any more. Takes over its reference. */
static TransferObject *take_back(struct transfer *transfer) {
    TransferObject *owner = transfer->owner;
    owner->is_ended = true;
    transfer_take_no_more(transfer);
    PyBuffer_Release(&owner->sink);
    PyBuffer_Release(&owner->body);
    return owner;
}

static PyObject *Engine_collect(EngineObject *self, PyObject *none) {
    (void)none;
    PyObject *found = PyList_New(0);
    struct transfer *transfer;
    bool is_ended;
    if (found == NULL || self->engine == NULL) return found;
    while ((transfer = engine_collect(self->engine, &is_ended)) != NULL) {
        PyObject *owner = is_ended ? (PyObject *)take_back(transfer) : Py_NewRef(transfer->owner);
        int failed = PyList_Append(found, owner);
        Py_DECREF(owner);
        if (failed) {
            Py_DECREF(found);
            return NULL;
        }
    }
    return found;
}

static void drop(struct transfer *transfer, void *dropped) {
    PyGILState_STATE state = PyGILState_Ensure();
    transfer->end = END_CANCELLED;
    PyObject *owner = (PyObject *)take_back(transfer);
    if (dropped != NULL && PyList_Append(dropped, owner) < 0) PyErr_Clear();
    Py_DECREF(owner);
    PyGILState_Release(state);
}

static void shut(EngineObject *self, PyObject *dropped) {
    struct engine *engine = self->engine;
    self->engine = NULL;
    if (engine == NULL) return;
    Py_BEGIN_ALLOW_THREADS
    engine_free(engine, drop, dropped);
    Py_END_ALLOW_THREADS
}

static PyObject *Engine_close(EngineObject *self, PyObject *none) {
    (void)none;
    PyObject *dropped = PyList_New(0);
    if (dropped != NULL) shut(self, dropped);
    return dropped;
}

static PyObject *Engine_reply_to(EngineObject *self, PyObject *args) {
    int device_fd;
    if (!PyArg_ParseTuple(args, "i", &device_fd)) return NULL;
    errno = self->engine ? engine_reply_to(self->engine, device_fd) : EBADF;
    if (errno) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *Engine_fileno(EngineObject *self, PyObject *none) {
    (void)none;
    return PyLong_FromLong(self->engine ? engine_fd(self->engine) : -1);
}

static PyObject *Engine_new(PyTypeObject *type, PyObject *args, PyObject *kwds) {
    unsigned threads;
    int error;
    (void)kwds;
    if (!PyArg_ParseTuple(args, "I", &threads)) return NULL;
    EngineObject *self = (EngineObject *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->engine = engine_new(threads, &error);
    if (self->engine == NULL) {
        Py_DECREF(self);
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return (PyObject *)self;
}

/* An engine that has transfers is not freed: they have references to it. */
static void Engine_dealloc(EngineObject *self) {
    shut(self, NULL);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static void Transfer_dealloc(TransferObject *self) {
    PyBuffer_Release(&self->sink);
    PyBuffer_Release(&self->body);
    if (self->transfer != NULL) transfer_free(self->transfer);
    Py_XDECREF(self->waiter);
    Py_DECREF(self->engine);
    PyObject_Free(self);
}

static bool is_running(const TransferObject *self) {
    return !self->is_ended && self->engine->engine != NULL;
}

static PyObject *Transfer_cancel(TransferObject *self, PyObject *none) {
    (void)none;
    if (is_running(self)) engine_cancel(self->transfer);
    Py_RETURN_NONE;
}

static PyObject *Transfer_go_on(TransferObject *self, PyObject *args) {
    Py_ssize_t skip_bytes;
    int stops;
    if (!PyArg_ParseTuple(args, "np", &skip_bytes, &stops)) return NULL;
    if (is_running(self)) engine_go_on(self->transfer, skip_bytes, stops);
    Py_RETURN_NONE;
}

static PyObject *wait_for_turn(TransferObject *self, size_t offset) {
    int64_t next;
    Py_BEGIN_ALLOW_THREADS
    next = transfer_wait_for_turn(self->transfer, offset);
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(next);
}

static PyObject *Transfer_give(TransferObject *self, PyObject *args) {
    Py_buffer piece;
    Py_ssize_t offset;
    if (!PyArg_ParseTuple(args, "ny*", &offset, &piece)) return NULL;
    PyObject *next = wait_for_turn(self, offset);
    bool is_right = next != NULL && PyLong_AsLongLong(next) == offset && is_running(self) &&
                    transfer_give(self->transfer, offset, piece.buf, piece.len);
    if (!is_right) {
        PyBuffer_Release(&piece);
        return next;
    }
    Py_DECREF(next);
    Py_buffer before = self->body;
    self->body = piece;
    engine_feed(self->transfer);
    PyBuffer_Release(&before);
    offset += piece.len;
    bool is_last = (size_t)offset == self->transfer->body_bytes;
    return is_last ? wait_for_turn(self, offset) : PyLong_FromSsize_t(offset);
}

static PyObject *Transfer_filled(TransferObject *self, void *none) {
    (void)none;
    return PyLong_FromSize_t(atomic_load_explicit(&self->transfer->filled, memory_order_acquire));
}

static PyObject *Transfer_sent(TransferObject *self, void *none) {
    (void)none;
    return PyLong_FromSize_t(atomic_load(&self->transfer->sent));
}

static PyObject *Transfer_is_ended(TransferObject *self, void *none) {
    (void)none;
    return PyBool_FromLong(self->is_ended);
}

/* The engine's thread has told of the transfer under a lock, and does not change these fields any
 * more; while it is held, neither. */
static PyObject *Transfer_head(TransferObject *self, void *none) {
    (void)none;
    return PyBytes_FromStringAndSize(self->transfer->head.bytes, self->transfer->head.size_bytes);
}

static PyObject *Transfer_status(TransferObject *self, void *none) {
    (void)none;
    return PyLong_FromLong(self->transfer->status);
}

static PyObject *Transfer_result(TransferObject *self, PyObject *none) {
    (void)none;
    const struct transfer *transfer = self->transfer;
    if (!self->is_ended) {
        PyErr_SetString(PyExc_RuntimeError, "the transfer has not ended");
        return NULL;
    }
    return Py_BuildValue("iliy#y#nlNN", (int)transfer->end, transfer->detail, transfer->status,
                         transfer->head.bytes ? transfer->head.bytes : "",
                         (Py_ssize_t)transfer->head.size_bytes,
                         transfer->answer.bytes ? transfer->answer.bytes : "",
                         (Py_ssize_t)transfer->answer.size_bytes,
                         (Py_ssize_t)atomic_load(&transfer->filled), transfer->first_byte_us,
                         PyBool_FromLong(transfer->was_kept), PyBool_FromLong(transfer->fits));
}

static PyObject *Transfer_is_replied(TransferObject *self, void *none) {
    (void)none;
    return PyBool_FromLong(self->is_ended && self->transfer->is_replied);
}

static PyObject *Transfer_md5(TransferObject *self, void *none) {
    (void)none;
    return PyBytes_FromStringAndSize((const char *)self->transfer->md5, MD5_BYTES);
}

/* Hand over the collected body without a copy. */
static PyObject *Transfer_take_room(TransferObject *self, PyObject *none) {
    (void)none;
    struct text *answer = &self->transfer->answer;
    if (!self->is_ended) {
        PyErr_SetString(PyExc_RuntimeError, "the transfer has not ended");
        return NULL;
    }
    RoomObject *room = (RoomObject *)RoomType.tp_alloc(&RoomType, 0);
    if (room == NULL) return NULL;
    room->bytes = answer->bytes;
    room->size_bytes = answer->size_bytes;
    *answer = (struct text){0};
    return (PyObject *)room;
}

static PyObject *Transfer_get_waiter(TransferObject *self, void *none) {
    (void)none;
    return Py_NewRef(self->waiter ? self->waiter : Py_None);
}

static int Transfer_set_waiter(TransferObject *self, PyObject *waiter, void *none) {
    (void)none;
    Py_XSETREF(self->waiter, Py_XNewRef(waiter));
    return 0;
}

static PyObject *Room_new(PyTypeObject *type, PyObject *args, PyObject *kwds) {
    Py_ssize_t size_bytes;
    (void)kwds;
    if (!PyArg_ParseTuple(args, "n", &size_bytes)) return NULL;
    if (size_bytes < 0) {
        PyErr_SetString(PyExc_ValueError, "a size is negative");
        return NULL;
    }
    RoomObject *self = (RoomObject *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->size_bytes = size_bytes;
    self->bytes = malloc(size_bytes ? size_bytes : 1);
    if (self->bytes == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void Room_dealloc(RoomObject *self) {
    free(self->bytes);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int Room_get_buffer(RoomObject *self, Py_buffer *view, int flags) {
    return PyBuffer_FillInfo(view, (PyObject *)self, self->bytes, self->size_bytes, false, flags);
}

static PyBufferProcs room_buffer = {(getbufferproc)Room_get_buffer, NULL};

static PyTypeObject RoomType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cachefs.origin.http._engine.Room",
    .tp_basicsize = sizeof(RoomObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = Room_new,
    .tp_dealloc = (destructor)Room_dealloc,
    .tp_as_buffer = &room_buffer,
};

static PyMethodDef engine_methods[] = {
    {"start", (PyCFunction)Engine_start, METH_VARARGS, NULL},
    {"collect", (PyCFunction)Engine_collect, METH_NOARGS, NULL},
    {"reply", (PyCFunction)Engine_reply, METH_VARARGS, NULL},
    {"reply_to", (PyCFunction)Engine_reply_to, METH_VARARGS, NULL},
    {"fileno", (PyCFunction)Engine_fileno, METH_NOARGS, NULL},
    {"close", (PyCFunction)Engine_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject EngineType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cachefs.origin.http._engine.Engine",
    .tp_basicsize = sizeof(EngineObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = Engine_new,
    .tp_dealloc = (destructor)Engine_dealloc,
    .tp_methods = engine_methods,
};

static PyMethodDef transfer_methods[] = {
    {"cancel", (PyCFunction)Transfer_cancel, METH_NOARGS, NULL},
    {"go_on", (PyCFunction)Transfer_go_on, METH_VARARGS, NULL},
    {"give", (PyCFunction)Transfer_give, METH_VARARGS, NULL},
    {"take_room", (PyCFunction)Transfer_take_room, METH_NOARGS, NULL},
    {"result", (PyCFunction)Transfer_result, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef transfer_fields[] = {
    {"filled", (getter)Transfer_filled, NULL, NULL, NULL},
    {"sent", (getter)Transfer_sent, NULL, NULL, NULL},
    {"is_ended", (getter)Transfer_is_ended, NULL, NULL, NULL},
    {"status", (getter)Transfer_status, NULL, NULL, NULL},
    {"head", (getter)Transfer_head, NULL, NULL, NULL},
    {"md5", (getter)Transfer_md5, NULL, NULL, NULL},
    {"is_replied", (getter)Transfer_is_replied, NULL, NULL, NULL},
    {"waiter", (getter)Transfer_get_waiter, (setter)Transfer_set_waiter, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject TransferType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cachefs.origin.http._engine.Transfer",
    .tp_basicsize = sizeof(TransferObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)Transfer_dealloc,
    .tp_methods = transfer_methods,
    .tp_getset = transfer_fields,
};

static PyMethodDef functions[] = {
    {"md5_of_each", md5_of_each, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_engine",
    .m_size = -1,
    .m_methods = functions,
};

/* libcurl may be another one than that of the headers. An older one ignores options that it does
 * not know, and another library for TLS has other codes for refused certificates. */
static bool check_libcurl(void) {
    const curl_version_info_data *found = curl_version_info(CURLVERSION_NOW);
    const char *tls = found->ssl_version ? found->ssl_version : "no TLS";
    if (found->version_num < LEAST_LIBCURL)
        PyErr_Format(PyExc_ImportError, "there is libcurl %s", found->version);
    else if (strncmp(tls, "OpenSSL/", 8))
        PyErr_Format(PyExc_ImportError, "there is libcurl with %s", tls);
    else if (!(found->features & CURL_VERSION_ASYNCHDNS))
        PyErr_SetString(PyExc_ImportError, "there is libcurl that blocks while it looks up names");
    else
        return true;
    return false;
}

PyMODINIT_FUNC PyInit__engine(void) {
    if (!check_libcurl()) return NULL;
    if (PyType_Ready(&EngineType) < 0 || PyType_Ready(&TransferType) < 0 ||
        PyType_Ready(&RoomType) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || PyModule_AddObjectRef(module, "Engine", (PyObject *)&EngineType) < 0 ||
        PyModule_AddObjectRef(module, "Transfer", (PyObject *)&TransferType) < 0 ||
        PyModule_AddObjectRef(module, "Room", (PyObject *)&RoomType) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}

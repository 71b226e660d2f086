/* The Python module `_relay` (documented in _relay.pyi). The supervisor uses only Relay and
 * `create_table`. The daemon uses only Table and the functions for its session. */
#include "python_types.h"

#include "reads.h"
#include "session.h"
#include "table.h"

static PyObject *connect_session(PyObject *module, PyObject *args) {
    (void)module;
    int requests_fd, device_fd, takes_notices;
    if (!PyArg_ParseTuple(args, "iip", &requests_fd, &device_fd, &takes_notices)) return NULL;
    session_connect(requests_fd, device_fd, takes_notices);
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

static PyObject *next_read(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    struct next_read found;
    switch (session_next_read(&found)) {
    case NEXT_NONE:
        Py_RETURN_NONE;
    case NEXT_FOR_LIBFUSE:
        Py_RETURN_FALSE;
    default:
        return Py_BuildValue("KKKIy#", (unsigned long long)found.unique,
                             (unsigned long long)found.handle, (unsigned long long)found.offset,
                             found.size, found.request, (Py_ssize_t)found.request_bytes);
    }
}

static PyObject *take_read(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    session_take_read();
    Py_RETURN_NONE;
}

static PyObject *read_answered(PyObject *module, PyObject *unique) {
    (void)module;
    uint64_t number = PyLong_AsUnsignedLongLong(unique);
    if (PyErr_Occurred()) return NULL;
    reads_answered(number);
    Py_RETURN_NONE;
}

static PyObject *return_read(PyObject *module, PyObject *request) {
    (void)module;
    char *bytes;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(request, &bytes, &length) < 0) return NULL;
    reads_return(bytes, (size_t)length);
    Py_RETURN_NONE;
}

static PyObject *accept_writes(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    session_accept_writes();
    Py_RETURN_NONE;
}

static PyObject *pass_through(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    session_pass_through();
    Py_RETURN_NONE;
}

static PyObject *request_process(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    return PyLong_FromUnsignedLong(session_request_process());
}

static PyObject *request_caller(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    uint32_t uid, gid, thread = session_request_caller(&uid, &gid);
    return Py_BuildValue("III", uid, gid, thread);
}

static PyObject *is_connected(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    return PyBool_FromLong(session_is_connected());
}

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
    {"next_read", next_read, METH_NOARGS, NULL},
    {"take_read", take_read, METH_NOARGS, NULL},
    {"read_answered", read_answered, METH_O, NULL},
    {"return_read", return_read, METH_O, NULL},
    {"accept_writes", accept_writes, METH_NOARGS, NULL},
    {"pass_through", pass_through, METH_NOARGS, NULL},
    {"request_process", request_process, METH_NOARGS, NULL},
    {"request_caller", request_caller, METH_NOARGS, NULL},
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

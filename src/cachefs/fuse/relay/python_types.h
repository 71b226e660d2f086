/* The Python types of the module `_relay`, documented in _relay.pyi. Each type has its own C
 * file. */
#ifndef CACHEFS_RELAY_PYTHON_TYPES_H
#define CACHEFS_RELAY_PYTHON_TYPES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyTypeObject RelayType; /* python_relay.c: for the supervisor */
extern PyTypeObject TableType; /* python_table.c: for the daemon */

/* Raises OSError for a positive or negative errno. Returns NULL. */
static inline PyObject *os_error(int error) {
    errno = error < 0 ? -error : error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

#endif

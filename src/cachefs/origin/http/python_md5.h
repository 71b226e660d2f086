/* A function of the Python module `_engine`, documented in _engine.pyi. */
#ifndef CACHEFS_HTTP_PYTHON_MD5_H
#define CACHEFS_HTTP_PYTHON_MD5_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *md5_of_each(PyObject *module, PyObject *buffers);

#endif

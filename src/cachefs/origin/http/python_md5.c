/* The function `md5_of_each` of the Python module `_engine`. */
#include "python_md5.h"

#include "md5.h"

static PyObject *digests(const struct md5_message *messages, Py_ssize_t count)
{
    PyObject *found = PyList_New(count);

    for (Py_ssize_t at = 0; found && at < count; at++) {
        PyObject *md5 = PyBytes_FromStringAndSize((const char *)messages[at].md5, MD5_BYTES);
        if (!md5)
            Py_CLEAR(found);
        else
            PyList_SET_ITEM(found, messages[at].number, md5);
    }
    return found;
}

PyObject *md5_of_each(PyObject *module, PyObject *argument)
{
    (void)module;
    PyObject *buffers = PySequence_Tuple(argument); /* a tuple: nobody can change it meanwhile */
    if (!buffers)
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(buffers), held = 0;
    Py_buffer *views = PyMem_Calloc(count ? count : 1, sizeof *views);
    struct md5_message *messages = PyMem_Calloc(count ? count : 1, sizeof *messages);
    PyObject *found = NULL;

    if (!views || !messages) {
        PyErr_NoMemory();
        goto done;
    }
    for (; held < count; held++) {
        if (PyObject_GetBuffer(PyTuple_GET_ITEM(buffers, held), &views[held], PyBUF_SIMPLE))
            goto done;
        messages[held] = (struct md5_message){
            .bytes = views[held].buf, .size_bytes = views[held].len, .number = held};
    }
    Py_BEGIN_ALLOW_THREADS
    md5_hash(messages, count);
    Py_END_ALLOW_THREADS
    found = digests(messages, count);
done:
    while (held)
        PyBuffer_Release(&views[--held]);
    PyMem_Free(messages);
    PyMem_Free(views);
    Py_DECREF(buffers);
    return found;
}

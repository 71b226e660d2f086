/* The Python type Table, which only the daemon uses: it is the table's only writer.
 *
 * The object owns its mapping of the table. The GIL is the only lock; only `note_sums` releases it,
 * and the functions of sums.h may run in any thread.
 */
#include "python_types.h"

#include "sums.h"
#include "table.h"

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

static PyObject *Table_remove(TableObject *self, PyObject *args) {
    unsigned long long ino;
    unsigned long first, end;
    if (!PyArg_ParseTuple(args, "Kkk", &ino, &first, &end)) return NULL;
    for (unsigned long block = first; block < end && block <= UINT32_MAX; block++)
        rt_remove(&self->table, ino, (uint32_t)block);
    Py_RETURN_NONE;
}

static PyObject *Table_mark_unsent(TableObject *self, PyObject *args) {
    unsigned long long ino;
    int is_unsent;
    if (!PyArg_ParseTuple(args, "Kp", &ino, &is_unsent)) return NULL;
    if (is_unsent)
        rt_mark_unsent(&self->table, ino);
    else
        rt_unmark_unsent(&self->table, ino);
    Py_RETURN_NONE;
}

static PyObject *Table_set_unsent(TableObject *self, PyObject *args) {
    Py_buffer inos;
    if (!PyArg_ParseTuple(args, "y*", &inos)) return NULL;
    rt_set_unsent(&self->table, inos.buf, (size_t)inos.len / sizeof(uint64_t));
    PyBuffer_Release(&inos);
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

static PyObject *Table_mark_whole(TableObject *self, PyObject *args) {
    unsigned long file;
    int whole;
    if (!PyArg_ParseTuple(args, "kp", &file, &whole) || !is_place(file, 0)) return NULL;
    rt_mark_whole(&self->table, (uint32_t)file, whole);
    Py_RETURN_NONE;
}

static PyObject *Table_pass_through(TableObject *self, PyObject *args) {
    int allowed;
    if (!PyArg_ParseTuple(args, "p", &allowed)) return NULL;
    atomic_store(&self->table.header->passes_through, (uint32_t)allowed);
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

static PyObject *Table_add_user_bytes(TableObject *self, PyObject *args) {
    unsigned user;
    unsigned long long bytes;
    if (!PyArg_ParseTuple(args, "IK", &user, &bytes)) return NULL;
    if (user < RT_USERS) atomic_fetch_add(&self->table.user_bytes[user], bytes);
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
    bool is_older = self->table.whole == NULL; /* that relay knows nothing of passthrough */
    unsigned state = is_older ? RT_OPENS_OFF : atomic_load(&h->opens_state);
    unsigned error = is_older ? ENOSYS : atomic_load(&h->through_error);
#define COUNT(name) #name, (unsigned long long)atomic_load(&h->name)
    return Py_BuildValue("{sKsKsKsKsKsKsKsKsKsKsKsIsI}", COUNT(hits), COUNT(hit_bytes),
                         COUNT(forwarded), COUNT(missed), COUNT(waited), COUNT(late),
                         COUNT(changed), COUNT(unnoted), COUNT(hit_ns), COUNT(opens),
                         COUNT(opens_through), "opens_state", state, "through_error", error);
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
    {"remove", (PyCFunction)Table_remove, METH_VARARGS, NULL},
    {"mark_unsent", (PyCFunction)Table_mark_unsent, METH_VARARGS, NULL},
    {"set_unsent", (PyCFunction)Table_set_unsent, METH_VARARGS, NULL},
    {"revive", (PyCFunction)Table_revive, METH_VARARGS, NULL},
    {"withdraw_file", (PyCFunction)Table_withdraw_file, METH_VARARGS, NULL},
    {"mark_whole", (PyCFunction)Table_mark_whole, METH_VARARGS, NULL},
    {"pass_through", (PyCFunction)Table_pass_through, METH_VARARGS, NULL},
    {"find", (PyCFunction)Table_find, METH_VARARGS, NULL},
    {"drain", (PyCFunction)Table_drain, METH_VARARGS, NULL},
    {"pause", (PyCFunction)Table_pause, METH_VARARGS, NULL},
    {"verify_all", (PyCFunction)Table_verify_all, METH_VARARGS, NULL},
    {"note_sums", (PyCFunction)Table_note_sums, METH_VARARGS, NULL},
    {"has_sums", (PyCFunction)Table_has_sums, METH_VARARGS, NULL},
    {"sums_agree", (PyCFunction)Table_sums_agree, METH_VARARGS, NULL},
    {"user", (PyCFunction)Table_user, METH_VARARGS, NULL},
    {"limit_user", (PyCFunction)Table_limit_user, METH_VARARGS, NULL},
    {"add_user_bytes", (PyCFunction)Table_add_user_bytes, METH_VARARGS, NULL},
    {"users", (PyCFunction)Table_users, METH_NOARGS, NULL},
    {"take_file_hits", (PyCFunction)Table_take_file_hits, METH_VARARGS, NULL},
    {"counters", (PyCFunction)Table_counters, METH_NOARGS, NULL},
    {"hit_times", (PyCFunction)Table_hit_times, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

PyTypeObject TableType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cachefs.fuse.relay._relay.Table",
    .tp_basicsize = sizeof(TableObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Table_init,
    .tp_dealloc = (destructor)Table_dealloc,
    .tp_methods = table_methods,
};

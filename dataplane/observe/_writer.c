/* Writes events into a ring. `ring.py` has the format.
 *
 * What always holds: an event's number is written last; nothing outside the buffer is written; the interpreter's lock
 * is held. A thread's place is kept in the thread, so that a later thread with the same identity does not get it.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

typedef struct {
    uint64_t began, ended, value;
    uint16_t code, thread;
    uint32_t number;
} Event;

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    PyObject *named;
    Event *events;
    uint64_t mask, ring; /* `ring`: no other of this process had that */
    uint64_t last, count;
} Writer;

static uint64_t rings;
static _Thread_local struct {
    uint64_t ring;
    uint16_t place;
} own;

static int place_of(Writer *self)
{
    if (own.ring == self->ring)
        return own.place;
    PyObject *named = PyObject_CallNoArgs(self->named);
    if (!named)
        return -1;
    long place = PyLong_AsLong(named);
    Py_DECREF(named);
    if (PyErr_Occurred())
        return -1;
    own.ring = self->ring, own.place = (uint16_t)place;
    return own.place;
}

static PyObject *written(Writer *self, PyObject *code, uint64_t ended, uint64_t value)
{
    unsigned long what = PyLong_AsUnsignedLongMask(code);
    if (PyErr_Occurred())
        return NULL;
    if (!self->events)
        return PyErr_Format(PyExc_ValueError, "the ring is closed");
    int thread = place_of(self);
    if (thread < 0)
        return NULL;
    if (!self->events) /* closed while the thread was named */
        return PyErr_Format(PyExc_ValueError, "the ring is closed");
    uint64_t number = ++self->count;
    Event *event = &self->events[number & self->mask];
    event->began = self->last, event->ended = ended, event->value = value;
    event->code = (uint16_t)what, event->thread = (uint16_t)thread;
    __atomic_store_n(&event->number, (uint32_t)number, __ATOMIC_RELEASE);
    Py_RETURN_NONE;
}

static PyObject *record(PyObject *of, PyObject *const *given, Py_ssize_t count)
{
    Writer *self = (Writer *)of;
    if (count != 2 && count != 3)
        return PyErr_Format(PyExc_TypeError, "a code, a time and perhaps a value are wanted");
    uint64_t began = PyLong_AsUnsignedLongLongMask(given[1]);
    uint64_t value = count == 3 ? PyLong_AsUnsignedLongLongMask(given[2]) : 0;
    if (PyErr_Occurred())
        return NULL;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    self->last = began;
    return written(self, given[0], (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec, value);
}

static PyObject *flow(PyObject *of, PyObject *const *given, Py_ssize_t count)
{
    Writer *self = (Writer *)of;
    if (count != 2 && count != 3)
        return PyErr_Format(PyExc_TypeError, "a code, an identity and perhaps a count are wanted");
    uint64_t identity = PyLong_AsUnsignedLongLongMask(given[1]);
    uint64_t value = count == 3 ? PyLong_AsUnsignedLongLongMask(given[2]) : 1;
    return PyErr_Occurred() ? NULL : written(self, given[0], identity, value);
}

static PyObject *stop(PyObject *of, PyObject *none)
{
    Writer *self = (Writer *)of;
    (void)none;
    if (self->events)
        PyBuffer_Release(&self->memory);
    self->events = NULL;
    Py_RETURN_NONE;
}

static int traverse(PyObject *of, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(of));
    Py_VISIT(((Writer *)of)->named);
    return 0;
}

static int clear(PyObject *of)
{
    Py_CLEAR(((Writer *)of)->named);
    return 0;
}

static void dealloc(PyObject *of)
{
    PyTypeObject *type = Py_TYPE(of);
    PyObject_GC_UnTrack(of);
    Py_XDECREF(stop(of, NULL));
    clear(of);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(of);
    Py_DECREF(type);
}

static PyObject *create(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *memory, *named;
    Py_ssize_t offset, events;
    if (kwargs && PyDict_Size(kwargs))
        return PyErr_Format(PyExc_TypeError, "arguments have no names here");
    if (!PyArg_ParseTuple(args, "OnnO:Writer", &memory, &offset, &events, &named))
        return NULL;
    Writer *self = (Writer *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self)
        return NULL;
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE))
        goto failed;
    self->events = (Event *)((char *)self->memory.buf + offset); /* so that `stop` lets the buffer go */
    if (events < 1 || events & (events - 1) || offset < 0 || offset % 8 ||
        self->memory.len / (Py_ssize_t)sizeof(Event) < events ||
        offset > self->memory.len - events * (Py_ssize_t)sizeof(Event)) {
        PyErr_SetString(PyExc_ValueError, "the events do not fit the memory");
        goto failed;
    }
    self->mask = (uint64_t)events - 1, self->ring = ++rings, self->named = Py_NewRef(named);
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static PyMethodDef methods[] = {
    {"record", (PyCFunction)(void (*)(void))record, METH_FASTCALL,
     "record(code, began, value=0)\n--\n\nAn event that ends now."},
    {"flow", (PyCFunction)(void (*)(void))flow, METH_FASTCALL,
     "flow(code, identity, count=1)\n--\n\nWhat the last event passes on, or takes."},
    {"stop", stop, METH_NOARGS, "stop()\n--\n\nLet the memory go. Idempotent."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"last", T_ULONGLONG, offsetof(Writer, last), 0, "When the event began that was recorded last."},
    {"count", T_ULONGLONG, offsetof(Writer, count), 0, "The number of the event that was recorded last."},
    {"memory", T_OBJECT_EX, offsetof(Writer, memory.obj), READONLY, "What the ring lies in."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots_of_writer[] = {
    {Py_tp_new, create},       {Py_tp_dealloc, dealloc}, {Py_tp_traverse, traverse}, {Py_tp_clear, clear},
    {Py_tp_methods, methods}, {Py_tp_members, members}, {0, NULL},
};

static PyType_Spec spec = {"dataplane.observe._writer.Writer", sizeof(Writer), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots_of_writer};

static int fill(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&spec);
    int failed = !type || PyModule_AddObjectRef(module, "Writer", type);
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill}, {0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_writer", NULL, 0, NULL, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__writer(void) { return PyModuleDef_Init(&module); }

/* Counts calls by the line that made them; see `_calls.pyi`.
 *
 * To walk the frames of a stack makes an object of each, which takes longer than all else here. A line calls through
 * the same functions each time, so its frame is as deep as it was: it is looked up there first, without the frames in
 * between. That could be wrong where a user's function is called back within a call of the line, so one call of EVERY
 * is walked in full; a place that was wrong once is walked each time.
 *
 * What always holds: memory is fixed; the interpreter's lock is held; codes are compared by their addresses alone, and
 * whoever gives them keeps them.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

enum { PLACES = 1024, SITES = 1024, DEPTHS = 4, DEEPEST = 64, EVERY = 64 };

typedef struct {
    uintptr_t code;
    int32_t lasti;
    int16_t depth, number; /* number -1: to be walked in full */
} Site;

typedef struct {
    PyObject_HEAD
    PyObject *asked, *find, *gap, *getframe, *lasti, *depth[DEEPEST];
    char active;
    long long left; /* when the last call ended */
    long long gap_ns;
    uint64_t count[PLACES];
    int64_t ns[PLACES];
    Site sites[SITES];
    int known, depths[DEPTHS];
    unsigned turn;
} Calls;

static long long clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static Site *site_of(Calls *self, uintptr_t code, int32_t lasti, int depth)
{
    size_t at = ((code >> 4) * 31 + (size_t)lasti * 17 + (size_t)depth) * 2654435761u >> 7;
    for (;; at++) {
        Site *site = &self->sites[at % SITES];
        if (!site->code || (site->code == code && site->lasti == lasti && site->depth == depth))
            return site;
    }
}

/* The site of the frame at a depth: NULL where none is known, or with an error. */
static Site *site_at(Calls *self, int depth)
{
    PyObject *frame = PyObject_CallFunctionObjArgs(self->getframe, self->depth[depth], NULL);
    if (!frame) {
        if (PyErr_ExceptionMatches(PyExc_ValueError)) /* the stack is not so deep */
            PyErr_Clear();
        return NULL;
    }
    PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
    PyObject *lasti = PyObject_GetAttr(frame, self->lasti);
    Py_DECREF(frame);
    Py_DECREF(code);
    if (!lasti)
        return NULL;
    Site *site = site_of(self, (uintptr_t)code, (int32_t)PyLong_AsLong(lasti), depth);
    Py_DECREF(lasti);
    return site->code ? site : NULL;
}

static Site *hinted(Calls *self)
{
    for (int i = 0; i < DEPTHS && self->depths[i] >= 0; i++) {
        Site *site = site_at(self, self->depths[i]);
        if (PyErr_Occurred())
            return NULL;
        if (site) {
            int depth = self->depths[i];
            memmove(self->depths + 1, self->depths, (size_t)i * sizeof(int));
            self->depths[0] = depth;
            return site;
        }
    }
    return NULL;
}

static void keep(Calls *self, uintptr_t code, long lasti, long depth, long number)
{
    if (!code || depth < 0 || depth >= DEEPEST || self->known >= SITES * 3 / 4)
        return;
    Site *site = site_of(self, code, (int32_t)lasti, (int)depth);
    if (!site->code)
        *site = (Site){code, (int32_t)lasti, (int16_t)depth, (int16_t)number}, self->known++;
    for (int i = 0; i < DEPTHS; i++)
        if (self->depths[i] == depth)
            return;
    memmove(self->depths + 1, self->depths, (DEPTHS - 1) * sizeof(int));
    self->depths[0] = (int)depth;
}

/* The number of the place that calls; -1 with an error. */
static long placed(Calls *self)
{
    PyObject *asked = PyObject_CallNoArgs(self->asked);
    if (!asked)
        return -1;
    long number = PyLong_AsLong(asked);
    Py_DECREF(asked);
    if (number >= 0 || PyErr_Occurred())
        return number;
    if (!self->active)
        return 0;
    Site *site = hinted(self);
    if (PyErr_Occurred())
        return -1;
    if (site && site->number >= 0 && ++self->turn % EVERY)
        return site->number;
    PyObject *found = PyObject_CallNoArgs(self->find);
    unsigned long long code;
    long lasti, depth;
    if (!found)
        return -1;
    if (!PyArg_ParseTuple(found, "lKll", &number, &code, &lasti, &depth)) {
        Py_DECREF(found);
        return -1;
    }
    Py_DECREF(found);
    if (site && site->number >= 0)
        site->number = site->code == code && site->depth == depth ? (int16_t)number : -1;
    keep(self, (uintptr_t)code, lasti, depth, number);
    return number;
}

static PyObject *place(PyObject *self, PyObject *none)
{
    (void)none;
    long number = placed((Calls *)self);
    return number < 0 ? NULL : PyLong_FromLong(number);
}

static PyObject *called(PyObject *of, PyObject *const *given, Py_ssize_t count)
{
    Calls *self = (Calls *)of;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "a number and a time are wanted");
    unsigned long number = PyLong_AsUnsignedLongMask(given[0]) & (PLACES - 1);
    long long began = PyLong_AsLongLong(given[1]);
    if (PyErr_Occurred())
        return NULL;
    long long now = clock_ns(), before = began - self->left;
    self->count[number]++;
    self->ns[number] += now - began;
    if (before > self->gap_ns) {
        PyObject *done = PyObject_CallFunction(self->gap, "kL", number, before);
        if (!done)
            return NULL;
        Py_DECREF(done);
    }
    self->left = now;
    Py_RETURN_NONE;
}

static PyObject *totals(PyObject *of, PyObject *number)
{
    Calls *self = (Calls *)of;
    unsigned long at = PyLong_AsUnsignedLongMask(number) & (PLACES - 1);
    return PyErr_Occurred() ? NULL : Py_BuildValue("KL", self->count[at], self->ns[at]);
}

static PyObject *reset(PyObject *of, PyObject *none)
{
    Calls *self = (Calls *)of;
    (void)none;
    self->active = 0, self->left = clock_ns(), self->known = 0, self->turn = 0;
    memset(self->count, 0, sizeof self->count);
    memset(self->ns, 0, sizeof self->ns);
    memset(self->sites, 0, sizeof self->sites);
    memset(self->depths, -1, sizeof self->depths);
    Py_RETURN_NONE;
}

static int traverse(PyObject *of, visitproc visit, void *arg)
{
    Calls *self = (Calls *)of;
    Py_VISIT(Py_TYPE(of));
    Py_VISIT(self->asked);
    Py_VISIT(self->find);
    Py_VISIT(self->gap);
    Py_VISIT(self->getframe);
    return 0;
}

static int clear(PyObject *of)
{
    Calls *self = (Calls *)of;
    Py_CLEAR(self->asked);
    Py_CLEAR(self->find);
    Py_CLEAR(self->gap);
    Py_CLEAR(self->getframe);
    return 0;
}

static void dealloc(PyObject *of)
{
    Calls *self = (Calls *)of;
    PyTypeObject *type = Py_TYPE(of);
    PyObject_GC_UnTrack(of);
    clear(of);
    Py_XDECREF(self->lasti);
    for (int i = 0; i < DEEPEST; i++)
        Py_XDECREF(self->depth[i]);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(of);
    Py_DECREF(type);
}

static PyObject *create(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *asked, *find, *gap;
    long long gap_ns;
    if (kwargs && PyDict_Size(kwargs))
        return PyErr_Format(PyExc_TypeError, "arguments have no names here");
    if (!PyArg_ParseTuple(args, "OOOL:Calls", &asked, &find, &gap, &gap_ns))
        return NULL;
    Calls *self = (Calls *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self)
        return NULL;
    self->asked = Py_NewRef(asked), self->find = Py_NewRef(find), self->gap = Py_NewRef(gap), self->gap_ns = gap_ns;
    self->getframe = Py_XNewRef(PySys_GetObject("_getframe"));
    self->lasti = PyUnicode_InternFromString("f_lasti");
    int made = self->getframe && self->lasti;
    for (int i = 0; made && i < DEEPEST; i++)
        made = (self->depth[i] = PyLong_FromLong(i)) != NULL;
    if (!made) {
        Py_DECREF(self);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    Py_XDECREF(reset((PyObject *)self, NULL));
    return (PyObject *)self;
}

static PyMethodDef methods[] = {
    {"place", place, METH_NOARGS, "place()\n--\n\nThe number of the place that calls now; 0 where there is none."},
    {"called", (PyCFunction)(void (*)(void))called, METH_FASTCALL,
     "called(number, began)\n--\n\nA call of this place is over that began then."},
    {"totals", totals, METH_O, "totals(number)\n--\n\nThe calls of a place, and their nanoseconds."},
    {"reset", reset, METH_NOARGS, "reset()\n--\n\nForget everything."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"active", T_BOOL, offsetof(Calls, active), 0, "Whether places are looked for."},
    {"left", T_LONGLONG, offsetof(Calls, left), READONLY, "When the last call ended."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots_of_calls[] = {
    {Py_tp_new, create},       {Py_tp_dealloc, dealloc}, {Py_tp_traverse, traverse}, {Py_tp_clear, clear},
    {Py_tp_methods, methods}, {Py_tp_members, members}, {0, NULL},
};

static PyType_Spec spec = {"dataplane.diagnosis._calls.Calls", sizeof(Calls), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots_of_calls};

/* sys._current_frames(), as Python has it from 3.12.3 on: before, it holds the lock of all threads' states while it makes
 * objects, by which garbage may be collected and Python run, which lets another thread begin that starts a thread, which
 * waits for that lock with the interpreter's. Both wait for ever (python/cpython#106883). */
static PyObject *current_frames(PyObject *module, PyObject *ignored)
{
    PyObject *ask = PySys_GetObject("_current_frames"); /* borrowed */
    if (!ask)
        return PyErr_Format(PyExc_RuntimeError, "this interpreter does not tell its threads' frames");
    int collected = PyGC_Disable();
    PyObject *frames = PyObject_CallNoArgs(ask);
    if (collected)
        PyGC_Enable();
    return frames;
}

static PyMethodDef functions[] = {
    {"current_frames", current_frames, METH_NOARGS,
     "current_frames()\n--\n\nThe frame of each thread, while no garbage is collected."},
    {NULL, NULL, 0, NULL},
};

static int fill(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&spec);
    int failed = !type || PyModule_AddObjectRef(module, "Calls", type);
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill}, {0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_calls", NULL, 0, functions, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__calls(void) { return PyModuleDef_Init(&module); }

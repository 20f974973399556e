/* Numbers in lists, as token ids and log-probabilities come from inference engines, read in one pass.
 *
 * A list of 512 ints takes NumPy 17 microseconds, and finding out that they all are ints and no bools another 20: most
 * of what the client spends on an append of one row. Here it is 2 (decision 0054).
 *
 * What always holds: values are taken where each is an int within 64 bits, or each a float, of exactly that type; in
 * all other cases nothing is returned, and the caller looks itself. No code of others runs meanwhile, and the
 * interpreter's lock is held, so that no list changes.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { INT, FLOAT, OTHER };

static int kind_of(PyObject *value)
{
    return PyLong_CheckExact(value) ? INT : PyFloat_CheckExact(value) ? FLOAT : OTHER;
}

/* Writes the numbers of a list; 0 where one of them is of another kind, -1 with an error set. */
static int take(PyObject *row, int kind, char *to)
{
    Py_ssize_t count = PyList_Size(row);
    for (Py_ssize_t i = 0; i < count; i++, to += 8) {
        PyObject *value = PyList_GetItem(row, i); /* borrowed */
        if (kind_of(value) != kind)
            return 0;
        if (kind == INT) {
            int beyond;
            int64_t number = PyLong_AsLongLongAndOverflow(value, &beyond);
            if (beyond)
                return 0;
            if (number == -1 && PyErr_Occurred())
                return -1;
            memcpy(to, &number, 8);
        } else {
            double number = PyFloat_AsDouble(value);
            if (number == -1.0 && PyErr_Occurred())
                return -1;
            memcpy(to, &number, 8);
        }
    }
    return 1;
}

/* Where each row begins, and the last ends; the kind of the first number. -1 with an error set. */
static int measure(PyObject *rows, int64_t *offsets)
{
    int kind = OTHER;
    Py_ssize_t count = PyList_Size(rows);
    int64_t total = 0;
    offsets[0] = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *row = PyList_GetItem(rows, i);
        if (!PyList_CheckExact(row)) {
            PyErr_SetString(PyExc_TypeError, "rows are lists");
            return -1;
        }
        if (PyList_Size(row) && kind == OTHER) {
            kind = kind_of(PyList_GetItem(row, 0));
            if (kind == OTHER)
                return OTHER;
        }
        offsets[i + 1] = total += PyList_Size(row);
    }
    return kind;
}

static PyObject *numbers(PyObject *self, PyObject *rows)
{
    (void)self;
    if (!PyList_CheckExact(rows)) {
        PyErr_SetString(PyExc_TypeError, "rows come in a list");
        return NULL;
    }
    Py_ssize_t count = PyList_Size(rows);
    PyObject *offsets = PyBytes_FromStringAndSize(NULL, (count + 1) * 8), *values = NULL, *found = NULL;
    int64_t *places = PyMem_Calloc((size_t)count + 1, sizeof *places);
    if (!offsets || !places) {
        if (offsets)
            PyErr_NoMemory();
        goto done;
    }
    int kind = measure(rows, places);
    if (kind < 0)
        goto done;
    if (kind == OTHER) {
        found = Py_NewRef(Py_None);
        goto done;
    }
    memcpy(PyBytes_AsString(offsets), places, ((size_t)count + 1) * 8);
    values = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)places[count] * 8);
    if (!values)
        goto done;
    char *to = PyBytes_AsString(values);
    for (Py_ssize_t i = 0; i < count; i++) {
        int taken = take(PyList_GetItem(rows, i), kind, to + places[i] * 8);
        if (taken == 0)
            found = Py_NewRef(Py_None);
        if (taken != 1)
            goto done;
    }
    found = Py_BuildValue("OOO", kind == FLOAT ? Py_True : Py_False, values, offsets);
done:
    PyMem_Free(places);
    Py_XDECREF(offsets);
    Py_XDECREF(values);
    return found;
}

/* The lengths of the rows, whose numbers were written; None where one does not fit or is of another kind. */
static PyObject *write_rows(PyObject *rows, int kind, char *to, Py_ssize_t room)
{
    Py_ssize_t count = PyList_Size(rows);
    PyObject *lengths = PyTuple_New(count);
    for (Py_ssize_t i = 0; lengths && i < count; i++) {
        PyObject *row = PyList_GetItem(rows, i), *length = NULL;
        int taken = 0;
        if (PyList_CheckExact(row) && PyList_Size(row) <= room / 8) {
            Py_ssize_t items = PyList_Size(row);
            taken = take(row, kind, to);
            if (taken == 1 && !(length = PyLong_FromSsize_t(items)))
                taken = -1;
            to += 8 * items;
            room -= 8 * items;
        }
        if (taken != 1) {
            Py_DECREF(lengths);
            return taken ? NULL : Py_NewRef(Py_None);
        }
        PyTuple_SetItem(lengths, i, length);
    }
    return lengths;
}

static PyObject *write_numbers(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *rows, *found = NULL;
    Py_buffer memory;
    Py_ssize_t at;
    int floats;
    if (!PyArg_ParseTuple(args, "Ow*np:write", &rows, &memory, &at, &floats))
        return NULL;
    if (!PyList_CheckExact(rows))
        PyErr_SetString(PyExc_TypeError, "rows come in a list");
    else if (at < 0 || at > memory.len)
        PyErr_SetString(PyExc_ValueError, "a place that is not in the memory");
    else
        found = write_rows(rows, floats ? FLOAT : INT, (char *)memory.buf + at, memory.len - at);
    PyBuffer_Release(&memory);
    return found;
}

static PyObject *copy(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer values, memory;
    Py_ssize_t at;
    if (!PyArg_ParseTuple(args, "y*w*n:copy", &values, &memory, &at))
        return NULL;
    int fits = at >= 0 && at <= memory.len && values.len <= memory.len - at;
    if (fits)
        memmove((char *)memory.buf + at, values.buf, (size_t)values.len);
    else
        PyErr_SetString(PyExc_ValueError, "a place that is not in the memory");
    PyBuffer_Release(&values);
    PyBuffer_Release(&memory);
    return fits ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS, "copy(values, memory, at)\n--\n\nWrite an array's bytes into the memory from byte `at` on."},
    {"write", write_numbers, METH_VARARGS,
     "write(rows, memory, at, floats)\n--\n\n"
     "Write the numbers of a list of lists into the memory from byte `at` on, as 64 bits each; the lengths of the rows.\n"
     "None where they are not all of that kind, floats or ints within 64 bits, or do not fit: what was written there\n"
     "means nothing then."},
    {"numbers", numbers, METH_O,
     "numbers(rows)\n--\n\n"
     "Whether the numbers of a list of lists are floats, as 64 bits each, and where each row begins and the last ends;\n"
     "None where they are not all ints within 64 bits, or all floats, or there is none."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_lists", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__lists(void) { return PyModuleDef_Init(&module); }

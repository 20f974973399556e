/* Joins buffers into one place, past the caches, at the pace of memory.
 *
 * A copy of more bytes than the caches hold is bound by memory. An ordinary store first reads the line that it
 * overwrites; a non-temporal one does not, so a copy moves two bytes over the bus for each and not three. The C
 * library knows this, but only for a single copy of more than three quarters of the shared cache (about 100 MiB on
 * large processors): tensors of tens of MiB, and rows of some KiB that are joined, never get there. What is
 * written here goes to other processes, so that it is not left in this one's caches is no loss.
 *
 * What always holds: nothing is written unless all sources together are as many bytes as the target; the
 * interpreter's lock is not held while bytes are moved.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>

enum { LINE = 64, PAGE = 4096, AHEAD = 4 * LINE };
static size_t ways = 1; /* pages that are copied at a time */

static inline __m128i load(const char *from) { return _mm_loadu_si128((const __m128i *)from); }

static inline void stream_line(char *to, const char *from)
{
    __m128i a = load(from), b = load(from + 16), c = load(from + 32), d = load(from + 48);
    _mm_stream_si128((__m128i *)to, a);
    _mm_stream_si128((__m128i *)(to + 16), b);
    _mm_stream_si128((__m128i *)(to + 32), c);
    _mm_stream_si128((__m128i *)(to + 48), d);
}

/* On Intel four pages at a time, a line of each in turn, as the large copy of glibc does it (sysdeps/x86_64/multiarch/
 * memmove-vec-unaligned-erms.S): one page alone does not keep the memory busy. On an AMD EPYC pages in turn are slow at
 * some offsets of the source, perhaps because loads wait for stores with the same last 12 bits of the address (inferred
 * from the offsets; no counters were read). Measured on one thread, in ms: Intel Xeon, 288 MiB, one page at a time 40,
 * two 33, four 29, ordinary stores 44 to 55; AMD EPYC (family 25), 256 MiB, by the offset of the source, one 25 to 34,
 * two 25 to 257, four 23 to 126, ordinary stores 37 to 51. No other processors were measured. */
static void stream(char *to, const char *from, size_t count)
{
    size_t head = (LINE - ((uintptr_t)to & (LINE - 1))) & (LINE - 1);
    if (head > count)
        head = count;
    memcpy(to, from, head);
    to += head, from += head, count -= head;
    for (; count >= ways * PAGE; to += ways * PAGE, from += ways * PAGE, count -= ways * PAGE)
        for (size_t at = 0; at < PAGE; at += LINE)
            for (size_t way = at; way < ways * PAGE; way += PAGE) {
                _mm_prefetch(from + way + AHEAD, _MM_HINT_T0);
                stream_line(to + way, from + way);
            }
    for (; count >= LINE; to += LINE, from += LINE, count -= LINE)
        stream_line(to, from);
    memcpy(to, from, count);
}

static void settle(void) { _mm_sfence(); } /* before anybody is told that the bytes are there */

static void choose(void)
{
    __builtin_cpu_init();
    if (__builtin_cpu_is("intel"))
        ways = 4;
}
#else
static void stream(char *to, const char *from, size_t count) { memcpy(to, from, count); }
static void settle(void) {}
static void choose(void) {}
#endif

static void release(Py_buffer *views, Py_ssize_t count)
{
    while (count)
        PyBuffer_Release(&views[--count]);
    PyMem_Free(views);
}

/* The buffers of a tuple, to be released; NULL with an error set. */
static Py_buffer *acquire(PyObject *sources, Py_ssize_t count)
{
    Py_buffer *views = PyMem_Calloc(count ? count : 1, sizeof *views);
    if (!views) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t found = 0; found < count; found++) {
        PyObject *source = PyTuple_GetItem(sources, found);
        if (!source || PyObject_GetBuffer(source, &views[found], PyBUF_SIMPLE) < 0) {
            release(views, found);
            return NULL;
        }
    }
    return views;
}

static PyObject *join(PyObject *self, PyObject *args)
{
    PyObject *target, *sources;
    Py_buffer into;
    (void)self;
    if (!PyArg_ParseTuple(args, "OO!:join", &target, &PyTuple_Type, &sources))
        return NULL;
    Py_ssize_t count = PyTuple_Size(sources), total = 0;
    Py_buffer *views = acquire(sources, count);
    if (!views)
        return NULL;
    for (Py_ssize_t i = 0; i < count; i++)
        total += views[i].len;
    if (PyObject_GetBuffer(target, &into, PyBUF_WRITABLE) < 0) {
        release(views, count);
        return NULL;
    }
    if (into.len != total) {
        PyErr_Format(PyExc_ValueError, "%zd bytes for a place of %zd", total, into.len);
    } else {
        Py_BEGIN_ALLOW_THREADS
        char *to = into.buf;
        for (Py_ssize_t i = 0; i < count; to += views[i++].len)
            stream(to, views[i].buf, (size_t)views[i].len);
        settle();
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&into);
    release(views, count);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"join", join, METH_VARARGS,
     "join(target, sources)\n--\n\n"
     "Write the bytes of all buffers of a tuple, one behind another, into a writable buffer."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_memory", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__memory(void)
{
    choose();
    return PyModuleDef_Init(&module);
}

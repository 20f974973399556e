/* Encodes the elements that differ between two blocks, and writes them, at the pace of memory. `weights.deltas`
 * describes the encoding.
 *
 * What always holds: nothing is written outside of the block; a false body is refused before its first element out of
 * place is written; the interpreter's lock is not held while bytes are compared or written.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum { SKIP = 255, HEAD = 8, LINE = 64, STRETCH = 64 * LINE };

/* A bit for each byte of a line that differs. */
#if defined(__SSE2__)
static inline uint64_t unlike(const uint8_t *a, const uint8_t *b)
{
    uint64_t like = 0;
    for (int i = 0; i < 4; i++) {
        __m128i one = _mm_loadu_si128((const __m128i *)(a + 16 * i)), other = _mm_loadu_si128((const __m128i *)(b + 16 * i));
        like |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(one, other)) << 16 * i;
    }
    return ~like;
}
#else
static inline uint64_t unlike(const uint8_t *a, const uint8_t *b)
{
    uint64_t found = 0;
    if (memcmp(a, b, LINE))
        for (int i = 0; i < LINE; i++)
            found |= (uint64_t)(a[i] != b[i]) << i;
    return found;
}
#endif

/* The first byte's bit of each element of which some byte differs. */
static inline uint64_t elements_of(uint64_t bytes, size_t width)
{
    if (width > 1)
        bytes |= bytes >> 1;
    if (width > 2)
        bytes |= bytes >> 2;
    if (width > 4)
        bytes |= bytes >> 4;
    return bytes & (width == 1 ? ~0ULL : width == 2 ? 0x5555555555555555ULL : width == 4 ? 0x1111111111111111ULL : 0x0101010101010101ULL);
}

typedef struct {
    uint8_t *gaps, *values; /* the ends of both */
} Body;

/* The places of the bits of a line's mask, from a place on; their end. The first two are written whether they are there
 * or not, and where there are more, the next four: how many a line has cannot be foretold, and a branch that is foretold
 * wrong costs more than a line. */
static inline uint16_t *places_of(uint64_t left, size_t from, uint16_t *places)
{
    const uint64_t top = 1ULL << 63; /* no place of none is asked for */
    for (int i = 0; i < 2; i++, left &= left - 1) {
        *places = (uint16_t)(from + (size_t)__builtin_ctzll(left | top));
        places += left != 0;
    }
    if (!left)
        return places;
    for (int i = 0; i < 4; i++, left &= left - 1) {
        *places = (uint16_t)(from + (size_t)__builtin_ctzll(left | top));
        places += left != 0;
    }
    for (; left; left &= left - 1)
        *places++ = (uint16_t)(from + (size_t)__builtin_ctzll(left));
    return places;
}

/* Puts the elements that differ. There is a gap for each of them, and one more for 255 that are the same: never more than
 * elements, nor more values, so room for `count` bytes of each is enough. The ends are kept out of memory: what is
 * written through a pointer to bytes might be them, for all the compiler knows. */
static inline Body compare(const uint8_t *old, const uint8_t *new, size_t count, uint8_t *gaps, uint8_t *values, size_t width)
{
    uint16_t places[STRETCH + 1]; /* one is written behind the last */
    size_t last = 0; /* the element after the last that differed */
    for (size_t at = 0; at < count; at += STRETCH) {
        size_t size = count - at < STRETCH ? count - at : STRETCH, from = 0;
        uint16_t *end = places;
        for (; from + LINE <= size; from += LINE)
            end = places_of(elements_of(unlike(old + at + from, new + at + from), width), from, end);
        for (; from < size; from += width)
            if (memcmp(old + at + from, new + at + from, width))
                *end++ = (uint16_t)from;
        for (const uint16_t *each = places; each < end; each++) {
            size_t place = at + *each, element = place / width, gap = element - last;
            for (; gap >= SKIP; gap -= SKIP)
                *gaps++ = SKIP;
            *gaps++ = (uint8_t)gap;
            memcpy(values, new + place, width);
            values += width;
            last = element + 1;
        }
    }
    return (Body){gaps, values};
}

static PyObject *some(PyObject *self, PyObject *args)
{
    Py_buffer old, new;
    int width;
    (void)self;
    Py_buffer room = {0};
    if (!PyArg_ParseTuple(args, "y*y*i|w*:some", &old, &new, &width, &room))
        return NULL;
    PyObject *result = NULL;
    size_t count = (size_t)new.len;
    uint8_t *gaps = NULL, *values = NULL, *own = NULL;
    if (old.len != new.len || (width != 1 && width != 2 && width != 4 && width != 8) || count % (size_t)width) {
        PyErr_SetString(PyExc_ValueError, "two blocks of as many elements");
        goto end;
    }
    if (room.buf && (size_t)room.len >= 2 * count + 2) { /* pages of a caller's, warm since the last block */
        gaps = room.buf;
        values = gaps + count + 1;
    } else {
        gaps = own = PyMem_Malloc(2 * count + 2);
        values = gaps ? gaps + count + 1 : NULL;
    }
    if (!gaps || !values) {
        PyErr_NoMemory();
        goto end;
    }
    Body body;
    Py_BEGIN_ALLOW_THREADS
    switch (width) { /* so that each width has a loop of its own */
    case 1: body = compare(old.buf, new.buf, count, gaps, values, 1); break;
    case 2: body = compare(old.buf, new.buf, count, gaps, values, 2); break;
    case 4: body = compare(old.buf, new.buf, count, gaps, values, 4); break;
    default: body = compare(old.buf, new.buf, count, gaps, values, 8);
    }
    Py_END_ALLOW_THREADS
    size_t steps = (size_t)(body.gaps - gaps), bytes = (size_t)(body.values - values);
    if (!bytes) {
        result = PyBytes_FromStringAndSize("", 0);
    } else if (HEAD + steps + bytes >= count) {
        result = Py_NewRef(Py_None);
    } else {
        result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(HEAD + steps + bytes));
        if (result) {
            char *to = PyBytes_AsString(result);
            uint32_t head[2] = {(uint32_t)(bytes / (size_t)width), (uint32_t)steps};
            memcpy(to, head, HEAD);
            memcpy(to + HEAD, gaps, steps);
            memcpy(to + HEAD + steps, values, bytes);
        }
    }
end:
    PyMem_Free(own);
    if (room.obj)
        PyBuffer_Release(&room);
    PyBuffer_Release(&old);
    PyBuffer_Release(&new);
    return result;
}

/* Writes the elements; 0 where the body is false. */
static inline int write_elements(uint8_t *block, size_t elements, const uint8_t *body, size_t count, size_t steps, size_t width)
{
    const uint8_t *gaps = body + HEAD, *values = gaps + steps;
    size_t at = 0, done = 0;
    for (size_t i = 0; i < steps; i++) {
        at += gaps[i];
        if (gaps[i] == SKIP)
            continue;
        if (at >= elements || done == count)
            return 0;
        memcpy(block + at * width, values + done * width, width);
        at++, done++;
    }
    return done == count;
}

static PyObject *patch(PyObject *self, PyObject *args)
{
    Py_buffer body, block;
    int width;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*w*i:patch", &body, &block, &width))
        return NULL;
    int fits = 0;
    if ((width == 1 || width == 2 || width == 4 || width == 8) && body.len >= HEAD) {
        uint32_t head[2];
        memcpy(head, body.buf, HEAD);
        size_t count = head[0], steps = head[1];
        if ((size_t)body.len == HEAD + steps + count * (size_t)width) {
            Py_BEGIN_ALLOW_THREADS
            size_t elements = (size_t)block.len / (size_t)width;
            switch (width) {
            case 1: fits = write_elements(block.buf, elements, body.buf, count, steps, 1); break;
            case 2: fits = write_elements(block.buf, elements, body.buf, count, steps, 2); break;
            case 4: fits = write_elements(block.buf, elements, body.buf, count, steps, 4); break;
            default: fits = write_elements(block.buf, elements, body.buf, count, steps, 8);
            }
            Py_END_ALLOW_THREADS
        }
    }
    PyBuffer_Release(&body);
    PyBuffer_Release(&block);
    return PyBool_FromLong(fits);
}

static PyMethodDef methods[] = {
    {"some", some, METH_VARARGS, "The elements of a block that differ from an old one, encoded."},
    {"patch", patch, METH_VARARGS, "Write encoded elements into a block; whether they are true."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_sparse", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__sparse(void) { return PyModule_Create(&module); }

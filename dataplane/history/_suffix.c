/* Suffix matching of a response that is being made over earlier responses to its prompt.
 *
 * An order of a response is the sorting of its positions by the tokens before them, read backwards (by at most DEPTH of
 * them, built by doubling: Manber and Myers 1990). The longest suffix of another response that stands in this one is
 * then found by one binary search, and nothing is kept between searches: a response is added or left out by itself.
 *
 * What always holds: every position that an order names is checked before it is read; nothing of others is written; no
 * code of others runs meanwhile, and the interpreter's lock is held.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { DEPTH = 64, MOST = 64, NODES = 256, AROUND = 8, SCANNED = 32, BUCKETS = 8, ENOUGH = 32 };

typedef struct {
    Py_buffer tokens, order;
    int64_t size;     /* tokens */
    double weight;
    int64_t expected; /* the position that goes on where the last match ended */
    int64_t at;       /* where the match of this proposal ends */
    int match;        /* its tokens */
} Response;

typedef struct {
    uint64_t active; /* responses that agree with all tokens up to here */
    double chance;
    int32_t token;
    int16_t parent, depth;
    int8_t bucket;
} Node;

typedef struct {
    PyObject_HEAD
    Response responses[MOST];
    int count;
    int32_t *own;
    int64_t size, room;
    Node nodes[NODES];
    int proposed;
    double hits[BUCKETS], tries[BUCKETS];
} Matcher;

static int32_t token_at(const void *tokens, int64_t at)
{
    int32_t token;
    memcpy(&token, (const char *)tokens + 4 * at, 4);
    return token;
}

/* -- orders -- */

/* Stable: positions of `from` by the rank of each, which is below `ranks`. */
static void by_rank(const int32_t *from, const int32_t *rank, int32_t *to, int64_t n, int32_t *counts, int64_t ranks)
{
    memset(counts, 0, (size_t)(ranks + 1) * 4);
    for (int64_t i = 0; i < n; i++)
        counts[rank[from[i]] + 1]++;
    for (int64_t r = 0; r < ranks; r++)
        counts[r + 1] += counts[r];
    for (int64_t i = 0; i < n; i++)
        to[counts[rank[from[i]]]++] = from[i];
}

/* Positions 0 to n - 1 by the token before each, as two digits of 16 bits; the first, without one, comes first. */
static void by_token(const void *tokens, int32_t *order, int32_t *other, int64_t n, int32_t *counts)
{
    order[0] = 0;
    for (int64_t i = 1; i < n; i++)
        order[i] = (int32_t)i;
    for (int digit = 0; digit < 2; digit++) {
        memset(counts, 0, 65537 * 4);
        for (int64_t i = 1; i < n; i++)
            counts[((((uint32_t)token_at(tokens, i - 1) ^ 0x80000000u) >> (16 * digit)) & 0xffff) + 1]++;
        for (int r = 0; r < 65536; r++)
            counts[r + 1] += counts[r];
        for (int64_t i = 1; i < n; i++)
            other[1 + counts[(((uint32_t)token_at(tokens, order[i] - 1) ^ 0x80000000u) >> (16 * digit)) & 0xffff]++]
                = order[i];
        memcpy(order + 1, other + 1, (size_t)(n - 1) * 4);
    }
}

static void sort_positions(const void *tokens, int32_t *order, int32_t *rank, int32_t *other, int32_t *counts, int64_t n)
{
    by_token(tokens, order, other, n, counts);
    int64_t ranks = 1;
    rank[0] = 0;
    for (int64_t i = 1; i < n; i++) {
        ranks += i == 1 || token_at(tokens, order[i] - 1) != token_at(tokens, order[i - 1] - 1);
        rank[order[i]] = (int32_t)(ranks - 1);
    }
    for (int64_t known = 1; known < DEPTH && ranks < n; known *= 2) {
        /* By what is before the known ones: who has nothing there comes first, the others as they are now, shifted. */
        int64_t next = 0;
        for (int64_t i = 0; i < known && i < n; i++)
            other[next++] = (int32_t)i;
        for (int64_t i = 0; i < n; i++)
            if (order[i] + known < n)
                other[next++] = (int32_t)(order[i] + known);
        by_rank(other, rank, order, n, counts, ranks);
        int64_t now = 0;
        other[order[0]] = 0;
        for (int64_t i = 1; i < n; i++) {
            int64_t a = order[i - 1], b = order[i];
            int64_t before_a = a >= known ? rank[a - known] : -1, before_b = b >= known ? rank[b - known] : -1;
            now += rank[a] != rank[b] || before_a != before_b;
            other[b] = (int32_t)now;
        }
        memcpy(rank, other, (size_t)n * 4);
        ranks = now + 1;
    }
}

static PyObject *order(PyObject *module, PyObject *tokens)
{
    (void)module;
    Py_buffer view;
    if (PyObject_GetBuffer(tokens, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    int64_t n = view.len / 4;
    if (view.len % 4 || n >= INT32_MAX) {
        PyBuffer_Release(&view);
        PyErr_SetString(PyExc_ValueError, "tokens are int32, and fewer than 2 ** 31");
        return NULL;
    }
    PyObject *found = PyBytes_FromStringAndSize(NULL, n * 4);
    int64_t counted = n + 2 > 65537 ? n + 2 : 65537;
    int32_t *memory = found ? malloc((size_t)(2 * n + counted) * 4) : NULL;
    if (found && !memory) {
        Py_DECREF(found);
        found = PyErr_NoMemory();
    } else if (found && n) {
        sort_positions(view.buf, (int32_t *)PyBytes_AsString(found), memory, memory + n, memory + 2 * n, n);
    }
    free(memory);
    PyBuffer_Release(&view);
    return found;
}

/* -- matching -- */

/* How many tokens before `at` are the last of `own`, at most DEPTH; *sign: how those sort, -1 where own comes first.
 * Where both begin there, the beginning counts as one more. */
static int compare(const Matcher *self, const Response *of, int64_t at, int *sign)
{
    *sign = 0;
    for (int i = 0; i < DEPTH; i++) {
        int64_t a = self->size - 1 - i, b = at - 1 - i;
        if (a < 0 || b < 0) {
            *sign = a < 0 && b < 0 ? 0 : a < 0 ? -1 : 1;
            return i + (a < 0 && b < 0);
        }
        int32_t x = self->own[a], y = token_at(of->tokens.buf, b);
        if (x != y) {
            *sign = x < y ? -1 : 1;
            return i;
        }
    }
    return DEPTH;
}

static void better(Response *of, int64_t at, int match)
{
    if (match > of->match || (match == of->match && llabs(at - of->expected) < llabs(of->at - of->expected))) {
        of->at = at;
        of->match = match;
    }
}

/* Where in the response the longest suffix of `own` stands; of several places the one nearest to the expected. */
static void find(const Matcher *self, Response *of)
{
    int sign;
    of->match = -1;
    of->at = of->expected;
    if (of->expected >= 0 && of->expected < of->size)
        better(of, of->expected, compare(self, of, of->expected, &sign));
    if (of->match >= ENOUGH)
        return;
    for (int64_t at = of->expected - AROUND; at <= of->expected + AROUND; at++)
        if (at >= 0 && at < of->size)
            better(of, at, compare(self, of, at, &sign));
    int64_t low = 0, high = of->size;
    while (low < high) {
        int64_t middle = low + (high - low) / 2, at = token_at(of->order.buf, middle);
        if (at < 0 || at >= of->size)
            return; /* no order of these tokens */
        compare(self, of, at, &sign);
        if (sign <= 0)
            high = middle;
        else
            low = middle + 1;
    }
    for (int way = -1; way < 2; way += 2) {
        int64_t from = way < 0 ? low - 1 : low;
        for (int i = 0; i < SCANNED && from >= 0 && from < of->size; i++, from += way) {
            int64_t at = token_at(of->order.buf, from);
            int match = at >= 0 && at < of->size ? compare(self, of, at, &sign) : -1;
            if (match < of->match || match < 1)
                break;
            better(of, at, match);
        }
    }
}

static int bucket_of(int match)
{
    int bucket = 0;
    for (; match && bucket < BUCKETS - 1; match >>= 1)
        bucket++;
    return bucket; /* 0, 1, 2 to 3, 4 to 7, 8 to 15, 16 to 31, 32 to 63, more */
}

/* -- proposing -- */

typedef struct {
    int32_t token;
    double weight;
    uint64_t active;
    int match;
} Vote;

static int votes_of(const Matcher *self, const Node *node, Vote *votes, double *total)
{
    int count = 0;
    *total = 0;
    for (int r = 0; r < self->count; r++) {
        const Response *of = &self->responses[r];
        int64_t at = of->at + node->depth;
        if (!(node->active >> r & 1) || at < 0 || at >= of->size)
            continue;
        int match = of->match + node->depth;
        double trust = match < 16 ? match + 0.25 : 16.25;
        double weight = of->weight * trust * trust;
        int32_t token = token_at(of->tokens.buf, at);
        int v = 0;
        while (v < count && votes[v].token != token)
            v++;
        if (v == count)
            votes[count++] = (Vote){token, 0, 0, 0};
        votes[v].weight += weight;
        votes[v].active |= (uint64_t)1 << r;
        votes[v].match = match > votes[v].match ? match : votes[v].match;
        *total += weight;
    }
    return count;
}

static void add_best(Matcher *self, int parent, int branches, double threshold, Node *waiting, int *waits)
{
    Node top = parent < 0 ? (Node){~(uint64_t)0, 1, 0, -1, 0, 0} : self->nodes[parent];
    Vote votes[MOST];
    double total;
    int count = votes_of(self, &top, votes, &total);
    for (int b = 0; b < branches && b < count; b++) {
        int best = b;
        for (int v = b + 1; v < count; v++)
            if (votes[v].weight > votes[best].weight
                || (votes[v].weight == votes[best].weight && votes[v].token < votes[best].token))
                best = v;
        Vote vote = votes[best];
        votes[best] = votes[b];
        votes[b] = vote;
        int bucket = bucket_of(vote.match);
        double chance = top.chance * (vote.weight / total) * (self->hits[bucket] / self->tries[bucket]);
        if (chance < threshold || *waits == NODES)
            return;
        waiting[(*waits)++] = (Node){vote.active, chance, vote.token, (int16_t)parent, (int16_t)(top.depth + 1),
                                     (int8_t)bucket};
    }
}

static PyObject *propose(Matcher *self, PyObject *args)
{
    int most, branches;
    double threshold;
    if (!PyArg_ParseTuple(args, "idi", &most, &threshold, &branches))
        return NULL;
    Node waiting[NODES];
    int waits = 0;
    self->proposed = 0;
    most = most > NODES ? NODES : most;
    for (int r = 0; r < self->count; r++)
        find(self, &self->responses[r]);
    if (most > 0)
        add_best(self, -1, branches, threshold, waiting, &waits);
    while (waits && self->proposed < most) {
        int best = 0; /* the likeliest; the first of several */
        for (int w = 1; w < waits; w++)
            if (waiting[w].chance > waiting[best].chance)
                best = w;
        self->nodes[self->proposed++] = waiting[best];
        memmove(waiting + best, waiting + best + 1, (size_t)(--waits - best) * sizeof(Node));
        if (self->nodes[self->proposed - 1].depth < INT16_MAX)
            add_best(self, self->proposed - 1, branches, threshold, waiting, &waits);
    }
    PyObject *tokens = PyList_New(self->proposed), *parents = PyList_New(self->proposed);
    for (int n = 0; tokens && parents && n < self->proposed; n++) {
        PyObject *token = PyLong_FromLong(self->nodes[n].token), *parent = PyLong_FromLong(self->nodes[n].parent);
        if (!token || !parent || PyList_SetItem(tokens, n, token) < 0 || PyList_SetItem(parents, n, parent) < 0) {
            Py_DECREF(tokens);
            Py_DECREF(parents);
            return NULL;
        }
    }
    if (!tokens || !parents) {
        Py_XDECREF(tokens);
        Py_XDECREF(parents);
        return NULL;
    }
    return Py_BuildValue("(NN)", tokens, parents);
}

/* -- what came true -- */

static PyObject *accept(Matcher *self, PyObject *tokens)
{
    Py_buffer view;
    if (PyObject_GetBuffer(tokens, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    int64_t n = view.len / 4;
    if (view.len % 4 || n > INT32_MAX - self->size) {
        PyBuffer_Release(&view);
        PyErr_SetString(PyExc_ValueError, "tokens are int32, and fewer than 2 ** 31");
        return NULL;
    }
    if (self->size + n > self->room) {
        int64_t room = 2 * (self->size + n) + 64;
        int32_t *own = realloc(self->own, (size_t)room * 4);
        if (!own) {
            PyBuffer_Release(&view);
            return PyErr_NoMemory();
        }
        self->own = own;
        self->room = room;
    }
    memcpy(self->own + self->size, view.buf, (size_t)n * 4);
    PyBuffer_Release(&view);
    int node = -1, accepted = 0;
    for (int64_t i = 0; i < n; i++) {
        int next = -1, asked = -1;
        for (int c = node + 1; c < self->proposed; c++) {
            if (self->nodes[c].parent != node)
                continue;
            asked = asked < 0 ? c : asked; /* the likeliest came first */
            if (self->nodes[c].token == self->own[self->size + i]) {
                next = c;
                break;
            }
        }
        if (asked >= 0) {
            int bucket = self->nodes[asked].bucket;
            self->tries[bucket]++;
            self->hits[bucket] += next == asked;
            if (self->tries[bucket] > 256) { /* what is long ago counts half */
                self->tries[bucket] /= 2;
                self->hits[bucket] /= 2;
            }
        }
        if (next < 0)
            break;
        node = next;
        accepted++;
    }
    self->size += n;
    for (int r = 0; r < self->count; r++) {
        Response *of = &self->responses[r];
        of->expected = (self->proposed ? of->at : of->expected) + n;
    }
    self->proposed = 0;
    return PyLong_FromLong(accepted);
}

static PyObject *chances(Matcher *self, PyObject *unused)
{
    (void)unused;
    PyObject *found = PyList_New(BUCKETS);
    for (int b = 0; found && b < BUCKETS; b++) {
        PyObject *pair = Py_BuildValue("(dd)", self->hits[b], self->tries[b]);
        if (!pair || PyList_SetItem(found, b, pair) < 0) {
            Py_DECREF(found);
            return NULL;
        }
    }
    return found;
}

/* -- its responses -- */

static PyObject *add(Matcher *self, PyObject *args)
{
    PyObject *tokens, *order;
    double weight;
    if (!PyArg_ParseTuple(args, "OOd", &tokens, &order, &weight))
        return NULL;
    if (self->count == MOST) {
        PyErr_SetString(PyExc_ValueError, "64 responses at most");
        return NULL;
    }
    Response *of = &self->responses[self->count];
    memset(of, 0, sizeof *of);
    if (PyObject_GetBuffer(tokens, &of->tokens, PyBUF_SIMPLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(order, &of->order, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&of->tokens);
        return NULL;
    }
    if (of->tokens.len % 4 || of->tokens.len != of->order.len || !(weight > 0 && weight < 1e30)) {
        PyBuffer_Release(&of->tokens);
        PyBuffer_Release(&of->order);
        PyErr_SetString(PyExc_ValueError, "tokens and their order are int32, as many of each; a weight is above 0");
        return NULL;
    }
    of->size = of->tokens.len / 4;
    of->weight = weight;
    of->expected = self->size;
    self->count++;
    self->proposed = 0;
    Py_RETURN_NONE;
}

static PyObject *set_chances(Matcher *self, PyObject *list)
{
    if (!PyList_Check(list) || PyList_Size(list) != BUCKETS) {
        PyErr_SetString(PyExc_ValueError, "a pair for each of 8 buckets");
        return NULL;
    }
    for (int b = 0; b < BUCKETS; b++) {
        double hits, tries;
        if (!PyArg_ParseTuple(PyList_GetItem(list, b), "dd", &hits, &tries))
            return NULL;
        if (!(hits > 0 && tries >= hits && tries < 1e12)) {
            PyErr_SetString(PyExc_ValueError, "hits are above 0, and no more than tries");
            return NULL;
        }
        self->hits[b] = hits;
        self->tries[b] = tries;
    }
    Py_RETURN_NONE;
}

static PyObject *new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    (void)args;
    (void)named;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Matcher *self = (Matcher *)alloc(type, 0); /* zeros */
    for (int b = 0; self && b < BUCKETS; b++) {
        self->hits[b] = b ? 2 : 1;
        self->tries[b] = b ? 2.25 : 2;
    }
    return (PyObject *)self;
}

static void dealloc(Matcher *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    for (int r = 0; r < self->count; r++) {
        PyBuffer_Release(&self->responses[r].tokens);
        PyBuffer_Release(&self->responses[r].order);
    }
    free(self->own);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release((void *)self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"add", (PyCFunction)add, METH_VARARGS, "A response: tokens and order, int32, and its weight."},
    {"propose", (PyCFunction)propose, METH_VARARGS, "(tokens, parents) of the likeliest continuations."},
    {"accept", (PyCFunction)accept, METH_O, "What came: int32. How many of its first tokens were proposed."},
    {"chances", (PyCFunction)chances, METH_NOARGS, "(hits, tries) by the length of a match: 0, 1, 2 to 3, 4 to 7 ..."},
    {"set_chances", (PyCFunction)set_chances, METH_O, "What `chances` gave."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, new},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {"dataplane.history._suffix.Matcher", sizeof(Matcher), 0, Py_TPFLAGS_DEFAULT, slots};

static PyMethodDef functions[] = {
    {"order", order, METH_O, "The positions of tokens, int32, sorted by what is before them, as bytes of int32."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_suffix", NULL, 0, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__suffix(void)
{
    PyObject *module = PyModule_Create(&definition);
    PyObject *type = module ? PyType_FromSpec(&spec) : NULL;
    if (!type || PyModule_AddObjectRef(module, "Matcher", type) < 0) {
        Py_XDECREF(type);
        Py_XDECREF(module);
        return NULL;
    }
    Py_DECREF(type);
    return module;
}

/* Simulates the tasks of a plan. `events.py` describes the rules and the arrays. A search simulates thousands of plans:
 * this takes 0.3 us a task.
 *
 * What always holds: events are taken by time, those within TIE together, equal ones by number, so that a plan has one
 * outcome; nothing outside the buffers is read or written, whatever they hold; the interpreter's lock is not held.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static const double TIE = 1e-9; /* seconds */

typedef struct {
    double at;
    int64_t id;
} Event;

typedef struct {
    Event *events;
    Py_ssize_t count, room;
} Heap;

static int before(Event a, Event b) { return a.at < b.at || (a.at == b.at && a.id < b.id); }

static int push(Heap *heap, double at, int64_t id)
{
    if (heap->count == heap->room) {
        Py_ssize_t room = heap->room ? 2 * heap->room : 16;
        Event *events = realloc(heap->events, (size_t)room * sizeof(Event));
        if (!events)
            return -1;
        heap->events = events, heap->room = room;
    }
    Event new = {at, id};
    Py_ssize_t child = heap->count++;
    while (child) {
        Py_ssize_t parent = (child - 1) / 2;
        if (!before(new, heap->events[parent]))
            break;
        heap->events[child] = heap->events[parent], child = parent;
    }
    heap->events[child] = new;
    return 0;
}

static Event pop(Heap *heap)
{
    Event top = heap->events[0], last = heap->events[--heap->count];
    Py_ssize_t hole = 0;
    for (;;) {
        Py_ssize_t child = 2 * hole + 1;
        if (child >= heap->count)
            break;
        if (child + 1 < heap->count && before(heap->events[child + 1], heap->events[child]))
            child++;
        if (!before(heap->events[child], last))
            break;
        heap->events[hole] = heap->events[child], hole = child;
    }
    if (heap->count)
        heap->events[hole] = last;
    return top;
}

/* The arguments, in this order. d: float64, i: int32. The same names are in `events.py`. */
enum { WORK, CORES, QUEUE, KEY, SLOT, TAKE, OUT, ALLOC, RELEASE, NEXT_AT, NEXT, NEXT_BYTES, HOST, SPEED, QUEUE_AT,
       QUEUE_WORKERS, ORDER_AT, ORDER, CAPS, HOST_CORES, HOST_RATE, WORKER_OF, START, END, PEAK, HOST_PEAK, BUFFERS };
static const char TYPES[] = "ddidiidddiididiiiiiddidddd";

typedef struct {
    Py_buffer views[BUFFERS];
    const double *work, *cores, *key, *out, *alloc, *release, *next_bytes, *speed, *host_cores, *host_rate;
    const int32_t *queue, *slot, *take, *next_at, *next, *host, *queue_at, *queue_workers, *order_at, *order, *caps;
    int32_t *worker_of;
    double *start, *end, *peak, *host_peak;
    double hop, latency, now;
    Py_ssize_t tasks, edges, workers, hosts, queues, slots, done;
    int found, failed, sharing;             /* sharing: tasks running on hosts whose cores are shared */
    Heap events, *ready, *running;          /* of all; of a queue; of a host whose cores are shared, by its own time */
    int32_t *waits, *left, *prior_at, *prior; /* predecessors to wait for; consumers left; predecessors */
    int32_t *inside, *position, *mine_at, *mine;
    char *is_ready, *idle, *dirty;
    double *held, *host_held, *own_time, *rate, *demand, *line_free, *arrival;
    int64_t *stamp;
} Play;

static Py_ssize_t count_of(Play *p, int at) { return p->views[at].len / (TYPES[at] == 'd' ? 8 : 4); }

static int starts_ok(const int32_t *at, Py_ssize_t count, Py_ssize_t total)
{
    if (at[0] != 0 || at[count] != total)
        return 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (at[i] > at[i + 1])
            return 0;
    return 1;
}

static int within(const int32_t *values, Py_ssize_t count, Py_ssize_t least, Py_ssize_t end)
{
    for (Py_ssize_t i = 0; i < count; i++)
        if (values[i] < least || values[i] >= end)
            return 0;
    return 1;
}

/* Whether the buffers are of the lengths that they must have, and name only what there is. */
static int checked(Play *p)
{
    Py_ssize_t T = p->tasks = count_of(p, WORK), W = p->workers = count_of(p, HOST), H;
    H = p->hosts = count_of(p, HOST_CORES), p->edges = count_of(p, NEXT), p->slots = count_of(p, CAPS);
    p->queues = count_of(p, QUEUE_AT) - 1, p->found = count_of(p, ORDER_AT) == 0;
    static const int a_task[] = {CORES, QUEUE, KEY, SLOT, TAKE, OUT, ALLOC, RELEASE, WORKER_OF, START, END};
    for (size_t i = 0; i < sizeof a_task / sizeof *a_task; i++)
        if (count_of(p, a_task[i]) != T)
            return 0;
    if (count_of(p, NEXT_AT) != T + 1 || count_of(p, NEXT_BYTES) != p->edges || count_of(p, SPEED) != W || p->queues < 0
        || count_of(p, PEAK) != W || count_of(p, HOST_RATE) != H || count_of(p, HOST_PEAK) != H)
        return 0;
    if (!p->found && (count_of(p, ORDER_AT) != W + 1 || !starts_ok(p->order_at, W, count_of(p, ORDER))
                      || count_of(p, ORDER) != T || !within(p->order, T, 0, T)))
        return 0;
    for (Py_ssize_t w = 0; w < W; w++)
        if (!(p->speed[w] > 0))
            return 0;
    return starts_ok(p->next_at, T, p->edges) && within(p->next, p->edges, 0, T) && within(p->queue, T, 0, p->queues)
           && within(p->slot, T, -1, p->slots) && within(p->host, W, 0, H)
           && starts_ok(p->queue_at, p->queues, count_of(p, QUEUE_WORKERS))
           && within(p->queue_workers, count_of(p, QUEUE_WORKERS), 0, W);
}

static void *zeros(Play *p, Py_ssize_t count, size_t size)
{
    void *room = calloc((size_t)(count ? count : 1), size);
    if (!room)
        p->failed = 1;
    return room;
}

static void prepare(Play *p)
{
    Py_ssize_t T = p->tasks, W = p->workers, H = p->hosts, members = count_of(p, QUEUE_WORKERS);
    p->ready = zeros(p, p->queues, sizeof(Heap)), p->running = zeros(p, H, sizeof(Heap));
    p->waits = zeros(p, T, 4), p->left = zeros(p, T, 4), p->prior_at = zeros(p, T + 1, 4);
    p->prior = zeros(p, p->edges, 4), p->inside = zeros(p, p->slots, 4), p->position = zeros(p, W, 4);
    p->mine_at = zeros(p, W + 1, 4), p->mine = zeros(p, members, 4);
    p->is_ready = zeros(p, T, 1), p->idle = zeros(p, W, 1), p->dirty = zeros(p, W, 1);
    p->held = zeros(p, W, 8), p->host_held = zeros(p, H, 8), p->own_time = zeros(p, H, 8), p->rate = zeros(p, H, 8);
    p->demand = zeros(p, H, 8), p->line_free = zeros(p, H, 8), p->arrival = zeros(p, H, 8), p->stamp = zeros(p, H, 8);
    if (p->failed)
        return;
    for (Py_ssize_t e = 0; e < p->edges; e++)
        p->waits[p->next[e]]++;
    for (Py_ssize_t t = 0; t < T; t++) {
        p->left[t] = p->next_at[t + 1] - p->next_at[t];
        p->prior_at[t + 1] = p->prior_at[t] + p->waits[t];
        p->worker_of[t] = -1, p->start[t] = p->end[t] = -1;
    }
    int32_t *fill = zeros(p, T + W, 4);
    if (p->failed)
        return;
    for (Py_ssize_t t = 0; t < T; t++)
        for (int32_t e = p->next_at[t]; e < p->next_at[t + 1]; e++)
            p->prior[p->prior_at[p->next[e]] + fill[p->next[e]]++] = (int32_t)t;
    for (Py_ssize_t i = 0; i < members; i++)
        p->mine_at[p->queue_workers[i] + 1]++;
    for (Py_ssize_t w = 0; w < W; w++)
        p->mine_at[w + 1] += p->mine_at[w];
    for (Py_ssize_t q = 0; q < p->queues; q++)
        for (int32_t i = p->queue_at[q]; i < p->queue_at[q + 1]; i++) {
            int32_t w = p->queue_workers[i];
            p->mine[p->mine_at[w] + fill[T + w]++] = (int32_t)q;
        }
    free(fill);
    if (!p->found)
        for (Py_ssize_t w = 0; w < W; w++)
            for (int32_t i = p->order_at[w]; i < p->order_at[w + 1]; i++)
                p->worker_of[p->order[i]] = (int32_t)w;
    for (Py_ssize_t h = 0; h < H; h++)
        p->rate[h] = 1, p->stamp[h] = -1, p->host_peak[h] = 0;
    for (Py_ssize_t w = 0; w < W; w++)
        p->peak[w] = 0, p->idle[w] = p->dirty[w] = 1;
}

static void set_rate(Play *p, int32_t h)
{
    p->rate[h] = p->demand[h] > p->host_cores[h] ? p->host_cores[h] / p->demand[h] : 1;
}

static void make_ready(Play *p, int32_t t)
{
    p->is_ready[t] = 1;
    if (!p->found) {
        if (p->worker_of[t] >= 0)
            p->dirty[p->worker_of[t]] = 1;
        return;
    }
    if (push(&p->ready[p->queue[t]], p->key[t], t))
        p->failed = 1;
    for (int32_t i = p->queue_at[p->queue[t]]; i < p->queue_at[p->queue[t] + 1]; i++)
        p->dirty[p->queue_workers[i]] = 1;
}

static int admitted(Play *p, int32_t t)
{
    return p->slot[t] < 0 || p->take[t] <= 0 || p->inside[p->slot[t]] < p->caps[p->slot[t]];
}

/* The task that an idle worker begins, or -1. */
static int32_t choose(Play *p, int32_t w)
{
    if (!p->found) {
        int32_t at = p->order_at[w] + p->position[w];
        if (at == p->order_at[w + 1] || !p->is_ready[p->order[at]])
            return -1;
        p->position[w]++;
        return p->order[at];
    }
    int32_t best = -1;
    Heap *from = NULL;
    for (int32_t i = p->mine_at[w]; i < p->mine_at[w + 1]; i++) {
        Heap *heap = &p->ready[p->mine[i]];
        if (!heap->count || !admitted(p, (int32_t)heap->events[0].id))
            continue;
        if (best < 0 || before(heap->events[0], from->events[0]))
            best = (int32_t)heap->events[0].id, from = heap;
    }
    if (from)
        pop(from);
    return best;
}

static void begin(Play *p, int32_t w, int32_t t)
{
    int32_t h = p->host[w];
    p->idle[w] = 0, p->worker_of[t] = w, p->start[t] = p->now;
    if (p->slot[t] >= 0 && p->take[t] > 0)
        p->inside[p->slot[t]] += p->take[t];
    if ((p->held[w] += p->alloc[t]) > p->peak[w])
        p->peak[w] = p->held[w];
    if ((p->host_held[h] += p->out[t]) > p->host_peak[h])
        p->host_peak[h] = p->host_held[h];
    double work = p->work[t] / p->speed[w];
    if (p->cores[t] > 0 && p->host_cores[h] > 0) {
        p->sharing++, p->demand[h] += p->cores[t], set_rate(p, h);
        p->failed |= push(&p->running[h], p->own_time[h] + work, t) != 0;
    } else
        p->failed |= push(&p->events, p->now + work, t) != 0;
}

static void dispatch(Play *p)
{
    for (int32_t w = 0; w < p->workers; w++)
        if (p->dirty[w]) {
            p->dirty[w] = 0;
            int32_t t = p->idle[w] ? choose(p, w) : -1;
            if (t >= 0)
                begin(p, w, t);
        }
}

/* How long until worker `to` (-1: any of the queue) has what t made. */
static double delay(Play *p, int32_t t, int32_t edge)
{
    int32_t next = p->next[edge], from = p->worker_of[t], to = p->worker_of[next], h = p->host[from], there = -1;
    if (to < 0) {
        int32_t q = p->queue[next];
        for (int32_t i = p->queue_at[q]; i < p->queue_at[q + 1]; i++) {
            if (p->queue_workers[i] == from)
                to = from;
            if (there < 0 || p->host[p->queue_workers[i]] == h)
                there = p->host[p->queue_workers[i]];
        }
    } else
        there = p->host[to];
    if (to == from || there < 0)
        return 0;
    if (there == h || p->host_rate[h] <= 0)
        return p->hop;
    if (p->stamp[there] != t) {
        double begins = p->line_free[h] > p->now ? p->line_free[h] : p->now;
        p->line_free[h] = begins + p->next_bytes[edge] / p->host_rate[h];
        p->stamp[there] = t, p->arrival[there] = p->line_free[h] + p->latency;
    }
    return p->hop + p->arrival[there] - p->now;
}

static void finish(Play *p, int32_t t)
{
    int32_t w = p->worker_of[t];
    p->end[t] = p->now, p->idle[w] = 1, p->dirty[w] = 1, p->done++;
    p->held[w] -= p->release[t];
    if (p->slot[t] >= 0 && p->take[t] < 0) {
        p->inside[p->slot[t]] += p->take[t];
        memset(p->dirty, 1, (size_t)p->workers);
    }
    for (int32_t i = p->prior_at[t]; i < p->prior_at[t + 1]; i++)
        if (--p->left[p->prior[i]] == 0)
            p->host_held[p->host[p->worker_of[p->prior[i]]]] -= p->out[p->prior[i]];
    for (int32_t e = p->next_at[t]; e < p->next_at[t + 1]; e++) {
        double wait = delay(p, t, e);
        if (wait > 0)
            p->failed |= push(&p->events, p->now + wait, p->tasks + e) != 0;
        else if (--p->waits[p->next[e]] == 0)
            make_ready(p, p->next[e]);
    }
}

/* The host whose next task ends first, at `*at` or before; -1 for none. */
static int32_t earliest(Play *p, double *at)
{
    int32_t found = -1;
    for (int32_t h = 0; p->sharing && h < p->hosts; h++)
        if (p->running[h].count) {
            double ends = p->now + (p->running[h].events[0].at - p->own_time[h]) / p->rate[h];
            if (ends < *at)
                *at = ends, found = h;
        }
    return found;
}

static void play(Play *p)
{
    for (int32_t t = 0; t < p->tasks; t++)
        if (!p->waits[t])
            make_ready(p, t);
    dispatch(p);
    while (!p->failed) {
        double at = p->events.count ? p->events.events[0].at : 1e300;
        int32_t h = earliest(p, &at);
        if (at >= 1e300)
            return;
        if (at > p->now + TIE) {
            dispatch(p);
            at = p->events.count ? p->events.events[0].at : 1e300;
            h = earliest(p, &at);
        }
        double passed = at > p->now ? at - p->now : 0;
        for (int32_t i = 0; p->sharing && i < p->hosts; i++)
            if (p->running[i].count)
                p->own_time[i] += passed * p->rate[i];
        p->now += passed;
        if (h >= 0) {
            Event ended = pop(&p->running[h]);
            p->sharing--, p->own_time[h] = ended.at, p->demand[h] -= p->cores[ended.id];
            if (!p->running[h].count)
                p->demand[h] = 0;
            set_rate(p, h), finish(p, (int32_t)ended.id);
        } else {
            Event event = pop(&p->events);
            if (event.id < p->tasks)
                finish(p, (int32_t)event.id);
            else if (--p->waits[p->next[event.id - p->tasks]] == 0)
                make_ready(p, p->next[event.id - p->tasks]);
        }
        if (!p->events.count && earliest(p, &(double){1e300}) < 0)
            dispatch(p);
    }
}

static void let_go(Play *p)
{
    for (Py_ssize_t q = 0; p->ready && q < p->queues; q++)
        free(p->ready[q].events);
    for (Py_ssize_t h = 0; p->running && h < p->hosts; h++)
        free(p->running[h].events);
    void *all[] = {p->events.events, p->ready, p->running, p->waits, p->left, p->prior_at, p->prior, p->inside,
                   p->position, p->mine_at, p->mine, p->is_ready, p->idle, p->dirty, p->held, p->host_held,
                   p->own_time, p->rate, p->demand, p->line_free, p->arrival, p->stamp};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static void point(Play *p)
{
    void *at[BUFFERS];
    for (int i = 0; i < BUFFERS; i++)
        at[i] = p->views[i].buf;
    p->work = at[WORK], p->cores = at[CORES], p->queue = at[QUEUE], p->key = at[KEY], p->slot = at[SLOT];
    p->take = at[TAKE], p->out = at[OUT], p->alloc = at[ALLOC], p->release = at[RELEASE], p->next_at = at[NEXT_AT];
    p->next = at[NEXT], p->next_bytes = at[NEXT_BYTES], p->host = at[HOST], p->speed = at[SPEED];
    p->queue_at = at[QUEUE_AT], p->queue_workers = at[QUEUE_WORKERS], p->order_at = at[ORDER_AT], p->order = at[ORDER];
    p->caps = at[CAPS], p->host_cores = at[HOST_CORES], p->host_rate = at[HOST_RATE], p->worker_of = at[WORKER_OF];
    p->start = at[START], p->end = at[END], p->peak = at[PEAK], p->host_peak = at[HOST_PEAK];
}

static PyObject *played(PyObject *self, PyObject *args)
{
    PyObject *buffers, *result = NULL;
    Play p = {.now = 0};
    int held = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!dd:play", &PyTuple_Type, &buffers, &p.hop, &p.latency))
        return NULL;
    if (PyTuple_Size(buffers) != BUFFERS)
        return PyErr_Format(PyExc_ValueError, "%d arrays are wanted", BUFFERS);
    for (; held < BUFFERS; held++)
        if (PyObject_GetBuffer(PyTuple_GetItem(buffers, held), &p.views[held],
                               held >= WORKER_OF ? PyBUF_WRITABLE : PyBUF_SIMPLE))
            goto done;
    point(&p);
    if (!checked(&p)) {
        PyErr_SetString(PyExc_ValueError, "the arrays do not fit each other");
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    prepare(&p);
    if (!p.failed)
        play(&p);
    let_go(&p);
    Py_END_ALLOW_THREADS
    result = p.failed ? PyErr_NoMemory() : PyLong_FromSsize_t(p.done);
done:
    while (held--)
        PyBuffer_Release(&p.views[held]);
    return result;
}

static PyMethodDef methods[] = {
    {"play", played, METH_VARARGS,
     "play(arrays, hop_s, latency_s)\n--\n\nPlay the tasks through; the number of those that were done."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_events", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__events(void) { return PyModuleDef_Init(&module); }

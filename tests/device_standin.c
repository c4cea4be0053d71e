/* device_standin: a device without a device, for tests. It proves the logic of the core, and nothing of any GPU.
 *
 *     cc -std=c11 -D_GNU_SOURCE -shared -fPIC -fvisibility=hidden -I.. -o libddl-standin.so device_standin.c -lpthread
 *
 * What a program gets as device memory is address space without access, so that a CPU that touches it crashes; the bytes
 * lie elsewhere, and only this plugin knows where. Streams run when somebody asks about an event, some tasks at a time
 * and only every other time, by chance: whoever does not wait for an event, or waits for the wrong one, reads poison.
 *
 *     DDL_STANDIN_MB      memory of each device; default 64
 *     DDL_STANDIN_NATIVE  1: it is a transport too, that runs collectives of ranks which are threads of one process
 *     DDL_STANDIN_BARE    1: without optional members: no pinned memory, no streams, no strided copies
 *
 * All contexts of a process share the devices. standin_control is for tests: it makes copies fail, and counts. */
#include "device_standin.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

enum { DEVICES = 2, BLOCKS = 4096, BLOCK_ALIGN = 256 };

typedef struct block {
    size_t at, bytes;
} block;

typedef struct device {
    char *shown, *real; /* what programs see, what there is */
    block blocks[BLOCKS]; /* sorted by place */
    int count;
} device;

typedef struct event {
    int refs;
    bool happened;
    ddl_status status;
} event;

typedef struct gate {
    int refs;
    bool open;
} gate;

typedef enum task_kind { TASK_COPY, TASK_FILL, TASK_STRIDED, TASK_REDUCE, TASK_EVENT, TASK_WAIT, TASK_GATE, TASK_ARRIVE } task_kind;

typedef struct native native;

typedef struct task {
    struct task *next;
    task_kind kind;
    char *dst;
    const char *src, *srcs[8];
    size_t bytes;
    int value, dtype, op;
    ddl_tensor tensor;
    event *event;
    gate *gate;
    native *native; /* whose rank `value` has come on its stream */
} task;

typedef struct stream {
    struct stream *next;
    task *first, *last;
    ddl_status status; /* of its first task that failed */
} stream;

static struct {
    pthread_mutex_t lock;
    device devices[DEVICES];
    size_t bytes;
    stream *streams;
    unsigned random;
} all = {.lock = PTHREAD_MUTEX_INITIALIZER, .random = 1};

DDL_PLUGIN_EXPORT standin_state standin_control;

typedef struct handle {
    const ddl_host *host;
    int number;
    stream *own;
} handle;

/* ---- memory ---- */

static device *device_of(const void *pointer) {
    for (int i = 0; i < DEVICES; i++) {
        const char *shown = all.devices[i].shown;
        if (shown != NULL && (const char *)pointer >= shown && (const char *)pointer < shown + all.bytes) {
            return &all.devices[i];
        }
    }
    return NULL;
}

/* Which allocation holds these bytes; NULL: none. */
static block *block_of(device *d, const void *pointer, size_t bytes) {
    size_t at = (size_t)((const char *)pointer - d->shown);
    for (int i = 0; i < d->count; i++) {
        block *b = &d->blocks[i];
        if (at >= b->at && at + bytes <= b->at + b->bytes) {
            return b;
        }
    }
    return NULL;
}

/* Where the bytes are. NULL: memory of a device that was freed, or never allocated. */
static char *real_of(const void *pointer, size_t bytes) {
    device *d = device_of(pointer);
    if (d == NULL) {
        return (char *)(uintptr_t)pointer;
    }
    return block_of(d, pointer, bytes) != NULL ? d->real + ((const char *)pointer - d->shown) : NULL;
}

static bool device_make(device *d) {
    if (d->shown == NULL) {
        d->shown = mmap(NULL, all.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        d->real = mmap(NULL, all.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    return d->shown != MAP_FAILED && d->real != MAP_FAILED;
}

static ddl_status block_make(device *d, size_t bytes, void **out) {
    size_t at = 0;
    int i = 0;
    bytes = (bytes + BLOCK_ALIGN - 1) / BLOCK_ALIGN * BLOCK_ALIGN;
    while (i < d->count && d->blocks[i].at - at < bytes) {
        at = d->blocks[i].at + d->blocks[i].bytes;
        i++;
    }
    if (bytes > all.bytes || at > all.bytes - bytes || d->count == BLOCKS) {
        return DDL_ERR_NOMEM;
    }
    memmove(&d->blocks[i + 1], &d->blocks[i], (size_t)(d->count - i) * sizeof d->blocks[0]);
    d->blocks[i] = (block){at, bytes};
    d->count++;
    memset(d->real + at, 0xA5, bytes);
    *out = d->shown + at;
    return DDL_OK;
}

/* ---- streams ---- */

static void event_drop(event *e) {
    if (--e->refs == 0) {
        free(e);
    }
}

static void gate_drop(gate *g) {
    if (--g->refs == 0) {
        free(g);
    }
}

static void reduce_f32(char *dst, const char *const *srcs, int count, size_t bytes) {
    for (size_t at = 0; at < bytes; at += sizeof(float)) {
        float sum, x;
        memcpy(&sum, srcs[0] + at, sizeof sum);
        for (int i = 1; i < count; i++) {
            memcpy(&x, srcs[i] + at, sizeof x);
            sum += x;
        }
        memcpy(dst + at, &sum, sizeof sum);
    }
}

static void strided_run(const task *t, char *packed, char *data) {
    size_t size = ddl_dtype_bytes_of(t->tensor.dtype);
    int64_t index[DDL_MAX_DIMS] = {0};
    for (size_t at = 0; at < t->bytes; at += size) {
        int64_t offset = 0;
        for (int d = 0; d < t->tensor.ndim; d++) {
            offset += index[d] * t->tensor.strides[d];
        }
        char *element = data + offset * (int64_t)size;
        memcpy(t->value ? element : packed + at, t->value ? packed + at : element, size);
        for (int d = t->tensor.ndim - 1; d >= 0 && ++index[d] == t->tensor.shape[d]; d--) {
            index[d] = 0;
        }
    }
}

static void native_came(native *n, int rank);

/* Does a task. False: it has to wait. */
static bool task_run(stream *s, task *t) {
    if (t->kind == TASK_ARRIVE) {
        native_came(t->native, t->value);
        return true;
    }
    size_t bytes = t->kind == TASK_STRIDED ? 1 : t->bytes;
    char *dst = t->dst != NULL ? real_of(t->dst, bytes) : NULL;
    char *src = t->src != NULL ? real_of(t->src, bytes) : NULL;
    bool lost = (t->dst != NULL && dst == NULL) || (t->src != NULL && src == NULL);
    if (t->kind == TASK_WAIT || t->kind == TASK_GATE) {
        return t->kind == TASK_WAIT ? t->event->happened : t->gate->open;
    }
    if (t->kind == TASK_EVENT) {
        t->event->happened = true;
        t->event->status = s->status;
        s->status = DDL_OK;
        return true;
    }
    if (lost || (standin_control.fail_tasks > 0 && --standin_control.fail_tasks == 0)) {
        s->status = DDL_ERR_SYSTEM;
        return true;
    }
    if (t->kind == TASK_COPY) {
        memmove(dst, src, t->bytes);
    } else if (t->kind == TASK_FILL) {
        memset(dst, t->value, t->bytes);
    } else if (t->kind == TASK_STRIDED) {
        strided_run(t, src, dst);
    } else {
        const char *srcs[8];
        for (int i = 0; i < t->value; i++) {
            srcs[i] = real_of(t->srcs[i], t->bytes);
        }
        reduce_f32(dst, srcs, t->value, t->bytes);
    }
    return true;
}

static void task_end(stream *s, task *t) {
    s->first = t->next;
    s->last = s->first == NULL ? NULL : s->last;
    if (t->event != NULL) {
        event_drop(t->event);
    }
    if (t->gate != NULL) {
        gate_drop(t->gate);
    }
    free(t);
}

/* Lets each stream do some tasks, none every other time (`all_of_them`: all that it can). Returns whether one was done. */
static bool tick(bool all_of_them) {
    bool any = false;
    for (stream *s = all.streams; s != NULL && !standin_control.stopped; s = s->next) {
        all.random = all.random * 1664525u + 1013904223u;
        unsigned some = all.random >> 16 & 1 ? all.random >> 20 & 127 : 0;
        for (unsigned i = 0; s->first != NULL && (i < some || all_of_them) && task_run(s, s->first); i++) {
            task_end(s, s->first);
            standin_control.tasks++;
            any = true;
        }
    }
    return any;
}

static stream *stream_new(void) {
    stream *s = calloc(1, sizeof *s);
    if (s != NULL) {
        s->next = all.streams;
        all.streams = s;
    }
    return s;
}

static void stream_end(stream *s) {
    stream **at = &all.streams;
    while (s->first != NULL && tick(true)) {
    }
    while (*at != s) {
        at = &(*at)->next;
    }
    *at = s->next;
    free(s);
}

static ddl_status queue(void *self, void *stream_of, task t) {
    handle *h = self;
    stream *s = stream_of != NULL ? stream_of : h->own;
    task *made = malloc(sizeof *made);
    if (made == NULL) {
        return DDL_ERR_NOMEM;
    }
    *made = t;
    made->next = NULL;
    pthread_mutex_lock(&all.lock);
    if (t.event != NULL) {
        t.event->refs++;
    }
    if (t.gate != NULL) {
        t.gate->refs++;
    }
    *(s->last != NULL ? &s->last->next : &s->first) = made;
    s->last = made;
    pthread_mutex_unlock(&all.lock);
    return DDL_OK;
}

/* ---- the table ---- */

static int32_t count(void) { return DEVICES; }

static ddl_status device_open(const ddl_host *host, int32_t number, void **out_self) {
    handle *h = calloc(1, sizeof *h);
    pthread_mutex_lock(&all.lock);
    bool made = h != NULL && device_make(&all.devices[number]);
    if (made) {
        h->host = host;
        h->number = number;
        h->own = stream_new();
    }
    pthread_mutex_unlock(&all.lock);
    *out_self = h;
    return made ? DDL_OK : DDL_ERR_NOMEM;
}

static void device_close(void *self) {
    handle *h = self;
    pthread_mutex_lock(&all.lock);
    stream_end(h->own);
    pthread_mutex_unlock(&all.lock);
    free(h);
}

static int32_t owner(void *self, const void *pointer) {
    (void)self;
    pthread_mutex_lock(&all.lock);
    device *d = device_of(pointer);
    int32_t found = d == NULL ? 0 : block_of(d, pointer, 1) != NULL ? (int32_t)(d - all.devices) + 1 : DDL_ERR_ARG;
    pthread_mutex_unlock(&all.lock);
    return found;
}

static ddl_status device_alloc(void *self, size_t bytes, void **out_memory) {
    handle *h = self;
    pthread_mutex_lock(&all.lock);
    ddl_status status = standin_control.no_room ? DDL_ERR_NOMEM : block_make(&all.devices[h->number], bytes, out_memory);
    pthread_mutex_unlock(&all.lock);
    return status;
}

/* Waits for the streams, as a GPU's free does. */
static void device_free(void *self, void *memory) {
    (void)self;
    pthread_mutex_lock(&all.lock);
    while (tick(true)) {
    }
    device *d = device_of(memory);
    block *b = d != NULL ? block_of(d, memory, 1) : NULL;
    if (b != NULL) {
        memset(d->real + b->at, 0x5A, b->bytes);
        memmove(b, b + 1, (size_t)(d->blocks + d->count - b - 1) * sizeof *b);
        d->count--;
    }
    pthread_mutex_unlock(&all.lock);
}

static ddl_status copy(void *self, void *dst, const void *src, size_t bytes, void *s) {
    if (standin_control.fail_calls > 0 && --standin_control.fail_calls == 0) {
        return DDL_ERR_SYSTEM;
    }
    return queue(self, s, (task){.kind = TASK_COPY, .dst = dst, .src = src, .bytes = bytes});
}

static ddl_status fill(void *self, void *dst, int value, size_t bytes, void *s) {
    return queue(self, s, (task){.kind = TASK_FILL, .dst = dst, .value = value, .bytes = bytes});
}

/* Sums of f32, of 8 sources at most: no test needs more. */
static ddl_status reduce(void *self, void *dst, const void *const *srcs, int32_t src_count, int64_t elements,
                         int32_t dtype, int32_t op, void *s) {
    task t = {.kind = TASK_REDUCE, .dst = dst, .value = src_count, .bytes = (size_t)elements * 4};
    if (dtype != DDL_F32 || op != DDL_SUM || src_count > 8) {
        return DDL_ERR_UNSUPPORTED;
    }
    for (int32_t i = 0; i < src_count; i++) {
        t.srcs[i] = srcs[i];
    }
    return queue(self, s, t);
}

static ddl_status strided(void *self, const ddl_tensor *tensor, void *packed, int32_t unpack, void *s) {
    task t = {.kind = TASK_STRIDED, .dst = tensor->data, .src = packed, .value = unpack, .tensor = *tensor};
    t.bytes = ddl_dtype_bytes_of(tensor->dtype);
    for (int32_t d = 0; d < tensor->ndim; d++) {
        t.bytes *= (size_t)tensor->shape[d];
    }
    t.dst = tensor->data;
    return queue(self, s, t);
}

static ddl_status event_record(void *self, void *s, void **out_event) {
    if (standin_control.fail_events > 0) {
        standin_control.fail_events--;
        return DDL_ERR_SYSTEM;
    }
    event *e = calloc(1, sizeof *e);
    if (e == NULL) {
        return DDL_ERR_NOMEM;
    }
    e->refs = 1;
    ddl_status status = queue(self, s, (task){.kind = TASK_EVENT, .event = e});
    *out_event = e;
    return status;
}

static ddl_status event_test(void *self, void *made) {
    event *e = made;
    (void)self;
    pthread_mutex_lock(&all.lock);
    tick(false);
    ddl_status status = e->happened ? e->status : DDL_IN_PROGRESS;
    pthread_mutex_unlock(&all.lock);
    return status;
}

static void event_free(void *self, void *made) {
    (void)self;
    pthread_mutex_lock(&all.lock);
    event_drop(made);
    pthread_mutex_unlock(&all.lock);
}

static ddl_status host_alloc(void *self, size_t bytes, void **out_memory) {
    (void)self;
    char *block = standin_control.no_pinned ? NULL : aligned_alloc(64, (bytes + 127) / 64 * 64); /* after its size */
    if (block == NULL) {
        return DDL_ERR_NOMEM;
    }
    memcpy(block, &bytes, sizeof bytes);
    *out_memory = block + 64;
    memset(*out_memory, 0xC3, bytes);
    standin_control.pinned++;
    standin_control.pinned_bytes += bytes;
    standin_control.pinned_largest = bytes > standin_control.pinned_largest ? bytes : standin_control.pinned_largest;
    return DDL_OK;
}

static void host_free(void *self, void *memory) {
    (void)self;
    size_t bytes;
    memcpy(&bytes, (char *)memory - 64, sizeof bytes);
    standin_control.pinned--;
    standin_control.pinned_bytes -= bytes;
    free((char *)memory - 64);
}

static ddl_status stream_make(void *self, void **out_stream) {
    (void)self;
    pthread_mutex_lock(&all.lock);
    *out_stream = stream_new();
    pthread_mutex_unlock(&all.lock);
    return *out_stream != NULL ? DDL_OK : DDL_ERR_NOMEM;
}

static void stream_free(void *self, void *s) {
    (void)self;
    pthread_mutex_lock(&all.lock);
    stream_end(s);
    pthread_mutex_unlock(&all.lock);
}

static ddl_status stream_wait(void *self, void *s, void *made) {
    return queue(self, s, (task){.kind = TASK_WAIT, .event = made});
}

static ddl_status gate_put(void *self, void *s, void **out_gate) {
    gate *g = calloc(1, sizeof *g);
    if (g == NULL) {
        return DDL_ERR_NOMEM;
    }
    g->refs = 1;
    *out_gate = g;
    return queue(self, s, (task){.kind = TASK_GATE, .gate = g});
}

static void gate_open(void *self, void *made) {
    (void)self;
    pthread_mutex_lock(&all.lock);
    ((gate *)made)->open = true;
    gate_drop(made);
    pthread_mutex_unlock(&all.lock);
}

static int32_t capturing(void *self, void *s) {
    (void)self;
    return s != NULL && s == standin_control.captured;
}

/* ---- collectives of threads ---- */

enum { RANKS = 8 };

/* One collective: it runs when all have called and their streams have come, by whoever looks then. */
struct native {
    struct native *next;
    uint64_t sequence;
    ddl_native_call calls[RANKS];
    bool called[RANKS], came[RANKS], taken[RANKS];
    bool over, cancelled;
    int refs;
};

typedef struct native_set {
    struct native_set *next;
    const void *leader; /* endpoint of the first rank: jobs of one process have other ones */
    uint64_t group;
    int count, users;
    bool broken;
    native *natives;
} native_set;

typedef struct endpoint {
    const ddl_host *host;
    void *peers[RANKS]; /* endpoints of threads of this process; NULL: another process's */
    int32_t rank;
} endpoint;

typedef struct member { /* of a set */
    native_set *set;
    int rank;
} member;

static native_set *all_sets;

typedef struct address {
    int64_t pid;
    void *self;
} address;

static ddl_status link_open(const ddl_host *host, const ddl_transport_params *params, void **out_self) {
    endpoint *e = calloc(1, sizeof *e);
    e->host = host;
    e->rank = params->rank;
    e->peers[params->rank % RANKS] = e;
    *out_self = e;
    return params->world_size <= RANKS ? DDL_OK : DDL_ERR_UNSUPPORTED;
}

static void link_close(void *self) { free(self); }

static ddl_status link_address(void *self, void *out_address, size_t *bytes) {
    address a = {(int64_t)getpid(), self};
    memcpy(out_address, &a, sizeof a);
    *bytes = sizeof a;
    return DDL_OK;
}

static ddl_status link_add_peer(void *self, int32_t peer, const void *theirs, size_t bytes, const char *host_id,
                                uint64_t *out_latency_ns, uint64_t *out_bytes_per_s) {
    address a;
    (void)host_id;
    memcpy(&a, theirs, sizeof a);
    *out_latency_ns = 1;
    *out_bytes_per_s = 1;
    if (bytes != sizeof a || a.pid != getpid()) {
        return DDL_ERR_UNSUPPORTED;
    }
    ((endpoint *)self)->peers[peer] = a.self;
    return DDL_OK;
}

static ddl_status link_send(void *self, int32_t peer, ddl_message *message) {
    (void)self, (void)peer, (void)message;
    return DDL_ERR_UNSUPPORTED;
}

static int32_t link_progress(void *self, int32_t expect) {
    (void)self, (void)expect;
    return 0;
}

static ddl_status link_arm(void *self, int *out_fd) {
    (void)self;
    static int fd = -1;
    pthread_mutex_lock(&all.lock);
    fd = fd >= 0 ? fd : eventfd(0, EFD_CLOEXEC);
    *out_fd = fd;
    pthread_mutex_unlock(&all.lock);
    return DDL_OK;
}

static void link_peer_dead(void *self, int32_t peer) { (void)self, (void)peer; }

static ddl_status native_open(void *self, uint64_t group, const int32_t *ranks, int32_t count, int32_t rank,
                              void **out_set) {
    endpoint *e = self;
    for (int32_t i = 0; i < count; i++) {
        if (e->peers[ranks[i]] == NULL) {
            return DDL_ERR_UNSUPPORTED;
        }
    }
    pthread_mutex_lock(&all.lock);
    native_set *s = all_sets;
    while (s != NULL && (s->leader != e->peers[ranks[0]] || s->group != group)) {
        s = s->next;
    }
    if (s == NULL) {
        s = calloc(1, sizeof *s);
        s->leader = e->peers[ranks[0]];
        s->group = group;
        s->count = count;
        s->next = all_sets;
        all_sets = s;
    }
    s->users++;
    pthread_mutex_unlock(&all.lock);
    member *m = calloc(1, sizeof *m);
    m->set = s;
    m->rank = rank;
    *out_set = m;
    return DDL_OK;
}

static void native_drop(native_set *s, native *n) {
    if (--n->refs == 0) {
        native **at = &s->natives;
        while (*at != NULL && *at != n) {
            at = &(*at)->next;
        }
        if (*at == n) {
            *at = n->next;
        }
        free(n);
    }
}

static void native_close(void *self, void *set) {
    member *m = set;
    native_set *s = m->set;
    (void)self;
    pthread_mutex_lock(&all.lock);
    if (--s->users == 0) {
        native_set **at = &all_sets;
        while (*at != s) {
            at = &(*at)->next;
        }
        *at = s->next;
        while (s->natives != NULL) {
            native *n = s->natives;
            s->natives = n->next;
            free(n);
        }
        free(s);
    }
    pthread_mutex_unlock(&all.lock);
    free(m);
}

static uint64_t native_cost_ns(void *self, void *set, int32_t kind, uint64_t bytes) {
    (void)self, (void)set;
    bool served = kind == DDL_BROADCAST || kind == DDL_ALL_REDUCE || kind == DDL_ALL_GATHER ||
                  kind == DDL_REDUCE_SCATTER || kind == DDL_REDUCE || kind == DDL_ALL_TO_ALL;
    return served && bytes > 0 ? 1000 : 0;
}

static double load(const char *at, int32_t dtype) {
    float f;
    double d;
    int32_t i;
    int64_t l;
    switch (dtype) {
    case DDL_F32: memcpy(&f, at, sizeof f); return f;
    case DDL_F64: memcpy(&d, at, sizeof d); return d;
    case DDL_I32: memcpy(&i, at, sizeof i); return i;
    default: memcpy(&l, at, sizeof l); return (double)l;
    }
}

static void store(char *at, int32_t dtype, double value) {
    float f = (float)value;
    int32_t i = (int32_t)value;
    int64_t l = (int64_t)value;
    switch (dtype) {
    case DDL_F32: memcpy(at, &f, sizeof f); break;
    case DDL_F64: memcpy(at, &value, sizeof value); break;
    case DDL_I32: memcpy(at, &i, sizeof i); break;
    default: memcpy(at, &l, sizeof l); break;
    }
}

static double fold(int32_t op, double a, double b) {
    return op == DDL_MIN ? (a < b ? a : b) : op == DDL_MAX ? (a > b ? a : b) : op == DDL_PROD ? a * b : a + b;
}

/* Bytes [from, from + bytes) of all inputs, reduced. */
static void native_reduce(const native *n, int count, uint64_t from, uint64_t bytes, char *out) {
    size_t size = (size_t)n->calls[0].element_bytes;
    for (uint64_t at = 0; at < bytes; at += size) {
        double sum = 0;
        for (int r = 0; r < count; r++) {
            const ddl_native_call *c = &n->calls[r];
            double x = load(real_of((const char *)c->in + from + at, size), c->dtype);
            x *= c->op != DDL_AVG ? c->factor : 1;
            sum = r == 0 ? x : fold(c->op, sum, x);
        }
        store(out + at, n->calls[0].dtype, n->calls[0].op == DDL_AVG ? sum * n->calls[0].factor : sum);
    }
}

/* All ranks' results are made before any is written: in place is in place. */
static void native_run(native *n, int count) {
    const ddl_native_call *c = n->calls;
    uint64_t bytes = c->bytes, whole = bytes * (uint64_t)count;
    char *results = calloc(1, (size_t)whole * (size_t)count + 1);
    int32_t kind = c->kind;
    bool many = kind == DDL_ALL_GATHER || kind == DDL_ALL_TO_ALL;
    uint64_t length = many ? whole : bytes; /* of all_to_all, bytes is a part too */
    for (int r = 0; r < count; r++) {
        char *out = results + (size_t)length * (size_t)r;
        if (kind == DDL_ALL_REDUCE || (kind == DDL_REDUCE && r == c->root)) {
            native_reduce(n, count, 0, bytes, out);
        } else if (kind == DDL_REDUCE_SCATTER) {
            native_reduce(n, count, bytes * (uint64_t)r, bytes, out);
        } else if (kind == DDL_BROADCAST) {
            memcpy(out, real_of(c[c->root].in, bytes), bytes);
        }
        for (int o = 0; many && o < count; o++) {
            if (kind == DDL_ALL_GATHER) {
                memcpy(out + bytes * (uint64_t)o, real_of(c[o].in, bytes), bytes);
            } else {
                memcpy(out + bytes * (uint64_t)o, real_of((const char *)c[o].in + bytes * (uint64_t)r, bytes), bytes);
            }
        }
    }
    for (int r = 0; r < count; r++) {
        if (kind != DDL_REDUCE || r == c->root) {
            memcpy(real_of(c[r].out, length), results + (size_t)length * (size_t)r, length);
        }
    }
    free(results);
    n->over = true;
    standin_control.natives++;
}

static void native_came(native *n, int rank) {
    n->came[rank] = true;
}

static ddl_status native_start(void *self, void *set, const ddl_native_call *call, void **out_op) {
    member *m = set;
    native_set *s = m->set;
    endpoint *e = self;
    (void)e;
    pthread_mutex_lock(&all.lock);
    native *n = s->natives;
    while (n != NULL && n->sequence != call->sequence) {
        n = n->next;
    }
    if (n == NULL) {
        n = calloc(1, sizeof *n);
        n->sequence = call->sequence;
        n->next = s->natives;
        s->natives = n;
    }
    n->refs++;
    n->calls[m->rank] = *call;
    n->called[m->rank] = true;
    n->came[m->rank] = call->stream == NULL;
    pthread_mutex_unlock(&all.lock);
    *out_op = n;
    if (call->stream != NULL) {
        queue(NULL, call->stream, (task){.kind = TASK_ARRIVE, .native = n, .value = m->rank});
    }
    return DDL_OK;
}

static ddl_status native_look(native_set *s, native *n, int rank, int32_t *out_rank) {
    for (int r = 0; r < s->count; r++) {
        if (n->called[r] && n->calls[r].signature != n->calls[rank].signature) {
            *out_rank = r;
            return DDL_ERR_MISMATCH;
        }
    }
    for (int r = 0; r < s->count; r++) {
        if (!n->came[r]) {
            *out_rank = n->called[r] ? -1 : r;
            return DDL_IN_PROGRESS;
        }
    }
    if (!n->over && !n->cancelled && !s->broken) {
        native_run(n, s->count);
    }
    return n->over ? DDL_OK : DDL_IN_PROGRESS;
}

static ddl_status native_test(void *self, void *set, void *op, int32_t looks, int32_t *out_rank) {
    member *m = set;
    (void)self, (void)looks;
    pthread_mutex_lock(&all.lock);
    tick(false);
    ddl_status status = native_look(m->set, op, m->rank, out_rank);
    if (status == DDL_OK && ((native *)op)->refs > 0) {
        native *n = op;
        n->taken[m->rank] = true;
        bool last = true;
        for (int r = 0; r < m->set->count; r++) {
            last = last && n->taken[r];
        }
        if (last) {
            n->refs = 1;
            native_drop(m->set, n);
        }
    }
    pthread_mutex_unlock(&all.lock);
    return status;
}

static void native_cancel(void *self, void *set, void *op) {
    (void)self;
    pthread_mutex_lock(&all.lock);
    ((native *)op)->cancelled = true;
    ((member *)set)->set->broken = true;
    pthread_mutex_unlock(&all.lock);
}

static const ddl_transport links = {.size = sizeof links,
                                    .flags = DDL_TRANSPORT_LOCAL | DDL_TRANSPORT_ORDERED | DDL_TRANSPORT_DEVICE,
                                    .max_payload_bytes = DDL_MESSAGE_PAYLOAD_BYTES,
                                    .open = link_open, .close = link_close, .address = link_address,
                                    .add_peer = link_add_peer, .send = link_send, .progress = link_progress,
                                    .arm = link_arm, .peer_dead = link_peer_dead, .native_open = native_open,
                                    .native_close = native_close, .native_cost_ns = native_cost_ns,
                                    .native_start = native_start, .native_test = native_test,
                                    .native_cancel = native_cancel};

#define REQUIRED                                                                                                       \
    .open = device_open, .close = device_close, .count = count, .owner = owner, .alloc = device_alloc,                 \
    .free = device_free, .copy = copy, .fill = fill, .reduce = reduce, .event_record = event_record,                   \
    .event_test = event_test, .event_free = event_free
DDL_PLUGIN_EXPORT const ddl_device standin_device;
const ddl_device standin_device = {.size = sizeof standin_device, REQUIRED, .strided = strided, .host_alloc = host_alloc,
                                 .host_free = host_free, .stream_make = stream_make, .stream_free = stream_free,
                                 .stream_wait = stream_wait, .gate_put = gate_put, .gate_open = gate_open,
                                 .capturing = capturing};
static const ddl_device bare = {.size = sizeof bare, REQUIRED};

DDL_PLUGIN_EXPORT const ddl_plugin *ddl_plugin_standin_v1(const ddl_host *host) {
    static const ddl_plugin plugins[3] = {
        {sizeof(ddl_plugin), DDL_PLUGIN_ABI, "standin", "1", "A stand-in for a device, for tests: no device at all.",
         NULL, &standin_device},
        {sizeof(ddl_plugin), DDL_PLUGIN_ABI, "standin", "1", "A stand-in for a poor device, for tests: no device at all.",
         NULL, &bare},
        {sizeof(ddl_plugin), DDL_PLUGIN_ABI, "standin", "1", "A stand-in for devices that reach each other, for tests.",
         &links, &standin_device}};
    const char *native = host->setting(host, "STANDIN_NATIVE");
    const char *megabytes = host->setting(host, "STANDIN_MB"), *poor = host->setting(host, "STANDIN_BARE");
    pthread_mutex_lock(&all.lock);
    if (all.bytes == 0) {
        all.bytes = (size_t)(megabytes != NULL ? atoi(megabytes) : 64) << 20;
    }
    pthread_mutex_unlock(&all.lock);
    return &plugins[native != NULL && native[0] == '1' ? 2 : poor != NULL && poor[0] == '1'];
}

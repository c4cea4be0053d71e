/* device_standin: a device without a device, for tests. It proves the logic of the core, and nothing of any GPU.
 *
 *     cc -std=c11 -D_GNU_SOURCE -shared -fPIC -fvisibility=hidden -I.. -o libddl-standin.so device_standin.c -lpthread
 *
 * What a program gets as device memory is address space without access, so that a CPU that touches it crashes; the bytes
 * lie elsewhere, and only this plugin knows where. Streams run when somebody asks about an event, some tasks at a time
 * and only every other time, by chance: whoever does not wait for an event, or waits for the wrong one, reads poison.
 *
 *     DDL_STANDIN_MB      memory of each device; default 64
 *     DDL_STANDIN_BARE    1: without optional members: no pinned memory, no streams, no strided copies
 *
 * All contexts of a process share the devices. standin_control is for tests: it makes copies fail, and counts. */
#include "device_standin.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

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

typedef enum task_kind { TASK_COPY, TASK_FILL, TASK_STRIDED, TASK_REDUCE, TASK_EVENT, TASK_WAIT, TASK_GATE } task_kind;

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

/* Does a task. False: it has to wait. */
static bool task_run(stream *s, task *t) {
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
    ddl_status status = block_make(&all.devices[h->number], bytes, out_memory);
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
    *out_memory = standin_control.no_pinned ? NULL : aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (*out_memory == NULL) {
        return DDL_ERR_NOMEM;
    }
    memset(*out_memory, 0xC3, bytes);
    standin_control.pinned++;
    return DDL_OK;
}

static void host_free(void *self, void *memory) {
    (void)self;
    standin_control.pinned--;
    free(memory);
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
    static const ddl_plugin plugins[2] = {
        {sizeof(ddl_plugin), DDL_PLUGIN_ABI, "standin", "1", "A stand-in for a device, for tests: no device at all.",
         NULL, &standin_device},
        {sizeof(ddl_plugin), DDL_PLUGIN_ABI, "standin", "1", "A stand-in for a poor device, for tests: no device at all.",
         NULL, &bare}};
    const char *megabytes = host->setting(host, "STANDIN_MB"), *poor = host->setting(host, "STANDIN_BARE");
    pthread_mutex_lock(&all.lock);
    if (all.bytes == 0) {
        all.bytes = (size_t)(megabytes != NULL ? atoi(megabytes) : 64) << 20;
    }
    pthread_mutex_unlock(&all.lock);
    return &plugins[poor != NULL && poor[0] == '1'];
}

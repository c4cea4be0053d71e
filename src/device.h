/* device: memory that the CPU does not read, such as a GPU's. Opens what device plugins bring, numbers it, says whose a
 * pointer is, and stages: copies tensors to ordinary memory, where every operation works, and back.
 *
 *     fill    wait until the caller's stream has come here, then copy to the stage, then go on
 *     drain   copy back, then the operation is over
 *
 * Nothing here waits: copies are put on a stream, an event behind them, and whoever polls looks at the event.
 * It must not know of messages, groups or plans. */
#ifndef DDL_DEVICE_H
#define DDL_DEVICE_H

#include "dtype/view.h"
#include "mesh/rejoin.h"

enum { DDL__DEVICES_MAX = 32, DDL__PINNED_CLASSES = 48, DDL__PINNED_LEAST = 12 /* 4 KiB */ };
#define DDL__PINNED_KEPT ((uint64_t)256 << 20) /* of each device, for the next operations */
#define DDL__DEVICE_END_NS (5 * DDL__NS_PER_S) /* for copies that are under way when the context ends */

/* Ordinary memory at the device's full speed, or memory of the device for tensors that have to be packed there. To get
 * either costs a millisecond, so that blocks (powers of two) are kept. */
typedef struct ddl__pinned {
    struct ddl__pinned *next;
    struct ddl__device *device;
    char *data;
    ddl__lasting lasting;
    int32_t size_class; /* log2 of the bytes */
    bool own;  /* of host_alloc; else it follows this record */
    bool there; /* in the device's memory, of alloc */
} ddl__pinned;

typedef struct ddl__device {
    const ddl_plugin *plugin;
    const ddl_device *table;
    int32_t index;  /* among the plugin's own, from 0 */
    int32_t number; /* as in ddl_tensor.device */
    bool opened;
    bool stuck; /* when the context ended it still copied: it is not called again */
    void *self;
    void *stream; /* of our copies; NULL: the plugin's own */
    ddl_host host;
    ddl__pinned *pinned[2][DDL__PINNED_CLASSES]; /* that are kept: pinned, there */
    uint64_t pinned_bytes; /* kept */
    uint64_t freed_ns; /* when a tensor there was freed last */
} ddl__device;

struct ddl__devices {
    int32_t count;
    ddl__device list[DDL__DEVICES_MAX];
};

/* >>devices */

/* Devices of the plugin "cuda" come first: then CUDA device i is number i + 1, as ddl_tensor_from_dlpack takes it. */
static void ddl__devices_number(ddl_context *c, bool cuda) {
    ddl__devices *all = c->devices;
    for (const ddl__plugin_record *p = c->loader.loaded; p != NULL; p = p->next) {
        const ddl_device *table = p->plugin->device;
        int32_t count = table != NULL && (strcmp(p->name, "cuda") == 0) == cuda ? table->count() : 0;
        for (int32_t i = 0; i < count && all->count < DDL__DEVICES_MAX; i++) {
            ddl__device *d = &all->list[all->count++];
            *d = (ddl__device){.plugin = p->plugin, .table = table, .index = i, .number = all->count};
        }
    }
}

/* Counts what there is; each is opened when it is used first. */
static ddl_status ddl__devices_make(ddl_context *c) {
    bool any = false;
    for (const ddl__plugin_record *p = c->loader.loaded; p != NULL; p = p->next) {
        any = any || p->plugin->device != NULL;
    }
    if (!any) {
        return DDL_OK;
    }
    c->devices = ddl__alloc(&c->base, sizeof *c->devices);
    if (c->devices == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "ddl_init: no memory for devices");
    }
    ddl__devices_number(c, true);
    ddl__devices_number(c, false);
    return DDL_OK;
}

/* The device of that number, open. what: the call, for the sentence. */
static ddl_status ddl__device_get(ddl_context *c, int32_t number, const char *what, ddl__device **out) {
    int32_t count = c->devices != NULL ? c->devices->count : 0;
    if (count == 0) {
        return ddl__error(c, DDL_ERR_UNSUPPORTED, "%s: device %d is asked for, but no device plugin is loaded; see "
                          "DDL_PLUGINS and ddl-info", what, number);
    }
    if (number < 1 || number > count) {
        return ddl__error(c, DDL_ERR_ARG, "%s: there is no device %d; the devices here are 1 to %d, ordinary memory "
                          "is DDL_HOST", what, number, count);
    }
    ddl__device *d = &c->devices->list[number - 1];
    if (!d->opened) {
        d->host = ddl__host_table(c);
        ddl_status status = d->table->open(&d->host, d->index, &d->self);
        if (status < 0) {
            return ddl__error(c, status, "%s: device %d (%s %d) cannot be opened: %s", what, number, d->plugin->name,
                              d->index, ddl_status_text(status));
        }
        d->opened = true;
        if (DDL_HAS(d->table, stream_make) && d->table->stream_make(d->self, &d->stream) < 0) {
            d->stream = NULL;
        }
    }
    *out = d;
    return DDL_OK;
}

/* By the plugin's name and its own number. One that nobody has opened has no memory yet. */
static ddl_status ddl__device_allocation(ddl_context *c, const char *device, int32_t index, const void *memory,
                                         uint64_t bytes, ddl_allocation *out) {
    for (int32_t i = 0; c->devices != NULL && i < c->devices->count; i++) {
        const ddl__device *d = &c->devices->list[i];
        if (d->opened && !d->stuck && d->index == index && strcmp(d->plugin->name, device) == 0 &&
            DDL_HAS(d->table, allocation) && d->table->allocation(d->self, memory, out) == DDL_OK &&
            ddl__allocation_holds(out, memory, bytes)) {
            return DDL_OK;
        }
    }
    return DDL_ERR_UNSUPPORTED;
}

/* Whose a pointer is, by those devices of its plugin that are open: a number, DDL_HOST, or negative: nobody's. */
static int32_t ddl__device_owner(const ddl__device *d, const void *pointer) {
    int32_t own = d->table->owner(d->self, pointer);
    return own > 0 ? d->number - d->index + own - 1 : own;
}

/* The device that is open and has such memory; NULL: it is ordinary, or nobody knows it. */
static const ddl__device *ddl__device_that_owns(const ddl_context *c, const void *pointer) {
    for (int32_t i = 0; c->devices != NULL && i < c->devices->count; i++) {
        const ddl__device *d = &c->devices->list[i];
        if (d->opened && ddl__device_owner(d, pointer) > 0) {
            return d;
        }
    }
    return NULL;
}

static ddl_status ddl__device_check_pointer(ddl_context *c, const ddl__device *d, const void *pointer,
                                            const char *what, const char *which) {
    int32_t owner = ddl__device_owner(d, pointer);
    if (owner == d->number) {
        return DDL_OK;
    }
    if (owner > 0) {
        return ddl__error(c, DDL_ERR_ARG, "%s: tensor `%s` is said to be on device %d, but its memory at %p is of "
                          "device %d", what, which, d->number, pointer, owner);
    }
    return owner == 0 ? ddl__error(c, DDL_ERR_ARG, "%s: tensor `%s` is said to be on device %d, but its memory at %p "
                                   "is ordinary memory (DDL_HOST), or was freed", what, which, d->number, pointer)
                      : ddl__error(c, DDL_ERR_ARG, "%s: tensor `%s` is said to be on device %d, which does not know "
                                   "its memory at %p: it was freed, or never allocated", what, which, d->number,
                                   pointer);
}

/* Whether memory is where a tensor says: [low, high) are the bytes it touches. Ordinary memory is asked about only when
 * a device is open. */
static ddl_status ddl__device_check(ddl_context *c, int32_t number, const char *low, const char *high,
                                    const char *what, const char *which) {
    if (number != DDL_HOST) {
        ddl__device *d;
        DDL__TRY(ddl__device_get(c, number, what, &d));
        DDL__TRY(low < high ? ddl__device_check_pointer(c, d, low, what, which) : DDL_OK);
        return low < high ? ddl__device_check_pointer(c, d, high - 1, what, which) : DDL_OK;
    }
    const ddl__device *owner = low < high ? ddl__device_that_owns(c, low) : NULL;
    if (owner == NULL) {
        return DDL_OK;
    }
    return ddl__error(c, DDL_ERR_ARG, "%s: tensor `%s` is said to be in ordinary memory (DDL_HOST), but its memory at "
                      "%p is of device %d", what, which, (const void *)low, ddl__device_owner(owner, low));
}

/* >>pinned */

static int32_t ddl__pinned_class(uint64_t bytes) {
    int32_t n = DDL__PINNED_LEAST;
    while (n < DDL__PINNED_CLASSES - 1 && (uint64_t)1 << n < bytes) {
        n++;
    }
    return n;
}

static ddl_status ddl__pinned_make(ddl_context *c, ddl__device *d, size_t size, ddl__pinned *p) {
    p->own = !p->there && DDL_HAS(d->table, host_alloc);
    void *data = (void *)(((uintptr_t)(p + 1) + 63) & ~(uintptr_t)63);
    ddl_status status = p->there ? d->table->alloc(d->self, size, &data)
                        : p->own ? d->table->host_alloc(d->self, size, &data)
                                 : DDL_OK;
    (void)c;
    p->data = data;
    return status;
}

static ddl__pinned *ddl__pinned_get(ddl_context *c, ddl__device *d, bool there, uint64_t bytes) {
    int32_t n = ddl__pinned_class(bytes);
    ddl__pinned *p = d->pinned[there][n];
    size_t size = (size_t)1 << n;
    if (size < bytes) {
        return NULL;
    }
    if (p != NULL) {
        d->pinned[there][n] = p->next;
        d->pinned_bytes -= size;
        return p;
    }
    bool elsewhere = there || DDL_HAS(d->table, host_alloc);
    p = ddl__alloc(&c->base, sizeof *p + (elsewhere ? 0 : size + 64));
    if (p == NULL) {
        return NULL;
    }
    *p = (ddl__pinned){.device = d, .size_class = n, .there = there};
    if (ddl__pinned_make(c, d, size, p) < 0) {
        ddl__free(&c->base, p);
        return NULL;
    }
    ddl__lasting_add(c, &p->lasting, there ? NULL : p->data, size);
    return p;
}

static void ddl__pinned_free(ddl_context *c, ddl__pinned *p) {
    const ddl__device *d = p->device;
    ddl__lasting_drop(c, &p->lasting);
    if (p->there && !d->stuck) { /* these calls may wait for the device */
        d->table->free(d->self, p->data);
    } else if (p->own && !d->stuck) {
        d->table->host_free(d->self, p->data);
    }
    ddl__free(&c->base, p);
}

static void ddl__pinned_put(ddl_context *c, ddl__pinned *p) {
    if (p == NULL) {
        return;
    }
    ddl__device *d = p->device;
    uint64_t bytes = (uint64_t)1 << p->size_class;
    if (d->pinned_bytes + bytes > DDL__PINNED_KEPT) {
        ddl__pinned_free(c, p);
        return;
    }
    p->next = d->pinned[p->there][p->size_class];
    d->pinned[p->there][p->size_class] = p;
    d->pinned_bytes += bytes;
}

/* >>stage */

/* How finely what goes by pinned memory is cut. A copy has a fixed cost o (to launch it, and until somebody looks at
 * its event: 10 us), and the first chunk is copied with nothing beside it. n / c * o + c / B is least for
 * c = sqrt(n * o * B), B the speed of copies (25 GB/s, PCIe 4.0 x16). Stated figures: an error of four in o * B doubles
 * or halves c, which costs little. It is a power of two below that root, of whole frames. */
#define DDL__STAGE_OVERHEAD_BYTES ((uint64_t)250000) /* o * B */
#define DDL__STAGE_CHUNK_MOST ((uint64_t)8 << 20)

static uint64_t ddl__stage_chunk(uint64_t bytes) {
    uint64_t chunk = DDL__FRAME_MAX_PAYLOAD;
    while (chunk < DDL__STAGE_CHUNK_MOST && 4 * chunk * chunk / DDL__STAGE_OVERHEAD_BYTES <= bytes) {
        chunk *= 2;
    }
    return chunk;
}

/* One tensor, and where it is packed: in pinned memory of its device or, where an operation runs on one, there. */
typedef struct ddl__staged {
    ddl_tensor tensor;
    ddl__device *device;
    ddl__pinned *pinned; /* NULL: host is somebody else's */
    char *host;
    uint64_t bytes;      /* packed */
    bool comes, goes;    /* is read before the operation, is written after it */
    bool inside;         /* host is memory of the device */
} ddl__staged;

typedef enum ddl__stage_phase {
    DDL__STAGE_IDLE = 0,
    DDL__STAGE_STREAM = 1, /* waits for the caller's stream to come here */
    DDL__STAGE_FILL = 2,
    DDL__STAGE_DRAIN = 3
} ddl__stage_phase;

typedef struct ddl__stage {
    struct ddl__stage *next; /* of the context's, while events are awaited */
    void (*done)(ddl_context *c, struct ddl__stage *s, ddl_status status); /* NULL: whoever it was for has gone */
    void *owner;
    uint8_t phase;
    ddl__device *stream_device; /* NULL: the tensors are ready now */
    void *stream;
    void *events[DDL__DEVICES_MAX]; /* by number - 1; NULL: none */
    bool unmarked[DDL__DEVICES_MAX]; /* copies lie before no event yet: that failed, and is tried again */
    int32_t count, room;
    ddl__staged items[];
} ddl__stage;

static ddl__stage *ddl__stage_make(ddl_context *c, int32_t room) {
    ddl__stage *s = ddl__alloc(&c->base, sizeof *s + (size_t)room * sizeof s->items[0]);
    if (s != NULL) {
        s->room = room;
    }
    return s;
}

static void ddl__stage_free(ddl_context *c, ddl__stage *s) {
    for (int32_t i = 0; s != NULL && i < s->count; i++) {
        ddl__pinned_put(c, s->items[i].pinned);
    }
    ddl__free(&c->base, s);
}

/* Adds a tensor that was checked. host NULL: it gets memory of its own, pinned or, where `there` is a device, that
 * one's. */
static ddl_status ddl__stage_add(ddl_context *c, ddl__stage *s, const ddl_tensor *t, uint64_t bytes, char *host,
                                 int32_t there, const char *what) {
    ddl__staged *item = &s->items[s->count];
    ddl__device *d;
    DDL__TRY(ddl__device_get(c, there != DDL_HOST ? there : t->device, what, &d));
    *item = (ddl__staged){.tensor = *t, .device = d, .host = host, .bytes = bytes};
    if (host == NULL) {
        item->pinned = ddl__pinned_get(c, d, there != DDL_HOST, bytes);
        if (item->pinned == NULL) {
            return ddl__error(c, DDL_ERR_NOMEM, "%s: no %s memory to stage a tensor of %llu bytes of device %d", what,
                              there != DDL_HOST ? "device" : "pinned", (unsigned long long)bytes, t->device);
        }
        item->host = item->pinned->data;
    }
    s->count++;
    return DDL_OK;
}

/* The first bytes of a strided tensor, run by run, where the plugin has no kernel for it. */
static ddl_status ddl__device_runs(const ddl__device *d, const ddl_tensor *t, char *packed, uint64_t bytes,
                                   bool unpack) {
    uint64_t size = ddl_dtype_bytes(t->dtype);
    int64_t index[DDL_MAX_DIMS] = {0}, at = 0;
    while (bytes > 0) {
        char *from = (char *)t->data + at * (int64_t)size;
        uint64_t run = 0;
        do {
            run += DDL__MIN(bytes - run, size);
            at = ddl__tensor_next(t, index, at);
        } while (run < bytes && (char *)t->data + at * (int64_t)size == from + run);
        DDL__TRY(d->table->copy(d->self, unpack ? from : packed, unpack ? packed : from, run, d->stream));
        packed += run;
        bytes -= run;
    }
    return DDL_OK;
}

/* Puts the copy of one tensor on the device's stream; drained: how much of it is written back. */
static ddl_status ddl__staged_copy(const ddl__staged *item, bool back, uint64_t bytes) {
    const ddl__device *d = item->device;
    const ddl_tensor *t = &item->tensor;
    if (ddl__is_contiguous(t)) {
        return d->table->copy(d->self, back ? t->data : item->host, back ? item->host : t->data, bytes, d->stream);
    }
    if (bytes == item->bytes && t->device != DDL_HOST && DDL_HAS(d->table, strided)) {
        return d->table->strided(d->self, t, item->host, back, d->stream);
    }
    return ddl__device_runs(d, t, item->host, bytes, back);
}

static void ddl__stage_list(ddl_context *c, ddl__stage *s) {
    s->next = c->stages;
    c->stages = s;
    ddl__kick(c); /* who sleeps for all sleeps shortly from now on: a device wakes nobody */
}

static void ddl__stage_unlist(ddl_context *c, ddl__stage *s) {
    ddl__stage **at = &c->stages;
    while (*at != s) {
        at = &(*at)->next;
    }
    *at = s->next;
}

/* Puts an event behind the copies of one device. Without it nobody knows when their memory is free: it stays theirs. */
static ddl_status ddl__stage_mark(const ddl__device *d, ddl__stage *s) {
    void *event = NULL;
    ddl_status status = d->table->event_record(d->self, d->stream, &event);
    s->unmarked[d->number - 1] = status < 0;
    s->events[d->number - 1] = status < 0 ? NULL : event;
    return status;
}

/* DDL_IN_PROGRESS while the copies of one device are under way. */
static ddl_status ddl__stage_test(const ddl__device *d, ddl__stage *s) {
    int32_t i = d->number - 1;
    if (s->unmarked[i] && ddl__stage_mark(d, s) < 0) {
        return DDL_IN_PROGRESS;
    }
    return s->events[i] != NULL ? d->table->event_test(d->self, s->events[i]) : DDL_OK;
}

/* Puts an event behind the copies of each device that has some. *out_any: whether there is one to wait for. */
static ddl_status ddl__stage_events(ddl_context *c, ddl__stage *s, const bool *used, bool *out_any) {
    ddl_status status = DDL_OK;
    for (int32_t i = 0; i < c->devices->count; i++) {
        ddl_status one = used[i] ? ddl__stage_mark(&c->devices->list[i], s) : DDL_OK;
        status = status < 0 ? status : one;
        *out_any = *out_any || used[i];
    }
    return status < 0 ? status : DDL_OK;
}

/* Begins copies to the stage or back; `bytes` at most of each. What was begun before one failed is waited for too. */
static ddl_status ddl__stage_copies(ddl_context *c, ddl__stage *s, bool back, uint64_t bytes) {
    bool used[DDL__DEVICES_MAX] = {false}, any = false;
    ddl_status status = DDL_OK;
    for (int32_t i = 0; i < s->count && status >= 0; i++) {
        ddl__staged *item = &s->items[i];
        uint64_t part = DDL__MIN(bytes, item->bytes);
        if ((back ? item->goes : item->comes) && part > 0) {
            status = ddl__staged_copy(item, back, part);
            used[item->device->number - 1] = true;
            if (!item->inside && (item->pinned == NULL || !item->pinned->there)) {
                *(back ? &c->stats.device_bytes_out : &c->stats.device_bytes_in) += part;
            }
        }
    }
    ddl_status events = ddl__stage_events(c, s, used, &any);
    status = status < 0 ? status : events;
    s->phase = any ? (back ? DDL__STAGE_DRAIN : DDL__STAGE_FILL) : DDL__STAGE_IDLE;
    if (any) {
        ddl__stage_list(c, s);
    }
    return status < 0 ? status : any ? DDL_IN_PROGRESS : DDL_OK;
}

/* Kernels that were put on a device's stream are waited for as copies are; `status`: of putting them there. */
static ddl_status ddl__stage_await(ddl_context *c, ddl__stage *s, const ddl__device *d, ddl_status status) {
    ddl_status marked = ddl__stage_mark(d, s);
    s->phase = DDL__STAGE_DRAIN;
    ddl__stage_list(c, s);
    return status < 0 ? status : marked < 0 ? marked : DDL_IN_PROGRESS;
}

/* DDL_OK: all is there. DDL_IN_PROGRESS: done() will be called, by whoever polls. An error: leave it. */
static ddl_status ddl__stage_fill(ddl_context *c, ddl__stage *s) {
    if (s->stream_device == NULL) {
        return ddl__stage_copies(c, s, false, UINT64_MAX);
    }
    ddl__device *d = s->stream_device;
    if (s->events[d->number - 1] == NULL) { /* else it was marked before the lock was taken */
        DDL__TRY(d->table->event_record(d->self, s->stream, &s->events[d->number - 1]));
    }
    s->phase = DDL__STAGE_STREAM;
    ddl__stage_list(c, s);
    return DDL_IN_PROGRESS;
}

static ddl_status ddl__stage_drain(ddl_context *c, ddl__stage *s, uint64_t bytes) {
    return ddl__stage_copies(c, s, true, bytes);
}

/* Nobody wants it any more. Copies that are under way cannot be taken back: it goes when they are over. */
static void ddl__stage_leave(ddl_context *c, ddl__stage **slot) {
    ddl__stage *s = *slot;
    *slot = NULL;
    if (s == NULL) {
        return;
    }
    ddl__device *d = s->stream_device;
    bool waits = s->phase == DDL__STAGE_STREAM;
    if (d != NULL && (waits || s->phase == DDL__STAGE_IDLE) && s->events[d->number - 1] != NULL) {
        d->table->event_free(d->self, s->events[d->number - 1]);
        s->events[d->number - 1] = NULL;
    }
    if (waits) {
        ddl__stage_unlist(c, s);
        s->phase = DDL__STAGE_IDLE;
    }
    s->done = NULL;
    if (s->phase == DDL__STAGE_IDLE) {
        ddl__stage_free(c, s);
    }
}

/* Looks at the events of one. True: they have all happened, and it may be gone. */
static bool ddl__stage_look(ddl_context *c, ddl__stage *s) {
    ddl_status status = DDL_OK;
    for (int32_t i = 0; i < c->devices->count; i++) {
        ddl_status one = ddl__stage_test(&c->devices->list[i], s);
        if (one == DDL_IN_PROGRESS) {
            return false;
        }
        status = one < 0 ? one : status;
    }
    for (int32_t i = 0; i < c->devices->count; i++) {
        const ddl__device *d = &c->devices->list[i];
        if (s->events[i] != NULL) {
            d->table->event_free(d->self, s->events[i]);
            s->events[i] = NULL;
        }
    }
    bool came = s->phase == DDL__STAGE_STREAM;
    ddl__stage_unlist(c, s);
    s->phase = DDL__STAGE_IDLE;
    if (came && status >= 0) {
        status = ddl__stage_copies(c, s, false, UINT64_MAX);
        if (status == DDL_IN_PROGRESS) {
            return true;
        }
    }
    if (s->done != NULL) {
        s->done(c, s, status);
    } else if (s->phase == DDL__STAGE_IDLE) {
        ddl__stage_free(c, s);
    }
    return true;
}

static int32_t ddl__stages_poll(ddl_context *c) {
    for (ddl__stage *s = c->stages, *next; s != NULL; s = next) {
        next = s->next;
        if (ddl__stage_look(c, s)) {
            return 1; /* the list may be another one now */
        }
    }
    return 0;
}

/* >>end */

/* Ends what a device that is stuck may not use. Its streams and its memory stay: it may still write there. */
static void ddl__device_close(ddl_context *c, ddl__device *d) {
    for (int32_t n = 0; n < 2 * DDL__PINNED_CLASSES; n++) {
        ddl__pinned **first = &d->pinned[n % 2][n / 2];
        while (*first != NULL) {
            ddl__pinned *p = *first;
            *first = p->next;
            ddl__pinned_free(c, p);
        }
    }
    if (d->stream != NULL && !d->stuck) {
        d->table->stream_free(d->self, d->stream);
    }
    if (!d->stuck) {
        d->table->close(d->self);
    }
    d->opened = false;
}

/* Copies of this stage have not ended: its devices are stuck, and the memory it is packed in is given up, whichever
 * device that is of. Returns the bytes. */
static uint64_t ddl__stage_give_up(ddl_context *c, ddl__stage *s) {
    uint64_t bytes = 0;
    for (int32_t i = 0; i < c->devices->count; i++) {
        ddl__device *d = &c->devices->list[i];
        d->stuck = d->stuck || ddl__stage_test(d, s) == DDL_IN_PROGRESS;
        if (s->events[i] != NULL) {
            d->table->event_free(d->self, s->events[i]);
        }
    }
    for (int32_t i = 0; i < s->count; i++) {
        ddl__pinned *p = s->items[i].pinned;
        bytes += p != NULL ? (uint64_t)1 << p->size_class : 0;
        if (p != NULL && (p->own || p->there)) {
            ddl__free(&c->base, p); /* the record, not its data */
        }
    }
    ddl__stage_unlist(c, s);
    if (s->done == NULL) { /* else somebody may still leave it */
        ddl__free(&c->base, s);
    }
    return bytes;
}

/* Lets copies end that were begun for operations which nobody waits for any more: they use the callers' memory. What a
 * stuck device may still write is left to it on purpose: a leak of a size that is told, not a write into memory that is
 * somebody else's. */
static void ddl__devices_settle(ddl_context *c) {
    uint64_t deadline = ddl__now_ns() + DDL__DEVICE_END_NS, bytes = 0;
    const struct timespec pause = {0, DDL__DEVICE_LOOK_NS};
    while (c->stages != NULL && ddl__now_ns() < deadline) {
        if (ddl__stages_poll(c) == 0) {
            nanosleep(&pause, NULL);
        }
    }
    while (c->stages != NULL) {
        bytes += ddl__stage_give_up(c, c->stages);
    }
    for (int32_t i = 0; c->devices != NULL && i < c->devices->count; i++) {
        const ddl__device *d = &c->devices->list[i];
        if (d->stuck) {
            ddl__log(&c->base, DDL_LOG_WARN, "the context ends, but device %d (%s %d) has not ended its copies for %d "
                     "s: %llu bytes they are staged in, and all that was allocated there, are left to it for good, "
                     "and it is not closed; do not free or use tensors of pending operations", d->number,
                     d->plugin->name, d->index, (int)(DDL__DEVICE_END_NS / DDL__NS_PER_S), (unsigned long long)bytes);
        }
    }
}

static void ddl__devices_close(ddl_context *c) {
    for (int32_t i = 0; c->devices != NULL && i < c->devices->count; i++) {
        if (c->devices->list[i].opened) {
            ddl__device_close(c, &c->devices->list[i]);
        }
    }
    ddl__free(&c->base, c->devices);
    c->devices = NULL;
}

#endif /* DDL_DEVICE_H */

/* tensor: tensors of a caller: checking, lending and copying them. What a view is: dtype/view.h. It must not know of
 * messages. */
#ifndef DDL_TENSOR_H
#define DDL_TENSOR_H

#include "device.h"

/* Checks a tensor that a caller passed. what: the call, which: the argument, for the sentence. */
static ddl_status ddl__tensor_check(ddl_context *c, const ddl_tensor *t, const char *what, const char *which) {
    int64_t count = ddl_tensor_count(t);
    size_t size = ddl_dtype_bytes(t->dtype);
    if (size == 0) {
        return ddl__error(c, DDL_ERR_ARG, "%s: the type of tensor `%s` is %d, which is no ddl_dtype", what, which,
                          (int)t->dtype);
    }
    if (count < 0 || (uint64_t)count > (uint64_t)INT64_MAX / size) {
        return ddl__error(c, DDL_ERR_ARG, "%s: the shape of tensor `%s` is not valid (ndim %d; no dimension may be "
                          "negative, at most %d dimensions)", what, which, t->ndim, DDL_MAX_DIMS);
    }
    if (count > 0 && !ddl__strides_valid(t)) {
        return ddl__error(c, DDL_ERR_ARG, "%s: the strides of tensor `%s` lead out of the address space", what, which);
    }
    if (count > 0 && t->data == NULL) {
        return ddl__error(c, DDL_ERR_ARG, "%s: tensor `%s` has %lld elements but its data pointer is NULL", what, which,
                          (long long)count);
    }
    if (t->device == DDL_HOST && c->devices == NULL) {
        return DDL_OK;
    }
    const char *low, *high;
    ddl__tensor_extent(t, &low, &high);
    return ddl__device_check(c, t->device, low, high, what, which);
}

/* The same where the CPU reads the tensor itself. */
static ddl_status ddl__tensor_check_host(ddl_context *c, const ddl_tensor *t, const char *what, const char *which) {
    DDL__TRY(ddl__tensor_check(c, t, what, which));
    return t->device == DDL_HOST
               ? DDL_OK
               : ddl__error(c, DDL_ERR_UNSUPPORTED, "%s: tensor `%s` is on device %d; this needs ordinary memory "
                            "(DDL_HOST)", what, which, t->device);
}

/* Whether its elements reach an operation by way of ordinary memory: see device.h. */
static inline bool ddl__is_staged(const ddl_tensor *t) { return t->device != DDL_HOST && ddl_tensor_count(t) > 0; }

/* An output must have each element in a place of its own: of two values for one place, one would be lost. For tensors
 * that ddl__tensor_check has seen. */
static ddl_status ddl__tensor_check_output(ddl_context *c, const ddl_tensor *t, const char *what, const char *which) {
    bool meet = false;
    if (ddl__is_contiguous(t) || ddl_tensor_count(t) <= 1) {
        return DDL_OK;
    }
    for (int32_t i = 0; i < t->ndim && !meet; i++) {
        meet = t->shape[i] > 1 && t->strides[i] == 0;
        for (int32_t j = 0; j < i && !meet; j++) {
            meet = t->shape[i] > 1 && t->shape[j] > 1 && ddl__dims_meet(t, i, j);
        }
    }
    return !meet ? DDL_OK
                 : ddl__error(c, DDL_ERR_ARG,
                              "%s: the strides of tensor `%s` lead to one element more than once, so it cannot be "
                              "written to; give it memory for each element",
                              what, which);
}

/* >>memory */

/* Memory of ddl_tensor_alloc: a transport's, which peers reach without a copy, or what follows this record. */
typedef struct ddl__lent {
    struct ddl__lent *next;
    void *data;
    uint64_t bytes;
    ddl__lasting lasting;
    uint64_t counted;
    const ddl__endpoint *endpoint; /* whose it is; both NULL: ours */
    ddl__device *device;
} ddl__lent;

/* The caller's memory is not counted as the context's own. */
static ddl__lent *ddl__lend_own(ddl_context *c, size_t bytes) {
    ddl__base *base = &c->base;
    uint64_t memory = base->memory, peak = base->memory_peak;
    ddl__lent *lent = bytes > SIZE_MAX - 128 ? NULL : ddl__alloc(base, sizeof *lent + 64 + bytes);
    if (lent != NULL) {
        lent->counted = base->memory - memory;
        base->memory = memory;
        base->memory_peak = peak;
        lent->data = (void *)(((uintptr_t)(lent + 1) + 63) & ~(uintptr_t)63);
    }
    return lent;
}

/* From the first transport that lends some; NULL: none does. */
static ddl__lent *ddl__lend_shared(ddl_context *c, size_t bytes) {
    for (int32_t i = 0; i < c->endpoint_count; i++) {
        const ddl__endpoint *e = &c->endpoints[i];
        ddl__lent *lent = DDL_HAS(e->table, memory_alloc) ? ddl__alloc(&c->base, sizeof *lent) : NULL;
        if (lent != NULL && e->table->memory_alloc(e->self, bytes, &lent->data) == DDL_OK) {
            lent->endpoint = e;
            return lent;
        }
        ddl__free(&c->base, lent);
    }
    return NULL;
}

static ddl__lent *ddl__lend(ddl_context *c, size_t bytes) {
    ddl__lent *lent = ddl__lend_shared(c, bytes);
    if (lent == NULL) {
        lent = ddl__lend_own(c, bytes);
    }
    if (lent != NULL) {
        lent->bytes = bytes;
        lent->next = c->lent;
        c->lent = lent;
        ddl__lasting_add(c, &lent->lasting, lent->data, bytes);
    }
    return lent;
}

/* What was freed lately may still be mapped by peers, who look once a second whether it is gone, as does this rank. Two
 * such looks later it is the device's again, if peers make progress meanwhile. */
#define DDL__FREED_NS (2200 * DDL__NS_PER_MS)

static bool ddl__never(ddl_context *c, void *arg) {
    (void)arg;
    return c->aborted || c->finalized;
}

static ddl_status ddl__device_alloc(ddl_context *c, ddl__device *d, size_t bytes, void **out) {
    ddl_status status = d->table->alloc(d->self, bytes, out);
    for (int32_t i = 0; i < 2 && status == DDL_ERR_NOMEM && d->freed_ns + DDL__FREED_NS > ddl__now_ns(); i++) {
        ddl__wait w = {.done = ddl__never, .tick = ddl__no_tick, .deadline = ddl__now_ns() + DDL__FREED_NS / 2};
        ddl__wait_for(c, &w);
        status = ddl__never(c, NULL) ? status : d->table->alloc(d->self, bytes, out);
    }
    return status;
}

/* Memory of a device. */
static ddl_status ddl__lend_device(ddl_context *c, int32_t number, size_t bytes, ddl__lent **out) {
    ddl__device *d;
    DDL__TRY(ddl__device_get(c, number, "ddl_tensor_alloc_on", &d));
    ddl__lent *lent = ddl__alloc(&c->base, sizeof *lent);
    ddl_status status =
        lent == NULL ? DDL_ERR_NOMEM : ddl__device_alloc(c, d, DDL__MAX(bytes, (size_t)1), &lent->data);
    if (status < 0) {
        ddl__free(&c->base, lent);
        return ddl__error(c, status, "ddl_tensor_alloc_on: device %d (%s %d) has no memory for %zu bytes: %s", number,
                          d->plugin->name, d->index, bytes, ddl_status_text(status));
    }
    lent->bytes = bytes;
    lent->device = d;
    lent->next = c->lent;
    c->lent = lent;
    *out = lent;
    return DDL_OK;
}

static void ddl__lent_free(ddl_context *c, ddl__lent *lent) {
    ddl__lasting_drop(c, &lent->lasting);
    if (lent->device != NULL && !lent->device->stuck) {
        lent->device->freed_ns = ddl__now_ns();
        lent->device->table->free(lent->device->self, lent->data);
    }
    if (lent->endpoint != NULL) {
        lent->endpoint->table->memory_free(lent->endpoint->self, lent->data);
    }
    c->base.memory += lent->counted; /* ddl__free takes it off again */
    ddl__free(&c->base, lent);
}

static ddl_status ddl__tensor_alloc(ddl_context *c, ddl_tensor *t, int32_t device, const char *what) {
    size_t bytes = (size_t)ddl_tensor_count(t) * ddl_dtype_bytes(t->dtype);
    ddl__lent *lent = NULL;
    if (device != DDL_HOST) {
        DDL__TRY(ddl__lend_device(c, device, bytes, &lent));
    } else {
        lent = ddl__lend(c, bytes);
    }
    if (lent == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "%s: no memory for %zu bytes", what, bytes);
    }
    t->data = lent->data;
    t->device = device;
    return DDL_OK;
}

static ddl_status ddl__tensor_alloc_call(ddl_context *context, int32_t device, ddl_dtype dtype, int32_t ndim,
                                         const int64_t *shape, ddl_tensor *out_tensor, const char *what) {
    DDL__TRY(ddl__enter(context));
    ddl_tensor t = ddl_tensor_nd(context, dtype, ndim, shape);
    ddl_status status = DDL_OK;
    if (out_tensor == NULL || (ndim > 0 && shape == NULL)) {
        status = ddl__error(context, DDL_ERR_ARG, "%s: %s is NULL", what, out_tensor == NULL ? "out_tensor" : "shape");
    } else if (ndim < 0 || ndim > DDL_MAX_DIMS) {
        status = ddl__error(context, DDL_ERR_ARG, "%s: %d dimensions; 0 to %d are possible", what, ndim, DDL_MAX_DIMS);
    } else {
        status = ddl__tensor_check(context, &t, what, "out_tensor");
    }
    if (status == DDL_OK) {
        status = ddl__tensor_alloc(context, &t, device, what);
    }
    if (status == DDL_OK) {
        *out_tensor = t;
    }
    ddl__unlock(context);
    return status;
}

DDL_API ddl_status ddl_tensor_alloc(ddl_context *context, ddl_dtype dtype, int32_t ndim, const int64_t *shape,
                                    ddl_tensor *out_tensor) {
    return ddl__tensor_alloc_call(context, DDL_HOST, dtype, ndim, shape, out_tensor, "ddl_tensor_alloc");
}

DDL_API ddl_status ddl_tensor_alloc_on(ddl_context *context, int32_t device, ddl_dtype dtype, int32_t ndim,
                                       const int64_t *shape, ddl_tensor *out_tensor) {
    return ddl__tensor_alloc_call(context, device, dtype, ndim, shape, out_tensor, "ddl_tensor_alloc_on");
}

/* Coll room: does anything that is under way use memory between these? Then `by` says what. */
static bool ddl__memory_used(ddl_context *c, const char *begin, const char *end, ddl__text *by);

/* What nobody waits for any more ends soon, mostly: copies, and operations that only a stream waits for. */
#define DDL__FREE_PATIENCE_NS (50 * DDL__NS_PER_MS)

typedef struct ddl__freeing {
    const char *begin, *end;
    char by[400];
} ddl__freeing;

static bool ddl__memory_unused(ddl_context *c, void *arg) {
    ddl__freeing *f = arg;
    ddl__text by = {f->by, sizeof f->by, 0};
    return !ddl__memory_used(c, f->begin, f->end, &by);
}

/* Others may be writing to it, or read it: a transport's memory is mapped by peers. */
static ddl_status ddl__lent_await_unused(ddl_context *c, const ddl__lent *lent) {
    ddl__freeing f = {.begin = lent->data, .end = (const char *)lent->data + lent->bytes};
    int32_t device = lent->device != NULL ? lent->device->number : DDL_HOST;
    ddl__wait w = {.done = ddl__memory_unused, .tick = ddl__no_tick, .arg = &f,
                   .deadline = ddl__now_ns() + DDL__FREE_PATIENCE_NS};
    if (ddl__wait_for(c, &w)) {
        return DDL_OK;
    }
    char where[32] = "";
    if (device != DDL_HOST) {
        snprintf(where, sizeof where, " of device %d", device);
    }
    return ddl__error(c, DDL_ERR_STATE,
                      "ddl_tensor_free on rank %d: the memory at %p%s is used by an operation that is under way; wait "
                      "for it, or for the stream it is on, before; it is: %s",
                      c->rank, (const void *)f.begin, where, f.by);
}

DDL_API ddl_status ddl_tensor_free(ddl_context *context, ddl_tensor *tensor) {
    if (tensor == NULL || tensor->data == NULL) {
        return DDL_OK;
    }
    DDL__TRY(ddl__enter(context));
    ddl_status status = DDL_ERR_ARG;
    const ddl__lent *found = context->lent;
    while (found != NULL && found->data != tensor->data) {
        found = found->next;
    }
    if (found != NULL) {
        status = ddl__lent_await_unused(context, found);
        if (status < 0) {
            ddl__unlock(context);
            return status;
        }
        status = DDL_ERR_ARG; /* another thread may have freed it meanwhile */
    }
    for (ddl__lent **at = &context->lent; *at != NULL; at = &(*at)->next) {
        if ((*at)->data == tensor->data) {
            ddl__lent *gone = *at;
            *at = gone->next;
            ddl__lent_free(context, gone);
            *tensor = (ddl_tensor){0};
            status = DDL_OK;
            break;
        }
    }
    if (status < 0) {
        ddl__error(context, status,
                   "ddl_tensor_free: the memory at %p was not made by ddl_tensor_alloc of this context, or "
                   "was freed before",
                   tensor->data);
    }
    ddl__unlock(context);
    return status;
}

/* >>copy */

static bool ddl__copy_done(ddl_context *c, void *arg) {
    const ddl__stage *s = arg;
    return s->owner != NULL || c->aborted || c->finalized;
}

static void ddl__copy_ended(ddl_context *c, ddl__stage *s, ddl_status status) {
    s->owner = s; /* which says that it is over; count 0: badly */
    s->count = status < 0 ? 0 : s->count;
    ddl__changed(c);
}

/* Why nobody waits for a copy any more. Whoever gave it up leaves the stage, which stays until the device is done. */
static ddl_status ddl__copy_given_up(ddl_context *c, const ddl__stage *s) {
    const char *what = "ddl_tensor_copy";
    const ddl__staged *item = &s->items[s->count - 1];
    if (c->aborted) {
        return ddl__error(c, DDL_ERR_ABORTED, "%s: %s", what, c->abort_text);
    }
    if (c->finalized) {
        return ddl__error(c, DDL_ERR_STATE, "%s: the context was finalized meanwhile", what);
    }
    return ddl__error(c, DDL_ERR_TIMEOUT, "%s: device %d has not copied %llu bytes within %lld ms (timeout_ms); it may "
                      "still read and write the tensors that are on devices", what, item->device->number,
                      (unsigned long long)item->bytes, (long long)c->settings.timeout_ms);
}

/* Waits for what ddl__stage_fill or ddl__stage_drain began. */
static ddl_status ddl__copy_wait(ddl_context *c, ddl__stage *s, ddl_status status) {
    ddl__wait w = {.done = ddl__copy_done, .tick = ddl__no_tick, .arg = s,
                   .deadline = ddl__deadline(ddl__now_ns(), c->settings.timeout_ms)};
    int32_t count = s->count;
    if (status == DDL_IN_PROGRESS) {
        s->owner = NULL;
        ddl__wait_for(c, &w);
        if (s->owner == NULL) {
            return ddl__copy_given_up(c, s);
        }
        status = s->count == count ? DDL_OK : DDL_ERR_SYSTEM;
        s->count = count;
    }
    return status >= 0 ? DDL_OK
                       : ddl__error(c, status, "ddl_tensor_copy: a device failed to copy %llu bytes: %s",
                                    (unsigned long long)s->items[0].bytes, ddl_status_text(status));
}

/* Within one device, by its copy or its kernel for strided tensors; by packed memory there where both are strided. */
static ddl_status ddl__tensor_copy_inside(ddl_context *c, const ddl_tensor *dst, const ddl_tensor *src,
                                          uint64_t bytes, ddl__stage *s) {
    const char *what = "ddl_tensor_copy";
    bool from = ddl__is_contiguous(src), to = ddl__is_contiguous(dst);
    char *packed = to ? dst->data : from ? src->data : NULL;
    if (!from || to) {
        DDL__TRY(ddl__stage_add(c, s, src, bytes, packed, src->device, what));
        s->items[0].comes = s->items[0].inside = true;
        packed = s->items[0].host;
        DDL__TRY(ddl__copy_wait(c, s, ddl__stage_fill(c, s)));
    }
    if (!to) {
        DDL__TRY(ddl__stage_add(c, s, dst, bytes, packed, dst->device, what));
        s->items[s->count - 1].goes = s->items[s->count - 1].inside = true;
    }
    return ddl__copy_wait(c, s, ddl__stage_drain(c, s, bytes));
}

/* By way of packed memory of the host. */
static ddl_status ddl__tensor_copy_staged(ddl_context *c, const ddl_tensor *dst, const ddl_tensor *src,
                                          uint64_t bytes, ddl__stage *s) {
    const char *what = "ddl_tensor_copy";
    ddl__pinned *packed = NULL;
    const ddl_tensor *on = ddl__is_staged(src) ? src : dst;
    DDL__TRY(ddl__stage_add(c, s, on, bytes, NULL, DDL_HOST, what));
    packed = s->items[0].pinned;
    s->items[0].comes = on == src;
    s->items[0].goes = on == dst;
    if (on == src && ddl__is_staged(dst)) {
        DDL__TRY(ddl__stage_add(c, s, dst, bytes, packed->data, DDL_HOST, what));
        s->items[1].goes = true;
    }
    if (on == dst) {
        ddl__pack(src, packed->data, false);
    }
    DDL__TRY(ddl__copy_wait(c, s, ddl__stage_fill(c, s)));
    if (!ddl__is_staged(dst)) {
        ddl__pack(dst, packed->data, true);
    }
    return ddl__copy_wait(c, s, ddl__stage_drain(c, s, bytes));
}

typedef ddl_status (*ddl__copy_way)(ddl_context *c, const ddl_tensor *dst, const ddl_tensor *src, uint64_t bytes,
                                    ddl__stage *s);

static ddl_status ddl__tensor_copy_by(ddl_context *c, const ddl_tensor *dst, const ddl_tensor *src, uint64_t bytes,
                                      ddl__copy_way way) {
    ddl__stage *s = ddl__stage_make(c, 2);
    if (s == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "ddl_tensor_copy: no memory to copy %llu bytes", (unsigned long long)bytes);
    }
    s->done = ddl__copy_ended;
    ddl_status status = way(c, dst, src, bytes, s);
    ddl__stage_leave(c, &s);
    return status;
}

/* One or both are on a device. Where a device has no room to pack what it copies, the host has. */
static ddl_status ddl__tensor_copy_device(ddl_context *c, const ddl_tensor *dst, const ddl_tensor *src,
                                          uint64_t bytes) {
    bool inside = dst->device == src->device;
    ddl_status status = inside ? ddl__tensor_copy_by(c, dst, src, bytes, ddl__tensor_copy_inside) : DDL_ERR_NOMEM;
    return status == DDL_ERR_NOMEM ? ddl__tensor_copy_by(c, dst, src, bytes, ddl__tensor_copy_staged) : status;
}

/* The same in parts where both are contiguous: little pinned memory serves a copy of any size, and is there again for
 * the next. */
static ddl_status ddl__tensor_copy_parts(ddl_context *c, const ddl_tensor *dst, const ddl_tensor *src,
                                         uint64_t bytes) {
    bool whole = dst->device == src->device || !ddl__is_contiguous(dst) || !ddl__is_contiguous(src);
    if (whole) {
        return ddl__tensor_copy_device(c, dst, src, bytes);
    }
    for (uint64_t at = 0; at < bytes; at += DDL__STAGE_CHUNK_MOST) {
        uint64_t part = DDL__MIN(bytes - at, DDL__STAGE_CHUNK_MOST);
        ddl_tensor to = ddl_tensor_1d((char *)dst->data + at, DDL_U8, (int64_t)part);
        ddl_tensor from = ddl_tensor_1d((char *)src->data + at, DDL_U8, (int64_t)part);
        to.device = dst->device;
        from.device = src->device;
        DDL__TRY(ddl__tensor_copy_device(c, &to, &from, part));
    }
    return DDL_OK;
}

static ddl_status ddl__tensor_copy(ddl_context *c, const ddl_tensor *dst, const ddl_tensor *src) {
    const char *what = "ddl_tensor_copy";
    DDL__TRY(ddl__tensor_check(c, dst, what, "dst"));
    DDL__TRY(ddl__tensor_check_output(c, dst, what, "dst"));
    DDL__TRY(ddl__tensor_check(c, src, what, "src"));
    if (dst->dtype != src->dtype || ddl_tensor_count(dst) != ddl_tensor_count(src)) {
        return ddl__error(c, DDL_ERR_ARG, "%s: `dst` has %lld elements of type %s, `src` %lld of type %s; they must be "
                          "alike", what, (long long)ddl_tensor_count(dst), ddl_dtype_name(dst->dtype),
                          (long long)ddl_tensor_count(src), ddl_dtype_name(src->dtype));
    }
    if (ddl__tensors_overlap(dst, src)) {
        return ddl__error(c, DDL_ERR_ARG, "%s: `dst` and `src` overlap; they must be apart", what);
    }
    uint64_t bytes = (uint64_t)ddl_tensor_count(src) * ddl_dtype_bytes(src->dtype);
    bool staged = ddl__is_staged(dst) || ddl__is_staged(src);
    if (bytes == 0) {
        return DDL_OK;
    }
    if (staged) {
        return ddl__tensor_copy_parts(c, dst, src, bytes);
    }
    char *packed = ddl__scratch_get(c, bytes);
    if (packed == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "%s: no memory to copy %llu bytes", what, (unsigned long long)bytes);
    }
    ddl__pack(src, packed, false);
    ddl__pack(dst, packed, true);
    ddl__scratch_put(c, packed);
    return DDL_OK;
}

DDL_API ddl_status ddl_tensor_copy(ddl_context *context, ddl_tensor dst, ddl_tensor src) {
    DDL__TRY(ddl__enter(context));
    ddl_status status = ddl__tensor_copy(context, &dst, &src);
    ddl__unlock(context);
    return status;
}

/* >>lookup */

DDL_API int32_t ddl_device_count(ddl_context *context) {
    if (ddl__enter(context) < 0) {
        return 0;
    }
    int32_t count = context->devices != NULL ? context->devices->count : 0;
    ddl__unlock(context);
    return count;
}

DDL_API ddl_status ddl_device_info_get(ddl_context *context, int32_t device, ddl_device_info *out_info) {
    if (out_info == NULL) {
        return ddl__refuse(context, "ddl_device_info_get", "out_info");
    }
    DDL__TRY(ddl__enter(context));
    ddl__device *d;
    ddl_status status = ddl__device_get(context, device, "ddl_device_info_get", &d);
    if (status == DDL_OK) {
        *out_info = (ddl_device_info){.plugin = d->plugin->name, .about = d->plugin->about, .index = d->index};
    }
    ddl__unlock(context);
    return status;
}

DDL_API ddl_status ddl_device_of(ddl_context *context, const void *pointer, int32_t *out_device) {
    if (out_device == NULL) {
        return ddl__refuse(context, "ddl_device_of", "out_device");
    }
    DDL__TRY(ddl__enter(context));
    ddl_status status = DDL_OK;
    int32_t found = DDL_HOST;
    for (int32_t i = 0; context->devices != NULL && i < context->devices->count && found == DDL_HOST; i++) {
        ddl__device *d = &context->devices->list[i];
        if (d->index == 0 || d->opened) { /* one device of a plugin answers for all */
            status = ddl__device_get(context, i + 1, "ddl_device_of", &d);
            found = status == DDL_OK ? ddl__device_owner(d, pointer) : found;
        }
    }
    if (found < 0) {
        status = ddl__error(context, DDL_ERR_ARG, "ddl_device_of: the memory at %p was a device's and was freed",
                            pointer);
    } else if (status == DDL_OK) {
        *out_device = found;
    }
    ddl__unlock(context);
    return status;
}

/* >>dlpack */

static const struct {
    ddl_dtype dtype;
    uint8_t code, bits;
} ddl__dlpack_types[] = {
    {DDL_F16, 2, 16}, {DDL_BF16, 4, 16}, {DDL_F32, 2, 32}, {DDL_F64, 2, 64}, {DDL_I8, 0, 8},   {DDL_U8, 1, 8},
    {DDL_I32, 0, 32}, {DDL_U32, 1, 32},  {DDL_I64, 0, 64}, {DDL_U64, 1, 64}, {DDL_BOOL, 6, 8},
    {DDL_E4M3, 10, 8}, {DDL_E5M2, 12, 8},
};

static ddl_status ddl__dlpack_view(const ddl_dlpack *dlpack, ddl_dtype dtype, ddl_tensor *out_tensor) {
    uintptr_t data = (uintptr_t)dlpack->data + (uintptr_t)dlpack->byte_offset;
    ddl_tensor t = ddl_tensor_nd((const void *)data, dtype, dlpack->ndim, dlpack->shape);
    int64_t count = ddl_tensor_count(&t);
    if (count < 0) {
        return DDL_ERR_ARG;
    }
    bool zero = dlpack->strides != NULL;
    for (int32_t d = 0; dlpack->strides != NULL && d < t.ndim; d++) {
        t.strides[d] = dlpack->strides[d];
        zero = zero && t.strides[d] == 0;
    }
    if (zero && count > 1) { /* one element shown as many: strides of zero would mean contiguous here */
        return DDL_ERR_UNSUPPORTED;
    }
    *out_tensor = t;
    return DDL_OK;
}

DDL_API ddl_status ddl_tensor_from_dlpack(const ddl_dlpack *dlpack, ddl_tensor *out_tensor) {
    if (dlpack == NULL || out_tensor == NULL || dlpack->ndim < 0 || dlpack->ndim > DDL_MAX_DIMS ||
        dlpack->dtype.lanes != 1 || (dlpack->ndim > 0 && dlpack->shape == NULL)) {
        return DDL_ERR_ARG;
    }
    bool cuda = dlpack->device.type == 2;
    if (!cuda && dlpack->device.type != 1 && dlpack->device.type != 3) {
        return DDL_ERR_UNSUPPORTED;
    }
    if (cuda && (dlpack->device.id < 0 || dlpack->device.id >= DDL__DEVICES_MAX)) {
        return DDL_ERR_ARG;
    }
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__dlpack_types); i++) {
        if (ddl__dlpack_types[i].code == dlpack->dtype.code && ddl__dlpack_types[i].bits == dlpack->dtype.bits) {
            ddl_status status = ddl__dlpack_view(dlpack, ddl__dlpack_types[i].dtype, out_tensor);
            if (status == DDL_OK && cuda) {
                out_tensor->device = dlpack->device.id + 1;
            }
            return status;
        }
    }
    return DDL_ERR_UNSUPPORTED;
}

DDL_API ddl_status ddl_tensor_to_dlpack(ddl_tensor *tensor, ddl_dlpack *out_dlpack) {
    if (tensor == NULL || out_dlpack == NULL || ddl_tensor_count(tensor) < 0) {
        return DDL_ERR_ARG;
    }
    for (size_t i = 0; tensor->device >= DDL_HOST && i < DDL__COUNT_OF(ddl__dlpack_types); i++) {
        if (ddl__dlpack_types[i].dtype == tensor->dtype) {
            bool contiguous = ddl__is_contiguous(tensor);
            *out_dlpack = (ddl_dlpack){
                .data = tensor->data,
                .device = {tensor->device != DDL_HOST ? 2 : 1, tensor->device != DDL_HOST ? tensor->device - 1 : 0},
                .ndim = tensor->ndim,
                .dtype = {ddl__dlpack_types[i].code, ddl__dlpack_types[i].bits, 1},
                .shape = tensor->shape,
                .strides = contiguous ? NULL : tensor->strides,
            };
            return DDL_OK;
        }
    }
    return DDL_ERR_UNSUPPORTED;
}

#endif /* DDL_TENSOR_H */

/* optim/lane: arrays of the training layer, wherever they are, and work on them. In ordinary memory work is done at
 * once, by the loops of this library. On a device it is put on a stream of the lane's own, as kernels of the device's
 * plugin that give the same bits, and nothing here waits but ddl__lane_wait and what says so.
 *
 *     after   the lane goes on when the program's stream has come here
 *     hand    the program's stream goes on, or the host, when the lane has come here
 *
 * The first failure stays in status: what follows it is not to be used. Must not know: trainers, ranks. */
#ifndef DDL_OPTIM_LANE_H
#define DDL_OPTIM_LANE_H

#include "../tensor.h"
#include "optim.h"

typedef struct ddl__lane {
    ddl_context *context;
    ddl__device *device;  /* NULL: ordinary memory */
    void *stream;         /* of its own */
    void *user;           /* the program's, that work is ordered on; NULL: the host waits */
    ddl_status status;
    ddl__stage *pause;    /* what ddl__lane_wait waits for */
    bool pausing;
    double *numbers, *told; /* results that the host wants: on the device, and as the host was told */
    float *scratch[2];      /* for the largest array each, of f64 too */
    double *partial;        /* of sums of squares; codes' scratch */
    ddl__optim_tally tally; /* of the tensor that the host is at */
} ddl__lane;

static bool ddl__lane_is_host(const ddl__lane *lane) { return lane == NULL || lane->device == NULL; }

static void ddl__lane_note(ddl__lane *lane, ddl_status status) {
    lane->status = lane->status < 0 ? lane->status : status;
}

/* A tensor over an array of the lane, for operations. */
static ddl_tensor ddl__lane_tensor(const ddl__lane *lane, const void *data, ddl_dtype dtype, int64_t count) {
    ddl_tensor t = ddl_tensor_1d((void *)(uintptr_t)data, dtype, count);
    t.device = ddl__lane_is_host(lane) ? DDL_HOST : lane->device->number;
    return t;
}

/* >>memory */

/* Zeroed; NULL: there is none. */
static void *ddl__lane_alloc(ddl__lane *lane, size_t count, size_t size) {
    if (ddl__lane_is_host(lane)) {
        return ddl__alloc_array(&lane->context->base, count, size);
    }
    const ddl__device *d = lane->device;
    void *memory = NULL;
    if (count > SIZE_MAX / 2 / size || d->table->alloc(d->self, DDL__MAX(count * size, (size_t)1), &memory) < 0) {
        return NULL;
    }
    ddl__lane_note(lane, d->table->fill(d->self, memory, 0, count * size, lane->stream));
    return memory;
}

/* Work on it has ended. After the context was finalized the device has taken its memory back. */
static void ddl__lane_free(ddl__lane *lane, void *memory) {
    if (memory == NULL) {
        return; /* there may be no lane yet */
    }
    if (ddl__lane_is_host(lane)) {
        ddl__free(&lane->context->base, memory);
    } else if (!lane->context->finalized && !lane->device->stuck) {
        lane->device->table->free(lane->device->self, memory);
    }
}

/* Ordinary memory that the device reaches at its full speed. */
static void *ddl__lane_alloc_pinned(ddl__lane *lane, size_t bytes) {
    const ddl__device *d = lane->device;
    void *memory = NULL;
    if (ddl__lane_is_host(lane) || !DDL_HAS(d->table, host_alloc)) {
        return ddl__alloc(&lane->context->base, DDL__MAX(bytes, (size_t)1));
    }
    if (d->table->host_alloc(d->self, DDL__MAX(bytes, (size_t)1), &memory) < 0) {
        return NULL;
    }
    memset(memory, 0, bytes);
    return memory;
}

static void ddl__lane_free_pinned(ddl__lane *lane, void *memory) {
    if (memory == NULL) {
        return; /* as of a lane that was never opened */
    }
    if (ddl__lane_is_host(lane) || !DDL_HAS(lane->device->table, host_alloc)) {
        ddl__free(&lane->context->base, memory);
    } else if (!lane->context->finalized && !lane->device->stuck) {
        lane->device->table->host_free(lane->device->self, memory);
    }
}

/* Bytes in any direction; on the host at once. */
static void ddl__lane_copy(ddl__lane *lane, void *dst, const void *src, size_t bytes) {
    if (ddl__lane_is_host(lane)) {
        memmove(dst, src, bytes);
    } else if (bytes > 0) {
        const ddl__device *d = lane->device;
        ddl__lane_note(lane, d->table->copy(d->self, dst, src, bytes, lane->stream));
    }
}

static void ddl__lane_zero(ddl__lane *lane, void *dst, size_t bytes) {
    if (ddl__lane_is_host(lane)) {
        memset(dst, 0, bytes);
    } else if (bytes > 0) {
        const ddl__device *d = lane->device;
        ddl__lane_note(lane, d->table->fill(d->self, dst, 0, bytes, lane->stream));
    }
}

static void ddl__lane_kernel(ddl__lane *lane, ddl_kernel which, const void *params) {
    const ddl__device *d = lane->device;
    ddl__lane_note(lane, d->table->kernel(d->self, (int32_t)which, params, lane->stream));
}

/* >>order */

/* Whoever polls calls mark->done when the lane has come here; on an error it does not. The lock is held. */
static ddl_status ddl__lane_mark(ddl__lane *lane, ddl__stage *mark) {
    mark->stream_device = lane->device;
    mark->stream = lane->stream;
    ddl_status status = ddl__stage_fill(lane->context, mark);
    return status < 0 ? status : DDL_OK;
}

static void ddl__lane_paused(ddl_context *c, ddl__stage *s, ddl_status status) {
    ddl__lane *lane = s->owner;
    ddl__changed(c);
    lane->pausing = false;
    ddl__lane_note(lane, status);
}

static bool ddl__lane_pause_over(ddl_context *c, void *arg) {
    return !((ddl__lane *)arg)->pausing || c->aborted || c->finalized;
}

/* Waits until all work of the lane has ended. The lock is not held. */
static ddl_status ddl__lane_wait(ddl__lane *lane, const char *what) {
    if (ddl__lane_is_host(lane)) {
        return DDL_OK;
    }
    ddl_context *c = lane->context;
    DDL__TRY(ddl__enter(c));
    ddl__wait w = {.done = ddl__lane_pause_over, .tick = ddl__no_tick, .arg = lane,
                   .deadline = ddl__deadline(ddl__now_ns(), c->settings.timeout_ms)};
    lane->pausing = lane->status >= 0;
    if (lane->pausing) {
        ddl__lane_note(lane, ddl__lane_mark(lane, lane->pause));
        lane->pausing = lane->status >= 0;
    }
    if (lane->pausing) {
        ddl__wait_for(c, &w);
    }
    if (lane->pausing && lane->status >= 0) {
        lane->status = c->aborted ? DDL_ERR_ABORTED : c->finalized ? DDL_ERR_STATE : DDL_ERR_TIMEOUT;
    }
    ddl_status status = lane->status;
    if (status < 0) {
        status = ddl__error(c, status, "%s: work on device %d (%s %d) did not end well: %s", what,
                            lane->device->number, lane->device->plugin->name, lane->device->index,
                            ddl_status_text(status));
    }
    ddl__unlock(c);
    return status < 0 ? status : DDL_OK;
}

/* What is put on stream `later` waits for what is on `first` now. */
static void ddl__lane_order(ddl__lane *lane, void *first, void *later) {
    const ddl__device *d = lane->device;
    void *event = NULL;
    ddl_status status = d->table->event_record(d->self, first, &event);
    if (status >= 0) {
        status = d->table->stream_wait(d->self, later, event);
        d->table->event_free(d->self, event);
    }
    ddl__lane_note(lane, status);
}

static void ddl__lane_after(ddl__lane *lane) {
    if (!ddl__lane_is_host(lane) && lane->user != NULL) {
        ddl__lane_order(lane, lane->user, lane->stream);
    }
}

/* Without a stream of the program's it waits. The lock is not held. */
static ddl_status ddl__lane_hand(ddl__lane *lane, const char *what) {
    if (ddl__lane_is_host(lane)) {
        return DDL_OK;
    }
    if (lane->user != NULL && lane->status >= 0) {
        ddl__lane_order(lane, lane->stream, lane->user);
    }
    return lane->user == NULL || lane->status < 0 ? ddl__lane_wait(lane, what) : DDL_OK;
}

/* >>making */

/* The lane of a device, or of ordinary memory (DDL_HOST). The lock is held. */
static ddl_status ddl__lane_open(ddl_context *c, ddl__lane *lane, int32_t device, const char *what) {
    *lane = (ddl__lane){.context = c};
    if (device == DDL_HOST) {
        return DDL_OK;
    }
    ddl__device *d;
    DDL__TRY(ddl__device_get(c, device, what, &d));
    if (!DDL_HAS(d->table, kernel) || !DDL_HAS(d->table, stream_make) || !DDL_HAS(d->table, stream_wait)) {
        return ddl__error(c, DDL_ERR_UNSUPPORTED, "%s: plugin %s has no kernels of training for device %d; keep "
                          "parameters and gradients in ordinary memory", what, d->plugin->name, device);
    }
    lane->pause = ddl__stage_make(c, 1);
    ddl_status status = lane->pause != NULL ? d->table->stream_make(d->self, &lane->stream) : DDL_ERR_NOMEM;
    if (status < 0) {
        ddl__stage_free(c, lane->pause);
        lane->pause = NULL;
        return ddl__error(c, status, "%s: device %d (%s) gives no stream: %s", what, device, d->plugin->name,
                          ddl_status_text(status));
    }
    lane->pause->done = ddl__lane_paused;
    lane->pause->owner = lane;
    lane->device = d;
    return DDL_OK;
}

/* Room for results, and for work on arrays of up to so many elements. False: there is no memory. */
static bool ddl__lane_room(ddl__lane *lane, int64_t numbers, int64_t most) {
    size_t n = (size_t)numbers + 1, floats = (size_t)most + 1;
    lane->numbers = ddl__lane_alloc(lane, n, sizeof *lane->numbers);
    lane->told = ddl__lane_is_host(lane) ? lane->numbers : ddl__lane_alloc_pinned(lane, n * sizeof *lane->told);
    size_t partial = ddl__lane_is_host(lane) ? 1 : DDL_KERNEL_SCRATCH_BYTES(2 * floats); /* two codes of gTop-k */
    lane->partial = ddl__lane_alloc(lane, partial, 1);
    for (int32_t i = 0; i < 2; i++) {
        lane->scratch[i] = ddl__lane_alloc(lane, floats, sizeof(double));
    }
    return lane->numbers != NULL && lane->told != NULL && lane->partial != NULL && lane->scratch[0] != NULL &&
           lane->scratch[1] != NULL;
}

/* All its work has ended, or the device is given up. The lock is held. */
static void ddl__lane_close(ddl__lane *lane) {
    ddl_context *c = lane->context;
    if (!ddl__lane_is_host(lane)) {
        ddl__lane_free_pinned(lane, lane->told);
    }
    if (c != NULL) {
        ddl__lane_free(lane, lane->numbers);
        ddl__lane_free(lane, lane->partial);
        ddl__lane_free(lane, lane->scratch[0]);
        ddl__lane_free(lane, lane->scratch[1]);
    }
    if (lane->device != NULL && !c->finalized) {
        ddl__stage_leave(c, &lane->pause);
        if (!lane->device->stuck) {
            lane->device->table->stream_free(lane->device->self, lane->stream);
        }
    } else if (lane->device != NULL) {
        ddl__free(&c->base, lane->pause);
    }
    *lane = (ddl__lane){.context = c};
}

/* The host learns the first `count` numbers. Waits. */
static ddl_status ddl__lane_tell(ddl__lane *lane, int64_t count, const char *what) {
    if (ddl__lane_is_host(lane)) {
        return DDL_OK;
    }
    ddl__lane_copy(lane, lane->told, lane->numbers, (size_t)count * sizeof(double));
    return ddl__lane_wait(lane, what);
}

/* >>arithmetic */

enum { DDL__LANE_BLOCK = DDL__BLOCK }; /* elements that the host converts at a time; sums are made of as many */

/* Copies elements from one float type to another; f64 only to f64. */
static void ddl__convert(void *dst, ddl_dtype to, const void *src, ddl_dtype from, int64_t count) {
    ddl__cpu level = ddl__cpu_level();
    size_t n = (size_t)count;
    if (to == from) {
        memcpy(dst, src, n * ddl_dtype_bytes(to));
    } else if (to == DDL_F32) {
        ddl__widen_at(level, from)(dst, src, n);
    } else if (from == DDL_F32) {
        ddl__narrow_at(level, to)(dst, src, n);
    } else { /* f16 and bf16 */
        float block[DDL__LANE_BLOCK];
        for (size_t i = 0; i < n; i += DDL__LANE_BLOCK) {
            size_t some = DDL__MIN(n - i, (size_t)DDL__LANE_BLOCK);
            ddl__widen_at(level, from)(block, (const char *)src + 2 * i, some);
            ddl__narrow_at(level, to)((char *)dst + 2 * i, block, some);
        }
    }
}

static void ddl__lane_convert(ddl__lane *lane, void *dst, ddl_dtype to, const void *src, ddl_dtype from,
                              int64_t count) {
    ddl_kernel_convert k = {.dst = dst, .src = src, .count = count, .to = (int32_t)to, .from = (int32_t)from};
    if (ddl__lane_is_host(lane)) {
        ddl__convert(dst, to, src, from, count);
    } else {
        ddl__lane_kernel(lane, DDL_KERNEL_CONVERT, &k);
    }
}

/* Whether an element is an infinity or NaN. */
static bool ddl__not_finite(const void *data, int64_t count, ddl_dtype dtype) {
    return ddl__look_at(ddl__cpu_level(), NULL, data, count, dtype);
}

/* dst = src, or with add dst += src, in the type of dst (f32 or f64 where something is added). odd, of the lane, is not
 * 0 afterwards if it was not, or something in dst is not finite; NULL: nobody looks. */
static void ddl__lane_gather(ddl__lane *lane, void *dst, ddl_dtype to, const void *src, ddl_dtype from, int64_t count,
                             bool add, uint64_t *odd) {
    ddl_kernel_convert k = {dst, src, count, (int32_t)to, (int32_t)from, add, 0, odd};
    if (!ddl__lane_is_host(lane)) {
        ddl__lane_kernel(lane, DDL_KERNEL_CONVERT, &k);
        return;
    }
    if (to == from && !add && odd != NULL) {
        *odd |= ddl__look_at(ddl__cpu_level(), dst, src, count, to);
        return;
    }
    enum { SOME = DDL__LANE_BLOCK / 2 };
    size_t source = ddl_dtype_bytes(from), target = ddl_dtype_bytes(to);
    double block[SOME];
    for (int64_t i = 0; i < count; i += SOME) {
        int64_t some = DDL__MIN(count - i, (int64_t)SOME);
        const char *at = (const char *)src + (size_t)i * source;
        char *into = (char *)dst + (size_t)i * target;
        ddl__convert(add ? (void *)block : into, to, at, from, some);
        if (add) {
            ddl__reduce_kernel(to, DDL_SUM)(into, into, block, (size_t)some);
        }
        if (odd != NULL && *odd == 0) {
            *odd = ddl__not_finite(into, some, to);
        }
    }
}

/* dst += src, of one type. */
static void ddl__lane_add(ddl__lane *lane, void *dst, const void *src, int64_t count, ddl_dtype dtype) {
    const void *srcs[2] = {dst, src};
    if (ddl__lane_is_host(lane)) {
        ddl__reduce_kernel(dtype, DDL_SUM)(dst, dst, src, (size_t)count);
    } else if (count > 0) {
        const ddl__device *d = lane->device;
        ddl__lane_note(lane, d->table->reduce(d->self, dst, srcs, 2, count, (int32_t)dtype, DDL_SUM, lane->stream));
    }
}

static void ddl__lane_scale(ddl__lane *lane, void *data, int64_t count, ddl_dtype dtype, double factor) {
    ddl_kernel_scale k = {data, data, count, (int32_t)dtype, 1, factor};
    if (ddl__lane_is_host(lane)) {
        ddl__scale(data, data, (size_t)count, dtype, factor);
    } else if (count > 0) {
        ddl__lane_kernel(lane, DDL_KERNEL_SCALE, &k);
    }
}

/* Divides a sum of n terms. */
static void ddl__lane_average(ddl__lane *lane, void *data, int64_t count, ddl_dtype dtype, int32_t n) {
    ddl_kernel_scale k = {data, data, count, (int32_t)dtype, n, 1};
    if (ddl__lane_is_host(lane)) {
        ddl__average(data, (size_t)count, dtype, n);
    } else if (count > 0 && n > 1) {
        ddl__lane_kernel(lane, DDL_KERNEL_SCALE, &k);
    }
}

/* Of at most a stretch. */
static double ddl__stretch_squares(const void *x, ddl_dtype dtype, int64_t count) {
    float block[DDL__LANE_BLOCK];
    double sum = 0;
    if (dtype == DDL_F32) {
        return ddl__sum_squares(x, count);
    }
    if (dtype == DDL_F64) {
        return ddl__sum_squares_f64(x, count);
    }
    for (int64_t i = 0; i < count; i += DDL__LANE_BLOCK) {
        int64_t some = DDL__MIN(count - i, (int64_t)DDL__LANE_BLOCK);
        ddl__convert(block, DDL_F32, (const char *)x + 2 * i, dtype, some);
        sum += ddl__sum_squares(block, some);
    }
    return sum;
}

/* Number `at` becomes the sum of squares of an array. */
static void ddl__lane_squares(ddl__lane *lane, const void *x, ddl_dtype dtype, int64_t count, int64_t at) {
    size_t size = ddl_dtype_bytes(dtype);
    if (!ddl__lane_is_host(lane)) {
        if (size == 2) {
            ddl__lane_convert(lane, lane->scratch[0], DDL_F32, x, dtype, count);
            x = lane->scratch[0];
            dtype = DDL_F32;
        }
        ddl_kernel_squares k = {x, count, lane->partial, lane->numbers + at, (int32_t)dtype, 0};
        ddl__lane_kernel(lane, DDL_KERNEL_SQUARES, &k);
        return;
    }
    double sum = 0;
    for (int64_t i = 0; i < count; i += DDL__STRETCH) {
        const char *from = (const char *)x + (size_t)i * size;
        sum += ddl__stretch_squares(from, dtype, DDL__MIN(count - i, DDL__STRETCH));
    }
    lane->numbers[at] = sum;
}

/* >>optimizer */

static ddl_kernel_step ddl__lane_step_of(const ddl_optimizer *o, const ddl_optimizer_part *part) {
    ddl__optim_scalars k = ddl__optim_scalars_of(o, part);
    ddl__optim_streams s = ddl__optim_streams_of(o, part);
    return (ddl_kernel_step){.kind = (int32_t)o->kind, .rate = k.rate, .decay = k.decay, .keep = k.keep,
                             .beta1 = k.beta1, .fresh1 = k.fresh1, .beta2 = k.beta2, .fresh2 = k.fresh2,
                             .unbias1 = k.unbias1, .unbias2 = k.unbias2, .epsilon = k.epsilon, .count = part->count,
                             .w = s.w, .g = s.g, .m = s.m, .v = s.v,
                             .dtype = part->dtype == DDL_F64 ? DDL_F64 : DDL_F32};
}

/* Numbers at and at + 1 become, or with more grow by, the sums of ddl__optim_sums. On a device all is one part. */
static void ddl__lane_optim_sums(ddl__lane *lane, const ddl_optimizer *o, const ddl_optimizer_part *part, int64_t at,
                                 bool more) {
    if (ddl__lane_is_host(lane)) {
        if (!more) {
            lane->tally = (ddl__optim_tally){.done = 0};
        }
        ddl__optim_tally_add(&lane->tally, ddl__cpu_level(), o, part, lane->numbers + at);
        return;
    }
    const float *second = part->grad;
    ddl_dtype dtype = part->dtype == DDL_F64 ? DDL_F64 : DDL_F32;
    ddl__lane_squares(lane, part->param, dtype, part->count, at);
    if (o->kind == DDL_LAMB && part->count > 0) {
        ddl_kernel_step k = ddl__lane_step_of(o, part);
        k.moments = 1;
        second = k.r = lane->scratch[1];
        ddl__lane_kernel(lane, DDL_KERNEL_STEP, &k);
    }
    ddl__lane_squares(lane, second, dtype, part->count, at + 1);
}

/* As ddl__optim_step. A program's own optimizer is called by the host, when the lane has come there. */
static void ddl__lane_step(ddl__lane *lane, const ddl_optimizer *o, const ddl_optimizer_part *part,
                           const double *sums) {
    if (ddl__lane_is_host(lane) || o->kind == DDL_OPTIMIZER_FN) {
        if (ddl__lane_wait(lane, "ddl_step") == DDL_OK) {
            ddl__optim_step(o, part, sums);
        }
    } else if (part->count > 0) {
        ddl_optimizer_part scaled = *part;
        scaled.learning_rate *= ddl__optim_needs_sums(o) ? ddl__optim_trust(o, sums) : 1;
        ddl_kernel_step k = ddl__lane_step_of(o, &scaled);
        k.g = o->kind == DDL_LAMB ? NULL : k.g; /* it is in the moments already */
        ddl__lane_kernel(lane, DDL_KERNEL_STEP, &k);
    }
}

#endif /* DDL_OPTIM_LANE_H */

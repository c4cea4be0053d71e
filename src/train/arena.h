/* train, fourth part: the memory that gradients travel in, and the arithmetic on it: copying in and out, sums of
 * squares, the optimizer's step, all on the trainer's lane. Nothing here communicates.
 *
 * In ordinary memory all of it is done at once. On a device it is put on the lane's stream: a gradient is in the arena
 * when the host sees the event behind its copy (ddl__weight_mark), and so is what the host does with it there. */
#ifndef DDL_TRAIN_ARENA_H
#define DDL_TRAIN_ARENA_H

#include "pump.h"

static char *ddl__weight_wire(const ddl_trainer *t, const ddl__weight *w) {
    return (char *)t->arenas[w->wire].data + (size_t)w->at * ddl_dtype_bytes(w->wire);
}

static size_t ddl__weight_wire_bytes(const ddl__weight *w) { return (size_t)w->count * ddl_dtype_bytes(w->wire); }

static bool ddl__weight_is_mirrored(const ddl_trainer *t, const ddl__weight *w) {
    return t->mirrors[w->wire] != NULL && (w->served || w->coded != NULL);
}

/* The sum of n batches becomes their mean: this rank's gradient. */
static void ddl__weight_mean(ddl_trainer *t, const ddl__weight *w, int32_t n) {
    char *wire = ddl__weight_wire(t, w);
    if (n > 1) {
        ddl__lane_average(&t->lane, wire, w->count, w->wire, n);
    }
    if (ddl__weight_is_mirrored(t, w)) {
        ddl__lane_copy(&t->lane, ddl__served_mirror(t, w->wire, w->at), wire, ddl__weight_wire_bytes(w));
    }
}

/* Copies the program's gradient into the arena, or adds it there; notes what is not finite. */
static void ddl__weight_pack(ddl_trainer *t, ddl__weight *w) {
    size_t i = (size_t)(w - t->weights);
    char *wire = ddl__weight_wire(t, w);
    if (t->micro == 0 && !t->config.unchecked) {
        ddl__lane_zero(&t->lane, &t->odds[i], sizeof t->odds[i]);
    }
    ddl__lane_gather(&t->lane, wire, w->wire, w->grad.data, w->grad.dtype, w->count, t->micro > 0,
                     t->config.unchecked ? NULL : &t->odds[i]);
    if (!t->config.unchecked && !ddl__lane_is_host(&t->lane)) {
        ddl__lane_copy(&t->lane, &t->odds_told[i], &t->odds[i], sizeof t->odds[i]);
    }
    if (t->micro + 1 == t->config.accumulate) {
        ddl__weight_mean(t, w, t->config.accumulate);
    }
}

static void ddl__weight_zero(ddl_trainer *t, ddl__weight *w) {
    char *wire = ddl__weight_wire(t, w);
    ddl__lane_zero(&t->lane, wire, ddl__weight_wire_bytes(w));
    if (ddl__weight_is_mirrored(t, w)) {
        memset(ddl__served_mirror(t, w->wire, w->at), 0, ddl__weight_wire_bytes(w));
    }
    w->bad = false;
}

/* The own part of the averaged gradient. */
static char *ddl__weight_own(const ddl_trainer *t, const ddl__weight *w) {
    return ddl__weight_wire(t, w) + (size_t)w->own_begin * ddl_dtype_bytes(w->wire);
}

/* >>optimizer */

/* Element `at` of what the optimizer works on: f32, or f64 of f64 parameters. */
static float *ddl__weight_values(const ddl__weight *w, int64_t at) {
    char *own = (char *)w->param.data + (size_t)w->own_begin * ddl_dtype_bytes(w->param.dtype);
    return (float *)(void *)((w->master != NULL ? (char *)w->master : own) + (size_t)at * ddl__weight_size(w));
}

/* A block of a step: [at, at + count) of the own part, with its gradient in the type of the values. */
static ddl_optimizer_part ddl__weight_part(ddl_trainer *t, const ddl__weight *w, int64_t at, int64_t count,
                                           float *block) {
    const char *src = ddl__weight_own(t, w) + (size_t)at * ddl_dtype_bytes(w->wire);
    if (w->wire != ddl__weight_type(w)) {
        ddl__lane_convert(&t->lane, block, DDL_F32, src, w->wire, count);
    }
    return (ddl_optimizer_part){
        .step = t->stats.steps + 1,
        .learning_rate = t->rate * w->options.rate_factor,
        .tensor = (int32_t)(w - t->weights),
        .offset = w->own_begin + at,
        .count = count,
        .param = ddl__weight_values(w, at),
        .grad = w->wire == ddl__weight_type(w) ? (const float *)(const void *)src : block,
        .state = w->state != NULL ? (float *)(void *)((char *)w->state + (size_t)at * ddl__weight_size(w)) : NULL,
        .state_stride = w->own_count,
        .dtype = ddl__weight_type(w),
    };
}

/* Shows what the optimizer made of the own part as the program's parameter. */
static void ddl__weight_publish(ddl_trainer *t, const ddl__weight *w) {
    if (w->master != NULL) {
        ddl__lane_convert(&t->lane, (char *)w->param.data + 2 * w->own_begin, w->param.dtype, w->master, DDL_F32,
                          w->own_count);
    }
}

/* Servers that only average: what they have made goes where an all-reduce would have left it. */
static void ddl__weight_arrive(ddl_trainer *t, const ddl__weight *w) {
    if (t->served.sums && w->count > 0 && !ddl__weight_is_compressed(w) && t->units[w->unit_first].served) {
        ddl__lane_copy(&t->lane, ddl__weight_wire(t, w), ddl__served_pulled(t, w->wire, w->at),
                       ddl__weight_wire_bytes(w));
    }
}

/* What servers have made of a parameter, by way of the arena where it is on a device. */
static void ddl__weight_take_served(ddl_trainer *t, const ddl__weight *w) {
    const void *pulled = ddl__served_pulled(t, w->wire, w->at);
    if (!ddl__lane_is_host(&t->lane)) {
        ddl__lane_copy(&t->lane, ddl__weight_wire(t, w), pulled, ddl__weight_wire_bytes(w));
        pulled = ddl__weight_wire(t, w);
    }
    ddl__lane_convert(&t->lane, w->param.data, w->param.dtype, pulled, w->wire, w->count);
}

static ddl_optimizer ddl__weight_optimizer(const ddl_trainer *t, const ddl__weight *w) {
    ddl_optimizer o = t->optimizer;
    o.weight_decay = w->options.no_decay ? 0 : o.weight_decay;
    return o;
}

/* Elements of one part of a step. Gradients of the optimizer's type are taken where they are, others in blocks that
 * stay in the first cache; a device has memory for them. */
static int64_t ddl__weight_stride(const ddl_trainer *t, const ddl__weight *w) {
    bool whole = w->wire == ddl__weight_type(w) || !ddl__lane_is_host(&t->lane);
    return whole ? DDL__MAX(w->own_count, 1) : DDL__LANE_BLOCK;
}

/* First half of a step of LARS and LAMB: numbers 2 i and 2 i + 1 of the lane, for tensor i. */
static void ddl__weight_sums(ddl_trainer *t, const ddl__weight *w) {
    ddl_optimizer o = ddl__weight_optimizer(t, w);
    int64_t stride = ddl__weight_stride(t, w), number = 2 * (w - t->weights);
    float memory[DDL__LANE_BLOCK], *block = ddl__lane_is_host(&t->lane) ? memory : t->lane.scratch[0];
    for (int64_t i = 0; i < w->own_count; i += stride) {
        ddl_optimizer_part part = ddl__weight_part(t, w, i, DDL__MIN(stride, w->own_count - i), block);
        ddl__lane_optim_sums(&t->lane, &o, &part, number, i > 0);
    }
}

/* One step of the optimizer on the own part of a tensor. */
static void ddl__weight_step(ddl_trainer *t, const ddl__weight *w) {
    ddl_optimizer o = ddl__weight_optimizer(t, w);
    int64_t stride = ddl__weight_stride(t, w);
    const double *sums = t->lane.told + 2 * (w - t->weights);
    float memory[DDL__LANE_BLOCK], *block = ddl__lane_is_host(&t->lane) ? memory : t->lane.scratch[0];
    for (int64_t i = 0; i < w->own_count; i += stride) {
        ddl_optimizer_part part = ddl__weight_part(t, w, i, DDL__MIN(stride, w->own_count - i), block);
        ddl__lane_step(&t->lane, &o, &part, sums);
    }
    ddl__weight_publish(t, w);
}

/* Updates the tensors from last down to first. The host needs both sums of LARS and LAMB: a device is asked for those
 * of all tensors at once. The lock is not held. */
static ddl_status ddl__weights_update(ddl_trainer *t, int32_t first, int32_t last) {
    bool served = ddl__trainer_hands_over(t), summed = !served && ddl__optim_needs_sums(&t->optimizer);
    for (int32_t i = last; i >= first && summed; i--) {
        if (t->weights[i].options.rate_factor >= 0) {
            ddl__weight_sums(t, &t->weights[i]);
        }
    }
    if (summed) {
        DDL__TRY(ddl__lane_tell(&t->lane, 2 * (last + 1), "ddl_step"));
    }
    for (int32_t i = last; i >= first; i--) {
        const ddl__weight *w = &t->weights[i];
        if (served) {
            ddl__weight_take_served(t, w);
        } else if (w->options.rate_factor >= 0) {
            ddl__weight_step(t, w);
        }
    }
    return t->lane.status < 0 ? ddl__lane_wait(&t->lane, "ddl_step") : DDL_OK;
}

/* Puts the finished gradient into the program's memory, for a step of its own. */
static void ddl__weight_unpack(ddl_trainer *t, const ddl__weight *w) {
    ddl__lane_convert(&t->lane, w->grad.data, w->grad.dtype, ddl__weight_wire(t, w), w->wire, w->count);
}

/* >>layout */

static void ddl__arenas_free(ddl_trainer *t) {
    for (int32_t d = 0; d < DDL__ARENAS; d++) {
        if (!t->context->finalized) {
            ddl_tensor_free(t->context, &t->arenas[d]);
        }
        t->arenas[d] = (ddl_tensor){0};
    }
    ddl__lock(t->context);
    for (int32_t d = 0; d < DDL__ARENAS; d++) {
        ddl__lane_free_pinned(&t->lane, t->mirrors[d]);
        t->mirrors[d] = NULL;
    }
    ddl__unlock(t->context);
}

/* Where a device's gradients are also in ordinary memory: for servers. */
static ddl_status ddl__mirrors_make(ddl_trainer *t, const int64_t counts[DDL__ARENAS]) {
    if (t->served.ps == NULL || ddl__lane_is_host(&t->lane)) {
        return DDL_OK;
    }
    DDL__TRY(ddl__enter(t->context));
    ddl_status status = DDL_OK;
    for (int32_t d = 0; d < DDL__ARENAS && status == DDL_OK; d++) {
        bool used = d == DDL_F32 || (d == DDL_F64 && t->config.architecture == DDL_ARCHITECTURE_PS);
        if (used && counts[d] > 0) {
            t->mirrors[d] = ddl__lane_alloc_pinned(&t->lane, (size_t)counts[d] * ddl_dtype_bytes((ddl_dtype)d));
            status = t->mirrors[d] != NULL ? DDL_OK
                                           : ddl__error(t->context, DDL_ERR_NOMEM,
                                                        "no pinned memory for gradients that go to servers");
        }
    }
    ddl__unlock(t->context);
    return status;
}

/* Places tensors in backward's order and allocates. The lock is not held. On error there are no arenas. */
static ddl_status ddl__arenas_make(ddl_trainer *t) {
    int64_t counts[DDL__ARENAS] = {0};
    int32_t device = ddl__lane_is_host(&t->lane) ? DDL_HOST : t->lane.device->number;
    for (int32_t i = 2 * t->count - 1; i >= 0; i--) { /* compressed ones last, so that the others are one range */
        ddl__weight *w = &t->weights[i % t->count];
        if (ddl__weight_is_compressed(w) == (i < t->count)) {
            w->wire = ddl__weight_wire_type(t, w);
            w->at = counts[w->wire];
            counts[w->wire] += w->count;
        }
    }
    ddl_status status = DDL_OK;
    for (int32_t d = 1; d < DDL__ARENAS && status >= 0; d++) {
        if (counts[d] > 0) {
            status = device == DDL_HOST
                         ? ddl_tensor_alloc(t->context, (ddl_dtype)d, 1, &counts[d], &t->arenas[d])
                         : ddl_tensor_alloc_on(t->context, device, (ddl_dtype)d, 1, &counts[d], &t->arenas[d]);
        }
    }
    status = status < 0 ? status : ddl__mirrors_make(t, counts);
    if (status < 0) {
        ddl__arenas_free(t);
    }
    return status;
}

#endif /* DDL_TRAIN_ARENA_H */

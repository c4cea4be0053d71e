/* train, fourth part: the memory that gradients travel in, and the arithmetic on it: copying in and out, sums of
 * squares, the optimizer's step. Nothing here communicates. */
#ifndef DDL_TRAIN_ARENA_H
#define DDL_TRAIN_ARENA_H

#include "pump.h"

static char *ddl__weight_wire(const ddl_trainer *t, const ddl__weight *w) {
    return (char *)t->arenas[w->wire].data + (size_t)w->at * ddl_dtype_bytes(w->wire);
}

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
        float block[DDL__TRAIN_BLOCK];
        for (size_t i = 0; i < n; i += DDL__TRAIN_BLOCK) {
            size_t some = DDL__MIN(n - i, (size_t)DDL__TRAIN_BLOCK);
            ddl__widen_at(level, from)(block, (const char *)src + 2 * i, some);
            ddl__narrow_at(level, to)((char *)dst + 2 * i, block, some);
        }
    }
}

/* Whether an element is an infinity or NaN: all bits of its exponent are set. */
#define DDL__DEFINE_NOT_FINITE(name, word, mask)                                                                       \
    static bool name(const void *data, int64_t count) {                                                                \
        word bad = 0;                                                                                                  \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            word bits;                                                                                                 \
            memcpy(&bits, (const char *)data + (size_t)i * sizeof bits, sizeof bits);                                  \
            bad |= (word)((bits & (mask)) == (mask));                                                                  \
        }                                                                                                              \
        return bad != 0;                                                                                               \
    }
DDL__DEFINE_NOT_FINITE(ddl__f16_not_finite, uint16_t, 0x7c00u)
DDL__DEFINE_NOT_FINITE(ddl__bf16_not_finite, uint16_t, 0x7f80u)
DDL__DEFINE_NOT_FINITE(ddl__f32_not_finite, uint32_t, 0x7f800000u)
DDL__DEFINE_NOT_FINITE(ddl__f64_not_finite, uint64_t, 0x7ff0000000000000u)

static bool ddl__not_finite(const void *data, int64_t count, ddl_dtype dtype) {
    return dtype == DDL_F16    ? ddl__f16_not_finite(data, count)
           : dtype == DDL_BF16 ? ddl__bf16_not_finite(data, count)
           : dtype == DDL_F32  ? ddl__f32_not_finite(data, count)
                               : ddl__f64_not_finite(data, count);
}

/* dst += src, of the arena's type (f32 or f64: see ddl__weight_wire_type). */
static void ddl__accumulate(void *dst, const void *src, int64_t count, ddl_dtype dtype) {
    ddl__reduce_kernel(dtype, DDL_SUM)(dst, dst, src, (size_t)count);
}

/* Copies the program's gradient into the arena, or adds it there, block by block; notes what is not finite. */
static void ddl__weight_pack(ddl_trainer *t, ddl__weight *w) {
    size_t from = ddl_dtype_bytes(w->grad.dtype), to = ddl_dtype_bytes(w->wire);
    bool bad = t->micro > 0 && w->bad;
    double block[DDL__TRAIN_BLOCK];
    for (int64_t i = 0; i < w->count; i += DDL__TRAIN_BLOCK) {
        int64_t some = DDL__MIN(w->count - i, (int64_t)DDL__TRAIN_BLOCK);
        const char *src = (const char *)w->grad.data + (size_t)i * from;
        char *dst = ddl__weight_wire(t, w) + (size_t)i * to;
        if (t->micro == 0) {
            ddl__convert(dst, w->wire, src, w->grad.dtype, some);
        } else {
            ddl__convert(block, w->wire, src, w->grad.dtype, some);
            ddl__accumulate(dst, block, some, w->wire);
        }
        bad = bad || (!t->config.unchecked && ddl__not_finite(dst, some, w->wire));
    }
    w->bad = bad;
    if (t->micro + 1 == t->config.accumulate && t->micro > 0) {
        ddl__average(ddl__weight_wire(t, w), (size_t)w->count, w->wire, t->config.accumulate);
    }
}

static void ddl__weight_zero(ddl_trainer *t, ddl__weight *w) {
    memset(ddl__weight_wire(t, w), 0, (size_t)w->count * ddl_dtype_bytes(w->wire));
    w->bad = false;
}

/* Sum of squares of the own part of the averaged gradient. */
static double ddl__weight_squares(const ddl_trainer *t, const ddl__weight *w) {
    size_t size = ddl_dtype_bytes(w->wire);
    float block[DDL__TRAIN_BLOCK];
    double sum = 0;
    for (int64_t i = 0; i < w->own_count; i += DDL__TRAIN_BLOCK) {
        int64_t some = DDL__MIN(w->own_count - i, (int64_t)DDL__TRAIN_BLOCK);
        const char *src = ddl__weight_wire(t, w) + (size_t)(w->own_begin + i) * size;
        if (w->wire == DDL_F64) {
            for (int64_t k = 0; k < some; k++) {
                double x = ((const double *)(const void *)src)[k];
                sum += x * x;
            }
            continue;
        }
        if (w->wire != DDL_F32) {
            ddl__convert(block, DDL_F32, src, w->wire, some);
        }
        sum += ddl__sum_squares(w->wire == DDL_F32 ? (const float *)(const void *)src : block, some);
    }
    return sum;
}

/* Multiplies the own part of the gradient. */
static void ddl__weight_scale(ddl_trainer *t, ddl__weight *w, double factor) {
    char *at = ddl__weight_wire(t, w) + (size_t)w->own_begin * ddl_dtype_bytes(w->wire);
    ddl__scale(at, at, (size_t)w->own_count, w->wire, factor);
}

/* >>optimizer */

/* The f32 elements that the optimizer works on. */
static float *ddl__weight_values(const ddl__weight *w) {
    return w->master != NULL ? w->master : (float *)w->param.data + w->own_begin;
}

/* A block of a step: [at, at + count) of the own part, with its gradient in f32. */
static ddl_optimizer_part ddl__weight_part(const ddl_trainer *t, const ddl__weight *w, int64_t at, int64_t count,
                                           float *block) {
    const char *src = ddl__weight_wire(t, w) + (size_t)(w->own_begin + at) * ddl_dtype_bytes(w->wire);
    if (w->wire != DDL_F32) {
        ddl__convert(block, DDL_F32, src, w->wire, count);
    }
    return (ddl_optimizer_part){
        .step = t->stats.steps + 1,
        .learning_rate = t->rate * w->options.rate_factor,
        .tensor = (int32_t)(w - t->weights),
        .offset = w->own_begin + at,
        .count = count,
        .param = ddl__weight_values(w) + at,
        .grad = w->wire == DDL_F32 ? (const float *)(const void *)src : block,
        .state = w->state != NULL ? w->state + at : NULL,
        .state_stride = w->own_count,
    };
}

/* Shows what the optimizer made of the own part as the program's parameter. */
static void ddl__weight_publish(const ddl__weight *w) {
    if (w->master != NULL) {
        ddl__convert((char *)w->param.data + 2 * w->own_begin, w->param.dtype, w->master, DDL_F32, w->own_count);
    }
}

/* Servers that only average: what they have made goes where an all-reduce would have left it. */
static void ddl__weight_arrive(ddl_trainer *t, const ddl__weight *w) {
    if (t->served.sums && w->count > 0 && t->units[w->unit_first].served) {
        memcpy(ddl__weight_wire(t, w), ddl__served_pulled(t, w->at), (size_t)w->count * sizeof(float));
    }
}

/* One step of the optimizer on the own part of a tensor, or what servers have made of it. f32 gradients are taken where
 * they are, others in blocks. */
static void ddl__weight_update(const ddl_trainer *t, ddl__weight *w) {
    if (ddl__trainer_hands_over(t)) {
        ddl__convert(w->param.data, w->param.dtype, ddl__served_pulled(t, w->at), DDL_F32, w->count);
        return;
    }
    if (w->options.rate_factor < 0) {
        return;
    }
    float block[DDL__TRAIN_BLOCK];
    ddl_optimizer o = t->optimizer;
    o.weight_decay = w->options.no_decay ? 0 : o.weight_decay;
    int64_t step = w->wire == DDL_F32 ? DDL__MAX(w->own_count, 1) : DDL__TRAIN_BLOCK;
    double sums[2] = {0, 0};
    for (int64_t i = 0; ddl__optim_needs_sums(&o) && i < w->own_count; i += step) {
        double some[2];
        ddl_optimizer_part part = ddl__weight_part(t, w, i, DDL__MIN(step, w->own_count - i), block);
        ddl__optim_sums(&o, &part, some);
        sums[0] += some[0];
        sums[1] += some[1];
    }
    for (int64_t i = 0; i < w->own_count; i += step) {
        ddl_optimizer_part part = ddl__weight_part(t, w, i, DDL__MIN(step, w->own_count - i), block);
        ddl__optim_step(&o, &part, sums);
    }
    ddl__weight_publish(w);
}

/* Puts the finished gradient into the program's memory, for a step of its own. */
static void ddl__weight_unpack(const ddl_trainer *t, const ddl__weight *w) {
    ddl__convert(w->grad.data, w->grad.dtype, ddl__weight_wire(t, w), w->wire, w->count);
}

/* >>layout */

static void ddl__arenas_free(ddl_trainer *t) {
    for (int32_t d = 0; d < DDL__ARENAS; d++) {
        if (!t->context->finalized) {
            ddl_tensor_free(t->context, &t->arenas[d]);
        }
        t->arenas[d] = (ddl_tensor){0};
    }
}

/* Places tensors in backward's order and allocates. The lock is not held. On error there are no arenas. */
static ddl_status ddl__arenas_make(ddl_trainer *t) {
    int64_t counts[DDL__ARENAS] = {0};
    for (int32_t i = 2 * t->count - 1; i >= 0; i--) { /* compressed ones last, so that the others are one range */
        ddl__weight *w = &t->weights[i % t->count];
        if (ddl__weight_is_squeezed(w) == (i < t->count)) {
            w->wire = ddl__weight_wire_type(t, w);
            w->at = counts[w->wire];
            counts[w->wire] += w->count;
        }
    }
    for (int32_t d = 1; d < DDL__ARENAS; d++) {
        ddl_status status =
            counts[d] > 0 ? ddl_tensor_alloc(t->context, (ddl_dtype)d, 1, &counts[d], &t->arenas[d]) : DDL_OK;
        if (status < 0) {
            ddl__arenas_free(t);
            return status;
        }
    }
    return DDL_OK;
}

#endif /* DDL_TRAIN_ARENA_H */

/* optim/optim: optimizers as the rooms above use them: check a config, size the state, take a step on a part.
 * Must not know: ranks, servers, or where a gradient comes from.
 *
 *     ddl__optim_init(sentence, &config, &optimizer)                checks, fills in the defaults
 *     state = zeroed floats, ddl__optim_slots(&optimizer) per element
 *     elementwise kinds:   ddl__optim_step(&optimizer, &part, NULL)
 *     LARS and LAMB:       ddl__optim_sums(&optimizer, &part, sums)   of the tensor, once per step, or
 *                          ddl__optim_tally_add(&tally, level, &optimizer, &part, sums)   of its parts in their order
 *                          ddl__optim_step(&optimizer, &part, sums)
 * With the same sums the parts of a tensor get the same bits as the whole. State of f64 tensors is f64. */
#ifndef DDL_OPTIM_OPTIM_H
#define DDL_OPTIM_OPTIM_H

#include "kernels.h"

static inline const char *ddl__optim_name(ddl_optimizer_kind kind) {
    static const char *const names[] = {"SGD", "momentum", "Nesterov", "Adam", "AdamW", "LARS", "LAMB", "fn"};
    return (unsigned)kind < DDL__COUNT_OF(names) ? names[kind] : "?";
}

/* Floats of state per element. */
static inline int32_t ddl__optim_slots(const ddl_optimizer *optimizer) {
    switch (optimizer->kind) {
    case DDL_SGD: return 0;
    case DDL_MOMENTUM:
    case DDL_NESTEROV:
    case DDL_LARS: return 1;
    case DDL_ADAM:
    case DDL_ADAMW:
    case DDL_LAMB: return 2;
    case DDL_OPTIMIZER_FN: return optimizer->state_slots;
    }
    return 0;
}

/* Whether a step needs the sums of ddl__optim_sums over the whole tensor. */
static inline bool ddl__optim_needs_sums(const ddl_optimizer *optimizer) {
    return optimizer->kind == DDL_LARS || optimizer->kind == DDL_LAMB;
}

/* A member in its range, after defaults. */
static inline ddl_status ddl__optim_range(ddl__sentence *sentence, const ddl_optimizer *o, const char *name,
                                          double value, double end) {
    if (value >= 0 && value < end) {
        return DDL_OK;
    }
    return ddl__fail(sentence, DDL_ERR_ARG, "optimizer %s: %s is %g; it must be at least 0 and below %g",
                     ddl__optim_name(o->kind), name, value, end);
}

static inline double ddl__or_default(double value, double otherwise) {
    return value == 0 ? otherwise : value;
}

/* Checks a config and writes it with all defaults filled in; *out is untouched on an error. */
static inline ddl_status ddl__optim_init(ddl__sentence *sentence, const ddl_optimizer *config, ddl_optimizer *out) {
    ddl_optimizer o = *config;
    if ((unsigned)o.kind > DDL_OPTIMIZER_FN) {
        return ddl__fail(sentence, DDL_ERR_ARG, "%d is not a kind of optimizer; see ddl_optimizer_kind", (int)o.kind);
    }
    if (o.kind == DDL_OPTIMIZER_FN && (o.fn == NULL || o.state_slots < 0 || o.state_slots > 64)) {
        return ddl__fail(sentence, DDL_ERR_ARG,
                         "a DDL_OPTIMIZER_FN optimizer needs fn, and 0 to 64 state_slots; this one has fn %s and %d",
                         o.fn == NULL ? "NULL" : "set", o.state_slots);
    }
    bool adam = o.kind == DDL_ADAM || o.kind == DDL_ADAMW || o.kind == DDL_LAMB;
    o.learning_rate = ddl__or_default(o.learning_rate, adam ? 0.001 : o.kind == DDL_LARS ? 0.1 : 0.01);
    o.momentum = o.momentum < 0 ? 0 : ddl__or_default(o.momentum, 0.9);
    o.beta1 = o.beta1 < 0 ? 0 : ddl__or_default(o.beta1, 0.9);
    o.beta2 = ddl__or_default(o.beta2, 0.999);
    o.epsilon = ddl__or_default(o.epsilon, o.kind == DDL_LAMB ? 1e-6 : 1e-8);
    o.trust = ddl__or_default(o.trust, o.kind == DDL_LARS ? 0.001 : 1);
    DDL__TRY(ddl__optim_range(sentence, &o, "learning_rate", o.learning_rate, 1e30));
    DDL__TRY(ddl__optim_range(sentence, &o, "momentum", o.momentum, 1));
    DDL__TRY(ddl__optim_range(sentence, &o, "beta1", o.beta1, 1));
    DDL__TRY(ddl__optim_range(sentence, &o, "beta2", o.beta2, 1));
    DDL__TRY(ddl__optim_range(sentence, &o, "epsilon", o.epsilon, 1e30));
    DDL__TRY(ddl__optim_range(sentence, &o, "weight_decay", o.weight_decay, 1e30));
    DDL__TRY(ddl__optim_range(sentence, &o, "trust", o.trust, 1e30));
    *out = o;
    return DDL_OK;
}

/* x^n for n >= 0 by squaring: libm is not linked, and its last bits differ from one libc to the next. */
static inline double ddl__power(double x, int64_t n) {
    double result = 1;
    for (; n > 0; n >>= 1, x *= x) {
        result = n & 1 ? result * x : result;
    }
    return result;
}

static inline ddl__optim_scalars ddl__optim_scalars_of(const ddl_optimizer *o, const ddl_optimizer_part *part) {
    double rate = part->learning_rate, unbias1 = 1 / (1 - ddl__power(o->beta1, part->step));
    bool adam = o->kind == DDL_ADAM || o->kind == DDL_ADAMW, moments = adam || o->kind == DDL_LAMB;
    double beta1 = moments ? o->beta1 : o->momentum;
    return (ddl__optim_scalars){
        .rate = adam ? rate * unbias1 : rate,
        .decay = o->kind == DDL_ADAMW ? 0 : o->weight_decay,
        .keep = o->kind == DDL_ADAMW ? 1 - rate * o->weight_decay : 1,
        .beta1 = beta1,
        .fresh1 = 1 - beta1,
        .beta2 = o->beta2,
        .fresh2 = 1 - o->beta2,
        .unbias1 = unbias1,
        .unbias2 = 1 / ddl__sqrt(1 - ddl__power(o->beta2, part->step)),
        .epsilon = o->epsilon,
    };
}

/* Bytes of an element of its arrays. */
static inline size_t ddl__part_size(const ddl_optimizer_part *part) {
    return part->dtype == DDL_F64 ? sizeof(double) : sizeof(float);
}

/* The elements of a part from number `at` on, of arrays of f32 or f64. */
static inline void *ddl__part_at(const ddl_optimizer_part *part, const void *array, int64_t at) {
    return (char *)(uintptr_t)array + (size_t)at * ddl__part_size(part);
}

static inline ddl__optim_streams ddl__optim_streams_of(const ddl_optimizer *o, const ddl_optimizer_part *part) {
    int32_t slots = ddl__optim_slots(o);
    char *state = (char *)part->state;
    return (ddl__optim_streams){part->param, part->grad, slots > 0 ? state : NULL,
                                slots > 1 ? state + (size_t)part->state_stride * ddl__part_size(part) : NULL, NULL};
}

/* A block of a part: what is less than a run is padded with zeros, whose update is zero. */
static inline void ddl__lamb_block(ddl__cpu level, const ddl__optim_scalars *scalars, const ddl__optim_streams *s,
                                   double lanes[2][DDL__RUN], int64_t count) {
    int64_t whole = count - count % DDL__RUN;
    size_t rest = (size_t)(count - whole) * sizeof(float);
    float *m = (float *)s->m + whole, *v = (float *)s->v + whole, pad[4][DDL__RUN] = {{0}};
    DDL__AT_LEVEL(level, ddl__optim_lamb_sums)(scalars, s, lanes, whole);
    if (rest > 0) {
        memcpy(pad[0], (const float *)s->w + whole, rest);
        memcpy(pad[1], (const float *)s->g + whole, rest);
        memcpy(pad[2], m, rest);
        memcpy(pad[3], v, rest);
        ddl__optim_streams padded = {pad[0], pad[1], pad[2], pad[3], NULL};
        DDL__AT_LEVEL(level, ddl__optim_lamb_sums)(scalars, &padded, lanes, DDL__RUN);
        memcpy(m, pad[2], rest);
        memcpy(v, pad[3], rest);
    }
}

static inline void ddl__lamb_sums(ddl__cpu level, const ddl_optimizer *o, const ddl_optimizer_part *part,
                                  double *sums) {
    ddl__optim_scalars scalars = ddl__optim_scalars_of(o, part);
    ddl__optim_streams all = ddl__optim_streams_of(o, part);
    for (int64_t i = 0; i < part->count; i += DDL__BLOCK) {
        double lanes[2][DDL__RUN] = {{0}};
        ddl__optim_streams s = {(float *)all.w + i, (const float *)all.g + i, (float *)all.m + i, (float *)all.v + i,
                                NULL};
        ddl__lamb_block(level, &scalars, &s, lanes, DDL__MIN(part->count - i, DDL__BLOCK));
        sums[0] += ddl__lanes_sum(lanes[0]);
        sums[1] += ddl__lanes_sum(lanes[1]);
    }
}

/* The same in f64. */
static inline void ddl__lamb_sums_f64(ddl__cpu level, const ddl_optimizer *o, const ddl_optimizer_part *part,
                                      double *sums) {
    double update[DDL__BLOCK];
    ddl__optim_scalars scalars = ddl__optim_scalars_of(o, part);
    ddl__optim_streams all = ddl__optim_streams_of(o, part);
    for (int64_t i = 0; i < part->count; i += DDL__BLOCK) {
        int64_t count = DDL__MIN(part->count - i, DDL__BLOCK);
        ddl__optim_streams s = {(double *)all.w + i, (const double *)all.g + i, (double *)all.m + i,
                                (double *)all.v + i, update};
        ddl__optim_run(DDL__AT_LEVEL(level, ddl__optim_lamb_moments_f64), &scalars, s, count, sizeof(double));
        sums[0] += ddl__sum_squares_f64(s.w, count);
        sums[1] += ddl__sum_squares_f64(update, count);
    }
}

/* ddl__optim_sums of a block or less. */
static inline void ddl__optim_block_sums(ddl__cpu level, const ddl_optimizer *o, const ddl_optimizer_part *part,
                                         double out_sums[2]) {
    out_sums[0] = out_sums[1] = 0;
    if (o->kind == DDL_LARS && part->dtype == DDL_F64) {
        out_sums[0] = ddl__sum_squares_f64((const double *)(const void *)part->param, part->count);
        out_sums[1] = ddl__sum_squares_f64((const double *)(const void *)part->grad, part->count);
    } else if (o->kind == DDL_LAMB && part->dtype == DDL_F64) {
        ddl__lamb_sums_f64(level, o, part, out_sums);
    } else if (o->kind == DDL_LARS) {
        ddl__pair_squares_at(level, part->param, part->grad, part->count, out_sums);
    } else if (o->kind == DDL_LAMB) {
        ddl__lamb_sums(level, o, part, out_sums);
    }
}

/* Sums of a tensor that is done part by part: of whole stretches, and of the one under way, of which `done` elements
 * are in. */
typedef struct ddl__optim_tally {
    double before[2], stretch[2];
    int64_t done;
} ddl__optim_tally;

/* `count` elements of a part, from element `at` of it on. */
static inline ddl_optimizer_part ddl__part_of_part(const ddl_optimizer_part *part, int64_t at, int64_t count) {
    size_t bytes = (size_t)at * ddl__part_size(part);
    ddl_optimizer_part some = *part;
    some.offset += at;
    some.count = count;
    some.param = (float *)(void *)((char *)part->param + bytes);
    some.grad = (const float *)(const void *)((const char *)part->grad + bytes);
    some.state = part->state != NULL ? (float *)(void *)((char *)part->state + bytes) : NULL;
    return some;
}

/* The next part of a tensor; out_sums: of all so far. They are the same however the tensor is cut at blocks. */
static inline void ddl__optim_tally_add(ddl__optim_tally *t, ddl__cpu level, const ddl_optimizer *o,
                                        const ddl_optimizer_part *part, double out_sums[2]) {
    for (int64_t i = 0, some; i < part->count; i += some) {
        double found[2];
        some = DDL__MIN(part->count - i, DDL__BLOCK - t->done % DDL__BLOCK);
        ddl_optimizer_part cut = ddl__part_of_part(part, i, some);
        ddl__optim_block_sums(level, o, &cut, found);
        t->done = (t->done + some) % DDL__STRETCH;
        for (int32_t k = 0; k < 2; k++) {
            t->stretch[k] += found[k];
            t->before[k] += t->done == 0 ? t->stretch[k] : 0;
            t->stretch[k] = t->done == 0 ? 0 : t->stretch[k];
        }
    }
    for (int32_t k = 0; k < 2; k++) {
        out_sums[k] = t->before[k] + t->stretch[k];
    }
}

/* First half of a step of LARS and LAMB on a tensor: out_sums[0] = sum of w^2, out_sums[1] = sum of g^2 (LARS) or of
 * the update's squares (LAMB, whose moments take in the gradient here: call it once per step). Others: zeros. */
static inline void ddl__optim_sums_at(ddl__cpu level, const ddl_optimizer *o, const ddl_optimizer_part *part,
                                      double out_sums[2]) {
    ddl__optim_tally tally = {.done = 0};
    ddl__optim_tally_add(&tally, level, o, part, out_sums);
}

static inline void ddl__optim_sums(const ddl_optimizer *o, const ddl_optimizer_part *part, double out_sums[2]) {
    ddl__optim_sums_at(ddl__cpu_level(), o, part, out_sums);
}

/* What LARS and LAMB multiply the learning rate by. */
static inline double ddl__optim_trust(const ddl_optimizer *o, const double sums[2]) {
    double w = ddl__sqrt(sums[0]), other = ddl__sqrt(sums[1]);
    if (w == 0 || other == 0) {
        return 1;
    }
    return o->trust * w / (o->kind == DDL_LARS ? other + o->weight_decay * w : other);
}

#define DDL__OPTIM_OF(level, name, wide)                                                                               \
    ((wide) ? DDL__AT_LEVEL(level, ddl__optim_##name##_f64) : DDL__AT_LEVEL(level, ddl__optim_##name##_f32))
static inline ddl__optim_fn ddl__optim_kernel(ddl__cpu level, ddl_optimizer_kind kind, bool wide) {
    switch (kind) {
    case DDL_SGD: return DDL__OPTIM_OF(level, sgd, wide);
    case DDL_MOMENTUM: return DDL__OPTIM_OF(level, momentum, wide);
    case DDL_NESTEROV: return DDL__OPTIM_OF(level, nesterov, wide);
    case DDL_ADAM:
    case DDL_ADAMW: return DDL__OPTIM_OF(level, adam, wide);
    case DDL_LARS: return DDL__OPTIM_OF(level, lars, wide);
    case DDL_LAMB: return DDL__OPTIM_OF(level, lamb, wide);
    case DDL_OPTIMIZER_FN: break;
    }
    return NULL;
}

/* One step on a part of a tensor. sums: of the whole tensor, for LARS and LAMB; NULL for the others. The arrays of the
 * part overlap nowhere; count may be 0. optimizer comes from ddl__optim_init. */
static inline void ddl__optim_step_at(ddl__cpu level, const ddl_optimizer *o, const ddl_optimizer_part *part,
                                      const double *sums) {
    if (part->count <= 0) {
        return;
    }
    if (o->kind == DDL_OPTIMIZER_FN) {
        o->fn(o->user, part);
        return;
    }
    ddl_optimizer_part scaled = *part;
    if (ddl__optim_needs_sums(o)) {
        scaled.learning_rate *= ddl__optim_trust(o, sums);
    }
    ddl__optim_streams streams = ddl__optim_streams_of(o, part);
    if (o->kind == DDL_LAMB) {
        streams.g = NULL; /* it is in the moments already */
    }
    ddl__optim_scalars scalars = ddl__optim_scalars_of(o, &scaled);
    ddl__optim_run(ddl__optim_kernel(level, o->kind, part->dtype == DDL_F64), &scalars, streams, part->count,
                   ddl__part_size(part));
}

static inline void ddl__optim_step(const ddl_optimizer *o, const ddl_optimizer_part *part, const double *sums) {
    ddl__optim_step_at(ddl__cpu_level(), o, part, sums);
}

#endif /* DDL_OPTIM_OPTIM_H */

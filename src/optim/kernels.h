/* optim/kernels: one step of each optimizer over arrays, in vectors. Formulas and papers stand in api.h.
 * Must not know: tensors, shards, configs. */
#ifndef DDL_OPTIM_KERNELS_H
#define DDL_OPTIM_KERNELS_H

#include "vectors.h"

/* The numbers of one step, rounded once from double. */
typedef struct ddl__optim_scalars {
    float rate;          /* what the update is multiplied by */
    float decay;         /* of the weight, added to the gradient (LAMB: to the update) */
    float keep;          /* AdamW: what the weight is multiplied by */
    float beta1, fresh1; /* the momentum, or beta1; and 1 - beta1 */
    float beta2, fresh2;
    float unbias1; /* LAMB: 1 / (1 - beta1^t); for Adam it is inside rate */
    float unbias2; /* 1 / sqrt(1 - beta2^t) */
    float epsilon;
} ddl__optim_scalars;

/* The arrays of one step: weight, gradient, first and second moment, and (LAMB) where the update goes. */
typedef struct ddl__optim_streams {
    float *w;
    const float *g;
    float *m, *v, *r;
} ddl__optim_streams;

/* count is a multiple of DDL__RUN. The arrays overlap nowhere. */
typedef void (*ddl__optim_fn)(const ddl__optim_scalars *scalars, const ddl__optim_streams *streams, int64_t count);

#define DDL__GET(W, x) (*(const ddl__f32_v##W *)(const void *)(s.x + i))
#define DDL__PUT(W, x, value) (*(ddl__f32_v##W *)(void *)(s.x + i) = (value))

/* g + wd * w, which the weight decay of all but AdamW and LAMB begins with. */
#define DDL__OPTIM_DECAYED(W)                                                                                          \
    ddl__f32_v##W w = DDL__GET(W, w), g = DDL__GET(W, g), t;                                                           \
    DDL__MUL(t, w, k.decay);                                                                                           \
    g += t

#define DDL__OPTIM_SGD(W)                                                                                              \
    DDL__OPTIM_DECAYED(W);                                                                                             \
    DDL__MUL(t, g, k.rate);                                                                                            \
    DDL__PUT(W, w, w - t);

#define DDL__OPTIM_MOMENTUM(W)                                                                                         \
    DDL__OPTIM_DECAYED(W);                                                                                             \
    DDL__MUL(t, DDL__GET(W, m), k.beta1);                                                                              \
    g += t;                                                                                                            \
    DDL__PUT(W, m, g);                                                                                                 \
    DDL__MUL(t, g, k.rate);                                                                                            \
    DDL__PUT(W, w, w - t);

#define DDL__OPTIM_NESTEROV(W)                                                                                         \
    DDL__OPTIM_DECAYED(W);                                                                                             \
    ddl__f32_v##W m;                                                                                                   \
    DDL__MUL(m, DDL__GET(W, m), k.beta1);                                                                              \
    m += g;                                                                                                            \
    DDL__PUT(W, m, m);                                                                                                 \
    DDL__MUL(t, m, k.beta1);                                                                                           \
    t += g;                                                                                                            \
    DDL__MUL(t, t, k.rate);                                                                                            \
    DDL__PUT(W, w, w - t);

/* rate holds the trust ratio too: it goes into the momentum, not onto it. */
#define DDL__OPTIM_LARS(W)                                                                                             \
    DDL__OPTIM_DECAYED(W);                                                                                             \
    ddl__f32_v##W m;                                                                                                   \
    DDL__MUL(m, DDL__GET(W, m), k.beta1);                                                                              \
    DDL__MUL(t, g, k.rate);                                                                                            \
    m += t;                                                                                                            \
    DDL__PUT(W, m, m);                                                                                                 \
    DDL__PUT(W, w, w - m);

/* Both moments take in g. */
#define DDL__OPTIM_MOMENTS(W)                                                                                          \
    ddl__f32_v##W m, v;                                                                                                \
    DDL__MUL(m, DDL__GET(W, m), k.beta1);                                                                              \
    DDL__MUL(t, g, k.fresh1);                                                                                          \
    m += t;                                                                                                            \
    DDL__PUT(W, m, m);                                                                                                 \
    DDL__MUL(t, g, g);                                                                                                 \
    DDL__MUL(t, t, k.fresh2);                                                                                          \
    DDL__MUL(v, DDL__GET(W, v), k.beta2);                                                                              \
    v += t;                                                                                                            \
    DDL__PUT(W, v, v)

/* t = sqrt(v / (1 - beta2^t)) + epsilon */
#define DDL__OPTIM_ROOT(W, t, v)                                                                                       \
    do {                                                                                                               \
        (t) = DDL__SQRT_##W(v);                                                                                        \
        DDL__MUL(t, t, k.unbias2);                                                                                     \
        (t) += k.epsilon;                                                                                              \
    } while (0)

/* Adam and AdamW: the one has keep 1, the other decay 0. */
#define DDL__OPTIM_ADAM(W)                                                                                             \
    DDL__OPTIM_DECAYED(W);                                                                                             \
    DDL__OPTIM_MOMENTS(W);                                                                                             \
    DDL__OPTIM_ROOT(W, t, v);                                                                                          \
    DDL__MUL(m, m, k.rate);                                                                                            \
    DDL__MUL(w, w, k.keep);                                                                                            \
    DDL__PUT(W, w, w - m / t);

/* r = m^ / (sqrt(v^) + epsilon) + wd * w, from w, m and v: the same bits each time. */
#define DDL__OPTIM_UPDATE(W, w, m, v, t)                                                                               \
    do {                                                                                                               \
        DDL__OPTIM_ROOT(W, t, v);                                                                                      \
        DDL__MUL(m, m, k.unbias1);                                                                                     \
        (t) = (m) / (t);                                                                                               \
        DDL__MUL(m, w, k.decay);                                                                                       \
        (t) += (m);                                                                                                    \
    } while (0)

/* LAMB: the moments first, the update only for its norm; then, with both norms known, the weight. Doing the update
 * twice costs less than storing it. */
#define DDL__OPTIM_LAMB_MOMENTS(W)                                                                                     \
    __builtin_prefetch(s.w + i + DDL__STREAM_AHEAD);                                                                   \
    __builtin_prefetch(s.g + i + DDL__STREAM_AHEAD);                                                                   \
    __builtin_prefetch(s.m + i + DDL__STREAM_AHEAD, 1);                                                                \
    __builtin_prefetch(s.v + i + DDL__STREAM_AHEAD, 1);                                                                \
    ddl__f32_v##W w = DDL__GET(W, w), g = DDL__GET(W, g), t;                                                           \
    DDL__OPTIM_MOMENTS(W);                                                                                             \
    DDL__OPTIM_UPDATE(W, w, m, v, t);                                                                                  \
    DDL__PUT(W, r, t);
#define DDL__OPTIM_LAMB(W)                                                                                             \
    ddl__f32_v##W w = DDL__GET(W, w), m = DDL__GET(W, m), v = DDL__GET(W, v), t;                                       \
    DDL__OPTIM_UPDATE(W, w, m, v, t);                                                                                  \
    DDL__MUL(t, t, k.rate);                                                                                            \
    DDL__PUT(W, w, w - t);

/* Scalars and pointers are copied, because a store into an array may alias anything behind a pointer. */
#define DDL__DEFINE_OPTIM(L, target, W, name, BODY)                                                                    \
    target static void ddl__optim_##name##_##L(const ddl__optim_scalars *scalars, const ddl__optim_streams *streams,   \
                                               int64_t count) {                                                        \
        const ddl__optim_scalars k = *scalars;                                                                         \
        const ddl__optim_streams s = *streams;                                                                         \
        for (int64_t i = 0; i < count; i += (W) / 4) {                                                                 \
            BODY(W)                                                                                                    \
        }                                                                                                              \
        DDL__LEAVE_##L;                                                                                                \
    }
#define DDL__DEFINE_OPTIMS(L, target, W)                                                                               \
    DDL__DEFINE_OPTIM(L, target, W, sgd, DDL__OPTIM_SGD)                                                               \
    DDL__DEFINE_OPTIM(L, target, W, momentum, DDL__OPTIM_MOMENTUM)                                                     \
    DDL__DEFINE_OPTIM(L, target, W, nesterov, DDL__OPTIM_NESTEROV)                                                     \
    DDL__DEFINE_OPTIM(L, target, W, adam, DDL__OPTIM_ADAM)                                                             \
    DDL__DEFINE_OPTIM(L, target, W, lars, DDL__OPTIM_LARS)                                                             \
    DDL__DEFINE_OPTIM(L, target, W, lamb_moments, DDL__OPTIM_LAMB_MOMENTS)                                             \
    DDL__DEFINE_OPTIM(L, target, W, lamb, DDL__OPTIM_LAMB)
DDL__DEFINE_OPTIMS(portable, , 16)
#if defined(__x86_64__)
DDL__DEFINE_OPTIMS(avx2, DDL__AVX2, 32)
DDL__DEFINE_OPTIMS(avx512, DDL__AVX512, 64)
#endif

/* Runs a kernel on any count: what is less than a run goes through padded copies, so that the last elements get the
 * bits they would get in the middle. Arrays that a kernel does not use are NULL. */
static inline void ddl__optim_run(ddl__optim_fn kernel, const ddl__optim_scalars *scalars, ddl__optim_streams s,
                                  int64_t count) {
    int64_t whole = count - count % DDL__RUN;
    size_t rest = (size_t)(count - whole) * sizeof(float);
    kernel(scalars, &s, whole);
    if (rest == 0) {
        return;
    }
    float pad[5][DDL__RUN] = {{0}};
    const float *arrays[5] = {s.w, s.g, s.m, s.v, s.r};
    for (int a = 0; a < 5; a++) {
        if (arrays[a] != NULL) {
            memcpy(pad[a], arrays[a] + whole, rest);
        }
    }
    kernel(scalars, &(ddl__optim_streams){pad[0], pad[1], pad[2], pad[3], pad[4]}, DDL__RUN);
    float *written[5] = {s.w, NULL, s.m, s.v, s.r};
    for (int a = 0; a < 5; a++) {
        if (written[a] != NULL) {
            memcpy(written[a] + whole, pad[a], rest);
        }
    }
}

#endif /* DDL_OPTIM_KERNELS_H */

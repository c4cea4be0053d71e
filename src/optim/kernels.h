/* optim/kernels: one step of each optimizer over arrays, in vectors. Formulas and papers stand in api.h.
 * Must not know: tensors, shards, configs. */
#ifndef DDL_OPTIM_KERNELS_H
#define DDL_OPTIM_KERNELS_H

#include "vectors.h"

/* The numbers of one step. Kernels round each once to the type of the arrays. */
typedef struct ddl__optim_scalars {
    double rate;         /* what the update is multiplied by */
    double decay;         /* of the weight, added to the gradient (LAMB: to the update) */
    double keep;         /* AdamW: what the weight is multiplied by */
    double beta1, fresh1; /* the momentum, or beta1; and 1 - beta1 */
    double beta2, fresh2;
    double unbias1; /* LAMB: 1 / (1 - beta1^t); for Adam it is inside rate */
    double unbias2; /* 1 / sqrt(1 - beta2^t) */
    double epsilon;
} ddl__optim_scalars;

/* The arrays of one step, of f32 or f64: weight, gradient, both moments, and (LAMB) where the update goes. */
typedef struct ddl__optim_streams {
    void *w;
    const void *g;
    void *m, *v, *r;
} ddl__optim_streams;

/* count is a multiple of DDL__RUN. The arrays overlap nowhere. */
typedef void (*ddl__optim_fn)(const ddl__optim_scalars *scalars, const ddl__optim_streams *streams, int64_t count);

/* T: f32_v16 and so on, of that many bytes; i: in bytes. */
#define DDL__GET(T, x) (*(const ddl__##T *)(const void *)((const char *)s.x + i))
#define DDL__PUT(T, x, value) (*(ddl__##T *)(void *)((char *)s.x + i) = (value))

/* g + wd * w, which the weight decay of all but AdamW and LAMB begins with. */
#define DDL__OPTIM_DECAYED(T)                                                                                          \
    ddl__##T w = DDL__GET(T, w), g = DDL__GET(T, g), t;                                                           \
    DDL__MUL(t, w, k.decay);                                                                                           \
    g += t

#define DDL__OPTIM_SGD(T)                                                                                              \
    DDL__OPTIM_DECAYED(T);                                                                                             \
    DDL__MUL(t, g, k.rate);                                                                                            \
    DDL__PUT(T, w, w - t);

#define DDL__OPTIM_MOMENTUM(T)                                                                                         \
    DDL__OPTIM_DECAYED(T);                                                                                             \
    DDL__MUL(t, DDL__GET(T, m), k.beta1);                                                                              \
    g += t;                                                                                                            \
    DDL__PUT(T, m, g);                                                                                                 \
    DDL__MUL(t, g, k.rate);                                                                                            \
    DDL__PUT(T, w, w - t);

#define DDL__OPTIM_NESTEROV(T)                                                                                         \
    DDL__OPTIM_DECAYED(T);                                                                                             \
    ddl__##T m;                                                                                                   \
    DDL__MUL(m, DDL__GET(T, m), k.beta1);                                                                              \
    m += g;                                                                                                            \
    DDL__PUT(T, m, m);                                                                                                 \
    DDL__MUL(t, m, k.beta1);                                                                                           \
    t += g;                                                                                                            \
    DDL__MUL(t, t, k.rate);                                                                                            \
    DDL__PUT(T, w, w - t);

/* rate holds the trust ratio too: it goes into the momentum, not onto it. */
#define DDL__OPTIM_LARS(T)                                                                                             \
    DDL__OPTIM_DECAYED(T);                                                                                             \
    ddl__##T m;                                                                                                   \
    DDL__MUL(m, DDL__GET(T, m), k.beta1);                                                                              \
    DDL__MUL(t, g, k.rate);                                                                                            \
    m += t;                                                                                                            \
    DDL__PUT(T, m, m);                                                                                                 \
    DDL__PUT(T, w, w - m);

/* Both moments take in g. */
#define DDL__OPTIM_MOMENTS(T)                                                                                          \
    ddl__##T m, v;                                                                                                \
    DDL__MUL(m, DDL__GET(T, m), k.beta1);                                                                              \
    DDL__MUL(t, g, k.fresh1);                                                                                          \
    m += t;                                                                                                            \
    DDL__PUT(T, m, m);                                                                                                 \
    DDL__MUL(t, g, g);                                                                                                 \
    DDL__MUL(t, t, k.fresh2);                                                                                          \
    DDL__MUL(v, DDL__GET(T, v), k.beta2);                                                                              \
    v += t;                                                                                                            \
    DDL__PUT(T, v, v)

/* t = sqrt(v / (1 - beta2^t)) + epsilon */
#define DDL__OPTIM_ROOT(T, t, v)                                                                                       \
    do {                                                                                                               \
        (t) = DDL__SQRT_##T(v);                                                                                        \
        DDL__MUL(t, t, k.unbias2);                                                                                     \
        (t) += k.epsilon;                                                                                              \
    } while (0)

/* Adam and AdamW: the one has keep 1, the other decay 0. */
#define DDL__OPTIM_ADAM(T)                                                                                             \
    DDL__OPTIM_DECAYED(T);                                                                                             \
    DDL__OPTIM_MOMENTS(T);                                                                                             \
    DDL__OPTIM_ROOT(T, t, v);                                                                                          \
    DDL__MUL(m, m, k.rate);                                                                                            \
    DDL__MUL(w, w, k.keep);                                                                                            \
    DDL__PUT(T, w, w - m / t);

/* r = m^ / (sqrt(v^) + epsilon) + wd * w, from w, m and v: the same bits each time. */
#define DDL__OPTIM_UPDATE(T, w, m, v, t)                                                                               \
    do {                                                                                                               \
        DDL__OPTIM_ROOT(T, t, v);                                                                                      \
        DDL__MUL(m, m, k.unbias1);                                                                                     \
        (t) = (m) / (t);                                                                                               \
        DDL__MUL(m, w, k.decay);                                                                                       \
        (t) += (m);                                                                                                    \
    } while (0)

/* LAMB: the moments first, the update only for its norm; then, with both norms known, the weight. Doing the update
 * twice costs less than storing it. */
#define DDL__OPTIM_LAMB_FIRST(T)                                                                                       \
    __builtin_prefetch((const char *)s.w + i + 4 * DDL__STREAM_AHEAD);                                                 \
    __builtin_prefetch((const char *)s.g + i + 4 * DDL__STREAM_AHEAD);                                                 \
    __builtin_prefetch((const char *)s.m + i + 4 * DDL__STREAM_AHEAD, 1);                                              \
    __builtin_prefetch((const char *)s.v + i + 4 * DDL__STREAM_AHEAD, 1);                                              \
    ddl__##T w = DDL__GET(T, w), g = DDL__GET(T, g), t;                                                           \
    DDL__OPTIM_MOMENTS(T);                                                                                             \
    DDL__OPTIM_UPDATE(T, w, m, v, t)
#define DDL__OPTIM_LAMB_MOMENTS(T)                                                                                     \
    DDL__OPTIM_LAMB_FIRST(T);                                                                                          \
    DDL__PUT(T, r, t);
#define DDL__OPTIM_LAMB(T)                                                                                             \
    ddl__##T w = DDL__GET(T, w), m = DDL__GET(T, m), v = DDL__GET(T, v), t;                                       \
    DDL__OPTIM_UPDATE(T, w, m, v, t);                                                                                  \
    DDL__MUL(t, t, k.rate);                                                                                            \
    DDL__PUT(T, w, w - t);

/* Scalars and pointers are copied, because a store into an array may alias anything behind a pointer. N: f32 or f64, of
 * E; W: bytes of a vector. */
#define DDL__OPTIM_COPIES(E)                                                                                           \
    const struct {                                                                                                     \
        E rate, decay, keep, beta1, fresh1, beta2, fresh2, unbias1, unbias2, epsilon;                                  \
    } k = {(E)given->rate,   (E)given->decay,  (E)given->keep,    (E)given->beta1,   (E)given->fresh1,                 \
           (E)given->beta2,  (E)given->fresh2, (E)given->unbias1, (E)given->unbias2, (E)given->epsilon};               \
    const ddl__optim_streams s = *streams
#define DDL__DEFINE_OPTIM(L, target, W, N, E, name, BODY)                                                              \
    target static void ddl__optim_##name##_##N##_##L(const ddl__optim_scalars *given,                                  \
                                                     const ddl__optim_streams *streams, int64_t count) {               \
        DDL__OPTIM_COPIES(E);                                                                                          \
        for (int64_t i = 0; i < count * (int64_t)sizeof(E); i += (W)) {                                                \
            BODY(N##_v##W)                                                                                             \
        }                                                                                                              \
        DDL__LEAVE_##L;                                                                                                \
    }
/* The moments of LAMB in f32, with the squares of weight and update added to lanes as ddl__squares does. In one loop,
 * because the sums can be made while the processor divides. */
#define DDL__DEFINE_LAMB_SUMS(L, target, W)                                                                            \
    target static void ddl__optim_lamb_sums_##L(const ddl__optim_scalars *given, const ddl__optim_streams *streams,    \
                                                double lanes[2][DDL__RUN], int64_t count) {                            \
        DDL__OPTIM_COPIES(float);                                                                                      \
        ddl__f64_v##W sum_x[DDL__SQUARES_VECTORS(W)], sum_y[DDL__SQUARES_VECTORS(W)];                                  \
        DDL__EACH_OF_8(DDL__SQUARES_GET, W)                                                                            \
        for (int64_t run = 0; run < count; run += DDL__RUN) {                                                          \
            float y[DDL__RUN];                                                                                         \
            const float *x = (const float *)s.w + run;                                                                 \
            for (int64_t i = 4 * run; i < 4 * (run + DDL__RUN); i += (W)) {                                            \
                DDL__OPTIM_LAMB_FIRST(f32_v##W);                                                                       \
                *(ddl__f32_v##W *)(void *)(y + (i / 4 - run)) = t;                                                     \
            }                                                                                                          \
            const int64_t i = 0;                                                                                       \
            DDL__EACH_OF_8(DDL__SQUARES_STEP, W)                                                                       \
        }                                                                                                              \
        DDL__EACH_OF_8(DDL__SQUARES_PUT, W)                                                                            \
        DDL__LEAVE_##L;                                                                                                \
    }
#define DDL__DEFINE_OPTIMS(L, target, W, N, E)                                                                         \
    DDL__DEFINE_OPTIM(L, target, W, N, E, sgd, DDL__OPTIM_SGD)                                                         \
    DDL__DEFINE_OPTIM(L, target, W, N, E, momentum, DDL__OPTIM_MOMENTUM)                                               \
    DDL__DEFINE_OPTIM(L, target, W, N, E, nesterov, DDL__OPTIM_NESTEROV)                                               \
    DDL__DEFINE_OPTIM(L, target, W, N, E, adam, DDL__OPTIM_ADAM)                                                       \
    DDL__DEFINE_OPTIM(L, target, W, N, E, lars, DDL__OPTIM_LARS)                                                       \
    DDL__DEFINE_OPTIM(L, target, W, N, E, lamb, DDL__OPTIM_LAMB)
#define DDL__DEFINE_OPTIMS_OF(L, target, W)                                                                            \
    DDL__DEFINE_OPTIMS(L, target, W, f32, float)                                                                       \
    DDL__DEFINE_OPTIMS(L, target, W, f64, double)                                                                      \
    DDL__DEFINE_LAMB_SUMS(L, target, W)                                                                                \
    DDL__DEFINE_OPTIM(L, target, W, f64, double, lamb_moments, DDL__OPTIM_LAMB_MOMENTS)
DDL__DEFINE_OPTIMS_OF(portable, , 16)
#if defined(__x86_64__)
DDL__DEFINE_OPTIMS_OF(avx2, DDL__AVX2, 32)
DDL__DEFINE_OPTIMS_OF(avx512, DDL__AVX512, 64)
#endif

/* Runs a kernel on any count: what is less than a run goes through padded copies, so that the last elements get the
 * bits they would get in the middle. Arrays that a kernel does not use are NULL. size: of an element. */
static inline void ddl__optim_run(ddl__optim_fn kernel, const ddl__optim_scalars *scalars, ddl__optim_streams s,
                                  int64_t count, size_t size) {
    int64_t whole = count - count % DDL__RUN;
    size_t rest = (size_t)(count - whole) * size, done = (size_t)whole * size;
    kernel(scalars, &s, whole);
    if (rest == 0) {
        return;
    }
    double pad[5][DDL__RUN] = {{0}};
    const void *arrays[5] = {s.w, s.g, s.m, s.v, s.r};
    for (int a = 0; a < 5; a++) {
        if (arrays[a] != NULL) {
            memcpy(pad[a], (const char *)arrays[a] + done, rest);
        }
    }
    kernel(scalars, &(ddl__optim_streams){pad[0], pad[1], pad[2], pad[3], pad[4]}, DDL__RUN);
    void *written[5] = {s.w, NULL, s.m, s.v, s.r};
    for (int a = 0; a < 5; a++) {
        if (written[a] != NULL) {
            memcpy((char *)written[a] + done, pad[a], rest);
        }
    }
}

#endif /* DDL_OPTIM_KERNELS_H */

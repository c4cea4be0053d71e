/* kernel_optim: one step of each optimizer, element by element, and sums of squares. The formulas are those of
 * src/optim/kernels.h, with every product rounded before it is added, so that a step on a device gives the bits of a
 * step on the host. It must not know configs. */
#ifndef CUDA_KERNEL_OPTIM_H
#define CUDA_KERNEL_OPTIM_H

#include "kernel_reduce.h"

/* One element of each array. */
template <class T> struct cuda_element {
    T w, g, m, v, r;
};
template <class T> struct cuda_scalars_of;
template <> struct cuda_scalars_of<float> {
    typedef cuda_scalars_f32 type;
};
template <> struct cuda_scalars_of<double> {
    typedef cuda_scalars_f64 type;
};
/* Which arrays a kernel reads, and which it writes. */
enum { CUDA_W = 1, CUDA_G = 2, CUDA_M = 4, CUDA_V = 8, CUDA_R = 16 };

CUDA_INLINE float CUDA_MUL(float x, float y) { return __fmul_rn(x, y); }
CUDA_INLINE float CUDA_ADD(float x, float y) { return __fadd_rn(x, y); }
CUDA_INLINE float CUDA_SUB(float x, float y) { return __fsub_rn(x, y); }
CUDA_INLINE float CUDA_DIV(float x, float y) { return __fdiv_rn(x, y); }
CUDA_INLINE float CUDA_SQRT(float x) { return __fsqrt_rn(x); }
CUDA_INLINE double CUDA_MUL(double x, double y) { return __dmul_rn(x, y); }
CUDA_INLINE double CUDA_ADD(double x, double y) { return __dadd_rn(x, y); }
CUDA_INLINE double CUDA_SUB(double x, double y) { return __dsub_rn(x, y); }
CUDA_INLINE double CUDA_DIV(double x, double y) { return __ddiv_rn(x, y); }
CUDA_INLINE double CUDA_SQRT(double x) { return __dsqrt_rn(x); }

/* g + wd * w */
template <class K, class T> CUDA_INLINE T cuda_decayed(const K &k, const cuda_element<T> &x) {
    return CUDA_ADD(x.g, CUDA_MUL(x.w, k.decay));
}

struct cuda_sgd {
    enum { READS = CUDA_W | CUDA_G, WRITES = CUDA_W };
    template <class K, class T> CUDA_INLINE void step(const K &k, cuda_element<T> &x) {
        x.w = CUDA_SUB(x.w, CUDA_MUL(cuda_decayed(k, x), k.rate));
    }
};

struct cuda_momentum {
    enum { READS = CUDA_W | CUDA_G | CUDA_M, WRITES = CUDA_W | CUDA_M };
    template <class K, class T> CUDA_INLINE void step(const K &k, cuda_element<T> &x) {
        x.m = CUDA_ADD(cuda_decayed(k, x), CUDA_MUL(x.m, k.beta1));
        x.w = CUDA_SUB(x.w, CUDA_MUL(x.m, k.rate));
    }
};

struct cuda_nesterov {
    enum { READS = CUDA_W | CUDA_G | CUDA_M, WRITES = CUDA_W | CUDA_M };
    template <class K, class T> CUDA_INLINE void step(const K &k, cuda_element<T> &x) {
        T g = cuda_decayed(k, x);
        x.m = CUDA_ADD(CUDA_MUL(x.m, k.beta1), g);
        x.w = CUDA_SUB(x.w, CUDA_MUL(CUDA_ADD(CUDA_MUL(x.m, k.beta1), g), k.rate));
    }
};

/* rate holds the trust ratio too: it goes into the momentum, not onto it. */
struct cuda_lars {
    enum { READS = CUDA_W | CUDA_G | CUDA_M, WRITES = CUDA_W | CUDA_M };
    template <class K, class T> CUDA_INLINE void step(const K &k, cuda_element<T> &x) {
        x.m = CUDA_ADD(CUDA_MUL(x.m, k.beta1), CUDA_MUL(cuda_decayed(k, x), k.rate));
        x.w = CUDA_SUB(x.w, x.m);
    }
};

template <class K, class T> CUDA_INLINE void cuda_moments(const K &k, cuda_element<T> &x, T g) {
    x.m = CUDA_ADD(CUDA_MUL(x.m, k.beta1), CUDA_MUL(g, k.fresh1));
    x.v = CUDA_ADD(CUDA_MUL(x.v, k.beta2), CUDA_MUL(CUDA_MUL(g, g), k.fresh2));
}
/* sqrt(v / (1 - beta2^t)) + epsilon */
template <class K, class T> CUDA_INLINE T cuda_root(const K &k, T v) {
    return CUDA_ADD(CUDA_MUL(CUDA_SQRT(v), k.unbias2), k.epsilon);
}

/* Adam and AdamW: the one has keep 1, the other decay 0. */
struct cuda_adam {
    enum { READS = CUDA_W | CUDA_G | CUDA_M | CUDA_V, WRITES = CUDA_W | CUDA_M | CUDA_V };
    template <class K, class T> CUDA_INLINE void step(const K &k, cuda_element<T> &x) {
        cuda_moments(k, x, cuda_decayed(k, x));
        T update = CUDA_DIV(CUDA_MUL(x.m, k.rate), cuda_root(k, x.v));
        x.w = CUDA_SUB(CUDA_MUL(x.w, k.keep), update);
    }
};

/* LAMB: the moments, and the update for its norm alone; then, with both norms known, the weight. */
template <class K, class T> CUDA_INLINE T cuda_lamb_update(const K &k, const cuda_element<T> &x) {
    T r = CUDA_DIV(CUDA_MUL(x.m, k.unbias1), cuda_root(k, x.v));
    return CUDA_ADD(r, CUDA_MUL(x.w, k.decay));
}
struct cuda_lamb_moments {
    enum { READS = CUDA_W | CUDA_G | CUDA_M | CUDA_V, WRITES = CUDA_M | CUDA_V | CUDA_R };
    template <class K, class T> CUDA_INLINE void step(const K &k, cuda_element<T> &x) {
        cuda_moments(k, x, x.g);
        x.r = cuda_lamb_update(k, x);
    }
};
struct cuda_lamb {
    enum { READS = CUDA_W | CUDA_M | CUDA_V, WRITES = CUDA_W };
    template <class K, class T> CUDA_INLINE void step(const K &k, cuda_element<T> &x) {
        x.w = CUDA_SUB(x.w, CUDA_MUL(cuda_lamb_update(k, x), k.rate));
    }
};

template <class O, class T, class K> CUDA_INLINE void cuda_optim_one(const cuda_optim_args &a, const K &k, int64_t i) {
    T *w = (T *)a.w, *m = (T *)a.m, *v = (T *)a.v;
    cuda_element<T> x = {0, 0, 0, 0, 0};
    x.w = O::READS & CUDA_W ? w[i] : 0;
    x.g = O::READS & CUDA_G ? ((const T *)a.g)[i] : 0;
    x.m = O::READS & CUDA_M ? m[i] : 0;
    x.v = O::READS & CUDA_V ? v[i] : 0;
    O::step(k, x);
    if (O::WRITES & CUDA_W) w[i] = x.w;
    if (O::WRITES & CUDA_M) m[i] = x.m;
    if (O::WRITES & CUDA_V) v[i] = x.v;
    if (O::WRITES & CUDA_R) ((T *)a.r)[i] = x.r;
}

/* 16 bytes of each of the arrays, from their first whole word on. */
template <class T> struct alignas(16) cuda_whole {
    T at[16 / sizeof(T)];
};
template <class O, class T, class K>
CUDA_INLINE void cuda_optim_word(const cuda_optim_args &a, const K &k, int64_t head, int64_t i) {
    typedef cuda_whole<T> word;
    const word none = {};
    word *pw = (word *)((T *)a.w + head) + i, *pm = (word *)((T *)a.m + head) + i, *pv = (word *)((T *)a.v + head) + i;
    word w = O::READS & CUDA_W ? *pw : none, m = O::READS & CUDA_M ? *pm : none, v = O::READS & CUDA_V ? *pv : none;
    word g = O::READS & CUDA_G ? ((const word *)((const T *)a.g + head))[i] : none, r = none;
#pragma unroll
    for (int j = 0; j < (int)(16 / sizeof(T)); j++) {
        cuda_element<T> x = {w.at[j], g.at[j], m.at[j], v.at[j], 0};
        O::step(k, x);
        w.at[j] = x.w;
        m.at[j] = x.m;
        v.at[j] = x.v;
        r.at[j] = x.r;
    }
    if (O::WRITES & CUDA_W) *pw = w;
    if (O::WRITES & CUDA_M) *pm = m;
    if (O::WRITES & CUDA_V) *pv = v;
    if (O::WRITES & CUDA_R) ((word *)((T *)a.r + head))[i] = r;
}

template <class O, class T>
CUDA_INLINE void cuda_optim(const cuda_optim_args &a, const typename cuda_scalars_of<T>::type &k) {
    const cuda_range &r = a.range;
    const int each = 16 / sizeof(T);
    const int64_t words = r.aligned ? (r.count - r.head) / each : 0;
#pragma unroll 2
    for (int64_t i = cuda_thread(); i < words; i += cuda_threads()) {
        cuda_optim_word<O, T>(a, k, r.head, i);
    }
    const int64_t head = r.aligned ? r.head : 0;
    for (int64_t i = cuda_thread(); i < r.count - each * words; i += cuda_threads()) {
        cuda_optim_one<O, T>(a, k, i < head ? i : each * words + i);
    }
}

/* ---- sums of squares ---- */

/* The square of a float is exact in double, so that there is one rounding either way. */
CUDA_INLINE double cuda_add_square(double sum, float x) { return __fma_rn((double)x, (double)x, sum); }
CUDA_INLINE double cuda_add_square(double sum, double x) { return __dadd_rn(sum, __dmul_rn(x, x)); }

/* The sum over elements i, i + 16, ... of a block of which `count` are there, i the thread's place in half a warp. Many
 * are loaded before they are added, since each addition waits for the one before. */
template <class T> CUDA_INLINE double cuda_squares_lane(const T *x, int64_t count) {
    const int ahead = 16;
    const T *end = x + count, *at = x + threadIdx.x % 16;
    double sum = 0;
#pragma unroll 1
    for (; at < end - 16 * (ahead - 1); at += 16 * ahead) {
        T some[ahead];
#pragma unroll
        for (int j = 0; j < ahead; j++) {
            some[j] = at[16 * j];
        }
#pragma unroll
        for (int j = 0; j < ahead; j++) {
            sum = cuda_add_square(sum, some[j]);
        }
    }
#pragma unroll 1
    for (; at < end; at += 16) {
        sum = cuda_add_square(sum, *at);
    }
    return sum;
}

/* In the order of the host: a block of threads does a stretch, half a warp a block of it, whose sixteen sums are added
 * in their order, as are those of the blocks. */
template <class T> CUDA_INLINE void cuda_squares(const cuda_squares_args &a) {
    __shared__ double sums[CUDA_SUM_STRETCH / CUDA_SUM_BLOCK];
    const int64_t stretches = (a.count + CUDA_SUM_STRETCH - 1) / CUDA_SUM_STRETCH;
    const int group = (int)threadIdx.x / 16;
    for (int64_t stretch = blockIdx.x; stretch < stretches; stretch += gridDim.x) {
        const int64_t first = stretch * CUDA_SUM_STRETCH + group * CUDA_SUM_BLOCK, left = a.count - first;
        double lane = cuda_squares_lane((const T *)a.x + first, left < CUDA_SUM_BLOCK ? left : CUDA_SUM_BLOCK), sum = 0;
        for (int i = 0; i < 16; i++) {
            sum = __dadd_rn(sum, __shfl_sync(0xffffffffu, lane, i, 16));
        }
        __syncthreads(); /* the sums of the stretch before have been read */
        sums[group] = sum;
        __syncthreads();
        if (threadIdx.x == 0) {
            sum = 0;
            for (int i = 0; i < CUDA_SUM_STRETCH / CUDA_SUM_BLOCK; i++) {
                sum = __dadd_rn(sum, sums[i]);
            }
            a.partial[stretch] = sum;
        }
    }
}

/* In order, by one thread, which loads what comes next before it adds: first zeros. */
CUDA_INLINE void cuda_squares_total(const cuda_squares_args &a) {
    const int ahead = 32;
    const int64_t stretches = (a.count + CUDA_SUM_STRETCH - 1) / CUDA_SUM_STRETCH, whole = stretches / ahead * ahead;
    double sum = 0, next[ahead] = {};
    if (cuda_thread() > 0) {
        return;
    }
#pragma unroll 1
    for (int64_t i = 0; i <= whole; i += ahead) {
        double some[ahead];
#pragma unroll
        for (int j = 0; j < ahead; j++) {
            some[j] = next[j];
        }
        if (i < whole) {
#pragma unroll
            for (int j = 0; j < ahead; j++) {
                next[j] = a.partial[i + j];
            }
        }
#pragma unroll
        for (int j = 0; j < ahead; j++) {
            sum = __dadd_rn(sum, some[j]);
        }
    }
#pragma unroll 8
    for (int64_t i = whole; i < stretches; i++) {
        sum = __dadd_rn(sum, a.partial[i]);
    }
    *a.out = sum;
}

#endif /* CUDA_KERNEL_OPTIM_H */

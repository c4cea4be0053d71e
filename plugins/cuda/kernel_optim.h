/* kernel_optim: one step of each optimizer, element by element, and sums of squares. The formulas are those of
 * src/optim/kernels.h, with every product rounded before it is added, so that a step on a device gives the bits of a
 * step on the host. It must not know configs. */
#ifndef CUDA_KERNEL_OPTIM_H
#define CUDA_KERNEL_OPTIM_H

#include "kernel_reduce.h"

/* One element of each array. */
struct cuda_element {
    float w, g, m, v, r;
};
/* Which arrays a kernel reads, and which it writes. */
enum { CUDA_W = 1, CUDA_G = 2, CUDA_M = 4, CUDA_V = 8, CUDA_R = 16 };

#define CUDA_MUL __fmul_rn
#define CUDA_ADD __fadd_rn
#define CUDA_SUB __fsub_rn

/* g + wd * w */
CUDA_INLINE float cuda_decayed(const cuda_scalars &k, const cuda_element &x) {
    return CUDA_ADD(x.g, CUDA_MUL(x.w, k.decay));
}

struct cuda_sgd {
    enum { READS = CUDA_W | CUDA_G, WRITES = CUDA_W };
    CUDA_INLINE void step(const cuda_scalars &k, cuda_element &x) {
        x.w = CUDA_SUB(x.w, CUDA_MUL(cuda_decayed(k, x), k.rate));
    }
};

struct cuda_momentum {
    enum { READS = CUDA_W | CUDA_G | CUDA_M, WRITES = CUDA_W | CUDA_M };
    CUDA_INLINE void step(const cuda_scalars &k, cuda_element &x) {
        x.m = CUDA_ADD(cuda_decayed(k, x), CUDA_MUL(x.m, k.beta1));
        x.w = CUDA_SUB(x.w, CUDA_MUL(x.m, k.rate));
    }
};

struct cuda_nesterov {
    enum { READS = CUDA_W | CUDA_G | CUDA_M, WRITES = CUDA_W | CUDA_M };
    CUDA_INLINE void step(const cuda_scalars &k, cuda_element &x) {
        float g = cuda_decayed(k, x);
        x.m = CUDA_ADD(CUDA_MUL(x.m, k.beta1), g);
        x.w = CUDA_SUB(x.w, CUDA_MUL(CUDA_ADD(CUDA_MUL(x.m, k.beta1), g), k.rate));
    }
};

/* rate holds the trust ratio too: it goes into the momentum, not onto it. */
struct cuda_lars {
    enum { READS = CUDA_W | CUDA_G | CUDA_M, WRITES = CUDA_W | CUDA_M };
    CUDA_INLINE void step(const cuda_scalars &k, cuda_element &x) {
        x.m = CUDA_ADD(CUDA_MUL(x.m, k.beta1), CUDA_MUL(cuda_decayed(k, x), k.rate));
        x.w = CUDA_SUB(x.w, x.m);
    }
};

CUDA_INLINE void cuda_moments(const cuda_scalars &k, cuda_element &x, float g) {
    x.m = CUDA_ADD(CUDA_MUL(x.m, k.beta1), CUDA_MUL(g, k.fresh1));
    x.v = CUDA_ADD(CUDA_MUL(x.v, k.beta2), CUDA_MUL(CUDA_MUL(g, g), k.fresh2));
}
/* sqrt(v / (1 - beta2^t)) + epsilon */
CUDA_INLINE float cuda_root(const cuda_scalars &k, float v) {
    return CUDA_ADD(CUDA_MUL(__fsqrt_rn(v), k.unbias2), k.epsilon);
}

/* Adam and AdamW: the one has keep 1, the other decay 0. */
struct cuda_adam {
    enum { READS = CUDA_W | CUDA_G | CUDA_M | CUDA_V, WRITES = CUDA_W | CUDA_M | CUDA_V };
    CUDA_INLINE void step(const cuda_scalars &k, cuda_element &x) {
        cuda_moments(k, x, cuda_decayed(k, x));
        float update = __fdiv_rn(CUDA_MUL(x.m, k.rate), cuda_root(k, x.v));
        x.w = CUDA_SUB(CUDA_MUL(x.w, k.keep), update);
    }
};

/* LAMB: the moments, and the update for its norm alone; then, with both norms known, the weight. */
CUDA_INLINE float cuda_lamb_update(const cuda_scalars &k, const cuda_element &x) {
    float r = __fdiv_rn(CUDA_MUL(x.m, k.unbias1), cuda_root(k, x.v));
    return CUDA_ADD(r, CUDA_MUL(x.w, k.decay));
}
struct cuda_lamb_moments {
    enum { READS = CUDA_W | CUDA_G | CUDA_M | CUDA_V, WRITES = CUDA_M | CUDA_V | CUDA_R };
    CUDA_INLINE void step(const cuda_scalars &k, cuda_element &x) {
        cuda_moments(k, x, x.g);
        x.r = cuda_lamb_update(k, x);
    }
};
struct cuda_lamb {
    enum { READS = CUDA_W | CUDA_M | CUDA_V, WRITES = CUDA_W };
    CUDA_INLINE void step(const cuda_scalars &k, cuda_element &x) {
        x.w = CUDA_SUB(x.w, CUDA_MUL(cuda_lamb_update(k, x), k.rate));
    }
};

template <class O> CUDA_INLINE void cuda_optim_one(const cuda_optim_args &a, int64_t i) {
    cuda_element x = {0, 0, 0, 0, 0};
    x.w = O::READS & CUDA_W ? a.w[i] : 0;
    x.g = O::READS & CUDA_G ? a.g[i] : 0;
    x.m = O::READS & CUDA_M ? a.m[i] : 0;
    x.v = O::READS & CUDA_V ? a.v[i] : 0;
    O::step(a.scalars, x);
    if (O::WRITES & CUDA_W) a.w[i] = x.w;
    if (O::WRITES & CUDA_M) a.m[i] = x.m;
    if (O::WRITES & CUDA_V) a.v[i] = x.v;
    if (O::WRITES & CUDA_R) a.r[i] = x.r;
}

/* Four elements, of the arrays from their first whole word on. */
template <class O> CUDA_INLINE void cuda_optim_word(const cuda_optim_args &a, int64_t head, int64_t i) {
    const float4 none = make_float4(0, 0, 0, 0);
    float4 *pw = (float4 *)(a.w + head) + i, *pm = (float4 *)(a.m + head) + i, *pv = (float4 *)(a.v + head) + i;
    float4 w = O::READS & CUDA_W ? *pw : none, m = O::READS & CUDA_M ? *pm : none, v = O::READS & CUDA_V ? *pv : none;
    float4 g = O::READS & CUDA_G ? ((const float4 *)(a.g + head))[i] : none;
    cuda_element x[4] = {
        {w.x, g.x, m.x, v.x, 0}, {w.y, g.y, m.y, v.y, 0}, {w.z, g.z, m.z, v.z, 0}, {w.w, g.w, m.w, v.w, 0}};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        O::step(a.scalars, x[j]);
    }
    if (O::WRITES & CUDA_W) *pw = make_float4(x[0].w, x[1].w, x[2].w, x[3].w);
    if (O::WRITES & CUDA_M) *pm = make_float4(x[0].m, x[1].m, x[2].m, x[3].m);
    if (O::WRITES & CUDA_V) *pv = make_float4(x[0].v, x[1].v, x[2].v, x[3].v);
    if (O::WRITES & CUDA_R) ((float4 *)(a.r + head))[i] = make_float4(x[0].r, x[1].r, x[2].r, x[3].r);
}

template <class O> CUDA_INLINE void cuda_optim(const cuda_optim_args &a) {
    const cuda_range &r = a.range;
    const int64_t words = r.aligned ? (r.count - r.head) / 4 : 0;
#pragma unroll 2
    for (int64_t i = cuda_thread(); i < words; i += cuda_threads()) {
        cuda_optim_word<O>(a, r.head, i);
    }
    const int64_t head = r.aligned ? r.head : 0;
    for (int64_t i = cuda_thread(); i < r.count - 4 * words; i += cuda_threads()) {
        cuda_optim_one<O>(a, i < head ? i : 4 * words + i);
    }
}

/* ---- sums of squares ---- */

/* Half a warp does a block of CUDA_SUM_BLOCK elements: thread i adds those at i, i + 16, ..., then the sixteen sums are
 * added in their order. It is the order of the host; the square of a float is exact in double. */
CUDA_INLINE void cuda_squares(const cuda_squares_args &a) {
    const int64_t blocks = (a.count + CUDA_SUM_BLOCK - 1) / CUDA_SUM_BLOCK;
    const int lane = (int)threadIdx.x % 16, groups = (int)blockDim.x / 16;
    for (int64_t first = (int64_t)blockIdx.x * groups; first < blocks; first += (int64_t)gridDim.x * groups) {
        int64_t block = first + (int)threadIdx.x / 16, at = block * CUDA_SUM_BLOCK + lane;
        int64_t end = block < blocks ? (block + 1) * CUDA_SUM_BLOCK : 0;
        end = end < a.count ? end : a.count;
        double lanes = 0, sum = 0;
#pragma unroll 8
        for (; at < end; at += 16) {
            double x = (double)a.x[at];
            lanes = __dadd_rn(lanes, __dmul_rn(x, x));
        }
        for (int i = 0; i < 16; i++) {
            sum = __dadd_rn(sum, __shfl_sync(0xffffffffu, lanes, i, 16));
        }
        if (lane == 0 && block < blocks) {
            a.partial[block] = sum;
        }
    }
}

/* In order, by one thread: the loads are ahead of the additions. */
CUDA_INLINE void cuda_squares_total(const cuda_squares_args &a) {
    const int64_t blocks = (a.count + CUDA_SUM_BLOCK - 1) / CUDA_SUM_BLOCK;
    double sum = 0;
    if (cuda_thread() == 0) {
#pragma unroll 16
        for (int64_t i = 0; i < blocks; i++) {
            sum = __dadd_rn(sum, a.partial[i]);
        }
        *a.out = sum;
    }
}

#endif /* CUDA_KERNEL_OPTIM_H */

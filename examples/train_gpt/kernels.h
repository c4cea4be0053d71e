/* kernels.h: the hot loops, and the choice of the best instruction set at run time.
 *
 * One thread per rank: the scratch below is not shared. A rank that wants more cores is started as more ranks.
 * It must not know what a layer or a model is; shapes come with every call. */
#ifndef KERNELS_H
#define KERNELS_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* What is known about zeros of a product around a causal mask; half of attention's work is skipped with it. */
enum gemm_zeros {
    DENSE,
    C_UNUSED_ABOVE, /* nobody reads C above its diagonal: whole tiles there stay unwritten */
    A_ZERO_ABOVE,   /* A is lower triangular */
    A_ZERO_BELOW,   /* A is upper triangular */
};

/* C (m, n) = A (m, k) B (k, n), or += with `add`. X[i][j] lies at x[i * x_row + j * x_col], so that a transpose is a
 * swap of strides; one of a matrix's two strides is 1, and C's columns are adjacent. */
struct gemm {
    size_t m, n, k;
    const float *a;
    size_t a_row, a_col;
    const float *b;
    size_t b_row, b_col;
    float *c;
    size_t c_row;
    bool add;
    enum gemm_zeros zeros;
};

/* One AdamW step's constants (Loshchilov and Hutter 2019); *_scale undo the bias of moments that started at zero. */
struct adamw_rates {
    float lr, beta1, beta2, epsilon, decay, grad_scale, mean_scale, square_scale;
};

struct kernels {
    void (*gemm)(const struct gemm *g);
    void (*norm)(float *out, float *stats, const float *x, const float *gain, const float *bias, size_t rows,
                 size_t dim);
    void (*norm_back)(float *d_x, float *d_gain, float *d_bias, const float *d_out, const float *x, const float *stats,
                      const float *gain, size_t rows, size_t dim);
    void (*gelu)(float *out, const float *x, size_t count);
    void (*gelu_back)(float *d, const float *x, size_t count);
    void (*softmax_causal)(float *x, size_t context, float scale);
    void (*softmax_back)(float *d, const float *p, size_t context, float scale);
    double (*cross_entropy)(float *x, const uint8_t *target, size_t rows, size_t classes);
    double (*sum_squares)(const float *x, size_t count);
    void (*adamw)(const struct adamw_rates *rates, float *param, const float *grad, float *mean, float *square,
                  size_t count);
};

/* Cache blocks: a block of A (96 KiB) and one of B (512 KiB) live in the second-level cache, one panel of B (16 KiB) in
 * the first. 96 is a multiple of every tile height; GEMM_N of every tile width. */
enum { GEMM_M = 96, GEMM_N = 512, GEMM_K = 256 };
static float gemm_a[GEMM_M * GEMM_K] __attribute__((aligned(64)));
static float gemm_b[GEMM_N * GEMM_K] __attribute__((aligned(64)));

/* gcc -std=c11 neither fuses a*b+c nor unrolls at -O2; clang does both. The pragma makes the speed independent of the
 * flags. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("O3", "fp-contract=fast")
#endif

#define ISA(name) name##_base
#define ISA_TARGET
#define ISA_BYTES 16
#define ISA_ROWS 6
#include "kernels_isa.h"

#if defined(__x86_64__)
#define ISA(name) name##_avx2
#define ISA_TARGET __attribute__((target("avx2,fma")))
#define ISA_BYTES 32
#define ISA_ROWS 6
#include "kernels_isa.h"

#define ISA(name) name##_avx512
#define ISA_TARGET __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,fma")))
#define ISA_BYTES 64
#define ISA_ROWS 12
#include "kernels_isa.h"
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif

static const struct kernels *kernel = &kernels_base;

/* Points `kernel` at the widest set this processor has, or no wider than `limit` ("base", "avx2"; NULL: no limit).
 * Returns the set's name. */
static const char *kernels_choose(const char *limit) {
#if defined(__x86_64__)
    bool base = limit != NULL && strcmp(limit, "base") == 0, avx2 = limit != NULL && strcmp(limit, "avx2") == 0;
    __builtin_cpu_init();
    if (!base && !avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")) {
        kernel = &kernels_avx512;
        return "AVX-512";
    }
    if (!base && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        kernel = &kernels_avx2;
        return "AVX2";
    }
#else
    (void)limit;
#endif
    kernel = &kernels_base;
    return "base";
}

#endif

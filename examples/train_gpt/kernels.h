/* kernels.h: the table of everything that computes on floats, and the choice of the best instruction set at run time;
 * cuda.h has the table of a GPU.
 *
 * One thread per rank: the scratch below is not shared. A rank that wants more cores is started as more ranks.
 * It must not know what a layer or a model is; shapes come with every call. */
#ifndef KERNELS_H
#define KERNELS_H

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "problem.h"
#include "shapes.h"

struct kernels {
    void (*gemm)(const struct gemm *g);
    void (*norm)(float *out, float *stats, const float *x, const float *gain, const float *bias, size_t rows,
                 size_t dim);
    void (*norm_back)(float *d_x, float *d_gain, float *d_bias, const float *d_out, const float *x, const float *stats,
                      const float *gain, size_t rows, size_t dim);
    void (*gelu)(float *out, const float *x, size_t count);
    void (*gelu_back)(float *d, const float *x, size_t count);
    double (*cross_entropy)(float *x, const uint8_t *target, size_t rows, size_t classes);
    double (*sum_squares)(const float *x, size_t count);
    void (*adamw)(const struct adamw_rates *rates, float *param, const float *grad, float *mean, float *square,
                  size_t count);
    void (*attention)(float *out, float *p, const float *qkv, struct attention_shape s);
    void (*attention_back)(float *d_qkv, float *d_p, const float *d_out, const float *p, const float *qkv,
                           struct attention_shape s);
    void (*copy)(float *to, const float *from, size_t count);
    void (*zero)(float *to, size_t count);
    /* in, d_in: `classes` rows of bytes, then `context` rows of positions. embed_back gets the last embed's bytes. */
    void (*embed)(float *out, const uint8_t *bytes, const float *in, size_t rows, size_t context, size_t dim,
                  size_t classes);
    void (*embed_back)(float *d_in, const uint8_t *bytes, const float *d_out, size_t rows, size_t context, size_t dim,
                       size_t classes);
    void (*read)(float *host, const float *from, size_t count);
    void (*write)(float *to, const float *host, size_t count);
    float *(*floats)(size_t count); /* memory for activations; NULL: there is none, see problem.h */
    bool heads_at_once;             /* attention_back's scratch is (B, H, T, T), not (T, T) */
};

/* ---- the host's: what needs no vectors --------------------------------------------------------------------------- */

static void host_copy(float *to, const float *from, size_t count) { memcpy(to, from, count * sizeof *to); }

static void host_zero(float *to, size_t count) { memset(to, 0, count * sizeof *to); }

static void host_embed(float *out, const uint8_t *bytes, const float *in, size_t rows, size_t context, size_t dim,
                       size_t classes) {
    for (size_t i = 0; i < rows; i++) {
        const float *x = in + bytes[i] * dim, *p = in + (classes + i % context) * dim;
        for (size_t j = 0; j < dim; j++) {
            out[i * dim + j] = x[j] + p[j];
        }
    }
}

static void host_embed_back(float *d_in, const uint8_t *bytes, const float *d_out, size_t rows, size_t context,
                            size_t dim, size_t classes) {
    host_zero(d_in, (classes + context) * dim);
    for (size_t i = 0; i < rows; i++) {
        float *x = d_in + bytes[i] * dim, *p = d_in + (classes + i % context) * dim;
        const float *d = d_out + i * dim;
        for (size_t j = 0; j < dim; j++) {
            x[j] += d[j];
            p[j] += d[j];
        }
    }
}

/* Zeroed, because the unused upper triangles of attention are read (and multiplied by zero): they must be finite. */
static float *host_floats(size_t count) {
    void *memory = NULL;
    size_t most =
        (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE); /* beyond it Linux kills, not refuses */
    if (count > most / sizeof(float) || posix_memalign(&memory, 64, count * sizeof(float)) != 0) {
        problem("There is no memory for %zu MB; choose a smaller --batch, --context, --dim or --layers.", count >> 18);
        return NULL;
    }
    return memset(memory, 0, count * sizeof(float));
}

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

/* shapes.h: what a kernel is told, on the host (kernels.h) and on a GPU (gpt.cu, cuda.h): C11 and CUDA C++. */
#ifndef SHAPES_H
#define SHAPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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

/* Attention over B sequences of T positions, by H heads that share C channels. */
struct attention_shape {
    size_t batch, context, heads, dim;
};

/* ---- structs of the kernels of a GPU; pointers are the GPU's ----------------------------------------------------- */

enum { GPT_TILE = 64, GPT_WARP = 32, GPT_BLOCK = 256, GPT_COLUMNS = 16, GPT_SUMS = 256 };

/* From one sequence's matrix to the next one's, and from one head's to the next one's. */
struct gpt_stride {
    size_t sequence, head;
};
/* `count` products at once; all but the pointers are alike. */
struct gpt_gemm_args {
    struct gemm g;
    size_t count, heads;
    struct gpt_stride a, b, c;
};
struct gpt_map_args { /* to from `from` (NULL: zeros), each (count) */
    float *to;
    const float *from;
    size_t count;
};
struct gpt_norm_args {
    float *out, *stats;
    const float *x, *gain, *bias;
    size_t rows, dim;
};
struct gpt_norm_back_args {
    float *d_x, *d_gain, *d_bias;
    const float *d_out, *x, *stats, *gain;
    size_t rows, dim;
};
struct gpt_softmax_args { /* x, p (rows, context): row r is position r % context */
    float *x;
    const float *p;
    size_t rows, context;
    float scale;
};
struct gpt_cross_entropy_args {
    float *x, *losses; /* (rows, classes), (rows) */
    const uint8_t *target;
    size_t rows, classes;
};
struct gpt_sums_args { /* each block of threads leaves one sum */
    double *sums;
    const float *x;
    size_t count;
    bool squares;
};
struct gpt_adamw_args {
    struct adamw_rates rates;
    float *param;
    const float *grad;
    float *mean, *square;
    size_t count;
};
struct gpt_embed_args { /* positions (T, C) follow bytes (classes, C) in the table, and in its gradient */
    float *out;         /* (rows, C); on the way back the gradient of the table */
    const float *in;    /* the table; on the way back the gradient of out */
    const uint8_t *bytes;
    size_t rows, context, dim, classes;
};

#define GPT_KERNELS(X)                                                                                                 \
    X(gemm, gpt_gemm_args)                                                                                             \
    X(copy, gpt_map_args)                                                                                              \
    X(norm, gpt_norm_args)                                                                                             \
    X(norm_back, gpt_norm_back_args)                                                                                   \
    X(norm_columns, gpt_norm_back_args)                                                                                \
    X(gelu, gpt_map_args)                                                                                              \
    X(gelu_back, gpt_map_args)                                                                                         \
    X(softmax, gpt_softmax_args)                                                                                       \
    X(softmax_back, gpt_softmax_args)                                                                                  \
    X(cross_entropy, gpt_cross_entropy_args)                                                                           \
    X(sums, gpt_sums_args)                                                                                             \
    X(adamw, gpt_adamw_args)                                                                                           \
    X(embed, gpt_embed_args)                                                                                           \
    X(embed_back, gpt_embed_args)

#endif

/* kernels_isa.h: the arithmetic, written once over "a vector of ISA_BYTES bytes" and compiled once per instruction set.
 *
 * kernels.h includes this file several times; there is no include guard on purpose. It sees these macros:
 *     ISA(name)     the name with the instruction set appended, so that the copies can live side by side
 *     ISA_TARGET    the function attribute that switches the instruction set on, or nothing
 *     ISA_BYTES     vector width; ISA_ROWS: rows of C that the matrix product keeps in registers
 * Vectors are the compilers' own (GCC and clang share the extension), so that one text serves SSE, AVX2, AVX-512 and
 * NEON. Every array length here is a multiple of 16 floats, the widest vector: options.h sees to it. */

typedef float ISA(vec) __attribute__((vector_size(ISA_BYTES)));
typedef float ISA(loose)
    __attribute__((vector_size(ISA_BYTES), aligned(4), may_alias)); /* a vec anywhere among floats */
typedef int32_t ISA(ivec) __attribute__((vector_size(ISA_BYTES)));

#define VEC ISA(vec)
#define IVEC ISA(ivec)
#define LANES (ISA_BYTES / sizeof(float))
#define KERNEL static ISA_TARGET
#define INLINE static inline __attribute__((always_inline)) ISA_TARGET
#define AT(p) (*(ISA(loose) *)(p))
#define AT_CONST(p) (*(const ISA(loose) *)(p))

/* ---- helpers ---------------------------------------------------------------------------------------------------- */

INLINE float ISA(sum_lanes)(VEC v) {
    float s = 0.0f;
    for (size_t i = 0; i < LANES; i++) {
        s += v[i];
    }
    return s;
}

INLINE VEC ISA(max)(VEC a, VEC b) {
    IVEC take_a = a > b;
    return (VEC)((take_a & (IVEC)a) | (~take_a & (IVEC)b));
}

/* e^x to 2 ulp for x <= 88; below -87 it gives about 1e-38 instead of a denormal. Cephes' expf: x = n ln2 + r, |r| <=
 * ln2/2, a degree-5 polynomial for e^r, and 2^n made by writing n into the exponent bits. */
INLINE VEC ISA(exp)(VEC x) {
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits */
    x = ISA(max)(x, (VEC){0} - 87.0f);
    VEC shifted = x * 1.44269504088896341f + round;
    VEC n = shifted - round;
    VEC r = x - n * 0.693359375f - n * -2.12194440e-4f;
    VEC p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return (VEC)((IVEC)p + ((IVEC)shifted << 23));
}

/* ---- matrix product --------------------------------------------------------------------------------------------- */

enum { ISA(COLS) = 2 * LANES };

/* One tile of C: ISA_ROWS x two vectors of sums live in registers while p runs. Per p: two vector loads of B, ISA_ROWS
 * scalars of A, 2*ISA_ROWS fused multiply-adds, which is what hides the latency of the multiply-add units. `step` is a
 * constant after inlining. */
INLINE void ISA(tile)(size_t k, const float *const *a, size_t step, const float *b, VEC acc[ISA_ROWS][2]) {
    VEC sum[ISA_ROWS][2] = {{{0}}};
    for (size_t p = 0; p < k; p++) {
        VEC b0 = AT_CONST(b + p * ISA(COLS)), b1 = AT_CONST(b + p * ISA(COLS) + LANES);
#pragma GCC unroll 16
        for (size_t r = 0; r < ISA_ROWS; r++) {
            float x = a[r][p * step];
            sum[r][0] += x * b0;
            sum[r][1] += x * b1;
        }
    }
#pragma GCC unroll 16
    for (size_t r = 0; r < ISA_ROWS; r++) {
        acc[r][0] = sum[r][0];
        acc[r][1] = sum[r][1];
    }
}

/* Writes the top left rows x cols of a tile to C, replacing or adding. */
INLINE void ISA(store_tile)(VEC acc[ISA_ROWS][2], float *c, size_t c_row, size_t rows, size_t cols, bool add) {
    if (cols == ISA(COLS)) {
        for (size_t r = 0; r < rows; r++, c += c_row) {
            if (add) {
                acc[r][0] += AT(c);
                acc[r][1] += AT(c + LANES);
            }
            AT(c) = acc[r][0];
            AT(c + LANES) = acc[r][1];
        }
        return;
    }
    for (size_t r = 0; r < rows; r++, c += c_row) {
        for (size_t j = 0; j < cols; j++) {
            float x = j < LANES ? acc[r][0][j] : acc[r][1][j - LANES];
            c[j] = add ? c[j] + x : x;
        }
    }
}

/* Copies a (k, n) block of B into panels of ISA(COLS) columns, zero beyond n, so that a tile reads B front to back. */
KERNEL void ISA(pack_b)(const struct gemm *g, const float *b, size_t k, size_t n) {
    float *to = gemm_b;
    for (size_t j = 0; j < n; j += ISA(COLS), to += k * ISA(COLS)) {
        size_t cols = n - j < ISA(COLS) ? n - j : ISA(COLS);
        const float *from = b + j * g->b_col;
        if (cols < ISA(COLS)) {
            memset(to, 0, k * ISA(COLS) * sizeof *to);
        }
        if (g->b_col == 1 && cols == ISA(COLS)) {
            for (size_t p = 0; p < k; p++) {
                AT(to + p * ISA(COLS)) = AT_CONST(from + p * g->b_row);
                AT(to + p * ISA(COLS) + LANES) = AT_CONST(from + p * g->b_row + LANES);
            }
            continue;
        }
        for (size_t p = 0; p < k; p++) {
            for (size_t c = 0; c < cols; c++) {
                to[p * ISA(COLS) + c] = from[p * g->b_row + c * g->b_col];
            }
        }
    }
}

/* Copies an (m, k) block of a transposed A into panels of ISA_ROWS rows. An A that is not transposed is read in place.
 */
KERNEL void ISA(pack_a)(const float *a, size_t a_col, size_t m, size_t k) {
    float *to = gemm_a;
    for (size_t i = 0; i < m; i += ISA_ROWS, to += k * ISA_ROWS) {
        size_t rows = m - i < ISA_ROWS ? m - i : ISA_ROWS;
        for (size_t p = 0; p < k; p++) {
            for (size_t r = 0; r < ISA_ROWS; r++) {
                to[p * ISA_ROWS + r] = a[p * a_col + i + (r < rows ? r : rows - 1)];
            }
        }
    }
}

/* Multiplies rows [i0, i0+m) of A's columns [p0, p0+k) with the packed block of B that holds C's columns [j0, j0+n). */
KERNEL void ISA(block)(const struct gemm *g, size_t i0, size_t m, size_t p0, size_t k, size_t j0, size_t n, bool add) {
    bool packed = g->a_col != 1;
    for (size_t j = 0; j < n; j += ISA(COLS)) {
        for (size_t i = 0; i < m; i += ISA_ROWS) {
            size_t top = i0 + i, rows = m - i < ISA_ROWS ? m - i : ISA_ROWS, first = 0, last = k;
            if (g->zeros == C_UNUSED_ABOVE && j0 + j >= top + rows) {
                continue;
            }
            if (g->zeros == A_ZERO_ABOVE && p0 + k > top + rows) {
                last = top + rows > p0 ? top + rows - p0 : 0;
            }
            if (g->zeros == A_ZERO_BELOW && top > p0) {
                first = top - p0 < k ? top - p0 : k;
            }
            const float *a[ISA_ROWS];
            for (size_t r = 0; r < ISA_ROWS; r++) {
                size_t row = r < rows ? r : rows - 1;
                a[r] = packed ? gemm_a + i * k + first * ISA_ROWS + r : g->a + (top + row) * g->a_row + p0 + first;
            }
            VEC acc[ISA_ROWS][2];
            const float *b = gemm_b + j * k + first * ISA(COLS);
            if (packed) {
                ISA(tile)(last - first, a, ISA_ROWS, b, acc);
            } else {
                ISA(tile)(last - first, a, 1, b, acc);
            }
            ISA(store_tile)
            (acc, g->c + top * g->c_row + j0 + j, g->c_row, rows, n - j < ISA(COLS) ? n - j : ISA(COLS), add);
        }
    }
}

/* Goto's order: a block of B goes to the second-level cache once and every row of A passes over it. */
KERNEL void ISA(gemm)(const struct gemm *g) {
    for (size_t j = 0; j < g->n; j += GEMM_N) {
        size_t n = g->n - j < GEMM_N ? g->n - j : GEMM_N;
        for (size_t p = 0; p < g->k; p += GEMM_K) {
            size_t k = g->k - p < GEMM_K ? g->k - p : GEMM_K;
            ISA(pack_b)(g, g->b + p * g->b_row + j * g->b_col, k, n);
            for (size_t i = 0; i < g->m; i += GEMM_M) {
                size_t m = g->m - i < GEMM_M ? g->m - i : GEMM_M;
                if (g->a_col != 1) {
                    ISA(pack_a)(g->a + i + p * g->a_col, g->a_col, m, k);
                }
                ISA(block)(g, i, m, p, k, j, n, g->add || p > 0);
            }
        }
    }
}

/* ---- layer norm ------------------------------------------------------------------------------------------------- */

/* out, x (rows, dim); gain, bias (dim); stats (rows, 2) keeps mean and 1/deviation for the way back. */
KERNEL void ISA(norm)(float *out, float *stats, const float *x, const float *gain, const float *bias, size_t rows,
                      size_t dim) {
    for (size_t t = 0; t < rows; t++, x += dim, out += dim, stats += 2) {
        VEC sum = {0}, square = {0};
        for (size_t i = 0; i < dim; i += LANES) {
            sum += AT_CONST(x + i);
        }
        float mean = ISA(sum_lanes)(sum) / (float)dim;
        for (size_t i = 0; i < dim; i += LANES) { /* a second pass: E[x^2] - mean^2 would cancel */
            VEC d = AT_CONST(x + i) - mean;
            square += d * d;
        }
        float scale = 1.0f / sqrtf(ISA(sum_lanes)(square) / (float)dim + 1e-5f);
        for (size_t i = 0; i < dim; i += LANES) {
            AT(out + i) = (AT_CONST(x + i) - mean) * scale * AT_CONST(gain + i) + AT_CONST(bias + i);
        }
        stats[0] = mean;
        stats[1] = scale;
    }
}

/* Adds the gradient with respect to x to d_x, which already holds what flows around the norm along the residual stream.
 */
KERNEL void ISA(norm_back)(float *d_x, float *d_gain, float *d_bias, const float *d_out, const float *x,
                           const float *stats, const float *gain, size_t rows, size_t dim) {
    memset(d_gain, 0, dim * sizeof *d_gain);
    memset(d_bias, 0, dim * sizeof *d_bias);
    for (size_t t = 0; t < rows; t++, x += dim, d_x += dim, d_out += dim, stats += 2) {
        float mean = stats[0], scale = stats[1];
        VEC sum = {0}, sum_unit = {0};
        for (size_t i = 0; i < dim; i += LANES) {
            VEC d = AT_CONST(d_out + i), unit = (AT_CONST(x + i) - mean) * scale;
            AT(d_gain + i) += d * unit;
            AT(d_bias + i) += d;
            d *= AT_CONST(gain + i);
            sum += d;
            sum_unit += d * unit;
        }
        float m = ISA(sum_lanes)(sum) / (float)dim, m_unit = ISA(sum_lanes)(sum_unit) / (float)dim;
        for (size_t i = 0; i < dim; i += LANES) {
            VEC unit = (AT_CONST(x + i) - mean) * scale;
            AT(d_x + i) += (AT_CONST(d_out + i) * AT_CONST(gain + i) - m - unit * m_unit) * scale;
        }
    }
}

/* ---- GELU ------------------------------------------------------------------------------------------------------- */

/* The tanh form (Hendrycks and Gimpel 2016), written as x * sigmoid(2u): 0.5 (1 + tanh u) is the sigmoid of 2u, one
 * exponential. */
INLINE VEC ISA(gelu_gate)(VEC x) {
    VEC twice_u = 1.5957691216f * (x + 0.044715f * x * x * x);
    return 1.0f / (1.0f + ISA(exp)(-ISA(max)(twice_u, (VEC){0} - 80.0f)));
}

KERNEL void ISA(gelu)(float *out, const float *x, size_t count) {
    for (size_t i = 0; i < count; i += LANES) {
        VEC v = AT_CONST(x + i);
        AT(out + i) = v * ISA(gelu_gate)(v);
    }
}

/* d (count) becomes d * gelu'(x). */
KERNEL void ISA(gelu_back)(float *d, const float *x, size_t count) {
    for (size_t i = 0; i < count; i += LANES) {
        VEC v = AT_CONST(x + i), gate = ISA(gelu_gate)(v);
        VEC slope = 1.5957691216f * (1.0f + 0.134145f * v * v);
        AT(d + i) *= gate + v * gate * (1.0f - gate) * slope;
    }
}

/* ---- softmax ---------------------------------------------------------------------------------------------------- */

/* x (count) becomes e^(scale (x - max)), not yet divided by the sum, which is returned; *out_max is the largest x. */
INLINE float ISA(exponentials)(float *x, size_t count, float scale, float *out_max) {
    VEC largest = AT_CONST(x), sum = {0};
    for (size_t i = LANES; i < count; i += LANES) {
        largest = ISA(max)(largest, AT_CONST(x + i));
    }
    float top = largest[0];
    for (size_t i = 1; i < LANES; i++) {
        top = largest[i] > top ? largest[i] : top;
    }
    for (size_t i = 0; i < count; i += LANES) {
        VEC e = ISA(exp)((AT_CONST(x + i) - top) * scale);
        AT(x + i) = e;
        sum += e;
    }
    *out_max = top;
    return ISA(sum_lanes)(sum);
}

/* Row t of x (context, context) becomes the softmax of scale * x[0..t], and zero after t: no byte looks at later ones.
 */
KERNEL void ISA(softmax_causal)(float *x, size_t context, float scale) {
    for (size_t t = 0; t < context; t++, x += context) {
        size_t seen = t + 1, padded = (seen + LANES - 1) / LANES * LANES;
        float top;
        for (size_t j = seen; j < padded; j++) {
            x[j] = -INFINITY;
        }
        float inverse = 1.0f / ISA(exponentials)(x, padded, scale, &top);
        for (size_t j = 0; j < padded; j += LANES) {
            AT(x + j) *= inverse;
        }
        memset(x + seen, 0, (context - seen) * sizeof *x);
    }
}

/* d (context, context) becomes the gradient of the scores: row by row p * (d - sum(p * d)) * scale. Zero where p is
 * zero. */
KERNEL void ISA(softmax_back)(float *d, const float *p, size_t context, float scale) {
    for (size_t t = 0; t < context; t++, d += context, p += context) {
        VEC sum = {0};
        for (size_t j = 0; j <= t; j += LANES) {
            sum += AT_CONST(p + j) * AT_CONST(d + j);
        }
        float inner = ISA(sum_lanes)(sum);
        for (size_t j = 0; j < context; j += LANES) {
            AT(d + j) = AT_CONST(p + j) * (AT_CONST(d + j) - inner) * scale;
        }
    }
}

/* ---- attention -------------------------------------------------------------------------------------------------- */

/* out (B T, C) and p (B, H, T, T) from qkv (B T, 3C): per sequence and head, softmax(Q K^T / sqrt(C/H)) V, no position
 * sees a later one. */
KERNEL void ISA(attention)(float *out, float *p, const float *qkv, struct attention_shape s) {
    size_t c = s.dim, t = s.context, size = c / s.heads;
    float scale = 1.0f / sqrtf((float)size);
    for (size_t i = 0; i < s.batch * s.heads; i++, p += t * t) {
        size_t row = i / s.heads * t, column = i % s.heads * size;
        const float *q = qkv + row * 3 * c + column, *k = q + c, *v = k + c;
        ISA(gemm)(&(struct gemm){t, t, size, q, 3 * c, 1, k, 1, 3 * c, p, t, false, C_UNUSED_ABOVE});
        ISA(softmax_causal)(p, t, scale);
        ISA(gemm)(&(struct gemm){t, size, t, p, t, 1, v, 3 * c, 1, out + row * c + column, c, false, A_ZERO_ABOVE});
    }
}

/* d_qkv (B T, 3C) from d_out (B T, C); d_p is scratch. */
KERNEL void ISA(attention_back)(float *d_qkv, float *d_p, const float *d_out, const float *p, const float *qkv,
                                struct attention_shape s) {
    size_t c = s.dim, t = s.context, size = c / s.heads, w = 3 * c;
    float scale = 1.0f / sqrtf((float)size);
    for (size_t i = 0; i < s.batch * s.heads; i++, p += t * t) {
        size_t row = i / s.heads * t, column = i % s.heads * size;
        const float *q = qkv + row * w + column, *k = q + c, *v = k + c, *d = d_out + row * c + column;
        float *d_q = d_qkv + row * w + column, *d_k = d_q + c, *d_v = d_k + c;
        ISA(gemm)(&(struct gemm){t, t, size, d, c, 1, v, 1, w, d_p, t, false, C_UNUSED_ABOVE});
        ISA(gemm)(&(struct gemm){t, size, t, p, 1, t, d, c, 1, d_v, w, false, A_ZERO_BELOW});
        ISA(softmax_back)(d_p, p, t, scale);
        ISA(gemm)(&(struct gemm){t, size, t, d_p, t, 1, k, w, 1, d_q, w, false, A_ZERO_ABOVE});
        ISA(gemm)(&(struct gemm){t, size, t, d_p, 1, t, q, w, 1, d_k, w, false, A_ZERO_BELOW});
    }
}

/* ---- loss ------------------------------------------------------------------------------------------------------- */

/* x (rows, classes): logits become their gradient of the mean loss; returns the sum of the rows' cross-entropies in
 * nats. */
KERNEL double ISA(cross_entropy)(float *x, const uint8_t *target, size_t rows, size_t classes) {
    double total = 0.0;
    for (size_t t = 0; t < rows; t++, x += classes) {
        float top, right = x[target[t]];
        float sum = ISA(exponentials)(x, classes, 1.0f, &top);
        total += (double)(logf(sum) + top - right);
        float scale = 1.0f / (sum * (float)rows);
        for (size_t i = 0; i < classes; i += LANES) {
            AT(x + i) *= scale;
        }
        x[target[t]] -= 1.0f / (float)rows;
    }
    return total;
}

/* ---- optimizer -------------------------------------------------------------------------------------------------- */

KERNEL double ISA(sum_squares)(const float *x, size_t count) {
    double total = 0.0;
    for (size_t from = 0; from < count; from += 4096) { /* short float sums, long double ones: no digits lost */
        VEC sum = {0};
        for (size_t i = from; i < count && i < from + 4096; i += LANES) {
            sum += AT_CONST(x + i) * AT_CONST(x + i);
        }
        total += (double)ISA(sum_lanes)(sum);
    }
    return total;
}

/* sqrt(x) for x >= 0 as x / sqrt(x): the exponent-halving guess, then three Newton steps. C has no square root of a
 * vector. */
INLINE VEC ISA(sqrt)(VEC x) {
    VEC y = (VEC)(0x5f3759df - ((IVEC)x >> 1));
    for (int i = 0; i < 3; i++) {
        y = y * (1.5f - 0.5f * x * y * y);
    }
    return x * y;
}

KERNEL void ISA(adamw)(const struct adamw_rates *rates, float *param, const float *grad, float *mean, float *square,
                       size_t count) {
    struct adamw_rates r = *rates; /* by value: stores through float pointers could alias *rates */
    for (size_t i = 0; i < count; i += LANES) {
        VEC g = AT_CONST(grad + i) * r.grad_scale;
        VEC m = AT_CONST(mean + i) * r.beta1 + g * (1.0f - r.beta1);
        VEC v = AT_CONST(square + i) * r.beta2 + g * g * (1.0f - r.beta2);
        AT(mean + i) = m;
        AT(square + i) = v;
        VEC step = m * r.mean_scale / (ISA(sqrt)(v * r.square_scale) + r.epsilon);
        AT(param + i) -= r.lr * (step + r.decay * AT_CONST(param + i));
    }
}

static const struct kernels ISA(kernels) = {
    .gemm = ISA(gemm),
    .norm = ISA(norm),
    .norm_back = ISA(norm_back),
    .gelu = ISA(gelu),
    .gelu_back = ISA(gelu_back),
    .attention = ISA(attention),
    .attention_back = ISA(attention_back),
    .cross_entropy = ISA(cross_entropy),
    .sum_squares = ISA(sum_squares),
    .adamw = ISA(adamw),
    .copy = host_copy,
    .zero = host_zero,
    .embed = host_embed,
    .embed_back = host_embed_back,
    .read = host_copy,
    .write = host_copy,
    .floats = host_floats,
};

#undef VEC
#undef IVEC
#undef LANES
#undef KERNEL
#undef INLINE
#undef AT
#undef AT_CONST
#undef ISA
#undef ISA_TARGET
#undef ISA_BYTES
#undef ISA_ROWS

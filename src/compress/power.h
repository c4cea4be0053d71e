/* compress/power: the linear algebra of PowerSGD (Vogels et al., NeurIPS 2019, arXiv 1905.13727) on one rank.
 * Must not know: ranks, collectives.
 *
 * A gradient is a matrix M of rows x cols. P (rows x r) and Q (cols x r) are kept as r contiguous columns. */
#ifndef DDL_COMPRESS_POWER_H
#define DDL_COMPRESS_POWER_H

#include "sparse.h"

/* Dot products need not be the same everywhere: they are averaged over the ranks before they are used.
 * count: a multiple of DDL__RUN. */
#define DDL__DEFINE_DOT(L, target, W)                                                                               \
    target static float ddl__dot_##L(const float *x, const float *y, int64_t count) {                                  \
        ddl__f32_v##W even = {0}, odd = {0};                                                                           \
        float lanes[(W) / 4], total = 0;                                                                               \
        int64_t i = 0;                                                                                                 \
        for (; i + (W) / 2 <= count; i += (W) / 2) {                                                                   \
            const float *p = x + i + (W) / 4, *q = y + i + (W) / 4;                                                    \
            even += *(const ddl__f32_v##W *)(const void *)(x + i) * *(const ddl__f32_v##W *)(const void *)(y + i);     \
            odd += *(const ddl__f32_v##W *)(const void *)p * *(const ddl__f32_v##W *)(const void *)q;                  \
        }                                                                                                              \
        for (; i < count; i += (W) / 4) {                                                                              \
            even += *(const ddl__f32_v##W *)(const void *)(x + i) * *(const ddl__f32_v##W *)(const void *)(y + i);     \
        }                                                                                                              \
        even += odd;                                                                                                   \
        memcpy(lanes, &even, sizeof lanes);                                                                            \
        DDL__LEAVE_##L;                                                                                                \
        for (i = 0; i < (W) / 4; i++) {                                                                                \
            total += lanes[i];                                                                                         \
        }                                                                                                              \
        return total;                                                                                                  \
    }
DDL__DEFINE_DOT(portable, , 16)
#if defined(__x86_64__)
DDL__DEFINE_DOT(avx2, DDL__AVX2, 32)
DDL__DEFINE_DOT(avx512, DDL__AVX512, 64)
#endif

static inline void ddl__axpy(ddl__cpu level, float *y, const float *x, float a, int64_t count) {
    int64_t whole = count - count % DDL__RUN;
    DDL__AT_LEVEL(level, ddl__axpy)(y, x, a, whole);
    for (int64_t i = whole; i < count; i++) {
        float t = a * x[i];
        DDL__ROUNDED(t);
        y[i] += t;
    }
}

static inline float ddl__dot(ddl__cpu level, const float *x, const float *y, int64_t count) {
    int64_t whole = count - count % DDL__RUN;
    float sum = DDL__AT_LEVEL(level, ddl__dot)(x, y, whole);
    for (int64_t i = whole; i < count; i++) {
        sum += x[i] * y[i];
    }
    return sum;
}

typedef struct ddl__matrix {
    int64_t rows, cols;
    int32_t rank; /* r */
    float *m;     /* gradient plus residual, row by row; afterwards the residual */
    float *p, *q;
} ddl__matrix;

/* Whether PowerSGD sends less than half; else the tensor goes as it is (as the authors' code does). */
static inline bool ddl__power_pays(int64_t rows, int64_t cols, int32_t rank) {
    return 2.0 * rank * ((double)rows + (double)cols) < (double)rows * (double)cols;
}

/* The first Q, the same on all ranks: uniform in (-1, 1). Its columns only must not be parallel or at right angles to
 * all that matters; the iteration does the rest. */
static inline void ddl__power_begin(const ddl__matrix *a, uint64_t stream) {
    for (int64_t i = 0; i < a->cols * a->rank; i++) {
        a->q[i] = (float)((int64_t)(ddl__mix(stream, (uint64_t)i) >> 40) - (1 << 23)) * 0x1p-23f;
    }
}

/* P = M Q. A row with a value that is not finite gives NaN, or infinity, in its row of P and nowhere else. */
static inline void ddl__power_left(ddl__cpu level, const ddl__matrix *a) {
    for (int64_t i = 0; i < a->rows; i++) {
        for (int32_t c = 0; c < a->rank; c++) {
            a->p[c * a->rows + i] = ddl__dot(level, a->m + i * a->cols, a->q + c * a->cols, a->cols);
        }
    }
}

static inline bool ddl__row_is_odd(const ddl__matrix *a, int64_t row) {
    for (int32_t c = 0; c < a->rank; c++) {
        if (!ddl__is_finite(a->p[c * a->rows + row])) {
            return true;
        }
    }
    return false;
}

/* The sum of x[i] * y[i] where x[i] is finite, in double: lane l adds those at l, l + 256, ..., then halves are added.
 * It is the order of kernels of devices too. */
static inline double ddl__power_dot(const float *x, const float *y, int64_t n) {
    enum { LANES = 256 };
    double lanes[LANES] = {0};
    for (int64_t i = 0; i < n; i += LANES) {
        int64_t some = DDL__MIN(n - i, (int64_t)LANES);
        for (int64_t l = 0; l < some; l++) {
            lanes[l] += ddl__is_finite(x[i + l]) ? (double)x[i + l] * (double)y[i + l] : 0;
        }
    }
    for (int64_t half = LANES / 2; half > 0; half /= 2) {
        for (int64_t l = 0; l < half; l++) {
            lanes[l] += lanes[l + half];
        }
    }
    return lanes[0];
}

/* Makes the columns of P orthonormal: modified Gram-Schmidt in double, in an order that is the same everywhere. Odd
 * rows are marked with NaN in all columns and count as zero. A column that depends on those before it becomes zero. */
static inline void ddl__power_orthonormalize(const ddl__matrix *a) {
    int64_t n = a->rows;
    for (int64_t i = 0; i < n; i++) {
        bool odd = ddl__row_is_odd(a, i);
        for (int32_t c = 0; c < a->rank; c++) {
            a->p[c * n + i] = odd ? ddl__bits_float(0x7fffffff) : a->p[c * n + i];
        }
    }
    for (int32_t c = 0; c < a->rank; c++) {
        float *column = a->p + c * n;
        double before = ddl__power_dot(column, column, n);
        for (int32_t d = 0; d < c; d++) {
            const float *other = a->p + d * n;
            float factor = (float)ddl__power_dot(column, other, n);
            for (int64_t i = 0; i < n; i++) {
                float t = factor * other[i];
                DDL__ROUNDED(t);
                column[i] -= t;
            }
        }
        double norm = ddl__power_dot(column, column, n);
        float inverse = norm > 1e-12 * before && norm > 1e-70 ? (float)(1 / ddl__sqrt(norm)) : 0;
        for (int64_t i = 0; i < n; i++) {
            column[i] *= inverse;
        }
    }
}

/* Q = M' P, over the rows that are finite on all ranks. */
static inline void ddl__power_right(ddl__cpu level, const ddl__matrix *a) {
    memset(a->q, 0, (size_t)(a->cols * a->rank) * sizeof(float));
    for (int64_t i = 0; i < a->rows; i++) {
        if (!ddl__is_finite(a->p[i])) {
            continue;
        }
        for (int32_t c = 0; c < a->rank; c++) {
            ddl__axpy(level, a->q + c * a->cols, a->m + i * a->cols, a->p[c * a->rows + i], a->cols);
        }
    }
}

/* Row i of P Q'. */
static inline void ddl__power_row(ddl__cpu level, const ddl__matrix *a, int64_t i, float *row) {
    int64_t whole = a->cols - a->cols % DDL__RUN;
    DDL__AT_LEVEL(level, ddl__combine)(row, a->q, a->cols, a->p + i, a->rows, a->rank, whole);
    for (int64_t j = whole; j < a->cols; j++) {
        row[j] = 0;
        for (int32_t c = 0; c < a->rank; c++) {
            float t = a->p[c * a->rows + i] * a->q[c * a->cols + j];
            DDL__ROUNDED(t);
            row[j] += t;
        }
    }
}

/* out = P Q', the same bits on all ranks; M becomes the residual. An odd row is NaN, and its finite values stay. */
static inline void ddl__power_rebuild(ddl__cpu level, const ddl__matrix *a, float *out) {
    for (int64_t i = 0; i < a->rows; i++) {
        float *row = out + i * a->cols, *m = a->m + i * a->cols;
        bool odd = !ddl__is_finite(a->p[i]);
        if (odd) {
            memset(row, 0xff, (size_t)a->cols * sizeof(float)); /* all bits set is a NaN */
        } else {
            ddl__power_row(level, a, i, row);
            ddl__axpy(level, m, row, -1, a->cols);
        }
        for (int64_t j = 0; j < a->cols && odd; j++) {
            m[j] = ddl__is_finite(m[j]) ? m[j] : 0;
        }
    }
}

#endif /* DDL_COMPRESS_POWER_H */

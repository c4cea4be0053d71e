/* compress/power: the linear algebra of PowerSGD (Vogels et al., NeurIPS 2019, arXiv 1905.13727) on one rank.
 * Must not know: ranks, collectives.
 *
 * A gradient is a matrix M of rows x cols. P (rows x r) and Q (cols x r) are kept as r contiguous columns. */
#ifndef DDL_COMPRESS_POWER_H
#define DDL_COMPRESS_POWER_H

#include "sparse.h"

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

/* Rows that are done at once. The last is repeated where there are fewer. */
typedef struct ddl__some_rows {
    int64_t at[DDL__ROWS_AT_ONCE];
    const float *m[DDL__ROWS_AT_ONCE];
    int32_t count;
} ddl__some_rows;

static inline void ddl__rows_add(ddl__some_rows *rows, const ddl__matrix *a, int64_t row) {
    for (int32_t r = rows->count++; r < DDL__ROWS_AT_ONCE; r++) {
        rows->at[r] = row;
        rows->m[r] = a->m + row * a->cols;
    }
}

/* What is asked of memory during pass c over rows: one of those that come after them. */
static inline const float *ddl__rows_next(const ddl__some_rows *rows, const ddl__matrix *a, int32_t c) {
    return a->m + DDL__MIN(rows->at[DDL__ROWS_AT_ONCE - 1] + 1 + c % DDL__ROWS_AT_ONCE, a->rows - 1) * a->cols;
}

/* P of these rows. Dot products need not be the same everywhere: they are averaged over the ranks before they are
 * used. */
static inline void ddl__power_dots(ddl__cpu level, const ddl__matrix *a, const ddl__some_rows *rows) {
    int64_t whole = a->cols - a->cols % (2 * DDL__RUN);
    for (int32_t c = 0; c < a->rank; c++) {
        const float *q = a->q + c * a->cols;
        float sum[DDL__ROWS_AT_ONCE];
        DDL__AT_LEVEL(level, ddl__dots)(sum, rows->m, q, ddl__rows_next(rows, a, c), whole);
        for (int32_t r = 0; r < rows->count; r++) {
            for (int64_t j = whole; j < a->cols; j++) {
                sum[r] += rows->m[r][j] * q[j];
            }
            a->p[c * a->rows + rows->at[r]] = sum[r];
        }
    }
}

/* P = M Q. A row with a value that is not finite gives NaN, or infinity, in its row of P and nowhere else. */
static inline void ddl__power_left(ddl__cpu level, const ddl__matrix *a) {
    for (int64_t i = 0; i < a->rows; i += DDL__ROWS_AT_ONCE) {
        ddl__some_rows rows = {.count = 0};
        for (int64_t row = i; row < DDL__MIN(i + DDL__ROWS_AT_ONCE, a->rows); row++) {
            ddl__rows_add(&rows, a, row);
        }
        ddl__power_dots(level, a, &rows);
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

/* Q += the rows' M' P. Where there are fewer than four the repeated one is added 0 times. */
static inline void ddl__power_axpys(ddl__cpu level, const ddl__matrix *a, const ddl__some_rows *rows) {
    int64_t whole = a->cols - a->cols % DDL__RUN;
    for (int32_t c = 0; c < a->rank; c++) {
        float *q = a->q + c * a->cols, factor[DDL__ROWS_AT_ONCE] = {0};
        for (int32_t r = 0; r < rows->count; r++) {
            factor[r] = a->p[c * a->rows + rows->at[r]];
        }
        DDL__AT_LEVEL(level, ddl__axpys)(q, rows->m, factor, ddl__rows_next(rows, a, c), whole);
        for (int64_t j = whole; j < a->cols; j++) {
            for (int32_t r = 0; r < rows->count; r++) {
                float t = factor[r] * rows->m[r][j];
                DDL__ROUNDED(t);
                q[j] += t;
            }
        }
    }
}

/* Q = M' P, over the rows that are finite on all ranks. */
static inline void ddl__power_right(ddl__cpu level, const ddl__matrix *a) {
    ddl__some_rows rows = {.count = 0};
    memset(a->q, 0, (size_t)(a->cols * a->rank) * sizeof(float));
    for (int64_t i = 0; i < a->rows; i++) {
        if (ddl__is_finite(a->p[i])) {
            ddl__rows_add(&rows, a, i);
        }
        if (rows.count == DDL__ROWS_AT_ONCE || (i + 1 == a->rows && rows.count > 0)) {
            ddl__power_axpys(level, a, &rows);
            rows.count = 0;
        }
    }
}

/* Row i of P Q'; that of M becomes the residual. An odd row is NaN, and its finite values stay. */
static inline void ddl__power_row(ddl__cpu level, const ddl__matrix *a, int64_t i, float *row) {
    int64_t whole = a->cols - a->cols % DDL__RUN;
    float *m = a->m + i * a->cols;
    if (!ddl__is_finite(a->p[i])) {
        memset(row, 0xff, (size_t)a->cols * sizeof(float)); /* all bits set is a NaN */
        for (int64_t j = 0; j < a->cols; j++) {
            m[j] = ddl__is_finite(m[j]) ? m[j] : 0;
        }
        return;
    }
    DDL__AT_LEVEL(level, ddl__combine)(row, m, a->q, a->cols, a->p + i, a->rows, a->rank, whole);
    for (int64_t j = whole; j < a->cols; j++) {
        row[j] = 0;
        for (int32_t c = 0; c < a->rank; c++) {
            float t = a->p[c * a->rows + i] * a->q[c * a->cols + j];
            DDL__ROUNDED(t);
            row[j] += t;
        }
        m[j] -= row[j];
    }
}

/* out = P Q', the same bits on all ranks; M becomes the residual. */
static inline void ddl__power_rebuild(ddl__cpu level, const ddl__matrix *a, float *out) {
    for (int64_t i = 0; i < a->rows; i++) {
        ddl__power_row(level, a, i, out + i * a->cols);
    }
}

#endif /* DDL_COMPRESS_POWER_H */

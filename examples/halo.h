/* halo.h: one cell of the heat equation, for the host and for the GPU. */
#ifndef EXAMPLES_HALO_H
#define EXAMPLES_HALO_H

#include <stdint.h>

#ifdef __CUDACC__
#define HALO_FN static __device__ inline
#else
#define HALO_FN static inline
#endif

/* Rows 1 to rows of `from` become those of `to`; rows 0 and rows + 1 are the neighbours'. Columns at the edge stay. */
typedef struct halo_args {
    const float *from;
    float *to;
    int64_t rows, columns;
} halo_args;

/* An explicit step of u_t = u_xx + u_yy with dt / dx^2 = 1/5. Compiled without fused multiply-add it has the same bits
 * everywhere. */
HALO_FN float halo_cell(const float *u, int64_t columns) {
    return u[0] + 0.2f * (((u[-columns] + u[columns]) + (u[-1] + u[1])) - 4.0f * u[0]);
}

HALO_FN void halo_one(const halo_args *a, int64_t i) {
    int64_t at = a->columns + i, column = i % a->columns;
    int edge = column == 0 || column == a->columns - 1;
    a->to[at] = edge ? a->from[at] : halo_cell(a->from + at, a->columns);
}

#endif /* EXAMPLES_HALO_H */

/* dtype/pairs: MIN_INDEX and MAX_INDEX, which keep the index (often the rank) beside the value.
 * Must not know: where indices come from. */
#ifndef DDL_DTYPE_PAIRS_H
#define DDL_DTYPE_PAIRS_H

#include "kernels.h"

#define DDL__LESS(a, b) ((a) < (b))
#define DDL__MORE(a, b) ((a) > (b))
#define DDL__IS_NAN(x) ((x) != (x))
#define DDL__NO_NAN(x) 0

/* a wins if its value is better, or it alone is a NaN, or the values tie and its index is smaller. Two zeros of
 * different sign tie; with one index too, the larger bits win, so that the order of operands never shows.
 * Branch-free on purpose: which side wins is unpredictable. */
#define DDL__PAIR_KERNEL(fn, value, word, index, BETTER, NAN)                                                          \
    static void fn(void *dst, const void *a, const void *b, size_t count) {                                            \
        enum { half = sizeof(value), pair = 2 * sizeof(value) };                                                       \
        char *d = dst;                                                                                                 \
        const char *p = a, *q = b;                                                                                     \
        for (size_t i = 0; i < count; i++, d += pair, p += pair, q += pair) {                                          \
            value va, vb;                                                                                              \
            word wa, wb;                                                                                               \
            index ia, ib;                                                                                              \
            memcpy(&va, p, half);                                                                                      \
            memcpy(&vb, q, half);                                                                                      \
            memcpy(&wa, p, half);                                                                                      \
            memcpy(&wb, q, half);                                                                                      \
            memcpy(&ia, p + half, half);                                                                               \
            memcpy(&ib, q + half, half);                                                                               \
            int nan_a = NAN(va), nan_b = NAN(vb);                                                                      \
            int tie = (va == vb) | (nan_a & nan_b), first = (ia < ib) | ((ia == ib) & (wa >= wb));                     \
            int take_a = BETTER(va, vb) | (nan_a & !nan_b) | (tie & first);                                            \
            word w = nan_a | nan_b ? (word)-1 : take_a ? wa : wb;                                                      \
            index k = take_a ? ia : ib;                                                                                \
            memcpy(d, &w, half);                                                                                       \
            memcpy(d + half, &k, half);                                                                                \
        }                                                                                                              \
    }

#define DDL__PAIR_KERNELS(name, value, word, index, NAN)                                                               \
    DDL__PAIR_KERNEL(ddl__##name##_min_index, value, word, index, DDL__LESS, NAN)                                      \
    DDL__PAIR_KERNEL(ddl__##name##_max_index, value, word, index, DDL__MORE, NAN)

DDL__PAIR_KERNELS(f32_i32, float, uint32_t, int32_t, DDL__IS_NAN)
DDL__PAIR_KERNELS(f64_i64, double, uint64_t, int64_t, DDL__IS_NAN)
DDL__PAIR_KERNELS(i32_i32, int32_t, uint32_t, int32_t, DDL__NO_NAN)
DDL__PAIR_KERNELS(i64_i64, int64_t, uint64_t, int64_t, DDL__NO_NAN)

#endif /* DDL_DTYPE_PAIRS_H */

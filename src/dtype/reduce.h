/* dtype/reduce: what the rooms above call: find a kernel, scale, average.
 * Must not know: ranks, groups, messages. Every function here is pure: no state, any thread. */
#ifndef DDL_DTYPE_REDUCE_H
#define DDL_DTYPE_REDUCE_H

#include "pairs.h"

#define DDL__FLOAT_ROW(E, L)                                                                                           \
    {[DDL_SUM] = E##_sum_##L, [DDL_PROD] = E##_prod_##L, [DDL_MIN] = E##_min_##L, [DDL_MAX] = E##_max_##L,             \
     [DDL_AVG] = E##_sum_##L}
#define DDL__INTEGER_ROW(E, ORDER, L)                                                                                  \
    {[DDL_SUM] = E##_sum_##L,   [DDL_PROD] = E##_prod_##L, [DDL_MIN] = ORDER##_min_##L, [DDL_MAX] = ORDER##_max_##L,   \
     [DDL_AVG] = E##_sum_##L,   [DDL_BAND] = E##_band_##L, [DDL_BOR] = E##_bor_##L,     [DDL_BXOR] = E##_bxor_##L,     \
     [DDL_LAND] = E##_land_##L, [DDL_LOR] = E##_lor_##L,   [DDL_LXOR] = E##_lxor_##L}
/* A bool is any byte; the result is 0 or 1, also of the bitwise ops. */
#define DDL__BOOL_ROW(L)                                                                                               \
    {[DDL_SUM] = ddl__u8_lor_##L,   [DDL_PROD] = ddl__u8_land_##L, [DDL_MIN] = ddl__u8_land_##L,                       \
     [DDL_MAX] = ddl__u8_lor_##L,   [DDL_BAND] = ddl__u8_land_##L, [DDL_BOR] = ddl__u8_lor_##L,                        \
     [DDL_BXOR] = ddl__u8_lxor_##L, [DDL_LAND] = ddl__u8_land_##L, [DDL_LOR] = ddl__u8_lor_##L,                        \
     [DDL_LXOR] = ddl__u8_lxor_##L}
#define DDL__PAIR_ROW(name)                                                                                            \
    {[DDL_MIN_INDEX] = ddl__##name##_min_index, [DDL_MAX_INDEX] = ddl__##name##_max_index}
/* F: the level of f32, f64 and bf16, L: that of the others. */
#define DDL__LEVEL_TABLE(F, L)                                                                                         \
    {[DDL_F16] = DDL__FLOAT_ROW(ddl__f16, L),                                                                          \
     [DDL_BF16] = DDL__FLOAT_ROW(ddl__bf16, F),                                                                        \
     [DDL_F32] = DDL__FLOAT_ROW(ddl__f32, F),                                                                          \
     [DDL_F64] = DDL__FLOAT_ROW(ddl__f64, F),                                                                          \
     [DDL_I8] = DDL__INTEGER_ROW(ddl__u8, ddl__i8, L),                                                                 \
     [DDL_U8] = DDL__INTEGER_ROW(ddl__u8, ddl__u8, L),                                                                 \
     [DDL_I32] = DDL__INTEGER_ROW(ddl__u32, ddl__i32, L),                                                              \
     [DDL_U32] = DDL__INTEGER_ROW(ddl__u32, ddl__u32, L),                                                              \
     [DDL_I64] = DDL__INTEGER_ROW(ddl__u64, ddl__i64, L),                                                              \
     [DDL_U64] = DDL__INTEGER_ROW(ddl__u64, ddl__u64, L),                                                              \
     [DDL_BOOL] = DDL__BOOL_ROW(L),                                                                                    \
     [DDL_F32_I32] = DDL__PAIR_ROW(f32_i32),                                                                           \
     [DDL_F64_I64] = DDL__PAIR_ROW(f64_i64),                                                                           \
     [DDL_I32_I32] = DDL__PAIR_ROW(i32_i32),                                                                           \
     [DDL_I64_I64] = DDL__PAIR_ROW(i64_i64),                                                                           \
     [DDL_E4M3] = DDL__FLOAT_ROW(ddl__e4m3, L),                                                                        \
     [DDL_E5M2] = DDL__FLOAT_ROW(ddl__e5m2, L)}

/* The kernel of an op at a level; NULL where the op is not defined for the type (see ddl__op_valid). AVG gives the
 * kernel of SUM: the division comes once, at the end (ddl__average). A level this machine lacks must not be run. */
static inline ddl__reduce_fn ddl__reduce_kernel_at(ddl__cpu level, ddl_dtype dtype, ddl_op op) {
    static const ddl__reduce_fn table[][DDL__DTYPES][DDL__OPS] = {
        [DDL__CPU_PORTABLE] = DDL__LEVEL_TABLE(portable, portable),
#if defined(__x86_64__)
        [DDL__CPU_AVX2] = DDL__LEVEL_TABLE(avx2, avx2),
        [DDL__CPU_AVX512] = DDL__LEVEL_TABLE(avx512, avx2),
#endif
    };
    if (!ddl__dtype_known(dtype) || op <= DDL_OP_NONE || op >= DDL__OPS ||
        (size_t)level >= sizeof(table) / sizeof(table[0])) {
        return NULL;
    }
    return table[level][dtype][op];
}

static inline ddl__reduce_fn ddl__reduce_kernel(ddl_dtype dtype, ddl_op op) {
    return ddl__reduce_kernel_at(ddl__cpu_level(), dtype, op);
}

/* The kernel of a division of f32 or f64; no op of the interface, averages need it. */
static inline ddl__reduce_fn ddl__divide_kernel_at(ddl__cpu level, ddl_dtype dtype) {
#if defined(__x86_64__)
    if (level >= DDL__CPU_AVX2) {
        return dtype == DDL_F32 ? ddl__f32_div_avx2 : ddl__f64_div_avx2;
    }
#endif
    (void)level;
    return dtype == DDL_F32 ? ddl__f32_div_portable : ddl__f64_div_portable;
}

/* Work is cut into pieces whose temporaries stay in the first-level cache, on the stack. */
enum { DDL__BLOCK_BYTES = 4096, DDL__BLOCK_F32 = DDL__BLOCK_BYTES / 4, DDL__BLOCK_F64 = DDL__BLOCK_BYTES / 8 };

/* One block: dst = src kernel factors, where kernel multiplies or divides; narrow floats through f32. */
static inline void ddl__apply_block(char *dst, const char *src, size_t count, ddl_dtype dtype, const void *factors,
                                    ddl__reduce_fn kernel) {
    if (!ddl__dtype_is_narrow(dtype)) {
        kernel(dst, src, factors, count);
        return;
    }
    float wide[DDL__BLOCK_F32];
    ddl__cpu level = ddl__cpu_level();
    ddl__widen_at(level, dtype)(wide, src, count);
    kernel(wide, wide, factors, count);
    ddl__narrow_at(level, dtype)(dst, wide, count);
}

/* dst = src * factor, or src / factor, for every float type. The factor is spread over a block so that the kernels of
 * two operands serve. For narrow floats it stays f32, since 1/3 rounded to bf16 would be good for two digits only. */
static inline void ddl__apply_float(void *dst, const void *src, size_t count, ddl_dtype dtype, double factor,
                                    int divide) {
    union {
        float f32[DDL__BLOCK_F32];
        double f64[DDL__BLOCK_F64];
    } factors;
    ddl_dtype wide = dtype == DDL_F64 ? DDL_F64 : DDL_F32;
    ddl__cpu level = ddl__cpu_level();
    ddl__reduce_fn kernel = divide ? ddl__divide_kernel_at(level, wide) : ddl__reduce_kernel_at(level, wide, DDL_PROD);
    size_t step = wide == DDL_F64 ? DDL__BLOCK_F64 : DDL__BLOCK_F32, size = ddl__dtype_bytes(dtype);
    for (size_t i = 0; i < step && i < count; i++) {
        if (wide == DDL_F64) {
            factors.f64[i] = factor;
        } else {
            factors.f32[i] = (float)factor;
        }
    }
    for (size_t i = 0; i < count; i += step) {
        ddl__apply_block((char *)dst + i * size, (const char *)src + i * size, count - i < step ? count - i : step,
                         dtype, &factors, kernel);
    }
}

/* Integers. A whole factor multiplies exactly and wraps like a sum of that many terms; another one goes through double,
 * truncates toward zero and saturates (a plain cast would be undefined there); NaN gives 0. */
#define DDL__SCALE_INTEGER(E, type, word, least, most)                                                                 \
    static inline void E##_scale(char *dst, const char *src, size_t count, double factor) {                            \
        int whole = factor >= -0x1p62 && factor <= 0x1p62 && (double)(int64_t)factor == factor;                        \
        uint64_t times = whole ? (uint64_t)(int64_t)factor : 0;                                                        \
        for (size_t i = 0; i < count; i++) {                                                                           \
            type x;                                                                                                    \
            memcpy(&x, src + i * sizeof(x), sizeof(x));                                                                \
            double y = (double)x * factor;                                                                             \
            if (whole) {                                                                                               \
                x = (type)(word)((uint64_t)x * times);                                                                 \
            } else if (y > (double)(least) && y < (double)(most)) {                                                    \
                x = (type)y;                                                                                           \
            } else {                                                                                                   \
                x = y >= (double)(most) ? (most) : y <= (double)(least) ? (least) : 0;                                 \
            }                                                                                                          \
            memcpy(dst + i * sizeof(x), &x, sizeof(x));                                                                \
        }                                                                                                              \
    }
/* The quotient is formed in 64 bits, because n need not fit the type. */
#define DDL__AVERAGE_INTEGER(E, type, wide)                                                                            \
    static inline void E##_average(char *data, size_t count, int n) {                                                  \
        for (size_t i = 0; i < count; i++) {                                                                           \
            type x;                                                                                                    \
            memcpy(&x, data + i * sizeof(x), sizeof(x));                                                               \
            x = (type)((wide)x / (wide)n);                                                                             \
            memcpy(data + i * sizeof(x), &x, sizeof(x));                                                               \
        }                                                                                                              \
    }
#define DDL__INTEGERS(X)                                                                                               \
    X(DDL_I8, ddl__i8, int8_t, uint8_t, int64_t, INT8_MIN, INT8_MAX)                                                   \
    X(DDL_U8, ddl__u8, uint8_t, uint8_t, uint64_t, 0, UINT8_MAX)                                                       \
    X(DDL_I32, ddl__i32, int32_t, uint32_t, int64_t, INT32_MIN, INT32_MAX)                                             \
    X(DDL_U32, ddl__u32, uint32_t, uint32_t, uint64_t, 0, UINT32_MAX)                                                  \
    X(DDL_I64, ddl__i64, int64_t, uint64_t, int64_t, INT64_MIN, INT64_MAX)                                             \
    X(DDL_U64, ddl__u64, uint64_t, uint64_t, uint64_t, 0, UINT64_MAX)
#define DDL__DEFINE_INTEGER(dtype, E, type, word, wide, least, most)                                                   \
    DDL__SCALE_INTEGER(E, type, word, least, most)                                                                     \
    DDL__AVERAGE_INTEGER(E, type, wide)
DDL__INTEGERS(DDL__DEFINE_INTEGER)
#undef DDL__DEFINE_INTEGER

/* dst = src * factor; dst is src or overlaps it nowhere. bool and the pairs have no factor: they are copied. */
static inline void ddl__scale(void *dst, const void *src, size_t count, ddl_dtype dtype, double factor) {
    if (ddl__dtype_is_float(dtype)) {
        ddl__apply_float(dst, src, count, dtype, factor, 0);
        return;
    }
    switch (dtype) {
#define DDL__CASE(dtype, E, type, word, wide, least, most)                                                             \
    case dtype:                                                                                                        \
        E##_scale(dst, src, count, factor);                                                                            \
        return;
        DDL__INTEGERS(DDL__CASE)
#undef DDL__CASE
    default:
        memmove(dst, src, count * ddl__dtype_bytes(dtype));
    }
}

/* Divides the finished sum of n terms by n, in place. Floats divide rather than multiply by 1/n, so that the average of
 * equal values whose sum is exact is that value; integers truncate toward zero. n < 1, bool and the pairs: nothing. */
static inline void ddl__average(void *data, size_t count, ddl_dtype dtype, int n) {
    if (n <= 1) {
        return;
    }
    if (ddl__dtype_is_float(dtype)) {
        ddl__apply_float(data, data, count, dtype, n, 1);
        return;
    }
    switch (dtype) {
#define DDL__CASE(dtype, E, type, word, wide, least, most)                                                             \
    case dtype:                                                                                                        \
        E##_average(data, count, n);                                                                                   \
        return;
        DDL__INTEGERS(DDL__CASE)
#undef DDL__CASE
    default:
        return;
    }
}

#endif /* DDL_DTYPE_REDUCE_H */

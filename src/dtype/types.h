/* dtype/types: sizes and names of element types, which op makes sense for which type, and what this processor can do.
 * Must not know: who reduces, why, or where the bytes come from. */
#ifndef DDL_DTYPE_TYPES_H
#define DDL_DTYPE_TYPES_H

#include "../api.h"

#define DDL__DTYPES 18 /* values of ddl_dtype, DDL_DTYPE_NONE included */
#define DDL__OPS 14    /* built-in values of ddl_op, DDL_OP_NONE included; created ops begin at 256 */

/* A dtype may come from a peer or from an uninitialised tensor, so every table is entered through this test. */
static inline int ddl__dtype_known(ddl_dtype dtype) {
    return (unsigned)dtype > (unsigned)DDL_DTYPE_NONE && (unsigned)dtype < DDL__DTYPES;
}

/* Size of one element, 0 for an unknown type. */
static inline size_t ddl__dtype_bytes(ddl_dtype dtype) {
    static const uint8_t bytes[DDL__DTYPES] = {0, 2, 2, 4, 8, 1, 1, 4, 4, 8, 8, 1, 8, 16, 8, 16, 1, 1};
    return ddl__dtype_known(dtype) ? bytes[dtype] : 0;
}

static inline const char *ddl__dtype_name(ddl_dtype dtype) {
    static const char names[DDL__DTYPES][8] = {"none", "f16", "bf16", "f32", "f64", "i8", "u8", "i32",
                                               "u32", "i64", "u64", "bool", "f32_i32", "f64_i64", "i32_i32", "i64_i64",
                                               "e4m3", "e5m2"};
    return ddl__dtype_known(dtype) ? names[dtype] : "?";
}

DDL_API size_t ddl_dtype_bytes(ddl_dtype dtype) {
    return ddl__dtype_bytes(dtype);
}

DDL_API const char *ddl_dtype_name(ddl_dtype dtype) {
    return ddl__dtype_name(dtype);
}

static inline const char *ddl__op_name(ddl_op op) {
    static const char names[DDL__OPS][10] = {"none", "sum",  "prod", "min", "max",  "avg",       "band",
                                             "bor",  "bxor", "land", "lor", "lxor", "min_index", "max_index"};
    return op > DDL_OP_NONE && op < DDL__OPS ? names[op] : op >= 256 ? "created" : "?";
}

static inline int ddl__dtype_is_byte_float(ddl_dtype dtype) {
    return dtype == DDL_E4M3 || dtype == DDL_E5M2;
}

/* Computed in f32, and rounded. */
static inline int ddl__dtype_is_narrow(ddl_dtype dtype) {
    return dtype == DDL_F16 || dtype == DDL_BF16 || ddl__dtype_is_byte_float(dtype);
}

static inline int ddl__dtype_is_float(ddl_dtype dtype) {
    return (dtype >= DDL_F16 && dtype <= DDL_F64) || ddl__dtype_is_byte_float(dtype);
}

static inline int ddl__dtype_is_integer(ddl_dtype dtype) {
    return dtype >= DDL_I8 && dtype <= DDL_U64;
}

/* Whether a built-in op is defined for a type; 0 for created ops, which only their function can judge.
 * The sum of bool is "or", the product and the minimum "and", as in torch; its average would not be a bool. */
static inline int ddl__op_valid(ddl_op op, ddl_dtype dtype) {
    int arithmetic = op >= DDL_SUM && op <= DDL_MAX;
    int logic = op >= DDL_BAND && op <= DDL_LXOR;
    if (ddl__dtype_is_float(dtype)) {
        return arithmetic || op == DDL_AVG;
    }
    if (ddl__dtype_is_integer(dtype)) {
        return arithmetic || op == DDL_AVG || logic;
    }
    if (dtype == DDL_BOOL) {
        return arithmetic || logic;
    }
    return ddl__dtype_known(dtype) && (op == DDL_MIN_INDEX || op == DDL_MAX_INDEX);
}

/* Instruction sets the kernels are compiled for. A level is an argument, so that a test can run every one of them. */
typedef enum ddl__cpu {
    DDL__CPU_PORTABLE, /* 16-byte vectors in the compiler's generic dialect: SSE2, NEON, VSX or plain scalars */
    DDL__CPU_AVX2,     /* 32-byte vectors, and F16C for f16 */
    DDL__CPU_AVX512,   /* 64-byte vectors for f32, f64 and bf16; the rest as AVX2, since it gains nothing */
    DDL__CPU_LEVELS
} ddl__cpu;

/* clang before 17 has no name for F16C; no processor was made with AVX2 and FMA but without F16C. */
#if defined(__clang__)
#define DDL__F16C_NAME "fma"
#else
#define DDL__F16C_NAME "f16c"
#endif

/* Best level of this processor. Nothing is cached here (no mutable globals): the compiler's own table, filled before
 * main by its run-time library, is read with two loads, so asking costs less than one kernel call. */
static inline ddl__cpu ddl__cpu_level(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports(DDL__F16C_NAME)) {
        /* BF16 is asked for because bf16 needs it, and because earlier processors lower their clock for 64 bytes. */
        int wide = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
        return wide ? DDL__CPU_AVX512 : DDL__CPU_AVX2;
    }
#endif
    return DDL__CPU_PORTABLE;
}

#endif /* DDL_DTYPE_TYPES_H */

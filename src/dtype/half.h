/* dtype/half: conversion between f32 and the 16-bit types, one value or an array.
 * Rounds to nearest even; keeps infinities, subnormals and the sign of zero; every NaN becomes the one with all bits set.
 * Must not know: reductions. */
#ifndef DDL_DTYPE_HALF_H
#define DDL_DTYPE_HALF_H

#include "vectors.h"

#define DDL__DEFINE_HALF(E, NAME)                                                                                      \
    static inline float E##_to_f32(uint16_t half) {                                                                    \
        ddl__f32_u1 h = {half};                                                                                        \
        ddl__f32_v1 f;                                                                                                 \
        NAME##_WIDEN(1, f, h);                                                                                         \
        DDL__CANONICAL_NAN(ddl__f32, 1, f);                                                                            \
        return f[0];                                                                                                   \
    }                                                                                                                  \
    static inline uint16_t E##_from_f32(float value) {                                                                 \
        ddl__f32_v1 f = {value};                                                                                       \
        ddl__f32_u1 h;                                                                                                 \
        NAME##_NARROW(1, h, f);                                                                                        \
        return (uint16_t)h[0];                                                                                         \
    }

DDL__DEFINE_HALF(ddl__f16, DDL__F16)
DDL__DEFINE_HALF(ddl__bf16, DDL__BF16)

/* Conversion of arrays, which must not overlap. */
typedef void (*ddl__cast_fn)(void *dst, const void *src, size_t count);

#define DDL__DEFINE_WIDEN(L, target, E, W, WIDEN)                                                                      \
    target static void E##_widen_##L(void *dst, const void *src, size_t count) {                                       \
        const size_t lanes = sizeof(ddl__f32_v##W) / sizeof(float);                                                    \
        float *d = dst;                                                                                                \
        const char *s = src;                                                                                           \
        size_t i = 0;                                                                                                  \
        for (; count - i >= lanes; i += lanes) {                                                                       \
            ddl__half_v##W h = *(const ddl__half_v##W *)(const void *)(s + 2 * i);                                     \
            ddl__f32_v##W f;                                                                                           \
            WIDEN(W, f, h);                                                                                            \
            DDL__CANONICAL_NAN(ddl__f32, W, f);                                                                        \
            *(ddl__f32_v##W *)(void *)(d + i) = f;                                                                     \
        }                                                                                                              \
        for (; i < count; i++) {                                                                                       \
            uint16_t h;                                                                                                \
            memcpy(&h, s + 2 * i, 2);                                                                                  \
            d[i] = E##_to_f32(h);                                                                                      \
        }                                                                                                              \
        DDL__LEAVE_##L;                                                                                                \
    }

#define DDL__DEFINE_NARROW(L, target, E, W, NARROW)                                                                    \
    target static void E##_narrow_##L(void *dst, const void *src, size_t count) {                                      \
        const size_t lanes = sizeof(ddl__f32_v##W) / sizeof(float);                                                    \
        char *d = dst;                                                                                                 \
        const float *s = src;                                                                                          \
        size_t i = 0;                                                                                                  \
        for (; count - i >= lanes; i += lanes) {                                                                       \
            ddl__f32_v##W f = *(const ddl__f32_v##W *)(const void *)(s + i);                                           \
            ddl__half_v##W h;                                                                                          \
            NARROW(W, h, f);                                                                                           \
            *(ddl__half_v##W *)(void *)(d + 2 * i) = h;                                                                \
        }                                                                                                              \
        for (; i < count; i++) {                                                                                       \
            uint16_t h = E##_from_f32(s[i]);                                                                           \
            memcpy(d + 2 * i, &h, 2);                                                                                  \
        }                                                                                                              \
        DDL__LEAVE_##L;                                                                                                \
    }

/* The same conversions on unpacked halves. */
#define DDL__F16_WIDEN_ARRAY(W, f, h)                                                                                  \
    do {                                                                                                               \
        ddl__f32_u##W word_ = __builtin_convertvector(h, ddl__f32_u##W);                                               \
        DDL__F16_WIDEN(W, f, word_);                                                                                   \
    } while (0)
#define DDL__F16_NARROW_ARRAY(W, h, f)                                                                                 \
    do {                                                                                                               \
        ddl__f32_u##W word_;                                                                                           \
        DDL__F16_NARROW(W, word_, f);                                                                                  \
        (h) = __builtin_convertvector(word_, ddl__half_v##W);                                                          \
    } while (0)
#define DDL__BF16_WIDEN_ARRAY(W, f, h) DDL__BF16_WIDEN(W, f, __builtin_convertvector(h, ddl__f32_u##W))
#define DDL__BF16_NARROW_ARRAY(W, h, f)                                                                                \
    do {                                                                                                               \
        ddl__f32_u##W word_;                                                                                           \
        DDL__BF16_NARROW(W, word_, f);                                                                                 \
        (h) = __builtin_convertvector(word_, ddl__half_v##W);                                                          \
    } while (0)

DDL__DEFINE_WIDEN(portable, , ddl__f16, 16, DDL__F16_WIDEN_ARRAY)
DDL__DEFINE_WIDEN(portable, , ddl__bf16, 16, DDL__BF16_WIDEN_ARRAY)
DDL__DEFINE_NARROW(portable, , ddl__f16, 16, DDL__F16_NARROW_ARRAY)
DDL__DEFINE_NARROW(portable, , ddl__bf16, 16, DDL__BF16_NARROW_ARRAY)

#if defined(__x86_64__)
/* F16C rounds as its immediate says (0 = to nearest even), whatever the modes of the thread. */
#define DDL__F16C_WIDEN(W, f, h) ((f) = (ddl__f32_v32)_mm256_cvtph_ps((__m128i)(h)))
#define DDL__F16C_NARROW(W, h, f)                                                                                      \
    do {                                                                                                               \
        DDL__CANONICAL_NAN(ddl__f32, 32, f);                                                                           \
        (h) = (ddl__half_v32)_mm256_cvtps_ph((__m256)(f), 0);                                                          \
    } while (0)
DDL__DEFINE_WIDEN(avx2, DDL__AVX2, ddl__f16, 32, DDL__F16C_WIDEN)
DDL__DEFINE_WIDEN(avx2, DDL__AVX2, ddl__bf16, 32, DDL__BF16_WIDEN_ARRAY)
DDL__DEFINE_NARROW(avx2, DDL__AVX2, ddl__f16, 32, DDL__F16C_NARROW)
DDL__DEFINE_NARROW(avx2, DDL__AVX2, ddl__bf16, 32, DDL__BF16_NARROW_ARRAY)
#endif

/* The function that turns an array of f16 or bf16 into f32. */
static inline ddl__cast_fn ddl__widen_at(ddl__cpu level, ddl_dtype half) {
#if defined(__x86_64__)
    if (level >= DDL__CPU_AVX2) {
        return half == DDL_F16 ? ddl__f16_widen_avx2 : ddl__bf16_widen_avx2;
    }
#endif
    (void)level;
    return half == DDL_F16 ? ddl__f16_widen_portable : ddl__bf16_widen_portable;
}

/* The function that rounds an array of f32 to f16 or bf16. */
static inline ddl__cast_fn ddl__narrow_at(ddl__cpu level, ddl_dtype half) {
#if defined(__x86_64__)
    if (level >= DDL__CPU_AVX2) {
        return half == DDL_F16 ? ddl__f16_narrow_avx2 : ddl__bf16_narrow_avx2;
    }
#endif
    (void)level;
    return half == DDL_F16 ? ddl__f16_narrow_portable : ddl__bf16_narrow_portable;
}

#endif /* DDL_DTYPE_HALF_H */

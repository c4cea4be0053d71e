/* dtype/half: conversion between f32 and the 16-bit and 8-bit types, one value or an array.
 * Rounds to nearest even; keeps infinities (e4m3 has none: NaN), subnormals, the sign of zero; a NaN becomes the one
 * with all bits set.
 * Must not know: reductions. */
#ifndef DDL_DTYPE_HALF_H
#define DDL_DTYPE_HALF_H

#include "vectors.h"

#define DDL__DEFINE_HALF(E, NAME)                                                                                      \
    static inline float E##_to_f32(E##_element half) {                                                                 \
        ddl__f32_u1 h = {half};                                                                                        \
        ddl__f32_v1 f;                                                                                                 \
        NAME##_WIDEN(1, f, h);                                                                                         \
        DDL__CANONICAL_NAN(ddl__f32, 1, f);                                                                            \
        return f[0];                                                                                                   \
    }                                                                                                                  \
    static inline E##_element E##_from_f32(float value) {                                                              \
        ddl__f32_v1 f = {value};                                                                                       \
        ddl__f32_u1 h;                                                                                                 \
        NAME##_NARROW(1, h, f);                                                                                        \
        return (E##_element)h[0];                                                                                      \
    }

DDL__DEFINE_HALF(ddl__f16, DDL__F16)
DDL__DEFINE_HALF(ddl__bf16, DDL__BF16)
DDL__DEFINE_HALF(ddl__e4m3, DDL__E4M3)
DDL__DEFINE_HALF(ddl__e5m2, DDL__E5M2)

/* Conversion of arrays, which must not overlap. */
typedef void (*ddl__cast_fn)(void *dst, const void *src, size_t count);

#define DDL__DEFINE_WIDEN(L, target, E, V, W, WIDEN)                                                                   \
    target static void E##_widen_##L(void *dst, const void *src, size_t count) {                                       \
        const size_t lanes = sizeof(ddl__f32_v##W) / sizeof(float);                                                    \
        float *d = dst;                                                                                                \
        const char *s = src;                                                                                           \
        size_t i = 0;                                                                                                  \
        for (; count - i >= lanes; i += lanes) {                                                                       \
            V##W h = *(const V##W *)(const void *)(s + sizeof(E##_element) * i);                                       \
            ddl__f32_v##W f;                                                                                           \
            WIDEN(W, f, h);                                                                                            \
            DDL__CANONICAL_NAN(ddl__f32, W, f);                                                                        \
            *(ddl__f32_v##W *)(void *)(d + i) = f;                                                                     \
        }                                                                                                              \
        for (; i < count; i++) {                                                                                       \
            E##_element h;                                                                                             \
            memcpy(&h, s + sizeof(h) * i, sizeof(h));                                                                  \
            d[i] = E##_to_f32(h);                                                                                      \
        }                                                                                                              \
        DDL__LEAVE_##L;                                                                                                \
    }

#define DDL__DEFINE_NARROW(L, target, E, V, W, NARROW)                                                                 \
    target static void E##_narrow_##L(void *dst, const void *src, size_t count) {                                      \
        const size_t lanes = sizeof(ddl__f32_v##W) / sizeof(float);                                                    \
        char *d = dst;                                                                                                 \
        const float *s = src;                                                                                          \
        size_t i = 0;                                                                                                  \
        for (; count - i >= lanes; i += lanes) {                                                                       \
            ddl__f32_v##W f = *(const ddl__f32_v##W *)(const void *)(s + i);                                           \
            V##W h;                                                                                                    \
            NARROW(W, h, f);                                                                                           \
            *(V##W *)(void *)(d + sizeof(E##_element) * i) = h;                                                        \
        }                                                                                                              \
        for (; i < count; i++) {                                                                                       \
            E##_element h = E##_from_f32(s[i]);                                                                        \
            memcpy(d + sizeof(h) * i, &h, sizeof(h));                                                                  \
        }                                                                                                              \
        DDL__LEAVE_##L;                                                                                                \
    }

/* Rounds src to dst, and leaves in src what that lost. Of finite values that the type holds. */
typedef void (*ddl__cast_keep_fn)(void *dst, float *src, size_t count);

#define DDL__DEFINE_NARROW_KEEP(L, target, E, W, WIDEN, NARROW)                                                        \
    target static void E##_narrow_keep_##L(void *dst, float *s, size_t count) {                                        \
        const size_t lanes = sizeof(ddl__f32_v##W) / sizeof(float);                                                    \
        char *d = dst;                                                                                                 \
        size_t i = 0;                                                                                                  \
        for (; count - i >= lanes; i += lanes) {                                                                       \
            ddl__f32_v##W f = *(const ddl__f32_v##W *)(const void *)(s + i), back;                                     \
            ddl__half_v##W h;                                                                                          \
            NARROW(W, h, f);                                                                                           \
            *(ddl__half_v##W *)(void *)(d + 2 * i) = h;                                                                \
            WIDEN(W, back, h);                                                                                         \
            *(ddl__f32_v##W *)(void *)(s + i) = f - back;                                                              \
        }                                                                                                              \
        for (; i < count; i++) {                                                                                       \
            uint16_t h = E##_from_f32(s[i]);                                                                           \
            memcpy(d + 2 * i, &h, 2);                                                                                  \
            s[i] -= E##_to_f32(h);                                                                                     \
        }                                                                                                              \
        DDL__LEAVE_##L;                                                                                                \
    }

/* The conversions of vectors.h on halves that lie one by one. */
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
#define DDL__BYTE_WIDEN_ARRAY(W, f, h, WIDEN)                                                                          \
    do {                                                                                                               \
        ddl__f32_u##W word_ = __builtin_convertvector(h, ddl__f32_u##W);                                               \
        WIDEN(W, f, word_);                                                                                            \
    } while (0)
#define DDL__BYTE_NARROW_ARRAY(W, h, f, NARROW)                                                                        \
    do {                                                                                                               \
        ddl__f32_u##W word_;                                                                                           \
        NARROW(W, word_, f);                                                                                           \
        (h) = __builtin_convertvector(word_, ddl__byte_v##W);                                                          \
    } while (0)
#define DDL__E4M3_WIDEN_ARRAY(W, f, h) DDL__BYTE_WIDEN_ARRAY(W, f, h, DDL__E4M3_WIDEN)
#define DDL__E5M2_WIDEN_ARRAY(W, f, h) DDL__BYTE_WIDEN_ARRAY(W, f, h, DDL__E5M2_WIDEN)
#define DDL__E4M3_NARROW_ARRAY(W, h, f) DDL__BYTE_NARROW_ARRAY(W, h, f, DDL__E4M3_NARROW)
#define DDL__E5M2_NARROW_ARRAY(W, h, f) DDL__BYTE_NARROW_ARRAY(W, h, f, DDL__E5M2_NARROW)

/* Kernels convert vectors of packed halves: OPEN makes two f32 vectors of one (here: of the low and of the high half of
 * each word), CLOSE rounds them back to where they came from. */
#define DDL__PACKED_OPEN(W, low, high, x, WIDEN)                                                                       \
    do {                                                                                                               \
        WIDEN(W, low, (x));                                                                                            \
        WIDEN(W, high, ((x) >> 16));                                                                                   \
    } while (0)
#define DDL__PACKED_CLOSE(W, r, low, high, NARROW)                                                                     \
    do {                                                                                                               \
        ddl__f32_u##W rl_, rh_;                                                                                        \
        NARROW(W, rl_, low);                                                                                           \
        NARROW(W, rh_, high);                                                                                          \
        (r) = rl_ | (rh_ << 16);                                                                                       \
    } while (0)
#define DDL__F16_BITS_OPEN(W, low, high, x) DDL__PACKED_OPEN(W, low, high, x, DDL__F16_WIDEN)
#define DDL__F16_BITS_CLOSE(W, r, low, high) DDL__PACKED_CLOSE(W, r, low, high, DDL__F16_NARROW)
#define DDL__BF16_OPEN(W, low, high, x) DDL__PACKED_OPEN(W, low, high, x, DDL__BF16_WIDEN)
#define DDL__BF16_CLOSE(W, r, low, high) DDL__PACKED_CLOSE(W, r, low, high, DDL__BF16_NARROW)

#if defined(__x86_64__)
/* F16C rounds as its immediate says (0 = to nearest even), whatever the modes of the thread. It keeps a part of a NaN's
 * payload, hence the step before. */
#define DDL__F16C_WIDEN(W, f, h) ((f) = (ddl__f32_v32)_mm256_cvtph_ps((__m128i)(h)))
#define DDL__F16C_NARROW(W, h, f)                                                                                      \
    do {                                                                                                               \
        DDL__CANONICAL_NAN(ddl__f32, W, f);                                                                            \
        (h) = (ddl__half_v32)_mm256_cvtps_ph((__m256)(f), 0);                                                          \
    } while (0)
#define DDL__F16_512_WIDEN(W, f, h) ((f) = (ddl__f32_v64)_mm512_cvtph_ps((__m256i)(h)))
/* All lanes: the form without a mask is a macro that gcc -O0 -Wsign-conversion warns of. */
#define DDL__F16_512_NARROW(W, h, f)                                                                                   \
    do {                                                                                                               \
        DDL__CANONICAL_NAN(ddl__f32, W, f);                                                                            \
        (h) = (ddl__half_v64)_mm512_maskz_cvtps_ph((__mmask16)0xffff, (__m512)(f), 0);                                 \
    } while (0)
/* 16 bytes of halves make one 32-byte vector, so that there is no high part. */
#define DDL__F16C_OPEN(W, low, high, x) ((low) = (ddl__f32_v32)_mm256_cvtph_ps((__m128i)(x)))
#define DDL__F16C_CLOSE(W, r, low, high)                                                                               \
    do {                                                                                                               \
        DDL__CANONICAL_NAN(ddl__f32, 32, low);                                                                         \
        (r) = (ddl__f16_v16)_mm256_cvtps_ph((__m256)(low), 0);                                                         \
    } while (0)

/* AVX512-BF16 rounds 32 values at once, but takes subnormals for zero and keeps a part of a NaN's payload. Vectors that
 * hold such a value, which are rare, are rounded by the bits. The instruction puts the low halves before the high
 * ones; the permutation makes them pairs again. */
#define DDL__NAN_OR_SUBNORMAL 0xa1
#define DDL__BF16_PAIRS                                                                                                \
    (ddl__f32_u64){0x00100000, 0x00110001, 0x00120002, 0x00130003, 0x00140004, 0x00150005, 0x00160006, 0x00170007,     \
                   0x00180008, 0x00190009, 0x001a000a, 0x001b000b, 0x001c000c, 0x001d000d, 0x001e000e, 0x001f000f}
#define DDL__BF16_512_CLOSE(W, r, low, high)                                                                           \
    do {                                                                                                               \
        __mmask16 low_odd_ = _mm512_fpclass_ps_mask((__m512)(low), DDL__NAN_OR_SUBNORMAL);                             \
        __mmask16 high_odd_ = _mm512_fpclass_ps_mask((__m512)(high), DDL__NAN_OR_SUBNORMAL);                           \
        if (__builtin_expect((low_odd_ | high_odd_) != 0, 0)) {                                                        \
            DDL__BF16_CLOSE(W, r, low, high);                                                                          \
        } else {                                                                                                       \
            __m512i both_ = (__m512i)_mm512_cvtne2ps_pbh((__m512)(high), (__m512)(low));                               \
            (r) = (ddl__bf16_v64)_mm512_permutexvar_epi16((__m512i)DDL__BF16_PAIRS, both_);                            \
        }                                                                                                              \
    } while (0)
#endif

/* The portable level of f16. Every 64-bit Arm converts it in hardware; others do it bit by bit. A lone half is cheapest
 * in a full vector (F16_TAIL) where there is an instruction. */
#if defined(__aarch64__)
#define DDL__F16_TAIL 16
#define DDL__F16_WIDEN_VECTOR(W, f, h) ((f) = (ddl__f32_v16)vcvt_f32_f16(vreinterpret_f16_u16((uint16x4_t)(h))))
#define DDL__F16_NARROW_VECTOR(W, h, f)                                                                                \
    do {                                                                                                               \
        DDL__CANONICAL_NAN(ddl__f32, W, f);                                                                            \
        (h) = (ddl__half_v16)vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)(f)));                                     \
    } while (0)
#define DDL__F16_OPEN(W, low, high, x)                                                                                 \
    do {                                                                                                               \
        float16x8_t both_ = vreinterpretq_f16_u32((uint32x4_t)(x));                                                    \
        (low) = (ddl__f32_v16)vcvt_f32_f16(vget_low_f16(both_));                                                       \
        (high) = (ddl__f32_v16)vcvt_high_f32_f16(both_);                                                               \
    } while (0)
#define DDL__F16_CLOSE(W, r, low, high)                                                                                \
    do {                                                                                                               \
        DDL__CANONICAL_NAN(ddl__f32, W, low);                                                                          \
        DDL__CANONICAL_NAN(ddl__f32, W, high);                                                                         \
        float16x4_t low_ = vcvt_f16_f32((float32x4_t)(low));                                                           \
        (r) = (ddl__f16_v16)vreinterpretq_u32_f16(vcvt_high_f16_f32(low_, (float32x4_t)(high)));                       \
    } while (0)
#else
#define DDL__F16_TAIL 1
#define DDL__F16_WIDEN_VECTOR DDL__F16_WIDEN_ARRAY
#define DDL__F16_NARROW_VECTOR DDL__F16_NARROW_ARRAY
#define DDL__F16_OPEN DDL__F16_BITS_OPEN
#define DDL__F16_CLOSE DDL__F16_BITS_CLOSE
#endif

#define DDL__HALF_CASTS(L, target, E, W, WIDEN, NARROW)                                                                \
    DDL__DEFINE_WIDEN(L, target, E, ddl__half_v, W, WIDEN)                                                             \
    DDL__DEFINE_NARROW(L, target, E, ddl__half_v, W, NARROW)                                                           \
    DDL__DEFINE_NARROW_KEEP(L, target, E, W, WIDEN, NARROW)
#define DDL__BYTE_CASTS(L, target, W)                                                                                  \
    DDL__DEFINE_WIDEN(L, target, ddl__e4m3, ddl__byte_v, W, DDL__E4M3_WIDEN_ARRAY)                                     \
    DDL__DEFINE_WIDEN(L, target, ddl__e5m2, ddl__byte_v, W, DDL__E5M2_WIDEN_ARRAY)                                     \
    DDL__DEFINE_NARROW(L, target, ddl__e4m3, ddl__byte_v, W, DDL__E4M3_NARROW_ARRAY)                                   \
    DDL__DEFINE_NARROW(L, target, ddl__e5m2, ddl__byte_v, W, DDL__E5M2_NARROW_ARRAY)

DDL__HALF_CASTS(portable, , ddl__f16, 16, DDL__F16_WIDEN_VECTOR, DDL__F16_NARROW_VECTOR)
DDL__HALF_CASTS(portable, , ddl__bf16, 16, DDL__BF16_WIDEN_ARRAY, DDL__BF16_NARROW_ARRAY)
DDL__BYTE_CASTS(portable, , 16)
#if defined(__x86_64__)
DDL__HALF_CASTS(avx2, DDL__AVX2, ddl__f16, 32, DDL__F16C_WIDEN, DDL__F16C_NARROW)
DDL__HALF_CASTS(avx2, DDL__AVX2, ddl__bf16, 32, DDL__BF16_WIDEN_ARRAY, DDL__BF16_NARROW_ARRAY)
DDL__BYTE_CASTS(avx2, DDL__AVX2, 32)
DDL__HALF_CASTS(avx512, DDL__AVX512, ddl__f16, 64, DDL__F16_512_WIDEN, DDL__F16_512_NARROW)
DDL__HALF_CASTS(avx512, DDL__AVX512, ddl__bf16, 64, DDL__BF16_WIDEN_ARRAY, DDL__BF16_NARROW_ARRAY)
#endif

/* The functions that turn an array of a narrow float into f32, and that round an array of f32 to it; of f16 and bf16
 * also the one that leaves in the f32 what rounding lost. */
typedef struct ddl__casts {
    ddl__cast_fn widen, narrow;
    ddl__cast_keep_fn narrow_keep;
} ddl__casts;

#define DDL__CASTS(half, byte)                                                                                         \
    {{ddl__f16_widen_##half, ddl__f16_narrow_##half, ddl__f16_narrow_keep_##half},                                     \
     {ddl__bf16_widen_##half, ddl__bf16_narrow_##half, ddl__bf16_narrow_keep_##half},                                  \
     {ddl__e4m3_widen_##byte, ddl__e4m3_narrow_##byte, NULL},                                                          \
     {ddl__e5m2_widen_##byte, ddl__e5m2_narrow_##byte, NULL}}

static inline ddl__casts ddl__casts_at(ddl__cpu level, ddl_dtype narrow) {
    static const ddl__casts portable[4] = DDL__CASTS(portable, portable);
    int place = narrow == DDL_F16 ? 0 : narrow == DDL_BF16 ? 1 : narrow == DDL_E4M3 ? 2 : 3;
#if defined(__x86_64__)
    static const ddl__casts avx2[4] = DDL__CASTS(avx2, avx2), avx512[4] = DDL__CASTS(avx512, avx2);
    if (level >= DDL__CPU_AVX2) {
        return level >= DDL__CPU_AVX512 ? avx512[place] : avx2[place];
    }
#endif
    (void)level;
    return portable[place];
}

static inline ddl__cast_fn ddl__widen_at(ddl__cpu level, ddl_dtype narrow) {
    return ddl__casts_at(level, narrow).widen;
}

static inline ddl__cast_fn ddl__narrow_at(ddl__cpu level, ddl_dtype narrow) {
    return ddl__casts_at(level, narrow).narrow;
}

static inline ddl__cast_keep_fn ddl__narrow_keep_at(ddl__cpu level, ddl_dtype half) {
    return ddl__casts_at(level, half).narrow_keep;
}

#endif /* DDL_DTYPE_HALF_H */

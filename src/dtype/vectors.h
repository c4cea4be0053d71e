/* dtype/vectors: the vector types that kernels are written in, and conversion of floats below f32 in them.
 * Must not know: reductions.
 *
 * Everything is written in the vector extensions of GCC and clang, because gcc 12 hardly vectorises a loop at -O2 and
 * the library has to be fast under the flags of its user. The same macro text serves every width, down to a vector of
 * one element for the end of a buffer, so that all elements of all paths get the same bits by construction.
 *
 * For each element type E there are E_v16 (16 bytes wide), E_v32, E_v64 and E_v1 (one element), the unsigned vectors of
 * the same shape E_u16, E_u32, E_u64, E_u1, and E_element. All of them may lie at any address and alias anything. */
#ifndef DDL_DTYPE_VECTORS_H
#define DDL_DTYPE_VECTORS_H

#include "types.h"
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define DDL__AVX2 __attribute__((target("avx2,f16c")))
#define DDL__AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
/* Last in each function with wide vectors: gcc adds it by itself only from -O2, and without it the SSE code of the
 * program runs slower on some processors. */
#define DDL__LEAVE_avx2 _mm256_zeroupper()
#define DDL__LEAVE_avx512 _mm256_zeroupper()
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#define DDL__LEAVE_portable ((void)0)

#define DDL__VECTOR(width) __attribute__((vector_size(width), aligned(1), may_alias))
#define DDL__DEFINE_VECTORS(E, element, type, unsigned_type)                                                           \
    typedef element E##_element;                                                                                       \
    typedef type E##_v1 DDL__VECTOR(sizeof(type));                                                                     \
    typedef type E##_v16 DDL__VECTOR(16);                                                                              \
    typedef type E##_v32 DDL__VECTOR(32);                                                                              \
    typedef type E##_v64 DDL__VECTOR(64);                                                                              \
    typedef unsigned_type E##_u1 DDL__VECTOR(sizeof(type));                                                            \
    typedef unsigned_type E##_u16 DDL__VECTOR(16);                                                                     \
    typedef unsigned_type E##_u32 DDL__VECTOR(32);                                                                     \
    typedef unsigned_type E##_u64 DDL__VECTOR(64);

DDL__DEFINE_VECTORS(ddl__i8, int8_t, int8_t, uint8_t)
DDL__DEFINE_VECTORS(ddl__u8, uint8_t, uint8_t, uint8_t)
DDL__DEFINE_VECTORS(ddl__i32, int32_t, int32_t, uint32_t)
DDL__DEFINE_VECTORS(ddl__u32, uint32_t, uint32_t, uint32_t)
DDL__DEFINE_VECTORS(ddl__i64, int64_t, int64_t, uint64_t)
DDL__DEFINE_VECTORS(ddl__u64, uint64_t, uint64_t, uint64_t)
DDL__DEFINE_VECTORS(ddl__f32, float, float, uint32_t)
DDL__DEFINE_VECTORS(ddl__f64, double, double, uint64_t)
/* Two halves ride in one 32-bit word: widening both takes shifts and masks, never a shuffle, and works in either byte
 * order since each half goes back to where it came from. A lone half leaves the other half of its word zero. */
DDL__DEFINE_VECTORS(ddl__f16, uint16_t, uint32_t, uint32_t)
DDL__DEFINE_VECTORS(ddl__bf16, uint16_t, uint32_t, uint32_t)
/* Likewise four floats of 8 bits. */
DDL__DEFINE_VECTORS(ddl__e4m3, uint8_t, uint32_t, uint32_t)
DDL__DEFINE_VECTORS(ddl__e5m2, uint8_t, uint32_t, uint32_t)
/* Vectors of elements one by one, for conversion between arrays; named after the width of the f32 side. */
typedef uint16_t ddl__half_v16 DDL__VECTOR(8);
typedef uint16_t ddl__half_v32 DDL__VECTOR(16);
typedef uint16_t ddl__half_v64 DDL__VECTOR(32);
typedef uint8_t ddl__byte_v16 DDL__VECTOR(4);
typedef uint8_t ddl__byte_v32 DDL__VECTOR(8);

/* Each DDL__..(E, W, ..) is a statement over vectors of element type E and width W.
 *
 * Every NaN result becomes the quiet NaN with all bits set, in every float type: which payload an addition keeps
 * depends on the order of its operands, yet ranks must agree on each bit. It costs a comparison and an "or"; AVX-512
 * compares into a mask, which compilers turn back into a vector before they "or", so there it is spelled out. */
#define DDL__CANONICAL_NAN(E, W, r) DDL__CANONICAL_NAN_##W(E, r)
#define DDL__CANONICAL_NAN_OR(E, W, r) ((r) = (E##_v##W)((E##_u##W)(r) | (E##_u##W)((r) != (r))))
#define DDL__CANONICAL_NAN_1(E, r) DDL__CANONICAL_NAN_OR(E, 1, r)
#define DDL__CANONICAL_NAN_16(E, r) DDL__CANONICAL_NAN_OR(E, 16, r)
#define DDL__CANONICAL_NAN_32(E, r) DDL__CANONICAL_NAN_OR(E, 32, r)
#if defined(__x86_64__)
#define DDL__CANONICAL_NAN_64(E, r) ((r) = E##_canonical_v64(r))
DDL__AVX512 static inline __attribute__((always_inline)) ddl__f32_v64 ddl__f32_canonical_v64(ddl__f32_v64 r) {
    __m512i ones = _mm512_set1_epi32(-1);
    __mmask16 nan = _mm512_cmp_ps_mask((__m512)r, (__m512)r, _CMP_UNORD_Q);
    return (ddl__f32_v64)_mm512_mask_mov_epi32((__m512i)r, nan, ones);
}
DDL__AVX512 static inline __attribute__((always_inline)) ddl__f64_v64 ddl__f64_canonical_v64(ddl__f64_v64 r) {
    __m512i ones = _mm512_set1_epi64(-1);
    __mmask8 nan = _mm512_cmp_pd_mask((__m512d)r, (__m512d)r, _CMP_UNORD_Q);
    return (ddl__f64_v64)_mm512_mask_mov_epi64((__m512i)r, nan, ones);
}
#endif

/* f = the f16 in the low 16 bits of each word of h. Subnormals become normal by a subtraction that has no subnormal
 * operand, so that flush-to-zero modes do not change the result. After F. Giesen, half_to_float_fast4. */
#define DDL__F16_WIDEN(W, f, h)                                                                                        \
    do {                                                                                                               \
        ddl__f32_u##W bits_ = ((h) & 0x7fff) << 13, exponent_ = bits_ & 0x0f800000;                                    \
        ddl__f32_u##W special_ = (ddl__f32_u##W)(exponent_ == 0x0f800000), tiny_ = (ddl__f32_u##W)(exponent_ == 0);    \
        ddl__f32_u##W normal_ = bits_ + 0x38000000 + (special_ & 0x38000000);                                          \
        ddl__f32_u##W small_ = (ddl__f32_u##W)((ddl__f32_v##W)(bits_ + 0x38800000) - 0x1p-14f);                        \
        (f) = (ddl__f32_v##W)((small_ & tiny_) | (normal_ & ~tiny_) | (((h) & 0x8000) << 16));                         \
    } while (0)

/* h = f rounded to nearest even as f16, in the low 16 bits of each word. Adding 0.5 aligns a result below 2^-14 so
 * that the addition itself rounds to the subnormal grid. After F. Giesen, float_to_half_fast3_rtne. */
#define DDL__F16_NARROW(W, h, f)                                                                                       \
    do {                                                                                                               \
        ddl__f32_u##W all_ = (ddl__f32_u##W)(f), bits_ = all_ & 0x7fffffff;                                            \
        ddl__i32_v##W order_ = (ddl__i32_v##W)bits_; /* SSE2 and AVX2 compare signed words only */                     \
        ddl__f32_u##W tiny_ = (ddl__f32_u##W)(order_ < 0x38800000), huge_ = (ddl__f32_u##W)(order_ >= 0x47800000);     \
        ddl__f32_u##W nan_ = (ddl__f32_u##W)(order_ > 0x7f800000);                                                     \
        ddl__f32_u##W small_ = (ddl__f32_u##W)((ddl__f32_v##W)bits_ + 0.5f) - 0x3f000000;                              \
        ddl__f32_u##W normal_ = (bits_ + 0xc8000fff + ((bits_ >> 13) & 1)) >> 13;                                      \
        normal_ = (small_ & tiny_) | (normal_ & ~tiny_ & ~huge_) | (huge_ & 0x7c00) | (nan_ & 0xffff);                 \
        (h) = normal_ | ((all_ >> 16) & 0x8000);                                                                       \
    } while (0)

#define DDL__BF16_WIDEN(W, f, h) ((f) = (ddl__f32_v##W)((h) << 16))

/* h = f rounded to nearest even as bf16; a carry out of the mantissa rightly becomes the next exponent. */
#define DDL__BF16_NARROW(W, h, f)                                                                                      \
    do {                                                                                                               \
        ddl__f32_u##W nan_ = (ddl__f32_u##W)((f) != (f)), bits_ = (ddl__f32_u##W)(f);                                  \
        (h) = ((bits_ + 0x7fff + ((bits_ >> 16) & 1)) | nan_) >> 16;                                                   \
    } while (0)

/* The 8-bit floats of the Open Compute Project, "OCP 8-bit Floating Point Specification (OFP8)", revision 1.0. e4m3 has
 * a bias of 7, no infinities, and one NaN of each sign, all ones below it; 448 is its largest. e5m2 is f16 without its
 * low byte. Conversion is the specification's without saturation: to nearest even, and what is then above the largest
 * becomes NaN in e4m3, infinite in e5m2. By the way of f16 above; the value is in the low 8 bits of each word of h. */
#define DDL__E4M3_WIDEN(W, f, h)                                                                                       \
    do {                                                                                                               \
        ddl__f32_u##W bits_ = ((h) & 0x7f) << 20;                                                                      \
        ddl__f32_u##W tiny_ = (ddl__f32_u##W)((bits_ & 0x07800000) == 0);                                              \
        ddl__f32_u##W nan_ = (ddl__f32_u##W)(bits_ == 0x07f00000), normal_ = bits_ + 0x3c000000;                       \
        ddl__f32_u##W small_ = (ddl__f32_u##W)((ddl__f32_v##W)(bits_ + 0x3c800000) - 0x1p-6f);                         \
        (f) = (ddl__f32_v##W)((small_ & tiny_) | (normal_ & ~tiny_) | (((h) & 0x80) << 24) | nan_);                    \
    } while (0)
#define DDL__E5M2_WIDEN(W, f, h) DDL__F16_WIDEN(W, f, ((h) << 8))

/* Halfway to the value after the largest, 464 and 61440, the even neighbour is the largest of e4m3 and what comes after
 * that of e5m2. Adding a power of two rounds to the subnormal grid, whose steps are 2^-9 and 2^-16. */
#define DDL__E4M3_NARROW(W, h, f)                                                                                      \
    do {                                                                                                               \
        ddl__f32_u##W all_ = (ddl__f32_u##W)(f), bits_ = all_ & 0x7fffffff;                                            \
        ddl__i32_v##W order_ = (ddl__i32_v##W)bits_;                                                                   \
        ddl__f32_u##W tiny_ = (ddl__f32_u##W)(order_ < 0x3c800000), nan_ = (ddl__f32_u##W)(order_ > 0x43e80000);       \
        ddl__f32_u##W small_ = (ddl__f32_u##W)((ddl__f32_v##W)bits_ + 0x1p14f) - 0x46800000;                           \
        ddl__f32_u##W normal_ = (bits_ + 0xc407ffff + ((bits_ >> 20) & 1)) >> 20;                                      \
        normal_ = (small_ & tiny_) | (normal_ & ~tiny_ & ~nan_) | (nan_ & 0xff);                                       \
        (h) = normal_ | ((all_ >> 24) & 0x80);                                                                         \
    } while (0)
#define DDL__E5M2_NARROW(W, h, f)                                                                                      \
    do {                                                                                                               \
        ddl__f32_u##W all_ = (ddl__f32_u##W)(f), bits_ = all_ & 0x7fffffff;                                            \
        ddl__i32_v##W order_ = (ddl__i32_v##W)bits_;                                                                   \
        ddl__f32_u##W tiny_ = (ddl__f32_u##W)(order_ < 0x38800000), huge_ = (ddl__f32_u##W)(order_ >= 0x47700000);     \
        ddl__f32_u##W nan_ = (ddl__f32_u##W)(order_ > 0x7f800000);                                                     \
        ddl__f32_u##W small_ = (ddl__f32_u##W)((ddl__f32_v##W)bits_ + 0x1p7f) - 0x43000000;                            \
        ddl__f32_u##W normal_ = (bits_ + 0xc80fffff + ((bits_ >> 21) & 1)) >> 21;                                      \
        normal_ = (small_ & tiny_) | (normal_ & ~tiny_ & ~huge_) | (huge_ & 0x7c) | (nan_ & 0xff);                     \
        (h) = normal_ | ((all_ >> 24) & 0x80);                                                                         \
    } while (0)

#endif /* DDL_DTYPE_VECTORS_H */

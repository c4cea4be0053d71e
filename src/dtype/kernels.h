/* dtype/kernels: dst = a op b for every type and op, and the table that finds the function.
 * Must not know: how many ranks there are, or what a group is.
 *
 * Promise: a op b and b op a have the same bits, on every level and processor. IEEE addition, multiplication and
 * comparison give that for numbers; every NaN result has all bits set; zeros order as -0 < +0 in min and max, where
 * a NaN operand wins. Integers wrap: they are added and multiplied unsigned.
 * What can void it: -ffast-math for the file of the implementation (NaN, signed zeros), and ranks whose threads run in
 * different rounding or flush-to-zero modes. With denormals-are-zero set, min and max may mix the bits of two subnormal
 * operands, which that mode counts as the same zero. */
#ifndef DDL_DTYPE_KERNELS_H
#define DDL_DTYPE_KERNELS_H

#include "half.h"

/* dst[i] = a[i] op b[i]. dst is a, or b, or overlaps neither; the pointers may be odd. */
typedef void (*ddl__reduce_fn)(void *dst, const void *a, const void *b, size_t count);

/* What an op does to one vector: r = x op y. */
#define DDL__DO_SUM(E, W, r, x, y) ((r) = (x) + (y))
#define DDL__DO_PROD(E, W, r, x, y) ((r) = (x) * (y))
#define DDL__DO_DIV(E, W, r, x, y) ((r) = (x) / (y))
#define DDL__DO_BAND(E, W, r, x, y) ((r) = (x) & (y))
#define DDL__DO_BOR(E, W, r, x, y) ((r) = (x) | (y))
#define DDL__DO_BXOR(E, W, r, x, y) ((r) = (x) ^ (y))
/* Comparisons give all bits set for true. */
#define DDL__DO_LAND(E, W, r, x, y) ((r) = (E##_v##W)((x) != 0) & (E##_v##W)((y) != 0) & 1)
#define DDL__DO_LOR(E, W, r, x, y) ((r) = (E##_v##W)(((x) | (y)) != 0) & 1)
#define DDL__DO_LXOR(E, W, r, x, y) ((r) = ((E##_v##W)((x) != 0) ^ (E##_v##W)((y) != 0)) & 1)
#define DDL__DO_MIN(E, W, r, x, y)                                                                                     \
    do {                                                                                                               \
        E##_v##W take_ = (E##_v##W)((x) < (y));                                                                        \
        (r) = ((x) & take_) | ((y) & ~take_);                                                                          \
    } while (0)
#define DDL__DO_MAX(E, W, r, x, y)                                                                                     \
    do {                                                                                                               \
        E##_v##W take_ = (E##_v##W)((x) > (y));                                                                        \
        (r) = ((x) & take_) | ((y) & ~take_);                                                                          \
    } while (0)

/* Floats. DDL__DIRECT_FLOAT or CLOSE makes a NaN canonical afterwards.
 * Neither less nor greater means equal or NaN: then both operands pass and are or-ed, which makes -0 of two different
 * zeros and keeps a NaN a NaN. */
#define DDL__DO_FMIN(E, W, r, x, y)                                                                                    \
    do {                                                                                                               \
        E##_u##W less_ = (E##_u##W)((x) < (y)), more_ = (E##_u##W)((x) > (y));                                         \
        (r) = (E##_v##W)(((E##_u##W)(x) & ~more_) | ((E##_u##W)(y) & ~less_));                                         \
    } while (0)
/* The mirror image: both operands are and-ed, which makes +0 of two different zeros but may lose a NaN, so that the
 * operands have to be asked. */
#define DDL__DO_FMAX(E, W, r, x, y)                                                                                    \
    do {                                                                                                               \
        E##_u##W less_ = (E##_u##W)((x) < (y)), more_ = (E##_u##W)((x) > (y));                                         \
        E##_u##W nan_ = (E##_u##W)((x) != (x)) | (E##_u##W)((y) != (y));                                               \
        E##_u##W both_ = ((E##_u##W)(x) | less_) & ((E##_u##W)(y) | more_);                                            \
        (r) = (E##_v##W)(both_ | nan_);                                                                                \
    } while (0)

/* How an op is applied to vectors as they lie in memory: directly, or to halves widened to f32 and rounded once. */
#define DDL__DIRECT(DO, E, W, r, x, y) DO(E, W, r, x, y)
#define DDL__DIRECT_FLOAT(DO, E, W, r, x, y)                                                                           \
    do {                                                                                                               \
        DO(E, W, r, x, y);                                                                                             \
        DDL__CANONICAL_NAN(E, W, r);                                                                                   \
    } while (0)
/* Halves are widened to vectors of F bytes: a low and a high one, or with F16C a single one. */
#define DDL__BOTH_PARTS(...) __VA_ARGS__
#define DDL__ONE_PART(...)
#define DDL__WIDENED(DO, F, PARTS, W, r, x, y, OPEN, CLOSE)                                                            \
    do {                                                                                                               \
        ddl__f32_v##F xl_, yl_, sl_;                                                                                   \
        PARTS(ddl__f32_v##F xh_, yh_, sh_;)                                                                            \
        OPEN(W, xl_, xh_, x);                                                                                          \
        OPEN(W, yl_, yh_, y);                                                                                          \
        DO(ddl__f32, F, sl_, xl_, yl_);                                                                                \
        PARTS(DO(ddl__f32, F, sh_, xh_, yh_);)                                                                         \
        CLOSE(W, r, sl_, sh_);                                                                                         \
    } while (0)
#define DDL__F16_APPLY(DO, E, W, r, x, y)                                                                              \
    DDL__WIDENED(DO, W, DDL__BOTH_PARTS, W, r, x, y, DDL__F16_OPEN, DDL__F16_CLOSE)
#define DDL__BF16_APPLY(DO, E, W, r, x, y)                                                                             \
    DDL__WIDENED(DO, W, DDL__BOTH_PARTS, W, r, x, y, DDL__BF16_OPEN, DDL__BF16_CLOSE)
#define DDL__BF16_512_APPLY(DO, E, W, r, x, y)                                                                         \
    DDL__WIDENED(DO, W, DDL__BOTH_PARTS, W, r, x, y, DDL__BF16_OPEN, DDL__BF16_512_CLOSE)
#define DDL__F16C_APPLY(DO, E, W, r, x, y)                                                                             \
    DDL__WIDENED(DO, 32, DDL__ONE_PART, W, r, x, y, DDL__F16C_OPEN, DDL__F16C_CLOSE)

/* Bytes are widened to four vectors of the same width, one of each byte of the words. */
#define DDL__BYTE_PART(DO, W, r, x, y, shift, WIDEN, NARROW)                                                           \
    do {                                                                                                               \
        ddl__f32_v##W xf_, yf_, sf_;                                                                                   \
        ddl__f32_u##W part_;                                                                                           \
        WIDEN(W, xf_, ((x) >> (shift)));                                                                               \
        WIDEN(W, yf_, ((y) >> (shift)));                                                                               \
        DO(ddl__f32, W, sf_, xf_, yf_);                                                                                \
        NARROW(W, part_, sf_);                                                                                         \
        (r) |= part_ << (shift);                                                                                       \
    } while (0)
#define DDL__BYTE_APPLY(DO, W, r, x, y, WIDEN, NARROW)                                                                 \
    do {                                                                                                               \
        (r) = (x) & 0;                                                                                                 \
        DDL__BYTE_PART(DO, W, r, x, y, 0, WIDEN, NARROW);                                                              \
        DDL__BYTE_PART(DO, W, r, x, y, 8, WIDEN, NARROW);                                                              \
        DDL__BYTE_PART(DO, W, r, x, y, 16, WIDEN, NARROW);                                                             \
        DDL__BYTE_PART(DO, W, r, x, y, 24, WIDEN, NARROW);                                                             \
    } while (0)
#define DDL__E4M3_APPLY(DO, E, W, r, x, y) DDL__BYTE_APPLY(DO, W, r, x, y, DDL__E4M3_WIDEN, DDL__E4M3_NARROW)
#define DDL__E5M2_APPLY(DO, E, W, r, x, y) DDL__BYTE_APPLY(DO, W, r, x, y, DDL__E5M2_WIDEN, DDL__E5M2_NARROW)

/* Vectors lie in memory as they are; a single element is the first of a vector that is otherwise zero. */
#define DDL__LOAD_VECTOR(E, W, x, p) ((x) = *(const E##_v##W *)(const void *)(p))
#define DDL__STORE_VECTOR(E, W, p, x) (*(E##_v##W *)(void *)(p) = (x))
#define DDL__LOAD_ELEMENT(E, W, x, p)                                                                                  \
    do {                                                                                                               \
        E##_element one_;                                                                                              \
        memcpy(&one_, (p), sizeof(one_));                                                                              \
        (x) = (E##_v##W){one_};                                                                                        \
    } while (0)
#define DDL__STORE_ELEMENT(E, W, p, x)                                                                                 \
    do {                                                                                                               \
        E##_element one_ = (E##_element)(x)[0];                                                                        \
        memcpy((p), &one_, sizeof(one_));                                                                              \
    } while (0)

/* The first bytes of a vector, as the variable `rest` says; the others are zero and stay as they are in memory. */
#define DDL__LOAD_REST(E, W, x, p) ((x) = (E##_v##W)_mm512_maskz_loadu_epi8(rest, (p)))
#define DDL__STORE_REST(E, W, p, x) _mm512_mask_storeu_epi8((p), rest, (__m512i)(x))

/* Both operands are loaded before the store, which makes dst == a and dst == b safe. */
#define DDL__STEP(WHAT, APPLY, DO, E, W, at)                                                                           \
    do {                                                                                                               \
        E##_v##W x, y, r;                                                                                              \
        DDL__LOAD_##WHAT(E, W, x, p + (at));                                                                           \
        DDL__LOAD_##WHAT(E, W, y, q + (at));                                                                           \
        APPLY(DO, E, W, r, x, y);                                                                                      \
        DDL__STORE_##WHAT(E, W, d + (at), r);                                                                          \
    } while (0)

/* What is less than a vector: single elements by the same text in vectors of width TAIL (a lone half is the low one of
 * a word whose other half is zero), or where there are masks a part of a vector. */
#define DDL__REST_portable(E, W, TAIL, APPLY, DO)                                                                      \
    for (; i < bytes; i += sizeof(E##_element)) {                                                                      \
        DDL__STEP(ELEMENT, APPLY, DO, E, TAIL, i);                                                                     \
    }
#define DDL__REST_avx2 DDL__REST_portable
#define DDL__REST_avx512(E, W, TAIL, APPLY, DO)                                                                        \
    if (i < bytes) {                                                                                                   \
        __mmask64 rest = ((uint64_t)1 << (bytes - i)) - 1;                                                             \
        DDL__STEP(REST, APPLY, DO, E, W, i);                                                                           \
    }

/* The one loop of all kernels: four vectors at a time (enough to keep loads and stores busy; more only adds code), then
 * one, then the rest. */
#define DDL__DEFINE_KERNEL(name, L, target, E, W, TAIL, APPLY, DO)                                                     \
    target static void E##_##name##_##L(void *dst, const void *a, const void *b, size_t count) {                       \
        char *d = dst;                                                                                                 \
        const char *p = a, *q = b;                                                                                     \
        size_t i = 0, bytes = count * sizeof(E##_element);                                                             \
        for (; bytes - i >= 4 * (W); i += 4 * (W)) {                                                                   \
            DDL__STEP(VECTOR, APPLY, DO, E, W, i);                                                                     \
            DDL__STEP(VECTOR, APPLY, DO, E, W, i + (W));                                                               \
            DDL__STEP(VECTOR, APPLY, DO, E, W, i + 2 * (W));                                                           \
            DDL__STEP(VECTOR, APPLY, DO, E, W, i + 3 * (W));                                                           \
        }                                                                                                              \
        for (; bytes - i >= (W); i += (W)) {                                                                           \
            DDL__STEP(VECTOR, APPLY, DO, E, W, i);                                                                     \
        }                                                                                                              \
        DDL__REST_##L(E, W, TAIL, APPLY, DO)                                                                           \
        DDL__LEAVE_##L;                                                                                                \
    }

#define DDL__FLOAT_KERNELS(L, target, E, W, TAIL, APPLY)                                                               \
    DDL__DEFINE_KERNEL(sum, L, target, E, W, TAIL, APPLY, DDL__DO_SUM)                                                 \
    DDL__DEFINE_KERNEL(prod, L, target, E, W, TAIL, APPLY, DDL__DO_PROD)                                               \
    DDL__DEFINE_KERNEL(min, L, target, E, W, TAIL, APPLY, DDL__DO_FMIN)                                                \
    DDL__DEFINE_KERNEL(max, L, target, E, W, TAIL, APPLY, DDL__DO_FMAX)

#define DDL__KERNEL(L, target, E, W, name, DO) DDL__DEFINE_KERNEL(name, L, target, E, W, 1, DDL__DIRECT, DO)

/* Only order tells a signed type from an unsigned one of its size; the rest is shared. */
#define DDL__ORDER_KERNELS(L, target, E, W)                                                                            \
    DDL__KERNEL(L, target, E, W, min, DDL__DO_MIN)                                                                     \
    DDL__KERNEL(L, target, E, W, max, DDL__DO_MAX)
#define DDL__INTEGER_KERNELS(L, target, E, SIGNED, W)                                                                  \
    DDL__KERNEL(L, target, E, W, sum, DDL__DO_SUM)                                                                     \
    DDL__KERNEL(L, target, E, W, prod, DDL__DO_PROD)                                                                   \
    DDL__KERNEL(L, target, E, W, band, DDL__DO_BAND)                                                                   \
    DDL__KERNEL(L, target, E, W, bor, DDL__DO_BOR)                                                                     \
    DDL__KERNEL(L, target, E, W, bxor, DDL__DO_BXOR)                                                                   \
    DDL__KERNEL(L, target, E, W, land, DDL__DO_LAND)                                                                   \
    DDL__KERNEL(L, target, E, W, lor, DDL__DO_LOR)                                                                     \
    DDL__KERNEL(L, target, E, W, lxor, DDL__DO_LXOR)                                                                   \
    DDL__ORDER_KERNELS(L, target, E, W)                                                                                \
    DDL__ORDER_KERNELS(L, target, SIGNED, W)

/* All kernels of a level, f16 apart. */
#define DDL__LEVEL_KERNELS(L, target, W)                                                                               \
    DDL__FLOAT_KERNELS(L, target, ddl__f32, W, 1, DDL__DIRECT_FLOAT)                                                   \
    DDL__FLOAT_KERNELS(L, target, ddl__f64, W, 1, DDL__DIRECT_FLOAT)                                                   \
    DDL__FLOAT_KERNELS(L, target, ddl__bf16, W, 1, DDL__BF16_APPLY)                                                    \
    DDL__FLOAT_KERNELS(L, target, ddl__e4m3, W, 1, DDL__E4M3_APPLY)                                                    \
    DDL__FLOAT_KERNELS(L, target, ddl__e5m2, W, 1, DDL__E5M2_APPLY)                                                    \
    DDL__DEFINE_KERNEL(div, L, target, ddl__f32, W, 1, DDL__DIRECT_FLOAT, DDL__DO_DIV)                                 \
    DDL__DEFINE_KERNEL(div, L, target, ddl__f64, W, 1, DDL__DIRECT_FLOAT, DDL__DO_DIV)                                 \
    DDL__INTEGER_KERNELS(L, target, ddl__u8, ddl__i8, W)                                                               \
    DDL__INTEGER_KERNELS(L, target, ddl__u32, ddl__i32, W)                                                             \
    DDL__INTEGER_KERNELS(L, target, ddl__u64, ddl__i64, W)

DDL__LEVEL_KERNELS(portable, , 16)
DDL__FLOAT_KERNELS(portable, , ddl__f16, 16, DDL__F16_TAIL, DDL__F16_APPLY)
#if defined(__x86_64__)
DDL__LEVEL_KERNELS(avx2, DDL__AVX2, 32)
DDL__FLOAT_KERNELS(avx2, DDL__AVX2, ddl__f16, 16, 16, DDL__F16C_APPLY)
DDL__FLOAT_KERNELS(avx512, DDL__AVX512, ddl__f32, 64, , DDL__DIRECT_FLOAT)
DDL__FLOAT_KERNELS(avx512, DDL__AVX512, ddl__f64, 64, , DDL__DIRECT_FLOAT)
DDL__FLOAT_KERNELS(avx512, DDL__AVX512, ddl__bf16, 64, , DDL__BF16_512_APPLY)
#endif

#endif /* DDL_DTYPE_KERNELS_H */

/* compress/kernels: the loops of the block codes (int8, QSGD, sign), in vectors.
 * Must not know: configs, tails, values that are not finite.
 *
 * A code is runs of 16 words. With b bits per element a run holds 512 / b of them: word i has the elements i + 16 k of
 * the run, k = 0, 1, ..., each in bits b*k and up. So vectors of any width pack with shifts and no shuffle. */
#ifndef DDL_COMPRESS_KERNELS_H
#define DDL_COMPRESS_KERNELS_H

#include "../optim/vectors.h"
#include "config.h"

/* What is known of a block before it is coded. */
typedef struct ddl__block_facts {
    uint32_t max_bits; /* the largest magnitude as bits: 0x7f800000 and more are not finite */
    float sum;         /* of the magnitudes */
} ddl__block_facts;

#define DDL__INFINITE_BITS 0x7f800000u

static inline ddl__i32_v16 ddl__larger(ddl__i32_v16 a, ddl__i32_v16 b) {
    ddl__i32_v16 more = a > b;
    return (a & more) | (b & ~more);
}
#define DDL__LARGER_16(a, b) ddl__larger(a, b)
#define DDL__LARGER_32(a, b) ((ddl__i32_v32)_mm256_max_epi32((__m256i)(a), (__m256i)(b)))
#define DDL__LARGER_64(a, b) ((ddl__i32_v64)_mm512_max_epi32((__m512i)(a), (__m512i)(b)))

/* The lanes of 64 bytes as 64 / W vectors, so that sums have the same order at every level. */
#define DDL__CORRECT_ZERO(W, j)                                                                                        \
    if ((j) < 64 / (W)) {                                                                                              \
        sum[(j) % (64 / (W))] = (ddl__f32_v##W){0};                                                                    \
        most[(j) % (64 / (W))] = (ddl__i32_v##W){0};                                                                   \
    }
#define DDL__CORRECT_STEP(W, j)                                                                                        \
    if ((j) < 64 / (W)) {                                                                                              \
        int64_t at = i + (j) * ((W) / 4);                                                                              \
        ddl__f32_v##W x = *(const ddl__f32_v##W *)(const void *)(g + at);                                              \
        x += *(const ddl__f32_v##W *)(const void *)(e + at);                                                           \
        *(ddl__f32_v##W *)(void *)(corrected + at) = x;                                                                \
        ddl__i32_v##W bits = (ddl__i32_v##W)((ddl__f32_u##W)x & 0x7fffffff);                                           \
        most[(j) % (64 / (W))] = DDL__LARGER_##W(bits, most[(j) % (64 / (W))]);                                        \
        sum[(j) % (64 / (W))] += (ddl__f32_v##W)bits;                                                                  \
    }
#define DDL__CORRECT_PUT(W, j)                                                                                         \
    if ((j) < 64 / (W)) {                                                                                              \
        *(ddl__f32_v##W *)(void *)(sums + (j) * ((W) / 4)) = sum[(j) % (64 / (W))];                                    \
        *(ddl__i32_v##W *)(void *)(mosts + (j) * ((W) / 4)) = most[(j) % (64 / (W))];                                  \
    }
#define DDL__EACH_OF_4(STEP, W) STEP(W, 0) STEP(W, 1) STEP(W, 2) STEP(W, 3)
/* corrected = g + e, and the facts. count is a multiple of DDL__RUN; corrected may be g or e. */
#define DDL__DEFINE_CORRECT(L, target, W)                                                                              \
    target static void ddl__correct_##L(float *corrected, const float *g, const float *e, int64_t count,               \
                                        ddl__block_facts *out) {                                                       \
        ddl__f32_v##W sum[64 / (W)];                                                                                   \
        ddl__i32_v##W most[64 / (W)];                                                                                  \
        float sums[DDL__RUN];                                                                                          \
        uint32_t mosts[DDL__RUN];                                                                                      \
        DDL__EACH_OF_4(DDL__CORRECT_ZERO, W)                                                                           \
        for (int64_t i = 0; i < count; i += DDL__RUN) {                                                                \
            __builtin_prefetch(g + i + DDL__CODE_BLOCK); /* the next block comes while this one is coded */            \
            __builtin_prefetch(e + i + DDL__CODE_BLOCK, 1);                                                            \
            DDL__EACH_OF_4(DDL__CORRECT_STEP, W)                                                                       \
        }                                                                                                              \
        DDL__EACH_OF_4(DDL__CORRECT_PUT, W)                                                                            \
        DDL__LEAVE_##L;                                                                                                \
        *out = (ddl__block_facts){0, 0};                                                                               \
        for (int i = 0; i < DDL__RUN; i++) {                                                                           \
            out->max_bits = DDL__MAX(out->max_bits, mosts[i]);                                                         \
            out->sum += sums[i];                                                                                       \
        }                                                                                                              \
    }

/* How a block is coded: value = step * level, level = value * inverse rounded, at most `levels`. */
typedef struct ddl__quantum {
    float step, inverse;
    int32_t levels;
    uint32_t key[2], first; /* of dithering: the stream, and the number of the block's first element in it */
} ddl__quantum;

#define DDL__IOTA_16 ((ddl__u32_u16){0, 1, 2, 3})
#define DDL__IOTA_32 ((ddl__u32_u32){0, 1, 2, 3, 4, 5, 6, 7})
#define DDL__IOTA_64 ((ddl__u32_u64){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})

/* To nearest: of equals the larger. */
#define DDL__ROUND_NEAREST(W, level, y, at) ((level) = __builtin_convertvector((y) + 0.5f, ddl__i32_v##W))
/* Up with the probability that makes the mean right. The random number is a hash of (key, number of the element): the
 * 32-bit mixer "lowbias32" of C. Wellons, keyed before and between its rounds. */
#define DDL__ROUND_DITHER(W, level, y, at)                                                                             \
    do {                                                                                                               \
        ddl__u32_u##W h_ = (DDL__IOTA_##W + (q.first + (uint32_t)(at))) * 0x9e3779b9u + q.key[0];                      \
        h_ = (h_ ^ (h_ >> 16)) * 0x7feb352du + q.key[1];                                                               \
        h_ = (h_ ^ (h_ >> 15)) * 0x846ca68bu;                                                                          \
        h_ = (h_ ^ (h_ >> 16)) >> 8;                                                                                   \
        ddl__f32_v##W draw_ = __builtin_convertvector((ddl__i32_v##W)h_, ddl__f32_v##W) * 0x1p-24f;                    \
        (level) = __builtin_convertvector(y, ddl__i32_v##W);                                                           \
        (level) -= (ddl__i32_v##W)(draw_ < (y)-__builtin_convertvector(level, ddl__f32_v##W));                         \
    } while (0)

/* Codes `runs` runs of x and leaves in x what the code misses. */
#define DDL__DEFINE_PACK(L, target, W, name, BITS, ROUND)                                                              \
    target static void ddl__pack_##name##_##L(void *code, float *x, int64_t runs, const ddl__quantum *quantum) {       \
        const ddl__quantum q = *quantum;                                                                               \
        for (int64_t lane = 0; lane < 16 * runs; lane += (W) / 4) {                                                    \
            int64_t first = lane / 16 * (512 / (BITS)) + lane % 16;                                                    \
            ddl__i32_v##W word = DDL__ZERO(ddl__i32, W);                                                               \
            for (int k = 0; k < 32 / (BITS); k++) {                                                                    \
                int64_t at = first + 16 * k;                                                                           \
                ddl__f32_v##W value = *(const ddl__f32_v##W *)(const void *)(x + at), y;                               \
                ddl__f32_u##W sign = (ddl__f32_u##W)value & 0x80000000u;                                               \
                ddl__i32_v##W negative = (ddl__i32_v##W)value >> 31, level, over;                                      \
                DDL__MUL(y, (ddl__f32_v##W)((ddl__f32_u##W)value ^ sign), q.inverse);                                  \
                ROUND(W, level, y, at);                                                                                \
                over = level > q.levels;                                                                               \
                level = (level & ~over) | (over & q.levels);                                                           \
                DDL__MUL(y, __builtin_convertvector(level, ddl__f32_v##W), q.step);                                    \
                *(ddl__f32_v##W *)(void *)(x + at) = value - (ddl__f32_v##W)((ddl__f32_u##W)y | sign);                 \
                level = (level ^ negative) - negative;                                                                 \
                word |= (level & (int32_t)((1u << (BITS)) - 1)) << (k * (BITS));                                       \
            }                                                                                                          \
            *(ddl__i32_v##W *)(void *)((char *)code + 4 * lane) = word;                                                \
        }                                                                                                              \
        DDL__LEAVE_##L;                                                                                                \
    }

/* sum += the values of a code. */
#define DDL__DEFINE_UNPACK(L, target, W, name, BITS)                                                                   \
    target static void ddl__unpack_##name##_##L(float *sum, const void *code, int64_t runs, float step) {              \
        for (int64_t lane = 0; lane < 16 * runs; lane += (W) / 4) {                                                    \
            int64_t first = lane / 16 * (512 / (BITS)) + lane % 16;                                                    \
            ddl__i32_v##W word = *(const ddl__i32_v##W *)(const void *)((const char *)code + 4 * lane);                \
            for (int k = 0; k < 32 / (BITS); k++) {                                                                    \
                ddl__i32_v##W level = (ddl__i32_v##W)((ddl__i32_u##W)word << (32 - (BITS) * (k + 1)));                 \
                level >>= 32 - (BITS);                                                                                 \
                ddl__f32_v##W y;                                                                                       \
                DDL__MUL(y, __builtin_convertvector(level, ddl__f32_v##W), step);                                      \
                *(ddl__f32_v##W *)(void *)(sum + first + 16 * k) += y;                                                 \
            }                                                                                                          \
        }                                                                                                              \
        DDL__LEAVE_##L;                                                                                                \
    }

/* Signs: a bit that is set is -step, one that is not +step; zero counts as positive. */
#define DDL__DEFINE_SIGNS(L, target, W)                                                                                \
    target static void ddl__pack_sign_##L(void *code, float *x, int64_t runs, const ddl__quantum *quantum) {           \
        const float step = quantum->step;                                                                              \
        for (int64_t lane = 0; lane < 16 * runs; lane += (W) / 4) {                                                    \
            int64_t first = lane / 16 * 512 + lane % 16;                                                               \
            ddl__f32_u##W word = DDL__ZERO_BITS(W);                                                                    \
            for (int k = 0; k < 32; k++) {                                                                             \
                ddl__f32_v##W *at = (ddl__f32_v##W *)(void *)(x + first + 16 * k), value = *at;                        \
                ddl__f32_u##W negative = (ddl__f32_u##W)(value < 0);                                                   \
                ddl__f32_u##W size = (ddl__f32_u##W)(DDL__ZERO(ddl__f32, W) + step);                                   \
                *at = value - (ddl__f32_v##W)((negative & 0x80000000u) | size);                                        \
                word |= (negative & 1) << k;                                                                           \
            }                                                                                                          \
            *(ddl__f32_u##W *)(void *)((char *)code + 4 * lane) = word;                                                \
        }                                                                                                              \
        DDL__LEAVE_##L;                                                                                                \
    }                                                                                                                  \
    target static void ddl__unpack_sign_##L(float *sum, const void *code, int64_t runs, float step) {                  \
        for (int64_t lane = 0; lane < 16 * runs; lane += (W) / 4) {                                                    \
            int64_t first = lane / 16 * 512 + lane % 16;                                                               \
            ddl__f32_u##W word = *(const ddl__f32_u##W *)(const void *)((const char *)code + 4 * lane);                \
            for (int k = 0; k < 32; k++) {                                                                             \
                ddl__f32_u##W sign = (word << (31 - k)) & 0x80000000u;                                                 \
                ddl__f32_u##W y = sign | (ddl__f32_u##W)(DDL__ZERO(ddl__f32, W) + step);                               \
                *(ddl__f32_v##W *)(void *)(sum + first + 16 * k) += (ddl__f32_v##W)y;                                  \
            }                                                                                                          \
        }                                                                                                              \
        DDL__LEAVE_##L;                                                                                                \
    }

#define DDL__ZERO(E, W) ((E##_v##W){0})
#define DDL__ZERO_BITS(W) ((ddl__f32_u##W){0})

/* y += a * x, each product rounded, so that all ranks get the same bits. count: a multiple of DDL__RUN. */
#define DDL__DEFINE_AXPY(L, target, W)                                                                                 \
    target static void ddl__axpy_##L(float *y, const float *x, float a, int64_t count) {                               \
        for (int64_t i = 0; i < count; i += (W) / 4) {                                                                 \
            ddl__f32_v##W t;                                                                                           \
            DDL__MUL(t, *(const ddl__f32_v##W *)(const void *)(x + i), a);                                             \
            *(ddl__f32_v##W *)(void *)(y + i) += t;                                                                    \
        }                                                                                                              \
        DDL__LEAVE_##L;                                                                                                \
    }

/* Puts the numbers of those of `count` elements whose magnitude is at least that of `least` bits into out, in order;
 * returns how many. There is no portable way to ask a vector which of its lanes are set. */
static inline int64_t ddl__above_portable(const float *x, int64_t count, uint32_t least, int32_t first, int32_t *out) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        if ((bits & 0x7fffffff) >= least) {
            out[found++] = first + (int32_t)i;
        }
    }
    return found;
}
#if defined(__x86_64__)
#define DDL__LANES_32(mask) ((uint32_t)_mm256_movemask_ps((__m256)(mask)))
#define DDL__LANES_64(mask) ((uint32_t)_mm512_movepi32_mask((__m512i)(mask)))
#define DDL__DEFINE_ABOVE(L, target, W)                                                                                \
    target static int64_t ddl__above_##L(const float *x, int64_t count, uint32_t least, int32_t first, int32_t *out) { \
        int64_t found = 0, i = 0;                                                                                      \
        for (; i + (W) / 4 <= count; i += (W) / 4) {                                                                   \
            ddl__i32_v##W bits = *(const ddl__i32_v##W *)(const void *)(x + i) & 0x7fffffff;                           \
            uint32_t lanes = DDL__LANES_##W(bits > (int32_t)least - 1);                                                \
            for (; lanes != 0; lanes &= lanes - 1) {                                                                   \
                out[found++] = first + (int32_t)i + __builtin_ctz(lanes);                                              \
            }                                                                                                          \
        }                                                                                                              \
        DDL__LEAVE_##L;                                                                                                \
        return found + ddl__above_portable(x + i, count - i, least, first + (int32_t)i, out + found);                  \
    }
DDL__DEFINE_ABOVE(avx2, DDL__AVX2, 32)
DDL__DEFINE_ABOVE(avx512, DDL__AVX512, 64)
#endif

#define DDL__DEFINE_CODES(L, target, W)                                                                                \
    DDL__DEFINE_CORRECT(L, target, W)                                                                                  \
    DDL__DEFINE_PACK(L, target, W, nearest8, 8, DDL__ROUND_NEAREST)                                                    \
    DDL__DEFINE_PACK(L, target, W, dither8, 8, DDL__ROUND_DITHER)                                                      \
    DDL__DEFINE_PACK(L, target, W, dither4, 4, DDL__ROUND_DITHER)                                                      \
    DDL__DEFINE_UNPACK(L, target, W, level8, 8)                                                                        \
    DDL__DEFINE_UNPACK(L, target, W, level4, 4)                                                                        \
    DDL__DEFINE_SIGNS(L, target, W)                                                                                    \
    DDL__DEFINE_AXPY(L, target, W)
DDL__DEFINE_CODES(portable, , 16)
#if defined(__x86_64__)
DDL__DEFINE_CODES(avx2, DDL__AVX2, 32)
DDL__DEFINE_CODES(avx512, DDL__AVX512, 64)
#endif

#endif /* DDL_COMPRESS_KERNELS_H */

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
#define DDL__CORRECT_ZERO(W, j, KEEP)                                                                                  \
    if ((j) < 64 / (W)) {                                                                                              \
        sum[(j) % (64 / (W))] = (ddl__f32_v##W){0};                                                                    \
        most[(j) % (64 / (W))] = (ddl__i32_v##W){0};                                                                   \
    }
#define DDL__CORRECT_STEP(W, j, KEEP)                                                                                  \
    if ((j) < 64 / (W)) {                                                                                              \
        int64_t at = i + (j) * ((W) / 4);                                                                              \
        ddl__f32_v##W x = *(const ddl__f32_v##W *)(const void *)(g + at);                                              \
        if (KEEP) {                                                                                                    \
            x += *(const ddl__f32_v##W *)(const void *)(e + at);                                                       \
            *(ddl__f32_v##W *)(void *)(corrected + at) = x;                                                            \
        }                                                                                                              \
        ddl__i32_v##W bits = (ddl__i32_v##W)((ddl__f32_u##W)x & 0x7fffffff);                                           \
        most[(j) % (64 / (W))] = DDL__LARGER_##W(bits, most[(j) % (64 / (W))]);                                        \
        if (KEEP) {                                                                                                    \
            sum[(j) % (64 / (W))] += (ddl__f32_v##W)bits;                                                              \
        }                                                                                                              \
    }
#define DDL__CORRECT_PUT(W, j, KEEP)                                                                                   \
    if ((j) < 64 / (W)) {                                                                                              \
        *(ddl__f32_v##W *)(void *)(sums + (j) * ((W) / 4)) = sum[(j) % (64 / (W))];                                    \
        *(ddl__i32_v##W *)(void *)(mosts + (j) * ((W) / 4)) = most[(j) % (64 / (W))];                                  \
    }
#define DDL__EACH_OF_4(STEP, W, KEEP) STEP(W, 0, KEEP) STEP(W, 1, KEEP) STEP(W, 2, KEEP) STEP(W, 3, KEEP)
/* So many elements ahead memory is asked for: what the loops over a block in cache take must not stop the stream. */
#define DDL__AHEAD (4 * DDL__CODE_BLOCK)
/* correct: corrected = g + e, and the facts. count is a multiple of DDL__RUN; corrected may be g or e. correct_g asks
 * memory for g alone: the pack of signs, which computes little, asks for e, so that there is always something on its
 * way. survey: the largest of g alone. */
#define DDL__DEFINE_CORRECT(L, target, W, name, KEEP, ASK)                                                             \
    target static void ddl__##name##_##L(float *corrected, const float *g, const float *e, int64_t count,              \
                                         ddl__block_facts *out) {                                                      \
        ddl__f32_v##W sum[64 / (W)];                                                                                   \
        ddl__i32_v##W most[64 / (W)];                                                                                  \
        float sums[DDL__RUN];                                                                                          \
        uint32_t mosts[DDL__RUN];                                                                                      \
        DDL__EACH_OF_4(DDL__CORRECT_ZERO, W, KEEP)                                                                     \
        for (int64_t i = 0; i < count; i += DDL__RUN) {                                                                \
            __builtin_prefetch(g + i + DDL__AHEAD);                                                                    \
            if (ASK) {                                                                                                 \
                __builtin_prefetch(e + i + DDL__AHEAD, 1);                                                             \
            }                                                                                                          \
            DDL__EACH_OF_4(DDL__CORRECT_STEP, W, KEEP)                                                                 \
        }                                                                                                              \
        DDL__EACH_OF_4(DDL__CORRECT_PUT, W, KEEP)                                                                      \
        DDL__LEAVE_##L;                                                                                                \
        *out = (ddl__block_facts){0, 0};                                                                               \
        for (int i = 0; i < DDL__RUN; i++) {                                                                           \
            out->max_bits = DDL__MAX(out->max_bits, mosts[i]);                                                         \
            out->sum += sums[i];                                                                                       \
        }                                                                                                              \
        (void)corrected, (void)e;                                                                                      \
    }

typedef void (*ddl__correct_fn)(float *corrected, const float *g, const float *e, int64_t count, ddl__block_facts *out);

/* How a block is coded: value = step * level, level = value * inverse rounded, at most `levels`. */
typedef struct ddl__quantum {
    float step, inverse;
    int32_t levels;
    uint32_t key[2], first; /* of dithering: the stream, and the number of the block's first element in it */
} ddl__quantum;

#define DDL__IOTA_16 ((ddl__u32_u16){0, 1, 2, 3})
#define DDL__IOTA_32 ((ddl__u32_u32){0, 1, 2, 3, 4, 5, 6, 7})
#define DDL__IOTA_64 ((ddl__u32_u64){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})

/* 1.5 * 2^23: a float below 2^22 that this is added to is rounded to the nearest whole number, of equals to the even
 * one, and stands in the low bits of the sum. */
#define DDL__WHOLE 12582912.0f
#define DDL__WHOLE_BITS 0x4b400000

/* fixed = value * inverse to nearest. */
#define DDL__NEAREST_POINT 0
#define DDL__ROUND_NEAREST(W, fixed, value, k)                                                                         \
    do {                                                                                                               \
        ddl__f32_v##W y_;                                                                                              \
        DDL__MUL(y_, value, q.inverse);                                                                                \
        (fixed) = (ddl__i32_v##W)(y_ + DDL__WHOLE) - DDL__WHOLE_BITS;                                                  \
    } while (0)
/* fixed has 15 bits behind the point, which the pack drops; to them 15 random bits are added, so that the mean of what
 * stays is right. They are halves of a hash of (key, number of the element): the 32-bit mixer "lowbias32" of C.
 * Wellons, keyed before and between its rounds; elements 16 apart share one. No clamp: the largest value is `levels` to
 * less than half of the last bit, and what is added never carries further. */
#define DDL__DITHER_POINT 15
#define DDL__ROUND_DITHER(W, fixed, value, k)                                                                          \
    do {                                                                                                               \
        ddl__f32_v##W y_;                                                                                              \
        if ((k) % 2 == 0) {                                                                                            \
            hash = hash_first + (q.first + (uint32_t)(first + 16 * (k))) * DDL__GOLDEN;                                \
            hash = (hash ^ (hash >> 16)) * 0x7feb352du + q.key[1];                                                     \
            hash = (hash ^ (hash >> 15)) * 0x846ca68bu;                                                                \
            hash = hash ^ (hash >> 16);                                                                                \
        }                                                                                                              \
        DDL__MUL(y_, value, q.inverse * 0x1p15f);                                                                      \
        ddl__u32_u##W draw_ = hash & 0x7fff;                                                                           \
        if ((k) % 2 == 1) {                                                                                            \
            draw_ = hash >> 17;                                                                                        \
        }                                                                                                              \
        (fixed) = (ddl__i32_v##W)(draw_ | -(uint32_t)DDL__WHOLE_BITS) + (ddl__i32_v##W)(y_ + DDL__WHOLE);              \
    } while (0)
#define DDL__GOLDEN 0x9e3779b9u

/* Codes `runs` runs of x; with KEEP, leaves in x what the code misses. */
#define DDL__DEFINE_PACK(L, target, W, name, BITS, WAY, KEEP)                                                          \
    target static void ddl__pack_##name##_##L(void *code, float *x, int64_t runs, const ddl__quantum *quantum) {       \
        const ddl__quantum q = *quantum;                                                                               \
        const ddl__u32_u##W hash_first = DDL__IOTA_##W * DDL__GOLDEN + q.key[0];                                       \
        ddl__u32_u##W hash = hash_first;                                                                               \
        for (int64_t lane = 0; lane < 16 * runs; lane += (W) / 4) {                                                    \
            int64_t first = lane / 16 * (512 / (BITS)) + lane % 16;                                                    \
            ddl__u32_u##W word = DDL__ZERO_BITS(W);                                                                    \
            DDL__UNROLL for (int k = 0; k < 32 / (BITS); k++) {                                                        \
                const int up = (BITS) * k - DDL__##WAY##_POINT;                                                        \
                ddl__f32_v##W *at = (ddl__f32_v##W *)(void *)(x + first + 16 * k), value = *at;                        \
                ddl__i32_v##W fixed;                                                                                   \
                DDL__ROUND_##WAY(W, fixed, value, k);                                                                  \
                if (KEEP) {                                                                                            \
                    ddl__f32_v##W back = __builtin_convertvector(fixed >> DDL__##WAY##_POINT, ddl__f32_v##W);          \
                    DDL__MUL(back, back, q.step);                                                                      \
                    *at = value - back;                                                                                \
                }                                                                                                      \
                ddl__u32_u##W bits = (ddl__u32_u##W)fixed;                                                             \
                if (up < 0) {                                                                                          \
                    bits >>= -up;                                                                                      \
                } else {                                                                                               \
                    bits <<= up;                                                                                       \
                }                                                                                                      \
                word |= bits & ((1u << (BITS)) - 1) << (k * (BITS));                                                   \
            }                                                                                                          \
            *(ddl__u32_u##W *)(void *)((char *)code + 4 * lane) = word;                                                \
        }                                                                                                              \
        (void)hash;                                                                                                    \
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

/* Signs: a bit that is set is -step, one that is not +step; zero counts as positive, and -0 + 0 is 0. A word is shifted
 * in from above: 32 masks, one for each bit, would not fit into registers. */
#define DDL__DEFINE_PACK_SIGN(L, target, W, name, KEEP)                                                                \
    target static void ddl__pack_##name##_##L(void *code, float *x, int64_t runs, const ddl__quantum *quantum) {       \
        const ddl__f32_u##W size = (ddl__f32_u##W)(DDL__ZERO(ddl__f32, W) + quantum->step);                            \
        for (int64_t lane = 0; lane < 16 * runs; lane += (W) / 4) {                                                    \
            int64_t first = lane / 16 * 512 + lane % 16;                                                               \
            ddl__f32_u##W word = DDL__ZERO_BITS(W);                                                                    \
            DDL__UNROLL for (int k = 0; k < 32; k++) {                                                                 \
                ddl__f32_v##W *at = (ddl__f32_v##W *)(void *)(x + first + 16 * k), value = *at;                        \
                ddl__f32_u##W sign = (ddl__f32_u##W)(value + DDL__ZERO(ddl__f32, W)) & 0x80000000u;                    \
                if (KEEP) {                                                                                            \
                    __builtin_prefetch(at + DDL__AHEAD / ((W) / 4), 1);                                                \
                    *at = value - (ddl__f32_v##W)(sign | size);                                                        \
                }                                                                                                      \
                word = (word >> 1) | sign;                                                                             \
            }                                                                                                          \
            *(ddl__f32_u##W *)(void *)((char *)code + 4 * lane) = word;                                                \
        }                                                                                                              \
        DDL__LEAVE_##L;                                                                                                \
    }
#define DDL__DEFINE_UNPACK_SIGN(L, target, W)                                                                          \
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
#define DDL__UNROLL _Pragma("GCC unroll 32") /* at -O2 gcc leaves loops alone; shifts by constants are cheaper */

/* ---- PowerSGD: four rows of a matrix at once, so that what is read of the other factor serves them all ----
 * next: as many elements that are asked of memory meanwhile. */

#define DDL__ROWS_AT_ONCE 4
#define DDL__ASK_ROW(p) __builtin_prefetch(p, 0, 2); /* the first level holds the rows that are under way */
#define DDL__FLOATS_AT(W, p) (*(const ddl__f32_v##W *)(const void *)(p))

/* out[r] = the sum of m[r][i] * y[i], in an order of the level's own. count: a multiple of 2 * DDL__RUN. */
#define DDL__DOTS_STEP(W, r, unused)                                                                                   \
    even[r] += DDL__FLOATS_AT(W, m[r] + i) * y_even;                                                                   \
    odd[r] += DDL__FLOATS_AT(W, m[r] + i + (W) / 4) * y_odd;
#define DDL__DOTS_PUT(W, r, unused) *(ddl__f32_v##W *)(void *)lanes[r] = even[r] + odd[r];
#define DDL__DEFINE_DOTS(L, target, W)                                                                                 \
    target static void ddl__dots_##L(float *out, const float *const *rows, const float *y, const float *next,          \
                                   int64_t count) {                                                                    \
        const float *const m[DDL__ROWS_AT_ONCE] = {rows[0], rows[1], rows[2], rows[3]};                                \
        ddl__f32_v##W even[DDL__ROWS_AT_ONCE] = {{0}}, odd[DDL__ROWS_AT_ONCE] = {{0}};                                 \
        float lanes[DDL__ROWS_AT_ONCE][(W) / 4];                                                                       \
        for (int64_t i = 0; i < count; i += (W) / 2) {                                                                 \
            ddl__f32_v##W y_even = DDL__FLOATS_AT(W, y + i), y_odd = DDL__FLOATS_AT(W, y + i + (W) / 4);               \
            DDL__ASK_ROW(next + i)                                                                                     \
            DDL__ASK_ROW(next + i + (W) / 4)                                                                           \
            DDL__EACH_OF_4(DDL__DOTS_STEP, W, )                                                                        \
        }                                                                                                              \
        DDL__EACH_OF_4(DDL__DOTS_PUT, W, )                                                                             \
        DDL__LEAVE_##L;                                                                                                \
        for (int r = 0; r < DDL__ROWS_AT_ONCE; r++) {                                                                  \
            out[r] = 0;                                                                                                \
            for (int i = 0; i < (W) / 4; i++) {                                                                        \
                out[r] += lanes[r][i];                                                                                 \
            }                                                                                                          \
        }                                                                                                              \
    }

/* y += a[r] * m[r], r = 0, 1, 2, 3, each product rounded, so that all levels give the same bits. count: a multiple of
 * DDL__RUN. */
#define DDL__AXPYS_STEP(W, r, unused)                                                                                  \
    DDL__MUL(t, DDL__FLOATS_AT(W, m[r] + i), k[r]);                                                                    \
    sum += t;
#define DDL__DEFINE_AXPYS(L, target, W)                                                                                \
    target static void ddl__axpys_##L(float *y, const float *const *rows, const float *a, const float *next,           \
                                    int64_t count) {                                                                   \
        const float *const m[DDL__ROWS_AT_ONCE] = {rows[0], rows[1], rows[2], rows[3]};                                \
        const float k[DDL__ROWS_AT_ONCE] = {a[0], a[1], a[2], a[3]};                                                   \
        for (int64_t i = 0; i < count; i += (W) / 4) {                                                                 \
            ddl__f32_v##W sum = DDL__FLOATS_AT(W, y + i), t;                                                           \
            DDL__ASK_ROW(next + i)                                                                                     \
            DDL__EACH_OF_4(DDL__AXPYS_STEP, W, )                                                                       \
            *(ddl__f32_v##W *)(void *)(y + i) = sum;                                                                   \
        }                                                                                                              \
        DDL__LEAVE_##L;                                                                                                \
    }

/* y = the sum of a[k * a_apart] * x[k * x_apart], k < terms, in that order, each product rounded; m -= y. */
#define DDL__DEFINE_COMBINE(L, target, W)                                                                              \
    target static void ddl__combine_##L(float *y, float *m, const float *x, int64_t x_apart, const float *a,           \
                                        int64_t a_apart, int32_t terms, int64_t count) {                               \
        for (int64_t i = 0; i < count; i += (W) / 4) {                                                                 \
            ddl__f32_v##W sum = {0}, t;                                                                                \
            for (int32_t k = 0; k < terms; k++) {                                                                      \
                DDL__MUL(t, DDL__FLOATS_AT(W, x + k * x_apart + i), a[k * a_apart]);                                   \
                sum += t;                                                                                              \
            }                                                                                                          \
            __builtin_prefetch(y + i + DDL__STREAM_AHEAD, 1);                                                          \
            __builtin_prefetch(m + i + DDL__STREAM_AHEAD, 1);                                                          \
            *(ddl__f32_v##W *)(void *)(y + i) = sum;                                                                   \
            *(ddl__f32_v##W *)(void *)(m + i) -= sum;                                                                  \
        }                                                                                                              \
        DDL__LEAVE_##L;                                                                                                \
    }

/* Copies whole lines of 64 bytes without asking for what is there; both begin at a multiple of 64. ddl__stream_end
 * makes them visible to other threads in the order of the program. */
static inline void ddl__stream_portable(void *dst, const void *src, size_t bytes) { memcpy(dst, src, bytes); }
#if defined(__x86_64__)
DDL__AVX2 static inline void ddl__stream_avx2(void *dst, const void *src, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 32) {
        _mm256_stream_si256((__m256i *)(void *)((char *)dst + i),
                            _mm256_load_si256((const __m256i *)(const void *)((const char *)src + i)));
    }
    DDL__LEAVE_avx2;
}
DDL__AVX512 static inline void ddl__stream_avx512(void *dst, const void *src, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) {
        _mm512_stream_si512((__m512i *)(void *)((char *)dst + i),
                            _mm512_load_si512((const void *)((const char *)src + i)));
    }
    DDL__LEAVE_avx512;
}
static inline void ddl__stream_end(void) { _mm_sfence(); }
#else
static inline void ddl__stream_end(void) {}
#endif

/* Puts the numbers of those of `count` elements whose magnitude is at least that of `least` bits into out, in order;
 * returns how many. out has room for DDL__RUN more. There is no portable way to ask a vector which of its lanes are
 * set. */
static inline int64_t ddl__above_portable(const float *x, int64_t count, uint32_t least, int32_t first, int32_t *out) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        out[found] = first + (int32_t)i;
        found += (bits & 0x7fffffff) >= least;
    }
    return found;
}
#if defined(__x86_64__)
DDL__AVX2 static int64_t ddl__above_avx2(const float *x, int64_t count, uint32_t least, int32_t first, int32_t *out) {
    int64_t found = 0, i = 0;
    for (; i + 8 <= count; i += 8) {
        ddl__i32_v32 bits = *(const ddl__i32_v32 *)(const void *)(x + i) & 0x7fffffff;
        uint32_t lanes = (uint32_t)_mm256_movemask_ps((__m256)(bits > (int32_t)least - 1));
        for (; lanes != 0; lanes &= lanes - 1) {
            out[found++] = first + (int32_t)i + __builtin_ctz(lanes);
        }
    }
    DDL__LEAVE_avx2;
    return found + ddl__above_portable(x + i, count - i, least, first + (int32_t)i, out + found);
}
/* All sixteen places are written and those that count come first: no branch that depends on the values. */
DDL__AVX512 static int64_t ddl__above_avx512(const float *x, int64_t count, uint32_t least, int32_t first,
                                             int32_t *out) {
    int64_t found = 0, i = 0;
    __m512i places = _mm512_add_epi32((__m512i)DDL__IOTA_64, _mm512_set1_epi32(first));
    for (; i + 16 <= count; i += 16) {
        __m512i bits = _mm512_and_si512(_mm512_loadu_si512(x + i), _mm512_set1_epi32(0x7fffffff));
        __mmask16 lanes = _mm512_cmp_epi32_mask(bits, _mm512_set1_epi32((int32_t)least), _MM_CMPINT_NLT);
        _mm512_storeu_si512(out + found, _mm512_maskz_compress_epi32(lanes, places));
        places = _mm512_add_epi32(places, _mm512_set1_epi32(16));
        found += __builtin_popcount(lanes);
    }
    DDL__LEAVE_avx512;
    return found + ddl__above_portable(x + i, count - i, least, first + (int32_t)i, out + found);
}
#endif

#define DDL__DEFINE_CODES(L, target, W)                                                                                \
    DDL__DEFINE_CORRECT(L, target, W, correct, 1, 1)                                                                   \
    DDL__DEFINE_CORRECT(L, target, W, correct_g, 1, 0)                                                                 \
    DDL__DEFINE_CORRECT(L, target, W, survey, 0, 0)                                                                    \
    DDL__DEFINE_PACK(L, target, W, nearest8, 8, NEAREST, 1)                                                      \
    DDL__DEFINE_PACK(L, target, W, nearest8_only, 8, NEAREST, 0)                                            \
    DDL__DEFINE_PACK(L, target, W, dither8, 8, DITHER, 1)                                                   \
    DDL__DEFINE_PACK(L, target, W, dither8_only, 8, DITHER, 0)                                              \
    DDL__DEFINE_PACK(L, target, W, dither4, 4, DITHER, 1)                                                   \
    DDL__DEFINE_PACK(L, target, W, dither4_only, 4, DITHER, 0)                                              \
    DDL__DEFINE_UNPACK(L, target, W, level8, 8)                                                                        \
    DDL__DEFINE_UNPACK(L, target, W, level4, 4)                                                                        \
    DDL__DEFINE_PACK_SIGN(L, target, W, sign, 1)                                                                       \
    DDL__DEFINE_PACK_SIGN(L, target, W, sign_only, 0)                                                                  \
    DDL__DEFINE_UNPACK_SIGN(L, target, W)                                                                              \
    DDL__DEFINE_DOTS(L, target, W)                                                                                     \
    DDL__DEFINE_AXPYS(L, target, W)                                                                                    \
    DDL__DEFINE_COMBINE(L, target, W)
DDL__DEFINE_CODES(portable, , 16)
#if defined(__x86_64__)
DDL__DEFINE_CODES(avx2, DDL__AVX2, 32)
DDL__DEFINE_CODES(avx512, DDL__AVX512, 64)
#endif

#endif /* DDL_COMPRESS_KERNELS_H */

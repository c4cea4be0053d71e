/* optim/vectors: what optimizers and encoders need of vectors beyond src/dtype: products that are rounded before they
 * are added, square roots, sums of squares. All are exact in the sense of IEEE 754, so that every level, every cut of
 * an array and every processor gives the same bits. Must not know: optimizers. */
#ifndef DDL_OPTIM_VECTORS_H
#define DDL_OPTIM_VECTORS_H

#include "../base.h"
#include "../dtype/vectors.h"

/* Kernels take whole runs of this many elements; what is left over is padded (DDL__RUN of any level fits in it). */
#define DDL__RUN 16

/* Keeps the compiler from fusing a product with the addition after it: a fused one is rounded once instead of twice,
 * and only some processors have it. An empty asm costs nothing; where we do not know the name of the vector registers
 * the value goes through memory. */
#if defined(__x86_64__)
#define DDL__ROUNDED(x) __asm__("" : "+v"(x))
#elif defined(__aarch64__)
#define DDL__ROUNDED(x) __asm__("" : "+w"(x))
#else
#define DDL__ROUNDED(x) __asm__("" : "+m"(x))
#endif

/* r = x * y, rounded. r may be x; y may be a scalar. */
#define DDL__MUL(r, x, y)                                                                                              \
    do {                                                                                                               \
        (r) = (x) * (y);                                                                                               \
        DDL__ROUNDED(r);                                                                                               \
    } while (0)

#if defined(__x86_64__)
#define DDL__SQRT_f32_v16(x) ((ddl__f32_v16)_mm_sqrt_ps((__m128)(x)))
#define DDL__SQRT_f32_v32(x) ((ddl__f32_v32)_mm256_sqrt_ps((__m256)(x)))
#define DDL__SQRT_f32_v64(x) ((ddl__f32_v64)_mm512_sqrt_ps((__m512)(x)))
#define DDL__SQRT_f64_v16(x) ((ddl__f64_v16)_mm_sqrt_pd((__m128d)(x)))
#define DDL__SQRT_f64_v32(x) ((ddl__f64_v32)_mm256_sqrt_pd((__m256d)(x)))
#define DDL__SQRT_f64_v64(x) ((ddl__f64_v64)_mm512_sqrt_pd((__m512d)(x)))
#elif defined(__aarch64__)
#define DDL__SQRT_f32_v16(x) ((ddl__f32_v16)vsqrtq_f32((float32x4_t)(x)))
#define DDL__SQRT_f64_v16(x) ((ddl__f64_v16)vsqrtq_f64((float64x2_t)(x)))
#else
#define DDL__SQRT_f32_v16(x) ddl__sqrt_lanes(x)
#define DDL__SQRT_f64_v16(x) ((ddl__f64_v16){ddl__sqrt((x)[0]), ddl__sqrt((x)[1])}) /* within a last place */
#endif

/* The square root in double, within a last place, without libm (the library does not link it): a first guess that
 * halves the exponent, then Newton's iteration. Rounded to float it is exact: no float has a root that near to the
 * middle of two floats. */
static inline double ddl__sqrt(double x) {
    if (!(x > 0) || x > 1.7e308) {
        return x < 0 ? (x - x) / (x - x) : x;
    }
    uint64_t bits;
    double guess;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits >> 1) + ((uint64_t)1023 << 51);
    memcpy(&guess, &bits, sizeof guess);
    for (int i = 0; i < 6; i++) {
        guess = 0.5 * (guess + x / guess);
    }
    return guess;
}

static inline ddl__f32_v16 ddl__sqrt_lanes(ddl__f32_v16 x) {
    for (int i = 0; i < 4; i++) {
        x[i] = (float)ddl__sqrt((double)x[i]);
    }
    return x;
}

/* Floats that become doubles of twice the width: half a vector of each width. */
typedef float ddl__f32_h16 DDL__VECTOR(8);
typedef float ddl__f32_h32 DDL__VECTOR(16);
typedef float ddl__f32_h64 DDL__VECTOR(32);

/* Asks for what a loop over an array reads so many elements later: the work between must not stop the stream. */
#define DDL__STREAM_AHEAD 1024

/* lanes[a][i % 16] += x[i]^2, x the array a of two, for count elements, a multiple of DDL__RUN. Sixteen lanes whatever
 * the width, so that the order of additions is the same at every level; the square of a float is exact in double, so
 * fusing does no harm. Two arrays, because additions to one wait for each other. Sums are touched by constant numbers
 * only, which keeps them in registers. */
#define DDL__SQUARES_VECTORS(W) (128 / (W))
#define DDL__EACH_OF_8(STEP, W) STEP(W, 0) STEP(W, 1) STEP(W, 2) STEP(W, 3) STEP(W, 4) STEP(W, 5) STEP(W, 6) STEP(W, 7)
#define DDL__SQUARES_GET(W, j)                                                                                         \
    if ((j) < DDL__SQUARES_VECTORS(W)) {                                                                               \
        sum_x[(j) % DDL__SQUARES_VECTORS(W)] = *(const ddl__f64_v##W *)(const void *)(lanes[0] + (j) * ((W) / 8));     \
        sum_y[(j) % DDL__SQUARES_VECTORS(W)] = *(const ddl__f64_v##W *)(const void *)(lanes[1] + (j) * ((W) / 8));     \
    }
#define DDL__SQUARES_PUT(W, j)                                                                                         \
    if ((j) < DDL__SQUARES_VECTORS(W)) {                                                                               \
        *(ddl__f64_v##W *)(void *)(lanes[0] + (j) * ((W) / 8)) = sum_x[(j) % DDL__SQUARES_VECTORS(W)];                 \
        *(ddl__f64_v##W *)(void *)(lanes[1] + (j) * ((W) / 8)) = sum_y[(j) % DDL__SQUARES_VECTORS(W)];                 \
    }
#define DDL__SQUARES_STEP(W, j)                                                                                        \
    if ((j) < DDL__SQUARES_VECTORS(W)) {                                                                               \
        ddl__f32_h##W half_x = *(const ddl__f32_h##W *)(const void *)(x + i + (j) * ((W) / 8));                        \
        ddl__f32_h##W half_y = *(const ddl__f32_h##W *)(const void *)(y + i + (j) * ((W) / 8));                        \
        ddl__f64_v##W wide_x = __builtin_convertvector(half_x, ddl__f64_v##W);                                         \
        ddl__f64_v##W wide_y = __builtin_convertvector(half_y, ddl__f64_v##W);                                         \
        sum_x[(j) % DDL__SQUARES_VECTORS(W)] += wide_x * wide_x;                                                       \
        sum_y[(j) % DDL__SQUARES_VECTORS(W)] += wide_y * wide_y;                                                       \
    }
#define DDL__DEFINE_SQUARES(L, target, W)                                                                              \
    target static void ddl__squares_##L(double lanes[2][DDL__RUN], const float *x, const float *y, int64_t count) {    \
        ddl__f64_v##W sum_x[DDL__SQUARES_VECTORS(W)], sum_y[DDL__SQUARES_VECTORS(W)];                                  \
        DDL__EACH_OF_8(DDL__SQUARES_GET, W)                                                                            \
        for (int64_t i = 0; i < count; i += DDL__RUN) {                                                                \
            __builtin_prefetch(x + i + DDL__STREAM_AHEAD);                                                             \
            __builtin_prefetch(y + i + DDL__STREAM_AHEAD);                                                             \
            DDL__EACH_OF_8(DDL__SQUARES_STEP, W)                                                                       \
        }                                                                                                              \
        DDL__EACH_OF_8(DDL__SQUARES_PUT, W)                                                                            \
        DDL__LEAVE_##L;                                                                                                \
    }
DDL__DEFINE_SQUARES(portable, , 16)
#if defined(__x86_64__)
DDL__DEFINE_SQUARES(avx2, DDL__AVX2, 32)
DDL__DEFINE_SQUARES(avx512, DDL__AVX512, 64)
#endif

/* ---- values that are not finite ---- */

/* What adding to the exponent's bits carries into the sign's place when all of them are set, as they are in infinities
 * and NaN alone: for as many elements as fit in 64 bits. */
typedef struct ddl__odd_bits {
    uint64_t exponent, one, sign;
} ddl__odd_bits;

static inline ddl__odd_bits ddl__odd_bits_of(ddl_dtype dtype) {
    return dtype == DDL_F16    ? (ddl__odd_bits){0x7c007c007c007c00u, 0x0400040004000400u, 0x8000800080008000u}
           : dtype == DDL_BF16 ? (ddl__odd_bits){0x7f807f807f807f80u, 0x0080008000800080u, 0x8000800080008000u}
           : dtype == DDL_F32  ? (ddl__odd_bits){0x7f8000007f800000u, 0x0080000000800000u, 0x8000000080000000u}
                               : (ddl__odd_bits){0x7ff0000000000000u, 0x0010000000000000u, 0x8000000000000000u};
}

/* dst = src, unless dst is NULL; bytes is a multiple of 64. Returns whether something is not finite. */
#define DDL__DEFINE_LOOK(L, target, W)                                                                                 \
    target static bool ddl__look_##L(void *dst, const void *src, size_t bytes, ddl__odd_bits bits) {                   \
        const char *from = src;                                                                                        \
        char *to = dst;                                                                                                \
        ddl__u64_v##W odd = {0};                                                                                       \
        for (size_t i = 0; i < bytes; i += (W)) {                                                                      \
            ddl__u64_v##W x = *(const ddl__u64_v##W *)(const void *)(from + i);                                        \
            odd |= (x & bits.exponent) + bits.one;                                                                     \
            if (to != NULL) {                                                                                          \
                *(ddl__u64_v##W *)(void *)(to + i) = x;                                                                \
            }                                                                                                          \
        }                                                                                                              \
        uint64_t any = 0;                                                                                              \
        for (size_t i = 0; i < sizeof odd / sizeof any; i++) {                                                         \
            any |= odd[i];                                                                                             \
        }                                                                                                              \
        DDL__LEAVE_##L;                                                                                                \
        return (any & bits.sign) != 0;                                                                                 \
    }
DDL__DEFINE_LOOK(portable, , 16)
#if defined(__x86_64__)
DDL__DEFINE_LOOK(avx2, DDL__AVX2, 32)
DDL__DEFINE_LOOK(avx512, DDL__AVX512, 64)
#endif

/* The kernel of a level out of three; levels that a processor family lacks are not named. */
#if defined(__x86_64__)
#define DDL__AT_LEVEL(level, name)                                                                                     \
    ((level) == DDL__CPU_AVX512 ? name##_avx512 : (level) == DDL__CPU_AVX2 ? name##_avx2 : name##_portable)
#else
#define DDL__AT_LEVEL(level, name) ((void)(level), name##_portable)
#endif

/* Copies count elements from src to dst, unless dst is NULL, and returns whether one is an infinity or NaN. */
static inline bool ddl__look_at(ddl__cpu level, void *dst, const void *src, int64_t count, ddl_dtype dtype) {
    char rest[64] = {0};
    size_t bytes = (size_t)count * ddl_dtype_bytes(dtype), whole = bytes - bytes % sizeof rest;
    ddl__odd_bits bits = ddl__odd_bits_of(dtype);
    bool odd = DDL__AT_LEVEL(level, ddl__look)(dst, src, whole, bits);
    if (whole < bytes) {
        memcpy(rest, (const char *)src + whole, bytes - whole);
        odd = DDL__AT_LEVEL(level, ddl__look)(NULL, rest, sizeof rest, bits) || odd;
        if (dst != NULL) {
            memcpy((char *)dst + whole, rest, bytes - whole);
        }
    }
    return odd;
}

/* The lanes of any count of elements of two arrays: what is less than a run is padded with zeros. */
static inline void ddl__add_squares(ddl__cpu level, double lanes[2][DDL__RUN], const float *x, const float *y,
                                    int64_t count) {
    float rest[2][DDL__RUN] = {{0}};
    int64_t whole = count - count % DDL__RUN;
    DDL__AT_LEVEL(level, ddl__squares)(lanes, x, y, whole);
    if (whole < count) {
        memcpy(rest[0], x + whole, (size_t)(count - whole) * sizeof(float));
        memcpy(rest[1], y + whole, (size_t)(count - whole) * sizeof(float));
        DDL__AT_LEVEL(level, ddl__squares)(lanes, rest[0], rest[1], DDL__RUN);
    }
}

/* Adds the lanes in their order. */
static inline double ddl__lanes_sum(const double lanes[DDL__RUN]) {
    double sum = 0;
    for (int i = 0; i < DDL__RUN; i++) {
        sum += lanes[i];
    }
    return sum;
}

/* Sums go block by block, so that their error does not grow with the array and partial sums of one cut are the same
 * wherever they are made. */
#define DDL__BLOCK 4096

/* Within a stretch the sums of blocks are added in their order, then those of stretches: a device makes one stretch
 * beside the other. Its callers see to that; the functions here are for one. */
#define DDL__STRETCH ((int64_t)16 * DDL__BLOCK)

/* sums[0] += the sum of x[i]^2, sums[1] += that of y[i]^2. */
static inline void ddl__pair_squares_at(ddl__cpu level, const float *x, const float *y, int64_t count,
                                        double sums[2]) {
    for (int64_t i = 0; i < count; i += DDL__BLOCK) {
        double lanes[2][DDL__RUN] = {{0}};
        ddl__add_squares(level, lanes, x + i, y + i, DDL__MIN(count - i, DDL__BLOCK));
        sums[0] += ddl__lanes_sum(lanes[0]);
        sums[1] += ddl__lanes_sum(lanes[1]);
    }
}

static inline double ddl__sum_squares_at(ddl__cpu level, const float *x, int64_t count) {
    double sum = 0;
    for (int64_t i = 0, done; i < count; i += done) { /* two blocks are the two arrays; near the end one is both */
        double lanes[2][DDL__RUN] = {{0}};
        int64_t one = DDL__MIN(count - i, DDL__BLOCK), other = count - i >= 2 * DDL__BLOCK ? DDL__BLOCK : 0;
        ddl__add_squares(level, lanes, x + i, x + i + other, one);
        sum += ddl__lanes_sum(lanes[0]);
        sum += other > 0 ? ddl__lanes_sum(lanes[1]) : 0;
        done = one + other;
    }
    return sum;
}

/* The same order for an array of f64, where each square is rounded before it is added. */
static inline double ddl__sum_squares_f64(const double *x, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i += DDL__BLOCK) {
        double lanes[DDL__RUN] = {0};
        int64_t some = DDL__MIN(count - i, DDL__BLOCK);
        for (int64_t j = 0; j < some; j++) {
            double square = x[i + j] * x[i + j];
            DDL__ROUNDED(square);
            lanes[j % DDL__RUN] += square;
        }
        sum += ddl__lanes_sum(lanes);
    }
    return sum;
}

/* The sum of x[i]^2 in double: for norms and for clipping. */
static inline double ddl__sum_squares(const float *x, int64_t count) {
    return ddl__sum_squares_at(ddl__cpu_level(), x, count);
}

#endif /* DDL_OPTIM_VECTORS_H */

/* kernel_code: encoders and decoders of the training layer: casts, and codes with a scale per block (int8, QSGD, sign,
 * majority). Layout and arithmetic are those of src/compress/block.h and kernels.h, bit by bit. A warp does a block:
 * thread t holds elements t, t + 32, ... of it. It must not know configs. */
#ifndef CUDA_KERNEL_CODE_H
#define CUDA_KERNEL_CODE_H

#include "kernel_optim.h"

#define CUDA_WARP_ALL 0xffffffffu
#define CUDA_EACH (CUDA_CODE_BLOCK / 32) /* elements of a block that a thread holds */
#define CUDA_INFINITE 0x7f800000u
#define CUDA_LEAST_SCALE 1e-30f /* below it the inverse may overflow: such a block goes as zeros */

CUDA_INLINE int cuda_lane(void) { return (int)(threadIdx.x & 31u); }
CUDA_INLINE uint32_t cuda_magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
CUDA_INLINE bool cuda_finite(float x) { return cuda_magnitude(x) < CUDA_INFINITE; }

CUDA_INLINE uint32_t cuda_warp_most(uint32_t x) {
    for (int far = 16; far > 0; far >>= 1) {
        uint32_t other = __shfl_xor_sync(CUDA_WARP_ALL, x, far, 32);
        x = other > x ? other : x;
    }
    return x;
}
CUDA_INLINE uint32_t cuda_warp_total(uint32_t x) {
    for (int far = 16; far > 0; far >>= 1) {
        x += __shfl_xor_sync(CUDA_WARP_ALL, x, far, 32);
    }
    return x;
}

CUDA_INLINE void cuda_count_odd(unsigned long long *odd, uint32_t count) {
    if (odd != 0 && count > 0) {
        atomicAdd(odd, (unsigned long long)count);
    }
}

/* ---- blocks in registers ---- */

/* Calls block(first, count) for every block of an array, one warp each: from two places, so that the count of whole
 * blocks is a constant in the one, and nothing is asked of each element. */
template <class F> CUDA_INLINE void cuda_each_block(int64_t all, const F &block) {
    const int64_t rest = all % CUDA_CODE_BLOCK, whole = all - rest;
    int64_t first = cuda_thread() / 32 * CUDA_CODE_BLOCK;
    for (; first < whole; first += cuda_threads() / 32 * CUDA_CODE_BLOCK) {
        block(first, CUDA_CODE_BLOCK);
    }
    if (first == whole && rest > 0) {
        block(first, (int)rest);
    }
}

CUDA_INLINE void cuda_block_load(float *x, const float *from, int count) {
#pragma unroll
    for (int j = 0; j < CUDA_EACH; j++) {
        int i = 32 * j + cuda_lane();
        x[j] = i < count ? from[i] : 0;
    }
}
CUDA_INLINE void cuda_block_store(float *to, const float *x, int count) {
#pragma unroll
    for (int j = 0; j < CUDA_EACH; j++) {
        int i = 32 * j + cuda_lane();
        if (i < count) {
            to[i] = x[j];
        }
    }
}

/* Bytes of a block of 512 elements: the step, and runs of 64 bytes that hold 512 / BITS elements each. */
template <int BITS> CUDA_INLINE int64_t cuda_code_stride(void) { return 4 + 64 * (CUDA_CODE_BLOCK / (512 / BITS)); }

/* Word i of a run has its elements i + 16 k, k = 0, 1, ..., in bits BITS * k and up: threads t and t + 16 share it, and
 * each gives its elements as if they were those of even k. */
template <int BITS> CUDA_INLINE void cuda_put_word(unsigned char *code, int run, uint32_t word, int count) {
    word <<= cuda_lane() / 16 * BITS;
    word |= __shfl_xor_sync(CUDA_WARP_ALL, word, 16, 32);
    if (cuda_lane() < 16 && run * (512 / BITS) < count) {
        ((uint32_t *)(code + 4 + 64 * run))[cuda_lane()] = word;
    }
}

/* ---- encoders ---- */

/* The sum of magnitudes in the order of the host: sixteen lanes, each over elements 16 apart, then the lanes. */
CUDA_INLINE float cuda_warp_magnitudes(const float *x) {
    float lane = 0, sum = 0;
#pragma unroll
    for (int j = 0; j < CUDA_EACH; j++) {
        float size = __uint_as_float(cuda_magnitude(x[j]));
        lane = CUDA_ADD(lane, size);
        lane = CUDA_ADD(lane, __shfl_xor_sync(CUDA_WARP_ALL, size, 16, 32));
    }
#pragma unroll
    for (int i = 0; i < 16; i++) { /* of the lower half; in the upper one the pairs were added the other way round */
        sum = CUDA_ADD(sum, __shfl_sync(CUDA_WARP_ALL, lane, i, 32));
    }
    return sum;
}

/* The level of an element in the low bits, and in x what it misses: to nearest, or with 15 random bits behind the
 * point, which are halves of a hash of (key, number of the element), shared by elements 16 apart: "lowbias32" of C.
 * Wellons, keyed before and between its rounds. 1.5 * 2^23 is added to round to a whole number, which the low bits are
 * then. */
template <bool DITHER>
CUDA_INLINE uint32_t cuda_level(const cuda_code_args &a, float &x, float step, float inverse, uint32_t number) {
    const float whole = 12582912.0f;
    uint32_t level;
    float back;
    if (DITHER) {
        uint32_t h = (number & ~16u) * 0x9e3779b9u + a.key[0];
        h = (h ^ (h >> 16)) * 0x7feb352du + a.key[1];
        h = (h ^ (h >> 15)) * 0x846ca68bu;
        h = h ^ (h >> 16);
        h = (number & 16u) != 0 ? h >> 17 : h & 0x7fffu;
        uint32_t sum = __float_as_uint(CUDA_ADD(CUDA_MUL(x, CUDA_MUL(inverse, 0x1p15f)), whole));
        level = (uint32_t)((int32_t)(sum - 0x4b400000u + h) >> 15);
        back = (float)(int32_t)level;
    } else {
        float sum = CUDA_ADD(CUDA_MUL(x, inverse), whole);
        level = __float_as_uint(sum);
        back = CUDA_SUB(sum, whole);
    }
    x = CUDA_SUB(x, CUDA_MUL(back, step));
    return level;
}

template <int BITS, bool DITHER>
CUDA_INLINE void cuda_put_levels(const cuda_code_args &a, unsigned char *code, float *x, float step, float inverse,
                                 uint32_t first, int count) {
    const int steps = 512 / BITS / 32;
#pragma unroll
    for (int run = 0; run < CUDA_EACH / steps; run++) {
        uint32_t word = 0;
#pragma unroll
        for (int k = 0; k < steps; k++) {
            int j = run * steps + k;
            uint32_t level = cuda_level<DITHER>(a, x[j], step, inverse, first + (uint32_t)(32 * j + cuda_lane()));
            word |= (level & ((1u << BITS) - 1)) << (2 * k * BITS);
        }
        cuda_put_word<BITS>(code, run, word, count);
    }
}

/* How the host codes a block; returns the step. x becomes what the code misses. Four bits are always drawn. */
template <int BITS>
CUDA_INLINE float cuda_encode_levels(const cuda_code_args &a, unsigned char *code, float *x, uint32_t most,
                                     uint32_t first, int count) {
    float size = __uint_as_float(most), step = size < CUDA_LEAST_SCALE ? 0 : __fdiv_rn(size, (float)a.levels);
    float inverse = step > 0 ? __fdiv_rn((float)a.levels, size) : 0;
    if (BITS == 4 || a.dither) {
        cuda_put_levels<BITS, true>(a, code, x, step, inverse, first, count);
    } else {
        cuda_put_levels<BITS, false>(a, code, x, step, inverse, first, count);
    }
    return step;
}

/* Signs: a bit that is set is -step, one that is not +step; zero counts as positive. */
CUDA_INLINE float cuda_encode_signs(const cuda_code_args &a, unsigned char *code, float *x, uint32_t most, int count) {
    float sum = a.majority ? 0 : cuda_warp_magnitudes(x);
    float step = a.majority ? 1.0f
                 : cuda_finite(sum) ? __fdiv_rn(sum, (float)count)
                                    : __fdiv_rn(__uint_as_float(most), 2.0f);
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < CUDA_EACH; j++) {
        bool minus = x[j] < 0;
        word |= minus ? 1u << (2 * j) : 0;
        x[j] = CUDA_SUB(x[j], minus ? -step : step);
    }
    cuda_put_word<1>(code, 0, word, count);
    return step;
}

/* False: it is an odd block, and nothing is written. */
template <int BITS>
CUDA_INLINE bool cuda_encode_block(const cuda_code_args &a, unsigned char *code, int64_t first, int count) {
    float x[CUDA_EACH];
    uint32_t most = 0;
    cuda_block_load(x, a.g + first, count);
    if (a.e != 0) {
        float e[CUDA_EACH];
        cuda_block_load(e, a.e + first, count);
#pragma unroll
        for (int j = 0; j < CUDA_EACH; j++) {
            x[j] = CUDA_ADD(x[j], e[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < CUDA_EACH; j++) {
        most = cuda_magnitude(x[j]) > most ? cuda_magnitude(x[j]) : most;
    }
    most = cuda_warp_most(most);
    if (most >= CUDA_INFINITE) {
        return false;
    }
    float step = BITS == 1 ? cuda_encode_signs(a, code, x, most, count)
                           : cuda_encode_levels<BITS>(a, code, x, most, (uint32_t)first, count);
    if (cuda_lane() == 0) {
        *(float *)code = step;
    }
    if (a.e != 0) {
        cuda_block_store(a.e + first, x, count);
    }
    return true;
}

/* ---- odd blocks: those with values that are not finite. They are rare: each element is read again, so that the others
 * need not wait for what only these do ---- */

CUDA_INLINE float cuda_code_input(const cuda_code_args &a, int64_t i) {
    return a.e != 0 ? CUDA_ADD(a.g[i], a.e[i]) : a.g[i];
}

/* Of an odd block: its largest finite magnitude; the smallest and largest bits of its other values, and their count. */
struct cuda_odd_facts {
    uint32_t finite, least, largest, count;
};
CUDA_INLINE cuda_odd_facts cuda_odd_look(const cuda_code_args &a, int64_t first, int count) {
    cuda_odd_facts f = {0, 0xffffffffu, 0, 0};
#pragma unroll 1
    for (int i = cuda_lane(); i < count; i += 32) {
        uint32_t bits = __float_as_uint(cuda_code_input(a, first + i)), size = bits & 0x7fffffffu;
        if (size < CUDA_INFINITE) {
            f.finite = size > f.finite ? size : f.finite;
        } else {
            f.largest = bits > f.largest ? bits : f.largest;
            f.least = bits < f.least ? bits : f.least;
            f.count++;
        }
    }
    f.finite = cuda_warp_most(f.finite);
    f.least = ~cuda_warp_most(~f.least);
    f.largest = cuda_warp_most(f.largest);
    f.count = cuda_warp_total(f.count);
    return f;
}

/* To nearest; the levels at the ends stand for infinity, minus infinity and NaN. x becomes what the code misses. */
CUDA_INLINE int32_t cuda_odd_level(float &x, float step, int32_t levels, int32_t end) {
    float size = __uint_as_float(cuda_magnitude(x));
    int32_t level = -end - 1;
    if (cuda_finite(x)) {
        level = 0;
        if (step > 0) {
            level = (int32_t)CUDA_ADD(__fdiv_rn(size, step), 0.5f);
            level = level < levels ? level : levels;
        }
        level = x < 0 ? -level : level;
        x = CUDA_SUB(x, CUDA_MUL((float)level, step));
    } else {
        level = size > 0 ? (x < 0 ? -end : end) : level; /* a NaN is not above 0 */
        x = 0;
    }
    return level;
}

/* There is one level less, and the sign bit of the step is set. Of signs the step is the value that was not finite (NaN
 * when they differ) and the bits say where it was. */
template <int BITS>
CUDA_INLINE void cuda_encode_odd(const cuda_code_args &a, unsigned char *code, int64_t first, int count) {
    const int32_t end = (1 << (BITS - 1)) - 1, levels = a.levels < end - 1 ? a.levels : end - 1;
    const int run = 512 / BITS;
    const cuda_odd_facts f = cuda_odd_look(a, first, count);
    const float step = BITS == 1 ? __uint_as_float(f.least == f.largest ? f.least : 0x7fffffffu)
                                 : __fdiv_rn(__uint_as_float(f.finite), (float)levels);
#pragma unroll 1
    for (int begin = 0; begin < count; begin += run) {
        uint32_t word = 0;
#pragma unroll 1
        for (int k = 0; k < run / 32; k++) {
            int i = begin + 32 * k + cuda_lane();
            if (i < count) {
                float x = cuda_code_input(a, first + i);
                uint32_t level = !cuda_finite(x);
                if (BITS > 1) {
                    level = (uint32_t)cuda_odd_level(x, step, levels, end);
                } else {
                    x = level != 0 ? 0 : x;
                }
                word |= (level & ((1u << BITS) - 1)) << (2 * k * BITS);
                if (a.e != 0) {
                    a.e[first + i] = x;
                }
            }
        }
        cuda_put_word<BITS>(code, begin / run, word, count);
    }
    if (cuda_lane() == 0) {
        *(float *)code = BITS == 1 ? step : -step;
        cuda_count_odd(a.odd, f.count);
    }
}

/* ---- decoders ---- */

/* The level whose bits begin at `shift` of a word, with its sign (of one bit: 0 or -1). */
template <int BITS> CUDA_INLINE int32_t cuda_level_of(uint32_t word, int shift) {
    return (int32_t)(word << (32 - BITS - shift)) >> (32 - BITS);
}

template <int BITS> CUDA_INLINE float cuda_decode_one(float step, int32_t level) {
    return BITS == 1 ? __uint_as_float(__float_as_uint(step) | ((uint32_t)level & 0x80000000u))
                     : CUDA_MUL((float)level, step);
}

template <int BITS> CUDA_INLINE float cuda_decode_odd_one(float step, int32_t level) {
    const int32_t end = (1 << (BITS - 1)) - 1;
    if (BITS == 1) {
        return level != 0 ? step : 0;
    }
    if (level > -end && level < end) {
        return CUDA_MUL((float)level, -step);
    }
    return __uint_as_float(level == end ? CUDA_INFINITE : level == -end ? 0x80000000u | CUDA_INFINITE : 0x7fffffffu);
}

template <int BITS> CUDA_INLINE void cuda_decode_odd(float *sum, const unsigned char *code, int count) {
    const uint32_t *words = (const uint32_t *)(code + 4);
#pragma unroll 1
    for (int i = cuda_lane(); i < count; i += 32) {
        int32_t level = cuda_level_of<BITS>(words[i / (512 / BITS) * 16 + i % 16], i / 16 % (32 / BITS) * BITS);
        sum[i] = CUDA_ADD(sum[i], cuda_decode_odd_one<BITS>(*(const float *)code, level));
    }
}

/* sum += the values of a block. False: it is an odd one, and nothing is added. */
template <int BITS> CUDA_INLINE bool cuda_decode_block(float *sum, const unsigned char *code, int count) {
    const int run = 512 / BITS, steps = run / 32, runs = CUDA_CODE_BLOCK / run, lane = cuda_lane();
    const float step = *(const float *)code;
    uint32_t word[runs];
    float x[CUDA_EACH];
#pragma unroll
    for (int r = 0; r < runs; r++) {
        word[r] = r * run < count ? ((const uint32_t *)(code + 4))[16 * r + lane % 16] : 0;
    }
    cuda_block_load(x, sum, count);
    __syncwarp(); /* so that compilers ask for all of it before the first is used */
    if (BITS == 1 ? !cuda_finite(step) : __float_as_uint(step) >> 31 != 0) {
        return false;
    }
#pragma unroll
    for (int j = 0; j < CUDA_EACH; j++) {
        int32_t level = cuda_level_of<BITS>(word[j / steps], (2 * (j % steps) + lane / 16) * BITS);
        x[j] = CUDA_ADD(x[j], cuda_decode_one<BITS>(step, level));
    }
    cuda_block_store(sum, x, count);
    return true;
}

template <int BITS, bool ENCODE> CUDA_INLINE void cuda_blocks(const cuda_code_args &a) {
    cuda_each_block(a.count, [&](int64_t first, int count) {
        unsigned char *code = a.code + first / CUDA_CODE_BLOCK * cuda_code_stride<BITS>();
        if (ENCODE) {
            if (!cuda_encode_block<BITS>(a, code, first, count)) {
                cuda_encode_odd<BITS>(a, code, first, count);
            }
        } else if (!cuda_decode_block<BITS>(a.sum + first, code, count)) {
            cuda_decode_odd<BITS>(a.sum + first, code, count);
        }
    });
}

/* ---- casts ---- */

/* Finite values beyond the type become its largest one; what is lost stays in x. */
template <class T> CUDA_INLINE uint16_t cuda_cast_one(float most, float &x, uint32_t &odd) {
    float sent = x > most ? most : x < -most ? -most : x;
    if (!cuda_finite(x)) {
        odd++;
        sent = x;
    }
    uint16_t half = T::close(sent);
    float missed = CUDA_SUB(x, T::open(half));
    x = cuda_finite(missed) ? missed : 0;
    return half;
}

/* Arrays that begin at a 16-byte boundary, as most do, go four elements at a time. */
CUDA_INLINE int64_t cuda_cast_words(const cuda_code_args &a, const void *first, const void *second) {
    return (((uintptr_t)first | (uintptr_t)second) & 15) == 0 && ((uintptr_t)a.code & 7) == 0 ? a.count / 4 : 0;
}

template <class T> CUDA_INLINE void cuda_cast_encode(const cuda_code_args &a, float most) {
    const int64_t words = cuda_cast_words(a, a.g, a.e);
    uint16_t *code = (uint16_t *)a.code;
    uint32_t odd = 0;
#pragma unroll 2
    for (int64_t i = cuda_thread(); i < words; i += cuda_threads()) {
        const float4 none = make_float4(-0.0f, -0.0f, -0.0f, -0.0f); /* x + -0 is x */
        float4 g = ((const float4 *)a.g)[i], e = a.e != 0 ? ((const float4 *)a.e)[i] : none;
        float x[4] = {CUDA_ADD(g.x, e.x), CUDA_ADD(g.y, e.y), CUDA_ADD(g.z, e.z), CUDA_ADD(g.w, e.w)};
        ushort4 half;
        half.x = cuda_cast_one<T>(most, x[0], odd);
        half.y = cuda_cast_one<T>(most, x[1], odd);
        half.z = cuda_cast_one<T>(most, x[2], odd);
        half.w = cuda_cast_one<T>(most, x[3], odd);
        ((ushort4 *)code)[i] = half;
        if (a.e != 0) {
            ((float4 *)a.e)[i] = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
    for (int64_t i = 4 * words + cuda_thread(); i < a.count; i += cuda_threads()) {
        float x = CUDA_ADD(a.g[i], a.e != 0 ? a.e[i] : -0.0f);
        code[i] = cuda_cast_one<T>(most, x, odd);
        if (a.e != 0) {
            a.e[i] = x;
        }
    }
    cuda_count_odd(a.odd, odd);
}

template <class T> CUDA_INLINE float cuda_cast_add(float sum, uint16_t half) {
    return cuda_canonical(CUDA_ADD(sum, cuda_canonical(T::open(half))));
}

template <class T> CUDA_INLINE void cuda_cast_decode(const cuda_code_args &a) {
    const int64_t words = cuda_cast_words(a, a.sum, 0);
    const uint16_t *code = (const uint16_t *)a.code;
#pragma unroll 2
    for (int64_t i = cuda_thread(); i < words; i += cuda_threads()) {
        float4 sum = ((const float4 *)a.sum)[i];
        ushort4 half = ((const ushort4 *)code)[i];
        sum.x = cuda_cast_add<T>(sum.x, half.x);
        sum.y = cuda_cast_add<T>(sum.y, half.y);
        sum.z = cuda_cast_add<T>(sum.z, half.z);
        sum.w = cuda_cast_add<T>(sum.w, half.w);
        ((float4 *)a.sum)[i] = sum;
    }
    for (int64_t i = 4 * words + cuda_thread(); i < a.count; i += cuda_threads()) {
        a.sum[i] = cuda_cast_add<T>(a.sum[i], code[i]);
    }
}

#endif /* CUDA_KERNEL_CODE_H */

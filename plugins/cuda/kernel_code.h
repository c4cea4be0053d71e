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

/* The sum of magnitudes in the order of the host: sixteen lanes, each over elements 16 apart, then the lanes. */
CUDA_INLINE float cuda_warp_magnitudes(const float *x) {
    float lane = 0, sum = 0;
    for (int j = 0; j < CUDA_EACH; j++) {
        float size = __uint_as_float(cuda_magnitude(x[j]));
        lane = CUDA_ADD(lane, size);
        lane = CUDA_ADD(lane, __shfl_xor_sync(CUDA_WARP_ALL, size, 16, 32));
    }
    for (int i = 0; i < 16; i++) { /* of the lower half; in the upper one the pairs were added the other way round */
        sum = CUDA_ADD(sum, __shfl_sync(CUDA_WARP_ALL, lane, i, 32));
    }
    return sum;
}

/* The level of one element, and what it misses: to nearest, or with 15 random bits behind the point, which are halves
 * of a hash of (key, number of the element), shared by elements 16 apart: "lowbias32" of C. Wellons, keyed before and
 * between its rounds. 1.5 * 2^23 is added to round to a whole number, which is then in the low bits. */
CUDA_INLINE int32_t cuda_level(const cuda_code_args &a, float &x, float step, float inverse, uint32_t number) {
    const float whole = 12582912.0f;
    int32_t level;
    if (a.dither) {
        uint32_t h = (number & ~16u) * 0x9e3779b9u + a.key[0];
        h = (h ^ (h >> 16)) * 0x7feb352du + a.key[1];
        h = (h ^ (h >> 15)) * 0x846ca68bu;
        h = h ^ (h >> 16);
        h = (number & 16u) != 0 ? h >> 17 : h & 0x7fffu;
        uint32_t sum = __float_as_uint(CUDA_ADD(CUDA_MUL(x, CUDA_MUL(inverse, 0x1p15f)), whole));
        level = (int32_t)(sum - 0x4b400000u + h) >> 15;
    } else {
        level = (int32_t)(__float_as_uint(CUDA_ADD(CUDA_MUL(x, inverse), whole)) - 0x4b400000u);
    }
    x = CUDA_SUB(x, CUDA_MUL((float)level, step));
    return level;
}

/* The same in a block with values that are not finite: to nearest, and the levels at the ends stand for infinity, minus
 * infinity and NaN. */
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

/* How the host cuts a block: levels with the sign bit of the step telling an odd one. */
template <int BITS>
CUDA_INLINE float cuda_encode_levels(const cuda_code_args &a, float *x, int32_t *level, uint32_t most, int64_t first) {
    const int lane = (int)threadIdx.x % 32;
    if (most >= CUDA_INFINITE) {
        const int32_t end = (1 << (BITS - 1)) - 1, levels = a.levels < end - 1 ? a.levels : end - 1;
        uint32_t finite = 0;
        for (int j = 0; j < CUDA_EACH; j++) {
            finite = cuda_finite(x[j]) && cuda_magnitude(x[j]) > finite ? cuda_magnitude(x[j]) : finite;
        }
        float step = __fdiv_rn(__uint_as_float(cuda_warp_most(finite)), (float)levels);
#pragma unroll
        for (int j = 0; j < CUDA_EACH; j++) {
            level[j] = cuda_odd_level(x[j], step, levels, end);
        }
        return -step;
    }
    float size = __uint_as_float(most), step = size < CUDA_LEAST_SCALE ? 0 : __fdiv_rn(size, (float)a.levels);
    float inverse = step > 0 ? __fdiv_rn((float)a.levels, size) : 0;
#pragma unroll
    for (int j = 0; j < CUDA_EACH; j++) {
        level[j] = cuda_level(a, x[j], step, inverse, (uint32_t)first + (uint32_t)(32 * j + lane));
    }
    return step;
}

/* Signs: a bit that is set is -step, one that is not +step; zero counts as positive. In an odd block the step is the
 * value that was not finite (NaN when they differ) and the bits say where it was. */
CUDA_INLINE float cuda_encode_signs(const cuda_code_args &a, float *x, int32_t *level, uint32_t most, int64_t count) {
    if (most >= CUDA_INFINITE) {
        uint32_t least = 0xffffffffu, largest = 0;
        for (int j = 0; j < CUDA_EACH; j++) {
            uint32_t bits = __float_as_uint(x[j]);
            level[j] = !cuda_finite(x[j]);
            largest = level[j] && bits > largest ? bits : largest;
            least = level[j] && bits < least ? bits : least;
            x[j] = level[j] ? 0 : x[j];
        }
        largest = cuda_warp_most(largest);
        least = ~cuda_warp_most(~least);
        return __uint_as_float(least == largest ? least : 0x7fffffffu);
    }
    float sum = cuda_warp_magnitudes(x);
    float step = a.majority ? 1.0f
                 : cuda_finite(sum) ? __fdiv_rn(sum, (float)count)
                                    : __fdiv_rn(__uint_as_float(most), 2.0f);
#pragma unroll
    for (int j = 0; j < CUDA_EACH; j++) {
        level[j] = x[j] < 0;
        x[j] = CUDA_SUB(x[j], level[j] ? -step : step);
    }
    return step;
}

/* Bytes of a block of 512 elements: the step, and runs of 64 bytes that hold 512 / BITS elements each. */
template <int BITS> CUDA_INLINE int64_t cuda_code_stride(void) { return 4 + 64 * (CUDA_CODE_BLOCK / (512 / BITS)); }

/* Word i of a run has its elements i + 16 k, k = 0, 1, ..., in bits BITS * k and up: threads t and t + 16 share it. */
template <int BITS> CUDA_INLINE void cuda_pack(unsigned char *code, const int32_t *level, int64_t count) {
    const int run = 512 / BITS, steps = run / 32, lane = (int)threadIdx.x % 32, high = lane / 16;
#pragma unroll
    for (int r = 0; r < CUDA_CODE_BLOCK / run; r++) {
        uint32_t word = 0;
#pragma unroll
        for (int j = 0; j < steps; j++) {
            word |= ((uint32_t)level[r * steps + j] & ((1u << BITS) - 1)) << ((2 * j + high) * BITS);
        }
        word |= __shfl_xor_sync(CUDA_WARP_ALL, word, 16, 32);
        if (high == 0 && r * run < count) {
            ((uint32_t *)(code + 4 + 64 * r))[lane] = word;
        }
    }
}

template <int BITS> CUDA_INLINE void cuda_encode_block(const cuda_code_args &a, int64_t block) {
    const int64_t first = block * CUDA_CODE_BLOCK;
    const int64_t count = a.count - first < CUDA_CODE_BLOCK ? a.count - first : CUDA_CODE_BLOCK;
    const int lane = (int)threadIdx.x % 32;
    float x[CUDA_EACH];
    int32_t level[CUDA_EACH];
    uint32_t most = 0, odd = 0;
#pragma unroll
    for (int j = 0; j < CUDA_EACH; j++) {
        int64_t i = 32 * j + lane;
        x[j] = i < count ? CUDA_ADD(a.g[first + i], a.e != 0 ? a.e[first + i] : -0.0f) : 0;
        most = cuda_magnitude(x[j]) > most ? cuda_magnitude(x[j]) : most;
        odd += !cuda_finite(x[j]);
    }
    most = cuda_warp_most(most);
    unsigned char *code = a.code + block * cuda_code_stride<BITS>();
    float step = BITS == 1 ? cuda_encode_signs(a, x, level, most, count)
                           : cuda_encode_levels<BITS>(a, x, level, most, first);
    cuda_pack<BITS>(code, level, count);
#pragma unroll
    for (int j = 0; j < CUDA_EACH; j++) {
        int64_t i = 32 * j + lane;
        if (a.e != 0 && i < count) {
            a.e[first + i] = x[j];
        }
    }
    odd = most >= CUDA_INFINITE ? cuda_warp_total(odd) : 0;
    if (lane == 0) {
        *(float *)code = step;
        cuda_count_odd(a.odd, odd);
    }
}

template <int BITS> CUDA_INLINE float cuda_decode_one(float step, bool odd, int32_t level) {
    const int32_t end = (1 << (BITS - 1)) - 1;
    if (BITS == 1) {
        return odd ? (level != 0 ? step : 0) : __uint_as_float(__float_as_uint(step) | (level != 0 ? 0x80000000u : 0));
    }
    if (!odd || (level > -end && level < end)) {
        return CUDA_MUL((float)level, odd ? -step : step);
    }
    return __uint_as_float(level == end ? CUDA_INFINITE : level == -end ? 0x80000000u | CUDA_INFINITE : 0x7fffffffu);
}

/* sum += the values of a block. */
template <int BITS> CUDA_INLINE void cuda_decode_block(const cuda_code_args &a, int64_t block) {
    const int run = 512 / BITS, lane = (int)threadIdx.x % 32;
    const int64_t first = block * CUDA_CODE_BLOCK;
    const int64_t count = a.count - first < CUDA_CODE_BLOCK ? a.count - first : CUDA_CODE_BLOCK;
    const unsigned char *code = a.code + block * cuda_code_stride<BITS>();
    const float step = *(const float *)code;
    const bool odd = BITS == 1 ? !cuda_finite(step) : __float_as_uint(step) >> 31 != 0;
#pragma unroll
    for (int j = 0; j < CUDA_EACH; j++) {
        int i = 32 * j + lane;
        if (i < count) {
            uint32_t word = ((const uint32_t *)(code + 4))[i / run * 16 + i % 16];
            int shift = 32 - BITS - i / 16 % (32 / BITS) * BITS;
            int32_t level = (int32_t)(word << shift) >> (32 - BITS);
            a.sum[first + i] = CUDA_ADD(a.sum[first + i], cuda_decode_one<BITS>(step, odd, level));
        }
    }
}

template <int BITS, bool ENCODE> CUDA_INLINE void cuda_blocks(const cuda_code_args &a) {
    const int64_t blocks = (a.count + CUDA_CODE_BLOCK - 1) / CUDA_CODE_BLOCK;
    for (int64_t block = cuda_thread() / 32; block < blocks; block += cuda_threads() / 32) {
        if (ENCODE) {
            cuda_encode_block<BITS>(a, block);
        } else {
            cuda_decode_block<BITS>(a, block);
        }
    }
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
        float4 g = ((const float4 *)a.g)[i], e = a.e != 0 ? ((const float4 *)a.e)[i] : make_float4(-0.0f, -0.0f, -0.0f, -0.0f); /* x + -0 is x */
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

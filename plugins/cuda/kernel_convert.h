/* kernel_convert: arrays from one float type to another, or added to one, with a count of what is not finite. Four
 * elements at a time where both arrays are aligned to that. It must not know why. */
#ifndef CUDA_KERNEL_CONVERT_H
#define CUDA_KERNEL_CONVERT_H

#include "kernel_code.h"

/* The same type keeps all bits; a NaN of another type has all bits set. */
template <class To, class From> struct cuda_converted {
    CUDA_INLINE typename To::word of(typename From::word w) { return To::close(From::open(w)); }
};
template <class T> struct cuda_converted<T, T> {
    CUDA_INLINE typename T::word of(typename T::word w) { return w; }
};

/* All bits of the exponent are set. */
CUDA_INLINE bool cuda_is_odd(cuda_f16, uint16_t w) { return (w & 0x7c00) == 0x7c00; }
CUDA_INLINE bool cuda_is_odd(cuda_bf16, uint16_t w) { return (w & 0x7f80) == 0x7f80; }
CUDA_INLINE bool cuda_is_odd(cuda_f32, uint32_t w) { return (w & 0x7f800000u) == 0x7f800000u; }
CUDA_INLINE bool cuda_is_odd(cuda_f64, uint64_t w) { return (w >> 52 & 0x7ff) == 0x7ff; }

template <class W> struct alignas(4 * sizeof(W)) cuda_four {
    W word[4];
};

template <class To, class From> CUDA_INLINE void cuda_convert(const cuda_convert_args &a) {
    typedef typename To::word to_word;
    typedef typename From::word from_word;
    to_word *dst = (to_word *)a.dst;
    const from_word *src = (const from_word *)a.src;
    const bool aligned = ((uintptr_t)dst % sizeof(cuda_four<to_word>) | (uintptr_t)src % sizeof(cuda_four<from_word>)) == 0;
    const int64_t fours = aligned ? a.count / 4 : 0;
    uint32_t odd = 0;
    for (int64_t i = cuda_thread(); i < fours; i += cuda_threads()) {
        cuda_four<from_word> x = ((const cuda_four<from_word> *)src)[i];
        cuda_four<to_word> y;
        if (a.add) {
            y = ((const cuda_four<to_word> *)dst)[i];
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            to_word z = cuda_converted<To, From>::of(x.word[j]);
            y.word[j] = a.add ? cuda_sum<To>::apply(y.word[j], z) : z;
            odd += cuda_is_odd(To(), y.word[j]);
        }
        ((cuda_four<to_word> *)dst)[i] = y;
    }
    for (int64_t i = 4 * fours + cuda_thread(); i < a.count; i += cuda_threads()) {
        to_word z = cuda_converted<To, From>::of(src[i]);
        z = a.add ? cuda_sum<To>::apply(dst[i], z) : z;
        odd += cuda_is_odd(To(), z);
        dst[i] = z;
    }
    cuda_count_odd(a.odd, odd);
}

/* An element's code of a majority vote: infinities and NaN as they are, else the sign. */
CUDA_INLINE void cuda_signs(const cuda_convert_args &a) {
    float *x = (float *)a.dst;
    for (int64_t i = cuda_thread(); i < a.count; i += cuda_threads()) {
        float v = x[i];
        x[i] = cuda_is_odd(cuda_f32(), __float_as_uint(v)) ? v : v < 0 ? -1.0f : 1.0f;
    }
}

#endif /* CUDA_KERNEL_CONVERT_H */

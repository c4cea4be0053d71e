/* kernel_reduce: arrays on the device: reductions of n sources into m destinations, exchanges, strided tensors.
 * Words of 16 bytes where all pointers are at the same place within 16, which is the usual case; else each pointer is
 * read and written in the largest pieces it is aligned to. It must not know what an op does. */
#ifndef CUDA_KERNEL_REDUCE_H
#define CUDA_KERNEL_REDUCE_H

#include "kernel_element.h"

CUDA_INLINE int64_t cuda_thread(void) { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }
CUDA_INLINE int64_t cuda_threads(void) { return (int64_t)gridDim.x * blockDim.x; }

union cuda_word16 {
    uint4 all;
    uint8_t u8[16];
    uint16_t u16[8];
    uint32_t u32[4];
    uint64_t u64[2];
};

/* 16 bytes at any address. */
CUDA_INLINE uint4 cuda_load(const char *p) {
    cuda_word16 w;
    switch ((uintptr_t)p & 15) {
    case 0: return *(const uint4 *)p;
    case 8: w.u64[0] = ((const uint64_t *)p)[0], w.u64[1] = ((const uint64_t *)p)[1]; break;
    case 4:
    case 12:
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w.u32[i] = ((const uint32_t *)p)[i];
        }
        break;
    default:
#pragma unroll
        for (int i = 0; i < 16; i++) {
            w.u8[i] = (uint8_t)p[i];
        }
    }
    return w.all;
}

CUDA_INLINE void cuda_store(char *p, uint4 value) {
    cuda_word16 w;
    w.all = value;
    switch ((uintptr_t)p & 15) {
    case 0: *(uint4 *)p = value; break;
    case 8: ((uint64_t *)p)[0] = w.u64[0], ((uint64_t *)p)[1] = w.u64[1]; break;
    case 4:
    case 12:
#pragma unroll
        for (int i = 0; i < 4; i++) {
            ((uint32_t *)p)[i] = w.u32[i];
        }
        break;
    default:
#pragma unroll
        for (int i = 0; i < 16; i++) {
            p[i] = (char)w.u8[i];
        }
    }
}

/* One element at any address. */
template <class W> CUDA_INLINE W cuda_load_one(const char *p) {
    union {
        W word;
        char bytes[sizeof(W)];
    } w;
#pragma unroll
    for (int i = 0; i < (int)sizeof(W); i++) {
        w.bytes[i] = p[i];
    }
    return w.word;
}
template <class W> CUDA_INLINE void cuda_store_one(char *p, W word) {
    union {
        W word;
        char bytes[sizeof(W)];
    } w;
    w.word = word;
#pragma unroll
    for (int i = 0; i < (int)sizeof(W); i++) {
        p[i] = w.bytes[i];
    }
}

template <class Lane> union cuda_lanes {
    uint4 all;
    Lane lane[16 / sizeof(Lane)];
    CUDA_INLINE cuda_lanes of(uint4 x) {
        cuda_lanes l;
        l.all = x;
        return l;
    }
};

template <class T, class Op> CUDA_INLINE uint4 cuda_join(uint4 x, uint4 y) {
    cuda_lanes<typename T::lane> l = cuda_lanes<typename T::lane>::of(x), r = cuda_lanes<typename T::lane>::of(y);
#pragma unroll
    for (int i = 0; i < (int)(16 / sizeof(typename T::lane)); i++) {
        l.lane[i] = Op::apply(l.lane[i], r.lane[i]);
    }
    return l.all;
}
template <class T> CUDA_INLINE uint4 cuda_scale(T t, uint4 x, double factor) {
    cuda_lanes<typename T::lane> l = cuda_lanes<typename T::lane>::of(x);
#pragma unroll
    for (int i = 0; i < (int)(16 / sizeof(typename T::lane)); i++) {
        l.lane[i] = cuda_scale(t, l.lane[i], factor);
    }
    return l.all;
}
template <class T, class N> CUDA_INLINE uint4 cuda_divide(T t, uint4 x, N by) {
    cuda_lanes<typename T::lane> l = cuda_lanes<typename T::lane>::of(x);
#pragma unroll
    for (int i = 0; i < (int)(16 / sizeof(typename T::lane)); i++) {
        l.lane[i] = cuda_divide(t, l.lane[i], by);
    }
    return l.all;
}

/* What is done to a word of 16 bytes, or to one element x: those of source s are scaled, joined by op, and divided.
 * fast: by whose divisors tiles divide; they have the same results, and only tiles need be fast. */
template <class T, class Op> struct cuda_folding {
    enum { UNROLL = CUDA_UNROLL };
    typedef Op op;
    template <class W> CUDA_INLINE W scale(const cuda_reduce_args &, int, W x) { return x; }
    template <class W> CUDA_INLINE W divide(const cuda_reduce_args &, int, W x) { return x; }
    CUDA_INLINE int divisor(const cuda_reduce_args &) { return 1; }
    CUDA_INLINE int fast(const cuda_reduce_args &) { return 1; }
    CUDA_INLINE bool tiles(const cuda_reduce_args &a) { return a.range.aligned; }
    CUDA_INLINE const cuda_reduce_args &base(const cuda_reduce_args &a) { return a; }
};
template <class T> struct cuda_scaling {
    enum { UNROLL = T::SCALE_UNROLL, NARROW = sizeof(typename T::word) < sizeof(typename T::value) };
    typedef cuda_sum<T> op;
    template <class W> CUDA_INLINE W scale(const cuda_scaled_args &a, int s, W x) {
        return a.has_factor ? cuda_scale(T(), x, a.factor[s]) : x;
    }
    template <class W, class N> CUDA_INLINE W divide(const cuda_scaled_args &a, N by, W x) {
        return a.divisor != 1 ? cuda_divide(T(), x, by) : x;
    }
    CUDA_INLINE double divisor(const cuda_scaled_args &a) { return a.divisor; }
    CUDA_INLINE auto fast(const cuda_scaled_args &a) {
        if constexpr (NARROW) {
            return cuda_inverse_of((float)a.divisor);
        } else {
            return a.divisor;
        }
    }
    CUDA_INLINE bool tiles(const cuda_scaled_args &a) {
        return UNROLL > 0 && a.reduce.range.aligned && (!NARROW || cuda_inverts((float)a.divisor));
    }
    CUDA_INLINE const cuda_reduce_args &base(const cuda_scaled_args &a) { return a.reduce; }
};

template <class F, class A> CUDA_INLINE void cuda_scale_first(const A &args, uint4 *sum) {
#pragma unroll
    for (int u = 0; u < F::UNROLL; u++) {
        sum[u] = F::scale(args, 0, sum[u]);
    }
}

/* Some words per thread, a block apart: all loads of a source are under way before the first is used. Every
 * source is read before a destination is written, by the thread that writes it, so that they may be the same. */
template <class T, class F, class A, class N>
CUDA_INLINE void cuda_reduce_tile(const A &args, N by, int64_t skip, int64_t first, int64_t words) {
    const cuda_reduce_args &a = F::base(args);
    uint4 sum[F::UNROLL];
#pragma unroll
    for (int u = 0; u < F::UNROLL; u++) {
        int64_t i = first + u * (int)blockDim.x;
        sum[u] = i < words ? ((const uint4 *)((const char *)a.src[0] + skip))[i] : make_uint4(0, 0, 0, 0);
    }
    for (int s = 1; s < a.src_count; s++) {
        uint4 x[F::UNROLL];
#pragma unroll
        for (int u = 0; u < F::UNROLL; u++) {
            int64_t i = first + u * (int)blockDim.x;
            x[u] = i < words ? ((const uint4 *)((const char *)a.src[s] + skip))[i] : make_uint4(0, 0, 0, 0);
        }
        if (s == 1) { /* not before the loads of the second source are under way */
            cuda_scale_first<F>(args, sum);
        }
#pragma unroll
        for (int u = 0; u < F::UNROLL; u++) {
            sum[u] = cuda_join<T, typename F::op>(sum[u], F::scale(args, s, x[u]));
        }
    }
    if (a.src_count == 1) {
        cuda_scale_first<F>(args, sum);
    }
#pragma unroll
    for (int u = 0; u < F::UNROLL; u++) {
        sum[u] = F::divide(args, by, sum[u]);
    }
    for (int d = 0; d < a.dst_count; d++) {
#pragma unroll
        for (int u = 0; u < F::UNROLL; u++) {
            int64_t i = first + u * (int)blockDim.x;
            if (i < words) {
                ((uint4 *)((char *)a.dst[d] + skip))[i] = sum[u];
            }
        }
    }
}

/* One word whose pointers are not all aligned alike. */
template <class T, class F, class A> CUDA_INLINE void cuda_reduce_word(const A &args, int64_t at) {
    const cuda_reduce_args &a = F::base(args);
    uint4 sum = F::scale(args, 0, cuda_load((const char *)a.src[0] + at));
#pragma unroll 1
    for (int s = 1; s < a.src_count; s++) {
        sum = cuda_join<T, typename F::op>(sum, F::scale(args, s, cuda_load((const char *)a.src[s] + at)));
    }
    sum = F::divide(args, F::divisor(args), sum);
#pragma unroll 1
    for (int d = 0; d < a.dst_count; d++) {
        cuda_store((char *)a.dst[d] + at, sum);
    }
}

template <class T, class F, class A> CUDA_INLINE void cuda_reduce_one(const A &args, int64_t at) {
    typedef typename T::word W;
    const cuda_reduce_args &a = F::base(args);
    W sum = F::scale(args, 0, cuda_load_one<W>((const char *)a.src[0] + at));
#pragma unroll 1
    for (int s = 1; s < a.src_count; s++) {
        sum = F::op::apply(sum, F::scale(args, s, cuda_load_one<W>((const char *)a.src[s] + at)));
    }
    sum = F::divide(args, F::divisor(args), sum);
#pragma unroll 1
    for (int d = 0; d < a.dst_count; d++) {
        cuda_store_one<W>((char *)a.dst[d] + at, sum);
    }
}

/* Sums with factors of integers, which nobody waits for, have no tiles: they would be a third of all code. */
template <class T, class F, class A> CUDA_INLINE void cuda_reduce_tiles(const A &args, int64_t skip, int64_t words) {
    if constexpr (F::UNROLL > 0) {
        const auto by = F::fast(args);
        const int64_t tile = (int64_t)blockDim.x * F::UNROLL;
        for (int64_t at = blockIdx.x * tile; at < words; at += gridDim.x * tile) {
            cuda_reduce_tile<T, F>(args, by, skip, at + threadIdx.x, words);
        }
    }
}

/* Whole words in the middle, by tiles or one by one, and less than a word at either end, an element per thread. */
template <class T, class F, class A> CUDA_INLINE void cuda_reduce(const A &args) {
    const cuda_range &r = F::base(args).range;
    const int64_t size = sizeof(typename T::word), skip = r.head * size, words = (r.count - r.head) * size / 16;
    if (F::tiles(args)) {
        cuda_reduce_tiles<T, F>(args, skip, words);
    } else {
        for (int64_t i = cuda_thread(); i < words; i += cuda_threads()) {
            cuda_reduce_word<T, F>(args, skip + 16 * i);
        }
    }
    for (int64_t i = cuda_thread(); i < r.count - words * (16 / size); i += cuda_threads()) {
        cuda_reduce_one<T, F>(args, i < r.head ? i * size : words * 16 + i * size);
    }
}

/* ---- exchange ---- */

CUDA_INLINE void cuda_exchange_bytes(const cuda_pair &p, int64_t at) {
    char x = ((const char *)p.from[0])[at];
    if (p.from[1] != 0) {
        ((char *)p.to[1])[at] = ((const char *)p.from[1])[at];
    }
    ((char *)p.to[0])[at] = x;
}

CUDA_INLINE void cuda_exchange(const cuda_pair &p) {
    const cuda_range &r = p.range;
    const int64_t words = (r.count - r.head) / 16;
    for (int64_t i = cuda_thread(); i < words; i += cuda_threads()) {
        int64_t at = r.head + 16 * i;
        uint4 x = cuda_load((const char *)p.from[0] + at), y = x;
        if (p.from[1] != 0) {
            y = cuda_load((const char *)p.from[1] + at);
            cuda_store((char *)p.to[1] + at, y);
        }
        cuda_store((char *)p.to[0] + at, x);
    }
    for (int64_t i = cuda_thread(); i < r.count - 16 * words; i += cuda_threads()) {
        cuda_exchange_bytes(p, i < r.head ? i : 16 * words + i);
    }
}

/* ---- strided tensors ---- */

CUDA_INLINE int64_t cuda_strided_offset(const cuda_strided_args &a, int64_t i) {
    int64_t offset = 0;
#pragma unroll 1
    for (int d = a.ndim - 1; d >= 0; d--) {
        int64_t size = a.shape[d], next;
        if (((i | size) >> 32) == 0) { /* a division of 64 bits takes several times as long */
            next = (int64_t)((uint32_t)i / (uint32_t)size);
        } else {
            next = i / size;
        }
        offset += (i - next * size) * a.stride[d];
        i = next;
    }
    return offset;
}

template <class W> CUDA_INLINE void cuda_strided(const cuda_strided_args &a) {
    for (int64_t i = cuda_thread(); i < a.count; i += cuda_threads()) {
        W *packed = (W *)a.packed + i, *data = (W *)(a.data + cuda_strided_offset(a, i));
        if (a.unpack) {
            *data = *packed;
        } else {
            *packed = *data;
        }
    }
}

#endif /* CUDA_KERNEL_REDUCE_H */

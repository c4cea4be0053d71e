/* kernel_element: one element on the device: its type, and what each op does to two of them. The same bits as
 * src/dtype on the host: a NaN that an op makes has all bits set, -0 is below +0 in min and max, integers wrap, narrow
 * floats are computed in f32 and rounded after every op. Products and sums are the functions that the compiler never fuses.
 * It must not know arrays. */
#ifndef CUDA_KERNEL_ELEMENT_H
#define CUDA_KERNEL_ELEMENT_H

#include "kernels.h"

#define CUDA_INLINE static __device__ __forceinline__

CUDA_INLINE float cuda_canonical(float x) { return x != x ? __uint_as_float(0xffffffffu) : x; }
CUDA_INLINE double cuda_canonical(double x) { return x != x ? __longlong_as_double(-1ll) : x; }

/* ---- f16 and bf16 ---- */

#if defined(__CUDA_ARCH__)
CUDA_INLINE float cuda_f16_widen(uint16_t h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
CUDA_INLINE uint16_t cuda_f16_round(float f) {
    uint16_t h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
#else
/* For kernels that are run on a CPU in tests: what the instructions above do, after F. Giesen (see src/dtype). */
CUDA_INLINE float cuda_f16_widen(uint16_t h) {
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13, exponent = bits & 0x0f800000;
    float small = __uint_as_float(bits + 0x38800000) - 6.103515625e-5f;
    uint32_t normal = bits + 0x38000000 + (exponent == 0x0f800000 ? 0x38000000 : 0);
    return __uint_as_float((exponent == 0 ? __float_as_uint(small) : normal) | (uint32_t)(h & 0x8000) << 16);
}
CUDA_INLINE uint16_t cuda_f16_round(float f) {
    uint32_t all = __float_as_uint(f), bits = all & 0x7fffffff, sign = all >> 16 & 0x8000;
    if (bits >= 0x47800000) {
        return (uint16_t)(sign | (bits > 0x7f800000 ? 0x7fff : 0x7c00));
    }
    uint32_t small = __float_as_uint(__uint_as_float(bits) + 0.5f) - 0x3f000000;
    uint32_t normal = (bits + 0xc8000fff + (bits >> 13 & 1)) >> 13;
    return (uint16_t)(sign | (bits < 0x38800000 ? small : normal));
}
#endif

CUDA_INLINE uint16_t cuda_f16_narrow(float f) { return f != f ? (uint16_t)0xffff : cuda_f16_round(f); }
CUDA_INLINE float cuda_bf16_widen(uint16_t h) { return __uint_as_float((uint32_t)h << 16); }
/* To nearest even by the bits; a carry out of the mantissa rightly becomes the next exponent. All sm_75 can do. */
CUDA_INLINE uint16_t cuda_bf16_narrow(float f) {
    uint32_t bits = __float_as_uint(f);
    return (uint16_t)(f != f ? 0xffffu : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* ---- e4m3 and e5m2: OFP8 without saturation, as src/dtype says ----
 * By the bits: the instructions (cvt..e4m3x2, from sm_89 on) saturate, and a sum that overflows is to show. */

CUDA_INLINE float cuda_e4m3_widen(uint8_t h) {
    uint32_t bits = (uint32_t)(h & 0x7f) << 20, sign = (uint32_t)(h & 0x80) << 24;
    float small = __fsub_rn(__uint_as_float(bits + 0x3c800000), 0x1p-6f);
    uint32_t magnitude = (bits & 0x07800000) == 0 ? __float_as_uint(small) : bits + 0x3c000000;
    return __uint_as_float(bits == 0x07f00000 ? 0xffffffffu : magnitude | sign);
}
CUDA_INLINE uint8_t cuda_e4m3_narrow(float f) {
    uint32_t all = __float_as_uint(f), bits = all & 0x7fffffff;
    uint32_t small = __float_as_uint(__fadd_rn(__uint_as_float(bits), 0x1p14f)) - 0x46800000;
    uint32_t normal = (bits + 0xc407ffff + (bits >> 20 & 1)) >> 20;
    return (uint8_t)(bits > 0x43e80000 ? 0xffu : (bits < 0x3c800000 ? small : normal) | (all >> 24 & 0x80));
}
CUDA_INLINE float cuda_e5m2_widen(uint8_t h) { return cuda_f16_widen((uint16_t)(h << 8)); }
CUDA_INLINE uint8_t cuda_e5m2_narrow(float f) {
    uint32_t all = __float_as_uint(f), bits = all & 0x7fffffff;
    uint32_t small = __float_as_uint(__fadd_rn(__uint_as_float(bits), 0x1p7f)) - 0x43000000;
    uint32_t normal = (bits + 0xc80fffff + (bits >> 21 & 1)) >> 21;
    uint32_t finite = bits < 0x38800000 ? small : normal;
    return (uint8_t)(bits > 0x7f800000 ? 0xffu : (bits >= 0x47700000 ? 0x7cu : finite) | (all >> 24 & 0x80));
}

/* ---- types: how one lies in memory (word), and how it is computed (value) ---- */

template <class Word, class Value> struct cuda_plain {
    typedef Word word;
    typedef Value value;
    typedef Word lane; /* what a 16-byte word is taken apart into */
    enum { SCALE_UNROLL = 0 }; /* words per thread and step of sums with factors; 0: see cuda_tiles */
    CUDA_INLINE Value open(Word w) { return (Value)w; }
    CUDA_INLINE Word close(Value v) { return (Word)v; }
};
typedef cuda_plain<uint8_t, uint8_t> cuda_u8;
typedef cuda_plain<uint8_t, int8_t> cuda_i8;
typedef cuda_plain<uint32_t, uint32_t> cuda_u32;
typedef cuda_plain<uint32_t, int32_t> cuda_i32;
typedef cuda_plain<uint64_t, uint64_t> cuda_u64;
typedef cuda_plain<uint64_t, int64_t> cuda_i64;
struct cuda_bits : cuda_u8 {
    typedef uint32_t lane;
};
struct cuda_f16 {
    typedef uint16_t word;
    typedef uint16_t lane;
    typedef float value;
    enum { SCALE_UNROLL = 2 };
    CUDA_INLINE float open(uint16_t w) { return cuda_f16_widen(w); }
    CUDA_INLINE uint16_t close(float v) { return cuda_f16_narrow(v); }
};
struct cuda_bf16 {
    typedef uint16_t word;
    typedef uint16_t lane;
    typedef float value;
    enum { SCALE_UNROLL = 2 };
    CUDA_INLINE float open(uint16_t w) { return cuda_bf16_widen(w); }
    CUDA_INLINE uint16_t close(float v) { return cuda_bf16_narrow(v); }
};
struct cuda_e4m3 {
    typedef uint8_t word;
    typedef uint8_t lane;
    typedef float value;
    enum { SCALE_UNROLL = 1 };
    CUDA_INLINE float open(uint8_t w) { return cuda_e4m3_widen(w); }
    CUDA_INLINE uint8_t close(float v) { return cuda_e4m3_narrow(v); }
};
struct cuda_e5m2 {
    typedef uint8_t word;
    typedef uint8_t lane;
    typedef float value;
    enum { SCALE_UNROLL = 1 };
    CUDA_INLINE float open(uint8_t w) { return cuda_e5m2_widen(w); }
    CUDA_INLINE uint8_t close(float v) { return cuda_e5m2_narrow(v); }
};
struct cuda_f32 {
    typedef uint32_t word;
    typedef uint32_t lane;
    typedef float value;
    enum { SCALE_UNROLL = 2 };
    CUDA_INLINE float open(uint32_t w) { return __uint_as_float(w); }
    CUDA_INLINE uint32_t close(float v) { return __float_as_uint(cuda_canonical(v)); }
};
struct cuda_f64 {
    typedef uint64_t word;
    typedef uint64_t lane;
    typedef double value;
    enum { SCALE_UNROLL = 2 };
    CUDA_INLINE double open(uint64_t w) { return __longlong_as_double((long long)w); }
    CUDA_INLINE uint64_t close(double v) { return (uint64_t)__double_as_longlong(cuda_canonical(v)); }
};

/* A value with an index behind it. */
template <class Word, class Index> struct cuda_pair_word {
    Word value;
    Index index;
};
template <class Value, class Index> struct cuda_pair_type {
    typedef cuda_pair_word<typename Value::word, Index> word;
    typedef word lane;
    typedef Value part;
};
typedef cuda_pair_type<cuda_f32, int32_t> cuda_f32_i32;
typedef cuda_pair_type<cuda_f64, int64_t> cuda_f64_i64;
typedef cuda_pair_type<cuda_i32, int32_t> cuda_i32_i32;
typedef cuda_pair_type<cuda_i64, int64_t> cuda_i64_i64;

/* ---- ops: apply(x, y) on lanes ---- */

CUDA_INLINE float cuda_add(float x, float y) { return __fadd_rn(x, y); }
CUDA_INLINE double cuda_add(double x, double y) { return __dadd_rn(x, y); }
template <class V> CUDA_INLINE V cuda_add(V x, V y) { return (V)((uint64_t)x + (uint64_t)y); } /* it wraps */
CUDA_INLINE float cuda_multiply(float x, float y) { return __fmul_rn(x, y); }
CUDA_INLINE double cuda_multiply(double x, double y) { return __dmul_rn(x, y); }
template <class V> CUDA_INLINE V cuda_multiply(V x, V y) { return (V)((uint64_t)x * (uint64_t)y); }

template <class T> struct cuda_sum {
    CUDA_INLINE typename T::word apply(typename T::word x, typename T::word y) {
        return T::close(cuda_add(T::open(x), T::open(y)));
    }
};
template <class T> struct cuda_prod {
    CUDA_INLINE typename T::word apply(typename T::word x, typename T::word y) {
        return T::close(cuda_multiply(T::open(x), T::open(y)));
    }
};

CUDA_INLINE float cuda_smaller(float x, float y) {
    uint32_t both = __float_as_uint(x) | __float_as_uint(y); /* equal, or a NaN: -0 of two zeros; NaN stays NaN */
    return x < y ? x : x > y ? y : __uint_as_float(both);
}
CUDA_INLINE double cuda_smaller(double x, double y) {
    long long both = __double_as_longlong(x) | __double_as_longlong(y);
    return x < y ? x : x > y ? y : __longlong_as_double(both);
}
template <class V> CUDA_INLINE V cuda_smaller(V x, V y) { return x < y ? x : y; }
CUDA_INLINE float cuda_larger(float x, float y) {
    uint32_t both = __float_as_uint(x) & __float_as_uint(y); /* +0 of two zeros */
    return x > y ? x : x < y ? y : x == y ? __uint_as_float(both) : __uint_as_float(0xffffffffu);
}
CUDA_INLINE double cuda_larger(double x, double y) {
    long long both = __double_as_longlong(x) & __double_as_longlong(y);
    return x > y ? x : x < y ? y : x == y ? __longlong_as_double(both) : __longlong_as_double(-1ll);
}
template <class V> CUDA_INLINE V cuda_larger(V x, V y) { return x > y ? x : y; }

template <class T> struct cuda_min {
    CUDA_INLINE typename T::word apply(typename T::word x, typename T::word y) {
        return T::close(cuda_smaller(T::open(x), T::open(y)));
    }
};
template <class T> struct cuda_max {
    CUDA_INLINE typename T::word apply(typename T::word x, typename T::word y) {
        return T::close(cuda_larger(T::open(x), T::open(y)));
    }
};
template <class T> struct cuda_land {
    template <class W> CUDA_INLINE W apply(W x, W y) { return (W)(x != 0 && y != 0); }
};
template <class T> struct cuda_lor {
    template <class W> CUDA_INLINE W apply(W x, W y) { return (W)((x | y) != 0); }
};
template <class T> struct cuda_lxor {
    template <class W> CUDA_INLINE W apply(W x, W y) { return (W)((x != 0) != (y != 0)); }
};
template <class T> struct cuda_band {
    template <class W> CUDA_INLINE W apply(W x, W y) { return (W)(x & y); }
};
template <class T> struct cuda_bor {
    template <class W> CUDA_INLINE W apply(W x, W y) { return (W)(x | y); }
};
template <class T> struct cuda_bxor {
    template <class W> CUDA_INLINE W apply(W x, W y) { return (W)(x ^ y); }
};

/* x wins if its value is better, or it alone is a NaN, or the values tie and its index is smaller; two zeros of
 * different sign tie, and then with one index the larger bits win (src/dtype/pairs.h). */
template <class T, bool MORE> struct cuda_better {
    typedef typename T::word word;
    CUDA_INLINE word apply(word x, word y) {
        typename T::part::value a = T::part::open(x.value), b = T::part::open(y.value);
        bool nan_a = a != a, nan_b = b != b;
        bool tie = a == b || (nan_a && nan_b);
        bool first = x.index < y.index || (x.index == y.index && x.value >= y.value);
        bool take = (MORE ? a > b : a < b) || (nan_a && !nan_b) || (tie && first);
        word r = take ? x : y;
        if (nan_a || nan_b) {
            r.value = (decltype(r.value)) ~(decltype(r.value))0;
        }
        return r;
    }
};
template <class T> struct cuda_min_index : cuda_better<T, false> {};
template <class T> struct cuda_max_index : cuda_better<T, true> {};

/* ---- factors and averages, as ddl__scale and ddl__average ---- */

#define CUDA_SCALE_BY_F32(T, W)                                                                                        \
    CUDA_INLINE W cuda_scale(T, W x, double factor) { return T::close(__fmul_rn(T::open(x), (float)factor)); }         \
    CUDA_INLINE W cuda_divide(T, W x, double n) { return T::close(__fdiv_rn(T::open(x), (float)n)); }
CUDA_SCALE_BY_F32(cuda_f16, uint16_t)
CUDA_SCALE_BY_F32(cuda_bf16, uint16_t)
CUDA_SCALE_BY_F32(cuda_e4m3, uint8_t)
CUDA_SCALE_BY_F32(cuda_e5m2, uint8_t)
CUDA_SCALE_BY_F32(cuda_f32, uint32_t)
CUDA_INLINE uint64_t cuda_scale(cuda_f64, uint64_t x, double factor) {
    return cuda_f64::close(__dmul_rn(cuda_f64::open(x), factor));
}
CUDA_INLINE uint64_t cuda_divide(cuda_f64, uint64_t x, double n) {
    return cuda_f64::close(__ddiv_rn(cuda_f64::open(x), n));
}

/* Integers: a whole factor multiplies and wraps like a sum of that many terms; another one goes through double,
 * truncates toward zero and saturates; NaN gives 0. */
template <class W, class V> CUDA_INLINE W cuda_scale(cuda_plain<W, V>, W word, double factor) {
    const bool is_signed = (V)~(V)0 < (V)1;
    const V most = (V)((V) ~(V)0 ^ (is_signed ? (V)((V)1 << (8 * sizeof(V) - 1)) : (V)0));
    const V least = (V)~most;
    V x = (V)word;
    if (factor >= -0x1p62 && factor <= 0x1p62 && (double)(int64_t)factor == factor) {
        return (W)((uint64_t)x * (uint64_t)(int64_t)factor);
    }
    double y = __dmul_rn((double)x, factor);
    if (y > (double)least && y < (double)most) {
        return (W)(V)y;
    }
    return (W)(y >= (double)most ? most : y <= (double)least ? least : (V)0);
}
template <class W, class V> CUDA_INLINE W cuda_divide(cuda_plain<W, V>, W word, double n) {
    V x = (V)word;
    return (V)~(V)0 < (V)1 ? (W)((int64_t)x / (int64_t)n) : (W)((uint64_t)x / (uint64_t)n);
}

#endif /* CUDA_KERNEL_ELEMENT_H */

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
/* As asm, so that the compiler leaves it apart from what follows: shift right and sum are then one instruction. */
CUDA_INLINE uint32_t cuda_shift_left_15(uint32_t x) {
    uint32_t r;
    asm("shl.b32 %0, %1, 15;" : "=r"(r) : "r"(x));
    return r;
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
CUDA_INLINE uint32_t cuda_shift_left_15(uint32_t x) { return x << 15; }
#endif

CUDA_INLINE uint16_t cuda_f16_narrow(float f) { return f != f ? (uint16_t)0xffff : cuda_f16_round(f); }
CUDA_INLINE float cuda_bf16_widen(uint16_t h) { return __uint_as_float((uint32_t)h << 16); }
/* To nearest even by the bits; a carry out of the mantissa rightly becomes the next exponent. All sm_75 can do. */
CUDA_INLINE uint32_t cuda_bf16_round(float f) { /* in the high half */
    uint32_t bits = __float_as_uint(f);
    return f != f ? 0xffffffffu : (cuda_shift_left_15(bits) >> 31) + (bits + 0x7fff);
}
CUDA_INLINE uint16_t cuda_bf16_narrow(float f) { return (uint16_t)(cuda_bf16_round(f) >> 16); }

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

/* ---- two of f16 in 32 bits, and four of e4m3 or e5m2 as two such pairs ----
 * Rounding to f16 before rounding to 4 or 3 bits changes no sum or product (tests try all pairs). */

#if defined(__CUDA_ARCH__)
CUDA_INLINE uint32_t cuda_pick(uint32_t x, uint32_t y, uint32_t which) {
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(which));
    return r;
}
CUDA_INLINE uint32_t cuda_halves_add(uint32_t x, uint32_t y) {
    uint32_t r;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
    return r;
}
CUDA_INLINE uint32_t cuda_halves_multiply(uint32_t x, uint32_t y) {
    uint32_t r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
    return r;
}
CUDA_INLINE uint32_t cuda_halves_round(float even, float odd) {
    uint32_t r;
    asm("{\n\t.reg .b16 x, y;\n\tcvt.rn.f16.f32 x, %1;\n\tcvt.rn.f16.f32 y, %2;\n\tmov.b32 %0, {x, y};\n\t}"
        : "=r"(r)
        : "f"(even), "f"(odd));
    return r;
}
CUDA_INLINE uint32_t cuda_halves_nan(uint32_t x) {
    uint32_t r;
    asm("set.nan.u32.f16x2 %0, %1, %1;" : "=r"(r) : "r"(x));
    return r;
}
#else
/* Each digit of `which` from the right picks a byte, 0..3 of x, 4..7 of y; with 8 more, its sign in all bits. */
CUDA_INLINE uint32_t cuda_pick(uint32_t x, uint32_t y, uint32_t which) {
    uint64_t both = (uint64_t)y << 32 | x;
    uint32_t r = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t digit = which >> 4 * i & 15, byte = (uint32_t)(both >> 8 * (digit & 7)) & 0xff;
        r |= (digit < 8 ? byte : byte < 0x80 ? 0u : 0xffu) << 8 * i;
    }
    return r;
}
/* A NaN that an instruction makes is 0x7fff. */
CUDA_INLINE uint32_t cuda_half_made(float f) { return f != f ? 0x7fffu : cuda_f16_round(f); }
CUDA_INLINE uint32_t cuda_halves_round(float even, float odd) {
    return cuda_half_made(odd) << 16 | cuda_half_made(even);
}
CUDA_INLINE float cuda_half_of(uint32_t x, int i) { return cuda_f16_widen((uint16_t)(x >> 16 * i)); }
CUDA_INLINE uint32_t cuda_halves_add(uint32_t x, uint32_t y) {
    return cuda_halves_round(cuda_half_of(x, 0) + cuda_half_of(y, 0), cuda_half_of(x, 1) + cuda_half_of(y, 1));
}
CUDA_INLINE uint32_t cuda_halves_multiply(uint32_t x, uint32_t y) {
    return cuda_halves_round(cuda_half_of(x, 0) * cuda_half_of(y, 0), cuda_half_of(x, 1) * cuda_half_of(y, 1));
}
CUDA_INLINE uint32_t cuda_halves_nan(uint32_t x) {
    return ((x & 0x7fff) > 0x7c00 ? 0xffffu : 0u) | ((x >> 16 & 0x7fff) > 0x7c00 ? 0xffff0000u : 0u);
}
#endif

/* Elements 0 and 2, and 1 and 3. */
struct cuda_halves {
    uint32_t even, odd;
};
/* The high byte of each half. */
CUDA_INLINE uint32_t cuda_tops(uint32_t even, uint32_t odd) { return cuda_pick(even, odd, 0x7351); }

/* e4m3 with its exponent and mantissa where f16 has them is 2^-8 of its value, subnormals too; a NaN looks like 480. */
CUDA_INLINE cuda_halves cuda_e4m3_halves(uint32_t x) {
    uint32_t turned = x >> 1 | x << 31, last = turned & 0x80808080; /* last bits, a byte below their own */
    uint32_t top = (x & 0x80808080) | (turned & 0x3f3f3f3f);
    return cuda_halves{cuda_pick(top, last, 0x2507), cuda_pick(top, last, 0x3614)};
}
/* From 2^-8 of values, to nearest even. What is then above 448 is NaN, and so is what has its highest bit in nan. */
CUDA_INLINE uint32_t cuda_e4m3_round(cuda_halves h, uint32_t nan) {
    uint32_t even = h.even + 0x003f003f + (h.even >> 7 & 0x00010001);
    uint32_t odd = h.odd + 0x003f003f + (h.odd >> 7 & 0x00010001);
    uint32_t signs = cuda_tops(even, odd), bits = cuda_tops(even << 1, odd << 1); /* more than 0x7e is too much */
    return (signs & 0x80808080) | (bits & 0x7f7f7f7f) | cuda_pick((bits + 0x01010101) | nan, 0, 0xba98);
}

CUDA_INLINE cuda_halves cuda_e5m2_halves(uint32_t x) { return cuda_halves{cuda_pick(x, 0, 0x2404), x & 0xff00ff00}; }
CUDA_INLINE uint32_t cuda_e5m2_round(cuda_halves h) {
    uint32_t even = h.even + 0x007f007f + (h.even >> 8 & 0x00010001);
    uint32_t odd = h.odd + 0x007f007f + (h.odd >> 8 & 0x00010001);
    return cuda_tops(even | cuda_halves_nan(h.even), odd | cuda_halves_nan(h.odd));
}

/* ---- types: how one lies in memory (word), and how it is computed (value) ---- */

template <class Word, class Value> struct cuda_plain {
    typedef Word word;
    typedef Value value;
    typedef Word lane; /* what a 16-byte word is taken apart into */
    enum { SCALE_UNROLL = 0 }; /* words per thread and step of sums with factors; 0: no tiles, nobody waits for them */
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

/* As many narrow floats as 32 bits hold, which ops take together. SIGNS: the highest bit of each; SPREAD: for cuda_pick
 * to copy it to all bits of each; NAN_GAP: added to magnitudes, it takes those of NaN, and no others, to that bit. */
template <class T> struct cuda_pack {
    uint32_t bits;
};
struct cuda_f16 {
    typedef uint16_t word;
    typedef uint32_t lane;
    typedef float value;
    enum { SCALE_UNROLL = 2 };
    enum : uint32_t { SIGNS = 0x80008000, SPREAD = 0xbb99, NAN_GAP = 0x03ff03ff };
    CUDA_INLINE float open(uint16_t w) { return cuda_f16_widen(w); }
    CUDA_INLINE uint16_t close(float v) { return cuda_f16_narrow(v); }
    CUDA_INLINE cuda_pack<cuda_f16> open(uint32_t w) { return cuda_pack<cuda_f16>{w}; }
    CUDA_INLINE uint32_t close(cuda_pack<cuda_f16> v) { return v.bits; }
};
struct cuda_bf16 {
    typedef uint16_t word;
    typedef uint32_t lane;
    typedef float value;
    enum { SCALE_UNROLL = 2 };
    enum : uint32_t { SIGNS = 0x80008000, SPREAD = 0xbb99, NAN_GAP = 0x007f007f };
    CUDA_INLINE float open(uint16_t w) { return cuda_bf16_widen(w); }
    CUDA_INLINE uint16_t close(float v) { return cuda_bf16_narrow(v); }
    CUDA_INLINE cuda_pack<cuda_bf16> open(uint32_t w) { return cuda_pack<cuda_bf16>{w}; }
    CUDA_INLINE uint32_t close(cuda_pack<cuda_bf16> v) { return v.bits; }
};
struct cuda_e4m3 {
    typedef uint8_t word;
    typedef uint32_t lane;
    typedef float value;
    enum { SCALE_UNROLL = 1 };
    enum : uint32_t { SIGNS = 0x80808080, SPREAD = 0xba98, NAN_GAP = 0x01010101 };
    CUDA_INLINE float open(uint8_t w) { return cuda_e4m3_widen(w); }
    CUDA_INLINE uint8_t close(float v) { return cuda_e4m3_narrow(v); }
    CUDA_INLINE cuda_pack<cuda_e4m3> open(uint32_t w) { return cuda_pack<cuda_e4m3>{w}; }
    CUDA_INLINE uint32_t close(cuda_pack<cuda_e4m3> v) { return v.bits; }
};
struct cuda_e5m2 {
    typedef uint8_t word;
    typedef uint32_t lane;
    typedef float value;
    enum { SCALE_UNROLL = 1 };
    enum : uint32_t { SIGNS = 0x80808080, SPREAD = 0xba98, NAN_GAP = 0x03030303 };
    CUDA_INLINE float open(uint8_t w) { return cuda_e5m2_widen(w); }
    CUDA_INLINE uint8_t close(float v) { return cuda_e5m2_narrow(v); }
    CUDA_INLINE cuda_pack<cuda_e5m2> open(uint32_t w) { return cuda_pack<cuda_e5m2>{w}; }
    CUDA_INLINE uint32_t close(cuda_pack<cuda_e5m2> v) { return v.bits; }
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

/* The highest bit of an element says whether it is a NaN. */
template <class T> CUDA_INLINE uint32_t cuda_nans(cuda_pack<T> x) { return (x.bits & ~T::SIGNS) + T::NAN_GAP; }

/* Each as f32, and back: a NaN has all bits set. */
template <int COUNT> struct cuda_floats {
    float value[COUNT];
};
CUDA_INLINE cuda_floats<2> cuda_unpack(cuda_pack<cuda_f16> x) {
    return cuda_floats<2>{{cuda_f16_widen((uint16_t)x.bits), cuda_f16_widen((uint16_t)(x.bits >> 16))}};
}
CUDA_INLINE cuda_floats<2> cuda_unpack(cuda_pack<cuda_bf16> x) {
    return cuda_floats<2>{{__uint_as_float(x.bits << 16), __uint_as_float(x.bits & 0xffff0000)}};
}
template <class T> CUDA_INLINE cuda_floats<4> cuda_unpack(cuda_pack<T> x) {
    return cuda_floats<4>{{T::open((uint8_t)x.bits), T::open((uint8_t)(x.bits >> 8)), T::open((uint8_t)(x.bits >> 16)),
                           T::open((uint8_t)(x.bits >> 24))}};
}
CUDA_INLINE cuda_pack<cuda_f16> cuda_packed(cuda_f16, cuda_floats<2> f) {
    uint32_t x = cuda_halves_round(f.value[0], f.value[1]);
    return cuda_pack<cuda_f16>{x | cuda_halves_nan(x)};
}
CUDA_INLINE cuda_pack<cuda_bf16> cuda_packed(cuda_bf16, cuda_floats<2> f) {
    return cuda_pack<cuda_bf16>{cuda_pick(cuda_bf16_round(f.value[0]), cuda_bf16_round(f.value[1]), 0x7632)};
}
template <class T> CUDA_INLINE cuda_pack<T> cuda_packed(T, cuda_floats<4> f) {
    uint32_t low = T::close(f.value[0]) | (uint32_t)T::close(f.value[1]) << 8;
    return cuda_pack<T>{low | (uint32_t)T::close(f.value[2]) << 16 | (uint32_t)T::close(f.value[3]) << 24};
}

CUDA_INLINE cuda_pack<cuda_f16> cuda_add(cuda_pack<cuda_f16> x, cuda_pack<cuda_f16> y) {
    uint32_t r = cuda_halves_add(x.bits, y.bits);
    return cuda_pack<cuda_f16>{r | cuda_halves_nan(r)};
}
CUDA_INLINE cuda_pack<cuda_f16> cuda_multiply(cuda_pack<cuda_f16> x, cuda_pack<cuda_f16> y) {
    uint32_t r = cuda_halves_multiply(x.bits, y.bits);
    return cuda_pack<cuda_f16>{r | cuda_halves_nan(r)};
}
CUDA_INLINE cuda_pack<cuda_bf16> cuda_add(cuda_pack<cuda_bf16> x, cuda_pack<cuda_bf16> y) {
    cuda_floats<2> a = cuda_unpack(x), b = cuda_unpack(y);
    a.value[0] = __fadd_rn(a.value[0], b.value[0]), a.value[1] = __fadd_rn(a.value[1], b.value[1]);
    return cuda_packed(cuda_bf16(), a);
}
CUDA_INLINE cuda_pack<cuda_bf16> cuda_multiply(cuda_pack<cuda_bf16> x, cuda_pack<cuda_bf16> y) {
    cuda_floats<2> a = cuda_unpack(x), b = cuda_unpack(y);
    a.value[0] = __fmul_rn(a.value[0], b.value[0]), a.value[1] = __fmul_rn(a.value[1], b.value[1]);
    return cuda_packed(cuda_bf16(), a);
}
CUDA_INLINE cuda_pack<cuda_e5m2> cuda_add(cuda_pack<cuda_e5m2> x, cuda_pack<cuda_e5m2> y) {
    cuda_halves a = cuda_e5m2_halves(x.bits), b = cuda_e5m2_halves(y.bits);
    a.even = cuda_halves_add(a.even, b.even), a.odd = cuda_halves_add(a.odd, b.odd);
    return cuda_pack<cuda_e5m2>{cuda_e5m2_round(a)};
}
CUDA_INLINE cuda_pack<cuda_e5m2> cuda_multiply(cuda_pack<cuda_e5m2> x, cuda_pack<cuda_e5m2> y) {
    cuda_halves a = cuda_e5m2_halves(x.bits), b = cuda_e5m2_halves(y.bits);
    a.even = cuda_halves_multiply(a.even, b.even), a.odd = cuda_halves_multiply(a.odd, b.odd);
    return cuda_pack<cuda_e5m2>{cuda_e5m2_round(a)};
}

CUDA_INLINE cuda_pack<cuda_e4m3> cuda_add(cuda_pack<cuda_e4m3> x, cuda_pack<cuda_e4m3> y) {
    cuda_halves a = cuda_e4m3_halves(x.bits), b = cuda_e4m3_halves(y.bits);
    a.even = cuda_halves_add(a.even, b.even), a.odd = cuda_halves_add(a.odd, b.odd);
    return cuda_pack<cuda_e4m3>{cuda_e4m3_round(a, cuda_nans(x) | cuda_nans(y))};
}
CUDA_INLINE cuda_pack<cuda_e4m3> cuda_multiply(cuda_pack<cuda_e4m3> x, cuda_pack<cuda_e4m3> y) {
    const uint32_t whole = 0x5c005c00; /* 256: of the factors one is 2^-8 of its value, like the product */
    cuda_halves a = cuda_e4m3_halves(x.bits), b = cuda_e4m3_halves(y.bits);
    a.even = cuda_halves_multiply(cuda_halves_multiply(a.even, whole), b.even);
    a.odd = cuda_halves_multiply(cuda_halves_multiply(a.odd, whole), b.odd);
    return cuda_pack<cuda_e4m3>{cuda_e4m3_round(a, cuda_nans(x) | cuda_nans(y))};
}

template <class T> struct cuda_sum {
    template <class W> CUDA_INLINE W apply(W x, W y) { return T::close(cuda_add(T::open(x), T::open(y))); }
};
template <class T> struct cuda_prod {
    template <class W> CUDA_INLINE W apply(W x, W y) { return T::close(cuda_multiply(T::open(x), T::open(y))); }
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

/* All bits of an element of x below that of y, -0 below +0; of equal ones it does not matter. */
template <class T> CUDA_INLINE uint32_t cuda_below(cuda_pack<T> x, cuda_pack<T> y) {
    uint32_t reaches = (x.bits | T::SIGNS) - (y.bits & ~T::SIGNS); /* highest bits: |x| >= |y| */
    return cuda_pick((x.bits & ~y.bits) | (~(x.bits ^ y.bits) & (reaches ^ ~x.bits)), 0, T::SPREAD);
}
template <class T> CUDA_INLINE cuda_pack<T> cuda_smaller(cuda_pack<T> x, cuda_pack<T> y) {
    uint32_t below = cuda_below(x, y), nan = cuda_pick(cuda_nans(x) | cuda_nans(y), 0, T::SPREAD);
    return cuda_pack<T>{(x.bits & below) | (y.bits & ~below) | nan};
}
template <class T> CUDA_INLINE cuda_pack<T> cuda_larger(cuda_pack<T> x, cuda_pack<T> y) {
    uint32_t below = cuda_below(x, y), nan = cuda_pick(cuda_nans(x) | cuda_nans(y), 0, T::SPREAD);
    return cuda_pack<T>{(y.bits & below) | (x.bits & ~below) | nan};
}

template <class T> struct cuda_min {
    template <class W> CUDA_INLINE W apply(W x, W y) { return T::close(cuda_smaller(T::open(x), T::open(y))); }
};
template <class T> struct cuda_max {
    template <class W> CUDA_INLINE W apply(W x, W y) { return T::close(cuda_larger(T::open(x), T::open(y))); }
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

/* Tiles of narrow floats are divided with two instructions by whole numbers up to 4096, and by such over 2^k (averages
 * of f16): x high + x low is x / n to 2^-45, which rounded to the type has the bits of a division. That was tried with
 * all values and all such divisors; by a million it is wrong for bf16. high is below 1 / n and low above 0, so that
 * infinite x stay so. */
struct cuda_inverse {
    float high, low;
};
CUDA_INLINE bool cuda_inverts(float n) { return n >= 0.5f && n <= 4096 && (__float_as_uint(n) & 0xfff) == 0; }
CUDA_INLINE cuda_inverse cuda_inverse_of(float n) {
    float high = __uint_as_float(__float_as_uint(__fdiv_rn(1, n)) - 1);
    return cuda_inverse{high, __fdiv_rn(__fmaf_rn(-high, n, 1), n)};
}
CUDA_INLINE float cuda_quotient(float x, double n) { return __fdiv_rn(x, (float)n); }
CUDA_INLINE float cuda_quotient(float x, cuda_inverse by) { return __fmaf_rn(x, by.high, __fmul_rn(x, by.low)); }

template <class T, uint32_t = T::SIGNS> CUDA_INLINE uint32_t cuda_scale(T t, uint32_t x, double factor) {
    auto f = cuda_unpack(T::open(x));
    for (float &v : f.value) {
        v = __fmul_rn(v, (float)factor);
    }
    return cuda_packed(t, f).bits;
}
template <class T, class N, uint32_t = T::SIGNS> CUDA_INLINE uint32_t cuda_divide(T t, uint32_t x, N by) {
    auto f = cuda_unpack(T::open(x));
    for (float &v : f.value) {
        v = cuda_quotient(v, by);
    }
    return cuda_packed(t, f).bits;
}

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

/* Every reduction kernel against plain scalar arithmetic written here: each type, op, instruction set, odd counts and
 * addresses, every aliasing that is allowed, special values; conversions of halves; reduce_many, scale and average.
 * tests/run: variants=gcc,asan,arm64 libs=-lm */
#include "test.h"

#include "random.h"

#define DDL_IMPLEMENTATION
#include "ddl.h"

#include <math.h>

enum { MAX_COUNT = 4097, GUARD = 64, ROOM = MAX_COUNT * 16 + 2 * GUARD + 16 };
static const size_t counts[] = {0, 1, 2, 7, 8, 9, 31, 32, 33, 63, 1000, MAX_COUNT};
enum { COUNTS = sizeof(counts) / sizeof(counts[0]) };

/* ---- the oracle: one element at a time, halves by arithmetic on doubles ---- */

typedef struct format {
    int mantissa, exponent;
    int finite; /* no infinity: the largest exponent has numbers, and one NaN (e4m3) */
} format;

static format format_of(ddl_dtype dtype) {
    format f16 = {10, 5, 0}, bf16 = {7, 8, 0}, e4m3 = {3, 4, 1}, e5m2 = {2, 5, 0};
    return dtype == DDL_F16 ? f16 : dtype == DDL_BF16 ? bf16 : dtype == DDL_E4M3 ? e4m3 : e5m2;
}

static float decode(uint16_t h, format f) {
    int bias = (1 << (f.exponent - 1)) - 1, sign = 1 << (f.mantissa + f.exponent), most = (1 << f.mantissa) - 1;
    int e = (h & (sign - 1)) >> f.mantissa, m = h & most;
    double v;
    if (e == (1 << f.exponent) - 1 && (!f.finite || m == most)) {
        v = m ? (double)NAN : (double)INFINITY;
    } else {
        v = ldexp(e ? m + (1 << f.mantissa) : m, (e ? e : 1) - bias - f.mantissa);
    }
    return (float)(h & sign ? -v : v);
}

static uint16_t encode(double v, format f) {
    int bias = (1 << (f.exponent - 1)) - 1, lowest = 1 - bias, e;
    unsigned top = 1u << (f.mantissa + f.exponent), sign = signbit(v) ? top : 0, nan = 2 * top - 1;
    unsigned infinity = f.finite ? nan : ((1u << f.exponent) - 1) << f.mantissa;
    if (isnan(v)) {
        return (uint16_t)nan;
    }
    if (isinf(v)) {
        return (uint16_t)(sign | infinity);
    }
    frexp(v, &e);
    e = e - 1 < lowest || v == 0 ? lowest : e - 1;
    unsigned q = (unsigned)nearbyint(ldexp(fabs(v), f.mantissa - e)), bits = ((unsigned)(e - lowest) << f.mantissa) + q;
    return (uint16_t)(f.finite && bits >= top - 1 ? nan : sign | (bits > infinity ? infinity : bits));
}

#define FLOAT_ORACLE(type)                                                                                             \
    static type oracle_##type(ddl_op op, type x, type y) {                                                             \
        if (isnan(x) || isnan(y)) {                                                                                    \
            return (type)NAN;                                                                                          \
        }                                                                                                              \
        if (x == 0 && y == 0 && (op == DDL_MIN || op == DDL_MAX)) {                                                    \
            int negative = op == DDL_MIN ? signbit(x) || signbit(y) : signbit(x) && signbit(y);                        \
            return negative ? (type)-0.0 : (type)0.0;                                                                  \
        }                                                                                                              \
        return op == DDL_MIN ? (x < y ? x : y) : op == DDL_MAX ? (x > y ? x : y) : op == DDL_PROD ? x * y : x + y;     \
    }
FLOAT_ORACLE(float)
FLOAT_ORACLE(double)

#define INTEGER_ORACLE(type)                                                                                           \
    static type oracle_##type(ddl_op op, type x, type y) {                                                             \
        uint64_t ux = (uint64_t)x, uy = (uint64_t)y;                                                                   \
        switch (op) {                                                                                                  \
        case DDL_PROD: return (type)(ux * uy);                                                                         \
        case DDL_MIN: return x < y ? x : y;                                                                            \
        case DDL_MAX: return x > y ? x : y;                                                                            \
        case DDL_BAND: return (type)(ux & uy);                                                                         \
        case DDL_BOR: return (type)(ux | uy);                                                                          \
        case DDL_BXOR: return (type)(ux ^ uy);                                                                         \
        case DDL_LAND: return x && y;                                                                                  \
        case DDL_LOR: return x || y;                                                                                   \
        case DDL_LXOR: return !x != !y;                                                                                \
        default: return (type)(ux + uy);                                                                               \
        }                                                                                                              \
    }
INTEGER_ORACLE(int8_t)
INTEGER_ORACLE(uint8_t)
INTEGER_ORACLE(int32_t)
INTEGER_ORACLE(uint32_t)
INTEGER_ORACLE(int64_t)
INTEGER_ORACLE(uint64_t)

static uint8_t oracle_bool(ddl_op op, int x, int y) {
    int both = op == DDL_PROD || op == DDL_MIN || op == DDL_BAND || op == DDL_LAND;
    int one = op == DDL_BXOR || op == DDL_LXOR;
    return (uint8_t)(both ? x && y : one ? !x != !y : x || y);
}

/* Whether pair (v, i) beats (w, j). Equal in both: the larger bits, which differ for zeros only. */
static int beats(ddl_op op, long double v, int64_t i, uint64_t vbits, long double w, int64_t j, uint64_t wbits) {
    if (isnan(v) != isnan(w)) {
        return isnan(v);
    }
    if (!isnan(v) && v != w) {
        return op == DDL_MIN_INDEX ? v < w : v > w;
    }
    return i != j ? i < j : vbits > wbits;
}

#define ORACLE_CASE(dtype, type)                                                                                       \
    case dtype: {                                                                                                      \
        type x, y;                                                                                                     \
        memcpy(&x, a, sizeof(x));                                                                                      \
        memcpy(&y, b, sizeof(y));                                                                                      \
        x = oracle_##type(op, x, y);                                                                                   \
        memcpy(d, &x, sizeof(x));                                                                                      \
        break;                                                                                                         \
    }
#define ORACLE_PAIR(dtype, type, word, index)                                                                          \
    case dtype: {                                                                                                      \
        type v, w;                                                                                                     \
        word vb, wb;                                                                                                   \
        index i, j;                                                                                                    \
        memcpy(&v, a, sizeof(v));                                                                                      \
        memcpy(&w, b, sizeof(w));                                                                                      \
        memcpy(&vb, a, sizeof(v));                                                                                     \
        memcpy(&wb, b, sizeof(w));                                                                                     \
        memcpy(&i, (const char *)a + sizeof(v), sizeof(i));                                                            \
        memcpy(&j, (const char *)b + sizeof(v), sizeof(j));                                                            \
        memmove(d, beats(op, (long double)v, i, vb, (long double)w, j, wb) ? a : b, 2 * sizeof(v));                    \
        break;                                                                                                         \
    }

/* Sets a NaN in d to the one with all bits set, which the kernels promise. */
static void canonical(ddl_dtype dtype, void *d) {
    float f;
    double g;
    memcpy(&f, d, dtype == DDL_F32 || dtype == DDL_F32_I32 ? 4 : 0);
    memcpy(&g, d, dtype == DDL_F64 || dtype == DDL_F64_I64 ? 8 : 0);
    if ((dtype == DDL_F32 || dtype == DDL_F32_I32) && isnan(f)) {
        memset(d, 255, 4);
    }
    if ((dtype == DDL_F64 || dtype == DDL_F64_I64) && isnan(g)) {
        memset(d, 255, 8);
    }
}

static uint16_t get_narrow(const void *p, size_t size) {
    uint8_t byte;
    uint16_t half;
    memcpy(&byte, p, 1);
    memcpy(&half, p, size);
    return size == 1 ? byte : half;
}

static void put_narrow(void *p, size_t size, uint16_t bits) {
    uint8_t byte = (uint8_t)bits;
    memcpy(p, size == 1 ? (void *)&byte : (void *)&bits, size);
}

static void oracle(ddl_dtype dtype, ddl_op op, void *d, const void *a, const void *b) {
    switch (dtype) {
        ORACLE_CASE(DDL_F32, float)
        ORACLE_CASE(DDL_F64, double)
        ORACLE_CASE(DDL_I8, int8_t)
        ORACLE_CASE(DDL_U8, uint8_t)
        ORACLE_CASE(DDL_I32, int32_t)
        ORACLE_CASE(DDL_U32, uint32_t)
        ORACLE_CASE(DDL_I64, int64_t)
        ORACLE_CASE(DDL_U64, uint64_t)
        ORACLE_PAIR(DDL_F32_I32, float, uint32_t, int32_t)
        ORACLE_PAIR(DDL_F64_I64, double, uint64_t, int64_t)
        ORACLE_PAIR(DDL_I32_I32, int32_t, uint32_t, int32_t)
        ORACLE_PAIR(DDL_I64_I64, int64_t, uint64_t, int64_t)
    case DDL_BOOL:
        *(uint8_t *)d = oracle_bool(op, *(const uint8_t *)a, *(const uint8_t *)b);
        break;
    default: {
        format f = format_of(dtype);
        size_t size = ddl__dtype_bytes(dtype);
        uint16_t x = get_narrow(a, size), y = get_narrow(b, size);
        put_narrow(d, size, encode((double)oracle_float(op, decode(x, f), decode(y, f)), f));
    }
    }
    canonical(dtype, d);
}

/* ---- inputs ---- */

static const uint32_t special32[] = {0,          0x80000000, 1,          0x80000001, 0x7f800000, 0xff800000, 0x7fc00000,
                                     0xffc00001, 0x7f800001, 0xffffffff, 0x7f7fffff, 0x00800000, 0x3f800000, 0xbf800000,
                                     0x33000000, 0x477fe000, 0x477ff000, 0x38800000, 0x387fffff, 0x7fffffff};
static const uint16_t special16[] = {0,      0x8000, 1,      0x8001, 0x7c00, 0xfc00, 0x7e00, 0x7c01, 0xfe01, 0xffff,
                                     0x7bff, 0x0400, 0x03ff, 0x3c00, 0x7f80, 0xff80, 0x7fc0, 0x7f81, 0x7f7f, 0x0080};
#define PICK(table) (table)[random_bits() % (sizeof(table) / sizeof((table)[0]))]

static float random_float(void) {
    uint32_t bits = (uint32_t)random_bits();
    float f;
    switch (random_bits() % 3) {
    case 0: bits = PICK(special32); break;
    case 1: return (float)(int)(bits % 2001) / 8 - 125;
    default: break;
    }
    memcpy(&f, &bits, 4);
    return f;
}

static double random_double(void) {
    uint64_t bits = random_bits();
    double g;
    if (bits & 1) {
        return (double)random_float();
    }
    bits = random_bits();
    memcpy(&g, &bits, 8);
    return g;
}

/* Small integers often, so that ties, zeros and equal indices happen. */
static int64_t random_integer(void) {
    uint64_t bits = random_bits();
    return bits & 1 ? (int64_t)(bits >> 1 & 7) - 3 : (int64_t)random_bits();
}

static void random_element(ddl_dtype dtype, char *p) {
    float f = random_float();
    double g = random_double();
    int64_t i = random_integer(), k = random_integer();
    int32_t i32 = (int32_t)i, k32 = (int32_t)k;
    uint16_t h = random_bits() & 1 ? PICK(special16) : (uint16_t)random_bits();
    switch (dtype) {
    case DDL_F16:
    case DDL_BF16: memcpy(p, &h, 2); break;
    case DDL_F32: memcpy(p, &f, 4); break;
    case DDL_F64: memcpy(p, &g, 8); break;
    case DDL_F32_I32: memcpy(p, &f, 4); memcpy(p + 4, &k32, 4); break;
    case DDL_F64_I64: memcpy(p, &g, 8); memcpy(p + 8, &k, 8); break;
    case DDL_I32_I32: memcpy(p, &i32, 4); memcpy(p + 4, &k32, 4); break;
    case DDL_I64_I64: memcpy(p, &i, 8); memcpy(p + 8, &k, 8); break;
    case DDL_I64:
    case DDL_U64: memcpy(p, &i, 8); break;
    case DDL_I32:
    case DDL_U32: memcpy(p, &i32, 4); break;
    case DDL_E4M3:
    case DDL_E5M2: *p = (char)h; break;
    default: *p = (char)i; break;
    }
}

static void random_array(ddl_dtype dtype, char *p, size_t count) {
    for (size_t i = 0; i < count; i++) {
        random_element(dtype, p + i * ddl__dtype_bytes(dtype));
    }
}

/* ---- kernels ---- */

static char room_d[ROOM], room_a[ROOM], room_b[ROOM], keep_a[ROOM], keep_b[ROOM], want[ROOM];

typedef enum alias { NO_ALIAS, DST_IS_A, DST_IS_B } alias;

/* Runs one kernel on copies of keep_a and keep_b at an odd or even address; says whether dst holds what `want` says
 * and nothing around it changed. */
static int kernel_is_right(ddl__reduce_fn kernel, size_t bytes, size_t count, size_t offset, alias how) {
    char *a = room_a + GUARD + offset, *b = room_b + GUARD + 2 * offset;
    char *d = how == DST_IS_A ? a : how == DST_IS_B ? b : room_d + GUARD + offset;
    memset(room_d, 0xa5, ROOM);
    memset(room_a, 0xa5, ROOM);
    memset(room_b, 0xa5, ROOM);
    memcpy(a, keep_a, bytes);
    memcpy(b, keep_b, bytes);
    kernel(d, a, b, count);
    int right = memcmp(d, want, bytes) == 0;
    for (int i = 0; i < GUARD - 16; i++) {
        right = right && d[-1 - i] == (char)0xa5 && d[bytes + (size_t)i] == (char)0xa5;
    }
    return right && (how == DST_IS_A || memcmp(a, keep_a, bytes) == 0) &&
           (how == DST_IS_B || memcmp(b, keep_b, bytes) == 0);
}

static void check_kernel(ddl__cpu level, ddl_dtype dtype, ddl_op op) {
    ddl__reduce_fn kernel = ddl__reduce_kernel_at(level, dtype, op);
    size_t size = ddl__dtype_bytes(dtype);
    REQUIRE(kernel != NULL);
    for (int c = 0; c < COUNTS; c++) {
        size_t count = counts[c], bytes = count * size;
        random_array(dtype, keep_a, count);
        random_array(dtype, keep_b, count);
        for (size_t i = 0; i < count; i++) {
            oracle(dtype, op, want + i * size, keep_a + i * size, keep_b + i * size);
        }
        for (size_t offset = 0; offset < 2; offset++) {
            for (alias how = NO_ALIAS; how <= DST_IS_B; how++) {
                if (!kernel_is_right(kernel, bytes, count, offset, how)) {
                    test__fail(__FILE__, __LINE__, "level %d %s %s: count %zu offset %zu alias %d", level,
                               ddl__dtype_name(dtype), ddl__op_name(op), count, offset, how);
                    return;
                }
            }
        }
        memset(room_d, 0xa5, ROOM);
        kernel(room_d, keep_b, keep_a, count);
        if (memcmp(room_d, want, bytes) != 0) {
            test__fail(__FILE__, __LINE__, "level %d %s %s depends on the order of operands", level,
                       ddl__dtype_name(dtype), ddl__op_name(op));
        }
    }
}

static int check_level(ddl__cpu level) {
    int kernels = 0;
    for (ddl_dtype dtype = DDL_F16; dtype < DDL__DTYPES; dtype++) {
        for (ddl_op op = DDL_SUM; op < DDL__OPS; op++) {
            if (ddl__op_valid(op, dtype)) {
                check_kernel(level, dtype, op);
                kernels++;
            }
        }
    }
    return kernels;
}

TEST(portable_kernels_equal_plain_loops) {
    CHECK_EQ(check_level(DDL__CPU_PORTABLE), 6 * 5 + 6 * 11 + 10 + 4 * 2);
}

TEST(avx2_kernels_equal_plain_loops) {
    if (ddl__cpu_level() < DDL__CPU_AVX2) {
        SKIP("this processor has no AVX2 with F16C");
    }
    CHECK_EQ(check_level(DDL__CPU_AVX2), 6 * 5 + 6 * 11 + 10 + 4 * 2);
}

TEST(avx512_kernels_equal_plain_loops) {
    if (ddl__cpu_level() < DDL__CPU_AVX512) {
        SKIP("this processor has no AVX-512 with BF16");
    }
    CHECK_EQ(check_level(DDL__CPU_AVX512), 6 * 5 + 6 * 11 + 10 + 4 * 2);
}

/* A finite value whose exponent is far from both ends, so that no sum of two is subnormal; now and then the greatest
 * one, whose sum is infinite. */
static void ordinary_element(ddl_dtype dtype, char *p) {
    uint64_t bits = random_bits();
    uint32_t sign = (uint32_t)bits & 0x80000000, exponent = 120 + (uint32_t)(bits >> 40) % 16;
    uint32_t word = sign | exponent << 23 | ((uint32_t)(bits >> 8) & 0x7fffff);
    uint16_t half = (uint16_t)(word >> 16);
    float f;
    memcpy(&f, &word, 4);
    double g = (double)f;
    if (dtype == DDL_F16) {
        half = (uint16_t)(sign >> 16 | (exponent - 112) << 10 | (word & 0x3ff));
    } else if (dtype == DDL_BF16 && bits % 256 == 0) {
        half = (uint16_t)(0x7f7f | sign >> 16);
    }
    memcpy(p, dtype == DDL_F64 ? (void *)&g : dtype == DDL_F32 ? (void *)&f : (void *)&half, ddl__dtype_bytes(dtype));
}

/* The inputs above are so special that a level with a quick way for ordinary vectors would hardly ever go it. Here half
 * of the arrays are wholly ordinary, and the others hold one special element. */
static void check_ordinary(ddl__cpu level, ddl_dtype dtype, ddl_op op) {
    size_t size = ddl__dtype_bytes(dtype);
    for (size_t round = 0; round < 400; round++) {
        size_t count = 1 + random_bits() % 300;
        for (size_t i = 0; i < count; i++) {
            ordinary_element(dtype, keep_a + i * size);
            ordinary_element(dtype, keep_b + i * size);
        }
        if (round % 2 == 1) {
            random_element(dtype, keep_a + random_bits() % count * size);
        }
        for (size_t i = 0; i < count; i++) {
            oracle(dtype, op, want + i * size, keep_a + i * size, keep_b + i * size);
        }
        ddl__reduce_kernel_at(level, dtype, op)(room_d, keep_a, keep_b, count);
        CHECK(memcmp(room_d, want, count * size) == 0);
    }
}

TEST(ordinary_vectors_are_reduced_like_special_ones) {
    for (ddl__cpu level = DDL__CPU_PORTABLE; level <= ddl__cpu_level(); level++) {
        for (ddl_dtype dtype = DDL_F16; dtype <= DDL_F64; dtype++) {
            for (ddl_op op = DDL_SUM; op <= DDL_MAX; op++) {
                check_ordinary(level, dtype, op);
            }
        }
    }
}

/* All are compared with the oracle above; this compares them with each other on other inputs, raw bits included. */
TEST(every_level_gives_the_same_bits) {
    ddl__cpu best = ddl__cpu_level();
    if (best == DDL__CPU_PORTABLE) {
        SKIP("this processor has the portable level only");
    }
    for (ddl_dtype dtype = DDL_F16; dtype < DDL__DTYPES; dtype++) {
        size_t count = 4000, bytes = count * ddl__dtype_bytes(dtype);
        for (ddl_op op = DDL_SUM; op < DDL__OPS; op++) {
            if (!ddl__op_valid(op, dtype)) {
                continue;
            }
            for (size_t i = 0; i < bytes; i++) {
                keep_a[i] = (char)random_bits();
                keep_b[i] = (char)random_bits();
            }
            memset(want, 0, bytes);
            ddl__reduce_kernel_at(DDL__CPU_PORTABLE, dtype, op)(want, keep_a, keep_b, count);
            for (ddl__cpu level = DDL__CPU_AVX2; level <= best; level++) {
                memset(room_d, 1, bytes);
                ddl__reduce_kernel_at(level, dtype, op)(room_d, keep_a, keep_b, count);
                CHECK(memcmp(want, room_d, bytes) == 0);
            }
        }
    }
}

TEST(kernels_exist_exactly_where_the_op_is_defined) {
    static const char *const rows[DDL__DTYPES] = {
        "", "spmxa", "spmxa", "spmxa", "spmxa", "spmxaAOXaoX", "spmxaAOXaoX", "spmxaAOXaoX", "spmxaAOXaoX",
        "spmxaAOXaoX", "spmxaAOXaoX", "spmx AOXaoX", "            ix", "            ix", "            ix",
        "            ix", "spmxa", "spmxa"};
    for (int dtype = -2; dtype < 20; dtype++) {
        for (ddl_op op = -2; op < 300; op++) {
            const char *row = dtype > 0 && dtype < DDL__DTYPES ? rows[dtype] : "";
            int pair = row[0] == ' ';
            int expected = pair ? op == DDL_MIN_INDEX || op == DDL_MAX_INDEX
                                : op >= 1 && op <= (int)strlen(row) && row[op - 1] != ' ';
            CHECK_EQ(ddl__op_valid(op, (ddl_dtype)dtype) != 0, expected);
            CHECK_EQ(ddl__reduce_kernel((ddl_dtype)dtype, op) != NULL, expected);
        }
    }
    CHECK(ddl__reduce_kernel_at(DDL__CPU_LEVELS, DDL_F32, DDL_SUM) == NULL);
    CHECK(ddl__reduce_kernel(DDL_F16, DDL_AVG) == ddl__reduce_kernel(DDL_F16, DDL_SUM));
}

TEST(names_and_sizes) {
    static const char *const names[DDL__DTYPES] = {"?", "f16", "bf16", "f32", "f64", "i8", "u8", "i32", "u32", "i64",
                                                   "u64", "bool", "f32_i32", "f64_i64", "i32_i32", "i64_i64", "e4m3",
                                                   "e5m2"};
    static const size_t sizes[DDL__DTYPES] = {0, 2, 2, 4, 8, 1, 1, 4, 4, 8, 8, 1, 8, 16, 8, 16, 1, 1};
    for (int dtype = 0; dtype < DDL__DTYPES; dtype++) {
        CHECK_EQ(ddl__dtype_name((ddl_dtype)dtype), names[dtype]);
        CHECK_EQ(ddl__dtype_bytes((ddl_dtype)dtype), sizes[dtype]);
    }
    CHECK_EQ(ddl__dtype_name((ddl_dtype)99), "?");
    CHECK_EQ(ddl__dtype_bytes((ddl_dtype)-1), 0);
    CHECK_EQ(ddl__op_name(DDL_SUM), "sum");
    CHECK_EQ(ddl__op_name(DDL_MAX_INDEX), "max_index");
    CHECK_EQ(ddl__op_name(256), "created");
    CHECK_EQ(ddl__op_name(14), "?");
    CHECK_EQ(ddl__op_name(-1), "?");
}

/* ---- special values, spelled out ---- */

static uint32_t f32_bits(ddl_op op, uint32_t a, uint32_t b) {
    uint32_t d = 0x55555555;
    ddl__reduce_kernel(DDL_F32, op)(&d, &a, &b, 1);
    return d;
}

TEST(zeros_are_ordered_and_nan_wins) {
    const uint32_t minus = 0x80000000, plus = 0, one = 0x3f800000, nan = 0x7fc00001, all = 0xffffffff, inf = 0x7f800000;
    CHECK_EQ(f32_bits(DDL_MIN, minus, plus), minus);
    CHECK_EQ(f32_bits(DDL_MIN, plus, minus), minus);
    CHECK_EQ(f32_bits(DDL_MAX, minus, plus), plus);
    CHECK_EQ(f32_bits(DDL_MAX, plus, minus), plus);
    for (ddl_op op = DDL_SUM; op <= DDL_MAX; op++) {
        CHECK_EQ(f32_bits(op, nan, one), all);
        CHECK_EQ(f32_bits(op, one, nan), all);
        CHECK_EQ(f32_bits(op, nan, 0x7f800001), all);
    }
    CHECK_EQ(f32_bits(DDL_SUM, inf, inf | minus), all);
    CHECK_EQ(f32_bits(DDL_PROD, inf, plus), all);
    CHECK_EQ(f32_bits(DDL_MAX, inf, one), inf);
}

TEST(index_ops_keep_the_smaller_index_of_equals) {
    typedef struct pair {
        float value;
        int32_t index;
    } pair;
    pair a[] = {{1, 5}, {2, 1}, {NAN, 9}, {NAN, 3}, {-0.0f, 4}, {7, -1}};
    pair b[] = {{1, 3}, {1, 2}, {-9, 0}, {NAN, 2}, {0.0f, 3}, {7, 0}}, d[6];
    static const int32_t least[] = {3, 2, 9, 2, 3, -1}, most[] = {3, 1, 9, 2, 3, -1};
    ddl__reduce_kernel(DDL_F32_I32, DDL_MIN_INDEX)(d, a, b, 6);
    for (int i = 0; i < 6; i++) {
        CHECK_EQ(d[i].index, least[i]);
    }
    CHECK(isnan(d[2].value) && isnan(d[3].value));
    ddl__reduce_kernel(DDL_F32_I32, DDL_MAX_INDEX)(d, b, a, 6);
    for (int i = 0; i < 6; i++) {
        CHECK_EQ(d[i].index, most[i]);
    }
}

/* ---- halves ---- */

static void check_widen(ddl_dtype dtype) {
    static uint16_t halves[65536];
    static float wide[65536];
    for (unsigned h = 0; h < 65536; h++) {
        halves[h] = (uint16_t)h;
    }
    for (ddl__cpu level = DDL__CPU_PORTABLE; level <= ddl__cpu_level(); level++) {
        memset(wide, 0xa5, sizeof(wide));
        ddl__widen_at(level, dtype)(wide, halves, 65535); /* odd, for the tail; the last is a NaN */
        for (unsigned h = 0; h < 65535; h++) {
            float expected = decode((uint16_t)h, format_of(dtype));
            float single = dtype == DDL_F16 ? ddl__f16_to_f32((uint16_t)h) : ddl__bf16_to_f32((uint16_t)h);
            canonical(DDL_F32, &expected);
            CHECK(memcmp(&wide[h], &expected, 4) == 0 && memcmp(&single, &expected, 4) == 0);
        }
    }
}

/* Every half, the points between neighbours and just beside them, and a walk through all of f32. */
static void check_narrow(ddl_dtype dtype) {
    enum { STEPS = 1 << 20, ALL = 4 * 65536 + STEPS + 3 };
    static float wide[ALL];
    static uint16_t halves[ALL];
    size_t n = 0;
    for (unsigned h = 0; h < 65536; h++) {
        float low = decode((uint16_t)h, format_of(dtype)), high = decode((uint16_t)(h + 1), format_of(dtype));
        float middle = (float)(((double)low + (double)high) / 2);
        wide[n++] = low;
        wide[n++] = middle;
        wide[n++] = nextafterf(middle, INFINITY);
        wide[n++] = nextafterf(middle, -INFINITY);
    }
    for (uint32_t i = 0, bits = 12345; i < STEPS; i++, bits += 4099 * 3) {
        memcpy(&wide[n++], &bits, 4);
    }
    for (ddl__cpu level = DDL__CPU_PORTABLE; level <= ddl__cpu_level(); level++) {
        size_t wrong = 0;
        memset(halves, 0xa5, sizeof(halves));
        ddl__narrow_at(level, dtype)(halves, wide, n);
        for (size_t i = 0; i < n; i++) {
            uint16_t expected = encode((double)wide[i], format_of(dtype));
            uint16_t single = dtype == DDL_F16 ? ddl__f16_from_f32(wide[i]) : ddl__bf16_from_f32(wide[i]);
            wrong += halves[i] != expected || single != expected;
        }
        CHECK_EQ(wrong, 0);
    }
}

TEST(f16_converts_as_ieee_says) {
    CHECK_EQ(ddl__f16_from_f32(65519.0f), 0x7bff);
    CHECK_EQ(ddl__f16_from_f32(65520.0f), 0x7c00);
    CHECK_EQ(ddl__f16_from_f32(0x1p-24f), 1);
    CHECK_EQ(ddl__f16_from_f32(0x1p-25f), 0);
    CHECK_EQ(ddl__f16_from_f32(-0.0f), 0x8000);
    check_widen(DDL_F16);
    check_narrow(DDL_F16);
}

TEST(bf16_converts_to_nearest_even) {
    CHECK_EQ(ddl__bf16_from_f32(1.0f), 0x3f80);
    CHECK_EQ(ddl__bf16_from_f32(0x1.01p0f), 0x3f80);
    CHECK_EQ(ddl__bf16_from_f32(0x1.03p0f), 0x3f82);
    CHECK_EQ(ddl__bf16_from_f32(0x1.fffffep127f), 0x7f80);
    check_widen(DDL_BF16);
    check_narrow(DDL_BF16);
}

/* ---- floats of 8 bits: the tables of OFP8 1.0, every value, every pair ---- */

TEST(byte_floats_are_those_of_the_specification) {
    static const struct {
        uint8_t bits;
        float e4m3, e5m2;
    } rows[] = {{0x00, 0, 0}, {0x01, 0x1p-9f, 0x1p-16f}, {0x03, 0x3p-9f, 0x3p-16f}, {0x07, 0x7p-9f, 0x1.cp-14f},
                {0x08, 0x1p-6f, 0x1p-13f}, {0x38, 1, 0.5f}, {0x3c, 1.5f, 1}, {0x7b, 352, 57344}, {0x7e, 448, NAN},
                {0x7c, 384, INFINITY}, {0x7f, NAN, NAN}, {0x80, -0.0f, -0.0f}, {0xfe, -448, NAN},
                {0xfc, -384, -INFINITY}, {0x81, -0x1p-9f, -0x1p-16f}, {0xff, NAN, NAN}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        float a = ddl__e4m3_to_f32(rows[i].bits), b = ddl__e5m2_to_f32(rows[i].bits);
        CHECK(isnan(rows[i].e4m3) ? isnan(a) : a == rows[i].e4m3 && signbit(a) == signbit(rows[i].e4m3));
        CHECK(isnan(rows[i].e5m2) ? isnan(b) : b == rows[i].e5m2 && signbit(b) == signbit(rows[i].e5m2));
    }
    CHECK_EQ(ddl__e4m3_from_f32(464.0f), 0x7e); /* half-way: the even one is the largest */
    CHECK_EQ(ddl__e4m3_from_f32(nextafterf(464.0f, 500.0f)), 0xff);
    CHECK_EQ(ddl__e4m3_from_f32(-INFINITY), 0xff);
    CHECK_EQ(ddl__e4m3_from_f32(-448.0f), 0xfe);
    CHECK_EQ(ddl__e4m3_from_f32(0x1p-10f), 0);
    CHECK_EQ(ddl__e4m3_from_f32(-0x1p-10f), 0x80);
    CHECK_EQ(ddl__e4m3_from_f32(0x1.8p-9f), 2);
    CHECK_EQ(ddl__e5m2_from_f32(nextafterf(61440.0f, 0.0f)), 0x7b);
    CHECK_EQ(ddl__e5m2_from_f32(61440.0f), 0x7c);
    CHECK_EQ(ddl__e5m2_from_f32(-1e30f), 0xfc);
    CHECK_EQ(ddl__e5m2_from_f32(NAN), 0xff);
    CHECK_EQ(ddl__e5m2_from_f32(0x1p-17f), 0);
}

/* Neighbours, the points between them and beside those, and a walk through all of f32. */
static void check_bytes(ddl_dtype dtype) {
    enum { STEPS = 1 << 18, ALL = 4 * 256 + STEPS + 3 };
    static float wide[ALL], back[257];
    static uint8_t bytes[ALL], every[257];
    size_t n = 0;
    for (unsigned h = 0; h < 256; h++) {
        float low = decode((uint16_t)h, format_of(dtype)), high = decode((uint16_t)((h + 1) % 256), format_of(dtype));
        float middle = (float)(((double)low + (double)high) / 2);
        wide[n++] = low;
        wide[n++] = middle;
        wide[n++] = nextafterf(middle, INFINITY);
        wide[n++] = nextafterf(middle, -INFINITY);
        every[h] = (uint8_t)h;
    }
    for (uint32_t i = 0, bits = 12345; i < STEPS; i++, bits += 4099 * 11) {
        memcpy(&wide[n++], &bits, 4);
    }
    for (ddl__cpu level = DDL__CPU_PORTABLE; level <= ddl__cpu_level(); level++) {
        size_t wrong = 0;
        memset(bytes, 0xa5, sizeof(bytes));
        ddl__narrow_at(level, dtype)(bytes, wide, n);
        for (size_t i = 0; i < n; i++) {
            uint8_t single = dtype == DDL_E4M3 ? ddl__e4m3_from_f32(wide[i]) : ddl__e5m2_from_f32(wide[i]);
            wrong += bytes[i] != (uint8_t)encode((double)wide[i], format_of(dtype)) || single != bytes[i];
        }
        ddl__widen_at(level, dtype)(back, every, 257); /* odd, for the tail */
        for (unsigned h = 0; h < 256; h++) {
            float expected = decode((uint16_t)h, format_of(dtype));
            canonical(DDL_F32, &expected);
            wrong += memcmp(&back[h], &expected, 4) != 0;
        }
        CHECK_EQ(wrong, 0);
    }
}

/* All 65536 pairs of each op. */
static void check_byte_pairs(ddl_dtype dtype) {
    static uint8_t a[65536], b[65536], got[65536];
    for (unsigned i = 0; i < 65536; i++) {
        a[i] = (uint8_t)i;
        b[i] = (uint8_t)(i >> 8);
    }
    for (ddl_op op = DDL_SUM; op <= DDL_MAX; op++) {
        for (ddl__cpu level = DDL__CPU_PORTABLE; level <= ddl__cpu_level(); level++) {
            size_t wrong = 0;
            memset(got, 0xa5, sizeof(got));
            ddl__reduce_kernel_at(level, dtype, op)(got, a, b, 65536);
            for (unsigned i = 0; i < 65536; i++) {
                uint8_t expected;
                oracle(dtype, op, &expected, &a[i], &b[i]);
                wrong += got[i] != expected;
            }
            CHECK_EQ(wrong, 0);
        }
    }
}

TEST(every_byte_float_converts_and_every_pair_reduces) {
    check_bytes(DDL_E4M3);
    check_bytes(DDL_E5M2);
    check_byte_pairs(DDL_E4M3);
    check_byte_pairs(DDL_E5M2);
}

TEST(flush_to_zero_modes_do_not_change_f16) {
#if defined(__x86_64__)
    unsigned modes = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(modes | 0x8040);
    uint32_t wrong = 0;
    for (unsigned h = 0; h < 0x7c00; h++) {
        float f = ddl__f16_to_f32((uint16_t)h);
        wrong += ddl__f16_from_f32(f) != h || (h != 0 && !(f > 0));
    }
    __builtin_ia32_ldmxcsr(modes);
    CHECK_EQ(wrong, 0);
#else
    SKIP("this test knows the control register of x86-64 only");
#endif
}

/* ---- many buffers ---- */

enum { MANY = 9 };
static char many[MANY][ROOM];

static void fold(void *dst, const void *const *srcs, int n, size_t bytes, ddl_dtype dtype, ddl_op op) {
    ddl__reduction r = ddl__reduction_of(op, dtype, NULL);
    ddl__reduce_many(&r, dst, (const char *const *)srcs, n, bytes);
}

/* Folds n buffers one after the other with the plain loop of two operands. */
static void check_many(ddl_dtype dtype, ddl_op op, int n, size_t count, int into) {
    const void *srcs[MANY];
    size_t size = ddl__dtype_bytes(dtype), bytes = count * size;
    memset(room_d, 0xa5, ROOM);
    for (int k = 0; k < n; k++) {
        srcs[k] = many[k];
        random_array(dtype, many[k], count);
    }
    memcpy(want, many[0], bytes);
    for (size_t i = 0; i < (size_t)(n - 1) * count; i++) {
        size_t k = 1 + i / count, at = i % count * size;
        oracle(dtype, op, want + at, want + at, many[k] + at);
    }
    char *d = into < 0 ? room_d + 1 : many[into];
    fold(d, srcs, n, bytes, dtype, op);
    if (memcmp(d, want, bytes) != 0 || (into < 0 && (room_d[0] != (char)0xa5 || room_d[1 + bytes] != (char)0xa5))) {
        test__fail(__FILE__, __LINE__, "%s %s of %d buffers, count %zu, into %d", ddl__dtype_name(dtype),
                   ddl__op_name(op), n, count, into);
    }
}

TEST(reduce_many_folds_in_order) {
    for (ddl_dtype dtype = DDL_F16; dtype < DDL__DTYPES; dtype++) {
        for (ddl_op op = DDL_SUM; op < DDL__OPS; op++) {
            for (int n = 1; n <= MANY && ddl__op_valid(op, dtype); n += 1 + n / 3) {
                check_many(dtype, op, n, 0, -1);
                check_many(dtype, op, n, 1, -1);
                check_many(dtype, op, n, 37, n - 1);
                check_many(dtype, op, n, 1030, -1);
                check_many(dtype, op, n, 1030, 0);
                check_many(dtype, op, n, 4097, n / 2);
            }
        }
    }
}

TEST(reduce_many_rounds_halves_at_each_step) {
    /* 2048 + 1 is 2048 in f16: a sum kept in f32 until the end would be 2052, and depend on the algorithm. */
    uint16_t big = ddl__f16_from_f32(2048), one = ddl__f16_from_f32(1), d = 0;
    const void *srcs[] = {&big, &one, &one, &one, &one};
    fold(&d, srcs, 5, 2, DDL_F16, DDL_SUM);
    CHECK_EQ(ddl__f16_to_f32(d), 2048.0f);
}

/* ---- scale and average ---- */

static void check_float_factor(ddl_dtype dtype, size_t count, double factor, int n) {
    size_t size = ddl__dtype_bytes(dtype);
    random_array(dtype, keep_a, count);
    memset(room_d, 0xa5, ROOM);
    memcpy(room_a, keep_a, count * size);
    ddl__scale(room_d + 1, keep_a, count, dtype, factor);
    ddl__average(room_a, count, dtype, n);
    for (size_t i = 0; i < count; i++) {
        char *p = keep_a + i * size, *scaled = want, *divided = want + 16;
        float f = 0;
        double g = 0;
        if (dtype == DDL_F64) {
            memcpy(&g, p, 8);
            memcpy(scaled, &(double){g * factor}, 8);
            memcpy(divided, &(double){g / n}, 8);
        } else if (dtype == DDL_F32) {
            memcpy(&f, p, 4);
            memcpy(scaled, &(float){f * (float)factor}, 4);
            memcpy(divided, &(float){f / (float)n}, 4);
        } else {
            /* Through a float each time: a compiler may keep a plain expression in more precision. */
            f = decode(get_narrow(p, size), format_of(dtype));
            float product = f * (float)factor, quotient = f / (float)n;
            put_narrow(scaled, size, encode((double)product, format_of(dtype)));
            put_narrow(divided, size, encode((double)quotient, format_of(dtype)));
        }
        canonical(dtype, scaled);
        canonical(dtype, divided);
        CHECK(memcmp(room_d + 1 + i * size, scaled, size) == 0);
        CHECK(memcmp(room_a + i * size, divided, size) == 0);
    }
    CHECK(room_d[0] == (char)0xa5 && room_d[1 + count * size] == (char)0xa5);
}

TEST(floats_scale_and_average) {
    for (ddl_dtype dtype = DDL_F16; dtype < DDL__DTYPES; dtype++) {
        for (int c = 0; c < COUNTS && ddl__dtype_is_float(dtype); c++) {
            check_float_factor(dtype, counts[c], 0.3, 3);
            check_float_factor(dtype, counts[c], -8, 64);
        }
    }
}

TEST(average_of_equal_values_is_that_value) {
    for (int n = 1; n < 1000; n++) {
        float x = 7;
        float sum = x * (float)n;
        ddl__average(&sum, 1, DDL_F32, n);
        CHECK_EQ(sum, x);
    }
}

TEST(integers_average_toward_zero) {
    int8_t a[] = {-7, 7, -128, 127, 0};
    uint8_t b[] = {255, 7, 128};
    int64_t c[] = {INT64_MIN, -5};
    uint64_t d[] = {UINT64_MAX};
    _Bool flag = 1;
    ddl__average(a, 5, DDL_I8, 2);
    ddl__average(b, 3, DDL_U8, 300);
    ddl__average(c, 2, DDL_I64, 3);
    ddl__average(d, 1, DDL_U64, 2);
    ddl__average(&flag, 1, DDL_BOOL, 2);
    CHECK(a[0] == -3 && a[1] == 3 && a[2] == -64 && a[3] == 63 && a[4] == 0);
    CHECK(b[0] == 0 && b[1] == 0 && b[2] == 0);
    CHECK(c[0] == INT64_MIN / 3 && c[1] == -1);
    CHECK(d[0] == UINT64_MAX / 2 && flag == 1);
    for (int i = 0; i < 3; i++) {
        a[0] = -100;
        ddl__average(a, 1, DDL_I8, i - 1); /* -1, 0 and 1 leave it alone */
        CHECK_EQ(a[0], -100);
    }
}

TEST(integers_scale_exactly_or_saturate) {
    int64_t big = (INT64_C(1) << 60) + 1, got64 = 0;
    int8_t a[] = {100, -100, 3, -3}, got[4] = {0};
    uint32_t u[] = {4000000000u, 3}, gotu[2] = {0};
    ddl__scale(&got64, &big, 1, DDL_I64, 3);
    CHECK_EQ(got64, 3 * big);
    ddl__scale(got, a, 4, DDL_I8, 1.5);
    CHECK(got[0] == 127 && got[1] == -128 && got[2] == 4 && got[3] == -4);
    ddl__scale(got, a, 4, DDL_I8, 2);
    CHECK(got[0] == -56 && got[1] == 56 && got[2] == 6 && got[3] == -6);
    ddl__scale(got, a, 4, DDL_I8, (double)NAN);
    CHECK(got[0] == 0 && got[3] == 0);
    ddl__scale(gotu, u, 2, DDL_U32, 1.5);
    CHECK(gotu[0] == UINT32_MAX && gotu[1] == 4);
    ddl__scale(gotu, u, 2, DDL_U32, -0.5);
    CHECK(gotu[0] == 0 && gotu[1] == 0);
    ddl__scale(&got64, &big, 1, DDL_I64, 1e300);
    CHECK_EQ(got64, INT64_MAX);
}

/* The kernels of plugins/cuda on a CPU (cuda_cpu.cc) against the host's own, bit by bit: every type and op, numbers of
 * sources and destinations, odd counts and addresses, in place; factors and averages, exchanges, strided tensors,
 * optimizers, sums of squares, every code. Built and run by test_cuda_kernels.py. It proves their logic, not a GPU. */
#include "test.h"

#include "random.h"

#define DDL_IMPLEMENTATION
#include "ddl.h"

#include "../plugins/cuda/choose.h"

#include <math.h>

int cuda_cpu_find(const char *name);
size_t cuda_cpu_args_bytes(int kernel);
int cuda_cpu_run(int kernel, const unsigned grid[3], const unsigned block[3], void *const *args);

static const char *const kernel_names[] = {
#define KERNEL_NAME(name, args) "ddl_k_" #name,
    CUDA_KERNELS(KERNEL_NAME)};
static const size_t kernel_bytes[] = {
#define KERNEL_BYTES(name, args) sizeof(args),
    CUDA_KERNELS(KERNEL_BYTES)};
static int32_t launches[CUDA_K_COUNT];

/* Arguments are copied to memory of their own size, so that reading beyond them is seen. */
static ddl_status put(const cuda_sink *sink, cuda_kernel kernel, uint32_t blocks, uint32_t rows, const void *args) {
    const unsigned grid[3] = {blocks, rows, 1}, block[3] = {CUDA_THREADS, 1, 1};
    int number = cuda_cpu_find(kernel_names[kernel]);
    void *copy = malloc(kernel_bytes[kernel]);
    (void)sink;
    if (number < 0 || copy == NULL || cuda_cpu_args_bytes(number) != kernel_bytes[kernel]) {
        free(copy);
        return DDL_ERR_INTERNAL;
    }
    memcpy(copy, args, kernel_bytes[kernel]);
    int result = cuda_cpu_run(number, grid, block, &copy);
    free(copy);
    launches[kernel]++;
    return result == 0 ? DDL_OK : DDL_ERR_INTERNAL;
}
static const cuda_sink sink = {.put = put, .multiprocessors = 2};

/* Bits of all kinds: small numbers, which repeat and add exactly, special values, anything. */
static void randomize(void *data, size_t bytes) {
    static const uint32_t special[] = {0,          0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00001, 1,
                                       0x7f800001, 0x7f7fffff, 0x00800000, 0x3f800000, 0x7c00fc00, 0x80000001,
                                       0x7e017e00, 0x7ff00000, 0xfff00000, 0x7ff80001, 0x38004000, 0x01000100,
                                       0x00010000};
    for (size_t i = 0; i < bytes; i += 4) {
        uint64_t r = random_bits();
        float small = (float)((int)(r >> 32 & 63) - 32);
        uint32_t bits = special[(r >> 8) % DDL__COUNT_OF(special)];
        if (r % 4 == 0) {
            memcpy(&bits, &small, 4);
        } else if (r % 4 < 3) {
            bits = (uint32_t)(r >> 32);
        }
        memcpy((char *)data + i, &bits, bytes - i < 4 ? bytes - i : 4);
    }
}

static void random_floats(float *x, int64_t count, double scale) {
    for (int64_t i = 0; i < count; i++) {
        x[i] = (float)(((double)(int64_t)(random_bits() >> 11) / 4503599627370496.0 - 1) * scale);
    }
}

/* Exactly `bytes` bytes that begin `place` bytes after a 16-byte boundary: more is not the kernel's to touch. */
typedef struct buffer {
    char *base, *at;
    size_t bytes;
} buffer;
static buffer buffer_make(size_t bytes, size_t place) {
    buffer b = {malloc(place + bytes + 1), NULL, bytes};
    if (b.base == NULL) {
        abort();
    }
    b.at = b.base + place;
    memset(b.base, 0xa5, place + bytes + 1);
    randomize(b.at, bytes);
    return b;
}
static bool buffer_guarded(const buffer *b) {
    for (const char *p = b->base; p < b->at; p++) {
        if (*p != (char)0xa5) {
            return false;
        }
    }
    return b->at[b->bytes] == (char)0xa5;
}

/* ---- reductions ---- */

static void host_reduce(ddl_dtype dtype, ddl_op op, char *dst, char *const *srcs, int32_t n, size_t count) {
    ddl__reduce_fn kernel = ddl__reduce_kernel_at(DDL__CPU_PORTABLE, dtype, op);
    memmove(dst, srcs[0], count * ddl_dtype_bytes(dtype));
    for (int32_t s = 1; s < n; s++) {
        kernel(dst, dst, srcs[s], count);
    }
}

/* places: where within 16 bytes the destination and each source begin. in_place: the destination is that source. */
static bool reduce_agrees(ddl_dtype dtype, ddl_op op, int32_t n, int32_t dst_count, size_t count, const int *places,
                          int in_place) {
    size_t bytes = count * ddl_dtype_bytes(dtype);
    buffer src[40], dst[4];
    char *srcs[40], *copy = malloc(bytes + 1);
    void *dsts[4];
    bool good = true;
    for (int32_t s = 0; s < n; s++) {
        src[s] = buffer_make(bytes, (size_t)places[1 + s % 3]);
        srcs[s] = src[s].at;
    }
    for (int32_t d = 0; d < dst_count; d++) {
        dst[d] = buffer_make(bytes, (size_t)places[0]);
        dsts[d] = d == 0 && in_place >= 0 ? srcs[in_place] : dst[d].at;
    }
    host_reduce(dtype, op, copy, srcs, n, count);
    const cuda_reduction what = {.dtype = dtype, .op = op};
    ddl_status status = n > CUDA_PLACES ? cuda_put_reduce_many(&sink, dtype, op, dsts[0], (const void *const *)srcs, n,
                                                               (int64_t)count)
                                        : cuda_put_reduce(&sink, &what, dsts, dst_count, (const void *const *)srcs, n,
                                                          (int64_t)count);
    good = status == DDL_OK;
    for (int32_t d = 0; d < dst_count; d++) {
        good = good && memcmp(dsts[d], copy, bytes) == 0 && buffer_guarded(&dst[d]);
        free(dst[d].base);
    }
    for (int32_t s = 0; s < n; s++) {
        good = good && buffer_guarded(&src[s]);
        free(src[s].base);
    }
    free(copy);
    return good;
}

static const size_t counts[] = {0, 1, 3, 8, 17, 100, 1023, 5003};

TEST(every_type_and_op_has_the_bits_of_the_host) {
    static const int places[4][4] = {{0, 0, 0, 0}, {8, 8, 8, 8}, {3, 0, 7, 1}, {4, 8, 12, 0}};
    int32_t tried = 0;
    for (int dtype = DDL_F16; dtype <= DDL_E5M2; dtype++) {
        for (int op = DDL_SUM; op <= DDL_MAX_INDEX; op++) {
            cuda_kernel kernel;
            CHECK_EQ(cuda_reduce_kernel(dtype, op, &kernel), (bool)ddl__op_valid((ddl_op)op, (ddl_dtype)dtype));
            for (size_t c = 0; c < DDL__COUNT_OF(counts) && ddl__op_valid((ddl_op)op, (ddl_dtype)dtype); c++) {
                size_t p = (c + (size_t)op) % 4;
                int32_t n = 1 + (int32_t)(c + (size_t)dtype) % 3;
                if (!reduce_agrees((ddl_dtype)dtype, (ddl_op)op, n + 1, 1, counts[c], places[p], -1)) {
                    test__fail(__FILE__, __LINE__, "%s of %s: %zu elements, %d sources, places %zu",
                               ddl__op_name((ddl_op)op), ddl_dtype_name((ddl_dtype)dtype), counts[c], n + 1, p);
                }
                tried++;
            }
        }
    }
    CHECK(tried > 700);
}

/* All pairs of bytes; of f16 and bf16, all with some, before or after: zeros, subnormals, halfway, infinite, NaN.
 * Many at once and one at a time, which is what an odd count ends with, are different code. */
TEST(every_pair_of_narrow_floats_has_the_bits_of_the_host) {
    enum { ALL = 65536, ROWS = 24 };
    static const uint16_t some[ROWS] = {0,      0x8000, 1,      0x8001, 0x0200, 0x83ff, 0x0400, 0x3c00,
                                        0xbc00, 0x3c01, 0x3f80, 0xbf81, 0x7bff, 0xfbff, 0x7c00, 0xfc00,
                                        0x7c01, 0xfe00, 0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fff, 0xffff};
    static const ddl_dtype dtypes[] = {DDL_E4M3, DDL_E5M2, DDL_F16, DDL_BF16};
    uint16_t *x = malloc(ALL * ROWS * 2), *y = malloc(ALL * ROWS * 2), *r = malloc(ALL * ROWS * 2);
    uint16_t *want = malloc(ALL * ROWS * 2);
    for (int d = 0; d < 4; d++) {
        size_t count = dtypes[d] <= DDL_BF16 ? ALL * ROWS : ALL, bytes = count * ddl_dtype_bytes(dtypes[d]);
        for (size_t i = 0; i < count; i++) {
            if (count == ALL) {
                ((uint8_t *)x)[i] = (uint8_t)i, ((uint8_t *)y)[i] = (uint8_t)(i >> 8);
            } else {
                x[i] = i % 2 == 0 ? (uint16_t)(i / ROWS) : some[i % ROWS];
                y[i] = i % 2 == 0 ? some[i % ROWS] : (uint16_t)(i / ROWS);
            }
        }
        for (int op = DDL_SUM; op <= DDL_MAX; op++) {
            const cuda_reduction what = {.dtype = dtypes[d], .op = op};
            char *const srcs[2] = {(char *)x, (char *)y};
            void *dst = r;
            host_reduce(dtypes[d], (ddl_op)op, (char *)want, srcs, 2, count);
            CHECK_EQ(cuda_put_reduce(&sink, &what, &dst, 1, (const void *const *)srcs, 2, (int64_t)count), DDL_OK);
            CHECK(memcmp(r, want, bytes) == 0);
            for (size_t at = 0; count == ALL && at < ALL; at += 15) { /* less than a word */
                const void *parts[2] = {(char *)x + at, (char *)y + at};
                int64_t part = at + 15 < ALL ? 15 : (int64_t)(ALL - at);
                dst = (char *)r + at;
                memset(dst, 0x5a, (size_t)part);
                CHECK_EQ(cuda_put_reduce(&sink, &what, &dst, 1, parts, 2, part), DDL_OK);
            }
            CHECK(memcmp(r, want, bytes) == 0);
        }
    }
    free(x);
    free(y);
    free(r);
    free(want);
}

TEST(results_go_to_several_destinations_and_in_place) {
    static const int aligned[4] = {0, 0, 0, 0}, mixed[4] = {4, 8, 12, 0};
    for (int32_t n = 1; n <= 5; n++) {
        for (int in_place = -1; in_place < n; in_place++) {
            CHECK(reduce_agrees(DDL_BF16, DDL_SUM, n, 3, 5003, aligned, in_place));
            CHECK(reduce_agrees(DDL_F32, DDL_MAX, n, 2, 1023, mixed, in_place));
            CHECK(reduce_agrees(DDL_I64, DDL_BXOR, n, 1, 77, mixed, in_place));
        }
    }
    CHECK(reduce_agrees(DDL_F16, DDL_SUM, 32, 1, 999, mixed, 31));
    CHECK(reduce_agrees(DDL_F16, DDL_SUM, 40, 1, 999, mixed, -1)); /* more than one launch takes */
    CHECK(reduce_agrees(DDL_F32, DDL_PROD, 33, 1, 999, aligned, 0));
}

TEST(tables_refuse_what_there_is_not) {
    cuda_kernel kernel;
    CHECK(!cuda_reduce_kernel(99, DDL_SUM, &kernel));
    CHECK(!cuda_reduce_kernel(DDL_F32, DDL_BAND, &kernel));
    CHECK(!cuda_reduce_kernel(DDL_F32, 300, &kernel));
    CHECK(!cuda_reduce_kernel(DDL_DTYPE_NONE, DDL_SUM, &kernel));
    CHECK_EQ(cuda_put_kernel(&sink, 99, NULL), DDL_ERR_UNSUPPORTED);
}

static const double factors[] = {1, 0.5, 3, -2, 1.0 / 3, 1e30, -0.1, 0x1p62, 0x1p63, 0, (double)NAN};

TEST(factors_and_averages) {
    for (int dtype = DDL_F16; dtype <= DDL_E5M2; dtype++) {
        for (size_t f = 0; f < DDL__COUNT_OF(factors); f++) {
            size_t count = counts[2 + f % 6], bytes = count * ddl_dtype_bytes((ddl_dtype)dtype);
            int32_t divisor = f % 3 == 0 ? 1 : (int32_t)(3 * f);
            buffer x = buffer_make(bytes, f % 2 == 0 ? 0 : 5), y = buffer_make(bytes, 0);
            char *want = malloc(bytes + 1);
            ddl__scale(want, x.at, count, (ddl_dtype)dtype, factors[f]);
            if (ddl__dtype_is_float((ddl_dtype)dtype) || ddl__dtype_is_integer((ddl_dtype)dtype)) {
                ddl__average(want, count, (ddl_dtype)dtype, divisor);
            }
            const ddl_kernel_scale p = {y.at, x.at, (int64_t)count, dtype, divisor, factors[f]};
            CHECK_EQ(cuda_put_kernel(&sink, DDL_KERNEL_SCALE, &p), DDL_OK);
            if ((factors[f] != 1 || divisor > 1) && (memcmp(y.at, want, bytes) != 0 || !buffer_guarded(&y))) {
                test__fail(__FILE__, __LINE__, "%s times %g by %d", ddl_dtype_name((ddl_dtype)dtype), factors[f],
                           divisor);
            }
            free(want);
            free(x.base);
            free(y.base);
        }
    }
}

/* Narrow floats are divided with few instructions: all values by whole numbers, by such below 1 as averages of f16 have
 * (ddl__averages_scaled), and by others, which take another way. */
static void check_divisor(ddl_dtype dtype, double divisor, char *x, char *want, char *got) {
    size_t count = (size_t)1 << 8 * ddl_dtype_bytes(dtype);
    const cuda_reduction what = {.dtype = dtype, .op = DDL_AVG, .divisor = divisor};
    const void *src = x;
    void *dst = got;
    ddl__apply_float(want, x, count, dtype, divisor, 1);
    CHECK_EQ(cuda_put_reduce(&sink, &what, &dst, 1, &src, 1, (int64_t)count), DDL_OK);
    if (memcmp(got, want, count * ddl_dtype_bytes(dtype)) != 0) {
        test__fail(__FILE__, __LINE__, "%s by %.9g", ddl_dtype_name(dtype), divisor);
    }
}
TEST(every_value_of_a_narrow_float_is_divided_as_on_the_host) {
    static const ddl_dtype dtypes[] = {DDL_F16, DDL_BF16, DDL_E4M3, DDL_E5M2};
    static const double others[] = {0.75, 0.3, 0x1p-20, 4097, 5000, 65535, 1005777, 0x1p24, 2147483647};
    char *x = malloc(3 * 131072);
    for (int d = 0; d < 4; d++) {
        for (uint32_t i = 0; i < 65536; i++) {
            if (d < 2) {
                ((uint16_t *)x)[i] = (uint16_t)i;
            } else {
                x[i] = (char)i;
            }
        }
        for (int n = 2; n <= 4096; n += n < 40 || n > 4090 ? 1 : 27) {
            double below = n;
            while (below > 1) {
                below /= 2;
            }
            check_divisor(dtypes[d], n, x, x + 131072, x + 262144);
            check_divisor(dtypes[d], below < 1 ? below : 0.5, x, x + 131072, x + 262144); /* by 1 is a copy */
        }
        for (size_t i = 0; i < DDL__COUNT_OF(others); i++) {
            check_divisor(dtypes[d], others[i], x, x + 131072, x + 262144);
        }
    }
    free(x);
}

/* Each input has a factor of its own; the sum is rounded after each step, and divided at last. */
TEST(sums_of_scaled_inputs) {
    static const double each[4] = {0.5, 3, 1.0 / 3, -1};
    for (int dtype = DDL_F16; dtype <= DDL_E5M2; dtype++) {
        if (!ddl__op_valid(DDL_AVG, (ddl_dtype)dtype)) {
            continue;
        }
        size_t count = 1023, bytes = count * ddl_dtype_bytes((ddl_dtype)dtype);
        buffer x[4], y = buffer_make(bytes, 8);
        const void *srcs[4];
        void *dst = y.at;
        char *scaled[4], *want = malloc(bytes);
        for (int s = 0; s < 4; s++) {
            x[s] = buffer_make(bytes, 8);
            srcs[s] = x[s].at;
            scaled[s] = malloc(bytes);
            ddl__scale(scaled[s], x[s].at, count, (ddl_dtype)dtype, each[s]);
        }
        host_reduce((ddl_dtype)dtype, DDL_SUM, want, scaled, 4, count);
        ddl__average(want, count, (ddl_dtype)dtype, 7);
        const cuda_reduction what = {dtype, DDL_AVG, 1, 7, each};
        CHECK_EQ(cuda_put_reduce(&sink, &what, &dst, 1, srcs, 4, (int64_t)count), DDL_OK);
        CHECK(memcmp(y.at, want, bytes) == 0 && buffer_guarded(&y));
        for (int s = 0; s < 4; s++) {
            free(x[s].base);
            free(scaled[s]);
        }
        free(want);
        free(y.base);
    }
}

/* ---- exchanges, copies, strided tensors ---- */

TEST(exchanges_and_copies_of_any_length_at_any_place) {
    static const size_t places[] = {0, 3, 8, 4};
    for (size_t c = 0; c < DDL__COUNT_OF(counts); c++) {
        size_t bytes = counts[c];
        buffer a = buffer_make(bytes, places[c % 4]), b = buffer_make(bytes, places[c / 2 % 4]);
        buffer to = buffer_make(bytes, 1), from = buffer_make(bytes, 0);
        char *old_a = malloc(bytes + 1), *old_b = malloc(bytes + 1);
        memcpy(old_a, a.at, bytes);
        memcpy(old_b, b.at, bytes);
        const cuda_pair pairs[3] = {{{a.at, b.at}, {b.at, a.at}, {(int64_t)bytes, 0, 0, 0}},
                                    {{from.at, NULL}, {to.at, NULL}, {(int64_t)bytes, 0, 0, 0}},
                                    {{NULL, NULL}, {NULL, NULL}, {0, 0, 0, 0}}};
        CHECK_EQ(cuda_put_exchange(&sink, pairs, 3), DDL_OK);
        CHECK(memcmp(a.at, old_b, bytes) == 0 && memcmp(b.at, old_a, bytes) == 0 && memcmp(to.at, from.at, bytes) == 0);
        CHECK(buffer_guarded(&a) && buffer_guarded(&b) && buffer_guarded(&to));
        void *dsts[2] = {a.at, b.at};
        CHECK_EQ(cuda_put_copy(&sink, dsts, 2, from.at, (int64_t)bytes), DDL_OK);
        CHECK(memcmp(a.at, from.at, bytes) == 0 && memcmp(b.at, from.at, bytes) == 0 && buffer_guarded(&b));
        free(old_a);
        free(old_b);
        free(a.base);
        free(b.base);
        free(to.base);
        free(from.base);
    }
}

/* Of each shape: strides of a part, of a transposed tensor, backwards; elements at odd addresses. */
static void check_strided(ddl_dtype dtype, int32_t ndim, const int64_t *shape, const int64_t *strides, int64_t first,
                          int64_t extent, size_t place) {
    size_t size = ddl_dtype_bytes(dtype);
    buffer data = buffer_make((size_t)extent * size, place);
    ddl_tensor t = {.data = data.at + (size_t)first * size, .dtype = dtype, .ndim = ndim};
    for (int32_t d = 0; d < ndim; d++) {
        t.shape[d] = shape[d];
        t.strides[d] = strides[d];
    }
    size_t bytes = (size_t)ddl_tensor_count(&t) * size;
    buffer packed = buffer_make(bytes, place), back = buffer_make((size_t)extent * size, place);
    char *want = malloc(bytes + 1), *old = malloc((size_t)extent * size + 1);
    ddl__pack(&t, want, false);
    CHECK_EQ(cuda_put_strided(&sink, &t, packed.at, 0), DDL_OK);
    CHECK(memcmp(packed.at, want, bytes) == 0 && buffer_guarded(&packed));
    memcpy(old, back.at, (size_t)extent * size);
    t.data = old + (size_t)first * size;
    ddl__pack(&t, packed.at, true);
    t.data = back.at + (size_t)first * size;
    CHECK_EQ(cuda_put_strided(&sink, &t, packed.at, 1), DDL_OK);
    CHECK(memcmp(back.at, old, (size_t)extent * size) == 0 && buffer_guarded(&back)); /* and nothing between elements */
    free(want);
    free(old);
    free(data.base);
    free(packed.base);
    free(back.base);
}

TEST(strided_tensors_are_gathered_and_scattered) {
    static const ddl_dtype dtypes[] = {DDL_U8, DDL_BF16, DDL_F32, DDL_F64, DDL_F64_I64};
    static const size_t places[] = {0, 8, 3, 1, 4};
    for (size_t i = 0; i < 25; i++) {
        ddl_dtype dtype = dtypes[i % 5];
        size_t place = places[i / 5];
        check_strided(dtype, 2, (const int64_t[]){5, 8}, (const int64_t[]){24, 1}, 0, 120, place);
        check_strided(dtype, 2, (const int64_t[]){7, 5}, (const int64_t[]){1, 7}, 0, 35, place);
        check_strided(dtype, 1, (const int64_t[]){9}, (const int64_t[]){-2}, 17, 18, place);
        check_strided(dtype, 3, (const int64_t[]){3, 1, 6}, (const int64_t[]){12, 99, 2}, 1, 40, place);
        check_strided(dtype, 8, (const int64_t[]){2, 2, 2, 2, 2, 2, 2, 3}, /* nothing of it is one walk */
                      (const int64_t[]){1, 2, 4, 8, 16, 32, 64, 128}, 0, 384, place);
        check_strided(dtype, 0, NULL, NULL, 2, 3, place);
        check_strided(dtype, 1, (const int64_t[]){0}, (const int64_t[]){1}, 0, 1, place);
    }
}

/* ---- optimizers ---- */

static void step_of(const ddl__optim_scalars *k, ddl_kernel_step *p) {
    p->rate = k->rate, p->decay = k->decay, p->keep = k->keep, p->beta1 = k->beta1, p->fresh1 = k->fresh1;
    p->beta2 = k->beta2, p->fresh2 = k->fresh2, p->unbias1 = k->unbias1, p->unbias2 = k->unbias2;
    p->epsilon = k->epsilon;
}

enum { OPTIM_COUNT = 10007, OPTIM_ROOM = OPTIM_COUNT + 5 };
static double host[4][OPTIM_ROOM], device[4][OPTIM_ROOM], updates[OPTIM_ROOM]; /* or floats in their first half */

static void *element(double *array, int32_t number, size_t size) { return (char *)array + (size_t)number * size; }

/* Three steps on the host and on the device, from the same start; shift: where in 16 bytes the arrays begin. */
static void check_optimizer(ddl_optimizer_kind kind, ddl_dtype dtype, int64_t count, int32_t shift) {
    ddl_optimizer o, config = {.kind = kind, .weight_decay = 0.01};
    ddl__sentence sentence;
    size_t size = ddl_dtype_bytes(dtype);
    REQUIRE(ddl__optim_init(&sentence, &config, &o) == DDL_OK);
    memset(host, 0, sizeof host);
    for (int a = 0; a < 2; a++) {
        for (int i = 0; i < OPTIM_ROOM; i++) {
            double x = (double)(int64_t)(random_bits() >> 11) / 4503599627370496.0 - 1;
            float narrow = (float)x;
            memcpy(element(host[a], i, size), size == 8 ? (void *)&x : (void *)&narrow, size);
        }
    }
    memcpy(device, host, sizeof host);
    for (int64_t step = 1; step <= 3; step++) {
        ddl_optimizer_part part = {.param = element(host[0], shift, size), .grad = element(host[1], shift, size),
                                   .state = element(host[2], shift, size), .state_stride = 8 / (int64_t)size * OPTIM_ROOM,
                                   .count = count, .step = step, .learning_rate = 0.01, .dtype = dtype};
        ddl_kernel_step p = {.kind = kind, .count = count, .dtype = dtype, .w = element(device[0], shift, size),
                             .g = element(device[1], shift, size),
                             .m = kind == DDL_SGD ? NULL : element(device[2], shift, size),
                             .v = kind >= DDL_ADAM && kind != DDL_LARS ? element(device[3], shift, size) : NULL};
        double sums[2] = {0, 0};
        ddl__optim_scalars k = ddl__optim_scalars_of(&o, &part);
        if (kind == DDL_LAMB) {
            step_of(&k, &p);
            p.moments = 1;
            p.r = element(updates, shift, size);
            CHECK_EQ(cuda_put_kernel(&sink, DDL_KERNEL_STEP, &p), DDL_OK);
            p.moments = 0;
            p.r = NULL;
            p.g = NULL;
        }
        ddl__optim_sums_at(DDL__CPU_PORTABLE, &o, &part, sums);
        ddl__optim_step_at(DDL__CPU_PORTABLE, &o, &part, sums);
        part.learning_rate *= ddl__optim_needs_sums(&o) ? ddl__optim_trust(&o, sums) : 1;
        k = ddl__optim_scalars_of(&o, &part);
        step_of(&k, &p);
        CHECK_EQ(cuda_put_kernel(&sink, DDL_KERNEL_STEP, &p), DDL_OK);
        for (int a = 0; a < 4; a++) {
            CHECK(memcmp(host[a], device[a], sizeof host[a]) == 0);
        }
    }
}

TEST(steps_of_optimizers_have_the_bits_of_the_host) {
    for (int i = 0; i < 2 * (DDL_LAMB + 1); i++) {
        ddl_optimizer_kind kind = (ddl_optimizer_kind)(i / 2);
        ddl_dtype dtype = i % 2 ? DDL_F64 : DDL_F32;
        check_optimizer(kind, dtype, OPTIM_COUNT, 0);
        check_optimizer(kind, dtype, 1003, 1);
        check_optimizer(kind, dtype, 2, 3);
        check_optimizer(kind, dtype, 0, 0);
    }
}

/* The arrays are not all at the same place within 16 bytes. */
TEST(a_step_on_arrays_that_are_not_aligned_alike) {
    float *w = (float *)device[0], *g = (float *)device[1], *old = (float *)device[2];
    ddl_kernel_step p = {.kind = DDL_MOMENTUM, .rate = 0.5, .beta1 = 0.5, .count = 100, .dtype = DDL_F32, .w = w + 1,
                         .g = g + 2, .m = old + 3};
    for (int i = 0; i < 104; i++) {
        w[i] = (float)i, g[i] = (float)(2 * i), old[i] = (float)(4 * i);
    }
    CHECK_EQ(cuda_put_kernel(&sink, DDL_KERNEL_STEP, &p), DDL_OK);
    for (int i = 0; i < 100; i++) {
        float m = 2 * (float)(i + 2) + 2 * (float)(i + 3);
        CHECK_EQ(old[i + 3], m);
        CHECK_EQ(w[i + 1], (float)(i + 1) - m / 2);
    }
    CHECK_EQ(w[0], 0.0f);
    CHECK_EQ(w[101], 101.0f);
    p.dtype = DDL_F16;
    CHECK_EQ(cuda_put_kernel(&sink, DDL_KERNEL_STEP, &p), DDL_ERR_ARG);
}

TEST(sums_of_squares_are_added_in_the_order_of_the_host) {
    enum { MOST = 35 * DDL__STRETCH + 1 }; /* more partial sums than are loaded at once */
    static const int64_t lengths[] = {0, 1, 15, 16, 255, 4096, 4097, 20000, 65536, 65537, 139001, MOST};
    float *x = malloc(MOST * sizeof *x);
    double partial[36], out = -1, *wide = malloc(MOST * sizeof *wide), plain = 0, want = -1;
    ddl__lane host = {.numbers = &want};
    random_floats(x, MOST, 1e3);
    for (int i = 0; i < MOST; i++) {
        wide[i] = (double)x[i] * 1.0000001;
        plain += wide[i] * wide[i];
    }
    for (size_t i = 0; i < DDL__COUNT_OF(lengths); i++) {
        ddl_kernel_squares p = {x, lengths[i], partial, &out, DDL_F32, 0};
        CHECK_EQ(cuda_put_kernel(&sink, DDL_KERNEL_SQUARES, &p), DDL_OK);
        ddl__lane_squares(&host, x, DDL_F32, lengths[i], 0);
        CHECK(out == want);
        p.x = wide;
        p.dtype = DDL_F64;
        CHECK_EQ(cuda_put_kernel(&sink, DDL_KERNEL_SQUARES, &p), DDL_OK);
        ddl__lane_squares(&host, wide, DDL_F64, lengths[i], 0);
        CHECK(out == want);
    }
    CHECK(fabs(out - plain) < 1e-12 * plain);
    free(wide);
    free(x);
}

/* Sums of LARS and LAMB on the host are those of a device's kernels, in one part and in blocks. */
TEST(sums_of_optimizers_are_added_in_the_order_of_the_kernels) {
    enum { MOST = 3 * DDL__STRETCH + 4999 };
    static float room[2][6][MOST];
    double numbers[2], want[2], partial[4];
    ddl__lane host = {.numbers = numbers};
    ddl__sentence sentence;
    for (int kind = DDL_LARS; kind <= DDL_LAMB; kind++) {
        ddl_optimizer o, config = {.kind = (ddl_optimizer_kind)kind};
        REQUIRE(ddl__optim_init(&sentence, &config, &o) == DDL_OK);
        memset(room, 0, sizeof room);
        random_floats(room[0][0], MOST, 1);
        random_floats(room[0][1], MOST, 1);
        memcpy(room[1], room[0], sizeof room[0]);
        ddl_optimizer_part part = {.param = room[1][0], .grad = room[1][1], .state = room[1][2], .state_stride = MOST,
                                   .count = MOST, .step = 1, .learning_rate = 0.01, .dtype = DDL_F32};
        ddl_kernel_step moments = ddl__lane_step_of(&o, &part);
        moments.moments = 1;
        moments.r = room[1][4];
        if (kind == DDL_LAMB) {
            CHECK_EQ(cuda_put_kernel(&sink, DDL_KERNEL_STEP, &moments), DDL_OK);
        }
        for (int i = 0; i < 2; i++) {
            ddl_kernel_squares p = {i == 0 ? room[1][0] : kind == DDL_LAMB ? room[1][4] : room[1][1], MOST, partial,
                                    &want[i], DDL_F32, 0};
            CHECK_EQ(cuda_put_kernel(&sink, DDL_KERNEL_SQUARES, &p), DDL_OK);
        }
        for (int blocks = 0; blocks < 8; blocks++) { /* as one part, and cut at each so many blocks */
            int64_t each = blocks > 0 ? (int64_t)blocks * DDL__LANE_BLOCK : MOST;
            memcpy(room[1], room[0], sizeof room[0]);
            for (int64_t i = 0; i < MOST; i += each) {
                ddl_optimizer_part some = ddl__part_of_part(&part, i, DDL__MIN(MOST - i, each));
                ddl__lane_optim_sums(&host, &o, &some, 0, i > 0);
            }
            CHECK(numbers[0] == want[0] && numbers[1] == want[1]);
        }
    }
}

/* ---- codes ---- */

enum { CODE_COUNT = 70001 };

/* One encoding and one decoding of `count` values on both sides. odd: with values that are not finite. */
static void check_code(ddl_compression config, int64_t count, bool residual, int odd, double scale) {
    ddl_compression c;
    ddl__sentence sentence;
    REQUIRE(ddl__compress_init(&sentence, &config, &c) == DDL_OK);
    size_t bytes = ddl__code_bytes(&c, count), array = (size_t)count * sizeof(float);
    float *g = malloc(array), *e[2], *sum[2];
    char *code[2];
    uint64_t found[2] = {0, 0};
    random_floats(g, count, scale);
    for (int64_t i = 0; i < odd; i++) { /* infinities and NaN, in few blocks and the last; a NaN is the GPU's own */
        uint32_t bits = i % 3 == 0 ? 0x7f800000u : i % 3 == 1 ? 0xff800000u : 0x7fffffffu;
        memcpy(&g[i % 4 == 1 ? count - 1 : (i * 37) % count], &bits, 4);
    }
    for (int s = 0; s < 2; s++) {
        e[s] = malloc(array);
        sum[s] = malloc(array);
        code[s] = malloc(bytes + 1);
        memset(code[s], 0xa5, bytes + 1);
    }
    random_floats(e[0], count, scale / 8);
    random_floats(sum[0], count, 1);
    memcpy(e[1], e[0], array);
    memcpy(sum[1], sum[0], array);
    ddl__code_key key = {.step = 5, .tensor = 3, .rank = 1};
    found[0] = ddl__encode_at(DDL__CPU_PORTABLE, &c, key, g, residual ? e[0] : NULL, count, code[0]);
    ddl_kernel_code p = {.config = &c, .stream = ddl__code_stream(&c, key), .g = g, .e = residual ? e[1] : NULL,
                         .sum = sum[1], .count = count, .code = code[1], .odd = &found[1],
                         .scratch = malloc((size_t)DDL_KERNEL_SCRATCH_BYTES(count))};
    CHECK_EQ(cuda_put_kernel(&sink, DDL_KERNEL_ENCODE, &p), DDL_OK);
    bool same = memcmp(code[0], code[1], bytes + 1) == 0 && memcmp(e[0], e[1], array) == 0 && found[0] == found[1];
    ddl__decode_add_at(DDL__CPU_PORTABLE, &c, key, code[0], count, sum[0]);
    CHECK_EQ(cuda_put_kernel(&sink, DDL_KERNEL_DECODE_ADD, &p), DDL_OK);
    if (!same || memcmp(sum[0], sum[1], array) != 0) {
        test__fail(__FILE__, __LINE__, "%s of %lld values, %d odd, scale %g: %s", ddl__compress_name(c.kind),
                   (long long)count, odd, scale, same ? "the sum differs" : "code, residual or count differ");
    }
    for (int s = 0; s < 2; s++) {
        free(e[s]);
        free(sum[s]);
        free(code[s]);
    }
    free(p.scratch);
    free(g);
}

static void check_codes(ddl_compression c, bool residual) {
    static const int64_t lengths[] = {1, 15, 33, 512, 513, 5000, 8192};
    for (size_t i = 0; i < DDL__COUNT_OF(lengths); i++) {
        check_code(c, lengths[i], residual, 0, 1);
        check_code(c, lengths[i], residual, (int)(i + 1), 1);
    }
    check_code(c, 600, residual, 0, 0);
    check_code(c, 600, residual, 0, 1e-36);
    check_code(c, 600, residual, 1, 1e38);
}

TEST(casts) {
    for (int residual = 0; residual < 2; residual++) {
        check_codes((ddl_compression){.kind = DDL_COMPRESS_F16, .error_feedback = residual ? 1 : -1}, residual);
        check_codes((ddl_compression){.kind = DDL_COMPRESS_BF16, .error_feedback = residual ? 1 : -1}, residual);
    }
}

/* Elements of one type as another, copied and added, at addresses that are aligned and not, with a count of what is not
 * finite. */
static void check_convert(ddl_dtype to, ddl_dtype from, int64_t count, int add, int shift) {
    size_t wide = ddl_dtype_bytes(to), narrow = ddl_dtype_bytes(from), bytes = (size_t)count * wide;
    unsigned char *memory = malloc(4 * ((size_t)count + 8) * 8), *src = memory + (size_t)shift * narrow;
    unsigned char *dst = memory + ((size_t)count + 8) * 8 + (size_t)shift * wide, *want = dst + ((size_t)count + 8) * 8;
    unsigned char *other = want + ((size_t)count + 8) * 8;
    uint64_t odd = 3, finite = 0, differ = 0;
    randomize(src, (size_t)count * narrow);
    randomize(dst, bytes);
    memcpy(want, dst, bytes);
    ddl__convert(add ? other : want, to, src, from, count);
    if (add) {
        ddl__reduce_kernel(to, DDL_SUM)(want, want, other, (size_t)count);
    }
    for (int64_t i = 0; i < count; i++) {
        finite += !ddl__not_finite(want + (size_t)i * wide, 1, to);
    }
    ddl_kernel_convert k = {dst, src, count, (int32_t)to, (int32_t)from, add, 0, &odd};
    CHECK_EQ(cuda_put_kernel(&sink, DDL_KERNEL_CONVERT, &k), DDL_OK);
    for (int64_t i = 0; i < count; i++) { /* which NaN a wider type has is the processor's affair */
        unsigned char *x = dst + (size_t)i * wide, *y = want + (size_t)i * wide;
        bool nan = to == DDL_F32 && from == DDL_F16 && isnan(*(float *)x) && isnan(*(float *)y);
        differ += !nan && memcmp(x, y, wide) != 0;
    }
    CHECK_EQ(differ, 0);
    CHECK_EQ(odd - 3, (uint64_t)count - finite);
    free(memory);
}

TEST(conversions) {
    static const ddl_dtype types[] = {DDL_F16, DDL_BF16, DDL_F32};
    for (int i = 0; i < 36; i++) {
        check_convert(types[i % 3], types[i / 3 % 3], i % 2 ? 4099 : 37, i / 9 % 2, i / 18);
        check_convert(DDL_F64, DDL_F64, 1000 + i, i % 2, i / 18);
    }
    ddl_kernel_convert none = {.count = 1, .to = DDL_F64, .from = DDL_F32};
    CHECK_EQ(cuda_put_kernel(&sink, DDL_KERNEL_CONVERT, &none), DDL_ERR_ARG);
}

TEST(signs_of_a_vote) {
    float x[] = {0, -0.0f, 3, -2, INFINITY, -INFINITY, 1e-40f, -1e-40f};
    static const float want[] = {1, 1, 1, -1, INFINITY, -INFINITY, 1, -1};
    ddl_kernel_convert k = {.dst = x, .count = 8};
    CHECK_EQ(cuda_put_kernel(&sink, DDL_KERNEL_SIGNS, &k), DDL_OK);
    CHECK_EQ(memcmp(x, want, sizeof x), 0);
}

TEST(int8) {
    check_codes((ddl_compression){.kind = DDL_COMPRESS_INT8}, true);
    check_codes((ddl_compression){.kind = DDL_COMPRESS_INT8, .error_feedback = -1}, false);
}
TEST(qsgd) {
    check_codes((ddl_compression){.kind = DDL_COMPRESS_QSGD, .seed = 7}, false);
    check_codes((ddl_compression){.kind = DDL_COMPRESS_QSGD, .levels = 100, .error_feedback = 1}, true);
}
TEST(signs) {
    check_codes((ddl_compression){.kind = DDL_COMPRESS_SIGN}, true);
    check_codes((ddl_compression){.kind = DDL_COMPRESS_MAJORITY}, false);
}
TEST(top_k) {
    check_codes((ddl_compression){.kind = DDL_COMPRESS_TOP_K}, true);
    check_codes((ddl_compression){.kind = DDL_COMPRESS_TOP_K, .ratio = 0.3}, true);
    check_code((ddl_compression){.kind = DDL_COMPRESS_TOP_K, .k = 1000}, CODE_COUNT, true, 5, 1);
    check_code((ddl_compression){.kind = DDL_COMPRESS_TOP_K, .k = 9000}, CODE_COUNT, true, 0, 0); /* nothing but ties */
    check_code((ddl_compression){.kind = DDL_COMPRESS_TOP_K, .k = 9000}, CODE_COUNT, true, 0, 1e-44); /* few values */
    check_code((ddl_compression){.kind = DDL_COMPRESS_GTOP_K, .ratio = 1}, 5000, true, 0, 1);
}

/* ---- gTop-k ---- */

/* k places of 0 .. count - 1 in ascending order, and values. */
static void random_code(int32_t *code, int64_t k, int64_t count, int kind) {
    float *values = (float *)(code + k);
    for (int64_t i = 0, place = 0; i < k; i++) {
        int64_t room = (count - (k - i) - place) / (k - i);
        place += (int64_t)(random_bits() % (uint64_t)(2 * room + 1) % (uint64_t)(count - (k - i) - place + 1));
        code[i] = (int32_t)place++;
        int v = (int)(random_bits() % 7) - 3; /* many ties, zeros, and sums that are 0 */
        values[i] = kind == 0 ? 0 : kind == 1 ? (float)v : (float)v + (float)(random_bits() >> 40) * 0x1p-24f;
    }
    values[k / 2] = kind == 3 ? INFINITY : kind == 4 ? NAN : values[k / 2];
}

static void check_merge(int64_t k, int64_t count, int kind) {
    size_t code = (size_t)k * 8, array = (size_t)count * sizeof(float);
    buffer own = buffer_make(code, 4), theirs = buffer_make(code, 8), both = buffer_make(2 * code, 0);
    int32_t *mine = (int32_t *)(void *)own.at, *others = (int32_t *)(void *)theirs.at, *places = malloc(2 * code + 8);
    float *rest[2] = {malloc(array), malloc(array)}, *values = (float *)(places + 2 * k);
    uint64_t wrong = 7;
    random_code(mine, k, count, kind);
    random_code(others, k, count, kind < 3 ? kind : 2);
    random_floats(rest[0], count, 1);
    memcpy(rest[1], rest[0], array);
    ddl__top_k_merge(mine, (float *)mine + k, others, (float *)others + k, k, places, values, rest[0]);
    ddl_kernel_merge p = {mine, others, both.at, rest[1], count, k, malloc((size_t)DDL_KERNEL_SCRATCH_BYTES(2 * k)),
                          &wrong};
    CHECK_EQ(cuda_put_kernel(&sink, DDL_KERNEL_MERGE, &p), DDL_OK);
    CHECK_EQ(wrong, 7);
    CHECK(buffer_guarded(&own) && buffer_guarded(&theirs) && buffer_guarded(&both));
    if (memcmp(mine, places, code / 2) != 0 || memcmp(mine + k, values, code / 2) != 0 ||
        memcmp(rest[0], rest[1], array) != 0) {
        test__fail(__FILE__, __LINE__, "%lld of %lld places, values of kind %d: not what the host merges",
                   (long long)k, (long long)count, kind);
    }
    others[k / 2] = (int32_t)count; /* from the wire: beyond the array, and not ascending behind it */
    CHECK_EQ(cuda_put_kernel(&sink, DDL_KERNEL_MERGE, &p), DDL_OK);
    CHECK(wrong > 7 && buffer_guarded(&own) && buffer_guarded(&both));
    for (int i = 0; i < 2; i++) {
        free(rest[i]);
    }
    free(p.scratch);
    free(places);
    free(own.base);
    free(theirs.base);
    free(both.base);
}

TEST(merges_of_gtop_k) {
    static const int64_t sizes[][2] = {{1, 1}, {1, 9}, {5, 5}, {7, 20}, {100, 150}, {3000, 70001}, {5000, 5001}};
    for (size_t i = 0; i < DDL__COUNT_OF(sizes); i++) {
        for (int kind = 0; kind < 5; kind++) {
            check_merge(sizes[i][0], sizes[i][1], kind);
        }
    }
}

/* ---- PowerSGD ---- */

/* How far an array is from sums that were made by plain loops in double, relative to the sums of magnitudes. */
static double worst(const float *x, const double *want, const double *size, int64_t count) {
    double most = 0;
    for (int64_t i = 0; i < count; i++) {
        double error = fabs((double)x[i] - want[i]) / (size[i] + 1e-30);
        most = error > most || isnan(error) ? error : most;
    }
    return most;
}

typedef struct matrices {
    int64_t rows, cols;
    int32_t rank;
    float *g, *m, *p, *q, *out;
} matrices;

static ddl_status power_part(const matrices *a, int32_t part) {
    ddl_kernel_power k = {part, a->rank, a->rows, a->cols, a->g, a->m, a->p, a->q, a->out, 77};
    return cuda_put_kernel(&sink, DDL_KERNEL_POWER, &k);
}

/* x[c * n + i] = the sum over j of a[i, j] y[c * m + j], and of the magnitudes; flipped: of a[j, i]. NaN rows of p are
 * passed over when flipped. */
static void plain_product(const matrices *a, bool flipped, double *x, double *size) {
    int64_t n = flipped ? a->cols : a->rows, m = flipped ? a->rows : a->cols;
    const float *y = flipped ? a->p : a->q;
    for (int64_t c = 0; c < a->rank; c++) {
        for (int64_t i = 0; i < n; i++) {
            double *sum = &x[c * n + i], *all = &size[c * n + i];
            *sum = *all = 0;
            for (int64_t j = 0; j < m; j++) {
                double term = (double)a->m[flipped ? j * a->cols + i : i * a->cols + j] * (double)y[c * m + j];
                *sum += flipped && isnan(y[j]) ? 0 : term;
                *all += flipped && isnan(y[j]) ? 0 : fabs(term);
            }
        }
    }
}

/* Columns of length 1, at right angles, over the rows that are not NaN; zero columns stay. */
static void check_orthonormal(const matrices *a) {
    for (int32_t c = 0; c < a->rank; c++) {
        for (int32_t d = 0; d <= c; d++) {
            double dot = 0;
            for (int64_t i = 0; i < a->rows; i++) {
                double term = (double)a->p[c * a->rows + i] * (double)a->p[d * a->rows + i];
                dot += isnan(term) ? 0 : term;
            }
            CHECK(fabs(dot - (c == d)) < 1e-5 || (c == d && dot == 0));
        }
    }
}

/* All parts on a matrix; odd: a row that is not finite in M, and one in the averaged P. */
static void check_power(int64_t rows, int64_t cols, int32_t rank, bool odd) {
    size_t whole = (size_t)(rows * cols), tall = (size_t)(rows * rank), wide = (size_t)(cols * rank);
    float *memory = malloc((4 * whole + 2 * tall + 2 * wide + 8) * sizeof(float));
    double *want = malloc((tall + wide) * sizeof *want), *size = malloc((tall + wide) * sizeof *size);
    matrices a = {rows, cols, rank, memory, memory + whole, memory + 2 * whole, memory + 2 * whole + tall, NULL};
    a.out = a.q + wide;
    float *first = a.out + whole, *p = first + whole, *q = p + tall;
    ddl__matrix host = {rows, cols, rank, first, p, q};
    random_floats(memory, (int64_t)(2 * whole + tall + wide), 1);
    memset(a.p, 0xff, tall * sizeof(float));
    memset(a.out, 0xff, whole * sizeof(float));
    for (size_t i = 0; i < whole; i++) {
        first[i] = a.g[i] + a.m[i];
    }
    CHECK_EQ(power_part(&a, DDL_POWER_BEGIN), DDL_OK);
    ddl__power_begin(&host, 77);
    CHECK(memcmp(a.q, q, wide * sizeof(float)) == 0);
    CHECK_EQ(power_part(&a, DDL_POWER_LEFT), DDL_OK);
    CHECK(memcmp(a.m, first, whole * sizeof(float)) == 0);
    plain_product(&a, false, want, size);
    CHECK(worst(a.p, want, size, (int64_t)tall) < 1e-5);
    if (odd) {
        a.m[cols * (rows / 2)] = first[cols * (rows / 2)] = INFINITY;
        a.p[rows / 2] = NAN;
        a.p[(rank - 1) * rows + rows / 3] = INFINITY;
    }
    memcpy(p, a.p, tall * sizeof(float));
    CHECK_EQ(power_part(&a, DDL_POWER_RIGHT), DDL_OK);
    ddl__power_orthonormalize(&host);
    CHECK(memcmp(a.p, p, tall * sizeof(float)) == 0);
    check_orthonormal(&a);
    plain_product(&a, true, want, size);
    CHECK(worst(a.q, want, size, (int64_t)wide) < 1e-5);
    memcpy(q, a.q, wide * sizeof(float));
    CHECK_EQ(power_part(&a, DDL_POWER_REBUILD), DDL_OK);
    ddl__power_rebuild(DDL__CPU_PORTABLE, &host, a.g);
    CHECK(memcmp(a.out, a.g, whole * sizeof(float)) == 0);
    CHECK(memcmp(a.m, first, whole * sizeof(float)) == 0);
    free(memory);
    free(want);
    free(size);
}

TEST(power_sgd) {
    check_power(70, 11, 2, false);
    check_power(700, 19, 1, true);
    check_power(65, 300, 4, true);
    check_power(33, 40, 7, false);
    check_power(3, 5, 5, false); /* two columns depend on the others */
    check_power(1, 1, 1, false);
    ddl_kernel_power none = {.part = 9, .rank = 1, .rows = 1, .cols = 1};
    CHECK_EQ(cuda_put_kernel(&sink, DDL_KERNEL_POWER, &none), DDL_ERR_UNSUPPORTED);
}

TEST(random_k) {
    check_codes((ddl_compression){.kind = DDL_COMPRESS_RANDOM_K, .ratio = 0.1}, true);
}

/* The last: there is no kernel that none of these tests has run. */
TEST(zz_every_kernel_was_run) {
    for (int k = 0; k < CUDA_K_COUNT; k++) {
        if (launches[k] == 0) {
            test__fail(__FILE__, __LINE__, "%s was never launched", kernel_names[k]);
        }
    }
}

/* How fast the reduction kernels are, beside the loop a user would write, compiled with everything the compiler has.
 *
 *     cc -O3 -march=native -DPLAIN -c bench/kernels.c -o /tmp/plain.o
 *     cc -O1 -D_GNU_SOURCE bench/kernels.c /tmp/plain.o -o /tmp/kernels && /tmp/kernels
 *
 * -O1 on purpose: the kernels must not depend on the user's flags. Arguments: `kernels all` prints every type and op.
 * GB/s counts the bytes of dst only (each kernel also reads twice as much); the best of several runs. */
#include <stddef.h>
#include <stdint.h>

void plain_f32(void *dst, const void *a, const void *b, size_t count);
void plain_f64(void *dst, const void *a, const void *b, size_t count);
void plain_i8(void *dst, const void *a, const void *b, size_t count);
void plain_i32(void *dst, const void *a, const void *b, size_t count);
void plain_i64(void *dst, const void *a, const void *b, size_t count);

#ifdef PLAIN

#define PLAIN_SUM(name, type)                                                                                          \
    void plain_##name(void *dst, const void *a, const void *b, size_t count) {                                         \
        type *d = dst;                                                                                                 \
        const type *x = a, *y = b;                                                                                     \
        for (size_t i = 0; i < count; i++) {                                                                           \
            d[i] = (type)(x[i] + y[i]);                                                                                \
        }                                                                                                              \
    }
PLAIN_SUM(f32, float)
PLAIN_SUM(f64, double)
PLAIN_SUM(i8, uint8_t)
PLAIN_SUM(i32, uint32_t)
PLAIN_SUM(i64, uint64_t)

#else

#include "../src/dtype/reduce.h"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { MAX_BYTES = 64 << 20 };
static char *dst, *a, *b;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Seconds per call, the best of 20 rounds of a few ms: other work on the machine only ever adds time. */
static double seconds(ddl__reduce_fn fn, char *d, size_t count, size_t bytes) {
    double best = 1e9;
    int calls = (int)((3e-3 * 8e9) / (double)(bytes + 64)) + 1;
    for (int round = 0; round < 20; round++) {
        double start = now_s();
        for (int i = 0; i < calls; i++) {
            fn(d, a, b, count);
            __asm__ volatile("" ::: "memory");
        }
        double each = (now_s() - start) / calls;
        best = each < best ? each : best;
    }
    return best;
}

static const size_t sizes[] = {8, 64, 1000, 8 << 10, 64 << 10, 1 << 20, MAX_BYTES};
enum { SIZES = sizeof(sizes) / sizeof(sizes[0]) };

static void print_row(const char *label, ddl__reduce_fn fn, size_t element, char *d) {
    printf("%-24s", label);
    for (int i = 0; i < SIZES; i++) {
        double s = seconds(fn, d, sizes[i] / element, sizes[i]);
        if (sizes[i] <= 64) {
            printf(" %7.1f ns", s * 1e9);
        } else {
            printf(" %10.2f", (double)sizes[i] / s * 1e-9);
        }
    }
    printf("\n");
}

static void print_header(const char *what) {
    printf("\n%-24s", what);
    for (int i = 0; i < SIZES; i++) {
        printf(" %8zu B", sizes[i]);
    }
    printf("\n");
}

static void fill(ddl_dtype dtype) {
    for (size_t i = 0; i < MAX_BYTES / 4; i++) {
        float x = (float)(i % 1000) * 0.25f, y = 1.5f;
        ((float *)(void *)a)[i] = dtype == DDL_F32 ? x : 0;
        ((float *)(void *)b)[i] = dtype == DDL_F32 ? y : 0;
    }
}

static void compare_with_plain(int in_place) {
    static const struct {
        const char *name;
        ddl_dtype dtype;
        ddl__reduce_fn plain;
    } rows[] = {{"f32", DDL_F32, plain_f32}, {"f64", DDL_F64, plain_f64}, {"i8", DDL_I8, plain_i8},
                {"i32", DDL_I32, plain_i32}, {"i64", DDL_I64, plain_i64}, {"f16", DDL_F16, NULL},
                {"bf16", DDL_BF16, NULL}};
    print_header(in_place ? "sum in place, GB/s" : "sum, GB/s");
    for (size_t r = 0; r < sizeof(rows) / sizeof(rows[0]); r++) {
        size_t element = ddl__dtype_bytes(rows[r].dtype);
        char label[64];
        char *d = in_place ? a : dst;
        fill(rows[r].dtype);
        if (rows[r].plain != NULL) {
            snprintf(label, sizeof(label), "%s plain -O3 native", rows[r].name);
            print_row(label, rows[r].plain, element, d);
        }
        for (ddl__cpu level = DDL__CPU_PORTABLE; level <= ddl__cpu_level(); level++) {
            snprintf(label, sizeof(label), "%s kernel %s", rows[r].name, level ? "avx2" : "portable");
            print_row(label, ddl__reduce_kernel_at(level, rows[r].dtype, DDL_SUM), element, d);
        }
    }
}

static void every_kernel(void) {
    print_header("best level, GB/s");
    for (ddl_dtype dtype = DDL_F16; dtype < DDL__DTYPES; dtype++) {
        for (ddl_op op = DDL_SUM; op < DDL__OPS; op++) {
            if (ddl__op_valid(op, dtype)) {
                char label[64];
                snprintf(label, sizeof(label), "%s %s", ddl__dtype_name(dtype), ddl__op_name(op));
                print_row(label, ddl__reduce_kernel(dtype, op), ddl__dtype_bytes(dtype), dst);
            }
        }
    }
}

/* What reduce_n, scale and average cost, per byte of the result, on 1 MiB. */
static void whole_functions(void) {
    static const ddl_dtype dtypes[] = {DDL_F32, DDL_F64, DDL_F16, DDL_BF16, DDL_I32, DDL_I64};
    const void *srcs[4] = {a, b, a + (1 << 20), b + (1 << 20)};
    fill(DDL_F16);
    printf("\n1 MiB, GB/s of result    reduce_n(4)      scale    average\n");
    for (size_t k = 0; k < sizeof(dtypes) / sizeof(dtypes[0]); k++) {
        size_t bytes = 1 << 20, count = bytes / ddl__dtype_bytes(dtypes[k]);
        double best[3] = {1e9, 1e9, 1e9};
        for (int round = 0; round < 60; round++) {
            double t0 = now_s();
            ddl__reduce_n(dst, srcs, 4, count, dtypes[k], DDL_SUM);
            double t1 = now_s();
            ddl__scale(dst, a, count, dtypes[k], 0.3);
            double t2 = now_s();
            ddl__average(dst, count, dtypes[k], 3);
            double each[3] = {t1 - t0, t2 - t1, now_s() - t2};
            for (int i = 0; i < 3; i++) {
                best[i] = each[i] < best[i] ? each[i] : best[i];
            }
        }
        printf("%-24s %11.2f %10.2f %10.2f\n", ddl__dtype_name(dtypes[k]), (double)bytes / best[0] * 1e-9,
               (double)bytes / best[1] * 1e-9, (double)bytes / best[2] * 1e-9);
    }
}

int main(int argc, char **argv) {
    dst = aligned_alloc(64, MAX_BYTES);
    a = aligned_alloc(64, MAX_BYTES);
    b = aligned_alloc(64, MAX_BYTES);
    if (dst == NULL || a == NULL || b == NULL) {
        fprintf(stderr, "kernels: no memory for three buffers of %d bytes\n", MAX_BYTES);
        return 1;
    }
    memset(dst, 0, MAX_BYTES);
    fill(DDL_F32);
    compare_with_plain(0);
    if (argc > 1 && strcmp(argv[1], "all") == 0) {
        compare_with_plain(1);
        every_kernel();
    }
    whole_functions();
    return 0;
}

#endif

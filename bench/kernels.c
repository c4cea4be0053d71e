/* How fast the reduction kernels are, beside the loop a user would write, compiled with everything the compiler has; and
 * optimizers and encoders beside the speed of memory.
 *
 *     cc -O3 -march=native -DPLAIN -c bench/kernels.c -o /tmp/plain.o
 *     cc -O2 -D_GNU_SOURCE -I. bench/kernels.c /tmp/plain.o -o /tmp/kernels -lpthread -ldl && /tmp/kernels
 *
 * Arguments: `kernels all` prints every type and op, `kernels train` only optimizers and encoders, `kernels train top-k`
 * those with that in their names. GB/s counts the bytes of dst only (each kernel also reads twice as much). Loops that are compared take turns; each figure is the best of its rounds, because other work on the machine
 * only ever adds time. The last lines hold the figures against what docs/design.md asks for. */
#include <stddef.h>
#include <stdint.h>

typedef void (*sum_fn)(void *dst, const void *a, const void *b, size_t count);

/* The rows of a table: kernels of this build, and loops of the other file. A loop that is missing has no fn. */
typedef struct plain_loops {
    sum_fn f32, f64, i8, i32, i64;
    sum_fn f16, bf16; /* widen, add, round with the processor's own instructions: no care for NaN and subnormals */
    uint32_t (*read)(const void *src, size_t count); /* of 32-bit words: their largest */
} plain_loops;
extern const plain_loops plain;

#ifdef PLAIN

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define PLAIN_SUM(name, type)                                                                                          \
    static void plain_##name(void *dst, const void *a, const void *b, size_t count) {                                  \
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

static uint32_t plain_read(const void *src, size_t count) {
    const uint32_t *x = src;
    uint32_t most = 0;
    for (size_t i = 0; i < count; i++) {
        most = x[i] > most ? x[i] : most;
    }
    return most;
}

#if defined(__F16C__)
/* Whole vectors only. */
static void plain_f16(void *dst, const void *a, const void *b, size_t count) {
    for (size_t i = 0; i + 8 <= count; i += 8) {
        __m256 x = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const uint16_t *)a + i)));
        __m256 y = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const uint16_t *)b + i)));
        _mm_storeu_si128((__m128i *)((uint16_t *)dst + i), _mm256_cvtps_ph(_mm256_add_ps(x, y), 0));
    }
}
#else
#define plain_f16 NULL
#endif

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
static void plain_bf16(void *dst, const void *a, const void *b, size_t count) {
    uint16_t pairs[32];
    for (uint16_t i = 0; i < 32; i++) {
        pairs[i] = (uint16_t)(i / 2 + i % 2 * 16);
    }
    __m512i order = _mm512_loadu_si512(pairs), mask = _mm512_set1_epi32((int)0xffff0000);
    for (size_t i = 0; i + 32 <= count; i += 32) {
        __m512i x = _mm512_loadu_si512((const uint16_t *)a + i), y = _mm512_loadu_si512((const uint16_t *)b + i);
        __m512 low = _mm512_add_ps((__m512)_mm512_slli_epi32(x, 16), (__m512)_mm512_slli_epi32(y, 16));
        __m512 high = _mm512_add_ps((__m512)_mm512_and_si512(x, mask), (__m512)_mm512_and_si512(y, mask));
        __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        _mm512_storeu_si512((uint16_t *)dst + i, _mm512_permutexvar_epi16(order, both));
    }
}
#else
#define plain_bf16 NULL
#endif

const plain_loops plain = {plain_f32, plain_f64, plain_i8,   plain_i32,
                           plain_i64, plain_f16, plain_bf16, plain_read};

#else

#define DDL_IMPLEMENTATION
#include "ddl.h"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { MAX_BYTES = 64 << 20, ROUNDS = 15, ROWS = 8 };
static const size_t sizes[] = {8, 64, 1 << 10, 4 << 10, 8 << 10, 64 << 10, 1 << 20, 8 << 20, MAX_BYTES};
enum { SIZES = sizeof(sizes) / sizeof(sizes[0]), FIRST_COMPARED = 2 };
static const char *const level_names[] = {"portable", "avx2", "avx512"};
static char *dst, *a, *b;

typedef struct row {
    char label[40];
    sum_fn fn;
    double s[SIZES]; /* seconds of a call */
} row;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* A few ms of calls. */
static double seconds(sum_fn fn, char *d, size_t count, size_t bytes) {
    int calls = (int)(2e7 / (double)(bytes + 64)) + 1;
    double start = now_s();
    for (int i = 0; i < calls; i++) {
        fn(d, a, b, count);
        __asm__ volatile("" ::: "memory");
    }
    return (now_s() - start) / calls;
}

static void measure(row *rows, int row_count, size_t element, char *d) {
    for (int i = 0; i < SIZES; i++) {
        for (int r = 0; r < row_count; r++) {
            rows[r].s[i] = 1e9;
        }
        for (int round = 0; round < ROUNDS; round++) {
            for (int r = 0; r < row_count; r++) {
                double s = seconds(rows[r].fn, d, sizes[i] / element, sizes[i]);
                rows[r].s[i] = s < rows[r].s[i] ? s : rows[r].s[i];
            }
        }
    }
}

static void print_row(const row *r) {
    printf("%-22s", r->label);
    for (int i = 0; i < SIZES; i++) {
        if (sizes[i] <= 64) {
            printf(" %6.1f ns", r->s[i] * 1e9);
        } else {
            printf(" %8.2f", (double)sizes[i] / r->s[i] * 1e-9);
        }
    }
    printf("\n");
}

static const char *size_name(size_t bytes) {
    static char text[24];
    int unit = bytes >= 1 << 20 ? 20 : bytes >= 1 << 10 ? 10 : 0;
    snprintf(text, sizeof(text), "%zu%s", bytes >> unit, unit == 20 ? " MiB" : unit == 10 ? " KiB" : " B");
    return text;
}

static void print_header(const char *what) {
    printf("\n%-22s", what);
    for (int i = 0; i < SIZES; i++) {
        printf(sizes[i] <= 64 ? " %9s" : " %8s", size_name(sizes[i]));
    }
    printf("\n");
}

/* Small whole numbers, of the type: a kernel may take longer for NaN and subnormals. */
static void fill(ddl_dtype dtype) {
    size_t size = ddl__dtype_bytes(dtype);
    for (size_t i = 0; i < MAX_BYTES / size; i++) {
        float x = (float)(i % 250), y = 2;
        char *p = a + i * size, *q = b + i * size;
        if (dtype == DDL_F32) {
            memcpy(p, &x, 4);
            memcpy(q, &y, 4);
        } else if (ddl__dtype_is_narrow(dtype)) {
            ddl__narrow_at(DDL__CPU_PORTABLE, dtype)(p, &x, 1);
            ddl__narrow_at(DDL__CPU_PORTABLE, dtype)(q, &y, 1);
        } else {
            memset(p, 0, size);
            memset(q, 0, size);
        }
    }
}

static row *add_row(row *rows, int *count, const char *type, const char *what, sum_fn fn) {
    row *r = &rows[*count];
    snprintf(r->label, sizeof(r->label), "%s %s", type, what);
    r->fn = fn;
    *count += fn != NULL;
    return r;
}

/* Prints the table of one type; out_plain and out_best are its first and last row. */
static void compare(ddl_dtype dtype, sum_fn loop, int in_place, row *out_plain, row *out_best) {
    row rows[ROWS];
    int count = 0;
    const char *type = ddl__dtype_name(dtype);
    add_row(rows, &count, type, ddl__dtype_is_narrow(dtype) ? "bare instructions" : "plain -O3 native", loop);
    for (ddl__cpu level = DDL__CPU_PORTABLE; level <= ddl__cpu_level(); level++) {
        char what[24];
        snprintf(what, sizeof(what), "kernel %s", level_names[level]);
        add_row(rows, &count, type, what, ddl__reduce_kernel_at(level, dtype, DDL_SUM));
    }
    fill(dtype);
    measure(rows, count, ddl__dtype_bytes(dtype), in_place ? a : dst);
    for (int r = 0; r < count; r++) {
        print_row(&rows[r]);
    }
    *out_plain = rows[0];
    *out_best = rows[count - 1];
}

/* Speed of one row over that of another, at its least over the sizes from one on. */
static double least_ratio(const row *mine, const row *other, int from, int *out_size) {
    double least = 1e9;
    for (int i = from; i < SIZES; i++) {
        if (other->s[i] / mine->s[i] < least) {
            least = other->s[i] / mine->s[i];
            *out_size = i;
        }
    }
    return least;
}

static void verdict(const char *what, const row *mine, const row *other, int from, double floor) {
    int at = 0;
    double least = least_ratio(mine, other, from, &at);
    printf("%-64s least %.2f at %-7s (asked %.2f: %s)\n", what, least, size_name(sizes[at]), floor,
           least >= floor ? "reached" : "not reached");
}

static void compare_all(int in_place) {
    enum { F32, F16, BF16, TYPES = 7 };
    const struct {
        ddl_dtype dtype;
        sum_fn loop;
    } types[TYPES] = {{DDL_F32, plain.f32}, {DDL_F16, plain.f16}, {DDL_BF16, plain.bf16}, {DDL_F64, plain.f64},
                      {DDL_I8, plain.i8},   {DDL_I32, plain.i32}, {DDL_I64, plain.i64}};
    row loops[TYPES], best[TYPES];
    print_header(in_place ? "sum in place, GB/s" : "sum, GB/s");
    for (int t = 0; t < TYPES; t++) {
        compare(types[t].dtype, types[t].loop, in_place, &loops[t], &best[t]);
    }
    printf("\n");
    verdict("f32 kernel / plain loop", &best[F32], &loops[F32], FIRST_COMPARED, 0.9);
    for (int t = F16; t <= BF16; t++) {
        char what[80];
        const char *name = ddl__dtype_name(types[t].dtype);
        snprintf(what, sizeof(what), "%s kernel / f32 kernel, per byte", name);
        verdict(what, &best[t], &best[F32], FIRST_COMPARED, 0.5);
        snprintf(what, sizeof(what), "%s kernel / f32 kernel, per byte, from 64 KiB on", name);
        verdict(what, &best[t], &best[F32], FIRST_COMPARED + 3, 0.5);
        if (types[t].loop != NULL) {
            int at = 0;
            printf("%s: what the bare instructions reach of f32 per byte at their least: %.2f\n", name,
                   least_ratio(&loops[t], &best[F32], FIRST_COMPARED, &at));
        }
    }
}

static void every_kernel(void) {
    print_header("best level, GB/s");
    for (ddl_dtype dtype = DDL_F16; dtype < DDL__DTYPES; dtype++) {
        fill(dtype);
        for (ddl_op op = DDL_SUM; op < DDL__OPS; op++) {
            row r[1];
            int count = 0;
            add_row(r, &count, ddl__dtype_name(dtype), ddl__op_name(op), ddl__reduce_kernel(dtype, op));
            measure(r, count, ddl__dtype_bytes(dtype), dst);
            if (count > 0) {
                print_row(r);
            }
        }
    }
}

/* What reduce_many, scale and average cost, per byte of the result, on 1 MiB. */
static void whole_functions(void) {
    static const ddl_dtype dtypes[] = {DDL_F32, DDL_F64, DDL_F16, DDL_BF16, DDL_I32, DDL_I64};
    const char *srcs[4] = {a, b, a + (2 << 20), b + (2 << 20)};
    printf("\n1 MiB, GB/s of result  reduce_many(4)      scale    average\n");
    for (size_t k = 0; k < sizeof(dtypes) / sizeof(dtypes[0]); k++) {
        size_t bytes = 1 << 20, count = bytes / ddl__dtype_bytes(dtypes[k]);
        double best[3] = {1e9, 1e9, 1e9};
        ddl__reduction sum = ddl__reduction_of(DDL_SUM, dtypes[k], NULL);
        fill(dtypes[k]);
        for (int round = 0; round < 60; round++) {
            double t0 = now_s();
            ddl__reduce_many(&sum, dst, srcs, 4, bytes);
            double t1 = now_s();
            ddl__scale(dst, a, count, dtypes[k], 0.3);
            double t2 = now_s();
            ddl__average(dst, count, dtypes[k], 3);
            double each[3] = {t1 - t0, t2 - t1, now_s() - t2};
            for (int i = 0; i < 3; i++) {
                best[i] = each[i] < best[i] ? each[i] : best[i];
            }
        }
        printf("%-22s %14.2f %10.2f %10.2f\n", ddl__dtype_name(dtypes[k]), (double)bytes / best[0] * 1e-9,
               (double)bytes / best[1] * 1e-9, (double)bytes / best[2] * 1e-9);
    }
}

/* ---- optimizers and encoders ----
 * Each is held against the time that its bytes take at the measured bandwidth over arrays of the same size: what it reads
 * and writes of each element, once per pass that it has to make. Arrays that are read and not written move at that of a
 * loop that only reads, which a core does more slowly than `x += y`, as it has fewer lines under way; all others at that
 * of `x += y`. The last column counts all of them at that of `x += y`, which no loop reaches that mostly reads. A call gets a tensor of SLICE elements; there are
 * SLICES of them, more than caches hold, and those who take turns work far from each other. A figure is that of the
 * tenth part of the calls that were fastest, in time of the thread, so that other work on the machine matters little. */

enum { SLICE = 4 << 20, SLICES = 16, ELEMENTS = SLICE * SLICES, TRAIN_ROUNDS = 2, POWER_COLS = 2048 };
static float *weights, *gradients, *outputs, *states; /* states: two arrays, or residual and code */
static float *weight, *gradient, *output, *state, *code; /* of the slice; the second half of its state is `code` */

typedef struct train_row {
    char label[40];
    double bytes; /* moved per element, */
    double reads; /* of them in passes over arrays that are only read */
    double goal;  /* times memory's time */
    int is_sum, is_read, is_decode; /* is_sum: x += y, is_read: of one array; not of the library */
    ddl_optimizer optimizer;
    ddl_compression compression;
    double s[SLICES * TRAIN_ROUNDS];
} train_row;

static void run_optimizer(const ddl_optimizer *o) {
    double sums[2];
    ddl_optimizer_part part = {10, 1e-9, 0, 0, SLICE, weight, gradient, state, ELEMENTS, DDL_F32};
    if (ddl__optim_needs_sums(o)) {
        ddl__optim_sums(o, &part, sums);
    }
    ddl__optim_step(o, &part, sums);
}

/* One rank's work on one matrix, without the two all-reduces between. */
static void run_power(const ddl_compression *c) {
    enum { ROWS = SLICE / POWER_COLS };
    static float p[ROWS * 8], q[POWER_COLS * 8];
    ddl__matrix m = {ROWS, POWER_COLS, c->rank, state, p, q};
    ddl__cpu level = ddl__cpu_level();
    if (q[0] == 0) {
        ddl__power_begin(&m, 1);
    }
    ddl__sparse_correct(level, gradient, state, SLICE);
    ddl__power_left(level, &m);
    ddl__power_orthonormalize(&m);
    ddl__power_right(level, &m);
    ddl__power_rebuild(level, &m, output);
}

static void take_slice(int slice) {
    size_t at = (size_t)slice * SLICE;
    weight = weights + at;
    gradient = gradients + at;
    output = outputs + at;
    state = states + at;
    code = state + ELEMENTS;
}

static ddl__code_key key_of(int slice) { return (ddl__code_key){slice, 1, 2}; }

/* What a call begins with is its own, not what another row left; then other slices, to put it out of the caches. */
static void prepare(const train_row *row, int slice) {
    take_slice(slice);
    memset(state, 0, sizeof(float) * SLICE);
    memset(code, 0, sizeof(float) * SLICE);
    memset(output, 0, sizeof(float) * SLICE);
    if (row->is_decode) {
        ddl__encode(&row->compression, key_of(slice), gradient, row->compression.error_feedback ? state : NULL, SLICE,
                    code);
    }
    for (int other = 4; other < 8; other++) {
        float *far = outputs + (size_t)((slice + other) % SLICES) * SLICE;
        plain.f32(far, far, gradients + (far - outputs), SLICE);
    }
}

static volatile uint32_t largest;

static void run_train(const train_row *row, int slice) {
    const ddl_compression *c = &row->compression;
    ddl__code_key key = key_of(slice);
    if (row->is_sum) {
        plain.f32(output, output, gradient, SLICE);
    } else if (row->is_read) {
        largest += plain.read(gradient, SLICE);
    } else if (c->kind == DDL_COMPRESS_NONE) {
        run_optimizer(&row->optimizer);
    } else if (c->kind == DDL_COMPRESS_POWER) {
        run_power(c);
    } else if (row->is_decode) {
        ddl__decode_add(c, key, code, SLICE, output);
    } else {
        ddl__encode(c, key, gradient, c->error_feedback ? state : NULL, SLICE, code);
    }
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The time of this thread, without that of others on its core. */
static double cpu_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double tenth(double *s, int count) {
    qsort(s, (size_t)count, sizeof *s, ascending);
    return s[count / 10];
}

/* Gradients like those of a network: about normal, of many sizes. */
static void fill_gradient(void) {
    for (size_t i = 0; i < ELEMENTS; i++) {
        uint64_t h = ddl__mix(1, i);
        float x = (float)(h & 0xffff) + (float)(h >> 16 & 0xffff) + (float)(h >> 32 & 0xffff) - 98302.5f;
        gradients[i] = x * 1e-6f;
        weights[i] = 0.01f;
    }
    memset(states, 0, 2 * sizeof(float) * ELEMENTS);
    memset(outputs, 0, sizeof(float) * ELEMENTS);
}

static int add_optimizers(train_row *rows) {
    static const double bytes[] = {12, 20, 20, 28, 28, 28, 40}; /* LARS and LAMB: two passes, for the norms */
    int count = 0;
    for (ddl_optimizer_kind kind = DDL_SGD; kind <= DDL_LAMB; kind++, count++) {
        ddl_optimizer config = {.kind = kind, .weight_decay = 0.01};
        rows[count] = (train_row){.bytes = bytes[kind], .goal = 1.3};
        ddl__optim_init(NULL, &config, &rows[count].optimizer);
        snprintf(rows[count].label, sizeof rows[count].label, "%s", ddl__optim_name(kind));
    }
    return count;
}

static int add_encoders(train_row *rows) {
    static const ddl_compression configs[] = {
        {.kind = DDL_COMPRESS_F16},    {.kind = DDL_COMPRESS_BF16},
        {.kind = DDL_COMPRESS_F16, .error_feedback = 1}, {.kind = DDL_COMPRESS_INT8},
        {.kind = DDL_COMPRESS_QSGD},   {.kind = DDL_COMPRESS_QSGD, .levels = 127, .error_feedback = 1},
        {.kind = DDL_COMPRESS_SIGN},   {.kind = DDL_COMPRESS_MAJORITY},
        {.kind = DDL_COMPRESS_TOP_K},  {.kind = DDL_COMPRESS_TOP_K, .ratio = 0.001},
        {.kind = DDL_COMPRESS_RANDOM_K}, {.kind = DDL_COMPRESS_POWER, .rank = 1},
        {.kind = DDL_COMPRESS_POWER, .rank = 4}};
    int count = 0;
    for (size_t i = 0; i < sizeof configs / sizeof configs[0]; i++) {
        for (int decode = 0; decode < 2; decode++) {
            train_row row = {.goal = 1.3, .is_decode = decode};
            ddl__compress_init(NULL, &configs[i], &row.compression);
            const ddl_compression *c = &row.compression;
            int sparse = ddl__compress_is_sparse(c->kind), power = c->kind == DDL_COMPRESS_POWER;
            if (decode && (sparse || power || configs[i].error_feedback)) {
                continue; /* a few scattered additions; part of the other row; as the row before */
            }
            row.bytes = (decode ? 8 : c->error_feedback ? 12 : 4) + (double)ddl__code_bytes(c, SLICE) / SLICE;
            row.bytes = power ? 32 : row.bytes; /* correct 12, P 4, Q 4, rebuild 12 */
            row.reads = power ? 8 : decode || c->error_feedback ? 0 : 4;
            row.goal = c->kind == DDL_COMPRESS_TOP_K ? 4 : 1.3;
            snprintf(row.label, sizeof row.label, "%s%s%s%.3g", ddl__compress_name(c->kind),
                     decode ? " decode and add" : configs[i].error_feedback ? " with feedback" : "", sparse ? ", ratio "
                     : power ? ", rank " : ", bits ", sparse ? c->ratio : power ? c->rank
                     : 8.0 * (double)ddl__code_bytes(c, SLICE) / SLICE);
            rows[count++] = row;
        }
    }
    return count;
}

/* Keeps the rows whose label has `part` in it. */
static int keep_rows(train_row *rows, int count, const char *part) {
    int kept = 0;
    for (int r = 0; r < count; r++) {
        if (strstr(rows[r].label, part) != NULL) {
            rows[kept++] = rows[r];
        }
    }
    return kept;
}

static void train(const char *part) {
    enum { LOOPS = 2 };
    static train_row rows[48] = {{.is_sum = 1}, {.is_read = 1}};
    int count = LOOPS + add_optimizers(rows + LOOPS);
    count += add_encoders(rows + count);
    count = LOOPS + keep_rows(rows + LOOPS, count - LOOPS, part);
    weights = aligned_alloc(4096, 5 * (sizeof(float) * ELEMENTS + 8192));
    if (weights == NULL) {
        printf("\n%d MiB for optimizers and encoders are not to be had\n", 5 * (ELEMENTS >> 18));
        return;
    }
    gradients = weights + ELEMENTS + 1024;
    outputs = gradients + ELEMENTS + 1024;
    states = outputs + ELEMENTS + 1024;
    fill_gradient();
    for (int turn = 0; turn < SLICES * TRAIN_ROUNDS; turn++) {
        for (int r = 0; r < count; r++) {
            prepare(&rows[r], (turn + 3 * r) % SLICES);
            double start = cpu_s();
            run_train(&rows[r], (turn + 3 * r) % SLICES);
            rows[r].s[turn] = cpu_s() - start;
        }
    }
    double per_byte = tenth(rows[0].s, SLICES * TRAIN_ROUNDS) / (12.0 * SLICE);
    double per_read = tenth(rows[1].s, SLICES * TRAIN_ROUNDS) / (4.0 * SLICE);
    printf("\n%d tensors of %d elements; x += y moves %.2f GB/s, a loop that reads %.2f GB/s\n"
           "%-32s %14s %12s %10s %12s %30s\n", SLICES, SLICE, 1e-9 / per_byte, 1e-9 / per_read, "one core",
           "bytes/element", "ns/element", "GB/s", "of memory", "all bytes as x += y");
    for (int r = LOOPS; r < count; r++) {
        double s = tenth(rows[r].s, SLICES * TRAIN_ROUNDS), bytes = rows[r].bytes, reads = rows[r].reads;
        double ratio = s / (((bytes - reads) * per_byte + reads * per_read) * SLICE);
        printf("%-32s %14.2f %12.3f %10.2f %9.2f x (asked %.1f: %-11s) %9.2f x\n", rows[r].label, bytes,
               s / SLICE * 1e9, bytes * SLICE / s * 1e-9, ratio, rows[r].goal,
               ratio <= rows[r].goal ? "reached" : "not reached", s / (bytes * per_byte * SLICE));
    }
}

int main(int argc, char **argv) {
    /* Not a power of two apart: that slows any loop over three buffers on processors that guess the way of their first
     * level from a few bits of the address. */
    dst = aligned_alloc(4096, MAX_BYTES + 3 * 4096);
    a = aligned_alloc(4096, MAX_BYTES + 5 * 4096);
    b = aligned_alloc(4096, MAX_BYTES + 8 * 4096);
    if (dst == NULL || a == NULL || b == NULL) {
        fprintf(stderr, "kernels: no memory for three buffers of %d bytes\n", MAX_BYTES);
        return 1;
    }
    memset(dst, 0, MAX_BYTES);
    if (argc > 1 && strcmp(argv[1], "train") == 0) {
        train(argc > 2 ? argv[2] : "");
        return 0;
    }
    compare_all(0);
    if (argc > 1 && strcmp(argv[1], "all") == 0) {
        compare_all(1);
        every_kernel();
    }
    whole_functions();
    train("");
    return 0;
}

#endif

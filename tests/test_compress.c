/* Gradient codes on one rank, against plain loops: blocks, casts, top-k, random-k, merge, PowerSGD's algebra; every
 * instruction set bit for bit; error feedback; what is not finite; configs that make no sense.
 * tests/run: variants=gcc,asan,arm64 libs=-lm quick=yes */
#include "test.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O2", "fp-contract=fast") /* fuses what may be fused, so that a missing DDL__ROUNDED shows */
#endif
#include "../src/compress/config.h"
#include "../src/compress/power.h"
#include "../src/compress/sparse.h"

#include <math.h>

enum { MAX = 1500 };
static const int counts[] = {0, 1, 2, 15, 17, 63, 64, 65, 300, 511, 512, 513, 1024, MAX};
enum { COUNTS = sizeof(counts) / sizeof(counts[0]) };

/* Every code that stands for one rank's gradient by itself, with error feedback where it may be had. */
static const ddl_compression codes[] = {
    {.kind = DDL_COMPRESS_F16, .error_feedback = 1},   {.kind = DDL_COMPRESS_BF16, .error_feedback = 1},
    {.kind = DDL_COMPRESS_INT8},                       {.kind = DDL_COMPRESS_QSGD, .error_feedback = 1},
    {.kind = DDL_COMPRESS_QSGD, .error_feedback = 1, .levels = 1},
    {.kind = DDL_COMPRESS_QSGD, .error_feedback = 1, .levels = 127},
    {.kind = DDL_COMPRESS_SIGN},                       {.kind = DDL_COMPRESS_TOP_K, .ratio = 0.05},
    {.kind = DDL_COMPRESS_RANDOM_K, .ratio = 0.05},    {.kind = DDL_COMPRESS_TOP_K, .k = 1 << 30}};
enum { CODES = sizeof(codes) / sizeof(codes[0]) };

static ddl_compression resolved(ddl_compression config) {
    ddl_compression c = {0};
    ddl__sentence sentence = {DDL_OK, ""};
    CHECK_EQ(ddl__compress_init(&sentence, &config, &c), DDL_OK);
    return c;
}

/* Roughly normal, of very different sizes, the same for the same arguments. */
static float noise(int element, int step) {
    uint64_t h = ddl__mix((uint64_t)element * 7919, (uint64_t)step);
    double x = 0;
    for (int i = 0; i < 4; i++) {
        x += (double)(h >> (16 * i) & 0xffff) / 65536 - 0.5;
    }
    return (float)(x * (element % 5 == 0 ? 3 : 0.2));
}

static void fill(float *g, int n, int step) {
    for (int i = 0; i < n; i++) {
        g[i] = noise(i, step);
    }
}

/* One code on one level: encodes g with e, decodes into sum (that begins at zero). The code is fenced. */
static uint64_t code_once(ddl__cpu level, const ddl_compression *c, ddl__code_key key, const float *g, float *e, int n,
                          float *sum, unsigned char *code) {
    size_t bytes = ddl__code_bytes(c, n);
    memset(code, 0xa5, bytes + 16);
    uint64_t odd = ddl__encode_at(level, c, key, g, c->error_feedback ? e : NULL, n, code);
    for (size_t i = bytes; i < bytes + 16; i++) {
        CHECK_EQ(code[i], 0xa5);
    }
    memset(sum, 0, (size_t)n * sizeof(float));
    ddl__decode_add_at(level, c, key, code, n, sum);
    return odd;
}

static _Alignas(64) unsigned char code_a[MAX * 8 + 64], code_b[MAX * 8 + 64];

TEST(what_is_sent_and_the_residual_are_the_gradient) {
    static float g[MAX], e[MAX], sum[MAX];
    static double total[MAX], sent_total[MAX];
    for (int k = 0; k < CODES; k++) {
        ddl_compression c = resolved(codes[k]);
        memset(e, 0, sizeof e);
        memset(total, 0, sizeof total);
        memset(sent_total, 0, sizeof sent_total);
        for (int step = 1; step <= 40; step++) {
            fill(g, MAX, step);
            CHECK_EQ(code_once(ddl__cpu_level(), &c, (ddl__code_key){step, 3, 1}, g, e, MAX, sum, code_a), 0);
            int moved = 0;
            for (int i = 0; i < MAX; i++) {
                total[i] += (double)g[i];
                sent_total[i] += (double)sum[i];
                moved += sum[i] != 0;
                double error = fabs(sent_total[i] + (double)e[i] - total[i]);
                CHECK(error <= 1e-5 * (1 + fabs(total[i])));
            }
            CHECK(moved > 0);
        }
    }
}

TEST(all_levels_give_the_same_bits_at_every_count) {
    static float g[MAX], e[2][MAX], sum[2][MAX];
    for (int k = 0; k < CODES; k++) {
        ddl_compression c = resolved(codes[k]);
        for (int i = 0; i < COUNTS; i++) {
            int n = counts[i];
            size_t bytes = ddl__code_bytes(&c, n);
            for (ddl__cpu level = DDL__CPU_PORTABLE; level <= ddl__cpu_level(); level++) {
                fill(e[0], n, 100);
                fill(e[1], n, 100);
                fill(g, n, 101);
                code_once(DDL__CPU_PORTABLE, &c, (ddl__code_key){7, 1, 2}, g, e[0], n, sum[0], code_a);
                code_once(level, &c, (ddl__code_key){7, 1, 2}, g, e[1], n, sum[1], code_b);
                CHECK_EQ(memcmp(code_a, code_b, bytes), 0);
                CHECK_EQ(memcmp(e[0], e[1], (size_t)n * 4), 0);
                fill(sum[0], n, 102);
                fill(sum[1], n, 102);
                ddl__decode_add_at(DDL__CPU_PORTABLE, &c, (ddl__code_key){7, 1, 2}, code_a, n, sum[0]);
                ddl__decode_add_at(level, &c, (ddl__code_key){7, 1, 2}, code_b, n, sum[1]);
                CHECK_EQ(memcmp(sum[0], sum[1], (size_t)n * 4), 0);
                float p[] = {0.3f, -1.7f, 0.1f, 2, 1e-3f, -0.7f};
                ddl__matrix m[2] = {{6, n / 6, 1, g, p, sum[0]}, {6, n / 6, 1, g, p, sum[1]}};
                ddl__power_right(DDL__CPU_PORTABLE, &m[0]);
                ddl__power_right(level, &m[1]);
                CHECK_EQ(memcmp(sum[0], sum[1], (size_t)n * 4), 0);
            }
        }
    }
}

/* The largest value times the inverse is rounded twice, and dithering adds up to one step: levels must still end at the
 * last one, whose successor is another number in the code's bits. */
TEST(levels_end_at_the_last_one) {
    const int levels[] = {1, 6, 7, 100, 127};
    static float g[DDL__CODE_BLOCK], sum[DDL__CODE_BLOCK];
    for (int l = 0; l < 6; l++) { /* the last: int8 */
        ddl_compression c = resolved((ddl_compression){.kind = l < 5 ? DDL_COMPRESS_QSGD : DDL_COMPRESS_INT8,
                                                       .levels = l < 5 ? levels[l] : 0, .error_feedback = -1});
        for (int step = 0; step < 300; step++) {
            float most = 0;
            fill(g, DDL__CODE_BLOCK, step);
            for (int i = 0; i < DDL__CODE_BLOCK; i++) {
                most = fmaxf(most, fabsf(g[i]));
            }
            for (int i = 0; i < DDL__CODE_BLOCK; i += 3) { /* many draws at both ends */
                g[i] = i % 2 == 0 ? most : -most;
            }
            code_once((ddl__cpu)(step % ((int)ddl__cpu_level() + 1)), &c, (ddl__code_key){step, 0, 0}, g, NULL,
                      DDL__CODE_BLOCK, sum, code_a);
            for (int i = 0; i < DDL__CODE_BLOCK; i++) {
                CHECK(i % 3 != 0 ? fabsf(sum[i]) <= most * 1.000001f : fabsf(sum[i] - g[i]) <= most * 1e-6f);
            }
        }
    }
}

/* The code of QSGD by a plain loop over the formula of the draw: what any processor must make of the same seed. */
TEST(qsgd_is_the_draw_of_its_formula) {
    static float g[MAX], sum[MAX];
    const int levels[] = {1, 7, 127};
    for (int l = 0; l < 3; l++) {
        ddl_compression c = resolved((ddl_compression){.kind = DDL_COMPRESS_QSGD, .levels = levels[l], .seed = 3});
        ddl__code_key key = {4, 5, 6};
        uint64_t stream = ddl__code_stream(&c, key);
        fill(g, MAX, 77);
        code_once(ddl__cpu_level(), &c, key, g, NULL, MAX, sum, code_a);
        for (int i = 0; i < MAX; i++) {
            float most = 0;
            for (int j = i / 512 * 512; j < MAX && j < i / 512 * 512 + 512; j++) {
                most = fmaxf(most, fabsf(g[j]));
            }
            uint32_t h = ((uint32_t)i & ~16u) * 0x9e3779b9u + (uint32_t)stream;
            h = (h ^ h >> 16) * 0x7feb352du + (uint32_t)(stream >> 32);
            h = (h ^ h >> 15) * 0x846ca68bu;
            h ^= h >> 16;
            double draw = (double)(i & 16 ? h >> 17 : h & 0x7fff);
            float scaled = g[i] * ((float)levels[l] / most * 32768.0f);
            double level = floor((nearbyint((double)scaled) + draw) / 32768);
            CHECK(fabs((double)sum[i] - level * (double)most / levels[l]) <= 1e-6 * (double)most);
        }
    }
}

/* Large enough that casts go past the caches, at addresses of every kind; values that are not finite and too large ones
 * among them. */
TEST(large_casts_are_those_of_small_ones) {
    enum { N = DDL__STREAM_LEAST / 2 + 700 };
    const size_t off[] = {0, 2, 4, 36, 62};
    float *g = malloc(N * sizeof *g), *e = malloc(N * sizeof *e);
    unsigned char *code = malloc(2 * N + 128), whole[2 * DDL__CODE_BLOCK], *from;
    REQUIRE(g != NULL && e != NULL && code != NULL);
    for (int k = 0; k < 4; k++) {
        ddl_compression c = resolved((ddl_compression){.kind = k < 2 ? DDL_COMPRESS_F16 : DDL_COMPRESS_BF16,
                                                       .error_feedback = k % 2 == 0 ? -1 : 1});
        for (int o = 0; o < 5; o++) {
            for (int i = 0; i < N; i++) {
                g[i] = i == 3       ? -0.0f
                       : i == 70000 ? NAN
                       : i == 90001 ? -INFINITY
                       : i == 5     ? 1e6f
                                    : (float)((unsigned)i * 7919u % 4096u) * 1e-4f - 0.2f;
                e[i] = 0;
            }
            from = code + (64 - (uintptr_t)code % 64) + off[o];
            memset(code, 0xa5, 2 * N + 128);
            CHECK_EQ(ddl__encode(&c, (ddl__code_key){1, 1, 1}, g, k % 2 == 0 ? NULL : e, N, from), 2);
            CHECK_EQ(from[-1], 0xa5);
            CHECK_EQ(from[2 * N], 0xa5);
            CHECK(k % 2 == 1 || (from[6] == 0 && from[7] == 0x80)); /* without a residual nothing is added to -0 */
            for (int i = 0; i < N; i += DDL__CODE_BLOCK) {
                int count = N - i < DDL__CODE_BLOCK ? N - i : DDL__CODE_BLOCK;
                float rest[DDL__CODE_BLOCK] = {0};
                ddl__encode_at(DDL__CPU_PORTABLE, &c, (ddl__code_key){1, 1, 1}, g + i, k % 2 == 0 ? NULL : rest, count,
                               whole);
                CHECK_EQ(memcmp(whole, from + 2 * i, 2 * (size_t)count), 0);
                CHECK(k % 2 == 0 || memcmp(rest, e + i, (size_t)count * sizeof *e) == 0);
            }
        }
    }
    free(g);
    free(e);
    free(code);
}

TEST(sizes_are_those_of_the_manual) {
    const struct {
        ddl_compression config;
        double bytes; /* per element, of 51,200 */
    } rows[] = {{{.kind = DDL_COMPRESS_F16}, 2},
                {{.kind = DDL_COMPRESS_INT8}, 1 + 4.0 / 512},
                {{.kind = DDL_COMPRESS_QSGD}, 0.5 + 4.0 / 512},
                {{.kind = DDL_COMPRESS_QSGD, .levels = 8}, 1 + 4.0 / 512},
                {{.kind = DDL_COMPRESS_SIGN}, 0.125 + 4.0 / 512},
                {{.kind = DDL_COMPRESS_TOP_K}, 0.08},
                {{.kind = DDL_COMPRESS_TOP_K, .k = 256}, 0.04},
                {{.kind = DDL_COMPRESS_RANDOM_K, .ratio = 1.0 / 16}, 0.25}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        ddl_compression c = resolved(rows[i].config);
        CHECK_EQ(ddl__code_bytes(&c, 51200), (size_t)(rows[i].bytes * 51200 + 0.5));
        CHECK_EQ(ddl__code_bytes(&c, 0), 0u);
    }
}

/* Values of a block by a plain loop; the nearest level is not asked for within 1e-4 of a tie. */
TEST(int8_is_the_nearest_of_255_levels_per_512) {
    static float g[MAX], e[MAX], sum[MAX];
    ddl_compression c = resolved((ddl_compression){.kind = DDL_COMPRESS_INT8});
    for (int k = 0; k < COUNTS; k++) {
        int n = counts[k], compared = 0;
        fill(g, n, k);
        memset(e, 0, sizeof e);
        code_once(ddl__cpu_level(), &c, (ddl__code_key){1, 0, 0}, g, e, n, sum, code_a);
        for (int i = 0; i < n; i++) {
            double most = 0;
            for (int j = i / 512 * 512; j < n && j < i / 512 * 512 + 512; j++) {
                most = fmax(most, fabs((double)g[j]));
            }
            double level = (double)g[i] / most * 127, off = fabs(level - trunc(level)) - 0.5;
            if (fabs(off) > 1e-4) {
                CHECK(fabs(nearbyint(level) * most / 127 - (double)sum[i]) <= 1e-6 * most);
                compared++;
            }
        }
        CHECK(compared >= n - n / 100 - 1);
    }
}

TEST(signs_go_with_the_mean_magnitude_of_512) {
    static float g[MAX], e[MAX], sum[MAX];
    ddl_compression c = resolved((ddl_compression){.kind = DDL_COMPRESS_SIGN});
    for (int k = 0; k < COUNTS; k++) {
        int n = counts[k];
        fill(g, n, k);
        memset(e, 0, sizeof e);
        if (n > 2) {
            g[2] = -0.0f;
        }
        code_once(ddl__cpu_level(), &c, (ddl__code_key){1, 0, 0}, g, e, n, sum, code_a);
        for (int i = 0; i < n; i++) {
            double mean = 0;
            int begin = i / 512 * 512, end = begin + 512 < n ? begin + 512 : n;
            for (int j = begin; j < end; j++) {
                mean += fabs((double)g[j]) / (end - begin);
            }
            CHECK(fabs((double)sum[i] - (g[i] < 0 ? -mean : mean)) <= 1e-5 * mean);
        }
    }
}

/* 64 values, 4,000 draws each. The mean of the draws of one value has a standard deviation of
 * step * sqrt(p (1 - p) / 4000), p the place between two levels. With the right mean, one of 64 deviates by more than 5
 * of them with a probability below 4e-5; a bias of a tenth of a step is 13 of them. */
TEST(qsgd_is_unbiased_with_confidence_0_99996) {
    enum { N = 64, DRAWS = 4000 };
    const int levels[] = {1, 7, 127};
    for (int l = 0; l < 3; l++) {
        ddl_compression c = resolved((ddl_compression){.kind = DDL_COMPRESS_QSGD, .levels = levels[l], .seed = 5});
        float g[N], sum[N];
        double mean[N] = {0}, z2 = 0;
        fill(g, N, 9);
        g[0] = 0.75f; /* the largest */
        for (int i = 1; i < N; i++) {
            g[i] = g[i] > 0.7f ? 0.7f : g[i] < -0.7f ? -0.7f : g[i];
        }
        for (int draw = 0; draw < DRAWS; draw++) {
            code_once(ddl__cpu_level(), &c, (ddl__code_key){draw, 0, 0}, g, NULL, N, sum, code_a);
            for (int i = 0; i < N; i++) {
                mean[i] += (double)sum[i] / DRAWS;
                CHECK(fabs((double)sum[i] - (double)g[i]) <= 0.7500001 / levels[l]);
            }
        }
        for (int i = 0; i < N; i++) {
            double step = 0.75 / levels[l], y = fabs((double)g[i]) / step, p = y - floor(y);
            double deviation = step * sqrt(p * (1 - p) / DRAWS) + 1e-7;
            double z = (mean[i] - (double)g[i]) / deviation;
            z2 += z * z;
            CHECK(fabs(z) < 5);
        }
        CHECK(z2 > 20 && z2 < 130); /* 64 squares of standard normals: 64 +- 11 */
    }
}

TEST(qsgd_draws_depend_on_seed_step_tensor_and_rank_alone) {
    float g[300], sum[300];
    ddl_compression c = resolved((ddl_compression){.kind = DDL_COMPRESS_QSGD}), d = c;
    d.seed = 1;
    size_t bytes = ddl__code_bytes(&c, 300);
    fill(g, 300, 1);
    code_once(ddl__cpu_level(), &c, (ddl__code_key){1, 2, 3}, g, NULL, 300, sum, code_a);
    code_once(ddl__cpu_level(), &c, (ddl__code_key){1, 2, 3}, g, NULL, 300, sum, code_b);
    CHECK_EQ(memcmp(code_a, code_b, bytes), 0);
    const ddl__code_key others[] = {{2, 2, 3}, {1, 3, 3}, {1, 2, 4}, {1, 2, 3}};
    for (int i = 0; i < 4; i++) {
        code_once(ddl__cpu_level(), i == 3 ? &d : &c, others[i], g, NULL, 300, sum, code_b);
        CHECK(memcmp(code_a, code_b, bytes) != 0);
    }
}

/* ---- sparse ---- */

static const float *sort_values;
static int by_magnitude(const void *a, const void *b) {
    int i = *(const int *)a, j = *(const int *)b;
    float x = sort_values[i], y = sort_values[j];
    int rank_x = isnan(x) ? 1 : 0, rank_y = isnan(y) ? 1 : 0;
    if (rank_x != rank_y) {
        return rank_y - rank_x;
    }
    if (!rank_x && fabsf(x) != fabsf(y)) {
        return fabsf(x) < fabsf(y) ? 1 : -1;
    }
    return i - j;
}

static int ascending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}

/* chosen[i]: whether i is among the k largest, of equals the first. */
static void oracle_top(const float *x, int n, int k, int *chosen) {
    static int order[2 * MAX];
    for (int i = 0; i < n; i++) {
        order[i] = i;
        chosen[i] = 0;
    }
    sort_values = x;
    qsort(order, (size_t)n, sizeof order[0], by_magnitude);
    for (int i = 0; i < k; i++) {
        chosen[order[i]] = 1;
    }
}

TEST(top_k_is_that_of_a_full_sort) {
    static float g[MAX], e[MAX], x[MAX];
    static int chosen[MAX];
    const int ks[] = {1, 2, 20, 300, MAX};
    for (int variant = 0; variant < 4; variant++) {
        for (int i = 0; i < COUNTS; i++) {
            int n = counts[i];
            for (int m = 0; m < 5; m++) {
                ddl_compression c = resolved((ddl_compression){.kind = DDL_COMPRESS_TOP_K, .k = ks[m]});
                int k = (int)ddl__compress_kept(&c, n);
                CHECK_EQ(k, n < ks[m] ? n : ks[m]);
                fill(e, n, 50);
                for (int j = 0; j < n; j++) { /* plain; many equal; all equal; equal in their first bits */
                    g[j] = variant == 0 ? noise(j, 3) : variant == 1 ? (float)(j % 7 - 3)
                           : variant == 2 ? -2.0f : 1 + (float)(j * 37 % 1000) * 1e-7f;
                    e[j] = variant == 0 ? e[j] : 0;
                    x[j] = g[j] + e[j];
                }
                oracle_top(x, n, k, chosen);
                ddl__encode(&c, (ddl__code_key){0, 0, 0}, g, e, n, code_a);
                const int32_t *places = (const int32_t *)(const void *)code_a;
                const float *values = (const float *)(const void *)code_a + k;
                int taken = 0;
                for (int j = 0; j < n; j++) {
                    if (chosen[j]) {
                        REQUIRE(taken < k);
                        CHECK_EQ(places[taken], j);
                        CHECK(values[taken] == x[j] && e[j] == 0);
                        taken++;
                    } else {
                        CHECK(e[j] == x[j]);
                    }
                }
                CHECK_EQ(taken, k);
            }
        }
    }
}

/* Large enough to be sampled first. Variant 0: the guess holds. 1: the sampled blocks are large, so that the guess is
 * too high. 2: they are small, so that it is too low. 3: all equal. 4: it holds, and all agree in their first bits. 5: it holds, but those that reach it are too
 * close to each other to count. 6: it holds, but the k-th is far beyond it. The result is the same full sort in each case. */
TEST(top_k_of_a_large_array_is_that_of_a_full_sort_whatever_the_guess) {
    enum { N = 200003, K = 1000 };
    static float g[N], e[N], x[N], magnitudes[N];
    static _Alignas(64) unsigned char code[8 * K];
    for (int variant = 0; variant < 7; variant++) {
        for (ddl__cpu level = DDL__CPU_PORTABLE; level <= ddl__cpu_level(); level++) {
            for (int i = 0; i < N; i++) {
                int sampled = i / 512 % 32 == 0;
                g[i] = variant == 3 ? -1 : noise(i, 5) * (sampled && variant == 1 ? 100.0f : sampled && variant == 2 ? 0.3f : 1);
                g[i] = variant == 4 ? 2 + (float)((int64_t)i * 7919 % N) * 1e-6f : g[i];
                if (variant >= 5) { /* some 1400 that are larger, evenly among the others */
                    int large = i % 143 == 0, nth = i / 143;
                    g[i] = !large ? 0.01f * noise(i, 5) : variant == 5 ? 2 + (float)(nth * 37 % 1400) * 2.4e-7f
                           : nth % 7 < 1 ? 10 + (float)nth * 1e-4f : -100 - (float)nth * 1e-3f;
                }
                e[i] = variant >= 3 ? 0 : noise(i, 6) * (variant > 0 ? 0 : 1);
                x[i] = g[i] + e[i];
                magnitudes[i] = -fabsf(x[i]);
            }
            qsort(magnitudes, N, sizeof magnitudes[0], ascending);
            uint32_t guess = ddl__guess_threshold(level, g, e, N, K);
            int64_t reached = 0;
            for (int i = 0; i < N; i++) {
                reached += ddl__magnitude_bits(x[i]) >= guess;
            }
            CHECK_EQ(variant == 0 || variant >= 4, reached >= K && reached <= 2 * K); /* each way is taken */
            CHECK_EQ(ddl__top_k_encode(level, g, e, N, K, (int32_t *)(void *)code), 0);
            const int32_t *places = (const int32_t *)(const void *)code;
            const float *values = (const float *)(const void *)code + K;
            for (int i = 0, at = 0; i < N; i++) {
                if (at < K && places[at] == i) {
                    CHECK(values[at] == x[i] && e[i] == 0 && fabsf(x[i]) >= -magnitudes[K - 1]);
                    at++;
                } else {
                    CHECK(e[i] == x[i] && fabsf(x[i]) <= -magnitudes[K - 1]);
                }
                CHECK(i < N - 1 || at == K);
            }
        }
    }
}

TEST(merging_two_sparse_arrays_is_top_k_of_their_sum) {
    enum { N = 400 };
    static float dense[2][N], sum[N], e[N], zero[N], rest[N];
    static int chosen[N];
    const int ks[] = {1, 7, 100, N};
    for (int m = 0; m < 4; m++) {
        int k = ks[m], places[2 * N];
        float values[2 * N];
        ddl_compression c = resolved((ddl_compression){.kind = DDL_COMPRESS_TOP_K, .k = k});
        for (int s = 0; s < 2; s++) {
            memset(e, 0, sizeof e);
            fill(zero, N, 60 + s);
            ddl__encode(&c, (ddl__code_key){0, 0, 0}, zero, e, N, s == 0 ? code_a : code_b);
            memset(dense[s], 0, sizeof dense[s]);
            ddl__decode_add(&c, (ddl__code_key){0, 0, 0}, s == 0 ? code_a : code_b, N, dense[s]);
        }
        for (int i = 0; i < N; i++) {
            sum[i] = dense[0][i] + dense[1][i];
        }
        oracle_top(sum, N, k, chosen);
        const int32_t *a = (const int32_t *)(const void *)code_a, *b = (const int32_t *)(const void *)code_b;
        ddl__top_k_merge(a, (const float *)a + k, b, (const float *)b + k, k, places, values, memset(rest, 0, sizeof rest));
        for (int i = 0, at = 0; i < N; i++) {
            CHECK(rest[i] == (chosen[i] ? 0 : sum[i]));
            if (chosen[i]) {
                CHECK_EQ(places[at], i);
                CHECK(values[at] == sum[i]);
                at++;
            }
        }
    }
}

TEST(places_from_the_wire_are_checked) {
    int32_t good[] = {0, 4, 9}, twice[] = {0, 4, 4}, low[] = {-1, 4, 9}, high[] = {0, 4, 10};
    CHECK(ddl__places_ascend(good, 3, 10) && ddl__places_ascend(good, 0, 0));
    CHECK(!ddl__places_ascend(twice, 3, 10) && !ddl__places_ascend(low, 3, 10) && !ddl__places_ascend(high, 3, 10));
    ddl_compression c = resolved((ddl_compression){.kind = DDL_COMPRESS_TOP_K, .k = 2});
    float sum[3] = {0};
    const int32_t places[2] = {-7, 1 << 30};
    const float values[2] = {1, 2};
    memcpy(code_a, places, 8);
    memcpy(code_a + 8, values, 8);
    ddl__decode_add(&c, (ddl__code_key){0, 0, 0}, code_a, 3, sum);
    CHECK(sum[0] == 0 && sum[1] == 0 && sum[2] == 0);
}

TEST(random_k_draws_places_that_are_distinct_and_reach_everywhere) {
    enum { N = 100, K = 7, STEPS = 3000 };
    int seen[N] = {0}, moved = 0;
    ddl_compression c = resolved((ddl_compression){.kind = DDL_COMPRESS_RANDOM_K, .k = K});
    for (int step = 0; step < STEPS; step++) {
        uint64_t stream = ddl__code_stream(&c, (ddl__code_key){step, 1, 0});
        int64_t last = -1;
        for (int j = 0; j < K; j++) {
            int64_t at = ddl__random_place(stream, N, K, j);
            CHECK(at > last && at < N);
            moved += at != ddl__random_place(stream + 1, N, K, j);
            seen[at < N ? at : 0]++;
            last = at;
        }
    }
    for (int i = 0; i < N; i++) { /* expected 210, standard deviation 14 */
        CHECK(seen[i] > 210 - 84 && seen[i] < 210 + 84);
    }
    CHECK(moved > STEPS * K / 2);
    for (int j = 0; j < N; j++) {
        CHECK_EQ(ddl__random_place(99, N, N, j), j); /* k = n takes all */
    }
}

/* ---- what is not finite ---- */

TEST(what_is_not_finite_arrives_is_counted_and_leaves_the_rest_alone) {
    static float g[MAX], e[MAX], sum[MAX], clean[MAX], clean_e[MAX], clean_sum[MAX];
    const int bad[] = {3, 600, 601};
    for (int k = 0; k < CODES; k++) {
        ddl_compression c = resolved(codes[k]);
        fill(g, MAX, 1);
        memset(e, 0, sizeof e);
        memset(clean_e, 0, sizeof clean_e);
        memcpy(clean, g, sizeof g);
        g[3] = NAN;
        g[600] = INFINITY;
        g[601] = -INFINITY;
        CHECK_EQ(code_once(ddl__cpu_level(), &c, (ddl__code_key){1, 0, 0}, g, e, MAX, sum, code_a), 3);
        code_once(ddl__cpu_level(), &c, (ddl__code_key){1, 0, 0}, clean, clean_e, MAX, clean_sum, code_b);
        for (int i = 0; i < MAX; i++) {
            int is_bad = i == bad[0] || i == bad[1] || i == bad[2];
            if (is_bad && c.kind == DDL_COMPRESS_RANDOM_K) {
                CHECK(!isfinite(sum[i]) || !isfinite(e[i])); /* drawn now or later */
            } else if (is_bad) {
                CHECK(!isfinite(sum[i]) && e[i] == 0);
            } else {
                CHECK(isfinite(sum[i]) && isfinite(e[i]));
                CHECK(fabsf(sum[i] + e[i] - clean[i]) <= 1e-5f);
                if (i >= 1024 && (c.kind < DDL_COMPRESS_TOP_K)) { /* a block without: not a bit differs */
                    CHECK(sum[i] == clean_sum[i]);
                }
            }
        }
        if (c.kind != DDL_COMPRESS_SIGN && c.kind != DDL_COMPRESS_RANDOM_K) {
            CHECK(isnan(sum[3]) && sum[600] == INFINITY && sum[601] == -INFINITY);
        }
    }
}

TEST(a_block_of_signs_keeps_which_infinity_it_was) {
    static float g[600], e[600], sum[600];
    ddl_compression c = resolved((ddl_compression){.kind = DDL_COMPRESS_SIGN});
    fill(g, 600, 1);
    g[5] = g[7] = -INFINITY;
    CHECK_EQ(code_once(ddl__cpu_level(), &c, (ddl__code_key){1, 0, 0}, g, e, 600, sum, code_a), 2);
    CHECK(sum[5] == -INFINITY && sum[7] == -INFINITY && sum[6] == 0 && e[6] == g[6] && sum[550] != 0);
}

TEST(extreme_finite_values_stay_finite) {
    static float g[MAX], e[MAX], sum[MAX];
    const float sizes[] = {3.4e38f, 1e5f, 1e-38f, 1e-45f};
    for (int k = 0; k < CODES; k++) {
        ddl_compression c = resolved(codes[k]);
        for (int s = 0; s < 4; s++) {
            for (int i = 0; i < MAX; i++) {
                g[i] = i % 3 == 0 ? sizes[s] : -sizes[s] / 2;
            }
            memset(e, 0, sizeof e);
            CHECK_EQ(code_once(ddl__cpu_level(), &c, (ddl__code_key){1, 0, 0}, g, e, MAX, sum, code_a), 0);
            for (int i = 0; i < MAX; i++) {
                CHECK(isfinite(sum[i]) && isfinite(e[i]));
                CHECK(fabsf(sum[i] + e[i] - g[i]) <= 1e-5f * fabsf(g[i]));
            }
        }
    }
}

/* ---- PowerSGD ---- */

enum { ROWS = 40, COLS = 70, POWER_STEPS = 6 };

/* One rank's iteration: what an average over one rank leaves. */
static void power_step(ddl__matrix *a, const float *g, float *out) {
    ddl__cpu level = ddl__cpu_level();
    ddl__sparse_correct(level, g, a->m, ROWS * COLS);
    ddl__power_left(level, a);
    ddl__power_orthonormalize(a);
    ddl__power_right(level, a);
    ddl__power_rebuild(level, a, out);
}

/* The same bits at every level as in a plain loop, each product and each sum rounded: ranks with other processors agree. */
TEST(a_matrix_is_rebuilt_to_the_same_bits_at_every_level) {
    static float m[ROWS * COLS], before[ROWS * COLS], p[ROWS * 4], q[COLS * 4], out[ROWS * COLS];
    for (ddl__cpu level = DDL__CPU_PORTABLE; level <= ddl__cpu_level(); level++) {
        for (int cols = 1; cols <= COLS; cols += 3) { /* also such that no vector is whole */
            ddl__matrix a = {ROWS, cols, 1 + cols % 4, m, p, q};
            for (int i = 0; i < ROWS * 4; i++) {
                p[i] = (float)(ddl__mix(1, (uint64_t)i) >> 40) * 1e-6f - 8;
            }
            for (int i = 0; i < COLS * 4; i++) {
                q[i] = (float)(ddl__mix(2, (uint64_t)i) >> 40) * 1e-5f - 80;
            }
            memset(out, 0x55, sizeof out);
            fill(m, ROWS * cols, 3);
            fill(before, ROWS * cols, 3);
            ddl__power_rebuild(level, &a, out);
            for (int i = 0; i < ROWS * cols; i++) {
                volatile float want = 0, product;
                for (int c = 0; c < a.rank; c++) {
                    product = p[c * ROWS + i / cols] * q[c * cols + i % cols];
                    want = want + product;
                }
                float same = want;
                CHECK(memcmp(&out[i], &same, sizeof same) == 0);
                CHECK(m[i] == before[i] - out[i]);
            }
        }
    }
}

/* P = M Q within rounding, and Q = M' P, over the finite rows in their order, to the bit: for any count of rows, where
 * the kernels take four at once. */
static void check_factors(ddl__cpu level, int rows, int cols, int rank) {
    static float m[9 * COLS], p[9 * 5], q[COLS * 5];
    ddl__matrix a = {rows, cols, rank, m, p, q};
    fill(m, rows * cols, 5);
    fill(q, cols * rank, 6);
    memset(p, 0x55, sizeof p);
    ddl__power_left(level, &a);
    for (int i = 0; i < rows * rank; i++) {
        double sum = 0, sizes = 0;
        for (int j = 0; j < cols; j++) {
            double product = (double)m[i % rows * cols + j] * (double)q[i / rows * cols + j];
            sum += product;
            sizes += fabs(product);
        }
        CHECK(fabs(sum - (double)p[i]) <= 1e-5 * sizes);
    }
    p[rows / 2] = rows > 2 ? NAN : p[rows / 2];
    memset(q, 0x55, sizeof q);
    ddl__power_right(level, &a);
    for (int i = 0; i < cols * rank; i++) {
        volatile float want = 0, product;
        for (int row = 0; row < rows; row++) {
            product = isfinite(p[row]) ? p[i / cols * rows + row] * m[row * cols + i % cols] : 0;
            want = want + product;
        }
        float same = want;
        CHECK(memcmp(&q[i], &same, sizeof same) == 0);
    }
}

TEST(factors_of_any_shape_are_those_of_plain_loops) {
    for (ddl__cpu level = DDL__CPU_PORTABLE; level <= ddl__cpu_level(); level++) {
        for (int rows = 1; rows <= 9; rows++) {
            for (int cols = 1; cols <= COLS; cols += cols < 34 ? 1 : 3) {
                check_factors(level, rows, cols, 1 + (rows + cols) % 5);
            }
        }
    }
}

static double power_error(const float *g, int rank, int steps) {
    static float m[ROWS * COLS], p[ROWS * 32], q[COLS * 32], out[ROWS * COLS];
    ddl__matrix a = {ROWS, COLS, rank, m, p, q};
    ddl__power_begin(&a, 42);
    double error = 0;
    for (int step = 0; step < steps; step++) {
        memset(m, 0, sizeof m); /* without the residual: how good one approximation is */
        power_step(&a, g, out);
        error = 0;
        for (int i = 0; i < ROWS * COLS; i++) {
            error += pow((double)g[i] - (double)out[i], 2);
            CHECK(fabs((double)out[i] + (double)m[i] - (double)g[i]) <= 1e-5 * (1 + fabs((double)g[i])));
        }
    }
    for (int c = 0; c < rank; c++) {
        for (int d = 0; d <= c; d++) {
            double dot = 0;
            for (int i = 0; i < ROWS; i++) {
                dot += (double)p[c * ROWS + i] * (double)p[d * ROWS + i];
            }
            CHECK(fabs(dot - (c == d)) < 1e-5);
        }
    }
    return sqrt(error);
}

TEST(power_error_shrinks_with_rank_and_steps) {
    static float g[ROWS * COLS];
    double norm = 0, last = 0;
    for (int i = 0; i < ROWS * COLS; i++) { /* eight directions of falling weight, and noise */
        double x = 0.02 * (double)noise(i, 4);
        for (int d = 0; d < 8; d++) {
            x += pow(0.6, d) * (double)(noise(i / COLS * 5 + 1, d) * noise(i % COLS * 5 + 1, 10 + d)) * 100;
        }
        g[i] = (float)x;
        norm += x * x;
    }
    last = sqrt(norm);
    for (int rank = 1; rank <= 8; rank *= 2) {
        double error = power_error(g, rank, POWER_STEPS);
        CHECK(error < 0.85 * last);
        CHECK(error <= power_error(g, rank, 1) * 1.0001); /* the warm start does not make it worse */
        last = error;
    }
    CHECK(last < 0.05 * sqrt(norm));
}

TEST(power_of_a_matrix_of_low_rank_is_exact_and_of_zeros_zero) {
    static float g[ROWS * COLS];
    for (int i = 0; i < ROWS * COLS; i++) {
        g[i] = noise(i / COLS, 1) * noise(i % COLS, 2);
    }
    CHECK(power_error(g, 1, 1) < 1e-4);
    static float m[ROWS * COLS], p[ROWS * 2], q[COLS * 2], out[ROWS * COLS];
    ddl__matrix a = {ROWS, COLS, 2, m, p, q};
    ddl__power_begin(&a, 42);
    power_step(&a, g, out); /* rank 2 of a matrix of rank 1: the second column must not be noise of size one */
    for (int i = 0; i < ROWS * COLS; i++) {
        CHECK(fabsf(out[i] - g[i]) < 1e-4f);
    }
    memset(g, 0, sizeof g);
    memset(m, 0, sizeof m);
    power_step(&a, g, out);
    for (int i = 0; i < ROWS * COLS; i++) {
        CHECK(out[i] == 0 && m[i] == 0);
    }
}

TEST(power_marks_the_row_of_a_nan_and_only_that) {
    static float g[ROWS * COLS], m[ROWS * COLS], p[ROWS * 2], q[COLS * 2], out[ROWS * COLS];
    ddl__matrix a = {ROWS, COLS, 2, m, p, q};
    ddl__power_begin(&a, 42);
    fill(g, ROWS * COLS, 1);
    g[3 * COLS + 5] = NAN;
    g[9 * COLS] = INFINITY;
    power_step(&a, g, out);
    for (int i = 0; i < ROWS * COLS; i++) {
        int odd = i / COLS == 3 || i / COLS == 9;
        CHECK_EQ(!isfinite(out[i]), odd);
        CHECK(isfinite(m[i]));
        CHECK(!odd || m[i] == (isfinite(g[i]) ? g[i] : 0));
    }
}

/* ---- configs ---- */

TEST(configs_without_sense_are_refused_and_nothing_is_written) {
    const struct {
        ddl_compression config;
        const char *word;
    } bad[] = {
        {{.kind = (ddl_compression_kind)12}, "12 is not a kind"},
        {{.kind = DDL_COMPRESS_F16, .k = 5}, "f16 has no ratio and no k"},
        {{.kind = DDL_COMPRESS_POWER, .ratio = 0.1}, "PowerSGD has no ratio"},
        {{.kind = DDL_COMPRESS_TOP_K, .ratio = 1.5}, "ratio is 1.5"},
        {{.kind = DDL_COMPRESS_TOP_K, .ratio = NAN}, "top-k"},
        {{.kind = DDL_COMPRESS_TOP_K, .ratio = 0.1, .k = 3}, "set one of them"},
        {{.kind = DDL_COMPRESS_TOP_K, .k = -1}, "k is -1"},
        {{.kind = DDL_COMPRESS_POWER, .rank = 65}, "rank is 65"},
        {{.kind = DDL_COMPRESS_INT8, .rank = 1}, "int8: rank is 1"},
        {{.kind = DDL_COMPRESS_QSGD, .levels = 128}, "levels is 128"},
        {{.kind = DDL_COMPRESS_SIGN, .levels = 2}, "sign: levels is 2"},
        {{.kind = DDL_COMPRESS_TOP_K, .error_feedback = -1}, "top-k without error feedback would lose"},
        {{.kind = DDL_COMPRESS_POWER, .error_feedback = -1}, "PowerSGD without error feedback"},
        {{.kind = DDL_COMPRESS_SIGN, .error_feedback = -1}, "sign without error feedback"},
        {{.kind = DDL_COMPRESS_MAJORITY, .error_feedback = 1}, "majority cannot have error feedback"},
        {{.kind = DDL_COMPRESS_F16, .error_feedback = 2}, "error_feedback is 2"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        ddl__sentence sentence = {DDL_OK, ""};
        ddl_compression out = {.kind = DDL_COMPRESS_QSGD, .seed = 42};
        CHECK_EQ(ddl__compress_init(&sentence, &bad[i].config, &out), DDL_ERR_ARG);
        CHECK_STR(sentence.text, bad[i].word);
        CHECK(out.kind == DDL_COMPRESS_QSGD && out.seed == 42);
    }
}

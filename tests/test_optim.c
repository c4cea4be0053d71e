/* Every optimizer against a plain loop in double, over 100 steps; shards and instruction sets bit for bit; odd counts
 * and addresses; values that are not finite; configs that make no sense.
 * tests/run: variants=gcc,asan,arm64 libs=-lm quick=yes */
#include "test.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O2", "fp-contract=fast") /* fuses what may be fused, so that a missing DDL__ROUNDED shows */
#endif
#include "../src/optim/optim.h"
#include "../src/plan.h"

#include <math.h>

enum { MAX = 1003, STEPS = 100, GUARD = 8 };
static const ddl_optimizer_kind kinds[] = {DDL_SGD, DDL_MOMENTUM, DDL_NESTEROV, DDL_ADAM, DDL_ADAMW, DDL_LARS, DDL_LAMB};
enum { KINDS = sizeof(kinds) / sizeof(kinds[0]) };
static const int counts[] = {0, 1, 2, 15, 16, 17, 31, 33, 500, MAX};
enum { COUNTS = sizeof(counts) / sizeof(counts[0]) };

/* The same value for the same element and step, whatever is asked first. */
static float noise(int element, int step) {
    return (float)((int)(ddl__mix((uint64_t)element * 7919, (uint64_t)step) % 4001) - 2000) / 1000;
}

static ddl_optimizer config_of(ddl_optimizer_kind kind) {
    ddl_optimizer config = {.kind = kind, .learning_rate = 0.01, .weight_decay = 0.05};
    ddl_optimizer o = {0};
    CHECK_EQ(ddl__optim_init(NULL, &config, &o), DDL_OK);
    return o;
}

/* ---- the oracle: the formulas of api.h, read aloud ---- */

typedef struct oracle {
    double w[MAX], m[MAX], v[MAX];
} oracle;

static void oracle_adam(const ddl_optimizer *o, oracle *s, const double *g, int n, int t, double lr) {
    double r[MAX], w2 = 0, r2 = 0;
    for (int i = 0; i < n; i++) {
        double x = o->kind == DDL_ADAM ? g[i] + o->weight_decay * s->w[i] : g[i];
        s->m[i] = o->beta1 * s->m[i] + (1 - o->beta1) * x;
        s->v[i] = o->beta2 * s->v[i] + (1 - o->beta2) * x * x;
        double m = s->m[i] / (1 - pow(o->beta1, t)), v = s->v[i] / (1 - pow(o->beta2, t));
        r[i] = m / (sqrt(v) + o->epsilon);
        if (o->kind == DDL_LAMB) {
            r[i] += o->weight_decay * s->w[i];
        } else if (o->kind == DDL_ADAMW) {
            s->w[i] *= 1 - lr * o->weight_decay;
        }
        w2 += s->w[i] * s->w[i];
        r2 += r[i] * r[i];
    }
    double trust = o->kind != DDL_LAMB || w2 == 0 || r2 == 0 ? 1 : o->trust * sqrt(w2) / sqrt(r2);
    for (int i = 0; i < n; i++) {
        s->w[i] -= lr * trust * r[i];
    }
}

static void oracle_sgd(const ddl_optimizer *o, oracle *s, const double *g, int n, double lr) {
    double w2 = 0, g2 = 0;
    for (int i = 0; i < n; i++) {
        w2 += s->w[i] * s->w[i];
        g2 += g[i] * g[i];
    }
    double trust = o->trust * sqrt(w2) / (sqrt(g2) + o->weight_decay * sqrt(w2));
    trust = w2 == 0 || g2 == 0 ? 1 : trust;
    for (int i = 0; i < n; i++) {
        double x = g[i] + o->weight_decay * s->w[i];
        switch (o->kind) {
        case DDL_SGD: s->w[i] -= lr * x; break;
        case DDL_MOMENTUM:
            s->m[i] = o->momentum * s->m[i] + x;
            s->w[i] -= lr * s->m[i];
            break;
        case DDL_NESTEROV:
            s->m[i] = o->momentum * s->m[i] + x;
            s->w[i] -= lr * (x + o->momentum * s->m[i]);
            break;
        default:
            s->m[i] = o->momentum * s->m[i] + lr * trust * x;
            s->w[i] -= s->m[i];
        }
    }
}

static void oracle_step(const ddl_optimizer *o, oracle *s, const double *g, int n, int t, double lr) {
    if (o->kind == DDL_ADAM || o->kind == DDL_ADAMW || o->kind == DDL_LAMB) {
        oracle_adam(o, s, g, n, t, lr);
    } else {
        oracle_sgd(o, s, g, n, lr);
    }
}

/* ---- what is tested ---- */

/* A tensor at any address: `odd` bytes off, guarded on both sides. */
typedef struct subject {
    char w_room[(MAX + 2 * GUARD) * 4 + 4], g_room[MAX * 4 + 4], state_room[2 * MAX * 4 + 4];
    float *w, *g, *state;
} subject;

static void subject_init(subject *s, int n, int odd) {
    memset(s->w_room, 0x5a, sizeof s->w_room);
    memset(s->state_room, 0, sizeof s->state_room);
    s->w = (float *)(void *)(s->w_room + GUARD * 4 + odd);
    s->g = (float *)(void *)(s->g_room + odd);
    s->state = (float *)(void *)(s->state_room + odd);
    for (int i = 0; i < n; i++) {
        float w = noise(i, 0);
        memcpy((char *)s->w + 4 * i, &w, 4);
    }
}

static float get(const float *array, int i) {
    float x;
    memcpy(&x, (const char *)array + 4 * i, 4);
    return x;
}

static void fill_gradient(subject *s, int n, int t) {
    for (int i = 0; i < n; i++) {
        float g = noise(i, t);
        memcpy((char *)s->g + 4 * i, &g, 4);
    }
}

/* A step in shards that begin at the given cuts, with the sums added in their order. */
static void step_in_shards(ddl__cpu level, const ddl_optimizer *o, subject *s, int n, int t, double lr, int shards) {
    double sums[2] = {0, 0}, part_sums[2];
    ddl_optimizer_part part[8];
    for (int k = 0; k < shards; k++) {
        int64_t begin = 0, count = 0;
        CHECK_EQ(ddl_part(n, shards, k, &begin, &count), DDL_OK);
        part[k] = (ddl_optimizer_part){t, lr, 0, begin, count, NULL, NULL, NULL, n, DDL_F32};
        part[k].param = (float *)(void *)((char *)s->w + 4 * begin);
        part[k].grad = (float *)(void *)((char *)s->g + 4 * begin);
        part[k].state = (float *)(void *)((char *)s->state + 4 * begin);
        ddl__optim_sums_at(level, o, &part[k], part_sums);
        sums[0] += part_sums[0];
        sums[1] += part_sums[1];
    }
    for (int k = 0; k < shards; k++) {
        ddl__optim_step_at(level, o, &part[k], sums);
    }
}

static int guards_hold(const subject *s, int n, int odd) {
    const char *room = s->w_room;
    int end = GUARD * 4 + odd + n * 4;
    for (int i = 0; i < GUARD * 4; i++) {
        if (room[i] != 0x5a || room[end + i] != 0x5a) {
            return 0;
        }
    }
    return 1;
}

static double learning_rate(const ddl_optimizer *o, int t) {
    return o->learning_rate / (1 + 0.01 * t);
}

static void compare_with_oracle(ddl_optimizer_kind kind, ddl__cpu level, int n, int odd, int steps) {
    static subject s;
    static oracle want;
    double g[MAX], worst = 0;
    ddl_optimizer o = config_of(kind);
    subject_init(&s, n, odd);
    memset(&want, 0, sizeof want);
    for (int i = 0; i < n; i++) {
        want.w[i] = (double)noise(i, 0);
    }
    for (int t = 1; t <= steps; t++) {
        fill_gradient(&s, n, t);
        for (int i = 0; i < n; i++) {
            g[i] = (double)noise(i, t);
        }
        oracle_step(&o, &want, g, n, t, learning_rate(&o, t));
        step_in_shards(level, &o, &s, n, t, learning_rate(&o, t), 1);
    }
    for (int i = 0; i < n; i++) {
        double error = fabs((double)get(s.w, i) - want.w[i]) / (fabs(want.w[i]) + 0.1);
        worst = error > worst || error != error ? error : worst;
        if (want.w[i] == (double)noise(i, 0) && noise(i, 1) != 0) {
            worst = 1; /* nothing moved */
        }
    }
    CHECK(guards_hold(&s, n, odd));
    if (!(worst < 2e-5)) {
        fprintf(stderr, "%s, level %d, %d elements, %d steps: relative error %g\n", ddl__optim_name(kind), (int)level,
                n, steps, worst);
    }
    CHECK(worst < 2e-5);
}

TEST(each_kind_follows_its_formula_over_100_steps) {
    for (int k = 0; k < KINDS; k++) {
        compare_with_oracle(kinds[k], ddl__cpu_level(), MAX, 0, STEPS);
    }
}

TEST(every_level_count_and_address) {
    for (int k = 0; k < KINDS; k++) {
        for (ddl__cpu level = DDL__CPU_PORTABLE; level <= ddl__cpu_level(); level++) {
            for (int c = 0; c < COUNTS; c++) {
                compare_with_oracle(kinds[k], level, counts[c], c % 4, 3);
            }
        }
    }
}

/* The whole on the portable level is the model; every other level and cut must give its bits. LARS and LAMB get the
 * sums of their own parts, which may differ in the last bit of a double: too little to move a float here. */
TEST(shards_and_levels_equal_the_whole_bit_for_bit) {
    static subject whole, cut;
    for (int k = 0; k < KINDS; k++) {
        ddl_optimizer o = config_of(kinds[k]);
        for (ddl__cpu level = DDL__CPU_PORTABLE; level <= ddl__cpu_level(); level++) {
            for (int shards = 1; shards <= 7; shards += 2) {
                int odd = shards % 4;
                subject_init(&whole, MAX, 0);
                subject_init(&cut, MAX, odd);
                for (int t = 1; t <= 10; t++) {
                    fill_gradient(&whole, MAX, t);
                    fill_gradient(&cut, MAX, t);
                    step_in_shards(DDL__CPU_PORTABLE, &o, &whole, MAX, t, 0.01, 1);
                    step_in_shards(level, &o, &cut, MAX, t, 0.01, shards);
                }
                CHECK_EQ(memcmp(whole.w, cut.w, MAX * 4), 0);
                CHECK_EQ(memcmp(whole.state, cut.state, MAX * 4 * (size_t)ddl__optim_slots(&o)), 0);
                CHECK(guards_hold(&cut, MAX, odd));
            }
        }
    }
}

/* One kind in f64 against the oracle, in one part or (elementwise kinds) in two, at every level; guards around. */
static void check_wide(ddl_optimizer_kind kind, ddl__cpu level, int n, int cut) {
    enum { ROOM = MAX + 2 * GUARD };
    static double w[ROOM], g[MAX], state[2 * MAX], first[ROOM];
    static oracle want;
    ddl_optimizer o = config_of(kind);
    memset(&want, 0, sizeof want);
    memset(state, 0, sizeof state);
    for (int i = 0; i < ROOM; i++) {
        w[i] = 77;
    }
    for (int i = 0; i < n; i++) {
        w[GUARD + i] = want.w[i] = 1.1 * noise(i, 0); /* no float */
    }
    memcpy(first, w, sizeof w);
    for (int t = 1; t <= STEPS; t++) {
        for (int i = 0; i < n; i++) {
            g[i] = 1.3 * noise(i, t);
        }
        double sums[2] = {0, 0}, lr = 0.01 / t;
        for (int p = 0; p < 2; p++) {
            int at = p == 0 ? 0 : cut, count = p == 0 ? cut : n - cut;
            ddl_optimizer_part part = {.step = t, .learning_rate = lr, .count = count, .dtype = DDL_F64,
                                       .param = (float *)(void *)(w + GUARD + at), .grad = (float *)(void *)(g + at),
                                       .state = (float *)(void *)(state + at), .state_stride = MAX};
            ddl__optim_sums_at(level, &o, &part, count > 0 ? sums : (double[2]){0, 0});
            ddl__optim_step_at(level, &o, &part, sums);
        }
        oracle_step(&o, &want, g, n, t, lr);
    }
    double error = 0;
    for (int i = 0; i < n; i++) {
        double far = fabs(w[GUARD + i] - want.w[i]) / (1 + fabs(want.w[i]));
        error = far > error ? far : error;
    }
    CHECK(error < 1e-13 && w[GUARD - 1] == 77 && w[GUARD + n] == 77);
    CHECK(n == 0 || memcmp(first, w, sizeof w) != 0);
}

TEST(f64_follows_the_formulas_within_rounding) {
    for (int k = 0; k < KINDS; k++) {
        bool whole = kinds[k] == DDL_LARS || kinds[k] == DDL_LAMB; /* sums of one part are those of all */
        for (int level = DDL__CPU_PORTABLE; level <= (int)ddl__cpu_level(); level++) {
            check_wide(kinds[k], (ddl__cpu)level, MAX, whole ? MAX : 331);
            check_wide(kinds[k], (ddl__cpu)level, 17, 17);
            check_wide(kinds[k], (ddl__cpu)level, 1, 1);
            check_wide(kinds[k], (ddl__cpu)level, 0, 0);
        }
    }
}

TEST(sums_of_squares_are_the_same_on_every_level) {
    enum { N = 3 * DDL__BLOCK + 5 };
    static float x[N];
    double plain = 0;
    for (int i = 0; i < N; i++) {
        x[i] = noise(i, 1);
        plain += (double)x[i] * (double)x[i];
    }
    double portable = ddl__sum_squares_at(DDL__CPU_PORTABLE, x, N);
    CHECK(fabs(portable - plain) < 1e-12 * plain);
    for (ddl__cpu level = DDL__CPU_PORTABLE; level <= ddl__cpu_level(); level++) {
        CHECK(ddl__sum_squares_at(level, x, N) == portable);
        for (int cut = 0; cut < N; cut += 1 + cut / 3) { /* two arrays at once: each as if it were alone */
            double sums[2] = {0, 0};
            ddl__pair_squares_at(level, x, x + N - cut, cut, sums);
            CHECK(sums[0] == ddl__sum_squares_at(DDL__CPU_PORTABLE, x, cut));
            CHECK(sums[1] == ddl__sum_squares_at(DDL__CPU_PORTABLE, x + N - cut, cut));
            plain = 0;
            for (int i = 0; i < cut; i++) {
                plain += (double)x[i] * (double)x[i];
            }
            CHECK(fabs(sums[0] - plain) <= 1e-12 * plain);
        }
    }
    CHECK(ddl__sum_squares(x, 0) == 0);
    CHECK(ddl__sum_squares(x + 1, 1) == (double)x[1] * (double)x[1]);
}

TEST(what_is_not_finite_stays_so_and_spoils_no_neighbour) {
    static subject s, clean;
    for (int k = 0; k < KINDS; k++) {
        ddl_optimizer o = config_of(kinds[k]);
        subject_init(&s, 40, 0);
        subject_init(&clean, 40, 0);
        fill_gradient(&s, 40, 1);
        fill_gradient(&clean, 40, 1);
        s.g[3] = NAN;
        s.g[20] = INFINITY;
        s.g[39] = -INFINITY;
        double sums[2] = {1, 1}, ignored[2]; /* as from the rest of a tensor that is large */
        ddl_optimizer_part part = {1, 0.01, 0, 0, 40, s.w, s.g, s.state, 40, DDL_F32};
        ddl_optimizer_part clean_part = {1, 0.01, 0, 0, 40, clean.w, clean.g, clean.state, 40, DDL_F32};
        ddl__optim_sums(&o, &part, ignored);
        ddl__optim_step(&o, &part, sums);
        ddl__optim_sums(&o, &clean_part, ignored);
        ddl__optim_step(&o, &clean_part, sums);
        for (int i = 0; i < 40; i++) {
            if (i == 3 || i == 20 || i == 39) {
                CHECK(!isfinite(s.w[i]));
            } else {
                CHECK(s.w[i] == clean.w[i] && isfinite(s.w[i]));
            }
        }
    }
}

/* Whether one of n elements has all bits of its exponent set; words and halves are the same memory. */
static bool odd_by_hand(const uint32_t *words, const uint16_t *halves, ddl_dtype dtype, int n) {
    bool odd = false;
    for (int i = 0; i < n; i++) {
        odd = odd || (dtype == DDL_F16    ? (halves[i] & 0x7c00) == 0x7c00
                      : dtype == DDL_BF16 ? (halves[i] & 0x7f80) == 0x7f80
                      : dtype == DDL_F32  ? (words[i] & 0x7f800000) == 0x7f800000
                                          : (words[2 * i + 1] & 0x7ff00000) == 0x7ff00000);
    }
    return odd;
}

static void check_look(ddl__cpu level, ddl_dtype dtype, const void *src, int n, int at) {
    char copy[2 * 8 * 70];
    size_t bytes = (size_t)n * ddl_dtype_bytes(dtype);
    const char *odd_at = (const char *)src + at;
    uint32_t words[2 * 70];
    uint16_t halves[70];
    memcpy(words, odd_at, bytes);
    memcpy(halves, odd_at, DDL__MIN(bytes, sizeof halves));
    memset(copy, 0x5a, sizeof copy);
    bool odd = odd_by_hand(words, halves, dtype, n);
    CHECK_EQ(ddl__look_at(level, copy + 16 + at, odd_at, n, dtype), odd);
    CHECK(memcmp(copy + 16 + at, odd_at, bytes) == 0);
    CHECK(copy[15 + at] == 0x5a && copy[16 + at + (int)bytes] == 0x5a);
    CHECK_EQ(ddl__look_at(level, NULL, odd_at, n, dtype), odd);
}

/* Each place of arrays of many lengths holds in turn what is not finite, and what nearly is not: the largest finite, a
 * negative zero, the smallest. */
TEST(a_copy_sees_what_is_not_finite_in_any_place) {
    static const ddl_dtype types[] = {DDL_F16, DDL_BF16, DDL_F32, DDL_F64};
    static const uint64_t odd[4][8] = {
        {0x7c00, 0xfc00, 0x7c01, 0xfe00, 0x7bff, 0xfbff, 0x8000, 0x0001},
        {0x7f80, 0xff80, 0x7f81, 0xffc0, 0x7f7f, 0xff7f, 0x8000, 0x0001},
        {0x7f800000, 0xff800000, 0x7f800001, 0xffc00000, 0x7f7fffff, 0xff7fffff, 0x80000000, 1},
        {0x7ff0000000000000, 0xfff0000000000000, 0x7ff0000000000001, 0xfff8000000000000, 0x7fefffffffffffff,
         0xffefffffffffffff, 0x8000000000000000, 1}};
    for (int level = DDL__CPU_PORTABLE; level <= (int)ddl__cpu_level(); level++) {
        for (int t = 0; t < 4; t++) {
            size_t size = ddl_dtype_bytes(types[t]);
            for (int n = 0; n <= 70; n = n < 34 ? n + 1 : n + 9) {
                for (int place = -1; place < n; place++) {
                    char src[8 * 70 + 8];
                    memset(src, 0x3c, sizeof src); /* finite in every type */
                    if (place >= 0) {
                        memcpy(src + (size_t)(n % 4) + (size_t)place * size, &odd[t][(place + n) % 8], size);
                    }
                    check_look((ddl__cpu)level, types[t], src, n, n % 4);
                }
            }
        }
    }
}

TEST(a_norm_of_zero_means_factor_one) {
    float w[4] = {0, 0, 0, 0}, g[4] = {1, 2, 3, 4}, state[8] = {0};
    ddl_optimizer config = {.kind = DDL_LARS, .learning_rate = 0.5}, o;
    REQUIRE(ddl__optim_init(NULL, &config, &o) == DDL_OK);
    ddl_optimizer_part part = {1, 0.5, 0, 0, 4, w, g, state, 4, DDL_F32};
    double sums[2];
    ddl__optim_sums(&o, &part, sums);
    ddl__optim_step(&o, &part, sums);
    CHECK(w[0] == -0.5f && w[3] == -2);
    CHECK(ddl__optim_trust(&o, (double[2]){4, 0}) == 1);
    CHECK(fabs(ddl__optim_trust(&o, (double[2]){4, 9}) - 0.001 * 2 / 3) < 1e-12);
}

static void sign_step(void *user, const ddl_optimizer_part *part) {
    *(int64_t *)user += part->offset;
    for (int64_t i = 0; i < part->count; i++) {
        part->state[2 * part->state_stride + i] += 1;
        part->param[i] -= (float)part->learning_rate * (part->grad[i] > 0 ? 1.0f : -1.0f);
    }
}

TEST(a_function_of_the_program_steps) {
    int64_t seen = 0;
    float w[3] = {1, 1, 1}, g[3] = {5, -5, 1}, state[9] = {0};
    ddl_optimizer config = {.kind = DDL_OPTIMIZER_FN, .fn = sign_step, .user = &seen, .state_slots = 3}, o;
    REQUIRE(ddl__optim_init(NULL, &config, &o) == DDL_OK);
    CHECK_EQ(ddl__optim_slots(&o), 3);
    ddl__optim_step(&o, &(ddl_optimizer_part){1, 0.25, 0, 17, 3, w, g, state, 3, DDL_F32}, NULL);
    CHECK(w[0] == 0.75f && w[1] == 1.25f && w[2] == 0.75f);
    CHECK(state[5] == 0 && state[6] == 1 && state[8] == 1);
    CHECK_EQ(seen, 17);
}

TEST(configs_without_sense_are_refused_and_nothing_is_written) {
    const struct {
        ddl_optimizer config;
        const char *word;
    } bad[] = {
        {{.kind = (ddl_optimizer_kind)9}, "9 is not a kind"},
        {{.kind = (ddl_optimizer_kind)-1}, "-1 is not a kind"},
        {{.kind = DDL_OPTIMIZER_FN}, "needs fn"},
        {{.kind = DDL_OPTIMIZER_FN, .fn = sign_step, .state_slots = -1}, "state_slots"},
        {{.learning_rate = -1}, "SGD: learning_rate is -1"},
        {{.learning_rate = NAN}, "learning_rate"},
        {{.learning_rate = INFINITY}, "learning_rate"},
        {{.momentum = 1}, "momentum is 1"},
        {{.kind = DDL_ADAM, .beta1 = 1.5}, "Adam: beta1 is 1.5"},
        {{.kind = DDL_ADAM, .beta2 = -0.1}, "beta2"},
        {{.kind = DDL_LAMB, .epsilon = -1}, "LAMB: epsilon"},
        {{.weight_decay = -0.1}, "weight_decay"},
        {{.kind = DDL_LARS, .trust = NAN}, "LARS: trust"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        ddl__sentence sentence = {DDL_OK, ""};
        ddl_optimizer out = {.kind = DDL_LAMB, .trust = 42};
        CHECK_EQ(ddl__optim_init(&sentence, &bad[i].config, &out), DDL_ERR_ARG);
        CHECK_STR(sentence.text, bad[i].word);
        CHECK(out.kind == DDL_LAMB && out.trust == 42);
    }
    ddl_optimizer zero = {0}, none = {.momentum = -1, .beta1 = -1}, out;
    CHECK_EQ(ddl__optim_init(NULL, &zero, &out), DDL_OK);
    CHECK(out.kind == DDL_SGD && out.learning_rate == 0.01 && out.momentum == 0.9 && out.beta2 == 0.999);
    CHECK_EQ(ddl__optim_init(NULL, &none, &out), DDL_OK);
    CHECK(out.momentum == 0 && out.beta1 == 0);
}

TEST(roots_and_powers_without_libm) {
    for (double x = 1e-300; x < 1e300; x *= 1.7e5) {
        CHECK(fabs(ddl__sqrt(x) - sqrt(x)) <= 2.3e-16 * sqrt(x));
    }
    CHECK(ddl__sqrt(0) == 0 && isnan(ddl__sqrt(-1)) && isnan(ddl__sqrt(NAN)) && isinf(ddl__sqrt(INFINITY)));
    for (int n = 0; n < 3000; n = 2 * n + 1) {
        CHECK(fabs(ddl__power(0.999, n) - pow(0.999, n)) < 1e-12);
    }
    ddl__f32_v16 v = {2, 0, 1e-40f, 3e38f};
    v = ddl__sqrt_lanes(v);
    CHECK(v[0] == sqrtf(2) && v[1] == 0 && v[2] == sqrtf(1e-40f) && v[3] == sqrtf(3e38f));
}

/* Compressed all-reduce over 1 to 4 ranks (threads): every kind gives all ranks the same bits and the average that a
 * dense oracle expects; residuals keep what was not sent; gTop-k equals its tree done with dense arrays; errors.
 * tests/run: variants=asan,tsan libs=-lm timeout=120 */
#define DDL_IMPLEMENTATION
#include "ddl.h"

#include "coll.h"

#include <math.h>

enum { RANKS = 4, ROWS = 30, COLS = 41, MAX = ROWS * COLS, STEPS = 5 };

static const ddl_compression kinds[] = {
    {.kind = DDL_COMPRESS_NONE},
    {.kind = DDL_COMPRESS_F16},
    {.kind = DDL_COMPRESS_F16, .error_feedback = 1},
    {.kind = DDL_COMPRESS_BF16, .error_feedback = 1},
    {.kind = DDL_COMPRESS_INT8},
    {.kind = DDL_COMPRESS_INT8, .error_feedback = -1},
    {.kind = DDL_COMPRESS_QSGD},
    {.kind = DDL_COMPRESS_QSGD, .levels = 100, .error_feedback = 1},
    {.kind = DDL_COMPRESS_SIGN},
    {.kind = DDL_COMPRESS_MAJORITY},
    {.kind = DDL_COMPRESS_TOP_K, .ratio = 0.05},
    {.kind = DDL_COMPRESS_TOP_K, .k = 5000},
    {.kind = DDL_COMPRESS_RANDOM_K, .ratio = 0.1},
    {.kind = DDL_COMPRESS_GTOP_K, .ratio = 0.05},
    {.kind = DDL_COMPRESS_GTOP_K, .k = 5000},
    {.kind = DDL_COMPRESS_POWER},
    {.kind = DDL_COMPRESS_POWER, .rank = 1, .seed = 3},
};
enum { KINDS = sizeof kinds / sizeof kinds[0] };
static const int shapes[][2] = {{0, 0}, {1, 1}, {1, 513}, {ROWS, COLS}};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

/* What the ranks leave for each other to see. */
typedef struct table {
    coll_job job;
    pthread_barrier_t barrier;
    float result[RANKS][MAX], residual[RANKS][MAX], before[RANKS][MAX];
    double sent[MAX], given[MAX];
} table;

static float gradient(int rank, int i, int step) {
    uint64_t h = ddl__mix((uint64_t)(rank * 100 + step), (uint64_t)i);
    return (float)((double)(h >> 40) / (1 << 23) - 1) * (i % 9 == 0 ? 2.0f : 0.3f);
}

typedef struct place {
    ddl__compressor c;
    float *grad;
    void *memory;
} place;

static void place_make(place *p, const ddl_compression *config, int rows, int cols, int n) {
    ddl__sentence sentence = {DDL_OK, ""};
    memset(p, 0, sizeof *p);
    CHECK_EQ(ddl__compressor_init(&sentence, &p->c, config, 11, rows, cols, n), DDL_OK);
    p->memory = aligned_alloc(64, (p->c.bytes + 127) & ~(size_t)63);
    memset(p->memory, 0, (p->c.bytes + 127) & ~(size_t)63);
    p->grad = malloc((size_t)p->c.count * 4 + 16);
    memset(p->grad, 0xa5, (size_t)p->c.count * 4 + 16); /* four floats of fence */
    memset((char *)p->memory + p->c.bytes, 0xa5, 64);
    ddl__compressor_place(&p->c, p->memory);
}

static void place_free(place *p) {
    for (int i = 0; i < 16; i++) {
        CHECK_EQ(((unsigned char *)(p->grad + p->c.count))[i], 0xa5);
    }
    for (int i = 0; i < 64; i++) {
        CHECK_EQ(((unsigned char *)p->memory)[p->c.bytes + (size_t)i], 0xa5);
    }
    free(p->memory);
    free(p->grad);
}

/* ---- oracles: dense, and with plain loops over all ranks ---- */

static const float *order_by;
static int larger(const void *a, const void *b) {
    int i = *(const int *)a, j = *(const int *)b;
    float x = fabsf(order_by[i]), y = fabsf(order_by[j]);
    return x != y ? (x < y ? 1 : -1) : i - j;
}

static void keep_top(float *x, int count, int k) {
    static int order[MAX];
    static float copy[MAX];
    for (int i = 0; i < count; i++) {
        order[i] = i;
        copy[i] = x[i];
        x[i] = 0;
    }
    order_by = copy;
    qsort(order, (size_t)count, sizeof order[0], larger);
    for (int i = 0; i < k && i < count; i++) {
        x[order[i]] = copy[order[i]];
    }
}

/* The tree of the paper on whole arrays: pairs at distance 1, 2, 4. */
static void oracle_gtop_k(float sent[RANKS][MAX], int n, int count, int k) {
    for (int distance = 1; distance < n; distance *= 2) {
        for (int r = 0; r + distance < n; r += 2 * distance) {
            for (int i = 0; i < count; i++) {
                sent[r][i] += sent[r + distance][i];
            }
            keep_top(sent[r], count, k);
        }
    }
}

/* Each rank's code decoded by itself; before[r] is gradient plus residual. */
static void oracle_sent(const ddl_compression *config, table *t, int n, int count, int step, float sent[RANKS][MAX]) {
    static _Alignas(64) unsigned char code[MAX * 8 + 64];
    static float e[MAX];
    ddl_compression c;
    REQUIRE(ddl__compress_init(NULL, config, &c) == DDL_OK);
    for (int r = 0; r < n; r++) {
        memset(e, 0, sizeof e);
        memset(sent[r], 0, sizeof sent[r]);
        if (ddl__compress_is_sparse(c.kind) && c.kind != DDL_COMPRESS_RANDOM_K) {
            memcpy(sent[r], t->before[r], (size_t)count * 4);
            keep_top(sent[r], count, (int)ddl__compress_kept(&c, count));
        } else {
            ddl__code_key key = {step, 11, c.kind == DDL_COMPRESS_RANDOM_K ? 0 : r};
            ddl__encode(&c, key, t->before[r], c.error_feedback ? e : NULL, count, code);
            ddl__decode_add(&c, key, code, count, sent[r]);
        }
    }
}

/* By rank 0, while the others wait: the result is what the oracle says, and all ranks have it. */
static void verify(const place *p, table *t, int n, int step) {
    static float sent[RANKS][MAX];
    const ddl_compression *c = &p->c.config;
    int count = (int)p->c.count;
    for (int r = 1; r < n; r++) {
        CHECK_EQ(memcmp(t->result[0], t->result[r], (size_t)count * 4), 0);
    }
    if (c->kind != DDL_COMPRESS_POWER) {
        ddl_compression config = *c;
        config.error_feedback = c->error_feedback ? 0 : -1;
        config.error_feedback = c->kind == DDL_COMPRESS_F16 || c->kind == DDL_COMPRESS_BF16 ? c->error_feedback : 0;
        config.levels = c->kind == DDL_COMPRESS_QSGD ? c->levels : 0;
        config.ratio = c->k > 0 ? 0 : c->ratio;
        oracle_sent(&config, t, n, count, step, sent);
    }
    if (c->kind == DDL_COMPRESS_GTOP_K) {
        oracle_gtop_k(sent, n, count, (int)p->c.kept);
    }
    for (int i = 0; i < count; i++) {
        double sum = 0, plain = 0, kept = 0;
        for (int r = 0; r < n; r++) {
            sum += c->kind == DDL_COMPRESS_GTOP_K && r > 0 ? 0 : (double)sent[r][i];
            plain += (double)t->before[r][i] / n;
            kept += (double)t->residual[r][i] / n;
        }
        double want = c->kind == DDL_COMPRESS_MAJORITY ? (sum < 0 ? -1 : 1) : sum / n, got = (double)t->result[0][i];
        double slack = c->kind == DDL_COMPRESS_F16 ? 2e-3 : c->kind == DDL_COMPRESS_BF16 ? 2e-2 : 1e-6;
        if (c->kind != DDL_COMPRESS_POWER) {
            CHECK(fabs(want - got) <= slack * (1 + fabs(want)));
        }
        if (c->error_feedback || p->c.dense) { /* nothing is lost: gTop-k's and PowerSGD's way too */
            CHECK(fabs(got + kept - plain) <= (slack > 1e-5 ? slack : 1e-5));
        }
    }
}

static void one_step(place *p, ddl_group *world, table *t, int rank, int n, int step) {
    int count = (int)p->c.count;
    for (int i = 0; i < count; i++) {
        p->grad[i] = gradient(rank, i, step);
        t->before[rank][i] = p->grad[i] + (p->c.residual_count > 0 ? p->c.residual[i] : 0);
    }
    CHECK_EQ(ddl__compressed_all_reduce(&p->c, world, step, p->grad), DDL_OK);
    CHECK_EQ(p->c.odd, 0);
    memcpy(t->result[rank], p->grad, (size_t)count * 4);
    memset(t->residual[rank], 0, sizeof t->residual[rank]);
    if (p->c.residual_count > 0) {
        memcpy(t->residual[rank], p->c.residual, (size_t)count * 4);
    }
    pthread_barrier_wait(&t->barrier);
    if (rank == 0) {
        verify(p, t, n, step);
    }
    pthread_barrier_wait(&t->barrier);
}

static void all_kinds(int rank, int n, void *arg) {
    table *t = arg;
    ddl_context *context = coll_join(rank, n, &t->job);
    REQUIRE(context != NULL);
    for (int k = 0; k < KINDS; k++) {
        for (int s = 0; s < SHAPES; s++) {
            place p;
            place_make(&p, &kinds[k], shapes[s][0], shapes[s][1], n);
            CHECK_EQ(p.c.dense, kinds[k].kind == DDL_COMPRESS_NONE || (kinds[k].kind == DDL_COMPRESS_POWER && s < 3));
            for (int step = 1; step <= STEPS; step++) {
                one_step(&p, ddl_world(context), t, rank, n, step);
            }
            place_free(&p);
        }
    }
    coll_leave(context);
}

/* PowerSGD over ranks equals PowerSGD of the average gradient on one; over a few steps the sum comes through. */
static void power(int rank, int n, void *arg) {
    table *t = arg;
    ddl_context *context = coll_join(rank, n, &t->job);
    REQUIRE(context != NULL);
    double error[5] = {0}, plain = 0;
    for (int r = 1; r <= 4; r++) {
        place p;
        ddl_compression config = {.kind = DDL_COMPRESS_POWER, .rank = r};
        place_make(&p, &config, ROWS, COLS, n);
        plain = 0;
        for (int step = 1; step <= 3; step++) {
            double mean = 0;
            error[r] = plain = 0;
            memset(p.c.residual, 0, (size_t)MAX * 4);
            for (int i = 0; i < MAX; i++) {
                p.grad[i] = gradient(rank, i, 1);
            }
            CHECK_EQ(ddl__compressed_all_reduce(&p.c, ddl_world(context), step, p.grad), DDL_OK);
            for (int i = 0; i < MAX; i++) {
                mean = 0;
                for (int other = 0; other < n; other++) {
                    mean += (double)gradient(other, i, 1) / n;
                }
                error[r] += pow(mean - (double)p.grad[i], 2);
                plain += mean * mean;
            }
        }
        CHECK(error[r] < (r == 1 ? plain : error[r - 1]));
        place_free(&p);
    }
    coll_leave(context);
}

/* A NaN of one rank reaches all, is counted where it was, and does not come back. */
static void not_finite(int rank, int n, void *arg) {
    table *t = arg;
    ddl_context *context = coll_join(rank, n, &t->job);
    REQUIRE(context != NULL);
    for (int k = 0; k < KINDS; k++) {
        place p;
        place_make(&p, &kinds[k], ROWS, COLS, n);
        for (int step = 1; step <= 2; step++) {
            for (int i = 0; i < MAX; i++) {
                p.grad[i] = gradient(rank, i, step);
            }
            if (step == 1 && rank == n - 1) {
                p.grad[77] = NAN;
            }
            CHECK_EQ(ddl__compressed_all_reduce(&p.c, ddl_world(context), step, p.grad), DDL_OK);
            int late = kinds[k].kind == DDL_COMPRESS_RANDOM_K;
            CHECK_EQ(p.c.odd, (step == 1 && rank == n - 1) || (late && step == 2 && rank == n - 1 && p.c.odd) ? 1 : 0);
            if (!late) {
                CHECK_EQ(isfinite(p.grad[77]), step == 2);
            }
            for (int i = 0; i < MAX; i++) {
                int same_row = kinds[k].kind == DDL_COMPRESS_POWER && i / COLS == 77 / COLS;
                CHECK(i == 77 || same_row || isfinite(p.grad[i]));
                CHECK(late || p.c.residual_count == 0 || isfinite(p.c.residual[i]));
            }
            memcpy(t->result[rank], p.grad, (size_t)MAX * 4);
            pthread_barrier_wait(&t->barrier);
            CHECK_EQ(memcmp(t->result[0], p.grad, (size_t)MAX * 4), 0);
            pthread_barrier_wait(&t->barrier);
        }
        place_free(&p);
    }
    coll_leave(context);
}

/* Several compressors in flight on one group, ended in the order they began. */
static void in_flight(int rank, int n, void *arg) {
    table *t = arg;
    ddl_context *context = coll_join(rank, n, &t->job);
    REQUIRE(context != NULL);
    enum { MANY = 6 };
    static const int which[MANY] = {15, 13, 4, 10, 2, 13};
    place blocking[MANY], flying[MANY];
    ddl_request *requests[MANY];
    for (int i = 0; i < MANY; i++) {
        place_make(&blocking[i], &kinds[which[i]], ROWS, COLS, n);
        place_make(&flying[i], &kinds[which[i]], ROWS, COLS, n);
        blocking[i].c.tensor = flying[i].c.tensor = i;
        for (int j = 0; j < MAX; j++) {
            blocking[i].grad[j] = flying[i].grad[j] = gradient(rank, j, i);
        }
        CHECK_EQ(ddl__compressed_all_reduce(&blocking[i].c, ddl_world(context), 1, blocking[i].grad), DDL_OK);
    }
    for (int i = 0; i < MANY; i++) {
        CHECK_EQ(ddl__compressed_start(&flying[i].c, ddl_world(context), 1, flying[i].grad, &requests[i]), DDL_OK);
        ddl_request *none;
        CHECK_EQ(ddl__compressed_start(&flying[i].c, ddl_world(context), 1, flying[i].grad, &none), DDL_ERR_STATE);
    }
    for (int i = 0; i < MANY; i++) {
        while (requests[i] != NULL) {
            CHECK_EQ(ddl_wait(&requests[i], NULL), DDL_OK);
            CHECK_EQ(ddl__compressed_next(&flying[i].c, &requests[i]), DDL_OK);
        }
        CHECK_EQ(memcmp(blocking[i].grad, flying[i].grad, MAX * 4), 0);
    }
    for (int i = 0; i < MANY; i++) {
        place_free(&blocking[i]);
        place_free(&flying[i]);
    }
    place p;
    place_make(&p, &kinds[4], ROWS, COLS, n + 1);
    ddl_request *none;
    CHECK_EQ(ddl__compressed_start(&p.c, ddl_world(context), 1, p.grad, &none), DDL_ERR_ARG);
    place_free(&p);
    coll_leave(context);
}

static void run_ranks(int n, ranks_fn fn) {
    static table t;
    memset(&t, 0, sizeof t);
    coll_job_make(&t.job);
    pthread_barrier_init(&t.barrier, NULL, (unsigned)n);
    ranks_threads(n, fn, &t);
    pthread_barrier_destroy(&t.barrier);
}

TEST(one_rank) { run_ranks(1, all_kinds); }
TEST(two_ranks) { run_ranks(2, all_kinds); }
TEST(three_ranks) { run_ranks(3, all_kinds); }
TEST(four_ranks) { run_ranks(4, all_kinds); }
TEST(power_error_shrinks_with_rank) { run_ranks(3, power); }
TEST(nan_of_one_of_three) { run_ranks(3, not_finite); }
TEST(many_in_flight_on_four) { run_ranks(4, in_flight); }

TEST(a_tensor_too_large_for_its_code_is_refused_and_nothing_changes) {
    ddl__compressor c = {.tensor = 42};
    ddl_compression top = {.kind = DDL_COMPRESS_TOP_K};
    ddl__sentence sentence = {DDL_OK, ""};
    CHECK_EQ(ddl__compressor_init(&sentence, &c, &top, 7, 1 << 20, 1 << 12, 2), DDL_ERR_ARG);
    CHECK_STR(sentence.text, "top-k of tensor 7 with 1048576 x 4096");
    CHECK_EQ(c.tensor, 42);
}

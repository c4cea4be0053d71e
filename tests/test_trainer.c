/* The trainer: n ranks are one rank with n times the batch, on every schedule; the same bits on all ranks, and on all
 * schedules when sums are in rank order; clipping, accumulation, shards, 16-bit types, uneven data, local SGD.
 * tests/run: variants=gcc,asan,tsan timeout=120 libs=-lm */
#include "world.h"

#include <math.h>
#include <stdbool.h>

enum { TENSORS = 7, STEPS = 100, BATCH = 2, LARGEST = 4097, RANKS_MOST = 4 };
static const int sizes[TENSORS] = {1, 700, 64, 0, LARGEST, 33, 1000};

typedef struct net {
    float param[TENSORS][LARGEST], grad[TENSORS][LARGEST];
} net;

/* What rank 0 has at the end, and whether the others have the same. */
typedef struct job {
    ddl_trainer_config config;
    int steps, micro, empty_from; /* empty_from: this rank and those above it have half the data */
    bool backwards;               /* odd ranks make gradients ready in another order */
    net *result[RANKS_MOST];
    ddl_trainer_stats stats;
    char text[256];
} job;

static double target(int tensor, int k) { return sin(tensor * 100 + k); }

/* Sample s of a step pulls parameter k towards a target that it sees with some noise. */
static double pull(double w, int tensor, int k, int step, int s) {
    double noise = ((step * 31 + s * 17 + k * 7 + tensor * 3) % 13 - 6) / 8.0;
    return (1 + (s + k) % 3) * (w - target(tensor, k) - noise);
}

static double start_of(int tensor, int k) { return 0.5 - (tensor + k) % 5; }

static void net_begin(net *m, bool mine) {
    for (int i = 0; i < TENSORS; i++) {
        for (int k = 0; k < sizes[i]; k++) {
            m->param[i][k] = mine ? (float)start_of(i, k) : -77.0f;
            m->grad[i][k] = NAN;
        }
    }
}

/* Mean gradient of samples first ... first + count - 1. */
static void net_backward(net *m, int tensor, int step, int first, int count) {
    for (int k = 0; k < sizes[tensor]; k++) {
        double sum = 0;
        for (int s = first; s < first + count; s++) {
            sum += pull((double)m->param[tensor][k], tensor, k, step, s);
        }
        m->grad[tensor][k] = (float)(sum / count);
    }
}

/* One rank, the whole batch, doubles, SGD: the oracle. clip 0: none. */
static void oracle(double (*w)[LARGEST], int steps, int samples, double rate, double clip) {
    static double g[TENSORS][LARGEST];
    for (int i = 0; i < TENSORS; i++) {
        for (int k = 0; k < sizes[i]; k++) {
            w[i][k] = start_of(i, k);
        }
    }
    for (int step = 0; step < steps; step++) {
        double norm = 0;
        for (int i = 0; i < TENSORS; i++) {
            for (int k = 0; k < sizes[i]; k++) {
                g[i][k] = 0;
                for (int s = 0; s < samples; s++) {
                    g[i][k] += pull(w[i][k], i, k, step, s) / samples;
                }
                norm += g[i][k] * g[i][k];
            }
        }
        double factor = clip > 0 && sqrt(norm) > clip ? clip / sqrt(norm) : 1;
        for (int i = 0; i < TENSORS; i++) {
            for (int k = 0; k < sizes[i]; k++) {
                w[i][k] -= rate * factor * g[i][k];
            }
        }
    }
}

static void close_to(const net *m, double (*w)[LARGEST], double most, const char *what) {
    double worst = 0;
    for (int i = 0; i < TENSORS; i++) {
        for (int k = 0; k < sizes[i]; k++) {
            double d = fabs((double)m->param[i][k] - w[i][k]) / (fabs(w[i][k]) + 0.1);
            worst = d > worst || d != d ? d : worst;
        }
    }
    if (!(worst <= most)) {
        test__fail(__FILE__, __LINE__, "%s: parameters are %g off, allowed is %g", what, worst, most);
    }
}

static ddl_trainer *make_trainer(ddl_group *w, const ddl_trainer_config *config, net *m) {
    ddl_trainer *t = NULL;
    OK(ddl_trainer_create(w, config, &t));
    for (int i = 0; t != NULL && i < TENSORS; i++) {
        int32_t index = -1;
        OK(ddl_trainer_add(t, NULL, DDL_VIEW(m->param[i], sizes[i]), DDL_VIEW(m->grad[i], sizes[i]), NULL, &index));
        CHECK_EQ(index, i);
    }
    OK(ddl_trainer_start(t));
    return t;
}

/* A loop as a program has it. */
static void train(ddl_group *w, void *arg) {
    job *j = arg;
    int n = ddl_size(w), rank = ddl_rank(w), micro = j->micro > 0 ? j->micro : 1;
    net *m = calloc(1, sizeof *m);
    net_begin(m, rank == 0);
    ddl_trainer *t = make_trainer(w, &j->config, m);
    for (int step = 0; step < j->steps; step++) {
        for (int part = 0; part < micro; part++) {
            for (int i = 0; i < TENSORS && j->config.overlap_forward; i++) {
                OK(ddl_param_wait(t, i));
            }
            int first = (part * n + rank) * BATCH;
            for (int k = TENSORS - 1; k >= 0; k--) {
                int i = j->backwards && rank % 2 == 1 ? (k * 3) % TENSORS : k;
                net_backward(m, i, step, first, BATCH);
                OK(ddl_grad_ready(t, i));
                memset(m->grad[i], 0xff, sizeof m->grad[i]); /* it has been copied */
            }
            OK(ddl_step(t));
        }
    }
    OK(ddl_param_wait(t, DDL_ALL));
    if (rank == 0) {
        OK(ddl_trainer_stats_get(t, &j->stats));
        CHECK(ddl_trainer_describe(t, j->text, sizeof j->text) <= sizeof j->text);
    }
    OK(ddl_trainer_free(&t));
    CHECK(t == NULL);
    j->result[rank] = m;
}

/* Runs a job, checks that all ranks have the same bits; returns rank 0's net. */
static net *run_job(int n, job *j, const char *what) {
    world_threads(n, train, j);
    for (int r = 1; r < n; r++) {
        if (memcmp(j->result[0]->param, j->result[r]->param, sizeof j->result[0]->param) != 0) {
            test__fail(__FILE__, __LINE__, "%s: rank %d has other bits than rank 0", what, r);
        }
        free(j->result[r]);
    }
    return j->result[0];
}

#define LINE .latency_s = 2e-5, .seconds_per_byte = 1e-9
#define RATE .optimizer = {.learning_rate = 0.05}
typedef struct variant {
    const char *name;
    ddl_trainer_config config;
    bool backwards;
} variant;
static const variant variants[] = {
    {"auto", {RATE, LINE, .replan_steps = 20}, false},
    {"auto measured", {RATE, .replan_steps = 10}, true},
    {"none", {RATE, .schedule = DDL_SCHEDULE_NONE}, false},
    {"wait-free", {RATE, .schedule = DDL_SCHEDULE_WAIT_FREE}, true},
    {"wait-free unchecked", {RATE, .schedule = DDL_SCHEDULE_WAIT_FREE, .unchecked = 1}, false},
    {"fused", {RATE, .schedule = DDL_SCHEDULE_FUSED, .bucket_bytes = 3000}, true},
    {"merged", {RATE, LINE, .schedule = DDL_SCHEDULE_MERGED, .replan_steps = 7}, false},
    {"priority", {RATE, LINE, .schedule = DDL_SCHEDULE_PRIORITY, .piece_bytes = 1024, .credit_bytes = 2048}, true},
    {"priority overlapping",
     {RATE, LINE, .schedule = DDL_SCHEDULE_PRIORITY, .piece_bytes = 2048, .replan_steps = 9, .overlap_forward = 1},
     false},
    {"auto overlapping", {RATE, LINE, .overlap_forward = 1}, true},
    {"shards", {RATE, .shard = 1, .bucket_bytes = 3000}, false},
    {"shards wait-free", {RATE, .shard = 1, .schedule = DDL_SCHEDULE_WAIT_FREE}, true},
    {"shards overlapping", {RATE, .shard = 1, .bucket_bytes = 3000, .overlap_forward = 1}, true},
    {"shards wait-free overlapping",
     {RATE, .shard = 1, .schedule = DDL_SCHEDULE_WAIT_FREE, .overlap_forward = 1},
     false},
    {"uneven", {RATE, .uneven = 1}, false},
};

static double expected[TENSORS][LARGEST];

static void every_variant(int n, const ddl_config *config) {
    world_config = config;
    oracle(expected, STEPS, n * BATCH, 0.05, 0);
    net *first = NULL;
    for (size_t v = 0; v < sizeof variants / sizeof variants[0]; v++) {
        job j = {.config = variants[v].config, .steps = STEPS, .backwards = variants[v].backwards};
        net *got = run_job(n, &j, variants[v].name);
        close_to(got, expected, 1e-6, variants[v].name);
        CHECK_EQ(j.stats.steps, STEPS);
        CHECK_EQ(j.stats.contributors, n);
        CHECK(j.stats.bytes >= (1 + 700 + 64 + LARGEST + 33 + 1000) * 4);
        if (config->deterministic && first != NULL && memcmp(first->param, got->param, sizeof got->param) != 0) {
            test__fail(__FILE__, __LINE__, "%s on %d ranks: other bits than %s", variants[v].name, n, variants[0].name);
        }
        if (first == NULL) {
            first = got;
        } else {
            free(got);
        }
    }
    free(first);
    world_config = NULL;
}

TEST(one_rank) { every_variant(1, &(ddl_config){.deterministic = 1}); }
TEST(two_ranks) { every_variant(2, &(ddl_config){.progress_thread = 1}); }
TEST(three_ranks_in_rank_order) { every_variant(3, &(ddl_config){.deterministic = 1}); }
TEST(four_ranks_with_progress_threads) { every_variant(4, &(ddl_config){.deterministic = 1, .progress_thread = 1}); }

/* Accumulated steps are one step with the batch of all; clipping is by the norm of the average. */
TEST(accumulation_and_clipping) {
    oracle(expected, 20, 3 * 2 * BATCH, 0.05, 5.0);
    for (int way = 0; way < 3; way++) {
        job j = {.config = {RATE, .accumulate = 2, .clip_norm = 5.0, .shard = way > 0, .overlap_forward = way == 2},
                 .steps = 20,
                 .micro = 2};
        net *got = run_job(3, &j, "accumulation");
        close_to(got, expected, 1e-6, "accumulation and clipping");
        CHECK(j.stats.norm > 0 && j.stats.steps == 20);
        free(got);
    }
}

/* >>uneven */

enum { SHORTER = 5 };

/* Rank r has SHORTER * r steps less than rank 0. */
static void train_uneven(ddl_group *w, void *arg) {
    job *j = arg;
    int rank = ddl_rank(w);
    net *m = calloc(1, sizeof *m);
    net_begin(m, rank == 0);
    ddl_trainer *t = make_trainer(w, &j->config, m);
    for (int epoch = 0; epoch < 2; epoch++) {
        for (int step = 0; step < 20 - SHORTER * rank; step++) {
            for (int i = TENSORS - 1; i >= 0; i--) {
                net_backward(m, i, step, rank * BATCH, BATCH);
                OK(ddl_grad_ready(t, i));
            }
            OK(ddl_step(t));
        }
        OK(ddl_trainer_join_out(t));
    }
    if (rank == 0) {
        OK(ddl_trainer_stats_get(t, &j->stats));
    }
    OK(ddl_trainer_free(&t));
    j->result[rank] = m;
}

TEST(uneven_ranks_average_over_those_that_contribute) {
    enum { N = 3 };
    for (int i = 0; i < TENSORS; i++) {
        for (int k = 0; k < sizes[i]; k++) {
            double w = start_of(i, k);
            for (int step = 0; step < 40; step++) {
                int left = 0;
                double g = 0;
                for (int r = 0; r < N; r++) {
                    left += step % 20 < 20 - SHORTER * r;
                    for (int s = r * BATCH; step % 20 < 20 - SHORTER * r && s < (r + 1) * BATCH; s++) {
                        g += pull(w, i, k, step % 20, s) / BATCH;
                    }
                }
                w -= 0.05 * g / left;
            }
            expected[i][k] = w;
        }
    }
    for (int shard = 0; shard < 2; shard++) {
        job j = {.config = {RATE, .uneven = 1, .shard = shard, .bucket_bytes = 3000}};
        world_threads(N, train_uneven, &j);
        for (int r = 0; r < N; r++) {
            close_to(j.result[r], expected, 1e-6, "uneven");
            CHECK(memcmp(j.result[0]->param, j.result[r]->param, sizeof j.result[0]->param) == 0);
        }
        CHECK_EQ(j.stats.steps, 40);
        for (int r = 0; r < N; r++) {
            free(j.result[r]);
        }
    }
}

/* Data ends between the batches of one step: rank r has PARTS - r batches, of ACCUMULATED for a step. What is left over
 * makes a last step with its mean. */
enum { ACCUMULATED = 3, PARTS = 11 };

static void train_to_the_last_batch(ddl_group *w, void *arg) {
    job *j = arg;
    int rank = ddl_rank(w);
    net *m = calloc(1, sizeof *m);
    net_begin(m, rank == 0);
    ddl_trainer *t = make_trainer(w, &j->config, m);
    for (int part = 0; part < PARTS - rank; part++) {
        for (int i = TENSORS - 1; i >= 0; i--) {
            net_backward(m, i, part / ACCUMULATED, (part % ACCUMULATED * 3 + rank) * BATCH, BATCH);
            OK(ddl_grad_ready(t, i));
            if (part == 1 && i == 1) {
                FAILS(ddl_trainer_join_out(t), DDL_ERR_STATE, "a step is under way on rank");
            }
        }
        OK(ddl_step(t));
        if (part == 1) {
            FAILS(ddl_trainer_save(t, "/tmp"), DDL_ERR_STATE, "the ddl_step that ends it (of `accumulate` the last)");
        }
    }
    OK(ddl_trainer_join_out(t));
    ddl_trainer_stats stats;
    OK(ddl_trainer_stats_get(t, &stats));
    CHECK_EQ(stats.steps, rank == 2 && j->config.sync == DDL_SYNC_LOCAL ? 3 : 4); /* with nothing left, no step alone */
    FAILS(ddl_step(t), DDL_ERR_STATE, "was not made ready in step"); /* nothing is left of the step */
    OK(ddl_trainer_free(&t));
    j->result[rank] = m;
}

/* What is left over has a NaN on rank 1: ranks that made that step are told so, and no parameter changes. */
static void leave_with_a_nan(ddl_group *w, void *arg) {
    int rank = ddl_rank(w);
    float p[4] = {1, 2, 3, 4}, g[4] = {0, 0, 0, rank == 1 ? NAN : 0};
    ddl_trainer_config *config = arg;
    ddl_trainer *t = NULL;
    OK(ddl_trainer_create(w, config, &t));
    OK(ddl_trainer_add(t, "p", DDL_ARRAY(p), DDL_ARRAY(g), NULL, NULL));
    OK(ddl_trainer_start(t));
    OK(ddl_grad_ready(t, 0));
    OK(ddl_step(t));
    ddl_status status = ddl_trainer_join_out(t);
    if (rank == 1) {
        CHECK_EQ(status, DDL_ERR_ARG);
        CHECK_STR(ddl_error(ddl_group_context(w)), "its last step was refused, as a gradient was not finite");
    } else {
        CHECK_EQ(status, config->sync == DDL_SYNC_LOCAL ? DDL_OK : DDL_ERR_ARG);
    }
    for (int k = 0; k < 4; k++) {
        CHECK_EQ(p[k], k + 1);
    }
    OK(ddl_trainer_free(&t));
}

TEST(a_last_step_that_is_not_finite_is_refused_by_name) {
    ddl_trainer_config bsp = {.optimizer = {.kind = DDL_SGD, .learning_rate = 0.1}, .uneven = 1, .accumulate = 3};
    ddl_trainer_config local = bsp;
    local.sync = DDL_SYNC_LOCAL;
    local.local_steps = 2;
    world_threads(2, leave_with_a_nan, &bsp);
    world_threads(2, leave_with_a_nan, &local);
}

TEST(uneven_ranks_end_between_two_batches_of_a_step) {
    enum { N = 3 };
    for (int i = 0; i < TENSORS; i++) {
        for (int k = 0; k < sizes[i]; k++) {
            double w = start_of(i, k);
            for (int step = 0; step < 4; step++) {
                int ranks = 0;
                double sum = 0;
                for (int r = 0; r < N; r++) {
                    int parts = PARTS - r - step * ACCUMULATED;
                    parts = parts > ACCUMULATED ? ACCUMULATED : parts;
                    ranks += parts > 0;
                    for (int s = 0; s < parts * BATCH; s++) {
                        sum += pull(w, i, k, step, (s / BATCH * 3 + r) * BATCH + s % BATCH) / (parts * BATCH);
                    }
                }
                w -= 0.05 * sum / ranks;
            }
            expected[i][k] = w;
        }
    }
    const ddl_trainer_config ways[] = {
        {RATE, .uneven = 1, .accumulate = ACCUMULATED},
        {RATE, .uneven = 1, .accumulate = ACCUMULATED, .shard = 1, .bucket_bytes = 3000},
        {RATE, .uneven = 1, .accumulate = ACCUMULATED, .architecture = DDL_ARCHITECTURE_PS},
        {RATE, .uneven = 1, .accumulate = ACCUMULATED, .sync = DDL_SYNC_LOCAL, .local_steps = 1}, /* SGD: as BSP */
    };
    for (size_t v = 0; v < sizeof ways / sizeof ways[0]; v++) {
        job j = {.config = ways[v]};
        world_threads(N, train_to_the_last_batch, &j);
        for (int r = 0; r < N; r++) {
            close_to(j.result[r], expected, 1e-6, "to the last batch");
            CHECK(memcmp(j.result[0]->param, j.result[r]->param, sizeof j.result[0]->param) == 0);
        }
        for (int r = 0; r < N; r++) {
            free(j.result[r]);
        }
    }
}

/* >>local */

/* n ranks in one place, in doubles: each steps alone, every `period` steps they are averaged. */
static void local_oracle(int n, int steps, int period, int after, double outer_rate, double momentum) {
    for (int i = 0; i < TENSORS; i++) {
        for (int k = 0; k < sizes[i]; k++) {
            double w[RANKS_MOST], anchor = start_of(i, k), u = 0;
            int since = 0;
            for (int r = 0; r < n; r++) {
                w[r] = anchor;
            }
            for (int step = 0; step < steps; step++) {
                double mean = 0;
                for (int r = 0; r < n; r++) {
                    double g = 0;
                    for (int s = 0; s < n * BATCH; s++) {
                        bool mine = s >= r * BATCH && s < (r + 1) * BATCH;
                        g += step < after ? pull(w[r], i, k, step, s) / (n * BATCH)
                             : mine       ? pull(w[r], i, k, step, s) / BATCH
                                          : 0;
                    }
                    w[r] -= 0.05 * g;
                }
                for (int r = 0; r < n; r++) {
                    mean += w[r] / n;
                }
                anchor = step < after ? w[0] : anchor;
                since += step >= after;
                if (since == period) {
                    double d = anchor - mean;
                    u = momentum * u + d;
                    anchor = outer_rate > 0 ? anchor - outer_rate * (d + momentum * u) : mean;
                    for (int r = 0; r < n; r++) {
                        w[r] = anchor;
                    }
                    since = 0;
                }
            }
            expected[i][k] = anchor;
        }
    }
}

TEST(local_sgd) {
    const ddl_trainer_config configs[] = {
        {RATE, .sync = DDL_SYNC_LOCAL, .local_steps = 5},
        {RATE, .sync = DDL_SYNC_LOCAL, .local_steps = 5, .local_after = 10, .schedule = DDL_SCHEDULE_WAIT_FREE},
        {RATE, .sync = DDL_SYNC_LOCAL, .local_steps = 10, .outer_rate = 0.7},
        {RATE, .sync = DDL_SYNC_LOCAL, .local_steps = 10, .outer_rate = 0.5, .outer_momentum = -1},
    };
    for (size_t v = 0; v < sizeof configs / sizeof configs[0]; v++) {
        const ddl_trainer_config *o = &configs[v];
        job j = {.config = *o, .steps = 30};
        net *got = run_job(3, &j, "local SGD");
        double momentum = o->outer_momentum < 0 ? 0 : 0.9;
        local_oracle(3, 30, o->local_steps, (int)o->local_after, o->outer_rate, o->outer_rate > 0 ? momentum : 0);
        close_to(got, expected, 2e-6, "local SGD");
        CHECK_EQ(j.stats.local_steps, 0);
        CHECK_EQ(j.stats.steps, 30);
        free(got);
    }
}

/* Between synchronisations ranks differ, and ddl_trainer_sync ends that. */
static void sync_now(ddl_group *w, void *arg) {
    float p[4] = {1, 2, 3, 4}, g[4] = {1, 1, 1, 1}, all[8];
    ddl_trainer *t = NULL;
    ddl_trainer_stats stats;
    (void)arg;
    OK(ddl_trainer_create(w, &(ddl_trainer_config){.optimizer = {.learning_rate = 1}, .sync = DDL_SYNC_LOCAL}, &t));
    OK(ddl_trainer_add(t, "p", DDL_ARRAY(p), DDL_ARRAY(g), NULL, NULL));
    OK(ddl_trainer_start(t));
    g[0] = (float)(ddl_rank(w) + 1);
    OK(ddl_grad_ready(t, 0));
    OK(ddl_step(t));
    CHECK_EQ(p[0], 1 - (ddl_rank(w) + 1));
    OK(ddl_trainer_stats_get(t, &stats));
    CHECK_EQ(stats.local_steps, 1);
    OK(ddl_trainer_sync(t));
    CHECK_EQ(p[0], -0.5);
    CHECK_EQ(p[1], 1);
    OK(ddl_all_gather(w, DDL_ARRAY(p), DDL_ARRAY(all)));
    CHECK(memcmp(all, all + 4, sizeof p) == 0);
    OK(ddl_trainer_sync(t));
    CHECK_EQ(p[0], -0.5);
    OK(ddl_trainer_free(&t));
}
TEST(a_synchronisation_on_demand) { world_threads(2, sync_now, NULL); }

/* DiLoCo with a rank that has no data at all: what it begins to measure from is what the others begin with. */
static void no_data(ddl_group *w, void *arg) {
    (void)arg;
    float p[4] = {10, 20, 30, 40}, g[4] = {1, 1, 1, 1};
    ddl_trainer *t = NULL;
    OK(ddl_trainer_create(w, &(ddl_trainer_config){.sync = DDL_SYNC_LOCAL, .local_steps = 2, .outer_rate = 0.5,
                                                   .outer_momentum = -1, .uneven = 1,
                                                   .optimizer = {.learning_rate = 1}}, &t));
    OK(ddl_trainer_add(t, "p", DDL_ARRAY(p), DDL_ARRAY(g), NULL, NULL));
    OK(ddl_trainer_start(t));
    for (int step = 0; step < (ddl_rank(w) == 0 ? 4 : 0); step++) {
        OK(ddl_grad_ready(t, 0));
        OK(ddl_step(t));
    }
    OK(ddl_trainer_join_out(t));
    for (int k = 0; k < 4; k++) { /* two rounds of two steps of 1, half of each */
        CHECK_EQ(p[k], 10 * (k + 1) - 2);
    }
    OK(ddl_trainer_free(&t));
}
TEST(a_rank_without_data_ends_where_the_others_do) { world_threads(3, no_data, NULL); }

/* >>types */

static float from_half(uint16_t bits, ddl_dtype dtype) {
    uint32_t u = (uint32_t)bits << 16;
    float f;
    if (dtype == DDL_F16) { /* normal numbers and zero */
        u = (uint32_t)(bits & 0x8000) << 16 | ((bits & 0x7fff) == 0 ? 0 : ((uint32_t)(bits & 0x7fff) << 13) + (112u << 23));
    }
    memcpy(&f, &u, 4);
    return f;
}

static uint16_t to_half(float f, ddl_dtype dtype) { /* exact values only */
    uint32_t u;
    memcpy(&u, &f, 4);
    if (dtype == DDL_BF16) {
        return (uint16_t)(u >> 16);
    }
    return (uint16_t)((u >> 16 & 0x8000) | (f == 0 ? 0 : ((u & 0x7fffffff) - (112u << 23)) >> 13));
}

/* Steps that are far below a 16-bit parameter's precision add up in the f32 copy. */
static void small_steps(ddl_group *w, void *arg) {
    (void)arg;
    const ddl_dtype types[][2] = {{DDL_BF16, DDL_BF16}, {DDL_F16, DDL_F16}, {DDL_BF16, DDL_F32}, {DDL_F16, DDL_BF16},
                                  {DDL_F32, DDL_BF16}};
    for (int v = 0; v < 20; v++) {
        ddl_dtype pt = types[v % 5][0], gt = types[v % 5][1];
        uint16_t p16[3] = {to_half(1, pt), to_half(1, pt), to_half(-2, pt)}, g16[3];
        float p32[3] = {1, 1, -2}, g32[3];
        ddl_trainer_config config = {.optimizer = {.learning_rate = 0x1p-12}, .shard = v / 5 % 2,
                                     .accumulate = 1 + v / 10};
        ddl_trainer *t = NULL;
        OK(ddl_trainer_create(w, &config, &t));
        OK(ddl_trainer_add(t, "p", ddl_tensor_1d(pt == DDL_F32 ? (void *)p32 : p16, pt, 3),
                           ddl_tensor_1d(gt == DDL_F32 ? (void *)g32 : g16, gt, 3), NULL, NULL));
        OK(ddl_trainer_start(t));
        for (int step = 0; step < 1024 * config.accumulate; step++) {
            float g = ddl_rank(w) == 0 ? 1.5f : 0.5f; /* 1 on average: 2^-12 a step, 1/4 in all */
            for (int i = 0; i < 3; i++) {
                g32[i] = g;
                g16[i] = to_half(g, gt);
            }
            OK(ddl_grad_ready(t, 0));
            OK(ddl_step(t));
        }
        for (int i = 0; i < 3; i++) {
            CHECK_EQ(pt == DDL_F32 ? p32[i] : from_half(p16[i], pt), (i < 2 ? 1 : -2) - 0.25);
        }
        OK(ddl_trainer_free(&t));
    }
}
TEST(sixteen_bits_with_a_copy_in_32) { world_threads(2, small_steps, NULL); }

/* A step of the program's own finds the averages in its gradients, also in f64. */
typedef struct own {
    double p[2], g[2];
    int calls;
} own;
static int own_step(void *user, ddl_trainer *t) {
    own *o = user;
    (void)t;
    o->calls++;
    o->p[0] -= o->g[0];
    o->p[1] -= 10 * o->g[1];
    return o->p[0] < -5;
}
static void own_steps(ddl_group *w, void *arg) {
    own o = {{1, 2}, {0, 0}, 0};
    ddl_trainer *t = NULL;
    (void)arg;
    OK(ddl_trainer_create(w, &(ddl_trainer_config){.step = own_step, .step_user = &o}, &t));
    OK(ddl_trainer_add(t, "p", DDL_ARRAY(o.p), DDL_ARRAY(o.g), NULL, NULL));
    OK(ddl_trainer_start(t));
    for (int step = 0; step < 3; step++) {
        o.g[0] = 2 * ddl_rank(w);
        o.g[1] = 1;
        OK(ddl_grad_ready(t, DDL_ALL));
        OK(ddl_step(t));
        CHECK(o.calls == step + 1 && o.p[0] == 1 - (step + 1) && o.p[1] == 2 - 10 * (step + 1));
    }
    o.g[0] = 100;
    OK(ddl_grad_ready(t, DDL_ALL));
    FAILS(ddl_step(t), DDL_ERR_STATE, "own step returned 1 in step 4");
    OK(ddl_trainer_free(&t));
}
TEST(a_step_of_the_program) { world_threads(2, own_steps, NULL); }

/* f64 parameters with Adam: n ranks give what plain loops over the average give, to rounding, and the same bits. */
enum { WIDE = 5003, WIDE_STEPS = 20 };
static double wide_gradient(int i, int step, int rank) { return sin(1.7 * i + 0.3 * step + 2.1 * rank); }

static void wide_oracle(double *p, int n) {
    static _Thread_local double m[WIDE], v[WIDE];
    memset(m, 0, sizeof m);
    memset(v, 0, sizeof v);
    for (int t = 1; t <= WIDE_STEPS; t++) {
        for (int i = 0; i < WIDE; i++) {
            double g = 0;
            for (int r = 0; r < n; r++) {
                g += wide_gradient(i, t, r) / n;
            }
            m[i] = 0.9 * m[i] + (1 - 0.9) * g;
            v[i] = 0.999 * v[i] + (1 - 0.999) * g * g;
            p[i] -= 0.01 * (m[i] / (1 - pow(0.9, t))) / (sqrt(v[i] / (1 - pow(0.999, t))) + 1e-8);
        }
    }
}

static void wide_steps(ddl_group *w, void *arg) {
    double *p = malloc(3 * WIDE * sizeof *p), *g = p + WIDE, *want = g + WIDE, error = 0;
    ddl_trainer_config config = *(ddl_trainer_config *)arg;
    ddl_trainer *t = NULL;
    REQUIRE(p != NULL);
    config.optimizer = (ddl_optimizer){.kind = DDL_ADAM, .learning_rate = 0.01};
    for (int i = 0; i < WIDE; i++) {
        p[i] = want[i] = cos(i);
    }
    OK(ddl_trainer_create(w, &config, &t));
    OK(ddl_trainer_add(t, "small", DDL_VIEW(p, 3), DDL_VIEW(g, 3), NULL, NULL));
    OK(ddl_trainer_add(t, "large", DDL_VIEW(p + 3, WIDE - 3), DDL_VIEW(g + 3, WIDE - 3), NULL, NULL));
    OK(ddl_trainer_start(t));
    for (int step = 1; step <= WIDE_STEPS; step++) {
        for (int i = 0; i < WIDE; i++) {
            g[i] = wide_gradient(i, step, ddl_rank(w));
        }
        OK(ddl_grad_ready(t, DDL_ALL));
        OK(ddl_step(t));
    }
    wide_oracle(want, ddl_size(w));
    for (int i = 0; i < WIDE; i++) {
        double far = fabs(p[i] - want[i]) / (1 + fabs(want[i]));
        error = far > error || isnan(far) ? far : error;
    }
    CHECK(error < 1e-12);
    OK(ddl_trainer_free(&t));
    free(p);
}

TEST(f64_by_the_trainers_own_optimizers) {
    ddl_trainer_config all_reduce = {0}, shards = {.shard = 1}, one = {.accumulate = 1};
    world_threads(3, wide_steps, &all_reduce);
    world_threads(3, wide_steps, &shards);
    world_threads(1, wide_steps, &one);
}

/* >>optimizers through the trainer: shards get the same bits as the whole */

static void one_kind(ddl_group *w, net *m, ddl_optimizer_kind kind, int shard) {
    ddl_trainer_config config = {.optimizer = {.kind = kind, .learning_rate = 0.01, .weight_decay = 0.1},
                                 .shard = shard, .bucket_bytes = 5000};
    net_begin(m, true);
    ddl_trainer *t = make_trainer(w, &config, m);
    for (int step = 0; step < 10; step++) {
        for (int i = TENSORS - 1; i >= 0; i--) {
            net_backward(m, i, step, ddl_rank(w), 1);
            OK(ddl_grad_ready(t, i));
        }
        OK(ddl_step(t));
    }
    OK(ddl_trainer_free(&t));
}
static void shards_and_whole(ddl_group *w, void *arg) {
    (void)arg;
    net *whole = calloc(1, sizeof *whole), *cut = calloc(1, sizeof *cut);
    for (int kind = DDL_SGD; kind <= DDL_ADAMW; kind++) {
        one_kind(w, whole, (ddl_optimizer_kind)kind, 0);
        one_kind(w, cut, (ddl_optimizer_kind)kind, 1);
        CHECK(memcmp(whole->param, cut->param, sizeof whole->param) == 0);
        CHECK(whole->param[1][5] != (float)start_of(1, 5));
    }
    one_kind(w, whole, DDL_LAMB, 0);
    CHECK(whole->param[1][5] != (float)start_of(1, 5) && whole->param[1][5] == whole->param[1][5]);
    free(whole);
    free(cut);
}
TEST(shards_have_the_bits_of_the_whole) {
    world_config = &(ddl_config){.deterministic = 1};
    world_threads(3, shards_and_whole, NULL);
    world_config = NULL;
}

/* >>compression: fewer bytes, the same bits on all ranks, and what is lost in one step comes in a later one */

static double distance(const net *m, double (*w)[LARGEST]) {
    double sum = 0;
    for (int i = 0; i < TENSORS; i++) {
        for (int k = 0; k < sizes[i]; k++) {
            sum += ((double)m->param[i][k] - w[i][k]) * ((double)m->param[i][k] - w[i][k]);
        }
    }
    return sqrt(sum);
}

/* With overlap_forward ddl_step leaves a rank its own shard alone; the others' come with ddl_param_wait. */
static void shards_later(ddl_group *w, void *arg) {
    (void)arg;
    float p[2][8] = {{0}}, g[2][8];
    ddl_trainer *t = NULL;
    OK(ddl_trainer_create(w, &(ddl_trainer_config){.optimizer = {.learning_rate = 1}, .shard = 1, .overlap_forward = 1},
                          &t));
    for (int i = 0; i < 2; i++) {
        OK(ddl_trainer_add(t, NULL, DDL_VIEW(p[i], 8), DDL_VIEW(g[i], 8), NULL, NULL));
    }
    OK(ddl_trainer_start(t));
    for (int step = 1; step <= 3; step++) {
        int done = 0, at = 0;
        for (int i = 0; i < 16; i++) {
            g[i / 8][i % 8] = 1;
        }
        OK(ddl_grad_ready(t, DDL_ALL));
        OK(ddl_step(t));
        for (int i = 0; i < 16; i++) {
            done += p[i / 8][i % 8] == (float)-step;
            at += p[i / 8][i % 8] == (float)(1 - step);
        }
        CHECK(done == 8 && at == 8);
        FAILS(ddl_grad_ready(t, 0), DDL_ERR_STATE, "ddl_param_wait");
        for (int k = 0; k < 2; k++) {
            OK(ddl_param_wait(t, k));
            for (int i = 0; i < 8; i++) {
                CHECK_EQ(p[k][i], -step);
            }
        }
    }
    OK(ddl_trainer_free(&t));
}
TEST(shards_travel_while_forward_runs) { world_threads(2, shards_later, NULL); }

TEST(compressed_gradients_end_at_the_same_place) {
    enum { LONG = 200 };
    const struct {
        ddl_compression code;
        double most; /* share of the way that is left */
        double bytes;
    } ways[] = {
        {{.kind = DDL_COMPRESS_NONE}, 1e-6, 1},
        {{.kind = DDL_COMPRESS_F16}, 1e-3, 0.51},
        {{.kind = DDL_COMPRESS_INT8}, 1e-2, 0.27},
        {{.kind = DDL_COMPRESS_QSGD, .levels = 127}, 1e-2, 0.27},
        {{.kind = DDL_COMPRESS_TOP_K, .ratio = 0.1}, 0.1, 0.21},
        {{.kind = DDL_COMPRESS_GTOP_K, .ratio = 0.1}, 0.15, 0.21},
        {{.kind = DDL_COMPRESS_POWER}, 1e-6, 1}, /* vectors go as they are */
    };
    oracle(expected, LONG, 2 * BATCH, 0.05, 0);
    net *begin = calloc(1, sizeof *begin);
    net_begin(begin, true);
    double way = distance(begin, expected), whole = (1 + 700 + 64 + LARGEST + 33 + 1000) * 4;
    free(begin);
    for (size_t v = 0; v < sizeof ways / sizeof ways[0]; v++) {
        job j = {.config = {RATE, .compression = ways[v].code}, .steps = LONG, .backwards = v % 2 == 1};
        net *got = run_job(2, &j, "compression");
        double left = distance(got, expected) / way;
        if (!(left <= ways[v].most)) {
            test__fail(__FILE__, __LINE__, "compression %d: %g of the way is left, allowed is %g",
                       (int)ways[v].code.kind, left, ways[v].most);
        }
        CHECK(j.stats.bytes > 0 && (double)j.stats.bytes <= ways[v].bytes * whole + 1000);
        free(got);
    }
}

/* PowerSGD of matrices: a gradient of rank 1 is what it was (the oracle is a plain loop); one of full rank needs error
 * feedback, and ends at its target all the same. Not square, so that rows and columns cannot be exchanged. */
enum { ROWS = 20, COLS = 50 };
static void matrices(ddl_group *w, void *arg) {
    (void)arg;
    float p[2][ROWS][COLS] = {{{0}}}, g[2][ROWS][COLS];
    double expect[ROWS][COLS] = {{0}}, left = 0, way = 0;
    ddl_trainer *t = NULL;
    ddl_trainer_stats stats;
    OK(ddl_trainer_create(w, &(ddl_trainer_config){.optimizer = {.learning_rate = 0.1},
                                                   .compression = {.kind = DDL_COMPRESS_POWER, .rank = 2}}, &t));
    for (int i = 0; i < 2; i++) {
        OK(ddl_trainer_add(t, NULL, ddl_tensor_nd(p[i], DDL_F32, 2, (int64_t[]){ROWS, COLS}),
                           ddl_tensor_nd(g[i], DDL_F32, 2, (int64_t[]){ROWS, COLS}), NULL, NULL));
    }
    OK(ddl_trainer_start(t));
    for (int step = 0; step < 300; step++) {
        for (int r = 0; r < ROWS * COLS; r++) {
            int row = r / COLS, col = r % COLS;
            double one = ((row * 3 + step) % 7 - 2.5) * (col % 5 - 1.5) / 4;
            expect[row][col] -= 0.1 * one; /* the mean of 1/2 and 3/2 of it */
            g[0][row][col] = (float)(one * (0.5 + ddl_rank(w)));
            g[1][row][col] = p[1][row][col] - (float)target(row, col) + (float)(col % 3 - 1) * (1 - 2 * ddl_rank(w));
        }
        OK(ddl_grad_ready(t, DDL_ALL));
        OK(ddl_step(t));
    }
    for (int r = 0; r < ROWS * COLS; r++) {
        int row = r / COLS, col = r % COLS;
        double off = (double)p[0][row][col] - expect[row][col], to = target(row, col);
        CHECK(fabs(off) < 1e-3);
        left += ((double)p[1][row][col] - to) * ((double)p[1][row][col] - to);
        way += to * to;
    }
    if (!(left < 0.01 * 0.01 * way)) {
        test__fail(__FILE__, __LINE__, "%g of the way is left", sqrt(left / way));
    }
    OK(ddl_trainer_stats_get(t, &stats));
    CHECK_EQ(stats.bytes, 2 * (ROWS + COLS) * 2 * 4);
    OK(ddl_trainer_free(&t));
}
TEST(compressed_matrices) { world_threads(2, matrices, NULL); }

/* What the options of one_compressed say, said by a function. */
static void choose(void *user, const char *name, const ddl_tensor *gradient, ddl_trainer_options *options) {
    ++*(int *)user;
    CHECK_EQ(ddl_tensor_count(gradient), 64);
    CHECK_EQ(options->no_decay, 1); /* as ddl_trainer_add was told */
    options->uncompressed = strcmp(name, "first") == 0;
    options->compression.kind = strcmp(name, "second") == 0 ? DDL_COMPRESS_SIGN : DDL_COMPRESS_NONE;
}

/* One tensor is compressed, its neighbours are not, with accumulation and clipping around them. arg: by a function. */
static void one_compressed(ddl_group *w, void *arg) {
    int chosen = 0;
    bool by_function = arg != NULL;
    float p[3][64], g[3][64];
    ddl_trainer *t = NULL;
    char text[256];
    ddl_trainer_options sign = {.compression = {.kind = DDL_COMPRESS_SIGN}}, plain = {.uncompressed = 1};
    ddl_trainer_config config = {.optimizer = {.learning_rate = 1}, .accumulate = 2, .clip_norm = 1e6,
                                 .compression = {.kind = DDL_COMPRESS_TOP_K, .k = 1}};
    ddl_trainer_options none = {.no_decay = 1};
    config.choose = by_function ? choose : NULL;
    config.choose_user = &chosen;
    OK(ddl_trainer_create(w, &config, &t));
    OK(ddl_trainer_add(t, "first", DDL_ARRAY(p[0]), DDL_ARRAY(g[0]), by_function ? &none : &plain, NULL));
    OK(ddl_trainer_add(t, "second", DDL_ARRAY(p[1]), DDL_ARRAY(g[1]), by_function ? &none : &sign, NULL));
    OK(ddl_trainer_add(t, "third", DDL_ARRAY(p[2]), DDL_ARRAY(g[2]), by_function ? &none : NULL, NULL));
    CHECK_EQ(chosen, by_function ? 3 : 0);
    memset(p, 0, sizeof p);
    OK(ddl_trainer_start(t));
    for (int part = 0; part < 2; part++) {
        for (int i = 0; i < 64; i++) {
            g[0][i] = (float)(i + ddl_rank(w));
            g[1][i] = i % 2 == 0 ? 2.0f : -2.0f;
            g[2][i] = i == 9 ? 4.0f : 1.0f;
        }
        OK(ddl_grad_ready(t, ddl_rank(w) == 0 ? 0 : 2));
        OK(ddl_grad_ready(t, 1));
        OK(ddl_grad_ready(t, ddl_rank(w) == 0 ? 2 : 0));
        OK(ddl_step(t));
    }
    for (int i = 0; i < 64; i++) {
        CHECK_EQ(p[0][i], -(i + 0.5));
        CHECK_EQ(p[1][i], i % 2 == 0 ? -2 : 2); /* all magnitudes are their mean */
        CHECK_EQ(p[2][i], i == 9 ? -4 : 0);
    }
    ddl_trainer_describe(t, text, sizeof text);
    CHECK_STR(text, "2 of them compressed");
    OK(ddl_grad_ready(t, 2));
    OK(ddl_trainer_free(&t));
    OK(ddl_trainer_create(w, &(ddl_trainer_config){.shard = 1}, &t));
    FAILS(ddl_trainer_add(t, "p", DDL_ARRAY(p[0]), DDL_ARRAY(g[0]), &sign, NULL), DDL_ERR_UNSUPPORTED,
          "\"p\": compression works with BSP only");
    OK(ddl_trainer_free(&t));
    FAILS(ddl_trainer_create(w, &(ddl_trainer_config){.compression = {.kind = DDL_COMPRESS_SIGN, .error_feedback = -1}}, &t),
          DDL_ERR_ARG, "without error feedback");
    FAILS(ddl_trainer_create(w, &(ddl_trainer_config){.compression = sign.compression, .uneven = 1}, &t),
          DDL_ERR_UNSUPPORTED, "compression works with BSP only");
}
TEST(compression_by_tensor) { world_threads(2, one_compressed, NULL); }
TEST(compression_by_a_function) { world_threads(2, one_compressed, "chosen"); }

/* The trainer over parameter servers: n workers are one rank with n times the batch, on every schedule, beside servers
 * and apart from them, the same bits on all ranks, all schedules, all numbers of servers and over all-reduce in rank
 * order; SSP with bound 0 is BSP; SSP and ASP as far as they promise; gradients that are not finite.
 * tests/run: variants=gcc,asan,tsan timeout=120 libs=-lm */
#include "world.h"

#include <math.h>
#include <stdbool.h>

enum { TENSORS = 6, STEPS = 100, BATCH = 2, LARGEST = 4097, RANKS_MOST = 5 };
static const int sizes[TENSORS] = {1, 700, 0, LARGEST, 33, 1000};

typedef struct net {
    float param[TENSORS][LARGEST], grad[TENSORS][LARGEST];
} net;

typedef struct job {
    ddl_trainer_config config;
    int steps;
    net *result[RANKS_MOST]; /* of workers; of dedicated servers NULL */
    ddl_trainer_stats stats;
    char text[256];
} job;

static double start_of(int tensor, int k) { return 0.5 - (tensor + k) % 5; }

/* Sample s of a step pulls parameter k towards a target that it sees with some noise. */
static double pull(double w, int tensor, int k, int step, int s) {
    double noise = ((step * 31 + s * 17 + k * 7 + tensor * 3) % 13 - 6) / 8.0;
    return (1 + (s + k) % 3) * (w - sin(tensor * 100 + k) - noise);
}

static void net_begin(net *m, bool mine) {
    for (int i = 0; i < TENSORS; i++) {
        for (int k = 0; k < sizes[i]; k++) {
            m->param[i][k] = mine ? (float)start_of(i, k) : -77.0f;
            m->grad[i][k] = NAN;
        }
    }
}

static void net_backward(net *m, int i, int step, int first) {
    for (int k = 0; k < sizes[i]; k++) {
        double sum = 0;
        for (int s = first; s < first + BATCH; s++) {
            sum += pull((double)m->param[i][k], i, k, step, s);
        }
        m->grad[i][k] = (float)(sum / BATCH);
    }
}

/* One rank, the whole batch, doubles, SGD with a rate that halves after the middle. */
static void oracle(double (*w)[LARGEST], int steps, int samples, double rate) {
    for (int i = 0; i < TENSORS; i++) {
        for (int k = 0; k < sizes[i]; k++) {
            w[i][k] = start_of(i, k);
            for (int step = 0; step < steps; step++) {
                double g = 0;
                for (int s = 0; s < samples; s++) {
                    g += pull(w[i][k], i, k, step, s) / samples;
                }
                w[i][k] -= (step < steps / 2 ? rate : rate / 2) * g;
            }
        }
    }
}

static ddl_trainer *make_trainer(ddl_group *w, const ddl_trainer_config *config, net *m,
                                 const ddl_trainer_options *of_third) {
    ddl_trainer *t = NULL;
    OK(ddl_trainer_create(w, config, &t));
    for (int i = 0; t != NULL && i < TENSORS; i++) {
        OK(ddl_trainer_add(t, NULL, DDL_VIEW(m->param[i], sizes[i]), DDL_VIEW(m->grad[i], sizes[i]),
                           i == 3 ? of_third : NULL, NULL));
    }
    OK(ddl_trainer_start(t));
    return t;
}

static int workers_of(int ranks, const ddl_trainer_config *o) {
    return ranks - (o->dedicated ? (o->servers > 0 ? o->servers : 1) : 0);
}

static void one_step(ddl_group *w, ddl_trainer *t, net *m, const job *j, int step) {
    int rank = ddl_rank(w);
    for (int i = 0; i < TENSORS && j->config.overlap_forward; i++) {
        OK(ddl_param_wait(t, i));
    }
    OK(ddl_trainer_set_rate(t, step < j->steps / 2 ? 0.05 : 0.025));
    for (int k = TENSORS - 1; k >= 0; k--) {
        int i = rank % 2 == 1 ? (k * 5) % TENSORS : k;
        net_backward(m, i, step, rank * BATCH);
        OK(ddl_grad_ready(t, i));
        memset(m->grad[i], 0xff, sizeof m->grad[i]); /* it has been copied */
    }
    OK(ddl_step(t));
}

static void train(ddl_group *w, void *arg) {
    job *j = arg;
    int rank = ddl_rank(w);
    net *m = calloc(1, sizeof *m);
    net_begin(m, rank == 0);
    ddl_trainer *t = make_trainer(w, &j->config, m, NULL);
    if (rank >= workers_of(ddl_size(w), &j->config)) {
        FAILS(ddl_step(t), DDL_ERR_ARG, "only serves");
        OK(ddl_trainer_serve(t));
        OK(ddl_trainer_free(&t));
        free(m);
        return;
    }
    FAILS(ddl_trainer_serve(t), DDL_ERR_ARG, "is no dedicated server");
    for (int step = 0; step < j->steps; step++) {
        one_step(w, t, m, j, step);
    }
    OK(ddl_param_wait(t, DDL_ALL));
    if (rank == 0) {
        OK(ddl_trainer_stats_get(t, &j->stats));
        CHECK(ddl_trainer_describe(t, j->text, sizeof j->text) <= sizeof j->text);
    }
    OK(ddl_trainer_free(&t));
    j->result[rank] = m;
}

/* Runs a job; all workers have the same bits. Returns rank 0's net. */
static net *run_job(int ranks, job *j, const char *what) {
    world_threads(ranks, train, j);
    for (int r = 1; r < workers_of(ranks, &j->config); r++) {
        if (memcmp(j->result[0]->param, j->result[r]->param, sizeof j->result[0]->param) != 0) {
            test__fail(__FILE__, __LINE__, "%s: rank %d has other bits than rank 0", what, r);
        }
        free(j->result[r]);
    }
    return j->result[0];
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

#define LINE .latency_s = 2e-5, .seconds_per_byte = 1e-9
#define PS .optimizer = {.learning_rate = 0.05}, .architecture = DDL_ARCHITECTURE_PS
#define AUTO .optimizer = {.learning_rate = 0.05}, .architecture = DDL_ARCHITECTURE_AUTO
static double expected[TENSORS][LARGEST];

static const struct {
    const char *name, *text;
    ddl_trainer_config config;
} variants[] = {
    {"all-reduce", "BSP over all-reduce", {.optimizer = {.learning_rate = 0.05}}},
    {"none", "BSP over 3 colocated servers on 3 ranks", {PS, .schedule = DDL_SCHEDULE_NONE}},
    {"none on one", "BSP over 1 colocated server", {PS, .schedule = DDL_SCHEDULE_NONE, .servers = 1}},
    {"wait-free", "wait-free", {PS, .schedule = DDL_SCHEDULE_WAIT_FREE}},
    {"unchecked", "fused", {PS, .schedule = DDL_SCHEDULE_FUSED, .bucket_bytes = 3000, .unchecked = 1}},
    {"merged", "MG-WFBP", {PS, LINE, .schedule = DDL_SCHEDULE_MERGED, .replan_steps = 7}},
    {"auto measured", "auto", {PS, .replan_steps = 10, .servers = 2}},
    {"priority", "priority", {PS, LINE, .schedule = DDL_SCHEDULE_PRIORITY, .piece_bytes = 1024, .credit_bytes = 2048}},
    {"priority overlapping",
     "priority",
     {PS, .schedule = DDL_SCHEDULE_PRIORITY, .piece_bytes = 2048, .replan_steps = 9, .overlap_forward = 1}},
    {"auto overlapping", "auto", {PS, LINE, .overlap_forward = 1}},
    {"SSP with bound 0", "SSP with a staleness of 0", {PS, .sync = DDL_SYNC_SSP, .staleness = -1}},
    {"two dedicated", "BSP over 2 dedicated servers on 3 ranks", {PS, .servers = 2, .dedicated = 1}},
    {"averaging, clipped from 1e9", "that average", {PS, .clip_norm = 1e9, .servers = 2}},
    {"averaging, uneven", "that average", {PS, .uneven = 1, .dedicated = 1}},
    {"auto, all-reduce being slow", "5 of them over servers", {AUTO, .latency_s = 1, .seconds_per_byte = 1}},
    {"auto, all-reduce being fast",
     "0 of them over servers",
     {AUTO, .latency_s = 1e-12, .seconds_per_byte = 1e-15, .replan_steps = 5, .servers = 1}},
    {"auto, large ones are slow",
     "of them over servers",
     {AUTO, .latency_s = 1e-9, .seconds_per_byte = 1, .overlap_forward = 1}},
    {"auto as measured",
     "BSP over all-reduce and 3 colocated servers that average",
     {AUTO, .replan_steps = 10, .schedule = DDL_SCHEDULE_PRIORITY, .piece_bytes = 2048}},
    {"one dedicated, overlapping", "dedicated", {PS, .dedicated = 1, .overlap_forward = 1}},
};

TEST(every_schedule_is_one_rank_with_the_batch_of_all) {
    enum { WORKERS = 3 };
    world_config = &(ddl_config){.deterministic = 1, .progress_thread = 1};
    oracle(expected, STEPS, WORKERS * BATCH, 0.05);
    net *first = NULL;
    for (size_t v = 0; v < sizeof variants / sizeof variants[0]; v++) {
        job j = {.config = variants[v].config, .steps = STEPS};
        net *got = run_job(2 * WORKERS - workers_of(WORKERS, &j.config), &j, variants[v].name);
        close_to(got, expected, 1e-6, variants[v].name);
        CHECK_EQ(j.stats.steps, STEPS);
        CHECK_EQ(j.stats.contributors, WORKERS);
        CHECK(j.stats.bytes >= (1 + 700 + LARGEST + 33 + 1000) * 4);
        CHECK_STR(j.text, variants[v].text);
        first = first == NULL ? got : first;
        if (memcmp(first->param, got->param, sizeof got->param) != 0) {
            test__fail(__FILE__, __LINE__, "%s: other bits than over all-reduce in rank order", variants[v].name);
        }
        if (got != first) {
            free(got);
        }
    }
    free(first);
    world_config = NULL;
}

/* >>optimizers */

static int own_step(void *user, ddl_trainer *trainer) {
    (void)trainer;
    net *m = user;
    for (int i = 0; i < TENSORS; i++) {
        for (int k = 0; k < sizes[i]; k++) {
            m->param[i][k] -= 0.05f * m->grad[i][k];
        }
    }
    return 0;
}

static void train_own(ddl_group *w, void *arg) {
    job *j = arg;
    int rank = ddl_rank(w);
    net *m = calloc(1, sizeof *m);
    net_begin(m, rank == 0);
    ddl_trainer_config config = j->config;
    config.step_user = config.step != NULL ? m : NULL;
    ddl_trainer *t = make_trainer(w, &config, m, &(ddl_trainer_options){.rate_factor = 0.5, .no_decay = 1});
    for (int step = 0; step < j->steps; step++) {
        for (int i = TENSORS - 1; i >= 0; i--) {
            net_backward(m, i, step, rank * BATCH);
            OK(ddl_grad_ready(t, i));
        }
        OK(ddl_step(t));
    }
    char line[512] = "";
    ddl_trainer_describe(t, line, sizeof line);
    int averages = config.clip_norm > 0 || config.step != NULL;
    CHECK_EQ(strstr(line, "that average") != NULL, config.architecture == DDL_ARCHITECTURE_PS && averages);
    OK(ddl_trainer_free(&t));
    j->result[rank] = m;
}

/* All optimizers, on servers or on workers when they need more than a server has: the bits of all-reduce. */
TEST(optimizers_have_the_bits_of_all_reduce) {
    enum { N = 3 };
    world_config = &(ddl_config){.deterministic = 1, .progress_thread = 1};
    const ddl_trainer_config configs[] = {
        {.optimizer = {.kind = DDL_MOMENTUM, .weight_decay = 0.1}},
        {.optimizer = {.kind = DDL_NESTEROV}, .accumulate = 1},
        {.optimizer = {.kind = DDL_ADAM}},
        {.optimizer = {.kind = DDL_ADAMW, .weight_decay = 0.01}, .schedule = DDL_SCHEDULE_NONE},
        {.optimizer = {.kind = DDL_LARS}},
        {.optimizer = {.kind = DDL_LAMB}},
        {.optimizer = {.kind = DDL_ADAMW}, .clip_norm = 2},
        {.step = own_step},
    };
    for (size_t i = 0; i < sizeof configs / sizeof configs[0]; i++) {
        job plain = {.config = configs[i], .steps = 12}, served = plain;
        served.config.architecture = DDL_ARCHITECTURE_PS;
        world_threads(N, train_own, &plain);
        world_threads(N, train_own, &served);
        for (int r = 0; r < N; r++) {
            if (memcmp(plain.result[0]->param, served.result[r]->param, sizeof served.result[r]->param) != 0) {
                test__fail(__FILE__, __LINE__, "config %zu: rank %d has other bits over servers", i, r);
            }
        }
        CHECK(served.result[0]->param[1][5] != (float)start_of(1, 5));
        for (int r = 0; r < N; r++) {
            free(plain.result[r]);
            free(served.result[r]);
        }
    }
    world_config = NULL;
}

/* >>16 bits: servers have the f32 copy, so that steps smaller than a bit of the parameter add up */

typedef struct narrow {
    ddl_dtype dtype;
    ddl_sync sync;
    uint16_t one, end; /* 1, and 0.875 = 1 - 125 / 1000; bf16 has 0.004 between two numbers there */
} narrow;

static void half(ddl_group *w, void *arg) {
    const narrow *n = arg;
    uint16_t p[2] = {n->one, n->one}, g[2] = {n->one, n->one};
    ddl_trainer *t = NULL;
    ddl_trainer_config config = {
        .architecture = DDL_ARCHITECTURE_PS, .sync = n->sync, .optimizer = {.learning_rate = 1e-3}};
    OK(ddl_trainer_create(w, &config, &t));
    ddl_trainer_options slow = {.rate_factor = -1};
    OK(ddl_trainer_add(t, "p", ddl_tensor_1d(&p[0], n->dtype, 1), ddl_tensor_1d(&g[0], n->dtype, 1), NULL, NULL));
    OK(ddl_trainer_add(t, "still", ddl_tensor_1d(&p[1], n->dtype, 1), ddl_tensor_1d(&g[1], n->dtype, 1), &slow, NULL));
    OK(ddl_trainer_start(t));
    for (int i = 0; i < 126; i++) {
        if (i == 125 && n->sync != DDL_SYNC_BSP) { /* all pushes are in: a step of no length sees them */
            OK(ddl_barrier(w));
        }
        OK(ddl_trainer_set_rate(t, i == 125 ? 0 : 1e-3));
        OK(ddl_grad_ready(t, DDL_ALL));
        OK(ddl_step(t));
    }
    CHECK_EQ(p[0], n->end);
    CHECK_EQ(p[1], n->one);
    OK(ddl_trainer_free(&t));
}
TEST(sixteen_bits_with_a_copy_on_servers) {
    narrow all[] = {{DDL_BF16, DDL_SYNC_BSP, 0x3f80, 0x3f60},
                    {DDL_BF16, DDL_SYNC_SSP, 0x3f80, 0x3f60},
                    {DDL_BF16, DDL_SYNC_ASP, 0x3f80, 0x3f60},
                    {DDL_F16, DDL_SYNC_ASP, 0x3c00, 0x3b00}};
    for (int i = 0; i < 4; i++) {
        world_threads(2, half, &all[i]);
    }
}

/* >>not finite */

static void not_finite(ddl_group *w, void *arg) {
    const ddl_trainer_config *config = arg;
    float p[2][3] = {{1, 1, 1}, {2, 2, 2}}, g[2][3] = {{1, 1, 1}, {1, 1, 1}};
    ddl_trainer *t = NULL;
    ddl_trainer_stats stats;
    int mine = ddl_rank(w) == 1, averages = config->clip_norm > 0;
    OK(ddl_trainer_create(w, config, &t));
    OK(ddl_trainer_add(t, "first", DDL_ARRAY(p[0]), DDL_ARRAY(g[0]), NULL, NULL));
    OK(ddl_trainer_add(t, "second", DDL_ARRAY(p[1]), DDL_ARRAY(g[1]), NULL, NULL));
    OK(ddl_trainer_start(t));
    g[1][1] = mine ? NAN : 1;
    OK(ddl_grad_ready(t, DDL_ALL));
    if (config->overlap_forward) {
        OK(ddl_step(t));
        OK(ddl_param_wait(t, 0));
        FAILS(ddl_param_wait(t, 1), DDL_ERR_ARG, "gradient \"second\" of step 1 is not finite");
    } else {
        FAILS(ddl_step(t), DDL_ERR_ARG, "gradient \"second\" of step 1 is not finite");
    }
    CHECK_EQ(p[0][0], averages ? 1 : 0); /* servers that step have updated the other one */
    CHECK_EQ(p[1][0], 2);
    g[1][1] = 1;
    OK(ddl_grad_ready(t, DDL_ALL));
    OK(ddl_step(t));
    OK(ddl_param_wait(t, DDL_ALL));
    CHECK_EQ(p[0][2], averages ? 0 : -1);
    CHECK_EQ(p[1][1], 1);
    OK(ddl_trainer_stats_get(t, &stats));
    CHECK_EQ(stats.not_finite, 1);
    OK(ddl_trainer_free(&t));
}
TEST(gradients_that_are_not_finite) {
    ddl_trainer_config configs[] = {{.optimizer = {.learning_rate = 1}, .architecture = DDL_ARCHITECTURE_PS},
                                    {.optimizer = {.learning_rate = 1}, .architecture = DDL_ARCHITECTURE_PS},
                                    {.optimizer = {.learning_rate = 1}, .architecture = DDL_ARCHITECTURE_PS}};
    configs[1].overlap_forward = 1;
    configs[2].clip_norm = 100;
    for (int i = 0; i < 3; i++) {
        world_threads(2, not_finite, &configs[i]);
    }
}

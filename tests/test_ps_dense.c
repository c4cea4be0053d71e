/* Parameter servers, dense: BSP over any number of servers equals a plain loop bit for bit, SSP with bound 0 equals BSP,
 * ASP applies every push exactly once, also when it is pushed again; pushes are shared out evenly; memory is bounded.
 * tests/run: variants=gcc,asan,tsan */
#include "ps.h"

enum { STEPS = 5, PARAMS = 4 };
static const int64_t lengths[PARAMS] = {70001, 0, 3, 5000};

typedef struct model {
    float *values[PARAMS];
} model;

static model model_new(void) {
    model m;
    for (int p = 0; p < PARAMS; p++) {
        m.values[p] = (float *)malloc((size_t)(lengths[p] + 1) * sizeof(float));
        ps_fill(m.values[p], lengths[p], 99, p);
    }
    return m;
}

static void model_free(model *m) {
    for (int p = 0; p < PARAMS; p++) {
        free(m->values[p]);
    }
}

static void model_tensors(const model *m, ddl_tensor out[PARAMS]) {
    for (int p = 0; p < PARAMS; p++) {
        out[p] = ddl_tensor_1d(m->values[p], DDL_F32, lengths[p]);
    }
}

static void model_poison(model *m) {
    for (int p = 0; p < PARAMS; p++) {
        memset(m->values[p], 0x7f, (size_t)lengths[p] * sizeof(float));
    }
}

/* The oracle: momentum SGD on the average of the workers' gradients, added in the order of workers, in plain loops. */
static void plain_loop(model *m, int workers, float rate, float momentum) {
    for (int p = 0; p < PARAMS; p++) {
        for (int64_t i = 0; i < lengths[p]; i++) {
            float state = 0;
            for (int step = 0; step < STEPS; step++) {
                volatile float sum = ps_grad(0, step * PARAMS + p, i); /* volatile: no contraction, no reassociation */
                for (int w = 1; w < workers; w++) {
                    sum = sum + ps_grad(w, step * PARAMS + p, i);
                }
                volatile float mean = sum / (float)workers, scaled = momentum * state;
                volatile float moved = scaled + mean, by = rate * moved;
                state = moved;
                m->values[p][i] = m->values[p][i] - by;
            }
        }
    }
}

static int64_t model_differs(const model *a, const model *b) {
    int64_t differ = 0;
    for (int p = 0; p < PARAMS; p++) {
        for (int64_t i = 0; i < lengths[p]; i++) {
            differ += memcmp(&a->values[p][i], &b->values[p][i], sizeof(float)) != 0;
        }
    }
    return differ;
}

/* Pushes and pulls in different orders on different workers, without blocking; then all as one. */
static void bsp_work(ddl_group *w, ddl_ps *ps, void *arg) {
    int me = ps_worker(ps), workers = ps_workers(ps);
    model mine = model_new(), grads = model_new(), expected = model_new();
    ddl_tensor out[PARAMS], g[PARAMS];
    (void)arg;
    model_tensors(&mine, out);
    model_tensors(&grads, g);
    plain_loop(&expected, workers, 0.125f, 0.5f);
    for (int step = 0; step < STEPS; step++) {
        ddl_request *requests[2 * PARAMS] = {NULL};
        for (int k = 0; k < PARAMS; k++) {
            int p = me % 2 == 0 ? k : PARAMS - 1 - k;
            ps_fill(grads.values[p], lengths[p], me, step * PARAMS + p);
            if (step % 2 == 0) {
                OK(ddl_ps_ipush(ps, p, g[p], NULL, &requests[p]));
            } else {
                memset(mine.values[p], 0x7f, (size_t)lengths[p] * sizeof(float));
                OK(ddl_ps_ipush_pull(ps, p, g[p], out[p], NULL, &requests[p]));
            }
        }
        OK(ddl_wait_all(requests, 2 * PARAMS, NULL));
        OK(ddl_ps_clock(ps));
    }
    model_poison(&mine);
    for (int p = 0; p < PARAMS; p++) {
        OK(ddl_ps_pull(ps, p, out[p]));
    }
    CHECK_EQ(model_differs(&mine, &expected), 0);
    model_free(&mine);
    model_free(&grads);
    model_free(&expected);
}

static void bsp(ddl_group *w, void *arg) {
    model m = model_new();
    ddl_tensor params[PARAMS];
    ddl_ps_config config = *(const ddl_ps_config *)arg;
    config.optimizer = (ddl_optimizer){.kind = DDL_MOMENTUM, .learning_rate = 0.125, .momentum = 0.5};
    model_tensors(&m, params);
    if (ddl_rank(w) != 0) {
        model_poison(&m); /* only rank 0's values count */
    }
    ps_run(w, &config, params, PARAMS, bsp_work, NULL);
    model_free(&m);
}

TEST(bsp_equals_a_plain_loop_bit_for_bit_over_any_number_of_servers) {
    const ddl_ps_config configs[] = {{.servers = 1},
                                     {.servers = 3, .piece_bytes = 30000},
                                     {.servers = 1, .dedicated = 1},
                                     {.servers = 2, .dedicated = 1, .piece_bytes = 100000}};
    for (size_t i = 0; i < sizeof configs / sizeof configs[0]; i++) {
        world_threads(3, bsp, (void *)(uintptr_t)&configs[i]);
    }
    world_threads(1, bsp, (void *)(uintptr_t)&configs[0]);
}

/* Each worker pushes 12 MiB, of which a server asks for a part at a time; one begins when the others wait. */
enum { LATE = 3 << 20, LATE_STEPS = 3 };

static void late_work(ddl_group *w, ddl_ps *ps, void *arg) {
    int me = ps_worker(ps), late;
    float *grad = malloc(LATE * sizeof *grad), *out = malloc(LATE * sizeof *out);
    (void)arg;
    for (int step = 0; step < LATE_STEPS; step++) {
        ddl_request *r = NULL;
        int64_t wrong = 0;
        late = 2 - step;
        for (int i = 0; i < LATE; i++) {
            grad[i] = (float)((me + 1) * (step + 1) * (i % 1021)); /* their mean: 2 * (step + 1) * (i % 1021) */
        }
        memset(out, 0x7f, LATE * sizeof *out);
        if (me == late) {
            OK(ddl_barrier(w));
        }
        OK(ddl_ps_ipush_pull(ps, 0, ddl_tensor_1d(grad, DDL_F32, LATE), ddl_tensor_1d(out, DDL_F32, LATE), NULL, &r));
        if (me != late) {
            OK(ddl_barrier(w));
        }
        OK(ddl_wait(&r, NULL));
        OK(ddl_ps_clock(ps));
        for (int i = 0; i < LATE; i++) {
            wrong += out[i] != (float)(i % 5 - (step + 1) * (step + 2) * (i % 1021));
        }
        CHECK_EQ(wrong, 0);
    }
    free(grad);
    free(out);
}

static void late(ddl_group *w, void *arg) {
    float *values = malloc(LATE * sizeof *values);
    const ddl_ps_config config = {.servers = 1, .piece_bytes = 1 << 18, .optimizer = {.learning_rate = 1}};
    for (int i = 0; i < LATE; i++) {
        values[i] = (float)(i % 5);
    }
    ddl_tensor param = ddl_tensor_1d(values, DDL_F32, LATE);
    ps_run(w, &config, &param, 1, late_work, arg);
    free(values);
}

TEST(pushes_that_a_server_asks_for_later_come_in_the_end) {
    world_threads(3, late, NULL);
    world_fork(3, late, NULL, 60);
}

TEST(ssp_with_bound_0_equals_bsp_bit_for_bit) {
    ddl_ps_config config = {.servers = 2, .sync = {.mode = DDL_SYNC_SSP, .staleness = -1}};
    world_threads(3, bsp, &config);
}

TEST(over_processes_and_sockets_it_is_the_same) {
    ddl_ps_config config = {.servers = 2};
    world_fork(3, bsp, &config, 40);
}

/* >>exactly once */

enum { COUNT = 3000, PUSHES = 20 };

/* Integers in floats, so that the sum is exact whatever the order: every push counts once, or the sum says it. Each
 * push is made twice; of some the second comes as a new call after others. */
static void asp_work(ddl_group *w, ddl_ps *ps, void *arg) {
    int me = ps_worker(ps), workers = ps_workers(ps);
    static const float sign = -1; /* of SGD */
    float *grad = (float *)malloc(COUNT * sizeof(float)), *value = (float *)malloc(COUNT * sizeof(float));
    (void)arg;
    for (int k = 0; k < PUSHES; k++) {
        uint64_t sequence = 0;
        for (int i = 0; i < COUNT; i++) {
            grad[i] = (float)((me + 1) * (k + 1) + i % 7);
        }
        OK(ddl_ps_push(ps, 0, ddl_tensor_1d(grad, DDL_F32, COUNT), &sequence));
        CHECK_EQ(sequence, (uint64_t)k + 1);
        OK(ddl_ps_push(ps, 0, ddl_tensor_1d(grad, DDL_F32, COUNT), &sequence)); /* as after a timeout */
        CHECK_EQ(sequence, (uint64_t)k + 1);
        OK(ddl_ps_clock(ps));
    }
    OK(ddl_barrier(w));
    memset(value, 0x7f, COUNT * sizeof(float));
    OK(ddl_ps_pull(ps, 0, ddl_tensor_1d(value, DDL_F32, COUNT)));
    int wrong = 0;
    for (int i = 0; i < COUNT; i++) {
        float expected = 0;
        for (int k = 0; k < PUSHES; k++) {
            for (int v = 0; v < workers; v++) {
                expected += sign * (float)((v + 1) * (k + 1) + i % 7);
            }
        }
        wrong += memcmp(&value[i], &expected, sizeof expected) != 0;
    }
    CHECK_EQ(wrong, 0);
    ddl_ps_info info;
    OK(ddl_ps_info_get(ps, &info));
    if (info.server >= 0 && info.elements > 0) {
        CHECK_EQ(info.pushes_applied, info.pushes_repeated);
        CHECK(info.pushes_applied >= (uint64_t)(workers * PUSHES));
    }
    uint64_t unknown = 1000000;
    FAILS(ddl_ps_push(ps, 0, ddl_tensor_1d(grad, DDL_F32, COUNT), &unknown), DDL_ERR_ARG, "no push has had the sequence");
    free(grad);
    free(value);
}

static void asp(ddl_group *w, void *arg) {
    float *zeros = (float *)calloc(COUNT, sizeof(float));
    ddl_tensor param = ddl_tensor_1d(zeros, DDL_F32, COUNT);
    ddl_ps_config config = {
        .servers = 2, .sync = {.mode = DDL_SYNC_ASP}, .op = DDL_SUM, .optimizer = {.kind = DDL_SGD, .learning_rate = 1}};
    (void)arg;
    ps_run(w, &config, &param, 1, asp_work, NULL);
    free(zeros);
}

TEST(asp_applies_every_push_exactly_once_also_when_it_is_pushed_again) { world_threads(3, asp, NULL); }

/* >>shards */

static void shard_none(ddl_group *w, ddl_ps *ps, void *arg) {
    ddl_ps_info info;
    int64_t *held = (int64_t *)arg;
    OK(ddl_ps_info_get(ps, &info));
    held[ddl_rank(w)] = info.elements;
}

/* Whatever the tensors: what servers hold adds up, and differs by a piece at most; of a large total by an eighth. */
static void shard(ddl_group *w, void *arg) {
    static const int64_t shapes[][4] = {{1, 1, 1, 1}, {100000, 0, 0, 0}, {65537, 1000, 3, 999}, {5, 40000, 40000, 7}};
    int64_t *held = (int64_t *)arg;
    float *memory = (float *)calloc(100001, sizeof(float));
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        ddl_tensor params[4];
        int64_t total = 0, most = 0, least = INT64_MAX, sum = 0;
        for (int i = 0; i < 4; i++) {
            params[i] = ddl_tensor_1d(memory, DDL_F32, shapes[s][i]);
            total += shapes[s][i];
        }
        ddl_ps_config config = {.servers = 3};
        ps_run(w, &config, params, 4, shard_none, held);
        OK(ddl_barrier(w));
        for (int r = 0; r < 3; r++) {
            sum += held[r];
            most = held[r] > most ? held[r] : most;
            least = held[r] < least ? held[r] : least;
        }
        CHECK_EQ(sum, total);
        CHECK(most - least <= 1024 || most - least <= total / 24 + 1);
        OK(ddl_barrier(w));
    }
    free(memory);
}

TEST(servers_hold_alike_much_also_of_one_large_tensor) {
    int64_t held[3] = {0};
    world_threads(3, shard, held);
}

/* >>memory */

enum { LARGE = 200000 };

static void bounded_work(ddl_group *w, ddl_ps *ps, void *arg) {
    float *grad = (float *)malloc(LARGE * sizeof(float)), *value = (float *)malloc(LARGE * sizeof(float));
    int64_t bound = *(const int64_t *)arg;
    ddl_ps_info info;
    for (int step = 0; step < 4; step++) {
        ddl_request *r[2] = {NULL};
        ps_fill(grad, LARGE, ps_worker(ps), step);
        OK(ddl_ps_ipush_pull(ps, 0, ddl_tensor_1d(grad, DDL_F32, LARGE), ddl_tensor_1d(value, DDL_F32, LARGE), NULL,
                             &r[0]));
        OK(ddl_wait_all(r, 2, NULL));
        OK(ddl_ps_clock(ps));
    }
    OK(ddl_ps_info_get(ps, &info));
    if (info.server >= 0) {
        CHECK((int64_t)info.memory_peak_bytes <= bound + 200000); /* and the requests that wait, 1 KiB each */
    }
    free(grad);
    free(value);
}

/* 4 workers push at once what would take 4 * 800 kB of buffers; there is room for a piece or two. */
static void bounded(ddl_group *w, void *arg) {
    float *zeros = (float *)calloc(LARGE, sizeof(float));
    ddl_tensor param = ddl_tensor_1d(zeros, DDL_F32, LARGE);
    ddl_ps_config config = {.memory_bytes = 1000};
    ddl_ps *ps = NULL;
    (void)arg;
    const char *why = ddl_rank(w) == 0 ? "memory_bytes is 1000" : "rank 0 cannot make its part";
    FAILS(ddl_ps_create(w, &config, &param, 1, &ps), DDL_ERR_NOMEM, why);
    CHECK(ps == NULL);
    config.memory_bytes = 2100000;
    ps_run(w, &config, &param, 1, bounded_work, &config.memory_bytes);
    free(zeros);
}

TEST(memory_is_bounded_and_workers_that_are_ahead_wait) { world_threads(4, bounded, NULL); }

/* >>a worker's own writes */

/* A pull that is asked for while the push before it is still on its way sees it all the same. */
static void own_work(ddl_group *w, ddl_ps *ps, void *arg) {
    float *grad = (float *)malloc(LARGE * sizeof(float)), *value = (float *)malloc(LARGE * sizeof(float));
    (void)arg;
    for (int i = 0; i < LARGE; i++) {
        grad[i] = -1;
    }
    for (int k = 0; k < 10; k++) {
        ddl_request *r[2] = {NULL};
        int missing = 0;
        memset(value, 0xff, LARGE * sizeof(float)); /* NaN */
        OK(ddl_ps_ipush(ps, 0, ddl_tensor_1d(grad, DDL_F32, LARGE), NULL, &r[0]));
        OK(ddl_ps_ipull(ps, 0, ddl_tensor_1d(value, DDL_F32, LARGE), &r[1]));
        OK(ddl_wait_all(r, 2, NULL));
        for (int i = 0; i < LARGE; i++) {
            missing += !(value[i] >= (float)(k + 1) && value[i] <= 20.0f);
        }
        CHECK_EQ(missing, 0);
        OK(ddl_ps_clock(ps));
    }
    free(grad);
    free(value);
}

static void own(ddl_group *w, void *arg) {
    float *zeros = (float *)calloc(LARGE, sizeof(float));
    ddl_tensor param = ddl_tensor_1d(zeros, DDL_F32, LARGE);
    ddl_ps_config config = {
        .sync = *(const ddl_sync_config *)arg, .op = DDL_SUM, .optimizer = {.kind = DDL_SGD, .learning_rate = 1}};
    ps_run(w, &config, &param, 1, own_work, NULL);
    free(zeros);
}

TEST(a_worker_always_sees_its_own_writes) {
    ddl_sync_config modes[] = {{DDL_SYNC_ASP, 0, 0}, {DDL_SYNC_SSP, 3, 0}};
    world_threads(2, own, &modes[0]);
    world_threads(2, own, &modes[1]);
}

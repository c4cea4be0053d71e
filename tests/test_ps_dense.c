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

TEST(ssp_with_bound_0_equals_bsp_bit_for_bit) {
    ddl_ps_config config = {.servers = 2, .sync = {.mode = DDL_SYNC_SSP, .staleness = -1}};
    world_threads(3, bsp, &config);
}

TEST(over_processes_and_sockets_it_is_the_same) {
    ddl_ps_config config = {.servers = 2};
    world_fork(3, bsp, &config, 40);
}

/* Clocks of parameter servers: the SSP invariant at every step of every worker under random delays, what a read must see,
 * a worker's own writes, adaptive bounds, modes that change, workers that leave.
 * tests/run: variants=gcc,asan,tsan libs=-lm */
#include "faults.h"
#include "ps.h"

#include <math.h>
#include <stdatomic.h>

enum { WORKERS = 4, CLOCKS = 40, WIDE = 5 };

typedef struct watch {
    ddl_sync_config sync;
    int bound;          /* most that a worker may be ahead */
    uint64_t seed;
    atomic_int clock[WORKERS]; /* iterations that each has finished, told before it may be seen to be ahead */
    atomic_int worst;      /* or how often one was so far ahead */
} watch;

/* The observer: compares this worker's clock with all others, right after it grew. Theirs can only have grown since. */
static void observe(watch *x, int me, int clock) {
    for (int w = 0; w < WORKERS; w++) {
        int ahead = clock - atomic_load(&x->clock[w]);
        int worst = atomic_load(&x->worst);
        while (w != me && ahead > worst && !atomic_compare_exchange_weak(&x->worst, &worst, ahead)) {
        }
    }
}

/* Parameter w is worker w's own counter: it pushes -1 (SGD, rate 1, SUM) in each iteration, so that the value says how
 * many of its updates are visible. */
static void ssp_work(ddl_group *w, ddl_ps *ps, void *arg) {
    watch *x = (watch *)arg;
    int me = ps_worker(ps);
    uint64_t random = x->seed + (uint64_t)me;
    float one[WIDE], value[WIDE];
    for (int i = 0; i < WIDE; i++) {
        one[i] = -1;
    }
    for (int clock = 0; clock < CLOCKS; clock++) {
        for (int v = 0; v < WORKERS; v++) {
            memset(value, 0x7f, sizeof value);
            OK(ddl_ps_pull(ps, v, DDL_ARRAY(value)));
            int seen = (int)value[0];
            CHECK(memcmp(&value[0], &value[WIDE - 1], sizeof value[0]) == 0); /* not half of an update */
            if (v == me) {
                CHECK_EQ(seen, clock); /* its own writes */
            } else {
                CHECK(seen >= clock - x->bound); /* all updates with a timestamp <= clock - bound - 1 */
                CHECK(seen <= CLOCKS);
            }
        }
        if (fault_random(&random) % 4 == 0) {
            usleep((useconds_t)(fault_random(&random) % 2000));
        }
        OK(ddl_ps_push(ps, me, DDL_ARRAY(one), NULL));
        atomic_store(&x->clock[me], clock + 1);
        OK(ddl_ps_clock(ps));
        observe(x, me, clock + 1);
    }
}

/* Servers of WORKERS parameters that begin as zeros. */
static void run_counters(ddl_group *w, const ddl_ps_config *config, ps_fn work, watch *x) {
    float zeros[WIDE] = {0};
    ddl_tensor params[WORKERS];
    for (int i = 0; i < WORKERS; i++) {
        params[i] = ddl_tensor_1d(zeros, DDL_F32, WIDE);
    }
    ps_run(w, config, params, WORKERS, work, x);
}

static void ssp(ddl_group *w, void *arg) {
    watch *x = (watch *)arg;
    ddl_ps_config config = {.servers = 2, .sync = x->sync, .op = DDL_SUM, .optimizer = {.learning_rate = 1}};
    run_counters(w, &config, ssp_work, x);
}

static void run_ssp(int staleness, int most, int bound) {
    watch x;
    memset(&x, 0, sizeof x);
    x.sync = (ddl_sync_config){DDL_SYNC_SSP, staleness, most};
    x.bound = bound;
    x.seed = fault_seed("ssp");
    world_threads(WORKERS, ssp, &x);
    printf("staleness %d: a worker was at most %d ahead\n", bound, atomic_load(&x.worst));
    CHECK(atomic_load(&x.worst) <= bound + 1);
}

TEST(ssp_no_worker_is_more_than_staleness_plus_one_ahead_and_reads_see_what_they_must) {
    run_ssp(1, 0, 1);
    run_ssp(0, 0, 3); /* the default */
}

TEST(adaptive_staleness_stays_between_its_bounds) { run_ssp(1, 6, 6); }

/* One worker is ten times as slow as the other, which waits most of the time: that does not make it look as slow. In the
 * second half of the run it is ahead by the upper bound, most of the time. */
static void uneven_work(ddl_group *w, ddl_ps *ps, void *arg) {
    watch *x = (watch *)arg;
    int me = ps_worker(ps);
    float one[WIDE] = {0}, value[WIDE];
    for (int clock = 0; clock < CLOCKS; clock++) {
        for (int v = 0; v < WORKERS; v++) {
            OK(ddl_ps_pull(ps, v, DDL_ARRAY(value)));
        }
        usleep(me == 0 ? 30000 : 3000);
        OK(ddl_ps_push(ps, me, DDL_ARRAY(one), NULL));
        atomic_store(&x->clock[me], clock + 1);
        OK(ddl_ps_clock(ps));
        int ahead = clock + 1 - atomic_load(&x->clock[0]);
        CHECK(ahead <= x->bound + 1);
        atomic_fetch_add(&x->worst, me == 1 && clock >= CLOCKS / 2 && ahead >= x->bound);
    }
}

static void uneven(ddl_group *w, void *arg) {
    watch *x = (watch *)arg;
    ddl_ps_config config = {.servers = 2, .sync = x->sync};
    run_counters(w, &config, uneven_work, x);
}

TEST(who_waits_for_the_slowest_is_not_slow) {
    watch x;
    memset(&x, 0, sizeof x);
    x.sync = (ddl_sync_config){DDL_SYNC_SSP, 1, 6};
    x.bound = 6;
    world_threads(2, uneven, &x);
    CHECK(atomic_load(&x.worst) >= CLOCKS / 4);
}

/* >>a fast worker runs to its bound and not beyond, also when it never reads */

static void alone_work(ddl_group *w, ddl_ps *ps, void *arg) {
    watch *x = (watch *)arg;
    int me = ps_worker(ps);
    if (me == 0) { /* as far as it may without the others */
        for (int i = 0; i < x->bound + 1; i++) {
            OK(ddl_ps_clock(ps));
        }
    }
    OK(ddl_barrier(w));
    for (int clock = me == 0 ? x->bound + 1 : 0; clock < CLOCKS; clock++) {
        usleep(me == 0 ? 0 : 500);
        atomic_store(&x->clock[me], clock + 1); /* before it is told: so it is never more than this */
        OK(ddl_ps_clock(ps));
        if (me == 0) {
            CHECK(clock + 1 - atomic_load(&x->clock[1]) <= x->bound + 1);
        }
    }
}

static void alone(ddl_group *w, void *arg) {
    const watch *x = (const watch *)arg;
    float zero[1] = {0};
    ddl_tensor param = DDL_ARRAY(zero);
    ddl_ps_config config = {.sync = x->sync};
    ps_run(w, &config, &param, 1, alone_work, arg);
}

TEST(a_fast_worker_may_run_ahead_up_to_its_bound_and_no_further) {
    watch x;
    memset(&x, 0, sizeof x);
    x.sync = (ddl_sync_config){DDL_SYNC_SSP, 2, 0};
    x.bound = 2;
    world_threads(2, alone, &x);
}

/* >>modes that change, workers that leave */

/* Clock after clock in another mode; at the end all pushes of all modes are in, each once. */
static void change_work(ddl_group *w, ddl_ps *ps, void *arg) {
    static const ddl_sync_config modes[] = {{DDL_SYNC_ASP, 0, 0}, {DDL_SYNC_SSP, 2, 0}, {DDL_SYNC_BSP, 0, 0},
                                            {DDL_SYNC_SSP, -1, 0}, {DDL_SYNC_ASP, 0, 0}, {DDL_SYNC_BSP, 0, 0}};
    int me = ps_worker(ps), pushes = 0;
    float grad[WIDE], value[WIDE];
    ddl_ps_info info;
    (void)arg;
    for (size_t m = 0; m < sizeof modes / sizeof modes[0]; m++) {
        OK(ddl_ps_switch(ps, &modes[m]));
        OK(ddl_ps_info_get(ps, &info));
        int64_t start = info.clock, steps = modes[m].mode == DDL_SYNC_ASP ? 2 + me : 3; /* ASP: clocks drift apart */
        for (int64_t s = 0; s < steps; s++, pushes++) {
            for (int i = 0; i < WIDE; i++) {
                grad[i] = -1;
            }
            OK(ddl_ps_push(ps, 0, DDL_ARRAY(grad), NULL));
            OK(ddl_ps_clock(ps));
        }
        OK(ddl_ps_info_get(ps, &info));
        CHECK_EQ(info.clock, start + steps);
    }
    const ddl_sync_config bsp = {DDL_SYNC_BSP, 0, 0};
    OK(ddl_ps_switch(ps, &bsp));
    double total = pushes;
    OK(ddl_all_reduce_scalar(w, &total, DDL_SUM));
    memset(value, 0x7f, sizeof value);
    OK(ddl_ps_pull(ps, 0, DDL_ARRAY(value)));
    CHECK_EQ((double)value[2], total);
    ddl_sync_config bad = {DDL_SYNC_SSP, 5, 2};
    FAILS(ddl_ps_switch(ps, &bad), DDL_ERR_ARG, "staleness_max is 2");
    /* Different wishes: all are told, and nothing changes. */
    ddl_sync_config odd = {DDL_SYNC_SSP, me == 0 ? 1 : 2, 0};
    FAILS(ddl_ps_switch(ps, &odd), DDL_ERR_MISMATCH, "different things");
    /* Uneven data: worker 0 ends early, the others go on with the averages of those who are left. */
    if (me == 0) {
        OK(ddl_ps_leave(ps));
        FAILS(ddl_ps_pull(ps, 0, DDL_ARRAY(value)), DDL_ERR_STATE, "has left");
        return;
    }
    OK(ddl_ps_push(ps, 0, DDL_ARRAY(grad), NULL));
    OK(ddl_ps_clock(ps));
    OK(ddl_ps_pull(ps, 0, DDL_ARRAY(value)));
    CHECK_EQ((double)value[0], total + ps_workers(ps) - 1);
}

static void change(ddl_group *w, void *arg) {
    float zeros[WIDE] = {0};
    ddl_tensor param = DDL_ARRAY(zeros);
    ddl_ps_config config = {.servers = 2, .op = DDL_SUM, .optimizer = {.learning_rate = 1}};
    ps_run(w, &config, &param, 1, change_work, arg);
}

TEST(modes_change_at_a_drain_point_and_no_push_is_lost) { world_threads(3, change, NULL); }

/* >>what cannot work is refused */

static void refuse_work(ddl_group *w, ddl_ps *ps, void *arg) {
    float five[5] = {0};
    double wrong[3] = {0};
    (void)arg;
    FAILS(ddl_ps_push(ps, 1, DDL_ARRAY(five), NULL), DDL_ERR_ARG, "there is no parameter 1");
    FAILS(ddl_ps_push(ps, -1, DDL_ARRAY(five), NULL), DDL_ERR_ARG, "there is no parameter -1");
    FAILS(ddl_ps_push(ps, 0, DDL_ARRAY(five), NULL), DDL_ERR_ARG, "`grad` has 5 elements of f32; 3");
    FAILS(ddl_ps_pull(ps, 0, DDL_ARRAY(wrong)), DDL_ERR_ARG, "`out` has 3 elements of f64");
    FAILS(ddl_ps_push_pull(ps, 0, ddl_tensor_1d(five, DDL_F32, 3), ddl_tensor_1d(five, DDL_F32, 3), NULL), DDL_ERR_ARG,
          "overlap");
    FAILS(ddl_ps_push_rows(ps, 0, NULL, 0, DDL_ARRAY(five), NULL), DDL_ERR_ARG, "there is no table 0");
    FAILS(ddl_ps_serve(ps), DDL_ERR_ARG, "no dedicated server");
    FAILS(ddl_ps_rate(ps, -1), DDL_ERR_ARG, "the factor is -1");
    OK(ddl_ps_push(ps, 0, ddl_tensor_1d(five, DDL_F32, 3), NULL));
    FAILS(ddl_ps_push(ps, 0, ddl_tensor_1d(five, DDL_F32, 3), NULL), DDL_ERR_STATE, "was pushed at clock 0 before");
    ddl_request *r = NULL;
    OK(ddl_ps_ipull(ps, 0, ddl_tensor_1d(five, DDL_F32, 3), &r));
    ddl_ps *again = ps;
    FAILS(ddl_ps_free(&again), DDL_ERR_STATE, "1 requests were not waited for");
    CHECK(again == ps);
    OK(ddl_wait(&r, NULL));
    CHECK_EQ(ddl_ps_push(NULL, 0, DDL_ARRAY(five), NULL), DDL_ERR_ARG);
    int32_t table;
    FAILS(ddl_ps_table_create(ps, &(ddl_ps_table_config){.width = 1, .uniform = HUGE_VALF}, &table), DDL_ERR_ARG,
          "a finite uniform");
}

static void refuse(ddl_group *w, void *arg) {
    float three[3] = {0};
    uint16_t halves[3] = {0};
    double doubles[3] = {0};
    ddl_tensor param = DDL_ARRAY(three), other = ddl_tensor_1d(halves, DDL_F16, 3), wide = DDL_ARRAY(doubles);
    const struct {
        ddl_ps_config config;
        const char *text;
    } bad[] = {{{.servers = 3}, "3 colocated servers in a group of 2 ranks"},
               {{.servers = 2, .dedicated = 1}, "2 dedicated servers in a group of 2 ranks"},
               {{.servers = -1}, "-1 colocated servers"},
               {{.sync = {.mode = DDL_SYNC_SSP, .staleness = -2}}, "a staleness of -2"},
               {{.sync = {.mode = DDL_SYNC_SSP, .staleness = 2000000}}, "out of range"},
               {{.sync = {.mode = DDL_SYNC_SSP, .staleness_max = 2}}, "staleness_max is 2, less than"},
               {{.sync = {.mode = DDL_SYNC_LOCAL}}, "is no sync mode of servers"},
               {{.op = DDL_MAX}, "DDL_AVG or DDL_SUM"},
               {{.piece_bytes = 1}, "piece_bytes is 1"}};
    ddl_ps *ps = (ddl_ps *)&bad;
    (void)arg;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        FAILS(ddl_ps_create(w, &bad[i].config, &param, 1, &ps), DDL_ERR_ARG, bad[i].text);
        CHECK(ps == NULL);
    }
    ddl_ps_config good = {.servers = 2};
    FAILS(ddl_ps_create(w, &good, &other, 1, &ps), DDL_ERR_ARG, "parameter 0 is f16");
    FAILS(ddl_ps_create(w, &good, ddl_rank(w) == 0 ? &wide : &param, 1, &ps), DDL_ERR_MISMATCH,
          "passed other parameters");
    param = ddl_tensor_1d(three, DDL_F32, ddl_rank(w) + 1);
    FAILS(ddl_ps_create(w, &good, &param, 1, &ps), DDL_ERR_MISMATCH, "passed other parameters");
    param = DDL_ARRAY(three);
    ddl_ps_config lars = {.servers = 2, .optimizer = {.kind = DDL_LARS, .trust = 0.001 * (1 + ddl_rank(w))}};
    FAILS(ddl_ps_create(w, &lars, &param, 1, &ps), DDL_ERR_MISMATCH, "another config");
    ps_run(w, &good, &param, 1, refuse_work, NULL);
}

TEST(what_cannot_work_is_refused_with_a_sentence) { world_threads(2, refuse, NULL); }

/* ---- norms of whole tensors ---- */

/* One step of LARS (momentum 0.9, trust 0.5) or LAMB in doubles, as api.h has the formulas. */
static void norm_step(ddl_optimizer_kind kind, int n, int t, double *p, double *m, double *v, const double *g) {
    double rate = 0.05, decay = 0.01, p2 = 0, r2 = 0, r[700];
    for (int i = 0; i < n; i++) {
        m[i] = kind == DDL_LAMB ? 0.9 * m[i] + 0.1 * g[i] : m[i];
        v[i] = 0.999 * v[i] + 0.001 * g[i] * g[i];
        double adam = m[i] / (1 - pow(0.9, t)) / (sqrt(v[i] / (1 - pow(0.999, t))) + 1e-6) + decay * p[i];
        r[i] = kind == DDL_LAMB ? adam : g[i];
        p2 += p[i] * p[i];
        r2 += r[i] * r[i];
    }
    double trust = kind == DDL_LAMB ? sqrt(p2) / sqrt(r2) : 0.5 * sqrt(p2) / (sqrt(r2) + decay * sqrt(p2));
    for (int i = 0; i < n; i++) {
        m[i] = kind == DDL_LAMB ? m[i] : 0.9 * m[i] + rate * trust * (r[i] + decay * p[i]);
        p[i] -= kind == DDL_LAMB ? rate * trust * r[i] : m[i];
    }
}

/* Workers push in turns, so that the order is known: each push is a step with half of its gradient, over the norms of
 * whole tensors, though pieces may have 64 floats. */
static void norms(ddl_group *w, void *arg) {
    enum { PARAMS = 2, LONG = 700, ROUNDS = 8 };
    static const int lengths[PARAMS] = {LONG, 300};
    const ddl_ps_config *config = arg;
    float p[PARAMS][LONG], g[LONG];
    double model[PARAMS][3][LONG] = {{{0}}}, half[LONG];
    ddl_tensor params[PARAMS];
    ddl_ps *ps = NULL;
    for (int k = 0; k < PARAMS; k++) {
        ps_fill(p[k], lengths[k], 9, k);
        for (int i = 0; i < lengths[k]; i++) {
            model[k][0][i] = (double)p[k][i];
        }
        params[k] = ddl_tensor_1d(p[k], DDL_F32, lengths[k]);
    }
    OK(ddl_ps_create(w, config, params, PARAMS, &ps));
    for (int round = 0; round < ROUNDS; round++) {
        for (int k = 0; k < PARAMS; k++) {
            ps_fill(g, lengths[k], round % 2, round * PARAMS + k);
            for (int i = 0; i < lengths[k]; i++) {
                half[i] = (double)g[i] / 2;
            }
            norm_step(config->optimizer.kind, lengths[k], round + 1, model[k][0], model[k][1], model[k][2], half);
            if (round % 2 == ddl_rank(w)) {
                OK(ddl_ps_push(ps, k, ddl_tensor_1d(g, DDL_F32, lengths[k]), NULL));
            }
        }
        OK(ddl_barrier(w)); /* it has been answered, so it is in */
        for (int k = 0; k < PARAMS; k++) {
            memset(p[k], 0x7f, sizeof p[k]);
            OK(ddl_ps_pull(ps, k, params[k]));
            for (int i = 0; i < lengths[k]; i++) {
                CHECK(fabs((double)p[k][i] - model[k][0][i]) <= 1e-5);
            }
        }
        OK(ddl_barrier(w)); /* all have read it */
        if (round % 2 == 1) {
            OK(ddl_ps_clock(ps));
        }
    }
    OK(ddl_ps_free(&ps));
}
TEST(ssp_and_asp_with_norms_of_whole_tensors) {
    for (int i = 0; i < 4; i++) {
        ddl_ps_config config = {.servers = 2,
                                .piece_bytes = 256,
                                .sync = {.mode = i % 2 == 0 ? DDL_SYNC_SSP : DDL_SYNC_ASP},
                                .optimizer = {.kind = i / 2 == 0 ? DDL_LARS : DDL_LAMB,
                                              .trust = i / 2 == 0 ? 0.5 : 1,
                                              .learning_rate = 0.05,
                                              .weight_decay = 0.01}};
        world_threads(2, norms, &config);
    }
}

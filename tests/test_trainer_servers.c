/* The trainer over parameter servers when workers are at different steps (SSP, ASP), leave or die; checkpoints; another
 * sync mode between two steps; every strategy by its name.
 * tests/run: variants=gcc,asan,tsan timeout=120 */
#include "world.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

enum { TENSORS = 3, MOST = 3000, RANKS_MOST = 4 };
static const int sizes[TENSORS] = {1, MOST, 5};

typedef struct net {
    float p[TENSORS][MOST], g[TENSORS][MOST];
    ddl_trainer *t;
} net;

/* All parameters are 0; a gradient is the same in all elements, so that any element tells what a tensor has seen. */
static void net_make(ddl_group *w, net *m, const ddl_trainer_config *config) {
    memset(m, 0, sizeof *m);
    OK(ddl_trainer_create(w, config, &m->t));
    for (int i = 0; i < TENSORS; i++) {
        OK(ddl_trainer_add(m->t, NULL, DDL_VIEW(m->p[i], sizes[i]), DDL_VIEW(m->g[i], sizes[i]), NULL, NULL));
    }
    OK(ddl_trainer_start(m->t));
}

static ddl_status net_step(net *m, float gradient) {
    ddl_status status = DDL_OK;
    for (int i = TENSORS - 1; i >= 0 && status == DDL_OK; i--) {
        for (int k = 0; k < sizes[i]; k++) {
            m->g[i][k] = gradient;
        }
        status = ddl_grad_ready(m->t, i);
    }
    status = status == DDL_OK ? ddl_step(m->t) : status;
    return status == DDL_OK ? ddl_param_wait(m->t, DDL_ALL) : status;
}

static bool net_is(const net *m, float value) {
    for (int i = 0; i < TENSORS; i++) {
        for (int k = 0; k < sizes[i]; k++) {
            if (m->p[i][k] != value) {
                test__fail(__FILE__, __LINE__, "element %d of tensor %d is %g, not %g", k, i, (double)m->p[i][k],
                           (double)value);
                return false;
            }
        }
    }
    return true;
}

/* >>staleness: what a worker sees, and how far it is ahead, at every step */

enum { WORKERS = 4, STEPS = 30 };
#define RATE1 .optimizer = {.learning_rate = 1}, .architecture = DDL_ARCHITECTURE_PS

typedef struct watch {
    ddl_trainer_config config;
    int bound;                 /* -1: none */
    atomic_int begun[WORKERS]; /* steps */
} watch;

/* Pushes of 1 at rate 1 that are averaged over 4 workers: a parameter is -(pushes applied) / 4. */
static void check_seen(const watch *x, const net *m, int me, int step) {
    int least = step + 1, most = step + 1;
    for (int r = 0; r < WORKERS; r++) {
        int must = x->bound < 0 ? 0 : step + 1 - x->bound;
        least += r != me && must > 0 ? must : 0;
        most += r != me ? atomic_load(&x->begun[r]) : 0;
        if (r != me && x->bound >= 0 && atomic_load(&x->begun[r]) < step - x->bound) {
            test__fail(__FILE__, __LINE__, "rank %d ended step %d while rank %d had begun %d", me, step, r,
                       atomic_load(&x->begun[r]));
        }
    }
    for (int i = 0; i < TENSORS; i++) {
        for (int k = 0; k < sizes[i]; k++) {
            float applied = -4 * m->p[i][k];
            if (!(applied >= (float)least && applied <= (float)most)) {
                test__fail(__FILE__, __LINE__, "rank %d, step %d: tensor %d has %g pushes, not %d to %d", me, step, i,
                           (double)applied, least, most);
                return;
            }
        }
    }
}

static void stale(ddl_group *w, void *arg) {
    watch *x = arg;
    int me = ddl_rank(w);
    net *m = malloc(sizeof *m);
    net_make(w, m, &x->config);
    for (int step = 0; step < STEPS; step++) {
        atomic_fetch_add(&x->begun[me], 1);
        if (me == 0 || (step * 7 + me * 3) % 11 == 0) {
            usleep(1000 * (unsigned)(me == 0 ? 2 : 5));
        }
        REQUIRE(OK(net_step(m, 1)) == DDL_OK);
        check_seen(x, m, me, step);
    }
    OK(ddl_barrier(w));
    OK(net_step(m, 0)); /* all pushes have been answered: each was applied once */
    CHECK(net_is(m, -STEPS));
    OK(ddl_trainer_free(&m->t));
    free(m);
}

TEST(what_a_worker_sees) {
    const ddl_trainer_config configs[] = {
        {RATE1, .sync = DDL_SYNC_SSP, .staleness = 2},
        {RATE1, .sync = DDL_SYNC_SSP, .staleness = 1, .schedule = DDL_SCHEDULE_PRIORITY, .piece_bytes = 2048,
         .credit_bytes = 2048, .replan_steps = 5, .overlap_forward = 1},
        {RATE1, .sync = DDL_SYNC_SSP, .staleness = 1, .staleness_max = 4, .schedule = DDL_SCHEDULE_WAIT_FREE},
        {RATE1, .sync = DDL_SYNC_ASP, .schedule = DDL_SCHEDULE_NONE, .servers = 2},
        {RATE1, .sync = DDL_SYNC_ASP},
    };
    const int bounds[] = {2, 1, 4, -1, -1};
    for (int i = 0; i < 5; i++) {
        static watch x;
        memset(&x, 0, sizeof x);
        x.config = configs[i];
        x.bound = bounds[i];
        world_threads(WORKERS, stale, &x);
    }
}

/* >>another mode between two steps */

static void switching(ddl_group *w, void *arg) {
    (void)arg;
    net *m = malloc(sizeof *m);
    ddl_trainer_config config = {RATE1, .sync = DDL_SYNC_ASP};
    char text[256];
    net_make(w, m, &config);
    for (int step = 0; step < 5; step++) {
        OK(net_step(m, 1));
    }
    config.sync = DDL_SYNC_BSP;
    config.schedule = DDL_SCHEDULE_WAIT_FREE;
    OK(ddl_trainer_switch(m->t, &config));
    for (int step = 0; step < 5; step++) {
        OK(net_step(m, 1));
        CHECK(net_is(m, -6 - (float)step));
    }
    ddl_trainer_describe(m->t, text, sizeof text);
    CHECK_STR(text, "BSP over 2 colocated servers");
    config.servers = 1;
    FAILS(ddl_trainer_switch(m->t, &config), DDL_ERR_UNSUPPORTED, "servers cannot change");
    OK(ddl_trainer_free(&m->t));
    free(m);
}
TEST(from_asp_to_bsp) { world_threads(2, switching, NULL); }

/* A worker without data frees its trainer; the others go on with what is there. */
static void leaving(ddl_group *w, void *arg) {
    (void)arg;
    net *m = malloc(sizeof *m);
    net_make(w, m, &(ddl_trainer_config){RATE1, .servers = 1, .sync = DDL_SYNC_SSP, .staleness = 1});
    for (int step = 0; step < (ddl_rank(w) == 2 ? 2 : 10); step++) {
        OK(net_step(m, 1));
    }
    OK(ddl_trainer_free(&m->t));
    free(m);
}
TEST(a_worker_that_ends_early) { world_threads(3, leaving, NULL); }

/* >>checkpoints */

typedef struct run {
    char folder[64];
    int from, to, save_at;
    ddl_trainer_config config;
    net *result;
} run;

static void checkpointed(ddl_group *w, void *arg) {
    run *x = arg;
    net *m = malloc(sizeof *m);
    int64_t found = 7;
    ddl_trainer_stats stats;
    net_make(w, m, &x->config);
    if (x->config.dedicated && ddl_rank(w) == ddl_size(w) - 1) {
        OK(ddl_trainer_serve(m->t));
        OK(ddl_trainer_free(&m->t));
        free(m);
        return;
    }
    FAILS(ddl_trainer_load(m->t, "/nowhere/at/all", &found), DDL_ERR_SYSTEM, "on rank 0 the folder \"/nowhere/at/all\"");
    CHECK_EQ(found, -1);
    OK(ddl_trainer_load(m->t, x->folder, &found));
    CHECK_EQ(found, x->from);
    OK(ddl_trainer_stats_get(m->t, &stats));
    CHECK_EQ(stats.epoch, found > 0 ? ((int64_t)1 << 40) + 100 * found + 2 : 0); /* three had saved it */
    for (int step = found > 0 ? (int)found : 0; step < x->to; step++) {
        OK(net_step(m, (float)(1 + step % 3)));
        OK(ddl_trainer_set_epoch(m->t, ((int64_t)1 << 40) + 100 * (step + 1) + ddl_rank(w)));
        if (step + 1 == x->save_at) {
            OK(ddl_trainer_save(m->t, x->folder));
        }
    }
    OK(ddl_trainer_free(&m->t));
    if (ddl_rank(w) == 0) {
        x->result = m;
    } else {
        free(m);
    }
}

static void remove_folder(const char *folder) {
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", folder);
    CHECK_EQ(system(command), 0);
}

/* Four steps, a checkpoint, two that are lost; then from the checkpoint to the end, on another number of servers: the
 * same as without an end. */
TEST(a_checkpoint_of_servers) {
    const ddl_trainer_config config = {.optimizer = {.kind = DDL_ADAM, .learning_rate = 0.1},
                                       .architecture = DDL_ARCHITECTURE_PS};
    run whole = {.from = -1, .to = 10, .config = config}, first = whole, second = whole;
    strcpy(whole.folder, "/tmp/ddl-trainer-XXXXXX");
    strcpy(first.folder, "/tmp/ddl-trainer-XXXXXX");
    REQUIRE(mkdtemp(whole.folder) != NULL && mkdtemp(first.folder) != NULL);
    strcpy(second.folder, first.folder);
    first.to = 6;
    first.save_at = 4;
    second.from = 4;
    second.config.servers = second.config.dedicated = 1;
    world_threads(3, checkpointed, &whole);
    world_threads(3, checkpointed, &first);
    world_threads(4, checkpointed, &second);
    CHECK(memcmp(whole.result->p, second.result->p, sizeof whole.result->p) == 0);
    CHECK(memcmp(whole.result->p, first.result->p, sizeof whole.result->p) != 0);
    free(whole.result);
    free(first.result);
    free(second.result);
    remove_folder(whole.folder);
    remove_folder(first.folder);
}

/* Back to a checkpoint while running, and a new trainer from it: the same bits, though the first had residuals and had
 * drawn random numbers meanwhile. QSGD, which keeps no residual, goes on as if nothing had been. */
typedef struct again {
    char folder[64];
    ddl_compression code;
    net *ahead, *back, *fresh; /* of rank 0, after four steps */
} again;

static void again_steps(net *m, int from) {
    for (int step = from; step < from + 2; step++) {
        for (int i = 0; i < TENSORS; i++) {
            for (int k = 0; k < sizes[i]; k++) {
                m->g[i][k] = (float)((i * 7 + k * 3 + step * 5) % 17) * 0.1f - 0.7f;
            }
        }
        CHECK_EQ(ddl_grad_ready(m->t, DDL_ALL), DDL_OK);
        CHECK_EQ(ddl_step(m->t), DDL_OK);
    }
}

static void again_keep(ddl_group *w, const net *m, net **out) {
    if (ddl_rank(w) == 0) {
        *out = malloc(sizeof **out);
        memcpy(*out, m, sizeof **out);
    }
}

static void back_and_fresh(ddl_group *w, void *arg) {
    again *x = arg;
    net *m = malloc(sizeof *m);
    int64_t found;
    ddl_trainer_config config = {RATE1, .compression = x->code};
    net_make(w, m, &config);
    again_steps(m, 0);
    OK(ddl_trainer_save(m->t, x->folder));
    again_steps(m, 2);
    again_keep(w, m, &x->ahead);
    OK(ddl_trainer_load(m->t, x->folder, &found));
    CHECK_EQ(found, 2);
    again_steps(m, 2);
    again_keep(w, m, &x->back);
    OK(ddl_trainer_free(&m->t));
    net_make(w, m, &config);
    OK(ddl_trainer_load(m->t, x->folder, &found));
    CHECK_EQ(found, 2);
    again_steps(m, 2);
    again_keep(w, m, &x->fresh);
    OK(ddl_trainer_free(&m->t));
    free(m);
}

TEST(a_checkpoint_of_servers_and_codes) {
    const ddl_compression codes[] = {{.kind = DDL_COMPRESS_INT8}, {.kind = DDL_COMPRESS_QSGD, .seed = 3}};
    for (int i = 0; i < 2; i++) {
        again x = {.code = codes[i], .folder = "/tmp/ddl-trainer-XXXXXX"};
        REQUIRE(mkdtemp(x.folder) != NULL);
        world_threads(2, back_and_fresh, &x);
        CHECK(memcmp(x.back->p, x.fresh->p, sizeof x.back->p) == 0);
        CHECK((memcmp(x.back->p, x.ahead->p, sizeof x.back->p) == 0) == (i == 1));
        free(x.ahead);
        free(x.back);
        free(x.fresh);
        remove_folder(x.folder);
    }
}

static void of_another_optimizer(ddl_group *w, void *arg) {
    net *m = malloc(sizeof *m);
    ddl_trainer_config config = {.optimizer = {.kind = DDL_ADAM}, .architecture = DDL_ARCHITECTURE_PS};
    net_make(w, m, &config);
    OK(net_step(m, 1));
    OK(ddl_trainer_save(m->t, arg));
    OK(ddl_trainer_free(&m->t));
    config.optimizer.kind = DDL_ADAMW; /* which has as many states */
    net_make(w, m, &config);
    FAILS(ddl_trainer_load(m->t, arg, NULL), DDL_ERR_MISMATCH, "another optimizer");
    CHECK(net_is(m, 0));
    OK(ddl_trainer_free(&m->t));
    free(m);
}

TEST(a_checkpoint_of_another_optimizer) {
    char folder[] = "/tmp/ddl-trainer-XXXXXX";
    REQUIRE(mkdtemp(folder) != NULL);
    world_threads(2, of_another_optimizer, folder);
    remove_folder(folder);
}

/* >>deaths */

typedef struct death {
    ddl_trainer_config config;
    int victim, dies_at;
    char folder[64];
    int resumed, done[RANKS_MOST];
    int status[RANKS_MOST];
    char said[RANKS_MOST][400];
} death;

/* Not before the other workers have come as far, so that none still waits in a collective for the one that dies. */
static void die_in_time(const volatile death *d) {
    for (int r = 0; r < 2; r++) {
        while (d->done[r] < d->dies_at) {
            usleep(1000);
        }
    }
    kill(getpid(), SIGKILL);
}

static void *die(void *arg) {
    die_in_time(arg);
    return NULL;
}

static void mortal(ddl_group *w, void *arg) {
    death *d = arg;
    int me = ddl_rank(w);
    net *m = malloc(sizeof *m);
    net_make(w, m, &d->config);
    if (d->config.dedicated && me == ddl_size(w) - 1) {
        pthread_t killer;
        if (me == d->victim) {
            pthread_create(&killer, NULL, die, d);
        }
        OK(ddl_trainer_serve(m->t));
        OK(ddl_trainer_free(&m->t));
        free(m);
        return;
    }
    int64_t found = 0;
    if (d->resumed) {
        OK(ddl_trainer_load(m->t, d->folder, &found));
        CHECK_EQ(found, 2);
        CHECK(net_is(m, -2));
    }
    ddl_status status = DDL_OK;
    bool until_death = d->config.dedicated && d->victim >= 0;
    for (int step = (int)found; (step < 8 || until_death) && status == DDL_OK; step++) {
        if (step == d->dies_at && me == d->victim) {
            die_in_time(d);
        }
        status = net_step(m, 1);
        d->done[me] += status == DDL_OK;
        if (step + 1 == 2 && d->folder[0] != 0 && status == DDL_OK) {
            OK(ddl_trainer_save(m->t, d->folder));
        }
    }
    d->status[me] = status;
    snprintf(d->said[me], sizeof d->said[me], "%s", ddl_error(ddl_group_context(w)));
    CHECK_EQ(ddl_trainer_free(&m->t), DDL_OK);
    free(m);
}

static death *run_deaths(int n, death what) {
    ranks r;
    world in;
    death *d = ranks_shared(sizeof *d);
    *d = what;
    memset(&in, 0, sizeof in);
    in.fn = mortal;
    in.arg = d;
    ranks_start(&r, n, world_process, &in);
    ranks_wait(&r, 40);
    CHECK_EQ(r.timed_out, 0);
    for (int i = 0; i < n; i++) {
        CHECK_EQ(r.status[i], i == what.victim ? SIGKILL : 0);
    }
    return d;
}

TEST(ssp_and_asp_go_on_without_a_worker_that_died) {
    const ddl_sync modes[] = {DDL_SYNC_SSP, DDL_SYNC_ASP};
    for (int i = 0; i < 2; i++) {
        death *d = run_deaths(3, (death){.config = {RATE1, .servers = 1, .sync = modes[i]}, .victim = 2, .dies_at = 3});
        CHECK_EQ(d->done[0], 8);
        CHECK_EQ(d->done[1], 8);
        CHECK_EQ(d->done[2], 3);
    }
}

TEST(bsp_says_who_died) {
    death *d = run_deaths(3, (death){.config = {RATE1, .servers = 1}, .victim = 2, .dies_at = 3});
    for (int r = 0; r < 2; r++) {
        CHECK_EQ(d->status[r], DDL_ERR_PEER);
        CHECK_STR(d->said[r], "worker 2 died");
        CHECK_EQ(d->done[r], 3);
    }
}

TEST(a_server_that_dies_is_named_and_a_checkpoint_goes_on) {
    death what = {.config = {RATE1, .dedicated = 1}, .victim = 2, .dies_at = 4, .folder = "/tmp/ddl-trainer-XXXXXX"};
    REQUIRE(mkdtemp(what.folder) != NULL);
    death *d = run_deaths(3, what);
    for (int r = 0; r < 2; r++) {
        CHECK_EQ(d->status[r], DDL_ERR_PEER);
        CHECK_STR(d->said[r], "server 0 on rank 2");
    }
    what.victim = -1;
    what.resumed = 1;
    d = run_deaths(3, what);
    CHECK_EQ(d->done[0], 6);
    CHECK_EQ(d->done[1], 6);
    remove_folder(what.folder);
}

/* >>an optimizer of the program's own: the same code on workers, in shards and on servers */

typedef struct own {
    ddl_trainer_config config;
    atomic_int calls, wrong;
} own;

/* The state is the sum of all gradients, of which each step takes `learning_rate` times. */
static void own_step(void *user, const ddl_optimizer_part *part) {
    own *x = user;
    atomic_fetch_add(&x->calls, 1);
    if (part->tensor < 0 || part->tensor >= TENSORS || part->offset < 0 || part->step < 1 || part->step > STEPS ||
        part->offset + part->count > sizes[part->tensor] || part->dtype == DDL_F64) {
        atomic_fetch_add(&x->wrong, 1);
        return;
    }
    for (int64_t k = 0; k < part->count; k++) {
        part->state[k] += part->grad[k];
        part->param[k] -= (float)part->learning_rate * part->state[k];
    }
}

static void own_steps(ddl_group *w, void *arg) {
    own *x = arg;
    ddl_trainer_stats stats;
    net *m = malloc(sizeof *m);
    net_make(w, m, &x->config);
    for (int step = 1; step <= STEPS; step++) {
        usleep(step == STEPS ? 20000 : 0);
        OK(net_step(m, 2 * (float)ddl_rank(w))); /* 1 on the average of two */
        if (!net_is(m, -(float)(step * (step + 1) / 2))) {
            break;
        }
    }
    OK(ddl_trainer_stats_get(m->t, &stats));
    CHECK_EQ(stats.steps, STEPS);
    CHECK(stats.compute_s >= 0.02 && stats.exposed_s >= 0 && stats.hidden_s >= 0);
    OK(ddl_trainer_free(&m->t));
    free(m);
}

TEST(an_optimizer_of_the_program_on_workers_in_shards_and_on_servers) {
    const ddl_trainer_config configs[] = {
        {.schedule = DDL_SCHEDULE_WAIT_FREE},
        {.schedule = DDL_SCHEDULE_FUSED, .shard = 1},
        {.schedule = DDL_SCHEDULE_WAIT_FREE, .architecture = DDL_ARCHITECTURE_PS, .servers = 2},
    };
    for (size_t i = 0; i < sizeof configs / sizeof configs[0]; i++) {
        own x = {.config = configs[i]};
        x.config.optimizer = (ddl_optimizer){
            .kind = DDL_OPTIMIZER_FN, .learning_rate = 1, .fn = own_step, .user = &x, .state_slots = 1};
        world_threads(2, own_steps, &x);
        CHECK(atomic_load(&x.calls) >= STEPS);
        CHECK_EQ(atomic_load(&x.wrong), 0);
    }
}

/* >>compression: what is not sent stays with its worker, and is sent later */

typedef struct compressed_run {
    ddl_trainer_config config;
    double off;  /* what a parameter may be off, in the end */
    double part; /* of the bytes of f32 that are pushed */
} compressed_run;

enum { COMPRESSED_STEPS = 60 };

static float part_of(int rank, int i, int k) { return (float)((rank + 1) * (((i + k) * 5) % 7 - 3)) / 4; }

static void compressed(ddl_group *w, void *arg) {
    compressed_run *x = arg;
    net *m = malloc(sizeof *m);
    int me = ddl_rank(w), n = ddl_size(w), total = 0;
    ddl_trainer_stats stats;
    net_make(w, m, &x->config);
    for (int step = 0; step <= COMPRESSED_STEPS; step++) {
        for (int i = 0; i < TENSORS; i++) {
            for (int k = 0; k < sizes[i]; k++) {
                m->g[i][k] = part_of(me, i, k);
            }
        }
        if (step == COMPRESSED_STEPS) {
            OK(ddl_barrier(w)); /* SSP: the others have pushed all */
        }
        OK(ddl_grad_ready(m->t, DDL_ALL));
        OK(ddl_step(m->t));
        OK(ddl_param_wait(m->t, DDL_ALL));
    }
    OK(ddl_barrier(w));
    OK(ddl_trainer_stats_get(m->t, &stats));
    for (int i = 0; i < TENSORS; i++) {
        total += sizes[i];
        for (int k = 0; k < sizes[i]; k++) {
            double want = 0;
            for (int r = 0; r < n; r++) {
                want -= (double)part_of(r, i, k) *
                        (x->config.sync == DDL_SYNC_BSP || r == me ? COMPRESSED_STEPS + 1 : COMPRESSED_STEPS + 0.5) / n;
            }
            double off = (double)m->p[i][k] - want;
            if (!(off <= x->off && off >= -x->off)) {
                test__fail(__FILE__, __LINE__, "compression %d: element %d of tensor %d is %g off",
                           x->config.compression.kind, k, i, off);
                i = TENSORS;
                break;
            }
        }
    }
    if (!(stats.bytes <= x->part * 4 * total + 300)) {
        test__fail(__FILE__, __LINE__, "compression %d: %lld bytes of %d", x->config.compression.kind,
                   (long long)stats.bytes, 4 * total);
    }
    OK(ddl_trainer_free(&m->t));
    free(m);
}

TEST(compressed_pushes) {
    const compressed_run all[] = {
        {{RATE1, .compression = {.kind = DDL_COMPRESS_F16}}, 1e-4, 0.5},
        {{RATE1, .compression = {.kind = DDL_COMPRESS_BF16}, .schedule = DDL_SCHEDULE_WAIT_FREE}, 1e-4, 0.5},
        {{RATE1, .compression = {.kind = DDL_COMPRESS_INT8}, .overlap_forward = 1}, 0.05, 0.27},
        {{RATE1, .compression = {.kind = DDL_COMPRESS_QSGD, .error_feedback = 1}}, 0.6, 0.14},
        {{RATE1, .compression = {.kind = DDL_COMPRESS_SIGN}}, 4, 0.04},
        {{RATE1, .compression = {.kind = DDL_COMPRESS_TOP_K, .ratio = 0.25}}, 8, 0.51},
        {{RATE1, .compression = {.kind = DDL_COMPRESS_TOP_K, .k = 750}, .clip_norm = 1e9}, 8, 0.51},
        {{RATE1, .compression = {.kind = DDL_COMPRESS_INT8}, .sync = DDL_SYNC_SSP, .servers = 1}, 2, 0.27},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        compressed_run x = all[i];
        world_threads(2, compressed, &x);
    }
}

/* Architecture auto: what is compressed goes by all-reduce, the others as they did, each wherever it stands. */
static void mixed(ddl_group *w, void *arg) {
    enum { N = 3000, STEPS = 40 };
    int plain = *(int *)arg % 3, slow = *(int *)arg / 3; /* slow: all-reduce, so that the plain one goes over servers */
    static float memory[2][2][3][N]; /* by rank: parameters, gradients */
    float(*p)[N] = memory[ddl_rank(w)][0], (*g)[N] = memory[ddl_rank(w)][1];
    char text[512];
    ddl_trainer *t = NULL;
    ddl_trainer_config config = {.optimizer = {.learning_rate = 1},
                                 .architecture = DDL_ARCHITECTURE_AUTO,
                                 .compression = {.kind = DDL_COMPRESS_INT8},
                                 .latency_s = slow,
                                 .seconds_per_byte = slow,
                                 .replan_steps = 5};
    OK(ddl_trainer_create(w, &config, &t));
    for (int i = 0; i < 3; i++) {
        memset(p[i], 0, sizeof p[i]);
        OK(ddl_trainer_add(t, NULL, DDL_ARRAY(p[i]), DDL_ARRAY(g[i]),
                           &(ddl_trainer_options){.uncompressed = i == plain}, NULL));
    }
    OK(ddl_trainer_start(t));
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < 3; i++) {
            for (int k = 0; k < N; k++) {
                g[i][k] = part_of(ddl_rank(w), i, k);
            }
        }
        OK(ddl_grad_ready(t, DDL_ALL));
        memset(g, 0x7f, 3 * sizeof g[0]);
        OK(ddl_step(t));
    }
    for (int i = 0; i < 3; i++) {
        double most = 0;
        for (int k = 0; k < N; k++) {
            double off = (double)p[i][k] + STEPS * (double)(part_of(0, i, k) + part_of(1, i, k)) / 2;
            most = off > most ? off : -off > most ? -off : most;
        }
        CHECK(i == plain ? most < 1e-4 : most < 0.05 && most > 0);
    }
    ddl_trainer_describe(t, text, sizeof text);
    CHECK_STR(text, "2 of them compressed");
    CHECK(!slow || strstr(text, "1 of them over servers") != NULL);
    OK(ddl_trainer_free(&t));
}
TEST(compression_beside_architecture_auto) {
    for (int i = 0; i < 6; i++) {
        world_threads(2, mixed, &i);
    }
}

/* >>every strategy by its name: two ranks that have the same gradients are one */

typedef struct named {
    const char *name;
    char text[256];
} named;

static void by_name(ddl_group *w, void *arg) {
    named *x = arg;
    net *m = malloc(sizeof *m);
    ddl_trainer_config config;
    CHECK_EQ(ddl_trainer_preset(x->name, &config), DDL_OK);
    config.optimizer.learning_rate = 1;
    net_make(w, m, &config);
    bool serves = config.dedicated && ddl_rank(w) == ddl_size(w) - 1, asynchronous = config.sync >= DDL_SYNC_SSP;
    if (serves) {
        OK(ddl_trainer_serve(m->t));
    }
    for (int step = 0; step < 3 && !serves; step++) {
        OK(net_step(m, 1));
    }
    if (!serves && !asynchronous) {
        OK(ddl_trainer_sync(m->t));
        CHECK(config.outer_rate != 0 || net_is(m, -3));
    }
    if (ddl_rank(w) == 0) {
        ddl_trainer_describe(m->t, x->text, sizeof x->text);
    }
    OK(ddl_trainer_free(&m->t));
    free(m);
}

TEST(strategies_by_name) {
    const struct {
        const char *name, *text;
        int ranks;
    } all[] = {
        {"auto", "BSP over all-reduce on 2 ranks, schedule auto", 2},
        {"BSP-A2A", "BSP over all-reduce on 2 ranks, schedule none", 2},
        {"WFBP-A2A", "over all-reduce on 2 ranks, schedule wait-free: 3 tensors in 3 operations", 2},
        {"MG-WFBP", "over all-reduce on 2 ranks, schedule MG-WFBP", 2},
        {"ByteScheduler-A2A", "over all-reduce on 2 ranks, schedule priority", 2},
        {"BSP-PS", "BSP over 2 colocated servers on 2 ranks, schedule none: 3 tensors in 1 operation", 2},
        {"WFBP-PS", "BSP over 2 colocated servers on 2 ranks, schedule wait-free: 3 tensors in 3 operations", 2},
        {"ByteScheduler-PS", "BSP over 2 colocated servers on 2 ranks, schedule priority", 2},
        {"SSP", "SSP with a staleness of 3 over 2 colocated servers", 2},
        {"ASP", "ASP over 2 colocated servers", 2},
        {"adaptive-compression", "BSP over all-reduce on 2 ranks, schedule auto", 2},
        {"DistributedDataParallel", "BSP over all-reduce on 2 ranks, schedule fused", 2},
        {"DistributedOptimizer", "BSP over all-reduce on 2 ranks, schedule fused", 2},
        {"ZeRO-1", "in shards (ZeRO-1) on 2 ranks", 2},
        {"local-SGD", "local SGD, averaged every 8 steps", 2},
        {"post-local-SGD", "local SGD, averaged every 4 steps after 1000 steps of BSP", 2},
        {"DiLoCo", "outer Nesterov with rate 0.7", 2},
        {"mirrored", "BSP over all-reduce on 2 ranks, schedule fused", 2},
        {"multi-worker-mirrored", "BSP over all-reduce on 2 ranks, schedule fused", 2},
        {"central-storage", "BSP over 1 colocated server on 2 ranks", 2},
        {"parameter-server", "ASP over 1 dedicated server on 2 ranks", 3},
        {"one-device", "on 1 rank", 1},
    };
    int count = 0;
    for (const char *name; (name = ddl_trainer_preset_name(count)) != NULL; count++) {
        named x = {.name = name};
        size_t at = 0;
        while (at < sizeof all / sizeof all[0] && strcmp(all[at].name, name) != 0) {
            at++;
        }
        REQUIRE(at < sizeof all / sizeof all[0]);
        world_threads(all[at].ranks, by_name, &x);
        CHECK_STR(x.text, all[at].text);
    }
    CHECK_EQ(count, (int)(sizeof all / sizeof all[0]));
}

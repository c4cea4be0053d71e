/* What programs do wrong with a trainer: each gets its sentence, nothing changes, and the trainer goes on.
 * tests/run: variants=gcc,asan,tsan timeout=60 */
#include "world.h"

#include <math.h>
#include <stdbool.h>

typedef struct bench {
    float p[2][4], g[2][4];
    ddl_trainer *t;
    ddl_context *context;
} bench;

static void bench_make(ddl_group *w, bench *b, const ddl_trainer_config *config) {
    static const char *const names[] = {"first", "second"};
    b->t = NULL;
    OK(ddl_trainer_create(w, config, &b->t));
    for (int i = 0; i < 2; i++) {
        for (int k = 0; k < 4; k++) {
            b->p[i][k] = (float)(10 * i + k);
            b->g[i][k] = 1;
        }
        OK(ddl_trainer_add(b->t, names[i], DDL_ARRAY(b->p[i]), DDL_ARRAY(b->g[i]), NULL, NULL));
    }
}

static void bench_step(ddl_group *w, bench *b) {
    OK(ddl_grad_ready(b->t, 1));
    OK(ddl_grad_ready(b->t, 0));
    OK(ddl_step(b->t));
}

/* All parameters are those of the start, less `steps` steps of rate 1 and gradient 1. */
static void bench_check(const bench *b, int steps) {
    for (int i = 0; i < 8; i++) {
        CHECK_EQ(b->p[i / 4][i % 4], 10 * (i / 4) + i % 4 - steps);
    }
}

/* Of three ranks the second's tensors lie over each other, so that its first does not keep what rank 0 has sent. */
static void values_differ(ddl_group *w, void *arg) {
    const ddl_trainer_config *config = arg;
    ddl_trainer *t = NULL;
    float p[12], g[2][8];
    int over = ddl_rank(w) == 1 ? 4 : 0;
    for (int k = 0; k < 12; k++) {
        p[k] = (float)(k + 100 * ddl_rank(w));
    }
    for (int tries = 0; tries < 2; tries++, over = 0) { /* what was refused is freed, and made once more without it */
        OK(ddl_trainer_create(w, config, &t));
        OK(ddl_trainer_add(t, "first", DDL_VIEW(p, 6), DDL_VIEW(g[0], 6), NULL, NULL));
        OK(ddl_trainer_add(t, "second", DDL_VIEW(p + 6 - over, 6), DDL_VIEW(g[1], 6), NULL, NULL));
        if (tries == 0 && (!config->dedicated || ddl_rank(w) < 3)) {
            FAILS(ddl_trainer_start(t), DDL_ERR_MISMATCH, "ranks differ in the values of tensor 0, here on rank");
            CHECK_STR(ddl_error(ddl_group_context(w)), "\"first\" (f32[6]");
            CHECK_STR(ddl_error(ddl_group_context(w)), "not as on rank 0 are they on rank 1; look");
        } else {
            OK(ddl_trainer_start(t));
        }
        if (ddl_rank(w) == 3) {
            OK(ddl_trainer_serve(t));
        }
        OK(ddl_trainer_free(&t));
    }
}
TEST(parameters_that_did_not_come_whole) {
    ddl_trainer_config config = {.optimizer = {.learning_rate = 1}};
    world_threads(3, values_differ, &config);
    config.shard = 1;
    world_threads(3, values_differ, &config);
    config = (ddl_trainer_config){.architecture = DDL_ARCHITECTURE_PS, .dedicated = 1};
    world_threads(4, values_differ, &config);
}

#define SERVED .architecture = DDL_ARCHITECTURE_PS
#define PLAIN .optimizer = {.learning_rate = 1}

static void configs(ddl_group *w, void *arg) {
    (void)arg;
    const struct {
        ddl_trainer_config config;
        ddl_status status;
        const char *text;
    } wrong[] = {
        {{.accumulate = -1}, DDL_ERR_ARG, "accumulate is -1; it must be from 0"},
        {{.local_steps = -2, .sync = DDL_SYNC_LOCAL}, DDL_ERR_ARG, "local_steps is -2; it must be from 0"},
        {{.sync = (ddl_sync)9}, DDL_ERR_ARG, "sync is 9; it must be from 0 to 3"},
        {{.schedule = (ddl_schedule)-1}, DDL_ERR_ARG, "schedule is"},
        {{.clip_norm = NAN}, DDL_ERR_ARG, "clip_norm is nan"},
        {{.bucket_bytes = -1}, DDL_ERR_ARG, "bucket_bytes is -1"},
        {{.replan_steps = -2}, DDL_ERR_ARG, "replan_steps is -2; it must be from -1"},
        {{.outer_momentum = 1, .outer_rate = 1, .sync = DDL_SYNC_LOCAL}, DDL_ERR_ARG, "outer_momentum is 1"},
        {{.optimizer = {.kind = (ddl_optimizer_kind)99}}, DDL_ERR_ARG, "99 is not a kind of optimizer"},
        {{.optimizer = {.learning_rate = -1}}, DDL_ERR_ARG, "learning_rate is -1"},
        {{.overlap_forward = 1, .clip_norm = 1}, DDL_ERR_UNSUPPORTED, "the norm needs all gradients"},
        {{.overlap_forward = 1, .shard = 1, .uneven = 1}, DDL_ERR_UNSUPPORTED, "no average can be divided before"},
        {{.overlap_forward = 1, .uneven = 1}, DDL_ERR_UNSUPPORTED, "no average can be divided before"},
        {{.shard = 1, .sync = DDL_SYNC_LOCAL}, DDL_ERR_UNSUPPORTED, "shard works with BSP"},
        {{.shard = 1, .schedule = DDL_SCHEDULE_PRIORITY}, DDL_ERR_UNSUPPORTED, "a plan cannot change"},
        {{.shard = 1, .optimizer = {.kind = DDL_LAMB}}, DDL_ERR_UNSUPPORTED, "norms go over whole tensors"},
        {{.sync = DDL_SYNC_SSP}, DDL_ERR_UNSUPPORTED, "need parameter servers"},
        {{.servers = 1}, DDL_ERR_UNSUPPORTED, "need parameter servers"},
        {{.architecture = DDL_ARCHITECTURE_AUTO, .sync = DDL_SYNC_ASP}, DDL_ERR_UNSUPPORTED, "auto is BSP"},
        {{.architecture = (ddl_architecture)7}, DDL_ERR_ARG, "architecture is 7"},
        {{SERVED, .staleness = 2}, DDL_ERR_UNSUPPORTED, "belong to sync DDL_SYNC_SSP"},
        {{SERVED, .sync = DDL_SYNC_SSP, .staleness = -2}, DDL_ERR_ARG, "staleness is -2; it must be from -1"},
        {{SERVED, .sync = DDL_SYNC_LOCAL}, DDL_ERR_UNSUPPORTED, "no rank can step alone"},
        {{SERVED, .shard = 1}, DDL_ERR_UNSUPPORTED, "shared out over the servers already"},
        {{SERVED, .clip_norm = 1, .sync = DDL_SYNC_ASP}, DDL_ERR_UNSUPPORTED, "need the average of all workers'"},
        {{SERVED, .servers = 2}, DDL_ERR_ARG, "2 colocated servers in a group of 1 ranks"},
        {{SERVED, .dedicated = 1}, DDL_ERR_ARG, "at least one rank has to work"},
        {{.local_steps = 4}, DDL_ERR_UNSUPPORTED, "belong to sync DDL_SYNC_LOCAL"},
        {{.outer_momentum = 0.5, .sync = DDL_SYNC_LOCAL}, DDL_ERR_UNSUPPORTED, "outer_momentum needs an outer_rate"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        ddl_trainer *t = (ddl_trainer *)&t;
        FAILS(ddl_trainer_create(w, &wrong[i].config, &t), wrong[i].status, wrong[i].text);
        CHECK(t == NULL);
    }
    CHECK_EQ(ddl_trainer_create(w, NULL, NULL), DDL_ERR_ARG);
    CHECK_EQ(ddl_trainer_create(NULL, NULL, &(ddl_trainer *){NULL}), DDL_ERR_ARG);
    CHECK_EQ(ddl_grad_ready(NULL, 0), DDL_ERR_ARG);
    CHECK_EQ(ddl_step(NULL), DDL_ERR_ARG);
    ddl_trainer *none = NULL;
    CHECK_EQ(ddl_trainer_free(&none), DDL_OK);
    CHECK_EQ(ddl_trainer_free(NULL), DDL_OK);
}
TEST(configs_that_cannot_work) { world_threads(1, configs, NULL); }

static void registration(ddl_group *w, void *arg) {
    (void)arg;
    float p[6] = {0}, g[6] = {0};
    double wide[6] = {0};
    int32_t whole[6] = {0};
    ddl_trainer *t = NULL;
    OK(ddl_trainer_create(w, NULL, &t));
    ddl_tensor strided = ddl_tensor_nd(p, DDL_F32, 2, (int64_t[]){2, 2}), plain = strided;
    strided.strides[0] = 3;
    strided.strides[1] = 1;
    FAILS(ddl_trainer_add(t, "a", DDL_ARRAY(p), DDL_VIEW(g, 5), NULL, NULL), DDL_ERR_ARG,
          "\"a\" has a gradient of another shape (5 elements) than the parameter (6)");
    FAILS(ddl_trainer_add(t, "b", plain, strided, NULL, NULL), DDL_ERR_ARG, "\"b\" must be contiguous");
    FAILS(ddl_trainer_add(t, "c", DDL_ARRAY(whole), DDL_ARRAY(g), NULL, NULL), DDL_ERR_ARG,
          "\"c\" is a i32 parameter with a f32 gradient");
    FAILS(ddl_trainer_add(t, "d", DDL_ARRAY(p), DDL_ARRAY(wide), NULL, NULL), DDL_ERR_ARG, "f64 with f64");
    ddl_trainer_options coded = {.compression = {.kind = DDL_COMPRESS_F16}};
    FAILS(ddl_trainer_add(t, "e", DDL_ARRAY(wide), DDL_ARRAY(wide), &coded, NULL), DDL_ERR_UNSUPPORTED,
          "\"e\": f64 cannot be compressed");
    FAILS(ddl_trainer_add(t, "f", DDL_VIEW((float *)NULL, 6), DDL_ARRAY(g), NULL, NULL), DDL_ERR_ARG, "is NULL");
    FAILS(ddl_trainer_add(t, "h", DDL_ARRAY(p), DDL_ARRAY(g), &(ddl_trainer_options){.rate_factor = NAN}, NULL),
          DDL_ERR_ARG, "rate_factor of \"h\" is not a number");
    ddl_trainer *outer = NULL;
    ddl_trainer_config outer_config = {.sync = DDL_SYNC_LOCAL, .local_steps = 2, .outer_rate = 0.5};
    OK(ddl_trainer_create(w, &outer_config, &outer));
    FAILS(ddl_trainer_add(outer, "o", DDL_ARRAY(wide), DDL_ARRAY(wide), NULL, NULL), DDL_ERR_UNSUPPORTED,
          "\"o\" is f64, for which there is no outer optimizer");
    OK(ddl_trainer_free(&outer));
    FAILS(ddl_grad_ready(t, 0), DDL_ERR_STATE, "has not started; call ddl_trainer_start");
    FAILS(ddl_step(t), DDL_ERR_STATE, "has not started");
    FAILS(ddl_trainer_set_rate(t, -1), DDL_ERR_ARG, "the learning rate is -1");
    FAILS(ddl_trainer_set_epoch(t, -1), DDL_ERR_ARG, "the epoch is -1 on rank");
    OK(ddl_trainer_start(t));
    FAILS(ddl_trainer_start(t), DDL_ERR_STATE, "it has started already");
    FAILS(ddl_trainer_add(t, "late", DDL_ARRAY(p), DDL_ARRAY(g), NULL, NULL), DDL_ERR_STATE, "\"late\" comes too late");
    OK(ddl_step(t)); /* of no tensors at all */
    OK(ddl_trainer_free(&t));
}
TEST(registration_of_what_is_wrong) { world_threads(2, registration, NULL); }

static void loop(ddl_group *w, void *arg) {
    (void)arg;
    bench b;
    bench_make(w, &b, &(ddl_trainer_config){PLAIN});
    OK(ddl_trainer_start(b.t));
    FAILS(ddl_grad_ready(b.t, 2), DDL_ERR_ARG, "there is no tensor 2; rank");
    FAILS(ddl_grad_ready(b.t, -2), DDL_ERR_ARG, "there is no tensor -2");
    FAILS(ddl_param_wait(b.t, 2), DDL_ERR_ARG, "there is no tensor 2");
    FAILS(ddl_step(b.t), DDL_ERR_STATE, "gradient \"first\" was not made ready in step 1 on rank");
    OK(ddl_grad_ready(b.t, 1));
    FAILS(ddl_grad_ready(b.t, 1), DDL_ERR_STATE, "gradient \"second\" was made ready twice in step 1 on rank");
    FAILS(ddl_grad_ready(b.t, DDL_ALL), DDL_ERR_STATE, "\"second\" was made ready twice");
    FAILS(ddl_step(b.t), DDL_ERR_STATE, "gradient \"first\" was not made ready");
    FAILS(ddl_trainer_sync(b.t), DDL_ERR_STATE, "a step is under way");
    FAILS(ddl_trainer_join_out(b.t), DDL_ERR_STATE, "`uneven` is 0");
    bench_check(&b, 0);
    OK(ddl_grad_ready(b.t, 0));
    OK(ddl_step(b.t));
    bench_check(&b, 1);
    bench_step(w, &b);
    bench_check(&b, 2);
    OK(ddl_trainer_free(&b.t));

    bench_make(w, &b, &(ddl_trainer_config){PLAIN, .overlap_forward = 1});
    OK(ddl_trainer_start(b.t));
    bench_step(w, &b);
    FAILS(ddl_grad_ready(b.t, 0), DDL_ERR_STATE, "parameter \"first\" has not been waited for");
    OK(ddl_param_wait(b.t, 0));
    FAILS(ddl_grad_ready(b.t, 0), DDL_ERR_STATE, "parameter \"second\" has not been waited for");
    FAILS(ddl_step(b.t), DDL_ERR_STATE, "parameter \"second\" has not been waited for"); /* no second update */
    OK(ddl_param_wait(b.t, 1));
    bench_check(&b, 1);
    bench_step(w, &b);
    OK(ddl_param_wait(b.t, DDL_ALL));
    bench_check(&b, 2);
    OK(ddl_trainer_free(&b.t));
}
TEST(loops_that_are_wrong) { world_threads(2, loop, NULL); }

/* The program's own step fails once: that step is over, and the next one is a whole step of its own. */
static int fail_first(void *user, ddl_trainer *t) {
    (void)t;
    return (*(int *)user)++ == 0 ? 7 : 0;
}

static void own_step_fails(ddl_group *w, void *arg) {
    int calls = 0;
    bench b;
    ddl_trainer_stats stats;
    ddl_trainer_config config = {.step = fail_first, .step_user = &calls};
    config.uneven = *(int *)arg == 1; /* sums are divided: not twice */
    config.sync = *(int *)arg == 2 ? DDL_SYNC_LOCAL : DDL_SYNC_BSP;
    bench_make(w, &b, &config);
    OK(ddl_trainer_start(b.t));
    for (int step = 0; step < 3; step++) {
        OK(ddl_grad_ready(b.t, DDL_ALL));
        if (step == 0) {
            FAILS(ddl_step(b.t), DDL_ERR_STATE, "the program's own step returned 7 in step 1");
            FAILS(ddl_step(b.t), DDL_ERR_STATE, "gradient \"first\" was not made ready");
        } else {
            OK(ddl_step(b.t));
        }
        CHECK_EQ(b.g[1][3], 1);
    }
    OK(ddl_trainer_stats_get(b.t, &stats));
    CHECK_EQ(stats.steps, 2);
    CHECK_EQ(calls, 3);
    OK(ddl_trainer_free(&b.t));
}
TEST(a_step_of_the_program_that_fails) {
    for (int kind = 0; kind < 3; kind++) {
        world_threads(2, own_step_fails, &kind);
    }
}

/* Shards stay where they are, so whatever says where they begin stays too. */
static void shards_stay(ddl_group *w, void *arg) {
    (void)arg;
    bench b;
    ddl_trainer_config config = {PLAIN, .shard = 1, .schedule = DDL_SCHEDULE_NONE}, other = config;
    bench_make(w, &b, &config);
    OK(ddl_trainer_start(b.t));
    bench_step(w, &b);
    other.schedule = DDL_SCHEDULE_WAIT_FREE;
    FAILS(ddl_trainer_switch(b.t, &other), DDL_ERR_UNSUPPORTED, "with shard the schedule and bucket_bytes cannot");
    other = config;
    other.bucket_bytes = 64;
    FAILS(ddl_trainer_switch(b.t, &other), DDL_ERR_UNSUPPORTED, "with shard the schedule and bucket_bytes cannot");
    other = config;
    other.accumulate = 2;
    FAILS(ddl_trainer_switch(b.t, &other), DDL_ERR_UNSUPPORTED, "with shard the schedule and bucket_bytes cannot");
    other = config;
    other.clip_norm = 1e6;
    OK(ddl_trainer_switch(b.t, &other));
    bench_step(w, &b);
    bench_check(&b, 2);
    OK(ddl_trainer_free(&b.t));
}
TEST(shards_stay_where_they_are) { world_threads(3, shards_stay, NULL); }

/* >>no memory */

static _Thread_local int allowed = -1; /* allocations of this rank that succeed from now on; below 0: all */
static void *may_refuse(void *user, size_t bytes) {
    (void)user;
    allowed -= allowed > 0;
    return allowed == 0 ? NULL : malloc(bytes);
}
static void give_back(void *user, void *memory) {
    (void)user;
    free(memory);
}

typedef struct shortage {
    int allowed;         /* allocations */
    ddl_status ended[2]; /* the step, by rank */
    pthread_barrier_t through; /* before: what comes early for the next step could find no memory, too */
} shortage;

/* Memory ends somewhere in the change of plans after step 3: the trainer ends with a sentence, each call after it says
 * so again, and free works. Who ends first leaves, and the other may be told that instead. */
static void no_new_plan(ddl_group *w, void *arg) {
    shortage *job = arg;
    bench b;
    bench_make(w, &b, &(ddl_trainer_config){PLAIN, .schedule = DDL_SCHEDULE_MERGED, .latency_s = 1,
                                            .seconds_per_byte = 1e-9, .bucket_bytes = 1});
    OK(ddl_trainer_start(b.t));
    bench_step(w, &b);
    bench_step(w, &b);
    OK(ddl_grad_ready(b.t, DDL_ALL));
    allowed = job->allowed;
    ddl_status status = ddl_step(b.t);
    allowed = -1;
    job->ended[ddl_rank(w)] = status;
    pthread_barrier_wait(&job->through);
    bench_check(&b, 3);
    if (status == DDL_OK) {
        bench_step(w, &b);
        bench_check(&b, 4);
    } else {
        CHECK(status == DDL_ERR_NOMEM || status == DDL_ERR_PEER);
        FAILS(ddl_grad_ready(b.t, 0), status, "the trainer has failed");
        FAILS(ddl_step(b.t), status, "the trainer has failed");
    }
    OK(ddl_trainer_free(&b.t));
}
TEST(no_memory_for_a_new_plan) {
    shortage job = {0};
    ddl_config config = {.allocator = {may_refuse, give_back, NULL}};
    world_config = &config;
    pthread_barrier_init(&job.through, NULL, 2);
    do {
        job.allowed++;
        world_threads(2, no_new_plan, &job);
        CHECK_EQ(job.ended[0] == DDL_OK, job.ended[1] == DDL_OK);
        CHECK(job.ended[0] == DDL_OK || job.ended[0] == DDL_ERR_NOMEM || job.ended[1] == DDL_ERR_NOMEM);
    } while (job.ended[0] != DDL_OK && job.allowed < 40);
    CHECK(job.allowed > 1 && job.allowed < 40);
    pthread_barrier_destroy(&job.through);
    world_config = NULL;
}

/* Rank 2 registers something else: all ranks are told what and who, and may free and begin anew. */
static void differs(ddl_group *w, void *arg) {
    int kind = *(int *)arg, odd = ddl_rank(w) == 2;
    float p[6] = {0}, g[6] = {0};
    const char *text = kind == 0   ? "tensor 1"
                       : kind == 1 ? "not as on rank 0 is it on rank 2"
                       : kind == 2 ? "between 2 and 3 tensors"
                                   : "the config of the trainer";
    ddl_trainer *t = NULL;
    OK(ddl_trainer_create(w, &(ddl_trainer_config){PLAIN, .clip_norm = kind == 3 && odd ? 1 : 2}, &t));
    OK(ddl_trainer_add(t, "a", DDL_ARRAY(p), DDL_ARRAY(g), NULL, NULL));
    ddl_tensor pt = ddl_tensor_nd(p, DDL_F32, 2, odd && kind == 0 ? (int64_t[]){3, 2} : (int64_t[]){2, 3}), gt = pt;
    gt.data = g;
    OK(ddl_trainer_add(t, odd && kind == 1 ? "c" : "b", pt, gt, NULL, NULL));
    if (kind == 2 && odd) {
        OK(ddl_trainer_add(t, "more", pt, gt, NULL, NULL));
    }
    FAILS(ddl_trainer_start(t), DDL_ERR_MISMATCH, text);
    OK(ddl_trainer_free(&t));
    bench b;
    bench_make(w, &b, &(ddl_trainer_config){PLAIN});
    OK(ddl_trainer_start(b.t));
    bench_step(w, &b);
    bench_check(&b, 1);
    OK(ddl_trainer_free(&b.t));
}
TEST(ranks_that_register_something_else) {
    for (int kind = 0; kind < 4; kind++) {
        world_threads(3, differs, &kind);
    }
}

/* A gradient that is not finite, on one rank: nobody's parameters change, all are told where it was, training goes on. */
static void not_finite(ddl_group *w, void *arg) {
    bench b;
    ddl_trainer_config config = {PLAIN, .shard = *(int *)arg % 2, .uneven = *(int *)arg == 2,
                                 .overlap_forward = *(int *)arg == 3};
    ddl_trainer_stats stats;
    bench_make(w, &b, &config);
    OK(ddl_trainer_start(b.t));
    bench_step(w, &b);
    OK(ddl_param_wait(b.t, DDL_ALL)); /* overlap_forward */
    for (int i = 0; i < 4; i++) {
        if (ddl_rank(w) == 1) {
            b.g[1][i] = i % 2 == 0 ? NAN : INFINITY;
        }
        OK(ddl_grad_ready(b.t, 1));
        OK(ddl_grad_ready(b.t, 0));
        FAILS(ddl_step(b.t), DDL_ERR_ARG, "gradient \"second\" of step 2 is not finite on rank 1");
        bench_check(&b, 1);
        b.g[1][i] = 1;
    }
    b.g[0][3] = 3e38f; /* finite here, but not the sum of three */
    OK(ddl_grad_ready(b.t, DDL_ALL));
    FAILS(ddl_step(b.t), DDL_ERR_ARG, "though each rank's gradients are");
    b.g[0][3] = 1;
    bench_step(w, &b);
    OK(ddl_param_wait(b.t, DDL_ALL));
    bench_check(&b, 2);
    OK(ddl_trainer_stats_get(b.t, &stats));
    CHECK(stats.not_finite == 5 && stats.steps == 2);
    OK(ddl_trainer_free(&b.t));
}
TEST(gradients_that_are_not_finite) {
    for (int kind = 0; kind < 4; kind++) {
        world_threads(3, not_finite, &kind);
    }
}

/* overlap_forward: the other parameters have moved on when it is found; this one stays, on all ranks, and is named. */
static void not_finite_forward(ddl_group *w, void *arg) {
    int all = *(int *)arg;
    bench b;
    ddl_trainer_stats stats;
    bench_make(w, &b, &(ddl_trainer_config){PLAIN, .overlap_forward = 1});
    OK(ddl_trainer_start(b.t));
    bench_step(w, &b);
    OK(ddl_param_wait(b.t, DDL_ALL));
    bench_check(&b, 1);
    b.g[0][2] = ddl_rank(w) == 1 ? NAN : 1;
    OK(ddl_grad_ready(b.t, DDL_ALL));
    OK(ddl_step(b.t));
    FAILS(ddl_param_wait(b.t, all ? DDL_ALL : 0), DDL_ERR_ARG,
          ddl_rank(w) == 1 ? "gradient \"first\" of step 2 is not finite (the gradient of rank 1 is not)"
                           : "gradient \"first\" of step 2 is not finite");
    OK(ddl_param_wait(b.t, 0)); /* said once */
    OK(ddl_param_wait(b.t, 1));
    for (int k = 0; k < 4; k++) {
        CHECK(b.p[0][k] == k - 1 && b.p[1][k] == 10 + k - 2);
        b.g[0][k] = 2; /* catches up */
    }
    bench_step(w, &b);
    OK(ddl_param_wait(b.t, DDL_ALL));
    bench_check(&b, 3);
    OK(ddl_trainer_stats_get(b.t, &stats));
    CHECK(stats.not_finite == 1 && stats.steps == 3);
    OK(ddl_trainer_free(&b.t));
}
TEST(gradients_that_are_not_finite_with_overlap_forward) {
    for (int all = 0; all < 2; all++) {
        world_threads(3, not_finite_forward, &all);
    }
}

/* A rank ends in the middle of training: the others are told who, each call says so again, free works. */
static void leave(ddl_group *w, void *arg) {
    bench b;
    (void)arg;
    bench_make(w, &b, &(ddl_trainer_config){PLAIN});
    OK(ddl_trainer_start(b.t));
    bench_step(w, &b);
    if (ddl_rank(w) != 1) {
        OK(ddl_grad_ready(b.t, DDL_ALL));
        FAILS(ddl_step(b.t), DDL_ERR_PEER, "rank 1");
        bench_check(&b, 1);
        FAILS(ddl_step(b.t), DDL_ERR_PEER, "the trainer has failed");
        FAILS(ddl_grad_ready(b.t, 0), DDL_ERR_PEER, "rank 1");
    } else {
        OK(ddl_grad_ready(b.t, 1)); /* freed while it is under way */
    }
    OK(ddl_trainer_free(&b.t));
}
TEST(a_rank_that_ends) { world_fork(3, leave, NULL, 20); }

/* A trainer that is freed after its context has ended. */
static bench left[2];
static void outlive(ddl_group *w, void *arg) {
    (void)arg;
    bench *b = &left[ddl_rank(w)];
    bench_make(w, b, &(ddl_trainer_config){PLAIN});
    OK(ddl_trainer_start(b->t));
    bench_step(w, b);
    OK(ddl_grad_ready(b->t, 1));
}
TEST(a_trainer_that_outlives_its_context) {
    world_threads(2, outlive, NULL);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(ddl_step(left[i].t), DDL_ERR_STATE);
        CHECK_EQ(ddl_grad_ready(left[i].t, 0), DDL_ERR_STATE);
        CHECK_EQ(ddl_trainer_free(&left[i].t), DDL_OK);
        CHECK(left[i].t == NULL);
    }
}

/* Asked for its length, and wrongly for a text nowhere, the trainer answers and goes on. */
static void described(ddl_group *w, void *arg) {
    (void)arg;
    bench b;
    char text[512];
    bench_make(w, &b, &(ddl_trainer_config){PLAIN});
    OK(ddl_trainer_start(b.t));
    size_t bytes = ddl_trainer_describe(b.t, text, sizeof text);
    CHECK_STR(text, "BSP over all-reduce");
    CHECK_EQ(bytes, strlen(text) + 1);
    CHECK_EQ(ddl_trainer_describe(b.t, NULL, 0), bytes);
    CHECK_EQ(ddl_trainer_describe(b.t, NULL, sizeof text), bytes);
    bench_step(w, &b);
    bench_check(&b, 1);
    OK(ddl_trainer_free(&b.t));
}
TEST(what_it_does_in_words) { world_threads(1, described, NULL); }

TEST(presets_by_name) {
    ddl_trainer_config config;
    int32_t count = 0;
    for (const char *name; (name = ddl_trainer_preset_name(count)) != NULL; count++) {
        memset(&config, 0xff, sizeof config);
        CHECK_EQ(ddl_trainer_preset(name, &config), DDL_OK);
        CHECK(config.schedule <= DDL_SCHEDULE_PRIORITY);
    }
    CHECK(count >= 10 && ddl_trainer_preset_name(-1) == NULL);
    CHECK_EQ(ddl_trainer_preset("MG-WFBP", &config), DDL_OK);
    CHECK_EQ(config.schedule, DDL_SCHEDULE_MERGED);
    CHECK_EQ(ddl_trainer_preset("no such thing", &config), DDL_ERR_ARG);
    CHECK_EQ(ddl_trainer_preset(NULL, &config), DDL_ERR_ARG);
}

/* >>a refused step and error feedback */

enum { WIDE = 40, BAD_STEP = 5, FED_STEPS = 12 };

/* Steps with compressed gradients, of which one more is not finite on rank 1: no parameter shows that it was there, on
 * any rank, then or later. */
static void refused_step(ddl_group *w, const ddl_trainer_config *config, bool bad, float out[WIDE * WIDE]) {
    static _Thread_local float g[WIDE * WIDE];
    int64_t shape[2] = {WIDE, WIDE};
    ddl_trainer *t = NULL;
    memset(out, 0, WIDE * WIDE * sizeof *out);
    OK(ddl_trainer_create(w, config, &t));
    OK(ddl_trainer_add(t, "fed", ddl_tensor_nd(out, DDL_F32, 2, shape), ddl_tensor_nd(g, DDL_F32, 2, shape), NULL,
                       NULL));
    OK(ddl_trainer_start(t));
    for (int step = 0, turn = 0; step < FED_STEPS; step++, turn = 0) {
        do {
            bool odd = bad && step == BAD_STEP && turn == 0;
            for (int i = 0; i < WIDE * WIDE; i++) {
                g[i] = (float)((i * 7 + step * 13 + ddl_rank(w) * 5) % 23 - 11) / 8;
                g[i] *= odd ? 50 : 1;
            }
        g[WIDE + 3] = odd && ddl_rank(w) == 1 ? NAN : g[WIDE + 3];
            OK(ddl_grad_ready(t, DDL_ALL));
            if (odd) {
                FAILS(ddl_step(t), DDL_ERR_ARG, "gradient \"fed\" of step 6 is not finite");
            } else {
                OK(ddl_step(t));
            }
        } while (bad && step == BAD_STEP && turn++ == 0);
    }
    OK(ddl_trainer_free(&t));
}

static void fed(ddl_group *w, void *arg) {
    const ddl_trainer_config *config = arg;
    float *plain = malloc(2 * WIDE * WIDE * sizeof *plain), *other = plain + WIDE * WIDE;
    refused_step(w, config, false, plain);
    refused_step(w, config, true, other);
    CHECK(plain[0] != 0);
    if (memcmp(plain, other, WIDE * WIDE * sizeof *plain) != 0) {
        test__fail(__FILE__, __LINE__, "compression %d, architecture %d: a refused step has left something behind",
                   (int)config->compression.kind, (int)config->architecture);
    }
    free(plain);
}

TEST(a_refused_step_leaves_error_feedback_as_it_was) {
    const ddl_compression codes[] = {
        {.kind = DDL_COMPRESS_F16, .error_feedback = 1},  {.kind = DDL_COMPRESS_INT8, .error_feedback = 1},
        {.kind = DDL_COMPRESS_QSGD, .error_feedback = 1}, {.kind = DDL_COMPRESS_SIGN},
        {.kind = DDL_COMPRESS_TOP_K, .ratio = 0.05},      {.kind = DDL_COMPRESS_GTOP_K, .ratio = 0.05},
        {.kind = DDL_COMPRESS_RANDOM_K, .ratio = 0.1},    {.kind = DDL_COMPRESS_POWER, .rank = 2}};
    for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++) {
        ddl_trainer_config config = {.optimizer = {.learning_rate = 0.5}, .compression = codes[i]};
        world_threads(2, fed, &config);
    }
    for (int i = 0; i < 5; i++) { /* those that servers take; QSGD's random numbers are of the step, which counts there */
        ddl_trainer_config config = {.optimizer = {.learning_rate = 0.5}, SERVED, .compression = codes[i]};
        if (config.compression.kind != DDL_COMPRESS_QSGD) {
            world_threads(2, fed, &config);
        }
    }
}

/* Each step of the program's own tries to finalize the context that it is a part of. */
static int step_that_finalizes(void *user, ddl_trainer *t) {
    bench *b = user;
    ddl_context *c = b->context;
    (void)t;
    CHECK_EQ(ddl_finalize(&c), DDL_ERR_STATE);
    CHECK(c == b->context);
    CHECK_STR(ddl_error(c), "this thread is inside ddl_");
    CHECK_STR(ddl_error(c), "return from it first");
    for (int i = 0; i < 8; i++) {
        b->p[i / 4][i % 4] -= b->g[i / 4][i % 4];
    }
    return 0;
}

static void finalizes_in_steps(ddl_group *w, void *arg) {
    (void)arg;
    bench b;
    b.context = ddl_group_context(w);
    ddl_trainer_config config = {.step = step_that_finalizes, .step_user = &b};
    bench_make(w, &b, &config);
    OK(ddl_trainer_start(b.t));
    for (int step = 1; step <= 3; step++) {
        bench_step(w, &b);
        bench_check(&b, step); /* the job goes on */
    }
    OK(ddl_trainer_free(&b.t));
    OK(ddl_barrier(w));
}
TEST(a_step_that_finalizes_is_told_so) { world_threads(2, finalizes_in_steps, NULL); }

/* Schedule auto: it tries plans while it trains, on all ranks the same ones, though each rank measures other times; what it
 * tries and chooses changes no parameter. The fit of the line that it plans with. Which tensors servers take.
 * tests/run: variants=gcc,tsan timeout=90 waits=yes */
#define DDL_IMPLEMENTATION
#include "ddl.h"

#include "world.h"

#include <fcntl.h>

enum { TENSORS = 24, LARGEST = 60000, STEPS = 220 };

static int size_of(int i) { return i == 0 ? LARGEST : i % 3 == 0 ? 20000 + 100 * i : 64 + i; }

static void pause_us(int us) { nanosleep(&(struct timespec){0, us * 1000L}, NULL); }

static void fill(float *grad, int i, int s, int rank) {
    for (int k = 0; k < size_of(i); k++) {
        grad[k] = (float)(rank + (i + k + s) % 3);
    }
}

/* After so many steps with a rate of 0.5. */
static void check_params(float (*params)[LARGEST], int size, int steps) {
    double shift = (size - 1) / 2.0;
    for (int i = 0; i < TENSORS; i++) {
        for (int k = 0; k < size_of(i); k++) {
            double want = 0;
            for (int s = 0; s < steps; s++) {
                want -= 0.5 * (shift + (i + k + s) % 3);
            }
            if (params[i][k] != (float)want) {
                CHECK_EQ(params[i][k], (float)want);
                return;
            }
        }
    }
}

typedef struct job {
    int overlap, ways; /* ways: names of plans that rank 0 saw */
    int32_t replans;
} job;

/* Each gradient is what the step and the tensor say, so the parameters are known. Backward of each rank has its own
 * pauses, so that ready times differ between ranks and steps. */
static void train(ddl_group *w, void *arg) {
    job *j = arg;
    float(*params)[LARGEST] = malloc(2 * TENSORS * sizeof *params), (*grads)[LARGEST] = params + TENSORS;
    ddl_trainer *t;
    int rank = ddl_rank(w), size = ddl_size(w);
    ddl_trainer_config config = {.optimizer = {.learning_rate = 0.5}, .overlap_forward = j->overlap,
                                 .latency_s = 1e-9, .seconds_per_byte = 1e-12, /* so all plans are worth a trial */
                                 .replan_steps = 1000}; /* and there is one trial, however the load changes */
    OK(ddl_trainer_create(w, &config, &t));
    for (int i = 0; i < TENSORS; i++) {
        for (int k = 0; k < size_of(i); k++) {
            params[i][k] = 0;
        }
        OK(ddl_trainer_add(t, NULL, DDL_VIEW(params[i], size_of(i)), DDL_VIEW(grads[i], size_of(i)), NULL, NULL));
    }
    OK(ddl_trainer_start(t));
    char last[128] = "";
    for (int s = 0; s < STEPS; s++) {
        for (int i = 0; i < TENSORS; i++) {
            OK(ddl_param_wait(t, i));
        }
        for (int i = TENSORS - 1; i >= 0; i--) {
            if ((i + s) % (3 + 4 * rank) == 0) {
                pause_us(20 + 150 * ((s * 7 + i * rank) % 5));
            }
            fill(grads[i], i, s, rank);
            OK(ddl_grad_ready(t, i));
        }
        OK(ddl_step(t));
        if (rank == 0 && strcmp(last, t->plan_name) != 0) {
            snprintf(last, sizeof last, "%s", t->plan_name);
            j->ways += strncmp(last, "auto: ", 6) == 0;
        }
    }
    OK(ddl_param_wait(t, DDL_ALL));
    check_params(params, size, STEPS);
    CHECK(!t->trial.on);
    if (rank == 0) {
        ddl_trainer_stats stats;
        OK(ddl_trainer_stats_get(t, &stats));
        j->replans = stats.replans;
        CHECK(stats.latency_s > 0 && stats.seconds_per_byte > 0);
    }
    OK(ddl_trainer_free(&t));
    free(params);
}

/* STEPS are enough for a race. Plans that have names race always. */
TEST(plans_are_tried_and_change_nothing) {
    for (int overlap = 0; overlap < 2; overlap++) {
        ddl_config config = {.progress_thread = 1, .deterministic = 1};
        job j = {.overlap = overlap};
        world_config = &config;
        world_threads(2, train, &j);
        world_config = NULL;
        CHECK(j.replans >= 1);
        CHECK(j.ways >= (overlap ? 4 : 3));
    }
}

/* Two of three gradients are made ready while the lock is held, as the progress thread holds it on a busy link: they are
 * handed over, nothing waits and none is lost. The memory of each is free at once. */
static void hand_over(ddl_group *w, void *arg) {
    const ddl_trainer_config *config = arg;
    float(*params)[LARGEST] = calloc(2 * TENSORS, sizeof *params), (*grads)[LARGEST] = params + TENSORS;
    ddl_context *c = ddl_group_context(w);
    ddl_trainer *t;
    enum { HANDED_STEPS = 12 };
    OK(ddl_trainer_create(w, config, &t));
    for (int i = 0; i < TENSORS; i++) {
        OK(ddl_trainer_add(t, NULL, DDL_VIEW(params[i], size_of(i)), DDL_VIEW(grads[i], size_of(i)), NULL, NULL));
    }
    OK(ddl_trainer_start(t));
    for (int s = 0; s < HANDED_STEPS; s++) {
        OK(ddl_param_wait(t, DDL_ALL));
        for (int i = TENSORS - 1; i >= 0; i--) {
            fill(grads[i], i, s, ddl_rank(w));
            if (i % 3 == 1) {
                ddl__lock(c);
            }
            OK(ddl_grad_ready(t, i));
            CHECK(i % 3 == 2 || atomic_load(&t->handed) == i + 1);
            CHECK(i % 3 != 0 || t->weights[i].handed == i + 2);
            if (i % 3 == 0) {
                ddl__unlock(c);
            }
            memset(grads[i], 0xff, (size_t)size_of(i) * sizeof(float)); /* NaN */
        }
        CHECK_EQ(ddl_grad_ready(t, 0), DDL_ERR_STATE); /* handed over is ready */
        OK(ddl_step(t));
    }
    OK(ddl_param_wait(t, DDL_ALL));
    check_params(params, ddl_size(w), HANDED_STEPS);
    OK(ddl_trainer_free(&t));
    free(params);
}

TEST(gradients_are_handed_over_to_a_thread_that_has_the_lock) {
    ddl_trainer_config configs[] = {{.schedule = DDL_SCHEDULE_WAIT_FREE},
                                    {.schedule = DDL_SCHEDULE_PRIORITY, .overlap_forward = 1},
                                    {.schedule = DDL_SCHEDULE_FUSED, .bucket_bytes = 1 << 16},
                                    {.sync = DDL_SYNC_LOCAL, .local_steps = 4}};
    for (size_t i = 0; i < sizeof configs / sizeof *configs; i++) {
        configs[i].optimizer.learning_rate = 0.5;
        world_config = &(ddl_config){.progress_thread = 1};
        world_threads(2, hand_over, &configs[i]);
        world_config = NULL;
    }
}

static void *finalize(void *context) {
    ddl_context *c = context;
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
    return NULL;
}

/* The program's thread is between two gradients, or in one. The number that it wakes the progress thread through is no
 * other file's before it has freed the trainer. */
TEST(a_context_ends_while_gradients_are_made_ready) {
    enum { MANY = 1000, COUNT = 4096 };
    static float param[COUNT], grad[COUNT];
    ddl_context *c = NULL;
    ddl_trainer *t = NULL;
    pthread_t other;
    CHECK_EQ(ddl_init(&(ddl_config){.progress_thread = 1}, &c), DDL_OK);
    REQUIRE(c != NULL);
    int fd = c->wake_fd;
    CHECK_EQ(ddl_trainer_create(ddl_world(c), &(ddl_trainer_config){.unchecked = 1}, &t), DDL_OK);
    for (int i = 0; i < MANY; i++) {
        CHECK_EQ(ddl_trainer_add(t, NULL, DDL_ARRAY(param), DDL_ARRAY(grad), NULL, NULL), DDL_OK);
    }
    CHECK_EQ(ddl_trainer_start(t), DDL_OK);
    CHECK_EQ(ddl_grad_ready(t, MANY - 1), DDL_OK);
    REQUIRE(pthread_create(&other, NULL, finalize, c) == 0);
    ddl_status status = DDL_OK;
    for (int i = MANY - 2; i > 0 && status == DDL_OK; i--) {
        status = ddl_grad_ready(t, i);
    }
    CHECK(status == DDL_OK || status == DDL_ERR_STATE);
    pthread_join(other, NULL);
    CHECK_EQ(ddl_grad_ready(t, 0), DDL_ERR_STATE);
    CHECK(fcntl(fd, F_GETFD) >= 0);
    CHECK_EQ(ddl_trainer_free(&t), DDL_OK);
    CHECK_EQ(fcntl(fd, F_GETFD), -1);
}

/* A step of the program's own: the context is finalized meanwhile, and has not come to an end when the step has. */
typedef struct last_step {
    ddl_context *c;
    pthread_t other;
    atomic_int over;
} last_step;

static void *finalize_and_tell(void *arg) {
    last_step *last = arg;
    ddl_context *c = last->c;
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
    atomic_store(&last->over, 1);
    return NULL;
}

static int step_in_the_end(void *user, ddl_trainer *t) {
    last_step *last = user;
    (void)t;
    CHECK_EQ(pthread_create(&last->other, NULL, finalize_and_tell, last), 0);
    while (!last->c->finalized) {
        pause_us(100);
    }
    pause_us(300000); /* a context that does not wait is gone after a thousandth of it */
    CHECK_EQ(atomic_load(&last->over), 0);
    return 0;
}

TEST(a_context_ends_when_the_step_that_is_under_way_has) {
    static float param[5000], grad[5000];
    last_step last = {0};
    ddl_trainer *t = NULL;
    CHECK_EQ(ddl_init(&(ddl_config){.progress_thread = 1}, &last.c), DDL_OK);
    REQUIRE(last.c != NULL);
    ddl_trainer_config config = {.step = step_in_the_end, .step_user = &last};
    CHECK_EQ(ddl_trainer_create(ddl_world(last.c), &config, &t), DDL_OK);
    CHECK_EQ(ddl_trainer_add(t, NULL, DDL_ARRAY(param), DDL_ARRAY(grad), NULL, NULL), DDL_OK);
    CHECK_EQ(ddl_trainer_start(t), DDL_OK);
    CHECK_EQ(ddl_grad_ready(t, 0), DDL_OK);
    ddl_step(t);
    pthread_join(last.other, NULL);
    CHECK_EQ(ddl_step(t), DDL_ERR_STATE);
    CHECK_EQ(ddl_trainer_free(&t), DDL_OK);
}

static void *free_trainer(void *arg) {
    ddl_trainer *t = arg;
    CHECK_EQ(ddl_trainer_free(&t), DDL_OK);
    return NULL;
}

TEST(a_context_ends_while_its_trainer_is_freed) {
    static float param[5000], grad[5000];
    for (int i = 0; i < 20; i++) {
        ddl_context *c = NULL;
        ddl_trainer *t = NULL;
        pthread_t other;
        CHECK_EQ(ddl_init(&(ddl_config){.progress_thread = 1}, &c), DDL_OK);
        REQUIRE(c != NULL);
        CHECK_EQ(ddl_trainer_create(ddl_world(c), NULL, &t), DDL_OK);
        CHECK_EQ(ddl_trainer_add(t, NULL, DDL_ARRAY(param), DDL_ARRAY(grad), NULL, NULL), DDL_OK);
        CHECK_EQ(ddl_trainer_start(t), DDL_OK);
        REQUIRE(pthread_create(&other, NULL, free_trainer, t) == 0);
        pause_us(i % 2 == 0 ? 50 : 0);
        CHECK_EQ(ddl_finalize(&c), DDL_OK);
        pthread_join(other, NULL);
    }
}

/* Servers add, and the iteration cannot be ended there: parameters have changed, and the step is not made once more. */
static void no_clock(ddl_group *w, void *arg) {
    (void)arg;
    float p[4] = {0}, g[4] = {1, 1, 1, 1};
    ddl_trainer *t;
    OK(ddl_trainer_create(w,
                          &(ddl_trainer_config){.architecture = DDL_ARCHITECTURE_AUTO, .unchecked = 1,
                                                .optimizer = {.learning_rate = 1}},
                          &t));
    OK(ddl_trainer_add(t, NULL, DDL_ARRAY(p), DDL_ARRAY(g), NULL, NULL));
    OK(ddl_trainer_start(t));
    t->served.ps->clocking = true; /* as if another thread were in it */
    OK(ddl_grad_ready(t, 0));
    FAILS(ddl_step(t), DDL_ERR_STATE, "another thread");
    t->served.ps->clocking = false;
    FAILS(ddl_step(t), DDL_ERR_STATE, "another thread");
    for (int k = 0; k < 4; k++) {
        CHECK_EQ(p[k], -1);
    }
    ddl_trainer_free(&t);
}
TEST(a_step_that_the_servers_did_not_end_is_not_made_twice) { world_threads(2, no_clock, NULL); }

/* A rank that cannot read its values, as a device may fail, comes to the comparison and says so. */
static void unread(ddl_group *w, void *arg) {
    (void)arg;
    float p[4] = {0}, g[4] = {0};
    ddl_trainer *t;
    OK(ddl_trainer_create(w, &(ddl_trainer_config){.unchecked = 1}, &t));
    OK(ddl_trainer_add(t, NULL, DDL_ARRAY(p), DDL_ARRAY(g), NULL, NULL));
    OK(ddl_trainer_start(t));
    for (int failing = -1; failing < 3; failing++) {
        uint64_t hashes[6] = {0, 0, 0, 0, 0, 7};
        if (ddl_rank(w) == failing) {
            CHECK_EQ(ddl__hashes_compare(t, "x", hashes, 2, true, DDL_ERR_SYSTEM), DDL_ERR_SYSTEM);
        } else if (failing < 0) {
            OK(ddl__hashes_compare(t, "x", hashes, 2, true, DDL_OK));
        } else {
            char text[40];
            snprintf(text, sizeof text, "rank %d cannot read", failing);
            FAILS(ddl__hashes_compare(t, "x", hashes, 2, true, DDL_OK), DDL_ERR_SYSTEM, text);
        }
    }
    OK(ddl_trainer_free(&t));
}
TEST(a_rank_that_cannot_read_its_values_tells_the_others) { world_threads(3, unread, NULL); }

/* Another race is due when the latest steps are another machine's than the winner's. */
TEST(plans_race_again_when_steps_drift) {
    const struct {
        double now_s;
        int64_t latest;
        bool stale;
    } cases[] = {{1.2, 50, false}, {1.3, 50, true}, {0.85, 50, false}, {0.75, 50, true}, {1.3, DDL__LATEST - 1, false}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        ddl_trainer t = {.served.alone = true}; /* nothing is shared with others */
        bool stale = !cases[c].stale;
        t.trial.won_s = 1;
        t.trial.latest = cases[c].latest;
        for (int k = 0; k < DDL__LATEST; k++) {
            t.trial.latest_s[k] = k < 3 ? 0.01 : k < 12 ? cases[c].now_s : 10; /* a few say nothing, either way */
        }
        CHECK_EQ(ddl__trial_is_stale(&t, &stale), DDL_OK);
        CHECK_EQ(stale, cases[c].stale);
    }
}

/* ---- adaptive compression ---- */

enum { ROWS = 3, WIDTH = 8192, LITTLE = 40 };

/* What the trainer says that it has chosen, and the distance to the target at the end, of 1 at the begin. */
typedef struct adaptive {
    double exposed_s, seconds_per_byte, left, error;
    char text[256];
    float params[2][ROWS][WIDTH];
} adaptive;

/* Pulls parameters to a target, a little differently on each rank and in each step. Large and small values are mixed, so
 * that codes lose something. */
static void descend(ddl_group *w, void *arg) {
    adaptive *a = arg;
    int rank = ddl_rank(w);
    float(*params)[WIDTH] = a->params[rank], little[LITTLE] = {0}, little_grad[LITTLE] = {0};
    float(*grads)[WIDTH] = malloc(ROWS * sizeof *grads);
    ddl_trainer_config config;
    ddl_trainer *t;
    CHECK_EQ(ddl_trainer_preset("adaptive-compression", &config), DDL_OK);
    config.optimizer.learning_rate = 0.1;
    config.exposed_s = a->exposed_s;
    config.latency_s = 1e-6;
    config.seconds_per_byte = a->seconds_per_byte;
    config.replan_steps = 20;
    OK(ddl_trainer_create(w, &config, &t));
    for (int i = 0; i < ROWS; i++) {
        memset(params[i], 0, sizeof params[i]);
        OK(ddl_trainer_add(t, NULL, DDL_VIEW(params[i], WIDTH), DDL_VIEW(grads[i], WIDTH), NULL, NULL));
    }
    OK(ddl_trainer_add(t, "little", DDL_ARRAY(little), DDL_ARRAY(little_grad), NULL, NULL));
    OK(ddl_trainer_start(t));
    CHECK(ddl__weight_is_compressed(&t->weights[0]) && !ddl__weight_is_compressed(&t->weights[ROWS]));
    double first = 0, last = 0;
    for (int s = 0; s < 150; s++) {
        double loss = 0;
        for (int i = ROWS - 1; i >= 0; i--) {
            for (int k = 0; k < WIDTH; k++) {
                double target = (k % 97 == 0 ? 30 : 1) * ((k * 7 + i) % 11 - 5) / 5.0, off = params[i][k] - target;
                grads[i][k] = (float)(off + 0.05 * ((s * 31 + k * 13 + rank * 5) % 7 - 3));
                loss += off * off;
            }
        }
        first = s == 0 ? loss : first;
        last = loss;
        OK(ddl_grad_ready(t, DDL_ALL));
        OK(ddl_step(t));
    }
    if (rank == 0) {
        a->left = last / first;
        ddl_trainer_describe(t, a->text, sizeof a->text);
    }
    OK(ddl_trainer_free(&t));
    free(grads);
}

/* The less time there is, the fewer bytes; ranks have the same bits; training arrives with all of it. */
TEST(adaptive_compression_takes_what_time_allows) {
    static adaptive a;
    const double per_byte = 1e-4; /* so slow that pauses of this machine do not count */
    const double all_s = 4.0 * ROWS * WIDTH * per_byte; /* of all tensors as they are */
    const struct {
        double exposed_s;
        const char *says, *not;
        double left; /* 1 % of a gradient at a time takes 100 times the steps for the small ones */
    } cases[] = {{2 * all_s, "(3 as they are)", "f16", 1e-3},
                 {0.55 * all_s, "f16", "top-k", 1e-3},
                 {0.26 * all_s, "int8", "as they are", 1e-3},
                 {0.001 * all_s, "(3 top-k)", "int8", 0.5}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        a = (adaptive){.exposed_s = cases[i].exposed_s, .seconds_per_byte = per_byte};
        ddl_config config = {.deterministic = 1};
        world_config = &config;
        world_threads(2, descend, &a);
        world_config = NULL;
        CHECK(memcmp(a.params[0], a.params[1], sizeof a.params[0]) == 0);
        if (strstr(a.text, cases[i].says) == NULL || strstr(a.text, cases[i].not) != NULL ||
            a.left > cases[i].left) {
            printf("case %zu: %s; left %g\n", i, a.text, a.left);
        }
        CHECK(strstr(a.text, cases[i].says) != NULL && strstr(a.text, cases[i].not) == NULL);
        CHECK(a.left < cases[i].left);
    }
}

/* >>the context's memory is counted under its lock, whatever part of the library takes it */

static ddl_context *watched;
static int asked, unlocked; /* unlocked: a lock that this thread could take while it allocates is not held */

static void look_at_lock(void) {
    asked++;
    if (watched != NULL && pthread_mutex_trylock(&watched->lock) == 0) {
        unlocked++;
        pthread_mutex_unlock(&watched->lock);
    }
}

static void *watching_alloc(void *user, size_t bytes) {
    (void)user;
    look_at_lock();
    return malloc(bytes);
}

static void watching_free(void *user, void *memory) {
    (void)user;
    look_at_lock();
    free(memory);
}

static void train_once(ddl_group *w, const ddl_trainer_config *config) {
    float p[3] = {1, 2, 3}, g[3] = {1, 1, 1};
    ddl_trainer *t;
    OK(ddl_trainer_create(w, config, &t));
    OK(ddl_trainer_add(t, "p", DDL_ARRAY(p), DDL_ARRAY(g), NULL, NULL));
    OK(ddl_trainer_start(t));
    OK(ddl_grad_ready(t, 0));
    OK(ddl_step(t));
    CHECK(p[0] < 1);
    OK(ddl_trainer_free(&t));
}

static void serve_once(ddl_group *w) {
    float p[3] = {1, 2, 3}, rows[8] = {1};
    uint64_t ids[2] = {7, 9};
    ddl_tensor params = DDL_ARRAY(p), all = ddl_tensor_nd(rows, DDL_F32, 2, (int64_t[]){2, 4});
    int32_t table;
    ddl_ps *ps;
    OK(ddl_ps_create(w, &(ddl_ps_config){.optimizer = {.learning_rate = 1}}, &params, 1, &ps));
    OK(ddl_ps_table_create(ps, &(ddl_ps_table_config){.width = 4}, &table));
    OK(ddl_ps_push_rows(ps, table, ids, 2, all, NULL));
    OK(ddl_ps_clock(ps));
    OK(ddl_ps_pull_rows(ps, table, ids, 2, all));
    OK(ddl_ps_free(&ps));
}

TEST(memory_is_taken_under_the_lock) {
    const ddl_config config = {.world_size = 1, .allocator = {watching_alloc, watching_free, NULL}};
    if (ddl_init(&config, &watched) != DDL_OK) {
        test__fail(__FILE__, __LINE__, "ddl_init failed");
        return;
    }
    ddl_group *w = ddl_world(watched), *half;
    asked = unlocked = 0;
    train_once(w, &(ddl_trainer_config){.optimizer = {.learning_rate = 0.5}});
    train_once(w, &(ddl_trainer_config){.optimizer = {.kind = DDL_ADAM, .learning_rate = 0.5}, .shard = 1});
    train_once(w, &(ddl_trainer_config){.architecture = DDL_ARCHITECTURE_PS, .optimizer = {.learning_rate = 0.5}});
    serve_once(w);
    OK(ddl_group_split(w, 0, 0, &half));
    OK(ddl_barrier(half));
    OK(ddl_group_free(&half));
    CHECK(asked > 100);
    CHECK_EQ(unlocked, 0);
    ddl_context *c = watched;
    watched = NULL; /* its end has no lock */
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

/* Operations that share the link: only the sum of their times says what a byte takes. */
TEST(the_fit_finds_the_time_of_a_byte) {
    const ddl__line truth = {40e-6, 2e-9};
    ddl__fit fit = {0};
    ddl__line line = {40e-6, 1};
    for (int i = 0; i < 200; i++) {
        int64_t a = 300000 + 1000 * i, b = 64 * i; /* two at once: the small one seems to take as long as the large one */
        double both_s = ddl__line_time(&truth, a) + ddl__line_time(&truth, b);
        ddl__fit_add(&fit, a, both_s / 2);
        ddl__fit_add(&fit, b, both_s / 2);
    }
    ddl__fit_line(&fit, &line);
    CHECK(line.latency_s == truth.latency_s);
    CHECK(line.seconds_per_byte > 0.999 * truth.seconds_per_byte && line.seconds_per_byte < 1.001 * truth.seconds_per_byte);
    ddl__line before = line;
    ddl__fit_line(&(ddl__fit){0}, &line); /* nothing was measured */
    CHECK(memcmp(&before, &line, sizeof line) == 0);
    fit = (ddl__fit){0};
    ddl__fit_add(&fit, 4096, 1); /* nothing large was */
    ddl__fit_line(&fit, &line);
    CHECK(memcmp(&before, &line, sizeof line) == 0);
}

static unsigned draw(unsigned *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* Architecture auto: each tensor takes the shorter of two lines, and changes only for a tenth. */
TEST(all_reduce_or_servers) {
    enum { N = 60 };
    static float data[1];
    ddl__weight weights[N];
    ddl_trainer t;
    memset(&t, 0, sizeof t);
    memset(weights, 0, sizeof weights);
    t.config.architecture = DDL_ARCHITECTURE_AUTO;
    t.weights = weights;
    t.count = N;
    for (int i = 0; i < N; i++) {
        weights[i].grad = ddl_tensor_1d(data, i % 7 == 0 ? DDL_BF16 : DDL_F32, 1);
        weights[i].count = (int64_t)i * i * 100;
    }
    unsigned state = 3;
    for (int round = 0; round < 100; round++) {
        double a[2] = {1e-5 * (1 + draw(&state) % 50), 1e-5 * (1 + draw(&state) % 50)};
        double b[2] = {1e-10 * (1 + draw(&state) % 90), 1e-10 * (1 + draw(&state) % 90)};
        bool was[N], changed = false;
        for (int k = 0; k < 2; k++) {
            t.lines[k] = (ddl__line){a[k], b[k]};
        }
        for (int i = 0; i < N; i++) {
            was[i] = weights[i].served;
        }
        t.served.chosen = false;
        ddl__served_choose(&t);
        for (int i = 0; i < N; i++) {
            double bytes = 4.0 * (double)weights[i].count, reduce = a[0] + b[0] * bytes, serve = a[1] + b[1] * bytes;
            bool is = weights[i].served;
            changed = changed || is != was[i];
            CHECK(!is || (i % 7 != 0 && i > 0)); /* 16 bits and nothing at all: by all-reduce */
            CHECK(!is || serve < 1.11 * reduce);
            CHECK(is || i % 7 == 0 || reduce < 1.11 * serve);
            CHECK(is == was[i] || (is ? 1.09 * serve < reduce : 1.09 * reduce < serve));
        }
        CHECK_EQ(t.served.chosen, changed);
    }
}

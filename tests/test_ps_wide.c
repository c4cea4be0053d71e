/* f64 on parameter servers: kept, added up and stepped in f64, beside f32 parameters; through ddl_ps and through the
 * trainer, with checkpoints; what does not fit is refused. The oracle is plain loops in double, to 1e-12.
 * tests/run: variants=gcc,asan libs=-lm */
#include "ps.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

enum { LARGE = 2503, SMALL = 3, NARROW = 701, ALL = LARGE + SMALL, STEPS = 12, HALF = 5 };

static double gradient(int i, int step, int worker) { return sin(1.7 * i + 0.3 * step + 2.1 * worker); }

/* SGD or Adam on the average of n workers, from cos(i). */
static void oracle(double *p, ddl_optimizer_kind kind, int n) {
    static _Thread_local double m[ALL], v[ALL];
    memset(m, 0, sizeof m);
    memset(v, 0, sizeof v);
    for (int i = 0; i < ALL; i++) {
        p[i] = cos(i);
    }
    for (int t = 1; t <= STEPS; t++) {
        for (int i = 0; i < ALL; i++) {
            double g = 0;
            for (int r = 0; r < n; r++) {
                g += gradient(i, t, r) / n;
            }
            m[i] = 0.9 * m[i] + (1 - 0.9) * g;
            v[i] = 0.999 * v[i] + (1 - 0.999) * g * g;
            double adam = m[i] / (1 - pow(0.9, t)) / (sqrt(v[i] / (1 - pow(0.999, t))) + 1e-8);
            p[i] -= 0.01 * (kind == DDL_ADAM ? adam : g);
        }
    }
}

/* The largest error of ALL doubles, relative to 1 + their size. */
static double error_of(const double *p, const double *want) {
    double error = 0;
    for (int i = 0; i < ALL; i++) {
        double far = fabs(p[i] - want[i]) / (1 + fabs(want[i]));
        error = far > error || isnan(far) ? far : error;
    }
    return error;
}

typedef struct job {
    ddl_ps_config config;
    const char *folder; /* saved after HALF steps, and loaded into other servers; or NULL */
    bool again;         /* from the checkpoint on */
} job;

/* >>ddl_ps: large f64, f32, small f64 */

static void push_all(ddl_group *w, ddl_ps *ps, double *g, double *p, float *narrow, int step) {
    float ones[NARROW];
    for (int i = 0; i < ALL; i++) {
        g[i] = gradient(i, step, ps_worker(ps));
        p[i] = NAN;
    }
    for (int i = 0; i < NARROW; i++) {
        ones[i] = 1;
        narrow[i] = NAN;
    }
    ddl_request *requests[3] = {NULL};
    OK(ddl_ps_ipush_pull(ps, 0, DDL_VIEW(g, LARGE), DDL_VIEW(p, LARGE), NULL, &requests[0]));
    OK(ddl_ps_ipush_pull(ps, 1, DDL_VIEW(ones, NARROW), DDL_VIEW(narrow, NARROW), NULL, &requests[1]));
    OK(ddl_ps_ipush_pull(ps, 2, DDL_VIEW(g + LARGE, SMALL), DDL_VIEW(p + LARGE, SMALL), NULL, &requests[2]));
    OK(ddl_wait_all(requests, 3, NULL));
    OK(ddl_ps_clock(ps));
}

static void refused(ddl_group *w, ddl_ps *ps, double *g) {
    float narrow[SMALL] = {0};
    FAILS(ddl_ps_push(ps, 2, DDL_VIEW(narrow, SMALL), NULL), DDL_ERR_ARG, "3 elements of f32; 3 contiguous f64");
    FAILS(ddl_ps_pull(ps, 2, DDL_VIEW(narrow, SMALL)), DDL_ERR_ARG, "3 elements of f32; 3 contiguous f64");
    FAILS(ddl_ps_push(ps, 1, DDL_VIEW(g, NARROW), NULL), DDL_ERR_ARG, "701 elements of f64; 701 contiguous f32");
    g[0] = 0;
    g[1] = 1e308; /* beyond f32, and finite */
    g[2] = -INFINITY;
    FAILS(ddl_ps_push(ps, 2, DDL_VIEW(g, SMALL), NULL), DDL_ERR_ARG, "element 2 is -inf");
}

static void work(ddl_group *w, ddl_ps *ps, void *arg) {
    const job *x = arg;
    double *g = malloc(3 * ALL * sizeof *g), *p = g + ALL, *want = p + ALL;
    float narrow[NARROW];
    REQUIRE(g != NULL);
    refused(w, ps, g);
    if (x->again) {
        OK(ddl_ps_load(ps, x->folder));
    }
    for (int step = x->again ? HALF + 1 : 1; step <= STEPS; step++) {
        push_all(w, ps, g, p, narrow, step);
        if (step == HALF && x->folder != NULL) {
            OK(ddl_ps_save(ps, x->folder));
            break;
        }
    }
    if (x->folder == NULL || x->again) {
        oracle(want, x->config.optimizer.kind, ps_workers(ps));
        CHECK(error_of(p, want) < 1e-12);
        float first = narrow[0], last = narrow[NARROW - 1];
        CHECK(fabsf(first - (1 - 0.01f * STEPS)) < 1e-5f && last == first); /* Adam and SGD alike, of a gradient of 1 */
    }
    free(g);
}

static void serve(ddl_group *w, void *arg) {
    job *x = arg;
    double p[ALL];
    float narrow[NARROW];
    for (int i = 0; i < ALL; i++) {
        p[i] = ddl_rank(w) == 0 && !x->again ? cos(i) : NAN;
    }
    for (int i = 0; i < NARROW; i++) {
        narrow[i] = ddl_rank(w) == 0 && !x->again ? 1 : NAN;
    }
    ddl_tensor params[] = {DDL_VIEW(p, LARGE), DDL_VIEW(narrow, NARROW), DDL_VIEW(p + LARGE, SMALL)};
    ps_run(w, &x->config, params, 3, work, x);
}

static const ddl_optimizer optimizers[] = {{.kind = DDL_SGD, .learning_rate = 0.01},
                                           {.kind = DDL_ADAM, .learning_rate = 0.01}};

TEST(bsp_equals_plain_loops) {
    for (int kind = 0; kind < 2; kind++) {
        for (int servers = 1; servers <= 2; servers++) {
            job beside = {{.servers = servers, .optimizer = optimizers[kind], .piece_bytes = 4000}, NULL, false};
            job alone = beside;
            alone.config.dedicated = 1;
            world_threads(2, serve, &beside);
            world_threads(2 + servers, serve, &alone);
        }
    }
}

static void remove_folder(const char *folder) {
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", folder);
    CHECK_EQ(system(command), 0);
}

TEST(a_checkpoint_goes_on_over_another_number_of_servers) {
    char folder[] = "/tmp/ddl-ps-wide-XXXXXX";
    REQUIRE(mkdtemp(folder) != NULL);
    job x = {{.servers = 2, .optimizer = optimizers[1], .piece_bytes = 4000}, folder, false};
    world_threads(2, serve, &x);
    x.again = true;
    x.config.servers = 1;
    world_threads(2, serve, &x);
    remove_folder(folder);
}

static void load_narrow(ddl_group *w, ddl_ps *ps, void *arg) {
    FAILS(ddl_ps_load(ps, arg), DDL_ERR_MISMATCH, "was written for other parameters");
}

static void serve_narrow(ddl_group *w, void *arg) {
    float p[LARGE + NARROW + SMALL] = {0};
    ddl_tensor params[] = {DDL_VIEW(p, LARGE), DDL_VIEW(p + LARGE, NARROW), DDL_VIEW(p + LARGE + NARROW, SMALL)};
    const ddl_ps_config config = {.optimizer = optimizers[1]};
    ps_run(w, &config, params, 3, load_narrow, arg);
}

TEST(a_checkpoint_of_f64_is_not_read_as_f32) {
    char folder[] = "/tmp/ddl-ps-wide-XXXXXX";
    REQUIRE(mkdtemp(folder) != NULL);
    job x = {{.servers = 1, .optimizer = optimizers[1]}, folder, false};
    world_threads(2, serve, &x);
    world_threads(2, serve_narrow, folder);
    remove_folder(folder);
}

/* >>the trainer: an f32 tensor between two of f64 */

typedef struct course {
    ddl_trainer_config config;
    const char *folder; /* as of a job */
    bool again;
} course;

static void one_step(ddl_group *w, ddl_trainer *t, double *g, float *narrow_g, int step) {
    for (int i = 0; i < ALL; i++) {
        g[i] = gradient(i, step, ddl_rank(w));
    }
    for (int i = 0; i < NARROW; i++) {
        narrow_g[i] = 1;
    }
    OK(ddl_grad_ready(t, DDL_ALL));
    OK(ddl_step(t));
}

static ddl_trainer *course_begin(ddl_group *w, course *x, double *p, double *g, float *narrow, float *narrow_g) {
    ddl_trainer *t = NULL;
    for (int i = 0; i < ALL; i++) {
        p[i] = ddl_rank(w) == 0 && !x->again ? cos(i) : NAN;
    }
    for (int i = 0; i < NARROW; i++) {
        narrow[i] = ddl_rank(w) == 0 && !x->again ? 1 : NAN;
    }
    OK(ddl_trainer_create(w, &x->config, &t));
    OK(ddl_trainer_add(t, "large", DDL_VIEW(p, LARGE), DDL_VIEW(g, LARGE), NULL, NULL));
    OK(ddl_trainer_add(t, "narrow", DDL_VIEW(narrow, NARROW), DDL_VIEW(narrow_g, NARROW), NULL, NULL));
    OK(ddl_trainer_add(t, "small", DDL_VIEW(p + LARGE, SMALL), DDL_VIEW(g + LARGE, SMALL), NULL, NULL));
    OK(ddl_trainer_start(t));
    return t;
}

/* In BSP the parameters are the oracle's. In SSP and ASP workers push at their own pace, and what they see is at least
 * their own pushes: finite, and not where it began. */
static void course_check(const course *x, const double *p, const float *narrow, int workers) {
    double *want = malloc(ALL * sizeof *want);
    REQUIRE(want != NULL);
    oracle(want, x->config.optimizer.kind, workers);
    bool bsp = x->config.sync == DDL_SYNC_BSP;
    double error = error_of(p, want);
    CHECK(bsp ? error < 1e-12 : error < 1);
    CHECK(p[0] != cos(0) && (float)p[1] != p[1]); /* more bits than f32 has */
    CHECK(bsp ? fabsf(narrow[NARROW - 1] - (1 - 0.01f * STEPS)) < 1e-5f : narrow[NARROW - 1] < 1);
    free(want);
}

static void train(ddl_group *w, void *arg) {
    course *x = arg;
    int32_t workers = ddl_size(w) - (x->config.dedicated ? x->config.servers : 0);
    double *p = malloc(2 * ALL * sizeof *p), *g = p + ALL;
    float narrow[NARROW], narrow_g[NARROW];
    int64_t found;
    REQUIRE(p != NULL);
    ddl_trainer *t = course_begin(w, x, p, g, narrow, narrow_g);
    if (ddl_rank(w) >= workers) {
        OK(ddl_trainer_serve(t));
    } else {
        if (x->again) {
            OK(ddl_trainer_load(t, x->folder, &found));
            CHECK_EQ(found, HALF);
        }
        int last = x->folder != NULL && !x->again ? HALF : STEPS;
        for (int step = x->again ? HALF + 1 : 1; step <= last; step++) {
            one_step(w, t, g, narrow_g, step);
        }
        if (last == HALF) {
            OK(ddl_trainer_save(t, x->folder));
        } else {
            course_check(x, p, narrow, workers);
        }
    }
    OK(ddl_trainer_free(&t));
    free(p);
}

TEST(the_trainer_with_servers_equals_plain_loops) {
    for (int kind = 0; kind < 2; kind++) {
        for (int servers = 1; servers <= 2; servers++) {
            course beside = {{.architecture = DDL_ARCHITECTURE_PS, .servers = servers, .optimizer = optimizers[kind],
                              .schedule = servers == 1 ? DDL_SCHEDULE_PRIORITY : DDL_SCHEDULE_AUTO,
                              .piece_bytes = 4096}, NULL, false};
            course alone = beside;
            alone.config.dedicated = 1;
            world_threads(2, train, &beside);
            world_threads(2 + servers, train, &alone);
        }
    }
    course averaged = {{.architecture = DDL_ARCHITECTURE_PS, .servers = 2, .optimizer = optimizers[1],
                        .clip_norm = 1e9}, NULL, false}; /* servers add only */
    world_threads(2, train, &averaged);
}

TEST(stale_and_asynchronous_trainers) {
    const ddl_sync modes[] = {DDL_SYNC_SSP, DDL_SYNC_ASP};
    for (int i = 0; i < 2; i++) {
        course x = {{.architecture = DDL_ARCHITECTURE_PS, .servers = 2, .sync = modes[i], .optimizer = optimizers[0]},
                    NULL, false};
        world_threads(2, train, &x);
    }
}

TEST(a_trainers_checkpoint) {
    char folder[] = "/tmp/ddl-ps-wide-XXXXXX";
    REQUIRE(mkdtemp(folder) != NULL);
    course x = {{.architecture = DDL_ARCHITECTURE_PS, .servers = 1, .optimizer = optimizers[1]}, folder, false};
    world_threads(2, train, &x);
    x.again = true;
    x.config.servers = 2;
    world_threads(2, train, &x);
    remove_folder(folder);
}

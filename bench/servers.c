/* How much of a server's link its workers use: the last rank serves, the others have a trainer with one large tensor, so
 * that as much goes both ways. Prints, in MB/s one way, what two ranks that exchange messages get through the same link
 * (the best of several rounds), and what the server gets and gives: in the time of the
 * slowest worker, and in the mean of their times. */
#define DDL_IMPLEMENTATION
#include "ddl.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { COUNT = 8 << 20, ROUNDS = 4, STEPS = 5 }; /* 32 MiB */

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void ok(ddl_group *w, ddl_status status) {
    if (status != DDL_OK) {
        fprintf(stderr, "servers: %s\n", ddl_error(ddl_group_context(w)));
        exit(1);
    }
}

/* The first and the last rank send each other the same at once. */
static double plain(ddl_group *w, ddl_tensor out, ddl_tensor in) {
    int32_t last = ddl_size(w) - 1, me = ddl_rank(w), peer = me == 0 ? last : 0;
    double best = 0;
    for (int i = 0; i < ROUNDS; i++) {
        ok(w, ddl_barrier(w));
        double start = now_s();
        if (me == 0 || me == last) {
            ddl_request *r[2];
            ok(w, ddl_irecv(w, in, peer, 1, &r[0]));
            ok(w, ddl_isend(w, out, peer, 1, &r[1]));
            ok(w, ddl_wait_all(r, 2, NULL));
        }
        double rate = COUNT * 4.0 / (now_s() - start) / 1e6;
        best = rate > best ? rate : best;
    }
    return best;
}

/* What all workers move in the time of the slowest, and in the mean of their times; MB/s. */
typedef struct rates {
    double slowest, mean;
} rates;

/* A trainer with one tensor. The first step is not counted: memory is touched first. Then the workers begin together, and
 * each times itself: in ASP they do not end together. */
static rates served(ddl_group *w, ddl_group *mine, ddl_trainer_config config, ddl_tensor param, ddl_tensor grad) {
    ddl_trainer *t = NULL;
    int32_t workers = ddl_size(w) - 1;
    double start = 0, longest, mean;
    config.architecture = DDL_ARCHITECTURE_PS;
    config.dedicated = config.unchecked = 1;
    ok(w, ddl_trainer_create(w, &config, &t));
    ok(w, ddl_trainer_add(t, NULL, param, grad, NULL, NULL));
    ok(w, ddl_trainer_start(t));
    if (ddl_rank(w) == workers) {
        ok(w, ddl_trainer_serve(t));
        ok(w, ddl_trainer_free(&t));
        return (rates){0};
    }
    for (int i = 0; i <= STEPS; i++) {
        ok(w, ddl_grad_ready(t, 0));
        ok(w, ddl_step(t));
        ok(w, ddl_param_wait(t, 0));
        if (i == 0) {
            ok(w, ddl_barrier(mine));
            start = now_s();
        }
    }
    mean = longest = now_s() - start;
    ok(w, ddl_all_reduce_scalar(mine, &longest, DDL_MAX));
    ok(w, ddl_all_reduce_scalar(mine, &mean, DDL_AVG));
    ok(w, ddl_trainer_free(&t));
    double moved = COUNT * 4e-6 * workers * STEPS;
    return (rates){moved / longest, moved / mean};
}

int main(void) {
    ddl_context *c = NULL;
    if (ddl_init(NULL, &c) != DDL_OK) {
        return 1;
    }
    ddl_group *w = ddl_world(c), *mine = NULL;
    ok(w, ddl_group_split(w, ddl_rank(w) == ddl_size(w) - 1, 0, &mine));
    float *data = calloc(2 * COUNT, sizeof *data);
    if (data == NULL) {
        return 1;
    }
    ddl_tensor a = ddl_tensor_1d(data, DDL_F32, COUNT), b = ddl_tensor_1d(data + COUNT, DDL_F32, COUNT);
    const struct {
        const char *name;
        ddl_trainer_config config;
    } ways[] = {
        {"BSP, all at once", {.schedule = DDL_SCHEDULE_NONE}},
        {"BSP, pieces of 1 MiB, credit of 2",
         {.schedule = DDL_SCHEDULE_PRIORITY, .piece_bytes = 1 << 20, .credit_bytes = 2 << 20, .replan_steps = -1}},
        {"BSP, pieces of 1 MiB, credit of 4",
         {.schedule = DDL_SCHEDULE_PRIORITY, .piece_bytes = 1 << 20, .credit_bytes = 4 << 20, .replan_steps = -1}},
        {"ASP", {.schedule = DDL_SCHEDULE_NONE, .sync = DDL_SYNC_ASP}},
    };
    double link = plain(w, a, b);
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
        rates got = served(w, mine, ways[i].config, a, b);
        if (ddl_rank(w) == 0) {
            printf("plain %.1f MB/s, %s: slowest worker %.1f MB/s = %.1f %%, mean %.1f MB/s = %.1f %%\n", link, ways[i].name,
                   got.slowest, 100 * got.slowest / link, got.mean, 100 * got.mean / link);
        }
    }
    ok(w, ddl_group_free(&mine));
    free(data);
    return ddl_finalize(&c) != DDL_OK;
}

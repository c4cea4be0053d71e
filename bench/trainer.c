/* What the trainer itself costs: seconds for a tensor and a step, with tensors so small that neither copies nor the
 * optimizer matter: in ddl_grad_ready alone (ready), and with ddl_step. Asked: 2 us with the step, of one rank. There is a
 * progress thread; where two ranks share a link it holds the lock, and gradients are handed over to it. With more than
 * one rank a step has its messages too: the figure of `ready` is then the trainer's.
 *
 *     cc -O2 -std=c11 -I. bench/trainer.c build/libddl.a -o /tmp/trainer -lpthread -ldl -lm
 *     /tmp/trainer && build/ddlrun -n 2 /tmp/trainer */
#define _POSIX_C_SOURCE 199309L
#include "ddl.h"

#include <stdio.h>
#include <time.h>

enum { TENSORS = 400, ELEMENTS = 4, STEPS = 500, ROUNDS = 5 };

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The least time of a step over rounds, for a tensor. */
static int measure(ddl_context *context, const char *name) {
    static float params[TENSORS][ELEMENTS], grads[TENSORS][ELEMENTS];
    ddl_trainer_config config;
    ddl_trainer *t;
    double least = 1e9, ready = 1e9;
    ddl_status status = ddl_trainer_preset(name, &config);
    config.optimizer.learning_rate = 1e-3;
    status = status < 0 ? status : ddl_trainer_create(ddl_world(context), &config, &t);
    for (int i = 0; i < TENSORS && status >= 0; i++) {
        status = ddl_trainer_add(t, NULL, DDL_ARRAY(params[i]), DDL_ARRAY(grads[i]), NULL, NULL);
    }
    status = status < 0 ? status : ddl_trainer_start(t);
    for (int round = 0; round < ROUNDS && status >= 0; round++) {
        double begin = now_s(), inside = 0;
        for (int s = 0; s < STEPS && status >= 0; s++) {
            double from = now_s();
            for (int i = TENSORS - 1; i >= 0 && status >= 0; i--) {
                status = ddl_grad_ready(t, i);
            }
            inside += now_s() - from;
            status = status < 0 ? status : ddl_step(t);
            status = status < 0 ? status : ddl_param_wait(t, DDL_ALL);
        }
        double each = (now_s() - begin) / STEPS / TENSORS;
        inside = inside / STEPS / TENSORS;
        least = each < least ? each : least;
        ready = inside < ready ? inside : ready;
    }
    if (status < 0) {
        fprintf(stderr, "trainer: %s: %s\n", name, ddl_error(context));
        return 1;
    }
    int ranks = ddl_size(ddl_world(context));
    const char *verdict = ranks > 1 ? "" : least <= 2e-6 ? " (asked 2: reached)" : " (asked 2: missed)";
    if (ddl_rank(ddl_world(context)) == 0) {
        printf("%-20s %d ranks: ready %.3f us, with the step %.3f us for a tensor%s\n", name, ranks, ready * 1e6,
               least * 1e6, verdict);
    }
    return ddl_trainer_free(&t) < 0;
}

int main(void) {
    ddl_context *context;
    if (ddl_init(&(ddl_config){.progress_thread = 1}, &context) < 0) {
        fprintf(stderr, "trainer: %s\n", ddl_error(NULL));
        return 1;
    }
    int failed = measure(context, "auto") | measure(context, "WFBP-A2A") | measure(context, "ByteScheduler-A2A");
    ddl_finalize(&context);
    return failed;
}

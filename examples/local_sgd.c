/* local_sgd.c: training over a slow link. The same training in BSP, with local SGD, and with DiLoCo's outer optimizer: time
 * to the same loss, drawn into local_sgd.svg. bench/local_sgd runs it on two hosts with 10 Mbit/s between them.
 *
 * Build:  cc -O2 -std=c11 -I. -o local_sgd examples/local_sgd.c -lpthread -ldl -lm
 * Run:    ddlrun -n 2 ./local_sgd
 * Prints: BSP reached the loss
 * Prints: local SGD (H = 8) reached the loss
 * Prints: DiLoCo (H = 20) reached the loss
 *
 * A step computes for 2 ms (emulated by sleep, so that cores do not matter). BSP then averages gradients, 80 KB of them,
 * which takes 64 ms at 10 Mbit/s. Local SGD averages parameters every H steps; DiLoCo steps with Nesterov's momentum on
 * the averaged difference, from one such time to the next. The model is a least squares fit of 20,000 weights, with a
 * noise in the gradients that differs between ranks. */
#define DDL_IMPLEMENTATION
#include "ddl.h"

#include "curve.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { WEIGHTS = 20000, STEPS = 100, WAYS = 3 };
static const double target = 0.03; /* of the loss, which begins at 1 */

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        if ((call) < 0) {                                                                                              \
            fprintf(stderr, "%s\n", ddl_error(context));                                                               \
            ddl_abort(context, "an example failed");                                                                   \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

static double curvature(int i) { return i % 3 == 0 ? 1 : 0.4; }

static void gradient(const float *w, float *grad, uint64_t *random) {
    for (int i = 0; i < WEIGHTS; i++) {
        grad[i] = (float)(curvature(i) * ((double)w[i] - (double)wanted(i)) + 0.5 * uniform(random));
    }
}

/* One training run; w and grad lie in memory of WEIGHTS floats each. */
static int run(ddl_context *context, const ddl_trainer_config *config, float *w, float *grad, curve *out) {
    ddl_group *world = ddl_world(context);
    ddl_trainer *trainer = NULL;
    ddl_trainer_stats stats;
    uint64_t random = 77 + (uint64_t)ddl_rank(world);
    memset(w, 0, WEIGHTS * sizeof *w);
    TRY(ddl_trainer_create(world, config, &trainer));
    TRY(ddl_trainer_add(trainer, "w", DDL_VIEW(w, WEIGHTS), DDL_VIEW(grad, WEIGHTS), NULL, NULL));
    TRY(ddl_trainer_start(trainer));
    TRY(ddl_barrier(world));
    double start = now_s();
    curve_begin(out);
    curve_add(out, 0, loss_of(w, WEIGHTS), target);
    for (int step = 1; step < STEPS; step++) {
        gradient(w, grad, &random);
        usleep(2000);
        TRY(ddl_grad_ready(trainer, DDL_ALL));
        TRY(ddl_step(trainer));
        TRY(ddl_trainer_stats_get(trainer, &stats));
        if (stats.local_steps > 0) {
            continue; /* each rank is elsewhere */
        }
        curve_add(out, now_s() - start, loss_of(w, WEIGHTS), target);
    }
    TRY(ddl_trainer_free(&trainer));
    return 0;
}

int main(void) {
    static float w[WEIGHTS], grad[WEIGHTS];
    static curve curves[WAYS] = {{.name = "BSP"}, {.name = "local SGD (H = 8)"}, {.name = "DiLoCo (H = 20)"}};
    const ddl_optimizer sgd = {.kind = DDL_SGD, .learning_rate = 0.1};
    const ddl_trainer_config ways[WAYS] = {
        {.optimizer = sgd, .schedule = DDL_SCHEDULE_NONE},
        {.optimizer = sgd, .sync = DDL_SYNC_LOCAL, .local_steps = 8},
        {.optimizer = sgd, .sync = DDL_SYNC_LOCAL, .local_steps = 20, .outer_rate = 0.7, .outer_momentum = 0.5}};
    ddl_context *context = NULL;
    char error[1024] = "";
    ddl_config joining = {.error_text = error, .error_bytes = sizeof error};
    if (ddl_init(&joining, &context) < 0) {
        fprintf(stderr, "%s\n", error);
        return 1;
    }
    int failed = 0;
    for (int m = 0; m < WAYS && !failed; m++) {
        failed = run(context, &ways[m], w, grad, &curves[m]);
        if (ddl_rank(ddl_world(context)) == 0 && !failed) {
            failed = curves[m].reached_s < 0;
            printf("%s %s the loss of %g after %.2f s; %d steps took %.2f s\n", curves[m].name,
                   failed ? "never reached" : "reached", target, curves[m].reached_s, STEPS,
                   curves[m].seconds[curves[m].points - 1]);
        }
    }
    if (ddl_rank(ddl_world(context)) == 0 && !failed) {
        failed = curve_draw(curves, WAYS, "local_sgd.svg");
        printf("drawn into local_sgd.svg\n");
    }
    ddl_finalize(&context);
    return failed;
}

/* ssp.c: what stale reads are good for. The same training over parameter servers in BSP, SSP and ASP, with workers that are
 * slow now and then, as on machines that others use too: time to the same loss, drawn into ssp.svg.
 *
 * Build:  cc -O2 -std=c11 -I. -o ssp examples/ssp.c -lpthread -ldl -lm
 * Run:    ddlrun -n 4 ./ssp
 * Prints: BSP reached the loss
 * Prints: SSP (staleness 4) reached the loss
 * Prints: ASP reached the loss
 *
 * An iteration takes 2 ms, but in one of six 12 ms (compute is emulated by sleep, so that cores do not matter). BSP waits
 * for the slowest of each iteration. SSP lets a worker go on as long as it is at most `staleness` ahead, so that only
 * a worker that is slow for long holds the others up. ASP never waits, but its gradients are old. The model is a least
 * squares fit of 200 weights. */
#define DDL_IMPLEMENTATION
#include "ddl.h"

#include "curve.h"

#include <stdlib.h>
#include <unistd.h>

enum { WEIGHTS = 200, BATCH = 32, STEPS = POINTS_MAX, MODES = 3 };
static const double target = 0.02; /* of the loss, which begins at 1 */

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        if ((call) < 0) {                                                                                              \
            fprintf(stderr, "%s\n", ddl_error(context));                                                               \
            ddl_abort(context, "an example failed");                                                                   \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

/* Gradient of the mean of (x . (w - wanted))^2 / 2 over a batch of random x, whose components have variance 1. */
static void gradient(const float *w, float *grad, uint64_t *random) {
    for (int i = 0; i < WEIGHTS; i++) {
        grad[i] = 0;
    }
    for (int b = 0; b < BATCH; b++) {
        float x[WEIGHTS];
        double off = 0;
        for (int i = 0; i < WEIGHTS; i++) {
            x[i] = (float)(uniform(random) * sqrt(3));
            off += (double)(x[i] * (w[i] - wanted(i)));
        }
        for (int i = 0; i < WEIGHTS; i++) {
            grad[i] += (float)off * x[i] / BATCH;
        }
    }
}

static int run(ddl_context *context, ddl_group *world, ddl_sync_config sync, curve *out) {
    float w[WEIGHTS] = {0}, grad[WEIGHTS];
    ddl_ps *ps = NULL;
    ddl_tensor param = DDL_ARRAY(w);
    uint64_t random = 77 + (uint64_t)ddl_rank(world);
    ddl_ps_config config = {.sync = sync, .optimizer = {.kind = DDL_SGD, .learning_rate = 0.06}};
    TRY(ddl_ps_create(world, &config, &param, 1, &ps));
    TRY(ddl_barrier(world));
    double start = now_s();
    curve_begin(out);
    for (int step = 0; step < STEPS; step++) {
        TRY(ddl_ps_pull(ps, 0, param));
        curve_add(out, now_s() - start, loss_of(w, WEIGHTS), target);
        gradient(w, grad, &random);
        usleep(uniform(&random) < -2.0 / 3 ? 12000 : 2000);
        TRY(ddl_ps_push(ps, 0, DDL_ARRAY(grad), NULL));
        TRY(ddl_ps_clock(ps));
    }
    TRY(ddl_ps_free(&ps));
    return 0;
}

int main(void) {
    static curve curves[MODES] = {{.name = "BSP"}, {.name = "SSP (staleness 4)"}, {.name = "ASP"}};
    const ddl_sync_config modes[MODES] = {
        {.mode = DDL_SYNC_BSP}, {.mode = DDL_SYNC_SSP, .staleness = 4}, {.mode = DDL_SYNC_ASP}};
    ddl_context *context = NULL;
    char error[1024] = "";
    ddl_config joining = {.error_text = error, .error_bytes = sizeof error};
    if (ddl_init(&joining, &context) < 0) {
        fprintf(stderr, "%s\n", error);
        return 1;
    }
    ddl_group *world = ddl_world(context);
    int failed = 0;
    for (int m = 0; m < MODES && !failed; m++) {
        failed = run(context, world, modes[m], &curves[m]);
        if (ddl_rank(world) == 0 && !failed) {
            failed = curves[m].reached_s < 0;
            printf("%s %s the loss of %g after %.2f s; %d iterations took %.2f s\n", curves[m].name,
                   failed ? "never reached" : "reached", target, curves[m].reached_s, STEPS,
                   curves[m].seconds[STEPS - 1]);
        }
    }
    if (ddl_rank(world) == 0 && !failed) {
        failed = curve_draw(curves, MODES, "ssp.svg");
        printf("drawn into ssp.svg\n");
    }
    ddl_finalize(&context);
    return failed;
}

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

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { WEIGHTS = 200, BATCH = 32, STEPS = 150, MODES = 3 };
static const double target = 0.02; /* of the loss, which begins at 1 */

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        if ((call) < 0) {                                                                                              \
            fprintf(stderr, "%s\n", ddl_error(context));                                                               \
            ddl_abort(context, "an example failed");                                                                   \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

typedef struct curve {
    const char *name;
    double seconds[STEPS], loss[STEPS]; /* as worker 0 sees them */
    int points;
    double reached_s; /* negative: never */
} curve;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double uniform(uint64_t *state) { /* splitmix64, -1 to 1 */
    uint64_t z = (*state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (double)((z ^ (z >> 31)) >> 11) / 4503599627370496.0 - 1;
}

static float wanted(int i) { return i % 2 == 0 ? 1.0f : -1.0f; }

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

static double loss_of(const float *w) {
    double sum = 0;
    for (int i = 0; i < WEIGHTS; i++) {
        sum += (double)((w[i] - wanted(i)) * (w[i] - wanted(i)));
    }
    return sum / WEIGHTS;
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
    out->reached_s = -1;
    for (int step = 0; step < STEPS; step++) {
        TRY(ddl_ps_pull(ps, 0, param));
        out->seconds[step] = now_s() - start;
        out->loss[step] = loss_of(w);
        out->points = step + 1;
        if (out->loss[step] <= target && out->reached_s < 0) {
            out->reached_s = out->seconds[step];
        }
        gradient(w, grad, &random);
        usleep(uniform(&random) < -2.0 / 3 ? 12000 : 2000);
        TRY(ddl_ps_push(ps, 0, DDL_ARRAY(grad), NULL));
        TRY(ddl_ps_clock(ps));
    }
    TRY(ddl_ps_free(&ps));
    return 0;
}

/* Loss on a logarithmic scale over time, one line for each mode. */
static int draw(const curve *curves, const char *path) {
    static const char *const colours[MODES] = {"#c0392b", "#2471a3", "#1e8449"};
    FILE *f = fopen(path, "w");
    double most = 0;
    for (int m = 0; m < MODES; m++) {
        most = fmax(most, curves[m].seconds[curves[m].points - 1]);
    }
    if (f == NULL) {
        return 1;
    }
    fprintf(f, "<svg xmlns='http://www.w3.org/2000/svg' width='640' height='400' font-family='sans-serif' "
               "font-size='12'>\n<rect width='640' height='400' fill='white'/>\n"
               "<path d='M60 20 V350 H620' fill='none' stroke='black'/>\n"
               "<text x='300' y='385'>seconds, 0 to %.2f</text>\n<text x='8' y='16'>loss</text>\n", most);
    for (int decade = 0; decade <= 3; decade++) {
        fprintf(f, "<text x='8' y='%d'>%g</text>\n", 24 + decade * 110, pow(10, -decade));
    }
    for (int m = 0; m < MODES; m++) {
        fprintf(f, "<text x='480' y='%d' fill='%s'>%s</text>\n<polyline fill='none' stroke='%s' points='", 40 + 18 * m,
                colours[m], curves[m].name, colours[m]);
        for (int i = 0; i < curves[m].points; i++) {
            fprintf(f, "%.1f,%.1f ", 60 + 560 * curves[m].seconds[i] / most,
                    20 - 110 * log10(fmax(curves[m].loss[i], 1e-3)));
        }
        fprintf(f, "'/>\n");
    }
    fprintf(f, "</svg>\n");
    return fclose(f);
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
        failed = draw(curves, "ssp.svg");
        printf("drawn into ssp.svg\n");
    }
    ddl_finalize(&context);
    return failed;
}

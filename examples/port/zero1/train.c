/* A small network learns a function of 8 numbers, with ZeRO-1: each rank takes its part of every batch and
 * keeps the optimizer's state of its part of the parameters only.
 *
 * Build:  cc -O2 -std=c11 -I. -o train examples/port/zero1/train.c -lm -lpthread -ldl
 * Run:    ddlrun -n 4 ./train */
#define DDL_IMPLEMENTATION
#include "ddl.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { IN = 8, HIDDEN = 30, PARAMS = HIDDEN * (IN + 2) + 1, BATCH = 64, STEPS = 40 };

/* All shards have one length, so params and grads have room up to the last one's end. */
enum { RANKS_MAX = 64, ROOM = PARAMS + RANKS_MAX };

static float params[ROOM], grads[ROOM], *first, *second;

/* The same numbers on every machine, from -1 to 1. */
static float noise(unsigned *seed) {
    *seed = *seed * 1664525u + 1013904223u;
    return (float)(*seed >> 8) / 8388608.0f - 1.0f;
}

static float target(const float *x) { return sinf(x[0] + 2 * x[1]) - 0.5f * x[2]; }

/* Loss of one example; adds its gradient. params: HIDDEN rows of IN weights and a bias, HIDDEN weights, a bias. */
static float learn_one(const float *x) {
    const float *out = params + HIDDEN * (IN + 1);
    float h[HIDDEN], y = out[HIDDEN];
    for (int j = 0; j < HIDDEN; j++) {
        const float *w = params + j * (IN + 1);
        float sum = w[IN];
        for (int i = 0; i < IN; i++) {
            sum += w[i] * x[i];
        }
        h[j] = tanhf(sum);
        y += out[j] * h[j];
    }
    float error = y - target(x);
    for (int j = 0; j < HIDDEN; j++) {
        float back = error * out[j] * (1 - h[j] * h[j]);
        float *g = grads + j * (IN + 1);
        for (int i = 0; i < IN; i++) {
            g[i] += back * x[i];
        }
        g[IN] += back;
        grads[HIDDEN * (IN + 1) + j] += error * h[j];
    }
    grads[PARAMS - 1] += error;
    return error * error / 2;
}

/* Mean loss of examples [from, to) of a step; grads becomes the mean of their gradients. */
static float learn(int step, int from, int to) {
    float loss = 0;
    memset(grads, 0, sizeof grads);
    for (int n = from; n < to; n++) {
        float x[IN];
        unsigned seed = (unsigned)(step * BATCH + n) * 2654435761u;
        for (int i = 0; i < IN; i++) {
            x[i] = noise(&seed);
        }
        loss += learn_one(x);
    }
    for (int i = 0; i < PARAMS; i++) {
        grads[i] /= (float)(to - from);
    }
    return loss / (float)(to - from);
}

/* Adam (Kingma and Ba, 2014) on count parameters. */
static void adam(float *p, const float *g, float *m, float *v, int count, int step) {
    for (int i = 0; i < count; i++) {
        m[i] = 0.9f * m[i] + 0.1f * g[i];
        v[i] = 0.999f * v[i] + 0.001f * g[i] * g[i];
        float m_hat = m[i] / (1 - powf(0.9f, (float)step)), v_hat = v[i] / (1 - powf(0.999f, (float)step));
        p[i] -= 0.01f * m_hat / (sqrtf(v_hat) + 1e-8f);
    }
}

static ddl_context *context;

static void must(ddl_status status) {
    if (status != DDL_OK) {
        fprintf(stderr, "%s\n", ddl_error(context));
        ddl_abort(context, "training failed");
        exit(1);
    }
}

int main(void) {
    if (ddl_init(NULL, &context) != DDL_OK) {
        return 1; /* ddl has said why */
    }
    ddl_group *world = ddl_world(context);
    int rank = ddl_rank(world), size = ddl_size(world), part = BATCH / size; /* size divides BATCH */
    int shard = (PARAMS + size - 1) / size; /* size is RANKS_MAX at most */
    float *own = params + rank * shard, *mean = calloc((size_t)shard, sizeof *mean);
    first = calloc((size_t)shard, sizeof *first);
    second = calloc((size_t)shard, sizeof *second);
    unsigned seed = 1;
    for (int i = 0; i < PARAMS; i++) {
        params[i] = 0.3f * noise(&seed);
    }
    for (int step = 1; step <= STEPS; step++) {
        float loss[1] = {learn(step, rank * part, (rank + 1) * part)};
        must(ddl_reduce_scatter(world, ddl_tensor_1d(grads, DDL_F32, shard * size),
                                ddl_tensor_1d(mean, DDL_F32, shard), DDL_AVG));
        adam(own, mean, first, second, shard, step);
        must(ddl_all_gather(world, ddl_tensor_1d(own, DDL_F32, shard),
                            ddl_tensor_1d(params, DDL_F32, shard * size)));
        must(ddl_all_reduce(world, DDL_ARRAY(loss), DDL_ARRAY(loss), DDL_AVG));
        if (rank == 0 && step % 10 == 0) {
            printf("step %d loss %.5f\n", step, (double)loss[0]);
        }
    }
    return ddl_finalize(&context) == DDL_OK ? 0 : 1;
}

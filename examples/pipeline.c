/* pipeline.c: a model cut into stages, one on each rank; micro-batches flow forward through them, gradients backward.
 *
 * Build:  cc -O2 -std=c11 -I. -o pipeline examples/pipeline.c -lpthread -ldl
 * Run:    ddlrun -n 4 ./pipeline
 * Run:    ddlrun -n 1 ./pipeline
 * Prints: 4 stages, 8 micro-batches: every result is that of one process
 * Prints: 1 stages, 8 micro-batches: every result is that of one process
 *
 * Each stage multiplies by its weight and adds its bias; the loss is the sum of the last stage's output. The first stage
 * has nobody before it and the last nobody after it: their peer is DDL_NO_RANK, a message to nobody, so that all stages
 * run the same code. The order is that of GPipe (Huang et al., 2019): all forward, then all backward. */
#define DDL_IMPLEMENTATION
#include "ddl.h"

#include <stdio.h>

enum { MICRO_BATCHES = 8, WIDTH = 1024, FORWARD = 0, BACKWARD = MICRO_BATCHES };

typedef struct stage {
    ddl_context *context;
    ddl_group *world;
    int32_t before, after;
    float weight, bias, weight_gradient, bias_gradient;
    float input[MICRO_BATCHES][WIDTH], output[MICRO_BATCHES][WIDTH], gradient[MICRO_BATCHES][WIDTH];
    ddl_request *sends[2 * MICRO_BATCHES];
} stage;

static float weight_of(int32_t index) { return (float)(index % 3 + 1); } /* small: all results are exact */
static float bias_of(int32_t index) { return (float)(index % 5); }
static float sample(int32_t batch, int32_t i) { return (float)((batch * 31 + i) % 7); }

/* The micro-batch is the tag, so that a message cannot be taken for another's. */
static ddl_status forward(stage *s, int32_t batch) {
    for (int32_t i = 0; s->before == DDL_NO_RANK && i < WIDTH; i++) {
        s->input[batch][i] = sample(batch, i);
    }
    ddl_status status = ddl_recv(s->world, DDL_ARRAY(s->input[batch]), s->before, FORWARD + batch, NULL);
    if (status != DDL_OK) {
        return status;
    }
    for (int32_t i = 0; i < WIDTH; i++) {
        s->output[batch][i] = s->weight * s->input[batch][i] + s->bias;
    }
    /* Not waited for here: the next micro-batch is computed while this one travels. */
    return ddl_isend(s->world, DDL_ARRAY(s->output[batch]), s->after, FORWARD + batch, &s->sends[batch]);
}

/* gradient: of the loss by this stage's output on the way in, by its input on the way out. */
static ddl_status backward(stage *s, int32_t batch) {
    float *gradient = s->gradient[batch];
    for (int32_t i = 0; s->after == DDL_NO_RANK && i < WIDTH; i++) {
        gradient[i] = 1.0f;
    }
    ddl_status status = ddl_recv(s->world, DDL_ARRAY(s->gradient[batch]), s->after, BACKWARD + batch, NULL);
    if (status != DDL_OK) {
        return status;
    }
    for (int32_t i = 0; i < WIDTH; i++) {
        s->weight_gradient += gradient[i] * s->input[batch][i];
        s->bias_gradient += gradient[i];
        gradient[i] *= s->weight;
    }
    return ddl_isend(s->world, DDL_ARRAY(s->gradient[batch]), s->before, BACKWARD + batch,
                     &s->sends[MICRO_BATCHES + batch]);
}

static ddl_status run(stage *s) {
    ddl_status status = DDL_OK;
    for (int32_t batch = 0; batch < MICRO_BATCHES && status == DDL_OK; batch++) {
        status = forward(s, batch);
    }
    for (int32_t batch = 0; batch < MICRO_BATCHES && status == DDL_OK; batch++) {
        status = backward(s, batch);
    }
    ddl_status waited = ddl_wait_all(s->sends, 2 * MICRO_BATCHES, NULL);
    return status != DDL_OK ? status : waited;
}

/* What one process computes for this stage, without any message. */
static int is_right(const stage *s, int32_t rank, int32_t stages) {
    float weight_gradient = 0, bias_gradient = 0;
    for (int32_t batch = 0; batch < MICRO_BATCHES; batch++) {
        for (int32_t i = 0; i < WIDTH; i++) {
            float x = sample(batch, i), gradient = 1.0f;
            for (int32_t k = 0; k < rank; k++) {
                x = weight_of(k) * x + bias_of(k);
            }
            for (int32_t k = rank + 1; k < stages; k++) {
                gradient *= weight_of(k);
            }
            weight_gradient += gradient * x;
            bias_gradient += gradient;
        }
    }
    return s->weight_gradient == weight_gradient && s->bias_gradient == bias_gradient;
}

int main(void) {
    static stage s;
    if (ddl_init(NULL, &s.context) != DDL_OK) {
        return 1;
    }
    s.world = ddl_world(s.context);
    int32_t rank = ddl_rank(s.world), stages = ddl_size(s.world);
    s.before = rank > 0 ? rank - 1 : DDL_NO_RANK;
    s.after = rank + 1 < stages ? rank + 1 : DDL_NO_RANK;
    s.weight = weight_of(rank);
    s.bias = bias_of(rank);

    double right = 0;
    if (run(&s) == DDL_OK) {
        right = is_right(&s, rank, stages);
    } else {
        fprintf(stderr, "%s\n", ddl_error(s.context));
        ddl_abort(s.context, "a stage of the pipeline failed");
        return 1;
    }
    if (ddl_all_reduce_scalar(s.world, &right, DDL_MIN) != DDL_OK) {
        fprintf(stderr, "%s\n", ddl_error(s.context));
        return 1;
    }
    if (rank == 0) {
        printf("%d stages, %d micro-batches: %s\n", stages, MICRO_BATCHES,
               right > 0 ? "every result is that of one process" : "a result is WRONG");
    }
    ddl_finalize(&s.context);
    return right > 0 ? 0 : 1;
}

/* adamw.h: gradient clipping, the learning-rate schedule, and AdamW.
 *
 * Every rank holds the same averaged gradient, bit for bit, so that every rank takes the same step and nothing needs to
 * be sent. */
#ifndef ADAMW_H
#define ADAMW_H

#include "model.h"

struct adamw {
    double lr, decay, clip, beta1;
    size_t warmup, steps;
    float *mean, *square; /* moments, one per parameter; `square` follows `mean` in one allocation */
    float *home;          /* both in the host's memory, for files; the same ones on the host */
};

static bool adamw_create(struct adamw *o, size_t count) {
    o->home = o->mean = host_floats(2 * count);
    o->square = o->mean == NULL ? NULL : o->mean + count;
    return o->mean != NULL;
}

/* Linear warm-up, then half a cosine down to a tenth. `step` counts from 0. */
static double adamw_rate(const struct adamw *o, size_t step) {
    if (step < o->warmup) {
        return o->lr * (double)(step + 1) / (double)o->warmup;
    }
    double done = o->steps > o->warmup ? (double)(step - o->warmup) / (double)(o->steps - o->warmup) : 1.0;
    return o->lr * (0.1 + 0.45 * (1.0 + cos(3.14159265358979 * (done < 1.0 ? done : 1.0))));
}

/* Updates m->params from m->grads; returns the gradient's norm before clipping. */
static double adamw_step(struct adamw *o, struct model *m, size_t step) {
    double norm = sqrt(kernel->sum_squares(m->grads, m->count)), t = (double)(step + 1);
    struct adamw_rates rates = {
        .lr = (float)adamw_rate(o, step),
        .beta1 = (float)o->beta1,
        .beta2 = 0.99f, /* a run of hundreds of steps needs a shorter memory than 0.999's thousand */
        .epsilon = 1e-8f,
        .grad_scale = norm > o->clip && o->clip > 0.0 ? (float)(o->clip / norm) : 1.0f,
        .mean_scale = (float)(1.0 / (1.0 - pow(o->beta1, t))),
        .square_scale = (float)(1.0 / (1.0 - pow(0.99, t))),
    };
    for (size_t i = 0; i < m->tensor_count; i++) {
        const struct tensor *p = &m->tensors[i];
        rates.decay = p->decays ? (float)o->decay : 0.0f;
        kernel->adamw(&rates, m->params + p->first, m->grads + p->first, o->mean + p->first, o->square + p->first,
                      p->count);
    }
    return norm;
}

#endif

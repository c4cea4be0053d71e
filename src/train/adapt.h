/* train, part of a step: adaptive compression. Between two steps all ranks choose a code for each tensor again: the
 * errors that they measure on the last averaged gradient, and the times of the agreed line, go through plan.h's
 * search. */
#ifndef DDL_TRAIN_ADAPT_H
#define DDL_TRAIN_ADAPT_H

#include "agree.h"

enum { DDL__ADAPT_SAMPLE = 65536 }; /* elements of a tensor that its errors are measured on */

/* Seconds that coding and adding one code take for an element: docs/training.md, Compression. They matter on fast links
 * only, so that figures of one machine do. */
static const double ddl__offer_code_s[DDL__OFFERS] = {0, 0.8e-9, 0.8e-9, 0.8e-9, 1.2e-9};
static const double ddl__offer_add_s[DDL__OFFERS] = {0, 0, 0.4e-9, 0.3e-9, 0};

/* How long a code of n elements keeps the link: all-reduced, or gathered from all (an all-reduce of m bytes sends
 * 2 m (size - 1) / size, a gather of m bytes m (size - 1)). */
static double ddl__offer_time(const ddl_trainer *t, int32_t offer, int64_t n) {
    ddl_compression code = ddl__compress_offer(offer);
    double bytes = (double)ddl__code_bytes(&code, n);
    bytes *= ddl__compress_gathers(code.kind) ? (double)t->size / 2 : 1;
    return t->lines[0].latency_s + bytes * t->lines[0].seconds_per_byte +
           (double)n * (ddl__offer_code_s[offer] + t->size * ddl__offer_add_s[offer]);
}

/* Sums of squares of what each code loses of the last average; more than a sample is taken to be like the sample.
 * scratch: twice the sample in floats. */
static void ddl__offer_errors(const ddl_trainer *t, const ddl__weight *w, float *scratch, double *out_errors) {
    int64_t n = DDL__MIN(w->count, (int64_t)DDL__ADAPT_SAMPLE);
    const float *grad = ddl__weight_mirror(t, w) + (w->count - n) / 2;
    for (int32_t o = 0; o < DDL__OFFERS; o++) {
        ddl_compression code = ddl__compress_offer(o);
        out_errors[o] = 0;
        if (code.kind != DDL_COMPRESS_NONE) {
            memset(scratch, 0, (size_t)n * sizeof(float));
            ddl__encode(&code, (ddl__code_key){0, 0, 0}, grad, scratch, n, scratch + DDL__ADAPT_SAMPLE);
            out_errors[o] = ddl__sum_squares(scratch, n) * (double)w->count / (double)n;
        }
    }
}

/* Arrays of one allocation. By tensor in backward's order, offers by tensor and number. */
typedef struct ddl__adapt {
    ddl__front *fronts;
    ddl__bid *offers;
    double *ready_s, *errors;
    int32_t *made, *chosen;
    float *scratch;
} ddl__adapt;

static void *ddl__adapt_make(ddl__adapt *a, int32_t count) {
    size_t n = (size_t)count + 1, all = n * DDL__OFFERS;
    char *memory =
        malloc((n + DDL__OFFERS) * DDL__FRONT * sizeof *a->fronts + all * sizeof *a->offers +
               (n + all) * sizeof(double) + 2 * n * sizeof(int32_t) + 2 * DDL__ADAPT_SAMPLE * sizeof(float) + 4096);
    if (memory != NULL) { /* the widest types first */
        a->fronts = (ddl__front *)(void *)memory;
        a->offers = (ddl__bid *)(void *)(a->fronts + (n + DDL__OFFERS) * DDL__FRONT);
        a->ready_s = (double *)(void *)(a->offers + all);
        a->errors = a->ready_s + n;
        a->made = (int32_t *)(void *)(a->errors + all);
        a->chosen = a->made + n;
        a->scratch = (float *)(void *)(a->chosen + n);
    }
    return memory;
}

/* What each tensor may choose from. One whose code is fixed has its time whatever is chosen. */
static void ddl__adapt_offer(const ddl_trainer *t, ddl__adapt *a) {
    for (int32_t k = 0; k < t->count; k++) {
        const ddl__weight *w = &t->weights[t->count - 1 - k];
        a->ready_s[k] = DDL__MAX(w->agreed_s, k > 0 ? a->ready_s[k - 1] : 0);
        double fixed_s = (double)(w->squeezer != NULL ? ddl__squeezer_bytes(w->squeezer)
                                                      : w->count * (int64_t)ddl_dtype_bytes(w->wire)) *
                         t->lines[0].seconds_per_byte;
        for (int32_t o = 0; o < DDL__OFFERS; o++) {
            bool open = w->squeezer != NULL && w->squeezer->adaptive;
            ddl__bid *bid = &a->offers[k * DDL__OFFERS + o];
            bid->time_s = open ? ddl__offer_time(t, o, w->count) : fixed_s;
            bid->error = open ? a->errors[k * DDL__OFFERS + o] : 0;
        }
    }
}

/* Chooses. Figures have been agreed on; nothing is under way; the lock is not held. */
static ddl_status ddl__trainer_adapt(ddl_trainer *t) {
    ddl__adapt a;
    void *memory = ddl__adapt_make(&a, t->count);
    if (memory == NULL) {
        return ddl__trainer_say(t, DDL_ERR_NOMEM, "ddl_step: no memory to choose compression anew");
    }
    for (int32_t k = 0; k < t->count; k++) {
        const ddl__weight *w = &t->weights[t->count - 1 - k];
        memset(a.errors + k * DDL__OFFERS, 0, DDL__OFFERS * sizeof(double));
        if (w->squeezer != NULL && w->squeezer->adaptive) {
            ddl__offer_errors(t, w, a.scratch, a.errors + k * DDL__OFFERS);
        }
    }
    ddl_status status = ddl__figures_share(t, DDL_VIEW(a.errors, (int64_t)t->count * DDL__OFFERS), DDL_MAX);
    if (status == DDL_OK) {
        ddl__adapt_offer(t, &a);
        double limit_s = (t->count > 0 ? a.ready_s[t->count - 1] : 0) + t->config.exposed_s;
        ddl__plan_offers(a.ready_s, a.offers, t->count, DDL__OFFERS, limit_s, a.fronts, a.made, a.chosen);
        for (int32_t k = 0; k < t->count; k++) {
            ddl__compressor *c = t->weights[t->count - 1 - k].squeezer;
            if (c != NULL && c->adaptive) {
                ddl__compressor_choose(c, a.chosen[k]);
            }
        }
    }
    free(memory);
    return status;
}

#endif /* DDL_TRAIN_ADAPT_H */

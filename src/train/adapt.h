/* train, part of a step: adaptive compression. Between two steps all ranks choose a code for each tensor again: the
 * errors that they measure on the last averaged gradient, and the times of the agreed line, go through plan.h's
 * search. */
#ifndef DDL_TRAIN_ADAPT_H
#define DDL_TRAIN_ADAPT_H

#include "agree.h"

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

/* Sums of squares of what each code loses of a sample of the last average, in numbers of the lane. */
static void ddl__offer_errors(ddl_trainer *t, const ddl__weight *w) {
    ddl__lane *lane = &t->lane;
    int64_t n = DDL__MIN(w->count, (int64_t)DDL__ADAPT_SAMPLE), number = (w - t->weights) * DDL__OFFERS;
    for (int32_t o = 0; o < DDL__OFFERS; o++) {
        ddl_compression code = ddl__compress_offer(o);
        ddl__compressor c = {.config = code, .count = n, .lane = lane, .code = (unsigned char *)lane->scratch[1]};
        if (code.kind != DDL_COMPRESS_NONE) {
            c.grad = (float *)(void *)ddl__weight_wire(t, w) + (w->count - n) / 2;
            c.residual = lane->scratch[0];
            ddl__lane_zero(lane, c.residual, (size_t)n * sizeof(float));
            ddl__lane_encode(&c);
            ddl__lane_squares(lane, c.residual, DDL_F32, n, number + o);
        }
    }
}

/* Of all tensors, by tensor in backward's order and offer; the whole is taken to be like the sample. On a device the
 * host waits once. */
static ddl_status ddl__offers_errors(ddl_trainer *t, double *errors) {
    for (int32_t i = 0; i < t->count; i++) {
        if (t->weights[i].compressor != NULL && t->weights[i].compressor->adaptive) {
            ddl__offer_errors(t, &t->weights[i]);
        }
    }
    DDL__TRY(ddl__lane_tell(&t->lane, (int64_t)t->count * DDL__OFFERS, "ddl_step"));
    for (int32_t i = 0; i < t->count; i++) {
        const ddl__weight *w = &t->weights[i];
        bool open = w->compressor != NULL && w->compressor->adaptive;
        double all = (double)w->count / (double)DDL__MIN(w->count, (int64_t)DDL__ADAPT_SAMPLE);
        for (int32_t o = 0; o < DDL__OFFERS; o++) {
            bool loses = open && ddl__compress_offer(o).kind != DDL_COMPRESS_NONE;
            errors[(t->count - 1 - i) * DDL__OFFERS + o] = loses ? t->lane.told[i * DDL__OFFERS + o] * all : 0;
        }
    }
    return DDL_OK;
}

/* Arrays of one allocation. By tensor in backward's order, offers by tensor and number. */
typedef struct ddl__adapt {
    ddl__front *fronts;
    ddl__bid *offers;
    double *ready_s, *errors;
    int32_t *made, *chosen;
} ddl__adapt;

static void *ddl__adapt_make(ddl__adapt *a, int32_t count) {
    size_t n = (size_t)count + 1, all = n * DDL__OFFERS;
    char *memory =
        malloc((n + DDL__OFFERS) * DDL__FRONT * sizeof *a->fronts + all * sizeof *a->offers +
               (n + all) * sizeof(double) + 2 * n * sizeof(int32_t));
    if (memory != NULL) { /* the widest types first */
        a->fronts = (ddl__front *)(void *)memory;
        a->offers = (ddl__bid *)(void *)(a->fronts + (n + DDL__OFFERS) * DDL__FRONT);
        a->ready_s = (double *)(void *)(a->offers + all);
        a->errors = a->ready_s + n;
        a->made = (int32_t *)(void *)(a->errors + all);
        a->chosen = a->made + n;
    }
    return memory;
}

/* What each tensor may choose from. One whose code is fixed has its time whatever is chosen. */
static void ddl__adapt_offer(const ddl_trainer *t, ddl__adapt *a) {
    for (int32_t k = 0; k < t->count; k++) {
        const ddl__weight *w = &t->weights[t->count - 1 - k];
        a->ready_s[k] = DDL__MAX(w->agreed_s, k > 0 ? a->ready_s[k - 1] : 0);
        double fixed_s = (double)(w->compressor != NULL ? ddl__compression_bytes(w->compressor)
                                                      : w->count * (int64_t)ddl_dtype_bytes(w->wire)) *
                         t->lines[0].seconds_per_byte;
        for (int32_t o = 0; o < DDL__OFFERS; o++) {
            bool open = w->compressor != NULL && w->compressor->adaptive;
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
    ddl_status status = ddl__offers_errors(t, a.errors);
    status = status < 0 ? status : ddl__figures_share(t, DDL_VIEW(a.errors, (int64_t)t->count * DDL__OFFERS), DDL_MAX);
    if (status == DDL_OK) {
        ddl__adapt_offer(t, &a);
        double limit_s = (t->count > 0 ? a.ready_s[t->count - 1] : 0) + t->config.exposed_s;
        ddl__plan_offers(a.ready_s, a.offers, t->count, DDL__OFFERS, limit_s, a.fronts, a.made, a.chosen);
        for (int32_t k = 0; k < t->count; k++) {
            ddl__compressor *c = t->weights[t->count - 1 - k].compressor;
            if (c != NULL && c->adaptive) {
                ddl__compressor_choose(c, a.chosen[k]);
            }
        }
    }
    free(memory);
    return status;
}

#endif /* DDL_TRAIN_ADAPT_H */

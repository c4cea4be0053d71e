/* train, seventh part: local SGD. Each rank steps alone; now and then parameters are averaged, or an outer optimizer
 * steps on the averaged difference (DiLoCo: Douillard et al., arXiv 2311.08105, constants as in its authors' code). */
#ifndef DDL_TRAIN_LOCAL_H
#define DDL_TRAIN_LOCAL_H

#include "step.h"

/* What the program trains, in the arena's type. */
static void ddl__weight_read(ddl_trainer *t, const ddl__weight *w, void *out) {
    if (w->master != NULL) {
        ddl__lane_copy(&t->lane, out, w->master, (size_t)w->count * sizeof(float));
    } else {
        ddl__lane_convert(&t->lane, out, w->wire, w->param.data, w->param.dtype, w->count);
    }
}

/* The reverse: `from` becomes the parameter. */
static void ddl__weight_write(ddl_trainer *t, const ddl__weight *w, const void *from) {
    if (w->master != NULL) {
        ddl__lane_copy(&t->lane, w->master, from, (size_t)w->count * sizeof(float));
    }
    ddl__lane_convert(&t->lane, w->param.data, w->param.dtype, from, w->wire, w->count);
}

static bool ddl__weight_is_outer(const ddl_trainer *t, const ddl__weight *w) {
    return t->config.outer_rate != 0 && w->anchor != NULL;
}

/* What the outer optimizer measures the difference from. */
static void ddl__weight_anchor(ddl_trainer *t, const ddl__weight *w) {
    if (w->anchor != NULL) {
        ddl__weight_read(t, w, w->anchor);
    }
}

/* Puts the parameter, or how far it has moved from the anchor, into the arena. */
static void ddl__weight_send(ddl_trainer *t, ddl__weight *w, bool contributes) {
    char *wire = ddl__weight_wire(t, w);
    if (!contributes) {
        ddl__weight_zero(t, w);
        return;
    }
    ddl__weight_read(t, w, wire);
    if (ddl__weight_is_outer(t, w)) { /* anchor - parameter */
        ddl__lane_scale(&t->lane, wire, w->count, DDL_F32, -1);
        ddl__lane_add(&t->lane, wire, w->anchor, w->count, DDL_F32);
    }
}

/* Nesterov on the averaged difference d: u = momentum * u + d; anchor -= rate * (d + momentum * u). */
static void ddl__weight_outer(ddl_trainer *t, const ddl__weight *w) {
    ddl_optimizer nesterov = {.kind = DDL_NESTEROV, .momentum = t->config.outer_momentum};
    ddl_optimizer_part part = {.step = 1, .learning_rate = t->config.outer_rate, .count = w->count,
                               .param = w->anchor, .grad = (const float *)(const void *)ddl__weight_wire(t, w),
                               .state = w->momentum, .state_stride = w->count};
    ddl__lane_step(&t->lane, &nesterov, &part, NULL);
    ddl__weight_write(t, w, w->anchor);
}

/* One synchronisation. Every rank calls; with nobody contributing nothing changes. */
static ddl_status ddl__sync_round(ddl_trainer *t, const char *what, bool contributes) {
    ddl__units_reset(t);
    t->flag[0] = contributes ? 1 : 0;
    ddl__unlock(t->context);
    for (int32_t i = t->count - 1; i >= 0; i--) {
        ddl__weight *w = &t->weights[i];
        if (t->since_sync == 0) { /* without a step since then: the others have set theirs in their first */
            ddl__weight_anchor(t, w);
        }
        ddl__weight_send(t, w, contributes);
    }
    ddl_status status = ddl__lane_wait(&t->lane, what);
    ddl__lock(t->context);
    DDL__TRY(status);
    for (int32_t i = 0; i < t->count; i++) {
        ddl__unit_release(t, t->weights[i].unit_first, t->weights[i].unit_last);
    }
    if (t->config.uneven) {
        ddl__unit_release(t, t->unit_count - 1, t->unit_count - 1);
    }
    ddl__trainer_pump(t->context, t);
    DDL__TRY(ddl__step_contributors(t, what));
    DDL__TRY(ddl__trainer_await(t, what, 0, t->piece_count - 1));
    t->since_sync = 0;
    if (t->stats.contributors == 0) {
        return DDL_OK;
    }
    ddl__step_divide(t);
    for (int32_t i = 0; i < t->count; i++) {
        ddl__weight *w = &t->weights[i];
        if (ddl__weight_is_outer(t, w)) {
            ddl__weight_outer(t, w);
        } else {
            ddl__weight_write(t, w, ddl__weight_wire(t, w));
        }
    }
    return DDL_OK;
}

/* Says which gradient of this rank's own is not finite. */
static ddl_status ddl__local_not_finite(ddl_trainer *t, int64_t step) {
    int32_t i = 0;
    while (i + 1 < t->count && !t->weights[i].bad) {
        i++;
    }
    t->stats.not_finite++;
    return ddl__error(t->context, DDL_ERR_ARG,
                      "ddl_step: gradient \"%s\" of step %lld is not finite on rank %d; its "
                      "parameters have not changed, and the step is over",
                      t->weights[i].name, (long long)step, t->rank);
}

/* A step of this rank alone. One that fails counts, so that all ranks synchronise after the same number. */
static ddl_status ddl__step_local(ddl_trainer *t, const char *what) {
    bool finite;
    ddl_status outcome = DDL_OK;
    DDL__TRY(ddl__step_norm(t, &finite));
    for (int32_t i = 0; t->since_sync == 0 && i < t->count; i++) {
        ddl__weight_anchor(t, &t->weights[i]);
    }
    if (!finite && !t->config.unchecked) {
        outcome = ddl__local_not_finite(t, t->stats.steps + 1);
    } else {
        outcome = ddl__step_update(t);
    }
    if (++t->since_sync >= t->config.local_steps) {
        DDL__TRY(ddl__sync_round(t, what, true));
    }
    ddl__step_close(t, outcome == DDL_OK);
    return outcome;
}

static ddl_status ddl__trainer_sync(ddl_trainer *t) {
    DDL__TRY(ddl__trainer_enter(t, "ddl_trainer_sync"));
    ddl_status status = DDL_OK;
    if (t->step_open || t->over) {
        status = ddl__step_under_way(t, "ddl_trainer_sync");
    } else if (t->config.sync == DDL_SYNC_LOCAL && (t->since_sync > 0 || t->config.uneven)) {
        status = ddl__sync_round(t, "ddl_trainer_sync", t->since_sync > 0);
    }
    return ddl__trainer_leave(t, ddl__trainer_hand(t, "ddl_trainer_sync", status));
}

DDL_API ddl_status ddl_trainer_sync(ddl_trainer *trainer) {
    DDL__TRY(ddl__trainer_hold(trainer, "ddl_trainer_sync"));
    return ddl__trainer_let_go(trainer, ddl__trainer_sync(trainer));
}

/* >>uneven */

/* A step of BSP to which this rank gives zeros. */
static ddl_status ddl__join_bsp(ddl_trainer *t, const char *what) {
    ddl__step_open(t, false);
    for (int32_t i = t->count - 1; i >= 0; i--) {
        ddl__weight_zero(t, &t->weights[i]);
        t->weights[i].ready = true;
    }
    ddl__unlock(t->context);
    ddl_status status = ddl__lane_wait(&t->lane, what);
    ddl__lock(t->context);
    DDL__TRY(status);
    for (int32_t i = 0; i < t->count; i++) {
        ddl__unit_release(t, t->weights[i].unit_first, t->weights[i].unit_last);
    }
    ddl__trainer_pump(t->context, t);
    return ddl__step_bsp(t, what);
}

/* A step of BSP has been made: all ranks look whether to plan anew. Of gradients that are not finite those are told who
 * made them. */
static ddl_status ddl__join_replan(ddl_trainer *t, ddl_status status) {
    if (status == DDL_OK) {
        ddl__unlock(t->context);
        status = ddl__trainer_replan(t);
        ddl__lock(t->context);
    }
    return status == DDL_ERR_ARG ? DDL_OK : status;
}

/* The mean of the batches that were accumulated, fewer than `accumulate`, is this rank's gradient of a last step. */
static ddl_status ddl__join_rest(ddl_trainer *t, const char *what, bool *out_odd) {
    ddl__unlock(t->context);
    for (int32_t i = t->count - 1; i >= 0; i--) {
        ddl__weight_mean(t, &t->weights[i], t->micro);
    }
    ddl_status status = ddl__lane_wait(&t->lane, what);
    ddl__lock(t->context);
    DDL__TRY(status);
    for (int32_t i = t->count - 1; i >= 0; i--) {
        t->weights[i].ready = true;
        ddl__weight_take(t, &t->weights[i]);
    }
    ddl__trainer_pump(t->context, t);
    status = t->grads_out ? ddl__step_bsp(t, what) : ddl__step_local(t, what);
    *out_odd = status == DDL_ERR_ARG;
    return t->grads_out ? ddl__join_replan(t, status) : *out_odd ? DDL_OK : status;
}

static ddl_status ddl__join_out(ddl_trainer *t) {
    const char *what = "ddl_trainer_join_out";
    bool rest = t->micro > 0 && t->ready_count == 0;
    if (t->config.uneven && !t->joined_out && t->step_open && !rest) {
        return ddl__step_under_way(t, what);
    }
    if (!t->config.uneven || t->joined_out) {
        return ddl__error(t->context, DDL_ERR_STATE, "%s on rank %d: %s", what, t->rank,
                          t->joined_out ? "it has joined out already"
                                        : "the config's `uneven` is 0, so that no rank may leave");
    }
    t->joined_out = true;
    bool odd = false; /* its last step was refused: a gradient was not finite */
    ddl_status status = rest ? ddl__join_rest(t, what, &odd) : DDL_OK;
    while (status == DDL_OK) {
        bool bsp = ddl__trainer_is_bsp(t);
        status = bsp ? ddl__join_replan(t, ddl__join_bsp(t, what)) : ddl__sync_round(t, what, t->since_sync > 0);
        if (t->stats.contributors == 0) {
            break;
        }
    }
    t->joined_out = false;
    if (odd && status == DDL_OK) {
        status = ddl__error(t->context, DDL_ERR_ARG,
                            "%s on rank %d: its last step was refused, as a gradient was not finite", what, t->rank);
    }
    return status;
}

static ddl_status ddl__trainer_join_out(ddl_trainer *t) {
    DDL__TRY(ddl__trainer_enter(t, "ddl_trainer_join_out"));
    ddl_status status = ddl__join_out(t);
    return ddl__trainer_leave(t, ddl__trainer_hand(t, "ddl_trainer_join_out", status));
}

DDL_API ddl_status ddl_trainer_join_out(ddl_trainer *trainer) {
    DDL__TRY(ddl__trainer_hold(trainer, "ddl_trainer_join_out"));
    return ddl__trainer_let_go(trainer, ddl__trainer_join_out(trainer));
}

#endif /* DDL_TRAIN_LOCAL_H */

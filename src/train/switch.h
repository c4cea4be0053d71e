/* train, seventh part, continued: another config between two steps. */
#ifndef DDL_TRAIN_SWITCH_H
#define DDL_TRAIN_SWITCH_H

#include "local.h"

static uint64_t ddl__kept_hash(const ddl_trainer_config *o) {
    ddl_trainer_config kept = {.optimizer = o->optimizer,
                               .step = o->step,
                               .shard = o->shard,
                               .uneven = o->uneven,
                               .compression = o->compression};
    kept.architecture = o->architecture;
    kept.servers = o->servers;
    kept.dedicated = o->dedicated + 2 * ddl__served_sums(o);
    kept.unchecked = o->architecture == DDL_ARCHITECTURE_PS ? o->unchecked : 0; /* servers look, too */
    return ddl__config_hash(&kept);
}

static ddl_status ddl__switch_check(ddl_trainer *t, const ddl_trainer_config *config, ddl_trainer_config *out) {
    const char *what = "ddl_trainer_switch";
    DDL__TRY(ddl__trainer_settle(t->context, ddl__served_ranks(t), config, what, out));
    if (t->step_open || t->over || t->joined_out) {
        return ddl__step_under_way(t, what);
    }
    if (t->compress_group != NULL && !ddl__may_compress(out, DDL_COMPRESS_F16)) {
        return ddl__error(t->context, DDL_ERR_UNSUPPORTED, "%s: " DDL__NO_COMPRESSION, what);
    }
    if (ddl__kept_hash(out) != ddl__kept_hash(&t->config)) {
        return ddl__error(t->context, DDL_ERR_UNSUPPORTED,
                          "%s: optimizer, step, compression, shard, uneven and servers cannot change, nor with "
                          "servers unchecked and whether gradients are clipped; make a "
                          "new trainer",
                          what);
    }
    for (int32_t i = 0; i < t->count && out->outer_rate != 0; i++) {
        if (t->weights[i].param.dtype == DDL_F64) {
            return ddl__error(t->context, DDL_ERR_UNSUPPORTED, DDL__NO_WIDE_OUTER, what, t->weights[i].name);
        }
    }
    const ddl_trainer_config *o = &t->config;
    if (o->shard && (out->schedule != o->schedule || out->bucket_bytes != o->bucket_bytes ||
                     (out->accumulate > 1) != (o->accumulate > 1))) { /* they say where shards begin */
        return ddl__error(t->context, DDL_ERR_UNSUPPORTED,
                          "%s: with shard the schedule and bucket_bytes cannot change, nor accumulate from or to 1, "
                          "because shards of the optimizer's state stay where they are; make a new trainer",
                          what);
    }
    return DDL_OK;
}

/* After local steps the optimizer's state differs between ranks; steps of BSP need the same everywhere. */
static ddl_status ddl__switch_average(ddl_trainer *t) {
    int64_t slots = ddl__optim_slots(&t->optimizer);
    for (int32_t i = 0; i < t->count; i++) {
        ddl__weight *w = &t->weights[i];
        if (w->state != NULL) {
            ddl_tensor state = ddl__lane_tensor(&t->lane, w->state, ddl__weight_type(w), slots * w->own_count);
            DDL__TRY(ddl_all_reduce(t->group, state, state, DDL_AVG));
        }
    }
    return ddl_all_reduce(t->group, DDL_VIEW(&t->stats.steps, 1), DDL_VIEW(&t->stats.steps, 1), DDL_MAX);
}

/* Arenas and units of the new config, in place of the old. A failure here leaves nothing to go on with. */
static ddl_status ddl__switch_rebuild(ddl_trainer *t) {
    DDL__TRY(ddl__lane_wait(&t->lane, "ddl_trainer_switch"));
    ddl__lock(t->context);
    ddl__units_free(t);
    ddl__unlock(t->context);
    ddl__arenas_free(t);
    ddl_status status = ddl__arenas_make(t);
    status = status < 0 ? status : ddl__line_measure(t);
    ddl__lock(t->context);
    t->planned_at = t->steps_tried = 0;
    t->trial.on = false;
    status = status < 0 ? status : ddl__trainer_plan(t, false);
    for (int32_t i = 0; i < t->count && status == DDL_OK; i++) {
        status = ddl__weight_prepare_outer(t, &t->weights[i]);
    }
    if (status < 0) {
        ddl__trainer_break(t, status);
    }
    ddl__unlock(t->context);
    return status;
}

static ddl_status ddl__trainer_switch(ddl_trainer *t, const ddl_trainer_config *config) {
    ddl_trainer_config settled;
    DDL__TRY(ddl__trainer_enter(t, "ddl_trainer_switch"));
    DDL__TRY(ddl__trainer_leave(t, ddl__switch_check(t, config, &settled)));
    DDL__TRY(ddl__trainer_match(t, "ddl_trainer_switch", &settled));
    DDL__TRY(ddl__trainer_sync(t));
    DDL__TRY(ddl__lane_wait(&t->lane, "ddl_trainer_switch"));
    if (t->config.sync == DDL_SYNC_LOCAL) {
        DDL__TRY(ddl__switch_average(t));
    }
    ddl_trainer_config before = t->config;
    t->config = settled;
    ddl_status status = ddl__served_switch(t);
    if (status < 0) {
        ddl__lock(t->context);
        t->config = before;
        t->served.alone = ddl__served_alone(&before);
        if (status == DDL_ERR_NOMEM) { /* the others wait for this rank */
            ddl__trainer_break(t, status);
        }
        ddl__unlock(t->context);
        return status;
    }
    return ddl__switch_rebuild(t);
}

DDL_API ddl_status ddl_trainer_switch(ddl_trainer *trainer, const ddl_trainer_config *config) {
    DDL__TRY(ddl__trainer_hold(trainer, "ddl_trainer_switch"));
    return ddl__trainer_let_go(trainer, ddl__trainer_switch(trainer, config));
}

#endif /* DDL_TRAIN_SWITCH_H */

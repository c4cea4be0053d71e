/* train, part of a step: when to plan anew, and schedule auto. The model of plan.h says which plans may be the best;
 * which is, a few steps with each say: what operations cost beside each other, and beside the program, no model knows.
 * All ranks change plans after the same steps, and choose by the same figures. */
#ifndef DDL_TRAIN_AUTO_H
#define DDL_TRAIN_AUTO_H

#include "adapt.h"

/* Puts the plan in place that draft_fill makes. The lock is not held. */
static ddl_status ddl__trainer_install(ddl_trainer *t, ddl_status status) {
    DDL__TRY(ddl__enter(t->context));
    status = status < 0 ? status : ddl__trainer_plan(t, true);
    if (status < 0) { /* there may be no units, or not those of the other ranks */
        ddl__trainer_break(t, status);
    }
    ddl__unlock(t->context);
    return status;
}

/* A plan races when the model does not see it lose more than so much of a step to the best, or when it has a name. */
#define DDL__TRIAL_RISK 0.3

/* Who races, by the model. step_s: the same on all ranks. Without overlap_forward the order in which forward needs
 * parameters says nothing. */
static ddl_status ddl__trial_choose(ddl_trainer *t, double step_s) {
    double late_s[DDL__WAYS], least = 1e9;
    bool in[DDL__RACERS] = {false};
    ddl__draft draft = {0};
    void *memory = ddl__draft_make(&draft, t->count, ddl__draft_room(t));
    if (memory == NULL) {
        return ddl__trainer_say(t, DDL_ERR_NOMEM, "ddl_step: no memory to plan anew");
    }
    ddl__draft_layers(t, draft.layers);
    for (int32_t i = 0; i < DDL__WAYS; i++) {
        late_s[i] = 1e9;
        if (t->config.overlap_forward || !ddl__ways[i].priority) {
            ddl__draft_way(t, &draft, i);
            late_s[i] = draft.late_s;
        }
        least = DDL__MIN(least, late_s[i]);
    }
    free(memory);
    for (int32_t i = 0; i < DDL__WAYS; i++) {
        in[i] = late_s[i] < 1e9 && (ddl__ways[i].named || late_s[i] <= least + DDL__TRIAL_RISK * step_s);
    }
    ddl__race_begin(&t->trial.race, in);
    return DDL_OK;
}

static ddl_status ddl__trial_begin(ddl_trainer *t) {
    double step_s = t->period_s;
    ddl_status status = ddl__figures_agree(t);
    status = status < 0 ? status : ddl__figures_share(t, DDL_VIEW(&step_s, 1), DDL_MIN);
    status = status < 0 ? status : ddl__trial_choose(t, step_s);
    t->trial.on = true;
    t->trial.way = t->trial.race.racer;
    return ddl__trainer_install(t, status);
}

/* A lap of the race has ended. */
static ddl_status ddl__trial_cut(ddl_trainer *t) {
    ddl__trial *x = &t->trial;
    ddl__race_score scores[DDL__RACERS];
    ddl__race_scores(&x->race, scores);
    ddl_tensor all = ddl_tensor_1d(scores, DDL_F64, 2 * DDL__RACERS); /* two figures of each */
    ddl_status status = ddl__figures_share(t, all, DDL_AVG);
    for (int32_t i = 0; i < DDL__WAYS; i++) {
        if (x->race.in[i]) {
            ddl__log(&t->context->base, DDL_LOG_DEBUG, "trainer: lap %d, %s: %.2f ms, median %.2f ms", x->race.lap,
                     ddl__ways[i].name, 1e3 * scores[i].quartile_s, 1e3 * scores[i].median_s);
        }
    }
    bool over = status == DDL_OK && ddl__race_cut(&x->race, scores);
    status = over ? ddl__figures_agree(t) : status;
    x->way = x->race.racer;
    x->won_s = scores[x->way].quartile_s;
    x->latest = 0;
    status = ddl__trainer_install(t, status); /* while it is on, the plan is not compared with the one before */
    x->on = !over;
    return status;
}

/* After each step of a race. */
static ddl_status ddl__trial_step(ddl_trainer *t) {
    switch (ddl__race_step(&t->trial.race, t->period_s)) {
    case DDL__RACE_CUT: return ddl__trial_cut(t);
    case DDL__RACE_NEXT: t->trial.way = t->trial.race.racer; return ddl__trainer_install(t, DDL_OK);
    default: return DDL_OK;
    }
}

/* Steps that take so many times as long as the winner's did, or as short, are those of another machine: another link,
 * other batches, other neighbours. */
#define DDL__TRIAL_DRIFT 1.25

/* Whether plans shall race again: looks at the latest steps, on the average of the ranks. */
static ddl_status ddl__trial_is_stale(ddl_trainer *t, bool *out_stale) {
    ddl__trial *x = &t->trial;
    double latest_s[DDL__LATEST];
    memcpy(latest_s, x->latest_s, sizeof latest_s);
    double now_s = ddl__race_score_of(latest_s, (int32_t)DDL__MIN(x->latest, (int64_t)DDL__LATEST)).quartile_s;
    DDL__TRY(ddl__figures_share(t, DDL_VIEW(&now_s, 1), DDL_AVG));
    *out_stale = x->latest >= DDL__LATEST &&
                 (now_s > DDL__TRIAL_DRIFT * x->won_s || DDL__TRIAL_DRIFT * now_s < x->won_s);
    return DDL_OK;
}

/* Between two steps, with nothing under way: looks whether it is time to plan anew. The lock is not held. */
static ddl_status ddl__trainer_replan(ddl_trainer *t) {
    int64_t since = t->steps_tried - DDL__WARM_STEPS;
    bool first = since == 0, plans = ddl__trainer_plans(t);
    bool due = first || (since > 0 && t->config.replan_steps > 0 && since % t->config.replan_steps == 0);
    if ((!plans && t->adaptive == 0) || t->config.replan_steps < 0) {
        return DDL_OK;
    }
    if (t->trial.on) {
        return ddl__trial_step(t);
    }
    t->trial.latest_s[t->trial.latest++ % DDL__LATEST] = t->period_s;
    if (!due) {
        return DDL_OK;
    }
    if (t->adaptive > 0) {
        ddl_status adapted = ddl__figures_agree(t);
        adapted = adapted < 0 ? adapted : ddl__trainer_adapt(t);
        if (adapted < 0) {
            return ddl__trainer_install(t, adapted);
        }
    }
    if (!plans) {
        return DDL_OK;
    }
    if (first && t->config.schedule == DDL_SCHEDULE_AUTO) {
        return ddl__trial_begin(t);
    }
    ddl_status status = ddl__figures_agree(t);
    bool stale = false;
    if (status == DDL_OK && t->config.schedule == DDL_SCHEDULE_AUTO) {
        status = ddl__trial_is_stale(t, &stale);
    }
    return status == DDL_OK && stale ? ddl__trial_begin(t) : ddl__trainer_install(t, status);
}

#endif /* DDL_TRAIN_AUTO_H */

/* train, part of a step: when to plan anew, and schedule auto. The model of plan.h says which plans may be the best;
 * which is, a few steps with each say: what operations cost beside each other, and beside the program, no model knows.
 * All ranks change plans after the same steps, and choose by the same figures. */
#ifndef DDL_TRAIN_AUTO_H
#define DDL_TRAIN_AUTO_H

#include "adapt.h"

enum { DDL__TRIAL_STEPS = 4 }; /* with each plan; the first is not measured: it still has the end of the plan before */

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

/* A plan is worth steps when the model does not see it lose more than so much of a step to the best. */
#define DDL__TRIAL_RISK 0.3

/* A second look is for those whose steps were at most so many times as long as the best one's. */
#define DDL__TRIAL_CLOSE 1.05

/* The next plan that is worth it, from `way` on; DDL__WAYS: none. */
static int32_t ddl__trial_next(const ddl__trial *x, int32_t way) {
    while (way < DDL__WAYS && !x->worth[way]) {
        way++;
    }
    return way;
}

/* Asks the model about all plans. step_s: the same on all ranks. Without overlap_forward the order in which forward
 * needs parameters says nothing. */
static ddl_status ddl__trial_choose(ddl_trainer *t, double step_s) {
    ddl__trial *x = &t->trial;
    double late_s[DDL__WAYS], least = 1e9;
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
        x->worth[i] = late_s[i] <= least + DDL__TRIAL_RISK * step_s;
        x->step_s[i] = 1e9;
    }
    return DDL_OK;
}

static ddl_status ddl__trial_begin(ddl_trainer *t) {
    double step_s = t->period_s;
    ddl_status status = ddl__figures_agree(t);
    status = status < 0 ? status : ddl__figures_share(t, DDL_VIEW(&step_s, 1), DDL_MIN);
    status = status < 0 ? status : ddl__trial_choose(t, step_s);
    t->trial.on = true;
    t->trial.steps = t->trial.round = 0;
    t->trial.way = ddl__trial_next(&t->trial, 0);
    return ddl__trainer_install(t, status);
}

/* All have run: the shortest step, on the average of the ranks, decides; at first, who runs again. */
static ddl_status ddl__trial_end(ddl_trainer *t) {
    ddl__trial *x = &t->trial;
    int32_t best = 0, close = 0;
    ddl_status status = ddl__figures_share(t, DDL_ARRAY(x->step_s), DDL_AVG);
    for (int32_t i = 1; i < DDL__WAYS; i++) {
        best = x->step_s[i] < x->step_s[best] ? i : best;
    }
    for (int32_t i = 0; i < DDL__WAYS; i++) {
        x->worth[i] = x->step_s[i] <= DDL__TRIAL_CLOSE * x->step_s[best];
        close += x->worth[i];
    }
    x->steps = 0;
    if (x->round++ == 0 && close > 1) {
        x->way = ddl__trial_next(x, 0);
        return ddl__trainer_install(t, status);
    }
    status = status < 0 ? status : ddl__figures_agree(t);
    x->way = best;
    x->line = t->lines[0];
    status = ddl__trainer_install(t, status);
    x->on = false;
    return status;
}

/* After each step of a trial. */
static ddl_status ddl__trial_step(ddl_trainer *t) {
    ddl__trial *x = &t->trial;
    if (x->steps++ > 0) {
        x->step_s[x->way] = DDL__MIN(x->step_s[x->way], t->period_s);
    }
    if (x->steps < DDL__TRIAL_STEPS) {
        return DDL_OK;
    }
    int32_t next = ddl__trial_next(x, x->way + 1);
    if (next == DDL__WAYS) {
        return ddl__trial_end(t);
    }
    x->way = next;
    x->steps = 0;
    return ddl__trainer_install(t, DDL_OK);
}

/* Whether the link is another than when plans were tried. */
static bool ddl__trial_is_stale(const ddl_trainer *t) {
    const ddl__line *was = &t->trial.line, *is = &t->lines[0];
    double bytes = (double)(256 << 10), before = ddl__line_time(was, (int64_t)bytes),
           now = ddl__line_time(is, (int64_t)bytes);
    return now > 1.5 * before || now < before / 1.5;
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
    if (status == DDL_OK && t->config.schedule == DDL_SCHEDULE_AUTO && ddl__trial_is_stale(t)) {
        return ddl__trial_begin(t);
    }
    return ddl__trainer_install(t, status);
}

#endif /* DDL_TRAIN_AUTO_H */

/* train, sixth part: a step. Gradients become ready, averages arrive, parameters follow. */
#ifndef DDL_TRAIN_STEP_H
#define DDL_TRAIN_STEP_H

#include "auto.h"

/* Steps with averaged gradients, or with servers: all of BSP, SSP and ASP, the first ones of post-local SGD. */
static bool ddl__trainer_is_bsp(const ddl_trainer *t) {
    return t->config.sync != DDL_SYNC_LOCAL || t->stats.steps < t->config.local_after;
}

/* Time inside the trainer does not count as the program's. */
static ddl_status ddl__trainer_enter(ddl_trainer *t, const char *what) {
    DDL__TRY(ddl__trainer_ok(t, what, true));
    if (t->served.only) {
        ddl_status status =
            ddl__error(t->context, DDL_ERR_ARG,
                       "%s: rank %d only serves; ddl_trainer_serve and ddl_trainer_free are for it", what, t->rank);
        ddl__unlock(t->context);
        return status;
    }
    t->entered_ns = ddl__now_ns();
    return DDL_OK;
}

static ddl_status ddl__trainer_leave(ddl_trainer *t, ddl_status status) {
    t->inside_ns += ddl__now_ns() - t->entered_ns;
    ddl__unlock(t->context);
    return status;
}

/* >>ready */

/* overlap_forward: the last step is over when all of its updates have been taken. */
static ddl_status ddl__waited_check(ddl_trainer *t, const char *what) {
    for (int32_t i = 0; t->over && i < t->count; i++) {
        if (!t->weights[i].waited) {
            return ddl__error(t->context, DDL_ERR_STATE,
                              "%s in step %lld on rank %d: parameter \"%s\" has not been waited for "
                              "since the last ddl_step; with overlap_forward each forward calls ddl_param_wait for "
                              "each",
                              what, (long long)t->stats.steps + 1, t->rank, t->weights[i].name);
        }
    }
    return DDL_OK;
}

static ddl_status ddl__ready_check(ddl_trainer *t, int32_t index) {
    ddl_context *c = t->context;
    const char *what = "ddl_grad_ready";
    long long step = (long long)t->stats.steps + 1;
    if (index < DDL_ALL || index >= t->count) {
        return ddl__error(c, DDL_ERR_ARG, "%s: there is no tensor %d; rank %d has registered %d", what, index, t->rank,
                          t->count);
    }
    if (t->joined_out) {
        return ddl__error(c, DDL_ERR_STATE, "%s: rank %d has joined out; it makes no more steps", what, t->rank);
    }
    DDL__TRY(ddl__waited_check(t, what));
    for (int32_t i = DDL__MAX(index, 0); i < (index == DDL_ALL ? t->count : index + 1); i++) {
        if (t->weights[i].ready) {
            return ddl__error(c, DDL_ERR_STATE,
                              "%s: gradient \"%s\" was made ready twice in step %lld on rank %d; call "
                              "ddl_step between two backward passes",
                              what, t->weights[i].name, step, t->rank);
        }
    }
    return DDL_OK;
}

/* The first gradient of a step. contributes: of `uneven`. */
static void ddl__step_open(ddl_trainer *t, bool contributes) {
    t->step_open = true;
    t->compress_next = t->count - 1;
    t->grads_out = ddl__trainer_is_bsp(t);
    t->first_ready_ns = ddl__now_ns();
    for (int32_t i = 0; i < t->count; i++) {
        t->weights[i].skipped = false;
    }
    if (t->grads_out) {
        ddl__units_reset(t);
        t->flag[0] = contributes ? 1 : 0;
        if (t->config.uneven) {
            ddl__unit_release(t, t->unit_count - 1, t->unit_count - 1);
        }
    }
}

/* The gradient of a step lies in the arena. The lock is held. */
static void ddl__weight_take(ddl_trainer *t, ddl__weight *w) {
    t->taken_ns = ddl__now_ns();
    w->taken = true;
    w->bad = !t->config.unchecked && t->odds_told[w - t->weights] != 0;
    if (w->coded != NULL) {
        ddl__served_encode(t, w, ddl__served_mirror(t, w->wire, w->at));
    }
    double since_s = (double)(t->taken_ns - t->first_ready_ns) / 1e9;
    w->ready_s = t->steps_tried < DDL__WARM_STEPS ? since_s : w->ready_s + 0.25 * (since_s - w->ready_s);
    if (t->served.ps != NULL) {
        t->served.bad[ddl__served_number(t, (int32_t)(w - t->weights))] = w->bad;
    }
    if (t->grads_out) {
        ddl__unit_release(t, w->unit_first, w->unit_last);
    }
}

/* A device has come to the event behind a gradient's copy. */
static void ddl__weight_arrived(ddl_context *c, ddl__stage *mark, ddl_status status) {
    ddl__arrival *a = mark->owner;
    ddl_trainer *t = a->trainer;
    a->pending = false;
    t->arriving--;
    ddl__changed(c);
    if (status < 0) {
        ddl__trainer_break(t, ddl__error(c, status, "device %d failed to compute or to copy gradient \"%s\"",
                                         t->lane.device->number, t->weights[a->index].name));
    } else {
        ddl__weight_take(t, &t->weights[a->index]);
    }
}

/* The gradient goes its way when the lane has come here. The lock is held. */
static void ddl__weight_mark(ddl_trainer *t, ddl__weight *w) {
    if (w->arrival == NULL) {
        ddl__weight_take(t, w);
        return;
    }
    w->arrival->pending = true;
    t->arriving++;
    ddl_status status = ddl__lane_mark(&t->lane, w->arrival->mark);
    if (status < 0) {
        w->arrival->pending = false;
        t->arriving--;
        ddl__trainer_break(t, ddl__error(t->context, status, "device %d refused an event", t->lane.device->number));
    }
}

/* Hands a packed gradient to the thread that has the lock: on a busy link the progress thread has it for 0.1 ms at a
 * time, again and again, which backward would wait for. It takes the gradient when it runs the pumps; if it is about to
 * sleep, it is woken. Returns whether that was done; if not, this thread has the lock. */
static bool ddl__weight_hand(ddl_trainer *t, ddl__weight *w) {
    ddl_context *c = t->context;
    bool may = c->has_thread && c->wake_fd >= 0 && w->arrival == NULL && t->compress_group == NULL &&
               t->served.ps == NULL && t->micro + 1 == t->config.accumulate;
    if (!may) {
        ddl__lock(c);
        return false;
    }
    if (ddl__trylock(c)) {
        return false;
    }
    int before = atomic_load_explicit(&t->handed, memory_order_relaxed);
    do {
        w->handed = before;
    } while (!atomic_compare_exchange_weak_explicit(&t->handed, &before, (int)(w - t->weights) + 1,
                                                    memory_order_release, memory_order_relaxed));
    uint64_t one = 1;
    if (write(c->wake_fd, &one, sizeof one) < 0) {
        return true; /* full: it will wake anyway */
    }
    return true;
}

static void ddl__handed_take(ddl_trainer *t) {
    if (atomic_load_explicit(&t->handed, memory_order_relaxed) == 0) {
        return;
    }
    int32_t next = atomic_exchange_explicit(&t->handed, 0, memory_order_acquire);
    while (next > 0) {
        ddl__weight *w = &t->weights[next - 1];
        next = w->handed;
        ddl__weight_take(t, w);
    }
}

/* Returns whether another thread was told to go on with it. */
static bool ddl__ready_one(ddl_trainer *t, int32_t index) {
    ddl__weight *w = &t->weights[index];
    bool last = t->micro + 1 == t->config.accumulate;
    ddl__weight_pack(t, w);
    if (last && w->compressor != NULL) {
        ddl__compression_early(t, w);
    }
    w->ready = true;
    t->ready_count++;
    if (ddl__weight_hand(t, w)) {
        return true;
    }
    t->asked_ns = ddl__now_ns();
    if (last) {
        ddl__weight_mark(t, w);
    }
    ddl__trainer_pump(t->context, t);
    ddl__unlock(t->context);
    return false;
}

/* Whether a gradient may come, and its step is open: only the program's calls change what says so. Needs no lock. */
static bool ddl__ready_may_come(const ddl_trainer *t, int32_t index) {
    return t != NULL && t->magic == DDL__TRAINER_MAGIC && !ddl__is_forked(t->context) && !t->context->finalized &&
           t->started && !t->served.only && t->step_open && !t->over && !t->joined_out && index >= 0 &&
           index < t->count && !t->weights[index].ready;
}

/* Makes sure of the same, with a sentence when it is not so. */
static ddl_status ddl__ready_enter(ddl_trainer *t, int32_t index) {
    if (ddl__ready_may_come(t, index)) {
        t->entered_ns = ddl__now_ns();
        return DDL_OK;
    }
    DDL__TRY(ddl__trainer_enter(t, "ddl_grad_ready"));
    ddl_status status = ddl__ready_check(t, index);
    if (status < 0) {
        return ddl__trainer_leave(t, status);
    }
    if (!t->step_open) {
        ddl__step_open(t, true);
    }
    ddl__unlock(t->context);
    return DDL_OK;
}

static ddl_status ddl__grad_ready(ddl_trainer *t, int32_t index) {
    DDL__TRY(ddl__ready_enter(t, index));
    ddl_status status = DDL_OK;
    ddl__lane_after(&t->lane);
    bool handed = false;
    for (int32_t i = index == DDL_ALL ? t->count - 1 : index; i >= DDL__MAX(index, 0); i--) {
        handed = ddl__ready_one(t, i);
        if (t->compress_group != NULL && t->micro + 1 == t->config.accumulate) {
            ddl__compression_start(t, false); /* an error stays in t->status */
        }
    }
    if (handed) { /* what has failed meanwhile, ddl_step says */
        t->inside_ns += ddl__now_ns() - t->entered_ns;
        return DDL_OK;
    }
    status = ddl__lane_hand(&t->lane, "ddl_grad_ready");
    ddl__lock(t->context);
    if (status < 0) {
        ddl__trainer_break(t, status);
    }
    ddl__glance(t->group); /* without a progress thread the wire moves here, between two layers */
    ddl__trainer_pump(t->context, t);
    return ddl__trainer_leave(t, t->status < 0 ? ddl__trainer_broken(t, "ddl_grad_ready") : DDL_OK);
}

DDL_API ddl_status ddl_grad_ready(ddl_trainer *trainer, int32_t index) {
    DDL__TRY(ddl__trainer_hold(trainer, "ddl_grad_ready"));
    return ddl__trainer_let_go(trainer, ddl__grad_ready(trainer, index));
}

/* >>figures */

/* A step is over: its figures, and a clean table. took: an update was made. */
static void ddl__step_close(ddl_trainer *t, bool took) {
    uint64_t now = ddl__now_ns(), inside = t->inside_ns + (now - t->entered_ns), whole = now - t->last_end_ns;
    ddl_trainer_stats *s = &t->stats;
    s->steps += took;
    s->compute_s = (double)(whole - DDL__MIN(whole, inside)) / 1e9;
    s->exposed_s = (double)t->exposed_ns / 1e9;
    s->hidden_s = (double)(t->busy_ns - DDL__MIN(t->busy_ns, t->exposed_ns)) / 1e9;
    s->bytes = t->started_bytes;
    s->operations = t->started_units;
    t->period_s = (double)whole / 1e9;
    t->steps_tried++;
    t->coded++;
    t->last_end_ns = t->entered_ns = now;
    t->inside_ns = t->exposed_ns = t->busy_ns = 0;
    t->started_bytes = t->started_units = 0;
    t->micro = t->ready_count = 0;
    t->step_open = false;
    for (int32_t i = 0; i < t->count; i++) {
        t->weights[i].ready = t->weights[i].taken = t->weights[i].bad = false;
    }
}

/* >>averages */

/* A sum over all ranks, the same on each. The lock is held, and given up while it waits. */
static ddl_status ddl__trainer_number(ddl_trainer *t, double *value, ddl_op op) {
    ddl__unlock(t->context);
    ddl_status status = ddl_all_reduce_scalar(t->group, value, op);
    ddl__lock(t->context);
    return status;
}

/* Which tensor is not finite on which rank: the first by registration, then by rank. */
static ddl_status ddl__step_not_finite(ddl_trainer *t) {
    double first = 1e18; /* whole numbers below 2^53 are exact */
    for (int32_t i = t->count - 1; i >= 0; i--) {
        first = t->weights[i].bad ? (double)i * t->size + t->rank : first;
    }
    DDL__TRY(ddl__trainer_number(t, &first, DDL_MIN));
    long long step = (long long)t->stats.steps + 1;
    t->stats.not_finite++;
    ddl__step_close(t, false);
    if (first >= 1e18) {
        return ddl__error(t->context, DDL_ERR_ARG,
                          "ddl_step: an average of step %lld is not finite, though each rank's "
                          "gradients are: they are too large to be added; no parameter has changed",
                          step);
    }
    return ddl__error(t->context, DDL_ERR_ARG,
                      "ddl_step: gradient \"%s\" of step %lld is not finite on rank %d; on no "
                      "rank has a parameter changed, and the step is over",
                      t->weights[(int64_t)first / t->size].name, step, (int)((int64_t)first % t->size));
}

/* Random-k may not send what is not finite: only its rank knows, and tells the others. Of other codes the average shows
 * it. */
static ddl_status ddl__step_hidden(ddl_trainer *t, bool *finite) {
    bool hides = false;
    double bad = 0;
    for (int32_t i = 0; i < t->count; i++) {
        const ddl__weight *w = &t->weights[i];
        bool random = w->compressor != NULL && w->compressor->config.kind == DDL_COMPRESS_RANDOM_K;
        hides = hides || random;
        bad = random && w->bad ? 1 : bad;
    }
    if (hides && !t->config.unchecked) {
        DDL__TRY(ddl__trainer_number(t, &bad, DDL_MAX));
        *finite = *finite && bad == 0;
    }
    return DDL_OK;
}

/* Norm of all averaged gradients, on all ranks from the same bits; checks and clips. */
static ddl_status ddl__step_norm(ddl_trainer *t, bool *out_finite) {
    double sum = 0;
    *out_finite = true;
    if (t->config.clip_norm <= 0 && t->config.unchecked) {
        return DDL_OK;
    }
    ddl__unlock(t->context);
    for (int32_t i = 0; i < t->count; i++) {
        const ddl__weight *w = &t->weights[i];
        ddl__lane_squares(&t->lane, ddl__weight_own(t, w), w->wire, w->own_count, i);
    }
    ddl_status told = ddl__lane_tell(&t->lane, t->count, "ddl_step");
    ddl__lock(t->context);
    DDL__TRY(told);
    for (int32_t i = 0; i < t->count; i++) {
        sum += t->lane.told[i];
    }
    if (t->config.shard) {
        DDL__TRY(ddl__trainer_number(t, &sum, DDL_SUM));
    }
    *out_finite = sum - sum == 0;
    DDL__TRY(ddl__step_hidden(t, out_finite));
    t->stats.norm = *out_finite ? ddl__sqrt(sum) : sum;
    if (*out_finite && t->config.clip_norm > 0 && t->stats.norm > t->config.clip_norm) {
        for (int32_t i = 0; i < t->count; i++) {
            const ddl__weight *w = &t->weights[i];
            double factor = t->config.clip_norm / t->stats.norm;
            ddl__lane_scale(&t->lane, ddl__weight_own(t, w), w->own_count, w->wire, factor);
        }
    }
    return DDL_OK;
}

/* Sums of ranks that may have contributed nothing become averages. */
static void ddl__step_divide(ddl_trainer *t) {
    for (int32_t i = 0; i < t->count && t->config.uneven; i++) {
        const ddl__weight *w = &t->weights[i];
        ddl__lane_average(&t->lane, ddl__weight_own(t, w), w->own_count, w->wire, t->stats.contributors);
    }
}

/* Waits for the flag of `uneven`. */
static ddl_status ddl__step_contributors(ddl_trainer *t, const char *what) {
    t->stats.contributors = t->size;
    if (t->config.uneven) {
        DDL__TRY(ddl__trainer_await(t, what, t->unit_count - 1, t->unit_count - 1));
        t->stats.contributors = (int32_t)t->flag[0];
    }
    return DDL_OK;
}

/* >>updates */

/* The program's own step, with the averages in its gradients. The lock is given up. */
static ddl_status ddl__step_own(ddl_trainer *t) {
    ddl__unlock(t->context);
    for (int32_t i = 0; i < t->count; i++) {
        ddl__weight_unpack(t, &t->weights[i]);
    }
    ddl_status status = ddl__lane_hand(&t->lane, "ddl_step");
    int result = status < 0 ? 0 : t->config.step(t->config.step_user, t);
    ddl__lane_after(&t->lane); /* what it has put on the program's stream */
    ddl__lock(t->context);
    return status < 0 ? status
           : result == 0 ? DDL_OK
                       : ddl__error(t->context, DDL_ERR_STATE,
                                    "ddl_step: the program's own step returned %d in step %lld "
                                    "on rank %d",
                                    result, (long long)t->stats.steps + 1, t->rank);
}

static ddl_status ddl__step_update(ddl_trainer *t) {
    if (t->config.step != NULL) {
        return ddl__step_own(t);
    }
    ddl__unlock(t->context);
    ddl_status status = DDL_OK;
    if (!ddl__lane_is_host(&t->lane)) {
        status = ddl__weights_update(t, 0, t->count - 1);
    }
    for (int32_t i = t->count - 1; i >= 0 && ddl__lane_is_host(&t->lane); i--) {
        ddl__weights_update(t, i, i); /* one by one, as they lie in the caches */
    }
    ddl__lock(t->context);
    return status;
}

/* Each rank has stepped on its shard: parameters set off in the arenas, where gradients were. */
static ddl_status ddl__shards_send(ddl_trainer *t, const char *what) {
    ddl__unlock(t->context);
    for (int32_t i = 0; i < t->count; i++) {
        const ddl__weight *w = &t->weights[i];
        const char *own = (const char *)w->param.data + (size_t)w->own_begin * ddl_dtype_bytes(w->param.dtype);
        ddl__lane_convert(&t->lane, ddl__weight_own(t, w), w->wire, own, w->param.dtype, w->own_count);
    }
    ddl_status status = ddl__lane_wait(&t->lane, what);
    ddl__lock(t->context);
    DDL__TRY(status);
    ddl__unit_release(t, t->piece_count, 2 * t->piece_count - 1);
    ddl__trainer_pump(t->context, t);
    return t->status < 0 ? ddl__trainer_broken(t, what) : DDL_OK;
}

/* The whole of a parameter, when the other ranks' shards of it are there. The lock is given up. */
static ddl_status ddl__shards_take(ddl_trainer *t, const char *what, const ddl__weight *w) {
    if (w->unit_first > w->unit_last) { /* nothing carries it: it has no elements */
        return DDL_OK;
    }
    DDL__TRY(ddl__trainer_await(t, what, t->piece_count + w->unit_first, t->piece_count + w->unit_last));
    ddl__unlock(t->context);
    ddl__lane_convert(&t->lane, w->param.data, w->param.dtype, ddl__weight_wire(t, w), w->wire, w->count);
    ddl__lock(t->context);
    return DDL_OK;
}

/* Averages that come one after the other are used one after the other, where nothing needs all of them first. */
static ddl_status ddl__step_as_it_comes(ddl_trainer *t, const char *what) {
    for (int32_t i = t->count - 1; i >= 0; i--) {
        ddl__weight *w = &t->weights[i];
        DDL__TRY(ddl__trainer_await(t, what, w->unit_first, w->unit_last));
        ddl__unlock(t->context);
        ddl__weight_arrive(t, w);
        ddl_status status = ddl__weights_update(t, i, i);
        ddl__lock(t->context);
        DDL__TRY(status);
    }
    return DDL_OK;
}

/* Servers have made the step: parameters come from them. One whose gradient was not finite stays as it was. */
static ddl_status ddl__step_served(ddl_trainer *t, const char *what) {
    DDL__TRY(ddl__step_as_it_comes(t, what));
    DDL__TRY(ddl__served_clock(t));
    int32_t first = t->count;
    for (int32_t i = t->count - 1; i >= 0; i--) {
        first = t->weights[i].skipped ? i : first;
    }
    bool mine = first < t->count && t->weights[first].bad;
    t->stats.contributors = t->size;
    t->stats.not_finite += first < t->count;
    ddl__step_close(t, true);
    return first == t->count
               ? DDL_OK
               : ddl__error(t->context, DDL_ERR_ARG,
                            "ddl_step: gradient \"%s\" of step %lld is not finite%s; servers have left this parameter "
                            "as it was, others of the step have changed",
                            t->weights[first].name, (long long)t->stats.steps,
                            mine ? "" : " on another rank, or as an average");
}

/* overlap_forward: updates are taken when forward asks for them. */
static void ddl__step_hand_over(ddl_trainer *t) {
    t->over = true;
    t->over_bad = false;
    t->waited_count = 0;
    for (int32_t i = 0; i < t->count; i++) {
        t->weights[i].waited = false;
    }
}

/* The second half of a step of BSP: all gradients of this rank are on their way. */
static ddl_status ddl__step_bsp(ddl_trainer *t, const char *what) {
    const ddl_trainer_config *o = &t->config;
    bool finite;
    if (ddl__trainer_hands_over(t)) {
        return ddl__step_served(t, what);
    }
    if (o->unchecked && o->clip_norm <= 0 && t->compress_group == NULL && !o->shard && !o->uneven && o->step == NULL) {
        DDL__TRY(ddl__step_contributors(t, what));
        DDL__TRY(ddl__step_as_it_comes(t, what));
        ddl_status status = ddl__served_clock(t);
        if (status < 0) { /* parameters have changed: the same step must not be made again */
            ddl__trainer_break(t, status);
            return status;
        }
        ddl__step_close(t, true);
        return DDL_OK;
    }
    DDL__TRY(ddl__step_contributors(t, what));
    DDL__TRY(ddl__trainer_await(t, what, 0, t->piece_count - 1));
    DDL__TRY(ddl__served_clock(t));
    for (int32_t i = 0; i < t->count; i++) {
        ddl__weight_arrive(t, &t->weights[i]);
    }
    if (t->compress_group != NULL) {
        ddl__unlock(t->context);
        ddl_status status = ddl__compression_finish(t);
        ddl__lock(t->context);
        DDL__TRY(status);
    }
    if (t->stats.contributors == 0) { /* all have joined out: these were zeros */
        ddl__step_close(t, false);
        return DDL_OK;
    }
    ddl__step_divide(t);
    DDL__TRY(ddl__step_norm(t, &finite));
    if (!finite && !o->unchecked) {
        ddl__unlock(t->context);
        ddl__compression_undo(t);
        ddl__lock(t->context);
        return ddl__step_not_finite(t);
    }
    ddl_status outcome = ddl__step_update(t);
    if (outcome == DDL_OK && o->shard) {
        DDL__TRY(ddl__shards_send(t, what));
    }
    if (outcome == DDL_OK && o->overlap_forward) { /* shards: forward waits for what travels */
        ddl__step_hand_over(t);
        return DDL_OK;
    }
    for (int32_t i = t->count - 1; i >= 0 && outcome == DDL_OK && o->shard; i--) {
        DDL__TRY(ddl__shards_take(t, what, &t->weights[i]));
    }
    ddl__step_close(t, outcome == DDL_OK);
    return outcome;
}

/* Engine of local SGD: src/train/local.h. */
static ddl_status ddl__step_local(ddl_trainer *t, const char *what);

/* >>step */

/* What is for between two steps is called within one. */
static ddl_status ddl__step_under_way(const ddl_trainer *t, const char *what) {
    return ddl__error(t->context, DDL_ERR_STATE,
                      "%s: a step is under way on rank %d; call it after the ddl_step that ends it (of "
                      "`accumulate` the last) and before the next ddl_grad_ready",
                      what, t->rank);
}

/* What the program has forgotten. */
static ddl_status ddl__step_check(ddl_trainer *t) {
    ddl_context *c = t->context;
    if (t->joined_out) {
        return ddl__error(c, DDL_ERR_STATE, "ddl_step: rank %d has joined out; it makes no more steps", t->rank);
    }
    DDL__TRY(ddl__waited_check(t, "ddl_step"));
    for (int32_t i = 0; t->ready_count < t->count && i < t->count; i++) {
        if (!t->weights[i].ready) {
            return ddl__error(c, DDL_ERR_STATE,
                              "ddl_step: gradient \"%s\" was not made ready in step %lld on rank %d; "
                              "call ddl_grad_ready for each tensor (one that is not used has a gradient of zeros)",
                              t->weights[i].name, (long long)t->stats.steps + 1, t->rank);
        }
    }
    return DDL_OK;
}

/* The next call of the loop adds to the same gradients. */
static void ddl__step_again(ddl_trainer *t) {
    t->micro++;
    t->ready_count = 0;
    for (int32_t i = 0; i < t->count; i++) {
        t->weights[i].ready = false;
    }
}

static bool ddl__arrivals_over(ddl_context *c, void *arg) {
    const ddl_trainer *t = ((ddl__unit_wait *)arg)->t;
    return t->arriving == 0 || t->status < 0 || c->aborted || c->finalized;
}

/* Waits until all gradients that were made ready lie in the arena; what is coded on a device goes out as it comes. */
static ddl_status ddl__arrivals_await(ddl_trainer *t, const char *what) {
    ddl_context *c = t->context;
    if (t->compress_group != NULL) {
        ddl__unlock(c);
        ddl__compression_start(t, true); /* an error stays in t->status */
        ddl__lock(c);
    }
    ddl__unit_wait at = {t, 0, 0};
    ddl__arrivals_pass(t, ddl__arrivals_over, &at);
    return t->status < 0 ? ddl__trainer_broken(t, what)
           : t->arriving > 0
               ? ddl__error(c, DDL_ERR_STATE, "%s: the context ended while device %d computed gradients", what,
                            t->lane.device->number)
               : DDL_OK;
}

/* *out_whole: a step of BSP was made, after which all ranks may plan anew. */
static ddl_status ddl__step_take(ddl_trainer *t, bool *out_whole) {
    *out_whole = false;
    ddl__trainer_pump(t->context, t); /* takes what was handed over */
    DDL__TRY(ddl__step_check(t));
    if (t->micro + 1 < t->config.accumulate) {
        ddl__step_again(t);
        return DDL_OK;
    }
    if (t->count == 0) {
        ddl__step_close(t, true);
        return DDL_OK;
    }
    if (t->grads_out && t->config.overlap_forward && !t->config.shard) {
        ddl__step_hand_over(t);
        return DDL_OK;
    }
    DDL__TRY(ddl__arrivals_await(t, "ddl_step"));
    *out_whole = t->grads_out && !t->config.overlap_forward;
    return t->grads_out ? ddl__step_bsp(t, "ddl_step") : ddl__step_local(t, "ddl_step");
}

/* What the trainer has done to parameters comes before what the program does next. The lock is held, and given up. */
static ddl_status ddl__trainer_hand(ddl_trainer *t, const char *what, ddl_status status) {
    if (!ddl__lane_is_host(&t->lane) && t->status >= 0 && !t->context->finalized) {
        ddl__unlock(t->context);
        ddl_status handed = ddl__lane_hand(&t->lane, what);
        ddl__lock(t->context);
        if (handed < 0) {
            ddl__trainer_break(t, handed);
        }
        status = handed < 0 ? handed : status;
    }
    return status;
}

static ddl_status ddl__trainer_step(ddl_trainer *t) {
    DDL__TRY(ddl__trainer_enter(t, "ddl_step"));
    bool whole;
    ddl_status status = ddl__trainer_hand(t, "ddl_step", ddl__step_take(t, &whole));
    if (status == DDL_ERR_NOMEM) {
        ddl__trainer_break(t, status);
    }
    ddl__trainer_leave(t, status);
    return status == DDL_OK && whole ? ddl__trainer_replan(t) : status;
}

DDL_API ddl_status ddl_step(ddl_trainer *trainer) {
    DDL__TRY(ddl__trainer_hold(trainer, "ddl_step"));
    return ddl__trainer_let_go(trainer, ddl__trainer_step(trainer));
}

/* An average that is not finite: the same on all ranks, which all pass it over, for it is the same bits. */
static ddl_status ddl__param_not_finite(ddl_trainer *t, const ddl__weight *w) {
    t->stats.not_finite += !t->over_bad;
    t->over_bad = true;
    return ddl__error(t->context, DDL_ERR_ARG,
                      "ddl_param_wait: the average of gradient \"%s\" of step %lld is not finite (the gradient of rank "
                      "%d %s); on no rank has this parameter changed, others of the step have",
                      w->name, (long long)t->stats.steps + 1, t->rank, w->bad ? "is not" : "is");
}

/* Whether all of an average is finite. The lock is not held. */
static ddl_status ddl__weight_look(ddl_trainer *t, const ddl__weight *w, bool *out_finite) {
    char *wire = ddl__weight_wire(t, w);
    uint64_t *odd = &t->odds[w - t->weights], *told = &t->odds_told[w - t->weights];
    if (ddl__lane_is_host(&t->lane)) {
        *out_finite = !ddl__not_finite(wire, w->count, w->wire);
        return DDL_OK;
    }
    ddl__lane_zero(&t->lane, odd, sizeof *odd);
    ddl__lane_gather(&t->lane, wire, w->wire, wire, w->wire, w->count, false, odd);
    ddl__lane_copy(&t->lane, told, odd, sizeof *odd);
    DDL__TRY(ddl__lane_wait(&t->lane, "ddl_param_wait"));
    *out_finite = *told == 0;
    return DDL_OK;
}

/* Takes the update of one parameter, when its average is there. */
static ddl_status ddl__param_take(ddl_trainer *t, ddl__weight *w) {
    if (w->waited) {
        return DDL_OK;
    }
    if (t->config.shard) { /* ddl_step has made the update */
        DDL__TRY(ddl__shards_take(t, "ddl_param_wait", w));
        w->waited = true;
        t->waited_count++;
        return DDL_OK;
    }
    DDL__TRY(ddl__trainer_await(t, "ddl_param_wait", w->unit_first, w->unit_last));
    ddl__unlock(t->context);
    ddl__weight_arrive(t, w);
    bool finite = !w->skipped;
    ddl_status status = ddl__trainer_hands_over(t) || t->config.unchecked ? DDL_OK : ddl__weight_look(t, w, &finite);
    if (finite && status >= 0) {
        status = ddl__weights_update(t, (int32_t)(w - t->weights), (int32_t)(w - t->weights));
    }
    ddl__lock(t->context);
    if (status < 0) {
        ddl__trainer_break(t, status);
        return status;
    }
    w->waited = true;
    t->waited_count++;
    return finite ? DDL_OK : ddl__param_not_finite(t, w);
}

/* Takes those from first to last. One that is not finite does not keep the others waiting; its status comes back. */
static ddl_status ddl__params_take(ddl_trainer *t, int32_t first, int32_t last) {
    ddl_status outcome = DDL_OK;
    for (int32_t i = first; i <= last; i++) {
        bool waited = t->weights[i].waited;
        ddl_status status = ddl__param_take(t, &t->weights[i]);
        if (status < 0 && waited == t->weights[i].waited) {
            return status; /* the operation failed */
        }
        outcome = status < 0 ? status : outcome;
    }
    return outcome;
}

static ddl_status ddl__param_wait(ddl_trainer *t, int32_t index) {
    DDL__TRY(ddl__trainer_enter(t, "ddl_param_wait"));
    ddl_status status = DDL_OK;
    if (index < DDL_ALL || index >= t->count) {
        status = ddl__error(t->context, DDL_ERR_ARG, "ddl_param_wait: there is no tensor %d; rank %d has registered %d",
                            index, t->rank, t->count);
    }
    bool was_over = t->over && status == DDL_OK;
    if (was_over) {
        status = ddl__params_take(t, DDL__MAX(index, 0), index == DDL_ALL ? t->count - 1 : index);
    }
    status = was_over ? ddl__trainer_hand(t, "ddl_param_wait", status) : status;
    bool last = was_over && t->waited_count == t->count;
    if (last) {
        ddl_status clocked = ddl__served_clock(t);
        status = clocked < 0 ? clocked : status;
    }
    if (status == DDL_ERR_NOMEM) {
        ddl__trainer_break(t, status);
    }
    if (last) {
        t->over = false;
        t->stats.contributors = t->size;
        ddl__step_close(t, true);
    }
    ddl__trainer_leave(t, status);
    if (!last) {
        return status;
    }
    ddl_status planned = ddl__trainer_replan(t);
    return status < 0 ? status : planned;
}

DDL_API ddl_status ddl_param_wait(ddl_trainer *trainer, int32_t index) {
    DDL__TRY(ddl__trainer_hold(trainer, "ddl_param_wait"));
    return ddl__trainer_let_go(trainer, ddl__param_wait(trainer, index));
}

/* >>figures for the program */

DDL_API ddl_status ddl_trainer_stats_get(const ddl_trainer *trainer, ddl_trainer_stats *out_stats) {
    DDL__TRY(ddl__trainer_ok(trainer, "ddl_trainer_stats_get", false));
    ddl_context *c = trainer->context;
    ddl_status status =
        out_stats != NULL ? DDL_OK : ddl__error(c, DDL_ERR_ARG, "ddl_trainer_stats_get: out_stats is NULL");
    if (status == DDL_OK) {
        *out_stats = trainer->stats;
        out_stats->latency_s = trainer->lines[0].latency_s;
        out_stats->seconds_per_byte = trainer->lines[0].seconds_per_byte;
        out_stats->local_steps = trainer->since_sync;
    }
    ddl__unlock(c);
    return status;
}

static void ddl__trainer_tell_sync(const ddl_trainer *t, ddl__text *text) {
    const ddl_trainer_config *o = &t->config;
    if (t->served.ps != NULL) {
        static const char *const names[] = {"BSP", "", "SSP", "ASP"};
        ddl__text_add(text, "%s", names[o->sync]);
        if (o->sync == DDL_SYNC_SSP) {
            const ddl_sync_config *s = &t->served.ps->sync;
            ddl__text_add(text, " with a staleness of %d", s->staleness);
            if (s->staleness_max > s->staleness) {
                ddl__text_add(text, " to %d", s->staleness_max);
            }
        }
        ddl__text_add(text, t->config.architecture == DDL_ARCHITECTURE_AUTO ? " over all-reduce and" : " over");
        ddl__text_add(text, " %d %s server%s%s", o->servers, o->dedicated ? "dedicated" : "colocated",
                      o->servers == 1 ? "" : "s",
                      !t->served.sums     ? ""
                      : o->servers == 1 ? " that averages"
                                        : " that average");
    } else if (o->sync == DDL_SYNC_BSP) {
        ddl__text_add(text, "BSP over all-reduce%s", o->shard ? " in shards (ZeRO-1)" : "");
    } else {
        ddl__text_add(text, "local SGD, averaged every %d steps", o->local_steps);
        if (o->local_after > 0) {
            ddl__text_add(text, " after %lld steps of BSP", (long long)o->local_after);
        }
        if (o->outer_rate != 0) {
            ddl__text_add(text, ", outer Nesterov with rate %g and momentum %g", o->outer_rate, o->outer_momentum);
        }
    }
    ddl__text_add(text, " on %d rank%s", t->size, t->size == 1 ? "" : "s");
}

/* What adaptive compression has chosen. */
static void ddl__trainer_tell_codes(const ddl_trainer *t, ddl__text *text) {
    const char *before = " (";
    for (int32_t o = 0; o < DDL__OFFERS && t->adaptive > 0; o++) {
        ddl_compression_kind kind = ddl__compress_offer(o).kind;
        int32_t tensors = 0;
        for (int32_t i = 0; i < t->count; i++) {
            const ddl__compressor *c = t->weights[i].compressor;
            tensors += c != NULL && c->adaptive && (c->dense ? DDL_COMPRESS_NONE : c->config.kind) == kind;
        }
        if (tensors > 0) {
            ddl__text_add(text, "%s%d %s", before, tensors, o == 0 ? "as they are" : ddl__compress_name(kind));
            before = ", ";
        }
    }
    ddl__text_add(text, "%s", t->adaptive > 0 ? ")" : "");
}

DDL_API size_t ddl_trainer_describe(const ddl_trainer *trainer, char *out_text, size_t bytes) {
    const ddl_trainer *t = trainer;
    bytes = out_text != NULL ? bytes : 0;
    if (ddl__trainer_ok(t, "ddl_trainer_describe", true) < 0) {
        if (bytes > 0) {
            out_text[0] = '\0';
        }
        return 0;
    }
    ddl__text text = {out_text, bytes, 0};
    const ddl_trainer_stats *s = &t->stats;
    static const char *const schedules[] = {"auto", "none", "wait-free", "fused", "MG-WFBP", "priority"};
    const char *asked = schedules[t->config.schedule];
    ddl__trainer_tell_sync(t, &text);
    ddl__text_add(&text, ", schedule %s", asked);
    if (strcmp(asked, t->plan_name) != 0) {
        ddl__text_add(&text, " (%s)", t->plan_name);
    }
    ddl__text_add(&text, ": %d tensors in %d operation%s", t->count, t->piece_count, t->piece_count == 1 ? "" : "s");
    int32_t compressed = 0, served = 0;
    for (int32_t i = 0; i < t->count; i++) {
        compressed += t->weights[i].options.compression.kind != DDL_COMPRESS_NONE;
        served += t->weights[i].served;
    }
    if (compressed > 0) {
        ddl__text_add(&text, ", %d of them compressed", compressed);
        ddl__trainer_tell_codes(t, &text);
    }
    if (t->config.architecture == DDL_ARCHITECTURE_AUTO) {
        ddl__text_add(&text, ", %d of them over servers", served);
    }
    double total_s = s->exposed_s + s->hidden_s;
    if (s->steps > 0 && total_s > 0) {
        ddl__text_add(&text, "; the last step communicated for %.2f ms, %.0f %% of it hidden", total_s * 1e3,
                      100 * s->hidden_s / total_s);
    }
    ddl__unlock(t->context);
    return text.used + 1;
}

#endif /* DDL_TRAIN_STEP_H */

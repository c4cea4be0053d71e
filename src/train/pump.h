/* train, third part: units of communication. They are started in the plan's order, whatever the order in which
 * gradients become ready: that is the same on all ranks. Whoever polls the context starts what has become possible. */
#ifndef DDL_TRAIN_PUMP_H
#define DDL_TRAIN_PUMP_H

#include "served.h"

/* This rank has no memory for what the others wait for: they are told, as else they would wait until the deadline.
 * The groups are the trainer's own. Where one is broken, the others get its sentence, which names the rank that began.
 * In SSP and ASP the others need this worker no longer than until it frees its trainer. Error sentences of calls go
 * before; the lock is held. */
static void ddl__trainer_tell(ddl_trainer *t, ddl_status status) {
    ddl_group *servers = t->served.ps != NULL && !t->served.alone ? t->served.ps->group : NULL;
    ddl_group *groups[3] = {t->group, t->compress_group, servers};
    char text[DDL__SENTENCE_BYTES];
    if (status != DDL_ERR_NOMEM || t->context->finalized) {
        return;
    }
    snprintf(text, sizeof text, "rank %d of the trainer cannot go on for want of memory: %.400s", t->rank,
             t->context->error.text);
    for (int32_t i = 0; i < 3; i++) {
        if (groups[i] != NULL && groups[i]->broken == status) {
            snprintf(text, sizeof text, "%s", groups[i]->broken_text);
        }
    }
    for (int32_t i = 0; i < 3; i++) {
        if (groups[i] != NULL && groups[i]->broken == DDL_OK) {
            ddl__break_everywhere(t->context, groups[i], status, "%s", text);
        }
    }
}

static void ddl__trainer_break(ddl_trainer *t, ddl_status status) {
    if (t->status >= 0) {
        t->status = status;
        snprintf(t->why, sizeof t->why, "%.*s", (int)sizeof t->why - 1, t->context->error.text);
        ddl__trainer_tell(t, status);
    }
}

/* What the caller of `what` gets after a break. */
static ddl_status ddl__trainer_broken(ddl_trainer *t, const char *what) {
    return ddl__error(t->context, t->status, "%s in step %lld: %s", what, (long long)t->stats.steps + 1, t->why);
}

static void ddl__unit_begin(ddl_context *c, ddl_trainer *t, ddl__unit *u) {
    u->begin_ns = ddl__now_ns();
    ddl_status status = u->served ? ddl__served_begin(t, u) : ddl__persistent_start(c, u->request);
    if (status < 0) {
        ddl__trainer_break(t, status);
        return;
    }
    u->state = DDL__UNIT_STARTED;
    t->busy_since = t->out_count == 0 ? u->begin_ns : t->busy_since;
    t->out_count++;
    t->out_bytes += u->bytes;
    t->started_units++;
    t->started_bytes += u->served ? ddl__served_bytes(t, u) : u->bytes;
    t->next++;
}

static void ddl__unit_trace(const ddl_trainer *t, const ddl__unit *u) {
    ddl__trace_event *e = ddl__trace_next(t->context->trace);
    *e = (ddl__trace_event){.start_ns = u->begin_ns,
                            .end_ns = ddl__now_ns(),
                            .bytes = u->bytes,
                            .algorithm = t->plan_name,
                            .sequence = (uint32_t)(u - t->units),
                            .peer = u->tensors,
                            .what = DDL__TRACE_BUCKET,
                            .kind = u->served ? 0 : (uint8_t)u->kind};
    memcpy(e->name, u->label, sizeof e->name);
}

static void ddl__unit_end(ddl_trainer *t, ddl__unit *u) {
    if (u->served) {
        ddl__served_note(t, u);
    }
    ddl_status status = ddl__request_report(&u->request, NULL);
    u->state = DDL__UNIT_DONE;
    if (u->bytes > 0 && t->context->trace != NULL) {
        ddl__unit_trace(t, u);
    }
    t->out_bytes -= u->bytes;
    uint64_t now = ddl__now_ns(), since = DDL__MAX(u->begin_ns, t->last_unit_ns);
    if (--t->out_count == 0) {
        t->busy_ns += now - t->busy_since;
    }
    if (u->dtype != DDL_DTYPE_NONE) { /* what it added to those that were under way before it */
        ddl__fit_add(&t->fits[ddl__served_way(t, u->served)], u->bytes, (double)(now - since) / 1e9);
        t->last_unit_ns = now;
    }
    if (status < 0) {
        ddl__trainer_break(t, status);
    }
}

/* Ends units whose request is done, and starts those whose turn has come. Returns whether anything ended. */
static bool ddl__trainer_advance(ddl_context *c, ddl_trainer *t) {
    bool ended = false;
    for (int32_t k = t->head; k < t->next; k++) {
        ddl__unit *u = &t->units[t->order[k]];
        if (u->state == DDL__UNIT_STARTED && u->request->state == DDL__REQUEST_DONE) {
            ddl__unit_end(t, u);
            ended = true;
        }
        t->head += k == t->head && u->state == DDL__UNIT_DONE;
    }
    while (t->status >= 0 && t->next < t->unit_count) {
        ddl__unit *u = &t->units[t->order[t->next]];
        bool credit = t->out_bytes < t->credit_bytes || t->out_count == 0; /* one piece may overdraw it */
        if (u->missing > 0 || !credit) {
            break;
        }
        ddl__unit_begin(c, t, u);
    }
    return ended;
}

/* Takes the gradients that were handed over: src/train/step.h. */
static void ddl__handed_take(ddl_trainer *t);

static void ddl__trainer_pump(ddl_context *c, ddl_trainer *t) {
    if (t->pumping || t->status < 0 || c->finalized) {
        return;
    }
    ddl__handed_take(t);
    if (t->head == t->unit_count) {
        return;
    }
    t->pumping = true;
    while (ddl__trainer_advance(c, t)) { /* an end gives credit to the next, which may end at once */
    }
    t->pumping = false;
}

static void ddl__trainer_run(ddl_context *c, ddl__pump *pump) { ddl__trainer_pump(c, (ddl_trainer *)(void *)pump); }

/* >>waiting */

typedef struct ddl__unit_wait {
    ddl_trainer *t;
    int32_t at, last; /* units */
} ddl__unit_wait;

static bool ddl__units_done(ddl_context *c, void *arg) {
    ddl__unit_wait *w = arg;
    ddl__trainer_pump(c, w->t);
    while (w->at <= w->last && w->t->units[w->at].state == DDL__UNIT_DONE) {
        w->at++;
    }
    return w->at > w->last || w->t->status < 0 || c->finalized;
}

/* A device that takes too long. */
static void ddl__arrivals_tick(ddl_context *c, ddl_trainer *t, uint64_t now) {
    if (t->arriving > 0 && now > ddl__deadline(t->asked_ns, c->settings.timeout_ms)) {
        ddl__trainer_break(t, ddl__error(c, DDL_ERR_TIMEOUT,
                                         "device %d has not computed %d gradients within %lld ms (timeout_ms) after "
                                         "the last was made ready on rank %d; see what else is on the stream",
                                         t->lane.device->number, t->arriving, (long long)c->settings.timeout_ms,
                                         t->rank));
    }
}

static void ddl__units_tick(ddl_context *c, void *arg, uint64_t now) {
    ddl_trainer *t = ((ddl__unit_wait *)arg)->t;
    ddl__arrivals_tick(c, t, now);
    for (int32_t k = t->head; k < t->next; k++) {
        ddl_request *r = t->units[t->order[k]].request;
        if (ddl__is_pending(r)) {
            ddl__request_attend(c, r, now, true);
        }
    }
}

static int32_t ddl__units_expect(ddl_context *c, void *arg) {
    ddl_trainer *t = ((ddl__unit_wait *)arg)->t;
    for (int32_t k = t->head; k < t->next; k++) {
        ddl_request *r = t->units[t->order[k]].request;
        if (ddl__is_pending(r)) {
            return r->ops->expect(c, r);
        }
    }
    return -1;
}

/* Waits until units first ... last have ended. The lock is held. */
static ddl_status ddl__trainer_await(ddl_trainer *t, const char *what, int32_t first, int32_t last) {
    ddl_context *c = t->context;
    ddl__unit_wait at = {t, first, last};
    ddl__wait w = {.done = ddl__units_done,
                   .tick = ddl__units_tick,
                   .expect = ddl__units_expect,
                   .arg = &at,
                   .deadline = DDL__NEVER};
    if (!ddl__units_done(c, &at)) {
        const char *doing = c->doing;
        uint64_t start = ddl__now_ns(), from = ddl__wait_from(c);
        c->doing = what;
        ddl__wait_for(c, &w);
        ddl__wait_trace(c, from);
        c->doing = doing;
        uint64_t end = ddl__now_ns();
        c->stats.wait_ns += end - start;
        t->exposed_ns += end - DDL__MAX(start, t->taken_ns); /* before that a device was still computing */
        t->stats.waits++;
    }
    if (t->status < 0) {
        return ddl__trainer_broken(t, what);
    }
    return at.at > last ? DDL_OK : ddl__error(c, DDL_ERR_STATE, "%s: the context was finalized while it waited", what);
}

static void ddl__arrival_tick(ddl_context *c, void *arg, uint64_t now) {
    ddl__arrivals_tick(c, ((ddl__unit_wait *)arg)->t, now);
}

/* Waits for gradients that a device computes; units go on meanwhile. The lock is held. */
static void ddl__arrivals_pass(ddl_trainer *t, bool (*done)(ddl_context *c, void *arg), ddl__unit_wait *at) {
    ddl__wait w = {.done = done, .tick = ddl__arrival_tick, .arg = at, .deadline = DDL__NEVER};
    if (!done(t->context, at)) {
        ddl__wait_for(t->context, &w);
    }
}

/* A new step: nothing is ready. All units of the last one have ended. */
static void ddl__units_reset(ddl_trainer *t) {
    for (int32_t i = 0; i < t->unit_count; i++) {
        t->units[i].state = DDL__UNIT_HELD;
        t->units[i].missing = t->units[i].members;
    }
    t->next = t->head = 0;
}

/* One of the things that a unit waits for has come. */
static void ddl__unit_release(ddl_trainer *t, int32_t first, int32_t last) {
    for (int32_t i = first; i <= last; i++) {
        t->units[i].missing--;
    }
}

/* >>making */

static void ddl__units_free(ddl_trainer *t) {
    ddl__base *base = &t->context->base;
    for (int32_t i = 0; i < t->unit_count; i++) {
        if (t->units[i].request != NULL && !t->context->finalized) {
            ddl__request_release(t->units[i].request);
        }
    }
    ddl__free(base, t->units);
    ddl__free(base, t->order);
    t->units = NULL;
    t->order = NULL;
    t->unit_count = t->piece_count = t->next = t->head = 0;
}

/* The whole of a unit's memory; of the flag its own. */
static ddl_tensor ddl__unit_tensor(const ddl_trainer *t, const ddl__unit *u) {
    char *data = u->dtype == DDL_DTYPE_NONE
                     ? (char *)(uintptr_t)t->flag
                     : (char *)t->arenas[u->dtype].data + (size_t)u->begin * ddl_dtype_bytes(u->dtype);
    return u->dtype == DDL_DTYPE_NONE ? ddl_tensor_1d(data, DDL_F64, u->count)
                                      : ddl__lane_tensor(&t->lane, data, u->dtype, u->count);
}

/* Plans a unit's collective. Averages of uneven ranks are sums that are divided later. */
static ddl_status ddl__unit_plan(ddl_trainer *t, ddl__unit *u, int64_t *counts) {
    ddl_tensor whole = ddl__unit_tensor(t, u), own = whole;
    u->bytes = u->count * (int64_t)ddl_dtype_bytes(whole.dtype);
    if (u->served) {
        return DDL_OK; /* each step makes its own */
    }
    ddl_op op = u->kind == DDL_ALL_GATHERV ? DDL_OP_NONE : t->config.uneven ? DDL_SUM : DDL_AVG;
    ddl_collective d = {.kind = u->kind, .op = op, .in = whole, .out = whole};
    if (u->kind != DDL_ALL_REDUCE) {
        int64_t begin = 0, count = 0;
        for (int32_t r = 0; r < t->size; r++) {
            ddl_part(u->count, t->size, r, &begin, &counts[r]);
        }
        ddl_part(u->count, t->size, t->rank, &begin, &count);
        own.data = (char *)whole.data + (size_t)begin * ddl_dtype_bytes(whole.dtype);
        own.shape[0] = count;
        d.counts = counts;
        *(u->kind == DDL_ALL_GATHERV ? &d.in : &d.out) = own;
    }
    return ddl__persistent_make(t->group, &d, &u->request);
}

/* Plans all units of t->units; on error none has a request. */
static ddl_status ddl__units_plan(ddl_trainer *t) {
    ddl_context *c = t->context;
    int64_t *counts = ddl__alloc_array(&c->base, (size_t)t->size, sizeof *counts);
    ddl_status status = counts != NULL ? DDL_OK : ddl__error(c, DDL_ERR_NOMEM, "no memory for the trainer's plan");
    for (int32_t i = 0; i < t->unit_count && status == DDL_OK; i++) {
        status = ddl__unit_plan(t, &t->units[i], counts);
    }
    ddl__free(&c->base, counts);
    return status;
}

#endif /* DDL_TRAIN_PUMP_H */

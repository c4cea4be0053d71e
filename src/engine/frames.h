/* engine, third part: frames of collectives as they arrive, starting an op, ending it.
 * In COLL frames `sequence` is the collective's number in the group (high half) and the slot (low half), `signature`
 * the hash of the call: a frame of another call is never mistaken for ours. */
#ifndef DDL_ENGINE_FRAMES_H
#define DDL_ENGINE_FRAMES_H

#include "account.h"
#include "run.h"

static void ddl__mismatch_seen(ddl_context *c, ddl_group *g, int32_t peer, uint32_t sequence);
static void ddl__lengths_differ(ddl_context *c, ddl__op *op, int32_t peer, uint64_t came, uint64_t expected);
static void ddl__announced_check(ddl_context *c, ddl_group *g, const ddl__op *op);

static ddl__op *ddl__op_find(const ddl_group *g, uint32_t sequence) {
    for (ddl__op *op = g->ops; op != NULL; op = op->next) {
        if (op->sequence == sequence) {
            return op;
        }
    }
    return NULL;
}

static ddl__flight *ddl__record_of(ddl_group *g, uint32_t sequence) {
    ddl__flight *r = &g->records[sequence % DDL__RECORDS];
    return r->sequence == sequence ? r : NULL;
}

/* The receiving step of (peer, slot), or DDL__NO_STEP. Frames mostly come in the order of the index. */
static uint32_t ddl__op_recv_step(ddl__op *op, int32_t peer, uint32_t slot) {
    const ddl__cached *e = op->cached;
    uint64_t key = (uint64_t)(uint32_t)peer << 32 | slot;
    uint32_t low = 0, high = e->recv_count;
    if (op->cursor < high && ddl__recv_key(ddl__op_step(op, e->recvs[op->cursor])) == key) {
        low = op->cursor;
        high = low;
    }
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (ddl__recv_key(ddl__op_step(op, e->recvs[middle])) < key) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if (low == e->recv_count || ddl__recv_key(ddl__op_step(op, e->recvs[low])) != key) {
        return DDL__NO_STEP;
    }
    if (op->steps[e->recvs[low]].moved + DDL__FRAME_MAX_PAYLOAD >= (uint64_t)ddl__op_step(op, e->recvs[low])->bytes) {
        op->cursor = low + 1;
    }
    return e->recvs[low];
}

/* Counts bytes that arrived for a step; the step or the whole op may finish. */
static void ddl__step_arrived(ddl_context *c, ddl__op *op, uint32_t i, uint64_t bytes) {
    ddl__step_state *st = &op->steps[i];
    st->moved += bytes;
    if (st->moved < (uint64_t)ddl__op_step(op, i)->bytes) {
        return;
    }
    st->arrived = true;
    op->last_peer = ddl__op_step(op, i)->peer;
    if (st->ready) {
        ddl__step_finish(op, i);
        ddl__op_run(c, op);
    }
}

/* Bytes of the frame that comes next for a step: senders cut them as large as can be. */
static uint64_t ddl__step_next(const ddl__op *op, uint32_t i) {
    return DDL__MIN((uint64_t)ddl__op_step(op, i)->bytes - op->steps[i].moved, (uint64_t)DDL__FRAME_MAX_PAYLOAD);
}

static bool ddl__step_expects(const ddl__op *op, uint32_t i, uint64_t bytes) {
    const ddl__step_state *st = &op->steps[i];
    return !st->arrived && st->landing == NULL && bytes == ddl__step_next(op, i);
}

/* A frame of a running op, its payload whole. */
static ddl_status ddl__op_deliver(ddl_context *c, ddl__op *op, int32_t peer, const ddl__frame *f, const void *payload) {
    uint32_t i = ddl__op_recv_step(op, peer, (uint32_t)f->sequence);
    if (i == DDL__NO_STEP || !ddl__step_expects(op, i, f->bytes)) {
        if (op->call.kind != DDL_ALL_TO_ALLV) {
            return DDL_ERR_CORRUPT;
        }
        bool over = i == DDL__NO_STEP || op->steps[i].arrived;
        ddl__lengths_differ(c, op, peer, f->bytes, over ? 0 : ddl__step_next(op, i));
        return DDL_OK;
    }
    ddl__step_state *st = &op->steps[i];
    const ddl__step *s = ddl__op_step(op, i);
    if (st->ready) {
        ddl__step_consume(op, s, st->moved, payload, f->bytes);
    } else if (f->bytes > 0) {
        if (st->early == NULL) {
            st->early = ddl__scratch_get(c, (size_t)s->bytes);
        }
        if (st->early == NULL) {
            ddl__break_everywhere(c, op->group, DDL_ERR_NOMEM, "rank %d has no memory to keep what came early",
                                  op->group->rank);
            return DDL_OK;
        }
        ddl__copy_fresh(st->early + st->moved, payload, f->bytes);
    }
    ddl__step_arrived(c, op, i, f->bytes);
    return DDL_OK;
}

static ddl_status ddl__early_keep(ddl_context *c, ddl_group *g, int32_t peer, const ddl__frame *f,
                                  const void *payload) {
    ddl__early *e = ddl__scratch_get(c, sizeof *e + f->bytes);
    if (e == NULL) {
        ddl__break_everywhere(c, g, DDL_ERR_NOMEM, "rank %d has no memory to keep what came early", g->rank);
        return DDL_OK;
    }
    e->next = NULL;
    e->source = peer;
    e->frame = *f;
    if (f->bytes > 0) {
        ddl__copy_fresh(e->data, payload, f->bytes);
    }
    c->stats.unexpected_bytes += f->bytes;
    ddl__early **end = &g->early;
    while (*end != NULL) {
        end = &(*end)->next;
    }
    *end = e;
    return DDL_OK;
}

/* Who the frame is for. *out_op NULL: for nobody now (*out_early: for a collective to come). */
static void ddl__coll_route(ddl_context *c, int32_t peer, const ddl__frame *f, ddl_group **out_group, ddl__op **out_op,
                            bool *out_early) {
    *out_op = NULL;
    *out_early = false;
    ddl_group *g = *out_group = ddl__frame_group(c, peer, f);
    if (g == NULL || g->broken != DDL_OK) {
        *out_group = NULL;
        return;
    }
    uint32_t sequence = (uint32_t)(f->sequence >> 32);
    ddl__flow_started(c, g, g->rank_of[peer], sequence);
    ddl__op *op = ddl__op_find(g, sequence);
    ddl__flight *record = op == NULL && DDL__CHECKS ? ddl__record_of(g, sequence) : NULL;
    uint64_t ours = op != NULL ? op->call.signature : record != NULL ? record->signature : f->signature;
    if (DDL__CHECKS && ours != f->signature) {
        ddl__mismatch_seen(c, g, g->rank_of[peer], sequence);
        return;
    }
    *out_op = op;
    *out_early = op == NULL && (int32_t)(sequence - g->sequence) > 0;
}

static ddl_status ddl__on_coll(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl_group *g;
    ddl__op *op;
    bool early;
    ddl__coll_route(c, peer, f, &g, &op, &early);
    if (op != NULL) {
        ddl_status status = ddl__op_deliver(c, op, g->rank_of[peer], f, payload);
        if (status < 0) {
            ddl__log(&c->base, DDL_LOG_WARN, "rank %d sent a part of a collective that is not expected (group \"%s\")",
                     peer, g->name);
        }
        return status;
    }
    return early ? ddl__early_keep(c, g, g->rank_of[peer], f, payload) : DDL_OK;
}

/* Straight into the caller's memory when the step may write it already and does not reduce. */
static void *ddl__place_coll(ddl_context *c, int32_t peer, const ddl__frame *f, ddl__landing *landing) {
    ddl_group *g;
    ddl__op *op;
    bool early;
    ddl__coll_route(c, peer, f, &g, &op, &early);
    uint32_t i = op == NULL ? DDL__NO_STEP : ddl__op_recv_step(op, g->rank_of[peer], (uint32_t)f->sequence);
    if (i == DDL__NO_STEP || !ddl__step_expects(op, i, f->bytes)) {
        return NULL;
    }
    ddl__step_state *st = &op->steps[i];
    if (!st->ready || ddl__op_step(op, i)->kind != DDL__RECV || f->bytes == 0) {
        return NULL;
    }
    landing->owner = op;
    landing->index = i;
    st->landing = landing;
    return ddl__dst(op, ddl__op_step(op, i)) + st->moved;
}

static void ddl__placed_coll(ddl_context *c, int32_t peer, ddl__landing *landing, ddl_status status) {
    (void)peer;
    ddl__op *op = landing->owner;
    if (op == NULL) {
        return; /* abandoned meanwhile */
    }
    op->steps[landing->index].landing = NULL;
    if (status == DDL_OK) {
        ddl__step_arrived(c, op, (uint32_t)landing->index, landing->frame.bytes);
    }
}

static ddl_status ddl__on_credit(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl_group *g = ddl__frame_group(c, peer, f);
    if (g == NULL) {
        return DDL_OK;
    }
    if ((f->flags & DDL__CREDIT_COLL) != 0) {
        ddl__flow_started(c, g, g->rank_of[peer], (uint32_t)f->sequence);
        if ((f->flags & DDL__CREDIT_WANTED) != 0) {
            ddl__flow_wanted(c, g, g->rank_of[peer], (uint32_t)f->sequence);
        }
        return DDL_OK;
    }
    ddl__reader r = ddl__reader_of(payload, f->bytes);
    uint32_t taken = ddl__get_u32(&r);
    return !r.bad && ddl__credit(g, g->rank_of[peer], taken) ? DDL_OK : DDL_ERR_CORRUPT;
}

/* >>start and end */

/* What stands in the records of a call however often it is called. */
static ddl__flight ddl__record_like(const ddl_group *g, const ddl__call *call, const char *algorithm) {
    return (ddl__flight){.root = call->root,
                         .op = call->op,
                         .kind = (uint8_t)call->kind,
                         .dtype = (uint8_t)call->dtype,
                         .status = DDL_IN_PROGRESS,
                         .nature = call->nature,
                         .tensors = call->tensors,
                         .count = ddl__call_elements(g, call),
                         .detail = call->detail,
                         .call_hash = call->call_hash,
                         .algorithm = algorithm};
}

/* The newest call of a group, which is about to begin. */
static inline ddl__flight *ddl__record_start(ddl_group *g, const ddl__flight *like, uint64_t signature, uint64_t now) {
    ddl__flight *r = &g->records[g->sequence % DDL__RECORDS];
    *r = *like;
    r->order = ++g->context->called;
    r->sequence = g->sequence;
    r->signature = signature;
    r->start_ns = now;
    return r;
}

/* For the timeline. last: the rank of the group whose part came last; -1: not known. The place in the ring is written
 * member by member: to clear the name, which an operation has not, would double what it takes. */
static void ddl__record_trace(ddl_group *g, const ddl__flight *r, int32_t last, bool blocking) {
    ddl__trace *t = g->context->trace;
    ddl__trace_event *e = ddl__trace_next(t);
    e->start_ns = r->start_ns;
    e->end_ns = DDL__MAX(r->end_ns, r->start_ns);
    e->bytes = r->count * (int64_t)ddl_dtype_bytes((ddl_dtype)r->dtype);
    e->algorithm = r->algorithm;
    e->sequence = r->sequence;
    e->peer = last >= 0 ? g->ranks[last] : -1;
    e->status = r->status;
    e->what = DDL__TRACE_OP;
    e->group = ddl__trace_group(t, g->id, g->epoch, g->name);
    e->kind = r->kind;
    e->blocking = blocking;
    t->ended_peer = e->peer;
    t->ended_ns = r->end_ns;
}

static inline void ddl__record_end(ddl_group *g, ddl__flight *r, ddl_status status, uint64_t now, int32_t last,
                                   bool blocking) {
    r->status = (int16_t)status;
    r->end_ns = now;
    if (g->context->trace != NULL) {
        ddl__record_trace(g, r, last, blocking);
    }
}

/* Takes the op off its group and gives its memory back for the next run. */
static void ddl__op_retire(ddl_context *c, ddl__op *op, ddl_status status) {
    ddl_group *g = op->group;
    for (ddl__op **at = &g->ops; *at != NULL; at = &(*at)->next) {
        if (*at == op) {
            *at = op->next;
            break;
        }
    }
    if (DDL__CHECKS) {
        uint64_t now = ddl__now_ns();
        ddl__flight *record = ddl__record_of(g, op->sequence);
        if (record != NULL) {
            ddl__record_end(g, record, status, now, op->last_peer, false);
            if (status == DDL_OK) {
                ddl__account_op(c, op, record, now);
            }
        }
    }
    ddl__scratch_put(c, op->packed_in);
    ddl__scratch_put(c, op->packed_out);
    op->packed_in = op->packed_out = NULL;
    if (op->user != NULL) {
        ddl__user_op_drop(c, op->user);
        op->user = NULL;
    }
    op->request->op = NULL;
    op->cached->pins--;
    ddl__op_put(c, op->cached, op);
}

static bool ddl__writes_out(const ddl__op *op) {
    bool rooted = op->call.kind == DDL_REDUCE || op->call.kind == DDL_GATHER || op->call.kind == DDL_GATHERV;
    bool first = op->call.kind == DDL_EXSCAN && op->group->rank == 0;
    return op->call.out_bytes > 0 && !first && (!rooted || op->group->rank == op->call.root);
}

/* The sum becomes the average, of what ddl__averages_scaled left to do. */
static void ddl__op_average(const ddl__op *op, char *at, size_t bytes) {
    size_t count = bytes / (size_t)op->cached->element_bytes;
    int32_t n = op->group->size;
    if (!ddl__averages_scaled(op->group, &op->call)) {
        ddl__average(at, count, op->call.dtype, n);
    } else if (n * ddl__average_scale(n) < 1) {
        ddl__apply_float(at, at, count, op->call.dtype, n * ddl__average_scale(n), 1);
    }
}

/* The result is on its device, or will never be. */
static void ddl__op_drained(ddl_context *c, ddl__stage *s, ddl_status status) {
    (void)c;
    ddl_request *r = s->owner;
    if (status < 0) {
        ddl__request_fail(r, status, "an operation of group \"%s\" ended well, but a device did not take the result: "
                          "%s", r->group->name, ddl_status_text(status));
    } else {
        ddl__request_done(r, DDL_OK);
    }
}

static void ddl__op_complete(ddl_context *c, ddl__op *op) {
    ddl_request *r = op->request;
    ddl__stage *stage = op->stage;
    op->stage = NULL;
    if (ddl__writes_out(op)) {
        if (op->call.op == DDL_AVG && op->call.on_device == DDL_HOST) {
            ddl__op_average(op, op->base[DDL__OUT], (size_t)op->call.out_bytes);
        }
        if (op->packed_out != NULL) {
            ddl__pack(&op->call.out, op->packed_out, true);
        }
    }
    bool writes = stage != NULL && ddl__writes_out(op);
    ddl__op_leave_scratch(c, op);
    ddl__op_retire(c, op, DDL_OK);
    r->stage = stage; /* what is left needs nobody else */
    if (!writes) {
        ddl__request_done(r, DDL_OK);
        return;
    }
    stage->done = ddl__op_drained;
    stage->owner = r;
    ddl_status status = ddl__stage_drain(c, stage, UINT64_MAX);
    if (status != DDL_IN_PROGRESS) {
        ddl__op_drained(c, stage, status);
    }
}

/* Takes the op's memory back from transports and landings; what arrives for it later is dropped. */
static void ddl__op_abandon(ddl_context *c, ddl__op *op, ddl_status status) {
    ddl_group *g = op->group;
    ddl__native_abandon(c, op);
    ddl__messages_leave(c, op);
    for (uint32_t i = 0; i < op->cached->plan.step_count; i++) {
        ddl__step_state *st = &op->steps[i];
        const ddl__step *s = ddl__op_step(op, i);
        if (st->in_transport) {
            st->in_transport = false;
            ddl__recall(c, g->ranks[s->peer], &st->out);
        }
        if (st->landing != NULL) {
            st->landing->owner = NULL;
            ddl__landing_abandon(c, g->ranks[s->peer], st->landing);
            st->landing = NULL;
        }
        ddl__scratch_put(c, st->early);
        st->early = NULL;
    }
    for (int32_t peer = 0; peer < g->size; peer++) {
        g->flows[peer].held_first = g->flows[peer].held_last = NULL; /* the group is broken: all its ops end */
    }
    ddl__stage_leave(c, &op->stage); /* nothing refers to its memory any more */
    ddl__op_leave_scratch(c, op);
    op->held = false;
    ddl__op_retire(c, op, status);
}

static void ddl__describe_record(const ddl_group *g, const ddl__flight *r, ddl__text *text) {
    ddl__call call = {.kind = (ddl_kind)r->kind, .op = r->op, .dtype = (ddl_dtype)r->dtype, .root = r->root,
                      .count = r->count, .tensors = r->tensors, .nature = r->nature, .detail = r->detail};
    ddl__describe_call(g, &call, r->algorithm, text);
}

/* The collective of any group that this rank called last before one; NULL: none is known. */
static ddl__flight *ddl__record_before(ddl_context *c, uint64_t order, ddl_group **out_group) {
    ddl__flight *last = NULL;
    for (ddl_group *g = c->groups->first; g != NULL; g = g->next) {
        uint32_t s = g->magic == DDL__GROUP_MAGIC ? g->sequence : 0;
        ddl__flight *r = NULL;
        while (s > 0 && (r = ddl__record_of(g, s)) != NULL && r->order >= order) {
            s--;
        }
        if (s > 0 && r != NULL && (last == NULL || r->order > last->order)) {
            last = r;
            *out_group = g;
        }
    }
    return last;
}

/* What this rank called before, oldest first, from the flight recorder: with the call itself it tells where the program
 * was. */
static void ddl__describe_before(ddl_group *g, uint32_t sequence, ddl__text *text) {
    ddl_group *groups[2] = {NULL, NULL};
    const ddl__flight *own = ddl__record_of(g, sequence);
    ddl__flight *last = own != NULL ? ddl__record_before(g->context, own->order, &groups[1]) : NULL;
    ddl__flight *calls[2] = {last != NULL ? ddl__record_before(g->context, last->order, &groups[0]) : NULL, last};
    for (int32_t i = 0; i < 2; i++) {
        if (calls[i] != NULL) {
            ddl__text_add(text, "%s\"%s\" #%u ", text->used == 0 ? " (before it: " : ", ", groups[i]->name,
                          calls[i]->sequence);
            ddl__describe_record(groups[i], calls[i], text);
        }
    }
    ddl__text_add(text, "%s", text->used > 0 ? ")" : "");
}

/* Ends all collectives of a group that broke. */
static void ddl__ops_fail_all(ddl_group *g) {
    while (g->ops != NULL) {
        ddl__op *op = g->ops;
        ddl_request *r = op->request;
        char call[200], before[240] = "";
        ddl__text history = {before, sizeof before, 0};
        ddl__describe_before(g, op->sequence, &history);
        ddl__text text = {call, sizeof call, 0};
        ddl__describe_call(g, &op->call, op->cached->plan.algorithm, &text);
        uint32_t sequence = op->sequence;
        ddl__op_abandon(g->context, op, g->broken);
        ddl__request_fail(r, g->broken, "%s, operation %u of group \"%s\": %s%s", call, sequence, g->name,
                          g->broken_text, before);
    }
}

/* Frames that came before the call and are of another one. False: the call must not begin. */
static bool ddl__early_agrees(ddl_context *c, ddl_group *g, const ddl__op *op) {
    for (const ddl__early *e = g->early; e != NULL; e = e->next) {
        if ((uint32_t)(e->frame.sequence >> 32) == op->sequence && e->frame.signature != op->call.signature) {
            ddl__mismatch_seen(c, g, e->source, op->sequence);
            return false;
        }
    }
    return true;
}

/* Hands an op the frames that came before it. */
static void ddl__early_take(ddl_context *c, ddl_group *g, uint32_t sequence) {
    for (ddl__early **at = &g->early; *at != NULL;) {
        ddl__early *e = *at;
        if ((uint32_t)(e->frame.sequence >> 32) != sequence) {
            at = &e->next;
            continue;
        }
        *at = e->next;
        c->stats.unexpected_bytes -= e->frame.bytes;
        ddl__op *op = ddl__op_find(g, sequence);
        if (op != NULL && ddl__op_deliver(c, op, e->source, &e->frame, e->data) < 0) {
            ddl__missed(c, g->ranks[e->source], ddl__how_unexpected);
        }
        ddl__scratch_put(c, e);
        at = &g->early; /* the list may have changed */
    }
}

static void ddl__engine_group_free(ddl_group *g) {
    ddl_context *c = g->context;
    ddl__account_pending(g);
    ddl__native_close(g, 0);
    ddl__free(&c->base, g->fast);
    g->fast = NULL;
    while (g->early != NULL) {
        ddl__early *e = g->early;
        g->early = e->next;
        c->stats.unexpected_bytes -= e->frame.bytes;
        ddl__scratch_put(c, e);
    }
    while (g->cache != NULL) {
        ddl__cached *e = g->cache;
        g->cache = e->next;
        ddl__cached_free(c, e);
    }
}

#endif /* DDL_ENGINE_FRAMES_H */

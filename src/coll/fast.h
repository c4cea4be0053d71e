/* coll: the short way of a blocking collective that a transport runs by itself: shared memory is done with a small one
 * before the long way, by plan, op and request, has begun. A call that is not over soon becomes an op after all, and
 * nothing is different from then on: deadline, stall report, death and mismatch are found by the long way. */
#ifndef DDL_COLL_FAST_H
#define DDL_COLL_FAST_H

#include "call.h"

enum {
    DDL__FAST_LOOKS = 400, /* in one go: a microsecond or two, which is what it costs to give the core away */
    DDL__FAST_YIELDS = 64
};

/* The last call of a group that went this way. The same call again, on any memory, needs no check and no planning. */
typedef struct ddl__fast {
    uint32_t settings_version; /* of the group, when it was checked */
    ddl_kind kind; /* as the caller asked for it */
    ddl_op op;
    int32_t root;
    ddl_tensor in, out;
    bool uses_in, uses_out;
    ddl__call call;
    ddl__reduction reduction;
    ddl_native_call native;
    ddl__flight record;
} ddl__fast;

static bool ddl__same_shape(const ddl_tensor *a, const ddl_tensor *b) {
    return memcmp(a->shape, b->shape, sizeof a->shape) == 0 && memcmp(a->strides, b->strides, sizeof a->strides) == 0;
}

_Static_assert(offsetof(ddl_tensor, device) == offsetof(ddl_tensor, dtype) + sizeof(ddl_dtype), "compared as one word");

/* Alike but for where they lie. */
static inline bool ddl__same_view(const ddl_tensor *a, const ddl_tensor *b) {
    return memcmp(&a->dtype, &b->dtype, sizeof a->dtype + sizeof a->device) == 0 && a->ndim == b->ndim &&
           (a->ndim == 1 ? a->shape[0] == b->shape[0] && a->strides[0] == b->strides[0] : ddl__same_shape(a, b));
}

static inline bool ddl__fast_knows(const ddl_group *g, const ddl__asked *d) {
    const ddl__fast *f = g->fast;
    return f != NULL && f->settings_version == g->settings_version && f->kind == d->kind && f->op == d->op &&
           f->root == d->root && (d->in == NULL || ddl__same_view(&f->in, d->in)) &&
           (d->out == NULL || ddl__same_view(&f->out, d->out));
}

/* Whether contiguous tensors of the call that is known may lie here: as far from each other as they did, or apart. */
static bool ddl__fast_place_valid(const ddl_group *g, const ddl__fast *f, const char *in, const char *out) {
    const ddl__call *call = &f->call;
    bool missing = (f->uses_in && in == NULL) || (f->uses_out && out == NULL);
    if (missing || g->context->devices != NULL) { /* a device may know an address */
        return false;
    }
    if (!f->uses_in || !f->uses_out) {
        return true;
    }
    uintptr_t i = (uintptr_t)in, o = (uintptr_t)out;
    bool as_before = o - i == (uintptr_t)call->out.data - (uintptr_t)call->in.data;
    bool apart = i < o ? o - i >= (uint64_t)call->in_bytes : i - o >= (uint64_t)call->out_bytes;
    return as_before || (!call->in_place && apart);
}

/* Moves the call that is known to the memory of this one. */
static inline bool ddl__fast_move(const ddl_group *g, ddl__fast *f, const ddl__asked *d) {
    void *in = f->uses_in ? d->in->data : NULL;
    void *out = f->uses_out ? d->out->data : NULL;
    if ((!f->uses_in || in == f->call.in.data) && (!f->uses_out || out == f->call.out.data)) {
        return true;
    }
    if (!ddl__fast_place_valid(g, f, in, out)) {
        return false;
    }
    f->native.in = f->call.in.data = in;
    f->native.out = f->call.out.data = f->kind == DDL_BROADCAST ? in : out;
    return true;
}

/* Nothing on the group that a new call has to be compared with, or to wait for. */
static inline bool ddl__fast_quiet(const ddl_group *g) {
    return g->native.set != NULL && g->broken == DDL_OK && g->ops == NULL && g->early == NULL && g->doubt_ns == 0 &&
           g->wants == 0 && g->announced.sequence != g->sequence + 1 && !g->context->aborted;
}

static bool ddl__fast_tensor(const ddl_tensor *t) { return ddl__is_contiguous(t) && t->device == DDL_HOST; }

/* What is done after the transport has done its part, or before, is left to the long way. */
static bool ddl__fast_serves(const ddl_group *g, const ddl__call *call, const ddl__cached *cached) {
    const ddl__plan *plan = &cached->plan;
    return plan->step_count == 1 && plan->steps[0].kind == DDL__NATIVE && call->op != DDL_AVG &&
           call->op < DDL__OPS_FIRST && (!ddl__uses_in(g, call) || ddl__fast_tensor(&call->in)) &&
           (!ddl__uses_out(g, call) || ddl__fast_tensor(&call->out));
}

/* Checks a call and keeps it. False: it goes the long way, which also says what is wrong with it. */
static bool ddl__fast_learn(ddl_group *g, const ddl__asked *d, const char *what) {
    ddl_context *c = g->context;
    ddl__cached *cached;
    ddl__call call;
    if (ddl__kind_is_v(d->kind) || ddl__call_make(g, d, &call, what) < 0) {
        return false;
    }
    ddl__call_settle_place(g, &call);
    if (ddl__cached_get(g, &call, &cached) < 0 || !ddl__fast_serves(g, &call, cached)) {
        return false;
    }
    ddl__fast *f = g->fast != NULL ? g->fast : ddl__alloc(&c->base, sizeof *f);
    if (f == NULL) {
        return false;
    }
    const ddl__step *s = &cached->plan.steps[0];
    call.call_hash = ddl__call_hash(&call, cached);
    *f = (ddl__fast){.settings_version = g->settings_version, .kind = d->kind, .op = d->op, .root = d->root,
                     .uses_in = ddl__uses_in(g, &call), .uses_out = ddl__uses_out(g, &call), .call = call,
                     .record = ddl__record_like(g, &call, cached->plan.algorithm)};
    f->in = d->in != NULL ? *d->in : f->in;
    f->out = d->out != NULL ? *d->out : f->out;
    f->native = (ddl_native_call){.size = sizeof f->native,
                                  .kind = (int32_t)call.kind,
                                  .root = call.root,
                                  .element_bytes = (int32_t)ddl_dtype_bytes(call.dtype),
                                  .in = f->uses_in ? call.in.data : NULL,
                                  .out = call.kind == DDL_BROADCAST ? call.in.data
                                         : f->uses_out              ? call.out.data
                                                                    : NULL,
                                  .bytes = (uint64_t)s->bytes,
                                  .at_once = 1};
    if (ddl__kind_reduces(call.kind)) {
        f->reduction = ddl__reduction_of(call.op, call.dtype, NULL);
        f->native.reduce = ddl__native_reduce;
        f->native.reduce_arg = &f->reduction;
    }
    g->fast = f;
    ddl__account_pending(g);
    g->pending.bytes = (uint64_t)ddl__call_elements(g, &call) * ddl_dtype_bytes(call.dtype);
    g->pending.algorithm = f->record.algorithm;
    return true;
}

/* It takes longer, or it failed: an op is made that goes on from there. `begun` is what native_start said. */
static ddl_status ddl__fast_adopt(ddl_group *g, ddl__fast *f, ddl_status begun, void *native, const char *what) {
    ddl_context *c = g->context;
    ddl__cached *cached;
    ddl__op *op;
    ddl_request *r = NULL;
    ddl_status status = ddl__cached_get(g, &f->call, &cached);
    status = status == DDL_OK ? ddl__request_new(g, &ddl__coll_ops, &r) : status;
    status = status == DDL_OK ? ddl__op_prepare(g, &f->call, cached, NULL, r, &op) : status;
    if (status < 0) {
        if (r != NULL) {
            ddl__request_release(r);
        }
        if (native != NULL) {
            g->native.table->native_cancel(g->native.self, g->native.set, native);
        }
        ddl__break_everywhere(c, g, status, "rank %d has no memory to go on with %s", g->rank, what);
        return ddl__group_usable(g, what);
    }
    op->sequence = g->sequence;
    op->call.signature = g->signature;
    op->asked_ns = 0;
    op->late = -1;
    op->late_ns = 0;
    op->running = false;
    op->next = g->ops;
    g->ops = op;
    op->ready_count = op->natives_left = 0; /* its step has begun: later calls need not wait for that */
    if (op->answers != NULL) {
        memset(op->answers, 0, (size_t)g->size * sizeof *op->answers);
    }
    ddl__native_list(c, op, 0, begun, native);
    c->doing = what;
    ddl__wait_requests(c, &r, 1, false);
    status = ddl__request_report(&r, NULL);
    c->doing = NULL;
    return status;
}

/* Waits a little, until a yield takes long; *out_end_ns is then about now, unless it is over in one go: the clock costs
 * more than it would tell. The lock is kept: nobody else knows of the operation yet. */
static ddl_status ddl__fast_wait(ddl_group *g, void *native, uint64_t *out_end_ns, int32_t *out_last) {
    ddl_context *c = g->context;
    int32_t rank = -1;
    bool took_long = false;
    for (int32_t round = 0;; round++) {
        ddl_status status = g->native.table->native_test(g->native.self, g->native.set, native, DDL__FAST_LOOKS, &rank);
        bool wanted = ddl__lock_is_wanted(c);
        int32_t missing = status == DDL_IN_PROGRESS ? ddl__native_rank(g, rank) : -1;
        missing = missing >= 0 ? g->ranks[missing] : -1;
        if (status != DDL_IN_PROGRESS || round == DDL__FAST_YIELDS || wanted || took_long ||
            (c->yielded_long && !ddl__is_excused(c, missing))) {
            if (round > 0) {
                ddl__place_leave(c);
            }
            return status;
        }
        *out_last = rank >= 0 ? rank : *out_last;
        took_long = ddl__yield(c, false, missing);
        *out_end_ns = ddl__about_ns(c);
    }
}

/* What need not be known before the others see the arrival is done while their answer is on its way. */
static ddl_status ddl__fast_run(ddl_group *g, ddl__fast *f, const char *what) {
    ddl_context *c = g->context;
    ddl__flight *record = NULL;
    void *native = NULL;
    g->sequence++;
    g->signature = DDL__CHECKS ? ddl__mix(g->signature, f->call.call_hash) : 0;
    f->native.signature = f->call.signature = g->signature;
    f->native.sequence = ++g->native.sequence;
    ddl_status begun = g->native.table->native_start(g->native.self, g->native.set, &f->native, &native);
    uint64_t end_ns = g->fast_ns = ddl__about_ns(c);
    int32_t last = -1;
    if (DDL__CHECKS) {
        record = ddl__record_start(g, &f->record, g->signature, g->fast_ns);
    }
    bool over = begun == DDL_OK && native == NULL;
    if (!over && (begun != DDL_OK || ddl__fast_wait(g, native, &end_ns, &last) != DDL_OK)) {
        return ddl__fast_adopt(g, f, begun, begun == DDL_OK ? native : NULL, what);
    }
    if (DDL__CHECKS) {
        last = ddl__native_rank(g, last);
        ddl__record_end(g, record, DDL_OK, end_ns, last, true);
        g->pending.runs++;
        g->pending.ns += end_ns - g->fast_ns;
        if (last >= 0) {
            ddl__account_last(c, g->ranks[last], end_ns - g->fast_ns);
        }
    }
    c->stats.ops_started++;
    c->stats.ops_completed++;
    return DDL_OK;
}

/* Goes the short way when that is possible. A rank that only sends would never learn that its group is broken: what has
 * come is looked at once a millisecond, by the clock of the call before this one. */
static bool ddl__fast_try(ddl_group *g, const ddl__asked *d, const char *what, ddl_status *out_status) {
    ddl_context *c = g->context;
    if (!ddl__fast_quiet(g)) {
        return false;
    }
    if (!c->polling && g->fast_ns - DDL__MIN(g->glanced_ns, g->fast_ns) > DDL__NS_PER_MS) {
        ddl__glance(g);
        if (!ddl__fast_quiet(g)) {
            return false;
        }
    }
    if (!(ddl__fast_knows(g, d) && ddl__fast_move(g, g->fast, d)) && !ddl__fast_learn(g, d, what)) {
        return false;
    }
    *out_status = ddl__fast_run(g, g->fast, what);
    return true;
}

/* A public call: begins, and waits when it is blocking (out_request NULL). */
static ddl_status ddl__coll_call(ddl_group *g, const ddl__asked *d, const char *what, ddl_request **out_request) {
    if (out_request != NULL) {
        *out_request = NULL;
    }
    DDL__TRY(ddl__enter_ordered(g, what, 1));
    ddl_context *c = g->context;
    ddl_request *r = NULL;
    ddl_status status;
    if (out_request == NULL && ddl__fast_try(g, d, what, &status)) {
        ddl__unlock(c);
        return status;
    }
    c->doing = what;
    ddl__glance(g);
    status = ddl__coll_begin(g, d, what, &r);
    ddl__marks_drop(g);
    bool captured = status == DDL_OK && r->captured; /* what the stream gets next comes behind it in the graph */
    if (captured) {
        ddl__wait_requests(c, &r, 1, false);
    }
    if (status == DDL_OK && out_request != NULL) {
        *out_request = r;
    } else if (status == DDL_OK && (captured || !(r->ordered && ddl__request_detach(c, r)))) {
        ddl__wait_requests(c, &r, 1, false);
        status = ddl__request_report(&r, NULL);
    }
    c->doing = NULL;
    ddl__unlock(c);
    return status;
}

static ddl_status ddl__coll_icall(ddl_group *g, const ddl__asked *d, const char *what, ddl_request **out_request) {
    ddl__asked ask = *d;
    ask.later = true;
    return out_request != NULL ? ddl__coll_call(g, &ask, what, out_request) : ddl__refuse_group(g, what, "out_request");
}

#endif /* DDL_COLL_FAST_H */

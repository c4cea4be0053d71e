/* engine, second part: running steps. A step starts when all it waits for have finished; data that comes earlier is
 * kept. One loop per op, no recursion: a finished step only queues those that it made ready. */
#ifndef DDL_ENGINE_RUN_H
#define DDL_ENGINE_RUN_H

#include "straight.h"

/* Flags of CREDIT: the sender has started collectives up to `sequence`; it wants to hear when the receiver has. */
enum { DDL__CREDIT_COLL = 1, DDL__CREDIT_WANTED = 2 };

static void ddl__op_complete(ddl_context *c, ddl__op *op);
static void ddl__op_run(ddl_context *c, ddl__op *op);

static const ddl__step *ddl__op_step(const ddl__op *op, uint32_t i) { return &op->cached->plan.steps[i]; }

/* Steps of no bytes may have no memory. */
static char *ddl__at(const ddl__op *op, int32_t space, int64_t offset) {
    return op->base[space] != NULL ? op->base[space] + offset : NULL;
}

static char *ddl__src(const ddl__op *op, const ddl__step *s) { return ddl__at(op, s->src_space, s->src); }

static char *ddl__dst(const ddl__op *op, const ddl__step *s) { return ddl__at(op, s->dst_space, s->dst); }

static void ddl__op_enqueue(ddl__op *op, uint32_t i) {
    uint32_t size = op->cached->plan.step_count;
    op->ready[(op->ready_first + op->ready_count++) % size] = i;
}

static void ddl__step_trace(const ddl__op *op, uint32_t i) {
    const ddl__step *s = ddl__op_step(op, i);
    ddl_group *g = op->group;
    bool pair = s->kind == DDL__SEND || s->kind == DDL__RECV || s->kind == DDL__RECV_REDUCE;
    *ddl__trace_next(g->context->trace) =
        (ddl__trace_event){.start_ns = op->steps[i].start_ns,
                           .end_ns = ddl__now_ns(),
                           .bytes = s->bytes,
                           .algorithm = op->cached->plan.algorithm,
                           .sequence = op->sequence,
                           .peer = pair ? g->ranks[s->peer] : -1,
                           .what = DDL__TRACE_STEP,
                           .group = ddl__trace_group(g->context->trace, g->id, g->epoch, g->name),
                           .kind = s->kind};
}

static void ddl__step_finish(ddl__op *op, uint32_t i) {
    const ddl__plan *plan = &op->cached->plan;
    const ddl__step *s = &plan->steps[i];
    if (op->traced && op->group->context->trace != NULL) {
        ddl__step_trace(op, i);
    }
    op->steps[i].finished = true;
    op->left--;
    for (uint32_t k = 0; k < s->next_count; k++) {
        uint32_t next = plan->nexts[s->first_next + k];
        if (--op->steps[next].waits == 0) {
            ddl__op_enqueue(op, next);
        }
    }
}

/* >>sending */

static ddl__frame ddl__coll_frame(const ddl__op *op, const ddl__step *s, uint64_t bytes) {
    return (ddl__frame){.type = DDL__FRAME_COLL,
                        .bytes = (uint32_t)bytes,
                        .group = op->group->id,
                        .epoch = op->group->epoch,
                        .sequence = (uint64_t)op->sequence << 32 | s->slot,
                        .signature = op->call.signature};
}

/* Gives the transport the frames of a send until it borrows one. True: the step is finished. */
static bool ddl__step_push(ddl_context *c, ddl__op *op, uint32_t i) {
    const ddl__step *s = ddl__op_step(op, i);
    ddl__step_state *st = &op->steps[i];
    int32_t peer = op->group->ranks[s->peer];
    do {
        uint64_t bytes = DDL__MIN((uint64_t)s->bytes - st->moved, (uint64_t)DDL__FRAME_MAX_PAYLOAD);
        ddl__frame f = ddl__coll_frame(op, s, bytes);
        const char *at = bytes > 0 ? ddl__src(op, s) + st->moved : NULL;
        st->moved += bytes;
        ddl_status status = ddl__post(c, peer, &st->out, &f, at);
        if (status == DDL_IN_PROGRESS) {
            st->in_transport = true;
            return false;
        }
        /* A peer that is gone needs nothing more; if it is dead, the group breaks for that reason. */
    } while (st->moved < (uint64_t)s->bytes);
    return true;
}

static void ddl__step_sent(ddl_context *c, ddl__outgoing *out, ddl_status status) {
    ddl__step_state *st = out->owner;
    ddl__op *op = st->op;
    uint32_t i = (uint32_t)out->index;
    st->in_transport = false;
    bool more = status == DDL_OK && st->moved < (uint64_t)ddl__op_step(op, i)->bytes;
    if (!more || ddl__step_push(c, op, i)) {
        ddl__step_finish(op, i);
        ddl__op_run(c, op);
    }
}

/* Small plans have no fence, so a rank can run ahead of another. It may do so by a window of bytes, and is known to be
 * caught up with when the peer is heard to have started a collective. Some peers are never heard of: the receivers of
 * broadcasts. So a half of the window that is full makes place for the next, and the peer is asked to say when it has
 * started the last collective of the full one. A send is held back only while such an answer is due, never for ever. */
static void ddl__flow_turn(ddl_context *c, ddl_group *g, int32_t peer) {
    ddl__toward *flow = &g->flows[peer];
    if (flow->ahead[0] > 0 || flow->ahead[1] < DDL__WINDOW_BYTES / 4 * 3) {
        return;
    }
    flow->ahead[0] = flow->ahead[1];
    flow->ahead_last[0] = flow->ahead_last[1];
    flow->ahead[1] = 0;
    ddl__frame f = {.type = DDL__FRAME_CREDIT, .flags = DDL__CREDIT_COLL | DDL__CREDIT_WANTED, .group = g->id,
                    .epoch = g->epoch, .sequence = flow->ahead_last[0]};
    ddl__tell(c, g->ranks[peer], f, NULL, 0);
}

/* Tells the peer how far we are. */
static void ddl__flow_answer(ddl_context *c, ddl_group *g, int32_t peer) {
    ddl__frame f = {.type = DDL__FRAME_CREDIT, .flags = DDL__CREDIT_COLL, .group = g->id, .epoch = g->epoch,
                    .sequence = g->sequence};
    ddl__tell(c, g->ranks[peer], f, NULL, 0);
}

/* The peer asks to be told when we start a collective. */
static void ddl__flow_wanted(ddl_context *c, ddl_group *g, int32_t peer, uint32_t sequence) {
    ddl__toward *flow = &g->flows[peer];
    if ((int32_t)(g->sequence - sequence) >= 0) {
        ddl__flow_answer(c, g, peer);
        return;
    }
    g->wants += !flow->wants;
    flow->wants = true;
    flow->wanted = sequence;
}

/* We have started a collective: whoever asked is told. */
static void ddl__flow_caught_up(ddl_context *c, ddl_group *g) {
    for (int32_t peer = 0; g->wants > 0 && peer < g->size; peer++) {
        ddl__toward *flow = &g->flows[peer];
        if (flow->wants && (int32_t)(g->sequence - flow->wanted) >= 0) {
            flow->wants = false;
            g->wants--;
            ddl__flow_answer(c, g, peer);
        }
    }
}

static bool ddl__step_held(ddl_context *c, ddl__op *op, const ddl__step *s, ddl__step_state *st) {
    ddl__toward *flow = &op->group->flows[s->peer];
    bool fenced = op->cached->plan.fenced && s->flags != DDL__AT_ONCE;
    if (fenced || (int32_t)(flow->started - op->sequence) >= 0) {
        return false;
    }
    uint32_t cost = (uint32_t)s->bytes + DDL__AHEAD_BYTES;
    if (flow->ahead[0] > 0 && flow->ahead[0] + flow->ahead[1] + cost > DDL__WINDOW_BYTES) {
        st->held_next = NULL;
        if (flow->held_last != NULL) {
            flow->held_last->held_next = st;
        } else {
            flow->held_first = st;
        }
        flow->held_last = st;
        return true;
    }
    if (flow->ahead[1] == 0 || (int32_t)(op->sequence - flow->ahead_last[1]) > 0) {
        flow->ahead_last[1] = op->sequence;
    }
    flow->ahead[1] += cost;
    ddl__flow_turn(c, op->group, s->peer);
    return false;
}

static void ddl__step_send(ddl_context *c, ddl__op *op, uint32_t i) {
    ddl__step_state *st = &op->steps[i];
    if (!ddl__step_held(c, op, ddl__op_step(op, i), st) && ddl__step_push(c, op, i)) {
        ddl__step_finish(op, i);
    }
}

/* The peer has started a collective: what was sent ahead of it up to there is taken. */
static void ddl__flow_started(ddl_context *c, ddl_group *g, int32_t peer, uint32_t sequence) {
    ddl__toward *flow = &g->flows[peer];
    if ((int32_t)(sequence - flow->started) <= 0) {
        return;
    }
    for (ddl__op *op = g->ops; op != NULL; op = op->next) {
        if ((int32_t)(op->sequence - flow->started) > 0 && (int32_t)(op->sequence - sequence) <= 0) {
            op->late = peer;
            op->late_ns = ddl__about_ns(c);
        }
    }
    flow->started = sequence;
    for (int half = 0; half < 2; half++) {
        flow->ahead[half] = (int32_t)(sequence - flow->ahead_last[half]) >= 0 ? 0 : flow->ahead[half];
    }
    ddl__flow_turn(c, g, peer);
    while (flow->held_first != NULL) {
        ddl__step_state *st = flow->held_first;
        flow->held_first = st->held_next;
        if (flow->held_first == NULL) {
            flow->held_last = NULL;
        }
        ddl__op *op = st->op;
        ddl__step_send(c, op, (uint32_t)st->out.index);
        ddl__op_run(c, op);
        if (flow->held_last == st) {
            return; /* held again: the window is full */
        }
    }
}

/* >>receiving */

/* Bytes of a step that is ready go where they belong. */
static void ddl__step_consume(ddl__op *op, const ddl__step *s, uint64_t offset, const void *data, uint64_t bytes) {
    if (bytes == 0) {
        return;
    }
    char *dst = ddl__dst(op, s) + offset;
    if (s->kind == DDL__RECV) {
        ddl__copy_fresh(dst, data, bytes);
        return;
    }
    bool theirs_first = (s->flags & DDL__THEIRS_FIRST) != 0;
    if (op->user != NULL && (uintptr_t)data % (uint64_t)DDL__MIN(op->cached->element_bytes, 8) != 0) {
        ddl__reduce_aligned(&op->reduction, dst, ddl__src(op, s) + offset, data, bytes, theirs_first);
        return;
    }
    const char *own = ddl__src(op, s) + offset;
    ddl__reduce_pair(&op->reduction, dst, theirs_first ? data : own, theirs_first ? own : data, bytes);
}

static void ddl__step_receive(ddl_context *c, ddl__op *op, uint32_t i) {
    ddl__step_state *st = &op->steps[i];
    const ddl__step *s = ddl__op_step(op, i);
    st->ready = true;
    if (st->early != NULL) {
        ddl__step_consume(op, s, 0, st->early, st->moved);
        ddl__scratch_put(c, st->early);
        st->early = NULL;
    }
    if (st->arrived) {
        ddl__step_finish(op, i);
    }
}

/* >>moves: between a device and scratch */

static void ddl__step_moved(ddl_context *c, ddl__stage *s, ddl_status status) {
    ddl__step_state *st = s->owner;
    ddl__op *op = st->op;
    bool comes = s->count > 0 && s->items[0].comes;
    ddl__stage_leave(c, &st->move);
    if (status < 0) {
        ddl__step_failed(op, (uint32_t)st->out.index, status);
    }
    if (status >= 0 && comes && op->cached->native_count == 0 && ddl__is_scaled(op->group, &op->call, op->user)) {
        const ddl__step *step = ddl__op_step(op, (uint32_t)st->out.index); /* where it is native, its kernels scale */
        ddl__op_scale(op, ddl__dst(op, step), (size_t)step->bytes);
    }
    if (status >= 0) {
        ddl__step_finish(op, (uint32_t)st->out.index);
    }
    ddl__op_run(c, op);
}

static void ddl__op_average(const ddl__op *op, char *at, size_t bytes);

/* To or from scratch, or on the device. True: it has ended already, which only one of no bytes does. */
static bool ddl__step_move(ddl_context *c, ddl__op *op, uint32_t i) {
    const ddl__step *s = ddl__op_step(op, i);
    ddl__step_state *st = &op->steps[i];
    bool comes = s->dst_space == DDL__TMP;
    char *there = comes ? ddl__src(op, s) : ddl__dst(op, s), *here = comes ? ddl__dst(op, s) : ddl__src(op, s);
    ddl_tensor t = ddl_tensor_1d(there, DDL_U8, s->bytes);
    t.device = op->call.on_device;
    if (s->kind == DDL__MOVE && !comes && op->call.op == DDL_AVG) {
        ddl__op_average(op, here, (size_t)s->bytes);
    }
    st->move = ddl__stage_make(c, 1);
    ddl_status status = st->move == NULL ? DDL_ERR_NOMEM
                                         : ddl__stage_add(c, st->move, &t, (uint64_t)s->bytes, here, DDL_HOST,
                                                          ddl__kind_name(op->call.kind));
    if (status == DDL_OK) {
        st->move->owner = st;
        st->move->done = ddl__step_moved;
        st->move->items[0].comes = comes;
        st->move->items[0].goes = !comes;
        st->move->items[0].inside = s->kind == DDL__COPY;
        status = comes ? ddl__stage_fill(c, st->move) : ddl__stage_drain(c, st->move, UINT64_MAX);
    }
    if (status != DDL_IN_PROGRESS) {
        ddl__stage_leave(c, &st->move);
    }
    if (status < 0) {
        ddl__step_failed(op, i, status);
    }
    return status == DDL_OK;
}

/* What the device does with a copy that scales, or with blocks. Nothing of it is waited for here. */
static ddl_status ddl__step_kernels(ddl_context *c, const ddl__op *op, const ddl__step *s) {
    const ddl__device *d = op->device;
    int32_t n = op->group->size, blocks = (int32_t)s->slot;
    double scale = op->user != NULL ? op->user->factor : ddl__average_scale(n);
    ddl_kernel_scale k = {.dst = ddl__dst(op, s), .src = ddl__src(op, s), .dtype = (int32_t)op->call.dtype,
                          .count = s->bytes / op->cached->element_bytes, .divisor = 1, .factor = scale};
    if (s->kind == DDL__COPY) {
        return d->table->kernel(d->self, DDL_KERNEL_SCALE, &k, d->stream);
    }
    const void **srcs = ddl__alloc_array(&c->base, (size_t)blocks, sizeof *srcs);
    if (srcs == NULL) {
        return DDL_ERR_NOMEM;
    }
    for (int32_t i = 0; i < blocks; i++) {
        srcs[i] = ddl__src(op, s) + i * ddl__fold_room(s->bytes);
    }
    bool average = op->user == NULL && op->call.op == DDL_AVG, scaled = ddl__averages_scaled(op->group, &op->call);
    int32_t sum = op->user != NULL || average ? DDL_SUM : (int32_t)op->call.op;
    ddl_status status = d->table->reduce(d->self, k.dst, srcs, blocks, k.count, k.dtype, sum, d->stream);
    k.src = k.dst; /* as ddl__op_average, from here */
    k.factor = scaled ? 1 / (n * scale) : 1;
    k.divisor = scaled ? 1 : n;
    if (status >= 0 && average && (!scaled || n * scale < 1)) {
        status = d->table->kernel(d->self, DDL_KERNEL_SCALE, &k, d->stream);
    }
    ddl__free(&c->base, srcs);
    return status;
}

static void ddl__step_kernel(ddl_context *c, ddl__op *op, uint32_t i) {
    ddl__step_state *st = &op->steps[i];
    st->move = ddl__stage_make(c, 0);
    ddl_status status = DDL_ERR_NOMEM;
    if (st->move != NULL) {
        st->move->owner = st;
        st->move->done = ddl__step_moved;
        status = ddl__stage_await(c, st->move, op->device, ddl__step_kernels(c, op, ddl__op_step(op, i)));
    }
    if (status < 0) {
        ddl__stage_leave(c, &st->move);
        ddl__step_failed(op, i, status);
    }
}

/* What failed in a step that is this rank's alone, or a message between devices: all ranks are told. */
static void ddl__step_break(ddl_context *c, ddl__op *op) {
    const ddl_group *g = op->group;
    const ddl__step *s = op->failed_step;
    ddl_status status = op->move_failed, why = ddl__may_break(status) ? status : DDL_ERR_SYSTEM;
    const char *what = ddl__kind_name(op->call.kind), *text = ddl_status_text(status);
    long long bytes = (long long)s->bytes;
    int32_t device = op->call.on_device;
    op->move_failed = DDL_OK;
    if (s->kind == DDL__SEND || s->kind == DDL__RECV) {
        bool sends = s->kind == DDL__SEND;
        ddl__break_everywhere(c, op->group, why, "rank %d could not %s %lld bytes of %s, straight between devices, %s "
                              "rank %d: %s", g->rank, sends ? "give" : "take", bytes, what, sends ? "to" : "from",
                              s->peer, text);
    } else if (s->kind == DDL__FOLD) {
        ddl__break_everywhere(c, op->group, why, "rank %d could not reduce %lld bytes of %s on its device %d: %s",
                              g->rank, bytes, what, device, text);
    } else {
        ddl__break_everywhere(c, op->group, why, "rank %d could not move its part of %s, %lld bytes, from its device "
                              "%d or to it: %s", g->rank, what, bytes, device, text);
    }
}

/* The op ends. Copies that are under way keep scratch until an event behind them has happened. */
static void ddl__op_leave_scratch(ddl_context *c, ddl__op *op) {
    bool moves = false;
    for (uint32_t i = 0; op->device != NULL && i < op->cached->plan.step_count; i++) {
        moves = moves || op->steps[i].move != NULL;
        ddl__stage_leave(c, &op->steps[i].move);
    }
    if (moves && op->scratch != NULL) {
        ddl__stage_mark(op->scratch->items[0].device, op->scratch);
        op->scratch->phase = DDL__STAGE_DRAIN;
        ddl__stage_list(c, op->scratch);
    }
    ddl__stage_leave(c, &op->scratch);
}

/* >>the loop */

static void ddl__step_start(ddl_context *c, ddl__op *op, uint32_t i) {
    const ddl__step *s = ddl__op_step(op, i);
    if (op->traced) {
        op->steps[i].start_ns = ddl__now_ns();
    }
    bool straight = op->cached->plan.straight && s->bytes > 0;
    if (straight && (s->kind == DDL__SEND || s->kind == DDL__RECV)) {
        ddl__step_message(c, op, i);
        return;
    }
    if (s->kind == DDL__FOLD || (s->kind == DDL__COPY && s->flags == DDL__SCALED)) {
        ddl__step_kernel(c, op, i);
        return;
    }
    switch (s->kind) {
    case DDL__SEND:
        ddl__step_send(c, op, i);
        return;
    case DDL__RECV:
    case DDL__RECV_REDUCE:
        ddl__step_receive(c, op, i);
        return;
    case DDL__COPY:
        if (straight) {
            if (!ddl__step_move(c, op, i)) {
                return;
            }
        } else if (s->bytes > 0) { /* a barrier has no memory at all */
            memmove(ddl__dst(op, s), ddl__src(op, s), (size_t)s->bytes);
        }
        break;
    case DDL__REDUCE: {
        char *dst = ddl__dst(op, s), *src = ddl__src(op, s);
        bool dst_first = (s->flags & DDL__DST_FIRST) != 0;
        ddl__reduce_pair(&op->reduction, dst, dst_first ? dst : src, dst_first ? src : dst, (uint64_t)s->bytes);
        break;
    }
    case DDL__NATIVE:
        ddl__step_native(c, op, i);
        return;
    case DDL__MOVE:
        if (!ddl__step_move(c, op, i)) {
            return;
        }
        break;
    }
    ddl__step_finish(op, i);
}

/* Starts all steps that are ready. When none is left the op is complete, and may be gone on return. Once a peer is
 * known to have called something else nothing completes any more: the group breaks as soon as that call is spelled
 * out. */
static void ddl__op_run(ddl_context *c, ddl__op *op) {
    if (op->running || op->held) {
        return;
    }
    op->running = true;
    while (op->ready_count > 0) {
        uint32_t i = op->ready[op->ready_first];
        op->ready_first = (op->ready_first + 1) % op->cached->plan.step_count;
        op->ready_count--;
        ddl__step_start(c, op, i);
    }
    op->running = false;
    if (op->move_failed < 0) {
        ddl__step_break(c, op);
        return;
    }
    if (op->left == 0 && op->group->doubt_ns == 0) {
        ddl__op_complete(c, op);
    }
}

/* Sets all steps to their beginning and queues those that wait for nothing. */
static void ddl__op_reset(ddl__op *op) {
    const ddl__plan *plan = &op->cached->plan;
    const ddl__trace *trace = op->group->context->trace;
    op->left = plan->step_count;
    op->messages = NULL;
    op->traced = trace != NULL && trace->steps && op->cached->native_count < plan->step_count;
    op->last_peer = -1;
    op->ready_first = op->ready_count = op->cursor = 0;
    op->natives_left = op->cached->native_count;
    op->native_parked = DDL__NO_STEP;
    for (uint32_t i = 0; i < plan->step_count; i++) {
        ddl__step_state *st = &op->steps[i];
        st->out.done = ddl__step_sent;
        st->out.owner = st;
        st->out.index = i;
        st->op = op;
        st->held_next = NULL;
        st->waits = plan->steps[i].waits;
        st->ready = st->arrived = st->finished = st->in_transport = false;
        st->moved = 0;
        st->early = NULL;
        st->landing = NULL;
        st->move = NULL;
        st->message = NULL;
        if (st->waits == 0) {
            ddl__op_enqueue(op, i);
        }
    }
}

#endif /* DDL_ENGINE_RUN_H */

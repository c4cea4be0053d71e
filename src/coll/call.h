/* coll, first part: what a caller passed, checked and made into a ddl__call; starting it. */
#ifndef DDL_COLL_CALL_H
#define DDL_COLL_CALL_H

#include "../engine/watch.h"

enum { DDL__OPS_FIRST = 256, DDL__OPS_MAX = 64, DDL__MOVE_LEAST = 65536 };

static ddl__user_op *ddl__user_op_of(ddl_context *c, ddl_op op) {
    ddl__user_op *user = op >= DDL__OPS_FIRST ? c->ops->first : NULL;
    while (user != NULL && (user->id != op || user->freed)) {
        user = user->next;
    }
    return user;
}

static bool ddl__kind_reduces(ddl_kind kind) {
    ddl_kind base = ddl__kind_base(kind);
    return base == DDL_REDUCE || base == DDL_ALL_REDUCE || base == DDL_REDUCE_SCATTER || base == DDL_SCAN ||
           base == DDL_EXSCAN;
}

static bool ddl__kind_rooted(ddl_kind kind) {
    ddl_kind base = ddl__kind_base(kind);
    return base == DDL_BROADCAST || base == DDL_REDUCE || base == DDL_GATHER || base == DDL_SCATTER;
}

/* Which tensors this rank's call looks at. */
static bool ddl__uses_in(const ddl_group *g, const ddl__call *call) {
    return call->kind != DDL_BARRIER && (ddl__kind_base(call->kind) != DDL_SCATTER || g->rank == call->root);
}

static bool ddl__uses_out(const ddl_group *g, const ddl__call *call) {
    ddl_kind base = ddl__kind_base(call->kind);
    bool at_root = base == DDL_REDUCE || base == DDL_GATHER;
    return call->kind != DDL_BARRIER && call->kind != DDL_BROADCAST && (!at_root || g->rank == call->root);
}

/* >>checks */

static ddl_status ddl__check_op(ddl_group *g, ddl__call *call, const char *what) {
    ddl_context *c = g->context;
    call->commutative = true;
    if (!ddl__kind_reduces(call->kind)) {
        call->op = DDL_OP_NONE;
        return DDL_OK;
    }
    if (call->op >= DDL__OPS_FIRST) {
        const ddl__user_op *user = ddl__user_op_of(c, call->op);
        if (user == NULL) {
            return ddl__error(c, DDL_ERR_ARG, "%s: op %d was not created, or was freed", what, call->op);
        }
        call->commutative = user->commutative;
        call->nature = user->fn == NULL ? DDL__SCALED_SUM : user->commutative ? DDL__FUNCTION : DDL__FUNCTION_IN_ORDER;
        return user->fn != NULL || ddl__op_valid(DDL_SUM, call->dtype)
                   ? DDL_OK
                   : ddl__error(c, DDL_ERR_ARG, "%s: a scaled sum of %s makes no sense", what,
                                ddl_dtype_name(call->dtype));
    }
    if (call->op <= DDL_OP_NONE || call->op > DDL_MAX_INDEX) {
        return ddl__error(c, DDL_ERR_ARG, "%s: %d is no op", what, call->op);
    }
    bool scan = call->kind == DDL_SCAN || call->kind == DDL_EXSCAN;
    if (!ddl__op_valid(call->op, call->dtype) || (scan && call->op == DDL_AVG)) {
        return ddl__error(c, DDL_ERR_ARG, "%s: op %s (%d) makes no sense for %s%s", what, ddl__op_name(call->op),
                          call->op, ddl_dtype_name(call->dtype), scan ? " in a scan" : "");
    }
    return DDL_OK;
}

/* Elements of `in` and `out` that a call of `count` elements needs; -1: that tensor is not looked at. */
static void ddl__needed(const ddl_group *g, const ddl__call *call, int64_t *out_in, int64_t *out_out) {
    int64_t n = g->size, c = call->count;
    ddl_kind base = ddl__kind_base(call->kind);
    bool many_in = base == DDL_SCATTER || base == DDL_REDUCE_SCATTER || base == DDL_ALL_TO_ALL;
    bool many_out = base == DDL_GATHER || base == DDL_ALL_GATHER || base == DDL_ALL_TO_ALL;
    *out_in = many_in ? n * c : c;
    *out_out = many_out ? n * c : c;
}

/* All ranks' data together, in bytes, at most: sums of two such do not overflow. */
#define DDL__WHOLE_MAX (INT64_MAX / 2)

static ddl_status ddl__too_large(ddl_group *g, const char *what) {
    return ddl__error(g->context, DDL_ERR_ARG, "%s on group \"%s\" of %d ranks: the data of all ranks together is "
                      "larger than %lld bytes", what, g->name, g->size, (long long)DDL__WHOLE_MAX);
}

static ddl_status ddl__check_counts(ddl_group *g, ddl__call *call, int64_t in_count, int64_t out_count,
                                    const char *what) {
    int64_t need_in, need_out;
    bool uses_in = ddl__uses_in(g, call), uses_out = ddl__uses_out(g, call);
    ddl_kind base = ddl__kind_base(call->kind);
    bool by_out = base == DDL_SCATTER || base == DDL_REDUCE_SCATTER;
    call->count = base == DDL_ALL_TO_ALL ? in_count / g->size : by_out ? out_count : in_count;
    if (call->count > DDL__WHOLE_MAX / (int64_t)ddl_dtype_bytes(call->dtype) / g->size) {
        return ddl__too_large(g, what);
    }
    ddl__needed(g, call, &need_in, &need_out);
    if ((uses_in && in_count != need_in) || (uses_out && out_count != need_out)) {
        return ddl__error(g->context, DDL_ERR_ARG,
                          "%s on group \"%s\" of %d ranks: `in` has %lld elements and `out` has %lld, but with %lld "
                          "elements of each rank `in` must have %lld and `out` %lld",
                          what, g->name, g->size, (long long)in_count, (long long)out_count, (long long)call->count,
                          (long long)need_in, (long long)need_out);
    }
    return DDL_OK;
}

/* One array of the v-forms and its offsets (packed ones are made when NULL); every block must lie in the tensor. */
static ddl_status ddl__check_array(ddl_group *g, ddl_dtype dtype, const int64_t *counts, const int64_t **offsets,
                                   int64_t *packed, int64_t have, const char *what, const char *which) {
    ddl_context *c = g->context;
    int64_t most = DDL__WHOLE_MAX / (int64_t)ddl_dtype_bytes(dtype);
    if (counts == NULL) {
        return ddl__error(c, DDL_ERR_ARG, "%s: the counts for tensor `%s` are NULL", what, which);
    }
    int64_t at = 0;
    for (int32_t r = 0; r < g->size; r++) {
        packed[r] = at;
        int64_t offset = *offsets != NULL ? (*offsets)[r] : at;
        if (counts[r] < 0 || offset < 0 || (have >= 0 && (offset > have || counts[r] > have - offset))) {
            return ddl__error(c, DDL_ERR_ARG,
                              "%s: the part of rank %d has %lld elements at %lld, which is not inside tensor "
                              "`%s` of %lld elements",
                              what, r, (long long)counts[r], (long long)offset, which, (long long)have);
        }
        if (counts[r] > most - at || offset > most - counts[r]) {
            return ddl__too_large(g, what);
        }
        at += counts[r];
    }
    *offsets = *offsets != NULL ? *offsets : packed;
    return DDL_OK;
}

static ddl_status ddl__check_v(ddl_group *g, ddl__call *call, int64_t in_count, int64_t out_count, const char *what) {
    ddl_kind base = ddl__kind_base(call->kind);
    bool in_blocks = base == DDL_SCATTER || base == DDL_REDUCE_SCATTER || base == DDL_ALL_TO_ALL;
    bool uses = in_blocks ? ddl__uses_in(g, call) : ddl__uses_out(g, call);
    int64_t have = !uses ? -1 : in_blocks ? in_count : out_count;
    DDL__TRY(ddl__check_array(g, call->dtype, call->counts, &call->offsets, g->packed, have, what,
                              in_blocks ? "in" : "out"));
    if (base == DDL_ALL_TO_ALL) {
        return ddl__check_array(g, call->dtype, call->recv_counts, &call->recv_offsets, g->packed + g->size, out_count,
                                what, "out");
    }
    int64_t own = in_blocks ? out_count : in_count;
    if (own != call->counts[g->rank]) {
        return ddl__error(g->context, DDL_ERR_ARG,
                          "%s: tensor `%s` of rank %d has %lld elements, but counts[%d] is %lld", what,
                          in_blocks ? "out" : "in", g->rank, (long long)own, g->rank, (long long)call->counts[g->rank]);
    }
    return DDL_OK;
}

/* In place is: the smaller tensor is this rank's own part of the larger one, or both are the same. */
static ddl_status ddl__check_place(ddl_group *g, ddl__call *call, const char *what) {
    if (call->kind == DDL_BROADCAST) {
        call->in_place = true;
        return DDL_OK;
    }
    if (!ddl__uses_in(g, call) || !ddl__uses_out(g, call)) {
        return DDL_OK;
    }
    size_t size = ddl_dtype_bytes(call->dtype);
    ddl_kind base = ddl__kind_base(call->kind);
    int64_t own = (call->counts != NULL ? call->offsets[g->rank] : g->rank * call->count) * (int64_t)size;
    const char *in = call->in.data, *out = call->out.data;
    if (base == DDL_GATHER || base == DDL_ALL_GATHER) {
        out += own;
    } else if (base == DDL_SCATTER || base == DDL_REDUCE_SCATTER) {
        in += own;
    }
    bool contiguous = ddl__is_contiguous(&call->in) && ddl__is_contiguous(&call->out);
    bool same_view = base != DDL_GATHER && base != DDL_ALL_GATHER && base != DDL_SCATTER &&
                     base != DDL_REDUCE_SCATTER &&
                     memcmp(call->in.strides, call->out.strides, sizeof call->in.strides) == 0;
    call->in_place = in == out && (contiguous || same_view) && call->kind != DDL_ALL_TO_ALLV;
    if (!call->in_place && ddl__tensors_overlap(&call->in, &call->out)) {
        return ddl__error(
            g->context, DDL_ERR_ARG,
            "%s: `in` and `out` overlap; they must be apart, or in place as ddl.h says for this operation", what);
    }
    return DDL_OK;
}

/* In v-forms the elements of a rank differ from rank to rank; the arrays are alike but for all_to_allv. */
static uint64_t ddl__counts_hash(const ddl_group *g, const int64_t *counts) {
    uint64_t h = 0;
    for (int32_t i = 0; i < g->size; i++) {
        h = ddl__mix(h, (uint64_t)counts[i]);
    }
    return h;
}

static uint64_t ddl__call_hash(const ddl__call *call, const ddl__cached *cached) {
    uint64_t h = ddl__mix((uint64_t)call->kind, (uint64_t)call->dtype);
    h = ddl__mix(h, (uint64_t)(uint32_t)call->op << 32 | (uint32_t)call->root);
    h = ddl__mix(h, (uint64_t)call->count);
    h = ddl__mix(h, call->detail);
    h = ddl__mix(h, (uint64_t)(uint32_t)call->tensors << 8 | call->nature);
    h = ddl__mix(h, cached->algorithm_hash); /* which also says whether it runs on devices */
    return h != 0 ? h : 1; /* 0 means none */
}

/* What a v-form has besides; arrays may be NULL as ddl.h says. */
typedef struct ddl__blocks {
    const int64_t *counts, *offsets, *recv_counts, *recv_offsets;
} ddl__blocks;

/* What one type's part of an all_reduce_many has besides. */
typedef struct ddl__portion {
    int32_t tensors; /* of all types */
    const ddl_tensor *list;
    uint64_t detail; /* a hash of them */
    bool held;       /* it begins when ddl__op_release says so */
} ddl__portion;

/* What a caller asks for: a ddl_collective that copies no tensors, for that would take as long as 8 bytes need through
 * shared memory; nor is it large, for to clear it would too. What a kind does not use may be NULL; a broadcast has `in`
 * alone. */
typedef struct ddl__asked {
    ddl_kind kind;
    ddl_op op;
    int32_t root;
    bool later; /* a request is to be made of it: a stream does not wait for it */
    const ddl_tensor *in, *out;
    const ddl__blocks *blocks;
    const ddl__portion *portion;
} ddl__asked;

static ddl__blocks ddl__blocks_of(const ddl_collective *d) {
    return (ddl__blocks){d->counts, d->offsets, d->recv_counts, d->recv_offsets};
}

static ddl__asked ddl__asked_of(const ddl_collective *d, const ddl__blocks *blocks) {
    return (ddl__asked){.kind = d->kind, .op = d->op, .root = d->root, .in = &d->in, .out = &d->out, .blocks = blocks};
}

/* Checks a collective and fills the call. Nothing has happened yet when it fails. */
static ddl_status ddl__call_make(ddl_group *g, const ddl__asked *d, ddl__call *out, const char *what) {
    ddl_context *c = g->context;
    *out = (ddl__call){.kind = d->kind, .op = d->op, .root = ddl__kind_rooted(d->kind) ? d->root : 0,
                       .later = d->later};
    if (d->portion != NULL) {
        out->tensors = d->portion->tensors;
        out->list = d->portion->list;
        out->detail = d->portion->detail;
        out->held = d->portion->held;
    }
    if (d->kind <= DDL_KIND_NONE || d->kind > DDL_ALL_TO_ALLV) {
        return ddl__error(c, DDL_ERR_ARG, "%s: %d is no kind of collective", what, (int)d->kind);
    }
    if (out->root < 0 || out->root >= g->size) {
        return ddl__error(c, DDL_ERR_ARG, "%s: root %d is not in group \"%s\", whose ranks are 0 to %d", what,
                          out->root, g->name, g->size - 1);
    }
    if (out->kind == DDL_BARRIER) {
        out->dtype = DDL_U8;
        out->commutative = true;
        return DDL_OK;
    }
    out->in = *d->in;
    out->out = d->kind == DDL_BROADCAST ? *d->in : *d->out;
    bool uses_in = ddl__uses_in(g, out), uses_out = ddl__uses_out(g, out);
    if (uses_in) {
        DDL__TRY(ddl__tensor_check(c, d->in, what, "in"));
        if (d->kind == DDL_BROADCAST && g->rank != out->root) {
            DDL__TRY(ddl__tensor_check_output(c, d->in, what, "tensor"));
        }
    }
    if (uses_out) {
        DDL__TRY(ddl__tensor_check(c, d->out, what, "out"));
        DDL__TRY(ddl__tensor_check_output(c, d->out, what, "out"));
    }
    out->dtype = uses_in ? d->in->dtype : d->out->dtype;
    if (uses_in && uses_out && d->in->dtype != d->out->dtype) {
        return ddl__error(c, DDL_ERR_ARG, "%s: `in` is of type %s, `out` of type %s; they must be of one type", what,
                          ddl_dtype_name(d->in->dtype), ddl_dtype_name(d->out->dtype));
    }
    int64_t in_count = uses_in ? ddl_tensor_count(d->in) : 0, out_count = uses_out ? ddl_tensor_count(d->out) : 0;
    out->in_bytes = in_count * (int64_t)ddl_dtype_bytes(out->dtype);
    out->out_bytes = d->kind == DDL_BROADCAST ? out->in_bytes : out_count * (int64_t)ddl_dtype_bytes(out->dtype);
    if (ddl__kind_is_v(d->kind)) {
        out->counts = d->blocks->counts;
        out->offsets = d->blocks->offsets;
        out->recv_counts = d->kind == DDL_ALL_TO_ALLV ? d->blocks->recv_counts : NULL;
        out->recv_offsets = d->kind == DDL_ALL_TO_ALLV ? d->blocks->recv_offsets : NULL;
        DDL__TRY(ddl__check_v(g, out, in_count, out_count, what));
        out->detail = d->kind != DDL_ALL_TO_ALLV ? ddl__counts_hash(g, out->counts) : 0;
    } else {
        DDL__TRY(ddl__check_counts(g, out, in_count, out_count, what));
    }
    DDL__TRY(ddl__check_op(g, out, what));
    return ddl__check_place(g, out, what);
}

/* >>start */

/* What held an operation back is there. */
static void ddl__op_release(ddl_context *c, ddl__op *op) {
    op->held = false;
    if (op->group->broken == DDL_OK && (!DDL__CHECKS || ddl__early_agrees(c, op->group, op))) {
        ddl__op_run(c, op);
    }
}

/* The tensors of a device have come to the stage. The other ranks wait for this one, so that they are told when not. */
static void ddl__op_filled(ddl_context *c, ddl__stage *s, ddl_status status) {
    ddl__op *op = s->owner;
    if (status < 0) {
        ddl__break_everywhere(c, op->group, DDL_ERR_SYSTEM, "rank %d could not read its tensor from a device: %s",
                              op->group->rank, ddl_status_text(status));
        return;
    }
    if (op->call.on_device == DDL_HOST && s->count > 0 && s->items[0].comes && op->base[DDL__IN] == s->items[0].host &&
        ddl__is_scaled(op->group, &op->call, op->user)) {
        ddl__op_scale(op, op->base[DDL__IN], (size_t)op->call.in_bytes);
    }
    ddl__op_release(c, op);
}

/* Adds one tensor to the stage, unless it is where the operation runs already. Returns its memory in *out. */
static ddl_status ddl__op_stage_add(ddl_context *c, ddl__op *op, const ddl_tensor *t, int64_t bytes, bool comes,
                                    bool goes, char **out) {
    const char *what = ddl__kind_name(op->call.kind);
    int32_t there = op->call.on_device;
    if (there != DDL_HOST && t->device == there && ddl__is_contiguous(t)) {
        *out = t->data;
        return DDL_OK;
    }
    if (op->stage == NULL) {
        op->stage = ddl__stage_make(c, 2);
    }
    if (op->stage == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "%s: no memory to stage tensors of a device", what);
    }
    ddl__staged *item = &op->stage->items[op->stage->count];
    DDL__TRY(ddl__stage_add(c, op->stage, t, (uint64_t)bytes, NULL, there, what));
    item->comes = comes;
    item->goes = goes;
    *out = item->host;
    return DDL_OK;
}

/* Puts it into the graph that its group's stream is being captured into: only what devices run by themselves. */
static ddl_status ddl__op_capture(ddl__op *op) {
    const ddl_group *g = op->group;
    bool alone = op->device == g->stream_device && op->stage == NULL && ddl__op_native_alone(op) && !op->held &&
                 !op->request->persistent;
    if (!alone || (op->runner->table->flags & DDL_TRANSPORT_CAPTURE) == 0) {
        return ddl__stream_check(g, ddl__kind_name(op->call.kind));
    }
    op->stream = g->stream;
    op->captured = op->request->captured = true;
    return DDL_OK;
}

/* Orders the begin of an operation with device tensors on its group's stream: the transport of one that devices run by
 * themselves looks when the stream has come here, if it is given to it at once; else the host does. What is put on the
 * stream later waits at a gate: ddl__request_detach. */
static ddl_status ddl__op_order(ddl_context *c, ddl__op *op) {
    ddl_group *g = op->group;
    const ddl__device *d = g->stream_device;
    if (d == NULL || op->call.tensors > 0) { /* all_reduce_many orders all its parts */
        return DDL_OK;
    }
    if (ddl__stream_captured(d, g->stream)) {
        return ddl__op_capture(op);
    }
    bool turn = op->stage == NULL && !op->held && op->device == d && !op->call.later && ddl__op_native_alone(op);
    for (const ddl__op *o = g->ops; turn && o != NULL; o = o->next) {
        turn = o->natives_left == 0; /* those of earlier calls begin first */
    }
    if (turn) {
        op->stream = g->stream;
        op->mark = (op->runner->table->flags & DDL_TRANSPORT_EVENT) != 0 ? ddl__mark_take(g) : NULL;
        op->request->ordered = true;
        return DDL_OK;
    }
    if (op->stage == NULL) {
        op->stage = ddl__stage_make(c, 0);
    }
    return op->stage != NULL ? ddl__stage_order(g, op->request, op->stage, ddl__kind_name(op->call.kind))
                             : ddl__error(c, DDL_ERR_NOMEM, "%s: no memory", ddl__kind_name(op->call.kind));
}

/* What goes by the network while the rest is on devices, and scratch there. */
static ddl_status ddl__op_scratch(ddl_context *c, ddl__op *op) {
    ddl_tensor t = {.device = op->call.on_device};
    const int64_t bytes[2] = {op->cached->plan.tmp_bytes, op->cached->plan.there_bytes};
    const char *what = ddl__kind_name(op->call.kind);
    if (bytes[0] + bytes[1] == 0) {
        return DDL_OK;
    }
    op->scratch = ddl__stage_make(c, 2);
    if (op->scratch == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "%s: no memory to stage tensors of a device", what);
    }
    for (int i = 0; i < 2; i++) {
        if (bytes[i] > 0) {
            DDL__TRY(ddl__stage_add(c, op->scratch, &t, (uint64_t)bytes[i], NULL, i == 0 ? DDL_HOST : t.device, what));
            op->base[i == 0 ? DDL__TMP : DDL__THERE] = op->scratch->items[op->scratch->count - 1].host;
        }
    }
    return DDL_OK;
}

/* Tensors on devices: the steps work on their stages or, where the operation runs there, on them. What it leaves of an
 * output as it is (gaps of v-forms) is read too. in_goes: `in` is what is received. */
static ddl_status ddl__op_stage(ddl_context *c, ddl__op *op, bool in, bool out, bool in_goes) {
    const ddl__call *call = &op->call;
    if (call->on_device != DDL_HOST) {
        DDL__TRY(ddl__device_get(c, call->on_device, ddl__kind_name(call->kind), &op->device));
        op->runner = &op->group->device_native;
        DDL__TRY(ddl__op_scratch(c, op));
    }
    if (in) {
        DDL__TRY(ddl__op_stage_add(c, op, &call->in, call->in_bytes, !in_goes, in_goes, &op->base[DDL__IN]));
    }
    if (out) {
        bool reads = ddl__kind_is_v(call->kind);
        DDL__TRY(ddl__op_stage_add(c, op, &call->out, call->out_bytes, reads, true, &op->base[DDL__OUT]));
    }
    DDL__TRY(ddl__op_order(c, op));
    if (op->stage == NULL) {
        return DDL_OK;
    }
    op->stage->owner = op;
    op->stage->done = ddl__op_filled;
    ddl_status status = ddl__stage_fill(c, op->stage);
    op->held = op->held || status == DDL_IN_PROGRESS;
    return status >= 0 ? DDL_OK
                       : ddl__error(c, status, "%s: a device did not copy a tensor: %s", ddl__kind_name(call->kind),
                                    ddl_status_text(status));
}

/* The memory that steps work on: the caller's, packed scratch for strided and for scaled input, or a stage. */
static ddl_status ddl__op_buffers(ddl_context *c, ddl__op *op) {
    ddl__call *call = &op->call;
    bool uses_in = ddl__uses_in(op->group, call), uses_out = ddl__uses_out(op->group, call);
    bool there = call->on_device != DDL_HOST; /* whose kernels scale */
    bool scaled = !there && ddl__is_scaled(op->group, call, op->user);
    bool takes = call->kind == DDL_BROADCAST && op->group->rank != call->root; /* its `in` is what it receives */
    bool stage_in = uses_in && (there || ddl__is_staged(&call->in));
    bool stage_out = uses_out && (there || ddl__is_staged(&call->out));
    bool pack_in = uses_in && !takes && !stage_in && call->in_bytes > 0 && (scaled || !ddl__is_contiguous(&call->in));
    bool pack_out = (uses_out ? !stage_out : takes && !stage_in) && call->out_bytes > 0 &&
                    !ddl__is_contiguous(&call->out);
    op->base[DDL__IN] = uses_in ? call->in.data : NULL;
    op->base[DDL__OUT] = uses_out ? call->out.data : op->base[DDL__IN];
    op->base[DDL__TMP] = op->tmp;
    if (pack_in) {
        op->packed_in = ddl__scratch_get(c, (size_t)call->in_bytes);
        op->base[DDL__IN] = op->packed_in;
    }
    if (pack_out) {
        op->packed_out = ddl__scratch_get(c, (size_t)call->out_bytes);
        op->base[DDL__OUT] = op->packed_out;
    }
    if ((pack_in && op->packed_in == NULL) || (pack_out && op->packed_out == NULL)) {
        return ddl__error(c, DDL_ERR_NOMEM, "no memory to pack a strided or scaled tensor");
    }
    if (pack_in) {
        ddl__pack(&call->in, op->packed_in, false);
    }
    if (pack_in && scaled) {
        ddl__op_scale(op, op->packed_in, (size_t)call->in_bytes);
    }
    if (stage_in || stage_out) {
        DDL__TRY(ddl__op_stage(c, op, stage_in, stage_out, takes));
    }
    if (call->kind == DDL_BROADCAST) {
        op->base[DDL__IN] = op->base[DDL__OUT] = pack_out ? op->packed_out : op->base[DDL__IN];
    } else if (pack_out && ddl__kind_is_v(call->kind)) {
        ddl__pack(&call->out, op->packed_out, false); /* what lies in the gaps between blocks stays */
    }
    return DDL_OK;
}

/* On which device the plan of a call works; DDL_HOST: on none, its tensors are staged whole. It must be the same on all
 * ranks whether one does, and a rank knows only its own tensors: so each that has one tensor on a device takes it for
 * granted that the others have, and brings what else it has there. Between hosts that is for all that is worth cutting
 * (of an all_to_allv nobody knows how large it is), within a host for what a transport runs by itself. Empty ones count
 * where a rank has no others: its part of a v-form may be of no elements, and it does as the others all the same. */
static int32_t ddl__call_device(const ddl_group *g, ddl__call *call) {
    bool uses_in = ddl__uses_in(g, call), uses_out = ddl__uses_out(g, call);
    int32_t in = uses_in ? call->in.device : DDL_HOST, out = uses_out ? call->out.device : DDL_HOST;
    call->on_device = uses_in && ddl__is_staged(&call->in) ? in
                      : uses_out && ddl__is_staged(&call->out) ? out
                      : in != DDL_HOST ? in : out;
    if (g->size == 1 || call->on_device == DDL_HOST) {
        return DDL_HOST;
    }
    ddl__plan_args args = ddl__call_args(g, call);
    bool there = ddl__host_count(&args) > 1
                     ? ddl__total_bytes(&args) >= DDL__MOVE_LEAST
                     : args.native_s > 0 && call->count > 0 && g->tuning.forced[ddl__kind_base(call->kind)] == NULL;
    return there ? call->on_device : DDL_HOST;
}

/* Strided, scaled or staged: the plan works on copies, which are apart even when the tensors are one. */
static void ddl__call_settle_place(ddl_group *g, ddl__call *call) {
    const ddl__user_op *user = ddl__user_op_of(g->context, call->op);
    bool in = ddl__uses_in(g, call), out = ddl__uses_out(g, call);
    call->on_device = ddl__call_device(g, call);
    bool strided = (in && !ddl__is_contiguous(&call->in)) || (out && !ddl__is_contiguous(&call->out));
    bool moved = (in && ddl__is_staged(&call->in) && call->in.device != call->on_device) ||
                 (out && ddl__is_staged(&call->out) && call->out.device != call->on_device);
    bool scaled = call->on_device == DDL_HOST && ddl__is_scaled(g, call, user);
    if (call->kind != DDL_BROADCAST && (strided || moved || scaled)) {
        call->in_place = false;
    }
}

static void ddl__op_launch(ddl_context *c, ddl_group *g, ddl__op *op) {
    op->sequence = ++g->sequence;
    g->signature = op->call.signature = DDL__CHECKS ? ddl__mix(g->signature, op->call.call_hash) : 0;
    op->asked_ns = 0;
    op->late = -1;
    op->late_ns = 0;
    op->running = false;
    op->next = g->ops;
    g->ops = op;
    if (op->answers != NULL) {
        memset(op->answers, 0, (size_t)g->size * sizeof *op->answers);
    }
    if (DDL__CHECKS) {
        ddl__flight like = ddl__record_like(g, &op->call, op->cached->plan.algorithm);
        ddl__record_start(g, &like, op->call.signature, ddl__now_ns());
    }
    ddl__flow_caught_up(c, g);
    uint32_t sequence = op->sequence;
    if (DDL__CHECKS) {
        ddl__announced_check(c, g, op);
    }
    if (g->broken != DDL_OK || (DDL__CHECKS && !ddl__early_agrees(c, g, op))) {
        return;
    }
    ddl__op_run(c, op);
    if (g->early != NULL && g->broken == DDL_OK) {
        ddl__early_take(c, g, sequence);
    }
}

/* Makes a checked call an op of request r, with all steps at their beginning. On error nothing has changed. */
static ddl_status ddl__op_prepare(ddl_group *g, const ddl__call *call, ddl__cached *cached, ddl__user_op *user,
                                  ddl_request *r, ddl__op **out) {
    ddl_context *c = g->context;
    ddl__op *op = ddl__op_new(c, cached);
    if (op == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "no memory to run an operation on group \"%s\"", g->name);
    }
    op->group = g;
    op->request = r;
    op->cached = cached;
    op->call = *call;
    op->call.call_hash = DDL__CHECKS ? ddl__call_hash(call, cached) : 1;
    op->call.counts = cached->arrays; /* the caller's are its own again */
    op->call.offsets = op->call.recv_counts = op->call.recv_offsets = NULL; /* the plan has them */
    op->user = user;
    op->held = call->held;
    op->stage = op->scratch = NULL;
    op->move_failed = DDL_OK;
    op->failed_step = NULL;
    op->device = NULL;
    op->stream = op->mark = NULL;
    op->captured = false;
    op->runner = &g->native;
    if (ddl__kind_reduces(call->kind)) {
        op->reduction = ddl__reduction_of(call->op, call->dtype, user);
    }
    ddl_status status = ddl__op_buffers(c, op);
    if (status < 0) {
        ddl__stage_leave(c, &op->stage);
        ddl__stage_leave(c, &op->scratch);
        ddl__scratch_put(c, op->packed_in);
        ddl__scratch_put(c, op->packed_out);
        op->packed_in = op->packed_out = NULL;
        op->user = NULL;
        ddl__op_put(c, cached, op);
        return status;
    }
    cached->pins++;
    if (user != NULL) {
        user->users++;
    }
    r->op = op;
    r->state = DDL__REQUEST_ACTIVE;
    ddl__op_reset(op);
    *out = op;
    return DDL_OK;
}

/* Starts a checked call as request r. On error nothing was sent and the sequence number is not used up. */
static ddl_status ddl__call_run(ddl_group *g, const ddl__call *call, ddl__cached *cached, ddl__user_op *user,
                                ddl_request *r) {
    ddl__op *op;
    DDL__TRY(ddl__op_prepare(g, call, cached, user, r, &op));
    ddl__op_launch(g->context, g, op);
    return DDL_OK;
}

static ddl_status ddl__call_start(ddl_group *g, ddl__call *call, ddl_request *r) {
    ddl__cached *cached;
    ddl__call_settle_place(g, call);
    DDL__TRY(ddl__cached_get(g, call, &cached));
    return ddl__call_run(g, call, cached, ddl__user_op_of(g->context, call->op), r);
}

/* Sees what has come, once a millisecond at most: a rank that only sends small broadcasts would never learn that its
 * group is broken. */
static void ddl__glance(ddl_group *g) {
    ddl_context *c = g->context;
    uint64_t now = ddl__now_ns();
    if (!c->polling && !c->finalized && now - g->glanced_ns > DDL__NS_PER_MS) {
        g->glanced_ns = now;
        ddl__poll(c, -1);
    }
}

/* Checks, makes a request and starts it. */
static ddl_status ddl__coll_begin(ddl_group *g, const ddl__asked *d, const char *what, ddl_request **out) {
    ddl__call call;
    DDL__TRY(ddl__group_usable(g, what));
    DDL__TRY(ddl__call_make(g, d, &call, what));
    ddl_request *r;
    DDL__TRY(ddl__request_new(g, &ddl__coll_ops, &r));
    ddl_status status = ddl__call_start(g, &call, r);
    if (status < 0) {
        ddl__request_release(r);
        return status;
    }
    *out = r;
    return DDL_OK;
}

#endif /* DDL_COLL_CALL_H */

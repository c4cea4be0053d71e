/* coll, third part: several tensors as one operation, persistent operations, estimates. */
#ifndef DDL_COLL_MANY_H
#define DDL_COLL_MANY_H

#include "coll.h"

/* An all_reduce of many tensors: those of one type are packed together and reduced at once. */
typedef struct ddl__many {
    int32_t count;
    uint64_t detail; /* hash of the types and lengths of all */
    ddl_request *parts[DDL__DTYPES];
    char *packed[DDL__DTYPES];
    ddl_op op;
    bool pinned[DDL__DTYPES];      /* packed is the stage's */
    int32_t there[DDL__DTYPES];    /* on which device; DDL_HOST: on none */
    ddl__stage *stage;             /* of tensors on devices; NULL: there are none */
    ddl_tensor tensors[];
} ddl__many;

/* Copies tensors of one type to the packed memory or back, by the CPU; returns the elements. */
static int64_t ddl__many_pack(const ddl__many *m, ddl_dtype dtype, char *packed, bool unpack) {
    int64_t total = 0;
    for (int32_t i = 0; i < m->count; i++) {
        if (m->tensors[i].dtype == dtype) {
            int64_t count = ddl_tensor_count(&m->tensors[i]);
            char *at = packed != NULL ? packed + total * (int64_t)ddl_dtype_bytes(dtype) : NULL;
            if (at != NULL && !ddl__is_staged(&m->tensors[i])) {
                ddl__pack(&m->tensors[i], at, unpack);
            }
            total += count;
        }
    }
    return total;
}

static void ddl__many_free(ddl_context *c, ddl_request *r) {
    ddl__many *m = r->kept;
    ddl__stage_leave(c, &m->stage);
    for (int32_t d = 0; d < DDL__DTYPES; d++) {
        ddl__scratch_put(c, m->pinned[d] ? NULL : m->packed[d]);
        m->packed[d] = NULL;
        if (m->parts[d] != NULL) {
            m->parts[d]->parent = NULL;
            ddl__request_release(m->parts[d]);
            m->parts[d] = NULL;
        }
    }
}

/* Those on devices have their results too, or never will. */
static void ddl__many_ended(ddl_request *r, ddl_status status) {
    if (status < 0) {
        ddl__request_fail(r, status, "all_reduce_many of group \"%s\" ended well, but a device did not take the "
                          "result: %s", r->group->name, ddl_status_text(status));
    } else {
        ddl__request_done(r, DDL_OK);
    }
}

static void ddl__many_drained(ddl_context *c, ddl__stage *s, ddl_status status) {
    (void)c;
    ddl__many_ended(s->owner, status);
}

/* All parts are done: the tensors get their results, unless one part failed. */
static void ddl__many_done(ddl_context *c, ddl_request *r) {
    ddl__many *m = r->kept;
    ddl_request *failed = NULL;
    for (int32_t d = 0; d < DDL__DTYPES; d++) {
        if (m->parts[d] != NULL && m->parts[d]->status < 0) {
            failed = m->parts[d];
        }
    }
    for (int32_t d = 0; d < DDL__DTYPES && failed == NULL; d++) {
        if (m->packed[d] != NULL && m->there[d] == DDL_HOST) {
            ddl__many_pack(m, (ddl_dtype)d, m->packed[d], true);
        }
    }
    ddl_status status = failed != NULL ? failed->status : DDL_OK;
    if (failed != NULL) {
        ddl__request_fail(r, status, "%s", failed->why != NULL ? failed->why : ddl_status_text(status));
        return;
    }
    if (m->stage != NULL) {
        m->stage->done = ddl__many_drained;
        status = ddl__stage_drain(c, m->stage, UINT64_MAX);
        if (status < 0) { /* what other copies have begun still ends, and is not to say that all is well */
            ddl__stage_leave(c, &m->stage);
        }
    }
    if (status != DDL_IN_PROGRESS) {
        ddl__many_ended(r, status);
    }
}

static ddl_request *ddl__many_pending(ddl_request *r) {
    ddl__many *m = r->kept;
    for (int32_t d = 0; d < DDL__DTYPES; d++) {
        if (ddl__is_pending(m->parts[d])) {
            return m->parts[d];
        }
    }
    return NULL;
}

static void ddl__many_abandon(ddl_context *c, ddl_request *r) {
    for (ddl_request *part = ddl__many_pending(r); part != NULL; part = ddl__many_pending(r)) {
        part->parent = NULL;
        part->ops->abandon(c, part);
        if (ddl__is_pending(part)) {
            ddl__request_done(part, DDL_ERR_TIMEOUT);
        }
    }
    ddl__stage_leave(c, &((ddl__many *)r->kept)->stage);
}

static void ddl__many_explain(ddl_context *c, ddl_request *r, ddl__text *text) {
    ddl_request *part = ddl__many_pending(r);
    if (part != NULL) {
        part->ops->explain(c, part, text);
    } else {
        ddl__text_add(text, "all_reduce_many of group \"%s\" has ended, and a device copies the result",
                      r->group->name);
    }
}

static void ddl__many_tick(ddl_context *c, ddl_request *r, uint64_t waited) {
    ddl_request *part = ddl__many_pending(r);
    if (part != NULL) {
        part->ops->tick(c, part, waited);
    }
}

static int32_t ddl__many_expect(ddl_context *c, ddl_request *r) {
    ddl_request *part = ddl__many_pending(r);
    return part != NULL ? part->ops->expect(c, part) : -1;
}

static void ddl__many_release(ddl_context *c, ddl_request *r) { ddl__many_free(c, r); }

static const ddl__request_ops ddl__many_ops = {ddl__many_abandon, ddl__many_explain, ddl__many_tick, ddl__many_expect,
                                               ddl__many_release};

/* Adds the tensors of one type that are on devices to the stage, all where the packed memory is on one too. */
static ddl_status ddl__many_stage(ddl_context *c, ddl__many *m, ddl_dtype dtype, const char *what) {
    char *packed = m->packed[dtype];
    int32_t there = m->there[dtype];
    for (int32_t i = 0; i < m->count; i++) {
        const ddl_tensor *t = &m->tensors[i];
        uint64_t bytes = t->dtype == dtype ? (uint64_t)ddl_tensor_count(t) * ddl_dtype_bytes(dtype) : 0;
        if (bytes > 0 && (there != DDL_HOST || ddl__is_staged(t))) {
            ddl__staged *item = &m->stage->items[m->stage->count];
            DDL__TRY(ddl__stage_add(c, m->stage, t, bytes, packed, there, what));
            item->comes = item->goes = true;
            item->inside = there != DDL_HOST && ddl__is_staged(t);
        }
        packed += bytes;
    }
    return DDL_OK;
}

/* On which device the tensors of one type are packed, as one of the same length would be reduced there. */
static int32_t ddl__many_device(ddl_group *g, const ddl__many *m, ddl_dtype dtype, int64_t elements, int32_t device) {
    ddl_tensor t = ddl_tensor_1d(NULL, dtype, elements);
    t.device = device;
    ddl__call call = {.kind = DDL_ALL_REDUCE, .op = m->op, .dtype = dtype, .count = elements, .in = t, .out = t,
                      .in_place = true};
    return ddl__check_op(g, &call, "ddl_all_reduce_many") < 0 ? DDL_HOST : ddl__call_device(g, &call);
}

/* Packs the tensors of one type: when one of them is on a device there, or in pinned memory. */
static ddl_status ddl__many_memory(ddl_context *c, ddl_request *r, ddl_dtype dtype, int64_t elements,
                                   const char *what) {
    ddl__many *m = r->kept;
    size_t bytes = (size_t)elements * ddl_dtype_bytes(dtype);
    const ddl_tensor *on_device = NULL;
    for (int32_t i = 0; i < m->count; i++) {
        on_device = m->tensors[i].dtype == dtype && ddl__is_staged(&m->tensors[i]) ? &m->tensors[i] : on_device;
    }
    if (on_device != NULL) { /* an item that is not copied holds the memory of the others */
        int32_t there = ddl__many_device(r->group, m, dtype, elements, on_device->device);
        ddl__staged *holder = &m->stage->items[m->stage->count];
        DDL__TRY(ddl__stage_add(c, m->stage, on_device, bytes, NULL, there, what));
        m->packed[dtype] = holder->host;
        m->pinned[dtype] = true;
        m->there[dtype] = there;
        DDL__TRY(ddl__many_stage(c, m, dtype, what));
    } else {
        m->packed[dtype] = ddl__scratch_get(c, bytes);
    }
    if (m->packed[dtype] == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "%s: no memory to pack %zu bytes", what, bytes);
    }
    if (m->there[dtype] == DDL_HOST) {
        ddl__many_pack(m, dtype, m->packed[dtype], false);
    }
    return DDL_OK;
}

/* Starts the part of one type. held: what devices give is on its way. */
static ddl_status ddl__many_part(ddl_request *r, ddl_dtype dtype, int64_t elements, ddl_op op, bool held) {
    ddl__many *m = r->kept;
    ddl_tensor t = ddl_tensor_1d(m->packed[dtype], dtype, elements);
    t.device = m->there[dtype];
    ddl__portion portion = {.tensors = m->count, .list = m->tensors, .detail = m->detail, .held = held};
    ddl__asked ask = {.kind = DDL_ALL_REDUCE, .in = &t, .out = &t, .op = op, .portion = &portion};
    DDL__TRY(ddl__coll_begin(r->group, &ask, "ddl_all_reduce_many", &m->parts[dtype]));
    if (ddl__is_pending(m->parts[dtype])) {
        m->parts[dtype]->parent = r;
        r->parts++;
    }
    return DDL_OK;
}

/* What devices give has come: the parts begin. */
static void ddl__many_filled(ddl_context *c, ddl__stage *s, ddl_status status) {
    ddl_request *r = s->owner;
    ddl__many *m = r->kept;
    if (status < 0) {
        ddl__break_everywhere(c, r->group, DDL_ERR_SYSTEM, "rank %d could not read its tensors from a device: %s",
                              r->group->rank, ddl_status_text(status));
        return;
    }
    r->parts++; /* held until all are let go */
    for (int32_t d = 0; d < DDL__DTYPES; d++) {
        if (ddl__is_pending(m->parts[d]) && m->parts[d]->op != NULL) {
            ddl__op_release(c, m->parts[d]->op);
        }
    }
    if (--r->parts == 0) {
        ddl__many_done(c, r);
    }
}

/* Packs all, and begins to bring what is on devices. *out_held: that is under way. */
static ddl_status ddl__many_pack_all(ddl_context *c, ddl_request *r, const char *what, bool *out_held) {
    ddl__many *m = r->kept;
    int32_t staged = 0;
    for (int32_t i = 0; i < m->count; i++) {
        staged += ddl__is_staged(&m->tensors[i]);
    }
    if (staged > 0) {
        m->stage = ddl__stage_make(c, m->count + DDL__DTYPES);
        if (m->stage == NULL) {
            return ddl__error(c, DDL_ERR_NOMEM, "%s: no memory", what);
        }
        m->stage->owner = r;
        m->stage->done = ddl__many_filled;
        DDL__TRY(ddl__stage_order(r->group, r, m->stage, what));
    }
    for (int32_t d = 1; d < DDL__DTYPES; d++) {
        int64_t elements = ddl__many_pack(m, (ddl_dtype)d, NULL, false);
        DDL__TRY(elements > 0 ? ddl__many_memory(c, r, (ddl_dtype)d, elements, what) : DDL_OK);
    }
    ddl_status status = m->stage != NULL ? ddl__stage_fill(c, m->stage) : DDL_OK;
    *out_held = status == DDL_IN_PROGRESS;
    return status >= 0 ? DDL_OK
                       : ddl__error(c, status, "%s: a device did not copy a tensor to ordinary memory: %s", what,
                                    ddl_status_text(status));
}

/* Types and lengths, in the order of the list. Every part carries it, so that lists that differ meet in the first. */
static uint64_t ddl__many_hash(const ddl_tensor *tensors, int32_t count) {
    uint64_t h = (uint64_t)count;
    for (int32_t i = 0; i < count; i++) {
        h = ddl__mix(ddl__mix(h, (uint64_t)tensors[i].dtype), (uint64_t)ddl_tensor_count(&tensors[i]));
    }
    return h;
}

static int ddl__tensors_by_place(const void *a, const void *b) {
    const char *low[2], *high;
    ddl__tensor_extent(*(const ddl_tensor *const *)a, &low[0], &high);
    ddl__tensor_extent(*(const ddl_tensor *const *)b, &low[1], &high);
    return low[0] < low[1] ? -1 : low[0] > low[1];
}

/* Two tensors of one list may lie between each other's elements, but each element has one result. */
static ddl_status ddl__many_check_apart(ddl_group *g, const ddl_tensor *tensors, int32_t count, const char *what) {
    ddl_context *c = g->context;
    const ddl_tensor **sorted = ddl__scratch_get(c, (size_t)count * sizeof *sorted + 1);
    if (sorted == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "%s: no memory", what);
    }
    for (int32_t i = 0; i < count; i++) {
        sorted[i] = &tensors[i];
    }
    qsort(sorted, (size_t)count, sizeof *sorted, ddl__tensors_by_place);
    ddl_status status = DDL_OK;
    for (int32_t i = 0; i < count && status == DDL_OK; i++) {
        for (int32_t j = i + 1; j < count && ddl__tensors_overlap(sorted[i], sorted[j]) && status == DDL_OK; j++) {
            bool plain = ddl__is_contiguous(sorted[j]);
            if (plain || ddl__is_contiguous(sorted[i])) {
                bool touch = ddl__tensor_touches(sorted[plain ? i : j], sorted[plain ? j : i]);
                status = touch ? ddl__error(c, DDL_ERR_ARG, "%s: tensors %d and %d of the list overlap; each must have "
                                                            "memory of its own", what, (int)(sorted[i] - tensors),
                                            (int)(sorted[j] - tensors))
                               : DDL_OK;
            }
        }
    }
    ddl__scratch_put(c, sorted);
    return status;
}

/* Each tensor, and the elements of all of one type together. */
static ddl_status ddl__many_check(ddl_group *g, const ddl_tensor *tensors, int32_t count, ddl_op op, const char *what) {
    int64_t elements[DDL__DTYPES] = {0};
    for (int32_t i = 0; i < count; i++) {
        const ddl_tensor *t = &tensors[i];
        DDL__TRY(ddl__tensor_check(g->context, t, what, "tensors"));
        DDL__TRY(ddl__tensor_check_output(g->context, t, what, "tensors"));
        ddl__call call = {.kind = DDL_ALL_REDUCE, .dtype = t->dtype, .op = op};
        DDL__TRY(ddl__check_op(g, &call, what));
        int64_t most = DDL__WHOLE_MAX / (int64_t)ddl_dtype_bytes(t->dtype) / g->size;
        if (ddl_tensor_count(t) > most - elements[t->dtype]) {
            return ddl__too_large(g, what);
        }
        elements[t->dtype] += ddl_tensor_count(t);
    }
    return ddl__many_check_apart(g, tensors, count, what);
}

static ddl_status ddl__many_begin(ddl_group *g, const ddl_tensor *tensors, int32_t count, ddl_op op,
                                  const char *what, ddl_request **out) {
    ddl_context *c = g->context;
    DDL__TRY(ddl__group_usable(g, what));
    DDL__TRY(ddl__many_check(g, tensors, count, op, what));
    ddl_request *r;
    DDL__TRY(ddl__request_new(g, &ddl__many_ops, &r));
    ddl__many *m = ddl__alloc(&c->base, sizeof *m + (size_t)count * sizeof *tensors);
    if (m == NULL) {
        ddl__request_release(r);
        return ddl__error(c, DDL_ERR_NOMEM, "%s: no memory", what);
    }
    r->kept = m;
    r->parts_done = ddl__many_done;
    m->count = count;
    m->op = op;
    m->detail = ddl__many_hash(tensors, count);
    if (count > 0) {
        memcpy(m->tensors, tensors, (size_t)count * sizeof *tensors);
    }
    r->parts = 1; /* held until all are started */
    bool any = false, held = false;
    ddl_status status = ddl__many_pack_all(c, r, what, &held);
    for (int32_t d = 1; d < DDL__DTYPES && status == DDL_OK; d++) {
        if (m->packed[d] != NULL) {
            any = true;
            status = ddl__many_part(r, (ddl_dtype)d, ddl__many_pack(m, (ddl_dtype)d, NULL, false), op, held);
        }
    }
    if (status == DDL_OK && !any) { /* nothing to reduce is still a call that others must make too */
        status = ddl__many_part(r, DDL_U8, 0, DDL_MAX, false);
    }
    if (status < 0) {
        ddl__many_abandon(c, r);
        ddl__request_release(r);
        return status;
    }
    if (--r->parts == 0) {
        ddl__many_done(c, r);
    }
    *out = r;
    return DDL_OK;
}

static ddl_status ddl__many_call(ddl_group *g, const ddl_tensor *tensors, int32_t count, ddl_op op,
                                 ddl_request **out_request) {
    const char *what = out_request != NULL ? "ddl_iall_reduce_many" : "ddl_all_reduce_many";
    if (out_request != NULL) {
        *out_request = NULL;
    }
    DDL__TRY(ddl__enter_ordered(g, what, 1));
    ddl_context *c = g->context;
    ddl_request *r = NULL;
    ddl__glance(g);
    ddl_status status = count < 0 || (count > 0 && tensors == NULL)
                            ? ddl__error(c, DDL_ERR_ARG, "%s: %d tensors at NULL are not possible", what, count)
                            : ddl__many_begin(g, tensors, count, op, what, &r);
    ddl__marks_drop(g);
    if (status == DDL_OK && out_request != NULL) {
        *out_request = r;
    } else if (status == DDL_OK && !(r->ordered && ddl__request_detach(c, r))) {
        ddl__wait_requests(c, &r, 1, false);
        status = ddl__request_report(&r, NULL);
    }
    ddl__unlock(c);
    return status;
}

DDL_API ddl_status ddl_all_reduce_many(ddl_group *group, const ddl_tensor *tensors, int32_t tensor_count, ddl_op op) {
    return ddl__many_call(group, tensors, tensor_count, op, NULL);
}

DDL_API ddl_status ddl_iall_reduce_many(ddl_group *group, const ddl_tensor *tensors, int32_t tensor_count, ddl_op op,
                                        ddl_request **out_request) {
    return out_request == NULL ? ddl__refuse_group(group, "ddl_iall_reduce_many", "out_request")
                               : ddl__many_call(group, tensors, tensor_count, op, out_request);
}

/* >>persistent */

/* A checked call with arrays of its own, and what it holds until ddl_request_free: the plan and the op of the user. */
typedef struct ddl__kept {
    ddl__call call;
    ddl__cached *cached;
    ddl__user_op *user;
    int64_t arrays[];
} ddl__kept;

static ddl__kept *ddl__keep(ddl_group *g, const ddl__call *call) {
    size_t n = (size_t)g->size;
    ddl__kept *k = ddl__alloc(&g->context->base, sizeof *k + 4 * n * sizeof(int64_t));
    if (k == NULL) {
        return NULL;
    }
    k->call = *call;
    const int64_t **arrays[4] = {&k->call.counts, &k->call.offsets, &k->call.recv_counts, &k->call.recv_offsets};
    for (int32_t i = 0; i < ddl__call_arrays(call); i++) {
        memcpy(k->arrays + (size_t)i * n, *arrays[i], n * sizeof(int64_t));
        *arrays[i] = k->arrays + (size_t)i * n;
    }
    k->user = ddl__user_op_of(g->context, call->op);
    if (k->user != NULL) {
        k->user->users++;
    }
    return k;
}

static void ddl__persistent_unpin(ddl__kept *k) {
    if (k->cached != NULL) {
        k->cached->pins--;
        k->cached->held--;
        k->cached = NULL;
    }
}

/* Holds the plan and an op that is ready to run; again only after ddl_group_set has changed how to plan. */
static ddl_status ddl__persistent_pin(ddl_group *g, ddl__kept *k) {
    ddl__cached *cached;
    if (k->cached != NULL && k->cached->settings_version == g->settings_version) {
        return DDL_OK;
    }
    ddl__call_settle_place(g, &k->call);
    DDL__TRY(ddl__cached_get(g, &k->call, &cached));
    while (cached->spares <= cached->held) {
        ddl__op *op = ddl__op_make(g->context, cached);
        if (op == NULL) {
            return ddl__error(g->context, DDL_ERR_NOMEM, "no memory to plan an operation on group \"%s\"", g->name);
        }
        cached->held++;
        ddl__op_put(g->context, cached, op);
        cached->held--;
    }
    ddl__persistent_unpin(k);
    cached->pins++;
    cached->held++;
    k->cached = cached;
    return DDL_OK;
}

static void ddl__persistent_release(ddl_context *c, ddl_request *r) {
    ddl__kept *k = r->kept;
    ddl__persistent_unpin(k);
    if (k->user != NULL) {
        ddl__user_op_drop(c, k->user);
    }
}

static const ddl__request_ops ddl__persistent_ops = {ddl__coll_abandon, ddl__coll_explain, ddl__coll_tick,
                                                     ddl__coll_expect, ddl__persistent_release};

static ddl_status ddl__persistent_make(ddl_group *g, const ddl_collective *d, ddl_request **out) {
    ddl_context *c = g->context;
    ddl__call call;
    ddl__blocks blocks = ddl__blocks_of(d);
    ddl__asked ask = ddl__asked_of(d, &blocks);
    DDL__TRY(ddl__group_usable(g, "ddl_collective_init"));
    DDL__TRY(ddl__call_make(g, &ask, &call, "ddl_collective_init"));
    ddl__call_settle_place(g, &call);
    call.later = true;
    ddl_request *r;
    DDL__TRY(ddl__request_new(g, &ddl__persistent_ops, &r));
    r->kept = ddl__keep(g, &call);
    ddl_status status = r->kept != NULL ? ddl__persistent_pin(g, r->kept)
                                        : ddl__error(c, DDL_ERR_NOMEM, "ddl_collective_init: no memory");
    if (status < 0) {
        ddl__request_release(r);
        return status;
    }
    r->persistent = true;
    r->state = DDL__REQUEST_IDLE;
    *out = r;
    return DDL_OK;
}

DDL_API ddl_status ddl_collective_init(ddl_group *group, const ddl_collective *collective, ddl_request **out_request) {
    if (out_request != NULL) {
        *out_request = NULL;
    }
    if (collective == NULL || out_request == NULL) {
        return ddl__refuse_group(group, "ddl_collective_init", collective == NULL ? "collective" : "out_request");
    }
    DDL__TRY(ddl__enter_group(group, "ddl_collective_init"));
    ddl_status status = ddl__persistent_make(group, collective, out_request);
    ddl__unlock(group->context);
    return status;
}

static ddl_status ddl__persistent_start(ddl_context *c, ddl_request *r) {
    if (!r->persistent || r->state != DDL__REQUEST_IDLE) {
        return ddl__error(c, DDL_ERR_STATE,
                          r->persistent ? "ddl_start: the operation is still running; wait for it first"
                                        : "ddl_start: the request is not of ddl_collective_init");
    }
    ddl__kept *k = r->kept;
    ddl__glance(r->group);
    DDL__TRY(ddl__group_usable(r->group, "ddl_start"));
    DDL__TRY(ddl__persistent_pin(r->group, k));
    ddl__free(&c->base, r->why);
    r->why = NULL;
    r->status = DDL_OK;
    return ddl__call_run(r->group, &k->call, k->cached, k->user, r);
}

DDL_API ddl_status ddl_start(ddl_request *request) {
    ddl_request *list[1] = {request};
    ddl_context *c;
    if (request == NULL) {
        return DDL_ERR_ARG;
    }
    DDL__TRY(ddl__enter_requests(list, 1, "ddl_start", &c));
    ddl_status status = ddl__persistent_start(c, request);
    ddl__unlock(c);
    return status;
}

/* >>estimate */

DDL_API ddl_status ddl_estimate(ddl_group *group, const ddl_collective *collective, ddl_estimate_info *out_estimate) {
    if (collective == NULL || out_estimate == NULL) {
        return ddl__refuse_group(group, "ddl_estimate", collective == NULL ? "collective" : "out_estimate");
    }
    DDL__TRY(ddl__enter_group(group, "ddl_estimate"));
    ddl__call call;
    ddl__blocks blocks = ddl__blocks_of(collective);
    ddl__asked ask = ddl__asked_of(collective, &blocks);
    ddl_status status = ddl__call_make(group, &ask, &call, "ddl_estimate");
    if (status == DDL_OK) {
        ddl__plan_args args = ddl__call_args(group, &call);
        ddl__choice choice = ddl__tune_choose(&group->tuning, &args);
        bool far = group->context->host_count > 1;
        ddl_context *c = group->context;
        int32_t peer = group->ranks[(group->rank + 1) % group->size];
        *out_estimate = (ddl_estimate_info){
            .seconds = choice.seconds,
            .algorithm = choice.algo->name,
            .transport = c->links[peer].endpoint != NULL ? c->links[peer].endpoint->plugin->name : "none",
            .latency_s = group->tuning.model.latency_s[far],
            .seconds_per_byte = group->tuning.model.s_per_byte[far],
        };
    }
    ddl__unlock(group->context);
    return status;
}

#endif /* DDL_COLL_MANY_H */

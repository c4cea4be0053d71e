/* engine: collectives that a transport runs by itself, by load and store, for the ranks of one host (plugin.h,
 * native_*). In a plan such a collective is one step. The ranks of a group agree on whether they have it when the group
 * is made, because all must choose alike. */
#ifndef DDL_ENGINE_NATIVE_H
#define DDL_ENGINE_NATIVE_H

#include "op.h"

static void ddl__step_finish(ddl__op *op, uint32_t i);
static void ddl__op_run(ddl_context *c, ddl__op *op);
static void ddl__mismatch_seen(ddl_context *c, ddl_group *g, int32_t peer, uint32_t sequence);

/* >>set */

/* The ranks of a group that are on this host, in group order, as world ranks. Returns how many; *out_rank: which of
 * them is this one. */
static int32_t ddl__native_ranks(const ddl_group *g, int32_t *out, int32_t *out_rank) {
    int32_t count = 0;
    for (int32_t i = 0; i < g->size; i++) {
        if (g->host_of[i] == g->host_of[g->rank]) {
            *out_rank = i == g->rank ? count : *out_rank;
            out[count++] = g->ranks[i];
        }
    }
    return count;
}

/* The endpoint through which this rank reaches all of them, if it can run collectives; else NULL. */
static ddl__endpoint *ddl__native_endpoint(const ddl_context *c, const int32_t *ranks, int32_t count, bool device) {
    ddl__endpoint *all = NULL;
    for (int32_t i = 0; i < count; i++) {
        const ddl__link *l = &c->links[ranks[i]];
        ddl__endpoint *e = device ? l->device : l->native != NULL ? l->native : l->endpoint;
        if (ranks[i] == c->rank) {
            continue;
        }
        if (e == NULL || (all != NULL && e != all)) {
            return NULL;
        }
        all = e;
    }
    return all != NULL && DDL_HAS(all->table, native_open) ? all : NULL;
}

/* What can run collectives of a group by itself. */
enum {
    DDL__NATIVE_HOST = 1,
    DDL__NATIVE_DEVICE = 2,
    DDL__NATIVE_STRAIGHT = 4, /* see ddl_group.straight, */
    DDL__NATIVE_FOLDS = 8,    /* folds, */
    DDL__NATIVE_PULLED = 16   /* and pulled */
};

/* Where devices take part: in groups within a host, and where all hosts have as many members, two or more. */
static bool ddl__native_fits_devices(const ddl_group *g) {
    ddl__plan_args args = {.size = g->size, .rank = g->rank, .host_of = g->host_of};
    return ddl__host_count(&args) == 1 || ddl__can_hierarchy(&args);
}

/* Whether messages from and to the first device here leave the hosts out, whichever rank of the group they go to. */
static bool ddl__straight_reaches(const ddl_group *g) {
    const ddl_context *c = g->context;
    const ddl__device *d = c->devices != NULL && c->devices->count > 0 ? &c->devices->list[0] : NULL;
    bool all = d != NULL && g->size > 1;
    for (int32_t i = 0; all && i < g->size; i++) {
        const ddl__link *l = &c->links[g->ranks[i]];
        const ddl__endpoint *e = l->device != NULL ? l->device : l->endpoint;
        void *memory = NULL;
        ddl_memory_key key;
        all = i == g->rank ||
              (e != NULL && DDL_HAS(e->table, get) &&
               (l->device != NULL ||
                (!c->settings.mac && DDL_HAS(e->table, memory_register_on) &&
                 e->table->memory_register_on(e->self, d->plugin->name, d->index, NULL, 0, &memory, &key) == DDL_OK)));
        if (memory != NULL) {
            e->table->memory_release(e->self, memory); /* more than was asked for */
        }
    }
    return all;
}

/* Whether all others read the large messages of this rank. */
static bool ddl__pulled_by_all(const ddl_group *g) {
    bool all = g->size > 1;
    for (int32_t i = 0; all && i < g->size; i++) {
        const ddl__endpoint *e = g->context->links[g->ranks[i]].endpoint;
        all = i == g->rank || (e != NULL && (e->table->flags & DDL_TRANSPORT_PULLS) != 0);
    }
    return all;
}

/* Whether all devices here reduce and scale. */
static bool ddl__devices_fold(const ddl_context *c) {
    bool all = c->devices != NULL;
    for (int32_t i = 0; all && i < c->devices->count; i++) {
        const ddl_device *d = c->devices->list[i].table;
        all = DDL_HAS(d, reduce) && DDL_HAS(d, kernel);
    }
    return all;
}

/* Opens this rank's parts: those for ordinary memory, and for devices. Returns which
 * there are (the others go by plans); that all ranks use the same is for the caller to see to. */
static int32_t ddl__native_open(ddl_group *g) {
    ddl_context *c = g->context;
    int32_t *ranks = ddl__alloc_array(&c->base, (size_t)g->size, sizeof *ranks);
    int32_t rank = 0, count = ranks != NULL ? ddl__native_ranks(g, ranks, &rank) : 0, opened = 0;
    uint64_t id = (uint64_t)g->epoch << 32 | g->id;
    for (int32_t device = 0; device < (ddl__native_fits_devices(g) ? 2 : 1); device++) {
        ddl__endpoint *e = ddl__native_endpoint(c, ranks, count, device);
        void *set = NULL;
        if (e != NULL && e->table->native_open(e->self, id, ranks, count, rank, &set) == DDL_OK) {
            *(device ? &g->device_native : &g->native) =
                (ddl__native){.table = e->table, .self = e->self, .set = set};
            g->settings_version++;
            opened |= device ? DDL__NATIVE_DEVICE : DDL__NATIVE_HOST;
        }
    }
    ddl__free(&c->base, ranks);
    g->straight = ddl__straight_reaches(g);
    g->folds = g->straight && ddl__devices_fold(c);
    opened |= (g->straight ? DDL__NATIVE_STRAIGHT : 0) | (g->folds ? DDL__NATIVE_FOLDS : 0);
    return opened | (ddl__pulled_by_all(g) ? DDL__NATIVE_PULLED : 0);
}

static void ddl__native_close_one(ddl_group *g, ddl__native *n) {
    if (n->set != NULL) {
        n->table->native_close(n->self, n->set);
        n->set = NULL;
        g->settings_version++;
    }
}

/* Closes all but what is to be kept. */
static void ddl__native_close(ddl_group *g, int32_t keep) {
    if ((keep & DDL__NATIVE_HOST) == 0) {
        ddl__native_close_one(g, &g->native);
    }
    if ((keep & DDL__NATIVE_DEVICE) == 0) {
        ddl__native_close_one(g, &g->device_native);
    }
    bool straight = g->straight && (keep & DDL__NATIVE_STRAIGHT) != 0;
    bool folds = g->folds && (keep & DDL__NATIVE_FOLDS) != 0;
    bool pulled = (keep & DDL__NATIVE_PULLED) != 0;
    g->settings_version += g->straight != straight || g->folds != folds || g->pulled != pulled;
    g->straight = straight;
    g->folds = folds;
    g->pulled = pulled;
}

/* >>operation */

/* On this rank a device or an adapter failed in step i; op ends as soon as ddl__op_run sees it. The first counts. */
static void ddl__step_failed(ddl__op *op, uint32_t i, ddl_status status) {
    if (op->move_failed >= 0) {
        op->move_failed = status;
        op->failed_step = &op->cached->plan.steps[i];
    }
}

/* As a transport calls it. */
static void ddl__native_reduce(void *arg, void *dst, const void *const *srcs, int32_t src_count, uint64_t bytes) {
    if (src_count == 2) {
        ddl__reduce_pair(arg, dst, srcs[0], srcs[1], bytes);
    } else {
        ddl__reduce_many(arg, dst, (const char *const *)srcs, src_count, bytes);
    }
}

static void ddl__native_unlist(ddl_context *c, ddl__op *op) {
    ddl__op **at = &c->natives;
    while (*at != op) {
        at = &(*at)->native_next;
    }
    *at = op->native_next;
    c->device_natives -= op->call.on_device != DDL_HOST;
    op->native = NULL;
    op->is_native = false;
}

/* The group's rank of a rank of its set. */
static int32_t ddl__native_rank(const ddl_group *g, int32_t rank) {
    for (int32_t i = 0; rank >= 0 && i < g->size; i++) {
        if (g->host_of[i] == g->host_of[g->rank] && rank-- == 0) {
            return i;
        }
    }
    return -1;
}

/* On this rank alone, as far as is known: the others wait for it, so that they have to be told. The operation is still
 * listed: what others may write to is taken away from them (ddl__native_abandon). */
static void ddl__native_failed(ddl_context *c, const ddl__op *op, ddl_status status) {
    ddl_group *g = op->group;
    ddl__break_everywhere(c, g, ddl__may_break(status) ? status : DDL_ERR_INTERNAL,
                          "the transport of rank %d %s %s: %s", g->rank,
                          op->native == NULL ? "cannot begin" : "failed in", ddl__kind_name(op->call.kind),
                          ddl_status_text(status));
}

/* Looks at one. True: it moved, and op may be gone. */
static bool ddl__native_look(ddl_context *c, ddl__op *op, int32_t looks) {
    ddl_group *g = op->group;
    int32_t rank = -1;
    if (g->doubt_ns != 0) {
        return false; /* it cannot end any more: the group breaks as soon as the other call is spelled out */
    }
    ddl_status status = op->native == NULL ? op->native_refused
                                           : op->runner->table->native_test(op->runner->self, op->runner->set,
                                                                            op->native, looks, &rank);
    op->native_waits = ddl__native_rank(g, rank);
    if (status == DDL_IN_PROGRESS) {
        op->late = op->native_waits >= 0 ? op->native_waits : op->late;
        return false;
    }
    if (status == DDL_ERR_MISMATCH) {
        ddl__mismatch_seen(c, g, ddl__native_rank(g, rank), op->sequence);
        return true;
    }
    if (status < 0) {
        ddl__native_failed(c, op, status);
        return true;
    }
    ddl__native_unlist(c, op);
    ddl__step_finish(op, op->native_step);
    ddl__op_run(c, op);
    return true;
}

static int32_t ddl__natives_miss(const ddl_context *c) {
    const ddl__op *op = c->natives;
    return op != NULL && op->native_waits >= 0 ? op->group->ranks[op->native_waits] : -1;
}

static int32_t ddl__natives_poll(ddl_context *c) {
    int32_t moved = 0;
    for (ddl__op *op = c->natives, *next; op != NULL; op = next) {
        next = op->native_next;
        if (ddl__native_look(c, op, 1)) {
            return moved + 1; /* the list may be another one now */
        }
    }
    return moved;
}

/* From now on it is looked at. Operations of a set end in order. `status` is that of native_start: what could not
 * begin fails at the next look, as other steps are being started here. */
static void ddl__native_list(ddl_context *c, ddl__op *op, uint32_t step, ddl_status status, void *native) {
    op->native = status == DDL_OK ? native : NULL;
    op->native_refused = status;
    op->native_step = step;
    op->native_next = NULL;
    op->native_waits = -1;
    op->is_native = true;
    c->device_natives += op->call.on_device != DDL_HOST;
    ddl__kick(c); /* who sleeps for all has not looked at it, and what it needs may be there: nobody else wakes it */
    ddl__op **end = &c->natives;
    while (*end != NULL) {
        end = &(*end)->native_next;
    }
    *end = op;
}

/* The plugin's kernels reduce: they are told how. */
static void ddl__native_on_device(const ddl__op *op, ddl_native_call *call) {
    bool scaled = op->user != NULL; /* a program's function does not come here */
    call->reduce = NULL;
    call->reduce_arg = NULL;
    call->dtype = (int32_t)op->call.dtype;
    call->op = scaled ? DDL_SUM : op->call.op;
    call->device = op->device->index + 1;
    call->stream = op->stream;
    call->event = op->mark;
    call->capture = op->captured;
    call->factor = scaled ? op->user->factor : op->call.op == DDL_AVG ? 1.0 / op->group->size : 1.0;
    if (!ddl__op_native_alone(op) && op->call.op == DDL_AVG) { /* a sum of sums, divided later: ddl__step_move */
        call->op = DDL_SUM;
        call->factor = ddl__averages_scaled(op->group, &op->call) ? ddl__average_scale(op->group->size) : 1.0;
    }
}

static void ddl__native_begin(ddl_context *c, ddl__op *op, uint32_t i) {
    const ddl__step *s = &op->cached->plan.steps[i];
    char *in = op->base[s->src_space], *out = op->base[s->dst_space];
    ddl_native_call call = {.size = sizeof call,
                            .kind = (int32_t)s->slot,
                            .root = s->peer,
                            .element_bytes = op->cached->element_bytes,
                            .sequence = ++op->runner->sequence,
                            .signature = op->call.signature + op->cached->native_count - op->natives_left,
                            .in = in != NULL ? in + s->src : NULL,
                            .out = out != NULL ? out + s->dst : NULL,
                            .bytes = (uint64_t)s->bytes,
                            .reduce = ddl__native_reduce,
                            .reduce_arg = &op->reduction};
    void *native = NULL;
    if (op->call.on_device != DDL_HOST) {
        ddl__native_on_device(op, &call);
    }
    ddl_status status = op->runner->table->native_start(op->runner->self, op->runner->set, &call, &native);
    op->mark = status == DDL_OK ? NULL : op->mark;
    ddl__native_list(c, op, i, status, native);
    op->natives_left--;
}

/* Operations of a set begin in the same order on all ranks: those of a group in the order of its calls, whatever
 * becomes ready first. */
static bool ddl__native_has_turn(const ddl__op *op) {
    for (const ddl__op *o = op->group->ops; o != NULL; o = o->next) {
        if (o->natives_left > 0 && (int32_t)(o->sequence - op->sequence) < 0) {
            return false;
        }
    }
    return true;
}

/* Begins a native step, or leaves it until earlier calls have begun theirs; those that waited for this one follow. */
static void ddl__step_native(ddl_context *c, ddl__op *op, uint32_t i) {
    if (!ddl__native_has_turn(op)) {
        op->native_parked = i;
        return;
    }
    ddl__native_begin(c, op, i);
    for (ddl__op *next = op; next != NULL && next->natives_left == 0;) {
        next = NULL;
        for (ddl__op *o = op->group->ops; o != NULL; o = o->next) {
            next = o->native_parked != DDL__NO_STEP && ddl__native_has_turn(o) ? o : next;
        }
        if (next != NULL) {
            i = next->native_parked;
            next->native_parked = DDL__NO_STEP;
            ddl__native_begin(c, next, i);
        }
    }
}

/* Takes an operation's memory back from the transport and from all ranks. */
static void ddl__native_abandon(ddl_context *c, ddl__op *op) {
    if (op->native != NULL) {
        op->runner->table->native_cancel(op->runner->self, op->runner->set, op->native);
    }
    if (op->is_native) {
        ddl__native_unlist(c, op);
    }
}

#endif /* DDL_ENGINE_NATIVE_H */

/* engine, first part: a collective that runs, and the plans that are kept for the next time.
 * It must not know what a collective means: only steps, memory and messages. */
#ifndef DDL_ENGINE_OP_H
#define DDL_ENGINE_OP_H

#include "reduction.h"

enum { DDL__CACHED_MAX = 64 };

/* What a program's own op is: two that have the same number on two ranks must be alike in this too. */
typedef enum ddl__nature { DDL__OF_OURS, DDL__SCALED_SUM, DDL__FUNCTION, DDL__FUNCTION_IN_ORDER } ddl__nature;

/* A call after its arguments were checked: what a plan is made from, and what the sentence of an error says. */
typedef struct ddl__call {
    ddl_kind kind;
    ddl_op op;
    ddl_dtype dtype;
    int32_t root;
    int64_t count;
    ddl_tensor in, out;
    bool in_place, commutative;
    bool held; /* see ddl__op: all_reduce_many lets it go */
    bool later; /* a stream does not wait for it by itself */
    int32_t on_device; /* DDL_HOST, or the one whose memory its plan works on */
    const int64_t *counts, *offsets, *recv_counts, *recv_offsets; /* never NULL in v-forms */
    int64_t in_bytes, out_bytes;                                 /* of the packed tensors of this rank */
    int32_t tensors; /* of all_reduce_many, whose part this is; 0: a call of its own */
    const ddl_tensor *list; /* they; NULL in a record */
    uint8_t nature;  /* ddl__nature */
    uint64_t detail; /* hash of what count does not say: lengths of a v-form, the tensors of all_reduce_many */
    uint64_t call_hash, signature; /* see ddl__flight */
} ddl__call;

typedef struct ddl__step_state {
    ddl__outgoing out;
    struct ddl__op *op;
    struct ddl__step_state *held_next;
    uint32_t waits;
    bool ready, arrived, finished, in_transport;
    uint64_t start_ns;    /* when it could start; of an op that is traced */
    uint64_t moved;       /* bytes received, or given to the transport */
    unsigned char *early; /* bytes that came before the step was ready */
    ddl__stage *move;     /* its copy to or from a device, while that is under way */
    ddl_request *message; /* of a straight plan: what sends or receives its data, until that was seen to end */
    struct ddl__step_state *message_next; /* of the op's */
    ddl__landing *landing;
} ddl__step_state;

typedef struct ddl__op {
    struct ddl__op *next; /* of the group's running ones */
    ddl_group *group;
    ddl_request *request;
    struct ddl__cached *cached;
    ddl__call call;
    uint32_t sequence;
    uint32_t left; /* steps that have not finished */
    bool traced;   /* its steps are */
    bool running;  /* inside ddl__op_run: newly ready steps only queue up */
    bool held;     /* its input is not there yet: no step begins */
    ddl__stage *stage; /* of tensors that it does not work on where they are; NULL: there are none */
    ddl__stage *scratch; /* of one that runs on devices: TMP, pinned memory, and THERE; NULL: it has neither */
    ddl_status move_failed; /* a copy or kernel could not begin, or a message failed */
    const ddl__step *failed_step; /* that was it */
    ddl__step_state *messages; /* steps that have one */
    struct ddl__op *messaging_next; /* of the context's, while there are some */
    ddl__device *device; /* that it runs on; NULL: on none */
    void *stream;        /* of that device, on which it is ordered; NULL: on none */
    void *mark;          /* an event there, for the transport; NULL: that makes one, or has it */
    bool captured;       /* stream is being captured into a graph, and it goes into that */
    char *base[DDL__SPACES]; /* by ddl__space */
    void *packed_in, *packed_out, *tmp;
    ddl__lasting lasting; /* of tmp */
    ddl__reduction reduction;
    ddl__user_op *user;
    ddl__step_state *steps;
    uint32_t *ready; /* a queue of step numbers */
    uint32_t ready_first, ready_count, cursor;
    uint64_t asked_ns;
    int32_t late;     /* the rank of the group that was the last to arrive since this one did; -1: nobody came later */
    uint64_t late_ns; /* when; 0: at the end */
    struct ddl__answer *answers; /* by group rank, once somebody was asked */
    struct ddl__op *native_next; /* of the context's natives */
    ddl__native *runner;       /* who runs its native steps */
    void *native;              /* what a transport runs for the step native_step ... */
    ddl_status native_refused; /* ... NULL: it could not begin, and why */
    uint32_t native_step;
    int32_t native_waits; /* a rank whose part is missing; -1: none, or not known */
    int32_t last_peer; /* whose part came last; -1: none has come */
    uint32_t natives_left; /* native steps that have not begun */
    uint32_t native_parked; /* one that is ready, before its turn; DDL__NO_STEP: none */
    bool is_native; /* on that list */
} ddl__op;

typedef struct ddl__cached {
    struct ddl__cached *next; /* most recently used first */
    ddl_kind kind;
    int32_t element_bytes, root, pins; /* pins: running ops and persistent requests */
    int32_t slow_runs;                 /* of the last ones, in a row: see account.h */
    int32_t held, spares;              /* persistent requests, for each of which an op is kept */
    int64_t count;
    bool in_place, commutative, on_device;
    bool folds, scaled; /* see ddl__plan_args */
    uint32_t settings_version;
    int64_t *arrays; /* copies of the v-forms' arrays, in the order of ddl__call */
    int32_t array_count;
    ddl__plan plan;
    uint32_t *recvs; /* receiving steps, sorted by (peer, slot) */
    uint32_t recv_count, native_count;
    double estimate_s;
    uint64_t algorithm_hash;
    ddl__op *spare; /* ops with all their arrays, for the next runs */
} ddl__cached;

/* A frame that came before this rank called its collective. */
typedef struct ddl__early {
    struct ddl__early *next;
    int32_t source;
    ddl__frame frame;
    unsigned char data[];
} ddl__early;

/* Elements of a call; of a v-form those of all ranks together. */
static int64_t ddl__call_elements(const ddl_group *g, const ddl__call *call) {
    int64_t total = call->count;
    for (int32_t i = 0; i < g->size && call->counts != NULL; i++) {
        total += call->counts[i];
    }
    return total;
}

/* "as 3+4+3": what the ranks have, as far as it fits, and a digest of it all. */
static void ddl__describe_counts(const ddl_group *g, const ddl__call *call, ddl__text *text) {
    for (int32_t i = 0; i < DDL__MIN(g->size, 8) && call->counts != NULL; i++) {
        ddl__text_add(text, "%s%lld", i > 0 ? "+" : " as ", (long long)call->counts[i]);
    }
    ddl__text_add(text, "%s", call->counts != NULL && g->size > 8 ? "+..." : "");
    if (call->detail != 0) {
        ddl__text_add(text, " (#%08x)", (unsigned)call->detail);
    }
}

/* The tensors of all_reduce_many, as far as it fits, and a digest of all. */
static void ddl__describe_list(const ddl__call *call, ddl__text *text) {
    ddl__text_add(text, "%d tensors", call->tensors);
    for (int32_t i = 0; i < DDL__MIN(call->tensors, 6) && call->list != NULL; i++) {
        ddl__text_add(text, "%s%lld x %s", i > 0 ? " + " : ": ", (long long)ddl_tensor_count(&call->list[i]),
                      ddl_dtype_name(call->list[i].dtype));
    }
    ddl__text_add(text, "%s (#%08x)", call->list != NULL && call->tensors > 6 ? " + ..." : "", (unsigned)call->detail);
}

static void ddl__describe_call(const ddl_group *g, const ddl__call *call, const char *algorithm, ddl__text *text) {
    static const char *const natures[] = {"", "a scaled sum", "a function", "a function, not commutative"};
    ddl__text_add(text, "%s%s(", ddl__kind_name(call->kind), call->tensors > 0 ? "_many" : "");
    if (call->tensors > 0) {
        ddl__describe_list(call, text);
    } else if (call->kind != DDL_BARRIER) {
        ddl__text_add(text, "%lld x %s", (long long)ddl__call_elements(g, call), ddl_dtype_name(call->dtype));
    }
    if (ddl__kind_is_v(call->kind)) {
        ddl__describe_counts(g, call, text);
    }
    if (call->op >= 256) {
        ddl__text_add(text, ", op %d, %s", call->op, natures[call->nature]);
    } else if (call->op != DDL_OP_NONE) {
        ddl__text_add(text, ", %s", ddl__op_name(call->op));
    }
    ddl_kind base = ddl__kind_base(call->kind);
    if (base == DDL_BROADCAST || base == DDL_REDUCE || base == DDL_GATHER || base == DDL_SCATTER) {
        ddl__text_add(text, ", root %d", call->root);
    }
    ddl__text_add(text, ") by %s", algorithm != NULL ? algorithm : "?");
}

static const int64_t *ddl__call_array(const ddl__call *call, int32_t which) {
    const int64_t *arrays[4] = {call->counts, call->offsets, call->recv_counts, call->recv_offsets};
    return arrays[which];
}

static int32_t ddl__call_arrays(const ddl__call *call) {
    return call->counts == NULL ? 0 : call->recv_counts != NULL ? 4 : 2;
}

/* A sum of n values of f16 near the largest does not fit in f16, though their average does: inputs are scaled down
 * before the sum. By a power of two, which changes no digit of a value above n times the smallest normal one. So are
 * the 8-bit floats, whose values are usually scaled to reach up to the largest. */
static bool ddl__averages_scaled(const ddl_group *g, const ddl__call *call) {
    bool small = call->dtype == DDL_F16 || ddl__dtype_is_byte_float(call->dtype);
    return call->op == DDL_AVG && small && g->size > 1;
}

/* The largest power of two that is not above 1 / n. */
static double ddl__average_scale(int32_t n) {
    double scale = 1;
    while (n * scale > 1) {
        scale /= 2;
    }
    return scale;
}

/* Its inputs are multiplied by something before they are reduced. */
static bool ddl__is_scaled(const ddl_group *g, const ddl__call *call, const ddl__user_op *user) {
    return user != NULL ? user->fn == NULL : ddl__averages_scaled(g, call);
}

/* The same, of a call; and whether a device has a kernel for its op. */
static bool ddl__call_scaled(const ddl_group *g, const ddl__call *call) {
    return call->nature == DDL__SCALED_SUM || ddl__averages_scaled(g, call);
}

static bool ddl__call_folds(const ddl__call *call) { return call->nature <= DDL__SCALED_SUM; }

static void ddl__op_scale(const ddl__op *op, char *at, size_t bytes) {
    const ddl__call *call = &op->call;
    double factor = op->user != NULL ? op->user->factor : ddl__average_scale(op->group->size);
    ddl__scale(at, at, bytes / ddl_dtype_bytes(call->dtype), call->dtype, factor);
}

/* Nothing but a collective that a transport runs by itself. */
static bool ddl__op_native_alone(const ddl__op *op) {
    return op->cached->native_count == 1 && op->cached->plan.step_count == 1;
}

/* >>memory of an op */

static void ddl__op_free(ddl_context *c, ddl__op *op) {
    if (op != NULL) {
        ddl__free(&c->base, op->steps);
        ddl__free(&c->base, op->ready);
        ddl__lasting_drop(c, &op->lasting);
        ddl__free(&c->base, op->tmp);
        ddl__free(&c->base, op->answers);
        ddl__free(&c->base, op);
    }
}

/* Of one that has ended, or did not begin. */
static void ddl__op_unmark(ddl__op *op) {
    if (op->mark != NULL) {
        op->device->table->event_free(op->device->self, op->mark);
        op->mark = NULL;
    }
}

/* Keeps an op for the next run: one, or as many as there are persistent requests that may run at once. */
static void ddl__op_put(ddl_context *c, ddl__cached *cached, ddl__op *op) {
    ddl__op_unmark(op);
    if (cached->spares < DDL__MAX(cached->held, 1)) {
        op->next = cached->spare;
        cached->spare = op;
        cached->spares++;
    } else {
        ddl__op_free(c, op);
    }
}

static ddl__op *ddl__op_make(ddl_context *c, const ddl__cached *cached) {
    size_t steps = DDL__MAX(cached->plan.step_count, 1u);
    ddl__op *op = ddl__alloc(&c->base, sizeof *op);
    if (op == NULL) {
        return NULL;
    }
    op->steps = ddl__alloc_array(&c->base, steps, sizeof *op->steps);
    op->ready = ddl__alloc_array(&c->base, steps, sizeof *op->ready);
    op->tmp = ddl__alloc(&c->base, cached->on_device ? 0 : (size_t)cached->plan.tmp_bytes); /* else it is pinned */
    if (op->steps == NULL || op->ready == NULL || op->tmp == NULL) {
        ddl__op_free(c, op);
        return NULL;
    }
    ddl__lasting_add(c, &op->lasting, op->tmp, cached->on_device ? 0 : (uint64_t)cached->plan.tmp_bytes);
    return op;
}

static ddl__op *ddl__op_new(ddl_context *c, ddl__cached *cached) {
    ddl__op *op = cached->spare;
    if (op == NULL) {
        return ddl__op_make(c, cached);
    }
    cached->spare = op->next;
    cached->spares--;
    return op;
}

/* >>cache */

static void ddl__cached_free(ddl_context *c, ddl__cached *cached) {
    while (cached->spare != NULL) {
        ddl__op_free(c, ddl__op_new(c, cached));
    }
    ddl__plan_free(&c->base, &cached->plan);
    ddl__free(&c->base, cached->arrays);
    ddl__free(&c->base, cached->recvs);
    ddl__free(&c->base, cached);
}

static bool ddl__cached_fits(const ddl__cached *e, const ddl_group *g, const ddl__call *call) {
    bool on_device = call->on_device != DDL_HOST;
    if (e->kind != call->kind || e->count != call->count || e->root != call->root || e->in_place != call->in_place ||
        e->commutative != call->commutative || e->on_device != on_device ||
        (on_device && (e->folds != ddl__call_folds(call) || e->scaled != ddl__call_scaled(g, call))) ||
        e->element_bytes != (int32_t)ddl_dtype_bytes(call->dtype) || e->settings_version != g->settings_version ||
        e->array_count != ddl__call_arrays(call)) {
        return false;
    }
    for (int32_t i = 0; i < e->array_count; i++) {
        size_t bytes = (size_t)g->size * sizeof(int64_t);
        if (memcmp(e->arrays + (size_t)i * (size_t)g->size, ddl__call_array(call, i), bytes) != 0) {
            return false;
        }
    }
    return true;
}

static uint64_t ddl__recv_key(const ddl__step *s) { return (uint64_t)(uint32_t)s->peer << 32 | s->slot; }

static bool ddl__is_recv(const ddl__step *s) { return s->kind == DDL__RECV || s->kind == DDL__RECV_REDUCE; }

/* Insertion by halving: plans write their receives almost in order. */
static ddl_status ddl__cached_index(ddl_context *c, ddl__cached *e) {
    const ddl__plan *plan = &e->plan;
    e->recvs = ddl__alloc_array(&c->base, DDL__MAX(plan->step_count, 1u), sizeof *e->recvs);
    if (e->recvs == NULL) {
        return DDL_ERR_NOMEM;
    }
    for (uint32_t i = 0; i < plan->step_count; i++) {
        e->native_count += plan->steps[i].kind == DDL__NATIVE;
        if (!ddl__is_recv(&plan->steps[i])) {
            continue;
        }
        uint64_t key = ddl__recv_key(&plan->steps[i]);
        uint32_t low = 0, high = e->recv_count;
        if (high > 0 && ddl__recv_key(&plan->steps[e->recvs[high - 1]]) < key) {
            low = high;
        }
        while (low < high) {
            uint32_t middle = low + (high - low) / 2;
            if (ddl__recv_key(&plan->steps[e->recvs[middle]]) < key) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        memmove(&e->recvs[low + 1], &e->recvs[low], (e->recv_count - low) * sizeof *e->recvs);
        e->recvs[low] = i;
        e->recv_count++;
    }
    return DDL_OK;
}

/* Copies the v-forms' arrays into the entry: the plan's args point at them while it is written. */
static ddl_status ddl__cached_copy_arrays(ddl_context *c, const ddl_group *g, const ddl__call *call, ddl__cached *e) {
    e->array_count = ddl__call_arrays(call);
    if (e->array_count == 0) {
        return DDL_OK;
    }
    e->arrays = ddl__alloc_array(&c->base, (size_t)e->array_count * (size_t)g->size, sizeof(int64_t));
    if (e->arrays == NULL) {
        return DDL_ERR_NOMEM;
    }
    for (int32_t i = 0; i < e->array_count; i++) {
        memcpy(e->arrays + (size_t)i * (size_t)g->size, ddl__call_array(call, i), (size_t)g->size * sizeof(int64_t));
    }
    return DDL_OK;
}

/* How long the group's transport takes for a call by itself; 0: it does not serve it. */
static double ddl__native_seconds(const ddl_group *g, const ddl__call *call) {
    const ddl__native *n = call->on_device != DDL_HOST ? &g->device_native : &g->native;
    if (n->set == NULL || ddl__kind_is_v(call->kind) || (call->on_device != DDL_HOST && !ddl__call_folds(call))) {
        return 0;
    }
    uint64_t bytes = (uint64_t)call->count * ddl_dtype_bytes(call->dtype);
    return (double)n->table->native_cost_ns(n->self, n->set, (int32_t)call->kind, bytes) * 1e-9;
}

static ddl__plan_args ddl__call_args(const ddl_group *g, const ddl__call *call) {
    ddl__plan_args args = {.kind = call->kind,
                           .size = g->size,
                           .rank = g->rank,
                           .root = call->root,
                           .element_bytes = (int32_t)ddl_dtype_bytes(call->dtype),
                           .count = call->count,
                           .in_place = call->in_place,
                           .commutative = call->commutative,
                           .counts = call->counts,
                           .offsets = call->offsets,
                           .recv_counts = call->recv_counts,
                           .recv_offsets = call->recv_offsets,
                           .host_of = g->host_of,
                           .pulled = g->pulled,
                           .native_s = ddl__native_seconds(g, call),
                           .on_device = call->on_device != DDL_HOST,
                           .straight = g->straight,
                           .folds = g->folds && ddl__call_folds(call),
                           .scaled = ddl__call_scaled(g, call)};
    args.move_bytes = (int64_t)ddl__stage_chunk((uint64_t)ddl__total_bytes(&args));
    return args;
}

static void ddl__cache_trim(ddl_context *c, ddl_group *g) {
    int32_t count = 0;
    for (ddl__cached **at = &g->cache; *at != NULL;) {
        ddl__cached *e = *at;
        bool stale = e->settings_version != g->settings_version;
        if (e->pins == 0 && (stale || ++count > DDL__CACHED_MAX)) {
            *at = e->next;
            ddl__cached_free(c, e);
        } else {
            at = &e->next;
        }
    }
}

static ddl_status ddl__cached_make(ddl_context *c, ddl_group *g, const ddl__call *call, ddl__cached **out) {
    ddl__cached *e = ddl__alloc(&c->base, sizeof *e);
    if (e == NULL) {
        return DDL_ERR_NOMEM;
    }
    e->kind = call->kind;
    e->count = call->count;
    e->root = call->root;
    e->in_place = call->in_place;
    e->commutative = call->commutative;
    e->on_device = call->on_device != DDL_HOST;
    e->folds = ddl__call_folds(call);
    e->scaled = ddl__call_scaled(g, call);
    e->element_bytes = (int32_t)ddl_dtype_bytes(call->dtype);
    e->settings_version = g->settings_version;
    ddl__plan_args args = ddl__call_args(g, call);
    ddl_status status = ddl__cached_copy_arrays(c, g, call, e);
    if (status == DDL_OK) {
        ddl__choice choice = ddl__tune_choose(&g->tuning, &args);
        args.chunk_bytes = choice.chunk_bytes;
        args.fence = choice.fence;
        args.inner = choice.inner;
        e->estimate_s = choice.seconds;
        status = ddl__plan_make(&c->base, choice.algo, &args, &e->plan);
    }
    if (status == DDL_OK) {
        status = ddl__cached_index(c, e);
    }
    if (status < 0) {
        ddl__cached_free(c, e);
        return status;
    }
    e->plan.algorithm = e->on_device && ddl__host_count(&args) == 1 ? "native_device" : e->plan.algorithm;
    const char *name = e->plan.algorithm;
    ddl__page_algorithm(c, name);
    e->algorithm_hash = ddl__mix(ddl__mix_bytes(e->plan.fenced, name, strlen(name)), (uint64_t)args.chunk_bytes);
    if (args.inner != NULL) {
        e->algorithm_hash = ddl__mix_bytes(e->algorithm_hash, args.inner->name, strlen(args.inner->name));
    }
    e->next = g->cache;
    g->cache = e;
    *out = e;
    return DDL_OK;
}

/* The plan for a call, from the cache or new. Errors: DDL_ERR_NOMEM, with nothing changed. */
static ddl_status ddl__cached_get(ddl_group *g, const ddl__call *call, ddl__cached **out) {
    ddl_context *c = g->context;
    for (ddl__cached **at = &g->cache; *at != NULL; at = &(*at)->next) {
        ddl__cached *e = *at;
        if (ddl__cached_fits(e, g, call)) {
            *at = e->next;
            e->next = g->cache;
            g->cache = e;
            *out = e;
            return DDL_OK;
        }
    }
    ddl__cache_trim(c, g);
    ddl_status status = ddl__cached_make(c, g, call, out);
    return status == DDL_ERR_NOMEM ? ddl__error(c, status, "no memory to plan an operation on group \"%s\"", g->name)
                                   : status;
}

#endif /* DDL_ENGINE_OP_H */

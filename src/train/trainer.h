/* train, second part: what a trainer holds, and the checks of what it is given. */
#ifndef DDL_TRAIN_TRAINER_H
#define DDL_TRAIN_TRAINER_H

#include "../coll/join.h"
#include "../compress/reduce.h"
#include "../optim/lane.h"
#include "../ps/ps.h"
#include "plan.h"
#include "race.h"

enum {
    DDL__TRAINER_MAGIC = 0x74726169,
    DDL__ARENAS = DDL_F64 + 1,  /* by type */
    DDL__PIECE_UNIT = 64,       /* pieces are cut at multiples of it, in bytes */
    DDL__ADAPTIVE_LEAST = 4096, /* elements of a tensor that adaptive compression does not leave as it is */
    DDL__ADAPT_SAMPLE = 65536,  /* elements of a tensor that its errors are measured on */
    DDL__LATEST = 16            /* steps whose times auto keeps, to see whether they drift */
};

/* A gradient that is packed on a device: see arena.h. */
typedef struct ddl__arrival {
    ddl_trainer *trainer;
    int32_t index;
    bool pending;
    ddl__stage *mark;
} ddl__arrival;

/* One tensor. It lies at `at` of the arena of its type, and the arenas are in backward's order, so that gradients that
 * follow each other are one range, whatever the program's memory looks like. */
typedef struct ddl__weight {
    char *name;
    ddl_tensor param, grad;
    ddl_trainer_options options;
    int64_t count;
    ddl_dtype wire;                /* the type of its arena */
    int64_t at;                    /* in elements */
    int64_t own_begin, own_count;  /* the elements that this rank updates: all, or its shard */
    float *master;                 /* f32 copy of own elements of a 16-bit parameter, else NULL; on the lane, */
    float *state;                  /* as is slots * own_count of the optimizer (of f64 parameters in f64), */
    float *anchor, *momentum;      /* and of the outer optimizer: parameters at the last synchronisation */
    bool ready;                    /* in this call of the loop */
    bool taken;                    /* lies in the arena */
    int32_t handed;                /* 1 + the tensor that was handed over before it: see ddl__weight_hand */
    ddl__arrival *arrival;         /* NULL: in ordinary memory it is there at once */
    bool waited;                   /* has the update of the last step */
    bool bad;                      /* this rank's gradient is not finite */
    bool served;                   /* goes over servers */
    ddl__ps_trait *coded;          /* servers take it as a code; else NULL */
    float *residual;               /* what its codes have missed; NULL without error feedback */
    float *before;                 /* the residual before this step's codes, for a step that is refused */
    bool skipped;                  /* servers made no step: a gradient was not finite */
    int32_t unit_first, unit_last; /* that carry parts of it */
    ddl__compressor *compressor;   /* compressed: see compression.h; else NULL */
    void *compressor_memory;       /* its memory, and behind it what it kept before this step's codes */
    ddl_request *compressing;      /* its collective */
    double ready_s;                /* since the first gradient of a step was ready: a moving average */
    double agreed_s;               /* the ranks' average of it, when they last agreed: what plans are made from */
} ddl__weight;

typedef enum ddl__unit_state { DDL__UNIT_HELD = 0, DDL__UNIT_STARTED = 1, DDL__UNIT_DONE = 2 } ddl__unit_state;

/* What one collective carries: a range of an arena. */
typedef struct ddl__unit {
    ddl_kind kind;
    ddl_dtype dtype;
    int64_t begin, count; /* elements of the arena */
    bool served;          /* by servers; these are their pieces: */
    int64_t grain_first, grain_end;
    int64_t bytes;
    int32_t members; /* tensors that it waits for */
    int32_t missing; /* of them in this step */
    ddl__unit_state state;
    ddl_request *request; /* persistent; with servers of one step */
    uint64_t begin_ns;    /* when it was started */
    int32_t tensors;      /* for the timeline: whose gradients it carries, or parts of them */
    char label[DDL__TRACE_NAME];
} ddl__unit;

/* Parameters that live on servers: see served.h. Arrays are by parameter of the servers: the last tensor is their
 * first. */
typedef struct ddl__served {
    ddl_ps *ps;        /* NULL: there are none */
    ddl_tensor pulled[DDL__ARENAS]; /* f32 and f64, in the order of the arenas: parameters as they come */
    ddl__ps_trait *traits;
    bool *bad;             /* the gradient of this step is not finite */
    int64_t *grains;       /* bytes of the servers' pieces */
    char *codes;           /* of compressed tensors, piece by piece */
    int64_t *code_at;      /* by piece: where its code begins, -1: it has none */
    bool only;             /* this rank only serves */
    bool chosen;           /* architecture auto: some tensors go another way than units do */
    ddl__line measured[2]; /* when both ways were measured last */
    bool sums;             /* servers average gradients, and workers run the optimizer */
    bool alone;            /* SSP and ASP: other ranks are at other steps, so nothing can be agreed */
} ddl__served;

/* auto lets plans race. */
typedef struct ddl__trial {
    bool on;
    ddl__race race;
    int32_t way;                   /* the plan that runs, or will when times are known */
    double latest_s[DDL__LATEST];  /* since the end of the race: step k at k modulo DDL__LATEST */
    int64_t latest;                /* steps since then */
    double won_s;                  /* the winner's score */
} ddl__trial;

struct ddl_trainer {
    ddl__pump pump; /* first: the context runs it */
    uint32_t magic;
    ddl_context *context;
    ddl_group *parent, *group; /* the caller's, and its own duplicate */
    ddl_group *compress_group; /* of compressed tensors; NULL: there are none */
    ddl__lane lane;  /* where tensors are: one device, or ordinary memory */
    void *stream;    /* the program's, for the lane; NULL: none */
    uint64_t *odds, *odds_told; /* by tensor: its gradient is not finite; on the lane, and as the host was told */
    void *mirrors[DDL__ARENAS]; /* of the f32 and f64 arenas, in ordinary memory, for what the host does with gradients
                                   of a device */
    int32_t arriving;  /* gradients that are being packed */
    atomic_int handed; /* 1 + the tensor that was handed over last; 0: none that is not taken */
    uint64_t asked_ns, taken_ns; /* when a gradient was made ready last, and when one was in the arena */
    int32_t rank, size;
    ddl_trainer_config config; /* with defaults filled in */
    ddl_optimizer optimizer;
    double rate;
    ddl__weight *weights;
    int32_t count, room;
    int64_t *shares; /* by rank: scratch */
    bool started, pumping;
    bool loaded; /* a checkpoint: later ones of its folder may be replaced */

    /* the plan, and how far this step is in it; under the context's lock */
    ddl_tensor arenas[DDL__ARENAS];
    ddl__served served;
    ddl__unit *units; /* gradients in backward's order; then, sharded, the gathers; last, uneven, the flag */
    int32_t piece_count, unit_count;
    int32_t *order;     /* in which units are started */
    int32_t next, head; /* in order: the first that is not started; all before head are done */
    int64_t credit_bytes, out_bytes;
    int32_t out_count;
    uint64_t busy_since, busy_ns; /* something is under way */
    int32_t started_units;
    int64_t started_bytes;
    ddl_status status; /* not DDL_OK: an operation failed, and this is why */
    char why[DDL__SENTENCE_BYTES];

    /* this step */
    int32_t micro, ready_count, waited_count;
    bool grads_out; /* gradients of this step are averaged over ranks (else it is a step of local SGD) */
    bool step_open; /* a gradient of it is ready */
    bool over;      /* overlap_forward: ddl_step was called, updates are taken in ddl_param_wait */
    bool over_bad;  /* ... and one of its averages was not finite */
    bool joined_out;
    int32_t adaptive;     /* tensors whose code is chosen */
    int32_t compress_next; /* tensor whose code is started next: backwards from the last, -1: all are */
    double flag[2];       /* of `uneven`: ranks that contribute */
    uint64_t first_ready_ns, last_end_ns, inside_ns, exposed_ns, entered_ns;
    int64_t since_sync, steps_tried;
    int64_t coded; /* steps that compression has seen: its random numbers go on after a checkpoint */
    ddl_trainer_stats stats;

    /* what plans are made from */
    ddl__line lines[2];    /* of operations; architecture auto: [1] is that of servers */
    ddl__fit fits[2];      /* of operations since the last plan */
    uint64_t last_unit_ns; /* when an operation ended last */
    double period_s;       /* the last step, from the end of the one before */
    ddl__trial trial;
    int64_t planned_at; /* step */
    double planned_s;   /* exposed time that the plan promises */
    const char *plan_name;
};

/* Servers run the optimizer: they have its state, and the f32 copies of 16-bit parameters. */
static bool ddl__trainer_hands_over(const ddl_trainer *t) { return t->served.ps != NULL && !t->served.sums; }

/* >>layout */

/* 16-bit gradients travel as they are, except where they would be rounded again: sums over several calls, parameters
 * that travel too (local SGD; shards of another type), servers, which have f32. */
static ddl_dtype ddl__weight_wire_type(const ddl_trainer *t, const ddl__weight *w) {
    const ddl_trainer_config *o = &t->config;
    bool compressed = w->options.compression.kind != DDL_COMPRESS_NONE;
    bool exact = compressed || o->architecture == DDL_ARCHITECTURE_PS || o->accumulate > 1 ||
                 o->sync == DDL_SYNC_LOCAL || (o->shard && w->param.dtype != w->grad.dtype);
    return exact && w->grad.dtype != DDL_F64 ? DDL_F32 : w->grad.dtype;
}

/* What the optimizer works in: f64 of f64 parameters, else f32; and bytes of an element. */
static ddl_dtype ddl__weight_type(const ddl__weight *w) { return w->param.dtype == DDL_F64 ? DDL_F64 : DDL_F32; }
static size_t ddl__weight_size(const ddl__weight *w) { return ddl_dtype_bytes(ddl__weight_type(w)); }

/* >>checks */

static ddl_status ddl__trainer_ok(const ddl_trainer *t, const char *what, bool started) {
    if (t == NULL || t->magic != DDL__TRAINER_MAGIC) {
        return DDL_ERR_ARG;
    }
    ddl_trainer *mine = (ddl_trainer *)(uintptr_t)t;
    DDL__TRY(ddl__enter(mine->context));
    ddl_status status = DDL_OK;
    if (t->status < 0) {
        status = ddl__error(mine->context, t->status, "%s: the trainer has failed: %s", what, t->why);
    } else if (started && !t->started) {
        status = ddl__error(mine->context, DDL_ERR_STATE,
                            "%s: the trainer has not started; call ddl_trainer_start on "
                            "all ranks after the last ddl_trainer_add",
                            what);
    }
    if (status < 0) {
        ddl__unlock(mine->context);
    }
    return status;
}

/* A call that packs, steps or waits: its memory stays until ddl__trainer_let_go, whoever finalizes the context. */
static ddl_status ddl__trainer_hold(ddl_trainer *t, const char *call) {
    if (t == NULL || t->magic != DDL__TRAINER_MAGIC) {
        return DDL_ERR_ARG;
    }
    ddl__hold(t->context, call);
    return DDL_OK;
}

static ddl_status ddl__trainer_let_go(ddl_trainer *t, ddl_status status) {
    ddl__let_go(t->context);
    return status;
}

/* Names what is wrong with a config; DDL_OK: nothing. */
static ddl_status ddl__trainer_check_ranges(ddl_context *c, const ddl_trainer_config *o, const char *what) {
    const struct {
        const char *name;
        double value, least, most;
    } ranges[] = {
        {"sync", o->sync, 0, DDL_SYNC_ASP},
        {"schedule", o->schedule, 0, DDL_SCHEDULE_PRIORITY},
        {"accumulate", o->accumulate, 0, 1 << 20},
        {"clip_norm", o->clip_norm, 0, 1e30},
        {"bucket_bytes", (double)o->bucket_bytes, 0, 1e15},
        {"piece_bytes", (double)o->piece_bytes, 0, 1e15},
        {"credit_bytes", (double)o->credit_bytes, 0, 1e15},
        {"latency_s", o->latency_s, 0, 1e6},
        {"seconds_per_byte", o->seconds_per_byte, 0, 1},
        {"replan_steps", o->replan_steps, -1, 1 << 30},
        {"local_steps", o->local_steps, 0, 1 << 30},
        {"local_after", (double)o->local_after, 0, 1e15},
        {"exposed_s", o->exposed_s, 0, 1e6},
        {"outer_rate", o->outer_rate, 0, 1e6},
        {"outer_momentum", o->outer_momentum, -1, 0.9999999},
        {"architecture", o->architecture, 0, DDL_ARCHITECTURE_AUTO},
        {"servers", o->servers, 0, 1 << 20},
        {"staleness", o->staleness, -1, 1000000},
        {"staleness_max", o->staleness_max, 0, 1000000},
    };
    for (size_t i = 0; i < DDL__COUNT_OF(ranges); i++) {
        if (!(ranges[i].value >= ranges[i].least && ranges[i].value <= ranges[i].most)) {
            return ddl__error(c, DDL_ERR_ARG, "%s: %s is %g; it must be from %g to %g", what, ranges[i].name,
                              ranges[i].value, ranges[i].least, ranges[i].most);
        }
    }
    return DDL_OK;
}

/* Compressed averages are over all ranks, whole, and complete in ddl_step. Architecture auto: compressed tensors go by
 * all-reduce, whatever the others do. */
#define DDL__NO_COMPRESSION                                                                                            \
    "compression works with BSP only, and without shard, uneven and overlap_forward: codes are averaged over all "     \
    "ranks, whole, and some take several collectives, which ddl_step ends"
static bool ddl__may_compress(const ddl_trainer_config *o, ddl_compression_kind kind) {
    if (o->architecture == DDL_ARCHITECTURE_PS) {
        return kind == DDL_COMPRESS_NONE || (ddl__ps_takes(kind) && !o->uneven);
    }
    return kind == DDL_COMPRESS_NONE || (o->sync == DDL_SYNC_BSP && !o->shard && !o->uneven && !o->overlap_forward);
}

/* Whether servers only average gradients (as BytePS's do: Jiang et al., OSDI 2020): where a step needs more than the
 * piece that a server has, or is the program's. */
static bool ddl__served_sums(const ddl_trainer_config *o) {
    return o->architecture == DDL_ARCHITECTURE_AUTO ||
           (o->architecture == DDL_ARCHITECTURE_PS &&
            (o->step != NULL || o->clip_norm > 0 || o->uneven));
}

static const char *ddl__no_compression(const ddl_trainer_config *o) {
    return o->architecture == DDL_ARCHITECTURE_PS ? "servers take gradients as f16, bf16, int8, QSGD, sign and top-k, "
                                                    "and without uneven; other kinds need "
                                                    "all-reduce"
                                                  : DDL__NO_COMPRESSION;
}

/* What does not go together with servers. */
static const char *ddl__trainer_check_servers(const ddl_trainer_config *o) {
    bool ps = o->architecture != DDL_ARCHITECTURE_ALL_REDUCE, ssp = o->sync == DDL_SYNC_SSP;
    if (!ps && (ssp || o->sync == DDL_SYNC_ASP || o->servers != 0 || o->dedicated)) {
        return "sync SSP and ASP, servers and dedicated need parameter servers: set architecture to "
               "DDL_ARCHITECTURE_PS";
    }
    if (!ssp && (o->staleness != 0 || o->staleness_max != 0)) {
        return "staleness and staleness_max belong to sync DDL_SYNC_SSP";
    }
    if (!ps) {
        return NULL;
    }
    if (o->architecture == DDL_ARCHITECTURE_AUTO && (o->dedicated || o->sync != DDL_SYNC_BSP)) {
        return "architecture auto is BSP, and all ranks take part in all-reduce: without dedicated, SSP, ASP and local "
               "SGD";
    }
    return o->sync == DDL_SYNC_LOCAL ? "servers hold the parameters, so that no rank can step alone: take sync BSP, "
                                       "SSP or ASP with them, or local SGD over all-reduce"
           : o->shard                ? "the optimizer's state is shared out over the servers already: without shard"
           : o->sync != DDL_SYNC_BSP && ddl__served_sums(o)
               ? "clip_norm, uneven and a step of the program's own need the average of all workers' "
                 "gradients, which SSP and ASP do not make: take sync BSP (a worker without data frees its trainer)"
               : NULL;
}

/* What does not go together, and why. */
static ddl_status ddl__trainer_check_pairs(ddl_context *c, const ddl_trainer_config *o, const char *what) {
    bool local = o->sync == DDL_SYNC_LOCAL;
    bool split = o->schedule == DDL_SCHEDULE_PRIORITY || o->schedule == DDL_SCHEDULE_MERGED;
    const struct {
        bool wrong;
        const char *why;
    } pairs[] = {
        {o->overlap_forward && !o->shard && o->clip_norm > 0,
         "overlap_forward and clip_norm: the norm needs all gradients before the first update, so nothing would "
         "overlap; take one of them"},
        {o->overlap_forward && o->uneven,
         "overlap_forward and uneven: how many ranks have contributed is known when all operations of the step have "
         "ended, and no average can be divided before; take one of them"},
        {o->overlap_forward && (local || o->step != NULL),
         "overlap_forward works with BSP and the trainer's own optimizers only: a step of the program's own takes all "
         "averages at once, and local SGD averages nothing in most steps"},
        {o->shard && (local || o->step != NULL),
         "shard works with BSP and the trainer's own optimizers; a rank that steps alone needs the whole state"},
        {o->shard && split,
         "shard works with schedules auto, none, wait-free and fused: shards stay where they are, so "
         "a plan cannot change"},
        {o->shard && (o->optimizer.kind == DDL_LARS || o->optimizer.kind == DDL_LAMB),
         "shard and LARS or LAMB: their norms go over whole tensors, of which a rank has parts"},
        {!local && (o->outer_rate != 0 || o->outer_momentum != 0 || o->local_steps != 0 || o->local_after != 0),
         "local_steps, local_after, outer_rate and outer_momentum belong to sync DDL_SYNC_LOCAL"},
        {o->outer_rate == 0 && o->outer_momentum != 0, "outer_momentum needs an outer_rate"},
        {o->step != NULL && (o->optimizer.kind != DDL_SGD || o->optimizer.learning_rate != 0),
         "step and optimizer: a step of the program's own is instead of one; set one of them"},
        {!ddl__may_compress(o, o->compression.kind), ddl__no_compression(o)},
        {ddl__trainer_check_servers(o) != NULL, ddl__trainer_check_servers(o)},
    };
    for (size_t i = 0; i < DDL__COUNT_OF(pairs); i++) {
        if (pairs[i].wrong) {
            return ddl__error(c, DDL_ERR_UNSUPPORTED, "%s: %s", what, pairs[i].why);
        }
    }
    return DDL_OK;
}

static int64_t ddl__or_bytes(int64_t bytes, int64_t otherwise) {
    bytes = bytes == 0 ? otherwise : bytes;
    return (bytes + DDL__PIECE_UNIT - 1) / DDL__PIECE_UNIT * DDL__PIECE_UNIT;
}

/* Checks a config and fills in the defaults; *out is untouched on error. */
static ddl_status ddl__trainer_settle(ddl_context *c, int32_t ranks, const ddl_trainer_config *config, const char *what,
                                      ddl_trainer_config *out) {
    static const ddl_trainer_config zero;
    ddl_trainer_config o = config != NULL ? *config : zero;
    DDL__TRY(ddl__trainer_check_ranges(c, &o, what));
    DDL__TRY(ddl__trainer_check_pairs(c, &o, what));
    ddl_compression filled;
    ddl_status status = ddl__optim_init(&c->error, &o.optimizer, &o.optimizer);
    status = status < 0 ? status : ddl__compress_init(&c->error, &o.compression, &filled);
    if (status < 0) {
        return ddl__said(c, status);
    }
    bool local = o.sync == DDL_SYNC_LOCAL;
    if (o.servers > ranks || (o.dedicated && o.servers >= ranks)) {
        return ddl__error(c, DDL_ERR_ARG, "%s: %d %s servers in a group of %d ranks: %s", what, o.servers,
                          o.dedicated ? "dedicated" : "colocated", ranks,
                          o.dedicated ? "at least one rank has to work" : "a rank has one server at most");
    }
    if (o.dedicated && ranks < 2) {
        return ddl__error(c, DDL_ERR_ARG, "%s: dedicated servers in a group of one rank: at least one rank has to work",
                          what);
    }
    o.accumulate = o.accumulate == 0 ? 1 : o.accumulate;
    o.bucket_bytes = ddl__or_bytes(o.bucket_bytes, 4 << 20);
    o.piece_bytes = ddl__or_bytes(o.piece_bytes, 4 << 20);
    o.credit_bytes = ddl__or_bytes(o.credit_bytes, 4 * o.piece_bytes);
    o.replan_steps = o.replan_steps == 0 ? 50 : o.replan_steps;
    o.local_steps = local && o.local_steps == 0 ? 8 : o.local_steps;
    if (o.architecture != DDL_ARCHITECTURE_ALL_REDUCE && o.servers == 0) {
        o.servers = o.dedicated ? 1 : ranks;
    }
    o.outer_momentum = o.outer_momentum < 0 ? 0 : o.outer_rate != 0 && o.outer_momentum == 0 ? 0.9 : o.outer_momentum;
    *out = o;
    return DDL_OK;
}

/* >>making */

static void ddl__trainer_run(ddl_context *c, ddl__pump *pump);

DDL_API ddl_status ddl_trainer_create(ddl_group *group, const ddl_trainer_config *config, ddl_trainer **out_trainer) {
    const char *what = "ddl_trainer_create";
    if (out_trainer == NULL) {
        return ddl__refuse_group(group, what, "out_trainer");
    }
    *out_trainer = NULL;
    DDL__TRY(ddl__enter_group(group, what));
    ddl_context *c = group->context;
    ddl_trainer_config settled;
    ddl_status status = ddl__trainer_settle(c, group->size, config, what, &settled);
    ddl_trainer *t = status == DDL_OK ? ddl__alloc(&c->base, sizeof *t) : NULL;
    if (t != NULL) {
        t->pump.run = ddl__trainer_run;
        t->magic = DDL__TRAINER_MAGIC;
        t->context = c;
        t->parent = group;
        t->rank = group->rank;
        t->size = group->size;
        t->config = settled;
        t->optimizer = settled.optimizer;
        t->rate = settled.optimizer.learning_rate;
        t->plan_name = "none";
        c->refs++;
        *out_trainer = t;
    } else if (status == DDL_OK) {
        status = ddl__error(c, DDL_ERR_NOMEM, "%s: no memory", what);
    }
    ddl__unlock(c);
    return status;
}

static bool ddl__trains(ddl_dtype dtype) {
    return ddl__dtype_is_float(dtype) && !ddl__dtype_is_byte_float(dtype);
}

#define DDL__NO_WIDE_OUTER "%s: \"%s\" is f64, for which there is no outer optimizer (outer_rate); take 0, or f32"

/* What a parameter or a gradient must be. */
static ddl_status ddl__weight_check(ddl_trainer *t, const char *name, const ddl_tensor *param, const ddl_tensor *grad) {
    const char *what = "ddl_trainer_add";
    ddl_context *c = t->context;
    int32_t device = t->count > 0 ? t->weights[0].param.device : param->device;
    DDL__TRY(ddl__tensor_check(c, param, what, "parameter"));
    DDL__TRY(ddl__tensor_check(c, grad, what, "gradient"));
    if (param->device != device || grad->device != device) {
        return ddl__error(c, DDL_ERR_ARG,
                          "%s: \"%s\" has its parameter on device %d and its gradient on device %d (0 is ordinary "
                          "memory); all tensors of this trainer must be on device %d, others need another trainer",
                          what, name, param->device, grad->device, device);
    }
    bool same = param->ndim == grad->ndim;
    for (int32_t d = 0; same && d < param->ndim; d++) {
        same = param->shape[d] == grad->shape[d];
    }
    if (!same) {
        return ddl__error(c, DDL_ERR_ARG,
                          "%s: \"%s\" has a gradient of another shape (%lld elements) than the parameter "
                          "(%lld)",
                          what, name, (long long)ddl_tensor_count(grad), (long long)ddl_tensor_count(param));
    }
    if (!ddl__is_contiguous(param) || !ddl__is_contiguous(grad)) {
        return ddl__error(c, DDL_ERR_ARG, "%s: parameter and gradient of \"%s\" must be contiguous", what, name);
    }
    bool wide = param->dtype == DDL_F64 || grad->dtype == DDL_F64;
    if (!ddl__trains(param->dtype) || !ddl__trains(grad->dtype) || (wide && param->dtype != grad->dtype)) {
        return ddl__error(c, DDL_ERR_ARG,
                          "%s: \"%s\" is a %s parameter with a %s gradient; possible are f16, bf16 and "
                          "f32 in any pair, and f64 with f64",
                          what, name, ddl_dtype_name(param->dtype), ddl_dtype_name(grad->dtype));
    }
    if (wide && t->config.outer_rate != 0) {
        return ddl__error(c, DDL_ERR_UNSUPPORTED, DDL__NO_WIDE_OUTER, what, name);
    }
    return DDL_OK;
}

/* How a tensor is compressed: its own way, or the config's. */
static ddl_compression ddl__weight_code(const ddl_trainer *t, const ddl_trainer_options *options) {
    if (options->uncompressed) {
        return (ddl_compression){.kind = DDL_COMPRESS_NONE};
    }
    return options->compression.kind != DDL_COMPRESS_NONE ? options->compression : t->config.compression;
}

static ddl_status ddl__weight_check_code(ddl_trainer *t, const char *name, const ddl_tensor *grad,
                                         const ddl_compression *code) {
    ddl_context *c = t->context;
    ddl_compression filled;
    if (code->kind == DDL_COMPRESS_NONE) {
        return DDL_OK;
    }
    if (!ddl__may_compress(&t->config, code->kind) || grad->dtype == DDL_F64) {
        return ddl__error(c, DDL_ERR_UNSUPPORTED, "ddl_trainer_add: \"%s\": %s", name,
                          grad->dtype == DDL_F64 ? "f64 cannot be compressed" : ddl__no_compression(&t->config));
    }
    ddl_status status = ddl__compress_init(&c->error, code, &filled);
    return status < 0 ? ddl__said(c, status) : DDL_OK;
}

static bool ddl__weight_is_compressed(const ddl__weight *w) {
    return w->options.compression.kind != DDL_COMPRESS_NONE && w->coded == NULL;
}

static ddl_status ddl__weights_grow(ddl_trainer *t) {
    if (t->count < t->room) {
        return DDL_OK;
    }
    ddl__base *base = &t->context->base;
    int32_t room = t->room == 0 ? 32 : 2 * t->room;
    ddl__weight *grown = ddl__alloc_array(base, (size_t)room, sizeof *grown);
    if (grown == NULL) {
        return ddl__error(t->context, DDL_ERR_NOMEM, "ddl_trainer_add: no memory for more tensors");
    }
    if (t->count > 0) {
        memcpy(grown, t->weights, (size_t)t->count * sizeof *grown);
    }
    ddl__free(base, t->weights);
    t->weights = grown;
    t->room = room;
    return DDL_OK;
}

static ddl_status ddl__trainer_add(ddl_trainer *t, const char *name, const ddl_tensor *param, const ddl_tensor *grad,
                                   const ddl_trainer_options *options, int32_t *out_index) {
    ddl_context *c = t->context;
    char numbered[32], given[128];
    snprintf(numbered, sizeof numbered, "tensor %d", t->count);
    snprintf(given, sizeof given, "%s", name != NULL ? name : numbered);
    if (t->started) {
        return ddl__error(c, DDL_ERR_STATE, "ddl_trainer_add: the trainer has started; \"%s\" comes too late", given);
    }
    DDL__TRY(ddl__weight_check(t, given, param, grad));
    ddl_trainer_options mine = options != NULL ? *options : (ddl_trainer_options){0};
    if (t->config.choose != NULL) {
        t->config.choose(t->config.choose_user, given, grad, &mine);
    }
    if (!(mine.rate_factor > -1e30 && mine.rate_factor < 1e30)) {
        return ddl__error(c, DDL_ERR_ARG, "ddl_trainer_add: rate_factor of \"%s\" is not a number", given);
    }
    ddl_compression code = ddl__weight_code(t, &mine);
    if (code.kind == DDL_COMPRESS_ADAPTIVE && ddl_tensor_count(grad) < DDL__ADAPTIVE_LEAST) {
        code = (ddl_compression){.kind = DDL_COMPRESS_NONE}; /* it costs its latency: merged with others it does not */
    }
    DDL__TRY(ddl__weight_check_code(t, given, grad, &code));
    DDL__TRY(ddl__weights_grow(t));
    ddl__weight *w = &t->weights[t->count];
    *w = (ddl__weight){.param = *param, .grad = *grad, .count = ddl_tensor_count(param), .waited = true};
    w->name = ddl__copy_string(&c->base, given);
    if (w->name == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "ddl_trainer_add: no memory");
    }
    w->options = mine;
    w->options.compression = code;
    w->options.rate_factor = w->options.rate_factor == 0 ? 1 : w->options.rate_factor;
    if (out_index != NULL) {
        *out_index = t->count;
    }
    t->count++;
    t->waited_count++;
    t->adaptive += code.kind == DDL_COMPRESS_ADAPTIVE;
    return DDL_OK;
}

DDL_API ddl_status ddl_trainer_add(ddl_trainer *trainer, const char *name, ddl_tensor parameter, ddl_tensor gradient,
                                   const ddl_trainer_options *options, int32_t *out_index) {
    DDL__TRY(ddl__trainer_ok(trainer, "ddl_trainer_add", false));
    ddl_status status = ddl__trainer_add(trainer, name, &parameter, &gradient, options, out_index);
    ddl__unlock(trainer->context);
    return status;
}

DDL_API ddl_status ddl_trainer_set_rate(ddl_trainer *trainer, double learning_rate) {
    DDL__TRY(ddl__trainer_ok(trainer, "ddl_trainer_set_rate", false));
    ddl_status status = DDL_OK;
    if (learning_rate >= 0 && learning_rate < 1e30) {
        trainer->rate = learning_rate;
    } else {
        status = ddl__error(trainer->context, DDL_ERR_ARG,
                            "ddl_trainer_set_rate: the learning rate is %g; it must be at "
                            "least 0 and finite",
                            learning_rate);
    }
    ddl__unlock(trainer->context);
    return status;
}

DDL_API ddl_status ddl_trainer_set_epoch(ddl_trainer *trainer, int64_t epoch) {
    DDL__TRY(ddl__trainer_ok(trainer, "ddl_trainer_set_epoch", false));
    ddl_status status = epoch >= 0 ? DDL_OK
                                   : ddl__error(trainer->context, DDL_ERR_ARG,
                                                "ddl_trainer_set_epoch: the epoch is %lld on rank %d; it must be at "
                                                "least 0",
                                                (long long)epoch, trainer->rank);
    trainer->stats.epoch = status == DDL_OK ? epoch : trainer->stats.epoch;
    ddl__unlock(trainer->context);
    return status;
}

/* Whether work on that stream can be ordered with the lane's. */
static ddl_status ddl__trainer_try_stream(ddl_trainer *t, void *stream) {
    const char *what = "ddl_trainer_set_stream";
    int32_t device = t->count > 0 ? t->weights[0].param.device : DDL_HOST;
    ddl__device *d;
    void *event = NULL;
    if (device == DDL_HOST) {
        return ddl__error(t->context, DDL_ERR_STATE, "%s: the trainer has no tensors on a device; call it after "
                          "ddl_trainer_add", what);
    }
    DDL__TRY(ddl__device_get(t->context, device, what, &d));
    if (DDL_HAS(d->table, capturing) && d->table->capturing(d->self, stream)) {
        return ddl__error(t->context, DDL_ERR_STATE, "%s: the stream is being captured into a graph; the host has a "
                          "part in each step, so capture forward and backward without the trainer's calls", what);
    }
    ddl_status status = d->table->event_record(d->self, stream, &event);
    if (status < 0) {
        return ddl__error(t->context, status, "%s: the stream is not one of device %d (%s): %s", what, device,
                          d->plugin->name, ddl_status_text(status));
    }
    d->table->event_free(d->self, event);
    return DDL_OK;
}

DDL_API ddl_status ddl_trainer_set_stream(ddl_trainer *trainer, void *stream) {
    DDL__TRY(ddl__trainer_ok(trainer, "ddl_trainer_set_stream", false));
    ddl_status status = stream != NULL ? ddl__trainer_try_stream(trainer, stream) : DDL_OK;
    if (status == DDL_OK) {
        trainer->lane.user = trainer->stream = stream;
    }
    ddl__unlock(trainer->context);
    return status;
}

#endif /* DDL_TRAIN_TRAINER_H */

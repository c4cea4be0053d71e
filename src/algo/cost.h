/* algo/cost: what the closed forms of the algorithms are made of. It must not know how a link is measured. */
#ifndef DDL_ALGO_COST_H
#define DDL_ALGO_COST_H

#include "../plan.h"

/* Measured or assumed, the same on every rank. Index 0 is inside a host, 1 between hosts. */
typedef struct ddl__cost_model {
    double latency_s[2], s_per_byte[2]; /* the alpha and beta of Hockney's model */
    double reduce_s_per_byte;           /* gamma */
    double message_s;                   /* what one more message costs the rank that sends it */
    int32_t oversubscription;           /* ranks per core; 0 and 1 are the same */
} ddl__cost_model;

/* A call as its cost sees it. */
typedef struct ddl__terms {
    double n, rounds;             /* ranks, ceil(log2 n) */
    double bytes;                 /* of the whole vector; of gather and its like: all blocks together */
    double latency, byte, reduce; /* of the slowest link in use */
    double near_latency, near_byte;
    double message; /* of a message that does not wait for the one before */
    double hosts, per_host;
    double crossing; /* how much slower a byte is when all ranks of a host send to others at once */
    double chunk;
    double turns; /* ranks per core */
    double native;
} ddl__terms;

static int32_t ddl__host_count(const ddl__plan_args *args) {
    int32_t last = 0;
    for (int32_t r = 0; args->host_of != NULL && r < args->size; r++) {
        last = DDL__MAX(last, args->host_of[r]);
    }
    return args->apart ? args->size : last + 1;
}

/* Bytes of all blocks, or of the vector that every rank has. The lengths in an all_to_allv are each rank's own, so
 * none may count. */
static int64_t ddl__total_bytes(const ddl__plan_args *args) {
    int64_t count = args->count;
    switch (ddl__kind_base(args->kind)) {
    case DDL_GATHER:
    case DDL_SCATTER:
    case DDL_ALL_GATHER:
    case DDL_REDUCE_SCATTER:
    case DDL_ALL_TO_ALL:
        count *= args->size;
        break;
    default:
        break;
    }
    if (ddl__kind_is_v(args->kind)) {
        count = 0;
        for (int32_t r = 0; args->kind != DDL_ALL_TO_ALLV && r < args->size; r++) {
            count += args->counts[r];
        }
    }
    return count * args->element_bytes;
}

/* The largest block. */
static int64_t ddl__block_bytes(const ddl__plan_args *args) {
    int64_t count = args->count;
    if (ddl__kind_is_v(args->kind)) {
        count = 0;
        for (int32_t r = 0; args->kind != DDL_ALL_TO_ALLV && r < args->size; r++) {
            count = DDL__MAX(count, args->counts[r]);
        }
    }
    return count * args->element_bytes;
}

/* More ranks than cores: they take turns, so every time is as much longer. */
static void ddl__terms_of(ddl__terms *t, const ddl__plan_args *args, const ddl__cost_model *model) {
    int32_t hosts = ddl__host_count(args), far = hosts > 1;
    double turns = DDL__MAX(model->oversubscription, 1);
    *t = (ddl__terms){.n = args->size, .rounds = ddl__log2_ceil(args->size), .hosts = hosts};
    t->bytes = (double)ddl__total_bytes(args);
    t->per_host = DDL__MAX(t->n / t->hosts, 1.0);
    t->latency = (model->latency_s[far] + model->message_s) * turns;
    t->byte = model->s_per_byte[far] * (far ? 1 : turns);
    t->near_latency = (model->latency_s[0] + model->message_s) * turns;
    t->near_byte = model->s_per_byte[0] * turns;
    /* Ranks that share a core change places for most messages; one that sends many keeps the others waiting. */
    t->message = model->message_s * turns * turns;
    t->reduce = model->reduce_s_per_byte * turns;
    t->crossing = far ? t->per_host : 1;
    t->chunk = (double)args->chunk_bytes;
    t->turns = turns;
    t->native = args->native_s;
}

/* What an algorithm can do, and what it needs. */
enum {
    DDL__SERVES_V = 1,   /* the v-form of its kind too */
    DDL__KEEPS_ORDER = 2, /* x0 op x1 op ...: the op need not be commutative */
    /* And brackets from the left: the bits depend on the operands alone, not on group, transport or cuts. */
    DDL__RANK_ORDER = 4 | DDL__KEEPS_ORDER,
    DDL__FENCES = 8 /* needs a fence whatever the size */
};

/* An algorithm: a pure function from arguments to plan, with what choosing needs to know of it. */
typedef struct ddl__algo {
    const char *name;
    ddl_kind kind;
    uint32_t traits;
    bool (*can)(const ddl__plan_args *args); /* NULL: whenever the above fits */
    void (*plan)(ddl__planner *p, const ddl__plan_args *args);
    double (*cost)(const ddl__terms *t);               /* seconds, without a fence */
    int64_t (*peer_bytes)(const ddl__plan_args *args); /* a bound of what any rank sends to any one other */
} ddl__algo;

static bool ddl__algo_has(const ddl__algo *algo, uint32_t traits) { return (algo->traits & traits) == traits; }

/* Bounds that several algorithms share. */
static int64_t ddl__peer_nothing(const ddl__plan_args *args) {
    (void)args;
    return 0;
}

static int64_t ddl__peer_once(const ddl__plan_args *args) { return ddl__total_bytes(args); }

static int64_t ddl__peer_twice(const ddl__plan_args *args) { return 2 * ddl__total_bytes(args); }

/* One block, or all that an all_to_allv may send: nobody knows, so it counts as too much. */
static int64_t ddl__peer_block(const ddl__plan_args *args) {
    return args->kind == DDL_ALL_TO_ALLV ? INT64_MAX : ddl__block_bytes(args);
}

#endif /* DDL_ALGO_COST_H */

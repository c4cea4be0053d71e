/* ps, first part: which server holds what, and how far a fast worker may run. Pure functions, the same on all ranks. */
#ifndef DDL_PS_SHARD_H
#define DDL_PS_SHARD_H

#include "../compress/sparse.h"
#include "../optim/lane.h"

enum {
    DDL__PS_SPREAD = 8,        /* pieces of a server, at least: so that none has much more than another */
    DDL__PS_PIECE_LEAST = 1024 /* elements: smaller ones cost more in messages than they even out */
};

/* Elements [begin, begin + count) of a parameter, on one server. */
typedef struct ddl__ps_piece {
    int32_t param, server;
    int64_t begin, count;
    ddl_dtype dtype; /* of its values, gradients, sums and optimizer state: f32 or f64 */
} ddl__ps_piece;

static size_t ddl__ps_piece_bytes(const ddl__ps_piece *piece) {
    return (size_t)piece->count * ddl_dtype_bytes(piece->dtype);
}

/* What the trainer says of a parameter, and users of ddl_ps_create cannot. All zero: an ordinary one. */
typedef struct ddl__ps_trait {
    double rate_factor; /* of the learning rate; 0: 1; below 0: it is not trained */
    bool no_decay;
    int32_t tensor;       /* its number to the trainer, for an optimizer of the program's own */
    ddl_compression code; /* of pushes, with its defaults filled in: each piece is one code; kind 0: as they are */
} ddl__ps_trait;

/* Of all parameters. */
typedef struct ddl__ps_details {
    const ddl__ps_trait *traits; /* by parameter, or NULL; they outlive the servers */
    bool check;                  /* gradients that are not finite are passed over */
    bool sums;                   /* BSP: a parameter is the sum (DDL_AVG: average) of the last clock's gradients */
} ddl__ps_details;

/* Kinds that a server can add up: what one worker sends says by itself what it stands for. */
static bool ddl__ps_takes(ddl_compression_kind kind) {
    return kind == DDL_COMPRESS_F16 || kind == DDL_COMPRESS_BF16 || kind == DDL_COMPRESS_INT8 ||
           kind == DDL_COMPRESS_QSGD || kind == DDL_COMPRESS_SIGN || kind == DDL_COMPRESS_TOP_K;
}

/* Bytes of a push to a piece. traits: of all parameters, or NULL. */
static int64_t ddl__ps_push_bytes(const ddl__ps_trait *traits, const ddl__ps_piece *piece) {
    bool coded = traits != NULL && traits[piece->param].code.kind != DDL_COMPRESS_NONE;
    return (int64_t)(coded ? ddl__code_bytes(&traits[piece->param].code, piece->count) : ddl__ps_piece_bytes(piece));
}

/* Elements of the largest piece: total is that of all parameters, whose largest elements have `size` bytes. whole: the
 * optimizer needs norms of whole tensors (LARS, LAMB), so that each is one piece, on one server. */
static int64_t ddl__ps_piece_limit(int64_t total, size_t size, int32_t servers, int64_t piece_bytes, bool whole) {
    if (whole) {
        return DDL__MAX(total, 1);
    }
    int64_t even = total / ((int64_t)servers * DDL__PS_SPREAD) + 1;
    return DDL__MIN(DDL__MAX(even, (int64_t)DDL__PS_PIECE_LEAST), piece_bytes / (int64_t)size);
}

/* Cuts parameters into pieces of at most `limit` elements, in order; returns how many. out may be NULL, to count. */
static int64_t ddl__ps_cut(const int64_t *counts, const ddl_dtype *types, int32_t params, int64_t limit,
                           ddl__ps_piece *out) {
    int64_t pieces = 0;
    for (int32_t p = 0; p < params; p++) {
        int64_t parts = counts[p] / limit + (counts[p] % limit != 0);
        for (int64_t i = 0; i < parts; i++, pieces++) {
            if (out != NULL) {
                ddl__ps_piece *at = &out[pieces];
                *at = (ddl__ps_piece){.param = p, .dtype = types[p]};
                ddl_part(counts[p], (int32_t)parts, (int32_t)i, &at->begin, &at->count);
            }
        }
    }
    return pieces;
}

static int ddl__ps_larger_first(const void *a, const void *b) {
    const ddl__ps_piece *x = *(ddl__ps_piece *const *)a, *y = *(ddl__ps_piece *const *)b;
    size_t a_bytes = ddl__ps_piece_bytes(x), b_bytes = ddl__ps_piece_bytes(y);
    return a_bytes != b_bytes ? (a_bytes < b_bytes) - (a_bytes > b_bytes) : (x > y) - (x < y);
}

/* Gives the pieces to servers, the largest first, each to the server that has least (LPT, Graham 1969). No server then
 * has more than another by more than one piece: the last that the fuller one got, it got as the emptiest. order and
 * load are scratch, of n and of servers entries. */
static void ddl__ps_assign(ddl__ps_piece *pieces, int64_t n, int32_t servers, ddl__ps_piece **order, int64_t *load) {
    for (int64_t i = 0; i < n; i++) {
        order[i] = &pieces[i];
    }
    if (n > 0) {
        qsort(order, (size_t)n, sizeof *order, ddl__ps_larger_first);
    }
    memset(load, 0, (size_t)servers * sizeof *load);
    for (int64_t i = 0; i < n; i++) {
        int32_t least = 0;
        for (int32_t s = 1; s < servers; s++) {
            least = load[s] < load[least] ? s : least;
        }
        order[i]->server = least;
        load[least] += (int64_t)ddl__ps_piece_bytes(order[i]);
    }
}

static int32_t ddl__ps_server_of_row(uint64_t id, int32_t servers) {
    return (int32_t)(ddl__mix(0x726f77, id) % (uint64_t)servers);
}

/* How many iterations a worker that has to wait should be let go on from now, 0 .. range: the number after which it
 * meets an end of the slowest's iteration with the shortest wait (DSSP, Zhao et al., ICDCS 2019, algorithm 2). Times in
 * ns, measured: now, the end of the slowest's last iteration, how long its and our iterations take. */
static int32_t ddl__ps_extra(uint64_t now, uint64_t slow_end, uint64_t slow_takes, uint64_t takes, int32_t range) {
    int32_t best = 0;
    uint64_t least = UINT64_MAX;
    for (int32_t r = 0; r <= range; r++) {
        uint64_t mine = now + (uint64_t)r * takes;
        uint64_t since = mine > slow_end ? mine - slow_end : 0;
        uint64_t wait = (slow_takes - since % slow_takes) % slow_takes; /* to the next end at or after `mine` */
        wait = since == 0 ? slow_end - mine + slow_takes : wait;
        if (wait < least) {
            least = wait;
            best = r;
        }
    }
    return best;
}

#endif /* DDL_PS_SHARD_H */

/* algo/device: plans for tensors in the memory of devices, in groups of several hosts. What goes by the network goes by
 * the host's memory: in pieces, of which up to three are under way, so that copies and the network overlap and pinned
 * scratch stays small whatever the size of the tensors. It must not know of devices: a move is a step. */
#ifndef DDL_ALGO_DEVICE_H
#define DDL_ALGO_DEVICE_H

#include "native.h"

/* >>algo-pieces: any algorithm of ordinary memory, among all ranks or some of them, on tensors of devices. It is
 * written once for each piece, a range of elements of every block, with IN and OUT in scratch:
 *
 *     piece k:  move to scratch | the algorithm, in scratch | move back
 *
 * The builder sees that a piece reuses the scratch of the one three before. That this rank's scratch is free says
 * nothing of its peers': who receives in a piece tells who sends to it, else what comes early would have to be kept. */
enum { DDL__MOVE_SLOTS = 3 };

typedef struct ddl__pieces {
    ddl__planner *p;
    ddl__plan_args args; /* of a piece, as the algorithm sees it */
    ddl__scope scope;
    ddl__place in, out; /* the tensors */
    bool many_in, many_out; /* a block for each rank; else one */
    bool has_in, has_out;   /* this rank's are looked at */
    bool keeps_own;         /* its own block is where it belongs without us */
    int64_t each, number;   /* elements of a piece; pieces */
    int64_t *counts, *at;   /* by rank: elements of its block, and its first byte in the larger tensor */
    int64_t *part, *offset; /* of its part of a piece: elements, and where they are among the parts of all */
    uint32_t *may, *told;   /* by rank of the group: the step after which this one may send to it; what it is told */
    int64_t base[DDL__MOVE_SLOTS], top; /* scratch */
    uint32_t first[DDL__MOVE_SLOTS], end[DDL__MOVE_SLOTS]; /* steps of the last piece there */
} ddl__pieces;

static bool ddl__blocks_in(ddl_kind kind) {
    kind = ddl__kind_base(kind);
    return kind == DDL_SCATTER || kind == DDL_REDUCE_SCATTER || kind == DDL_ALL_TO_ALL;
}

static bool ddl__blocks_out(ddl_kind kind) {
    kind = ddl__kind_base(kind);
    return kind == DDL_GATHER || kind == DDL_ALL_GATHER || kind == DDL_ALL_TO_ALL;
}

/* Elements of each block in a piece, the same on every rank. An all_to_all has two tensors in scratch, and what reduces
 * may have parts of others there. */
static int64_t ddl__piece_elements(const ddl__plan_args *args) {
    ddl_kind kind = ddl__kind_base(args->kind);
    bool in = ddl__blocks_in(kind), out = ddl__blocks_out(kind);
    bool twice = kind == DDL_ALL_TO_ALL || kind == DDL_REDUCE_SCATTER || kind == DDL_REDUCE ||
                 kind == DDL_ALL_REDUCE || kind == DDL_SCAN || kind == DDL_EXSCAN;
    int64_t blocks = (in || out ? args->size : 1) * (twice ? 2 : 1);
    return DDL__MAX(args->move_bytes / args->element_bytes / blocks, 1);
}

/* The largest piece of a call, for who chooses the algorithm. across: among one rank of each host. */
static ddl__plan_args ddl__piece_args(const ddl__plan_args *args, bool across) {
    ddl__plan_args piece = *args;
    piece.on_device = false;
    piece.native_s = 0;
    if (across) {
        piece.size = ddl__host_count(args);
        piece.root = 0;
        piece.apart = true;
    }
    piece.count = DDL__MIN(args->count, ddl__piece_elements(&piece));
    return piece;
}

/* args: of the call among those ranks, for whole tensors. Free with ddl__pieces_close, also when it fails. */
static bool ddl__pieces_open(ddl__pieces *w, ddl__planner *p, const ddl__plan_args *args, const int32_t *ranks) {
    int32_t n = args->size;
    ddl_kind kind = ddl__kind_base(args->kind);
    bool root = args->rank == args->root;
    *w = (ddl__pieces){.p = p, .args = *args, .scope = {.ranks = ranks}, .in = ddl__in, .out = ddl__out};
    w->many_in = ddl__blocks_in(kind);
    w->many_out = ddl__blocks_out(kind);
    w->has_in = root || (kind != DDL_SCATTER && kind != DDL_BROADCAST);
    w->has_out = kind == DDL_BROADCAST ? !root
                 : kind == DDL_EXSCAN  ? args->rank > 0
                                       : root || (kind != DDL_REDUCE && kind != DDL_GATHER);
    w->keeps_own = kind == DDL_ALL_GATHER && args->in_place;
    bool both = w->has_in && w->has_out;
    w->args.in_place = kind == DDL_BROADCAST || (kind != DDL_ALL_TO_ALL && (both || kind == DDL_EXSCAN));
    w->args.on_device = false;
    w->args.native_s = 0;
    w->each = ddl__piece_elements(args);
    w->counts = p->status < 0 ? NULL : ddl__alloc_array(p->base, 4 * (size_t)n, sizeof *w->counts);
    w->may = p->status < 0 ? NULL : ddl__alloc_array(p->base, 2 * (size_t)p->args->size, sizeof *w->may);
    if (w->counts == NULL || w->may == NULL) {
        p->status = DDL_ERR_NOMEM;
        return false;
    }
    w->told = w->may + p->args->size;
    w->at = w->counts + n;
    w->part = w->at + n;
    w->offset = w->part + n;
    for (int32_t r = 0; r < n; r++) {
        w->counts[r] = ddl__kind_is_v(args->kind) ? args->counts[r] : args->count;
        w->at[r] = ddl__block(args, r).at;
        w->number = DDL__MAX(w->number, (w->counts[r] + w->each - 1) / w->each);
    }
    w->args.counts = w->part;
    w->args.offsets = w->offset;
    return true;
}

static void ddl__pieces_close(ddl__pieces *w) {
    w->p->tmp_bytes = DDL__MAX(w->p->tmp_bytes, w->top);
    ddl__free(w->p->base, w->counts);
    ddl__free(w->p->base, w->may);
}

/* Before a piece: tells those who sent to this rank in the last one of the same scratch that it has done with that,
 * and waits for word of those it sent to. */
static void ddl__piece_pace(ddl__pieces *w, int32_t place) {
    ddl__planner *p = w->p;
    uint32_t slot = ddl__plan_slots(p, 1), end = w->end[place];
    uint32_t done = ddl__plan_copy(p, ddl__in, ddl__out, (ddl__span){0, 0});
    ddl__span signal = {0, 0};
    for (int32_t r = 0; r < p->args->size; r++) {
        w->may[r] = w->told[r] = DDL__NO_STEP;
    }
    for (uint32_t i = w->first[place]; i < end && p->status >= 0; i++) {
        ddl__plan_after(p, done, i);
    }
    for (uint32_t i = w->first[place]; i < end && p->status >= 0; i++) {
        const ddl__step *s = &p->steps[i];
        int32_t peer = s->peer;
        if (s->bytes > 0 && s->kind == DDL__SEND && w->may[peer] == DDL__NO_STEP) {
            w->may[peer] = ddl__plan_recv(p, peer, slot, ddl__out, signal);
        } else if (s->bytes > 0 && (s->kind == DDL__RECV || s->kind == DDL__RECV_REDUCE) &&
                   w->told[peer] == DDL__NO_STEP) {
            w->told[peer] = ddl__plan_send(p, peer, slot, ddl__in, signal);
            ddl__plan_after(p, w->told[peer], done);
        }
    }
}

/* Moves this rank's parts of a piece: many blocks, or its own alone. skip: a block that stays. */
static void ddl__piece_move(ddl__pieces *w, int64_t k, bool many, ddl__place there, int64_t here, bool comes,
                            int32_t skip) {
    int64_t size = w->args.element_bytes, begin = k * w->each * size;
    int32_t rank = w->args.rank, end = many ? w->args.size : rank + 1;
    for (int32_t r = many ? 0 : rank; r < end;) {
        int64_t at = (many ? w->at[r] : 0) + begin, tmp = here + (many ? w->offset[r] * size : 0);
        ddl__span part = {at, 0};
        do { /* blocks that follow each other in both memories are moved together */
            part.bytes += r == skip ? 0 : w->part[r] * size;
            r++;
        } while (r < end && r != skip && r - 1 != skip && w->at[r] + begin == part.at + part.bytes);
        ddl__place scratch = {DDL__TMP, tmp - at};
        if (part.bytes > 0) {
            ddl__plan_local(w->p, DDL__MOVE, comes ? there : scratch, comes ? scratch : there, part, 0);
        }
    }
}

/* Where the piece is in scratch. In place, but for an all_to_all. */
static void ddl__piece_place(ddl__pieces *w, int64_t k, int64_t *out_in, int64_t *out_out) {
    ddl__planner *p = w->p;
    int32_t place = (int32_t)(k % DDL__MOVE_SLOTS), rank = w->args.rank;
    int64_t size = w->args.element_bytes, total = 0;
    for (int32_t r = 0; r < w->args.size; r++) {
        w->part[r] = DDL__MAX(DDL__MIN(w->counts[r] - k * w->each, w->each), 0);
        w->offset[r] = total;
        total += w->part[r];
    }
    bool many = (w->many_in && w->has_in) || (w->many_out && w->has_out);
    int64_t own = many ? w->offset[rank] * size : 0;
    w->args.count = w->part[rank];
    w->base[place] = k < DDL__MOVE_SLOTS ? w->top : w->base[place];
    p->tmp_bytes = w->base[place];
    int64_t here = ddl__plan_tmp(p, (ddl__span){0, (many ? total : w->part[rank]) * size}).base;
    *out_in = *out_out = here;
    if (w->many_in && w->many_out) {
        *out_out = ddl__plan_tmp(p, (ddl__span){0, total * size}).base;
    }
    w->scope.at[DDL__IN] = *out_in + (w->many_in ? 0 : own);
    w->scope.at[DDL__OUT] = *out_out + (w->many_out ? 0 : own);
}

/* The next piece; they are written in order. */
static void ddl__piece_write(ddl__pieces *w, int64_t k) {
    ddl__planner *p = w->p;
    const ddl__plan_args *outer = p->args;
    int32_t place = (int32_t)(k % DDL__MOVE_SLOTS);
    int64_t in, out;
    if (k >= DDL__MOVE_SLOTS) {
        ddl__piece_pace(w, place);
    }
    ddl__piece_place(w, k, &in, &out);
    uint32_t first = p->step_count;
    if (w->has_in) {
        ddl__piece_move(w, k, w->many_in, w->in, w->many_in ? in : w->scope.at[DDL__IN], true, -1);
    }
    p->args = &w->args;
    p->scope = &w->scope;
    w->args.inner->plan(p, &w->args);
    p->args = outer;
    p->scope = NULL;
    for (uint32_t i = first; k >= DDL__MOVE_SLOTS && i < p->step_count; i++) {
        if (p->steps[i].kind == DDL__SEND) {
            ddl__plan_after(p, i, w->may[p->steps[i].peer]);
        }
    }
    if (w->has_out) {
        ddl__piece_move(w, k, w->many_out, w->out, w->many_out ? out : w->scope.at[DDL__OUT], false,
                        w->keeps_own ? w->args.rank : -1);
    }
    w->first[place] = first;
    w->end[place] = p->step_count;
    w->top = DDL__MAX(w->top, p->tmp_bytes);
}

static void ddl__algo_device_pieces(ddl__planner *p, const ddl__plan_args *args) {
    ddl__pieces w;
    bool ok = ddl__pieces_open(&w, p, args, NULL);
    for (int64_t k = 0; ok && k < w.number; k++) {
        ddl__piece_write(&w, k);
    }
    ddl__pieces_close(&w);
}

/* >>algo-straight: where adapters read memory of devices, and devices of a host that of each other. What only moves
 * data is the plan of ordinary memory as it stands, with scratch on the device too. */
static bool ddl__can_straight(const ddl__plan_args *args) {
    ddl_kind kind = ddl__kind_base(args->kind);
    return args->straight && (kind == DDL_BROADCAST || kind == DDL_ALL_GATHER || kind == DDL_GATHER ||
                              kind == DDL_SCATTER || kind == DDL_ALL_TO_ALL);
}

static void ddl__algo_device_straight(ddl__planner *p, const ddl__plan_args *args) {
    args->inner->plan(p, args);
    for (uint32_t i = 0; i < p->step_count; i++) {
        ddl__step *s = &p->steps[i];
        s->src_space = s->src_space == DDL__TMP ? DDL__THERE : s->src_space;
        s->dst_space = s->dst_space == DDL__TMP ? DDL__THERE : s->dst_space;
    }
    p->there_bytes = p->tmp_bytes;
    p->tmp_bytes = 0;
    p->straight = true;
}

/* >>algo-exchange: there, what reduces goes from device to device too, in pieces. Each rank takes its part of a piece
 * from all others, in scratch on its device in the order of ranks; one kernel reduces them, and the results go on:
 *
 *     piece k:  parts to their ranks | FOLD | results to all, or to the root
 *
 * 2 (n-1)/n M bytes leave a rank of an all_reduce, in two hops: the least. Up to three pieces are under way. */
static bool ddl__can_exchange(const ddl__plan_args *args) {
    ddl_kind kind = ddl__kind_base(args->kind);
    return args->straight && args->folds &&
           (kind == DDL_ALL_REDUCE || kind == DDL_REDUCE || kind == DDL_REDUCE_SCATTER);
}

typedef struct ddl__exchange {
    ddl__planner *p;
    const ddl__plan_args *args; /* of the call among those ranks */
    const int32_t *ranks;       /* of the group; NULL: all */
    ddl__place in, out;         /* the tensors, on the device */
    bool blocks, scaled;        /* a reduce_scatter; its inputs are scaled here */
    int64_t each;               /* elements of a piece, or of its part of each block */
    int64_t at[DDL__MOVE_SLOTS], scaled_at[DDL__MOVE_SLOTS], room; /* scratch; room: for one part */
    uint32_t fold[DDL__MOVE_SLOTS]; /* of the last piece there */
    int64_t written;            /* pieces */
} ddl__exchange;

/* scaled: not where native steps come first, which do it. */
static ddl__exchange ddl__exchange_open(ddl__planner *p, const ddl__plan_args *args, const int32_t *ranks, int64_t each,
                                        bool scaled) {
    int64_t n = args->size;
    ddl__exchange x = {.p = p, .args = args, .ranks = ranks, .in = ddl__in, .out = ddl__out, .scaled = scaled,
                       .each = each};
    x.blocks = ddl__kind_base(args->kind) == DDL_REDUCE_SCATTER;
    x.room = ddl__fold_room((x.blocks ? each : (each + n - 1) / n) * args->element_bytes);
    for (int i = 0; i < DDL__MOVE_SLOTS; i++) {
        x.at[i] = ddl__plan_there(p, n * x.room).base;
        x.scaled_at[i] = scaled ? ddl__plan_there(p, n * x.room).base : 0;
        x.fold[i] = DDL__NO_STEP;
    }
    p->straight = true;
    return x;
}

static int32_t ddl__exchange_rank(const ddl__exchange *x, int32_t r) { return x->ranks != NULL ? x->ranks[r] : r; }

/* A rank's part of a piece: of its block, or of the elements that the piece is. */
static ddl__span ddl__exchange_part(const ddl__exchange *x, ddl__span piece, int32_t r) {
    if (!x->blocks) {
        return ddl__span_part(piece, x->args->size, r, x->args->element_bytes);
    }
    ddl__span block = ddl__block(x->args, r);
    int64_t skip = DDL__MIN(piece.at, block.bytes);
    return (ddl__span){block.at + skip, DDL__MIN(block.bytes - skip, piece.bytes)};
}

/* Sends the others their parts, takes this rank's, and reduces them into `to`. */
static uint32_t ddl__exchange_fold(ddl__exchange *x, ddl__span piece, uint32_t slot, ddl__place to) {
    ddl__planner *p = x->p;
    int32_t n = x->args->size, rank = x->args->rank, turn = (int32_t)(x->written % DDL__MOVE_SLOTS);
    ddl__span mine = ddl__exchange_part(x, piece, rank);
    int64_t at = x->at[turn], room = ddl__fold_room(mine.bytes);
    uint8_t flags = x->scaled ? DDL__SCALED : 0;
    for (int32_t i = 1; i < n; i++) {
        int32_t r = (rank + i) % n;
        ddl__span part = ddl__exchange_part(x, piece, r);
        ddl__place from = x->in;
        if (x->scaled && part.bytes > 0) {
            from = (ddl__place){DDL__THERE, x->scaled_at[turn] + r * x->room - part.at};
            ddl__plan_local(p, DDL__COPY, x->in, from, part, flags);
        }
        if (part.bytes > 0) { /* not further ahead of its own results than there is scratch */
            ddl__plan_after(p, ddl__plan_send(p, ddl__exchange_rank(x, r), slot, from, part), x->fold[turn]);
        }
    }
    if (mine.bytes == 0) {
        return DDL__NO_STEP;
    }
    for (int32_t i = 1; i < n; i++) {
        int32_t r = (rank - i + n) % n;
        ddl__plan_recv(p, ddl__exchange_rank(x, r), slot, (ddl__place){DDL__THERE, at + r * room - mine.at}, mine);
    }
    ddl__plan_local(p, DDL__COPY, x->in, (ddl__place){DDL__THERE, at + rank * room - mine.at}, mine, flags);
    return ddl__plan_fold(p, n, at, to, mine);
}

/* One piece: bytes of the tensor or, of a reduce_scatter, of each block. All ranks write the same ones. */
static void ddl__exchange_write(ddl__exchange *x, ddl__span piece) {
    ddl__planner *p = x->p;
    const ddl__plan_args *args = x->args;
    int32_t n = args->size, rank = args->rank, turn = (int32_t)(x->written % DDL__MOVE_SLOTS);
    bool all = args->kind == DDL_ALL_REDUCE, root = args->kind == DDL_REDUCE && rank == args->root;
    uint32_t slot = ddl__plan_slots(p, 2);
    ddl__span mine = ddl__exchange_part(x, piece, rank);
    ddl__place to = x->out;
    if (x->blocks) {
        to.base -= ddl__block(args, rank).at;
    } else if (!all && !root) { /* it has no OUT */
        to = (ddl__place){DDL__THERE, x->at[turn] - mine.at};
    }
    x->fold[turn] = ddl__exchange_fold(x, piece, slot, to);
    for (int32_t i = 1; !x->blocks && i < n; i++) {
        int32_t r = (rank + i) % n, from = (rank - i + n) % n;
        ddl__span theirs = ddl__exchange_part(x, piece, from);
        if (mine.bytes > 0 && (all || (!root && r == args->root))) {
            ddl__plan_send(p, ddl__exchange_rank(x, r), slot + 1, to, mine);
        }
        if (theirs.bytes > 0 && (all || root)) {
            ddl__plan_recv(p, ddl__exchange_rank(x, from), slot + 1, x->out, theirs);
        }
    }
    x->written++;
}

/* Elements of a piece. */
static int64_t ddl__exchange_elements(const ddl__plan_args *args) {
    int64_t blocks = ddl__kind_base(args->kind) == DDL_REDUCE_SCATTER ? args->size : 1;
    return DDL__MAX(args->move_bytes / args->element_bytes / blocks, 1);
}

static void ddl__exchange_all(ddl__exchange *x) {
    const ddl__plan_args *args = x->args;
    int64_t size = args->element_bytes, bytes = x->blocks ? ddl__block_bytes(args) : args->count * size;
    for (int64_t at = 0; x->p->status >= 0 && at < bytes; at += x->each * size) {
        ddl__exchange_write(x, (ddl__span){at, DDL__MIN(x->each * size, bytes - at)});
    }
}

static void ddl__algo_device_exchange(ddl__planner *p, const ddl__plan_args *args) {
    ddl__exchange x = ddl__exchange_open(p, args, NULL, ddl__exchange_elements(args), args->scaled);
    ddl__exchange_all(&x);
}

/* >>algo-device-hierarchy: several hosts with as many ranks each, whose devices run collectives inside the host. Their
 * native steps are in one order on all ranks of a host. */
static bool ddl__can_device_hierarchy(const ddl__plan_args *args) {
    return args->on_device && ddl__can_native_hierarchy(args);
}

/* Those whose native collectives take the blocks of a host as one: its ranks follow each other. */
static bool ddl__can_device_blocks(const ddl__plan_args *args) {
    bool follow = ddl__can_device_hierarchy(args);
    for (int32_t r = 0, each = args->size / ddl__host_count(args); follow && r < args->size; r++) {
        follow = args->host_of[r] == r / each;
    }
    return follow;
}

/* The ranks that have number `number` on their hosts, and the call among them. False: this is none of them; *out_ranks
 * is to be freed. */
static bool ddl__team_make(ddl__planner *p, const ddl__plan_args *args, int32_t number, int32_t **out_ranks,
                           ddl__plan_args *out) {
    int32_t hosts = ddl__host_count(args), mine = -1;
    *out = *args;
    out->size = hosts;
    out->rank = args->host_of[args->rank];
    out->root = args->host_of[args->root];
    out->apart = true;
    *out_ranks = p->status < 0 ? NULL : ddl__alloc_array(p->base, (size_t)hosts, sizeof **out_ranks);
    if (*out_ranks == NULL) {
        p->status = DDL_ERR_NOMEM;
        return false;
    }
    for (int32_t host = 0; host < hosts; host++) {
        for (int32_t r = 0, n = 0; r < args->size; r++) {
            if (args->host_of[r] == host && n++ == number) {
                (*out_ranks)[host] = r;
                mine = r == args->rank ? r : mine;
            }
        }
    }
    return mine >= 0;
}

/* Which of the ranks of its host a rank is. */
static int32_t ddl__number_on_host(const ddl__plan_args *args, int32_t rank) {
    int32_t number = 0;
    for (int32_t r = 0; r < rank; r++) {
        number += args->host_of[r] == args->host_of[rank];
    }
    return number;
}

/* broadcast: between the ranks that have the root's number on their hosts, and from these inside. Each piece goes on
 * as soon as it is on the device. */
static void ddl__algo_broadcast_device(ddl__planner *p, const ddl__plan_args *args) {
    int32_t *ranks, number = ddl__number_on_host(args, args->root);
    ddl__plan_args between;
    ddl__pieces w = {.p = p};
    bool part = ddl__team_make(p, args, number, &ranks, &between) && ddl__pieces_open(&w, p, &between, ranks);
    int64_t each = ddl__piece_elements(&between), size = args->element_bytes;
    uint32_t last = DDL__NO_STEP;
    for (int64_t k = 0; p->status >= 0 && k * each < args->count; k++) {
        ddl__span piece = {k * each * size, DDL__MIN(each, args->count - k * each) * size};
        if (part) {
            ddl__piece_write(&w, k);
        }
        uint32_t step = ddl__plan_native(p, DDL_BROADCAST, number, ddl__in, piece, ddl__in, piece);
        ddl__plan_after(p, step, last);
        last = step;
    }
    ddl__pieces_close(&w);
    ddl__free(p->base, ranks);
}

/* reduce: inside each host to the rank that has the root's number there, in scratch on the device; between these. */
static void ddl__algo_reduce_device(ddl__planner *p, const ddl__plan_args *args) {
    int32_t *ranks, number = ddl__number_on_host(args, args->root);
    ddl__plan_args between;
    ddl__pieces w = {.p = p};
    ddl__exchange x;
    bool straight = ddl__can_exchange(args), part = ddl__team_make(p, args, number, &ranks, &between);
    part = part && (straight || ddl__pieces_open(&w, p, &between, ranks));
    int64_t each = straight ? ddl__exchange_elements(&between) : ddl__piece_elements(&between);
    int64_t size = args->element_bytes;
    if (straight && part) {
        x = ddl__exchange_open(p, &between, ranks, each, false);
    }
    int64_t room = (DDL__MIN(each, args->count) * size + 63) / 64 * 64;
    ddl__place scratch = part ? ddl__plan_there(p, DDL__MOVE_SLOTS * room) : ddl__out;
    uint32_t last = DDL__NO_STEP;
    for (int64_t k = 0; p->status >= 0 && k * each < args->count; k++) {
        ddl__span piece = {k * each * size, DDL__MIN(each, args->count - k * each) * size};
        ddl__place to = ddl__out;
        if (part) {
            to = (ddl__place){DDL__THERE, scratch.base + k % DDL__MOVE_SLOTS * room - piece.at};
        }
        uint32_t step = ddl__plan_native(p, DDL_REDUCE, number, ddl__in, piece, to, piece);
        ddl__plan_after(p, step, last);
        last = step;
        if (part && straight) {
            x.in = to;
            ddl__exchange_write(&x, piece);
        } else if (part) {
            w.in = to;
            ddl__piece_write(&w, k);
        }
    }
    p->straight = straight;
    ddl__pieces_close(&w);
    ddl__free(p->base, ranks);
}

/* The host that comes i-th after this one, and the blocks of its ranks in the larger tensor. */
static ddl__span ddl__host_blocks(const ddl__plan_args *args, const ddl__plan_args *between, int32_t i) {
    int64_t bytes = args->count * args->element_bytes * (args->size / between->size);
    return (ddl__span){(between->rank + i) % between->size * bytes, bytes};
}

/* all_gather: each block between the ranks that have its owner's number on their hosts, and from these inside: host by
 * host, once all of it is there. */
static void ddl__algo_all_gather_device(ddl__planner *p, const ddl__plan_args *args) {
    int32_t *ranks, number = ddl__number_on_host(args, args->rank);
    int64_t block = args->count * args->element_bytes;
    ddl__plan_args between;
    ddl__pieces w = {.p = p};
    bool ok = ddl__team_make(p, args, number, &ranks, &between) && ddl__pieces_open(&w, p, &between, ranks);
    uint32_t last = ddl__plan_native(p, DDL_ALL_GATHER, 0, ddl__in, (ddl__span){0, block}, ddl__out,
                                     ddl__host_blocks(args, &between, 0));
    w.keeps_own = true;
    for (int32_t t = 0; ok && t < between.size; t++) {
        w.at[t] = ranks[t] * block;
    }
    for (int64_t k = 0; ok && k < w.number; k++) {
        ddl__piece_write(&w, k);
    }
    for (int32_t i = 1; i < between.size; i++) {
        ddl__span all = ddl__host_blocks(args, &between, i), own = {all.at + number * block, block};
        uint32_t step = ddl__plan_native(p, DDL_ALL_GATHER, 0, ddl__out, own, ddl__out, all);
        ddl__plan_after(p, step, last);
        last = step;
    }
    ddl__pieces_close(&w);
    ddl__free(p->base, ranks);
}

/* reduce_scatter: the blocks of each host are reduced inside, each by the rank that has its owner's number, into
 * scratch on the device; then between these. Scratch is as large as `in` divided by the ranks of a host. */
static void ddl__algo_reduce_scatter_device(ddl__planner *p, const ddl__plan_args *args) {
    int32_t *ranks, number = ddl__number_on_host(args, args->rank);
    bool straight = ddl__can_exchange(args);
    int64_t block = args->count * args->element_bytes, room = straight ? block : (block + 63) / 64 * 64;
    ddl__plan_args between;
    ddl__pieces w = {.p = p};
    bool ok = ddl__team_make(p, args, number, &ranks, &between) && ddl__pieces_open(&w, p, &between, ranks);
    uint32_t last = DDL__NO_STEP;
    w.in = ddl__plan_there(p, between.size * room);
    for (int32_t i = 0; ok && i < between.size; i++) {
        int32_t t = (between.rank + i) % between.size;
        w.at[t] = t * room;
        ddl__span part = {w.at[t], block};
        uint32_t step = ddl__plan_native(p, DDL_REDUCE_SCATTER, 0, ddl__in, ddl__host_blocks(args, &between, i), w.in,
                                         part);
        ddl__plan_after(p, step, last);
        last = step;
    }
    if (ok && straight) {
        ddl__exchange x = ddl__exchange_open(p, &between, ranks, ddl__exchange_elements(&between), false);
        x.in = w.in;
        ddl__exchange_all(&x);
    }
    for (int64_t k = 0; ok && !straight && k < w.number; k++) {
        ddl__piece_write(&w, k);
    }
    ddl__pieces_close(&w);
    ddl__free(p->base, ranks);
}

/* all_reduce: natively reduced and scattered inside each host; between hosts each rank's part goes by the host's
 * memory, or is exchanged straight, piece by piece:
 *
 *     piece k:  reduce-scatter | move to the host | ring between hosts | move back | all-gather
 *     straight: reduce-scatter | exchange                                          | all-gather
 *
 * The native steps of a host's ranks are in one order, in which the all-gather of a piece comes after the
 * reduce-scatter of the next two: so up to three pieces are under way, one on the devices, one copied, one on the
 * network, and scratch is for three. */

/* This rank's part of a piece, all-reduced between the hosts: straight, or by way of scratch (x NULL). */
static void ddl__plan_across(ddl__planner *p, const ddl__plan_args *args, ddl__exchange *x, const ddl__ring *across,
                             ddl__span part, ddl__place there) {
    if (x != NULL) {
        ddl__exchange_write(x, part);
        return;
    }
    ddl__cut cut = {args, false, part, across->size};
    ddl__plan_local(p, DDL__MOVE, ddl__out, there, part, 0);
    ddl__ring_reduce_scatter(p, across, &cut, (ddl__flow){there, there, there, 0});
    ddl__ring_all_gather(p, across, &cut, there, there);
    ddl__plan_local(p, DDL__MOVE, there, ddl__out, part, 0);
}

/* By pieces; x as above. each: bytes of a rank's part of them all; most: of a piece. */
static void ddl__all_reduce_pieces(ddl__planner *p, const ddl__plan_args *args, ddl__exchange *x, int64_t each,
                                   int64_t most) {
    ddl__ring inside = ddl__ring_of(args, true), across = ddl__ring_of(args, false);
    int64_t pieces = (each + most - 1) / most, slot = (most + 63) / 64 * 64, slots = DDL__MIN(pieces, DDL__MOVE_SLOTS);
    ddl__place scratch = ddl__plan_tmp(p, (ddl__span){0, x == NULL ? slots * slot : 0});
    uint32_t last = DDL__NO_STEP;
    for (int64_t k = 0; k < pieces + DDL__MOVE_SLOTS - 1; k++) {
        for (int64_t j = k; j > k - DDL__MOVE_SLOTS; j -= DDL__MOVE_SLOTS - 1) { /* piece k begins, k - 2 ends */
            int64_t part = DDL__MIN(most, each - j * most), at = j * most * inside.size;
            ddl__span piece = {at, part * inside.size}, mine = {at + part * inside.index, part};
            if (j < 0 || j >= pieces) {
                continue;
            }
            uint32_t step = j == k ? ddl__plan_native(p, DDL_REDUCE_SCATTER, 0, ddl__in, piece, ddl__out, mine)
                                   : ddl__plan_native(p, DDL_ALL_GATHER, 0, ddl__out, mine, ddl__out, piece);
            ddl__plan_after(p, step, last);
            last = step;
            if (j == k) {
                ddl__plan_across(p, args, x, &across, mine,
                                 (ddl__place){DDL__TMP, scratch.base + j % slots * slot - mine.at});
            }
        }
    }
    ddl__span rest = {each * inside.size, args->count * args->element_bytes - each * inside.size};
    if (rest.bytes > 0) { /* that the ranks of a host cannot share evenly: reduced on each, and round all rings alike */
        ddl__plan_after(p, ddl__plan_native(p, DDL_ALL_REDUCE, 0, ddl__in, rest, ddl__out, rest), last);
        ddl__plan_across(p, args, x, &across, rest, x == NULL ? ddl__plan_tmp(p, rest) : ddl__out);
    }
}

static void ddl__algo_all_reduce_device(ddl__planner *p, const ddl__plan_args *args) {
    int32_t inside = args->size / ddl__host_count(args), *ranks = NULL;
    int64_t bytes = args->element_bytes, each = args->count / inside * bytes;
    int64_t most = DDL__MAX(args->move_bytes / bytes, 1), rest = args->count % inside;
    ddl__plan_args between;
    if (!ddl__can_exchange(args)) {
        ddl__all_reduce_pieces(p, args, NULL, each, most * bytes);
    } else if (ddl__team_make(p, args, ddl__number_on_host(args, args->rank), &ranks, &between)) {
        ddl__exchange x = ddl__exchange_open(p, &between, ranks, DDL__MAX(most, rest), false);
        x.in = ddl__out;
        ddl__all_reduce_pieces(p, args, &x, each, most * bytes);
    }
    ddl__free(p->base, ranks);
}

#endif /* DDL_ALGO_DEVICE_H */

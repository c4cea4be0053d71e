/* algo/linear: everybody talks to everybody directly: fewest hops for each byte, most messages. Also the algorithms
 * that reduce strictly in the order of ranks. */
#ifndef DDL_ALGO_LINEAR_H
#define DDL_ALGO_LINEAR_H

#include "doubling.h"

/* A receive that must not write OUT yet lands in scratch: the last one to come tells that everybody made this call,
 * then all are copied. With two ranks the only receive is the last one. */
static bool ddl__must_stage(const ddl__planner *p) { return !p->fenced && p->args->size > 2; }

/* ((x0 op x1) op x2) ... of one chunk of this rank's part, whatever the size and shape of the group: the messages
 * come in any order but are reduced in the order of ranks. Rank n-1 ends with its own operand, the others with a
 * message. Only the last step writes `last`, except that rank n-1 moves there one step before when that is not in the
 * way of its own operand. */
static void ddl__fold_in_order(ddl__planner *p, uint32_t slot, ddl__place partial, ddl__place last, ddl__span chunk) {
    int32_t n = p->args->size, rank = p->args->rank;
    ddl__place at = ddl__in;
    for (int32_t r = 0; r < n; r++) {
        bool early = rank == n - 1 && r == n - 2 && !p->args->in_place;
        ddl__place to = r == n - 1 || early ? last : partial;
        if (r != rank) {
            if (r == 0) {
                ddl__plan_recv(p, r, slot, to, chunk);
            } else {
                ddl__plan_recv_reduce(p, r, slot, at, to, chunk, 0);
            }
        } else if (r == n - 1 && p->args->in_place) {
            ddl__plan_reduce(p, at, last, chunk, 0);
        } else if (r > 0) {
            to = at;
            ddl__plan_reduce(p, ddl__in, at, chunk, DDL__DST_FIRST);
        } else {
            to = ddl__in;
        }
        at = to;
    }
}

/* Everybody gives everybody its part: chunks of `cut`, from IN. The next rank first, so that not all begin with the
 * same one. */
static void ddl__give_parts(ddl__planner *p, const ddl__cut *cut, uint32_t slot) {
    const ddl__plan_args *args = p->args;
    for (int32_t i = 1; i < args->size; i++) {
        int32_t peer = (args->rank + i) % args->size;
        ddl__send_chunks(p, peer, slot, ddl__in, ddl__cut_part(cut, peer));
    }
}

/* Reduces this rank's part of the cut into `last`; where results are shared, each chunk goes to all as soon as it is
 * finished. */
static void ddl__fold_part(ddl__planner *p, const ddl__cut *cut, uint32_t slot, ddl__place last, bool share,
                           uint32_t share_slot) {
    const ddl__plan_args *args = p->args;
    ddl__span mine = ddl__cut_part(cut, args->rank);
    uint32_t chunks = mine.bytes > 0 ? ddl__chunk_count(args, mine.bytes) : 0;
    ddl__window window = ddl__plan_window(p, chunks, DDL__MIN(mine.bytes, ddl__chunk_bytes(args)));
    for (uint32_t c = 0; c < chunks; c++) {
        ddl__span chunk = ddl__chunk(args, mine, c);
        ddl__fold_in_order(p, slot + c, ddl__window_place(&window, c, chunk), last, chunk);
        for (int32_t i = 1; share && i < args->size; i++) {
            ddl__plan_send(p, (args->rank + i) % args->size, share_slot + c, last, chunk);
        }
    }
}

/* all_reduce: part r is reduced by rank r in the order of ranks, then given to all. */
static void ddl__algo_all_reduce_direct(ddl__planner *p, const ddl__plan_args *args) {
    ddl__cut cut = {args, false, ddl__whole(args), args->size};
    uint32_t each = ddl__cut_chunks(&cut), slot = ddl__plan_slots(p, 2 * each);
    ddl__give_parts(p, &cut, slot);
    ddl__fold_part(p, &cut, slot, ddl__out, true, slot + each);
    for (int32_t i = 1; i < args->size; i++) {
        int32_t peer = (args->rank - i + args->size) % args->size;
        ddl__recv_chunks(p, peer, slot + each, ddl__out, ddl__cut_part(&cut, peer));
    }
}

/* Two hops whatever n is; messages leave one after the other. */
static double ddl__cost_all_reduce_direct(const ddl__terms *t) {
    return 2 * t->latency + 2 * (t->n - 2) * t->message +
           (t->n - 1) / t->n * t->bytes * (2 * t->byte * t->crossing + t->reduce);
}

/* What one rank sends another: a part to reduce and a part that is reduced. */
static int64_t ddl__peer_parts(const ddl__plan_args *args) {
    return 2 * ddl__span_part(ddl__whole(args), args->size, 0, args->element_bytes).bytes;
}

/* reduce_scatter in the order of ranks. */
static void ddl__algo_reduce_scatter_direct(ddl__planner *p, const ddl__plan_args *args) {
    ddl__cut cut = {args, true, {0, 0}, args->size};
    uint32_t slot = ddl__plan_slots(p, ddl__cut_chunks(&cut));
    ddl__give_parts(p, &cut, slot);
    ddl__fold_part(p, &cut, slot, (ddl__place){DDL__OUT, -ddl__block(args, args->rank).at}, false, 0);
}

/* One hop, n - 1 messages one after the other. */
static double ddl__cost_spread(const ddl__terms *t) {
    return t->latency + (t->n - 2) * t->message + (t->n - 1) / t->n * t->bytes * t->byte * t->crossing;
}

static double ddl__cost_reduce_scatter_direct(const ddl__terms *t) {
    return ddl__cost_spread(t) + (t->n - 1) / t->n * t->bytes * t->reduce;
}

/* reduce_scatter, pairwise: in step i give to rank + i and take from rank - i. */
static void ddl__algo_reduce_scatter_pairwise(ddl__planner *p, const ddl__plan_args *args) {
    int32_t n = args->size;
    ddl__span mine = ddl__block(args, args->rank);
    uint32_t slot = ddl__plan_slots(p, 1);
    ddl__place partial = n > 2 ? ddl__plan_tmp(p, mine) : ddl__in, at = ddl__in;
    uint32_t heard = DDL__NO_STEP;
    for (int32_t i = 1; i < n; i++) {
        int32_t to = (args->rank + i) % n, from = (args->rank - i + n) % n;
        ddl__plan_after(p, ddl__plan_send(p, to, slot, ddl__in, ddl__block(args, to)), heard);
        ddl__place dst = i == n - 1 ? (ddl__place){DDL__OUT, -mine.at} : partial;
        heard = ddl__plan_recv_reduce(p, from, slot, at, dst, mine, 0);
        at = dst;
    }
}

/* (n-1) alpha + (n-1)/n M (beta + gamma) */
static double ddl__cost_reduce_scatter_pairwise(const ddl__terms *t) {
    return (t->n - 1) * t->latency + (t->n - 1) / t->n * t->bytes * (t->byte * t->crossing + t->reduce);
}

/* all_gather: in scratch the blocks stand in the order of the loop; nothing is copied to OUT, not even the own block,
 * before all have come. */
static void ddl__algo_all_gather_linear(ddl__planner *p, const ddl__plan_args *args) {
    int32_t n = args->size;
    ddl__span mine = ddl__block(args, args->rank);
    ddl__place own = {DDL__IN, -mine.at};
    bool stage = ddl__must_stage(p);
    ddl__span all = {0, ddl__total_bytes(args)};
    ddl__place tmp = stage ? ddl__plan_tmp(p, all) : ddl__out;
    uint32_t slot = ddl__plan_slots(p, 1);
    int64_t at = 0;
    for (int32_t i = 1; i < n; i++) {
        int32_t to = (args->rank + i) % n, from = (args->rank - i + n) % n;
        ddl__span theirs = ddl__block(args, from);
        ddl__plan_send(p, to, slot, own, mine);
        ddl__plan_recv(p, from, slot, stage ? (ddl__place){DDL__TMP, tmp.base + at - theirs.at} : ddl__out, theirs);
        at += theirs.bytes;
    }
    uint32_t join = p->fenced ? DDL__NO_STEP : ddl__plan_join(p);
    if (!args->in_place) {
        ddl__plan_after(p, ddl__plan_copy(p, own, ddl__out, mine), join);
    }
    at = 0;
    for (int32_t i = 1; stage && i < n; i++) {
        ddl__span theirs = ddl__block(args, (args->rank - i + n) % n);
        ddl__place from = {DDL__TMP, tmp.base + at - theirs.at};
        ddl__plan_after(p, ddl__plan_copy(p, from, ddl__out, theirs), join);
        at += theirs.bytes;
    }
}

/* all_to_all. In place, a block is replaced by the one that comes from the rank it goes to, so what comes waits in
 * scratch. Empty blocks are sent too: only their sender knows that they are empty. */
typedef struct ddl__swap {
    uint32_t slot;
    bool stage, in_turn; /* in_turn: step i waits for what step i-1 received */
    ddl__place tmp;
} ddl__swap;

/* Step i exchanges with the ranks i above and below, so that nobody is everybody's target at once. */
static void ddl__swap_blocks(ddl__planner *p, const ddl__swap *swap) {
    const ddl__plan_args *args = p->args;
    int32_t n = args->size;
    int64_t at = swap->tmp.base;
    uint32_t heard = DDL__NO_STEP;
    for (int32_t i = 1; i < n; i++) {
        int32_t to = (args->rank + i) % n, from = (args->rank - i + n) % n;
        ddl__span theirs = ddl__recv_block(args, from);
        uint32_t send = ddl__plan_send(p, to, swap->slot, ddl__in, ddl__block(args, to));
        ddl__plan_after(p, send, swap->in_turn ? heard : DDL__NO_STEP);
        heard = ddl__plan_recv(p, from, swap->slot, swap->stage ? (ddl__place){DDL__TMP, at - theirs.at} : ddl__out,
                               theirs);
        at += theirs.bytes;
    }
}

/* What stays on this rank, through scratch when the copy may run into blocks that have not left yet. */
static void ddl__swap_own(ddl__planner *p, uint32_t join, int64_t at) {
    ddl__span from = ddl__block(p->args, p->args->rank), to = ddl__recv_block(p->args, p->args->rank);
    if (!p->args->in_place) {
        ddl__plan_after(p, ddl__plan_copy(p, (ddl__place){DDL__IN, from.at - to.at}, ddl__out, to), join);
    } else if (from.at != to.at) {
        ddl__place tmp = {DDL__TMP, at - to.at};
        ddl__plan_copy(p, (ddl__place){DDL__IN, from.at - to.at}, tmp, to);
        ddl__plan_after(p, ddl__plan_copy(p, tmp, ddl__out, to), join);
    }
}

/* All that comes, the own block included. */
static int64_t ddl__recv_bytes(const ddl__plan_args *args) {
    int64_t bytes = 0;
    for (int32_t r = 0; r < args->size; r++) {
        bytes += ddl__recv_block(args, r).bytes;
    }
    return bytes;
}

/* The own block's place in scratch is behind those of the others. */
static void ddl__swap_all(ddl__planner *p, bool in_turn) {
    const ddl__plan_args *args = p->args;
    int32_t n = args->size;
    ddl__swap swap = {.slot = ddl__plan_slots(p, 1), .in_turn = in_turn};
    swap.stage = ddl__must_stage(p) || args->in_place;
    ddl__span scratch = {0, swap.stage ? ddl__recv_bytes(args) : 0};
    swap.tmp = ddl__plan_tmp(p, scratch);
    ddl__swap_blocks(p, &swap);
    uint32_t join = p->fenced ? DDL__NO_STEP : ddl__plan_join(p);
    ddl__swap_own(p, join, swap.tmp.base + scratch.bytes - ddl__recv_block(args, args->rank).bytes);
    int64_t at = swap.tmp.base;
    for (int32_t i = 1; swap.stage && i < n; i++) {
        ddl__span theirs = ddl__recv_block(args, (args->rank - i + n) % n);
        ddl__plan_after(p, ddl__plan_copy(p, (ddl__place){DDL__TMP, at - theirs.at}, ddl__out, theirs), join);
        at += theirs.bytes;
    }
}

/* Everything at once: best when the network takes it. */
static void ddl__algo_all_to_all_linear(ddl__planner *p, const ddl__plan_args *args) {
    (void)args;
    ddl__swap_all(p, false);
}

/* One pair at a time: slower for small blocks, but no rank is sent more than it takes. */
static void ddl__algo_all_to_all_pairwise(ddl__planner *p, const ddl__plan_args *args) {
    (void)args;
    ddl__swap_all(p, true);
}

static double ddl__cost_all_to_all_pairwise(const ddl__terms *t) {
    return (t->n - 1) * t->latency + (t->n - 1) / t->n * t->bytes * t->byte * t->crossing;
}

/* gather: the root takes every block itself. */
static void ddl__algo_gather_linear(ddl__planner *p, const ddl__plan_args *args) {
    uint32_t slot = ddl__plan_slots(p, 1);
    ddl__span mine = ddl__block(args, args->rank);
    ddl__place own = {DDL__IN, -mine.at};
    if (args->rank != args->root) {
        ddl__plan_send(p, args->root, slot, own, mine);
        return;
    }
    bool stage = ddl__must_stage(p);
    int64_t first = ddl__plan_tmp(p, (ddl__span){0, stage ? ddl__total_bytes(args) : 0}).base, at = first;
    for (int32_t r = 0; r < args->size; r++) {
        ddl__span theirs = ddl__block(args, r);
        if (r != args->rank) {
            ddl__plan_recv(p, r, slot, stage ? (ddl__place){DDL__TMP, at - theirs.at} : ddl__out, theirs);
        }
        at += theirs.bytes;
    }
    uint32_t join = p->fenced ? DDL__NO_STEP : ddl__plan_join(p);
    if (!args->in_place) {
        ddl__plan_after(p, ddl__plan_copy(p, own, ddl__out, mine), join);
    }
    at = first;
    for (int32_t r = 0; stage && r < args->size; r++) {
        ddl__span theirs = ddl__block(args, r);
        if (r != args->rank) {
            ddl__place tmp = {DDL__TMP, at - theirs.at};
            ddl__plan_after(p, ddl__plan_copy(p, tmp, ddl__out, theirs), join);
        }
        at += theirs.bytes;
    }
}

/* scatter: the root gives every block itself. */
static void ddl__algo_scatter_linear(ddl__planner *p, const ddl__plan_args *args) {
    uint32_t slot = ddl__plan_slots(p, 1);
    ddl__span mine = ddl__block(args, args->rank);
    ddl__place own = {DDL__OUT, -mine.at};
    if (args->rank != args->root) {
        ddl__plan_recv(p, args->root, slot, own, mine);
        return;
    }
    for (int32_t i = 1; i < args->size; i++) {
        int32_t peer = (args->rank + i) % args->size;
        ddl__plan_send(p, peer, slot, ddl__in, ddl__block(args, peer));
    }
    if (!args->in_place) {
        ddl__plan_copy(p, ddl__in, own, mine);
    }
}

/* reduce in the order of ranks: the root takes every vector and reduces it itself. */
static void ddl__algo_reduce_direct(ddl__planner *p, const ddl__plan_args *args) {
    ddl__span whole = ddl__whole(args);
    uint32_t chunks = ddl__chunk_count(args, whole.bytes), slot = ddl__plan_slots(p, chunks);
    ddl__window window = {0};
    if (args->rank == args->root) {
        window = ddl__plan_window(p, chunks, DDL__MIN(whole.bytes, ddl__chunk_bytes(args)));
    }
    for (uint32_t c = 0; c < chunks; c++) {
        ddl__span chunk = ddl__chunk(args, whole, c);
        if (args->rank == args->root) {
            ddl__fold_in_order(p, slot + c, ddl__window_place(&window, c, chunk), ddl__out, chunk);
        } else {
            ddl__plan_send(p, args->root, slot + c, ddl__in, chunk);
        }
    }
}

static double ddl__cost_reduce_direct(const ddl__terms *t) {
    return t->latency + (t->n - 2) * t->message + (t->n - 1) * t->bytes * (t->byte + t->reduce);
}

#endif /* DDL_ALGO_LINEAR_H */

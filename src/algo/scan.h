/* algo/scan: prefixes over the ranks, and gather and scatter along binomial trees. */
#ifndef DDL_ALGO_SCAN_H
#define DDL_ALGO_SCAN_H

#include "bruck.h"

/* Recursive doubling of prefixes: Hillis and Steele, "Data parallel algorithms", CACM 29, 1986. After round k a rank
 * has the result of itself and the 2^(k+1) - 1 ranks below it. `first` is the lowest rank that takes part; `at` is
 * where this rank's operand is. Each result goes beside its operand, which may still be leaving; the last is OUT. */
static void ddl__scan_doubling(ddl__planner *p, int32_t first, uint32_t slot, ddl__place at, ddl__span whole) {
    int32_t n = p->args->size, rank = p->args->rank, k = 0;
    ddl__place beside[2] = {ddl__in, ddl__in};
    if (rank - first >= 2) {
        beside[0] = ddl__plan_tmp(p, whole);
        beside[1] = ddl__plan_tmp(p, whole);
    }
    for (int32_t distance = 1; distance < n - first; distance *= 2, k++) {
        if (rank + distance < n) {
            ddl__plan_send(p, rank + distance, slot + (uint32_t)k, at, whole);
        }
        if (rank - distance >= first) {
            ddl__place to = rank - 2 * distance < first ? ddl__out : beside[k % 2];
            ddl__plan_recv_reduce(p, rank - distance, slot + (uint32_t)k, at, to, whole, DDL__THEIRS_FIRST);
            at = to;
        }
    }
}

/* Rank 0 hears of nobody and may write at once. */
static void ddl__algo_scan_doubling(ddl__planner *p, const ddl__plan_args *args) {
    uint32_t slot = ddl__plan_slots(p, ddl__log2_ceil(args->size));
    ddl__scan_doubling(p, 0, slot, ddl__in, ddl__whole(args));
    if (args->rank == 0 && !args->in_place) {
        ddl__plan_copy(p, ddl__in, ddl__out, ddl__whole(args));
    }
}

/* exscan: everybody gives its operand to the next rank; what ranks 1 .. n-1 then have is scanned. */
static void ddl__algo_exscan_doubling(ddl__planner *p, const ddl__plan_args *args) {
    ddl__span whole = ddl__whole(args);
    uint32_t slot = ddl__plan_slots(p, ddl__log2_ceil(args->size) + 1);
    if (args->rank + 1 < args->size) {
        ddl__plan_send(p, args->rank + 1, slot, ddl__in, whole);
    }
    if (args->rank == 0) {
        return;
    }
    ddl__place at = args->rank == 1 ? ddl__out : ddl__plan_tmp(p, whole);
    ddl__plan_recv(p, args->rank - 1, slot, at, whole);
    ddl__scan_doubling(p, 1, slot + 1, at, whole);
}

/* ceil(log2 n) (alpha + M (beta + gamma)) */
static double ddl__cost_scan_doubling(const ddl__terms *t) {
    return t->rounds * (t->latency + t->bytes * (t->byte + t->reduce));
}

/* Along the line of ranks, chunk by chunk. */
static void ddl__algo_scan_chain(ddl__planner *p, const ddl__plan_args *args) {
    ddl__span whole = ddl__whole(args);
    uint32_t chunks = ddl__chunk_count(args, whole.bytes), slot = ddl__plan_slots(p, chunks);
    for (uint32_t c = 0; c < chunks; c++) {
        ddl__span chunk = ddl__chunk(args, whole, c);
        if (args->rank > 0) {
            ddl__plan_recv_reduce(p, args->rank - 1, slot + c, ddl__in, ddl__out, chunk, DDL__THEIRS_FIRST);
        } else if (!args->in_place) {
            ddl__plan_copy(p, ddl__in, ddl__out, chunk);
        }
        if (args->rank + 1 < args->size) {
            ddl__plan_send(p, args->rank + 1, slot + c, args->rank == 0 ? ddl__in : ddl__out, chunk);
        }
    }
}

/* What came is the result; what goes on is that op own, which is made in scratch. */
static void ddl__algo_exscan_chain(ddl__planner *p, const ddl__plan_args *args) {
    ddl__span whole = ddl__whole(args);
    int32_t rank = args->rank;
    bool inner = rank > 0 && rank + 1 < args->size;
    uint32_t chunks = ddl__chunk_count(args, whole.bytes), slot = ddl__plan_slots(p, chunks);
    ddl__window came = {0}, goes = {0};
    if (inner) {
        int64_t each = DDL__MIN(whole.bytes, ddl__chunk_bytes(args));
        came = ddl__plan_window(p, chunks, each);
        goes = ddl__plan_window(p, chunks, each);
    }
    for (uint32_t c = 0; c < chunks; c++) {
        ddl__span chunk = ddl__chunk(args, whole, c);
        if (rank == 0) {
            ddl__plan_send(p, 1, slot + c, ddl__in, chunk);
        } else if (!inner) {
            ddl__plan_recv(p, rank - 1, slot + c, ddl__out, chunk);
        } else {
            ddl__place theirs = ddl__window_place(&came, c, chunk), ours = ddl__window_place(&goes, c, chunk);
            ddl__plan_recv(p, rank - 1, slot + c, theirs, chunk);
            ddl__plan_copy(p, ddl__in, ours, chunk);
            ddl__plan_reduce(p, theirs, ours, chunk, 0);
            ddl__plan_send(p, rank + 1, slot + c, ours, chunk);
            ddl__plan_copy(p, theirs, ddl__out, chunk);
        }
    }
}

/* >>algo-spread: gather and scatter along a binomial tree. Blocks are packed in the order of distance from the root,
 * in which a subtree is one run. */
static ddl__span ddl__packed_subtree(const ddl__plan_args *args, int32_t rank) {
    int32_t n = args->size, v = (rank - args->root + n) % n, lowest = v & -v;
    int32_t end = v == 0 || lowest > n - v ? n : v + lowest;
    if (!ddl__kind_is_v(args->kind)) {
        int64_t block = ddl__block_bytes(args);
        return (ddl__span){v * block, (end - v) * block};
    }
    ddl__span span = {0, 0};
    for (int32_t u = 0; u < end; u++) {
        int64_t bytes = ddl__block(args, (u + args->root) % n).bytes;
        span.at += u < v ? bytes : 0;
        span.bytes += u < v ? 0 : bytes;
    }
    return span;
}

/* Copies the blocks of all ranks but the root between the larger tensor and packed scratch; equal blocks in two runs,
 * up to the last rank's and from the first one's. */
static void ddl__spread_copy(ddl__planner *p, ddl__place tmp, bool unpack, uint32_t join) {
    const ddl__plan_args *args = p->args;
    int32_t n = args->size, root = args->root;
    bool v = ddl__kind_is_v(args->kind);
    int64_t at = ddl__block(args, root).bytes;
    for (int32_t u = 1; u < n;) {
        int32_t rank = (u + root) % n, run = v ? 1 : rank > root ? n - rank : root - rank;
        ddl__span blocks = {ddl__block(args, rank).at, v ? ddl__block(args, rank).bytes : run * at};
        int64_t packed = v ? at : u * at;
        ddl__place scratch = {DDL__TMP, tmp.base + packed - blocks.at};
        ddl__plan_after(p, ddl__plan_copy(p, unpack ? scratch : ddl__in, unpack ? ddl__out : scratch, blocks), join);
        at += v ? blocks.bytes : 0;
        u += run;
    }
}

/* Each rank gives its whole subtree to its parent in one message. The root unpacks when it has heard all children. */
static void ddl__algo_gather_tree(ddl__planner *p, const ddl__plan_args *args) {
    ddl__tree tree = ddl__tree_binomial(args->size, args->rank, args->root);
    ddl__span run = ddl__packed_subtree(args, args->rank), mine = ddl__block(args, args->rank);
    uint32_t slot = ddl__plan_slots(p, 1);
    if (tree.child_count == 0) {
        ddl__plan_send(p, tree.parent, slot, (ddl__place){DDL__IN, -run.at}, run);
        return;
    }
    ddl__place tmp = ddl__plan_tmp(p, run);
    for (int32_t i = 0; i < tree.child_count; i++) {
        ddl__plan_recv(p, tree.child[i], slot, tmp, ddl__packed_subtree(args, tree.child[i]));
    }
    if (tree.parent >= 0) {
        ddl__plan_copy(p, (ddl__place){DDL__IN, -run.at}, tmp, (ddl__span){run.at, mine.bytes});
        uint32_t join = ddl__plan_join(p);
        ddl__plan_after(p, ddl__plan_send(p, tree.parent, slot, tmp, run), join);
        return;
    }
    uint32_t join = ddl__plan_join(p);
    ddl__spread_copy(p, tmp, true, join);
    if (!args->in_place) {
        ddl__plan_after(p, ddl__plan_copy(p, (ddl__place){DDL__IN, -mine.at}, ddl__out, mine), join);
    }
}

/* ceil(log2 n) alpha + (n-1)/n M beta at the root, and the copy in and out of scratch */
static double ddl__cost_spread_tree(const ddl__terms *t) {
    return t->rounds * t->latency + (t->n - 1) / t->n * t->bytes * 2 * t->byte;
}

/* The same downwards: the root packs, each child takes the run of its subtree out of what came. */
static void ddl__algo_scatter_tree(ddl__planner *p, const ddl__plan_args *args) {
    ddl__tree tree = ddl__tree_binomial(args->size, args->rank, args->root);
    ddl__span run = ddl__packed_subtree(args, args->rank), mine = ddl__block(args, args->rank);
    ddl__place own = {DDL__OUT, -mine.at};
    uint32_t slot = ddl__plan_slots(p, 1);
    if (tree.child_count == 0) {
        ddl__plan_recv(p, tree.parent, slot, own, mine);
        return;
    }
    ddl__place tmp = ddl__plan_tmp(p, run);
    if (tree.parent >= 0) {
        ddl__plan_recv(p, tree.parent, slot, tmp, run);
    } else {
        ddl__spread_copy(p, tmp, false, DDL__NO_STEP);
    }
    for (int32_t i = tree.child_count - 1; i >= 0; i--) {
        ddl__plan_send(p, tree.child[i], slot, tmp, ddl__packed_subtree(args, tree.child[i]));
    }
    if (tree.parent >= 0) {
        ddl__plan_copy(p, (ddl__place){DDL__TMP, tmp.base + run.at - mine.at}, own, mine);
    } else if (!args->in_place) {
        ddl__plan_copy(p, ddl__in, own, mine);
    }
}

#endif /* DDL_ALGO_SCAN_H */

/* algo/bruck: log2 n rounds for any number of ranks, in scratch (Bruck, Ho, Kipnis, Upfal, Weathersby, "Efficient
 * algorithms for all-to-all communications in multiport message-passing systems", IEEE TPDS 8, 1997). For small data:
 * everything is copied before it is sent and once more at the end. */
#ifndef DDL_ALGO_BRUCK_H
#define DDL_ALGO_BRUCK_H

#include "linear.h"

/* The block in position i is that of rank + i; positions are packed. */
static ddl__span ddl__bruck_block(const ddl__plan_args *args, int32_t position) {
    return ddl__block(args, (args->rank + position) % args->size);
}

/* Bytes of some positions together. */
static int64_t ddl__bruck_bytes(const ddl__plan_args *args, int32_t from, int32_t positions) {
    int64_t bytes = 0;
    if (!ddl__kind_is_v(args->kind)) {
        return positions * ddl__block_bytes(args);
    }
    for (int32_t i = from; i < from + positions; i++) {
        bytes += ddl__bruck_block(args, i).bytes;
    }
    return bytes;
}

/* Collects every rank's block in scratch, own block first; returns the last receive, after which all is known. Round k
 * gives all that is known to rank - 2^k and takes as much from rank + 2^k. */
static uint32_t ddl__bruck_collect(ddl__planner *p, ddl__place tmp) {
    const ddl__plan_args *args = p->args;
    int32_t n = args->size;
    uint32_t slot = ddl__plan_slots(p, ddl__log2_ceil(n)), heard = DDL__NO_STEP;
    for (int32_t have = 1; have < n; have *= 2, slot++) {
        int32_t more = DDL__MIN(have, n - have);
        int64_t at = ddl__bruck_bytes(args, 0, have);
        ddl__span give = {0, ddl__bruck_bytes(args, 0, more)}, take = {at, ddl__bruck_bytes(args, have, more)};
        ddl__plan_after(p, ddl__plan_send(p, (args->rank - have + n) % n, slot, tmp, give), heard);
        uint32_t recv = ddl__plan_recv(p, (args->rank + have) % n, slot, tmp, take);
        ddl__plan_after(p, recv, heard);
        heard = recv;
    }
    return heard;
}

static void ddl__algo_all_gather_bruck(ddl__planner *p, const ddl__plan_args *args) {
    int32_t n = args->size, rank = args->rank;
    ddl__place tmp = ddl__plan_tmp(p, (ddl__span){0, ddl__total_bytes(args)});
    ddl__span mine = ddl__block(args, rank);
    ddl__plan_copy(p, (ddl__place){DDL__IN, 0}, tmp, (ddl__span){0, mine.bytes});
    uint32_t heard = ddl__bruck_collect(p, tmp);
    /* Equal blocks: one copy up to the last rank's, one for those that come after it in scratch. */
    bool v = ddl__kind_is_v(args->kind);
    int64_t at = 0;
    for (int32_t i = 0, run = v ? 1 : n - rank; i < n; i += run, run = v ? 1 : rank) {
        ddl__span to = {ddl__bruck_block(args, i).at, ddl__bruck_bytes(args, i, run)};
        ddl__plan_after(p, ddl__plan_copy(p, (ddl__place){DDL__TMP, tmp.base + at - to.at}, ddl__out, to), heard);
        at += to.bytes;
    }
}

/* As doubling, with every byte copied twice more. */
static double ddl__cost_gather_bruck(const ddl__terms *t) {
    return t->rounds * t->latency + (t->n - 1) / t->n * t->bytes * 3 * t->byte * t->crossing;
}

/* all_reduce of small data in the order of ranks: everybody collects all vectors and reduces them itself. */
static void ddl__algo_all_reduce_gather(ddl__planner *p, const ddl__plan_args *args) {
    int32_t n = args->size;
    ddl__span whole = ddl__whole(args);
    ddl__plan_args each = *args;
    each.kind = DDL_ALL_GATHER;
    ddl__place tmp = ddl__plan_tmp(p, (ddl__span){0, n * whole.bytes});
    ddl__plan_copy(p, ddl__in, tmp, whole);
    p->args = &each;
    uint32_t heard = ddl__bruck_collect(p, tmp);
    p->args = args;
    ddl__place first = {DDL__TMP, tmp.base + (n - args->rank) % n * whole.bytes};
    for (int32_t r = 1; r < n; r++) {
        ddl__place next = {DDL__TMP, tmp.base + (r - args->rank + n) % n * whole.bytes};
        ddl__plan_after(p, ddl__plan_reduce(p, next, first, whole, DDL__DST_FIRST), heard);
    }
    ddl__plan_after(p, ddl__plan_copy(p, first, ddl__out, whole), heard);
}

/* ceil(log2 n) alpha + (n-1) M (beta + gamma): for short vectors only. */
static double ddl__cost_all_reduce_gather(const ddl__terms *t) {
    return t->rounds * t->latency + (t->n - 1) * t->bytes * (t->byte * t->crossing + t->reduce);
}

static int64_t ddl__peer_half_of_all(const ddl__plan_args *args) {
    return (args->size + 1) / 2 * ddl__block_bytes(args);
}

/* all_to_all: blocks are first ordered by how far they go; round k moves those with bit k in their distance by 2^k.
 * Such blocks come in runs of 2^k, which are copied together, so there are about 2 n copies in all. */
typedef struct ddl__bruck_pack {
    ddl__place blocks, staged;
    int64_t block;
} ddl__bruck_pack;

/* Packs the runs of one round for sending, or puts what came back in their places; returns the bytes. */
static int64_t ddl__bruck_move(ddl__planner *p, const ddl__bruck_pack *pack, int32_t bit, bool back) {
    int64_t at = 0;
    for (int32_t i = bit; i < p->args->size; i += 2 * bit) {
        ddl__span run = {i * pack->block, DDL__MIN(bit, p->args->size - i) * pack->block};
        ddl__place staged = {DDL__TMP, pack->staged.base + at - run.at};
        ddl__plan_copy(p, back ? staged : pack->blocks, back ? pack->blocks : staged, run);
        at += run.bytes;
    }
    return at;
}

/* First IN is turned so that block i is the one that goes i ranks up; at the end block i is the one that came from i
 * ranks below. Rounds wait for each other even where their blocks do not: the last one must tell of all ranks. */
static void ddl__algo_all_to_all_bruck(ddl__planner *p, const ddl__plan_args *args) {
    int32_t n = args->size, rank = args->rank;
    int64_t block = ddl__block_bytes(args);
    ddl__bruck_pack pack = {.blocks = ddl__plan_tmp(p, (ddl__span){0, n * block}), .block = block};
    ddl__place rotated = {DDL__TMP, pack.blocks.base - rank * block};
    ddl__plan_copy(p, ddl__in, rotated, (ddl__span){rank * block, (n - rank) * block});
    rotated.base += n * block;
    ddl__plan_copy(p, ddl__in, rotated, (ddl__span){0, rank * block});
    uint32_t slot = ddl__plan_slots(p, ddl__log2_ceil(n)), heard = DDL__NO_STEP;
    for (int32_t bit = 1; bit < n; bit *= 2, slot++) {
        ddl__span half = {0, (n / 2 + 1) * block};
        pack.staged = ddl__plan_tmp(p, half);
        half.bytes = ddl__bruck_move(p, &pack, bit, false);
        ddl__plan_after(p, ddl__plan_send(p, (rank + bit) % n, slot, pack.staged, half), heard);
        pack.staged = ddl__plan_tmp(p, half);
        uint32_t recv = ddl__plan_recv(p, (rank - bit + n) % n, slot, pack.staged, half);
        ddl__plan_after(p, recv, heard);
        heard = recv;
        ddl__bruck_move(p, &pack, bit, true);
    }
    for (int32_t i = 0; i < n; i++) {
        ddl__span to = {(rank - i + n) % n * block, block};
        ddl__place from = {DDL__TMP, pack.blocks.base + i * block - to.at};
        ddl__plan_after(p, ddl__plan_copy(p, from, ddl__out, to), heard);
    }
}

static bool ddl__can_all_to_all_bruck(const ddl__plan_args *args) { return args->kind == DDL_ALL_TO_ALL; }

/* ceil(log2 n) (alpha + M/2 beta), with every byte copied before and after each round, piece by piece */
static double ddl__cost_all_to_all_bruck(const ddl__terms *t) {
    return t->rounds * (t->latency + t->message + t->bytes / 2 * (3 * t->byte * t->crossing));
}

#endif /* DDL_ALGO_BRUCK_H */

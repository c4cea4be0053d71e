/* algo/doubling: recursive doubling and halving: log2 n rounds between partners whose numbers differ in one bit
 * (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005). */
#ifndef DDL_ALGO_DOUBLING_H
#define DDL_ALGO_DOUBLING_H

#include "ring.h"

/* Any number of ranks on a power of two: of the first 2 * extra ranks each even one gives its data to the odd one
 * above it and waits for the result. Neighbours in rank are folded, so the order of operands stays. */
typedef struct ddl__fold {
    int32_t pow2, extra, rounds;
    int32_t id;  /* 0 .. pow2-1, -1 for those who wait */
    bool folded; /* this rank carries the one below it */
} ddl__fold;

static ddl__fold ddl__fold_of(int32_t size, int32_t rank) {
    ddl__fold fold = {.pow2 = 1};
    while (fold.pow2 <= size / 2) {
        fold.pow2 *= 2;
        fold.rounds++;
    }
    fold.extra = size - fold.pow2;
    fold.folded = rank < 2 * fold.extra && rank % 2 == 1;
    fold.id = rank >= 2 * fold.extra ? rank - fold.extra : fold.folded ? rank / 2 : -1;
    return fold;
}

static int32_t ddl__fold_rank(const ddl__fold *fold, int32_t id) {
    return id < fold->extra ? 2 * id + 1 : id + fold->extra;
}

static uint8_t ddl__theirs_first(bool they_are_lower) { return they_are_lower ? DDL__THEIRS_FIRST : 0; }

/* OUT = IN op theirs where both are the same memory and the message still has to leave it. A small message leaves at
 * once; a large one may stay until the partner looks at it, and the partner does the same: so receive beside. */
static void ddl__exchange_in_place(ddl__planner *p, int32_t peer, uint32_t slot, ddl__span chunk) {
    ddl__plan_send(p, peer, slot, ddl__in, chunk);
    if (!p->fenced) {
        ddl__plan_recv_reduce(p, peer, slot, ddl__in, ddl__out, chunk, ddl__theirs_first(peer < p->args->rank));
        return;
    }
    ddl__place beside = ddl__plan_tmp(p, chunk);
    ddl__plan_recv(p, peer, slot, beside, chunk);
    ddl__plan_reduce(p, beside, ddl__out, chunk, peer < p->args->rank ? 0 : DDL__DST_FIRST);
}

/* all_reduce of one chunk; slots: one to fold, one for each round, one to unfold. Both partners compute lower op
 * higher, so they get the same bits. The result of a round goes beside its operand, which may still be leaving. */
static void ddl__double_chunk(ddl__planner *p, const ddl__fold *fold, uint32_t slot, const ddl__place *beside,
                              ddl__span chunk) {
    int32_t rank = p->args->rank;
    ddl__place at = ddl__in;
    if (fold->id < 0) {
        ddl__plan_send(p, rank + 1, slot, ddl__in, chunk);
        ddl__plan_recv(p, rank + 1, slot + (uint32_t)fold->rounds + 1, ddl__out, chunk);
        return;
    }
    if (fold->folded) {
        ddl__plan_recv_reduce(p, rank - 1, slot, ddl__in, beside[1], chunk, DDL__THEIRS_FIRST);
        at = beside[1];
    }
    for (int32_t k = 0; k < fold->rounds; k++) {
        int32_t peer = ddl__fold_rank(fold, fold->id ^ (1 << k));
        uint32_t round = slot + 1 + (uint32_t)k;
        ddl__place to = k == fold->rounds - 1 ? ddl__out : beside[k % 2];
        if (at.space == DDL__IN && to.space == DDL__OUT && p->args->in_place) {
            ddl__exchange_in_place(p, peer, round, chunk);
        } else {
            ddl__plan_send(p, peer, round, at, chunk);
            ddl__plan_recv_reduce(p, peer, round, at, to, chunk, ddl__theirs_first(peer < rank));
        }
        at = to;
    }
    if (fold->folded) {
        ddl__plan_send(p, rank - 1, slot + (uint32_t)fold->rounds + 1, ddl__out, chunk);
    }
}

static void ddl__algo_all_reduce_doubling(ddl__planner *p, const ddl__plan_args *args) {
    ddl__fold fold = ddl__fold_of(args->size, args->rank);
    ddl__span whole = ddl__whole(args);
    uint32_t chunks = ddl__chunk_count(args, whole.bytes), each = (uint32_t)fold.rounds + 2;
    uint32_t slot = ddl__plan_slots(p, chunks * each);
    ddl__window window = {0};
    if (args->size > 2 && fold.id >= 0) {
        window = ddl__plan_window(p, 2 * chunks, DDL__MIN(whole.bytes, ddl__chunk_bytes(args)));
    }
    for (uint32_t c = 0; c < chunks; c++) {
        ddl__span chunk = ddl__chunk(args, whole, c);
        ddl__place beside[2] = {ddl__window_place(&window, 2 * c, chunk), ddl__window_place(&window, 2 * c + 1, chunk)};
        ddl__double_chunk(p, &fold, slot + c * each, beside, chunk);
    }
}

static bool ddl__is_pow2(double n) { return ((int64_t)n & ((int64_t)n - 1)) == 0; }

static double ddl__cost_all_reduce_doubling(const ddl__terms *t) {
    double rounds = t->rounds + (ddl__is_pow2(t->n) ? 0 : 1);
    return rounds * (t->latency + t->bytes * (t->byte * t->crossing + t->reduce));
}

/* all_reduce by halving and doubling: reduce-scatter in which the partners split what they have, then the same way
 * back. Partners are near first, so that data is always of a run of ranks and the order of operands stays. */
typedef struct ddl__halving {
    ddl__fold fold;
    ddl__span whole;
    uint32_t slot;
    ddl__place own, work; /* where this rank's contribution is; where partial results go */
} ddl__halving;

static ddl__span ddl__halving_parts(const ddl__planner *p, const ddl__halving *h, int32_t first, int32_t end) {
    return ddl__span_parts(h->whole, h->fold.pow2, first, end, p->args->element_bytes);
}

static void ddl__halve_and_double(ddl__planner *p, const ddl__halving *h) {
    int32_t low = 0, high = h->fold.pow2, id = h->fold.id, rank = p->args->rank;
    ddl__place at = h->own;
    for (int32_t k = 0; k < h->fold.rounds; k++) {
        int32_t peer = ddl__fold_rank(&h->fold, id ^ (1 << k)), middle = (low + high) / 2;
        bool upper = (id >> k & 1) != 0;
        ddl__span lower_half = ddl__halving_parts(p, h, low, middle), upper_half = ddl__halving_parts(p, h, middle, high);
        ddl__place to = k == h->fold.rounds - 1 ? ddl__out : h->work;
        ddl__plan_send(p, peer, h->slot + (uint32_t)k, at, upper ? lower_half : upper_half);
        ddl__plan_recv_reduce(p, peer, h->slot + (uint32_t)k, at, to, upper ? upper_half : lower_half,
                              ddl__theirs_first(peer < rank));
        low = upper ? middle : low;
        high = upper ? high : middle;
        at = to;
    }
    for (int32_t k = h->fold.rounds - 1; k >= 0; k--) {
        int32_t peer = ddl__fold_rank(&h->fold, id ^ (1 << k)), width = high - low;
        bool upper = (id >> k & 1) != 0;
        uint32_t slot = h->slot + (uint32_t)(h->fold.rounds + k);
        int32_t theirs = upper ? low - width : high;
        ddl__plan_send(p, peer, slot, ddl__out, ddl__halving_parts(p, h, low, high));
        ddl__plan_recv(p, peer, slot, ddl__out, ddl__halving_parts(p, h, theirs, theirs + width));
        low = DDL__MIN(low, theirs);
        high = low + 2 * width;
    }
}

static void ddl__algo_all_reduce_halving(ddl__planner *p, const ddl__plan_args *args) {
    ddl__halving h = {.fold = ddl__fold_of(args->size, args->rank), .whole = ddl__whole(args), .own = ddl__in};
    uint32_t slot = ddl__plan_slots(p, 2 * (uint32_t)h.fold.rounds + 2);
    h.slot = slot + 2;
    if (h.fold.id < 0) {
        ddl__plan_send(p, args->rank + 1, slot, ddl__in, h.whole);
        ddl__plan_recv(p, args->rank + 1, slot + 1, ddl__out, h.whole);
        return;
    }
    h.work = p->fenced ? ddl__out : ddl__plan_tmp(p, h.whole);
    if (h.fold.folded) {
        ddl__plan_recv_reduce(p, args->rank - 1, slot, ddl__in, h.work, h.whole, DDL__THEIRS_FIRST);
        h.own = h.work;
    }
    ddl__halve_and_double(p, &h);
    if (h.fold.folded) {
        ddl__plan_send(p, args->rank - 1, slot + 1, ddl__out, h.whole);
    }
}

static double ddl__cost_all_reduce_halving(const ddl__terms *t) {
    double fold = ddl__is_pow2(t->n) ? 0 : 2 * t->latency + t->bytes * (2 * t->byte + t->reduce);
    return fold + 2 * t->rounds * t->latency +
           (t->n - 1) / t->n * t->bytes * (2 * t->byte * t->crossing + t->reduce);
}

/* all_gather by doubling: each partner gives the run of blocks that it has. */
static bool ddl__can_all_gather_doubling(const ddl__plan_args *args) { return (args->size & (args->size - 1)) == 0; }

static void ddl__algo_all_gather_doubling(ddl__planner *p, const ddl__plan_args *args) {
    ddl__span whole = {0, ddl__total_bytes(args)}, mine = ddl__block(args, args->rank);
    ddl__place own = {DDL__IN, -mine.at};
    ddl__fold fold = ddl__fold_of(args->size, args->rank);
    uint32_t slot = ddl__plan_slots(p, (uint32_t)fold.rounds);
    bool direct = p->fenced || fold.rounds == 1;
    ddl__place to = direct ? ddl__out : ddl__plan_tmp(p, whole);
    if (fold.rounds > 1 && !(direct && args->in_place)) {
        ddl__plan_copy(p, own, to, mine);
    }
    for (int32_t k = 0, width = 1; k < fold.rounds; k++, width *= 2) {
        int32_t first = args->rank / width * width, peer = args->rank ^ width, theirs = first ^ width;
        int64_t block = mine.bytes;
        ddl__plan_send(p, peer, slot + (uint32_t)k, k == 0 ? own : to, (ddl__span){first * block, width * block});
        ddl__plan_recv(p, peer, slot + (uint32_t)k, to, (ddl__span){theirs * block, width * block});
    }
    if (direct && (fold.rounds > 1 || args->in_place)) {
        return;
    }
    uint32_t join = ddl__plan_join(p);
    ddl__plan_after(p, direct ? ddl__plan_copy(p, own, ddl__out, mine) : ddl__plan_copy(p, to, ddl__out, whole), join);
}

static double ddl__cost_gather_doubling(const ddl__terms *t) {
    return t->rounds * t->latency + (t->n - 1) / t->n * t->bytes * t->byte * t->crossing;
}

/* reduce_scatter by halving: far partners first, so that a rank ends with its own block. Each of the pow2 members is
 * responsible for a run of blocks, of one rank or of two that were folded. */
static ddl__span ddl__fold_blocks(const ddl__plan_args *args, const ddl__fold *fold, int32_t first, int32_t end) {
    int32_t low = first < fold->extra ? 2 * first : first + fold->extra;
    int32_t high = end < fold->extra ? 2 * end : end + fold->extra;
    ddl__span begin = ddl__block(args, low), last = ddl__block(args, high - 1);
    return (ddl__span){begin.at, last.at + last.bytes - begin.at};
}

static void ddl__halve_blocks(ddl__planner *p, const ddl__fold *fold, uint32_t slot, ddl__flow flow) {
    int32_t low = 0, high = fold->pow2;
    for (int32_t width = fold->pow2 / 2; width > 0; width /= 2, slot++) {
        int32_t peer = ddl__fold_rank(fold, fold->id ^ width), middle = low + width;
        bool upper = (fold->id & width) != 0;
        ddl__span keep = ddl__fold_blocks(p->args, fold, upper ? middle : low, upper ? high : middle);
        ddl__span give = ddl__fold_blocks(p->args, fold, upper ? low : middle, upper ? middle : high);
        ddl__place to = width == 1 ? flow.last : flow.work;
        ddl__plan_send(p, peer, slot, flow.own, give);
        ddl__plan_recv_reduce(p, peer, slot, flow.own, to, keep, ddl__theirs_first(peer < p->args->rank));
        low = upper ? middle : low;
        high = upper ? high : middle;
        flow.own = to;
    }
}

static void ddl__algo_reduce_scatter_halving(ddl__planner *p, const ddl__plan_args *args) {
    ddl__fold fold = ddl__fold_of(args->size, args->rank);
    ddl__span whole = {0, ddl__total_bytes(args)}, mine = ddl__block(args, args->rank);
    ddl__place out = {DDL__OUT, -mine.at};
    uint32_t slot = ddl__plan_slots(p, (uint32_t)fold.rounds + 2);
    if (fold.id < 0) {
        ddl__plan_send(p, args->rank + 1, slot, ddl__in, whole);
        ddl__plan_recv(p, args->rank + 1, slot + 1, out, mine);
        return;
    }
    ddl__place work = ddl__plan_tmp(p, whole);
    ddl__flow flow = {ddl__in, work, fold.folded ? work : out, 0};
    if (fold.folded) {
        ddl__plan_recv_reduce(p, args->rank - 1, slot, ddl__in, work, whole, DDL__THEIRS_FIRST);
        flow.own = work;
    }
    ddl__halve_blocks(p, &fold, slot + 2, flow);
    if (fold.folded) {
        ddl__plan_send(p, args->rank - 1, slot + 1, work, ddl__block(args, args->rank - 1));
        ddl__plan_after(p, ddl__plan_copy(p, work, out, mine), ddl__plan_join(p));
    }
}

static double ddl__cost_reduce_scatter_halving(const ddl__terms *t) {
    double fold = ddl__is_pow2(t->n) ? 0 : 2 * t->latency + t->bytes * (t->byte + t->reduce);
    return fold + t->rounds * t->latency + (t->n - 1) / t->n * t->bytes * (t->byte * t->crossing + t->reduce);
}

#endif /* DDL_ALGO_DOUBLING_H */

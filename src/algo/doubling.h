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

/* Which rank plays an id; ids rise with ranks. */
static int32_t ddl__fold_rank(const ddl__fold *fold, int32_t id) {
    return id < fold->extra ? 2 * id + 1 : id + fold->extra;
}

/* Both partners compute lower op higher. */
static uint8_t ddl__theirs_first(bool they_are_lower) { return they_are_lower ? DDL__THEIRS_FIRST : 0; }

/* OUT = IN op theirs where both are the same memory and the message still has to leave it. A small message leaves at
 * once; a large one may stay until the partner looks at it, and the partner does the same: so receive beside. */
static void ddl__exchange_in_place(ddl__planner *p, int32_t peer, uint32_t slot, ddl__place beside, ddl__span chunk) {
    ddl__plan_send(p, peer, slot, ddl__in, chunk);
    if (!p->fenced) {
        ddl__plan_recv_reduce(p, peer, slot, ddl__in, ddl__out, chunk, ddl__theirs_first(peer < p->args->rank));
        return;
    }
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
            ddl__exchange_in_place(p, peer, round, beside[0], chunk);
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

/* Chunks are independent of each other: each has its own slots and, in turn, its own pair of places. */
static void ddl__algo_all_reduce_doubling(ddl__planner *p, const ddl__plan_args *args) {
    ddl__fold fold = ddl__fold_of(args->size, args->rank);
    ddl__span whole = ddl__whole(args);
    uint32_t chunks = ddl__chunk_count(args, whole.bytes), each = (uint32_t)fold.rounds + 2;
    uint32_t slot = ddl__plan_slots(p, chunks * each);
    ddl__window window = {0};
    if (fold.id >= 0 && (args->size > 2 || p->fenced)) {
        window = ddl__plan_window(p, 2 * chunks, DDL__MIN(whole.bytes, ddl__chunk_bytes(args)));
    }
    for (uint32_t c = 0; c < chunks; c++) {
        ddl__span chunk = ddl__chunk(args, whole, c);
        ddl__place beside[2] = {ddl__window_place(&window, 2 * c, chunk), ddl__window_place(&window, 2 * c + 1, chunk)};
        ddl__double_chunk(p, &fold, slot + c * each, beside, chunk);
    }
}

static bool ddl__is_pow2(double n) { return ((int64_t)n & ((int64_t)n - 1)) == 0; }

/* ceil(log2 n) (alpha + M (beta + gamma)), and one round more when some rank that folded may have to wait for another
 * that did: ids must differ in all bits for that, so more than half of them are folded. The ranks of a host share its
 * link. */
static double ddl__cost_all_reduce_doubling(const ddl__terms *t) {
    double whole = (double)((int64_t)1 << (int)t->rounds);
    double rounds = t->rounds + (t->n < whole && t->n > 0.75 * whole ? 1 : 0);
    return rounds * (t->latency + t->bytes * (t->byte * t->crossing + t->reduce));
}

/* all_reduce by halving and doubling: reduce-scatter in which the partners split what they have, then the same way
 * back. Partners are near first, so that data is always of a run of ranks and the order of operands stays. */
typedef struct ddl__halving {
    ddl__fold fold;
    ddl__span whole;
    uint32_t slot, each;  /* slots of one round */
    ddl__place own, work; /* where this rank's contribution is; where partial results go */
} ddl__halving;

static ddl__span ddl__halving_parts(const ddl__planner *p, const ddl__halving *h, int32_t first, int32_t end) {
    return ddl__span_parts(h->whole, h->fold.pow2, first, end, p->args->element_bytes);
}

/* Gives one half of low .. high away and reduces the other, until one part is left; the last result goes to OUT.
 * Returns which part that is. */
static int32_t ddl__halve(ddl__planner *p, const ddl__halving *h) {
    int32_t low = 0, high = h->fold.pow2, id = h->fold.id;
    uint32_t slot = h->slot;
    ddl__place at = h->own;
    for (int32_t k = 0; k < h->fold.rounds; k++, slot += h->each) {
        int32_t peer = ddl__fold_rank(&h->fold, id ^ (1 << k)), middle = (low + high) / 2;
        bool upper = (id >> k & 1) != 0;
        ddl__span give = ddl__halving_parts(p, h, upper ? low : middle, upper ? middle : high);
        ddl__span keep = ddl__halving_parts(p, h, upper ? middle : low, upper ? high : middle);
        ddl__place to = k == h->fold.rounds - 1 ? ddl__out : h->work;
        ddl__send_chunks(p, peer, slot, at, give);
        ddl__recv_reduce_chunks(p, peer, slot, at, to, keep, ddl__theirs_first(peer < p->args->rank));
        low = upper ? middle : low;
        high = upper ? high : middle;
        at = to;
    }
    return low;
}

/* The same partners in the other order; each gives all it has. */
static void ddl__double(ddl__planner *p, const ddl__halving *h, int32_t low) {
    uint32_t slot = h->slot + h->each * (uint32_t)h->fold.rounds;
    for (int32_t k = h->fold.rounds - 1, width = 1; k >= 0; k--, width *= 2, slot += h->each) {
        int32_t peer = ddl__fold_rank(&h->fold, h->fold.id ^ (1 << k));
        bool upper = (h->fold.id >> k & 1) != 0;
        int32_t theirs = upper ? low - width : low + width;
        ddl__send_chunks(p, peer, slot, ddl__out, ddl__halving_parts(p, h, low, low + width));
        ddl__recv_chunks(p, peer, slot, ddl__out, ddl__halving_parts(p, h, theirs, theirs + width));
        low = DDL__MIN(low, theirs);
    }
}

/* Without a fence, partial results stay in scratch until the last of the halving rounds has told of everybody. */
static void ddl__algo_all_reduce_halving(ddl__planner *p, const ddl__plan_args *args) {
    ddl__halving h = {.fold = ddl__fold_of(args->size, args->rank), .whole = ddl__whole(args), .own = ddl__in};
    h.each = ddl__chunk_count(args, h.whole.bytes);
    uint32_t slot = ddl__plan_slots(p, h.each * (2 * (uint32_t)h.fold.rounds + 2));
    h.slot = slot + 2 * h.each;
    if (h.fold.id < 0) {
        ddl__send_chunks(p, args->rank + 1, slot, ddl__in, h.whole);
        ddl__recv_chunks(p, args->rank + 1, slot + h.each, ddl__out, h.whole);
        return;
    }
    h.work = p->fenced ? ddl__out : ddl__plan_tmp(p, h.whole);
    if (h.fold.folded) {
        ddl__recv_reduce_chunks(p, args->rank - 1, slot, ddl__in, h.work, h.whole, DDL__THEIRS_FIRST);
        h.own = h.work;
    }
    ddl__double(p, &h, ddl__halve(p, &h));
    if (h.fold.folded) {
        ddl__send_chunks(p, args->rank - 1, slot + h.each, ddl__out, h.whole);
    }
}

/* 2 log2 n alpha + 2 (n-1)/n M beta + (n-1)/n M gamma; to fold and unfold costs M both ways. */
static double ddl__cost_all_reduce_halving(const ddl__terms *t) {
    double fold = ddl__is_pow2(t->n) ? 0 : 2 * t->latency + t->bytes * (2 * t->byte + t->reduce);
    return fold + 2 * t->rounds * t->latency +
           (t->n - 1) / t->n * t->bytes * (2 * t->byte * t->crossing + t->reduce);
}

/* all_gather by doubling: each partner gives the run of blocks that it has. */
static bool ddl__can_all_gather_doubling(const ddl__plan_args *args) { return (args->size & (args->size - 1)) == 0; }

/* Runs of blocks are runs of memory only where blocks are equal, hence no v-form. With two ranks the only message is
 * the last one and may go to OUT; else blocks wait in scratch unless there was a fence. */
static void ddl__algo_all_gather_doubling(ddl__planner *p, const ddl__plan_args *args) {
    ddl__span whole = {0, ddl__total_bytes(args)}, mine = ddl__block(args, args->rank);
    ddl__place own = {DDL__IN, -mine.at};
    ddl__fold fold = ddl__fold_of(args->size, args->rank);
    uint32_t each = ddl__chunk_count(args, whole.bytes), slot = ddl__plan_slots(p, each * (uint32_t)fold.rounds);
    bool direct = p->fenced || fold.rounds == 1;
    ddl__place to = direct ? ddl__out : ddl__plan_tmp(p, whole);
    if (fold.rounds > 1 && !(direct && args->in_place)) {
        ddl__plan_copy(p, own, to, mine);
    }
    for (int32_t k = 0, width = 1; k < fold.rounds; k++, width *= 2, slot += each) {
        int32_t first = args->rank / width * width, peer = args->rank ^ width, theirs = first ^ width;
        int64_t block = mine.bytes;
        ddl__send_chunks(p, peer, slot, k == 0 ? own : to, (ddl__span){first * block, width * block});
        ddl__recv_chunks(p, peer, slot, to, (ddl__span){theirs * block, width * block});
    }
    if (direct && (fold.rounds > 1 || args->in_place)) {
        return;
    }
    uint32_t join = ddl__plan_join(p);
    ddl__plan_after(p, direct ? ddl__plan_copy(p, own, ddl__out, mine) : ddl__plan_copy(p, to, ddl__out, whole), join);
}

/* log2 n alpha + (n-1)/n M beta */
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

/* As in ddl__halve, but from far to near, and with runs of blocks for parts. The order of operands is lost. */
static void ddl__halve_blocks(ddl__planner *p, const ddl__fold *fold, uint32_t slot, uint32_t each, ddl__flow flow) {
    int32_t low = 0, high = fold->pow2;
    for (int32_t width = fold->pow2 / 2; width > 0; width /= 2, slot += each) {
        int32_t peer = ddl__fold_rank(fold, fold->id ^ width), middle = low + width;
        bool upper = (fold->id & width) != 0;
        ddl__span keep = ddl__fold_blocks(p->args, fold, upper ? middle : low, upper ? high : middle);
        ddl__span give = ddl__fold_blocks(p->args, fold, upper ? low : middle, upper ? middle : high);
        ddl__place to = width == 1 ? flow.last : flow.work;
        ddl__send_chunks(p, peer, slot, flow.own, give);
        ddl__recv_reduce_chunks(p, peer, slot, flow.own, to, keep, 0);
        low = upper ? middle : low;
        high = upper ? high : middle;
        flow.own = to;
    }
}

/* A folded rank ends with two blocks and gives the lower one to whom it belongs. */
static void ddl__algo_reduce_scatter_halving(ddl__planner *p, const ddl__plan_args *args) {
    ddl__fold fold = ddl__fold_of(args->size, args->rank);
    ddl__span whole = {0, ddl__total_bytes(args)}, mine = ddl__block(args, args->rank);
    ddl__place out = {DDL__OUT, -mine.at};
    uint32_t each = ddl__chunk_count(args, whole.bytes), slot = ddl__plan_slots(p, each * ((uint32_t)fold.rounds + 2));
    if (fold.id < 0) {
        ddl__send_chunks(p, args->rank + 1, slot, ddl__in, whole);
        ddl__recv_chunks(p, args->rank + 1, slot + each, out, mine);
        return;
    }
    ddl__place work = ddl__plan_tmp(p, whole);
    ddl__flow flow = {ddl__in, work, fold.folded ? work : out, 0};
    if (fold.folded) {
        ddl__recv_reduce_chunks(p, args->rank - 1, slot, ddl__in, work, whole, DDL__THEIRS_FIRST);
        flow.own = work;
    }
    ddl__halve_blocks(p, &fold, slot + 2 * each, each, flow);
    if (fold.folded) {
        ddl__send_chunks(p, args->rank - 1, slot + each, work, ddl__block(args, args->rank - 1));
        uint32_t join = ddl__plan_join(p);
        ddl__plan_after(p, ddl__plan_copy(p, work, out, mine), join);
    }
}

static double ddl__cost_reduce_scatter_halving(const ddl__terms *t) {
    double fold = ddl__is_pow2(t->n) ? 0 : 2 * t->latency + t->bytes * (t->byte + t->reduce);
    return fold + t->rounds * t->latency + (t->n - 1) / t->n * t->bytes * (t->byte * t->crossing + t->reduce);
}

#endif /* DDL_ALGO_DOUBLING_H */

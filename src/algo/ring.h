/* algo/ring: what runs around rings: the bandwidth-optimal algorithms for large data. Ring reduce-scatter and
 * all-gather are building blocks of all_reduce (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
 * clusters of workstations", JPDC 69, 2009), of broadcast and reduce of large vectors, and of the hierarchy. */
#ifndef DDL_ALGO_RING_H
#define DDL_ALGO_RING_H

#include "tree.h"

typedef struct ddl__ring {
    int32_t size, index, prev, next; /* index of this rank in the ring; prev and next are ranks */
} ddl__ring;

/* All ranks of the group, in order. Launchers number ranks by host, so only one link of the ring leaves each host. */
static ddl__ring ddl__ring_all(const ddl__plan_args *args) {
    return (ddl__ring){args->size, args->rank, (args->rank + args->size - 1) % args->size,
                       (args->rank + 1) % args->size};
}

/* How the data of a ring is cut: member i's part is the i-th equal part of a span, or the block of rank i. */
typedef struct ddl__cut {
    const ddl__plan_args *args;
    bool blocks;
    ddl__span whole;
    int32_t parts;
} ddl__cut;

static ddl__span ddl__cut_part(const ddl__cut *cut, int32_t index) {
    if (cut->blocks) {
        return ddl__block(cut->args, index);
    }
    return ddl__span_part(cut->whole, cut->parts, index, cut->args->element_bytes);
}

/* Chunks of the largest part: how many slots one round needs. */
static uint32_t ddl__cut_chunks(const ddl__cut *cut) {
    int64_t bytes = cut->blocks ? ddl__block_bytes(cut->args) : ddl__cut_part(cut, 0).bytes;
    return ddl__chunk_count(cut->args, bytes);
}

/* Where the members' own data is, where partial results go, and where the finished part goes. With turn_bytes > 0
 * there is scratch for two parts, which the rounds use in turn. */
typedef struct ddl__flow {
    ddl__place own, work, last;
    int64_t turn_bytes;
} ddl__flow;

/* A part is received in one round and leaves in the next, while the other half of the scratch takes the next part. */
static ddl__place ddl__flow_work(const ddl__flow *flow, int32_t round, ddl__span part) {
    if (flow->turn_bytes == 0) {
        return flow->work;
    }
    return (ddl__place){flow->work.space, flow->work.base + round % 2 * flow->turn_bytes - part.at};
}

/* Each part travels around the ring once and collects every member's contribution; part i ends at member i. In round s
 * member i sends part i - s - 1 and takes part i - s - 2; with three members:
 *     round 0:  0 sends part 2 to 1, 1 sends part 0 to 2, 2 sends part 1 to 0
 *     round 1:  0 sends part 1 to 1, 1 sends part 2 to 2, 2 sends part 0 to 0
 * Empty parts do not travel. Every chunk moves on as soon as it is reduced. One member reduces a part at a time, so all
 * ranks get the same bits. */
static void ddl__ring_reduce_scatter(ddl__planner *p, const ddl__ring *ring, const ddl__cut *cut, ddl__flow flow) {
    uint32_t each = ddl__cut_chunks(cut), slot = ddl__plan_slots(p, each * (uint32_t)ring->size);
    for (int32_t s = 0; s + 1 < ring->size; s++, slot += each) {
        ddl__span out = ddl__cut_part(cut, (ring->index - s - 1 + ring->size) % ring->size);
        ddl__span in = ddl__cut_part(cut, (ring->index - s - 2 + 2 * ring->size) % ring->size);
        ddl__place from = s == 0 ? flow.own : ddl__flow_work(&flow, s - 1, out);
        ddl__place to = s + 2 == ring->size ? flow.last : ddl__flow_work(&flow, s, in);
        ddl__send_chunks(p, ring->next, slot, from, out);
        ddl__recv_reduce_chunks(p, ring->prev, slot, flow.own, to, in, 0);
    }
}

/* Each part travels around the ring once, unchanged; all of them end in `to`. Round s: send part i - s, take part
 * i - s - 1. */
static void ddl__ring_all_gather(ddl__planner *p, const ddl__ring *ring, const ddl__cut *cut, ddl__place own,
                                 ddl__place to) {
    uint32_t each = ddl__cut_chunks(cut), slot = ddl__plan_slots(p, each * (uint32_t)ring->size);
    for (int32_t s = 0; s + 1 < ring->size; s++, slot += each) {
        ddl__span out = ddl__cut_part(cut, (ring->index - s + ring->size) % ring->size);
        ddl__span in = ddl__cut_part(cut, (ring->index - s - 1 + ring->size) % ring->size);
        ddl__send_chunks(p, ring->next, slot, s == 0 ? own : to, out);
        ddl__recv_chunks(p, ring->prev, slot, to, in);
    }
}

/* Reduce-scatter and all-gather of what stands in OUT, for rings of a hierarchy, which are fenced. */
static void ddl__ring_all_reduce(ddl__planner *p, const ddl__ring *ring, const ddl__cut *piece) {
    ddl__ring_reduce_scatter(p, ring, piece, (ddl__flow){ddl__out, ddl__out, ddl__out, 0});
    ddl__ring_all_gather(p, ring, piece, ddl__out, ddl__out);
}

/* all_reduce. Without a fence, partial results stay in scratch: only the last message of a part's round trip brings
 * word of every rank. */
static void ddl__algo_all_reduce_ring(ddl__planner *p, const ddl__plan_args *args) {
    ddl__ring ring = ddl__ring_all(args);
    ddl__cut cut = {args, false, ddl__whole(args), args->size};
    ddl__place work = p->fenced ? ddl__out : ddl__plan_tmp(p, cut.whole);
    ddl__ring_reduce_scatter(p, &ring, &cut, (ddl__flow){ddl__in, work, ddl__out, 0});
    ddl__ring_all_gather(p, &ring, &cut, ddl__out, ddl__out);
}

/* 2 (n-1) alpha + 2 (n-1)/n M beta + (n-1)/n M gamma: no algorithm sends fewer bytes. */
static double ddl__cost_all_reduce_ring(const ddl__terms *t) {
    return 2 * (t->n - 1) * t->latency + (t->n - 1) / t->n * t->bytes * (2 * t->byte + t->reduce);
}

/* all_gather. Blocks of ranks that this one has not heard of yet go to OUT, hence always a fence. */
static void ddl__algo_all_gather_ring(ddl__planner *p, const ddl__plan_args *args) {
    ddl__ring ring = ddl__ring_all(args);
    ddl__cut cut = {args, true, {0, 0}, args->size};
    ddl__span mine = ddl__block(args, args->rank);
    ddl__place own = {DDL__IN, -mine.at};
    ddl__ring_all_gather(p, &ring, &cut, own, ddl__out);
    if (!args->in_place) {
        ddl__plan_copy(p, own, ddl__out, mine);
    }
}

/* (n-1) alpha + (n-1)/n M beta, M being all blocks together */
static double ddl__cost_gather_ring(const ddl__terms *t) {
    return (t->n - 1) * t->latency + (t->n - 1) / t->n * t->bytes * t->byte;
}

/* reduce_scatter: OUT takes nothing but the last message of the own block's round trip, which tells of every rank. */
static void ddl__algo_reduce_scatter_ring(ddl__planner *p, const ddl__plan_args *args) {
    ddl__ring ring = ddl__ring_all(args);
    ddl__cut cut = {args, true, {0, 0}, args->size};
    int64_t turn = ddl__block_bytes(args);
    ddl__place work = ddl__plan_tmp(p, (ddl__span){0, 2 * turn});
    ddl__place last = {DDL__OUT, -ddl__block(args, args->rank).at};
    ddl__ring_reduce_scatter(p, &ring, &cut, (ddl__flow){ddl__in, work, last, turn});
}

static double ddl__cost_reduce_scatter_ring(const ddl__terms *t) {
    return (t->n - 1) * t->latency + (t->n - 1) / t->n * t->bytes * (t->byte + t->reduce);
}

/* The root's vector in parts by distance from the root, along a binomial tree: each rank has or wants the parts of
 * its subtree. */
static ddl__span ddl__subtree(const ddl__plan_args *args, int32_t rank) {
    int32_t v = (rank - args->root + args->size) % args->size, lowest = v & -v;
    int32_t end = v == 0 || lowest > args->size - v ? args->size : v + lowest;
    return ddl__span_parts(ddl__whole(args), args->size, v, end, args->element_bytes);
}

/* Positions by distance from the root, as in the tree, so that parts need not move between the two halves. */
static ddl__ring ddl__ring_from_root(const ddl__plan_args *args) {
    ddl__ring ring = ddl__ring_all(args);
    ring.index = (args->rank - args->root + args->size) % args->size;
    return ring;
}

/* broadcast as scatter and all-gather: van de Geijn's algorithm for long vectors (Barnett et al., "Interprocessor
 * collective communication library", 1994). Two neighbours write OUT, hence the fence. */
static void ddl__algo_broadcast_scatter(ddl__planner *p, const ddl__plan_args *args) {
    ddl__tree tree = ddl__tree_binomial(args->size, args->rank, args->root);
    uint32_t slot = ddl__plan_slots(p, ddl__chunk_count(args, ddl__whole(args).bytes));
    if (tree.parent >= 0) {
        ddl__recv_chunks(p, tree.parent, slot, ddl__out, ddl__subtree(args, args->rank));
    }
    for (int32_t i = tree.child_count - 1; i >= 0; i--) {
        ddl__send_chunks(p, tree.child[i], slot, ddl__out, ddl__subtree(args, tree.child[i]));
    }
    ddl__ring ring = ddl__ring_from_root(args);
    ddl__cut cut = {args, false, ddl__whole(args), args->size};
    ddl__ring_all_gather(p, &ring, &cut, ddl__out, ddl__out);
}

/* (ceil(log2 n) + n - 1) alpha + 2 (n-1)/n M beta */
static double ddl__cost_broadcast_scatter(const ddl__terms *t) {
    return (t->rounds + t->n - 1) * t->latency + 2 * (t->n - 1) / t->n * t->bytes * t->byte;
}

/* reduce as reduce-scatter and gather: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004,
 * here with a ring for the first half. Only the root has an OUT; the others work in scratch. */
static void ddl__algo_reduce_scatter_gather(ddl__planner *p, const ddl__plan_args *args) {
    ddl__ring ring = ddl__ring_from_root(args);
    ddl__cut cut = {args, false, ddl__whole(args), args->size};
    ddl__place work = args->rank == args->root ? ddl__out : ddl__plan_tmp(p, cut.whole);
    ddl__ring_reduce_scatter(p, &ring, &cut, (ddl__flow){ddl__in, work, work, 0});
    ddl__tree tree = ddl__tree_binomial(args->size, args->rank, args->root);
    uint32_t slot = ddl__plan_slots(p, ddl__chunk_count(args, cut.whole.bytes));
    for (int32_t i = 0; i < tree.child_count; i++) {
        ddl__recv_chunks(p, tree.child[i], slot, work, ddl__subtree(args, tree.child[i]));
    }
    if (tree.parent >= 0) {
        ddl__send_chunks(p, tree.parent, slot, work, ddl__subtree(args, args->rank));
    }
}

static double ddl__cost_reduce_scatter_gather(const ddl__terms *t) {
    return ddl__cost_broadcast_scatter(t) + (t->n - 1) / t->n * t->bytes * t->reduce;
}

/* >>algo-hierarchy: all_reduce by host: reduce-scatter inside each host, all_reduce of each part between the ranks
 * that have it, all-gather inside (BlueConnect: Cho et al., "BlueConnect: decomposing all-reduce for deep learning on
 * heterogeneous network hierarchy", SysML 2019, with two dimensions). Between hosts travels what a single ring over
 * all ranks would send there, in 2 (hosts - 1) rounds instead of 2 (n - 1). */

/* The ring of the ranks that agree with this one in one digit (host, or number within the host); index is the other
 * digit. */
static ddl__ring ddl__ring_of(const ddl__plan_args *args, bool inside) {
    int32_t mine = args->host_of[args->rank], number = 0;
    for (int32_t r = 0; r < args->rank; r++) {
        number += args->host_of[r] == mine;
    }
    ddl__ring ring = {.prev = -1, .next = -1};
    int32_t first = -1, last = -1;
    for (int32_t host = 0, hosts = ddl__host_count(args); host < hosts; host++) {
        for (int32_t r = 0, n = 0; r < args->size; r++) {
            if (args->host_of[r] != host || (inside ? host != mine : n++ != number)) {
                continue;
            }
            first = first < 0 ? r : first;
            if (r == args->rank) {
                ring.index = ring.size;
                ring.prev = last;
            }
            ring.next = last == args->rank ? r : ring.next;
            last = r;
            ring.size++;
        }
    }
    ring.prev = ring.prev < 0 ? last : ring.prev;
    ring.next = ring.next < 0 ? first : ring.next;
    return ring;
}

/* Several hosts with the same number of ranks each, at least two. */
static bool ddl__can_hierarchy(const ddl__plan_args *args) {
    int32_t hosts = ddl__host_count(args);
    if (hosts < 2 || args->size % hosts != 0 || args->size == hosts) {
        return false;
    }
    for (int32_t host = 0; host < hosts; host++) {
        int32_t members = 0;
        for (int32_t r = 0; r < args->size; r++) {
            members += args->host_of[r] == host;
        }
        if (members != args->size / hosts) {
            return false;
        }
    }
    return true;
}

static void ddl__algo_all_reduce_hierarchy(ddl__planner *p, const ddl__plan_args *args) {
    ddl__ring inside = ddl__ring_of(args, true), across = ddl__ring_of(args, false);
    ddl__cut cut = {args, false, ddl__whole(args), inside.size};
    ddl__cut piece = {args, false, ddl__cut_part(&cut, inside.index), across.size};
    /* All pieces take as many slots as the largest, so that every rank counts alike. */
    ddl__cut largest = {args, false, ddl__cut_part(&cut, 0), across.size};
    ddl__ring_reduce_scatter(p, &inside, &cut, (ddl__flow){ddl__in, ddl__out, ddl__out, 0});
    uint32_t slot = p->next_slot;
    ddl__ring_all_reduce(p, &across, &piece);
    p->next_slot = slot + 2 * ddl__cut_chunks(&largest) * (uint32_t)across.size;
    ddl__ring_all_gather(p, &inside, &cut, ddl__out, ddl__out);
}

/* BlueConnect's sum over both levels. All ranks of a host use its link at once, each for M / per_host bytes, so the
 * link carries M in all. */
static double ddl__cost_all_reduce_hierarchy(const ddl__terms *t) {
    double l = t->per_host, h = t->hosts;
    double inside = 2 * (l - 1) * t->near_latency + (l - 1) / l * t->bytes * (2 * t->near_byte + t->reduce);
    return inside + 2 * (h - 1) * t->latency + (h - 1) / h * t->bytes * (2 * t->byte + t->reduce / l);
}

#endif /* DDL_ALGO_RING_H */

/* algo/native: plans that leave the ranks of one host to a transport which reaches them all by load and store. Within
 * one host that is the whole plan; across hosts it is the inner level of the hierarchy. The transport reduces in the
 * order of ranks, keeps "buffers untouched" by comparing signatures before it writes, and never lets a rank end while
 * another may touch its memory. */
#ifndef DDL_ALGO_NATIVE_H
#define DDL_ALGO_NATIVE_H

#include "scan.h"

static bool ddl__can_native(const ddl__plan_args *args) { return args->native_s > 0 && ddl__host_count(args) == 1; }

/* The one step has no other to be ordered against: what it touches does not matter. */
static void ddl__algo_native(ddl__planner *p, const ddl__plan_args *args) {
    ddl__span block = {0, args->count * args->element_bytes};
    ddl__plan_native(p, args->kind, args->root, ddl__in, block, args->kind == DDL_BROADCAST ? ddl__in : ddl__out,
                     block);
}

static double ddl__cost_native(const ddl__terms *t) { return t->native; }

/* >>algo-native-hierarchy: all_reduce across hosts: native reduce-scatter, the ring of the ranks that have the same
 * part, native all-gather (BlueConnect, see ring.h). What is left when the ranks of a host cannot share elements evenly
 * is reduced natively on each of them and goes round the same ring: all bits stay equal, as all rings are alike. */
static bool ddl__can_native_hierarchy(const ddl__plan_args *args) {
    return args->native_s > 0 && ddl__can_hierarchy(args);
}

static void ddl__algo_all_reduce_native_hierarchy(ddl__planner *p, const ddl__plan_args *args) {
    ddl__ring inside = ddl__ring_of(args, true), across = ddl__ring_of(args, false);
    int64_t block = args->count / inside.size * args->element_bytes;
    ddl__span even = {0, block * inside.size}, mine = {block * inside.index, block};
    ddl__span rest = {even.bytes, ddl__whole(args).bytes - even.bytes};
    uint32_t native = DDL__NO_STEP;
    if (block > 0) {
        native = ddl__plan_native(p, DDL_REDUCE_SCATTER, 0, ddl__in, even, ddl__out, mine);
        ddl__ring_all_reduce(p, &across, &(ddl__cut){args, false, mine, across.size});
    }
    if (rest.bytes > 0) { /* one after the other, as operations of a set are */
        ddl__plan_after(p, ddl__plan_native(p, DDL_ALL_REDUCE, 0, ddl__in, rest, ddl__out, rest), native);
        native = p->step_count - 1;
        ddl__ring_all_reduce(p, &across, &(ddl__cut){args, false, rest, across.size});
    }
    if (block > 0) {
        ddl__plan_after(p, ddl__plan_native(p, DDL_ALL_GATHER, 0, ddl__out, mine, ddl__out, even), native);
    }
}

/* Inside as measured of the transport, between hosts as in the hierarchy of rings. */
static double ddl__cost_native_hierarchy(const ddl__terms *t) {
    double h = t->hosts;
    return 2 * t->native + 2 * (h - 1) * t->latency + (h - 1) / h * t->bytes * (2 * t->byte + t->reduce / t->per_host);
}

#endif /* DDL_ALGO_NATIVE_H */

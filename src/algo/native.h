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

/* >>algo-device-hierarchy: the same for tensors on devices. The device's native collectives inside each host; between
 * hosts each rank's part goes by the host's memory, piece by piece:
 *
 *     piece k:  reduce-scatter | move to the host | ring between hosts | move back | all-gather
 *
 * The native steps of a host's ranks are in one order, in which the all-gather of a piece comes after the
 * reduce-scatter of the next two: so up to three pieces are under way, one on the devices, one copied, one on the
 * network, and scratch is for three. */
enum { DDL__MOVE_SLOTS = 3 };

static bool ddl__can_device_hierarchy(const ddl__plan_args *args) {
    return args->on_device && args->kind == DDL_ALL_REDUCE && ddl__can_native_hierarchy(args);
}

/* This rank's part of a piece, all-reduced between the hosts by way of scratch. */
static void ddl__plan_across(ddl__planner *p, const ddl__plan_args *args, const ddl__ring *across, ddl__span part,
                             ddl__place there) {
    ddl__cut cut = {args, false, part, across->size};
    ddl__plan_local(p, DDL__MOVE, ddl__out, there, part, 0);
    ddl__ring_reduce_scatter(p, across, &cut, (ddl__flow){there, there, there, 0});
    ddl__ring_all_gather(p, across, &cut, there, there);
    ddl__plan_local(p, DDL__MOVE, there, ddl__out, part, 0);
}

static void ddl__algo_all_reduce_device(ddl__planner *p, const ddl__plan_args *args) {
    ddl__ring inside = ddl__ring_of(args, true), across = ddl__ring_of(args, false);
    int64_t bytes = args->element_bytes, each = args->count / inside.size * bytes;
    int64_t most = DDL__MAX(args->move_bytes / bytes, 1) * bytes, pieces = (each + most - 1) / most;
    int64_t slot = (most + 63) / 64 * 64, slots = DDL__MIN(pieces, DDL__MOVE_SLOTS);
    ddl__place scratch = ddl__plan_tmp(p, (ddl__span){0, slots * slot});
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
                ddl__plan_across(p, args, &across, mine,
                                 (ddl__place){DDL__TMP, scratch.base + j % slots * slot - mine.at});
            }
        }
    }
    ddl__span rest = {each * inside.size, args->count * bytes - each * inside.size};
    if (rest.bytes > 0) { /* that the ranks of a host cannot share evenly: reduced on each, and round all rings alike */
        ddl__plan_after(p, ddl__plan_native(p, DDL_ALL_REDUCE, 0, ddl__in, rest, ddl__out, rest), last);
        ddl__plan_across(p, args, &across, rest, ddl__plan_tmp(p, rest));
    }
}

#endif /* DDL_ALGO_NATIVE_H */

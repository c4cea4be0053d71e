/* algo/table: all algorithms, by kind and name, and how a plan is made by one of them. */
#ifndef DDL_ALGO_TABLE_H
#define DDL_ALGO_TABLE_H

#include "device.h"

/* In each kind, earlier ones win ties. The names are what users write in DDL_ALGO.
 * Each kind has one that serves every call: any number of ranks, ops that do not commute, rank order, the v-form; so
 * that choosing cannot fail. */
static const ddl__algo ddl__algos[] = {
    {"dissemination", DDL_BARRIER, DDL__RANK_ORDER | DDL__FENCES, NULL, ddl__algo_barrier, ddl__cost_barrier,
     ddl__peer_nothing},
    {"tree", DDL_BARRIER, DDL__RANK_ORDER, NULL, ddl__algo_barrier_tree, ddl__cost_barrier_tree, ddl__peer_nothing},
    {"tree", DDL_BROADCAST, DDL__RANK_ORDER, NULL, ddl__algo_broadcast_tree, ddl__cost_broadcast_tree, ddl__peer_once},
    {"chain", DDL_BROADCAST, DDL__RANK_ORDER, NULL, ddl__algo_broadcast_chain, ddl__cost_broadcast_chain,
     ddl__peer_once},
    {"scatter_all_gather", DDL_BROADCAST, DDL__RANK_ORDER | DDL__FENCES, NULL, ddl__algo_broadcast_scatter,
     ddl__cost_broadcast_scatter, ddl__peer_twice},
    {"double_tree", DDL_BROADCAST, DDL__RANK_ORDER | DDL__FENCES, NULL, ddl__algo_broadcast_double_tree,
     ddl__cost_broadcast_double_tree, ddl__peer_once},
    {"tree", DDL_REDUCE, DDL__KEEPS_ORDER, NULL, ddl__algo_reduce_tree, ddl__cost_reduce_tree, ddl__peer_once},
    {"chain", DDL_REDUCE, 0, NULL, ddl__algo_reduce_chain, ddl__cost_reduce_chain, ddl__peer_once},
    {"reduce_scatter_gather", DDL_REDUCE, DDL__FENCES, NULL, ddl__algo_reduce_scatter_gather,
     ddl__cost_reduce_scatter_gather, ddl__peer_twice},
    {"double_tree", DDL_REDUCE, DDL__FENCES, NULL, ddl__algo_reduce_double_tree, ddl__cost_reduce_double_tree,
     ddl__peer_once},
    {"direct", DDL_REDUCE, DDL__RANK_ORDER, NULL, ddl__algo_reduce_direct, ddl__cost_reduce_direct, ddl__peer_once},
    {"recursive_doubling", DDL_ALL_REDUCE, DDL__KEEPS_ORDER, NULL, ddl__algo_all_reduce_doubling,
     ddl__cost_all_reduce_doubling, ddl__peer_once},
    {"halving_doubling", DDL_ALL_REDUCE, DDL__KEEPS_ORDER, NULL, ddl__algo_all_reduce_halving,
     ddl__cost_all_reduce_halving, ddl__peer_once},
    {"ring", DDL_ALL_REDUCE, 0, NULL, ddl__algo_all_reduce_ring, ddl__cost_all_reduce_ring, ddl__peer_twice},
    {"double_tree", DDL_ALL_REDUCE, DDL__FENCES, NULL, ddl__algo_all_reduce_double_tree,
     ddl__cost_all_reduce_double_tree, ddl__peer_twice},
    {"hierarchical", DDL_ALL_REDUCE, DDL__FENCES, ddl__can_hierarchy, ddl__algo_all_reduce_hierarchy,
     ddl__cost_all_reduce_hierarchy, ddl__peer_twice},
    {"native_hierarchical", DDL_ALL_REDUCE, DDL__FENCES, ddl__can_native_hierarchy,
     ddl__algo_all_reduce_native_hierarchy, ddl__cost_native_hierarchy, ddl__peer_twice},
    {"direct", DDL_ALL_REDUCE, DDL__RANK_ORDER, NULL, ddl__algo_all_reduce_direct, ddl__cost_all_reduce_direct,
     ddl__peer_parts},
    {"all_gather", DDL_ALL_REDUCE, DDL__RANK_ORDER, NULL, ddl__algo_all_reduce_gather, ddl__cost_all_reduce_gather,
     ddl__peer_half_of_all},
    {"linear", DDL_GATHER, DDL__SERVES_V | DDL__RANK_ORDER, NULL, ddl__algo_gather_linear, ddl__cost_spread,
     ddl__peer_block},
    {"tree", DDL_GATHER, DDL__SERVES_V | DDL__RANK_ORDER, NULL, ddl__algo_gather_tree, ddl__cost_spread_tree,
     ddl__peer_once},
    {"linear", DDL_SCATTER, DDL__SERVES_V | DDL__RANK_ORDER, NULL, ddl__algo_scatter_linear, ddl__cost_spread,
     ddl__peer_block},
    {"tree", DDL_SCATTER, DDL__SERVES_V | DDL__RANK_ORDER, NULL, ddl__algo_scatter_tree, ddl__cost_spread_tree,
     ddl__peer_once},
    {"linear", DDL_ALL_GATHER, DDL__SERVES_V | DDL__RANK_ORDER, NULL, ddl__algo_all_gather_linear, ddl__cost_spread,
     ddl__peer_block},
    {"recursive_doubling", DDL_ALL_GATHER, DDL__RANK_ORDER, ddl__can_all_gather_doubling,
     ddl__algo_all_gather_doubling, ddl__cost_gather_doubling, ddl__peer_once},
    {"bruck", DDL_ALL_GATHER, DDL__SERVES_V | DDL__RANK_ORDER, NULL, ddl__algo_all_gather_bruck,
     ddl__cost_gather_bruck, ddl__peer_once},
    {"ring", DDL_ALL_GATHER, DDL__SERVES_V | DDL__RANK_ORDER | DDL__FENCES, NULL, ddl__algo_all_gather_ring,
     ddl__cost_gather_ring, ddl__peer_once},
    {"recursive_halving", DDL_REDUCE_SCATTER, DDL__SERVES_V, NULL, ddl__algo_reduce_scatter_halving,
     ddl__cost_reduce_scatter_halving, ddl__peer_once},
    {"pairwise", DDL_REDUCE_SCATTER, DDL__SERVES_V, NULL, ddl__algo_reduce_scatter_pairwise,
     ddl__cost_reduce_scatter_pairwise, ddl__peer_block},
    {"ring", DDL_REDUCE_SCATTER, DDL__SERVES_V, NULL, ddl__algo_reduce_scatter_ring, ddl__cost_reduce_scatter_ring,
     ddl__peer_once},
    {"direct", DDL_REDUCE_SCATTER, DDL__SERVES_V | DDL__RANK_ORDER, NULL, ddl__algo_reduce_scatter_direct,
     ddl__cost_reduce_scatter_direct, ddl__peer_block},
    {"linear", DDL_ALL_TO_ALL, DDL__SERVES_V | DDL__RANK_ORDER, NULL, ddl__algo_all_to_all_linear, ddl__cost_spread,
     ddl__peer_block},
    {"bruck", DDL_ALL_TO_ALL, DDL__RANK_ORDER, ddl__can_all_to_all_bruck, ddl__algo_all_to_all_bruck,
     ddl__cost_all_to_all_bruck, ddl__peer_half_of_all},
    {"pairwise", DDL_ALL_TO_ALL, DDL__SERVES_V | DDL__RANK_ORDER, NULL, ddl__algo_all_to_all_pairwise,
     ddl__cost_all_to_all_pairwise, ddl__peer_block},
    {"recursive_doubling", DDL_SCAN, DDL__KEEPS_ORDER, NULL, ddl__algo_scan_doubling, ddl__cost_scan_doubling,
     ddl__peer_once},
    {"chain", DDL_SCAN, DDL__RANK_ORDER, NULL, ddl__algo_scan_chain, ddl__cost_reduce_chain, ddl__peer_once},
    {"recursive_doubling", DDL_EXSCAN, DDL__KEEPS_ORDER, NULL, ddl__algo_exscan_doubling, ddl__cost_scan_doubling,
     ddl__peer_twice},
    {"chain", DDL_EXSCAN, DDL__RANK_ORDER, NULL, ddl__algo_exscan_chain, ddl__cost_reduce_chain, ddl__peer_once},
    {"native", DDL_BARRIER, DDL__RANK_ORDER, ddl__can_native, ddl__algo_native, ddl__cost_native, ddl__peer_nothing},
    {"native", DDL_BROADCAST, DDL__RANK_ORDER, ddl__can_native, ddl__algo_native, ddl__cost_native, ddl__peer_nothing},
    {"native", DDL_REDUCE, DDL__RANK_ORDER, ddl__can_native, ddl__algo_native, ddl__cost_native, ddl__peer_nothing},
    {"native", DDL_ALL_REDUCE, DDL__RANK_ORDER, ddl__can_native, ddl__algo_native, ddl__cost_native, ddl__peer_nothing},
    {"native", DDL_GATHER, DDL__RANK_ORDER, ddl__can_native, ddl__algo_native, ddl__cost_native, ddl__peer_nothing},
    {"native", DDL_SCATTER, DDL__RANK_ORDER, ddl__can_native, ddl__algo_native, ddl__cost_native, ddl__peer_nothing},
    {"native", DDL_ALL_GATHER, DDL__RANK_ORDER, ddl__can_native, ddl__algo_native, ddl__cost_native, ddl__peer_nothing},
    {"native", DDL_REDUCE_SCATTER, DDL__RANK_ORDER, ddl__can_native, ddl__algo_native, ddl__cost_native,
     ddl__peer_nothing},
    {"native", DDL_ALL_TO_ALL, DDL__RANK_ORDER, ddl__can_native, ddl__algo_native, ddl__cost_native, ddl__peer_nothing},
    {"native", DDL_SCAN, DDL__RANK_ORDER, ddl__can_native, ddl__algo_native, ddl__cost_native, ddl__peer_nothing},
    {"native", DDL_EXSCAN, DDL__RANK_ORDER, ddl__can_native, ddl__algo_native, ddl__cost_native, ddl__peer_nothing},
};

/* What tensors on devices get in a group of several hosts: where devices share memory inside each host, and else.
 * Nobody asks for them by name. */
static const char ddl__inside_hosts[] = "native_device_hierarchical";
static const ddl__algo ddl__algos_on_device[] = {
    {ddl__inside_hosts, DDL_ALL_REDUCE, DDL__FENCES, ddl__can_device_hierarchy, ddl__algo_all_reduce_device,
     ddl__cost_native_hierarchy, ddl__peer_twice},
    {ddl__inside_hosts, DDL_BROADCAST, DDL__FENCES | DDL__RANK_ORDER, ddl__can_device_hierarchy,
     ddl__algo_broadcast_device, ddl__cost_native_hierarchy, ddl__peer_once},
    {ddl__inside_hosts, DDL_REDUCE, DDL__FENCES, ddl__can_device_hierarchy, ddl__algo_reduce_device,
     ddl__cost_native_hierarchy, ddl__peer_once},
    {ddl__inside_hosts, DDL_ALL_GATHER, DDL__FENCES | DDL__RANK_ORDER, ddl__can_device_blocks,
     ddl__algo_all_gather_device, ddl__cost_native_hierarchy, ddl__peer_once},
    {ddl__inside_hosts, DDL_REDUCE_SCATTER, DDL__FENCES, ddl__can_device_blocks,
     ddl__algo_reduce_scatter_device, ddl__cost_native_hierarchy, ddl__peer_once}};
static const ddl__algo ddl__algo_pieces = {
    "device_pieces", DDL_KIND_NONE, DDL__FENCES | DDL__SERVES_V, NULL, ddl__algo_device_pieces,
    ddl__cost_native_hierarchy, ddl__peer_twice};

static const ddl__algo ddl__algo_straight = {
    "device_straight", DDL_KIND_NONE, DDL__FENCES | DDL__SERVES_V, ddl__can_straight, ddl__algo_device_straight,
    ddl__cost_native_hierarchy, ddl__peer_twice};

static const ddl__algo ddl__algo_exchange = {
    "device_exchange", DDL_KIND_NONE, DDL__FENCES | DDL__SERVES_V | DDL__RANK_ORDER, ddl__can_exchange,
    ddl__algo_device_exchange, ddl__cost_native_hierarchy, ddl__peer_twice};

/* NULL: this kind has no algorithm of that name. A v-form has those of its kind. */
static const ddl__algo *ddl__algo_find(ddl_kind kind, const char *name) {
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__algos); i++) {
        const ddl__algo *algo = &ddl__algos[i];
        if (algo->kind == ddl__kind_base(kind) && strcmp(algo->name, name) == 0) {
            return algo;
        }
    }
    return NULL;
}

/* Whether an algorithm gives the right result for a call. rank_order: only those whose bits are those of
 * ((x0 op x1) op x2) ...; with up to three ranks, keeping the order leaves no other bracketing. */
static bool ddl__algo_can(const ddl__algo *algo, const ddl__plan_args *args, bool rank_order) {
    if (algo->kind != ddl__kind_base(args->kind)) {
        return false;
    }
    if (ddl__kind_is_v(args->kind) && !ddl__algo_has(algo, DDL__SERVES_V)) {
        return false;
    }
    if (!args->commutative && !ddl__algo_has(algo, DDL__KEEPS_ORDER)) {
        return false;
    }
    uint32_t order = args->size <= 3 ? DDL__KEEPS_ORDER : DDL__RANK_ORDER;
    if (rank_order && !ddl__algo_has(algo, order)) {
        return false;
    }
    return algo->can == NULL || algo->can(args);
}

/* In an all_to_allv nobody knows how much others send, so nobody could decide alike without a fence. */
static bool ddl__algo_fences(const ddl__algo *algo, const ddl__plan_args *args) {
    return ddl__algo_has(algo, DDL__FENCES) || args->kind == DDL_ALL_TO_ALLV;
}

/* A group of one: the operand is the result. In place only an all_to_allv can have to move it. */
static void ddl__plan_alone(ddl__planner *p, const ddl__plan_args *args) {
    ddl_kind kind = ddl__kind_base(args->kind);
    if (kind == DDL_ALL_TO_ALL) {
        ddl__span block = {0, ddl__recv_block(args, 0).bytes};
        ddl__swap_own(p, DDL__NO_STEP, ddl__plan_tmp(p, block).base);
        return;
    }
    if (args->in_place || kind == DDL_BARRIER || kind == DDL_BROADCAST || kind == DDL_EXSCAN) {
        return;
    }
    ddl__span block = ddl__kind_is_v(args->kind) ? ddl__block(args, 0) : ddl__whole(args);
    bool out_is_larger = kind == DDL_GATHER || kind == DDL_ALL_GATHER;
    ddl__place in = {DDL__IN, out_is_larger ? -block.at : 0}, out = {DDL__OUT, out_is_larger ? 0 : -block.at};
    ddl__plan_copy(p, in, out, block);
}

/* Nothing to move, but whoever calls something else must still hear of it. The v-forms know only their own blocks. */
static bool ddl__plan_is_empty(const ddl__plan_args *args) {
    switch (ddl__kind_base(args->kind)) {
    case DDL_ALL_REDUCE:
    case DDL_ALL_GATHER:
    case DDL_REDUCE_SCATTER:
    case DDL_ALL_TO_ALL:
        return args->kind != DDL_ALL_TO_ALLV && ddl__total_bytes(args) == 0;
    default:
        return false;
    }
}

static void ddl__plan_begin(ddl__planner *p, const ddl__plan_args *args) {
    if (args->kind == DDL_BROADCAST) {
        ddl__plan_fence_up(p);
    } else {
        ddl__plan_fence(p);
    }
}

/* Writes the plan of one rank. Errors: DDL_ERR_NOMEM. Free with ddl__plan_free. */
static ddl_status ddl__plan_make(ddl__base *base, const ddl__algo *algo, const ddl__plan_args *args, ddl__plan *out) {
    ddl__planner planner;
    ddl__plan_open(&planner, base, args);
    if (args->size == 1) {
        ddl__plan_alone(&planner, args);
    } else {
        bool empty = ddl__plan_is_empty(args);
        if (empty || args->fence || ddl__algo_fences(algo, args)) {
            ddl__plan_begin(&planner, args);
        }
        if (!empty) {
            algo->plan(&planner, args);
        }
    }
    ddl_status status = ddl__plan_finish(&planner, out);
    out->algorithm = algo->name;
    return status;
}

#endif /* DDL_ALGO_TABLE_H */

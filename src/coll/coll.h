/* coll, second part: the public collectives. Each says what it asks for; the rest is alike for all. */
#ifndef DDL_COLL_COLL_H
#define DDL_COLL_COLL_H

#include "fast.h"

DDL_API ddl_status ddl_barrier(ddl_group *group) {
    ddl__asked ask = {.kind = DDL_BARRIER};
    return ddl__coll_call(group, &ask, "ddl_barrier", NULL);
}

DDL_API ddl_status ddl_ibarrier(ddl_group *group, ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_BARRIER};
    return ddl__coll_icall(group, &ask, "ddl_ibarrier", out_request);
}

DDL_API ddl_status ddl_broadcast(ddl_group *group, ddl_tensor tensor, int32_t root) {
    ddl__asked ask = {.kind = DDL_BROADCAST, .in = &tensor, .root = root};
    return ddl__coll_call(group, &ask, "ddl_broadcast", NULL);
}

DDL_API ddl_status ddl_ibroadcast(ddl_group *group, ddl_tensor tensor, int32_t root, ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_BROADCAST, .in = &tensor, .root = root};
    return ddl__coll_icall(group, &ask, "ddl_ibroadcast", out_request);
}

DDL_API ddl_status ddl_reduce(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op, int32_t root) {
    ddl__asked ask = {.kind = DDL_REDUCE, .in = &in, .out = &out, .op = op, .root = root};
    return ddl__coll_call(group, &ask, "ddl_reduce", NULL);
}

DDL_API ddl_status ddl_ireduce(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op, int32_t root,
                               ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_REDUCE, .in = &in, .out = &out, .op = op, .root = root};
    return ddl__coll_icall(group, &ask, "ddl_ireduce", out_request);
}

DDL_API ddl_status ddl_all_reduce(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op) {
    ddl__asked ask = {.kind = DDL_ALL_REDUCE, .in = &in, .out = &out, .op = op};
    return ddl__coll_call(group, &ask, "ddl_all_reduce", NULL);
}

DDL_API ddl_status ddl_iall_reduce(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op,
                                   ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_ALL_REDUCE, .in = &in, .out = &out, .op = op};
    return ddl__coll_icall(group, &ask, "ddl_iall_reduce", out_request);
}

DDL_API ddl_status ddl_gather(ddl_group *group, ddl_tensor in, ddl_tensor out, int32_t root) {
    ddl__asked ask = {.kind = DDL_GATHER, .in = &in, .out = &out, .root = root};
    return ddl__coll_call(group, &ask, "ddl_gather", NULL);
}

DDL_API ddl_status ddl_igather(ddl_group *group, ddl_tensor in, ddl_tensor out, int32_t root,
                               ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_GATHER, .in = &in, .out = &out, .root = root};
    return ddl__coll_icall(group, &ask, "ddl_igather", out_request);
}

DDL_API ddl_status ddl_scatter(ddl_group *group, ddl_tensor in, ddl_tensor out, int32_t root) {
    ddl__asked ask = {.kind = DDL_SCATTER, .in = &in, .out = &out, .root = root};
    return ddl__coll_call(group, &ask, "ddl_scatter", NULL);
}

DDL_API ddl_status ddl_iscatter(ddl_group *group, ddl_tensor in, ddl_tensor out, int32_t root,
                                ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_SCATTER, .in = &in, .out = &out, .root = root};
    return ddl__coll_icall(group, &ask, "ddl_iscatter", out_request);
}

DDL_API ddl_status ddl_all_gather(ddl_group *group, ddl_tensor in, ddl_tensor out) {
    ddl__asked ask = {.kind = DDL_ALL_GATHER, .in = &in, .out = &out};
    return ddl__coll_call(group, &ask, "ddl_all_gather", NULL);
}

DDL_API ddl_status ddl_iall_gather(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_ALL_GATHER, .in = &in, .out = &out};
    return ddl__coll_icall(group, &ask, "ddl_iall_gather", out_request);
}

DDL_API ddl_status ddl_reduce_scatter(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op) {
    ddl__asked ask = {.kind = DDL_REDUCE_SCATTER, .in = &in, .out = &out, .op = op};
    return ddl__coll_call(group, &ask, "ddl_reduce_scatter", NULL);
}

DDL_API ddl_status ddl_ireduce_scatter(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op,
                                       ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_REDUCE_SCATTER, .in = &in, .out = &out, .op = op};
    return ddl__coll_icall(group, &ask, "ddl_ireduce_scatter", out_request);
}

DDL_API ddl_status ddl_all_to_all(ddl_group *group, ddl_tensor in, ddl_tensor out) {
    ddl__asked ask = {.kind = DDL_ALL_TO_ALL, .in = &in, .out = &out};
    return ddl__coll_call(group, &ask, "ddl_all_to_all", NULL);
}

DDL_API ddl_status ddl_iall_to_all(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_ALL_TO_ALL, .in = &in, .out = &out};
    return ddl__coll_icall(group, &ask, "ddl_iall_to_all", out_request);
}

DDL_API ddl_status ddl_scan(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op) {
    ddl__asked ask = {.kind = DDL_SCAN, .in = &in, .out = &out, .op = op};
    return ddl__coll_call(group, &ask, "ddl_scan", NULL);
}

DDL_API ddl_status ddl_iscan(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op, ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_SCAN, .in = &in, .out = &out, .op = op};
    return ddl__coll_icall(group, &ask, "ddl_iscan", out_request);
}

DDL_API ddl_status ddl_exscan(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op) {
    ddl__asked ask = {.kind = DDL_EXSCAN, .in = &in, .out = &out, .op = op};
    return ddl__coll_call(group, &ask, "ddl_exscan", NULL);
}

DDL_API ddl_status ddl_iexscan(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op,
                               ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_EXSCAN, .in = &in, .out = &out, .op = op};
    return ddl__coll_icall(group, &ask, "ddl_iexscan", out_request);
}

DDL_API ddl_status ddl_gatherv(ddl_group *group, ddl_tensor in, ddl_tensor out, const int64_t *counts,
                               const int64_t *offsets, int32_t root) {
    ddl__blocks blocks = {.counts = counts, .offsets = offsets};
    ddl__asked ask = {.kind = DDL_GATHERV, .in = &in, .out = &out, .blocks = &blocks, .root = root};
    return ddl__coll_call(group, &ask, "ddl_gatherv", NULL);
}

DDL_API ddl_status ddl_igatherv(ddl_group *group, ddl_tensor in, ddl_tensor out, const int64_t *counts,
                                const int64_t *offsets, int32_t root, ddl_request **out_request) {
    ddl__blocks blocks = {.counts = counts, .offsets = offsets};
    ddl__asked ask = {.kind = DDL_GATHERV, .in = &in, .out = &out, .blocks = &blocks, .root = root};
    return ddl__coll_icall(group, &ask, "ddl_igatherv", out_request);
}

DDL_API ddl_status ddl_scatterv(ddl_group *group, ddl_tensor in, ddl_tensor out, const int64_t *counts,
                                const int64_t *offsets, int32_t root) {
    ddl__blocks blocks = {.counts = counts, .offsets = offsets};
    ddl__asked ask = {.kind = DDL_SCATTERV, .in = &in, .out = &out, .blocks = &blocks, .root = root};
    return ddl__coll_call(group, &ask, "ddl_scatterv", NULL);
}

DDL_API ddl_status ddl_iscatterv(ddl_group *group, ddl_tensor in, ddl_tensor out, const int64_t *counts,
                                 const int64_t *offsets, int32_t root, ddl_request **out_request) {
    ddl__blocks blocks = {.counts = counts, .offsets = offsets};
    ddl__asked ask = {.kind = DDL_SCATTERV, .in = &in, .out = &out, .blocks = &blocks, .root = root};
    return ddl__coll_icall(group, &ask, "ddl_iscatterv", out_request);
}

DDL_API ddl_status ddl_all_gatherv(ddl_group *group, ddl_tensor in, ddl_tensor out, const int64_t *counts,
                                   const int64_t *offsets) {
    ddl__blocks blocks = {.counts = counts, .offsets = offsets};
    ddl__asked ask = {.kind = DDL_ALL_GATHERV, .in = &in, .out = &out, .blocks = &blocks};
    return ddl__coll_call(group, &ask, "ddl_all_gatherv", NULL);
}

DDL_API ddl_status ddl_iall_gatherv(ddl_group *group, ddl_tensor in, ddl_tensor out, const int64_t *counts,
                                    const int64_t *offsets, ddl_request **out_request) {
    ddl__blocks blocks = {.counts = counts, .offsets = offsets};
    ddl__asked ask = {.kind = DDL_ALL_GATHERV, .in = &in, .out = &out, .blocks = &blocks};
    return ddl__coll_icall(group, &ask, "ddl_iall_gatherv", out_request);
}

DDL_API ddl_status ddl_reduce_scatterv(ddl_group *group, ddl_tensor in, ddl_tensor out, const int64_t *counts,
                                       ddl_op op) {
    ddl__blocks blocks = {.counts = counts};
    ddl__asked ask = {.kind = DDL_REDUCE_SCATTERV, .in = &in, .out = &out, .blocks = &blocks, .op = op};
    return ddl__coll_call(group, &ask, "ddl_reduce_scatterv", NULL);
}

DDL_API ddl_status ddl_ireduce_scatterv(ddl_group *group, ddl_tensor in, ddl_tensor out, const int64_t *counts,
                                        ddl_op op, ddl_request **out_request) {
    ddl__blocks blocks = {.counts = counts};
    ddl__asked ask = {.kind = DDL_REDUCE_SCATTERV, .in = &in, .out = &out, .blocks = &blocks, .op = op};
    return ddl__coll_icall(group, &ask, "ddl_ireduce_scatterv", out_request);
}

DDL_API ddl_status ddl_all_to_allv(ddl_group *group, ddl_tensor in, const int64_t *send_counts,
                                   const int64_t *send_offsets, ddl_tensor out, const int64_t *recv_counts,
                                   const int64_t *recv_offsets) {
    ddl__blocks blocks = {send_counts, send_offsets, recv_counts, recv_offsets};
    ddl__asked ask = {.kind = DDL_ALL_TO_ALLV, .in = &in, .out = &out, .blocks = &blocks};
    return ddl__coll_call(group, &ask, "ddl_all_to_allv", NULL);
}

DDL_API ddl_status ddl_iall_to_allv(ddl_group *group, ddl_tensor in, const int64_t *send_counts,
                                    const int64_t *send_offsets, ddl_tensor out, const int64_t *recv_counts,
                                    const int64_t *recv_offsets, ddl_request **out_request) {
    ddl__blocks blocks = {send_counts, send_offsets, recv_counts, recv_offsets};
    ddl__asked ask = {.kind = DDL_ALL_TO_ALLV, .in = &in, .out = &out, .blocks = &blocks};
    return ddl__coll_icall(group, &ask, "ddl_iall_to_allv", out_request);
}

/* >>scalar */

DDL_API ddl_status ddl_all_reduce_scalar(ddl_group *group, double *value, ddl_op op) {
    if (value == NULL) {
        return ddl__refuse_group(group, "ddl_all_reduce_scalar", "value");
    }
    ddl_tensor t = ddl_tensor_1d(value, DDL_F64, 1);
    ddl__asked ask = {.kind = DDL_ALL_REDUCE, .in = &t, .out = &t, .op = op};
    return ddl__coll_call(group, &ask, "ddl_all_reduce_scalar", NULL);
}

/* >>ops */

/* The next id; after 2^31 of them it begins anew, past those that are still there. */
static ddl_op ddl__op_id(ddl_context *c) {
    ddl_op id;
    do {
        id = DDL__OPS_FIRST + (ddl_op)(c->ops->created++ % (uint32_t)(INT32_MAX - DDL__OPS_FIRST));
    } while (ddl__user_op_of(c, id) != NULL);
    return id;
}

static ddl_status ddl__op_add(ddl_context *c, ddl__user_op op, ddl_op *out_op) {
    DDL__TRY(ddl__enter(c));
    ddl_status status = DDL_OK;
    ddl__user_op *made = c->ops->count < DDL__OPS_MAX ? ddl__alloc(&c->base, sizeof *made) : NULL;
    if (made != NULL) {
        *made = op;
        made->id = ddl__op_id(c);
        made->next = c->ops->first;
        c->ops->first = made;
        c->ops->count++;
        *out_op = made->id;
    } else if (c->ops->count == DDL__OPS_MAX) {
        status = ddl__error(c, DDL_ERR_NOMEM, "ddl_op_create: there are %d ops already; free some", DDL__OPS_MAX);
    } else {
        status = ddl__error(c, DDL_ERR_NOMEM, "ddl_op_create: no memory for an op");
    }
    ddl__unlock(c);
    return status;
}

DDL_API ddl_status ddl_op_create(ddl_context *context, ddl_op_fn fn, void *user, int commutative, ddl_op *out_op) {
    if (fn == NULL || out_op == NULL) {
        return ddl__refuse(context, "ddl_op_create", fn == NULL ? "fn" : "out_op");
    }
    return ddl__op_add(context, (ddl__user_op){.commutative = commutative != 0, .fn = fn, .user = user}, out_op);
}

DDL_API ddl_status ddl_op_create_scaled_sum(ddl_context *context, double factor, ddl_op *out_op) {
    if (out_op == NULL) {
        return ddl__refuse(context, "ddl_op_create_scaled_sum", "out_op");
    }
    return ddl__op_add(context, (ddl__user_op){.commutative = true, .factor = factor}, out_op);
}

DDL_API ddl_status ddl_op_free(ddl_context *context, ddl_op op) {
    DDL__TRY(ddl__enter(context));
    ddl__user_op *user = ddl__user_op_of(context, op);
    ddl_status status = DDL_OK;
    if (user == NULL) {
        status = ddl__error(context, DDL_ERR_ARG, "ddl_op_free: op %d was not created, or was freed before", op);
    } else {
        user->freed = true;
        context->ops->count--;
        if (user->users == 0) {
            ddl__user_op_release(context, user);
        }
    }
    ddl__unlock(context);
    return status;
}

#endif /* DDL_COLL_COLL_H */

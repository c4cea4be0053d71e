/* coll: who uses memory that is about to be freed. Nothing is counted for it while operations run: it is looked for
 * among those that are under way, and among copies that nobody waits for. What servers and trainers do with a program's
 * memory is made of these, but for a gradient that ddl_grad_ready or a push reads without the lock: no operation says
 * so, and the program must not free it meanwhile. */
#ifndef DDL_COLL_IN_USE_H
#define DDL_COLL_IN_USE_H

#include "many.h"

static bool ddl__tensor_begins_in(const ddl_tensor *t, const char *begin, const char *end) {
    return (const char *)t->data >= begin && (const char *)t->data < end;
}

static bool ddl__op_uses(const ddl__op *op, const char *begin, const char *end) {
    return (ddl__uses_in(op->group, &op->call) && ddl__tensor_begins_in(&op->call.in, begin, end)) ||
           (ddl__uses_out(op->group, &op->call) && ddl__tensor_begins_in(&op->call.out, begin, end));
}

static bool ddl__many_uses(const ddl__many *m, const char *begin, const char *end) {
    for (int32_t i = 0; i < m->count; i++) {
        if (ddl__tensor_begins_in(&m->tensors[i], begin, end)) {
            return true;
        }
    }
    return false;
}

/* What is sent from packed memory is the program's again; what is received into some is not yet. Only of these and of
 * what is on a device the tensor is known. */
static bool ddl__message_uses(const ddl_request *r, const char *begin, const char *end) {
    bool whole = r->stage != NULL || r->pipe != NULL || r->fetching || (r->packed != NULL && r->is_recv);
    return (r->data >= begin && r->data < end) || (whole && ddl__tensor_begins_in(&r->tensor, begin, end));
}

/* Collectives are found through their groups. */
static bool ddl__request_uses(const ddl_request *r, const char *begin, const char *end) {
    return r->state == DDL__REQUEST_ACTIVE &&
           (r->ops == &ddl__many_ops ? ddl__many_uses(r->kept, begin, end)
                                     : r->ops == &ddl__p2p_ops && ddl__message_uses(r, begin, end));
}

static bool ddl__stage_uses(const ddl__stage *s, const char *begin, const char *end) {
    for (int32_t i = 0; i < s->count; i++) {
        if (ddl__tensor_begins_in(&s->items[i].tensor, begin, end)) {
            return true;
        }
    }
    return false;
}

static bool ddl__memory_used(ddl_context *c, const char *begin, const char *end, ddl__text *by) {
    bool any = false; /* requests at all: mostly there are none, and hundreds of places for them */
    for (const ddl_group *g = c->groups != NULL ? c->groups->first : NULL; g != NULL; g = g->next) {
        any = any || g->outstanding > 0;
        for (const ddl__op *op = g->ops; op != NULL; op = op->next) {
            if (ddl__op_uses(op, begin, end)) {
                op->request->ops->explain(c, op->request, by);
                return true;
            }
        }
    }
    for (int32_t i = 0; any && i < c->requests->chunk_count * DDL__REQUESTS_CHUNK; i++) {
        ddl_request *r = &c->requests->chunks[i / DDL__REQUESTS_CHUNK][i % DDL__REQUESTS_CHUNK];
        if (ddl__request_uses(r, begin, end)) {
            r->ops->explain(c, r, by);
            return true;
        }
    }
    for (const ddl__stage *s = c->stages; s != NULL; s = s->next) {
        if (ddl__stage_uses(s, begin, end)) {
            ddl__text_add(by, "a copy between a device and the host, which has not ended");
            return true;
        }
    }
    return false;
}

#endif /* DDL_COLL_IN_USE_H */

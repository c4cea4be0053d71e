/* p2p, fifth part: the short way of a blocking message. Over shared memory a small one takes a tenth of a microsecond;
 * to make and to end a request would be the larger part of it. So what can leave at once leaves without a request, and
 * what has come is taken without one. All else goes the long way, which finds everything as it was. */
#ifndef DDL_P2P_QUICK_H
#define DDL_P2P_QUICK_H

#include "match.h"

/* A view of which the long way would find nothing to say, in one piece: of one dimension a stride of 0 or 1 says so. */
static bool ddl__is_plain(const ddl_tensor *t) {
    return t->ndim == 1 && t->device == DDL_HOST && t->data != NULL && (t->strides[0] & ~INT64_C(1)) == 0 &&
           t->shape[0] >= 0 && t->shape[0] <= INT32_MAX && ddl__dtype_bytes(t->dtype) > 0;
}

/* The transport keeps the message: r becomes the request that it belongs to, or ends with the error. */
static void ddl__send_adopt(ddl_group *g, const ddl_tensor *t, int32_t peer, int32_t tag, ddl_request *r,
                            ddl_status status) {
    ddl__outgoing out = r->out; /* a transport that borrows it refers to it by its address, which stays */
    ddl__request_init(g, &ddl__p2p_ops, r);
    r->out = out;
    r->tensor.dtype = t->dtype;
    r->data = t->data;
    r->bytes = (uint64_t)t->shape[0] * ddl__dtype_bytes(t->dtype);
    r->peer = peer;
    r->tag = tag;
    r->matched = r->unseen = true;
    if (status < 0) {
        ddl__send_failed(r, status);
    }
}

/* Sends a message that fits the receiver's window. False: it is one for the long way. */
static bool ddl__send_quick(ddl_group *g, const ddl_tensor *t, int32_t peer, int32_t tag, ddl_status *out_status) {
    ddl_context *c = g->context;
    ddl_request *r;
    if (!ddl__is_plain(t) || peer < 0 || peer >= g->size || peer == g->rank || tag < 0 || c->aborted) {
        return false;
    }
    uint64_t bytes = (uint64_t)t->shape[0] * ddl__dtype_bytes(t->dtype);
    if (!ddl__goes_eagerly(g, peer, bytes) || c->links[g->ranks[peer]].life != DDL__ALIVE ||
        ddl__request_take(c, &r) < 0) {
        return false;
    }
    g->flows[peer].p2p_out += (uint32_t)bytes + DDL__FRAME_BYTES;
    ddl__frame f = ddl__envelope(g, DDL__FRAME_P2P, peer, tag, t->dtype, bytes);
    f.bytes = (uint32_t)bytes;
    r->out.done = ddl__send_done;
    r->out.owner = r;
    *out_status = ddl__post(c, g->ranks[peer], &r->out, &f, t->data);
    if (*out_status == DDL_OK) {
        ddl__request_untake(c, r);
        c->stats.ops_started++;
        c->stats.ops_completed++;
        return true;
    }
    ddl__send_adopt(g, t, peer, tag, r, *out_status);
    ddl__wait_requests(c, &r, 1, false);
    *out_status = ddl__request_report(&r, NULL);
    return true;
}

/* Takes a message that has come, if it is one for such a receive. False: it is not, and the long way says why. */
static bool ddl__recv_early(ddl_group *g, const ddl_tensor *t, ddl__unexpected *u, ddl_info *out_info) {
    ddl_context *c = g->context;
    size_t each = ddl__dtype_bytes(t->dtype);
    if (u->is_offer || u->dtype != t->dtype || u->bytes > (uint64_t)t->shape[0] * each) {
        return false;
    }
    if (u->bytes > 0) {
        memcpy(t->data, u->data, u->bytes);
    }
    if (u->source != g->rank) {
        ddl__p2p_took(c, g, u->source, u->bytes);
    }
    if (out_info != NULL) {
        *out_info = (ddl_info){
            .source = u->source, .tag = u->tag, .count = (int64_t)(u->bytes / each), .status = DDL_OK};
    }
    ddl__unexpected_remove(g, u);
    c->stats.ops_started++;
    c->stats.ops_completed++;
    return true;
}

/* Receives what has come, or waits for it. False: it is something for the long way. */
static bool ddl__recv_quick(ddl_group *g, const ddl_tensor *t, int32_t peer, int32_t tag, ddl_info *out_info,
                            ddl_status *out_status) {
    ddl_context *c = g->context;
    ddl_request *r;
    if (!ddl__is_plain(t) || peer < DDL_ANY_SOURCE || peer >= g->size || tag < DDL_ANY_TAG || c->aborted) {
        return false;
    }
    *out_status = DDL_OK;
    ddl__unexpected *u = ddl__unexpected_find(g, peer, tag);
    if (u != NULL) {
        return ddl__recv_early(g, t, u, out_info);
    }
    if ((peer >= 0 && c->links[g->ranks[peer]].life != DDL__ALIVE) || ddl__request_take(c, &r) < 0) {
        return false;
    }
    ddl__request_init(g, &ddl__p2p_ops, r);
    r->is_recv = r->unseen = true;
    r->peer = peer;
    r->tag = tag;
    r->tensor.dtype = t->dtype;
    r->data = t->data;
    r->bytes = (uint64_t)t->shape[0] * ddl__dtype_bytes(t->dtype);
    ddl__posted_append(g, r);
    ddl__wait_requests(c, &r, 1, false);
    if (r->status == DDL_OK && out_info == NULL) {
        ddl__request_release(r);
    } else {
        *out_status = ddl__request_report(&r, out_info);
    }
    return true;
}

#endif /* DDL_P2P_QUICK_H */

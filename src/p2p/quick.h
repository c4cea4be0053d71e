/* p2p, fifth part: the short way of a blocking message. Over shared memory a small one takes a tenth of a microsecond;
 * to make and to end a request would be the larger part of it. So what can leave at once leaves without a request, and
 * what has come is taken without one. All else goes the long way, which finds everything as it was. */
#ifndef DDL_P2P_QUICK_H
#define DDL_P2P_QUICK_H

#include "match.h"

/* A view of which the long way would find nothing to say, in one piece: of one dimension a stride of 0 or 1 says so. */
static bool ddl__is_plain(const ddl_context *c, const ddl_tensor *t) {
    return t->ndim == 1 && t->device == DDL_HOST && t->data != NULL && (t->strides[0] & ~INT64_C(1)) == 0 &&
           t->shape[0] >= 0 && t->shape[0] <= INT32_MAX && ddl__dtype_bytes(t->dtype) > 0 &&
           (c->devices == NULL || ddl__device_that_owns(c, t->data) == NULL);
}

/* The transport keeps the message, or refused it: r becomes the request that it belongs to. */
static void ddl__send_adopt(ddl_group *g, const ddl_tensor *t, int32_t peer, int32_t tag, ddl_request *r) {
    ddl__outgoing out = r->out; /* a transport that borrows it refers to it by its address, which stays */
    ddl__request_init(g, &ddl__p2p_ops, r);
    r->out = out;
    r->tensor.dtype = t->dtype;
    r->data = t->data;
    r->bytes = (uint64_t)t->shape[0] * ddl__dtype_bytes(t->dtype);
    r->peer = peer;
    r->tag = tag;
    r->matched = r->unseen = true;
}

/* Writes a message where the receiver will find it, in memory of the transport's: no request, and no copy of the
 * header. False: nothing was done. */
static bool ddl__send_in_place(ddl_group *g, const ddl_tensor *t, int32_t peer, int32_t tag, uint64_t bytes) {
    ddl_context *c = g->context;
    int32_t world = g->ranks[peer];
    const ddl__endpoint *e = c->links[world].endpoint;
    uint8_t *header;
    void *payload;
    if (e == NULL || !DDL_HAS(e->table, publish) || !ddl__goes_bare(c, e) ||
        e->table->reserve(e->self, world, bytes, &header, &payload) != DDL_OK) {
        return false;
    }
    ddl__frame f = ddl__envelope(g, DDL__FRAME_P2P, peer, tag, t->dtype, bytes);
    f.bytes = (uint32_t)bytes;
    f.source = (uint32_t)c->rank;
    ddl__frame_write_bare(header, &f);
    if (bytes > 0) {
        memcpy(payload, t->data, bytes);
    }
    e->table->publish(e->self, world, bytes);
    ddl__flow_goes(&g->flows[peer], bytes);
    ddl__link_used(c, world);
    ddl__count_sent(c, world, bytes);
    c->stats.ops_started++;
    c->stats.ops_completed++;
    return true;
}

/* Sends a message that fits the receiver's window. False: it is one for the long way. */
static bool ddl__send_quick(ddl_group *g, const ddl_tensor *t, int32_t peer, int32_t tag, ddl_status *out_status) {
    ddl_context *c = g->context;
    ddl_request *r;
    if (!ddl__is_plain(c, t) || peer < 0 || peer >= g->size || peer == g->rank || tag < 0 || c->aborted) {
        return false;
    }
    uint64_t bytes = (uint64_t)t->shape[0] * ddl__dtype_bytes(t->dtype);
    if (!ddl__goes_eagerly(g, peer, bytes) || c->links[g->ranks[peer]].life != DDL__ALIVE) {
        return false;
    }
    if (ddl__send_in_place(g, t, peer, tag, bytes)) {
        *out_status = DDL_OK;
        return true;
    }
    if (ddl__request_take(c, &r) < 0) {
        return false;
    }
    ddl__flow_goes(&g->flows[peer], bytes);
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
    ddl__send_adopt(g, t, peer, tag, r);
    if (*out_status < 0) {
        ddl__send_refused(r, &f, *out_status);
    }
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

/* Is it a bare header of a message of so many bytes that a receive of this tag takes as it is? Whole words are compared
 * with what the sender writes, each loaded once. */
static bool ddl__is_as_asked(const ddl_group *g, const ddl_tensor *t, int32_t peer, int32_t tag, const uint8_t *header,
                             uint64_t bytes, uint64_t *out_sequence) {
    uint64_t each = ddl__dtype_bytes(t->dtype), right[DDL__FRAME_BYTES / 8];
    ddl__frame f = {.type = DDL__FRAME_P2P,
                    .flags = (uint16_t)t->dtype,
                    .bytes = (uint32_t)bytes,
                    .source = (uint32_t)g->ranks[peer],
                    .group = g->id,
                    .epoch = g->epoch,
                    .signature = bytes};
    ddl__frame_write_bare((uint8_t *)right, &f);
    uint64_t sequence = ddl__load_le64(header + 24), wrong = (uint32_t)sequence ^ (uint32_t)tag;
    for (size_t i = 0; i < DDL__COUNT_OF(right); i++) {
        wrong |= i == 3 ? 0 : ddl__load_le64(header + 8 * i) ^ right[i];
    }
    *out_sequence = sequence;
    return wrong == 0 && bytes <= (uint64_t)t->shape[0] * each && (bytes & (each - 1)) == 0;
}

/* The next message of a peer where it lies. Where ranks share cores, this one is given away meanwhile: at once if the
 * peer is on it, else after about as long as its answer takes when another rank has that core first: two that answer
 * each other at once then keep their cores, and those that wait for nothing urgent do not get in between. */
static bool ddl__peek_shortly(ddl_context *c, const ddl__link *l, int32_t world, const uint8_t **header,
                              const void **payload, uint64_t *bytes) {
    if (ddl__is_crowded(c) && sched_getcpu() != c->place_core) {
        ddl__place_wait(c, ddl__about_ns(c)); /* the peer may go by it */
    }
    for (int32_t yields = 0;; yields++) {
        int32_t spins = ddl__spin_limit(c, world);
        bool blind = ddl__is_crowded(c) && !c->spread; /* nobody knows where the peer is */
        int32_t looks = spins == 1 || blind ? 1 : DDL__LOOKS_SHORTLY;
        ddl_status status = l->endpoint->table->peek(l->endpoint->self, world, looks, header, payload, bytes);
        bool wanted = ddl__lock_is_wanted(c);
        if (status != DDL_IN_PROGRESS || yields == DDL__YIELDS_SHORTLY || wanted || c->yielded_long ||
            !ddl__is_crowded(c)) {
            if (yields > 0) {
                ddl__place_leave(c);
            }
            return status == DDL_OK;
        }
        ddl__yield(c, false, -1);
    }
}

/* Takes the next message of a peer where it lies, in memory of the transport's, if it is for a receive of this tag and
 * nothing is to be matched before it; looks for it about as long as its answer takes when it comes at once. No request
 * is made for it. False: nothing was taken; now and then it is so, that the other ranks are looked at as well. */
static bool ddl__recv_in_place(ddl_group *g, const ddl_tensor *t, int32_t peer, int32_t tag, ddl_info *out_info) {
    ddl_context *c = g->context;
    const ddl__link *l = peer >= 0 ? &c->links[g->ranks[peer]] : NULL;
    if (l == NULL || tag < 0 || g->posted_first != NULL || c->polling || c->natives != NULL || c->settings.mac ||
        l->life != DDL__ALIVE || l->endpoint == NULL || !DDL_HAS(l->endpoint->table, taken) ||
        !ddl__is_intact(l->endpoint) ||
        ++c->polls % DDL__POLLS_CHEAP == 0) {
        return false;
    }
    int32_t world = g->ranks[peer];
    const uint8_t *header;
    const void *payload;
    uint64_t bytes, sequence;
    if (!ddl__peek_shortly(c, l, world, &header, &payload, &bytes) ||
        !ddl__is_as_asked(g, t, peer, tag, header, bytes, &sequence) ||
        !ddl__credit(g, peer, (uint32_t)(sequence >> 32))) {
        return false;
    }
    if (bytes > 0) {
        ddl__copy_fresh(t->data, payload, bytes);
    }
    l->endpoint->table->taken(l->endpoint->self, world);
    ddl__link_used(c, world);
    ddl__count_received(c, world, bytes);
    ddl__p2p_took(c, g, peer, bytes);
    if (out_info != NULL) {
        *out_info = (ddl_info){
            .source = peer, .tag = tag, .count = (int64_t)ddl__elements(bytes, t->dtype), .status = DDL_OK};
    }
    c->stats.ops_started++;
    c->stats.ops_completed++;
    return true;
}

/* Receives what has come, or waits for it. False: it is something for the long way. */
static bool ddl__recv_quick(ddl_group *g, const ddl_tensor *t, int32_t peer, int32_t tag, ddl_info *out_info,
                            ddl_status *out_status) {
    ddl_context *c = g->context;
    ddl_request *r;
    if (!ddl__is_plain(c, t) || peer < DDL_ANY_SOURCE || peer >= g->size || tag < DDL_ANY_TAG || c->aborted) {
        return false;
    }
    *out_status = DDL_OK;
    ddl__unexpected *u = ddl__unexpected_find(g, peer, tag);
    if (u != NULL) {
        return ddl__recv_early(g, t, u, out_info);
    }
    if (ddl__recv_in_place(g, t, peer, tag, out_info)) {
        return true;
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

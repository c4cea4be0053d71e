/* p2p, sixth part: the public calls, and checks of what callers pass. */
#ifndef DDL_P2P_P2P_H
#define DDL_P2P_P2P_H

#include "quick.h"

/* A message of a device: which way it goes is known when the other side is. */
static ddl_status ddl__p2p_stage(ddl_request *r) {
    ddl_context *c = r->context;
    ddl__device *d;
    DDL__TRY(ddl__device_get(c, r->tensor.device, r->is_recv ? "receive" : "send", &d));
    r->stage = ddl__stage_make(c, 1);
    if (r->stage == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "no memory to stage a tensor of device %d", r->tensor.device);
    }
    r->stage->owner = r;
    r->data = NULL;
    DDL__TRY(ddl__stage_order(r->group, r, r->stage, r->is_recv ? "a receive" : "a send"));
    bool whole = r->peer == r->group->rank || !ddl__is_contiguous(&r->tensor);
    return whole && !r->is_recv ? ddl__p2p_whole(r, r->bytes) : DDL_OK;
}

/* The buffer of a message: the tensor itself, or packed scratch when it is strided. */
static ddl_status ddl__p2p_buffer(ddl_request *r, const ddl_tensor *t) {
    ddl_context *c = r->context;
    r->tensor = *t;
    r->bytes = (uint64_t)ddl_tensor_count(t) * ddl_dtype_bytes(t->dtype);
    r->data = t->data;
    if (ddl__is_staged(t)) {
        return ddl__p2p_stage(r);
    }
    if (r->bytes == 0 || ddl__is_contiguous(t)) {
        return DDL_OK;
    }
    r->packed = ddl__scratch_get(c, r->bytes);
    if (r->packed == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "no memory to pack a strided tensor of %llu bytes",
                          (unsigned long long)r->bytes);
    }
    r->data = r->packed;
    if (!r->is_recv) {
        ddl__pack(t, r->data, false);
    }
    return DDL_OK;
}

static ddl_status ddl__p2p_check(ddl_group *g, const ddl_transfer *t, const char *what) {
    ddl_context *c = g->context;
    bool any = !t->is_send && t->peer == DDL_ANY_SOURCE;
    if (t->peer != DDL_NO_RANK && !any && (t->peer < 0 || t->peer >= g->size)) {
        return ddl__error(c, DDL_ERR_ARG, "%s: rank %d is not in group \"%s\", whose ranks are 0 to %d", what, t->peer,
                          g->name, g->size - 1);
    }
    if (t->tag < 0 && !(t->tag == DDL_ANY_TAG && !t->is_send)) {
        return ddl__error(c, DDL_ERR_ARG, "%s: the tag is %d; tags are 0 and up%s", what, t->tag,
                          t->is_send ? "" : ", or DDL_ANY_TAG to receive");
    }
    DDL__TRY(ddl__tensor_check(c, &t->tensor, what, "tensor"));
    return t->is_send ? DDL_OK : ddl__tensor_check_output(c, &t->tensor, what, "tensor");
}

/* What ddl_send_recv receives must not change what it sends meanwhile. A strided tensor is sent from a copy. */
static ddl_status ddl__p2p_check_apart(ddl_group *g, const ddl_transfer *recv, const ddl_transfer *send,
                                       const char *what) {
    bool moves = recv->peer != DDL_NO_RANK && send->peer != DDL_NO_RANK;
    bool touch = ddl__is_contiguous(&send->tensor)  ? ddl__tensor_touches(&recv->tensor, &send->tensor)
                 : ddl__is_staged(&send->tensor) && ddl__tensors_overlap(&recv->tensor, &send->tensor);
    if (moves && touch) {
        return ddl__error(g->context, DDL_ERR_ARG, "%s: `send` and `recv` overlap; they must be apart", what);
    }
    return DDL_OK;
}

static void ddl__self_no_memory(ddl_request *r) {
    ddl__request_fail(r, DDL_ERR_NOMEM,
                      "send of %llu bytes to this rank itself: no memory to keep them until they are "
                      "received; start the receive first",
                      (unsigned long long)r->bytes);
}

/* A message to this rank itself meets its receive at once, or waits as a copy; one that is on its way from a device, or
 * stays where it is, waits as an offer. */
static void ddl__send_self(ddl_context *c, ddl_request *r) {
    ddl_group *g = r->group;
    ddl__frame f = ddl__p2p_frame(r, DDL__FRAME_P2P);
    ddl__offer offer = {.cookie = ddl__request_cookie(r)};
    ddl_request *to = ddl__posted_take(g, g->rank, r->tag, r->tensor.dtype, r->bytes, true);
    if (r->filling || (r->stays && to == NULL)) {
        if (to != NULL) {
            ddl__self_accept(c, to, ddl__request_cookie(r));
        } else if (ddl__keep_unexpected(c, g, g->rank, &f, &offer, NULL) < 0) {
            ddl__stage_leave(c, &r->stage);
            ddl__self_no_memory(r);
        }
        return;
    }
    if (to != NULL) {
        if (r->bytes > 0) {
            memmove(to->data, r->data, r->bytes);
        }
        ddl__recv_done(to);
    } else if (ddl__keep_unexpected(c, g, g->rank, &f, NULL, r->data) < 0) {
        ddl__self_no_memory(r);
        return;
    }
    ddl__request_done(r, DDL_OK);
}

/* Makes a request of a transfer that was checked; it is not started yet. */
static ddl_status ddl__p2p_make(ddl_group *g, const ddl_transfer *t, ddl_request **out) {
    ddl_request *r;
    DDL__TRY(ddl__request_new(g, &ddl__p2p_ops, &r));
    r->is_recv = !t->is_send;
    r->peer = t->peer;
    r->tag = t->tag;
    ddl_status status = ddl__p2p_buffer(r, &t->tensor);
    if (status < 0) {
        ddl__request_release(r);
        return status;
    }
    *out = r;
    return DDL_OK;
}

/* What is sent has come from its device, and may have been asked for. Or the stream has come to a receive. */
static void ddl__send_filled(ddl_context *c, ddl__stage *s, ddl_status status) {
    ddl_request *r = s->owner;
    r->filling = false;
    if (r->is_recv && status >= 0) {
        if (r->fetching) {
            ddl__fetch_get(c, r);
        } else if (r->pipe != NULL) {
            ddl__pipe_drain(c, r);
        } else if (r->draining) { /* the message was here before the stream */
            ddl__recv_done(r);
        }
    } else if (r->is_recv) {
        ddl__p2p_abandon(c, r);
        ddl__request_fail(r, status, "receive into a tensor of device %d: %s", r->tensor.device,
                          ddl_status_text(status));
    } else if (status < 0) {
        ddl__p2p_abandon(c, r);
        ddl__request_fail(r, status, "send of %llu bytes to rank %d of group \"%s\": device %d did not give them: %s",
                          (unsigned long long)r->bytes, r->peer, r->group->name, r->tensor.device,
                          ddl_status_text(status));
    } else if (r->matched && r->peer == r->group->rank) {
        ddl__self_move(c, r);
    } else if (r->fetching) {
        ddl__send_ready(c, r);
    } else if (r->peer != r->group->rank) {
        ddl__send_data(c, r); /* what was asked for; of the others the first chunks are copied */
    }
}

/* Begins to bring a device's tensor, or to wait until one may be written. False: that failed; the request has ended. */
static bool ddl__send_fill(ddl_context *c, ddl_request *r) {
    r->stage->done = ddl__send_filled;
    ddl_status status = ddl__stage_fill(c, r->stage);
    r->filling = status == DDL_IN_PROGRESS;
    if (status < 0) {
        ddl__send_filled(c, r->stage, status);
    }
    return status >= 0;
}

static void ddl__p2p_start(ddl_context *c, ddl_request *r) {
    if (r->state != DDL__REQUEST_ACTIVE) {
        return; /* a death that came while others of its batch were started has ended it */
    }
    r->start_ns = c->trace != NULL ? ddl__now_ns() : 0;
    if (r->peer == DDL_NO_RANK) {
        r->info.count = 0;
        ddl__request_done(r, DDL_OK);
    } else if (c->aborted) {
        ddl__request_fail(r, DDL_ERR_ABORTED, "%s", c->abort_text);
    } else if (c->finalized) { /* a call of several messages (making a group) is not to wait for its next one */
        ddl__request_fail(r, DDL_ERR_STATE, "the context was finalized while the operation was running");
    } else if (r->stage != NULL && (!r->is_recv || r->ordered) && !ddl__send_fill(c, r)) {
        return;
    } else if (r->is_recv) {
        ddl__recv_start(c, r);
    } else if (r->peer == r->group->rank) {
        ddl__send_self(c, r);
    } else {
        ddl__send_start(c, r);
    }
}

/* Starts transfers: all, or none. */
static ddl_status ddl__p2p_begin(ddl_group *g, const ddl_transfer *transfers, int32_t count, const char *what,
                                 ddl_request **out_requests) {
    ddl_context *c = g->context;
    for (int32_t i = 0; i < count; i++) {
        DDL__TRY(ddl__p2p_check(g, &transfers[i], what));
    }
    if (count == 2 && !transfers[0].is_send && transfers[1].is_send) { /* a batch that is one is checked too */
        DDL__TRY(ddl__p2p_check_apart(g, &transfers[0], &transfers[1], what));
    }
    int32_t made = 0;
    ddl_status status = DDL_OK;
    while (made < count && status == DDL_OK) {
        status = ddl__p2p_make(g, &transfers[made], &out_requests[made]);
        made += status == DDL_OK;
    }
    if (status < 0) {
        while (made > 0) {
            ddl__request_release(out_requests[--made]);
            out_requests[made] = NULL;
        }
        return status;
    }
    for (int32_t i = 0; i < count; i++) {
        ddl__p2p_start(c, out_requests[i]);
    }
    return DDL_OK;
}

/* Begins transfers and, for a blocking call (out_requests NULL), waits for them. The lock is held. */
static ddl_status ddl__p2p_run(ddl_group *g, const ddl_transfer *transfers, int32_t count, const char *what,
                               ddl_request **out_requests, ddl_info *out_infos) {
    ddl_context *c = g->context;
    ddl_request *own[2] = {NULL, NULL};
    ddl_status status = ddl__p2p_begin(g, transfers, count, what, out_requests != NULL ? out_requests : own);
    ddl__marks_drop(g);
    if (status == DDL_OK && out_requests == NULL) {
        for (int32_t i = 0; i < count; i++) {
            own[i]->unseen = true;
            if (own[i]->ordered && out_infos == NULL && ddl__request_detach(c, own[i])) {
                own[i] = NULL;
            }
        }
        ddl__wait_requests(c, own, count, false);
        status = ddl__report_all(c, own, count, out_infos);
    }
    return status;
}

static ddl_status ddl__p2p_call(ddl_group *g, const ddl_transfer *transfers, int32_t count, const char *what,
                                ddl_request **out_requests, ddl_info *out_infos) {
    for (int32_t i = 0; out_requests != NULL && i < count; i++) {
        out_requests[i] = NULL;
    }
    DDL__TRY(ddl__enter_ordered(g, what, count));
    ddl_status status = ddl__p2p_run(g, transfers, count, what, out_requests, out_infos);
    ddl__unlock(g->context);
    return status;
}

/* >>public */

DDL_API ddl_status ddl_send(ddl_group *group, ddl_tensor tensor, int32_t peer, int32_t tag) {
    ddl_status status;
    DDL__TRY(ddl__enter_ordered(group, "ddl_send", 1));
    uint64_t from = group->context->trace != NULL ? ddl__now_ns() : 0;
    if (!ddl__send_quick(group, &tensor, peer, tag, &status)) {
        ddl_transfer t = {1, tensor, peer, tag};
        status = ddl__p2p_run(group, &t, 1, "ddl_send", NULL, NULL);
    } else if (from != 0) {
        int64_t bytes = ddl_tensor_count(&tensor) * (int64_t)ddl_dtype_bytes(tensor.dtype);
        ddl__message_trace(group, false, peer, bytes, from, false);
    }
    ddl__unlock(group->context);
    return status;
}

DDL_API ddl_status ddl_recv(ddl_group *group, ddl_tensor tensor, int32_t peer, int32_t tag, ddl_info *out_info) {
    ddl_status status;
    DDL__TRY(ddl__enter_ordered(group, "ddl_recv", 1));
    uint64_t from = group->context->trace != NULL ? ddl__now_ns() : 0;
    ddl_info info = {0};
    if (!ddl__recv_quick(group, &tensor, peer, tag, from != 0 ? &info : out_info, &status)) {
        ddl_transfer t = {0, tensor, peer, tag};
        status = ddl__p2p_run(group, &t, 1, "ddl_recv", NULL, out_info);
    } else if (from != 0) {
        ddl__message_trace(group, true, info.source, info.count * (int64_t)ddl_dtype_bytes(tensor.dtype), from, false);
        if (out_info != NULL) {
            *out_info = info;
        }
    }
    ddl__unlock(group->context);
    return status;
}

DDL_API ddl_status ddl_isend(ddl_group *group, ddl_tensor tensor, int32_t peer, int32_t tag,
                             ddl_request **out_request) {
    ddl_transfer t = {1, tensor, peer, tag};
    return out_request == NULL ? ddl__refuse_group(group, "ddl_isend", "out_request")
                               : ddl__p2p_call(group, &t, 1, "ddl_isend", out_request, NULL);
}

DDL_API ddl_status ddl_irecv(ddl_group *group, ddl_tensor tensor, int32_t peer, int32_t tag,
                             ddl_request **out_request) {
    ddl_transfer t = {0, tensor, peer, tag};
    return out_request == NULL ? ddl__refuse_group(group, "ddl_irecv", "out_request")
                               : ddl__p2p_call(group, &t, 1, "ddl_irecv", out_request, NULL);
}

DDL_API ddl_status ddl_send_recv(ddl_group *group, ddl_tensor send, int32_t dest, int32_t send_tag, ddl_tensor recv,
                                 int32_t source, int32_t recv_tag, ddl_info *out_info) {
    ddl_transfer both[2] = {{0, recv, source, recv_tag}, {1, send, dest, send_tag}};
    ddl_info infos[2];
    ddl_status status = ddl__p2p_call(group, both, 2, "ddl_send_recv", NULL, out_info != NULL ? infos : NULL);
    if (out_info != NULL && status == DDL_OK) {
        *out_info = infos[0];
    }
    return status;
}

DDL_API ddl_status ddl_batch(ddl_group *group, const ddl_transfer *transfers, int32_t count,
                             ddl_request **out_requests) {
    if (count < 0 || (count > 0 && (transfers == NULL || out_requests == NULL))) {
        return ddl__refuse_group(group, "ddl_batch", count < 0 ? "count is negative, or an array" : "an array");
    }
    ddl_request *none = NULL;
    return ddl__p2p_call(group, transfers, count, "ddl_batch", count > 0 ? out_requests : &none, NULL);
}

DDL_API ddl_status ddl_cancel(ddl_request *request) {
    ddl_request *list[1] = {request};
    ddl_context *c;
    if (request == NULL) {
        return DDL_ERR_ARG;
    }
    DDL__TRY(ddl__enter_requests(list, 1, "ddl_cancel", &c));
    ddl_status status = DDL_OK;
    if (!c->polling) {
        ddl__poll(c, -1); /* what has come must not be passed over because nobody has looked */
    }
    if (request->ops != &ddl__p2p_ops || !request->is_recv) {
        status = ddl__error(c, DDL_ERR_ARG, "ddl_cancel: only a receive can be cancelled");
    } else if (request->state != DDL__REQUEST_ACTIVE || request->matched) {
        status = ddl__error(c, DDL_ERR_STATE, "ddl_cancel: too late, a message has arrived for this receive");
    } else {
        ddl__p2p_abandon(c, request);
        ddl__request_fail(request, DDL_ERR_CANCELLED, "the receive was cancelled");
    }
    ddl__unlock(c);
    return status;
}

/* >>probe */

typedef struct ddl__probing {
    ddl_group *group;
    int32_t peer, tag;
    int32_t deaths; /* that a probe of any rank has reported before this one began */
    bool alone, lost;
} ddl__probing;

/* From any rank: each death is told once, as to a receive. The message waited for may have been the dead one's. */
static bool ddl__probe_done(ddl_context *c, void *arg) {
    ddl__probing *p = arg;
    p->lost = p->peer < 0 ? p->alone || p->group->deaths > p->deaths
                          : ddl__is_gone(p->group, p->peer) || ddl__has_gone_on(p->group, p->peer);
    return p->lost || c->aborted || c->finalized || ddl__unexpected_find(p->group, p->peer, p->tag) != NULL;
}

static void ddl__probe_tick(ddl_context *c, void *arg, uint64_t now) {
    (void)c;
    (void)now;
    ddl__probing *p = arg;
    p->alone = p->peer < 0 && ddl__is_alone(p->group);
}

static ddl_status ddl__probe_lost(ddl__probing *p, const char *what) {
    ddl_group *g = p->group;
    if (p->peer >= 0) {
        bool gone_on = ddl__has_gone_on(g, p->peer);
        return ddl__error(g->context, DDL_ERR_PEER, "%s: rank %d is gone%s%s", what, p->peer,
                          gone_on ? " on to shrink or grow the group: " : "", gone_on ? g->cause : "");
    }
    g->deaths_probed = g->deaths;
    return ddl__error(g->context, DDL_ERR_PEER, "%s from any rank of group \"%s\": %s", what, g->name,
                      p->alone ? ddl__why_alone : g->cause);
}

static ddl_status ddl__probe(ddl_group *g, int32_t peer, int32_t tag, bool block, const char *what, ddl_info *out) {
    DDL__TRY(ddl__enter_group(g, what));
    ddl_context *c = g->context;
    ddl_transfer t = {0, ddl_tensor_1d(NULL, DDL_U8, 0), peer, tag};
    ddl_status status = peer == DDL_NO_RANK
                            ? ddl__error(c, DDL_ERR_ARG, "%s: DDL_NO_RANK sends nothing to look for", what)
                            : ddl__p2p_check(g, &t, what);
    ddl__probing probing = {.group = g, .peer = peer, .tag = tag, .deaths = g->deaths_probed};
    ddl__wait w = {ddl__probe_done, ddl__probe_tick, NULL, &probing, ddl__deadline(ddl__now_ns(), g->timeout_ms)};
    g->outstanding++; /* the group cannot be freed meanwhile */
    ddl__probe_tick(c, &probing, 0);
    if (status == DDL_OK && !ddl__probe_done(c, &probing)) {
        if (block && !ddl__wait_for(c, &w)) {
            status = ddl__error(c, DDL_ERR_TIMEOUT, "%s: no message from rank %d (tag %d) came before the deadline",
                                what, peer, tag);
        } else if (!block && !c->polling) {
            ddl__poll(c, peer >= 0 ? g->ranks[peer] : -1);
            ddl__look(c, ddl__now_ns());
        }
    }
    ddl__unexpected *u = status == DDL_OK ? ddl__unexpected_find(g, peer, tag) : NULL;
    if (u != NULL && out != NULL) {
        *out = (ddl_info){.source = u->source, .tag = u->tag, .count = (int64_t)u->bytes, .status = DDL_OK};
    }
    if (status == DDL_OK && u == NULL) {
        status = c->aborted     ? ddl__error(c, DDL_ERR_ABORTED, "%s: %s", what, c->abort_text)
                 : c->finalized ? ddl__error(c, DDL_ERR_STATE, "%s: the context was finalized meanwhile", what)
                 : ddl__probe_done(c, &probing) ? ddl__probe_lost(&probing, what)
                                                : DDL_IN_PROGRESS;
    }
    g->outstanding--;
    ddl__unlock(c);
    return status;
}

DDL_API ddl_status ddl_probe(ddl_group *group, int32_t peer, int32_t tag, ddl_info *out_info) {
    return ddl__probe(group, peer, tag, true, "ddl_probe", out_info);
}

DDL_API ddl_status ddl_iprobe(ddl_group *group, int32_t peer, int32_t tag, ddl_info *out_info) {
    return ddl__probe(group, peer, tag, false, "ddl_iprobe", out_info);
}

#endif /* DDL_P2P_P2P_H */

/* p2p, fourth part: which message meets which receive, and how its bytes travel.
 *
 *     eager       P2P(tag, total, data)                       up to 64 KiB, while the receiver's window lasts; over
 *                                                             DDL_TRANSPORT_PULLS up to 1 MiB, one at a time
 *     rendezvous  RTS(tag, total, cookie) -> CTS(cookies, window) -> DATA(cookie) ...   frames of up to 1 MiB, or of 16
 *     open        DATA(cookie) ...   more than 64 KiB, to a receive whose cookie came by another message
 *
 * Tensors on devices have ways of their own: devices.h.
 *
 * In P2P and RTS frames the low half of `sequence` is the tag and the high half credit, `signature` is the size of the
 * whole message, the low byte of `flags` its dtype. P2P and RTS frames of one pair and group arrive in the order they
 * were sent, and are matched in that order. */
#ifndef DDL_P2P_MATCH_H
#define DDL_P2P_MATCH_H

#include "copy.h"
#include "devices.h"

enum {
    DDL__P2P_EAGER_BYTES = 64 * 1024,
    DDL__P2P_PULLED_BYTES = 1024 * 1024, /* where receivers read, and nothing is in the window; */
    DDL__P2P_PULLED_LEAST = 256 * 1024,  /* less in large groups, so that what all others may send */
    DDL__P2P_PULLED_ALL = 64 * 1024 * 1024, /* stays below this, as long as each may send that */
    DDL__TAG_LIST_BITS = 15 /* of the tags of making a group: hash of the name, then of the list */
};
#define DDL__RIVAL_NS (1000 * DDL__NS_PER_MS)
#define DDL__DATA_NS DDL__NS_PER_MS
#define DDL__DATA_BYTES_PER_NS 100 /* more than any network carries */

/* A message that nobody has asked for yet: its data, or the offer of it. */
typedef struct ddl__unexpected {
    struct ddl__unexpected *next;
    int32_t source, tag; /* group rank */
    ddl_dtype dtype;
    bool is_offer;
    uint64_t bytes, arrived_ns; /* the last of ddl's own alone */
    unsigned char data[]; /* of an offer: ddl__offer */
} ddl__unexpected;

/* >>sending */

/* Credit for what we took of the peer rides along, so that a conversation needs no messages for it. */
static ddl__frame ddl__envelope(ddl_group *g, uint8_t type, int32_t peer, int32_t tag, ddl_dtype dtype,
                                uint64_t bytes) {
    ddl__toward *flow = &g->flows[peer];
    uint64_t credit = flow->p2p_in;
    flow->p2p_in = 0;
    return (ddl__frame){.type = type,
                        .flags = (uint16_t)dtype,
                        .group = g->id,
                        .epoch = g->epoch,
                        .sequence = credit << 32 | (uint32_t)tag,
                        .signature = bytes};
}

static ddl__frame ddl__p2p_frame(const ddl_request *r, uint8_t type) {
    return ddl__envelope(r->group, type, r->peer, r->tag, r->tensor.dtype, r->bytes);
}

/* Where receivers read, the transport's own offer asks for the data: another one before it takes two messages' time. */
static bool ddl__goes_pulled(const ddl_group *g, int32_t peer) {
    const ddl__endpoint *e = g->context->links[g->ranks[peer]].endpoint;
    return g->flows[peer].p2p_out == 0 && e != NULL && (e->table->flags & DDL_TRANSPORT_PULLS) != 0;
}

static uint64_t ddl__pulled_bytes(const ddl_group *g) {
    int32_t each = DDL__MAX(DDL__P2P_PULLED_ALL / g->size, DDL__P2P_PULLED_LEAST);
    return (uint64_t)DDL__MIN(each, DDL__P2P_PULLED_BYTES);
}

static bool ddl__fits_window(const ddl_group *g, int32_t peer, uint64_t bytes) {
    const ddl__toward *flow = &g->flows[peer];
    uint64_t most = DDL__WINDOW_BYTES + flow->p2p_large;
    return bytes <= DDL__P2P_EAGER_BYTES ? flow->p2p_out + bytes + DDL__FRAME_BYTES <= most
                                         : bytes <= ddl__pulled_bytes(g) && ddl__goes_pulled(g, peer);
}

/* So many bytes go eagerly. */
static void ddl__flow_goes(ddl__toward *flow, uint64_t bytes) {
    flow->p2p_out += (uint32_t)bytes + DDL__FRAME_BYTES;
    if (bytes > DDL__P2P_EAGER_BYTES) {
        flow->p2p_large = (uint32_t)bytes + DDL__FRAME_BYTES;
    }
}

/* So many, with their frames, were taken, or did not go. The large one was taken when less than it is out. */
static void ddl__flow_came(ddl__toward *flow, uint32_t bytes) {
    flow->p2p_out -= DDL__MIN(bytes, flow->p2p_out);
    flow->p2p_large = flow->p2p_out < flow->p2p_large ? 0 : flow->p2p_large;
}

/* May so many bytes go to a peer before it asks for them? A rank that only sends, and meets the others natively, has
 * not looked at what they took: it looks before it says no. */
static bool ddl__goes_eagerly(ddl_group *g, int32_t peer, uint64_t bytes) {
    if (bytes <= DDL__P2P_EAGER_BYTES && !ddl__fits_window(g, peer, bytes) && !g->context->polling) {
        ddl__poll(g->context, -1);
    }
    return ddl__fits_window(g, peer, bytes);
}

static void ddl__send_failed(ddl_request *r, ddl_status status) {
    ddl__request_fail(r, status == DDL_ERR_PEER ? DDL_ERR_PEER : status,
                      "send of %llu bytes to rank %d of group \"%s\" (tag %d): %s", (unsigned long long)r->bytes,
                      r->peer, r->group->name, r->tag,
                      r->group->cause[0] != 0 && r->context->links[ddl__world_rank(r)].life == DDL__DEAD
                          ? r->group->cause
                      : status == DDL_ERR_NOMEM ? "no memory to send it"
                                                : "its link is gone or it has left the job");
}

/* An eager message that the transport did not take: nothing of the receiver's window is used, and the credit that was
 * to ride along is still owed. */
static void ddl__send_refused(ddl_request *r, const ddl__frame *f, ddl_status status) {
    ddl__toward *flow = &r->group->flows[r->peer];
    ddl__flow_came(flow, (uint32_t)r->bytes + DDL__FRAME_BYTES);
    flow->p2p_in += (uint32_t)(f->sequence >> 32);
    ddl__send_failed(r, status);
}

static void ddl__send_done(ddl_context *c, ddl__outgoing *out, ddl_status status) {
    (void)c;
    ddl_request *r = out->owner;
    if (r->state != DDL__REQUEST_ACTIVE) {
        return;
    }
    if (status < 0) {
        ddl__send_failed(r, status);
    } else {
        ddl__request_done(r, DDL_OK);
    }
}

static void ddl__send_data_done(ddl_context *c, ddl__outgoing *out, ddl_status status);

/* The request ends when the transport has given everything back. */
static void ddl__send_broke(ddl_request *r, ddl_status status) {
    r->unsent = r->unsent < 0 ? r->unsent : status;
    if (r->lent == 0) {
        ddl__send_failed(r, r->unsent);
    }
}

/* What the next frame of a rendezvous can be sent by; NULL: one that the transport has is waited for. Where receivers
 * read, the next one waits there while one is read; else it would only stand in the way of other messages. */
static ddl__outgoing *ddl__send_by(ddl_context *c, ddl_request *r) {
    const ddl__endpoint *e = c->links[ddl__world_rank(r)].endpoint;
    bool ahead = r->pipe == NULL && e != NULL && (e->table->flags & DDL_TRANSPORT_PULLS) != 0;
    if ((r->lent & 1) == 0) {
        return r->lent == 0 || ahead ? &r->out : NULL;
    }
    if ((r->lent & 2) != 0 || !ahead) {
        return NULL;
    }
    r->out_next.owner = r;
    r->out_next.done = ddl__send_data_done;
    return &r->out_next;
}

/* Sends frame after frame of a rendezvous until the transport borrows them, or what follows has to be waited for. */
static void ddl__send_data(ddl_context *c, ddl_request *r) {
    ddl__outgoing *out;
    while ((out = ddl__send_by(c, r)) != NULL && (r->pipe == NULL || ddl__pipe_advance(c, r))) {
        ddl__frame f = {
            .type = DDL__FRAME_DATA, .group = r->group->id, .epoch = r->group->epoch, .sequence = r->remote};
        if (r->moved == r->bytes) {
            if (r->lent == 0) {
                ddl__request_done(r, DDL_OK);
            }
            return;
        }
        uint64_t bytes;
        const char *at = ddl__send_at(r, &bytes);
        if (bytes == 0) {
            return;
        }
        f.bytes = (uint32_t)bytes;
        r->moved += bytes;
        ddl_status status = ddl__post(c, ddl__world_rank(r), out, &f, at);
        if (status == DDL_IN_PROGRESS) {
            r->lent_ns[out != &r->out] = ddl__now_ns();
            r->lent |= out == &r->out ? 1 : 2;
        }
        if (status < 0) {
            ddl__send_broke(r, status);
            return;
        }
    }
}

/* A frame has gone: the next may be longer, or is to be shorter. It took the time since the one before it had gone, of
 * whatever message. Of several that a rank finds gone when it looks, those behind the first seem to have taken none:
 * nothing is learned of them. */
static void ddl__data_went(ddl_context *c, const ddl_request *r, const ddl__outgoing *out) {
    ddl__link *l = &c->links[ddl__world_rank(r)];
    uint64_t bytes = out->message.payload_bytes, least = DDL__FRAME_MAX_PAYLOAD, now = ddl__now_ns();
    uint64_t took = now - DDL__MAX(r->lent_ns[out != &r->out], l->data_ns);
    l->data_ns = now;
    if (took > 4 * DDL__DATA_NS && bytes > least) {
        l->data_bytes = DDL__MIN(l->data_bytes, DDL__MAX(bytes / 2, least));
    } else if (took < DDL__DATA_NS && took > bytes / DDL__DATA_BYTES_PER_NS && bytes == ddl__data_bytes(r)) {
        l->data_bytes = DDL__MAX(l->data_bytes, DDL__MIN(2 * bytes, (uint64_t)DDL__FRAME_MAX_DATA));
    }
}

static void ddl__send_data_done(ddl_context *c, ddl__outgoing *out, ddl_status status) {
    ddl_request *r = out->owner;
    if (r->state != DDL__REQUEST_ACTIVE) {
        return;
    }
    r->lent &= out == &r->out ? 2 : 1;
    if (status < 0 || r->unsent < 0) {
        ddl__send_broke(r, status);
    } else {
        ddl__data_went(c, r, out);
        ddl__send_data(c, r);
    }
}

static void ddl__send_no_pinned(ddl_request *r) {
    ddl__request_fail(r, DDL_ERR_NOMEM, "send of %llu bytes to rank %d of group \"%s\": no pinned memory to bring them "
                      "from device %d", (unsigned long long)r->bytes, r->peer, r->group->name, r->tensor.device);
}

/* The memory of a tensor that the receiver may be able to fetch is offered with its key; of one that it cannot fetch
 * the first chunks are on their way when it asks. */
static void ddl__offer_send(ddl_context *c, ddl_request *r) {
    uint8_t payload[16 + sizeof(ddl_memory_key)];
    ddl__writer w = ddl__writer_of(payload, sizeof payload);
    ddl_memory_key key;
    bool keyed = ddl__fetch_register(c, r, r->bytes, &key);
    bool piped = !keyed && ddl__is_on_device(r) && r->stage->count == 0;
    if (piped && ddl__pipe_make(c, &r->tensor, r->bytes, true, r, &r->pipe) < 0) {
        ddl__send_no_pinned(r);
        return;
    }
    ddl__put_u64(&w, ddl__request_cookie(r));
    if (keyed) {
        ddl__put_u64(&w, !r->filling);
        memcpy(payload + 16, &key, sizeof key);
    }
    ddl__toward *flow = &r->group->flows[r->peer];
    uint32_t credit = flow->p2p_in;
    if (ddl__tell(c, ddl__world_rank(r), ddl__p2p_frame(r, DDL__FRAME_RTS), payload, keyed ? sizeof payload : 8) < 0) {
        flow->p2p_in = credit; /* it did not ride along */
        ddl__fetch_release(r);
        ddl__request_fail(r, DDL_ERR_NOMEM,
                          "send of %llu bytes to rank %d of group \"%s\" (tag %d): no memory to offer them",
                          (unsigned long long)r->bytes, r->peer, r->group->name, r->tag);
    } else if (piped && !r->filling) {
        ddl__send_data(c, r);
    }
}

static void ddl__send_start(ddl_context *c, ddl_request *r) {
    r->out.owner = r;
    if (c->links[ddl__world_rank(r)].life == DDL__DEAD) {
        ddl__send_failed(r, DDL_ERR_PEER);
        return;
    }
    if (r->open) {
        r->out.done = ddl__send_data_done;
        r->matched = true;
        r->window = UINT64_MAX;
        ddl__send_data(c, r);
        return;
    }
    bool eager = !ddl__is_on_device(r) && ddl__goes_eagerly(r->group, r->peer, r->bytes);
    if (r->state != DDL__REQUEST_ACTIVE) {
        return; /* a death that came meanwhile has ended it */
    }
    if (!eager) {
        r->out.done = ddl__send_data_done;
        ddl__offer_send(c, r);
        return;
    }
    ddl__flow_goes(&r->group->flows[r->peer], r->bytes);
    r->out.done = ddl__send_done;
    r->matched = true; /* nothing more is asked of the receiver */
    ddl__frame f = ddl__p2p_frame(r, DDL__FRAME_P2P);
    f.bytes = (uint32_t)r->bytes;
    ddl_status status = ddl__post(c, ddl__world_rank(r), &r->out, &f, r->data);
    if (status == DDL_OK) {
        ddl__request_done(r, DDL_OK);
    } else if (status < 0) {
        ddl__send_refused(r, &f, status);
    }
}

/* >>receiving */

static bool ddl__accepts(const ddl_request *r, int32_t source, int32_t tag) {
    return (r->peer == DDL_ANY_SOURCE || r->peer == source) && (r->tag == tag || (r->tag == DDL_ANY_TAG && tag >= 0));
}

static void ddl__posted_unlink(ddl_group *g, ddl_request *r) {
    ddl_request *last = NULL;
    for (ddl_request **at = &g->posted_first; *at != NULL; last = *at, at = &(*at)->next) {
        if (*at == r) {
            *at = r->next;
            g->posted_last = g->posted_last == r ? last : g->posted_last;
            r->next = NULL;
            return;
        }
    }
}

static void ddl__posted_append(ddl_group *g, ddl_request *r) {
    r->next = NULL;
    if (g->posted_last != NULL) {
        g->posted_last->next = r;
    } else {
        g->posted_first = r;
    }
    g->posted_last = r;
}

/* All sizes are powers of two, and a division takes as long as the rest. */
static uint64_t ddl__elements(uint64_t bytes, ddl_dtype dtype) {
    return bytes >> __builtin_ctzll(ddl__dtype_bytes(dtype));
}

static void ddl__recv_drained(ddl_context *c, ddl__stage *s, ddl_status status) {
    (void)c;
    ddl_request *r = s->owner;
    r->draining = false;
    if (status < 0) {
        ddl__request_fail(r, status, "receive from rank %d of group \"%s\": the message came, but device %d did not "
                          "take it: %s", r->peer, r->group->name, r->tensor.device, ddl_status_text(status));
    } else {
        ddl__request_done(r, DDL_OK);
    }
}

static void ddl__recv_done(ddl_request *r) {
    bool copied = r->pipe != NULL || r->fetching; /* it is on its device */
    if (r->stage != NULL && !copied) {
        r->info.count = (int64_t)ddl__elements(r->total, r->tensor.dtype);
        r->draining = true;
        if (r->filling) {
            return; /* the stream has not come here yet: see ddl__send_filled */
        }
        r->stage->done = ddl__recv_drained;
        ddl_status status = ddl__stage_drain(r->context, r->stage, r->total);
        if (status != DDL_IN_PROGRESS) {
            ddl__recv_drained(r->context, r->stage, status);
        }
        return;
    }
    if (r->packed != NULL) {
        ddl__pack_bytes(&r->tensor, r->packed, r->total, true);
    }
    r->info.count = (int64_t)ddl__elements(r->total, r->tensor.dtype);
    ddl__request_done(r, DDL_OK);
}

/* Takes eager bytes off the sender's window, and says so when half of it is used. */
static void ddl__p2p_took(ddl_context *c, ddl_group *g, int32_t source, uint64_t bytes) {
    ddl__toward *flow = &g->flows[source];
    flow->p2p_in += (uint32_t)bytes + DDL__FRAME_BYTES;
    if (flow->p2p_in >= DDL__WINDOW_BYTES / 2) {
        uint8_t payload[4];
        ddl__writer w = ddl__writer_of(payload, sizeof payload);
        ddl__put_u32(&w, flow->p2p_in);
        ddl__frame f = {.type = DDL__FRAME_CREDIT, .group = g->id, .epoch = g->epoch};
        if (ddl__tell(c, g->ranks[source], f, payload, sizeof payload) == DDL_OK) {
            flow->p2p_in = 0; /* else it goes with the next message */
        }
    }
}

static void ddl__recv_too_small(ddl_request *r, int32_t source, int32_t tag, uint64_t bytes) {
    ddl__request_fail(
        r, DDL_ERR_TRUNCATED,
        "receive from rank %d of group \"%s\" (tag %d): the message has %llu bytes, the buffer %llu; it stays "
        "to be received with a larger one",
        source, r->group->name, tag, (unsigned long long)bytes, (unsigned long long)r->bytes);
}

static void ddl__recv_other_type(ddl_request *r, int32_t source, int32_t tag, ddl_dtype theirs) {
    ddl__request_fail(
        r, DDL_ERR_MISMATCH,
        "receive from rank %d of group \"%s\" (tag %d): the message is of type %s, the buffer of type %s; it "
        "stays to be received with the right type, or as u8",
        source, r->group->name, tag, ddl_dtype_name(theirs), ddl_dtype_name(r->tensor.dtype));
}

static void ddl__recv_in_pieces(ddl_request *r, int32_t source, int32_t tag, uint64_t bytes) {
    ddl__request_fail(
        r, DDL_ERR_MISMATCH,
        "receive from rank %d of group \"%s\" (tag %d): the message has %llu bytes, which is no whole number of %s; it "
        "stays to be received as u8",
        source, r->group->name, tag, (unsigned long long)bytes, ddl_dtype_name(r->tensor.dtype));
}

/* Checks a message against the receive that it meets. False: the receive has ended with an error, the message stays.
 * whole: all of it comes at once. */
static bool ddl__recv_fits(ddl_request *r, int32_t source, int32_t tag, ddl_dtype dtype, uint64_t bytes, bool whole) {
    r->info.source = source;
    r->info.tag = tag;
    if (bytes > r->bytes) {
        ddl__recv_too_small(r, source, tag, bytes);
        return false;
    }
    if (dtype != r->tensor.dtype && dtype != DDL_U8 && r->tensor.dtype != DDL_U8) {
        ddl__recv_other_type(r, source, tag, dtype);
        return false;
    }
    if (bytes % ddl__dtype_bytes(r->tensor.dtype) != 0) {
        ddl__recv_in_pieces(r, source, tag, bytes);
        return false;
    }
    if (whole && bytes > 0 && ddl__is_on_device(r) && ddl__p2p_whole(r, bytes) < 0) {
        ddl__request_fail(r, DDL_ERR_NOMEM, "receive from rank %d of group \"%s\" (tag %d): no pinned memory for %llu "
                          "bytes to device %d; the message stays to be received", source, r->group->name, tag,
                          (unsigned long long)r->bytes, r->tensor.device);
        return false;
    }
    r->matched = true;
    r->total = bytes;
    return true;
}

/* A message to this rank itself, which has come from its device: it goes to its receive, if that still waits. */
static void ddl__self_move(ddl_context *c, ddl_request *send) {
    ddl_request *to = ddl__request_of(c, send->remote);
    if (to != NULL && to->is_recv && !to->draining) {
        memcpy(to->data, send->data, send->bytes);
        ddl__recv_done(to);
    }
    ddl__request_done(send, DDL_OK);
}

/* Offer and receive of this rank meet. */
static bool ddl__self_accept(ddl_context *c, ddl_request *r, uint64_t cookie) {
    ddl_request *send = ddl__request_of(c, cookie);
    r->remote = cookie;
    r->peer = r->group->rank;
    if (send == NULL) {
        ddl__request_fail(r, DDL_ERR_CANCELLED, "receive from this rank itself, in group \"%s\": the sender gave up "
                          "before it had the data", r->group->name);
        return true;
    }
    send->matched = true;
    send->remote = ddl__request_cookie(r);
    if (!send->filling) {
        ddl__self_move(c, send);
    }
    return true;
}

/* Asks for the data of an offer. False: no memory for that; the receive has ended. */
static bool ddl__accept_data(ddl_context *c, ddl_request *r, int32_t source, uint64_t cookie) {
    bool whole = ddl__is_on_device(r) && !ddl__is_contiguous(&r->tensor);
    ddl_status status = whole ? ddl__p2p_whole(r, r->total) : DDL_OK;
    r->remote = cookie;
    r->peer = source;
    if (ddl__is_on_device(r) && !whole && r->total > 0) {
        status = ddl__pipe_make(c, &r->tensor, r->total, false, r, &r->pipe);
    }
    if (status < 0 || ddl__ask_data(c, r, 0) < 0) {
        ddl__request_fail(r, DDL_ERR_NOMEM, "receive from rank %d of group \"%s\" (tag %d): no memory to ask for the "
                          "data; the message stays to be received", source, r->group->name, r->info.tag);
        return false;
    }
    if (r->total == 0) {
        ddl__recv_done(r); /* no data follows */
    }
    return true;
}

/* Accepts an offer: the data may come. False: no memory to say so; the receive has ended, the offer stays. */
static bool ddl__accept(ddl_context *c, ddl_request *r, int32_t source, const ddl__offer *offer) {
    if (source == r->group->rank) {
        return ddl__self_accept(c, r, offer->cookie);
    }
    r->remote = offer->cookie;
    r->peer = source;
    return ddl__fetch_accept(c, r, offer) || ddl__accept_data(c, r, source, offer->cookie);
}

/* The first receive that was posted for such a message, taken off the list if it fits; NULL: there is none (a receive
 * that does not fit has ended, and the next one is asked). */
static ddl_request *ddl__posted_take(ddl_group *g, int32_t source, int32_t tag, ddl_dtype dtype, uint64_t bytes,
                                     bool whole) {
    ddl_request *next;
    for (ddl_request *r = g->posted_first; r != NULL; r = next) {
        next = r->next;
        if (ddl__accepts(r, source, tag)) {
            ddl__posted_unlink(g, r);
            if (ddl__recv_fits(r, source, tag, dtype, bytes, whole)) {
                return r;
            }
        }
    }
    return NULL;
}

/* offer NULL: data is the message. */
static ddl_status ddl__keep_unexpected(ddl_context *c, ddl_group *g, int32_t source, const ddl__frame *f,
                                       const ddl__offer *offer, const void *data) {
    size_t stored = offer != NULL ? sizeof *offer : (size_t)f->signature; /* to oneself more than a frame's */
    ddl__unexpected *u = ddl__scratch_get(c, sizeof *u + stored);
    if (u == NULL) {
        ddl__log(&c->base, DDL_LOG_WARN, "no memory to keep a message of %zu bytes from rank %d", stored, source);
        return DDL_ERR_NOMEM;
    }
    *u = (ddl__unexpected){.source = source,
                           .tag = (int32_t)f->sequence,
                           .dtype = (ddl_dtype)(f->flags & 0xff),
                           .is_offer = offer != NULL,
                           .bytes = f->signature};
    u->arrived_ns = u->tag < 0 ? ddl__now_ns() : 0;
    if (stored > 0) {
        ddl__copy_fresh(u->data, offer != NULL ? (const void *)offer : data, stored);
    }
    if (g->unexpected_last != NULL) {
        g->unexpected_last->next = u;
    } else {
        g->unexpected_first = u;
    }
    g->unexpected_last = u;
    stored = offer != NULL ? 0 : stored; /* an offer counts for nothing */
    g->unexpected_bytes += stored;
    c->stats.unexpected_bytes += stored;
    return DDL_OK;
}

static void ddl__unexpected_remove(ddl_group *g, ddl__unexpected *u) {
    ddl__unexpected *last = NULL;
    for (ddl__unexpected **at = &g->unexpected_first; *at != NULL; last = *at, at = &(*at)->next) {
        if (*at == u) {
            *at = u->next;
            g->unexpected_last = g->unexpected_last == u ? last : g->unexpected_last;
            break;
        }
    }
    uint64_t stored = u->is_offer ? 0 : u->bytes;
    g->unexpected_bytes -= stored;
    g->context->stats.unexpected_bytes -= stored;
    ddl__scratch_put(g->context, u);
}

static ddl__unexpected *ddl__unexpected_find(ddl_group *g, int32_t source, int32_t tag) {
    for (ddl__unexpected *u = g->unexpected_first; u != NULL; u = u->next) {
        if ((source == DDL_ANY_SOURCE || source == u->source) &&
            (tag == u->tag || (tag == DDL_ANY_TAG && u->tag >= 0))) {
            return u;
        }
    }
    return NULL;
}

static void ddl__recv_start(ddl_context *c, ddl_request *r) {
    ddl_group *g = r->group;
    ddl__unexpected *u = ddl__unexpected_find(g, r->peer, r->tag);
    if (u == NULL) {
        if (r->peer >= 0 && c->links[g->ranks[r->peer]].life == DDL__DEAD) {
            ddl__request_fail(r, DDL_ERR_PEER, "receive from rank %d of group \"%s\" (tag %d): %s", r->peer, g->name,
                              r->tag, g->cause);
            return;
        }
        ddl__posted_append(g, r);
        return;
    }
    if (!ddl__recv_fits(r, u->source, u->tag, u->dtype, u->bytes, !u->is_offer || u->source == g->rank)) {
        return;
    }
    if (u->is_offer) {
        ddl__offer offer;
        memcpy(&offer, u->data, sizeof offer);
        if (!ddl__accept(c, r, u->source, &offer)) {
            return;
        }
    } else {
        if (u->bytes > 0) {
            memcpy(r->data, u->data, u->bytes);
        }
        if (u->source != g->rank) {
            ddl__p2p_took(c, g, u->source, u->bytes);
        }
        ddl__recv_done(r);
    }
    ddl__unexpected_remove(g, u);
}

/* >>frames */

/* The peer took that many eager bytes of ours. False: more than we ever sent. */
static bool ddl__credit(ddl_group *g, int32_t peer, uint32_t taken) {
    ddl__toward *flow = &g->flows[peer];
    if (taken > flow->p2p_out) {
        return false;
    }
    ddl__flow_came(flow, taken);
    return true;
}

static ddl_status ddl__on_p2p(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl_group *g = ddl__frame_group(c, peer, f);
    if (f->signature != f->bytes || f->bytes > DDL__P2P_PULLED_BYTES) {
        return DDL_ERR_CORRUPT;
    }
    if (g == NULL) {
        return DDL_OK;
    }
    int32_t source = g->rank_of[peer];
    if (!ddl__credit(g, source, (uint32_t)(f->sequence >> 32))) {
        return DDL_ERR_CORRUPT;
    }
    ddl_request *r = ddl__posted_take(g, source, (int32_t)f->sequence, (ddl_dtype)(f->flags & 0xff), f->bytes, true);
    if (r == NULL) {
        return ddl__keep_unexpected(c, g, source, f, NULL, payload);
    }
    if (f->bytes > 0) {
        ddl__copy_fresh(r->data, payload, f->bytes);
    }
    ddl__p2p_took(c, g, source, f->bytes);
    ddl__recv_done(r);
    return DDL_OK;
}

/* An offer that could not be fetched after all. Without memory to ask for its data it stays to be received. */
static void ddl__accept_again(ddl_context *c, ddl_request *r) {
    ddl__offer offer = {.cookie = r->remote};
    ddl__frame f = {.flags = (uint16_t)r->tensor.dtype, .sequence = (uint32_t)r->info.tag, .signature = r->total};
    ddl_group *g = r->group;
    int32_t source = r->peer;
    if (!ddl__accept_data(c, r, source, offer.cookie)) {
        ddl__keep_unexpected(c, g, source, &f, &offer, NULL);
    }
}

/* A message that somebody has asked for, and that does not come whole, goes straight to its place. What is wrong with
 * one is said when it is whole. */
static void *ddl__place_p2p(ddl_context *c, int32_t peer, const ddl__frame *f, ddl__landing *landing) {
    ddl_group *g = ddl__frame_group(c, peer, f);
    uint32_t credit = (uint32_t)(f->sequence >> 32);
    if (g == NULL || f->signature != f->bytes || f->bytes > DDL__P2P_PULLED_BYTES || f->bytes == 0 ||
        credit > g->flows[g->rank_of[peer]].p2p_out) {
        return NULL;
    }
    int32_t source = g->rank_of[peer];
    ddl_request *r = ddl__posted_take(g, source, (int32_t)f->sequence, (ddl_dtype)(f->flags & 0xff), f->bytes, true);
    if (r == NULL) {
        return NULL;
    }
    ddl__credit(g, source, credit);
    r->peer = source;
    r->landing = landing;
    landing->owner = r;
    return r->data;
}

static void ddl__placed_p2p(ddl_context *c, int32_t peer, ddl__landing *landing, ddl_status status) {
    ddl_request *r = landing->owner; /* NULL: abandoned meanwhile */
    ddl_group *g = ddl__frame_group(c, peer, &landing->frame);
    if (g != NULL && status == DDL_OK) {
        ddl__p2p_took(c, g, g->rank_of[peer], landing->frame.bytes);
    }
    if (r != NULL) {
        r->landing = NULL;
        if (status == DDL_OK) {
            ddl__recv_done(r);
        }
    }
}

static ddl_status ddl__on_rts(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl_group *g = ddl__frame_group(c, peer, f);
    ddl__reader in = ddl__reader_of(payload, f->bytes);
    ddl__offer offer = {.cookie = ddl__get_u64(&in), .keyed = f->bytes == 16 + sizeof offer.key};
    if (offer.keyed) {
        offer.ready = ddl__get_u64(&in) != 0;
        memcpy(&offer.key, (const char *)payload + 16, sizeof offer.key);
    }
    if (in.bad) {
        return DDL_ERR_CORRUPT;
    }
    if (g == NULL) {
        return DDL_OK;
    }
    int32_t source = g->rank_of[peer];
    if (!ddl__credit(g, source, (uint32_t)(f->sequence >> 32))) {
        return DDL_ERR_CORRUPT;
    }
    ddl_dtype dtype = (ddl_dtype)(f->flags & 0xff);
    ddl_request *r = ddl__posted_take(g, source, (int32_t)f->sequence, dtype, f->signature, false);
    if (r == NULL || !ddl__accept(c, r, source, &offer)) {
        return ddl__keep_unexpected(c, g, source, f, &offer, NULL);
    }
    return DDL_OK;
}

/* Tells a receiver that no (more) data comes for the offer it accepted. */
static void ddl__give_up(ddl_context *c, int32_t peer, uint32_t group, uint32_t epoch, uint64_t theirs) {
    ddl__frame gone = {.type = DDL__FRAME_DATA, .flags = DDL__DATA_GIVEN_UP, .group = group, .epoch = epoch,
                       .sequence = theirs};
    ddl__tell(c, peer, gone, NULL, 0);
}

/* The receiver has asked for the data of a tensor on a device, which is not fetched (any more). */
static void ddl__send_by_host(ddl_context *c, ddl_request *r) {
    ddl__fetch_release(r);
    r->fetching = false;
    if (ddl__is_on_device(r) && r->stage->count == 0 && r->pipe == NULL &&
        ddl__pipe_make(c, &r->tensor, r->bytes, true, r, &r->pipe) < 0) {
        ddl__p2p_abandon(c, r);
        ddl__send_no_pinned(r);
    } else if (!r->filling) {
        ddl__send_data(c, r);
    }
}

/* Tells a receiver that what it wants to fetch is there. */
static void ddl__send_ready(ddl_context *c, const ddl_request *r) {
    ddl__frame f = {.type = DDL__FRAME_DATA, .flags = DDL__DATA_READY, .group = r->group->id,
                    .epoch = r->group->epoch, .sequence = r->remote};
    ddl__tell(c, ddl__world_rank(r), f, NULL, 0); /* no memory: it waits for its deadline */
}

static ddl_status ddl__on_cts(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl__reader in = ddl__reader_of(payload, f->bytes);
    uint64_t mine = ddl__get_u64(&in), theirs = ddl__get_u64(&in), window = ddl__get_u64(&in);
    uint64_t longest = f->bytes > 24 ? ddl__get_u64(&in) : 0; /* an older ddl.h does not say it */
    uint16_t kind = f->flags & (uint16_t)~DDL__FRAME_FLAG_CRC;
    ddl_request *r = ddl__request_of(c, mine);
    if (in.bad) {
        return DDL_ERR_CORRUPT;
    }
    if (r == NULL) {
        if (kind == 0 || kind == DDL__CTS_FETCH) {
            ddl__give_up(c, peer, f->group, f->epoch, theirs);
        }
        return DDL_OK;
    }
    bool sends = !r->is_recv && r->out.owner == r && r->out.done == ddl__send_data_done && ddl__world_rank(r) == peer;
    bool asked = r->window > 0, more = kind == DDL__CTS_MORE;
    bool fetch = kind == DDL__CTS_FETCH || kind == DDL__CTS_FETCHED;
    if (!sends || kind > DDL__CTS_MORE || asked != more || (fetch && r->memory == NULL)) {
        return DDL_ERR_CORRUPT;
    }
    r->matched = true;
    r->remote = theirs;
    if (kind == DDL__CTS_FETCHED) {
        r->moved = r->bytes;
        ddl__fetch_release(r);
        ddl__request_done(r, DDL_OK);
    } else if (kind == DDL__CTS_FETCH) {
        r->fetching = true;
        if (!r->filling) {
            ddl__send_ready(c, r);
        }
    } else {
        r->window = DDL__MAX(r->window, DDL__MAX(window, 1));
        r->longest = longest;
        if (more) {
            ddl__send_data(c, r);
        } else {
            ddl__send_by_host(c, r);
        }
    }
    return DDL_OK;
}

/* The receive that a DATA frame belongs to; NULL: it has ended and the data is dropped. */
static ddl_request *ddl__data_request(ddl_context *c, int32_t peer, const ddl__frame *f) {
    ddl_request *r = ddl__request_of(c, f->sequence);
    bool mine = r != NULL && r->is_recv && !r->draining && r->peer >= 0 && ddl__world_rank(r) == peer;
    if (mine && r->open && !r->matched) { /* all of it comes this way */
        ddl__posted_unlink(r->group, r);
        ddl__recv_fits(r, r->peer, r->tag, r->tensor.dtype, r->bytes, false);
    }
    return mine && r->matched && f->bytes <= r->total - r->moved ? r : NULL;
}

static void ddl__data_moved(ddl_context *c, ddl_request *r, uint64_t bytes) {
    r->moved += bytes;
    if (r->pipe != NULL) {
        ddl__pipe_landed(c, r);
    } else if (r->moved == r->total) {
        ddl__recv_done(r);
    }
}

/* Its own call ended with an error: after a death, because this rank has gone on, of which the sender has heard. */
static void ddl__fail_given_up(ddl_request *r) {
    const ddl_group *g = r->group;
    bool went_on = ddl__goes_on_after(g, g->rank, r->agreed);
    ddl__request_fail(r, went_on ? DDL_ERR_PEER : DDL_ERR_CANCELLED,
                      "receive from rank %d of group \"%s\": the sender gave up before all data was sent (%s)", r->peer,
                      g->name, went_on ? g->cause : "its own call ended with an error");
}

static ddl_status ddl__on_data(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl_request *r = ddl__data_request(c, peer, f);
    if (r == NULL) {
        return DDL_OK;
    }
    if ((f->flags & DDL__DATA_GIVEN_UP) != 0) {
        ddl__fetch_leave(r);
        ddl__fail_given_up(r);
        return DDL_OK;
    }
    if ((f->flags & DDL__DATA_READY) != 0) {
        r->told = r->fetching;
        if (r->told) {
            ddl__fetch_get(c, r);
        }
        return DDL_OK;
    }
    char *at = f->bytes > 0 ? ddl__recv_at(r, f->bytes) : NULL;
    if (at == NULL) {
        return f->bytes > 0 ? DDL_ERR_CORRUPT : DDL_OK;
    }
    memcpy(at, payload, f->bytes);
    ddl__data_moved(c, r, f->bytes);
    return DDL_OK;
}

static void *ddl__place_data(ddl_context *c, int32_t peer, const ddl__frame *f, ddl__landing *landing) {
    ddl_request *r = ddl__data_request(c, peer, f);
    char *at = r != NULL && f->bytes > 0 ? ddl__recv_at(r, f->bytes) : NULL;
    if (at != NULL) {
        landing->owner = r;
        r->landing = landing;
    }
    return at;
}

static void ddl__placed_data(ddl_context *c, int32_t peer, ddl__landing *landing, ddl_status status) {
    (void)peer;
    ddl_request *r = landing->owner;
    if (r == NULL) {
        return; /* abandoned meanwhile */
    }
    r->landing = NULL;
    if (status == DDL_OK) {
        ddl__data_moved(c, r, landing->frame.bytes);
    }
}

/* >>ending early */

/* The rest of what lands in a receive's buffer goes elsewhere. A message that its sender thinks sent is kept: what has
 * come of it is copied, and when it is whole it waits for another receive. */
static void ddl__landing_leave(ddl_context *c, ddl_request *r, ddl__landing *l) {
    r->landing = NULL;
    l->owner = NULL;
    ddl__landing_abandon(c, ddl__world_rank(r), l);
    if (l->frame.type == DDL__FRAME_P2P && l->scratch != NULL) {
        memcpy(l->scratch, r->data, l->frame.bytes);
        l->target = NULL;
        l->frame.sequence = (uint32_t)l->frame.sequence; /* the credit that came with it was taken */
    }
}

static void ddl__p2p_abandon(ddl_context *c, ddl_request *r) {
    if (r->is_recv) {
        ddl__posted_unlink(r->group, r);
        if (r->landing != NULL) {
            ddl__landing_leave(c, r, r->landing);
        }
    } else if (r->peer != r->group->rank) {
        ddl__recall(c, ddl__world_rank(r), &r->out);
        if ((r->lent & 2) != 0) {
            ddl__recall(c, ddl__world_rank(r), &r->out_next);
        }
        if (r->matched && r->out.done == ddl__send_data_done) {
            ddl__give_up(c, ddl__world_rank(r), r->group->id, r->group->epoch, r->remote);
        }
    }
    ddl__fetch_leave(r);
    ddl__stage_leave(c, &r->stage); /* these last: a transport may have copied from them just now */
    ddl__pipe_leave(c, &r->pipe);
}

static void ddl__p2p_explain(ddl_context *c, ddl_request *r, ddl__text *text) {
    (void)c;
    const char *state = r->draining || r->getting || (r->filling && r->matched) ? "its device copies the data"
                        : r->is_recv ? (r->matched ? "the data is on its way" : "no such message has come")
                                   : (r->matched ? "the data is on its way" : "the receiver has not asked for it");
    if (r->peer == DDL_ANY_SOURCE) {
        ddl__text_add(text, "receive from any rank of group \"%s\" (tag %d): %s", r->group->name, r->tag, state);
    } else {
        ddl__text_add(text, "%s rank %d of group \"%s\" (tag %d, %llu bytes): %s",
                      r->is_recv ? "receive from" : "send to", r->peer, r->group->name, r->tag,
                      (unsigned long long)r->bytes, state);
    }
}

/* While a member waits for the leader's number: the leader's offer of a group of the same name and other ranks. See
 * coll/groups.h for the tags. */
static ddl__unexpected *ddl__rival_offer(const ddl_group *g, int32_t leader, int32_t tag) {
    for (ddl__unexpected *u = g->unexpected_first; u != NULL; u = u->next) {
        if (u->source == leader && u->tag < 0 && u->tag != tag && ((u->tag ^ tag) >> DDL__TAG_LIST_BITS) == 0) {
            return u;
        }
    }
    return NULL;
}

/* The peer left the group's operations after a death, since this message began, and will not do its part of it. */
static bool ddl__is_left_behind(const ddl_request *r) {
    return r->peer >= 0 && r->peer != r->group->rank && !r->matched && !r->draining &&
           ddl__goes_on_after(r->group, r->peer, r->agreed);
}

static void ddl__fail_left_behind(ddl_context *c, ddl_request *r) {
    ddl__p2p_abandon(c, r);
    ddl__request_fail(r, DDL_ERR_PEER,
                      "%s rank %d of group \"%s\" (tag %d): that rank has gone on to shrink or grow the group: %s",
                      r->is_recv ? "receive from" : "send to", r->peer, r->group->name, r->tag, r->group->cause);
}

static void ddl__p2p_tick(ddl_context *c, ddl_request *r, uint64_t waited) {
    if (r->is_recv && r->tag < DDL_ANY_TAG && !r->matched && waited > DDL__RIVAL_NS) {
        const ddl__unexpected *u = ddl__rival_offer(r->group, r->peer, r->tag);
        if (u != NULL && ddl__now_ns() - u->arrived_ns > DDL__RIVAL_NS) { /* no other thread of ours takes it */
            ddl__p2p_abandon(c, r);
            ddl__request_fail(r, DDL_ERR_MISMATCH, "rank %d gave another list of members", r->peer);
            return;
        }
    }
    if (r->draining) {
        return; /* nobody else is needed */
    }
    if (r->peer >= 0 && ddl__is_drained(r->group, r->peer)) {
        ddl__p2p_abandon(c, r);
        ddl__request_fail(r, DDL_ERR_PEER, "%s rank %d of group \"%s\": it has left the job (ddl_finalize)",
                          r->is_recv ? "receive from" : "send to", r->peer, r->group->name);
    } else if (ddl__is_left_behind(r)) {
        ddl__fail_left_behind(c, r);
    } else if (r->peer == DDL_ANY_SOURCE && ddl__is_alone(r->group)) {
        ddl__p2p_abandon(c, r);
        ddl__request_fail(r, DDL_ERR_PEER, "receive from any rank of group \"%s\" (tag %d): %s", r->group->name, r->tag,
                          ddl__why_alone);
    }
}

static int32_t ddl__p2p_expect(ddl_context *c, ddl_request *r) {
    (void)c;
    return r->peer >= 0 && !r->getting ? ddl__world_rank(r) : -1; /* then the device's transport is looked at */
}

static const ddl__request_ops ddl__p2p_ops = {ddl__p2p_abandon, ddl__p2p_explain, ddl__p2p_tick, ddl__p2p_expect, NULL};

/* Offers whose data will not come; messages that are whole can still be received. */
static void ddl__p2p_drop_offers(ddl_group *g, int32_t rank) {
    ddl__unexpected *next;
    for (ddl__unexpected *u = g->unexpected_first; u != NULL; u = next) {
        next = u->next;
        if (u->is_offer && u->source == rank) {
            ddl__unexpected_remove(g, u);
        }
    }
}

/* Fails what needs the dead rank. A receive from any rank is told too: the message it waits for may have been that
 * one's; it may be started again. */
static void ddl__p2p_rank_dead(ddl_group *g, int32_t rank) {
    ddl_context *c = g->context;
    ddl__p2p_drop_offers(g, rank);
    for (int32_t i = 0; i < c->requests->chunk_count * DDL__REQUESTS_CHUNK; i++) {
        ddl_request *r = &c->requests->chunks[i / DDL__REQUESTS_CHUNK][i % DDL__REQUESTS_CHUNK];
        if (r->state == DDL__REQUEST_ACTIVE && r->group == g && r->ops == &ddl__p2p_ops && !r->draining &&
            (r->peer == rank || (r->peer == DDL_ANY_SOURCE && r->is_recv))) {
            ddl__p2p_abandon(c, r);
            ddl__request_fail(r, DDL_ERR_PEER, "%s rank %d of group \"%s\" (tag %d): %s",
                              r->is_recv ? "receive from" : "send to", rank, g->name, r->tag, g->cause);
        }
    }
}

static void ddl__p2p_group_free(ddl_group *g) {
    while (g->unexpected_first != NULL) {
        ddl__unexpected_remove(g, g->unexpected_first);
    }
}

#endif /* DDL_P2P_MATCH_H */

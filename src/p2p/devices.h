/* p2p, third part: messages of tensors on devices. They are always offered (RTS), so that they keep their place in the
 * order of messages, and go one of three ways:
 *
 *   fetched   between devices whose memory a transport shares (DDL_TRANSPORT_DEVICE) or reads by itself, as an adapter
 *             does (memory_register_on): the offer holds the key of the
 *             sender's memory, the receiver copies from there and says so. Nothing goes through the host.
 *                 RTS(cookie, key) -> [CTS(fetch) -> DATA(ready)] -> get -> CTS(fetched)
 *             the middle two only where the sender's stream has not come to the message yet.
 *   chunked   all others, contiguous: pipe.h on the side whose tensor is on a device. A receiver's window is its slots.
 *                 RTS(cookie) -> CTS(window) -> DATA, DATA ... -> CTS(more window) -> DATA ...
 *   whole     what is strided, sent to this rank itself, or came before it was asked for: in pinned memory of its size.
 *
 * A fetch that fails goes the second way, as if the offer had had no key. */
#ifndef DDL_P2P_DEVICES_H
#define DDL_P2P_DEVICES_H

#include "request.h"

enum { /* flags of CTS; 0: the data is asked for */
    DDL__CTS_FETCH = 1,   /* the receiver will fetch it, when it is told to */
    DDL__CTS_FETCHED = 2, /* it has */
    DDL__CTS_MORE = 3     /* its window has grown */
};
enum { /* flags of DATA */
    DDL__DATA_GIVEN_UP = 1, /* the sender's request has ended */
    DDL__DATA_READY = 2     /* it may be fetched */
};

/* What an offer says beside the envelope. */
typedef struct ddl__offer {
    uint64_t cookie;
    bool keyed, ready; /* key is there; the memory may be read at once */
    ddl_memory_key key;
} ddl__offer;

static void ddl__send_data(ddl_context *c, ddl_request *r);
static void ddl__recv_done(ddl_request *r);
static void ddl__accept_again(ddl_context *c, ddl_request *r);
static void ddl__p2p_abandon(ddl_context *c, ddl_request *r);

static int32_t ddl__world_rank(const ddl_request *r) { return r->group->ranks[r->peer]; }

/* Is its tensor on a device (and not empty)? */
static bool ddl__is_on_device(const ddl_request *r) { return r->stage != NULL; }

/* >>whole */

/* Pinned memory for a message of so many bytes: at the start of a send, or when one for a receive has come. Strided
 * tensors are unpacked whole. */
static ddl_status ddl__p2p_whole(ddl_request *r, uint64_t bytes) {
    bytes = ddl__is_contiguous(&r->tensor) ? bytes : r->bytes;
    if (r->stage->count > 0) {
        return DDL_OK;
    }
    DDL__TRY(ddl__stage_add(r->context, r->stage, &r->tensor, bytes, NULL, DDL_HOST, r->is_recv ? "receive" : "send"));
    r->stage->items[0].comes = !r->is_recv;
    r->stage->items[0].goes = r->is_recv;
    r->data = r->stage->items[0].host;
    return DDL_OK;
}

/* >>chunked */

static void ddl__pipe_failed(ddl_context *c, ddl_request *r, ddl_status status) {
    ddl__p2p_abandon(c, r);
    ddl__request_fail(r, status, "%s rank %d of group \"%s\": device %d did not %s them: %s",
                      r->is_recv ? "receive from" : "send to", r->peer, r->group->name, r->tensor.device,
                      r->is_recv ? "take" : "give", ddl_status_text(status));
}

static void ddl__pipe_filled(ddl_context *c, ddl__stage *s, ddl_status status) {
    ddl_request *r = s->owner;
    if (status < 0) {
        ddl__pipe_failed(c, r, status);
        return;
    }
    r->pipe->state[ddl__pipe_ended(r->pipe, s)] = DDL__SLOT_FULL;
    ddl__send_data(c, r);
}

/* Sending: slots whose bytes have left are free, and what follows is copied there. False: that failed, and the request
 * has ended. */
static bool ddl__pipe_advance(ddl_context *c, ddl_request *r) {
    ddl__pipe *p = r->pipe;
    while (p->first < p->total && p->first + ddl__pipe_length(p, p->first) <= r->moved) {
        p->state[ddl__pipe_slot(p, p->first)] = DDL__SLOT_EMPTY;
        p->first += ddl__pipe_length(p, p->first);
    }
    for (uint64_t at = p->first; at < ddl__pipe_end(p); at += p->chunk) {
        if (p->state[ddl__pipe_slot(p, at)] != DDL__SLOT_EMPTY) {
            continue;
        }
        ddl_status status = ddl__pipe_copy(c, p, &r->tensor, at, ddl__pipe_filled);
        if (status < 0) {
            ddl__pipe_failed(c, r, status);
            return false;
        }
        p->state[ddl__pipe_slot(p, at)] = status == DDL_OK ? DDL__SLOT_FULL : DDL__SLOT_COPIES;
    }
    return true;
}

/* The longest frame of its data that a rank takes, or can send: where receivers read, into the tensor itself. Data that
 * goes through a pipe, or that is held elsewhere until it has been checked, has no more room. */
static uint64_t ddl__data_longest(const ddl_request *r) {
    const ddl__endpoint *e = r->group->context->links[ddl__world_rank(r)].endpoint;
    const ddl__settings *s = &r->group->context->settings;
    bool in_place = r->pipe == NULL && !s->mac && !s->check_payload;
    bool longer = in_place && e != NULL && (e->table->flags & DDL_TRANSPORT_PULLS) != 0;
    return longer ? e->table->max_payload_bytes : DDL__FRAME_MAX_PAYLOAD;
}

/* How much of a message one frame may have. Each costs both sides a message, and what comes behind it waits: as much as
 * took about a millisecond the last time. */
static uint64_t ddl__data_bytes(const ddl_request *r) {
    const ddl__link *l = &r->group->context->links[ddl__world_rank(r)];
    uint64_t least = DDL__FRAME_MAX_PAYLOAD, most = DDL__MIN(r->longest, ddl__data_longest(r));
    return DDL__MAX(least, DDL__MIN(l->data_bytes, most));
}

/* What can be sent now, and how much of it. */
static const char *ddl__send_at(const ddl_request *r, uint64_t *out_bytes) {
    uint64_t open = DDL__MIN(r->bytes, r->window) - r->moved, here = open;
    const char *at = r->pipe != NULL ? ddl__pipe_at(r->pipe, r->moved, &here) : r->data + r->moved;
    bool there = r->pipe == NULL || r->pipe->state[ddl__pipe_slot(r->pipe, r->moved)] == DDL__SLOT_FULL;
    *out_bytes = there ? DDL__MIN(DDL__MIN(open, here), ddl__data_bytes(r)) : 0;
    return at;
}

/* Asks for data, or for more of it: up to which byte there is room, and in how long frames. */
static ddl_status ddl__ask_data(ddl_context *c, const ddl_request *r, uint16_t flags) {
    uint8_t payload[32];
    ddl__writer w = ddl__writer_of(payload, sizeof payload);
    ddl__put_u64(&w, r->remote);
    ddl__put_u64(&w, ddl__request_cookie(r));
    ddl__put_u64(&w, r->pipe != NULL ? ddl__pipe_end(r->pipe) : UINT64_MAX);
    ddl__put_u64(&w, ddl__data_longest(r));
    ddl__frame f = {.type = DDL__FRAME_CTS, .flags = flags, .group = r->group->id, .epoch = r->group->epoch};
    return ddl__tell(c, ddl__world_rank(r), f, payload, sizeof payload);
}

/* Where the next bytes of a message go; NULL: there is no room for them, as its sender knows. */
static char *ddl__recv_at(const ddl_request *r, uint64_t bytes) {
    if (r->pipe == NULL) {
        return r->data != NULL ? r->data + r->moved : NULL;
    }
    uint64_t here = 0;
    char *at = r->moved < ddl__pipe_end(r->pipe) ? ddl__pipe_at(r->pipe, r->moved, &here) : NULL;
    return bytes <= here ? at : NULL;
}

/* Receiving: chunks that are on the device make room for others. */
static void ddl__pipe_drained(ddl_context *c, ddl__stage *s, ddl_status status) {
    ddl_request *r = s->owner;
    ddl__pipe *p = r->pipe;
    uint64_t before = ddl__pipe_end(p);
    if (status < 0) {
        ddl__pipe_failed(c, r, status);
        return;
    }
    p->state[ddl__pipe_ended(p, s)] = DDL__SLOT_EMPTY;
    while (p->first < r->moved && p->first + ddl__pipe_length(p, p->first) <= r->moved &&
           p->state[ddl__pipe_slot(p, p->first)] == DDL__SLOT_EMPTY) {
        p->first += ddl__pipe_length(p, p->first);
    }
    if (p->first == p->total) {
        ddl__recv_done(r);
    } else if (ddl__pipe_end(p) > before && ddl__ask_data(c, r, DDL__CTS_MORE) < 0) {
        ddl__pipe_failed(c, r, DDL_ERR_NOMEM);
    }
}

/* Begins to copy full slots to the device, in order, once its stream has come to the receive. */
static void ddl__pipe_drain(ddl_context *c, ddl_request *r) {
    uint64_t chunk = r->pipe->chunk;
    for (uint64_t at = r->pipe->first; r->pipe != NULL && at < r->moved; at += chunk) {
        ddl__pipe *p = r->pipe; /* the last chunk that ends takes it away */
        int32_t slot = ddl__pipe_slot(p, at);
        if (p->state[slot] != DDL__SLOT_FULL) {
            continue;
        }
        ddl_status status = ddl__pipe_copy(c, p, &r->tensor, at, ddl__pipe_drained);
        if (status != DDL_IN_PROGRESS) {
            ddl__pipe_drained(c, p->stage[slot], status);
        }
    }
}

static void ddl__pipe_landed(ddl_context *c, ddl_request *r) {
    ddl__pipe *p = r->pipe;
    if (r->moved == p->total || r->moved % p->chunk == 0) {
        p->state[ddl__pipe_slot(p, r->moved - 1)] = DDL__SLOT_FULL;
        r->draining = r->moved == p->total;
        if (!r->filling) {
            ddl__pipe_drain(c, r);
        }
    }
}

/* >>fetched */

/* What reaches memory of this request's device from a rank: the device's own transport where that rank has it too, else
 * what carries messages to it. NULL: nothing does, or the tensor has gaps. */
static ddl__endpoint *ddl__fetcher_of(ddl_context *c, const ddl_request *r, int32_t world_rank) {
    const ddl__link *l = &c->links[world_rank];
    if (world_rank == c->rank || !ddl__is_on_device(r) || r->stage->count > 0 || !ddl__is_contiguous(&r->tensor)) {
        return NULL;
    }
    ddl__endpoint *e = l->device != NULL ? l->device : l->endpoint;
    if (e == NULL || !DDL_HAS(e->table, get)) {
        return NULL;
    }
    if (l->device != NULL) {
        bool own = c->devices->list[r->tensor.device - 1].plugin == e->plugin;
        return own && DDL_HAS(e->table, memory_register) ? e : NULL;
    }
    /* With DDL_MAC all that comes over a network is checked, and what is fetched could not be. */
    return DDL_HAS(e->table, memory_register_on) && !c->settings.mac ? e : NULL;
}

/* Peers may reach the tensor from here on. False: not this one; the transport has said why. */
static bool ddl__fetch_register(ddl_context *c, ddl_request *r, uint64_t bytes, ddl_memory_key *out) {
    const ddl__endpoint *e = r->fetcher = ddl__fetcher_of(c, r, ddl__world_rank(r));
    if (e == NULL) {
        return false;
    }
    const ddl__device *d = &c->devices->list[r->tensor.device - 1];
    const ddl_transport *t = e->table;
    void *at = r->tensor.data;
    return ((t->flags & DDL_TRANSPORT_DEVICE) != 0
                ? t->memory_register(e->self, at, bytes, &r->memory, out)
                : t->memory_register_on(e->self, d->plugin->name, d->index, at, bytes, &r->memory, out)) == DDL_OK;
}

/* Takes the memory back: on return nobody reads or writes it. */
static void ddl__fetch_release(ddl_request *r) {
    void *memory = r->memory;
    r->memory = NULL;
    if (memory != NULL) {
        r->fetcher->table->memory_release(r->fetcher->self, memory);
    }
}

static void ddl__fetch_forgotten(ddl_context *c, ddl__outgoing *out, ddl_status status) {
    (void)status;
    ((ddl_request *)out->owner)->getting = false;
    c->device_natives--;
}

/* An end before its time. A peer may still have the key, and may not read what comes to lie there. */
static void ddl__fetch_leave(ddl_request *r) {
    bool keyed = r->memory != NULL && !r->is_recv;
    if (r->getting) {
        r->out.done = ddl__fetch_forgotten;
    }
    ddl__fetch_release(r);
    if (keyed) {
        ddl__memory_forget(r->context, r->tensor.data, r->bytes);
    }
    r->fetching = false;
}

/* The way by the host, after all. */
static void ddl__fetch_refused(ddl_context *c, ddl_request *r, ddl_status status) {
    if (status != DDL_ERR_STATE && !c->fetch_told) { /* STATE: that has been told already */
        c->fetch_told = true;
        ddl__log(&c->base, DDL_LOG_WARN, "messages from memory of rank %d on a device go through the host: to copy "
                 "from there failed (%s); see the plugin's warnings, and docs/cuda.md", ddl__world_rank(r),
                 ddl_status_text(status));
    }
    ddl__fetch_leave(r);
    ddl__accept_again(c, r);
}

static void ddl__fetch_ended(ddl_context *c, ddl__outgoing *out, ddl_status status) {
    ddl_request *r = out->owner;
    c->device_natives -= r->getting;
    r->getting = false;
    if (status == DDL_ERR_PEER) {
        ddl__fetch_leave(r);
        ddl__request_fail(r, status, "receive from rank %d of group \"%s\" (tag %d): it died while its memory on a "
                          "device was copied", r->peer, r->group->name, r->info.tag);
    } else if (status < 0) {
        ddl__fetch_refused(c, r, status);
    } else if (ddl__ask_data(c, r, DDL__CTS_FETCHED) < 0) {
        ddl__fetch_leave(r);
        ddl__request_fail(r, DDL_ERR_NOMEM, "receive from rank %d of group \"%s\": the data came, but there is no "
                          "memory to tell it so", r->peer, r->group->name);
    } else {
        r->moved = r->total;
        ddl__fetch_release(r);
        ddl__recv_done(r);
    }
}

/* Begins, when both sides' streams have come here. */
static void ddl__fetch_get(ddl_context *c, ddl_request *r) {
    if (!r->told || r->filling || r->getting) {
        return;
    }
    r->out.done = ddl__fetch_ended;
    r->out.owner = r;
    ddl_status status = r->fetcher->table->get(r->fetcher->self, ddl__world_rank(r), r->tensor.data, r->memory, &r->key,
                                               0, r->total, &r->out);
    r->getting = status == DDL_IN_PROGRESS;
    c->device_natives += r->getting; /* somebody looks, soon */
    if (status != DDL_IN_PROGRESS) {
        ddl__fetch_ended(c, &r->out, status);
    }
}

/* A receive has met an offer with a key. False: it cannot fetch. */
static bool ddl__fetch_accept(ddl_context *c, ddl_request *r, const ddl__offer *offer) {
    ddl_memory_key own; /* nobody gets it */
    if (!offer->keyed || r->total == 0 || !ddl__fetch_register(c, r, r->total, &own)) {
        return false;
    }
    r->key = offer->key;
    r->told = offer->ready;
    if (!r->told && ddl__ask_data(c, r, DDL__CTS_FETCH) < 0) {
        ddl__fetch_release(r);
        return false;
    }
    r->fetching = true;
    ddl__fetch_get(c, r);
    return true;
}

#endif /* DDL_P2P_DEVICES_H */

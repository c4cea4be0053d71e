/* message: out. The core's messages become ours, as credit and buffers allow. */
#ifndef FABRIC_MESSAGE_H
#define FABRIC_MESSAGE_H

#include "link.h"

enum { FABRIC_LATER = 0, FABRIC_GONE = 1, FABRIC_OFFERED = 2 };

static size_t fabric_core_bytes(void) { return sizeof(fabric_head) + DDL_MESSAGE_HEADER_BYTES; }

/* An operation on what messages go by has failed. To the core ENOMEM says that there was none for what the peer sent. */
static void fabric_words_failed(fabric_self *s, fabric_link *l, int error) {
    error = error == ENOMEM ? ENOBUFS : fabric_reset(error);
    if (s->connects) {
        fabric_way_ends(s, &l->way[FABRIC_WORDS], error);
    } else {
        fabric_break(s, l, error);
    }
}

/* What messages to a peer go by; NULL: it is being connected. */
static struct fid_ep *fabric_ep_to(fabric_self *s, fabric_link *l) {
    if (!s->connects) {
        return s->rails[0].ep;
    }
    fabric_way *w = &l->way[FABRIC_WORDS];
    int open = w->ended == 0 && fabric_way_is_open(s, w);
    s->stuck |= !open;
    return open ? w->strand[0].ep : NULL;
}

/* Nothing has gone to a peer yet, and nothing goes: libfabric tries for ever, and without a word. Said once. */
static void fabric_unheard(fabric_self *s, fabric_link *l) {
    const struct fi_info *info = s->rails[0].info;
    uint64_t waited = fabric_stall_look(s, &l->send_stall);
    if (l->reached || s->told_unheard || waited < FABRIC_UNHEARD_NS) {
        return;
    }
    s->told_unheard = 1;
    fabric_log(s, DDL_LOG_WARN, "rank %d has no connection to rank %d over %s (%s) after %d s. Either that rank computes and has not called "
               "ddl meanwhile, or the network between them does not carry it: %s; see that both are in one network (ddl-info; "
               "DDL_FABRIC_INTERFACE, DDL_FABRIC_DOMAIN), or leave fabric out of DDL_TRANSPORTS", s->rank, l->peer, info->domain_attr->name,
               info->fabric_attr->prov_name, (int)(FABRIC_UNHEARD_NS / 1000000000u),
               s->connects ? "a firewall may drop what goes to its port (DDL_PORT_RANGE)"
                           : "RoCE needs UDP port 4791");
}

static int fabric_may_send(const fabric_link *l, int32_t keep) { return (int32_t)(l->limit - l->spent) > keep; }

static fabric_head fabric_head_of(const fabric_self *s, const fabric_link *l, uint8_t kind, uint32_t sequence,
                                  size_t bytes) {
    return (fabric_head){.token = s->peers[l->peer].token_out,
                         .source = s->rank,
                         .kind = kind,
                         .sequence = sequence,
                         .granted = l->taken + l->window,
                         .pulled = l->pulled,
                         .bytes = (uint32_t)bytes};
}

/* Sends what lies in a slot. FABRIC_LATER: the provider takes nothing now, or the link was cut, which progress is about
 * to tell; the slot is free again in any case. */
static int fabric_slot_send(fabric_self *s, fabric_link *l, fabric_slot *slot, size_t length, int inject) {
    fi_addr_t at = s->peers[l->peer].at[0];
    struct fid_ep *ep = at != FI_ADDR_NOTAVAIL && !s->failed ? fabric_ep_to(s, l) : NULL; /* providers do not look at addresses */
    ssize_t result;
    if (ep == NULL) {
        fabric_slot_give(&s->send_free, slot);
        fabric_unheard(s, l);
        return FABRIC_LATER;
    }
    /* The provider copies it, and there is no completion. If one is lost a gap shows it, where there is an order. */
    if (inject && s->ordered && length <= s->inject_bytes) {
        result = fi_inject(ep, slot->bytes, length, at);
        fabric_slot_give(&s->send_free, slot);
    } else {
        slot->peer = l->peer;
        result = fi_send(ep, slot->bytes, length, slot->desc, at, &slot->context);
        l->sends += result == 0;
        if (result != 0) {
            fabric_slot_give(&s->send_free, slot);
        }
    }
    fabric_asked(l, 0, result);
    if (result == -FI_EAGAIN) {
        s->stuck = 1; /* it may be connecting: nobody tells when that is over */
        fabric_unheard(s, l);
        if (s->peers[l->peer].heard) {
            fabric_memlock_suspect(s, "send to", l->peer, l->send_stall.waited_ns);
        }
        return FABRIC_LATER;
    }
    fabric_stall_end(&l->send_stall);
    if (result != 0) {
        fabric_post_failed(s, "send", l->peer, result);
        fabric_words_failed(s, l, (int)-result);
        return FABRIC_LATER;
    }
    l->reached = 1;
    l->ack_due = 0; /* every head says it */
    l->told_limit = l->taken + l->window;
    l->told_pulled = l->pulled;
    return FABRIC_GONE;
}

/* head, then what a (a_bytes) and b (b_bytes) have; b may be NULL when it has no bytes. */
static int fabric_put(fabric_self *s, fabric_link *l, const fabric_head *head, const void *a, size_t a_bytes,
                      const void *b, size_t b_bytes) {
    fabric_slot *slot = fabric_slot_take(&s->send_free);
    if (slot == NULL) {
        return FABRIC_LATER; /* a completion brings one */
    }
    memcpy(slot->bytes, head, sizeof *head);
    if (a_bytes > 0) {
        memcpy(slot->bytes + sizeof *head, a, a_bytes);
    }
    if (b_bytes > 0) {
        memcpy(slot->bytes + sizeof *head + a_bytes, b, b_bytes);
    }
    /* Of a goodbye the completion shows that all before it has left too; of a WITHDRAW that it is with the peer: of an
     * adapter a send is complete when it was "delivered to the peer endpoint" (FI_TRANSMIT_COMPLETE of fi_cq(3): acknowledged,
     * with no help of the peer's process, which FI_DELIVERY_COMPLETE may want). Over sockets the kernel has it. */
    int copied = head->kind != FABRIC_BYE && head->kind != FABRIC_WITHDRAW;
    return fabric_slot_send(s, l, slot, sizeof *head + a_bytes + b_bytes, copied);
}

/* One message with credit, in order. */
static int fabric_put_ordered(fabric_self *s, fabric_link *l, uint8_t kind, const void *a, size_t a_bytes,
                              const void *b, size_t b_bytes, size_t payload_bytes) {
    if (!fabric_may_send(l, FABRIC_RESERVE)) {
        return FABRIC_LATER;
    }
    fabric_head head = fabric_head_of(s, l, kind, l->sequence, payload_bytes);
    int went = fabric_put(s, l, &head, a, a_bytes, b, b_bytes);
    l->sequence += went == FABRIC_GONE;
    l->spent += went == FABRIC_GONE;
    return went;
}

/* A copy of a message without its payload: fabric_orphan. In place of what was still to come, its receiver gets nothing. */
static int fabric_is_given_up(const ddl_message *m) { return m->payload == NULL && m->payload_bytes > 0; }

/* In as many pieces as it takes. */
static int fabric_send_pieces(fabric_self *s, fabric_link *l, ddl_message *m) {
    uint64_t *done = &m->priv[FABRIC_DONE_BYTES];
    do {
        int begun = m->priv[FABRIC_BEGUN] != 0;
        size_t head_bytes = begun ? 0 : DDL_MESSAGE_HEADER_BYTES;
        uint64_t room = s->slot_bytes - sizeof(fabric_head) - head_bytes, left = m->payload_bytes - *done;
        size_t bytes = (size_t)(left < room ? left : room);
        bytes = fabric_is_given_up(m) ? 0 : bytes;
        uint8_t kind = begun ? FABRIC_PIECE : bytes == m->payload_bytes ? FABRIC_WHOLE : FABRIC_FIRST;
        const uint8_t *from = bytes > 0 ? (const uint8_t *)m->payload + *done : NULL;
        if (fabric_put_ordered(s, l, kind, m->header, head_bytes, from, bytes, bytes) != FABRIC_GONE) {
            return FABRIC_LATER;
        }
        m->priv[FABRIC_BEGUN] = 1;
        *done += bytes;
    } while (*done < m->payload_bytes && !fabric_is_given_up(m));
    return FABRIC_GONE;
}

/* The peer has been told of it. */
static void fabric_offer_add(fabric_link *l, fabric_offer *o) {
    o->number = l->offer_count++;
    *l->offers_last = o;
    l->offers_last = &o->next;
}

static fabric_offer *fabric_offer_new(fabric_self *s, ddl_message *m) {
    fabric_offer *o = s->offer_free;
    if (o != NULL) {
        s->offer_free = o->next;
    } else {
        o = s->host->alloc(s->host, sizeof *o);
    }
    if (o != NULL) {
        memset(o, 0, sizeof *o);
        o->message = m;
    }
    return o;
}

/* The next part of a payload. Returns an error of libfabric's. */
static ssize_t fabric_stream_part(fabric_self *s, fabric_link *l, fabric_offer *o) {
    uint64_t part = fabric_part(s, o->message->payload_bytes), left = o->message->payload_bytes - o->streamed;
    uint64_t bytes = left < part ? left : part;
    fabric_slot *slot = o->held ? NULL : fabric_read_slot(s, FABRIC_STREAM);
    if (slot == NULL) {
        return -FI_EAGAIN;
    }
    slot->peer = l->peer;
    slot->number = o->number;
    ssize_t result = fi_send(fabric_strand_of(s, &l->way[FABRIC_OUT], o->streamed, part)->ep,
                             (const uint8_t *)o->message->payload + o->streamed, bytes, NULL, 0, &slot->context);
    if (result != 0) {
        fabric_slot_give(&s->read_free, slot);
        return result;
    }
    o->streamed += bytes;
    o->streaming++;
    return 0;
}

/* Gives OUT what it takes of offered payloads, in their order. Returns whether none is left. */
static int fabric_stream(fabric_self *s, fabric_link *l) {
    fabric_way *w = &l->way[FABRIC_OUT];
    for (fabric_offer *o = l->offers; o != NULL && fabric_way_has(s, w, FABRIC_OPEN); o = o->next) {
        int goes = o->way == w->number && o->message != NULL;
        while (goes && o->streamed < o->message->payload_bytes) {
            ssize_t result = fabric_stream_part(s, l, o);
            if (result == -FI_EAGAIN) {
                s->stuck = 1;
                return 0;
            }
            if (result != 0) {
                fabric_way_failed(s, w, (int)-result);
                return 1;
            }
        }
    }
    return 1;
}

static int fabric_send_streamed(fabric_self *s, fabric_link *l, ddl_message *m) {
    fabric_way *w = &l->way[FABRIC_OUT];
    if (!fabric_way_is_open(s, w)) {
        m->priv[FABRIC_NO_OFFER] = w->failures > 0;
        s->stuck = 1;
        return FABRIC_LATER;
    }
    if (!fabric_may_send(l, FABRIC_RESERVE) || s->send_free == NULL) {
        return FABRIC_LATER;
    }
    fabric_offer *o = fabric_offer_new(s, m);
    if (o == NULL) {
        m->priv[FABRIC_NO_OFFER] = 1;
        return FABRIC_LATER;
    }
    fabric_offer_body body = {.bytes = m->payload_bytes, .address = w->number};
    o->way = w->number;
    if (fabric_put_ordered(s, l, FABRIC_OFFER, m->header, DDL_MESSAGE_HEADER_BYTES, &body, sizeof body, 0) !=
        FABRIC_GONE) {
        fabric_offer_free(s, o);
        return FABRIC_LATER;
    }
    fabric_offer_add(l, o);
    if (!fabric_stream(s, l)) {
        fabric_backlog_add(s, l);
    }
    return FABRIC_OFFERED;
}

/* Registers the payload on each rail and tells the peer. FABRIC_NO_OFFER is noted when it has to go in pieces. */
static int fabric_send_offer(fabric_self *s, fabric_link *l, ddl_message *m) {
    if (!fabric_may_send(l, FABRIC_RESERVE) || s->send_free == NULL) {
        return FABRIC_LATER;
    }
    fabric_offer *o = fabric_offer_new(s, m);
    void *payload = (void *)(uintptr_t)m->payload; /* peers read it */
    if (o == NULL || (o->region = fabric_region_get(s, payload, m->payload_bytes, FI_REMOTE_READ, FABRIC_HOST)) == NULL) {
        if (o != NULL) {
            fabric_offer_free(s, o);
        }
        m->priv[FABRIC_NO_OFFER] = 1;
        return FABRIC_LATER;
    }
    fabric_offer_body body = {.bytes = m->payload_bytes, .address = fabric_region_name(s, o->region, payload)};
    fabric_region_keys(s, o->region, body.key);
    if (fabric_put_ordered(s, l, FABRIC_OFFER, m->header, DDL_MESSAGE_HEADER_BYTES, &body, sizeof body, 0) !=
        FABRIC_GONE) {
        fabric_offer_free(s, o);
        return FABRIC_LATER;
    }
    fabric_offer_add(l, o);
    return FABRIC_OFFERED;
}

static int fabric_send_one(fabric_self *s, fabric_link *l, ddl_message *m) {
    int offer = !s->force_no_rma && s->address.has_rma && m->payload_bytes > s->offer_bytes &&
                m->payload_bytes > s->slot_bytes - fabric_core_bytes();
    if (offer && !m->priv[FABRIC_NO_OFFER] && !m->priv[FABRIC_BEGUN]) {
        int went = s->connects ? fabric_send_streamed(s, l, m) : fabric_send_offer(s, l, m);
        if (went != FABRIC_LATER || !m->priv[FABRIC_NO_OFFER]) {
            return went;
        }
    }
    return fabric_send_pieces(s, l, m);
}

/* What the peer could not read is sent, each part with its place. Returns whether all of it went. */
static int fabric_send_repair(fabric_self *s, fabric_link *l, fabric_offer *o) {
    int given_up = fabric_is_given_up(o->message);
    while (o->repaired < o->message->payload_bytes) {
        uint64_t room = s->slot_bytes - sizeof(fabric_head) - sizeof(uint64_t);
        uint64_t left = o->message->payload_bytes - o->repaired;
        size_t bytes = given_up ? 0 : (size_t)(left < room ? left : room);
        fabric_head head = fabric_head_of(s, l, FABRIC_REPAIR, o->number, bytes);
        const uint8_t *from = given_up ? NULL : (const uint8_t *)o->message->payload + o->repaired;
        if (!fabric_may_send(l, 0) ||
            fabric_put(s, l, &head, &o->repaired, sizeof o->repaired, from, bytes) != FABRIC_GONE) {
            return 0;
        }
        l->spent++;
        o->repaired += given_up ? left : bytes;
    }
    return 1;
}

/* A word about an offer, ahead of the queue; more: how many of those behind it the word is about too. */
static int fabric_put_word(fabric_self *s, fabric_link *l, uint8_t kind, uint32_t number, uint32_t more) {
    fabric_head head = fabric_head_of(s, l, kind, number, more);
    if (!fabric_may_send(l, 0) || fabric_put(s, l, &head, NULL, 0, NULL, 0) != FABRIC_GONE) {
        return 0;
    }
    l->spent++;
    return 1;
}

/* One word for all in a row that are to be withdrawn: a peer that does not look gives no credit for one each. */
static int fabric_put_withdraw(fabric_self *s, fabric_link *l, fabric_offer *first) {
    uint32_t more = 0;
    for (fabric_offer *o = first->next; o != NULL && o->withdrawn == 1; o = o->next) {
        more++;
    }
    if (!fabric_put_word(s, l, FABRIC_WITHDRAW, first->number, more)) {
        return 0;
    }
    for (fabric_offer *o = first; o != NULL && o->number - first->number <= more; o = o->next) {
        o->withdrawn = 2;
    }
    return 1;
}

/* What is to be said about one of our offers. */
static int fabric_push_offer(fabric_self *s, fabric_link *l, fabric_offer *o) {
    if (o->withdrawn == 1 && !fabric_put_withdraw(s, l, o)) {
        return 0;
    }
    if (o->valid_due) {
        if (!fabric_put_word(s, l, FABRIC_VALID, o->number, 0)) {
            return 0;
        }
        o->valid_due = 0;
    }
    return !o->refused || o->message == NULL || fabric_send_repair(s, l, o);
}

/* What goes ahead of the queue, as others wait for it. */
static int fabric_push_urgent(fabric_self *s, fabric_link *l) {
    if (l->refusing) {
        if (!fabric_put_word(s, l, FABRIC_REFUSE, l->pulled, 0)) {
            return 0;
        }
        l->refusing = 0;
    }
    if (l->landing.active && l->landing.checking == 1) {
        if (!fabric_put_word(s, l, FABRIC_CHECK, l->pulled, 0)) {
            return 0;
        }
        l->landing.checking = 2;
    }
    for (fabric_offer *o = l->offers; o != NULL; o = o->next) {
        if (!fabric_push_offer(s, l, o)) {
            return 0;
        }
    }
    return 1;
}

static void fabric_push_ack(fabric_self *s, fabric_link *l) {
    if (l->ack_due) {
        fabric_head head = fabric_head_of(s, l, FABRIC_ACK, 0, 0);
        fabric_put(s, l, &head, NULL, 0, NULL, 0);
    }
}

/* Sends what waits for a peer. Returns whether nothing is left. The link may be gone afterwards. */
static int fabric_push(fabric_self *s, fabric_link *l) {
    int clear = fabric_push_urgent(s, l);
    while (clear && l->first != NULL && !s->peers[l->peer].gone) {
        ddl_message *m = l->first;
        int went = fabric_send_one(s, l, m);
        if (went == FABRIC_LATER) {
            clear = 0;
        } else {
            fabric_queue_pop(l);
        }
        if (went == FABRIC_GONE) {
            fabric_message_end(s, m, DDL_OK);
        }
    }
    fabric_push_ack(s, l);
    int streamed = !s->connects || fabric_stream(s, l);
    return clear && streamed && !l->ack_due;
}

/* The last word, behind all others; said once. */
static void fabric_push_bye(fabric_self *s, fabric_link *l) {
    if (l->first == NULL && !l->told_bye) {
        fabric_head head = fabric_head_of(s, l, FABRIC_BYE, l->sequence, 0);
        l->told_bye = fabric_put(s, l, &head, NULL, 0, NULL, 0) == FABRIC_GONE;
    }
}

/* Closes a link that the peer has no part in ending, and tells it, if it takes the word: else it would wait. Whatever is
 * half-way between the two is lost. */
static void fabric_part_with(fabric_self *s, fabric_link *l, int error) {
    fabric_head head = fabric_head_of(s, l, FABRIC_BYE, l->sequence, FABRIC_AT_ONCE);
    fabric_break(s, l, error);
    (void)fabric_put(s, l, &head, NULL, 0, NULL, 0);
    fabric_cut(s, l);
}

static ddl_status fabric_send(void *self, int32_t peer, ddl_message *m) {
    fabric_self *s = self;
    if (peer < 0 || peer >= s->world_size || !s->peers[peer].known) {
        return DDL_ERR_ARG;
    }
    if (s->peers[peer].gone || s->failed) {
        return DDL_ERR_PEER;
    }
    fabric_link *l = fabric_link_of(s, peer);
    if (l == NULL) {
        return DDL_ERR_NOMEM;
    }
    m->next = NULL;
    memset(m->priv, 0, sizeof m->priv);
    if (l->first == NULL) {
        fabric_stall_end(&l->send_stall); /* nothing was to be sent meanwhile */
    }
    int went = l->first == NULL && l->broken == 0 && !l->refusing ? fabric_send_one(s, l, m) : FABRIC_LATER;
    if (went == FABRIC_GONE) {
        if (s->armed && s->connects && !s->ticking) {
            fabric_timer(s, FABRIC_STUCK_NS); /* the kernel may have taken a part, and the sleeper does not wait for it to take more */
        }
        return DDL_OK;
    }
    if (went == FABRIC_LATER) {
        *l->last = m;
        l->last = &m->next;
        fabric_backlog_add(s, l);
    }
    return DDL_IN_PROGRESS;
}

#endif /* FABRIC_MESSAGE_H */

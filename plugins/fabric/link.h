/* link: one peer. Who it is, what may be sent to it, and how it ends. */
#ifndef FABRIC_LINK_H
#define FABRIC_LINK_H

#include "connect.h"

/* >>tokens */

/* Every message, and every call (connect.h), carries a number that only members of the job can make: an RDM endpoint of libfabric
 * takes messages from whoever knows its address, and has no connection to be seen. With a job secret it is an HMAC over both ranks and the receiver's
 * nonce; without one the nonce itself, which is known to processes of this user on this host alone. */
static uint64_t fabric_token(fabric_self *s, int32_t from, int32_t to, const uint8_t nonce[16]) {
    uint8_t data[24], out[32];
    uint64_t token;
    memcpy(data, &from, 4);
    memcpy(data + 4, &to, 4);
    memcpy(data + 8, nonce, 16);
    if (s->authenticated && s->host->derive(s->host, data, sizeof data, out) == DDL_OK) {
        memcpy(&token, out, sizeof token);
        return token;
    }
    uint64_t half[2];
    memcpy(half, nonce, 16);
    return half[0] ^ (half[1] * (2 * (uint64_t)(uint32_t)from + 1));
}

/* Whether a message is from the rank that it names. Anybody may ask this of us, so it allocates nothing. */
static int fabric_is_from(fabric_self *s, int32_t source, uint64_t token) {
    if (source < 0 || source >= s->world_size || source == s->rank) {
        return 0;
    }
    fabric_peer *p = &s->peers[source];
    if (!p->heard) {
        p->token_in = fabric_token(s, source, s->rank, s->address.nonce);
        p->heard = 1;
    }
    return p->token_in == token;
}

/* >>making */

/* The window widens with the first message from a peer, as its receives are posted then: peers that never talk cost
 * nothing. A peer for which there is no room any more keeps the first window. */
static void fabric_link_widen(fabric_self *s, fabric_link *l) {
    if (l->window == FABRIC_FIRST_WINDOW) {
        int32_t got = fabric_receives_add(s, FABRIC_WINDOW + FABRIC_ACK_SLOTS);
        l->window = got == FABRIC_WINDOW + FABRIC_ACK_SLOTS ? FABRIC_WINDOW : FABRIC_FIRST_WINDOW + 1;
        if (l->window == FABRIC_WINDOW) {
            l->ack_due = 1;
            fabric_backlog_add(s, l);
        }
    }
}

static fabric_link *fabric_link_of(fabric_self *s, int32_t peer) {
    fabric_peer *p = &s->peers[peer];
    if (p->link == NULL) {
        fabric_link *l = fabric_zalloc(s, sizeof *l);
        if (l == NULL) {
            return NULL;
        }
        l->peer = peer;
        l->last = &l->first;
        l->offers_last = &l->offers;
        for (int32_t i = 0; i < FABRIC_WAYS; i++) {
            fabric_way *w = &l->way[i];
            w->link = l;
            w->kind = i;
            for (int32_t r = 0; r < FABRIC_RAILS_MAX; r++) {
                w->strand[r].way = w;
                w->strand[r].rail = r;
            }
        }
        l->limit = l->told_limit = l->window = FABRIC_FIRST_WINDOW;
        l->next = s->links;
        s->links = l;
        p->link = l;
    }
    return p->link;
}

/* >>ending */

static void fabric_offer_free(fabric_self *s, fabric_offer *o) {
    fabric_region_put(s, &o->region);
    o->next = s->offer_free;
    s->offer_free = o;
}

/* The first of the list leaves it; returns its message, NULL when that was recalled. */
static ddl_message *fabric_offer_pop(fabric_self *s, fabric_link *l) {
    fabric_offer *o = l->offers;
    ddl_message *message = o->message;
    l->offers = o->next;
    if (l->offers == NULL) {
        l->offers_last = &l->offers;
    }
    fabric_offer_free(s, o);
    return message;
}

static void fabric_queue_pop(fabric_link *l) {
    l->first = l->first->next;
    if (l->first == NULL) {
        l->last = &l->first;
    }
}

/* Only data of a message that its receiver has asked for comes in frames longer than others (max_payload_bytes of ddl_transport). When
 * the core recalls some it says to the receiver, behind it, that no more comes: nothing has to take its place. */
static int fabric_is_data(uint64_t payload_bytes) { return payload_bytes > DDL_MESSAGE_PAYLOAD_BYTES; }

/* What is noted in a message that we hold: how much of it went in pieces, and whether it is our own copy. */
enum { FABRIC_DONE_BYTES, FABRIC_IS_COPY, FABRIC_NO_OFFER, FABRIC_BEGUN };

static void fabric_message_end(fabric_self *s, ddl_message *m, ddl_status status) {
    if (m == NULL) {
        return;
    }
    if (m->priv[FABRIC_IS_COPY]) {
        s->host->free(s->host, m);
    } else {
        s->host->sent(s->host, m, status);
    }
}

/* Offers that the peer has dealt with: their memory goes back to the core. */
static int fabric_offers_end(fabric_self *s, fabric_link *l) {
    int events = 0;
    while (l->offers != NULL && (int32_t)(l->ended - l->offers->number) > 0) {
        if (l->offers->streaming > 0 && l->offers->refused) {
            fabric_way_close(s, &l->way[FABRIC_OUT]);
        }
        if (l->offers->streaming > 0) {
            break; /* its completions are about to be read */
        }
        fabric_message_end(s, fabric_offer_pop(s, l), DDL_OK);
        events++;
    }
    return events;
}

static void fabric_landing_release(fabric_self *s, fabric_link *l) { fabric_region_put(s, &l->landing.region); }

static int fabric_poll(fabric_self *s);
static fabric_head fabric_head_of(const fabric_self *s, const fabric_link *l, uint8_t kind, uint32_t sequence, size_t bytes);
static int fabric_gets_renew(fabric_self *s, int32_t peer);
static void fabric_gets_forget(fabric_self *s, int32_t peer);
static void fabric_gets_end(fabric_self *s, int32_t peer, const struct fabric_memory *memory, ddl_status status);

/* ofi_rxm closes the connection of an address that is removed, at once, when it was told so (fabric_library_variables) before
 * it was first used; before 1.17 it knows no such word (pull request 8190 of libfabric), and the read goes on. Of a read whose answer is half
 * way it may lose the completion (tcp of libfabric 1.17 does); nothing is written any more nevertheless. */
static int fabric_closes_connections(const fabric_self *s) {
    const char *cleanup = getenv("FI_AV_REMOVE_CLEANUP");
    return !s->force_drops && FI_VERSION_GE(s->lib.version(), FI_VERSION(1, 17)) && !s->lib.late && cleanup != NULL && strchr("1tTyY", cleanup[0]) != NULL &&
           strstr(s->rails[0].info->fabric_attr->prov_name, ";ofi_rxm") != NULL;
}

/* EFA has no connections: with an address it forgets what is under way, and drops the completions (prov/efa/src/rdm:
 * efa_rdm_peer_destruct in efa_rdm_peer.c, efa_rdm_pke_handle_tx_error in efa_rdm_pke_cmd.c). What an adapter may
 * still do with our memory it does by our registrations: as we ask for FI_MR_LOCAL, EFA has none of its own (efa_user_info.c;
 * verbs keeps them below us). Between ranks of one host it reads by shared memory, which is not ended so. */
static int fabric_drops_completions(const fabric_self *s) {
    return (s->mr_mode & FI_MR_LOCAL) != 0 && (s->force_drops || strcmp(s->rails[0].info->fabric_attr->prov_name, "efa") == 0);
}

/* Others get as many send buffers as those to this peer, whose completions never come. */
static int fabric_sends_renew(fabric_self *s, fabric_link *l) {
    int32_t sends = l->sends;
    l->sends = 0;
    return sends <= 0 || fabric_block_make(s, sends, s->slot_bytes, FABRIC_SEND, &s->send_free) == DDL_OK;
}

/* So the memory of reads is registered anew, and so on. 0: that cannot be done. */
static int fabric_give_up(fabric_self *s, fabric_link *l) {
    fabric_landing *in = &l->landing;
    int done = in->reading == 0 || (in->region != NULL && fabric_region_renew(s, in->region));
    done = done && fabric_gets_renew(s, l->peer);
    in->failed |= in->reading > 0;
    if (done) {
        in->reading = l->reads = 0;
        done = fabric_sends_renew(s, l);
    }
    return done;
}

/* The last resort: without an endpoint nothing is read or written any more. */
static void fabric_stop(fabric_self *s) {
    s->failed = 1;
    for (int32_t i = 0; i < s->rail_count; i++) {
        if (s->rails[i].ep != NULL) {
            int result = fi_close(&s->rails[i].ep->fid);
            if (result != 0) {
                fabric_log(s, DDL_LOG_WARN, "the endpoint cannot be closed (%s): a peer may still read memory that messages "
                           "were sent from, and write what was asked of it", fabric_error(s, result));
            }
            s->rails[i].ep = NULL;
        }
    }
    for (fabric_link *l = s->links; l != NULL; l = l->next) {
        fabric_ways_close(s, l);
    }
}

static void fabric_asked(fabric_link *l, int32_t rail, ssize_t result) {
    uint32_t bit = 1u << rail;
    l->refused = result != 0 ? l->refused | bit : l->refused & ~bit;
}

/* Whether the address of a peer may be removed. Where ofi_rxm could not make a connection, or was refused as the peer calls too, it keeps
 * one without an endpoint, and up to 1.17 at least closes that endpoint then, and crashes (rxm_av_remove_handler in
 * prov/rxm/src/rxm_conn.c). Such a one takes nothing; asked once more it calls, or says that it cannot; and twice, as the first time it may
 * read that it was refused. One that is well sends a word that says nothing new. */
static int fabric_may_remove(fabric_self *s, fabric_link *l, int32_t rail) {
    const fabric_rail *r = &s->rails[rail];
    fabric_head head = fabric_head_of(s, l, FABRIC_ACK, 0, 0);
    int asks = (l->refused >> rail & 1) != 0 && r->ep != NULL && strstr(r->info->fabric_attr->prov_name, ";ofi_rxm") != NULL;
    ssize_t result = 0;
    for (int i = 0; i < 2 && asks && (i == 0 || result == -FI_EAGAIN); i++) {
        result = fi_inject(r->ep, &head, sizeof head, s->peers[l->peer].at[rail]);
    }
    return result == 0 || result == -FI_EAGAIN;
}

/* After this nothing of the user's memory is touched by what was under way with a peer. Removing its address closes the
 * connection, and with that ends what was under way on it; or the memory is registered anew (fabric_give_up); a provider
 * that does neither costs us the endpoint. What has come is taken first: ofi_rxm crashes when messages wait in its queue while it
 * closes their connection. */
static void fabric_cut(fabric_self *s, fabric_link *l) {
    fabric_peer *p = &s->peers[l->peer];
    for (int i = 0; i < FABRIC_CUT_POLLS && !s->failed; i++) {
        fabric_poll(s);
    }
    fabric_ways_close(s, l);
    if (s->connects) {
        for (int i = 0; i < FABRIC_CUT_POLLS && l->sends > 0; i++) {
            fabric_poll(s); /* most have a completion */
        }
        (void)fabric_sends_renew(s, l); /* without memory for that there are fewer */
    }
    int removed = 1;
    for (int32_t i = 0; i < s->rail_count; i++) {
        if (s->rails[i].av != NULL && p->at[i] != FI_ADDR_NOTAVAIL) {
            removed &= fabric_may_remove(s, l, i) && fi_av_remove(s->rails[i].av, &p->at[i], 1, 0) == 0;
        }
        p->at[i] = FI_ADDR_NOTAVAIL;
    }
    if (!s->failed && removed && fabric_drops_completions(s) && !fabric_give_up(s, l)) {
        fabric_log(s, DDL_LOG_WARN, "what is under way with rank %d cannot be given up: its memory is not registered anew; "
                   "the endpoint is closed", l->peer);
        s->failed = 1;
    }
    uint64_t deadline = s->host->now_ns(s->host) + FABRIC_CUT_NS;
    while (l->reads > 0 && !s->failed && s->host->now_ns(s->host) < deadline) {
        fabric_poll(s);
    }
    if (l->reads > 0 && !s->failed && removed && fabric_closes_connections(s)) {
        l->landing.failed = 1;
        l->landing.reading = l->reads = 0;
    }
    if (l->reads > 0 && !s->failed) {
        fabric_log(s, DDL_LOG_WARN, "a read from rank %d does not end, though its address was %s; the endpoint is "
                   "closed", l->peer, removed ? "removed" : "to be removed");
        s->failed = 1;
    }
    if (s->failed) {
        fabric_stop(s);
    }
    fabric_gets_forget(s, l->peer);
}

/* Ends all that is under way with a peer. The host is called last, as it may call us. */
static void fabric_drop(fabric_self *s, int32_t peer, ddl_status status) {
    s->peers[peer].gone = 1;
    /* Also of who never talked the address is removed: it may have connected to us. */
    fabric_link *l = s->peers[peer].known ? fabric_link_of(s, peer) : s->peers[peer].link;
    if (l == NULL) {
        return;
    }
    fabric_cut(s, l);
    fabric_landing_release(s, l);
    for (int32_t i = 0; i < FABRIC_HOLD; i++) {
        if (l->held[i] != NULL) {
            fabric_slot_give(&s->unposted, l->held[i]);
            l->held[i] = NULL;
        }
    }
    l->ack_due = 0;
    l->refusing = 0;
    if (l->landing.active) {
        l->landing.active = 0;
        s->host->landed(s->host, peer, l->landing.token, status);
    }
    fabric_offers_end(s, l);
    while (l->offers != NULL) {
        fabric_message_end(s, fabric_offer_pop(s, l), status);
    }
    while (l->first != NULL) {
        ddl_message *m = l->first;
        fabric_queue_pop(l);
        fabric_message_end(s, m, status);
    }
    fabric_gets_end(s, peer, NULL, status);
}

/* Tells the core once; whether the peer is dead is for the core to say. */
static void fabric_lose(fabric_self *s, int32_t peer, int error, const char *what) {
    if (!s->peers[peer].gone) {
        s->peers[peer].gone = 1;
        s->host->lost(s->host, peer, error, what);
    }
    fabric_drop(s, peer, DDL_ERR_PEER);
}

/* From places that may not call the host: progress tells it. */
static void fabric_break(fabric_self *s, fabric_link *l, int error) {
    if (l->broken == 0) {
        l->broken = error > 0 ? error : -1;
        fabric_backlog_add(s, l);
    }
}

#endif /* FABRIC_LINK_H */

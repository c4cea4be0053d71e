/* receive: in. Completions are collected first, without a word to the core; then what arrived is handed on, in order.
 *
 * Why in two steps: when memory has to be given back at once (recall, redirect), completions must be read from inside
 * of calls of the core, where it wants to hear of nothing else. */
#ifndef FABRIC_RECEIVE_H
#define FABRIC_RECEIVE_H

#include "message.h"

/* >>collecting */

static void fabric_arrived_add(fabric_self *s, fabric_slot *slot) {
    slot->next = NULL;
    *s->arrived_last = slot;
    s->arrived_last = &slot->next;
}

static void fabric_stranger(fabric_self *s, fabric_slot *slot) {
    if (!s->told_stranger) {
        s->told_stranger = 1;
        fabric_log(s, DDL_LOG_DEBUG, "a message from somebody who is not of this job was dropped; others are too, without "
                   "a word");
    }
    fabric_slot_give(&s->unposted, slot);
}

/* Counters in a head only grow; an old one, overtaken by a newer, changes nothing. */
static void fabric_head_note(fabric_self *s, fabric_link *l, const fabric_head *head) {
    if ((int32_t)(head->granted - l->limit) > 0) {
        l->limit = head->granted;
        fabric_backlog_add(s, l);
    }
    if ((int32_t)(head->pulled - l->ended) > 0 && (int32_t)(l->offer_count - head->pulled) >= 0) {
        l->ended = head->pulled;
        fabric_backlog_add(s, l);
    }
}

/* A message with credit was dealt with: its room may be used again. The peer is told when that is half of the window;
 * while it repairs, at once, as all but the reserve may be taken by what waits behind the repair. */
static void fabric_consume(fabric_self *s, fabric_link *l, fabric_slot *slot) {
    int32_t enough = l->landing.refused || l->landing.checking ? 1 : (int32_t)l->window / 2;
    fabric_slot_give(&s->unposted, slot);
    fabric_receives_post(s); /* before the peer hears of it: what finds no receive waits, and others overtake it */
    l->taken++;
    if (!l->ack_due && (int32_t)(l->taken + l->window - l->told_limit) >= enough) {
        l->ack_due = 1;
        fabric_backlog_add(s, l);
    }
}

/* What a peer says about an offer of ours: it wants it sent, or asks whether it may use what it read. */
static void fabric_on_offer_word(fabric_self *s, fabric_link *l, const fabric_head *head) {
    fabric_offer *o = l->offers;
    while (o != NULL && o->number != head->sequence) {
        o = o->next;
    }
    if (o == NULL) {
        return;
    }
    if (head->kind == FABRIC_CHECK && !o->withdrawn) {
        o->valid_due = 1;
    } else {
        o->refused = 1;
    }
    fabric_backlog_add(s, l);
}

/* A peer wants offers back: one, and so many behind it. */
static void fabric_withdrawn(fabric_link *l, uint32_t number, uint32_t more) {
    for (uint32_t i = 0; i <= more && i < 64; i++) {
        if (number + i - l->pulled < 64) {
            l->withdrawn |= (uint64_t)1 << (number + i) % 64;
        }
    }
}

static void fabric_received(fabric_self *s, fabric_slot *slot, size_t length) {
    fabric_head head;
    if (length < sizeof head || length > s->slot_bytes) {
        fabric_stranger(s, slot);
        return;
    }
    memcpy(&head, slot->bytes, sizeof head);
    fabric_link *l = fabric_is_from(s, head.source, head.token) ? fabric_link_of(s, head.source) : NULL;
    if (l == NULL) {
        fabric_stranger(s, slot);
        return;
    }
    if (s->peers[head.source].gone) {
        fabric_slot_give(&s->unposted, slot);
        return;
    }
    fabric_link_widen(s, l);
    fabric_head_note(s, l, &head);
    l->heard_out |= head.kind == FABRIC_BYE || (head.kind == FABRIC_ACK && head.sequence == FABRIC_HEARD);
    slot->peer = head.source;
    slot->length = (uint32_t)length;
    if (head.kind == FABRIC_WITHDRAW) {
        fabric_withdrawn(l, head.sequence, head.bytes);
    }
    if (head.kind == FABRIC_REFUSE || head.kind == FABRIC_CHECK) { /* recall waits for that */
        fabric_on_offer_word(s, l, &head);
        fabric_consume(s, l, slot);
    } else if (head.kind == FABRIC_ACK) {
        fabric_slot_give(&s->unposted, slot);
    } else {
        fabric_arrived_add(s, slot);
    }
}

/* A read has ended, well or not. */
static void fabric_read_ended(fabric_self *s, fabric_slot *slot, int error) {
    fabric_link *l = s->peers[slot->peer].link;
    fabric_get *get = slot->get;
    slot->get = NULL;
    int late = s->connects && l != NULL && slot->number != (uint32_t)l->landing.offer.address;
    if (l == NULL || l->reads == 0 || late) { /* it has been given up */
        fabric_slot_give(&s->read_free, slot);
        return;
    }
    l->reads--;
    if (get != NULL) {
        get->reading--;
        get->failed |= error != 0;
        s->again = 1;
        fabric_slot_give(&s->read_free, slot);
        return;
    }
    l->landing.reading--;
    if (error != 0) {
        l->landing.failed = 1;
    } else {
        l->landing.done += slot->length;
    }
    if (error == EBADMSG && s->connects) {
        fabric_break(s, l, error);
    }
    fabric_slot_give(&s->read_free, slot);
    fabric_backlog_add(s, l);
}

/* A part of a payload that was read or received. How much a receive gets the peer chooses; of a read no completion says it. */
static void fabric_part_came(fabric_self *s, fabric_slot *slot, size_t length) {
    int damaged = s->connects && length != slot->length;
    if (damaged) {
        fabric_log(s, DDL_LOG_INFO, "rank %d sent %zu bytes as a part of a payload that has %u", slot->peer, length, (unsigned)slot->length);
    }
    fabric_read_ended(s, slot, damaged ? EBADMSG : 0);
}

static void fabric_send_ended(fabric_self *s, fabric_slot *slot, int error) {
    fabric_link *l = s->peers[slot->peer].link;
    fabric_head head;
    memcpy(&head, slot->bytes, sizeof head);
    for (fabric_offer *o = head.kind == FABRIC_WITHDRAW && error == 0 ? l->offers : NULL; o != NULL; o = o->next) {
        if (o->number - head.sequence <= head.bytes && o->withdrawn == 2) {
            o->withdrawn = 3;
            o->told_ns = s->host->now_ns(s->host);
        }
    }
    l->sends -= l->sends > 0; /* 0: fabric_sends_renew has counted it */
    fabric_slot_give(&s->send_free, slot);
}

/* A part of a payload that was sent. */
static void fabric_stream_ended(fabric_self *s, fabric_slot *slot) {
    fabric_link *l = s->peers[slot->peer].link;
    fabric_offer *o = l->offers;
    while (o != NULL && o->number != slot->number) {
        o = o->next;
    }
    if (o != NULL && o->streaming > 0) {
        o->streaming--;
        fabric_backlog_add(s, l);
    }
    fabric_slot_give(&s->read_free, slot);
}

/* For tests of what only EFA does: with the address of a peer the completions are gone (fabric_drops_completions). */
static int fabric_is_dropped(const fabric_self *s, const fabric_slot *slot) {
    return s->force_drops && fabric_drops_completions(s) && slot->role != FABRIC_RECV && s->peers[slot->peer].at[0] == FI_ADDR_NOTAVAIL;
}

static void fabric_completed(fabric_self *s, fabric_slot *slot, size_t length) {
    if (fabric_is_dropped(s, slot)) {
        return;
    }
    switch (slot->role) {
    case FABRIC_STREAM: fabric_stream_ended(s, slot); break;
    case FABRIC_RECV: fabric_received(s, slot, length); break;
    case FABRIC_READ: fabric_part_came(s, slot, length); break;
    default:
        fabric_send_ended(s, slot, 0);
    }
}

/* An injected message was lost; libfabric does not say which. The receiver sees the gap when the next one comes. While
 * we close that is nothing: peers go too. */
static void fabric_inject_lost(fabric_self *s, const char *error, const char *detail) {
    fabric_log(s, s->told_inject ? DDL_LOG_DEBUG : DDL_LOG_WARN, "a small message to some rank was lost: %s%s%s. Is a "
               "rank dead, or the network down? Who waits for it ends with an error, at its deadline at the latest; "
               "more losses are logged with DDL_LOG=debug only", error, detail != NULL ? ": " : "",
               detail != NULL ? detail : "");
    s->told_inject = 1;
}

/* An operation failed. What was sent is lost then, and with it the order: the link ends. */
static void fabric_completed_badly(fabric_self *s, fabric_rail *r) {
    struct fi_cq_err_entry e;
    memset(&e, 0, sizeof e);
    if (fi_cq_readerr(r->cq, &e, 0) < 0) {
        return;
    }
    fabric_slot *slot = e.op_context;
    const char *detail = e.err_data != NULL || e.prov_errno != 0
                             ? fi_cq_strerror(r->cq, e.prov_errno, e.err_data, NULL, 0) : NULL;
    if (slot == NULL) {
        fabric_inject_lost(s, fabric_error(s, e.err), detail);
        return;
    }
    if (fabric_is_dropped(s, slot)) {
        return;
    }
    int news = slot->role != FABRIC_RECV && !s->peers[slot->peer].gone && e.err != FI_ECANCELED;
    char of[24] = ""; /* a receive is from nobody yet */
    if (slot->role != FABRIC_RECV) {
        snprintf(of, sizeof of, " %s rank %d", slot->role == FABRIC_READ ? "from" : "to", slot->peer);
    }
    fabric_log(s, news ? DDL_LOG_INFO : DDL_LOG_DEBUG, "a %s%s failed: %s%s%s",
               slot->role == FABRIC_RECV ? "receive" : slot->role == FABRIC_READ ? "read" : "send", of, fabric_error(s, e.err),
               detail != NULL ? ": " : "", detail != NULL ? detail : "");
    if (slot->role == FABRIC_RECV) {
        fabric_slot_give(&s->unposted, slot);
    } else if (slot->role == FABRIC_STREAM) {
        fabric_stream_ended(s, slot);
    } else if (slot->role == FABRIC_READ) {
        fabric_read_ended(s, slot, e.err);
    } else {
        fabric_link *l = s->peers[slot->peer].link;
        fabric_send_ended(s, slot, e.err);
        if (!s->peers[l->peer].gone) {
            fabric_words_failed(s, l, e.err);
        }
    }
}

/* For tests of what only an unordered provider does: takes one of the batch, by lot. */
static int fabric_shuffle(fabric_self *s, int count) {
    s->force_seed = s->force_seed * 1664525u + 1013904223u;
    return s->force_unordered ? (int)((s->force_seed >> 16) % (uint32_t)count) : 0;
}

/* And one message of eight is heard of some looks later, when others have overtaken it. */
static int fabric_comes_late(fabric_self *s, fabric_slot *slot, size_t length) {
    if (!s->force_unordered || slot->role != FABRIC_RECV || fabric_shuffle(s, 8) != 0) {
        return 0;
    }
    slot->length = (uint32_t)length;
    slot->number = 1 + (uint32_t)fabric_shuffle(s, 20); /* looks */
    slot->next = s->late;
    s->late = slot;
    return 1;
}

static void fabric_late_ones(fabric_self *s) {
    fabric_slot **at = &s->late;
    while (*at != NULL) {
        fabric_slot *slot = *at;
        if (--slot->number > 0) {
            at = &slot->next;
        } else {
            *at = slot->next;
            fabric_received(s, slot, slot->length);
        }
    }
}

/* What the provider has to tell that belongs to no operation of ours (fabric_events_open). */
static void fabric_events_tell(fabric_self *s, fabric_rail *r) {
    struct fi_eq_err_entry wrong;
    struct fi_eq_entry entry;
    uint32_t event;
    ssize_t n = 1;
    for (int i = 0; i < FABRIC_BATCH && r->eq != NULL && (n > 0 || n == -FI_EAVAIL); i++) {
        n = fi_eq_read(r->eq, &event, &entry, sizeof entry, 0);
        memset(&wrong, 0, sizeof wrong);
        if (n == -FI_EAVAIL && fi_eq_readerr(r->eq, &wrong, 0) > 0) {
            fabric_log(s, DDL_LOG_WARN, "%s tells an internal error that belongs to no message: %s (its own number is %d); "
                       "if rank %d waits from now on, restart the job, and see the provider's own log (FI_LOG_LEVEL=warn)",
                       r->info->fabric_attr->prov_name, fabric_error(s, wrong.err), wrong.prov_errno, s->rank);
        }
    }
}

static int fabric_poll_rail(fabric_self *s, fabric_rail *r) {
    struct fi_cq_msg_entry entries[FABRIC_BATCH];
    if (s->connects && (++r->polls % FABRIC_EVENT_POLLS == 0 || s->calling > 0 || s->look)) {
        fabric_events(s, r);
    }
    ssize_t n = fi_cq_read(r->cq, entries, FABRIC_BATCH);
    if (!s->connects && (n == -FI_EAVAIL || ++r->polls % FABRIC_EVENT_POLLS == 0)) {
        fabric_events_tell(s, r);
    }
    if (n == -FI_EAVAIL) {
        fabric_completed_badly(s, r);
        return FABRIC_BATCH; /* there may be more */
    }
    if (n < 0 && n != -FI_EAGAIN && n != -FI_EINTR) {
        fabric_log(s, DDL_LOG_WARN, "the completion queue cannot be read: %s", fabric_error(s, (int)n));
        s->failed = 1;
    }
    int count = n > 0 ? (int)n : 0;
    if (count > 0 && s->by_sockets && !s->hushed && s->hush_tries < FABRIC_HUSH_TRIES) {
        fabric_queue_hush(s);
    }
    for (int left = count; left > 0; left--) {
        int i = fabric_shuffle(s, left);
        struct fi_cq_msg_entry e = entries[i];
        memmove(&entries[i], &entries[i + 1], (size_t)(left - 1 - i) * sizeof e);
        if (!fabric_comes_late(s, e.op_context, e.len)) {
            fabric_completed(s, e.op_context, e.len);
        }
    }
    return count;
}

/* Collects completions of all rails, and returns whether there were any; says nothing to the core. The rail that carries
 * messages comes last: what a peer said before a read ended is known then. */
static int fabric_poll(fabric_self *s) {
    int drained = 1, any = s->late != NULL;
    fabric_late_ones(s);
    for (int32_t i = s->rail_count - 1; i >= 0 && !s->failed; i--) {
        int n = FABRIC_BATCH;
        for (int events = 0; n == FABRIC_BATCH && events < FABRIC_TURN && !s->failed; events += n) {
            n = fabric_poll_rail(s, &s->rails[i]);
            any |= n > 0;
        }
        drained &= n < FABRIC_BATCH;
    }
    if (drained && s->ends) {
        fabric_ends(s);
    }
    s->look = 0;
    fabric_receives_post(s);
    return any;
}

/* >>landing */

static void fabric_turns(fabric_self *s, fabric_link *l);

static int fabric_is_withdrawn(const fabric_link *l) { return (l->withdrawn >> l->pulled % 64 & 1) != 0; }

static void fabric_landing_end(fabric_self *s, fabric_link *l, ddl_status status) {
    fabric_landing *in = &l->landing;
    fabric_landing_release(s, l);
    in->active = 0;
    if (in->offered) {
        l->withdrawn &= ~((uint64_t)1 << l->pulled % 64);
        l->pulled++;
        l->ack_due = 1; /* the sender waits for its memory */
        fabric_backlog_add(s, l);
    }
    s->host->landed(s->host, l->peer, in->token, status);
}

/* The core does not take what came. */
static void fabric_refused(fabric_self *s, fabric_link *l, ddl_status status) {
    int damaged = status == DDL_ERR_CORRUPT;
    fabric_lose(s, l->peer, damaged ? EBADMSG : ENOMEM,
                damaged ? "the peer sent a damaged header" : "the core cannot take what the peer sent");
}

/* Asks the core where a payload is to go. */
static int fabric_land(fabric_self *s, fabric_link *l, const uint8_t *header) {
    fabric_landing *in = &l->landing;
    void *to = NULL;
    memset(in, 0, sizeof *in);
    ddl_status status = s->host->land(s->host, l->peer, header, &in->bytes, &to, &in->token);
    if (status < 0) {
        fabric_refused(s, l, status);
        return 0;
    }
    in->to = to;
    in->active = 1;
    return 1;
}

/* No read from a peer has begun for as long as one is waited for: nothing is read from it for a while. */
static void fabric_reads_pause(fabric_self *s, fabric_link *l, int32_t rail) {
    uint64_t before = l->no_reads_for_ns, twice = 2 * before < FABRIC_NO_READS_MOST_NS ? 2 * before : FABRIC_NO_READS_MOST_NS;
    l->no_reads_for_ns = before == 0 ? FABRIC_NO_READS_NS : twice;
    l->no_reads_ns = s->host->now_ns(s->host) + l->no_reads_for_ns;
    if (!s->told_reads) {
        char remedy[256];
        s->told_reads = 1;
        fabric_log(s, DDL_LOG_WARN, "no read from rank %d over %s has begun for %d s: that rank does not call ddl, its adapter is not reached "
                   "(with rails each must reach its like: DDL_FABRIC_RAILS), or no more memory can be locked%s. What it sends comes through "
                   "buffers for a while", l->peer, s->rails[rail].info->domain_attr->name, (int)(FABRIC_RAIL_NS / 1000000000u),
                   fabric_memlock_remedy(s, -FI_EAGAIN, remedy));
    }
}

static int fabric_reads_paused(fabric_self *s, const fabric_link *l) { return s->host->now_ns(s->host) < l->no_reads_ns; }

/* A read, or a receive, did not begin, with that error, while `reading` others for the same are under way. Returns whether it never will;
 * else it is tried again, when a completion comes or the timer: at once would be to spin. That lasts where a peer has no descriptor left
 * to accept a connection with, or an adapter that ours does not reach; it may still hear us by the connection that is there. */
static int fabric_read_never(fabric_self *s, fabric_link *l, int32_t rail, ssize_t error, int32_t reading, fabric_stall *stall) {
    if (error != -FI_EAGAIN) {
        return 1;
    }
    uint64_t waited = fabric_stall_look(s, stall);
    int paused = fabric_reads_paused(s, l); /* another has waited for that */
    if (reading > 0 || (!paused && waited <= (s->connects ? FABRIC_CONNECT_NS : FABRIC_RAIL_NS))) {
        s->stuck = 1;
        return 0;
    }
    if (!paused && !s->connects) { /* there the next payload opens a new connection */
        fabric_reads_pause(s, l, rail);
    }
    return 1;
}

/* A part of a landing could not be asked for: it is later, or the peer is asked to send. */
static void fabric_pull_stopped(fabric_self *s, fabric_link *l, int32_t rail, ssize_t error) {
    fabric_landing *in = &l->landing;
    in->failed = fabric_read_never(s, l, rail, error, in->reading, &in->stall);
    if (in->failed) {
        fabric_backlog_add(s, l);
    } else {
        fabric_backlog_keep(s, l);
    }
}

/* A read, or a receive, of the next part was asked for, with that result. Returns whether it is under way. */
static int fabric_pull_began(fabric_self *s, fabric_link *l, fabric_slot *slot, ssize_t result) {
    fabric_landing *in = &l->landing;
    if (result != 0) {
        int32_t rail = slot->rail;
        fabric_slot_give(&s->read_free, slot);
        fabric_pull_stopped(s, l, rail, result);
        return 0;
    }
    fabric_stall_end(&in->stall);
    in->asked += slot->length;
    in->reading++;
    l->reads++;
    return 1;
}

/* What is coming by IN is not received there: it is asked for once more. */
static void fabric_in_give_up(fabric_self *s, fabric_link *l) {
    fabric_way_close(s, &l->way[FABRIC_IN]);
    l->landing.failed = 1;
    fabric_backlog_add(s, l);
}

/* Receives what is still to come by IN. */
static void fabric_take_in(fabric_self *s, fabric_link *l) {
    fabric_landing *in = &l->landing;
    fabric_way *w = &l->way[FABRIC_IN];
    uint32_t number = (uint32_t)in->offer.address;
    if (in->to == NULL && s->scratch == NULL && (s->scratch = s->host->alloc(s->host, FABRIC_PART)) == NULL) {
        fabric_in_give_up(s, l);
        return;
    }
    uint64_t part = fabric_part(s, in->bytes);
    while (in->asked < in->bytes && !in->failed && !s->failed) {
        if ((int32_t)(l->in_lost - number) >= 0) {
            in->failed = 1;
            fabric_backlog_add(s, l);
            return;
        }
        struct fid_ep *ep = w->number == number ? fabric_strand_of(s, w, in->asked, part)->ep : NULL;
        if (ep == NULL) {
            fabric_pull_stopped(s, l, 0, -FI_EAGAIN);
            return;
        }
        uint64_t left = in->bytes - in->asked, bytes = left < part ? left : part;
        fabric_slot *slot = fabric_read_slot(s, FABRIC_READ);
        if (slot == NULL) {
            fabric_in_give_up(s, l);
            return;
        }
        slot->peer = l->peer;
        slot->number = number;
        slot->length = (uint32_t)bytes;
        ssize_t result = fi_recv(ep, in->to != NULL ? in->to + in->asked : s->scratch, bytes, NULL, 0, &slot->context);
        if (!fabric_pull_began(s, l, slot, result)) {
            return;
        }
    }
}

/* Starts reads of what is still to be read, split over the rails: each part has its rail, whichever read has ended. */
static void fabric_pull(fabric_self *s, fabric_link *l) {
    fabric_landing *in = &l->landing;
    if (s->connects) {
        fabric_take_in(s, l);
        return;
    }
    uint64_t part = fabric_rail_part(s, in->bytes);
    while (in->asked < in->bytes && !in->failed && !s->failed) {
        uint64_t left = in->bytes - in->asked, bytes = left < part ? left : part;
        int32_t rail = (int32_t)(in->asked / part % (uint64_t)s->rail_count);
        fi_addr_t from = s->peers[l->peer].at[rail];
        fabric_slot *slot = from != FI_ADDR_NOTAVAIL ? fabric_read_slot(s, FABRIC_READ) : NULL; /* the link may have been cut */
        if (slot == NULL) {
            in->failed = 1;
            fabric_backlog_add(s, l);
            return;
        }
        slot->peer = l->peer;
        slot->rail = rail;
        slot->length = (uint32_t)bytes;
        void *desc = in->region != NULL ? fi_mr_desc(in->region->mr[rail]) : NULL;
        ssize_t result = fi_read(s->rails[rail].ep, in->to + in->asked, bytes, desc, from, in->offer.address + in->asked,
                                 in->offer.key[rail], &slot->context);
        fabric_asked(l, rail, result);
        if (!fabric_pull_began(s, l, slot, result)) {
            return;
        }
    }
}

/* Where the provider wants it, the landing is registered too; without that the peer is asked to send. */
static void fabric_pull_begin(fabric_self *s, fabric_link *l) {
    fabric_landing *in = &l->landing;
    in->since_ns = s->host->now_ns(s->host);
    in->failed = fabric_is_withdrawn(l) || fabric_reads_paused(s, l);
    if (!in->failed && (s->mr_mode & FI_MR_LOCAL) != 0) {
        in->region = fabric_region_get(s, in->to, in->bytes, FI_READ, FABRIC_HOST);
        in->failed = in->region == NULL;
    }
    if (in->failed) {
        fabric_backlog_add(s, l);
    } else {
        fabric_pull(s, l);
    }
}

/* What was read, or could not be, is not to be used: the peer sends it. */
static void fabric_pull_refuse(fabric_self *s, fabric_link *l) {
    fabric_landing *in = &l->landing;
    if (s->connects && l->way[FABRIC_IN].number == (uint32_t)in->offer.address) {
        fabric_way_close(s, &l->way[FABRIC_IN]); /* it may hold some of that still */
    }
    in->refused = 1;
    in->checking = 0;
    in->done = 0;
    l->refusing = 1;
    l->withdrawn &= ~((uint64_t)1 << l->pulled % 64);
    fabric_landing_release(s, l);
}

/* What was read may be used. */
static void fabric_read_well(fabric_self *s, fabric_link *l) {
    l->no_reads_for_ns = 0;
    fabric_landing_end(s, l, DDL_OK);
    fabric_turns(s, l);
}

/* All reads of a landing have ended. */
static void fabric_pull_ended(fabric_self *s, fabric_link *l) {
    fabric_landing *in = &l->landing;
    if (in->failed || fabric_is_withdrawn(l)) {
        fabric_pull_refuse(s, l);
    } else if (in->asked < in->bytes) {
        fabric_pull(s, l);
    } else if (!s->connects && s->host->now_ns(s->host) - in->since_ns > FABRIC_SLOW_NS) {
        in->checking = 1;
    } else {
        fabric_read_well(s, l);
    }
}

/* Whether no completion will bring the next read of a landing: it is tried again. */
static int fabric_pull_waits(const fabric_link *l) {
    const fabric_landing *in = &l->landing;
    return in->active && in->offered && !in->refused && !in->checking && in->reading == 0 && in->asked < in->bytes;
}

/* Reads that have ended, or could not be started. */
static void fabric_pull_go_on(fabric_self *s, fabric_link *l) {
    fabric_landing *in = &l->landing;
    if (!in->active || !in->offered || in->refused || in->checking) {
        return;
    }
    if (in->reading == 0) {
        fabric_pull_ended(s, l);
    } else if (in->asked < in->bytes) {
        fabric_pull(s, l);
    }
}

/* >>kinds */

static void fabric_damaged(fabric_self *s, fabric_link *l) {
    fabric_lose(s, l->peer, EBADMSG, "the peer sent a message that makes no sense");
}

/* Part of a payload that is sent, not read. */
static void fabric_land_bytes(fabric_self *s, fabric_link *l, uint64_t at, const uint8_t *from, uint64_t bytes) {
    fabric_landing *in = &l->landing;
    if (in->active && bytes == 0 && fabric_is_data(in->bytes)) { /* its sender has given it up */
        fabric_landing_end(s, l, DDL_ERR_CANCELLED);
        return;
    }
    if (!in->active || at > in->bytes || bytes > in->bytes - at || (bytes == 0 && in->bytes > 0)) {
        fabric_damaged(s, l);
        return;
    }
    if (in->to != NULL && bytes > 0) {
        memcpy(in->to + at, from, bytes);
    }
    in->done += bytes;
    if (in->done >= in->bytes) {
        fabric_landing_end(s, l, DDL_OK);
    }
}

static void fabric_on_offer(fabric_self *s, fabric_link *l, const uint8_t *header, size_t bytes) {
    fabric_landing *in = &l->landing;
    fabric_offer_body body;
    if (bytes != sizeof body) {
        fabric_damaged(s, l);
        return;
    }
    memcpy(&body, header + DDL_MESSAGE_HEADER_BYTES, sizeof body);
    if (!fabric_land(s, l, header)) {
        return;
    }
    in->offered = 1;
    in->offer = body;
    if (in->bytes != body.bytes || in->bytes == 0) {
        fabric_damaged(s, l);
    } else if (in->to == NULL && !s->connects) {
        fabric_landing_end(s, l, DDL_OK);
    } else {
        fabric_pull_begin(s, l);
    }
}

/* One ordered message whose turn it is. */
static void fabric_turn(fabric_self *s, fabric_link *l, fabric_slot *slot) {
    const uint8_t *after = slot->bytes + sizeof(fabric_head), *payload = after + DDL_MESSAGE_HEADER_BYTES;
    fabric_head head;
    memcpy(&head, slot->bytes, sizeof head);
    size_t length = slot->length - sizeof head;
    size_t core = length < DDL_MESSAGE_HEADER_BYTES ? 0 : length - DDL_MESSAGE_HEADER_BYTES;
    int whole_head = length >= DDL_MESSAGE_HEADER_BYTES;
    if (head.kind == FABRIC_WHOLE && whole_head && core == head.bytes && !l->landing.active) {
        ddl_status status = s->host->deliver(s->host, l->peer, after, payload, core);
        if (status < 0) {
            fabric_refused(s, l, status);
        }
    } else if (head.kind == FABRIC_FIRST && whole_head && core == head.bytes && !l->landing.active) {
        if (fabric_land(s, l, after)) {
            fabric_land_bytes(s, l, 0, payload, core);
        }
    } else if (head.kind == FABRIC_PIECE && length == head.bytes && l->landing.active && !l->landing.offered) {
        fabric_land_bytes(s, l, l->landing.done, after, length);
    } else if (head.kind == FABRIC_OFFER && whole_head && !l->landing.active) {
        fabric_on_offer(s, l, after, core);
    } else {
        fabric_damaged(s, l);
    }
    fabric_consume(s, l, slot);
}

/* All whose turn it is. While a payload is being read nothing overtakes it. */
static void fabric_turns(fabric_self *s, fabric_link *l) {
    while (!s->peers[l->peer].gone && !(l->landing.active && l->landing.offered)) {
        fabric_slot **at = &l->held[l->turn % FABRIC_HOLD];
        fabric_slot *slot = *at;
        if (slot == NULL) {
            return;
        }
        *at = NULL;
        l->turn++;
        fabric_turn(s, l, slot);
    }
}

/* The peer closes its end, and all that it said before has been heard: it is told so once, as it waits for that. While
 * the provider does not take the word it is tried again, for as long as the peer waits. */
static void fabric_heard_out(fabric_self *s, fabric_link *l) {
    if (l->bye_at_once && !s->peers[l->peer].gone) {
        fabric_lose(s, l->peer, ECANCELED, "the peer closed the link, as memory was wanted back");
        return;
    }
    if (!l->bye || l->turn != l->bye_at || l->landing.active || s->peers[l->peer].gone) {
        return;
    }
    fabric_head head = fabric_head_of(s, l, FABRIC_ACK, FABRIC_HEARD, 0);
    if (fabric_put(s, l, &head, NULL, 0, NULL, 0) == FABRIC_LATER && l->broken == 0) {
        uint64_t now = s->host->now_ns(s->host);
        l->bye_ns = l->bye_ns != 0 ? l->bye_ns : now;
        if (now - l->bye_ns < FABRIC_LINGER_NS) {
            s->stuck = 1; /* the timer runs: the time ends also when nothing happens */
            fabric_backlog_keep(s, l);
            return;
        }
    }
    fabric_lose(s, l->peer, 0, "the peer closed its end");
}

static void fabric_on_repair(fabric_self *s, fabric_link *l, const fabric_slot *slot, const fabric_head *head) {
    uint64_t at;
    fabric_landing *in = &l->landing;
    if ((int32_t)(l->pulled - head->sequence) > 0) {
        return; /* the word that it is given up has overtaken it */
    }
    if (in->checking == 2) { /* it was withdrawn */
        in->checking = 0;
        in->refused = 1;
        in->done = 0;
    }
    if (slot->length != sizeof *head + sizeof at + head->bytes || !in->refused || head->sequence != l->pulled) {
        fabric_damaged(s, l);
        return;
    }
    memcpy(&at, slot->bytes + sizeof *head, sizeof at);
    fabric_land_bytes(s, l, at, slot->bytes + sizeof *head + sizeof at, head->bytes);
    fabric_turns(s, l);
}

static void fabric_on_valid(fabric_self *s, fabric_link *l, const fabric_head *head) {
    if (l->landing.active && l->landing.checking == 2 && head->sequence == l->pulled) {
        fabric_read_well(s, l);
    }
}

/* Where the provider keeps the order, a gap means that messages are lost: it made a new connection by itself after the old
 * one broke. */
static void fabric_gap_look(fabric_self *s, fabric_link *l) {
    if (s->ordered && l->arrived != l->turn && l->held[l->turn % FABRIC_HOLD] == NULL && !s->peers[l->peer].gone) {
        fabric_lose(s, l->peer, ECONNRESET, "the connection broke, and messages are missing");
    }
}

/* A message in its place among the others. */
static void fabric_hold(fabric_self *s, fabric_link *l, fabric_slot *slot, uint32_t sequence) {
    uint32_t ahead = sequence - l->turn;
    fabric_slot **at = &l->held[sequence % FABRIC_HOLD];
    if (ahead >= FABRIC_HOLD || *at != NULL) {
        fabric_slot_give(&s->unposted, slot);
        fabric_lose(s, l->peer, EBADMSG, "the peer sent more than it may");
        return;
    }
    l->arrived++;
    *at = slot;
    fabric_turns(s, l);
    fabric_gap_look(s, l);
}

/* >>handing on */

static void fabric_arrival(fabric_self *s, fabric_slot *slot) {
    fabric_link *l = s->peers[slot->peer].link;
    fabric_head head;
    memcpy(&head, slot->bytes, sizeof head);
    if (s->peers[slot->peer].gone) {
        fabric_slot_give(&s->unposted, slot);
    } else if (head.kind == FABRIC_REPAIR) {
        fabric_on_repair(s, l, slot, &head);
        fabric_consume(s, l, slot);
    } else if (head.kind == FABRIC_VALID) {
        fabric_on_valid(s, l, &head);
        fabric_consume(s, l, slot);
    } else if (head.kind == FABRIC_WITHDRAW) { /* noted when it came */
        fabric_consume(s, l, slot);
    } else if (head.kind == FABRIC_BYE) {
        l->bye = 1;
        l->bye_at = head.sequence;
        l->bye_at_once = head.bytes == FABRIC_AT_ONCE;
        fabric_slot_give(&s->unposted, slot);
    } else {
        fabric_hold(s, l, slot, head.sequence);
    }
    if (l->bye) {
        fabric_heard_out(s, l);
    }
}

static int fabric_dispatch(fabric_self *s) {
    int events = 0;
    while (s->arrived != NULL) {
        fabric_slot *slot = s->arrived;
        s->arrived = slot->next;
        if (s->arrived == NULL) {
            s->arrived_last = &s->arrived;
        }
        fabric_arrival(s, slot);
        events++;
    }
    return events;
}

/* Returns whether something is left that has to wait for credit, a buffer or the provider. */
static int fabric_serve_one(fabric_self *s, fabric_link *l, int *events) {
    int32_t peer = l->peer;
    l->again = 0;
    if (l->broken != 0 && !s->peers[peer].gone) {
        fabric_lose(s, peer, l->broken > 0 ? l->broken : 0, "an operation of libfabric to the peer failed");
    }
    if (s->peers[peer].gone) {
        return 0;
    }
    fabric_pull_go_on(s, l);
    fabric_heard_out(s, l);
    if (s->peers[peer].gone) {
        return 0;
    }
    *events += fabric_offers_end(s, l);
    return !s->peers[peer].gone && (!fabric_push(s, l) || l->bye || fabric_pull_waits(l));
}

/* Serves each peer that something is to be done for. The host may bring new ones meanwhile: these go to the end; all
 * leave the list only when the round is over. */
static int fabric_serve(fabric_self *s) {
    int events = 0;
    int32_t kept = 0;
    s->again = 0;
    for (int32_t i = 0; i < s->backlog_count; i++) {
        fabric_link *l = s->peers[s->backlog[i]].link;
        l->in_backlog = fabric_serve_one(s, l, &events) ? 2 : 1;
    }
    for (int32_t i = 0; i < s->backlog_count; i++) {
        int32_t peer = s->backlog[i];
        fabric_link *l = s->peers[peer].link;
        l->in_backlog = l->in_backlog == 2 || l->again;
        if (l->in_backlog) {
            s->backlog[kept++] = peer;
        }
    }
    s->backlog_count = kept;
    return events;
}

#endif /* FABRIC_RECEIVE_H */

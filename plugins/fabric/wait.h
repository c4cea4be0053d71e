/* wait: progress, sleep, and memory that is wanted back. */
#ifndef FABRIC_WAIT_H
#define FABRIC_WAIT_H

#include "device.h"

enum { FABRIC_BLIND_NS = 500000, FABRIC_ROUNDS = 4, FABRIC_ASK_BYTES = 256 << 10 };

/* What progress does, but for the end of a transport. */
static int32_t fabric_move(fabric_self *s) {
    int32_t events = 0;
    s->stuck = 0;
    if (s->cache.on_devices > 0) {
        fabric_cache_look(s);
    }
    fabric_poll(s);
    events += fabric_dispatch(s);
    events += fabric_gets_serve(s);
    if (s->backlog_count > 0) {
        events += fabric_serve(s);
    }
    for (int round = 1; s->again && round < FABRIC_ROUNDS; round++) {
        events += fabric_serve(s);
    }
    fabric_receives_post(s);
    return events;
}

/* Who polls is awake, and no thread sleeps for it: until the next sleep no packet has to wake our own set as well. */
static void fabric_unwatch(fabric_self *s) {
    for (int32_t i = 0; i < s->rail_count; i++) {
        fabric_watch(s, &s->rails[i], 0);
    }
}

static int32_t fabric_progress(void *self, int32_t expect) {
    fabric_self *s = self;
    (void)expect; /* one queue holds the completions of all peers */
    s->armed = 0;
    fabric_unwatch(s);
    int32_t events = fabric_move(s);
    return s->failed ? DDL_ERR_SYSTEM : events;
}

/* Whether a rank may sleep: 0: something has come. *blind: the provider does not say when something comes. */
static int fabric_arm_rail(const fabric_self *s, const fabric_rail *r, int *blind) {
    struct fid *fids[2];
    int count = 0, none = r->wait_fd < 0 && !s->by_sockets;
    if (!none && !s->hushed) {
        fids[count++] = &r->cq->fid;
    }
    if (s->connects) {
        fids[count++] = &r->eq->fid;
    }
    *blind |= none;
    return count == 0 || fi_trywait(r->fabric, fids, count) == 0;
}

static int fabric_socket_set(const fabric_self *s, int operation, const struct pollfd *p) {
    struct epoll_event event = {.events = ((p->events & POLLIN) != 0 ? EPOLLIN : 0) | ((p->events & POLLOUT) != 0 ? EPOLLOUT : 0)};
    return epoll_ctl(s->epoll, operation, p->fd, &event);
}

/* What is always in our set, anew. */
static int fabric_set_open(fabric_self *s) {
    struct epoll_event event = {.events = EPOLLIN};
    if (s->epoll >= 0) {
        close(s->epoll);
    }
    s->epoll = epoll_create1(EPOLL_CLOEXEC);
    int ok = s->epoll >= 0 && epoll_ctl(s->epoll, EPOLL_CTL_ADD, s->timer, &event) == 0;
    for (int32_t i = 0; i < s->rail_count && s->connects && ok; i++) {
        ok = epoll_ctl(s->epoll, EPOLL_CTL_ADD, s->rails[i].eq_fd, &event) == 0;
    }
    return ok;
}

/* Our set has the connections that libfabric looks at. They stay there: who does not sleep is not woken. Where they have changed the set
 * is made anew: a connection that was closed stays in it as long as a child of fork has it. Returns whether all are there. */
static int fabric_sockets_watch(fabric_self *s) {
    struct pollfd now[FABRIC_SOCKETS];
    struct fi_wait_pollfd wait = {.nfds = FABRIC_SOCKETS, .fd = now};
    if (fi_control(&s->rails[0].cq->fid, FI_GETWAIT, &wait) != 0) {
        return 0;
    }
    int same = wait.change_index == s->sockets_change && wait.nfds == s->socket_count;
    int all = same || fabric_set_open(s);
    for (size_t i = 0; i < wait.nfds; i++) {
        struct pollfd *old = &s->sockets[i], *p = &now[i];
        p->revents = (short)(same ? old->revents : fabric_socket_connects(p->fd)); /* there all the time */
        if (p->revents && (!same || p->events != old->events)) {
            all &= fabric_socket_set(s, same ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, p) == 0;
        }
        *old = *p;
    }
    s->socket_count = all ? wait.nfds : 0;
    s->sockets_change = wait.change_index;
    return all;
}

/* What tcp has read of a connection ahead makes no descriptor readable: fi_trywait finds it, or one more look. */
static ddl_status fabric_arm(void *self, int *out_fd) {
    fabric_self *s = self;
    int blind = 0, together = s->rail_count > 1 || s->connects;
    int failed = s->failed, came = s->hushed && fabric_poll(s);
    s->look = 1;
    *out_fd = s->epoll;
    if (s->failed) {
        return failed ? DDL_OK : DDL_IN_PROGRESS; /* progress tells it once */
    }
    if (came || s->again || s->arrived != NULL || s->late != NULL) {
        return DDL_IN_PROGRESS;
    }
    for (int32_t i = 0; i < s->rail_count; i++) {
        if (!fabric_arm_rail(s, &s->rails[i], &blind)) {
            return DDL_IN_PROGRESS;
        }
    }
    int busy = s->links != NULL; /* nobody talks to a rank that has not talked: it may look rarely */
    together |= blind || s->stuck;
    for (int32_t i = 0; i < s->rail_count; i++) {
        blind |= !fabric_watch(s, &s->rails[i], together);
    }
    blind |= s->by_sockets && !fabric_sockets_watch(s);
    together |= blind;
    if (together) {
        *out_fd = s->epoll;
        fabric_timer(s, s->stuck ? FABRIC_STUCK_NS : !blind ? 0 : busy ? FABRIC_BLIND_NS : 20 * FABRIC_BLIND_NS);
    } else { /* it wakes the core itself */
        *out_fd = s->rails[0].wait_fd;
    }
    s->armed = 1;
    return DDL_OK;
}

static ddl_status fabric_wait_open(fabric_self *s) {
    s->timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    return s->timer >= 0 && fabric_set_open(s) ? DDL_OK : DDL_ERR_SYSTEM;
}

/* >>memory_back */

/* A message, to go on with when the core has taken its own back, and its payload, unless that is given up (fabric_is_data). Of memory
 * beyond what a container allows the process would be killed: NULL, as where there is none. */
static ddl_message *fabric_orphan(fabric_self *s, const ddl_message *m) {
    size_t bytes = fabric_is_data(m->payload_bytes) ? 0 : (size_t)m->payload_bytes;
    int asks = bytes >= FABRIC_ASK_BYTES && DDL_HAS(s->host, memory_left);
    int room = !asks || s->host->memory_left(s->host) >= bytes + FABRIC_ASK_BYTES;
    ddl_message *copy = room ? s->host->alloc(s->host, sizeof *copy + bytes) : NULL;
    if (copy != NULL) {
        *copy = *m;
        copy->priv[FABRIC_IS_COPY] = 1;
        copy->payload = bytes > 0 ? memcpy(copy + 1, m->payload, bytes) : NULL;
    }
    return copy;
}

/* Reads that begin from now on see the copy: the region of that key lies there now; or nothing, where that has no payload. Where the
 * provider chooses keys or addresses, that cannot be done, and need not: it is an adapter, which reads memory that it holds pinned. */
static void fabric_offer_move(fabric_self *s, fabric_offer *o, const ddl_message *copy) {
    struct fid_mr **mr = o->region->mr;
    int ours = o->region->id == 0 && !s->failed; /* of this message alone: it was never kept for others */
    for (int32_t i = 0; i < s->rail_count && ours && (s->mr_mode & (FI_MR_PROV_KEY | FI_MR_VIRT_ADDR)) == 0; i++) {
        uint64_t key = fi_mr_key(mr[i]);
        fabric_mr_close(&mr[i]);
        int result = fabric_is_given_up(copy) ? -FI_ECANCELED
                         : fabric_mr_try(&s->rails[i], copy->payload, copy->payload_bytes, FI_REMOTE_READ, FABRIC_HOST, key, &mr[i]);
        (void)fabric_mr_made(s, &s->rails[i], result, &mr[i]); /* else the peer's read fails, and it asks for pieces */
    }
}

/* The core recalls all messages of an operation in a row. Who waits for each peer in turn waits too long where many do not
 * answer: the wait for the first that does not is that for those behind it. Returns when this one begins. */
static uint64_t fabric_recall_begins(fabric_self *s) {
    uint64_t now = s->host->now_ns(s->host);
    if (s->recall_ns == 0 || now - s->recalled_ns > FABRIC_ROW_NS) {
        s->recall_ns = now;
    }
    return now;
}

static void fabric_recall_ends(fabric_self *s, uint64_t begun) {
    s->recalled_ns = s->host->now_ns(s->host);
    if (s->recalled_ns - begun < FABRIC_AWAKE_NS && s->recalled_ns - s->recall_ns < FABRIC_AWAKE_NS) {
        s->recall_ns = 0; /* that peer looks: no row begins with it */
    }
}

/* The peer of one does not answer: all that may be recalled next is withdrawn too. What is not comes in pieces instead. */
static void fabric_offers_withdraw(fabric_self *s) {
    for (fabric_link *l = s->links; l != NULL; l = l->next) {
        for (fabric_offer *o = l->offers; o != NULL && l->broken == 0 && !s->peers[l->peer].gone; o = o->next) {
            o->withdrawn = o->withdrawn != 0 ? o->withdrawn : 1;
        }
        for (fabric_offer *o = l->offers; o != NULL && l->broken == 0 && !s->peers[l->peer].gone; o = o->next) {
            if (o->withdrawn == 1 && !fabric_push_offer(s, l, o)) {
                break;
            }
        }
    }
}

/* Tells the peer that an offer is withdrawn, and waits a little from when the word is with it: awake, it has read the payload
 * within microseconds, or answers that it will not. 1: nobody reads the memory any more, or whoever began before will check
 * what it got. */
static int fabric_offer_withdraw(fabric_self *s, fabric_link *l, fabric_offer *o) {
    uint64_t begun = s->host->now_ns(s->host), now = begun;
    int over = 0;
    if (l->broken != 0) {
        return 0;
    }
    o->withdrawn = o->withdrawn != 0 ? o->withdrawn : 1;
    do {
        fabric_poll(s);
        s->again = 1;
        if (now - begun > FABRIC_AWAKE_NS) {
            fabric_offers_withdraw(s);
        } else if (o->withdrawn == 1) {
            fabric_push_offer(s, l, o);
        }
        now = s->host->now_ns(s->host);
        if (o->refused || (int32_t)(l->ended - o->number) > 0) {
            return 1;
        }
        over = o->withdrawn == 3 ? now - o->told_ns > FABRIC_WITHDRAW_NS
                                 : now - begun > FABRIC_ROW_NS && now - s->recall_ns > FABRIC_CUT_NS;
    } while (!s->failed && l->broken == 0 && !over);
    return o->withdrawn == 3;
}

/* No part of a payload is under way when this returns: the kernel has what was, or the connection is closed; also where the rest is
 * given up, as what comes behind it would be taken for it. For that no peer is waited for which does not look. */
static int fabric_stream_hold(fabric_self *s, fabric_link *l, fabric_offer *o) {
    uint64_t begun = s->host->now_ns(s->host), now = begun;
    fabric_way *out = &l->way[FABRIC_OUT];
    int data = fabric_is_data(o->message->payload_bytes);
    o->held = 1;
    do {
        fabric_poll(s);
        s->again = 1;
        now = s->host->now_ns(s->host);
    } while (o->streaming > 0 && !s->failed && l->broken == 0 &&
             (data ? now - s->recall_ns < FABRIC_AWAKE_NS : now - begun < FABRIC_AWAKE_NS || now - s->recall_ns < FABRIC_CUT_NS));
    if (o->way == out->number && (o->streaming > 0 || (data && o->streamed < o->message->payload_bytes))) {
        fabric_log(s, DDL_LOG_INFO, "rank %d has not taken all of a message whose memory is wanted back: its connection for payloads is "
                   "made anew", l->peer);
        fabric_way_close(s, out);
    }
    return l->broken == 0;
}

/* A payload that a peer reads, or will. What has not been read when this returns is sent from a copy. A peer that cannot
 * even be told that is cut off: only that keeps it from reading what is not ours any more. EFA has no connection that could
 * be cut, and its adapter answers reads of a peer whose address was removed: there the key ends, with the registration. */
static int fabric_recall_offer(fabric_self *s, fabric_link *l, const ddl_message *m) {
    fabric_offer *o = l->offers;
    while (o != NULL && o->message != m) {
        o = o->next;
    }
    if (o == NULL) {
        return 0;
    }
    uint64_t begun = fabric_recall_begins(s);
    int safe = s->connects ? fabric_stream_hold(s, l, o) : fabric_offer_withdraw(s, l, o), pulled = (int32_t)(l->ended - o->number) > 0;
    fabric_recall_ends(s, begun);
    ddl_message *copy = safe && !pulled ? fabric_orphan(s, m) : NULL;
    o->message = copy;
    o->held = 0;
    if (copy != NULL && s->connects) {
        fabric_backlog_add(s, l);
    } else if (copy != NULL) {
        fabric_offer_move(s, o, copy);
    } else if (!pulled) {
        fabric_log(s, DDL_LOG_INFO, "%s; its link is closed, as the memory of a message is wanted back that rank %d has not "
                   "read", safe ? "there is no memory for a copy" : "a peer does not take a word", l->peer);
        fabric_part_with(s, l, safe ? ENOMEM : ECANCELED);
        if (!s->failed && fabric_drops_completions(s) && !fabric_region_renew(s, o->region)) {
            fabric_log(s, DDL_LOG_WARN, "what rank %d may still read is not registered anew; the endpoint is closed", l->peer);
            fabric_stop(s);
        }
    }
    return 1;
}

/* Of a message that went in part the rest must follow, or the peer would take the next for it: a copy does, or the word that it does not. */
static void fabric_recall(void *self, int32_t peer, ddl_message *m) {
    fabric_self *s = self;
    fabric_link *l = s->peers[peer].link;
    if (l == NULL || fabric_recall_offer(s, l, m)) {
        return;
    }
    ddl_message **at = &l->first, *copy = NULL;
    while (*at != NULL && *at != m) {
        at = &(*at)->next;
    }
    if (*at == NULL) {
        return;
    }
    int begun = m->priv[FABRIC_BEGUN] != 0;
    if (begun && (copy = fabric_orphan(s, m)) == NULL) {
        fabric_break(s, l, ENOMEM);
    }
    *at = copy != NULL ? copy : m->next;
    if (l->last == &m->next) {
        l->last = copy != NULL ? &copy->next : at;
    }
}

/* Reads into memory that is wanted back end in a moment, as a rule: the peer's provider or adapter answers them. Those
 * that do not, because the peer is stopped or computes and its provider needs its help, are ended with the link. */
static int fabric_reads_end(fabric_self *s, fabric_link *l) {
    uint64_t deadline = s->host->now_ns(s->host) + FABRIC_CUT_NS;
    while (l->landing.reading > 0 && !s->failed && s->host->now_ns(s->host) < deadline) {
        fabric_poll(s);
        s->again = 1;
    }
    return l->landing.reading == 0;
}

static void fabric_redirect(void *self, int32_t peer, void *token, void *new_landing) {
    fabric_self *s = self;
    fabric_link *l = s->peers[peer].link;
    fabric_landing *in = l != NULL ? &l->landing : NULL;
    if (in == NULL || !in->active || in->token != token) {
        return;
    }
    if (in->offered && !in->refused) {
        in->failed |= in->asked < in->bytes; /* the peer sends it: the new landing is not registered for reads */
        fabric_backlog_add(s, l);
    }
    if (s->connects && in->offered && !in->refused && (!fabric_reads_end(s, l) || in->asked < in->bytes)) {
        fabric_log(s, DDL_LOG_INFO, "a payload of rank %d does not come, and its memory is wanted back", peer);
        fabric_in_give_up(s, l);
    } else if (!fabric_reads_end(s, l)) {
        fabric_log(s, DDL_LOG_WARN, "a read from rank %d does not end; its link is closed, as the memory is wanted back",
                   peer);
        fabric_part_with(s, l, ECANCELED);
    }
    fabric_landing_release(s, l);
    in->to = new_landing;
    if (new_landing == NULL) {
        fabric_break(s, l, ENOMEM);
    }
}

#endif /* FABRIC_WAIT_H */

/* connect: connections of our own, over sockets. What ofi_rxm builds on tcp for everybody, matching, a second queue and a
 * rendezvous, the core and the rooms above have already; so here are tcp's own endpoints (FI_EP_MSG). Three ways lead to a peer:
 *
 *   words   messages, both ways; whoever calls first, and the lower rank when both do
 *   out     payloads to the peer, each behind the other, as they were offered; we call
 *   in      the peer's
 *
 * each of one connection, out and in of one for each rail, which take parts of a payload in turn. A payload is sent from the memory it
 * lies in and received into its place: nobody asks for it, since what comes before its receive is posted waits in the kernel. Memory
 * that is wanted back ends the way that uses it, out or in, and no other; a new one has the next number, which offers name, so
 * that both sides know which payloads went with the old one. Each call says the number that only members of the job can make
 * (fabric_token). */
#ifndef FABRIC_CONNECT_H
#define FABRIC_CONNECT_H

#include "loopback.h"
#include "rail.h"

enum { FABRIC_PART = DDL_MESSAGE_DATA_BYTES }; /* so much of a payload is one message of libfabric's, at most */
enum { FABRIC_CALLS = 8 };      /* in vain, each after a longer pause than the one before; then the pause stays */
enum { FABRIC_QUEUED = 128 };   /* calls that any kernel keeps for a rank that computes (net.core.somaxconn, 4096 since Linux 5.4) */
enum { FABRIC_LAST_LOOKS = 4 }; /* libfabric accepts in one, and reads who calls in the next */
#define FABRIC_CALL_NS 10000000u /* after one that failed */
/* From the first that failed, or of one that no host answers, until the peer cannot be reached; as the core's own TCP. A network may be
 * away for 2 s. */
#define FABRIC_REFUSED_NS 1000000000u
#define FABRIC_UNREACHED_NS 3500000000u
#define FABRIC_END_NS 100000000u /* for the core to hear why WORDS have ended */
#define FABRIC_CALLED_NS 10000000000u /* for a call of the lower rank's, whose first packets may be lost */

typedef struct fabric_hello {
    uint64_t token;
    int32_t source;
    uint32_t kind, number, zero;
} fabric_hello;

static void fabric_break(fabric_self *s, fabric_link *l, int error);
static fabric_link *fabric_link_of(fabric_self *s, int32_t peer);
static int fabric_is_from(fabric_self *s, int32_t source, uint64_t token);

/* >>parts */

/* What both sides cut a payload into. */
static uint64_t fabric_part(const fabric_self *s, uint64_t bytes) {
    uint64_t part = fabric_rail_part(s, bytes);
    return part < FABRIC_PART ? part : FABRIC_PART;
}

/* The connection that a part goes by. */
static fabric_strand *fabric_strand_of(fabric_self *s, fabric_way *w, uint64_t at, uint64_t part) {
    return &w->strand[at / part % (uint64_t)s->rail_count];
}

/* >>opening */

static ddl_status fabric_listen(fabric_self *s, fabric_rail *r) {
    struct fi_eq_attr eq = {.wait_obj = FI_WAIT_FD};
    int result = s->lib.fabric(r->info->fabric_attr, &r->fabric, NULL);
    if (result != 0) {
        return fabric_failed(s, "fi_fabric", result);
    }
    if ((result = fi_domain(r->fabric, r->info, &r->domain, NULL)) != 0) {
        return fabric_failed(s, "fi_domain", result);
    }
    if ((result = fi_eq_open(r->fabric, &eq, &r->eq, NULL)) != 0 ||
        (result = fi_control(&r->eq->fid, FI_GETWAIT, &r->eq_fd)) != 0) {
        return fabric_failed(s, "fi_eq_open", result);
    }
    if ((result = fabric_cq_open(s, r)) != 0) {
        return fabric_failed(s, "fi_cq_open", result);
    }
    if ((result = fi_passive_ep(r->fabric, r->info, &r->listener, NULL)) != 0 ||
        (result = fi_pep_bind(r->listener, &r->eq->fid, 0)) != 0 || (result = fi_listen(r->listener)) != 0) {
        return fabric_failed(s, "listening", result);
    }
    return DDL_OK;
}

/* One connection for messages to each peer, and two on each rail for payloads, beside what the core needs, which has seen to three for
 * each rank. Where there are fewer, who cannot be called for messages is lost to us (EMFILE); a payload for which there is none goes in
 * pieces. A job whose ranks talk to few needs few: no error. */
static void fabric_descriptors_raise(fabric_self *s) {
    struct rlimit limit;
    rlim_t wanted = 64 + (4 + 2 * (rlim_t)s->rail_count) * (rlim_t)s->world_size;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted) {
        return;
    }
    limit.rlim_cur = wanted < limit.rlim_max ? wanted : limit.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &limit);
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < wanted) {
        fabric_log(s, s->rank == 0 ? DDL_LOG_WARN : DDL_LOG_INFO, "%d ranks that all exchange large payloads by connections of tcp "
                   "need %llu file descriptors each, and this one may have %llu: where they run out, ranks are lost (\"Too many open "
                   "files\"). Raise it where the job is started: ulimit -n %llu, LimitNOFILE= of systemd, --ulimit nofile= of a "
                   "container", s->world_size, (unsigned long long)wanted, (unsigned long long)limit.rlim_cur, (unsigned long long)wanted);
    }
}

static ddl_status fabric_connections_open(fabric_self *s) {
    ddl_status status = DDL_OK;
    fabric_descriptors_raise(s);
    s->paces = fabric_paces();
    for (int32_t i = 0; i < s->rail_count && status == DDL_OK; i++) {
        status = fabric_listen(s, &s->rails[i]);
    }
    struct fi_rx_attr receives = *s->rails[0].info->rx_attr;
    receives.size = FABRIC_RECEIVES;
    int result = status == DDL_OK ? fi_srx_context(s->rails[0].domain, &receives, &s->shared, NULL) : 0;
    return result != 0 ? fabric_failed(s, "fi_srx_context", result) : status;
}

/* >>one way */

static int32_t fabric_strands(const fabric_self *s, const fabric_way *w) { return w->kind == FABRIC_WORDS ? 1 : s->rail_count; }

static int fabric_way_has(const fabric_self *s, const fabric_way *w, int state) {
    int has = 1;
    for (int32_t i = 0; i < fabric_strands(s, w); i++) {
        has &= w->strand[i].state == state;
    }
    return has;
}

static void fabric_strand_enter(fabric_self *s, fabric_strand *strand, int state) {
    s->calling += (state == FABRIC_CALLING || state == FABRIC_ANSWERING) -
                  (strand->state == FABRIC_CALLING || strand->state == FABRIC_ANSWERING);
    strand->state = state;
}

/* What was under way by a way that is closed has failed; not all of it has a completion. */
static void fabric_way_fail(fabric_way *w) {
    fabric_link *l = w->link;
    fabric_landing *in = &l->landing;
    if (w->kind == FABRIC_IN && in->active && in->offered && (uint32_t)in->offer.address == w->number) {
        l->reads -= in->reading;
        in->reading = 0;
        in->failed |= in->done < in->bytes;
    }
    for (fabric_offer *o = l->offers; o != NULL && w->kind == FABRIC_OUT; o = o->next) {
        o->streaming = 0;
    }
    if (w->kind == FABRIC_IN && (int32_t)(w->number - l->in_lost) > 0) {
        l->in_lost = w->number;
    }
}

/* After this it touches no memory any more. The peer sees the end also where a child of fork has the descriptors still. */
static void fabric_way_close(fabric_self *s, fabric_way *w) {
    int closed = 0;
    w->ended = 0;
    for (int32_t i = 0; i < FABRIC_RAILS_MAX; i++) {
        fabric_strand *strand = &w->strand[i];
        int complete = strand->state != FABRIC_SHUT; /* libfabric crashes where queues are missing */
        fabric_strand_enter(s, strand, FABRIC_SHUT);
        if (strand->ep != NULL) {
            (void)(complete && fi_shutdown(strand->ep, 0));
            fi_close(&strand->ep->fid);
            strand->ep = NULL;
            closed = 1;
        }
    }
    if (closed) {
        fabric_way_fail(w);
        fabric_backlog_add(s, w->link);
    }
}

static void fabric_ways_close(fabric_self *s, fabric_link *l) {
    for (int i = 0; i < FABRIC_WAYS; i++) {
        fabric_way_close(s, &l->way[i]);
    }
}

static int fabric_strand_make(fabric_self *s, fabric_strand *strand, struct fi_info *info) {
    fabric_rail *r = &s->rails[strand->rail];
    int result = fi_endpoint(r->domain, info, &strand->ep, strand);
    if (result != 0) {
        strand->ep = NULL;
        return result;
    }
    result = fi_ep_bind(strand->ep, &r->eq->fid, 0);
    result = result == 0 ? fi_ep_bind(strand->ep, &r->cq->fid, FI_TRANSMIT | FI_RECV) : result;
    result = result == 0 && strand->way->kind == FABRIC_WORDS ? fi_ep_bind(strand->ep, &s->shared->fid, 0) : result;
    return result == 0 ? fi_enable(strand->ep) : result;
}

/* Of two that call each other the higher rank is refused, and called: it cannot tell when that will be, and gives up late. */
static uint64_t fabric_patience(const fabric_self *s, const fabric_way *w, int error) {
    return s->rank > w->link->peer ? FABRIC_CALLED_NS : error == ECONNREFUSED ? FABRIC_REFUSED_NS : FABRIC_UNREACHED_NS;
}

/* It did not come about, and is called once more in a while, or given up: after some time, as a call may fail at once or take the kernel
 * seconds, and who computes looks rarely. What is said then is that there never was a connection: of an errno like EHOSTUNREACH the core
 * would learn that the whole host is gone. */
static void fabric_way_failed(fabric_self *s, fabric_way *w, int error) {
    int32_t peer = w->link->peer;
    uint64_t now = s->host->now_ns(s->host);
    fabric_way_close(s, w);
    if (w->failures == 0) {
        w->since_ns = error == ETIMEDOUT ? w->called_ns : now;
    }
    w->failures += w->failures < FABRIC_CALLS;
    w->retry_ns = now + FABRIC_CALL_NS * (uint64_t)w->failures;
    fabric_log(s, DDL_LOG_DEBUG, "a connection to rank %d did not come about: %s", peer, fabric_error(s, error));
    if (w->kind == FABRIC_WORDS && now - w->since_ns >= fabric_patience(s, w, error)) {
        int ours = error == EMFILE || error == ENFILE || error == ENOMEM; /* what the core says of it is of networks */
        fabric_log(s, ours && !s->told_calls ? DDL_LOG_WARN : DDL_LOG_INFO, "no connection of tcp to rank %d comes about: %s%s", peer,
                   fabric_error(s, error), ours ? ", here. Raise the limit (ulimit -n)" : "");
        s->told_calls |= ours;
        fabric_break(s, w->link, error == ECONNREFUSED ? error : ENOTCONN);
    }
}

/* Calls a peer by its name. */
static int fabric_strand_call(fabric_self *s, fabric_strand *strand, const uint8_t *name, const fabric_hello *hello) {
    const struct fi_info *info = s->rails[strand->rail].info;
    struct sockaddr_storage ours, theirs;
    size_t bytes = info->src_addrlen;
    int here = s->paces && info->src_addr != NULL && bytes <= sizeof ours;
    if (here) {
        memset(&ours, 0, sizeof ours);
        memset(&theirs, 0, sizeof theirs);
        memcpy(&ours, info->src_addr, bytes);
        memcpy(&theirs, name, bytes);
        here = fabric_ip_equal(&ours, &theirs);
    }
    int next = here ? fabric_next_descriptor(s->timer) : -1;
    int result = fabric_strand_make(s, strand, s->rails[strand->rail].info);
    if (here && result == 0 && !fabric_unpace(next, &ours, (socklen_t)bytes)) {
        fabric_log(s, DDL_LOG_DEBUG, "the socket of a connection of this host was not found: it may be paced");
    }
    return result == 0 ? fi_connect(strand->ep, name, hello, sizeof *hello) : result;
}

static void fabric_way_call(fabric_self *s, fabric_way *w) {
    const fabric_peer *p = &s->peers[w->link->peer];
    fabric_hello hello = {.token = p->token_out, .source = s->rank, .kind = (uint32_t)w->kind, .number = ++w->number};
    const fabric_stall *stall = &w->link->send_stall;
    w->called_ns = s->host->now_ns(s->host);
    int other = stall->looked_ns == 0 || w->since_ns < stall->since_ns; /* nothing was to be sent then, or was taken back */
    if (w->kind == FABRIC_WORDS && other && w->called_ns > w->retry_ns + FABRIC_REFUSED_NS) {
        w->failures = 0;
    }
    for (int32_t i = 0; i < fabric_strands(s, w); i++) {
        fabric_strand *strand = &w->strand[i];
        int result = fabric_strand_call(s, strand, p->names + (size_t)i * s->address.name_bytes, &hello);
        if (result != 0) {
            fabric_way_failed(s, w, -result);
            return;
        }
        fabric_strand_enter(s, strand, FABRIC_CALLING);
    }
}

/* Whether a call has taken too long. A peer that computes answers late: payloads do not wait for it longer than a second, and go in pieces;
 * messages do, once its kernel has answered. Where that does not, ours would ask for two minutes; nor does one answer more calls than may
 * wait there, before its rank looks: in a job of so many ranks nobody is late. */
static int fabric_way_is_late(fabric_self *s, fabric_way *w, uint64_t now) {
    struct sockaddr_storage at;
    size_t bytes = sizeof at;
    if (w->kind != FABRIC_WORDS) {
        return w->kind == FABRIC_OUT && now - w->called_ns > FABRIC_CONNECT_NS;
    }
    uint64_t since = w->failures > 0 ? w->since_ns : w->called_ns;
    if (s->world_size > FABRIC_QUEUED || now - since < fabric_patience(s, w, ETIMEDOUT)) {
        return 0;
    }
    if (fi_getpeer(w->strand[0].ep, &at, &bytes) == -FI_ENOTCONN) {
        int now_wanted = w->link->send_stall.looked_ns != 0;
        if (!now_wanted) { /* it was called for something of another time */
            fabric_way_close(s, w);
            w->failures = 0;
        }
        return now_wanted;
    }
    w->failures = 0;
    w->called_ns = now;
    return 0;
}

/* Whether it is open. Else it is called, now or when some time has passed. */
static int fabric_way_is_open(fabric_self *s, fabric_way *w) {
    if (fabric_way_has(s, w, FABRIC_OPEN)) {
        return 1;
    }
    uint64_t now = s->host->now_ns(s->host);
    int shut = fabric_way_has(s, w, FABRIC_SHUT);
    if (shut && w->link->broken == 0 && now >= w->retry_ns) {
        fabric_way_call(s, w);
    } else if (!shut && fabric_way_is_late(s, w, now)) {
        fabric_way_failed(s, w, ETIMEDOUT);
    }
    return 0;
}

/* >>events */

/* Whether a call that has come by a rail is answered. Else it is refused. */
static int fabric_call_answer(fabric_self *s, int32_t rail, const fabric_hello *hello, struct fi_info *info) {
    int known = !s->failed && fabric_is_from(s, hello->source, hello->token) && !s->peers[hello->source].gone;
    fabric_link *l = known ? fabric_link_of(s, hello->source) : NULL;
    int words = hello->kind == FABRIC_WORDS;
    if (l == NULL || (words ? rail != 0 : hello->kind != FABRIC_OUT)) {
        return 0;
    }
    fabric_way *w = &l->way[words ? FABRIC_WORDS : FABRIC_IN];
    fabric_strand *strand = &w->strand[rail];
    if (words && (strand->state == FABRIC_CALLING ? s->rank < l->peer : strand->ep != NULL)) {
        return 0; /* ours counts */
    }
    if (!words && ((int32_t)(hello->number - w->number) < 0 || (int32_t)(hello->number - l->in_lost) <= 0)) {
        return 0; /* given up meanwhile */
    }
    if (words || hello->number != w->number || strand->ep != NULL) {
        fabric_way_close(s, w);
    }
    w->number = hello->number;
    w->called_ns = s->host->now_ns(s->host); /* by the peer */
    int result = fabric_strand_make(s, strand, info);
    result = result == 0 ? fi_accept(strand->ep, NULL, 0) : result;
    if (result == 0) {
        fabric_strand_enter(s, strand, FABRIC_ANSWERING);
        return 1;
    }
    int made = strand->ep != NULL; /* it has taken the connection over, and closes it */
    fabric_way_failed(s, w, -result);
    return made;
}

static void fabric_way_ends(fabric_self *s, fabric_way *w, int error) {
    if (w->ended == 0) {
        w->ended = error > 0 ? error : ECONNRESET;
        w->ended_ns = s->host->now_ns(s->host);
    }
    s->ends = 1;
}

/* A connection has ended, or has not come about. What came by one that was open is read first: see fabric_poll. */
static void fabric_strand_ended(fabric_self *s, fabric_strand *strand, int error) {
    fabric_way *w = strand->way;
    error = fabric_reset(error);
    if (w->kind == FABRIC_IN || fabric_way_has(s, w, FABRIC_OPEN)) {
        fabric_way_ends(s, w, error);
    } else {
        fabric_way_failed(s, w, error > 0 ? error : ECONNRESET);
    }
}

static void fabric_event(fabric_self *s, int32_t rail, uint32_t event, struct fi_eq_cm_entry *entry, size_t bytes) {
    fabric_hello hello;
    fabric_strand *strand = entry->fid->context;
    if (event == FI_CONNREQ) {
        int whole = bytes >= sizeof *entry + sizeof hello;
        memcpy(&hello, entry->data, sizeof hello);
        if (!whole || !fabric_call_answer(s, rail, &hello, entry->info)) {
            fi_reject(s->rails[rail].listener, entry->info->handle, NULL, 0);
        }
        s->lib.freeinfo(entry->info);
    } else if (event == FI_CONNECTED && strand != NULL) {
        fabric_strand_enter(s, strand, FABRIC_OPEN);
        strand->way->failures = fabric_way_has(s, strand->way, FABRIC_OPEN) ? 0 : strand->way->failures;
        fabric_backlog_add(s, strand->way->link);
    } else if (event == FI_SHUTDOWN && strand != NULL) {
        fabric_strand_ended(s, strand, 0);
    }
}

/* Calls, answers and ends that a rail has seen. */
static void fabric_events(fabric_self *s, fabric_rail *r) {
    _Alignas(struct fi_eq_cm_entry) uint8_t room[sizeof(struct fi_eq_cm_entry) + 256];
    for (int i = 0; i < FABRIC_BATCH; i++) {
        struct fi_eq_err_entry wrong;
        uint32_t event;
        ssize_t n = fi_eq_read(r->eq, &event, room, sizeof room, 0);
        memset(&wrong, 0, sizeof wrong);
        if (n >= (ssize_t)sizeof(struct fi_eq_cm_entry)) {
            fabric_event(s, (int32_t)(r - s->rails), event, (struct fi_eq_cm_entry *)(void *)room, (size_t)n);
        } else if (n == -FI_EAVAIL && fi_eq_readerr(r->eq, &wrong, 0) > 0) {
            if (wrong.fid != NULL && wrong.fid->context != NULL) {
                fabric_strand_ended(s, wrong.fid->context, wrong.err);
            }
        } else {
            return;
        }
    }
}

/* This rank closes: calls that have come are refused. Of one that libfabric has accepted, and whose few bytes have not come
 * yet, tcp of 1.17 keeps the socket until the process ends. */
static void fabric_calls_refuse(fabric_self *s) {
    s->failed = 1;
    for (int32_t i = 0; i < s->rail_count; i++) {
        for (int look = 0; s->rails[i].listener != NULL && s->rails[i].eq != NULL && look < FABRIC_LAST_LOOKS; look++) {
            fabric_events(s, &s->rails[i]);
        }
    }
}

/* Ways that have ended, when all that came by them has been read. The core knows of a process's end by itself, a moment later than its
 * connections end, and then says what happened: until then nobody is told that WORDS are gone. */
static void fabric_ends(fabric_self *s) {
    s->ends = 0;
    for (fabric_link *l = s->links; l != NULL; l = l->next) {
        for (int i = 0; i < FABRIC_WAYS; i++) {
            fabric_way *w = &l->way[i];
            if (w->ended == 0) {
                continue;
            }
            if (w->kind != FABRIC_WORDS) {
                fabric_way_close(s, w);
            } else if (s->host->now_ns(s->host) - w->ended_ns < FABRIC_END_NS && !s->peers[l->peer].gone) {
                s->ends = s->stuck = 1; /* the timer runs */
            } else {
                fabric_break(s, l, w->ended);
                w->ended = 0;
            }
        }
    }
}

#endif /* FABRIC_CONNECT_H */

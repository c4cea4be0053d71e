/* coll: what ranks tell each other about themselves, and the links that they make of it. Who tells whom, and when, is
 * for join.h (a job begins) and grow.h (a newcomer comes). */
#ifndef DDL_COLL_LINKS_H
#define DDL_COLL_LINKS_H

#include "agree.h"
#include "transports.h"

enum { DDL__BLOB_MAGIC = 0x326a6c64, DDL__NAME_BYTES = 16, DDL__CORES_MAX = 1 << 20 };

/* What a rank tells the others about itself. */
enum { DDL__PASSES_PROCESS = 1, DDL__TRACES = 2 };

typedef struct ddl__blob {
    uint32_t magic;
    int32_t version, pid, cores, board_fd;
    int32_t abilities; /* DDL__PASSES_PROCESS: to ranks of other spaces; DDL__TRACES */
    int32_t guard;          /* its index in ddl__guards */
    uint64_t pid_start, pid_space;
    char host_id[64], host_name[32];
    uint8_t pass_name[DDL__PASS_NAME_BYTES];
    uint8_t nonce[DDL__MAC_NONCE_BYTES];
    struct {
        char name[DDL__NAME_BYTES];
        uint32_t bytes;
        uint8_t address[DDL__ADDRESS_BYTES];
    } transports[DDL__BLOB_TRANSPORTS];
    uint64_t core_set;
} ddl__blob;

/* On the wire: the members in their order, little-endian, without gaps. All of one size, because a rendezvous is one
 * all-gather. */
enum {
    DDL__BLOB_AT_HOST = 7 * 4 + 2 * 8, /* host_id */
    DDL__BLOB_AT_TRANSPORTS = DDL__BLOB_AT_HOST + 64 + 32 + DDL__PASS_NAME_BYTES + DDL__MAC_NONCE_BYTES,
    DDL__BLOB_TRANSPORT_BYTES = DDL__NAME_BYTES + 4 + DDL__ADDRESS_BYTES,
    DDL__BLOB_BYTES = DDL__BLOB_AT_TRANSPORTS + DDL__BLOB_TRANSPORTS * DDL__BLOB_TRANSPORT_BYTES + 8
};

static void ddl__blob_write(const ddl__blob *b, uint8_t out[DDL__BLOB_BYTES]) {
    ddl__writer w = ddl__writer_of(out, DDL__BLOB_BYTES);
    ddl__put_u32(&w, b->magic);
    ddl__put_u32(&w, (uint32_t)b->version);
    ddl__put_u32(&w, (uint32_t)b->pid);
    ddl__put_u32(&w, (uint32_t)b->cores);
    ddl__put_u32(&w, (uint32_t)b->board_fd);
    ddl__put_u32(&w, (uint32_t)b->abilities);
    ddl__put_u32(&w, (uint32_t)b->guard);
    ddl__put_u64(&w, b->pid_start);
    ddl__put_u64(&w, b->pid_space);
    ddl__put_bytes(&w, b->host_id, sizeof b->host_id);
    ddl__put_bytes(&w, b->host_name, sizeof b->host_name);
    ddl__put_bytes(&w, b->pass_name, sizeof b->pass_name);
    ddl__put_bytes(&w, b->nonce, sizeof b->nonce);
    for (int32_t i = 0; i < DDL__BLOB_TRANSPORTS; i++) {
        ddl__put_bytes(&w, b->transports[i].name, DDL__NAME_BYTES);
        ddl__put_u32(&w, b->transports[i].bytes);
        ddl__put_bytes(&w, b->transports[i].address, DDL__ADDRESS_BYTES);
    }
    ddl__put_u64(&w, b->core_set);
}

static void ddl__blob_read(const uint8_t in[DDL__BLOB_BYTES], ddl__blob *b) {
    ddl__reader r = ddl__reader_of(in, DDL__BLOB_BYTES);
    b->magic = ddl__get_u32(&r);
    b->version = (int32_t)ddl__get_u32(&r);
    b->pid = (int32_t)ddl__get_u32(&r);
    b->cores = (int32_t)ddl__get_u32(&r);
    b->board_fd = (int32_t)ddl__get_u32(&r);
    b->abilities = (int32_t)ddl__get_u32(&r);
    b->guard = (int32_t)ddl__get_u32(&r);
    b->pid_start = ddl__get_u64(&r);
    b->pid_space = ddl__get_u64(&r);
    ddl__get_bytes(&r, b->host_id, sizeof b->host_id);
    ddl__get_bytes(&r, b->host_name, sizeof b->host_name);
    ddl__get_bytes(&r, b->pass_name, sizeof b->pass_name);
    ddl__get_bytes(&r, b->nonce, sizeof b->nonce);
    for (int32_t i = 0; i < DDL__BLOB_TRANSPORTS; i++) {
        ddl__get_bytes(&r, b->transports[i].name, DDL__NAME_BYTES);
        b->transports[i].bytes = ddl__get_u32(&r);
        ddl__get_bytes(&r, b->transports[i].address, DDL__ADDRESS_BYTES);
    }
    b->core_set = ddl__get_u64(&r);
}

/* How frames are guarded: ranks must agree. */
static const char *const ddl__guards[] = {"no DDL_MAC", "DDL_MAC=1 without DDL_CHECK=payload",
                                          "DDL_MAC=1 with DDL_CHECK=payload"};

static int32_t ddl__guard(const ddl_context *c) { return !c->settings.mac ? 0 : c->settings.check_payload ? 2 : 1; }

static void ddl__blob_fill(const ddl_context *c, ddl__blob *b) {
    memset(b, 0, sizeof *b);
    b->guard = ddl__guard(c);
    b->magic = DDL__BLOB_MAGIC;
    b->version = ddl_version();
    b->pid = (int32_t)getpid();
    b->cores = DDL__MIN(c->cores, DDL__CORES_MAX);
    b->core_set = c->settings.core_set;
    b->board_fd = c->board_fd;
    b->abilities = (ddl__can_pass_process() ? DDL__PASSES_PROCESS : 0) | (c->trace != NULL ? DDL__TRACES : 0);
    b->pid_start = ddl__process_start(b->pid);
    b->pid_space = ddl__process_space();
    memcpy(b->nonce, c->nonce, sizeof b->nonce);
    memcpy(b->pass_name, c->pass_name, sizeof b->pass_name);
    snprintf(b->host_id, sizeof b->host_id, "%.63s", c->settings.host_id);
    if (gethostname(b->host_name, sizeof b->host_name - 1) != 0 || b->host_name[0] == 0) {
        snprintf(b->host_name, sizeof b->host_name, "?");
    }
    for (int32_t i = 0; i < c->endpoint_count; i++) {
        snprintf(b->transports[i].name, DDL__NAME_BYTES, "%.15s", c->endpoints[i].plugin->name);
        b->transports[i].bytes = c->endpoints[i].address_bytes;
        memcpy(b->transports[i].address, c->endpoints[i].address, c->endpoints[i].address_bytes);
        const ddl__endpoint *e = &c->endpoints[i];
        size_t bytes = DDL__ADDRESS_BYTES;
        if (c->joined && DDL_HAS(e->table, peer_native) &&
            e->table->address(e->self, b->transports[i].address, &bytes) == DDL_OK) {
            b->transports[i].bytes = (uint32_t)bytes; /* newcomers hear what this rank has by now */
        }
    }
}

/* For the keys of DDL_MAC. */
static ddl_status ddl__nonce_make(ddl_context *c, ddl__blob *mine) {
    if (c->settings.mac && ddl__random(c->nonce, sizeof c->nonce) < 0) {
        return ddl__error(c, DDL_ERR_SYSTEM, "ddl_init: no random numbers for the keys of DDL_MAC");
    }
    memcpy(mine->nonce, c->nonce, sizeof mine->nonce);
    return DDL_OK;
}

/* >>links */

static ddl_status ddl__blob_check(ddl_context *c, const ddl__blob *b, int32_t rank) {
    if (b->magic != DDL__BLOB_MAGIC || memchr(b->host_id, 0, sizeof b->host_id) == NULL ||
        memchr(b->host_name, 0, sizeof b->host_name) == NULL || b->cores < 1 || b->cores > DDL__CORES_MAX) {
        return ddl__error(c, DDL_ERR_CORRUPT,
                          "ddl_init: what rank %d told about itself is damaged, or it is not ddl %d.%d", rank,
                          DDL_VERSION_MAJOR, DDL_VERSION_MINOR);
    }
    if (b->version / 10000 != ddl_version() / 10000) {
        return ddl__error(c, DDL_ERR_VERSION,
                          "ddl_init: rank %d uses ddl %d.%d, this rank %d.%d; build all with one version", rank,
                          b->version / 10000, b->version / 100 % 100, DDL_VERSION_MAJOR, DDL_VERSION_MINOR);
    }
    if (b->guard != ddl__guard(c)) {
        bool known = b->guard >= 0 && b->guard < (int32_t)DDL__COUNT_OF(ddl__guards);
        return ddl__error(c, DDL_ERR_CONFIG, "ddl_init: rank %d has %s, this rank %s; set both alike on all ranks",
                          rank, known ? ddl__guards[b->guard] : "another DDL_MAC", ddl__guards[ddl__guard(c)]);
    }
    return DDL_OK;
}

/* What a transport offers towards a rank. */
typedef struct ddl__reach {
    bool reaches;
    bool gave_up; /* it did, until memory or the like was to be shared */
    uint64_t latency_ns, bytes_per_s; /* its own guess */
} ddl__reach;

/* Tells each transport that both ranks have about the rank. offers: of this rank, by endpoint. newcomer: one of the two
 * joins a job that runs, so that only transports serve that can begin anew with one peer. */
static void ddl__link_offers(ddl_context *c, int32_t rank, const ddl__blob *b, bool newcomer, ddl__reach *offers) {
    for (int32_t i = 0; i < c->endpoint_count; i++) {
        const ddl__endpoint *e = &c->endpoints[i];
        offers[i] = (ddl__reach){.latency_ns = 1, .bytes_per_s = 1};
        bool watched = c->links[rank].same_space || c->links[rank].passes_process;
        if (newcomer && !DDL_HAS(e->table, peer_again)) {
            continue;
        }
        if ((e->table->flags & DDL_TRANSPORT_LOCAL) != 0 && !watched) {
            continue; /* its end would go unnoticed: memory has none */
        }
        for (int32_t k = 0; k < DDL__BLOB_TRANSPORTS && !offers[i].reaches; k++) {
            offers[i].reaches =
                b->transports[k].bytes > 0 && b->transports[k].bytes <= DDL__ADDRESS_BYTES &&
                strncmp(b->transports[k].name, e->plugin->name, DDL__NAME_BYTES - 1) == 0 &&
                e->table->add_peer(e->self, rank, b->transports[k].address, b->transports[k].bytes, b->host_id,
                                   &offers[i].latency_ns, &offers[i].bytes_per_s) == DDL_OK;
        }
    }
}

/* What can run collectives with a newcomer, or of one, although messages go another way. */
static void ddl__link_native(ddl_context *c, int32_t rank, const ddl__blob *b) {
    ddl__link *l = &c->links[rank];
    for (int32_t i = 0; i < c->endpoint_count && l->same_host && l->same_space && l->native == NULL; i++) {
        ddl__endpoint *e = &c->endpoints[i];
        for (int32_t k = 0; k < DDL__BLOB_TRANSPORTS && DDL_HAS(e->table, peer_native) && e != l->endpoint; k++) {
            bool same = b->transports[k].bytes > 0 && b->transports[k].bytes <= DDL__ADDRESS_BYTES &&
                        strncmp(b->transports[k].name, e->plugin->name, DDL__NAME_BYTES - 1) == 0;
            if (same && e->table->peer_native(e->self, rank, b->transports[k].address, b->transports[k].bytes,
                                              b->host_id) == DDL_OK) {
                l->native = e;
            }
        }
    }
}

/* Whether a transport of this rank can carry data to a process that takes the place of another. */
static bool ddl__meets_newcomers(const ddl_context *c) {
    for (int32_t i = 0; i < c->endpoint_count; i++) {
        const ddl__endpoint *e = &c->endpoints[i];
        if (DDL_HAS(e->table, peer_again) && !e->only_watches && (e->table->flags & DDL_TRANSPORT_DEVICE) == 0) {
            return true;
        }
    }
    return c->endpoint_count == 0;
}

#define DDL__NO_NEWCOMERS \
    "no rank can come back: none of DDL_TRANSPORTS can begin anew with one process, as tcp can; " \
    "add tcp to DDL_TRANSPORTS on all ranks"

/* Asks transports that set something up together with their peers. Returns how many answers are still open. */
static int32_t ddl__links_settling(ddl_context *c, ddl__reach *offers, int32_t *out_rank) {
    int32_t open = 0;
    for (int32_t rank = 0; rank < c->world_size; rank++) {
        for (int32_t i = 0; i < c->endpoint_count; i++) {
            const ddl__endpoint *e = &c->endpoints[i];
            ddl__reach *o = &offers[rank * DDL__ENDPOINTS_MAX + i];
            ddl_status status = o->reaches && DDL_HAS(e->table, ready) ? e->table->ready(e->self, rank) : DDL_OK;
            o->gave_up = o->gave_up || (o->reaches && status < 0);
            o->reaches = o->reaches && status >= 0;
            open += status == DDL_IN_PROGRESS;
            *out_rank = status == DDL_IN_PROGRESS ? rank : *out_rank;
        }
    }
    return open;
}

/* A rank of this host whose process has ended, -1: none. */
static int32_t ddl__links_gone(const ddl_context *c) {
    for (int32_t rank = 0; rank < c->world_size; rank++) {
        const ddl__link *l = &c->links[rank];
        if (rank != c->rank && ddl__has_process(c, l) && ddl__process_gone(l)) {
            return rank;
        }
    }
    return -1;
}

/* The error where nothing reaches a rank: what both have, and why what they have in common does not serve. */
static ddl_status ddl__link_none(ddl_context *c, int32_t rank, const ddl__blob *b) {
    char theirs[DDL__BLOB_TRANSPORTS * (DDL__NAME_BYTES + 2)] = "", ours[sizeof theirs] = "";
    ddl__text other = {theirs, sizeof theirs, 0}, own = {ours, sizeof ours, 0};
    bool common = false;
    for (int32_t k = 0; k < DDL__BLOB_TRANSPORTS; k++) {
        if (b->transports[k].bytes > 0) {
            ddl__text_add(&other, "%s%.*s", other.used > 0 ? ", " : "", DDL__NAME_BYTES - 1, b->transports[k].name);
        }
        const ddl__endpoint *e = k < c->endpoint_count && !c->endpoints[k].only_watches ? &c->endpoints[k] : NULL;
        if (e != NULL) {
            ddl__text_add(&own, "%s%s", own.used > 0 ? ", " : "", e->plugin->name);
        }
        for (int32_t i = 0; i < DDL__BLOB_TRANSPORTS && e != NULL; i++) {
            common = common || strncmp(b->transports[i].name, e->plugin->name, DDL__NAME_BYTES - 1) == 0;
        }
    }
    ddl__text_clean(theirs); /* a peer wrote it */
    return ddl__error(c, DDL_ERR_CONFIG,
                      "ddl_init: no transport reaches rank %d on host %s, which has %s, from rank %d on host %s, which "
                      "has %s: %s",
                      rank, c->links[rank].host_name, theirs[0] != 0 ? theirs : "none", c->rank,
                      c->links[c->rank].host_name, ours[0] != 0 ? ours : "none",
                      common ? "each offers only addresses that the other cannot use (DDL_INTERFACE, DDL_ADVERTISE, "
                               "DDL_TRANSPORTS and, without a job secret, unix sockets of one host decide)"
                             : "they have none in common (set DDL_TRANSPORTS alike on all ranks)");
}

/* Takes the transport with the least time for 64 KiB of those that both ranks have; with DDL_TRANSPORTS the first. To
 * other hosts TCP comes last for now: ddl__choose measures whether it is faster. */
static ddl_status ddl__link_choose(ddl_context *c, int32_t rank, const ddl__blob *b, const ddl__reach *offers) {
    ddl__link *l = &c->links[rank];
    double best = 0;
    for (int32_t i = 0; i < c->endpoint_count; i++) {
        double cost =
            (double)offers[i].latency_ns * 1e-9 + 65536.0 / (double)DDL__MAX(offers[i].bytes_per_s, (uint64_t)1);
        cost += !l->same_host && c->endpoints[i].plugin == &ddl__tcp_plugin ? 1e9 : 0;
        bool better = l->endpoint == NULL || (c->settings.transports == NULL && cost < best);
        if ((c->endpoints[i].table->flags & DDL_TRANSPORT_DEVICE) != 0) { /* carries no messages */
            l->device = l->device == NULL && offers[i].reaches && l->same_host ? &c->endpoints[i] : l->device;
            continue;
        }
        if (offers[i].reaches && !c->endpoints[i].only_watches && better) {
            best = cost;
            l->endpoint = &c->endpoints[i];
            l->latency_ns = offers[i].latency_ns;
            l->bytes_per_s = offers[i].bytes_per_s;
        }
    }
    for (int32_t i = 0; l->endpoint == NULL && i < c->endpoint_count; i++) {
        if (offers[i].gave_up && (c->endpoints[i].table->flags & DDL_TRANSPORT_DEVICE) == 0) {
            return ddl__error(c, DDL_ERR_SYSTEM,
                              "ddl_init: %s, which DDL_TRANSPORTS asks for, could not be set up between rank %d and "
                              "rank %d on host %s; a warning of a rank of that host tells why (add tcp to "
                              "DDL_TRANSPORTS to go on without)",
                              c->endpoints[i].plugin->name, c->rank, rank, l->host_name);
        }
    }
    for (int32_t i = 0; i < c->endpoint_count && l->endpoint != NULL && !l->same_host; i++) {
        bool blind = (l->endpoint->table->flags & DDL_TRANSPORT_BLIND) != 0;
        if (blind && offers[i].reaches && c->endpoints[i].plugin == &ddl__tcp_plugin) {
            l->watch = &c->endpoints[i];
        }
    }
    return l->endpoint != NULL ? DDL_OK : ddl__link_none(c, rank, b);
}

/* Who and where a rank is; mine: what this rank tells. Hosts are numbered as they appear. */
static void ddl__link_name(ddl_context *c, int32_t rank, const ddl__blob *b, const ddl__blob *mine) {
    ddl__link *l = &c->links[rank];
    snprintf(l->host_id, sizeof l->host_id, "%s", b->host_id);
    ddl__text_clean(l->host_id); /* it is part of sentences */
    snprintf(l->host_name, sizeof l->host_name, "%s", b->host_name);
    ddl__text_clean(l->host_name);
    memcpy(l->pass_name, b->pass_name, sizeof l->pass_name);
    l->pid = b->pid;
    l->pid_start = b->pid_start;
    l->same_host = strcmp(b->host_id, mine->host_id) == 0;
    l->same_space = l->same_host && b->pid_space == mine->pid_space;
    l->passes_process = l->same_host && !l->same_space && (b->abilities & DDL__PASSES_PROCESS) != 0 &&
                        (mine->abilities & DDL__PASSES_PROCESS) != 0 && ddl__can_pass(c, rank);
    l->host = c->host_count;
    for (int32_t i = 0; i < c->world_size; i++) {
        if (c->links[i].named && strcmp(c->links[i].host_id, l->host_id) == 0) {
            l->host = c->links[i].host;
            break;
        }
    }
    l->named = true;
    c->host_count = DDL__MAX(c->host_count, l->host + 1);
    c->local_ranks += l->same_host;
    l->same_cores = l->same_host && b->core_set == mine->core_set;
    c->core_ranks += l->same_cores;
}

/* Cores that a rank may use, and the host that they are of. */
typedef struct ddl__cores_of {
    uint64_t set;
    int32_t host, cores;
} ddl__cores_of;

static int ddl__cores_order(const void *a_, const void *b_) {
    const ddl__cores_of *a = a_, *b = b_;
    return a->host != b->host ? (a->host > b->host) - (a->host < b->host)
           : a->set != b->set ? (a->set > b->set) - (a->set < b->set)
                              : (a->cores > b->cores) - (a->cores < b->cores);
}

/* Ranks per core where most share theirs; of those that do, what the poorest may use. The same on all ranks: the table
 * is. */
static ddl_status ddl__crowding(ddl_context *c, const ddl__blob *table, int32_t *out_crowding) {
    ddl__cores_of *all = ddl__alloc_array(&c->base, (size_t)c->world_size, sizeof *all);
    if (all == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "ddl_init: no memory for the cores of %d ranks", c->world_size);
    }
    for (int32_t i = 0; i < c->world_size; i++) {
        all[i] = (ddl__cores_of){table[i].core_set, c->links[i].host, table[i].cores};
    }
    qsort(all, (size_t)c->world_size, sizeof *all, ddl__cores_order);
    *out_crowding = 1;
    for (int32_t i = 0, first = 0; i < c->world_size; i++) {
        first = all[i].host == all[first].host && all[i].set == all[first].set ? first : i;
        *out_crowding = DDL__MAX(*out_crowding, (i - first + all[first].cores) / all[first].cores);
    }
    ddl__free(&c->base, all);
    return DDL_OK;
}

/* other, mine: the nonces that both have told. */
static void ddl__link_keys(ddl_context *c, int32_t rank, const uint8_t *other, const uint8_t *mine) {
    const ddl__settings *s = &c->settings;
    uint32_t from = (uint32_t)c->rank, to = (uint32_t)rank;
    if (s->mac) {
        ddl__mac_init(&c->links[rank].mac_out, s->secret, s->secret_bytes, c->job, from, to, mine, other);
        ddl__mac_init(&c->links[rank].mac_in, s->secret, s->secret_bytes, c->job, to, from, other, mine);
    }
}

/* The end of a process on this host is noticed at once. */
static void ddl__link_watch(ddl_context *c, int32_t rank) {
    ddl__link *l = &c->links[rank];
    int fd = rank != c->rank && ddl__has_process(c, l) ? ddl__process_open(l->pid, l->pid_start) : -1;
    if (fd >= 0) {
        ddl__link_watch_fd(c, rank, fd);
    }
}

#endif /* DDL_COLL_LINKS_H */

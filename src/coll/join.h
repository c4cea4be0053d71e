/* coll, last part: joining a job and leaving it. Settings, plugins, one exchange of what each rank is, links, the
 * world. */
#ifndef DDL_COLL_JOIN_H
#define DDL_COLL_JOIN_H

#include "agree.h"
#include "measure.h"
#include "stats.h"
#include "timeline.h"
#include "transports.h"

enum { DDL__BLOB_MAGIC = 0x316a6c64, DDL__NAME_BYTES = 16, DDL__CORES_MAX = 1 << 20 };

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
} ddl__blob;

/* On the wire: the members in their order, little-endian, without gaps. All of one size, because a rendezvous is one
 * all-gather. */
enum {
    DDL__BLOB_AT_HOST = 7 * 4 + 2 * 8, /* host_id */
    DDL__BLOB_AT_TRANSPORTS = DDL__BLOB_AT_HOST + 64 + 32 + DDL__PASS_NAME_BYTES + DDL__MAC_NONCE_BYTES,
    DDL__BLOB_TRANSPORT_BYTES = DDL__NAME_BYTES + 4 + DDL__ADDRESS_BYTES,
    DDL__BLOB_BYTES = DDL__BLOB_AT_TRANSPORTS + DDL__BLOB_TRANSPORTS * DDL__BLOB_TRANSPORT_BYTES
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
    b->board_fd = c->board_fd;
    b->abilities = (ddl__can_pass_process() ? DDL__PASSES_PROCESS : 0) | (c->trace != NULL ? DDL__TRACES : 0);
    b->pid_start = ddl__process_start(b->pid);
    b->pid_space = ddl__process_space();
    memcpy(b->pass_name, c->pass_name, sizeof b->pass_name);
    snprintf(b->host_id, sizeof b->host_id, "%.63s", c->settings.host_id);
    if (gethostname(b->host_name, sizeof b->host_name - 1) != 0 || b->host_name[0] == 0) {
        snprintf(b->host_name, sizeof b->host_name, "?");
    }
    for (int32_t i = 0; i < c->endpoint_count; i++) {
        snprintf(b->transports[i].name, DDL__NAME_BYTES, "%.15s", c->endpoints[i].plugin->name);
        b->transports[i].bytes = c->endpoints[i].address_bytes;
        memcpy(b->transports[i].address, c->endpoints[i].address, c->endpoints[i].address_bytes);
    }
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

/* Tells each transport that both ranks have about the rank. offers: of this rank, by endpoint. */
static void ddl__link_offers(ddl_context *c, int32_t rank, const ddl__blob *b, ddl__reach *offers) {
    for (int32_t i = 0; i < c->endpoint_count; i++) {
        const ddl__endpoint *e = &c->endpoints[i];
        offers[i] = (ddl__reach){.latency_ns = 1, .bytes_per_s = 1};
        bool watched = c->links[rank].same_space || c->links[rank].passes_process;
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

/* Waits until shared memory and the like stand, or have been given up by both sides, and until those whom this rank has
 * told so have heard it: it may end now. When another has ended, its last words, and what others make of them, get time
 * to come: they tell more. *board: see ddl__spaces_settling. */
static ddl_status ddl__links_settle(ddl_context *c, ddl__reach *offers, int32_t board_rank, int *board) {
    uint64_t deadline = ddl__now_ns() + (uint64_t)DDL__MAX(c->settings.init_timeout_ms, 0) * DDL__NS_PER_MS;
    uint64_t gone_ns = 0;
    int32_t rank = 0, gone = -1;
    for (uint32_t round = 1;; round++) {
        int32_t open = ddl__spaces_settling(c, board_rank, board, &rank);
        open += ddl__links_settling(c, offers, &rank);
        if (open == 0 && !ddl__pass_is_sending(c)) {
            return DDL_OK;
        }
        struct pollfd wake = {.fd = c->epoll_fd, .events = POLLIN};
        ddl__pass_progress(c);
        poll(&wake, gone < 0 ? 1u : 0u, 2);
        uint64_t now = ddl__now_ns();
        if (gone < 0 && round % 32 == 0 && (gone = ddl__links_gone(c)) >= 0) {
            gone_ns = now;
        }
        bool lost = gone >= 0 && now - gone_ns > 250 * DDL__NS_PER_MS;
        rank = lost ? gone : rank;
        if (lost || (c->settings.init_timeout_ms >= 0 && now > deadline)) {
            const ddl__link *l = &c->links[rank];
            return ddl__error(c, lost ? DDL_ERR_PEER : DDL_ERR_TIMEOUT,
                              "ddl_init: rank %d (pid %d on host %s) %s before memory was shared with it", rank,
                              l->pid, l->host_name, lost ? "ended" : "did not answer within the deadline");
        }
    }
}

/* Takes the transport with the least time for 64 KiB of those that both ranks have; with DDL_TRANSPORTS the first. To
 * other hosts TCP comes last for now: ddl__choose measures whether it is faster. */
static ddl_status ddl__link_choose(ddl_context *c, int32_t rank, const ddl__reach *offers) {
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
    if (l->endpoint == NULL) {
        return ddl__error(c, DDL_ERR_CONFIG,
                          "ddl_init: no transport reaches rank %d on host %s from rank %d on host "
                          "%s: each offers only addresses that the other cannot use (DDL_INTERFACE, DDL_ADVERTISE, "
                          "DDL_TRANSPORTS and, without a job secret, unix sockets of one host decide)",
                          rank, l->host_name, c->rank, c->links[c->rank].host_name);
    }
    return DDL_OK;
}

/* Who and where a rank is. Hosts are numbered by first appearance: ranks below have their numbers already. */
static void ddl__link_name(ddl_context *c, int32_t rank, const ddl__blob *table) {
    ddl__link *l = &c->links[rank];
    const ddl__blob *b = &table[rank];
    snprintf(l->host_id, sizeof l->host_id, "%s", b->host_id);
    ddl__text_clean(l->host_id); /* it is part of sentences */
    snprintf(l->host_name, sizeof l->host_name, "%s", b->host_name);
    ddl__text_clean(l->host_name);
    memcpy(l->pass_name, b->pass_name, sizeof l->pass_name);
    l->pid = b->pid;
    l->pid_start = b->pid_start;
    l->same_host = strcmp(b->host_id, table[c->rank].host_id) == 0;
    l->same_space = l->same_host && b->pid_space == table[c->rank].pid_space;
    l->passes_process = l->same_host && !l->same_space && (b->abilities & DDL__PASSES_PROCESS) != 0 &&
                        (table[c->rank].abilities & DDL__PASSES_PROCESS) != 0 && ddl__can_pass(c, rank);
    l->host = 0;
    for (int32_t i = 0; i < rank; i++) {
        if (strcmp(c->links[i].host_id, l->host_id) == 0) {
            l->host = c->links[i].host;
            break;
        }
        l->host = DDL__MAX(l->host, c->links[i].host + 1);
    }
    c->host_count = DDL__MAX(c->host_count, l->host + 1);
    c->local_ranks += l->same_host;
}

static void ddl__link_keys(ddl_context *c, int32_t rank, const ddl__blob *table) {
    const ddl__settings *s = &c->settings;
    const uint8_t *mine = table[c->rank].nonce, *other = table[rank].nonce;
    uint32_t from = (uint32_t)c->rank, to = (uint32_t)rank;
    if (s->mac) {
        ddl__mac_init(&c->links[rank].mac_out, s->secret, s->secret_bytes, c->job, from, to, mine, other);
        ddl__mac_init(&c->links[rank].mac_in, s->secret, s->secret_bytes, c->job, to, from, other, mine);
    }
}

/* Reads the whole table before anything is done with it: this rank's own line, too, came back from another. */
static ddl_status ddl__links_read(ddl_context *c, const ddl__blob *table, ddl__reach *offers) {
    for (int32_t i = 0; i < c->world_size; i++) {
        DDL__TRY(ddl__blob_check(c, &table[i], i));
    }
    bool all_trace = true;
    for (int32_t i = 0; i < c->world_size; i++) {
        ddl__link_name(c, i, table);
        all_trace = all_trace && (table[i].abilities & DDL__TRACES) != 0;
    }
    if (c->trace != NULL) {
        c->trace->together = all_trace;
    }
    for (int32_t i = 0; i < c->world_size; i++) {
        if (i != c->rank) {
            ddl__link_offers(c, i, &table[i], offers + i * DDL__ENDPOINTS_MAX);
            ddl__link_keys(c, i, table);
        }
    }
    return DDL_OK;
}

/* The end of a process on this host is noticed at once. */
static void ddl__link_watch(ddl_context *c, int32_t rank) {
    ddl__link *l = &c->links[rank];
    int fd = rank != c->rank && ddl__has_process(c, l) ? ddl__process_open(l->pid, l->pid_start) : -1;
    if (fd >= 0) {
        ddl__link_watch_fd(c, rank, fd);
    }
}

/* Ranks per core on the fullest host, the same on all ranks: the table is. */
static int32_t ddl__crowding(const ddl_context *c, const ddl__blob *table) {
    int32_t worst = 1;
    for (int32_t h = 0; h < c->host_count; h++) {
        int32_t ranks = 0, cores = 1;
        for (int32_t i = 0; i < c->world_size; i++) {
            if (c->links[i].host == h) {
                ranks++;
                cores = DDL__MAX(cores, table[i].cores);
            }
        }
        worst = DDL__MAX(worst, (ranks + cores - 1) / cores);
    }
    return worst;
}

/* From the table of what all ranks told: links, and what is shared inside the host. */
static ddl_status ddl__links_make(ddl_context *c, const ddl__blob *table, ddl__reach *offers) {
    DDL__TRY(ddl__links_read(c, table, offers));
    for (int32_t i = 0; i < c->world_size; i++) {
        ddl__link_watch(c, i);
    }
    int32_t first = 0;
    while (!c->links[first].same_host) {
        first++;
    }
    int board = c->links[first].same_space ? ddl__board_reach(table[first].pid, table[first].board_fd) : -1;
    ddl_status status = ddl__links_settle(c, offers, first, &board);
    ddl__board_open(c, board);
    ddl__places_open(c);
    for (int32_t i = 0; i < c->world_size && status == DDL_OK; i++) {
        status = i != c->rank ? ddl__link_choose(c, i, offers + i * DDL__ENDPOINTS_MAX) : DDL_OK;
    }
    c->tuning.model.oversubscription = ddl__crowding(c, table);
    return status;
}

/* Tells the others about this rank, and reads what they told. wire: a blob of each rank. */
static ddl_status ddl__blobs_exchange(ddl_context *c, uint8_t *wire, ddl__blob *table) {
    ddl__blob mine;
    uint8_t told[DDL__BLOB_BYTES];
    uint64_t strangers = 0;
    c->board_fd = ddl__board_make(c->world_size);
    ddl__blob_fill(c, &mine);
    if (c->settings.mac && ddl__random(mine.nonce, sizeof mine.nonce) < 0) {
        return ddl__error(c, DDL_ERR_SYSTEM, "ddl_init: no random numbers for the keys of DDL_MAC");
    }
    ddl__blob_write(&mine, told);
    ddl_status status = ddl__rendezvous(&c->settings, &c->base, told, sizeof told, wire, &strangers, &c->error);
    c->stats.strangers_refused += strangers;
    for (int32_t i = 0; status == DDL_OK && i < c->world_size; i++) {
        ddl__blob_read(wire + (size_t)i * DDL__BLOB_BYTES, &table[i]);
    }
    if (status == DDL_OK && memcmp(table[c->rank].nonce, mine.nonce, sizeof mine.nonce) != 0) {
        return ddl__error(c, DDL_ERR_CORRUPT,
                          "ddl_init: what this rank told about itself came back changed; keys of an earlier run could "
                          "come back with it. Is there another job in the same rendezvous?");
    }
    return status;
}

static ddl_status ddl__meet(ddl_context *c) {
    size_t world = (size_t)c->world_size;
    ddl__blob *table = ddl__alloc_array(&c->base, world, sizeof *table);
    uint8_t *wire = ddl__alloc_array(&c->base, world, DDL__BLOB_BYTES);
    ddl__reach *offers = ddl__alloc_array(&c->base, world * DDL__ENDPOINTS_MAX, sizeof *offers);
    ddl_status status = DDL_OK;
    c->links = ddl__alloc_array(&c->base, world, sizeof *c->links);
    if (table == NULL || wire == NULL || offers == NULL || c->links == NULL) {
        status = ddl__error(c, DDL_ERR_NOMEM, "ddl_init: no memory for %d ranks", c->world_size);
    }
    for (int32_t i = 0; c->links != NULL && i < c->world_size; i++) {
        c->links[i].pidfd = -1;
    }
    status = status == DDL_OK ? ddl__blobs_exchange(c, wire, table) : status;
    status = status == DDL_OK ? ddl__links_make(c, table, offers) : status;
    ddl__free(&c->base, offers);
    ddl__free(&c->base, wire);
    ddl__free(&c->base, table);
    return status;
}

/* >>init */

static void ddl__register_handlers(ddl_context *c) {
    c->handlers[DDL__FRAME_P2P] = (ddl__handler){ddl__on_p2p, ddl__place_p2p, ddl__placed_p2p};
    c->handlers[DDL__FRAME_RTS] = (ddl__handler){.deliver = ddl__on_rts};
    c->handlers[DDL__FRAME_CTS] = (ddl__handler){.deliver = ddl__on_cts};
    c->handlers[DDL__FRAME_DATA] = (ddl__handler){ddl__on_data, ddl__place_data, ddl__placed_data};
    c->handlers[DDL__FRAME_COLL] = (ddl__handler){ddl__on_coll, ddl__place_coll, ddl__placed_coll};
    c->handlers[DDL__FRAME_CREDIT] = (ddl__handler){.deliver = ddl__on_credit};
    c->handlers[DDL__FRAME_QUERY] = (ddl__handler){.deliver = ddl__on_query};
    c->handlers[DDL__FRAME_STATUS] = (ddl__handler){.deliver = ddl__on_status};
    c->handlers[DDL__FRAME_MISMATCH] = (ddl__handler){.deliver = ddl__on_mismatch};
    c->handlers[DDL__FRAME_DEAD] = (ddl__handler){.deliver = ddl__on_dead};
    c->handlers[DDL__FRAME_BYE] = (ddl__handler){.deliver = ddl__on_bye};
    c->handlers[DDL__FRAME_AGREE] = (ddl__handler){.deliver = ddl__on_agree};
    c->handlers[DDL__FRAME_ABORT] = (ddl__handler){.deliver = ddl__on_abort};
}

static ddl_status ddl__context_parts(ddl_context *c) {
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&c->lock, NULL);
    pthread_mutex_init(&c->error_lock, NULL);
    pthread_cond_init(&c->changed, &attr);
    pthread_condattr_destroy(&attr);
    c->groups = ddl__alloc(&c->base, sizeof *c->groups);
    c->requests = ddl__alloc(&c->base, sizeof *c->requests);
    c->ops = ddl__alloc(&c->base, sizeof *c->ops);
    if (c->groups == NULL || c->requests == NULL || c->ops == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "ddl_init: no memory for a context");
    }
    c->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    c->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data = {.u32 = UINT32_MAX}};
    if (c->epoll_fd < 0 || c->wake_fd < 0 || epoll_ctl(c->epoll_fd, EPOLL_CTL_ADD, c->wake_fd, &event) != 0) {
        return ddl__error(c, DDL_ERR_SYSTEM, "ddl_init: no file descriptors for a context: %s; see `ulimit -n`",
                          strerror(errno));
    }
    ddl__register_handlers(c);
    return DDL_OK;
}

static ddl_status ddl__load_plugins(ddl_context *c) {
    static const char *const built_in[] = {"tcp", NULL};
    ddl_host host = ddl__host_table(c);
    ddl__plugin_asked asked[2] = {{c->settings.plugins, "ddl_config.plugins or DDL_PLUGINS"}, {NULL, NULL}};
    ddl__loader_params params = {.host = &host,
                                 .asked = asked,
                                 .asked_count = 1,
                                 .built_in = built_in,
                                 .path = c->settings.plugin_path,
                                 .libdir = ddl__plugin_libdir(),
                                 .statics = ddl__plugin_statics()};
    return ddl__loader_open(&c->loader, &c->base, &params, &c->error);
}

/* DDL_<NAME>_... belongs to plugin <name>. */
static bool ddl__is_plugin_setting(const ddl_context *c, const char *variable) {
    for (const ddl__plugin_record *p = c->loader.loaded; p != NULL; p = p->next) {
        size_t length = strlen(p->name);
        if (strncasecmp(variable + 4, p->name, length) == 0 && variable[4 + length] == '_') {
            return true;
        }
    }
    return false;
}

/* One rank of a host says it, the others only to who wants to know everything. */
static void ddl__warn_of_unknown(const ddl_context *c) {
    const ddl__launch *l = &c->settings.launch;
    bool first = l->local_rank >= 0 ? l->local_rank == 0 : l->rank == 0;
    for (char **line = environ; line != NULL && *line != NULL; line++) {
        size_t length = ddl__setting_unknown(*line);
        if (length > 0 && !ddl__is_plugin_setting(c, *line)) {
            ddl__setting_warn(&c->base, first ? DDL_LOG_WARN : DDL_LOG_DEBUG, *line, length);
        }
    }
}

static ddl_status ddl__world_make(ddl_context *c) {
    int32_t *ranks = ddl__alloc_array(&c->base, (size_t)c->world_size, sizeof *ranks);
    if (ranks == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "ddl_init: no memory for %d ranks", c->world_size);
    }
    for (int32_t i = 0; i < c->world_size; i++) {
        ranks[i] = i;
    }
    c->world = ddl__group_new(c, ranks, c->world_size, 0, 0, "world");
    ddl__free(&c->base, ranks);
    return c->world != NULL ? DDL_OK : ddl__error(c, DDL_ERR_NOMEM, "ddl_init: no memory for %d ranks", c->world_size);
}

static ddl_status ddl__join(ddl_context *c) {
    DDL__TRY(ddl__launcher_place(&c->settings, &c->base, &c->error));
    ddl__launcher_name_wait(&c->settings, &c->base);
    c->rank = c->settings.launch.rank;
    c->world_size = c->settings.launch.world;
    c->cores = DDL__MAX(c->settings.cores, 1);
    c->job = c->settings.job_id;
    ddl__page_open(c);
    DDL__TRY(ddl__timeline_make(c));
    c->tuning.model = ddl__model_default;
    c->tuning.deterministic = c->settings.deterministic;
    if (c->settings.algorithm != NULL) {
        DDL__TRY(ddl__tune_set(c, &c->tuning, c->settings.algorithm, "ddl_init: DDL_ALGO, or algorithm of ddl_config"));
    }
    DDL__TRY(ddl__load_plugins(c));
    ddl__warn_of_unknown(c);
    DDL__TRY(ddl__devices_make(c));
    if (c->world_size > 1) {
        DDL__TRY(ddl__need_fds(3 * c->world_size + 32, &c->error));
        ddl__pass_open(c);
        DDL__TRY(ddl__endpoints_open(c));
    }
    DDL__TRY(ddl__meet(c));
    DDL__TRY(ddl__world_make(c));
    c->joined = true;
    DDL__TRY(ddl__greet(c));
    ddl__page_stage_tell(c, DDL__PAGE_JOINED);
    return ddl__timeline_begin(c);
}

/* Frees what is left of a closed context: the handles. */
static void ddl__context_destroy(ddl_context *c) {
    for (ddl_group *g = c->groups != NULL ? c->groups->first : NULL; g != NULL;) {
        ddl_group *next = g->next;
        ddl__free(&c->base, g);
        g = next;
    }
    for (int32_t i = 0; c->requests != NULL && i < c->requests->chunk_count; i++) {
        ddl__free(&c->base, c->requests->chunks[i]);
    }
    if (c->requests != NULL) {
        ddl__free(&c->base, c->requests->chunks);
    }
    ddl__free(&c->base, c->requests);
    ddl__free(&c->base, c->groups);
    ddl__free(&c->base, c->ops);
    pthread_mutex_destroy(&c->lock);
    pthread_mutex_destroy(&c->error_lock);
    pthread_cond_destroy(&c->changed);
    if (c->own_page != NULL) {
        munmap((void *)(uintptr_t)c->own_page, (size_t)sysconf(_SC_PAGESIZE));
    }
    ddl__base base = c->base;
    ddl__free(&base, c);
}

/* Requests that nobody waited for end too. Those with parts first: they free their parts. */
static void ddl__requests_free(ddl_context *c) {
    ddl__requests *q = c->requests;
    for (int32_t pass = 0; q != NULL && pass < 2; pass++) {
        for (int32_t i = 0; i < q->chunk_count * DDL__REQUESTS_CHUNK; i++) {
            ddl_request *r = &q->chunks[i / DDL__REQUESTS_CHUNK][i % DDL__REQUESTS_CHUNK];
            if (r->state != DDL__REQUEST_FREE && (pass == 1 || r->ops->release != NULL)) {
                ddl__request_release(r);
            }
        }
    }
}

static void ddl__context_close_fds(ddl_context *c) {
    if (c->epoll_fd >= 0) {
        close(c->epoll_fd);
    }
    if (c->wake_fd >= 0) {
        close(c->wake_fd);
    }
    c->epoll_fd = c->wake_fd = -1;
}

/* Closes everything that works; what stays is a shell, so that handles which are used too long are known as such. */
static void ddl__context_close(ddl_context *c) {
    ddl__trace_free(&c->base, c->trace);
    c->trace = NULL;
    ddl__pass_close(c);
    for (ddl_group *g = c->groups != NULL ? c->groups->first : NULL; g != NULL; g = g->next) {
        if (g->magic == DDL__GROUP_MAGIC) {
            ddl__native_close(g, 0);
        }
    }
    ddl__devices_settle(c);
    while (c->lent != NULL) {
        ddl__lent *lent = c->lent;
        c->lent = lent->next;
        ddl__lent_free(c, lent);
    }
    for (int32_t i = 0; i < c->endpoint_count; i++) {
        c->endpoints[i].table->close(c->endpoints[i].self);
    }
    c->endpoint_count = 0;
    ddl__requests_free(c); /* before the groups: persistent ones hold plans of theirs */
    for (ddl_group *g = c->groups != NULL ? c->groups->first : NULL; g != NULL; g = g->next) {
        if (g->magic == DDL__GROUP_MAGIC) {
            ddl__group_bury(g);
        }
    }
    ddl__devices_close(c);
    for (int32_t i = 0; c->links != NULL && i < c->world_size; i++) {
        if (c->links[i].pidfd >= 0) {
            close(c->links[i].pidfd);
        }
    }
    if (c->links != NULL) {
        ddl__wipe(c->links, (size_t)c->world_size * sizeof *c->links); /* keys */
    }
    ddl__free(&c->base, c->links);
    c->links = NULL;
    ddl__board_close(c);
    ddl__page_close(c);
    while (c->notes != NULL) {
        ddl__note *n = c->notes;
        c->notes = n->next;
        ddl__free(&c->base, n);
    }
    while (c->landings != NULL) {
        ddl__landing *l = c->landings;
        c->landings = l->next;
        ddl__free(&c->base, l);
    }
    while (c->ops != NULL && c->ops->first != NULL) {
        ddl__user_op_release(c, c->ops->first);
    }
    ddl__scratch_free_all(c);
    ddl__loader_close(&c->loader);
    ddl__settings_free(&c->base, &c->settings);
    ddl__context_close_fds(c);
}

/* The only variable of ddl's that belongs to no context: the shells of the contexts that ended last. A handle of one of
 * them, the context's own or its world, groups and requests, is still memory that says so. */
enum { DDL__ENDED = 16 };
static struct ddl__ended {
    _Atomic(ddl_context *) last[DDL__ENDED];
    atomic_uint count;
} ddl__ended;

/* The last handle that the caller had to free is gone. A program that brought its own allocator gets all memory back
 * now: it may end with the program's use of ddl. */
static void ddl__context_end(ddl_context *c) {
    if (c->base.allocator.free == NULL) {
        /* relaxed: any slot will do */
        uint32_t slot = atomic_fetch_add_explicit(&ddl__ended.count, 1, memory_order_relaxed) % DDL__ENDED;
        /* release: whoever takes this shell out sees all of it; acquire: so do we with the older one */
        c = atomic_exchange_explicit(&ddl__ended.last[slot], c, memory_order_acq_rel);
    }
    if (c != NULL) {
        ddl__context_destroy(c);
    }
}

static void ddl__init_failed(const ddl_config *config, const ddl__base *base, const ddl__sentence *why) {
    ddl__log(base, DDL_LOG_WARN, "%s", why->text);
    if (config != NULL && config->error_text != NULL && config->error_bytes > 0) {
        snprintf(config->error_text, config->error_bytes, "%s", why->text);
    }
}

DDL_API ddl_status ddl_init(const ddl_config *config, ddl_context **out_context) {
    if (out_context == NULL) {
        return DDL_ERR_ARG;
    }
    *out_context = NULL;
    ddl__base base = {.log_level = DDL_LOG_WARN, .rank = -1};
    ddl__settings settings;
    ddl__sentence why = {0};
    ddl_status status = ddl__settings_read(config, &base, &settings, &why);
    if (status < 0) {
        ddl__init_failed(config, &base, &why);
        return status;
    }
    ddl_context *c = ddl__alloc(&base, sizeof *c);
    if (c == NULL) {
        ddl__fail(&why, DDL_ERR_NOMEM, "ddl_init: no memory for a context");
        ddl__settings_free(&base, &settings);
        ddl__init_failed(config, &base, &why);
        return DDL_ERR_NOMEM;
    }
    c->base = base;
    c->settings = settings;
    c->pid = getpid();
    c->clock = (ddl__clock){ddl__ticks(), ddl__now_ns(), 0};
    ddl__own_page_make(c);
    c->refs = 1;
    c->epoll_fd = c->wake_fd = c->board_fd = c->pass_fd = c->page_fd = -1;
    status = ddl__context_parts(c);
    ddl__lock(c);
    if (status == DDL_OK) {
        status = ddl__join(c);
    }
    ddl__unlock(c);
    if (status < 0) {
        ddl__init_failed(config, &c->base, &c->error);
        c->finalized = true;
        ddl__context_close(c);
        ddl__context_destroy(c);
        return status;
    }
    *out_context = c;
    return DDL_OK;
}

/* >>leaving */

/* Ends all requests that still run; nothing of the callers' memory is used after this. */
static void ddl__end_requests(ddl_context *c, ddl_status status, const char *text) {
    for (ddl_group *g = c->groups->first; g != NULL; g = g->next) {
        if (g->magic == DDL__GROUP_MAGIC) {
            ddl__group_break(g, status, "%s", text);
        }
    }
    for (int32_t i = 0; i < c->requests->chunk_count * DDL__REQUESTS_CHUNK; i++) {
        ddl_request *r = &c->requests->chunks[i / DDL__REQUESTS_CHUNK][i % DDL__REQUESTS_CHUNK];
        if (r->state == DDL__REQUEST_ACTIVE) {
            r->ops->abandon(c, r);
            if (r->state == DDL__REQUEST_ACTIVE) {
                ddl__request_fail(r, status, "%s", text);
            }
        }
    }
    ddl__wake(c);
}

static void ddl__thread_end(ddl_context *c) {
    if (c->has_thread) {
        c->thread_stop = true;
        ddl__wake(c);
        ddl__unlock(c);
        pthread_join(c->thread, NULL);
        ddl__lock(c);
        c->has_thread = false;
    }
}

static void ddl__context_unref(ddl_context *c) {
    int32_t refs = --c->refs;
    ddl__unlock(c);
    if (refs == 0) {
        ddl__context_end(c);
    }
}

DDL_API ddl_status ddl_finalize(ddl_context **context) {
    if (context == NULL || *context == NULL) {
        return DDL_OK;
    }
    ddl_context *c = *context;
    DDL__TRY(ddl__enter(c));
    *context = NULL;
    ddl__page_stage_tell(c, DDL__PAGE_LEAVING);
    ddl__timeline_end(c);
    c->finalized = true; /* from here nothing new begins, so that the threads that wait can be waited for */
    ddl__end_requests(c, DDL_ERR_STATE, "the context was finalized while the operation was running");
    ddl__thread_end(c);
    ddl__board_leave(c);
    ddl__say_goodbye(c);
    ddl__poll(c, -1);
    while (c->cond_waiters > 0 || c->polling) { /* threads inside a wait leave it first: their requests have ended */
        ddl__wake(c);
        ddl__unlock(c);
        sched_yield();
        ddl__lock(c);
    }
    ddl__context_close(c);
    ddl__context_unref(c);
    return DDL_OK;
}

DDL_API ddl_status ddl_group_free(ddl_group **group) {
    if (group == NULL || *group == NULL) {
        return DDL_OK;
    }
    ddl_group *g = *group;
    ddl_context *c = g->context;
    if ((g->magic != DDL__GROUP_MAGIC && g->magic != DDL__GROUP_FREED) || ddl__is_forked(c)) {
        return g->magic == DDL__GROUP_MAGIC ? DDL_ERR_FORK : DDL_ERR_ARG;
    }
    ddl__lock(c);
    if (!g->user_holds || g->outstanding > 0) {
        ddl_status status =
            g == c->world    ? ddl__error(c, DDL_ERR_ARG, "ddl_group_free: the world belongs to the context")
            : !g->user_holds ? ddl__error(c, DDL_ERR_STATE, "ddl_group_free: group \"%s\" was freed before", g->name)
                             : ddl__error(c, DDL_ERR_STATE,
                                          "ddl_group_free: group \"%s\" has %d requests that were not "
                                          "waited for",
                                          g->name, g->outstanding);
        ddl__unlock(c);
        return status;
    }
    g->user_holds = false;
    if (g->magic == DDL__GROUP_MAGIC) {
        ddl__group_bury(g);
    }
    ddl__group_forget(c);
    *group = NULL;
    ddl__context_unref(c);
    return DDL_OK;
}

/* >>abort */

static void ddl__abort_here(ddl_context *c, const char *text) {
    if (!c->aborted) {
        c->aborted = true;
        snprintf(c->abort_text, sizeof c->abort_text, "%s", text);
        ddl__end_requests(c, DDL_ERR_ABORTED, c->abort_text);
    }
}

static ddl_status ddl__on_abort(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl__reader r = ddl__reader_of(payload, f->bytes);
    char text[256];
    ddl__get_u32(&r);
    ddl__get_string(&r, text, sizeof text);
    if (r.bad) {
        return DDL_ERR_CORRUPT;
    }
    if (!c->aborted) {
        ddl__abort_here(c, text);
        ddl__flood(c, (ddl__frame){.type = DDL__FRAME_ABORT}, c->rank, text, peer);
    }
    return DDL_OK;
}

DDL_API ddl_status ddl_abort(ddl_context *context, const char *reason) {
    DDL__TRY(ddl__enter(context));
    char text[256];
    snprintf(text, sizeof text, "rank %d aborted the job: %.180s", context->rank,
             reason != NULL ? reason : "no reason given");
    if (!context->aborted) {
        ddl__abort_here(context, text);
        for (int32_t i = 0; i < context->world_size; i++) { /* all, connected or not: nobody may be left waiting */
            context->links[i].connected = i != context->rank;
        }
        ddl__flood(context, (ddl__frame){.type = DDL__FRAME_ABORT}, context->rank, text, -1);
        ddl__poll(context, -1);
    }
    ddl__unlock(context);
    return DDL_OK;
}

/* >>asking */

DDL_API int32_t ddl_version(void) {
    return DDL_VERSION_MAJOR * 10000 + DDL_VERSION_MINOR * 100 + DDL_VERSION_PATCH;
}

DDL_API int32_t ddl_feature(const char *name) {
    if (name == NULL) {
        return 0;
    }
#ifndef DDL_NO_PLUGINS
    if (strcmp(name, "plugins") == 0) {
        return 1;
    }
#endif
    for (const ddl__plugin_static *p = ddl__plugin_statics(); p->name != NULL; p++) {
        if (strcmp(name, p->name) == 0) {
            return 1;
        }
    }
    return strcmp(name, "tcp") == 0 || strcmp(name, "trace") == 0;
}

DDL_API ddl_group *ddl_world(ddl_context *context) { return context != NULL ? context->world : NULL; }

DDL_API ddl_status ddl_progress(ddl_context *context) {
    DDL__TRY(ddl__enter(context));
    if (!context->polling) {
        ddl__poll(context, -1);
        ddl__run_pumps(context);
        ddl__look(context, ddl__now_ns());
    }
    ddl__unlock(context);
    return DDL_OK;
}

/* The oldest record that was not shown yet, of all groups; each keeps its own place. */
static ddl__flight *ddl__record_next(ddl_context *c, ddl_group **out_group) {
    ddl__flight *oldest = NULL;
    for (ddl_group *g = c->groups->first; g != NULL; g = g->next) {
        ddl__flight *r = g->magic == DDL__GROUP_MAGIC ? ddl__record_of(g, g->shown + 1) : NULL;
        if (r != NULL && (oldest == NULL || r->order < oldest->order)) {
            oldest = r;
            *out_group = g;
        }
    }
    if (oldest != NULL) {
        (*out_group)->shown++;
    }
    return oldest;
}

DDL_API size_t ddl_flight_record(ddl_context *context, char *out_text, size_t bytes) {
    if (ddl__enter(context) < 0) {
        return 0;
    }
    ddl__text text = {out_text, out_text != NULL ? bytes : 0, 0};
    for (ddl_group *g = context->groups->first; g != NULL; g = g->next) {
        g->shown = g->sequence > DDL__RECORDS ? g->sequence - DDL__RECORDS : 0;
    }
    ddl_group *g = NULL;
    for (ddl__flight *r = ddl__record_next(context, &g); r != NULL; r = ddl__record_next(context, &g)) {
        bool runs = r->status == DDL_IN_PROGRESS;
        uint64_t end = DDL__MAX(runs ? ddl__now_ns() : r->end_ns, r->start_ns); /* one clock is wrong by a little */
        ddl__text_add(&text, "%s #%u ", g->name, r->sequence);
        ddl__describe_record(g, r, &text);
        ddl__text_add(&text, " %s %.1f us\n", runs ? "running for" : ddl_status_name((ddl_status)r->status),
                      (double)(end - r->start_ns) / 1e3);
    }
    ddl__unlock(context);
    return text.used;
}

#endif /* DDL_COLL_JOIN_H */

/* coll, last part: joining a job and leaving it. Settings, plugins, one exchange of what each rank is, links, the
 * world. */
#ifndef DDL_COLL_JOIN_H
#define DDL_COLL_JOIN_H

#include "grow_listener.h"
#include "stats.h"
#include "stream.h"
#include "timeline.h"

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
        int32_t told = ddl__pass_sends_to(c);
        if (open == 0 && told < 0) {
            return DDL_OK;
        }
        rank = open == 0 ? told : rank;
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

/* Reads the whole table before anything is done with it: this rank's own line, too, came back from another. */
static ddl_status ddl__links_read(ddl_context *c, const ddl__blob *table, ddl__reach *offers) {
    for (int32_t i = 0; i < c->world_size; i++) {
        DDL__TRY(ddl__blob_check(c, &table[i], i));
    }
    bool all_trace = true;
    for (int32_t i = 0; i < c->world_size; i++) {
        ddl__link_name(c, i, &table[i], &table[c->rank]);
        all_trace = all_trace && (table[i].abilities & DDL__TRACES) != 0;
    }
    if (c->trace != NULL) {
        c->trace->together = all_trace;
    }
    for (int32_t i = 0; i < c->world_size; i++) {
        if (i != c->rank) {
            ddl__link_offers(c, i, &table[i], false, offers + i * DDL__ENDPOINTS_MAX);
            ddl__link_keys(c, i, table[i].nonce, table[c->rank].nonce);
        }
    }
    return DDL_OK;
}

/* From the table of what all ranks told: links, and what is shared inside the host. */
static ddl_status ddl__links_make(ddl_context *c, const ddl__blob *table, ddl__reach *offers) {
    DDL__TRY(ddl__links_read(c, table, offers));
    for (int32_t i = 0; i < c->world_size; i++) {
        ddl__link_watch(c, i);
    }
    int32_t first = 0;
    snprintf(c->meet_host, sizeof c->meet_host, "%s", c->links[0].host_id); /* rank 0 listened there */
    while (!c->links[first].same_host) {
        first++;
    }
    int board = c->links[first].same_space ? ddl__board_reach(table[first].pid, table[first].board_fd) : -1;
    ddl_status status = ddl__links_settle(c, offers, first, &board);
    ddl__board_open(c, board);
    ddl__places_open(c);
    for (int32_t i = 0; i < c->world_size && status == DDL_OK; i++) {
        status = i != c->rank ? ddl__link_choose(c, i, &table[i], offers + i * DDL__ENDPOINTS_MAX) : DDL_OK;
    }
    return status == DDL_OK ? ddl__crowding(c, table, &c->tuning.model.oversubscription) : status;
}

/* Tells the others about this rank, and reads what they told. wire: a blob of each rank. */
static ddl_status ddl__blobs_exchange(ddl_context *c, uint8_t *wire, ddl__blob *table) {
    ddl__blob mine;
    uint8_t told[DDL__BLOB_BYTES];
    uint64_t strangers = 0;
    c->board_fd = ddl__board_make(c->world_size);
    ddl__blob_fill(c, &mine);
    DDL__TRY(ddl__nonce_make(c, &mine));
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

/* c->links stays NULL without memory. */
static void ddl__links_alloc(ddl_context *c, ddl__life life) {
    c->links = ddl__alloc_array(&c->base, (size_t)c->world_size + 1, sizeof *c->links);
    for (int32_t i = 0; c->links != NULL && i <= c->world_size; i++) {
        c->links[i].pidfd = -1;
        c->links[i].life = i < c->world_size ? life : DDL__DEAD;
    }
}

static ddl_status ddl__meet(ddl_context *c) {
    size_t world = (size_t)c->world_size;
    ddl__blob *table = ddl__alloc_array(&c->base, world, sizeof *table);
    uint8_t *wire = ddl__alloc_array(&c->base, world, DDL__BLOB_BYTES);
    ddl__reach *offers = ddl__alloc_array(&c->base, world * DDL__ENDPOINTS_MAX, sizeof *offers);
    ddl_status status = DDL_OK;
    ddl__links_alloc(c, DDL__ALIVE);
    if (table == NULL || wire == NULL || offers == NULL || c->links == NULL) {
        status = ddl__error(c, DDL_ERR_NOMEM, "ddl_init: no memory for %d ranks", c->world_size);
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
    c->handlers[DDL__FRAME_GROW] = (ddl__handler){.deliver = ddl__on_grow};
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

/* The loaded plugin that a line of the environment belongs to: DDL_<NAME>_... is of plugin <name>, of the longest such
 * name. NULL: none. */
static const ddl_plugin *ddl__setting_owner(const ddl_context *c, const char *line) {
    if (strncmp(line, "DDL_", 4) != 0 || ddl__setting_is_ours(line, strcspn(line, "="))) {
        return NULL;
    }
    const ddl_plugin *owner = NULL;
    size_t longest = 0;
    for (const ddl__plugin_record *p = c->loader.loaded; p != NULL; p = p->next) {
        size_t length = strlen(p->name);
        if (length > longest && strncasecmp(line + 4, p->name, length) == 0 && line[4 + length] == '_') {
            owner = p->plugin;
            longest = length;
        }
    }
    return owner;
}

/* One rank of a host says it, the others only to who wants to know everything. */
static void ddl__warn_of_unknown(const ddl_context *c) {
    const ddl__launch *l = &c->settings.launch;
    bool first = l->local_rank >= 0 ? l->local_rank == 0 : l->rank == 0;
    ddl_log_level level = first ? DDL_LOG_WARN : DDL_LOG_DEBUG;
    for (char **line = environ; line != NULL && *line != NULL; line++) {
        const ddl_plugin *owner = ddl__setting_owner(c, *line);
        size_t length = owner == NULL              ? ddl__setting_unknown(*line)
                        : DDL_HAS(owner, settings) ? ddl__plugin_setting_unknown(owner->settings, *line)
                                                   : 0;
        if (length > 0 && owner != NULL) {
            ddl__plugin_setting_warn(&c->base, level, owner->name, owner->settings, *line, length);
        } else if (length > 0) {
            ddl__setting_warn(&c->base, level, *line, length);
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

/* A rank alone listens nowhere. What it is told of networks is looked at all the same: the next job has more ranks. */
static ddl_status ddl__alone_check(ddl_context *c) {
    const char *named = c->settings.interface_name, *advertise = c->settings.advertise;
    ddl__addresses found = {0};
    if (named != NULL) {
        ddl__interface_addresses(named, &found);
    }
    if (named != NULL && found.count == 0) {
        return ddl__error(c, DDL_ERR_CONFIG, "ddl_init: there is no interface %.60s with an address here "
                          "(DDL_INTERFACE)", named);
    }
    int error = advertise != NULL ? ddl__resolve(advertise, &found) : 0;
    return error == 0 ? DDL_OK
                      : ddl__error(c, DDL_ERR_CONFIG, "ddl_init: the address to advertise, %.60s, cannot be resolved: "
                                   "%s; check DDL_ADVERTISE", advertise, gai_strerror(error));
}

/* A folder of DDL_PLUGIN_PATH that is not there may be elsewhere on other hosts: it is told and passed by. The loader
 * tells of relative ones. */
static void ddl__warn_of_folders(const ddl_context *c) {
    for (const char *at = c->settings.plugin_path; at != NULL && *at != 0;) {
        char folder[PATH_MAX];
        size_t bytes = strcspn(at, ":");
        struct stat st;
        snprintf(folder, sizeof folder, "%.*s", (int)DDL__MIN(bytes, sizeof folder - 1), at);
        if (bytes > 0 && folder[0] == '/' && (stat(folder, &st) != 0 || !S_ISDIR(st.st_mode))) {
            ddl__log(&c->base, DDL_LOG_WARN, "%.400s of DDL_PLUGIN_PATH is no folder; no plugin is looked for there",
                     folder);
        }
        at += bytes + (at[bytes] == ':');
    }
}

/* What comes before anybody is met. */
static ddl_status ddl__prepare(ddl_context *c) {
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
        ddl_status known = ddl__tune_set(c, &c->tuning, c->settings.algorithm,
                                         "ddl_init: DDL_ALGO, or algorithm of ddl_config");
        if (known < 0) {
            return DDL_ERR_CONFIG; /* what is a wrong argument elsewhere */
        }
    }
    DDL__TRY(ddl__load_plugins(c));
    ddl__warn_of_unknown(c);
    ddl__warn_of_folders(c);
    DDL__TRY(ddl__transports_check(c));
    DDL__TRY(ddl__model_check(c));
    DDL__TRY(ddl__devices_make(c));
    if (c->world_size == 1) {
        DDL__TRY(ddl__alone_check(c));
    } else {
        DDL__TRY(ddl__need_fds(3 * c->world_size + 32, &c->error));
        ddl__pass_open(c);
        DDL__TRY(ddl__endpoints_open(c));
    }
    return DDL_OK;
}

static ddl_status ddl__join(ddl_context *c) {
    DDL__TRY(ddl__prepare(c));
    DDL__TRY(ddl__meet(c));
    DDL__TRY(ddl__world_make(c));
    c->joined = true;
    DDL__TRY(ddl__greet(c));
    ddl__pace_forget(c);
    ddl__page_stage_tell(c, DDL__PAGE_JOINED);
    return ddl__timeline_begin(c);
}

/* >>newcomer */

#define DDL__ADMIT_NS (3 * DDL__NS_PER_S) /* from the end of who received us to the word of any other member */

/* The shared board of this host: any member has it; where only newcomers are, that of the lowest. */
static void ddl__newcomer_board(ddl_context *c, const ddl__roster *r) {
    const ddl__seat *best = NULL;
    for (int32_t i = 0; i < r->count; i++) {
        const ddl__seat *s = &r->seats[i];
        bool member = s->incarnation < r->incarnation, better = best == NULL;
        better = better || (member && best->incarnation == r->incarnation);
        best = c->links[s->rank].same_space && better ? s : best;
    }
    ddl__board_open(c, best != NULL ? ddl__board_reach(best->blob.pid, best->blob.board_fd) : -1);
    ddl__places_open(c);
}

/* Links and group as the roster says: every member makes the same. */
static ddl_status ddl__newcomer_links(ddl_context *c, const ddl__roster *r, const ddl__blob *mine) {
    bool found = false;
    int32_t *ranks = ddl__alloc_array(&c->base, (size_t)c->world_size, sizeof *ranks);
    if (ranks == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "ddl_join: no memory for %d ranks", c->world_size);
    }
    c->links[c->rank].life = DDL__ALIVE;
    ddl__link_name(c, c->rank, mine, mine);
    ddl_status status = DDL_OK;
    for (int32_t i = 0; i < r->count && status == DDL_OK; i++) {
        const ddl__seat *s = &r->seats[i];
        ranks[i] = s->rank;
        found = found || (s->rank == c->rank && s->incarnation == r->incarnation);
        status = s->rank != c->rank ? ddl__grow_link(c, s, mine) : DDL_OK;
    }
    if (status == DDL_OK && !found) {
        status = ddl__error(c, DDL_ERR_CORRUPT, "ddl_join: what the members tell does not name this rank");
    }
    if (status == DDL_OK) {
        c->incarnation = c->incarnation_seen = c->links[c->rank].incarnation = r->incarnation;
        c->groups->allocated = r->incarnation * 65536u; /* not the numbers that this rank gave out before it died */
        memcpy(c->meet_host, r->meet_host, sizeof c->meet_host);
        c->tuning = r->tuning;
        ddl__newcomer_board(c, r);
        c->world = ddl__group_new(c, ranks, r->count, r->group, r->epoch, r->name);
        status = c->world != NULL ? DDL_OK : ddl__error(c, DDL_ERR_NOMEM, "ddl_join: no memory for the group");
    }
    ddl__free(&c->base, ranks);
    return status;
}

typedef struct ddl__admission {
    int fd;             /* to who received us; -1: it has ended */
    uint64_t ended_ns;
    bool refused;
} ddl__admission;

static bool ddl__admission_over(ddl_context *c, void *arg) {
    ddl__admission *a = arg;
    uint8_t byte;
    ssize_t n = a->fd >= 0 ? recv(a->fd, &byte, 1, MSG_DONTWAIT) : -1;
    bool ended = a->fd >= 0 && (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR));
    if (ended) {
        close(a->fd);
        a->fd = -1;
        a->ended_ns = ddl__now_ns();
    }
    a->refused = a->refused || n > 0 || (a->fd < 0 && ddl__now_ns() - a->ended_ns > DDL__ADMIT_NS);
    return c->world->admitted || a->refused;
}

/* One word of any member. DDL_IN_PROGRESS: there will be none, come again. */
static ddl_status ddl__newcomer_await(ddl_context *c, int fd, uint64_t deadline) {
    ddl__admission a = {.fd = fd};
    ddl__wait w = {.done = ddl__admission_over, .tick = ddl__no_tick, .arg = &a, .deadline = deadline};
    ddl__wait_for(c, &w);
    if (a.fd >= 0) {
        close(a.fd);
    }
    if (c->world->admitted) {
        return DDL_OK;
    }
    return a.refused ? DDL_IN_PROGRESS
                     : ddl__error(c, DDL_ERR_TIMEOUT, "ddl_join: the members received rank %d, but did not admit it "
                                  "before the deadline", c->rank);
}

/* From the roster to the first word. */
static ddl_status ddl__newcomer_enter(ddl_context *c, const ddl__client *client, const ddl__blob *mine) {
    ddl__roster r;
    ddl_status status = ddl__roster_read(&c->base, client->told, client->told_bytes, c->world_size, &r);
    if (status < 0) {
        close(client->fd);
        return ddl__error(c, status, "ddl_join: what the members at %s tell %s", client->where,
                          status == DDL_ERR_NOMEM ? "needs more memory than there is" : "makes no sense");
    }
    status = r.verdict < 0 ? ddl__error(c, r.verdict, "%s", r.text) : ddl__newcomer_links(c, &r, mine);
    ddl__free(&c->base, r.seats);
    if (status < 0) {
        close(client->fd);
        return status;
    }
    return ddl__newcomer_await(c, client->fd, client->deadline_ns);
}

/* Joins a job that runs. DDL_IN_PROGRESS: the members began anew, and so does this process. */
static ddl_status ddl__join_later(ddl_context *c, uint64_t deadline) {
    DDL__TRY(ddl__prepare(c));
    if (c->settings.place.kind != DDL__MEET_TCP) {
        return ddl__error(c, DDL_ERR_UNSUPPORTED,
                          "ddl_join: newcomers come to a rendezvous by TCP: give MASTER_ADDR and MASTER_PORT, or "
                          "DDL_RENDEZVOUS=tcp://host:port, instead of a folder or an exchange function");
    }
    if (!ddl__meets_newcomers(c)) {
        return ddl__error(c, DDL_ERR_CONFIG, "ddl_join: " DDL__NO_NEWCOMERS);
    }
    ddl__links_alloc(c, DDL__DEAD);
    ddl__blob mine;
    uint8_t blob[DDL__BLOB_BYTES];
    if (c->links == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "ddl_join: no memory for %d ranks", c->world_size);
    }
    c->board_fd = ddl__board_make(c->world_size);
    ddl__blob_fill(c, &mine);
    DDL__TRY(ddl__nonce_make(c, &mine));
    ddl__blob_write(&mine, blob);
    ddl__client client = {.settings = &c->settings, .base = &c->base, .blob = blob, .blob_bytes = sizeof blob, .fd = -1,
                          .deadline_ns = deadline, .why = &c->error, .grows = true,
                          .told_max = ddl__roster_bytes(c->world_size)};
    ddl_status status = ddl__client_run(&client);
    if (status < 0) {
        return ddl__said(c, status);
    }
    status = ddl__newcomer_enter(c, &client, &mine);
    ddl__free(&c->base, client.told);
    DDL__TRY(status == DDL_IN_PROGRESS ? DDL_OK : status);
    if (status == DDL_IN_PROGRESS) {
        return status;
    }
    c->joined = true;
    if (c->trace != NULL) {
        c->trace->together = false; /* this process writes its own file */
    }
    ddl__log(&c->base, DDL_LOG_INFO, "joined group \"%s\" of %d ranks as incarnation %u of this rank", c->world->name,
             c->world->size, c->incarnation);
    ddl__grown_natives(c->world, deadline, "ddl_join");
    DDL__TRY(ddl__thread_begin(c));
    ddl__page_stage_tell(c, DDL__PAGE_JOINED);
    return ddl__timeline_begin(c);
}

/* Not before the last handle is freed: a trainer writes to it without the lock (ddl_grad_ready), and a number that was
 * given back may be another file's. */
static void ddl__context_close_wake(ddl_context *c) {
    if (c->wake_fd >= 0) {
        close(c->wake_fd);
    }
    c->wake_fd = -1;
}

/* Frees what is left of a closed context: the handles. */
static void ddl__context_destroy(ddl_context *c) {
    ddl__context_close_wake(c);
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
    c->epoll_fd = -1;
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
    c->detached = NULL;
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
        ddl__wipe(c->links, ((size_t)c->world_size + 1) * sizeof *c->links); /* keys */
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
    ddl__context_close_wake(c);
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

/* The sentence begins with the call that the program made, though the two share their parts. */
static void ddl__init_failed(const ddl_config *config, const ddl__base *base, bool later, bool restarted,
                             ddl__sentence *why) {
    static const char calls[2][11] = {"ddl_init: ", "ddl_join: "};
    bool named = strncmp(why->text, calls[!later], 10) == 0;
    if (named) {
        memcpy(why->text, calls[later], 10);
    }
    if (restarted && !later) {
        size_t used = strlen(why->text);
        snprintf(why->text + used, sizeof why->text - used,
                 "; it joins a running job, because DDL_RESTARTED is set: unset it to begin one");
    }
    ddl__log(base, DDL_LOG_WARN, "%s", why->text);
    if (config != NULL && config->error_text != NULL && config->error_bytes > 0) {
        snprintf(config->error_text, config->error_bytes, "%s", why->text);
    }
}

/* One try to join. later: a job that runs; deadline 0: begins now. DDL_IN_PROGRESS: it is worth another. */
static ddl_status ddl__begin(const ddl_config *config, bool later, uint64_t *deadline, ddl_context **out_context) {
    ddl__base base = {.log_level = DDL_LOG_WARN, .rank = -1};
    ddl__settings settings;
    ddl__sentence why = {0};
    ddl_status status = ddl__settings_read(config, &base, &settings, &why);
    if (status < 0) {
        ddl__init_failed(config, &base, later, false, &why);
        return status;
    }
    ddl_context *c = ddl__alloc(&base, sizeof *c);
    if (c == NULL) {
        ddl__fail(&why, DDL_ERR_NOMEM, "ddl_init: no memory for a context");
        ddl__settings_free(&base, &settings);
        ddl__init_failed(config, &base, later, false, &why);
        return DDL_ERR_NOMEM;
    }
    c->base = base;
    c->settings = settings;
    c->pid = getpid();
    c->clock = (ddl__clock){ddl__ticks(), ddl__now_ns(), 0};
    ddl__own_page_make(c);
    c->refs = 1;
    c->epoll_fd = c->wake_fd = c->board_fd = c->pass_fd = c->page_fd = -1;
    *deadline = *deadline != 0 ? *deadline : ddl__deadline(c->clock.ns, settings.init_timeout_ms);
    status = ddl__context_parts(c);
    ddl__lock(c);
    if (status == DDL_OK) {
        status = later || settings.restarted > 0 ? ddl__join_later(c, *deadline) : ddl__join(c);
    }
    if (status != DDL_OK) {
        c->finalized = true;
        ddl__thread_end(c); /* it may have begun before what failed */
    }
    ddl__unlock(c);
    if (status != DDL_OK) {
        if (status < 0) {
            ddl__init_failed(config, &c->base, later, settings.restarted > 0, &c->error);
        }
        ddl__context_close(c);
        ddl__context_destroy(c);
        return status;
    }
    *out_context = c;
    return DDL_OK;
}

/* Of descriptors 0 to 2 those that the program has closed are /dev/null from now on, for good: a socket of ours would
 * take their place and get what the program prints. */
static void ddl__hold_standard(void) {
    bool closed = false;
    for (int fd = 0; fd <= 2; fd++) {
        closed = closed || (fcntl(fd, F_GETFD) < 0 && errno == EBADF);
    }
    for (int fd = 0; closed && fd >= 0 && fd <= 2;) {
        fd = open("/dev/null", O_RDWR | O_CLOEXEC);
        if (fd > 2) {
            close(fd);
        }
    }
}

static ddl_status ddl__begin_often(const ddl_config *config, bool later, ddl_context **out_context) {
    uint64_t deadline = 0;
    ddl_status status;
    ddl__hold_standard();
    while ((status = ddl__begin(config, later, &deadline, out_context)) == DDL_IN_PROGRESS) {
        ddl__pause_ms(20);
    }
    return status;
}

DDL_API ddl_status ddl_init(const ddl_config *config, ddl_context **out_context) {
    if (out_context == NULL) {
        return DDL_ERR_ARG;
    }
    *out_context = NULL;
    return ddl__begin_often(config, false, out_context);
}

DDL_API ddl_status ddl_join(const ddl_config *config, ddl_context **out_context, ddl_group **out_group) {
    if (out_context == NULL || out_group == NULL) {
        return DDL_ERR_ARG;
    }
    *out_context = NULL;
    *out_group = NULL;
    DDL__TRY(ddl__begin_often(config, true, out_context));
    *out_group = (*out_context)->world;
    return DDL_OK;
}

DDL_API int32_t ddl_incarnation(const ddl_context *context) {
    return context != NULL ? (int32_t)context->incarnation : 0;
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

static void ddl__context_unref(ddl_context *c) {
    int32_t refs = --c->refs;
    ddl__unlock(c);
    if (refs == 0) {
        ddl__context_end(c);
    }
}

/* Threads inside a wait, or a call of a trainer, leave it first: their requests have ended. What runs in a step of the
 * program's own may last, or never come back (its thread has ended there): that is told, and in the end given up. */
static ddl_status ddl__await_threads(ddl_context *c) {
    uint64_t begin = ddl__now_ns(), deadline = ddl__deadline(begin, c->settings.timeout_ms);
    uint64_t tell = ddl__deadline(begin, c->settings.stall_ms);
    while (c->cond_waiters > 0 || c->polling || c->held > 0) {
        uint64_t now = ddl__now_ns();
        const char *call = c->held > 0 && now >= DDL__MIN(tell, deadline) ? ddl__held_call(c, 0) : NULL;
        call = call != NULL ? call : "a call of a trainer";
        if (c->held > 0 && now >= deadline) {
            ddl_status status = ddl__error(c, DDL_ERR_TIMEOUT,
                                           "ddl_finalize on rank %d: a thread has been in %s for %.1f s and has not "
                                           "returned; this rank has left the job, and the memory of its context stays: "
                                           "finalize when all threads have returned from the trainer's calls, and let "
                                           "none end inside its step", c->rank, call, (double)(now - begin) / 1e9);
            ddl__log(&c->base, DDL_LOG_WARN, "%s", c->error.text);
            return status;
        }
        if (c->held > 0 && now >= tell) {
            ddl__log(&c->base, DDL_LOG_WARN, "ddl_finalize has waited %.1f s for a thread that is in %s",
                     (double)(now - begin) / 1e9, call);
            tell = DDL__NEVER;
        }
        ddl__wake(c);
        ddl__unlock(c);
        ddl__pause_ms(1);
        ddl__lock(c);
    }
    return DDL_OK;
}

/* Refuses what the calling thread would wait for itself for: it is inside a call that uses what would be freed. */
static ddl_status ddl__finalize_check(ddl_context *c) {
    const char *call = ddl__held_call(c, (uintptr_t)pthread_self());
    return call == NULL ? DDL_OK
                        : ddl__error(c, DDL_ERR_STATE,
                                     "ddl_finalize on rank %d: this thread is inside %s, which uses what would be "
                                     "freed; return from it first (from a step of the program's own, too), and "
                                     "finalize then; nothing has changed", c->rank, call);
}

DDL_API ddl_status ddl_finalize(ddl_context **context) {
    if (context == NULL || *context == NULL) {
        return DDL_OK;
    }
    ddl_context *c = *context;
    DDL__TRY(ddl__enter(c));
    ddl_status status = ddl__finalize_check(c);
    if (status < 0) {
        ddl__unlock(c);
        return status;
    }
    ddl__page_stage_tell(c, DDL__PAGE_LEAVING);
    ddl__timeline_end(c);
    c->finalized = true; /* from here nothing new begins, so that the threads that wait can be waited for */
    ddl__end_requests(c, DDL_ERR_STATE, "the context was finalized while the operation was running");
    ddl__thread_end(c);
    ddl__board_leave(c);
    ddl__say_goodbye(c);
    ddl__poll(c, -1);
    status = ddl__await_threads(c);
    if (status < 0) { /* they still use it: nothing is freed, and its sentence can be read */
        ddl__unlock(c);
        return status;
    }
    *context = NULL;
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
    if (c->detached != NULL && !c->polling && !c->finalized) { /* the stream may have passed what is over */
        ddl__poll(c, -1);
    }
    ddl__detached_reap(c);
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

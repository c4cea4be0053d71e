/* mesh: the self-test of a plugin's transport. Before a plugin carries the job's data, two endpoints of it are opened
 * in this process and play a job of two ranks: messages of odd sizes go both ways, and one native all_reduce when there
 * is such. What arrives late, twice, in the wrong order, damaged or never is the plugin's failure; what cannot be set
 * up is not: the plugin may be short of memory or descriptors, and opening it in earnest will tell. It must not know
 * the job: the two have a job number of their own. */
#ifndef DDL_MESH_SELFTEST_H
#define DDL_MESH_SELFTEST_H

#include "passing.h"

#include <poll.h>
#include <sched.h>

enum { DDL__SELFTEST_ROUNDS = 2, DDL__SELFTEST_SIZES = 7, DDL__SELFTEST_MESSAGES = 14, DDL__SELFTEST_NATIVE = 1023 };
#define DDL__SELFTEST_NS (5 * DDL__NS_PER_S)
/* Turns without any movement, most with a sleep of 1 ms: counted, because on a busy machine each takes longer. */
#define DDL__SELFTEST_IDLE 6000u

/* Nothing; odd; beyond the pieces and rings that transports cut at. */
static const uint32_t ddl__selftest_sizes[DDL__SELFTEST_SIZES] = {0, 1, 3, 255, 4097, 16385, 131071};

/* One of the two ranks: as much of a context as host functions look at. */
typedef struct ddl__selftest_side {
    ddl_context c; /* first: handlers and the host table find their way back */
    ddl__link links[2];
    ddl__outgoing out[DDL__SELFTEST_MESSAGES];
    int32_t posted, sent, come;
    uint8_t *room;       /* where a payload may land directly */
    const uint8_t *data; /* message i is data + i % DDL__SELFTEST_SIZES, unaligned most of the time */
    uint8_t *memory;
    void *set, *op;
    uint32_t in[DDL__SELFTEST_NATIVE], result[DDL__SELFTEST_NATIVE];
    bool *short_of; /* memory or the like, either side */
    ddl__text *why;
} ddl__selftest_side;

static uint32_t ddl__selftest_bytes(int32_t i) { return ddl__selftest_sizes[i % DDL__SELFTEST_SIZES]; }

/* The first failure is the reason. */
static ddl_status __attribute__((format(printf, 2, 3))) ddl__selftest_fail(ddl__selftest_side *side, const char *format,
                                                                           ...) {
    char line[DDL__PLUGIN_REASON_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    if (side->why->used == 0) {
        ddl__text_add(side->why, "%s", line);
    }
    return DDL_ERR_CORRUPT;
}

/* >>selftest_host */

static void *ddl__selftest_alloc(const ddl_host *host, size_t bytes) {
    ddl__selftest_side *side = (ddl__selftest_side *)ddl__core(host);
    void *memory = ddl__alloc(&side->c.base, bytes);
    *side->short_of = *side->short_of || memory == NULL;
    return memory;
}

static void ddl__selftest_log(const ddl_host *host, ddl_log_level level, const char *line) {
    (void)host;
    (void)level;
    (void)line; /* opening it in earnest says the same */
}

static void ddl__selftest_lost(const ddl_host *host, int32_t peer, int32_t system_error, const char *what) {
    ddl__selftest_side *side = (ddl__selftest_side *)ddl__core(host);
    *side->short_of = *side->short_of || system_error == ENOMEM || system_error == EMFILE || system_error == ENFILE ||
                      system_error == ENOBUFS || system_error == ENOSPC;
    ddl__selftest_fail(side, "it lost the link from rank %d to rank %d (%s%s%s)", side->c.rank, peer, what,
                       system_error != 0 ? ": " : "", system_error != 0 ? strerror(system_error) : "");
}

/* A message is here: is it the next one, and whole? */
static ddl_status ddl__selftest_check(ddl__selftest_side *side, const ddl__frame *f, const void *payload) {
    int32_t i = side->come++;
    uint32_t bytes = ddl__selftest_bytes(i);
    if (i >= DDL__SELFTEST_MESSAGES || f->sequence != (uint64_t)i) {
        return ddl__selftest_fail(side, "message %llu of %d came as number %d", (unsigned long long)f->sequence,
                                  DDL__SELFTEST_MESSAGES, i);
    }
    if (f->bytes != bytes || f->signature != ddl__crc32c(0, side->data + i % DDL__SELFTEST_SIZES, bytes) ||
        (bytes > 0 && ddl__crc32c(0, payload, bytes) != f->signature)) {
        return ddl__selftest_fail(side, "message %d, of %u bytes, arrived damaged", i, bytes);
    }
    return DDL_OK;
}

static ddl_status ddl__selftest_deliver(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    (void)peer;
    return ddl__selftest_check((ddl__selftest_side *)c, f, payload);
}

/* Every other payload that may land anywhere lands in its place. */
static void *ddl__selftest_place(ddl_context *c, int32_t peer, const ddl__frame *f, ddl__landing *landing) {
    ddl__selftest_side *side = (ddl__selftest_side *)c;
    (void)peer;
    (void)landing;
    return f->sequence % 2 == 1 && f->bytes <= ddl__selftest_sizes[DDL__SELFTEST_SIZES - 1] ? side->room : NULL;
}

static void ddl__selftest_placed(ddl_context *c, int32_t peer, ddl__landing *landing, ddl_status status) {
    (void)peer;
    if (status == DDL_OK) {
        ddl__selftest_check((ddl__selftest_side *)c, &landing->frame, landing->target);
    }
}

static void ddl__selftest_done(ddl_context *c, ddl__outgoing *out, ddl_status status) {
    ddl__selftest_side *side = (ddl__selftest_side *)c;
    side->sent++;
    if (status < 0) {
        ddl__selftest_fail(side, "message %lld was not sent: %s", (long long)out->index, ddl_status_text(status));
    }
}

/* >>selftest_stage */

/* Makes a side and opens its endpoint. Not DDL_OK: nothing can be said of the plugin. */
static ddl_status ddl__selftest_open(const ddl_context *real, ddl__selftest_side *side, int32_t rank, uint64_t job,
                                     const ddl_transport *table, const ddl_transport_params *as) {
    ddl_context *c = &side->c;
    ddl__endpoint *e = &c->endpoints[0];
    ddl_transport_params params = *as;
    size_t bytes = sizeof e->address / 2;
    c->base.log_level = DDL_LOG_NONE;
    c->settings.secret = real->settings.secret;
    c->settings.secret_bytes = real->settings.secret_bytes;
    c->rank = rank;
    c->world_size = c->local_ranks = c->core_ranks = 2;
    c->cores = real->cores;
    c->job = job;
    c->links = side->links;
    c->handlers[DDL__FRAME_P2P] =
        (ddl__handler){ddl__selftest_deliver, ddl__selftest_place, ddl__selftest_placed};
    side->memory = ddl__alloc(&c->base, ddl__selftest_sizes[DDL__SELFTEST_SIZES - 1]);
    side->room = side->memory;
    c->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (side->memory == NULL || c->epoll_fd < 0) {
        return DDL_ERR_NOMEM;
    }
    ddl__pass_open(c);
    e->host = ddl__host_table(c);
    e->host.alloc = ddl__selftest_alloc;
    e->host.log = ddl__selftest_log;
    e->host.lost = ddl__selftest_lost;
    params.rank = rank;
    params.world_size = params.local_ranks = 2;
    params.port_range = NULL; /* those ports are the job's */
    DDL__TRY(table->open(&e->host, &params, &e->self));
    e->table = table;
    DDL__TRY(table->address(e->self, e->address, &bytes));
    e->address_bytes = (uint32_t)bytes;
    return DDL_OK;
}

/* Lets both sides know each other. */
static ddl_status ddl__selftest_meet(ddl__selftest_side sides[2], const char *host_id) {
    for (int32_t i = 0; i < 2; i++) {
        ddl_context *c = &sides[i].c, *other = &sides[1 - i].c;
        ddl__link *l = &sides[i].links[1 - i];
        memcpy(l->pass_name, other->pass_name, sizeof l->pass_name);
        l->endpoint = &c->endpoints[0];
        for (int32_t k = 0; k < 2; k++) {
            sides[i].links[k].same_host = sides[i].links[k].same_space = true;
            sides[i].links[k].pidfd = -1;
        }
    }
    for (int32_t i = 0; i < 2; i++) {
        const ddl__endpoint *e = &sides[i].c.endpoints[0], *other = &sides[1 - i].c.endpoints[0];
        uint64_t latency_ns, bytes_per_s;
        ddl_status status = e->table->add_peer(e->self, 1 - i, other->address, other->address_bytes, host_id,
                                               &latency_ns, &bytes_per_s);
        if (status == DDL_ERR_UNSUPPORTED && (e->table->flags & DDL_TRANSPORT_LOCAL) == 0) { /* between hosts only? */
            status = e->table->add_peer(e->self, 1 - i, other->address, other->address_bytes, "another host",
                                        &latency_ns, &bytes_per_s);
        }
        DDL__TRY(status);
    }
    return DDL_OK;
}

/* Moves both sides on once; gives the core away when there was nothing to do. */
static void ddl__selftest_turn(ddl__selftest_side sides[2], uint32_t *idle) {
    int32_t events = 0;
    for (int32_t i = 0; i < 2; i++) {
        ddl__endpoint *e = &sides[i].c.endpoints[0];
        ddl__pass_progress(&sides[i].c);
        int32_t n = e->table->progress(e->self, 1 - i);
        if (n < 0) {
            ddl__selftest_fail(&sides[i], "its progress failed: %s", ddl_status_text((ddl_status)n));
        }
        events += n;
    }
    *idle = events > 0 ? 0 : *idle + 1;
    if (*idle > 1000) {
        poll(NULL, 0, 1);
    } else if (*idle > 20) {
        sched_yield();
    }
}

/* What is shared by both stands, or has been given up: that is no failure. */
static ddl_status ddl__selftest_ready(ddl__selftest_side sides[2]) {
    uint32_t idle = 0;
    while (DDL_HAS(sides[0].c.endpoints[0].table, ready)) {
        ddl_status status[2];
        for (int32_t i = 0; i < 2; i++) {
            const ddl__endpoint *e = &sides[i].c.endpoints[0];
            status[i] = e->table->ready(e->self, 1 - i);
            DDL__TRY(status[i]);
        }
        if (status[0] == DDL_OK && status[1] == DDL_OK) {
            break;
        }
        if (idle > DDL__SELFTEST_IDLE) {
            return ddl__selftest_fail(&sides[0], "its two ends were not ready, and nothing moved for %d s",
                                      (int)(DDL__SELFTEST_NS / DDL__NS_PER_S));
        }
        ddl__selftest_turn(sides, &idle);
    }
    return DDL_OK;
}

/* >>selftest_data */

static ddl_status ddl__selftest_post(ddl__selftest_side *side) {
    while (side->posted < DDL__SELFTEST_MESSAGES) {
        int32_t i = side->posted;
        const uint8_t *payload = side->data + i % DDL__SELFTEST_SIZES;
        ddl__frame f = {.type = DDL__FRAME_P2P, .bytes = ddl__selftest_bytes(i), .sequence = (uint64_t)i};
        f.signature = ddl__crc32c(0, payload, f.bytes);
        side->out[i].done = ddl__selftest_done;
        side->out[i].index = i;
        ddl_status status = ddl__post(&side->c, 1 - side->c.rank, &side->out[i], &f, payload);
        if (status < 0) {
            *side->short_of = *side->short_of || status == DDL_ERR_NOMEM;
            return ddl__selftest_fail(side, "it refuses message %d, of %u bytes: %s", i, f.bytes,
                                      ddl_status_text(status));
        }
        side->posted++;
        side->sent += status == DDL_OK;
    }
    return DDL_OK;
}

static ddl_status ddl__selftest_messages(ddl__selftest_side sides[2]) {
    uint32_t idle = 0;
    for (int32_t i = 0; i < 2; i++) {
        DDL__TRY(ddl__selftest_post(&sides[i]));
    }
    for (;;) {
        bool all = true;
        for (int32_t i = 0; i < 2; i++) {
            all = all && sides[i].come >= DDL__SELFTEST_MESSAGES && sides[i].sent == DDL__SELFTEST_MESSAGES;
        }
        if (sides[0].why->used > 0) {
            return DDL_ERR_CORRUPT;
        }
        if (all) {
            return DDL_OK;
        }
        if (idle > DDL__SELFTEST_IDLE) {
            return ddl__selftest_fail(&sides[0], "nothing moved for %d s, and %d and %d of %d messages had arrived",
                                      (int)(DDL__SELFTEST_NS / DDL__NS_PER_S), sides[0].come, sides[1].come,
                                      DDL__SELFTEST_MESSAGES);
        }
        ddl__selftest_turn(sides, &idle);
    }
}

static void ddl__selftest_sum(void *arg, void *dst, const void *const *srcs, int32_t src_count, uint64_t bytes) {
    uint8_t *out = dst;
    (void)arg;
    for (uint64_t at = 0; at < bytes; at += sizeof(uint32_t)) {
        uint32_t sum = 0, one;
        for (int32_t i = 0; i < src_count; i++) {
            memcpy(&one, (const uint8_t *)srcs[i] + at, sizeof one);
            sum += one;
        }
        memcpy(out + at, &sum, sizeof sum);
    }
}

/* Begins the sum on one side. DDL_ERR_UNSUPPORTED: it is not served natively. */
static ddl_status ddl__selftest_begin(ddl__selftest_side *side) {
    static const int32_t ranks[2] = {0, 1};
    const ddl__endpoint *e = &side->c.endpoints[0];
    for (uint32_t i = 0; i < DDL__SELFTEST_NATIVE; i++) {
        side->in[i] = (i + 1) * (side->c.rank == 0 ? 3u : 0x01000193u);
        side->result[i] = 0xdeadbeef;
    }
    ddl_native_call call = {.size = sizeof call, .kind = DDL_ALL_REDUCE, .element_bytes = sizeof side->in[0],
                            .sequence = 1, .signature = 1, .in = side->in, .out = side->result,
                            .bytes = sizeof side->in, .reduce = ddl__selftest_sum};
    DDL__TRY(e->table->native_open(e->self, 1, ranks, 2, side->c.rank, &side->set));
    if (e->table->native_cost_ns(e->self, side->set, call.kind, call.bytes) == 0) {
        return DDL_ERR_UNSUPPORTED;
    }
    return e->table->native_start(e->self, side->set, &call, &side->op);
}

/* Ends what began on one side. */
static void ddl__selftest_end(ddl__selftest_side *side) {
    const ddl__endpoint *e = &side->c.endpoints[0];
    if (side->op != NULL) {
        e->table->native_cancel(e->self, side->set, side->op);
    }
    if (side->set != NULL) {
        e->table->native_close(e->self, side->set);
    }
    side->op = side->set = NULL;
}

static ddl_status ddl__selftest_native(ddl__selftest_side sides[2]) {
    const ddl_transport *table = sides[0].c.endpoints[0].table;
    uint32_t idle = 0;
    if (!DDL_HAS(table, native_open) || ddl__selftest_begin(&sides[0]) < 0 || ddl__selftest_begin(&sides[1]) < 0) {
        return DDL_OK; /* such calls go by messages */
    }
    while (sides[0].op != NULL || sides[1].op != NULL) {
        for (int32_t i = 0; i < 2; i++) {
            int32_t waits_for = -1;
            ddl__selftest_side *side = &sides[i];
            ddl_status status = side->op == NULL ? DDL_IN_PROGRESS
                                : table->native_test(side->c.endpoints[0].self, side->set, side->op, 4, &waits_for);
            if (status == DDL_OK) {
                side->op = NULL;
                idle = 0;
            }
            if (status < 0) {
                return ddl__selftest_fail(side, "its native all_reduce failed: %s", ddl_status_text(status));
            }
        }
        if (idle > DDL__SELFTEST_IDLE) {
            return ddl__selftest_fail(&sides[0], "its native all_reduce did not end, and nothing moved for %d s",
                                      (int)(DDL__SELFTEST_NS / DDL__NS_PER_S));
        }
        ddl__selftest_turn(sides, &idle);
    }
    for (uint32_t i = 0; i < 2 * DDL__SELFTEST_NATIVE; i++) {
        uint32_t at = i / 2, expected = sides[0].in[at] + sides[1].in[at];
        if (sides[i % 2].result[at] != expected) {
            return ddl__selftest_fail(&sides[i % 2], "element %u of its native all_reduce is %u, expected %u", at,
                                      sides[i % 2].result[at], expected);
        }
    }
    return DDL_OK;
}

/* >>selftest */

static void ddl__selftest_close(ddl__selftest_side *side) {
    ddl_context *c = &side->c;
    ddl__endpoint *e = &c->endpoints[0];
    ddl__pass_close(c);
    if (e->table != NULL) {
        ddl__selftest_end(side);
        e->table->close(e->self);
    }
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
    ddl__scratch_free_all(c);
    ddl__free(&c->base, side->memory);
    if (c->epoll_fd >= 0) {
        close(c->epoll_fd);
    }
}

/* The whole play. *out_short: the plugin was short of something, so that nothing was shown. */
static ddl_status ddl__selftest_play(ddl_context *c, const ddl_transport *table, const ddl_transport_params *params,
                                     ddl__selftest_side sides[2], uint8_t *data) {
    uint64_t job;
    DDL__TRY(ddl__random(&job, sizeof job));
    for (uint32_t i = 0; i < ddl__selftest_sizes[DDL__SELFTEST_SIZES - 1] + DDL__SELFTEST_SIZES; i++) {
        data[i] = (uint8_t)((i * 2654435761u) >> 24);
    }
    ddl_status status = DDL_OK;
    for (int32_t i = 0; i < 2 && status == DDL_OK; i++) {
        sides[i].data = data;
        status = ddl__selftest_open(c, &sides[i], i, job, table, params);
    }
    status = status == DDL_OK ? ddl__selftest_meet(sides, params->host_id) : status;
    status = status == DDL_OK ? ddl__selftest_ready(sides) : status;
    status = status == DDL_OK ? ddl__selftest_messages(sides) : status;
    return status == DDL_OK ? ddl__selftest_native(sides) : status;
}

/* One try. Returns true unless the transport has failed; then *why says how. */
static bool ddl__selftest_once(ddl_context *c, const ddl_transport *table, const ddl_transport_params *params,
                               ddl__text *why) {
    bool short_of = false;
    ddl__selftest_side *sides = ddl__alloc_array(&c->base, 2, sizeof *sides);
    uint8_t *data = ddl__alloc(&c->base, ddl__selftest_sizes[DDL__SELFTEST_SIZES - 1] + DDL__SELFTEST_SIZES);
    for (int32_t i = 0; sides != NULL && i < 2; i++) {
        sides[i].c.base = c->base;
        sides[i].c.epoll_fd = sides[i].c.pass_fd = sides[i].c.wake_fd = -1;
        sides[i].short_of = &short_of;
        sides[i].why = why;
    }
    if (sides != NULL && data != NULL) {
        uint64_t start_ns = ddl__now_ns();
        ddl_status status = ddl__selftest_play(c, table, params, sides, data);
        for (int32_t i = 0; i < 2 && status == DDL_OK; i++) { /* nobody waits for last words to be heard */
            sides[i].c.endpoints[0].table->peer_dead(sides[i].c.endpoints[0].self, 1 - i);
        }
        ddl__log(&c->base, DDL_LOG_DEBUG, "self-test: %s, %.2f ms",
                 why->used > 0 ? "failed" : status < 0 ? ddl_status_text(status) : "passed",
                 (double)(ddl__now_ns() - start_ns) * 1e-6);
    }
    for (int32_t i = 0; sides != NULL && i < 2; i++) {
        ddl__selftest_close(&sides[i]);
    }
    ddl__free(&c->base, data);
    ddl__free(&c->base, sides);
    return why->used == 0 || short_of;
}

/* Tries a transport out. What fails once may have met a full system or a signal; twice is no chance. A transport that
 * is used on request only (tests, simulations) may have a world or a clock of its own, and is believed.
 * Returns false when it is not to be used; *why says how it failed. */
static bool ddl__selftest(ddl_context *c, const ddl_transport *table, const ddl_transport_params *params,
                          ddl__text *why) {
    uint32_t untried = DDL_TRANSPORT_ON_REQUEST | DDL_TRANSPORT_DEVICE; /* the latter carries no messages */
    if (!c->settings.self_test || (table->flags & untried) != 0 || DDL_HAS(table, clock_ns)) {
        return true;
    }
    uint64_t start_ns = ddl__now_ns();
    if (ddl__selftest_once(c, table, params, why)) {
        return true;
    }
    if (ddl__now_ns() - start_ns >= DDL__SELFTEST_NS) {
        return false; /* no moment's trouble lasts so long */
    }
    why->used = 0;
    return ddl__selftest_once(c, table, params, why);
}

#endif /* DDL_MESH_SELFTEST_H */

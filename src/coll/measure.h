/* coll, fifth part: the first words of a new world. A barrier shows that all can reach each other; a few messages
 * measure what the cost model needs. One pair measures for all, so that every rank chooses the same algorithms. The
 * figures are rounded to powers of the root of two: noise then rarely changes a choice, and with it the order of a sum.
 * With DDL_TUNE_CACHE they are kept in a file, and later runs of the same shape choose exactly alike. */
#ifndef DDL_COLL_MEASURE_H
#define DDL_COLL_MEASURE_H

#include "groups.h"

#include <fcntl.h>
#include <sys/stat.h>

enum { DDL__PINGS = 24, DDL__STREAMS = 6, DDL__STREAM_BYTES = 256 * 1024, DDL__TAG_MEASURE = INT32_MIN + 0x50000000 };
enum { DDL__FIGURES = 5 }; /* latency and time per byte, near and far; and whether they were kept */

static ddl_status ddl__on_abort(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload);

/* With a progress thread, differing calls and long waits are noticed while the program computes; an operation ends by
 * its deadline only when somebody waits for it. */
static void ddl__thread_tick(ddl_context *c, void *arg, uint64_t now) {
    (void)arg;
    for (int32_t i = 0; i < c->requests->chunk_count * DDL__REQUESTS_CHUNK; i++) {
        ddl_request *r = &c->requests->chunks[i / DDL__REQUESTS_CHUNK][i % DDL__REQUESTS_CHUNK];
        if (ddl__is_pending(r) && now - DDL__MIN(r->attended_ns, now) > DDL__ATTEND_NS) {
            ddl__request_attend(c, r, now, r->detached);
        }
    }
}

/* One message of ddl's own, blocking. */
static ddl_status ddl__measure_move(ddl_group *g, int32_t peer, bool send, void *data, int64_t bytes) {
    ddl_transfer t = {send, ddl_tensor_1d(data, DDL_U8, bytes), peer, DDL__TAG_MEASURE};
    ddl_request *r = NULL;
    DDL__TRY(ddl__p2p_make(g, &t, &r));
    ddl__p2p_start(g->context, r);
    ddl__wait_requests(g->context, &r, 1, false);
    return ddl__request_report(&r, NULL);
}

/* Shortest of several round trips of one size, in seconds one way. */
static ddl_status ddl__measure_trip(ddl_group *g, int32_t peer, bool first, void *data, int64_t bytes, int32_t rounds,
                                    double *out_s) {
    uint64_t least = UINT64_MAX;
    for (int32_t i = 0; i < rounds; i++) {
        uint64_t start = ddl__now_ns();
        DDL__TRY(ddl__measure_move(g, peer, first, data, bytes));
        DDL__TRY(ddl__measure_move(g, peer, !first, data, bytes));
        least = DDL__MIN(least, ddl__now_ns() - start);
    }
    *out_s = (double)least / 2e9;
    return DDL_OK;
}

/* Rounds to a power of sqrt(2), by halving and doubling: libm is not linked. */
static double ddl__round_figure(double value) {
    const double root = 1.4142135623730951;
    double figure = DDL__FIGURE_MIN;
    while (figure * 1.189207115 < value && figure < DDL__FIGURE_MAX / 10) {
        figure *= root;
    }
    return figure;
}

/* The pair that measures links inside a host (near) or between hosts: the lowest ranks of that kind. */
static bool ddl__measure_pair(const ddl_context *c, bool near_link, int32_t *out_a, int32_t *out_b) {
    for (int32_t a = 0; a < c->world_size; a++) {
        for (int32_t b = a + 1; b < c->world_size; b++) {
            if ((c->links[a].host == c->links[b].host) == near_link) {
                *out_a = a;
                *out_b = b;
                return true;
            }
        }
    }
    return false;
}

/* Figures travel as the bits of doubles. */
static void ddl__figures_write(const double *figures, int32_t count, uint8_t *out) {
    for (int32_t i = 0; i < count; i++) {
        uint64_t bits;
        memcpy(&bits, &figures[i], sizeof bits);
        ddl__store_le64(out + 8 * i, bits);
    }
}

static void ddl__figures_read(const uint8_t *in, int32_t count, double *out_figures) {
    for (int32_t i = 0; i < count; i++) {
        uint64_t bits = ddl__load_le64(in + 8 * i);
        memcpy(&out_figures[i], &bits, sizeof bits);
    }
}

static ddl_status ddl__figures_broadcast(ddl_context *c, double *figures, int32_t count, int32_t root) {
    uint8_t wire[8 * DDL__FIGURES] = {0};
    ddl_tensor t = ddl_tensor_1d(wire, DDL_U8, 8 * (int64_t)count);
    ddl__asked ask = {.kind = DDL_BROADCAST, .in = &t, .root = root};
    ddl_request *r;
    ddl__figures_write(figures, count, wire);
    DDL__TRY(ddl__coll_begin(c->world, &ask, "ddl_init", &r));
    ddl__wait_requests(c, &r, 1, false);
    DDL__TRY(ddl__request_report(&r, NULL));
    ddl__figures_read(wire, count, figures);
    return DDL_OK;
}

/* The same on both ranks of a pair; figures[0] seconds, figures[1] seconds per byte. */
static ddl_status ddl__measure_trips(ddl_context *c, int32_t peer, bool first, double figures[2]) {
    char *data = ddl__scratch_get(c, DDL__STREAM_BYTES);
    if (data == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "ddl_init: no memory to measure the links");
    }
    memset(data, 0, DDL__STREAM_BYTES);
    double small = 0, large = 0;
    ddl_status status = ddl__measure_trip(c->world, peer, first, data, 8, DDL__PINGS, &small);
    if (status == DDL_OK) {
        status = ddl__measure_trip(c->world, peer, first, data, DDL__STREAM_BYTES, DDL__STREAMS, &large);
    }
    ddl__scratch_put(c, data);
    DDL__TRY(status);
    figures[0] = ddl__round_figure(small);
    figures[1] = ddl__round_figure(large > small ? (large - small) / DDL__STREAM_BYTES : 1e-11);
    return DDL_OK;
}

/* Latency and bandwidth of one kind of link. */
static ddl_status ddl__measure_links(ddl_context *c, bool near_link, double figures[2]) {
    int32_t a, b;
    if (!ddl__measure_pair(c, near_link, &a, &b)) {
        return DDL_OK;
    }
    if (c->rank == a || c->rank == b) {
        DDL__TRY(ddl__measure_trips(c, c->rank == a ? b : a, c->rank == a, figures));
    }
    return ddl__figures_broadcast(c, figures, 2, a);
}

/* >>cache */

/* What the figures depend on: the shape of the world and how its ranks reach each other. */
static uint64_t ddl__model_key(const ddl_context *c) {
    uint64_t key = ddl__mix((uint64_t)ddl_version(), (uint64_t)c->world_size);
    for (int32_t i = 0; i < c->world_size; i++) {
        const ddl__endpoint *e = c->links[i].endpoint;
        const char *name = e != NULL ? e->plugin->name : "";
        key = ddl__mix(key, (uint64_t)c->links[i].host);
        key = i == c->rank ? key : ddl__mix_bytes(key, name, strlen(name));
    }
    return ddl__mix(key, (uint64_t)c->tuning.model.oversubscription);
}

/* Rank 0 reads and writes the file: it can, and what is there already are figures, or nothing. A damaged line among
 * them does no harm. */
static ddl_status ddl__model_check(ddl_context *c) {
    const char *path = c->settings.tune_cache;
    if (path == NULL || c->rank != 0) {
        return DDL_OK;
    }
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    fd = fd < 0 && errno == ENOENT ? open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666) : fd;
    if (fd < 0) {
        return ddl__error(c, DDL_ERR_CONFIG, "ddl_init: %.400s of DDL_TUNE_CACHE cannot be opened: %s", path,
                          strerror(errno));
    }
    FILE *file = fstat(fd, &st) == 0 && S_ISREG(st.st_mode) ? fdopen(fd, "re") : NULL;
    if (file == NULL) {
        close(fd);
        return ddl__error(c, DDL_ERR_CONFIG, "ddl_init: %.400s of DDL_TUNE_CACHE is no file to keep figures in", path);
    }
    char line[160];
    bool empty = true, ours = false;
    while (!ours && fgets(line, sizeof line, file) != NULL) {
        size_t digits = strspn(line, "0123456789abcdef"); /* of the key, a hash */
        empty = false;
        ours = digits >= 8 && digits <= 16 && line[digits] == ' ';
    }
    fclose(file);
    return empty || ours ? DDL_OK
                         : ddl__error(c, DDL_ERR_CONFIG, "ddl_init: %.400s of DDL_TUNE_CACHE holds something else than "
                                      "measured figures; name another file, or remove this one", path);
}

static bool ddl__model_load(const char *path, uint64_t mine, double figures[4]) {
    FILE *file = fopen(path, "re");
    char line[160];
    bool found = false;
    uint64_t key;
    double f[4];
    while (file != NULL && !found && fgets(line, sizeof line, file) != NULL) {
        found = ddl__model_parse(line, &key, f) && key == mine;
    }
    if (found) {
        memcpy(figures, f, sizeof f);
    }
    if (file != NULL) {
        fclose(file);
    }
    return found;
}

/* One appended line: writers of other jobs cannot tear it. */
static void ddl__model_save(const ddl_context *c, const char *path, uint64_t key, const double figures[4]) {
    char line[160];
    size_t bytes = ddl__model_write(line, sizeof line, key, figures);
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0 || write(fd, line, bytes) != (ssize_t)bytes) {
        ddl__log(&c->base, DDL_LOG_WARN, "DDL_TUNE_CACHE: cannot write to %s: %s; the measured figures are not kept",
                 path, strerror(errno));
    }
    if (fd >= 0) {
        close(fd);
    }
}

/* >>choice */

/* Between hosts there may be two ways: a plugin's transport, and TCP that watches beside it. Where DDL_TRANSPORTS does
 * not say which, rank 0 and the first of another host measure both; all take what was faster there for 64 KiB. The
 * pings strictly alternate, and every operation names its peer and number: no message minds that another transport
 * carried the one before; but sealed ones (DDL_MAC) are counted, and then there is no choice. */
static bool ddl__has_choice(const ddl_context *c, int32_t peer) {
    return c->settings.transports == NULL && !c->settings.mac && c->links[peer].watch != NULL;
}

/* figures: of the adapter's transport, then of TCP; as they were, when one of both ranks has no choice. */
static ddl_status ddl__choice_measure(ddl_context *c, int32_t peer, bool first, double figures[4]) {
    ddl__link *l = &c->links[peer];
    ddl__endpoint *chosen = l->endpoint;
    uint8_t mine = ddl__has_choice(c, peer), other = 0;
    DDL__TRY(ddl__measure_move(c->world, peer, first, first ? &mine : &other, 1));
    DDL__TRY(ddl__measure_move(c->world, peer, !first, first ? &other : &mine, 1));
    if (!mine || !other) {
        return DDL_OK;
    }
    DDL__TRY(ddl__measure_trips(c, peer, first, figures));
    l->endpoint = l->watch;
    ddl_status status = ddl__measure_trips(c, peer, first, figures + 2);
    l->endpoint = chosen;
    return status;
}

static double ddl__choice_s(const double figures[2]) { return figures[0] + 65536 * figures[1]; }

/* figures are equal on all ranks. A rank without the choice on a link keeps what it has there; its peer does too, as
 * both had the same offers. */
static void ddl__choice_take(ddl_context *c, const double figures[4]) {
    bool tcp = ddl__choice_s(figures + 2) < ddl__choice_s(figures);
    memcpy(c->choice, figures, sizeof c->choice);
    c->choice_name = "another rank's transport";
    for (int32_t i = 0; i < c->world_size; i++) {
        if (ddl__has_choice(c, i)) {
            c->choice_name = c->links[i].endpoint->plugin->name;
        }
    }
    for (int32_t i = 0; tcp && i < c->world_size; i++) {
        ddl__link *l = &c->links[i];
        if (ddl__has_choice(c, i)) {
            l->slower = l->endpoint;
            l->endpoint = l->watch;
            l->watch = NULL;
        }
    }
}

static ddl_status ddl__choose(ddl_context *c) {
    double figures[DDL__FIGURES] = {0};
    const char *path = c->settings.tune_cache;
    uint64_t key = ddl__mix(ddl__model_key(c), 1); /* another than that of the figures for the cost model */
    int32_t a, b;
    if (!ddl__measure_pair(c, false, &a, &b)) {
        return DDL_OK; /* the same on all ranks: there is one host */
    }
    bool kept = c->rank == a && path != NULL && ddl__model_load(path, key, figures);
    uint8_t go = !kept;
    if (c->rank == a || c->rank == b) {
        DDL__TRY(ddl__measure_move(c->world, c->rank == a ? b : a, c->rank == a, &go, 1));
    }
    if (go && (c->rank == a || c->rank == b)) {
        DDL__TRY(ddl__choice_measure(c, c->rank == a ? b : a, c->rank == a, figures));
    }
    if (c->rank == a && !kept && path != NULL && figures[0] > 0) {
        ddl__model_save(c, path, key, figures);
    }
    DDL__TRY(ddl__figures_broadcast(c, figures, 4, a));
    if (figures[0] > 0) {
        ddl__choice_take(c, figures);
    }
    return DDL_OK;
}

/* >>greeting */

static ddl_status ddl__measure(ddl_context *c) {
    ddl__cost_model *m = &c->tuning.model;
    double figures[DDL__FIGURES] = {m->latency_s[0], m->s_per_byte[0], m->latency_s[1], m->s_per_byte[1], 0};
    const char *path = c->settings.tune_cache;
    if (path != NULL && c->rank == 0) {
        figures[4] = ddl__model_load(path, ddl__model_key(c), figures) ? 1 : 0;
    }
    if (path != NULL) {
        DDL__TRY(ddl__figures_broadcast(c, figures, DDL__FIGURES, 0));
    }
    if (figures[4] == 0) {
        DDL__TRY(ddl__measure_links(c, true, figures));
        DDL__TRY(ddl__measure_links(c, false, figures + 2));
        if (path != NULL && c->rank == 0) {
            ddl__model_save(c, path, ddl__model_key(c), figures);
        }
    }
    m->latency_s[0] = figures[0];
    m->s_per_byte[0] = figures[1];
    m->latency_s[1] = figures[2];
    m->s_per_byte[1] = figures[3];
    /* About half of the way of a small message is the sender's own work. */
    m->message_s = figures[0] / 2;
    c->world->tuning.model = *m;
    c->world->settings_version++;
    return DDL_OK;
}

/* The line at the start: who is there, how they reach each other, and why. */
static void ddl__announce(ddl_context *c) {
    char line[512];
    ddl__text text = {line, sizeof line, 0};
    ddl__text_add(&text, "%d ranks on %d host%s", c->world_size, c->host_count, c->host_count == 1 ? "" : "s");
    for (int32_t e = 0; e < c->endpoint_count; e++) {
        int32_t near_count = 0, far_count = 0;
        for (int32_t i = 0; i < c->world_size; i++) {
            near_count += c->links[i].endpoint == &c->endpoints[e] && c->links[i].same_host;
            far_count += c->links[i].endpoint == &c->endpoints[e] && !c->links[i].same_host;
        }
        if (near_count + far_count > 0) {
            ddl__text_add(&text, "; %s to %d rank%s here and %d elsewhere (%s)", c->endpoints[e].plugin->name,
                          near_count, near_count == 1 ? "" : "s", far_count,
                          c->settings.transports != NULL ? "first of DDL_TRANSPORTS that reaches them"
                                                         : "fastest that reaches them");
        }
    }
    const ddl__cost_model *m = &c->tuning.model;
    if (c->choice[0] > 0) {
        ddl__text_add(&text, "; between hosts the faster as measured: 64 KiB take %.1f us by %s, %.1f us by tcp",
                      ddl__choice_s(c->choice) * 1e6, c->choice_name, ddl__choice_s(c->choice + 2) * 1e6);
    }
    ddl__text_add(&text, "; measured %.1f us, %.2f GB/s", m->latency_s[c->host_count > 1] * 1e6,
                  1e-9 / m->s_per_byte[c->host_count > 1]);
    if (m->oversubscription > 1) {
        ddl__text_add(&text, "; %d ranks per core", m->oversubscription);
    }
    ddl__text_add(&text, "; %s", c->settings.secret != NULL ? "authenticated by the job secret"
                                                            : "no job secret: same host and user only");
    ddl__log(&c->base, c->rank == 0 ? DDL_LOG_INFO : DDL_LOG_DEBUG, "%s", line);
}

/* Which transports run the collectives of the world, or of a grown group, by themselves: on all ranks, or on none. */
static ddl_status ddl__native_agree(ddl_group *world, const char *what) {
    int32_t all = ddl__native_open(world);
    ddl_tensor flag = ddl_tensor_1d(&all, DDL_I32, 1);
    ddl__asked ask = {.kind = DDL_ALL_REDUCE, .in = &flag, .out = &flag, .op = DDL_BAND};
    ddl_request *r;
    ddl__native set = world->native;
    world->native.set = NULL; /* not to be used before all are known to have it */
    ddl_status status = ddl__coll_begin(world, &ask, what, &r);
    if (status == DDL_OK) {
        ddl__wait_requests(world->context, &r, 1, false);
        status = ddl__request_report(&r, NULL);
    }
    world->native = set;
    world->settings_version++;
    ddl__native_close(world, status < 0 ? 0 : all);
    return status;
}

/* The progress thread; there is one at most. */
static ddl_status ddl__thread_start(ddl_context *c, const char *what) {
    ddl__lock_by_mutex(c);
    int error = c->has_thread ? 0 : pthread_create(&c->thread, NULL, ddl__thread_main, c);
    if (error != 0) {
        return ddl__error(c, DDL_ERR_SYSTEM, "%s: the progress thread cannot be started: %s", what, strerror(error));
    }
    c->has_thread = true;
    /* relaxed: a hint */
    atomic_store_explicit(&c->lock_spins, ddl__is_crowded(c) ? 0 : DDL__LOCK_SPINS, memory_order_relaxed);
    return DDL_OK;
}

static void ddl__thread_end(ddl_context *c) {
    if (c->has_thread) {
        c->thread_stop = true;
        ddl__wake(c);
        ddl__unlock(c);
        pthread_join(c->thread, NULL);
        ddl__lock(c);
        c->has_thread = false;
        atomic_store_explicit(&c->lock_spins, 0, memory_order_relaxed); /* as above */
    }
}

static ddl_status ddl__thread_begin(ddl_context *c) {
    return c->settings.progress_thread ? ddl__thread_start(c, "ddl_init") : DDL_OK;
}

static ddl_status ddl__greet(ddl_context *c) {
    if (c->world_size == 1) {
        return DDL_OK;
    }
    ddl__asked ask = {.kind = DDL_BARRIER};
    ddl_request *r;
    int64_t timeout_ms = c->world->timeout_ms;
    c->world->timeout_ms = c->settings.init_timeout_ms;
    /* By dissemination whatever is faster: its links keep the world connected, and news of a death reaches all. */
    c->world->tuning.forced[DDL_BARRIER] = ddl__algo_find(DDL_BARRIER, "dissemination");
    DDL__TRY(ddl__coll_begin(c->world, &ask, "ddl_init", &r));
    ddl__wait_requests(c, &r, 1, false);
    DDL__TRY(ddl__request_report(&r, NULL));
    DDL__TRY(ddl__choose(c));
    DDL__TRY(ddl__measure(c));
    DDL__TRY(ddl__native_agree(c->world, "ddl_init"));
    c->world->timeout_ms = timeout_ms;
    c->world->tuning.forced[DDL_BARRIER] = c->tuning.forced[DDL_BARRIER];
    DDL__TRY(ddl__thread_begin(c));
    ddl__announce(c);
    return DDL_OK;
}

#endif /* DDL_COLL_MEASURE_H */

/* mini_host.h: a small host in place of the core, for a transport under test: memory that is counted, messages whose
 * bytes, order and number are checked, answers from within callbacks, refusals. Endpoints of one process are driven in
 * turn, so that each fault happens at a chosen moment. The test adds what its transport needs besides (deliver, prove,
 * passing of descriptors) between endpoint_host and endpoint_start. */
#ifndef TEST_MINI_HOST_H
#define TEST_MINI_HOST_H

#include "ranks.h"

#include "ddl.h"

#include <fcntl.h>
#include <poll.h>

#ifndef MINI_RANKS
#define MINI_RANKS 8
#endif
enum { RANKS = MINI_RANKS, DEPTH = 64, SETTINGS = 2 };

/* ---- a host ---- */

typedef struct letter {
    ddl_message message; /* header: payload bytes u64, number u64, sender u64, zeros */
    int returned, borrowed, lent;
    ddl_status status;
    uint8_t *payload;
} letter;

typedef struct endpoint {
    ddl_host host; /* first: functions of the host get back to the endpoint */
    const ddl_transport *transport;
    void *self;
    int rank, blocks, proofs; /* blocks, proofs: memory and states of a proof that are alive */
    int fail_alloc, allocs;   /* the n-th allocation fails */
    int failed;               /* progress has said that the transport is at its end */
    const char *secret, *detail, *advertise;
    int local_ranks; /* 0: all are */
    const char *settings[SETTINGS]; /* "NAME=value", without DDL_ */
    int echo, refuse, discard; /* answers from within landed(); land() says: damaged; or: not wanted */
    int no_passing;            /* descriptors go nowhere */
    uint64_t next[RANKS], arrived[RANKS], bad; /* the number that must come next; how many came; wrong bytes */
    int lost[RANKS], landing_failed[RANKS], lost_error[RANKS];
    int open_landings, returned, warnings;
    uint8_t *landing[RANKS];
    uint64_t landing_bytes[RANKS], landing_number[RANKS], sent_number[RANKS];
    char log[8192]; /* all but what is for debugging */
} endpoint;

static endpoint *of(const ddl_host *host) { return (endpoint *)(uintptr_t)host; }

static uint8_t pattern(uint64_t number, uint64_t sender, uint64_t at) {
    return (uint8_t)((number * 31 + sender * 7 + at * 13 + (at >> 9)) ^ 0x5a);
}

static void *mini_alloc(const ddl_host *host, size_t bytes) {
    if (++of(host)->allocs == of(host)->fail_alloc) {
        return NULL;
    }
    void *p = malloc(bytes + 1);
    memset(p, 0xa5, bytes + 1); /* a plugin must not count on zeros */
    of(host)->blocks++;
    return p;
}

static void mini_free(const ddl_host *host, void *memory) {
    if (memory != NULL) {
        of(host)->blocks--;
        free(memory);
    }
}

static void mini_log(const ddl_host *host, ddl_log_level level, const char *line) {
    endpoint *e = of(host);
    size_t used = strlen(e->log);
    e->warnings += level == DDL_LOG_WARN;
    if (level <= DDL_LOG_INFO && used + strlen(line) + 2 < sizeof e->log) {
        snprintf(e->log + used, sizeof e->log - used, "%s\n", line);
    }
}

static const char *mini_setting(const ddl_host *host, const char *name) {
    size_t bytes = strlen(name);
    for (int i = 0; i < SETTINGS; i++) {
        const char *line = of(host)->settings[i];
        if (line != NULL && strncmp(line, name, bytes) == 0 && line[bytes] == '=') {
            return line + bytes + 1;
        }
    }
    return NULL;
}

static uint64_t mini_now_ns(const ddl_host *host) {
    (void)host;
    return (uint64_t)(test_now_s() * 1e9);
}

static uint64_t word(const uint8_t *header, int i) {
    uint64_t w;
    memcpy(&w, header + 8 * i, 8);
    return w;
}

static void arrived(endpoint *e, int peer, const uint8_t *data, uint64_t bytes, uint64_t number) {
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < bytes && !e->discard; i++) {
        wrong += data[i] != pattern(number, (uint64_t)peer, i);
    }
    e->bad += wrong;
    CHECK_EQ(number, e->next[peer]);
    e->next[peer]++;
    e->arrived[peer]++;
}

static ddl_status post(endpoint *e, int peer, letter *l, uint64_t bytes);

static void answer(endpoint *e, int peer, uint64_t bytes) {
    letter *l = calloc(1, sizeof *l);
    ddl_status posted = post(e, peer, l, bytes);
    CHECK(posted == DDL_OK || posted == DDL_IN_PROGRESS);
    l->borrowed = -1; /* mini_sent frees it */
    if (posted == DDL_OK) {
        free(l->payload);
        free(l);
    }
}

static ddl_status mini_land(const ddl_host *host, int32_t peer, const uint8_t *header, uint64_t *out_bytes,
                            void **out_to, void **out_token) {
    endpoint *e = of(host);
    if (e->refuse) {
        return DDL_ERR_CORRUPT;
    }
    CHECK_EQ(word(header, 2), peer);
    CHECK(e->landing[peer] == NULL);
    e->landing_bytes[peer] = *out_bytes = word(header, 0);
    e->landing_number[peer] = word(header, 1);
    e->landing[peer] = malloc(*out_bytes + 1);
    memset(e->landing[peer], 0xee, *out_bytes + 1);
    *out_to = e->discard ? NULL : e->landing[peer];
    *out_token = e->landing[peer];
    e->open_landings++;
    return DDL_OK;
}

static void mini_landed(const ddl_host *host, int32_t peer, void *token, ddl_status status) {
    endpoint *e = of(host);
    uint8_t *data = e->landing[peer];
    uint64_t bytes = e->landing_bytes[peer];
    CHECK(token == data);
    e->open_landings--;
    e->landing[peer] = NULL;
    e->landing_failed[peer] += status != DDL_OK;
    e->next[peer] += status == DDL_ERR_CANCELLED; /* that one was given up */
    if (status == DDL_OK) {
        arrived(e, peer, data, bytes, e->landing_number[peer]);
        e->bad += data[bytes] != 0xee;
    }
    free(data);
    if (status == DDL_OK && e->echo) {
        answer(e, peer, bytes);
    }
}

static void mini_sent(const ddl_host *host, ddl_message *message, ddl_status status) {
    letter *l = (letter *)message;
    l->returned++;
    l->status = status;
    of(host)->returned++;
    if (l->borrowed == -1) {
        free(l->payload);
        free(l);
    } else if (!l->lent) {
        memset(l->payload, 0xdd, l->message.payload_bytes); /* as the owner may */
    }
}

static void mini_lost(const ddl_host *host, int32_t peer, int32_t error, const char *what) {
    CHECK(what != NULL && what[0] != '\0');
    of(host)->lost[peer]++;
    of(host)->lost_error[peer] = error;
}

/* ---- what the tests do with it ---- */

static void endpoint_host(endpoint *e, int rank) {
    memset(e, 0, sizeof *e);
    e->rank = rank;
    e->host = (ddl_host){.size = sizeof e->host, .abi = DDL_PLUGIN_ABI, .alloc = mini_alloc, .free = mini_free,
                         .log = mini_log, .setting = mini_setting, .now_ns = mini_now_ns, .land = mini_land,
                         .landed = mini_landed, .sent = mini_sent, .lost = mini_lost};
}

static ddl_status endpoint_try(endpoint *e, int n, const ddl_transport *transport) {
    e->transport = transport;
    ddl_transport_params params = {.size = sizeof params, .rank = e->rank, .world_size = n, .cores = 1,
                                   .local_ranks = e->local_ranks > 0 ? e->local_ranks : n,
                                   .host_id = "here", .advertise = e->advertise, .authenticated = e->secret != NULL,
                                   .asked = e->detail != NULL, .detail = e->detail};
    return transport->open(&e->host, &params, &e->self);
}

static void endpoint_start(endpoint *e, int n, const ddl_plugin *plugin) {
    CHECK_EQ(endpoint_try(e, n, plugin->transport), DDL_OK);
}

static void endpoint_close(endpoint *e) {
    if (e->self != NULL) {
        e->transport->close(e->self);
    }
    e->self = NULL;
    CHECK_EQ(e->blocks, 0);
    CHECK_EQ(e->proofs, 0);
    CHECK_EQ(e->open_landings, 0);
    CHECK_EQ(e->bad, 0);
}

static void world_close(endpoint *e, int n) {
    for (int i = 0; i < n * n; i++) { /* those who do not listen any more are not waited for */
        if (i / n != i % n && e[i / n].self != NULL) {
            e[i / n].transport->peer_dead(e[i / n].self, i % n);
        }
    }
    for (int i = 0; i < n; i++) {
        endpoint_close(&e[i]);
    }
}

/* Fills a letter and sends it. DDL_OK: the memory is scribbled over at once, as the caller may. lent: tensor memory. */
static ddl_status post_in(endpoint *e, int peer, letter *l, uint64_t bytes, void *lent) {
    uint64_t words[6] = {bytes, e->sent_number[peer]++, (uint64_t)e->rank};
    memset(l, 0x77, sizeof *l); /* next and priv hold nonsense: they are the transport's to set */
    memcpy(l->message.header, words, sizeof words);
    l->returned = 0;
    l->lent = lent != NULL;
    l->payload = lent != NULL ? lent : malloc(bytes + 1);
    for (uint64_t i = 0; i < bytes; i++) {
        l->payload[i] = pattern(words[1], words[2], i);
    }
    l->message.payload = bytes > 0 ? l->payload : NULL;
    l->message.payload_bytes = bytes;
    ddl_status status = e->transport->send(e->self, peer, &l->message);
    if (status == DDL_OK && !l->lent) {
        memset(l->payload, 0xdd, bytes);
    }
    l->borrowed = status == DDL_IN_PROGRESS;
    return status;
}

static ddl_status post(endpoint *e, int peer, letter *l, uint64_t bytes) { return post_in(e, peer, l, bytes, NULL); }

static void letter_free(letter *l) {
    CHECK_EQ(l->returned, l->borrowed);
    if (!l->lent) {
        free(l->payload);
    }
}

static int progress_all(endpoint *e, int n) {
    int events = 0;
    for (int i = 0; i < n; i++) {
        int32_t got = e[i].self != NULL ? e[i].transport->progress(e[i].self, -1) : 0;
        CHECK(got >= 0);
        events += got;
    }
    return events;
}

/* Sleeps on the armed descriptors, as the core does. Returns how many were readable; -1: one has something to do. */
static int sleep_all(endpoint *e, int n, int ms) {
    struct pollfd fds[RANKS];
    for (int i = 0; i < n; i++) {
        fds[i] = (struct pollfd){.fd = -1, .events = POLLIN};
        if (e[i].self != NULL && e[i].transport->arm(e[i].self, &fds[i].fd) != DDL_OK) {
            return -1;
        }
    }
    return poll(fds, (nfds_t)n, ms);
}

/* Leaves the test when the condition does not come true. The block after it runs in each turn. */
#define DRIVE(world, n, condition)                                                                                     \
    for (double until = test_now_s() + 20 * test_slow(); !(condition);)                                                \
        if (!drive(world, n, until, #condition)) {                                                                     \
            return;                                                                                                    \
        } else

static int drive(endpoint *e, int n, double until, const char *what) {
    if (progress_all(e, n) == 0) {
        sleep_all(e, n, 100);
    }
    if (test_now_s() >= until) {
        test__fail(__FILE__, __LINE__, "never came true: %s", what);
    }
    return test_now_s() < until;
}

static int fd_count(void) {
    int count = 0;
    for (int fd = 0; fd < 1024; fd++) {
        count += fcntl(fd, F_GETFD) >= 0;
    }
    return count;
}

#endif

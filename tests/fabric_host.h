/* fabric_host.h: endpoints of plugins/fabric on a small host in place of the core, over the tcp provider on loopback:
 * memory that is counted, messages whose bytes, order and number are checked. */
#ifndef TEST_FABRIC_HOST_H
#define TEST_FABRIC_HOST_H

#include "test.h"

#include "../plugins/fabric/fabric.c"

#include <fcntl.h>
#include <poll.h>

enum { RANKS = 6, SETTINGS = 4 };

/* ---- a host ---- */

typedef struct letter {
    ddl_message message; /* header: payload bytes u64, number u64, sender u64, zeros */
    int returned, borrowed;
    ddl_status status;
    uint8_t *payload;
    uint64_t bytes;
} letter;

typedef struct endpoint {
    ddl_host host; /* first: functions of the host get back to the endpoint */
    fabric_self *self;
    int rank, blocks, open_landings, returned, lost[RANKS], lost_error[RANKS], landing_failed;
    int fail_alloc, allocs; /* the n-th allocation fails */
    int discard, failed; /* failed: progress said that the transport is at its end */
    const char *settings[SETTINGS];
    const char *detail;
    uint64_t next[RANKS], arrived[RANKS], bad, sent_number[RANKS];
    uint8_t *landing[RANKS];
    uint64_t landing_bytes[RANKS], landing_number[RANKS];
    char log[8192];
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
    if (level <= DDL_LOG_INFO && used + strlen(line) + 2 < sizeof e->log) {
        snprintf(e->log + used, sizeof e->log - used, "%s\n", line);
    }
}

static const char *mini_setting(const ddl_host *host, const char *name) {
    for (int i = 0; i < SETTINGS && of(host)->settings[i] != NULL; i++) {
        const char *line = of(host)->settings[i];
        if (strncmp(line, name, strlen(name)) == 0 && line[strlen(name)] == '=') {
            return line + strlen(name) + 1;
        }
    }
    return NULL;
}

static uint64_t mini_now_ns(const ddl_host *host) {
    struct timespec t;
    (void)host;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t word(const uint8_t *header, int i) {
    uint64_t w;
    memcpy(&w, header + 8 * i, 8);
    return w;
}

static void arrived(endpoint *e, int peer, uint64_t number, const uint8_t *data, uint64_t bytes) {
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < bytes && !e->discard; i++) {
        wrong += data[i] != pattern(number, (uint64_t)peer, i);
    }
    e->bad += wrong;
    CHECK_EQ(wrong, 0);
    CHECK_EQ(number, e->next[peer]);
    e->next[peer]++;
    e->arrived[peer]++;
}

static ddl_status mini_deliver(const ddl_host *host, int32_t peer, const uint8_t *header, const void *payload,
                               uint64_t bytes) {
    CHECK_EQ(word(header, 2), peer);
    CHECK_EQ(word(header, 0), bytes);
    CHECK(of(host)->landing[peer] == NULL);
    arrived(of(host), peer, word(header, 1), payload, bytes);
    return DDL_OK;
}

static ddl_status mini_land(const ddl_host *host, int32_t peer, const uint8_t *header, uint64_t *out_bytes,
                            void **out_to, void **out_token) {
    endpoint *e = of(host);
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
    CHECK(token == data);
    e->open_landings--;
    e->landing[peer] = NULL;
    if (status == DDL_OK) {
        CHECK_EQ(data[e->landing_bytes[peer]], 0xee);
        arrived(e, peer, e->landing_number[peer], data, e->landing_bytes[peer]);
    } else {
        e->landing_failed++;
    }
    free(data);
}

static void mini_sent(const ddl_host *host, ddl_message *message, ddl_status status) {
    letter *l = (letter *)message;
    l->returned++;
    l->status = status;
    of(host)->returned++;
}

static void mini_lost(const ddl_host *host, int32_t peer, int32_t error, const char *what) {
    CHECK(what != NULL && what[0] != '\0');
    of(host)->lost[peer]++;
    of(host)->lost_error[peer] = error;
}

/* ---- what the tests do with it ---- */

static ddl_status endpoint_try(endpoint *e, int rank, int n) {
    e->rank = rank;
    e->host = (ddl_host){.size = sizeof e->host, .abi = DDL_PLUGIN_ABI, .alloc = mini_alloc, .free = mini_free,
                         .log = mini_log, .setting = mini_setting, .now_ns = mini_now_ns, .deliver = mini_deliver,
                         .land = mini_land, .landed = mini_landed, .sent = mini_sent, .lost = mini_lost};
    ddl_transport_params params = {.size = sizeof params, .rank = rank, .world_size = n, .local_ranks = n, .cores = 1,
                                   .host_id = "here", .asked = 1, .detail = e->detail};
    void *self = NULL;
    ddl_status status = fabric_transport.open(&e->host, &params, &self);
    e->self = self;
    return status;
}

static const char *world_detail = "tcp";

/* Without libfabric or its tcp provider there is nothing to test. */
static int available(void) {
    endpoint *e = calloc(1, sizeof *e);
    e->detail = world_detail;
    int ok = endpoint_try(e, 0, 2) == DDL_OK;
    if (ok) {
        fabric_transport.close(e->self);
    }
    free(e);
    return ok;
}

#define NEED_LIBFABRIC()                                                                                               \
    if (!available()) {                                                                                                \
        SKIP("libfabric with its tcp provider is not here");                                                           \
    }

static void meet(endpoint *e, int peer, const void *address) {
    uint64_t latency = 0, bandwidth = 0;
    CHECK_EQ(fabric_transport.add_peer(e->self, peer, address, sizeof(fabric_address), "here", &latency, &bandwidth),
             DDL_OK);
    CHECK(latency > 0 && bandwidth > 0);
}

static endpoint *world_open(int n, const char *first, const char *second) {
    endpoint *e = calloc(RANKS, sizeof *e);
    for (int i = 0; i < n; i++) {
        e[i].detail = world_detail;
        e[i].settings[0] = first;
        e[i].settings[1] = second;
        ddl_status status = endpoint_try(&e[i], i, n);
        if (status != DDL_OK) {
            fprintf(stderr, "no endpoint: %s\n%s", status == DDL_ERR_NOMEM ? "no memory" : "see below", e[i].log);
            exit(1);
        }
    }
    for (int i = 0; i < n * n; i++) {
        if (i / n != i % n) {
            meet(&e[i / n], i % n, &e[i % n].self->address);
        }
    }
    return e;
}

static void endpoint_close(endpoint *e) {
    if (e->self != NULL) {
        fabric_transport.close(e->self);
    }
    e->self = NULL;
    CHECK_EQ(e->blocks, 0);
    CHECK_EQ(e->open_landings, 0);
    CHECK_EQ(e->bad, 0);
}

static void world_close(endpoint *e, int n) {
    for (int i = 0; i < n; i++) {
        endpoint_close(&e[i]);
    }
    free(e);
}

/* Fills a letter and sends it. DDL_OK: the memory is scribbled over at once, as the caller may. */
static ddl_status post(endpoint *e, int peer, letter *l, uint64_t bytes) {
    uint64_t words[6] = {bytes, e->sent_number[peer]++, (uint64_t)e->rank};
    memset(l, 0x77, sizeof *l); /* next and priv hold nonsense: they are the transport's to set */
    memcpy(l->message.header, words, sizeof words);
    l->returned = 0;
    l->bytes = bytes;
    l->payload = malloc(bytes + 1);
    for (uint64_t i = 0; i < bytes; i++) {
        l->payload[i] = pattern(words[1], words[2], i);
    }
    l->message.payload = bytes > 0 ? l->payload : NULL;
    l->message.payload_bytes = bytes;
    ddl_status status = fabric_transport.send(e->self, peer, &l->message);
    if (status == DDL_OK) {
        memset(l->payload, 0xdd, bytes);
    }
    l->borrowed = status == DDL_IN_PROGRESS;
    return status;
}

static void letter_free(letter *l) {
    CHECK_EQ(l->returned, l->borrowed);
    free(l->payload);
}

static int progress_all(endpoint *e, int n) {
    int events = 0;
    for (int i = 0; i < n; i++) {
        int32_t got = e[i].self != NULL ? fabric_transport.progress(e[i].self, -1) : 0;
        CHECK(got >= 0);
        events += got;
    }
    return events;
}

static void sleep_all(endpoint *e, int n, int ms) {
    struct pollfd fds[RANKS];
    for (int i = 0; i < n; i++) {
        fds[i] = (struct pollfd){.fd = -1, .events = POLLIN};
        if (e[i].self != NULL && fabric_transport.arm(e[i].self, &fds[i].fd) != DDL_OK) {
            return;
        }
    }
    poll(fds, (nfds_t)n, ms);
}

static int drive(endpoint *e, int n, double until, const char *what) {
    if (progress_all(e, n) == 0) {
        sleep_all(e, n, 20);
    }
    if (test_now_s() >= until) {
        test__fail(__FILE__, __LINE__, "never came true: %s", what);
    }
    return test_now_s() < until;
}

/* Leaves the test when the condition does not come true. */
#define DRIVE(world, n, condition)                                                                                     \
    for (double until = test_now_s() + 20 * test_slow(); !(condition);)                                                \
        if (!drive(world, n, until, #condition)) {                                                                     \
            return;                                                                                                    \
        }

static const uint64_t sizes[] = {0, 1, 47, 48, 4095, 16304, 16305, 32768, 0, 32769, 65537, 300001, 1 << 20, 3, 131072};
enum { SIZES = sizeof sizes / sizeof sizes[0] };

static uint64_t all_arrived(const endpoint *e, int n) {
    uint64_t count = 0;
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < n; k++) {
            count += e[i].arrived[k];
        }
    }
    return count;
}

static int all_returned(const letter *l, int count) {
    for (int i = 0; i < count; i++) {
        if (l[i].returned != l[i].borrowed) {
            return 0;
        }
    }
    return 1;
}

/* All to all: each rank has all its letters under way before anybody reads. */
static void exchange_in(endpoint *e, int n, int rounds) {
    int count = n * (n - 1) * SIZES;
    letter *letters = calloc((size_t)count, sizeof *letters);
    for (int round = 0; round < rounds; round++) {
        int k = 0;
        for (int i = 0; i < n * n; i++) {
            for (int j = 0; j < SIZES && i / n != i % n; j++) {
                ddl_status status = post(&e[i / n], i % n, &letters[k++], sizes[(j + round) % SIZES]);
                CHECK(status == DDL_OK || status == DDL_IN_PROGRESS);
            }
        }
        DRIVE(e, n, all_arrived(e, n) == (uint64_t)(count * (round + 1)) && all_returned(letters, count));
        for (int i = 0; i < count; i++) {
            letter_free(&letters[i]);
        }
    }
    free(letters);
}

#endif

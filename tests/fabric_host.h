/* fabric_host.h: endpoints of plugins/fabric on the small host, over the tcp provider on loopback. */
#ifndef TEST_FABRIC_HOST_H
#define TEST_FABRIC_HOST_H

#include "mini_host.h"

#include "../plugins/fabric/library.h"

/* In place of calls of libfabric, of all endpoints or of one; NULL: the call itself. */
static struct hooks {
    const void *of; /* the plugin's self */
    ssize_t (*send)(struct fid_ep *ep, const void *buf, size_t len, void *desc, fi_addr_t at, void *context);
    ssize_t (*inject)(struct fid_ep *ep, const void *buf, size_t len, fi_addr_t at);
    ssize_t (*recv)(struct fid_ep *ep, void *buf, size_t len, void *desc, fi_addr_t at, void *context);
    ssize_t (*read)(struct fid_ep *ep, void *buf, size_t len, void *desc, fi_addr_t at, uint64_t address, uint64_t key, void *context);
} hooks;

static void hooks_end(void) { memset(&hooks, 0, sizeof hooks); }

/* What is called without a hook: the call itself, or what a test has put in its place (fabric_faults.h). */
static ssize_t real_send(struct fid_ep *ep, const void *buf, size_t len, void *desc, fi_addr_t at, void *context) {
    return fi_send(ep, buf, len, desc, at, context);
}
static ssize_t real_inject(struct fid_ep *ep, const void *buf, size_t len, fi_addr_t at) { return fi_inject(ep, buf, len, at); }
static ssize_t real_recv(struct fid_ep *ep, void *buf, size_t len, void *desc, fi_addr_t at, void *context) {
    return fi_recv(ep, buf, len, desc, at, context);
}
static ssize_t real_read(struct fid_ep *ep, void *buf, size_t len, void *desc, fi_addr_t at, uint64_t address, uint64_t key,
                         void *context) {
    return fi_read(ep, buf, len, desc, at, address, key, context);
}

/* Where they are called the endpoint's self is called s. */
#define HOOKED(name) (hooks.name != NULL && (hooks.of == NULL || hooks.of == s) ? hooks.name : real_##name)
#undef fi_send
#undef fi_inject
#undef fi_recv
#undef fi_read
#define fi_send(ep, b, n, d, at, c) HOOKED(send)(ep, b, n, d, at, c)
#define fi_inject(ep, b, n, at) HOOKED(inject)(ep, b, n, at)
#define fi_recv(ep, b, n, d, at, c) HOOKED(recv)(ep, b, n, d, at, c)
#define fi_read(ep, b, n, d, at, a, k, c) HOOKED(read)(ep, b, n, d, at, a, k, c)

#include "../plugins/fabric/fabric.c"

static ddl_status mini_deliver(const ddl_host *host, int32_t peer, const uint8_t *header, const void *payload,
                               uint64_t bytes) {
    CHECK_EQ(word(header, 2), peer);
    CHECK_EQ(word(header, 0), bytes);
    CHECK(of(host)->landing[peer] == NULL);
    arrived(of(host), peer, payload, bytes, word(header, 1));
    return DDL_OK;
}

static fabric_self *self_of(const endpoint *e) { return e->self; }

static const char *world_detail = "tcp";

static void endpoint_prepare(endpoint *e, int rank, const char *detail, const char *first, const char *second) {
    endpoint_host(e, rank);
    e->host.deliver = mini_deliver;
    e->detail = detail;
    e->settings[0] = first;
    e->settings[1] = second;
}

/* Without libfabric or its tcp provider there is nothing to test. */
static int available(void) {
    endpoint *e = calloc(1, sizeof *e);
    endpoint_prepare(e, 0, world_detail, NULL, NULL);
    int ok = endpoint_try(e, 2, &fabric_transport) == DDL_OK;
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

static uint64_t standing_ns; /* a clock that tests move */
static uint64_t standing_now_ns(const ddl_host *host) { return (void)host, standing_ns; }

static endpoint *world_open(int n, const char *first, const char *second) {
    endpoint *e = calloc(RANKS, sizeof *e);
    for (int i = 0; i < n; i++) {
        endpoint_prepare(&e[i], i, world_detail, first, second);
        ddl_status status = endpoint_try(&e[i], n, &fabric_transport);
        if (status != DDL_OK) {
            fprintf(stderr, "no endpoint: %s\n%s", status == DDL_ERR_NOMEM ? "no memory" : "see below", e[i].log);
            exit(1);
        }
    }
    for (int i = 0; i < n * n; i++) {
        if (i / n != i % n) {
            meet(&e[i / n], i % n, &self_of(&e[i % n])->address);
        }
    }
    return e;
}

/* The provider takes so many reads, or receives of payloads, then none for now. */
static int reads_allowed;

static ssize_t held_read(struct fid_ep *ep, void *buf, size_t len, void *desc, fi_addr_t at, uint64_t address,
                         uint64_t key, void *context) {
    return reads_allowed-- > 0 ? real_read(ep, buf, len, desc, at, address, key, context) : -FI_EAGAIN;
}

static ssize_t held_recv(struct fid_ep *ep, void *buf, size_t len, void *desc, fi_addr_t at, void *context) {
    const fabric_slot *slot = (fabric_slot *)((char *)context - offsetof(fabric_slot, context));
    return slot->role != FABRIC_READ || reads_allowed-- > 0 ? real_recv(ep, buf, len, desc, at, context) : -FI_EAGAIN;
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
        DRIVE(e, n, all_arrived(e, n) == (uint64_t)(count * (round + 1)) && all_returned(letters, count)) {}
        for (int i = 0; i < count; i++) {
            letter_free(&letters[i]);
        }
    }
    free(letters);
}

static void world_end(endpoint *e, int n) {
    world_close(e, n);
    free(e);
#ifdef TEST_FABRIC_FAULTS_H
    CHECK_EQ(call_faults.objects, 0); /* all that was opened is closed */
#endif
}

#endif

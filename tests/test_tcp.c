/* The TCP transport on a host of its own: a peer that ends between two steps of making a connection,
 * and the order of what waits to be sent.
 * tests/run: variants=asan timeout=60 */
#define DDL_IMPLEMENTATION
#include "test.h"

#include "ddl.h"

#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

/* The host: counts, and scribbles over what is freed. */
typedef struct mini {
    ddl_host host; /* first */
    int blocks, lost, lost_rank, lost_error, returned;
    ddl_status status; /* of the message that came back last */
} mini;

static mini *of(const ddl_host *host) { return (mini *)(uintptr_t)host; }

static void *mini_alloc(const ddl_host *host, size_t bytes) {
    size_t *p = (size_t *)calloc(1, bytes + 16);
    p[0] = bytes;
    of(host)->blocks++;
    return p + 2;
}

static void mini_free(const ddl_host *host, void *memory) {
    if (memory != NULL) {
        size_t *p = (size_t *)memory - 2;
        memset(memory, 0x7d, p[0]);
        free(p);
        of(host)->blocks--;
    }
}

static void mini_log(const ddl_host *host, ddl_log_level level, const char *line) {
    (void)host;
    (void)level;
    (void)line;
}

static uint64_t mini_now(const ddl_host *host) {
    (void)host;
    return ddl__now_ns();
}

/* One byte proves that somebody is rank 1. */
static ddl_status mini_prove(const ddl_host *host, void **state, int32_t is_client, int32_t peer, const uint8_t *in,
                             size_t in_bytes, size_t *out_used, uint8_t *out, size_t *out_bytes, int32_t *out_peer) {
    (void)host;
    (void)state;
    (void)is_client;
    (void)peer;
    if (out == NULL || in_bytes == 0) {
        return out == NULL ? DDL_OK : DDL_IN_PROGRESS;
    }
    CHECK_EQ(in[0], 'p');
    *out_used = 1;
    *out_bytes = 0;
    *out_peer = 1;
    return DDL_OK;
}

static void mini_sent(const ddl_host *host, ddl_message *message, ddl_status status) {
    (void)message;
    of(host)->returned++;
    of(host)->status = status;
}

static void mini_lost(const ddl_host *host, int32_t peer, int32_t error, const char *what) {
    (void)what;
    of(host)->lost_error = error;
    of(host)->lost++;
    of(host)->lost_rank = peer;
}

/* A socket that is connected to where the endpoint listens. */
static int connect_to(const ddl_transport *tcp, void *self) {
    uint8_t address[256];
    struct sockaddr_un at;
    size_t bytes = sizeof address;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memset(&at, 0, sizeof at);
    if (tcp->address(self, address, &bytes) == DDL_OK && address[0] <= sizeof at) {
        memcpy(&at, address + 1, address[0]);
    }
    CHECK_EQ(connect(fd, (struct sockaddr *)&at, address[0]), 0);
    return fd;
}

/* Where nobody listens, in the form that ranks tell each other. */
static size_t nowhere(uint8_t *out) {
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    int n = snprintf(at.sun_path + 1, sizeof at.sun_path - 1, "ddl-test-nobody-%d", (int)getpid());
    size_t bytes = offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n;
    out[0] = (uint8_t)bytes;
    memcpy(out + 1, &at, bytes);
    out[bytes + 1] = 0;
    return bytes + 2;
}

/* A host, and the endpoint of rank 0 of 2. */
static void *mini_open(mini *m) {
    *m = (mini){.host = {.size = sizeof m->host, .abi = DDL_PLUGIN_ABI, .alloc = mini_alloc, .free = mini_free,
                         .log = mini_log, .now_ns = mini_now, .prove = mini_prove, .sent = mini_sent,
                         .lost = mini_lost}};
    ddl_transport_params params = {.size = sizeof params, .world_size = 2, .local_ranks = 2, .cores = 1,
                                   .host_id = "here"};
    void *self = NULL;
    CHECK_EQ(ddl__tcp_transport.open(&m->host, &params, &self), DDL_OK);
    return self;
}

/* Rank 1 connects while messages wait for it here, and ends before it hears that it is welcome: what waits is written at
 * once, and finds out. The connection is gone by then. */
TEST(a_peer_that_ends_while_it_is_welcomed) {
    const ddl_transport *tcp = &ddl__tcp_transport;
    mini m;
    uint8_t address[256];
    uint64_t latency, bandwidth;
    ddl_message message;
    void *self = mini_open(&m);
    REQUIRE(self != NULL);
    memset(&message, 0, sizeof message);
    CHECK_EQ(tcp->add_peer(self, 1, address, nowhere(address), "here", &latency, &bandwidth), DDL_OK);
    CHECK_EQ(tcp->send(self, 1, &message), DDL_IN_PROGRESS); /* its own attempt finds nobody, and is to come again */
    int fd = connect_to(tcp, self);
    CHECK_EQ(send(fd, "pD", 2, MSG_NOSIGNAL), 2); /* its proof, and what for */
    close(fd);
    for (int i = 0; i < 20 && m.lost == 0; i++) {
        tcp->progress(self, -1);
    }
    CHECK_EQ(m.lost, 1);
    CHECK_EQ(m.lost_rank, 1);
    CHECK_EQ(m.returned, 0); /* until the core says that the rank is dead */
    tcp->peer_dead(self, 1);
    CHECK_EQ(m.returned, 1);
    CHECK_EQ(m.status, DDL_ERR_PEER);
    tcp->close(self);
    CHECK_EQ(m.blocks, 0);
}

/* Out of descriptors: who connects waits, and wakes nobody; when there are some again, it is taken. */
TEST(a_connection_waits_for_a_descriptor) {
    const ddl_transport *tcp = &ddl__tcp_transport;
    mini m;
    void *self = mini_open(&m);
    REQUIRE(self != NULL);
    int fd = connect_to(tcp, self), set = ((ddl__tcp *)self)->epoll_fd;
    struct rlimit had, none;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &had), 0);
    none = had;
    none.rlim_cur = 0;
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    tcp->progress(self, -1);
    struct epoll_event event;
    CHECK_EQ(epoll_wait(set, &event, 1, 20), 0);
    CHECK_EQ(((ddl__tcp *)self)->stranger_count, 0);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &had), 0);
    for (int i = 0; i < 2000 && ((ddl__tcp *)self)->stranger_count == 0; i++) {
        nanosleep(&(struct timespec){0, 5000000}, NULL);
        tcp->progress(self, -1);
    }
    CHECK_EQ(((ddl__tcp *)self)->stranger_count, 1);
    close(fd);
    tcp->close(self);
    CHECK_EQ(m.blocks, 0);
}

/* The second connection of a pair of hosts is under way when nothing gets through any more: no answer to it for 3.5 s is
 * a cut, while the first one may look alive for as long again. */
TEST(a_second_connection_that_nobody_answers_is_a_cut) {
    const ddl_transport *tcp = &ddl__tcp_transport;
    mini m;
    uint8_t address[256];
    uint64_t latency, bandwidth;
    ddl__tcp *t = (ddl__tcp *)mini_open(&m);
    REQUIRE(t != NULL);
    CHECK_EQ(tcp->add_peer(t, 1, address, nowhere(address), "here", &latency, &bandwidth), DDL_OK);
    ddl__tcp_peer *p = &t->peers[1];
    p->same_host = false;
    p->data = ddl__tcp_conn_new(t, socket(AF_UNIX, SOCK_STREAM, 0), 1, true);
    p->data->state = DDL__TCP_READY;
    const int errors[] = {ECONNREFUSED, EHOSTUNREACH, ECONNRESET, ETIMEDOUT};
    for (int i = 0; i < 4; i++) {
        p->control = ddl__tcp_conn_new(t, socket(AF_UNIX, SOCK_STREAM, 0), 1, true);
        p->control->state = DDL__TCP_CONNECTING;
        ddl__tcp_broken(t, p->control, errors[i]);
        CHECK(p->control == NULL && p->retry_ns != 0); /* it comes again */
        CHECK_EQ(m.lost, errors[i] == ETIMEDOUT);
    }
    CHECK_EQ(m.lost_error, ETIMEDOUT);
    tcp->close(t);
    CHECK_EQ(m.blocks, 0);
}

/* What lets the peer send overtakes what waits, but not the message that is partly sent, nor another of its kind. */
TEST(urgent_messages_go_first) {
    enum { BULK = 3, ALL = 5, BYTES = 1 << 20, TOTAL = 1 + ALL * DDL_MESSAGE_HEADER_BYTES + BULK * BYTES };
    static const uint8_t order[ALL] = {0, 3, 4, 1, 2};
    const ddl_transport *tcp = &ddl__tcp_transport;
    mini m;
    uint8_t address[256], *in = (uint8_t *)malloc(TOTAL), *payload = (uint8_t *)malloc(BYTES);
    uint64_t latency, bandwidth;
    ddl_message messages[ALL];
    void *self = mini_open(&m);
    REQUIRE(self != NULL && in != NULL && payload != NULL);
    memset(in, 0x7d, TOTAL);
    memset(payload, 0x5a, BYTES);
    memset(messages, 0, sizeof messages);
    CHECK_EQ(tcp->add_peer(self, 1, address, nowhere(address), "here", &latency, &bandwidth), DDL_OK);
    int fd = connect_to(tcp, self);
    CHECK_EQ(send(fd, "pD", 2, MSG_NOSIGNAL), 2);
    for (int i = 0; i < 20; i++) {
        tcp->progress(self, -1);
    }
    for (int i = 0; i < ALL; i++) { /* the socket takes a part of the first */
        memset(messages[i].header, i, sizeof messages[i].header);
        messages[i].payload = i < BULK ? payload : NULL;
        messages[i].payload_bytes = i < BULK ? BYTES : 0;
        messages[i].flags = i < BULK ? 0 : DDL_MESSAGE_URGENT;
        CHECK_EQ(tcp->send(self, 1, &messages[i]), DDL_IN_PROGRESS);
    }
    size_t got = 0;
    for (int i = 0; i < 20000 && got < TOTAL; i++) {
        ssize_t n = recv(fd, in + got, TOTAL - got, MSG_DONTWAIT);
        got += n > 0 ? (size_t)n : 0;
        if (n <= 0) {
            nanosleep(&(struct timespec){0, 1000000}, NULL);
        }
        tcp->progress(self, -1);
    }
    CHECK_EQ(got, (size_t)TOTAL);
    CHECK_EQ(in[0], 'G');
    for (size_t i = 0, at = 1; i < ALL; i++) {
        CHECK(memcmp(in + at, messages[order[i]].header, DDL_MESSAGE_HEADER_BYTES) == 0);
        at += DDL_MESSAGE_HEADER_BYTES;
        CHECK(order[i] >= BULK || memcmp(in + at, payload, BYTES) == 0);
        at += order[i] < BULK ? BYTES : 0;
    }
    CHECK_EQ(m.returned, ALL);
    CHECK_EQ(m.status, DDL_OK);
    close(fd);
    tcp->close(self);
    CHECK_EQ(m.blocks, 0);
    free(in);
    free(payload);
}

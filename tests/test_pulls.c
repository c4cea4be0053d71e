/* Of a long message over a transport whose receivers read (DDL_TRANSPORT_PULLS) the next part is offered while one is
 * read, and parts become longer while they take less than a millisecond, up to what the transport takes; over TCP one part of 1 MiB is
 * under way at a time. All bytes come, in order, both ways at once. A send that is given up with
 * two parts under way gives its memory back. A message of up to 1 MiB comes before it is asked for, one at a time.
 * tests/run: variants=asan timeout=60 */
#define DDL_IMPLEMENTATION
#include "coll.h"

#include <unistd.h>

enum { PARTS = 8, COUNT = (PARTS << 20) / 4 - 100 };

typedef struct pull {
    coll_job job;
    uint8_t seen[2]; /* what was under way at one time: all values of ddl_request.lent, or'ed; 3 as 4 */
    bool pulls;
    uint64_t longest; /* part */
    _Atomic bool ended; /* the send that is given up */
    _Atomic bool sent;  /* what goes beside a large one */
} pull;

static int32_t value(int rank, int32_t i) { return i * 31 + rank * 1000003 + i / 1000; }

static void both_ways(ddl_context *c, int rank, pull *w) {
    int32_t *mine = malloc(COUNT * sizeof *mine), *theirs = malloc(COUNT * sizeof *theirs), wrong = 0;
    for (int32_t i = 0; i < COUNT; i++) {
        mine[i] = value(rank, i);
        theirs[i] = -1;
    }
    ddl_request *r[2];
    CHECK_EQ(ddl_irecv(ddl_world(c), ddl_tensor_1d(theirs, DDL_I32, COUNT), 1 - rank, 5, &r[1]), DDL_OK);
    CHECK_EQ(ddl_isend(ddl_world(c), ddl_tensor_1d(mine, DDL_I32, COUNT), 1 - rank, 5, &r[0]), DDL_OK);
    ddl_status status;
    do {
        w->seen[rank] |= r[0]->lent == 3 ? 4 : r[0]->lent;
        status = ddl_test_all(r, 2, NULL);
    } while (status == DDL_IN_PROGRESS);
    CHECK_EQ(status, DDL_OK);
    for (int32_t i = 0; i < COUNT; i++) {
        wrong += theirs[i] != value(1 - rank, i);
    }
    CHECK_EQ(wrong, 0);
    free(mine);
    free(theirs);
}

/* As if a frame of so many bytes had gone that was lent some nanoseconds ago; the one before had gone `idle` ago. */
static void went(ddl_context *c, ddl_request *r, uint64_t bytes, uint64_t ns, uint64_t idle) {
    ddl__link *l = &c->links[ddl__world_rank(r)];
    uint64_t before = l->data_bytes, begun;
    r->out.message.payload_bytes = bytes;
    do { /* once more when this thread lost its core meanwhile */
        l->data_bytes = before;
        begun = ddl__now_ns();
        r->lent_ns[0] = begun - ns;
        l->data_ns = begun - idle;
        ddl__data_went(c, r, &r->out);
    } while (ddl__now_ns() - begun > 500000);
}

static void lengths(ddl_context *c, int rank, const pull *w) {
    enum { US = 1000, MS = 1000 * US, LONG_AGO = 1000 * MS, LEAST = 1 << 20 };
    ddl_request r = {.group = ddl_world(c), .peer = 1 - rank, .longest = UINT64_MAX};
    ddl__link *l = &c->links[1 - rank];
    l->data_bytes = 0;
    for (int k = 0; k < 6; k++) {
        CHECK_EQ(ddl__data_bytes(&r), DDL__MIN(1u << (20 + k), w->longest));
        went(c, &r, ddl__data_bytes(&r), 300 * US, LONG_AGO);
    }
    went(c, &r, w->longest, 3 * MS, LONG_AGO); /* neither quick nor slow */
    CHECK_EQ(ddl__data_bytes(&r), w->longest);
    went(c, &r, LEAST, 9 * MS, LONG_AGO); /* the end of a message */
    CHECK_EQ(ddl__data_bytes(&r), w->longest);
    for (int k = 0; k < 6; k++) {
        went(c, &r, ddl__data_bytes(&r), 5 * MS, LONG_AGO);
        CHECK_EQ(ddl__data_bytes(&r), DDL__MAX(w->longest >> (k + 1), LEAST));
    }
    /* Two messages at once: each frame takes the time since the one before it had gone, whenever its message began. */
    went(c, &r, LEAST, 300 * US, LONG_AGO);
    went(c, &r, ddl__data_bytes(&r), 5 * MS, 300 * US);
    CHECK_EQ(ddl__data_bytes(&r), DDL__MIN(4 * LEAST, w->longest));
    l->data_bytes = 0;
    for (int k = 0; k < 6; k++) {
        went(c, &r, LEAST, (9 + 9 * (k % 2)) * MS, 9 * MS);
        CHECK_EQ(ddl__data_bytes(&r), LEAST);
    }
    /* A message that is shorter than a frame may be. */
    l->data_bytes = DDL__FRAME_MAX_DATA;
    went(c, &r, 3 * LEAST, 300 * US, LONG_AGO);
    CHECK_EQ(l->data_bytes, DDL__FRAME_MAX_DATA);
    went(c, &r, 4 * LEAST, 5 * MS, LONG_AGO);
    CHECK_EQ(l->data_bytes, 2 * LEAST);
    /* What the receiver takes. */
    l->data_bytes = DDL__FRAME_MAX_DATA;
    r.longest = 2 * LEAST;
    CHECK_EQ(ddl__data_bytes(&r), DDL__MIN(2 * LEAST, w->longest));
    r.longest = LEAST;
    CHECK_EQ(ddl__data_bytes(&r), LEAST);
    went(c, &r, LEAST, 300 * US, LONG_AGO); /* of others nothing is learned from that */
    CHECK_EQ(l->data_bytes, DDL__FRAME_MAX_DATA);
    l->data_bytes = w->longest; /* what is sent next goes in such parts */
    for (uint64_t bytes = 1 << 20; bytes <= 1 << 24; bytes *= 2) { /* what comes is no longer than the transport says */
        uint8_t header[DDL__FRAME_BYTES];
        ddl__frame f = {.type = DDL__FRAME_DATA, .bytes = (uint32_t)bytes, .source = (uint32_t)(1 - rank)}, read;
        ddl__frame_write(header, &f);
        CHECK_EQ(ddl__host_frame(&l->endpoint->host, 1 - rank, header, false, &read),
                 bytes <= l->endpoint->table->max_payload_bytes ? DDL_OK : DDL_ERR_CORRUPT);
    }
    CHECK(l->endpoint->table->max_payload_bytes >= w->longest);
}

static ddl_status cts_of_an_older_header(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl__frame older = *f;
    CHECK(f->bytes == 32);
    older.bytes = 24;
    return ddl__on_cts(c, peer, &older, payload);
}

/* A receiver that does not say how long frames it takes gets such as all take. */
static void of_an_older_header(ddl_context *c, int rank, pull *w) {
    static char data[2][3 << 20];
    ddl_group *g = ddl_world(c);
    ddl_request *r;
    uint64_t longest = 0;
    ddl_status status;
    if (rank == 0) {
        memset(data[0], 7, sizeof data[0]);
        c->handlers[DDL__FRAME_CTS].deliver = cts_of_an_older_header;
        c->links[1].data_bytes = DDL__FRAME_MAX_DATA;
        CHECK_EQ(ddl_isend(g, ddl_tensor_1d(data[0], DDL_U8, sizeof data[0]), 1, 4, &r), DDL_OK);
        do {
            longest = w->pulls && r->lent != 0 ? DDL__MAX(longest, r->out.message.payload_bytes) : longest;
        } while ((status = ddl_test(&r, NULL)) == DDL_IN_PROGRESS);
        CHECK_EQ(status, DDL_OK);
        CHECK_EQ(longest, w->pulls ? DDL__FRAME_MAX_PAYLOAD : 0);
        c->handlers[DDL__FRAME_CTS].deliver = ddl__on_cts;
    } else {
        memset(data[1], 0xee, sizeof data[1]);
        CHECK_EQ(ddl_recv(g, ddl_tensor_1d(data[1], DDL_U8, sizeof data[1]), 0, 4, NULL), DDL_OK);
        CHECK(data[1][0] == 7 && memcmp(data[1], data[1] + 1, sizeof data[1] - 1) == 0);
    }
}

/* The receiver accepts and then looks no more, until the sender's deadline has passed: it hears so, and the link goes on. Of what is under
 * way then parts of 1 MiB are sent from a copy, and of longer ones no more comes. */
static void given_up(ddl_context *c, int rank, pull *w, uint64_t part) {
    enum { MANY = 8 * COUNT }; /* more parts than are under way at once, which a socket may hold */
    int32_t *data = calloc(MANY, sizeof *data);
    ddl_request *r;
    if (rank == 0) {
        c->links[1].data_bytes = part; /* several */
        CHECK_EQ(ddl_group_set(ddl_world(c), &(ddl_group_options){.timeout_ms = 1000}), DDL_OK);
        CHECK_EQ(ddl_send(ddl_world(c), ddl_tensor_1d(data, DDL_I32, MANY), 1, 6), DDL_ERR_TIMEOUT);
        memset(data, 0xee, MANY * sizeof *data); /* it is ours again */
        atomic_store(&w->ended, true);
        CHECK_EQ(ddl_group_set(ddl_world(c), &(ddl_group_options){.timeout_ms = 30000}), DDL_OK);
    } else {
        CHECK_EQ(ddl_irecv(ddl_world(c), ddl_tensor_1d(data, DDL_I32, MANY), 0, 6, &r), DDL_OK);
        for (int i = 0; i < 1000 && !r->matched; i++) {
            CHECK_EQ(ddl_test(&r, NULL), DDL_IN_PROGRESS);
            usleep(1000);
        }
        for (int i = 0; i < 20000 && !atomic_load(&w->ended); i++) {
            usleep(1000);
        }
        CHECK_EQ(ddl_wait(&r, NULL), DDL_ERR_CANCELLED);
        int32_t wrong = 0;
        for (int32_t i = 0; i < MANY; i++) {
            wrong += data[i] != 0; /* nothing of what the sender's memory was used for later */
        }
        CHECK_EQ(wrong, 0);
        atomic_store(&w->ended, false);
    }
    free(data);
    CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
}

static uint64_t unexpected(ddl_context *c) {
    ddl_stats stats = {0};
    ddl_stats_get(c, &stats);
    return stats.unexpected_bytes;
}

/* Two messages of 1 MiB that nobody has asked for: where receivers read, the first one is there; of the second, the word. */
static void unasked(ddl_context *c, int rank, bool pulls) {
    enum { MANY = (1 << 20) / 4 };
    static int32_t data[2][2][MANY], word[2];
    ddl_group *g = ddl_world(c);
    ddl_request *r[2];
    int32_t wrong = 0;
    if (rank == 0) {
        for (int k = 0; k < 2; k++) {
            for (int32_t i = 0; i < MANY; i++) {
                data[0][k][i] = value(k, i);
            }
            CHECK_EQ(ddl_isend(g, ddl_tensor_1d(data[0][k], DDL_I32, MANY), 1, k, &r[k]), DDL_OK);
        }
        CHECK_EQ(ddl_send(g, ddl_tensor_1d(&word[0], DDL_I32, 1), 1, 9), DDL_OK);
        CHECK_EQ(ddl_wait_all(r, 2, NULL), DDL_OK);
        /* The other rank has looked: what is sent next would be unexpected too. */
        CHECK_EQ(ddl_recv(g, ddl_tensor_1d(&word[0], DDL_I32, 1), 1, 9, NULL), DDL_OK);
    } else {
        CHECK_EQ(ddl_recv(g, ddl_tensor_1d(&word[1], DDL_I32, 1), 0, 9, NULL), DDL_OK);
        uint64_t here = unexpected(c);
        CHECK(pulls ? here >= 1 << 20 && here < 2 << 20 : here < 1 << 20);
        for (int k = 1; k >= 0; k--) {
            memset(data[1][k], 0xee, sizeof data[1][k]);
            CHECK_EQ(ddl_recv(g, ddl_tensor_1d(data[1][k], DDL_I32, MANY), 0, k, NULL), DDL_OK);
            for (int32_t i = 0; i < MANY; i++) {
                wrong += data[1][k][i] != value(k, i);
            }
        }
        CHECK_EQ(wrong, 0);
        CHECK_EQ(unexpected(c), 0);
        CHECK_EQ(ddl_send(g, ddl_tensor_1d(&word[1], DDL_I32, 1), 0, 9), DDL_OK);
    }
}

/* A large message that nobody has asked for takes none of the window of small ones: they end before it is received. */
static void beside(ddl_context *c, int rank, pull *w) {
    enum { MANY = (1 << 20) / 4, SMALL = 1 << 10, TIMES = 6 }; /* fits the window, and what lies in a ring */
    static int32_t large[2][MANY], small[2][SMALL / 4];
    ddl_group *g = ddl_world(c);
    if (rank == 0) {
        ddl_request *r;
        for (int32_t i = 0; i < MANY; i++) {
            large[0][i] = value(0, i);
        }
        CHECK_EQ(ddl_isend(g, ddl_tensor_1d(large[0], DDL_I32, MANY), 1, 1, &r), DDL_OK);
        for (int k = 0; k < TIMES; k++) {
            CHECK_EQ(ddl_send(g, ddl_tensor_1d(small[0], DDL_I32, SMALL / 4), 1, 2), DDL_OK);
        }
        atomic_store(&w->sent, true);
        CHECK_EQ(ddl_wait(&r, NULL), DDL_OK);
    } else {
        int32_t wrong = 0;
        for (int i = 0; i < 20000 && !atomic_load(&w->sent); i++) {
            usleep(1000);
        }
        CHECK(atomic_load(&w->sent));
        for (int k = 0; k < TIMES; k++) {
            CHECK_EQ(ddl_recv(g, ddl_tensor_1d(small[1], DDL_I32, SMALL / 4), 0, 2, NULL), DDL_OK);
        }
        CHECK_EQ(ddl_recv(g, ddl_tensor_1d(large[1], DDL_I32, MANY), 0, 1, NULL), DDL_OK);
        for (int32_t i = 0; i < MANY; i++) {
            wrong += large[1][i] != value(0, i);
        }
        CHECK_EQ(wrong, 0);
    }
    CHECK_EQ(ddl_barrier(g), DDL_OK);
}

static void rank_main(int rank, int n, void *arg) {
    pull *w = arg;
    ddl_context *c = coll_join(rank, n, &w->job);
    REQUIRE(c != NULL);
    both_ways(c, rank, w);
    lengths(c, rank, w);
    both_ways(c, rank, w);
    of_an_older_header(c, rank, w);
    unasked(c, rank, w->pulls);
    beside(c, rank, w);
    if (w->pulls) { /* over TCP the kernel may have taken all */
        given_up(c, rank, w, 1 << 20);
        given_up(c, rank, w, w->longest);
        given_up(c, rank, w, 1 << 20);
    }
    coll_leave(c);
}

static void run(pull *w, const char *transports) {
    setenv("DDL_TRANSPORTS", transports, 1);
    coll_job_make(&w->job);
    ranks_threads(2, rank_main, w);
}

/* false: build/ has no such plugin. */
static bool two_parts(const char *plugin, const char *transports, uint64_t longest) {
    static pull w;
    char folder[512] = "", path[600];
    CHECK(getcwd(folder, sizeof folder - 16) != NULL);
    strcat(folder, "/build");
    snprintf(path, sizeof path, "%s/%s", folder, plugin);
    if (access(path, R_OK) != 0) {
        return false;
    }
    setenv("DDL_PLUGIN_PATH", folder, 1);
    memset(&w, 0, sizeof w);
    w.pulls = true;
    w.longest = longest;
    run(&w, transports);
    CHECK((w.seen[0] & 4) != 0 && (w.seen[1] & 4) != 0);
    return true;
}

TEST(two_parts_are_under_way_over_libfabric) {
    if (!two_parts("libddl-fabric.so", "fabric:tcp", 16 << 20)) {
        SKIP("libddl-fabric.so is not built; make plugins builds it where libfabric-dev is installed");
    }
}

TEST(two_parts_are_under_way_over_shared_memory) {
    if (!two_parts("libddl-shm.so", "shm", 1 << 20)) {
        SKIP("libddl-shm.so is not built (make plugins)");
    }
}

TEST(one_part_is_under_way_over_tcp) {
    static pull w;
    w.longest = 1 << 20;
    run(&w, "tcp");
    CHECK((w.seen[0] & 6) == 0 && (w.seen[1] & 6) == 0);
}

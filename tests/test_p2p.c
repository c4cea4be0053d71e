/* Messages between two ranks: content and count at every border of the protocol (0, 1, 32 KiB, 1 MiB, many MiB, beyond
 * 4 GiB), order per tag, matching by any source and any tag, what does not fit, strided tensors, self, floods.
 * tests/run: variants=gcc,asan timeout=120 */
#include "world.h"

enum { KIB = 1024, MIB = 1024 * 1024 };

static unsigned char *poisoned(size_t bytes) {
    unsigned char *p = malloc(bytes + 64);
    memset(p, 0xa5, bytes + 64);
    return p;
}

/* The 64 bytes behind a buffer of poisoned() are as they were. */
static int fence_holds(const unsigned char *p, size_t bytes) {
    for (size_t i = bytes; i < bytes + 64; i++) {
        if (p[i] != 0xa5) {
            return 0;
        }
    }
    return 1;
}

/* ---- sizes ---- */

static void one_size(ddl_group *w, size_t bytes) {
    int me = ddl_rank(w), peer = me ^ 1, tag = (int)(bytes % 1000);
    unsigned char *out = poisoned(bytes), *in = poisoned(bytes);
    world_fill(out, me, tag, bytes);
    ddl_info info = {0};
    if (me == 0) {
        OK(ddl_send(w, world_bytes(out, bytes), peer, tag));
        OK(ddl_recv(w, world_bytes(in, bytes), peer, tag, &info));
    } else {
        OK(ddl_recv(w, world_bytes(in, bytes), peer, tag, &info));
        OK(ddl_send(w, world_bytes(out, bytes), peer, tag));
    }
    CHECK_EQ(info.source, peer);
    CHECK_EQ(info.tag, tag);
    CHECK_EQ(info.count, (int64_t)bytes);
    CHECK_EQ((int)info.status, (int)DDL_OK);
    CHECK_EQ(world_wrong(in, peer, tag, bytes), 0);
    CHECK(fence_holds(in, bytes));
    memset(in, 0xa5, bytes);
    OK(ddl_send_recv(w, world_bytes(out, bytes), peer, 5, world_bytes(in, bytes), peer, 5, &info)); /* both at once */
    CHECK_EQ(info.count, (int64_t)bytes);
    CHECK_EQ(world_wrong(in, peer, tag, bytes), 0);
    CHECK(fence_holds(in, bytes));
    free(out);
    free(in);
}

static const size_t sizes[] = {0, 1, 3, 47, 4096, 32 * KIB - 1, 32 * KIB, 32 * KIB + 1, 64 * KIB, 100000, MIB - 1, MIB,
                               MIB + 1, 2 * MIB + 3, 9 * MIB + 1};

static void all_sizes(ddl_group *w, void *arg) {
    (void)arg;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        one_size(w, sizes[i]);
    }
}

TEST(every_size_arrives_whole) { world_threads(2, all_sizes, NULL); }

TEST(every_size_arrives_whole_between_processes) { world_fork(2, all_sizes, NULL, 60); }

static void big(ddl_group *w, void *arg) {
    (void)arg;
    one_size(w, 64 * (size_t)MIB);
}

#define NEED_LARGE_MESSAGES()                                                                              \
    if (getenv("TEST_LARGEST") != NULL) {                                                                  \
        SKIP("TEST_LARGEST leaves such long messages out");                                                \
    }

TEST(sixty_four_mebibytes) {
    NEED_LARGE_MESSAGES();
    world_fork(2, big, NULL, 60);
}

/* 4.2 GiB of addresses over 67 MiB of memory: the same pages again and again. The period is no multiple of a frame, so
 * that a block at a wrong offset is seen. */
static unsigned char *folded(size_t period, size_t times) {
    int fd = memfd_create("folded", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)period) != 0) {
        return NULL;
    }
    unsigned char *base = mmap(NULL, period * times, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (size_t i = 0; base != MAP_FAILED && i < times; i++) {
        if (mmap(base + i * period, period, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
            return NULL;
        }
    }
    close(fd);
    return base == MAP_FAILED ? NULL : base;
}

static void beyond_4_gib(ddl_group *w, void *arg) {
    (void)arg;
    size_t period = 67 * (size_t)MIB + 4096 * 5, times = 65, bytes = period * times - 12345;
    unsigned char *at = folded(period, times);
    if (at == NULL) {
        SKIP("no address space for 4.2 GiB");
    }
    CHECK(bytes > UINT32_MAX);
    ddl_info info = {0};
    if (ddl_rank(w) == 0) {
        world_fill(at, 0, 0, period);
        OK(ddl_send(w, world_bytes(at, bytes), 1, 0));
    } else {
        memset(at, 0xa5, period);
        OK(ddl_recv(w, world_bytes(at, bytes), 0, 0, &info));
        CHECK_EQ(info.count, (int64_t)bytes);
        CHECK_EQ(world_wrong(at, 0, 0, period), 0);
    }
    munmap(at, period * times);
}

TEST(more_than_four_gibibytes) {
    NEED_LARGE_MESSAGES();
    ddl_config config = {.timeout_ms = 55000};
    world_config = &config;
    world_fork(2, beyond_4_gib, NULL, 58);
    world_config = NULL;
}

/* ---- order ---- */

/* Messages of one tag are received as they were sent, whatever their size, though tags overtake each other. */
static void order(ddl_group *w, void *arg) {
    (void)arg;
    enum { N = 120 };
    static const size_t steps[] = {0, 8, 70 * KIB, 8, 33 * KIB, 1000, MIB + 8};
    int me = ddl_rank(w), n = ddl_size(w);
    unsigned char *at[N] = {NULL};
    ddl_request *sends[N] = {NULL};
    if (me != 0) {
        for (int i = 0; i < N; i++) {
            size_t bytes = steps[i % 7];
            at[i] = poisoned(bytes);
            world_fill(at[i], me, i, bytes);
            OK(ddl_isend(w, world_bytes(at[i], bytes), 0, i % 3, &sends[i]));
        }
        OK(ddl_wait_all(sends, N, NULL));
    }
    for (int peer = n - 1; me == 0 && peer > 0; peer--) {
        unsigned char *in = poisoned(MIB + 8);
        for (int tag = 2; tag >= 0; tag--) { /* the last tag first */
            for (int i = tag; i < N; i += 3) {
                ddl_info info = {0};
                OK(ddl_recv(w, world_bytes(in, MIB + 8), peer, tag, &info));
                CHECK_EQ(info.count, (int64_t)steps[i % 7]);
                CHECK_EQ(world_wrong(in, peer, i, steps[i % 7]), 0);
            }
        }
        free(in);
    }
    for (int i = 0; i < N; i++) {
        free(at[i]);
    }
}

TEST(order_holds_per_tag) { world_threads(3, order, NULL); }

TEST(order_holds_per_tag_between_processes) { world_fork(4, order, NULL, 50); }

/* Receives that were posted first are served first, by any source and any tag too. */
static void posted_order(ddl_group *w, void *arg) {
    (void)arg;
    enum { N = 300 };
    int values[N], got[N];
    ddl_request *requests[N];
    for (int i = 0; i < N; i++) {
        values[i] = i;
        got[i] = -1;
    }
    if (ddl_rank(w) == 1) {
        for (int i = 0; i < N; i++) {
            OK(ddl_irecv(w, DDL_VIEW(&got[i], 1), i % 2 ? 0 : DDL_ANY_SOURCE, i % 5 == 0 ? DDL_ANY_TAG : 9, &requests[i]));
        }
        OK(ddl_barrier(w));
        ddl_info infos[N];
        OK(ddl_wait_all(requests, N, infos));
        for (int i = 0; i < N; i++) {
            CHECK_EQ(got[i], i);
            CHECK_EQ(infos[i].source, 0);
            CHECK_EQ(infos[i].tag, 9);
            CHECK(requests[i] == NULL);
        }
    } else {
        OK(ddl_barrier(w));
        for (int i = 0; i < N; i++) {
            OK(ddl_send(w, DDL_VIEW(&values[i], 1), 1, 9));
        }
    }
}

TEST(posted_receives_are_served_in_order) { world_threads(2, posted_order, NULL); }

/* ---- any source, any tag ---- */

static void any_source(ddl_group *w, void *arg) {
    (void)arg;
    int me = ddl_rank(w), n = ddl_size(w);
    if (me != 0) {
        for (int i = 0; i < 10; i++) {
            int32_t value = me * 100 + i;
            OK(ddl_send(w, DDL_VIEW(&value, 1), 0, i));
        }
        return;
    }
    int next[16] = {0};
    for (int k = 0; k < 10 * (n - 1); k++) {
        int32_t value = -1;
        ddl_info info = {0};
        OK(ddl_recv(w, DDL_VIEW(&value, 1), DDL_ANY_SOURCE, DDL_ANY_TAG, &info));
        CHECK(info.source > 0 && info.source < n);
        CHECK_EQ(info.tag, next[info.source]);
        CHECK_EQ(value, info.source * 100 + info.tag);
        CHECK_EQ(info.count, 1);
        next[info.source]++;
    }
}

TEST(any_source_any_tag) {
    static const int ns[] = {2, 3, 4, 7, 8};
    for (int i = 0; i < 5; i++) {
        world_threads(ns[i], any_source, NULL);
    }
}

TEST(any_source_between_sixteen_processes) { world_fork(16, any_source, NULL, 50); }

static void ring(ddl_group *w, void *arg) {
    (void)arg;
    int me = ddl_rank(w), n = ddl_size(w), right = (me + 1) % n, left = (me + n - 1) % n;
    static const size_t lengths[] = {0, 5, 50000, 3 * MIB};
    for (int k = 0; k < 4; k++) {
        unsigned char *out = poisoned(lengths[k]), *in = poisoned(lengths[k]);
        world_fill(out, me, k, lengths[k]);
        ddl_info info = {0};
        OK(ddl_send_recv(w, world_bytes(out, lengths[k]), right, k, world_bytes(in, lengths[k]), left, k, &info));
        CHECK_EQ(info.source, left);
        CHECK_EQ(world_wrong(in, left, k, lengths[k]), 0);
        CHECK(fence_holds(in, lengths[k]));
        free(out);
        free(in);
    }
}

TEST(a_ring_of_send_recv_does_not_lock) {
    static const int ns[] = {1, 2, 3, 4, 7, 8};
    for (int i = 0; i < 6; i++) {
        world_threads(ns[i], ring, NULL);
    }
}

/* ---- probe ---- */

static void probing(ddl_group *w, void *arg) {
    (void)arg;
    static const size_t lengths[] = {0, 12, 40000, 2 * MIB};
    if (ddl_rank(w) == 0) {
        for (int i = 0; i < 4; i++) {
            unsigned char *out = poisoned(lengths[i]);
            world_fill(out, 0, i, lengths[i]);
            OK(ddl_barrier(w));
            OK(ddl_send(w, world_bytes(out, lengths[i]), 1, 10 + i));
            free(out);
        }
        OK(ddl_barrier(w));
        return;
    }
    for (int i = 0; i < 4; i++) {
        ddl_info info = {.count = -7}, again = {0};
        CHECK_EQ((int)ddl_iprobe(w, 0, DDL_ANY_TAG, &info), (int)DDL_IN_PROGRESS);
        CHECK_EQ(info.count, -7); /* untouched */
        OK(ddl_barrier(w));
        OK(ddl_probe(w, i % 2 ? DDL_ANY_SOURCE : 0, i % 2 ? DDL_ANY_TAG : 10 + i, &info));
        CHECK_EQ(info.source, 0);
        CHECK_EQ(info.tag, 10 + i);
        CHECK_EQ(info.count, (int64_t)lengths[i]);
        OK(ddl_iprobe(w, DDL_ANY_SOURCE, 10 + i, &again)); /* it stays */
        CHECK_EQ(again.count, info.count);
        CHECK_EQ((int)ddl_iprobe(w, 0, 999, NULL), (int)DDL_IN_PROGRESS);
        unsigned char *in = poisoned((size_t)info.count);
        OK(ddl_recv(w, world_bytes(in, (size_t)info.count), info.source, info.tag, NULL));
        CHECK_EQ(world_wrong(in, 0, i, lengths[i]), 0);
        CHECK_EQ((int)ddl_iprobe(w, 0, DDL_ANY_TAG, &info), (int)DDL_IN_PROGRESS); /* and is gone */
        free(in);
    }
    OK(ddl_barrier(w));
}

TEST(probe_tells_and_leaves) { world_threads(2, probing, NULL); }

TEST(probe_between_processes) { world_fork(2, probing, NULL, 30); }

/* ---- what does not fit ---- */

static void truncated(ddl_group *w, void *arg) {
    (void)arg;
    static const size_t lengths[] = {100, 32 * KIB, 200 * KIB};
    for (int k = 0; k < 6; k++) {
        size_t bytes = lengths[k % 3];
        int posted = k >= 3, me = ddl_rank(w);
        unsigned char *at = poisoned(bytes);
        if (me == 0) {
            world_fill(at, 0, k, bytes);
            OK(ddl_barrier(w));
            ddl_request *r = NULL;
            OK(ddl_isend(w, world_bytes(at, bytes), 1, k, &r));
            OK(ddl_barrier(w));
            OK(ddl_wait(&r, NULL));
        } else {
            ddl_request *r = NULL;
            ddl_info info = {0};
            char theirs[32], ours[32];
            snprintf(theirs, sizeof theirs, "%zu bytes", bytes);
            snprintf(ours, sizeof ours, "%d", 99);
            if (posted) {
                OK(ddl_irecv(w, world_bytes(at, 99), 0, k, &r));
            }
            OK(ddl_barrier(w));
            OK(ddl_barrier(w));
            if (!posted) {
                OK(ddl_irecv(w, world_bytes(at, 99), 0, k, &r));
            }
            FAILS(ddl_wait(&r, &info), DDL_ERR_TRUNCATED, theirs);
            CHECK_STR(ddl_error(ddl_group_context(w)), ours);
            CHECK_STR(ddl_error(ddl_group_context(w)), "rank 0");
            CHECK(r == NULL);
            CHECK_EQ((int)info.status, (int)DDL_ERR_TRUNCATED);
            CHECK_EQ(info.source, 0);
            for (size_t i = 0; i < bytes; i++) {
                REQUIRE(at[i] == 0xa5); /* nothing was written */
            }
            OK(ddl_recv(w, world_bytes(at, bytes), 0, k, &info)); /* it stayed */
            CHECK_EQ(info.count, (int64_t)bytes);
            CHECK_EQ(world_wrong(at, 0, k, bytes), 0);
        }
        free(at);
    }
}

TEST(what_is_too_long_stays_for_a_larger_buffer) { world_threads(2, truncated, NULL); }

TEST(what_is_too_long_stays_between_processes) { world_fork(2, truncated, NULL, 30); }

static void other_type(ddl_group *w, void *arg) {
    (void)arg;
    for (int k = 0; k < 2; k++) {
        enum { N = 20000 };
        static const int counts[2] = {10, N}; /* eager, rendezvous */
        float *floats = malloc(N * sizeof *floats);
        for (int i = 0; i < N; i++) {
            floats[i] = (float)i;
        }
        if (ddl_rank(w) == 0) {
            ddl_request *r = NULL;
            OK(ddl_isend(w, DDL_VIEW(floats, counts[k]), 1, 1, &r));
            OK(ddl_wait(&r, NULL));
            OK(ddl_send(w, DDL_VIEW(floats, counts[k]), 1, 2));
        } else {
            int32_t *ints = malloc(N * sizeof *ints);
            memset(ints, 0xa5, N * sizeof *ints);
            memset(floats, 0xa5, N * sizeof *floats);
            FAILS(ddl_recv(w, DDL_VIEW(ints, N), 0, 1, NULL), DDL_ERR_MISMATCH, "type f32");
            CHECK_STR(ddl_error(ddl_group_context(w)), "type i32");
            CHECK_EQ((uint32_t)ints[0], 0xa5a5a5a5u);
            ddl_info info = {0};
            OK(ddl_recv(w, DDL_VIEW(floats, N), 0, 1, &info));
            CHECK_EQ(info.count, counts[k]);
            OK(ddl_recv(w, world_bytes(ints, N * sizeof *ints), 0, 2, &info)); /* bytes take anything */
            CHECK_EQ(info.count, counts[k] * (int64_t)sizeof *floats);
            for (int i = 0; i < counts[k]; i++) {
                float back;
                memcpy(&back, &ints[i], sizeof back);
                REQUIRE(floats[i] == (float)i && back == (float)i);
            }
            free(ints);
        }
        free(floats);
    }
}

/* Bytes that are no whole number of elements: refused, nothing written, and still to be had as bytes. */
static void in_pieces(ddl_group *w, void *arg) {
    (void)arg;
    enum { LARGE = 100001 }; /* by rendezvous */
    static const int bytes[] = {3, 7, LARGE};
    for (int k = 0; k < 3; k++) {
        unsigned char *data = calloc(1, LARGE + 3);
        if (ddl_rank(w) == 0) {
            memset(data, 7, LARGE);
            ddl_request *r = NULL;
            OK(ddl_isend(w, ddl_tensor_1d(data, DDL_U8, bytes[k]), 1, 1, &r));
            OK(ddl_wait(&r, NULL));
        } else {
            FAILS(ddl_recv(w, ddl_tensor_1d(data, DDL_I32, LARGE / 4 + 1), 0, 1, NULL), DDL_ERR_MISMATCH,
                  "no whole number of i32");
            CHECK(data[0] == 0);
            OK(ddl_recv(w, ddl_tensor_1d(data, DDL_U8, bytes[k]), 0, 1, NULL));
            CHECK(data[bytes[k] - 1] == 7 && data[bytes[k]] == 0);
        }
        free(data);
    }
}

TEST(bytes_that_are_no_whole_elements_stay) { world_threads(2, in_pieces, NULL); }

TEST(another_type_is_refused_and_stays) { world_threads(2, other_type, NULL); }

static void shorter(ddl_group *w, void *arg) {
    (void)arg;
    double out[3] = {1, 2, 3}, in[1000];
    if (ddl_rank(w) == 0) {
        OK(ddl_send(w, DDL_ARRAY(out), 1, 0));
    } else {
        ddl_info info = {0};
        memset(in, 0xa5, sizeof in);
        double poison = in[3];
        OK(ddl_recv(w, DDL_ARRAY(in), 0, 0, &info));
        CHECK_EQ(info.count, 3);
        CHECK(in[0] == 1 && in[1] == 2 && in[2] == 3);
        CHECK(memcmp(&in[3], &poison, sizeof poison) == 0);
    }
}

TEST(a_shorter_message_is_fine) { world_threads(2, shorter, NULL); }

/* ---- nobody, self ---- */

static void nobody(ddl_group *w, void *arg) {
    (void)arg;
    int32_t value = 7;
    ddl_info info = {.count = 5};
    ddl_request *r = NULL;
    OK(ddl_send(w, DDL_VIEW(&value, 1), DDL_NO_RANK, 3));
    OK(ddl_recv(w, DDL_VIEW(&value, 1), DDL_NO_RANK, 3, &info));
    CHECK_EQ(info.source, DDL_NO_RANK);
    CHECK_EQ(info.count, 0);
    CHECK_EQ(value, 7);
    OK(ddl_irecv(w, DDL_VIEW(&value, 1), DDL_NO_RANK, 3, &r));
    OK(ddl_test(&r, NULL));
    CHECK(r == NULL);
    int32_t in = -1, me = ddl_rank(w), n = ddl_size(w); /* a line: the ends have no neighbour */
    OK(ddl_send_recv(w, DDL_VIEW(&me, 1), me + 1 < n ? me + 1 : DDL_NO_RANK, 0, DDL_VIEW(&in, 1),
                     me > 0 ? me - 1 : DDL_NO_RANK, 0, &info));
    CHECK_EQ(in, me - 1);
}

TEST(no_rank_completes_at_once) { world_threads(3, nobody, NULL); }

static void self(ddl_group *w, void *arg) {
    (void)arg;
    int me = ddl_rank(w);
    static const size_t lengths[] = {0, 1, 32 * KIB, 500 * KIB, 3 * MIB};
    for (int k = 0; k < 10; k++) {
        size_t bytes = lengths[k % 5];
        unsigned char *out = poisoned(bytes), *in = poisoned(bytes);
        ddl_request *r = NULL;
        ddl_info info = {0};
        world_fill(out, me, k, bytes);
        if (k < 5) { /* the receive first */
            OK(ddl_irecv(w, world_bytes(in, bytes), me, k, &r));
            OK(ddl_send(w, world_bytes(out, bytes), me, k));
            OK(ddl_wait(&r, &info));
        } else { /* the message waits as a copy */
            OK(ddl_send(w, world_bytes(out, bytes), me, k));
            memset(out, 0, bytes);
            OK(ddl_recv(w, world_bytes(in, bytes), DDL_ANY_SOURCE, k, &info));
        }
        CHECK_EQ(info.source, me);
        CHECK_EQ(info.count, (int64_t)bytes);
        CHECK_EQ(world_wrong(in, me, k, bytes), 0);
        CHECK(fence_holds(in, bytes));
        free(out);
        free(in);
    }
    for (int k = 0; k < 3000; k++) { /* more than any window */
        int32_t a = k, b = -1;
        OK(ddl_send_recv(w, DDL_VIEW(&a, 1), me, 1, DDL_VIEW(&b, 1), me, 1, NULL));
        CHECK_EQ(b, k);
    }
    ddl_stats stats;
    OK(ddl_stats_get(ddl_group_context(w), &stats));
    CHECK_EQ(stats.unexpected_bytes, 0);
}

TEST(messages_to_self) {
    world_threads(1, self, NULL);
    world_threads(2, self, NULL);
}

/* ---- many, floods ---- */

/* A sender that nobody listens to: what the receiver stores is bounded, also in blocks; nothing is lost. */
static void flood(ddl_group *w, void *arg) {
    size_t bytes = *(const size_t *)arg;
    int count = bytes > 100000 ? 20 : 3000;
    int me = ddl_rank(w), n = ddl_size(w);
    unsigned char *at = poisoned(bytes * (size_t)count);
    ddl_request **requests = calloc((size_t)count, sizeof *requests);
    ddl_stats before, during, after;
    OK(ddl_barrier(w));
    OK(ddl_stats_get(ddl_group_context(w), &before));
    if (me > 0) {
        for (int i = 0; i < count; i++) {
            world_fill(at + (size_t)i * bytes, me, i, bytes);
            OK(ddl_isend(w, world_bytes(at + (size_t)i * bytes, bytes), 0, 4, &requests[i]));
        }
    }
    OK(ddl_barrier(w)); /* while all of them are under way */
    OK(ddl_stats_get(ddl_group_context(w), &during));
    if (me == 0) {
        const char *transports = getenv("DDL_TRANSPORTS"); /* see tests/test_transport_suites.py */
        bool pulls = transports != NULL && (strstr(transports, "fabric") != NULL || strstr(transports, "shm") != NULL);
        bool large = bytes > 64 * KIB; /* those go eagerly only to who pulls, and beside the window of small ones */
        uint64_t window = pulls && large ? MIB : 128 * KIB, landing = pulls && large ? MIB : 0;
        CHECK(during.unexpected_bytes <= (uint64_t)(n - 1) * window);
        CHECK(during.memory_bytes - before.memory_bytes < (uint64_t)(n - 1) * (MIB + landing + (uint64_t)count * KIB));
        unsigned char *in = poisoned(bytes);
        for (int peer = 1; peer < n; peer++) {
            for (int i = 0; i < count; i++) {
                ddl_info info = {0};
                if (ddl_recv(w, world_bytes(in, bytes), peer, 4, &info) != DDL_OK || info.count != (int64_t)bytes ||
                    world_wrong(in, peer, i, bytes) != 0) {
                    test__fail(__FILE__, __LINE__, "message %d of rank %d: %s", i, peer, ddl_error(ddl_group_context(w)));
                    break;
                }
            }
        }
        free(in);
    } else {
        OK(ddl_wait_all(requests, count, NULL));
    }
    OK(ddl_barrier(w));
    OK(ddl_stats_get(ddl_group_context(w), &after));
    CHECK_EQ(after.unexpected_bytes, 0);
    free(requests);
    free(at);
}

TEST(a_flood_is_bounded_and_complete) {
    static size_t lengths[] = {0, 1, 900, 5000, 32 * KIB, MIB};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        if (lengths[i] == 32 * KIB && (TEST_SANITIZED || getenv("TEST_LARGEST") != NULL)) {
            continue; /* 100 MB */
        }
        world_fork(2, flood, &lengths[i], 50);
    }
    world_threads(3, flood, &lengths[2]);
}

/* Messages that one rank sends and the other receives after a barrier: all fit the window, so no send waits for its
 * receive, however many have gone before and whatever the sender has looked at meanwhile. */
static void by_turns(ddl_group *w, void *arg) {
    (void)arg;
    enum { TURNS = 100, EACH = 100 };
    for (int turn = 0; turn < TURNS; turn++) {
        for (int i = 0; i < EACH && ddl_rank(w) == 0; i++) {
            int32_t value = turn * EACH + i;
            OK(ddl_send(w, DDL_VIEW(&value, 1), 1, 3));
        }
        OK(ddl_barrier(w));
        for (int i = 0; i < EACH && ddl_rank(w) == 1; i++) {
            int32_t value = -1;
            OK(ddl_recv(w, DDL_VIEW(&value, 1), 0, 3, NULL));
            CHECK_EQ(value, turn * EACH + i);
        }
        for (double from = test_now_s(); ddl_rank(w) == 0 && test_now_s() < from + 3e-5;) {
        } /* the other is there first, so that this rank has no time to look around */
        OK(ddl_barrier(w));
    }
}

TEST(what_fits_the_window_never_waits_for_its_receive) { world_threads(2, by_turns, NULL); }

TEST(what_fits_the_window_never_waits_between_processes) { world_fork(2, by_turns, NULL, 30); }

/* One rank only sends, the other only receives, more than any buffer holds. Of ten messages the first two are asked for
 * the other way round, so that what lies ready is not always what is wanted. */
static void one_way(ddl_group *w, void *arg) {
    (void)arg;
    enum { N = 1500, MOST = 1500 };
    unsigned char at[MOST + 1], early[MOST];
    ddl_request *first = NULL;
    for (int i = 0; i < N; i++) {
        int which = ddl_rank(w) == 0 || i % 10 > 1 ? i : i / 10 * 10 + 1 - i % 10;
        int32_t tag = which % 10 < 2 ? which % 10 : 2;
        size_t bytes = (size_t)which * 7 % MOST;
        if (ddl_rank(w) == 0 && tag == 0) { /* does not wait: the receiver asks for the next one first */
            world_fill(early, 0, which, bytes);
            OK(ddl_isend(w, world_bytes(early, bytes), 1, tag, &first));
        } else if (ddl_rank(w) == 0) {
            world_fill(at, 0, which, bytes);
            OK(ddl_send(w, world_bytes(at, bytes), 1, tag));
            OK(tag == 1 ? ddl_wait(&first, NULL) : DDL_OK);
        } else {
            ddl_info info;
            memset(at, 0xee, sizeof at);
            OK(ddl_recv(w, world_bytes(at, MOST), 0, tag, &info));
            CHECK(info.count == (int64_t)bytes && info.source == 0 && info.tag == tag && info.status == DDL_OK);
            CHECK_EQ(world_wrong(at, 0, which, bytes), 0);
            CHECK_EQ(at[bytes], 0xee);
        }
    }
}

TEST(what_lies_ready_is_taken_in_order) { world_threads(2, one_way, NULL); }

TEST(what_lies_ready_is_taken_between_processes) { world_fork(2, one_way, NULL, 30); }

/* All to all, all at once, in both directions, in an order that differs on every rank. */
static void storm(ddl_group *w, void *arg) {
    (void)arg;
    enum { PER_PEER = 12 };
    static const size_t lengths[] = {0, 100, 40000, 32 * KIB, 7, 1200000};
    int me = ddl_rank(w), n = ddl_size(w), total = n * PER_PEER;
    unsigned char **out = calloc((size_t)total, sizeof *out), **in = calloc((size_t)total, sizeof *in);
    ddl_transfer *transfers = calloc((size_t)total * 2, sizeof *transfers);
    ddl_request **requests = calloc((size_t)total * 2, sizeof *requests);
    ddl_info *infos = calloc((size_t)total * 2, sizeof *infos);
    for (int k = 0; k < total; k++) {
        int peer = (k + me) % n, i = k / n, tag = i;
        size_t bytes = lengths[(i + me + peer) % 6];
        out[k] = poisoned(bytes);
        in[k] = poisoned(bytes);
        world_fill(out[k], me, tag + peer, bytes);
        transfers[2 * k] = (ddl_transfer){1, world_bytes(out[k], bytes), peer, tag};
        transfers[2 * k + 1] = (ddl_transfer){0, world_bytes(in[k], bytes), peer, tag};
    }
    OK(ddl_batch(w, transfers, total * 2, requests));
    OK(ddl_wait_all(requests, total * 2, infos));
    for (int k = 0; k < total; k++) {
        int peer = (k + me) % n, i = k / n;
        size_t bytes = lengths[(i + me + peer) % 6];
        CHECK_EQ(infos[2 * k + 1].count, (int64_t)bytes);
        CHECK_EQ(infos[2 * k + 1].source, peer);
        CHECK_EQ(world_wrong(in[k], peer, i + me, bytes), 0);
        CHECK(fence_holds(in[k], bytes));
        free(out[k]);
        free(in[k]);
    }
    free(out);
    free(in);
    free(transfers);
    free(requests);
    free(infos);
}

TEST(a_storm_of_batches) {
    static const int ns[] = {2, 3, 4, 8};
    for (int i = 0; i < 4; i++) {
        world_threads(ns[i], storm, NULL);
    }
}

TEST(a_storm_of_batches_between_processes) { world_fork(7, storm, NULL, 50); }

/* ---- strides ---- */

/* A column of a matrix goes into a row that runs backwards, and a transposed block into a sub-block. */
static void strided(ddl_group *w, void *arg) {
    (void)arg;
    for (int k = 0; k < 2; k++) {
        int rows = k == 0 ? 7 : 500, columns = k == 0 ? 5 : 300, count = rows * columns;
        int32_t *a = malloc((size_t)count * sizeof *a), *b = malloc((size_t)count * 2 * sizeof *b);
        for (int i = 0; i < count; i++) {
            a[i] = i;
        }
        memset(b, 0xa5, (size_t)count * 2 * sizeof *b);
        ddl_tensor column = ddl_tensor_1d(a + 2, DDL_I32, rows);
        column.strides[0] = columns;
        ddl_tensor backwards = ddl_tensor_1d(b + 2 * (rows - 1), DDL_I32, rows);
        backwards.strides[0] = -2;
        ddl_tensor transposed = ddl_tensor_nd(a, DDL_I32, 2, (int64_t[]){columns, rows});
        transposed.strides[0] = 1;
        transposed.strides[1] = columns;
        ddl_tensor wide = ddl_tensor_nd(b, DDL_I32, 2, (int64_t[]){columns, rows});
        wide.strides[0] = 2 * rows;
        wide.strides[1] = 1;
        if (ddl_rank(w) == 0) {
            OK(ddl_send(w, column, 1, 0));
            OK(ddl_send(w, transposed, 1, 1));
        } else {
            ddl_info info = {0};
            OK(ddl_recv(w, backwards, 0, 0, &info));
            CHECK_EQ(info.count, rows);
            for (int i = 0; i < rows; i++) {
                CHECK_EQ(b[2 * (rows - 1 - i)], 2 + i * columns);
                CHECK(i + 1 == rows || (uint32_t)b[2 * i + 1] == 0xa5a5a5a5u);
            }
            memset(b, 0xa5, (size_t)count * 2 * sizeof *b);
            OK(ddl_recv(w, wide, 0, 1, &info));
            int wrong = 0;
            for (int c = 0; c < columns; c++) {
                for (int r = 0; r < 2 * rows; r++) {
                    wrong += (uint32_t)b[c * 2 * rows + r] != (r < rows ? (uint32_t)(r * columns + c) : 0xa5a5a5a5u);
                }
            }
            CHECK_EQ(wrong, 0);
        }
        free(a);
        free(b);
    }
}

TEST(strided_tensors_on_both_sides) { world_threads(2, strided, NULL); }

/* A shorter message fills the first elements of a strided tensor, and touches no others. */
static void strided_shorter(ddl_group *w, void *arg) {
    (void)arg;
    int32_t a[3] = {1, 2, 3}, b[20];
    if (ddl_rank(w) == 0) {
        OK(ddl_send(w, DDL_ARRAY(a), 1, 0));
    } else {
        for (int i = 0; i < 20; i++) {
            b[i] = -i;
        }
        ddl_tensor t = ddl_tensor_1d(b, DDL_I32, 10);
        t.strides[0] = 2;
        ddl_info info = {0};
        OK(ddl_recv(w, t, 0, 0, &info));
        CHECK_EQ(info.count, 3);
        for (int i = 0; i < 20; i++) {
            CHECK_EQ(b[i], i % 2 == 0 && i < 6 ? i / 2 + 1 : -i);
        }
    }
}

TEST(a_shorter_message_into_a_strided_tensor) { world_threads(2, strided_shorter, NULL); }

/* ---- no memory ---- */

static _Atomic size_t largest; /* what was asked for */

static void *take(void *user, size_t bytes) {
    (void)user;
    largest = bytes > largest ? bytes : largest;
    return bytes > UINT32_MAX ? NULL : malloc(bytes);
}

static void give(void *user, void *memory) {
    (void)user;
    free(memory);
}

/* More than 4 GiB to oneself are asked for whole: the allocator that refuses them sees how many. */
static void self_beyond_4_gib(ddl_group *w, void *arg) {
    (void)arg;
    size_t bytes = ((size_t)4 << 30) + 12345;
    void *at = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
        SKIP("no address space for 4 GiB");
    }
    largest = 0;
    FAILS(ddl_send(w, world_bytes(at, bytes), 0, 0), DDL_ERR_NOMEM, "4294979641 bytes to this rank itself");
    CHECK(largest > bytes);
    munmap(at, bytes);
}

TEST(more_than_four_gibibytes_to_oneself) {
    NEED_LARGE_MESSAGES();
    ddl_config config = {.allocator = {take, give, NULL}};
    world_config = &config;
    world_threads(1, self_beyond_4_gib, NULL);
    world_config = NULL;
}

/* ---- probes and deaths ---- */

/* A death is told once to who looks for a message of any rank; when nobody is left, always. */
static void probe_deaths(ddl_group *w, void *arg) {
    _Atomic int *told = arg;
    ddl_info info;
    int32_t value = 7;
    OK(ddl_barrier(w));
    if (ddl_rank(w) == 1) {
        _exit(0);
    }
    if (ddl_rank(w) == 2) {
        while (*told == 0) {
            usleep(1000);
        }
        OK(ddl_send(w, DDL_VIEW(&value, 1), 0, 5));
        while (*told == 1) {
            usleep(1000);
        }
        _exit(0);
    }
    FAILS(ddl_probe(w, DDL_ANY_SOURCE, 5, &info), DDL_ERR_PEER, "rank 1");
    CHECK_EQ((int)ddl_iprobe(w, DDL_ANY_SOURCE, 5, &info), (int)DDL_IN_PROGRESS);
    *told = 1;
    OK(ddl_probe(w, DDL_ANY_SOURCE, 5, &info));
    CHECK_EQ(info.source, 2);
    OK(ddl_recv(w, DDL_VIEW(&value, 1), DDL_ANY_SOURCE, 5, NULL));
    *told = 2;
    ddl_status status = DDL_IN_PROGRESS;
    for (double end = test_now_s() + 5 * test_slow(); status == DDL_IN_PROGRESS && test_now_s() < end;) {
        status = ddl_iprobe(w, DDL_ANY_SOURCE, 5, &info);
    }
    CHECK_EQ((int)status, (int)DDL_ERR_PEER);
    for (int i = 0; i < 2; i++) {
        FAILS(ddl_probe(w, DDL_ANY_SOURCE, 5, &info), DDL_ERR_PEER, "all others");
    }
}

TEST(probes_of_any_rank_are_told_of_deaths) {
    _Atomic int *told = ranks_shared(sizeof *told);
    world_fork(3, probe_deaths, (void *)told, 30);
}

/* A receive from any rank that nobody can serve any more ends at once: one that waits is told of each death, and when
 * the last has gone, by death or in order, so is whoever starts one. */
static void nobody_left(ddl_group *w, void *arg) {
    const char *how = (const char *)arg;
    int32_t value = 7;
    ddl_request *r = NULL;
    OK(ddl_barrier(w));
    if (ddl_rank(w) == 1 && how[0] == 'd') {
        _exit(0);
    }
    if (ddl_rank(w) != 0) {
        return; /* in order */
    }
    double start = test_now_s();
    ddl_status status = DDL_ERR_PEER; /* of the death, once */
    for (int i = 0; i < 2; i++) {
        OK(ddl_irecv(w, DDL_VIEW(&value, 1), DDL_ANY_SOURCE, 5, &r));
        status = ddl_wait(&r, NULL);
        CHECK_EQ((int)status, (int)DDL_ERR_PEER);
    }
    FAILS(ddl_recv(w, DDL_VIEW(&value, 1), DDL_ANY_SOURCE, DDL_ANY_TAG, NULL), DDL_ERR_PEER, "all others");
    OK(ddl_irecv(w, DDL_VIEW(&value, 1), DDL_ANY_SOURCE, 5, &r));
    do {
        status = ddl_test(&r, NULL);
    } while (status == DDL_IN_PROGRESS && test_now_s() - start < 5 * test_slow());
    CHECK_EQ((int)status, (int)DDL_ERR_PEER);
    CHECK_STR(ddl_error(ddl_group_context(w)), "all others");
    CHECK(test_now_s() - start < 5 * test_slow()); /* the deadline is 20 s */
    OK(ddl_isend(w, DDL_VIEW(&value, 1), 0, 5, &r)); /* a message to itself is still there */
    OK(ddl_wait(&r, NULL));
    OK(ddl_recv(w, DDL_VIEW(&value, 1), DDL_ANY_SOURCE, 5, NULL));
}

TEST(a_receive_from_any_rank_when_all_have_gone) {
    world_threads(3, nobody_left, (void *)(uintptr_t)"left");
}

TEST(a_receive_from_any_rank_when_all_have_gone_between_processes) {
    world_fork(3, nobody_left, (void *)(uintptr_t)"left", 30);
    world_fork(3, nobody_left, (void *)(uintptr_t)"died", 30);
}

/* ---- a deadline while a message is half way ---- */

/* What its sender thinks sent stays to be received, whole, and not a byte more comes to the buffer of the call that
 * ended. Over a transport that takes the message at once there is nothing to see: then the first receive has it. */
static void deadline_half_way(ddl_group *w, void *arg) {
    (void)arg;
    enum { BYTES = 60 * KIB };
    int me = ddl_rank(w);
    unsigned char *first = poisoned(BYTES), *second = poisoned(BYTES), *kept = malloc(BYTES);
    OK(ddl_barrier(w));
    if (me == 0) {
        ddl_request *r = NULL;
        world_fill(first, 0, 9, BYTES);
        OK(ddl_isend(w, world_bytes(first, BYTES), 1, 9, &r));
        usleep((useconds_t)(600000 * test_slow())); /* nothing is sent on meanwhile */
        OK(ddl_wait(&r, NULL));
        OK(ddl_send(w, world_bytes(first, 1), 1, 10)); /* and what follows comes after it */
    } else {
        OK(ddl_group_set(w, &(ddl_group_options){.timeout_ms = (int64_t)(200 * test_slow())}));
        ddl_status status = ddl_recv(w, world_bytes(first, BYTES), 0, 9, NULL);
        memcpy(kept, first, BYTES);
        OK(ddl_group_set(w, &(ddl_group_options){.timeout_ms = (int64_t)(20000 * test_slow())}));
        if (status == DDL_ERR_TIMEOUT) {
            OK(ddl_recv(w, world_bytes(second, BYTES), 0, 9, NULL));
            CHECK(memcmp(kept, first, BYTES) == 0);
        } else {
            OK(status);
        }
        world_fill(kept, 0, 9, BYTES);
        CHECK(memcmp(status == DDL_OK ? first : second, kept, BYTES) == 0);
        OK(ddl_recv(w, world_bytes(kept, 1), 0, 10, NULL));
    }
    free(first);
    free(second);
    free(kept);
}

TEST(a_deadline_while_a_message_is_half_way) {
    world_threads(2, deadline_half_way, NULL);
}

TEST(a_deadline_while_a_message_is_half_way_between_processes) {
    world_fork(2, deadline_half_way, NULL, 30);
}

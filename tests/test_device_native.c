/* Collectives of tensors on devices by the devices themselves (DDL_TRANSPORT_DEVICE), through a stand-in: in place and
 * not, strided, partly in ordinary memory, scaled, persistent; in groups made later; a call that differs, a rank that
 * leaves.
 * tests/run: variants=gcc,asan timeout=120 libs=-ldl */
#include "device.h"

static bool some_cases(ddl_group *g, int per_kind, unsigned *random) {
    static const ddl_kind kinds[] = {DDL_BROADCAST, DDL_REDUCE, DDL_ALL_REDUCE, DDL_ALL_GATHER, DDL_REDUCE_SCATTER,
                                     DDL_ALL_TO_ALL, DDL_GATHER, DDL_SCAN};
    int n = ddl_size(g);
    bool ok = true;
    for (size_t at = 0; ok && at < sizeof kinds / sizeof kinds[0]; at++) {
        for (int i = 0; ok && i < per_kind; i++) {
            static const int64_t sizes[] = {0, 1, 7, 300, 30000};
            unsigned draw = coll_random(random), more = coll_random(random);
            ddl_kind kind = kinds[at];
            coll_case k = {.kind = kind,
                           .dtype = draw % 3 == 0 ? DDL_F32 : draw % 3 == 1 ? DDL_F64 : DDL_I64,
                           .op = !coll_reduces(kind) ? DDL_OP_NONE : draw / 4 % 3 == 0 ? DDL_MAX : DDL_SUM,
                           .root = coll_rooted(kind) ? (int)(draw / 16 % (unsigned)n) : 0,
                           .count = sizes[draw / 64 % 5],
                           .in_place = draw / 512 % 3 == 0,
                           .way = (coll_way)(draw / 2048 % 3),
                           .in_layout = (coll_layout)(more % 4),
                           .out_layout = (coll_layout)(more / 4 % 4),
                           .salt = more / 16 % 50};
            /* at least one of the tensors that each rank looks at is on a device */
            k.in_device = 1 + (int32_t)((more / 1024 + (unsigned)ddl_rank(g)) % 2);
            k.out_device = more / 4096 % 3 == 0 ? DDL_HOST : k.in_device;
            if (k.in_place || kind == DDL_BROADCAST) {
                k.out_device = k.in_device;
            }
            if (k.in_place && (coll_many_in(kind) || coll_many_out(kind))) {
                k.in_layout = k.out_layout = COLL_PACKED;
            }
            ok = coll_check(g, &k);
        }
    }
    return ok;
}

static void collectives(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    unsigned random = coll_seed() * 19 + (unsigned)n;
    standin_state *s = standin_of();
    int before = s->natives;
    bool ok = some_cases(ddl_world(c), 10, &random);
    CHECK(s->natives > before + 30);
    ddl_group *half = NULL;
    if (ok) {
        CHECK_EQ(ddl_group_split(ddl_world(c), rank % 2, 0, &half), DDL_OK);
        unsigned other = random + (unsigned)(rank % 2);
        some_cases(half, 3, &other);
        CHECK_EQ(ddl_group_free(&half), DDL_OK);
    }
    ddl_stats stats;
    uint64_t natives = 0;
    CHECK_EQ(ddl_stats_get(c, &stats), DDL_OK);
    for (int i = 0; i < DDL_STATS_TRANSPORTS && stats.transports[i].name != NULL; i++) {
        natives += strcmp(stats.transports[i].name, "standin") == 0 ? stats.transports[i].native_operations : 0;
    }
    CHECK(natives > 30);
    coll_leave(c);
}

TEST(collectives_by_the_device) {
    standin("native");
    for (int n = 2; n <= 4; n++) {
        coll_job job;
        coll_job_make(&job);
        ranks_threads(n, collectives, &job);
    }
}

/* An average, a scaled sum, and a function of the program's own, which no device can run. */
static void plus(void *dst, const void *a, const void *b, int64_t count, ddl_dtype dtype, void *user) {
    (void)dtype, (void)user;
    for (int64_t i = 0; i < count; i++) {
        ((float *)dst)[i] = ((const float *)a)[i] + ((const float *)b)[i];
    }
}

static void ops(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    ddl_op scaled, own;
    CHECK_EQ(ddl_op_create_scaled_sum(c, rank + 1.0, &scaled), DDL_OK);
    CHECK_EQ(ddl_op_create(c, plus, NULL, 1, &own), DDL_OK);
    float in[50], out[50];
    for (int i = 0; i < 50; i++) {
        in[i] = (float)(rank + i);
    }
    ddl_tensor t = standin_tensor(c, 1, in, DDL_F32, 50), to = standin_tensor(c, 1, NULL, DDL_F32, 50);
    const ddl_op all[3] = {DDL_AVG, scaled, own};
    for (int o = 0; o < 3; o++) {
        CHECK_EQ(ddl_all_reduce(ddl_world(c), t, to, all[o]), DDL_OK);
        standin_read(c, to, out);
        int wrong = 0;
        for (int i = 0; i < 50; i++) {
            float want = 0;
            for (int r = 0; r < n; r++) {
                want += (float)(r + i) * (o == 1 ? (float)(r + 1) : 1.0f);
            }
            wrong += out[i] != (o == 0 ? want / (float)n : want);
        }
        CHECK_EQ(wrong, 0);
    }
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &to), DDL_OK);
    coll_leave(c);
}

TEST(averages_and_ops_of_programs) {
    standin("native");
    coll_job job;
    coll_job_make(&job);
    ranks_threads(2, ops, &job);
    ranks_threads(4, ops, &job);
}

/* Rank 0 has its tensor in ordinary memory, alone or in a list, the others on devices: both calls are spelled out, nothing
 * is written. */
static void differ(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    float data[64], back[64];
    for (int i = 0; i < 64; i++) {
        data[i] = (float)i;
    }
    ddl_tensor t = rank == 0 ? ddl_tensor_1d(data, DDL_F32, 64) : standin_tensor(c, 1, data, DDL_F32, 64);
    for (int many = 0; many < 2; many++) {
        ddl_group *g = NULL;
        CHECK_EQ(ddl_group_split(ddl_world(c), 0, 0, &g), DDL_OK);
        CHECK_EQ(many == 0 ? ddl_all_reduce(g, t, t, DDL_SUM) : ddl_all_reduce_many(g, &t, 1, DDL_SUM), DDL_ERR_MISMATCH);
        CHECK_STR(ddl_error(c), "native_device");
        CHECK_STR(ddl_error(c), many == 0 ? "all_reduce(" : "all_reduce_many(");
        CHECK_STR(ddl_error(c), "either all ranks pass one on a device or none");
        if (rank > 0) {
            standin_read(c, t, back);
        }
        for (int i = 0; i < 64; i++) {
            CHECK_EQ(rank > 0 ? back[i] : data[i], i);
        }
        CHECK_EQ(ddl_group_free(&g), DDL_OK);
    }
    CHECK_EQ(rank > 0 ? ddl_tensor_free(c, &t) : DDL_OK, DDL_OK);
    coll_leave(c);
}

TEST(devices_here_and_ordinary_memory_there) {
    standin("native");
    coll_job job;
    coll_job_make(&job);
    ranks_threads(3, differ, &job);
}

/* ---- streams ---- */

/* Waits for what is on a stream so far, as a program with kernels of its own does. */
static bool stream_over(void *stream) {
    const ddl_device *t = standin_table();
    void *event = NULL;
    CHECK_EQ(t->event_record(NULL, stream, &event), DDL_OK);
    double deadline = test_now_s() + 20 * test_slow();
    ddl_status status = DDL_IN_PROGRESS;
    while (status == DDL_IN_PROGRESS && test_now_s() < deadline) {
        status = t->event_test(NULL, event);
        sched_yield();
    }
    t->event_free(NULL, event);
    CHECK_EQ(status, DDL_OK);
    return status == DDL_OK;
}

enum { ROUNDS = 6, LENGTH = 500 };

/* Input is written on the stream before the call, and the result is read on the stream after it; nobody waits between.
 * way 0: all_reduce; 1: messages round a ring; 2: all_reduce by a request; 3: a list. */
static void in_stream(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    ddl_group *w = ddl_world(c);
    const ddl_device *t = standin_table();
    static const float poison[LENGTH] = {-1};
    float(*in)[LENGTH] = (float(*)[LENGTH])calloc(ROUNDS, sizeof *in);
    float(*out)[LENGTH] = (float(*)[LENGTH])calloc(ROUNDS, sizeof *out);
    ddl_tensor from[ROUNDS], to = standin_tensor(c, 1, poison, DDL_F32, LENGTH);
    void *stream = NULL;
    REQUIRE(t->stream_make(NULL, &stream) == DDL_OK);
    CHECK_EQ(ddl_group_stream(w, 1, stream), DDL_OK);
    for (int way = 0; way < 4; way++) {
        bool ok = true;
        for (int i = 0; i < ROUNDS; i++) {
            for (int j = 0; j < LENGTH; j++) {
                in[i][j] = (float)(rank + i * 3 + j + way);
            }
            from[i] = standin_tensor(c, 1, poison, DDL_F32, LENGTH);
            memset(out[i], 0xCC, sizeof out[i]);
        }
        for (int i = 0; ok && i < ROUNDS; i++) {
            ddl_request *r = NULL;
            t->copy(NULL, from[i].data, in[i], sizeof in[i], stream);
            if (way == 0) {
                ok = ddl_all_reduce(w, from[i], to, DDL_SUM) == DDL_OK;
            } else if (way == 1) {
                ok = ddl_send_recv(w, from[i], (rank + 1) % n, 1, to, (rank + n - 1) % n, 1, NULL) == DDL_OK;
            } else if (way == 2) {
                ok = ddl_iall_reduce(w, from[i], to, DDL_SUM, &r) == DDL_OK && ddl_stream_wait(&r) == DDL_OK;
                CHECK(r == NULL);
            } else {
                ddl_tensor both[2] = {from[i], to};
                t->fill(NULL, to.data, 0, sizeof in[i], stream);
                ok = ddl_all_reduce_many(w, both, 2, DDL_SUM) == DDL_OK;
                t->copy(NULL, to.data, from[i].data, sizeof in[i], stream);
            }
            CHECK(ok);
            t->copy(NULL, out[i], to.data, sizeof out[i], stream);
        }
        if (!ok) {
            printf("%s\n", ddl_error(c));
        }
        ok = stream_over(stream) && ok;
        int wrong = 0;
        for (int i = 0; i < ROUNDS; i++) {
            for (int j = 0; j < LENGTH; j++) {
                float one = (float)(i * 3 + j + way), sum = (float)n * one + (float)(n * (n - 1)) / 2;
                wrong += out[i][j] != (way == 1 ? one + (float)((rank + n - 1) % n) : sum);
            }
            CHECK_EQ(ddl_tensor_free(c, &from[i]), DDL_OK);
        }
        CHECK_EQ(wrong == 0 ? -1 : way, -1);
    }
    CHECK_EQ(ddl_barrier(w), DDL_OK);
    CHECK_EQ(ddl_group_stream(w, 1, NULL), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &to), DDL_OK);
    t->stream_free(NULL, stream);
    free(in);
    free(out);
    coll_leave(c);
}

TEST(streams_of_staged_operations) {
    standin("");
    coll_job job;
    coll_job_make(&job);
    ranks_threads(1, in_stream, &job);
    ranks_threads(2, in_stream, &job);
    ranks_threads(3, in_stream, &job);
}

TEST(streams_of_operations_by_the_device) {
    standin("native");
    coll_job job;
    coll_job_make(&job);
    ranks_threads(2, in_stream, &job);
    ranks_threads(3, in_stream, &job);
}

/* A stream that does not move holds up nobody but itself; one that is captured takes no operation that needs the host. */
static void still(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    ddl_group *w = ddl_world(c);
    const ddl_device *t = standin_table();
    standin_state *s = standin_of();
    float data[8] = {1, 2, 3, 4, 5, 6, 7, 8}, back[8] = {0};
    ddl_tensor from = standin_tensor(c, 1, data, DDL_F32, 8), to = standin_tensor(c, 1, back, DDL_F32, 8);
    void *stream = NULL;
    ddl_request *r = NULL;
    REQUIRE(t->stream_make(NULL, &stream) == DDL_OK);
    CHECK_EQ(ddl_group_stream(w, 3, stream), DDL_ERR_ARG);
    CHECK_STR(ddl_error(c), "no device 3");
    CHECK_EQ(ddl_iall_reduce(w, from, to, DDL_SUM, &r), DDL_OK);
    CHECK_EQ(ddl_stream_wait(&r), DDL_ERR_STATE);
    CHECK_EQ(ddl_wait(&r, NULL), DDL_OK);
    CHECK_EQ(ddl_group_stream(w, 1, stream), DDL_OK);
    s->captured = stream;
    CHECK_EQ(ddl_all_reduce(w, from, to, DDL_SUM), DDL_ERR_UNSUPPORTED);
    CHECK_STR(ddl_error(c), "captured into a graph");
    CHECK_EQ(ddl_send(w, from, 0, 0), DDL_ERR_UNSUPPORTED);
    CHECK_EQ(ddl_all_reduce_many(w, &from, 1, DDL_SUM), DDL_ERR_UNSUPPORTED);
    s->captured = NULL;
    s->stopped = 1;
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(ddl_all_reduce(w, from, to, DDL_SUM), DDL_OK);
        CHECK_EQ(ddl_send_recv(w, from, 0, i, to, 0, i, NULL), DDL_OK);
    }
    float host = 3;
    CHECK_EQ(ddl_send_recv(w, ddl_tensor_1d(&host, DDL_F32, 1), 0, 9, ddl_tensor_1d(back, DDL_F32, 1), 0, 9, NULL), DDL_OK);
    CHECK(back[0] == 3);
    s->stopped = 0;
    CHECK(stream_over(stream));
    CHECK_EQ(ddl_group_stream(w, 1, NULL), DDL_OK);
    standin_read(c, to, back);
    CHECK(memcmp(back, data, sizeof data) == 0);
    CHECK_EQ(ddl_tensor_free(c, &from), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &to), DDL_OK);
    t->stream_free(NULL, stream);
    coll_leave(c);
}

TEST(a_stream_that_does_not_move_and_one_that_is_captured) {
    standin("");
    coll_job job;
    coll_job_make(&job);
    ranks_threads(1, still, &job);
}

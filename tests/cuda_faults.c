/* Whole jobs of threads with the plugin cuda over the stand-in for its driver (cuda_driver.c): what a stream holds back,
 * what cannot be captured or ordered, GPUs that do not reach each other. Built and run by test_cuda_suite.py. */
#include "coll.h"
#include "cuda_symbol.h"

#include <stdatomic.h>

enum { COUNT = 1 << 16, SUCCESS = 0, NON_BLOCKING = 1 };

static void enter(int device) {
    void *context = NULL;
    CHECK_EQ(DRIVER(int (*)(void **, int), "cuDevicePrimaryCtxRetain")(&context, device), SUCCESS);
    CHECK_EQ(DRIVER(int (*)(void *), "cuCtxPushCurrent_v2")(context), SUCCESS);
}

static void *stream_on(int device) {
    void *stream = NULL;
    enter(device);
    CHECK_EQ(DRIVER(int (*)(void **, unsigned), "cuStreamCreate")(&stream, NON_BLOCKING), SUCCESS);
    return stream;
}

/* Tensors of COUNT floats: `in` is rank + 1, `out` is -1. */
typedef struct pair {
    ddl_tensor in, out;
    float *host;
} pair;

static void pair_make(ddl_context *c, int rank, int32_t device, pair *p) {
    int64_t count = COUNT;
    p->host = malloc(COUNT * sizeof *p->host);
    REQUIRE(ddl_tensor_alloc_on(c, device, DDL_F32, 1, &count, &p->in) == DDL_OK);
    REQUIRE(ddl_tensor_alloc_on(c, device, DDL_F32, 1, &count, &p->out) == DDL_OK);
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < COUNT; j++) {
            p->host[j] = i == 0 ? (float)(rank + 1) : -1;
        }
        CHECK_EQ(ddl_tensor_copy(c, i == 0 ? p->in : p->out, ddl_tensor_1d(p->host, DDL_F32, COUNT)), DDL_OK);
    }
}

static void pair_free(ddl_context *c, pair *p) {
    CHECK_EQ(ddl_tensor_free(c, &p->in), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &p->out), DDL_OK);
    free(p->host);
}

static int wrong(const pair *p, float want) {
    int bad = 0;
    for (int i = 0; i < COUNT; i++) {
        bad += p->host[i] != want;
    }
    return bad;
}

static int out_wrong(ddl_context *c, pair *p, float want) {
    memset(p->host, 0xee, COUNT * sizeof *p->host);
    CHECK_EQ(ddl_tensor_copy(c, ddl_tensor_1d(p->host, DDL_F32, COUNT), p->out), DDL_OK);
    return wrong(p, want);
}

/* ---- memory; first, as processes can only be made before this one uses the driver ---- */

/* What was freed is held by peers' mappings until they look; an allocation that needs it waits for that. */
static void freed_and_full(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    int64_t first = 100 << 20, second = 110 << 20, third = 300 << 20;
    ddl_tensor t = {0}, part, more = {0};
    DRIVER(void (*)(size_t), "standin_memory")((size_t)240 << 20);
    REQUIRE(ddl_tensor_alloc_on(c, 1, DDL_U8, 1, &first, &t) == DDL_OK);
    part = ddl_tensor_1d(t.data, DDL_U8, 5000);
    part.device = 1;
    CHECK_EQ(ddl_all_reduce(ddl_world(c), part, part, DDL_MAX), DDL_OK); /* now the other rank has all of it mapped */
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    CHECK_EQ(ddl_tensor_alloc_on(c, 1, DDL_U8, 1, &second, &t), DDL_OK);
    CHECK_EQ(ddl_tensor_alloc_on(c, 1, DDL_U8, 1, &third, &more), DDL_ERR_NOMEM); /* and the context lives */
    part.data = t.data;
    CHECK_EQ(ddl_all_reduce(ddl_world(c), part, part, DDL_MAX), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    coll_leave(c);
}

TEST(memory_that_was_freed_is_waited_for) {
    coll_job job;
    coll_job_make(&job);
    ranks_fork(2, freed_and_full, &job, 60);
}

/* ---- streams ---- */

static void doze(void *user) {
    (void)user;
    usleep(30000);
}

/* What follows a collective on the stream reads its result, though the stream comes to it late. */
static void followed(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    pair p;
    pair_make(c, rank, 1, &p);
    void *stream = stream_on(0);
    CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
    CHECK_EQ(ddl_group_stream(ddl_world(c), 1, stream), DDL_OK);
    for (int round = 0; round < 4; round++) {
        ddl_request *r = NULL;
        memset(p.host, 0xee, COUNT * sizeof *p.host);
        CHECK_EQ(DRIVER(int (*)(uint64_t, unsigned char, size_t, void *), "cuMemsetD8Async")(
                     (uint64_t)(uintptr_t)p.out.data, 0, COUNT * sizeof(float), stream), SUCCESS);
        if (rank == 0) {
            CHECK_EQ(DRIVER(int (*)(void *, void (*)(void *), void *), "cuLaunchHostFunc")(stream, doze, NULL), SUCCESS);
        }
        if (round % 2 == 0) {
            CHECK_EQ(ddl_all_reduce(ddl_world(c), p.in, p.out, DDL_SUM), DDL_OK);
        } else {
            CHECK_EQ(ddl_iall_reduce(ddl_world(c), p.in, p.out, DDL_SUM, &r), DDL_OK);
            CHECK_EQ(ddl_stream_wait(&r), DDL_OK);
        }
        CHECK_EQ(DRIVER(int (*)(uint64_t, uint64_t, size_t, void *), "cuMemcpyAsync")(
                     (uint64_t)(uintptr_t)p.host, (uint64_t)(uintptr_t)p.out.data, COUNT * sizeof(float), stream),
                 SUCCESS);
        CHECK_EQ(DRIVER(int (*)(void *), "cuStreamSynchronize")(stream), SUCCESS);
        CHECK_EQ(wrong(&p, (float)(n * (n + 1)) / 2), 0);
    }
    CHECK_EQ(ddl_group_stream(ddl_world(c), 1, NULL), DDL_OK);
    pair_free(c, &p);
    coll_leave(c);
}

TEST(what_follows_on_a_stream_waits) {
    coll_job job;
    coll_job_make(&job);
    ranks_threads(2, followed, &job);
}

static void hold(void *user) {
    while (!atomic_load((atomic_bool *)user)) {
        usleep(1000);
    }
}

/* A program that runs ahead of its GPU fills the stream's queue behind a gate. The next call waits in the driver for room,
 * and not with the lock: what opens the gate goes on meanwhile. Rank 1 comes when rank 0 is in there. */
enum { PLACES = 40 };
static void filled(int rank, int n, void *arg) {
    static atomic_bool go;
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    pair p;
    pair_make(c, rank, 1, &p);
    void *stream = stream_on(0);
    CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
    CHECK_EQ(ddl_group_stream(ddl_world(c), 1, stream), DDL_OK);
    for (int round = 0; round < 4; round++) {
        CHECK_EQ(DRIVER(int (*)(void *), "cuStreamSynchronize")(stream), SUCCESS);
        atomic_store(&go, false);
        CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
        CHECK_EQ(DRIVER(int (*)(void *), "cuStreamSynchronize")(stream), SUCCESS);
        CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
        if (rank == 1) {
            while (!atomic_load(&go)) {
                usleep(1000);
            }
            usleep(100000); /* were rank 0 slower than that, it would find room */
        }
        CHECK_EQ(ddl_all_reduce(ddl_world(c), p.in, p.out, DDL_SUM), DDL_OK); /* an event, a gate */
        for (int i = 0; rank == 0 && i < PLACES - 1 - round % 2; i++) { /* behind the gate, which may be all there is */
            CHECK_EQ(DRIVER(int (*)(uint64_t, unsigned char, size_t, void *), "cuMemsetD8Async")(
                         (uint64_t)(uintptr_t)p.in.data, 0, 4, stream), SUCCESS);
        }
        atomic_store(&go, rank == 0 || atomic_load(&go));
        if (round < 2) {
            CHECK_EQ(ddl_all_reduce(ddl_world(c), p.out, p.out, DDL_MAX), DDL_OK);
        } else {
            CHECK_EQ(rank == 0 ? ddl_send(ddl_world(c), p.out, 1, 0) : ddl_recv(ddl_world(c), p.out, 0, 0, NULL), DDL_OK);
        }
    }
    CHECK_EQ(DRIVER(int (*)(void *), "cuStreamSynchronize")(stream), SUCCESS);
    CHECK_EQ(ddl_group_stream(ddl_world(c), 1, NULL), DDL_OK);
    pair_free(c, &p);
    coll_leave(c);
}

TEST(a_full_queue_holds_nobody_up) {
    coll_job job;
    coll_job_make(&job);
    DRIVER(void (*)(int), "standin_places")(PLACES);
    ranks_threads(2, filled, &job);
    DRIVER(void (*)(int), "standin_places")(0);
}

/* A tensor that an operation still uses is not freed; afterwards it is. */
static void freed_in_use(int rank, int n, void *arg) {
    static atomic_bool go;
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    pair p;
    pair_make(c, rank, 1, &p);
    void *stream = stream_on(0);
    CHECK_EQ(ddl_group_stream(ddl_world(c), 1, stream), DDL_OK);
    CHECK_EQ(DRIVER(int (*)(void *, void (*)(void *), void *), "cuLaunchHostFunc")(stream, hold, &go), SUCCESS);
    CHECK_EQ(ddl_all_reduce(ddl_world(c), p.in, p.out, DDL_SUM), DDL_OK);
    ddl_tensor in = p.in;
    CHECK_EQ(ddl_tensor_free(c, &p.in), DDL_ERR_STATE);
    CHECK_STR(ddl_error(c), "an operation that is under way");
    CHECK_EQ(ddl_tensor_free(c, &p.out), DDL_ERR_STATE);
    CHECK(p.in.data == in.data && p.out.data != NULL);
    CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
    atomic_store(&go, true);
    CHECK_EQ(DRIVER(int (*)(void *), "cuStreamSynchronize")(stream), SUCCESS);
    CHECK_EQ(out_wrong(c, &p, (float)(n * (n + 1)) / 2), 0);
    CHECK_EQ(ddl_group_stream(ddl_world(c), 1, NULL), DDL_OK);
    pair_free(c, &p);
    coll_leave(c);
}

TEST(a_tensor_in_use_is_not_freed) {
    coll_job job;
    coll_job_make(&job);
    ranks_threads(2, freed_in_use, &job);
}

/* What the host has a part in cannot be captured: each rank is told, and the group goes on. What is captured is not done. */
static void captured(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    pair p;
    ddl_request *r = NULL;
    pair_make(c, rank, 1, &p);
    void *stream = stream_on(0);
    ddl_tensor host = ddl_tensor_1d(p.host, DDL_F32, COUNT), rows = p.in;
    rows.ndim = 2;
    rows.shape[0] = rows.shape[1] = rows.strides[0] = 128;
    rows.strides[0] = 256;
    rows.strides[1] = 1;
    CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
    CHECK_EQ(ddl_group_stream(ddl_world(c), 1, stream), DDL_OK);
    DRIVER(void (*)(void *, int), "standin_capture")(stream, 1);
    CHECK_EQ(ddl_group_stream(ddl_world(c), 1, stream), DDL_OK); /* also now */
    CHECK_EQ(ddl_all_reduce(ddl_world(c), p.in, host, DDL_SUM), DDL_ERR_UNSUPPORTED);
    CHECK_STR(ddl_error(c), "captured into a graph");
    CHECK_EQ(ddl_iall_reduce(ddl_world(c), rows, rows, DDL_SUM, &r), DDL_ERR_UNSUPPORTED);
    CHECK(r == NULL);
    CHECK_EQ(ddl_all_reduce_many(ddl_world(c), &p.in, 1, DDL_SUM), DDL_ERR_UNSUPPORTED);
    CHECK_EQ(ddl_recv(ddl_world(c), p.out, 1 - rank, 0, NULL), DDL_ERR_UNSUPPORTED);
    CHECK_STR(ddl_error(c), "captured into a graph");
    CHECK_EQ(ddl_all_reduce(ddl_world(c), p.in, p.out, DDL_SUM), DDL_OK);
    DRIVER(void (*)(void *, int), "standin_capture")(stream, 0); /* the graph is thrown away */
    CHECK_EQ(ddl_group_stream(ddl_world(c), 1, NULL), DDL_OK);
    CHECK_EQ(out_wrong(c, &p, -1), 0);
    CHECK_EQ(ddl_all_reduce(ddl_world(c), p.in, p.out, DDL_SUM), DDL_OK);
    CHECK_EQ(out_wrong(c, &p, (float)(n * (n + 1)) / 2), 0);
    pair_free(c, &p);
    coll_leave(c);
}

TEST(a_capture_takes_what_gpus_do_alone) {
    coll_job job;
    coll_job_make(&job);
    ranks_threads(2, captured, &job);
}

/* One rank captures and the other does not: both are told. */
static void captured_by_one(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    pair p;
    pair_make(c, rank, 1, &p);
    void *stream = stream_on(0);
    CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
    if (rank == 0) {
        CHECK_EQ(ddl_group_stream(ddl_world(c), 1, stream), DDL_OK);
        DRIVER(void (*)(void *, int), "standin_capture")(stream, 1);
    }
    CHECK_EQ(ddl_all_reduce(ddl_world(c), p.in, p.out, DDL_SUM), DDL_ERR_MISMATCH);
    if (rank == 0) {
        DRIVER(void (*)(void *, int), "standin_capture")(stream, 0);
    }
    CHECK_EQ(out_wrong(c, &p, -1), 0);
    pair_free(c, &p);
    coll_leave(c);
}

TEST(a_capture_by_one_rank_is_a_mismatch) {
    coll_job job;
    coll_job_make(&job);
    ranks_threads(2, captured_by_one, &job);
}

/* ---- GPUs that do not reach each other ---- */

/* Ranks on two GPUs: by the host where they are apart, and right in any case. apart: 0 they reach each other, 1 they
 * damage what goes between them, 2 the driver says no. */
typedef struct apart_job {
    coll_job job;
    int apart;
} apart_job;

static void on_two_gpus(int rank, int n, void *arg) {
    apart_job *a = arg;
    ddl_context *c = coll_join(rank, n, &a->job);
    REQUIRE(c != NULL);
    pair p;
    ddl_stats stats;
    uint64_t natives = 0;
    pair_make(c, rank, rank % 2 + 1, &p);
    for (int round = 0; round < 2; round++) {
        CHECK_EQ(ddl_all_reduce(ddl_world(c), p.in, p.out, DDL_SUM), DDL_OK);
        CHECK_EQ(out_wrong(c, &p, (float)(n * (n + 1)) / 2), 0);
    }
    CHECK_EQ(ddl_stats_get(c, &stats), DDL_OK);
    for (int i = 0; i < DDL_STATS_TRANSPORTS && stats.transports[i].name != NULL; i++) {
        natives += strcmp(stats.transports[i].name, "cuda") == 0 ? stats.transports[i].native_operations : 0;
    }
    CHECK_EQ(natives > 0, a->apart == 0);
    pair_free(c, &p);
    coll_leave(c);
}

static void apart(int how) {
    apart_job a = {.apart = how};
    coll_job_make(&a.job);
    DRIVER(void (*)(int), "standin_break_peers")(how == 1);
    DRIVER(void (*)(int), "standin_part_peers")(how == 2);
    ranks_threads(2, on_two_gpus, &a);
    ranks_threads(3, on_two_gpus, &a);
    DRIVER(void (*)(int), "standin_break_peers")(0);
    DRIVER(void (*)(int), "standin_part_peers")(0);
}

TEST(two_gpus_share) { apart(0); }
TEST(two_gpus_that_damage_go_by_the_host) { apart(1); }
TEST(two_gpus_that_are_apart_go_by_the_host) { apart(2); }

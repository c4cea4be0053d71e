/* Whole jobs over a stand-in for the driver (cuda_driver.c) whose GPUs reach their neighbours in a ring and no others: which
 * collectives the GPUs run, what they give, replays of graphs. Built and run by test_cuda_suite.py with STANDIN_RING. */
#define TEST_TIMEOUT_S 240
#include "coll.h"
#include "cuda_symbol.h"

enum { PART = 3001, PIECE = 4 << 20 };

static uint64_t natives(ddl_context *c) {
    ddl_stats stats;
    uint64_t n = 0;
    CHECK_EQ(ddl_stats_get(c, &stats), DDL_OK);
    for (int i = 0; i < DDL_STATS_TRANSPORTS && stats.transports[i].name != NULL; i++) {
        n += strcmp(stats.transports[i].name, "cuda") == 0 ? stats.transports[i].native_operations : 0;
    }
    return n;
}

/* A tensor on the GPU of the rank's number and what it holds, which is `(rank + 1) * (1 + i % 251)` at first. */
typedef struct tensor {
    ddl_tensor on_gpu;
    int32_t *host;
    int64_t count;
} tensor;

static int32_t value(int rank, int64_t i) { return (int32_t)((rank + 1) * (1 + i % 251)); }

static void fill(ddl_context *c, tensor *t, int rank, bool poison) {
    for (int64_t i = 0; i < t->count; i++) {
        t->host[i] = poison ? -7 : value(rank, i);
    }
    CHECK_EQ(ddl_tensor_copy(c, t->on_gpu, ddl_tensor_1d(t->host, DDL_I32, t->count)), DDL_OK);
}

static tensor make(ddl_context *c, int rank, int64_t count, bool poison) {
    tensor t = {.count = count, .host = malloc((size_t)count * sizeof(int32_t))};
    CHECK_EQ(ddl_tensor_alloc_on(c, rank % ddl_device_count(c) + 1, DDL_I32, 1, &count, &t.on_gpu), DDL_OK);
    fill(c, &t, rank, poison);
    return t;
}

static void drop(ddl_context *c, tensor *t) {
    CHECK_EQ(ddl_tensor_free(c, &t->on_gpu), DDL_OK);
    free(t->host);
}

static int64_t sum(int n, int64_t i) {
    int64_t s = 0;
    for (int r = 0; r < n; r++) {
        s += value(r, i);
    }
    return s;
}

/* What element i of the result is. */
static int64_t want(int kind, int rank, int n, int64_t i) {
    switch (kind) {
    case DDL_ALL_REDUCE: return sum(n, i);
    case DDL_REDUCE_SCATTER: return sum(n, (int64_t)rank * PART + i);
    case DDL_ALL_GATHER: return value((int)(i / PART), i % PART);
    case DDL_ALL_TO_ALL: return value((int)(i / PART), (int64_t)rank * PART + i % PART);
    default: return value(n - 1, i); /* a broadcast */
    }
}

static void check(ddl_context *c, tensor *t, int kind, int rank, int n) {
    int wrong = 0;
    memset(t->host, 0xee, (size_t)t->count * sizeof(int32_t));
    CHECK_EQ(ddl_tensor_copy(c, ddl_tensor_1d(t->host, DDL_I32, t->count), t->on_gpu), DDL_OK);
    for (int64_t i = 0; i < t->count; i++) {
        wrong += t->host[i] != want(kind, rank, n, i);
    }
    if (wrong > 0) {
        test__fail(__FILE__, __LINE__, "kind %d on rank %d of %d: %d elements are wrong", kind, rank, n, wrong);
    }
}

static ddl_status call(ddl_group *g, int kind, ddl_tensor in, ddl_tensor out, int n) {
    switch (kind) {
    case DDL_ALL_REDUCE: return ddl_all_reduce(g, in, out, DDL_SUM);
    case DDL_REDUCE_SCATTER: return ddl_reduce_scatter(g, in, out, DDL_SUM);
    case DDL_ALL_GATHER: return ddl_all_gather(g, in, out);
    case DDL_ALL_TO_ALL: return ddl_all_to_all(g, in, out);
    default: return ddl_broadcast(g, in, n - 1);
    }
}

static const int kinds[] = {DDL_ALL_REDUCE, DDL_REDUCE_SCATTER, DDL_ALL_GATHER, DDL_BROADCAST, DDL_ALL_TO_ALL};
static int64_t in_count(int kind, int n) {
    return kind == DDL_REDUCE_SCATTER || kind == DDL_ALL_TO_ALL ? PART * n : kind == DDL_ALL_REDUCE ? 20011
           : kind == DDL_BROADCAST ? 3 * PIECE / 4 + 5 : PART;
}
static int64_t out_count(int kind, int n) {
    return kind == DDL_ALL_GATHER || kind == DDL_ALL_TO_ALL ? PART * n : kind == DDL_ALL_REDUCE ? 20011 : PART;
}

/* Each kind, out of place and where that can be in place; the last, which a ring does not serve, by the host. */
static void each_kind(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    for (int k = 0; k < 5; k++) {
        uint64_t before = natives(c);
        tensor in = make(c, rank, in_count(kinds[k], n), false), out = make(c, rank, out_count(kinds[k], n), true);
        CHECK_EQ(call(ddl_world(c), kinds[k], in.on_gpu, out.on_gpu, n), DDL_OK);
        check(c, kinds[k] == DDL_BROADCAST ? &in : &out, kinds[k], rank, n);
        if (kinds[k] == DDL_ALL_REDUCE) {
            CHECK_EQ(call(ddl_world(c), kinds[k], in.on_gpu, in.on_gpu, n), DDL_OK);
            check(c, &in, kinds[k], rank, n);
        }
        CHECK_EQ(natives(c) > before, kinds[k] != DDL_ALL_TO_ALL);
        drop(c, &in);
        drop(c, &out);
    }
    coll_leave(c);
}

/* Captured once and replayed with other inputs. */
static void captured(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    int32_t gpu = rank % ddl_device_count(c) + 1;
    void *context = NULL, *stream = NULL, *graph = NULL, *exec = NULL;
    CHECK_EQ(DRIVER_CALL("cuDevicePrimaryCtxRetain", void **, int)(&context, gpu - 1), 0);
    CHECK_EQ(DRIVER_CALL("cuCtxPushCurrent_v2", void *)(context), 0);
    CHECK_EQ(DRIVER_CALL("cuStreamCreate", void **, unsigned)(&stream, 1), 0);
    tensor in[4], out[4];
    for (int k = 0; k < 4; k++) {
        in[k] = make(c, rank, in_count(kinds[k], n), true);
        out[k] = make(c, rank, out_count(kinds[k], n), true);
    }
    CHECK_EQ(ddl_group_stream(ddl_world(c), gpu, stream), DDL_OK);
    CHECK_EQ(DRIVER_CALL("cuStreamBeginCapture_v2", void *, int)(stream, 2), 0);
    for (int k = 0; k < 4; k++) {
        CHECK_EQ(call(ddl_world(c), kinds[k], in[k].on_gpu, out[k].on_gpu, n), DDL_OK);
    }
    CHECK_EQ(DRIVER_CALL("cuStreamEndCapture", void *, void **)(stream, &graph), 0);
    CHECK_EQ(ddl_group_stream(ddl_world(c), gpu, NULL), DDL_OK);
    REQUIRE(DRIVER_CALL("cuGraphInstantiateWithFlags", void **, void *, unsigned long long)(&exec, graph, 0) == 0);
    for (int turn = 0; turn < 3; turn++) {
        for (int k = 0; k < 4; k++) {
            fill(c, &in[k], rank, false);
            fill(c, &out[k], rank, true);
        }
        CHECK_EQ(DRIVER_CALL("cuGraphLaunch", void *, void *)(exec, stream), 0);
        CHECK_EQ(DRIVER_CALL("cuStreamSynchronize", void *)(stream), 0);
        for (int k = 0; k < 4; k++) {
            check(c, kinds[k] == DDL_BROADCAST ? &in[k] : &out[k], kinds[k], rank, n);
        }
    }
    CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
    CHECK_EQ(DRIVER_CALL("cuGraphExecDestroy", void *)(exec), 0);
    CHECK_EQ(DRIVER_CALL("cuGraphDestroy", void *)(graph), 0);
    for (int k = 0; k < 4; k++) {
        drop(c, &in[k]);
        drop(c, &out[k]);
    }
    CHECK_EQ(DRIVER_CALL("cuStreamDestroy_v2", void *)(stream), 0);
    coll_leave(c);
}

static void with(ranks_fn fn, int n, bool threads) {
    coll_job job;
    coll_job_make(&job);
    if (threads) {
        ranks_threads(n, fn, &job);
    } else {
        ranks_fork(n, fn, &job, 200);
    }
}

TEST(processes_go_around_a_ring) { with(each_kind, 4, false); }
TEST(processes_replay_graphs_around_a_ring) { with(captured, 4, false); }
TEST(two_ranks_to_a_gpu_go_around_a_ring) { with(each_kind, 8, true); } /* threads last: this process opens the driver */
TEST(threads_replay_graphs_around_a_ring) { with(captured, 4, true); }

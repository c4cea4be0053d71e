/* gpu_suite: ddl on GPUs, with the plugin that `make` built and the driver of this machine; tests/gpu runs it. Ranks are
 * processes first and threads then, all on the GPUs that there are, several on one where there are fewer. Collectives and
 * messages of every kind, type and op with tensors on GPUs and on the host against an oracle of plain loops; memory that is
 * freed and comes back at the same address; a rank that is killed. GPU_SUITE_CASES=n: cases of each kind (20).
 *
 * Over the stand-in for the driver (LD_LIBRARY_PATH) it shows that the suite and the plugin fit each other, no more. */
#define TEST_TIMEOUT_S 240
#include "coll.h"
#include "cuda_symbol.h"

#include <sys/wait.h>

static int cases_of_each_kind(void) {
    const char *s = getenv("GPU_SUITE_CASES");
    return s != NULL ? atoi(s) : 20;
}

/* Numbers of the GPUs are 1 and so on; a rank begins with its own. */
static int32_t gpu_of(ddl_context *c, int rank, unsigned draw) {
    int32_t count = ddl_device_count(c);
    return count > 0 ? (int32_t)(((unsigned)rank + draw) % (unsigned)count) + 1 : DDL_HOST;
}

static ddl_context *join(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    if (c != NULL && ddl_device_count(c) == 0) {
        test__fail(__FILE__, __LINE__, "there is no GPU");
        coll_leave(c);
        c = NULL;
    }
    return c;
}

static void each_way(ranks_fn fn, int threads) {
    for (int n = 2; n <= 4; n += 2) {
        coll_job job;
        coll_job_make(&job);
        if (threads) {
            ranks_threads(n, fn, &job);
        } else {
            ranks_fork(n, fn, &job, 200);
        }
    }
}

/* ---- which GPUs ---- */

static void list(int rank, int n, void *arg) {
    ddl_context *c = join(rank, n, arg);
    REQUIRE(c != NULL);
    for (int32_t i = 1; i <= ddl_device_count(c); i++) {
        ddl_device_info info;
        CHECK_EQ(ddl_device_info_get(c, i, &info), DDL_OK);
        printf("     device %d: plugin %s, GPU %d\n", i, info.plugin, info.index);
        CHECK_STR(info.plugin, "cuda");
    }
    coll_leave(c);
}

TEST(gpus_are_found) {
    coll_job job;
    coll_job_make(&job);
    ranks_fork(1, list, &job, 60);
}

/* ---- collectives ---- */

static void every_kind(int rank, int n, void *arg) {
    static const int64_t sizes[] = {0, 1, 7, 300, 4099, 65537, 1 << 20};
    ddl_context *c = join(rank, n, arg);
    REQUIRE(c != NULL);
    ddl_group *g = ddl_world(c);
    unsigned random = coll_seed() * 31 + (unsigned)n;
    bool ok = true;
    for (int kind = DDL_BROADCAST; ok && kind < DDL_GATHERV; kind++) {
        for (int i = 0; ok && i < cases_of_each_kind(); i++) {
            unsigned draw = coll_random(&random), more = coll_random(&random);
            coll_case k = {.kind = (ddl_kind)kind,
                           .dtype = draw % 3 == 0   ? DDL_F32
                                    : draw % 3 == 1 ? DDL_BF16
                                                    : DDL_I64,
                           .op = coll_reduces((ddl_kind)kind) ? DDL_SUM : DDL_OP_NONE,
                           .root = coll_rooted((ddl_kind)kind) ? (int)(draw / 4 % (unsigned)n) : 0,
                           .count = sizes[draw / 16 % (cases_of_each_kind() < 20 ? 6 : 7)],
                           .way = (coll_way)(draw / 512 % 3),
                           .in_place = draw / 128 % 2 == 0 && kind != DDL_BARRIER,
                           .salt = more / 16 % 50};
            bool mixed = !k.in_place && !coll_rooted(k.kind); /* each rank passes one on a GPU, or all go by the host */
            k.in_device = mixed && more % 5 == 0 ? DDL_HOST : gpu_of(c, rank, more / 8 % 3);
            k.out_device = mixed && more % 5 == 1 ? DDL_HOST : gpu_of(c, rank, more / 64 % 2);
            k.in_device = k.in_place ? k.out_device : k.in_device;
            ok = coll_check(g, &k);
        }
    }
    coll_leave(c);
}

TEST(collectives_of_processes) { each_way(every_kind, 0); }

static bool makes_sense(ddl_dtype dtype, int op) {
    bool pair_op = op == DDL_MIN_INDEX || op == DDL_MAX_INDEX;
    return coll_is_pair(dtype) || pair_op ? coll_is_pair(dtype) && pair_op
           : op == DDL_AVG                ? dtype != DDL_BOOL
                                          : op <= DDL_MAX || !coll_is_float(dtype);
}

static void every_type_and_op(int rank, int n, void *arg) {
    ddl_context *c = join(rank, n, arg);
    REQUIRE(c != NULL);
    bool ok = true;
    for (int d = DDL_F16; ok && d <= DDL_E5M2; d++) {
        for (int op = DDL_SUM; ok && op <= DDL_MAX_INDEX; op++) {
            for (int i = 0; ok && i < 2 && makes_sense((ddl_dtype)d, op); i++) {
                int32_t gpu = gpu_of(c, rank, 0);
                coll_case k = {.kind = i == 0 ? DDL_ALL_REDUCE : DDL_REDUCE_SCATTER,
                               .dtype = (ddl_dtype)d,
                               .op = op,
                               .count = 1001,
                               .salt = 3 + op,
                               .in_place = op % 2 == 0 && i == 0,
                               .in_device = gpu,
                               .out_device = gpu};
                ok = coll_check(ddl_world(c), &k);
            }
        }
    }
    coll_leave(c);
}

TEST(types_and_ops_of_processes) { each_way(every_type_and_op, 0); }

/* ---- messages ---- */

static void ring(int rank, int n, void *arg) {
    static const int64_t sizes[] = {1, 63, 65537, 3000001};
    ddl_context *c = join(rank, n, arg);
    REQUIRE(c != NULL);
    for (int i = 0; i < 8; i++) {
        int64_t count = sizes[i % 4], wrong = 0;
        int32_t from = i < 4 ? gpu_of(c, rank, 0) : rank % 2 == 0 ? DDL_HOST : gpu_of(c, rank, 0);
        unsigned char *data = (unsigned char *)malloc((size_t)count);
        ddl_tensor out = {0}, in = {0}, host = ddl_tensor_1d(data, DDL_U8, count);
        ddl_request *sent = NULL, *got = NULL;
        REQUIRE(ddl_tensor_alloc_on(c, from, DDL_U8, 1, &count, &out) == DDL_OK);
        REQUIRE(ddl_tensor_alloc_on(c, gpu_of(c, rank, 1), DDL_U8, 1, &count, &in) == DDL_OK);
        for (int64_t j = 0; j < count; j++) {
            data[j] = (unsigned char)(j * 7 + j / 251 + rank * 13 + i);
        }
        CHECK_EQ(ddl_tensor_copy(c, out, host), DDL_OK);
        CHECK_EQ(ddl_irecv(ddl_world(c), in, (rank + n - 1) % n, i, &got), DDL_OK);
        CHECK_EQ(ddl_isend(ddl_world(c), out, (rank + 1) % n, i, &sent), DDL_OK);
        CHECK_EQ(ddl_wait(&got, NULL), DDL_OK);
        CHECK_EQ(ddl_wait(&sent, NULL), DDL_OK);
        memset(data, 0xEE, (size_t)count);
        CHECK_EQ(ddl_tensor_copy(c, host, in), DDL_OK);
        for (int64_t j = 0; j < count; j++) {
            wrong += data[j] != (unsigned char)(j * 7 + j / 251 + (rank + n - 1) % n * 13 + i);
        }
        CHECK_EQ(wrong, 0);
        CHECK_EQ(ddl_tensor_free(c, &out), DDL_OK);
        CHECK_EQ(ddl_tensor_free(c, &in), DDL_OK);
        free(data);
    }
    coll_leave(c);
}

TEST(messages_of_processes) { each_way(ring, 0); }

static uint64_t by_host(ddl_context *c) {
    ddl_stats s;
    CHECK_EQ(ddl_stats_get(c, &s), DDL_OK);
    return s.device_bytes_in + s.device_bytes_out;
}

/* Every form of a message between tensors on the first GPU: none passes the host's memory. Then one too large for its
 * buffer, one that its sender gives up, and what was freed and comes back at the same address. */
static void copied(int rank, int n, void *arg) {
    ddl_context *c = join(rank, n, arg);
    REQUIRE(c != NULL);
    ddl_group *w = ddl_world(c);
    int32_t *host = (int32_t *)malloc(4000004);
    int64_t count = 1000001;
    int to = (rank + 1) % n, from = (rank + n - 1) % n;
    for (int turn = 0; turn < 8; turn++) {
        ddl_tensor out = {0}, in = {0}, view = ddl_tensor_1d(host, DDL_I32, count);
        ddl_transfer both[2];
        ddl_request *r[2] = {NULL, NULL};
        int64_t wrong = 0;
        REQUIRE(ddl_tensor_alloc_on(c, 1, DDL_I32, 1, &count, &out) == DDL_OK);
        REQUIRE(ddl_tensor_alloc_on(c, 1, DDL_I32, 1, &count, &in) == DDL_OK);
        for (int64_t j = 0; j < count; j++) {
            host[j] = (int32_t)(j * 3 + rank * 1000 + turn);
        }
        CHECK_EQ(ddl_tensor_copy(c, out, view), DDL_OK);
        uint64_t before = by_host(c);
        if (turn % 4 == 0) {
            CHECK_EQ(ddl_send_recv(w, out, to, turn, in, from, turn, NULL), DDL_OK);
        } else if (turn % 4 == 1) {
            both[0] = (ddl_transfer){1, out, to, turn};
            both[1] = (ddl_transfer){0, in, from, turn};
            CHECK_EQ(ddl_batch(w, both, 2, r), DDL_OK);
            CHECK_EQ(ddl_wait_all(r, 2, NULL), DDL_OK);
        } else {
            ddl_tensor small = in;
            small.shape[0] = turn % 4 == 2 ? count : count / 2;
            CHECK_EQ(ddl_isend(w, out, to, turn, &r[0]), DDL_OK);
            CHECK_EQ(ddl_barrier(w), DDL_OK);
            CHECK_EQ(ddl_recv(w, small, DDL_ANY_SOURCE, turn, NULL), turn % 4 == 2 ? DDL_OK : DDL_ERR_TRUNCATED);
            CHECK_EQ(turn % 4 == 2 ? DDL_OK : ddl_recv(w, in, from, turn, NULL), DDL_OK);
            CHECK_EQ(ddl_wait(&r[0], NULL), DDL_OK);
        }
        CHECK_EQ(by_host(c) - before, 0);
        memset(host, 0xEE, 4000004);
        CHECK_EQ(ddl_tensor_copy(c, view, in), DDL_OK);
        for (int64_t j = 0; j < count; j++) {
            wrong += host[j] != (int32_t)(j * 3 + from * 1000 + turn);
        }
        CHECK_EQ(wrong, 0);
        CHECK_EQ(ddl_barrier(w), DDL_OK);
        CHECK_EQ(ddl_tensor_free(c, &out), DDL_OK);
        CHECK_EQ(ddl_tensor_free(c, &in), DDL_OK);
    }
    ddl_tensor t = {0};
    ddl_group *hasty = NULL;
    REQUIRE(ddl_tensor_alloc_on(c, 1, DDL_I32, 1, &count, &t) == DDL_OK);
    CHECK_EQ(ddl_group_duplicate(w, &hasty), DDL_OK);
    if (rank == 0) {
        CHECK_EQ(ddl_group_set(hasty, &(ddl_group_options){.timeout_ms = 200}), DDL_OK);
        CHECK_EQ(ddl_send(hasty, t, 1, 0), DDL_ERR_TIMEOUT);
    }
    CHECK_EQ(ddl_barrier(w), DDL_OK);
    CHECK_EQ(rank == 1 ? ddl_recv(hasty, t, 0, 0, NULL) : DDL_ERR_CANCELLED, DDL_ERR_CANCELLED);
    CHECK_EQ(ddl_barrier(w), DDL_OK);
    CHECK_EQ(ddl_group_free(&hasty), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    free(host);
    coll_leave(c);
}

TEST(messages_are_copied_by_processes) { each_way(copied, 0); }

/* ---- hosts: two that are one, by what the ranks say ---- */

/* GPUs reduce inside, the network is between: each rank's part alone passes the host's memory. */
static void on_two_hosts(int rank, int n, void *arg) {
    char address[INET_ADDRSTRLEN];
    CHECK(ranks_own_address(address));
    setenv("MASTER_ADDR", address, 1);
    setenv("DDL_HOST_ID", rank < n / 2 ? "one" : "other", 1);
    ddl_context *c = join(rank, n, arg);
    REQUIRE(c != NULL);
    for (int i = 0; i < 6; i++) {
        coll_case k = {.kind = DDL_ALL_REDUCE, .dtype = i % 2 == 0 ? DDL_F32 : DDL_BF16, .op = i < 3 ? DDL_SUM : DDL_AVG,
                       .count = i == 5 ? 3000017 : 100003, .way = (coll_way)(i % 3), .in_place = i % 2 == 1, .salt = i,
                       .in_device = 1, .out_device = 1};
        CHECK(coll_check(ddl_world(c), &k));
    }
    ddl_tensor t = {0};
    int64_t count = 1 << 20;
    REQUIRE(ddl_tensor_alloc_on(c, 1, DDL_F32, 1, &count, &t) == DDL_OK);
    CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
    uint64_t before = by_host(c);
    CHECK_EQ(ddl_all_reduce(ddl_world(c), t, t, DDL_SUM), DDL_OK);
    CHECK_EQ(by_host(c) - before, 2 * 4 * (uint64_t)count / (uint64_t)(n / 2));
    before = by_host(c); /* a message between them: in chunks, by both */
    CHECK_EQ(rank % 2 == 0 ? DDL_OK : rank < n / 2 ? ddl_send(ddl_world(c), t, n - 1, 0)
                                                   : ddl_recv(ddl_world(c), t, n / 2 - 1, 0, NULL), DDL_OK);
    CHECK_EQ(by_host(c) - before, rank % 2 == 0 ? 0 : 4 * count);
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    coll_leave(c);
}

TEST(between_hosts) {
    char address[INET_ADDRSTRLEN];
    coll_job job;
    if (!ranks_own_address(address)) {
        SKIP("this machine has no network but loopback");
    }
    coll_job_make(&job);
    ranks_fork(4, on_two_hosts, &job, 100);
}

/* ---- memory that comes back ---- */

static void sum_once(ddl_context *c, int rank, int n, int turn, int64_t count) {
    ddl_tensor t = {0};
    int64_t wrong = 0;
    int32_t *host = (int32_t *)calloc((size_t)count, 4);
    ddl_tensor view = ddl_tensor_1d(host, DDL_I32, count);
    REQUIRE(ddl_tensor_alloc_on(c, gpu_of(c, rank, 0), DDL_I32, 1, &count, &t) == DDL_OK);
    for (int64_t j = 0; j < count; j++) {
        host[j] = (int32_t)(j + turn * 1000 + rank);
    }
    CHECK_EQ(ddl_tensor_copy(c, t, view), DDL_OK);
    CHECK_EQ(ddl_all_reduce(ddl_world(c), t, t, DDL_SUM), DDL_OK);
    CHECK_EQ(ddl_tensor_copy(c, view, t), DDL_OK);
    for (int64_t j = 0; j < count; j++) {
        wrong += host[j] != (int32_t)(n * (j + turn * 1000) + n * (n - 1) / 2);
    }
    CHECK_EQ(wrong, 0);
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    free(host);
}

static void allocate_anew(int rank, int n, void *arg) {
    static const int64_t sizes[] = {100000, 700000, 20, 100000, 5000000};
    ddl_context *c = join(rank, n, arg);
    REQUIRE(c != NULL);
    for (int turn = 0; turn < 20; turn++) {
        sum_once(c, rank, n, turn, sizes[turn % (cases_of_each_kind() < 20 ? 4 : 5)]);
    }
    coll_leave(c);
}

TEST(freed_and_reused_by_processes) { each_way(allocate_anew, 0); }

/* ---- a rank that is killed ---- */

static void until_killed(int rank, int n, void *arg) {
    ddl_context *c = join(rank, n, arg);
    REQUIRE(c != NULL);
    int64_t count = 300000;
    ddl_tensor t = {0};
    REQUIRE(ddl_tensor_alloc_on(c, gpu_of(c, rank, 0), DDL_F32, 1, &count, &t) == DDL_OK);
    ddl_status status = DDL_OK;
    for (int i = 0; status == DDL_OK && i < 10000; i++) {
        if (rank == 1 && i == 7) {
            raise(SIGKILL);
        }
        status = ddl_all_reduce(ddl_world(c), t, t, DDL_MAX);
    }
    CHECK_EQ(status, DDL_ERR_PEER);
    CHECK_STR(ddl_error(c), "rank 1");
    ddl_group *left = NULL;
    CHECK_EQ(ddl_group_shrink(ddl_world(c), &left), DDL_OK); /* and those that are left go on */
    for (int i = 0; left != NULL && i < 5; i++) {
        CHECK_EQ(ddl_all_reduce(left, t, t, DDL_MAX), DDL_OK);
    }
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    CHECK_EQ(left != NULL ? ddl_group_free(&left) : DDL_OK, DDL_OK);
    coll_leave(c);
}

TEST(a_killed_rank_is_told) {
    coll_job job;
    ranks r;
    coll_job_make(&job);
    ranks_start(&r, 4, until_killed, &job);
    ranks_wait(&r, 100);
    CHECK_EQ(r.timed_out, 0);
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(i == 1 ? WIFSIGNALED(r.status[i]) && WTERMSIG(r.status[i]) == SIGKILL : r.status[i] == 0, 1);
    }
}

/* ---- graphs ---- */

enum { GRAPH_COUNT = 20011, GRAPH_OPS = 7, GRAPH_REPLAYS = 4 };

/* What is captured: each collective with an input and an output of its own. */
typedef struct graph_op {
    ddl_kind kind;
    int64_t in, out; /* elements; negative: that many for each rank */
    bool in_place;
} graph_op;
static const graph_op graph_ops[GRAPH_OPS] = {
    {DDL_ALL_REDUCE, 1001, 1001, false},       {DDL_ALL_REDUCE, GRAPH_COUNT, GRAPH_COUNT, true},
    {DDL_REDUCE_SCATTER, -3001, 3001, false},  {DDL_ALL_GATHER, 3001, -3001, false},
    {DDL_BROADCAST, GRAPH_COUNT, 0, true},     {DDL_REDUCE, GRAPH_COUNT, GRAPH_COUNT, false},
    {DDL_ALL_TO_ALL, -777, -777, false}};

static int64_t graph_size(int64_t count, int n) { return count < 0 ? -count * n : count; }

static int32_t graph_input(int rank, int turn, int op, int64_t i) {
    return (int32_t)(i % 1013 * 3 + rank * 7919 + turn * 104729 + op * 31);
}

static int32_t graph_sum(int n, int turn, int op, int64_t i) {
    int32_t sum = 0;
    for (int r = 0; r < n; r++) {
        sum += graph_input(r, turn, op, i);
    }
    return sum;
}

/* Element i of the result of operation k on `rank`. */
static int32_t graph_want(int rank, int n, int turn, int k, int64_t i) {
    int64_t part = k == 2 ? 3001 : k == 3 ? 3001 : 777;
    switch (graph_ops[k].kind) {
    case DDL_REDUCE_SCATTER: return graph_sum(n, turn, k, rank * part + i);
    case DDL_ALL_GATHER: return graph_input((int)(i / part), turn, k, i % part);
    case DDL_BROADCAST: return graph_input(n - 1, turn, k, i);
    case DDL_ALL_TO_ALL: return graph_input((int)(i / part), turn, k, rank * part + i % part);
    default: return graph_sum(n, turn, k, i);
    }
}

static ddl_status graph_call(ddl_group *g, int k, ddl_tensor in, ddl_tensor out, int n) {
    ddl_request *r = NULL;
    switch (graph_ops[k].kind) {
    case DDL_ALL_REDUCE:
        if (k == 0) {
            ddl_status status = ddl_iall_reduce(g, in, out, DDL_SUM, &r);
            return status == DDL_OK ? ddl_stream_wait(&r) : status;
        }
        return ddl_all_reduce(g, in, out, DDL_SUM);
    case DDL_REDUCE_SCATTER: return ddl_reduce_scatter(g, in, out, DDL_SUM);
    case DDL_ALL_GATHER: return ddl_all_gather(g, in, out);
    case DDL_BROADCAST: return ddl_broadcast(g, in, n - 1);
    case DDL_REDUCE: return ddl_reduce(g, in, out, DDL_SUM, 0);
    default: return ddl_all_to_all(g, in, out);
    }
}

/* One replay: new inputs, the graph, and what has come. */
static void graph_turn(ddl_context *c, int rank, int n, int turn, void *exec, void *stream, ddl_tensor *in,
                       ddl_tensor *out, int32_t *host) {
    if (rank == turn % n) {
        usleep(30000); /* the others' graphs are there before this one's input */
    }
    for (int k = 0; k < GRAPH_OPS; k++) {
        int64_t count = ddl_tensor_count(&in[k]);
        for (int64_t i = 0; i < count; i++) {
            host[i] = graph_input(rank, turn, k, i);
        }
        CHECK_EQ(ddl_tensor_copy(c, in[k], ddl_tensor_1d(host, DDL_I32, count)), DDL_OK);
    }
    CHECK_EQ(DRIVER_CALL("cuGraphLaunch", void *, void *)(exec, stream), 0);
    CHECK_EQ(DRIVER_CALL("cuStreamSynchronize", void *)(stream), 0);
    for (int k = 0; k < GRAPH_OPS; k++) {
        ddl_tensor got = graph_ops[k].in_place ? in[k] : out[k];
        int64_t count = ddl_tensor_count(&got), wrong = 0;
        memset(host, 0xEE, (size_t)count * 4);
        CHECK_EQ(ddl_tensor_copy(c, ddl_tensor_1d(host, DDL_I32, count), got), DDL_OK);
        for (int64_t i = 0; i < count && (graph_ops[k].kind != DDL_REDUCE || rank == 0); i++) {
            wrong += host[i] != graph_want(rank, n, turn, k, i);
        }
        CHECK_EQ(wrong, 0);
    }
}

/* Captures all kinds once, and replays them with other inputs each time; an operation that runs at once comes between. */
static void graph_rank(int rank, int n, void *arg, int mode) {
    ddl_context *c = join(rank, n, arg);
    REQUIRE(c != NULL);
    ddl_group *g = ddl_world(c);
    int32_t gpu = gpu_of(c, rank, 0), *host = (int32_t *)calloc(GRAPH_COUNT, 4);
    ddl_tensor in[GRAPH_OPS], out[GRAPH_OPS];
    void *context = NULL, *stream = NULL, *graph = NULL, *exec = NULL;
    for (int k = 0; k < GRAPH_OPS; k++) {
        int64_t counts[2] = {graph_size(graph_ops[k].in, n), graph_size(graph_ops[k].out, n)};
        memset(&out[k], 0, sizeof out[k]);
        REQUIRE(ddl_tensor_alloc_on(c, gpu, DDL_I32, 1, &counts[0], &in[k]) == DDL_OK);
        REQUIRE(graph_ops[k].in_place || ddl_tensor_alloc_on(c, gpu, DDL_I32, 1, &counts[1], &out[k]) == DDL_OK);
        out[k] = graph_ops[k].in_place ? in[k] : out[k];
    }
    CHECK_EQ(DRIVER_CALL("cuDevicePrimaryCtxRetain", void **, int)(&context, gpu - 1), 0);
    CHECK_EQ(DRIVER_CALL("cuCtxPushCurrent_v2", void *)(context), 0);
    CHECK_EQ(DRIVER_CALL("cuStreamCreate", void **, unsigned)(&stream, 1), 0);
    CHECK_EQ(ddl_group_stream(g, gpu, stream), DDL_OK);
    CHECK_EQ(DRIVER_CALL("cuStreamBeginCapture_v2", void *, int)(stream, mode), 0);
    for (int k = 0; k < GRAPH_OPS; k++) {
        CHECK_EQ(graph_call(g, k, in[k], out[k], n), DDL_OK);
    }
    CHECK_EQ(ddl_send(g, in[0], (rank + 1) % n, 5), DDL_ERR_UNSUPPORTED); /* the host carries it */
    CHECK_STR(ddl_error(c), "captured into a graph");
    CHECK_EQ(DRIVER_CALL("cuStreamEndCapture", void *, void **)(stream, &graph), 0);
    CHECK_EQ(ddl_group_stream(g, gpu, NULL), DDL_OK);
    REQUIRE(DRIVER_CALL("cuGraphInstantiateWithFlags", void **, void *, unsigned long long)(&exec, graph, 0) == 0);
    for (int turn = 0; turn < GRAPH_REPLAYS; turn++) {
        graph_turn(c, rank, n, turn, exec, stream, in, out, host);
        if (turn == 1) {
            sum_once(c, rank, n, turn, 3000);
        }
    }
    CHECK_EQ(ddl_barrier(g), DDL_OK);
    CHECK_EQ(DRIVER_CALL("cuGraphExecDestroy", void *)(exec), 0);
    CHECK_EQ(DRIVER_CALL("cuGraphDestroy", void *)(graph), 0);
    CHECK_EQ(DRIVER_CALL("cuStreamDestroy_v2", void *)(stream), 0);
    for (int k = 0; k < GRAPH_OPS; k++) {
        CHECK_EQ(ddl_tensor_free(c, &in[k]), DDL_OK);
        CHECK_EQ(graph_ops[k].in_place ? DDL_OK : ddl_tensor_free(c, &out[k]), DDL_OK);
    }
    free(host);
    coll_leave(c);
}

static void graph_strict(int rank, int n, void *arg) { graph_rank(rank, n, arg, 0); }  /* the mode GLOBAL */
static void graph_relaxed(int rank, int n, void *arg) { graph_rank(rank, n, arg, 2); } /* as threads are in each other's way */

TEST(graphs_of_processes) { each_way(graph_strict, 0); }

/* A rank that is gone holds up no graph: the others' replays end, and the group says who it was. */
static void graph_until_killed(int rank, int n, void *arg) {
    ddl_context *c = join(rank, n, arg);
    REQUIRE(c != NULL);
    int64_t count = 5000;
    int32_t gpu = gpu_of(c, rank, 0);
    ddl_tensor t = {0};
    void *context = NULL, *stream = NULL, *graph = NULL, *exec = NULL;
    REQUIRE(ddl_tensor_alloc_on(c, gpu, DDL_I32, 1, &count, &t) == DDL_OK);
    CHECK_EQ(DRIVER_CALL("cuDevicePrimaryCtxRetain", void **, int)(&context, gpu - 1), 0);
    CHECK_EQ(DRIVER_CALL("cuCtxPushCurrent_v2", void *)(context), 0);
    CHECK_EQ(DRIVER_CALL("cuStreamCreate", void **, unsigned)(&stream, 1), 0);
    CHECK_EQ(ddl_group_stream(ddl_world(c), gpu, stream), DDL_OK);
    CHECK_EQ(DRIVER_CALL("cuStreamBeginCapture_v2", void *, int)(stream, 0), 0);
    CHECK_EQ(ddl_all_reduce(ddl_world(c), t, t, DDL_SUM), DDL_OK);
    CHECK_EQ(DRIVER_CALL("cuStreamEndCapture", void *, void **)(stream, &graph), 0);
    REQUIRE(DRIVER_CALL("cuGraphInstantiateWithFlags", void **, void *, unsigned long long)(&exec, graph, 0) == 0);
    CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK); /* all have captured */
    if (rank == 1) {
        raise(SIGKILL);
    }
    for (int turn = 0; turn < 3; turn++) {
        CHECK_EQ(DRIVER_CALL("cuGraphLaunch", void *, void *)(exec, stream), 0);
    }
    CHECK_EQ(DRIVER_CALL("cuStreamSynchronize", void *)(stream), 0);
    CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_ERR_PEER);
    CHECK_STR(ddl_error(c), "rank 1");
    CHECK_EQ(DRIVER_CALL("cuGraphExecDestroy", void *)(exec), 0);
    CHECK_EQ(DRIVER_CALL("cuGraphDestroy", void *)(graph), 0);
    CHECK_EQ(ddl_group_stream(ddl_world(c), gpu, NULL), DDL_OK);
    CHECK_EQ(DRIVER_CALL("cuStreamDestroy_v2", void *)(stream), 0);
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    coll_leave(c);
}

TEST(a_graph_of_a_killed_rank_ends) {
    coll_job job;
    ranks r;
    coll_job_make(&job);
    ranks_start(&r, 3, graph_until_killed, &job);
    ranks_wait(&r, 100);
    CHECK_EQ(r.timed_out, 0);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(i == 1 ? WIFSIGNALED(r.status[i]) && WTERMSIG(r.status[i]) == SIGKILL : r.status[i] == 0, 1);
    }
}

/* ---- streams ---- */

enum { LINE = 50021, LINES = 2 }; /* elements of a tensor; groups, each on a stream of its own */

/* Tensors of a group: what goes in, what comes out, what a neighbour sends, and what later work on the stream sees of both. */
typedef struct line {
    ddl_group *group;
    void *stream;
    ddl_tensor in, sum, message, seen[2];
} line;

static void doze(void *user) {
    (void)user;
    usleep(20000);
}

static void on_stream(uint64_t to, ddl_tensor from, void *stream) {
    CHECK_EQ(DRIVER_CALL("cuMemcpyAsync", uint64_t, uint64_t, size_t, void *)(to, (uint64_t)(uintptr_t)from.data, LINE * 4, stream), 0);
}

static int32_t line_input(int rank, int turn, int which, int64_t i) {
    return (int32_t)(i % 997 + rank * 1000 + turn * 50000 + which * 7);
}

/* Puts a turn on the stream: the sum, the message, and what reads them there; nobody waits on the host. */
static void line_put(line *l, int rank, int n) {
    ddl_tensor all[3] = {l->sum, l->message, l->seen[0]};
    ddl_request *sent = NULL;
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(DRIVER_CALL("cuMemsetD8Async", uint64_t, unsigned char, size_t, void *)(
                     (uint64_t)(uintptr_t)all[i].data, 0xEE, LINE * 4, l->stream), 0);
    }
    CHECK_EQ(ddl_all_reduce(l->group, l->in, l->sum, DDL_SUM), DDL_OK);
    CHECK_EQ(ddl_isend(l->group, l->in, (rank + 1) % n, 0, &sent), DDL_OK);
    CHECK_EQ(ddl_recv(l->group, l->message, (rank + n - 1) % n, 0, NULL), DDL_OK);
    CHECK_EQ(ddl_stream_wait(&sent), DDL_OK);
    on_stream((uint64_t)(uintptr_t)l->seen[0].data, l->sum, l->stream);
    on_stream((uint64_t)(uintptr_t)l->seen[1].data, l->message, l->stream);
}

static void line_check(ddl_context *c, const line *l, int rank, int n, int turn, int which, int32_t *host) {
    for (int k = 0; k < 2; k++) {
        int64_t wrong = 0;
        memset(host, 0xEE, LINE * 4);
        CHECK_EQ(ddl_tensor_copy(c, ddl_tensor_1d(host, DDL_I32, LINE), l->seen[k]), DDL_OK);
        for (int64_t i = 0; i < LINE; i++) {
            int32_t want = k == 0 ? 0 : line_input((rank + n - 1) % n, turn, which, i);
            for (int r = 0; k == 0 && r < n; r++) {
                want += line_input(r, turn, which, i);
            }
            wrong += host[i] != want;
        }
        CHECK_EQ(wrong, 0);
    }
}

/* Two groups on two streams at once, begun in another order by each second rank; one rank's streams come to it late. */
static void streams(int rank, int n, void *arg) {
    ddl_context *c = join(rank, n, arg);
    REQUIRE(c != NULL);
    int32_t gpu = gpu_of(c, rank, 0), *host = (int32_t *)malloc(LINE * 4);
    int64_t count = LINE;
    line lines[LINES] = {{.group = ddl_world(c)}, {.group = NULL}};
    void *context = NULL;
    CHECK_EQ(ddl_group_duplicate(ddl_world(c), &lines[1].group), DDL_OK);
    CHECK_EQ(DRIVER_CALL("cuDevicePrimaryCtxRetain", void **, int)(&context, gpu - 1), 0);
    CHECK_EQ(DRIVER_CALL("cuCtxPushCurrent_v2", void *)(context), 0);
    for (int k = 0; k < LINES; k++) {
        ddl_tensor *all[] = {&lines[k].in, &lines[k].sum, &lines[k].message, &lines[k].seen[0], &lines[k].seen[1]};
        for (int i = 0; i < 5; i++) {
            REQUIRE(ddl_tensor_alloc_on(c, gpu, DDL_I32, 1, &count, all[i]) == DDL_OK);
        }
        CHECK_EQ(DRIVER_CALL("cuStreamCreate", void **, unsigned)(&lines[k].stream, 1), 0);
        CHECK_EQ(ddl_group_stream(lines[k].group, gpu, lines[k].stream), DDL_OK);
    }
    for (int turn = 0; turn < 6; turn++) {
        for (int k = 0; k < LINES; k++) {
            for (int64_t i = 0; i < LINE; i++) {
                host[i] = line_input(rank, turn, k, i);
            }
            CHECK_EQ(ddl_tensor_copy(c, lines[k].in, ddl_tensor_1d(host, DDL_I32, LINE)), DDL_OK);
        }
        for (int k = 0; k < LINES; k++) {
            line *l = &lines[(k + rank) % LINES];
            if (rank == turn % n) {
                CHECK_EQ(DRIVER_CALL("cuLaunchHostFunc", void *, void (*)(void *), void *)(l->stream, doze, NULL), 0);
            }
            line_put(l, rank, n);
        }
        for (int k = 0; k < LINES; k++) {
            CHECK_EQ(DRIVER_CALL("cuStreamSynchronize", void *)(lines[k].stream), 0);
            line_check(c, &lines[k], rank, n, turn, k, host);
        }
    }
    for (int k = LINES - 1; k >= 0; k--) {
        ddl_tensor *all[] = {&lines[k].in, &lines[k].sum, &lines[k].message, &lines[k].seen[0], &lines[k].seen[1]};
        CHECK_EQ(ddl_group_stream(lines[k].group, gpu, NULL), DDL_OK);
        CHECK_EQ(DRIVER_CALL("cuStreamDestroy_v2", void *)(lines[k].stream), 0);
        for (int i = 0; i < 5; i++) {
            CHECK_EQ(ddl_tensor_free(c, all[i]), DDL_OK);
        }
    }
    CHECK_EQ(ddl_group_free(&lines[1].group), DDL_OK);
    free(host);
    coll_leave(c);
}

TEST(streams_of_processes) { each_way(streams, 0); }

/* ---- what is wrong is said, and all goes on ---- */

#define REFUSED(call, status, part)                                                                                    \
    do {                                                                                                               \
        CHECK_EQ(call, status);                                                                                        \
        CHECK_STR(ddl_error(c), part);                                                                                 \
    } while (0)

/* A function of the driver that its stand-in need not have. */
static void *rare(const char *name) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    return library != NULL ? dlsym(library, name) : NULL;
}

static void misused(int rank, int n, void *arg) {
    ddl_context *c = join(rank, n, arg);
    REQUIRE(c != NULL);
    ddl_group *w = ddl_world(c);
    int32_t gpu = gpu_of(c, rank, 0), ordinary[100] = {0};
    int64_t huge = (int64_t)1 << 45;
    uint64_t at = 0;
    void *context = NULL, *stream = NULL, *create = rare("cuCtxCreate_v2"), *managed = rare("cuMemAllocManaged");
    ddl_tensor t = {0}, bad = ddl_tensor_1d(ordinary, DDL_I32, 100);
    bad.device = gpu;
    REFUSED(ddl_all_reduce(w, bad, bad, DDL_SUM), DDL_ERR_ARG, "but its memory at");
    CHECK_EQ(DRIVER_CALL("cuDevicePrimaryCtxRetain", void **, int)(&context, gpu - 1), 0);
    CHECK_EQ(DRIVER_CALL("cuCtxPushCurrent_v2", void *)(context), 0);
    CHECK_EQ(DRIVER_CALL("cuMemAlloc_v2", uint64_t *, size_t)(&at, (size_t)4 << 20), 0);
    CHECK_EQ(DRIVER_CALL("cuMemFree_v2", uint64_t)(at), 0);
    bad.data = (void *)(uintptr_t)at;
    REFUSED(ddl_all_reduce(w, bad, bad, DDL_SUM), DDL_ERR_ARG, "or was freed");
    REFUSED(ddl_tensor_alloc_on(c, gpu, DDL_U8, 1, &huge, &t), DDL_ERR_NOMEM, "has no memory for");
    CHECK(t.data == NULL);
    if (ddl_device_count(c) > 1) {
        int64_t count = 100;
        REQUIRE(ddl_tensor_alloc_on(c, gpu % ddl_device_count(c) + 1, DDL_I32, 1, &count, &t) == DDL_OK);
        bad.data = t.data;
        REFUSED(ddl_all_reduce(w, bad, bad, DDL_SUM), DDL_ERR_ARG, "is said to be on device");
        CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    }
    if (create != NULL) {
        CHECK_EQ(((int (*)(void **, unsigned, int))create)(&context, 0, gpu - 1), 0);
        CHECK_EQ(DRIVER_CALL("cuStreamCreate", void **, unsigned)(&stream, 1), 0);
        REFUSED(ddl_group_stream(w, gpu, stream), DDL_ERR_ARG, "it is not one of device");
        CHECK_EQ(DRIVER_CALL("cuStreamDestroy_v2", void *)(stream), 0);
        CHECK_EQ(DRIVER_CALL("cuCtxPopCurrent_v2", void **)(&context), 0);
        CHECK_EQ(DRIVER_CALL("cuCtxDestroy_v2", void *)(context), 0);
    }
    if (managed != NULL) { /* it goes by the host, and is right */
        CHECK_EQ(((int (*)(uint64_t *, size_t, unsigned))managed)(&at, sizeof ordinary, 1), 0);
        bad.data = (void *)(uintptr_t)at;
        ordinary[99] = rank + 1;
        CHECK_EQ(ddl_tensor_copy(c, bad, ddl_tensor_1d(ordinary, DDL_I32, 100)), DDL_OK);
        CHECK_EQ(ddl_all_reduce(w, bad, bad, DDL_SUM), DDL_OK);
        CHECK_EQ(ddl_tensor_copy(c, ddl_tensor_1d(ordinary, DDL_I32, 100), bad), DDL_OK);
        CHECK_EQ(ordinary[99], n * (n + 1) / 2);
        CHECK_EQ(DRIVER_CALL("cuMemFree_v2", uint64_t)(at), 0);
    }
    sum_once(c, rank, n, 3, 1000);
    coll_leave(c);
}

TEST(misuse_is_said_by_processes) { each_way(misused, 0); }

/* ---- threads, last: this process opens the driver, and can fork no rank that uses it ---- */

TEST(collectives_of_threads) { each_way(every_kind, 1); }
TEST(types_and_ops_of_threads) { each_way(every_type_and_op, 1); }
TEST(messages_of_threads) { each_way(ring, 1); }
TEST(messages_are_copied_by_threads) { each_way(copied, 1); }
TEST(graphs_of_threads) { each_way(graph_relaxed, 1); }
TEST(freed_and_reused_by_threads) { each_way(allocate_anew, 1); }
TEST(streams_of_threads) { each_way(streams, 1); }

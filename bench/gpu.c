/* gpu: all_reduce of tensors on GPUs, and copies within one, as a table; what a call costs the host that is ordered on a
 * stream; the other collectives and messages; what the trainer hides behind backward. `make bench-gpu` runs it.
 *
 *     build/tests/gpu two_threads        or four_threads, two_processes, four_processes
 *     build/tests/gpu others_threads     or others_processes: two ranks
 *     build/tests/gpu hidden_threads     or hidden_processes: two ranks
 *     GPU_BENCH_BYTES=n                        the largest tensor; default 256 MiB
 *
 * Ranks are spread over the GPUs; with one GPU all share it. Times are the best of blocks of calls, on the slowest rank. The
 * copy is a plain one on the GPU (read and write counted), which bounds the others: n ranks on one GPU read n inputs and
 * write n outputs, whatever the algorithm. */
#define TEST_TIMEOUT_S 110
#include "coll.h"

#include <dlfcn.h>
#include <math.h>

enum { BLOCKS = 7, LAYERS = 12, TRAIN_STEPS = 20 };

static int64_t largest(void) {
    const char *s = getenv("GPU_BENCH_BYTES");
    return s != NULL ? strtoll(s, NULL, 10) : (int64_t)256 << 20;
}

/* ---- the driver, for streams ---- */

static struct {
    int (*retain)(void **context, int device);
    int (*push)(void *context);
    int (*stream)(void **out, unsigned flags);
    int (*copy)(uintptr_t dst, uintptr_t src, size_t bytes, void *stream);
    int (*wait)(void *stream);
} cu;

static void *stream_of(int device) {
    static const char *const names[] = {"cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuStreamCreate",
                                        "cuMemcpyAsync", "cuStreamSynchronize"};
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL), *context = NULL, *stream = NULL;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        void *found = library != NULL ? dlsym(library, names[i]) : NULL;
        memcpy((char *)&cu + i * sizeof found, &found, sizeof found);
    }
    CHECK(cu.retain != NULL && cu.retain(&context, device) == 0 && cu.push(context) == 0 && cu.stream(&stream, 1) == 0);
    return stream;
}

/* Of the slowest rank. Copies are rank 0's alone: others would share the memory's bandwidth with it. */
static double best_s(ddl_context *c, int rank, ddl_tensor t, ddl_tensor other, int copy, int calls) {
    double best = copy && rank > 0 ? 0 : 1e9;
    for (int block = 0; block < BLOCKS; block++) {
        CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
        double start = test_now_s();
        for (int i = 0; i < calls && (!copy || rank == 0); i++) {
            ddl_status status = copy ? ddl_tensor_copy(c, other, t) : ddl_all_reduce(ddl_world(c), t, t, DDL_MAX);
            CHECK_EQ(status, DDL_OK);
        }
        double took = (test_now_s() - start) / calls;
        best = took < best ? took : best;
    }
    ddl_tensor host = ddl_tensor_1d(&best, DDL_F64, 1);
    CHECK_EQ(ddl_all_reduce(ddl_world(c), host, host, DDL_MAX), DDL_OK);
    return best;
}

/* What an all_reduce that is ordered on a stream costs the host before it returns. */
static void launches(ddl_context *c, int rank, int32_t device) {
    enum { CALLS = 32 };
    int64_t count = 1024;
    double best = 1e9;
    ddl_tensor t = {0};
    void *stream = stream_of(device - 1);
    REQUIRE(ddl_tensor_alloc_on(c, device, DDL_F32, 1, &count, &t) == DDL_OK);
    REQUIRE(ddl_group_stream(ddl_world(c), device, stream) == DDL_OK);
    for (int block = 0; block < BLOCKS; block++) {
        double start = test_now_s();
        for (int i = 0; i < CALLS; i++) {
            CHECK_EQ(ddl_all_reduce(ddl_world(c), t, t, DDL_MAX), DDL_OK);
        }
        double took = (test_now_s() - start) / CALLS;
        best = took < best ? took : best;
        CHECK_EQ(cu.wait(stream), 0);
    }
    if (rank == 0) {
        printf("| 4096, call on a stream | %.1f | | | |\n", best * 1e6);
    }
    CHECK_EQ(ddl_group_stream(ddl_world(c), device, NULL), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
}

/* The size that is measured next, the largest last; 0: there is none. */
static int64_t following(int64_t bytes) {
    int64_t next = bytes * (bytes < 32768 ? 64 : 8);
    return bytes >= largest() ? 0 : next < largest() ? next : largest();
}

static void measure(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    int32_t gpus = ddl_device_count(c);
    REQUIRE(gpus > 0);
    if (rank == 0) {
        printf("| bytes | all_reduce us | algorithm GB/s | copy GB/s, read and write | of the copy's bound |\n"
               "|---|---|---|---|---|\n");
    }
    for (int64_t bytes = 8; bytes > 0; bytes = following(bytes)) {
        int64_t count = bytes / 4;
        ddl_tensor t = {0}, other = {0};
        REQUIRE(ddl_tensor_alloc_on(c, rank % gpus + 1, DDL_F32, 1, &count, &t) == DDL_OK);
        REQUIRE(ddl_tensor_alloc_on(c, rank % gpus + 1, DDL_F32, 1, &count, &other) == DDL_OK);
        int calls = bytes < 1 << 20 ? 200 : 5;
        double reduce_s = best_s(c, rank, t, other, 0, calls), copy_s = best_s(c, rank, t, other, 1, calls);
        if (rank == 0) {
            double bound_s = gpus >= n ? copy_s : n * copy_s;
            printf("| %lld | %.1f | %.2f | %.1f | %.0f %% |\n", (long long)bytes, reduce_s * 1e6,
                   (double)bytes / reduce_s * 1e-9, 2 * (double)bytes / copy_s * 1e-9, 100 * bound_s / reduce_s);
        }
        CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
        CHECK_EQ(ddl_tensor_free(c, &other), DDL_OK);
    }
    launches(c, rank, rank % gpus + 1);
    coll_leave(c);
}

/* ---- the other collectives, and messages ---- */

typedef struct kind_row {
    const char *name;
    ddl_kind kind;
    int in, out; /* parts of B / n that a rank has in its input and output, where 0 is all n */
    int moved;   /* of two ranks on one GPU: halves of B that are read or written, whatever the algorithm */
} kind_row;
static const kind_row kind_rows[] = {
    {"reduce", DDL_REDUCE, 0, 0, 6},         {"broadcast", DDL_BROADCAST, 0, 0, 4},
    {"all_gather", DDL_ALL_GATHER, 1, 0, 6}, {"reduce_scatter", DDL_REDUCE_SCATTER, 0, 1, 6},
    {"all_to_all", DDL_ALL_TO_ALL, 0, 0, 8}, {"gather", DDL_GATHER, 1, 0, 4},
    {"scatter", DDL_SCATTER, 0, 1, 4},       {"scan", DDL_SCAN, 0, 0, 10}};

static ddl_status begin_kind(ddl_group *g, ddl_kind kind, ddl_tensor in, ddl_tensor out) {
    switch (kind) {
    case DDL_REDUCE: return ddl_reduce(g, in, out, DDL_SUM, 0);
    case DDL_BROADCAST: return ddl_broadcast(g, in, 0);
    case DDL_ALL_GATHER: return ddl_all_gather(g, in, out);
    case DDL_REDUCE_SCATTER: return ddl_reduce_scatter(g, in, out, DDL_SUM);
    case DDL_ALL_TO_ALL: return ddl_all_to_all(g, in, out);
    case DDL_GATHER: return ddl_gather(g, in, out, 0);
    case DDL_SCATTER: return ddl_scatter(g, in, out, 0);
    default: return ddl_scan(g, in, out, DDL_SUM);
    }
}

static void measure_kind(ddl_context *c, int rank, const kind_row *row, ddl_tensor in, ddl_tensor out, int64_t bytes,
                         double copy_s) {
    int calls = bytes < 1 << 20 ? 100 : 5;
    double best = 1e9;
    in.shape[0] = bytes / 4 / (row->in > 0 ? 2 : 1);
    out.shape[0] = bytes / 4 / (row->out > 0 ? 2 : 1);
    for (int block = 0; block < BLOCKS; block++) {
        CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
        double start = test_now_s();
        for (int i = 0; i < calls; i++) {
            CHECK_EQ(begin_kind(ddl_world(c), row->kind, in, out), DDL_OK);
        }
        double took = (test_now_s() - start) / calls;
        best = took < best ? took : best;
    }
    ddl_tensor host = ddl_tensor_1d(&best, DDL_F64, 1);
    CHECK_EQ(ddl_all_reduce(ddl_world(c), host, host, DDL_MAX), DDL_OK);
    if (rank == 0) { /* copy_s: to read all of B and to write it, four halves */
        printf("| %s | %lld | %.1f | %.0f %% |\n", row->name, (long long)bytes, best * 1e6,
               100 * row->moved / 4.0 * copy_s / best);
    }
}

/* Half a round trip between ranks 0 and 1. */
static void measure_message(ddl_context *c, int rank, ddl_tensor t, int64_t bytes, double copy_s) {
    int rounds = bytes < 1 << 20 ? 100 : 5;
    double best = 1e9;
    t.shape[0] = bytes / 4;
    for (int block = 0; block < BLOCKS; block++) {
        CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
        double start = test_now_s();
        for (int i = 0; i < 2 * rounds; i++) {
            CHECK_EQ(i % 2 == rank ? ddl_send(ddl_world(c), t, 1 - rank, 0)
                                   : ddl_recv(ddl_world(c), t, 1 - rank, 0, NULL), DDL_OK);
        }
        double took = (test_now_s() - start) / (2 * rounds);
        best = took < best ? took : best;
    }
    if (rank == 0) {
        printf("| message | %lld | %.1f | %.0f %% |\n", (long long)bytes, best * 1e6, 100 * copy_s / best);
    }
}

static void others(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    int32_t gpus = ddl_device_count(c);
    REQUIRE(gpus > 0);
    int64_t most = largest() / 4, sizes[3] = {8, most < 65536 ? most : 65536, most}, count = most / 4;
    ddl_tensor in = {0}, out = {0};
    REQUIRE(ddl_tensor_alloc_on(c, rank % gpus + 1, DDL_F32, 1, &count, &in) == DDL_OK);
    REQUIRE(ddl_tensor_alloc_on(c, rank % gpus + 1, DDL_F32, 1, &count, &out) == DDL_OK);
    if (rank == 0) {
        printf("| operation | bytes | us | of the copy's bound, if on one GPU |\n|---|---|---|---|\n");
    }
    for (int size = 0; size < 3; size++) {
        ddl_tensor to = out, from = in;
        from.shape[0] = to.shape[0] = sizes[size] / 4;
        double copy_s = best_s(c, rank, from, to, 1, sizes[size] < 1 << 20 ? 100 : 5);
        for (size_t i = 0; i < sizeof kind_rows / sizeof *kind_rows; i++) {
            measure_kind(c, rank, &kind_rows[i], in, out, sizes[size], copy_s);
        }
        measure_message(c, rank, in, sizes[size], copy_s);
    }
    CHECK_EQ(ddl_tensor_free(c, &in), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &out), DDL_OK);
    coll_leave(c);
}

/* ---- the trainer ---- */

/* Twelve layers, whose backward is copies on the program's stream that take about a millisecond on a large GPU: no
 * arithmetic, so that it is the memory, which communication wants too, that is busy. */
typedef struct stack {
    ddl_tensor param[LAYERS], grad[LAYERS], work[2];
    ddl_trainer *trainer;
    void *stream;
} stack;

static void stack_make(ddl_context *c, stack *s, int32_t device) {
    int64_t count = largest() / 9 / 4, work = largest() / 4; /* 28 MiB: a layer of GPT-2's smallest */
    ddl_trainer_config config = {.optimizer = {.kind = DDL_ADAMW}, .unchecked = 1};
    s->stream = stream_of(device - 1);
    CHECK_EQ(ddl_trainer_create(ddl_world(c), &config, &s->trainer), DDL_OK);
    for (int i = 0; i < 2; i++) {
        REQUIRE(ddl_tensor_alloc_on(c, device, DDL_F32, 1, &work, &s->work[i]) == DDL_OK);
    }
    for (int i = 0; i < LAYERS; i++) {
        REQUIRE(ddl_tensor_alloc_on(c, device, DDL_F32, 1, &count, &s->param[i]) == DDL_OK);
        REQUIRE(ddl_tensor_alloc_on(c, device, DDL_F32, 1, &count, &s->grad[i]) == DDL_OK);
        CHECK_EQ(ddl_trainer_add(s->trainer, NULL, s->param[i], s->grad[i], NULL, NULL), DDL_OK);
    }
    CHECK_EQ(ddl_trainer_set_stream(s->trainer, s->stream), DDL_OK);
    CHECK_EQ(ddl_trainer_start(s->trainer), DDL_OK);
}

static void train(int rank, int n, void *arg) {
    stack s = {.stream = NULL};
    double exposed = 0, hidden = 0, total_s = 0;
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    REQUIRE(ddl_device_count(c) > 0);
    stack_make(c, &s, rank % ddl_device_count(c) + 1);
    for (int step = 0; step < TRAIN_STEPS; step++) {
        ddl_trainer_stats stats = {0};
        double start = test_now_s();
        for (int i = LAYERS - 1; i >= 0; i--) {
            for (int k = 0; k < 8; k++) {
                CHECK_EQ(cu.copy((uintptr_t)s.work[k % 2].data, (uintptr_t)s.work[1 - k % 2].data, (size_t)largest(),
                                 s.stream), 0);
            }
            CHECK_EQ(ddl_grad_ready(s.trainer, i), DDL_OK);
        }
        CHECK_EQ(ddl_step(s.trainer), DDL_OK);
        CHECK_EQ(cu.wait(s.stream), 0);
        CHECK_EQ(ddl_trainer_stats_get(s.trainer, &stats), DDL_OK);
        exposed += step >= TRAIN_STEPS / 2 ? stats.exposed_s : 0; /* plans have settled */
        hidden += step >= TRAIN_STEPS / 2 ? stats.hidden_s : 0;
        total_s += step >= TRAIN_STEPS / 2 ? test_now_s() - start : 0;
    }
    if (rank == 0) {
        printf("| trainer, 12 tensors of %lld bytes | step ms | communication ms | hidden |\n|---|---|---|---|\n"
               "| backward emulated by copies | %.2f | %.2f | %.0f %% |\n", (long long)(largest() / 9 / 4 * 4),
               total_s * 1e3 / (TRAIN_STEPS / 2), (exposed + hidden) * 1e3 / (TRAIN_STEPS / 2),
               100 * hidden / fmax(exposed + hidden, 1e-12));
    }
    CHECK_EQ(ddl_trainer_free(&s.trainer), DDL_OK);
    for (int i = 0; i < LAYERS; i++) {
        CHECK_EQ(ddl_tensor_free(c, &s.param[i]), DDL_OK);
        CHECK_EQ(ddl_tensor_free(c, &s.grad[i]), DDL_OK);
    }
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(ddl_tensor_free(c, &s.work[i]), DDL_OK);
    }
    coll_leave(c);
}

static void with(ranks_fn fn, int n, int threads) {
    coll_job job;
    coll_job_make(&job);
    job.config.progress_thread = fn == train;
    threads ? ranks_threads(n, fn, &job) : ranks_fork(n, fn, &job, 100);
}

TEST(two_processes) { with(measure, 2, 0); }
TEST(four_processes) { with(measure, 4, 0); }
TEST(two_threads) { with(measure, 2, 1); }
TEST(four_threads) { with(measure, 4, 1); }
TEST(others_processes) { with(others, 2, 0); }
TEST(others_threads) { with(others, 2, 1); }
TEST(hidden_processes) { with(train, 2, 0); }
TEST(hidden_threads) { with(train, 2, 1); }

/* gpu: all_reduce of tensors on GPUs, and copies within one, as a table. `make bench-gpu` runs it.
 *
 *     build/tests/gpu_bench two_threads        or four_threads, two_processes, four_processes
 *
 * Ranks are spread over the GPUs; with one GPU all share it. Times are the best of blocks of calls, on the slowest rank. The
 * last column is the bandwidth of a plain copy on the GPU (read and write counted), which bounds the others. */
#define TEST_TIMEOUT_S 110
#include "coll.h"

#include <math.h>

enum { BLOCKS = 7 };

static double best_s(ddl_context *c, ddl_tensor t, ddl_tensor other, int copy, int calls) {
    double best = 1e9;
    for (int block = 0; block < BLOCKS; block++) {
        CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
        double start = test_now_s();
        for (int i = 0; i < calls; i++) {
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

static void measure(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    int32_t gpus = ddl_device_count(c);
    REQUIRE(gpus > 0);
    if (rank == 0) {
        printf("| bytes | all_reduce us | algorithm GB/s | copy GB/s, read and write |\n|---|---|---|---|\n");
    }
    for (int64_t bytes = 8; bytes <= (int64_t)256 << 20; bytes *= bytes < 32768 ? 64 : 8) {
        int64_t count = bytes / 4;
        ddl_tensor t = {0}, other = {0};
        REQUIRE(ddl_tensor_alloc_on(c, rank % gpus + 1, DDL_F32, 1, &count, &t) == DDL_OK);
        REQUIRE(ddl_tensor_alloc_on(c, rank % gpus + 1, DDL_F32, 1, &count, &other) == DDL_OK);
        int calls = bytes < 1 << 20 ? 200 : 5;
        double reduce_s = best_s(c, t, other, 0, calls), copy_s = best_s(c, t, other, 1, calls);
        if (rank == 0) {
            printf("| %lld | %.1f | %.2f | %.1f |\n", (long long)bytes, reduce_s * 1e6, (double)bytes / reduce_s * 1e-9,
                   2 * (double)bytes / copy_s * 1e-9);
        }
        CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
        CHECK_EQ(ddl_tensor_free(c, &other), DDL_OK);
    }
    coll_leave(c);
}

static void with(int n, int threads) {
    coll_job job;
    coll_job_make(&job);
    threads ? ranks_threads(n, measure, &job) : ranks_fork(n, measure, &job, 100);
}

TEST(two_processes) { with(2, 0); }
TEST(four_processes) { with(4, 0); }
TEST(two_threads) { with(2, 1); }
TEST(four_threads) { with(4, 1); }

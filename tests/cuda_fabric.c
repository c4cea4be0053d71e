/* Two hosts with GPUs inside and adapters between: plugins/cuda over the stand-in for the driver (cuda_driver.c) and plugins/fabric
 * over the one for FI_HMEM (fabric_hmem.h), together. Inside hosts memory of "GPUs" is shared, between hosts it is read, and
 * nothing passes the host's memory; what reduces is reduced by the plugin's kernels, compiled for a CPU. It proves logic, no
 * GPU and no adapter. Built and run by test_cuda_suite.py. */
#define TEST_TIMEOUT_S 200
#include "apart.h"

typedef struct fabric_job {
    coll_job job;
    int hosts[4]; /* by rank */
} fabric_job;

static int32_t gpu_of(int rank) { return rank % 2 + 1; }

static bool one(ddl_group *g, ddl_kind kind, int i, int64_t count, const int64_t *counts, int rank) {
    static const ddl_dtype types[] = {DDL_F32, DDL_BF16, DDL_I32, DDL_F16, DDL_F64};
    coll_case k = {.kind = kind, .dtype = types[i % 5], .op = !coll_reduces(kind) ? DDL_OP_NONE : i % 2 ? DDL_AVG : DDL_SUM,
                   .root = coll_rooted(kind) ? (i * 3 + 1) % ddl_size(g) : 0, .count = count + i, .counts = counts,
                   .gap = counts != NULL ? -1 : 0, .way = (coll_way)(i % 3), .in_place = i % 4 == 3, .salt = (unsigned)i,
                   .in_device = gpu_of(rank), .out_device = gpu_of(rank)};
    return coll_check(g, &k);
}

static const ddl_kind moving[] = {DDL_BROADCAST, DDL_ALL_GATHER, DDL_GATHER, DDL_SCATTER, DDL_ALL_TO_ALL};
static const ddl_kind reducing[] = {DDL_ALL_REDUCE, DDL_REDUCE, DDL_REDUCE_SCATTER};

/* Nothing of the large ones passes the host. */
static void large(ddl_context *c, int rank, int n) {
    int64_t count = (int64_t)n << 18, part = 1 << 18;
    ddl_group *w = ddl_world(c);
    ddl_tensor whole[2] = {{0}, {0}}, own = {0};
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(ddl_tensor_alloc_on(c, gpu_of(rank), DDL_F32, 1, &count, &whole[i]), DDL_OK);
    }
    CHECK_EQ(ddl_tensor_alloc_on(c, gpu_of(rank), DDL_F32, 1, &part, &own), DDL_OK);
    CHECK_EQ(ddl_barrier(w), DDL_OK);
    int64_t before = apart_staged(c);
    CHECK_EQ(ddl_all_reduce(w, whole[0], whole[0], DDL_AVG), DDL_OK);
    CHECK_EQ(ddl_reduce(w, whole[0], whole[1], DDL_SUM, n - 1), DDL_OK);
    CHECK_EQ(ddl_reduce_scatter(w, whole[0], own, DDL_SUM), DDL_OK);
    CHECK_EQ(ddl_all_gather(w, own, whole[1]), DDL_OK);
    CHECK_EQ(ddl_broadcast(w, whole[0], 1), DDL_OK);
    CHECK_EQ(ddl_all_to_all(w, whole[0], whole[1]), DDL_OK);
    CHECK_EQ(ddl_all_reduce_many(w, whole, 2, DDL_SUM), DDL_OK);
    CHECK_EQ(apart_staged(c) - before, 0);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(ddl_tensor_free(c, &whole[i]), DDL_OK);
    }
    CHECK_EQ(ddl_tensor_free(c, &own), DDL_OK);
}

static void hosts(int rank, int n, void *arg) {
    const fabric_job *j = arg;
    const bool even = n == 4;
    ddl_context *c = apart_join(rank, n, &j->job, j->hosts[rank]);
    REQUIRE(c != NULL);
    int64_t counts[4] = {50001, 3, 20000, 7};
    for (int i = 0; i < 15; i++) {
        CHECK(one(ddl_world(c), moving[i % 5], i, 40009, NULL, rank));
    }
    CHECK_EQ(apart_calls(c, "device_straight"), 15);
    for (int i = 0; i < 12; i++) {
        CHECK(one(ddl_world(c), reducing[i % 3], i, 90001, NULL, rank));
    }
    CHECK_EQ(apart_calls(c, "native_device_hierarchical"), even ? 12 : 0);
    CHECK_EQ(apart_calls(c, "device_exchange"), even ? 0 : 12); /* inside hosts by shared memory of GPUs */
    CHECK(one(ddl_world(c), DDL_REDUCE_SCATTERV, 5, 0, counts, rank));
    CHECK_EQ(apart_calls(c, "device_exchange"), even ? 1 : 13);
    large(c, rank, n);
    coll_leave(c);
}

static void run(int n, fabric_job j) {
    if (!apart_possible()) {
        SKIP("this machine has no network but loopback");
    }
    coll_job_make(&j.job);
    ranks_fork(n, hosts, &j, 150);
}

TEST(two_hosts_of_two_gpus) { run(4, (fabric_job){.hosts = {0, 0, 1, 1}}); }
TEST(hosts_of_two_gpus_and_of_one) { run(3, (fabric_job){.hosts = {0, 0, 1}}); }

/* One job of many ranks over the libfabric plugin and its tcp: it comes up, barriers and sums are right, and memory stays
 * within what docs/operations.md states for the peers that a rank talks to.
 * 64 ranks, which take 0.77 GB; 32 where there is not that much to spare.
 * tests/run: variants=gcc timeout=120 */
#include "coll.h"

#include <stdatomic.h>
#include <unistd.h>

enum { COUNT = 3000 }; /* 24 KB: by recursive doubling, which talks to log2 n ranks */
#define OTHERS_BYTES (1u << 20) /* what the core holds besides */

typedef struct world {
    coll_job job;
    _Atomic int arrived; /* ranks that have entered the barrier */
    uint64_t memory[64];
} world;

static int log2_up(int n) {
    int bits = 0;
    while (1 << bits < n) {
        bits++;
    }
    return bits;
}

/* Nobody leaves before all have come. */
static void barriers(ddl_context *c, world *w, int n) {
    for (int round = 1; round <= 3; round++) {
        atomic_fetch_add(&w->arrived, 1);
        CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
        CHECK(atomic_load(&w->arrived) >= round * n);
    }
}

static void rank_main(int rank, int n, void *arg) {
    world *w = arg;
    ddl_context *c = coll_join(rank, n, &w->job);
    REQUIRE(c != NULL);
    barriers(c, w, n);
    int64_t *mine = malloc(COUNT * sizeof *mine), *sum = malloc(COUNT * sizeof *sum), wrong = 0;
    for (int64_t i = 0; i < COUNT; i++) {
        mine[i] = (rank + 1) * (i + 7);
        sum[i] = -1;
    }
    CHECK_EQ(ddl_all_reduce(ddl_world(c), ddl_tensor_1d(mine, DDL_I64, COUNT), ddl_tensor_1d(sum, DDL_I64, COUNT),
                            DDL_SUM), DDL_OK);
    for (int64_t i = 0; i < COUNT; i++) {
        wrong += sum[i] != (i + 7) * n * (n + 1) / 2;
    }
    CHECK_EQ(wrong, 0);
    barriers(c, w, n);
    ddl_stats stats = {0};
    ddl_stats_get(c, &stats);
    w->memory[rank] = stats.memory_bytes;
    int by_fabric = 0;
    for (int i = 0; i < DDL_STATS_TRANSPORTS; i++) {
        by_fabric += stats.transports[i].name != NULL && strcmp(stats.transports[i].name, "fabric") == 0 &&
                     stats.transports[i].bytes_sent >= COUNT * sizeof *sum;
    }
    CHECK_EQ(by_fabric, 1);
    free(mine);
    free(sum);
    coll_leave(c);
}

static long free_kib(void) {
    char line[128];
    long kib = 0;
    FILE *file = fopen("/proc/meminfo", "re");
    while (file != NULL && kib == 0 && fgets(line, sizeof line, file) != NULL) {
        (void)sscanf(line, "MemAvailable: %ld", &kib);
    }
    if (file != NULL) {
        fclose(file);
    }
    return kib;
}

TEST(many_ranks_in_one_job) {
    int n = free_kib() >= 2 << 20 ? 64 : 32;
    printf("     %d ranks\n", n);
    char folder[512] = "", plugin[600];
    CHECK(getcwd(folder, sizeof folder - 16) != NULL);
    strcat(folder, "/build");
    snprintf(plugin, sizeof plugin, "%s/libddl-fabric.so", folder);
    if (access(plugin, R_OK) != 0) {
        SKIP("libddl-fabric.so is not built; make plugins builds it where libfabric-dev is installed");
    }
    setenv("DDL_PLUGIN_PATH", folder, 1);
    setenv("DDL_TRANSPORTS", "fabric:tcp", 1);
    static world w;
    coll_job_make(&w.job);
    ranks_threads(n, rank_main, &w);
    /* A barrier talks to ranks at distances 1, 2, 4 ... on both sides; the sum to some of the same. The sum goes in messages
     * that are too small to be read. */
    uint64_t peers = 2 * (uint64_t)log2_up(n);
    for (int i = 0; i < n; i++) {
        CHECK(w.memory[i] > 3085 << 10 && w.memory[i] <= ((3085 + 643 * peers) << 10) + OTHERS_BYTES);
    }
}

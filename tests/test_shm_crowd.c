/* Many more ranks than cores over shared memory: no collapse, and a large job is soon up.
 * tests/run: variants=gcc timeout=120 alone=yes */
#define TEST_TIMEOUT_S 110
#include "faults.h"

enum { ROUNDS = 2000 };

typedef struct crowd {
    double began;
    volatile double barrier_s, reduce_s; /* of rank 0 */
    volatile double up_s[RANKS_MAX];
} crowd;

static ddl_context *join(void) {
    char why[1024] = "";
    ddl_context *c = NULL;
    setenv("DDL_TRANSPORTS", "shm", 1);
    setenv("DDL_PLUGIN_PATH", fault_plugins(), 1);
    ddl_config config = {.timeout_ms = 60000, .error_text = why, .error_bytes = sizeof why};
    if (ddl_init(&config, &c) != DDL_OK) {
        test__fail(__FILE__, __LINE__, "ddl_init: %s", why);
    }
    return c;
}

static void rounds(int rank, int n, void *arg) {
    crowd *w = arg;
    ddl_context *c = join();
    REQUIRE(c != NULL);
    ddl_group *world = ddl_world(c);
    CHECK_EQ(ddl_barrier(world), DDL_OK);
    double start = test_now_s();
    for (int i = 0; i < ROUNDS; i++) {
        REQUIRE(ddl_barrier(world) == DDL_OK);
    }
    double middle = test_now_s();
    for (int i = 0; i < ROUNDS; i++) {
        float x[8];
        for (int k = 0; k < 8; k++) {
            x[k] = (float)(rank + i % 100 + k);
        }
        REQUIRE(ddl_all_reduce(world, DDL_ARRAY(x), DDL_ARRAY(x), DDL_SUM) == DDL_OK);
        for (int k = 0; k < 8; k++) {
            CHECK_EQ(x[k], n * (n - 1) / 2 + n * (i % 100 + k));
        }
    }
    if (rank == 0) {
        w->barrier_s = middle - start;
        w->reduce_s = test_now_s() - middle;
    }
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

/* Generous: where a rank that waits keeps the core until its time slice ends, one operation takes milliseconds. */
TEST(no_collapse_where_ranks_outnumber_cores) {
    static const int counts[] = {2, 4, 8, 16};
    crowd *w = ranks_shared(sizeof *w);
    if (!fault_has_plugin("shm")) {
        SKIP("libddl-shm.so is not built; make plugins builds it");
    }
    for (int k = 0; k < 4; k++) {
        ranks_fork(counts[k], rounds, w, 60);
        double barrier = w->barrier_s / ROUNDS, reduce = w->reduce_s / ROUNDS;
        printf("  %d ranks: a barrier takes %.1f us, an all_reduce of 32 B %.1f us\n", counts[k], barrier * 1e6,
               reduce * 1e6);
        CHECK(barrier < 50e-6 * counts[k] * test_slow());
        CHECK(reduce < 50e-6 * counts[k] * test_slow());
    }
}

static void up(int rank, int n, void *arg) {
    crowd *w = arg;
    (void)n;
    ddl_context *c = join();
    REQUIRE(c != NULL);
    CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
    w->up_s[rank] = test_now_s() - w->began;
    CHECK_EQ(fault_all_reduces(ddl_world(c), 3), DDL_OK);
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

TEST(sixty_four_ranks_are_up_in_two_seconds) {
    enum { MANY = 64 };
    crowd *w = ranks_shared(sizeof *w);
    double last = 0;
    if (!fault_has_plugin("shm")) {
        SKIP("libddl-shm.so is not built; make plugins builds it");
    }
    w->began = test_now_s();
    ranks_fork(MANY, up, w, 40);
    for (int rank = 0; rank < MANY; rank++) {
        last = w->up_s[rank] > last ? w->up_s[rank] : last;
    }
    printf("  %d ranks: up after %.2f s\n", MANY, last);
    CHECK(last > 0 && last < 2.0 * test_slow());
}

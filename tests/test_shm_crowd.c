/* Many more ranks than cores over shared memory: no collapse, and a large job is soon up. What is judged is processor
 * time, which neighbours hardly change: ranks that wait on the core of the one they wait for burn it. Elapsed time
 * shows besides who sleeps for too long, and is judged where nobody else used the machine meanwhile.
 * tests/run: variants=gcc timeout=120 alone=yes */
#define TEST_TIMEOUT_S 110
#include "faults.h"

#include <sys/resource.h>

enum { ROUNDS = 500 };

typedef struct crowd {
    double began;
    volatile double barrier_s, reduce_s; /* of rank 0 */
    volatile double barrier_cpu_s[RANKS_MAX], reduce_cpu_s[RANKS_MAX];
    volatile double up_s[RANKS_MAX], up_cpu_s[RANKS_MAX];
} crowd;

static double cpu_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static double sum(const volatile double *x, int n) {
    double s = 0;
    for (int i = 0; i < n; i++) {
        s += x[i];
    }
    return s;
}

/* How long all cores together did something, or were taken away by a hypervisor. */
static double machine_busy_s(void) {
    long long user = 0, nice = 0, system = 0, idle, wait, irq = 0, soft = 0, steal = 0;
    FILE *f = fopen("/proc/stat", "r");
    int got = f == NULL ? 0
                        : fscanf(f, "cpu %lld %lld %lld %lld %lld %lld %lld %lld", &user, &nice, &system, &idle, &wait,
                                 &irq, &soft, &steal);
    if (f != NULL) {
        fclose(f);
    }
    return got == 8 ? (double)(user + nice + system + irq + soft + steal) / (double)sysconf(_SC_CLK_TCK) : 0;
}

static double children_s(void) {
    struct rusage u;
    getrusage(RUSAGE_CHILDREN, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

/* Runs ranks. True: others used less than a tenth of the machine meanwhile. */
static bool run_alone(int n, ranks_fn fn, crowd *w, double limit_s) {
    double start = test_now_s(), busy = machine_busy_s(), own = children_s();
    ranks_fork(n, fn, w, limit_s);
    double others = (machine_busy_s() - busy) - (children_s() - own);
    double share = others / (test_now_s() - start) / (double)sysconf(_SC_NPROCESSORS_ONLN);
    if (share >= 0.1) {
        printf("  others used %.0f%% of the machine: elapsed time is not judged\n", share * 100);
    }
    return share < 0.1;
}

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
    double start = test_now_s(), start_cpu = cpu_s();
    for (int i = 0; i < ROUNDS; i++) {
        REQUIRE(ddl_barrier(world) == DDL_OK);
    }
    double middle = test_now_s(), middle_cpu = cpu_s();
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
    w->barrier_cpu_s[rank] = middle_cpu - start_cpu;
    w->reduce_cpu_s[rank] = cpu_s() - middle_cpu;
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
        int n = counts[k];
        bool alone = run_alone(n, rounds, w, 90);
        double barrier = w->barrier_s / ROUNDS, reduce = w->reduce_s / ROUNDS;
        double barrier_cpu = sum(w->barrier_cpu_s, n) / ROUNDS, reduce_cpu = sum(w->reduce_cpu_s, n) / ROUNDS;
        printf("  %d ranks: a barrier takes %.1f us and %.1f of processor, an all_reduce of 32 B %.1f and %.1f\n", n,
               barrier * 1e6, barrier_cpu * 1e6, reduce * 1e6, reduce_cpu * 1e6);
        CHECK(barrier_cpu > 0 && barrier_cpu < 100e-6 * n * test_slow());
        CHECK(reduce_cpu > 0 && reduce_cpu < 100e-6 * n * test_slow());
        CHECK(!alone || (barrier < 50e-6 * n * test_slow() && reduce < 50e-6 * n * test_slow()));
    }
}

static void up(int rank, int n, void *arg) {
    crowd *w = arg;
    (void)n;
    ddl_context *c = join();
    REQUIRE(c != NULL);
    CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
    w->up_s[rank] = test_now_s() - w->began;
    w->up_cpu_s[rank] = cpu_s();
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
    bool alone = run_alone(MANY, up, w, 90);
    for (int rank = 0; rank < MANY; rank++) {
        last = w->up_s[rank] > last ? w->up_s[rank] : last;
    }
    double cpu = sum(w->up_cpu_s, MANY);
    printf("  %d ranks: up after %.2f s and %.2f of processor\n", MANY, last, cpu);
    CHECK(last > 0 && (!alone || last < 2.0 * test_slow()));
    CHECK(cpu > 0 && cpu < 8.0 * test_slow());
}

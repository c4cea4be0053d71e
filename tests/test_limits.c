/* Promises about size: how fast 64 ranks meet, how much memory each takes, what waiting costs, and that collectives of
 * 16 ranks are right.
 * tests/run: variants=gcc timeout=300 alone=yes */
#define TEST_TIMEOUT_S 200
#include "coll.h"

#include <sys/resource.h>

enum { RANKS = 64, BARRIERS = 2000, WAIT_S = 2 };

/* How much longer things take here than on an idle machine. */
static double busy(void) {
    double load = 0;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (getloadavg(&load, 1) != 1 || load < (double)cores) {
        load = (double)cores;
    }
    return test_slow() * load / (double)cores;
}

static double used_s(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

/* Looks at this process from beside while it waits; returns the share of a core that it took. */
static void *watch(void *arg) {
    usleep(300000);
    double before = used_s(), start = test_now_s();
    sleep(WAIT_S);
    *(double *)arg = (used_s() - before) / (test_now_s() - start);
    return NULL;
}

typedef struct shared {
    coll_job job;
    pthread_barrier_t *together;
    double *init_s; /* of each rank */
    double busy;
} shared;

static void waiting(ddl_group *g, bool late) {
    double share = 0;
    pthread_t beside;
    CHECK_EQ(ddl_barrier(g), DDL_OK);
    if (late) {
        usleep((WAIT_S + 1) * 1000000);
        CHECK_EQ(ddl_barrier(g), DDL_OK);
        return;
    }
    REQUIRE(pthread_create(&beside, NULL, watch, &share) == 0);
    CHECK_EQ(ddl_barrier(g), DDL_OK);
    pthread_join(beside, NULL);
    if (share >= 0.01) {
        test__fail(__FILE__, __LINE__, "a rank that waits takes %.2f %% of a core", share * 100);
    }
}

static void sixty_four(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    pthread_barrier_wait(s->together);
    double start = test_now_s();
    ddl_context *c = coll_join(rank, n, &s->job);
    s->init_s[rank] = test_now_s() - start;
    REQUIRE(c != NULL);
    ddl_group *g = ddl_world(c);
    ddl_status status = DDL_OK;
    start = test_now_s();
    for (int i = 0; i < BARRIERS && status == DDL_OK; i++) {
        status = ddl_barrier(g);
    }
    CHECK_EQ(status, DDL_OK);
    if (rank == 0) {
        printf("64 ranks: %.2f s to join, %d barriers of %.0f us\n", s->init_s[0], BARRIERS,
               (test_now_s() - start) / BARRIERS * 1e6);
    }
    ddl_stats stats;
    CHECK_EQ(ddl_stats_get(c, &stats), DDL_OK);
    CHECK(stats.peers_connected >= 1);
    uint64_t most = 2u * 1024 * 1024 + 64u * 1024 * stats.peers_connected;
    if (stats.memory_peak_bytes > most) {
        test__fail(__FILE__, __LINE__, "%llu bytes with %llu peers; %llu are allowed",
                   (unsigned long long)stats.memory_peak_bytes, (unsigned long long)stats.peers_connected,
                   (unsigned long long)most);
    }
    waiting(g, rank == 0);
    coll_leave(c);
}

TEST(sixty_four_ranks) {
    static shared s;
    double worst = 0;
    pthread_barrierattr_t attr;
    coll_job_make(&s.job);
    s.job.config.timeout_ms = (int64_t)(120000 * test_slow());
    s.together = (pthread_barrier_t *)ranks_shared(sizeof *s.together);
    s.init_s = (double *)ranks_shared(RANKS * sizeof *s.init_s);
    s.busy = busy();
    pthread_barrierattr_init(&attr);
    pthread_barrierattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(s.together, &attr, RANKS);
    ranks_fork(RANKS, sixty_four, &s, 120);
    for (int i = 0; i < RANKS; i++) {
        worst = s.init_s[i] > worst ? s.init_s[i] : worst;
    }
    if (worst > 2 * s.busy) {
        test__fail(__FILE__, __LINE__, "joining took %.2f s, %.2f are allowed", worst, 2 * s.busy);
    }
}

static void sixteen(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    static const int64_t counts[] = {1, 100, 5003};
    bool ok = true;
    for (int kind = DDL_BARRIER; ok && kind <= DDL_EXSCAN; kind++) {
        for (int i = 0; ok && i < 3; i++) {
            coll_case k = {.kind = (ddl_kind)kind, .dtype = DDL_F32, .op = coll_reduces((ddl_kind)kind) ? DDL_SUM : 0,
                           .root = coll_rooted((ddl_kind)kind) ? (kind * 5 + i) % n : 0, .count = counts[i],
                           .in_place = i == 1, .salt = (unsigned)(kind * 3 + i)};
            ok = coll_check(ddl_world(c), &k);
        }
    }
    CHECK(ok);
    coll_leave(c);
}

TEST(sixteen_ranks) {
    coll_job job;
    coll_job_make(&job);
    ranks_fork(16, sixteen, &job, 60);
}

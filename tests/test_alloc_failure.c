/* An allocator that fails at the n-th call, once or from then on, in one rank, through a whole life: init, collectives,
 * messages, a split, finalize. Every failure is a status; peers do not hang; nothing leaks; the next try works.
 * tests/run: waits=yes timeout=150
 * TEST_TORTURE tries every n. FAULT_N=17 tries one. */
#define TEST_TIMEOUT_S 3000
#include "faults.h"

enum { RANKS = 3 };

typedef struct memory {
    long calls, fail_at, held; /* fail_at 0: never */
    int persistent;
} memory;

static void *take(void *user, size_t bytes) {
    memory *m = (memory *)user;
    long n = __atomic_add_fetch(&m->calls, 1, __ATOMIC_SEQ_CST);
    if (m->fail_at > 0 && (n == m->fail_at || (m->persistent && n > m->fail_at))) {
        return NULL;
    }
    __atomic_add_fetch(&m->held, 1, __ATOMIC_SEQ_CST);
    return malloc(bytes);
}

static void give(void *user, void *block) {
    memory *m = (memory *)user;
    __atomic_sub_fetch(&m->held, 1, __ATOMIC_SEQ_CST);
    free(block);
}

typedef struct job {
    int port;
    const char *over; /* this transport and no other; NULL: those that there are */
    char secret[65];
    memory memory[RANKS];
    ddl_status status[RANKS];
    char why[RANKS][600];
} job;

static void on_log(void *user, ddl_log_level level, const char *line) {
    (void)user;
    (void)level;
    (void)line;
}

/* The first error of the life of a rank; after it the rank only leaves. */
static ddl_status messages(ddl_group *g, int me) {
    static const int64_t counts[] = {3, 60000};
    ddl_status status = DDL_OK;
    for (int i = 0; i < 2 && status == DDL_OK; i++) {
        size_t count = (size_t)counts[i];
        int *out = (int *)calloc(count, sizeof *out), *in = (int *)calloc(count, sizeof *in);
        for (size_t k = 0; k < count; k++) {
            out[k] = me * 1000 + (int)k;
        }
        status = ddl_send_recv(g, ddl_tensor_1d(out, DDL_I32, counts[i]), (me + 1) % RANKS, i,
                               ddl_tensor_1d(in, DDL_I32, counts[i]), (me + RANKS - 1) % RANKS, i, NULL);
        if (status == DDL_OK) {
            CHECK_EQ(in[count - 1], (me + RANKS - 1) % RANKS * 1000 + (int)count - 1);
        }
        free(out);
        free(in);
    }
    return status;
}

static ddl_status work(ddl_group *world) {
    ddl_group *half = NULL;
    int me = ddl_rank(world);
    int32_t flag = 1;
    ddl_status status = fault_all_reduces(world, 6);
    status = status < 0 ? status : messages(world, me);
    status = status < 0 ? status : ddl_group_split(world, me % 2, 0, &half);
    if (half != NULL) {
        status = status < 0 ? status : fault_all_reduces(half, 3);
        CHECK_EQ(ddl_group_free(&half), DDL_OK);
    }
    status = status < 0 ? status : ddl_agree(world, &flag);
    return status < 0 ? status : ddl_barrier(world);
}

static void life(int rank, int n, void *arg) {
    job *j = (job *)arg;
    char place[64];
    ddl_context *c = NULL;
    snprintf(place, sizeof place, "tcp://127.0.0.1:%d", j->port);
    ddl_config config = {.world_size = n,
                         .rank = rank,
                         .rendezvous = place,
                         .transports = j->over,
                         .secret = j->secret,
                         .secret_bytes = 64,
                         .timeout_ms = (int64_t)(1500 * test_slow()),
                         .init_timeout_ms = (int64_t)(1500 * test_slow()),
                         .log = on_log,
                         .allocator = {take, give, &j->memory[rank]},
                         .error_text = j->why[rank],
                         .error_bytes = sizeof j->why[rank]};
    ddl_status status = ddl_init(&config, &c);
    if (status == DDL_OK) {
        status = work(ddl_world(c));
        if (status < 0) {
            snprintf(j->why[rank], sizeof j->why[rank], "%s", ddl_error(c));
        }
        CHECK_EQ(ddl_finalize(&c), DDL_OK);
    } else {
        CHECK(c == NULL);
    }
    j->status[rank] = status;
    CHECK_EQ(j->memory[rank].held, 0);
}

/* One job. Returns how often the victim allocated. */
static long run(const char *over, int victim, long fail_at, int persistent) {
    job *j = (job *)calloc(1, sizeof *j);
    double start = test_now_s();
    int before = test__now->failures;
    j->port = ranks_port();
    j->over = over;
    ranks_secret(j->secret);
    j->memory[victim].fail_at = fail_at;
    j->memory[victim].persistent = persistent;
    ranks_threads(RANKS, life, j);
    for (int i = 0; i < RANKS; i++) {
        if (fail_at == 0) {
            CHECK_EQ(j->status[i], DDL_OK);
        } else if (j->status[i] < 0) {
            /* a sentence, and of the victim the true reason, unless a peer's failure came back first */
            CHECK(j->why[i][0] != 0);
            CHECK(j->status[i] != DDL_ERR_INTERNAL && j->status[i] != DDL_ERR_CORRUPT);
        }
    }
    CHECK(test_now_s() - start < 8 * test_slow());
    long calls = j->memory[victim].calls;
    if (test__now->failures != before || getenv("FAULT_SHOW") != NULL) {
        printf("  allocation %ld of rank %d fails%s: %.2f s\n", fail_at, victim, persistent ? " and all after it" : "",
               test_now_s() - start);
        for (int i = 0; i < RANKS; i++) {
            printf("    rank %d: %s %s\n", i, ddl_status_name(j->status[i]), j->why[i]);
        }
    }
    free(j);
    return calls;
}

static void failures(const char *what, const char *over, int normal) {
    uint64_t random = fault_seed(what);
    int fds = fault_fds();
    long calls[RANKS], tried = 0;
    for (int i = 0; i < RANKS; i++) {
        calls[i] = run(over, i, 0, 0);
        CHECK(calls[i] > 20);
    }
    const char *one = getenv("FAULT_N");
    long runs = one != NULL ? 1 : fault_torture() ? calls[0] * 2 * RANKS : fault_runs(normal, normal);
    for (long i = 0; i < runs && test__now->failures < 20; i++) {
        int victim = fault_torture() ? (int)(i % RANKS) : (int)(fault_random(&random) % RANKS);
        int persistent = (int)(i / RANKS % 2);
        long n = one != NULL ? atol(one) : fault_torture() ? i / RANKS / 2 + 1
                                         : 1 + (long)(fault_random(&random) % (uint64_t)calls[victim]);
        run(over, victim, n, persistent);
        tried++;
    }
    run(over, 0, 0, 0); /* after all that, everything works */
    CHECK_EQ(fault_fds(), fds);
    printf("  %ld failures of %ld, %ld and %ld allocations\n", tried, calls[0], calls[1], calls[2]);
}

TEST(a_failed_allocation_is_a_status_and_the_next_try_works) { failures("allocations", NULL, 24); }

/* The plugin takes its memory of the same allocator. */
TEST(so_it_is_over_libfabric) {
    if (!fault_has_plugin("fabric")) {
        SKIP("libddl-fabric.so is not built; make plugins builds it, where libfabric is");
    }
    setenv("DDL_PLUGIN_PATH", fault_plugins(), 1);
    run("fabric:tcp", 0, 0, 0); /* what libfabric opens for the whole process */
    failures("allocations over libfabric", "fabric:tcp", 24);
}

/* A rank that is stopped (SIGSTOP) is slow, not dead: nobody declares it dead, and after SIGCONT everything ends with the
 * right bits. With a deadline the operation fails on all ranks with a sentence that names it, and the group can be made
 * anew. The stall report says who is missing.
 * tests/run: timeout=120 waits=yes */
#define TEST_TIMEOUT_S 1500
#include "faults.h"

enum { RANKS = 4 };

typedef struct shared {
    int64_t timeout_ms, stall_ms, count;
    int victim;
    volatile int running, rounds, stop; /* stop: this round is the last */
    volatile int done[RANKS];
    char sentence[RANKS][1100];
    char stalled[RANKS][1100]; /* the last stall report before it was done; earlier ones are of a slow machine */
    int rank_of_log[RANKS];
} shared;

static shared *now;

static void on_log(void *user, ddl_log_level level, const char *line) {
    int rank = *(const int *)user;
    (void)level;
    if (strstr(line, "stalled for") != NULL && !now->done[rank]) {
        snprintf(now->stalled[rank], sizeof now->stalled[rank], "%s", line);
    }
    if (strstr(line, "is dead") != NULL) {
        test__fail(__FILE__, __LINE__, "false death: %s", line);
    }
}

static ddl_context *join(int rank, const shared *s) {
    char why[1024] = "";
    ddl_context *c = NULL;
    now->rank_of_log[rank] = rank;
    ddl_config config = {.timeout_ms = s->timeout_ms, .stall_ms = s->stall_ms, .log = on_log,
                         .log_user = &now->rank_of_log[rank], .error_text = why, .error_bytes = sizeof why};
    if (ddl_init(&config, &c) != DDL_OK) {
        test__fail(__FILE__, __LINE__, "ddl_init: %s", why);
    }
    return c;
}

/* All ranks stop after the same round: rank 0 broadcasts the word. */
static void reduce_until_told(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    (void)n;
    ddl_context *c = join(rank, s);
    REQUIRE(c != NULL);
    ddl_group *world = ddl_world(c);
    __atomic_fetch_add(&s->running, 1, __ATOMIC_SEQ_CST);
    int32_t stop = 0;
    for (int64_t i = 0; !stop; i++) {
        ddl_status status = fault_all_reduce(world, i % 4 == 0 ? 300007 : 100 + i % 1000, i);
        if (status != DDL_OK) {
            test__fail(__FILE__, __LINE__, "%s: %s", ddl_status_name(status), ddl_error(c));
            break;
        }
        stop = s->stop;
        REQUIRE(ddl_broadcast(world, DDL_VIEW(&stop, 1), 0) == DDL_OK);
        s->rounds += rank == 0;
    }
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

static void until_running(const shared *s) {
    double limit = test_now_s() + 30 * test_slow();
    while (s->running < RANKS && test_now_s() < limit) {
        usleep(500);
    }
}

TEST(a_stopped_rank_is_not_dead_and_goes_on) {
    uint64_t random = fault_seed("stops");
    int stops = fault_runs(4, 100);
    shared *s = now = (shared *)ranks_shared(sizeof *s);
    s->timeout_ms = 60000;
    s->stall_ms = 700;
    ranks r;
    ranks_start(&r, RANKS, reduce_until_told, s);
    until_running(s);
    for (int i = 0; i < stops; i++) {
        int victim = (int)(fault_random(&random) % RANKS), rounds = s->rounds;
        unsigned span = 500000 + (unsigned)(fault_random(&random) % (fault_torture() || i == 0 ? 2500000 : 500000));
        ranks_kill(&r, victim, SIGSTOP);
        usleep(span);
        ranks_kill(&r, victim, SIGCONT);
        usleep(100000);
        double limit = test_now_s() + 10 * test_slow();
        while (s->rounds < rounds + 3 && test_now_s() < limit) { /* it goes on after each */
            usleep(1000);
        }
        CHECK(s->rounds >= rounds + 3);
    }
    s->stop = 1;
    CHECK_EQ(ranks_wait(&r, 30), 0);
    CHECK(!r.timed_out);
    printf("  %d stops, %d rounds of all_reduce and broadcast\n", stops, s->rounds);
}

/* Fails at the deadline, waits until the stopped rank is back, shrinks: all are left. */
static void reduce_until_timeout(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    ddl_context *c = join(rank, s);
    REQUIRE(c != NULL);
    ddl_group *world = ddl_world(c), *again = NULL;
    ddl_status status = DDL_OK;
    __atomic_fetch_add(&s->running, 1, __ATOMIC_SEQ_CST);
    for (int64_t i = 0; status == DDL_OK; i++) {
        status = fault_all_reduce(world, s->count, i);
    }
    snprintf(s->sentence[rank], sizeof s->sentence[rank], "%s", ddl_error(c));
    CHECK_EQ(status, DDL_ERR_TIMEOUT);
    s->done[rank] = 1;
    double limit = test_now_s() + 20 * test_slow();
    while (!s->stop && test_now_s() < limit) {
        usleep(1000);
    }
    ddl_group_options patient = {.timeout_ms = 20000};
    CHECK_EQ(ddl_group_set(world, &patient), DDL_OK);
    status = ddl_group_shrink(world, &again);
    if (status != DDL_OK) {
        test__fail(__FILE__, __LINE__, "shrink: %s: %s", ddl_status_name(status), ddl_error(c));
        return;
    }
    CHECK_EQ(ddl_size(again), n);
    CHECK_EQ(ddl_rank(again), rank);
    CHECK_EQ(fault_all_reduces(again, 50), DDL_OK);
    CHECK_EQ(ddl_group_free(&again), DDL_OK);
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

static void stop_past_the_deadline(int victim, int64_t count) {
    shared *s = now = (shared *)ranks_shared(sizeof *s);
    char name[16];
    s->timeout_ms = 1500;
    s->stall_ms = 400;
    s->count = count;
    s->victim = victim;
    ranks r;
    ranks_start(&r, RANKS, reduce_until_timeout, s);
    until_running(s);
    usleep(20000);
    ranks_kill(&r, victim, SIGSTOP);
    double limit = test_now_s() + 15 * test_slow();
    for (int done = 0; done < RANKS - 1 && test_now_s() < limit;) {
        done = 0;
        for (int i = 0; i < RANKS; i++) {
            done += s->done[i];
        }
        usleep(1000);
    }
    ranks_kill(&r, victim, SIGCONT);
    s->stop = 1;
    CHECK_EQ(ranks_wait(&r, 40), 0);
    CHECK(!r.timed_out);
    snprintf(name, sizeof name, "rank %d (does", victim);
    for (int i = 0; i < RANKS; i++) {
        if (i != victim) {
            CHECK_STR(s->sentence[i], name);
            CHECK_STR(s->stalled[i], name);
        }
    }
    CHECK_STR(s->sentence[victim], "gave up"); /* it learns that the others gave up */
}

TEST(the_deadline_names_the_stopped_rank_on_all_ranks_small) { stop_past_the_deadline(2, 10); }

TEST(the_deadline_names_the_stopped_rank_on_all_ranks_large) { stop_past_the_deadline(0, 3000000); }

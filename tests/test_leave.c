/* Leaving: in order, early, late, without a word, by abort, twice, with work under way; and children of fork.
 * tests/run: timeout=120 */
#define TEST_TIMEOUT_S 600
#include "faults.h"

enum { RANKS = 4 };

typedef struct shared {
    int mask, mode;
    volatile int running, stop;
    volatile double killed;
    volatile double noticed[RANKS];
    volatile int child;
    char sentence[RANKS][1100];
} shared;

static ddl_context *join(int64_t timeout_ms) {
    char why[1024] = "";
    ddl_context *c = NULL;
    setenv("DDL_LOG", "none", 1);
    ddl_config config = {.timeout_ms = timeout_ms, .error_text = why, .error_bytes = sizeof why};
    if (ddl_init(&config, &c) != DDL_OK) {
        test__fail(__FILE__, __LINE__, "ddl_init: %s", why);
    }
    return c;
}

static void leave(ddl_context *c) {
    double start = test_now_s();
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
    CHECK(c == NULL);
    CHECK(test_now_s() - start < 2 * test_slow());
}

static void until(volatile int *value, int wanted) {
    double limit = test_now_s() + 30 * test_slow();
    while (*value < wanted && test_now_s() < limit) {
        usleep(500);
    }
}

/* All_reduces until one fails; remembers when and why. */
static ddl_status reduce_until_error(ddl_context *c, shared *s, int rank) {
    ddl_status status = DDL_OK;
    __atomic_fetch_add(&s->running, 1, __ATOMIC_SEQ_CST);
    for (int64_t i = 0; status == DDL_OK; i++) {
        status = fault_all_reduce(ddl_world(c), 1 + i % 1000, i);
    }
    s->noticed[rank] = test_now_s();
    snprintf(s->sentence[rank], sizeof s->sentence[rank], "%s", ddl_error(c));
    return status;
}

static void barrier_and_leave(int rank, int n, void *arg) {
    (void)arg;
    (void)n;
    ddl_context *c = join(20000);
    REQUIRE(c != NULL);
    for (int i = 0; i < 5; i++) {
        ddl_status status = i % 2 == 0 ? ddl_barrier(ddl_world(c)) : fault_all_reduce(ddl_world(c), 1000, i);
        if (status != DDL_OK) {
            test__fail(__FILE__, __LINE__, "%s: %s", ddl_status_name(status), ddl_error(c));
        }
        if ((rank + i) % 3 == 0) {
            usleep(2000);
        }
    }
    leave(c);
}

TEST(who_leaves_right_after_a_barrier_fails_nobody) {
    for (int i = 0; i < fault_runs(15, 300); i++) {
        ranks_fork(RANKS, barrier_and_leave, NULL, 30);
    }
}

static void leave_early(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    (void)n;
    ddl_context *c = join(20000);
    REQUIRE(c != NULL);
    CHECK_EQ(fault_all_reduces(ddl_world(c), 3), DDL_OK);
    if (rank != 1) {
        CHECK_EQ(reduce_until_error(c, s, rank), DDL_ERR_PEER);
    }
    leave(c);
}

TEST(who_leaves_early_is_named) {
    shared *s = (shared *)ranks_shared(sizeof *s);
    ranks_fork(RANKS, leave_early, s, 30);
    for (int i = 0; i < RANKS; i++) {
        if (i != 1) {
            CHECK_STR(s->sentence[i], "rank 1 has left the job");
        }
    }
}

static void exit_without_a_word(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    (void)n;
    ddl_context *c = join(20000);
    REQUIRE(c != NULL);
    CHECK_EQ(fault_all_reduces(ddl_world(c), 3), DDL_OK);
    if (rank == 2) {
        s->killed = test_now_s();
        _exit(0);
    }
    CHECK_EQ(reduce_until_error(c, s, rank), DDL_ERR_PEER);
    leave(c);
}

TEST(an_exit_without_finalize_is_a_death) {
    shared *s = (shared *)ranks_shared(sizeof *s);
    ranks_fork(RANKS, exit_without_a_word, s, 30);
    for (int i = 0; i < RANKS; i++) {
        if (i != 2) {
            CHECK_STR(s->sentence[i], "rank 2 (pid ");
            CHECK_STR(s->sentence[i], "its process ended");
            CHECK(s->noticed[i] - s->killed < 1.0 * test_slow());
        }
    }
}

/* Survivors do not even look at what happened: they finalize. */
static void finalize_beside_the_dead(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    (void)n;
    ddl_context *c = join(20000);
    REQUIRE(c != NULL);
    CHECK_EQ(fault_all_reduces(ddl_world(c), 6), DDL_OK);
    __atomic_fetch_add(&s->running, 1, __ATOMIC_SEQ_CST);
    if (s->mask >> rank & 1) {
        until(&s->stop, 2); /* is killed here */
    }
    float out[4] = {0};
    ddl_request *pending = NULL;
    if (s->mode == 1) { /* with work under way */
        CHECK_EQ(ddl_irecv(ddl_world(c), DDL_ARRAY(out), DDL_ANY_SOURCE, 7, &pending), DDL_OK);
    }
    until(&s->stop, 1);
    leave(c);
}

TEST(finalize_never_waits_for_the_dead) {
    shared *s = (shared *)ranks_shared(sizeof *s);
    for (int mask = 1; mask < 1 << RANKS; mask += 1 + (fault_torture() ? 0 : mask % 3)) {
        memset(s, 0, sizeof *s);
        s->mask = mask;
        s->mode = mask & 1;
        ranks r;
        ranks_start(&r, RANKS, finalize_beside_the_dead, s);
        until(&s->running, RANKS);
        for (int i = 0; i < RANKS; i++) {
            if (mask >> i & 1) {
                ranks_kill(&r, i, SIGKILL);
            }
        }
        s->stop = 1;
        ranks_wait(&r, 20);
        CHECK(!r.timed_out);
        for (int i = 0; i < RANKS; i++) {
            CHECK_EQ(r.status[i], mask >> i & 1 ? SIGKILL : 0);
        }
    }
}

/* mode 0: the others are in an all_reduce; 1: in a receive; 2: in ddl_agree. */
static void abort_reaches_all(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    (void)n;
    ddl_context *c = join(20000);
    REQUIRE(c != NULL);
    ddl_group *world = ddl_world(c);
    CHECK_EQ(ddl_barrier(world), DDL_OK);
    if (rank == 1) {
        usleep(30000);
        s->killed = test_now_s();
        CHECK_EQ(ddl_abort(c, "the loss is NaN"), DDL_OK);
        CHECK(test_now_s() - s->killed < 0.2 * test_slow());
        CHECK_EQ(ddl_abort(c, "again"), DDL_OK);
        CHECK_EQ(ddl_barrier(world), DDL_ERR_ABORTED);
    } else {
        float x = 0;
        int32_t flag = 1;
        ddl_status status = s->mode == 0 ? ddl_all_reduce(world, DDL_VIEW(&x, 1), DDL_VIEW(&x, 1), DDL_SUM)
                            : s->mode == 1 ? ddl_recv(world, DDL_VIEW(&x, 1), (rank + 1) % RANKS, 3, NULL)
                                           : ddl_agree(world, &flag);
        s->noticed[rank] = test_now_s();
        snprintf(s->sentence[rank], sizeof s->sentence[rank], "%s", ddl_error(c));
        CHECK_EQ(status, DDL_ERR_ABORTED);
        CHECK_EQ(ddl_barrier(world), DDL_ERR_ABORTED);
        CHECK_EQ(ddl_agree(world, &flag), DDL_ERR_ABORTED);
    }
    usleep(50000);
    leave(c);
}

TEST(abort_reaches_all) {
    shared *s = (shared *)ranks_shared(sizeof *s);
    for (int mode = 0; mode < 3; mode++) {
        memset(s, 0, sizeof *s);
        s->mode = mode;
        ranks_fork(RANKS, abort_reaches_all, s, 30);
        for (int i = 0; i < RANKS; i++) {
            if (i != 1) {
                CHECK_STR(s->sentence[i], "rank 1 aborted the job: the loss is NaN");
                CHECK(s->noticed[i] - s->killed < 1.0 * test_slow());
            }
        }
    }
}

static void misuse(int rank, int n, void *arg) {
    (void)arg;
    int fds = fault_fds();
    ddl_context *c = join(20000), *none = NULL;
    REQUIRE(c != NULL);
    ddl_group *world = ddl_world(c), *half = NULL, *late = NULL;
    float x = 1, kept = 0;
    CHECK_EQ(ddl_finalize(NULL), DDL_OK);
    CHECK_EQ(ddl_finalize(&none), DDL_OK);
    CHECK_EQ(ddl_init(NULL, NULL), DDL_ERR_ARG);
    CHECK_EQ(ddl_abort(NULL, NULL), DDL_ERR_ARG);
    CHECK_EQ(ddl_agree(world, NULL), DDL_ERR_ARG);
    CHECK_EQ(ddl_agree(NULL, NULL), DDL_ERR_ARG);
    CHECK_EQ(ddl_group_shrink(world, NULL), DDL_ERR_ARG);
    CHECK_EQ(ddl_group_shrink(NULL, &late), DDL_ERR_ARG);
    CHECK_EQ(ddl_group_split(world, rank % 2, 0, &half), DDL_OK);
    ddl_request *r = NULL;
    CHECK_EQ(ddl_irecv(world, DDL_VIEW(&kept, 1), (rank + 1) % n, 9, &r), DDL_OK);
    CHECK_EQ(ddl_barrier(world), DDL_OK);
    ddl_context *copy = c;
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
    CHECK_EQ(ddl_finalize(&c), DDL_OK); /* NULL by now */
    /* half keeps the context's shell: calls on it say so */
    CHECK_EQ(ddl_all_reduce(half, DDL_VIEW(&x, 1), DDL_VIEW(&x, 1), DDL_SUM), DDL_ERR_STATE);
    CHECK_EQ(ddl_agree(half, &(int32_t){1}), DDL_ERR_STATE);
    CHECK_EQ(ddl_group_shrink(half, &late), DDL_ERR_STATE);
    CHECK_EQ(ddl_finalize(&copy), DDL_ERR_STATE);
    CHECK_STR(ddl_error(ddl_group_context(half)), "finalized");
    CHECK_EQ(ddl_group_free(&half), DDL_OK);
    CHECK_EQ(ddl_group_free(&half), DDL_OK);
    CHECK_EQ(fault_fds(), fds);
}

TEST(misuse_around_finalize_gives_a_status) { ranks_fork(RANKS, misuse, NULL, 30); }

/* Messages in order, each with its number, until the link breaks under a rank that lives: rank 1 shuts its own sockets. */
static void cut_own_links(void) {
    for (int fd = 3; fd < 100; fd++) {
        struct sockaddr_storage peer;
        socklen_t bytes = sizeof peer;
        if (getpeername(fd, (struct sockaddr *)&peer, &bytes) == 0) {
            shutdown(fd, SHUT_RDWR);
        }
    }
}

static void count_until_cut(int rank, int n, void *arg) {
    (void)arg;
    ddl_context *c = join(20000);
    REQUIRE(c != NULL);
    ddl_status status = DDL_OK;
    double start = test_now_s();
    for (int64_t i = 0; status == DDL_OK && i < 1000000; i++) {
        int64_t theirs = -1, mine = i;
        status = ddl_send_recv(ddl_world(c), DDL_VIEW(&mine, 1), (rank + 1) % n, 1, DDL_VIEW(&theirs, 1),
                               (rank + n - 1) % n, 1, NULL);
        if (status == DDL_OK) {
            CHECK_EQ(theirs, i);
        }
        if (rank == 1 && i == 100) {
            cut_own_links();
        }
    }
    CHECK_EQ(status, DDL_ERR_PEER);
    CHECK(test_now_s() - start < 6 * test_slow());
    leave(c);
}

TEST(a_broken_link_is_an_error_and_not_a_gap) {
    for (int i = 0; i < 3; i++) {
        ranks_fork(2, count_until_cut, NULL, 30);
    }
}

/* The child of fork: every call says so; what it keeps open hides nothing. */
static void parent_of_a_child(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    (void)n;
    ddl_context *c = join(20000);
    REQUIRE(c != NULL);
    ddl_group *world = ddl_world(c);
    CHECK_EQ(fault_all_reduces(world, 6), DDL_OK);
    if (rank == 3) {
        pid_t child = fork();
        if (child == 0) {
            float x = 1;
            ddl_request *r = NULL;
            ddl_stats stats;
            prctl(PR_SET_PDEATHSIG, 0);
            setpgid(0, 0); /* the parent is killed, this process lives on and keeps its sockets */
            CHECK_EQ(ddl_barrier(world), DDL_ERR_FORK);
            CHECK_EQ(ddl_all_reduce(world, DDL_VIEW(&x, 1), DDL_VIEW(&x, 1), DDL_SUM), DDL_ERR_FORK);
            CHECK_EQ(ddl_isend(world, DDL_VIEW(&x, 1), 0, 0, &r), DDL_ERR_FORK);
            CHECK_EQ(ddl_stats_get(c, &stats), DDL_ERR_FORK);
            CHECK_EQ(ddl_agree(world, &(int32_t){1}), DDL_ERR_FORK);
            CHECK_EQ(ddl_progress(c), DDL_ERR_FORK);
            CHECK_EQ(ddl_abort(c, "child"), DDL_ERR_FORK);
            CHECK_EQ(ddl_finalize(&c), DDL_ERR_FORK);
            s->child = (int)getpid();
            double limit = test_now_s() + 20 * test_slow();
            while (!s->stop && test_now_s() < limit) {
                usleep(1000);
            }
            _exit(0);
        }
        until(&s->child, 1);
        CHECK_EQ(fault_all_reduces(world, 6), DDL_OK); /* the parent goes on undisturbed */
        s->killed = test_now_s();
        raise(SIGKILL);
    }
    CHECK_EQ(fault_all_reduces(world, 6), DDL_OK);
    CHECK_EQ(reduce_until_error(c, s, rank), DDL_ERR_PEER);
    leave(c);
}

TEST(a_child_of_fork_is_told_and_does_not_hide_a_death) {
    shared *s = (shared *)ranks_shared(sizeof *s);
    ranks r;
    ranks_start(&r, RANKS, parent_of_a_child, s);
    ranks_wait(&r, 30);
    s->stop = 1;
    CHECK(!r.timed_out);
    for (int i = 0; i < RANKS; i++) {
        CHECK_EQ(r.status[i], i == 3 ? SIGKILL : 0);
        if (i != 3) {
            CHECK_STR(s->sentence[i], "rank 3 (pid ");
            CHECK(s->noticed[i] - s->killed < 1.0 * test_slow());
        }
    }
}

/* The harness itself: a failed check, a rank that fails, dies or hangs must be seen, or every other test is worthless.
 * tests/run: variants=gcc,asan,tsan */
#include "ranks.h"

#include <fcntl.h>

/* Runs fn as a test of its own and returns how many checks failed in it, quietly, without counting them here. */
static int failures_in(void (*fn)(void)) {
    test__counters before = *test__now;
    int keep = dup(2), null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    fflush(stderr);
    dup2(null, 2);
    test__now->failures = 0;
    fn();
    int found = test__now->failures;
    fflush(stderr);
    dup2(keep, 2);
    close(keep);
    close(null);
    *test__now = before;
    return found;
}

static void wrong_checks(void) {
    CHECK(1 == 2);
    CHECK_EQ(1, 2);
    CHECK_EQ(-1, ~0ull);
    CHECK_EQ(0.5, 0);
    CHECK_EQ("a", (const char *)"b");
    CHECK_STR("abc", "d");
    CHECK_STR((const char *)NULL, "d");
    REQUIRE(0);
    CHECK(0);
}

static void right_checks(void) {
    float f = 3;
    unsigned char c = 3;
    char text[] = "rank 3";
    CHECK(1);
    CHECK_EQ(f, 3);
    CHECK_EQ(c, 3ull);
    CHECK_EQ(text, "rank 3");
    CHECK_STR(text, "k 3");
    CHECK_EQ((void *)text, (const void *)text);
    REQUIRE(1);
}

TEST(wrong_checks_fail_and_go_on_but_require_leaves) { CHECK_EQ(failures_in(wrong_checks), 8); }
TEST(right_checks_pass) { CHECK_EQ(failures_in(right_checks), 0); }

static void count(int rank, int n, void *arg) {
    int *seen = (int *)arg;
    CHECK(rank >= 0 && rank < n);
    __atomic_fetch_add(&seen[rank], 1, __ATOMIC_RELAXED);
}

static void leave_out(int rank, int n, void *arg) {
    int left_out = 0;
    (void)rank, (void)n, (void)arg;
    for (unsigned i = 0; i < 9; i++) {
        left_out += test_left_out(i);
    }
    CHECK_EQ(left_out, 6);
}

TEST(what_all_ranks_leave_out_is_counted_once) {
    const char *before = getenv("TEST_SAMPLE");
    char kept[16];
    snprintf(kept, sizeof kept, "%s", before != NULL ? before : "1");
    setenv("TEST_SAMPLE", "3", 1);
    ranks_threads(4, leave_out, NULL);
    ranks_fork(4, leave_out, NULL, 20);
    setenv("TEST_SAMPLE", kept, 1);
    CHECK_EQ(test__now->left_out, 12);
    test__now->left_out = 0; /* the sums have none of it */
}

/* Seven tests go into three parts, none into two. */
TEST(parts_make_the_whole) {
    const char *before = getenv("TEST_PART");
    char kept[16], part[16];
    snprintf(kept, sizeof kept, "%s", before != NULL ? before : "0/1");
    int runs[7] = {0};
    for (int i = 0; i < 3; i++) {
        snprintf(part, sizeof part, "%d/3", i);
        setenv("TEST_PART", part, 1);
        for (int test = 0; test < 7; test++) {
            runs[test] += test__is_of_part(test);
        }
    }
    setenv("TEST_PART", kept, 1);
    for (int test = 0; test < 7; test++) {
        CHECK_EQ(runs[test], 1);
    }
}

TEST(threads_are_all_run_once) {
    int seen[8] = {0};
    ranks_threads(8, count, seen);
    for (int i = 0; i < 8; i++) {
        CHECK_EQ(seen[i], 1);
    }
}

static void check_env(int rank, int n, void *arg) {
    count(rank, n, arg);
    CHECK_EQ(atoi(getenv("RANK")), rank);
    CHECK_EQ(atoi(getenv("WORLD_SIZE")), n);
    CHECK_EQ(getenv("MASTER_ADDR"), "127.0.0.1");
    CHECK(atoi(getenv("MASTER_PORT")) > 1024);
    CHECK_EQ(strlen(getenv("DDL_SECRET")), 64);
}

TEST(forked_ranks_are_all_run_once_with_an_environment) {
    int *seen = (int *)ranks_shared(5 * sizeof *seen);
    ranks_fork(5, check_env, seen, 10);
    for (int i = 0; i < 5; i++) {
        CHECK_EQ(seen[i], 1);
    }
    CHECK(getenv("RANK") == NULL);
}

static void fail_on_one(int rank, int n, void *arg) {
    (void)n, (void)arg;
    CHECK(rank != 1);
}
static void exit_on_one(int rank, int n, void *arg) {
    (void)n, (void)arg;
    if (rank == 1) {
        _exit(3);
    }
}
static void crash_on_one(int rank, int n, void *arg) {
    (void)n, (void)arg;
    if (rank == 1) {
        raise(SIGKILL);
    }
}
static void hang_on_one(int rank, int n, void *arg) {
    (void)n, (void)arg;
    while (rank == 1) {
        pause();
    }
}
static void failing_check(void) { ranks_fork(2, fail_on_one, NULL, 10); }
static void failing_thread(void) { ranks_threads(2, fail_on_one, NULL); }
static void failing_exit(void) { ranks_fork(2, exit_on_one, NULL, 10); }
static void failing_crash(void) { ranks_fork(2, crash_on_one, NULL, 10); }
static void failing_hang(void) { ranks_fork(2, hang_on_one, NULL, 0.2); }

TEST(a_rank_that_fails_exits_crashes_or_hangs_fails_the_test) {
    CHECK_EQ(failures_in(failing_check), 1);
    CHECK_EQ(failures_in(failing_thread), 1);
    CHECK_EQ(failures_in(failing_exit), 1);
    CHECK_EQ(failures_in(failing_crash), 1);
    CHECK_EQ(failures_in(failing_hang), 2); /* the timeout, and the rank it killed */
}

TEST(a_killed_rank_is_told_apart) {
    ranks r;
    ranks_start(&r, 2, hang_on_one, NULL);
    ranks_kill(&r, 1, SIGSTOP);
    ranks_kill(&r, 1, SIGKILL);
    CHECK_EQ(ranks_wait(&r, 10), 1);
    CHECK_EQ(r.timed_out, 0);
    CHECK(WIFSIGNALED(r.status[1]) && WTERMSIG(r.status[1]) == SIGKILL);
    CHECK_EQ(r.status[0], 0);
}

static void ends_itself(void) { _exit(3); }
static void fails_apart(void) { CHECK(0); }
static void of_many_ranks(void) {
    ranks_threads(3, count, NULL);
    CHECK(0); /* is not reached */
}

static test__case apart_case;
static void run_apart(void) { test__run_apart(&apart_case); }

TEST(a_test_in_a_process_of_its_own_is_seen_to_fail) {
    apart_case.run = ends_itself;
    CHECK_EQ(failures_in(run_apart), 1);
    apart_case.run = fails_apart;
    CHECK_EQ(failures_in(run_apart), 1);
}

TEST(a_test_in_a_process_of_its_own_is_skipped_for_its_ranks) {
    test__counters before = *test__now;
    apart_case.run = of_many_ranks;
    setenv("TEST_MOST_RANKS", "2", 1);
    test__run_apart(&apart_case);
    unsetenv("TEST_MOST_RANKS");
    test__counters after = *test__now;
    *test__now = before;
    CHECK_EQ(after.failures, before.failures);
    CHECK_STR(after.reason, "so many ranks");
    CHECK_EQ(after.skipped, 1);
}

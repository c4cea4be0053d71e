/* The collectives with a count per rank: zero, uneven and large parts, packed and with gaps, offsets NULL; by every
 * algorithm that serves them. Gaps keep what was in them.
 * tests/run: variants=gcc,asan timeout=120 */
#include "coll.h"

enum { PATTERNS = 6 };

/* Lengths of the parts. With `square` there is one for each pair of ranks. */
static void make_counts(int pattern, int n, bool square, unsigned *random, int64_t *counts) {
    for (int i = 0; i < (square ? n * n : n); i++) {
        unsigned draw = coll_random(random);
        int64_t table[PATTERNS] = {0, i == n / 2, (int64_t)i % n, draw % 2 ? 0 : 17 + draw % 100, 1000 + draw % 3,
                                   i == n - 1 ? 50001 : draw % 4};
        counts[i] = table[pattern];
    }
}

static bool run_kind(ddl_group *g, ddl_kind kind, const char *algorithm, unsigned *random) {
    int n = ddl_size(g);
    int64_t *counts = (int64_t *)calloc((size_t)n * (size_t)n, sizeof *counts);
    bool ok = true;
    for (int i = 0; ok && i < 3 * PATTERNS; i++) {
        unsigned draw = coll_random(random);
        static const int64_t gaps[] = {-1, 0, 3};
        make_counts(i / 3, n, kind == DDL_ALL_TO_ALLV, random, counts);
        coll_case k = {.kind = kind,
                       .dtype = draw % 2 ? DDL_F32 : DDL_I64,
                       .op = coll_reduces(kind) ? DDL_SUM : DDL_OP_NONE,
                       .root = coll_rooted(kind) ? (int)(draw / 2 % (unsigned)n) : 0,
                       .in_place = kind != DDL_ALL_TO_ALLV && draw / 64 % 2,
                       .way = (coll_way)(draw / 128 % 3),
                       .salt = draw % 50,
                       .algorithm = algorithm,
                       .counts = counts,
                       .gap = kind == DDL_REDUCE_SCATTERV ? -1 : gaps[i % 3]}; /* which has no offsets */
        ok = test_left_out(draw / 4096) || coll_check(g, &k);
    }
    free(counts);
    return ok;
}

static void rank_main(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    unsigned random = coll_seed() + (unsigned)n;
    REQUIRE(c != NULL);
    bool ok = true;
    for (int kind = DDL_GATHERV; ok && kind <= DDL_ALL_TO_ALLV; kind++) {
        ok = run_kind(ddl_world(c), (ddl_kind)kind, "auto", &random);
        for (int a = 0; ok && a < COLL_ALGOS; a++) {
            if (coll_algos[a].kind == coll_base((ddl_kind)kind)) {
                ok = coll_force(ddl_world(c), coll_algos[a].setting) &&
                     run_kind(ddl_world(c), (ddl_kind)kind, coll_algos[a].setting, &random);
            }
        }
    }
    coll_leave(c);
}

static void run_ranks(int n) {
    coll_job job;
    coll_job_make(&job);
    printf("     TEST_SEED=%u\n", coll_seed());
    ranks_fork(n, rank_main, &job, 50);
}

TEST(one_rank) { run_ranks(1); }
TEST(two_ranks) { run_ranks(2); }
TEST(three_ranks) { run_ranks(3); }
TEST(four_ranks) { run_ranks(4); }
TEST(seven_ranks) { run_ranks(7); }
TEST(eight_ranks) { run_ranks(8); }
TEST(sixteen_ranks) { run_ranks(16); }

/* Wrong arrays are refused before anything is sent, and the group goes on. */
static void refused(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    ddl_group *g = ddl_world(c);
    float in[8] = {0}, out[8] = {0};
    int64_t good[2] = {4, 4}, negative[2] = {9, -1}, large[2] = {4, 5}, outside[2] = {0, 5};
    int64_t huge[2] = {INT64_MAX, INT64_MAX};
    CHECK(ddl_all_gatherv(g, DDL_VIEW(in, 4), DDL_ARRAY(out), NULL, NULL) == DDL_ERR_ARG);
    CHECK_STR(ddl_error(c), "NULL");
    CHECK(ddl_all_gatherv(g, DDL_VIEW(in, 4), DDL_ARRAY(out), negative, NULL) == DDL_ERR_ARG);
    CHECK(ddl_all_gatherv(g, DDL_VIEW(in, 4), DDL_ARRAY(out), large, NULL) == DDL_ERR_ARG);
    CHECK(ddl_all_gatherv(g, DDL_VIEW(in, 4), DDL_ARRAY(out), huge, NULL) == DDL_ERR_ARG);
    CHECK(ddl_all_gatherv(g, DDL_VIEW(in, 4), DDL_ARRAY(out), good, outside) == DDL_ERR_ARG);
    CHECK_STR(ddl_error(c), "rank 1");
    CHECK(ddl_all_gatherv(g, DDL_VIEW(in, 3), DDL_ARRAY(out), good, NULL) == DDL_ERR_ARG);
    CHECK_STR(ddl_error(c), "counts");
    CHECK(ddl_all_to_allv(g, DDL_ARRAY(in), good, NULL, DDL_ARRAY(out), NULL, NULL) == DDL_ERR_ARG);
    CHECK(ddl_all_to_allv(g, DDL_ARRAY(in), good, NULL, DDL_ARRAY(in), good, NULL) == DDL_ERR_ARG);
    CHECK(ddl_all_gatherv(g, DDL_VIEW(in, 4), DDL_ARRAY(out), good, NULL) == DDL_OK);
    coll_leave(c);
}

TEST(wrong_arrays_are_refused) {
    coll_job job;
    coll_job_make(&job);
    ranks_fork(2, refused, &job, 20);
}

/* In all_to_allv only the pair knows its length. When the two do not agree it is an error with both, not a hang. */
static void pair_differs(int rank, int n, void *arg) {
    const coll_job *job = (const coll_job *)arg;
    ddl_context *c = coll_join(rank, n, job);
    REQUIRE(c != NULL);
    float in[30] = {0}, out[30] = {0};
    int64_t sends[3] = {5, 5, 5}, takes[3] = {5, 5, 5};
    sends[2] = rank == 0 ? job->config.stall_ms - 1000 : 5; /* rank 2 expects 5 */
    double start = test_now_s();
    ddl_status status = ddl_all_to_allv(ddl_world(c), DDL_ARRAY(in), sends, NULL, DDL_ARRAY(out), takes, NULL);
    status = status == DDL_OK ? ddl_barrier(ddl_world(c)) : status;
    CHECK_EQ(status, DDL_ERR_MISMATCH);
    CHECK_STR(ddl_error(c), "rank 0");
    CHECK_STR(ddl_error(c), "rank 2");
    CHECK(test_now_s() - start < 3 * test_slow());
    coll_leave(c);
}

static void run_pair(int length) {
    coll_job job;
    coll_job_make(&job);
    job.config.stall_ms = 1000 + length;
    ranks_fork(3, pair_differs, &job, 40);
}

TEST(a_pair_that_sends_more_than_expected) { run_pair(7); }
TEST(a_pair_that_sends_less_than_expected) { run_pair(3); }
TEST(a_pair_that_sends_nothing) { run_pair(0); }

/* Every collective gives what its definition says: blocking and as a request, in place and apart, by every algorithm, with
 * every root, at counts that are zero, odd, not divisible and large; as processes and as threads.
 * tests/run: variants=gcc,asan timeout=240 */
#include "coll.h"

typedef struct grid {
    coll_job job;
    int64_t large; /* counts above this are left out */
    unsigned sample; /* of 16 cases with large counts, this many are run */
} grid;

static int64_t count_number(int i, int n) {
    int64_t counts[] = {0, 1, 2, n - 1, n, 2 * n + 1, 1000, 8191, 100003, 1000003};
    return i < 10 ? counts[i] : -1;
}

/* One count by one algorithm: both ways, both places; the root differs from case to case. */
static bool run_count(ddl_group *g, const grid *t, const coll_algo *a, int64_t count, unsigned *random) {
    int n = ddl_size(g);
    bool many = coll_many_in(a->kind) || coll_many_out(a->kind);
    if (count > t->large || (many && count * n > 4 * t->large)) {
        return true;
    }
    for (int variant = 0; variant < 4; variant++) {
        unsigned draw = coll_random(random);
        coll_case k = {.kind = a->kind,
                       .dtype = DDL_F32,
                       .op = coll_reduces(a->kind) ? DDL_SUM : DDL_OP_NONE,
                       .root = coll_rooted(a->kind) ? (int)(draw % (unsigned)n) : 0,
                       .count = count,
                       .in_place = (variant & 1) != 0,
                       .way = (variant & 2) != 0 ? COLL_REQUEST : COLL_BLOCKING,
                       .salt = draw % 100,
                       .algorithm = a->setting};
        if ((count > 2000 && draw / 256 % 16 >= t->sample) || test_left_out(draw / 4096)) {
            continue;
        }
        if (!coll_check(g, &k)) {
            return false;
        }
    }
    return true;
}

static void rank_main(int rank, int n, void *arg) {
    const grid *t = (const grid *)arg;
    unsigned random = coll_seed() * 977u + (unsigned)n;
    ddl_context *c = coll_join(rank, n, &t->job);
    REQUIRE(c != NULL);
    ddl_group *g = ddl_world(c);
    bool ok = true;
    for (int a = -1; a < COLL_ALGOS && ok; a++) {
        ok = coll_force(g, a < 0 ? "auto" : coll_algos[a].setting);
        for (int i = 0; ok && count_number(i, n) >= 0; i++) {
            for (int kind = DDL_BARRIER; a < 0 && ok && kind <= DDL_EXSCAN; kind++) {
                coll_algo automatic = {(ddl_kind)kind, "auto"};
                ok = run_count(g, t, &automatic, count_number(i, n), &random);
            }
            ok = ok && (a < 0 || run_count(g, t, &coll_algos[a], count_number(i, n), &random));
        }
    }
    coll_leave(c);
}

static void run_grid(int n, int64_t large, unsigned sample, bool threads) {
    static grid t;
    const char *largest = getenv("TEST_LARGEST");
    int64_t most = largest != NULL ? strtoll(largest, NULL, 10) : large;
    t = (grid){.large = most < large ? most : large, .sample = sample};
    coll_job_make(&t.job);
    printf("     %d ranks, TEST_SEED=%u\n", n, coll_seed());
    if (threads) {
        ranks_threads(n, rank_main, &t);
    } else {
        ranks_fork(n, rank_main, &t, 55);
    }
}

TEST(one_rank) { run_grid(1, 1000003, 2, false); }
TEST(two_ranks) { run_grid(2, 1000003, 3, false); }
TEST(three_ranks) { run_grid(3, 1000003, 2, false); }
TEST(four_ranks) { run_grid(4, 1000003, 2, false); }
TEST(seven_ranks) { run_grid(7, 100003, 3, false); }
TEST(eight_ranks) { run_grid(8, 100003, 3, false); }
TEST(sixteen_ranks) { run_grid(16, 8191, 2, false); }
TEST(four_ranks_as_threads) { run_grid(4, 100003, 2, true); }

/* Each root in turn, by each algorithm of the rooted kinds. */
static void every_root(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    bool ok = true;
    for (int a = 0; a < COLL_ALGOS && ok; a++) {
        ok = !coll_rooted(coll_algos[a].kind) || coll_force(ddl_world(c), coll_algos[a].setting);
        for (int i = 0; ok && coll_rooted(coll_algos[a].kind) && i < 2 * n; i++) {
            coll_case k = {.kind = coll_algos[a].kind, .dtype = DDL_I32, .op = DDL_SUM, .root = i % n,
                           .count = i < n ? 37 : 12345, .in_place = i % 2 == 0, .algorithm = coll_algos[a].setting};
            ok = test_left_out((unsigned)(a * 7 + i)) || coll_check(ddl_world(c), &k);
        }
    }
    coll_leave(c);
}

TEST(every_root) {
    static const int sizes[] = {2, 5, 8};
    for (int i = 0; i < 3; i++) {
        coll_job job;
        coll_job_make(&job);
        ranks_fork(sizes[i], every_root, &job, 50);
    }
}

/* Scalars, and a tensor of no dimensions: one element. */
static void scalars(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    double value = rank + 1, most = rank * 3;
    CHECK(ddl_all_reduce_scalar(ddl_world(c), &value, DDL_SUM) == DDL_OK);
    CHECK_EQ(value, n * (n + 1) / 2);
    CHECK(ddl_all_reduce_scalar(ddl_world(c), &most, DDL_MAX) == DDL_OK);
    CHECK_EQ(most, (n - 1) * 3);
    int32_t one = rank;
    ddl_tensor t = ddl_tensor_nd(&one, DDL_I32, 0, NULL);
    CHECK(ddl_all_reduce(ddl_world(c), t, t, DDL_SUM) == DDL_OK);
    CHECK_EQ(one, n * (n - 1) / 2);
    coll_leave(c);
}

TEST(scalars) {
    coll_job job;
    coll_job_make(&job);
    ranks_fork(3, scalars, &job, 20);
}

/* Many operations in flight: on one group and on several, waited for in another order, mixed with messages, with ranks that
 * come late so that frames arrive before their call; and what a rank may store for one that runs ahead is bounded.
 * tests/run: variants=gcc,asan,tsan timeout=120 */
#include "coll.h"

enum { FLYING = 24, GROUPS = 3 };

static const ddl_kind kinds[] = {DDL_ALL_REDUCE, DDL_BROADCAST, DDL_ALL_GATHER, DDL_REDUCE_SCATTER, DDL_ALL_TO_ALL,
                                 DDL_REDUCE,     DDL_BARRIER,   DDL_SCAN,       DDL_GATHER,         DDL_SCATTER};

/* One round: everything is started, late here and there, then waited for in an order of this rank's own. */
static void flight(ddl_group **groups, int count, unsigned *common, unsigned *own, bool late) {
    static __thread coll_case k[FLYING];
    static __thread coll_run x[FLYING];
    ddl_request *r[FLYING];
    int64_t arrays[64]; /* of the v-forms, which are not here */
    int n = ddl_size(groups[0]), order[FLYING];
    for (int i = 0; i < FLYING; i++) {
        unsigned draw = coll_random(common);
        static const int64_t sizes[] = {1, 100, 5000, 40000};
        k[i] = (coll_case){.kind = kinds[draw % 10], .dtype = DDL_F32, .count = sizes[draw / 16 % 4], .way = COLL_REQUEST,
                           .salt = draw % 40, .in_place = draw / 64 % 2};
        k[i].op = coll_reduces(k[i].kind) ? DDL_SUM : DDL_OP_NONE;
        k[i].root = coll_rooted(k[i].kind) ? (int)(draw / 128 % (unsigned)n) : 0;
        coll_prepare(&k[i], n, ddl_rank(groups[0]), &x[i]);
        order[i] = i;
    }
    for (int i = 0; i < FLYING; i++) {
        if (late && coll_random(own) % 6 == 0) {
            usleep(coll_random(own) % 3000);
        }
        ddl_group *g = groups[i % count];
        if (coll_call(g, &k[i], x[i].in_tensor, x[i].out_tensor, arrays, &r[i]) != DDL_OK) {
            test__fail(__FILE__, __LINE__, "operation %d: %s", i, ddl_error(ddl_group_context(g)));
            r[i] = NULL;
        }
    }
    for (int i = 0; i < FLYING; i++) {
        int j = i + (int)(coll_random(own) % (unsigned)(FLYING - i)), at = order[j];
        order[j] = order[i];
        CHECK_EQ(ddl_wait(&r[at], NULL), DDL_OK);
    }
    for (int i = 0; i < FLYING; i++) {
        coll_verify(&k[i], n, &x[i]);
        coll_release(&x[i]);
    }
}

static void rank_main(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    unsigned common = coll_seed(), own = coll_seed() * 31 + (unsigned)rank;
    ddl_group *groups[GROUPS] = {ddl_world(c), NULL, NULL};
    for (int i = 1; i < GROUPS; i++) {
        REQUIRE(ddl_group_duplicate(ddl_world(c), &groups[i]) == DDL_OK);
    }
    for (int round = 0; round < 6; round++) {
        flight(groups, 1, &common, &own, round % 2 == 1);
        flight(groups, GROUPS, &common, &own, round % 2 == 1);
    }
    CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
    for (int i = 1; i < GROUPS; i++) {
        CHECK_EQ(ddl_group_free(&groups[i]), DDL_OK);
    }
    coll_leave(c);
}

static void run_ranks(int n, ranks_fn fn, bool threads, bool progress) {
    static coll_job job;
    coll_job_make(&job);
    job.config.progress_thread = progress;
    if (threads) {
        ranks_threads(n, fn, &job);
    } else {
        ranks_fork(n, fn, &job, 50);
    }
}

TEST(two_ranks) { run_ranks(2, rank_main, false, false); }
TEST(three_ranks) { run_ranks(3, rank_main, false, false); }
TEST(five_ranks) { run_ranks(5, rank_main, false, false); }
TEST(four_ranks_as_threads) { run_ranks(4, rank_main, true, false); }
TEST(three_ranks_with_a_progress_thread) { run_ranks(3, rank_main, false, true); }

/* Messages between the collectives, with the same peers, small and large, on the same group. */
static void with_messages(int rank, int n, void *arg) {
    enum { LARGE = 50000, ROUNDS = 12 };
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    ddl_group *g = ddl_world(c);
    int next = (rank + 1) % n, previous = (rank + n - 1) % n;
    int32_t *out = (int32_t *)malloc(LARGE * 4), *in = (int32_t *)malloc(LARGE * 4), *sum = (int32_t *)malloc(LARGE * 4);
    for (int round = 0; round < ROUNDS; round++) {
        int count = round % 3 == 0 ? LARGE : 1 + round * 100, wrong = 0;
        ddl_request *r[4];
        for (int i = 0; i < count; i++) {
            out[i] = rank * 1000 + i + round;
            in[i] = -1;
            sum[i] = rank + i;
        }
        CHECK_EQ(ddl_irecv(g, DDL_VIEW(in, count), previous, round, &r[0]), DDL_OK);
        CHECK_EQ(ddl_iall_reduce(g, DDL_VIEW(sum, count), DDL_VIEW(sum, count), DDL_SUM, &r[1]), DDL_OK);
        CHECK_EQ(ddl_isend(g, DDL_VIEW(out, count), next, round, &r[2]), DDL_OK);
        CHECK_EQ(ddl_ibarrier(g, &r[3]), DDL_OK);
        int32_t at;
        for (int i = 0; i < 4; i++) {
            CHECK_EQ(ddl_wait_any(r, 4, &at, NULL), DDL_OK);
        }
        for (int i = 0; i < count; i++) {
            wrong += in[i] != previous * 1000 + i + round || sum[i] != n * i + n * (n - 1) / 2;
        }
        CHECK_EQ(wrong, 0);
    }
    free(out);
    free(in);
    free(sum);
    coll_leave(c);
}

TEST(mixed_with_messages) { run_ranks(4, with_messages, false, false); }

/* Rank 0 sends small broadcasts as fast as it can to ranks that come late. What they store meanwhile is bounded by a
 * window for each sender, the sender is held back, and nothing is lost. */
static void far_ahead(int rank, int n, void *arg) {
    enum { MESSAGES = 6000, WORDS = 64 };
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    uint64_t most = 0;
    int wrong = 0;
    for (int i = 0; i < MESSAGES; i++) {
        int32_t x[WORDS];
        for (int j = 0; j < WORDS; j++) {
            x[j] = rank == 0 ? i + j : -1;
        }
        if (rank != 0 && i % 1000 == 0) {
            usleep(50000);
            ddl_stats stats;
            for (int k = 0; k < 20; k++) {
                CHECK_EQ(ddl_progress(c), DDL_OK);
                CHECK_EQ(ddl_stats_get(c, &stats), DDL_OK);
                most = stats.unexpected_bytes > most ? stats.unexpected_bytes : most;
            }
        }
        ddl_status status = ddl_broadcast(ddl_world(c), DDL_ARRAY(x), 0);
        if (status != DDL_OK) {
            test__fail(__FILE__, __LINE__, "broadcast %d: %s", i, ddl_error(c));
            break;
        }
        for (int j = 0; j < WORDS; j++) {
            wrong += x[j] != i + j;
        }
    }
    CHECK_EQ(wrong, 0);
    CHECK(most <= 128 * 1024); /* the window: docs/design.md */
    const char *transports = getenv("DDL_TRANSPORTS"); /* shared memory holds the sender back before anybody stores */
    CHECK(rank != 1 || most > 0 || (transports != NULL && strcmp(transports, "shm") == 0)); /* it did run ahead */
    ddl_stats stats;
    CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
    CHECK_EQ(ddl_stats_get(c, &stats), DDL_OK);
    CHECK_EQ(stats.unexpected_bytes, 0);
    coll_leave(c);
}

TEST(a_rank_far_ahead_is_held_back) { run_ranks(4, far_ahead, false, false); }

/* The sizes of broadcasts that fill windows in the least fitting ways: the receiver never speaks, nobody may hang. */
static void awkward_sizes(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    static __thread char x[33000];
    unsigned random = coll_seed();
    for (int i = 0; i < 1500; i++) {
        unsigned draw = coll_random(&random);
        int64_t count = draw % 5 == 0 ? 32768 : draw % 5 == 1 ? 1 : draw / 8 % 32769;
        int root = i < 700 ? 0 : i < 1400 ? n - 1 : (int)(draw / 16 % (unsigned)n);
        memset(x, rank == root ? i : -1, sizeof x);
        if (ddl_broadcast(ddl_world(c), ddl_tensor_1d(x, DDL_I8, count), root) != DDL_OK) {
            test__fail(__FILE__, __LINE__, "broadcast %d of %lld: %s", i, (long long)count, ddl_error(c));
            break;
        }
        bool kept = rank == root || count == 33000 || x[count] == -1;
        CHECK(kept && (count == 0 || (x[0] == (char)i && x[count - 1] == (char)i)));
    }
    coll_leave(c);
}

TEST(awkward_sizes) { run_ranks(3, awkward_sizes, false, false); }

/* Tensors with strides, in and out, in every collective: every other element, backward, transposed with gaps. What lies
 * between the elements keeps its bytes.
 * tests/run: variants=gcc,asan timeout=120 */
#include "coll.h"

static bool run_kind(ddl_group *g, ddl_kind kind, unsigned *random) {
    static const int64_t sizes[] = {0, 1, 3, 6, 999, 30000};
    int n = ddl_size(g);
    int64_t counts[64];
    bool ok = true;
    for (int i = 0; ok && i < 6 * 16; i++) {
        unsigned draw = coll_random(random);
        int64_t count = sizes[i % 6];
        if (count > 1000 && draw % 4 != 0) {
            continue;
        }
        for (int r = 0; r < n * n; r++) {
            counts[r] = (count + r * 7 + kind) % (count / n + 5);
        }
        coll_case k = {.kind = kind,
                       .dtype = draw % 2 ? DDL_F32 : DDL_BF16,
                       .op = coll_reduces(kind) ? DDL_SUM : DDL_OP_NONE,
                       .root = coll_rooted(kind) ? (int)(draw / 2 % (unsigned)n) : 0,
                       .count = count,
                       .in_layout = (coll_layout)(i / 6 % 4),
                       .out_layout = (coll_layout)(i / 24 % 4),
                       .in_place = kind != DDL_ALL_TO_ALLV && draw / 64 % 4 == 0,
                       .way = (coll_way)(draw / 256 % 3),
                       .salt = draw % 50};
        if (kind >= DDL_GATHERV) {
            k.counts = counts;
            k.gap = kind == DDL_REDUCE_SCATTERV ? -1 : (int)(draw / 1024 % 3);
        }
        ok = coll_check(g, &k);
    }
    return ok;
}

static void rank_main(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    unsigned random = coll_seed() + (unsigned)n;
    REQUIRE(c != NULL);
    for (int kind = DDL_BROADCAST; kind <= DDL_ALL_TO_ALLV; kind++) {
        if (!run_kind(ddl_world(c), (ddl_kind)kind, &random)) {
            break;
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

/* Of two values for one place one would be lost: such a view can be read, and not written. */
static void onto_itself(int rank, int n, void *arg) {
    static const struct {
        int64_t shape[3], strides[3];
        bool meets;
    } views[] = {
        {{2, 3, 1}, {0, 1, 0}, true},   {{2, 3, 1}, {1, 0, 0}, true},  {{2, 3, 1}, {2, 1, 7}, true},
        {{2, 3, 1}, {-2, 1, 1}, true},  {{3, 1, 2}, {1, 0, 2}, true},  {{2, 3, 1}, {3, 1, 0}, false},
        {{2, 3, 1}, {3, 2, 0}, false},  {{2, 3, 1}, {1, 2, 0}, false}, {{1, 2, 3}, {0, -1, 2}, false},
        {{2, 3, 1}, {-3, -1, 0}, false}};
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    ddl_group *g = ddl_world(c);
    for (size_t i = 0; i < sizeof views / sizeof views[0]; i++) {
        float memory[40] = {0}, plain[6] = {1, 2, 3, 4, 5, 6};
        ddl_tensor t = ddl_tensor_nd(memory + 20, DDL_F32, 3, views[i].shape);
        memcpy(t.strides, views[i].strides, sizeof views[i].strides);
        ddl_status expect = views[i].meets ? DDL_ERR_ARG : DDL_OK;
        CHECK_EQ(ddl_all_reduce(g, DDL_ARRAY(plain), t, DDL_SUM), expect);
        CHECK(expect == DDL_OK || strstr(ddl_error(c), "more than once") != NULL);
        CHECK_EQ(ddl_all_reduce_many(g, &t, 1, DDL_SUM), expect);
        CHECK_EQ(ddl_all_reduce(g, t, DDL_ARRAY(plain), DDL_SUM), DDL_OK); /* it can be read */
        if (rank == 0 || !views[i].meets) {                                /* and sent by the root */
            CHECK_EQ(ddl_broadcast(g, t, 0), DDL_OK);
        } else {
            CHECK_EQ(ddl_broadcast(g, t, 0), DDL_ERR_ARG);
            CHECK_EQ(ddl_broadcast(g, DDL_ARRAY(plain), 0), DDL_OK);
        }
    }
    coll_leave(c);
}

TEST(outputs_that_overlap_themselves_are_refused) {
    coll_job job;
    coll_job_make(&job);
    ranks_fork(2, onto_itself, &job, 30);
}

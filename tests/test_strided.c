/* Tensors with strides, in and out, in every collective: every other element, backward, transposed with gaps. What lies
 * between the elements keeps its bytes.
 * tests/run: variants=gcc,asan timeout=120 */
#define DDL_IMPLEMENTATION
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

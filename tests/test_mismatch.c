/* Ranks that call different collectives: all of them get DDL_ERR_MISMATCH with both calls in the sentence, soon, and the
 * tensors are as they were. Every pair of kinds, and one argument that differs, at sizes that go at once and that wait.
 * A rank whose part of its call had ended in order learns it at its next call.
 * tests/run: variants=gcc,asan timeout=240 */
#define TEST_TIMEOUT_S 110
#define DDL_IMPLEMENTATION
#include "coll.h"

typedef struct pair {
    coll_case common, deviant;
    const char *words[2]; /* of both calls, in the sentence */
    int first;            /* the deviant rank makes its calls in another order, when > 0: see twist */
} pair;

static const char *const kind_names[] = {"?", "barrier", "broadcast", "reduce", "all_reduce", "gather", "scatter",
                                         "all_gather", "reduce_scatter", "all_to_all", "scan", "exscan"};

static coll_case plain_case(ddl_kind kind, int64_t count) {
    coll_case k = {.kind = kind, .dtype = DDL_F32, .op = coll_reduces(kind) ? DDL_SUM : DDL_OP_NONE, .count = count};
    return k;
}

/* The rooted kinds and the scans may have taken what a rank that called the same sent them: then the result is whole. */
static bool may_be_whole(ddl_kind kind) { return coll_rooted(kind) || kind == DDL_SCAN || kind == DDL_EXSCAN; }

static void check_untouched(const coll_case *k, int n, coll_run *x, const unsigned char *before) {
    if (x->in.memory != NULL) {
        coll_compare(k, n, &x->in, "in");
    }
    if (memcmp(x->out.memory, before, x->out.bytes) == 0) {
        return;
    }
    if (!may_be_whole(k->kind) || !coll_compare(k, n, &x->out, "out of a rank that got an error")) {
        char text[300];
        coll_describe(k, n, text, sizeof text);
        test__fail(__FILE__, __LINE__, "%s: a mismatch has changed out", text);
    }
}

/* One rank's part: its call, then a barrier. One of the two reports the mismatch. */
static bool meet(ddl_group *g, const pair *p, bool deviates, bool by_request) {
    int n = ddl_size(g), rank = ddl_rank(g);
    ddl_context *c = ddl_group_context(g);
    coll_case k = deviates ? p->deviant : p->common;
    coll_run x;
    int64_t arrays[64];
    ddl_request *r = NULL;
    k.way = by_request ? COLL_REQUEST : COLL_BLOCKING;
    coll_prepare(&k, n, rank, &x);
    unsigned char *before = (unsigned char *)malloc(x.out.bytes + 1);
    if (x.out.bytes > 0) {
        memcpy(before, x.out.memory, x.out.bytes);
    }
    double start = test_now_s();
    ddl_status status = coll_call(g, &k, x.in_tensor, x.out_tensor, arrays, &r);
    status = status == DDL_OK && by_request ? ddl_wait(&r, NULL) : status;
    if (status != DDL_OK && x.out.bytes > 0) {
        check_untouched(&k, n, &x, before);
    }
    status = status == DDL_OK ? ddl_barrier(g) : status;
    double took = test_now_s() - start;
    const char *why = ddl_error(c);
    bool ok = status == DDL_ERR_MISMATCH && strstr(why, p->words[0]) && strstr(why, p->words[1]) && took < 1.5 * test_slow();
    if (!ok) {
        char text[300];
        coll_describe(&k, n, text, sizeof text);
        test__fail(__FILE__, __LINE__, "%s (against %s and %s): %s after %.2f s: %s", text, p->words[0], p->words[1],
                   ddl_status_name(status), took, why);
    }
    ok = ok && ddl_barrier(g) == DDL_ERR_MISMATCH; /* the group stays broken, for all later calls */
    coll_release(&x);
    free(before);
    return ok;
}

enum { PAIRS_MAX = 400 };
typedef struct mismatch_job {
    coll_job job;
    int count, n;
    pair pairs[PAIRS_MAX];
} mismatch_job;

/* Every pair in a group of its own, because a mismatch breaks the group. */
static void rank_main(int rank, int n, void *arg) {
    const mismatch_job *m = (const mismatch_job *)arg;
    ddl_context *c = coll_join(rank, n, &m->job);
    REQUIRE(c != NULL);
    unsigned random = coll_seed() + (unsigned)n;
    for (int i = 0; i < m->count; i++) {
        unsigned draw = coll_random(&random);
        ddl_group *g = NULL;
        if (ddl_group_duplicate(ddl_world(c), &g) != DDL_OK) {
            test__fail(__FILE__, __LINE__, "duplicate: %s", ddl_error(c));
            break;
        }
        bool ok = meet(g, &m->pairs[i], rank == (int)(draw % (unsigned)n), draw / 16 % 2);
        CHECK(ddl_group_free(&g) == DDL_OK);
        if (!ok) {
            break;
        }
    }
    coll_leave(c);
}

static void run_pairs(mismatch_job *m, int n) {
    coll_job_make(&m->job);
    m->n = n;
    printf("     %d mismatches on %d ranks, TEST_SEED=%u\n", m->count, n, coll_seed());
    ranks_fork(n, rank_main, m, 100);
}

static mismatch_job job; /* shared with forked ranks as it was before */

static void add(const coll_case *common, const coll_case *deviant, const char *one, const char *two) {
    job.pairs[job.count++] = (pair){.common = *common, .deviant = *deviant, .words = {one, two}};
}

/* All ordered pairs of kinds. */
static void kinds_by_kinds(int n, int64_t count) {
    job.count = 0;
    for (int a = DDL_BARRIER; a <= DDL_EXSCAN; a++) {
        for (int b = DDL_BARRIER; b <= DDL_EXSCAN; b++) {
            coll_case one = plain_case((ddl_kind)a, count), two = plain_case((ddl_kind)b, count);
            if (a != b) {
                add(&one, &two, kind_names[a], kind_names[b]);
            }
        }
    }
    run_pairs(&job, n);
}

TEST(kinds_on_two_ranks) { kinds_by_kinds(2, 100); }
TEST(kinds_on_three_ranks) { kinds_by_kinds(3, 100); }
TEST(kinds_on_four_ranks) { kinds_by_kinds(4, 20); }
TEST(kinds_on_two_ranks_large) { kinds_by_kinds(2, 30000); }
TEST(kinds_on_four_ranks_large) { kinds_by_kinds(4, 60000); }

/* One argument differs. */
static void arguments(int n, int64_t count, const char *here, const char *there) {
    job.count = 0;
    for (int a = DDL_BROADCAST; a <= DDL_EXSCAN; a++) {
        coll_case one = plain_case((ddl_kind)a, count), two = one;
        two.count = count + 1;
        add(&one, &two, here, there);
        two = one;
        two.dtype = DDL_I32;
        add(&one, &two, "x f32", "x i32");
        two = one;
        two.op = DDL_MAX;
        if (coll_reduces((ddl_kind)a)) {
            add(&one, &two, "sum", "max");
        }
        two = one;
        two.root = 1;
        if (coll_rooted((ddl_kind)a)) {
            add(&one, &two, "root 0", "root 1");
        }
    }
    run_pairs(&job, n);
}

TEST(arguments_on_two_ranks) { arguments(2, 100, "100 x", "101 x"); }
TEST(arguments_on_three_ranks) { arguments(3, 7, "7 x", "8 x"); }
TEST(arguments_on_four_ranks_large) { arguments(4, 40000, "40000 x", "40001 x"); }

/* Two calls in another order, both under way. */
static void order(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    float a[10] = {0}, b[20] = {0};
    ddl_request *r[2] = {NULL, NULL};
    for (int i = 0; i < 2; i++) { /* a rank that comes late may find the group broken before its first call */
        ddl_tensor t = i == (rank == n - 1) ? DDL_ARRAY(a) : DDL_ARRAY(b);
        ddl_status status = ddl_iall_reduce(ddl_world(c), t, t, DDL_SUM, &r[i]);
        CHECK(status == DDL_OK || status == DDL_ERR_MISMATCH);
    }
    ddl_status expect = r[0] == NULL ? DDL_OK : DDL_ERR_MISMATCH;
    CHECK_EQ(ddl_wait_all(r, 2, NULL), expect);
    CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_ERR_MISMATCH);
    CHECK_STR(ddl_error(c), "10 x f32");
    CHECK_STR(ddl_error(c), "20 x f32");
    coll_leave(c);
}

TEST(calls_in_another_order) {
    for (int n = 2; n <= 4; n++) {
        coll_job j;
        coll_job_make(&j);
        ranks_fork(n, order, &j, 20);
    }
}

/* The root of a small broadcast has ended before anybody could object. It computes for a while; its next call says it. */
static void root_ended(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    int32_t x = 5, y = 6;
    if (rank == 0) {
        CHECK_EQ(ddl_broadcast(ddl_world(c), DDL_VIEW(&x, 1), 0), DDL_OK);
        usleep(300000);
        CHECK_EQ(ddl_broadcast(ddl_world(c), DDL_VIEW(&x, 1), 0), DDL_ERR_MISMATCH);
    } else {
        CHECK_EQ(ddl_all_reduce(ddl_world(c), DDL_VIEW(&x, 1), DDL_VIEW(&y, 1), DDL_SUM), DDL_ERR_MISMATCH);
        CHECK_EQ(y, 6);
    }
    CHECK_STR(ddl_error(c), "broadcast");
    CHECK_STR(ddl_error(c), "all_reduce");
    coll_leave(c);
}

TEST(a_root_that_had_ended) {
    coll_job j;
    coll_job_make(&j);
    ranks_fork(3, root_ended, &j, 20);
}

/* A rank that runs far ahead with small broadcasts: the other call is found at the first, not lost with the records. */
static void far_ahead(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    char x = 1;
    ddl_status status = DDL_OK;
    if (rank == 1) {
        usleep(200000);
        status = ddl_all_reduce(ddl_world(c), ddl_tensor_1d(&x, DDL_I8, 1), ddl_tensor_1d(&x, DDL_I8, 1), DDL_SUM);
    }
    for (int i = 0; i < 3000 && rank == 0 && status == DDL_OK; i++) {
        status = ddl_broadcast(ddl_world(c), ddl_tensor_1d(&x, DDL_I8, 1), 0);
    }
    CHECK_EQ(status, DDL_ERR_MISMATCH);
    CHECK_STR(ddl_error(c), "broadcast");
    CHECK_STR(ddl_error(c), "all_reduce");
    coll_leave(c);
}

TEST(a_rank_far_ahead) {
    coll_job j;
    coll_job_make(&j);
    ranks_fork(2, far_ahead, &j, 20);
}

/* An op of the user does not become a sum, and reduce_scatterv with other counts is another call. */
static void v_counts(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    float in[12] = {0}, out[6] = {0};
    int64_t counts[3] = {4, 4, 4};
    if (rank == 2) {
        counts[0] = 3;
        counts[1] = 5;
    }
    CHECK_EQ(ddl_reduce_scatterv(ddl_world(c), DDL_ARRAY(in), DDL_VIEW(out, counts[rank]), counts, DDL_SUM),
             DDL_ERR_MISMATCH);
    CHECK_STR(ddl_error(c), "reduce_scatterv");
    coll_leave(c);
}

TEST(counts_of_v_forms) {
    coll_job j;
    coll_job_make(&j);
    ranks_fork(3, v_counts, &j, 20);
}

/* Ranks that call different collectives: all of them get DDL_ERR_MISMATCH with both calls in the sentence, soon, and the
 * tensors are as they were. Every pair of kinds, and one argument that differs, at sizes that go at once and that wait.
 * A rank whose part of its call had ended in order learns it at its next call.
 * tests/run: variants=gcc,asan timeout=240 */
#define TEST_TIMEOUT_S 110
#include "coll.h"

#include <stdatomic.h>

typedef struct pair {
    coll_case common, deviant;
    const char *words[2]; /* of both calls, in the sentence */
    int first;            /* the deviant rank makes its calls in another order, when > 0: see twist */
} pair;

static const char *const kind_names[] = {"?", "barrier", "broadcast", "reduce", "all_reduce", "gather", "scatter",
                                         "all_gather", "reduce_scatter", "all_to_all", "scan", "exscan", "gatherv",
                                         "scatterv", "all_gatherv", "reduce_scatterv", "all_to_allv"};

/* A v-form has the same count everywhere. */
static coll_case plain_case(ddl_kind kind, int64_t count) {
    static int64_t counts[16];
    coll_case k = {.kind = kind, .dtype = DDL_F32, .op = coll_reduces(kind) ? DDL_SUM : DDL_OP_NONE, .count = count};
    for (int i = 0; i < 16 && kind >= DDL_GATHERV; i++) {
        counts[i] = count;
        k.counts = counts;
    }
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
        if (test_left_out(draw / 4096)) {
            continue;
        }
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
    for (int a = DDL_BARRIER; a <= DDL_ALL_TO_ALLV; a++) {
        for (int b = DDL_BARRIER; b <= DDL_ALL_TO_ALLV; b++) {
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

/* A rank that is still in ddl_init when the others differ gets their sentence from there: so they differ when all are out. */
static _Atomic int *joined;

static void run_joined(int n, ranks_fn fn, void *arg) {
    joined = joined != NULL ? joined : ranks_shared(sizeof *joined);
    atomic_store(joined, 0);
    ranks_fork(n, fn, arg, 20);
}

static ddl_context *join_all(int rank, int n, const coll_job *job) {
    ddl_context *c = coll_join(rank, n, job);
    atomic_fetch_add(joined, 1);
    while (c != NULL && atomic_load(joined) < n) { /* ranks_fork has the deadline */
        ddl_progress(c);
        usleep(1000);
    }
    return c;
}

/* Two calls in another order, both under way. */
static void order(int rank, int n, void *arg) {
    ddl_context *c = join_all(rank, n, (const coll_job *)arg);
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
        run_joined(n, order, &j);
    }
}

/* The root of a small broadcast has ended before anybody could object. It computes for a while; its next call says it. */
static void root_ended(int rank, int n, void *arg) {
    ddl_context *c = join_all(rank, n, (const coll_job *)arg);
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
    run_joined(3, root_ended, &j);
}

/* A rank that runs far ahead with small broadcasts: the other call is found at the first, not lost with the records. */
static void far_ahead(int rank, int n, void *arg) {
    ddl_context *c = join_all(rank, n, (const coll_job *)arg);
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
    run_joined(2, far_ahead, &j);
}

/* ---- what the count of elements does not say ---- */

/* The call of rank 1 differs from the others' in `which`. All get the sentence, with two calls that do not look alike. */
static void unlike(int rank, int n, void *arg, void (*call)(ddl_group *g, bool deviates)) {
    ddl_context *c = join_all(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    call(ddl_world(c), rank == 1);
    const char *one = strstr(ddl_error(c), " called "), *two = one != NULL ? strstr(one + 8, " called ") : NULL;
    const char *end = one != NULL ? strstr(one, ", but") : NULL, *stop = two != NULL ? strstr(two, ". All") : NULL;
    if (end == NULL || stop == NULL || (end - one == stop - two && memcmp(one, two, (size_t)(end - one)) == 0)) {
        test__fail(__FILE__, __LINE__, "the two calls look alike: %s", ddl_error(c));
    }
    coll_leave(c);
}

static float v_in[12], v_out[12];

static void v_call(ddl_group *g, ddl_kind kind, bool deviates) {
    int64_t counts[3] = {4, 4, 4};
    counts[0] -= deviates;
    counts[1] += deviates; /* the same in all, and on this rank another part than the others believe */
    int64_t own = counts[ddl_rank(g)];
    ddl_tensor all_in = DDL_ARRAY(v_in), all_out = DDL_ARRAY(v_out), in = DDL_VIEW(v_in, own), out = DDL_VIEW(v_out, own);
    memset(v_out, 0x7f, sizeof v_out);
    ddl_status status = kind == DDL_GATHERV          ? ddl_gatherv(g, in, all_out, counts, NULL, 0)
                        : kind == DDL_SCATTERV       ? ddl_scatterv(g, all_in, out, counts, NULL, 0)
                        : kind == DDL_ALL_GATHERV    ? ddl_all_gatherv(g, in, all_out, counts, NULL)
                                                     : ddl_reduce_scatterv(g, all_in, out, counts, DDL_SUM);
    status = status == DDL_OK ? ddl_barrier(g) : status; /* the root of a small scatterv may have ended */
    CHECK_EQ(status, DDL_ERR_MISMATCH);
    /* The root of a scatterv has ended, and its record has the digest of the counts alone; so may who sent its part of a gatherv. */
    CHECK_STR(ddl_error(ddl_group_context(g)), kind == DDL_SCATTERV                        ? "as 3+5+4 (#"
                                               : kind == DDL_GATHERV && ddl_rank(g) != 0 ? "(#"
                                                                                          : "as 4+4+4 (#");
    CHECK_STR(ddl_error(ddl_group_context(g)), kind_names[kind]);
}

static void gatherv_call(ddl_group *g, bool deviates) { v_call(g, DDL_GATHERV, deviates); }
static void scatterv_call(ddl_group *g, bool deviates) { v_call(g, DDL_SCATTERV, deviates); }
static void all_gatherv_call(ddl_group *g, bool deviates) { v_call(g, DDL_ALL_GATHERV, deviates); }
static void reduce_scatterv_call(ddl_group *g, bool deviates) { v_call(g, DDL_REDUCE_SCATTERV, deviates); }

/* Lists of all_reduce_many with the same elements in all, cut in another way, or of other types. */
static void lists(ddl_group *g, const ddl_tensor *usual, int usual_count, const ddl_tensor *other, int other_count,
                  bool deviates) {
    CHECK_EQ(ddl_all_reduce_many(g, deviates ? other : usual, deviates ? other_count : usual_count, DDL_SUM),
             DDL_ERR_MISMATCH);
    CHECK_STR(ddl_error(ddl_group_context(g)), "all_reduce_many");
}

static void list_cut_call(ddl_group *g, bool deviates) {
    float a[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1}, before[9];
    memcpy(before, a, sizeof a);
    ddl_tensor usual[] = {DDL_VIEW(a, 4), DDL_VIEW(a + 4, 5)}, other[] = {DDL_VIEW(a, 5), DDL_VIEW(a + 5, 4)};
    lists(g, usual, 2, other, 2, deviates);
    CHECK(memcmp(a, before, sizeof a) == 0);
}

static void list_types_call(ddl_group *g, bool deviates) {
    float a[3] = {1, 1, 1};
    int32_t b[3] = {1, 1, 1};
    ddl_tensor usual[] = {DDL_ARRAY(a), DDL_ARRAY(b)}, other[] = {DDL_ARRAY(b), DDL_ARRAY(a)};
    lists(g, usual, 2, other, 2, deviates);
    CHECK(a[0] == 1 && b[0] == 1);
}

static void list_shorter_call(ddl_group *g, bool deviates) {
    float a[3] = {1, 1, 1};
    int32_t b[3] = {1, 1, 1};
    ddl_tensor usual[] = {DDL_ARRAY(a), DDL_ARRAY(b)};
    lists(g, usual, 2, usual, 1, deviates);
    CHECK(a[0] == 1 && b[0] == 1); /* it is one operation: no part of it has happened */
}

static void list_or_tensor_call(ddl_group *g, bool deviates) {
    float a[8] = {1};
    ddl_tensor whole = DDL_ARRAY(a), halves[] = {DDL_VIEW(a, 4), DDL_VIEW(a + 4, 4)};
    ddl_status status = deviates ? ddl_all_reduce(g, whole, whole, DDL_SUM) : ddl_all_reduce_many(g, halves, 2, DDL_SUM);
    CHECK_EQ(status, DDL_ERR_MISMATCH);
    CHECK(a[0] == 1);
}

static void keep_first(void *dst, const void *a, const void *b, int64_t count, ddl_dtype dtype, void *user) {
    (void)b;
    (void)user;
    memmove(dst, a, (size_t)count * ddl_dtype_bytes(dtype));
}

/* The first op of a program has the same number everywhere, whatever it is. */
static void op_or_scaled_sum_call(ddl_group *g, bool deviates) {
    ddl_context *c = ddl_group_context(g);
    float a = 1, b = 2;
    ddl_op op;
    ddl_status status =
        deviates ? ddl_op_create_scaled_sum(c, 0.5, &op) : ddl_op_create(c, keep_first, NULL, 1, &op);
    CHECK_EQ(status, DDL_OK);
    CHECK_EQ(ddl_all_reduce(g, DDL_VIEW(&a, 1), DDL_VIEW(&b, 1), op), DDL_ERR_MISMATCH);
    CHECK_STR(ddl_error(c), "a scaled sum");
    CHECK(b == 2);
}

static void (*const unlike_calls[])(ddl_group *, bool) = {
    gatherv_call,    scatterv_call,   all_gatherv_call,  reduce_scatterv_call,  list_cut_call,
    list_types_call, list_shorter_call, list_or_tensor_call, op_or_scaled_sum_call};

typedef struct unlike_job {
    coll_job job;
    int which;
} unlike_job;

static void unlike_main(int rank, int n, void *arg) {
    const unlike_job *j = (const unlike_job *)arg;
    unlike(rank, n, (void *)(uintptr_t)&j->job, unlike_calls[j->which]);
}

static void run_unlike(int which, int n) {
    unlike_job j = {.which = which};
    coll_job_make(&j.job);
    run_joined(n, unlike_main, &j);
}

TEST(counts_of_v_forms) {
    for (int i = 0; i < 4; i++) {
        run_unlike(i, 3);
    }
}

TEST(lists_of_all_reduce_many) {
    for (int i = 4; i < 8; i++) {
        run_unlike(i, 2);
        run_unlike(i, 3);
    }
}

TEST(ops_of_a_program_of_another_nature) { run_unlike(8, 2); }

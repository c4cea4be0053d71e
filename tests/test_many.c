/* all_reduce_many: tensors of any types and strides as one operation, none at all, several in flight, and its errors.
 * tests/run: variants=gcc,asan timeout=60 */
#include "coll.h"

enum { TENSORS = 40 };

/* Tensors of all the types a sum serves, every layout, with empty ones among them. */
static void make(coll_case *k, coll_run *x, ddl_tensor *tensors, int n, int rank, unsigned salt) {
    for (int i = 0; i < TENSORS; i++) {
        k[i] = (coll_case){.kind = DDL_ALL_REDUCE, .dtype = (ddl_dtype)(DDL_F16 + i % 10), .op = DDL_SUM, .in_place = true,
                           .count = i % 7 == 3 ? 0 : i == 20 ? 20000 : 3 * i + 1, .out_layout = (coll_layout)(i / 2 % 4),
                           .salt = salt + (unsigned)i};
        coll_prepare(&k[i], n, rank, &x[i]);
        tensors[i] = x[i].out_tensor;
    }
}

static void verify(coll_case *k, coll_run *x, int n) {
    for (int i = 0; i < TENSORS; i++) {
        coll_verify(&k[i], n, &x[i]);
        coll_release(&x[i]);
    }
}

static void rank_main(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    static __thread coll_case k[3][TENSORS];
    static __thread coll_run x[3][TENSORS];
    static __thread ddl_tensor tensors[3][TENSORS];
    for (int run = 0; run < 3; run++) {
        make(k[0], x[0], tensors[0], n, rank, (unsigned)run);
        CHECK_EQ(ddl_all_reduce_many(ddl_world(c), tensors[0], TENSORS, DDL_SUM), DDL_OK);
        verify(k[0], x[0], n);
    }
    ddl_request *r[3];
    for (int run = 0; run < 3; run++) { /* three at once, waited for backwards; the list may be reused at once */
        make(k[run], x[run], tensors[run], n, rank, 10u * (unsigned)run);
        CHECK_EQ(ddl_iall_reduce_many(ddl_world(c), tensors[run], TENSORS, DDL_SUM, &r[run]), DDL_OK);
        memset(tensors[run], 0xff, sizeof tensors[run]);
    }
    for (int run = 2; run >= 0; run--) {
        CHECK_EQ(ddl_wait(&r[run], NULL), DDL_OK);
        CHECK(r[run] == NULL);
        verify(k[run], x[run], n);
    }
    CHECK_EQ(ddl_all_reduce_many(ddl_world(c), NULL, 0, DDL_SUM), DDL_OK);
    coll_leave(c);
}

static void run_ranks(int n, ranks_fn fn) {
    coll_job job;
    coll_job_make(&job);
    ranks_fork(n, fn, &job, 40);
}

TEST(one_rank) { run_ranks(1, rank_main); }
TEST(two_ranks) { run_ranks(2, rank_main); }
TEST(five_ranks) { run_ranks(5, rank_main); }
TEST(four_ranks_as_threads) {
    coll_job job;
    coll_job_make(&job);
    ranks_threads(4, rank_main, &job);
}

static void averages(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    float a[3];
    double b[2];
    int32_t d[2];
    for (int i = 0; i < 3; i++) {
        a[i] = (float)(rank * 2 + i);
        b[i % 2] = rank + 0.5;
        d[i % 2] = rank * 4;
    }
    ddl_tensor list[] = {DDL_ARRAY(a), DDL_ARRAY(b), DDL_ARRAY(d)};
    CHECK_EQ(ddl_all_reduce_many(ddl_world(c), list, 3, DDL_AVG), DDL_OK);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(a[i], n - 1 + i);
        CHECK_EQ(b[i % 2], (n - 1) / 2.0 + 0.5);
        CHECK_EQ(d[i % 2], (n - 1) * 2);
    }
    /* An op that one of the types has not: refused, and none of the tensors has changed. */
    CHECK_EQ(ddl_all_reduce_many(ddl_world(c), list, 3, DDL_BXOR), DDL_ERR_ARG);
    CHECK_EQ(d[0], (n - 1) * 2);
    list[1].data = NULL;
    CHECK_EQ(ddl_all_reduce_many(ddl_world(c), list, 3, DDL_SUM), DDL_ERR_ARG);
    CHECK_EQ(ddl_all_reduce_many(ddl_world(c), NULL, 3, DDL_SUM), DDL_ERR_ARG);
    CHECK_EQ(ddl_all_reduce_many(ddl_world(c), list, -1, DDL_SUM), DDL_ERR_ARG);
    /* Each alone is possible, all together wrap around: to -2 elements, to 3, and to a count of bytes that is small. */
    unsigned char one = 7;
    ddl_tensor most = ddl_tensor_1d(&one, DDL_U8, INT64_MAX), three = ddl_tensor_1d(&one, DDL_U8, 3);
    ddl_tensor huge[3] = {most, most, three}, wide[4];
    for (int i = 0; i < 4; i++) {
        wide[i] = ddl_tensor_1d(&one, DDL_F64, INT64_MAX / 8 - (i == 3 ? 1 : 0));
    }
    ddl_request *r = NULL;
    CHECK_EQ(ddl_all_reduce_many(ddl_world(c), huge, 2, DDL_MAX), DDL_ERR_ARG);
    CHECK_STR(ddl_error(c), "larger than");
    CHECK_EQ(ddl_all_reduce_many(ddl_world(c), huge, 3, DDL_MAX), DDL_ERR_ARG);
    CHECK_EQ(ddl_iall_reduce_many(ddl_world(c), wide, 4, DDL_SUM, &r), DDL_ERR_ARG);
    CHECK(r == NULL && one == 7);
    /* Two of the list in the same memory: whole, in part, or under two types. Side by side and in between is fine. */
    float m[12] = {0};
    ddl_tensor left = ddl_tensor_nd(m, DDL_F32, 2, (const int64_t[]){4, 1}), right = left;
    left.strides[0] = right.strides[0] = 3; /* columns of a matrix of three */
    right.data = m + 1;
    ddl_tensor over[][3] = {{DDL_VIEW(m, 6), DDL_VIEW(m + 8, 4), DDL_VIEW(m + 5, 2)},
                            {DDL_VIEW(m, 6), DDL_ARRAY(d), DDL_VIEW(m, 6)},
                            {DDL_VIEW(m, 2), DDL_ARRAY(d), ddl_tensor_1d(m, DDL_I32, 2)},
                            {left, DDL_ARRAY(d), DDL_VIEW(m + 3, 1)}};
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(ddl_all_reduce_many(ddl_world(c), over[i], 3, DDL_SUM), DDL_ERR_ARG);
        CHECK_STR(ddl_error(c), "tensors 0 and 2 of the list overlap");
    }
    ddl_tensor apart[] = {left, DDL_VIEW(m + 2, 1), right, DDL_VIEW(m + 11, 1)};
    CHECK_EQ(ddl_all_reduce_many(ddl_world(c), apart, 4, DDL_SUM), DDL_OK);
    CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
    coll_leave(c);
}

TEST(averages_and_errors) { run_ranks(4, averages); }

/* Lists that differ are a mismatch on all ranks, and the tensors are as they were. */
static void differs(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    float a[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    double b[4] = {1, 2, 3, 4};
    ddl_tensor list[] = {DDL_ARRAY(a), DDL_VIEW(b, rank == 1 ? 3 : 4)};
    ddl_status status = ddl_all_reduce_many(ddl_world(c), list, 2, DDL_SUM);
    CHECK_EQ(status, DDL_ERR_MISMATCH);
    CHECK_STR(ddl_error(c), "all_reduce_many(2 tensors: 8 x f32 + 3 x f64 (#");
    CHECK_STR(ddl_error(c), "all_reduce_many(2 tensors: 8 x f32 + 4 x f64 (#");
    CHECK_EQ(a[7], 8);
    CHECK_EQ(b[3], 4);
    coll_leave(c);
}

TEST(lists_that_differ) { run_ranks(3, differs); }

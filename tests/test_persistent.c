/* Persistent collectives: planned once, started often, with new data each time; several at once; misuse is refused.
 * tests/run: variants=gcc,asan timeout=60 */
#include "coll.h"

/* Makes a request, and starts it again with other values in the same memory. */
static bool run_again(ddl_group *g, const coll_case *first) {
    int n = ddl_size(g), rank = ddl_rank(g);
    coll_case k = *first;
    coll_run x, fresh;
    ddl_request *r = NULL;
    int64_t *arrays = (int64_t *)calloc((size_t)n * 4, sizeof *arrays);
    coll_prepare(&k, n, rank, &x);
    ddl_status status = coll_call(g, &k, x.in_tensor, x.out_tensor, arrays, &r);
    memset(arrays, 0x7f, (size_t)n * 4 * sizeof *arrays);
    bool ok = status == DDL_OK;
    for (int run = 0; ok && run < 5; run++) {
        k.salt = first->salt + 17u * (unsigned)run;
        coll_prepare(&k, n, rank, &fresh);
        if (x.in.memory != NULL) {
            memcpy(x.in.memory, fresh.in.memory, x.in.bytes);
            memcpy(x.in.expect, fresh.in.expect, x.in.bytes);
        }
        memcpy(x.out.memory, fresh.out.memory, x.out.bytes);
        memcpy(x.out.expect, fresh.out.expect, x.out.bytes);
        coll_release(&fresh);
        status = ddl_start(r);
        ddl_request *same = r;
        status = status == DDL_OK ? ddl_wait(&r, NULL) : status;
        ok = status == DDL_OK && r == same && coll_verify(&k, n, &x);
    }
    if (status != DDL_OK) {
        test__fail(__FILE__, __LINE__, "kind %d: %s", (int)k.kind, ddl_error(ddl_group_context(g)));
    }
    CHECK(ddl_request_free(&r) == DDL_OK && r == NULL);
    coll_release(&x);
    free(arrays);
    return ok;
}

static void every_kind(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    int64_t counts[64];
    bool ok = true;
    for (int kind = DDL_BARRIER; ok && kind <= DDL_ALL_TO_ALLV; kind++) {
        for (int i = 0; ok && i < 6; i++) {
            for (int r = 0; r < n * n; r++) {
                counts[r] = (r * 5 + kind) % (i % 2 ? 40 : 3000);
            }
            coll_case k = {.kind = (ddl_kind)kind, .dtype = DDL_F32, .op = coll_reduces((ddl_kind)kind) ? DDL_SUM : 0,
                           .root = coll_rooted((ddl_kind)kind) ? i % n : 0, .count = i % 2 ? 100 : 30000,
                           .in_place = i % 3 == 1 && kind != DDL_ALL_TO_ALLV, .way = COLL_PERSISTENT,
                           .in_layout = i == 5 ? COLL_BACKWARD : COLL_PACKED};
            if (kind >= DDL_GATHERV) {
                k.counts = counts;
                k.gap = kind == DDL_REDUCE_SCATTERV ? -1 : i % 3 - 1;
            }
            ok = test_left_out((unsigned)(kind + i)) || run_again(ddl_world(c), &k);
        }
    }
    coll_leave(c);
}

static void run_ranks(int n, ranks_fn fn) {
    coll_job job;
    coll_job_make(&job);
    ranks_fork(n, fn, &job, 40);
}

TEST(every_kind_on_one_rank) { run_ranks(1, every_kind); }
TEST(every_kind_on_three_ranks) { run_ranks(3, every_kind); }
TEST(every_kind_on_four_ranks) { run_ranks(4, every_kind); }

static void nothing_op(void *dst, const void *a, const void *b, int64_t count, ddl_dtype dtype, void *user) {
    (void)b;
    (void)dtype;
    (void)user;
    memmove(dst, a, (size_t)count * 4);
}

/* More persistent requests than plans are kept, all in flight, two of them alike; their plans are not lost. */
static void many_at_once(int rank, int n, void *arg) {
    enum { REQUESTS = 90 };
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    static __thread float data[REQUESTS][REQUESTS];
    ddl_request *r[REQUESTS];
    for (int i = 0; i < REQUESTS; i++) {
        ddl_tensor t = DDL_VIEW(data[i], i / 2 * 2 + 1);
        ddl_collective d = {.kind = DDL_ALL_REDUCE, .op = DDL_SUM, .in = t, .out = t};
        CHECK_EQ(ddl_collective_init(ddl_world(c), &d, &r[i]), DDL_OK);
    }
    for (int run = 0; run < 3; run++) {
        for (int i = 0; i < REQUESTS; i++) {
            for (int j = 0; j < REQUESTS; j++) {
                data[i][j] = (float)(rank + i + j + run);
            }
            CHECK_EQ(ddl_start(r[i]), DDL_OK);
        }
        CHECK_EQ(ddl_wait_all(r, REQUESTS, NULL), DDL_OK);
        for (int i = 0; i < REQUESTS; i++) {
            for (int j = 0; j < i / 2 * 2 + 1; j++) {
                CHECK_EQ(data[i][j], n * (i + j + run) + n * (n - 1) / 2);
            }
        }
    }
    for (int i = 0; i < REQUESTS; i++) {
        CHECK(r[i] != NULL && ddl_request_free(&r[i]) == DDL_OK);
    }
    coll_leave(c);
}

TEST(many_at_once) { run_ranks(3, many_at_once); }

static void misuse(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    float a[4] = {1, 2, 3, 4}, b[4];
    ddl_op op;
    REQUIRE(ddl_op_create(c, nothing_op, NULL, 1, &op) == DDL_OK);
    ddl_collective d = {.kind = DDL_ALL_REDUCE, .op = op, .in = DDL_ARRAY(a), .out = DDL_ARRAY(b)};
    ddl_collective wrong = d;
    wrong.out = DDL_VIEW(b, 3);
    ddl_request *r = NULL, *plain = NULL;
    CHECK_EQ(ddl_collective_init(ddl_world(c), &wrong, &r), DDL_ERR_ARG);
    CHECK(r == NULL);
    wrong.kind = (ddl_kind)77;
    CHECK_EQ(ddl_collective_init(ddl_world(c), &wrong, &r), DDL_ERR_ARG);
    REQUIRE(ddl_collective_init(ddl_world(c), &d, &r) == DDL_OK);
    CHECK_EQ(ddl_wait(&r, NULL), DDL_OK); /* not started: nothing to wait for */
    CHECK_EQ(ddl_start(r), DDL_OK);
    if (rank == 0) { /* rank 1 has not started: it cannot be over */
        CHECK_EQ(ddl_start(r), DDL_ERR_STATE);
        CHECK_EQ(ddl_request_free(&r), DDL_ERR_STATE);
        CHECK_EQ(ddl_send(ddl_world(c), DDL_VIEW(a, 1), 1, 3), DDL_OK);
    }
    CHECK_EQ(ddl_wait(&r, NULL), DDL_OK);
    CHECK(r != NULL);
    CHECK_EQ(ddl_op_free(c, op), DDL_OK);
    CHECK_EQ(ddl_request_free(&r), DDL_OK);
    CHECK_EQ(ddl_request_free(&r), DDL_OK);
    CHECK_EQ(ddl_ibarrier(ddl_world(c), &plain), DDL_OK);
    CHECK_EQ(ddl_start(plain), DDL_ERR_STATE);
    CHECK_EQ(ddl_wait(&plain, NULL), DDL_OK);
    coll_leave(c);
}

static void misuse_late(int rank, int n, void *arg) {
    if (rank != 1) {
        misuse(rank, n, arg);
        return;
    }
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    float a[4] = {1, 2, 3, 4}, b[4];
    ddl_op op;
    REQUIRE(ddl_op_create(c, nothing_op, NULL, 1, &op) == DDL_OK);
    CHECK_EQ(ddl_recv(ddl_world(c), DDL_VIEW(b, 1), 0, 3, NULL), DDL_OK); /* until rank 0 has tried */
    CHECK_EQ(ddl_all_reduce(ddl_world(c), DDL_ARRAY(a), DDL_ARRAY(b), op), DDL_OK); /* meets the persistent ones */
    CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
    CHECK_EQ(ddl_op_free(c, op), DDL_OK);
    coll_leave(c);
}

TEST(misuse_is_refused) { run_ranks(3, misuse_late); }

static void set_op(void *dst, const void *a, const void *b, int64_t count, ddl_dtype dtype, void *user) {
    (void)a;
    (void)b;
    (void)dtype;
    for (int64_t i = 0; i < count; i++) {
        ((float *)dst)[i] = *(float *)user;
    }
}

/* A persistent request keeps its op: one that is freed meanwhile still runs, and its id goes to no other. Ids follow the
 * order of creation whatever a rank still holds: rank 0 alone frees its request, and all make the same ops. */
static void keeps_op(int rank, int n, void *arg) {
    enum { OTHERS = 64 };
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    float seven = 7, eight = 8, a[4] = {1, 2, 3, 4}, b[4];
    ddl_op op, others[OTHERS + 1];
    REQUIRE(ddl_op_create(c, set_op, &seven, 1, &op) == DDL_OK);
    ddl_collective d = {.kind = DDL_ALL_REDUCE, .op = op, .in = DDL_ARRAY(a), .out = DDL_ARRAY(b)};
    ddl_request *r = NULL;
    REQUIRE(ddl_collective_init(ddl_world(c), &d, &r) == DDL_OK);
    CHECK_EQ(ddl_op_free(c, op), DDL_OK);
    CHECK_EQ(ddl_all_reduce(ddl_world(c), DDL_ARRAY(a), DDL_ARRAY(b), op), DDL_ERR_ARG); /* new calls cannot have it */
    ddl_request *mine = NULL; /* of another op, freed too */
    ddl_op held;
    REQUIRE(ddl_op_create(c, set_op, &seven, 1, &held) == DDL_OK);
    d.op = held;
    REQUIRE(ddl_collective_init(ddl_world(c), &d, &mine) == DDL_OK);
    CHECK_EQ(ddl_op_free(c, held), DDL_OK);
    if (rank == 0) {
        CHECK_EQ(ddl_request_free(&mine), DDL_OK);
    }
    for (int i = 0; i < OTHERS; i++) {
        CHECK_EQ(ddl_op_create(c, set_op, &eight, 1, &others[i]), DDL_OK);
        CHECK(others[i] != op && others[i] != held);
        a[0] = 2;
        CHECK_EQ(ddl_all_reduce(ddl_world(c), DDL_ARRAY(a), DDL_ARRAY(b), others[i]), DDL_OK);
        CHECK_EQ(b[0], 8);
    }
    CHECK_EQ(ddl_op_create(c, set_op, &eight, 1, &others[OTHERS]), DDL_ERR_NOMEM);
    for (int run = 0; run < 3; run++) {
        memset(b, 0xee, sizeof b);
        CHECK_EQ(ddl_start(r), DDL_OK);
        CHECK_EQ(ddl_wait(&r, NULL), DDL_OK);
        CHECK(b[0] == 7 && b[3] == 7);
    }
    CHECK_EQ(ddl_request_free(&r), DDL_OK);
    CHECK_EQ(ddl_op_free(c, others[3]), DDL_OK);
    CHECK_EQ(ddl_op_create(c, set_op, &eight, 1, &others[OTHERS]), DDL_OK);
    CHECK(others[OTHERS] > others[OTHERS - 1]); /* a freed id does not come back */
    if (rank != 0) {
        CHECK_EQ(ddl_request_free(&mine), DDL_OK);
    }
    coll_leave(c);
}

TEST(a_freed_op_stays_with_its_request) { run_ranks(2, keeps_op); }

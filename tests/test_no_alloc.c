/* Nothing is allocated on the path of an operation that is repeated: the context's allocator counts. And when there is no
 * memory, calls fail cleanly and the context goes on.
 * tests/run: variants=gcc,asan timeout=60 */
#include "coll.h"

#include <stdatomic.h>

typedef struct counter {
    atomic_long allocs, frees;
    atomic_int dry; /* 1: there is no memory */
} counter;

static void *count_alloc(void *user, size_t bytes) {
    counter *c = (counter *)user;
    if (atomic_load(&c->dry)) {
        return NULL;
    }
    atomic_fetch_add(&c->allocs, 1);
    return malloc(bytes);
}

static void count_free(void *user, void *memory) {
    if (memory != NULL) {
        atomic_fetch_add(&((counter *)user)->frees, 1);
    }
    free(memory);
}

static ddl_context *join(int rank, int n, const coll_job *shared, counter *count) {
    coll_job job = *shared;
    memset(count, 0, sizeof *count);
    job.config.allocator = (ddl_allocator){count_alloc, count_free, count};
    return coll_join(rank, n, &job);
}

enum { SMALL = 100, LARGE = 60000 };

/* Everything that a training loop repeats. */
static bool repeat(ddl_group *g, float *small, float *large, ddl_request *persistent) {
    int n = ddl_size(g), rank = ddl_rank(g), next = (rank + 1) % n, previous = (rank + n - 1) % n;
    ddl_request *r[4] = {NULL, NULL, NULL, NULL};
    float word = 1, got = 0;
    ddl_tensor strided = DDL_VIEW(large, LARGE / 2);
    strided.strides[0] = 2;
    return ddl_all_reduce(g, DDL_VIEW(small, SMALL), DDL_VIEW(small, SMALL), DDL_MAX) == DDL_OK &&
           ddl_all_reduce(g, DDL_VIEW(large, LARGE), DDL_VIEW(large, LARGE), DDL_MAX) == DDL_OK &&
           ddl_all_reduce(g, strided, strided, DDL_MAX) == DDL_OK &&
           ddl_broadcast(g, DDL_VIEW(small, SMALL), 0) == DDL_OK && ddl_barrier(g) == DDL_OK &&
           ddl_all_gather(g, DDL_VIEW(small + rank, 1), DDL_VIEW(small, n)) == DDL_OK &&
           ddl_send_recv(g, DDL_VIEW(&word, 1), next, 1, DDL_VIEW(&got, 1), previous, 1, NULL) == DDL_OK &&
           ddl_irecv(g, DDL_VIEW(large, 1000), previous, 2, &r[0]) == DDL_OK &&
           ddl_isend(g, DDL_VIEW(large + 2000, 1000), next, 2, &r[1]) == DDL_OK &&
           ddl_iall_reduce(g, DDL_VIEW(small, SMALL), DDL_VIEW(small, SMALL), DDL_MAX, &r[2]) == DDL_OK &&
           ddl_ibarrier(g, &r[3]) == DDL_OK && ddl_wait_all(r, 4, NULL) == DDL_OK && ddl_start(persistent) == DDL_OK &&
           ddl_wait(&persistent, NULL) == DDL_OK;
}

static void steady(int rank, int n, void *arg) {
    counter count;
    ddl_context *c = join(rank, n, (const coll_job *)arg, &count);
    REQUIRE(c != NULL);
    ddl_group *g = ddl_world(c);
    static __thread float small[SMALL], large[LARGE];
    ddl_request *p = NULL;
    ddl_collective d = {.kind = DDL_ALL_REDUCE, .op = DDL_MAX, .in = DDL_ARRAY(small), .out = DDL_ARRAY(small)};
    REQUIRE(ddl_collective_init(g, &d, &p) == DDL_OK);
    bool ok = true;
    for (int i = 0; i < 200 && ok; i++) { /* who comes first differs from time to time: some rounds to see it all */
        ok = repeat(g, small, large, p);
    }
    /* Who waits for whom is chance: a meeting that has not been before may need one more buffer, once, late. What grows
     * with the number of rounds is forbidden, and whole windows of rounds must need nothing. */
    long first = atomic_load(&count.allocs), clean = 0;
    for (int window = 0; window < 5 && ok; window++) {
        long before = atomic_load(&count.allocs);
        for (int i = 0; i < 200 && ok; i++) {
            ok = repeat(g, small, large, p);
        }
        clean += atomic_load(&count.allocs) == before;
    }
    CHECK(ok);
    CHECK(clean >= 2);
    CHECK(atomic_load(&count.allocs) - first < 12);
    CHECK_EQ(ddl_request_free(&p), DDL_OK);
    CHECK_EQ(ddl_barrier(g), DDL_OK);
    coll_leave(c);
    CHECK_EQ(atomic_load(&count.allocs), atomic_load(&count.frees)); /* nothing is left behind */
}

TEST(repeated_operations_allocate_nothing) {
    coll_job job;
    coll_job_make(&job);
    ranks_fork(2, steady, &job, 50);
    coll_job_make(&job);
    ranks_fork(3, steady, &job, 50);
}

static bool start_and_wait(ddl_request **r, int count) {
    bool ok = true;
    for (int i = 0; i < count; i++) {
        ok = ok && ddl_start(r[i]) == DDL_OK;
    }
    return ok && ddl_wait_all(r, count, NULL) == DDL_OK;
}

/* A persistent request keeps its plan, whatever else runs between its starts; so do two that are alike. */
static void pinned(int rank, int n, void *arg) {
    counter count;
    ddl_context *c = join(rank, n, (const coll_job *)arg, &count);
    REQUIRE(c != NULL);
    ddl_group *g = ddl_world(c);
    static float data[2][SMALL], other[SMALL];
    ddl_request *r[2] = {NULL, NULL};
    long first = 0;
    for (int i = 0; i < 2; i++) {
        ddl_collective d = {.kind = DDL_ALL_REDUCE, .op = DDL_MAX, .in = DDL_ARRAY(data[i]), .out = DDL_ARRAY(data[i])};
        REQUIRE(ddl_collective_init(g, &d, &r[i]) == DDL_OK);
    }
    bool ok = start_and_wait(r, 2);
    for (int round = 0; round < 5 && ok; round++) {
        for (int i = 1; i <= 80 && ok; i++) {
            ok = ddl_all_reduce(g, DDL_VIEW(other, i), DDL_VIEW(other, i), DDL_MAX) == DDL_OK;
        }
        CHECK_EQ(ddl_barrier(g), DDL_OK);
        long before = atomic_load(&count.allocs);
        ok = ok && start_and_wait(r, 2) && start_and_wait(r, 2);
        first += atomic_load(&count.allocs) != before; /* a buffer for what comes early, once */
    }
    CHECK(ok);
    CHECK(first <= 1);
    CHECK(ddl_request_free(&r[0]) == DDL_OK && ddl_request_free(&r[1]) == DDL_OK);
    coll_leave(c);
    CHECK_EQ(atomic_load(&count.allocs), atomic_load(&count.frees));
}

TEST(persistent_requests_keep_their_plan) {
    coll_job job;
    coll_job_make(&job);
    ranks_fork(2, pinned, &job, 50);
}

/* One process alone: calls that need new memory fail with DDL_ERR_NOMEM, change nothing, and work later. */
static void dry(int rank, int n, void *arg) {
    counter count;
    ddl_context *c = join(rank, n, (const coll_job *)arg, &count);
    REQUIRE(c != NULL);
    ddl_group *g = ddl_world(c);
    static float a[30000], b[30000];
    ddl_tensor backward = DDL_VIEW(a + 29999, 30000), list[2] = {DDL_ARRAY(a), DDL_ARRAY(b)};
    backward.strides[0] = -1;
    ddl_request *r = NULL;
    ddl_collective d = {.kind = DDL_ALL_REDUCE, .op = DDL_SUM, .in = DDL_VIEW(a, 77), .out = DDL_VIEW(b, 77)};
    for (int i = 0; i < 30000; i++) {
        a[i] = 1;
        b[i] = 2;
    }
    for (int turn = 0; turn < 2; turn++) {
        atomic_store(&count.dry, turn == 0);
        ddl_status expect = turn == 0 ? DDL_ERR_NOMEM : DDL_OK;
        CHECK_EQ(ddl_all_reduce(g, DDL_VIEW(a, 99), DDL_VIEW(b, 99), DDL_SUM), expect);
        CHECK_EQ(ddl_all_reduce(g, backward, DDL_ARRAY(b), DDL_SUM), expect);
        CHECK_EQ(ddl_all_reduce_many(g, list, 2, DDL_SUM), expect);
        CHECK_EQ(ddl_collective_init(g, &d, &r), expect);
        CHECK(turn == 1 || (r == NULL && b[0] == 2 && b[29999] == 2));
        atomic_store(&count.dry, 0);
    }
    CHECK_EQ(ddl_request_free(&r), DDL_OK);
    coll_leave(c);
    CHECK_EQ(atomic_load(&count.allocs), atomic_load(&count.frees));
}

TEST(without_memory_calls_fail_cleanly) {
    coll_job job;
    coll_job_make(&job);
    ranks_fork(1, dry, &job, 20);
}

/* Memory of ddl_tensor_alloc is not freed while an operation uses it: refused in a sentence, and nothing has changed.
 * tests/run: variants=gcc,asan,tsan timeout=60 */
#include "faults.h"

#include <stdatomic.h>

enum { COUNT = 50000, GUARD = 16 }; /* 200 KB: no small path */

static _Atomic int *go; /* how many of its calls rank 1 may begin */

static ddl_context *join(const char *transport) {
    char why[1024] = "";
    ddl_context *c = NULL;
    setenv("DDL_TRANSPORTS", transport, 1);
    setenv("DDL_PLUGIN_PATH", fault_plugins(), 1);
    ddl_config config = {.timeout_ms = (int64_t)(30000 * test_slow()), .error_text = why, .error_bytes = sizeof why};
    if (ddl_init(&config, &c) != DDL_OK) {
        test__fail(__FILE__, __LINE__, "ddl_init: %s", why);
    }
    return c;
}

static ddl_tensor lent(ddl_context *c, int64_t count, float first) {
    ddl_tensor t = {0};
    CHECK_EQ(ddl_tensor_alloc(c, DDL_F32, 1, &count, &t), DDL_OK);
    for (int64_t i = 0; t.data != NULL && i < count; i++) {
        ((float *)t.data)[i] = first + (float)(i % 50);
    }
    return t;
}

static void is_filled(const ddl_tensor *t, float first, float each, const char *what) {
    const float *x = t->data;
    for (int64_t i = 0; i < t->shape[0]; i++) {
        if (x[i] < first + each * (float)(i % 50) || x[i] > first + each * (float)(i % 50)) {
            test__fail(__FILE__, __LINE__, "%s: element %d is %g, expected %g", what, (int)i, (double)x[i],
                       (double)(first + each * (float)(i % 50)));
            return;
        }
    }
}

/* The sentence says who: this rank, and the operation. */
static void refused(ddl_context *c, ddl_tensor *t, const char *who) {
    ddl_tensor before = *t;
    CHECK_EQ(ddl_tensor_free(c, t), DDL_ERR_STATE);
    CHECK(memcmp(&before, t, sizeof before) == 0);
    if (strstr(ddl_error(c), "on rank 0") == NULL || strstr(ddl_error(c), who) == NULL) {
        test__fail(__FILE__, __LINE__, "the sentence does not name %s: %s", who, ddl_error(c));
    }
}

static void freed(ddl_context *c, ddl_tensor *t) {
    CHECK_EQ(ddl_tensor_free(c, t), DDL_OK);
    CHECK(t->data == NULL);
}

static void next_call(void) { atomic_fetch_add(go, 1); }

static void await_call(int number) {
    while (atomic_load(go) < number) {
        usleep(1000);
    }
}

static void collectives(ddl_context *c, int rank) {
    ddl_group *world = ddl_world(c);
    ddl_tensor in = lent(c, COUNT, 1), out = lent(c, COUNT + GUARD, 9), beside = lent(c, COUNT, 3);
    ddl_tensor part = ddl_tensor_1d((float *)out.data + GUARD, DDL_F32, COUNT);
    ddl_request *r = NULL;
    if (rank == 1) {
        await_call(1);
    }
    CHECK_EQ(ddl_iall_reduce(world, in, part, DDL_SUM, &r), DDL_OK);
    if (rank == 0) {
        refused(c, &in, "all_reduce(50000 x f32, sum)");
        refused(c, &out, "all_reduce(50000 x f32, sum)"); /* of which a part is used */
        freed(c, &beside);
        next_call();
    }
    CHECK_EQ(ddl_wait(&r, NULL), DDL_OK);
    is_filled(&in, 1, 1, "the input");
    is_filled(&part, 2, 2, "the sum");
    freed(c, &in);
    freed(c, &out);
    if (rank == 1) {
        freed(c, &beside);
    }
}

static void persistent(ddl_context *c, int rank) {
    ddl_tensor t = lent(c, COUNT, 1);
    ddl_request *r = NULL;
    ddl_collective call = {.kind = DDL_ALL_REDUCE, .op = DDL_SUM, .in = t, .out = t};
    CHECK_EQ(ddl_collective_init(ddl_world(c), &call, &r), DDL_OK);
    if (rank == 1) {
        await_call(2);
    }
    CHECK_EQ(ddl_start(r), DDL_OK);
    if (rank == 0) {
        refused(c, &t, "all_reduce(50000 x f32, sum)");
        next_call();
    }
    CHECK_EQ(ddl_wait(&r, NULL), DDL_OK);
    is_filled(&t, 2, 2, "the sum of a persistent operation");
    freed(c, &t); /* it does not run */
    CHECK_EQ(ddl_request_free(&r), DDL_OK);
}

static void many(ddl_context *c, int rank) {
    ddl_tensor t[2] = {lent(c, 1000, 1), lent(c, 77, 2)};
    ddl_request *r = NULL;
    if (rank == 1) {
        await_call(3);
    }
    CHECK_EQ(ddl_iall_reduce_many(ddl_world(c), t, 2, DDL_SUM, &r), DDL_OK);
    if (rank == 0) {
        refused(c, &t[0], "all_reduce");
        refused(c, &t[1], "all_reduce");
        next_call();
    }
    CHECK_EQ(ddl_wait(&r, NULL), DDL_OK);
    is_filled(&t[0], 2, 2, "the first of many");
    is_filled(&t[1], 4, 2, "the second of many");
    freed(c, &t[0]);
    freed(c, &t[1]);
}

static void messages(ddl_context *c, int rank) {
    ddl_group *world = ddl_world(c);
    ddl_request *r = NULL, *s = NULL;
    if (rank == 1) {
        float *x = malloc(COUNT * sizeof *x), y[100];
        await_call(4);
        CHECK_EQ(ddl_recv(world, ddl_tensor_1d(x, DDL_F32, COUNT), 0, 5, NULL), DDL_OK);
        ddl_tensor got = ddl_tensor_1d(x, DDL_F32, COUNT);
        is_filled(&got, 1, 1, "what was sent");
        for (int i = 0; i < 100; i++) {
            y[i] = (float)(i % 50);
        }
        CHECK_EQ(ddl_send(world, DDL_ARRAY(y), 0, 6), DDL_OK);
        free(x);
        return;
    }
    ddl_tensor from = lent(c, COUNT, 1), into = lent(c, 200, 7), never = lent(c, 10, 7);
    int64_t shape[1] = {100};
    ddl_tensor every_other = ddl_tensor_nd(into.data, DDL_F32, 1, shape);
    every_other.strides[0] = 2;
    CHECK_EQ(ddl_isend(world, from, 1, 5, &s), DDL_OK);
    CHECK_EQ(ddl_irecv(world, every_other, 1, 6, &r), DDL_OK);
    refused(c, &from, "send to rank 1");
    refused(c, &into, "receive from rank 1");
    next_call();
    CHECK_EQ(ddl_wait(&s, NULL), DDL_OK);
    freed(c, &from);
    CHECK_EQ(ddl_wait(&r, NULL), DDL_OK);
    for (int i = 0; i < 100; i++) {
        CHECK_EQ(((float *)into.data)[2 * i], i % 50);
        CHECK_EQ(((float *)into.data)[2 * i + 1], 7 + (2 * i + 1) % 50);
    }
    freed(c, &into);
    CHECK_EQ(ddl_irecv(world, never, DDL_ANY_SOURCE, 8, &r), DDL_OK);
    refused(c, &never, "receive from any rank");
    CHECK_EQ(ddl_cancel(r), DDL_OK);
    freed(c, &never);
    CHECK_EQ(ddl_wait(&r, NULL), DDL_ERR_CANCELLED);
}

static void all(int rank, int n, void *arg) {
    (void)n;
    ddl_context *c = join(arg);
    REQUIRE(c != NULL);
    collectives(c, rank);
    persistent(c, rank);
    many(c, rank);
    messages(c, rank);
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

static void run_over(const char *transport) {
    go = ranks_shared(sizeof *go);
    ranks_fork(2, all, (void *)(uintptr_t)transport, 40);
}

TEST(over_shared_memory) {
    if (!fault_has_plugin("shm")) {
        SKIP("libddl-shm.so is not built; make plugins builds it");
    }
    run_over("shm");
}

TEST(over_tcp) { run_over("tcp"); }

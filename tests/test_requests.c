/* Requests: waiting for one, all, any, some; testing; cancelling before and after; persistent operations; what is
 * refused and when; ends before the data came.
 * tests/run: variants=gcc,asan,valgrind timeout=60 waits=yes */
#include "world.h"

enum { N = 8 };

/* Rank 0 sends value i under tag i when rank 1 says so (a message under tag 100). */
static void go(ddl_group *w) {
    OK(ddl_send(w, world_bytes("", 0), 0, 100));
}

static void await_go(ddl_group *w) {
    OK(ddl_recv(w, world_bytes("", 0), 1, 100, NULL));
}

static void send_value(ddl_group *w, int i) {
    int32_t value = 1000 + i;
    OK(ddl_send(w, DDL_VIEW(&value, 1), 1, i));
}

static void post_all(ddl_group *w, int32_t *values, ddl_request **requests) {
    for (int i = 0; i < N; i++) {
        values[i] = -1;
        OK(ddl_irecv(w, DDL_VIEW(&values[i], 1), 0, i, &requests[i]));
    }
}

static void test_and_wait(ddl_group *w, void *arg) {
    (void)arg;
    int32_t values[N];
    ddl_request *r[N], *none = NULL;
    ddl_info info;
    if (ddl_rank(w) == 0) {
        for (int i = N - 1; i >= 0; i--) {
            await_go(w);
            send_value(w, i);
        }
        OK(ddl_barrier(w));
        return;
    }
    post_all(w, values, r);
    OK(ddl_wait(&none, &info)); /* NULL is nothing to wait for */
    OK(ddl_test(&none, &info));
    CHECK_EQ((int)ddl_test(&r[0], NULL), (int)DDL_IN_PROGRESS);
    CHECK(r[0] != NULL);
    for (int i = N - 1; i >= 0; i--) {
        go(w);
        memset(&info, 0xa5, sizeof info);
        if (i % 2) {
            OK(ddl_wait(&r[i], &info));
        } else {
            double end = test_now_s() + 10 * test_slow();
            ddl_status status;
            while ((status = ddl_test(&r[i], &info)) == DDL_IN_PROGRESS && test_now_s() < end) {
                CHECK(r[i] != NULL);
            }
            OK(status);
        }
        CHECK(r[i] == NULL);
        CHECK_EQ(values[i], 1000 + i);
        CHECK_EQ(info.source, 0);
        CHECK_EQ(info.tag, i);
        CHECK_EQ(info.count, 1);
        CHECK(i == 0 || values[i - 1] == -1); /* not before its time */
    }
    OK(ddl_barrier(w));
}

TEST(wait_and_test_end_a_request) { world_threads(2, test_and_wait, NULL); }

static void any_and_some(ddl_group *w, void *arg) {
    (void)arg;
    int32_t values[N], index = 77, done = 77, indices[N + 1];
    ddl_request *r[N + 1];
    ddl_info info, infos[N + 1];
    if (ddl_rank(w) == 0) {
        for (int i = 0; i < N; i++) { /* one by one for wait_any, then in twos for wait_some */
            await_go(w);
            send_value(w, (i * 3) % N);
        }
        await_go(w);
        for (int i = 0; i < N; i++) {
            send_value(w, i);
        }
        OK(ddl_barrier(w));
        return;
    }
    post_all(w, values, r);
    r[N] = NULL;
    for (int i = 0; i < N; i++) {
        go(w);
        OK(ddl_wait_any(r, N + 1, &index, &info));
        CHECK_EQ(index, (i * 3) % N);
        CHECK(index >= 0 && r[index] == NULL && values[index] == 1000 + index);
        CHECK_EQ(info.tag, index);
    }
    OK(ddl_wait_any(r, N + 1, &index, &info));
    CHECK_EQ(index, -1);
    OK(ddl_wait_any(NULL, 0, &index, NULL));
    CHECK_EQ(index, -1);
    OK(ddl_wait_some(r, N + 1, &done, indices, infos));
    CHECK_EQ(done, 0);
    post_all(w, values, r);
    go(w);
    int seen = 0;
    while (seen < N && ddl_wait_some(r, N + 1, &done, indices, infos) == DDL_OK && done > 0) {
        for (int k = 0; k < done; k++) {
            CHECK(r[indices[k]] == NULL);
            CHECK_EQ(values[indices[k]], 1000 + indices[k]);
            CHECK_EQ(infos[k].tag, indices[k]);
        }
        seen += done;
    }
    CHECK_EQ(seen, N);
    OK(ddl_barrier(w));
}

TEST(wait_any_and_wait_some) { world_threads(2, any_and_some, NULL); }

static void all_of_them(ddl_group *w, void *arg) {
    (void)arg;
    int32_t values[N];
    ddl_request *r[N + 2], *nulls[3] = {NULL, NULL, NULL};
    ddl_info infos[N + 2];
    if (ddl_rank(w) == 0) {
        for (int round = 0; round < 2; round++) {
            await_go(w);
            for (int i = 0; i < N; i++) {
                send_value(w, i);
                if (i == N / 2) {
                    await_go(w);
                }
            }
        }
        OK(ddl_barrier(w));
        return;
    }
    memset(infos, 0xa5, sizeof infos);
    OK(ddl_test_all(nulls, 3, infos));
    CHECK_EQ(infos[2].source, DDL_NO_RANK);
    CHECK_EQ(infos[2].count, 0);
    memset(infos, 0xa5, sizeof infos);
    OK(ddl_wait_all(nulls, 3, infos));
    CHECK_EQ(infos[2].source, DDL_NO_RANK);
    OK(ddl_wait_all(NULL, 0, NULL));
    for (int round = 0; round < 2; round++) {
        memset(r, 0, sizeof r);
        post_all(w, values, r + 1); /* NULL at both ends */
        CHECK_EQ((int)ddl_test_all(r, N + 2, infos), (int)DDL_IN_PROGRESS);
        go(w);
        double end = test_now_s() + 10 * test_slow();
        while (values[N / 2] == -1 && test_now_s() < end) { /* half has come: none is freed */
            CHECK_EQ((int)ddl_test_all(r, N + 2, infos), (int)DDL_IN_PROGRESS);
        }
        for (int i = 0; i < N; i++) {
            CHECK(r[i + 1] != NULL);
        }
        go(w);
        if (round == 0) {
            OK(ddl_wait_all(r, N + 2, infos));
        } else {
            ddl_status status;
            while ((status = ddl_test_all(r, N + 2, infos)) == DDL_IN_PROGRESS && test_now_s() < end) {
            }
            OK(status);
        }
        for (int i = 0; i < N; i++) {
            CHECK(r[i + 1] == NULL);
            CHECK_EQ(values[i], 1000 + i);
            CHECK_EQ(infos[i + 1].tag, i);
        }
        CHECK_EQ(infos[0].source, DDL_NO_RANK);
    }
    OK(ddl_barrier(w));
}

TEST(wait_all_and_test_all) { world_threads(2, all_of_them, NULL); }

/* The first error by index is the result, and its sentence stays; the others end as they did. */
static void first_error(ddl_group *w, void *arg) {
    (void)arg;
    if (ddl_rank(w) == 0) {
        double d[4] = {0};
        for (int i = 0; i < 4; i++) {
            OK(ddl_send(w, DDL_ARRAY(d), 1, i));
        }
        OK(ddl_barrier(w));
        return;
    }
    double ok[4], small[2];
    float other[8];
    ddl_request *r[4];
    ddl_info infos[4];
    OK(ddl_irecv(w, DDL_ARRAY(ok), 0, 0, &r[0]));
    OK(ddl_irecv(w, DDL_ARRAY(small), 0, 1, &r[1]));
    OK(ddl_irecv(w, DDL_ARRAY(other), 0, 2, &r[2]));
    OK(ddl_irecv(w, DDL_ARRAY(ok), 0, 3, &r[3]));
    FAILS(ddl_wait_all(r, 4, infos), DDL_ERR_TRUNCATED, "tag 1");
    static const ddl_status expected[4] = {DDL_OK, DDL_ERR_TRUNCATED, DDL_ERR_MISMATCH, DDL_OK};
    for (int i = 0; i < 4; i++) {
        CHECK(r[i] == NULL);
        CHECK_EQ((int)infos[i].status, (int)expected[i]);
    }
    double late[4];
    OK(ddl_recv(w, DDL_ARRAY(late), 0, 1, NULL)); /* what failed is still there */
    OK(ddl_recv(w, DDL_ARRAY(late), 0, 2, NULL));
    OK(ddl_barrier(w));
}

TEST(wait_all_returns_the_first_error_by_index) { world_threads(2, first_error, NULL); }

/* ---- cancel ---- */

static void cancelling(ddl_group *w, void *arg) {
    (void)arg;
    int32_t value = 5, got = -1;
    if (ddl_rank(w) == 0) {
        OK(ddl_barrier(w));
        OK(ddl_send(w, DDL_VIEW(&value, 1), 1, 1)); /* for the receive that was not cancelled */
        OK(ddl_barrier(w));
        OK(ddl_barrier(w));
        return;
    }
    ddl_request *a, *b, *s;
    ddl_info info;
    OK(ddl_irecv(w, DDL_VIEW(&got, 1), 0, 1, &a));
    OK(ddl_irecv(w, DDL_VIEW(&value, 1), DDL_ANY_SOURCE, DDL_ANY_TAG, &b));
    OK(ddl_cancel(a));
    FAILS(ddl_cancel(a), DDL_ERR_STATE, "ddl_cancel");
    CHECK(a != NULL);
    FAILS(ddl_wait(&a, &info), DDL_ERR_CANCELLED, "cancelled");
    CHECK(a == NULL);
    CHECK_EQ((int)info.status, (int)DDL_ERR_CANCELLED);
    OK(ddl_barrier(w));
    OK(ddl_barrier(w));
    FAILS(ddl_cancel(b), DDL_ERR_STATE, "too late");
    OK(ddl_wait(&b, &info)); /* it has what came */
    CHECK_EQ(value, 5);
    CHECK_EQ(got, -1);
    CHECK_EQ(info.tag, 1);
    OK(ddl_isend(w, DDL_VIEW(&value, 1), 1, 3, &s));
    FAILS(ddl_cancel(s), DDL_ERR_ARG, "only a receive");
    OK(ddl_wait(&s, NULL));
    OK(ddl_recv(w, DDL_VIEW(&value, 1), 1, 3, NULL));
    CHECK_EQ((int)ddl_cancel(NULL), (int)DDL_ERR_ARG);
    OK(ddl_barrier(w));
}

TEST(cancel_before_and_after_arrival) { world_threads(2, cancelling, NULL); }

/* ---- persistent ---- */

static void persistent(ddl_group *w, void *arg) {
    (void)arg;
    int n = ddl_size(w), me = ddl_rank(w);
    float in[100], out[100];
    ddl_collective d = {.kind = DDL_ALL_REDUCE, .op = DDL_SUM, .in = DDL_ARRAY(in), .out = DDL_ARRAY(out)};
    ddl_request *r = NULL, *idle = NULL, *list[2];
    OK(ddl_collective_init(w, &d, &r));
    OK(ddl_collective_init(w, &d, &idle));
    int32_t index = 5;
    list[0] = idle;
    list[1] = NULL;
    OK(ddl_wait(&idle, NULL)); /* not started: nothing to wait for, and it stays */
    OK(ddl_wait_any(list, 2, &index, NULL));
    CHECK_EQ(index, -1);
    CHECK(idle != NULL);
    for (int round = 0; round < 20; round++) {
        for (int i = 0; i < 100; i++) {
            in[i] = (float)(i + me + round);
            out[i] = -1;
        }
        ddl_request *same = r;
        OK(ddl_start(r));
        if (round % 3 == 0) {
            ddl_status again = ddl_start(r); /* while it runs, or before its end was reported */
            CHECK_EQ((int)again, (int)DDL_ERR_STATE);
            CHECK_STR(ddl_error(ddl_group_context(w)), "ddl_start");
        }
        if (round % 2) {
            OK(ddl_wait(&r, NULL));
        } else {
            ddl_status status;
            double end = test_now_s() + 10 * test_slow();
            while ((status = ddl_test(&r, NULL)) == DDL_IN_PROGRESS && test_now_s() < end) {
            }
            OK(status);
        }
        CHECK(r == same); /* it is kept */
        for (int i = 0; i < 100; i++) {
            CHECK_EQ(out[i], (float)(n * (i + round) + n * (n - 1) / 2));
        }
    }
    ddl_group *g = w;
    OK(ddl_group_duplicate(w, &g));
    ddl_request *inner = NULL;
    OK(ddl_collective_init(g, &d, &inner));
    FAILS(ddl_group_free(&g), DDL_ERR_STATE, "1 requests");
    OK(ddl_request_free(&inner));
    CHECK(inner == NULL);
    OK(ddl_group_free(&g));
    OK(ddl_start(r));
    if (me != 0) {
        OK(ddl_wait(&r, NULL));
    } else { /* finished, not waited for */
        double end = test_now_s() + 5 * test_slow();
        ddl_status status;
        while ((status = ddl_request_free(&r)) == DDL_ERR_STATE && test_now_s() < end) {
            CHECK_STR(ddl_error(ddl_group_context(w)), "ddl_request_free");
            CHECK(r != NULL);
            OK(ddl_progress(ddl_group_context(w)));
        }
        OK(status);
    }
    OK(ddl_request_free(&r));
    OK(ddl_request_free(&idle));
    CHECK(r == NULL && idle == NULL);
    OK(ddl_request_free(&idle));
}

TEST(persistent_operations) {
    world_threads(2, persistent, NULL);
    world_threads(3, persistent, NULL);
}

/* ---- refused ---- */

static void refused(ddl_group *w, void *arg) {
    (void)arg;
    int32_t value = 1;
    ddl_request *r, *copy, *list[2];
    int32_t index;
    if (ddl_rank(w) == 1) {
        OK(ddl_barrier(w));
        OK(ddl_send(w, DDL_VIEW(&value, 1), 0, 0));
        OK(ddl_barrier(w));
        return;
    }
    OK(ddl_irecv(w, DDL_VIEW(&value, 1), 1, 0, &r));
    FAILS(ddl_request_free(&r), DDL_ERR_STATE, "still running");
    CHECK(r != NULL);
    FAILS(ddl_start(r), DDL_ERR_STATE, "ddl_start");
    FAILS(ddl_wait_any(&r, 1, NULL, NULL), DDL_ERR_ARG, "ddl_wait_any: out_index");
    FAILS(ddl_wait_some(&r, 1, NULL, NULL, NULL), DDL_ERR_ARG, "ddl_wait_some: out_done");
    OK(ddl_barrier(w));
    copy = r;
    OK(ddl_wait(&r, NULL));
    FAILS(ddl_wait(&copy, NULL), DDL_ERR_STATE, "already been waited for");
    FAILS(ddl_test(&copy, NULL), DDL_ERR_STATE, "already been waited for");
    FAILS(ddl_cancel(copy), DDL_ERR_STATE, "ddl_cancel");
    FAILS(ddl_start(copy), DDL_ERR_STATE, "ddl_start");
    FAILS(ddl_request_free(&copy), DDL_ERR_STATE, "ddl_request_free");
    list[0] = NULL;
    list[1] = copy;
    FAILS(ddl_wait_all(list, 2, NULL), DDL_ERR_STATE, "ddl_wait_all");
    FAILS(ddl_wait_any(list, 2, &index, NULL), DDL_ERR_STATE, "ddl_wait_any");
    CHECK_EQ((int)ddl_wait_all(NULL, 2, NULL), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_wait_all(list, -1, NULL), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_wait(NULL, NULL), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_test(NULL, NULL), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_start(NULL), (int)DDL_ERR_ARG);
    OK(ddl_request_free(NULL));
    OK(ddl_barrier(w));
}

TEST(a_request_ends_once) { world_threads(2, refused, NULL); }

/* ---- ends before the data came ---- */

/* The deadline passes on either side, in every state of a message; the memory is the caller's again at once. */
static void deadlines(ddl_group *w, void *arg) {
    (void)arg;
    enum { BIG = 24 * 1024 * 1024 };
    ddl_group *g;
    OK(ddl_group_duplicate(w, &g));
    unsigned char *at = malloc(BIG);
    memset(at, 1, BIG);
    int32_t value = 3;
    if (ddl_rank(w) == 0) {
        OK(ddl_group_set(g, &(ddl_group_options){.timeout_ms = (int64_t)(150 * test_slow())}));
        FAILS(ddl_recv(g, DDL_VIEW(&value, 1), 1, 0, NULL), DDL_ERR_TIMEOUT, "receive from rank 1");
        CHECK_EQ(value, 3);
        FAILS(ddl_send(g, world_bytes(at, BIG), 1, 1), DDL_ERR_TIMEOUT, "send to rank 1"); /* not asked for */
        memset(at, 2, BIG);
        free(at);
        OK(ddl_barrier(w));
        at = malloc(BIG);
        memset(at, 7, BIG);
        OK(ddl_send(w, world_bytes(at, BIG), 1, 2));
    } else {
        OK(ddl_barrier(w));
        ddl_info info;
        FAILS(ddl_recv(g, world_bytes(at, BIG), 0, 1, &info), DDL_ERR_CANCELLED, "gave up");
        OK(ddl_recv(w, world_bytes(at, BIG), 0, 2, &info));
        CHECK_EQ(info.count, BIG);
        CHECK(at[0] == 7 && at[BIG - 1] == 7);
    }
    OK(ddl_barrier(w));
    free(at);
    OK(ddl_group_free(&g));
}

TEST(a_deadline_gives_the_memory_back) { world_threads(2, deadlines, NULL); }

/* A sender that gives up half-way: the receiver hears of it. The receiver accepts, then stops calling. */
static void half_way(ddl_group *w, void *arg) {
    (void)arg;
    enum { BIG = 48 * 1024 * 1024 };
    unsigned char *at = malloc(BIG);
    memset(at, ddl_rank(w) == 0, BIG);
    ddl_group *g;
    OK(ddl_group_duplicate(w, &g));
    if (ddl_rank(w) == 0) {
        OK(ddl_group_set(g, &(ddl_group_options){.timeout_ms = (int64_t)(200 * test_slow())}));
        OK(ddl_barrier(w));
        FAILS(ddl_send(g, world_bytes(at, BIG), 1, 1), DDL_ERR_TIMEOUT, "on its way");
        memset(at, 9, BIG);
    } else {
        ddl_request *r;
        OK(ddl_irecv(g, world_bytes(at, BIG), 0, 1, &r));
        OK(ddl_barrier(w));
        double end = test_now_s() + 5 * test_slow();
        while (ddl_test(&r, NULL) == DDL_IN_PROGRESS && at[0] == 0 && test_now_s() < end) {
        }
        REQUIRE(r != NULL); /* some came, not all */
        usleep((useconds_t)(500000 * test_slow())); /* the socket fills, the sender's deadline passes */
        ddl_info info = {0};
        ddl_status status = ddl_wait(&r, &info);
        CHECK_STR(ddl_status_name(status), "DDL_ERR_CANCELLED");
        CHECK_STR(ddl_error(ddl_group_context(w)), "gave up");
    }
    OK(ddl_barrier(w)); /* the connection lives */
    free(at);
    OK(ddl_group_free(&g));
}

TEST(a_sender_that_gives_up_tells_the_receiver) { world_threads(2, half_way, NULL); }

/* Hundreds of requests that nobody waits for: finalize ends them, and frees them all. */
static void left_over(ddl_group *w, void *arg) {
    (void)arg;
    static int32_t values[2][500];
    static float sums[2][8];
    ddl_request *r;
    int me = ddl_rank(w);
    ddl_tensor two[2] = {ddl_tensor_1d(sums[me], DDL_F32, 4), ddl_tensor_1d(values[me], DDL_I32, 4)};
    for (int i = 0; i < 300; i++) {
        OK(ddl_irecv(w, DDL_VIEW(&values[me][i], 1), me ^ 1, i, &r));
        if (i == 70) {
            OK(ddl_iall_reduce_many(w, two, 2, DDL_SUM, &r));
        }
    }
    ddl_group *g;
    OK(ddl_group_duplicate(w, &g));
    ddl_collective d = {.kind = DDL_BARRIER};
    OK(ddl_collective_init(g, &d, &r));
    OK(ddl_irecv(g, DDL_VIEW(&values[me][400], 1), DDL_ANY_SOURCE, DDL_ANY_TAG, &r));
    FAILS(ddl_group_free(&g), DDL_ERR_STATE, "2 requests");
    *((ddl_group ***)arg)[me] = g;
}

TEST(finalize_with_hundreds_of_requests) {
    ddl_group *groups[2] = {NULL, NULL}, **slots[2] = {&groups[0], &groups[1]};
    world_threads(2, left_over, slots);
    for (int i = 0; i < 2; i++) { /* groups remain to be freed, and still know what they were */
        REQUIRE(groups[i] != NULL);
        CHECK_EQ(ddl_rank(groups[i]), i);
        CHECK_EQ((int)ddl_barrier(groups[i]), (int)DDL_ERR_STATE);
        CHECK_STR(ddl_error(ddl_group_context(groups[i])), "finalized");
        CHECK_EQ((int)ddl_group_free(&groups[i]), (int)DDL_OK);
        CHECK(groups[i] == NULL);
    }
}

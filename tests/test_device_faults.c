/* Devices that fail: memory that is not where a tensor says, freed memory, a device without room, copies that fail
 * before and during an operation, a rank that is killed or leaves while copies are under way, the end of a context in the
 * middle. The operation fails with a sentence; the context lives.
 * tests/run: variants=gcc,asan timeout=120 libs=-ldl waits=yes */
#include "device.h"

static ddl_context *alone(void) {
    coll_job job;
    coll_job_make(&job);
    standin("");
    return coll_join(0, 1, &job);
}

#define FAILS_WITH(call, status, text)                                                                     \
    do {                                                                                                   \
        CHECK_STR(ddl_status_name(call), ddl_status_name(status));                                         \
        CHECK_STR(ddl_error(c), text);                                                                     \
    } while (0)

TEST(memory_that_is_elsewhere) {
    ddl_context *c = alone();
    REQUIRE(c != NULL);
    ddl_group *w = ddl_world(c);
    float host[16] = {1};
    ddl_tensor a = standin_tensor(c, 1, host, DDL_F32, 16), b = standin_tensor(c, 2, host, DDL_F32, 16), t = a;
    CHECK_EQ(ddl_device_count(c), 2);
    int32_t device = -1;
    CHECK_EQ(ddl_device_of(c, b.data, &device), DDL_OK);
    CHECK_EQ(device, 2);
    CHECK_EQ(ddl_device_of(c, host, &device), DDL_OK);
    CHECK_EQ(device, DDL_HOST);
    ddl_device_info info;
    CHECK_EQ(ddl_device_info_get(c, 2, &info), DDL_OK);
    CHECK(strcmp(info.plugin, "standin") == 0 && info.index == 1);
    FAILS_WITH(ddl_device_info_get(c, 3, &info), DDL_ERR_ARG, "no device 3");
    t.device = 2;
    FAILS_WITH(ddl_all_reduce(w, t, t, DDL_SUM), DDL_ERR_ARG, "is of device 1");
    t.device = 3;
    FAILS_WITH(ddl_send(w, t, 0, 0), DDL_ERR_ARG, "there is no device 3");
    t = ddl_tensor_1d(host, DDL_F32, 16);
    t.device = 1;
    FAILS_WITH(ddl_broadcast(w, t, 0), DDL_ERR_ARG, "is ordinary memory");
    t = a;
    t.device = DDL_HOST;
    FAILS_WITH(ddl_all_reduce(w, t, t, DDL_SUM), DDL_ERR_ARG, "its memory at");
    FAILS_WITH(ddl_isend(w, t, 0, 0, &(ddl_request *){NULL}), DDL_ERR_ARG, "is of device 1");
    t = a;
    t.shape[0] = 1000; /* its end is beyond what was allocated */
    FAILS_WITH(ddl_all_reduce(w, t, t, DDL_SUM), DDL_ERR_ARG, "device 1");
    FAILS_WITH(ddl_tensor_copy(c, a, ddl_tensor_1d(host, DDL_F32, 15)), DDL_ERR_ARG, "must be alike");
    FAILS_WITH(ddl_tensor_copy(c, a, a), DDL_ERR_ARG, "overlap");
    t = a;
    CHECK_EQ(ddl_tensor_free(c, &a), DDL_OK);
    FAILS_WITH(ddl_all_reduce(w, t, t, DDL_SUM), DDL_ERR_ARG, "it was freed, or never allocated");
    FAILS_WITH(ddl_device_of(c, t.data, &device), DDL_ERR_ARG, "was freed");
    CHECK_EQ(ddl_all_reduce(w, b, b, DDL_SUM), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &b), DDL_OK);
    coll_leave(c);
}

/* The short way of blocking messages asks too. */
static void mislabelled(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    float host[16] = {0};
    ddl_tensor a = standin_tensor(c, 1, host, DDL_F32, 16), t = a, plain = ddl_tensor_1d(host, DDL_F32, 16);
    t.device = DDL_HOST;
    FAILS_WITH(ddl_send(ddl_world(c), t, 1 - rank, 3), DDL_ERR_ARG, "is of device 1");
    FAILS_WITH(ddl_recv(ddl_world(c), t, 1 - rank, 3, NULL), DDL_ERR_ARG, "is of device 1");
    host[5] = (float)rank + 1;
    CHECK_EQ(ddl_send(ddl_world(c), plain, 1 - rank, 3), DDL_OK);
    CHECK_EQ(ddl_recv(ddl_world(c), plain, 1 - rank, 3, NULL), DDL_OK);
    CHECK(host[5] == (float)(1 - rank) + 1);
    CHECK_EQ(ddl_tensor_free(c, &a), DDL_OK);
    coll_leave(c);
}

TEST(memory_of_a_device_in_a_blocking_message) {
    coll_job job;
    standin("");
    coll_job_make(&job);
    ranks_threads(2, mislabelled, &job);
}

TEST(a_device_without_room) {
    ddl_context *c = alone();
    REQUIRE(c != NULL);
    ddl_group *w = ddl_world(c);
    standin_state *s = standin_of();
    int64_t huge = (int64_t)1 << 30, some = 5000000;
    float one = 1;
    ddl_tensor t = {0}, small = standin_tensor(c, 1, &one, DDL_F32, 1);
    FAILS_WITH(ddl_tensor_alloc_on(c, 1, DDL_F32, 1, &huge, &t), DDL_ERR_NOMEM, "has no memory for");
    CHECK(t.data == NULL);
    CHECK_EQ(ddl_tensor_alloc_on(c, 1, DDL_U8, 1, &some, &t), DDL_OK);
    CHECK_EQ(ddl_all_reduce(w, small, small, DDL_SUM), DDL_OK);
    s->no_pinned = 1;
    ddl_request *r = NULL;
    FAILS_WITH(ddl_broadcast(w, t, 0), DDL_ERR_NOMEM, "no pinned memory to stage");
    FAILS_WITH(ddl_isend(w, t, 0, 0, &r), DDL_ERR_NOMEM, "no pinned memory to stage");
    CHECK(r == NULL);
    CHECK_EQ(ddl_all_reduce(w, small, small, DDL_SUM), DDL_OK); /* in memory that is kept */
    s->no_pinned = 0;
    CHECK_EQ(ddl_broadcast(w, t, 0), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &small), DDL_OK);
    coll_leave(c);
    CHECK_EQ(s->pinned, 0);
}

/* Rank 0's copies are refused at once: nothing has happened, the call can be made again. Then they fail on the device,
 * on the way in: the others are told. On the way out: the operation is over for them. */
static void copies_fail(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    ddl_group *w = ddl_world(c), *other = NULL;
    standin_state *s = standin_of();
    float data[32] = {0}, back[32];
    data[7] = (float)rank;
    ddl_tensor t = rank == 0 ? standin_tensor(c, 1, data, DDL_F32, 32) : ddl_tensor_1d(data, DDL_F32, 32);
    CHECK_EQ(ddl_group_duplicate(w, &other), DDL_OK);
    if (rank == 0) {
        s->fail_calls = 1;
        FAILS_WITH(ddl_all_reduce(w, t, t, DDL_SUM), DDL_ERR_SYSTEM, "did not copy a tensor");
        s->fail_calls = 1;
        ddl_request *r = NULL;
        CHECK_EQ(ddl_isend(w, t, 1, 4, &r), DDL_OK);
        FAILS_WITH(ddl_wait(&r, NULL), DDL_ERR_SYSTEM, "did not give them");
        s->fail_tasks = 2; /* in, out: the result does not arrive on this rank */
        FAILS_WITH(ddl_all_reduce(w, t, t, DDL_SUM), DDL_ERR_SYSTEM, "did not take the result");
        standin_read(c, t, back);
        CHECK(memcmp(back, data, sizeof data) == 0);
    } else {
        CHECK_EQ(ddl_all_reduce(w, t, t, DDL_SUM), DDL_OK);
        CHECK(data[7] == (float)(n * (n - 1) / 2));
    }
    CHECK_EQ(ddl_barrier(w), DDL_OK);
    if (rank == 0) {
        s->fail_tasks = 1;
    }
    FAILS_WITH(ddl_all_reduce(other, t, t, DDL_SUM), DDL_ERR_SYSTEM, "rank 0 could not read its tensor from a device");
    CHECK_EQ(ddl_barrier(w), DDL_OK);
    CHECK_EQ(ddl_group_free(&other), DDL_OK);
    if (rank == 0) {
        CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    }
    coll_leave(c);
}

TEST(copies_that_fail) {
    standin("");
    coll_job job;
    coll_job_make(&job);
    ranks_threads(3, copies_fail, &job);
}

/* The second of two results is refused while the device still copies the first: that one's end changes nothing. */
TEST(a_result_of_many_that_is_refused) {
    ddl_context *c = alone();
    REQUIRE(c != NULL);
    standin_state *s = standin_of();
    static float data[70000];
    ddl_tensor t[2] = {standin_tensor(c, 1, data, DDL_F32, 70000), standin_tensor(c, 1, data, DDL_F32, 70000)};
    for (int late = 0; late < 2; late++) {
        ddl_request *r = NULL;
        s->fail_calls = 4; /* in, in, out, out */
        CHECK_EQ(ddl_iall_reduce_many(ddl_world(c), t, 2, DDL_SUM, &r), DDL_OK);
        while (s->fail_calls > 0) {
            CHECK_EQ(ddl_progress(c), DDL_OK);
        }
        for (int i = 0; i < 1000 * late; i++) {
            CHECK_EQ(ddl_progress(c), DDL_OK);
        }
        FAILS_WITH(ddl_wait(&r, NULL), DDL_ERR_SYSTEM, "did not take the result");
    }
    CHECK_EQ(ddl_all_reduce_many(ddl_world(c), t, 2, DDL_SUM), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &t[0]), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &t[1]), DDL_OK);
    coll_leave(c);
    CHECK_EQ(s->pinned, 0);
}

/* The device copies, but can say nothing of when it is done: its pinned memory is nobody else's until it can. */
TEST(an_event_that_fails) {
    ddl_context *c = alone();
    REQUIRE(c != NULL);
    standin_state *s = standin_of();
    static float data[70000], back[70000];
    for (int i = 0; i < 70000; i++) {
        data[i] = (float)i;
    }
    ddl_tensor t = standin_tensor(c, 1, data, DDL_F32, 70000);
    s->stopped = 1;
    s->fail_events = 1;
    FAILS_WITH(ddl_all_reduce(ddl_world(c), t, t, DDL_SUM), DDL_ERR_SYSTEM, "did not copy a tensor");
    ddl_request *r = NULL;
    int used = s->pinned;
    CHECK_EQ(ddl_iall_reduce(ddl_world(c), t, t, DDL_SUM, &r), DDL_OK);
    CHECK(s->pinned > used);
    s->stopped = 0;
    CHECK_EQ(ddl_wait(&r, NULL), DDL_OK);
    s->fail_events = 1;
    FAILS_WITH(ddl_tensor_copy(c, ddl_tensor_1d(back, DDL_F32, 70000), t), DDL_ERR_SYSTEM, "a device failed to copy");
    standin_read(c, t, back);
    CHECK(memcmp(back, data, sizeof data) == 0);
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    coll_leave(c);
    CHECK_EQ(s->pinned, 0);
}

static void *abort_soon(void *arg) {
    usleep(50000);
    CHECK_EQ(ddl_abort(arg, "a test"), DDL_OK);
    return NULL;
}

static void *finalize_soon(void *arg) {
    usleep(50000);
    ddl_context *c = arg;
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
    return NULL;
}

static void *go_on_late(void *arg) {
    usleep(500000);
    ((standin_state *)arg)->stopped = 0;
    return NULL;
}

/* A device that hangs: a copy ends as every wait does, and its pinned memory stays the device's. */
TEST(a_copy_that_does_not_end) {
    static float data[70000];
    for (int way = 0; way < 3; way++) { /* time, abort, finalize */
        coll_job job;
        coll_job_make(&job);
        job.config.timeout_ms = way == 0 ? 1000 : 0;
        standin("");
        ddl_context *c = coll_join(0, 1, &job);
        REQUIRE(c != NULL);
        standin_state *s = standin_of();
        ddl_tensor t = standin_tensor(c, 1, data, DDL_F32, 70000), host = ddl_tensor_1d(data, DDL_F32, 70000);
        pthread_t ender, goer;
        int kept = s->pinned;
        s->stopped = 1;
        if (way > 0) {
            REQUIRE(pthread_create(&ender, NULL, way == 1 ? abort_soon : finalize_soon, c) == 0);
        }
        if (way == 2) { /* before the context gives the device up */
            REQUIRE(pthread_create(&goer, NULL, go_on_late, s) == 0);
            CHECK_STR(ddl_status_name(ddl_tensor_copy(c, t, host)), "DDL_ERR_STATE");
            pthread_join(goer, NULL);
        } else {
            FAILS_WITH(ddl_tensor_copy(c, t, host), way == 0 ? DDL_ERR_TIMEOUT : DDL_ERR_ABORTED,
                       way == 0 ? "device 1 has not copied 280000 bytes within 1000 ms" : "aborted the job: a test");
        }
        if (way == 0) { /* what is still being copied is not taken for the next one */
            FAILS_WITH(ddl_tensor_copy(c, host, t), DDL_ERR_TIMEOUT, "has not copied");
            CHECK_EQ(s->pinned, kept + 1);
        }
        if (way > 0) {
            pthread_join(ender, NULL);
        }
        s->stopped = 0;
        if (way < 2) {
            CHECK_EQ(ddl_finalize(&c), DDL_OK);
        }
        CHECK_EQ(s->pinned, 0);
    }
}

/* The last rank goes without a word; the others have device tensors in a collective and a receive. */
static void killed(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    ddl_group *w = ddl_world(c);
    float data[3000] = {(float)rank};
    ddl_tensor t = standin_tensor(c, 1, data, DDL_F32, 3000), to = standin_tensor(c, 2, data, DDL_F32, 3000);
    CHECK_EQ(ddl_all_reduce(w, t, to, DDL_SUM), DDL_OK);
    if (rank == n - 1) { /* it has its result; a death while others wait for theirs would be told to them */
        for (int i = 0; i < n - 1; i++) {
            CHECK_EQ(ddl_recv(w, ddl_tensor_1d(&rank, DDL_I32, 1), i, 4, NULL), DDL_OK);
        }
        raise(SIGKILL);
    }
    CHECK_EQ(ddl_send(w, ddl_tensor_1d(&rank, DDL_I32, 1), n - 1, 4), DDL_OK);
    ddl_request *r = NULL;
    CHECK_EQ(ddl_irecv(w, to, n - 1, 3, &r), DDL_OK);
    FAILS_WITH(ddl_all_reduce(w, t, t, DDL_SUM), DDL_ERR_PEER, "dead");
    CHECK_EQ(ddl_wait(&r, NULL), DDL_ERR_PEER);
    CHECK_EQ(ddl_send_recv(w, t, 1 - rank, 5, to, 1 - rank, 5, NULL), DDL_OK); /* messages go on between the living */
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &to), DDL_OK);
    coll_leave(c);
}

TEST(a_rank_that_is_killed) {
    standin("");
    coll_job job;
    coll_job_make(&job);
    ranks r;
    ranks_start(&r, 3, killed, &job);
    CHECK_EQ(ranks_wait(&r, 40), 1);
    CHECK(WIFSIGNALED(r.status[2]) && WTERMSIG(r.status[2]) == SIGKILL);
    CHECK(r.status[0] == 0 && r.status[1] == 0);
}

static char warned[1000];

static void on_log(void *user, ddl_log_level level, const char *line) {
    (void)user;
    if (level == DDL_LOG_WARN) {
        snprintf(warned, sizeof warned, "%s", line);
    }
}

/* Ends while a device hangs, which goes on later: it writes only to memory that was left to it. */
static void end_while_stuck(void) {
    static float data[70000], back[70000];
    coll_job job;
    coll_job_make(&job);
    job.config.log = on_log;
    standin("");
    ddl_context *c = coll_join(0, 1, &job);
    REQUIRE(c != NULL);
    data[69999] = 3;
    ddl_tensor t = standin_tensor(c, 1, data, DDL_F32, 70000);
    standin_state *s = standin_of();
    s->stopped = 1;
    ddl_request *r = NULL;
    CHECK_EQ(ddl_iall_reduce(ddl_world(c), t, t, DDL_SUM, &r), DDL_OK);
    int left = s->pinned;
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
    CHECK_STR(warned, "device 1 (standin 0) has not ended its copies for 5 s");
    CHECK_STR(warned, "are left to it for good");
    CHECK(left > 0 && s->pinned == left);
    s->stopped = 0;
    c = alone();
    REQUIRE(c != NULL);
    t = standin_tensor(c, 1, data, DDL_F32, 70000);
    CHECK_EQ(ddl_all_reduce(ddl_world(c), t, t, DDL_SUM), DDL_OK);
    standin_read(c, t, back);
    CHECK(memcmp(back, data, sizeof data) == 0);
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
    CHECK_EQ(s->pinned, left);
}

/* In a process that ends without the leak checker: the leak is meant. */
TEST(the_end_while_a_device_hangs) {
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        end_while_stuck();
        _exit(0);
    }
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
}

/* The context ends while a device still copies, holds, and waits for a message: all is given back. */
TEST(the_end_in_the_middle) {
    for (int way = 0; way < 3; way++) {
        ddl_context *c = alone();
        REQUIRE(c != NULL);
        ddl_group *w = ddl_world(c);
        standin_state *s = standin_of();
        static float data[70000];
        ddl_tensor t = standin_tensor(c, 1, data, DDL_F32, 70000);
        ddl_request *r[3] = {NULL, NULL, NULL};
        if (way == 1) {
            CHECK_EQ(ddl_irecv(w, t, 0, 7, &r[0]), DDL_OK);
        } else {
            CHECK_EQ(ddl_iall_reduce(w, t, t, DDL_SUM, &r[0]), DDL_OK);
            CHECK_EQ(ddl_isend(w, t, 0, 1, &r[1]), DDL_OK);
            CHECK_EQ(ddl_iall_reduce_many(w, &t, 1, DDL_SUM, &r[2]), DDL_OK);
        }
        for (int i = 0; way == 2 && i < 20; i++) {
            CHECK_EQ(ddl_progress(c), DDL_OK);
        }
        CHECK_EQ(ddl_finalize(&c), DDL_OK);
        CHECK_EQ(s->pinned, 0);
    }
}

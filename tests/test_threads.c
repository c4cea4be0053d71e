/* Threads: ranks as threads of one process, and several threads of one rank: groups used at once with no order between
 * them, waits from many threads, a thread that progresses alone, and who wakes whom.
 * tests/run: variants=gcc,asan,tsan timeout=90 */
#include "world.h"

#include <stdatomic.h>

enum { THREADS = 4 };

typedef struct job {
    ddl_group *w;
    int index;
    void *arg;
} job;

/* Runs fn in several threads of this rank. */
static void together(ddl_group *w, int count, void *(*fn)(void *), void *arg) {
    pthread_t id[16];
    job jobs[16];
    for (int i = 0; i < count; i++) {
        jobs[i] = (job){w, i, arg};
        REQUIRE(pthread_create(&id[i], NULL, fn, &jobs[i]) == 0);
    }
    for (int i = 0; i < count; i++) {
        pthread_join(id[i], NULL);
    }
}

/* ---- the first thread: before all others, as it is one only once ---- */

/* A process with one thread locks without a mutex: a thread that begins within a call still waits until the call is over, and
 * from then on both take the mutex. */
typedef struct beginner {
    ddl_context *context;
    pthread_t thread;
    atomic_int began, asked;
    int asked_within; /* how far it had come when the call went on */
} beginner;

static void *ask_within_a_call(void *p) {
    beginner *b = p;
    ddl_group *w = ddl_world(b->context);
    ddl_stats stats;
    atomic_store(&b->began, 1);
    OK(ddl_stats_get(b->context, &stats));
    atomic_store(&b->asked, 1);
    for (int i = 0; i < 2000; i++) {
        OK(ddl_stats_get(b->context, &stats));
    }
    return NULL;
}

static void begin_within_a_call(void *dst, const void *a, const void *b, int64_t count, ddl_dtype dtype, void *user) {
    beginner *begun = user;
    (void)dtype;
    if (atomic_load(&begun->began) == 0) {
        REQUIRE(pthread_create(&begun->thread, NULL, ask_within_a_call, begun) == 0);
        while (atomic_load(&begun->began) == 0) {
            usleep(1000);
        }
        usleep(100000);
        begun->asked_within = atomic_load(&begun->asked);
    }
    for (int64_t i = 0; i < count; i++) {
        ((double *)dst)[i] = ((const double *)a)[i] + ((const double *)b)[i];
    }
}

static void beginning_within_a_call(ddl_group *w, void *arg) {
    ddl_op op;
#if defined(DDL__SINGLE_THREADED) && !defined(__SANITIZE_THREAD__)
    const char *over = getenv("DDL_TRANSPORTS"); /* libfabric may have threads: then it is as in other tests */
    REQUIRE(__libc_single_threaded != 0 || (over != NULL && strstr(over, "fabric") != NULL));
#endif
    double value[3] = {1, 2, 3}, sum[3];
    beginner b = {.context = ddl_group_context(w)};
    (void)arg;
    OK(ddl_op_create(b.context, begin_within_a_call, &b, 1, &op));
    for (int root = 0; root < 2; root++) { /* who is root reduces */
        OK(ddl_reduce(w, DDL_ARRAY(value), DDL_ARRAY(sum), op, root));
        CHECK(ddl_rank(w) != root || (sum[0] == 2 && sum[2] == 6));
    }
    REQUIRE(atomic_load(&b.began) == 1);
    CHECK_EQ(b.asked_within, 0);
    for (int i = 0; i < 2000; i++) {
        value[0] = 1;
        OK(ddl_all_reduce(w, DDL_ARRAY(value), DDL_ARRAY(value), DDL_SUM));
        CHECK(value[0] == 2);
    }
    pthread_join(b.thread, NULL);
    CHECK_EQ(atomic_load(&b.asked), 1);
    OK(ddl_op_free(b.context, op));
}

TEST(a_thread_that_begins_within_a_call_waits_for_its_end) { world_fork(2, beginning_within_a_call, NULL, 30); }

/* ---- groups at once ---- */

static void *in_own_group(void *p) {
    job *j = p;
    ddl_group *w = j->w, *g = ((ddl_group **)j->arg)[j->index];
    int n = ddl_size(g), me = ddl_rank(g), right = (me + 1) % n, left = (me + n - 1) % n;
    unsigned char *out = malloc(200000), *in = malloc(200000);
    for (int round = 0; round < 15; round++) {
        if ((round + me + j->index) % 4 == 0) {
            usleep(300); /* every rank meets its threads in another order */
        }
        int64_t x[40], sum[40];
        for (int i = 0; i < 40; i++) {
            x[i] = i * (me + 1) + round + j->index;
        }
        OK(ddl_all_reduce(g, DDL_ARRAY(x), DDL_ARRAY(sum), DDL_SUM));
        for (int i = 0; i < 40; i++) {
            CHECK_EQ(sum[i], (int64_t)i * n * (n + 1) / 2 + (int64_t)n * (round + j->index));
        }
        size_t bytes = round % 3 == 0 ? 200000 : 1000;
        int mark = j->index * 16 + round;
        world_fill(out, me, mark, bytes);
        memset(in, 0xa5, bytes);
        OK(ddl_send_recv(g, world_bytes(out, bytes), right, 0, world_bytes(in, bytes), left, 0, NULL));
        CHECK_EQ(world_wrong(in, left, mark, bytes), 0);
    }
    free(out);
    free(in);
    return NULL;
}

static void groups_at_once(ddl_group *w, void *arg) {
    (void)arg;
    ddl_group *groups[THREADS];
    for (int i = 0; i < THREADS; i++) {
        OK(ddl_group_duplicate(w, &groups[i]));
    }
    together(w, THREADS, in_own_group, groups);
    for (int i = 0; i < THREADS; i++) {
        OK(ddl_group_free(&groups[i]));
    }
}

TEST(groups_are_independent) {
    static const int ns[] = {1, 2, 3, 4};
    for (int i = 0; i < 4; i++) {
        world_threads(ns[i], groups_at_once, NULL);
    }
}

static const ddl_config with_a_progress_thread = {.progress_thread = 1};

TEST(groups_are_independent_with_a_progress_thread) {
    world_config = &with_a_progress_thread;
    world_threads(3, groups_at_once, NULL);
    world_config = NULL;
}

TEST(groups_are_independent_with_a_progress_thread_of_each_process) {
    world_config = &with_a_progress_thread;
    world_fork(2, groups_at_once, NULL, 40);
    world_config = NULL;
}

/* Groups made by several threads at once, told apart by their names. */
static void *make_group(void *p) {
    job *j = p;
    ddl_group *w = j->w, *g = NULL;
    int n = ddl_size(w);
    for (int round = 0; round < 10; round++) {
        int32_t ranks[8], one = 1 + j->index, sum = 0;
        char name[32];
        for (int i = 0; i < n; i++) {
            ranks[i] = j->index % 2 ? n - 1 - i : i;
        }
        snprintf(name, sizeof name, "thread %d", j->index);
        OK(ddl_group_create(w, ranks, n, name, &g));
        if (g == NULL) {
            return NULL;
        }
        CHECK_EQ(ddl_rank(g), j->index % 2 ? n - 1 - ddl_rank(w) : ddl_rank(w));
        OK(ddl_all_reduce(g, DDL_VIEW(&one, 1), DDL_VIEW(&sum, 1), DDL_SUM));
        CHECK_EQ(sum, n * (1 + j->index));
        OK(ddl_group_free(&g));
    }
    return NULL;
}

static void making(ddl_group *w, void *arg) {
    (void)arg;
    together(w, THREADS, make_group, NULL);
}

TEST(threads_make_groups_at_once) {
    world_threads(2, making, NULL);
    world_threads(3, making, NULL);
}

/* ---- messages of one group from many threads ---- */

static void *talk(void *p) {
    job *j = p;
    ddl_group *w = j->w;
    int peer = ddl_rank(w) ^ 1;
    for (int i = 0; i < 200; i++) {
        int64_t out = j->index * 1000 + i, in = -1;
        ddl_info info;
        ddl_request *r[2] = {NULL, NULL};
        OK(ddl_irecv(w, DDL_VIEW(&in, 1), peer, j->index, &r[0]));
        OK(ddl_isend(w, DDL_VIEW(&out, 1), peer, j->index, &r[1]));
        if (i % 3 == 0) {
            OK(ddl_wait(&r[1], NULL));
            OK(ddl_wait(&r[0], &info));
        } else {
            ddl_info infos[2];
            OK(ddl_wait_all(r, 2, infos));
            info = infos[0];
        }
        CHECK_EQ(in, out);
        CHECK_EQ(info.tag, j->index);
    }
    return NULL;
}

static void talking(ddl_group *w, void *arg) {
    (void)arg;
    together(w, 8, talk, NULL);
}

TEST(eight_threads_share_a_group) { world_threads(2, talking, NULL); }

TEST(eight_threads_share_a_group_between_processes) { world_fork(2, talking, NULL, 40); }

/* ---- who wakes whom ---- */

/* Two threads of one rank play ping-pong through messages to self: whoever sleeps in the kernel for all must be woken. */
static void *ping_pong(void *p) {
    job *j = p;
    ddl_group *w = j->w;
    int quick = 0;
    for (int i = 0; i < 20; i++) {
        int32_t value = -1;
        if (j->index == 0) {
            usleep(30000); /* long enough for the other to fall asleep */
            double start = test_now_s();
            OK(ddl_send(w, DDL_VIEW(&i, 1), ddl_rank(w), 0));
            OK(ddl_recv(w, DDL_VIEW(&value, 1), ddl_rank(w), 1, NULL));
            quick += test_now_s() - start < 0.003 * test_slow();
        } else {
            OK(ddl_recv(w, DDL_VIEW(&value, 1), ddl_rank(w), 0, NULL));
            OK(ddl_send(w, DDL_VIEW(&i, 1), ddl_rank(w), 1));
        }
        CHECK_EQ(value, i);
    }
    CHECK(j->index != 0 || quick >= 5); /* one or two by chance, if sleeps of 50 ms are slept out */
    return NULL;
}

static void self_talk(ddl_group *w, void *arg) {
    (void)arg;
    together(w, 2, ping_pong, NULL);
    OK(ddl_barrier(w));
}

TEST(a_thread_that_sleeps_is_woken_by_another) { world_threads(2, self_talk, NULL); }

/* While one thread sleeps in the kernel for all, another begins a collective that all others wait for: what it needs is
 * there already, so nobody else wakes the sleeper. Of an average all wait the long way. */
static void *reduce_late(void *p) {
    job *j = p;
    ddl_group *w = j->w;
    int rank = ddl_rank(w), n = ddl_size(w), quick[2] = {0, 0};
    int32_t end = 0;
    if (j->index == 0) {
        OK(ddl_recv(w, DDL_VIEW(&end, 1), rank, 0, NULL));
        return NULL;
    }
    for (int i = 0; i < 40; i++) {
        float value = (float)(rank + i);
        usleep(rank == 0 ? 30000 : 0); /* long enough for the other thread to fall asleep, and for the others to come */
        double start = test_now_s();
        if (i % 2 == 0) {
            ddl_request *r = NULL;
            OK(ddl_iall_reduce(w, DDL_VIEW(&value, 1), DDL_VIEW(&value, 1), DDL_SUM, &r));
            OK(ddl_wait(&r, NULL));
        } else {
            OK(ddl_all_reduce(w, DDL_VIEW(&value, 1), DDL_VIEW(&value, 1), DDL_AVG));
        }
        quick[i % 2] += test_now_s() - start < 0.003 * test_slow();
        float sum = (float)(n * (n - 1) / 2 + n * i);
        CHECK(value == (i % 2 == 0 ? sum : sum / (float)n)); /* exact, of two ranks */
    }
    CHECK(rank != 0 || (quick[0] >= 5 && quick[1] >= 5));
    OK(ddl_send(w, DDL_VIEW(&end, 1), rank, 0));
    return NULL;
}

static void late_reductions(ddl_group *w, void *arg) {
    (void)arg;
    together(w, 2, reduce_late, NULL);
    OK(ddl_barrier(w));
}

TEST(a_thread_that_sleeps_is_woken_by_a_collective) { world_threads(2, late_reductions, NULL); }
TEST(a_process_that_sleeps_is_woken_by_a_collective) { world_fork(2, late_reductions, NULL, 40); }

static atomic_int waiting_threads;

static void *wait_for_ever(void *p) {
    job *j = p;
    ddl_group *w = j->w;
    int32_t value = 0;
    ddl_request **slot = &((ddl_request **)j->arg)[j->index];
    atomic_fetch_add(&waiting_threads, 1);
    ddl_request *mine = *slot;
    FAILS(ddl_wait(&mine, NULL), DDL_ERR_CANCELLED, "cancelled");
    CHECK(mine == NULL);
    (void)value;
    return NULL;
}

static void *cancel_all(void *p) {
    job *j = p;
    ddl_group *w = j->w;
    usleep(100000);
    double start = test_now_s();
    for (int i = 0; i < 4; i++) {
        OK(ddl_cancel(((ddl_request **)j->arg)[i]));
    }
    CHECK(test_now_s() - start < 1 * test_slow());
    return NULL;
}

static void *wait_or_cancel(void *p) { return ((job *)p)->index < 4 ? wait_for_ever(p) : cancel_all(p); }

static void cancelling(ddl_group *w, void *arg) {
    (void)arg;
    static __thread int32_t values[4];
    ddl_request *r[4];
    for (int i = 0; i < 4; i++) {
        OK(ddl_irecv(w, DDL_VIEW(&values[i], 1), DDL_ANY_SOURCE, i, &r[i]));
    }
    double start = test_now_s();
    together(w, 5, wait_or_cancel, r);
    CHECK(test_now_s() - start < 5 * test_slow());
    OK(ddl_barrier(w));
}

TEST(a_cancel_wakes_the_thread_that_waits) { world_threads(2, cancelling, NULL); }

/* ---- a thread that progresses alone ---- */

static atomic_int received;

static void busy_sender(ddl_group *w, void *arg) {
    (void)arg;
    enum { BYTES = 4 * 1024 * 1024 };
    unsigned char *at = malloc(BYTES);
    ddl_request *r;
    if (ddl_rank(w) == 0) { /* offers, and computes: the offer is taken up by the thread */
        world_fill(at, 0, 1, BYTES);
        OK(ddl_isend(w, world_bytes(at, BYTES), 1, 0, &r));
        double end = test_now_s() + 8 * test_slow();
        while (!atomic_load(&received) && test_now_s() < end) {
            usleep(1000);
        }
        CHECK(atomic_load(&received));
        OK(ddl_wait(&r, NULL));
    } else {
        OK(ddl_recv(w, world_bytes(at, BYTES), 0, 0, NULL));
        atomic_store(&received, 1);
        CHECK_EQ(world_wrong(at, 0, 1, BYTES), 0);
    }
    free(at);
}

TEST(operations_progress_on_a_thread_of_their_own) {
    ddl_config config = {.progress_thread = 1};
    world_config = &config;
    atomic_store(&received, 0);
    world_threads(2, busy_sender, NULL);
    world_config = NULL;
}

/* ---- abort, finalize ---- */

static _Atomic double aborted_at;

static void *blocked(void *p) {
    job *j = p;
    ddl_group *w = j->w;
    int32_t value = 0;
    ddl_status status = DDL_OK;
    switch (j->index) {
    case 0: status = ddl_recv(w, DDL_VIEW(&value, 1), DDL_ANY_SOURCE, 1, NULL); break;
    case 1: status = ddl_recv(w, DDL_VIEW(&value, 1), (ddl_rank(w) + 1) % ddl_size(w), 2, NULL); break;
    case 2: status = ddl_probe(w, DDL_ANY_SOURCE, 3, NULL); break;
    case 3:
        if (ddl_rank(w) == 0) {
            return NULL; /* who does not come to the barrier */
        }
        status = ddl_barrier(w);
        break;
    default:
        if (ddl_rank(w) == 0) {
            usleep(200000);
            atomic_store(&aborted_at, test_now_s());
            OK(ddl_abort(ddl_group_context(w), "the test says so"));
        }
        return NULL;
    }
    CHECK_STR(ddl_status_name(status), "DDL_ERR_ABORTED");
    double late = test_now_s() - atomic_load(&aborted_at);
    if (late > 1 * test_slow()) { /* 100 ms on a machine that is not busy */
        test__fail(__FILE__, __LINE__, "a wait of kind %d ended %.3f s after the abort", j->index, late);
    }
    return NULL;
}

static void aborting(ddl_group *w, void *arg) {
    (void)arg;
    together(w, 5, blocked, NULL);
    int32_t value;
    FAILS(ddl_send(w, DDL_VIEW(&value, 1), DDL_ANY_SOURCE + 1, 0), DDL_ERR_ABORTED, "the test says so");
    FAILS(ddl_barrier(w), DDL_ERR_ABORTED, "the test says so");
    CHECK_STR(ddl_error(ddl_group_context(w)), "rank 0");
    OK(ddl_abort(ddl_group_context(w), NULL)); /* again: nothing */
}

TEST(abort_from_another_thread_ends_every_wait) {
    ddl_config config = {.log_level = DDL_LOG_WARN};
    for (int k = 0; k < 2; k++) {
        config.progress_thread = k;
        world_config = &config;
        world_threads(3, aborting, NULL);
    }
    world_config = NULL;
}

static atomic_int at_the_end;

static void *ended(void *p) {
    job *j = p;
    ddl_group *w = j->w;
    int32_t value = 0;
    atomic_fetch_add(&at_the_end, 1);
    ddl_status status = j->index == 0   ? ddl_recv(w, DDL_VIEW(&value, 1), DDL_ANY_SOURCE, 1, NULL)
                        : j->index == 1 ? ddl_probe(w, DDL_ANY_SOURCE, 3, NULL)
                                        : ddl_recv(w, DDL_VIEW(&value, 1), 0, j->index, NULL);
    CHECK_STR(ddl_status_name(status), "DDL_ERR_STATE");
    return NULL;
}

/* Finalize while threads wait: their calls end, and finalize waits until they have. The world is a copy that the test
 * holds, because the context goes. */
static void finalize_first(int rank, int n, void *arg) {
    (void)rank;
    (void)n;
    int progress_thread = *(int *)arg;
    ddl_config config = {.world_size = 1, .progress_thread = progress_thread, .timeout_ms = 20000};
    ddl_context *c = NULL;
    REQUIRE(ddl_init(&config, &c) == DDL_OK);
    ddl_group *w = ddl_world(c), *g = NULL;
    OK(ddl_group_duplicate(w, &g));
    pthread_t id[4];
    job jobs[4];
    atomic_store(&at_the_end, 0);
    for (int i = 0; i < 4; i++) {
        jobs[i] = (job){g, i, NULL};
        REQUIRE(pthread_create(&id[i], NULL, ended, &jobs[i]) == 0);
    }
    while (atomic_load(&at_the_end) < 4) {
        usleep(1000);
    }
    usleep((useconds_t)(100000 * test_slow()));
    CHECK_EQ((int)ddl_finalize(&c), (int)DDL_OK);
    for (int i = 0; i < 4; i++) {
        pthread_join(id[i], NULL);
    }
    CHECK_EQ((int)ddl_group_free(&g), (int)DDL_OK);
}

TEST(finalize_ends_the_waits_of_other_threads) {
    for (int k = 0; k < 2; k++) {
        ranks_threads(1, finalize_first, &k);
    }
}

/* A probe that waits counts: its group cannot be freed under it. */
static void *probe_group(void *p) {
    job *j = p;
    ddl_group *w = j->w;
    if (j->index == 0) {
        atomic_fetch_add(&at_the_end, 1);
        OK(ddl_probe(w, DDL_ANY_SOURCE, 3, NULL));
        return NULL;
    }
    while (atomic_load(&at_the_end) == 0) {
        usleep(1000);
    }
    usleep((useconds_t)(100000 * test_slow()));
    ddl_group *g = w;
    FAILS(ddl_group_free(&g), DDL_ERR_STATE, "ddl_group_free");
    int32_t value = 4;
    OK(ddl_send(w, DDL_VIEW(&value, 1), 0, 3));
    return NULL;
}

static void freeing_under_a_probe(ddl_group *w, void *arg) {
    (void)arg;
    ddl_group *g = NULL;
    OK(ddl_group_duplicate(w, &g));
    atomic_store(&at_the_end, 0);
    together(g, 2, probe_group, NULL);
    OK(ddl_group_free(&g));
}

TEST(a_group_is_not_freed_under_a_probe) { world_threads(1, freeing_under_a_probe, NULL); }

/* Finalize while a thread of the leader makes a group that the other rank never comes to. */
static atomic_int all_left;

static void *form_for_ever(void *p) {
    job *j = p;
    ddl_group *g = NULL;
    atomic_fetch_add(&at_the_end, 1);
    CHECK_STR(ddl_status_name(ddl_group_create(j->w, (int32_t[]){0, 1, 2}, 3, "never", &g)), "DDL_ERR_STATE");
    CHECK(g == NULL);
    return NULL;
}

static void form_and_finalize(int rank, int n, void *arg) {
    (void)n;
    world_member m = {arg, rank, 3};
    ddl_config config = {.world_size = 3, .rank = rank, .exchange = world_exchange, .exchange_user = &m};
    config.timeout_ms = (int64_t)(20000 * test_slow());
    ddl_context *c = NULL;
    REQUIRE(ddl_init(&config, &c) == DDL_OK);
    job j = {ddl_world(c), 0, NULL};
    pthread_t id;
    if (rank == 0) {
        REQUIRE(pthread_create(&id, NULL, form_for_ever, &j) == 0);
        while (atomic_load(&at_the_end) == 0) {
            usleep(1000);
        }
        usleep((useconds_t)(100000 * test_slow()));
        double start = test_now_s();
        CHECK_EQ((int)ddl_finalize(&c), (int)DDL_OK);
        CHECK(test_now_s() - start < 5 * test_slow());
        pthread_join(id, NULL);
        atomic_store(&all_left, 1);
    }
    while (atomic_load(&all_left) == 0) {
        usleep(1000);
    }
    CHECK_EQ((int)ddl_finalize(&c), (int)DDL_OK);
}

TEST(finalize_ends_the_making_of_a_group) {
    world in;
    memset(&in, 0, sizeof in);
    pthread_barrier_init(&in.barrier, NULL, 3);
    atomic_store(&at_the_end, 0);
    atomic_store(&all_left, 0);
    ranks_threads(3, form_and_finalize, &in);
    pthread_barrier_destroy(&in.barrier);
}

/* Groups of other lists under one name, made at once by two threads of each rank, in another order on each. */
static void *make_unlike(void *p) {
    job *j = p;
    ddl_group *w = j->w, *g = NULL;
    int me = ddl_rank(w);
    int32_t count = j->index == 0 ? 3 : 2;
    if (me >= count) {
        return NULL;
    }
    for (int round = 0; round < 20; round++) {
        if ((round + me + j->index) % 2 == 0) {
            usleep(500);
        }
        OK(ddl_group_create(w, (int32_t[]){0, 1, 2}, count, NULL, &g));
        if (g == NULL) {
            return NULL;
        }
        CHECK_EQ(ddl_size(g), count);
        OK(ddl_group_free(&g));
    }
    return NULL;
}

static void making_unlike(ddl_group *w, void *arg) {
    (void)arg;
    together(w, 2, make_unlike, NULL);
    OK(ddl_barrier(w));
}

/* One thread waits in a call whose rank 1 is late; another one calls the next collective of the group meanwhile. */
static void *wait_for_the_late(void *p) {
    ddl_group *w = p;
    float value[1] = {1};
    OK(ddl_all_reduce(w, DDL_ARRAY(value), DDL_ARRAY(value), DDL_SUM));
    CHECK(value[0] == 2);
    return NULL;
}

static void calling_behind(ddl_group *w, void *arg) {
    (void)arg;
    float value[1] = {2};
    ddl_request *r = NULL;
    pthread_t thread;
    if (ddl_rank(w) == 1) {
        usleep(300000);
    }
    REQUIRE(pthread_create(&thread, NULL, wait_for_the_late, w) == 0);
    usleep(100000);
    OK(ddl_iall_reduce(w, DDL_ARRAY(value), DDL_ARRAY(value), DDL_SUM, &r));
    pthread_join(thread, NULL);
    OK(ddl_wait(&r, NULL));
    CHECK(value[0] == 4);
}

TEST(a_call_behind_one_that_another_thread_waits_in) { world_fork(2, calling_behind, NULL, 30); }

TEST(threads_make_unlike_groups_of_one_name) { world_threads(3, making_unlike, NULL); }

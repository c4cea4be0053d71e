/* Leaving: in order, early, late, without a word, by abort, twice, with work under way; and children of fork.
 * tests/run: timeout=120 waits=yes */
#define TEST_TIMEOUT_S 600
#include "faults.h"

enum { RANKS = 4 };

typedef struct shared {
    int mask, mode;
    volatile int running, stop;
    volatile double killed;
    volatile double noticed[RANKS];
    volatile int child;
    char sentence[RANKS][1100];
} shared;

static ddl_context *join(int64_t timeout_ms) {
    char why[1024] = "";
    ddl_context *c = NULL;
    setenv("DDL_LOG", "none", 1);
    ddl_config config = {.timeout_ms = timeout_ms, .error_text = why, .error_bytes = sizeof why};
    if (ddl_init(&config, &c) != DDL_OK) {
        test__fail(__FILE__, __LINE__, "ddl_init: %s", why);
    }
    return c;
}

static void leave(ddl_context *c) {
    double start = test_now_s();
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
    CHECK(c == NULL);
    CHECK(test_now_s() - start < 2 * test_slow());
}

static void until(volatile int *value, int wanted) {
    double limit = test_now_s() + 30 * test_slow();
    while (*value < wanted && test_now_s() < limit) {
        usleep(500);
    }
}

/* All_reduces until one fails; remembers when and why. */
static ddl_status reduce_until_error(ddl_context *c, shared *s, int rank) {
    ddl_status status = DDL_OK;
    __atomic_fetch_add(&s->running, 1, __ATOMIC_SEQ_CST);
    for (int64_t i = 0; status == DDL_OK; i++) {
        status = fault_all_reduce(ddl_world(c), 1 + i % 1000, i);
    }
    s->noticed[rank] = test_now_s();
    snprintf(s->sentence[rank], sizeof s->sentence[rank], "%s", ddl_error(c));
    return status;
}

static void barrier_and_leave(int rank, int n, void *arg) {
    (void)arg;
    (void)n;
    ddl_context *c = join(20000);
    REQUIRE(c != NULL);
    for (int i = 0; i < 5; i++) {
        ddl_status status = i % 2 == 0 ? ddl_barrier(ddl_world(c)) : fault_all_reduce(ddl_world(c), 1000, i);
        if (status != DDL_OK) {
            test__fail(__FILE__, __LINE__, "%s: %s", ddl_status_name(status), ddl_error(c));
        }
        if ((rank + i) % 3 == 0) {
            usleep(2000);
        }
    }
    leave(c);
}

TEST(who_leaves_right_after_a_barrier_fails_nobody) {
    for (int i = 0; i < fault_runs(15, 300); i++) {
        ranks_fork(RANKS, barrier_and_leave, NULL, 30);
    }
}

static void leave_early(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    (void)n;
    ddl_context *c = join(20000);
    REQUIRE(c != NULL);
    CHECK_EQ(fault_all_reduces(ddl_world(c), 3), DDL_OK);
    if (rank != 1) {
        CHECK_EQ(reduce_until_error(c, s, rank), DDL_ERR_PEER);
    }
    leave(c);
}

TEST(who_leaves_early_is_named) {
    shared *s = (shared *)ranks_shared(sizeof *s);
    ranks_fork(RANKS, leave_early, s, 30);
    for (int i = 0; i < RANKS; i++) {
        if (i != 1) {
            CHECK_STR(s->sentence[i], "rank 1 has left the job");
        }
    }
}

static void exit_without_a_word(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    (void)n;
    ddl_context *c = join(20000);
    REQUIRE(c != NULL);
    CHECK_EQ(fault_all_reduces(ddl_world(c), 3), DDL_OK);
    if (rank == 2) {
        until(&s->running, RANKS - 1); /* they have their sums: a transport may have held the last in a buffer */
        s->killed = test_now_s();
        _exit(0);
    }
    CHECK_EQ(reduce_until_error(c, s, rank), DDL_ERR_PEER);
    leave(c);
}

TEST(an_exit_without_finalize_is_a_death) {
    shared *s = (shared *)ranks_shared(sizeof *s);
    ranks_fork(RANKS, exit_without_a_word, s, 30);
    for (int i = 0; i < RANKS; i++) {
        if (i != 2) {
            CHECK_STR(s->sentence[i], "rank 2 (pid ");
            CHECK_STR(s->sentence[i], "its process ended");
            CHECK(s->noticed[i] - s->killed < 1.0 * test_slow());
        }
    }
}

/* Threads of this process. */
static int threads(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/task");
    for (struct dirent *e = folder != NULL ? readdir(folder) : NULL; e != NULL; e = readdir(folder)) {
        count += e->d_name[0] != '.';
    }
    if (folder != NULL) {
        closedir(folder);
    }
    return count;
}

/* Rank 1 ends where the others have all they need of it but for its clock: ddl_init says so at the end. */
static void on_joined(void *user, ddl_log_level level, const char *line) {
    (void)level;
    if (user != NULL && strstr(line, "; measured ") != NULL) {
        _exit(0);
    }
}

static void join_beside_who_ends(int rank, int n, void *arg) {
    char path[] = "/tmp/ddl-test-leave-XXXXXX", why[1024] = "";
    int before = threads(), fd = mkstemp(path);
    ddl_context *c = NULL;
    (void)n;
    REQUIRE(fd >= 0);
    close(fd);
    setenv("DDL_TRACE", path, 1);
    setenv("DDL_LOG", "debug", 1);
    ddl_config config = {.progress_thread = 1, .init_timeout_ms = (int64_t)(20000 * test_slow()), .error_text = why,
                         .error_bytes = sizeof why, .log = on_joined, .log_user = rank == 1 ? arg : NULL};
    unlink(path);
    CHECK_EQ(ddl_init(&config, &c), DDL_ERR_PEER);
    CHECK(c == NULL);
    CHECK_STR(why, "rank 1 (pid ");
    unlink(path);
    double limit = test_now_s() + 20 * test_slow();
    while (!TEST_SANITIZED && threads() > before && test_now_s() < limit) {
        usleep(1000); /* the kernel takes a thread that has ended off the list a little later */
    }
    CHECK(TEST_SANITIZED || threads() == before);
}

TEST(a_failed_init_leaves_no_progress_thread) { ranks_fork(2, join_beside_who_ends, ranks_shared(1), 60); }

/* Survivors do not even look at what happened: they finalize. */
static void finalize_beside_the_dead(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    (void)n;
    ddl_context *c = join(20000);
    REQUIRE(c != NULL);
    CHECK_EQ(fault_all_reduces(ddl_world(c), 6), DDL_OK);
    __atomic_fetch_add(&s->running, 1, __ATOMIC_SEQ_CST);
    if (s->mask >> rank & 1) {
        until(&s->stop, 2); /* is killed here */
    }
    float out[4] = {0};
    ddl_request *pending = NULL;
    if (s->mode == 1) { /* with work under way */
        CHECK_EQ(ddl_irecv(ddl_world(c), DDL_ARRAY(out), DDL_ANY_SOURCE, 7, &pending), DDL_OK);
    }
    until(&s->stop, 1);
    leave(c);
}

TEST(finalize_never_waits_for_the_dead) {
    shared *s = (shared *)ranks_shared(sizeof *s);
    for (int mask = 1; mask < 1 << RANKS; mask += 1 + (fault_torture() ? 0 : mask % 3)) {
        memset(s, 0, sizeof *s);
        s->mask = mask;
        s->mode = mask & 1;
        ranks r;
        ranks_start(&r, RANKS, finalize_beside_the_dead, s);
        until(&s->running, RANKS);
        for (int i = 0; i < RANKS; i++) {
            if (mask >> i & 1) {
                ranks_kill(&r, i, SIGKILL);
            }
        }
        s->stop = 1;
        ranks_wait(&r, 20);
        CHECK(!r.timed_out);
        for (int i = 0; i < RANKS; i++) {
            CHECK_EQ(r.status[i], mask >> i & 1 ? SIGKILL : 0);
        }
    }
}

/* mode 0: the others are in an all_reduce; 1: in a receive; 2: in ddl_agree. */
static void abort_reaches_all(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    (void)n;
    ddl_context *c = join(20000);
    REQUIRE(c != NULL);
    ddl_group *world = ddl_world(c);
    CHECK_EQ(ddl_barrier(world), DDL_OK);
    if (rank == 1) {
        usleep(30000);
        s->killed = test_now_s();
        CHECK_EQ(ddl_abort(c, "the loss is NaN"), DDL_OK);
        CHECK(test_now_s() - s->killed < 0.2 * test_slow());
        CHECK_EQ(ddl_abort(c, "again"), DDL_OK);
        CHECK_EQ(ddl_barrier(world), DDL_ERR_ABORTED);
    } else {
        float x = 0;
        int32_t flag = 1;
        ddl_status status = s->mode == 0 ? ddl_all_reduce(world, DDL_VIEW(&x, 1), DDL_VIEW(&x, 1), DDL_SUM)
                            : s->mode == 1 ? ddl_recv(world, DDL_VIEW(&x, 1), (rank + 1) % RANKS, 3, NULL)
                                           : ddl_agree(world, &flag);
        s->noticed[rank] = test_now_s();
        snprintf(s->sentence[rank], sizeof s->sentence[rank], "%s", ddl_error(c));
        CHECK_EQ(status, DDL_ERR_ABORTED);
        CHECK_EQ(ddl_barrier(world), DDL_ERR_ABORTED);
        CHECK_EQ(ddl_agree(world, &flag), DDL_ERR_ABORTED);
    }
    usleep(50000);
    leave(c);
}

TEST(abort_reaches_all) {
    shared *s = (shared *)ranks_shared(sizeof *s);
    for (int mode = 0; mode < 3; mode++) {
        memset(s, 0, sizeof *s);
        s->mode = mode;
        ranks_fork(RANKS, abort_reaches_all, s, 30);
        for (int i = 0; i < RANKS; i++) {
            if (i != 1) {
                CHECK_STR(s->sentence[i], "rank 1 aborted the job: the loss is NaN");
                CHECK(s->noticed[i] - s->killed < 1.0 * test_slow());
            }
        }
    }
}

static void misuse_once(int rank, int n) {
    ddl_context *c = join(20000), *none = NULL;
    REQUIRE(c != NULL);
    ddl_group *world = ddl_world(c), *half = NULL, *late = NULL;
    float x = 1, kept = 0;
    CHECK_EQ(ddl_finalize(NULL), DDL_OK);
    CHECK_EQ(ddl_finalize(&none), DDL_OK);
    CHECK_EQ(ddl_init(NULL, NULL), DDL_ERR_ARG);
    CHECK_EQ(ddl_abort(NULL, NULL), DDL_ERR_ARG);
    CHECK_EQ(ddl_agree(world, NULL), DDL_ERR_ARG);
    CHECK_EQ(ddl_agree(NULL, NULL), DDL_ERR_ARG);
    CHECK_EQ(ddl_group_shrink(world, NULL), DDL_ERR_ARG);
    CHECK_EQ(ddl_group_shrink(NULL, &late), DDL_ERR_ARG);
    CHECK_EQ(ddl_group_split(world, rank % 2, 0, &half), DDL_OK);
    ddl_request *r = NULL;
    CHECK_EQ(ddl_irecv(world, DDL_VIEW(&kept, 1), (rank + 1) % n, 9, &r), DDL_OK);
    CHECK_EQ(ddl_barrier(world), DDL_OK);
    ddl_context *copy = c;
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
    CHECK_EQ(ddl_finalize(&c), DDL_OK); /* NULL by now */
    /* half keeps the context's shell: calls on it say so */
    CHECK_EQ(ddl_all_reduce(half, DDL_VIEW(&x, 1), DDL_VIEW(&x, 1), DDL_SUM), DDL_ERR_STATE);
    CHECK_EQ(ddl_agree(half, &(int32_t){1}), DDL_ERR_STATE);
    CHECK_EQ(ddl_group_shrink(half, &late), DDL_ERR_STATE);
    CHECK_EQ(ddl_finalize(&copy), DDL_ERR_STATE);
    CHECK_STR(ddl_error(ddl_group_context(half)), "finalized");
    CHECK_EQ(ddl_group_free(&half), DDL_OK);
    CHECK_EQ(ddl_group_free(&half), DDL_OK);
}

/* Over verbs libfabric keeps one descriptor that its first use opened, and no more. */
static void misuse(int rank, int n, void *arg) {
    const char *transports = getenv("DDL_TRANSPORTS");
    int keeps = transports != NULL && strstr(transports, "fabric:verbs") != NULL, fds = fault_fds();
    (void)arg;
    misuse_once(rank, n);
    if (keeps) {
        CHECK(fault_fds() <= fds + 1);
        fds = fault_fds();
        misuse_once(rank, n);
    }
    CHECK_EQ(fault_fds(), fds);
}

TEST(misuse_around_finalize_gives_a_status) { ranks_fork(RANKS, misuse, NULL, 30); }

/* Every handle of a context, kept too long. */
typedef struct stale {
    ddl_context *context;
    ddl_group *world, *own, *freed;
    ddl_request *running, *done, *persistent;
    float x;
} stale;

static void make_stale(stale *s) {
    ddl_config config = {.world_size = 1};
    ddl_context *c = NULL;
    ddl_collective d = {.kind = DDL_BARRIER};
    memset(s, 0, sizeof *s);
    CHECK_EQ(ddl_init(&config, &c), DDL_OK);
    REQUIRE(c != NULL);
    s->context = c;
    s->world = ddl_world(c);
    ddl_group *own = NULL;
    CHECK_EQ(ddl_group_duplicate(s->world, &own), DDL_OK);
    s->own = own;
    CHECK_EQ(ddl_irecv(s->world, DDL_VIEW(&s->x, 1), 0, 7, &s->running), DDL_OK);
    CHECK_EQ(ddl_ibarrier(s->world, &s->done), DDL_OK);
    CHECK_EQ(ddl_collective_init(s->world, &d, &s->persistent), DDL_OK);
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
    CHECK_EQ(ddl_group_free(&own), DDL_OK); /* the last handle that the context lived for */
}

#define STALE(call)                                                                                        \
    do {                                                                                                   \
        CHECK_EQ((int)(call), (int)DDL_ERR_STATE);                                                         \
        CHECK_STR(ddl_error(s->context), "finalized");                                                     \
    } while (0)

static void use_stale(stale *s) {
    ddl_context *context = s->context;
    ddl_group *group = s->own, *made = NULL;
    ddl_request *r, *requests[2] = {s->done, s->running};
    ddl_stats stats;
    ddl_info info;
    ddl_op op;
    int32_t one = 1, index;
    CHECK_EQ(ddl_rank(s->world), 0);
    CHECK_STR(ddl_group_name(s->world), "world");
    CHECK(ddl_world(context) == s->world && ddl_group_context(s->world) == context);
    STALE(ddl_finalize(&context));
    STALE(ddl_abort(context, "late"));
    STALE(ddl_progress(context));
    STALE(ddl_stats_get(context, &stats));
    STALE(ddl_op_create_scaled_sum(context, 2, &op));
    CHECK_EQ(ddl_flight_record(context, NULL, 0), 0u);
    STALE(ddl_barrier(s->world));
    STALE(ddl_iall_reduce(s->world, DDL_VIEW(&s->x, 1), DDL_VIEW(&s->x, 1), DDL_SUM, &r));
    STALE(ddl_send(s->world, DDL_VIEW(&s->x, 1), 0, 1));
    STALE(ddl_irecv(s->own, DDL_VIEW(&s->x, 1), 0, 1, &r));
    STALE(ddl_iprobe(s->world, 0, 1, NULL));
    STALE(ddl_agree(s->world, &one));
    STALE(ddl_group_split(s->world, 0, 0, &made));
    STALE(ddl_group_translate(s->world, &one, 1, s->own, &one));
    STALE(ddl_group_set(s->world, &(ddl_group_options){.timeout_ms = 1}));
    CHECK(made == NULL && r == NULL);
    CHECK_EQ((int)ddl_group_free(&group), (int)DDL_ERR_STATE);
    CHECK_STR(ddl_error(context), "was freed before");
    r = s->running;
    STALE(ddl_wait(&r, &info));
    STALE(ddl_test(&r, NULL));
    STALE(ddl_cancel(r));
    STALE(ddl_request_free(&r));
    STALE(ddl_wait_all(requests, 2, NULL));
    STALE(ddl_wait_any(requests, 2, &index, NULL));
    STALE(ddl_start(s->persistent));
    CHECK(requests[0] == s->done && r == s->running);
}

/* The last sixteen contexts are known; those before are gone, and their memory with them. */
TEST(handles_of_a_finalized_context_are_told_so) {
    static stale all[40];
    for (int i = 0; i < 40; i++) {
        make_stale(&all[i]);
    }
    for (int i = 40 - 16; i < 40; i++) {
        use_stale(&all[i]);
    }
}

/* Messages in order, each with its number, until the link breaks under a rank that lives: rank 1 shuts its own sockets,
 * but not pairs of them without a name, through which a library talks to itself. */
static void cut_own_links(void) {
    for (int fd = 3; fd < 100; fd++) {
        struct sockaddr_storage peer;
        socklen_t bytes = sizeof peer;
        if (getpeername(fd, (struct sockaddr *)&peer, &bytes) == 0 &&
            (peer.ss_family != AF_UNIX || bytes > sizeof(sa_family_t))) {
            shutdown(fd, SHUT_RDWR);
        }
    }
}

static void count_until_cut(int rank, int n, void *arg) {
    (void)arg;
    ddl_context *c = join(20000);
    REQUIRE(c != NULL);
    ddl_status status = DDL_OK;
    double start = test_now_s();
    for (int64_t i = 0; status == DDL_OK && i < 1000000; i++) {
        int64_t theirs = -1, mine = i;
        status = ddl_send_recv(ddl_world(c), DDL_VIEW(&mine, 1), (rank + 1) % n, 1, DDL_VIEW(&theirs, 1),
                               (rank + n - 1) % n, 1, NULL);
        if (status == DDL_OK) {
            CHECK_EQ(theirs, i);
        }
        if (rank == 1 && i == 100) {
            cut_own_links();
        }
    }
    CHECK_EQ(status, DDL_ERR_PEER);
    CHECK(test_now_s() - start < 6 * test_slow());
    leave(c);
}

TEST(a_broken_link_is_an_error_and_not_a_gap) {
    const char *transports = getenv("DDL_TRANSPORTS");
    if (transports != NULL && strcmp(transports, "shm") == 0) {
        SKIP("shared memory has no connection that could be cut");
    }
    if (transports != NULL && strstr(transports, "verbs") != NULL) {
        SKIP("between adapters there are no sockets that could be shut");
    }
    for (int i = 0; i < 3; i++) {
        ranks_fork(2, count_until_cut, NULL, 30);
    }
}

/* The child of fork: every call says so; what it keeps open hides nothing. */
static void parent_of_a_child(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    (void)n;
    ddl_context *c = join(20000);
    REQUIRE(c != NULL);
    ddl_group *world = ddl_world(c);
    CHECK_EQ(fault_all_reduces(world, 6), DDL_OK);
    if (rank == 3) {
        pid_t child = fork();
        if (child == 0) {
            float x = 1;
            ddl_request *r = NULL;
            ddl_stats stats;
            prctl(PR_SET_PDEATHSIG, 0);
            setpgid(0, 0); /* the parent is killed, this process lives on and keeps its sockets */
            CHECK_EQ(ddl_barrier(world), DDL_ERR_FORK);
            CHECK_STR(ddl_error(c), "belongs to the parent process");
            CHECK_EQ(ddl_all_reduce(world, DDL_VIEW(&x, 1), DDL_VIEW(&x, 1), DDL_SUM), DDL_ERR_FORK);
            CHECK_EQ(ddl_isend(world, DDL_VIEW(&x, 1), 0, 0, &r), DDL_ERR_FORK);
            CHECK_EQ(ddl_stats_get(c, &stats), DDL_ERR_FORK);
            CHECK_EQ(ddl_agree(world, &(int32_t){1}), DDL_ERR_FORK);
            CHECK_EQ(ddl_progress(c), DDL_ERR_FORK);
            CHECK_EQ(ddl_abort(c, "child"), DDL_ERR_FORK);
            CHECK_EQ(ddl_finalize(&c), DDL_ERR_FORK);
            s->child = (int)getpid();
            double limit = test_now_s() + 20 * test_slow();
            while (!s->stop && test_now_s() < limit) {
                usleep(1000);
            }
            _exit(0);
        }
        until(&s->child, 1);
        CHECK_EQ(fault_all_reduces(world, 6), DDL_OK); /* the parent goes on undisturbed */
        until(&s->running, RANKS - 1); /* the others have their sums too */
        s->killed = test_now_s();
        raise(SIGKILL);
    }
    CHECK_EQ(fault_all_reduces(world, 6), DDL_OK);
    CHECK_EQ(reduce_until_error(c, s, rank), DDL_ERR_PEER);
    leave(c);
}

TEST(a_child_of_fork_is_told_and_does_not_hide_a_death) {
    shared *s = (shared *)ranks_shared(sizeof *s);
    ranks r;
    ranks_start(&r, RANKS, parent_of_a_child, s);
    ranks_wait(&r, 30);
    s->stop = 1;
    CHECK(!r.timed_out);
    for (int i = 0; i < RANKS; i++) {
        CHECK_EQ(r.status[i], i == 3 ? SIGKILL : 0);
        if (i != 3) {
            CHECK_STR(s->sentence[i], "rank 3 (pid ");
            CHECK(s->noticed[i] - s->killed < 1.0 * test_slow());
        }
    }
}

/* Growing a group: a rank is killed, another process takes its place, and all go on as if nothing had happened.
 * tests/run: variants=gcc,asan,tsan timeout=120 waits=yes
 * FAULT_RUNS sets the number of kills, TEST_SEED repeats a run. */
#define TEST_TIMEOUT_S 3000
#define DDL_IMPLEMENTATION
#include "coll.h"
#include "faults.h"

enum { RANKS = 4, REDUCES = 100 };

typedef struct shared {
    uint64_t seed;
    volatile int running, grown; /* ranks that have joined; that have the grown group */
    volatile int stop;
    double killed_s, went_on_s;
    int want; /* newcomers */
    char text[RANKS][512];
} shared;

static ddl_config config_of(char *why, size_t bytes) {
    setenv("DDL_LOG", "none", 1);
    return (ddl_config){.timeout_ms = 30000, .init_timeout_ms = 30000, .error_text = why, .error_bytes = bytes};
}

static ddl_context *member(void) {
    char why[1024] = "";
    ddl_context *c = NULL;
    ddl_config config = config_of(why, sizeof why);
    if (ddl_init(&config, &c) != DDL_OK) {
        test__fail(__FILE__, __LINE__, "ddl_init: %s", why);
    }
    return c;
}

static ddl_context *newcomer(ddl_group **out_group) {
    char why[1024] = "";
    ddl_context *c = NULL;
    ddl_config config = config_of(why, sizeof why);
    if (ddl_join(&config, &c, out_group) != DDL_OK) {
        test__fail(__FILE__, __LINE__, "ddl_join: %s", why);
    }
    return c;
}

/* What every rank does once it has the group: state from a member, and then verified work. */
static void go_on(ddl_context *c, ddl_group *g, int32_t size) {
    CHECK_EQ(c->core_ranks, c->local_ranks); /* all have the same cores */
    REQUIRE(g != NULL);
    CHECK_EQ(ddl_size(g), size);
    int64_t state[3] = {0, 0, 0};
    if (ddl_incarnation(c) == 0) {
        state[0] = 7;
        state[1] = 8;
        state[2] = 9;
    }
    int32_t root = 0; /* the lowest rank that has the state: of those that joined none has */
    int32_t first = ddl_incarnation(c) == 0 ? ddl_rank(g) : size;
    CHECK_EQ(ddl_all_reduce(g, DDL_VIEW(&first, 1), DDL_VIEW(&root, 1), DDL_MIN), DDL_OK);
    CHECK_EQ(ddl_broadcast(g, DDL_ARRAY(state), root), DDL_OK);
    CHECK(state[0] == 7 && state[1] == 8 && state[2] == 9);
    for (int k = 0; k < REDUCES; k++) {
        ddl_status status = fault_all_reduce(g, k % 10 == 9 ? 50000 : 1 + k * 7, k);
        if (status != DDL_OK) {
            test__fail(__FILE__, __LINE__, "all_reduce %d on the grown group: %s", k, ddl_error(c));
            return;
        }
    }
}

/* A member works until somebody dies, and grows the group then. */
static void work_and_grow(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    ddl_context *c = member();
    REQUIRE(c != NULL);
    __atomic_fetch_add(&s->running, 1, __ATOMIC_SEQ_CST);
    ddl_status status = DDL_OK;
    for (int64_t k = 0; status == DDL_OK; k++) {
        status = fault_all_reduce(ddl_world(c), 1000, k);
    }
    CHECK_EQ(status, DDL_ERR_PEER);
    ddl_group *grown = NULL;
    status = ddl_group_grow(ddl_world(c), s->want, 30000, &grown);
    if (status != DDL_OK) {
        test__fail(__FILE__, __LINE__, "ddl_group_grow: %s", ddl_error(c));
    } else {
        CHECK_EQ(ddl_rank(grown), rank);
        go_on(c, grown, n);
        s->went_on_s = test_now_s();
        CHECK_EQ(fault_all_reduce(ddl_world(c), 1, 0), DDL_ERR_PEER); /* the old group keeps its dead */
        CHECK(strstr(ddl_error(c), "is dead") != NULL);
        CHECK_EQ(ddl_group_free(&grown), DDL_OK);
    }
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

static void join_late(int rank, int n, void *arg) {
    (void)arg;
    ddl_group *g = NULL;
    ddl_context *c = newcomer(&g);
    REQUIRE(c != NULL);
    CHECK_EQ(ddl_rank(g), rank);
    CHECK(ddl_incarnation(c) > 0 && ddl_world(c) == g);
    CHECK_EQ(ddl_group_free(&g), DDL_ERR_ARG); /* it is this context's world */
    go_on(c, g, n);
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

static void until(volatile int *value, int wanted) {
    double limit = test_now_s() + 30 * test_slow();
    while (*value < wanted && test_now_s() < limit) {
        usleep(200);
    }
}

static void all_well(ranks *r) {
    int bad = ranks_wait(r, 60);
    CHECK(bad == 0 && !r->timed_out);
    for (int i = 0; i < r->n; i++) {
        CHECK_EQ(r->status[i], 0);
    }
}

/* Kills `victim` at a random moment of the work and starts it again. */
static void kill_and_grow(shared *s, int victim, uint64_t *random) {
    ranks r;
    memset(s, 0, sizeof *s);
    s->want = 1;
    ranks_start(&r, RANKS, work_and_grow, s);
    until(&s->running, RANKS);
    usleep((unsigned)(fault_random(random) % 20000));
    s->killed_s = test_now_s();
    ranks_kill(&r, victim, SIGKILL);
    ranks_reaped(&r, victim);
    ranks_again(&r, victim, join_late, s);
    all_well(&r);
    printf("  rank %d: killed, replaced and %d all_reduces in %.2f s\n", victim, REDUCES, s->went_on_s - s->killed_s);
    CHECK(s->went_on_s - s->killed_s < 30 * test_slow()); /* typically far under 2 s */
}

TEST(a_killed_rank_is_replaced_and_all_go_on) {
    uint64_t random = fault_seed("kills");
    shared *s = (shared *)ranks_shared(sizeof *s);
    int runs = fault_runs(4, 200);
    for (int i = 0; i < runs && test__now->failures == 0; i++) {
        kill_and_grow(s, i < RANKS ? i : (int)(fault_random(&random) % RANKS), &random);
    }
}

/* ---- nobody, and everybody ---- */

/* Nobody comes: the call ends at its time, the group is what it was. Then somebody does, after one that does not belong
 * here. */
static void nobody_then_somebody(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    ddl_context *c = member();
    REQUIRE(c != NULL);
    ddl_group *grown = NULL, *left = NULL;
    CHECK_EQ(ddl_group_grow(NULL, 1, 100, &grown), DDL_ERR_ARG);
    CHECK_EQ(ddl_group_grow(ddl_world(c), 1, 100, NULL), DDL_ERR_ARG);
    CHECK_EQ(ddl_group_grow(ddl_world(c), -1, 100, &grown), DDL_ERR_ARG);
    CHECK_EQ(ddl_group_grow(ddl_world(c), 1, -5, &grown), DDL_ERR_ARG);
    CHECK_EQ(ddl_group_grow(ddl_world(c), 1, 20000, &grown), DDL_ERR_STATE); /* at once: all live */
    CHECK(strstr(ddl_error(c), "all ranks of the world live") != NULL && grown == NULL);
    CHECK_EQ(fault_all_reduce(ddl_world(c), 100, 1), DDL_OK);
    __atomic_fetch_add(&s->running, 1, __ATOMIC_SEQ_CST);
    while (fault_all_reduce(ddl_world(c), 1000, 2) == DDL_OK) {
    }
    double start = test_now_s();
    CHECK_EQ(ddl_group_grow(ddl_world(c), 0, 300, &grown), DDL_ERR_TIMEOUT);
    CHECK(strstr(ddl_error(c), "no new process came") != NULL && grown == NULL);
    CHECK(test_now_s() - start > 0.25 && test_now_s() - start < 20 * test_slow());
    CHECK_EQ(ddl_group_shrink(ddl_world(c), &left), DDL_OK);
    CHECK_EQ(ddl_group_grow(left, 1, 200, &grown), DDL_ERR_TIMEOUT);
    CHECK_EQ(fault_all_reduce(left, 1000, 3), DDL_OK); /* it was whole, and is */
    __atomic_fetch_add(&s->grown, 1, __ATOMIC_SEQ_CST);
    CHECK_EQ(ddl_group_grow(left, 1, 30000, &grown), DDL_OK);
    go_on(c, grown, n);
    CHECK_EQ(fault_all_reduce(left, 1000, 4), DDL_OK);
    CHECK_EQ(ddl_rank(grown), rank);
    ddl_group *pair = NULL; /* groups are made from a grown one as from any other */
    CHECK_EQ(ddl_group_split(grown, ddl_rank(grown) % 2, 0, &pair), DDL_OK);
    CHECK_EQ(fault_all_reduce(pair, 500, 5), DDL_OK);
    CHECK_EQ(ddl_group_free(&pair), DDL_OK);
    CHECK_EQ(ddl_group_free(&grown), DDL_OK);
    CHECK_EQ(ddl_group_free(&left), DDL_OK);
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

static void join_and_split(int rank, int n, void *arg) {
    (void)arg, (void)rank;
    ddl_group *g = NULL, *pair = NULL;
    ddl_context *c = newcomer(&g);
    REQUIRE(c != NULL);
    go_on(c, g, n);
    CHECK_EQ(ddl_group_split(g, ddl_rank(g) % 2, 0, &pair), DDL_OK);
    CHECK_EQ(fault_all_reduce(pair, 500, 5), DDL_OK);
    CHECK_EQ(ddl_group_free(&pair), DDL_OK);
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

static void join_with_a_wrong_secret(int rank, int n, void *arg) {
    (void)rank, (void)n, (void)arg;
    char why[1024] = "";
    ddl_group *g = NULL;
    ddl_context *c = NULL;
    setenv("DDL_SECRET", "0123456789abcdef0123456789abcdef", 1);
    ddl_config config = config_of(why, sizeof why);
    config.init_timeout_ms = 4000;
    CHECK_EQ(ddl_join(&config, &c, &g), DDL_ERR_AUTH);
    CHECK(strstr(why, "secret") != NULL);
}

TEST(without_newcomers_the_call_ends_and_the_group_stays) {
    shared *s = (shared *)ranks_shared(sizeof *s);
    static ranks r, stranger;
    ranks_start(&r, RANKS, nobody_then_somebody, s);
    until(&s->running, RANKS);
    ranks_kill(&r, 2, SIGKILL);
    ranks_reaped(&r, 2);
    until(&s->grown, RANKS - 1);
    stranger = r;
    stranger.running = 0;
    memset(stranger.pid, 0, sizeof stranger.pid);
    memset(stranger.status, 0, sizeof stranger.status);
    ranks_again(&stranger, 2, join_with_a_wrong_secret, s);
    CHECK_EQ(ranks_wait(&stranger, 60), 0);
    ranks_again(&r, 2, join_and_split, s);
    all_well(&r);
}

/* ---- who receives newcomers dies ---- */

static void grow_with_two(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    (void)rank;
    ddl_context *c = member();
    REQUIRE(c != NULL);
    __atomic_fetch_add(&s->running, 1, __ATOMIC_SEQ_CST);
    while (fault_all_reduce(ddl_world(c), 1000, 2) == DDL_OK) {
    }
    ddl_group *grown = NULL;
    ddl_status status = ddl_group_grow(ddl_world(c), 2, 30000, &grown);
    if (status != DDL_OK) {
        test__fail(__FILE__, __LINE__, "ddl_group_grow: %s", ddl_error(c));
    } else {
        go_on(c, grown, n);
    }
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
    CHECK_EQ(ddl_group_free(&grown), DDL_OK);
}

TEST(another_member_receives_newcomers_when_the_first_dies) {
    shared *s = (shared *)ranks_shared(sizeof *s);
    ranks r;
    ranks_start(&r, 5, grow_with_two, s);
    until(&s->running, 5);
    ranks_kill(&r, 3, SIGKILL);
    ranks_reaped(&r, 3);
    usleep(100000); /* rank 0 receives, and nobody is there */
    ranks_kill(&r, 0, SIGKILL);
    ranks_reaped(&r, 0);
    ranks_again(&r, 3, join_late, s);
    ranks_again(&r, 0, join_late, s);
    all_well(&r);
}

/* ---- a member falls silent ---- */

/* Rank 2 takes part in the agreement to grow and then does nothing, as if stopped, until the others have given up. They
 * say who is missing, call again, and go on with it and a newcomer when it is back. */
static void one_falls_silent(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    ddl_context *c = member();
    REQUIRE(c != NULL);
    ddl_group *world = ddl_world(c), *grown = NULL;
    double limit = test_now_s() + 60 * test_slow();
    __atomic_fetch_add(&s->running, 1, __ATOMIC_SEQ_CST);
    while (fault_all_reduce(world, 1000, 2) == DDL_OK) {
    }
    __atomic_fetch_add(&s->stop, 1, __ATOMIC_SEQ_CST);
    until(&s->stop, n - 1);
    if (rank == 2) {
        ddl__agreement *a = NULL;
        ddl__lock(c);
        c->doing = "a test";
        CHECK_EQ(ddl__agree_on(world, DDL__AGREE_GROW, 1, &a), DDL_OK);
        ddl__unlock(c);
        until(&s->grown, n - 2);
        usleep(100000); /* the others are in their next call, or not yet */
        ddl__lock(c);
        c->doing = "a test";
        CHECK_EQ(ddl__agree_on(world, DDL__AGREE_GROWN, 0, &a), DDL_OK);
        ddl__unlock(c);
    } else {
        double start = test_now_s();
        world->timeout_ms = 4000;
        CHECK_EQ(ddl_group_grow(world, 1, 500, &grown), DDL_ERR_TIMEOUT);
        CHECK(grown == NULL && test_now_s() - start < 60 * test_slow());
        if (strstr(ddl_error(c), "rank 2") == NULL) {
            test__fail(__FILE__, __LINE__, "it does not name rank 2: %s", ddl_error(c));
        }
        world->timeout_ms = 30000;
        __atomic_fetch_add(&s->grown, 1, __ATOMIC_SEQ_CST);
    }
    ddl_status status; /* one call ends what was left, the next begins anew */
    while ((status = ddl_group_grow(world, 1, 20000, &grown)) == DDL_ERR_TIMEOUT && test_now_s() < limit) {
    }
    if (status != DDL_OK) {
        test__fail(__FILE__, __LINE__, "ddl_group_grow, called again: %s", ddl_error(c));
    } else {
        go_on(c, grown, n);
    }
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
    CHECK_EQ(ddl_group_free(&grown), DDL_OK);
}

TEST(a_member_that_falls_silent_is_named_and_holds_nobody) {
    shared *s = (shared *)ranks_shared(sizeof *s);
    ranks r;
    ranks_start(&r, RANKS, one_falls_silent, s);
    until(&s->running, RANKS);
    ranks_kill(&r, 3, SIGKILL);
    ranks_reaped(&r, 3);
    until(&s->grown, RANKS - 2);
    ranks_again(&r, 3, join_late, s);
    all_well(&r);
}

/* Likewise between the two agreements of ddl_group_shrink. */
static void one_shrinks_late(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    ddl_context *c = member();
    REQUIRE(c != NULL);
    ddl_group *world = ddl_world(c), *left = NULL;
    __atomic_fetch_add(&s->running, 1, __ATOMIC_SEQ_CST);
    while (fault_all_reduce(world, 1000, 2) == DDL_OK) {
    }
    __atomic_fetch_add(&s->stop, 1, __ATOMIC_SEQ_CST);
    until(&s->stop, n - 1);
    if (rank == 2) {
        ddl__agreement *a = NULL;
        ddl__lock(c);
        c->doing = "a test";
        CHECK_EQ(ddl__agree_on(world, DDL__AGREE_SHRINK, 1, &a), DDL_OK);
        ddl__shrink_begin(world, &a->value);
        ddl__unlock(c);
        until(&s->grown, n - 2);
    } else {
        world->timeout_ms = 3000;
        CHECK_EQ(ddl_group_shrink(world, &left), DDL_ERR_TIMEOUT);
        CHECK(left == NULL);
        world->timeout_ms = 30000;
        __atomic_fetch_add(&s->grown, 1, __ATOMIC_SEQ_CST);
    }
    if (ddl_group_shrink(world, &left) != DDL_OK) {
        test__fail(__FILE__, __LINE__, "ddl_group_shrink, called again: %s", ddl_error(c));
    } else {
        CHECK_EQ(ddl_size(left), n - 1);
        CHECK_EQ(fault_all_reduce(left, 1000, 3), DDL_OK);
    }
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
    CHECK_EQ(ddl_group_free(&left), DDL_OK);
}

TEST(a_shrink_left_at_its_deadline_is_taken_up) {
    shared *s = (shared *)ranks_shared(sizeof *s);
    ranks r;
    ranks_start(&r, RANKS, one_shrinks_late, s);
    until(&s->running, RANKS);
    ranks_kill(&r, 3, SIGKILL);
    ranks_reaped(&r, 3);
    r.status[3] = 0;
    all_well(&r);
}

/* ---- a storm ---- */

static void join_or_not(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    char why[1024] = "";
    ddl_group *g = NULL;
    ddl_context *c = NULL;
    ddl_config config = config_of(why, sizeof why);
    config.init_timeout_ms = 4000;
    ddl_status status = ddl_join(&config, &c, &g);
    if (status == DDL_OK) {
        CHECK_EQ(ddl_rank(g), rank);
        __atomic_fetch_add(&s->grown, 1, __ATOMIC_SEQ_CST);
        go_on(c, g, n);
        CHECK_EQ(ddl_finalize(&c), DDL_OK);
        return;
    }
    CHECK_EQ(status, DDL_ERR_TIMEOUT);
    CHECK(strstr(why, "ddl_join: nobody admitted a new rank 2") != NULL && c == NULL && g == NULL);
}

/* Six processes want the rank, others talk rubbish: one is admitted. */
TEST(of_many_newcomers_one_is_admitted) {
    enum { STORM = 6 };
    shared *s = (shared *)ranks_shared(sizeof *s);
    static ranks r, others[STORM];
    s->want = 1;
    ranks_start(&r, RANKS, work_and_grow, s);
    until(&s->running, RANKS);
    for (int i = 0; i < STORM; i++) { /* the first come too early, while the old one lives */
        others[i] = r;
        memset(others[i].pid, 0, sizeof others[i].pid);
        others[i].running = 0;
        ranks_again(&others[i], 2, join_or_not, s);
        if (i == 2) {
            ranks_kill(&r, 2, SIGKILL);
            ranks_reaped(&r, 2);
            r.status[2] = 0;
        }
    }
    for (int i = 0; i < 40; i++) {
        struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)r.port)};
        to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connect(fd, (struct sockaddr *)&to, sizeof to) == 0) {
            CHECK(send(fd, "GET / HTTP/1.1\r\n\r\n", 18, MSG_NOSIGNAL) <= 18);
        }
        usleep(2000);
        close(fd);
    }
    all_well(&r);
    for (int i = 0; i < STORM; i++) {
        CHECK_EQ(ranks_wait(&others[i], 60), 0);
    }
    CHECK_EQ(s->grown, 1);
}

/* ---- who left, and where newcomers cannot come ---- */

/* Rank 2 leaves in order; the others grow as soon as it counts as gone. */
static ddl_status grow_after_leave(int rank, ddl_context *c, ddl_group **grown) {
    CHECK_EQ(fault_all_reduce(ddl_world(c), 100, 1), DDL_OK);
    if (rank == 2) {
        return DDL_OK;
    }
    ddl_status status;
    double limit = test_now_s() + 30 * test_slow();
    while ((status = ddl_group_grow(ddl_world(c), 1, 20000, grown)) == DDL_ERR_STATE && test_now_s() < limit) {
        usleep(20000); /* all members get the same answer */
    }
    return status;
}

static void leave_and_grow(int rank, int n, void *arg) {
    (void)arg;
    ddl_context *c = member();
    ddl_group *grown = NULL;
    REQUIRE(c != NULL);
    ddl_status status = grow_after_leave(rank, c, &grown);
    if (status != DDL_OK) {
        test__fail(__FILE__, __LINE__, "ddl_group_grow: %s", ddl_error(c));
    } else if (rank != 2) {
        go_on(c, grown, n);
    }
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
    CHECK_EQ(ddl_group_free(&grown), DDL_OK);
}

TEST(a_rank_that_left_is_replaced_too) {
    shared *s = (shared *)ranks_shared(sizeof *s);
    ranks r;
    ranks_start(&r, RANKS, leave_and_grow, s);
    ranks_reaped(&r, 2);
    CHECK_EQ(r.status[2], 0);
    ranks_again(&r, 2, join_late, s);
    all_well(&r);
}

static void grow_from_a_folder(int rank, int n, void *arg) {
    (void)n;
    char why[1024] = "";
    setenv("DDL_RENDEZVOUS", (const char *)arg, 1);
    ddl_context *c = member();
    ddl_group *grown = NULL;
    REQUIRE(c != NULL);
    ddl_status status = grow_after_leave(rank, c, &grown);
    if (rank != 2) {
        CHECK_EQ(status, DDL_ERR_UNSUPPORTED);
        CHECK(strstr(ddl_error(c), "rendezvous by TCP") != NULL && grown == NULL);
    }
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
    ddl_config config = config_of(why, sizeof why);
    CHECK_EQ(ddl_join(&config, &c, &grown), DDL_ERR_UNSUPPORTED);
    CHECK(strstr(why, "rendezvous by TCP") != NULL && c == NULL && grown == NULL);
    CHECK_EQ(ddl_join(NULL, NULL, &grown), DDL_ERR_ARG);
    CHECK_EQ(ddl_join(NULL, &c, NULL), DDL_ERR_ARG);
}

/* Shared memory alone cannot begin anew with one rank: both sides say so, and what to do. */
static void grow_without_tcp(int rank, int n, void *arg) {
    (void)n, (void)arg;
    char why[1024] = "";
    setenv("DDL_PLUGIN_PATH", fault_plugins(), 1);
    setenv("DDL_TRANSPORTS", "shm", 1);
    ddl_context *c = member();
    ddl_group *grown = NULL;
    REQUIRE(c != NULL);
    ddl_status status = grow_after_leave(rank, c, &grown);
    if (rank != 2) {
        CHECK_EQ(status, DDL_ERR_CONFIG);
        CHECK(strstr(ddl_error(c), "add tcp to DDL_TRANSPORTS") != NULL && grown == NULL);
    }
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
    ddl_config config = config_of(why, sizeof why);
    CHECK_EQ(ddl_join(&config, &c, &grown), DDL_ERR_CONFIG);
    CHECK(strncmp(why, "ddl_join: ", 10) == 0 && strstr(why, "add tcp to DDL_TRANSPORTS") != NULL);
    setenv("DDL_RESTARTED", "1", 1);
    CHECK_EQ(ddl_init(&config, &c), DDL_ERR_CONFIG);
    CHECK(strncmp(why, "ddl_init: ", 10) == 0 && strstr(why, "because DDL_RESTARTED is set") != NULL);
}

TEST(shared_memory_alone_takes_no_newcomers) {
    if (!fault_has_plugin("shm")) {
        SKIP("the shm plugin is not built");
    }
    ranks_fork(RANKS, grow_without_tcp, NULL, 60);
}

TEST(a_folder_is_not_served_again) {
    char folder[] = "/tmp/ddl-grow-XXXXXX", url[64];
    REQUIRE(mkdtemp(folder) != NULL);
    snprintf(url, sizeof url, "file://%s", folder);
    ranks_fork(RANKS, grow_from_a_folder, url, 60);
    rmdir(folder);
}

/* ---- natively ---- */

enum { ROUNDS = 5 };
static const int victims[ROUNDS] = {2, 0, 2, 3, 0}; /* also who made the segment, and who came late */

/* Shared memory runs the collectives of the group by itself, the newcomer's part included, and they are right. */
static void natives_hold(ddl_context *c, ddl_group *g) {
    static char record[65536];
    static const int64_t counts[] = {1, 700, 60007};
    ddl_collective d = {.kind = DDL_ALL_REDUCE, .op = DDL_SUM};
    float x = 1;
    ddl_estimate_info e;
    d.in = d.out = DDL_VIEW(&x, 1);
    CHECK_EQ(ddl_estimate(g, &d, &e), DDL_OK);
    CHECK_STR(e.algorithm, "native");
    for (int kind = DDL_BARRIER; kind <= DDL_EXSCAN; kind++) {
        for (int i = 0; i < 3 && test__now->failures == 0; i++) {
            coll_case k = {.kind = (ddl_kind)kind, .dtype = DDL_F32, .op = coll_reduces((ddl_kind)kind) ? DDL_SUM : 0,
                           .root = coll_rooted((ddl_kind)kind) ? (kind + i) % ddl_size(g) : 0, .count = counts[i],
                           .in_place = i == 1, .salt = (unsigned)(kind * 3 + i)};
            CHECK(coll_check(g, &k));
        }
    }
    CHECK_EQ(ddl_all_reduce(g, d.in, d.out, DDL_SUM), DDL_OK);
    CHECK_EQ((int)x, ddl_size(g));
    ddl_flight_record(c, record, sizeof record);
    CHECK_STR(record, "native");
}

/* Works on a group until somebody dies, and on the grown one after. */
static void rounds_of_natives(ddl_context *c, ddl_group *g, shared *s, int32_t round) {
    while (test__now->failures == 0) {
        CHECK_EQ(ddl_all_reduce(g, DDL_VIEW(&round, 1), DDL_VIEW(&round, 1), DDL_MAX), DDL_OK);
        natives_hold(c, g);
        __atomic_fetch_add(&s->grown, 1, __ATOMIC_SEQ_CST);
        if (round == ROUNDS) {
            break;
        }
        for (int64_t k = 0; fault_all_reduce(g, 1000, k) == DDL_OK; k++) {
        }
        ddl_group *next = NULL;
        if (ddl_group_grow(g, 1, 30000, &next) != DDL_OK) {
            test__fail(__FILE__, __LINE__, "ddl_group_grow in round %d: %s", (int)round, ddl_error(c));
            break;
        }
        if (g != ddl_world(c)) {
            CHECK_EQ(ddl_group_free(&g), DDL_OK);
        }
        g = next;
        round++;
    }
    if (g != ddl_world(c)) {
        CHECK_EQ(ddl_group_free(&g), DDL_OK);
    }
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

static void with_shared_memory(void) {
    setenv("DDL_PLUGIN_PATH", fault_plugins(), 1);
    setenv("DDL_TRANSPORTS", "shm,tcp", 1);
}

static void native_member(int rank, int n, void *arg) {
    (void)rank, (void)n;
    with_shared_memory();
    ddl_context *c = member();
    REQUIRE(c != NULL);
    rounds_of_natives(c, ddl_world(c), (shared *)arg, 0);
}

static void native_newcomer(int rank, int n, void *arg) {
    (void)rank, (void)n;
    with_shared_memory();
    ddl_group *g = NULL;
    ddl_context *c = newcomer(&g);
    REQUIRE(c != NULL);
    rounds_of_natives(c, g, (shared *)arg, 0);
}

TEST(a_grown_group_has_native_collectives) {
    if (!fault_has_plugin("shm")) {
        SKIP("the shm plugin is not built");
    }
    shared *s = (shared *)ranks_shared(sizeof *s);
    static ranks r;
    ranks_start(&r, RANKS, native_member, s);
    for (int round = 0; round < ROUNDS; round++) {
        until(&s->grown, RANKS * (round + 1));
        usleep(3000);
        ranks_kill(&r, victims[round], SIGKILL);
        ranks_reaped(&r, victims[round]);
        ranks_again(&r, victims[round], native_newcomer, s);
    }
    all_well(&r);
    CHECK_EQ(s->grown, RANKS * (ROUNDS + 1));
    munmap(s, sizeof *s);
}

/* ---- one that was cut off ---- */

typedef struct places {
    shared s;
    struct sockaddr_storage at[RANKS];
    socklen_t bytes[RANKS];
} places;

static void tell_place(places *p, ddl_context *c, int rank) {
    for (int i = 0; i < c->endpoint_count; i++) {
        if (c->endpoints[i].plugin == &ddl__tcp_plugin) {
            const ddl__tcp *t = (const ddl__tcp *)c->endpoints[i].self;
            p->at[rank] = t->bound;
            p->bytes[rank] = t->bound_bytes;
        }
    }
}

/* The verdict on a process that proves the secret and says that it is an incarnation of rank 2. */
static uint8_t knock(const places *p, int at, const ranks *r, uint32_t incarnation) {
    ddl__auth a;
    uint8_t nonce[32], in[DDL__AUTH_BYTES], out[DDL__AUTH_MAX_OUT];
    ddl__auth_params params = {.secret = (const uint8_t *)r->secret, .secret_bytes = 64, .purpose = DDL__AUTH_MESH,
                               .rank = 2, .peer = (uint32_t)at, .world = RANKS, .incarnation = incarnation};
    int fd = socket(p->at[at].ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    size_t have = 0, used, wrote;
    CHECK_EQ(ddl__random(nonce, sizeof nonce), DDL_OK);
    CHECK_EQ(ddl__auth_client(&a, &params, nonce), DDL_OK);
    CHECK_EQ(connect(fd, (const struct sockaddr *)&p->at[at], p->bytes[at]), 0);
    while (ddl__auth_step(&a, in, have, &used, out, sizeof out, &wrote) == DDL_IN_PROGRESS || wrote > 0) {
        CHECK(wrote == 0 || send(fd, out, wrote, MSG_NOSIGNAL) == (ssize_t)wrote);
        ssize_t n = recv(fd, in, sizeof in, 0);
        have = n > 0 ? (size_t)n : 0;
        if (n <= 0) {
            break;
        }
    }
    close(fd);
    return a.code;
}

/* The members take rank 2 for dead, as after a cut; it lives, and hears of it. */
static void cut_off(int rank, int n, void *arg) {
    places *p = (places *)arg;
    ddl_context *c = member();
    REQUIRE(c != NULL);
    tell_place(p, c, rank);
    CHECK_EQ(fault_all_reduce(ddl_world(c), 100, 1), DDL_OK);
    __atomic_fetch_add(&p->s.running, 1, __ATOMIC_SEQ_CST);
    until(&p->s.running, n);
    if (rank == 2) {
        ddl_group *g = NULL;
        ddl_status status = DDL_OK;
        while (status == DDL_OK) {
            status = fault_all_reduce(ddl_world(c), 1000, 2);
        }
        CHECK_EQ(status, DDL_ERR_PEER);
        CHECK(ddl_group_grow(ddl_world(c), 1, 1000, &g) < 0 && g == NULL); /* it is alone */
        until(&p->s.stop, 1);
        CHECK_EQ(ddl_finalize(&c), DDL_OK);
        return;
    }
    ddl__lock(c);
    ddl__dead(c, 2, "rank 2 is dead: a test says so", 0, -1);
    ddl__unlock(c);
    ddl_group *grown = NULL;
    CHECK_EQ(ddl_group_grow(ddl_world(c), 1, 30000, &grown), DDL_OK);
    if (grown != NULL) {
        go_on(c, grown, n);
        __atomic_fetch_add(&p->s.grown, 1, __ATOMIC_SEQ_CST);
        while (p->s.stop == 0) { /* with knocks at the door */
            CHECK_EQ(ddl_progress(c), DDL_OK);
            usleep(500);
        }
        CHECK_EQ(ddl_barrier(grown), DDL_OK);
    }
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
    CHECK_EQ(ddl_group_free(&grown), DDL_OK);
}

static void join_after_a_cut(int rank, int n, void *arg) {
    places *p = (places *)arg;
    (void)rank;
    ddl_group *g = NULL;
    ddl_context *c = newcomer(&g);
    REQUIRE(c != NULL);
    go_on(c, g, n);
    until(&p->s.stop, 1);
    CHECK_EQ(ddl_barrier(g), DDL_OK);
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

TEST(who_was_cut_off_does_not_come_back_beside_its_successor) {
    places *p = (places *)ranks_shared(sizeof *p);
    static ranks r, successor;
    ranks_start(&r, RANKS, cut_off, p);
    until(&p->s.running, RANKS);
    successor = r;
    memset(successor.pid, 0, sizeof successor.pid);
    successor.running = 0;
    ranks_again(&successor, 2, join_after_a_cut, p);
    until(&p->s.grown, RANKS - 1);
    for (int at = 0; at < RANKS && p->s.grown == RANKS - 1; at++) {
        if (at != 2) {
            CHECK_EQ(knock(p, at, &r, 0), DDL__AUTH_INCARNATION);
            CHECK_EQ(knock(p, at, &r, 7), DDL__AUTH_INCARNATION);
            CHECK_EQ(knock(p, at, &r, 1), DDL__AUTH_OK); /* the door is not simply shut */
        }
    }
    p->s.stop = 1;
    all_well(&r);
    CHECK_EQ(ranks_wait(&successor, 60), 0);
}

/* ---- whose word counts ---- */

/* What `from` would say when it goes on to shrink because of whose death. */
static ddl_status hear_go_on(ddl_group *g, int32_t from, int32_t whose, bool link_lost) {
    uint8_t payload[64];
    ddl__writer w = ddl__writer_of(payload, sizeof payload);
    ddl__put_u8(&w, DDL__AGREE_GO_ON);
    ddl__put_u32(&w, (uint32_t)whose);
    ddl__put_u8(&w, link_lost);
    ddl__put_string(&w, "the cause");
    ddl__frame f = {.type = DDL__FRAME_AGREE, .group = g->id, .epoch = g->epoch,
                    .sequence = g->agree_sequence + 1, .bytes = (uint32_t)w.at};
    ddl__lock(g->context);
    ddl_status status = ddl__on_agree(g->context, from, &f, payload);
    ddl__unlock(g->context);
    return status;
}

/* Ranks 0 and 1 are on one host, 2 and 3 on another, which has lost its links to the first. */
static void hear_the_other_side(int rank, int n, void *arg) {
    (void)n;
    setenv("DDL_HOST_ID", rank < 2 ? "a" : "b", 1);
    setenv("MASTER_ADDR", (char *)arg, 1);
    ddl_context *c = member();
    REQUIRE(c != NULL);
    ddl_group *w = ddl_world(c), *g[3] = {NULL};
    for (int i = 0; i < 3; i++) {
        REQUIRE(ddl_group_duplicate(w, &g[i]) == DDL_OK);
    }
    if (rank == 1) {
        CHECK_EQ(hear_go_on(g[0], 2, 0, true), DDL_OK); /* rank 0 lives: it is here */
        CHECK_EQ(hear_go_on(g[0], 2, 1, true), DDL_OK); /* so do we */
        CHECK_EQ(g[0]->broken, DDL_OK);
        CHECK_EQ(g[0]->flows[2].gone_on, 0);
        CHECK_EQ(hear_go_on(g[1], 2, 3, true), DDL_OK); /* of its own host it knows more than we */
        CHECK_EQ(g[1]->broken, DDL_ERR_PEER);
        CHECK_STR(g[1]->cause, "the cause");
        CHECK(g[1]->cause_rank == 3 && g[1]->cause_link); /* as it is passed on */
        CHECK_EQ(hear_go_on(g[2], 2, 0, false), DDL_OK); /* not the link: what rank 0 sent was damaged, say */
        CHECK_EQ(g[2]->broken, DDL_ERR_PEER);
        CHECK_EQ(hear_go_on(g[0], 2, 4, true), DDL_ERR_CORRUPT);
    }
    CHECK_EQ(ddl_barrier(w), DDL_OK);
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(ddl_group_free(&g[i]), DDL_OK);
    }
}

TEST(who_is_cut_off_does_not_take_the_other_sides_word_for_it) {
    char address[INET_ADDRSTRLEN];
    if (!ranks_own_address(address)) {
        SKIP("this machine has no network but loopback");
    }
    ranks r;
    ranks_start(&r, RANKS, hear_the_other_side, address);
    all_well(&r);
}

/* ---- kills all the time ---- */

enum { CROWD = 5 };

typedef struct crowd {
    volatile int steps[CROWD], stop;
    volatile int done[CROWD];
} crowd;

/* The loop of a program whose ranks come back: it ends when somebody says stop. */
static void live(int rank, ddl_context *c, ddl_group *g, crowd *w) {
    for (;;) {
        ddl_status status = DDL_OK;
        bool stop = false;
        while (status == DDL_OK && !stop) {
            int32_t mine[2] = {1, w->stop}, all[2] = {-1, -1};
            status = ddl_all_reduce(g, DDL_ARRAY(mine), DDL_ARRAY(all), DDL_SUM);
            if (status == DDL_OK) {
                CHECK_EQ(all[0], ddl_size(g));
                stop = all[1] > 0;
                w->steps[rank]++;
                usleep(500);
            }
        }
        if (stop) {
            w->done[rank] = ddl_size(g);
            if (g != ddl_world(c)) {
                CHECK_EQ(ddl_group_free(&g), DDL_OK);
            }
            return;
        }
        ddl_group *old = g;
        if (status == DDL_ERR_PEER) {
            status = ddl_group_grow(old, 0, 40000, &g);
        }
        if (status != DDL_OK) {
            test__fail(__FILE__, __LINE__, "%s: %s", ddl_status_name(status), ddl_error(c));
            return;
        }
        if (old != ddl_world(c)) {
            CHECK_EQ(ddl_group_free(&old), DDL_OK);
        }
    }
}

static void live_from_the_start(int rank, int n, void *arg) {
    (void)n;
    ddl_context *c = member();
    REQUIRE(c != NULL);
    live(rank, c, ddl_world(c), (crowd *)arg);
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

static void live_from_now(int rank, int n, void *arg) {
    (void)n;
    ddl_group *g = NULL;
    ddl_context *c = newcomer(&g);
    REQUIRE(c != NULL);
    live(rank, c, g, (crowd *)arg);
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

static bool all_step(crowd *w, const ranks *r) {
    int before[CROWD];
    double limit = test_now_s() + 40 * test_slow();
    for (int i = 0; i < CROWD; i++) {
        before[i] = w->steps[i];
    }
    for (int i = 0; i < CROWD; i++) {
        while (w->steps[i] < before[i] + 2 && test_now_s() < limit && r->running > 0) {
            usleep(500);
        }
    }
    return test_now_s() < limit;
}

/* Whoever dies comes back; a second one dies now and then while the first does: the newcomer or who receives it. */
TEST(ranks_that_die_all_the_time_come_back) {
    uint64_t random = fault_seed("kills all the time");
    crowd *w = (crowd *)ranks_shared(sizeof *w);
    ranks r;
    ranks_start(&r, CROWD, live_from_the_start, w);
    for (int i = 0; i < fault_runs(6, 300) && test__now->failures == 0; i++) {
        if (!all_step(w, &r)) {
            test__fail(__FILE__, __LINE__, "the job stands still after %d kills: TEST_SEED above", i);
            break;
        }
        int first = (int)(fault_random(&random) % CROWD);
        int second = fault_random(&random) % 2 == 0 ? (first + 1) % CROWD : first;
        ranks_kill(&r, first, SIGKILL);
        ranks_reaped(&r, first);
        ranks_again(&r, first, live_from_now, w);
        if (i % 2 == 1) {
            usleep((unsigned)(fault_random(&random) % 60000));
            ranks_kill(&r, second, SIGKILL);
            ranks_reaped(&r, second);
            ranks_again(&r, second, live_from_now, w);
        }
    }
    CHECK(all_step(w, &r));
    w->stop = 1;
    all_well(&r);
    for (int i = 0; i < CROWD; i++) {
        CHECK_EQ(w->done[i], CROWD);
    }
}

/* Growing a group: a rank is killed, another process takes its place, and all go on as if nothing had happened.
 * tests/run: timeout=120 waits=yes
 * FAULT_RUNS sets the number of kills, TEST_SEED repeats a run. */
#define TEST_TIMEOUT_S 3000
#define DDL_IMPLEMENTATION
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

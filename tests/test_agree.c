/* Agreement while ranks die: the lowest, who coordinates, above all. Every agreement has one outcome, also for ranks that
 * died after they had it; shrinking goes on until it has a group of the living.
 * tests/run: timeout=120
 * FAULT_RUNS sets the number of jobs, TEST_SEED repeats a run. */
#define TEST_TIMEOUT_S 3000
#include "faults.h"

enum { RANKS = 5, ROUNDS = 200 };

typedef struct outcome {
    int known; /* 1: ddl_agree has returned */
    int status;
    int32_t flag;
} outcome;

typedef struct shared {
    uint64_t seed;
    volatile int running, stop;
    volatile int round[RANKS];
    outcome outcomes[RANKS][ROUNDS];
    volatile int size[RANKS], rank[RANKS];
    volatile int progress;
} shared;

static ddl_context *join(void) {
    char why[1024] = "";
    ddl_context *c = NULL;
    setenv("DDL_LOG", "none", 1);
    ddl_config config = {.timeout_ms = 20000, .error_text = why, .error_bytes = sizeof why};
    if (ddl_init(&config, &c) != DDL_OK) {
        test__fail(__FILE__, __LINE__, "ddl_init: %s", why);
    }
    return c;
}

static int32_t vote(uint64_t seed, int rank, int round) {
    uint64_t state = seed + (uint64_t)(rank * 1000 + round);
    return (int32_t)(fault_random(&state) | fault_random(&state));
}

static void agree_often(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    (void)n;
    ddl_context *c = join();
    REQUIRE(c != NULL);
    __atomic_fetch_add(&s->running, 1, __ATOMIC_SEQ_CST);
    for (int k = 0; k < ROUNDS; k++) {
        int32_t flag = vote(s->seed, rank, k);
        ddl_status status = ddl_agree(ddl_world(c), &flag);
        s->outcomes[rank][k] = (outcome){0, (int)status, flag};
        __atomic_store_n(&s->outcomes[rank][k].known, 1, __ATOMIC_RELEASE); /* last: this rank may be killed in between */
        if (status != DDL_OK && status != DDL_ERR_PEER) {
            test__fail(__FILE__, __LINE__, "round %d: %s: %s", k, ddl_status_name(status), ddl_error(c));
            break;
        }
        s->round[rank] = k;
    }
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

/* One outcome per round, and it is the AND of the votes of at least those who lived to the end. */
static void judge_rounds(const shared *s, int dead) {
    for (int k = 0; k < ROUNDS; k++) {
        const outcome *first = NULL;
        int32_t all = -1, living = -1;
        for (int r = 0; r < RANKS; r++) {
            const outcome *o = &s->outcomes[r][k];
            all &= vote(s->seed, r, k);
            living &= dead >> r & 1 ? -1 : vote(s->seed, r, k);
            if (!(dead >> r & 1)) {
                CHECK(o->known);
            }
            first = first == NULL && o->known ? o : first;
            if (o->known && first != NULL) {
                CHECK_EQ(o->flag, first->flag);
                CHECK_EQ(o->status, first->status);
            }
        }
        if (first != NULL) {
            CHECK_EQ(first->flag & all, all);
            CHECK_EQ(first->flag | living, living);
        }
    }
}

static void until(volatile int *value, int wanted) {
    double limit = test_now_s() + 30 * test_slow();
    while (*value < wanted && test_now_s() < limit) {
        usleep(100);
    }
}

/* Kills two ranks, the lowest with them more often than not, at random moments. Returns who, as bits. */
static int kill_two(ranks *r, uint64_t *random) {
    int first = fault_random(random) % 3 != 0 ? 0 : (int)(fault_random(random) % RANKS);
    int second = fault_random(random) % 2 != 0 ? (first + 1) % RANKS
                                               : (first + 1 + (int)(fault_random(random) % (RANKS - 1))) % RANKS;
    usleep((unsigned)(fault_random(random) % 8000));
    ranks_kill(r, first, SIGKILL);
    usleep(fault_random(random) % 3 == 0 ? 0 : (unsigned)(fault_random(random) % 3000));
    ranks_kill(r, second, SIGKILL);
    return 1 << first | 1 << second;
}

static void judge_ends(const ranks *r, int dead) {
    CHECK(!r->timed_out);
    for (int i = 0; i < RANKS; i++) {
        CHECK_EQ(r->status[i], dead >> i & 1 ? SIGKILL : 0);
    }
}

TEST(an_agreement_has_one_outcome_whoever_dies) {
    uint64_t random = fault_seed("agreements");
    shared *s = (shared *)ranks_shared(sizeof *s);
    int runs = fault_runs(15, 300), killed_inside = 0;
    for (int i = 0; i < runs && test__now->failures < 20; i++) {
        memset(s, 0, sizeof *s);
        s->seed = fault_random(&random);
        ranks r;
        ranks_start(&r, RANKS, agree_often, s);
        until(&s->running, RANKS);
        int dead = kill_two(&r, &random);
        for (int k = 0; k < RANKS; k++) {
            killed_inside += dead >> k & 1 && s->round[k] < ROUNDS - 1;
        }
        ranks_wait(&r, 30);
        /* A rank that was through with all its rounds before the signal may have ended by itself. */
        for (int k = 0; k < RANKS; k++) {
            dead &= r.status[k] == 0 ? ~(1 << k) : -1;
        }
        judge_ends(&r, dead);
        judge_rounds(s, dead);
    }
    printf("  %d jobs, %d ranks killed while they agreed\n", runs, killed_inside);
    CHECK(killed_inside > 0);
}

/* All_reduces; when one fails, shrink; until the parent says stop. */
static void shrink_often(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    (void)n;
    ddl_context *c = join();
    REQUIRE(c != NULL);
    ddl_group *g = ddl_world(c), *next = NULL;
    __atomic_fetch_add(&s->running, 1, __ATOMIC_SEQ_CST);
    int32_t stop = 0;
    for (int64_t i = 0; !stop; i++) {
        int32_t word = s->stop;
        ddl_status status = fault_all_reduce(g, 1 + i % 500, i);
        status = status < 0 ? status : ddl_broadcast(g, DDL_VIEW(&word, 1), 0);
        if (status == DDL_OK) {
            stop = word;
            s->progress += ddl_rank(g) == 0;
            continue;
        }
        CHECK_EQ(status, DDL_ERR_PEER);
        status = ddl_group_shrink(g, &next);
        if (status != DDL_OK) {
            test__fail(__FILE__, __LINE__, "shrink: %s: %s", ddl_status_name(status), ddl_error(c));
            break;
        }
        if (g != ddl_world(c)) {
            CHECK_EQ(ddl_group_free(&g), DDL_OK);
        }
        g = next;
        i = -1; /* the same counts on all from here */
    }
    s->size[rank] = ddl_size(g);
    s->rank[rank] = ddl_rank(g);
    if (g != ddl_world(c)) {
        CHECK_EQ(ddl_group_free(&g), DDL_OK);
    }
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

TEST(shrinking_ends_with_the_living_whoever_dies_meanwhile) {
    uint64_t random = fault_seed("shrinks");
    shared *s = (shared *)ranks_shared(sizeof *s);
    for (int i = 0; i < fault_runs(12, 300) && test__now->failures < 20; i++) {
        memset(s, 0, sizeof *s);
        ranks r;
        ranks_start(&r, RANKS, shrink_often, s);
        until(&s->running, RANKS);
        int dead = kill_two(&r, &random);
        usleep(30000);
        until(&s->progress, s->progress + 5);
        s->stop = 1;
        ranks_wait(&r, 30);
        judge_ends(&r, dead);
        for (int k = 0, at = 0; k < RANKS; k++) {
            if (!(dead >> k & 1)) {
                CHECK_EQ(s->size[k], RANKS - 2);
                CHECK_EQ(s->rank[k], at);
                at++;
            }
        }
    }
}

static void lose_the_majority(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    ddl_context *c = join();
    REQUIRE(c != NULL);
    ddl_group *left = NULL;
    CHECK_EQ(fault_all_reduces(ddl_world(c), 6), DDL_OK);
    __atomic_add_fetch(&s->running, 1, __ATOMIC_SEQ_CST);
    if (rank < 3) {
        until(&s->running, n); /* nobody is still in the last of them */
        raise(SIGKILL);
    }
    int32_t flag = rank;
    while (ddl_agree(ddl_world(c), &flag) == DDL_OK) { /* until the deaths are known */
        flag = rank;
    }
    usleep(300000);
    CHECK_EQ(ddl_group_shrink(ddl_world(c), &left), DDL_ERR_QUORUM);
    CHECK(left == NULL);
    CHECK_STR(ddl_error(c), "2 of the 5 ranks");
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

TEST(a_minority_does_not_go_on) {
    ranks r;
    ranks_start(&r, RANKS, lose_the_majority, ranks_shared(sizeof(shared)));
    ranks_wait(&r, 30);
    judge_ends(&r, 7);
}

/* Different words, a rank that never calls, and calling again after the deadline. */
static void disagree(int rank, int n, void *arg) {
    (void)n;
    (void)arg;
    ddl_context *c = join();
    REQUIRE(c != NULL);
    ddl_group *world = ddl_world(c), *left = NULL;
    int32_t flag = 1;
    ddl_group_options brief = {.timeout_ms = (int64_t)(300 * test_slow())}, patient = {.timeout_ms = 20000};
    CHECK_EQ(rank == 3 ? ddl_group_shrink(world, &left) : ddl_agree(world, &flag), DDL_ERR_MISMATCH);
    CHECK_EQ(ddl_group_set(world, &brief), DDL_OK);
    if (rank != 4) {
        CHECK_EQ(ddl_agree(world, &flag), DDL_ERR_TIMEOUT);
        CHECK_STR(ddl_error(c), rank == 0 ? "waits for rank 4" : "waits for rank 0");
    } else {
        usleep((unsigned)(600000 * test_slow()));
    }
    CHECK_EQ(ddl_group_set(world, &patient), DDL_OK);
    flag = rank == 4 ? 6 : 3;
    CHECK_EQ(ddl_agree(world, &flag), DDL_OK);
    CHECK_EQ(ddl_group_shrink(world, &left), DDL_OK); /* nobody is missing: a fresh group of all */
    CHECK_EQ(ddl_size(left), RANKS);
    CHECK_EQ(fault_all_reduces(left, 6), DDL_OK);
    CHECK_EQ(ddl_group_free(&left), DDL_OK);
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

TEST(an_agreement_that_failed_is_taken_up_again) { ranks_fork(RANKS, disagree, NULL, 30); }

/* A rank is killed by SIGKILL in the middle of every collective, algorithm and kind of message. Every survivor gets
 * DDL_ERR_PEER naming that rank, all with the same cause, within a second; the survivors shrink and go on.
 * tests/run: timeout=180
 * FAULT_RUNS sets the number of kills, TEST_SEED repeats a run. */
#define TEST_TIMEOUT_S 3000
#include "faults.h"

enum { RANKS = 4, ELEMENTS_MAX = 1 << 18 };

typedef struct scenario {
    const char *algorithm; /* of ddl_group_set; NULL: messages */
    ddl_kind kind;
} scenario;

static const scenario scenarios[] = {
    {"all_reduce=ring", DDL_ALL_REDUCE},
    {"all_reduce=recursive_doubling", DDL_ALL_REDUCE},
    {"all_reduce=halving_doubling", DDL_ALL_REDUCE},
    {"all_reduce=double_tree", DDL_ALL_REDUCE},
    {"all_reduce=direct", DDL_ALL_REDUCE},
    {"all_reduce=all_gather", DDL_ALL_REDUCE},
    {"barrier=dissemination", DDL_BARRIER},
    {"broadcast=tree", DDL_BROADCAST},
    {"broadcast=chain", DDL_BROADCAST},
    {"broadcast=scatter_all_gather", DDL_BROADCAST},
    {"broadcast=double_tree", DDL_BROADCAST},
    {"reduce=tree", DDL_REDUCE},
    {"reduce=chain", DDL_REDUCE},
    {"reduce=reduce_scatter_gather", DDL_REDUCE},
    {"reduce=double_tree", DDL_REDUCE},
    {"reduce=direct", DDL_REDUCE},
    {"gather=linear", DDL_GATHER},
    {"gather=tree", DDL_GATHER},
    {"scatter=linear", DDL_SCATTER},
    {"scatter=tree", DDL_SCATTER},
    {"all_gather=linear", DDL_ALL_GATHER},
    {"all_gather=recursive_doubling", DDL_ALL_GATHER},
    {"all_gather=bruck", DDL_ALL_GATHER},
    {"all_gather=ring", DDL_ALL_GATHER},
    {"reduce_scatter=recursive_halving", DDL_REDUCE_SCATTER},
    {"reduce_scatter=pairwise", DDL_REDUCE_SCATTER},
    {"reduce_scatter=ring", DDL_REDUCE_SCATTER},
    {"reduce_scatter=direct", DDL_REDUCE_SCATTER},
    {"all_to_all=linear", DDL_ALL_TO_ALL},
    {"all_to_all=bruck", DDL_ALL_TO_ALL},
    {"all_to_all=pairwise", DDL_ALL_TO_ALL},
    {"scan=recursive_doubling", DDL_SCAN},
    {"scan=chain", DDL_SCAN},
    {"exscan=recursive_doubling", DDL_EXSCAN},
    {"exscan=chain", DDL_EXSCAN},
    {NULL, DDL_KIND_NONE},
    {NULL, DDL_KIND_NONE},
};
enum { SCENARIOS = sizeof scenarios / sizeof scenarios[0] };

/* What parent and ranks share. */
typedef struct shared {
    const scenario *what;
    int64_t count;
    int victim;
    int secret;          /* 0: unix sockets, no job secret */
    volatile int running; /* ranks that are in the loop */
    volatile double noticed[RANKS];
    char sentence[RANKS][1100];
} shared;

static ddl_collective make_call(const scenario *s, float *in, float *out, int64_t count, int32_t round) {
    int64_t whole = RANKS * count;
    bool many_in = s->kind == DDL_SCATTER || s->kind == DDL_REDUCE_SCATTER || s->kind == DDL_ALL_TO_ALL;
    bool many_out = s->kind == DDL_GATHER || s->kind == DDL_ALL_GATHER || s->kind == DDL_ALL_TO_ALL;
    return (ddl_collective){.kind = s->kind,
                            .op = DDL_SUM,
                            .root = round % RANKS,
                            .in = ddl_tensor_1d(in, DDL_F32, many_in ? whole : count),
                            .out = ddl_tensor_1d(out, DDL_F32, many_out ? whole : count)};
}

/* Collectives until one fails. */
static ddl_status collectives_until_error(ddl_group *g, const shared *s, float *in, float *out) {
    for (int32_t round = 0;; round++) {
        ddl_collective d = make_call(s->what, in, out, s->count, round);
        ddl_request *r = NULL;
        ddl_status status = ddl_collective_init(g, &d, &r);
        status = status < 0 ? status : ddl_start(r);
        if (status == DDL_OK) {
            status = ddl_wait(&r, NULL);
        }
        if (status < 0) {
            ddl_status freed = ddl_request_free(&r);
            CHECK_EQ(freed, DDL_OK);
            return status;
        }
        CHECK_EQ(ddl_request_free(&r), DDL_OK);
    }
}

/* Messages of everybody with everybody until one fails; those that other survivors do not answer any more stay. */
static ddl_status messages_until_error(ddl_group *g, const shared *s, float *in, float *out) {
    int me = ddl_rank(g);
    for (int32_t round = 0;; round++) {
        ddl_request *r[2 * RANKS] = {NULL};
        for (int p = 0; p < RANKS; p++) {
            if (p != me) {
                CHECK_EQ(ddl_irecv(g, ddl_tensor_1d(out + p * s->count, DDL_F32, s->count), p, round, &r[2 * p]), DDL_OK);
                CHECK_EQ(ddl_isend(g, ddl_tensor_1d(in, DDL_F32, s->count), p, round, &r[2 * p + 1]), DDL_OK);
            }
        }
        for (int32_t index = 0; index >= 0;) {
            ddl_status status = ddl_wait_any(r, 2 * RANKS, &index, NULL);
            if (status < 0) {
                return status;
            }
        }
    }
}

static void survive(ddl_context *c, shared *s, int rank) {
    ddl_group *world = ddl_world(c), *left = NULL;
    float sum = 1;
    if (s->what->algorithm != NULL) { /* the group stays broken, with the same sentence */
        CHECK_EQ(ddl_all_reduce(world, DDL_VIEW(&sum, 1), DDL_VIEW(&sum, 1), DDL_SUM), DDL_ERR_PEER);
    }
    ddl_status status = ddl_group_shrink(world, &left);
    if (status != DDL_OK) {
        test__fail(__FILE__, __LINE__, "shrink: %s: %s", ddl_status_name(status), ddl_error(c));
        return;
    }
    CHECK_EQ(ddl_size(left), RANKS - 1);
    CHECK_EQ(ddl_rank(left), rank - (rank > s->victim));
    status = fault_all_reduces(left, 100);
    if (status != DDL_OK) {
        test__fail(__FILE__, __LINE__, "after the shrink: %s", ddl_error(c));
    }
    CHECK_EQ(ddl_group_free(&left), DDL_OK);
}

static void victim_or_survivor(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    static float in[RANKS * ELEMENTS_MAX], out[RANKS * ELEMENTS_MAX];
    int fds = fault_fds();
    ddl_context *c;
    if (!s->secret) {
        unsetenv("DDL_SECRET");
    }
    setenv("DDL_LOG", "none", 1);
    char why[1024] = "";
    ddl_config config = {.timeout_ms = 20000, .error_text = why, .error_bytes = sizeof why};
    ddl_status status = ddl_init(&config, &c);
    if (status != DDL_OK) {
        test__fail(__FILE__, __LINE__, "ddl_init: %s", why);
        return;
    }
    ddl_group *world = ddl_world(c);
    CHECK_EQ(ddl_size(world), n);
    ddl_group_options options = {.algorithm = s->what->algorithm};
    CHECK_EQ(ddl_group_set(world, &options), DDL_OK);
    __atomic_fetch_add(&s->running, 1, __ATOMIC_SEQ_CST);
    status = s->what->algorithm != NULL ? collectives_until_error(world, s, in, out)
                                        : messages_until_error(world, s, in, out);
    s->noticed[rank] = test_now_s();
    snprintf(s->sentence[rank], sizeof s->sentence[rank], "%s", ddl_error(c));
    CHECK_EQ(status, DDL_ERR_PEER);
    survive(c, s, rank);
    double start = test_now_s();
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
    CHECK(test_now_s() - start < 2 * test_slow());
    CHECK_EQ(fault_fds(), fds);
}

/* The part of a sentence that tells the cause: "rank 2 (pid ...) is dead: ...". */
static const char *cause_of(const char *sentence) {
    for (const char *at = strstr(sentence, "rank "); at != NULL; at = strstr(at + 1, "rank ")) {
        int rank, pid;
        if (sscanf(at, "rank %d (pid %d", &rank, &pid) == 2) {
            return at;
        }
    }
    return sentence;
}

static void judge(const shared *s, const ranks *r, double killed, double *times, int *time_count) {
    const char *first = NULL;
    char expected[32];
    snprintf(expected, sizeof expected, "rank %d (pid ", s->victim);
    for (int i = 0; i < RANKS; i++) {
        if (i == s->victim) {
            CHECK_EQ(WIFSIGNALED(r->status[i]) ? WTERMSIG(r->status[i]) : -1, SIGKILL);
            continue;
        }
        CHECK_EQ(r->status[i], 0);
        CHECK_STR(s->sentence[i], expected);
        const char *cause = cause_of(s->sentence[i]);
        first = first == NULL ? cause : first;
        CHECK_EQ(cause, first);
        times[(*time_count)++] = s->noticed[i] > 0 ? s->noticed[i] - killed : 99;
    }
}

static void one_kill(shared *s, uint64_t *random, double *times, int *time_count) {
    static const int64_t counts[] = {2, 16384, ELEMENTS_MAX};
    memset(s, 0, sizeof *s);
    s->what = &scenarios[fault_random(random) % SCENARIOS];
    s->count = counts[fault_random(random) % 3];
    s->victim = (int)(fault_random(random) % RANKS);
    s->secret = fault_random(random) % 4 != 0;
    unsigned delay = (unsigned)(fault_random(random) % 20000);
    ranks r;
    ranks_start(&r, RANKS, victim_or_survivor, s);
    double limit = test_now_s() + 30 * test_slow();
    while (s->running < RANKS && test_now_s() < limit) {
        usleep(500);
    }
    usleep(delay);
    double killed = test_now_s();
    ranks_kill(&r, s->victim, SIGKILL);
    ranks_wait(&r, 30);
    int before = test__now->failures;
    CHECK(!r.timed_out);
    judge(s, &r, killed, times, time_count);
    if (test__now->failures != before || getenv("FAULT_SHOW") != NULL) {
        printf("  kill of rank %d after %u us in %s, %lld elements, %s\n", s->victim, delay,
               s->what->algorithm != NULL ? s->what->algorithm : "messages", (long long)s->count,
               s->secret ? "tcp" : "unix sockets");
    }
}

TEST(every_survivor_names_the_rank_that_was_killed_and_goes_on) {
    uint64_t random = fault_seed("kills");
    int runs = fault_runs(40, 200), time_count = 0;
    shared *s = (shared *)ranks_shared(sizeof *s);
    double *times = (double *)calloc((size_t)(runs * RANKS), sizeof *times);
    for (int i = 0; i < runs && test__now->failures < 20; i++) {
        one_kill(s, &random, times, &time_count);
    }
    double p50 = fault_percentile(times, time_count, 0.5), p99 = fault_percentile(times, time_count, 0.99);
    printf("  %d survivors: noticed after %.1f ms (median), %.1f ms (99 %%), %.1f ms (longest)\n", time_count, p50 * 1e3,
           p99 * 1e3, fault_percentile(times, time_count, 1) * 1e3);
    CHECK(p99 < 1.0 * test_slow());
    free(times);
}

/* A rank is killed by SIGKILL in the middle of every collective, algorithm and kind of message, over sockets, over shared
 * memory and over libfabric. Every survivor gets DDL_ERR_PEER naming that rank, all with the same cause, within a second; nobody has
 * believed half of a result; the survivors shrink and go on.
 * tests/run: timeout=240
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

/* Run by the shared memory itself, beside the plans above. */
static const scenario natives[] = {
    {"barrier=native", DDL_BARRIER},
    {"broadcast=native", DDL_BROADCAST},
    {"reduce=native", DDL_REDUCE},
    {"all_reduce=native", DDL_ALL_REDUCE},
    {"gather=native", DDL_GATHER},
    {"scatter=native", DDL_SCATTER},
    {"all_gather=native", DDL_ALL_GATHER},
    {"reduce_scatter=native", DDL_REDUCE_SCATTER},
    {"all_to_all=native", DDL_ALL_TO_ALL},
    {"scan=native", DDL_SCAN},
    {"exscan=native", DDL_EXSCAN},
    {NULL, DDL_KIND_NONE},
    {NULL, DDL_KIND_NONE},
};
enum { NATIVES = sizeof natives / sizeof natives[0] };

/* What parent and ranks share. */
typedef struct shared {
    const scenario *what;
    int64_t count;
    int victim;
    int secret;   /* 0: unix sockets, no job secret */
    const char *over; /* this transport and no other; NULL: sockets */
    int lent;     /* buffers are tensor memory, which the others see over shared memory */
    int cma;      /* ranks may read each other's ordinary memory */
    int blocking; /* the blocking calls; by requests otherwise */
    int turn;     /* rounds with the same root */
    volatile int running; /* ranks that are in the loop */
    volatile int killed;  /* 1: the victim is no more; 2: a rank has told the others */
    volatile double noticed[RANKS];
    char sentence[RANKS][1100];
} shared;

/* ---- collectives ---- */

enum { SAMPLES = 64 }; /* elements of a result that are looked at */

static bool many_in(ddl_kind kind) { return kind == DDL_SCATTER || kind == DDL_REDUCE_SCATTER || kind == DDL_ALL_TO_ALL; }
static bool many_out(ddl_kind kind) { return kind == DDL_GATHER || kind == DDL_ALL_GATHER || kind == DDL_ALL_TO_ALL; }

static ddl_collective make_call(const shared *s, float *in, float *out, int32_t round) {
    ddl_kind kind = s->what->kind;
    int64_t in_count = many_in(kind) ? RANKS * s->count : s->count, out_count = many_out(kind) ? RANKS * s->count : s->count;
    return (ddl_collective){.kind = kind,
                            .op = DDL_SUM,
                            .root = round / s->turn % RANKS,
                            .in = ddl_tensor_1d(kind == DDL_BROADCAST ? out : in, DDL_F32, in_count),
                            .out = ddl_tensor_1d(out, DDL_F32, out_count)};
}

/* Element i of what rank 0 gives; rank r gives r + 1 times that. */
static double base_value(int64_t i) { return (double)(i % 61 + 1); }

/* Element i of the result; negative: nothing is written. */
static double expected(const shared *s, int rank, int root, int64_t i) {
    ddl_kind kind = s->what->kind;
    int64_t from = i / s->count, within = i % s->count, mine = rank * s->count + within;
    switch (kind) {
    case DDL_BARRIER: return -1;
    case DDL_BROADCAST: return base_value(i) * (root + 1);
    case DDL_SCATTER: return base_value(mine) * (root + 1);
    case DDL_GATHER: return rank == root ? base_value(within) * (double)(from + 1) : -1;
    case DDL_ALL_GATHER: return base_value(within) * (double)(from + 1);
    case DDL_ALL_TO_ALL: return base_value(mine) * (double)(from + 1);
    case DDL_REDUCE: return rank == root ? base_value(i) * RANKS * (RANKS + 1) / 2 : -1;
    case DDL_REDUCE_SCATTER: return base_value(mine) * RANKS * (RANKS + 1) / 2;
    case DDL_SCAN: return base_value(i) * (rank + 1) * (rank + 2) / 2;
    case DDL_EXSCAN: return rank > 0 ? base_value(i) * rank * (rank + 1) / 2 : -1;
    default: return base_value(i) * RANKS * (RANKS + 1) / 2;
    }
}

static int64_t sample(const shared *s, int k) {
    int64_t all = many_out(s->what->kind) ? RANKS * s->count : s->count;
    return all * k / SAMPLES;
}

static void set_samples(const shared *s, int rank, const ddl_collective *d, float *out) {
    for (int k = 0; k < SAMPLES; k++) {
        bool gives = d->kind == DDL_BROADCAST && rank == d->root;
        out[sample(s, k)] = gives ? (float)(base_value(sample(s, k)) * (rank + 1)) : -1.0f;
    }
}

static void check_samples(const shared *s, int rank, const ddl_collective *d, const float *out) {
    for (int k = 0; k < SAMPLES; k++) {
        int64_t i = sample(s, k);
        double should = expected(s, rank, d->root, i);
        if ((double)out[i] < should || (double)out[i] > should) {
            test__fail(__FILE__, __LINE__, "%s, root %d: element %lld is %g, expected %g", s->what->algorithm, d->root,
                       (long long)i, (double)out[i], should);
            return;
        }
    }
}

static ddl_status call_blocking(ddl_group *g, const ddl_collective *d) {
    switch (d->kind) {
    case DDL_BARRIER: return ddl_barrier(g);
    case DDL_BROADCAST: return ddl_broadcast(g, d->in, d->root);
    case DDL_REDUCE: return ddl_reduce(g, d->in, d->out, d->op, d->root);
    case DDL_ALL_REDUCE: return ddl_all_reduce(g, d->in, d->out, d->op);
    case DDL_GATHER: return ddl_gather(g, d->in, d->out, d->root);
    case DDL_SCATTER: return ddl_scatter(g, d->in, d->out, d->root);
    case DDL_ALL_GATHER: return ddl_all_gather(g, d->in, d->out);
    case DDL_REDUCE_SCATTER: return ddl_reduce_scatter(g, d->in, d->out, d->op);
    case DDL_ALL_TO_ALL: return ddl_all_to_all(g, d->in, d->out);
    case DDL_SCAN: return ddl_scan(g, d->in, d->out, d->op);
    default: return ddl_exscan(g, d->in, d->out, d->op);
    }
}

static ddl_status call_by_request(ddl_group *g, const ddl_collective *d) {
    ddl_request *r = NULL;
    ddl_status status = ddl_collective_init(g, d, &r);
    status = status < 0 ? status : ddl_start(r);
    status = status < 0 ? status : ddl_wait(&r, NULL);
    CHECK_EQ(ddl_request_free(&r), DDL_OK);
    return status;
}

/* What was asked for is what runs. */
static void check_algorithm(ddl_group *g, const shared *s) {
    static char record[65536];
    const char *name = strchr(s->what->algorithm, '=') + 1;
    record[0] = 0;
    ddl_flight_record(ddl_group_context(g), record, sizeof record);
    CHECK_STR(record, name);
}

/* Collectives until one fails. */
static ddl_status collectives_until_error(ddl_group *g, const shared *s, float *in, float *out) {
    int rank = ddl_rank(g);
    for (int64_t i = 0; i < RANKS * s->count; i++) {
        in[i] = (float)(base_value(i) * (rank + 1));
    }
    for (int32_t round = 0;; round++) {
        ddl_collective d = make_call(s, in, out, round);
        set_samples(s, rank, &d, out);
        ddl_status status = s->blocking ? call_blocking(g, &d) : call_by_request(g, &d);
        if (status < 0) {
            return status;
        }
        check_samples(s, rank, &d, out);
        if (round == 0) {
            check_algorithm(g, s);
        }
    }
}

/* ---- messages ---- */

static ddl_request *unanswered[2 * RANKS]; /* of this process */

/* Messages of everybody with everybody until one fails; those that other survivors do not answer any more stay. A
 * survivor may be a round ahead, with all of the victim's last messages: it hears of the death from who shrinks. */
static ddl_status messages_until_error(ddl_group *g, const shared *s, float *in, float *out) {
    int me = ddl_rank(g);
    for (int32_t round = 0;; round++) {
        ddl_request **r = unanswered;
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

/* Once all have gone on nobody has to wait for them until their deadline: they end, answered before or not at all. */
static void check_unanswered_end(ddl_context *c) {
    double start = test_now_s();
    for (int i = 0; i < 2 * RANKS; i++) {
        ddl_status status = ddl_wait(&unanswered[i], NULL);
        if (status != DDL_OK && status != DDL_ERR_PEER) {
            test__fail(__FILE__, __LINE__, "%s: %s", ddl_status_name(status), ddl_error(c));
        }
    }
    CHECK(test_now_s() - start < 1 * test_slow());
}

/* ---- one rank ---- */

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
    check_unanswered_end(c);
    status = fault_all_reduces(left, 100);
    if (status != DDL_OK) {
        test__fail(__FILE__, __LINE__, "after the shrink: %s", ddl_error(c));
    }
    CHECK_EQ(ddl_group_free(&left), DDL_OK);
}

static void settings(const shared *s) {
    setenv("DDL_LOG", "none", 1);
    if (!s->secret) {
        unsetenv("DDL_SECRET");
    }
    if (s->over != NULL) {
        setenv("DDL_TRANSPORTS", s->over, 1);
        setenv("DDL_PLUGIN_PATH", fault_plugins(), 1);
        setenv("DDL_SHM_CMA", s->cma ? "1" : "0", 1);
    }
}

static ddl_tensor buffer(ddl_context *c, const shared *s) {
    static float ordinary[2][RANKS * ELEMENTS_MAX];
    static int next;
    int64_t count = RANKS * ELEMENTS_MAX;
    ddl_tensor t = ddl_tensor_1d(ordinary[next++ % 2], DDL_F32, count);
    if (s->lent) {
        CHECK_EQ(ddl_tensor_alloc(c, DDL_F32, 1, &count, &t), DDL_OK);
    }
    return t;
}

static void victim_or_survivor(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    int fds = fault_fds();
    ddl_context *c;
    settings(s);
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
    ddl_tensor in = buffer(c, s), out = buffer(c, s);
    __atomic_fetch_add(&s->running, 1, __ATOMIC_SEQ_CST);
    status = s->what->algorithm != NULL ? collectives_until_error(world, s, in.data, out.data)
                                        : messages_until_error(world, s, in.data, out.data);
    s->noticed[rank] = test_now_s();
    snprintf(s->sentence[rank], sizeof s->sentence[rank], "%s", ddl_error(c));
    CHECK_EQ(status, DDL_ERR_PEER);
    survive(c, s, rank);
    if (s->lent) {
        CHECK_EQ(ddl_tensor_free(c, &in), DDL_OK);
        CHECK_EQ(ddl_tensor_free(c, &out), DDL_OK);
    }
    double start = test_now_s();
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
    CHECK(test_now_s() - start < 2 * test_slow());
    CHECK_EQ(fault_fds(), fds);
}

/* ---- killing ---- */

/* The part of a sentence that tells the cause: "rank 2 (pid ...) is dead: ...". What the rank called before is its own,
 * and is cut off. */
static const char *cause_of(char *sentence) {
    char *before = strstr(sentence, " (before it: ");
    if (before != NULL) {
        *before = 0;
    }
    for (const char *at = strstr(sentence, "rank "); at != NULL; at = strstr(at + 1, "rank ")) {
        int rank, pid;
        if (sscanf(at, "rank %d (pid %d", &rank, &pid) == 2) {
            return at;
        }
    }
    return sentence;
}

static void judge(shared *s, const ranks *r, double killed, double *times, int *time_count) {
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

/* Two of three collectives over shared memory are native: small, staged, or in each other's tensors. */
static void choose(shared *s, uint64_t *random, const char *over) {
    static const int64_t counts[] = {2, 512, 16384, ELEMENTS_MAX};
    bool shm = over != NULL && strcmp(over, "shm") == 0, native = shm && fault_random(random) % 3 != 0;
    memset(s, 0, sizeof *s);
    s->over = over;
    s->what = native ? &natives[fault_random(random) % NATIVES] : &scenarios[fault_random(random) % SCENARIOS];
    s->count = counts[fault_random(random) % 4];
    s->victim = (int)(fault_random(random) % RANKS);
    s->secret = fault_random(random) % 4 != 0;
    s->lent = over != NULL && fault_random(random) % 2 != 0;
    s->cma = fault_random(random) % 3 != 0;
    s->blocking = fault_random(random) % 2 != 0;
    s->turn = fault_random(random) % 2 != 0 ? 1 : 50;
}

static void one_kill(shared *s, uint64_t *random, const char *over, double *times, int *time_count) {
    choose(s, random, over);
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
        printf("  kill of rank %d after %u us in %s, %lld elements, %s%s%s%s\n", s->victim, delay,
               s->what->algorithm != NULL ? s->what->algorithm : "messages", (long long)s->count,
               s->secret ? "a secret" : "no secret", s->blocking ? ", blocking" : "", s->lent ? ", tensor memory" : "",
               s->over != NULL && s->cma ? ", process_vm_readv where it is used" : "");
    }
}

static void kills(const char *what, const char *over, int normal) {
    uint64_t random = fault_seed(what);
    int runs = fault_runs(normal, 200), time_count = 0;
    shared *s = (shared *)ranks_shared(sizeof *s);
    double *times = (double *)calloc((size_t)(runs * RANKS), sizeof *times);
    for (int i = 0; i < runs && test__now->failures < 20; i++) {
        one_kill(s, &random, over, times, &time_count);
    }
    double p50 = fault_percentile(times, time_count, 0.5), p99 = fault_percentile(times, time_count, 0.99);
    double longest = fault_percentile(times, time_count, 1);
    printf("  %d kills, %d survivors: noticed after %.1f ms (median), %.1f ms (99 %%), %.1f ms (longest)\n", runs,
           time_count, p50 * 1e3, p99 * 1e3, longest * 1e3);
    CHECK_EQ(time_count, runs * (RANKS - 1));
    CHECK(longest < 1.0 * test_slow());
    free(times);
    munmap(s, sizeof *s);
}

/* ---- a survivor that has gone on ---- */

enum { FIRST = 1, VICTIM = 3 }; /* FIRST alone needs the victim */

enum { BIG = 3 << 17 };
static float big[BIG]; /* more than goes unasked, so that its receiver has to ask for it */

/* What waits for a rank that has gone on to the shrink fails, whether it waited before or asks only then. */
static void wait_for_first(ddl_context *c, int rank) {
    ddl_group *world = ddl_world(c);
    float one = 0;
    double start = test_now_s();
    ddl_request *r = NULL;
    if (rank == 0) {
        CHECK_EQ(ddl_recv(world, DDL_VIEW(&one, 1), FIRST, 1, NULL), DDL_ERR_PEER);
    } else {
        CHECK_EQ(ddl_isend(world, ddl_tensor_1d(big, DDL_F32, BIG), FIRST, 2, &r), DDL_OK);
        CHECK_EQ(ddl_wait(&r, NULL), DDL_ERR_PEER);
    }
    CHECK_STR(ddl_error(c), "rank 3 (pid ");
    CHECK_EQ(ddl_irecv(world, DDL_VIEW(&one, 1), FIRST, 3, &r), DDL_OK);
    CHECK_EQ(ddl_wait(&r, NULL), DDL_ERR_PEER);
    CHECK_STR(ddl_error(c), "rank 3 (pid ");
    CHECK_EQ(ddl_probe(world, FIRST, 4, NULL), DDL_ERR_PEER);
    CHECK_STR(ddl_error(c), "rank 3 (pid ");
    CHECK(test_now_s() - start < 60 * test_slow()); /* each of them would take 100 s */
}

/* A survivor asks each other for a message, and offers one, that the other never answers. */
static void ask_in_vain(ddl_group *world, int rank) {
    static float none;
    for (int p = 0; p < VICTIM; p++) {
        if (p != rank) {
            CHECK_EQ(ddl_irecv(world, DDL_VIEW(&none, 1), p, 5, &unanswered[2 * p]), DDL_OK);
            CHECK_EQ(ddl_isend(world, ddl_tensor_1d(big, DDL_F32, BIG), p, 6, &unanswered[2 * p + 1]), DDL_OK);
        }
    }
}

static void check_in_vain(ddl_context *c) {
    double start = test_now_s();
    for (int i = 0; i < 2 * VICTIM; i++) {
        if (unanswered[i] != NULL) {
            CHECK_EQ(ddl_wait(&unanswered[i], NULL), DDL_ERR_PEER);
            CHECK_STR(ddl_error(c), "rank 3 (pid ");
        }
    }
    CHECK(test_now_s() - start < 60 * test_slow()); /* each of them would take 100 s */
}

static void goes_on_or_waits(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    ddl_context *c;
    (void)n;
    settings(s);
    ddl_config config = {.timeout_ms = 100000};
    REQUIRE(ddl_init(&config, &c) == DDL_OK);
    ddl_group *world = ddl_world(c), *left = NULL;
    float word = 5, heard = 0;
    CHECK_EQ(ddl_barrier(world), DDL_OK);
    if (rank == FIRST) { /* what was sent before is received, by who comes late too */
        CHECK_EQ(ddl_send(world, DDL_VIEW(&word, 1), 0, 7), DDL_OK);
    }
    float mine = 0;
    ddl_request *own = NULL; /* a message to itself needs nobody else */
    if (rank != VICTIM) {
        ask_in_vain(world, rank);
        CHECK_EQ(ddl_irecv(world, DDL_VIEW(&mine, 1), rank, 10, &own), DDL_OK);
    }
    __atomic_fetch_add(&s->running, 1, __ATOMIC_SEQ_CST);
    if (rank == VICTIM) {
        for (;;) {
            pause();
        }
    } else if (rank == FIRST) {
        CHECK_EQ(ddl_recv(world, DDL_VIEW(&heard, 1), VICTIM, 0, NULL), DDL_ERR_PEER);
    } else {
        wait_for_first(c, rank);
    }
    if (rank == 0) {
        CHECK_EQ(ddl_recv(world, DDL_VIEW(&heard, 1), FIRST, 7, NULL), DDL_OK);
        CHECK(heard > 4.5f && heard < 5.5f);
    }
    CHECK_EQ(ddl_group_shrink(world, &left), DDL_OK);
    check_in_vain(c);
    CHECK_EQ(ddl_test(&own, NULL), DDL_IN_PROGRESS);
    CHECK_EQ(ddl_send(world, DDL_VIEW(&word, 1), rank, 10), DDL_OK);
    CHECK_EQ(ddl_wait(&own, NULL), DDL_OK);
    CHECK(mine > 4.5f && mine < 5.5f);
    CHECK_EQ(fault_all_reduces(left, 6), DDL_OK);
    if (rank == FIRST) { /* and after the shrink the survivors' messages go on in the old group too */
        CHECK_EQ(ddl_send(world, DDL_VIEW(&word, 1), 0, 6), DDL_OK);
    } else if (rank == 0) { /* which is not the one that FIRST offered in vain */
        heard = 0;
        CHECK_EQ(ddl_recv(world, DDL_VIEW(&heard, 1), FIRST, 6, NULL), DDL_OK);
        CHECK(heard > 4.5f && heard < 5.5f);
    }
    CHECK_EQ(ddl_group_free(&left), DDL_OK);
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

static void one_goes_on(const char *over) {
    shared *s = (shared *)ranks_shared(sizeof *s);
    ranks r;
    s->secret = 1;
    s->over = over;
    ranks_start(&r, RANKS, goes_on_or_waits, s);
    while (s->running < RANKS && r.running == RANKS) {
        ranks__reap(&r);
        usleep(500);
    }
    ranks_kill(&r, VICTIM, SIGKILL);
    ranks_wait(&r, 80);
    CHECK(!r.timed_out);
    for (int i = 0; i < RANKS; i++) {
        CHECK(i == VICTIM || r.status[i] == 0);
    }
    munmap(s, sizeof *s);
}

TEST(who_waits_for_a_survivor_that_has_gone_on_hears_of_the_death) {
    one_goes_on(NULL);
    if (fault_has_plugin("shm")) {
        one_goes_on("shm");
    }
    if (fault_has_plugin("fabric")) {
        one_goes_on("fabric:tcp");
    }
}

/* ---- a death that is noticed while a batch is started ---- */

enum { BUSY = 1, PIECE = 1024, FULL = 31, MORE = 8 }; /* so many messages of PIECE floats fill the window to BUSY */

/* The batch's sends look at what has come before they say that the window is full: there the death is found, and ends
 * the batch's receive before it was started. It must not be kept as one that is posted. */
static void start_a_batch(ddl_group *world, const shared *s) {
    static float pieces[PIECE], none, got;
    ddl_request *sent[FULL], *batch[MORE + 1];
    for (int i = 0; i < FULL; i++) {
        CHECK_EQ(ddl_isend(world, DDL_VIEW(pieces, PIECE), BUSY, 1, &sent[i]), DDL_OK);
    }
    while (s->killed < 2) {
        usleep(1000);
    }
    usleep(100000);
    ddl_transfer transfers[MORE + 1];
    for (int i = 0; i < MORE; i++) {
        transfers[i] = (ddl_transfer){.is_send = 1, .tensor = DDL_VIEW(pieces, PIECE), .peer = BUSY, .tag = 1};
    }
    transfers[MORE] = (ddl_transfer){.tensor = DDL_VIEW(&none, 1), .peer = DDL_ANY_SOURCE, .tag = 9};
    CHECK_EQ(ddl_batch(world, transfers, MORE + 1, batch), DDL_OK);
    CHECK_EQ(ddl_wait(&batch[MORE], NULL), DDL_ERR_PEER);
    CHECK_EQ(ddl_wait_all(batch, MORE, NULL), DDL_OK);
    CHECK_EQ(ddl_wait_all(sent, FULL, NULL), DDL_OK);
    none = -1;
    CHECK_EQ(ddl_recv(world, DDL_VIEW(&got, 1), BUSY, 9, NULL), DDL_OK); /* not taken by the one that has ended */
    CHECK(got > 6.5f && got < 7.5f);
    CHECK(none < 0);
}

static void batch_or_busy(int rank, int n, void *arg) {
    static float piece[PIECE];
    shared *s = (shared *)arg;
    ddl_context *c;
    float seven = 7;
    (void)n;
    settings(s);
    ddl_config config = {.timeout_ms = 20000};
    REQUIRE(ddl_init(&config, &c) == DDL_OK);
    ddl_group *world = ddl_world(c);
    CHECK_EQ(ddl_barrier(world), DDL_OK);
    __atomic_fetch_add(&s->running, 1, __ATOMIC_SEQ_CST);
    if (rank == 0) {
        start_a_batch(world, s);
    } else if (rank == BUSY) {
        while (!s->killed) {
            usleep(1000);
        }
        CHECK_EQ(ddl_recv(world, DDL_VIEW(piece, 1), 2, 0, NULL), DDL_ERR_PEER);
        s->killed = 2;
        usleep(300000); /* rank 0's window stays full */
        for (int i = 0; i < FULL + MORE; i++) {
            CHECK_EQ(ddl_recv(world, DDL_VIEW(piece, PIECE), 0, 1, NULL), DDL_OK);
        }
        CHECK_EQ(ddl_send(world, DDL_VIEW(&seven, 1), 0, 9), DDL_OK);
    } else {
        for (;;) {
            pause();
        }
    }
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

TEST(a_death_that_a_batch_meets_while_it_is_started_ends_its_receive_once) {
    shared *s = (shared *)ranks_shared(sizeof *s);
    ranks r;
    s->secret = 1;
    ranks_start(&r, 3, batch_or_busy, s);
    while (s->running < 3 && r.running == 3) {
        ranks__reap(&r);
        usleep(500);
    }
    ranks_kill(&r, 2, SIGKILL);
    while (r.running == 3) {
        ranks__reap(&r);
        usleep(500);
    }
    s->killed = 1;
    ranks_wait(&r, 60);
    CHECK(!r.timed_out);
    CHECK(r.status[0] == 0 && r.status[1] == 0);
    munmap(s, sizeof *s);
}

TEST(every_survivor_names_the_rank_that_was_killed_and_goes_on) { kills("kills", NULL, 40); }

TEST(so_it_does_over_shared_memory) {
    if (!fault_has_plugin("shm")) {
        SKIP("libddl-shm.so is not built; make plugins builds it");
    }
    kills("kills over shared memory", "shm", 40);
}

/* To begin costs each rank a quarter of a second of the processor. */
TEST(so_it_does_over_libfabric) {
    if (!fault_has_plugin("fabric")) {
        SKIP("libddl-fabric.so is not built; make plugins builds it, where libfabric is");
    }
    kills("kills over libfabric", "fabric:tcp", 10);
}

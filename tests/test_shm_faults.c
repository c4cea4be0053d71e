/* Shared memory under the core, where the system refuses something: joining, another rank's memory, a set for one group
 * more. All ranks get the same error, naming the rank, or go on in another way; nobody waits, no result is wrong.
 * tests/run: variants=asan timeout=120 waits=yes */
#define TEST_TIMEOUT_S 400
#define _GNU_SOURCE 1
#define DDL_IMPLEMENTATION
#define DDL__STATIC_PLUGINS(X) X(shm)

typedef struct ddl_plugin ddl_plugin;
typedef struct ddl_host ddl_host;
const ddl_plugin *ddl_plugin_shm_v1(const ddl_host *host);

#include "faults.h"

#include "shm_refuse.h"

enum { RANKS = 4, COUNT = 300000 };

typedef struct shared {
    int kind, victim, blocking;
    int64_t count;
    volatile int warned[RANKS], joining[RANKS];
    char said[RANKS][1100], warning[RANKS][1100];
    volatile double began;
} shared;

static shared *now;

static void on_log(void *user, ddl_log_level level, const char *line) {
    int rank = *(const int *)user;
    if (level <= DDL_LOG_WARN) {
        now->warned[rank]++;
        snprintf(now->warning[rank], sizeof now->warning[rank], "%s", line);
    }
}

static ddl_status join(int rank, const char *transports, ddl_context **out) {
    static int me;
    char why[1024] = "";
    me = rank;
    if (transports != NULL) {
        setenv("DDL_TRANSPORTS", transports, 1);
    }
    ddl_config config = {.timeout_ms = (int64_t)(20000 * test_slow()), .log = on_log, .log_user = &me, .error_text = why,
                         .error_bytes = sizeof why};
    ddl_status status = ddl_init(&config, out);
    snprintf(now->said[rank], sizeof now->said[rank], "%s", why);
    return status;
}

/* How many collectives of groups of that name the shared memory ran by itself, of those that are remembered. */
static int natives_of(ddl_context *c, const char *group) {
    static char record[1 << 17];
    size_t length = strlen(group);
    int count = 0;
    ddl_flight_record(c, record, sizeof record);
    for (char *line = strtok(record, "\n"); line != NULL; line = strtok(NULL, "\n")) {
        count += strncmp(line, group, length) == 0 && line[length] == ' ' && strstr(line, " by native ") != NULL;
    }
    return count;
}

/* ---- the segment cannot be made ---- */

static void without_files_of_memory(int rank, int n, void *arg) {
    ddl_context *c = NULL;
    const char *transports = arg;
    (void)n;
    setenv("DDL_SELF_TEST", "0", 1); /* the first file of memory is the job's segment */
    faults.memfd = rank == 0;
    ddl_status status = join(rank, transports, &c);
    if (transports != NULL) {
        CHECK(status < 0);
        return;
    }
    CHECK_EQ(status, DDL_OK);
    REQUIRE(c != NULL);
    CHECK_EQ(fault_all_reduces(ddl_world(c), 6), DDL_OK);
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

TEST(without_a_segment_tcp_is_taken_with_a_warning) {
    now = ranks_shared(sizeof *now);
    ranks_fork(RANKS, without_files_of_memory, NULL, 30);
    CHECK_STR(now->warning[0], "shm: no segment of");
    CHECK_EQ(now->warned[0], 1);
}

TEST(without_a_segment_shm_by_name_is_an_error_on_all) {
    now = ranks_shared(sizeof *now);
    ranks_fork(RANKS, without_files_of_memory, "shm", 30);
    for (int rank = 0; rank < RANKS; rank++) {
        CHECK_STR(now->said[rank], "DDL_TRANSPORTS");
        CHECK_STR(now->said[rank], "shm");
    }
}

/* A limit of the system itself, on the one rank that makes the segment, or on another: that one only maps it. */
typedef struct limited {
    int rank;
    const char *transports;
} limited;

static void under_a_file_limit(int rank, int n, void *arg) {
    const limited *l = arg;
    ddl_context *c = NULL;
    const struct rlimit least = {1 << 20, 1 << 20};
    (void)n;
    setenv("DDL_SELF_TEST", "0", 1); /* its own file of memory would be refused first */
    if (rank == l->rank) {
        REQUIRE(setrlimit(RLIMIT_FSIZE, &least) == 0);
    }
    ddl_status status = join(rank, l->transports, &c);
    bool refused = l->rank == 0 && l->transports != NULL;
    CHECK_EQ(status < 0, refused);
    if (c != NULL) {
        CHECK_EQ(fault_all_reduces(ddl_world(c), 6), DDL_OK);
        CHECK_EQ(natives_of(c, "world") > 0, l->rank != 0);
        CHECK_EQ(ddl_finalize(&c), DDL_OK);
    }
}

TEST(under_a_file_limit_tcp_is_taken_with_a_warning) {
    now = ranks_shared(sizeof *now);
    ranks_fork(RANKS, under_a_file_limit, &(limited){0, NULL}, 30);
    CHECK_STR(now->warning[0], "shm: no segment of");
    CHECK_STR(now->warning[0], "File too large");
    CHECK_EQ(now->warned[0], 1);
}

TEST(under_a_file_limit_shm_by_name_is_an_error_on_all) {
    now = ranks_shared(sizeof *now);
    ranks_fork(RANKS, under_a_file_limit, &(limited){0, "shm"}, 30);
    for (int rank = 0; rank < RANKS; rank++) {
        CHECK_STR(now->said[rank], "DDL_TRANSPORTS");
    }
}

TEST(a_file_limit_of_another_rank_is_no_obstacle) {
    now = ranks_shared(sizeof *now);
    ranks_fork(RANKS, under_a_file_limit, &(limited){2, "shm"}, 30);
    CHECK_EQ(now->warned[2], 0);
}

/* A rank is killed while it joins, or soon after. Nobody waits for it longer than for one that never came. */
static void join_and_work(int rank, int n, void *arg) {
    shared *s = arg;
    ddl_context *c = NULL;
    char name[16];
    (void)n;
    setenv("DDL_INIT_TIMEOUT_MS", "1500", 1);
    setenv("DDL_LOG", "none", 1);
    s->joining[rank] = 1;
    ddl_status status = join(rank, "shm", &c);
    while (status == DDL_OK) {
        status = fault_all_reduce(ddl_world(c), 1000, 0);
        snprintf(s->said[rank], sizeof s->said[rank], "%s", ddl_error(c));
    }
    snprintf(name, sizeof name, "rank %d", s->victim);
    if (status == DDL_ERR_PEER) {
        CHECK_STR(s->said[rank], name);
    }
    CHECK(s->said[rank][0] != 0);
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

TEST(a_rank_that_is_killed_while_it_joins_is_not_waited_for) {
    uint64_t random = fault_seed("kills while joining");
    for (int i = 0; i < fault_runs(12, 200); i++) {
        shared *s = now = ranks_shared(sizeof *s);
        s->victim = (int)(fault_random(&random) % RANKS);
        ranks r;
        ranks_start(&r, RANKS, join_and_work, s);
        while (s->joining[s->victim] == 0) {
            usleep(100);
        }
        usleep((unsigned)(fault_random(&random) % 12000));
        double killed = test_now_s();
        ranks_kill(&r, s->victim, SIGKILL);
        ranks_wait(&r, 20);
        CHECK(!r.timed_out && test_now_s() - killed < 5 * test_slow());
        for (int rank = 0; rank < RANKS; rank++) {
            CHECK(rank == s->victim || r.status[rank] == 0);
        }
        munmap(s, sizeof *s);
    }
}

/* ---- one rank cannot see what another gives ---- */

static ddl_status call(ddl_group *g, const shared *s, ddl_tensor in, ddl_tensor out) {
    ddl_request *r = NULL;
    ddl_tensor part = ddl_tensor_1d(in.data, DDL_F32, s->count / RANKS);
    switch (s->kind) {
    case DDL_BROADCAST: return ddl_broadcast(g, in, 0);
    case DDL_ALL_GATHER: return ddl_all_gather(g, part, out);
    case DDL_REDUCE: return ddl_reduce(g, in, out, DDL_SUM, (s->victim + 1) % RANKS);
    default: break;
    }
    if (s->blocking) {
        return ddl_all_reduce(g, in, out, DDL_SUM);
    }
    ddl_status status = ddl_iall_reduce(g, in, out, DDL_SUM, &r);
    return status < 0 ? status : ddl_wait(&r, NULL);
}

static void recover(ddl_context *c, int n) {
    ddl_group *again = NULL;
    CHECK_EQ(ddl_group_shrink(ddl_world(c), &again), DDL_OK);
    REQUIRE(again != NULL);
    CHECK_EQ(ddl_size(again), n);
    CHECK_EQ(fault_all_reduces(again, 30), DDL_OK);
    CHECK_EQ(natives_of(c, ddl_group_name(again)), 30);
    CHECK_EQ(ddl_group_free(&again), DDL_OK);
}

/* Element i of what this rank gets, of which rank r gives r + 1; 0: it gets nothing. */
static float gets(const shared *s, int rank, int64_t i) {
    float sum = (float)(RANKS * (RANKS + 1)) / 2;
    switch (s->kind) {
    case DDL_BROADCAST: return 1;
    case DDL_ALL_GATHER: return (float)(i / (s->count / RANKS) + 1);
    case DDL_REDUCE: return rank == (s->victim + 1) % RANKS ? sum : 0;
    default: return sum;
    }
}

static void one_is_blind(int rank, int n, void *arg) {
    shared *s = arg;
    ddl_context *c = NULL;
    ddl_tensor in, out;
    (void)n;
    REQUIRE(join(rank, "shm", &c) == DDL_OK);
    CHECK_EQ(ddl_tensor_alloc(c, DDL_F32, 1, &s->count, &in), DDL_OK);
    CHECK_EQ(ddl_tensor_alloc(c, DDL_F32, 1, &s->count, &out), DDL_OK);
    CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
    faults.map = rank == s->victim; /* the next mapping is that of a peer's memory */
    for (int round = 0; round < 4; round++) { /* where a peer's broadcast lies is known from its first one */
        for (int64_t i = 0; i < s->count; i++) {
            ((float *)in.data)[i] = (float)(rank + 1);
            ((float *)out.data)[i] = -1;
        }
        CHECK_EQ(call(ddl_world(c), s, in, out), DDL_OK);
        const float *got = s->kind == DDL_BROADCAST ? in.data : out.data;
        int64_t count = s->kind == DDL_ALL_GATHER ? s->count / RANKS * RANKS : s->count;
        for (int64_t i = 0; i < count && gets(s, rank, i) > 0; i++) {
            REQUIRE(got[i] >= gets(s, rank, i) && got[i] <= gets(s, rank, i));
        }
    }
    CHECK_EQ(faults.map, 0);
    CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &in), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &out), DDL_OK);
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

TEST(a_rank_that_cannot_map_a_peer_goes_another_way_with_all) {
    static const int kinds[] = {DDL_ALL_REDUCE, DDL_ALL_REDUCE, DDL_BROADCAST, DDL_ALL_GATHER, DDL_REDUCE};
    for (int k = 0; k < 5; k++) {
        shared *s = now = ranks_shared(sizeof *s);
        *s = (shared){.kind = kinds[k], .blocking = k == 0, .victim = 1 + k % (RANKS - 1), .count = COUNT};
        ranks_fork(RANKS, one_is_blind, s, 30);
    }
}

/* ---- no memory for one operation more ---- */

static int refuse_ops;
static void *(*real_alloc)(const ddl_host *host, size_t bytes);

static void *choosy_alloc(const ddl_host *host, size_t bytes) {
    if (bytes == sizeof(shm_op) && fails(&refuse_ops)) {
        return NULL;
    }
    return real_alloc(host, bytes);
}

static void one_has_no_room(int rank, int n, void *arg) {
    enum { QUEUE = SHM_OPS + 4 };
    static float data[QUEUE][8];
    shared *s = arg;
    ddl_context *c = NULL;
    ddl_request *r[QUEUE] = {NULL};
    REQUIRE(join(rank, "shm", &c) == DDL_OK);
    ddl_host *host = &c->endpoints[0].host; /* of the plugin alone */
    real_alloc = host->alloc;
    host->alloc = choosy_alloc;
    ddl_group *world = ddl_world(c);
    CHECK_EQ(ddl_barrier(world), DDL_OK);
    s->joining[rank] = 1;
    for (int i = 0; i < n; i++) { /* the failure of one would end the barrier of another that has not seen its end */
        for (int ms = 0; !s->joining[i] && ms < 10000; ms++) {
            usleep(1000);
        }
    }
    if (rank == 0) { /* the others' operations queue up */
        usleep(200000);
    }
    refuse_ops = rank == s->victim;
    ddl_status status = DDL_OK;
    for (int i = 0; i < QUEUE && status == DDL_OK; i++) {
        status = ddl_iall_reduce(world, DDL_ARRAY(data[i]), DDL_ARRAY(data[i]), DDL_SUM, &r[i]);
    }
    for (int i = 0; i < QUEUE; i++) {
        ddl_status ended = r[i] != NULL ? ddl_wait(&r[i], NULL) : DDL_OK;
        status = status == DDL_OK ? ended : status;
    }
    CHECK_EQ(refuse_ops, 0);
    CHECK_EQ(status, DDL_ERR_NOMEM);
    snprintf(s->said[rank], sizeof s->said[rank], "%s", ddl_error(c));
    recover(c, n);
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

TEST(a_rank_that_cannot_begin_ends_the_call_on_all) {
    shared *s = now = ranks_shared(sizeof *s);
    s->victim = 2;
    ranks_fork(RANKS, one_has_no_room, s, 30);
    for (int rank = 0; rank < RANKS; rank++) {
        CHECK_STR(s->said[rank], "the transport of rank 2 cannot begin all_reduce: out of memory");
    }
}

/* ---- more groups than staging is cut for ---- */

static void many_groups(int rank, int n, void *arg) {
    enum { GROUPS = 3 * SHM_PIECES };
    ddl_context *c = NULL;
    ddl_group *g[GROUPS] = {NULL};
    (void)arg, (void)n;
    REQUIRE(join(rank, "shm", &c) == DDL_OK);
    for (int turn = 0; turn < 2; turn++) { /* pieces come back */
        for (int i = 0; i < GROUPS; i++) {
            REQUIRE(ddl_group_duplicate(ddl_world(c), &g[i]) == DDL_OK);
            CHECK_EQ(fault_all_reduces(g[i], 6), DDL_OK);
        }
        CHECK_EQ(natives_of(c, ddl_group_name(g[0])), 6 * (SHM_PIECES - 1)); /* the world has one */
        for (int i = 0; i < GROUPS; i++) {
            CHECK_EQ(fault_all_reduce(g[i], 5000, i), DDL_OK);
        }
        for (int i = 0; i < GROUPS; i++) {
            CHECK_EQ(ddl_group_free(&g[i]), DDL_OK);
        }
        CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
    }
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

TEST(groups_beyond_the_staging_use_messages) {
    now = ranks_shared(sizeof *now);
    ranks_fork(RANKS, many_groups, NULL, 60);
}

/* The counters: collectives, bytes and time by algorithm and by transport that runs them; who was last; what was slow;
 * and their text. tests/run: variants=asan timeout=90 */
#define _GNU_SOURCE 1
#define DDL_IMPLEMENTATION
#define DDL__STATIC_PLUGINS(X) X(shm)

typedef struct ddl_plugin ddl_plugin;
typedef struct ddl_host ddl_host;
const ddl_plugin *ddl_plugin_shm_v1(const ddl_host *host);

#include "world.h"

#include "../plugins/shm/shm.c"

#include <stdbool.h>

enum { RANKS = 4, ROUNDS = 20, LATE = 2, COUNT = 100 };

static ddl_algorithm_stats of(const ddl_stats *s, const char *name) {
    for (int i = 0; i < DDL_STATS_ALGORITHMS && s->algorithms[i].name != NULL; i++) {
        if (strcmp(s->algorithms[i].name, name) == 0) {
            return s->algorithms[i];
        }
    }
    return (ddl_algorithm_stats){name, 0, 0, 0};
}

typedef struct shared {
    bool native;
    int called[ROUNDS];
} shared;

/* All but one call; that one follows, surely later. */
static void late_rounds(ddl_group *w, shared *s) {
    float in[COUNT] = {1}, out[COUNT];
    for (int i = 0; i < ROUNDS; i++) {
        if (ddl_rank(w) == LATE) {
            while (__atomic_load_n(&s->called[i], __ATOMIC_ACQUIRE) < RANKS - 1) {
                usleep(1000);
            }
            usleep(20000);
        }
        __atomic_fetch_add(&s->called[i], 1, __ATOMIC_RELEASE);
        OK(ddl_all_reduce(w, ddl_tensor_1d(in, DDL_F32, COUNT), ddl_tensor_1d(out, DDL_F32, COUNT), DDL_SUM));
    }
}

static void check_text(ddl_group *w, const char *algorithm, const char *transport, bool blames) {
    ddl_context *c = ddl_group_context(w);
    char text[8000], part[100];
    size_t need = ddl_stats_text(c, NULL, 0);
    CHECK(need > 0 && need < sizeof text);
    need = ddl_stats_text(c, text, sizeof text);
    CHECK_EQ(need, strlen(text));
    snprintf(part, sizeof part, "algorithm %-21s 2", algorithm);
    CHECK_STR(text, part); /* twenty-something collectives */
    snprintf(part, sizeof part, "transport %-21s 3 peers", transport);
    CHECK_STR(text, part);
    snprintf(part, sizeof part, "rank %d of %d: ", ddl_rank(w), RANKS);
    CHECK_STR(text, part);
    if (blames) {
        CHECK_STR(text, "rank 2 was last ");
        CHECK_STR(text, "the slow rank is rank 2: this one waited ");
    }
}

static void one_is_late(ddl_group *w, void *arg) {
    shared *s = arg;
    bool native = s->native, hears = ddl_rank(w) != LATE && (native || ddl_rank(w) != 1);
    const char *algorithm = native ? "native" : "recursive_doubling";
    ddl_context *c = ddl_group_context(w);
    ddl_stats before, after;
    ddl_rank_stats r;
    OK(ddl_stats_get(c, &before));
    late_rounds(w, s);
    OK(ddl_stats_get(c, &after));
    ddl_algorithm_stats a = of(&before, algorithm), b = of(&after, algorithm);
    CHECK_EQ(b.operations - a.operations, ROUNDS);
    CHECK_EQ(b.bytes - a.bytes, ROUNDS * COUNT * sizeof(float));
    CHECK_EQ(after.ops_completed - before.ops_completed, ROUNDS);
    const ddl_transport_stats *t = &after.transports[0], *t0 = &before.transports[0];
    CHECK_EQ(t->native_operations - t0->native_operations, native ? ROUNDS : 0);
    CHECK_EQ(t->native_bytes - t0->native_bytes, native ? ROUNDS * COUNT * sizeof(float) : 0);
    /* By messages ranks 0 and 3 hear from 2 itself, 1 does not; shared memory tells all. */
    OK(ddl_rank_stats_get(c, LATE, &r));
    if (ddl_rank(w) == LATE) {
        CHECK(native || r.last >= ROUNDS / 2);
        CHECK_EQ(r.late_ns, 0);
    } else if (hears) {
        CHECK(r.last >= ROUNDS / 2);
        CHECK(r.late_ns >= (uint64_t)(ROUNDS / 2) * 10000000u);
        CHECK(r.late_max_ns >= r.late_ns / r.last && r.late_max_ns <= r.late_ns);
        CHECK_EQ(after.slow_rank, LATE);
        CHECK(b.time_ns - a.time_ns >= (uint64_t)(ROUNDS / 2) * 10000000u);
    }
    check_text(w, algorithm, native ? "shm" : "tcp", hears);
    FAILS(ddl_rank_stats_get(c, RANKS, &r), DDL_ERR_ARG, "rank 4; ranks go from 0 to 3");
    FAILS(ddl_rank_stats_get(c, -1, &r), DDL_ERR_ARG, "rank -1");
    FAILS(ddl_rank_stats_get(c, 0, NULL), DDL_ERR_ARG, "out_stats is NULL");
}

TEST(messages_are_counted_and_the_late_rank_is_known) {
    setenv("DDL_TRANSPORTS", "tcp", 1);
    setenv("DDL_ALGO", "all_reduce=recursive_doubling", 1);
    world_fork(RANKS, one_is_late, ranks_shared(sizeof(shared)), 60);
    unsetenv("DDL_ALGO");
}

TEST(native_collectives_are_counted_and_the_late_rank_is_known) {
    shared *s = ranks_shared(sizeof *s);
    s->native = true;
    setenv("DDL_TRANSPORTS", "shm", 1);
    world_fork(RANKS, one_is_late, s, 60);
}

/* ---- slow links ---- */

/* `count` messages of 1 MiB from a rank, each in so many microseconds. */
static void came(ddl_context *c, int32_t from, int count, uint64_t us) {
    for (int i = 0; i < count; i++) {
        ddl__pace_add(c, from, 1 << 20, us * 1000);
    }
}

static int32_t slow_link(ddl_context *c) {
    ddl_stats s;
    CHECK_EQ(ddl_stats_get(c, &s), DDL_OK);
    return s.slow_link;
}

/* Told as if they had come; the ranks are on one host. The median counts, and only links of one kind are compared. */
static void links_are_judged(ddl_group *w, void *arg) {
    ddl_context *c = ddl_group_context(w);
    (void)arg;
    if (ddl_rank(w) != 0) {
        return;
    }
    ddl_rank_stats r;
    char text[8000];
    CHECK_EQ(slow_link(c), -1);
    came(c, 1, 20, 1000);
    came(c, 2, 3, 50000);
    CHECK_EQ(slow_link(c), -1); /* too few */
    came(c, 2, 1, 50000);
    CHECK_EQ(slow_link(c), 2);
    came(c, 3, 20, 1100);
    CHECK_EQ(slow_link(c), 2);
    OK(ddl_rank_stats_get(c, 2, &r));
    CHECK_EQ(r.large_messages, 4);
    CHECK_EQ(r.bytes_per_s / 1000000, 20);
    ddl_stats_text(c, text, sizeof text);
    CHECK_STR(text, "the slow link is that from rank 2: 20.972 MB/s, the usual one of its kind ");
    came(c, 2, 7, 1000); /* seven of eleven are fast */
    CHECK_EQ(slow_link(c), -1);
    came(c, 3, 8, 3900); /* not four times as long */
    CHECK_EQ(slow_link(c), -1);
    came(c, 3, 16, 9000);
    CHECK_EQ(slow_link(c), 3);
    c->links[3].same_host = false; /* one of its kind, and nothing is known of such links */
    c->tuning.model.s_per_byte[1] = 0;
    CHECK_EQ(slow_link(c), -1);
    c->tuning.model.s_per_byte[1] = 1e-9; /* but when the job began they had 1 GB/s */
    CHECK_EQ(slow_link(c), 3);
    c->links[3].same_host = true;
    ddl_stats_text(c, text, sizeof text);
    CHECK_STR(text, "the slow link is that from rank 3");
}

TEST(a_slow_link_is_named) {
    setenv("DDL_TRANSPORTS", "tcp", 1);
    world_fork(RANKS, links_are_judged, NULL, 60);
}

/* A real message is timed: from its header to its last byte, and from whom it came. */
static void large_messages_are_timed(ddl_group *w, void *arg) {
    enum { LARGE = 1 << 20 };
    static uint8_t data[LARGE];
    ddl_context *c = ddl_group_context(w);
    ddl_rank_stats before, after;
    (void)arg;
    OK(ddl_rank_stats_get(c, 0, &before));
    for (int i = 0; i < 8; i++) {
        if (ddl_rank(w) == 0) {
            OK(ddl_send(w, DDL_ARRAY(data), 1, i));
        } else {
            OK(ddl_recv(w, DDL_ARRAY(data), 0, i, NULL));
        }
    }
    OK(ddl_rank_stats_get(c, 0, &after));
    if (ddl_rank(w) == 1) {
        CHECK_EQ(after.large_messages - before.large_messages, 8);
        CHECK(after.bytes_per_s > 1000 && after.bytes_per_s < 1000000000000);
    } else {
        CHECK_EQ(after.large_messages, 0);
    }
}

TEST(messages_are_timed) {
    setenv("DDL_TRANSPORTS", "tcp", 1);
    world_fork(2, large_messages_are_timed, NULL, 60);
}

/* ---- slow ---- */

static int told;
static char last_told[1200];
static ddl_log_level told_level;

static void listen_for_slow(void *user, ddl_log_level level, const char *line) {
    (void)user;
    if (strstr(line, "all_reduce(") != NULL && strstr(line, "times its estimate") != NULL) {
        snprintf(last_told, sizeof last_told, "%s", line);
        told_level = level;
        told++;
    }
}

/* DDL_SLOW and DDL_SLOW_RUNS, NULL: the standard; what is expected of it. */
typedef struct slow_way {
    const char *slow, *runs;
    int first_told; /* of the calls, from 0; 99: none */
    uint64_t counted;
    ddl_log_level level;
} slow_way;

/* One call of `count` numbers that should take so long. */
static void slow_call(ddl_group *w, float *data, size_t count, double estimate_s) {
    ddl_tensor t = ddl_tensor_1d(data, DDL_F32, (int64_t)count);
    for (ddl__cached *e = w->cache; e != NULL; e = e->next) {
        e->estimate_s = estimate_s;
    }
    OK(ddl_all_reduce(w, t, t, DDL_SUM));
}

/* 8 MiB take far longer than a picosecond, but not than 0.1 s; the third call is not asked to be fast. */
static void slowly(ddl_group *w, void *arg) {
    const slow_way *way = arg;
    ddl_context *c = ddl_group_context(w);
    c->cores = 2;
    size_t count = 2u << 20;
    float *data = calloc(2 * count, sizeof *data);
    for (int i = 0; i < 4; i++) { /* plans are made; with true estimates, and a busy machine may well be slow */
        slow_call(w, data, (size_t)(i % 2 + 1) * count, 1e6);
    }
    memset(w->slow_told, 0, sizeof w->slow_told);
    told = 0;
    ddl_stats before, s;
    OK(ddl_stats_get(c, &before));
    for (int i = 0; i < 7; i++) {
        slow_call(w, data, count, i == 2 ? 1e6 : 1e-12);
        CHECK_EQ(told, i >= way->first_told);
    }
    OK(ddl_stats_get(c, &s));
    CHECK_EQ(s.ops_slow - before.ops_slow, way->counted);
    for (int i = 0; i < 4; i++) { /* twice as large: another class */
        slow_call(w, data, 2 * count, 1e-12);
    }
    CHECK_EQ(told, way->first_told < 7 ? 2 : 0);
    if (way->first_told < 7) {
        CHECK_EQ(told_level, way->level);
        CHECK_STR(last_told, "all_reduce(4194304 x f32, sum) by ");
        CHECK_STR(last_told, "of group \"world\", took ");
        CHECK_STR(last_told, " ms after the last rank had arrived, ");
        CHECK_STR(last_told, "others of this kind and size are only counted");
    }
    free(data);
}

TEST(an_operation_slower_than_k_times_its_estimate_is_reported_once) {
    slow_way ways[] = {{NULL, NULL, 0, 6, DDL_LOG_INFO},
                       {"20", NULL, 0, 6, DDL_LOG_WARN},
                       {NULL, "3", 5, 6, DDL_LOG_INFO}, /* the third in a row */
                       {"0", NULL, 99, 0, DDL_LOG_INFO}};
    ddl_config config = {.log = listen_for_slow, .log_level = DDL_LOG_INFO};
    world_config = &config;
    setenv("DDL_TRANSPORTS", "tcp", 1);
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
        ways[i].slow != NULL ? setenv("DDL_SLOW", ways[i].slow, 1) : unsetenv("DDL_SLOW");
        ways[i].runs != NULL ? setenv("DDL_SLOW_RUNS", ways[i].runs, 1) : unsetenv("DDL_SLOW_RUNS");
        world_fork(2, slowly, &ways[i], 60);
    }
    unsetenv("DDL_SLOW");
    unsetenv("DDL_SLOW_RUNS");
    world_config = NULL;
}

/* Where ranks share cores 100 ms are needed: what is told as an operation of 99 ms is not slow, of 101 ms it is, and of
 * 1 s it is a warning. The ends of operations are made up, as no real one can be had to take just so long. */
static void crowded(ddl_group *w, void *arg) {
    static const uint64_t ms[] = {99, 101, 1001};
    ddl_context *c = ddl_group_context(w);
    float data[64] = {0};
    (void)arg;
    c->cores = 1;
    c->local_ranks = 2;
    slow_call(w, data, 64, 1e6);
    ddl__cached *e = w->cache;
    e->estimate_s = 1e-6;
    for (int i = 0; i < 3; i++) {
        ddl__flight r = *ddl__record_of(w, w->sequence);
        ddl__op op = {.group = w, .cached = e, .late = -1, .call = {.kind = DDL_ALL_REDUCE, .dtype = DDL_F32}};
        w->slow_told[DDL_ALL_REDUCE] = 0;
        r.start_ns = 1;
        ddl__account_op(c, &op, &r, 1 + ms[i] * 1000000);
        CHECK_EQ(told, i);
        CHECK(i == 0 || told_level == (i == 1 ? DDL_LOG_INFO : DDL_LOG_WARN));
    }
}

TEST(what_takes_long_where_ranks_share_cores_is_not_slow_soon) {
    ddl_config config = {.log = listen_for_slow, .log_level = DDL_LOG_INFO};
    world_config = &config;
    setenv("DDL_TRANSPORTS", "tcp", 1);
    world_fork(2, crowded, NULL, 60);
    world_config = NULL;
}

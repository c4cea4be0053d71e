/* What reaches a parameter server from a worker that ends in the middle of asking, from two threads of one worker at
 * once, and from a program of another mind.
 * tests/run: variants=asan timeout=60 */
#define DDL_IMPLEMENTATION
#include "ps.h"

#include <stdatomic.h>

static void run(ddl_group *w, ddl_sync mode, ps_fn fn) {
    float p[8] = {0};
    ddl_tensor t = DDL_ARRAY(p);
    ddl_ps_config config = {.sync = {.mode = mode}, .optimizer = {.learning_rate = 1}};
    ps_run(w, &config, &t, 1, fn, NULL);
}

/* Asks server 0 for a checkpoint, and never says where. */
static ddl_status ask_without_payload(ddl_ps *ps) {
    ddl_request *r;
    ddl__lock(ps->c);
    ddl_status status = ddl__ps_call_new(ps, "ask", NULL, 0, 1, &r);
    if (status == DDL_OK) {
        ddl__ps_call *call = r->kept;
        ddl__ps_part *part = &call->parts[call->part_count++];
        ddl__ps_ask ask = {.op = DDL__PS_SAVE, .tag = ps->next_tag += 2, .bytes = 5};
        call->answers = false;
        ddl__ps_ask_write(part->ask, &ask);
        status = ddl__ps_move(ps->group, true, part->ask, DDL__PS_ASK_BYTES, ddl__ps_server_rank(ps, 0),
                              DDL__PS_TAG_ASK, r, &part->messages[0]);
        status = ddl__ps_call_start(&r, status);
    }
    status = status == DDL_OK ? ddl__ps_call_wait(&r, NULL) : status;
    ddl__unlock(ps->c);
    return status;
}

/* Workers 0 and 1 change the mode; worker 2 is gone, and left half an ask behind. */
static void half_ask(ddl_group *w, ddl_ps *ps, void *arg) {
    (void)arg;
    if (ps_worker(ps) == 2) {
        OK(ask_without_payload(ps));
        OK(ddl_ps_leave(ps));
    } else {
        OK(ddl_ps_switch(ps, &(ddl_sync_config){.mode = DDL_SYNC_ASP}));
        CHECK_EQ(ps->sync.mode, DDL_SYNC_ASP);
    }
    OK(ddl_barrier(w)); /* the server stays until all are through */
}
static void half_ask_run(ddl_group *w, void *arg) {
    (void)arg;
    run(w, DDL_SYNC_SSP, half_ask);
}
TEST(half_an_ask_of_a_worker_that_is_gone_keeps_nobody) { world_threads(3, half_ask_run, NULL); }

/* A path without its end must not be read beyond. */
static void endless(ddl_group *w, ddl_ps *ps, void *arg) {
    (void)arg;
    ddl__ps_answer answer;
    ddl__lock(ps->c);
    ddl_status status = ddl__ps_joint(ps, DDL__PS_LOOK, "/nowh", 5, "look", &answer);
    ddl__unlock(ps->c);
    FAILS(status, DDL_ERR_MISMATCH, "a path that does not end");
    OK(ddl_ps_clock(ps));
}
static void endless_run(ddl_group *w, void *arg) {
    (void)arg;
    run(w, DDL_SYNC_BSP, endless);
}
TEST(a_path_that_does_not_end_is_refused) { world_threads(1, endless_run, NULL); }

/* While one thread makes a table, another asks for one of another width: it is refused, and changes nothing. */
static void *make_wide(void *arg) {
    ddl_ps *ps = arg;
    int32_t table = -1;
    ddl_status status = ddl_ps_table_create(ps, &(ddl_ps_table_config){.width = 4}, &table);
    CHECK(status == DDL_OK && table == 0);
    return NULL;
}

static void two_makers(ddl_group *w, ddl_ps *ps, void *arg) {
    (void)arg;
    int32_t table;
    uint64_t id = 7;
    float g[4] = {2, 4, 6, 8}, row[4] = {0};
    pthread_t thread;
    if (ps_worker(ps) == 0) {
        bool waits = false;
        REQUIRE(pthread_create(&thread, NULL, make_wide, ps) == 0);
        while (!waits) {
            usleep(1000);
            ddl__lock(ps->c);
            waits = ps->under_way > 0;
            ddl__unlock(ps->c);
        }
        FAILS(ddl_ps_table_create(ps, &(ddl_ps_table_config){.width = 3}, &table), DDL_ERR_STATE, "are under way");
        CHECK_EQ(table, -1);
    }
    OK(ddl_barrier(w));
    if (ps_worker(ps) == 0) {
        pthread_join(thread, NULL);
    } else {
        make_wide(ps);
    }
    OK(ddl_ps_push_rows(ps, 0, &id, 1, DDL_ARRAY(g), NULL));
    OK(ddl_ps_clock(ps));
    OK(ddl_ps_pull_rows(ps, 0, &id, 1, DDL_ARRAY(row)));
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(row[i], -g[i]);
    }
}
static void two_makers_run(ddl_group *w, void *arg) {
    (void)arg;
    run(w, DDL_SYNC_BSP, two_makers);
}
TEST(two_threads_do_not_make_one_table) { world_threads(2, two_makers_run, NULL); }

/* >>pushes of rows of more than one message */

enum { WIDE = 1024, FIRST = 2000, LAST = 10 }; /* rows: of the first message, 8 MB, and of the second, 40 kB */

static float wide_row(ddl_group *w, ddl_ps *ps, uint64_t id) {
    float row[WIDE];
    memset(row, 0x7f, sizeof row);
    OK(ddl_ps_pull_rows(ps, 0, &id, 1, DDL_ARRAY(row)));
    CHECK_EQ(row[0], row[WIDE - 1]);
    return row[0];
}

/* Nothing reaches the server on this rank between two calls of worker 1: keep_deaf(1), and keep_deaf(0) by that. */
static atomic_int deaf;

static void be_deaf(ddl_ps *ps) {
    while (atomic_load(&deaf) == 0) {
        usleep(500);
    }
    ddl__lock(ps->c);
    atomic_store(&deaf, 2);
    while (atomic_load(&deaf) == 2) {
        usleep(500);
    }
    ddl__unlock(ps->c);
}

static void keep_deaf(bool on) {
    atomic_store(&deaf, on);
    while (on && atomic_load(&deaf) == 1) {
        usleep(500);
    }
}

/* Worker 1's calls end before the server has the first message, which it then does not get, while the second has been
 * sent. Each is made again, and then both messages have been applied, once. */
static void give_up(ddl_group *w, ddl_ps *ps, void *arg) {
    enum { TIMES = 3 };
    (void)arg;
    int32_t table;
    OK(ddl_ps_table_create(ps, &(ddl_ps_table_config){.width = WIDE}, &table));
    for (int k = 0; ps_worker(ps) == 0 && k < TIMES; k++) {
        be_deaf(ps);
    }
    if (ps_worker(ps) == 1) {
        uint64_t ids[FIRST + LAST];
        float *g = calloc((size_t)(FIRST + LAST) * WIDE, sizeof *g);
        ddl_tensor grads = ddl_tensor_1d(g, DDL_F32, (int64_t)(FIRST + LAST) * WIDE);
        for (int i = 0; i < (FIRST + LAST) * WIDE; i++) {
            g[i] = 1;
            ids[i / WIDE] = (uint64_t)(i / WIDE);
        }
        int64_t timeout_ms = ps->group->timeout_ms;
        for (int k = 1; k <= TIMES; k++) {
            uint64_t sequence = 0;
            keep_deaf(true);
            ps->group->timeout_ms = 1;
            CHECK_EQ(ddl_ps_push_rows(ps, 0, ids, FIRST + LAST, grads, &sequence), DDL_ERR_TIMEOUT);
            ps->group->timeout_ms = timeout_ms;
            keep_deaf(false);
            CHECK_EQ(sequence, (uint64_t)k);
            OK(ddl_ps_push_rows(ps, 0, ids, FIRST + LAST, grads, &sequence));
            CHECK_EQ(wide_row(w, ps, 0), -k);
            CHECK_EQ(wide_row(w, ps, FIRST - 1), -k);
            CHECK_EQ(wide_row(w, ps, FIRST), -k);
            CHECK_EQ(wide_row(w, ps, FIRST + LAST - 1), -k);
        }
        free(g);
    }
    OK(ddl_barrier(w));
}
static void give_up_run(ddl_group *w, void *arg) {
    (void)arg;
    ddl_ps_config config = {.servers = 1, .piece_bytes = (int64_t)FIRST * WIDE * (int64_t)sizeof(float),
                            .op = DDL_SUM, .sync = {.mode = DDL_SYNC_ASP}, .optimizer = {.learning_rate = 1}};
    ps_run(w, &config, NULL, 0, give_up, NULL);
}
TEST(a_push_of_rows_that_was_given_up_is_applied_once_when_made_again) { world_threads(2, give_up_run, NULL); }

/* The first message of a push is refused. The second waits for it, and made again the push is refused again. */
static void refused_first(ddl_group *w, ddl_ps *ps, void *arg) {
    (void)arg;
    int32_t table;
    uint64_t ids[6] = {0, 1, 2, 3, 4, 5}, sequence = 0;
    float *g = calloc((size_t)6 * WIDE, sizeof *g);
    for (int i = 0; i < 6 * WIDE; i++) {
        g[i] = 1;
    }
    OK(ddl_ps_table_create(ps, &(ddl_ps_table_config){.width = WIDE, .rows = 4}, &table));
    OK(ddl_ps_push_rows(ps, table, ids + 3, 3, ddl_tensor_1d(g, DDL_F32, 3 * WIDE), NULL));
    for (int i = 0; i < 2; i++) {
        FAILS(ddl_ps_push_rows(ps, table, ids, 6, ddl_tensor_1d(g, DDL_F32, 6 * WIDE), &sequence), DDL_ERR_NOMEM,
              "no room for more");
        CHECK_EQ(sequence, (uint64_t)2);
        CHECK_EQ(wide_row(w, ps, 5), -1);
    }
    free(g);
}
static void refused_first_run(ddl_group *w, void *arg) {
    (void)arg;
    ddl_ps_config config = {.piece_bytes = 3 * WIDE * (int64_t)sizeof(float), .sync = {.mode = DDL_SYNC_ASP},
                            .optimizer = {.learning_rate = 1}};
    ps_run(w, &config, NULL, 0, refused_first, NULL);
}
TEST(after_a_message_that_is_refused_no_later_one_of_its_push_counts) { world_threads(1, refused_first_run, NULL); }

/* A push that is made again after a newer one: the server says that it does not take it, whether it had been applied
 * (of the parameter, and of the first message's rows) or not. */
static void too_late(ddl_group *w, ddl_ps *ps, void *arg) {
    (void)arg;
    int32_t table;
    uint64_t ids[4] = {0, 1, 2, 3}, first = 0, second = 0, lost = 0, rows = 0, newer = 0;
    float one[8] = {1, 1, 1, 1, 1, 1, 1, 1}, out[8];
    OK(ddl_ps_push(ps, 0, DDL_ARRAY(one), &first));
    ps->sequence++; /* as if a push had been given up */
    lost = ps->sequence;
    OK(ddl_ps_push(ps, 0, DDL_ARRAY(one), &second));
    FAILS(ddl_ps_push(ps, 0, DDL_ARRAY(one), &first), DDL_ERR_STATE, "push 1 of worker 0 comes after its push 3");
    FAILS(ddl_ps_push(ps, 0, DDL_ARRAY(one), &lost), DDL_ERR_STATE, "push 2 of worker 0 comes after its push 3");
    FAILS(ddl_ps_push_pull(ps, 0, DDL_ARRAY(one), DDL_ARRAY(out), &lost), DDL_ERR_STATE, "leaves it out");
    OK(ddl_ps_push(ps, 0, DDL_ARRAY(one), &second)); /* the last one is known */
    memset(out, 0x7f, sizeof out);
    OK(ddl_ps_pull(ps, 0, DDL_ARRAY(out)));
    CHECK(out[0] == -2 && out[7] == -2);
    OK(ddl_ps_table_create(ps, &(ddl_ps_table_config){.width = 2}, &table));
    OK(ddl_ps_push_rows(ps, table, ids, 4, DDL_ARRAY(one), &rows)); /* of two messages */
    OK(ddl_ps_push_rows(ps, table, ids, 4, DDL_ARRAY(one), &rows)); /* known, both */
    OK(ddl_ps_push_rows(ps, table, ids, 1, ddl_tensor_1d(one, DDL_F32, 2), &newer));
    FAILS(ddl_ps_push_rows(ps, table, ids, 4, DDL_ARRAY(one), &rows), DDL_ERR_STATE, "comes after its push");
    OK(ddl_ps_pull_rows(ps, table, ids, 4, DDL_ARRAY(out)));
    CHECK(out[0] == -2 && out[2] == -1 && out[7] == -1);
    (void)w;
}
static void too_late_run(ddl_group *w, void *arg) {
    (void)arg;
    float p[8] = {0};
    ddl_tensor t = DDL_ARRAY(p);
    ddl_ps_config config = {.piece_bytes = 64, .sync = {.mode = DDL_SYNC_ASP}, .optimizer = {.learning_rate = 1}};
    ps_run(w, &config, &t, 1, too_late, NULL);
}
TEST(a_push_that_is_made_again_after_a_newer_one_is_left_out_in_a_sentence) { world_threads(1, too_late_run, NULL); }

/* >>payloads that do not come, or are not wanted */

/* Small pushes and reads that are refused before the server takes what came with them: none of it stays there. */
static void unwanted(ddl_group *w, ddl_ps *ps, void *arg) {
    enum { COUNT = 900, TIMES = 60 };
    (void)arg;
    int32_t table;
    uint64_t ids[COUNT];
    ddl_stats stats = {0};
    float *rows = calloc((size_t)COUNT * 16, sizeof *rows);
    ddl_tensor t = ddl_tensor_1d(rows, DDL_F32, (int64_t)COUNT * 16);
    for (int i = 0; i < COUNT; i++) {
        ids[i] = (uint64_t)i;
    }
    OK(ddl_ps_table_create(ps, &(ddl_ps_table_config){.width = 16}, &table));
    for (int i = 0; i < TIMES && ps_worker(ps) == ddl_size(w) - 1; i++) {
        CHECK_EQ(ddl_ps_push_rows(ps, table, ids, COUNT, t, NULL), DDL_ERR_NOMEM);
        CHECK_EQ(ddl_ps_pull_rows(ps, table, ids, COUNT, t), DDL_ERR_NOMEM);
    }
    OK(ddl_barrier(w));
    OK(ddl_ps_push_rows(ps, table, ids, 1, ddl_tensor_1d(rows, DDL_F32, 16), NULL)); /* what came late goes now */
    OK(ddl_barrier(w));
    if (ddl_rank(w) == 0) { /* where the server is */
        OK(ddl_stats_get(ddl_group_context(w), &stats));
        CHECK_EQ(stats.unexpected_bytes, 0);
        CHECK(ps->group->unexpected_first == NULL);
    }
    OK(ddl_barrier(w));
    free(rows);
}
static void unwanted_run(ddl_group *w, void *arg) {
    (void)arg;
    ddl_ps_config config = {.memory_bytes = 50000, .sync = {.mode = DDL_SYNC_ASP}, .optimizer = {.learning_rate = 1}};
    ps_run(w, &config, NULL, 0, unwanted, NULL);
}
TEST(what_came_with_pushes_that_are_refused_does_not_stay) {
    world_threads(1, unwanted_run, NULL);
    world_threads(2, unwanted_run, NULL);
}

/* Worker 1 has no memory to offer a gradient that its ask has announced. */
typedef struct short_of {
    atomic_long fails;   /* that are left */
    atomic_size_t bytes; /* of the allocations that fail */
} short_of;

static void *take_or_not(void *user, size_t bytes) {
    short_of *m = user;
    return bytes == m->bytes && atomic_fetch_sub(&m->fails, 1) > 0 ? NULL : malloc(bytes);
}
static void give_back(void *user, void *memory) {
    (void)user;
    free(memory);
}

static void no_offer(ddl_group *w, ddl_ps *ps, void *arg) {
    enum { N = 1 << 18 };
    short_of *m = arg;
    float *g = calloc(N, sizeof *g), out;
    ddl_tensor grad = ddl_tensor_1d(g, DDL_F32, N);
    uint64_t sequence = 0;
    for (int i = 0; i < N; i++) {
        g[i] = 1;
    }
    OK(ddl_barrier(w));
    if (ps_worker(ps) == 1) {
        ddl__lock(ps->c);
        ddl__note *notes = ps->c->notes; /* they are kept: an offer goes in one */
        ps->c->notes = NULL;
        ddl__unlock(ps->c);
        m->bytes = DDL__SIZE_BYTES + sizeof(ddl__note) + DDL__NOTE_BYTES;
        atomic_store(&m->fails, 1000);
        FAILS(ddl_ps_push(ps, 0, grad, &sequence), DDL_ERR_NOMEM, "worker 1 has no memory to send the ");
        CHECK(atomic_exchange(&m->fails, 0) <= 1000 - DDL__PS_TRIES);
        ddl__lock(ps->c);
        while (notes != NULL) {
            ddl__note *next = notes->next;
            notes->next = ps->c->notes;
            ps->c->notes = notes;
            notes = next;
        }
        ddl__unlock(ps->c);
        OK(ddl_ps_push(ps, 0, grad, &sequence));
        OK(ddl_ps_push(ps, 0, grad, &sequence)); /* known */
        memset(g, 0x7f, N * sizeof *g);
        OK(ddl_ps_pull(ps, 0, grad));
        out = g[N - 1];
        CHECK(g[0] == -1 && out == -1);
    }
    OK(ddl_barrier(w));
    free(g);
}
static void no_offer_run(ddl_group *w, void *arg) {
    enum { N = 1 << 18 };
    float *p = calloc(N, sizeof *p);
    ddl_tensor t = ddl_tensor_1d(p, DDL_F32, N);
    ddl_ps_config config = {.sync = {.mode = DDL_SYNC_ASP}, .op = DDL_SUM, .optimizer = {.learning_rate = 1}};
    ps_run(w, &config, &t, 1, no_offer, arg);
    free(p);
}
TEST(a_server_does_not_wait_for_what_its_worker_has_no_memory_to_send) {
    short_of m = {0};
    world_config = &(ddl_config){.allocator = {take_or_not, give_back, &m}, .timeout_ms = (int64_t)(10000 * test_slow())};
    setenv("DDL_LOG", "none", 1);
    world_threads(2, no_offer_run, &m);
    unsetenv("DDL_LOG");
    world_config = NULL;
}

/* >>adaptive bounds */

/* A worker has ended an iteration that took so many seconds: as its server learns of it. */
static void ended(ddl__ps_server *s, int worker, int64_t clock, double takes_s) {
    ddl__ps_job job = {.source = worker, .ask = {.clock = clock, .value = (uint64_t)(takes_s * 1e9), .count = (int64_t)(takes_s * 1e9)}};
    ddl__ps_take_clock(s, &job);
}

/* Iterations take so many seconds that what the test itself takes is nothing beside them. Worker 0 may go on for as many
 * as end before the slowest's does, within the bounds; as the slowest becomes faster and slower again, so does that. */
TEST(an_adaptive_bound_follows_measured_times) {
    int64_t clock[2] = {0}, at = 0;
    uint64_t ends[2] = {0}, takes[2] = {0}, own[2] = {0};
    bool present[2] = {true, true};
    ddl__ps_server s = {.workers = 2, .sync = {.mode = DDL_SYNC_SSP, .staleness = 1, .staleness_max = 6}};
    s.clock = clock;
    s.ended_ns = ends;
    s.takes_ns = takes;
    s.own_ns = own;
    s.present = present;
    CHECK_EQ(ddl__ps_bound(&s, 0, 2), 1); /* nothing is measured */
    ended(&s, 0, 1, 10);
    CHECK_EQ(ddl__ps_bound(&s, 0, 2), 1); /* of the slowest nothing is */
    const struct {
        double slow_s;
        int least, most;
    } phases[] = {{40, 4, 4}, {10, 1, 2}, {25, 3, 3}, {600, 6, 6}, {10, 1, 2}};
    for (int p = 0; p < 5; p++) {
        for (int i = 0; i < 200; i++, at++) { /* what was before is forgotten, a quarter each time */
            ended(&s, 0, at + 3, 10);
            ended(&s, 1, at + 1, phases[p].slow_s);
        }
        int bound = ddl__ps_bound(&s, 0, clock[1] + 2);
        if (bound < phases[p].least || bound > phases[p].most) {
            test__fail(__FILE__, __LINE__, "the slowest takes %g s, the other 10 s: a bound of %d, not %d to %d",
                       phases[p].slow_s, bound, phases[p].least, phases[p].most);
        }
        CHECK_EQ(ddl__ps_bound(&s, 1, clock[1] + 2), 1); /* the slowest waits for nobody */
        CHECK_EQ(ddl__ps_bound(&s, 0, clock[1] + 1), 1); /* nothing keeps it back */
        if (p == 0) { /* farther ahead it may go on for as many more, and no farther than the upper bound */
            CHECK_EQ(ddl__ps_bound(&s, 0, clock[1] + 3), 5);
            CHECK_EQ(ddl__ps_bound(&s, 0, clock[1] + 6), 6);
            CHECK_EQ(ddl__ps_bound(&s, 0, clock[1] + 9), 6);
        }
    }
    ended(&s, 1, at + 1, 600); /* one slow iteration is no slow worker: 157.5 s, were it one for good 600 */
    CHECK(takes[1] > 157000000000u && takes[1] < 158000000000u);
    s.sync.staleness_max = 1; /* no range: the bound stays */
    CHECK_EQ(ddl__ps_bound(&s, 0, clock[1] + 2), 1);
}

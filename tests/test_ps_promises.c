/* What parameter servers promise at the edges: pushes that are refused, who leaves still counts in the clocks it was part
 * of, tables in SSP, going back to a checkpoint while running, checkpoints that fail twice, a wait for a worker that dies.
 * tests/run: variants=gcc,asan timeout=60 */
#include "ps.h"

#include <signal.h>
#include <sys/stat.h>

static char folder[] = "/tmp/ddl-test-ps-promises-XXXXXX";

static void run(ddl_group *w, const ddl_ps_config *config, ps_fn fn) {
    enum { N = 4096 };
    float *p = calloc(N, sizeof *p);
    ddl_tensor t = ddl_tensor_1d(p, DDL_F32, N);
    ddl_ps_config with = *config;
    with.optimizer.learning_rate = 1;
    ps_run(w, &with, &t, 1, fn, NULL);
    free(p);
}

/* The parameter, all elements of which are alike. */
static float value(ddl_group *w, ddl_ps *ps) {
    enum { N = 4096 };
    float *out = calloc(N, sizeof *out), v;
    OK(ddl_ps_pull(ps, 0, ddl_tensor_1d(out, DDL_F32, N)));
    v = out[0];
    for (int i = 0; i < N; i++) {
        CHECK_EQ(out[i], v);
    }
    free(out);
    return v;
}

/* ---- pushes ---- */

/* SSP: a parameter is pushed once in a clock, as its first push says that the worker has done all for that clock: others
 * would read without the second. The same push made again, and pushes of ASP, are not refused. */
static void once(ddl_group *w, ddl_ps *ps, void *arg) {
    (void)arg;
    enum { N = 4096 };
    uint64_t sequence = 0;
    float *g = calloc(2 * N, sizeof *g), *out = g + N;
    ddl_tensor grad = ddl_tensor_1d(g, DDL_F32, N), pulled = ddl_tensor_1d(out, DDL_F32, N);
    ddl_request *r = (ddl_request *)&r;
    for (int i = 0; i < N; i++) {
        g[i] = 2;
    }
    for (int clock = 0; clock < 3; clock++) {
        sequence = 0;
        OK(ddl_ps_push(ps, 0, grad, &sequence));
        FAILS(ddl_ps_push(ps, 0, grad, NULL), DDL_ERR_STATE, "was pushed at clock");
        FAILS(ddl_ps_ipush(ps, 0, grad, NULL, &r), DDL_ERR_STATE, "in BSP and SSP it is pushed once in a clock");
        CHECK(r == NULL);
        FAILS(ddl_ps_push_pull(ps, 0, grad, pulled, NULL), DDL_ERR_STATE, "add gradients up");
        OK(ddl_ps_push(ps, 0, grad, &sequence)); /* the same: known already */
        OK(ddl_ps_clock(ps));
    }
    OK(ddl_barrier(w));
    CHECK_EQ(value(w, ps), -6);
    OK(ddl_barrier(w));
    OK(ddl_ps_switch(ps, &(ddl_sync_config){.mode = DDL_SYNC_ASP}));
    OK(ddl_ps_push(ps, 0, grad, NULL));
    OK(ddl_ps_push(ps, 0, grad, NULL));
    OK(ddl_barrier(w));
    CHECK_EQ(value(w, ps), -10);
    free(g);
}
static void once_run(ddl_group *w, void *arg) {
    (void)arg;
    run(w, &(ddl_ps_config){.sync = {.mode = DDL_SYNC_SSP, .staleness = 2}}, once);
}
TEST(in_ssp_a_parameter_is_pushed_once_in_a_clock) { world_threads(2, once_run, NULL); }

/* Gradients that are not finite are refused where they are: parameters, rows, clocks and other workers see nothing. */
static void odd(ddl_group *w, ddl_ps *ps, void *arg) {
    const ddl_ps_config *config = arg;
    enum { N = 4096 };
    uint64_t sequence = 0, ids[3] = {11, 22, 33};
    int32_t table;
    float *g = calloc(2 * N, sizeof *g), *out = g + N, rows[6] = {1, 1, 1, 1, 1, 1}, got[6];
    ddl_tensor grad = ddl_tensor_1d(g, DDL_F32, N), pulled = ddl_tensor_1d(out, DDL_F32, N);
    ddl_request *r = (ddl_request *)&r;
    OK(ddl_ps_table_create(ps, &(ddl_ps_table_config){.width = 2}, &table));
    if (ps_worker(ps) == 1) {
        const float wrong[3] = {__builtin_nanf(""), __builtin_inff(), -__builtin_inff()};
        for (int i = 0; i < 3; i++) {
            g[2048 * i - (i == 2)] = wrong[i]; /* the first, one between, the last */
            FAILS(ddl_ps_push(ps, 0, grad, &sequence), DDL_ERR_ARG,
                  "ddl_ps_push: the gradient of parameter 0 is not finite on worker 1 (element ");
            FAILS(ddl_ps_ipush(ps, 0, grad, NULL, &r), DDL_ERR_ARG, "nothing was pushed");
            FAILS(ddl_ps_push_pull(ps, 0, grad, pulled, NULL), DDL_ERR_ARG, "ddl_ps_push_pull: the gradient of");
            CHECK(r == NULL && sequence == 0);
            g[2048 * i - (i == 2)] = 0;
            rows[3] = wrong[i];
            FAILS(ddl_ps_push_rows(ps, table, ids, 3, DDL_ARRAY(rows), &sequence), DDL_ERR_ARG,
                  "the gradient of row 22 of table 0 is not finite on worker 1 (element 1 is");
            CHECK_EQ((int)sequence, 0);
        }
        rows[3] = 1;
    }
    for (int i = 0; i < N; i++) {
        g[i] = 2;
    }
    OK(ddl_ps_push(ps, 0, grad, &sequence));
    OK(ddl_ps_push_rows(ps, table, ids, 3, DDL_ARRAY(rows), NULL));
    OK(ddl_ps_clock(ps));
    OK(ddl_barrier(w));
    CHECK_EQ(value(w, ps), -2);
    OK(ddl_ps_pull_rows(ps, table, ids, 3, DDL_ARRAY(got)));
    for (int i = 0; i < 6; i++) {
        CHECK_EQ(got[i], -1);
    }
    CHECK(config->sync.mode != DDL_SYNC_BSP || sequence == 1);
    free(g);
}
static void odd_run(ddl_group *w, void *arg) {
    const ddl_ps_config *config = arg;
    float p[4096] = {0};
    ddl_tensor t = DDL_ARRAY(p);
    ps_run(w, config, &t, 1, odd, arg);
}
TEST(gradients_that_are_not_finite_are_not_pushed) {
    ddl_ps_config config = {.servers = 2, .optimizer = {.learning_rate = 1}};
    world_threads(2, odd_run, &config);
    config.sync.mode = DDL_SYNC_ASP;
    world_threads(2, odd_run, &config);
}

/* unchecked: they go as they are. */
static void unchecked(ddl_group *w, ddl_ps *ps, void *arg) {
    enum { N = 4096 };
    float *g = calloc(2 * N, sizeof *g), *out = g + N;
    (void)arg;
    g[7] = __builtin_nanf("");
    OK(ddl_ps_push(ps, 0, ddl_tensor_1d(g, DDL_F32, N), NULL));
    OK(ddl_ps_pull(ps, 0, ddl_tensor_1d(out, DDL_F32, N)));
    CHECK(out[7] != out[7] && out[6] == 0 && out[8] == 0);
    free(g);
}
static void unchecked_run(ddl_group *w, void *arg) {
    (void)arg;
    run(w, &(ddl_ps_config){.unchecked = 1}, unchecked);
}
TEST(unchecked_pushes_go_as_they_are) { world_threads(1, unchecked_run, NULL); }

/* ---- tables ---- */

/* Worker 1 leaves after clock 0; worker 0 ends that clock later. Both gradients are halved all the same. */
static void leave_after(ddl_group *w, ddl_ps *ps, void *arg) {
    (void)arg;
    int32_t table;
    uint64_t id = 5;
    float g[1] = {4}, row[1];
    OK(ddl_ps_table_create(ps, &(ddl_ps_table_config){.width = 1}, &table));
    if (ps_worker(ps) == 0) {
        OK(ddl_barrier(w));
    }
    OK(ddl_ps_push_rows(ps, table, &id, 1, DDL_ARRAY(g), NULL));
    OK(ddl_ps_clock(ps));
    if (ps_worker(ps) == 1) {
        OK(ddl_ps_leave(ps));
        OK(ddl_barrier(w));
        return;
    }
    OK(ddl_ps_pull_rows(ps, table, &id, 1, DDL_ARRAY(row)));
    CHECK_EQ(row[0], -4);
    OK(ddl_ps_push_rows(ps, table, &id, 1, DDL_ARRAY(g), NULL)); /* from here on it is alone */
    OK(ddl_ps_clock(ps));
    OK(ddl_ps_pull_rows(ps, table, &id, 1, DDL_ARRAY(row)));
    CHECK_EQ(row[0], -8);
}
static void leave_after_run(ddl_group *w, void *arg) {
    (void)arg;
    run(w, &(ddl_ps_config){0}, leave_after);
}
TEST(a_worker_that_left_counts_in_the_clocks_it_was_part_of) { world_threads(2, leave_after_run, NULL); }

/* Worker 1 pushes twice in clock 0. A read at clock 2 with bound 1 sees both, though the second comes late. */
static void twice(ddl_group *w, ddl_ps *ps, void *arg) {
    (void)arg;
    int32_t table;
    uint64_t ids[2] = {5, 6};
    float g[1] = {2}, row[1];
    OK(ddl_ps_table_create(ps, &(ddl_ps_table_config){.width = 1}, &table));
    if (ps_worker(ps) == 1) {
        OK(ddl_ps_push_rows(ps, table, &ids[0], 1, DDL_ARRAY(g), NULL));
        OK(ddl_barrier(w));
        usleep(200000); /* time for a read that does not wait */
        OK(ddl_ps_push_rows(ps, table, &ids[1], 1, DDL_ARRAY(g), NULL));
        OK(ddl_ps_clock(ps));
        return;
    }
    OK(ddl_barrier(w));
    OK(ddl_ps_clock(ps));
    OK(ddl_ps_clock(ps));
    for (int i = 0; i < 2; i++) {
        OK(ddl_ps_pull_rows(ps, table, &ids[i], 1, DDL_ARRAY(row)));
        CHECK_EQ(row[0], -1);
    }
}
static void twice_run(ddl_group *w, void *arg) {
    (void)arg;
    run(w, &(ddl_ps_config){.sync = {.mode = DDL_SYNC_SSP, .staleness = 1}}, twice);
}
TEST(ssp_tables_show_all_pushes_of_a_clock) { world_threads(2, twice_run, NULL); }

/* ---- memory ---- */

enum { ROW = 16, MANY = 4000 };

static void push_many(ddl_group *w, ddl_ps *ps, int32_t table, int64_t count) {
    uint64_t *ids = calloc(MANY, sizeof *ids);
    float *g = calloc((size_t)MANY * ROW, sizeof *g);
    for (int i = 0; i < MANY; i++) {
        ids[i] = (uint64_t)i;
        for (int j = 0; j < ROW; j++) {
            g[i * ROW + j] = 2;
        }
    }
    ddl_tensor all = ddl_tensor_1d(g, DDL_F32, count * ROW);
    if (count < MANY) {
        OK(ddl_ps_push_rows(ps, table, ids, count, all, NULL));
    } else {
        bool one = ddl_size(w) == 1; /* else each server has a part of them */
        FAILS(ddl_ps_push_rows(ps, table, ids, count, all, NULL), DDL_ERR_NOMEM,
              one ? "a push of 288000 bytes does not fit" : "bytes does not fit");
        FAILS(ddl_ps_pull_rows(ps, table, ids, count, all), DDL_ERR_NOMEM,
              one ? "a request of 288000 bytes does not fit" : "bytes does not fit");
    }
    free(ids);
    free(g);
}

static float row_value(ddl_group *w, ddl_ps *ps, int32_t table, uint64_t id) {
    float row[ROW] = {99};
    OK(ddl_ps_pull_rows(ps, table, &id, 1, DDL_ARRAY(row)));
    CHECK_EQ(row[0], row[ROW - 1]);
    return row[0];
}

static void too_large(ddl_group *w, ddl_ps *ps, void *arg) {
    (void)arg;
    int32_t table;
    OK(ddl_ps_table_create(ps, &(ddl_ps_table_config){.width = ROW}, &table));
    push_many(w, ps, table, MANY);
    push_many(w, ps, table, 100); /* and then goes on */
    OK(ddl_ps_clock(ps));
    OK(ddl_barrier(w));
    CHECK_EQ(row_value(w, ps, table, 99), -2 * (float)ddl_size(w));
    CHECK_EQ(row_value(w, ps, table, 100), 0);
}
static void too_large_run(ddl_group *w, void *arg) {
    ddl_ps_config config = {.memory_bytes = 120000, .sync = {.mode = *(ddl_sync *)arg}, .op = DDL_SUM};
    config.optimizer.learning_rate = 1;
    ps_run(w, &config, NULL, 0, too_large, NULL);
}
TEST(rows_that_can_never_fit_are_refused) {
    ddl_sync modes[2] = {DDL_SYNC_BSP, DDL_SYNC_ASP};
    world_threads(1, too_large_run, &modes[0]);
    world_threads(1, too_large_run, &modes[1]);
    world_threads(2, too_large_run, &modes[0]); /* the other rank's server has not received what it refuses */
    world_threads(2, too_large_run, &modes[1]);
}

/* BSP: worker 1 pushes until its pushes fill what they may. There is room left for worker 0's, whose turn it is. */
static void starve(ddl_group *w, ddl_ps *ps, void *arg) {
    (void)arg;
    int32_t table;
    OK(ddl_ps_table_create(ps, &(ddl_ps_table_config){.width = ROW}, &table));
    if (ps_worker(ps) == 0) {
        usleep(300000); /* worker 1 waits by then */
        push_many(w, ps, table, 250);
    }
    for (int i = 0; ps_worker(ps) == 1 && i < 20; i++) {
        push_many(w, ps, table, 200);
    }
    OK(ddl_ps_clock(ps));
    CHECK_EQ(row_value(w, ps, table, 199), -42);
    CHECK_EQ(row_value(w, ps, table, 249), -2);
}
static void starve_run(ddl_group *w, void *arg) {
    (void)arg;
    ddl_ps_config config = {.memory_bytes = 120000, .op = DDL_SUM, .optimizer = {.learning_rate = 1}};
    ps_run(w, &config, NULL, 0, starve, NULL);
}
TEST(pushes_that_wait_leave_room_for_the_one_whose_turn_it_is) { world_threads(2, starve_run, NULL); }

/* The server with the parameter has no room for the first table, the other has. The second has number 0 on both. */
static void numbers(ddl_group *w, ddl_ps *ps, void *arg) {
    (void)arg;
    int32_t table;
    float row[3], g[3] = {1, 2, 3};
    FAILS(ddl_ps_table_create(ps, &(ddl_ps_table_config){.width = 1, .rows = 1024}, &table), DDL_ERR_NOMEM,
          "ask for fewer rows");
    OK(ddl_ps_table_create(ps, &(ddl_ps_table_config){.width = 3, .rows = 8}, &table));
    CHECK_EQ(table, 0);
    for (uint64_t id = 0; id < 4; id++) {
        OK(ddl_ps_push_rows(ps, table, &id, 1, DDL_ARRAY(g), NULL));
    }
    OK(ddl_ps_clock(ps));
    for (uint64_t id = 0; id < 4; id++) {
        memset(row, 0x7f, sizeof row);
        OK(ddl_ps_pull_rows(ps, table, &id, 1, DDL_ARRAY(row)));
        CHECK(row[0] == -1 && row[1] == -2 && row[2] == -3);
    }
}
static void numbers_run(ddl_group *w, void *arg) {
    (void)arg;
    float p[1000] = {0};
    ddl_tensor t = DDL_ARRAY(p);
    ddl_ps_config config = {.servers = 2, .memory_bytes = 64000, .optimizer = {.learning_rate = 1}};
    ps_run(w, &config, &t, 1, numbers, NULL);
}
TEST(tables_have_the_same_number_on_all_servers) { world_threads(2, numbers_run, NULL); }

/* ---- reads in BSP ---- */

/* Worker 0 has pushed and reads: it waits for worker 1's push. Worker 1 reads before its own: no push is seen. */
static void reads(ddl_group *w, ddl_ps *ps, void *arg) {
    (void)arg;
    float g[4] = {2, 2, 2, 2}, out[4];
    for (int clock = 0; clock < 3; clock++) {
        if (ps_worker(ps) == 1) {
            usleep(50000); /* time for worker 0 to see too little, and for its push to be seen */
            OK(ddl_ps_pull(ps, 0, DDL_ARRAY(out)));
            CHECK_EQ(out[0], -2 * clock);
        }
        OK(ddl_ps_push(ps, 0, DDL_ARRAY(g), NULL));
        memset(out, 0x7f, sizeof out);
        OK(ddl_ps_pull(ps, 0, DDL_ARRAY(out)));
        CHECK_EQ(out[0], -2 * (clock + 1));
        OK(ddl_ps_clock(ps));
    }
}
static void reads_run(ddl_group *w, void *arg) {
    (void)arg;
    float p[4] = {0};
    ddl_tensor t = DDL_ARRAY(p);
    ps_run(w, &(ddl_ps_config){.optimizer = {.learning_rate = 1}}, &t, 1, reads, NULL);
}
TEST(bsp_reads_after_a_push_wait_for_the_whole_clock) { world_threads(2, reads_run, NULL); }

/* ---- two threads end one iteration ---- */

static void *clock_thread(void *arg) { return (void *)(intptr_t)ddl_ps_clock(arg); }

static void clocks(ddl_group *w, ddl_ps *ps, void *arg) {
    (void)arg;
    ddl_ps_info info;
    OK(ddl_ps_clock(ps));
    if (ps_worker(ps) == 0) {
        pthread_t thread;
        void *first;
        OK(ddl_ps_clock(ps)); /* one ahead: the next waits for worker 1 */
        CHECK_EQ(pthread_create(&thread, NULL, clock_thread, ps), 0);
        usleep(200000); /* it waits by then */
        FAILS(ddl_ps_clock(ps), DDL_ERR_STATE, "another thread of worker 0");
        OK(ddl_barrier(w));
        pthread_join(thread, &first);
        CHECK_EQ((int)(intptr_t)first, DDL_OK);
        OK(ddl_ps_info_get(ps, &info));
        CHECK_EQ(info.clock, 3);
        return;
    }
    OK(ddl_barrier(w));
    OK(ddl_ps_clock(ps));
}
static void clocks_run(ddl_group *w, void *arg) {
    (void)arg;
    run(w, &(ddl_ps_config){0}, clocks);
}
TEST(two_threads_do_not_end_one_iteration_twice) { world_threads(2, clocks_run, NULL); }

/* ---- checkpoints ---- */

static void step(ddl_group *w, ddl_ps *ps) {
    enum { N = 4096 };
    float *g = calloc(N, sizeof *g);
    for (int i = 0; i < N; i++) {
        g[i] = 1;
    }
    OK(ddl_ps_push(ps, 0, ddl_tensor_1d(g, DDL_F32, N), NULL));
    OK(ddl_ps_clock(ps));
    free(g);
}

/* Makes server 1's file of this generation, which is number `clock` of the folder, impossible. */
static void obstruct(ddl_group *w, int clock) {
    char path[200];
    snprintf(path, sizeof path, "%s/ddl-ps.%d.%d.%d.1-of-2.tmp", folder, clock, clock, 2 * clock);
    if (ddl_rank(w) == 0) {
        CHECK_EQ(mkdir(path, 0700), 0);
        strcat(path, "/x");
        CHECK_EQ(mkdir(path, 0700), 0);
    }
    OK(ddl_barrier(w));
}

static void back(ddl_group *w, ddl_ps *ps, void *arg) {
    (void)arg;
    step(w, ps);
    OK(ddl_ps_save(ps, folder));
    for (int clock = 2; clock <= 4; clock++) { /* each time server 0 can write and server 1 cannot */
        step(w, ps);
        obstruct(w, clock);
        FAILS(ddl_ps_save(ps, folder), DDL_ERR_SYSTEM, "server 1");
    }
    CHECK_EQ(value(w, ps), -4);
    OK(ddl_ps_load(ps, folder)); /* the first still stands */
    CHECK_EQ(value(w, ps), -1);
    for (int clock = 2; clock <= 6; clock++) { /* and pushes after it are new ones */
        step(w, ps);
        CHECK_EQ(value(w, ps), -clock);
    }
    OK(ddl_ps_save(ps, folder));
    OK(ddl_ps_load(ps, folder));
    CHECK_EQ(value(w, ps), -6);
}
static void back_run(ddl_group *w, void *arg) {
    (void)arg;
    run(w, &(ddl_ps_config){.servers = 2}, back);
}
TEST(a_checkpoint_outlives_later_ones_that_fail_and_can_be_gone_back_to) {
    char command[100];
    CHECK(mkdtemp(folder) != NULL);
    world_threads(2, back_run, NULL);
    snprintf(command, sizeof command, "rm -r %s", folder);
    CHECK_EQ(system(command), 0);
}

/* A run that was not loaded writes into the folder of an older one, whose clock is greater. */
static void some_steps(ddl_group *w, ddl_ps *ps, void *arg) {
    for (int i = 0; i < *(int *)arg; i++) {
        step(w, ps);
    }
    OK(ddl_ps_save(ps, folder));
}
static void take_newest(ddl_group *w, ddl_ps *ps, void *arg) {
    (void)arg;
    OK(ddl_ps_load(ps, folder));
    CHECK_EQ(value(w, ps), -2);
}
static void orders_run(ddl_group *w, void *arg) {
    (void)arg;
    static int five = 5, two = 2;
    ps_fn runs[] = {some_steps, some_steps, take_newest};
    int *steps[] = {&five, &two, NULL};
    for (int i = 0; i < 3; i++) {
        float p[4096] = {0};
        ddl_tensor t = DDL_ARRAY(p);
        ddl_ps_config config = {.servers = 2, .optimizer = {.learning_rate = 1}};
        ps_run(w, &config, &t, 1, runs[i], steps[i]);
    }
}
TEST(the_checkpoint_that_was_written_last_is_the_newest_whatever_its_clock) {
    char command[100];
    strcpy(folder + strlen(folder) - 6, "XXXXXX");
    REQUIRE(mkdtemp(folder) != NULL);
    world_threads(2, orders_run, NULL);
    snprintf(command, sizeof command, "rm -r %s", folder);
    CHECK_EQ(system(command), 0);
}

/* ---- no memory ---- */

/* A table without a bound takes what memory_bytes leaves, except what a push of the parameter needs. */
static void fill(ddl_group *w, ddl_ps *ps, void *arg) {
    int32_t table;
    float row[16] = {1}, grad[4096] = {0};
    ddl_status status = DDL_OK;
    (void)arg;
    OK(ddl_ps_table_create(ps, &(ddl_ps_table_config){.width = 16}, &table));
    for (uint64_t id = 0; id < 100000 && status == DDL_OK; id++) {
        status = ddl_ps_push_rows(ps, table, &id, 1, DDL_ARRAY(row), NULL);
    }
    CHECK_EQ(status, DDL_ERR_NOMEM);
    OK(ddl_ps_push(ps, 0, DDL_ARRAY(grad), NULL));
    OK(ddl_ps_clock(ps));
}
static void fill_run(ddl_group *w, void *arg) {
    (void)arg;
    for (int64_t bytes = 140000; bytes < 184000; bytes += 2000) { /* wherever a slab of rows ends */
        run(w, &(ddl_ps_config){.memory_bytes = bytes}, fill);
    }
}
TEST(a_table_that_takes_all_memory_leaves_room_for_pushes) { world_threads(1, fill_run, NULL); }

/* The n-th allocation fails, and some after it, of the worker or of the server: a call may fail, and made again it
 * succeeds, once. */
typedef struct thin {
    long calls, fail_at; /* 0: none fails */
    long nth, count;
    int failed;
} thin;

static void *thin_take(void *user, size_t bytes) {
    thin *m = user;
    long n = __atomic_add_fetch(&m->calls, 1, __ATOMIC_SEQ_CST);
    long from = __atomic_load_n(&m->fail_at, __ATOMIC_SEQ_CST);
    return from > 0 && n >= from && n < from + m->count ? NULL : malloc(bytes);
}
static void thin_give(void *user, void *memory) {
    (void)user;
    free(memory);
}

static void in_thin_memory(ddl_group *w, ddl_ps *ps, void *arg) {
    thin *m = arg;
    float grad[4096], out[4096];
    for (int i = 0; i < 4096; i++) {
        grad[i] = 1;
    }
    for (int push = 1; push <= 3; push++) {
        uint64_t sequence = 0;
        int tries = 0;
        while (ddl_ps_push(ps, 0, DDL_ARRAY(grad), &sequence) != DDL_OK && ++tries < 5) {
        }
        CHECK(tries < 5);
        memset(out, 0x7f, sizeof out);
        for (tries = 0; ddl_ps_pull(ps, 0, DDL_ARRAY(out)) != DDL_OK && tries < 5; tries++) {
        }
        CHECK(tries < 5);
        CHECK(out[0] == (float)-push && out[4095] == (float)-push);
    }
    m->failed = __atomic_load_n(&m->calls, __ATOMIC_SEQ_CST) >= m->fail_at;
    __atomic_store_n(&m->fail_at, 0, __ATOMIC_SEQ_CST); /* the end is another test's */
    (void)w;
}
static void thin_run(ddl_group *w, void *arg) {
    thin *m = arg;
    float p[4096] = {0};
    ddl_tensor t = DDL_ARRAY(p);
    ddl_ps_config config = {.sync = {.mode = DDL_SYNC_ASP}, .optimizer = {.learning_rate = 1}};
    ddl_ps *ps = NULL;
    __atomic_store_n(&m->fail_at, __atomic_load_n(&m->calls, __ATOMIC_SEQ_CST) + m->nth, __ATOMIC_SEQ_CST);
    ddl_status status = ddl_ps_create(w, &config, &t, 1, &ps);
    m->failed = status < 0;
    if (status == DDL_OK) {
        in_thin_memory(w, ps, m);
        OK(ddl_ps_free(&ps));
    } else {
        CHECK_EQ(status, DDL_ERR_NOMEM);
        m->fail_at = 0;
    }
}
TEST(the_nth_allocation_that_fails_costs_a_call_and_no_more) {
    for (long count = 1; count <= 4; count += 3) {
        long n = 0;
        int failed = 1;
        while (failed && n < 100) {
            thin m = {.nth = ++n, .count = count};
            ddl_config config = {.allocator = {thin_take, thin_give, &m}};
            world_config = &config;
            world_threads(1, thin_run, &m);
            failed = m.failed;
        }
        CHECK(n > 4);
    }
    world_config = NULL;
}

/* One of two ranks has no memory while servers are made: both learn it, at once, and which it is; or both have them. */
typedef struct lean {
    world in;
    thin memory[2];
    ddl_status status[2];
    char why[2][400];
    int victim;
} lean;

static void lean_thread(int rank, int n, void *arg) {
    lean *l = arg;
    thin *m = &l->memory[rank];
    world_member member = {&l->in, rank, n};
    ddl_config config = {.world_size = n,
                         .rank = rank,
                         .exchange = world_exchange,
                         .exchange_user = &member,
                         .timeout_ms = (int64_t)(20000 * test_slow()),
                         .allocator = {thin_take, thin_give, m}};
    float p[1500] = {0};
    ddl_tensor t = DDL_ARRAY(p);
    ddl_context *c = NULL;
    ddl_ps *ps = NULL;
    REQUIRE(ddl_init(&config, &c) == DDL_OK);
    ddl_group *w = ddl_world(c);
    OK(ddl_barrier(w));
    if (rank == l->victim) {
        __atomic_store_n(&m->fail_at, __atomic_load_n(&m->calls, __ATOMIC_SEQ_CST) + m->nth, __ATOMIC_SEQ_CST);
    }
    l->status[rank] = ddl_ps_create(w, &(ddl_ps_config){0}, &t, 1, &ps);
    snprintf(l->why[rank], sizeof l->why[rank], "%s", l->status[rank] < 0 ? ddl_error(c) : "");
    m->failed = __atomic_load_n(&m->calls, __ATOMIC_SEQ_CST) >= m->fail_at;
    __atomic_store_n(&m->fail_at, 0, __ATOMIC_SEQ_CST);
    pthread_barrier_wait(&l->in.barrier); /* the shortage is over before the next call's messages come */
    OK(ddl_ps_free(&ps));
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

static int lean_run(int victim, long nth, long count) {
    lean *l = calloc(1, sizeof *l);
    char name[20];
    snprintf(name, sizeof name, "rank %d", victim);
    l->victim = victim;
    l->memory[victim].nth = nth;
    l->memory[victim].count = count;
    pthread_barrier_init(&l->in.barrier, NULL, 2);
    ranks_threads(2, lean_thread, l);
    pthread_barrier_destroy(&l->in.barrier);
    CHECK(l->status[0] == l->status[1] && (l->status[0] == DDL_OK || l->status[0] == DDL_ERR_NOMEM));
    if (l->status[1 - victim] < 0) {
        CHECK_STR(l->why[1 - victim], name);
    }
    int failed = l->memory[victim].failed;
    free(l);
    return failed;
}
TEST(a_rank_without_memory_for_servers_is_named_to_all) {
    setenv("DDL_LOG", "none", 1);
    for (int victim = 0; victim < 2; victim++) {
        long n = 1;
        while (lean_run(victim, n, victim == 0 ? 1 : 4)) {
            n++;
        }
        CHECK(n > 20);
    }
    unsetenv("DDL_LOG");
}

/* ---- deaths ---- */

/* Worker 2's gradient has come and waits for worker 1's turn; worker 1 dies. Of 0: worker 2 was told. */
static void die(ddl_group *w, void *arg) {
    int *told = arg, me = ddl_rank(w);
    float p[8] = {0}, g[8] = {0}, out[8];
    ddl_tensor t = DDL_ARRAY(p);
    ddl_ps *ps = NULL;
    OK(ddl_ps_create(w, &(ddl_ps_config){0}, &t, 1, &ps));
    if (me == 1) {
        usleep(200000); /* worker 2 waits by then; if not, it is told at once */
        raise(SIGKILL);
    }
    if (me == 2) {
        FAILS(ddl_ps_push_pull(ps, 0, DDL_ARRAY(g), DDL_ARRAY(out), NULL), DDL_ERR_PEER, "worker 1 died");
        told[0] = 1;
    }
    while (!told[0]) { /* the server is there until then */
        usleep(10000);
    }
    ddl_ps_free(&ps);
}
/* The same where the pushes that wait lie beside their server: worker 0 has its turn before them. */
static void die_first(ddl_group *w, void *arg) {
    enum { N = 4096 };
    int *told = arg, me = ddl_rank(w);
    float *p = calloc(3 * N, sizeof *p);
    ddl_tensor t = ddl_tensor_1d(p, DDL_F32, N), grad = ddl_tensor_1d(p + N, DDL_F32, N);
    ddl_ps *ps = NULL;
    OK(ddl_ps_create(w, &(ddl_ps_config){.servers = 2}, &t, 1, &ps));
    if (me == 0) {
        usleep(200000);
        raise(SIGKILL);
    }
    if (me == 1) {
        FAILS(ddl_ps_push_pull(ps, 0, grad, ddl_tensor_1d(p + 2 * N, DDL_F32, N), NULL), DDL_ERR_PEER, "rank 0");
        told[0] = 1;
    }
    while (!told[0]) {
        usleep(10000);
    }
    ddl_ps_free(&ps);
    free(p);
}

static void run_deadly(world_fn fn) {
    world in;
    ranks r;
    memset(&in, 0, sizeof in);
    in.fn = fn;
    in.arg = ranks_shared(sizeof(int));
    setenv("DDL_LOG", "none", 1);
    ranks_start(&r, 3, world_process, &in);
    CHECK_EQ(ranks_wait(&r, 50), 1); /* the one that was killed */
    CHECK_EQ(*(int *)in.arg, 1);
    unsetenv("DDL_LOG");
}
TEST(a_push_pull_that_waits_for_a_dead_worker_is_told) { run_deadly(die); }
TEST(a_push_that_lies_beside_its_server_does_not_wait_for_a_dead_worker) { run_deadly(die_first); }

/* ---- a server beside its worker ---- */

/* Worker 1 pushes first. What it pushes to its own server stays where it lies until worker 0 has had its turn: neither
 * messages nor the server hold a copy. Made again, the push counts once. */
static void near(ddl_group *w, ddl_ps *ps, void *arg) {
    enum { N = 1 << 18 };
    (void)arg;
    int me = ddl_rank(w);
    float *g = calloc(2 * N, sizeof *g), *out = g + N;
    ddl_tensor grad = ddl_tensor_1d(g, DDL_F32, N), pulled = ddl_tensor_1d(out, DDL_F32, N);
    for (int clock = 0; clock < 3; clock++) {
        uint64_t sequence = 0;
        ddl_ps_info info;
        ddl_stats stats = {0};
        ddl_request *r = NULL;
        for (int i = 0; i < N; i++) {
            g[i] = (float)((me + 2) * (i % 5 + 1));
            out[i] = 77;
        }
        OK(ddl_barrier(w));
        if (me == 1) {
            OK(ddl_ps_ipush_pull(ps, 0, grad, pulled, &sequence, &r));
            usleep(20000); /* a server that takes it would have by now */
            OK(ddl_ps_info_get(ps, &info));
            OK(ddl_stats_get(ddl_group_context(w), &stats));
            /* a server has half of the values, and as much for their sums */
            CHECK(info.memory_bytes + stats.unexpected_bytes < N * sizeof(float) * 9 / 8);
            CHECK_EQ(out[N - 1], 77);
        }
        OK(ddl_barrier(w));
        if (me == 0) {
            OK(ddl_ps_push_pull(ps, 0, grad, pulled, &sequence));
        } else {
            OK(ddl_wait(&r, NULL));
        }
        int wrong = 0;
        for (int i = 0; i < N; i++) {
            wrong += out[i] != (float)(-(clock + 1) * 5 * (i % 5 + 1)); /* the sum of 2 and 3 times that, once a clock */
        }
        CHECK_EQ(wrong, 0);
        memset(out, 0x7f, N * sizeof *out);
        OK(ddl_ps_push_pull(ps, 0, grad, pulled, &sequence)); /* known already */
        CHECK_EQ(out[N - 1], (float)(-(clock + 1) * 5 * ((N - 1) % 5 + 1)));
        OK(ddl_ps_clock(ps));
    }
    free(g);
}
static void near_run(ddl_group *w, void *arg) {
    enum { N = 1 << 18 };
    (void)arg;
    float *p = calloc(N, sizeof *p);
    ddl_tensor t = ddl_tensor_1d(p, DDL_F32, N);
    ps_run(w, &(ddl_ps_config){.servers = 2, .op = DDL_SUM, .optimizer = {.kind = DDL_SGD, .learning_rate = 1}}, &t, 1,
           near, NULL);
    free(p);
}
TEST(a_push_to_the_server_beside_its_worker_takes_no_memory) { world_threads(2, near_run, NULL); }

/* Sparse tables and checkpoints of parameter servers: rows against a plain dictionary, duplicate ids, first values that
 * depend on nothing but seed and id, bounds and eviction; save and load, also onto another number of servers, and when
 * the newest checkpoint is damaged.
 * tests/run: variants=gcc,asan,tsan */
#include "faults.h"
#include "ps.h"

enum { IDS = 900, WIDTH = 5, STEPS = 6, BATCH = 400, SEED = 7 };

/* The oracle: all rows that there can be, as one array. */
typedef struct dictionary {
    float first[IDS][WIDTH], value[IDS][WIDTH], state[IDS][WIDTH];
} dictionary;

static uint64_t id_of(int i) { return 0x123456789abcdefull * (uint64_t)(i + 1); } /* far apart */

/* Which rows a worker touches at a step; some come more than once. */
static int pick(int worker, int step, int k) { return (k * k * 31 + worker * 17 + step * 101 + k % 3) % IDS; }

/* One BSP step: gradients of all workers added up in the order of workers and positions, divided, momentum SGD on the
 * rows that were touched. */
static void dictionary_step(dictionary *d, int workers, int step) {
    static __thread float sum[IDS][WIDTH];
    static __thread int touched[IDS];
    memset(touched, 0, sizeof touched);
    for (int w = 0; w < workers; w++) {
        static __thread float own[IDS][WIDTH];
        static __thread int mine[IDS];
        memset(mine, 0, sizeof mine);
        for (int k = 0; k < BATCH; k++) { /* a worker's duplicates first */
            int row = pick(w, step, k);
            for (int j = 0; j < WIDTH; j++) {
                volatile float g = ps_grad(w, step, k * WIDTH + j);
                own[row][j] = mine[row] ? own[row][j] + g : g;
            }
            mine[row] = 1;
        }
        for (int row = 0; row < IDS; row++) {
            for (int j = 0; mine[row] && j < WIDTH; j++) {
                volatile float s = (touched[row] ? sum[row][j] : 0) + own[row][j];
                sum[row][j] = s;
            }
            touched[row] |= mine[row];
        }
    }
    for (int row = 0; row < IDS; row++) {
        for (int j = 0; touched[row] && j < WIDTH; j++) {
            volatile float mean = sum[row][j] / (float)workers, kept = 0.5f * d->state[row][j];
            volatile float moved = kept + mean, by = 0.25f * moved;
            d->state[row][j] = moved;
            d->value[row][j] = d->value[row][j] - by;
        }
    }
}

/* Pulls all rows, some of them twice, in an order of this worker's own, and compares. */
static void compare(ddl_group *w, ddl_ps *ps, int table, const float (*expected)[WIDTH]) {
    uint64_t ids[IDS + 50];
    int rows[IDS + 50], wrong = 0;
    float (*out)[WIDTH] = (float (*)[WIDTH])malloc(sizeof ids / 8 * sizeof *out);
    memset(out, 0x7f, sizeof ids / 8 * sizeof *out);
    for (int k = 0; k < IDS + 50; k++) {
        rows[k] = (k * 7 + ps_worker(ps) * 13) % IDS;
        ids[k] = id_of(rows[k]);
    }
    OK(ddl_ps_pull_rows(ps, table, ids, IDS + 50, ddl_tensor_1d(out, DDL_F32, (IDS + 50) * WIDTH)));
    for (int k = 0; k < IDS + 50; k++) {
        wrong += memcmp(out[k], expected[rows[k]], sizeof out[k]) != 0;
    }
    CHECK_EQ(wrong, 0);
    free(out);
}

static void train(ddl_group *w, ddl_ps *ps, int table, int from, int to) {
    float (*grads)[WIDTH] = (float (*)[WIDTH])malloc(BATCH * sizeof *grads);
    uint64_t ids[BATCH];
    int me = ps_worker(ps);
    for (int step = from; step < to; step++) {
        uint64_t sequence = 0;
        for (int k = 0; k < BATCH; k++) {
            ids[k] = id_of(pick(me, step, k));
        }
        ps_fill(&grads[0][0], BATCH * WIDTH, me, step);
        OK(ddl_ps_push_rows(ps, table, ids, BATCH, ddl_tensor_1d(grads, DDL_F32, BATCH * WIDTH), &sequence));
        if (step % 2 == 0) { /* again, as after a timeout: it must not count twice */
            OK(ddl_ps_push_rows(ps, table, ids, BATCH, ddl_tensor_1d(grads, DDL_F32, BATCH * WIDTH), &sequence));
        }
        OK(ddl_ps_clock(ps));
    }
    free(grads);
}

static void rows_work(ddl_group *w, ddl_ps *ps, void *arg) {
    dictionary *d = (dictionary *)calloc(1, sizeof *d);
    int32_t table = -1, zeros = -1;
    (void)arg;
    OK(ddl_ps_table_create(ps, &(ddl_ps_table_config){.width = 1}, &zeros));
    OK(ddl_ps_table_create(ps, &(ddl_ps_table_config){.width = WIDTH, .uniform = 0.5f, .seed = SEED}, &table));
    CHECK_EQ(zeros, 0);
    CHECK_EQ(table, 1);
    /* First values: in [-0.5, 0.5), not all alike, the same for all workers and in every order. */
    for (int i = IDS - 1; i >= 0; i--) {
        uint64_t id = id_of(ps_worker(ps) == 0 ? i : IDS - 1 - i);
        float *row = d->first[ps_worker(ps) == 0 ? i : IDS - 1 - i];
        OK(ddl_ps_pull_rows(ps, table, &id, 1, ddl_tensor_1d(row, DDL_F32, WIDTH)));
    }
    double sum = 0, squares = 0;
    for (int i = 0; i < IDS; i++) {
        for (int j = 0; j < WIDTH; j++) {
            CHECK(d->first[i][j] >= -0.5f && d->first[i][j] < 0.5f);
            sum += (double)d->first[i][j];
            squares += (double)d->first[i][j] * (double)d->first[i][j];
        }
    }
    CHECK(sum / (IDS * WIDTH) > -0.02 && sum / (IDS * WIDTH) < 0.02); /* 4.6 standard deviations of the mean */
    CHECK(squares / (IDS * WIDTH) > 0.075 && squares / (IDS * WIDTH) < 0.092); /* 1/12 */
    compare(w, ps, table, (const float (*)[WIDTH])d->first);
    memcpy(d->value, d->first, sizeof d->value);
    train(w, ps, table, 0, STEPS);
    for (int step = 0; step < STEPS; step++) {
        dictionary_step(d, ps_workers(ps), step);
    }
    compare(w, ps, table, (const float (*)[WIDTH])d->value);
    float zero = 5;
    uint64_t id = 3;
    OK(ddl_ps_pull_rows(ps, zeros, &id, 1, ddl_tensor_1d(&zero, DDL_F32, 1)));
    CHECK_EQ(zero, 0.0f);
    OK(ddl_ps_pull_rows(ps, zeros, NULL, 0, ddl_tensor_1d(NULL, DDL_F32, 0)));
    free(d);
}

static const ddl_optimizer momentum = {.kind = DDL_MOMENTUM, .learning_rate = 0.25, .momentum = 0.5};

static void rows(ddl_group *w, void *arg) {
    ddl_ps_config config = *(const ddl_ps_config *)arg;
    config.optimizer = momentum;
    ps_run(w, &config, NULL, 0, rows_work, NULL);
}

TEST(rows_equal_a_plain_dictionary_over_any_number_of_servers) {
    const ddl_ps_config configs[] = {
        {.servers = 1}, {.servers = 3, .piece_bytes = 1000}, {.servers = 2, .dedicated = 1, .piece_bytes = 64}};
    for (size_t i = 0; i < sizeof configs / sizeof configs[0]; i++) {
        world_threads(3, rows, (void *)(uintptr_t)&configs[i]);
    }
}

/* >>bounds */

static void bound_work(ddl_group *w, ddl_ps *ps, void *arg) {
    int32_t full, evicting, fixed, none = 5;
    float row[2] = {0}, ones[2] = {-1, -1};
    ddl_ps_info info;
    (void)arg;
    OK(ddl_ps_table_create(ps, &(ddl_ps_table_config){.width = 2, .rows = 10}, &full));
    OK(ddl_ps_table_create(ps, &(ddl_ps_table_config){.width = 2, .rows = 10, .evict = 1}, &evicting));
    OK(ddl_ps_table_create(ps, &(ddl_ps_table_config){.width = 2, .fixed = 1}, &fixed));
    FAILS(ddl_ps_table_create(ps, &(ddl_ps_table_config){.width = 2, .rows = 10000000}, &none), DDL_ERR_NOMEM,
          "ask for fewer rows");
    CHECK_EQ(none, -1);
    FAILS(ddl_ps_table_create(ps, &(ddl_ps_table_config){.width = 0}, &none), DDL_ERR_ARG, "width 0");
    for (uint64_t id = 0; id < 10; id++) {
        OK(ddl_ps_push_rows(ps, full, &id, 1, DDL_ARRAY(ones), NULL));
        OK(ddl_ps_push_rows(ps, evicting, &id, 1, DDL_ARRAY(ones), NULL));
    }
    uint64_t eleventh = 10, first = 0, second = 1;
    FAILS(ddl_ps_push_rows(ps, full, &eleventh, 1, DDL_ARRAY(ones), NULL), DDL_ERR_NOMEM, "table 0 has 10 rows");
    FAILS(ddl_ps_pull_rows(ps, full, &eleventh, 1, DDL_ARRAY(row)), DDL_ERR_NOMEM, "no room for row 10");
    OK(ddl_ps_pull_rows(ps, full, &first, 1, DDL_ARRAY(row)));
    CHECK_EQ(row[0], 1.0f);
    /* Row 0 is used, so row 1 is the oldest and makes room for row 10. */
    OK(ddl_ps_pull_rows(ps, evicting, &first, 1, DDL_ARRAY(row)));
    OK(ddl_ps_push_rows(ps, evicting, &eleventh, 1, DDL_ARRAY(ones), NULL));
    OK(ddl_ps_info_get(ps, &info));
    CHECK_EQ(info.rows_evicted, 1u);
    OK(ddl_ps_pull_rows(ps, evicting, &first, 1, DDL_ARRAY(row)));
    CHECK_EQ(row[1], 1.0f);
    OK(ddl_ps_pull_rows(ps, evicting, &second, 1, DDL_ARRAY(row))); /* new again */
    CHECK_EQ(row[1], 0.0f);
    FAILS(ddl_ps_pull_rows(ps, fixed, &eleventh, 1, DDL_ARRAY(row)), DDL_ERR_ARG, "table 2 has no row 10 on server ");
    OK(ddl_ps_push_rows(ps, fixed, &eleventh, 1, DDL_ARRAY(ones), NULL));
    OK(ddl_ps_pull_rows(ps, fixed, &eleventh, 1, DDL_ARRAY(row)));
    CHECK_EQ(row[0], 1.0f);
    for (uint64_t id = 100; id < 2000; id++) { /* many evictions: the index stays whole */
        OK(ddl_ps_push_rows(ps, evicting, &id, 1, DDL_ARRAY(ones), NULL));
        uint64_t before = id - 3;
        OK(ddl_ps_pull_rows(ps, evicting, &before, 1, DDL_ARRAY(row)));
        CHECK_EQ(row[0], id >= 103 ? 1.0f : 0.0f);
    }
    OK(ddl_ps_info_get(ps, &info));
    CHECK(info.memory_peak_bytes <= 300000 + 50000);
    uint64_t id = 0; /* until memory_bytes is reached */
    ddl_status status = DDL_OK;
    for (; id < 100000 && status == DDL_OK; id++) {
        status = ddl_ps_push_rows(ps, fixed, &id, 1, DDL_ARRAY(ones), NULL);
    }
    CHECK_STR(ddl_status_name(status), "DDL_ERR_NOMEM");
    CHECK(id > 1000);
    OK(ddl_ps_info_get(ps, &info));
    CHECK(info.memory_peak_bytes <= 300000 + 50000);
}

static void bound(ddl_group *w, void *arg) {
    ddl_ps_config config = {
        .sync = {.mode = DDL_SYNC_ASP}, .op = DDL_SUM, .memory_bytes = 300000, .optimizer = {.learning_rate = 1}};
    (void)arg;
    ps_run(w, &config, NULL, 0, bound_work, NULL);
}

TEST(tables_are_bounded_by_an_error_or_by_eviction) { world_threads(1, bound, NULL); }

/* >>checkpoints */

enum { DENSE = 5000 };

typedef struct saving {
    ddl_ps_config config;
    char folder[200];
    int from, to; /* steps; at `from` there is a checkpoint, unless it is 0 */
    int damage;   /* 1: the newest generation's file of server 0; 2: every file */
    int expect_from;
    float *result; /* of the run without interruption: dense, then rows */
} saving;

static void dense_steps(ddl_group *w, ddl_ps *ps, int from, int to) {
    float *grad = (float *)malloc(DENSE * sizeof *grad);
    int32_t me = ps_worker(ps);
    for (int step = from; step < to; step++) {
        ps_fill(grad, DENSE, me, step);
        OK(ddl_ps_push(ps, 0, ddl_tensor_1d(grad, DDL_F32, DENSE), NULL));
        train(w, ps, 0, step, step + 1); /* and ends the clock */
    }
    free(grad);
}

static void saving_work(ddl_group *w, ddl_ps *ps, void *arg) {
    saving *x = (saving *)arg;
    int32_t table;
    float *out = (float *)malloc((DENSE + IDS * WIDTH) * sizeof *out);
    uint64_t ids[IDS];
    ddl_ps_info info;
    OK(ddl_ps_table_create(ps, &(ddl_ps_table_config){.width = WIDTH, .uniform = 0.5f, .seed = SEED}, &table));
    if (x->damage == 2) {
        FAILS(ddl_ps_load(ps, x->folder), DDL_ERR_SYSTEM, "no checkpoint that is whole");
    } else if (x->from > 0) {
        OK(ddl_ps_load(ps, x->folder));
        OK(ddl_ps_info_get(ps, &info));
        CHECK_EQ(info.clock, x->expect_from);
        dense_steps(w, ps, (int)info.clock, x->to);
    } else {
        FAILS(ddl_ps_load(ps, x->folder), DDL_ERR_SYSTEM, "no checkpoint that is whole");
        dense_steps(w, ps, 0, 2);
        OK(ddl_ps_save(ps, x->folder));
        dense_steps(w, ps, 2, 4);
        OK(ddl_ps_save(ps, x->folder));
        dense_steps(w, ps, 4, x->to);
        FAILS(ddl_ps_save(ps, "/nonexistent/folder"), DDL_ERR_SYSTEM, "cannot write /nonexistent/folder");
    }
    for (int i = 0; i < IDS; i++) {
        ids[i] = id_of(i);
    }
    memset(out, 0x7f, (DENSE + IDS * WIDTH) * sizeof *out);
    OK(ddl_ps_pull(ps, 0, ddl_tensor_1d(out, DDL_F32, DENSE)));
    OK(ddl_ps_pull_rows(ps, table, ids, IDS, ddl_tensor_1d(out + DENSE, DDL_F32, IDS * WIDTH)));
    if (x->from == 0 && ps_worker(ps) == 0 && x->damage == 0) {
        memcpy(x->result, out, (DENSE + IDS * WIDTH) * sizeof *out);
    } else if (x->damage != 2) {
        int wrong = 0;
        for (int i = 0; x->from > 0 && i < DENSE + IDS * WIDTH; i++) {
            wrong += memcmp(&out[i], &x->result[i], sizeof *out) != 0;
        }
        CHECK_EQ(wrong, 0);
    }
    free(out);
}

static void save_run(ddl_group *w, void *arg) {
    saving *x = (saving *)arg;
    float *values = (float *)malloc(DENSE * sizeof *values);
    ps_fill(values, DENSE, 50, x->from == 0 ? 1 : 2); /* a loaded one begins with other values */
    ddl_tensor param = ddl_tensor_1d(values, DDL_F32, DENSE);
    ddl_ps_config config = x->config;
    config.optimizer = momentum;
    ps_run(w, &config, &param, 1, saving_work, x);
    free(values);
}

static int files_of(const char *folder, const char *part, int flip) {
    DIR *dir = opendir(folder);
    int count = 0;
    for (struct dirent *e = readdir(dir); e != NULL; e = readdir(dir)) {
        char path[600];
        if (strstr(e->d_name, part) == NULL) {
            continue;
        }
        count++;
        snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        FILE *f = flip ? fopen(path, "r+b") : NULL;
        if (f != NULL) { /* one bit in the middle */
            fseek(f, 0, SEEK_END);
            long at = ftell(f) / 2;
            fseek(f, at, SEEK_SET);
            int byte = fgetc(f);
            fseek(f, at, SEEK_SET);
            fputc(byte ^ 16, f);
            fclose(f);
        }
    }
    closedir(dir);
    return count;
}

TEST(a_checkpoint_goes_on_bit_for_bit_on_any_number_of_servers_and_a_damaged_one_is_passed_over) {
    saving x;
    memset(&x, 0, sizeof x);
    snprintf(x.folder, sizeof x.folder, "/tmp/ddl-ps-test-XXXXXX");
    REQUIRE(mkdtemp(x.folder) != NULL);
    x.result = (float *)malloc((DENSE + IDS * WIDTH) * sizeof(float));
    x.to = STEPS;
    x.config.servers = 2;
    world_threads(2, save_run, &x); /* saves at clocks 2 and 4 */
    CHECK_EQ(files_of(x.folder, "ddl-ps.", 0), 4);
    CHECK_EQ(files_of(x.folder, ".tmp", 0), 0);
    x.from = x.expect_from = 4;
    for (int servers = 1; servers <= 2; servers++) {
        x.config.servers = servers;
        world_threads(2, save_run, &x);
    }
    CHECK_EQ(files_of(x.folder, "ddl-ps.2.4.", 0), 2);
    CHECK_EQ(files_of(x.folder, ".0-of-2", 0), 2);
    char newest[] = "ddl-ps.2.4.";
    CHECK_EQ(files_of(x.folder, newest, 1), 2); /* damaged: the one before is taken */
    x.expect_from = 2;
    world_threads(2, save_run, &x);
    files_of(x.folder, "ddl-ps.1.2.", 1);
    x.damage = 2;
    world_threads(2, save_run, &x);
    char command[300];
    snprintf(command, sizeof command, "rm -r %s", x.folder);
    CHECK_EQ(system(command), 0);
    free(x.result);
}

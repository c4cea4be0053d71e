/* Checkpoints of the trainer: a run that stops and goes on has the bits of one that does not, on any number of ranks and
 * with or without shards, compressed on the same number; a damaged file is passed over, a rank that is killed leaves
 * nothing half-written; switching between sync modes.
 * tests/run: variants=gcc,asan timeout=90 */
#include "world.h"

#include <dirent.h>
#include <stdbool.h>
#include <sys/stat.h>

enum { TENSORS = 4, LARGEST = 3000 };
static const int sizes[TENSORS] = {5, LARGEST, 1, 640};

typedef struct net {
    float param[TENSORS][LARGEST], grad[TENSORS][LARGEST];
    uint16_t half[TENSORS]; /* one bf16 parameter, with its gradient */
    uint16_t half_grad[TENSORS];
} net;

typedef struct run {
    const char *folder;
    ddl_trainer_config config;
    int from, to, save_at, loads; /* steps; loads: what ddl_trainer_load is to find, 0: do not load */
    int saved_by;                 /* so many ranks; 0: the epoch is not looked at */
    net result;
} run;

static ddl_trainer *make(ddl_group *w, const ddl_trainer_config *config, net *m) {
    ddl_trainer *t = NULL;
    OK(ddl_trainer_create(w, config, &t));
    for (int i = 0; i < TENSORS; i++) {
        for (int k = 0; k < sizes[i]; k++) {
            m->param[i][k] = (float)((i + k) % 11) - 5;
        }
        m->half[i] = 0x3f80; /* 1 */
        OK(ddl_trainer_add(t, NULL, DDL_VIEW(m->param[i], sizes[i]), DDL_VIEW(m->grad[i], sizes[i]), NULL, NULL));
    }
    OK(ddl_trainer_add(t, "half", ddl_tensor_1d(m->half, DDL_BF16, TENSORS), ddl_tensor_1d(m->half_grad, DDL_BF16, TENSORS),
                       NULL, NULL));
    OK(ddl_trainer_start(t));
    return t;
}

/* The same gradients on all ranks, so that their number does not matter; sums and averages of equal numbers are exact. */
static void step_once(ddl_group *w, ddl_trainer *t, net *m, int step) {
    for (int i = 0; i < TENSORS; i++) {
        for (int k = 0; k < sizes[i]; k++) {
            m->grad[i][k] = (float)((step * 7 + i * 3 + k) % 17 - 8) / 4;
        }
        m->half_grad[i] = step % 2 ? 0x3f00 : 0x3e80;
    }
    OK(ddl_grad_ready(t, DDL_ALL));
    OK(ddl_step(t));
}

/* Needs more than 32 bits. */
static int64_t epoch_of(int step, int rank) { return ((int64_t)1 << 40) + 100 * step + rank; }

static void train(ddl_group *w, void *arg) {
    run *r = arg;
    net *m = calloc(1, sizeof *m);
    int64_t found = -7;
    ddl_trainer_stats stats;
    ddl_trainer *t = make(w, &r->config, m);
    if (r->loads != 0) {
        OK(ddl_trainer_load(t, r->folder, &found));
        CHECK_EQ(found, r->loads);
        OK(ddl_trainer_stats_get(t, &stats));
        CHECK(r->saved_by == 0 || stats.epoch == epoch_of(r->loads, r->saved_by - 1)); /* of the last rank */
    }
    for (int step = r->from; step < r->to; step++) {
        step_once(w, t, m, step);
        OK(ddl_trainer_set_epoch(t, epoch_of(step + 1, ddl_rank(w))));
        if (step + 1 == r->save_at) {
            OK(ddl_trainer_save(t, r->folder));
        }
    }
    OK(ddl_trainer_stats_get(t, &stats));
    CHECK_EQ(stats.steps, r->to);
    OK(ddl_trainer_free(&t));
    if (ddl_rank(w) == 0) {
        r->result = *m;
    }
    free(m);
}

static void make_folder(char path[64]) {
    snprintf(path, 64, "/tmp/ddl-checkpoint-XXXXXX");
    if (mkdtemp(path) == NULL) {
        perror("mkdtemp");
        exit(1);
    }
}

/* Names of the files in a folder, sorted. */
static int files_of(const char *folder, char names[][80], int most) {
    int count = 0;
    DIR *dir = opendir(folder);
    for (struct dirent *e = readdir(dir); e != NULL && count < most; e = readdir(dir)) {
        if (e->d_name[0] != '.') {
            snprintf(names[count++], 80, "%.79s", e->d_name);
        }
    }
    closedir(dir);
    qsort(names, (size_t)count, 80, (int (*)(const void *, const void *))strcmp);
    return count;
}

static void remove_folder(const char *folder) {
    char names[64][80], path[6000];
    int count = files_of(folder, names, 64);
    for (int i = 0; i < count; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        unlink(path);
    }
    CHECK_EQ(rmdir(folder), 0);
}

#define ADAM .optimizer = {.kind = DDL_ADAMW, .learning_rate = 0.01, .weight_decay = 0.1}
static run straight, first, second;

static void same(const char *what) {
    if (memcmp(&straight.result.param, &second.result.param, sizeof straight.result.param) != 0 ||
        memcmp(&straight.result.half, &second.result.half, sizeof straight.result.half) != 0) {
        test__fail(__FILE__, __LINE__, "%s: other bits than without stopping", what);
    }
}

TEST(a_run_that_goes_on_has_the_same_bits) {
    char folder[64];
    straight = (run){.config = {ADAM}, .to = 12};
    world_threads(2, train, &straight);
    CHECK(straight.result.param[1][7] != 0 && straight.result.half[0] != 0x3f80);
    const struct {
        int before, after, shard_before, shard_after;
    } ways[] = {{2, 2, 0, 0}, {3, 1, 1, 0}, {1, 4, 0, 1}, {4, 3, 1, 1}};
    for (size_t v = 0; v < sizeof ways / sizeof ways[0]; v++) {
        make_folder(folder);
        first = (run){.folder = folder, .config = {ADAM, .shard = ways[v].shard_before}, .to = 7, .save_at = 5};
        second = (run){.folder = folder, .config = {ADAM, .shard = ways[v].shard_after, .bucket_bytes = 1000},
                       .from = 5, .to = 12, .loads = 5, .saved_by = ways[v].before};
        world_threads(ways[v].before, train, &first);
        world_threads(ways[v].after, train, &second);
        same("another number of ranks");
        remove_folder(folder);
    }
}

/* Changes one byte, or cuts there. */
static void damage(const char *folder, const char *name, long at, bool cut) {
    char path[160];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "r+");
    REQUIRE(f != NULL);
    fseek(f, at, SEEK_SET);
    int byte = fgetc(f);
    fseek(f, at, SEEK_SET);
    fputc(byte ^ 0x10, f);
    fclose(f);
    CHECK(!cut || truncate(path, at) == 0);
}

static void no_log(void *user, ddl_log_level level, const char *line) {
    (void)line;
    *(int *)user += level == DDL_LOG_WARN;
}

static void load_fails(ddl_group *w, void *arg) {
    run *r = arg;
    net *m = calloc(1, sizeof *m), *before = malloc(sizeof *m);
    int64_t found;
    ddl_trainer *t = make(w, &r->config, m);
    memcpy(before, m, sizeof *m);
    FAILS(ddl_trainer_load(t, r->folder, &found), DDL_ERR_CORRUPT, "ddl_trainer_load: on rank 0 ddl-");
    CHECK_EQ(found, -1);
    CHECK(memcmp(before, m, sizeof *m) == 0);
    step_once(w, t, m, 0);
    OK(ddl_trainer_free(&t));
    free(m);
    free(before);
}

TEST(a_damaged_file_is_passed_over) {
    char folder[64], names[8][80];
    int warnings = 0;
    straight = (run){.config = {ADAM}, .to = 8};
    world_threads(1, train, &straight);
    world_config = &(ddl_config){.log = no_log, .log_user = &warnings};
    long size = 0;
    for (int i = 0; i < 24; i++) {
        make_folder(folder);
        for (int at = 3; at <= 6; at += 3) { /* one file of step 3, one of step 6 */
            first = (run){.folder = folder, .config = {ADAM}, .from = at - 3, .to = at, .save_at = at,
                          .loads = at == 3 ? -1 : 3};
            world_threads(1, train, &first);
        }
        CHECK_EQ(files_of(folder, names, 8), 2);
        CHECK(strstr(names[1], "000000000006.ckpt") != NULL);
        struct stat info;
        char path[160];
        snprintf(path, sizeof path, "%s/%s", folder, names[1]);
        CHECK_EQ(stat(path, &info), 0);
        size = info.st_size;
        damage(folder, names[1], i < 12 ? i * 4 : (long)((size - 1) * (i - 12) / 11), i % 3 == 0);
        warnings = 0;
        second = (run){.folder = folder, .config = {ADAM}, .from = 3, .to = 8, .loads = 3, .save_at = 5};
        world_threads(2, train, &second);
        same("after a damaged file");
        CHECK_EQ(warnings, 1);
        CHECK_EQ(files_of(folder, names, 8), 2); /* the damaged file of the future has gone */
        CHECK(strstr(names[1], "000000000005.ckpt") != NULL);
        damage(folder, names[0], 60, false);
        damage(folder, names[1], 60, true);
        world_threads(2, load_fails, &second);
        remove_folder(folder);
    }
    world_config = NULL;
}

/* Rank 0 is killed somewhere in a loop of saves: what is there is whole. */
static void save_for_ever(ddl_group *w, void *arg) {
    run *r = arg;
    net *m = calloc(1, sizeof *m);
    ddl_trainer *t = make(w, &r->config, m);
    for (int step = 0; step < 100000; step++) {
        step_once(w, t, m, step);
        OK(ddl_trainer_save(t, r->folder));
    }
}
static void save_process(int rank, int n, void *arg) {
    (void)rank;
    (void)n;
    world in = {.fn = save_for_ever, .arg = arg};
    world_run(&in, NULL);
}
static void load_any(ddl_group *w, void *arg) {
    run *r = arg;
    net *m = calloc(1, sizeof *m), *expect = calloc(1, sizeof *m);
    int64_t found = -1;
    ddl_trainer *t = make(w, &r->config, m), *u = make(w, &r->config, expect);
    OK(ddl_trainer_load(t, r->folder, &found));
    for (int step = 0; step < found; step++) {
        step_once(w, u, expect, step);
    }
    CHECK(memcmp(m->param, expect->param, sizeof m->param) == 0);
    r->loads += found > 0;
    OK(ddl_trainer_free(&t));
    OK(ddl_trainer_free(&u));
    free(m);
    free(expect);
}
TEST(a_killed_rank_leaves_whole_files) {
    char folder[64], names[8][80];
    run loading = {.config = {ADAM}};
    int warnings = 0;
    for (int i = 0; i < 8; i++) {
        make_folder(folder);
        run saving = {.folder = folder, .config = {ADAM}};
        ranks r;
        ranks_start(&r, 1, save_process, &saving);
        for (int waited = 0; waited < 20000; waited++) {
            if (files_of(folder, names, 8) > 0 && strstr(names[0], ".ckpt") != NULL) {
                break;
            }
            usleep(1000);
        }
        usleep((useconds_t)(i * 1700));
        ranks_kill(&r, 0, SIGKILL);
        ranks_wait(&r, 20);
        loading.folder = folder;
        world_config = &(ddl_config){.log = no_log, .log_user = &warnings};
        world_threads(1, load_any, &loading);
        world_config = NULL;
        remove_folder(folder);
    }
    CHECK_EQ(loading.loads, 8);
    CHECK_EQ(warnings, 0);
}

/* What is refused, on all ranks, with rank 0's reason. */
static void refusals(ddl_group *w, void *arg) {
    run *r = arg;
    float p[2] = {1, 2}, g[2] = {0};
    int64_t found = 0;
    net *m = calloc(1, sizeof *m);
    ddl_trainer *t = make(w, &(ddl_trainer_config){ADAM}, m), *other = NULL;
    FAILS(ddl_trainer_save(t, "/nowhere/at/all"), DDL_ERR_SYSTEM, "ddl_trainer_save: on rank 0 the folder");
    FAILS(ddl_trainer_load(t, "/nowhere/at/all", &found), DDL_ERR_SYSTEM, "cannot be read: No such file");
    FAILS(ddl_trainer_save(t, NULL), DDL_ERR_ARG, "folder is NULL");
    OK(ddl_trainer_load(t, r->folder, &found));
    CHECK_EQ(found, -1);
    OK(ddl_grad_ready(t, 0));
    FAILS(ddl_trainer_save(t, r->folder), DDL_ERR_STATE, "a step is under way");
    for (int i = 1; i <= TENSORS; i++) {
        OK(ddl_grad_ready(t, i));
    }
    OK(ddl_step(t));
    OK(ddl_trainer_save(t, r->folder));
    OK(ddl_trainer_free(&t));
    OK(ddl_trainer_create(w, &(ddl_trainer_config){ADAM}, &other));
    OK(ddl_trainer_add(other, "p", DDL_ARRAY(p), DDL_ARRAY(g), NULL, NULL));
    OK(ddl_trainer_start(other));
    FAILS(ddl_trainer_load(other, r->folder, &found), DDL_ERR_MISMATCH, "it has 5 tensors of optimizer 4, the trainer 1");
    FAILS(ddl_trainer_save(other, r->folder), DDL_ERR_SYSTEM, "later than epoch 0 and step 0 here; load it, or name");
    CHECK(p[0] == 1 && p[1] == 2);
    OK(ddl_trainer_free(&other));
    free(m);
}
TEST(what_is_refused) {
    char folder[64];
    make_folder(folder);
    run r = {.folder = folder};
    world_threads(2, refusals, &r);
    remove_folder(folder);
}

/* >>compression */

/* A vector and a matrix whose gradients differ between ranks, so that what error feedback keeps does too. */
enum { VECTOR = 300, ROWS = 24, COLS = 40 };
typedef struct packed {
    float param[VECTOR + ROWS * COLS], grad[VECTOR + ROWS * COLS];
} packed;

static ddl_trainer *packed_make(ddl_group *w, const ddl_trainer_config *config, packed *m) {
    ddl_trainer *t = NULL;
    ddl_tensor matrix = ddl_tensor_nd(m->param + VECTOR, DDL_F32, 2, (int64_t[]){ROWS, COLS}), grad = matrix;
    grad.data = m->grad + VECTOR;
    memset(m, 0, sizeof *m);
    OK(ddl_trainer_create(w, config, &t));
    OK(ddl_trainer_add(t, "vector", DDL_VIEW(m->param, VECTOR), DDL_VIEW(m->grad, VECTOR), NULL, NULL));
    OK(ddl_trainer_add(t, "matrix", matrix, grad, NULL, NULL));
    OK(ddl_trainer_start(t));
    return t;
}

static void packed_steps(ddl_group *w, ddl_trainer *t, packed *m, int from, int to) {
    for (int step = from; step < to; step++) {
        for (int i = 0; i < VECTOR + ROWS * COLS; i++) {
            m->grad[i] = (float)((i * 37 + step * 11 + ddl_rank(w) * 29) % 101 - 50) / 32 + m->param[i];
        }
        OK(ddl_grad_ready(t, DDL_ALL));
        OK(ddl_step(t));
    }
}

static bool packed_moved(const packed *m) {
    int still = 0;
    for (int i = 0; i < VECTOR + ROWS * COLS; i++) {
        still += m->param[i] == 0;
    }
    return still < VECTOR + ROWS * COLS - 100;
}

static void packed_goes_on(ddl_group *w, void *arg) {
    run *r = arg;
    packed *straight_on = malloc(sizeof *straight_on), *again = malloc(sizeof *again);
    int64_t found = 0;
    ddl_trainer *t = packed_make(w, &r->config, straight_on);
    packed_steps(w, t, straight_on, 0, 5);
    OK(ddl_trainer_save(t, r->folder));
    packed_steps(w, t, straight_on, 5, 12);
    OK(ddl_trainer_free(&t));
    t = packed_make(w, &r->config, again);
    OK(ddl_trainer_load(t, r->folder, &found));
    CHECK_EQ(found, 5);
    packed_steps(w, t, again, 5, 12);
    CHECK(packed_moved(again) && memcmp(again->param, straight_on->param, sizeof again->param) == 0);
    OK(ddl_trainer_free(&t));
    free(straight_on);
    free(again);
}

/* On another number of ranks a trainer that has residuals already forgets them: it is one that is new. */
static void packed_begins_anew(ddl_group *w, void *arg) {
    run *r = arg;
    packed *used = malloc(sizeof *used), *fresh = malloc(sizeof *fresh);
    ddl_trainer *t = packed_make(w, &r->config, used), *u = packed_make(w, &r->config, fresh);
    packed_steps(w, t, used, 0, 3);
    OK(ddl_trainer_load(t, r->folder, NULL));
    OK(ddl_trainer_load(u, r->folder, NULL));
    CHECK(packed_moved(used) && memcmp(used->param, fresh->param, sizeof used->param) == 0);
    packed_steps(w, t, used, 5, 9);
    packed_steps(w, u, fresh, 5, 9);
    CHECK(memcmp(used->param, fresh->param, sizeof used->param) == 0);
    OK(ddl_trainer_free(&t));
    OK(ddl_trainer_free(&u));
    free(used);
    free(fresh);
}

static void count_anew(void *user, ddl_log_level level, const char *line) {
    *(int *)user += level == DDL_LOG_INFO && strstr(line, "of another number of ranks than") != NULL;
}

TEST(what_compression_keeps_is_saved) {
    const ddl_compression ways[] = {{.kind = DDL_COMPRESS_TOP_K, .ratio = 0.1},
                                    {.kind = DDL_COMPRESS_QSGD, .levels = 7, .error_feedback = 1},
                                    {.kind = DDL_COMPRESS_RANDOM_K, .ratio = 0.1},
                                    {.kind = DDL_COMPRESS_POWER, .rank = 2}};
    for (size_t v = 0; v < sizeof ways / sizeof ways[0]; v++) {
        char folder[64];
        int said = 0;
        make_folder(folder);
        run r = {.folder = folder,
                 .config = {.optimizer = {.kind = DDL_ADAMW, .learning_rate = 0.01}, .compression = ways[v]}};
        world_config = &(ddl_config){.log = count_anew, .log_user = &said, .log_level = DDL_LOG_INFO};
        world_threads(3, packed_goes_on, &r);
        CHECK_EQ(said, 0);
        world_threads(2, packed_begins_anew, &r);
        CHECK_EQ(said, 2); /* rank 0, for each trainer */
        world_config = NULL;
        remove_folder(folder);
    }
}

/* >>switching */

/* Equal gradients: local SGD, BSP and every schedule take the same steps, so switching must not show. */
static void switches(ddl_group *w, void *arg) {
    (void)arg;
    const ddl_trainer_config ways[] = {
        {ADAM, .schedule = DDL_SCHEDULE_WAIT_FREE},
        {ADAM, .sync = DDL_SYNC_LOCAL, .local_steps = 3},
        {ADAM, .schedule = DDL_SCHEDULE_PRIORITY, .piece_bytes = 1024, .unchecked = 1},
        {ADAM, .sync = DDL_SYNC_LOCAL, .local_steps = 50},
        {ADAM, .schedule = DDL_SCHEDULE_MERGED},
    };
    net *m = calloc(1, sizeof *m), *plain = calloc(1, sizeof *m);
    ddl_trainer *t = make(w, NULL, m), *u = make(w, &ways[0], plain);
    FAILS(ddl_trainer_switch(t, &ways[0]), DDL_ERR_UNSUPPORTED, "shard, uneven and servers cannot change");
    OK(ddl_trainer_free(&t));
    t = make(w, &ways[0], m);
    FAILS(ddl_trainer_switch(t, &(ddl_trainer_config){ADAM, .accumulate = -1}), DDL_ERR_ARG, "accumulate is -1");
    FAILS(ddl_trainer_switch(t, &(ddl_trainer_config){ADAM, .clip_norm = 1 + ddl_rank(w)}), DDL_ERR_MISMATCH,
          "ranks differ in the config");
    for (int step = 0; step < 20; step++) {
        if (step % 4 == 0) {
            OK(ddl_trainer_switch(t, &ways[step / 4]));
        }
        step_once(w, t, m, step);
        step_once(w, u, plain, step);
        if (step == 5) {
            OK(ddl_grad_ready(t, 0));
            FAILS(ddl_trainer_switch(t, &ways[0]), DDL_ERR_STATE, "a step is under way");
            for (int i = 1; i <= TENSORS; i++) {
                OK(ddl_grad_ready(t, i));
            }
            OK(ddl_step(t));
            step_once(w, u, plain, step);
        }
    }
    OK(ddl_trainer_sync(t));
    for (int i = 0; i < TENSORS; i++) {
        for (int k = 0; k < sizes[i]; k++) {
            float d = m->param[i][k] - plain->param[i][k];
            CHECK(d < 1e-5f && d > -1e-5f);
        }
    }
    OK(ddl_trainer_free(&t));
    OK(ddl_trainer_free(&u));
    free(m);
    free(plain);
}
TEST(switching_between_steps) { world_threads(2, switches, NULL); }

/* After DiLoCo has been switched away a checkpoint is that of any other run: it fits a trainer that never had it. */
static void leave_outer(ddl_group *w, void *arg) {
    run *r = arg;
    net *m = calloc(1, sizeof *m);
    ddl_trainer_config outer = {ADAM, .sync = DDL_SYNC_LOCAL, .local_steps = 2, .outer_rate = 0.7};
    ddl_trainer *t = make(w, &outer, m);
    for (int step = 0; step < 6; step++) {
        if (step == 4) {
            OK(ddl_trainer_switch(t, &r->config));
        }
        step_once(w, t, m, step);
    }
    OK(ddl_trainer_save(t, r->folder));
    OK(ddl_trainer_switch(t, &outer)); /* and back */
    step_once(w, t, m, 6);
    OK(ddl_trainer_free(&t));
    free(m);
}
TEST(a_checkpoint_after_diloco_was_switched_away) {
    char folder[64];
    make_folder(folder);
    first = (run){.folder = folder, .config = {ADAM}};
    second = (run){.folder = folder, .config = {ADAM}, .from = 6, .to = 8, .loads = 6};
    world_threads(2, leave_outer, &first);
    world_threads(2, train, &second);
    remove_folder(folder);
}

/* Ranks whose local steps differ are the same again after a switch to BSP, their optimizers too. */
static void drift(ddl_group *w, void *arg) {
    (void)arg;
    net *m = calloc(1, sizeof *m), *all = malloc(2 * sizeof *all);
    ddl_trainer_config local = {ADAM, .sync = DDL_SYNC_LOCAL, .local_steps = 100}, bsp = {ADAM};
    ddl_trainer *t = make(w, &local, m);
    for (int step = 0; step < 10; step++) {
        if (step == 5) {
            OK(ddl_trainer_switch(t, &bsp));
        }
        step_once(w, t, m, step < 5 ? step * (1 + ddl_rank(w)) : step);
        OK(ddl_all_gather(w, DDL_VIEW(m->param[1], LARGEST), DDL_VIEW((float *)all, 2 * LARGEST)));
        CHECK_EQ(memcmp(all, (float *)all + LARGEST, LARGEST * sizeof(float)) == 0, step >= 5 || step == 0);
    }
    OK(ddl_trainer_free(&t));
    free(m);
    free(all);
}
TEST(ranks_that_drifted_are_one_after_a_switch) { world_threads(2, drift, NULL); }

/* >>folders with very many files */

/* Files of steps first ... end - 1 that are no checkpoints. */
static void make_rubbish(const char *folder, int first, int end) {
    char path[128];
    for (int step = first; step < end; step++) {
        snprintf(path, sizeof path, "%s/ddl-00000000-%012d.ckpt", folder, step);
        FILE *f = fopen(path, "w");
        REQUIRE(f != NULL);
        fputs("rubbish", f);
        fclose(f);
    }
}

static void many_files(ddl_group *w, void *arg) {
    const char *folder = arg;
    net *m = calloc(1, sizeof *m);
    int64_t found = -7;
    ddl_trainer *t = make(w, &(ddl_trainer_config){ADAM}, m);
    OK(ddl_trainer_load(t, folder, &found)); /* beyond all the rubbish, which is newer */
    CHECK_EQ(found, 3);
    step_once(w, t, m, 3);
    OK(ddl_trainer_save(t, folder));
    OK(ddl_trainer_free(&t));
    t = make(w, &(ddl_trainer_config){ADAM}, m);
    FAILS(ddl_trainer_save(t, folder), DDL_ERR_SYSTEM, "holds a checkpoint of epoch 0 and step 4, later than");
    OK(ddl_trainer_free(&t));
    free(m);
}

TEST(of_very_many_files_none_is_forgotten) {
    char folder[64], names[8][80];
    int warnings = 0;
    make_folder(folder);
    first = (run){.folder = folder, .config = {ADAM}, .to = 3, .save_at = 3};
    world_threads(1, train, &first);
    make_rubbish(folder, 4, 200);
    make_rubbish(folder, 1, 3);
    world_config = &(ddl_config){.log = no_log, .log_user = &warnings};
    world_threads(2, many_files, folder);
    world_config = NULL;
    CHECK_EQ(warnings, 196);
    CHECK_EQ(files_of(folder, names, 8), 2); /* the newest of this run, and nothing later or older */
    CHECK(strstr(names[1], "000000000004.ckpt") != NULL);
    remove_folder(folder);
}

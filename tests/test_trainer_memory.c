/* One rank of a trainer runs out of memory, at each of its allocations in turn: at the start, where lines are measured,
 * where plans race, where a config is switched. The others are told at once and by its name, not by their deadline; it
 * is freed, and leaks nothing.
 * tests/run: variants=gcc,asan timeout=120 waits=yes */
#define _GNU_SOURCE 1 /* before the first header of the system */
#include <stdlib.h>

static _Thread_local long allowed = -1; /* allocations of this thread until one fails; below 0: none does */
static _Thread_local int refused;
static int may_not(void) {
    allowed -= allowed > 0;
    if (allowed != 0) {
        return 0;
    }
    allowed = -1;
    refused = 1;
    return 1;
}
static void *test_malloc(size_t bytes) { return may_not() ? NULL : malloc(bytes); }
static void *test_calloc(size_t count, size_t bytes) { return may_not() ? NULL : calloc(count, bytes); }
#define malloc test_malloc
#define calloc test_calloc
#define DDL_IMPLEMENTATION
#include "ddl.h"
#undef malloc
#undef calloc

#include "world.h"

#include <stdbool.h>

enum { TENSORS = 3, WIDTH = 40, STEPS = 6 };

typedef struct shortage {
    ddl_trainer_config config, then; /* then: switched to after three steps */
    bool switches, late; /* late: allocations are counted when ddl_trainer_start is over */
    int victim;
    long at;                 /* which allocation of the victim fails */
    bool fell, failed;       /* the victim had one refused; and was told so */
    bool cut;                /* it could not keep a message that came early: its link was closed, as if damaged */
    pthread_barrier_t ended; /* nobody leaves before: leaving would be told, too */
} shortage;

static ddl_status one_step(ddl_trainer *t, float (*g)[WIDTH]) {
    for (int i = 0; i < TENSORS * WIDTH; i++) {
        g[i / WIDTH][i % WIDTH] = (float)(i % 7 - 3);
    }
    ddl_status status = ddl_grad_ready(t, DDL_ALL);
    return status == DDL_OK ? ddl_step(t) : status;
}

static ddl_status life(const shortage *x, bool victim, ddl_trainer *t, float (*g)[WIDTH]) {
    allowed = victim && !x->late ? x->at : -1;
    ddl_status status = ddl_trainer_start(t);
    allowed = victim && x->late ? x->at : allowed;
    for (int step = 0; step < STEPS && status == DDL_OK; step++) {
        status = one_step(t, g);
        if (status == DDL_OK && step == 2 && x->switches) {
            status = ddl_trainer_switch(t, &x->then);
        }
    }
    return status;
}

static void short_of_memory(ddl_group *w, void *arg) {
    shortage *x = arg;
    static _Thread_local float p[TENSORS][WIDTH], g[TENSORS][WIDTH];
    char name[64];
    ddl_trainer *t = NULL;
    OK(ddl_trainer_create(w, &x->config, &t));
    for (int i = 0; i < TENSORS; i++) {
        OK(ddl_trainer_add(t, NULL, DDL_ARRAY(p[i]), DDL_ARRAY(g[i]), NULL, NULL));
    }
    refused = 0;
    ddl_status status = life(x, ddl_rank(w) == x->victim, t, g);
    allowed = -1;
    if (ddl_rank(w) == x->victim) {
        x->fell = refused;
        x->failed = status < 0;
        x->cut = status == DDL_ERR_PEER;
        CHECK(status == DDL_OK || status == DDL_ERR_NOMEM || x->cut);
    }
    pthread_barrier_wait(&x->ended);
    if (ddl_rank(w) != x->victim && x->failed) {
        status = status == DDL_OK ? one_step(t, g) : status; /* it failed behind the last step */
        snprintf(name, sizeof name, "rank %d", x->victim);
        FAILS(status, x->cut ? DDL_ERR_PEER : DDL_ERR_NOMEM, name);
        CHECK_STR(ddl_error(ddl_group_context(w)), x->cut ? "is dead" : "has no memory");
    } else {
        CHECK(status == DDL_OK || ddl_rank(w) == x->victim);
    }
    OK(ddl_trainer_free(&t));
    pthread_barrier_wait(&x->ended);
}

static long all_of_them(shortage *x) {
    long told = 0;
    pthread_barrier_init(&x->ended, NULL, 2);
    for (x->at = 1;; x->at += x->at < 60 ? 1 : 4) { /* many of those behind are alike */
        x->fell = x->failed = x->cut = false;
        world_threads(2, short_of_memory, x);
        told += x->failed;
        if (!x->fell || test__now->failures > 0) {
            break;
        }
    }
    pthread_barrier_destroy(&x->ended);
    printf("  victim %d: %ld allocations; %ld refusals ended the trainer\n", x->victim, x->at - 1, told);
    return told;
}

static const ddl_trainer_config racing = {.replan_steps = 2};

TEST(a_start_without_memory_is_told_to_the_others) {
    setenv("DDL_LOG", "none", 1);
    shortage x = {.config = racing, .then = {.schedule = DDL_SCHEDULE_MERGED}, .switches = true};
    CHECK(all_of_them(&x) > 10);
}

TEST(a_start_without_memory_of_the_other_rank) {
    setenv("DDL_LOG", "none", 1);
    shortage x = {.config = racing, .then = {.schedule = DDL_SCHEDULE_MERGED}, .switches = true, .victim = 1};
    CHECK(all_of_them(&x) > 10);
}

TEST(a_change_of_plans_without_memory_is_told_to_the_others) {
    setenv("DDL_LOG", "none", 1);
    shortage x = {.config = racing, .then = {.schedule = DDL_SCHEDULE_MERGED}, .switches = true, .victim = 1, .late = true};
    CHECK(all_of_them(&x) > 10);
}

TEST(compression_without_memory_is_told_to_the_others) {
    setenv("DDL_LOG", "none", 1);
    shortage x = {.config = {.schedule = DDL_SCHEDULE_NONE, .compression = {.kind = DDL_COMPRESS_TOP_K}}, .victim = 1,
                  .late = true};
    CHECK(all_of_them(&x) > 5);
}

TEST(a_start_with_compression_without_memory_is_told_to_the_others) {
    setenv("DDL_LOG", "none", 1);
    shortage x = {.config = {.schedule = DDL_SCHEDULE_NONE, .compression = {.kind = DDL_COMPRESS_TOP_K}}, .victim = 1};
    CHECK(all_of_them(&x) > 10);
}

/* One rank of a trainer runs out of memory, at each of its allocations in turn: at the start, where lines are measured,
 * where plans race, where a config is switched, over servers and their ranks. The others are told at once and by its
 * name, not by their deadline; it is freed, and leaks nothing.
 * tests/run: variants=asan timeout=180 waits=yes */
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

enum { TENSORS = 3, WIDTH = 40, STEPS = 6, WORKERS = 2 };

typedef struct shortage {
    ddl_trainer_config config, then; /* then: switched to after three steps */
    bool switches, late; /* late: allocations are counted when ddl_trainer_start is over */
    int victim, servers; /* servers: ranks behind the two that work */
    long at;                 /* which allocation of the victim fails */
    bool fell, failed;       /* the victim had one refused; and was told so */
    bool cut;                /* it could not keep a message that came early: its link was closed, as if damaged */
    ddl_status served;       /* of a rank that serves */
    pthread_barrier_t ended, freed; /* of workers, of all; nobody leaves before: leaving would be told, too */
} shortage;

static ddl_status one_step(ddl_trainer *t, float (*g)[WIDTH]) {
    for (int i = 0; i < TENSORS * WIDTH; i++) {
        g[i / WIDTH][i % WIDTH] = (float)(i % 7 - 3);
    }
    ddl_status status = ddl_param_wait(t, DDL_ALL); /* without overlap_forward there is nothing to wait for */
    status = status == DDL_OK ? ddl_grad_ready(t, DDL_ALL) : status;
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
    if (ddl_rank(w) >= WORKERS) {
        x->served = ddl_trainer_start(t);
        x->served = x->served == DDL_OK ? ddl_trainer_serve(t) : x->served;
        if (x->served < 0) {
            snprintf(name, sizeof name, "rank %d", x->victim);
            CHECK_STR(ddl_error(ddl_group_context(w)), name);
        }
        OK(ddl_trainer_free(&t));
        pthread_barrier_wait(&x->freed);
        return;
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
        CHECK_STR(ddl_error(ddl_group_context(w)), x->cut ? "is dead" : "memory");
    } else {
        CHECK(status == DDL_OK || ddl_rank(w) == x->victim);
    }
    OK(ddl_trainer_free(&t));
    pthread_barrier_wait(&x->freed);
}

static long all_of_them(shortage *x) {
    long told = 0;
    pthread_barrier_init(&x->ended, NULL, WORKERS);
    pthread_barrier_init(&x->freed, NULL, (unsigned)(WORKERS + x->servers));
    for (x->at = 1;; x->at += x->at < 60 ? 1 : 4) { /* many of those behind are alike */
        x->fell = x->failed = x->cut = false;
        x->served = DDL_OK;
        world_threads(WORKERS + x->servers, short_of_memory, x);
        told += x->failed;
        CHECK(x->servers == 0 || x->cut || x->served == (x->failed ? DDL_ERR_NOMEM : DDL_OK));
        if (!x->fell || test__now->failures > 0) {
            break;
        }
    }
    pthread_barrier_destroy(&x->ended);
    pthread_barrier_destroy(&x->freed);
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

TEST(a_step_without_memory_over_servers_is_told_to_the_others) {
    setenv("DDL_LOG", "none", 1);
    shortage x = {.config = {.architecture = DDL_ARCHITECTURE_PS, .schedule = DDL_SCHEDULE_WAIT_FREE, .servers = 2},
                  .late = true};
    CHECK(all_of_them(&x) > 10);
}

TEST(a_step_without_memory_is_told_to_dedicated_servers) {
    setenv("DDL_LOG", "none", 1);
    shortage x = {.config = {.architecture = DDL_ARCHITECTURE_PS, .schedule = DDL_SCHEDULE_NONE, .dedicated = 1},
                  .servers = 1, .victim = 1, .late = true};
    CHECK(all_of_them(&x) > 8);
}

TEST(a_forward_without_memory_that_waits_for_servers_is_told_to_the_others) {
    setenv("DDL_LOG", "none", 1);
    shortage x = {.config = {.architecture = DDL_ARCHITECTURE_PS, .schedule = DDL_SCHEDULE_NONE, .overlap_forward = 1},
                  .victim = 1, .late = true};
    CHECK(all_of_them(&x) > 8);
}

TEST(another_sync_mode_without_memory_for_it_is_told_to_the_others) {
    setenv("DDL_LOG", "none", 1);
    shortage x = {.config = {.architecture = DDL_ARCHITECTURE_PS, .schedule = DDL_SCHEDULE_NONE, .servers = 1},
                  .victim = 1, .late = true, .switches = true};
    x.then = x.config;
    x.then.schedule = DDL_SCHEDULE_WAIT_FREE;
    CHECK(all_of_them(&x) > 8);
}

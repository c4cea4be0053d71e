/* The lock of a context between the thread that polls and callers: who polls comes back last, and waits for nobody twice.
 * tests/run: variants=gcc,tsan */
#define DDL_IMPLEMENTATION
#include "ddl.h"

#include "test.h"

#include <stdatomic.h>

static ddl_context *made(int spins) {
    ddl_context *c = (ddl_context *)calloc(1, sizeof *c);
    pthread_mutex_init(&c->lock, NULL);
    atomic_store(&c->lock_spins, spins);
    return c;
}

static void unmade(ddl_context *c) {
    CHECK_EQ(atomic_load(&c->lock_waiters), 0);
    CHECK(!atomic_load(&c->locked_alone)); /* nobody has it */
    CHECK_EQ(pthread_mutex_trylock(&c->lock), 0);
    pthread_mutex_unlock(&c->lock);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

/* As a thread that polls, and has seen that somebody wants the lock. */
static void give_way(ddl_context *c) {
    ddl__unlock(c);
    ddl__lock_last(c);
}

/* A caller in a long call of a driver: the lock is free, and is taken after one wait for the caller, and at once from then
 * on, until the callers are others. */
TEST(who_stays_away_is_waited_for_once) {
    ddl_context *c = made(1000);
    ddl__lock(c);
    ddl__unlock_shortly(c);
    CHECK_EQ(c->lock_passed, 0);
    ddl__lock_last(c);
    CHECK_EQ(c->lock_passed, 1);
    give_way(c);
    CHECK_EQ(c->lock_passed, 1); /* not waited for: nothing has changed */
    ddl__locked_again(c);
    give_way(c);
    CHECK_EQ(c->lock_passed, 0);
    ddl__unlock(c);
    unmade(c);
}

static atomic_int polls; /* 1: the thread that polls has the lock */

static void *who_polls(void *arg) {
    ddl_context *c = (ddl_context *)arg;
    ddl__lock_last(c);
    atomic_store(&polls, 1);
    ddl__unlock(c);
    return NULL;
}

/* A caller that has the lock, gives it away shortly and takes it again: who polls waits outside for its end, and is none of
 * those that want the lock. */
TEST(who_polls_does_not_come_between) {
    ddl_context *c = made(1 << 30);
    pthread_t thread;
    ddl__lock(c);
    REQUIRE(pthread_create(&thread, NULL, who_polls, c) == 0);
    usleep(50000);
    CHECK_EQ(atomic_load(&c->lock_waiters), 0);
    ddl__unlock_shortly(c);
    usleep(50000);
    CHECK_EQ(atomic_load(&polls), 0);
    ddl__lock(c);
    ddl__locked_again(c);
    ddl__unlock(c);
    pthread_join(thread, NULL);
    CHECK_EQ(atomic_load(&polls), 1);
    unmade(c);
}

typedef struct job {
    ddl_context *c;
    atomic_int left; /* callers that are not done */
    long held;       /* under the lock */
} job;

enum { CALLERS = 3, CALLS = 3000 };

static void *call(void *arg) {
    job *j = (job *)arg;
    for (int i = 0; i < CALLS; i++) {
        ddl__lock(j->c);
        j->held++;
        ddl__unlock_shortly(j->c);
        ddl__lock(j->c);
        ddl__locked_again(j->c);
        j->held++;
        ddl__unlock(j->c);
    }
    atomic_fetch_sub(&j->left, 1);
    return NULL;
}

/* Whether threads look for the lock or sleep: all get it, and one at a time has it. */
static void together(int spins) {
    job j = {made(spins), CALLERS, 0};
    pthread_t callers[CALLERS];
    ddl__lock(j.c);
    for (int i = 0; i < CALLERS; i++) {
        REQUIRE(pthread_create(&callers[i], NULL, call, &j) == 0);
    }
    while (atomic_load(&j.left) > 0) {
        long before = j.held;
        CHECK_EQ(j.held, before);
        if (ddl__lock_is_wanted(j.c)) {
            give_way(j.c);
        } else {
            ddl__unlock(j.c);
            sched_yield();
            ddl__lock(j.c);
        }
    }
    ddl__unlock(j.c);
    for (int i = 0; i < CALLERS; i++) {
        pthread_join(callers[i], NULL);
    }
    CHECK_EQ(j.held, 2L * CALLERS * CALLS);
    unmade(j.c);
}

TEST(callers_get_in_and_one_has_it) { together(1000); }
TEST(callers_that_share_cores_sleep) { together(0); }

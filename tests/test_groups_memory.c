/* Making groups where one rank has no memory for a while, for a message or its part: none waits until its deadline.
 * tests/run: variants=asan timeout=60 */
#define DDL_IMPLEMENTATION
#include "ddl.h"

#include "world.h"

#include <stdatomic.h>

enum { SLOW_S = 20 };

/* The memory of one rank; `least`: of these many bytes or more the next `fails` allocations fail. */
typedef struct memory {
    atomic_size_t least;
    atomic_int fails;
} memory;

typedef struct short_of {
    world in;
    memory of[3];
    int victim;
    bool splits;
    ddl_status status[3];
    char why[3][400];
} short_of;

static void *take(void *user, size_t bytes) {
    memory *m = user;
    return bytes >= m->least && atomic_load(&m->fails) > 0 && atomic_fetch_sub(&m->fails, 1) > 0 ? NULL : malloc(bytes);
}
static void give(void *user, void *block) {
    (void)user;
    free(block);
}

/* Takes the requests that are there without more memory away; they are linked. */
static ddl_request *hide_requests(ddl_context *c) {
    ddl__lock(c);
    ddl_request *first = c->requests->free_first;
    c->requests->free_first = c->requests->free_last = NULL;
    ddl__unlock(c);
    return first;
}

static void show_requests(ddl_context *c, ddl_request *first) {
    ddl__lock(c);
    for (ddl_request *next; first != NULL; first = next) {
        next = first->next;
        ddl__request_untake(c, first);
    }
    ddl__unlock(c);
}

static void one_rank(int rank, int n, void *arg) {
    short_of *s = arg;
    memory *m = &s->of[rank];
    world_member member = {&s->in, rank, n};
    ddl_config config = {.world_size = n, .rank = rank, .exchange = world_exchange, .exchange_user = &member,
                         .timeout_ms = (int64_t)(SLOW_S * 1000 * test_slow()), .allocator = {take, give, m}};
    ddl_request *hidden = NULL;
    ddl_context *c = NULL;
    ddl_group *g = NULL;
    REQUIRE(ddl_init(&config, &c) == DDL_OK);
    ddl_group *w = ddl_world(c);
    OK(ddl_barrier(w));
    if (rank == s->victim && s->splits) {
        m->least = (size_t)n * 3 * sizeof(int32_t) + DDL__SIZE_BYTES;
        atomic_store(&m->fails, 1);
    } else if (rank == s->victim) {
        hidden = hide_requests(c);
        m->least = 64 * sizeof(ddl_request); /* of more of them */
        atomic_store(&m->fails, 3);
    }
    double start = test_now_s();
    s->status[rank] = s->splits ? ddl_group_split(w, 0, rank, &g)
                                : ddl_group_create(w, (int32_t[]){0, 1, 2}, n, "three", &g);
    CHECK(test_now_s() - start < SLOW_S * test_slow() / 2); /* nobody waits for the deadline */
    snprintf(s->why[rank], sizeof s->why[rank], "%s", ddl_error(c));
    CHECK(rank != s->victim || atomic_load(&m->fails) <= 0);
    if (g != NULL) {
        double sum = rank;
        OK(ddl_all_reduce_scalar(g, &sum, DDL_SUM));
        CHECK_EQ(sum, n * (n - 1) / 2);
    }
    pthread_barrier_wait(&s->in.barrier);
    show_requests(c, hidden);
    CHECK_EQ(ddl_group_free(&g), DDL_OK);
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

static short_of *without_memory(int victim, bool splits) {
    short_of *s = calloc(1, sizeof *s);
    s->victim = victim;
    s->splits = splits;
    setenv("DDL_LOG", "none", 1);
    pthread_barrier_init(&s->in.barrier, NULL, 3);
    ranks_threads(3, one_rank, s);
    pthread_barrier_destroy(&s->in.barrier);
    unsetenv("DDL_LOG");
    return s;
}

TEST(a_group_is_made_when_its_messages_find_memory_again) {
    for (int victim = 0; victim < 3; victim += 2) { /* who leads, and who is led */
        short_of *s = without_memory(victim, false);
        for (int i = 0; i < 3; i++) {
            CHECK_EQ(s->status[i], DDL_OK);
        }
        free(s);
    }
}

TEST(a_rank_without_memory_for_a_split_is_named_to_all) {
    short_of *s = without_memory(1, true);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(s->status[i], DDL_ERR_NOMEM);
        CHECK_STR(s->why[i], "rank 1 has no memory for its part");
    }
    free(s);
}

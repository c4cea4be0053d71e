/* world.h: ranks that have joined a job, for tests of messages, groups and requests.
 *
 *     static void swap(ddl_group *w, void *arg) { ... ddl_rank(w), ddl_size(w), ddl_group_context(w) ... }
 *     world_threads(4, swap, arg);        threads of this process; they meet through ddl_config.exchange
 *     world_fork(4, swap, arg, 20);       processes, joined from the environment, as by a launcher
 *
 * world_config, when set, is what both begin with. A wait ends after 20 s, so that a hang becomes a sentence.
 * OK(call) fails the test with the library's own sentence. */
#ifndef TEST_WORLD_H
#define TEST_WORLD_H

#include "ranks.h"

#include "ddl.h"

typedef void (*world_fn)(ddl_group *world, void *arg);

static const ddl_config *world_config;

typedef struct world {
    world_fn fn;
    void *arg;
    pthread_barrier_t barrier;
    unsigned char *table;
} world;

typedef struct world_member {
    world *in;
    int rank, n;
} world_member;

static inline ddl_status world_ok(ddl_context *c, ddl_status status, const char *file, int line, const char *call) {
    if (status != DDL_OK) {
        test__fail(file, line, "%s is %s: %s", call, ddl_status_name(status), ddl_error(c));
    }
    return status;
}

#define OK(call) world_ok(ddl_group_context(w), (call), __FILE__, __LINE__, #call)

/* The call fails with this status, and the sentence has this text. */
#define FAILS(call, status, text)                                                                          \
    do {                                                                                                   \
        CHECK_STR(ddl_status_name(call), ddl_status_name(status));                                         \
        CHECK_STR(ddl_error(ddl_group_context(w)), text);                                                  \
    } while (0)

/* Element i of what a rank sends under a tag: differs in every byte position. */
static inline unsigned char world_byte(int rank, int tag, size_t i) {
    return (unsigned char)((size_t)(rank * 37 + tag * 101) + i * 13 + (i >> 8) * 7 + (i >> 16) * 5);
}

static inline void world_fill(unsigned char *at, int rank, int tag, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        at[i] = world_byte(rank, tag, i);
    }
}

static inline size_t world_wrong(const unsigned char *at, int rank, int tag, size_t bytes) {
    size_t wrong = 0;
    for (size_t i = 0; i < bytes; i++) {
        wrong += at[i] != world_byte(rank, tag, i);
    }
    return wrong;
}

static inline ddl_tensor world_bytes(const void *at, size_t bytes) { return ddl_tensor_1d(at, DDL_U8, (int64_t)bytes); }

static inline int world_exchange(void *user, const void *in, void *out, size_t bytes) {
    world_member *m = (world_member *)user;
    if (m->rank == 0) {
        m->in->table = (unsigned char *)malloc(bytes * (size_t)m->n);
    }
    pthread_barrier_wait(&m->in->barrier);
    memcpy(m->in->table + bytes * (size_t)m->rank, in, bytes);
    pthread_barrier_wait(&m->in->barrier);
    memcpy(out, m->in->table, bytes * (size_t)m->n);
    pthread_barrier_wait(&m->in->barrier);
    if (m->rank == 0) {
        free(m->in->table);
    }
    return 0;
}

/* Joins, runs, leaves. member NULL: the place in the job comes from the environment. */
static inline void world_run(const world *in, world_member *member) {
    char error[1024] = "";
    ddl_config config;
    memset(&config, 0, sizeof config);
    if (world_config != NULL) {
        config = *world_config;
    }
    config.timeout_ms = config.timeout_ms != 0 ? config.timeout_ms : (int64_t)(20000 * test_slow());
    config.error_text = error;
    config.error_bytes = sizeof error;
    if (member != NULL) {
        config.world_size = member->n;
        config.rank = member->rank;
        config.exchange = world_exchange;
        config.exchange_user = member;
    }
    ddl_context *c = NULL;
    if (ddl_init(&config, &c) != DDL_OK) {
        test__fail(__FILE__, __LINE__, "ddl_init: %s", error);
        return;
    }
    in->fn(ddl_world(c), in->arg);
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
    CHECK(c == NULL);
}

static inline void world_thread(int rank, int n, void *arg) {
    world_member m = {(world *)arg, rank, n};
    world_run(m.in, &m);
}

static inline void world_process(int rank, int n, void *arg) {
    (void)rank;
    (void)n;
    world_run((const world *)arg, NULL);
}

static inline void world_threads(int n, world_fn fn, void *arg) {
    world in;
    memset(&in, 0, sizeof in);
    in.fn = fn;
    in.arg = arg;
    pthread_barrier_init(&in.barrier, NULL, (unsigned)n);
    ranks_threads(n, world_thread, &in);
    pthread_barrier_destroy(&in.barrier);
}

static inline void world_fork(int n, world_fn fn, void *arg, double timeout_s) {
    world in;
    memset(&in, 0, sizeof in);
    in.fn = fn;
    in.arg = arg;
    ranks_fork(n, world_process, &in, timeout_s);
}

#endif /* TEST_WORLD_H */

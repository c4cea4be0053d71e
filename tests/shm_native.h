/* shm_native.h: ranks that have only the native layer of plugins/shm, without a core: one segment, made here, and for
 * each rank an endpoint that is in it. As forked processes, or as threads that share one mapping, so that a thread
 * sanitizer sees the same addresses in all of them. */
#ifndef TEST_SHM_NATIVE_H
#define TEST_SHM_NATIVE_H

#include "ranks.h"

#ifndef TEST_SHM_IS_IN /* a test that refuses what the system would give has it by itself */
#include "../plugins/shm/shm.c"
#endif

#include <poll.h>
#include <sched.h>

static inline void *native_alloc(const ddl_host *host, size_t bytes) {
    (void)host;
    return malloc(bytes);
}
static inline void native_free(const ddl_host *host, void *memory) {
    (void)host;
    free(memory);
}
static inline void native_log(const ddl_host *host, ddl_log_level level, const char *line) {
    (void)host;
    fprintf(stderr, "log %d: %s\n", (int)level, line);
}
static inline const char *native_setting(const ddl_host *host, const char *name) {
    (void)host;
    return getenv(name);
}

static inline uint64_t native_now_ns(const ddl_host *host) {
    (void)host;
    return (uint64_t)(test_now_s() * 1e9);
}

static const ddl_host native_host = {.size = sizeof(ddl_host),
                                     .abi = DDL_PLUGIN_ABI,
                                     .alloc = native_alloc,
                                     .free = native_free,
                                     .log = native_log,
                                     .setting = native_setting,
                                     .now_ns = native_now_ns};

typedef struct native_world {
    int n;
    shm *endpoint[RANKS_MAX];
    void (*fn)(shm *t, int rank, int n, void *arg);
    void *arg;
    bool threads;
    int cores; /* 0: one for each rank */
    bool bound; /* each has its own */
} native_world;

static inline ddl_status native_prepare(shm *t) { return shm_prepare(t); }

/* Endpoints with their doorbells; all know all addresses. */
static inline void native_addresses(native_world *w, int n) {
    ddl_transport_params params = {.size = sizeof params, .world_size = n, .local_ranks = n, .host_id = "here"};
    params.cores = w->cores > 0 ? w->cores : n;
    w->n = n;
    for (int r = 0; r < n; r++) {
        void *self = NULL;
        params.rank = r;
        params.core_set = w->bound ? (uint64_t)r : 0;
        if (shm_transport.open(&native_host, &params, &self) != DDL_OK) {
            fprintf(stderr, "rank %d has no endpoint\n", r);
            exit(1);
        }
        w->endpoint[r] = self;
    }
    for (int r = 0; r < n; r++) {
        for (int j = 0; j < n; j++) {
            w->endpoint[r]->addresses[j] = w->endpoint[j]->address;
        }
        if (shm_settle(w->endpoint[r]) != DDL_OK) {
            exit(1);
        }
    }
}

static inline void native_enter(shm *t) {
    if (shm_enter(t, native_prepare) != DDL_OK) {
        fprintf(stderr, "rank %d cannot enter the segment\n", (int)t->rank);
        exit(1);
    }
    t->stage = SHM_JOINED;
}

/* The segment, and everybody in it; forked ranks map it once more, as it is not inherited. */
static inline void native_world_make(native_world *w, int n) {
    native_addresses(w, n);
    shm *leader = w->endpoint[0];
    if (shm_make(leader) != DDL_OK) {
        exit(1);
    }
    native_enter(leader);
    for (int r = 1; r < n; r++) {
        shm *t = w->endpoint[r];
        t->fd = leader->fd;
        t->base = leader->base;
        native_enter(t);
    }
}

static inline void native_fork_rank(int rank, int n, void *arg) {
    native_world *w = arg;
    shm *t = w->endpoint[rank];
    if (shm_map(t) != DDL_OK) {
        exit(1);
    }
    w->fn(t, rank, n, w->arg);
    t->fd = dup(t->fd); /* the others' endpoints hold the same number */
    shm_transport.close(t);
}

static inline void native_thread_rank(int rank, int n, void *arg) {
    native_world *w = arg;
    w->fn(w->endpoint[rank], rank, n, w->arg);
}

static inline void native_world_free(native_world *w) {
    uint8_t *base = w->endpoint[0]->base;
    int fd = w->endpoint[0]->fd;
    for (int r = 0; r < w->n; r++) {
        w->endpoint[r]->base = r == 0 ? base : NULL;
        w->endpoint[r]->fd = r == 0 ? fd : -1;
    }
    for (int r = w->n - 1; r >= 0; r--) {
        shm_transport.close(w->endpoint[r]);
    }
}

/* All ranks run w->fn in the world that was made, and leave it. */
static inline void native_world_run(native_world *w, int n, bool threads) {
    if (threads) {
        ranks_threads(n, native_thread_rank, w);
    } else {
        ranks_fork(n, native_fork_rank, w, 200);
    }
    native_world_free(w);
}

#endif

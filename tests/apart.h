/* apart.h: ranks that say they are on hosts of their own, and what tests of devices between hosts have in common.
 *
 *     if (!apart_possible()) SKIP(...)               before ranks start
 *     ddl_context *c = apart_join(rank, n, job, host);   in each, forked */
#ifndef TEST_APART_H
#define TEST_APART_H

#include "coll.h"

/* False: this machine has no network but loopback, over which no other host could be reached. */
static inline bool apart_possible(void) {
    char address[INET_ADDRSTRLEN];
    return ranks_own_address(address);
}

static inline ddl_context *apart_join(int rank, int n, const coll_job *job, int host) {
    char name[INET_ADDRSTRLEN];
    CHECK(ranks_own_address(name));
    setenv("MASTER_ADDR", name, 1);
    snprintf(name, sizeof name, "host%d", host);
    setenv("DDL_HOST_ID", name, 1);
    return coll_join(rank, n, job);
}

/* Operations that went by an algorithm. */
static inline int64_t apart_calls(ddl_context *c, const char *algorithm) {
    ddl_stats s;
    int64_t calls = 0;
    CHECK_EQ(ddl_stats_get(c, &s), DDL_OK);
    for (int i = 0; i < DDL_STATS_ALGORITHMS && s.algorithms[i].name != NULL; i++) {
        calls += strcmp(s.algorithms[i].name, algorithm) == 0 ? (int64_t)s.algorithms[i].operations : 0;
    }
    return calls;
}

/* Bytes copied between the host and devices for ddl. */
static inline int64_t apart_staged(ddl_context *c) {
    ddl_stats s;
    CHECK_EQ(ddl_stats_get(c, &s), DDL_OK);
    return (int64_t)(s.device_bytes_in + s.device_bytes_out);
}

static inline ddl_tensor apart_tensor(ddl_context *c, int32_t device, const float *host, int64_t count) {
    ddl_tensor t = {0};
    CHECK_EQ(ddl_tensor_alloc_on(c, device, DDL_F32, 1, &count, &t), DDL_OK);
    CHECK_EQ(ddl_tensor_copy(c, t, ddl_tensor_1d(host, DDL_F32, count)), DDL_OK);
    return t;
}

/* A scatterv or gatherv among three ranks in which rank `none` has nothing: all that it passes (unless it is the root) is an
 * empty tensor, which says that it is on a device. The others' parts are of 40009 + r elements. Where nothing is written
 * there is poison still. */
static inline void apart_empty_part(ddl_group *w, int32_t device, bool scatters, int root, int none,
                                    const char *algorithm) {
    enum { N = 3, LEAST = 40009, GAP = 5 };
    ddl_context *c = ddl_group_context(w);
    int rank = ddl_rank(w);
    int64_t counts[N], offsets[N], whole = GAP, wrong = 0;
    for (int r = 0; r < N; r++) {
        counts[r] = r == none ? 0 : LEAST + r;
        offsets[r] = whole;
        whole += counts[r] + GAP;
    }
    float *all = (float *)malloc((size_t)whole * sizeof *all), *own = (float *)malloc((LEAST + N) * sizeof *own);
    for (int64_t i = 0; i < whole; i++) {
        all[i] = scatters ? (float)(i % 977) : -1;
    }
    for (int64_t i = 0; i < LEAST + N; i++) {
        own[i] = scatters ? -1 : (float)(rank * 1000 + i % 977);
    }
    ddl_tensor part = ddl_tensor_1d(NULL, DDL_F32, 0), block = {0};
    part.device = device;
    part = counts[rank] > 0 ? apart_tensor(c, device, own, counts[rank]) : part;
    block = rank == root ? apart_tensor(c, device, all, whole) : block;
    int64_t before = apart_calls(c, algorithm);
    CHECK_EQ(scatters ? ddl_scatterv(w, block, part, counts, offsets, root)
                      : ddl_gatherv(w, part, block, counts, offsets, root), DDL_OK);
    CHECK_EQ(apart_calls(c, algorithm), before + 1);
    if (scatters && counts[rank] > 0) {
        CHECK_EQ(ddl_tensor_copy(c, ddl_tensor_1d(own, DDL_F32, counts[rank]), part), DDL_OK);
    } else if (!scatters && rank == root) {
        CHECK_EQ(ddl_tensor_copy(c, ddl_tensor_1d(all, DDL_F32, whole), block), DDL_OK);
    }
    for (int64_t i = 0; scatters && i < counts[rank]; i++) {
        wrong += own[i] != (float)((offsets[rank] + i) % 977);
    }
    for (int64_t i = 0; !scatters && rank == root && i < whole; i++) {
        float want = -1;
        for (int r = 0; r < N; r++) {
            int64_t j = i - offsets[r];
            want = j >= 0 && j < counts[r] ? (float)(r * 1000 + j % 977) : want;
        }
        wrong += all[i] != want;
    }
    CHECK_EQ(wrong, 0);
    CHECK_EQ(counts[rank] > 0 ? ddl_tensor_free(c, &part) : DDL_OK, DDL_OK);
    CHECK_EQ(rank == root ? ddl_tensor_free(c, &block) : DDL_OK, DDL_OK);
    free(all);
    free(own);
}

/* Rank 1 of three dies in the middle of a collective of device 1: the others are told who it was, and can go on to free and
 * to finalize. */
static inline void apart_dies(ddl_context *c, int rank, ddl_kind kind, const char *algorithm) {
    int64_t count = 8 << 20;
    ddl_tensor t = {0};
    ddl_request *r = NULL;
    ddl_status status = DDL_OK;
    bool began = false;
    REQUIRE(c != NULL);
    CHECK_EQ(ddl_tensor_alloc_on(c, 1, DDL_U8, 1, &count, &t), DDL_OK);
    for (int i = 0; status == DDL_OK && i < 1000; i++) {
        status = kind == DDL_BROADCAST ? ddl_ibroadcast(ddl_world(c), t, 0, &r)
                                       : ddl_iall_reduce(ddl_world(c), t, t, DDL_MAX, &r);
        began = status == DDL_OK;
        if (rank == 1 && i == 2) {
            raise(SIGKILL);
        }
        status = status == DDL_OK ? ddl_wait(&r, NULL) : status;
    }
    CHECK_EQ(status, DDL_ERR_PEER);
    CHECK_STR(ddl_error(c), "rank 1");
    if (began) { /* one that knew before has chosen none */
        CHECK_STR(ddl_error(c), algorithm);
    }
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    coll_leave(c);
}

/* Runs a function of ranks that ends in apart_dies. */
static inline void apart_run_dies(ranks_fn fn, void *arg) {
    ranks r;
    ranks_start(&r, 3, fn, arg);
    ranks_wait(&r, 60);
    CHECK_EQ(r.timed_out, 0);
    CHECK(r.status[0] == 0 && r.status[2] == 0);
    CHECK(WIFSIGNALED(r.status[1]) && WTERMSIG(r.status[1]) == SIGKILL);
}

#endif /* TEST_APART_H */

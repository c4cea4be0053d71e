/* Collectives of tensors on devices between hosts, by a stand-in: ranks that say they are on different hosts send pieces
 * through pinned memory (the plans: test_plans.c). Every kind, types, sizes that divide nothing, in place, strided, partly
 * in ordinary memory, ops of a program; how much is pinned; a rank that dies, and a device that fails.
 * tests/run: variants=gcc,asan,tsan timeout=120 libs=-ldl */
#include "apart.h"
#include "device.h"

typedef struct host_job {
    coll_job job;
    int hosts[4]; /* by rank: which host it says it is on */
} host_job;

static ddl_context *join(int rank, int n, void *arg) {
    const host_job *j = (const host_job *)arg;
    return apart_join(rank, n, &j->job, j->hosts[rank]);
}

/* False: this machine has no network. */
static bool run(ranks_fn fn, int n, host_job j) {
    if (!apart_possible()) {
        return false;
    }
    standin("");
    coll_job_make(&j.job);
    ranks_fork(n, fn, &j, 100);
    return true;
}

/* Larger than 64 KiB in all, so that they go by pieces. */
static bool some_cases(ddl_group *g, unsigned *random) {
    static const ddl_dtype types[] = {DDL_F32, DDL_F16, DDL_I64, DDL_BF16, DDL_U8, DDL_F64};
    int n = ddl_size(g);
    int64_t counts[16];
    bool ok = true;
    for (int kind = DDL_BROADCAST; ok && kind < DDL_ALL_TO_ALLV; kind++) {
        for (int i = 0; ok && i < 3; i++) {
            unsigned draw = coll_random(random), more = coll_random(random);
            for (int b = 0; b < n; b++) {
                counts[b] = b == (int)(draw % (unsigned)n) ? 70001 : (int64_t)(coll_random(random) % 3000);
            }
            coll_case k = {.kind = (ddl_kind)kind,
                           .dtype = types[draw % 6],
                           .op = coll_reduces((ddl_kind)kind) ? draw / 8 % 2 == 0 ? DDL_MAX : DDL_SUM : DDL_OP_NONE,
                           .root = coll_rooted((ddl_kind)kind) ? (int)(draw / 16 % (unsigned)n) : 0,
                           .count = 70001 + (int64_t)(more % 5000),
                           .in_place = draw / 128 % 2 == 0,
                           .way = (coll_way)(draw / 512 % 3),
                           .in_layout = (coll_layout)(more / 8 % 6),
                           .out_layout = (coll_layout)(more / 64 % 6),
                           .salt = more / 16 % 50,
                           .counts = kind >= DDL_GATHERV ? counts : NULL,
                           .gap = kind == DDL_REDUCE_SCATTERV ? -1 : (int64_t)(more / 1024 % 3) - 1,
                           .in_device = 1 + (int32_t)((more / 4096 + (unsigned)ddl_rank(g)) % 2)};
            k.in_layout = k.in_layout > COLL_TRANSPOSED ? COLL_PACKED : k.in_layout;
            k.out_layout = k.out_layout > COLL_TRANSPOSED ? COLL_PACKED : k.out_layout;
            k.out_device = k.in_place || kind == DDL_BROADCAST ? k.in_device : 1;
            if (k.in_place && (coll_many_in(k.kind) || coll_many_out(k.kind))) {
                k.in_layout = k.out_layout = COLL_PACKED;
            }
            if (k.op == DDL_SUM && kind != DDL_SCAN && kind != DDL_EXSCAN) {
                k.op = DDL_AVG; /* of f16 scaled on the way in, too */
            }
            ok = coll_check(g, &k);
        }
    }
    return ok;
}

static void collectives(int rank, int n, void *arg) {
    ddl_context *c = join(rank, n, arg);
    REQUIRE(c != NULL);
    unsigned random = coll_seed() * 23 + (unsigned)n;
    if (some_cases(ddl_world(c), &random)) {
        CHECK_EQ(apart_calls(c, "device_pieces"), 3 * (DDL_ALL_TO_ALLV - DDL_BROADCAST));
        CHECK(coll_force(ddl_world(c), "ring")); /* for those that have one; devices do not hinder it */
        coll_case k = {.kind = DDL_ALL_GATHER, .dtype = DDL_I32, .count = 50021, .in_device = 1, .out_device = 1};
        CHECK(coll_check(ddl_world(c), &k));
        CHECK_EQ(apart_calls(c, "device_pieces"), 3 * (DDL_ALL_TO_ALLV - DDL_BROADCAST) + 1);
        CHECK(coll_force(ddl_world(c), "auto"));
    }
    coll_leave(c);
}

TEST(every_kind_between_two_hosts) {
    if (!run(collectives, 2, (host_job){.hosts = {0, 1}})) {
        SKIP("this machine has no network but loopback");
    }
}

TEST(every_kind_between_hosts_of_unequal_size) {
    if (!run(collectives, 4, (host_job){.hosts = {0, 1, 1, 2}})) {
        SKIP("this machine has no network but loopback");
    }
}

/* ---- ops of a program ---- */

/* The second, where it is not 0: not commutative. */
static void last(void *dst, const void *a, const void *b, int64_t count, ddl_dtype dtype, void *user) {
    (void)dtype, (void)user;
    for (int64_t i = 0; i < count; i++) {
        ((float *)dst)[i] = ((const float *)b)[i] != 0 ? ((const float *)b)[i] : ((const float *)a)[i];
    }
}

enum { MANY = 40009 };

static void ops(int rank, int n, void *arg) {
    ddl_context *c = join(rank, n, arg);
    REQUIRE(c != NULL);
    float *in = (float *)malloc(MANY * sizeof *in), *out = (float *)malloc(MANY * sizeof *out);
    ddl_op all[2];
    CHECK_EQ(ddl_op_create_scaled_sum(c, rank + 1.0, &all[0]), DDL_OK);
    CHECK_EQ(ddl_op_create(c, last, NULL, 0, &all[1]), DDL_OK);
    for (int i = 0; i < MANY; i++) {
        in[i] = i % (n + 1) > rank ? (float)(rank * 10 + i % 7 + 1) : 0;
    }
    ddl_tensor t = standin_tensor(c, 1, in, DDL_F32, MANY), to = standin_tensor(c, 1, NULL, DDL_F32, MANY);
    for (int o = 0; o < 2; o++) {
        CHECK_EQ(ddl_all_reduce(ddl_world(c), t, to, all[o]), DDL_OK);
        standin_read(c, to, out);
        int wrong = 0;
        for (int i = 0; i < MANY; i++) {
            float want = 0;
            for (int r = 0; r < n; r++) {
                float x = i % (n + 1) > r ? (float)(r * 10 + i % 7 + 1) : 0;
                want = o == 0 ? want + x * (float)(r + 1) : x != 0 ? x : want;
            }
            wrong += out[i] != want;
        }
        CHECK_EQ(wrong, 0);
    }
    CHECK_EQ(apart_calls(c, "device_pieces"), 2);
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &to), DDL_OK);
    free(in);
    free(out);
    coll_leave(c);
}

TEST(ops_of_programs) {
    if (!run(ops, 3, (host_job){.hosts = {0, 1, 2}})) {
        SKIP("this machine has no network but loopback");
    }
}

/* ---- memory ---- */

/* 18 MiB in all go in pieces of 2 MiB, or of 1 where they are reduced: three of them, each with what its algorithm keeps
 * beside it, rounded up to a power of two. Whole tensors would be blocks of 32 MiB. */
static void pinned(int rank, int n, void *arg) {
    enum { TOTAL = 18 << 20, PART = TOTAL / 3, PIECE = 2 << 20 };
    ddl_context *c = join(rank, n, arg);
    REQUIRE(c != NULL && n == 3);
    ddl_group *w = ddl_world(c);
    ddl_tensor whole[2] = {standin_tensor(c, 1, NULL, DDL_U8, TOTAL), standin_tensor(c, 1, NULL, DDL_U8, TOTAL)};
    ddl_tensor part = standin_tensor(c, 1, NULL, DDL_U8, PART);
    const standin_state *s = standin_of();
    CHECK_EQ(s->pinned_bytes, 0);
    for (int kind = 0; kind < 8; kind++) {
        CHECK_EQ(kind == 0   ? ddl_broadcast(w, whole[0], 1)
                 : kind == 1 ? ddl_all_gather(w, part, whole[1])
                 : kind == 2 ? ddl_reduce_scatter(w, whole[0], part, DDL_MAX)
                 : kind == 3 ? ddl_all_reduce(w, whole[0], whole[1], DDL_MAX)
                 : kind == 4 ? ddl_reduce(w, whole[0], whole[1], DDL_MAX, 2)
                 : kind == 5 ? ddl_gather(w, part, whole[1], 1)
                 : kind == 6 ? ddl_scatter(w, whole[0], part, 0)
                             : ddl_all_to_all(w, whole[0], whole[1]), DDL_OK);
    }
    size_t largest = s->pinned_largest;
    CHECK(largest >= 2 * PIECE); /* three pieces are under way */
    CHECK(largest <= 8 * PIECE);
    CHECK(s->pinned_bytes <= (8 + 4 + 2) * PIECE); /* a block of each size is kept */
    CHECK_EQ(apart_calls(c, "device_pieces"), 8);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(ddl_tensor_free(c, &whole[i]), DDL_OK);
    }
    CHECK_EQ(ddl_tensor_free(c, &part), DDL_OK);
    coll_leave(c);
}

TEST(little_is_pinned) {
    setenv("DDL_STANDIN_MB", "128", 1);
    if (!run(pinned, 3, (host_job){.hosts = {0, 1, 2}})) {
        SKIP("this machine has no network but loopback");
    }
    unsetenv("DDL_STANDIN_MB");
}

/* ---- parts of no elements ---- */

static void empty_parts(int rank, int n, void *arg) {
    ddl_context *c = join(rank, n, arg);
    REQUIRE(c != NULL && n == 3);
    for (int i = 0; i < 6; i++) { /* both kinds; the root has nothing, or another rank */
        apart_empty_part(ddl_world(c), 1 + (rank + i) % 2, i % 2 == 1, 1, i / 2, "device_pieces");
    }
    coll_leave(c);
}

TEST(an_empty_part_is_where_it_says) {
    if (!run(empty_parts, 3, (host_job){.hosts = {0, 1, 2}})) {
        SKIP("this machine has no network but loopback");
    }
}

/* ---- many tensors as one ---- */

/* Floats on both devices, one with gaps, and one in ordinary memory: packed on a device, and in pieces from there; integers
 * that are too few for that, as a whole. Rank r has r + i + j. */
static void many(int rank, int n, void *arg) {
    enum { LIST = 5, PIECE = 1 << 20 };
    static const int64_t counts[LIST] = {1 << 20, 300007, 1, 700001, 1000};
    static const int32_t devices[LIST] = {1, 2, DDL_HOST, 1, 1};
    ddl_context *c = join(rank, n, arg);
    REQUIRE(c != NULL);
    ddl_tensor list[LIST], whole[LIST];
    float *host[LIST];
    for (int way = 0; way < 2; way++) {
        for (int i = 0; i < LIST; i++) {
            int64_t step = i == 1 ? 3 : 1;
            ddl_dtype dtype = i == 4 ? DDL_I32 : DDL_F32;
            host[i] = (float *)malloc((size_t)(counts[i] * step) * 4);
            for (int64_t j = 0; j < counts[i] * step; j++) {
                coll_put(&host[i][j], dtype, (double)(rank + i + j % 1000), 0);
            }
            whole[i] = devices[i] == DDL_HOST ? ddl_tensor_1d(host[i], dtype, counts[i] * step)
                                              : standin_tensor(c, devices[i], host[i], dtype, counts[i] * step);
            list[i] = whole[i];
            list[i].shape[0] = counts[i];
            list[i].strides[0] = step;
        }
        int64_t before = apart_calls(c, "device_pieces");
        ddl_request *r = NULL;
        CHECK_EQ(way == 0 ? ddl_all_reduce_many(ddl_world(c), list, LIST, DDL_AVG)
                          : ddl_iall_reduce_many(ddl_world(c), list, LIST, DDL_AVG, &r), DDL_OK);
        CHECK_EQ(way == 0 ? DDL_OK : ddl_wait(&r, NULL), DDL_OK);
        CHECK_EQ(apart_calls(c, "device_pieces") - before, 1);
        for (int i = 0; i < LIST; i++) {
            int64_t step = i == 1 ? 3 : 1, wrong = 0;
            if (devices[i] != DDL_HOST) {
                standin_read(c, whole[i], host[i]);
            }
            for (int64_t j = 0; j < counts[i] * step; j++) {
                float want;
                double mean = (double)(i + j % 1000) + (n - 1) / 2.0;
                coll_put(&want, whole[i].dtype, j % step != 0 ? (double)(rank + i + j % 1000) : mean, 0);
                wrong += memcmp(&want, &host[i][j], 4) != 0;
            }
            CHECK_EQ(wrong, 0);
            CHECK_EQ(devices[i] == DDL_HOST ? DDL_OK : ddl_tensor_free(c, &whole[i]), DDL_OK);
            free(host[i]);
        }
    }
    CHECK(standin_of()->pinned_largest > 0 && standin_of()->pinned_largest <= 8 * PIECE); /* a block of 16 holds them whole */
    coll_leave(c);
}

TEST(many_tensors_go_by_pieces) {
    if (!run(many, 3, (host_job){.hosts = {0, 1, 2}})) {
        SKIP("this machine has no network but loopback");
    }
}

/* ---- failures ---- */

static void dies(int rank, int n, void *arg) { apart_dies(join(rank, n, arg), rank, DDL_BROADCAST, "device_pieces"); }

TEST(a_rank_that_dies_is_named) {
    host_job j = {.hosts = {0, 1, 2}};
    if (!apart_possible()) {
        SKIP("this machine has no network but loopback");
    }
    standin("");
    coll_job_make(&j.job);
    apart_run_dies(dies, &j);
}

/* A copy fails on rank 1's device: all are told which rank it was. */
static void fails(int rank, int n, void *arg) {
    ddl_context *c = join(rank, n, arg);
    REQUIRE(c != NULL);
    ddl_tensor t = standin_tensor(c, 1, NULL, DDL_F32, 1 << 20), to = standin_tensor(c, 1, NULL, DDL_F32, (1 << 20) * n);
    CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
    standin_of()->fail_calls = rank == 1 ? 4 : 0;
    CHECK(ddl_all_gather(ddl_world(c), t, to) < 0);
    CHECK_STR(ddl_error(c), "rank 1");
    standin_of()->fail_calls = 0;
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &to), DDL_OK);
    coll_leave(c);
}

TEST(a_device_that_fails_is_named) {
    if (!run(fails, 3, (host_job){.hosts = {0, 1, 2}})) {
        SKIP("this machine has no network but loopback");
    }
}

/* Rank 0 has its tensor in ordinary memory, alone or in a list: both calls are spelled out, nothing is written. */
static void differ(int rank, int n, void *arg) {
    ddl_context *c = join(rank, n, arg);
    REQUIRE(c != NULL);
    enum { COUNT = 100000 };
    unsigned char *data = (unsigned char *)malloc(COUNT), *back = (unsigned char *)malloc(COUNT);
    memset(data, rank + 1, COUNT);
    ddl_tensor t = rank == 0 ? ddl_tensor_1d(data, DDL_U8, COUNT) : standin_tensor(c, 1, data, DDL_U8, COUNT);
    for (int many = 0; many < 2; many++) {
        ddl_group *w = NULL;
        CHECK_EQ(ddl_group_split(ddl_world(c), 0, 0, &w), DDL_OK);
        CHECK_EQ(many == 0 ? ddl_all_reduce(w, t, t, DDL_SUM) : ddl_all_reduce_many(w, &t, 1, DDL_SUM), DDL_ERR_MISMATCH);
        CHECK_STR(ddl_error(c), "device_pieces");
        CHECK_STR(ddl_error(c), many == 0 ? "all_reduce(" : "all_reduce_many(");
        CHECK_STR(ddl_error(c), "either all ranks pass one on a device or none");
        memset(back, rank + 1, COUNT);
        if (rank > 0) {
            standin_read(c, t, data);
        }
        CHECK(memcmp(data, back, COUNT) == 0);
        CHECK_EQ(ddl_group_free(&w), DDL_OK);
    }
    CHECK_EQ(rank > 0 ? ddl_tensor_free(c, &t) : DDL_OK, DDL_OK);
    free(data);
    free(back);
    coll_leave(c);
}

TEST(devices_here_and_ordinary_memory_there) {
    if (!run(differ, 3, (host_job){.hosts = {0, 1, 2}})) {
        SKIP("this machine has no network but loopback");
    }
}

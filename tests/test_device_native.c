/* Collectives of tensors on devices by the devices themselves (DDL_TRANSPORT_DEVICE), through a stand-in: in place and
 * not, strided, partly in ordinary memory, scaled, persistent; in groups made later; a call that differs, a rank that
 * leaves.
 * tests/run: variants=gcc,asan timeout=120 libs=-ldl */
#include "device.h"

static bool some_cases(ddl_group *g, int per_kind, unsigned *random) {
    static const ddl_kind kinds[] = {DDL_BROADCAST, DDL_REDUCE, DDL_ALL_REDUCE, DDL_ALL_GATHER, DDL_REDUCE_SCATTER,
                                     DDL_ALL_TO_ALL, DDL_GATHER, DDL_SCAN};
    int n = ddl_size(g);
    bool ok = true;
    for (size_t at = 0; ok && at < sizeof kinds / sizeof kinds[0]; at++) {
        for (int i = 0; ok && i < per_kind; i++) {
            static const int64_t sizes[] = {0, 1, 7, 300, 30000};
            unsigned draw = coll_random(random), more = coll_random(random);
            ddl_kind kind = kinds[at];
            coll_case k = {.kind = kind,
                           .dtype = draw % 3 == 0 ? DDL_F32 : draw % 3 == 1 ? DDL_F64 : DDL_I64,
                           .op = !coll_reduces(kind) ? DDL_OP_NONE : draw / 4 % 3 == 0 ? DDL_MAX : DDL_SUM,
                           .root = coll_rooted(kind) ? (int)(draw / 16 % (unsigned)n) : 0,
                           .count = sizes[draw / 64 % 5],
                           .in_place = draw / 512 % 3 == 0,
                           .way = (coll_way)(draw / 2048 % 3),
                           .in_layout = (coll_layout)(more % 4),
                           .out_layout = (coll_layout)(more / 4 % 4),
                           .salt = more / 16 % 50};
            /* at least one of the tensors that each rank looks at is on a device */
            k.in_device = 1 + (int32_t)((more / 1024 + (unsigned)ddl_rank(g)) % 2);
            k.out_device = more / 4096 % 3 == 0 ? DDL_HOST : k.in_device;
            if (k.in_place || kind == DDL_BROADCAST) {
                k.out_device = k.in_device;
            }
            if (k.in_place && (coll_many_in(kind) || coll_many_out(kind))) {
                k.in_layout = k.out_layout = COLL_PACKED;
            }
            ok = coll_check(g, &k);
        }
    }
    return ok;
}

static void collectives(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    unsigned random = coll_seed() * 19 + (unsigned)n;
    standin_state *s = standin_of();
    int before = s->natives;
    bool ok = some_cases(ddl_world(c), 10, &random);
    CHECK(s->natives > before + 30);
    ddl_group *half = NULL;
    if (ok) {
        CHECK_EQ(ddl_group_split(ddl_world(c), rank % 2, 0, &half), DDL_OK);
        unsigned other = random + (unsigned)(rank % 2);
        some_cases(half, 3, &other);
        CHECK_EQ(ddl_group_free(&half), DDL_OK);
    }
    ddl_stats stats;
    uint64_t natives = 0;
    CHECK_EQ(ddl_stats_get(c, &stats), DDL_OK);
    for (int i = 0; i < DDL_STATS_TRANSPORTS && stats.transports[i].name != NULL; i++) {
        natives += strcmp(stats.transports[i].name, "standin") == 0 ? stats.transports[i].native_operations : 0;
    }
    CHECK(natives > 30);
    coll_leave(c);
}

TEST(collectives_by_the_device) {
    standin("native");
    for (int n = 2; n <= 4; n++) {
        coll_job job;
        coll_job_make(&job);
        ranks_threads(n, collectives, &job);
    }
}

/* An average, a scaled sum, and a function of the program's own, which no device can run. */
static void plus(void *dst, const void *a, const void *b, int64_t count, ddl_dtype dtype, void *user) {
    (void)dtype, (void)user;
    for (int64_t i = 0; i < count; i++) {
        ((float *)dst)[i] = ((const float *)a)[i] + ((const float *)b)[i];
    }
}

static void ops(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    ddl_op scaled, own;
    CHECK_EQ(ddl_op_create_scaled_sum(c, rank + 1.0, &scaled), DDL_OK);
    CHECK_EQ(ddl_op_create(c, plus, NULL, 1, &own), DDL_OK);
    float in[50], out[50];
    for (int i = 0; i < 50; i++) {
        in[i] = (float)(rank + i);
    }
    ddl_tensor t = standin_tensor(c, 1, in, DDL_F32, 50), to = standin_tensor(c, 1, NULL, DDL_F32, 50);
    const ddl_op all[3] = {DDL_AVG, scaled, own};
    for (int o = 0; o < 3; o++) {
        CHECK_EQ(ddl_all_reduce(ddl_world(c), t, to, all[o]), DDL_OK);
        standin_read(c, to, out);
        int wrong = 0;
        for (int i = 0; i < 50; i++) {
            float want = 0;
            for (int r = 0; r < n; r++) {
                want += (float)(r + i) * (o == 1 ? (float)(r + 1) : 1.0f);
            }
            wrong += out[i] != (o == 0 ? want / (float)n : want);
        }
        CHECK_EQ(wrong, 0);
    }
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &to), DDL_OK);
    coll_leave(c);
}

TEST(averages_and_ops_of_programs) {
    standin("native");
    coll_job job;
    coll_job_make(&job);
    ranks_threads(2, ops, &job);
    ranks_threads(4, ops, &job);
}

/* Rank 0 has its tensor in ordinary memory, the others on devices: both calls are spelled out, nothing is written. */
static void differ(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    float data[64], back[64];
    for (int i = 0; i < 64; i++) {
        data[i] = (float)i;
    }
    ddl_tensor t = rank == 0 ? ddl_tensor_1d(data, DDL_F32, 64) : standin_tensor(c, 1, data, DDL_F32, 64);
    CHECK_EQ(ddl_all_reduce(ddl_world(c), t, t, DDL_SUM), DDL_ERR_MISMATCH);
    CHECK_STR(ddl_error(c), "native_device");
    if (rank > 0) {
        standin_read(c, t, back);
        CHECK(memcmp(back, data, sizeof data) == 0);
        CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    }
    coll_leave(c);
}

TEST(devices_here_and_ordinary_memory_there) {
    standin("native");
    coll_job job;
    coll_job_make(&job);
    ranks_threads(3, differ, &job);
}

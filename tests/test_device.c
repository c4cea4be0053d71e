/* Tensors on devices, by a stand-in whose memory the CPU cannot touch: every collective in every form, mixed with
 * ordinary tensors, strided, in place, many at once; messages of all sizes, to oneself too; ranks that are threads and
 * processes. Every byte, gaps and guards included, is compared with an oracle.
 * tests/run: variants=gcc,asan,tsan timeout=120 libs=-ldl */
#include "device.h"

/* ---- collectives ---- */

static bool kind_allows(ddl_kind kind, coll_case *k) {
    bool part = k->in_place && (coll_many_in(kind) || coll_many_out(kind));
    if (kind == DDL_ALL_TO_ALLV || (part && coll_base(kind) != DDL_ALL_TO_ALL)) {
        k->in_layout = k->out_layout = COLL_PACKED;
    }
    k->in_place = k->in_place && kind != DDL_ALL_TO_ALLV && kind != DDL_BARRIER;
    return true;
}

static bool some_cases(ddl_group *g, int per_kind, unsigned *random) {
    int n = ddl_size(g);
    int64_t counts[16];
    bool ok = true;
    for (int kind = DDL_BROADCAST; ok && kind <= DDL_ALL_TO_ALLV; kind++) {
        for (int i = 0; ok && i < per_kind; i++) {
            static const int64_t sizes[] = {0, 1, 7, 300, 30000};
            unsigned draw = coll_random(random), more = coll_random(random);
            for (int b = 0; b < n * n; b++) {
                counts[b] = coll_random(random) % 3 == 0 ? 0 : coll_random(random) % 200;
            }
            coll_case k = {.kind = (ddl_kind)kind,
                           .dtype = draw % 3 == 0 ? DDL_F32 : draw % 3 == 1 ? DDL_F16 : DDL_I64,
                           .op = coll_reduces((ddl_kind)kind) ? DDL_SUM : DDL_OP_NONE,
                           .root = coll_rooted((ddl_kind)kind) ? (int)(draw / 4 % (unsigned)n) : 0,
                           .count = sizes[draw / 16 % 5],
                           .in_place = draw / 128 % 3 == 0,
                           .way = (coll_way)(draw / 512 % 3),
                           .in_layout = (coll_layout)(more % 4),
                           .out_layout = (coll_layout)(more / 4 % 4),
                           .salt = more / 16 % 50,
                           .counts = kind >= DDL_GATHERV ? counts : NULL,
                           .gap = kind == DDL_REDUCE_SCATTERV ? -1 : (int64_t)(more / 1024 % 3) - 1,
                           /* each rank for itself: those of one call need not be alike */
                           .in_device = (int32_t)((more / 4096 + (unsigned)ddl_rank(g) * (draw / 4096)) % 3),
                           .out_device = (int32_t)((more / 16384 + (unsigned)ddl_rank(g)) % 3)};
            if (k.op == DDL_SUM && k.kind == DDL_ALL_REDUCE && draw % 2 == 0) {
                k.op = DDL_AVG; /* of f16 scaled on the way in, too */
            }
            ok = kind_allows(k.kind, &k) && coll_check(g, &k);
        }
    }
    return ok;
}

static void collectives(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    unsigned random = coll_seed() * 17 + (unsigned)n;
    some_cases(ddl_world(c), getenv("DDL_STANDIN_BARE")[0] == '1' ? 2 : 5, &random);
    ddl_stats s;
    CHECK_EQ(ddl_stats_get(c, &s), DDL_OK);
    CHECK(s.device_bytes_in > 0 && s.device_bytes_out > 0);
    coll_leave(c);
}

static void run_collectives(const char *bare, bool forked) {
    standin(bare);
    for (int n = 1; n <= 4; n++) {
        coll_job job;
        coll_job_make(&job);
        if (forked) {
            ranks_fork(n, collectives, &job, 60);
        } else {
            ranks_threads(n, collectives, &job);
        }
    }
}

TEST(collectives_of_threads) { run_collectives("", false); }
TEST(collectives_of_threads_on_a_poor_device) { run_collectives("1", false); }
TEST(collectives_of_processes) { run_collectives("", true); }

/* ---- many tensors ---- */

enum { MANY = 7 };

/* Of three types, on the host and on both devices, some strided. Rank r has r + 1 + i + element. */
static void many(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    static const ddl_dtype types[MANY] = {DDL_F32, DDL_I64, DDL_F32, DDL_I32, DDL_F32, DDL_I64, DDL_I32};
    for (int way = 0; way < 2; way++) {
        ddl_tensor list[MANY];
        unsigned char *host[MANY];
        for (int i = 0; i < MANY; i++) {
            int64_t count = 11 * (i + 1);
            size_t size = ddl_dtype_bytes(types[i]);
            host[i] = (unsigned char *)calloc((size_t)count * 2, size);
            for (int64_t j = 0; j < count * 2; j++) {
                coll_put(host[i] + (size_t)j * size, types[i], (double)(rank + 1 + i + j), 0);
            }
            list[i] = i % 3 == 0 ? ddl_tensor_1d(host[i], types[i], 2 * count)
                                 : standin_tensor(c, i % 3, host[i], types[i], 2 * count);
            list[i].shape[0] = count;
            list[i].strides[0] = i % 2 + 1;
        }
        ddl_request *r = NULL;
        if (way == 0) {
            CHECK_EQ(ddl_all_reduce_many(ddl_world(c), list, MANY, DDL_SUM), DDL_OK);
        } else {
            CHECK_EQ(ddl_iall_reduce_many(ddl_world(c), list, MANY, DDL_SUM, &r), DDL_OK);
            CHECK_EQ(ddl_wait(&r, NULL), DDL_OK);
        }
        for (int i = 0; i < MANY; i++) {
            int64_t count = 11 * (i + 1), step = i % 2 + 1, wrong = 0;
            size_t size = ddl_dtype_bytes(types[i]);
            ddl_tensor whole = list[i];
            whole.shape[0] = 2 * count;
            whole.strides[0] = 0;
            if (i % 3 != 0) {
                standin_read(c, whole, host[i]);
            }
            for (int64_t j = 0; j < 2 * count; j++) {
                bool in = j % step == 0 && j / step < count;
                unsigned char want[16];
                double all = (double)n * (double)(1 + i + j) + n * (n - 1) / 2.0;
                coll_put(want, types[i], in ? all : (double)(rank + 1 + i + j), 0);
                wrong += memcmp(want, host[i] + (size_t)j * size, size) != 0;
            }
            CHECK_EQ(wrong, 0);
            if (i % 3 != 0) {
                CHECK_EQ(ddl_tensor_free(c, &whole), DDL_OK);
            }
            free(host[i]);
        }
    }
    coll_leave(c);
}

TEST(many_tensors_here_and_there) {
    standin("");
    coll_job job;
    coll_job_make(&job);
    ranks_threads(3, many, &job);
}

/* ---- messages ---- */

enum { BIG = 300000 };

static void fill_bytes(unsigned char *at, int from, int tag, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i++) {
        at[i] = (unsigned char)(from * 31 + tag * 7 + i * 13 + (i >> 8) * 5);
    }
}

/* Rank 0 sends each size from device or host, strided or not, and rank 1 receives it there or there. In order of tags on
 * purpose: of one tag, messages from devices and from the host must keep their order. */
static void messages(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    static const int64_t sizes[] = {1, 60, 5000, 65536, BIG};
    enum { EACH = 12 };
    ddl_group *w = ddl_world(c);
    for (int s = 0; s < 5; s++) {
        ddl_request *requests[EACH];
        ddl_tensor tensors[EACH];
        unsigned char *host[EACH];
        int64_t bytes = sizes[s];
        for (int i = 0; i < EACH; i++) {
            int32_t device = rank == 0 ? i % 3 : i / 2 % 3;
            host[i] = (unsigned char *)malloc((size_t)(2 * bytes));
            memset(host[i], 0xEE, (size_t)(2 * bytes));
            if (rank == 0) {
                for (int64_t j = 0; j < bytes; j++) {
                    fill_bytes(host[i] + (i % 4 == 3 ? 2 * j : j), i, s, 1);
                }
                unsigned char *packed = (unsigned char *)malloc((size_t)bytes);
                fill_bytes(packed, i, s, bytes);
                for (int64_t j = 0; j < bytes; j++) {
                    host[i][i % 4 == 3 ? 2 * j : j] = packed[j];
                }
                free(packed);
            }
            tensors[i] = device == 0 ? ddl_tensor_1d(host[i], DDL_U8, 2 * bytes)
                                     : standin_tensor(c, device, host[i], DDL_U8, 2 * bytes);
            tensors[i].shape[0] = bytes;
            tensors[i].strides[0] = i % 4 == 3 ? 2 : 1;
            CHECK_EQ(rank == 0 ? ddl_isend(w, tensors[i], 1, 5, &requests[i])
                               : ddl_irecv(w, tensors[i], 0, 5, &requests[i]), DDL_OK);
        }
        ddl_info infos[EACH];
        CHECK_EQ(ddl_wait_all(requests, EACH, infos), DDL_OK);
        for (int i = 0; i < EACH; i++) {
            ddl_tensor whole = tensors[i];
            whole.shape[0] = 2 * bytes;
            whole.strides[0] = 0;
            if (whole.device != DDL_HOST) {
                standin_read(c, whole, host[i]);
                CHECK_EQ(ddl_tensor_free(c, &whole), DDL_OK);
            }
            unsigned char *packed = (unsigned char *)malloc((size_t)bytes);
            int64_t wrong = 0;
            fill_bytes(packed, i, s, bytes);
            for (int64_t j = 0; rank == 1 && j < bytes; j++) {
                wrong += host[i][i % 4 == 3 ? 2 * j : j] != packed[j];
            }
            wrong += rank == 1 && host[i][2 * bytes - 1] != 0xEE;
            CHECK_EQ(wrong, 0);
            CHECK_EQ(infos[i].count, rank == 1 ? bytes : infos[i].count);
            free(packed);
            free(host[i]);
        }
    }
    coll_leave(c);
}

TEST(messages_of_threads) {
    standin("");
    coll_job job;
    coll_job_make(&job);
    ranks_threads(2, messages, &job);
    standin("1");
    ranks_threads(2, messages, &job);
}

TEST(messages_of_processes) {
    standin("");
    coll_job job;
    coll_job_make(&job);
    ranks_fork(2, messages, &job, 60);
}

/* A shorter message leaves the rest of a strided tensor as it is; a longer one is refused and stays. To oneself: before
 * and after its receive. */
static void to_oneself(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    ddl_group *w = ddl_world(c);
    int32_t data[100], back[200];
    for (int i = 0; i < 100; i++) {
        data[i] = 1000 + i;
    }
    memset(back, 0x77, sizeof back);
    for (int before = 0; before < 2; before++) {
        ddl_tensor from = standin_tensor(c, 1, data, DDL_I32, 100), to = standin_tensor(c, 2, back, DDL_I32, 200);
        ddl_tensor part = to, little = to;
        part.shape[0] = 100;
        part.strides[0] = 2;
        from.shape[0] = 70;
        little.shape[0] = 69;
        ddl_request *send = NULL, *recv = NULL;
        ddl_info info;
        if (before == 0) {
            CHECK_EQ(ddl_isend(w, from, rank, 3, &send), DDL_OK);
            CHECK_EQ(ddl_recv(w, little, rank, 3, &info), DDL_ERR_TRUNCATED);
            CHECK_EQ(ddl_irecv(w, part, rank, 3, &recv), DDL_OK);
        } else {
            CHECK_EQ(ddl_irecv(w, part, DDL_ANY_SOURCE, DDL_ANY_TAG, &recv), DDL_OK);
            CHECK_EQ(ddl_isend(w, from, rank, 3, &send), DDL_OK);
        }
        CHECK_EQ(ddl_wait(&send, NULL), DDL_OK);
        CHECK_EQ(ddl_wait(&recv, &info), DDL_OK);
        CHECK_EQ(info.count, 70);
        int32_t got[200];
        int wrong = 0;
        standin_read(c, to, got);
        for (int i = 0; i < 200; i++) {
            wrong += got[i] != (i % 2 == 0 && i / 2 < 70 ? 1000 + i / 2 : 0x77777777);
        }
        CHECK_EQ(wrong, 0);
        from.shape[0] = 100;
        CHECK_EQ(ddl_tensor_free(c, &from), DDL_OK);
        CHECK_EQ(ddl_tensor_free(c, &to), DDL_OK);
    }
    coll_leave(c);
}

TEST(messages_to_oneself_and_shorter_ones) {
    standin("");
    coll_job job;
    coll_job_make(&job);
    ranks_threads(1, to_oneself, &job);
    standin("1");
    ranks_threads(2, to_oneself, &job);
}

/* ---- copies ---- */

/* From each place to each place, strided or not; gaps of the destination stay, and within a device nothing passes the
 * host's memory. More than one part of what goes by it. */
static void copied(ddl_context *c, int64_t count, int32_t from, int32_t to, int64_t step_from, int64_t step_to,
                   int no_room) {
    int32_t *data = (int32_t *)malloc((size_t)(count * step_from) * 4), *back = (int32_t *)malloc((size_t)(count * step_to) * 4);
    int64_t wrong = 0;
    ddl_stats before, after;
    REQUIRE(data != NULL && back != NULL);
    for (int64_t i = 0; i < count * step_from; i++) {
        data[i] = (int32_t)(7 * i + from);
    }
    memset(back, 0x77, (size_t)(count * step_to) * 4);
    ddl_tensor src = from == 0 ? ddl_tensor_1d(data, DDL_I32, count * step_from)
                               : standin_tensor(c, from, data, DDL_I32, count * step_from);
    ddl_tensor dst = to == 0 ? ddl_tensor_1d(back, DDL_I32, count * step_to)
                             : standin_tensor(c, to, back, DDL_I32, count * step_to);
    ddl_tensor in = src, out = dst;
    in.shape[0] = out.shape[0] = count;
    in.strides[0] = step_from;
    out.strides[0] = step_to;
    CHECK_EQ(ddl_stats_get(c, &before), DDL_OK);
    standin_of()->no_room = no_room;
    CHECK_EQ(ddl_tensor_copy(c, out, in), DDL_OK);
    standin_of()->no_room = 0;
    CHECK_EQ(ddl_stats_get(c, &after), DDL_OK);
    bool inside = from == to && from != 0 && !no_room;
    CHECK_EQ(after.device_bytes_in - before.device_bytes_in, from != 0 && !inside ? 4 * (uint64_t)count : 0);
    CHECK_EQ(after.device_bytes_out - before.device_bytes_out, to != 0 && !inside ? 4 * (uint64_t)count : 0);
    if (to != 0) {
        memset(back, 0x55, (size_t)(count * step_to) * 4);
        standin_read(c, dst, back);
    }
    for (int64_t i = 0; i < count * step_to; i++) {
        wrong += back[i] != (i % step_to == 0 ? (int32_t)(7 * (i / step_to) * step_from + from) : 0x77777777);
    }
    CHECK_EQ(wrong, 0);
    if (from != 0) {
        CHECK_EQ(ddl_tensor_free(c, &src), DDL_OK);
    }
    if (to != 0) {
        CHECK_EQ(ddl_tensor_free(c, &dst), DDL_OK);
    }
    free(data);
    free(back);
}

static void copies(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    for (int way = 0; way < 3 * 3 * 2 * 2; way++) {
        copied(c, 100, way % 3, way / 3 % 3, way / 9 % 2 + 1, way / 18 * 2 + 1, 0);
        copied(c, way < 9 ? (5 << 20) / 2 + 3 : 7, way % 3, way / 3 % 3, way / 9 % 2 + 1, way / 18 * 2 + 1, 0);
    }
    copied(c, 90001, 1, 1, 2, 3, 1); /* no room there to pack: by the host */
    coll_leave(c);
}

TEST(copies_from_each_place_to_each) {
    coll_job job;
    for (int bare = 0; bare < 2; bare++) {
        standin(bare ? "1" : "");
        coll_job_make(&job);
        ranks_threads(1, copies, &job);
    }
}

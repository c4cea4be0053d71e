/* Messages between ranks whose tensors are on "GPUs", over the stand-in for the driver (cuda_driver.c): copied by the receiver
 * from the sender's memory, in every form of call; what is truncated, cancelled, given up, killed, freed and allocated again;
 * memory that cannot be shared, which goes by the host, in chunks that overlap. Whether bytes passed the host is told by
 * ddl_stats. Built and run by test_cuda_suite.py. */
#define TEST_TIMEOUT_S 200
#include "coll.h"
#include "cuda_symbol.h"

#include <sys/mman.h>
#include <sys/wait.h>

enum { SUCCESS = 0, NON_BLOCKING = 1 };

static void *enter(int device) {
    void *context = NULL;
    CHECK_EQ(DRIVER(int (*)(void **, int), "cuDevicePrimaryCtxRetain")(&context, device), SUCCESS);
    CHECK_EQ(DRIVER(int (*)(void *), "cuCtxPushCurrent_v2")(context), SUCCESS);
    return context;
}

static void *stream_on(int device) {
    void *stream = NULL;
    enter(device);
    CHECK_EQ(DRIVER(int (*)(void **, unsigned), "cuStreamCreate")(&stream, NON_BLOCKING), SUCCESS);
    return stream;
}

static unsigned char byte_of(int64_t j, int salt) { return (unsigned char)(j * 7 + j / 251 + salt * 13 + 5); }

static void paint(ddl_context *c, ddl_tensor t, int salt) {
    int64_t count = ddl_tensor_count(&t);
    unsigned char *data = malloc((size_t)count);
    for (int64_t j = 0; j < count; j++) {
        data[j] = byte_of(j, salt);
    }
    CHECK_EQ(ddl_tensor_copy(c, t, ddl_tensor_1d(data, DDL_U8, count)), DDL_OK);
    free(data);
}

static ddl_tensor bytes_on(ddl_context *c, int32_t device, int64_t count, int salt) {
    ddl_tensor t = {0};
    CHECK_EQ(ddl_tensor_alloc_on(c, device, DDL_U8, 1, &count, &t), DDL_OK);
    paint(c, t, salt);
    return t;
}

static int64_t wrong(ddl_context *c, ddl_tensor t, int64_t count, int salt) {
    unsigned char *data = malloc((size_t)count);
    int64_t bad = 0;
    ddl_tensor part = t;
    part.shape[0] = count;
    memset(data, ~byte_of(0, salt), (size_t)count);
    CHECK_EQ(ddl_tensor_copy(c, ddl_tensor_1d(data, DDL_U8, count), part), DDL_OK);
    for (int64_t j = 0; j < count; j++) {
        bad += data[j] != byte_of(j, salt);
    }
    free(data);
    return bad;
}

/* Bytes that went through the host's memory, in both directions; copies of tests themselves count too. */
static uint64_t staged(ddl_context *c) {
    ddl_stats s;
    CHECK_EQ(ddl_stats_get(c, &s), DDL_OK);
    return s.device_bytes_in + s.device_bytes_out;
}

/* A job: gpus: each rank on a GPU of its own. */
typedef struct message_job {
    coll_job job;
    int gpus, apart; /* apart: the GPUs damage what goes between them */
    int hosts;       /* so many ranks say that they are on one host; 0: they do not say */
    int no_vmm, no_ipc;
} message_job;

static ddl_context *join(int rank, int n, void *arg) {
    const message_job *j = arg;
    if (j->hosts) {
        char name[INET_ADDRSTRLEN];
        CHECK(ranks_own_address(name));
        setenv("MASTER_ADDR", name, 1);
        snprintf(name, sizeof name, "host%d", rank / j->hosts);
        setenv("DDL_HOST_ID", name, 1);
    }
    DRIVER(void (*)(int), "standin_break_peers")(j->apart);
    DRIVER(void (*)(int, int, int), "standin_without")(j->no_vmm, j->no_ipc, 0);
    ddl_context *c = coll_join(rank, n, &j->job);
    CHECK(c != NULL);
    return c;
}

static int32_t gpu_of(const message_job *j, int rank) { return j->gpus ? rank % 2 + 1 : 1; }

/* ---- forms of calls ---- */

enum { LARGE = 3000017 };

/* Each form once around the ring: every rank has sent and received `count` bytes. */
static void each_form(ddl_context *c, int rank, int n, ddl_tensor out, ddl_tensor in, int64_t count) {
    ddl_group *w = ddl_world(c);
    int to = (rank + 1) % n, from = (rank + n - 1) % n;
    ddl_info info = {0};
    ddl_request *r[2] = {NULL, NULL};
    out.shape[0] = in.shape[0] = count;
    for (int form = 0; form < 5; form++) {
        paint(c, out, rank * 10 + form);
        paint(c, in, 99);
        if (form == 0 && rank == 0) { /* blocking calls, one after the other */
            CHECK_EQ(ddl_send(w, out, to, form), DDL_OK);
            CHECK_EQ(ddl_recv(w, in, from, form, &info), DDL_OK);
        } else if (form == 0) {
            CHECK_EQ(ddl_recv(w, in, from, form, &info), DDL_OK);
            CHECK_EQ(ddl_send(w, out, to, form), DDL_OK);
        } else if (form == 1) {
            ddl_transfer both[2] = {{1, out, to, form}, {0, in, from, form}};
            ddl_info infos[2];
            CHECK_EQ(ddl_batch(w, both, 2, r), DDL_OK);
            CHECK_EQ(ddl_wait_all(r, 2, infos), DDL_OK);
            info = infos[1];
        } else if (form == 2) { /* offered before it is asked for, and by whom is not said */
            CHECK_EQ(ddl_isend(w, out, to, form, &r[0]), DDL_OK);
            CHECK_EQ(ddl_barrier(w), DDL_OK);
            CHECK_EQ(ddl_recv(w, in, DDL_ANY_SOURCE, DDL_ANY_TAG, &info), DDL_OK);
            CHECK_EQ(ddl_wait(&r[0], NULL), DDL_OK);
        } else if (form == 3) {
            CHECK_EQ(ddl_send_recv(w, out, to, form, in, from, form, &info), DDL_OK);
        } else { /* asked for before it is offered */
            CHECK_EQ(ddl_irecv(w, in, from, form, &r[0]), DDL_OK);
            CHECK_EQ(ddl_barrier(w), DDL_OK);
            CHECK_EQ(ddl_send(w, out, to, form), DDL_OK);
            CHECK_EQ(ddl_wait(&r[0], &info), DDL_OK);
        }
        CHECK_EQ(info.source, from);
        CHECK_EQ(info.tag, form);
        CHECK_EQ(info.count, count);
        CHECK_EQ(wrong(c, in, count, from * 10 + form), 0);
        CHECK_EQ(wrong(c, out, count, rank * 10 + form), 0);
    }
}

static void forms(int rank, int n, void *arg) {
    static const int64_t sizes[] = {1, 63, 4097, LARGE};
    const message_job *j = arg;
    ddl_context *c = join(rank, n, arg);
    ddl_tensor out = bytes_on(c, gpu_of(j, rank), LARGE, 0), in = bytes_on(c, gpu_of(j, rank), LARGE, 0);
    for (int i = 0; i < 4; i++) {
        uint64_t before = staged(c);
        each_form(c, rank, n, out, in, sizes[i]);
        uint64_t tests = 5 * 4 * (uint64_t)sizes[i], by_host = 5 * 2 * (uint64_t)sizes[i]; /* paint and wrong; messages */
        bool shared = !j->apart && !j->hosts && !(j->no_vmm && j->no_ipc);
        CHECK_EQ(staged(c) - before, tests + (shared ? 0 : by_host));
    }
    CHECK_EQ(ddl_tensor_free(c, &out), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &in), DDL_OK);
    coll_leave(c);
}

static void with(ranks_fn fn, int n, int threads, message_job j) {
    char address[INET_ADDRSTRLEN];
    if (j.hosts && !ranks_own_address(address)) {
        SKIP("this machine has no network but loopback");
    }
    ddl_log_fn log = j.job.config.log;
    coll_job_make(&j.job);
    j.job.config.log = log;
    if (threads) {
        ranks_threads(n, fn, &j);
        DRIVER(void (*)(int), "standin_break_peers")(0);
        DRIVER(void (*)(int, int, int), "standin_without")(0, 0, 0);
    } else {
        ranks_fork(n, fn, &j, 100);
    }
}

TEST(processes_on_one_gpu_copy_from_each_other) { with(forms, 3, 0, (message_job){.gpus = 0}); }
TEST(processes_on_two_gpus) { with(forms, 2, 0, (message_job){.gpus = 1}); }
TEST(processes_by_handles_of_cuda_ipc) { with(forms, 2, 0, (message_job){.no_vmm = 1}); }
TEST(gpus_that_damage_go_by_the_host) { with(forms, 2, 0, (message_job){.gpus = 1, .apart = 1}); }
TEST(without_cuda_ipc_by_the_host) { with(forms, 2, 0, (message_job){.no_vmm = 1, .no_ipc = 1}); }
TEST(between_hosts_in_chunks) { with(forms, 2, 0, (message_job){.hosts = 1}); }

/* ---- mixed, strided, too small, given up ---- */

static void odd_ones(int rank, int n, void *arg) {
    ddl_context *c = join(rank, n, arg);
    ddl_group *w = ddl_world(c);
    ddl_tensor t = bytes_on(c, 1, LARGE, rank), small = t;
    unsigned char *host = malloc(LARGE);
    int64_t rows = 1000;
    /* from a device to ordinary memory, and back */
    if (rank == 0) {
        CHECK_EQ(ddl_send(w, t, 1, 0), DDL_OK);
        memset(host, 0, LARGE);
        CHECK_EQ(ddl_recv(w, ddl_tensor_1d(host, DDL_U8, LARGE), 1, 1, NULL), DDL_OK);
        for (int64_t k = 0; k < LARGE; k += 997) {
            CHECK_EQ(host[k], byte_of(k, 0));
        }
    } else {
        memset(host, 0, LARGE);
        CHECK_EQ(ddl_recv(w, ddl_tensor_1d(host, DDL_U8, LARGE), 0, 0, NULL), DDL_OK);
        paint(c, t, 50);
        CHECK_EQ(ddl_send(w, ddl_tensor_1d(host, DDL_U8, LARGE), 0, 1), DDL_OK);
    }
    /* a column from packed: 1000 rows of 2000 bytes, 3 of each */
    ddl_tensor column = t;
    column.ndim = 2;
    column.shape[0] = rows;
    column.shape[1] = 3;
    column.strides[0] = 2000;
    column.strides[1] = 1;
    small.shape[0] = 3 * rows;
    paint(c, t, rank + 20);
    CHECK_EQ(rank == 0 ? ddl_send(w, small, 1, 2) : ddl_recv(w, column, 0, 2, NULL), DDL_OK);
    if (rank == 1) {
        CHECK_EQ(ddl_tensor_copy(c, ddl_tensor_1d(host, DDL_U8, LARGE), t), DDL_OK);
        int64_t bad = 0;
        for (int64_t k = 0; k < 2000 * rows; k++) {
            bad += host[k] != (k % 2000 < 3 ? byte_of(k / 2000 * 3 + k % 2000, 20) : byte_of(k, 21));
        }
        CHECK_EQ(bad, 0);
    }
    /* too small a buffer: the message stays */
    paint(c, t, rank + 30);
    if (rank == 0) {
        CHECK_EQ(ddl_send(w, t, 1, 3), DDL_OK);
    } else {
        CHECK_EQ(ddl_recv(w, small, 0, 3, NULL), DDL_ERR_TRUNCATED);
        CHECK_STR(ddl_error(c), "it stays to be received with a larger one");
        CHECK_EQ(wrong(c, t, LARGE, 31), 0);
        CHECK_EQ(ddl_recv(w, t, 0, 3, NULL), DDL_OK);
        CHECK_EQ(wrong(c, t, LARGE, 30), 0);
    }
    /* cancelled before there is a message, and then not */
    ddl_request *r = NULL;
    if (rank == 1) {
        CHECK_EQ(ddl_irecv(w, t, 0, 4, &r), DDL_OK);
        CHECK_EQ(ddl_cancel(r), DDL_OK);
        CHECK_EQ(ddl_wait(&r, NULL), DDL_ERR_CANCELLED);
    }
    CHECK_EQ(ddl_barrier(w), DDL_OK);
    CHECK_EQ(rank == 0 ? ddl_send(w, t, 1, 4) : ddl_recv(w, t, 0, 4, NULL), DDL_OK);
    free(host);
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    coll_leave(c);
}

TEST(mixed_strided_truncated_cancelled) { with(odd_ones, 2, 0, (message_job){.gpus = 0}); }
TEST(mixed_strided_truncated_cancelled_between_hosts) { with(odd_ones, 2, 0, (message_job){.hosts = 1}); }

/* A sender whose deadline passes takes its memory back: the receiver gets an error and no byte. */
static void given_up(int rank, int n, void *arg) {
    ddl_context *c = join(rank, n, arg);
    ddl_group *w = ddl_world(c), *hasty = NULL;
    ddl_tensor t = bytes_on(c, 1, LARGE, rank);
    CHECK_EQ(ddl_group_duplicate(w, &hasty), DDL_OK);
    if (rank == 0) {
        CHECK_EQ(ddl_group_set(hasty, &(ddl_group_options){.timeout_ms = 200}), DDL_OK);
        CHECK_EQ(ddl_send(hasty, t, 1, 0), DDL_ERR_TIMEOUT);
        paint(c, t, 40);
    }
    CHECK_EQ(ddl_barrier(w), DDL_OK);
    if (rank == 1) {
        CHECK_EQ(ddl_recv(hasty, t, 0, 0, NULL), DDL_ERR_CANCELLED);
        CHECK_STR(ddl_error(c), "the sender gave up");
        CHECK_EQ(wrong(c, t, LARGE, 1), 0);
    }
    CHECK_EQ(ddl_barrier(w), DDL_OK);
    CHECK_EQ(rank == 0 ? ddl_send(hasty, t, 1, 1) : ddl_recv(hasty, t, 0, 1, NULL), DDL_OK); /* and it goes on */
    CHECK_EQ(rank == 1 ? wrong(c, t, LARGE, 40) : 0, 0);
    CHECK_EQ(ddl_group_free(&hasty), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    coll_leave(c);
}

TEST(a_sender_that_gives_up) { with(given_up, 2, 0, (message_job){.gpus = 0}); }
TEST(a_sender_that_gives_up_between_hosts) { with(given_up, 2, 0, (message_job){.hosts = 1}); }

/* ---- addresses that come back ---- */

static void come_back(int rank, int n, void *arg) {
    ddl_context *c = join(rank, n, arg);
    ddl_tensor in = bytes_on(c, 1, LARGE, 0);
    void *first = NULL;
    uint64_t before = staged(c);
    for (int turn = 0; turn < 6; turn++) {
        int64_t count = turn % 2 == 0 ? LARGE : LARGE / 2;
        if (rank == 0) {
            uint64_t at = 0; /* of cuMemAlloc, whose address the stand-in gives again at once */
            CHECK_EQ(DRIVER(int (*)(uint64_t *, size_t), "cuMemAlloc_v2")(&at, LARGE), SUCCESS);
            first = turn == 0 ? (void *)(uintptr_t)at : first;
            CHECK_EQ((uintptr_t)first, (uintptr_t)at); /* or it is no test */
            ddl_tensor out = ddl_tensor_1d((void *)(uintptr_t)at, DDL_U8, count);
            out.device = 1;
            paint(c, out, turn);
            CHECK_EQ(ddl_send(ddl_world(c), out, 1, turn), DDL_OK);
            CHECK_EQ(DRIVER(int (*)(uint64_t), "cuMemFree_v2")(at), SUCCESS);
        } else {
            CHECK_EQ(ddl_recv(ddl_world(c), in, 0, turn, NULL), DDL_OK);
            CHECK_EQ(wrong(c, in, count, turn), 0);
        }
    }
    CHECK_EQ(staged(c) - before, 3 * ((uint64_t)LARGE + LARGE / 2)); /* what the test itself copied */
    CHECK_EQ(ddl_tensor_free(c, &in), DDL_OK);
    coll_leave(c);
}

static void come_back_entered(int rank, int n, void *arg) {
    CHECK_EQ(DRIVER(int (*)(unsigned), "cuInit")(0), SUCCESS);
    enter(0);
    come_back(rank, n, arg);
}

TEST(memory_that_is_freed_and_comes_back) { with(come_back_entered, 2, 0, (message_job){.gpus = 0}); }

/* ---- a sender that is killed ---- */

static void until_killed(int rank, int n, void *arg) {
    ddl_context *c = join(rank, n, arg);
    ddl_tensor t = bytes_on(c, 1, LARGE, rank);
    ddl_status status = DDL_OK;
    for (int i = 0; status == DDL_OK; i++) {
        if (rank == 1 && i == 5) {
            ddl_request *r = NULL;
            ddl_isend(ddl_world(c), t, 0, i, &r); /* its offer may be there */
            raise(SIGKILL);
        }
        status = rank == 1 ? ddl_send(ddl_world(c), t, 0, i) : ddl_recv(ddl_world(c), t, 1, i, NULL);
        CHECK_EQ(status == DDL_OK && rank == 0 ? wrong(c, t, LARGE, 1) : 0, 0);
    }
    CHECK_EQ(status, DDL_ERR_PEER);
    CHECK_STR(ddl_error(c), "rank 1");
    for (int i = 0; i < 5000 && DRIVER(int (*)(void), "standin_imports")() != 0; i++) {
        ddl_iprobe(ddl_world(c), 0, 0, NULL); /* looks after its peers */
        usleep(1000);
    }
    CHECK_EQ(DRIVER(int (*)(void), "standin_imports")(), 0); /* its memory is mapped no more */
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    coll_leave(c);
}

static void killed(message_job j) {
    ranks r;
    char address[INET_ADDRSTRLEN];
    if (j.hosts && !ranks_own_address(address)) {
        SKIP("this machine has no network but loopback");
    }
    coll_job_make(&j.job);
    ranks_start(&r, 2, until_killed, &j);
    ranks_wait(&r, 60);
    CHECK_EQ(r.timed_out, 0);
    CHECK(r.status[0] == 0 && WIFSIGNALED(r.status[1]) && WTERMSIG(r.status[1]) == SIGKILL);
}

TEST(a_sender_that_is_killed) { killed((message_job){.no_vmm = 0}); }
TEST(a_sender_that_is_killed_by_handles) { killed((message_job){.no_vmm = 1}); }
TEST(a_sender_that_is_killed_between_hosts) { killed((message_job){.hosts = 1}); }

static void doze(void *user) {
    (void)user;
    usleep(30000);
}

/* ---- collectives between hosts: GPUs inside, the network between ---- */

static uint64_t calls_of(ddl_context *c, const char *algorithm) {
    ddl_stats s;
    uint64_t calls = 0;
    CHECK_EQ(ddl_stats_get(c, &s), DDL_OK);
    for (int i = 0; i < DDL_STATS_ALGORITHMS && s.algorithms[i].name != NULL; i++) {
        calls += strcmp(s.algorithms[i].name, algorithm) == 0 ? s.algorithms[i].operations : 0;
    }
    return calls;
}

/* The other kinds: those that GPUs do inside hosts, and those that go by pieces alone. */
static void kinds_of_hosts(ddl_context *c, const message_job *j, int rank) {
    static const ddl_kind kinds[] = {DDL_BROADCAST, DDL_REDUCE, DDL_ALL_GATHER, DDL_REDUCE_SCATTER, DDL_ALL_TO_ALL,
                                     DDL_GATHER, DDL_SCATTER, DDL_SCAN};
    int n = ddl_size(ddl_world(c));
    for (int i = 0; i < 16; i++) {
        ddl_kind kind = kinds[i % 8];
        bool inside = i % 8 < 4, many = coll_many_in(kind) || coll_many_out(kind);
        uint64_t before[2] = {calls_of(c, "native_device_hierarchical"), calls_of(c, "device_pieces")};
        coll_case one = {.kind = kind, .dtype = i % 3 == 0 ? DDL_BF16 : DDL_F32,
                         .op = !coll_reduces(kind) ? DDL_OP_NONE : i < 8 && kind != DDL_SCAN ? DDL_AVG : DDL_SUM,
                         .root = coll_rooted(kind) ? (i * 3 + 1) % n : 0, .count = i < 8 ? 40009 : many ? 300007 : 900001,
                         .way = (coll_way)(i % 3), .in_place = i / 8 == 1, .salt = i,
                         .in_device = gpu_of(j, rank % 2), .out_device = gpu_of(j, rank % 2)};
        CHECK(coll_check(ddl_world(c), &one));
        CHECK_EQ(calls_of(c, "native_device_hierarchical") - before[0], inside);
        CHECK_EQ(calls_of(c, "device_pieces") - before[1], !inside);
    }
}

static void sums_of_hosts(int rank, int n, void *arg) {
    static const int64_t counts[] = {32768, 100003, 400001, 1400017}; /* the last in several pieces */
    static const struct {
        ddl_dtype dtype;
        int op;
    } kinds[] = {{DDL_F32, DDL_SUM}, {DDL_BF16, DDL_AVG}, {DDL_I32, DDL_SUM}, {DDL_I64, DDL_AVG}, {DDL_F16, DDL_AVG}};
    const message_job *j = arg;
    ddl_context *c = join(rank, n, arg);
    uint64_t want = 0;
    for (int i = 0; i < 10; i++) {
        int k = i % 5;
        coll_case one = {.kind = DDL_ALL_REDUCE, .dtype = kinds[k].dtype, .op = kinds[k].op, .count = counts[(i / 5 + i) % 4],
                         .way = (coll_way)(i % 3), .in_place = i % 2 == 0, .salt = i,
                         .in_device = gpu_of(j, rank % 2), .out_device = gpu_of(j, rank % 2)};
        bool large = one.count * (int64_t)ddl_dtype_bytes(one.dtype) >= 65536;
        CHECK(coll_check(ddl_world(c), &one));
        want += large;
    }
    CHECK_EQ(calls_of(c, "native_device_hierarchical"), want);
    kinds_of_hosts(c, j, rank);
    /* what passes the host's memory is this rank's part, there and back */
    ddl_tensor t = {0};
    int64_t count = 3 << 20; /* 6 or 4 pieces for each rank */
    CHECK_EQ(ddl_tensor_alloc_on(c, gpu_of(j, rank % 2), DDL_F32, 1, &count, &t), DDL_OK);
    CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
    uint64_t before = staged(c);
    CHECK_EQ(ddl_all_reduce(ddl_world(c), t, t, DDL_SUM), DDL_OK);
    CHECK_EQ(staged(c) - before, 2 * 4 * (uint64_t)count / (uint64_t)j->hosts);
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    coll_leave(c);
}

TEST(two_hosts_of_two_gpus) { with(sums_of_hosts, 4, 0, (message_job){.hosts = 2, .gpus = 1}); }
TEST(two_hosts_of_three_ranks_on_one_gpu) { with(sums_of_hosts, 6, 0, (message_job){.hosts = 3}); }

/* The input is written by a stream, late, and the result read by it. Then a rank is killed: the others are told, and the
 * end comes. */
static void sums_on_streams(int rank, int n, void *arg) {
    const message_job *j = arg;
    ddl_context *c = join(rank, n, arg);
    ddl_group *w = ddl_world(c);
    enum { COUNT = 700000 };
    ddl_tensor t = bytes_on(c, 1, 4 * COUNT, 0);
    int32_t *host = malloc(4 * COUNT), *ready = malloc(4 * COUNT), bad = 0;
    void *stream = stream_on(0);
    t.dtype = DDL_I32;
    t.shape[0] = COUNT;
    for (int32_t k = 0; k < COUNT; k++) {
        ready[k] = k * 3 + rank;
    }
    CHECK_EQ(ddl_barrier(w), DDL_OK);
    CHECK_EQ(ddl_group_stream(w, 1, stream), DDL_OK);
    for (int round = 0; round < 2; round++) {
        if (rank == round) {
            CHECK_EQ(DRIVER(int (*)(void *, void (*)(void *), void *), "cuLaunchHostFunc")(stream, doze, NULL), SUCCESS);
        }
        CHECK_EQ(DRIVER(int (*)(uint64_t, uint64_t, size_t, void *), "cuMemcpyAsync")(
                     (uint64_t)(uintptr_t)t.data, (uint64_t)(uintptr_t)ready, 4 * COUNT, stream), SUCCESS);
        CHECK_EQ(ddl_all_reduce(w, t, t, DDL_SUM), DDL_OK);
        CHECK_EQ(DRIVER(int (*)(uint64_t, uint64_t, size_t, void *), "cuMemcpyAsync")(
                     (uint64_t)(uintptr_t)host, (uint64_t)(uintptr_t)t.data, 4 * COUNT, stream), SUCCESS);
        CHECK_EQ(DRIVER(int (*)(void *), "cuStreamSynchronize")(stream), SUCCESS);
        for (int32_t k = 0; k < COUNT; k++) {
            bad += host[k] != n * k * 3 + n * (n - 1) / 2;
        }
        CHECK_EQ(bad, 0);
    }
    CHECK_EQ(calls_of(c, "native_device_hierarchical"), 2);
    CHECK_EQ(ddl_group_stream(w, 1, NULL), DDL_OK);
    ddl_status status = DDL_OK;
    for (int i = 0; status == DDL_OK; i++) {
        if (rank == n - 1 && i == 2) {
            ddl_request *r = NULL;
            ddl_iall_reduce(w, t, t, DDL_MAX, &r);
            raise(SIGKILL);
        }
        status = ddl_all_reduce(w, t, t, DDL_MAX);
    }
    CHECK_EQ(status, DDL_ERR_PEER);
    CHECK_EQ(j->hosts, 2);
    free(host);
    free(ready);
    t.dtype = DDL_U8;
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    coll_leave(c);
}

TEST(two_hosts_on_streams_and_a_rank_that_is_killed) {
    message_job j = {.hosts = 2};
    char address[INET_ADDRSTRLEN];
    ranks r;
    if (!ranks_own_address(address)) {
        SKIP("this machine has no network but loopback");
    }
    coll_job_make(&j.job);
    ranks_start(&r, 4, sums_on_streams, &j);
    ranks_wait(&r, 100);
    CHECK_EQ(r.timed_out, 0);
    for (int i = 0; i < 4; i++) {
        CHECK(i == 3 ? WIFSIGNALED(r.status[i]) && WTERMSIG(r.status[i]) == SIGKILL : r.status[i] == 0);
    }
}

/* ---- what is wrong is said ---- */

static char said[4000]; /* warnings of this process */

static void keep_warnings(void *user, ddl_log_level level, const char *line) {
    (void)user;
    if (level == DDL_LOG_WARN && strlen(said) + strlen(line) + 2 < sizeof said) {
        strcat(strcat(said, line), "\n");
    }
}

#define REFUSED(call, status, part)                                                                                    \
    do {                                                                                                               \
        CHECK_EQ(call, status);                                                                                        \
        CHECK_STR(ddl_error(c), part);                                                                                 \
    } while (0)

/* Pointers and streams of others, what was freed, no memory: the call fails and says why, and all goes on. */
static void misused(int rank, int n, void *arg) {
    ddl_context *c = join(rank, n, arg);
    ddl_group *w = ddl_world(c);
    ddl_tensor t = bytes_on(c, 1, LARGE, rank), bad = t, other = bytes_on(c, 2, 1000, 0), more = {0};
    ddl_request *r = NULL;
    int64_t huge = (int64_t)1 << 33;
    uint64_t at = 0;
    bad.data = other.data;
    bad.shape[0] = 1000;
    REFUSED(ddl_isend(w, bad, 1 - rank, 0, &r), DDL_ERR_ARG, "is said to be on device 1, but its memory at");
    REFUSED(ddl_irecv(w, bad, 1 - rank, 0, &r), DDL_ERR_ARG, "is of device 2");
    enter(0);
    CHECK_EQ(DRIVER(int (*)(uint64_t *, size_t), "cuMemAlloc_v2")(&at, 1000), SUCCESS);
    CHECK_EQ(DRIVER(int (*)(uint64_t), "cuMemFree_v2")(at), SUCCESS);
    bad.data = (void *)(uintptr_t)at;
    REFUSED(ddl_isend(w, bad, 1 - rank, 0, &r), DDL_ERR_ARG, "or was freed");
    REFUSED(ddl_all_reduce(w, bad, bad, DDL_SUM), DDL_ERR_ARG, "or was freed");
    REFUSED(ddl_tensor_alloc_on(c, 1, DDL_U8, 1, &huge, &more), DDL_ERR_NOMEM, "has no memory for");
    CHECK_STR(said, "CUDA_ERROR_OUT_OF_MEMORY; other programs may use this GPU");
    void *elsewhere = stream_on(1);
    REFUSED(ddl_group_stream(w, 1, elsewhere), DDL_ERR_ARG, "it is not one of device 1");
    CHECK_STR(said, "the stream is of another GPU, or of another context");
    CHECK(r == NULL);
    CHECK_EQ(ddl_barrier(w), DDL_OK); /* and all of that has changed nothing */
    CHECK_EQ(rank == 0 ? ddl_send(w, t, 1, 0) : ddl_recv(w, t, 0, 0, NULL), DDL_OK);
    CHECK_EQ(wrong(c, t, LARGE, 0), 0);
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &other), DDL_OK);
    coll_leave(c);
}

TEST(misuse_is_said_and_changes_nothing) {
    with(misused, 2, 0, (message_job){.job.config.log = keep_warnings});
}

/* Between hosts, when pinned memory has run out: the message fails on the rank that lacks it, the context lives. */
static void no_pinned(int rank, int n, void *arg) {
    ddl_context *c = join(rank, n, arg);
    ddl_group *w = ddl_world(c);
    ddl_tensor t = bytes_on(c, 1, LARGE, rank);
    CHECK_EQ(ddl_barrier(w), DDL_OK);
    if (rank == 0) {
        DRIVER(void (*)(const char *, long, int), "standin_fail")("cuMemHostAlloc", 1, 2 /* CUDA_ERROR_OUT_OF_MEMORY */);
        REFUSED(ddl_send(w, t, 1, 0), DDL_ERR_NOMEM, "no pinned memory");
        DRIVER(void (*)(const char *, long, int), "standin_fail")(NULL, 0, 0);
    }
    CHECK_EQ(rank == 0 ? ddl_send(w, t, 1, 1) : ddl_recv(w, t, 0, 1, NULL), DDL_OK);
    CHECK_EQ(wrong(c, t, LARGE, 0), 0);
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    coll_leave(c);
}

TEST(without_pinned_memory_between_hosts) { with(no_pinned, 2, 0, (message_job){.hosts = 1}); }

/* Memory that cannot be shared goes by the host, and a sentence says why and what to do. managed: of cudaMallocManaged. */
static void unshared(int rank, int n, void *arg) {
    const message_job *j = arg;
    ddl_context *c = join(rank, n, arg);
    ddl_tensor t = bytes_on(c, 1, LARGE, rank);
    DRIVER(void (*)(void *), "standin_managed")(j->no_ipc ? NULL : t.data);
    uint64_t before = staged(c);
    CHECK_EQ(rank == 0 ? ddl_send(ddl_world(c), t, 1, 0) : ddl_recv(ddl_world(c), t, 0, 0, NULL), DDL_OK);
    CHECK_EQ(staged(c) - before, LARGE);
    CHECK_EQ(wrong(c, t, LARGE, 0), 0);
    if (rank == 0) {
        CHECK_STR(said, j->no_ipc ? "in containers start them with --ipc=host --pid=host" : "managed memory");
        CHECK_STR(said, "ddl_tensor_alloc_on");
    }
    DRIVER(void (*)(void *), "standin_managed")(NULL);
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    coll_leave(c);
}

TEST(without_cuda_ipc_the_fix_is_said) {
    with(unshared, 2, 0, (message_job){.no_vmm = 1, .no_ipc = 1, .job.config.log = keep_warnings});
}
TEST(managed_memory_goes_by_the_host) { with(unshared, 2, 0, (message_job){.job.config.log = keep_warnings}); }

/* ---- chunks overlap ---- */

enum { MANY = 12 << 20 }; /* 12 chunks */

static int pinned_blocks(void) {
    char text[300];
    DRIVER(int (*)(char *, size_t), "standin_live")(text, sizeof text);
    char *at = strstr(text, " pinned");
    while (at != NULL && at > text && at[-1] != ' ') {
        at--;
    }
    return at != NULL ? atoi(at) : -1;
}

/* When the first chunk goes to the receiver's device, the sender has not begun to copy the last ones from its own: the
 * receiver's window, which is its three slots, has not moved yet. */
static _Atomic uint64_t *overlap_begun; /* bytes that the sender has begun to copy; shared */

static void overlap(int rank, int n, void *arg) {
    ddl_context *c = join(rank, n, arg);
    ddl_request *r = NULL;
    ddl_tensor t = bytes_on(c, 1, MANY, rank);
    _Atomic uint64_t *begun = overlap_begun;
    uint64_t before = staged(c), seen = 0;
    int pinned = pinned_blocks();
    CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
    CHECK_EQ(rank == 0 ? ddl_isend(ddl_world(c), t, 1, 0, &r) : ddl_irecv(ddl_world(c), t, 0, 0, &r), DDL_OK);
    while (r != NULL) {
        if (rank == 0) {
            *begun = staged(c) - before;
        } else if (seen == 0 && staged(c) > before) {
            seen = *begun;
            CHECK(seen > 0 && seen < MANY);
        }
        CHECK(pinned_blocks() <= pinned + 3);
        ddl_status status = ddl_test(&r, NULL);
        CHECK(status == DDL_OK || status == DDL_IN_PROGRESS);
        usleep(rank == 0 ? 0 : 100);
    }
    CHECK_EQ(staged(c) - before, MANY);
    CHECK(rank == 0 || seen > 0);
    CHECK_EQ(wrong(c, t, MANY, 0), 0);
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    coll_leave(c);
}

TEST(chunks_overlap_in_bounded_memory) {
    message_job j = {.hosts = 1};
    void *shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(shared != MAP_FAILED);
    overlap_begun = shared;
    with(overlap, 2, 0, j);
    munmap(shared, 4096);
}

/* ---- streams ---- */

/* What is sent is written by the stream, late; what is received is read by it. Nobody waits on the host. */
static void on_streams(int rank, int n, void *arg) {
    const message_job *j = arg;
    ddl_context *c = join(rank, n, arg);
    ddl_group *w = ddl_world(c);
    int32_t gpu = gpu_of(j, rank);
    ddl_tensor t = bytes_on(c, gpu, LARGE, 90);
    unsigned char *host = malloc(LARGE), *ready = malloc(LARGE);
    void *stream = stream_on(gpu - 1);
    CHECK_EQ(ddl_barrier(w), DDL_OK);
    CHECK_EQ(ddl_group_stream(w, gpu, stream), DDL_OK);
    for (int round = 0; round < 4; round++) {
        uint64_t before = staged(c);
        for (int64_t k = 0; k < LARGE; k++) {
            ready[k] = byte_of(k, round);
        }
        if (rank == round % 2) {
            CHECK_EQ(DRIVER(int (*)(void *, void (*)(void *), void *), "cuLaunchHostFunc")(stream, doze, NULL), SUCCESS);
            CHECK_EQ(DRIVER(int (*)(uint64_t, uint64_t, size_t, void *), "cuMemcpyAsync")(
                         (uint64_t)(uintptr_t)t.data, (uint64_t)(uintptr_t)ready, LARGE, stream), SUCCESS);
            CHECK_EQ(ddl_send(w, t, 1 - rank, round), DDL_OK);
            CHECK_EQ(DRIVER(int (*)(uint64_t, unsigned char, size_t, void *), "cuMemsetD8Async")(
                         (uint64_t)(uintptr_t)t.data, 0, LARGE, stream), SUCCESS); /* only when it has left */
        } else {
            if (round >= 2) {
                CHECK_EQ(DRIVER(int (*)(void *, void (*)(void *), void *), "cuLaunchHostFunc")(stream, doze, NULL), SUCCESS);
            }
            CHECK_EQ(DRIVER(int (*)(uint64_t, unsigned char, size_t, void *), "cuMemsetD8Async")(
                         (uint64_t)(uintptr_t)t.data, 1, LARGE, stream), SUCCESS); /* before it comes */
            CHECK_EQ(ddl_recv(w, t, 1 - rank, round, NULL), DDL_OK);
            CHECK_EQ(DRIVER(int (*)(uint64_t, uint64_t, size_t, void *), "cuMemcpyAsync")(
                         (uint64_t)(uintptr_t)host, (uint64_t)(uintptr_t)t.data, LARGE, stream), SUCCESS);
        }
        CHECK_EQ(DRIVER(int (*)(void *), "cuStreamSynchronize")(stream), SUCCESS);
        if (rank != round % 2) {
            CHECK_EQ(memcmp(host, ready, LARGE), 0);
        }
        CHECK_EQ(staged(c) - before, j->hosts ? LARGE : 0);
    }
    CHECK_EQ(ddl_group_stream(w, gpu, NULL), DDL_OK);
    free(host);
    free(ready);
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    coll_leave(c);
}

static void on_streams_of_processes(int rank, int n, void *arg) { on_streams(rank, n, arg); }

TEST(messages_in_the_order_of_streams) { with(on_streams_of_processes, 2, 0, (message_job){.gpus = 1}); }
TEST(messages_in_the_order_of_streams_between_hosts) { with(on_streams_of_processes, 2, 0, (message_job){.hosts = 1}); }

/* ---- threads, last ---- */

TEST(threads_copy_by_pointer) { with(forms, 3, 1, (message_job){.gpus = 0}); }
TEST(threads_on_two_gpus) { with(forms, 2, 1, (message_job){.gpus = 1}); }
TEST(threads_that_give_up) { with(given_up, 2, 1, (message_job){.gpus = 0}); }
TEST(threads_in_the_order_of_streams) { with(on_streams, 2, 1, (message_job){.gpus = 1}); }

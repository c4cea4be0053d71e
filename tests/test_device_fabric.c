/* Messages between tensors on devices over libfabric with FI_HMEM, in whole jobs of two processes: the core offers, the plugin
 * registers and reads (fabric_hmem.h claims FI_HMEM in front of tcp; the "device" is ordinary memory, hmem_device.c). That
 * nothing went through the host is told by ddl_stats. What cannot be registered goes through the host, and is right too; so
 * is what the other side has on the host.
 * Collectives of ranks that say they are on hosts of their own go the same way where they only move data.
 * tests/run: variants=gcc,asan timeout=100 libs=-ldl */
#include "apart.h"

#include <limits.h>

/* libfabric 1.17 loses a connection now and then when a rank ends beside one that died. What the plugin does not give back
 * is looked for in test_fabric.c. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void) { return "leak:libfabric.so\n"; }

static char folder[] = "/tmp/ddl-hmem-XXXXXX";
static pid_t maker;

static void remove_folder(void) {
    char command[128];
    if (getpid() == maker) {
        snprintf(command, sizeof command, "rm -r %s", folder);
        (void)!system(command);
    }
}

/* Both plugins. False: libfabric's headers are not here. */
static bool built(void) {
    static int made;
    char tests[PATH_MAX], command[8 * PATH_MAX];
    snprintf(tests, sizeof tests, "%s", __FILE__);
    *strrchr(tests, '/') = 0;
    if (made == 0 && mkdtemp(folder) != NULL) {
        maker = getpid();
        atexit(remove_folder);
        snprintf(command, sizeof command,
                 "cc -std=c11 -g -w -shared -fPIC -fvisibility=hidden -I%s -I%s/.. -o %s/libddl-cuda.so %s/hmem_device.c && "
                 "cc -std=c11 -D_GNU_SOURCE -g -O1 -w -shared -fPIC -fvisibility=hidden -include %s/fabric_hmem.h "
                 "-o %s/libddl-fabric.so %s/../plugins/fabric/fabric.c -ldl",
                 tests, tests, folder, tests, tests, folder, tests);
        made = system("echo '#include <rdma/fabric.h>' | cc -E -o /dev/null - 2>/dev/null") != 0 ? -1
               : system(command) == 0                                                            ? 1
                                                                                                  : -2;
    }
    setenv("DDL_PLUGIN_PATH", folder, 1);
    setenv("DDL_PLUGINS", "cuda,fabric", 1);
    setenv("DDL_TRANSPORTS", "fabric:tcp", 1);
    setenv("DDL_FABRIC_FORCE_MR", "local", 1); /* as an adapter: see fabric_attributes */
    CHECK(made != -2);
    return made > 0;
}

static unsigned char byte_of(int64_t j, int salt) { return (unsigned char)(j * 7 + j / 251 + salt * 13 + 5); }

static ddl_tensor bytes_on(ddl_context *c, int32_t device, int64_t count, unsigned char *host) {
    ddl_tensor t = ddl_tensor_1d(host, DDL_U8, count);
    if (device != DDL_HOST) {
        CHECK_EQ(ddl_tensor_alloc_on(c, device, DDL_U8, 1, &count, &t), DDL_OK);
        CHECK_EQ(ddl_tensor_copy(c, t, ddl_tensor_1d(host, DDL_U8, count)), DDL_OK);
    }
    return t;
}

/* One message; from where to where; shorter than its receive by `less`. Returns how many bytes were copied between host and
 * device here on its account. */
static int64_t message(ddl_context *c, int rank, int32_t from, int32_t to, int64_t bytes, int64_t less, int salt) {
    int64_t room = rank == 0 ? bytes : bytes + less, wrong = 0;
    unsigned char *host = malloc((size_t)room + 1);
    for (int64_t j = 0; j < room; j++) {
        host[j] = rank == 0 ? byte_of(j, salt) : 0xee;
    }
    ddl_tensor t = bytes_on(c, rank == 0 ? from : to, room, host);
    int64_t before = apart_staged(c);
    ddl_info info = {0};
    CHECK_EQ(rank == 0 ? ddl_send(ddl_world(c), t, 1, salt) : ddl_recv(ddl_world(c), t, 0, salt, &info), DDL_OK);
    int64_t went = apart_staged(c) - before;
    if (rank == 1) {
        CHECK_EQ(info.count, bytes);
        if (to != DDL_HOST) {
            memset(host, 0x11, (size_t)room);
            CHECK_EQ(ddl_tensor_copy(c, ddl_tensor_1d(host, DDL_U8, room), t), DDL_OK);
        }
        for (int64_t j = 0; j < room; j++) {
            wrong += host[j] != (j < bytes ? byte_of(j, salt) : 0xee);
        }
        CHECK_EQ(wrong, 0);
    }
    if (t.device != DDL_HOST) {
        CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    }
    free(host);
    return went;
}

static const int64_t sizes[] = {1, 63, 4096, 65537, 1000003};
enum { SIZES = sizeof sizes / sizeof sizes[0] };

static void straight(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    for (int i = 0; i < SIZES; i++) {
        CHECK_EQ(message(c, rank, 1, 1, sizes[i], 0, i), 0);
        CHECK_EQ(message(c, rank, 1, 1, sizes[i], 10, i + 20), 0);
        int64_t mixed = message(c, rank, 1, DDL_HOST, sizes[i], 0, i + 40);
        CHECK_EQ(mixed, rank == 0 ? sizes[i] : 0);
        mixed = message(c, rank, DDL_HOST, 1, sizes[i], 0, i + 60);
        CHECK_EQ(mixed, rank == 1 ? sizes[i] : 0);
    }
    coll_leave(c);
}

TEST(nothing_goes_through_the_host) {
    if (!built()) {
        SKIP("libfabric's headers are not here");
    }
    coll_job job;
    coll_job_make(&job);
    ranks_fork(2, straight, &job, 60);
}

/* Every fifth registration fails, here and there: those messages go through the host. */
static void partly(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    int there = 0, through = 0;
    for (int i = 0; i < 30; i++) {
        int64_t went = message(c, rank, 1, 1, sizes[i % SIZES], 0, i);
        CHECK(went == 0 || went == sizes[i % SIZES]);
        there += went == 0;
        through += went != 0;
    }
    CHECK(there > 5 && through > 3);
    coll_leave(c);
}

TEST(what_cannot_be_registered_goes_through_the_host) {
    if (!built()) {
        SKIP("libfabric's headers are not here");
    }
    setenv("DDL_FABRIC_FORCE_FAIL_REGISTRATION", "5", 1);
    setenv("DDL_FABRIC_CACHE", "0", 1); /* which tries a second time, with the message alone */
    coll_job job;
    coll_job_make(&job);
    ranks_fork(2, partly, &job, 60);
    unsetenv("DDL_FABRIC_FORCE_FAIL_REGISTRATION");
    unsetenv("DDL_FABRIC_CACHE");
}

/* With DDL_MAC what comes over a network is checked; a read past the core could not be. */
static void through(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    CHECK_EQ(message(c, rank, 1, 1, 65537, 0, 1), 65537);
    coll_leave(c);
}

TEST(with_a_mac_all_goes_through_the_host) {
    if (!built()) {
        SKIP("libfabric's headers are not here");
    }
    setenv("DDL_MAC", "1", 1);
    coll_job job;
    coll_job_make(&job);
    ranks_fork(2, through, &job, 60);
    unsetenv("DDL_MAC");
}

/* ---- registrations that are kept: plugins/fabric/cache.h ---- */

static char kept_line[256];

static void on_log(void *user, ddl_log_level level, const char *line) {
    (void)user, (void)level;
    const char *at = strstr(line, "registrations that were kept");
    if (at != NULL) {
        snprintf(kept_line, sizeof kept_line, "%s", at);
    }
}

/* So many messages of one tensor, made anew for each when `fresh`; all are right. */
static void repeat(ddl_context *c, int rank, int32_t device, int times, bool fresh) {
    enum { BYTES = 300000 };
    unsigned char *host = malloc(BYTES);
    ddl_tensor t = {0};
    int64_t count = BYTES, wrong = 0;
    for (int i = 0; i < times; i++) {
        if (i == 0 || fresh) {
            CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
            CHECK_EQ(device == DDL_HOST ? ddl_tensor_alloc(c, DDL_U8, 1, &count, &t)
                                        : ddl_tensor_alloc_on(c, device, DDL_U8, 1, &count, &t), DDL_OK);
        }
        for (int j = 0; j < BYTES; j++) {
            host[j] = rank == 0 ? byte_of(j, i) : 0xee;
        }
        CHECK_EQ(ddl_tensor_copy(c, t, ddl_tensor_1d(host, DDL_U8, BYTES)), DDL_OK);
        CHECK_EQ(rank == 0 ? ddl_send(ddl_world(c), t, 1, i) : ddl_recv(ddl_world(c), t, 0, i, NULL), DDL_OK);
        CHECK_EQ(ddl_tensor_copy(c, ddl_tensor_1d(host, DDL_U8, BYTES), t), DDL_OK);
        for (int j = 0; j < BYTES; j++) {
            wrong += host[j] != byte_of(j, i);
        }
    }
    CHECK_EQ(wrong, 0);
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    free(host);
}

static void keeping(int rank, int n, void *arg) {
    coll_job job = *(const coll_job *)arg;
    job.config.log = on_log;
    job.config.log_level = DDL_LOG_INFO;
    ddl_context *c = coll_join(rank, n, &job);
    unsigned long long made = 0, found = 0, room = 0, freed = 0;
    REQUIRE(c != NULL);
    for (int32_t device = 0; device < 2; device++) {
        repeat(c, rank, device, 20, false);
        repeat(c, rank, device, 5, true);
    }
    coll_leave(c);
    int fields = sscanf(kept_line, "registrations that were kept: %llu, used again %llu times; %llu were closed for room, "
                        "%llu as their memory was freed", &made, &found, &room, &freed);
    CHECK_EQ(fields, 4);
    /* Of six tensors each, and scratch of the start; the 19 messages after the first of each kind find theirs, at least.
     * The host's end is told, the device's seen at the next look, or when other memory lies there. */
    CHECK(made >= 12 && made <= 20);
    CHECK(found >= 38);
    CHECK_EQ(room, 0);
    CHECK(freed >= 6);
}

TEST(registrations_are_kept_until_their_memory_is_freed) {
    if (!built()) {
        SKIP("libfabric's headers are not here");
    }
    coll_job job;
    coll_job_make(&job);
    ranks_fork(2, keeping, &job, 60);
}

/* ---- collectives: each rank says that it is on a host of its own ---- */

static ddl_context *join_apart(int rank, int n, void *arg) { return apart_join(rank, n, (const coll_job *)arg, rank); }

static bool there_are_hosts(void) { return built() && apart_possible(); }

static const ddl_kind moving[] = {DDL_BROADCAST, DDL_ALL_GATHER, DDL_GATHER, DDL_SCATTER, DDL_ALL_TO_ALL};
enum { MOVING = sizeof moving / sizeof moving[0] };

/* Each kind in each way, compared byte by byte. */
static int kinds(ddl_group *g, int64_t count) {
    int ran = 0;
    for (int i = 0; i < MOVING * 3; i++, ran++) {
        bool in_place = i / MOVING == 1;
        coll_case k = {.kind = moving[i % MOVING], .dtype = i % 2 == 0 ? DDL_F32 : DDL_BF16, .count = count + i,
                       .root = coll_rooted(moving[i % MOVING]) ? i % ddl_size(g) : 0, .in_place = in_place,
                       .way = (coll_way)(i / MOVING), .salt = (unsigned)i, .in_device = 1, .out_device = 1};
        if (!coll_check(g, &k)) {
            return ran;
        }
    }
    return ran;
}

/* Several at once, whose rounds come in any order: no message is taken for one of another. */
static void at_once(ddl_context *c, int rank, int n) {
    enum { AT_ONCE = 4, PART = 100003 };
    ddl_request *r[AT_ONCE];
    ddl_tensor own[AT_ONCE], all[AT_ONCE];
    unsigned char *host = malloc((size_t)PART * (size_t)n);
    CHECK(coll_force(ddl_world(c), "all_gather=ring"));
    for (int i = 0; i < AT_ONCE; i++) {
        memset(host, 1 + i * n + rank, PART);
        own[i] = bytes_on(c, 1, PART, host);
        memset(host, 0xee, (size_t)PART * (size_t)n);
        all[i] = bytes_on(c, 1, PART * n, host);
    }
    for (int i = 0; i < AT_ONCE; i++) {
        CHECK_EQ(ddl_iall_gather(ddl_world(c), own[i], all[i], &r[i]), DDL_OK);
    }
    CHECK_EQ(ddl_wait_all(r, AT_ONCE, NULL), DDL_OK);
    for (int i = 0; i < AT_ONCE; i++) {
        int wrong = 0;
        CHECK_EQ(ddl_tensor_copy(c, ddl_tensor_1d(host, DDL_U8, PART * n), all[i]), DDL_OK);
        for (int j = 0; j < PART * n; j++) {
            wrong += host[j] != 1 + i * n + j / PART;
        }
        CHECK_EQ(wrong, 0);
        CHECK_EQ(ddl_tensor_free(c, &own[i]), DDL_OK);
        CHECK_EQ(ddl_tensor_free(c, &all[i]), DDL_OK);
    }
    CHECK(coll_force(ddl_world(c), "auto"));
    free(host);
}

static void apart(int rank, int n, void *arg) {
    ddl_context *c = join_apart(rank, n, arg);
    REQUIRE(c != NULL);
    ddl_group *w = ddl_world(c);
    int64_t count = 3 << 20, part = count / n; /* several messages each */
    CHECK_EQ(kinds(w, 50021), MOVING * 3);
    CHECK_EQ(apart_calls(c, "device_straight"), MOVING * 3);
    at_once(c, rank, n);
    for (int i = 0; n == 3 && i < 6; i++) { /* both kinds; the root has nothing, or another rank */
        apart_empty_part(w, 1, i % 2 == 1, 1, i / 2, "device_straight");
    }
    ddl_tensor whole[2] = {{0}, {0}}, own = {0};
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(ddl_tensor_alloc_on(c, 1, DDL_U8, 1, &count, &whole[i]), DDL_OK);
    }
    CHECK_EQ(ddl_tensor_alloc_on(c, 1, DDL_U8, 1, &part, &own), DDL_OK);
    int64_t before = apart_staged(c);
    CHECK_EQ(ddl_broadcast(w, whole[0], 0), DDL_OK);
    CHECK_EQ(ddl_all_gather(w, own, whole[1]), DDL_OK);
    CHECK_EQ(ddl_gather(w, own, whole[1], 1), DDL_OK);
    CHECK_EQ(ddl_scatter(w, whole[0], own, 1), DDL_OK);
    CHECK_EQ(ddl_all_to_all(w, whole[0], whole[1]), DDL_OK);
    CHECK_EQ(ddl_all_to_all(w, whole[0], whole[0]), DDL_OK);
    CHECK_EQ(apart_staged(c) - before, 0); /* nothing went through the host */
    CHECK_EQ(ddl_scan(w, whole[0], whole[1], DDL_MAX), DDL_OK); /* which the host reduces */
    CHECK_EQ(apart_calls(c, "device_pieces"), 1);
    CHECK_EQ(apart_staged(c) - before, 2 * count);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(ddl_tensor_free(c, &whole[i]), DDL_OK);
    }
    CHECK_EQ(ddl_tensor_free(c, &own), DDL_OK);
    coll_leave(c);
}

TEST(collectives_leave_the_host_out) {
    if (!there_are_hosts()) {
        SKIP("libfabric's headers are not here, or no network but loopback");
    }
    coll_job job;
    coll_job_make(&job);
    ranks_fork(2, apart, &job, 60);
    ranks_fork(3, apart, &job, 60);
}

/* Every seventh registration fails: those messages go through pinned memory, and the results are right. */
static void apart_partly(int rank, int n, void *arg) {
    ddl_context *c = join_apart(rank, n, arg);
    REQUIRE(c != NULL);
    CHECK_EQ(kinds(ddl_world(c), 40021), MOVING * 3);
    CHECK_EQ(apart_calls(c, "device_straight"), MOVING * 3);
    coll_leave(c);
}

TEST(collectives_with_memory_that_cannot_be_registered) {
    if (!there_are_hosts()) {
        SKIP("libfabric's headers are not here, or no network but loopback");
    }
    setenv("DDL_FABRIC_FORCE_FAIL_REGISTRATION", "7", 1);
    coll_job job;
    coll_job_make(&job);
    ranks_fork(3, apart_partly, &job, 60);
    unsetenv("DDL_FABRIC_FORCE_FAIL_REGISTRATION");
}

/* With DDL_MAC adapters are not asked: pieces. */
static void apart_checked(int rank, int n, void *arg) {
    ddl_context *c = join_apart(rank, n, arg);
    REQUIRE(c != NULL);
    CHECK_EQ(kinds(ddl_world(c), 40021), MOVING * 3);
    CHECK_EQ(apart_calls(c, "device_straight"), 0);
    CHECK_EQ(apart_calls(c, "device_pieces"), MOVING * 3);
    coll_leave(c);
}

TEST(collectives_with_a_mac_go_by_pieces) {
    if (!there_are_hosts()) {
        SKIP("libfabric's headers are not here, or no network but loopback");
    }
    setenv("DDL_MAC", "1", 1);
    coll_job job;
    coll_job_make(&job);
    ranks_fork(2, apart_checked, &job, 60);
    unsetenv("DDL_MAC");
}

/* ---- what reduces ---- */

static const ddl_kind reducing[] = {DDL_REDUCE, DDL_ALL_REDUCE, DDL_REDUCE_SCATTER, DDL_REDUCE_SCATTERV};
enum { REDUCING = sizeof reducing / sizeof reducing[0], REDUCTIONS = REDUCING * 6 };

/* Each kind in each way, of several types and ops: an average of f16 is scaled on the way in. Returns how many were right. */
static int reductions(ddl_group *g, int64_t count) {
    static const ddl_dtype types[] = {DDL_F32, DDL_F16, DDL_BF16, DDL_I32, DDL_F64, DDL_U8};
    static const ddl_op ops[] = {DDL_SUM, DDL_AVG, DDL_AVG, DDL_AVG, DDL_MAX, DDL_MIN};
    int64_t counts[16];
    for (int b = 0; b < ddl_size(g); b++) {
        counts[b] = b == 1 ? count : b * 1000 + 7;
    }
    for (int i = 0; i < REDUCTIONS; i++) {
        ddl_kind kind = reducing[i % REDUCING];
        coll_case k = {.kind = kind, .dtype = types[i / REDUCING], .op = ops[i / REDUCING], .count = count + i,
                       .root = kind == DDL_REDUCE ? i % ddl_size(g) : 0, .in_place = i / REDUCING % 2 == 1,
                       .way = (coll_way)(i % 3), .salt = (unsigned)i, .in_device = 1, .out_device = 1,
                       .counts = kind == DDL_REDUCE_SCATTERV ? counts : NULL,
                       .gap = kind == DDL_REDUCE_SCATTERV ? -1 : 0};
        if (!coll_check(g, &k)) {
            return i;
        }
    }
    return REDUCTIONS;
}

/* The larger, by its own function. */
static void larger(void *dst, const void *a, const void *b, int64_t count, ddl_dtype dtype, void *user) {
    (void)dtype, (void)user;
    for (int64_t i = 0; i < count; i++) {
        float x = ((const float *)a)[i], y = ((const float *)b)[i];
        ((float *)dst)[i] = x > y ? x : y;
    }
}

/* A sum, a scaled sum and a function, of as many elements: each has a plan of its own. The function is the host's. */
static void own_ops(ddl_context *c, int rank, int n) {
    enum { COUNT = 600011 };
    ddl_op ops[3] = {DDL_SUM};
    float *in = malloc(COUNT * sizeof *in);
    int64_t count = COUNT;
    ddl_tensor host = ddl_tensor_1d(in, DDL_F32, COUNT), t = {0}, out = {0};
    CHECK_EQ(ddl_op_create_scaled_sum(c, rank + 2.0, &ops[1]), DDL_OK);
    CHECK_EQ(ddl_op_create(c, larger, NULL, 1, &ops[2]), DDL_OK);
    CHECK_EQ(ddl_tensor_alloc_on(c, 1, DDL_F32, 1, &count, &t), DDL_OK);
    CHECK_EQ(ddl_tensor_alloc_on(c, 1, DDL_F32, 1, &count, &out), DDL_OK);
    for (int turn = 0; turn < 6; turn++) {
        int64_t wrong = 0, before = apart_calls(c, "device_exchange");
        for (int i = 0; i < COUNT; i++) {
            in[i] = (float)((i * 7 + rank * 5) % 101);
        }
        CHECK_EQ(ddl_tensor_copy(c, t, host), DDL_OK);
        memset(in, 0xee, COUNT * sizeof *in);
        CHECK_EQ(ddl_tensor_copy(c, out, host), DDL_OK);
        CHECK_EQ(ddl_all_reduce(ddl_world(c), t, out, ops[turn % 3]), DDL_OK);
        CHECK_EQ(ddl_tensor_copy(c, host, out), DDL_OK);
        for (int i = 0; i < COUNT; i++) {
            float want = 0;
            for (int r = 0; r < n; r++) {
                float x = (float)((i * 7 + r * 5) % 101);
                want = turn % 3 == 0 ? want + x : turn % 3 == 1 ? want + x * (float)(r + 2) : x > want ? x : want;
            }
            wrong += in[i] != want;
        }
        CHECK_EQ(wrong, 0);
        CHECK_EQ(apart_calls(c, "device_exchange") - before, turn % 3 != 2);
    }
    CHECK_EQ(ddl_op_free(c, ops[1]), DDL_OK);
    CHECK_EQ(ddl_op_free(c, ops[2]), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &out), DDL_OK);
    free(in);
}

static void reduces(int rank, int n, void *arg) {
    ddl_context *c = join_apart(rank, n, arg);
    REQUIRE(c != NULL);
    ddl_group *w = ddl_world(c);
    int64_t count = 1 << 20, part = count / n; /* several pieces */
    CHECK_EQ(reductions(w, 90001), REDUCTIONS);
    CHECK_EQ(apart_calls(c, "device_exchange"), REDUCTIONS);
    own_ops(c, rank, n);
    ddl_tensor whole[2] = {{0}, {0}}, own = {0};
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(ddl_tensor_alloc_on(c, 1, DDL_F32, 1, &count, &whole[i]), DDL_OK);
    }
    CHECK_EQ(ddl_tensor_alloc_on(c, 1, DDL_F32, 1, &part, &own), DDL_OK);
    int64_t before = apart_staged(c), calls = apart_calls(c, "device_exchange");
    ddl_request *r[2];
    CHECK_EQ(ddl_iall_reduce(w, whole[0], whole[0], DDL_AVG, &r[0]), DDL_OK);
    CHECK_EQ(ddl_iall_reduce(w, whole[1], whole[1], DDL_MAX, &r[1]), DDL_OK);
    CHECK_EQ(ddl_wait_all(r, 2, NULL), DDL_OK);
    CHECK_EQ(ddl_reduce(w, whole[0], whole[1], DDL_SUM, 1), DDL_OK);
    whole[0].shape[0] = part * n;
    CHECK_EQ(ddl_reduce_scatter(w, whole[0], own, DDL_SUM), DDL_OK);
    CHECK_EQ(apart_calls(c, "device_exchange") - calls, 4);
    CHECK_EQ(apart_staged(c) - before, 0); /* nothing went through the host */
    CHECK(coll_force(w, "all_reduce=ring")); /* asked for by name: by the host */
    coll_case k = {.kind = DDL_ALL_REDUCE, .dtype = DDL_F32, .op = DDL_SUM, .count = 90001, .in_device = 1, .out_device = 1};
    CHECK(coll_check(w, &k));
    CHECK_EQ(apart_calls(c, "device_exchange") - calls, 4);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(ddl_tensor_free(c, &whole[i]), DDL_OK);
    }
    CHECK_EQ(ddl_tensor_free(c, &own), DDL_OK);
    coll_leave(c);
}

TEST(reductions_leave_the_host_out) {
    if (!there_are_hosts()) {
        SKIP("libfabric's headers are not here, or no network but loopback");
    }
    coll_job job;
    coll_job_make(&job);
    ranks_fork(2, reduces, &job, 60);
    ranks_fork(3, reduces, &job, 60);
}

/* Some registrations fail; and ranks reduce in their order, which exchanges do anyway. */
static void reduces_partly(int rank, int n, void *arg) {
    ddl_context *c = join_apart(rank, n, arg);
    REQUIRE(c != NULL);
    CHECK_EQ(reductions(ddl_world(c), 90001), REDUCTIONS);
    CHECK_EQ(apart_calls(c, "device_exchange"), REDUCTIONS - REDUCING); /* averages of f16 are the host's then */
    CHECK(apart_staged(c) > 0);
    coll_leave(c);
}

TEST(reductions_with_memory_that_cannot_be_registered) {
    if (!there_are_hosts()) {
        SKIP("libfabric's headers are not here, or no network but loopback");
    }
    setenv("DDL_FABRIC_FORCE_FAIL_REGISTRATION", "7", 1);
    setenv("DDL_DETERMINISTIC", "1", 1);
    coll_job job;
    coll_job_make(&job);
    ranks_fork(3, reduces_partly, &job, 60);
    unsetenv("DDL_FABRIC_FORCE_FAIL_REGISTRATION");
    unsetenv("DDL_DETERMINISTIC");
}

/* The kernel of rank 1 fails: all are told which rank it was. */
static void kernel_fails(int rank, int n, void *arg) {
    if (rank == 1) {
        setenv("DDL_HMEM_FAIL", "3", 1);
    }
    ddl_context *c = join_apart(rank, n, arg);
    int64_t count = 3 << 20;
    ddl_tensor t = {0};
    REQUIRE(c != NULL);
    CHECK_EQ(ddl_tensor_alloc_on(c, 1, DDL_F32, 1, &count, &t), DDL_OK);
    CHECK(ddl_all_reduce(ddl_world(c), t, t, DDL_SUM) < 0);
    CHECK_STR(ddl_error(c), "rank 1");
    CHECK_STR(ddl_error(c), "all_reduce");
    CHECK_EQ(ddl_tensor_free(c, &t), DDL_OK);
    coll_leave(c);
}

TEST(a_kernel_that_fails_is_named) {
    if (!there_are_hosts()) {
        SKIP("libfabric's headers are not here, or no network but loopback");
    }
    coll_job job;
    coll_job_make(&job);
    ranks_fork(3, kernel_fails, &job, 60);
}

/* A rank dies while its memory is asked for. */
static void moves_dies(int rank, int n, void *arg) {
    ddl_context *c = join_apart(rank, n, arg);
    CHECK(c != NULL && coll_force(ddl_world(c), "broadcast=tree")); /* rank 2 waits for rank 0 */
    apart_dies(c, rank, DDL_BROADCAST, "device_straight");
}

static void reduces_dies(int rank, int n, void *arg) {
    apart_dies(join_apart(rank, n, arg), rank, DDL_ALL_REDUCE, "device_exchange");
}

TEST(a_rank_that_dies_in_a_collective) {
    if (!there_are_hosts()) {
        SKIP("libfabric's headers are not here, or no network but loopback");
    }
    coll_job job;
    coll_job_make(&job);
    apart_run_dies(moves_dies, &job);
    apart_run_dies(reduces_dies, &job);
}

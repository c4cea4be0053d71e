/* Messages between tensors on devices over libfabric with FI_HMEM, in whole jobs of two processes: the core offers, the plugin
 * registers and reads (fabric_hmem.h claims FI_HMEM in front of tcp; the "device" is ordinary memory, hmem_device.c). That
 * nothing went through the host is told by ddl_stats. What cannot be registered goes through the host, and is right too; so
 * is what the other side has on the host.
 * tests/run: variants=gcc,asan timeout=100 libs=-ldl */
#include "coll.h"

#include <limits.h>

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
    setenv("DDL_FABRIC_FORCE_MR", "local", 1); /* as an adapter: see fabric_bounces */
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

static int64_t staged(ddl_context *c) {
    ddl_stats s;
    CHECK_EQ(ddl_stats_get(c, &s), DDL_OK);
    return (int64_t)(s.device_bytes_in + s.device_bytes_out);
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
    int64_t before = staged(c);
    ddl_info info = {0};
    CHECK_EQ(rank == 0 ? ddl_send(ddl_world(c), t, 1, salt) : ddl_recv(ddl_world(c), t, 0, salt, &info), DDL_OK);
    int64_t went = staged(c) - before;
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

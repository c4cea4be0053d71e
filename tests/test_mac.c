/* DDL_MAC: jobs in which somebody on the way changes messages and mends their checksums, and settings that differ. The
 * somebody is odd_transport.c.
 * tests/run: variants=gcc,asan timeout=60 */
#include "world.h"

#include <limits.h>
#include <stdbool.h>

/* ---- jobs ---- */

static char folder[] = "/tmp/ddl-test-mac-XXXXXX";
static pid_t maker;

static void remove_folder(void) {
    char command[100];
    snprintf(command, sizeof command, "rm -r %s", folder);
    if (getpid() == maker) {
        (void)!system(command);
    }
}

/* A transport on which somebody changes what passes: odd_transport.c, compiled once. */
static bool somebody(const char *fault, const char *mac, const char *check) {
    char tests[PATH_MAX], command[3 * PATH_MAX];
    if (maker == 0) {
        snprintf(tests, sizeof tests, "%s", __FILE__);
        *strrchr(tests, '/') = 0;
        CHECK(mkdtemp(folder) != NULL);
        maker = getpid();
        atexit(remove_folder);
        snprintf(command, sizeof command, "cc -std=c11 -g -w -shared -fPIC -fvisibility=hidden -o %s/libddl-odd.so "
                 "%s/odd_transport.c", folder, tests);
        CHECK_EQ(system(command), 0);
    }
    setenv("DDL_PLUGIN_PATH", folder, 1);
    setenv("DDL_TRANSPORTS", "odd", 1);
    setenv("DDL_TEST_ODD_FAULT", fault, 1);
    setenv("DDL_MAC", mac, 1);
    setenv("DDL_CHECK", check, 1);
    setenv("DDL_LOG", "none", 1);
    return access(folder, R_OK) == 0;
}

/* What the last rank gets when it waits for 1000 bytes of rank 0: 'w'hole, 'c'hanged, or 'r'efused. */
typedef struct outcome {
    char what;
    char text[1200];
} outcome;

static void listen_to_rank_0(int rank, int n, void *arg) {
    outcome *o = arg;
    unsigned char data[1000];
    ddl_context *c = NULL;
    ddl_config config = {.timeout_ms = (int64_t)(10000 * test_slow())};
    REQUIRE(ddl_init(&config, &c) == DDL_OK);
    ddl_group *w = ddl_world(c);
    world_fill(data, rank, 7, sizeof data);
    if (rank == 0) {
        ddl_send(w, world_bytes(data, sizeof data), n - 1, 7);
        ddl_recv(w, world_bytes(data, 1), n - 1, 8, NULL); /* it has it, or the link has ended */
    } else if (rank == n - 1) {
        ddl_status status = ddl_recv(w, world_bytes(data, sizeof data), 0, DDL_ANY_TAG, NULL);
        o->what = status != DDL_OK ? 'r' : world_wrong(data, 0, 7, sizeof data) > 0 ? 'c' : 'w';
        snprintf(o->text, sizeof o->text, "%s: %s", ddl_status_name(status), status < 0 ? ddl_error(c) : "");
        ddl_send(w, world_bytes(data, 1), 0, 8);
    }
    ddl_finalize(&c);
}

static char received(const char *fault, const char *mac, const char *check) {
    outcome *o = ranks_shared(sizeof *o);
    CHECK(somebody(fault, mac, check));
    ranks_fork(3, listen_to_rank_0, o, 40);
    if (o->what == 'r') {
        CHECK_STR(o->text, "DDL_ERR_PEER");
        CHECK_STR(o->text, "rank 0");
    }
    return o->what;
}

TEST(nothing_is_refused_that_nobody_changed) {
    CHECK_EQ(received("", "1", ""), 'w');
    CHECK_EQ(received("", "1", "payload"), 'w');
}

TEST(a_forged_payload_is_refused) {
    CHECK_EQ(received("forge", "0", ""), 'c'); /* this is why */
    CHECK_EQ(received("forge", "0", "payload"), 'c'); /* checksums can be mended */
    CHECK_EQ(received("forge", "1", ""), 'c'); /* headers alone are not enough */
    CHECK_EQ(received("forge", "1", "payload"), 'r');
}

TEST(a_forged_header_is_refused) {
    CHECK_EQ(received("retag", "0", ""), 'w'); /* with another tag */
    CHECK_EQ(received("retag", "1", ""), 'r');
}

static void everything(ddl_group *w, void *arg) {
    (void)arg;
    int me = ddl_rank(w), n = ddl_size(w), before = (me + n - 1) % n;
    static const int counts[] = {1, 1000, 100003, 1000003};
    for (size_t k = 0; k < sizeof counts / sizeof counts[0]; k++) {
        int count = counts[k];
        size_t bytes = (size_t)count * sizeof(int32_t);
        int32_t *in = malloc(bytes), *out = malloc(bytes), wrong = 0;
        for (int i = 0; i < count; i++) {
            in[i] = me + i;
        }
        OK(ddl_all_reduce(w, ddl_tensor_1d(in, DDL_I32, count), ddl_tensor_1d(out, DDL_I32, count), DDL_SUM));
        for (int i = 0; i < count; i++) {
            wrong += out[i] != n * (n - 1) / 2 + n * i;
        }
        OK(ddl_send_recv(w, ddl_tensor_1d(in, DDL_I32, count), (me + 1) % n, 1, ddl_tensor_1d(out, DDL_I32, count), before,
                         1, NULL));
        for (int i = 0; i < count; i++) {
            wrong += out[i] != before + i;
        }
        CHECK_EQ(wrong, 0);
        free(in);
        free(out);
    }
}

TEST(jobs_run_sealed) {
    setenv("DDL_TRANSPORTS", "tcp", 1);
    setenv("DDL_MAC", "1", 1);
    for (int payload = 0; payload < 2; payload++) {
        setenv("DDL_CHECK", payload ? "payload" : "", 1);
        world_fork(4, everything, NULL, 40);
    }
}

/* ---- keys ---- */

/* Joins alone with a second rank that is made up: its own words, under the other's number. changed: the byte of its own
 * line that somebody on the way changes, -1: none. */
static int mirror(void *user, const void *in, void *out, size_t bytes) {
    int changed = *(int *)user;
    memcpy(out, in, bytes);
    memcpy((char *)out + bytes, in, bytes);
    if (changed >= 0) {
        ((char *)out)[changed] ^= 1;
    }
    return 0;
}

/* A nonce of an earlier run in the place of this rank's own would bring back that run's keys, and with them frames that
 * somebody has kept. */
TEST(a_nonce_that_comes_back_changed_is_refused) {
    char error[1200] = "", secret[65];
    ddl_context *c = NULL;
    int changed = 7 * 4 + 2 * 8 + 64 + 32 + 16; /* in a blob: numbers, host_id, host_name, pass_name, then the nonce */
    ddl_config config = {.world_size = 2,
                         .exchange = mirror,
                         .exchange_user = &changed,
                         .secret = secret,
                         .secret_bytes = 64,
                         .timeout_ms = 300,
                         .init_timeout_ms = 300,
                         .error_text = error,
                         .error_bytes = sizeof error};
    ranks_secret(secret);
    setenv("DDL_TRANSPORTS", "tcp", 1);
    setenv("DDL_MAC", "1", 1);
    setenv("DDL_CHECK", "", 1);
    setenv("DDL_LOG", "none", 1);
    CHECK_EQ(ddl_init(&config, &c), DDL_ERR_CORRUPT);
    CHECK_STR(error, "what this rank told about itself came back changed");
    changed = -1; /* the rank that is made up never greets */
    ddl_status status = ddl_init(&config, &c);
    CHECK(status < 0 && status != DDL_ERR_CORRUPT);
    unsetenv("DDL_MAC");
    unsetenv("DDL_CHECK");
    unsetenv("DDL_TRANSPORTS");
}

/* ---- settings ---- */

static void differ(int rank, int n, void *arg) {
    (void)n;
    (void)arg;
    char error[1200] = "";
    ddl_context *c = NULL;
    ddl_config config = {.error_text = error, .error_bytes = sizeof error};
    setenv("DDL_LOG", "none", 1);
    setenv("DDL_TRANSPORTS", "tcp", 1);
    setenv("DDL_MAC", rank == 1 ? "0" : "1", 1);
    setenv("DDL_CHECK", rank == 2 ? "payload" : "", 1);
    CHECK_EQ(ddl_init(&config, &c), DDL_ERR_CONFIG);
    CHECK_STR(error, rank == 0   ? "rank 1 has no DDL_MAC, this rank DDL_MAC=1 without DDL_CHECK=payload"
                     : rank == 1 ? "rank 0 has DDL_MAC=1 without DDL_CHECK=payload, this rank no DDL_MAC"
                                 : "rank 0 has DDL_MAC=1 without DDL_CHECK=payload, this rank DDL_MAC=1 with");
    CHECK_STR(error, "set both alike on all ranks");
}

TEST(ranks_that_differ_are_refused) { ranks_fork(3, differ, NULL, 30); }

static void no_secret(int rank, int n, void *arg) {
    (void)rank;
    (void)n;
    (void)arg;
    char error[1200] = "";
    ddl_context *c = NULL;
    ddl_config config = {.error_text = error, .error_bytes = sizeof error};
    unsetenv("DDL_SECRET");
    setenv("DDL_LOG", "none", 1);
    setenv("DDL_MAC", "1", 1);
    CHECK_EQ(ddl_init(&config, &c), DDL_ERR_CONFIG);
    CHECK_STR(error, "DDL_MAC=1 makes its keys from the job secret, and there is none");
}

TEST(without_a_secret_there_are_no_keys) { ranks_fork(2, no_secret, NULL, 30); }

/* Every member of a transport's table that the core calls, with a transport that has no more than it must, or goes wrong:
 * an old and short table, one that sleeps its own way, one that borrows and cannot give back, and every way to fail.
 * The plugin is fake_transport.c, compiled here and loaded as any other; the ranks are threads.
 * tests/run: variants=gcc,asan timeout=60 */
#include "world.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdbool.h>

enum { RANKS = 4, LARGE = 3 * 1024 * 1024 + 5 };

static char folder[] = "/tmp/ddl-test-abi-XXXXXX";

static void remove_folder(void) {
    char command[100];
    snprintf(command, sizeof command, "rm -r %s", folder);
    (void)!system(command);
}

/* Compiles the plugin once, and sets its mode. False: it is not there. */
static bool fake(const char *mode, const char *transports) {
    static bool made;
    char tests[PATH_MAX], command[3 * PATH_MAX];
    if (!made) {
        snprintf(tests, sizeof tests, "%s", __FILE__);
        *strrchr(tests, '/') = 0;
        made = mkdtemp(folder) != NULL;
        atexit(remove_folder);
        snprintf(command, sizeof command,
                 "cc -std=c11 -g -Wall -Wextra -Werror -shared -fPIC -fvisibility=hidden -I%s/.. -o %s/libddl-fake.so "
                 "%s/fake_transport.c -lpthread", tests, folder, tests);
        made = made && system(command) == 0;
    }
    CHECK(made);
    setenv("DDL_PLUGIN_PATH", folder, 1);
    setenv("DDL_TEST_FAKE", mode, 1);
    setenv("DDL_TRANSPORTS", transports, 1);
    return made;
}

/* A function of the plugin that was loaded. */
static void *fake_symbol(const char *name) {
    char path[200];
    snprintf(path, sizeof path, "%s/libddl-fake.so", folder);
    void *so = dlopen(path, RTLD_NOW | RTLD_NOLOAD), *found = so != NULL ? dlsym(so, name) : NULL;
    if (found == NULL) {
        fprintf(stderr, "%s is not in %s\n", name, path);
        exit(1);
    }
    dlclose(so);
    return found;
}

/* ---- it works ---- */

/* Messages and collectives of many sizes around a ring, against plain loops. */
static void everything(ddl_group *w, void *arg) {
    static const int64_t counts[] = {0, 1, 7, 1000, 100003, LARGE / 8};
    int me = ddl_rank(w), n = ddl_size(w);
    (void)arg;
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        size_t count = (size_t)counts[i];
        int64_t *in = calloc(count + 1, 8), *out = calloc(count + 1, 8), wrong = 0;
        for (size_t k = 0; k < count; k++) {
            in[k] = me * 1000 + (int64_t)k;
        }
        OK(ddl_all_reduce(w, ddl_tensor_1d(in, DDL_I64, counts[i]), ddl_tensor_1d(out, DDL_I64, counts[i]), DDL_SUM));
        for (size_t k = 0; k < count; k++) {
            wrong += out[k] != n * (n - 1) / 2 * 1000 + n * (int64_t)k;
        }
        OK(ddl_send_recv(w, ddl_tensor_1d(in, DDL_I64, counts[i]), (me + 1) % n, 5,
                         ddl_tensor_1d(out, DDL_I64, counts[i]), (me + n - 1) % n, 5, NULL));
        for (size_t k = 0; k < count; k++) {
            wrong += out[k] != (me + n - 1) % n * 1000 + (int64_t)k;
        }
        CHECK_EQ(wrong, 0);
        free(in);
        free(out);
    }
    OK(ddl_barrier(w));
}

TEST(a_short_table_is_enough) {
    REQUIRE(fake("old", "fake"));
    world_threads(RANKS, everything, NULL);
    int (*local_rank)(void) = (int (*)(void))(uintptr_t)fake_symbol("fake_told_local_rank");
    CHECK_EQ(local_rank(), -1); /* ddl_config does not say it */
}

TEST(without_recall_and_redirect_the_core_copies) {
    REQUIRE(fake("borrow", "fake"));
    world_threads(RANKS, everything, NULL);
}

/* Long enough for the waiters to sleep. */
static void late(ddl_group *w, void *arg) {
    (void)arg;
    if (ddl_rank(w) == 0) {
        usleep(100000);
    }
    everything(w, NULL);
}

TEST(a_transport_may_sleep_its_own_way) {
    REQUIRE(fake("sleeper", "fake"));
    world_threads(RANKS, late, NULL);
    int (*slept)(void) = (int (*)(void))(uintptr_t)fake_symbol("fake_slept");
    CHECK(slept() > 0);
}

/* tcp wakes by a descriptor, the fake does not: both are heard. */
TEST(one_that_sleeps_its_own_way_beside_tcp) {
    REQUIRE(fake("sleeper", "fake,tcp"));
    world_threads(RANKS, late, NULL);
}

static char start[2000]; /* what rank 0 says */

static void on_log(void *user, ddl_log_level level, const char *line) {
    (void)user;
    if (level == DDL_LOG_INFO && strstr(line, "rank 0: 4 ranks") != NULL) {
        snprintf(start, sizeof start, "%s", line);
    }
}

TEST(a_rank_that_it_does_not_reach_goes_another_way) {
    REQUIRE(fake("even", "fake,tcp"));
    ddl_config config = {.log = on_log, .log_level = DDL_LOG_INFO};
    world_config = &config;
    world_threads(RANKS, everything, NULL);
    world_config = NULL;
    CHECK_STR(start, "fake to 1 rank");
    CHECK_STR(start, "tcp to 2 ranks");
}

/* Of four ranks the two even ones reach each other by the fake, all others by tcp. Both counts together are the whole. */
static void counted(ddl_group *w, void *arg) {
    static const char *const names[] = {"fake", "tcp"};
    ddl_stats before, s;
    everything(w, arg);
    OK(ddl_stats_get(ddl_group_context(w), &before));
    everything(w, arg);
    OK(ddl_stats_get(ddl_group_context(w), &s));
    ddl_transport_stats sum = {0};
    for (int i = 0; i < 2; i++) {
        const ddl_transport_stats *t = &s.transports[i], *old = &before.transports[i];
        REQUIRE(t->name != NULL);
        CHECK_EQ(t->name, names[i]);
        bool used = i == 1 || ddl_rank(w) % 2 == 0;
        CHECK_EQ(t->peers, ddl_rank(w) % 2 == 0 ? i + 1 : 3 * i);
        CHECK_EQ(t->messages_sent > old->messages_sent && t->messages_received > old->messages_received, used);
        CHECK_EQ(t->bytes_sent > old->bytes_sent && t->bytes_received > old->bytes_received, used);
        sum.messages_sent += t->messages_sent;
        sum.messages_received += t->messages_received;
        sum.bytes_sent += t->bytes_sent;
        sum.bytes_received += t->bytes_received;
    }
    CHECK(s.transports[1].bytes_sent > before.transports[1].bytes_sent + LARGE / 8 * 8); /* one went to the next rank */
    CHECK(s.transports[2].name == NULL);
    CHECK_EQ(sum.messages_sent, s.messages_sent);
    CHECK_EQ(sum.messages_received, s.messages_received);
    CHECK_EQ(sum.bytes_sent, s.bytes_sent);
    CHECK_EQ(sum.bytes_received, s.bytes_received);
}

TEST(messages_and_bytes_are_counted_for_each_transport) {
    REQUIRE(fake("even", "fake,tcp"));
    world_threads(RANKS, counted, NULL);
}

TEST(on_request_means_on_request) {
    REQUIRE(fake("even", "fake,tcp"));
    unsetenv("DDL_TRANSPORTS");
    ddl_config config = {.plugins = "fake"};
    world_config = &config;
    world_threads(2, everything, NULL);
    world_config = NULL;
}

/* ---- it cannot start ---- */

static int nobody(void *user, const void *in, void *out, size_t bytes) {
    (void)user, (void)in, (void)out, (void)bytes;
    return 1;
}

static void refused(const char *mode, const char *text) {
    char error[1024] = "";
    ddl_context *c = NULL;
    REQUIRE(fake(mode, "fake"));
    ddl_config config = {.world_size = 2, .exchange = nobody, .error_text = error, .error_bytes = sizeof error};
    CHECK_STR(ddl_status_name(ddl_init(&config, &c)), "DDL_ERR_SYSTEM");
    CHECK_STR(error, text);
    CHECK(c == NULL);
}

TEST(an_endpoint_that_does_not_open_is_an_error_where_it_is_asked_for) { refused("shut", "the fake is shut"); }
TEST(so_is_one_without_an_address) { refused("mute", "transport fake"); }

/* ---- it fails ---- */

static void until_it_breaks(ddl_group *w, void *arg) {
    const char *text = arg;
    void (*make_trouble)(void) = (void (*)(void))(uintptr_t)fake_symbol("fake_trouble");
    int64_t one = 1, sum = 0;
    ddl_status status = DDL_OK;
    double start = test_now_s();
    for (int i = 0; i < 100000 && status == DDL_OK; i++) {
        status = ddl_all_reduce(w, DDL_VIEW(&one, 1), DDL_VIEW(&sum, 1), DDL_SUM);
        CHECK(status != DDL_OK || sum == ddl_size(w));
        if (i == 100) {
            make_trouble();
        }
    }
    CHECK_STR(ddl_status_name(status), "DDL_ERR_PEER");
    CHECK_STR(ddl_error(ddl_group_context(w)), text);
    CHECK(test_now_s() - start < 5 * test_slow());
}

TEST(a_transport_that_fails_breaks_its_links) {
    REQUIRE(fake("broken", "fake"));
    world_threads(2, until_it_breaks, (void *)(uintptr_t) "is dead");
}

TEST(a_damaged_header_breaks_its_link) {
    REQUIRE(fake("torn", "fake"));
    world_threads(2, until_it_breaks, (void *)(uintptr_t) "is dead");
}

TEST(a_link_that_is_lost_is_one_that_is_dead) {
    REQUIRE(fake("gone", "fake"));
    world_threads(2, until_it_breaks, (void *)(uintptr_t) "is dead");
}

/* Time is over while a message is half-way: both operations end by their deadlines, their memory is free at once, and what
 * comes later harms nobody. */
static void half_way(ddl_group *w, void *arg) {
    (void)arg;
    int me = ddl_rank(w);
    unsigned char *at = malloc(LARGE);
    world_fill(at, me, 0, LARGE);
    ddl_request *r = NULL;
    double start = test_now_s();
    ddl_status status = me == 0 ? ddl_isend(w, world_bytes(at, LARGE), 1, 1, &r) : ddl_irecv(w, world_bytes(at, LARGE), 0, 1, &r);
    CHECK_EQ((int)status, (int)DDL_OK);
    status = ddl_wait(&r, NULL);
    CHECK(test_now_s() - start < 1.2 * test_slow());
    CHECK(me == 0 ? status == DDL_OK || status == DDL_ERR_TIMEOUT : status == DDL_ERR_TIMEOUT);
    memset(at, 0xdd, LARGE);
    free(at);
    usleep(1700000);
    ddl_progress(ddl_group_context(w));
}

TEST(what_cannot_be_taken_back_outlives_its_operation) {
    REQUIRE(fake("frozen", "fake"));
    ddl_config config = {.timeout_ms = 600};
    world_config = &config;
    world_threads(2, half_way, NULL);
    world_config = NULL;
}

/* The self-test of plugins: one that damages, loses or stops is refused in a sentence that names it and its failure, and
 * the job goes on over others; one that is short of memory is not called broken. The plugin is odd_transport.c.
 * tests/run: variants=gcc,asan timeout=60 */
#include "world.h"

#include <limits.h>
#include <stdbool.h>

enum { RANKS = 3, COUNT = 70001 };

static char folder[] = "/tmp/ddl-test-self-XXXXXX";

static pid_t maker;

static void remove_folder(void) {
    char command[100];
    if (getpid() != maker) {
        return; /* a rank */
    }
    snprintf(command, sizeof command, "rm -r %s", folder);
    (void)!system(command);
}

/* Compiles the plugin once, and sets its fault and who asks for it. */
static bool odd(const char *fault, const char *transports, const char *plugins) {
    static bool made;
    char tests[PATH_MAX], command[3 * PATH_MAX];
    if (!made) {
        snprintf(tests, sizeof tests, "%s", __FILE__);
        *strrchr(tests, '/') = 0;
        made = mkdtemp(folder) != NULL;
        maker = getpid();
        atexit(remove_folder);
        snprintf(command, sizeof command, "cc -std=c11 -g -w -shared -fPIC -fvisibility=hidden -o %s/libddl-odd.so "
                 "%s/odd_transport.c", folder, tests);
        made = made && system(command) == 0;
    }
    CHECK(made);
    setenv("DDL_PLUGIN_PATH", folder, 1);
    setenv("DDL_TEST_ODD_FAULT", fault, 1);
    setenv("DDL_TRANSPORTS", transports, 1);
    setenv("DDL_PLUGINS", plugins, 1);
    return made;
}

typedef struct seen {
    const char *carrier; /* the transport that the job is to use; NULL: it must not start */
    const char *text;    /* what is to be said; NULL: no warning at all */
} seen;

static void keep(void *user, ddl_log_level level, const char *line) {
    char *log = user;
    if (level == DDL_LOG_WARN) {
        strncat(log, line, 4000 - strlen(log) - 1);
    }
}

/* A job whose all_reduce is right, over the transport that is expected. */
static void job(int rank, int n, void *arg) {
    const seen *s = arg;
    static int32_t in[COUNT], out[COUNT];
    static char log[4000], error[1200] = "";
    ddl_context *c = NULL;
    ddl_config config = {.log = keep, .log_user = log, .error_text = error, .error_bytes = sizeof error};
    ddl_status status = ddl_init(&config, &c);
    if (s->text != NULL) {
        CHECK_STR(log, s->text);
    } else {
        CHECK_EQ(strlen(log), 0);
    }
    if (s->carrier == NULL) {
        CHECK_EQ(status, DDL_ERR_PLUGIN);
        CHECK_STR(error, s->text);
        CHECK(c == NULL);
        return;
    }
    CHECK_EQ(status, DDL_OK);
    if (status != DDL_OK) {
        fprintf(stderr, "%s\n", error);
        return;
    }
    for (int i = 0; i < COUNT; i++) {
        in[i] = i + rank;
    }
    CHECK_EQ(ddl_all_reduce(ddl_world(c), ddl_tensor_1d(in, DDL_I32, COUNT), ddl_tensor_1d(out, DDL_I32, COUNT),
                            DDL_SUM), DDL_OK);
    int wrong = 0;
    for (int i = 0; i < COUNT; i++) {
        wrong += out[i] != n * i + n * (n - 1) / 2;
    }
    CHECK_EQ(wrong, 0);
    ddl_stats stats;
    CHECK_EQ(ddl_stats_get(c, &stats), DDL_OK);
    for (int i = 0; i < DDL_STATS_TRANSPORTS && stats.transports[i].name != NULL; i++) {
        CHECK_EQ(stats.transports[i].peers, strcmp(stats.transports[i].name, s->carrier) == 0 ? n - 1 : 0);
    }
    ddl_finalize(&c);
}

static void run(const char *carrier, const char *text) {
    seen s = {carrier, text};
    ranks_fork(RANKS, job, &s, 40);
}

TEST(a_plugin_that_works_is_used) {
    REQUIRE(odd("", "", ""));
    run("odd", NULL);
}

TEST(one_that_damages_is_refused_and_the_others_carry) {
    REQUIRE(odd("damage", "", ""));
    run("tcp", "libddl-odd.so is not used: its self-test failed: message 4, of 4097 bytes, arrived damaged");
}

TEST(one_that_loses_is_refused) {
    REQUIRE(odd("lose", "", ""));
    run("tcp", "its self-test failed: message 4 of 14 came as number 3");
}

TEST(one_that_never_delivers_is_refused) {
    REQUIRE(odd("hang", "", ""));
    run("tcp", "its self-test failed: nothing moved for 5 s, and 13 and 13 of 14 messages had arrived");
}

TEST(one_whose_progress_fails_is_refused) {
    REQUIRE(odd("progress", "", ""));
    run("tcp", "its self-test failed: its progress failed: the operating system refused a request");
}

TEST(one_whose_native_sum_is_wrong_is_refused) {
    REQUIRE(odd("native", "", ""));
    run("tcp", "its self-test failed: element 0 of its native all_reduce is 3, expected 16777622");
}

TEST(short_of_memory_is_not_broken) {
    REQUIRE(odd("memory", "", "")); /* it cannot open the pair */
    run("odd", NULL);
    REQUIRE(odd("full", "", "")); /* it cannot send */
    run("odd", NULL);
    REQUIRE(odd("apart", "", "")); /* the pair cannot share what it would share */
    run("odd", NULL);
}

TEST(a_broken_one_that_was_asked_for_is_an_error) {
    static const char text[] = "which DDL_TRANSPORTS asks for, cannot be used: its self-test failed: message 4";
    REQUIRE(odd("damage", "odd,tcp", ""));
    run(NULL, text);
    REQUIRE(odd("damage", "", "odd"));
    run(NULL, "which DDL_PLUGINS asks for, cannot be used: its self-test failed: message 4");
}

TEST(the_self_test_can_be_turned_off) {
    REQUIRE(odd("damage", "", ""));
    setenv("DDL_SELF_TEST", "0", 1);
    run("odd", NULL);
    setenv("DDL_SELF_TEST", "2", 1);
    char error[1200] = "";
    ddl_context *c = NULL;
    ddl_config config = {.error_text = error, .error_bytes = sizeof error};
    CHECK_EQ(ddl_init(&config, &c), DDL_ERR_CONFIG);
    CHECK_STR(error, "DDL_SELF_TEST is \"2\"");
    unsetenv("DDL_SELF_TEST");
}

/* Every variable of the tables in docs/operations.md, with a value that makes no sense: ddl_init refuses it with a
 * sentence that names the variable, for one rank as for many, and leaves nothing behind; or warns, where the value may
 * be right elsewhere. A variable of the page that is not in the table here fails the test. */
#include "world.h"

#include "faults.h"

#include <ctype.h>
#include <sys/stat.h>

static char warned[4000]; /* what was logged, of all ranks */

static void keep_log(void *user, ddl_log_level level, const char *line) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    (void)user;
    (void)level;
    pthread_mutex_lock(&lock);
    size_t used = strlen(warned);
    snprintf(warned + used, sizeof warned - used, "%s\n", line);
    pthread_mutex_unlock(&lock);
}

typedef struct variable {
    const char *name, *garbage;
    ddl_status status; /* DDL_OK: it is a warning */
    const char *says;  /* in the sentence; NULL: the value */
    const char *with;  /* other variables that make it count, as "A=1 B=2" */
} variable;

#define MANY "RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1"
#define PMIX "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=n7"
#define SHM MANY " DDL_TRANSPORTS=shm DDL_SECRET=0123456789abcdef"
#define FABRIC MANY " DDL_TRANSPORTS=fabric DDL_SECRET=0123456789abcdef"
#define LONG_TEXT "a-name-of-a-host-that-is-longer-than-any-that-there-is-and-would-be-cut-off-before-its-end-where-it-" \
                  "differs-from-that-of-its-neighbour"

static const variable variables[] = {
    {"DDL_LOG", "loud", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_RENDEZVOUS", "udp://somewhere", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_SECRET_FD", "three", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_SECRET_FILE", "/nonexistent/secret", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_SECRET", "short", DDL_ERR_CONFIG, "5 bytes", ""},
    {"DDL_PMIX_LIBRARY", "/nonexistent/libpmix.so", DDL_ERR_CONFIG, NULL, PMIX},
    {"DDL_INTERFACE", "nosuch7", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_INTERFACE", "nosuch7", DDL_ERR_CONFIG, NULL, MANY " DDL_SECRET=0123456789abcdef"},
    {"DDL_ADVERTISE", "300.1.2.3.", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_ADVERTISE", "300.1.2.3.", DDL_ERR_CONFIG, NULL, MANY " DDL_SECRET=0123456789abcdef"},
    {"DDL_PORT_RANGE", "80-", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_TRANSPORTS", "bogus", DDL_ERR_PLUGIN, NULL, ""},
    {"DDL_TRANSPORTS", "tcp,bogus", DDL_ERR_PLUGIN, "bogus", MANY},
    {"DDL_TRANSPORTS", ",", DDL_ERR_PLUGIN, "\"\"", ""},
    {"DDL_PLUGINS", "nosuch", DDL_ERR_PLUGIN, NULL, ""},
    {"DDL_PLUGIN_PATH", "/nonexistent/plugins", DDL_OK, NULL, ""},
    {"DDL_SELF_TEST", "no", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_ALGO", "bogus", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_TUNE_CACHE", "/nonexistent/figures", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_TUNE_CACHE", "/dev", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_TUNE_CACHE", "/dev/null", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_TUNE_CACHE", "/etc/passwd", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_TUNE_CACHE", "/etc/passwd", DDL_ERR_CONFIG, NULL, MANY},
    {"DDL_TRACE", "/nonexistent/trace", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_TRACE_EVENTS", "many", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_TRACE_SUMMARY", "yes", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_TRACE_STEPS", "2", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_TIMEOUT_MS", "soon", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_INIT_TIMEOUT_MS", "0", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_STALL_MS", "1e3", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_SLOW", "slow", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_SLOW_RUNS", "often", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_PROGRESS_THREAD", "yes", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_DETERMINISTIC", "2", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_SPREAD", "-1", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_HOST_ID", LONG_TEXT, DDL_ERR_CONFIG, "at most 127", ""},
    {"DDL_RESTARTED", "once", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_ENDED_FD", "three", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_MAC", "on", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_CHECK", "all", DDL_ERR_CONFIG, NULL, ""},
    {"DDL_SHM_RING_BYTES", "64k", DDL_ERR_CONFIG, NULL, SHM},
    {"DDL_SHM_RING_BYTES", "1", DDL_ERR_CONFIG, NULL, SHM},
    {"DDL_SHM_STAGING_BYTES", "99999999999999999999", DDL_ERR_CONFIG, NULL, SHM},
    {"DDL_SHM_ARENA_BYTES", "-1", DDL_ERR_CONFIG, NULL, SHM},
    {"DDL_SHM_CMA", "yes", DDL_ERR_CONFIG, NULL, SHM},
    {"DDL_SHM_DISTANT_NS", "far", DDL_ERR_CONFIG, NULL, SHM},
    {"DDL_FABRIC_SUBNET", "everywhere", DDL_ERR_CONFIG, NULL, FABRIC},
    {"DDL_FABRIC_RAILS", "five", DDL_ERR_CONFIG, NULL, FABRIC},
    {"DDL_FABRIC_OFFER_BYTES", "much", DDL_ERR_CONFIG, NULL, FABRIC},
    {"DDL_FABRIC_CACHE", "-1", DDL_ERR_CONFIG, NULL, FABRIC},
    {"DDL_FABRIC_CACHE_BYTES", "all", DDL_ERR_CONFIG, NULL, FABRIC},
    {"DDL_FABRIC_PROGRESS", "fast", DDL_ERR_CONFIG, NULL, FABRIC},
    {"DDL_FABRIC_FORCE_MR", "local,virtual_addr", DDL_ERR_CONFIG, NULL, FABRIC},
    {"DDL_FABRIC_FORCE_MR", "loc", DDL_ERR_CONFIG, NULL, FABRIC},
};
enum { VARIABLES = sizeof variables / sizeof variables[0] };

/* Any text is a job's name. The fabric's three are names that only libfabric knows: test_fabric asks for wrong ones.
 * Those that force something are for tests. */
static const char *const free_text[] = {"DDL_JOB", "DDL_FABRIC_PROVIDER", "DDL_FABRIC_DOMAIN", "DDL_FABRIC_INTERFACE"};

static bool is_known(const char *name) {
    bool known = strncmp(name, "DDL_FABRIC_FORCE_", 17) == 0;
    for (size_t i = 0; i < VARIABLES; i++) {
        known = known || strcmp(variables[i].name, name) == 0;
    }
    for (size_t i = 0; i < sizeof free_text / sizeof free_text[0]; i++) {
        known = known || strcmp(free_text[i], name) == 0;
    }
    return known;
}

TEST(every_variable_of_the_page_is_in_the_table_here) {
    FILE *page = fopen("docs/operations.md", "r");
    char line[2000];
    int found = 0;
    REQUIRE(page != NULL);
    while (fgets(line, sizeof line, page) != NULL) {
        char *cell = strncmp(line, "| DDL_", 6) == 0 ? line + 2 : NULL;
        char *end = cell != NULL ? strstr(cell, " |") : NULL;
        if (end == NULL) {
            continue;
        }
        *end = 0;
        for (char *at = strstr(cell, "DDL_"), *next; at != NULL; at = next) { /* one row may have several */
            size_t length = 0;
            while (isupper((unsigned char)at[length]) || at[length] == '_') {
                length++;
            }
            next = strstr(at + length, "DDL_");
            at[length] = 0;
            if (!is_known(at)) {
                test__fail(__FILE__, __LINE__, "%s has no garbage in this test", at);
            }
            found++;
        }
    }
    fclose(page);
    CHECK(found > 35);
}

/* "A=1 B=2" into the environment, or out of it. */
static void put(const char *pairs, bool set) {
    char copy[600], *save = NULL;
    snprintf(copy, sizeof copy, "%s", pairs);
    for (char *pair = strtok_r(copy, " ", &save); pair != NULL; pair = strtok_r(NULL, " ", &save)) {
        char *equals = strchr(pair, '=');
        *equals = 0;
        (void)(set ? setenv(pair, equals + 1, 1) : unsetenv(pair));
    }
}

/* A process of its own: what it opened or changed shows, and nothing of it stays. */
static void try_one(int rank, int n, void *arg) {
    const variable *v = (const variable *)arg;
    char why[1024] = "";
    (void)n;
    (void)rank;
    put("RANK= WORLD_SIZE= LOCAL_RANK= LOCAL_WORLD_SIZE= MASTER_ADDR= MASTER_PORT= DDL_SECRET=", false);
    put(v->with, true);
    setenv("DDL_PLUGIN_PATH", fault_plugins(), 1);
    setenv(v->name, v->garbage, 1);
    ddl_config config = {.log = keep_log, .error_text = why, .error_bytes = sizeof why};
    ddl_context *c = (ddl_context *)&config;
    int fds = fault_fds();
    ddl_status status = ddl_init(&config, &c);
    CHECK_STR(ddl_status_name(status), ddl_status_name(v->status));
    const char *said = status < 0 ? why : warned;
    CHECK_STR(said, strcmp(v->name, "DDL_PORT_RANGE") == 0 ? "port range" : v->name);
    CHECK_STR(said, v->says != NULL ? v->says : v->garbage);
    if (status < 0) {
        CHECK(c == NULL);
    } else {
        CHECK_EQ(ddl_finalize(&c), DDL_OK);
    }
    CHECK_EQ(fault_fds(), fds);
}

TEST(garbage_is_refused_by_a_sentence_that_names_the_variable) {
    for (int i = 0; i < VARIABLES; i++) {
        variable v = variables[i];
        bool shm = strncmp(v.name, "DDL_SHM_", 8) == 0, fabric = strncmp(v.name, "DDL_FABRIC_", 11) == 0;
        if ((shm && !fault_has_plugin("shm")) || (fabric && !fault_has_plugin("fabric"))) {
            continue;
        }
        int before = test__now->failures;
        ranks_fork(1, try_one, &v, 20);
        if (test__now->failures != before) {
            printf("  %s=%s with %s\n", v.name, v.garbage, v.with);
        }
    }
}

/* What stands in the file stays. */
TEST(a_file_that_is_no_cache_of_figures_is_left_as_it_was) {
    char path[] = "/tmp/ddl-test-cache-XXXXXX", text[200] = "";
    int fd = mkstemp(path);
    static const char wrong[] = "a letter to my aunt\nwith two lines\n";
    CHECK_EQ(write(fd, wrong, sizeof wrong - 1), (ssize_t)sizeof wrong - 1);
    variable v = {"DDL_TUNE_CACHE", path, DDL_ERR_CONFIG, NULL, ""};
    ranks_fork(1, try_one, &v, 20);
    CHECK_EQ(pread(fd, text, sizeof text - 1, 0), (ssize_t)sizeof wrong - 1);
    CHECK_STR(text, wrong);
    close(fd);
    unlink(path);
}

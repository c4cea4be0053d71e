/* A stall report names who is missing and nobody else, the first one too, also when stall_ms is short.
 * tests/run: variants=gcc timeout=60 waits=yes */
#define TEST_TIMEOUT_S 50
#include "world.h"

typedef struct seen {
    char first[1100]; /* the first report of this rank */
} seen;

static void on_log(void *user, ddl_log_level level, const char *line) {
    seen *s = user;
    (void)level;
    if (strstr(line, "stalled for") != NULL && s->first[0] == 0) {
        snprintf(s->first, sizeof s->first, "%s", line);
    }
}

/* Rank 2 computes outside ddl until the others have reported, or for too long. */
static void late(ddl_group *w, void *arg) {
    seen *mine = arg;
    float a[100] = {1};
    OK(ddl_all_reduce(w, DDL_ARRAY(a), DDL_ARRAY(a), DDL_SUM));
    if (ddl_rank(w) == 2) {
        usleep((useconds_t)(1500000 * test_slow()));
    }
    OK(ddl_all_reduce(w, DDL_ARRAY(a), DDL_ARRAY(a), DDL_SUM));
    if (ddl_rank(w) == 2) {
        return;
    }
    CHECK_STR(mine->first, "all_reduce(100 x f32, sum)");
    CHECK_STR(mine->first, "rank 2 (does not answer");
    CHECK_STR(mine->first, "; 3 of 4 have arrived");
    for (int rank = 0; rank < 4; rank++) {
        char name[32];
        snprintf(name, sizeof name, " rank %d (", rank);
        CHECK(rank == 2 || strstr(mine->first, name) == NULL);
    }
}

TEST(the_first_report_names_the_missing_rank_alone) {
    static seen mine; /* each process has its own */
    static ddl_config config;
    config = (ddl_config){.stall_ms = (int64_t)(600 * test_slow()), .timeout_ms = 60000, .log = on_log, .log_user = &mine};
    world_config = &config;
    world_fork(4, late, &mine, 40);
}

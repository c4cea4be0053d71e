/* A rank for test_attach.py: 300 collectives, then "ready", then what its first argument says: `late R` rank R computes
 * while the others wait in a barrier; `both R` it and the next one do; `agree R` it does while the others agree;
 * `message R` while rank 0 waits for a message of it; `busy` collectives for ever, `slow` likewise, before each of
 * which R computes for 5 ms, `large` of 1 MiB; the last two print "verdict SLOW_RANK SLOW_LINK" of ddl_stats when it
 * changes. The third argument is for how many seconds. */
#define _POSIX_C_SOURCE 200809L /* nanosleep */
#include "ddl.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int fail(ddl_context *c) {
    printf("error %s\n", ddl_error(c));
    return 1;
}

static void compute(double seconds) {
    time_t end = time(NULL) + (time_t)seconds;
    while (time(NULL) < end) {
    }
}

/* Until it is killed. */
static int straggle(ddl_context *c, const char *how, int slow) {
    static float large[1 << 18], small[2];
    bool is_large = strcmp(how, "large") == 0;
    ddl_group *world = ddl_world(c);
    struct timespec pause = {0, 5000000};
    int told[2] = {-2, -2};
    for (int i = 0;; i++) {
        ddl_tensor t = is_large ? DDL_ARRAY(large) : DDL_ARRAY(small);
        ddl_stats s;
        if (!is_large && ddl_rank(world) == slow) {
            nanosleep(&pause, NULL);
        }
        if (ddl_all_reduce(world, t, t, DDL_SUM) != DDL_OK || ddl_stats_get(c, &s) != DDL_OK) {
            return fail(c);
        }
        if (i > 30 && (told[0] != s.slow_rank || told[1] != s.slow_link)) {
            printf("verdict %d %d\n", told[0] = s.slow_rank, told[1] = s.slow_link);
            fflush(stdout);
        }
    }
}

int main(int argc, char **argv) {
    ddl_context *c;
    char why[1024] = "";
    ddl_config config = {.error_text = why, .error_bytes = sizeof why};
    if (argc < 4 || ddl_init(&config, &c) != DDL_OK) {
        printf("error %s\n", why);
        return 1;
    }
    ddl_group *world = ddl_world(c), *pair = NULL;
    float x[5] = {0};
    int rank = ddl_rank(world), slow = atoi(argv[2]), pairs[2] = {0, 1};
    for (int i = 0; i < 300; i++) {
        if (ddl_all_reduce(world, DDL_VIEW(x, 5), DDL_VIEW(x, 5), DDL_MAX) != DDL_OK) {
            return fail(c);
        }
    }
    if (rank < 2 && ddl_group_create(world, pairs, 2, "pair", &pair) != DDL_OK) {
        return fail(c);
    }
    printf("ready\n");
    fflush(stdout);
    if (strcmp(argv[1], "slow") == 0 || strcmp(argv[1], "large") == 0) {
        return straggle(c, argv[1], slow);
    }
    for (int i = 0; strcmp(argv[1], "busy") == 0; i++) {
        if (ddl_all_reduce(world, DDL_VIEW(x, 5), DDL_VIEW(x, 5), DDL_MAX) != DDL_OK) {
            return fail(c);
        }
    }
    if (rank == slow || (strcmp(argv[1], "both") == 0 && rank == slow + 1)) {
        compute(atof(argv[3]));
    }
    if (strcmp(argv[1], "message") == 0 && rank == 0 && ddl_recv(world, DDL_VIEW(x, 5), slow, 7, NULL) != DDL_OK) {
        return fail(c);
    }
    if (strcmp(argv[1], "message") == 0 && rank == slow && ddl_send(world, DDL_VIEW(x, 5), 0, 7) != DDL_OK) {
        return fail(c);
    }
    int32_t flags = 0;
    if (strcmp(argv[1], "agree") == 0 && ddl_agree(world, &flags) != DDL_OK) {
        return fail(c);
    }
    ddl_barrier(world);
    ddl_group_free(&pair);
    ddl_finalize(&c);
    return 0;
}

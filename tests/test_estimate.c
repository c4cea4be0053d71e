/* ddl_estimate: plausible times, real names, the algorithm that is then used; DDL_ALGO and ddl_group_set decide it, and what
 * they do not know is refused with a list of what they do.
 * tests/run: variants=gcc,asan timeout=60 */
#include "coll.h"

static ddl_collective sum_of(int64_t count) {
    static float x[1]; /* an estimate does not look at the memory */
    ddl_tensor t = ddl_tensor_1d(x, DDL_F32, count);
    return (ddl_collective){.kind = DDL_ALL_REDUCE, .op = DDL_SUM, .in = t, .out = t};
}

static bool known(ddl_kind kind, const char *name) {
    for (int a = 0; a < COLL_ALGOS; a++) {
        const char *equals = strchr(coll_algos[a].setting, '=');
        if (coll_algos[a].kind == kind && strcmp(equals + 1, name) == 0) {
            return true;
        }
    }
    return false;
}

static void plausible(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    double last = 0;
    for (int64_t count = 1; count < 100000000; count *= 10) {
        ddl_collective d = sum_of(count);
        ddl_estimate_info e;
        memset(&e, 0x55, sizeof e);
        REQUIRE(ddl_estimate(ddl_world(c), &d, &e) == DDL_OK);
        CHECK(e.seconds >= last * 0.999 && e.seconds < 100);
        CHECK(n == 1 ? e.seconds >= 0 : e.seconds > 0);
        CHECK(known(DDL_ALL_REDUCE, e.algorithm));
        CHECK(e.transport != NULL && (n == 1 || strcmp(e.transport, "tcp") == 0));
        CHECK(e.latency_s >= 0 && e.seconds_per_byte >= 0 && e.seconds_per_byte < 1e-3);
        last = e.seconds;
    }
    ddl_collective wrong = sum_of(3);
    wrong.op = DDL_MIN_INDEX;
    ddl_estimate_info e;
    CHECK_EQ(ddl_estimate(ddl_world(c), &wrong, &e), DDL_ERR_ARG);
    CHECK_EQ(ddl_estimate(ddl_world(c), NULL, &e), DDL_ERR_ARG);
    CHECK_EQ(ddl_estimate(NULL, &wrong, &e), DDL_ERR_ARG);
    coll_leave(c);
}

static void run_ranks(int n, ranks_fn fn, const char *algorithm) {
    coll_job job;
    coll_job_make(&job);
    job.config.algorithm = algorithm;
    ranks_fork(n, fn, &job, 30);
}

TEST(plausible_times) {
    run_ranks(1, plausible, NULL);
    run_ranks(2, plausible, NULL);
    run_ranks(4, plausible, NULL);
}

/* Each name is taken, shows in the estimate where the group allows it, and in the record of what ran. */
static void respected(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    for (int a = 0; a < COLL_ALGOS; a++) {
        static float x[4], y[4];
        const char *name = strchr(coll_algos[a].setting, '=') + 1;
        ddl_kind kind = coll_algos[a].kind;
        REQUIRE(coll_force(ddl_world(c), coll_algos[a].setting));
        ddl_tensor in = DDL_VIEW(x, coll_many_in(kind) ? n : 1), out = DDL_VIEW(y, coll_many_out(kind) ? n : 1);
        ddl_collective d = {.kind = kind, .op = coll_reduces(kind) ? DDL_SUM : 0, .in = in, .out = out};
        ddl_estimate_info e;
        CHECK_EQ(ddl_estimate(ddl_world(c), &d, &e), DDL_OK);
        if (strcmp(name, "hierarchical") != 0) { /* there is one host only */
            CHECK_EQ(e.algorithm, name);
        }
    }
    CHECK(coll_force(ddl_world(c), "auto"));
    coll_leave(c);
}

TEST(names_are_respected) { run_ranks(4, respected, NULL); }

static void from_config(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    ddl_collective d = sum_of(1);
    ddl_estimate_info e;
    CHECK_EQ(ddl_estimate(ddl_world(c), &d, &e), DDL_OK);
    CHECK_EQ(e.algorithm, "ring");
    float x = 1;
    CHECK_EQ(ddl_all_reduce(ddl_world(c), DDL_VIEW(&x, 1), DDL_VIEW(&x, 1), DDL_SUM), DDL_OK);
    CHECK_EQ(x, n);
    char record[4000];
    CHECK(ddl_flight_record(c, record, sizeof record) > 0);
    CHECK_STR(record, "by ring");
    coll_leave(c);
}

TEST(algorithm_of_the_config) { run_ranks(3, from_config, "all_reduce=ring,broadcast=chain"); }

static void from_environment(int rank, int n, void *arg) {
    setenv("DDL_ALGO", "ring", 1);
    from_config(rank, n, arg);
}

TEST(algorithm_of_the_environment) { run_ranks(3, from_environment, NULL); }

static void refused(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    ddl_group_options options = {.algorithm = "all_reduce=zigzag"};
    CHECK_EQ(ddl_group_set(ddl_world(c), &options), DDL_ERR_ARG);
    CHECK_STR(ddl_error(c), "zigzag");
    for (int a = 0; a < COLL_ALGOS; a++) {
        if (coll_algos[a].kind == DDL_ALL_REDUCE) {
            CHECK_STR(ddl_error(c), strchr(coll_algos[a].setting, '=') + 1);
        }
    }
    options.algorithm = "zigzag";
    CHECK_EQ(ddl_group_set(ddl_world(c), &options), DDL_ERR_ARG);
    CHECK_STR(ddl_error(c), "recursive_halving");
    options.algorithm = "all_produce=ring";
    CHECK_EQ(ddl_group_set(ddl_world(c), &options), DDL_ERR_ARG);
    CHECK_STR(ddl_error(c), "reduce_scatter");
    options.algorithm = "gather=ring"; /* a name of another operation */
    CHECK_EQ(ddl_group_set(ddl_world(c), &options), DDL_ERR_ARG);
    CHECK_STR(ddl_error(c), "linear");
    ddl_collective d = sum_of(1);
    ddl_estimate_info e;
    CHECK_EQ(ddl_estimate(ddl_world(c), &d, &e), DDL_OK); /* as before */
    CHECK(known(DDL_ALL_REDUCE, e.algorithm));
    coll_leave(c);
}

TEST(unknown_names_are_refused) { run_ranks(2, refused, NULL); }

TEST(unknown_names_in_the_config_are_refused) {
    char error[1024] = "";
    ddl_config config = {.world_size = 1, .algorithm = "zigzag", .error_text = error, .error_bytes = sizeof error};
    ddl_context *c = NULL;
    ddl_status status = ddl_init(&config, &c);
    CHECK_EQ(status, DDL_ERR_CONFIG);
    CHECK(c == NULL);
    CHECK_STR(error, "zigzag");
    CHECK_STR(error, "recursive_doubling");
}

/* Every rank chooses the same algorithm, it can serve the call, and settings are read or refused in a sentence.
 * tests/run: quick=yes */
#define _GNU_SOURCE 1
#include "../src/tune.h"
#include "test.h"

#define MAX_RANKS 64

static uint64_t next_random(uint64_t *state) {
    *state = ddl__mix(*state, 1);
    return *state;
}

static ddl__tuning tuning(void) { return (ddl__tuning){.model = ddl__model_default}; }

static int64_t counts_a[MAX_RANKS], offsets_a[MAX_RANKS], counts_b[MAX_RANKS], offsets_b[MAX_RANKS];
static int32_t hosts[MAX_RANKS];

static ddl__plan_args call(ddl_kind kind, int32_t n, int64_t count) {
    return (ddl__plan_args){.kind = kind,
                            .size = n,
                            .element_bytes = 4,
                            .count = count,
                            .commutative = true,
                            .counts = counts_a,
                            .offsets = offsets_a,
                            .recv_counts = counts_b,
                            .recv_offsets = offsets_b,
                            .host_of = hosts};
}

static void on_hosts(int32_t n, int32_t per_host) {
    for (int32_t r = 0; r < n; r++) {
        hosts[r] = r / per_host;
    }
}

/* What only one rank knows must not matter. */
TEST(all_ranks_choose_alike) {
    uint64_t random = 7;
    ddl__tuning t = tuning();
    for (int i = 0; i < 3000; i++) {
        int32_t n = 1 + (int32_t)(next_random(&random) % MAX_RANKS);
        ddl__plan_args args = call((ddl_kind)(1 + next_random(&random) % DDL_ALL_TO_ALLV), n,
                                   (int64_t)(next_random(&random) % (1ull << (next_random(&random) % 28))));
        on_hosts(n, 1 + (int32_t)(next_random(&random) % 8));
        for (int32_t r = 0; r < n; r++) {
            counts_a[r] = (int64_t)(next_random(&random) % 10000);
        }
        args.commutative = next_random(&random) % 2 == 0;
        t.deterministic = next_random(&random) % 2 == 0;
        t.model.oversubscription = (int32_t)(next_random(&random) % 8);
        ddl__choice first = ddl__tune_choose(&t, &args);
        REQUIRE(first.algo != NULL);
        CHECK(ddl__algo_can(first.algo, &args, t.deterministic));
        CHECK(first.chunk_bytes > 0 && first.seconds >= 0);
        args.rank = n - 1;
        args.in_place = true;
        counts_a[0] += args.kind == DDL_ALL_TO_ALLV ? 1000000 : 0;
        ddl__choice last = ddl__tune_choose(&t, &args);
        CHECK_STR(last.algo->name, first.algo->name);
        CHECK_EQ(last.chunk_bytes, first.chunk_bytes);
        CHECK_EQ(last.fence, first.fence);
    }
}

static ddl__choice choose_all_reduce(const ddl__tuning *t, int32_t n, int64_t count) {
    ddl__plan_args args = call(DDL_ALL_REDUCE, n, count);
    return ddl__tune_choose(t, &args);
}

TEST(small_is_by_latency_and_large_by_bandwidth) {
    ddl__tuning t = tuning();
    on_hosts(MAX_RANKS, MAX_RANKS);
    ddl__choice small = choose_all_reduce(&t, 2, 2);
    CHECK_STR(small.algo->name, "recursive_doubling");
    CHECK(!small.fence);
    CHECK_STR(choose_all_reduce(&t, 8, 2).algo->name, "recursive_doubling");
    ddl__choice large = choose_all_reduce(&t, 8, 16 << 20);
    CHECK(strcmp(large.algo->name, "recursive_doubling") != 0);
    CHECK(large.fence);
    CHECK(large.seconds > small.seconds);
}

/* Between two ranks halves cost a round more and save half of the sums, which are quick: as TCP on loopback is. */
TEST(two_ranks_halve_only_what_is_large) {
    ddl__tuning t = tuning();
    on_hosts(MAX_RANKS, MAX_RANKS);
    t.model.latency_s[0] = 6e-6;
    t.model.s_per_byte[0] = 0.18e-9;
    t.model.message_s = 3e-6;
    CHECK_STR(choose_all_reduce(&t, 2, 65536).algo->name, "recursive_doubling");
    CHECK(strcmp(choose_all_reduce(&t, 2, 262144).algo->name, "recursive_doubling") != 0);
}

/* As libfabric's tcp on loopback is. */
TEST(ranks_that_read_cut_coarser) {
    ddl__tuning t = tuning();
    on_hosts(MAX_RANKS, MAX_RANKS);
    t.model.latency_s[0] = 8.4e-6;
    t.model.s_per_byte[0] = 0.26e-9;
    t.model.message_s = 4.2e-6;
    ddl__plan_args args = call(DDL_ALL_REDUCE, 2, (4 << 20) / 4);
    CHECK_EQ(ddl__tune_choose(&t, &args).chunk_bytes, DDL__CHUNK_BYTES);
    args.pulled = true;
    CHECK_STR(ddl__tune_choose(&t, &args).algo->name, "halving_doubling");
    CHECK_EQ(ddl__tune_choose(&t, &args).chunk_bytes, DDL__PULLED_CHUNK_BYTES);
    args.count = (512 << 10) / 4;
    CHECK_STR(ddl__tune_choose(&t, &args).algo->name, "recursive_doubling");
    CHECK_EQ(ddl__tune_choose(&t, &args).chunk_bytes, DDL__PULLED_CHUNK_BYTES);
    static const ddl_kind around[] = {DDL_ALL_REDUCE, DDL_ALL_GATHER, DDL_REDUCE_SCATTER};
    for (size_t i = 0; i < DDL__COUNT_OF(around); i++) {
        args = call(around[i], 4, (16 << 20) / 4);
        CHECK_EQ(ddl__tune_choose(&t, &args).chunk_bytes, DDL__CHUNK_BYTES);
        args.pulled = true;
        CHECK_EQ(ddl__tune_choose(&t, &args).chunk_bytes, DDL__PULLED_CHUNK_BYTES);
    }
    static const ddl_kind rooted[] = {DDL_REDUCE, DDL_BROADCAST};
    for (size_t i = 0; i < DDL__COUNT_OF(rooted); i++) {
        int usual = 0; /* choices in which the size makes no difference to the model, so that the first one stays */
        for (int64_t bytes = 64 << 10; bytes <= 64 << 20; bytes *= 2) {
            args = call(rooted[i], 4, bytes / 4);
            int64_t fine = ddl__tune_choose(&t, &args).chunk_bytes;
            args.pulled = true;
            CHECK_EQ(ddl__tune_choose(&t, &args).chunk_bytes, fine);
            usual += fine == DDL__CHUNK_BYTES;
        }
        CHECK(usual > 0);
    }
}

TEST(hosts_are_used) {
    ddl__tuning t = tuning();
    on_hosts(32, 8);
    CHECK_STR(choose_all_reduce(&t, 32, 16 << 20).algo->name, "hierarchical");
    hosts[31] = 4; /* uneven */
    CHECK(strcmp(choose_all_reduce(&t, 32, 16 << 20).algo->name, "hierarchical") != 0);
    on_hosts(MAX_RANKS, MAX_RANKS);
}

TEST(deterministic_keeps_rank_order) {
    ddl__tuning t = tuning();
    t.deterministic = true;
    for (int64_t count = 1; count < 1 << 24; count *= 8) {
        CHECK(ddl__algo_has(choose_all_reduce(&t, 5, count).algo, DDL__RANK_ORDER));
        ddl__plan_args scatter = call(DDL_REDUCE_SCATTER, 5, count);
        CHECK(ddl__algo_has(ddl__tune_choose(&t, &scatter).algo, DDL__RANK_ORDER));
    }
    /* Two ranks have only one order. */
    CHECK_STR(choose_all_reduce(&t, 2, 1).algo->name, "recursive_doubling");
}

TEST(operators_that_do_not_commute_keep_order) {
    ddl__tuning t = tuning();
    ddl__sentence error = {0};
    CHECK_EQ(ddl__tune_parse(&t, "ring", &error), DDL_OK);
    ddl__plan_args args = call(DDL_ALL_REDUCE, 6, 1 << 20);
    CHECK_STR(ddl__tune_choose(&t, &args).algo->name, "ring");
    args.commutative = false;
    CHECK(ddl__algo_has(ddl__tune_choose(&t, &args).algo, DDL__KEEPS_ORDER));
}

TEST(plans_of_huge_vectors_stay_short) {
    ddl__tuning t = tuning();
    for (int64_t count = 1 << 20; count < 1ll << 36; count *= 4) {
        ddl__choice choice = choose_all_reduce(&t, 4, count);
        CHECK(count * 4 / choice.chunk_bytes <= DDL__MAX_CHUNKS);
    }
    t.chunk_bytes = 12345;
    CHECK_EQ(choose_all_reduce(&t, 4, 1 << 20).chunk_bytes, 12345);
}

TEST(more_to_one_peer_than_eager_means_a_fence) {
    ddl__tuning t = tuning();
    ddl__sentence error = {0};
    REQUIRE(ddl__tune_parse(&t, "broadcast=tree", &error) == DDL_OK);
    ddl__plan_args args = call(DDL_BROADCAST, 4, DDL__EAGER_BYTES / 4);
    CHECK(!ddl__tune_choose(&t, &args).fence);
    args.count++;
    CHECK(ddl__tune_choose(&t, &args).fence);
    t.eager_bytes = 1 << 20;
    CHECK(!ddl__tune_choose(&t, &args).fence);
    args = call(DDL_ALL_TO_ALLV, 4, 0);
    CHECK(ddl__tune_choose(&t, &args).fence);
}

TEST(settings_by_name_and_by_operation) {
    ddl__tuning t = tuning();
    ddl__sentence error = {0};
    CHECK_EQ(ddl__tune_parse(&t, "ring", &error), DDL_OK);
    CHECK_STR(t.forced[DDL_ALL_REDUCE]->name, "ring");
    CHECK_STR(t.forced[DDL_ALL_GATHER]->name, "ring");
    CHECK(t.forced[DDL_BROADCAST] == NULL);
    CHECK_EQ(ddl__tune_parse(&t, " all_reduce=direct , broadcast=tree,", &error), DDL_OK);
    CHECK_STR(t.forced[DDL_ALL_REDUCE]->name, "direct");
    CHECK_STR(t.forced[DDL_BROADCAST]->name, "tree");
    CHECK_STR(t.forced[DDL_ALL_GATHER]->name, "ring");
    CHECK_EQ(ddl__tune_parse(&t, "all_reduce=auto", &error), DDL_OK);
    CHECK(t.forced[DDL_ALL_REDUCE] == NULL);
    CHECK_EQ(ddl__tune_parse(&t, "auto", &error), DDL_OK);
    CHECK(t.forced[DDL_BROADCAST] == NULL && t.forced[DDL_ALL_GATHER] == NULL);
    CHECK_EQ(ddl__tune_parse(&t, "", &error), DDL_OK);
}

TEST(unknown_names_are_refused_with_the_known_ones) {
    ddl__tuning t = tuning();
    ddl__sentence error = {0};
    CHECK_EQ(ddl__tune_parse(&t, "broadcast=tree,all_reduce=rong", &error), DDL_ERR_ARG);
    CHECK_STR(error.text, "all_reduce has no algorithm \"rong\"");
    CHECK_STR(error.text, "recursive_doubling");
    CHECK_STR(error.text, "hierarchical");
    CHECK(t.forced[DDL_BROADCAST] == NULL); /* nothing was changed */
    CHECK_EQ(ddl__tune_parse(&t, "rong", &error), DDL_ERR_ARG);
    CHECK_STR(error.text, "no operation has an algorithm \"rong\"");
    CHECK_STR(error.text, "bruck");
    CHECK_EQ(ddl__tune_parse(&t, "allreduce=ring", &error), DDL_ERR_ARG);
    CHECK_STR(error.text, "all_reduce");
    CHECK_EQ(ddl__tune_parse(&t, "all_reduce=", &error), DDL_ERR_ARG);
    char text[200];
    memset(text, 'x', sizeof text);
    text[sizeof text - 1] = '\0';
    CHECK_EQ(ddl__tune_parse(&t, text, &error), DDL_ERR_ARG);
    CHECK_STR(error.text, "too long");
}

TEST(parts_cover_everything_once) {
    for (int64_t count = 0; count < 40; count++) {
        for (int32_t parts = 1; parts < 12; parts++) {
            int64_t at = 0, begin = -1, length = -1;
            for (int32_t i = 0; i < parts; i++) {
                CHECK_EQ(ddl_part(count, parts, i, &begin, &length), DDL_OK);
                CHECK_EQ(begin, at);
                CHECK_EQ(length, count / parts + (i < count % parts));
                at += length;
            }
            CHECK_EQ(at, count);
        }
    }
    int64_t begin = -1, length = -1;
    CHECK_EQ(ddl_part(-1, 2, 0, &begin, &length), DDL_ERR_ARG);
    CHECK_EQ(ddl_part(1, 0, 0, &begin, &length), DDL_ERR_ARG);
    CHECK_EQ(ddl_part(1, 2, 2, &begin, &length), DDL_ERR_ARG);
    CHECK_EQ(ddl_part(1, 2, 0, NULL, &length), DDL_ERR_ARG);
}

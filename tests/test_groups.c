/* Groups: members, order, names, lists that differ, splitting, duplicates, translation, nesting, options, what is freed
 * when, use after that, and hundreds of them.
 * tests/run: variants=gcc,asan,valgrind timeout=90 */
#include "world.h"

/* The group works and is what it should be: its ranks, in order, are these ranks of the world. */
static void is_group(ddl_group *w, ddl_group *g, const int32_t *ranks, int32_t count) {
    REQUIRE(g != NULL);
    CHECK_EQ(ddl_size(g), count);
    CHECK(ddl_group_context(g) == ddl_group_context(w));
    int32_t mine[1] = {ddl_rank(w)}, all[64], back[64], own[64];
    memset(all, 0xa5, sizeof all);
    OK(ddl_all_gather(g, DDL_ARRAY(mine), ddl_tensor_1d(all, DDL_I32, count)));
    for (int32_t i = 0; i < count; i++) {
        CHECK_EQ(all[i], ranks[i]);
        own[i] = i;
    }
    CHECK_EQ(ranks[ddl_rank(g)], ddl_rank(w));
    OK(ddl_group_translate(g, own, count, w, back));
    for (int32_t i = 0; i < count; i++) {
        CHECK_EQ(back[i], ranks[i]);
    }
    int32_t next = (ddl_rank(g) + 1) % count, before = (ddl_rank(g) + count - 1) % count, got = -1;
    OK(ddl_send_recv(g, DDL_ARRAY(mine), next, 3, DDL_VIEW(&got, 1), before, 3, NULL));
    CHECK_EQ(got, ranks[before]);
}

/* ---- create ---- */

static void members_only(ddl_group *w, void *arg) {
    (void)arg;
    int32_t n = ddl_size(w), me = ddl_rank(w), evens[16], count = 0, backwards[16];
    for (int32_t r = 0; r < n; r += 2) {
        evens[count++] = r;
    }
    for (int32_t r = 0; r < n; r++) {
        backwards[r] = n - 1 - r;
    }
    ddl_group *g = NULL, *b = NULL, *alone = NULL, *inner = NULL;
    if (me % 2 == 0) { /* the odd ones are not involved */
        OK(ddl_group_create(w, evens, count, "evens", &g));
        is_group(w, g, evens, count);
        CHECK_EQ(ddl_group_name(g), "evens");
    }
    OK(ddl_group_create(w, backwards, n, NULL, &b));
    is_group(w, b, backwards, n);
    CHECK_EQ(ddl_rank(b), n - 1 - me);
    OK(ddl_group_create(b, (int32_t[]){ddl_rank(b)}, 1, "alone", &alone));
    is_group(w, alone, (int32_t[]){me}, 1);
    if (g != NULL && ddl_rank(g) < 2 && count >= 2) { /* a group of a group: ranks are those of the parent */
        OK(ddl_group_create(g, (int32_t[]){1, 0}, 2, "inner", &inner));
        is_group(w, inner, (int32_t[]){2, 0}, 2);
    }
    if (g != NULL) {
        OK(ddl_group_free(&g)); /* before the inner one: they do not depend on each other */
    }
    if (inner != NULL) {
        is_group(w, inner, (int32_t[]){2, 0}, 2);
        OK(ddl_group_free(&inner));
    }
    OK(ddl_group_free(&alone));
    OK(ddl_group_free(&b));
    CHECK(g == NULL && inner == NULL && alone == NULL && b == NULL);
}

TEST(members_make_a_group) {
    static const int ns[] = {1, 2, 3, 4, 7, 8};
    for (int i = 0; i < 6; i++) {
        world_threads(ns[i], members_only, NULL);
    }
}

TEST(members_make_a_group_of_sixteen_processes) { world_fork(16, members_only, NULL, 50); }

static void refused(ddl_group *w, void *arg) {
    (void)arg;
    int32_t me = ddl_rank(w), other = 1 - me;
    ddl_group *poison = (ddl_group *)(uintptr_t)0xa5a5, *g = poison;
    FAILS(ddl_group_create(w, (int32_t[]){0, 2}, 2, "x", &g), DDL_ERR_ARG, "rank 2 is not in group");
    FAILS(ddl_group_create(w, (int32_t[]){me, -1}, 2, "x", &g), DDL_ERR_ARG, "rank -1");
    FAILS(ddl_group_create(w, (int32_t[]){me, me}, 2, "x", &g), DDL_ERR_ARG, "twice");
    FAILS(ddl_group_create(w, (int32_t[]){other}, 1, "x", &g), DDL_ERR_ARG, "only members call");
    FAILS(ddl_group_create(w, (int32_t[]){0, 1}, 0, "x", &g), DDL_ERR_ARG, "ddl_group_create");
    FAILS(ddl_group_create(w, (int32_t[]){0, 1, 1}, 3, "x", &g), DDL_ERR_ARG, "ddl_group_create");
    FAILS(ddl_group_create(w, NULL, 2, "x", &g), DDL_ERR_ARG, "ddl_group_create");
    FAILS(ddl_group_create(w, (int32_t[]){0, 1}, 2, "x", NULL), DDL_ERR_ARG, "ddl_group_create: out_group");
    FAILS(ddl_group_split(w, 0, 0, NULL), DDL_ERR_ARG, "ddl_group_split: out_group");
    FAILS(ddl_group_duplicate(w, NULL), DDL_ERR_ARG, "ddl_group_duplicate: out_group");
    CHECK_EQ((int)ddl_group_create(NULL, (int32_t[]){0, 1}, 2, "x", &g), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_group_split(NULL, 0, 0, &g), (int)DDL_ERR_ARG);
    CHECK(g == NULL);
    g = poison;
    CHECK_EQ((int)ddl_group_split(NULL, 0, 0, &g), (int)DDL_ERR_ARG);
    CHECK(g == NULL);
    OK(ddl_group_create(w, (int32_t[]){0, 1}, 2, "x", &g)); /* after all that it works */
    is_group(w, g, (int32_t[]){0, 1}, 2);
    OK(ddl_group_free(&g));
}

TEST(lists_that_make_no_sense_are_refused) { world_threads(2, refused, NULL); }

/* A name is part of sentences, which go to terminals and logs. */
static void named(ddl_group *w, void *arg) {
    (void)arg;
    ddl_group *g, *child;
    OK(ddl_group_create(w, (int32_t[]){0, 1}, 2, "a\nb\033[2J\177", &g));
    CHECK(strcmp(ddl_group_name(g), "a?b?[2J?") == 0);
    FAILS(ddl_send(g, DDL_VIEW(&(float){1}, 1), 7, 0), DDL_ERR_ARG, "a?b?[2J?");
    FAILS(ddl_group_create(g, (int32_t[]){0, 9}, 2, "x", &child), DDL_ERR_ARG, "a?b?[2J?");
    OK(ddl_group_free(&g));
    char text[200];
    memset(text, 'n', sizeof text - 1);
    text[sizeof text - 1] = 0;
    OK(ddl_group_create(w, (int32_t[]){0, 1}, 2, text, &g));
    CHECK(strlen(ddl_group_name(g)) == 63 && memcmp(ddl_group_name(g), text, 63) == 0);
    OK(ddl_barrier(g));
    OK(ddl_group_free(&g));
    OK(ddl_group_create(w, (int32_t[]){0, 1}, 2, "caf\xc3\xa9", &g)); /* other letters stay */
    CHECK(strcmp(ddl_group_name(g), "caf\xc3\xa9") == 0);
    OK(ddl_group_free(&g));
}

TEST(names_are_fit_to_be_shown) { world_threads(2, named, NULL); }

/* Same leader, other members or another order: all that wait for the leader are told, after a second. */
static void differing(ddl_group *w, void *arg) {
    (void)arg;
    int32_t me = ddl_rank(w);
    static const int32_t lists[3][3] = {{0, 1, 2}, {0, 2, 1}, {0, 1, 2}};
    ddl_group *g = NULL;
    for (int round = 0; round < 2; round++) {
        OK(ddl_barrier(w));
        double start = test_now_s();
        FAILS(ddl_group_create(w, lists[round == 0 ? me : 0], round == 0 || me != 1 ? 3 : 2, "odd", &g), DDL_ERR_MISMATCH,
              "different lists");
        CHECK_STR(ddl_error(ddl_group_context(w)), "odd");
        CHECK(test_now_s() - start < 5 * test_slow());
        CHECK(g == NULL);
    }
    OK(ddl_group_create(w, lists[0], 3, "odd", &g)); /* nothing of it is left */
    is_group(w, g, lists[0], 3);
    OK(ddl_group_free(&g));
}

TEST(lists_that_differ_are_told_apart) { world_threads(3, differing, NULL); }

/* One member does not call: the others end by the deadline, and can make the group later. */
static void absent(ddl_group *w, void *arg) {
    (void)arg;
    int32_t all[3] = {0, 1, 2};
    ddl_group *g = NULL, *d;
    OK(ddl_group_duplicate(w, &d));
    if (ddl_rank(w) != 2) {
        OK(ddl_group_set(d, &(ddl_group_options){.timeout_ms = (int64_t)(200 * test_slow())}));
        ddl_status status = ddl_group_create(d, all, 3, "late", &g);
        CHECK_EQ((int)status, (int)DDL_ERR_TIMEOUT);
        CHECK_STR(ddl_error(ddl_group_context(w)), "late");
        CHECK(g == NULL);
        OK(ddl_group_set(d, &(ddl_group_options){.timeout_ms = (int64_t)(20000 * test_slow())}));
    }
    OK(ddl_barrier(w));
    int32_t other[2] = {0, 1};
    if (ddl_rank(w) != 2) {
        OK(ddl_group_create(d, other, 2, "other", &g));
        is_group(w, g, other, 2);
        OK(ddl_group_free(&g));
    }
    OK(ddl_group_free(&d));
}

TEST(a_member_that_does_not_call) { world_threads(3, absent, NULL); }

/* ---- split, duplicate ---- */

static void splitting(ddl_group *w, void *arg) {
    (void)arg;
    int32_t n = ddl_size(w), me = ddl_rank(w), expected[16], count = 0;
    ddl_group *g = NULL, *rows = NULL, *d = NULL;
    OK(ddl_group_split(w, me % 2, 0, &g)); /* equal keys: by rank */
    for (int32_t r = me % 2; r < n; r += 2) {
        expected[count++] = r;
    }
    is_group(w, g, expected, count);
    OK(ddl_group_free(&g));
    OK(ddl_group_split(w, 5, -me, &g)); /* keys turn the order round */
    for (int32_t r = 0; r < n; r++) {
        expected[r] = n - 1 - r;
    }
    is_group(w, g, expected, n);
    OK(ddl_group_split(g, ddl_rank(g) < (n + 1) / 2, INT32_MAX, &rows)); /* nested */
    CHECK_EQ(ddl_size(rows), ddl_rank(g) < (n + 1) / 2 ? (n + 1) / 2 : n / 2);
    int32_t ones = 1, sum = 0;
    OK(ddl_all_reduce(rows, DDL_VIEW(&ones, 1), DDL_VIEW(&sum, 1), DDL_SUM));
    CHECK_EQ(sum, ddl_size(rows));
    OK(ddl_group_free(&rows));
    OK(ddl_group_free(&g));
    g = (ddl_group *)(uintptr_t)8;
    OK(ddl_group_split(w, me == 0 ? -1 : 3, 0, &g)); /* rank 0 takes part, and gets none */
    if (me == 0) {
        CHECK(g == NULL);
    } else {
        for (int32_t r = 1; r < n; r++) {
            expected[r - 1] = r;
        }
        is_group(w, g, expected, n - 1);
        OK(ddl_group_free(&g));
    }
    g = (ddl_group *)(uintptr_t)8;
    OK(ddl_group_split(w, INT32_MIN, 0, &g));
    CHECK(g == NULL);
    OK(ddl_group_duplicate(w, &d));
    for (int32_t r = 0; r < n; r++) {
        expected[r] = r;
    }
    is_group(w, d, expected, n);
    /* Its own messages: the same peer and tag do not meet across groups. */
    int32_t in_w = 1, in_d = 2, got = -1, right = (me + 1) % n, left = (me + n - 1) % n;
    ddl_request *s[2];
    OK(ddl_isend(w, DDL_VIEW(&in_w, 1), right, 7, &s[0]));
    OK(ddl_isend(d, DDL_VIEW(&in_d, 1), right, 7, &s[1]));
    OK(ddl_recv(d, DDL_VIEW(&got, 1), left, DDL_ANY_TAG, NULL));
    CHECK_EQ(got, 2);
    OK(ddl_recv(w, DDL_VIEW(&got, 1), DDL_ANY_SOURCE, 7, NULL));
    CHECK_EQ(got, 1);
    OK(ddl_wait_all(s, 2, NULL));
    OK(ddl_group_free(&d));
}

TEST(splits_and_duplicates) {
    static const int ns[] = {2, 3, 4, 7, 8};
    for (int i = 0; i < 5; i++) {
        world_threads(ns[i], splitting, NULL);
    }
}

TEST(splits_between_processes) { world_fork(4, splitting, NULL, 30); }

static void translating(ddl_group *w, void *arg) {
    (void)arg;
    ddl_group *g = NULL;
    int32_t ranks[3] = {2, 0, 1}, out[4] = {77, 77, 77, 77};
    if (ddl_rank(w) != 3) {
        OK(ddl_group_create(w, ranks, 3, "g", &g));
        OK(ddl_group_translate(w, (int32_t[]){0, 1, 2, 3}, 4, g, out));
        CHECK(out[0] == 1 && out[1] == 2 && out[2] == 0 && out[3] == DDL_NO_RANK);
        out[0] = 77;
        FAILS(ddl_group_translate(g, (int32_t[]){3}, 1, w, out), DDL_ERR_ARG, "ddl_group_translate");
        FAILS(ddl_group_translate(g, (int32_t[]){-1}, 1, w, out), DDL_ERR_ARG, "ddl_group_translate");
        FAILS(ddl_group_translate(g, NULL, 1, w, out), DDL_ERR_ARG, "ddl_group_translate");
        FAILS(ddl_group_translate(g, (int32_t[]){0}, 1, NULL, out), DDL_ERR_ARG, "ddl_group_translate");
        FAILS(ddl_group_translate(g, (int32_t[]){0}, -1, w, out), DDL_ERR_ARG, "ddl_group_translate");
        CHECK_EQ(out[0], 77);
        OK(ddl_group_translate(g, NULL, 0, w, NULL));
        ddl_group *gone = g;
        OK(ddl_group_free(&g));
        FAILS(ddl_group_translate(w, (int32_t[]){0}, 1, gone, out), DDL_ERR_ARG, "ddl_group_translate");
        FAILS(ddl_group_translate(gone, (int32_t[]){0}, 1, w, out), DDL_ERR_STATE, "was freed");
    }
}

TEST(ranks_translate) { world_threads(4, translating, NULL); }

/* ---- options ---- */

static void options(ddl_group *w, void *arg) {
    (void)arg;
    ddl_group *g, *child;
    OK(ddl_group_duplicate(w, &g));
    FAILS(ddl_group_set(g, &(ddl_group_options){.algorithm = "nonsense"}), DDL_ERR_ARG,
          "ddl_group_set: no operation has an algorithm \"nonsense\"");
    static const struct {
        ddl_group_options options;
        const char *says;
    } bad[] = {{{.timeout_ms = -7}, "ddl_group_set: timeout_ms is -7; 1 to"},
               {{.timeout_ms = INT64_MAX}, "timeout_ms is 9223372036854775807"},
               {{.timeout_ms = INT64_MIN}, "timeout_ms is -9223372036854775808"},
               {{.stall_ms = -9}, "ddl_group_set: stall_ms is -9; 1 to"},
               {{.stall_ms = INT64_MAX}, "stall_ms is 9223372036854775807"},
               {{.deterministic = 77}, "ddl_group_set: deterministic is 77; 1 to 1 or -1"},
               {{.deterministic = -2}, "deterministic is -2"}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        FAILS(ddl_group_set(g, &bad[i].options), DDL_ERR_ARG, bad[i].says);
    }
    OK(ddl_group_set(g, &(ddl_group_options){.timeout_ms = -1, .stall_ms = -1}));
    OK(ddl_group_set(g, &(ddl_group_options){.timeout_ms = 20000, .stall_ms = 10000}));
    FAILS(ddl_group_set(g, &(ddl_group_options){.algorithm = "all_reduce=ring,walk=ring"}), DDL_ERR_ARG, "walk");
    FAILS(ddl_group_set(g, NULL), DDL_ERR_ARG, "ddl_group_set: options");
    float one[1000], sum[1000];
    static const char *const algorithms[] = {"ring", "auto", "all_reduce=recursive_doubling", "ring"};
    for (int k = 0; k < 4; k++) {
        if (k == 2 && ddl_group_set(g, &(ddl_group_options){.algorithm = algorithms[k]}) != DDL_OK) {
            continue; /* by another name */
        }
        OK(ddl_group_set(g, &(ddl_group_options){.algorithm = algorithms[k == 2 ? 1 : k], .deterministic = k % 2 ? 1 : -1}));
        for (int i = 0; i < 1000; i++) {
            one[i] = (float)(ddl_rank(w) + i);
        }
        OK(ddl_all_reduce(g, DDL_ARRAY(one), DDL_ARRAY(sum), DDL_SUM));
        for (int i = 0; i < 1000; i++) {
            CHECK_EQ(sum[i], (float)(ddl_size(w) * i + ddl_size(w) * (ddl_size(w) - 1) / 2));
        }
    }
    OK(ddl_group_set(g, &(ddl_group_options){.timeout_ms = (int64_t)(100 * test_slow())}));
    OK(ddl_group_duplicate(g, &child)); /* a group begins with the options of its parent */
    if (ddl_rank(w) == 0) {
        double start = test_now_s();
        FAILS(ddl_recv(child, DDL_ARRAY(one), 1, 0, NULL), DDL_ERR_TIMEOUT, "rank 1");
        CHECK(test_now_s() - start < 10 * test_slow());
    }
    OK(ddl_barrier(w));
    OK(ddl_group_free(&child));
    OK(ddl_group_free(&g));
}

TEST(options_are_checked_and_inherited) { world_threads(3, options, NULL); }

/* ---- the end ---- */

static void freeing(ddl_group *w, void *arg) {
    (void)arg;
    ddl_group *g, *copy, *world = w;
    ddl_request *r;
    int32_t value = 3, peer = ddl_rank(w) ^ 1;
    FAILS(ddl_group_free(&world), DDL_ERR_ARG, "ddl_group_free: the world");
    CHECK(world == w);
    OK(ddl_group_duplicate(w, &g));
    OK(ddl_irecv(g, DDL_VIEW(&value, 1), peer, 0, &r));
    FAILS(ddl_group_free(&g), DDL_ERR_STATE, "1 requests");
    CHECK(g != NULL);
    OK(ddl_cancel(r));
    FAILS(ddl_wait(&r, NULL), DDL_ERR_CANCELLED, "cancelled");
    copy = g;
    OK(ddl_send(g, DDL_VIEW(&value, 1), peer, 9)); /* never received: freed with the group */
    OK(ddl_barrier(w));
    OK(ddl_group_free(&g));
    CHECK(g == NULL);
    OK(ddl_group_free(&g));
    FAILS(ddl_group_free(&copy), DDL_ERR_STATE, "freed before");
    FAILS(ddl_barrier(copy), DDL_ERR_STATE, "was freed");
    FAILS(ddl_send(copy, DDL_VIEW(&value, 1), peer, 0), DDL_ERR_STATE, "ddl_send");
    FAILS(ddl_iprobe(copy, peer, 0, NULL), DDL_ERR_STATE, "ddl_iprobe");
    FAILS(ddl_group_set(copy, &(ddl_group_options){.timeout_ms = 1}), DDL_ERR_STATE, "ddl_group_set");
    FAILS(ddl_group_duplicate(copy, &g), DDL_ERR_STATE, "ddl_group_duplicate");
    CHECK_EQ(ddl_group_name(copy), "world/0");
    CHECK_EQ((int)ddl_rank(NULL), -1);
    CHECK_EQ((int)ddl_size(NULL), -1);
    CHECK_EQ(ddl_group_name(NULL), "");
    CHECK(ddl_group_context(NULL) == NULL);
    OK(ddl_barrier(w));
}

TEST(a_group_is_freed_once) { world_threads(2, freeing, NULL); }

/* Handles that the caller still holds outlive the context, as handles. */
static ddl_group *kept[3];

static void keep(ddl_group *w, void *arg) {
    (void)arg;
    OK(ddl_group_duplicate(w, &kept[ddl_rank(w)]));
    OK(ddl_barrier(w));
}

TEST(groups_that_outlive_the_context) {
    world_threads(3, keep, NULL);
    for (int i = 0; i < 3; i++) {
        REQUIRE(kept[i] != NULL);
        ddl_group *again = kept[i];
        float x[2];
        CHECK_EQ(ddl_size(kept[i]), 3);
        CHECK_EQ((int)ddl_all_reduce(kept[i], DDL_ARRAY(x), DDL_ARRAY(x), DDL_SUM), (int)DDL_ERR_STATE);
        CHECK_STR(ddl_error(ddl_group_context(kept[i])), "finalized");
        CHECK_EQ((int)ddl_group_duplicate(kept[i], &again), (int)DDL_ERR_STATE);
        CHECK_EQ((int)ddl_group_free(&kept[i]), (int)DDL_OK);
        CHECK(kept[i] == NULL);
    }
}

/* Groups come and go; what they hold goes with them. */
static void hundreds(ddl_group *w, void *arg) {
    (void)arg;
    ddl_stats first, last;
    int n = ddl_size(w), me = ddl_rank(w);
    for (int k = 0; k < 200; k++) {
        ddl_group *g;
        int32_t ranks[16], one = 1, sum = 0;
        char name[32];
        for (int i = 0; i < n; i++) {
            ranks[i] = (i + k) % n;
        }
        snprintf(name, sizeof name, "group %d", k % 5);
        if (k % 7 == 0) {
            OK(ddl_group_split(w, k % 3, me, &g));
        } else {
            OK(ddl_group_create(w, ranks, n, name, &g));
        }
        OK(ddl_all_reduce(g, DDL_VIEW(&one, 1), DDL_VIEW(&sum, 1), DDL_SUM));
        CHECK_EQ(sum, n);
        OK(ddl_group_free(&g));
        if (k == 99) {
            OK(ddl_stats_get(ddl_group_context(w), &first));
        }
    }
    OK(ddl_stats_get(ddl_group_context(w), &last));
    CHECK(last.memory_bytes < first.memory_bytes + 64 * 1024);
}

TEST(hundreds_of_groups_leave_nothing) {
    world_fork(2, hundreds, NULL, 40); /* first: what threads have begun here may not survive a fork */
    world_threads(3, hundreds, NULL);
}

/* Many at once, used in different orders on different ranks. */
static void at_once(ddl_group *w, void *arg) {
    (void)arg;
    enum { N = 60 };
    ddl_group *g[N];
    ddl_request *r[N];
    int32_t one[N], sum[N];
    int n = ddl_size(w), me = ddl_rank(w);
    for (int k = 0; k < N; k++) {
        OK(ddl_group_duplicate(w, &g[k]));
        one[k] = me + k;
    }
    for (int i = 0; i < N; i++) {
        int k = me % 2 ? i : N - 1 - i;
        OK(ddl_iall_reduce(g[k], DDL_VIEW(&one[k], 1), DDL_VIEW(&sum[k], 1), DDL_SUM, &r[k]));
    }
    OK(ddl_wait_all(r, N, NULL));
    for (int k = 0; k < N; k++) {
        CHECK_EQ(sum[k], n * k + n * (n - 1) / 2);
        OK(ddl_group_free(&g[k]));
    }
}

TEST(sixty_groups_at_once) {
    world_threads(2, at_once, NULL);
    world_threads(4, at_once, NULL);
}

/* Collectives of three groups by turns: the record and the sentence of an error have them in the order of the calls. */
static const char *after(const char *text, const char *part) {
    const char *at = text != NULL ? strstr(text, part) : NULL;
    CHECK_STR(text != NULL ? text : "", part);
    return at != NULL ? at + strlen(part) : NULL;
}

static void by_turns(ddl_group *w, void *arg) {
    (void)arg;
    ddl_group *a, *b;
    int32_t x[4] = {1, 2, 3, 4}, count = ddl_rank(w) + 3;
    static char records[2][16384];
    char *record = records[ddl_rank(w)];
    OK(ddl_group_duplicate(w, &a));
    OK(ddl_group_duplicate(w, &b));
    OK(ddl_broadcast(a, DDL_VIEW(x, 1), 0));
    OK(ddl_broadcast(b, DDL_VIEW(x, 2), 0));
    OK(ddl_broadcast(a, DDL_VIEW(x, 3), 0));
    OK(ddl_broadcast(w, DDL_VIEW(x, 4), 0));
    CHECK_EQ((int)ddl_all_reduce(a, DDL_VIEW(x, count), DDL_VIEW(x, count), DDL_SUM), (int)DDL_ERR_MISMATCH);
    const char *sentence = ddl_error(ddl_group_context(w));
    const char *before = after(sentence, "in the same order (before it: \"world/0\" #2 broadcast(3 x i32");
    before = after(before, "\"world\" #");
    before = after(before, "broadcast(4 x i32");
    CHECK(before != NULL && before[strlen(before) - 1] == ')'); /* the last words */
    CHECK(ddl_flight_record(ddl_group_context(w), record, sizeof records[0]) < sizeof records[0]);
    const char *at = after(record, "world #1 ");
    at = after(at, "broadcast(1 x i32");
    at = after(at, "broadcast(2 x i32");
    at = after(at, "broadcast(3 x i32");
    at = after(at, "broadcast(4 x i32");
    at = after(at, "all_reduce(");
    after(at, "DDL_ERR_MISMATCH");
    OK(ddl_barrier(b));
    OK(ddl_group_free(&a));
    OK(ddl_group_free(&b));
}

TEST(what_was_called_is_told_in_order) { world_threads(2, by_turns, NULL); }

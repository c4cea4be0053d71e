/* Every public function with what it cannot take: the status, a sentence that names the function, buffers that are as
 * they were, and a correct operation right after, on all ranks.
 * tests/run: variants=gcc,asan timeout=60 */
#include "world.h"

enum { ELEMENTS = 12, POISON = 0xa5 };

static float ins[4][ELEMENTS], outs[4][ELEMENTS];
static int64_t ints[4][ELEMENTS];


static int me_of(ddl_group *w) { return ddl_rank(w); }

static ddl_tensor in_of(ddl_group *w) { return DDL_ARRAY(ins[me_of(w)]); }

static ddl_tensor out_of(ddl_group *w) { return DDL_ARRAY(outs[me_of(w)]); }

static void poison(ddl_group *w) { memset(outs[me_of(w)], POISON, sizeof outs[0]); }

static int is_poisoned(const void *at, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        if (((const unsigned char *)at)[i] != POISON) {
            return 0;
        }
    }
    return 1;
}

/* A wrong call: fails as expected, says who and why, writes nothing; then a right one works. */
static void check_wrong(ddl_group *w, ddl_status status, ddl_status expected, const char *name, int line) {
    const char *sentence = ddl_error(ddl_group_context(w));
    if (status != expected) {
        test__fail(__FILE__, line, "%s is %s, expected %s (%s)", name, ddl_status_name(status), ddl_status_name(expected),
                   sentence);
    }
    if (strstr(sentence, name) == NULL || strlen(sentence) < strlen(name) + 8) {
        test__fail(__FILE__, line, "%s: the sentence is \"%s\"", name, sentence);
    }
    if (!is_poisoned(outs[me_of(w)], sizeof outs[0])) {
        test__fail(__FILE__, line, "%s wrote to a buffer", name);
        poison(w);
    }
    int32_t one = 1, sum = 0;
    if (ddl_all_reduce(w, DDL_VIEW(&one, 1), DDL_VIEW(&sum, 1), DDL_SUM) != DDL_OK || sum != ddl_size(w)) {
        test__fail(__FILE__, line, "after %s an all_reduce is wrong: %s", name, ddl_error(ddl_group_context(w)));
    }
}

/* The sentence of an earlier error must not pass for this one's. */
static void forget(ddl_group *w) { ddl_send(w, ddl_tensor_1d(NULL, DDL_DTYPE_NONE, 0), DDL_NO_RANK, 0); }

#define WRONG(expected, name, ...)                                                                         \
    do {                                                                                                   \
        forget(w);                                                                                         \
        check_wrong(w, name(__VA_ARGS__), expected, #name, __LINE__);                                      \
    } while (0)
#define BAD(name, ...) WRONG(DDL_ERR_ARG, name, __VA_ARGS__)

/* Both forms of a collective. */
#define BAD_COLL(kind, ...)                                                                                \
    do {                                                                                                   \
        ddl_request *r_ = (ddl_request *)(uintptr_t)POISON;                                                \
        BAD(ddl_##kind, __VA_ARGS__);                                                                      \
        BAD(ddl_i##kind, __VA_ARGS__, &r_);                                                                \
        CHECK(r_ == NULL);                                                                                 \
    } while (0)

static ddl_tensor of_type(ddl_tensor t, int dtype) {
    t.dtype = (ddl_dtype)dtype;
    return t;
}

static ddl_tensor of_count(ddl_tensor t, int64_t count) {
    t.shape[0] = count;
    return t;
}

static ddl_tensor at(ddl_tensor t, void *data) {
    t.data = data;
    return t;
}

/* ---- tensors, in every call that takes one ---- */

static void tensors(ddl_group *w, void *arg) {
    (void)arg;
    int n = ddl_size(w);
    poison(w);
    ddl_tensor good = of_count(out_of(w), 1), all = of_count(out_of(w), n), on_device = good, deep = good, far = all;
    on_device.device = 1;
    deep.ndim = DDL_MAX_DIMS + 1;
    far.strides[0] = INT64_MAX / 2;
    const struct {
        ddl_tensor tensor;
        ddl_status expected;
    } bad[] = {{of_type(good, 0), DDL_ERR_ARG},          {of_type(good, 99), DDL_ERR_ARG}, {of_type(good, -1), DDL_ERR_ARG},
               {of_count(good, -1), DDL_ERR_ARG},        {at(good, NULL), DDL_ERR_ARG},    {of_count(good, INT64_MAX), DDL_ERR_ARG},
               {deep, DDL_ERR_ARG},                      {far, DDL_ERR_ARG},               {on_device, DDL_ERR_UNSUPPORTED}};
    int peer = (ddl_rank(w) + 1) % n;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        ddl_tensor t = bad[i].tensor;
        ddl_status e = bad[i].expected;
        ddl_request *r = (ddl_request *)(uintptr_t)POISON;
        ddl_info info;
        memset(&info, POISON, sizeof info);
        WRONG(e, ddl_send, w, t, peer, 0);
        WRONG(e, ddl_recv, w, t, peer, 0, &info);
        WRONG(e, ddl_isend, w, t, peer, 0, &r);
        WRONG(e, ddl_irecv, w, t, peer, 0, &r);
        WRONG(e, ddl_send_recv, w, good, peer, 0, t, peer, 0, &info);
        WRONG(e, ddl_send_recv, w, t, peer, 0, good, peer, 0, &info);
        ddl_transfer transfers[2] = {{1, good, peer, 0}, {0, t, peer, 0}};
        ddl_request *two[2];
        memset(two, POISON, sizeof two);
        WRONG(e, ddl_batch, w, transfers, 2, two);
        CHECK(two[0] == NULL && two[1] == NULL);
        WRONG(e, ddl_broadcast, w, t, 0);
        WRONG(e, ddl_all_reduce, w, t, good, DDL_SUM);
        WRONG(e, ddl_all_reduce, w, good, t, DDL_SUM);
        WRONG(e, ddl_all_gather, w, t, all);
        WRONG(e, ddl_all_gather, w, good, t);
        WRONG(e, ddl_reduce_scatter, w, all, t, DDL_SUM);
        WRONG(e, ddl_all_to_all, w, t, all);
        WRONG(e, ddl_scan, w, t, good, DDL_SUM);
        WRONG(e, ddl_iall_reduce, w, good, t, DDL_SUM, &r);
        WRONG(e, ddl_all_reduce_many, w, &t, 1, DDL_SUM);
        ddl_collective d = {.kind = DDL_ALL_REDUCE, .op = DDL_SUM, .in = t, .out = good};
        ddl_estimate_info estimate;
        WRONG(e, ddl_collective_init, w, &d, &r);
        WRONG(e, ddl_estimate, w, &d, &estimate);
        CHECK(r == NULL);
        CHECK(is_poisoned(&info, sizeof info));
    }
    CHECK_EQ((int)ddl_iprobe(w, DDL_ANY_SOURCE, DDL_ANY_TAG, NULL), (int)DDL_IN_PROGRESS); /* nothing was sent */
}

TEST(tensors_are_checked_everywhere) {
    world_threads(2, tensors, NULL);
    world_threads(3, tensors, NULL);
}

/* ---- ranks, tags, roots, ops, sizes, overlaps ---- */

/* `count` elements of the outputs, `stride` apart, from the one at `first`. */
static ddl_tensor apart(ddl_group *w, int first, int count, int stride) {
    ddl_tensor t = of_count(out_of(w), count);
    t.data = &outs[me_of(w)][first];
    t.strides[0] = stride;
    return t;
}

/* Receives into one element twice, and what is received over what is sent. */
static void messages_that_meet(ddl_group *w) {
    int peer = (ddl_rank(w) + 1) % ddl_size(w);
    ddl_request *r = (ddl_request *)(uintptr_t)POISON, *rs[2];
    ddl_tensor twice = out_of(w), t = in_of(w);
    twice.ndim = 2;
    twice.shape[0] = twice.shape[1] = 2;
    twice.strides[0] = 0;
    twice.strides[1] = 1;
    BAD(ddl_recv, w, twice, peer, 0, NULL);
    BAD(ddl_recv, w, twice, DDL_ANY_SOURCE, 0, NULL);
    BAD(ddl_irecv, w, twice, peer, 0, &r);
    BAD(ddl_send_recv, w, t, peer, 0, twice, peer, 0, NULL);
    BAD(ddl_batch, w, &(ddl_transfer){0, twice, peer, 0}, 1, rs);
    CHECK(r == NULL);
    BAD(ddl_send_recv, w, apart(w, 0, 3, 1), peer, 0, apart(w, 0, 3, 1), peer, 0, NULL);
    BAD(ddl_send_recv, w, apart(w, 0, 3, 1), peer, 0, apart(w, 2, 2, 1), peer, 0, NULL);
    BAD(ddl_send_recv, w, apart(w, 2, 2, 1), peer, 0, apart(w, 0, 3, 1), peer, 0, NULL);
    BAD(ddl_send_recv, w, apart(w, 2, 1, 1), peer, 0, apart(w, 0, 3, 2), peer, 0, NULL);
    OK(ddl_send_recv(w, apart(w, 1, 1, 1), peer, 0, apart(w, 0, 2, 2), peer, 0, NULL)); /* between its elements */
    OK(ddl_send_recv(w, apart(w, 0, 2, 2), peer, 0, apart(w, 0, 2, 2), peer, 0, NULL)); /* sent from a copy */
    OK(ddl_send_recv(w, apart(w, 0, 2, 1), peer, 0, apart(w, 0, 2, 1), DDL_NO_RANK, 0, NULL));
    OK(ddl_recv(w, apart(w, 0, 2, 1), peer, 0, NULL));
}

static void messages(ddl_group *w, void *arg) {
    (void)arg;
    poison(w);
    ddl_tensor t = in_of(w), o = out_of(w);
    int n = ddl_size(w);
    ddl_request *r = (ddl_request *)(uintptr_t)POISON, *rs[2];
    ddl_info info;
    memset(&info, POISON, sizeof info);
    const int32_t peers[] = {n, -1, -3, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 5; i++) {
        BAD(ddl_send, w, t, peers[i], 0);
        BAD(ddl_isend, w, t, peers[i], 0, &r);
        if (peers[i] != DDL_ANY_SOURCE) {
            BAD(ddl_recv, w, o, peers[i], 0, &info);
            BAD(ddl_irecv, w, o, peers[i], 0, &r);
            BAD(ddl_probe, w, peers[i], 0, &info);
            BAD(ddl_iprobe, w, peers[i], 0, &info);
        }
        BAD(ddl_send_recv, w, t, peers[i], 0, o, 0, 0, &info);
    }
    BAD(ddl_send, w, t, 0, -1);
    BAD(ddl_send, w, t, 0, -5);
    BAD(ddl_isend, w, t, 0, DDL_ANY_TAG, &r);
    BAD(ddl_recv, w, o, 0, -2, &info);
    BAD(ddl_irecv, w, o, 0, INT32_MIN, &r);
    BAD(ddl_probe, w, 0, -2, &info);
    BAD(ddl_probe, w, DDL_NO_RANK, 0, &info);
    BAD(ddl_send_recv, w, t, 0, -1, o, 0, 0, &info);
    BAD(ddl_isend, w, t, 0, 0, NULL);
    BAD(ddl_irecv, w, o, 0, 0, NULL);
    BAD(ddl_batch, w, NULL, 2, rs);
    BAD(ddl_batch, w, &(ddl_transfer){1, t, 0, 0}, 1, NULL);
    BAD(ddl_batch, w, &(ddl_transfer){1, t, 0, 0}, -1, rs);
    BAD(ddl_batch, w, &(ddl_transfer){1, t, DDL_ANY_SOURCE, 0}, 1, rs);
    CHECK(r == NULL && is_poisoned(&info, sizeof info));
    messages_that_meet(w);
    OK(ddl_batch(w, NULL, 0, NULL));
    CHECK_EQ((int)ddl_send(NULL, t, 0, 0), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_isend(NULL, t, 0, 0, &r), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_recv(NULL, o, 0, 0, &info), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_iprobe(NULL, 0, 0, &info), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_batch(NULL, NULL, 0, NULL), (int)DDL_ERR_ARG);
}

TEST(messages_refuse_what_is_wrong) { world_threads(2, messages, NULL); }

static void collectives(ddl_group *w, void *arg) {
    (void)arg;
    poison(w);
    int32_t n = ddl_size(w), me = ddl_rank(w);
    ddl_tensor one = of_count(in_of(w), 2), out = of_count(out_of(w), 2), all_in = of_count(in_of(w), 2 * n),
               all_out = of_count(out_of(w), 2 * n), ints64 = of_count((ddl_tensor)DDL_ARRAY(ints[me]), 2);
    const int32_t roots[] = {-1, n, INT32_MAX};
    for (int i = 0; i < 3; i++) {
        BAD_COLL(broadcast, w, out, roots[i]);
        BAD_COLL(reduce, w, one, out, DDL_SUM, roots[i]);
        BAD_COLL(gather, w, one, all_out, roots[i]);
        BAD_COLL(scatter, w, all_in, out, roots[i]);
    }
    const ddl_op ops[] = {DDL_OP_NONE, -1, 14, 255, 256, INT32_MAX, DDL_BXOR, DDL_BAND, DDL_MIN_INDEX};
    for (size_t i = 0; i < sizeof ops / sizeof ops[0]; i++) {
        BAD_COLL(all_reduce, w, one, out, ops[i]);
        BAD_COLL(reduce, w, one, out, ops[i], 0);
        BAD_COLL(reduce_scatter, w, all_in, out, ops[i]);
        BAD_COLL(scan, w, one, out, ops[i]);
        BAD_COLL(exscan, w, one, out, ops[i]);
        BAD_COLL(all_reduce_many, w, &out, 1, ops[i]);
        double value = 3;
        BAD(ddl_all_reduce_scalar, w, &value, ops[i]);
        CHECK_EQ(value, 3.0);
    }
    FAILS(ddl_all_reduce(w, one, out, 99), DDL_ERR_ARG, "ddl_all_reduce: 99 is no op");
    FAILS(ddl_all_reduce(w, one, out, -1), DDL_ERR_ARG, "ddl_all_reduce: -1 is no op");
    BAD_COLL(all_reduce, w, one, of_count(out, 1), DDL_SUM);
    BAD_COLL(all_reduce, w, ints64, out, DDL_SUM);
    BAD_COLL(all_gather, w, one, of_count(all_out, 2 * n - 1));
    BAD_COLL(all_gather, w, one, of_count(all_out, 2 * n + 1));
    BAD_COLL(reduce_scatter, w, of_count(all_in, 2 * n - 1), out, DDL_SUM);
    BAD_COLL(all_to_all, w, of_count(all_in, 2 * n - 1), of_count(all_out, 2 * n - 1));
    BAD_COLL(all_to_all, w, all_in, of_count(all_out, n));
    BAD_COLL(scan, w, one, of_count(out, 1), DDL_SUM);
    ddl_tensor shifted = at(out, outs[me] + 1);
    BAD_COLL(all_reduce, w, out, shifted, DDL_SUM); /* overlaps */
    BAD_COLL(all_gather, w, at(out, outs[me] + 1), all_out);
    BAD_COLL(all_to_all, w, all_out, at(all_out, outs[me] + 1));
    BAD_COLL(scan, w, out, shifted, DDL_SUM);
    BAD_COLL(all_reduce_many, w, NULL, 2, DDL_SUM);
    BAD_COLL(all_reduce_many, w, &out, -1, DDL_SUM);
    BAD(ddl_all_reduce_scalar, w, NULL, DDL_SUM);
}

TEST(collectives_refuse_what_is_wrong) {
    world_threads(2, collectives, NULL);
    world_threads(3, collectives, NULL);
}

static void v_forms(ddl_group *w, void *arg) {
    (void)arg;
    poison(w);
    ddl_tensor one = of_count(in_of(w), 2), out = of_count(out_of(w), 2), all_in = of_count(in_of(w), 4),
               all_out = of_count(out_of(w), 4);
    const int64_t good[2] = {2, 2}, negative[2] = {2, -1}, large[2] = {2, 9}, huge[2] = {INT64_MAX, INT64_MAX},
                  outside[2] = {0, 3}, below[2] = {-1, 0}, other[2] = {1, 1};
    const int64_t *bad[] = {NULL, negative, large, huge, other};
    for (int i = 0; i < 5; i++) {
        BAD_COLL(all_gatherv, w, one, all_out, bad[i], NULL);
        BAD_COLL(reduce_scatterv, w, all_in, out, bad[i], DDL_SUM);
    }
    BAD_COLL(all_gatherv, w, one, all_out, good, outside);
    BAD_COLL(all_gatherv, w, one, all_out, good, below);
    BAD_COLL(gatherv, w, one, all_out, good, NULL, 2);
    BAD_COLL(gatherv, w, one, all_out, NULL, NULL, 0);
    BAD_COLL(gatherv, w, one, all_out, other, NULL, 0);
    BAD_COLL(scatterv, w, all_in, out, good, NULL, -1);
    BAD_COLL(scatterv, w, all_in, out, negative, NULL, 0);
    BAD_COLL(scatterv, w, all_in, out, other, NULL, 0);
    BAD_COLL(all_to_allv, w, all_in, NULL, NULL, all_out, good, NULL);
    BAD_COLL(all_to_allv, w, all_in, good, NULL, all_out, NULL, NULL);
    BAD_COLL(all_to_allv, w, all_in, large, NULL, all_out, good, NULL);
    BAD_COLL(all_to_allv, w, all_in, good, NULL, all_out, good, outside);
}

TEST(counts_and_offsets_are_checked) { world_threads(2, v_forms, NULL); }

/* ---- what is too large for any machine: nothing overflows, every rank refuses alike ---- */

static void too_large(ddl_group *w, void *arg) {
    (void)arg;
    poison(w);
    int me = ddl_rank(w), n = ddl_size(w);
    int64_t whole = INT64_MAX / 2 / 4, part = whole / n; /* elements of f32 */
    char *low = (char *)(uintptr_t)4096;                 /* never touched */
    ddl_tensor just = ddl_tensor_1d(low, DDL_F32, part + 1), most = ddl_tensor_1d(low, DDL_F32, whole + 1);
    ddl_tensor all = of_count(out_of(w), n), own = of_count(in_of(w), 1);
    const int64_t two[2] = {part + 1, part + 1}, far[2] = {1, 1}, beyond[2] = {0, whole};
    if (me != 0) { /* who is not root has no tensor that the sizes could be compared with */
        BAD(ddl_gather, w, just, all, 0);
        BAD(ddl_gatherv, w, just, all, two, NULL, 0);
        BAD(ddl_gatherv, w, own, all, far, beyond, 0);
        BAD(ddl_scatter, w, all, just, 0);
    } else {
        for (int i = 0; i < 4; i++) {
            BAD(ddl_gather, w, own, of_count(all, n + 1), 0);
        }
    }
    BAD_COLL(all_gather, w, just, all);
    BAD_COLL(reduce_scatter, w, all, just, DDL_SUM);
    BAD_COLL(all_reduce, w, most, most, DDL_SUM);
    BAD_COLL(broadcast, w, most, 0);
    const ddl_kind kinds[] = {DDL_GATHER, DDL_ALL_GATHER, DDL_REDUCE_SCATTER, DDL_SCATTER, DDL_ALL_REDUCE, DDL_BROADCAST};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        ddl_collective d = {.kind = kinds[i], .op = DDL_SUM, .in = most, .out = most};
        ddl_estimate_info estimate;
        BAD(ddl_estimate, w, &d, &estimate);
    }
}

TEST(sizes_do_not_overflow) { world_threads(2, too_large, NULL); }

/* ---- NULL, in every place that must not be ---- */

static void nothing(void *dst, const void *a, const void *b, int64_t count, ddl_dtype dtype, void *user) {
    (void)dst;
    (void)a;
    (void)b;
    (void)count;
    (void)dtype;
    (void)user;
}

static void nulls(ddl_group *w, void *arg) {
    (void)arg;
    poison(w);
    ddl_context *c = ddl_group_context(w);
    ddl_tensor t = in_of(w), o = out_of(w);
    ddl_request *r = (ddl_request *)(uintptr_t)POISON;
    ddl_op op = POISON;
    ddl_stats stats;
    ddl_collective d = {.kind = DDL_BARRIER}, none = {.kind = DDL_KIND_NONE}, beyond = {.kind = (ddl_kind)17};
    ddl_estimate_info estimate;
    BAD(ddl_ibarrier, w, NULL);
    BAD(ddl_ibroadcast, w, o, 0, NULL);
    BAD(ddl_iall_reduce, w, t, o, DDL_SUM, NULL);
    BAD(ddl_iall_reduce_many, w, &o, 1, DDL_SUM, NULL);
    BAD(ddl_collective_init, w, NULL, &r);
    BAD(ddl_collective_init, w, &d, NULL);
    BAD(ddl_collective_init, w, &none, &r);
    BAD(ddl_collective_init, w, &beyond, &r);
    BAD(ddl_estimate, w, NULL, &estimate);
    BAD(ddl_estimate, w, &d, NULL);
    BAD(ddl_estimate, w, &none, &estimate);
    BAD(ddl_stats_get, c, NULL);
    BAD(ddl_op_create, c, NULL, NULL, 1, &op);
    BAD(ddl_op_create, c, nothing, NULL, 1, NULL);
    BAD(ddl_op_create_scaled_sum, c, 2.0, NULL);
    BAD(ddl_op_free, c, 999);
    BAD(ddl_op_free, c, DDL_SUM);
    BAD(ddl_tensor_alloc, c, DDL_F32, 1, (int64_t[]){4}, NULL);
    BAD(ddl_group_create, w, NULL, 1, "x", NULL);
    ddl_group *group = (ddl_group *)(uintptr_t)POISON;
    BAD(ddl_group_create, w, NULL, 1, "x", &group);
    CHECK(group == NULL);
    BAD(ddl_group_set, w, NULL);
    BAD(ddl_agree, w, NULL);
    BAD(ddl_group_shrink, w, NULL);
    CHECK_EQ(op, POISON);
    CHECK(r == NULL);
    CHECK_EQ((int)ddl_barrier(NULL), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_ibarrier(NULL, &r), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_all_reduce(NULL, t, o, DDL_SUM), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_all_reduce_scalar(NULL, NULL, DDL_SUM), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_estimate(NULL, &d, &estimate), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_stats_get(NULL, &stats), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_progress(NULL), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_abort(NULL, "x"), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_op_free(NULL, 300), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_init(NULL, NULL), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_finalize(NULL), (int)DDL_OK);
    CHECK(ddl_world(NULL) == NULL);
    CHECK_EQ(ddl_error(NULL), "");
    CHECK_EQ(ddl_flight_record(NULL, NULL, 0), 0);
    CHECK_EQ(ddl_feature(NULL), 0);
    CHECK_EQ(ddl_feature("no such feature"), 0);
    CHECK(ddl_feature("tcp") == 1 && ddl_feature("plugins") == 1);
    CHECK_EQ(ddl_version(), DDL_VERSION_MAJOR * 10000 + DDL_VERSION_MINOR * 100 + DDL_VERSION_PATCH);
    CHECK(ddl_flight_record(c, NULL, 0) > 0); /* how much it would be */
    CHECK_EQ(ddl_status_name((ddl_status)77), "DDL_?");
    CHECK(ddl_status_text((ddl_status)77) != NULL);
}

TEST(null_is_refused_by_name) { world_threads(2, nulls, NULL); }

TEST(parts_are_checked) {
    int64_t begin = 5, count = 5;
    CHECK_EQ((int)ddl_part(10, 3, 3, &begin, &count), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_part(10, 3, -1, &begin, &count), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_part(10, 0, 0, &begin, &count), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_part(-1, 3, 0, &begin, &count), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_part(10, 3, 0, NULL, &count), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_part(10, 3, 0, &begin, NULL), (int)DDL_ERR_ARG);
    CHECK(begin == 5 && count == 5);
    int64_t next = 0;
    for (int32_t i = 0; i < 3; i++) {
        CHECK_EQ((int)ddl_part(10, 3, i, &begin, &count), (int)DDL_OK);
        CHECK(begin == next && count == (i == 0 ? 4 : 3));
        next += count;
    }
    CHECK_EQ(next, 10);
}

TEST(configurations_are_checked) {
    static const struct {
        ddl_config config;
        const char *says;
    } bad[] = {{{.world_size = -1}, "world_size"},         {{.world_size = 2, .rank = 2}, "rank"},
               {{.world_size = 2, .rank = -1}, "rank"},    {{.world_size = 1, .algorithm = "nonsense"}, "ddl_init: DDL_ALGO"},
               {{.world_size = 2, .transports = "carrier-pigeon", .rendezvous = "tcp://127.0.0.1:1"}, "carrier-pigeon"},
               {{.world_size = 1, .plugins = "no-such-plugin"}, "no-such-plugin"}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char error[1024] = "";
        ddl_config config = bad[i].config;
        ddl_context *c = (ddl_context *)(uintptr_t)POISON;
        config.error_text = error;
        config.error_bytes = sizeof error;
        config.init_timeout_ms = 2000;
        CHECK((int)ddl_init(&config, &c) < 0);
        CHECK(c == NULL);
        CHECK_STR(error, bad[i].says);
    }
}

static char unknown_lines[4][300];
static int unknown_count;

static void keep_line(void *user, ddl_log_level level, const char *line) {
    (void)user;
    if (level == DDL_LOG_WARN) {
        snprintf(unknown_lines[unknown_count++ % 4], sizeof unknown_lines[0], "%s", line);
    }
}

/* Said once, by one rank of the host, and without the value. */
static void misspelt(int rank, int n, void *arg) {
    (void)arg;
    (void)n;
    ddl_config config = {.log = keep_line};
    ddl_context *c = NULL;
    setenv("DDL_TIMEOUT_M", "hidden", 1);
    setenv("DDL_BENCH_QUICK", "1", 1);
    CHECK_EQ((int)ddl_init(&config, &c), (int)DDL_OK);
    CHECK_EQ(unknown_count, rank == 0 ? 1 : 0);
    if (rank == 0) {
        CHECK_STR(unknown_lines[0], "DDL_TIMEOUT_M is no setting of ddl; did you mean DDL_TIMEOUT_MS?");
        CHECK(strstr(unknown_lines[0], "hidden") == NULL);
    }
    CHECK_EQ((int)ddl_finalize(&c), (int)DDL_OK);
}

TEST(a_variable_that_nobody_reads_is_warned_of) { ranks_fork(2, misspelt, NULL, 30); }

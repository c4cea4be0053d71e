/* Reductions: every type with every op, averages, scaled sums, ops of the user, kept order, and the promise that all ranks
 * get the same bits, in rank order when asked for.
 * tests/run: variants=gcc,asan timeout=120 */
#include "coll.h"

static const ddl_kind reducing[] = {DDL_REDUCE, DDL_ALL_REDUCE, DDL_REDUCE_SCATTER, DDL_SCAN, DDL_EXSCAN};

/* What makes sense, written out apart from the table of ddl. */
static bool makes_sense(ddl_dtype dtype, ddl_op op, bool scan) {
    if (coll_is_pair(dtype) || op == DDL_MIN_INDEX || op == DDL_MAX_INDEX) {
        return coll_is_pair(dtype) && (op == DDL_MIN_INDEX || op == DDL_MAX_INDEX);
    }
    if (op == DDL_AVG) {
        return dtype != DDL_BOOL && !scan;
    }
    return op <= DDL_MAX || !coll_is_float(dtype);
}

static void every_type_and_op(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    unsigned random = coll_seed();
    bool ok = true;
    for (int d = DDL_F16; ok && d <= DDL_E5M2; d++) {
        for (int op = DDL_SUM; ok && op <= DDL_MAX_INDEX; op++) {
            for (int i = 0; ok && i < 5; i++) {
                unsigned draw = coll_random(&random);
                ddl_kind kind = reducing[i];
                coll_case k = {.kind = kind, .dtype = (ddl_dtype)d, .op = op, .count = 203 + draw % 3,
                               .root = kind == DDL_REDUCE ? (int)(draw / 4 % (unsigned)n) : 0,
                               .in_place = draw / 64 % 2, .salt = draw % 90};
                if (makes_sense((ddl_dtype)d, op, kind == DDL_SCAN || kind == DDL_EXSCAN)) {
                    ok = coll_check(ddl_world(c), &k);
                    continue;
                }
                int64_t in[64] = {0}, out[64] = {0};
                ddl_tensor a = ddl_tensor_1d(in, (ddl_dtype)d, n), b = ddl_tensor_1d(out, (ddl_dtype)d, n);
                ddl_status status = kind == DDL_SCAN      ? ddl_scan(ddl_world(c), a, b, op)
                                    : kind == DDL_EXSCAN ? ddl_exscan(ddl_world(c), a, b, op)
                                                         : ddl_all_reduce(ddl_world(c), a, b, op);
                CHECK_EQ(status, DDL_ERR_ARG);
                ok = status == DDL_ERR_ARG;
            }
        }
    }
    coll_leave(c);
}

static void run_ranks(int n, ranks_fn fn) {
    coll_job job;
    coll_job_make(&job);
    ranks_fork(n, fn, &job, 50);
}

TEST(every_type_and_op_on_one_rank) { run_ranks(1, every_type_and_op); }
TEST(every_type_and_op_on_three_ranks) { run_ranks(3, every_type_and_op); }
TEST(every_type_and_op_on_four_ranks) { run_ranks(4, every_type_and_op); }
TEST(every_type_and_op_on_five_ranks) { run_ranks(5, every_type_and_op); }

/* ---- ops of the user: maps x -> a * x + b modulo 2^32, which do not commute ---- */

static uint64_t map_of(uint32_t a, uint32_t b) { return (uint64_t)a << 32 | b; }

static uint64_t map_join(uint64_t first, uint64_t second) {
    uint32_t a1 = (uint32_t)(first >> 32), b1 = (uint32_t)first, a2 = (uint32_t)(second >> 32), b2 = (uint32_t)second;
    return map_of(a1 * a2, a1 * b2 + b1);
}

static void map_op(void *dst, const void *a, const void *b, int64_t count, ddl_dtype dtype, void *user) {
    ++*(int *)user;
    CHECK(dtype == DDL_U64);
    for (int64_t i = 0; i < count; i++) {
        ((uint64_t *)dst)[i] = map_join(((const uint64_t *)a)[i], ((const uint64_t *)b)[i]);
    }
}

static uint64_t map_input(int rank, int64_t i) {
    return map_of((uint32_t)(rank * 2 + 3 + i % 5), (uint32_t)(rank * 7 + i * 11 + 1));
}

static uint64_t map_expect(int first, int last, int64_t i) {
    uint64_t x = map_input(first, i);
    for (int r = first + 1; r <= last; r++) {
        x = map_join(x, map_input(r, i));
    }
    return x;
}

static bool check_order(ddl_group *g, ddl_kind kind, ddl_op op, int64_t count, int root, const char *algorithm) {
    int n = ddl_size(g), rank = ddl_rank(g);
    int64_t total = kind == DDL_REDUCE_SCATTER ? count * n : count, shift = total - count == 0 ? 0 : rank * count;
    uint64_t *in = (uint64_t *)malloc((size_t)total * 8 + 8), *out = (uint64_t *)malloc((size_t)count * 8 + 8);
    for (int64_t i = 0; i < total; i++) {
        in[i] = map_input(rank, i);
    }
    memset(out, 0xee, (size_t)count * 8 + 8);
    ddl_tensor a = ddl_tensor_1d(in, DDL_U64, total), b = ddl_tensor_1d(out, DDL_U64, count);
    ddl_status status = kind == DDL_REDUCE           ? ddl_reduce(g, a, b, op, root)
                        : kind == DDL_ALL_REDUCE     ? ddl_all_reduce(g, a, b, op)
                        : kind == DDL_REDUCE_SCATTER ? ddl_reduce_scatter(g, a, b, op)
                        : kind == DDL_SCAN           ? ddl_scan(g, a, b, op)
                                                     : ddl_exscan(g, a, b, op);
    int last = kind == DDL_SCAN ? rank : kind == DDL_EXSCAN ? rank - 1 : n - 1;
    bool none = last < 0 || (kind == DDL_REDUCE && rank != root), ok = status == DDL_OK;
    for (int64_t i = 0; ok && i < count; i++) {
        ok = out[i] == (none ? 0xeeeeeeeeeeeeeeeeull : map_expect(0, last, shift + i));
    }
    ok = ok && out[count] == 0xeeeeeeeeeeeeeeeeull;
    if (!ok) {
        test__fail(__FILE__, __LINE__, "kind %d by %s, count %lld, root %d: status %d or order lost: %s", (int)kind,
                   algorithm, (long long)count, root, (int)status, ddl_error(ddl_group_context(g)));
    }
    free(in);
    free(out);
    return ok;
}

static void keeps_order(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    int used = 0;
    ddl_op op = 0;
    REQUIRE(ddl_op_create(c, map_op, &used, 0, &op) == DDL_OK);
    bool ok = true;
    for (int a = -1; a < COLL_ALGOS && ok; a++) {
        const char *name = a < 0 ? "auto" : coll_algos[a].setting;
        if (a >= 0 && !coll_reduces(coll_algos[a].kind)) {
            continue;
        }
        ok = coll_force(ddl_world(c), name);
        for (int k = 0; ok && k < 5; k++) {
            for (int i = 0; ok && i < 4 && (a < 0 || reducing[k] == coll_algos[a].kind); i++) {
                static const int64_t sizes[] = {1, 3, 500, 20011};
                ok = check_order(ddl_world(c), reducing[k], op, sizes[i], i % n, name);
            }
        }
    }
    CHECK(n == 1 || used > 0);
    CHECK(ddl_op_free(c, op) == DDL_OK);
    CHECK(ddl_op_free(c, op) == DDL_ERR_ARG);
    coll_leave(c);
}

TEST(order_is_kept_on_two_ranks) { run_ranks(2, keeps_order); }
TEST(order_is_kept_on_five_ranks) { run_ranks(5, keeps_order); }
TEST(order_is_kept_on_eight_ranks) { run_ranks(8, keeps_order); }

/* ---- a commutative op, freed while it is in use; scaled sums ---- */

static void gcd_op(void *dst, const void *a, const void *b, int64_t count, ddl_dtype dtype, void *user) {
    (void)dtype;
    (void)user;
    for (int64_t i = 0; i < count; i++) {
        int32_t x = ((const int32_t *)a)[i], y = ((const int32_t *)b)[i];
        while (y != 0) {
            int32_t rest = x % y;
            x = y;
            y = rest;
        }
        ((int32_t *)dst)[i] = x;
    }
}

static void own_ops(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    enum { COUNT = 30000 };
    int32_t *in = (int32_t *)malloc(COUNT * 4), *out = (int32_t *)malloc(COUNT * 4);
    ddl_op gcd, scaled;
    ddl_request *r = NULL;
    for (int i = 0; i < COUNT; i++) {
        in[i] = 6 * (i % 7 + 1) * (rank + 2);
    }
    REQUIRE(ddl_op_create(c, gcd_op, NULL, 1, &gcd) == DDL_OK);
    REQUIRE(ddl_iall_reduce(ddl_world(c), DDL_VIEW(in, COUNT), DDL_VIEW(out, COUNT), gcd, &r) == DDL_OK);
    CHECK(ddl_op_free(c, gcd) == DDL_OK); /* in use */
    CHECK(ddl_all_reduce(ddl_world(c), DDL_VIEW(in, 1), DDL_VIEW(out, 1), gcd) == DDL_ERR_ARG);
    REQUIRE(ddl_op_create_scaled_sum(c, rank + 0.5, &scaled) == DDL_OK); /* does not take the place of the one in use */
    CHECK(ddl_wait(&r, NULL) == DDL_OK);
    int wrong = 0;
    for (int i = 0; i < COUNT; i++) {
        int32_t expect = 6 * (i % 7 + 1); /* n >= 2: 2 and 3 have no common factor */
        wrong += out[i] != expect;
    }
    CHECK_EQ(wrong, 0);
    for (int place = 0; place < 2; place++) {
        float x[9], y[9], sum = 0;
        for (int i = 0; i < 9; i++) {
            x[i] = (float)(i + 1);
        }
        for (int q = 0; q < n; q++) {
            sum += (float)q + 0.5f;
        }
        CHECK(ddl_all_reduce(ddl_world(c), DDL_ARRAY(x), place ? DDL_ARRAY(x) : DDL_ARRAY(y), scaled) == DDL_OK);
        for (int i = 0; i < 9; i++) {
            CHECK_EQ(place ? x[i] : y[i], (float)(i + 1) * sum);
            CHECK(place || x[i] == (float)(i + 1)); /* the input is not scaled itself */
        }
    }
    CHECK(ddl_op_free(c, scaled) == DDL_OK);
    free(in);
    free(out);
    coll_leave(c);
}

TEST(own_ops_and_scaled_sums) { run_ranks(3, own_ops); }

/* ---- averages whose sum does not fit ---- */

/* The largest values of the 8-bit floats: their average is finite, and equal values give that value; sums overflow, and
 * it shows. */
static void large_byte_averages(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    const struct {
        ddl_dtype dtype;
        uint8_t largest, overflow;
    } types[] = {{DDL_E4M3, 0x7e, 0xff}, {DDL_E5M2, 0x7b, 0x7c}};
    for (int i = 0; i < 2; i++) {
        uint8_t in[33], out[33];
        memset(in, types[i].largest, sizeof in);
        memset(out, 0xee, sizeof out);
        ddl_tensor a = ddl_tensor_1d(in, types[i].dtype, 33), b = ddl_tensor_1d(out, types[i].dtype, 33);
        CHECK_EQ(ddl_all_reduce(ddl_world(c), a, b, DDL_AVG), DDL_OK);
        for (int j = 0; j < 33; j++) {
            CHECK_EQ(out[j], types[i].largest);
        }
        CHECK_EQ(ddl_all_reduce(ddl_world(c), a, b, DDL_SUM), DDL_OK);
        CHECK(out[0] == types[i].overflow && out[32] == types[i].overflow);
    }
    coll_leave(c);
}

TEST(averages_of_large_byte_floats) { run_ranks(4, large_byte_averages); }

static double f16_value(uint16_t bits) { /* of normal numbers above zero */
    double x = 1024 + (bits & 0x3ff);
    for (int e = bits >> 10; e < 25; e++) {
        x /= 2;
    }
    for (int e = bits >> 10; e > 25; e--) {
        x *= 2;
    }
    return x;
}

/* Values near the largest of f16: their sum is infinite there, their average is not. */
static void large_averages(int rank, int n, void *arg) {
    enum { COUNT = 1000 };
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    uint16_t in[COUNT], out[COUNT], all[COUNT * 8];
    for (int place = 0; place < 2; place++) {
        for (int i = 0; i < COUNT; i++) {
            in[i] = (uint16_t)(i == 0 ? 0x7bff : i == 1 ? 0x7b53 : 0x7b00 + (i * 7 + rank * 29) % 256);
        }
        memset(out, 0xee, sizeof out);
        ddl_tensor a = ddl_tensor_1d(in, DDL_F16, COUNT), b = place ? a : ddl_tensor_1d(out, DDL_F16, COUNT);
        CHECK_EQ(ddl_all_reduce(ddl_world(c), a, b, DDL_AVG), DDL_OK);
        const uint16_t *got = place ? in : out;
        int wrong = 0;
        for (int i = 2; i < COUNT; i++) {
            double sum = 0;
            for (int r = 0; r < n; r++) {
                sum += f16_value((uint16_t)(0x7b00 + (i * 7 + r * 29) % 256));
            }
            double off = f16_value(got[i]) - sum / n; /* neighbours are 32 apart here; each sum may round */
            wrong += got[i] >= 0x7c00 || off > 16 * n || off < -16 * n;
        }
        CHECK_EQ(wrong, 0);
        CHECK(n != 2 || (got[0] == 0x7bff && got[1] == 0x7b53));
        ddl_tensor mine = ddl_tensor_1d(got, DDL_F16, COUNT), those = ddl_tensor_1d(all, DDL_F16, COUNT * n);
        CHECK_EQ(ddl_all_gather(ddl_world(c), mine, those), DDL_OK);
        for (int r = 0; r < n; r++) {
            CHECK(memcmp(all + r * COUNT, got, sizeof in) == 0); /* the same bits on all ranks */
        }
    }
    coll_leave(c);
}

TEST(averages_near_the_largest_on_two_ranks) { run_ranks(2, large_averages); }
TEST(averages_near_the_largest_on_three_ranks) { run_ranks(3, large_averages); }
TEST(averages_near_the_largest_on_eight_ranks) { run_ranks(8, large_averages); }

/* ---- bits ---- */

enum { BITS = 40011 };

static float noise(int rank, int64_t i) {
    uint32_t h = (uint32_t)rank * 2654435761u ^ (uint32_t)i * 40503u ^ coll_seed();
    h = (h ^ h >> 15) * 2246822519u;
    return ((float)(h >> 8) / 8388608.0f - 1.0f) * (h % 7 == 0 ? 1e6f : 1.0f);
}

static uint64_t hash_of(const float *x, int64_t count) {
    uint64_t h = 1469598103934665603ull;
    for (size_t i = 0; i < (size_t)count * 4; i++) {
        h = (h ^ ((const unsigned char *)x)[i]) * 1099511628211ull;
    }
    return h;
}

/* All ranks have the same bits; returns them. */
static uint64_t same_bits(ddl_group *g, const char *algorithm, bool twice) {
    static __thread float in[BITS], out[BITS];
    uint64_t ours[2], all[2 * 16];
    for (int run = 0; run < 2; run++) {
        for (int64_t i = 0; i < BITS; i++) {
            in[i] = noise(ddl_rank(g), i);
        }
        CHECK(ddl_all_reduce(g, DDL_ARRAY(in), DDL_ARRAY(out), DDL_SUM) == DDL_OK);
        ours[run] = hash_of(out, BITS);
    }
    CHECK(!twice || ours[0] == ours[1]);
    CHECK(ddl_all_gather(g, DDL_ARRAY(ours), DDL_VIEW(all, 2 * ddl_size(g))) == DDL_OK);
    for (int r = 0; r < 2 * ddl_size(g); r++) {
        if (all[r] != ours[0]) {
            test__fail(__FILE__, __LINE__, "%s: rank %d has other bits than rank %d", algorithm, r / 2, ddl_rank(g));
        }
    }
    return ours[0];
}

static uint64_t bits_in_rank_order(int n) {
    static __thread float out[BITS];
    for (int64_t i = 0; i < BITS; i++) {
        float sum = noise(0, i);
        for (int r = 1; r < n; r++) {
            sum += noise(r, i);
        }
        out[i] = sum;
    }
    return hash_of(out, BITS);
}

static void bits(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    uint64_t expect = bits_in_rank_order(n);
    for (int deterministic = 0; deterministic < 2; deterministic++) {
        ddl_group_options options = {.deterministic = deterministic ? 1 : -1};
        CHECK(ddl_group_set(ddl_world(c), &options) == DDL_OK);
        for (int a = 0; a < COLL_ALGOS; a++) {
            if (coll_algos[a].kind == DDL_ALL_REDUCE && coll_force(ddl_world(c), coll_algos[a].setting)) {
                uint64_t hash = same_bits(ddl_world(c), coll_algos[a].setting, true);
                CHECK(!deterministic || hash == expect);
            }
        }
    }
    coll_leave(c);
}

TEST(same_bits_on_two_ranks) { run_ranks(2, bits); }
TEST(same_bits_on_three_ranks) { run_ranks(3, bits); }
TEST(same_bits_on_seven_ranks) { run_ranks(7, bits); }
TEST(same_bits_on_eight_ranks) { run_ranks(8, bits); }

/* Deterministic as a setting of the whole job: the other reductions are folded in rank order too. */
static void rank_order(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, (const coll_job *)arg);
    REQUIRE(c != NULL);
    enum { COUNT = 333 };
    float in[COUNT * 8], out[COUNT];
    for (int i = 0; i < COUNT * n; i++) {
        in[i] = noise(rank, i);
    }
    for (int kind = 0; kind < 3; kind++) {
        ddl_status status = kind == 0   ? ddl_reduce(ddl_world(c), DDL_VIEW(in, COUNT), DDL_ARRAY(out), DDL_SUM, 0)
                            : kind == 1 ? ddl_reduce_scatter(ddl_world(c), DDL_VIEW(in, COUNT * n), DDL_ARRAY(out), DDL_SUM)
                                        : ddl_scan(ddl_world(c), DDL_VIEW(in, COUNT), DDL_ARRAY(out), DDL_SUM);
        CHECK_EQ(status, DDL_OK);
        int wrong = 0;
        for (int i = 0; i < COUNT && (kind != 0 || rank == 0); i++) {
            int at = kind == 1 ? rank * COUNT + i : i;
            float sum = noise(0, at);
            for (int r = 1; r < (kind == 2 ? rank + 1 : n); r++) {
                sum += noise(r, at);
            }
            wrong += memcmp(&sum, &out[i], 4) != 0;
        }
        CHECK_EQ(wrong, 0);
    }
    coll_leave(c);
}

TEST(rank_order_in_all_reductions) {
    coll_job job;
    coll_job_make(&job);
    job.config.deterministic = 1;
    ranks_fork(6, rank_order, &job, 30);
}

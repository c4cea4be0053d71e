/* A blocking call through shared memory that repeats the one before on other memory skips its checks: what it moves is
 * right wherever the tensors lie, and what the checks refuse is still refused and changes nothing.
 * tests/run: variants=asan,tsan timeout=90 */
#define _GNU_SOURCE 1
#define DDL_IMPLEMENTATION
#define DDL__STATIC_PLUGINS(X) X(shm)

typedef struct ddl_plugin ddl_plugin;
typedef struct ddl_host ddl_host;
const ddl_plugin *ddl_plugin_shm_v1(const ddl_host *host);

#include "world.h"

#include "../plugins/shm/shm.c"

enum { RANKS_MOST = 3, PLACES = 8, ROUNDS = 60 };

static int part, wide; /* elements of a rank's part; of those of all ranks at most */

typedef struct part_of {
    ddl_kind kind;
    int wide_in, wide_out; /* a part for each rank */
} part_of;

static const part_of kinds[] = {{DDL_BROADCAST, 0, 0},  {DDL_REDUCE, 0, 0},         {DDL_ALL_REDUCE, 0, 0},
                                {DDL_ALL_GATHER, 0, 1}, {DDL_REDUCE_SCATTER, 1, 0}, {DDL_ALL_TO_ALL, 1, 1},
                                {DDL_SCAN, 0, 0}};

static int32_t given(int rank, int round, int i) { return rank * 1000 + round * 17 + i + 1; }

/* Element i of what `rank` must have after the call; -1: as it was. */
static int32_t expected(const part_of *k, int rank, int n, int root, int round, int i) {
    int32_t sum = 0, first = k->kind == DDL_SCAN ? rank + 1 : n;
    int at = k->kind == DDL_REDUCE_SCATTER ? rank * part + i : i;
    switch (k->kind) {
    case DDL_BROADCAST:
        return given(root, round, i);
    case DDL_ALL_GATHER:
        return given(i / part, round, i % part);
    case DDL_ALL_TO_ALL:
        return given(i / part, round, rank * part + i % part);
    case DDL_REDUCE:
        if (rank != root) {
            return -1;
        }
        break;
    default:
        break;
    }
    for (int r = 0; r < first; r++) {
        sum += given(r, round, at);
    }
    return sum;
}

static ddl_status call(ddl_group *w, const part_of *k, int32_t *in, int32_t *out, int root) {
    int64_t n = ddl_size(w);
    ddl_tensor a = ddl_tensor_1d(in, DDL_I32, k->wide_in ? n * part : part);
    ddl_tensor b = ddl_tensor_1d(out, DDL_I32, k->wide_out ? n * part : part);
    switch (k->kind) {
    case DDL_BROADCAST:
        return ddl_broadcast(w, a, root);
    case DDL_REDUCE:
        return ddl_reduce(w, a, b, DDL_SUM, root);
    case DDL_ALL_REDUCE:
        return ddl_all_reduce(w, a, b, DDL_SUM);
    case DDL_ALL_GATHER:
        return ddl_all_gather(w, a, b);
    case DDL_REDUCE_SCATTER:
        return ddl_reduce_scatter(w, a, b, DDL_SUM);
    case DDL_ALL_TO_ALL:
        return ddl_all_to_all(w, a, b);
    default:
        return ddl_scan(w, a, b, DDL_SUM);
    }
}

/* Where the output of a round begins that is in place with the input at `in`: ddl.h, In place. */
static int32_t *in_place_out(const part_of *k, int32_t *in, int rank) {
    return k->wide_out && !k->wide_in ? in - rank * part : !k->wide_out && k->wide_in ? in + rank * part : in;
}

static void round_of(ddl_group *w, const part_of *k, int round, int32_t *in, int32_t *out) {
    int n = ddl_size(w), rank = ddl_rank(w), root = 1;
    int many_in = k->wide_in ? n * part : part, many_out = k->wide_out ? n * part : part;
    for (int i = 0; i < many_out; i++) {
        out[i] = -1;
    }
    for (int i = 0; i < many_in; i++) {
        in[i] = given(rank, round, i);
    }
    out = k->kind == DDL_BROADCAST ? in : out;
    CHECK_EQ(call(w, k, in, out, root), DDL_OK);
    for (int i = 0; i < many_out; i++) {
        int32_t want = expected(k, rank, n, root, round, i);
        want = want == -1 && in == out ? given(rank, round, i) : want;
        if (out[i] != want) {
            test__fail(__FILE__, __LINE__, "kind %d, round %d, rank %d: element %d is %d, expected %d", (int)k->kind,
                       round, rank, i, out[i], want);
            return;
        }
    }
}

/* Refused on every rank: nobody comes, and nothing is touched. A rank that does not look at a tensor refuses none. */
static void refused(ddl_group *w, const part_of *k, int32_t *memory) {
    if (k->kind == DDL_REDUCE) {
        return; /* only its root looks at `out`: the others would go ahead */
    }
    size_t bytes = (size_t)(4 * wide) * sizeof *memory;
    int32_t *before = malloc(bytes);
    int rank = ddl_rank(w);
    bool alone = k->kind == DDL_BROADCAST; /* has one tensor */
    REQUIRE(before != NULL);
    memcpy(before, memory, bytes);
    CHECK_EQ(call(w, k, NULL, memory, 1), DDL_ERR_ARG);
    if (!alone) {
        CHECK_EQ(call(w, k, memory, NULL, 1), DDL_ERR_ARG);
        CHECK_EQ(call(w, k, memory + wide, in_place_out(k, memory + wide, rank) + 1, 1), DDL_ERR_ARG);
        CHECK_EQ(call(w, k, memory + wide, in_place_out(k, memory + wide, rank) - 1, 1), DDL_ERR_ARG);
    }
    CHECK(memcmp(before, memory, bytes) == 0);
    free(before);
}

/* Apart here and there, in place here and there, as far from each other as before, and back. */
static void everywhere(ddl_group *w, void *memory_) {
    int32_t *memory = memory_;
    for (size_t j = 0; j < sizeof kinds / sizeof kinds[0]; j++) {
        const part_of *k = &kinds[j];
        for (int round = 0; round < ROUNDS; round++) {
            int32_t *place = memory + (round * 3 % PLACES * 4 + 1) * wide;
            int32_t *other = memory + ((round * 3 + 1) % PLACES * 4 + 1) * wide;
            bool together = round / 5 % 2 == 1;
            round_of(w, k, round, place, together       ? in_place_out(k, place, ddl_rank(w))
                                         : round % 2 == 0 ? place + wide
                                                          : other);
            if (round % 7 == 3) {
                refused(w, k, memory + round % PLACES * 4 * wide);
            }
        }
    }
}

/* With the arrival, in a slot, in rounds; in ordinary memory and in memory that the others see. */
static void of_all_sizes(ddl_group *w, void *arg) {
    static const int parts[] = {5, 300, 9000};
    (void)arg;
    for (size_t i = 0; i < 2 * sizeof parts / sizeof parts[0]; i++) {
        part = parts[i / 2];
        wide = part * RANKS_MOST;
        int64_t count = PLACES * 4 * wide;
        ddl_tensor t = ddl_tensor_1d(NULL, DDL_I32, count);
        if (i % 2 == 0) {
            t.data = calloc((size_t)count, sizeof(int32_t));
            REQUIRE(t.data != NULL);
            everywhere(w, t.data);
            free(t.data);
        } else {
            REQUIRE(OK(ddl_tensor_alloc(ddl_group_context(w), DDL_I32, 1, &count, &t)) == DDL_OK);
            memset(t.data, 0, (size_t)count * sizeof(int32_t));
            everywhere(w, t.data);
            OK(ddl_barrier(w));
            OK(ddl_tensor_free(ddl_group_context(w), &t));
        }
    }
}

TEST(between_two_ranks) {
    setenv("DDL_TRANSPORTS", "shm", 1);
    world_fork(2, of_all_sizes, NULL, 60);
}

TEST(between_three_ranks) {
    setenv("DDL_TRANSPORTS", "shm", 1);
    world_fork(3, of_all_sizes, NULL, 60);
}

/* all_to_all by pairs (plugins/shm/native_exchange.h), without a core: among other operations, of forked ranks and of
 * threads, in rings of every size; which operations go that way; ranks that give up, and nonsense for counters.
 * tests/run: variants=gcc,asan,tsan timeout=400 */
#define TEST_TIMEOUT_S 240
#define SHM_FAR_BYTES (512u << 10) /* so that the sizes below lie on both sides */
#include "ranks.h"

#include "shm_jobs.h"

enum { GROUP = 0x77, ROOM = 9 << 18 };

/* ---- among other operations ---- */

static const struct {
    int kind;
    uint64_t given; /* of all_to_all by each rank in all; of the others as much as one part of that */
} calls[] = {{DDL_ALL_TO_ALL, 1 << 20},   {DDL_ALL_REDUCE, 1200 << 10}, {DDL_ALL_TO_ALL, 1200016}, {DDL_ALL_TO_ALL, 1 << 20},
             {DDL_ALL_GATHER, 400 << 10}, {DDL_ALL_TO_ALL, 80 << 10},   {DDL_BROADCAST, 2 << 20},  {DDL_BARRIER, 0},
             {DDL_ALL_TO_ALL, 2000016},   {DDL_ALL_TO_ALL, 440 << 10},  {DDL_ALL_TO_ALL, 16 << 10}};
#if defined(__SANITIZE_THREAD__)
enum { CALLS = sizeof calls / sizeof calls[0], TIMES = 3 };
#else
enum { CALLS = sizeof calls / sizeof calls[0], TIMES = 6 };
#endif

static job numbered(uint64_t seq, int rank, int n) {
    uint64_t bytes = calls[seq % CALLS].given / (uint64_t)n / 4 * 4;
    return (job){.seq = seq, .kind = calls[seq % CALLS].kind, .n = n, .rank = rank, .element = 4, .bytes = bytes,
                 .in_place = seq / CALLS % 2 == 1};
}

/* In ordinary memory, two at once. Each that a ring does not hold has gone by pairs, and no other. */
static void exchanging_rank(shm *t, int rank, int n, void *arg) {
    int32_t ranks[MOST_RANKS];
    uint64_t exchanged = 0;
    buffers b;
    void *self = NULL;
    unsigned seed = (unsigned)rank;
    job jobs[2];
    (void)arg;
    all_ranks(ranks, n);
    buffers_make(&b, t, ROOM);
    CHECK_EQ(shm_transport.native_open(t, GROUP, ranks, n, rank, &self), DDL_OK);
    const shm_set *set = self;
    for (uint64_t seq = 1, ended = 1; ended <= CALLS * TIMES; ended++) {
        for (; seq <= CALLS * TIMES && seq < ended + 2; seq++) {
            job *j = &jobs[seq % 2];
            *j = numbered(seq, rank, n);
            place(j, &b, (int)(seq % 2));
            if (rand_r(&seed) % 8 == 0) {
                usleep((useconds_t)(rand_r(&seed) % 2000));
            }
            start(t, self, j);
            exchanged += j->kind == DDL_ALL_TO_ALL && j->bytes * (uint64_t)n > set->ring_bytes ? j->bytes : 0;
        }
        finish(t, self, &jobs[ended % 2], &seed);
    }
    CHECK(exchanged > 0);
    CHECK_EQ(set->exchanged, exchanged);
    for (int j = 0; j < n; j++) {
        CHECK_EQ(set->own->pairs[j].sent, j == rank ? 0 : exchanged);
        CHECK_EQ(set->own->pairs[j].got, j == rank ? 0 : exchanged);
    }
    shm_transport.native_close(t, self);
    buffers_free(&b);
}

static void exchanging(int n, const char *staging, bool threads) {
    if (staging != NULL) {
        setenv("SHM_STAGING_BYTES", staging, 1);
    }
    native_world w = {.fn = exchanging_rank, .cores = 1};
    native_world_make(&w, n);
    native_world_run(&w, n, threads);
    unsetenv("SHM_STAGING_BYTES");
}

TEST(four_among_other_operations) { exchanging(4, NULL, false); }
TEST(three_and_eight_in_little_room) {
    exchanging(3, "128K", false);
    exchanging(8, "128K", false);
}
TEST(four_threads) { exchanging(4, NULL, true); }
TEST(three_threads_in_little_room) { exchanging(3, "128K", true); }
TEST(to_distant_cores) {
    setenv("SHM_DISTANT_NS", "0", 1);
    exchanging(4, NULL, true);
    unsetenv("SHM_DISTANT_NS");
}

/* ---- which, and where ---- */

/* An all_to_all of 3 to 16 ranks that share cores, of more than a ring holds. */
TEST(what_goes_by_pairs) {
    static const uint64_t ring = 416 << 10;
    static const struct {
        int kind, count;
        bool crowded;
        uint64_t given;
        bool exchange;
    } of[] = {{DDL_ALL_TO_ALL, 4, true, (416 << 10) + 16, true}, {DDL_ALL_TO_ALL, 4, true, 416 << 10, false},
              {DDL_ALL_TO_ALL, 3, true, 64 << 20, true},         {DDL_ALL_TO_ALL, 2, true, 64 << 20, false},
              {DDL_ALL_TO_ALL, 16, true, 64 << 20, true},        {DDL_ALL_TO_ALL, 17, true, 64 << 20, false},
              {DDL_ALL_TO_ALL, 4, false, 64 << 20, false},       {DDL_REDUCE_SCATTER, 4, true, 64 << 20, false}};
    for (size_t i = 0; i < sizeof of / sizeof of[0]; i++) {
        shm t = {.crowded = of[i].crowded};
        shm_set set = {.t = &t, .count = of[i].count, .ring_bytes = ring, .position = 12345};
        shm_op op = {.given = of[i].given, .call = {.kind = of[i].kind, .bytes = of[i].given / (uint64_t)of[i].count}};
        CHECK_EQ(shm_exchanges(&set, &op), of[i].exchange);
    }
}

/* No byte of a room is left out, none stands twice, and each chunk lies in one piece in its own room. */
TEST(rooms_are_filled_in_order) {
    static const uint64_t rings[] = {416 << 10, 3 << 20, 4224, 32 * SHM_PAIR};
    for (size_t i = 0; i < sizeof rings / sizeof rings[0]; i++) {
        for (int32_t n = 3; n <= SHM_EXCHANGE_RANKS; n++) {
            shm_set set = {.count = n, .ring_bytes = rings[i], .position = 12345};
            shm_op op = {.call.bytes = 5 * rings[i] / (uint64_t)n + 77};
            CHECK(shm_has_room(&set));
            shm_exchange_lay_out(&set, &op);
            CHECK_EQ(op.end, set.position + rings[i]); /* others begin when it has been ended by all */
            CHECK(op.part * (uint64_t)n <= rings[i] && op.chunk > 0 && op.chunk * SHM_EXCHANGE_CHUNKS <= op.part &&
                  op.chunk % SHM_LINE == 0);
            for (uint64_t at = 0, bytes; at < op.call.bytes; at += bytes) {
                bytes = shm_room_span(&op, at, op.call.bytes);
                REQUIRE(bytes > 0 && bytes <= op.chunk && at + bytes <= op.call.bytes);
                CHECK_EQ(shm_room_at(&op, 2, at), SHM_RING_AT + 2 * op.part + at % op.part);
                CHECK(at % op.part + bytes <= op.part);
            }
        }
    }
}

/* ---- ranks that give up, and nonsense ---- */

enum { BAD_RANKS = 3, BAD_BYTES = 60000 };

/* Three ranks in this thread, each with a set. */
typedef struct three {
    native_world w;
    void *set[BAD_RANKS];
    buffers b[BAD_RANKS];
    job jobs[BAD_RANKS];
    ddl_status status[BAD_RANKS];
} three;

/* They have arrived, and each has looked once. */
static void three_begin(three *x) {
    int32_t ranks[BAD_RANKS] = {0, 1, 2}, rank = -1;
    x->w = (native_world){.cores = 1};
    setenv("SHM_STAGING_BYTES", "128K", 1);
    native_world_make(&x->w, BAD_RANKS);
    unsetenv("SHM_STAGING_BYTES");
    for (int r = 0; r < BAD_RANKS; r++) {
        buffers_make(&x->b[r], x->w.endpoint[r], BAD_RANKS * BAD_BYTES);
        CHECK_EQ(shm_transport.native_open(x->w.endpoint[r], GROUP, ranks, BAD_RANKS, r, &x->set[r]), DDL_OK);
    }
    for (int r = 0; r < BAD_RANKS; r++) {
        x->jobs[r] = (job){.seq = 1, .kind = DDL_ALL_TO_ALL, .n = BAD_RANKS, .rank = r, .element = 4, .bytes = BAD_BYTES};
        place(&x->jobs[r], &x->b[r], 0);
        start(x->w.endpoint[r], x->set[r], &x->jobs[r]);
        x->status[r] = DDL_IN_PROGRESS;
    }
    for (int r = 0; r < BAD_RANKS; r++) {
        CHECK_EQ(shm_transport.native_test(x->w.endpoint[r], x->set[r], x->jobs[r].op, 2, &rank), DDL_IN_PROGRESS);
        REQUIRE(((const shm_op *)x->jobs[r].op)->step == shm_exchange_step);
        CHECK(((shm_set *)x->set[r])->own->pairs[(r + 1) % BAD_RANKS].got > 0);
    }
}

/* Those that have not ended look, in turn, rank 0 first. */
static void three_look(three *x, int times) {
    int32_t rank = -1;
    for (int i = 0; i < times; i++) {
        for (int r = 0; r < BAD_RANKS; r++) {
            if (x->status[r] == DDL_IN_PROGRESS) {
                x->status[r] = shm_transport.native_test(x->w.endpoint[r], x->set[r], x->jobs[r].op, 1, &rank);
            }
        }
    }
}

/* Nothing around a result was written to; and what has ended is right. The others are given up. */
static void three_end(three *x) {
    for (int r = 0; r < BAD_RANKS; r++) {
        uint8_t *out = x->jobs[r].out, *end = out + BAD_RANKS * x->jobs[r].bytes;
        for (int i = 1; i <= GUARD; i++) {
            CHECK(out[-i] == POISON && end[i - 1] == POISON);
        }
        if (x->status[r] == DDL_OK) {
            verify(&x->jobs[r]);
        } else if (x->status[r] != DDL_ERR_CANCELLED) {
            shm_transport.native_cancel(x->w.endpoint[r], x->set[r], x->jobs[r].op);
        }
    }
    for (int r = 0; r < BAD_RANKS; r++) {
        shm_transport.native_close(x->w.endpoint[r], x->set[r]);
        buffers_free(&x->b[r]);
    }
    native_world_free(&x->w);
}

/* Its buffers are its own again: what is written there reaches nobody, and nobody writes there. */
TEST(who_gives_up_in_the_middle_disturbs_nobody) {
    three x;
    three_begin(&x);
    shm_transport.native_cancel(x.w.endpoint[1], x.set[1], x.jobs[1].op);
    x.status[1] = DDL_ERR_CANCELLED;
    uint64_t bytes = BAD_RANKS * x.jobs[1].bytes;
    memset(x.jobs[1].in, POISON, bytes);
    memset(x.jobs[1].out, POISON, bytes);
    three_look(&x, 1000);
    CHECK_EQ(x.status[0], DDL_IN_PROGRESS); /* the core will tell them */
    CHECK_EQ(x.status[2], DDL_IN_PROGRESS);
    for (uint64_t i = 0; i < bytes; i++) {
        REQUIRE(x.jobs[1].in[i] == POISON && x.jobs[1].out[i] == POISON);
    }
    for (int r = 0; r < BAD_RANKS; r += 2) { /* what they have got is what was given */
        const uint32_t *out = (const uint32_t *)(const void *)x.jobs[r].out;
        uint64_t word = x.jobs[r].bytes / 4, got = ((shm_set *)x.set[r])->rooms[1].got / 4;
        CHECK(got > 0 && got < word);
        for (uint64_t i = 0; i < got; i++) {
            REQUIRE(out[word + i] == expected(&x.jobs[r], word + i));
        }
    }
    three_end(&x);
}

/* word(set of rank 1) is written over, and rank 0 is the first that looks again. */
static void nonsense(_Atomic uint64_t *(*word)(shm_set *set), uint64_t value, ddl_status should) {
    three x;
    three_begin(&x);
    atomic_store(word(x.set[1]), value);
    three_look(&x, 1000);
    for (int r = 0; r < (should == DDL_OK ? BAD_RANKS : 1); r++) {
        CHECK_EQ(x.status[r], should);
    }
    three_end(&x);
}

static _Atomic uint64_t *sent_to_0(shm_set *set) { return &set->own->pairs[0].sent; }
static _Atomic uint64_t *got_from_0(shm_set *set) { return &set->own->pairs[0].got; }
static _Atomic uint64_t *what_0_says(shm_set *set) { return &((shm_face *)(uintptr_t)set->pieces[0])->pairs[1].sent; }
static _Atomic uint64_t *what_0_has_got(shm_set *set) { return &((shm_face *)(uintptr_t)set->pieces[0])->pairs[2].got; }

TEST(counters_that_make_no_sense_are_not_believed) {
    static const uint64_t values[] = {BAD_BYTES + 1, UINT64_MAX, (uint64_t)1 << 63};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        nonsense(sent_to_0, values[i], DDL_ERR_CORRUPT);
        nonsense(got_from_0, values[i], DDL_ERR_CORRUPT);
    }
}

/* A rank's own words are for others to read: it goes on by what it knows, and says it again. */
TEST(what_is_written_over_a_rank_s_own_words_does_not_lead_it_astray) {
    nonsense(what_0_says, 0, DDL_OK);
    nonsense(what_0_has_got, 0, DDL_OK);
}

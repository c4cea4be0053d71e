/* plugins/shm/distance.h on a clock of the test's own: which loads make a core a distant one, and when one is timed at all;
 * and what is written past the caches: messages of all sizes, and what ranks of a set give, by how far the others are.
 * tests/run: variants=gcc,asan,tsan quick=yes */
#define _GNU_SOURCE 1
#include "../plugins/shm/copy.h"

static uint64_t streamed; /* bytes */
#define shm_copy_past(to, from, bytes) (streamed += (bytes), shm_copy_past(to, from, bytes))

#include "shm_host.h"

#if !SHM_STREAMS
TEST(nothing_is_measured_here) { SKIP("this processor has no streaming stores that copy.h knows"); }
#else

/* ---- a clock that says how long a load takes ---- */

enum { CLOCK_NS = 25 };

static struct {
    uint64_t now, load_ns;
    int reads;
} script;

static uint64_t scripted_now_ns(const ddl_host *host) {
    (void)host;
    script.now += script.reads++ % 3 == 1 ? CLOCK_NS + script.load_ns : CLOCK_NS; /* before, after, and the clock alone */
    return script.now;
}

static endpoint e[RANKS];

static shm *of_rank(int rank) { return e[rank].self; }

static void begin(const char *setting) {
    world_open_as(e, 2, setting, NULL);
    memset(&script, 0, sizeof script);
    e[0].host.now_ns = scripted_now_ns;
}

static void end(void) {
    e[0].host.now_ns = mini_now_ns;
    world_close(e, 2);
}

/* Rank 1 says something large, and rank 0 finds it; a load of its word takes so long. Returns how many were timed. */
static int comes(uint64_t load_ns) {
    int before = script.reads;
    script.load_ns = load_ns;
    shm_sound(of_rank(1));
    shm_listen(of_rank(0), 1, SHM_DISTANT_LEAST, 1);
    CHECK_EQ((script.reads - before) % 3, 0);
    return (script.reads - before) / 3;
}

static bool is_distant(void) { return of_rank(0)->distances[1].distant; }

/* The next one that is timed. */
static void is_timed(uint64_t load_ns) {
    int tries = 0;
    while (comes(load_ns) == 0 && tries < (int)SHM_LISTEN_EACH) {
        tries++;
    }
    CHECK(tries < (int)SHM_LISTEN_EACH);
}

TEST(a_core_is_as_it_was_until_two_loads_say_otherwise) {
    begin(NULL);
    CHECK(!is_distant());
    CHECK_EQ(comes(160), 1);
    CHECK(!is_distant());
    CHECK_EQ(comes(160), 1); /* at once, as one of the two was wrong */
    CHECK(is_distant());
    is_timed(50);
    CHECK(is_distant()); /* it may have been fetched ahead */
    CHECK_EQ(comes(160), 1);
    CHECK_EQ(comes(160), 0); /* it was right, and is left in peace */
    is_timed(50);
    CHECK(is_distant());
    CHECK_EQ(comes(50), 1);
    CHECK(!is_distant());
    end();
}

TEST(who_was_interrupted_once_stays_near) {
    begin(NULL);
    is_timed(50);
    is_timed(40000);
    CHECK(!is_distant());
    is_timed(50);
    is_timed(SHM_DISTANT_NS);
    is_timed(SHM_DISTANT_NS - 1);
    is_timed(SHM_DISTANT_NS);
    CHECK(!is_distant());
    is_timed(SHM_DISTANT_NS);
    CHECK(is_distant());
    end();
}

TEST(one_of_so_many_is_timed) {
    begin(NULL);
    for (int round = 0; round < 3; round++) {
        CHECK_EQ(comes(50), 1);
        for (unsigned i = 1; i < SHM_LISTEN_EACH; i++) {
            CHECK_EQ(comes(50), 0);
        }
    }
    end();
}

/* Each of several others has its turn. */
TEST(occasions_count_for_all_that_are_asked_in_turn) {
    begin(NULL);
    is_timed(50);
    int timed = 0;
    for (unsigned i = 0; i < 4 * SHM_LISTEN_EACH; i++) {
        int before = script.reads;
        script.load_ns = 50;
        shm_sound(of_rank(1));
        shm_listen(of_rank(0), 1, SHM_DISTANT_LEAST, 4);
        timed += (script.reads - before) / 3;
    }
    CHECK_EQ(timed, 16);
    end();
}

TEST(a_word_that_is_as_it_was_tells_nothing) {
    begin(NULL);
    is_timed(160);
    script.load_ns = 160;
    shm_listen(of_rank(0), 1, SHM_DISTANT_LEAST, 1); /* nobody has written it since */
    CHECK(!is_distant());
    is_timed(160);
    CHECK(is_distant());
    end();
}

TEST(what_is_small_is_not_timed) {
    begin(NULL);
    shm_sound(of_rank(1));
    shm_listen(of_rank(0), 1, SHM_DISTANT_LEAST - 1, 1);
    CHECK_EQ(script.reads, 0);
    end();
}

TEST(where_it_begins_is_a_setting) {
    begin("SHM_DISTANT_NS=1K");
    is_timed(1023);
    is_timed(1023);
    CHECK(!is_distant());
    is_timed(1024);
    is_timed(1024);
    CHECK(is_distant());
    end();
    begin("SHM_DISTANT_NS=0"); /* all are */
    is_timed(0);
    CHECK(is_distant());
    end();
}

/* ---- past the caches ---- */

static void all_are(int n, bool distant) {
    for (int i = 0; i < n * n; i++) {
        of_rank(i / n)->distances[i % n] = (shm_distance){.distant = distant, .wait = UINT32_MAX};
    }
}

/* Both say all sizes to each other, in turn; each byte is checked as it arrives. */
static void exchange(const char *first, const char *second, bool distant) {
    static const uint64_t sizes[] = {1,      4095,   4096,   4097,   8000,    8192,          8193, 12289, 65536, 65537,
                                     131072, 131073, 262144, 300001, 1 << 20, (1 << 20) + 1, 0};
    world_open_as(e, 2, first, second);
    all_are(2, distant);
    for (uint64_t k = 0; k < 2 * sizeof sizes / sizeof sizes[0]; k++) {
        uint64_t bytes = sizes[k / 2], least = SHM_DISTANT_LEAST;
        int from = (int)(k % 2);
        letter l;
        streamed = 0;
        CHECK(post(&e[from], 1 - from, &l, bytes) >= 0);
        DRIVE(e, 2, e[1 - from].arrived[from] == k / 2 + 1) {}
        DRIVE(e, 2, l.returned == l.borrowed) {}
        letter_free(&l);
        if (!distant || bytes < least) {
            CHECK_EQ(streamed, 0);
        } else if (bytes <= SHM_EAGER_BYTES) {
            CHECK_EQ(streamed, bytes);
        } else {
            CHECK(streamed >= least && streamed <= bytes); /* the shorter last piece is not */
        }
    }
    world_close(e, 2);
}

TEST(messages_past_the_caches) { exchange(NULL, NULL, true); }
TEST(streams_past_the_caches) { exchange("SHM_CMA=0", NULL, true); }
TEST(messages_to_near_cores) { exchange(NULL, NULL, false); }
TEST(streams_to_near_cores) { exchange("SHM_CMA=0", NULL, false); }

TEST(all_are_distant_from_0_ns_on) {
    world_open_as(e, 2, "SHM_DISTANT_NS=0", NULL);
    CHECK(is_distant());
    world_close(e, 2);
}

/* One all_gather of `bytes` from each of n ranks. Returns the bytes that all wrote past the caches. */
static uint64_t gathered(int n, void *const *sets, uint64_t sequence, uint64_t bytes) {
    static uint8_t in[RANKS][1 << 17], out[RANKS][RANKS << 17];
    void *ops[RANKS];
    streamed = 0;
    for (int r = 0; r < n; r++) {
        memset(in[r], r + 1, bytes);
        memset(out[r], 0xee, bytes * (uint64_t)n);
        ddl_native_call call = {.size = sizeof call, .kind = DDL_ALL_GATHER, .element_bytes = 1, .sequence = sequence,
                                .signature = bytes, .in = in[r], .out = out[r], .bytes = bytes};
        CHECK_EQ(e[r].transport->native_start(e[r].self, sets[r], &call, &ops[r]), DDL_OK);
    }
    for (int open = n, turn = 0; open > 0; turn++) {
        if (turn > 10000) {
            test__fail(__FILE__, __LINE__, "an all_gather of %llu bytes does not end", (unsigned long long)bytes);
            return 0;
        }
        for (int r = 0; r < n; r++) {
            int32_t rank;
            if (ops[r] != NULL && e[r].transport->native_test(e[r].self, sets[r], ops[r], 4, &rank) == DDL_OK) {
                ops[r] = NULL;
                open--;
            }
        }
    }
    for (int i = 0; i < n * n; i++) {
        CHECK(out[i / n][(uint64_t)(i % n) * bytes] == i % n + 1 && out[i / n][(uint64_t)(i % n + 1) * bytes - 1] == i % n + 1);
    }
    return streamed;
}

/* Of n - 1 others one or two are distant from rank 0, the rest near to each other; 4 KiB goes in a slot, 64 KiB in rounds. */
static void of_a_set(int n, int distant, bool crowded, bool expected) {
    static const int32_t ranks[RANKS] = {0, 1, 2, 3, 4, 5, 6, 7};
    void *sets[RANKS];
    world_open(e, n);
    all_are(n, false);
    for (int r = 0; r < n; r++) {
        of_rank(r)->crowded = crowded;
        of_rank(0)->distances[r].distant = r >= 1 && r <= distant;
        CHECK_EQ(e[r].transport->native_open(e[r].self, 77, ranks, n, r, &sets[r]), DDL_OK);
    }
    CHECK_EQ(gathered(n, sets, 1, 65536), expected ? 65536 : 0);
    CHECK_EQ(gathered(n, sets, 2, 4096), expected ? 4096 : 0);
    CHECK_EQ(gathered(n, sets, 3, 4095), 0);
    of_rank(0)->distances[1].distant = false; /* and so on from the operation after the one that sees it */
    of_rank(0)->distances[2].distant = false;
    gathered(n, sets, 4, 4096);
    CHECK_EQ(gathered(n, sets, 5, 4096), 0);
    for (int r = 0; r < n; r++) {
        e[r].transport->native_close(e[r].self, sets[r]);
    }
    world_close(e, n);
}

TEST(a_set_of_two) {
    of_a_set(2, 0, false, false);
    of_a_set(2, 1, false, true);
}

TEST(a_set_of_which_half_are_distant) {
    of_a_set(5, 1, false, false);
    of_a_set(5, 2, false, true);
}

TEST(a_set_that_shares_cores_of_which_a_quarter_are) {
    of_a_set(4, 1, true, true);
    of_a_set(6, 1, true, false);
    of_a_set(6, 2, true, true);
}

#endif

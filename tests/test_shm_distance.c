/* plugins/shm/distance.h on a clock of the test's own: which loads make a core a distant one, and when one is timed at all;
 * and messages of all sizes that are written past the caches.
 * tests/run: variants=gcc,asan,tsan */
#define _GNU_SOURCE 1
#include "shm_host.h"

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

static endpoint e[2];

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
    shm_listen(of_rank(0), 1, SHM_DISTANT_LEAST);
    CHECK_EQ((script.reads - before) % 3, 0);
    return (script.reads - before) / 3;
}

static bool is_distant(void) { return of_rank(0)->distances[1].distant; }

/* The next one that is timed. */
static void is_timed(uint64_t load_ns) {
    for (int tries = 0; comes(load_ns) == 0; tries++) {
        CHECK(tries < (int)SHM_LISTEN_EACH);
    }
}

TEST(a_core_is_near_until_two_loads_were_long) {
    begin(NULL);
    CHECK(!is_distant());
    CHECK_EQ(comes(160), 1);
    CHECK(!is_distant());
    CHECK_EQ(comes(160), 1); /* at once, as one of the two was wrong */
    CHECK(is_distant());
    is_timed(50);
    CHECK(!is_distant()); /* at once: nothing makes a load shorter */
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

TEST(a_word_that_is_as_it_was_tells_nothing) {
    begin(NULL);
    is_timed(160);
    script.load_ns = 160;
    shm_listen(of_rank(0), 1, SHM_DISTANT_LEAST); /* nobody has written it since */
    CHECK(!is_distant());
    is_timed(160);
    CHECK(is_distant());
    end();
}

TEST(what_is_small_is_not_timed) {
    begin(NULL);
    shm_sound(of_rank(1));
    shm_listen(of_rank(0), 1, SHM_DISTANT_LEAST - 1);
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

/* Both say all sizes to each other, in turn, as if on distant cores; each byte is checked as it arrives. */
static void exchange(const char *first, const char *second) {
    static const uint64_t sizes[] = {1,     4095,  4096,  4097,  8000,  8192,  8193,  12289,      65536, 65537,
                                     131072, 131073, 262144, 300001, 1 << 20, (1 << 20) + 1, 0};
    world_open_as(e, 2, first, second);
    for (uint64_t k = 0; k < 2 * sizeof sizes / sizeof sizes[0]; k++) {
        int from = (int)(k % 2);
        letter l;
        CHECK(post(&e[from], 1 - from, &l, sizes[k / 2]) >= 0);
        DRIVE(e, 2, e[1 - from].arrived[from] == k / 2 + 1) {}
        DRIVE(e, 2, l.returned == l.borrowed) {}
        letter_free(&l);
    }
    CHECK(of_rank(0)->distances[1].distant && of_rank(1)->distances[0].distant);
    world_close(e, 2);
}

TEST(messages_past_the_caches) { exchange("SHM_DISTANT_NS=0", NULL); }
TEST(streams_past_the_caches) { exchange("SHM_DISTANT_NS=0", "SHM_CMA=0"); }
TEST(streams_past_the_caches_through_small_rings) { exchange("SHM_DISTANT_NS=0", "SHM_RING_BYTES=16K"); }

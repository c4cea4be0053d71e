/* Ranks that wait on one core move apart: who goes where, how often, and what is left alone.
 * tests/run: variants=asan,tsan timeout=60 */
#define DDL_IMPLEMENTATION
#define _GNU_SOURCE
#include <sched.h>

static int measured_yield(void);
#define sched_yield measured_yield
#include "world.h"
#undef sched_yield

/* Yields of a thread that sets yield_us take so long; those of others are what they are. */
static _Thread_local int yield_us = -1, yield_count;

static int measured_yield(void) {
    yield_count++;
    for (double end = test_now_s() + yield_us * 1e-6; yield_us > 0 && test_now_s() < end;) {
    }
    return yield_us < 0 ? sched_yield() : 0;
}

#define NOW (1000 * DDL__NS_PER_S)

/* One character for each rank, the core it waits on: a letter when it is pinned there, '-' nowhere, '!' on core 0 but
 * said a second ago. `may`: cores that are allowed. */
typedef struct choice {
    const char *places, *may;
    int me, to;
} choice;

static const choice choices[] = {
    {"00", "01", 1, 1},       /* the highest goes */
    {"00", "01", 0, -1},      /* and nobody else */
    {"01", "01", 1, -1},      /* apart already */
    {"0-", "01", 0, -1},      /* the other sleeps */
    {"0!", "01", 0, -1},      /* or has not said for long */
    {"-0", "01", 0, -1},      /* who is nowhere stays */
    {"0a", "01", 0, 1},       /* the highest is pinned: the next goes */
    {"00", "0", 1, -1},       /* nowhere to go */
    {"02", "01", 0, -1},      /* cores of other cpusets do not count */
    {"2200", "01", 3, 1},     /* nor do their ranks */
    {"0000", "01", 3, 1},     /* 4 on 2 cores: 2 each */
    {"0001", "01", 2, 1},
    {"0001", "01", 3, -1},
    {"0011", "01", 1, -1},
    {"00011", "01", 2, -1},   /* one more than the other is no reason */
    {"0012", "0123", 1, 3},
    {"00001", "01", 3, 1},
    {"000", "012", 2, 1},     /* the nearest by number */
    {"222", "0123", 2, 1},
    {"2221", "0123", 2, 3},   /* and empty */
    {"001122", "0123", 1, 3}, /* fewer ranks first */
};

static void set_places(_Atomic uint64_t *places, const char *text) {
    for (int i = 0; text[i] != 0; i++) {
        bool pinned = text[i] >= 'a';
        int core = text[i] == '!' ? 0 : text[i] - (pinned ? 'a' : '0');
        uint64_t when = text[i] == '!' ? NOW - DDL__NS_PER_S : NOW;
        atomic_store(&places[i], text[i] == '-' ? 0 : ddl__place_make(core, pinned, when));
    }
}

TEST(who_goes_where) {
    for (size_t i = 0; i < sizeof choices / sizeof choices[0]; i++) {
        const choice *t = &choices[i];
        _Atomic uint64_t places[8];
        cpu_set_t allowed;
        CPU_ZERO(&allowed);
        for (const char *at = t->may; *at != 0; at++) {
            CPU_SET((size_t)(*at - '0'), &allowed);
        }
        set_places(places, t->places);
        for (int computes = 0; computes < 2; computes++) { /* who does counts as well: it waited there just now */
            int to = ddl__cores_choose(places, (int32_t)strlen(t->places), t->me, NOW, &allowed);
            if (to != t->to) {
                test__fail(__FILE__, __LINE__, "\"%s\" on cores \"%s\": rank %d goes to %d instead of %d", t->places, t->may,
                           t->me, to, t->to);
            }
            for (int r = 0; t->places[r] != 0; r++) {
                places[r] |= r != t->me && places[r] != 0 ? (uint64_t)DDL__PLACE_LEFT : 0;
            }
        }
    }
}

/* One digit for each rank: its host, how many cores it may use, and which set they are. */
typedef struct sharing {
    const char *hosts, *cores, *sets;
    int crowding;
} sharing;

static const sharing sharings[] = {
    {"00", "22", "11", 1},       /* all may go everywhere */
    {"000", "222", "111", 2},
    {"00000", "22222", "11111", 3},
    {"00", "11", "12", 1},       /* each is bound to a core of its own, */
    {"00", "11", "11", 2},       /* or both to the same */
    {"0000", "2222", "1122", 1}, /* two and two */
    {"0000", "2222", "1212", 1},
    {"0101", "1111", "1212", 2}, /* the sets of another host are others, whatever their number */
    {"0101", "1111", "1111", 2},
    {"0101", "1111", "1122", 1},
    {"01", "11", "11", 1},
    {"000", "118", "112", 2},    /* that one has many helps the others not */
    {"0000", "4442", "1111", 2}, /* what the poorest of those that share may use */
    {"0000", "2444", "1111", 2},
};

TEST(ranks_for_each_core) {
    for (size_t i = 0; i < sizeof sharings / sizeof sharings[0]; i++) {
        const sharing *t = &sharings[i];
        static ddl__blob table[8];
        ddl__link links[8] = {{0}};
        ddl_context c = {.links = links, .world_size = (int32_t)strlen(t->hosts)};
        int32_t crowding = -1;
        for (int32_t r = 0; r < c.world_size; r++) {
            links[r].host = t->hosts[r] - '0';
            table[r].cores = t->cores[r] - '0';
            table[r].core_set = (uint64_t)t->sets[r];
        }
        if (ddl__crowding(&c, table, &crowding) != DDL_OK || crowding != t->crowding) {
            test__fail(__FILE__, __LINE__, "hosts %s, cores %s of sets %s: %d ranks per core instead of %d", t->hosts,
                       t->cores, t->sets, crowding, t->crowding);
        }
    }
}

/* A rank shares cores with those alone that told the same set on the same host. */
TEST(who_shares_cores) {
    static ddl__blob table[5];
    static const char *const hosts[] = {"here", "here", "there", "here", "here"};
    static const uint64_t sets[] = {7, 8, 7, 7, 9};
    ddl__link links[5] = {{0}};
    ddl_context c = {.links = links, .world_size = 5, .cores = 1};
    for (int32_t r = 0; r < 5; r++) {
        snprintf(table[r].host_id, sizeof table[r].host_id, "%s", hosts[r]);
        table[r].core_set = sets[r];
        ddl__link_name(&c, r, &table[r], &table[0]);
    }
    CHECK_EQ(c.local_ranks, 4);
    CHECK_EQ(c.core_ranks, 2);
    CHECK(ddl__is_crowded(&c));
    c.cores = 2;
    CHECK(!ddl__is_crowded(&c));
}

/* The first two cores that this thread may use; false when there is one only. */
static bool two_cores(int out[2], cpu_set_t *out_allowed) {
    int found = 0;
    CHECK_EQ(sched_getaffinity(0, sizeof *out_allowed, out_allowed), 0);
    for (int i = 0; i < CPU_SETSIZE && found < 2; i++) {
        if (CPU_ISSET((size_t)i, out_allowed)) {
            out[found++] = i;
        }
    }
    return found == 2;
}

/* Binds the calling thread, and gives back what it was bound to. */
static void bind_to(int core, cpu_set_t *old) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET((size_t)core, &one);
    CHECK_EQ(sched_getaffinity(0, sizeof *old, old), 0);
    CHECK_EQ(sched_setaffinity(0, sizeof one, &one), 0);
}

static void yields(ddl_context *c, int n, uint64_t ns) {
    for (int i = 0; i < n; i++) {
        ddl__yielded(c, ns, false);
    }
}

/* After a long yield, one more; after three of them, sleeps without any, twice as many after each further one. Eight
 * short ones in a row end it. */
TEST(who_computes_is_not_yielded_to) {
    enum { LONG = 2 * DDL__LONG_YIELD_NS + 1, SHORT = 500 };
    ddl_context c = {.core_ranks = 4, .cores = 2, .natives = &(struct ddl__op){0}};
    yields(&c, 1000, SHORT);
    CHECK_EQ(ddl__poll_limit(&c, -1), DDL__POLLS_CROWDED);
    CHECK_EQ(ddl__spin_limit(&c, -1), DDL__SPINS_CROWDED);
    yields(&c, 1, LONG);
    CHECK_EQ(ddl__poll_limit(&c, -1), DDL__POLLS_YIELDED);
    CHECK_EQ(ddl__spin_limit(&c, -1), 1);
    yields(&c, 1, SHORT);
    CHECK_EQ(ddl__poll_limit(&c, -1), DDL__POLLS_CROWDED);
    yields(&c, 1, LONG);
    CHECK_EQ(c.sleeps_at_once, 0);
    for (int32_t sleeps = 8; sleeps <= 512; sleeps *= 2) {
        yields(&c, DDL__SHORT_YIELDS - 1, SHORT);
        yields(&c, 1, LONG);
        CHECK_EQ(c.sleeps_at_once, sleeps);
        CHECK_EQ(ddl__poll_limit(&c, -1), 1);
        c.sleeps_at_once = 0;
        CHECK_EQ(ddl__poll_limit(&c, -1), DDL__POLLS_YIELDED);
    }
    yields(&c, 3, LONG);
    CHECK_EQ(c.sleeps_at_once, 512);
    yields(&c, DDL__SHORT_YIELDS, SHORT);
    CHECK_EQ(ddl__poll_limit(&c, -1), DDL__POLLS_CROWDED);
    yields(&c, 2, LONG);
    CHECK_EQ(c.sleeps_at_once, 0);
}

/* But the rank that an operation misses, and that computes on this core, has to be yielded to, however long it takes. */
TEST(a_rank_that_is_missing_and_computes_here_is_yielded_to) {
    enum { LONG = 2 * DDL__LONG_YIELD_NS + 1 };
    _Atomic uint64_t places[3] = {0};
    cpu_set_t allowed;
    int core[2] = {0, 0};
    two_cores(core, &allowed);
    CPU_ZERO(&allowed);
    CPU_SET((size_t)core[0], &allowed);
    cpu_set_t before;
    CHECK_EQ(sched_getaffinity(0, sizeof before, &before), 0);
    CHECK_EQ(sched_setaffinity(0, sizeof allowed, &allowed), 0); /* so that "here" stays */
    ddl_context c = {.core_ranks = 4, .cores = 2, .spread = true, .places = places, .rank = 0, .place_core = -1};
    atomic_store(&places[1], ddl__place_make(core[0], false, 0));
    atomic_store(&places[2], ddl__place_make(core[0] + 1, false, 0) | DDL__PLACE_LEFT);
    CHECK(ddl__shares_core(&c, 1) && !ddl__computes_here(&c, 1)); /* it waits */
    CHECK(!ddl__computes_here(&c, 2));                            /* elsewhere */
    CHECK(!ddl__computes_here(&c, -1));
    yields(&c, 3, LONG);
    CHECK_EQ(c.sleeps_at_once, 8);
    CHECK_EQ(ddl__poll_limit(&c, 1), 1);
    atomic_store(&places[1], ddl__place_make(core[0], false, 0) | DDL__PLACE_LEFT);
    CHECK(ddl__computes_here(&c, 1));
    CHECK_EQ(ddl__poll_limit(&c, 1), 1); /* others who compute are known of: it may have been them */
    c.sleeps_at_once = 0;
    CHECK_EQ(ddl__poll_limit(&c, 1), DDL__POLLS_CROWDED);
    CHECK(ddl__yielded(&c, LONG, true));
    CHECK_EQ(c.sleeps_at_once, 0); /* excused */
    CHECK_EQ(c.long_yields, 3);
    CHECK(!ddl__yielded(&c, 500, true));
    CHECK(!c.yielded_long);
    CHECK_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}

/* A rank says that it waits when it yields, and that it does so no more when its wait is over, also if it slept in it. */
TEST(who_has_waited_says_that_it_computes) {
    _Atomic uint64_t places[1] = {0};
    ddl_context c = {.core_ranks = 2, .cores = 1, .spread = true, .places = places, .place_core = -1, .place_ns = UINT64_MAX / 2};
    ddl__place_wait(&c, UINT64_MAX / 2);
    c.cores = 2; /* a rank with a core of its own says nothing more */
    ddl__place_leave(&c);
    CHECK((places[0] & DDL__PLACE_LEFT) == 0);
    c.cores = 1;
    CHECK((places[0] & DDL__PLACE_CORE) != 0 && (places[0] & DDL__PLACE_LEFT) == 0);
    ddl__place_leave(&c);
    CHECK((places[0] & DDL__PLACE_LEFT) != 0);
    ddl__place_wait(&c, UINT64_MAX / 2);
    CHECK((places[0] & DDL__PLACE_LEFT) == 0);
    ddl__place_sleep(&c);
    CHECK(places[0] == 0);
    ddl__place_leave(&c);
    CHECK((places[0] & DDL__PLACE_LEFT) != 0 && (places[0] & DDL__PLACE_CORE) != 0);
    ddl__place_sleep(&c);
    CHECK(places[0] == 0);
}

/* An operation that misses rank 1 for ever. */
static ddl_status never_over(void *self, void *set, void *op, int32_t looks, int32_t *out_rank) {
    (void)self, (void)set, (void)op, (void)looks;
    *out_rank = 1;
    return DDL_IN_PROGRESS;
}

static const ddl_transport never = {.native_test = never_over};

typedef struct in_vain {
    int yield_us;
    bool computes;
    _Atomic int over;
    int ticks;
    int yields[2], judged[2]; /* of this rank, at the first two ticks: yields, and those that were long and not excused */
} in_vain;

static bool is_never_done(ddl_context *c, void *arg) {
    (void)c, (void)arg;
    return false;
}

static void note_tick(ddl_context *c, void *arg, uint64_t now) {
    in_vain *v = arg;
    (void)now;
    if (v->ticks < 2) {
        v->yields[v->ticks] = yield_count;
        v->judged[v->ticks] = c->long_yields;
    }
    v->ticks++;
}

/* Rank 0 waits in its core, first the short way, then until 20 ms are over. */
static void wait_both_ways(ddl_group *w, in_vain *v, int *out_short_yields) {
    ddl_context *c = ddl_group_context(w);
    uint64_t end_ns = 0;
    int32_t last = -1;
    ddl__native runner = {.table = &never}, real = w->native;
    ddl__op op = {.group = w, .runner = &runner, .native = &runner, .native_waits = -1, .is_native = true, .late = -1};
    ddl__wait wait = {.done = is_never_done, .tick = note_tick, .arg = v};
    w->native = runner;
    c->yielded_long = false;
    c->long_yields = c->sleeps_at_once = v->ticks = yield_count = 0;
    CHECK_EQ(ddl__fast_wait(w, &runner, &end_ns, &last), DDL_IN_PROGRESS);
    CHECK_EQ(last, 1);
    CHECK((c->places[0] & DDL__PLACE_LEFT) != 0);
    *out_short_yields = yield_count;
    c->yielded_long = false;
    c->long_yields = c->sleeps_at_once = yield_count = 0;
    c->natives = &op;
    wait.deadline = ddl__now_ns() + 20 * DDL__NS_PER_MS;
    CHECK(!ddl__wait_for(c, &wait));
    CHECK(v->ticks > 0);
    CHECK((c->places[0] & DDL__PLACE_LEFT) != 0);
    c->natives = NULL;
    w->native = real;
}

/* For an operation of all, which misses rank 1; that one computes on its core, or is seen on none. */
static void waits_in_vain(ddl_group *w, void *arg) {
    in_vain *v = arg;
    ddl_context *c = ddl_group_context(w);
    cpu_set_t before;
    int core = sched_getcpu(), short_yields = 0, tries = 0;
    if (ddl_rank(w) == 1) {
        while (v->over == 0) {
            usleep(1000);
        }
        return;
    }
    bool spread = c->spread;
    bind_to(core, &before);
    ddl__lock(c);
    c->core_ranks = 4;
    c->cores = 2;
    c->spread = true;
    atomic_store(&c->places[1], v->computes ? ddl__place_make(core, false, 0) | DDL__PLACE_LEFT : 0);
    yield_us = v->yield_us;
    if (v->yield_us > 0) {
        wait_both_ways(w, v, &short_yields);
        CHECK_EQ(short_yields, 1); /* a long one ends it, whoever has the core */
        CHECK_EQ(v->yields[0], 1); /* then deadlines are looked at */
        CHECK_EQ(v->judged[0], !v->computes);
        if (v->computes) { /* the next is not excused */
            CHECK_EQ(v->yields[1], 2);
            CHECK_EQ(v->judged[1], 1);
        }
    } else {
        do { /* until nothing interrupts it */
            wait_both_ways(w, v, &short_yields);
        } while ((short_yields < DDL__FAST_YIELDS || v->yields[0] != DDL__POLLS_CROWDED - 1) && ++tries < 50);
        CHECK_EQ(short_yields, DDL__FAST_YIELDS);
        CHECK_EQ(v->yields[0], DDL__POLLS_CROWDED - 1);
    }
    c->spread = spread;
    yield_us = -1;
    ddl__unlock(c);
    CHECK_EQ(sched_setaffinity(0, sizeof before, &before), 0);
    v->over = 1;
}

TEST(after_a_long_yield_deadlines_are_looked_at) {
    for (int i = 0; i < 4; i++) {
        in_vain v = {.yield_us = i % 2 == 0 ? 0 : 3000, .computes = i >= 2};
        world_threads(2, waits_in_vain, &v);
    }
}

/* Ranks that take turns on a core are nobody who computes: a yield is as long as all their turns. */
TEST(a_long_yield_is_longer_the_more_ranks_take_turns) {
    static const struct {
        int ranks, cores, turns;
        bool thread;
    } of[] = {{1, 1, 2, false}, {2, 2, 2, false}, {4, 2, 2, false}, {5, 2, 3, false}, {16, 2, 8, false}, {16, 2, 16, true}};
    for (size_t i = 0; i < sizeof of / sizeof of[0]; i++) {
        ddl_context c = {.core_ranks = of[i].ranks, .cores = of[i].cores, .has_thread = of[i].thread};
        yields(&c, 1, (uint64_t)of[i].turns * DDL__LONG_YIELD_NS);
        CHECK(!c.yielded_long);
        yields(&c, 1, (uint64_t)of[i].turns * DDL__LONG_YIELD_NS + 1);
        CHECK(c.yielded_long);
    }
}

TEST(a_set_of_cores_has_a_number) {
    cpu_set_t allowed, one;
    int core[2];
    if (!two_cores(core, &allowed)) {
        SKIP("needs two cores");
    }
    uint64_t sets[4];
    for (int i = 0; i < 4; i++) {
        CPU_ZERO(&one);
        CPU_SET((size_t)core[i & 1], &one);
        CHECK_EQ(sched_setaffinity(0, sizeof one, &one), 0);
        CHECK_EQ(ddl__cores(&sets[i]), 1);
    }
    CHECK_EQ(sched_setaffinity(0, sizeof allowed, &allowed), 0);
    CHECK(sets[0] == sets[2] && sets[1] == sets[3]);
    CHECK(sets[0] != sets[1] || sets[0] == 0); /* a quota is for all cores together */
}

static bool mask_is(const cpu_set_t *expected) {
    cpu_set_t now;
    return sched_getaffinity(0, sizeof now, &now) == 0 && CPU_EQUAL(&now, expected);
}

/* Rank 1 of two, both of which are on `core` at `now`, looks. Returns whether it moved. */
static bool look_crowded(ddl_context *c, int core, uint64_t now) {
    uint64_t before = c->moved_ns;
    atomic_store(&c->places[0], ddl__place_make(core, false, now));
    ddl__place_look(c, core, now);
    return c->moved_ns != before;
}

TEST(moves_are_rare_and_leave_the_mask) {
    int core[2];
    cpu_set_t allowed;
    if (!two_cores(core, &allowed)) {
        SKIP("needs two cores");
    }
    static _Atomic uint64_t places[2];
    static ddl_context c = {.world_size = 2, .rank = 1, .local_ranks = 2, .places = places, .settings.spread = true};
    uint64_t ms = DDL__NS_PER_MS;
    ddl__places_open(&c);
    CHECK(c.spread);
    CHECK(!look_crowded(&c, core[0], NOW)); /* not at the first look */
    atomic_store(&places[0], 0);
    ddl__place_look(&c, core[0], NOW + ms);
    CHECK(!look_crowded(&c, core[0], NOW + 2 * ms)); /* nor at the first after one that found room */
    CHECK(look_crowded(&c, core[0], NOW + 3 * ms));
    CHECK_EQ(c.place_core, core[1]);
    CHECK(places[1] == ddl__place_make(core[1], false, NOW + 3 * ms));
    CHECK(mask_is(&allowed));
    uint64_t last = NOW + 3 * ms;
    for (uint64_t pause = 10; pause <= 1280; pause *= 2) { /* the kernel takes it back each time */
        uint64_t least = DDL__MIN(pause, 640u) * ms;
        CHECK(!look_crowded(&c, core[0], last + 1 * ms));
        CHECK(!look_crowded(&c, core[0], last + 2 * ms));
        CHECK(!look_crowded(&c, core[0], last + least - ms));
        CHECK(look_crowded(&c, core[0], last + least));
        last += least;
    }
    CHECK(mask_is(&allowed));
    ddl__place_sleep(&c);
    CHECK(places[1] == 0);
}

static void sum_once(ddl_group *w) {
    float x[4] = {1, 2, 3, 4};
    OK(ddl_all_reduce(w, DDL_VIEW(x, 4), DDL_VIEW(x, 4), DDL_SUM));
    CHECK_EQ((int)x[3], 4 * ddl_size(w));
}

/* Both were bound to one core and set free: within the deadline one is seen on another, or has moved. */
static void stacked(ddl_group *w, void *arg) {
    int core[2];
    cpu_set_t allowed;
    ddl_context *c = ddl_group_context(w);
    int32_t apart = 0;
    (void)arg;
    two_cores(core, &allowed);
    REQUIRE(c->spread);
    bind_to(core[0], &allowed);
    CHECK_EQ(sched_setaffinity(0, sizeof allowed, &allowed), 0);
    for (double end = test_now_s() + 10 * test_slow(); apart == 0 && test_now_s() < end;) {
        sum_once(w);
        int32_t mine = c->moved_ns != 0 || sched_getcpu() != core[0];
        ddl_tensor view = ddl_tensor_1d(&apart, DDL_I32, 1), from = ddl_tensor_1d(&mine, DDL_I32, 1);
        OK(ddl_all_reduce(w, from, view, DDL_MAX));
    }
    CHECK_EQ(apart, 1);
    CHECK(mask_is(&allowed));
}

/* Bound by the program: they say so, and stay. */
static void pinned(ddl_group *w, void *arg) {
    int core[2];
    cpu_set_t allowed, now;
    ddl_context *c = ddl_group_context(w);
    (void)arg;
    two_cores(core, &allowed);
    bind_to(core[0], &allowed);
    uint64_t before = c->moved_ns;
    c->place_ns = 0; /* looks at its next yield */
    bool said = false;
    for (double end = test_now_s() + 10 * test_slow(); !said && test_now_s() < end;) {
        ddl__lock(c);
        ddl__yield(c, false, -1);
        said = (c->places[c->rank] & DDL__PLACE_PINNED) != 0;
        ddl__unlock(c);
    }
    CHECK(said);
    for (int i = 0; i < 300; i++) {
        sum_once(w);
    }
    CHECK(c->moved_ns == before);
    CHECK_EQ(sched_getaffinity(0, sizeof now, &now), 0);
    CHECK_EQ(CPU_COUNT(&now), 1);
    CHECK_EQ(sched_setaffinity(0, sizeof allowed, &allowed), 0);
}

static void turned_off(ddl_group *w, void *arg) {
    (void)arg;
    ddl_context *c = ddl_group_context(w);
    CHECK(!c->spread);
    sum_once(w);
    CHECK(c->places == NULL || c->places[c->rank] == 0);
}

TEST(threads_on_one_core_move_apart) {
    int core[2];
    cpu_set_t allowed;
    if (!two_cores(core, &allowed)) {
        SKIP("needs two cores");
    }
    world_threads(2, stacked, NULL);
}

TEST(processes_on_one_core_move_apart) {
    int core[2];
    cpu_set_t allowed;
    if (!two_cores(core, &allowed)) {
        SKIP("needs two cores");
    }
    world_fork(2, stacked, NULL, 30);
}

TEST(pinned_threads_stay) {
    int core[2];
    cpu_set_t allowed;
    if (!two_cores(core, &allowed)) {
        SKIP("needs two cores");
    }
    world_threads(2, pinned, NULL);
}

TEST(the_setting_turns_it_off) {
    setenv("DDL_SPREAD", "0", 1);
    world_threads(2, turned_off, NULL);
    setenv("DDL_SPREAD", "2", 1);
    ddl_context *c = NULL;
    char why[512] = "";
    ddl_config config = {.world_size = 1, .error_text = why, .error_bytes = sizeof why};
    CHECK_EQ(ddl_init(&config, &c), DDL_ERR_CONFIG);
    CHECK_STR(why, "DDL_SPREAD is \"2\"; 0 or 1 is possible");
    unsetenv("DDL_SPREAD");
}

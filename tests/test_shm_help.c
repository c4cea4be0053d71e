/* A sender of shared memory that helps its receiver (plugins/shm/help.h), deterministically: what the sender does happens
 * in the middle of the receiver's reads. All content is compared with a pattern by the host.
 * tests/run: variants=gcc,asan,tsan timeout=60 quick=yes */
#define _GNU_SOURCE 1
#include "shm_host.h"

enum { BYTES = (1 << 20) + 12345 };
enum { PIECES = (BYTES + SHM_HELP_PIECE - 1) / SHM_HELP_PIECE };

static struct {
    endpoint *sender;
    int reads, help_turns; /* of the receiver by the kernel; progress of the sender in each */
    int recall_at;         /* in this read the sender takes the message back; 0: never */
    letter *letter;
    endpoint *other; /* makes progress as well */
    int yields, stages;   /* of the receiver; pieces that the sender stages in each */
    uint64_t step_ns;     /* how long each takes, by */
    uint64_t clock_ns;    /* the receiver's clock */
} play;

static shm_fetch *record_of(letter *l) { return (shm_fetch *)(uintptr_t)l->message.priv[SHM_NOTE_RECORD]; }

static void in_the_middle(void) {
    play.reads++;
    for (int i = 0; i < play.help_turns; i++) {
        CHECK(play.sender->transport->progress(play.sender->self, -1) >= 0);
    }
    if (play.other != NULL) {
        endpoint *other = play.other;
        play.other = NULL; /* it reads too */
        faults.at_read = in_the_middle;
        CHECK(other->transport->progress(other->self, -1) >= 0);
    }
    if (play.reads == play.recall_at) {
        play.sender->transport->recall(play.sender->self, 1, &play.letter->message);
        play.letter->borrowed = 0;
        memset(play.letter->payload, 0xdd, BYTES);
    }
    faults.at_read = in_the_middle;
}

static void begin(endpoint *e, int n, int help_turns) {
    world_open(e, n);
    for (int i = 0; i < n; i++) {
        ((shm *)e[i].self)->crowded = false; /* whatever this machine has */
    }
    memset(&play, 0, sizeof play);
    play.sender = &e[0];
    play.help_turns = help_turns;
    faults.at_read = in_the_middle;
}

static void end(endpoint *e, int n) {
    faults.at_read = NULL;
    for (int i = 0; i < n; i++) {
        CHECK_EQ(e[i].bad, 0);
    }
    world_close(e, n);
}

static void fetch(int help_turns) {
    static endpoint e[2];
    letter l;
    begin(e, 2, help_turns);
    CHECK_EQ(post(&e[0], 1, &l, BYTES), DDL_IN_PROGRESS);
    DRIVE(e, 2, e[1].arrived[0] == 1 && l.returned) {}
    letter_free(&l);
    end(e, 2);
}

TEST(a_sender_that_does_nothing_is_read_alone) {
    fetch(0);
    CHECK(play.reads < PIECES && play.reads >= PIECES / (int)SHM_HELP_ALONE); /* larger pieces after some */
}

TEST(a_sender_that_looks_in_saves_reads) {
    fetch(1); /* every second piece is staged: one while the other is read */
    CHECK(play.reads > PIECES / 3 && play.reads <= PIECES / 2 + 1);
    fetch(1000); /* a window full for each read */
    CHECK(play.reads >= PIECES / (int)(SHM_HELP_PIECES + 1) && play.reads <= PIECES / (int)SHM_HELP_PIECES + 1);
}

/* ---- asleep ---- */

static int rings, bell;

/* It does something only when it is woken, and then sleeps again. */
static void while_it_sleeps(void) {
    struct pollfd woken = {.fd = bell, .events = POLLIN};
    play.reads++;
    if (poll(&woken, 1, 0) > 0) {
        rings++;
        for (int i = 0; i < play.help_turns; i++) {
            CHECK(play.sender->transport->progress(play.sender->self, -1) >= 0);
        }
        CHECK_EQ(play.sender->transport->arm(play.sender->self, &bell), DDL_OK);
    }
    faults.at_read = while_it_sleeps;
}

static void fetch_from_a_sleeper(uint64_t bytes, bool has_memory) {
    static endpoint e[2];
    letter l;
    begin(e, 2, 1000);
    rings = 0;
    CHECK_EQ(post(&e[0], 1, &l, bytes), DDL_IN_PROGRESS);
    CHECK_EQ(e[0].transport->arm(e[0].self, &bell), DDL_OK);
    faults.at_read = while_it_sleeps;
    faults.allocate = has_memory ? 0 : 1; /* for a window */
    while (e[1].arrived[0] == 0) {
        CHECK(e[1].transport->progress(e[1].self, -1) >= 0);
    }
    DRIVE(e, 2, l.returned) {}
    letter_free(&l);
    end(e, 2);
}

TEST(a_sender_that_sleeps_is_woken) {
    fetch_from_a_sleeper(BYTES, true);
    CHECK(rings > 1 && rings <= PIECES / (int)SHM_HELP_PIECES + 1);
    CHECK(play.reads < PIECES / 3);
    fetch_from_a_sleeper(SHM_HELP_PIECES * SHM_HELP_PIECE, true); /* to wake it takes longer than that */
    CHECK(play.reads > 0);
    CHECK_EQ(rings, 0);
}

TEST(a_sender_that_cannot_help_is_left_to_sleep) {
    fetch_from_a_sleeper(BYTES, false);
    CHECK(play.reads >= PIECES / (int)SHM_HELP_ALONE);
    CHECK_EQ(rings, SHM_HELP_RINGS);
}

/* ---- on one core ---- */

static uint64_t told_ns(const ddl_host *host) {
    (void)host;
    return play.clock_ns;
}

static void while_given_away(void) {
    play.yields++;
    play.clock_ns += play.step_ns;
    for (int i = 0; i < play.stages; i++) {
        CHECK(play.sender->transport->progress(play.sender->self, -1) >= 0);
    }
}

/* The receiver gets n messages of a sender that ran on sender_core and does something only while the core is free. */
static void fetch_on(int sender_core, int stages, uint64_t step_ns, int n) {
    static endpoint e[2];
    begin(e, 2, 0);
    play.stages = stages;
    play.step_ns = step_ns;
    play.clock_ns = mini_now_ns(&e[1].host);
    e[1].host.now_ns = told_ns;
    faults.at_yield = while_given_away;
    for (int i = 0; i < n; i++) {
        letter l;
        faults.on_core = sender_core + 1;
        CHECK_EQ(post(&e[0], 1, &l, BYTES), DDL_IN_PROGRESS);
        faults.on_core = 3 + 1;
        DRIVE(e, 2, e[1].arrived[0] == (uint64_t)i + 1 && l.returned) {}
        letter_free(&l);
    }
    end(e, 2);
}

TEST(a_receiver_gives_its_core_to_a_sender_that_shares_it) {
    fetch_on(3, 1000, 0, 1);
    CHECK_EQ(play.reads, 1); /* the first piece; then the sender stages a window in each turn */
    CHECK_EQ(play.yields, (PIECES - 1 + SHM_HELP_PIECES - 1) / SHM_HELP_PIECES);
    fetch_on(2, 1000, 0, 1);
    CHECK_EQ(play.yields, 0);
}

TEST(a_core_is_not_given_away_in_vain) {
    fetch_on(3, 0, 0, 1);
    CHECK_EQ(play.yields, SHM_HELP_YIELDS);
    CHECK(play.reads < PIECES && play.reads >= PIECES / (int)SHM_HELP_ALONE);
    fetch_on(3, 1000, 2 * SHM_YIELD_LONG_NS + 1, 2); /* somebody who computes has the core meanwhile */
    CHECK_EQ(play.yields, 1);
    fetch_on(3, 0, SHM_YIELD_PAUSE_NS + 1, 1); /* the pause begins when the core is back */
    CHECK_EQ(play.yields, 1);
}

TEST(windows_serve_one_message_after_the_other) {
    static endpoint e[2];
    letter l[9];
    begin(e, 2, 3);
    for (int i = 0; i < 9; i++) {
        CHECK_EQ(post(&e[0], 1, &l[i], (uint64_t)BYTES - (uint64_t)i * 50001), DDL_IN_PROGRESS);
    }
    DRIVE(e, 2, e[1].arrived[0] == 9 && l[8].returned) {}
    CHECK(play.reads < 9 * PIECES / 2);
    for (int i = 0; i < 9; i++) {
        letter_free(&l[i]);
    }
    end(e, 2);
}

/* Two receivers at once: the window is one's; the other reads alone. */
TEST(one_window_is_not_two_messages) {
    static endpoint e[3];
    letter l[2];
    begin(e, 3, 2);
    CHECK_EQ(post(&e[0], 1, &l[0], BYTES), DDL_IN_PROGRESS);
    CHECK_EQ(post(&e[0], 2, &l[1], BYTES), DDL_IN_PROGRESS);
    play.other = &e[2]; /* fetches its whole message while the first is in the middle */
    CHECK(e[1].transport->progress(e[1].self, -1) >= 0);
    DRIVE(e, 3, e[1].arrived[0] == 1 && e[2].arrived[0] == 1 && l[0].returned && l[1].returned) {}
    letter_free(&l[0]);
    letter_free(&l[1]);
    end(e, 3);
}

/* What was staged before is whole, what is read after is not: all is read again, from the copy that was lent. */
TEST(a_helped_message_is_taken_back_in_the_middle) {
    for (int at = 1; at < 4; at++) {
        static endpoint e[2];
        letter l;
        begin(e, 2, 2);
        play.letter = &l;
        play.recall_at = at;
        CHECK_EQ(post(&e[0], 1, &l, BYTES), DDL_IN_PROGRESS);
        DRIVE(e, 2, e[1].arrived[0] == 1) {}
        progress_all(e, 2);
        CHECK(((shm *)e[0].self)->messages->helper.whom == NULL);
        letter_free(&l);
        end(e, 2);
    }
}

/* ---- ahead ---- */

/* Where ranks share cores a sender stages a window before its receiver has begun, and does nothing more. */
static void fetch_ahead(uint64_t bytes, int n) {
    static endpoint e[2];
    letter l[2];
    begin(e, 2, 0);
    ((shm *)e[0].self)->crowded = true;
    for (int i = 0; i < n; i++) {
        CHECK_EQ(post(&e[0], 1, &l[i], bytes), DDL_IN_PROGRESS);
    }
    while (e[1].arrived[0] < (uint64_t)n) {
        CHECK(e[1].transport->progress(e[1].self, -1) >= 0);
    }
    DRIVE(e, 2, l[n - 1].returned) {}
    for (int i = 0; i < n; i++) {
        letter_free(&l[i]);
    }
    end(e, 2);
}

TEST(where_ranks_share_cores_a_window_is_staged_ahead) {
    fetch_ahead(SHM_HELP_PIECES * SHM_HELP_PIECE, 1);
    CHECK_EQ(play.reads, 0);
    fetch_ahead(SHM_PAIR_STREAM_BYTES + 1, 1);
    CHECK_EQ(play.reads, 0);
    fetch_ahead(SHM_HELP_PIECES * SHM_HELP_PIECE + 100, 1);
    CHECK_EQ(play.reads, 1);
    fetch_ahead(SHM_HELP_PIECES * SHM_HELP_PIECE, 2); /* the second finds the window taken */
    CHECK(play.reads > (int)SHM_HELP_ALONE);
}

static letter offered[3];

/* As a sender of a long message does: the next part is offered in the word that one before has been read. */
static void offers_the_next(const ddl_host *host, ddl_message *message, ddl_status status) {
    mini_sent(host, message, status);
    if (message == &offered[0].message) {
        CHECK_EQ(post(play.sender, 1, &offered[2], BYTES), DDL_IN_PROGRESS);
    }
}

static void take_one(endpoint *e, uint64_t n) {
    while (e[1].arrived[0] < n) { /* one record a look */
        CHECK(e[1].transport->progress(e[1].self, 0) >= 0);
    }
    CHECK_EQ(e[1].arrived[0], n);
}

/* The window is not for what was offered last, while something before it is not yet read. */
TEST(the_window_is_for_the_first_that_is_not_yet_read) {
    static endpoint e[2];
    begin(e, 2, 0);
    e[0].host.sent = offers_the_next;
    shm *t = e[0].self;
    t->crowded = true;
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(post(&e[0], 1, &offered[i], BYTES), DDL_IN_PROGRESS);
    }
    CHECK(t->messages->helper.whom == &offered[0].message);
    take_one(e, 1);
    for (int k = 0; k < 2 * (int)SHM_HELP_PIECES; k++) {
        CHECK(e[0].transport->progress(e[0].self, -1) >= 0);
        CHECK(offered[0].returned && t->messages->helper.whom == &offered[1].message);
        CHECK_EQ(record_of(&offered[2])->help.window, 0);
    }
    CHECK_EQ(t->messages->helper.next, SHM_HELP_PIECES); /* before the receiver has begun */
    take_one(e, 2);
    for (int k = 0; k < 2 * (int)SHM_HELP_PIECES; k++) {
        CHECK(e[0].transport->progress(e[0].self, -1) >= 0);
    }
    CHECK(t->messages->helper.whom == &offered[2].message);
    DRIVE(e, 2, offered[2].returned) {}
    for (int i = 0; i < 3; i++) {
        letter_free(&offered[i]);
    }
    end(e, 2);
}

/* What its receiver maps needs no window: the next is staged when it is offered. What has been read has the window until
 * the sender sees that. */
TEST(what_needs_no_window_leaves_it_to_the_next) {
    for (int has_read = 0; has_read < 2; has_read++) {
        static endpoint e[2];
        letter first, next;
        void *memory = NULL;
        begin(e, 2, 0);
        ((shm *)e[0].self)->crowded = true;
        if (!has_read) {
            CHECK_EQ(e[0].transport->memory_alloc(e[0].self, BYTES, &memory), DDL_OK);
        }
        CHECK_EQ(post_in(&e[0], 1, &first, BYTES, memory), DDL_IN_PROGRESS);
        if (has_read) {
            take_one(e, 1); /* which the sender has not seen */
        }
        CHECK_EQ(post(&e[0], 1, &next, BYTES), DDL_IN_PROGRESS);
        CHECK_EQ(first.returned, 0);
        CHECK_EQ(record_of(&next)->help.window != 0, !has_read);
        DRIVE(e, 2, next.returned) {}
        letter_free(&first);
        letter_free(&next);
        if (memory != NULL) {
            e[0].transport->memory_free(e[0].self, memory);
        }
        end(e, 2);
    }
}

/* The receiver has read nothing, or is in the middle of what is not staged. The window is the next message's then. */
TEST(what_was_staged_ahead_is_taken_back) {
    for (int at = 0; at < 3; at++) {
        static endpoint e[2];
        letter l, next;
        begin(e, 2, 0);
        ((shm *)e[0].self)->crowded = true;
        play.letter = &l;
        play.recall_at = at;
        CHECK_EQ(post(&e[0], 1, &l, BYTES), DDL_IN_PROGRESS);
        CHECK(record_of(&l)->help.window != 0);
        CHECK_EQ(((shm *)e[0].self)->messages->helper.next, SHM_HELP_PIECES);
        if (at == 0) {
            e[0].transport->recall(e[0].self, 1, &l.message);
            l.borrowed = 0;
            memset(l.payload, 0xdd, BYTES);
            CHECK_EQ(post(&e[0], 1, &next, BYTES - 1000), DDL_IN_PROGRESS);
            CHECK(record_of(&next)->help.window != 0);
        }
        DRIVE(e, 2, e[1].arrived[0] == (at == 0 ? 2 : 1)) {}
        progress_all(e, 2);
        CHECK(at == 0 ? play.reads > 0 : play.reads >= at);
        CHECK(((shm *)e[0].self)->messages->helper.whom == NULL);
        letter_free(&l);
        if (at == 0) {
            letter_free(&next);
        }
        end(e, 2);
    }
}

TEST(without_memory_for_a_window_nothing_is_staged_ahead) {
    static endpoint e[2];
    letter small, l;
    begin(e, 2, 0);
    ((shm *)e[0].self)->crowded = true;
    CHECK_EQ(post(&e[0], 1, &small, SHM_EAGER_BYTES + 1), DDL_OK); /* the ring is there now */
    faults.allocate = 1;
    CHECK_EQ(post(&e[0], 1, &l, BYTES), DDL_IN_PROGRESS);
    CHECK(((shm *)e[0].self)->messages->helper.refused);
    DRIVE(e, 2, e[1].arrived[0] == 2 && l.returned) {}
    CHECK(play.reads >= PIECES / (int)SHM_HELP_ALONE);
    letter_free(&small);
    letter_free(&l);
    end(e, 2);
}

/* A place where no window is, one that is another's, stamps of an old message: the receiver reads by itself. */
TEST(a_window_that_makes_no_sense_is_not_used) {
    for (int what = 0; what < 4; what++) {
        static endpoint e[2];
        letter first, l;
        begin(e, 2, what == 3 ? 1000 : 0);
        CHECK_EQ(post(&e[0], 1, &first, BYTES), DDL_IN_PROGRESS);
        DRIVE(e, 2, e[1].arrived[0] == 1 && first.returned) {}
        play.help_turns = 0;
        shm *t = e[0].self;
        CHECK_EQ(post(&e[0], 1, &l, BYTES), DDL_IN_PROGRESS);
        uint64_t places[] = {3, t->segment_bytes - 4095, UINT64_MAX, t->messages->helper.place + 1};
        record_of(&l)->help.window = places[what]; /* of what == 3: all its pieces are of the first message */
        record_of(&l)->help.stamp = t->messages->helper.stamp;
        DRIVE(e, 2, e[1].arrived[0] == 2 && l.returned) {}
        letter_free(&first);
        letter_free(&l);
        end(e, 2);
    }
}

/* A receiver out of its mind: whatever it says that it has, the sender reads no more than its message. */
TEST(words_that_make_no_sense_harm_nobody) {
    static const uint64_t words[][2] = {
        {1, UINT64_MAX}, {UINT64_MAX, 0}, {UINT64_MAX, UINT64_MAX}, {BYTES - 1, 7}, {5, 5}, {BYTES, 0}};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        static endpoint e[2];
        letter l;
        begin(e, 2, 0);
        CHECK_EQ(post(&e[0], 1, &l, BYTES), DDL_IN_PROGRESS);
        record_of(&l)->help.taking = words[i][0];
        record_of(&l)->help.taken = words[i][1];
        for (int k = 0; k < 2 * PIECES; k++) {
            CHECK(e[0].transport->progress(e[0].self, -1) >= 0);
        }
        e[0].transport->peer_dead(e[0].self, 1);
        CHECK_EQ(l.returned, 1);
        letter_free(&l);
        end(e, 2);
    }
}

TEST(without_memory_for_a_window_the_receiver_reads_alone) {
    static endpoint e[2];
    letter l[2];
    begin(e, 2, 1);
    CHECK_EQ(post(&e[0], 1, &l[0], BYTES), DDL_IN_PROGRESS);
    uint64_t before = ((shm *)e[0].self)->memory->holes[0].bytes;
    faults.allocate = 1;
    DRIVE(e, 2, e[1].arrived[0] == 1 && l[0].returned) {}
    CHECK(((shm *)e[0].self)->messages->helper.refused);
    CHECK_EQ(((shm *)e[0].self)->memory->holes[0].bytes, before); /* its place is free again */
    CHECK_EQ(post(&e[0], 1, &l[1], BYTES), DDL_IN_PROGRESS);
    DRIVE(e, 2, e[1].arrived[0] == 2 && l[1].returned) {}
    letter_free(&l[0]);
    letter_free(&l[1]);
    end(e, 2);
}

static _Alignas(4096) uint8_t from_page[BYTES], to_page[BYTES + 16];

static ddl_status land_in_page(const ddl_host *host, int32_t peer, const uint8_t *header, uint64_t *out_bytes,
                               void **out_to, void **out_token) {
    ddl_status status = mini_land(host, peer, header, out_bytes, out_to, out_token);
    *out_to = to_page + 16;
    return status;
}

static void landed_in_page(const ddl_host *host, int32_t peer, void *token, ddl_status status) {
    memcpy(of(host)->landing[peer], to_page + 16, BYTES);
    mini_landed(host, peer, token, status); /* compares it */
}

/* A payload at the start of a page lands 16 bytes into one, as it does with malloc: faults.stumbled counts. recall_at: see
 * play; error: what all reads of payloads give, 0: none. */
static void read_from_a_page(bool avoids, bool has_memory, int recall_at, int error) {
    static endpoint e[2];
    letter l;
    begin(e, 2, 0);
    shm_messages *m = ((shm *)e[1].self)->messages;
    m->stumbles = avoids;
    play.letter = &l;
    play.recall_at = recall_at;
    e[1].host.land = land_in_page;
    e[1].host.landed = landed_in_page;
    memset(to_page, 0xee, sizeof to_page);
    faults.stumbled = 0;
    faults.read_error = error;
    CHECK_EQ(post_in(&e[0], 1, &l, BYTES, from_page), DDL_IN_PROGRESS);
    e[1].fail_alloc = has_memory ? 0 : e[1].allocs + 1;
    DRIVE(e, 2, e[1].arrived[0] == 1 && (l.returned || recall_at > 0)) {}
    CHECK(play.reads > 0 && play.reads >= recall_at);
    CHECK_EQ(m->aside != NULL, avoids);
    faults.read_error = 0;
    end(e, 2);
}

TEST(the_kernel_is_not_asked_to_copy_where_strings_stumble) {
    read_from_a_page(false, true, 0, 0);
    CHECK(faults.stumbled > 1);
    read_from_a_page(true, true, 0, 0);
    CHECK_EQ(faults.stumbled, 0);
}

TEST(it_is_once_more_where_there_is_no_memory_for_a_place_aside) {
    read_from_a_page(true, false, 0, 0);
    CHECK_EQ(faults.stumbled, 1); /* the next time there is some */
}

TEST(what_is_read_aside_may_be_taken_back_in_the_middle) {
    for (int recall_at = 1; recall_at <= PIECES; recall_at += 8) {
        read_from_a_page(true, true, recall_at, 0);
    }
}

TEST(what_cannot_be_read_aside_is_lent) { read_from_a_page(true, true, 0, EPERM); }

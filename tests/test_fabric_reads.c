/* The libfabric plugin: payloads that are read in place, and memory that is wanted back meanwhile, by the sender (recall) or by the
 * receiver (redirect); peers that stop in the middle; endpoints to read by that are given up (plugins/fabric/rail.h).
 * tests/run: variants=gcc,asan,valgrind timeout=60 */
#include "fabric_host.h"

/* The receiver does not look: the sender gets its memory back all the same, scribbles over it, and what arrives is what
 * was sent. */
static void recall_of(uint64_t bytes, const char *setting) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, setting, NULL);
    letter first, l;
    post(&e[0], 1, &first, 8);
    DRIVE(e, 2, e[1].arrived[0] == 1) {}
    CHECK_EQ(post(&e[0], 1, &l, bytes), DDL_IN_PROGRESS);
    double start = test_now_s();
    fabric_transport.recall(e[0].self, 1, &l.message);
    CHECK(test_now_s() - start < 1 * test_slow());
    memset(l.payload, 0x11, bytes);
    DRIVE(e, 2, e[1].arrived[0] == 2) {}
    CHECK_EQ(l.returned, 0);
    CHECK_EQ(e[1].lost[0], 0);
    free(l.payload);
    letter_free(&first);
    post(&e[0], 1, &first, 400000);
    DRIVE(e, 2, e[1].arrived[0] == 3 && first.returned == first.borrowed) {}
    letter_free(&first);
    world_end(e, 2);
}

TEST(recall_of_an_offer) { recall_of(1 << 20, NULL); }
TEST(recall_of_what_goes_in_pieces) { recall_of(1 << 20, "FABRIC_FORCE_NO_RMA=1"); }

/* A landing's memory is wanted back half-way: what has come stays, what comes goes elsewhere, the old memory is left
 * alone. */
static void redirect_of(const char *first, const char *second, int reads) {
    NEED_LIBFABRIC();
    enum { BYTES = 2 << 20 };
    endpoint *e = world_open(2, first, second);
    struct fi_ops_rma rma = *(real_rma = reads_by(&e[1])->rma);
    letter before, l;
    post(&e[0], 1, &before, 400000); /* there is a connection to read by */
    DRIVE(e, 2, e[1].arrived[0] == 1 && before.returned == before.borrowed) {}
    rma.read = held_read;
    reads_allowed = reads;
    reads_by(&e[1])->rma = &rma;
    CHECK_EQ(post(&e[0], 1, &l, BYTES), DDL_IN_PROGRESS);
    DRIVE(e, 2, e[1].landing[0] != NULL && reads_allowed < 0 && self_of(&e[1])->peers[0].link->reads == 0) {}
    uint8_t *old = e[1].landing[0], *elsewhere = malloc(BYTES);
    uint64_t touched = 0, wrong = 0;
    fabric_transport.redirect(e[1].self, 0, &e, NULL); /* of another token: nothing */
    fabric_transport.redirect(e[1].self, 0, old, elsewhere);
    memcpy(elsewhere, old, BYTES);
    memset(old, 0x33, BYTES);
    e[1].discard = 1; /* what is in the old memory is not looked at */
    reads_by(&e[1])->rma = real_rma;
    DRIVE(e, 2, e[1].arrived[0] == 2 && l.returned == 1) {
        for (int k = 0; k < BYTES && e[1].landing[0] == old; k += 97) {
            touched += old[k] != 0x33;
        }
    }
    for (uint64_t i = 0; i < BYTES; i++) {
        wrong += elsewhere[i] != pattern(1, 0, i);
    }
    CHECK_EQ(touched, 0u);
    CHECK_EQ(wrong, 0u);
    CHECK_EQ(e[1].lost[0] + e[0].lost[1], 0);
    letter_free(&before);
    letter_free(&l);
    free(elsewhere);
    world_end(e, 2);
}

TEST(redirect_of_what_goes_in_pieces) { redirect_of("FABRIC_FORCE_NO_RMA=1", NULL, -1); }
TEST(redirect_of_what_was_read_in_part) { redirect_of("FABRIC_FORCE_MAX_MESSAGE=64K", NULL, 3); }
TEST(redirect_of_what_an_adapter_has_read_in_part) { redirect_of("FABRIC_FORCE_MR=local", "FABRIC_FORCE_MAX_MESSAGE=64K", 3); }

void __lsan_disable(void) __attribute__((weak)); /* NULL where there is no sanitizer */
void __lsan_enable(void) __attribute__((weak));

/* Connections that are left as they are to the end of the process are no leak. */
static void leaks_are_meant(int meant) {
    if (__lsan_disable) {
        (meant ? __lsan_disable : __lsan_enable)();
    }
}

static fabric_self kept[3]; /* for valgrind: what is left is in use */

/* Rank 0 stops in the middle of its answer to a read of rank 1's; others go on. */
static void read_half(endpoint *e, int from, letter *l, uint64_t bytes) {
    fabric_self *s = self_of(&e[1]);
    post(&e[from], 1, l, bytes);
    DRIVE(from == 0 ? e : &e[1], 2, s->peers[from].link != NULL && s->peers[from].link->reads > 0) {}
    for (int i = 0; i < 8; i++) { /* it answers as far as the socket takes it, and stops */
        fabric_transport.progress(e[from].self, -1);
    }
    for (int i = 0; i < 8; i++) {
        fabric_transport.progress(e[1].self, -1);
    }
    CHECK(s->peers[from].link->reads > 0);
}

/* A sender stops while its payload is on the way, and is declared dead. Everything comes back at once. A payload of another
 * peer's that was being read comes nevertheless, as do later ones. */
TEST(a_sender_that_stopped_in_the_middle_of_a_read_can_be_declared_dead) {
    NEED_LIBFABRIC();
    enum { BYTES = 16 << 20 };
    endpoint *e = world_open(3, NULL, NULL);
    letter l, other, next;
    leaks_are_meant(1);
    read_half(e, 0, &l, BYTES); /* more than a socket holds */
    read_half(e, 2, &other, BYTES);
    kept[0] = *self_of(&e[1]);
    double start = test_now_s();
    fabric_transport.peer_dead(e[1].self, 0);
    CHECK(test_now_s() - start < 1 * test_slow());
    CHECK(e[1].landing[0] == NULL);
    CHECK(e[1].landing[2] != NULL);
    CHECK(!e[1].failed);
    CHECK_EQ(self_of(&e[1])->readers_open, 0);
    fabric_transport.peer_dead(e[0].self, 1);
    DRIVE(&e[1], 2, e[1].arrived[2] == 1 && other.returned == 1) {}
    post(&e[2], 1, &next, 1 << 20);
    DRIVE(&e[1], 2, e[1].arrived[2] == 2 && next.returned == 1) {}
    CHECK_EQ(self_of(&e[1])->readers_open, 1);
    CHECK_EQ(self_of(&e[1])->readers_round, 2);
    letter_free(&l);
    letter_free(&other);
    letter_free(&next);
    world_end(e, 3);
    leaks_are_meant(0);
}

/* A sender gives up when its answer is half-way, and frees the memory: the rest is not sent from there, and what arrives is what
 * was sent. */
TEST(recall_of_what_is_read_half) {
    NEED_LIBFABRIC();
    enum { BYTES = 16 << 20 };
    endpoint *e = world_open(2, NULL, NULL);
    letter l, next;
    read_half(e, 0, &l, BYTES);
    double start = test_now_s();
    fabric_transport.recall(e[0].self, 1, &l.message);
    CHECK(test_now_s() - start < 1 * test_slow());
    memset(l.payload, 0x11, BYTES);
    free(l.payload);
    DRIVE(e, 2, e[1].arrived[0] == 1) {}
    CHECK_EQ(l.returned, 0);
    post(&e[0], 1, &next, 1 << 20);
    DRIVE(e, 2, e[1].arrived[0] == 2 && next.returned == 1) {}
    CHECK_EQ(e[0].lost[1] + e[1].lost[0], 0);
    CHECK_EQ(self_of(&e[1])->readers_round, 1); /* it is read by the same endpoint, on a new connection */
    letter_free(&next);
    world_end(e, 2);
}

/* A receive is given up while its sender has stopped half-way: the memory comes back, what it still sends does not reach it, and
 * no link is lost. When no endpoint to read by is left payloads are sent instead. */
static void a_read_is_given_up(int32_t readers_left) {
    NEED_LIBFABRIC();
    enum { BYTES = 16 << 20 };
    endpoint *e = world_open(3, NULL, NULL);
    fabric_self *s = self_of(&e[1]);
    letter l, other, next;
    leaks_are_meant(1);
    read_half(e, 0, &l, BYTES);
    read_half(e, 2, &other, BYTES);
    kept[1 + readers_left] = *s;
    s->readers_left = readers_left;
    uint8_t *old = e[1].landing[0], *elsewhere = malloc(BYTES);
    double start = test_now_s();
    fabric_transport.redirect(e[1].self, 0, old, elsewhere);
    CHECK(test_now_s() - start < 1 * test_slow());
    CHECK_EQ(s->peers[0].link->reads + s->peers[2].link->reads, 0);
    memset(elsewhere, 0xee, BYTES);
    memset(old, 0x33, BYTES);
    e[1].discard = 1; /* what is in the old memory is not looked at */
    uint64_t touched = 0, wrong = 0;
    DRIVE(e, 3, e[1].arrived[0] == 1 && l.returned == 1) {
        for (int k = 0; k < BYTES && e[1].landing[0] == old; k += 997) {
            touched += old[k] != 0x33;
        }
    }
    for (uint64_t i = 0; i < BYTES; i++) {
        wrong += elsewhere[i] != pattern(0, 0, i);
    }
    CHECK_EQ(touched, 0u);
    CHECK_EQ(wrong, 0u);
    DRIVE(e, 3, e[1].arrived[2] == 1 && other.returned == 1) {}
    e[1].discard = 0;
    post(&e[0], 1, &next, 1 << 20);
    DRIVE(e, 3, e[1].arrived[0] == 2 && next.returned == 1) {}
    CHECK_EQ(s->readers_open, readers_left > 0);
    CHECK_EQ(e[1].lost[0] + e[1].lost[2] + e[0].lost[1] + e[2].lost[1], 0);
    letter_free(&l);
    letter_free(&other);
    letter_free(&next);
    free(elsewhere);
    world_end(e, 3);
    leaks_are_meant(0);
}

TEST(a_read_that_does_not_end_is_given_up) { a_read_is_given_up(1); }
TEST(a_read_is_given_up_and_nothing_is_left_to_read_by) { a_read_is_given_up(0); }

/* A peer that never accepts a connection to be read by is asked to send. */
TEST(what_never_can_be_read_is_sent) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, NULL, NULL);
    struct fi_ops_rma rma = *(real_rma = reads_by(&e[1])->rma);
    letter l;
    rma.read = held_read;
    reads_allowed = 0;
    reads_by(&e[1])->rma = &rma;
    double start = test_now_s();
    CHECK_EQ(post(&e[0], 1, &l, 1 << 20), DDL_IN_PROGRESS);
    DRIVE(e, 2, e[1].arrived[0] == 1 && l.returned == 1) {}
    CHECK(test_now_s() - start >= 1 && test_now_s() - start < 3 * test_slow());
    reads_by(&e[1])->rma = real_rma;
    letter_free(&l);
    world_end(e, 2);
}

/* A rank that sleeps while a payload is read is woken by what comes: it never waits for a timer. While it is awake nothing
 * that comes wakes our own set. */
TEST(a_rank_that_reads_is_woken) {
    NEED_LIBFABRIC();
    enum { BYTES = 32 << 20 };
    endpoint *e = world_open(2, NULL, NULL);
    letter before, l;
    post(&e[0], 1, &before, 400000);
    DRIVE(e, 2, e[1].arrived[0] == 1 && before.returned == before.borrowed) {}
    read_half(e, 0, &l, BYTES);
    int slept = 0, woken = 0, fd = -1;
    for (double until = test_now_s() + 20 * test_slow(); e[1].arrived[0] < 2 && test_now_s() < until;) {
        int armed = self_of(&e[1])->peers[0].link->reads > 0 && fabric_transport.arm(e[1].self, &fd) == DDL_OK;
        for (int i = 0; i < 8; i++) {
            fabric_transport.progress(e[0].self, -1);
        }
        if (armed) {
            struct pollfd wait = {.fd = fd, .events = POLLIN};
            slept++;
            woken += poll(&wait, 1, 2000) == 1;
        }
        const fabric_self *reader = self_of(&e[1]);
        CHECK(!armed || (reader->rails[0].watched && reader->readers[0].watched));
        CHECK(fabric_transport.progress(e[1].self, -1) >= 0);
        CHECK(!reader->rails[0].watched && !reader->readers[0].watched);
    }
    CHECK_EQ(e[1].arrived[0], 2);
    CHECK(slept > 0);
    CHECK_EQ(woken, slept);
    DRIVE(e, 2, l.returned == 1) {}
    letter_free(&before);
    letter_free(&l);
    world_end(e, 2);
}

/* A member that names its readers by too few bytes is cut off. */
TEST(a_name_that_is_too_short_ends_the_link) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, NULL, NULL);
    letter l;
    post(&e[0], 1, &l, 8);
    DRIVE(e, 2, e[1].arrived[0] == 1) {}
    fabric_self *s = self_of(&e[0]);
    fabric_link *link = s->peers[1].link;
    fabric_head head = fabric_head_of(s, link, FABRIC_READER, 0, 3);
    CHECK_EQ(fabric_put(s, link, &head, "abc", 3, NULL, 0), FABRIC_GONE);
    DRIVE(e, 2, e[1].lost[0] == 1) {}
    CHECK_EQ(e[1].lost_error[0], EBADMSG);
    fabric_transport.peer_dead(e[0].self, 1);
    letter_free(&l);
    world_end(e, 2);
}

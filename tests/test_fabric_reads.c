/* The libfabric plugin: payloads that go straight into their place, and memory that is wanted back meanwhile, by the sender (recall) or
 * by the receiver (redirect); peers that stop in the middle (plugins/fabric/connect.h).
 * tests/run: variants=gcc,asan,valgrind timeout=60 quick=yes */
#include "fabric_host.h"

#include <sys/wait.h>

/* The receiver does not look: the sender gets its memory back all the same, scribbles over it, and what arrives is what
 * was sent; of data of a message the receiver hears that it does not come. */
static void recall_of(uint64_t bytes, const char *setting) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, setting, NULL);
    letter first, l;
    post(&e[0], 1, &first, 400000); /* there is a connection for payloads */
    DRIVE(e, 2, e[1].arrived[0] == 1 && first.returned == first.borrowed) {}
    CHECK_EQ(post(&e[0], 1, &l, bytes), DDL_IN_PROGRESS);
    double start = test_now_s();
    fabric_transport.recall(e[0].self, 1, &l.message);
    CHECK(test_now_s() - start < 1 * test_slow());
    memset(l.payload, 0x11, bytes);
    DRIVE(e, 2, e[1].arrived[0] + (uint64_t)e[1].landing_failed[0] == 2) {}
    CHECK(fabric_is_data(bytes) || e[1].landing_failed[0] == 0); /* data that the kernel had comes */
    CHECK_EQ(l.returned, 0);
    CHECK_EQ(e[1].lost[0], 0);
    free(l.payload);
    letter_free(&first);
    post(&e[0], 1, &first, 400000);
    DRIVE(e, 2, e[1].arrived[0] + (uint64_t)e[1].landing_failed[0] == 3 && first.returned == first.borrowed) {}
    letter_free(&first);
    world_end(e, 2);
}

TEST(recall_of_a_payload) { recall_of(1 << 20, NULL); }
TEST(recall_of_data_that_no_socket_holds) { recall_of(16 << 20, NULL); }
TEST(recall_of_an_offer) { recall_of(1 << 20, "FABRIC_FORCE_MR=local"); }
TEST(recall_of_what_goes_in_pieces) { recall_of(1 << 20, "FABRIC_FORCE_NO_RMA=1"); }

/* An operation over many peers, none of which looks, is given up: all its memory comes back in the time of one. */
static void recalls_in_a_row(int each, uint64_t bytes, const char *setting) {
    NEED_LIBFABRIC();
    enum { PEERS = 5, MOST = FABRIC_WINDOW };
    endpoint *e = world_open(PEERS + 1, setting, NULL);
    letter first[PEERS], l[PEERS][MOST];
    for (int i = 0; i < PEERS; i++) {
        post(&e[0], i + 1, &first[i], 400000);
        DRIVE(e, PEERS + 1, e[i + 1].arrived[0] == 1 && first[i].returned == first[i].borrowed) {}
    }
    for (int i = 0; i < PEERS * each; i++) {
        CHECK_EQ(post(&e[0], i % PEERS + 1, &l[i % PEERS][i / PEERS], bytes), DDL_IN_PROGRESS);
    }
    double start = test_now_s();
    for (int i = 0; i < PEERS * each; i++) {
        letter *one = &l[i % PEERS][i / PEERS];
        fabric_transport.recall(e[0].self, i % PEERS + 1, &one->message);
        memset(one->payload, 0x11, bytes);
    }
    double took = test_now_s() - start;
    CHECK(took < 0.2 * each * test_slow()); /* one by one: 0.25 s for each, at least */
    printf("     %d recalls took %.0f ms\n", PEERS * each, took * 1e3);
    for (int i = 0; i < PEERS; i++) {
        DRIVE(e, PEERS + 1, e[i + 1].arrived[0] == 1 + (uint64_t)each) {}
        CHECK_EQ(e[i + 1].lost[0] + e[0].lost[i + 1], 0);
        letter_free(&first[i]);
        for (int k = 0; k < each; k++) {
            CHECK_EQ(l[i][k].returned, 0);
            free(l[i][k].payload);
        }
    }
    world_end(e, PEERS + 1);
}

/* More than a socket holds. */
TEST(recalls_of_payloads_in_a_row) { recalls_in_a_row(12, 1 << 20, NULL); }
TEST(recalls_of_offers_in_a_row) { recalls_in_a_row(4, 60000, "FABRIC_FORCE_MR=local"); }
/* So many that there is no credit for a word about each. */
TEST(recalls_of_many_offers_in_a_row) { recalls_in_a_row(FABRIC_WINDOW - 4, 60000, "FABRIC_FORCE_MR=local"); }

static uint64_t taken_bytes, taken_most; /* by the plugin of rank 0, in all and at once */

static void *counted_alloc(const ddl_host *host, size_t bytes) {
    of(host)->blocks++;
    taken_bytes += bytes;
    taken_most = bytes > taken_most ? bytes : taken_most;
    return malloc(bytes);
}

/* The data of sends to ranks none of which looks is given up: that takes no memory for each, and no link. goes: so many of two have begun. */
static void data_is_given_up(const char *setting, int goes) {
    NEED_LIBFABRIC();
    enum { PEERS = 7, EACH = 2, BYTES = DDL_MESSAGE_DATA_BYTES };
    endpoint *e = world_open(PEERS + 1, setting, NULL);
    uint8_t *tensor = malloc(BYTES + 1);
    letter first[PEERS], l[PEERS][EACH], next;
    for (int i = 0; i < PEERS; i++) {
        post(&e[0], i + 1, &first[i], 400000);
        DRIVE(e, PEERS + 1, e[i + 1].arrived[0] == 1 && first[i].returned == first[i].borrowed) {}
        e[i + 1].discard = 1; /* what is in the memory is not looked at: the letters share it */
    }
    for (int i = 0; i < PEERS * EACH; i++) {
        CHECK_EQ(post_in(&e[0], i % PEERS + 1, &l[i % PEERS][i / PEERS], BYTES, tensor), DDL_IN_PROGRESS);
    }
    for (int i = 0; i < 20; i++) {
        fabric_transport.progress(e[0].self, -1);
    }
    e[0].host.alloc = counted_alloc;
    taken_bytes = taken_most = 0;
    double start = test_now_s();
    for (int i = 0; i < PEERS * EACH; i++) {
        fabric_transport.recall(e[0].self, i % PEERS + 1, &l[i % PEERS][i / PEERS].message);
    }
    double took = test_now_s() - start;
    printf("     %d recalls of 16 MiB took %.0f ms and %.1f MiB\n", PEERS * EACH, took * 1e3, (double)taken_bytes / (1 << 20));
    CHECK(taken_bytes < 1 << 20);
    CHECK(took < 0.3 * test_slow());
    e[0].host.alloc = mini_alloc;
    free(tensor);
    for (int i = 0; i < PEERS; i++) {
        e[i + 1].next[0] += (uint64_t)(EACH - goes); /* the others are forgotten */
        post(&e[0], i + 1, &next, 100000);
        DRIVE(e, PEERS + 1, e[i + 1].arrived[0] + (uint64_t)e[i + 1].landing_failed[0] == 2 + (uint64_t)goes && next.returned == next.borrowed) {}
        CHECK_EQ(e[i + 1].lost[0] + e[0].lost[i + 1], 0);
        CHECK_EQ(e[i + 1].open_landings, 0);
        letter_free(&first[i]);
        letter_free(&next);
        for (int k = 0; k < EACH; k++) {
            CHECK_EQ(l[i][k].returned, 0);
        }
    }
    world_end(e, PEERS + 1);
}

/* Where nothing keeps the order, the word that data is given up may overtake parts of it that were sent. */
TEST(a_part_that_comes_after_its_data_was_given_up) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, "FABRIC_FORCE_MR=local", "FABRIC_FORCE_UNORDERED=1");
    letter l, next;
    post(&e[0], 1, &l, 1 << 20);
    DRIVE(e, 2, e[1].arrived[0] == 1 && l.returned == 1) {}
    fabric_link *link = self_of(&e[1])->peers[0].link;
    CHECK_EQ(link->pulled, 1);
    fabric_head head = {.source = 0, .kind = FABRIC_REPAIR, .sequence = 0, .bytes = 8};
    uint8_t bytes[sizeof head + sizeof(uint64_t) + 8] = {0};
    fabric_slot slot = {.bytes = bytes, .length = sizeof bytes};
    fabric_on_repair(self_of(&e[1]), link, &slot, &head);
    post(&e[0], 1, &next, 1 << 20);
    DRIVE(e, 2, e[1].arrived[0] == 2 && next.returned == 1) {}
    CHECK_EQ(e[1].lost[0] + e[0].lost[1], 0);
    letter_free(&l);
    letter_free(&next);
    world_end(e, 2);
}

TEST(data_that_is_given_up) { data_is_given_up(NULL, 2); }
TEST(data_on_offer_that_is_given_up) { data_is_given_up("FABRIC_FORCE_MR=local", 2); }
TEST(data_in_pieces_that_is_given_up) { data_is_given_up("FABRIC_FORCE_NO_RMA=1", 1); }

static uint64_t no_memory_left(const ddl_host *host) { return (void)host, 0; }

/* A copy that a container does not allow is not made: the process would be killed. The link ends as where there is no memory. */
TEST(a_copy_that_a_container_does_not_allow) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, NULL, NULL);
    letter first, l;
    post(&e[0], 1, &first, 400000);
    DRIVE(e, 2, e[1].arrived[0] == 1 && first.returned == first.borrowed) {}
    CHECK_EQ(post(&e[0], 1, &l, 1 << 20), DDL_IN_PROGRESS);
    e[0].host.memory_left = no_memory_left;
    fabric_transport.recall(e[0].self, 1, &l.message);
    memset(l.payload, 0x11, 1 << 20);
    free(l.payload);
    DRIVE(e, 2, e[0].lost[1] == 1 && e[1].lost[0] == 1) {}
    CHECK_EQ(e[0].lost_error[1], ENOMEM);
    CHECK_EQ(l.returned, 0);
    letter_free(&first);
    world_end(e, 2);
}

/* In a row that has lasted for longer than a peer is waited for, each recall still has time to be told: nobody is cut. */
TEST(a_row_of_recalls_that_lasts_cuts_nobody) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, "FABRIC_FORCE_MR=local", NULL);
    fabric_self *s = self_of(&e[0]);
    uint64_t arrived = 1;
    letter first;
    post(&e[0], 1, &first, 400000);
    DRIVE(e, 2, e[1].arrived[0] == 1 && first.returned == first.borrowed) {}
    letter_free(&first);
    double until = test_now_s() + 0.6 * test_slow();
    while (test_now_s() < until) {
        letter l;
        CHECK_EQ(post(&e[0], 1, &l, 60000), DDL_IN_PROGRESS);
        s->recall_ns = s->host->now_ns(s->host) - 300000000; /* as of a row that has lasted */
        s->recalled_ns = s->host->now_ns(s->host);
        fabric_transport.recall(e[0].self, 1, &l.message);
        free(l.payload);
        arrived++;
        DRIVE(e, 2, e[1].arrived[0] == arrived) {}
    }
    CHECK(arrived > 3);
    CHECK_EQ(e[0].lost[1] + e[1].lost[0], 0);
    world_end(e, 2);
}

/* Two ranks as over an adapter, but that a read needs the sender's help: rank 1 reads a payload of rank 0's, which does not look.
 * tcp of newer libraries has RDM endpoints of its own, whose reads nothing but their end stops: not these. */
static endpoint *adapters(void) {
    world_detail = "tcp;ofi_rxm";
    endpoint *e = world_open(2, "FABRIC_FORCE_MR=local", NULL);
    world_detail = "tcp";
    return e;
}

static void read_half(endpoint *e, letter *first, letter *l) {
    post(&e[0], 1, first, 8);
    DRIVE(e, 2, e[1].arrived[0] == 1) {}
    CHECK_EQ(post(&e[0], 1, l, 1 << 20), DDL_IN_PROGRESS);
    DRIVE(&e[1], 1, e[1].landing[0] != NULL && self_of(&e[1])->peers[0].link->reads > 0) {}
}

/* A peer that reads and does not look hears at once that the link is closed: what it has half is not waited for. */
TEST(a_link_that_is_closed_under_a_read_ends_at_the_reader) {
    NEED_LIBFABRIC();
    letter first, l;
    endpoint *e = adapters();
    read_half(e, &first, &l);
    REQUIRE(e[1].landing[0] != NULL);
    fabric_part_with(self_of(&e[0]), self_of(&e[0])->peers[1].link, ECANCELED);
    DRIVE(e, 2, e[0].lost[1] == 1 && e[1].lost[0] == 1 && l.returned == 1) {}
    CHECK_EQ(e[0].lost_error[1], ECANCELED);
    CHECK_EQ(e[1].lost_error[0], ECANCELED);
    letter_free(&first);
    letter_free(&l);
    world_end(e, 2);
}

/* A read that needs the help of a peer that does not look: the link ends with it, the core is told that it was our doing, and
 * the peer hears of it. */
TEST(a_read_that_does_not_end_when_its_memory_is_wanted_back) {
    NEED_LIBFABRIC();
    letter first, l;
    endpoint *e = adapters();
    read_half(e, &first, &l);
    REQUIRE(e[1].landing[0] != NULL);
    uint8_t *old = e[1].landing[0], *elsewhere = calloc(1, 1 << 20);
    fabric_transport.redirect(e[1].self, 0, old, elsewhere);
    CHECK_EQ(self_of(&e[1])->peers[0].link->reads, 0);
    DRIVE(e, 2, e[0].lost[1] == 1 && e[1].lost[0] == 1 && l.returned == 1) {}
    CHECK_EQ(e[1].lost_error[0], ECANCELED);
    CHECK_EQ(e[0].lost_error[1], ECANCELED); /* the peer says so */
    CHECK(!e[0].failed && !e[1].failed);
    letter_free(&first);
    letter_free(&l);
    free(elsewhere);
    world_end(e, 2);
}

/* The core has no memory for the rest of what comes: it hears so of the link. */
TEST(what_there_is_no_memory_for_ends_the_link) {
    NEED_LIBFABRIC();
    letter l;
    endpoint *e = world_open(2, "FABRIC_FORCE_NO_RMA=1", NULL);
    CHECK_EQ(post(&e[0], 1, &l, 4 << 20), DDL_IN_PROGRESS);
    DRIVE(e, 2, e[1].landing[0] != NULL) {}
    REQUIRE(e[1].landing[0] != NULL);
    uint8_t *old = e[1].landing[0];
    fabric_transport.redirect(e[1].self, 0, old, NULL);
    DRIVE(e, 2, e[1].lost[0] == 1) {}
    CHECK_EQ(e[1].lost_error[0], ENOMEM);
    fabric_transport.peer_dead(e[0].self, 1);
    letter_free(&l);
    world_end(e, 2);
}

/* A landing's memory is wanted back half-way: what has come stays, what comes goes elsewhere, the old memory is left
 * alone. */
static void redirect_of(const char *first, const char *second, int reads) {
    NEED_LIBFABRIC();
    enum { BYTES = 2 << 20 };
    endpoint *e = world_open(2, first, second);
    letter before, l;
    post(&e[0], 1, &before, 400000);
    DRIVE(e, 2, e[1].arrived[0] == 1 && before.returned == before.borrowed) {}
    hooks.of = e[1].self;
    hooks.read = held_read;
    hooks.recv = held_recv;
    reads_allowed = reads;
    CHECK_EQ(post(&e[0], 1, &l, BYTES), DDL_IN_PROGRESS);
    DRIVE(e, 2, e[1].landing[0] != NULL && reads_allowed < 0 && self_of(&e[1])->peers[0].link->reads == 0) {}
    uint8_t *old = e[1].landing[0], *elsewhere = malloc(BYTES);
    uint64_t touched = 0, wrong = 0;
    fabric_transport.redirect(e[1].self, 0, &e, NULL); /* of another token: nothing */
    fabric_transport.redirect(e[1].self, 0, old, elsewhere);
    memcpy(elsewhere, old, BYTES);
    memset(old, 0x33, BYTES);
    e[1].discard = 1; /* what is in the old memory is not looked at */
    hooks_end();
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
TEST(redirect_of_what_was_taken_in_part) { redirect_of("FABRIC_FORCE_MAX_MESSAGE=64K", NULL, 3); }
TEST(redirect_of_what_an_adapter_has_read_in_part) { redirect_of("FABRIC_FORCE_MR=local", "FABRIC_FORCE_MAX_MESSAGE=64K", 3); }

/* Rank 0 stops in the middle of a payload to rank 1; others go on. */
static void come_half(endpoint *e, int from, letter *l, uint64_t bytes) {
    fabric_self *s = self_of(&e[1]);
    post(&e[from], 1, l, bytes);
    DRIVE(from == 0 ? e : &e[1], 2, s->peers[from].link != NULL && s->peers[from].link->reads > 0) {}
    for (int i = 0; i < 8; i++) { /* it sends what the socket takes, and stops */
        fabric_transport.progress(e[from].self, -1);
    }
    for (int i = 0; i < 8; i++) {
        fabric_transport.progress(e[1].self, -1);
    }
    CHECK(s->peers[from].link->reads > 0);
}

/* A sender stops while its payload is on the way, and is declared dead. Everything comes back at once. A payload of another
 * peer's that was being read comes nevertheless, as do later ones. */
TEST(a_sender_that_stopped_in_the_middle_can_be_declared_dead) {
    NEED_LIBFABRIC();
    enum { BYTES = 16 << 20 };
    endpoint *e = world_open(3, NULL, NULL);
    letter l, other, next;
    come_half(e, 0, &l, BYTES); /* more than a socket holds */
    come_half(e, 2, &other, BYTES);
    double start = test_now_s();
    fabric_transport.peer_dead(e[1].self, 0);
    CHECK(test_now_s() - start < 1 * test_slow());
    CHECK(e[1].landing[0] == NULL);
    CHECK(e[1].landing[2] != NULL);
    CHECK(!e[1].failed);
    fabric_transport.peer_dead(e[0].self, 1);
    DRIVE(&e[1], 2, e[1].arrived[2] == 1 && other.returned == 1) {}
    post(&e[2], 1, &next, 1 << 20);
    DRIVE(&e[1], 2, e[1].arrived[2] == 2 && next.returned == 1) {}
    letter_free(&l);
    letter_free(&other);
    letter_free(&next);
    world_end(e, 3);
}

/* A sender gives up when data is half-way, and frees the memory: the rest is not sent from there, and the receiver hears so. */
TEST(recall_of_what_has_come_half) {
    NEED_LIBFABRIC();
    enum { BYTES = 16 << 20 };
    endpoint *e = world_open(2, NULL, NULL);
    letter l, next;
    come_half(e, 0, &l, BYTES);
    double start = test_now_s();
    fabric_transport.recall(e[0].self, 1, &l.message);
    CHECK(test_now_s() - start < 1 * test_slow());
    memset(l.payload, 0x11, BYTES);
    free(l.payload);
    DRIVE(e, 2, e[1].landing_failed[0] == 1) {}
    CHECK_EQ(l.returned, 0);
    post(&e[0], 1, &next, 1 << 20);
    DRIVE(e, 2, e[1].arrived[0] == 1 && next.returned == 1) {}
    CHECK_EQ(e[0].lost[1] + e[1].lost[0], 0);
    CHECK_EQ(self_of(&e[1])->peers[0].link->in_lost, 1);
    CHECK_EQ(self_of(&e[1])->peers[0].link->way[FABRIC_IN].number, 2); /* by a new connection */
    letter_free(&next);
    world_end(e, 2);
}

/* A receive is given up while its sender has stopped half-way: the memory comes back, what it still sends does not reach it, no link
 * is lost, and payloads of others go on. */
TEST(a_payload_that_does_not_come_is_given_up) {
    NEED_LIBFABRIC();
    enum { BYTES = 16 << 20 };
    endpoint *e = world_open(3, NULL, NULL);
    fabric_self *s = self_of(&e[1]);
    letter l, other, next;
    come_half(e, 0, &l, BYTES);
    come_half(e, 2, &other, BYTES);
    uint8_t *old = e[1].landing[0], *elsewhere = malloc(BYTES);
    double start = test_now_s();
    fabric_transport.redirect(e[1].self, 0, old, elsewhere);
    CHECK(test_now_s() - start < 1 * test_slow());
    CHECK_EQ(s->peers[0].link->reads, 0);
    CHECK(s->peers[2].link->reads > 0);
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
    CHECK_EQ(s->peers[0].link->way[FABRIC_IN].number, 2);
    CHECK_EQ(e[1].lost[0] + e[1].lost[2] + e[0].lost[1] + e[2].lost[1], 0);
    letter_free(&l);
    letter_free(&other);
    letter_free(&next);
    free(elsewhere);
    world_end(e, 3);
}

/* A payload that nobody wants any more is taken from its connection all the same, and the next one comes behind it. */
TEST(a_payload_that_is_not_wanted_is_passed_over) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, NULL, NULL);
    letter l, next;
    e[1].discard = 1;
    CHECK_EQ(post(&e[0], 1, &l, (3 << 20) + 5), DDL_IN_PROGRESS);
    DRIVE(e, 2, e[1].arrived[0] == 1 && l.returned == 1) {}
    e[1].discard = 0;
    post(&e[0], 1, &next, 1 << 20);
    DRIVE(e, 2, e[1].arrived[0] == 2 && next.returned == 1) {}
    CHECK_EQ(self_of(&e[1])->peers[0].link->way[FABRIC_IN].number, 1);
    letter_free(&l);
    letter_free(&next);
    world_end(e, 2);
}

/* A child of fork has all connections open still: an end is seen nevertheless, and who is idle afterwards sleeps. */
TEST(a_forked_child_hides_no_end) {
    NEED_LIBFABRIC();
    enum { BYTES = 16 << 20 };
    endpoint *e = world_open(2, NULL, NULL);
    letter l;
    come_half(e, 0, &l, BYTES);
    pid_t child = fork();
    if (child == 0) {
        poll(NULL, 0, 10000);
        _exit(0);
    }
    double start = test_now_s();
    fabric_transport.recall(e[0].self, 1, &l.message);
    free(l.payload);
    DRIVE(e, 2, e[1].landing_failed[0] == 1) {}
    CHECK(test_now_s() - start < 5 * test_slow());
    for (double until = test_now_s() + 0.3; test_now_s() < until;) {
        progress_all(e, 2); /* the last acknowledgements */
    }
    int wakes = 0;
    for (double until = test_now_s() + 1; test_now_s() < until; wakes++) {
        progress_all(e, 2);
        sleep_all(e, 2, 100);
    }
    CHECK(wakes < 60);
    CHECK_EQ(e[0].lost[1] + e[1].lost[0], 0);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    world_end(e, 2);
}

/* A peer that computes does not answer a call: after a second payloads go in pieces. */
TEST(a_payload_does_not_wait_for_a_call_that_is_not_answered) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, NULL, NULL);
    letter first, l;
    post(&e[0], 1, &first, 8);
    DRIVE(e, 2, e[1].arrived[0] == 1) {}
    const fabric_link *link = self_of(&e[0])->peers[1].link;
    CHECK_EQ(post(&e[0], 1, &l, 100000), DDL_IN_PROGRESS);
    CHECK(!l.message.priv[FABRIC_NO_OFFER]);
    DRIVE(e, 1, l.message.priv[FABRIC_NO_OFFER]) {}
    CHECK_EQ(link->way[FABRIC_OUT].failures, 1);
    DRIVE(e, 2, e[1].arrived[0] == 2 && l.returned == 1) {}
    CHECK_EQ(link->offer_count, 0);
    CHECK_EQ(e[0].lost[1] + e[1].lost[0], 0);
    letter_free(&first);
    letter_free(&l);
    world_end(e, 2);
}

/* Calls of a member that make no sense, or come late, are refused and change nothing. */
TEST(calls_that_are_refused) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, NULL, NULL);
    letter l, next;
    for (int i = 0; i < 2; i++) { /* the second by the second connection */
        post(&e[0], 1, i ? &next : &l, 1 << 20);
        DRIVE(e, 2, e[1].arrived[0] == (uint64_t)i + 1 && (i ? &next : &l)->returned == 1) {}
        if (i == 0) {
            fabric_way_close(e[0].self, &self_of(&e[0])->peers[1].link->way[FABRIC_OUT]);
            DRIVE(e, 2, self_of(&e[1])->peers[0].link->in_lost == 1) {}
        }
    }
    fabric_self *s = self_of(&e[1]);
    const fabric_link *link = s->peers[0].link;
    uint64_t token = self_of(&e[0])->peers[1].token_out;
    const fabric_hello bad[] = {
        {.token = token ^ 1, .source = 0, .kind = FABRIC_OUT, .number = 9}, {.token = token, .source = 1, .kind = FABRIC_OUT, .number = 9},
        {.token = token, .source = 7, .kind = FABRIC_OUT, .number = 9},     {.token = token, .source = -1, .kind = FABRIC_OUT, .number = 9},
        {.token = token, .source = 0, .kind = FABRIC_IN, .number = 9},      {.token = token, .source = 0, .kind = 77, .number = 9},
        {.token = token, .source = 0, .kind = FABRIC_OUT, .number = 1},     {.token = token, .source = 0, .kind = FABRIC_WORDS, .number = 9}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK_EQ(fabric_call_answer(s, 0, &bad[i], NULL), 0);
    }
    CHECK_EQ(fabric_call_answer(s, 1, &(fabric_hello){.token = token, .source = 0, .kind = FABRIC_WORDS}, NULL), 0);
    CHECK(link->way[FABRIC_IN].number == 2 && fabric_way_has(s, &link->way[FABRIC_IN], FABRIC_OPEN));
    CHECK(fabric_way_has(s, &link->way[FABRIC_WORDS], FABRIC_OPEN));
    letter_free(&l);
    letter_free(&next);
    world_end(e, 2);
}

/* Both call each other at once: one connection comes of it, the lower rank's. */
TEST(two_that_call_each_other_have_one_connection) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, NULL, NULL);
    letter l[2];
    post(&e[1], 0, &l[1], 8);
    post(&e[0], 1, &l[0], 8);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(self_of(&e[i])->peers[!i].link->way[FABRIC_WORDS].strand[0].state, FABRIC_CALLING);
    }
    DRIVE(e, 2, e[0].arrived[1] == 1 && e[1].arrived[0] == 1) {}
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(self_of(&e[i])->peers[!i].link->way[FABRIC_WORDS].strand[0].state, FABRIC_OPEN);
        CHECK_EQ(self_of(&e[i])->calling, 0);
        CHECK_EQ(e[i].lost[!i], 0);
        letter_free(&l[i]);
    }
    world_end(e, 2);
}

/* The connection of messages breaks: what had come by it is handed on before the loss is told. */
TEST(what_came_before_a_connection_broke_is_heard) {
    NEED_LIBFABRIC();
    enum { COUNT = FABRIC_WINDOW - 2 };
    endpoint *e = world_open(2, NULL, NULL);
    letter first, l[COUNT];
    post(&e[0], 1, &first, 8);
    DRIVE(e, 2, e[1].arrived[0] == 1) {}
    for (int i = 0; i < 100; i++) {
        progress_all(e, 2); /* the window is wide then */
    }
    for (int i = 0; i < COUNT; i++) {
        CHECK_EQ(post(&e[0], 1, &l[i], 3000), DDL_OK);
    }
    DRIVE(e, 1, self_of(&e[0])->peers[1].link->sends == 0) {}
    fabric_way_close(e[0].self, &self_of(&e[0])->peers[1].link->way[FABRIC_WORDS]);
    double start = test_now_s();
    DRIVE(&e[1], 1, e[1].lost[0] == 1) {}
    CHECK(test_now_s() - start > 0.09); /* a core knows by then what has happened, and names it */
    CHECK_EQ(e[1].arrived[0], 1 + COUNT);
    CHECK_EQ(e[1].lost_error[0], ECONNRESET);
    fabric_transport.peer_dead(e[0].self, 1);
    letter_free(&first);
    for (int i = 0; i < COUNT; i++) {
        letter_free(&l[i]);
    }
    world_end(e, 2);
}

static int reads_in_vain;
static ssize_t no_read(struct fid_ep *ep, void *buf, size_t len, void *desc, fi_addr_t at, uint64_t address, uint64_t key, void *context) {
    (void)ep, (void)buf, (void)len, (void)desc, (void)at, (void)address, (void)key, (void)context;
    reads_in_vain++;
    return -FI_EAGAIN;
}

/* An adapter that does not reach its like, though messages come: the payload is asked for in pieces after 3 s, the next at once. */
TEST(what_an_adapter_cannot_read_is_sent) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, "FABRIC_FORCE_MR=local", NULL);
    letter l, next;
    hooks.of = e[1].self;
    hooks.read = no_read;
    double start = test_now_s();
    CHECK_EQ(post(&e[0], 1, &l, 1 << 20), DDL_IN_PROGRESS);
    DRIVE(e, 2, e[1].arrived[0] == 1 && l.returned == 1) {}
    CHECK(test_now_s() - start >= 3 && test_now_s() - start < 5 * test_slow());
    start = test_now_s();
    post(&e[0], 1, &next, 1 << 20);
    DRIVE(e, 2, e[1].arrived[0] == 2 && next.returned == 1) {}
    CHECK(test_now_s() - start < 1 * test_slow());
    const char *said = strstr(e[1].log, "no read from rank 0 over");
    CHECK(said != NULL && strstr(said + 20, "no read from") == NULL);
    hooks_end();
    CHECK_EQ(e[0].lost[1] + e[1].lost[0], 0);
    letter_free(&l);
    letter_free(&next);
    world_end(e, 2);
}

/* A look, seconds of work, and one more look, and a read cannot begin in either, as its connection is being made: nobody has waited
 * for it, nothing is said, and it is read. That it was slow, and asked about, is no reason to distrust later ones. */
TEST(a_rank_that_computes_does_not_wait_for_reads) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, "FABRIC_FORCE_MR=local", NULL);
    letter first, l;
    post(&e[0], 1, &first, 8);
    DRIVE(e, 2, e[1].arrived[0] == 1) {}
    fabric_link *link = self_of(&e[1])->peers[0].link;
    link->no_reads_for_ns = 4 * FABRIC_NO_READS_NS; /* of an outage that is over */
    e[1].host.now_ns = standing_now_ns;
    standing_ns = mini_now_ns(&e[1].host);
    hooks.of = e[1].self;
    hooks.read = no_read;
    reads_in_vain = 0;
    CHECK_EQ(post(&e[0], 1, &l, 1 << 20), DDL_IN_PROGRESS);
    DRIVE(e, 2, reads_in_vain > 0) {}
    int before = reads_in_vain;
    standing_ns += FABRIC_RAIL_NS + 1000000000u;
    for (int i = 0; i < 10; i++) {
        fabric_transport.progress(e[1].self, -1);
    }
    CHECK(reads_in_vain > before + 1);
    CHECK_EQ(e[1].warnings, 0);
    CHECK(!link->landing.failed);
    hooks_end();
    DRIVE(e, 2, e[1].arrived[0] == 2 && l.returned == 1) {}
    CHECK_EQ(link->no_reads_ns, 0);
    CHECK_EQ(link->no_reads_for_ns, 0);
    e[1].host.now_ns = mini_now_ns;
    letter_free(&first);
    letter_free(&l);
    world_end(e, 2);
}

/* Nor for a first message to go, though it computes for longer than it takes to suspect a firewall. */
TEST(a_rank_that_computes_does_not_suspect_the_network) {
    NEED_LIBFABRIC();
    for (int adapter = 0; adapter < 2; adapter++) {
        endpoint *e = world_open(2, adapter ? "FABRIC_FORCE_MR=local" : NULL, NULL);
        e[0].host.now_ns = standing_now_ns;
        standing_ns = mini_now_ns(&e[0].host);
        letter l;
        post(&e[0], 1, &l, 60000);
        for (int i = 0; i < 20; i++) { /* rank 1 does not look */
            fabric_transport.progress(e[0].self, -1);
            standing_ns += i == 10 ? FABRIC_UNHEARD_NS : 1000;
        }
        CHECK_EQ(e[0].warnings, 0);
        DRIVE(e, 2, e[1].arrived[0] == 1 && l.returned == l.borrowed) {}
        e[0].host.now_ns = mini_now_ns;
        letter_free(&l);
        world_end(e, 2);
    }
}

/* A reader that slept before it read does not know that the sender has given the data up, and freed it: its read fails, and it hears so. */
TEST(data_that_is_read_after_it_was_given_up) {
    NEED_LIBFABRIC();
    world_detail = "tcp;ofi_rxm";
    endpoint *e = world_open(2, "FABRIC_FORCE_MR=local", NULL);
    world_detail = "tcp";
    letter first, l, next;
    post(&e[0], 1, &first, 8);
    DRIVE(e, 2, e[1].arrived[0] == 1) {}
    fabric_link *link = self_of(&e[1])->peers[0].link;
    hooks.of = e[1].self;
    hooks.read = no_read;
    CHECK_EQ(post(&e[0], 1, &l, 4 << 20), DDL_IN_PROGRESS);
    DRIVE(e, 2, link->landing.active) {}
    fabric_transport.recall(e[0].self, 1, &l.message);
    free(l.payload);
    hooks_end();
    fabric_pull(e[1].self, link); /* before it hears of that */
    CHECK_EQ(link->landing.reading, 1);
    DRIVE(e, 2, e[1].landing_failed[0] == 1) {}
    post(&e[0], 1, &next, 1 << 20);
    DRIVE(e, 2, e[1].arrived[0] == 2 && next.returned == 1) {}
    CHECK_EQ(e[0].lost[1] + e[1].lost[0], 0);
    letter_free(&first);
    letter_free(&next);
    world_end(e, 2);
}

/* A payload that nothing takes for a second is asked for as messages; the next one goes by a new connection. */
TEST(what_never_can_be_taken_is_sent) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, NULL, NULL);
    letter l, next;
    reads_allowed = 0;
    hooks.of = e[1].self;
    hooks.recv = held_recv;
    double start = test_now_s();
    CHECK_EQ(post(&e[0], 1, &l, 1 << 20), DDL_IN_PROGRESS);
    DRIVE(e, 2, e[1].arrived[0] == 1 && l.returned == 1) {}
    CHECK(test_now_s() - start >= 1 && test_now_s() - start < 3 * test_slow());
    hooks_end();
    post(&e[0], 1, &next, 1 << 20);
    DRIVE(e, 2, e[1].arrived[0] == 2 && next.returned == 1) {}
    CHECK_EQ(self_of(&e[1])->peers[0].link->way[FABRIC_IN].number, 2);
    letter_free(&l);
    letter_free(&next);
    world_end(e, 2);
}

/* A rank that sleeps while a payload comes is woken by what comes: it never waits for a timer. In a job of a few ranks our set has the
 * connections, else the provider's own set. */
static void who_takes_is_woken(int world) {
    NEED_LIBFABRIC();
    enum { BYTES = 32 << 20 };
    endpoint *e = calloc(RANKS, sizeof *e);
    for (int i = 0; i < 2; i++) {
        endpoint_prepare(&e[i], i, world_detail, NULL, NULL);
        CHECK_EQ(endpoint_try(&e[i], world, &fabric_transport), DDL_OK);
    }
    meet(&e[0], 1, &self_of(&e[1])->address);
    meet(&e[1], 0, &self_of(&e[0])->address);
    letter before, l;
    post(&e[0], 1, &before, 400000);
    DRIVE(e, 2, e[1].arrived[0] == 1 && before.returned == before.borrowed) {}
    come_half(e, 0, &l, BYTES);
    int slept = 0, woken = 0, fd = -1;
    for (double until = test_now_s() + 20 * test_slow(); e[1].arrived[0] < 2 && test_now_s() < until;) {
        int armed = self_of(&e[1])->peers[0].link->reads > 0 && fabric_transport.arm(e[1].self, &fd) == DDL_OK;
        CHECK(!armed || !self_of(&e[1])->ticking);
        for (int i = 0; i < 8; i++) {
            fabric_transport.progress(e[0].self, -1);
        }
        if (armed) {
            struct pollfd wait = {.fd = fd, .events = POLLIN};
            slept++;
            woken += poll(&wait, 1, 2000) == 1;
        }
        CHECK(fabric_transport.progress(e[1].self, -1) >= 0);
        CHECK(!self_of(&e[1])->rails[0].watched);
    }
    CHECK_EQ(e[1].arrived[0], 2);
    CHECK(slept > 0);
    CHECK_EQ(woken, slept);
    DRIVE(e, 2, l.returned == 1) {}
    letter_free(&before);
    letter_free(&l);
    world_end(e, 2);
}

TEST(a_rank_that_takes_a_payload_is_woken) { who_takes_is_woken(2); }
TEST(a_rank_of_many_that_takes_a_payload_is_woken) { who_takes_is_woken(FABRIC_POLL_RANKS + 1); }

/* A sender whose connection is full sleeps until it takes more. */
TEST(a_rank_that_sends_a_payload_is_woken) {
    NEED_LIBFABRIC();
    enum { BYTES = 32 << 20 };
    endpoint *e = world_open(2, NULL, NULL);
    letter before, l;
    post(&e[0], 1, &before, 400000);
    DRIVE(e, 2, e[1].arrived[0] == 1 && before.returned == before.borrowed) {}
    come_half(e, 0, &l, BYTES);
    int slept = 0, woken = 0, fd = -1;
    for (double until = test_now_s() + 20 * test_slow(); e[1].arrived[0] < 2 && test_now_s() < until;) {
        if (fabric_transport.arm(e[0].self, &fd) == DDL_OK) {
            struct pollfd wait = {.fd = fd, .events = POLLIN};
            int readable = 0;
            CHECK(!self_of(&e[0])->ticking);
            for (int i = 0; i < 2000 && !readable; i++) { /* how much its peer has to take for that the kernel decides */
                fabric_transport.progress(e[1].self, -1);
                readable = poll(&wait, 1, 1);
            }
            slept++;
            woken += readable;
        }
        CHECK(fabric_transport.progress(e[0].self, -1) >= 0);
    }
    CHECK_EQ(e[1].arrived[0], 2);
    CHECK(slept > 0);
    CHECK_EQ(woken, slept);
    DRIVE(e, 2, l.returned == 1) {}
    letter_free(&before);
    letter_free(&l);
    world_end(e, 2);
}

/* A message that another thread sends while one sleeps may go in part: who sleeps looks after it a moment later. */
TEST(a_rank_that_sleeps_looks_after_what_others_send) {
    NEED_LIBFABRIC();
    enum { COUNT = 12, BYTES = 32000 };
    endpoint *e = world_open(2, NULL, NULL);
    letter before, l[COUNT];
    int fd = -1;
    post(&e[0], 1, &before, 8);
    DRIVE(e, 2, e[1].arrived[0] == 1 && self_of(&e[0])->peers[1].link->limit > COUNT + FABRIC_RESERVE) {}
    while (fabric_transport.arm(e[0].self, &fd) != DDL_OK) {
        CHECK(fabric_transport.progress(e[0].self, -1) >= 0);
    }
    CHECK(!self_of(&e[0])->ticking);
    for (int i = 0; i < COUNT; i++) {
        CHECK_EQ(post(&e[0], 1, &l[i], BYTES), DDL_OK);
    }
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    CHECK_EQ(poll(&wait, 1, 1000), 1);
    DRIVE(e, 2, e[1].arrived[0] == 1 + COUNT) {}
    CHECK(fabric_transport.arm(e[0].self, &fd) != DDL_OK || !self_of(&e[0])->ticking); /* nothing more to look after */
    letter_free(&before);
    for (int i = 0; i < COUNT; i++) {
        letter_free(&l[i]);
    }
    world_end(e, 2);
}

/* What libfabric has read from a connection already, before there was a place for it, makes no descriptor readable. */
TEST(what_was_read_ahead_is_not_slept_on) {
    NEED_LIBFABRIC();
    int asked = 0;
    endpoint *e = world_open(2, "FABRIC_OFFER_BYTES=1K", "FABRIC_FORCE_MAX_MESSAGE=2K");
    for (uint64_t i = 1; i <= 20; i++) {
        letter l;
        int fd = -1;
        post(&e[0], 1, &l, 4000);
        for (double until = test_now_s() + 5 * test_slow(); e[1].arrived[0] < i && test_now_s() < until;) {
            CHECK(fabric_transport.progress(e[0].self, -1) >= 0);
            CHECK(fabric_transport.progress(e[1].self, -1) >= 0);
            const fabric_link *link = self_of(&e[1])->peers[0].link;
            int comes = i > 1 && link->reads > 0 && e[1].arrived[0] < i; /* the first waits for its connection */
            double since = test_now_s();
            asked += comes;
            if (comes && fabric_transport.arm(e[1].self, &fd) == DDL_OK) {
                struct pollfd wait = {.fd = fd, .events = POLLIN};
                CHECK_EQ(poll(&wait, 1, 1000), 1);
            }
            CHECK(test_now_s() - since < 1 * test_slow());
        }
        CHECK_EQ(e[1].arrived[0], i);
        DRIVE(e, 2, l.returned == l.borrowed) {}
        letter_free(&l);
    }
    CHECK(asked > 0);
    CHECK(self_of(&e[1])->peers[0].link->pulled >= 20);
    world_end(e, 2);
}

/* A rank that sleeps is woken by a peer that it has no connection to. */
TEST(a_rank_that_is_called_is_woken) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, NULL, NULL);
    letter l;
    int fd = -1;
    progress_all(e, 2);
    CHECK_EQ(fabric_transport.arm(e[1].self, &fd), DDL_OK);
    post(&e[0], 1, &l, 8);
    fabric_transport.progress(e[0].self, -1);
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    CHECK_EQ(poll(&wait, 1, 5000), 1);
    CHECK(!self_of(&e[1])->ticking);
    DRIVE(e, 2, e[1].arrived[0] == 1) {}
    letter_free(&l);
    world_end(e, 2);
}

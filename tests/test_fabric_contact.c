/* The libfabric plugin: first contact. A peer that cannot be called is given up in time (plugins/fabric/connect.h), one that computes is not,
 * and one that is not reached is named.
 * tests/run: variants=gcc,asan,valgrind timeout=60 quick=yes */
#include "fabric_host.h"

/* A network that is away for two seconds, or a rank without a free descriptor, ends no link; and of one that is away for longer the core
 * hears that there never was a connection, not that the host is gone. */
TEST(a_call_in_vain_is_made_again_for_seconds) {
    NEED_LIBFABRIC();
    static const struct {
        int error, told;
        uint64_t patience;
    } calls[] = {{EHOSTUNREACH, ENOTCONN, 3500000000u}, {ENETUNREACH, ENOTCONN, 3500000000u}, {EMFILE, ENOTCONN, 3500000000u},
                 {ECONNREFUSED, ECONNREFUSED, 1000000000u}};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        endpoint *e = world_open(2, NULL, NULL);
        fabric_link *l = fabric_link_of(e[0].self, 1);
        fabric_way *w = &l->way[FABRIC_WORDS];
        e[0].host.now_ns = standing_now_ns;
        standing_ns = mini_now_ns(&e[0].host);
        for (int k = 0; k < 2 * FABRIC_CALLS; k++) {
            fabric_way_failed(e[0].self, w, calls[i].error);
        }
        standing_ns += calls[i].patience - 1;
        fabric_way_failed(e[0].self, w, calls[i].error);
        CHECK_EQ(l->broken, 0);
        standing_ns += 3600 * 1000000000ull; /* nothing was to be sent for an hour: it begins anew */
        fabric_way_is_open(e[0].self, w);
        fabric_way_failed(e[0].self, w, calls[i].error);
        CHECK_EQ(l->broken, 0);
        CHECK_EQ(w->failures, 1);
        standing_ns += calls[i].patience;
        fabric_way_failed(e[0].self, w, calls[i].error); /* however few there were */
        DRIVE(e, 1, e[0].lost[1] == 1) {}
        CHECK_EQ(e[0].lost_error[1], calls[i].told);
        CHECK_EQ(e[0].warnings, calls[i].error == EMFILE); /* of what is ours alone the core says nothing */
        e[0].host.now_ns = mini_now_ns;
        world_end(e, 2);
    }
}

/* Each call fails after seconds, as where a host does not answer ARP; or at once, and the rank looks every few seconds. */
static void calls_in_vain(uint64_t call_ns, uint64_t pause_ns) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, NULL, NULL);
    letter l;
    e[0].host.now_ns = standing_now_ns;
    standing_ns = mini_now_ns(&e[0].host);
    post(&e[0], 1, &l, 8);
    fabric_way *w = &self_of(&e[0])->peers[1].link->way[FABRIC_WORDS];
    int calls = 0;
    for (uint64_t begun = standing_ns; e[0].lost[1] == 0 && standing_ns - begun < 20000000000u; calls++) {
        CHECK_EQ(w->strand[0].state, FABRIC_CALLING);
        standing_ns += call_ns;
        fabric_way_failed(e[0].self, w, EHOSTUNREACH);
        standing_ns += pause_ns;
        progress_all(e, 1);
    }
    REQUIRE(e[0].lost[1] == 1);
    CHECK(calls > 1 && calls < 4);
    CHECK_EQ(e[0].lost_error[1], ENOTCONN);
    e[0].host.now_ns = mini_now_ns;
    letter_free(&l);
    world_end(e, 2);
}

TEST(calls_that_fail_slowly) { calls_in_vain(3000000000u, 100000000u); }
TEST(calls_in_vain_of_a_rank_that_looks_rarely) { calls_in_vain(0, 2000000000u); }

/* A listener that is busy beyond its queue answers no call, as a firewall that drops. */
static int deaf_listener(struct sockaddr_in *at) {
    socklen_t bytes = sizeof *at;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    *at = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    CHECK(fd >= 0 && bind(fd, (struct sockaddr *)at, bytes) == 0 && listen(fd, 0) == 0);
    CHECK_EQ(getsockname(fd, (struct sockaddr *)at, &bytes), 0);
    return fd;
}

/* So it is where each message is taken back after a second, and another is sent. */
TEST(calls_in_vain_for_messages_that_are_taken_back) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, NULL, NULL);
    e[0].host.now_ns = standing_now_ns;
    standing_ns = mini_now_ns(&e[0].host);
    struct sockaddr_in at;
    letter l[20];
    int sent = 0, listener = deaf_listener(&at);
    memcpy(self_of(&e[0])->peers[1].names, &at, sizeof at);
    for (; sent < 20 && e[0].lost[1] == 0; sent++) {
        if (post(&e[0], 1, &l[sent], 8) == DDL_IN_PROGRESS) {
            standing_ns += 100000000u;
            progress_all(e, 1);
            standing_ns += 800000000u;
            fabric_way_failed(e[0].self, &self_of(&e[0])->peers[1].link->way[FABRIC_WORDS], EHOSTUNREACH);
            fabric_transport.recall(e[0].self, 1, &l[sent].message);
        }
        free(l[sent].payload);
        progress_all(e, 1);
    }
    CHECK_EQ(e[0].lost[1], 1);
    CHECK(sent >= 4 && sent < 8);
    e[0].host.now_ns = mini_now_ns;
    close(listener);
    world_end(e, 2);
}

static void not_answered(uint64_t bytes, double after_s) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, NULL, NULL);
    struct sockaddr_in at;
    letter l;
    int listener = deaf_listener(&at), full = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK_EQ(connect(full, (struct sockaddr *)&at, sizeof at), 0);
    memcpy(self_of(&e[0])->peers[1].names, &at, sizeof at);
    double start = test_now_s();
    post(&e[0], 1, &l, bytes);
    DRIVE(e, 1, e[0].lost[1] == 1) {}
    double took = test_now_s() - start;
    CHECK(took >= after_s && took < after_s + 1.5 * test_slow());
    CHECK_EQ(e[0].lost_error[1], ENOTCONN);
    CHECK_STR(e[0].log, "no connection of tcp to rank 1 comes about: Connection timed out");
    close(full);
    close(listener);
    letter_free(&l);
    world_end(e, 2);
}

TEST(a_peer_whose_host_does_not_answer_is_given_up) { not_answered(8, 3.5); }
TEST(and_so_is_one_that_a_payload_is_for) { not_answered(1 << 20, 4.5); } /* for a second a connection of its own is tried */

/* More may call one rank that computes than its kernel has room for: who is not answered may be one of those. */
TEST(in_a_job_of_many_ranks_nobody_is_late) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, NULL, NULL);
    fabric_self *s = self_of(&e[0]);
    struct sockaddr_in at;
    letter l;
    int listener = deaf_listener(&at), full = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK_EQ(connect(full, (struct sockaddr *)&at, sizeof at), 0);
    memcpy(s->peers[1].names, &at, sizeof at);
    post(&e[0], 1, &l, 8);
    fabric_way *w = &s->peers[1].link->way[FABRIC_WORDS];
    int32_t ranks = s->world_size;
    s->world_size = FABRIC_QUEUED + 1;
    CHECK(!fabric_way_is_late(s, w, w->called_ns + 60000000000u));
    s->world_size = FABRIC_QUEUED;
    CHECK(fabric_way_is_late(s, w, w->called_ns + 60000000000u));
    s->world_size = ranks;
    fabric_transport.recall(e[0].self, 1, &l.message);
    free(l.payload);
    close(full);
    close(listener);
    world_end(e, 2);
}

/* A call that is not answered was for a message that was taken back: one for another, much later, has its own time. */
TEST(a_call_of_another_time_is_made_again) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, NULL, NULL);
    struct sockaddr_in at;
    uint8_t name[sizeof at];
    letter l, next;
    int listener = deaf_listener(&at), full = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK_EQ(connect(full, (struct sockaddr *)&at, sizeof at), 0);
    memcpy(name, self_of(&e[0])->peers[1].names, sizeof at);
    memcpy(self_of(&e[0])->peers[1].names, &at, sizeof at);
    post(&e[0], 1, &l, 8);
    fabric_transport.recall(e[0].self, 1, &l.message);
    memcpy(self_of(&e[0])->peers[1].names, name, sizeof at); /* the network is there again */
    e[0].host.now_ns = standing_now_ns;
    standing_ns = mini_now_ns(&e[0].host) + 50000000000u;
    post(&e[0], 1, &next, 8);
    e[0].host.now_ns = mini_now_ns;
    self_of(&e[0])->peers[1].link->way[FABRIC_WORDS].retry_ns = 0;
    e[1].next[0] = 1;
    DRIVE(e, 2, e[1].arrived[0] == 1 || e[0].lost[1] == 1) {}
    CHECK_EQ(e[0].lost[1], 0);
    close(full);
    close(listener);
    free(l.payload);
    letter_free(&next);
    world_end(e, 2);
}

/* Its kernel has answered, and it computes for an hour. The higher rank is refused then, where both have called. */
static void computing(int who) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, NULL, NULL);
    letter l, back;
    int other = !who;
    post(&e[who], other, &l, 8);
    fabric_way *w = &self_of(&e[who])->peers[other].link->way[FABRIC_WORDS];
    e[who].host.now_ns = standing_now_ns;
    standing_ns = mini_now_ns(&e[who].host);
    fabric_way_failed(e[who].self, w, EHOSTUNREACH); /* the network was away for a moment */
    for (int i = 0; i < 3600; i++) {
        standing_ns += i < 100 ? 20000000u : 1000000000u;
        progress_all(&e[who], 1);
    }
    CHECK_EQ(w->strand[0].state, FABRIC_CALLING);
    CHECK_EQ(e[who].lost[other], 0);
    if (who > other) {
        fabric_way_failed(e[who].self, w, ECONNREFUSED);
        CHECK_EQ(w->link->broken, 0);
    }
    post(&e[other], who, &back, 8);
    DRIVE(e, 2, (e[other].arrived[who] == 1 && e[who].arrived[other] == 1) || e[who].lost[other] + e[other].lost[who] > 0) {
        standing_ns += 1000000u;
    }
    CHECK_EQ(e[who].lost[other] + e[other].lost[who], 0);
    e[who].host.now_ns = mini_now_ns;
    letter_free(&l);
    letter_free(&back);
    world_end(e, 2);
}

TEST(a_peer_that_computes_is_not_given_up) { computing(0); }
TEST(nor_is_one_that_refuses_after_it_computed) { computing(1); }

/* A peer that does not take a first message for 20 s is named once, with what may be wrong, and is not lost. */
static void not_reached(const char *setting, const char *sentence) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, setting, NULL);
    letter l;
    post(&e[0], 1, &l, 60000);
    fabric_link *link = self_of(&e[0])->peers[1].link;
    DRIVE(e, 1, link->send_stall.looked_ns != 0) {} /* rank 1 does not look */
    CHECK(strstr(e[0].log, "has no connection") == NULL);
    link->send_stall.waited_ns += FABRIC_UNHEARD_NS;
    DRIVE(e, 1, self_of(&e[0])->told_unheard) {}
    const char *said = strstr(e[0].log, "rank 0 has no connection to rank 1");
    CHECK(said != NULL && strstr(said, sentence) != NULL && strstr(said + 20, "has no connection") == NULL);
    DRIVE(e, 2, e[1].arrived[0] == 1 && l.returned == l.borrowed) {}
    CHECK_EQ(e[0].lost[1] + e[1].lost[0], 0);
    letter_free(&l);
    world_end(e, 2);
}

TEST(a_peer_that_is_not_reached_is_named) { not_reached(NULL, "DDL_PORT_RANGE"); }
TEST(a_peer_that_an_adapter_does_not_reach_is_named) { not_reached("FABRIC_FORCE_MR=local", "UDP port 4791"); }

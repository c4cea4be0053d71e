/* Messages of the shared-memory transport against a small host: content and order of all sizes and by each way,
 * back-pressure, sleep, recall and redirection, damage, deaths.
 * tests/run: variants=gcc,asan,tsan timeout=150 */
#define _GNU_SOURCE 1
#include "shm_host.h"

/* What a file takes. */
static int64_t fd_bytes(int fd) {
    struct stat s;
    CHECK_EQ(fstat(fd, &s), 0);
    return (int64_t)s.st_blocks * 512;
}

/* ---- messages ---- */

static const uint64_t sizes[] = {0, 1, 8, 9, 47, 48, 49, 1023, 1024, 2048, 2049, 4096, 4097, 8192, 12288, 12289, 16384, 16385, 65536, 0, 65537, 300001, 1 << 20, 3};
enum { SIZES = sizeof sizes / sizeof sizes[0] };

/* All to all: each rank has all its letters under way before anybody reads. lent: from tensor memory. */
static void exchange(int n, const char *first, const char *second, int lent) {
    static endpoint e[RANKS];
    static letter l[RANKS][RANKS][SIZES];
    int before = fd_count();
    world_open_as(e, n, first, second);
    for (int i = 0; i < n * n * SIZES; i++) {
        int from = i % n, to = i / n % n, k = i / n / n;
        void *memory = NULL;
        if (from != to) {
            CHECK(!lent || e[from].transport->memory_alloc(e[from].self, sizes[k], &memory) == DDL_OK);
            CHECK(post_in(&e[from], to, &l[from][to][k], sizes[k], memory) >= 0);
        }
    }
    uint64_t done = 0;
    DRIVE(e, n, done == (uint64_t)(n * (n - 1)) * SIZES) {
        done = 0;
        for (int i = 0; i < n * n; i++) {
            done += e[i / n].arrived[i % n];
        }
    }
    progress_all(e, n);
    for (int i = 0; i < n * n; i++) {
        for (int k = 0; i / n != i % n && k < SIZES; k++) {
            letter *one = &l[i / n][i % n][k];
            letter_free(one);
            CHECK(!one->borrowed || one->status == DDL_OK);
            if (lent) {
                e[i / n].transport->memory_free(e[i / n].self, one->payload);
            }
        }
        CHECK_EQ(e[i / n].lost[i % n], 0);
    }
    world_close(e, n);
    CHECK_EQ(fd_count(), before);
}

TEST(all_sizes_both_ways_fetched) { exchange(2, NULL, NULL, 0); }
TEST(all_sizes_both_ways_streamed) { exchange(2, "SHM_CMA=0", NULL, 0); }
TEST(all_sizes_both_ways_from_lent_memory) { exchange(2, NULL, NULL, 1); }
TEST(all_sizes_both_ways_through_small_rings) { exchange(2, "SHM_CMA=0", "SHM_RING_BYTES=16K", 0); }
TEST(eight_ranks_all_to_all_fetched) { exchange(RANKS, NULL, NULL, 0); }
TEST(eight_ranks_all_to_all_streamed) { exchange(RANKS, "SHM_CMA=0", "SHM_RING_BYTES=16K", 0); }
TEST(eight_ranks_all_to_all_from_lent_memory) { exchange(RANKS, NULL, "SHM_RING_BYTES=16K", 1); }

/* Writes one where the peer finds it. Returns what reserve said. */
static ddl_status put(endpoint *e, int peer, uint64_t bytes) {
    uint8_t *header = NULL;
    void *payload = NULL;
    ddl_status status = e->transport->reserve(e->self, peer, bytes, &header, &payload);
    if (status == DDL_OK) {
        uint64_t words[6] = {bytes, e->sent_number[peer]++, (uint64_t)e->rank};
        memcpy(header, words, sizeof words);
        for (uint64_t i = 0; i < bytes; i++) {
            ((uint8_t *)payload)[i] = pattern(words[1], (uint64_t)e->rank, i);
        }
        e->transport->publish(e->self, peer, bytes);
    }
    return status;
}

/* Whether a message of so many bytes comes as one record, which peek gives whole. `ring`: a setting, or NULL. */
static void comes_whole(uint64_t bytes, const char *ring, bool whole) {
    static endpoint e[2];
    letter first, second;
    const uint8_t *header = NULL;
    const void *payload = NULL;
    uint64_t got = 0;
    world_open_as(e, 2, ring, NULL);
    CHECK(post(&e[0], 1, &first, 8) >= 0);
    DRIVE(e, 2, e[1].arrived[0] == 1) {} /* the ring is known now */
    CHECK(post(&e[0], 1, &second, bytes) >= 0);
    ddl_status status = e[1].transport->peek(e[1].self, 0, 1, &header, &payload, &got);
    CHECK_EQ(status, whole ? DDL_OK : DDL_ERR_STATE);
    CHECK(!whole || got == bytes);
    DRIVE(e, 2, e[1].arrived[0] == 2) {}
    letter_free(&first);
    letter_free(&second);
    world_close(e, 2);
}

TEST(up_to_8_kib_come_in_one_record_and_no_more_than_an_eighth_of_the_ring) {
    comes_whole(8192, NULL, true);
    comes_whole(8193, NULL, false);
    comes_whole(2048, "SHM_RING_BYTES=16K", true);
    comes_whole(2049, "SHM_RING_BYTES=16K", false);
}

/* A message that is copied into the ring is the receiver's at once; one that is read stays the sender's. */
static void is_copied(int n, const char *ring, uint64_t bytes, bool copied) {
    static endpoint e[RANKS];
    letter first, second;
    world_open_as(e, n, ring, NULL);
    CHECK(post(&e[0], 1, &first, 8) >= 0);
    DRIVE(e, n, e[1].arrived[0] == 1) {} /* it has said by now that it can read ours */
    uint64_t before = shm_link_of(e[0].self, 1)->out.moved;
    ddl_status status = post(&e[0], 1, &second, bytes);
    if (shm_control(e[0].self, 1)->pulls[0] != SHM_PULLS) {
        letter_free(&first);
        DRIVE(e, n, e[1].arrived[0] == 2) {}
        letter_free(&second);
        world_close(e, n);
        SKIP("no process may read another's memory here");
    }
    CHECK_EQ(shm_link_of(e[0].self, 1)->out.moved - before > 4096, copied);
    CHECK(copied || status == DDL_IN_PROGRESS);
    DRIVE(e, n, e[1].arrived[0] == 2 && (status == DDL_OK || second.returned)) {}
    letter_free(&first);
    letter_free(&second);
    world_close(e, n);
}

TEST(up_to_128_kib_of_two_ranks_and_64_of_more_are_copied) {
    is_copied(2, NULL, 128 << 10, true);
    is_copied(2, NULL, (128 << 10) + 1, false);
    is_copied(2, "SHM_RING_BYTES=64K", 64 << 10, true);
    is_copied(2, "SHM_RING_BYTES=64K", (64 << 10) + 1, false);
    is_copied(3, NULL, 64 << 10, true);
    is_copied(3, NULL, (64 << 10) + 1, false);
    is_copied(3, "SHM_RING_BYTES=1M", (64 << 10) + 1, false);
}

/* What is written in place comes in its turn among what is sent, round the end of the ring, and never overtakes what
 * waits for room. */
TEST(what_is_written_in_place_keeps_its_turn) {
    enum { TIMES = 5000 };
    static endpoint e[2];
    static letter l[TIMES];
    uint64_t placed = 0, refused = 0;
    world_open_as(e, 2, "SHM_RING_BYTES=16K", NULL);
    for (int i = 0; i < TIMES; i++) {
        uint64_t bytes = (uint64_t)i * 37 % 1100;
        ddl_status status = put(&e[0], 1, bytes);
        placed += status == DDL_OK;
        refused += status != DDL_OK;
        CHECK(status == DDL_OK || bytes < 1024 || status == DDL_IN_PROGRESS);
        CHECK(post(&e[0], 1, &l[i], (uint64_t)i * 91 % 600) >= 0);
        if (i % 50 == 49) { /* meanwhile the ring has become full */
            DRIVE(e, 2, e[1].arrived[0] == placed + (uint64_t)i + 1) {}
        }
    }
    CHECK(placed > TIMES / 10);
    CHECK(refused > TIMES / 10);
    CHECK_EQ(e[1].arrived[0], placed + TIMES);
    CHECK_EQ(e[1].bad, 0);
    for (int i = 0; i < TIMES; i++) {
        letter_free(&l[i]);
    }
    e[0].transport->peer_dead(e[0].self, 1);
    CHECK(put(&e[0], 1, 8) != DDL_OK);
    world_close(e, 2);
}

/* send() from inside deliver() and landed(): the way a core answers a request. */
TEST(answers_from_within_a_host_function) {
    for (int way = 0; way < 2; way++) {
        static endpoint e[2];
        letter l[DEPTH];
        world_open_as(e, 2, way == 0 ? NULL : "SHM_CMA=0", NULL);
        e[1].echo = 1;
        for (int i = 0; i < DEPTH; i++) {
            CHECK(post(&e[0], 1, &l[i], sizes[i % SIZES]) >= 0);
        }
        DRIVE(e, 2, e[0].arrived[1] == DEPTH) {}
        for (int i = 0; i < 4; i++) {
            progress_all(e, 2);
        }
        for (int i = 0; i < DEPTH; i++) {
            letter_free(&l[i]);
        }
        world_close(e, 2);
    }
}

/* The receiver does nothing: send() comes back at once, the memory stays borrowed, and there is nothing to wake for. */
static void stuck_receiver(const char *setting) {
    static endpoint e[2];
    static letter l[DEPTH];
    world_open_as(e, 2, setting, NULL);
    for (int i = 0; i < DEPTH; i++) {
        CHECK_EQ(post(&e[0], 1, &l[i], 1 << 20), DDL_IN_PROGRESS);
    }
    for (int i = 0; i < 100; i++) {
        e[0].transport->progress(e[0].self, 1);
    }
    CHECK_EQ(e[0].returned, 0);
    CHECK_EQ(sleep_all(e, 1, 30), 0);
    DRIVE(e, 2, e[1].arrived[0] == DEPTH && l[DEPTH - 1].returned) {}
    for (int i = 0; i < DEPTH; i++) {
        letter_free(&l[i]);
    }
    world_close(e, 2);
}

TEST(a_stuck_receiver_holds_the_sender_up_without_blocking_it) { stuck_receiver(NULL); }
TEST(a_stuck_receiver_of_streams_does_too) { stuck_receiver("SHM_CMA=0"); }

/* Nobody polls: each side is woken by what the other does, and by nothing else. */
static void sleepers(const char *setting) {
    static endpoint e[2];
    static letter l[DEPTH];
    struct pollfd fd[2] = {{.events = POLLIN}, {.events = POLLIN}};
    world_open_as(e, 2, setting, NULL);
    CHECK_EQ(sleep_all(e, 2, 30), 0);
    for (int i = 0; i < 8; i++) {
        post(&e[0], 1, &l[i], i % 2 == 0 ? 8 : 1 << 20);
    }
    for (int turns = 0; e[1].arrived[0] < 8 || !l[7].returned; turns++) {
        REQUIRE(turns < 10000);
        ddl_status armed[2];
        for (int i = 0; i < 2; i++) {
            armed[i] = e[i].transport->arm(e[i].self, &fd[i].fd);
        }
        bool sleeps = armed[0] == DDL_OK && armed[1] == DDL_OK;
        REQUIRE(poll(fd, 2, sleeps ? 2000 : 0) > 0 || !sleeps); /* else both sleep for ever */
        for (int i = 0; i < 2; i++) {
            if (fd[i].revents != 0 || armed[i] != DDL_OK) {
                e[i].transport->progress(e[i].self, -1);
            }
        }
    }
    while (progress_all(e, 2) > 0) {
    }
    CHECK_EQ(sleep_all(e, 2, 30), 0);
    for (int i = 0; i < 8; i++) {
        letter_free(&l[i]);
    }
    world_close(e, 2);
}

TEST(sleepers_are_woken_when_something_is_fetched) { sleepers(NULL); }
TEST(sleepers_are_woken_when_there_is_room) { sleepers("SHM_CMA=0"); }

/* Whoever reads /proc/net/unix knows the names of the bells; ringing takes the token. */
TEST(a_stranger_cannot_wake_anybody) {
    static endpoint e[2];
    world_open(e, 2);
    shm *t = e[0].self;
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct sockaddr_un name;
    socklen_t name_bytes = shm_bell_name(&t->address, &name);
    CHECK_EQ(sleep_all(e, 1, 0), 0);
    for (size_t bytes = 0; bytes < 64; bytes++) {
        uint8_t text[64];
        memcpy(text, shm_head(t)->bell_token, 16);
        memset(text + 16, 0, sizeof text - 16);
        text[bytes % 16] ^= bytes == 16; /* the right length with one wrong byte, and the token with other lengths */
        sendto(fd, text, bytes, MSG_DONTWAIT, (struct sockaddr *)&name, name_bytes);
    }
    CHECK_EQ(sleep_all(e, 1, 30), 0);
    sendto(fd, shm_head(t)->bell_token, 16, MSG_DONTWAIT, (struct sockaddr *)&name, name_bytes);
    CHECK_EQ(sleep_all(e, 1, 1000), 1); /* the filter does let the token through */
    close(fd);
    world_close(e, 2);
}

TEST(peer_dead_gives_everything_back) {
    for (int way = 0; way < 2; way++) {
        static endpoint e[3];
        letter l[DEPTH], other, later;
        world_open_as(e, 3, way == 0 ? NULL : "SHM_CMA=0", NULL);
        for (int i = 0; i < DEPTH; i++) {
            CHECK(post(&e[0], 1, &l[i], 1 << 20) >= 0);
        }
        for (int i = 0; i < 3; i++) {
            e[1].transport->progress(e[1].self, -1);
            e[0].transport->progress(e[0].self, -1);
        }
        CHECK_EQ(e[1].open_landings, way); /* a stream is in the middle */
        e[0].transport->peer_dead(e[0].self, 1);
        e[1].transport->peer_dead(e[1].self, 0);
        CHECK_EQ(e[1].landing_failed[0], way);
        int failed = 0;
        for (int i = 0; i < DEPTH; i++) {
            failed += l[i].returned && l[i].status == DDL_ERR_PEER;
            letter_free(&l[i]);
        }
        CHECK(failed > 0);
        CHECK_EQ(post(&e[0], 1, &later, 5), DDL_ERR_PEER);
        letter_free(&later);
        post(&e[0], 2, &other, 5);
        DRIVE(e, 3, e[2].arrived[0] == 1) {}
        letter_free(&other);
        CHECK_EQ(e[0].lost[1] + e[1].lost[0] + e[0].lost[2] + e[2].lost[0], 0);
        world_close(e, 3);
    }
}

/* A rank that finishes early: what it sent comes first, large ones from a copy, then the news, once, without error. */
TEST(words_sent_before_close_arrive_before_the_loss) {
    static endpoint e[2];
    letter l[6];
    world_open(e, 2);
    for (int i = 0; i < 6; i++) {
        CHECK(post(&e[0], 1, &l[i], i % 2 == 0 ? 100 : 1 << 20) >= 0);
    }
    endpoint_close(&e[0]);
    for (int i = 0; i < 6; i++) {
        letter_free(&l[i]); /* scribbled over: nobody may read it any more */
    }
    DRIVE(e + 1, 1, e[1].lost[0] > 0) {}
    CHECK_EQ(e[1].arrived[0], 6);
    CHECK_EQ(e[1].lost[0], 1);
    CHECK_EQ(e[1].lost_error[0], 0);
    endpoint_close(&e[1]);
}

TEST(close_does_not_wait) {
    static endpoint e[2];
    static letter l[DEPTH];
    world_open_as(e, 2, "SHM_CMA=0", NULL);
    for (int i = 0; i < DEPTH; i++) {
        CHECK_EQ(post(&e[0], 1, &l[i], 1 << 20), DDL_IN_PROGRESS);
    }
    endpoint_close(&e[0]);
    for (int i = 0; i < DEPTH; i++) {
        CHECK(l[i].status == DDL_ERR_CANCELLED);
        letter_free(&l[i]);
    }
    DRIVE(e + 1, 1, e[1].lost[0] > 0) {} /* in the middle of a stream: what was landing failed */
    CHECK_EQ(e[1].landing_failed[0], 1);
    endpoint_close(&e[1]);
}

static void damage(uint64_t bytes) {
    static endpoint e[2];
    letter l[3];
    world_open(e, 2);
    e[1].refuse = 1;
    for (int i = 0; i < 3; i++) {
        post(&e[0], 1, &l[i], bytes);
    }
    DRIVE(e, 2, e[1].lost[0] == 1 && e[0].lost[1] == 1) {}
    CHECK_EQ(e[1].lost_error[0], EBADMSG);
    CHECK_EQ(e[1].arrived[0], 0);
    for (int i = 0; i < 3; i++) {
        letter_free(&l[i]);
    }
    world_close(e, 2);
}

TEST(a_damaged_header_ends_the_link) { damage(1000); }
TEST(a_damaged_header_of_a_large_one_ends_the_link) { damage(1 << 20); }

/* A peer out of its mind writes over the ring that it shares with this rank. */
TEST(a_scribbled_ring_ends_the_link_and_no_more) {
    for (int what = 0; what < 7; what++) {
        static endpoint e[3];
        letter first, l, other;
        world_open(e, 3);
        post(&e[0], 1, &first, 8);
        DRIVE(e, 3, e[1].arrived[0] == 1) {}
        shm_ring_end *out = &shm_link_of(e[0].self, 1)->out;
        uint64_t *next = (uint64_t *)(void *)(out->ring->records + out->place);
        uint64_t skip = (uint64_t)SHM_RING_SKIP << 32;
        *(uint64_t *)(void *)out->ring->records = skip | 64; /* at the start there is nothing to skip */
        switch (what) {
        case 0: *next = (uint64_t)SHM_EAGER << 32 | 20; break;  /* shorter than a header */
        case 1: *next = (uint64_t)SHM_PIECE << 32 | 80; break;  /* of nothing */
        case 2: *next = (uint64_t)77 << 32 | 80; break;         /* no kind */
        case 3: *next = (uint64_t)SHM_LINED << 32 | 60; break;  /* ends before its payload would begin */
        case 4: *next = (uint64_t)SHM_FETCH << 32 | 30; break;  /* too short */
        case 5: *next = skip | 64; break;                       /* not to the end */
        default: *next = skip | (out->capacity - out->place); break;
        }
        DRIVE(e, 3, e[1].lost[0] == 1) {}
        CHECK_EQ(e[1].lost_error[0], EBADMSG);
        CHECK_EQ(post(&e[1], 0, &l, 8), DDL_ERR_PEER);
        letter_free(&l);
        post(&e[2], 1, &other, 8);
        DRIVE(e, 3, e[1].arrived[2] == 1) {}
        letter_free(&first);
        letter_free(&other);
        world_close(e, 3);
    }
}

/* A place or an address that the peer has no business with. */
TEST(a_payload_that_is_nowhere_ends_the_link) {
    static endpoint e[2];
    letter l;
    world_open(e, 2);
    post(&e[0], 1, &l, 1 << 20);
    shm_fetch *record = (shm_fetch *)(uintptr_t)l.message.priv[SHM_NOTE_RECORD];
    record->lent = 1;
    record->at = ((shm *)e[0].self)->segment_bytes - 4096; /* goes beyond the end */
    DRIVE(e, 2, e[1].lost[0] == 1 && l.returned) {}
    CHECK_EQ(e[1].landing_failed[0], 1);
    letter_free(&l);
    world_close(e, 2);
}

TEST(a_payload_that_nobody_wants_is_skipped) {
    static endpoint e[2];
    letter l[SIZES];
    world_open(e, 2);
    e[1].discard = 1;
    for (int i = 0; i < SIZES; i++) {
        post(&e[0], 1, &l[i], sizes[i]);
    }
    DRIVE(e, 2, e[1].arrived[0] == SIZES) {}
    progress_all(e, 2);
    for (int i = 0; i < SIZES; i++) {
        letter_free(&l[i]);
    }
    world_close(e, 2);
}

/* ---- taking back ---- */

static endpoint *recalled_at;
static letter *recalled_letter;

static void recall_now(void) {
    recalled_at->transport->recall(recalled_at->self, 1, &recalled_letter->message);
    recalled_letter->borrowed = 0; /* and letter_free checks that sent() is not called */
    memset(recalled_letter->payload, 0xdd, recalled_letter->message.payload_bytes);
    memset(&recalled_letter->message, 0xdd, sizeof recalled_letter->message);
}

TEST(recall_while_the_peer_is_fetching) {
    static endpoint e[2];
    letter l[3];
    world_open(e, 2);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(post(&e[0], 1, &l[i], 1 << 20), DDL_IN_PROGRESS);
    }
    recalled_at = &e[0];
    recalled_letter = &l[0];
    faults.at_read = recall_now; /* the first half is copied, then the rest is written over */
    DRIVE(e, 2, e[1].arrived[0] == 3 && l[2].returned) {}
    CHECK(faults.at_read == NULL);
    for (int i = 0; i < 3; i++) {
        letter_free(&l[i]);
    }
    world_close(e, 2);
}

static void recall_queued(uint64_t bytes, const char *setting, int lent) {
    enum { LETTERS = 200 };
    static endpoint e[2];
    static letter l[LETTERS];
    world_open_as(e, 2, setting, "SHM_RING_BYTES=16K");
    int count = 0;
    for (int i = 0; i < LETTERS; i++) {
        void *memory = NULL;
        CHECK(!lent || e[0].transport->memory_alloc(e[0].self, bytes, &memory) == DDL_OK);
        ddl_status status = post_in(&e[0], 1, &l[i], bytes, memory);
        CHECK(status == DDL_IN_PROGRESS || (status == DDL_OK && i == 0 && bytes < 16 << 10)); /* the ring takes one */
        count += status == DDL_OK || l[i].message.priv[SHM_NOTE_END] > 0 || l[i].message.priv[SHM_NOTE_DONE] > 0;
    }
    CHECK(count > 0 && count < LETTERS); /* some are in the ring or begun: those must still arrive */
    for (int i = 0; i < LETTERS; i++) {
        recalled_at = &e[0];
        recalled_letter = &l[i];
        if (l[i].borrowed) {
            recall_now();
        }
    }
    DRIVE(e, 2, e[1].arrived[0] == (uint64_t)count) {}
    progress_all(e, 2);
    CHECK(shm_link_of(e[0].self, 1)->fetched.first == NULL && shm_link_of(e[0].self, 1)->waiting.first == NULL);
    for (int i = 0; i < LETTERS; i++) {
        if (lent) {
            e[0].transport->memory_free(e[0].self, l[i].payload);
        }
        letter_free(&l[i]);
    }
    world_close(e, 2);
}

TEST(recall_of_what_waits_to_be_fetched) { recall_queued(100000, NULL, 0); }
TEST(recall_of_lent_memory) { recall_queued(100000, NULL, 1); }
TEST(recall_of_a_stream) { recall_queued(100000, "SHM_CMA=0", 0); }
TEST(recall_of_two_pieces) { recall_queued(8192, NULL, 0); }

static uint64_t nothing_left(const ddl_host *host) {
    (void)host;
    return 0;
}

/* The container has no room for a copy of what is taken back: it is not written, which would kill the rank. */
static void recall_in_a_full_container(uint64_t bytes) {
    static endpoint e[2];
    letter l;
    world_open_as(e, 2, "SHM_RING_BYTES=16K", NULL);
    CHECK_EQ(post(&e[0], 1, &l, bytes), DDL_IN_PROGRESS);
    int64_t before = fd_bytes(((shm *)e[0].self)->fd);
    e[0].host.memory_left = nothing_left;
    recalled_at = &e[0];
    recalled_letter = &l;
    recall_now();
    CHECK_EQ(fd_bytes(((shm *)e[0].self)->fd), before);
    DRIVE(e, 2, e[0].lost[1] == 1 && e[1].lost[0] == 1) {}
    letter_free(&l);
    world_close(e, 2);
}

TEST(recall_in_a_container_that_is_full) {
    recall_in_a_full_container(4 << 20);
    recall_in_a_full_container(100000);
}

/* There is no memory for the copy: the link is given up, but not from inside the recall, as the core is in the middle of
 * taking back its other messages. */
static void recall_without_memory(const char *setting) {
    enum { LETTERS = 6, BYTES = 100000 };
    static endpoint e[2];
    letter l[LETTERS], late;
    world_open_as(e, 2, setting, "SHM_RING_BYTES=16K");
    for (int i = 0; i < LETTERS; i++) {
        CHECK_EQ(post(&e[0], 1, &l[i], BYTES), DDL_IN_PROGRESS);
    }
    e[0].fail_alloc = e[0].allocs + 1;
    recalled_at = &e[0];
    recalled_letter = &l[0];
    recall_now();
    CHECK_EQ(e[0].fail_alloc, e[0].allocs); /* it was asked for */
    CHECK_EQ(e[0].lost[1], 0);
    CHECK_EQ(e[0].returned, 0);
    CHECK_EQ(post(&e[0], 1, &late, 8), DDL_ERR_PEER);
    recalled_letter = &l[LETTERS - 1];
    recall_now();
    DRIVE(e, 2, e[0].lost[1] == 1 && e[1].lost[0] == 1) {}
    CHECK_EQ(e[0].returned, LETTERS - 2);
    for (int i = 1; i < LETTERS - 1; i++) {
        CHECK_EQ(l[i].status, DDL_ERR_PEER);
    }
    CHECK_EQ(e[1].arrived[0], 0);
    for (int i = 0; i < LETTERS; i++) {
        letter_free(&l[i]);
    }
    letter_free(&late);
    world_close(e, 2);
}

TEST(recall_without_memory_for_a_copy) { recall_without_memory(NULL); }
TEST(recall_of_a_stream_without_memory) { recall_without_memory("SHM_CMA=0"); }

/* ---- places that are used anew ---- */

/* A ring that is full but for its last line: `fetched` messages that the peer reads by itself, then small ones, then one
 * of `lines` lines, which will lie over the record of the last that is fetched. */
enum { AGAIN_SMALL = 300 };

typedef struct again {
    endpoint e[2];
    letter first, fetched[2], small[AGAIN_SMALL], over;
    int fetches, smalls;
    uint8_t *record; /* of the last that is fetched */
    bool zeros; /* the last message is made of them, since it waits: nothing else may be found there */
    uint64_t over_bytes, wrong;
} again;

static again *again_now;

static ddl_status again_deliver(const ddl_host *host, int32_t peer, const uint8_t *header, const void *payload,
                                uint64_t bytes) {
    endpoint *e = of(host);
    e->discard = again_now->zeros && bytes == again_now->over_bytes; /* its pattern is not looked at */
    for (uint64_t i = 0; e->discard && i < bytes; i++) {
        again_now->wrong += ((const uint8_t *)payload)[i] != 0;
    }
    ddl_status status = mini_deliver(host, peer, header, payload, bytes);
    e->discard = 0;
    return status;
}

static void again_read(again *a, int records) {
    for (int i = 0; i < records; i++) {
        CHECK(a->e[1].transport->progress(a->e[1].self, 0) > 0);
    }
}

/* false: nothing is read here, and all is closed again. */
static bool again_open(again *a, int fetches, uint64_t lines) {
    memset(a, 0, sizeof *a);
    again_now = a;
    a->fetches = fetches;
    a->over_bytes = lines * SHM_RING_LINE - SHM_RING_WORD - DDL_MESSAGE_HEADER_BYTES;
    world_open_as(a->e, 2, "SHM_RING_BYTES=16K", NULL);
    a->e[1].host.deliver = again_deliver;
    CHECK(post(&a->e[0], 1, &a->first, 8) >= 0);
    for (int i = 0; i < 10 && a->e[1].arrived[0] == 0; i++) {
        progress_all(a->e, 2); /* the ring is known now, and that it can be read */
    }
    shm_ring_end *out = &shm_link_of(a->e[0].self, 1)->out;
    for (int i = 0; i < fetches; i++) {
        CHECK_EQ(post(&a->e[0], 1, &a->fetched[i], 100000), DDL_IN_PROGRESS);
        a->record = (uint8_t *)(uintptr_t)a->fetched[i].message.priv[SHM_NOTE_RECORD];
    }
    bool reads = shm_control(a->e[0].self, 1)->pulls[0] == SHM_PULLS;
    while (reads && a->smalls < AGAIN_SMALL && out->moved + 2 * SHM_RING_LINE - shm_ring_done(out) <= out->capacity) {
        CHECK_EQ(post(&a->e[0], 1, &a->small[a->smalls++], 8), DDL_OK);
    }
    if (!reads) {
        world_close(a->e, 2);
        letter_free(&a->first);
        for (int i = 0; i < fetches; i++) {
            letter_free(&a->fetched[i]);
        }
    }
    return reads;
}

static void again_post_over(again *a, bool waits) {
    CHECK_EQ(post(&a->e[0], 1, &a->over, a->over_bytes), waits ? DDL_IN_PROGRESS : DDL_OK);
    a->zeros = waits;
    if (waits) {
        memset(a->over.payload, 0, a->over_bytes);
    }
}

/* The last message lies over the record of the last that is fetched. */
static void again_lies_over(again *a) {
    shm_ring_end *out = &shm_link_of(a->e[0].self, 1)->out;
    const uint8_t *end = out->ring->records + out->place;
    CHECK(shm_link_of(a->e[0].self, 1)->waiting.first == NULL);
    CHECK(a->record > out->ring->records && a->record + sizeof(shm_fetch) <= end);
}

static void again_all_arrive(again *a, bool waited) {
    uint64_t all = 2 + (uint64_t)a->fetches + (uint64_t)a->smalls;
    bool open = a->e[0].self != NULL;
    DRIVE(a->e + !open, 1 + open, a->e[1].arrived[0] == all) {}
    CHECK_EQ(a->wrong, 0);
    CHECK_EQ(a->over.status, waited ? DDL_OK : a->over.status);
    letter_free(&a->first);
    letter_free(&a->over);
    for (int i = 0; i < a->fetches; i++) {
        letter_free(&a->fetched[i]);
    }
    for (int i = 0; i < a->smalls; i++) {
        letter_free(&a->small[i]);
    }
    world_close(a->e, 2);
}

/* The peer reads the second, and one more, while the sender is told that the first is sent: between the sender's two looks at the ring. */
static void again_sent(const ddl_host *host, ddl_message *message, ddl_status status) {
    mini_sent(host, message, status);
    if (message == &again_now->fetched[0].message) {
        again_read(again_now, 2);
    }
}

TEST(a_sender_that_helps_leaves_a_place_alone_that_is_used_anew) {
    static again a;
    if (!again_open(&a, 2, 5)) {
        SKIP("no process may read another's memory here");
    }
    ((shm *)a.e[0].self)->crowded = true; /* it helps before the peer has begun */
    again_post_over(&a, true);
    again_read(&a, 1);
    a.e[0].host.sent = again_sent;
    CHECK(a.e[0].transport->progress(a.e[0].self, -1) > 0);
    again_lies_over(&a);
    again_all_arrive(&a, true);
}

TEST(recall_of_what_was_read_whose_place_is_used_anew) {
    static again a;
    if (!again_open(&a, 1, 3)) {
        SKIP("no process may read another's memory here");
    }
    again_read(&a, 2);
    again_post_over(&a, false);
    again_lies_over(&a);
    int allocs = a.e[0].allocs;
    a.e[0].transport->recall(a.e[0].self, 1, &a.fetched[0].message);
    a.fetched[0].borrowed = 0;
    CHECK_EQ(a.e[0].allocs, allocs); /* nothing is copied for a peer that has it */
    again_all_arrive(&a, false);
}

TEST(close_after_what_was_read_and_its_place_used_anew) {
    static again a;
    if (!again_open(&a, 1, 3)) {
        SKIP("no process may read another's memory here");
    }
    again_post_over(&a, true);
    again_read(&a, 2);
    endpoint_close(&a.e[0]);
    CHECK_EQ(a.fetched[0].status, DDL_OK);
    again_all_arrive(&a, true);
}

/* The kernel forbids it after all: the sender lends a copy, and later ones come as streams. */
TEST(a_peer_that_cannot_be_read_any_more_lends_copies) {
    static endpoint e[2];
    letter l[4];
    world_open(e, 2);
    faults.read_error = EPERM;
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(post(&e[0], 1, &l[i], 1 << 20), DDL_IN_PROGRESS);
    }
    DRIVE(e, 2, e[1].arrived[0] == 3 && l[2].returned) {}
    CHECK_EQ(post(&e[0], 1, &l[3], 1 << 20), DDL_IN_PROGRESS);
    CHECK(l[3].message.priv[SHM_NOTE_DONE] > 0);
    CHECK(strstr(e[1].log, "the memory of rank 0 can be read no more") != NULL);
    DRIVE(e, 2, e[1].arrived[0] == 4 && l[3].returned) {}
    for (int i = 0; i < 4; i++) {
        letter_free(&l[i]);
    }
    world_close(e, 2);
}

/* The peer was killed in the middle: its memory is gone, the half that came is thrown away. */
TEST(a_sender_that_dies_while_it_is_read) {
    static endpoint e[2];
    letter l;
    struct pollfd fd = {.events = POLLIN};
    world_open(e, 2);
    post(&e[0], 1, &l, 1 << 20);
    faults.read_error = ESRCH;
    for (int i = 0; i < 10; i++) {
        e[1].transport->progress(e[1].self, 0);
    }
    CHECK_EQ(e[1].open_landings, 1);
    CHECK_EQ(e[1].transport->arm(e[1].self, &fd.fd), DDL_OK); /* it sleeps, it does not spin */
    e[1].transport->peer_dead(e[1].self, 0);
    CHECK_EQ(e[1].landing_failed[0], 1);
    CHECK_EQ(e[1].arrived[0] + (uint64_t)e[1].lost[0], 0);
    e[0].transport->peer_dead(e[0].self, 1);
    letter_free(&l);
    world_close(e, 2);
}

/* The receiver was killed in the middle of copying, and is never heard of again. */
TEST(a_receiver_that_dies_while_it_reads) {
    static endpoint e[2];
    letter l[DEPTH];
    world_open(e, 2);
    for (int i = 0; i < DEPTH; i++) {
        post(&e[0], 1, &l[i], i % 2 == 0 ? 1 << 20 : 100);
    }
    e[0].transport->progress(e[0].self, -1);
    e[0].transport->peer_dead(e[0].self, 1);
    for (int i = 0; i < DEPTH; i++) {
        CHECK(!l[i].borrowed || l[i].status == DDL_ERR_PEER);
        letter_free(&l[i]);
    }
    e[1].transport->peer_dead(e[1].self, 0);
    world_close(e, 2);
}

TEST(redirect_moves_what_still_comes) {
    static endpoint e[2];
    letter l;
    world_open_as(e, 2, "SHM_CMA=0", NULL);
    post(&e[0], 1, &l, 1 << 20);
    DRIVE(e, 2, e[1].open_landings == 1) {}
    uint64_t done = shm_link_of(e[1].self, 0)->done;
    CHECK(done > 0 && done < 1 << 20);
    uint8_t *elsewhere = calloc(1, 1 << 20);
    e[1].transport->redirect(e[1].self, 0, &e, NULL); /* of another token: nothing */
    e[1].transport->redirect(e[1].self, 0, e[1].landing[0], elsewhere);
    e[1].discard = 1;
    DRIVE(e, 2, e[1].arrived[0] == 1 && l.returned) {}
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < 1 << 20; i++) {
        wrong += elsewhere[i] != (i < done ? 0 : pattern(0, 0, i));
    }
    CHECK_EQ(wrong, 0u);
    free(elsewhere);
    letter_free(&l);
    world_close(e, 2);
}

TEST(redirect_to_nowhere_ends_the_link_later) {
    static endpoint e[2];
    letter l;
    world_open_as(e, 2, "SHM_CMA=0", NULL);
    post(&e[0], 1, &l, 1 << 20);
    DRIVE(e, 2, e[1].open_landings == 1) {}
    e[1].transport->redirect(e[1].self, 0, e[1].landing[0], NULL);
    CHECK_EQ(e[1].lost[0], 0);
    DRIVE(e, 2, e[1].lost[0] == 1 && e[0].lost[1] == 1 && l.returned) {}
    letter_free(&l);
    world_close(e, 2);
}

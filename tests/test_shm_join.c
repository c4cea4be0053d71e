/* Shared memory before the first message: the ring by itself, joining and its refusals, lent memory.
 * tests/run: variants=gcc,asan,tsan timeout=120 quick=yes */
#define _GNU_SOURCE 1
#include "shm_host.h"

/* ---- the ring ---- */

enum { RING = 8192, RECORDS = 20000 }; /* each time it is full takes a turn of the scheduler where cores are busy */

static void ring_pair(shm_ring_end *w, shm_ring_end *r, void *memory) {
    memset(memory, 0, RING);
    shm_ring_open(w, memory, RING);
    shm_ring_open(r, memory, RING);
}

static uint64_t ring_size(uint64_t n, uint64_t most) {
    return n % 7 == 0 ? most : (n * 2654435761u >> 7) % (n % 3 == 0 ? most : 200);
}

static void *ring_reader(void *arg) {
    shm_ring_end *r = arg;
    uint64_t wrong = 0;
    for (uint64_t n = 0; n < RECORDS;) {
        uint32_t kind = 0;
        uint64_t bytes = 0;
        const uint8_t *record = shm_ring_peek(r, &kind, &bytes);
        if (record == NULL) {
            shm_ring_tell(r);
            sched_yield();
            continue;
        }
        wrong += kind != n % 5 + 1 || bytes != ring_size(n, shm_ring_record_max(r));
        for (uint64_t i = 0; i < bytes; i += 61) {
            wrong += record[i] != pattern(n, 1, i);
        }
        shm_ring_next(r, bytes);
        n++;
    }
    return (void *)(uintptr_t)wrong;
}

TEST(ring_two_threads_all_sizes_around_and_around) {
    static _Alignas(64) uint8_t memory[RING];
    shm_ring_end w, r;
    pthread_t reader;
    ring_pair(&w, &r, memory);
    pthread_create(&reader, NULL, ring_reader, &r);
    for (uint64_t n = 0; n < RECORDS; n++) {
        uint64_t bytes = ring_size(n, shm_ring_record_max(&w));
        uint8_t *to;
        while ((to = shm_ring_reserve(&w, bytes)) == NULL && !w.broken) {
            sched_yield();
        }
        REQUIRE(to != NULL);
        for (uint64_t i = 0; i < bytes; i += 61) {
            to[i] = pattern(n, 1, i);
        }
        shm_ring_publish(&w, (uint32_t)(n % 5 + 1), bytes);
    }
    void *wrong;
    pthread_join(reader, &wrong);
    CHECK_EQ((uintptr_t)wrong, 0u);
}

/* The longest record fits at each place of the ring, once what is before it has been read. */
TEST(ring_the_longest_record_fits_everywhere) {
    static _Alignas(64) uint8_t memory[RING];
    for (uint64_t lines = 0; lines < RING / 64; lines++) {
        shm_ring_end w, r;
        uint32_t kind = 0;
        uint64_t bytes = 0;
        ring_pair(&w, &r, memory);
        for (uint64_t i = 0; i < lines; i++) {
            REQUIRE(shm_ring_reserve(&w, 8) != NULL);
            shm_ring_publish(&w, 1, 8);
            REQUIRE(shm_ring_peek(&r, &kind, &bytes) != NULL);
            shm_ring_next(&r, bytes);
            shm_ring_tell(&r);
        }
        CHECK(shm_ring_reserve(&w, shm_ring_record_max(&w) + 1) == NULL);
        CHECK(shm_ring_reserve(&w, shm_ring_record_max(&w)) != NULL);
        shm_ring_publish(&w, 2, shm_ring_record_max(&w));
        CHECK(shm_ring_peek(&r, &kind, &bytes) != NULL && kind == 2 && bytes == shm_ring_record_max(&w));
        CHECK(shm_ring_reserve(&w, shm_ring_record_max(&w)) == NULL || w.moved - r.moved <= w.capacity / 2);
        shm_ring_next(&r, bytes);
        CHECK(shm_ring_peek(&r, &kind, &bytes) == NULL && !r.broken);
        shm_ring_finish(&w); /* there is always room for the last word */
        CHECK(shm_ring_peek(&r, &kind, &bytes) != NULL && kind == SHM_RING_END);
    }
}

/* What may be fetched ahead is where the next record goes, and nothing that the reader, as last seen, still reads. */
TEST(ring_ahead_is_where_the_next_record_goes) {
    static _Alignas(64) uint8_t memory[RING];
    shm_ring_end w, r;
    uint64_t foretold = 0, unseen = 0, around = 0;
    ring_pair(&w, &r, memory);
    for (uint64_t n = 0; n < RECORDS; n++) {
        uint64_t bytes = ring_size(n, shm_ring_record_max(&w)), seen = w.seen;
        const uint8_t *ahead = shm_ring_ahead(&w, bytes), *to = shm_ring_reserve(&w, bytes);
        if (ahead == NULL) {
            CHECK(to == NULL || w.seen != seen); /* there was no room, or it was not known of */
            unseen++;
        } else {
            CHECK(to == ahead + SHM_RING_WORD && w.seen == seen);
            foretold++;
            around += ahead == w.ring->records;
        }
        if (to != NULL) {
            shm_ring_publish(&w, 1, bytes);
        }
        uint32_t kind = 0;
        if (to == NULL || n % 5 == 0) { /* the reader lags behind */
            while (shm_ring_peek(&r, &kind, &bytes) != NULL) {
                shm_ring_next(&r, bytes);
            }
            shm_ring_tell(&r);
        }
    }
    CHECK(foretold > RECORDS / 10 && unseen > RECORDS / 10 && around > RECORDS / 100 && !w.broken && !r.broken);
}

TEST(ring_a_record_that_makes_no_sense_breaks_it) {
    static _Alignas(64) uint8_t memory[RING];
    uint64_t bad[] = {1, 7, (uint64_t)1 << 32, (uint64_t)1 << 32 | 7, (uint64_t)1 << 32 | (RING - 64), UINT64_MAX,
                      (uint64_t)1 << 32 | UINT32_MAX, (uint64_t)0x10000 << 32 | 8,
                      (uint64_t)SHM_RING_SKIP << 32 | 64, (uint64_t)SHM_RING_SKIP << 32 | (RING - sizeof(shm_ring))};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        shm_ring_end w, r;
        uint32_t kind = 0;
        uint64_t bytes = 0;
        ring_pair(&w, &r, memory);
        *(uint64_t *)(void *)r.ring->records = bad[i];
        CHECK(shm_ring_peek(&r, &kind, &bytes) == NULL && r.broken);
    }
}

TEST(ring_a_scribbled_index_breaks_it) {
    static _Alignas(64) uint8_t memory[RING];
    uint64_t bad[] = {64 * 60, UINT64_MAX, 64 * 10};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        shm_ring_end w, r;
        ring_pair(&w, &r, memory);
        for (int k = 0; k < 40; k++) {
            shm_ring_reserve(&w, 8);
            shm_ring_publish(&w, 1, 8);
        }
        w.seen = 64 * 20;
        w.ring->read = bad[i];
        shm_ring_done(&w);
        CHECK(w.broken && shm_ring_reserve(&w, 8) == NULL);
    }
}

/* ---- joining ---- */

/* n ranks of which one cannot: all agree on who reaches whom, and one says why. */
static void join_with(int n, int victim, int *counter, int at, int said_by, const char *words) {
    static endpoint e[RANKS];
    ddl_status answers[RANKS][RANKS];
    int before = fd_count();
    memset(&faults, 0, sizeof faults);
    for (int i = 0; i < n; i++) {
        endpoint_open(&e[i], i, n, NULL, NULL);
    }
    world_meet(e, n);
    if (victim > 0) { /* the others go first, so that the fault is the victim's */
        for (int i = 0; i < n; i++) {
            if (i != victim) {
                e[i].transport->ready(e[i].self, (i + 1) % n);
            }
        }
    }
    *counter = at;
    CHECK(e[victim].transport->ready(e[victim].self, (victim + 1) % n) != DDL_OK);
    CHECK_EQ(*counter, 0); /* it was used */
    world_settle(e, n, answers);
    for (int i = 0; i < n * n; i++) {
        bool out = victim == 0 || i / n == victim || i % n == victim;
        CHECK(i / n == i % n || (answers[i / n][i % n] == DDL_OK) == !out);
    }
    CHECK(e[said_by].warnings > 0);
    if (strstr(e[said_by].log, words) == NULL) {
        test__fail(__FILE__, __LINE__, "\"%s\" does not say \"%s\"", e[said_by].log, words);
    }
    CHECK_EQ(e[0].transport->progress(e[0].self, -1), 0);
    world_close(e, n);
    CHECK_EQ(fd_count(), before);
}

TEST(a_leader_without_memory_files_declines) { join_with(3, 0, &faults.memfd, 1, 0, "no segment of"); }
TEST(a_leader_that_cannot_size_it_declines) { join_with(3, 0, &faults.truncate, 1, 0, "no segment of"); }
TEST(a_leader_without_memory_declines) { join_with(3, 0, &faults.allocate, 1, 0, "No space left"); }
TEST(a_leader_that_cannot_map_it_declines) { join_with(3, 0, &faults.map, 1, 0, "cannot be mapped"); }
TEST(a_leader_without_memory_for_its_page_declines) { join_with(3, 0, &faults.allocate, 2, 0, "no memory for"); }
TEST(a_rank_that_cannot_map_it_is_left_out) { join_with(3, 1, &faults.map, 1, 1, "cannot be mapped"); }
TEST(a_rank_without_memory_is_left_out) { join_with(3, 2, &faults.allocate, 1, 2, "no memory for"); }

/* Rank 1 is passed something that is not what the leader should have made. */
static void refuse_segment(int (*make)(const shm *t), const char *words) {
    static endpoint e[2];
    ddl_status answers[RANKS][RANKS];
    memset(&faults, 0, sizeof faults);
    endpoint_open(&e[0], 0, 2, NULL, NULL);
    endpoint_open(&e[1], 1, 2, NULL, NULL);
    world_meet(e, 2);
    CHECK_EQ(e[0].transport->ready(e[0].self, 1), DDL_IN_PROGRESS);
    int *passed = &post_office.fd[0][1][0];
    close(*passed);
    *passed = make(e[0].self);
    CHECK(*passed >= 0);
    world_settle(e, 2, answers);
    CHECK(answers[0][1] < 0 && answers[1][0] < 0);
    if (strstr(e[1].log, words) == NULL) {
        test__fail(__FILE__, __LINE__, "\"%s\" does not say \"%s\"", e[1].log, words);
    }
    world_close(e, 2);
}

static int sealed(const shm *t, uint64_t bytes, int seals, const void *head) {
    int fd = memfd_create("foreign", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    ssize_t n = ftruncate(fd, (off_t)bytes) == 0 && head != NULL ? pwrite(fd, head, sizeof(shm_header), 0) : 0;
    (void)n;
    (void)t;
    return seals == 0 || fcntl(fd, F_ADD_SEALS, seals) == 0 ? fd : -1;
}

static int unsealed_copy(const shm *t) { return sealed(t, t->segment_bytes, 0, t->base); }
static int half_sealed(const shm *t) { return sealed(t, t->segment_bytes, F_SEAL_GROW, t->base); }
static int too_short(const shm *t) { return sealed(t, t->segment_bytes - 4096, F_SEAL_SHRINK | F_SEAL_GROW, t->base); }
static int foreign_magic(const shm *t) { return sealed(t, t->segment_bytes, F_SEAL_SHRINK | F_SEAL_GROW, NULL); }
static int no_file(const shm *t) {
    (void)t;
    return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
}
static int another_layout(const shm *t) {
    shm_header h;
    memcpy(&h, t->base, sizeof h);
    h.ring_bytes *= 2;
    return sealed(t, t->segment_bytes, F_SEAL_SHRINK | F_SEAL_GROW, &h);
}
static int another_user(const shm *t) {
    int fd = sealed(t, t->segment_bytes, F_SEAL_SHRINK | F_SEAL_GROW, t->base);
    return fchown(fd, 12345, 12345) == 0 ? fd : -1;
}

TEST(a_segment_without_seals_is_refused) { refuse_segment(unsealed_copy, "not sealed"); }
TEST(a_segment_that_may_shrink_is_refused) { refuse_segment(half_sealed, "not sealed"); }
TEST(a_segment_of_another_size_is_refused) { refuse_segment(too_short, "size is not that"); }
TEST(a_segment_that_says_nothing_is_refused) { refuse_segment(foreign_magic, "another layout"); }
TEST(a_segment_of_another_layout_is_refused) { refuse_segment(another_layout, "another layout"); }
TEST(a_segment_that_is_none_is_refused) { refuse_segment(no_file, "no file of memory"); }
TEST(a_segment_of_another_user_is_refused) {
    if (geteuid() != 0) {
        SKIP("only root can make a file of another user");
    }
    refuse_segment(another_user, "another user");
}

TEST(without_passing_of_descriptors_nobody_is_reached) {
    static endpoint e[2];
    ddl_status answers[RANKS][RANKS];
    memset(&faults, 0, sizeof faults);
    for (int i = 0; i < 2; i++) {
        endpoint_open(&e[i], i, 2, NULL, NULL);
        e[i].no_passing = 1;
    }
    world_meet(e, 2);
    world_settle(e, 2, answers);
    CHECK(answers[0][1] < 0 && answers[1][0] < 0);
    world_close(e, 2);
}

TEST(too_many_ranks_of_one_host_are_refused_with_a_warning) {
    static endpoint e;
    uint8_t address[256];
    size_t bytes = sizeof address;
    uint64_t latency, bandwidth;
    memset(&faults, 0, sizeof faults);
    endpoint_open(&e, 0, SHM_LOCAL_MAX + 1, NULL, NULL);
    CHECK_EQ(e.transport->address(e.self, address, &bytes), DDL_OK);
    for (int peer = 1; peer <= SHM_LOCAL_MAX; peer++) {
        CHECK_EQ(e.transport->add_peer(e.self, peer, address, bytes, "here", &latency, &bandwidth), DDL_OK);
    }
    CHECK_EQ(e.transport->ready(e.self, 1), DDL_ERR_UNSUPPORTED);
    CHECK_STR(e.log, "513 ranks share this host");
    endpoint_close(&e);
}

static void other_setting(const char *setting) {
    static endpoint e[3];
    ddl_status answers[RANKS][RANKS];
    memset(&faults, 0, sizeof faults);
    endpoint_open(&e[0], 0, 3, NULL, NULL);
    endpoint_open(&e[1], 1, 3, NULL, setting);
    endpoint_open(&e[2], 2, 3, NULL, NULL);
    world_meet(e, 3);
    world_settle(e, 3, answers);
    CHECK_EQ(answers[0][2], DDL_OK);
    CHECK(answers[0][1] < 0 && answers[1][2] < 0);
    world_close(e, 3);
}

TEST(other_settings_mean_another_way) { other_setting("SHM_RING_BYTES=128K"); }
TEST(a_default_that_only_one_rank_names_is_another_setting) { other_setting("SHM_RING_BYTES=64K"); }

static uint64_t left_bytes;
static uint64_t some_left(const ddl_host *host) {
    (void)host;
    return left_bytes;
}

/* A container has to allow what all ranks stage and their rings to each other, and not a page more. */
static void is_enough_from(endpoint *e, int n) {
    const shm *t = e->self;
    uint64_t all = (uint64_t)n * (t->staging_bytes + (uint64_t)(n - 1) * t->ring_bytes);
    e->host.memory_left = some_left;
    left_bytes = all;
    CHECK(shm_may_take_memory(t));
    left_bytes = all - SHM_PAGE;
    CHECK(!shm_may_take_memory(t));
    CHECK_STR(e->log, "raise its memory limit");
    e->host.memory_left = NULL;
}

/* The longer rings of two ranks are memory that collectives do without; what is set by hand stands. Where messages of up
 * to 128 KiB fit, those of two ranks go in pieces. */
TEST(two_ranks_have_longer_rings_and_no_more_memory) {
    static const struct {
        int n;
        const char *first, *second;
        uint64_t ring, staging, stream;
    } cases[] = {{2, NULL, NULL, 512 << 10, 3328 << 10, 128 << 10},
                 {3, NULL, NULL, 64 << 10, 3776 << 10, 64 << 10},
                 {2, "SHM_RING_BYTES=64K", NULL, 64 << 10, 3776 << 10, 64 << 10},
                 {2, "SHM_RING_BYTES=192K", "SHM_STAGING_BYTES=1M", 192 << 10, 1 << 20, 128 << 10},
                 {3, "SHM_RING_BYTES=192K", "SHM_STAGING_BYTES=1M", 192 << 10, 1 << 20, 64 << 10},
                 {2, "SHM_STAGING_BYTES=1M", NULL, 64 << 10, 1 << 20, 64 << 10},
                 {3, "SHM_RING_BYTES=32K", "SHM_STAGING_BYTES=1M", 32 << 10, 1 << 20, 32 << 10}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        static endpoint e[3];
        world_open_as(e, cases[i].n, cases[i].first, cases[i].second);
        for (int k = 0; k < cases[i].n; k++) {
            const shm *t = e[k].self;
            CHECK_EQ(t->ring_bytes, cases[i].ring);
            CHECK_EQ(t->staging_bytes, cases[i].staging);
            CHECK_EQ(t->messages->stream_bytes, cases[i].stream);
            is_enough_from(&e[k], cases[i].n);
            uint64_t promised = (4 << 20) + (uint64_t)(t->local_count - 1) * (64 << 10), page = 64 << 10; /* the largest */
            CHECK((uint64_t)(t->local_count - 1) * t->ring_bytes + t->staging_bytes + (sizeof(shm_window) + page - 1) / page * page <= promised);
        }
        world_close(e, cases[i].n);
    }
}

/* ---- memory ---- */

TEST(lent_memory_is_seen_by_peers_and_comes_back) {
    static endpoint e[2];
    enum { N = 40 };
    uint8_t *memory[N] = {NULL};
    uint64_t bytes[N] = {0};
    unsigned seed = 1;
    world_open(e, 2);
    shm *t = e[0].self, *peer = e[1].self;
    for (int turn = 0; turn < 2000; turn++) {
        int k = (int)((seed = seed * 1103515245u + 12345u) >> 8) % N;
        uint64_t offset = 0, want = (seed >> 4) % 9 == 0 ? 3 << 20 : (seed >> 3) % 40000 + 1;
        if (memory[k] == NULL) {
            REQUIRE(e[0].transport->memory_alloc(t, want, (void **)&memory[k]) == DDL_OK);
            bytes[k] = want;
            for (uint64_t i = 0; i < want; i += 4096) {
                CHECK_EQ(memory[k][i], 0); /* never what somebody had before */
            }
            memset(memory[k], k + 1, want);
            CHECK(!shm_locate(t, memory[k] - 1, 2, &offset) || k + 1 < N);
            continue;
        }
        REQUIRE(shm_locate(t, memory[k] + 1, bytes[k] - 1, &offset));
        CHECK(!shm_locate(t, memory[k], (bytes[k] + 4095) / 4096 * 4096 + 1, &offset) || bytes[k] == 0);
        REQUIRE(shm_locate(t, memory[k], bytes[k], &offset));
        const uint8_t *seen = shm_reach(peer, offset, bytes[k]);
        REQUIRE(seen != NULL);
        CHECK(seen[0] == k + 1 && seen[bytes[k] - 1] == k + 1 && memory[k][bytes[k] / 2] == k + 1);
        e[0].transport->memory_free(t, memory[k]);
        memory[k] = NULL;
    }
    for (int k = 0; k < N; k++) {
        e[0].transport->memory_free(t, memory[k]); /* NULL is fine */
    }
    CHECK_EQ(t->memory->lent_count, 0u);
    CHECK_EQ(t->memory->hole_count, 1u); /* all places have grown together again */
    CHECK_EQ(t->memory->holes[0].bytes, t->arena_bytes);
    world_close(e, 2);
}

TEST(memory_that_cannot_be_had_is_an_error) {
    static endpoint e[2];
    void *memory;
    world_open(e, 2);
    CHECK_EQ(e[0].transport->memory_alloc(e[0].self, (size_t)1 << 60, &memory), DDL_ERR_NOMEM);
    faults.allocate = 1;
    CHECK_EQ(e[0].transport->memory_alloc(e[0].self, 5000, &memory), DDL_ERR_NOMEM);
    faults.map = 1;
    CHECK_EQ(e[0].transport->memory_alloc(e[0].self, 5000, &memory), DDL_ERR_NOMEM);
    CHECK_EQ(((shm *)e[0].self)->memory->hole_count, 1u);
    CHECK_EQ(e[0].transport->memory_alloc(e[0].self, 5000, &memory), DDL_OK);
    e[0].transport->memory_free(e[0].self, memory);
    world_close(e, 2);
}

TEST(a_peer_that_cannot_map_reads_by_the_kernel) {
    static endpoint e[2];
    letter l;
    void *memory;
    world_open(e, 2);
    CHECK_EQ(e[0].transport->memory_alloc(e[0].self, 1 << 20, &memory), DDL_OK);
    post_in(&e[0], 1, &l, 1 << 20, memory);
    faults.map = 1;
    DRIVE(e, 2, e[1].arrived[0] == 1 && l.returned) {}
    CHECK_EQ(faults.map, 0);
    letter_free(&l);
    world_close(e, 2);
}

TEST(a_ring_without_memory_is_an_error_of_the_send) {
    static endpoint e[2];
    letter l;
    world_open(e, 2);
    faults.allocate = 1;
    CHECK_EQ(post(&e[0], 1, &l, 8), DDL_ERR_NOMEM);
    letter_free(&l);
    e[0].sent_number[1] = 0;
    CHECK_EQ(post(&e[0], 1, &l, 8), DDL_OK);
    DRIVE(e, 2, e[1].arrived[0] == 1) {}
    letter_free(&l);
    world_close(e, 2);
}

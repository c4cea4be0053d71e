/* Native collectives of plugins/shm against plain loops, without a core: every kind, sizes around every border, in place
 * and not, ordinary and lent memory, queues, delays, mismatches, and ranks that stop in the middle.
 * tests/run: variants=gcc,asan,tsan timeout=400 */
#define TEST_TIMEOUT_S 240
#define SHM_FAR_BYTES (512u << 10) /* so that the sizes below lie on both sides */
#include "ranks.h"

#include "shm_refuse.h"
#define TEST_SHM_IS_IN
#include "shm_jobs.h"

/* ---- all kinds and sizes ---- */

static const uint64_t sizes[] = {0,    4,    12,    108,   112,   116,    512,     1020,        1024, 1028,
                                 2048, 4092, 4096,  4100,  8188,  8192,  8196,  12288,  16380,   16384,       16388, 32768,
                                 65536, 65540, 100000, 262144, 300004, 786432, 1 << 20, (1 << 20) + 4};
enum { SIZES = sizeof sizes / sizeof sizes[0] };

typedef struct sweep {
    uint64_t most; /* bytes of the larger buffer */
    bool distant;  /* all cores are said to be */
    int queued;    /* operations under way at once, at most */
    int rounds;    /* 0: every kind and size in turn, */
    int step, from; /* or one in so many, from that one on */
    bool delays;
} sweep;

/* Operation `seq` is the same on all ranks; one in four is in other memory on each, and of each in two kinds. */
static job choose(uint64_t seq, int rank, int n, const sweep *s) {
    uint32_t x = mix((uint32_t)seq * 7919u + (uint32_t)n);
    job j = {.seq = seq, .rank = rank, .n = n, .kind = (int)(x % DDL_EXSCAN) + 1, .root = (int)((x >> 8) % (unsigned)n)};
    uint32_t size = (x >> 16) % SIZES;
    if (s->rounds == 0) {
        uint64_t number = (seq - 1) * (uint64_t)s->step + (uint64_t)s->from;
        j.kind = (int)(number % DDL_EXSCAN) + 1;
        size = (uint32_t)(number / DDL_EXSCAN) % SIZES;
    }
    uint32_t y = mix(x), own = mix(y + (uint32_t)rank);
    bool mixed = (y >> 20) % 4 == 0;
    j.memory = (int)((mixed ? own : y) % MEMORIES);
    j.apart = mixed ? (int)((own >> 8) % MEMORIES) : 0;
    j.in_place = (y >> 8) % 2;
    j.at_once = (own >> 16) % 4 != 0;
    j.element = (y >> 12) % 4 == 0 ? 12 : 4;
    j.bytes = j.kind == DDL_BARRIER ? 0 : sizes[size] / j.element * j.element;
    while (j.bytes * (uint64_t)n > s->most) {
        j.bytes = j.bytes / 2 / j.element * j.element;
    }
    return j;
}

static void pause_at_random(unsigned *seed) {
    unsigned x = (unsigned)rand_r(seed) % 64;
    if (x == 0) {
        usleep((useconds_t)(rand_r(seed) % 2000));
    } else if (x < 16) {
        sched_yield();
    }
}

static void sweep_rank(shm *t, int rank, int n, void *arg) {
    const sweep *s = arg;
    int32_t ranks[MOST_RANKS];
    buffers b;
    void *set = NULL;
    unsigned seed = (unsigned)rank * 77u + (unsigned)n;
    static const uint64_t group = 0x1234;
    job jobs[QUEUE];
    for (int r = 0; r < n; r++) {
        ranks[r] = r;
    }
    buffers_make(&b, t, s->most);
    CHECK_EQ(shm_transport.native_open(t, group, ranks, n, rank, &set), DDL_OK);
    uint64_t total = s->rounds > 0 ? (uint64_t)s->rounds : (uint64_t)(DDL_EXSCAN * SIZES / s->step);
    for (uint64_t seq = 1, ended = 1; ended <= total; ended++) {
        unsigned depth = 1 + mix((uint32_t)ended + 5) % (unsigned)s->queued;
        for (; seq <= total && seq < ended + depth; seq++) {
            job *j = &jobs[seq % QUEUE];
            *j = choose(seq, rank, n, s);
            place(j, &b, (int)(seq % QUEUE));
            if (s->delays) {
                pause_at_random(&seed);
            }
            start(t, set, j);
        }
        finish(t, set, &jobs[ended % QUEUE], &seed);
    }
    CHECK(!s->distant || ((shm_set *)set)->distant);
    shm_transport.native_close(t, set);
    buffers_free(&b);
}

static void run_sweep(int n, sweep *s, bool threads) {
    s->step = (int)test_sample();
    s->from = (int)(test_seed() % test_sample());
    test_count_left_out(s->rounds > 0 ? 0 : DDL_EXSCAN * SIZES - DDL_EXSCAN * SIZES / s->step);
#if defined(__SANITIZE_THREAD__) /* it sees one process: what forked ranks share it cannot judge, the other builds do */
    s->most = !threads && s->most > 1 << 14 ? 1 << 14 : s->most;
    s->rounds = !threads && s->rounds > 60 ? 60 : s->rounds;
#endif
    native_world w = {.fn = sweep_rank, .arg = s};
    native_world_make(&w, n);
    native_world_run(&w, n, threads);
}

static void every_kind_and_size(bool threads) {
    static const int counts[] = {1, 2, 3, 4, 7, 8};
    for (size_t k = 0; k < sizeof counts / sizeof counts[0]; k++) {
        sweep s = {.most = counts[k] > 4 ? 1 << 18 : 1 << 20, .queued = 1};
        run_sweep(counts[k], &s, threads);
    }
}

TEST(every_kind_and_size_forked) { every_kind_and_size(false); }
TEST(every_kind_and_size_threads) { every_kind_and_size(true); }

/* What ranks write for each other goes past the caches; on one machine or another the other tests do not say where. */
static void to_distant_cores(bool threads) {
    setenv("SHM_DISTANT_NS", "0", 1);
    for (int n = 2; n <= 4; n++) {
        sweep s = {.most = 1 << 20, .queued = 2, .distant = true};
        run_sweep(n, &s, threads);
    }
    unsetenv("SHM_DISTANT_NS");
}

TEST(every_kind_and_size_to_distant_cores_forked) { to_distant_cores(false); }
TEST(every_kind_and_size_to_distant_cores_threads) { to_distant_cores(true); }

TEST(queues_and_delays_forked) {
    for (int n = 2; n <= 5; n++) {
        sweep s = {.most = 1 << 18, .queued = QUEUE - 1, .rounds = 600, .delays = true};
        run_sweep(n, &s, false);
    }
}

TEST(queues_and_delays_threads) {
    for (int n = 2; n <= 4; n++) {
        sweep s = {.most = 1 << 16, .queued = QUEUE - 1, .rounds = 300, .delays = true};
        run_sweep(n, &s, true);
    }
}

/* Rings so small that ranks wait for room in them at every step, and in another order each time. */
TEST(little_room) {
    setenv("SHM_STAGING_BYTES", "128K", 1);
    for (int n = 2; n <= 4; n++) {
        sweep s = {.most = 1 << 20, .queued = 2, .rounds = 300, .delays = true};
        run_sweep(n, &s, false);
    }
    unsetenv("SHM_STAGING_BYTES");
}

TEST(large_ones) {
    for (int n = 2; n <= 4; n++) {
        sweep s = {.most = 4 << 20, .queued = 2, .rounds = 60};
        run_sweep(n, &s, false);
    }
}

TEST(ranks_that_are_bound_to_cores_of_their_own_do_not_share_them) {
    for (int n = 2; n <= 4; n++) {
        sweep s = {.most = 256 << 10, .queued = 2, .rounds = 20};
        native_world w = {.fn = sweep_rank, .arg = &s, .cores = 1, .bound = true};
        native_world_make(&w, n);
        for (int r = 0; r < n; r++) {
            CHECK(!w.endpoint[r]->crowded);
        }
        ranks_fork(n, native_fork_rank, &w, 200);
        native_world_free(&w);
    }
}

/* Two of three share one core: what is true of some is true of all. */
TEST(two_that_share_a_core_crowd_all) {
    shm_address told[3] = {{.magic = "x", .cores = 1, .core_set = 1}, {.magic = "x", .cores = 1, .core_set = 1}, {.magic = "x", .cores = 8, .core_set = 2}};
    int32_t ranks[3] = {0, 1, 2};
    shm t = {.addresses = told, .rank_of = ranks, .local_count = 3};
    CHECK(shm_is_crowded(&t));
    told[1].core_set = 3;
    CHECK(!shm_is_crowded(&t));
    told[1].core_set = 2; /* with the other, which may use eight */
    CHECK(shm_is_crowded(&t));
}

/* Where ranks share cores: in rounds as large as the ring allows, and what is small without a second exchange. */
static void of_ranks_that_share_cores(size_t most, int rounds, bool threads) {
    for (int n = 2; n <= 4; n++) {
        sweep s = {.most = most, .queued = 2, .rounds = rounds};
        native_world w = {.fn = sweep_rank, .arg = &s, .cores = 1};
        native_world_make(&w, n);
        CHECK(w.endpoint[n - 1]->crowded);
        native_world_run(&w, n, threads);
    }
}

TEST(large_ones_of_ranks_that_share_cores) { of_ranks_that_share_cores(4 << 20, 60, false); }
TEST(medium_ones_of_ranks_that_share_cores) { of_ranks_that_share_cores(200 << 10, 60, false); }
TEST(medium_ones_of_threads_that_share_cores) { of_ranks_that_share_cores(200 << 10, 60, true); }

/* What others cannot reach is posted before they come, all that fits where ranks share cores; what they can is not. */
static void first_rank(shm *t, int rank, int n, void *arg) {
    static const struct {
        int kind, memory, apart;
        bool posts;
    } calls[] = {{DDL_ALL_REDUCE, ORDINARY, 0, true},  {DDL_ALL_REDUCE, LENT, 0, false},    {DDL_ALL_REDUCE, LENT, MEMORIES - LENT, true},
                 {DDL_ALL_GATHER, ORDINARY, 0, true},  {DDL_ALL_GATHER, LENT, 0, false},    {DDL_ALL_GATHER, LENT, MEMORIES - LENT, false},
                 {DDL_ALL_TO_ALL, ORDINARY, 0, true},  {DDL_ALL_TO_ALL, LENT_ODD, 0, false}, {DDL_SCAN, LENT, 0, true},
                 {DDL_BROADCAST, ORDINARY, 0, true},   {DDL_BARRIER, ORDINARY, 0, false}};
    _Atomic uint64_t *begun = arg;
    int32_t ranks[MOST_RANKS] = {0, 1};
    unsigned seed = (unsigned)rank;
    void *set = NULL;
    buffers b;
    buffers_make(&b, t, 1 << 20);
    CHECK_EQ(shm_transport.native_open(t, 0x99, ranks, n, rank, &set), DDL_OK);
    atomic_fetch_add(begun, 1);
    while (atomic_load(begun) < 2) {
        sched_yield();
    }
    for (uint64_t k = 0; k < sizeof calls / sizeof calls[0]; k++) {
        job j = {.seq = k + 1, .kind = calls[k].kind, .n = n, .rank = rank, .memory = calls[k].memory, .apart = calls[k].apart, .element = 4};
        j.bytes = j.kind == DDL_BARRIER ? 0 : 50000;
        place(&j, &b, 0);
        while (rank == 1 && atomic_load(begun) < k + 3) {
            sched_yield();
        }
        const _Atomic uint64_t *posted = &((shm_set *)set)->own->posted.value;
        uint64_t before = atomic_load(posted);
        start(t, set, &j);
        if (rank == 0) {
            uint64_t after = atomic_load(posted);
            CHECK_EQ(after, calls[k].posts ? ((const shm_op *)j.op)->end : before);
            atomic_fetch_add(begun, 1);
        }
        finish(t, set, &j, &seed);
    }
    shm_transport.native_close(t, set);
    buffers_free(&b);
}

TEST(what_nobody_else_can_reach_is_posted_before_they_come) {
    _Atomic uint64_t begun = 0;
    native_world w = {.fn = first_rank, .arg = &begun, .cores = 1};
    native_world_make(&w, 2);
    ranks_threads(2, native_thread_rank, &w);
    native_world_free(&w);
}

/* ---- blocks of every size ---- */

typedef struct blocks {
    uint64_t element, most; /* most: bytes of the largest block that was reduced */
} blocks;

/* Of elements of 1 or of 8 bytes. */
static uint64_t element_at(const void *p, uint64_t element, uint64_t i) {
    return element == 1 ? ((const uint8_t *)p)[i] : ((const uint64_t *)p)[i];
}

static void element_set(void *p, uint64_t element, uint64_t i, uint64_t x) {
    if (element == 1) {
        ((uint8_t *)p)[i] = (uint8_t)x;
    } else {
        ((uint64_t *)p)[i] = x;
    }
}

static void fold_elements(void *arg, void *dst, const void *const *srcs, int32_t n, uint64_t bytes) {
    blocks *b = arg;
    b->most = bytes > b->most ? bytes : b->most;
    for (uint64_t i = 0; i < bytes / b->element; i++) {
        uint64_t x = element_at(srcs[0], b->element, i);
        for (int32_t k = 1; k < n; k++) {
            x = x * 3 + element_at(srcs[k], b->element, i);
        }
        element_set(dst, b->element, i, x);
    }
}

static uint64_t element_given(int rank, uint64_t i) { return (i + 1) * 0x9e3779b97f4a7c15u + (uint64_t)rank * (i >> 3); }

/* What a rank finds after a reduction of so many bytes at `skip` in its buffers, poison around it. */
static void check_elements(const job *j, const uint8_t *buffer, uint64_t skip) {
    bool has_out = j->kind == DDL_ALL_REDUCE || j->rank == j->root;
    for (uint64_t i = 0; has_out && i < j->bytes / j->element; i++) {
        uint64_t x = 0;
        for (int r = 0; r < j->n; r++) {
            x = x * 3 + element_given(r, i);
        }
        x = j->element == 1 ? (uint8_t)x : x;
        if (element_at(j->out, j->element, i) != x) {
            wrong(j, "result of", i, (uint32_t)element_at(j->out, j->element, i), (uint32_t)x);
            return;
        }
    }
    for (uint64_t i = 0; i < skip; i++) {
        if (buffer[i] != POISON || buffer[skip + j->bytes + i] != POISON) {
            wrong(j, "bytes around the result of", i, buffer[i], POISON);
            return;
        }
    }
}

static void blocks_rank(shm *t, int rank, int n, void *arg) {
    blocks mine = *(blocks *)arg;
    int32_t ranks[MOST_RANKS];
    unsigned seed = (unsigned)rank;
    void *set = NULL, *in = NULL, *out = NULL;
    uint64_t e = mine.element, large = test_slow() > 2 ? 1u << 20 : 4u << 20, room = large + 3 * 4096;
    const struct {
        uint64_t bytes, skip;
        int kind;
    } calls[] = {{5000 * e, 4096, DDL_ALL_REDUCE}, {70001 * e, 1000, DDL_ALL_REDUCE}, {123457 * e, 8, DDL_REDUCE},
                 {large, 4096, DDL_ALL_REDUCE}, {large - e, 1000, DDL_ALL_REDUCE}};
    all_ranks(ranks, n);
    CHECK_EQ(shm_lend(t, room, &in), DDL_OK);
    CHECK_EQ(shm_lend(t, room, &out), DDL_OK);
    CHECK_EQ(shm_transport.native_open(t, 3, ranks, n, rank, &set), DDL_OK);
    uint64_t block = shm_block_bytes(set);
    CHECK(block > SHM_BLOCK_LEAST && block < SHM_BLOCK_MOST);
    for (size_t k = 0; k < sizeof calls / sizeof calls[0]; k++) {
        uint64_t skip = calls[k].skip;
        job j = {.seq = k + 1, .kind = calls[k].kind, .root = n - 1, .n = n, .rank = rank, .memory = LENT, .element = e};
        j.bytes = calls[k].bytes;
        j.in = (uint8_t *)in + skip;
        j.out = (uint8_t *)out + skip;
        memset(out, POISON, room);
        for (uint64_t i = 0; i < j.bytes / e; i++) {
            element_set(j.in, e, i, element_given(rank, i));
        }
        ddl_native_call call = {.size = sizeof call, .kind = j.kind, .root = j.root, .element_bytes = (int32_t)e,
                                .sequence = j.seq, .signature = j.bytes, .in = j.in, .out = j.out, .bytes = j.bytes,
                                .reduce = fold_elements, .reduce_arg = &mine};
        int32_t other = -1;
        CHECK_EQ(shm_transport.native_start(t, set, &call, &j.op), DDL_OK);
        ddl_status status = test_until(t, set, j.op, &seed, &other);
        REQUIRE(status == DDL_OK);
        check_elements(&j, out, skip);
    }
    CHECK_EQ(mine.most, SHM_WRITE_STEP); /* done in memory that all see: what is staged here is reduced in larger chunks */
    shm_transport.native_close(t, set);
    shm_take_back(t, in);
    shm_take_back(t, out);
}

/* Where the ring has room for a block of more than 16 and less than 64 KiB beside the two edges, which are pages. */
TEST(blocks_as_large_as_the_ring_allows) {
    char staging[32];
    uint64_t block = 44u << 10, edges = 2 * (uint64_t)sysconf(_SC_PAGESIZE);
    snprintf(staging, sizeof staging, "%llu", (unsigned long long)(SHM_PIECES * (2 * (block + edges) + SHM_RING_AT)));
    setenv("SHM_STAGING_BYTES", staging, 1);
    for (int n = 5; n <= 7; n += 2) {
        for (uint64_t element = 1; element <= 8; element *= 8) {
            blocks b = {.element = element};
            native_world w = {.fn = blocks_rank, .arg = &b};
            native_world_make(&w, n);
            ranks_fork(n, native_fork_rank, &w, 200);
            native_world_free(&w);
        }
    }
    unsetenv("SHM_STAGING_BYTES");
}

/* ---- calls that differ ---- */

typedef struct differing {
    int kind, memory;
    uint64_t bytes;
} differing;

/* Whoever found it while it was about to sleep stays awake until the core has heard of it: nobody rings for that again. */
static void stays_awake(shm *t) {
    int awake = 0, fd = -1;
    for (double end = test_now_s() + 5 * test_slow(); awake < 10 && test_now_s() < end;) {
        awake = shm_transport.arm(t, &fd) == DDL_IN_PROGRESS ? awake + 1 : 0;
        usleep(awake > 0 ? 0 : 500);
    }
    CHECK_EQ(awake, 10);
}

static void differing_rank(shm *t, int rank, int n, void *arg) {
    const differing *d = arg;
    int32_t ranks[MOST_RANKS], other = -1;
    unsigned seed = (unsigned)rank;
    void *set = NULL;
    buffers b;
    all_ranks(ranks, n);
    buffers_make(&b, t, 1 << 18);
    CHECK_EQ(shm_transport.native_open(t, 0, ranks, n, rank, &set), DDL_OK); /* 0: the world has this id */
    job j = {.seq = 1, .kind = d->kind, .rank = rank, .n = n, .memory = d->memory, .bytes = d->bytes, .element = 4};
    j.kind = rank == 1 && j.kind == DDL_BARRIER ? DDL_ALL_REDUCE : j.kind;
    j.bytes = rank == 1 ? j.bytes + 4 : j.bytes;
    place(&j, &b, 0);
    start(t, set, &j);
    stays_awake(t);
    CHECK_EQ(test_until(t, set, j.op, &seed, &other), DDL_ERR_MISMATCH);
    CHECK(rank == 1 ? other == 0 || other == 2 : other == 1);
    shm_transport.native_cancel(t, set, j.op);
    for (uint64_t i = 0; i < out_bytes(&j); i++) {
        CHECK_EQ(j.out[i], POISON);
    }
    ddl_native_call call = {.size = sizeof call, .kind = DDL_BARRIER, .sequence = 2};
    CHECK_EQ(shm_transport.native_start(t, set, &call, &j.op), DDL_ERR_UNSUPPORTED);
    shm_transport.native_close(t, set);
    buffers_free(&b);
}

TEST(calls_that_differ_write_nothing) {
    static const int kinds[] = {DDL_BARRIER, DDL_ALL_REDUCE, DDL_ALL_GATHER, DDL_REDUCE_SCATTER, DDL_ALL_TO_ALL};
    static const uint64_t bytes[] = {8, 4096, 70000};
    for (size_t k = 0; k < 5; k++) {
        for (int memory = ORDINARY; memory <= LENT; memory++) {
            for (size_t i = 0; i < 3; i++) {
                differing d = {kinds[k], memory, kinds[k] == DDL_BARRIER ? 0 : bytes[i]};
                native_world w = {.fn = differing_rank, .arg = &d};
                native_world_make(&w, 3);
                ranks_fork(3, native_fork_rank, &w, 60);
                native_world_free(&w);
            }
        }
    }
}

/* ---- ranks that stop ---- */

typedef struct stopping {
    int kind;
    volatile int stopped, cancelled, woken, late, checked;
} stopping;

typedef struct stopper {
    stopping *shared;
    uint64_t element;
    int calls;
} stopper;

/* The third block of the last rank is reduced, and written out, long after everybody has given the operation up. */
static void fold_and_stop(void *arg, void *dst, const void *const *srcs, int32_t n, uint64_t bytes) {
    stopper *s = arg;
    fold(&s->element, dst, srcs, n, bytes);
    if (++s->calls == 3) {
        s->shared->stopped = 1;
        raise(SIGSTOP);
    }
    s->shared->late += s->shared->cancelled == 2;
}

static void fill(uint8_t *p, uint64_t bytes, int value) { memset(p, value, bytes); }

static void check_filled(const uint8_t *p, uint64_t bytes, int value) {
    for (uint64_t i = 0; i < bytes; i++) {
        if (p[i] != value) {
            test__fail(__FILE__, __LINE__, "byte %llu is %02x, written by a rank that was late", (unsigned long long)i, p[i]);
            return;
        }
    }
}

/* The two others: give up, use the buffers, and find in them what they have written. */
static void left_behind(shm *t, void *set, job *j, stopping *s, buffers *b) {
    int32_t other;
    wait_for(&s->stopped, 1);
    CHECK_EQ(shm_transport.native_test(t, set, j->op, 100, &other), DDL_IN_PROGRESS);
    shm_transport.native_cancel(t, set, j->op);
    fill(b->lent[0][0], b->room, 0x11);
    fill(b->lent[0][1], b->room, 0x22);
    __atomic_fetch_add(&s->cancelled, 1, __ATOMIC_SEQ_CST);
    wait_for(&s->woken, 1);
    check_filled(b->lent[0][0], b->room, 0x11);
    check_filled(b->lent[0][1], b->room, 0x22);
    shm_transport.native_close(t, set);
}

/* The same buffers again, for the two ranks that are left. */
static void once_more(shm *t, int rank, buffers *b) {
    int32_t ranks[2] = {0, 1};
    void *set = NULL;
    unsigned seed = (unsigned)rank;
    CHECK_EQ(shm_transport.native_open(t, 99, ranks, 2, rank, &set), DDL_OK);
    for (uint64_t seq = 1; seq <= 6; seq++) {
        job j = {.seq = seq, .kind = DDL_ALL_REDUCE, .rank = rank, .n = 2, .memory = 1 + (int)(seq % 2), .element = 4};
        j.bytes = 500000;
        j.in_place = seq > 3;
        place(&j, b, 0);
        start(t, set, &j);
        finish(t, set, &j, &seed);
    }
    shm_transport.native_close(t, set);
}

static void stopping_rank(shm *t, int rank, int n, void *arg) {
    stopping *s = arg;
    int32_t ranks[3] = {0, 1, 2}, other = -1;
    void *set = NULL;
    buffers b;
    buffers_make(&b, t, 2 << 20);
    CHECK_EQ(shm_transport.native_open(t, 5, ranks, n, rank, &set), DDL_OK);
    job j = {.seq = 1, .kind = s->kind, .root = 1, .rank = rank, .n = n, .memory = LENT_ODD, .element = 4};
    j.bytes = 600000;
    place(&j, &b, 0);
    stopper me = {s, 4, rank == 2 ? 0 : 1 << 20};
    ddl_native_call call = {.size = sizeof call, .kind = j.kind, .root = 1, .element_bytes = 4, .sequence = 1, .signature = 8,
                            .in = j.in, .out = j.out, .bytes = j.bytes, .reduce = fold_and_stop, .reduce_arg = &me};
    CHECK_EQ(shm_transport.native_start(t, set, &call, &j.op), DDL_OK);
    if (rank < 2) {
        for (double limit = test_now_s() + 20; test_now_s() < limit && s->stopped == 0;) {
            shm_transport.native_test(t, set, j.op, 10, &other);
            sched_yield();
        }
        left_behind(t, set, &j, s, &b);
        once_more(t, rank, &b);
        wait_for(&s->checked, 1);
        shm_reclaim(t);
        CHECK_EQ(t->memory->withdrawn_count, 0); /* the late one has left: the old pages are free */
    } else {
        double limit = test_now_s() + 30;
        for (int i = 0; i < 2000 || (me.calls < 4 && test_now_s() < limit); i++) {
            CHECK_EQ(shm_transport.native_test(t, set, j.op, 10, &other), DDL_IN_PROGRESS); /* it never believes it */
            sched_yield();
        }
        CHECK(me.calls > 3);
        s->woken = 1;
        usleep(100000);
        shm_transport.native_cancel(t, set, j.op);
        shm_transport.native_close(t, set);
        s->checked = 1;
    }
    buffers_free(&b);
}

/* The one who goes on must do so after the others have given up and written to their buffers. */
static void stop_in(int kind) {
    stopping *s = ranks_shared(sizeof *s);
    native_world w = {.fn = stopping_rank, .arg = s};
    ranks r;
    s->kind = kind;
    native_world_make(&w, 3);
    ranks_start(&r, 3, native_fork_rank, &w);
    wait_for(&s->cancelled, 2);
    ranks_kill(&r, 2, SIGCONT);
    ranks_wait(&r, 60);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(r.status[i], 0);
    }
    CHECK(!r.timed_out);
    CHECK(s->late > 0);
    native_world_free(&w);
}

TEST(late_writers_meet_nobody) {
    stop_in(DDL_ALL_REDUCE);
    stop_in(DDL_REDUCE);
}

TEST(late_readers_believe_nothing) { stop_in(DDL_REDUCE_SCATTER); }

/* ---- whose core is it ---- */

typedef struct corners {
    int core[2]; /* ranks 0 and `here` stay on the first, `away` on the second */
    int here, away;
    int let; /* may begin their second operation: `here` at 1, `away` at 2 */
} corners;

static void stay_on(int core) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET((size_t)core, &one);
    CHECK_EQ(sched_setaffinity(0, sizeof one, &one), 0);
}

static void barrier_start(void *set, uint64_t sequence, void **op) {
    ddl_native_call call = {.size = sizeof call, .kind = DDL_BARRIER, .sequence = sequence, .signature = sequence};
    CHECK_EQ(shm_transport.native_start(NULL, set, &call, op), DDL_OK);
}

static void cornered_rank(shm *t, int rank, int n, void *arg) {
    corners *s = arg;
    int32_t ranks[3] = {0, 1, 2}, other = -1;
    void *set = NULL, *op = NULL;
    unsigned seed = (unsigned)rank;
    t->crowded = true;
    stay_on(s->core[rank == s->away]);
    CHECK_EQ(shm_transport.native_open(t, 7, ranks, n, rank, &set), DDL_OK);
    barrier_start(set, 1, &op);
    CHECK_EQ(test_until(t, set, op, &seed, &other), DDL_OK);
    wait_for(&s->let, rank == 0 ? 0 : rank == s->here ? 1 : 2);
    if (rank == s->away) {
        usleep(100000); /* rank 0 looks meanwhile */
    }
    barrier_start(set, 2, &op);
    if (rank == 0) {
        double begin = test_now_s();
        CHECK_EQ(shm_transport.native_test(t, set, op, INT32_MAX, &other), DDL_IN_PROGRESS); /* `here` needs the core */
        CHECK_EQ(other, s->here);
        CHECK(test_now_s() - begin < 2 * test_slow()); /* all the looks take longer */
        s->let = 1;
        do {
            sched_yield();
            ddl_status status = shm_transport.native_test(t, set, op, 1, &other);
            CHECK_EQ(status, DDL_IN_PROGRESS);
        } while (other == s->here);
        CHECK_EQ(other, s->away);
        s->let = 2;
        CHECK_EQ(shm_transport.native_test(t, set, op, INT32_MAX, &other), DDL_OK); /* in one go */
    } else {
        CHECK_EQ(test_until(t, set, op, &seed, &other), DDL_OK);
    }
    shm_transport.native_close(t, set);
}

/* A core is kept while only ranks on other cores are missing, and given away at once for one that needs it. */
TEST(the_core_goes_to_who_needs_it) {
    cpu_set_t all;
    corners *s = ranks_shared(sizeof *s);
    int found = 0;
    CHECK_EQ(sched_getaffinity(0, sizeof all, &all), 0);
    for (int i = 0; i < CPU_SETSIZE && found < 2; i++) {
        if (CPU_ISSET((size_t)i, &all)) {
            s->core[found++] = i;
        }
    }
    if (found < 2) {
        SKIP("needs two cores");
    }
    for (s->here = 1; s->here <= 2; s->here++) {
        s->away = 3 - s->here;
        s->let = 0;
        native_world w = {.fn = cornered_rank, .arg = s};
        native_world_make(&w, 3);
        ranks_fork(3, native_fork_rank, &w, 60);
        native_world_free(&w);
    }
}

/* ---- sets come and go ---- */

static void coming_and_going(shm *t, int rank, int n, void *arg) {
    int32_t ranks[MOST_RANKS];
    unsigned seed = (unsigned)rank;
    buffers b;
    (void)arg;
    all_ranks(ranks, n);
    buffers_make(&b, t, 1 << 16);
    for (uint64_t group = 1; group < 60; group++) {
        void *set = NULL;
        for (int tries = 0; tries < 20000 && shm_transport.native_open(t, group, ranks, n, rank, &set) != DDL_OK; tries++) {
            usleep(100); /* the others have not left the last ones */
        }
        REQUIRE(set != NULL);
        for (uint64_t seq = 1; seq <= 1 + group % 5; seq++) {
            job j = {.seq = seq, .rank = rank, .n = n, .element = 4, .kind = (int)(group % DDL_EXSCAN) + 1};
            j.bytes = j.kind == DDL_BARRIER ? 0 : group % 2 ? 64 : 9000;
            place(&j, &b, 0);
            start(t, set, &j);
            finish(t, set, &j, &seed);
        }
        shm_transport.native_close(t, set);
    }
    buffers_free(&b);
}

TEST(sets_come_and_go) {
    native_world w = {.fn = coming_and_going};
    native_world_make(&w, 3);
    ranks_fork(3, native_fork_rank, &w, 60);
    native_world_free(&w);
}

/* A root runs ahead by SHM_LINES broadcasts. Then it looks what the others have ended, and keeps all that it sees. */
static void running_ahead(shm *t, int rank, int n, void *arg) {
    int32_t ranks[MOST_RANKS];
    volatile int *taken = arg;
    unsigned seed = 1;
    void *set = NULL;
    buffers b;
    all_ranks(ranks, n);
    buffers_make(&b, t, 1 << 16);
    CHECK_EQ(shm_transport.native_open(t, 1, ranks, n, rank, &set), DDL_OK);
    for (uint64_t seq = 1; seq <= SHM_LINES + 1; seq++) {
        job j = {.seq = seq, .rank = rank, .n = n, .element = 4, .kind = DDL_BROADCAST, .bytes = 64};
        if (rank == 0 && seq == SHM_LINES + 1) {
            CHECK_EQ(((shm_set *)set)->floor, 0);
            wait_for(taken, 1);
        }
        place(&j, &b, 0);
        start(t, set, &j);
        finish(t, set, &j, &seed);
        if (rank == 1 && seq == SHM_LINES) {
            *taken = 1;
        }
    }
    CHECK_EQ(((shm_set *)set)->floor, rank == 0 ? SHM_LINES : ((shm_set *)set)->floor);
    shm_transport.native_close(t, set);
    buffers_free(&b);
}

TEST(what_the_others_have_ended_is_kept) {
    native_world w = {.fn = running_ahead, .arg = ranks_shared(64)};
    native_world_make(&w, 2);
    ranks_fork(2, native_fork_rank, &w, 60);
    native_world_free(&w);
}

/* Rank 2 dies with its arrival written, or before it, with its data in the slot, or in the ring: where ranks share cores a
 * rank says on which core it is in between. The others give up, and their pieces come back although it never left. */
typedef struct death {
    int dead;
    int half; /* before the arrival */
    int memory;
    uint64_t bytes;
} death;

static volatile int *died;

static void dies_here(void) {
    *died = 1;
    _exit(0);
}

static void dying_rank(shm *t, int rank, int n, void *arg) {
    int32_t ranks[3] = {0, 1, 2}, other = -1;
    death *d = arg;
    volatile int *dead = &d->dead;
    void *set = NULL;
    buffers b;
    buffers_make(&b, t, 2 << 20);
    CHECK_EQ(shm_transport.native_open(t, 1, ranks, n, rank, &set), DDL_OK);
    job j = {.seq = 1, .kind = DDL_ALL_REDUCE, .rank = rank, .n = n, .memory = d->memory, .element = 4, .bytes = d->bytes};
    place(&j, &b, 0);
    if (rank == 2) {
        for (int i = 0; i < 10000 && !shm_find_all(set); i++) {
            usleep(1000); /* or the operation would not begin */
        }
        died = dead;
        t->crowded = t->crowded || d->half;
        faults.at_core = d->half ? dies_here : NULL;
        start(t, set, &j);
        CHECK(!d->half);
        dies_here();
    }
    wait_for(dead, 1);
    start(t, set, &j);
    for (int i = 0; i < 1000; i++) {
        CHECK_EQ(shm_transport.native_test(t, set, j.op, 10, &other), DDL_IN_PROGRESS);
    }
    shm_transport.native_cancel(t, set, j.op);
    shm_transport.native_close(t, set);
    shm_transport.peer_dead(t, 2);
    once_more(t, rank, &b);
    for (int i = 0; i < 20000 && t->natives->sets != NULL; i++) {
        usleep(100);
        shm_reclaim(t);
    }
    CHECK(t->natives->sets == NULL);
    CHECK_EQ(t->natives->pieces, 0);
    CHECK_EQ(t->memory->withdrawn_count, 0);
    buffers_free(&b);
}

static void somebody_dies(int half, int memory, uint64_t bytes) {
    death *d = ranks_shared(sizeof *d);
    *d = (death){.half = half, .memory = memory, .bytes = bytes};
    native_world w = {.fn = dying_rank, .arg = d};
    native_world_make(&w, 3);
    ranks_fork(3, native_fork_rank, &w, 60);
    native_world_free(&w);
}

TEST(pieces_of_the_dead_come_back) { somebody_dies(0, LENT, 65536); }
TEST(pieces_come_back_of_one_that_died_in_the_slot) { somebody_dies(1, ORDINARY, 4096); }
TEST(pieces_come_back_of_one_that_died_in_the_ring) { somebody_dies(1, ORDINARY, 65536); }

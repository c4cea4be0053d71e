/* Operations of plugins/shm that are over when they have been started: who is told so, and who not.
 * tests/run: variants=gcc,asan,tsan timeout=100 */
#include "ranks.h"

#include "shm_refuse.h"
#define TEST_SHM_IS_IN
#include "shm_jobs.h"

enum { ROOT, LEAF };

static void *opened(shm *t, int rank, int n, buffers *b) {
    int32_t ranks[MOST_RANKS];
    void *set = NULL;
    all_ranks(ranks, n);
    buffers_make(b, t, 1 << 16);
    CHECK_EQ(shm_transport.native_open(t, 1, ranks, n, rank, &set), DDL_OK);
    return set;
}

static void closed(shm *t, void *set, buffers *b) {
    shm_transport.native_close(t, set);
    buffers_free(b);
}

static void begin_one(shm *t, void *set, job *j, buffers *b, int kind, bool at_once) {
    j->seq++;
    j->kind = kind;
    j->at_once = at_once;
    place(j, b, (int)(j->seq % QUEUE));
    start(t, set, j);
}

/* What the root, rank 0, and rank 1 are told depends on who must wait for whom, and never on chance: each goes on when the
 * other says so. */
static void at_once_rank(shm *t, int rank, int n, void *arg) {
    volatile int *turn = arg;
    unsigned seed = 1;
    buffers b;
    void *set = opened(t, rank, n, &b);
    static const uint64_t bytes[] = {4, 64, 100, 104, 108, 4096, 8192};
    job j = {.rank = rank, .n = n, .element = 4, .bytes = 64}, next;
    begin_one(t, set, &j, &b, DDL_BARRIER, true); /* after it all pieces are found */
    CHECK(j.op != NULL);
    finish(t, set, &j, &seed);
    int round = 0;
    for (size_t i = 0; i < sizeof bytes / sizeof bytes[0]; i++, round += 4) {
        j.bytes = bytes[i];
        if (rank == ROOT) { /* the leaf finds it there */
            begin_one(t, set, &j, &b, DDL_BROADCAST, true);
            CHECK(j.op == NULL);
            finish(t, set, &j, &seed);
            say(turn, round + 1);
            wait_for(turn, round + 2); /* the root waits for the leaf's, which waits for nobody */
            begin_one(t, set, &j, &b, DDL_REDUCE, true);
            CHECK(j.op == NULL);
            finish(t, set, &j, &seed);
            begin_one(t, set, &j, &b, DDL_GATHER, true); /* and now the leaf has not come */
            CHECK(j.op != NULL);
            say(turn, round + 3);
            finish(t, set, &j, &seed);
            begin_one(t, set, &j, &b, DDL_BROADCAST, false); /* nobody said that it may */
            CHECK(j.op != NULL);
            finish(t, set, &j, &seed);
            wait_for(turn, round + 4);
        } else {
            wait_for(turn, round + 1);
            begin_one(t, set, &j, &b, DDL_BROADCAST, true);
            CHECK(j.op == NULL);
            finish(t, set, &j, &seed);
            begin_one(t, set, &j, &b, DDL_REDUCE, true);
            CHECK(j.op == NULL);
            finish(t, set, &j, &seed);
            say(turn, round + 2);
            wait_for(turn, round + 3);
            begin_one(t, set, &j, &b, DDL_GATHER, true);
            CHECK(j.op == NULL);
            finish(t, set, &j, &seed);
            begin_one(t, set, &j, &b, DDL_BROADCAST, false);
            CHECK(j.op != NULL);
            finish(t, set, &j, &seed);
            say(turn, round + 4);
        }
    }
    j.bytes = 64; /* behind what waits nothing is over: rank 1 comes to the barrier last */
    wait_for(turn, rank == ROOT ? round : round + 1);
    begin_one(t, set, &j, &b, DDL_BARRIER, true);
    next = j;
    begin_one(t, set, &next, &b, DDL_BROADCAST, true);
    CHECK(rank != ROOT || (j.op != NULL && next.op != NULL));
    say(turn, round + 1);
    finish(t, set, &j, &seed);
    finish(t, set, &next, &seed);
    closed(t, set, &b);
}

TEST(who_need_not_wait_is_told_so_at_once) {
    native_world w = {.fn = at_once_rank, .arg = ranks_shared(64)};
    native_world_make(&w, 2);
    ranks_fork(2, native_fork_rank, &w, 60);
    native_world_free(&w);
}

/* A root that has written all lines, or slots, is told to wait: what stands there has not been read. */
static void far_ahead_rank(shm *t, int rank, int n, void *arg) {
    volatile int *turn = arg;
    unsigned seed = 1;
    buffers b;
    void *set = opened(t, rank, n, &b);
    job j = {.rank = rank, .n = n, .element = 4};
    for (int slots = 0; slots < 2; slots++) {
        uint64_t most = slots ? SHM_SLOTS : SHM_LINES;
        begin_one(t, set, &j, &b, DDL_BARRIER, true);
        finish(t, set, &j, &seed);
        j.bytes = slots ? 4096 : 64;
        if (rank != ROOT) {
            wait_for(turn, slots + 1);
        }
        for (uint64_t k = 1; k <= most; k++) {
            begin_one(t, set, &j, &b, DDL_BROADCAST, true);
            CHECK(k == most || shm_is_compared(j.seq) ? rank != ROOT || j.op != NULL : j.op == NULL);
            if (rank == ROOT && k == most) {
                say(turn, slots + 1);
            }
            finish(t, set, &j, &seed);
        }
        j.bytes = 0;
    }
    closed(t, set, &b);
}

TEST(who_is_far_ahead_waits) {
    native_world w = {.fn = far_ahead_rank, .arg = ranks_shared(64)};
    native_world_make(&w, 2);
    ranks_fork(2, native_fork_rank, &w, 60);
    native_world_free(&w);
}

/* The call of an older program ends before at_once: what lies behind it says nothing. */
static void older_rank(shm *t, int rank, int n, void *arg) {
    int32_t ranks[MOST_RANKS] = {0}, other = -1;
    unsigned seed = 1;
    void *set = NULL, *op = NULL;
    uint64_t in = 7;
    (void)arg;
    CHECK_EQ(shm_transport.native_open(t, 1, ranks, n, rank, &set), DDL_OK);
    ddl_native_call call = {.size = sizeof call, .kind = DDL_BARRIER, .sequence = 1};
    CHECK_EQ(shm_transport.native_start(t, set, &call, &op), DDL_OK);
    CHECK_EQ(test_until(t, set, op, &seed, &other), DDL_OK);
    size_t older = offsetof(ddl_native_call, at_once);
    void *its = malloc(older); /* what lies behind it may not be read: ASan looks */
    for (uint64_t seq = 2; seq <= 3; seq++) {
        call = (ddl_native_call){.size = (uint32_t)(seq == 2 ? older : sizeof call), .kind = DDL_BROADCAST, .sequence = seq,
                                 .in = &in, .out = &in, .bytes = sizeof in, .at_once = 1};
        memcpy(its, &call, older);
        CHECK_EQ(shm_transport.native_start(t, set, seq == 2 ? its : &call, &op), DDL_OK);
        CHECK((op != NULL) == (seq == 2));
        if (op != NULL) {
            CHECK_EQ(test_until(t, set, op, &seed, &other), DDL_OK);
        }
    }
    free(its);
    shm_transport.native_close(t, set);
}

TEST(an_older_program_is_given_an_operation) {
    native_world w = {.fn = older_rank};
    native_world_make(&w, 1);
    ranks_fork(1, native_fork_rank, &w, 60);
    native_world_free(&w);
}

/* Who would be over at once, but for another call of the rank it takes from, is given an operation, which says so. */
static void unlike_rank(shm *t, int rank, int n, void *arg) {
    int32_t other = -1;
    volatile int *turn = arg;
    unsigned seed = 1;
    buffers b;
    void *set = opened(t, rank, n, &b);
    job j = {.rank = rank, .n = n, .element = 4};
    begin_one(t, set, &j, &b, DDL_BARRIER, true);
    finish(t, set, &j, &seed);
    j.bytes = rank == ROOT ? 64 : 60;
    wait_for(turn, rank == ROOT ? 0 : 1);
    begin_one(t, set, &j, &b, DDL_BROADCAST, true);
    CHECK((j.op == NULL) == (rank == ROOT));
    say(turn, 1);
    if (rank != ROOT) {
        CHECK_EQ(test_until(t, set, j.op, &seed, &other), DDL_ERR_MISMATCH);
        CHECK_EQ(other, ROOT);
        shm_transport.native_cancel(t, set, j.op);
        for (uint64_t i = 0; i < j.bytes; i++) {
            CHECK_EQ(j.out[i], POISON);
        }
    }
    closed(t, set, &b);
}

TEST(another_call_is_found_at_once) {
    native_world w = {.fn = unlike_rank, .arg = ranks_shared(64)};
    native_world_make(&w, 2);
    ranks_fork(2, native_fork_rank, &w, 60);
    native_world_free(&w);
}

/* Rank 0 broadcasts, or is the first of scans, while rank 1 gives to reductions of rank 0: neither waits, and who comes last
 * finds out. */
typedef struct givers {
    int kind, last; /* of rank 0; who comes last */
    volatile int turn;
} givers;

static void givers_rank(shm *t, int rank, int n, void *arg) {
    int32_t other = -1;
    givers *g = arg;
    unsigned seed = 1;
    buffers b;
    void *set = opened(t, rank, n, &b);
    job j = {.rank = rank, .n = n, .element = 4};
    begin_one(t, set, &j, &b, DDL_BARRIER, true);
    finish(t, set, &j, &seed);
    j.bytes = 64;
    wait_for(&g->turn, rank == g->last ? 1 : 0);
    while (j.seq < SHM_LINES) {
        begin_one(t, set, &j, &b, rank == ROOT ? g->kind : DDL_REDUCE, true);
        if (j.seq == SHM_LINES) {
            CHECK_EQ(test_until(t, set, j.op, &seed, &other), rank == g->last ? DDL_ERR_MISMATCH : DDL_OK);
        } else if (j.op != NULL) {
            CHECK_EQ(test_until(t, set, j.op, &seed, &other), DDL_OK);
        }
    }
    CHECK_EQ(other, rank == g->last ? 1 - rank : -1);
    say(&g->turn, 1);
    if (rank == g->last) {
        shm_transport.native_cancel(t, set, j.op);
    }
    closed(t, set, &b);
}

TEST(two_that_only_give_find_out) {
    for (int k = 0; k < 4; k++) {
        givers *g = ranks_shared(sizeof *g);
        g->kind = k % 2 == 0 ? DDL_BROADCAST : DDL_SCAN;
        g->last = k / 2;
        native_world w = {.fn = givers_rank, .arg = g};
        native_world_make(&w, 2);
        ranks_fork(2, native_fork_rank, &w, 60);
        native_world_free(&w);
    }
}

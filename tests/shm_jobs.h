/* shm_jobs: operations of plugins/shm with their buffers, poisoned, and what must come out of them by plain loops. */
#ifndef SHM_JOBS_H
#define SHM_JOBS_H

#include "shm_native.h"

enum { GUARD = 64, POISON = 0xa5, QUEUE = 24, MOST_RANKS = 8 };

/* ---- what is computed ---- */

/* Neither commutative nor associative: the result shows the order of the ranks. */
static void fold(void *arg, void *dst, const void *const *srcs, int32_t n, uint64_t bytes) {
    uint64_t element = *(const uint64_t *)arg;
    if (n < 2 || bytes % element != 0) {
        test__fail(__FILE__, __LINE__, "reduce got %d sources and %llu bytes", (int)n, (unsigned long long)bytes);
    }
    for (uint64_t i = 0; i < bytes / 4; i++) {
        uint32_t x = ((const uint32_t *)srcs[0])[i];
        for (int32_t k = 1; k < n; k++) {
            x = x * 3 + ((const uint32_t *)srcs[k])[i];
        }
        ((uint32_t *)dst)[i] = x;
    }
}

static uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

/* What rank gives in operation `seq` at word i. */
static uint32_t given(uint64_t seq, int rank, uint64_t i) {
    return mix((uint32_t)i + (uint32_t)rank * 0x10001u + (uint32_t)seq * 0x9e3779b9u);
}

static uint32_t folded(uint64_t seq, int ranks, uint64_t i) {
    uint32_t x = given(seq, 0, i);
    for (int r = 1; r < ranks; r++) {
        x = x * 3 + given(seq, r, i);
    }
    return x;
}

/* ---- one operation ---- */

enum { ORDINARY, LENT, LENT_ODD, MEMORIES }; /* LENT_ODD: not at the start of a page */

typedef struct job {
    uint64_t seq;
    int kind, root, n, rank, memory;
    int apart; /* the output lies in the kind of memory so many further */
    bool in_place;
    uint64_t bytes, element;
    uint8_t *in, *out;
    bool at_once; /* it may be over when it has been started: op is NULL then */
    void *op;
} job;

typedef struct buffers {
    shm *t;
    uint64_t room;
    uint8_t *ordinary[QUEUE][2], *lent[QUEUE][2];
} buffers;

static void buffers_make(buffers *b, shm *t, uint64_t most) {
    b->t = t;
    b->room = most + 2 * GUARD + 8192;
    for (int q = 0; q < QUEUE; q++) {
        for (int k = 0; k < 2; k++) {
            void *memory = NULL;
            b->ordinary[q][k] = malloc(b->room);
            if (shm_lend(t, b->room, &memory) != DDL_OK || b->ordinary[q][k] == NULL) {
                test__fail(__FILE__, __LINE__, "no memory");
                exit(1);
            }
            b->lent[q][k] = memory;
        }
    }
}

static void buffers_free(buffers *b) {
    for (int q = 0; q < QUEUE; q++) {
        for (int k = 0; k < 2; k++) {
            free(b->ordinary[q][k]);
            shm_take_back(b->t, b->lent[q][k]);
        }
    }
}

static bool has_parts(int kind) { return shm_kinds[kind].parts; }
static bool reduces(int kind) { return shm_kinds[kind].takes == SHM_REDUCED; }

/* Bytes of the two buffers of this rank; 0: not looked at. */
static uint64_t in_bytes(const job *j) {
    bool gives = j->kind != DDL_BARRIER && ((j->kind != DDL_BROADCAST && j->kind != DDL_SCATTER) || j->rank == j->root);
    return !gives ? 0 : has_parts(j->kind) ? j->bytes * (uint64_t)j->n : j->bytes;
}

static uint64_t out_bytes(const job *j) {
    bool gets = j->kind != DDL_BARRIER && ((j->kind != DDL_REDUCE && j->kind != DDL_GATHER) || j->rank == j->root);
    bool many = j->kind == DDL_GATHER || j->kind == DDL_ALL_GATHER || j->kind == DDL_ALL_TO_ALL;
    return !gets ? 0 : many ? j->bytes * (uint64_t)j->n : j->bytes;
}

static uint8_t *poisoned(const job *j, const buffers *b, int q, int which, int memory) {
    uint8_t *at = memory == ORDINARY ? b->ordinary[q][which] : b->lent[q][which];
    uint64_t skip = memory == LENT_ODD ? 1000 + 4 * (uint64_t)(j->seq % 700) : memory == LENT ? 4096 : GUARD;
    memset(at, POISON, skip + j->bytes * (uint64_t)j->n + GUARD);
    return at + skip;
}

/* Where the buffers are; in place as api.h says for each kind. */
static void place(job *j, buffers *b, int q) {
    uint64_t own = (uint64_t)j->rank * j->bytes;
    j->in = poisoned(j, b, q, 0, j->memory);
    j->out = poisoned(j, b, q, 1, (j->memory + j->apart) % MEMORIES);
    if (j->kind == DDL_BROADCAST) {
        j->in = j->out;
    } else if (j->in_place) {
        bool parts_out = j->kind == DDL_GATHER || j->kind == DDL_ALL_GATHER;
        bool parts_in = j->kind == DDL_SCATTER || j->kind == DDL_REDUCE_SCATTER;
        bool root_only = j->kind == DDL_GATHER || j->kind == DDL_SCATTER || j->kind == DDL_REDUCE;
        if (!root_only || j->rank == j->root) {
            j->in = parts_out ? j->out + own : parts_in ? j->in : j->out;
            j->out = parts_in ? j->in + own : j->out;
        }
    }
    for (uint64_t i = 0; i < in_bytes(j) / 4; i++) {
        ((uint32_t *)(void *)j->in)[i] = given(j->seq, j->rank, i);
    }
}

static uint32_t expected(const job *j, uint64_t i) {
    uint64_t words = j->bytes / 4, from = words > 0 ? i / words : 0;
    switch (j->kind) {
    case DDL_BROADCAST:
        return given(j->seq, j->root, i);
    case DDL_SCATTER:
        return given(j->seq, j->root, (uint64_t)j->rank * words + i);
    case DDL_GATHER:
    case DDL_ALL_GATHER:
        return given(j->seq, (int)from, i % words);
    case DDL_ALL_TO_ALL:
        return given(j->seq, (int)from, (uint64_t)j->rank * words + i % words);
    case DDL_REDUCE_SCATTER:
        return folded(j->seq, j->n, (uint64_t)j->rank * words + i);
    case DDL_SCAN:
        return folded(j->seq, j->rank + 1, i);
    case DDL_EXSCAN:
        return folded(j->seq, j->rank, i);
    default:
        return folded(j->seq, j->n, i);
    }
}

static const char *const names[] = {"",       "barrier", "broadcast",  "reduce",         "all_reduce", "gather",
                                    "scatter", "all_gather", "reduce_scatter", "all_to_all", "scan",       "exscan"};

static void wrong(const job *j, const char *what, uint64_t i, uint32_t is, uint32_t should) {
    test__fail(__FILE__, __LINE__,
               "%s %s: operation %llu, %llu bytes of %llu, rank %d of %d, root %d, memory %d + %d, in place %d: [%llu] is "
               "%x, should be %x",
               what, names[j->kind], (unsigned long long)j->seq, (unsigned long long)j->bytes,
               (unsigned long long)j->element, j->rank, j->n, j->root, j->memory, j->apart, (int)j->in_place,
               (unsigned long long)i, is, should);
}

static void verify(const job *j) {
    uint64_t bytes = j->kind == DDL_EXSCAN && j->rank == 0 ? 0 : out_bytes(j);
    const uint32_t *out = (const uint32_t *)(const void *)j->out;
    for (uint64_t i = 0; i < bytes / 4; i++) {
        uint32_t should = expected(j, i);
        if (out[i] != should) {
            wrong(j, "result of", i, out[i], should);
            return;
        }
    }
    bool separate = j->in + in_bytes(j) <= j->out || j->out + out_bytes(j) <= j->in;
    for (uint64_t i = 0; separate && i < in_bytes(j) / 4; i++) {
        if (((const uint32_t *)(const void *)j->in)[i] != given(j->seq, j->rank, i)) {
            wrong(j, "input of", i, 0, given(j->seq, j->rank, i));
            return;
        }
    }
    for (int i = 1; i <= GUARD && separate; i++) {
        if (j->out[-i] != POISON || j->out[bytes + (uint64_t)i - 1] != POISON) {
            wrong(j, "bytes around the result of", (uint64_t)i, j->out[-i], POISON);
            return;
        }
    }
}

static void start(shm *t, void *set, job *j) {
    ddl_native_call call = {.size = sizeof call,
                            .kind = j->kind,
                            .root = j->root,
                            .element_bytes = (int32_t)j->element,
                            .sequence = j->seq,
                            .signature = mix((uint32_t)j->seq) * (uint64_t)(j->kind + 100) + j->bytes,
                            .in = j->in,
                            .out = j->out,
                            .bytes = j->bytes,
                            .reduce = reduces(j->kind) ? fold : NULL,
                            .reduce_arg = &j->element,
                            .at_once = j->at_once};
    ddl_status status = shm_transport.native_start(t, set, &call, &j->op);
    CHECK_EQ(status, DDL_OK);
    if (status != DDL_OK) {
        exit(1);
    }
}

/* Sleeps as the core does. A sleep that ends by its timeout although there was something to do was a lost wake-up. */
static void sleep_armed(shm *t) {
    int fd = -1;
    if (shm_transport.arm(t, &fd) == DDL_OK) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        int ready = poll(&p, 1, (int)(3000 * test_slow()));
        int32_t events = shm_transport.progress(t, -1);
        if (ready == 0 && events > 0) {
            test__fail(__FILE__, __LINE__, "rank %d slept through a wake-up", (int)t->rank);
        }
    } else {
        shm_transport.progress(t, -1);
    }
}

static ddl_status test_until(shm *t, void *set, void *op, unsigned *seed, int32_t *out_rank) {
    double limit = test_now_s() + 60 * test_slow();
    for (int tries = 0; test_now_s() < limit; tries++) {
        ddl_status status = shm_transport.native_test(t, set, op, rand_r(seed) % 20, out_rank);
        if (status != DDL_IN_PROGRESS) {
            return status;
        }
        if (tries > 3) {
            sleep_armed(t);
        } else if (rand_r(seed) % 4 == 0) {
            sched_yield();
        }
    }
    return DDL_ERR_TIMEOUT;
}

static void finish(shm *t, void *set, job *j, unsigned *seed) {
    int32_t rank = -1;
    ddl_status status = j->at_once && j->op == NULL ? DDL_OK : test_until(t, set, j->op, seed, &rank);
    if (status != DDL_OK) {
        wrong(j, ddl_status_name(status), 0, 0, 0);
        exit(1);
    }
    verify(j);
}

/* A word that all ranks see, and one sets. */
static inline void say(volatile int *word, int value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

static inline void wait_for(volatile int *word, int value) {
    for (int i = 0; __atomic_load_n(word, __ATOMIC_ACQUIRE) < value && i < 20000; i++) {
        usleep(1000);
    }
    CHECK(*word >= value);
}

static inline void all_ranks(int32_t *ranks, int n) {
    for (int r = 0; r < n; r++) {
        ranks[r] = r;
    }
}

#endif

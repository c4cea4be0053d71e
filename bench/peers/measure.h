/* measure: one measuring protocol for every library under test, so that a ratio compares libraries and not
 * stopwatches.
 *
 * A peer program fills in a bench_peer (how to synchronise, how to run one operation) and calls bench_main; everything
 * that decides a figure lives here: sizes, warm-up, rounds, what is written before a round, where the clock starts and
 * stops. This file knows no library, and moves no figure through one: ranks meet in a small file that all of them map.
 *
 * One round, for every library alike:
 *   1. every rank rewrites its whole input (values depend on the round: a library that keeps old results is caught,
 *      and pages and caches are in the state in which a training step leaves them: freshly written);
 *   2. the library's own barrier, so that nothing of the last round is still under way;
 *   3. a barrier in the mapped file, so that all ranks start together however skewed the library's barrier lets them
 *      go;
 *   4. clock, operation, clock; then the library's barrier, so that a rank that is ready early, or takes no part (as in
 *      ping_pong at 4 ranks), waits as the library makes it wait instead of rewriting its buffers on a core that the
 *      operation needs. The time of the round is that of the slowest rank. With DDL_BENCH_REPEAT=k a small operation is
 *      run some k times back to back (bench_repeats) and the time divided, as one of a tenth of a microsecond would
 *      measure the clock and the start; each library alike. Each of them has buffers of its own, all written in 1: a
 *      second run on the same would find parts where the first has left them.
 * One round before the timed ones and one after them are compared with an oracle, element by element. Values are small
 * integers in floats, so sums are exact in any order.
 *
 * Before every eighth round, of 1 MiB and more before each, ranks 0 and 1 also pass a cache line to and fro, if they are
 * on two cores, outside of what is timed: a virtual machine's cores may be moved apart at any time, and a figure says how
 * far they were meanwhile.
 *
 * Compiles as C11 and C++17. */
#ifndef DDL_BENCH_MEASURE_H
#define DDL_BENCH_MEASURE_H

#include <fcntl.h>
#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { BENCH_MAX_RANKS = 64, BENCH_MAX_ROUNDS = 512, BENCH_LEAST_ROUNDS = 6, BENCH_PAGE = 4096, BENCH_BEHIND = 16 };
enum { BENCH_LINE_ROUNDS = 8, BENCH_LINE_BYTES = 1 << 20, BENCH_LINE_TRIES = 5, BENCH_LINE_PASSES = 16 };
#define BENCH_SIZE_NS 2e9

/* What `count` means to bench_peer.run, in floats; `bytes` in the output is always the larger of a rank's two buffers:
 *   all_reduce      out[count] summed in place over ranks
 *   broadcast       out[count] of rank 0 to all
 *   all_gather      in[count] of each rank to out[ranks * count]
 *   reduce_scatter  in[ranks * count] summed, block r to rank r's out[count]
 *   all_to_all      block r of in[ranks * count] to rank r; out[ranks * count]
 *   ping_pong       in[count] from rank 0 to rank 1's out and back; the time reported is half of it, as OSU does
 *   reduce          in[count] of each rank summed to rank 0's out[count]
 *   barrier         nothing; count is 0 */
typedef enum bench_op {
    BENCH_ALL_REDUCE,
    BENCH_BROADCAST,
    BENCH_ALL_GATHER,
    BENCH_REDUCE_SCATTER,
    BENCH_ALL_TO_ALL,
    BENCH_PING_PONG,
    BENCH_REDUCE,
    BENCH_BARRIER,
    BENCH_OP_COUNT
} bench_op;

static const char *const bench_op_names[BENCH_OP_COUNT] = {"all_reduce", "broadcast", "all_gather", "reduce_scatter",
                                                           "all_to_all", "ping_pong", "reduce",     "barrier"};

/* Both functions return 0, or anything else after they have printed why; the program then ends. */
typedef struct bench_peer {
    int rank;
    int ranks;
    void *state;
    int (*sync)(void *state);
    int (*run)(void *state, bench_op op, float *in, float *out, size_t count);
    void *(*take)(void *state, size_t bytes); /* memory of the library's own; NULL: bench_memory */
    void (*give)(void *state, void *memory);
} bench_peer;

/* The mapped file. `arrived` and `turn` are the barrier; `enough` is the round after which a size ends, written by rank 0;
 * came[r] and nanoseconds[r] belong to rank r until the barrier after a size. */
typedef struct bench_shared {
    uint32_t arrived;
    uint32_t turn;
    uint32_t failed;
    int32_t enough;
    int32_t came[BENCH_MAX_RANKS]; /* the round whose barrier the rank is in */
    int32_t core[2];               /* of ranks 0 and 1, before they pass the line: */
    uint32_t line __attribute__((aligned(64)));
    double line_ns[BENCH_MAX_ROUNDS] __attribute__((aligned(64))); /* rank 0's */
    double nanoseconds[BENCH_MAX_RANKS][BENCH_MAX_ROUNDS];
} bench_shared;

typedef struct bench_run {
    const bench_peer *peer;
    bench_shared *shared;
    bench_op op;
    float *in;
    float *out;
    size_t count;
    size_t in_count;
    size_t out_count;
    int repeats;       /* operations of a round, */
    size_t in_stride;  /* and from the buffer of one to that of the next, in floats */
    size_t out_stride;
} bench_run;

static inline double bench_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

/* Release on the last arrival, acquire on leaving: what a rank wrote before the barrier is seen by all after it.
 * Yields in every turn, because ranks may outnumber cores and the one that is missing needs this core. */
static inline void bench_meet(const bench_run *run) {
    bench_shared *s = run->shared;
    uint32_t turn = __atomic_load_n(&s->turn, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&s->arrived, 1, __ATOMIC_ACQ_REL) == (uint32_t)run->peer->ranks) {
        __atomic_store_n(&s->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&s->turn, turn + 1, __ATOMIC_RELEASE);
        return;
    }
    while (__atomic_load_n(&s->turn, __ATOMIC_ACQUIRE) == turn) {
        if (__atomic_load_n(&s->failed, __ATOMIC_RELAXED) != 0) {
            exit(4);
        }
        sched_yield();
    }
}

static inline bench_shared *bench_map(void) {
    const char *path = getenv("DDL_BENCH_SHARED");
    if (path == NULL) {
        fprintf(stderr, "bench: DDL_BENCH_SHARED must name an empty file that all ranks of this run can map\n");
        return NULL;
    }
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)sizeof(bench_shared)) != 0) {
        perror(path);
        return NULL;
    }
    void *p = mmap(NULL, sizeof(bench_shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (p == MAP_FAILED) {
        perror("mmap");
        return NULL;
    }
    return (bench_shared *)p;
}

/* Any count above a few dozen gives a stable median; the table bounds the time of a whole comparison, the same for every
 * library. Where a library is so slow that it takes more than BENCH_SIZE_NS over a size, it ends when it has
 * BENCH_LEAST_ROUNDS. */
static inline int bench_rounds(size_t bytes) {
    int rounds = bytes <= (32u << 10)    ? 400
                 : bytes <= (256u << 10) ? 150
                 : bytes <= (1u << 20)   ? 60
                 : bytes <= (4u << 20)   ? 24
                 : bytes <= (16u << 20)  ? 10
                                         : 6;
    if (getenv("DDL_BENCH_QUICK") != NULL && rounds > 12) {
        rounds = rounds / 4 < 12 ? 12 : rounds / 4;
    }
    return rounds;
}

static inline int bench_warmup(int rounds) {
    return rounds >= 100 ? rounds / 5 : 3;
}

/* How often a round runs the operation. Ranks leave the start a microsecond or two apart, which the slowest counts: the
 * shorter an operation the more of them are needed to outweigh that. */
static inline int bench_repeats(size_t bytes) {
    const char *text = getenv("DDL_BENCH_REPEAT");
    int most = text != NULL ? atoi(text) : 1;
    int repeats = bytes <= 512 ? 8 * most : bytes <= (4u << 10) ? most : bytes <= (32u << 10) ? most / 4 : 1;
    return repeats < 1 ? 1 : repeats;
}

/* The value at `index` of rank's input in a round. Below 32, so that sums over 64 ranks stay exact even in bf16-sized
 * mantissas of an accumulating library, and different in neighbouring ranks, indices and rounds. */
static inline float bench_value(int rank, size_t index, int round) {
    return (float)((index * 5 + (size_t)rank * 7 + (size_t)round * 3) % 29 + 1);
}

static inline float bench_sum(int ranks, size_t index, int round) {
    float sum = 0;
    for (int r = 0; r < ranks; r++) {
        sum += bench_value(r, index, round);
    }
    return sum;
}

/* Writes this rank's input. The index runs modulo 29 by counting, since a division for each element would make the
 * rewriting slower than the operation. `out` is poisoned where the operation must fill it. */
static inline void bench_write(float *p, size_t count, int rank, int round) {
    float value[29];
    for (size_t i = 0; i < 29; i++) {
        value[i] = bench_value(rank, i, round);
    }
    for (size_t i = 0, k = 0; i < count; i++) {
        p[i] = value[k];
        k = k == 28 ? 0 : k + 1;
    }
}

static inline void bench_prepare(const bench_run *run, int round) {
    int rank = run->peer->rank;
    bool in_place = run->op == BENCH_ALL_REDUCE || (run->op == BENCH_BROADCAST && rank == 0);
    for (int k = 0; k < run->repeats; k++) {
        float *in = run->in + (size_t)k * run->in_stride, *out = run->out + (size_t)k * run->out_stride;
        if (in_place) {
            bench_write(out, run->count, rank, round + k);
        } else {
            bench_write(in, run->in_count, rank, round + k);
            memset(out, 0xff, run->out_count * sizeof(float)); /* NaN: equal to nothing */
        }
    }
}

/* What must stand at out[i] after the round. */
static inline float bench_expect(const bench_run *run, size_t i, int round) {
    int rank = run->peer->rank;
    int ranks = run->peer->ranks;
    int from = (int)(i / run->count);
    switch (run->op) {
    case BENCH_ALL_REDUCE:
    case BENCH_REDUCE:
        return bench_sum(ranks, i, round);
    case BENCH_BROADCAST:
        return bench_value(0, i, round);
    case BENCH_ALL_GATHER:
        return bench_value(from, i % run->count, round);
    case BENCH_REDUCE_SCATTER:
        return bench_sum(ranks, (size_t)rank * run->count + i, round);
    case BENCH_ALL_TO_ALL:
        return bench_value(from, (size_t)rank * run->count + i % run->count, round);
    case BENCH_PING_PONG:
        return bench_value(1 - rank, i, round);
    default:
        return 0;
    }
}

static inline int bench_check_one(const bench_run *run, const float *out, int round) {
    if ((run->op == BENCH_PING_PONG && run->peer->rank > 1) || (run->op == BENCH_REDUCE && run->peer->rank > 0)) {
        return 0; /* it gets nothing */
    }
    for (size_t i = 0; i < run->out_count; i++) {
        float want = bench_expect(run, i, round);
        if (out[i] != want) {
            fprintf(stderr, "bench: %s, %zu floats, round %d: rank %d has %g at [%zu], the oracle %g\n",
                    bench_op_names[run->op], run->count, round, run->peer->rank, (double)out[i], i, (double)want);
            return -1;
        }
    }
    return 0;
}

static inline int bench_check(const bench_run *run, int round) {
    int failed = 0;
    for (int k = 0; k < run->repeats && failed == 0; k++) {
        failed = bench_check_one(run, run->out + (size_t)k * run->out_stride, round + k);
    }
    return failed;
}

/* Ranks meet after a check, so that those with the right result learn of the wrong one instead of waiting for its rank
 * in the library's next operation. */
static inline int bench_check_together(const bench_run *run, int round) {
    int failed = bench_check(run, round);
    if (failed != 0) {
        __atomic_store_n(&run->shared->failed, 1, __ATOMIC_RELAXED);
        return failed;
    }
    bench_meet(run);
    return 0;
}

/* Ordinary memory, for every library alike 16 bytes behind a page, where malloc puts a large array. Smaller ones it puts
 * anywhere, and on some processors (AMD Zen 3 and 4) the kernel takes 51 us to send 64 KiB from one place of a page and
 * 18 from the next. */
static inline void *bench_memory(size_t bytes) {
    char *page = (char *)aligned_alloc(BENCH_PAGE, (bytes + BENCH_PAGE + BENCH_BEHIND - 1) / BENCH_PAGE * BENCH_PAGE);
    return page != NULL ? page + BENCH_BEHIND : NULL;
}

static inline void bench_memory_free(void *memory) {
    if (memory != NULL) {
        free((char *)memory - BENCH_BEHIND);
    }
}

static inline void *bench_take(const bench_peer *peer, size_t bytes) {
    return peer->take != NULL ? peer->take(peer->state, bytes) : bench_memory(bytes);
}

static inline void bench_give(const bench_peer *peer, void *memory) {
    if (peer->give != NULL) {
        peer->give(peer->state, memory);
    } else {
        bench_memory_free(memory);
    }
}

/* One barrier, for whose sake a rank comes late: who has left it must find that all have come. */
static inline int bench_check_barrier(const bench_run *run, int round) {
    const bench_peer *peer = run->peer;
    int32_t *came = run->shared->came;
    if (peer->rank == round % peer->ranks) {
        struct timespec late = {0, 2000000};
        nanosleep(&late, NULL);
    }
    __atomic_store_n(&came[peer->rank], round + 1, __ATOMIC_RELEASE);
    int failed = peer->run(peer->state, run->op, run->in, run->out, 0);
    for (int r = 0; r < peer->ranks && failed == 0; r++) {
        if (__atomic_load_n(&came[r], __ATOMIC_ACQUIRE) < round + 1) {
            fprintf(stderr, "bench: rank %d left a barrier that rank %d had not come to\n", peer->rank, r);
            failed = -1;
        }
    }
    return failed;
}

/* Waits until the line holds what the other rank is to write. */
static inline void bench_line_await(bench_shared *s, uint32_t value) {
    for (int looks = 1; __atomic_load_n(&s->line, __ATOMIC_ACQUIRE) != value; looks++) {
        if (looks % 4096 == 0) {
            if (__atomic_load_n(&s->failed, __ATOMIC_RELAXED) != 0) {
                exit(4);
            }
            sched_yield();
        }
    }
}

/* Ranks 0 and 1: nanoseconds that a line takes from one's core to the other's, the least of a few tries, as either may be
 * interrupted. */
static inline double bench_line_pass(bench_shared *s, int rank) {
    double least = 0;
    uint32_t value = 0;
    for (int i = 0; i < BENCH_LINE_TRIES; i++) {
        double start = bench_now_ns();
        for (int pass = 0; pass < BENCH_LINE_PASSES; pass++, value += 2) {
            if (rank == 1) {
                bench_line_await(s, value + 1);
                __atomic_store_n(&s->line, value + 2, __ATOMIC_RELEASE);
            } else {
                __atomic_store_n(&s->line, value + 1, __ATOMIC_RELEASE);
                bench_line_await(s, value + 2);
            }
        }
        double ns = (bench_now_ns() - start) / (2 * BENCH_LINE_PASSES);
        least = i == 0 || ns < least ? ns : least;
    }
    return least;
}

/* All ranks; the others only wait. Returns 0 where ranks 0 and 1 share a core, and on the others. */
static inline double bench_line(const bench_run *run) {
    bench_shared *s = run->shared;
    int rank = run->peer->rank;
    if (rank < 2) {
        __atomic_store_n(&s->core[rank], sched_getcpu(), __ATOMIC_RELAXED);
        __atomic_store_n(&s->line, 0, __ATOMIC_RELAXED);
    }
    bench_meet(run);
    double ns = rank < 2 && s->core[0] != s->core[1] ? bench_line_pass(s, rank) : 0;
    bench_meet(run);
    return ns;
}

/* In whole cache lines, so that operations of a round share none. */
static inline size_t bench_stride(size_t count) {
    return (count + 15) / 16 * 16;
}

/* Sizes the two buffers of each operation of a round. `bytes` is the larger of them; below one float per rank it is rounded up to that, but for a
 * ping_pong of nothing. */
static inline int bench_shape(bench_run *run, size_t bytes) {
    size_t ranks = (size_t)run->peer->ranks;
    int blocks = run->op == BENCH_ALL_GATHER || run->op == BENCH_REDUCE_SCATTER || run->op == BENCH_ALL_TO_ALL;
    size_t count = bytes / sizeof(float) / (blocks ? ranks : 1);
    bool nothing = run->op == BENCH_BARRIER || (run->op == BENCH_PING_PONG && bytes == 0);
    run->count = nothing ? 0 : count == 0 ? 1 : count;
    run->in_count = run->op == BENCH_REDUCE_SCATTER || run->op == BENCH_ALL_TO_ALL ? ranks * run->count : run->count;
    run->out_count = run->op == BENCH_ALL_GATHER || run->op == BENCH_ALL_TO_ALL ? ranks * run->count : run->count;
    run->repeats = bench_repeats(bytes);
    run->in_stride = bench_stride(run->in_count);
    run->out_stride = bench_stride(run->out_count);
    size_t times = (size_t)run->repeats * sizeof(float);
    run->in = (float *)bench_take(run->peer, nothing ? sizeof(float) : run->in_stride * times);
    run->out = (float *)bench_take(run->peer, nothing ? sizeof(float) : run->out_stride * times);
    return run->in != NULL && run->out != NULL ? 0 : -1;
}

static inline int bench_compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median; sorts them. */
static inline double bench_median(double *values, int count) {
    qsort(values, (size_t)count, sizeof(double), bench_compare_doubles);
    return count == 0 ? 0 : (values[(count - 1) / 2] + values[count / 2]) / 2;
}

/* Rank 0, alone between two barriers: slowest rank of each round, then the median and the least over rounds. */
static inline void bench_report(const bench_run *run, size_t bytes, int rounds, int looks) {
    double worst[BENCH_MAX_ROUNDS];
    double scale = run->op == BENCH_PING_PONG ? 2e3 : 1e3;
    for (int i = 0; i < rounds; i++) {
        worst[i] = 0;
        for (int r = 0; r < run->peer->ranks; r++) {
            double t = run->shared->nanoseconds[r][i];
            worst[i] = t > worst[i] ? t : worst[i];
        }
    }
    double median = bench_median(worst, rounds);
    printf("%s %d %zu %.4f %.4f %.1f\n", bench_op_names[run->op], run->peer->ranks, bytes, median / scale,
           worst[0] / scale, bench_median(run->shared->line_ns, looks));
    fflush(stdout);
}

static inline int bench_round(const bench_run *run, int round, bool checked, double *out_ns) {
    const bench_peer *peer = run->peer;
    bench_prepare(run, round);
    if (peer->sync(peer->state) != 0) {
        return -1;
    }
    bench_meet(run);
    int failed = run->op == BENCH_BARRIER && checked ? bench_check_barrier(run, round) : 0;
    double start = bench_now_ns();
    float *in = run->in, *out = run->out;
    for (int k = 0; k < run->repeats && failed == 0; k++, in += run->in_stride, out += run->out_stride) {
        failed = peer->run(peer->state, run->op, in, out, run->count);
    }
    *out_ns = (bench_now_ns() - start) / run->repeats;
    return failed != 0 ? failed : peer->sync(peer->state);
}

static inline int bench_size(bench_run *run, size_t bytes) {
    int rounds = bench_rounds(bytes);
    int warmup = bench_warmup(rounds);
    bool first = run->peer->rank == 0;
    double start = bench_now_ns();
    if (bench_shape(run, bytes) != 0) {
        fprintf(stderr, "bench: no memory for %zu bytes\n", bytes);
        return -1;
    }
    if (first) {
        run->shared->enough = warmup + rounds;
    }
    bench_meet(run);
    int last = warmup + rounds, looks = 0, look_rounds = bytes < BENCH_LINE_BYTES ? BENCH_LINE_ROUNDS : 1;
    for (int i = 0; i <= last; i++) {
        double ns = 0;
        double line_ns = i % look_rounds == 0 ? bench_line(run) : 0;
        if (first && line_ns > 0 && looks < BENCH_MAX_ROUNDS) {
            run->shared->line_ns[looks++] = line_ns;
        }
        bool checked = i == 0 || i == last;
        if (bench_round(run, i, checked, &ns) != 0) {
            return -1;
        }
        if (i >= warmup && !checked) {
            run->shared->nanoseconds[run->peer->rank][i - warmup] = ns;
        }
        if (checked && bench_check_together(run, i) != 0) {
            return -1;
        }
        if (i < last) { /* what rank 0 wrote after the round before, all see after they have met in this one */
            last = __atomic_load_n(&run->shared->enough, __ATOMIC_RELAXED);
        }
        if (first && i + 2 < last && i + 1 >= warmup + BENCH_LEAST_ROUNDS && bench_now_ns() - start > BENCH_SIZE_NS) {
            __atomic_store_n(&run->shared->enough, i + 2, __ATOMIC_RELAXED);
        }
    }
    bench_meet(run);
    if (first) {
        bench_report(run, bytes, last - warmup, looks);
    }
    bench_meet(run);
    bench_give(run->peer, run->in);
    bench_give(run->peer, run->out);
    return 0;
}

/* Measures argv[1] at each size in argv[2..]. Prints lines "op ranks bytes median_us min_us line_ns" on rank 0, line_ns
 * being how far the cores were apart; 0: not known. */
static inline int bench_main(const bench_peer *peer, int argc, char **argv) {
    bench_run run;
    memset(&run, 0, sizeof run);
    run.peer = peer;
    while (argc > 2 && run.op < BENCH_OP_COUNT && strcmp(argv[1], bench_op_names[run.op]) != 0) {
        run.op = (bench_op)(run.op + 1);
    }
    if (argc < 3 || run.op == BENCH_OP_COUNT || peer->ranks > BENCH_MAX_RANKS || peer->ranks < 2) {
        fprintf(stderr, "usage: %s all_reduce|broadcast|all_gather|reduce_scatter|all_to_all|ping_pong|reduce|barrier "
                        "BYTES..., at 2 to %d ranks\n",
                argv[0], (int)BENCH_MAX_RANKS);
        return 2;
    }
    run.shared = bench_map();
    if (run.shared == NULL) {
        return 1;
    }
    for (int i = 2; i < argc; i++) {
        if (bench_size(&run, (size_t)strtoull(argv[i], NULL, 10)) != 0) {
            /* The others spin in bench_meet and must not wait for this rank for ever. */
            __atomic_store_n(&run.shared->failed, 1, __ATOMIC_RELAXED);
            return 3;
        }
    }
    return 0;
}

#endif

/* shm_native: how long the native collectives of plugins/shm take by themselves, without the core around them.
 *
 *     cc -O2 -I. -Itests -o build/shm_native bench/shm_native.c build/libddl.a -lpthread -ldl
 *     build/shm_native [RANKS] [all_reduce ...] [lent|ordinary] [BYTES ...]
 *
 * Each rank is a process. Every rank rewrites its buffer before each round; up to 4 KiB a figure is the time of many
 * rounds with the rewriting, divided by their number (a clock costs more than the operation); beyond, each round is
 * measured by itself, by its slowest rank, and the median of the rounds is shown. Results are compared at the end. */
#define main shm_native_unused_main /* of the test harness */
#include "shm_native.h"
#undef main

enum { ROUNDS = 400 };

static const char *const ddl_kind_names[] = {"",       "barrier", "broadcast",  "reduce",         "all_reduce", "gather",
                                             "scatter", "all_gather", "reduce_scatter", "all_to_all", "scan",       "exscan"};


typedef struct board {
    _Atomic uint32_t arrived, turn;
    double ns[RANKS_MAX][ROUNDS];
} board;

typedef struct plan {
    int kind, n, rounds;
    bool lent;
    uint64_t bytes;
    board *board;
} plan;

__attribute__((optimize("O3"), target_clones("default", "avx2", "arch=x86-64-v4"))) static void
sum(void *arg, void *dst, const void *const *srcs, int32_t n, uint64_t bytes) {
    size_t count = bytes / sizeof(float);
    float *d = dst;
    const float *a = srcs[0], *b = srcs[1];
    (void)arg;
    if (n == 2) {
#pragma GCC ivdep
        for (size_t i = 0; i < count; i++) {
            d[i] = a[i] + b[i];
        }
    } else if (n == 4) {
        const float *c = srcs[2], *e = srcs[3];
#pragma GCC ivdep
        for (size_t i = 0; i < count; i++) {
            d[i] = a[i] + b[i] + c[i] + e[i];
        }
    } else {
        for (size_t i = 0; i < count; i++) {
            float x = a[i];
            for (int32_t k = 1; k < n; k++) {
                x += ((const float *)srcs[k])[i];
            }
            d[i] = x;
        }
    }
}

static void meet(const plan *p) {
    board *b = p->board;
    uint32_t turn = atomic_load(&b->turn);
    if (atomic_fetch_add(&b->arrived, 1) + 1 == (uint32_t)p->n) {
        atomic_store(&b->arrived, 0);
        atomic_store(&b->turn, turn + 1);
    } else {
        while (atomic_load(&b->turn) == turn) {
            if (p->n > 2) {
                sched_yield();
            }
        }
    }
}

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void once(shm *t, void *set, ddl_native_call *call, int looks) {
    void *op;
    int32_t rank;
    call->sequence++;
    shm_transport.native_start(t, set, call, &op);
    while (shm_transport.native_test(t, set, op, looks, &rank) == DDL_IN_PROGRESS) {
        sched_yield();
    }
}

static void rewrite(float *p, size_t count, int value) {
    for (size_t i = 0; i < count; i++) {
        p[i] = (float)((i + (size_t)value) % 16);
    }
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const plan *p) {
    double worst[ROUNDS];
    for (int i = 0; i < p->rounds; i++) {
        worst[i] = 0;
        for (int r = 0; r < p->n; r++) {
            worst[i] = p->board->ns[r][i] > worst[i] ? p->board->ns[r][i] : worst[i];
        }
    }
    qsort(worst, (size_t)p->rounds, sizeof worst[0], ascending);
    return worst[p->rounds / 2];
}

static void rank_main(shm *t, int rank, int n, void *arg) {
    plan *p = arg;
    int32_t ranks[RANKS_MAX];
    for (int r = 0; r < n; r++) {
        ranks[r] = r;
    }
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(rank % 2, &cpus);
    if (getenv("PIN") != NULL) {
        sched_setaffinity(0, sizeof cpus, &cpus);
    }
    void *set, *memory[2] = {malloc(p->bytes * (uint64_t)n + 4096), malloc(p->bytes * (uint64_t)n + 4096)};
    if (p->lent && (shm_lend(t, p->bytes * (uint64_t)n + 4096, &memory[0]) != DDL_OK ||
                    shm_lend(t, p->bytes * (uint64_t)n + 4096, &memory[1]) != DDL_OK)) {
        exit(1);
    }
    bool parts = shm_kinds[p->kind].parts, one = p->kind == DDL_ALL_REDUCE || p->kind == DDL_BROADCAST;
    float *in = memory[0], *out = one ? memory[0] : memory[1];
    size_t count = p->bytes / 4 * (parts ? (size_t)n : 1);
    memset(memory[1], 0, p->bytes * (uint64_t)n);
    meet(p);
    shm_transport.native_open(t, 7, ranks, n, rank, &set);
    meet(p);
    int looks = n > 2 ? 20 : 2000;
    ddl_native_call call = {.size = sizeof call, .kind = p->kind, .element_bytes = 4, .in = in, .out = out, .bytes = p->bytes,
                            .reduce = sum};
    ddl_native_call barrier = call;
    barrier.kind = DDL_BARRIER;
    if (p->bytes <= 4096) {
        int rounds = n > 2 ? 20000 : 200000;
        for (int k = -rounds / 10; k < rounds; k++) {
            if (k == 0) {
                p->board->ns[rank][0] = now_ns();
            }
            rewrite(in, count < 4 ? count : 4, k);
            if (count > 4) {
                memset(in + 4, k, (count - 4) * 4);
            }
            once(t, set, &call, looks);
        }
        p->board->ns[rank][0] = (now_ns() - p->board->ns[rank][0]) / rounds;
        p->rounds = 1;
    } else {
        for (int k = -10; k < p->rounds; k++) {
            rewrite(in, count, rank + k + 10);
            barrier.sequence = call.sequence;
            once(t, set, &barrier, looks);
            call.sequence = barrier.sequence;
            meet(p);
            double start = now_ns();
            once(t, set, &call, looks);
            p->board->ns[rank][k < 0 ? 0 : k] = now_ns() - start;
        }
        for (size_t i = 0; p->kind == DDL_ALL_REDUCE && i < count; i++) {
            float should = 0;
            for (int r = 0; r < n; r++) {
                should += (float)((i + (size_t)(r + p->rounds - 1 + 10)) % 16);
            }
            if (out[i] != should) {
                printf("WRONG at %zu: %g, not %g\n", i, (double)out[i], (double)should);
                exit(1);
            }
        }
    }
    meet(p);
    if (rank == 0) {
        printf("%d ranks, %s, %llu bytes, %s: %.3f us\n", n, p->lent ? "lent" : "ordinary",
               (unsigned long long)p->bytes, ddl_kind_names[p->kind], median(p) / 1e3);
    }
}

int main(int argc, char **argv) {
    static board *b;
    int n = 2, kind = DDL_ALL_REDUCE, lent = -1, sizes = 0;
    uint64_t size[64] = {8, 512, 4096, 8192, 32 << 10, 256 << 10, 1 << 20, 2 << 20, 16 << 20};
    for (int i = 1; i < argc; i++) {
        for (int k = 1; k <= DDL_EXSCAN; k++) {
            kind = strcmp(argv[i], ddl_kind_names[k]) == 0 ? k : kind;
        }
        lent = strcmp(argv[i], "lent") == 0 ? 1 : strcmp(argv[i], "ordinary") == 0 ? 0 : lent;
        uint64_t x = strtoull(argv[i], NULL, 10);
        if (sizes == 0 && x >= 2 && x <= 7) {
            n = (int)x;
        } else if (x > 0) {
            size[sizes++] = x;
        }
    }
    sizes = sizes == 0 ? 9 : sizes;
    test__now = ranks_shared(sizeof *test__now);
    b = ranks_shared(sizeof *b);
    for (int l = lent < 0 ? 0 : lent; l <= (lent < 0 ? 1 : lent); l++) {
        for (int i = 0; i < sizes; i++) {
            plan p = {.kind = kind, .n = n, .lent = l, .bytes = size[i], .board = b,
                      .rounds = size[i] <= 65536 ? 400 : size[i] <= 1 << 20 ? 100 : size[i] <= 4 << 20 ? 30 : 12};
            native_world w = {.fn = rank_main, .arg = &p};
            fflush(stdout);
            native_world_make(&w, n);
            ranks_fork(n, native_fork_rank, &w, 60);
            native_world_free(&w);
        }
    }
    return 0;
}

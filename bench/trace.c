/* What the timeline (DDL_TRACE) costs an all_reduce, by size:
 *
 *     cc -O2 -I. -o build/bench-trace bench/trace.c -lpthread -ldl
 *     DDL_TRANSPORTS=tcp build/ddlrun -n 2 --no-prefix build/bench-trace
 *
 * with_us and without_us: least of many short blocks (100, or an argument), one kind after the other in the same job.
 * On a busy machine they differ by more than the timeline costs; so cost_percent is what does not depend on that: what
 * it takes to record the operation, and its waits with their looks at the clock, over the operation's own least time.
 * It is compiled with the implementation, as a program cannot turn the timeline on and off. */
#define DDL_IMPLEMENTATION
#include "ddl.h"

#include <stdio.h>
#include <stdlib.h>

enum { BLOCKS = 100, RUNS = 20, EVENTS = 1000, RING = 4096 };

static void must(ddl_context *c, ddl_status status) {
    if (status != DDL_OK) {
        fprintf(stderr, "bench-trace: %s\n", ddl_error(c));
        exit(1);
    }
}

static double since_us(uint64_t start, int count) { return (double)(ddl__now_ns() - start) * 1e-3 / count; }

/* Least time of one operation, with the ring or without (NULL). */
static double block_us(ddl_context *c, ddl_group *world, ddl__trace *ring, float *in, float *out, int64_t count) {
    int runs = count > 10000 ? 2 : RUNS;
    c->trace = ring;
    uint64_t start = ddl__now_ns();
    for (int i = 0; i < runs; i++) {
        must(c, ddl_all_reduce(world, ddl_tensor_1d(in, DDL_F32, count), ddl_tensor_1d(out, DDL_F32, count), DDL_SUM));
    }
    double us = since_us(start, runs);
    c->trace = NULL;
    return us;
}

/* Least time to record an operation, and a wait. */
static void event_us(ddl_context *c, ddl_group *world, ddl__trace *ring, double least[2]) {
    least[0] = least[1] = 1e9;
    const ddl__flight *r = ddl__record_of(world, world->sequence);
    c->trace = ring;
    for (int block = 0; block < BLOCKS; block++) {
        uint64_t start = ddl__now_ns();
        for (int i = 0; i < EVENTS; i++) {
            ddl__record_trace(world, r, 0, true);
        }
        double us = since_us(start, EVENTS);
        least[0] = us < least[0] ? us : least[0];
        start = ddl__now_ns();
        for (int i = 0; i < EVENTS; i++) {
            uint64_t from = ddl__now_ns();
            ddl__trace_wait(ring, from, ddl__now_ns(), "ddl_all_reduce");
        }
        us = since_us(start, EVENTS);
        least[1] = us < least[1] ? us : least[1];
    }
    c->trace = NULL;
}

static void measure(ddl_context *c, ddl_group *world, ddl__trace *ring, float *in, float *out, int64_t count,
                    int blocks) {
    double with = 1e9, without = 1e9;
    uint64_t before = ring->count;
    for (int i = 0; i < blocks; i++) {
        double a = block_us(c, world, NULL, in, out, count), b = block_us(c, world, ring, in, out, count);
        without = a < without ? a : without;
        with = b < with ? b : with;
    }
    double events = (double)(ring->count - before) / (blocks * (count > 10000 ? 2 : RUNS));
    must(c, ddl_barrier(world));
    if (ddl_rank(world) == 0) {
        double each[2];
        event_us(c, world, ring, each);
        printf("trace bytes=%lld algorithm=%s without_us=%.3f with_us=%.3f waits=%.2f operation_ns=%.1f wait_ns=%.1f "
               "cost_percent=%.3f\n",
               (long long)count * 4, ddl__record_of(world, world->sequence - 1)->algorithm, without, with, events - 1,
               each[0] * 1e3, each[1] * 1e3, 100 * (each[0] + (events - 1) * each[1]) / without);
    }
    must(c, ddl_barrier(world));
}

int main(int argc, char **argv) {
    int blocks = argc > 1 ? atoi(argv[1]) : BLOCKS;
    static const int64_t counts[] = {2, 1024, 8192, 262144};
    ddl_context *c;
    if (ddl_init(NULL, &c) != DDL_OK) {
        return 1;
    }
    ddl__trace *ring = ddl__trace_new(&c->base, RING);
    float *in = calloc(1 << 18, sizeof *in), *out = calloc(1 << 18, sizeof *out);
    if (c->trace != NULL || ring == NULL || in == NULL || out == NULL) {
        fprintf(stderr, "bench-trace: no memory, or DDL_TRACE is set: it must not be\n");
        return 1;
    }
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        measure(c, ddl_world(c), ring, in, out, counts[i], blocks > 0 ? blocks : 1);
    }
    ddl__trace_free(&c->base, ring);
    free(in);
    free(out);
    return ddl_finalize(&c) == DDL_OK ? 0 : 1;
}

/* ddl-perf: how fast each operation of ddl is here, and whether its results are right. Who knows nccl-tests or the OSU
 * micro-benchmarks knows its options and columns.
 *
 * One timed round: every rank writes its input anew (what was just written is in the cache as after a training step, and
 * a library that keeps old results is caught), barrier, clock, operation, clock. Checked rounds come after the timed
 * ones: the output is poisoned first and compared with a computation of its own (perf_data.h). */
#define _GNU_SOURCE 1
#include "ddl.h"

#include "perf_data.h"
#include "perf_options.h"

#include <inttypes.h>
#include <time.h>

enum { SEND_RECV = 100, PING_PONG = 101, TAG = 1 };

/* blocks: how many times `count` the buffer holds; -1 is one for each rank. */
typedef struct operation {
    const char *name;
    int kind; /* ddl_kind, or one of the above */
    int in_blocks, out_blocks;
    bool reduces, rooted, in_place, has_counts;
} operation;

static const operation operations[] = {
    {"all_reduce", DDL_ALL_REDUCE, 1, 1, true, false, true, false},
    {"broadcast", DDL_BROADCAST, 1, 1, false, true, false, false},
    {"reduce", DDL_REDUCE, 1, 1, true, true, true, false},
    {"all_gather", DDL_ALL_GATHER, 1, -1, false, false, true, false},
    {"reduce_scatter", DDL_REDUCE_SCATTER, -1, 1, true, false, true, false},
    {"all_to_all", DDL_ALL_TO_ALL, -1, -1, false, false, true, false},
    {"gather", DDL_GATHER, 1, -1, false, true, true, false},
    {"scatter", DDL_SCATTER, -1, 1, false, true, true, false},
    {"scan", DDL_SCAN, 1, 1, true, false, true, false},
    {"exscan", DDL_EXSCAN, 1, 1, true, false, true, false},
    {"barrier", DDL_BARRIER, 0, 0, false, false, false, false},
    {"gatherv", DDL_GATHERV, 1, -1, false, true, false, true},
    {"scatterv", DDL_SCATTERV, -1, 1, false, true, false, true},
    {"all_gatherv", DDL_ALL_GATHERV, 1, -1, false, false, false, true},
    {"reduce_scatterv", DDL_REDUCE_SCATTERV, -1, 1, true, false, false, true},
    {"all_to_allv", DDL_ALL_TO_ALLV, -1, -1, false, false, false, true},
    {"send_recv", SEND_RECV, 1, 1, false, false, false, false},
    {"ping_pong", PING_PONG, 1, 1, false, false, false, false},
};

typedef struct bench {
    perf_options options;
    ddl_context *context;
    ddl_group *world;
    int32_t rank, ranks;
    char *first, *second;      /* two buffers of the largest size */
    int64_t *counts, *offsets; /* of v-forms, by rank; all_to_allv uses both halves */
    expected_run *runs;
    int64_t wrong_total;
    int32_t rows;
} bench;

/* One row to be measured, and its buffers. */
typedef struct job {
    const operation *op;
    data_rule rule;
    int64_t count, bytes;
    bool in_place;
    ddl_collective call;
    ddl_request *persistent;
    int32_t run_count;
} job;

typedef struct figures {
    bool done;
    double seconds[3]; /* min, avg, max over ranks of a rank's mean */
    double algbw, busbw;
    int64_t wrong; /* -1: not checked */
} figures;

static void __attribute__((noreturn)) fail(bench *b, const char *what) {
    fprintf(stderr, "ddl-perf: %s: %s\n", what, ddl_error(b->context));
    ddl_abort(b->context, "ddl-perf failed on this rank");
    exit(1);
}

static void good(bench *b, ddl_status status, const char *what) {
    if (status != DDL_OK) {
        fail(b, what);
    }
}

static double now_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- buffers ---------------------------------------------------------------------------------------------------- */

static int64_t blocks(const bench *b, int blocks_of_op) { return blocks_of_op < 0 ? b->ranks : blocks_of_op; }

/* Unequal blocks of v-forms: 1, 2, 3, 1, ... halves of the mean, so that one in three is an ordinary one. */
static int64_t uneven(int64_t count, int32_t index) { return count * (index % 3 + 1) / 2; }

static int64_t offset_of(const int64_t *counts, int32_t rank) {
    int64_t sum = 0;
    for (int32_t i = 0; i < rank; i++) {
        sum += counts[i];
    }
    return sum;
}

/* For all_to_allv counts[0 .. n-1] are sent and counts[n .. 2n-1] received: what i sends to j depends on i + j alone. */
static void make_counts(bench *b, const job *j) {
    for (int32_t i = 0; i < b->ranks; i++) {
        int32_t index = j->call.kind == DDL_ALL_TO_ALLV ? b->rank + i : i;
        b->counts[i] = b->counts[b->ranks + i] = uneven(j->count, index);
    }
}

static int64_t in_count(const bench *b, const job *j) {
    if (!j->op->has_counts) {
        return j->count * blocks(b, j->op->in_blocks);
    }
    return j->op->in_blocks < 0 ? offset_of(b->counts, b->ranks) : b->counts[b->rank];
}

static int64_t out_count(const bench *b, const job *j) {
    if (!j->op->has_counts) {
        return j->count * blocks(b, j->op->out_blocks);
    }
    return j->op->out_blocks < 0 ? offset_of(b->counts, b->ranks) : b->counts[b->rank];
}

/* In place, the smaller buffer is this rank's block of the larger one. */
static void make_call(bench *b, job *j) {
    size_t width = ddl_dtype_bytes(j->rule.dtype);
    char *in = b->first, *out = b->second;
    size_t own = (size_t)j->count * width * (size_t)b->rank;
    if (j->in_place || j->op->kind == DDL_BROADCAST) {
        in = out = b->first;
        in += j->op->in_blocks == 1 && j->op->out_blocks < 0 ? own : 0;
        out += j->op->out_blocks == 1 && j->op->in_blocks < 0 ? own : 0;
    }
    j->call = (ddl_collective){.kind = (ddl_kind)j->op->kind,
                               .op = j->op->reduces ? j->rule.op : DDL_OP_NONE,
                               .root = j->op->rooted ? b->options.root : 0};
    if (j->op->has_counts) {
        make_counts(b, j);
        j->call.counts = b->counts;
        j->call.recv_counts = j->op->kind == DDL_ALL_TO_ALLV ? b->counts + b->ranks : NULL;
    }
    if (j->op->kind != DDL_BARRIER) {
        j->call.in = ddl_tensor_1d(in, j->rule.dtype, in_count(b, j));
        j->call.out = ddl_tensor_1d(out, j->rule.dtype, out_count(b, j));
    }
}

static bool has_input(const bench *b, const job *j) {
    bool from_root = j->op->kind == DDL_BROADCAST || j->op->kind == DDL_SCATTER || j->op->kind == DDL_SCATTERV;
    return j->op->kind != DDL_BARRIER && (!from_root || b->rank == b->options.root);
}

static void write_input(const bench *b, const job *j) {
    if (has_input(b, j)) {
        fill(&j->rule, b->rank, 0, in_count(b, j), j->call.in.data);
    }
}

/* ---- what the output must be ------------------------------------------------------------------------------------ */

static void expect(const bench *b, job *j, expected_run run) { b->runs[j->run_count++] = run; }

/* A reduction of ranks 0 .. last, this rank's part of it from element `index` on. */
static void expect_reduced(const bench *b, job *j, int32_t last, int64_t index) {
    if (last >= 0) {
        expect(b, j, (expected_run){0, out_count(b, j), 0, last, index, true});
    }
}

/* Block r of the output is what rank r holds; from element `index` of its input on. */
static void expect_blocks(const bench *b, job *j, int64_t index) {
    for (int32_t r = 0; r < b->ranks; r++) {
        int64_t count = j->op->has_counts ? b->counts[r] : j->count;
        expect(b, j, (expected_run){j->op->has_counts ? offset_of(b->counts, r) : r * j->count, count, r, r, index, false});
    }
}

/* Each sender's own order of blocks decides where ours begins in its input. */
static void expect_exchanged_v(const bench *b, job *j) {
    for (int32_t r = 0; r < b->ranks; r++) {
        int64_t index = 0;
        for (int32_t i = 0; i < b->rank; i++) {
            index += uneven(j->count, r + i);
        }
        expect(b, j, (expected_run){offset_of(b->counts, r), b->counts[r], r, r, index, false});
    }
}

static void expect_copy(const bench *b, job *j, int32_t from, int64_t index) {
    expect(b, j, (expected_run){0, out_count(b, j), from, from, index, false});
}

static void make_expected(const bench *b, job *j) {
    int32_t root = b->options.root, left = (b->rank + b->ranks - 1) % b->ranks;
    int64_t own = j->op->has_counts ? offset_of(b->counts, b->rank) : b->rank * j->count;
    j->run_count = 0;
    switch (j->op->kind) {
    case DDL_ALL_REDUCE:
        expect_reduced(b, j, b->ranks - 1, 0);
        return;
    case DDL_REDUCE:
        expect_reduced(b, j, b->rank == root ? b->ranks - 1 : -1, 0);
        return;
    case DDL_REDUCE_SCATTER:
    case DDL_REDUCE_SCATTERV:
        expect_reduced(b, j, b->ranks - 1, own);
        return;
    case DDL_SCAN:
        expect_reduced(b, j, b->rank, 0);
        return;
    case DDL_EXSCAN:
        expect_reduced(b, j, b->rank - 1, 0);
        return;
    case DDL_BROADCAST:
        expect_copy(b, j, root, 0);
        return;
    case DDL_SCATTER:
    case DDL_SCATTERV:
        expect_copy(b, j, root, own);
        return;
    case DDL_GATHER:
    case DDL_GATHERV:
        if (b->rank != root) {
            return;
        }
        expect_blocks(b, j, 0);
        return;
    case DDL_ALL_GATHER:
    case DDL_ALL_GATHERV:
        expect_blocks(b, j, 0);
        return;
    case DDL_ALL_TO_ALL:
        expect_blocks(b, j, own);
        return;
    case DDL_ALL_TO_ALLV:
        expect_exchanged_v(b, j);
        return;
    case SEND_RECV:
        expect_copy(b, j, left, 0);
        return;
    case PING_PONG:
        if (b->rank < 2) {
            expect_copy(b, j, 1 - b->rank, 0);
        }
        return;
    default:
        return;
    }
}

/* ---- running an operation --------------------------------------------------------------------------------------- */

static ddl_status run_blocking(ddl_group *g, const ddl_collective *c) {
    switch (c->kind) {
    case DDL_BARRIER:
        return ddl_barrier(g);
    case DDL_BROADCAST:
        return ddl_broadcast(g, c->in, c->root);
    case DDL_REDUCE:
        return ddl_reduce(g, c->in, c->out, c->op, c->root);
    case DDL_ALL_REDUCE:
        return ddl_all_reduce(g, c->in, c->out, c->op);
    case DDL_GATHER:
        return ddl_gather(g, c->in, c->out, c->root);
    case DDL_SCATTER:
        return ddl_scatter(g, c->in, c->out, c->root);
    case DDL_ALL_GATHER:
        return ddl_all_gather(g, c->in, c->out);
    case DDL_REDUCE_SCATTER:
        return ddl_reduce_scatter(g, c->in, c->out, c->op);
    case DDL_ALL_TO_ALL:
        return ddl_all_to_all(g, c->in, c->out);
    case DDL_SCAN:
        return ddl_scan(g, c->in, c->out, c->op);
    case DDL_EXSCAN:
        return ddl_exscan(g, c->in, c->out, c->op);
    case DDL_GATHERV:
        return ddl_gatherv(g, c->in, c->out, c->counts, c->offsets, c->root);
    case DDL_SCATTERV:
        return ddl_scatterv(g, c->in, c->out, c->counts, c->offsets, c->root);
    case DDL_ALL_GATHERV:
        return ddl_all_gatherv(g, c->in, c->out, c->counts, c->offsets);
    case DDL_REDUCE_SCATTERV:
        return ddl_reduce_scatterv(g, c->in, c->out, c->counts, c->op);
    default:
        return ddl_all_to_allv(g, c->in, c->counts, c->offsets, c->out, c->recv_counts, c->recv_offsets);
    }
}

static ddl_status start_nonblocking(ddl_group *g, const ddl_collective *c, ddl_request **r) {
    switch (c->kind) {
    case DDL_BARRIER:
        return ddl_ibarrier(g, r);
    case DDL_BROADCAST:
        return ddl_ibroadcast(g, c->in, c->root, r);
    case DDL_REDUCE:
        return ddl_ireduce(g, c->in, c->out, c->op, c->root, r);
    case DDL_ALL_REDUCE:
        return ddl_iall_reduce(g, c->in, c->out, c->op, r);
    case DDL_GATHER:
        return ddl_igather(g, c->in, c->out, c->root, r);
    case DDL_SCATTER:
        return ddl_iscatter(g, c->in, c->out, c->root, r);
    case DDL_ALL_GATHER:
        return ddl_iall_gather(g, c->in, c->out, r);
    case DDL_REDUCE_SCATTER:
        return ddl_ireduce_scatter(g, c->in, c->out, c->op, r);
    case DDL_ALL_TO_ALL:
        return ddl_iall_to_all(g, c->in, c->out, r);
    case DDL_SCAN:
        return ddl_iscan(g, c->in, c->out, c->op, r);
    case DDL_EXSCAN:
        return ddl_iexscan(g, c->in, c->out, c->op, r);
    case DDL_GATHERV:
        return ddl_igatherv(g, c->in, c->out, c->counts, c->offsets, c->root, r);
    case DDL_SCATTERV:
        return ddl_iscatterv(g, c->in, c->out, c->counts, c->offsets, c->root, r);
    case DDL_ALL_GATHERV:
        return ddl_iall_gatherv(g, c->in, c->out, c->counts, c->offsets, r);
    case DDL_REDUCE_SCATTERV:
        return ddl_ireduce_scatterv(g, c->in, c->out, c->counts, c->op, r);
    default:
        return ddl_iall_to_allv(g, c->in, c->counts, c->offsets, c->out, c->recv_counts, c->recv_offsets, r);
    }
}

static ddl_status send_recv(const bench *b, const job *j, int32_t to, int32_t from) {
    const ddl_collective *c = &j->call;
    if (b->options.mode == MODE_BLOCKING) {
        return ddl_send_recv(b->world, c->in, to, TAG, c->out, from, TAG, NULL);
    }
    ddl_request *requests[2] = {NULL, NULL};
    ddl_status status = ddl_irecv(b->world, c->out, from, TAG, &requests[0]);
    if (status == DDL_OK) {
        status = ddl_isend(b->world, c->in, to, TAG, &requests[1]);
    }
    ddl_status waited = ddl_wait_all(requests, 2, NULL);
    return status != DDL_OK ? status : waited;
}

/* There and back again, between ranks 0 and 1. */
static ddl_status ping_pong(const bench *b, const job *j) {
    const ddl_collective *c = &j->call;
    if (b->rank > 1) {
        return DDL_OK;
    }
    ddl_status status = b->rank == 0 ? ddl_send(b->world, c->in, 1, TAG) : ddl_recv(b->world, c->out, 0, TAG, NULL);
    if (status != DDL_OK) {
        return status;
    }
    return b->rank == 0 ? ddl_recv(b->world, c->out, 1, TAG, NULL) : ddl_send(b->world, c->in, 0, TAG);
}

static ddl_status run_once(bench *b, job *j) {
    if (j->op->kind == SEND_RECV) {
        return send_recv(b, j, (b->rank + 1) % b->ranks, (b->rank + b->ranks - 1) % b->ranks);
    }
    if (j->op->kind == PING_PONG) {
        return ping_pong(b, j);
    }
    if (b->options.mode == MODE_BLOCKING) {
        return run_blocking(b->world, &j->call);
    }
    ddl_status status = DDL_OK;
    ddl_request *request = NULL;
    if (b->options.mode == MODE_NONBLOCKING) {
        status = start_nonblocking(b->world, &j->call, &request);
        return status == DDL_OK ? ddl_wait(&request, NULL) : status;
    }
    if (j->persistent == NULL) {
        status = ddl_collective_init(b->world, &j->call, &j->persistent);
    }
    status = status == DDL_OK ? ddl_start(j->persistent) : status;
    return status == DDL_OK ? ddl_wait(&j->persistent, NULL) : status;
}

/* ---- measuring -------------------------------------------------------------------------------------------------- */

static double over_ranks(bench *b, double value, ddl_op op) {
    good(b, ddl_all_reduce_scalar(b->world, &value, op), "collecting the figures");
    return value;
}

/* Mean seconds of a timed round on this rank. */
static double measure(bench *b, job *j) {
    double total = 0;
    for (int32_t round = -b->options.warmup; round < b->options.rounds; round++) {
        if (b->options.rewrite || round == -b->options.warmup || round == 0) {
            j->rule.round++;
            write_input(b, j);
        }
        good(b, ddl_barrier(b->world), "the barrier before a round");
        double start = now_seconds();
        ddl_status status = run_once(b, j);
        total += round >= 0 ? now_seconds() - start : 0;
        good(b, status, j->op->name);
    }
    return total / b->options.rounds;
}

static int64_t check_once(bench *b, job *j) {
    j->rule.round++;
    if (!j->in_place && j->op->kind != DDL_BARRIER) {
        memset(j->call.out.data, 0xa5, (size_t)out_count(b, j) * ddl_dtype_bytes(j->rule.dtype));
    }
    write_input(b, j);
    good(b, run_once(b, j), j->op->name);
    int64_t wrong = 0;
    for (int32_t i = 0; i < j->run_count; i++) {
        wrong += count_wrong(&j->rule, &b->runs[i], j->call.out.data);
    }
    return wrong;
}

/* The factors of nccl-tests, doc/PERFORMANCE.md: what of algbw has to go over the busiest link at least. */
static double bus_factor(const bench *b, const operation *op) {
    double n = b->ranks;
    switch (op->kind) {
    case DDL_ALL_REDUCE:
        return 2 * (n - 1) / n;
    case DDL_ALL_GATHER:
    case DDL_REDUCE_SCATTER:
    case DDL_ALL_TO_ALL:
    case DDL_GATHER:
    case DDL_SCATTER:
    case DDL_GATHERV:
    case DDL_SCATTERV:
    case DDL_ALL_GATHERV:
    case DDL_REDUCE_SCATTERV:
    case DDL_ALL_TO_ALLV:
        return (n - 1) / n;
    default:
        return 1;
    }
}

static figures run_job(bench *b, job *j) {
    figures f = {.done = true, .wrong = -1};
    make_call(b, j);
    make_expected(b, j);
    double mean = measure(b, j);
    bool watches = j->op->kind == PING_PONG && b->rank > 1; /* takes no part, its time says nothing */
    mean = j->op->kind == PING_PONG ? mean / 2 : mean;
    f.seconds[SPREAD_MIN] = over_ranks(b, watches ? 1e30 : mean, DDL_MIN);
    f.seconds[SPREAD_AVG] =
        over_ranks(b, watches ? 0 : mean, DDL_SUM) / (j->op->kind == PING_PONG ? 2 : (double)b->ranks);
    f.seconds[SPREAD_MAX] = over_ranks(b, watches ? 0 : mean, DDL_MAX);
    f.algbw = (double)j->bytes / f.seconds[b->options.spread] / 1e9;
    f.busbw = f.algbw * bus_factor(b, j->op);
    int64_t wrong = 0;
    for (int32_t i = 0; i < b->options.checks; i++) {
        wrong += check_once(b, j);
    }
    if (b->options.checks > 0 && j->op->kind != DDL_BARRIER) {
        f.wrong = (int64_t)over_ranks(b, (double)wrong, DDL_SUM);
        b->wrong_total += f.wrong;
    }
    if (j->persistent != NULL) {
        good(b, ddl_request_free(&j->persistent), "freeing a persistent request");
    }
    return f;
}

/* ---- output ----------------------------------------------------------------------------------------------------- */

static const char *const mode_names[] = {"blocking", "nonblocking", "persistent"};

static const char *op_name(ddl_op op) {
    for (size_t i = 0; i < sizeof op_names / sizeof op_names[0]; i++) {
        if (op_names[i].value == op) {
            return op_names[i].name;
        }
    }
    return "none";
}

static void print_head(const bench *b) {
    int32_t v = ddl_version();
    if (b->rank != 0) {
        return;
    }
    if (b->options.format == FORMAT_CSV) {
        puts("op,ranks,mode,size_bytes,count,type,redop,root,algorithm,in_place,time_us,time_min_us,time_avg_us,"
             "time_max_us,algbw_GBps,busbw_GBps,wrong");
    } else if (b->options.format == FORMAT_JSON) {
        printf("{\"version\": \"%d.%d.%d\", \"ranks\": %d, \"results\": [", v / 10000, v / 100 % 100, v % 100, b->ranks);
    } else {
        printf("# ddl-perf of ddl %d.%d.%d: %d rank%s, %s, %d warm-up and %d timed rounds, time is the %s over "
               "ranks\n",
               v / 10000, v / 100 % 100, v % 100, b->ranks, b->ranks == 1 ? "" : "s",
               mode_names[b->options.mode], b->options.warmup, b->options.rounds, spread_names[b->options.spread].name);
    }
}

static void print_table_head(const bench *b, const operation *op) {
    if (b->rank != 0 || b->options.format != FORMAT_TABLE) {
        return;
    }
    printf("#\n# %s\n", op->name);
    printf("# %48s  out-of-place %21s  in-place\n", "", "");
    printf("# %10s %11s %6s %6s %5s %10s %7s %7s %6s %10s %7s %7s %6s  %s\n", "size", "count", "type", "redop", "root",
           "time", "algbw", "busbw", "#wrong", "time", "algbw", "busbw", "#wrong", "algorithm");
    printf("# %10s %11s %6s %6s %5s %10s %7s %7s %6s %10s %7s %7s\n", "(B)", "(elements)", "", "", "", "(us)", "(GB/s)",
           "(GB/s)", "", "(us)", "(GB/s)", "(GB/s)");
}

static void print_table_side(const bench *b, const figures *f) {
    char wrong[24] = "N/A";
    if (!f->done) {
        printf(" %10s %7s %7s %6s", "-", "-", "-", "-");
        return;
    }
    if (f->wrong >= 0) {
        snprintf(wrong, sizeof wrong, "%" PRId64, f->wrong);
    }
    printf(" %10.2f %7.3f %7.3f %6s", f->seconds[b->options.spread] * 1e6, f->algbw, f->busbw, wrong);
}

/* One record of csv or json; sides[0] is out of place, sides[1] in place. */
static void print_records(bench *b, const job *j, const figures sides[2], const char *algorithm) {
    static const char csv[] = "%s,%d,%s,%" PRId64 ",%" PRId64 ",%s,%s,%d,%s,%d,%.3f,%.3f,%.3f,%.3f,%.6f,%.6f,%" PRId64
                              "\n";
    static const char json[] = "%s\n {\"op\": \"%s\", \"ranks\": %d, \"mode\": \"%s\", \"size_bytes\": %" PRId64
                               ", \"count\": %" PRId64 ", \"type\": \"%s\", \"redop\": \"%s\", \"root\": %d, "
                               "\"algorithm\": \"%s\", \"in_place\": %s, \"time_us\": %.3f, \"time_min_us\": %.3f, "
                               "\"time_avg_us\": %.3f, \"time_max_us\": %.3f, \"algbw_GBps\": %.6f, "
                               "\"busbw_GBps\": %.6f, \"wrong\": %" PRId64 "}";
    const char *dtype = ddl_dtype_name(j->rule.dtype), *op = op_name(j->op->reduces ? j->rule.op : DDL_OP_NONE);
    const char *mode = mode_names[b->options.mode];
    int32_t root = j->op->rooted ? b->options.root : -1;
    for (int i = 0; i < 2; i++) {
        const figures *f = &sides[i];
        double us = f->seconds[b->options.spread] * 1e6, least = f->seconds[SPREAD_MIN] * 1e6,
               mean = f->seconds[SPREAD_AVG] * 1e6, most = f->seconds[SPREAD_MAX] * 1e6;
        if (!f->done) {
            continue;
        }
        if (b->options.format == FORMAT_CSV) {
            printf(csv, j->op->name, b->ranks, mode, j->bytes, j->count, dtype, op, root, algorithm, i, us, least, mean,
                   most, f->algbw, f->busbw, f->wrong);
        } else {
            printf(json, b->rows++ == 0 ? "" : ",", j->op->name, b->ranks, mode, j->bytes, j->count, dtype, op, root,
                   algorithm, i == 1 ? "true" : "false", us, least, mean, most, f->algbw, f->busbw, f->wrong);
        }
    }
}

static void print_row(bench *b, const job *j, const figures sides[2]) {
    ddl_estimate_info estimate = {.algorithm = "messages"};
    if (j->op->kind < SEND_RECV) {
        good(b, ddl_estimate(b->world, &j->call, &estimate), "asking for the algorithm");
    }
    if (b->rank != 0) {
        return;
    }
    if (b->options.format != FORMAT_TABLE) {
        print_records(b, j, sides, estimate.algorithm);
        return;
    }
    printf("  %10" PRId64 " %11" PRId64 " %6s %6s %5d", j->bytes, j->count, ddl_dtype_name(j->rule.dtype),
           op_name(j->op->reduces ? j->rule.op : DDL_OP_NONE), j->op->rooted ? b->options.root : -1);
    print_table_side(b, &sides[0]);
    print_table_side(b, &sides[1]);
    printf("  %s\n", estimate.algorithm);
    fflush(stdout);
}

/* ---- what to measure -------------------------------------------------------------------------------------------- */

static bool is_bitwise(ddl_op op) { return op >= DDL_BAND && op <= DDL_LXOR; }

static bool is_valid(ddl_op op, ddl_dtype dtype, int kind) {
    bool floats = dtype >= DDL_F16 && dtype <= DDL_F64, scans = kind == DDL_SCAN || kind == DDL_EXSCAN;
    return !(floats && is_bitwise(op)) && !(op == DDL_AVG && (dtype == DDL_BOOL || scans));
}

/* Blocks of the larger side of an operation; 0: it has no data. */
static int64_t most_blocks(const bench *b, const operation *op) {
    int64_t in = blocks(b, op->in_blocks), out = blocks(b, op->out_blocks);
    return in > out ? in : out;
}

/* Elements of a block for so many bytes: at least one where there are any. */
static int64_t count_of(int64_t bytes, int64_t width, int64_t most) {
    int64_t count = most == 0 ? 0 : bytes / width / most;
    return count == 0 && most > 0 && bytes > 0 ? 1 : count;
}

/* One size of one operation; both sides, where in place exists. */
static void measure_size(bench *b, const operation *op, ddl_dtype dtype, ddl_op redop, int64_t count) {
    job j = {.op = op, .rule = {dtype, op->reduces ? redop : DDL_OP_NONE, b->ranks, 0}, .count = count};
    j.bytes = count * most_blocks(b, op) * (int64_t)ddl_dtype_bytes(dtype);
    figures sides[2] = {{0}, {0}};
    sides[0] = run_job(b, &j);
    if (op->in_place) {
        j.in_place = true;
        sides[1] = run_job(b, &j);
    }
    print_row(b, &j, sides);
}

/* Sizes that come to the same elements are one row. */
static void measure_sizes(bench *b, const operation *op, ddl_dtype dtype, ddl_op redop) {
    int64_t width = (int64_t)ddl_dtype_bytes(dtype), most = most_blocks(b, op), last = -1;
    for (int64_t bytes = b->options.begin_bytes; bytes <= b->options.end_bytes;) {
        int64_t count = count_of(bytes, width, most);
        if (count != last) {
            measure_size(b, op, dtype, redop, count);
            last = count;
        }
        int64_t next = b->options.step_bytes > 0 ? bytes + b->options.step_bytes
                                                 : (int64_t)((double)bytes * b->options.factor);
        bytes = next > bytes ? next : bytes + 1;
    }
}

static void measure_operation(bench *b, const operation *op) {
    if (op->kind == PING_PONG && b->ranks < 2) {
        return;
    }
    print_table_head(b, op);
    for (size_t d = 0; d < sizeof dtype_names / sizeof dtype_names[0]; d++) {
        ddl_dtype dtype = (ddl_dtype)dtype_names[d].value;
        if (b->options.dtype != DDL_DTYPE_NONE && b->options.dtype != dtype) {
            continue;
        }
        for (size_t o = 0; o < (op->reduces ? sizeof op_names / sizeof op_names[0] : 1); o++) {
            ddl_op redop = op->reduces ? op_names[o].value : DDL_OP_NONE;
            if (!op->reduces || ((b->options.op == DDL_OP_NONE || b->options.op == redop) && is_valid(redop, dtype, op->kind))) {
                measure_sizes(b, op, dtype, redop);
            }
        }
    }
}

static const operation *find_operation(const char *name) {
    for (size_t i = 0; i < sizeof operations / sizeof operations[0]; i++) {
        if (strcmp(operations[i].name, name) == 0) {
            return &operations[i];
        }
    }
    return NULL;
}

static void check_options(const bench *b, const operation *op) {
    const perf_options *o = &b->options;
    if (o->root >= b->ranks) {
        refuse("--root is %d, but ranks go from 0 to %d.", o->root, b->ranks - 1);
    }
    if (o->op != DDL_OP_NONE && o->dtype != DDL_DTYPE_NONE && op != NULL && op->reduces &&
        !is_valid(o->op, o->dtype, op->kind)) {
        refuse("The op %s is not defined for %s of %s.", op_name(o->op), op->name, ddl_dtype_name(o->dtype));
    }
    if (op != NULL && op->kind == PING_PONG && b->ranks < 2) {
        refuse("ping_pong needs two ranks, and there is one; start it with ddlrun -n 2.");
    }
}

static void allocate(bench *b) {
    /* uneven blocks need half as much again; a block is at least one element */
    size_t bytes = (size_t)b->options.end_bytes * 3 / 2 + 3 * ELEMENT_MAX * (size_t)b->ranks;
    b->first = malloc(bytes);
    b->second = malloc(bytes);
    b->counts = malloc(2 * (size_t)b->ranks * sizeof *b->counts);
    b->runs = malloc((size_t)b->ranks * sizeof *b->runs);
    if (b->first == NULL || b->second == NULL || b->counts == NULL || b->runs == NULL) {
        fprintf(stderr, "ddl-perf: There is no memory for two buffers of %zu bytes; a smaller --maxbytes needs less.\n",
                bytes);
        ddl_abort(b->context, "ddl-perf has no memory on this rank");
        exit(1);
    }
    memset(b->first, 0, bytes); /* the pages are there before the first round */
    memset(b->second, 0, bytes);
}

/* Lines that begin with #, as all that is not the table. */
static void print_stats(bench *b) {
    char text[8192];
    uint64_t *last = calloc((size_t)b->ranks, sizeof *last);
    ddl_rank_stats own = {0};
    ddl_rank_stats_get(b->context, b->rank, &own);
    size_t need = ddl_stats_text(b->context, text, sizeof text);
    if (last == NULL || need == 0 ||
        ddl_all_gather(b->world, ddl_tensor_1d(&own.last, DDL_U64, 1), ddl_tensor_1d(last, DDL_U64, b->ranks)) != DDL_OK) {
        fprintf(stderr, "ddl-perf: the counters cannot be read: %s\n", ddl_error(b->context));
    } else if (b->rank == 0) {
        printf("#\n");
        for (char *line = strtok(text, "\n"); line != NULL; line = strtok(NULL, "\n")) {
            printf("# %s\n", line);
        }
        printf("# by messages, all that a rank hears from were there before it so often, by rank:");
        for (int32_t i = 0; i < b->ranks; i++) {
            printf(" %" PRIu64, last[i]);
        }
        printf("\n");
    }
    free(last);
}

int main(int argc, char **argv) {
    bench b = {.options = parse_options(argc, argv)};
    const operation *op = find_operation(b.options.operation);
    if (op == NULL && strcmp(b.options.operation, "all") != 0) {
        refuse("The operation \"%s\" is not known.", b.options.operation);
    }
    ddl_config config = {.algorithm = b.options.algorithm};
    if (ddl_init(&config, &b.context) != DDL_OK) {
        return 1; /* the log has said why */
    }
    b.world = ddl_world(b.context);
    b.rank = ddl_rank(b.world);
    b.ranks = ddl_size(b.world);
    check_options(&b, op);
    allocate(&b);
    print_head(&b);
    for (size_t i = 0; i < sizeof operations / sizeof operations[0]; i++) {
        if (op == NULL || op == &operations[i]) {
            measure_operation(&b, &operations[i]);
        }
    }
    if (b.rank == 0 && b.options.format == FORMAT_JSON) {
        printf("\n], \"wrong\": %" PRId64 "}\n", b.wrong_total);
    } else if (b.rank == 0 && b.options.format == FORMAT_TABLE) {
        printf("#\n# %s: %" PRId64 " elements are wrong\n", b.options.checks > 0 ? "checked" : "not checked",
               b.wrong_total);
    }
    if (b.options.stats && b.options.format == FORMAT_TABLE) {
        print_stats(&b);
    }
    ddl_finalize(&b.context);
    free(b.first);
    free(b.second);
    free(b.counts);
    free(b.runs);
    return ended("ddl-perf", b.wrong_total > 0 ? 1 : 0);
}

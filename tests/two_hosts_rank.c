/* One rank of the jobs that test_two_hosts.py, test_launch.py and test_vm.py start. What it finds is printed, one line
 * per event; times are of CLOCK_MONOTONIC, which is one clock for all processes of a kernel.
 *
 *     two_hosts_rank init                     joins and leaves
 *     two_hosts_rank twice                    joins and leaves, and again in the same process
 *     two_hosts_rank outlive                  joins and leaves; even ranks end half a second after the others
 *     two_hosts_rank correct [COUNT]          all collectives, against plain loops; with COUNT of one size, for slow links
 *     two_hosts_rank loop COUNT SECONDS MS    sums COUNT floats until rank 0 has done so for SECONDS, with MS of
 *                                             computing between two; after a death, the survivors shrink and go on
 *     two_hosts_rank once COUNT               one sum of COUNT floats, announced before it begins
 *
 * Prints: `joined N`, `outlived N`, `failed STATUS: sentence`, `correct`, `looping`, `error T STATUS: sentence`,
 * `shrink T STATUS SIZE: sentence`, `done T`. Wrong numbers print `WRONG ...` and end with 3. */
#define _GNU_SOURCE
#include "ddl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define POISON (-77777.0f)

static ddl_context *context;
static ddl_group *world;
static int rank, size;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void pause_ms(int ms) {
    struct timespec t = {ms / 1000, (long)(ms % 1000) * 1000000};
    nanosleep(&t, NULL);
}

/* Integers in floats: every order of summing gives the same bits. */
static float value(int of_rank, int64_t i) { return (float)((of_rank * 7 + (int)(i % 1000) * 3) % 50 + 1); }

static float sum_of(int first, int last, int64_t i) {
    float sum = 0;
    for (int r = first; r <= last; r++) {
        sum += value(r, i);
    }
    return sum;
}

static float *floats(int64_t count, float with) {
    float *p = malloc((size_t)(count + 1) * sizeof *p);
    if (p == NULL) {
        exit(4);
    }
    for (int64_t i = 0; i < count; i++) {
        p[i] = with;
    }
    return p;
}

static float *inputs(int64_t count) {
    float *p = floats(count, 0);
    for (int64_t i = 0; i < count; i++) {
        p[i] = value(rank, i);
    }
    return p;
}

static void wrong(const char *what, int64_t at, float got, float wanted) {
    printf("WRONG %s at %lld on rank %d: %g instead of %g\n", what, (long long)at, rank, (double)got, (double)wanted);
    exit(3);
}

static void must(ddl_status status, const char *what) {
    if (status != DDL_OK) {
        printf("error %.6f %s: %s: %s\n", now_s(), ddl_status_name(status), what, ddl_error(context));
        exit(2);
    }
}

/* ---- all collectives ---- */

/* counts[r] elements belong to rank r in the v-forms. */
static int64_t ragged(int64_t count, int r) { return count + r; }

static int64_t ragged_offset(int64_t count, int r) {
    int64_t at = 0;
    for (int k = 0; k < r; k++) {
        at += ragged(count, k);
    }
    return at;
}

/* Elements that rank a sends to rank b in all_to_allv. */
static int64_t crossed(int64_t count, int a, int b) { return count + (a * 2 + b) % 5; }

static void reductions(int64_t count, int root) {
    float *in = inputs(count * size), *out = floats(count * size, POISON);
    must(ddl_all_reduce(world, DDL_VIEW(in, count), DDL_VIEW(out, count), DDL_SUM), "all_reduce");
    for (int64_t i = 0; i < count; i++) {
        float sum = sum_of(0, size - 1, i);
        if (out[i] != sum) {
            wrong("all_reduce", i, out[i], sum);
        }
        out[i] = POISON;
    }
    must(ddl_reduce(world, DDL_VIEW(in, count), DDL_VIEW(out, count), DDL_MAX, root), "reduce");
    for (int64_t i = 0; i < count; i++) {
        float most = 0;
        for (int r = 0; r < size; r++) {
            most = value(r, i) > most ? value(r, i) : most;
        }
        if (out[i] != (rank == root ? most : POISON)) {
            wrong("reduce", i, out[i], most);
        }
        out[i] = POISON;
    }
    must(ddl_reduce_scatter(world, DDL_VIEW(in, count * size), DDL_VIEW(out, count), DDL_SUM), "reduce_scatter");
    for (int64_t i = 0; i < count; i++) {
        float sum = sum_of(0, size - 1, rank * count + i);
        if (out[i] != sum) {
            wrong("reduce_scatter", i, out[i], sum);
        }
        out[i] = POISON;
    }
    free(in);
    free(out);
}

static void scans(int64_t count) {
    float *in = inputs(count), *out = floats(count, POISON), *before = floats(count, POISON);
    must(ddl_scan(world, DDL_VIEW(in, count), DDL_VIEW(out, count), DDL_SUM), "scan");
    must(ddl_exscan(world, DDL_VIEW(in, count), DDL_VIEW(before, count), DDL_SUM), "exscan");
    for (int64_t i = 0; i < count; i++) {
        float upto = sum_of(0, rank, i), below = rank == 0 ? POISON : sum_of(0, rank - 1, i);
        if (out[i] != upto) {
            wrong("scan", i, out[i], upto);
        }
        if (before[i] != below) {
            wrong("exscan", i, before[i], below);
        }
    }
    free(in);
    free(out);
    free(before);
}

static void spreads(int64_t count, int root) {
    float *in = inputs(count * size), *out = floats(count * size, POISON);
    must(ddl_all_gather(world, DDL_VIEW(in, count), DDL_VIEW(out, count * size)), "all_gather");
    for (int64_t i = 0; i < count * size; i++) {
        float wanted = value((int)(i / count), i % count);
        if (out[i] != wanted) {
            wrong("all_gather", i, out[i], wanted);
        }
        out[i] = POISON;
    }
    must(ddl_gather(world, DDL_VIEW(in, count), DDL_VIEW(out, count * size), root), "gather");
    for (int64_t i = 0; i < count * size; i++) {
        float wanted = rank == root ? value((int)(i / count), i % count) : POISON;
        if (out[i] != wanted) {
            wrong("gather", i, out[i], wanted);
        }
        out[i] = POISON;
    }
    must(ddl_all_to_all(world, DDL_VIEW(in, count * size), DDL_VIEW(out, count * size)), "all_to_all");
    for (int64_t i = 0; i < count * size; i++) {
        float wanted = value((int)(i / count), rank * count + i % count);
        if (out[i] != wanted) {
            wrong("all_to_all", i, out[i], wanted);
        }
        out[i] = POISON;
    }
    must(ddl_scatter(world, DDL_VIEW(in, count * size), DDL_VIEW(out, count), root), "scatter");
    must(ddl_broadcast(world, DDL_VIEW(in, count), root), "broadcast");
    for (int64_t i = 0; i < count; i++) {
        if (out[i] != value(root, rank * count + i)) {
            wrong("scatter", i, out[i], value(root, rank * count + i));
        }
        if (in[i] != value(root, i)) {
            wrong("broadcast", i, in[i], value(root, i));
        }
    }
    free(in);
    free(out);
}

static void ragged_forms(int64_t count, int root) {
    int64_t counts[64], total = ragged_offset(count, size), mine = ragged(count, rank), at = ragged_offset(count, rank);
    float *in = inputs(total), *out = floats(total, POISON), *part = floats(mine, POISON);
    for (int r = 0; r < size; r++) {
        counts[r] = ragged(count, r);
    }
    must(ddl_all_gatherv(world, DDL_VIEW(in, mine), DDL_VIEW(out, total), counts, NULL), "all_gatherv");
    for (int r = 0; r < size; r++) {
        for (int64_t i = 0; i < counts[r]; i++) {
            float got = out[ragged_offset(count, r) + i];
            if (got != value(r, i)) {
                wrong("all_gatherv", i, got, value(r, i));
            }
        }
    }
    must(ddl_reduce_scatterv(world, DDL_VIEW(in, total), DDL_VIEW(part, mine), counts, DDL_SUM), "reduce_scatterv");
    for (int64_t i = 0; i < mine; i++) {
        float wanted = sum_of(0, size - 1, at + i);
        if (part[i] != wanted) {
            wrong("reduce_scatterv", i, part[i], wanted);
        }
        part[i] = POISON;
    }
    must(ddl_scatterv(world, DDL_VIEW(in, total), DDL_VIEW(part, mine), counts, NULL, root), "scatterv");
    for (int64_t i = 0; i < mine; i++) {
        if (part[i] != value(root, at + i)) {
            wrong("scatterv", i, part[i], value(root, at + i));
        }
    }
    memset(out, 0, (size_t)total * sizeof *out);
    must(ddl_gatherv(world, DDL_VIEW(part, mine), DDL_VIEW(out, total), counts, NULL, root), "gatherv");
    for (int64_t i = 0; i < total; i++) {
        float wanted = rank == root ? value(root, i) : 0;
        if (out[i] != wanted) {
            wrong("gatherv", i, out[i], wanted);
        }
    }
    free(in);
    free(out);
    free(part);
}

static void crossed_form(int64_t count) {
    int64_t to[64], from[64], sent = 0, got = 0;
    for (int r = 0; r < size; r++) {
        sent += to[r] = crossed(count, rank, r);
        got += from[r] = crossed(count, r, rank);
    }
    float *in = inputs(sent), *out = floats(got, POISON);
    must(ddl_all_to_allv(world, DDL_VIEW(in, sent), to, NULL, DDL_VIEW(out, got), from, NULL), "all_to_allv");
    int64_t k = 0;
    for (int r = 0; r < size; r++) {
        int64_t at = 0;
        for (int b = 0; b < rank; b++) {
            at += crossed(count, r, b);
        }
        for (int64_t i = 0; i < from[r]; i++, k++) {
            if (out[k] != value(r, at + i)) {
                wrong("all_to_allv", k, out[k], value(r, at + i));
            }
        }
    }
    free(in);
    free(out);
}

static int correct(int64_t only) {
    const int64_t counts[] = {only > 0 ? only : 1, 1000, 50001};
    for (int c = 0; c < (only > 0 ? 1 : 3); c++) {
        for (int root = only > 0 ? size - 1 : 0; root < size; root++) {
            reductions(counts[c], root);
            spreads(counts[c], root);
            ragged_forms(counts[c], root);
        }
        scans(counts[c]);
        crossed_form(counts[c]);
        must(ddl_barrier(world), "barrier");
    }
    ddl_estimate_info e;
    float *big = floats(1 << 20, 1);
    ddl_collective d = {.kind = DDL_ALL_REDUCE, .op = DDL_SUM, .in = DDL_VIEW(big, 1 << 20), .out = DDL_VIEW(big, 1 << 20)};
    must(ddl_estimate(world, &d, &e), "estimate");
    double start = now_s();
    must(ddl_all_reduce(world, d.in, d.out, DDL_SUM), "all_reduce");
    printf("correct; 4 MiB all_reduce by %s: %.6f s estimated, %.6f s taken, latency %.6f s\n", e.algorithm, e.seconds,
           now_s() - start, e.latency_s);
    free(big);
    return 0;
}

/* ---- one sum after the other ---- */

/* One checked sum over any group. The last element is the vote to stop, of rank 0 of the group. */
static ddl_status sum_once(ddl_group *group, const int *members, float *in, float *out, int64_t count, float *stop) {
    for (int64_t i = 0; i < count; i++) {
        in[i] = value(rank, i);
        out[i] = POISON;
    }
    in[count] = *stop;
    ddl_status status = ddl_all_reduce(group, DDL_VIEW(in, count + 1), DDL_VIEW(out, count + 1), DDL_SUM);
    for (int64_t i = 0; i < count && status == DDL_OK; i++) {
        float sum = 0;
        for (int m = 0; m < ddl_size(group); m++) {
            sum += value(members[m], i);
        }
        if (out[i] != sum) {
            wrong("all_reduce", i, out[i], sum);
        }
    }
    *stop = out[count];
    return status;
}

static ddl_status loop(ddl_group *group, int64_t count, double seconds, int ms) {
    int members[64];
    int32_t of_group[64], of_world[64];
    for (int i = 0; i < ddl_size(group); i++) {
        of_group[i] = i;
    }
    ddl_group_translate(group, of_group, ddl_size(group), world, of_world);
    for (int i = 0; i < ddl_size(group); i++) {
        members[i] = of_world[i];
    }
    float *in = floats(count + 1, 0), *out = floats(count + 1, POISON), stop = 0;
    double start = now_s();
    ddl_status status = DDL_OK;
    for (long n = 0; status == DDL_OK && stop == 0; n++) {
        stop = ddl_rank(group) == 0 && now_s() - start > seconds ? 1 : 0;
        status = sum_once(group, members, in, out, count, &stop);
        if (n == 0 && status == DDL_OK) {
            printf("looping %.6f\n", now_s());
        }
        pause_ms(ms);
    }
    free(in);
    free(out);
    return status;
}

static int loop_and_shrink(int64_t count, double seconds, int ms) {
    ddl_status status = loop(world, count, seconds, ms);
    if (status == DDL_OK) {
        return 0;
    }
    printf("error %.6f %s: %s\n", now_s(), ddl_status_name(status), ddl_error(context));
    ddl_group *left = NULL;
    double start = now_s();
    status = ddl_group_shrink(world, &left);
    printf("shrink %.3f %s %d: %s\n", now_s() - start, ddl_status_name(status), ddl_size(left), ddl_error(context));
    if (status == DDL_OK) {
        must(loop(left, count < 1000 ? count : 1000, 0.2, 1), "all_reduce of the survivors");
        printf("survived\n");
    }
    ddl_group_free(&left);
    return 0;
}

static int once(int64_t count) {
    int members[64];
    for (int r = 0; r < size; r++) {
        members[r] = r;
    }
    float *in = floats(count + 1, 0), *out = floats(count + 1, POISON), stop = 0;
    must(ddl_barrier(world), "barrier");
    printf("looping %.6f\n", now_s());
    must(sum_once(world, members, in, out, count, &stop), "all_reduce");
    free(in);
    free(out);
    return 0;
}

static int job(int argc, char **argv) {
    char why[1024] = "";
    const char *mode = argc > 1 ? argv[1] : "init";
    ddl_config config = {.error_text = why, .error_bytes = sizeof why};
    ddl_status status = ddl_init(&config, &context);
    if (status != DDL_OK) {
        printf("failed %s: %s\n", ddl_status_name(status), why);
        return 1;
    }
    world = ddl_world(context);
    rank = ddl_rank(world);
    size = ddl_size(world);
    printf("joined %d of %d\n", rank, size);
    int result = 0;
    if (strcmp(mode, "correct") == 0) {
        result = correct(argc > 2 ? atoll(argv[2]) : 0);
    } else if (strcmp(mode, "loop") == 0 && argc == 5) {
        result = loop_and_shrink(atoll(argv[2]), atof(argv[3]), atoi(argv[4]));
    } else if (strcmp(mode, "once") == 0 && argc == 3) {
        result = once(atoll(argv[2]));
    }
    must(ddl_finalize(&context), "finalize");
    if (strcmp(mode, "outlive") == 0 && rank % 2 == 0) {
        (void)nanosleep(&(struct timespec){0, 500000000}, NULL);
        printf("outlived %d\n", rank);
    }
    printf("done %.6f\n", now_s());
    return result;
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    int result = job(argc, argv);
    return result == 0 && argc > 1 && strcmp(argv[1], "twice") == 0 ? job(argc, argv) : result;
}

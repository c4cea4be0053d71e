/* One rank of the jobs that test_trace.py starts.
 *
 *     trace_rank run          a known sequence of operations
 *     trace_rank die          rank 1 ends without a word in the middle; the others leave in order
 *     trace_rank early        rank 0 leaves at once, the others a second later
 *     trace_rank stay         all stay until they are killed
 *     trace_rank steps        three all_reduces of 96,000 bytes
 *     trace_rank late         ten messages around the ranks, then ten all_reduces of 96,000 bytes; rank 2
 *                         computes for 0.05 s before or during each
 *     trace_rank train        trainers: three steps with two buckets, then two with two compressed tensors
 *     trace_rank speed N      N all_reduces of 8 bytes, and prints the seconds of the fastest block
 *
 * Prints `meet RANK NS`: when it passed a barrier, of its own CLOCK_MONOTONIC. */
#include "ddl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void must(ddl_context *c, ddl_status status, const char *what) {
    if (status != DDL_OK) {
        printf("failed %s %s: %s\n", what, ddl_status_name(status), ddl_error(c));
        exit(1);
    }
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void speed(ddl_context *c, ddl_group *world, int count) {
    float x[2] = {1, 2}, y[2];
    double best = 1e9;
    for (int block = 0; block < 200; block++) {
        double start = now_s();
        for (int i = 0; i < count; i++) {
            must(c, ddl_all_reduce(world, ddl_tensor_1d(x, DDL_F32, 2), ddl_tensor_1d(y, DDL_F32, 2), DDL_SUM), "speed");
        }
        double took = now_s() - start;
        best = took < best ? took : best;
    }
    if (ddl_rank(world) == 0) {
        printf("speed %.9f\n", best / count);
    }
}

static void run(ddl_context *c, ddl_group *world) {
    static float x[100000], y[100000];
    int rank = ddl_rank(world), size = ddl_size(world);
    ddl_group *pair = NULL;
    ddl_request *r[2] = {NULL, NULL};
    if (ddl_trace_end(c) != DDL_ERR_STATE || ddl_trace_begin(c, NULL) != DDL_ERR_ARG || ddl_feature("trace") != 1) {
        printf("failed: wrong calls are not refused\n");
        exit(1);
    }
    for (int step = 0; step < 5; step++) {
        must(c, ddl_trace_begin(c, "step \"\\\n"), "begin"); /* what JSON must not take as it is */
        must(c, ddl_trace_begin(c, "backward"), "begin");
        must(c, ddl_iall_reduce(world, ddl_tensor_1d(x, DDL_F32, 100000), ddl_tensor_1d(y, DDL_F32, 100000), DDL_SUM,
                                &r[0]), "iall_reduce");
        must(c, ddl_iall_reduce(world, ddl_tensor_1d(x, DDL_F32, 1000), ddl_tensor_1d(x, DDL_F32, 1000), DDL_MAX, &r[1]),
             "iall_reduce");
        must(c, ddl_trace_end(c), "end");
        must(c, ddl_wait_all(r, 2, NULL), "wait");
        must(c, ddl_trace_end(c), "end");
    }
    must(c, ddl_group_split(world, rank % 2, rank, &pair), "split");
    must(c, ddl_broadcast(pair, ddl_tensor_1d(x, DDL_F32, 3), 0), "broadcast");
    if (rank == 0) {
        usleep(50000); /* the receiver waits for rank 0 */
        must(c, ddl_send(world, ddl_tensor_1d(x, DDL_F32, 500), size - 1, 3), "send");
    } else if (rank == size - 1) {
        must(c, ddl_recv(world, ddl_tensor_1d(x, DDL_F32, 500), 0, 3, NULL), "recv");
    }
    must(c, ddl_group_free(&pair), "free");
    for (int i = 0; i < 3; i++) {
        usleep(rank == 1 ? 60000 : 1000); /* the others wait for rank 1 */
        must(c, ddl_barrier(world), "barrier");
    }
}

static void steps(ddl_context *c, ddl_group *world) {
    static float x[24000], y[24000];
    for (int i = 0; i < 3; i++) {
        must(c, ddl_all_reduce(world, DDL_ARRAY(x), DDL_ARRAY(y), DDL_SUM), "all_reduce");
    }
}

/* Late to begin, then late to go on. */
static void late(ddl_context *c, ddl_group *world) {
    static float x[24000], y[24000];
    ddl_request *r[2] = {NULL, NULL};
    int rank = ddl_rank(world), size = ddl_size(world);
    for (int i = 0; i < 20; i++) {
        usleep(rank == 2 && i % 2 == 0 ? 50000 : 0);
        if (i < 10) {
            must(c, ddl_irecv(world, DDL_ARRAY(y), (rank + size - 1) % size, 3, &r[0]), "irecv");
            must(c, ddl_isend(world, DDL_ARRAY(x), (rank + 1) % size, 3, &r[1]), "isend");
        } else {
            must(c, ddl_iall_reduce(world, DDL_ARRAY(x), DDL_ARRAY(y), DDL_SUM, &r[0]), "iall_reduce");
        }
        usleep(rank == 2 && i % 2 == 1 ? 50000 : 0);
        must(c, ddl_wait_all(r, 2, NULL), "wait");
    }
}

static void step(ddl_context *c, ddl_trainer *t, int count, int tensors) {
    for (int k = 0; k < count; k++) {
        for (int i = tensors - 1; i >= 0; i--) {
            must(c, ddl_grad_ready(t, i), "grad_ready");
        }
        must(c, ddl_step(t), "step");
    }
}

/* Backward's order fills a bucket with w3 and w2, the next with w1 and w0. */
static void train(ddl_context *c, ddl_group *world) {
    static float weight[10000], gradient[10000];
    static const char *const names[] = {"w0", "w1", "w2", "w3"};
    static const int64_t counts[] = {1000, 2000, 500, 2500};
    ddl_trainer_config fused = {.schedule = DDL_SCHEDULE_FUSED, .bucket_bytes = 11000};
    ddl_trainer_options half = {.compression = {.kind = DDL_COMPRESS_F16}};
    ddl_trainer_options few = {.compression = {.kind = DDL_COMPRESS_TOP_K, .k = 100}};
    ddl_trainer *t;
    must(c, ddl_trainer_create(world, &fused, &t), "create");
    for (int64_t i = 0, at = 0; i < 4; at += counts[i++]) {
        must(c, ddl_trainer_add(t, names[i], ddl_tensor_1d(weight + at, DDL_F32, counts[i]),
                                ddl_tensor_1d(gradient + at, DDL_F32, counts[i]), NULL, NULL), "add");
    }
    must(c, ddl_trainer_start(t), "start");
    step(c, t, 3, 4);
    must(c, ddl_trainer_free(&t), "free");
    must(c, ddl_trainer_create(world, NULL, &t), "create");
    must(c, ddl_trainer_add(t, "half", ddl_tensor_1d(weight, DDL_F32, 3000), ddl_tensor_1d(gradient, DDL_F32, 3000), &half,
                            NULL), "add");
    must(c, ddl_trainer_add(t, "few", ddl_tensor_1d(weight + 3000, DDL_F32, 4000),
                            ddl_tensor_1d(gradient + 3000, DDL_F32, 4000), &few, NULL), "add");
    must(c, ddl_trainer_start(t), "start");
    step(c, t, 2, 2);
    must(c, ddl_trainer_free(&t), "free");
}

int main(int argc, char **argv) {
    ddl_context *c;
    char why[1024] = "";
    ddl_config config = {.error_text = why, .error_bytes = sizeof why};
    const char *mode = argc > 1 ? argv[1] : "run";
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (ddl_init(&config, &c) != DDL_OK) {
        printf("failed init: %s\n", why);
        return 1;
    }
    ddl_group *world = ddl_world(c);
    if (strcmp(mode, "speed") == 0) {
        speed(c, world, atoi(argv[2]));
    } else if (strcmp(mode, "steps") == 0) {
        steps(c, world);
    } else if (strcmp(mode, "late") == 0) {
        late(c, world);
    } else if (strcmp(mode, "train") == 0) {
        train(c, world);
    } else if (strcmp(mode, "die") == 0) {
        must(c, ddl_barrier(world), "barrier");
        if (ddl_rank(world) == 1) {
            _exit(7);
        }
        printf("barrier %s\n", ddl_status_name(ddl_barrier(world)));
    } else if (strcmp(mode, "early") == 0) {
        must(c, ddl_barrier(world), "barrier");
        usleep(ddl_rank(world) == 0 ? 0 : 1000000);
    } else if (strcmp(mode, "stay") == 0) {
        printf("staying\n");
        pause();
    } else {
        run(c, world);
    }
    must(c, ddl_finalize(&c), "finalize");
    printf("done\n");
    return 0;
}

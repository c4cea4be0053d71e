/* A rank for tests that hurt it from outside: test_syscall_failure.py, test_litter.py. Its whole life, every result
 * verified. Ends with 0, with 10 after an error that was reported by a status and a sentence, with 20 after wrong bits.
 *     fault_rank ROUNDS      -1: until it is killed; then it says "running" when all are there */
#include "ddl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COUNT = 50000 };

static float ordinary_in[COUNT], ordinary_out[COUNT];
static float *in = ordinary_in, *out = ordinary_out;

/* Every other round uses tensor memory, which a transport may show to all. */
static ddl_status lend(ddl_context *c, ddl_tensor *tensors) {
    int64_t count = COUNT;
    ddl_status status = ddl_tensor_alloc(c, DDL_F32, 1, &count, &tensors[0]);
    return status < 0 ? status : ddl_tensor_alloc(c, DDL_F32, 1, &count, &tensors[1]);
}

static void use(const ddl_tensor *tensors, int lent) {
    in = lent ? tensors[0].data : ordinary_in;
    out = lent ? tensors[1].data : ordinary_out;
}

static ddl_status reduce(ddl_group *g, int64_t count, int64_t salt) {
    int32_t n = ddl_size(g), me = ddl_rank(g);
    for (int64_t i = 0; i < count; i++) {
        in[i] = (float)((i + salt) % 97 * (me + 1));
        out[i] = -1;
    }
    ddl_status status = ddl_all_reduce(g, ddl_tensor_1d(in, DDL_F32, count), ddl_tensor_1d(out, DDL_F32, count), DDL_SUM);
    for (int64_t i = 0; status == DDL_OK && i < count; i++) {
        float expected = (float)((i + salt) % 97 * (n * (n + 1) / 2));
        if (out[i] < expected || out[i] > expected) {
            fprintf(stderr, "element %lld is %g, expected %g\n", (long long)i, (double)out[i], (double)expected);
            exit(20);
        }
    }
    return status;
}

/* Around the ring, in ordinary memory. */
static ddl_status shift(ddl_group *g) {
    int32_t n = ddl_size(g), me = ddl_rank(g), from = (me + n - 1) % n;
    for (int64_t i = 0; i < COUNT; i++) {
        in[i] = (float)(i % 89 * (me + 1));
        out[i] = -1;
    }
    ddl_status status = ddl_send_recv(g, ddl_tensor_1d(in, DDL_F32, COUNT), (me + 1) % n, 1,
                                      ddl_tensor_1d(out, DDL_F32, COUNT), from, 1, NULL);
    for (int64_t i = 0; status == DDL_OK && i < COUNT; i++) {
        float expected = (float)(i % 89 * (from + 1));
        if (out[i] < expected || out[i] > expected) {
            fprintf(stderr, "element %lld of rank %d's is %g, expected %g\n", (long long)i, from, (double)out[i],
                    (double)expected);
            exit(20);
        }
    }
    return status;
}

static ddl_status work(ddl_context *c, long rounds) {
    ddl_group *world = ddl_world(c), *half = NULL;
    int me = ddl_rank(world), n = ddl_size(world);
    int32_t flag = 1;
    ddl_tensor tensors[2] = {{0}, {0}};
    ddl_status status = ddl_barrier(world);
    status = status < 0 ? status : lend(c, tensors);
    status = status < 0 ? status : shift(world);
    if (rounds < 0 && status == DDL_OK) {
        printf("running\n");
        fflush(stdout);
    }
    for (long i = 0; i != rounds && status == DDL_OK; i++) {
        use(tensors, i / 4 % 2 == 1);
        status = reduce(world, i % 4 == 3 ? COUNT : 1 + i % 100, i);
        status = status < 0 ? status : ddl_broadcast(world, ddl_tensor_1d(out, DDL_F32, 1 + i % 4 * 1000), (int)(i % n));
    }
    status = status < 0 ? status : ddl_group_split(world, 0, -me, &half);
    status = status < 0 ? status : reduce(half, 1000, 5);
    status = status < 0 ? status : ddl_agree(world, &flag);
    status = status < 0 ? status : ddl_barrier(world);
    ddl_group_free(&half);
    ddl_tensor_free(c, &tensors[0]);
    ddl_tensor_free(c, &tensors[1]);
    return status;
}

int main(int argc, char **argv) {
    char why[1024] = "";
    ddl_context *c = NULL;
    ddl_config config = {.error_text = why, .error_bytes = sizeof why};
    ddl_status status = ddl_init(&config, &c);
    if (status == DDL_OK) {
        status = work(c, argc > 1 ? atol(argv[1]) : 20);
        snprintf(why, sizeof why, "%s", ddl_error(c));
        if (ddl_finalize(&c) != DDL_OK) {
            return 21;
        }
    }
    if (status < 0) {
        fprintf(stderr, "%s: %s\n", ddl_status_name(status), why);
        return why[0] != 0 ? 10 : 22; /* an error has a sentence */
    }
    return 0;
}

/* ddl: the ddl column: the blocking calls of ddl.h, as a user would write them. DDL_BENCH_MEMORY=tensor: on memory of
 * ddl_tensor_alloc. */
#define _GNU_SOURCE
#include "measure.h"
#define DDL_IMPLEMENTATION
#include "ddl.h"

static ddl_tensor bench_view(float *p, size_t count) {
    return DDL_VIEW(p, count);
}

static ddl_status bench_ddl_ping_pong(ddl_group *world, ddl_tensor in, ddl_tensor out) {
    int32_t rank = ddl_rank(world);
    if (rank > 1) {
        return DDL_OK;
    }
    ddl_status status = rank == 0 ? ddl_send(world, in, 1, 7) : DDL_OK;
    if (status == DDL_OK) {
        status = ddl_recv(world, out, 1 - rank, 7, NULL);
    }
    return status == DDL_OK && rank == 1 ? ddl_send(world, in, 0, 7) : status;
}

static ddl_status bench_ddl_call(ddl_group *world, bench_op op, float *in, float *out, size_t count) {
    size_t all = count * (size_t)ddl_size(world);
    switch (op) {
    case BENCH_ALL_REDUCE:
        return ddl_all_reduce(world, bench_view(out, count), bench_view(out, count), DDL_SUM);
    case BENCH_BROADCAST:
        return ddl_broadcast(world, bench_view(out, count), 0);
    case BENCH_ALL_GATHER:
        return ddl_all_gather(world, bench_view(in, count), bench_view(out, all));
    case BENCH_REDUCE_SCATTER:
        return ddl_reduce_scatter(world, bench_view(in, all), bench_view(out, count), DDL_SUM);
    case BENCH_ALL_TO_ALL:
        return ddl_all_to_all(world, bench_view(in, all), bench_view(out, all));
    case BENCH_PING_PONG:
        return bench_ddl_ping_pong(world, bench_view(in, count), bench_view(out, count));
    case BENCH_REDUCE:
        return ddl_reduce(world, bench_view(in, count), bench_view(out, count), DDL_SUM, 0);
    case BENCH_BARRIER:
        return ddl_barrier(world);
    default:
        return DDL_ERR_ARG;
    }
}

static int bench_ddl_said(ddl_group *world, ddl_status status) {
    if (status != DDL_OK) {
        fprintf(stderr, "ddl: %s: %s\n", ddl_status_name(status), ddl_error(ddl_group_context(world)));
        return -1;
    }
    return 0;
}

static int bench_ddl_run(void *state, bench_op op, float *in, float *out, size_t count) {
    return bench_ddl_said(state, bench_ddl_call(state, op, in, out, count));
}

static int bench_ddl_sync(void *state) {
    return bench_ddl_said(state, ddl_barrier(state));
}

static void *bench_ddl_take(void *state, size_t bytes) {
    ddl_tensor t;
    int64_t count = (int64_t)(bytes / sizeof(float));
    ddl_status status = ddl_tensor_alloc(ddl_group_context(state), DDL_F32, 1, &count, &t);
    return bench_ddl_said(state, status) == 0 ? t.data : NULL;
}

static void bench_ddl_give(void *state, void *memory) {
    ddl_tensor t = ddl_tensor_1d(memory, DDL_F32, 1);
    ddl_tensor_free(ddl_group_context(state), &t);
}

int main(int argc, char **argv) {
    char why[1024] = "";
    ddl_config config = {.error_text = why, .error_bytes = sizeof why};
    ddl_context *context = NULL;
    if (ddl_init(&config, &context) != DDL_OK) {
        fprintf(stderr, "ddl: %s\n", why);
        return 1;
    }
    ddl_group *world = ddl_world(context);
    bench_peer peer = {ddl_rank(world), ddl_size(world), world, bench_ddl_sync, bench_ddl_run, NULL, NULL};
    const char *memory = getenv("DDL_BENCH_MEMORY");
    if (memory != NULL && strcmp(memory, "tensor") == 0) {
        peer.take = bench_ddl_take;
        peer.give = bench_ddl_give;
    }
    int rc = bench_main(&peer, argc, argv);
    ddl_finalize(&context);
    return rc;
}

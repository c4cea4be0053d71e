/* halo.c: the heat equation on a grid that is cut into strips of rows, one on each rank; neighbours exchange rows.
 *
 * Build:  cc -O2 -std=c11 -I. -o halo examples/halo.c -lpthread -ldl
 * Run:    ddlrun -n 4 ./halo
 * Run:    ddlrun -n 1 ./halo
 * Prints: 4 strips, 50 steps in ordinary memory: every cell is that of one process
 * Prints: 1 strips, 50 steps in ordinary memory: every cell is that of one process
 *
 * With --device cuda (ddlrun -n 4 ./halo --device cuda) the strips are in the memory of GPUs: messages and kernels are
 * put on one stream, and the host waits for none of them. The first strip has no neighbour above it and the last none
 * below: their peer is DDL_NO_RANK, and the row there stays as it is. */
#define DDL_IMPLEMENTATION
#include "ddl.h"

#include "gpu.h"
#include "halo.h"

enum { ROWS = 203, COLUMNS = 130, STEPS = 50, UPWARD = 1, DOWNWARD = 2 };

typedef struct strip {
    ddl_context *context;
    ddl_group *world;
    int32_t above, below, device; /* ranks; DDL_HOST or a GPU's number */
    int64_t first, rows;          /* of the grid's inner rows */
    ddl_tensor now, next;         /* rows + 2 rows of COLUMNS */
    gpu gpu;
} strip;

static float start_of(int64_t row, int64_t column) { return (float)((row * 37 + column * 101) % 97); }

/* Some rows of a strip's grid. */
static ddl_tensor rows_of(const strip *s, const ddl_tensor *grid, int64_t row, int64_t count) {
    ddl_tensor t = ddl_tensor_1d((float *)grid->data + row * COLUMNS, DDL_F32, count * COLUMNS);
    t.device = s->device;
    return t;
}

/* Both neighbours at once: what goes up is followed by what goes down. */
static ddl_status exchange(const strip *s) {
    ddl_status status = ddl_send_recv(s->world, rows_of(s, &s->now, 1, 1), s->above, UPWARD,
                                      rows_of(s, &s->now, s->rows + 1, 1), s->below, UPWARD, NULL);
    return status != DDL_OK ? status
                            : ddl_send_recv(s->world, rows_of(s, &s->now, s->rows, 1), s->below, DOWNWARD,
                                            rows_of(s, &s->now, 0, 1), s->above, DOWNWARD, NULL);
}

static ddl_status step(strip *s) {
    halo_args a = {s->now.data, s->next.data, s->rows, COLUMNS};
    ddl_tensor now = s->now;
    ddl_status status = exchange(s);
    if (s->device != DDL_HOST) {
        status = status == DDL_OK && gpu_run(&s->gpu, "halo_step", a.rows * a.columns, &a) != 0 ? DDL_ERR_SYSTEM
                                                                                                : status;
    }
    for (int64_t i = 0; s->device == DDL_HOST && i < a.rows * a.columns; i++) {
        halo_one(&a, i);
    }
    s->now = s->next;
    s->next = now;
    return status;
}

/* Both grids begin alike, so that the rows outside of the grid are the same in both. */
static ddl_status begin(strip *s) {
    int64_t count = (s->rows + 2) * COLUMNS;
    float *start = malloc((size_t)count * sizeof *start);
    for (int64_t i = 0; start != NULL && i < count; i++) {
        start[i] = start_of(s->first + i / COLUMNS, i % COLUMNS);
    }
    ddl_status status = start != NULL ? DDL_OK : DDL_ERR_NOMEM;
    ddl_tensor *const grids[] = {&s->now, &s->next};
    for (int i = 0; i < 2 && status == DDL_OK; i++) {
        status = s->device == DDL_HOST ? ddl_tensor_alloc(s->context, DDL_F32, 1, &count, grids[i])
                                       : ddl_tensor_alloc_on(s->context, s->device, DDL_F32, 1, &count, grids[i]);
        ddl_tensor from = ddl_tensor_1d(start, DDL_F32, count);
        status = status == DDL_OK ? ddl_tensor_copy(s->context, *grids[i], from) : status;
    }
    free(start);
    return status;
}

/* Compares the strip with the whole grid, which each rank computes by itself. */
static ddl_status compare(const strip *s, double *right) {
    static float whole[2][(ROWS + 2) * COLUMNS];
    for (int64_t i = 0; i < (ROWS + 2) * COLUMNS; i++) {
        whole[0][i] = whole[1][i] = start_of(i / COLUMNS, i % COLUMNS);
    }
    for (int k = 0; k < STEPS; k++) {
        halo_args a = {whole[k % 2], whole[1 - k % 2], ROWS, COLUMNS};
        for (int64_t i = 0; i < ROWS * COLUMNS; i++) {
            halo_one(&a, i);
        }
    }
    float *mine = calloc((size_t)(s->rows + 1) * COLUMNS, sizeof *mine);
    ddl_tensor to = ddl_tensor_1d(mine, DDL_F32, s->rows * COLUMNS);
    ddl_status status = mine != NULL ? ddl_tensor_copy(s->context, to, rows_of(s, &s->now, 1, s->rows)) : DDL_ERR_NOMEM;
    *right = status == DDL_OK && memcmp(mine, whole[STEPS % 2] + (s->first + 1) * COLUMNS,
                                        (size_t)(s->rows * COLUMNS) * sizeof *mine) == 0;
    free(mine);
    return status;
}

/* A GPU for this rank, and a stream for its messages and kernels. Returns NULL, or why not. */
static const char *take_gpu(strip *s, const char *program) {
    int32_t count = ddl_device_count(s->context), index = count > 0 ? ddl_rank(s->world) % count : 0;
    if (count == 0) {
        return "ddl finds no GPU (ddl-info says why)";
    }
    const char *why = gpu_open(&s->gpu, index, program, "halo");
    s->device = index + 1;
    if (why == NULL && ddl_group_stream(s->world, s->device, s->gpu.stream) != DDL_OK) {
        why = ddl_error(s->context);
    }
    return why;
}

static ddl_status run(strip *s, double *right) {
    ddl_status status = begin(s);
    for (int k = 0; k < STEPS && status == DDL_OK; k++) {
        status = step(s);
    }
    if (s->device != DDL_HOST && status == DDL_OK && s->gpu.stream_wait(s->gpu.stream) != 0) {
        status = DDL_ERR_SYSTEM;
    }
    return status == DDL_OK ? compare(s, right) : status;
}

int main(int argc, char **argv) {
    static strip s;
    double right = 0;
    int cuda = argc == 3 && strcmp(argv[1], "--device") == 0 && strcmp(argv[2], "cuda") == 0;
    if (argc > 1 && !cuda) {
        fprintf(stderr, "halo: the only option is --device cuda.\n");
        return 2;
    }
    gpu_prepare();
    if (ddl_init(NULL, &s.context) != DDL_OK) {
        return 1;
    }
    s.world = ddl_world(s.context);
    int32_t rank = ddl_rank(s.world), ranks = ddl_size(s.world);
    s.above = rank > 0 ? rank - 1 : DDL_NO_RANK;
    s.below = rank + 1 < ranks ? rank + 1 : DDL_NO_RANK;
    ddl_part(ROWS, ranks, rank, &s.first, &s.rows);
    const char *why = cuda ? take_gpu(&s, argv[0]) : NULL;
    if (why != NULL) {
        fprintf(stderr, "halo: --device cuda cannot be used on rank %d: %s.\n", rank, why);
        ddl_abort(s.context, "a rank has no GPU");
        return 1;
    }
    if (run(&s, &right) != DDL_OK || ddl_group_stream(s.world, DDL_HOST, NULL) != DDL_OK ||
        ddl_all_reduce_scalar(s.world, &right, DDL_MIN) != DDL_OK) {
        fprintf(stderr, "%s\n", ddl_error(s.context));
        ddl_abort(s.context, "a strip failed");
        return 1;
    }
    if (rank == 0) {
        printf("%d strips, %d steps %s: %s\n", ranks, STEPS, cuda ? "on GPUs" : "in ordinary memory",
               right > 0 ? "every cell is that of one process" : "a cell is WRONG");
    }
    ddl_tensor_free(s.context, &s.now);
    ddl_tensor_free(s.context, &s.next);
    ddl_finalize(&s.context);
    return right > 0 ? 0 : 1;
}

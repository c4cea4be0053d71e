/* embedding.c: a click model whose embeddings live in a sparse table on parameter servers.
 *
 * Build:  cc -O2 -std=c11 -I. -o embedding examples/embedding.c -lpthread -ldl -lm
 * Run:    ddlrun -n 3 ./embedding
 * Run:    ddlrun -n 3 ./embedding --dedicated
 * Prints: 3 workers, 2 servers beside them
 * Prints: 2 workers, 1 server of its own
 * Prints: the model has learned who clicks what
 *
 * A user clicks an item with probability sigmoid(user . item): both are rows of one table, 8 numbers for each id. There
 * are 2^64 ids; a row exists once somebody has asked for it. Each worker sees clicks of its own (drawn from hidden vectors),
 * pulls the rows that its batch needs, and pushes their gradients; the server's optimizer (Adam, row by row) does the
 * rest. An id that is in a batch twice is pulled twice, and its gradients are added up. */
#define DDL_IMPLEMENTATION
#include "ddl.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { USERS = 400, ITEMS = 100, WIDTH = 8, HIDDEN = 3, BATCH = 256, STEPS = 400 };

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        if ((call) < 0) {                                                                                              \
            fprintf(stderr, "%s\n", ddl_error(context));                                                               \
            ddl_abort(context, "an example failed");                                                                   \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

static uint64_t next_random(uint64_t *state) { /* splitmix64 */
    uint64_t z = (*state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

static float uniform(uint64_t *state) { return (float)(next_random(state) >> 40) / 16777216.0f; }

/* What the model has to find out: each user and item has a hidden taste. */
static float taste(uint64_t id, int j) {
    uint64_t state = id * 31 + (uint64_t)j;
    return 3.0f * (uniform(&state) - 0.5f);
}

static uint64_t user_id(int i) { return (UINT64_C(0x75736572) << 32) + (uint64_t)i; }
static uint64_t item_id(int i) { return (UINT64_C(0x6974656d) << 32) + (uint64_t)i; }

typedef struct batch {
    uint64_t ids[2 * BATCH]; /* users, then items */
    float clicked[BATCH];
    float rows[2 * BATCH][WIDTH], grads[2 * BATCH][WIDTH];
} batch;

static void draw(batch *b, uint64_t *random) {
    for (int i = 0; i < BATCH; i++) {
        float score = 0;
        b->ids[i] = user_id((int)(next_random(random) % USERS));
        b->ids[BATCH + i] = item_id((int)(next_random(random) % ITEMS));
        for (int j = 0; j < HIDDEN; j++) {
            score += taste(b->ids[i], j) * taste(b->ids[BATCH + i], j);
        }
        b->clicked[i] = uniform(random) < 1 / (1 + expf(-score));
    }
}

/* Logistic loss of the batch, and its gradient for each row. */
static float gradients(batch *b) {
    float loss = 0;
    for (int i = 0; i < BATCH; i++) {
        const float *user = b->rows[i], *item = b->rows[BATCH + i];
        float score = 0;
        for (int j = 0; j < WIDTH; j++) {
            score += user[j] * item[j];
        }
        float p = 1 / (1 + expf(-score)), wrong = (p - b->clicked[i]) / BATCH;
        loss -= logf(b->clicked[i] > 0 ? p : 1 - p) / BATCH;
        for (int j = 0; j < WIDTH; j++) {
            b->grads[i][j] = wrong * item[j];
            b->grads[BATCH + i][j] = wrong * user[j];
        }
    }
    return loss;
}

static int work(ddl_context *context, ddl_ps *ps, int32_t worker) {
    static batch b;
    int32_t table;
    uint64_t random = 1000 + (uint64_t)worker;
    float first = 0, last = 0;
    ddl_ps_table_config config = {.width = WIDTH, .uniform = 0.1f, .seed = 1};
    TRY(ddl_ps_table_create(ps, &config, &table));
    for (int step = 0; step < STEPS; step++) {
        draw(&b, &random);
        TRY(ddl_ps_pull_rows(ps, table, b.ids, 2 * BATCH, DDL_VIEW(&b.rows[0][0], 2 * BATCH * WIDTH)));
        float loss = gradients(&b);
        TRY(ddl_ps_push_rows(ps, table, b.ids, 2 * BATCH, DDL_VIEW(&b.grads[0][0], 2 * BATCH * WIDTH), NULL));
        TRY(ddl_ps_clock(ps));
        first = step < 20 ? first + loss / 20 : first;
        last = step >= STEPS - 20 ? last + loss / 20 : last;
    }
    if (worker == 0) {
        printf("loss %.3f at the beginning, %.3f at the end: %s\n", (double)first, (double)last,
               last < 0.9f * first ? "the model has learned who clicks what" : "the model has learned nothing");
    }
    return last < 0.9f * first ? 0 : 1;
}

int main(int argc, char **argv) {
    ddl_context *context = NULL;
    ddl_ps *ps = NULL;
    ddl_ps_info info;
    char error[1024] = "";
    if (argc > 2 || (argc == 2 && strcmp(argv[1], "--dedicated") != 0)) {
        fprintf(stderr, "unknown argument %s\nusage: ddlrun -n 4 embedding [--dedicated]\n", argv[argc - 1]);
        return 2;
    }
    ddl_config joining = {.error_text = error, .error_bytes = sizeof error};
    if (ddl_init(&joining, &context) < 0) {
        fprintf(stderr, "%s\n", error);
        return 1;
    }
    ddl_group *world = ddl_world(context);
    int alone = argc > 1 && ddl_size(world) > 1;
    ddl_ps_config config = {.servers = alone || ddl_size(world) == 1 ? 1 : 2,
                            .dedicated = alone,
                            .sync = {.mode = DDL_SYNC_SSP, .staleness = 2},
                            .optimizer = {.kind = DDL_ADAM, .learning_rate = 0.02}};
    TRY(ddl_ps_create(world, &config, NULL, 0, &ps));
    TRY(ddl_ps_info_get(ps, &info));
    if (info.worker == 0) {
        printf("%d workers, %d server%s %s\n", info.workers, info.servers, info.servers > 1 ? "s" : "",
               alone ? "of its own" : "beside them");
    }
    int failed = 0;
    if (info.worker >= 0) {
        failed = work(context, ps, info.worker);
    } else {
        TRY(ddl_ps_serve(ps));
    }
    TRY(ddl_ps_free(&ps));
    TRY(ddl_finalize(&context));
    return failed;
}

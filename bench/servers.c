/* How much of a server's link its workers use: the last rank serves, the others push and pull one large parameter
 * together (BSP), as much both ways. Prints, in MB/s one way: "plain X", two ranks exchanging messages over the same link,
 * and "served Y", what the server gets and gives. The best of several rounds each. */
#define DDL_IMPLEMENTATION
#include "ddl.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { COUNT = 2 << 20, ROUNDS = 6 }; /* 8 MiB */

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void ok(ddl_group *w, ddl_status status) {
    if (status != DDL_OK) {
        fprintf(stderr, "servers: %s\n", ddl_error(ddl_group_context(w)));
        exit(1);
    }
}

/* The first and the last rank send each other the same at once. */
static double plain(ddl_group *w, ddl_tensor out, ddl_tensor in) {
    int32_t last = ddl_size(w) - 1, me = ddl_rank(w), peer = me == 0 ? last : 0;
    double best = 0;
    for (int i = 0; i < ROUNDS; i++) {
        ok(w, ddl_barrier(w));
        double start = now_s();
        if (me == 0 || me == last) {
            ddl_request *r[2];
            ok(w, ddl_irecv(w, in, peer, 1, &r[0]));
            ok(w, ddl_isend(w, out, peer, 1, &r[1]));
            ok(w, ddl_wait_all(r, 2, NULL));
        }
        double rate = COUNT * 4.0 / (now_s() - start) / 1e6;
        best = rate > best ? rate : best;
    }
    return best;
}

static double served(ddl_group *w, ddl_tensor grad, ddl_tensor out) {
    ddl_ps_config config = {.dedicated = 1, .optimizer = {.learning_rate = 0.1}};
    ddl_ps *ps = NULL;
    double best = 0;
    int32_t workers = ddl_size(w) - 1;
    ok(w, ddl_ps_create(w, &config, &grad, 1, &ps));
    if (ddl_rank(w) == workers) {
        ok(w, ddl_ps_serve(ps));
    }
    double start = now_s();
    for (int i = 0; i < ROUNDS && ddl_rank(w) < workers; i++) {
        ok(w, ddl_ps_push_pull(ps, 0, grad, out, NULL));
        ok(w, ddl_ps_clock(ps));
        if (i == 0) { /* the first one is not counted: memory is touched first */
            start = now_s();
        }
    }
    best = COUNT * 4.0 * workers * (ROUNDS - 1) / (now_s() - start) / 1e6;
    ok(w, ddl_ps_free(&ps));
    return best;
}

int main(void) {
    ddl_context *c = NULL;
    if (ddl_init(NULL, &c) != DDL_OK) {
        return 1;
    }
    ddl_group *w = ddl_world(c);
    float *data = calloc(2 * COUNT, sizeof *data);
    if (data == NULL) {
        return 1;
    }
    ddl_tensor a = ddl_tensor_1d(data, DDL_F32, COUNT), b = ddl_tensor_1d(data + COUNT, DDL_F32, COUNT);
    double link = plain(w, a, b);
    for (int i = 0; i < 3; i++) {
        double got = served(w, a, b);
        if (ddl_rank(w) == 0) {
            printf("plain %.1f served %.1f: %.1f %%\n", link, got, 100 * got / link);
        }
    }
    free(data);
    return ddl_finalize(&c) != DDL_OK;
}

/* A rank dies and comes back: the others keep what they have, and the new process gets it from them.
 *
 * Build:  cc -O2 -std=c11 -I. -o comes_back examples/comes_back.c -lpthread -ldl -lm
 * Run:    ddlrun -n 4 --restart 1 ./comes_back
 * Prints: rank 2 joined as incarnation 1
 * Prints: rank 0: 60 steps, the parameter is 90
 *
 * Each step adds the average of the ranks to a parameter, which is 1.5 on four ranks. Rank 2 kills itself in step 20.
 * ddlrun starts it again, and its ddl_init joins the job as soon as the others are in ddl_group_grow. */
#define DDL_IMPLEMENTATION
#include "ddl.h"

#include <signal.h>
#include <stdbool.h>
#include <stdio.h>

enum { STEPS = 60 };

typedef struct state {
    double step, parameter;
} state;

/* Whoever has the state gives it to all: the lowest rank of those who have. */
static ddl_status share(ddl_group *g, state *s, bool have) {
    int32_t mine = have ? ddl_rank(g) : ddl_size(g), from = 0;
    ddl_status status = ddl_all_reduce(g, DDL_VIEW(&mine, 1), DDL_VIEW(&from, 1), DDL_MIN);
    return status == DDL_OK ? ddl_broadcast(g, ddl_tensor_1d(s, DDL_F64, 2), from) : status;
}

static ddl_status train(ddl_context *c, ddl_group *g, state *s) {
    ddl_status status = DDL_OK;
    while (status == DDL_OK && s->step < STEPS) {
        double gradient = ddl_rank(g);
        if (ddl_rank(g) == 2 && s->step == 20 && ddl_incarnation(c) == 0) {
            raise(SIGKILL);
        }
        status = ddl_all_reduce(g, DDL_VIEW(&gradient, 1), DDL_VIEW(&gradient, 1), DDL_AVG);
        if (status == DDL_OK) {
            s->parameter += gradient;
            s->step++;
        }
    }
    return status;
}

int main(void) {
    ddl_context *c = NULL;
    if (ddl_init(NULL, &c) != DDL_OK) {
        return 1;
    }
    ddl_group *g = ddl_world(c), *old = NULL;
    state s = {0, 0};
    bool have = ddl_incarnation(c) == 0; /* a process that joins later has nothing yet */
    if (!have) {
        printf("rank %d joined as incarnation %d\n", ddl_rank(g), ddl_incarnation(c));
    }
    ddl_status status;
    for (;;) {
        status = share(g, &s, have);
        have = have || status == DDL_OK;
        status = status == DDL_OK ? train(c, g, &s) : status;
        if (status != DDL_ERR_PEER) {
            break; /* the end, or an error that another process does not mend */
        }
        old = g;
        status = ddl_group_grow(old, 1, 60000, &g); /* the rank that died comes back */
        if (old != ddl_world(c)) {
            ddl_group_free(&old);
        }
        if (status != DDL_OK) {
            break; /* nobody came in a minute; ddl_group_shrink would go on with fewer */
        }
    }
    if (status != DDL_OK) {
        fprintf(stderr, "%s\n", ddl_error(c));
    } else if (ddl_rank(g) == 0) {
        printf("rank 0: %.0f steps, the parameter is %.0f\n", s.step, s.parameter);
    }
    if (g != ddl_world(c)) {
        ddl_group_free(&g);
    }
    ddl_finalize(&c);
    return status == DDL_OK ? 0 : 1;
}

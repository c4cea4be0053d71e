/* A message that is too long to be sent at once, and no memory to offer it: an error at once.
 * tests/run: variants=gcc,asan timeout=60 */
#define DDL_IMPLEMENTATION
#include "world.h"

enum { BYTES = 100 * 1024 };

static _Atomic int empty; /* the next call finds no memory */

static void *take(void *user, size_t bytes) {
    (void)user;
    if (empty) {
        empty = 0;
        return NULL;
    }
    return malloc(bytes);
}

static void give(void *user, void *memory) {
    (void)user;
    free(memory);
}

/* A rendezvous whose offer cannot be sent ends at once, and not by its deadline. */
static void unable(ddl_group *w, void *arg) {
    (void)arg;
    unsigned char *at = calloc(1, BYTES);
    ddl_request *r = NULL;
    int32_t value = 0;
    if (ddl_rank(w) == 0) {
        OK(ddl_send(w, DDL_VIEW(&value, 1), 1, 0)); /* connects */
        OK(ddl_recv(w, DDL_VIEW(&value, 1), 1, 0, NULL));
        ddl_context *c = ddl_group_context(w);
        ddl__note *spare = c->notes;
        c->notes = NULL;
        empty = 1;
        OK(ddl_isend(w, world_bytes(at, BYTES), 1, 1, &r));
        double start = test_now_s();
        ddl_status status = ddl_wait(&r, NULL);
        c->notes = spare;
        CHECK_EQ((int)status, (int)DDL_ERR_NOMEM);
        CHECK_STR(ddl_error(c), "no memory to offer");
        CHECK(test_now_s() - start < 2 * test_slow());
        OK(ddl_send(w, DDL_VIEW(&value, 1), 1, 2));
    } else {
        OK(ddl_recv(w, DDL_VIEW(&value, 1), 0, 0, NULL));
        OK(ddl_send(w, DDL_VIEW(&value, 1), 0, 0));
        OK(ddl_recv(w, DDL_VIEW(&value, 1), 0, 2, NULL));
    }
    free(at);
}

TEST(an_offer_without_memory_is_an_error) {
    ddl_config config = {.allocator = {take, give, NULL}};
    world_config = &config;
    world_fork(2, unable, NULL, 30);
    world_config = NULL;
}

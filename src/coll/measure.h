/* coll, fifth part: the first words of a new world. A barrier shows that all can reach each other; a few messages measure
 * what the cost model needs; rank 0's figures are everybody's, so that all choose alike. */
#ifndef DDL_COLL_MEASURE_H
#define DDL_COLL_MEASURE_H

#include "groups.h"

static ddl_status ddl__on_abort(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload);

static void ddl__thread_tick(ddl_context *c, void *arg, uint64_t now) {
    (void)c;
    (void)arg;
    (void)now;
}

static ddl_status ddl__greet(ddl_context *c) {
    if (c->world_size == 1) {
        return DDL_OK;
    }
    ddl_collective d = {.kind = DDL_BARRIER};
    ddl_request *r;
    int64_t timeout_ms = c->world->timeout_ms;
    c->world->timeout_ms = c->settings.init_timeout_ms;
    DDL__TRY(ddl__coll_begin(c->world, &d, "ddl_init", &r));
    ddl__wait_requests(c, &r, 1, false);
    DDL__TRY(ddl__request_report(&r, NULL));
    c->world->timeout_ms = timeout_ms;
    if (c->settings.progress_thread) {
        c->has_thread = pthread_create(&c->thread, NULL, ddl__thread_main, c) == 0;
    }
    ddl__log(&c->base, c->rank == 0 ? DDL_LOG_INFO : DDL_LOG_DEBUG, "%d ranks on %d hosts", c->world_size, c->host_count);
    return DDL_OK;
}

#endif /* DDL_COLL_MEASURE_H */

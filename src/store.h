/* store: the rendezvous. Every rank brings a blob of one size, every rank leaves with the blobs of all. It happens
 * once, at the start; nothing of it is left afterwards, so that no process is special from then on. */
#ifndef DDL_STORE_H
#define DDL_STORE_H

#include "store/client.h"
#include "store/file.h"
#include "store/launcher.h"

static ddl_status ddl__rendezvous_tcp(const ddl__settings *s, ddl__base *base, const void *blob, size_t bytes,
                                      uint8_t *table, uint64_t deadline_ns, uint64_t *strangers, ddl__sentence *why) {
    if (s->launch.rank != 0) {
        ddl__client client = {.settings = s,
                              .base = base,
                              .blob = blob,
                              .blob_bytes = bytes,
                              .table = table,
                              .fd = -1,
                              .deadline_ns = deadline_ns,
                              .why = why};
        return ddl__client_run(&client);
    }
    ddl__server server = {.settings = s, .base = base, .blob_bytes = bytes, .table = table, .why = why};
    DDL__TRY(ddl__need_fds(s->launch.world + DDL__STRANGERS_MAX + 16, why));
    DDL__TRY(ddl__listen(&server));
    ddl_status status = ddl__server_serve(&server, deadline_ns);
    *strangers = server.strangers;
    return status;
}

static ddl_status ddl__rendezvous_exchange(const ddl__settings *s, const void *blob, size_t bytes, void *table,
                                           ddl__sentence *why) {
    int result = s->exchange(s->exchange_user, blob, table, bytes);
    return result == 0 ? DDL_OK
                       : ddl__fail(why, DDL_ERR_SYSTEM,
                                   "ddl_init: the exchange function of ddl_config returned %d on rank %d of %d", result,
                                   s->launch.rank, s->launch.world);
}

/* All-gathers bytes <= DDL__BLOB_MAX from every rank: rank r's blob is at out_table + r * bytes. All ranks call it with
 * the same bytes. Blocks, at most about init_timeout_ms. *out_strangers: connections that could not prove that they
 * belong here, where there is a server. On error the table's content is not defined, and every rank that can be reached
 * has the same sentence. */
static ddl_status ddl__rendezvous(const ddl__settings *s, ddl__base *base, const void *blob, size_t bytes,
                                  void *out_table, uint64_t *out_strangers, ddl__sentence *why) {
    uint64_t deadline = ddl__deadline(ddl__now_ns(), s->init_timeout_ms);
    *out_strangers = 0;
    if (bytes == 0 || bytes > DDL__BLOB_MAX || (uint64_t)s->launch.world * bytes > UINT32_MAX) {
        return ddl__fail(why, DDL_ERR_INTERNAL,
                         "ddl_init: a rendezvous of %zu bytes from each of %d ranks is not possible", bytes,
                         s->launch.world);
    }
    memcpy((uint8_t *)out_table + (size_t)s->launch.rank * bytes, blob, bytes);
    switch (s->place.kind) {
    case DDL__MEET_ALONE:
        return DDL_OK;
    case DDL__MEET_EXCHANGE:
        return ddl__rendezvous_exchange(s, blob, bytes, out_table, why);
    case DDL__MEET_FILE:
        return ddl__file_rendezvous(s, base, bytes, out_table, deadline, why);
    default:
        return ddl__rendezvous_tcp(s, base, blob, bytes, out_table, deadline, out_strangers, why);
    }
}

#endif /* DDL_STORE_H */

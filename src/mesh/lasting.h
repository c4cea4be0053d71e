/* mesh: lasting memory, the library's own, of which it knows when it ends: what ddl_tensor_alloc gives, scratch of
 * plans, pinned memory. Transports may keep it registered from message to message: each allocation has a number that is
 * never given twice, and its end is told (memory_forget). It must not know what the memory is for. */
#ifndef DDL_MESH_LASTING_H
#define DDL_MESH_LASTING_H

#include "context.h"

#define DDL__LASTING_LEAST ((uint64_t)32 << 10) /* what is smaller is copied, as a rule */

/* Device room: the allocation around memory of a device. */
static ddl_status ddl__device_allocation(ddl_context *c, const char *device, int32_t index, const void *memory,
                                         uint64_t bytes, ddl_allocation *out);

static bool ddl__allocation_holds(const ddl_allocation *a, const void *memory, uint64_t bytes) {
    uint64_t at = (uint64_t)(uintptr_t)memory - (uint64_t)(uintptr_t)a->base;
    return at <= a->bytes && bytes <= a->bytes - at;
}

/* The record is the caller's, beside the memory, until ddl__lasting_drop. */
static void ddl__lasting_add(ddl_context *c, ddl__lasting *m, void *base, uint64_t bytes) {
    if (bytes >= DDL__LASTING_LEAST && base != NULL) {
        m->is = (ddl_allocation){.base = base, .bytes = bytes, .id = ++c->lasting_count};
        m->next = c->lasting;
        c->lasting = m;
    }
}

/* No transport keeps anything of it on return. */
static void ddl__memory_forget(ddl_context *c, void *memory, uint64_t bytes) {
    for (int32_t i = 0; i < c->endpoint_count; i++) {
        const ddl__endpoint *e = &c->endpoints[i];
        if (DDL_HAS(e->table, memory_forget)) {
            e->table->memory_forget(e->self, memory, (size_t)bytes);
        }
    }
}

/* Before the memory is freed. */
static void ddl__lasting_drop(ddl_context *c, ddl__lasting *m) {
    if (m->is.id == 0) {
        return;
    }
    ddl__lasting **at = &c->lasting;
    while (*at != m) {
        at = &(*at)->next;
    }
    *at = m->next;
    ddl__memory_forget(c, m->is.base, m->is.bytes);
    *m = (ddl__lasting){0};
}

/* The record that was asked for goes to the front, as it will be again. */
static ddl_status ddl__host_allocation(const ddl_host *host, const char *device, int32_t index, const void *memory,
                                       uint64_t bytes, ddl_allocation *out) {
    ddl_context *c = host->core;
    if (device != NULL) {
        return ddl__device_allocation(c, device, index, memory, bytes, out);
    }
    ddl__lasting **at = &c->lasting;
    while (*at != NULL && !ddl__allocation_holds(&(*at)->is, memory, bytes)) {
        at = &(*at)->next;
    }
    ddl__lasting *m = *at;
    if (m == NULL) {
        return DDL_ERR_UNSUPPORTED;
    }
    *at = m->next;
    m->next = c->lasting;
    c->lasting = m;
    *out = m->is;
    return DDL_OK;
}

#endif /* DDL_MESH_LASTING_H */

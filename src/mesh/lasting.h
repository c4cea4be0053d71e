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

/* How many begin at `memory` or before it. */
static uint32_t ddl__lasting_before(const ddl_context *c, const void *memory) {
    uint32_t low = 0, high = c->lasting_held;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if ((uintptr_t)c->lasting[middle]->is.base <= (uintptr_t)memory) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* The record is the caller's, beside the memory, until ddl__lasting_drop. Without memory to list it nobody knows it. */
static void ddl__lasting_add(ddl_context *c, ddl__lasting *m, void *base, uint64_t bytes) {
    if (bytes < DDL__LASTING_LEAST || base == NULL) {
        return;
    }
    if (c->lasting_held == c->lasting_room) {
        uint32_t room = DDL__MAX(2 * c->lasting_room, 16u);
        ddl__lasting **larger = ddl__alloc_array(&c->base, room, sizeof *larger);
        if (larger == NULL) {
            return;
        }
        if (c->lasting_held > 0) {
            memcpy(larger, c->lasting, c->lasting_held * sizeof *larger);
        }
        ddl__free(&c->base, c->lasting);
        c->lasting = larger;
        c->lasting_room = room;
    }
    uint32_t at = ddl__lasting_before(c, base);
    memmove(&c->lasting[at + 1], &c->lasting[at], (c->lasting_held - at) * sizeof *c->lasting);
    c->lasting[at] = m;
    c->lasting_held++;
    m->is = (ddl_allocation){.base = base, .bytes = bytes, .id = ++c->lasting_count};
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
    uint32_t next = ddl__lasting_before(c, m->is.base);
    memmove(&c->lasting[next - 1], &c->lasting[next], (c->lasting_held - next) * sizeof *c->lasting);
    if (--c->lasting_held == 0) {
        ddl__free(&c->base, c->lasting);
        c->lasting = NULL;
        c->lasting_room = 0;
    }
    ddl__memory_forget(c, m->is.base, m->is.bytes);
    *m = (ddl__lasting){0};
}

static ddl_status ddl__host_allocation(const ddl_host *host, const char *device, int32_t index, const void *memory,
                                       uint64_t bytes, ddl_allocation *out) {
    ddl_context *c = host->core;
    if (device != NULL) {
        return ddl__device_allocation(c, device, index, memory, bytes, out);
    }
    uint32_t next = ddl__lasting_before(c, memory); /* allocations lie apart */
    if (next == 0 || !ddl__allocation_holds(&c->lasting[next - 1]->is, memory, bytes)) {
        return DDL_ERR_UNSUPPORTED;
    }
    *out = c->lasting[next - 1]->is;
    return DDL_OK;
}

#endif /* DDL_MESH_LASTING_H */

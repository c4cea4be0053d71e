/* shm: ranks of one host over shared memory.
 *
 *     cc -std=c11 -O2 -fPIC -shared -fvisibility=hidden -o libddl-shm.so plugins/shm/shm.c
 *
 * Read segment.h first, then doorbell.h, memory.h, distance.h, ring.h, help.h, queue.h, message.h, native.h; this file is the
 * tables alone.
 *
 * Settings, on all ranks of a host alike, or on none (ranks whose settings differ reach each other in another way):
 *     DDL_SHM_RING_BYTES      64K   of the ring that each pair has in each direction; 512K where a host has two ranks
 *     DDL_SHM_STAGING_BYTES   3776K per rank, for collectives of ordinary memory; 3328K of those two. Both if neither is set
 *     DDL_SHM_ARENA_BYTES     RAM   room for ddl_tensor_alloc, per rank; address space only
 * and of each rank alone:
 *     DDL_SHM_CMA             1     0: never read the memory of a peer (process_vm_readv)
 *     DDL_SHM_DISTANT_NS      100   how long a load from a distant core takes, at least (distance.h)
 *
 * All calls come under the context's lock: there are no locks here, and no globals, as one process may play many
 * ranks. */
#define _GNU_SOURCE 1
#include "../../ddl.h"

#include "segment.h"

#include "doorbell.h"
#include "help.h"
#include "memory.h"
#include "message.h"
#include "ring.h"

#include "native.h"
#include "newcomer.h"

static void shm_endpoint_close(void *self) {
    shm *t = self;
    shm_natives_close(t);
    shm_messages_close(t);
    shm_memory_close(t);
    shm_unmap(t);
    if (t->bell >= 0) {
        close(t->bell);
    }
    t->host->free(t->host, t->host_id);
    t->host->free(t->host, t->addresses);
    t->host->free(t->host, t->index_of);
    t->host->free(t->host, t->rank_of);
    t->host->free(t->host, t->told);
    t->host->free(t->host, t);
}

/* What was taken already is freed by shm_endpoint_close. */
static ddl_status shm_allocate(shm *t, const char *host_id) {
    size_t ranks = (size_t)t->world_size, id_bytes = strlen(host_id) + 1;
    t->host_id = shm_zalloc(t, id_bytes);
    t->addresses = shm_zalloc(t, ranks * sizeof *t->addresses);
    t->index_of = shm_zalloc(t, ranks * sizeof *t->index_of);
    t->rank_of = shm_zalloc(t, ranks * sizeof *t->rank_of);
    t->told = shm_zalloc(t, ranks * sizeof *t->told);
    if (t->host_id == NULL || t->addresses == NULL || t->index_of == NULL || t->rank_of == NULL || t->told == NULL) {
        return DDL_ERR_NOMEM;
    }
    memcpy(t->host_id, host_id, id_bytes);
    memset(t->index_of, -1, ranks * sizeof *t->index_of);
    return DDL_OK;
}

static ddl_status shm_endpoint_open(const ddl_host *host, const ddl_transport_params *params, void **out_self) {
    shm *t = host->alloc(host, sizeof *t);
    if (t == NULL) {
        return DDL_ERR_NOMEM;
    }
    memset(t, 0, sizeof *t);
    t->host = host;
    t->rank = params->rank;
    t->world_size = params->world_size;
    t->fd = t->bell = t->attach = -1;
    if (!shm_address_make(t)) {
        shm_endpoint_close(t);
        return DDL_ERR_CONFIG;
    }
    t->address.cores = (uint32_t)params->cores;
    t->address.core_set = params->size > offsetof(ddl_transport_params, core_set) ? params->core_set : 0;
    ddl_status status = shm_allocate(t, params->host_id);
    status = status == DDL_OK ? shm_bell_open(t) : status;
    if (status != DDL_OK) {
        shm_log(t, DDL_LOG_WARN, "no endpoint could be made: %s", strerror(errno));
        shm_endpoint_close(t);
        return status;
    }
    t->addresses[t->rank] = t->address;
    *out_self = t;
    return DDL_OK;
}

static ddl_status shm_address_of(void *self, void *out_address, size_t *bytes) {
    shm *t = self;
    if (*bytes < sizeof t->address) {
        return DDL_ERR_ARG;
    }
    t->address.fd = t->stage == SHM_JOINED ? t->fd : 0;
    t->address.pid = (int32_t)getpid();
    memcpy(out_address, &t->address, sizeof t->address);
    *bytes = sizeof t->address;
    return DDL_OK;
}

static ddl_status shm_add_peer(void *self, int32_t peer, const void *address, size_t bytes, const char *peer_host_id,
                               uint64_t *out_latency_ns, uint64_t *out_bytes_per_s) {
    shm *t = self;
    shm_address other;
    if (peer < 0 || peer >= t->world_size || peer == t->rank || bytes != sizeof other) {
        return DDL_ERR_ARG;
    }
    memcpy(&other, address, sizeof other);
    if (t->stage != SHM_GATHERING || peer_host_id == NULL || strcmp(peer_host_id, t->host_id) != 0 ||
        !shm_address_fits(t, &other)) {
        return DDL_ERR_UNSUPPORTED; /* who comes later finds the segment dealt out */
    }
    t->addresses[peer] = other;
    *out_latency_ns = 300;
    *out_bytes_per_s = 8000000000u;
    return DDL_OK;
}

/* What others need of this rank before it is in. */
static ddl_status shm_prepare(shm *t) {
    ddl_status status = shm_bell_guard(t);
    status = status == DDL_OK ? shm_memory_open(t) : status;
    status = status == DDL_OK ? shm_messages_open(t) : status;
    if (status == DDL_OK) {
        shm_probe_offer(t);
    } else {
        shm_log(t, DDL_LOG_WARN, "this rank cannot take part, error %d", (int)status);
    }
    return status;
}

static ddl_status shm_ready(void *self, int32_t peer) {
    shm *t = self;
    if (peer < 0 || peer >= t->world_size || peer == t->rank) {
        return DDL_ERR_ARG;
    }
    ddl_status status = shm_join(t, shm_prepare);
    status = status == DDL_OK ? shm_pair_ready(t, peer) : status;
    if (status == DDL_OK) {
        shm_probe(t, t->index_of[peer]);
    }
    return status;
}

/* The local index of a rank that is reached this way, -1 for others. */
static int32_t shm_peer(const shm *t, int32_t peer) {
    return t->stage == SHM_JOINED && peer >= 0 && peer < t->world_size && peer != t->rank ? t->index_of[peer] : -1;
}

static ddl_status shm_send(void *self, int32_t peer, ddl_message *message) {
    int32_t i = shm_peer(self, peer);
    return i >= 0 ? shm_message_send(self, i, message) : DDL_ERR_ARG;
}

static ddl_status shm_peek(void *self, int32_t peer, int32_t looks, const uint8_t **out_header,
                           const void **out_payload, uint64_t *out_bytes) {
    int32_t i = shm_peer(self, peer);
    return i >= 0 ? shm_message_peek(self, i, looks, out_header, out_payload, out_bytes) : DDL_ERR_ARG;
}

static void shm_taken(void *self, int32_t peer) { shm_message_taken(self, shm_peer(self, peer)); }

static ddl_status shm_reserve(void *self, int32_t peer, uint64_t bytes, uint8_t **out_header, void **out_payload) {
    int32_t i = shm_peer(self, peer);
    return i >= 0 ? shm_message_reserve(self, i, bytes, out_header, out_payload) : DDL_ERR_ARG;
}

static void shm_publish_reserved(void *self, int32_t peer, uint64_t bytes) {
    shm_message_publish(self, shm_peer(self, peer), bytes);
}

static int32_t shm_progress(void *self, int32_t expect) {
    shm *t = self;
    shm_bell_disarm(t);
    return t->stage == SHM_JOINED ? shm_natives_progress(t) + shm_message_progress(t, expect) : 0;
}

static ddl_status shm_arm(void *self, int *out_fd) {
    shm *t = self;
    *out_fd = t->bell;
    if (t->stage != SHM_JOINED) {
        return DDL_OK;
    }
    shm_bell_arm(t);
    if (shm_natives_progress(t) > 0 || shm_message_pending(t)) {
        shm_bell_disarm(t);
        return DDL_IN_PROGRESS;
    }
    return DDL_OK;
}

static void shm_peer_dead(void *self, int32_t peer) {
    int32_t i = shm_peer(self, peer);
    if (i >= 0) {
        shm_natives_peer_dead(self, i);
        shm_message_peer_dead(self, i);
    }
}

static void shm_recall(void *self, int32_t peer, ddl_message *message) {
    int32_t i = shm_peer(self, peer);
    if (i >= 0) {
        shm_message_recall(self, i, message);
    }
}

static void shm_redirect(void *self, int32_t peer, void *token, void *new_landing) {
    int32_t i = shm_peer(self, peer);
    if (i >= 0) {
        shm_message_redirect(self, i, token, new_landing);
    }
}

static const char *shm_describe(void *self, int32_t peer) {
    const shm *t = self;
    int32_t i = shm_peer(t, peer);
    /* relaxed: it may change at any time */
    bool pulls = i >= 0 && atomic_load_explicit(&shm_control(t, i)->pulls[t->local_index], memory_order_relaxed) == SHM_PULLS;
    return i < 0 ? "not joined"
           : pulls ? "tensor memory direct, large ordinary memory by process_vm_readv"
                   : "tensor memory direct, large ordinary memory staged";
}

static ddl_status shm_memory_alloc(void *self, size_t bytes, void **out_memory) {
    return shm_lend(self, bytes, out_memory);
}

/* A newcomer comes in when the first set is opened: it has been admitted by then. */
static ddl_status shm_set_open(void *self, uint64_t group, const int32_t *ranks, int32_t count, int32_t rank,
                               void **out_set) {
    shm *t = self;
    if (t->stage == SHM_GATHERING && t->attach >= 0 && shm_attach(t) != DDL_OK) {
        return DDL_ERR_UNSUPPORTED;
    }
    return shm_native_open(t, group, ranks, count, rank, out_set);
}

static void shm_memory_free(void *self, void *memory) { shm_take_back(self, memory); }

static const ddl_transport shm_transport = {
    .size = sizeof(ddl_transport),
    .flags = DDL_TRANSPORT_LOCAL | DDL_TRANSPORT_ORDERED | DDL_TRANSPORT_PULLS | DDL_TRANSPORT_CHEAP_PROGRESS |
             DDL_TRANSPORT_INTACT,
    .max_payload_bytes = 1 << 20,
    .open = shm_endpoint_open,
    .close = shm_endpoint_close,
    .address = shm_address_of,
    .add_peer = shm_add_peer,
    .send = shm_send,
    .progress = shm_progress,
    .arm = shm_arm,
    .peer_dead = shm_peer_dead,
    .memory_alloc = shm_memory_alloc,
    .memory_free = shm_memory_free,
    .native_open = shm_set_open,
    .native_close = shm_native_close,
    .native_cost_ns = shm_native_cost_ns,
    .native_start = shm_native_start,
    .native_test = shm_native_test,
    .native_cancel = shm_native_cancel,
    .recall = shm_recall,
    .redirect = shm_redirect,
    .ready = shm_ready,
    .describe = shm_describe,
    .peer_native = shm_peer_native,
    .peek = shm_peek,
    .taken = shm_taken,
    .reserve = shm_reserve,
    .publish = shm_publish_reserved,
};

static const char *const shm_settings[] = {"SHM_RING_BYTES", "SHM_STAGING_BYTES", "SHM_ARENA_BYTES", "SHM_CMA", "SHM_DISTANT_NS", NULL};

static const ddl_plugin shm_plugin = {
    .size = sizeof(ddl_plugin),
    .abi = DDL_PLUGIN_ABI,
    .name = "shm",
    .version = "1",
    .about = "Shared memory between the ranks of one host.",
    .transport = &shm_transport,
    .settings = shm_settings,
};

DDL_PLUGIN_EXPORT const ddl_plugin *ddl_plugin_shm_v1(const ddl_host *host);
const ddl_plugin *ddl_plugin_shm_v1(const ddl_host *host) {
    (void)host;
    return &shm_plugin;
}

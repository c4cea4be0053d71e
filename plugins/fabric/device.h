/* device: messages between tensors on devices, where the provider has FI_HMEM. The core offers them and tells the key; here
 * memory is registered, and read from a peer's straight into a device's.
 *
 * Only adapters do that (not sockets). A sender that gives a matched message up while its receiver is about to read
 * has the region closed (memory_forget), so that the read fails; unless another message uses the region just then, or the
 * provider keeps it below us (verbs does): then the read may see what the owner has written there since. */
#ifndef FABRIC_DEVICE_H
#define FABRIC_DEVICE_H

#include "receive.h"

typedef struct fabric_memory {
    uint8_t *at;
    uint64_t bytes;
    fabric_region *region;
} fabric_memory;

/* What peers are told of it, in ddl_memory_key.bytes. */
typedef struct fabric_key {
    uint64_t mark, bytes, key[FABRIC_RAILS_MAX];
} fabric_key;
#define FABRIC_KEY_MARK 0x6662726963686d31u /* another transport's key is none of ours */

/* >>registered */

/* For reads by peers, and for our own into it: the core does not say which. */
static ddl_status fabric_memory_register_on(void *self, const char *device, int32_t index, void *memory, size_t bytes,
                                            void **out_handle, ddl_memory_key *out_key) {
    fabric_self *s = self;
    fabric_key key = {.mark = FABRIC_KEY_MARK, .bytes = bytes};
    if (s->device == NULL || s->hmem_refused != NULL || strcmp(device, "cuda") != 0) {
        return DDL_ERR_UNSUPPORTED;
    }
    if (bytes == 0) { /* the core asks whether it could */
        *out_handle = NULL;
        return DDL_OK;
    }
    fabric_memory *m = fabric_zalloc(s, sizeof *m);
    if (m == NULL) {
        return DDL_ERR_NOMEM;
    }
    m->at = memory;
    m->bytes = bytes;
    m->region = fabric_region_get(s, memory, bytes, FI_READ | FI_REMOTE_READ, index);
    if (m->region == NULL) {
        s->host->free(s->host, m);
        return DDL_ERR_SYSTEM;
    }
    fabric_region_keys(s, m->region, key.key);
    memset(out_key, 0, sizeof *out_key);
    out_key->base = fabric_region_name(s, m->region, memory);
    memcpy(out_key->bytes, &key, sizeof key);
    *out_handle = m;
    return DDL_OK;
}

/* >>gets */

/* Starts reads of what is still to be read, split over the rails. */
static void fabric_get_pull(fabric_self *s, fabric_get *g) {
    fabric_link *l = s->peers[g->peer].link;
    uint64_t part = fabric_rail_part(s, g->bytes);
    while (g->asked < g->bytes && !g->failed && !s->failed) {
        uint64_t left = g->bytes - g->asked, bytes = left < part ? left : part;
        int32_t rail = (int32_t)(g->asked / part % (uint64_t)s->rail_count);
        fabric_slot *slot = fabric_read_slot(s, FABRIC_READ);
        if (slot == NULL) {
            g->failed = 1;
            return;
        }
        slot->peer = g->peer;
        slot->rail = rail;
        slot->length = (uint32_t)bytes;
        slot->get = g;
        ssize_t result = fi_read(s->rails[rail].ep, g->to + g->asked, bytes, fi_mr_desc(g->memory->region->mr[rail]),
                                 s->peers[g->peer].at[rail], g->from + g->asked, g->key[rail], &slot->context);
        fabric_asked(l, rail, result);
        if (result != 0) {
            slot->get = NULL;
            fabric_slot_give(&s->read_free, slot);
            g->failed = fabric_read_never(s, l, rail, result, g->reading, &g->stall);
            return;
        }
        fabric_stall_end(&g->stall);
        g->asked += bytes;
        g->reading++;
        l->reads++;
    }
}

static ddl_status fabric_get_begin(void *self, int32_t peer, void *local, void *local_handle, const ddl_memory_key *key,
                                   uint64_t offset, uint64_t bytes, void *cookie) {
    fabric_self *s = self;
    fabric_memory *m = local_handle;
    fabric_key k;
    memcpy(&k, key->bytes, sizeof k);
    int ours = k.mark == FABRIC_KEY_MARK && peer >= 0 && peer < s->world_size && s->peers[peer].known;
    if (!ours || m == NULL || offset > k.bytes || bytes > k.bytes - offset) {
        return DDL_ERR_UNSUPPORTED;
    }
    uint64_t at = (uint64_t)((uint8_t *)local - m->at);
    if (at > m->bytes || bytes > m->bytes - at) {
        return DDL_ERR_ARG;
    }
    fabric_link *l = fabric_link_of(s, peer);
    if (l == NULL || s->peers[peer].gone || l->broken != 0 || s->failed) {
        return l == NULL ? DDL_ERR_NOMEM : DDL_ERR_STATE; /* that it is lost is told elsewhere */
    }
    if (bytes > 0 && fabric_reads_paused(s, l)) {
        return DDL_ERR_STATE; /* why they do is told already; the core has another way */
    }
    fabric_get *g = bytes > 0 ? fabric_zalloc(s, sizeof *g) : NULL;
    if (g == NULL) {
        return bytes > 0 ? DDL_ERR_NOMEM : DDL_OK;
    }
    *g = (fabric_get){.next = s->gets, .memory = m, .peer = peer, .to = local, .from = key->base + offset, .bytes = bytes,
                      .cookie = cookie};
    memcpy(g->key, k.key, sizeof g->key);
    s->gets = g;
    fabric_get_pull(s, g);
    s->again = 1; /* it may have failed */
    return DDL_IN_PROGRESS;
}

/* Takes a get off the list and tells the host, which may begin others meanwhile, or take the memory of one back (fabric_memory_release):
 * who walks the list starts over. */
static void fabric_get_tell(fabric_self *s, fabric_get **at, ddl_status status) {
    fabric_get *g = *at;
    void *cookie = g->cookie;
    status = status < 0 ? status : g->failed ? DDL_ERR_SYSTEM : DDL_OK;
    if (status == DDL_OK) {
        s->peers[g->peer].link->no_reads_for_ns = 0;
    }
    *at = g->next;
    s->host->free(s->host, g);
    s->host->transferred(s->host, cookie, status);
}

static int fabric_gets_serve(fabric_self *s) {
    int events = 0;
    for (fabric_get *g = s->gets; g != NULL; g = g->next) {
        fabric_get_pull(s, g);
    }
    for (fabric_get **at = &s->gets; *at != NULL;) {
        const fabric_get *g = *at;
        int ended = g->reading == 0 && (g->failed || g->asked == g->bytes);
        if (ended) {
            fabric_get_tell(s, at, DDL_OK);
            events++;
        }
        at = ended ? &s->gets : &(*at)->next;
    }
    return events;
}

/* The memory that is being read into from a peer: see fabric_give_up. */
static int fabric_gets_renew(fabric_self *s, int32_t peer) {
    int done = 1;
    for (fabric_get *g = s->gets; g != NULL; g = g->next) {
        if (g->peer == peer && g->reading > 0) {
            done &= fabric_region_renew(s, g->memory->region);
        }
    }
    return done;
}

/* The link was cut: nothing is read for them any more. */
static void fabric_gets_forget(fabric_self *s, int32_t peer) {
    for (fabric_get *g = s->gets; g != NULL; g = g->next) {
        if (g->peer == peer) {
            g->reading = 0;
            g->failed = 1;
        }
    }
}

/* Ends those from a peer, or those into some memory (else NULL), whose reads have ended. */
static void fabric_gets_end(fabric_self *s, int32_t peer, const fabric_memory *memory, ddl_status status) {
    for (fabric_get **at = &s->gets; *at != NULL;) {
        int meant = memory != NULL ? (*at)->memory == memory : (*at)->peer == peer;
        if (meant) {
            fabric_get_tell(s, at, status);
        }
        at = meant ? &s->gets : &(*at)->next;
    }
}

/* Reads that are under way end in a moment, as a rule; else with the link. */
static void fabric_get_settle(fabric_self *s, fabric_get *g) {
    uint64_t deadline = s->host->now_ns(s->host) + FABRIC_CUT_NS;
    g->failed = 1; /* no more are started */
    while (g->reading > 0 && !s->failed && s->host->now_ns(s->host) < deadline) {
        fabric_poll(s);
        s->again = 1;
    }
    if (g->reading > 0) {
        fabric_link *l = s->peers[g->peer].link;
        fabric_log(s, DDL_LOG_WARN, "a read from rank %d does not end; its link is closed, as the memory on a device is "
                   "wanted back", g->peer);
        fabric_part_with(s, l, ECANCELED);
    }
}

static void fabric_memory_release(void *self, void *handle) {
    fabric_self *s = self;
    fabric_memory *m = handle;
    for (fabric_get *g = s->gets; g != NULL; g = g->next) {
        if (g->memory == m) {
            fabric_get_settle(s, g);
        }
    }
    fabric_gets_end(s, -1, m, DDL_ERR_CANCELLED);
    fabric_region_put(s, &m->region);
    s->host->free(s->host, m);
}

#endif /* FABRIC_DEVICE_H */

/* cache: registrations that outlast the message they were made for, where pinning costs: adapters, not software
 * whose registrations are an entry in a table, and whose keys are moved to copies (fabric_offer_move).
 *
 * A region must never stand for memory that was freed and mapped again: same address, other pages, and the adapter goes on
 * with the old ones. So only that is kept whose identity somebody knows (host->allocation): memory of the library's own
 * (ddl_tensor_alloc, arenas of a trainer, scratch of plans, pinned memory), and allocations on a device, by what its plugin
 * knows of them. Each allocation has a number that is never given again, which is asked for before a region is used: another
 * number, or none, and the region is closed. That alone makes it sound. That the core tells the end of its own memory
 * (memory_forget), and that regions of devices are looked at each second, only gives pages back early.
 *
 * All other memory is the program's: it is registered for one message at a time. munmap could be seen with userfaultfd, but
 * the kernel then stops whoever unmaps until a thread of ours has read of it, it is forbidden in most containers, and what
 * fork leaves is not covered; hooks in the allocator are not ours to put. verbs of libfabric caches such memory below us, with
 * monitors of its own (prov/verbs/src/verbs_mr.c, prov/util/src/util_mem_monitor.c); EFA does for who does not ask for
 * FI_MR_LOCAL (efa_domain.c), and we do.
 *
 * Of large allocations pieces of FABRIC_SPAN are registered, so that a small message in a large arena does not pin all of
 * it at once. Bounded in number and bytes; the least recently used of those in no message's use is closed first. */
#ifndef FABRIC_CACHE_H
#define FABRIC_CACHE_H

#include "memory.h"

#define FABRIC_SPAN ((uint64_t)64 << 20)
#define FABRIC_LOOK_NS 1000000000u /* between looks for memory of devices that was freed */

/* >>regions */

/* Closes what is registered; the record stays, as there may be users. */
static void fabric_region_close(const fabric_self *s, fabric_region *r) {
    for (int32_t i = 0; i < s->rail_count; i++) {
        fabric_mr_close(&r->mr[i]);
    }
}

static void fabric_region_free(fabric_self *s, fabric_region *r) {
    fabric_region_close(s, r);
    r->next = s->region_free;
    s->region_free = r;
}

/* Registers with each rail. NULL: nothing is; `told`: and that has been said. */
static fabric_region *fabric_region_make(fabric_self *s, void *at, uint64_t bytes, uint64_t access, int32_t device,
                                         int told) {
    fabric_region *r = s->region_free;
    if (r != NULL) {
        s->region_free = r->next;
    } else {
        r = s->host->alloc(s->host, sizeof *r);
    }
    if (r == NULL) {
        return NULL;
    }
    *r = (fabric_region){.at = at, .bytes = bytes, .access = access, .device = device, .users = 1};
    for (int32_t i = 0; i < s->rail_count; i++) {
        int result = fabric_mr_open(s, i, at, bytes, access, device, &r->mr[i]);
        if (result != 0) {
            fabric_region_free(s, r);
            if (told) {
                fabric_mr_tell(s, bytes, device, result);
            }
            return NULL;
        }
    }
    return r;
}

/* Nothing that was begun by its registration reads or writes the memory any more: it is closed, which an adapter obeys
 * before its driver gives the pages back, and made anew, as there may be other users. What they have under way by the old
 * one fails, and is sent instead. 0: that cannot be done; a registration may be missing then. */
static int fabric_region_renew(fabric_self *s, fabric_region *r) {
    int done = 1;
    for (int32_t i = 0; i < s->rail_count; i++) {
        struct fid_mr *old = r->mr[i];
        r->mr[i] = NULL;
        done &= old != NULL && fi_close(&old->fid) == 0 &&
                fabric_mr_open(s, i, r->at, r->bytes, r->access, r->device, &r->mr[i]) == 0;
    }
    return done;
}

static int fabric_region_meets(const fabric_region *r, const void *at, uint64_t bytes, int32_t device) {
    const uint8_t *from = at;
    return r->device == device && from < r->at + r->bytes && r->at < from + bytes;
}

static int fabric_region_holds(const fabric_region *r, const void *at, uint64_t bytes, int32_t device) {
    const uint8_t *from = at;
    return r->device == device && from >= r->at && from + bytes <= r->at + r->bytes;
}

/* >>kept */

/* What is pinned of it: each rail registers the same pages once more. */
static uint64_t fabric_region_pinned(const fabric_self *s, const fabric_region *r) {
    return r->bytes * (uint64_t)s->rail_count;
}

/* Out of the cache: it is served no more, and closed when its last user leaves. */
static void fabric_cache_drop(fabric_self *s, fabric_region **at) {
    fabric_cache *c = &s->cache;
    fabric_region *r = *at;
    *at = r->next;
    c->count--;
    c->bytes -= fabric_region_pinned(s, r);
    c->on_devices -= r->device != FABRIC_HOST;
    r->kept = 0;
    if (r->users == 0) {
        fabric_region_free(s, r);
    }
}

/* The least recently used of those that nobody uses. */
static fabric_region **fabric_cache_idle(fabric_self *s) {
    fabric_region **idle = NULL;
    for (fabric_region **at = &s->cache.first; *at != NULL; at = &(*at)->next) {
        idle = (*at)->users == 0 ? at : idle;
    }
    return idle;
}

/* Makes room for one more, which pins so many bytes. 0: what is there is all in use, or it is larger than the bound. */
static int fabric_cache_room(fabric_self *s, uint64_t bytes) {
    fabric_cache *c = &s->cache;
    while (c->count + 1 > c->most || bytes > c->most_bytes || c->bytes > c->most_bytes - bytes) {
        fabric_region **idle = bytes <= c->most_bytes && c->most > 0 ? fabric_cache_idle(s) : NULL;
        if (idle == NULL) {
            return 0;
        }
        fabric_cache_drop(s, idle);
        c->evicted++;
    }
    return 1;
}

static void fabric_cache_add(fabric_self *s, fabric_region *r, uint64_t id) {
    fabric_cache *c = &s->cache;
    r->id = id;
    r->kept = 1;
    r->next = c->first;
    c->first = r;
    c->count++;
    c->bytes += fabric_region_pinned(s, r);
    c->on_devices += r->device != FABRIC_HOST;
}

/* Whose memory that is; 0: nobody knows, so that nothing is kept of it. */
static int fabric_identity(fabric_self *s, const void *at, uint64_t bytes, int32_t device, ddl_allocation *out) {
    const char *plugin = device == FABRIC_HOST ? NULL : s->device;
    return s->cache.most > 0 && !s->unread && !s->connects && DDL_HAS(s->host, allocation) &&
           s->host->allocation(s->host, plugin, device == FABRIC_HOST ? 0 : device, at, bytes, out) == DDL_OK;
}

/* The region of that memory, which comes to the front. What lies there under another number was freed. */
static fabric_region *fabric_cache_find(fabric_self *s, const void *at, uint64_t bytes, int32_t device, uint64_t id) {
    fabric_cache *c = &s->cache;
    fabric_region *found = NULL;
    for (fabric_region **link = &c->first; *link != NULL && found == NULL;) {
        fabric_region *r = *link;
        if (fabric_region_meets(r, at, bytes, device) && r->id != id) {
            fabric_cache_drop(s, link);
            c->stale++;
        } else if (fabric_region_holds(r, at, bytes, device)) {
            *link = r->next;
            found = r;
        } else {
            link = &r->next;
        }
    }
    if (found != NULL) {
        found->next = c->first;
        c->first = found;
    }
    return found;
}

/* Registers the pieces of an allocation that some memory lies in, and keeps that. */
static fabric_region *fabric_cache_make(fabric_self *s, const uint8_t *at, uint64_t bytes, int32_t device,
                                        const ddl_allocation *whole) {
    uint64_t from = (uint64_t)(at - (uint8_t *)whole->base), end = from + bytes;
    from -= from % FABRIC_SPAN;
    end = (end + FABRIC_SPAN - 1) / FABRIC_SPAN * FABRIC_SPAN;
    end = end < whole->bytes ? end : whole->bytes;
    if (!fabric_cache_room(s, (end - from) * (uint64_t)s->rail_count)) {
        return NULL;
    }
    fabric_region *r =
        fabric_region_make(s, (uint8_t *)whole->base + from, end - from, FI_READ | FI_REMOTE_READ, device, 0);
    if (r != NULL) {
        fabric_cache_add(s, r, whole->id);
        return r;
    }
    for (fabric_region **idle; (idle = fabric_cache_idle(s)) != NULL;) { /* what may be locked is shared with it */
        fabric_cache_drop(s, idle);
        s->cache.evicted++;
    }
    return NULL;
}

/* >>use */

/* A registration of that memory, until fabric_region_put. NULL: there is none; that has been told. */
static fabric_region *fabric_region_get(fabric_self *s, void *at, uint64_t bytes, uint64_t access, int32_t device) {
    ddl_allocation whole;
    fabric_region *r = NULL;
    if (fabric_identity(s, at, bytes, device, &whole)) {
        r = fabric_cache_find(s, at, bytes, device, whole.id);
        if (r != NULL) {
            s->cache.found++;
            r->users++;
            return r;
        }
        r = fabric_cache_make(s, at, bytes, device, &whole);
        s->cache.made += r != NULL;
    }
    return r != NULL ? r : fabric_region_make(s, at, bytes, access, device, 1);
}

static void fabric_region_put(fabric_self *s, fabric_region **region) {
    fabric_region *r = *region;
    *region = NULL;
    if (r != NULL && --r->users == 0 && !r->kept) {
        fabric_region_free(s, r);
    }
}

/* What peers call an address in it. */
static uint64_t fabric_region_name(const fabric_self *s, const fabric_region *r, const void *at) {
    return (s->mr_mode & FI_MR_VIRT_ADDR) != 0 ? (uint64_t)(uintptr_t)at : (uint64_t)((const uint8_t *)at - r->at);
}

static void fabric_region_keys(const fabric_self *s, const fabric_region *r, uint64_t key[FABRIC_RAILS_MAX]) {
    for (int32_t i = 0; i < s->rail_count; i++) {
        key[i] = r->mr[i] != NULL ? fi_mr_key(r->mr[i]) : 0; /* 0: fabric_region_renew failed, and the endpoint with it */
    }
}

/* >>ends */

static void fabric_memory_forget(void *self, void *memory, size_t bytes) {
    fabric_self *s = self;
    for (fabric_region **at = &s->cache.first; *at != NULL;) {
        if (fabric_region_meets(*at, memory, bytes, (*at)->device)) {
            fabric_cache_drop(s, at);
            s->cache.stale++;
        } else {
            at = &(*at)->next;
        }
    }
}

/* Once a second: memory of devices is freed without a word to us, and a region would hold it. */
static void fabric_cache_look(fabric_self *s) {
    uint64_t now = s->host->now_ns(s->host);
    if (now - s->cache.looked_ns < FABRIC_LOOK_NS) {
        return;
    }
    s->cache.looked_ns = now;
    for (fabric_region **at = &s->cache.first; *at != NULL;) {
        fabric_region *r = *at;
        ddl_allocation is;
        if (r->device != FABRIC_HOST && (!fabric_identity(s, r->at, r->bytes, r->device, &is) || is.id != r->id)) {
            fabric_cache_drop(s, at);
            s->cache.stale++;
        } else {
            at = &r->next;
        }
    }
}

static void fabric_cache_tell(fabric_self *s) {
    const fabric_cache *c = &s->cache;
    if (c->made > 0) {
        fabric_log(s, DDL_LOG_INFO, "registrations that were kept: %llu, used again %llu times; %llu were closed for room, "
                   "%llu as their memory was freed", (unsigned long long)c->made, (unsigned long long)c->found,
                   (unsigned long long)c->evicted, (unsigned long long)c->stale);
    }
}

/* For ddl-info. */
static const char *fabric_describe(void *self, int32_t peer) {
    fabric_self *s = self;
    const fabric_cache *c = &s->cache;
    (void)peer;
    if (!s->address.has_rma) {
        return "large payloads are sent in pieces";
    }
    if (s->connects) {
        return "large payloads go into their place, by connections of their own";
    }
    snprintf(s->described, sizeof s->described, "large payloads are read in place; of %llu registrations that were kept "
             "%llu are (%.1f MiB), used again %llu times", (unsigned long long)c->made, (unsigned long long)c->count,
             (double)c->bytes / (1 << 20), (unsigned long long)c->found);
    return s->described;
}

/* All of it, before the endpoints that regions may be bound to. */
static void fabric_cache_close(fabric_self *s) {
    fabric_cache_tell(s);
    while (s->cache.first != NULL) {
        fabric_cache_drop(s, &s->cache.first);
    }
    while (s->region_free != NULL) {
        fabric_region *r = s->region_free;
        s->region_free = r->next;
        s->host->free(s->host, r);
    }
}

#endif /* FABRIC_CACHE_H */

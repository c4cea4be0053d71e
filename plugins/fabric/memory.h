/* memory: registration, in each mr_mode that a provider may demand, and the slots of messages, which are registered for
 * good: their memory is freed after its registration. Payloads are the matter of cache.h.
 *
 * The modes. LOCAL: buffers of our own need a descriptor. VIRT_ADDR: peers name our memory by its address, else by an
 * offset into the region. PROV_KEY: the provider chooses keys, else we do, at random, so that a stranger cannot guess
 * them. ALLOCATED: pages must be there; those of a payload are, slots are written to first. ENDPOINT: a region is
 * bound to the endpoint and enabled. */
#ifndef FABRIC_MEMORY_H
#define FABRIC_MEMORY_H

#include "state.h"

#include <sys/resource.h>

static void fabric_mr_close(struct fid_mr **mr) {
    if (*mr != NULL) {
        fi_close(&(*mr)->fid);
        *mr = NULL;
    }
}

/* What can be done about an error that locked memory brings, with a point before it; "" of another one. This goes wrong on
 * most first days of a cluster, and each provider meets it somewhere else: its queues lie in locked memory too. */
static const char *fabric_memlock_remedy(const fabric_self *s, long error, char out[256]) {
    struct rlimit limit = {0, 0};
    int may_be = error == -FI_ENOMEM || error == -FI_EAGAIN || error == -FI_EPERM;
    int adapter = (s->mr_mode & (FI_MR_LOCAL | FI_MR_PROV_KEY | FI_MR_VIRT_ADDR)) != 0;
    out[0] = 0;
    if (may_be && adapter && getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
        snprintf(out, 256, ". This process may lock %llu KiB of memory. Raise the limit: `ulimit -l unlimited`, or \"* - memlock "
                 "unlimited\" in /etc/security/limits.conf, or LimitMEMLOCK=infinity for a service",
                 (unsigned long long)limit.rlim_cur / 1024);
    }
    return out;
}

static void fabric_mr_failed(fabric_self *s, size_t bytes, int error) {
    char remedy[256];
    fabric_log(s, s->told_registration ? DDL_LOG_DEBUG : DDL_LOG_WARN, "registering %zu bytes failed: %s%s. Payloads are "
               "copied instead", bytes, fabric_error(s, error), fabric_memlock_remedy(s, error, remedy));
    s->told_registration = 1;
}

/* Of the memory of messages themselves. At the start the endpoint is not to be had without it, and later fewer are under way. */
static void fabric_slots_failed(fabric_self *s, size_t bytes, int error) {
    char remedy[256];
    fabric_log(s, s->told_slots ? DDL_LOG_DEBUG : DDL_LOG_WARN, "registering %zu bytes for messages failed: %s%s. %s", bytes,
               fabric_error(s, error), fabric_memlock_remedy(s, error, remedy), s->receives == 0
               ? "Without them it cannot be used" : "With those that are there fewer messages are under way at once");
    s->told_slots = 1;
}

/* Of a receive, without which nothing comes any more, or of a send, with which its link ends. */
static void fabric_post_failed(fabric_self *s, const char *what, int32_t peer, long error) {
    char remedy[256], to[24] = "";
    fabric_memlock_remedy(s, error, remedy);
    if (peer >= 0) {
        snprintf(to, sizeof to, " to rank %d", peer);
    }
    int news = peer < 0 || (remedy[0] != 0 && !s->told_slots);
    fabric_log(s, news ? DDL_LOG_WARN : DDL_LOG_DEBUG, "a %s%s cannot be posted: %s%s", what, to, fabric_error(s, error), remedy);
    s->told_slots |= remedy[0] != 0;
}

/* For so long the provider has wanted a call to be repeated. ofi_rxm wants that also where it can register no more buffers of its own, of
 * which it wants 16 MiB at a time, and for ever: nothing else would tell why nothing moves. */
static void fabric_memlock_suspect(fabric_self *s, const char *what, int32_t peer, uint64_t waited_ns) {
    char remedy[256];
    if (s->told_locked || waited_ns < FABRIC_SUSPECT_NS) {
        return;
    }
    s->told_locked = 1;
    if (fabric_memlock_remedy(s, -FI_EAGAIN, remedy)[0] != 0) {
        fabric_log(s, DDL_LOG_WARN, "%s has begun no %s rank %d for %d s: that rank is cut off, or there is no more memory to lock%s",
                   s->rails[0].info->fabric_attr->prov_name, what, peer, (int)(FABRIC_SUSPECT_NS / 1000000000u), remedy);
    }
}

static void fabric_mr_failed_there(fabric_self *s, size_t bytes, int32_t device, int error) {
    fabric_log(s, s->told_device ? DDL_LOG_DEBUG : DDL_LOG_WARN, "registering %zu bytes of CUDA device %d failed: %s. The "
               "message goes through pinned memory of the host, as others will for which that happens. Is nvidia-peermem "
               "loaded (`lsmod`), or has the driver dma-buf?", bytes, device, fabric_error(s, error));
    s->told_device = 1;
}

/* A key that nobody guesses, where keys are ours to choose: splitmix over a random start. */
static uint64_t fabric_mr_key(fabric_self *s) {
    uint64_t z = s->key_next += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    size_t bytes = s->rails[0].info->domain_attr->mr_key_size;
    return bytes >= 8 || bytes == 0 ? z : z & (((uint64_t)1 << (8 * bytes)) - 1);
}

/* device: of CUDA, or FABRIC_HOST. */
static int fabric_mr_try(const fabric_rail *r, const void *memory, size_t bytes, uint64_t access, int32_t device,
                         uint64_t key, struct fid_mr **out) {
    if (device == FABRIC_HOST) {
        return fi_mr_reg(r->domain, memory, bytes, access, 0, key, 0, out, NULL);
    }
    const struct iovec at = {.iov_base = (void *)(uintptr_t)memory, .iov_len = bytes};
    const struct fi_mr_attr attr = {.mr_iov = &at, .iov_count = 1, .access = access, .requested_key = key,
                                    .iface = FI_HMEM_CUDA, .device.cuda = device};
    return fi_mr_regattr(r->domain, &attr, 0, out);
}

/* Why a registration failed, and what comes of it. */
static void fabric_mr_tell(fabric_self *s, size_t bytes, int32_t device, int error) {
    if (device == FABRIC_HOST) {
        fabric_mr_failed(s, bytes, error);
    } else {
        fabric_mr_failed_there(s, bytes, device, error);
    }
}

/* What a registration brought, of a region that may have to be bound to the endpoint. Returns 0 or a negative error, and *out
 * is NULL then. */
static int fabric_mr_made(const fabric_self *s, const fabric_rail *r, int result, struct fid_mr **out) {
    if (result == 0 && (s->mr_mode & FI_MR_ENDPOINT) != 0) {
        result = fi_mr_bind(*out, &r->ep->fid, 0);
        result = result == 0 ? fi_mr_enable(*out) : result;
        if (result != 0) {
            fabric_mr_close(out);
        }
    }
    if (result != 0) {
        *out = NULL;
    }
    return result;
}

/* Returns 0 or a negative error. */
static int fabric_mr_open(fabric_self *s, int32_t rail, const void *memory, size_t bytes, uint64_t access, int32_t device,
                          struct fid_mr **out) {
    fabric_rail *r = &s->rails[rail];
    int result = -FI_EAGAIN;
    *out = NULL;
    s->registrations++;
    if (s->fail_registration != 0 && s->registrations % s->fail_registration == 0) {
        result = -FI_ENOMEM;
    }
    /* Two regions may not have one key: another one is tried then. */
    for (int tries = 0; tries < 4 && (result == -FI_EAGAIN || result == -FI_ENOKEY); tries++) {
        uint64_t key = (s->mr_mode & FI_MR_PROV_KEY) != 0 ? 0 : fabric_mr_key(s);
        result = fabric_mr_try(r, memory, bytes, access, device, key, out);
    }
    return fabric_mr_made(s, r, result, out);
}

/* >>slots */

static void fabric_block_free(fabric_self *s, fabric_block *b) {
    if (b == NULL) {
        return;
    }
    fabric_mr_close(&b->mr);
    s->host->free(s->host, b->memory);
    s->host->free(s->host, b->slots);
    s->host->free(s->host, b);
}

static void fabric_blocks_free(fabric_self *s) {
    while (s->blocks != NULL) {
        fabric_block *b = s->blocks;
        s->blocks = b->next;
        fabric_block_free(s, b);
    }
}

/* Where slots begin: so far behind multiples of a step, never at the start of a page. Of a connection with nothing under
 * way the kernel puts what it sends behind libfabric's head, 16 bytes of tcp's or 24 of ofi_rxm's, and Zen 3 and 4 copy a fifteenth
 * as fast to a place that lies 1 to 31 bytes further in its page than its source (plugins/shm/copy.h; 64 KiB sent in 51 us, or 18). */
enum { FABRIC_SLOT_STEP = 128, FABRIC_SLOT_BEHIND = 64 };

/* `count` slots of one role, chained to *list. bytes 0: without memory. */
static ddl_status fabric_block_make(fabric_self *s, int32_t count, size_t bytes, int32_t role, fabric_slot **list) {
    fabric_block *b = fabric_zalloc(s, sizeof *b);
    if (b == NULL) {
        return DDL_ERR_NOMEM;
    }
    size_t stride = (bytes + FABRIC_SLOT_STEP - 1) / FABRIC_SLOT_STEP * FABRIC_SLOT_STEP;
    b->memory_bytes = (size_t)count * stride + FABRIC_SLOT_STEP;
    b->slots = fabric_zalloc(s, (size_t)count * sizeof *b->slots);
    b->memory = bytes == 0 ? NULL : fabric_zalloc(s, b->memory_bytes);
    int failed = b->slots == NULL || (bytes > 0 && b->memory == NULL);
    if (!failed && bytes > 0 && (s->mr_mode & FI_MR_LOCAL) != 0) {
        int result = fabric_mr_open(s, 0, b->memory, b->memory_bytes, FI_SEND | FI_RECV, FABRIC_HOST, &b->mr);
        failed = result != 0;
        if (failed) {
            fabric_slots_failed(s, b->memory_bytes, result);
        }
    }
    if (failed) {
        fabric_block_free(s, b);
        return DDL_ERR_NOMEM;
    }
    size_t first = (FABRIC_SLOT_BEHIND - (uintptr_t)b->memory) % FABRIC_SLOT_STEP;
    for (int32_t i = 0; i < count; i++) {
        fabric_slot *slot = &b->slots[i];
        slot->role = role;
        slot->bytes = bytes > 0 ? b->memory + first + (size_t)i * stride : NULL;
        slot->desc = b->mr != NULL ? fi_mr_desc(b->mr) : NULL;
        slot->next = *list;
        *list = slot;
    }
    b->next = s->blocks;
    s->blocks = b;
    return DDL_OK;
}

static fabric_slot *fabric_slot_take(fabric_slot **list) {
    fabric_slot *slot = *list;
    if (slot != NULL) {
        *list = slot->next;
        slot->next = NULL;
    }
    return slot;
}

static void fabric_slot_give(fabric_slot **list, fabric_slot *slot) {
    slot->next = *list;
    *list = slot;
}

/* A slot without memory, of a read or of a part of a payload; more are made when all are under way. */
static fabric_slot *fabric_read_slot(fabric_self *s, int32_t role) {
    if (s->read_free == NULL && fabric_block_make(s, FABRIC_READ_SLOTS, 0, role, &s->read_free) != DDL_OK) {
        return NULL;
    }
    s->read_free->role = role;
    return fabric_slot_take(&s->read_free);
}

/* Posts all receives that are not posted. What the provider does not take now waits for the next progress. */
static void fabric_receives_post(fabric_self *s) {
    while (s->unposted != NULL && !s->failed) {
        fabric_slot *slot = s->unposted;
        ssize_t result = fi_recv(s->connects ? s->shared : s->rails[0].ep, slot->bytes, s->slot_bytes, slot->desc,
                                 FI_ADDR_UNSPEC, &slot->context);
        if (result != 0) {
            s->stuck = 1;
            if (result != -FI_EAGAIN) {
                fabric_post_failed(s, "receive", -1, result);
                s->failed = 1;
            }
            return;
        }
        s->unposted = slot->next;
    }
}

/* Room for `count` more messages. Returns how many there is room for now. */
static int32_t fabric_receives_add(fabric_self *s, int32_t count) {
    int32_t room = s->receive_limit - s->receives;
    count = count < room ? count : room;
    if (count <= 0 || fabric_block_make(s, count, s->slot_bytes, FABRIC_RECV, &s->unposted) != DDL_OK) {
        return 0;
    }
    s->receives += count;
    fabric_receives_post(s);
    return count;
}

#endif /* FABRIC_MEMORY_H */

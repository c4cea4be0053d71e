/* newcomer: a process that took the rank of a dead one comes into the segment, for native collectives alone: its messages
 * go another way, so that no ring has to begin anew under a reader. It takes over the part of the process whose rank it
 * has, which must be gone: control page, staging and arena, all emptied. What the others know of that part (its bell,
 * whether its memory can be read, that it is dead) they forget when they hear of the newcomer.
 * It must not know when all are ready: the core begins operations of a set when all have opened it. */
#ifndef SHM_NEWCOMER_H
#define SHM_NEWCOMER_H

#include "doorbell.h"
#include "memory.h"
#include "message.h"
#include "native.h"

#include <signal.h>

/* The header of the segment that a member has open, if it is one for this rank. */
static bool shm_header_look(shm *t, shm_header *h) {
    uint64_t most = (uint64_t)(t->world_size < SHM_LOCAL_MAX ? t->world_size : SHM_LOCAL_MAX);
    if (pread(t->fd, h, sizeof *h, 0) != sizeof *h || memcmp(h->magic, t->address.magic, 8) != 0 || h->local_count < 1 ||
        h->local_count > most) {
        return false;
    }
    shm_sizes(t, (int32_t)h->local_count);
    bool fits = h->ring_bytes == t->ring_bytes && h->staging_bytes == t->staging_bytes &&
                h->sleepers_fence <= t->address.hears_barriers && h->arena_bytes <= SHM_ARENAS_MAX / h->local_count;
    t->local_index = -1;
    for (uint32_t i = 0; fits && i < h->local_count; i++) {
        int32_t r = h->rank_of[i];
        fits = r > (i > 0 ? h->rank_of[i - 1] : -1) && r < t->world_size;
        t->local_index = fits && r == t->rank ? (int32_t)i : t->local_index;
    }
    return fits && t->local_index >= 0;
}

/* The layout, as the leader made it. */
static void shm_layout_take(shm *t, const shm_header *h) {
    t->local_count = (int32_t)h->local_count;
    for (int32_t i = 0; i < t->local_count; i++) {
        t->rank_of[i] = h->rank_of[i];
        t->index_of[h->rank_of[i]] = i;
    }
    t->sleepers_fence = h->sleepers_fence != 0;
    t->crowded = h->crowded != 0;
    t->arena_bytes = h->arena_bytes;
    t->shared_bytes = (shm_staging_offset(t, t->local_count) + (2u << 20) - 1) / (2u << 20) * (2u << 20);
    t->segment_bytes = shm_arena_offset(t, t->local_count);
}

/* Nothing is left of the process before. Its words to others are its last: it is gone. Returns what is wrong, or NULL. */
static const char *shm_part_take(shm *t) {
    int32_t i = t->local_index;
    shm_control_block *mine = shm_control(t, i);
    int32_t before = shm_state(t, i) == SHM_IN ? atomic_load_explicit(&mine->pid, memory_order_relaxed) : 0;
    if (before <= 0) {
        return "that rank had not come into it";
    }
    if (before != (int32_t)getpid() && kill(before, 0) == 0) {
        return "the process that had this rank is still there; if it has ended, its parent has not waited for it";
    }
    if (!shm_may_take_memory(t)) {
        return "this process may not take so much memory";
    }
    int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    bool empty = fallocate(t->fd, mode, (off_t)shm_staging_offset(t, i), (off_t)t->staging_bytes) == 0 &&
                 (t->arena_bytes == 0 ||
                  fallocate(t->fd, mode, (off_t)shm_arena_offset(t, i), (off_t)t->arena_bytes) == 0);
    for (int32_t k = 0; k < SHM_SETS; k++) {
        atomic_store_explicit(&mine->sets[k].group, 0, memory_order_relaxed); /* published by the sets to come */
    }
    for (int32_t k = 0; k < t->local_count; k++) {
        atomic_store_explicit(&mine->written[k], 0, memory_order_relaxed);
        atomic_store_explicit(&mine->pulls[k], SHM_PULLS_NOT, memory_order_relaxed);
    }
    atomic_store_explicit(&mine->sleeping, 0, memory_order_relaxed);
    bool open = empty && shm_bell_guard(t) == DDL_OK && shm_memory_open(t) == DDL_OK && shm_messages_open(t) == DDL_OK;
    return open ? NULL : "there is no memory for it";
}

/* Opens and maps a member's segment, and takes its part. Returns what is wrong, or NULL. */
static const char *shm_segment_enter(shm *t, const char *path) {
    shm_header h;
    t->fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    if (t->fd < 0) {
        return "it cannot be opened: no /proc, or another pid namespace or user";
    }
    if (!shm_header_look(t, &h)) {
        return "its layout has no place for this rank, or other settings";
    }
    shm_layout_take(t, &h);
    const char *fault = shm_fd_fault(t);
    if (fault != NULL) {
        return fault;
    }
    return shm_map(t) == DDL_OK ? shm_part_take(t) : "it cannot be mapped";
}

/* Comes into the segment of the member that it knows. */
static ddl_status shm_attach(shm *t) {
    int32_t rank = t->attach;
    const shm_address *from = &t->addresses[rank];
    char path[64];
    t->attach = -1; /* once */
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)from->pid, (int)from->fd);
    const char *fault = shm_segment_enter(t, path);
    if (fault != NULL) {
        shm_log(t, DDL_LOG_INFO, "this newcomer does not come into the segment of rank %d, and has no native collectives there: %s",
                (int)rank, fault);
        t->stage = SHM_DECLINED;
        return DDL_ERR_UNSUPPORTED;
    }
    for (int32_t i = 0; i < t->local_count; i++) {
        shm_link_of(t, i)->gone = true; /* no messages */
    }
    atomic_store_explicit(&shm_control(t, t->local_index)->pid, (int32_t)getpid(), memory_order_relaxed);
    t->stage = SHM_JOINED;
    return DDL_OK;
}

/* The peer, or this process, took the rank of another. What was known of that is forgotten. */
static ddl_status shm_peer_native(void *self, int32_t peer, const void *address, size_t bytes,
                                  const char *peer_host_id) {
    shm *t = self;
    shm_address other;
    if (peer < 0 || peer >= t->world_size || peer == t->rank || bytes != sizeof other) {
        return DDL_ERR_ARG;
    }
    memcpy(&other, address, sizeof other);
    bool here = strcmp(peer_host_id, t->host_id) == 0 && shm_address_fits(t, &other) &&
                other.hears_barriers == t->address.hears_barriers;
    int32_t i = t->stage == SHM_JOINED ? t->index_of[peer] : -1;
    if (!here || (t->stage != SHM_JOINED && t->stage != SHM_GATHERING) || (t->stage == SHM_JOINED && i < 0)) {
        return DDL_ERR_UNSUPPORTED;
    }
    t->addresses[peer] = other;
    if (i < 0) {
        t->attach = other.fd > 0 ? peer : t->attach;
        return DDL_OK;
    }
    atomic_store_explicit(&shm_control(t, t->local_index)->pulls[i], SHM_PULLS_NOT, memory_order_relaxed); /* a hint */
    shm_distance_begin(t, i);
    if (t->natives != NULL) {
        t->natives->dead[i] = 0;
    }
    return DDL_OK;
}

#endif /* SHM_NEWCOMER_H */

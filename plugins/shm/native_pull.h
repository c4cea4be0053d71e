/* native_pull: all_gather and all_to_all of large ordinary memory where ranks share cores: each lets the kernel copy what
 * it takes straight from the others' buffers. That is one copy, and no rank waits for another's next chunk, which would
 * be a switch each time. Where every rank has a core, two copies at a time are faster: native_bulk.h.
 *
 * Nobody writes to another's memory, so an operation that is given up leaves nothing to be taken back: who was reading
 * looks whether somebody has given up before it believes what it read. */
#ifndef SHM_NATIVE_PULL_H
#define SHM_NATIVE_PULL_H

#include "message.h"
#include "native_direct.h"

#define SHM_PULL_LEAST (1u << 20) /* from each rank: less comes faster through the rings, */
#define SHM_PULL_PARTS_LEAST (256u << 10) /* but for what each sends to each */
#define SHM_PULL_BLOCK (256u << 10) /* of one look: some 20 us */

/* Does this rank want it, and may it read the memory of all others? What it says decides for all. */
static uint64_t shm_pull_offer(const shm_set *set, const shm_op *op) {
    const shm *t = set->t;
    const shm_kind *k = shm_kind_of(op);
    bool wants = k->takes == SHM_EACH && k->needs == SHM_ALL && shm_may_be_direct(op) &&
                 op->call.bytes >= (k->parts ? SHM_PULL_PARTS_LEAST : SHM_PULL_LEAST) && t->local_count > t->cores;
    for (int32_t j = 0; j < set->count && wants; j++) {
        int32_t local = set->peers[j].local;
        wants = j == set->rank || atomic_load_explicit(&shm_control(t, t->local_index)->pulls[local],
                                                       memory_order_relaxed) == SHM_PULLS; /* our own words */
    }
    return wants ? (uint64_t)(uintptr_t)op->call.in : 0;
}

static bool shm_all_offered_pull(const shm_set *set, const shm_op *op) {
    for (int32_t j = 0; j < set->count; j++) {
        if (shm_offer_of(set, op, j)->pull == 0) {
            return false;
        }
    }
    return set->count > 1;
}

/* False: not now. The peer may be dead, which is for the core to find; that the kernel forbids it is not its to find. */
static bool shm_pull_block(shm_set *set, shm_op *op, int32_t j, uint64_t at, uint64_t bytes) {
    shm *t = set->t;
    uint64_t part = shm_kind_of(op)->parts ? (uint64_t)set->rank * op->call.bytes : 0;
    int32_t local = set->peers[j].local;
    errno = 0;
    if (shm_read_peer(t, shm_link_of(t, local), (uint8_t *)op->call.out + (uint64_t)j * op->call.bytes + at,
                      shm_offer_of(set, op, j)->pull + part + at, bytes)) {
        return true;
    }
    if (errno == EPERM) {
        atomic_store_explicit(&shm_control(t, t->local_index)->pulls[local], SHM_PULLS_NOT, memory_order_relaxed);
        op->failure = DDL_ERR_SYSTEM;
    }
    return false;
}

static int shm_pull_step(shm_set *set, shm_op *op) {
    uint64_t span = op->call.bytes, all = span * (uint64_t)set->count;
    if (op->take.at == all) {
        return shm_all_counted(set, offsetof(shm_face, taken), 0, set->count, op->end) ? shm_direct_end(set, op)
                                                                                       : SHM_STUCK;
    }
    uint64_t at = op->take.at % span, bytes = shm_chunk_at(op, at, span);
    int32_t j = (int32_t)(((uint64_t)set->rank + op->take.at / span) % (uint64_t)set->count); /* not all at one */
    uint8_t *own = (uint8_t *)op->call.out + (uint64_t)j * span + at;
    if (j != set->rank) {
        if (!shm_pull_block(set, op, j, at, bytes)) {
            return SHM_STUCK;
        }
    } else if (own != shm_own_part(set, op, at)) {
        shm_copy_past(own, shm_own_part(set, op, at), bytes);
    }
    op->take.at += bytes;
    if (op->take.at == all) {
        shm_publish(set, &set->own->taken, op->end);
    }
    return SHM_MOVED;
}

static void shm_pull_begin(shm_set *set, shm_op *op) {
    op->chunk = SHM_PULL_BLOCK;
    op->take.at = 0;
    op->end = set->position + SHM_PAIR; /* one turn of the counters */
    op->step = shm_pull_step;
}

#endif /* SHM_NATIVE_PULL_H */

/* native_exchange: an all_to_all, of more than fits a ring, between ranks that share cores. In rounds (native_bulk.h) each
 * turn of a core would end with the slowest of all ranks. Here any two ranks go on by themselves: the ring of a rank is cut
 * into a room for each other one, which that one alone empties, and two counters say how far they are. A rank that has
 * the core takes all that is there for it, and fills what room it finds; so it needs fewer turns, one for each time that
 * the rooms are filled.
 *
 * It takes the whole ring: it begins when all have taken what stood there before, and what follows begins when all have ended
 * it. */
#ifndef SHM_NATIVE_EXCHANGE_H
#define SHM_NATIVE_EXCHANGE_H

#include "native_bulk.h"

#define SHM_EXCHANGE_CHUNKS 2u         /* of a room: it is filled while it is emptied */
#define SHM_EXCHANGE_OWN (256u << 10) /* of a rank's own part, between two looks at the others */

/* As shm_is_far, of what is given and got together. 4 ranks on 2 cores, 4 MiB: 0.97 of the time, distant cores 0.91 (EPYC). */
static bool shm_exchange_is_far(const shm_op *op) {
    return op->given * (op->call.in == op->call.out ? 1 : 2) >= SHM_FAR_BYTES;
}

static bool shm_exchanges(const shm_set *set, const shm_op *op) {
    return op->call.kind == DDL_ALL_TO_ALL && set->t->crowded && set->count > 2 && set->count <= SHM_EXCHANGE_RANKS &&
           op->given > set->ring_bytes;
}

/* There is room for a cache line of each rank: see shm_has_room. */
static void shm_exchange_lay_out(shm_set *set, shm_op *op) {
    op->part = set->ring_bytes / (uint64_t)set->count / SHM_PAIR * SHM_PAIR;
    op->chunk = op->part / SHM_EXCHANGE_CHUNKS / SHM_LINE * SHM_LINE;
    op->stride = set->ring_bytes;
    op->post = op->reduce = op->take = (shm_walk){0, set->position};
    op->end = set->position + op->stride;
}

/* Where byte `at` of what goes to rank `to` stands in the sender's piece. */
static inline uint64_t shm_room_at(const shm_op *op, int32_t to, uint64_t at) {
    return SHM_RING_AT + (uint64_t)to * op->part + at % op->part;
}

/* Bytes from `at` on that lie together in a room: a chunk at most. */
static inline uint64_t shm_room_span(const shm_op *op, uint64_t at, uint64_t end) {
    uint64_t room = op->part - at % op->part, bytes = op->chunk < end - at ? op->chunk : end - at;
    return bytes < room ? bytes : room;
}

/* What rank j says to this one. Counters go on from operation to operation; this one began at set->exchanged, and all have
 * ended the one before (shm_ring_free). Acquire: what stood there, or is free. */
static inline uint64_t shm_exchange_count(const shm_set *set, int32_t j, size_t which) {
    const uint8_t *pair = (const uint8_t *)&shm_face_of(set, j)->pairs[set->rank];
    return atomic_load_explicit((const _Atomic uint64_t *)(const void *)(pair + which), memory_order_acquire) - set->exchanged;
}

static inline void shm_exchange_say(const shm_set *set, _Atomic uint64_t *count, uint64_t at) {
    atomic_store_explicit(count, set->exchanged + at, memory_order_release);
}

/* Fills the room of rank j. Returns whether anything fitted. */
static bool shm_exchange_fill(shm_set *set, shm_op *op, int32_t j) {
    shm_room *room = &set->rooms[j];
    const uint8_t *in = (const uint8_t *)op->call.in + (uint64_t)j * op->call.bytes;
    uint64_t got = shm_exchange_count(set, j, offsetof(shm_pair, got)), from = room->sent, n;
    if (got > room->sent) {
        op->failure = DDL_ERR_CORRUPT; /* somebody wrote over it */
        return false;
    }
    while (room->sent < op->call.bytes && room->sent + (n = shm_room_span(op, room->sent, op->call.bytes)) <= got + op->part) {
        shm_copy_for(shm_own_piece(set) + shm_room_at(op, j, room->sent), in + room->sent, n, set->distant);
        room->sent += n;
        shm_exchange_say(set, &set->own->pairs[j].sent, room->sent);
    }
    return room->sent > from;
}

/* Empties the room that rank j has for this one; in place never more than was sent to it, as it lands where that stood. */
static bool shm_exchange_empty(shm_set *set, shm_op *op, int32_t j) {
    shm_room *room = &set->rooms[j];
    uint8_t *out = (uint8_t *)op->call.out + (uint64_t)j * op->call.bytes;
    uint64_t there = shm_exchange_count(set, j, offsetof(shm_pair, sent)), from = room->got, n;
    if (there > op->call.bytes) {
        op->failure = DDL_ERR_CORRUPT;
        return false;
    }
    there = op->call.in == op->call.out && there > room->sent ? room->sent : there;
    while (room->got < there) {
        n = shm_room_span(op, room->got, there);
        shm_copy_result(out + room->got, set->pieces[j] + shm_room_at(op, set->rank, room->got), n, shm_exchange_is_far(op));
        room->got += n;
        shm_exchange_say(set, &set->own->pairs[j].got, room->got);
    }
    return room->got > from;
}

/* Before the others have come: all that fits, if they have taken what stood there. Nobody is woken: see shm_bulk_begin. */
static bool shm_exchange_post(shm_set *set, shm_op *op) {
    bool moved = false, is_free = shm_ring_free(set, op->post.position, op->stride);
    for (int32_t k = 1; is_free && k < set->count; k++) {
        moved |= shm_exchange_fill(set, op, (set->rank + k) % set->count); /* not all at one */
    }
    return moved;
}

/* A rank's own part needs nobody: some of it is copied whenever there is nothing else to do. */
static bool shm_exchange_own(const shm_set *set, shm_op *op) {
    uint64_t at = op->take.at, rest = op->call.bytes - at, bytes = rest < SHM_EXCHANGE_OWN ? rest : SHM_EXCHANGE_OWN;
    uint8_t *out = (uint8_t *)op->call.out + (uint64_t)set->rank * op->call.bytes + at;
    const uint8_t *in = shm_own_part(set, &op->call, at);
    op->take.at += bytes;
    if (out != in && bytes > 0) {
        shm_copy_result(out, in, bytes, shm_exchange_is_far(op));
    }
    return bytes > 0;
}

static bool shm_exchange_is_over(const shm_set *set, const shm_op *op) {
    bool over = op->take.at == op->call.bytes;
    for (int32_t j = 0; over && j < set->count; j++) {
        over = j == set->rank || (set->rooms[j].sent == op->call.bytes && set->rooms[j].got == op->call.bytes);
    }
    return over;
}

/* All have arrived, so all have taken what stood in the ring. */
static int shm_exchange_step(shm_set *set, shm_op *op) {
    bool moved = false;
    for (int32_t k = 1; k < set->count && op->failure == DDL_OK; k++) {
        int32_t j = (set->rank + k) % set->count;
        bool some = shm_exchange_empty(set, op, j);
        some |= op->failure == DDL_OK && shm_exchange_fill(set, op, j);
        if (some) {
            shm_wake(set->t, set->peers[j].local);
        }
        moved |= some;
    }
    if (op->failure != DDL_OK || (!moved && !shm_exchange_own(set, op))) {
        return SHM_STUCK;
    }
    if (!shm_exchange_is_over(set, op)) {
        return SHM_MOVED;
    }
    set->exchanged += op->call.bytes;
    shm_publish(set, &set->own->taken, op->end);
    return shm_bulk_end(set, op);
}

#endif /* SHM_NATIVE_EXCHANGE_H */

/* native_bulk: collectives of data larger than a slot, in rounds through the rings of the ranks' pieces. A rank posts a
 * chunk of what it gives, takes the same chunk from the others, and so on; it posts ahead while there is room, so that
 * ranks need not run at the same time; the first also before it arrives, where it is sure that the operation goes this way
 * (shm_bulk_begin). All ranks walk through the same positions, as these follow from the sizes alone:
 * one counter of each rank says how far it is in all operations of the set.
 *
 *     whole   post, take                all kinds: a rank reads what it takes from all that give
 *     split   post, reduce, take        all_reduce, reduce of three ranks and more (shm_splits): a rank reduces its part
 *                                       of each round and posts the result behind what it gave
 *
 * Rounds are so small that what was posted is still in a cache when it is taken; where ranks share cores each round costs
 * a switch, and they are as large as the ring allows. The kernel's process_vm_readv saves one of the two copies, and loses
 * all the same: 80 us for 1 MiB (EPYC, Linux 6.18), where a copy takes 22 to 26 us. */
#ifndef SHM_NATIVE_BULK_H
#define SHM_NATIVE_BULK_H

#include "copy.h"
#include "native_small.h"

#define SHM_CHUNK_LEAST 4096u
#define SHM_CHUNK_MOST (32u << 10)
#define SHM_CHUNK_CROWDED (512u << 10)
#define SHM_PARTS_MOST (128u << 10) /* of a round, all parts together; SHM_CHUNK_CROWDED where ranks share cores */
#define SHM_AHEAD 2 /* rounds that a rank posts before it takes; fewer where the ring begins anew */
#define SHM_WHOLE_CROWDED (2u << 20) /* of all_reduce: see shm_splits */
#define SHM_WHOLE_RANKS 8            /* of reduce */

/* A round lies in one piece. It is no longer than half of the ring: what is skipped at the end is never taken by anybody, so a
 * longer one might wait for that for ever. */
static inline uint64_t shm_ring_place(const shm_set *set, uint64_t position, uint64_t stride) {
    uint64_t used = position % set->ring_bytes;
    return used + stride > set->ring_bytes ? position - used + set->ring_bytes : position;
}

static inline uint64_t shm_ring_at(const shm_set *set, uint64_t position) {
    return SHM_RING_AT + position % set->ring_bytes;
}

/* Has everybody taken what stood there before? Everybody counts, also this rank, which reads its own results there, and
 * those that take nothing. */
static inline bool shm_ring_free(const shm_set *set, uint64_t position, uint64_t stride) {
    uint64_t end = position + stride;
    if (end <= set->ring_bytes) {
        return true;
    }
    uint64_t own = atomic_load_explicit(&set->own->taken.value, memory_order_relaxed); /* our own word */
    return own >= end - set->ring_bytes &&
           shm_all_counted(set, offsetof(shm_face, taken), 0, set->count, end - set->ring_bytes);
}

static inline void shm_walk_on(const shm_set *set, const shm_op *op, shm_walk *walk, uint64_t span) {
    walk->at += span - walk->at < op->chunk ? span - walk->at : op->chunk;
    walk->position += op->stride;
    if (walk->at < span) {
        walk->position = shm_ring_place(set, walk->position, op->stride);
    }
}

static inline uint64_t shm_chunk_at(const shm_op *op, uint64_t at, uint64_t span) {
    return span - at < op->chunk ? span - at : op->chunk;
}

/* Bytes that a chunk is a multiple of: whole elements, and whole cache lines if those are not too large then. */
static uint64_t shm_unit(const shm_op *op, uint64_t most) {
    uint64_t element = op->call.element_bytes > 0 ? (uint64_t)op->call.element_bytes : 1;
    return element * SHM_LINE <= most ? element * SHM_LINE : element;
}

static uint64_t shm_round_to(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

/* Lays the rounds out. `parts` chunks of one stand side by side in the ring. False: no element fits. */
static bool shm_lay_out(shm_set *set, shm_op *op, uint64_t span, uint64_t parts, uint64_t aim) {
    uint64_t room = set->ring_bytes / 2 / parts / SHM_PAIR * SHM_PAIR;
    uint64_t most = aim < room ? aim : room, unit = shm_unit(op, most);
    if (unit > most) {
        return false;
    }
    op->chunk = most / unit * unit;
    op->chunk = op->chunk < span ? op->chunk : span;
    op->stride = shm_round_to(op->chunk * parts, SHM_PAIR);
    shm_walk walk = {0, shm_ring_place(set, set->position, op->stride)};
    op->post = op->reduce = op->take = walk;
    while (walk.at < span) {
        shm_walk_on(set, op, &walk, span);
    }
    op->end = walk.position;
    return true;
}

static int shm_bulk_end(shm_set *set, const shm_op *op) {
    set->position = op->end;
    set->floor = op->call.sequence - 1; /* all have arrived, which they do when they have ended the one before */
    return SHM_ENDED;
}

/* ---- whole ---- */

/* Four chunks at least, so that taking overlaps with posting, which it does not where ranks share cores. */
static uint64_t shm_whole_aim(const shm_set *set, const shm_op *op) {
    bool crowded = set->t->crowded;
    uint64_t aim = crowded ? op->call.bytes : op->call.bytes / 4, most = crowded ? SHM_CHUNK_CROWDED : SHM_CHUNK_MOST;
    if (shm_kind_of(&op->call)->parts) {
        uint64_t part = (crowded ? SHM_CHUNK_CROWDED : SHM_PARTS_MOST) / (uint64_t)set->count;
        most = part < most ? part : most;
    }
    aim = aim < most ? aim : most;
    return aim < SHM_CHUNK_LEAST ? SHM_CHUNK_LEAST : aim;
}

/* Does a result pass the caches by? What is reduced does not: its lines were read just now. */
static bool shm_is_far(const shm_set *set, const shm_op *op) {
    const shm_kind *k = shm_kind_of(&op->call);
    return (k->takes == SHM_EACH && op->call.bytes * (uint64_t)set->count >= SHM_FAR_BYTES) ||
           (k->takes == SHM_FROM_THE_ROOT && op->call.bytes >= SHM_FAR_BYTES);
}

static inline void shm_copy_result(void *to, const void *from, uint64_t bytes, bool far) {
    if (far) {
        shm_copy_past(to, from, bytes);
    } else {
        shm_memcpy(to, from, bytes);
    }
}

/* shm_get of a far result. */
static void shm_get_far(const shm_set *set, const shm_op *op, const uint8_t *const *pieces, uint64_t from, uint64_t at,
                        uint64_t bytes) {
    bool each = shm_kind_of(&op->call)->takes == SHM_EACH;
    int32_t lo, hi;
    shm_needed(set, &op->call, &lo, &hi);
    for (int32_t k = 0; k < hi - lo; k++) {
        int32_t j = each ? (set->rank + k) % set->count : lo; /* not all at one */
        uint8_t *dst = (uint8_t *)op->call.out + (each ? (uint64_t)j * op->call.bytes : 0) + at;
        const uint8_t *src = j == set->rank ? shm_own_part(set, &op->call, at) : pieces[j] + from;
        if (dst != src) {
            shm_copy_past(dst, src, bytes);
        }
    }
}

/* shm_get of larger operations. A root that takes its own part only is left to shm_get. */
static void shm_take_bytes(const shm_set *set, const shm_op *op, const uint8_t *const *pieces, uint64_t from,
                           uint64_t part_bytes, uint64_t at, uint64_t bytes) {
    int32_t lo, hi;
    shm_needed(set, &op->call, &lo, &hi);
    if (hi > lo && shm_is_far(set, op)) {
        uint64_t part = shm_kind_of(&op->call)->parts ? (uint64_t)set->rank * part_bytes : 0;
        shm_get_far(set, op, pieces, from + part, at, bytes);
    } else {
        shm_get(set, &op->call, pieces, from, part_bytes, at, bytes);
    }
}

/* Nobody is woken: see shm_bulk_begin. */
static bool shm_post_chunk(shm_set *set, shm_op *op) {
    shm_walk *walk = &op->post;
    uint64_t span = op->call.bytes;
    if (walk->at == span || walk->position > op->take.position + SHM_AHEAD * op->stride ||
        !shm_ring_free(set, walk->position, op->stride)) {
        return false;
    }
    uint64_t end = walk->position + op->stride;
    shm_give(set, &op->call, shm_own_piece(set) + shm_ring_at(set, walk->position), walk->at, shm_chunk_at(op, walk->at, span));
    shm_walk_on(set, op, walk, span);
    shm_count_to(&set->own->posted, end);
    return true;
}

/* Never before the own chunk is posted: in place, what is taken lands where it was given from. */
static bool shm_get_chunk(shm_set *set, shm_op *op) {
    shm_walk *walk = &op->take;
    uint64_t span = op->call.bytes, end = walk->position + op->stride;
    int32_t lo, hi;
    shm_needed(set, &op->call, &lo, &hi);
    if (walk->at == span || walk->at >= op->post.at ||
        !shm_all_counted(set, offsetof(shm_face, posted), lo, hi, end)) {
        return false;
    }
    uint64_t bytes = shm_chunk_at(op, walk->at, span);
    shm_take_bytes(set, op, set->pieces, shm_ring_at(set, walk->position), bytes, walk->at, bytes);
    shm_walk_on(set, op, walk, span);
    shm_publish(set, &set->own->taken, end);
    return true;
}

static int shm_whole_step(shm_set *set, shm_op *op) {
    bool moved = shm_post_chunk(set, op);
    if (moved) {
        shm_wake_others(set);
    }
    moved |= shm_get_chunk(set, op);
    if (op->post.at < op->call.bytes || op->take.at < op->call.bytes) {
        return moved ? SHM_MOVED : SHM_STUCK;
    }
    return shm_bulk_end(set, op);
}

/* A rank that gives nothing has posted, one that takes nothing has taken, all of it. */
static void shm_whole_begin(shm_set *set, shm_op *op) {
    int32_t lo, hi;
    shm_needed(set, &op->call, &lo, &hi);
    if (!shm_gives(set, &op->call)) {
        op->post.at = op->call.bytes;
    }
    if (hi <= lo) {
        shm_get(set, &op->call, set->pieces, 0, 0, 0, op->call.bytes); /* its own part at most */
        op->take.at = op->call.bytes;
        op->take.position = op->end;
        shm_publish(set, &set->own->taken, op->end);
    }
    op->step = shm_whole_step;
}

/* ---- split ---- */

/* A round of `bytes` bytes from `at` on, in parts for all ranks; the last round has smaller ones. */
static uint64_t shm_part_of_round(const shm_set *set, const shm_op *op, uint64_t bytes) {
    uint64_t part = op->chunk / (uint64_t)set->count;
    return bytes == op->chunk ? part : shm_round_to((bytes + (uint64_t)set->count - 1) / (uint64_t)set->count, op->part);
}

static void shm_part_range(uint64_t part, int32_t j, uint64_t bytes, uint64_t *from, uint64_t *length) {
    *from = part * (uint64_t)j < bytes ? part * (uint64_t)j : bytes;
    *length = bytes - *from < part ? bytes - *from : part;
}

/* All but the part that this rank reduces by itself. Nobody is woken. */
static bool shm_split_post(shm_set *set, shm_op *op) {
    shm_walk *walk = &op->post;
    uint64_t span = op->call.bytes, end = walk->position + op->stride, from, length;
    if (walk->at == span || walk->position > op->take.position + SHM_AHEAD * op->stride ||
        !shm_ring_free(set, walk->position, op->stride)) {
        return false;
    }
    uint64_t bytes = shm_chunk_at(op, walk->at, span);
    uint8_t *to = shm_own_piece(set) + shm_ring_at(set, walk->position);
    const uint8_t *in = (const uint8_t *)op->call.in + walk->at;
    shm_part_range(shm_part_of_round(set, op, bytes), set->rank, bytes, &from, &length);
    shm_copy_for(to, in, from, set->distant);
    shm_copy_for(to + from + length, in + from + length, bytes - from - length, set->distant);
    shm_walk_on(set, op, walk, span);
    shm_count_to(&set->own->posted, end);
    return true;
}

/* The result goes over what this rank has not posted: the place of its own part. */
static bool shm_split_reduce(shm_set *set, shm_op *op) {
    shm_walk *walk = &op->reduce;
    uint64_t span = op->call.bytes, end = walk->position + op->stride, from, length;
    if (walk->at == op->post.at || !shm_all_counted(set, offsetof(shm_face, posted), 0, set->count, end)) {
        return false;
    }
    uint64_t bytes = shm_chunk_at(op, walk->at, span), ring = shm_ring_at(set, walk->position);
    shm_part_range(shm_part_of_round(set, op, bytes), set->rank, bytes, &from, &length);
    uint8_t *dst = shm_own_piece(set) + ring + from;
    for (int32_t j = 0; j < set->count; j++) {
        const uint8_t *in = (const uint8_t *)op->call.in + walk->at;
        set->sources[j] = (j == set->rank ? in : set->pieces[j] + ring) + from;
    }
    if (length > 0) {
        op->call.reduce(op->call.reduce_arg, dst, set->sources, set->count, length);
    }
    shm_walk_on(set, op, walk, span);
    shm_publish(set, &set->own->reduced, end);
    return true;
}

static bool shm_split_take(shm_set *set, shm_op *op) {
    shm_walk *walk = &op->take;
    uint64_t span = op->call.bytes, end = walk->position + op->stride, from, length;
    bool takes = op->until > 0; /* see shm_split_begin */
    if (walk->at == op->reduce.at ||
        (takes && !shm_all_counted(set, offsetof(shm_face, reduced), 0, set->count, end))) {
        return false;
    }
    uint64_t bytes = shm_chunk_at(op, walk->at, span), ring = shm_ring_at(set, walk->position);
    uint64_t part = shm_part_of_round(set, op, bytes);
    for (int32_t j = 0; takes && j < set->count; j++) {
        shm_part_range(part, j, bytes, &from, &length);
        shm_memcpy((uint8_t *)op->call.out + walk->at + from, set->pieces[j] + ring + from, length);
    }
    shm_walk_on(set, op, walk, span);
    shm_publish(set, &set->own->taken, end);
    return true;
}

static int shm_split_step(shm_set *set, shm_op *op) {
    bool moved = shm_split_post(set, op);
    if (moved) {
        shm_wake_others(set);
    }
    moved |= shm_split_reduce(set, op);
    moved |= shm_split_take(set, op);
    if (op->take.at < op->call.bytes) {
        return moved ? SHM_MOVED : SHM_STUCK;
    }
    return shm_bulk_end(set, op);
}

/* From three ranks on, reading all that the others give costs more than a second exchange. But where ranks share cores an
 * exchange costs switches: then all read all of what is small (read are ranks * ranks * bytes in all), and a root reads
 * by itself what few ranks give. 32 KiB of 4 ranks on 2 cores: all_reduce 14 -> 9 us, reduce 14 -> 6. */
static bool shm_splits(const shm_set *set, const shm_op *op) {
    uint64_t ranks = (uint64_t)set->count;
    bool crowded = set->t->crowded;
    if (ranks <= 2) {
        return false;
    }
    return op->call.kind == DDL_ALL_REDUCE ? !crowded || ranks * ranks * op->call.bytes > SHM_WHOLE_CROWDED
                                           : op->call.kind == DDL_REDUCE && (!crowded || ranks > SHM_WHOLE_RANKS);
}

#define SHM_SPLIT_PART (16u << 10)

static bool shm_split_lay_out(shm_set *set, shm_op *op) {
    uint64_t ranks = (uint64_t)set->count, aim = op->call.bytes / 4 / ranks;
    aim = aim < SHM_SPLIT_PART ? aim : SHM_SPLIT_PART;
    uint64_t room = set->ring_bytes / 2 / ranks, unit = shm_unit(op, room);
    aim = shm_round_to(aim < 1024 ? 1024 : aim, unit);
    aim = aim < room ? aim : room / unit * unit;
    if (unit > room) {
        return false;
    }
    op->part = unit;
    op->chunk = aim * ranks; /* may exceed the tensor: then there is one round, with smaller parts */
    op->stride = shm_round_to(op->chunk, SHM_PAIR);
    shm_walk walk = {0, shm_ring_place(set, set->position, op->stride)};
    op->post = op->reduce = op->take = walk;
    while (walk.at < op->call.bytes) {
        shm_walk_on(set, op, &walk, op->call.bytes);
    }
    op->end = walk.position;
    return true;
}

static void shm_split_begin(shm_set *set, shm_op *op) {
    op->until = op->call.kind == DDL_ALL_REDUCE || op->call.root == set->rank ? set->count : 0;
    op->step = shm_split_step;
}

#endif /* SHM_NATIVE_BULK_H */

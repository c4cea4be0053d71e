/* native_direct: collectives on memory that every rank sees: tensors of ddl_tensor_alloc. Arrivals say where buffers
 * are, and how much of the arenas their rank has mapped; all ranks see the same arrivals and come to the same decision. (A
 * rank whose own arrival rules it out knows it before the others come.)
 *
 *     read    each rank takes from the others' buffers into its own; then all wait until all have read
 *     write   all_reduce, reduce: each rank reduces its part from the inputs of all and writes it to the outputs of all
 *
 * A rank writes only whole pages of another's output: what lies in the pages at its ends may share them with somebody
 * else's data, and travels through the ring instead. So when an operation is given up, its owner can put new pages in
 * the place of those which a rank that was stopped may still write to (shm_native_cancel). Inputs cannot be taken away
 * from a late reader; it looks whether somebody has given up before it believes what it read. */
#ifndef SHM_NATIVE_DIRECT_H
#define SHM_NATIVE_DIRECT_H

#include "native_bulk.h"

/* Reduced and copied before others are looked at: no less than 16 KiB, more where the ring has room for it. The longer
 * each of the two goes on, the better both use the way between cores (of 16 KiB: 2 ranks, 16 MiB: 430 us, with 64: 374;
 * 4 ranks, 2 MiB: 169, with 64: 126; EPYC, cores far apart; between near ones 381 and 358 for 16 MiB). */
#define SHM_BLOCK_LEAST (16u << 10)
#define SHM_BLOCK_MOST (64u << 10)
#define SHM_WRITE_STEP (4u << 10) /* of a block: from the first-level cache */
#define SHM_READ_BLOCK (64u << 10)

/* What an arrival says of a large operation. */
typedef struct shm_offer {
    uint64_t in, out; /* place in the arenas + 1; 0: in other memory */
    uint64_t sees;    /* of each arena of the others, from its start, this rank has mapped so many bytes */
} shm_offer;

#define SHM_NOWHERE UINT64_MAX
#ifndef SHM_TRY_AGAIN
#define SHM_TRY_AGAIN 1024 /* of so many operations that need what could not be mapped, one tries it again */
#endif

static const shm_offer *shm_offer_of(const shm_set *set, const shm_op *op, int32_t j) {
    return (const shm_offer *)(const void *)shm_face_of(set, j)->lines[op->call.sequence % SHM_LINES].data;
}

static uint64_t shm_page(const shm_set *set) { return set->t->address.page_bytes; }

/* Does the operation write to the outputs of others? Then all have to offer theirs. */
static bool shm_writes(const shm_op *op) { return op->call.kind == DDL_ALL_REDUCE || op->call.kind == DDL_REDUCE; }

static bool shm_has_out(const shm_op *op, int32_t j) {
    return op->call.kind == DDL_ALL_REDUCE || (op->call.kind == DDL_REDUCE && op->call.root == j);
}

static bool shm_rank_gives(const shm_op *op, int32_t j) {
    const shm_kind *k = shm_kind_of(&op->call);
    return k->gives == SHM_EVERYBODY ? op->call.kind != DDL_GATHER || op->call.root != j
                                     : k->gives == SHM_THE_ROOT && op->call.root == j;
}

/* Scans are left out: in place, a rank's result would destroy what others have to read. So is all_to_all in place. */
static bool shm_may_be_direct(const shm_op *op) {
    return op->call.kind != DDL_SCAN && op->call.kind != DDL_EXSCAN &&
           (op->call.kind != DDL_ALL_TO_ALL || op->call.in != op->call.out);
}

static uint64_t shm_place_of(shm *t, const void *memory, uint64_t bytes) {
    uint64_t offset;
    return shm_locate(t, memory, bytes, &offset) ? offset + 1 : 0;
}

/* Where in its arena an offer ends. */
static uint64_t shm_offer_end(const shm *t, uint64_t place, uint64_t bytes) {
    bool is = place > 0 && shm_is_place(t, place - 1, bytes);
    return is ? (place - 1 - t->shared_bytes) % t->arena_bytes + bytes : SHM_NOWHERE;
}

static bool shm_see_all(shm_set *set, uint64_t bytes) {
    uint64_t sees = UINT64_MAX;
    for (int32_t j = 0; j < set->count; j++) {
        int32_t i = set->peers[j].local;
        const shm_view *v = &set->t->memory->views[i];
        if (j != set->rank && v->bytes < bytes && !shm_view_extend(set->t, i, bytes)) {
            shm_log(set->t, set->t->memory->told ? DDL_LOG_DEBUG : DDL_LOG_WARN,
                    "%" PRIu64 " MiB of tensor memory of rank %d cannot be mapped: %s (look at ulimit -v and "
                    "vm.max_map_count); collectives on such tensors go the way of ordinary memory",
                    (bytes - 1) / (1u << 20) + 1, (int)set->t->rank_of[i], strerror(errno));
            set->t->memory->told = true;
            return false;
        }
        sees = j != set->rank && v->bytes < sees ? v->bytes : sees;
    }
    set->sees = sees;
    return true;
}

/* Maps before it arrives: ranks allocate alike, so the others' tensors mostly end where the own one does. Or else where
 * it was seen that they do, when the operation went another way. What could not be mapped is tried again now and
 * then; operations that need it are counted here, as their sequence numbers may all be odd (a barrier after each). */
static void shm_see(shm_set *set, uint64_t own) {
    uint64_t most = set->needed > own ? set->needed : own, bytes = most < set->unseen ? most : own;
    if (most <= set->sees || most == SHM_NOWHERE) {
        return;
    }
    if (bytes <= set->sees || bytes >= set->unseen) {
        if (++set->waited < SHM_TRY_AGAIN) {
            return;
        }
        set->waited = 0;
        bytes = most;
    }
    set->unseen = shm_see_all(set, bytes) ? SHM_NOWHERE : bytes;
}

/* Returns whether this rank offers all that it would have to. */
static bool shm_make_offer(shm_set *set, shm_op *op) {
    shm_offer offer = {0, 0, 0};
    bool gives = shm_rank_gives(op, set->rank), shows = shm_writes(op) && shm_has_out(op, set->rank);
    if (shm_may_be_direct(op)) {
        offer.in = gives ? shm_place_of(set->t, op->call.in, op->given) : 0;
        offer.out = shows ? shm_place_of(set->t, op->call.out, op->call.bytes) : 0;
    }
    if (offer.in > 0 || offer.out > 0 || set->needed > set->sees) {
        uint64_t in = offer.in > 0 ? shm_offer_end(set->t, offer.in, op->given) : 0;
        uint64_t out = offer.out > 0 ? shm_offer_end(set->t, offer.out, op->call.bytes) : 0;
        shm_see(set, in > out ? in : out);
    }
    offer.sees = set->sees;
    op->offered = offer.out != 0;
    memcpy(set->own->lines[op->call.sequence % SHM_LINES].data, &offer, sizeof offer);
    return (!gives || offer.in > 0) && (!shows || offer.out > 0);
}

/* Has everybody offered, in memory that everybody has mapped? */
static bool shm_all_offered(shm_set *set, const shm_op *op) {
    uint64_t need = 0, sees = UINT64_MAX, given = op->given;
    for (int32_t j = 0; j < set->count; j++) {
        shm_offer offer = *shm_offer_of(set, op, j);
        uint64_t in = shm_rank_gives(op, j) ? shm_offer_end(set->t, offer.in, given) : 0;
        uint64_t out = shm_writes(op) && shm_has_out(op, j) ? shm_offer_end(set->t, offer.out, op->call.bytes) : 0;
        in = in > out ? in : out;
        need = in > need ? in : need;
        sees = offer.sees < sees ? offer.sees : sees;
    }
    set->needed = need != SHM_NOWHERE ? need : set->needed;
    return need <= sees;
}

/* Sees what this rank has to see. What a peer offered is checked by shm_reach. */
static bool shm_look_at_all(shm_set *set, const shm_op *op) {
    uint64_t given = op->given;
    for (int32_t j = 0; j < set->count; j++) {
        shm_offer offer = *shm_offer_of(set, op, j);
        shm_member *peer = &set->peers[j];
        peer->in = j == set->rank ? op->call.in : NULL;
        peer->out = j == set->rank ? op->call.out : NULL;
        if (j != set->rank && shm_rank_gives(op, j) && (peer->in = shm_reach(set->t, offer.in - 1, given)) == NULL) {
            return false;
        }
        if (j != set->rank && shm_writes(op) && shm_has_out(op, j) &&
            (peer->out = shm_reach(set->t, offer.out - 1, op->call.bytes)) == NULL) {
            return false;
        }
    }
    return true;
}

/* The end of what others might still read or write: all have said so, and none has given up meanwhile. */
static int shm_direct_end(shm_set *set, const shm_op *op) {
    return shm_any_cancelled(set) ? SHM_STUCK : shm_bulk_end(set, op);
}

/* ---- read ---- */

static int shm_read_step(shm_set *set, shm_op *op) {
    uint64_t span = op->call.bytes;
    if (op->take.at < span) {
        uint64_t at = op->take.at, bytes = shm_chunk_at(op, at, span);
        shm_take_bytes(set, op, set->views, at, span, at, bytes);
        op->take.at += bytes;
        if (op->take.at == span) {
            shm_publish(set, &set->own->taken, op->end);
        }
        return SHM_MOVED;
    }
    return shm_all_counted(set, offsetof(shm_face, taken), 0, set->count, op->end) ? shm_direct_end(set, op) : SHM_STUCK;
}

static void shm_read_begin(shm_set *set, shm_op *op) {
    int32_t lo, hi;
    for (int32_t j = 0; j < set->count; j++) {
        set->views[j] = set->peers[j].in;
    }
    shm_needed(set, &op->call, &lo, &hi);
    uint64_t unit = shm_unit(op, SHM_READ_BLOCK);
    op->chunk = unit > SHM_READ_BLOCK ? unit : SHM_READ_BLOCK / unit * unit;
    if (shm_kind_of(&op->call)->takes == SHM_REDUCED) {
        op->chunk = op->chunk / 4 / unit > 0 ? op->chunk / 4 / unit * unit : unit;
    }
    op->take.at = 0;
    op->end = set->position + SHM_PAIR; /* one turn of the counters */
    op->step = shm_read_step;
    if (hi <= lo && shm_kind_of(&op->call)->takes != SHM_FROM_THE_ROOT) {
        op->take.at = op->call.bytes;
        shm_publish(set, &set->own->taken, op->end);
    }
}

/* ---- write ---- */

/* The bytes [0, head) and [tail, bytes) lie in pages that some output has not for itself. Found once, as are the places:
 * what is scribbled over the offers later changes nothing. */
static void shm_edges(const shm_set *set, shm_op *op) {
    uint64_t head = 0, behind = 0, page = shm_page(set);
    for (int32_t j = 0; j < set->count; j++) {
        if (shm_has_out(op, j)) {
            uint64_t first = shm_offer_of(set, op, j)->out - 1, before = (0 - first) % page;
            uint64_t after = (first + op->call.bytes) % page;
            head = before > head ? before : head;
            behind = after > behind ? after : behind;
        }
    }
    op->head = head < op->call.bytes ? head : op->call.bytes; /* all of it may lie in one large page */
    op->tail = behind < op->call.bytes ? op->call.bytes - behind : 0;
}

/* Copies [from, from + bytes) of the result to the rings, as far as it belongs to an edge. The head has the first page
 * of the round, the tail the second. */
static void shm_post_edge(shm_set *set, const shm_op *op, const uint8_t *result, uint64_t from, uint64_t bytes) {
    uint64_t head = op->head, tail = op->tail;
    uint8_t *ring = shm_own_piece(set) + shm_ring_at(set, op->post.position);
    if (from < head) {
        shm_memcpy(ring + from, result, from + bytes < head ? bytes : head - from);
    }
    if (from + bytes > tail) {
        uint64_t skip = from < tail ? tail - from : 0;
        shm_memcpy(ring + shm_page(set) + (from + skip - tail), result + skip, bytes - skip);
    }
}

/* Fetches [from, to) of the result from those that reduced it; `base` is where the edge's first byte lies in a round. */
static void shm_take_edge(shm_set *set, const shm_op *op, uint64_t from, uint64_t to, uint64_t ring) {
    for (uint64_t at = from; at < to;) {
        uint64_t j = at / op->part, end = (j + 1) * op->part < to ? (j + 1) * op->part : to;
        shm_memcpy((uint8_t *)op->call.out + at, set->pieces[j] + ring + (at - from), end - at);
        at = end;
    }
}

/* One step: reduced into the own output, or the root's, and copied from the cache to all others. */
static void shm_write_some(shm_set *set, shm_op *op, uint64_t at, uint64_t bytes) {
    uint64_t head = op->head, tail = op->tail;
    bool has_out = shm_has_out(op, set->rank);
    uint8_t *scratch = shm_own_piece(set) + shm_ring_at(set, op->post.position) + 2 * shm_page(set);
    uint8_t *dst = has_out ? (uint8_t *)op->call.out + at : scratch;
    for (int32_t j = 0; j < set->count; j++) {
        set->sources[j] = set->peers[j].in + at;
    }
    op->call.reduce(op->call.reduce_arg, dst, set->sources, set->count, bytes);
    shm_post_edge(set, op, dst, at, bytes);
    uint64_t from = at < head ? head : at, to = at + bytes > tail ? tail : at + bytes;
    for (int32_t k = 1; k < set->count && from < to; k++) {
        int32_t j = set->rank + k < set->count ? set->rank + k : set->rank + k - set->count; /* not all to one */
        if (shm_has_out(op, j)) {
            shm_memcpy(set->peers[j].out + from, dst + (from - at), to - from);
        }
    }
}

/* Makes lines of the others' outputs ours, where ranks have a core each. */
static void shm_own_outs(const shm_set *set, const shm_op *op, uint64_t at, uint64_t bytes) {
    for (int32_t j = 0; j < set->count && !set->t->crowded; j++) {
        if (j != set->rank && shm_has_out(op, j)) {
            shm_own_ahead(set->peers[j].out + at, bytes);
        }
    }
}

/* One block of this rank's part, which ends at `end`. The next step's outputs are asked for during this one; where the
 * operation is in place its inputs come with them, and are not asked for twice. all_reduce of 256 KiB, 1 and 16 MiB between
 * cores of one cache takes 0.94, 0.93 and 0.94 of the time, 0.85 between others; of 4 ranks on 2 cores, which ask for
 * nothing ahead, 0.86, 0.97 for 2 MiB, and 0.84 (EPYC). */
static void shm_write_block(shm_set *set, shm_op *op, uint64_t at, uint64_t bytes, uint64_t end) {
    uint64_t unit = shm_unit(op, SHM_WRITE_STEP), step = unit > SHM_WRITE_STEP ? unit : SHM_WRITE_STEP / unit * unit;
    uint64_t until = at + bytes;
    if (op->reduce.at == 0) {
        shm_own_outs(set, op, at, bytes < step ? bytes : step);
    }
    while (at < until) {
        uint64_t now = until - at < step ? until - at : step, left = end - at - now;
        shm_own_outs(set, op, at + now, left < step ? left : step);
        shm_write_some(set, op, at, now);
        at += now;
    }
}

static void shm_take_edges(shm_set *set, shm_op *op) {
    uint64_t ring = shm_ring_at(set, op->post.position);
    if (shm_has_out(op, set->rank)) {
        shm_take_edge(set, op, 0, op->head, ring);
        shm_take_edge(set, op, op->tail, op->call.bytes, ring + shm_page(set));
    }
}

static int shm_write_step(shm_set *set, shm_op *op) {
    uint64_t from, length;
    shm_part_range(op->part, set->rank, op->call.bytes, &from, &length);
    if (op->reduce.at < length) {
        uint64_t bytes = shm_chunk_at(op, op->reduce.at, length);
        if (!shm_ring_free(set, op->post.position, op->stride)) {
            return SHM_STUCK;
        }
        shm_write_block(set, op, from + op->reduce.at, bytes, from + length);
        op->reduce.at += bytes;
        if (op->reduce.at < length) {
            return SHM_MOVED;
        }
        shm_publish(set, &set->own->reduced, op->end);
    }
    if (!shm_all_counted(set, offsetof(shm_face, reduced), 0, set->count, op->end)) {
        return SHM_STUCK;
    }
    shm_take_edges(set, op);
    if (shm_any_cancelled(set)) {
        return SHM_STUCK;
    }
    shm_publish(set, &set->own->taken, op->end);
    return shm_bulk_end(set, op);
}

/* Bytes of a block, 0: the ring has no room for one and both edges. The same on all ranks. */
static uint64_t shm_block_bytes(const shm_set *set) {
    uint64_t half = set->ring_bytes / 2 / SHM_PAIR * SHM_PAIR, edges = 2 * shm_page(set);
    uint64_t room = half > edges ? half - edges : 0;
    return room < SHM_BLOCK_LEAST ? 0 : room < SHM_BLOCK_MOST ? room : SHM_BLOCK_MOST;
}

/* A part holds both edges of the tensor, or there are none, so that an edge is in one part or in two. Room for a block
 * and both edges is taken from the ring. */
static void shm_write_begin(shm_set *set, shm_op *op) {
    uint64_t ranks = (uint64_t)set->count, block = shm_block_bytes(set), from, length;
    uint64_t unit = shm_unit(op, block);
    shm_edges(set, op);
    uint64_t least = op->head > 0 || op->tail < op->call.bytes ? 2 * shm_page(set) : unit;
    op->part = shm_round_to((op->call.bytes + ranks - 1) / ranks, unit);
    op->part = op->part < least ? shm_round_to(least, unit) : op->part;
    op->chunk = block / unit * unit;
    op->stride = 2 * shm_page(set) + block;
    op->post.position = shm_ring_place(set, set->position, op->stride);
    op->reduce.at = 0;
    op->end = op->post.position + op->stride;
    op->step = shm_write_step;
    shm_part_range(op->part, set->rank, op->call.bytes, &from, &length);
    if (length == 0) {
        shm_publish(set, &set->own->reduced, op->end);
    }
}

/* ---- the choice ---- */

/* Known when all have arrived, and the same on all ranks. */
static bool shm_is_direct(shm_set *set, const shm_op *op) {
    uint64_t block = shm_block_bytes(set);
    bool room = !shm_writes(op) || (block > 0 && (uint64_t)op->call.element_bytes <= block);
    return set->count > 1 && room && shm_all_offered(set, op);
}

static void shm_direct_begin(shm_set *set, shm_op *op) {
    if (!shm_look_at_all(set, op)) {
        op->failure = DDL_ERR_CORRUPT; /* somebody wrote over what an arrival had said */
    } else if (shm_writes(op)) {
        shm_write_begin(set, op);
    } else {
        shm_read_begin(set, op);
    }
}

#endif /* SHM_NATIVE_DIRECT_H */

/* native_small: what each collective gives and takes, and the collectives whose data fits a slot: each rank writes what
 * it gives with its arrival, waits for the arrivals that it needs, and takes from all in rank order.
 *
 * Every kind is four facts (shm_kinds): what a rank gives, whose arrivals it needs, and what it takes. The same two
 * functions, shm_give and shm_get, serve slots, rounds of the ring and memory of the peers themselves; only the place
 * differs. It must not know how operations queue up. */
#ifndef SHM_NATIVE_SMALL_H
#define SHM_NATIVE_SMALL_H

#include "copy.h"
#include "distance.h"
#include "native_set.h"

#include <sched.h>

enum { SHM_NOBODY, SHM_EVERYBODY, SHM_THE_ROOT };                             /* who gives */
enum { SHM_ALL, SHM_FROM_ROOT, SHM_TO_ROOT, SHM_UP_TO_SELF, SHM_BELOW_SELF }; /* whose arrivals are needed */
enum { SHM_NOTHING, SHM_REDUCED, SHM_EACH, SHM_FROM_THE_ROOT };               /* what is taken */

typedef struct shm_kind {
    uint8_t parts; /* what is given has a part for each rank */
    uint8_t gives, needs, takes;
} shm_kind;

static const shm_kind shm_kinds[DDL_EXSCAN + 1] = {
    [DDL_BARRIER] = {0, SHM_NOBODY, SHM_ALL, SHM_NOTHING},
    [DDL_BROADCAST] = {0, SHM_THE_ROOT, SHM_FROM_ROOT, SHM_FROM_THE_ROOT},
    [DDL_REDUCE] = {0, SHM_EVERYBODY, SHM_TO_ROOT, SHM_REDUCED},
    [DDL_ALL_REDUCE] = {0, SHM_EVERYBODY, SHM_ALL, SHM_REDUCED},
    [DDL_GATHER] = {0, SHM_EVERYBODY, SHM_TO_ROOT, SHM_EACH},
    [DDL_SCATTER] = {1, SHM_THE_ROOT, SHM_FROM_ROOT, SHM_FROM_THE_ROOT},
    [DDL_ALL_GATHER] = {0, SHM_EVERYBODY, SHM_ALL, SHM_EACH},
    [DDL_REDUCE_SCATTER] = {1, SHM_EVERYBODY, SHM_ALL, SHM_REDUCED},
    [DDL_ALL_TO_ALL] = {1, SHM_EVERYBODY, SHM_ALL, SHM_EACH},
    [DDL_SCAN] = {0, SHM_EVERYBODY, SHM_UP_TO_SELF, SHM_REDUCED},
    [DDL_EXSCAN] = {0, SHM_EVERYBODY, SHM_BELOW_SELF, SHM_REDUCED},
};

static inline const shm_kind *shm_kind_of(const ddl_native_call *call) { return &shm_kinds[call->kind]; }

/* The ranks [*lo, *hi) from which this one takes. */
static inline void shm_needed(const shm_set *set, const ddl_native_call *call, int32_t *lo, int32_t *hi) {
    uint8_t needs = shm_kind_of(call)->needs;
    int32_t root = call->root;
    bool is_root = root == set->rank;
    *lo = needs == SHM_FROM_ROOT ? root : 0;
    if (needs == SHM_ALL) {
        *hi = set->count;
    } else if (needs == SHM_FROM_ROOT) {
        *hi = is_root ? root : root + 1;
    } else if (needs == SHM_TO_ROOT) {
        *hi = is_root ? set->count : 0;
    } else {
        *hi = needs == SHM_UP_TO_SELF ? set->rank + 1 : set->rank;
    }
}

/* Does this rank give something that another takes? */
static inline bool shm_gives(const shm_set *set, const ddl_native_call *call) {
    const shm_kind *k = shm_kind_of(call);
    bool is_root = call->root == set->rank;
    return k->gives == SHM_EVERYBODY ? k->needs != SHM_TO_ROOT || !is_root : k->gives == SHM_THE_ROOT && is_root;
}

/* Bytes that a rank gives in all. */
static inline uint64_t shm_given_bytes(const shm_set *set, const ddl_native_call *call) {
    const shm_kind *k = shm_kind_of(call);
    return k->gives == SHM_NOBODY ? 0 : k->parts ? call->bytes * (uint64_t)set->count : call->bytes;
}

/* ---- giving and taking, anywhere ---- */

/* Copies bytes [at, at + bytes) of what this rank gives, of each part where it has parts, to where others take it. */
static inline void shm_give(const shm_set *set, const ddl_native_call *call, uint8_t *to, uint64_t at, uint64_t bytes) {
    const uint8_t *in = call->in;
    if (!shm_kind_of(call)->parts) {
        shm_copy_for(to, in + at, bytes, set->distant);
        return;
    }
    for (int32_t j = 0; j < set->count; j++) {
        if (j != set->rank) {
            shm_copy_for(to + (uint64_t)j * bytes, in + (uint64_t)j * call->bytes + at, bytes, set->distant);
        }
    }
}

/* Where this rank's own contribution to itself stands. */
static inline const uint8_t *shm_own_part(const shm_set *set, const ddl_native_call *call, uint64_t at) {
    uint64_t part = shm_kind_of(call)->parts ? (uint64_t)set->rank * call->bytes : 0;
    return (const uint8_t *)call->in + part + at;
}

static inline void shm_copy_bytes(void *to, const void *from, uint64_t bytes) {
    if (to != from) {
        shm_memcpy(to, from, bytes);
    }
}

/* dst = what ranks [0, hi) give, in rank order: the same bits on every rank. Theirs begins at sources[j] + from. */
static inline void shm_get_reduced(const shm_set *set, const ddl_native_call *call, const uint8_t *const *pieces, uint64_t from,
                                    int32_t hi, uint64_t at, uint64_t bytes) {
    uint8_t *dst = (uint8_t *)call->out + at;
    for (int32_t j = 0; j < hi; j++) {
        set->sources[j] = j == set->rank ? shm_own_part(set, call, at) : pieces[j] + from;
    }
    if (hi > 1) {
        call->reduce(call->reduce_arg, dst, set->sources, hi, bytes);
    } else {
        shm_copy_bytes(dst, set->sources[0], bytes);
    }
}

static inline void shm_get_each(const shm_set *set, const ddl_native_call *call, const uint8_t *const *pieces, uint64_t from,
                                 uint64_t at, uint64_t bytes) {
    for (int32_t k = 0; k < set->count; k++) {
        int32_t j = set->rank + k < set->count ? set->rank + k : set->rank + k - set->count; /* not all at one */
        uint8_t *dst = (uint8_t *)call->out + (uint64_t)j * call->bytes + at;
        shm_copy_bytes(dst, j == set->rank ? shm_own_part(set, call, at) : pieces[j] + from, bytes);
    }
}

/* Takes bytes [at, at + bytes) of the result. What rank j gave of them stands at pieces[j] + from; where that has
 * parts, they are part_bytes apart. */
static inline void shm_get(const shm_set *set, const ddl_native_call *call, const uint8_t *const *pieces, uint64_t from,
                            uint64_t part_bytes, uint64_t at, uint64_t bytes) {
    const shm_kind *k = shm_kind_of(call);
    int32_t lo, hi;
    shm_needed(set, call, &lo, &hi);
    from += k->parts ? (uint64_t)set->rank * part_bytes : 0;
    if (k->takes == SHM_REDUCED && hi > 0) {
        shm_get_reduced(set, call, pieces, from, hi, at, bytes);
    } else if (k->takes == SHM_EACH && hi > 0) {
        shm_get_each(set, call, pieces, from, at, bytes);
    } else if (k->takes == SHM_FROM_THE_ROOT && hi > lo) {
        shm_memcpy((uint8_t *)call->out + at, pieces[lo] + from, bytes);
    } else if (k->takes == SHM_FROM_THE_ROOT && k->parts) {
        shm_copy_bytes((uint8_t *)call->out + at, shm_own_part(set, call, at), bytes);
    }
}

/* ---- arriving ---- */

static inline bool shm_in_line(uint64_t bytes) { return bytes <= SHM_LINE_DATA; }

/* Does the data go on in the second cache line of a shm_line? It is asked for by itself, by who writes and by who reads:
 * all_reduce of 64 B 0.90 of the time, between distant cores 0.83 (EPYC). */
static inline bool shm_fills_pair(uint64_t bytes) {
    return shm_in_line(bytes) && bytes > SHM_LINE - offsetof(shm_line, data);
}

/* May this rank write the line of an operation, and the slot when it needs one: has everybody ended the operation that
 * they served? Usually known from the arrivals of later operations; else the ranks' own words are read, and all that they
 * say is kept: who reads them for each operation waits for their lines each time (broadcast of 512 B: 0.95 of the time; EPYC). */
static inline bool shm_line_free(shm_set *set, uint64_t sequence, uint64_t given) {
    uint64_t ahead = shm_in_line(given) ? SHM_LINES : SHM_SLOTS;
    if (sequence > set->floor + ahead) {
        uint64_t need = sequence - ahead, least = shm_least_count(set, offsetof(shm_face, ended), need, sequence - 1);
        set->floor = least >= need ? least : set->floor;
    }
    return sequence <= set->floor + ahead;
}

/* The data of the arrival must have been written. */
static inline void shm_arrive(shm_set *set, const ddl_native_call *call, uint64_t given) {
    shm_line *line = &set->own->lines[call->sequence % SHM_LINES];
    if (given >= SHM_DISTANT_LEAST) {
        shm_sound(set->t);
    }
    line->signature = call->signature;
    if (set->t->crowded) {
        atomic_store_explicit(&line->core, sched_getcpu(), memory_order_relaxed);
    }
    atomic_store_explicit(&line->sequence, call->sequence, memory_order_release); /* with signature and data */
}

/* What comes next is made ours while the others work: the next line, and its slot after an operation that used one. */
static inline void shm_own_next(const shm_set *set, const ddl_native_call *call, uint64_t given, uint64_t slot_bytes) {
    uint64_t sequence = call->sequence + 1;
    const shm_line *next = &set->own->lines[sequence % SHM_LINES];
    shm_prefetch_write(next);
    if (shm_fills_pair(given)) {
        shm_prefetch_write((const uint8_t *)next + SHM_LINE);
    }
    bool past = set->distant && call->bytes >= SHM_DISTANT_LEAST; /* the caches: see shm_give */
    for (uint64_t i = 0; i < slot_bytes && !past; i += SHM_LINE) {
        shm_prefetch_write(set->own->slots[sequence % SHM_SLOTS] + i);
    }
}

static inline const shm_line *shm_line_of(const shm_set *set, int32_t j, uint64_t sequence) {
    uint64_t at = offsetof(shm_face, lines) + sequence % SHM_LINES * sizeof(shm_line);
    return (const shm_line *)(const void *)(set->pieces[j] + at);
}

/* Asks for the lines of the ranks that are awaited, so that they travel while the core does what follows a start. */
static inline void shm_ask_for_arrivals(const shm_set *set, const shm_op *op) {
    uint64_t sequence = op->call.sequence;
    int32_t until = set->t->crowded ? 0 : op->until; /* most of them were written on this core */
    for (int32_t j = op->awaited; j < until; j++) {
        __builtin_prefetch(shm_line_of(set, j, sequence));
    }
}

/* The first of ranks [lo, hi) but for this one that has not come with this call, or hi. *out_differs: it came with another. */
static inline int32_t shm_first_missing(const shm_set *set, const ddl_native_call *call, uint64_t given, int32_t lo, int32_t hi,
                                        bool *out_differs) {
    uint64_t sequence = call->sequence, signature = call->signature;
    bool pair = shm_fills_pair(given);
    *out_differs = false;
    for (; lo < hi; lo++) {
        const shm_line *line = shm_line_of(set, lo, sequence);
        if (lo == set->rank) {
            continue;
        }
        if (atomic_load_explicit(&line->sequence, memory_order_acquire) != sequence) { /* its data comes with it */
            break;
        }
        if (pair) {
            __builtin_prefetch((const uint8_t *)line + SHM_LINE);
        }
        if (line->signature != signature) {
            *out_differs = true;
            break;
        }
    }
    return lo;
}

/* Two ranks that only give, each in another operation, wait for nobody and would never see the other's signature. One time
 * around in all their lines they look: who comes last sees it, and a signature covers all calls before. */
static inline bool shm_is_compared(uint64_t sequence) { return sequence % SHM_LINES == 0; }

/* The first rank that has come here with another call; -1: none has. */
static int32_t shm_first_differing(const shm_set *set, const ddl_native_call *call) {
    shm_fence(); /* of two that come at once one sees the other */
    for (int32_t j = 0; j < set->count; j++) {
        const shm_line *line = shm_line_of(set, j, call->sequence);
        if (atomic_load_explicit(&line->sequence, memory_order_acquire) == call->sequence &&
            line->signature != call->signature) {
            return j;
        }
    }
    return -1;
}

/* Have ranks awaited .. until - 1 come? A rank that came with another call stops the operation here. */
static inline bool shm_arrived(shm_set *set, shm_op *op) {
    bool differs;
    op->awaited = shm_first_missing(set, &op->call, op->given, op->awaited, op->until, &differs);
    op->differs = differs ? op->awaited : op->differs;
    return op->awaited == op->until;
}

/* Are half of all others, or more, on distant cores? Ranks that share cores change them all the time: there a quarter does. */
static void shm_tell_distant(shm_set *set) {
    int32_t others = set->count - 1, distant = 0;
    for (int32_t j = 0; j < set->count; j++) {
        distant += j != set->rank && set->t->distances[set->peers[j].local].distant;
    }
    set->distant = distant > 0 && (set->t->crowded ? 4 : 2) * distant >= others;
}

/* Ranks [lo, hi) have just arrived: how far is one of them, another in each operation, and no two ranks ask for the same? */
static void shm_look_around(shm_set *set, uint64_t sequence, uint64_t given, int32_t lo, int32_t hi) {
    int32_t others = set->count - 1;
    if (others == 0 || given < SHM_DISTANT_LEAST) {
        return;
    }
    int32_t one = (set->rank + 1 + (int32_t)(sequence % (uint64_t)others)) % set->count;
    if (one >= lo && one < hi) {
        shm_listen(set->t, set->peers[one].local, given, (uint32_t)others);
    }
    shm_tell_distant(set);
}

/* A rank that has not come yet; of several one on this rank's own core, as far as its last arrival tells: nothing comes of
 * that until this core is given away. -1: all have come. */
static int32_t shm_missing(const shm_set *set, const shm_op *op, bool *out_here) {
    uint64_t sequence = op->call.sequence;
    int64_t here = set->t->crowded ? sched_getcpu() : -1;
    *out_here = false;
    for (int32_t j = op->awaited; j < op->until && here >= 0; j++) {
        const shm_line *lines = shm_face_of(set, j)->lines;
        bool came = atomic_load_explicit(&lines[sequence % SHM_LINES].sequence, memory_order_relaxed) == sequence;
        if (j != set->rank && !came &&
            atomic_load_explicit(&lines[(sequence - 1) % SHM_LINES].core, memory_order_relaxed) == here) {
            *out_here = true;
            return j;
        }
    }
    return op->awaited < op->until ? op->awaited : -1;
}

/* What the others may conclude from the end of an operation. Where all wait for all, the next arrival says it. */
static inline void shm_tell_end(shm_set *set, const ddl_native_call *call) {
    if (shm_kind_of(call)->needs == SHM_ALL) {
        set->floor = call->sequence - 1;
    } else {
        shm_publish(set, &set->own->ended, call->sequence);
    }
}

/* ---- the whole operation, when it is small ---- */

/* Where the data of a small operation stands in everybody's piece. */
static inline uint64_t shm_slot_at(uint64_t sequence, uint64_t bytes) {
    return shm_in_line(bytes)
               ? offsetof(shm_face, lines) + sequence % SHM_LINES * sizeof(shm_line) + offsetof(shm_line, data)
               : offsetof(shm_face, slots) + sequence % SHM_SLOTS * SHM_SLOT_BYTES;
}

/* From ranks [lo, hi), who have come. */
static inline void shm_small_take(shm_set *set, const ddl_native_call *call, uint64_t given, int32_t lo, int32_t hi) {
    shm_get(set, call, set->pieces, shm_slot_at(call->sequence, given), call->bytes, 0, call->bytes);
    if (given >= SHM_DISTANT_LEAST) {
        shm_look_around(set, call->sequence, given, lo, hi); /* for those that follow */
    }
    shm_tell_end(set, call);
}

static int shm_small_step(shm_set *set, shm_op *op) {
    int32_t lo, hi;
    if (!shm_arrived(set, op)) {
        return SHM_STUCK;
    }
    shm_needed(set, &op->call, &lo, &hi);
    shm_small_take(set, &op->call, op->given, lo, hi);
    return SHM_ENDED;
}

static inline void shm_small_show(shm_set *set, const ddl_native_call *call, uint64_t given) {
    if (shm_gives(set, call)) {
        shm_give(set, call, shm_own_piece(set) + shm_slot_at(call->sequence, given), 0, call->bytes);
    }
    shm_arrive(set, call, given);
    shm_wake_others(set);
    shm_own_next(set, call, given, shm_in_line(given) ? 0 : given);
}

/* What this rank gives has been shown. */
static inline void shm_small_await(shm_set *set, shm_op *op) {
    shm_needed(set, &op->call, &op->awaited, &op->until);
    op->awaited += op->awaited == set->rank && op->awaited < op->until; /* for itself nobody waits */
    if (op->awaited == op->until && shm_is_compared(op->call.sequence)) {
        op->differs = shm_first_differing(set, &op->call);
    }
    op->step = shm_small_step;
    shm_ask_for_arrivals(set, op);
}

/* The whole of a broadcast, reduce or gather, before which nothing is queued, for a rank that need not wait: it only gives, or
 * all have given. False: it must wait, or see whether others call the same; nothing has been done, and it is begun like any
 * other. */
static inline bool shm_small_now(shm_set *set, const ddl_native_call *call) {
    shm_kind k = shm_kinds[call->kind];
    bool is_root = call->root == set->rank, rooted = k.needs == SHM_FROM_ROOT || k.needs == SHM_TO_ROOT, differs;
    uint64_t bytes = call->bytes;
    if (!rooted || k.parts || bytes > set->small_most || shm_is_compared(call->sequence) || !shm_line_free(set, call->sequence, bytes)) {
        return false;
    }
    if (is_root == (k.needs == SHM_FROM_ROOT)) {
        shm_copy_for(shm_own_piece(set) + shm_slot_at(call->sequence, bytes), call->in, bytes, set->distant);
        shm_arrive(set, call, bytes);
        shm_tell_end(set, call);
        if (bytes >= SHM_DISTANT_LEAST) {
            shm_tell_distant(set); /* of this rank's readers other operations may have told */
        }
    } else {
        int32_t lo = is_root ? 0 : call->root, hi = is_root ? set->count : lo + 1;
        if (shm_first_missing(set, call, bytes, lo, hi, &differs) < hi) {
            return false;
        }
        shm_arrive(set, call, bytes);
        shm_small_take(set, call, bytes, lo, hi);
    }
    shm_own_next(set, call, bytes, shm_in_line(bytes) ? 0 : bytes);
    return true;
}

#endif /* SHM_NATIVE_SMALL_H */

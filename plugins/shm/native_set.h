/* native_set: a set of ranks that run collectives by load and store, and what each of them shows to the others: a piece
 * of its own staging, found through its directory. Every word has one writer, the rank whose piece it is in; nobody
 * writes into the piece of another. It must not know any collective.
 *
 *     ended, posted, reduced, taken   counters that only grow, a cache line pair each; a reader waits for "at least"
 *     cancelled                       this rank has given an operation up: what it showed may not be believed any more
 *     pairs                           the same for one other rank: native_exchange.h
 *     lines                           arrivals, by sequence modulo SHM_LINES; up to 104 bytes of data with them
 *     slots                           up to 8 KiB of data that came with a line, by sequence modulo SHM_SLOTS
 *     ring                            larger data, by position modulo its size (native_bulk.h); or in rooms
 *
 * A piece is dealt out anew when every other rank of the set has left it too, or is dead: a rank that was stopped in
 * the middle of an operation reads it when it goes on, and must find what stood there. */
#ifndef SHM_NATIVE_SET_H
#define SHM_NATIVE_SET_H

#include "segment.h"

#include "copy.h"
#include "doorbell.h"

#include "memory.h"

/* Operations that a rank may be ahead of another, in kinds where it need not wait. Not few: who must wait where ranks
 * share cores gives its core away. */
#define SHM_LINES 128
#define SHM_SLOTS 8 /* the same, of data that no line holds */
#define SHM_LINE_DATA 104
#define SHM_SLOT_BYTES 8192 /* rounds cost switches where ranks share cores: 8 KiB of 4 ranks 11 us, or 5 in a slot */
#define SHM_PIECES 8        /* that staging is cut into; one is 128 KiB at least */
#define SHM_PIECE_LEAST (128u << 10)
#define SHM_OPS 16          /* that a set has ready; more are allocated when more are queued at once */
#define SHM_EXCHANGE_RANKS 16 /* more go in rounds */
#define SHM_PAIR 128        /* cache lines are fetched in pairs */

typedef struct shm_count {
    _Alignas(SHM_PAIR) _Atomic uint64_t value;
} shm_count;

typedef struct shm_line {
    _Alignas(SHM_PAIR) _Atomic uint64_t sequence; /* written last */
    uint64_t signature;
    _Atomic int64_t core; /* on which the rank was when it wrote this line; said while ranks share cores */
    uint8_t data[SHM_LINE_DATA];
} shm_line;

/* What a rank says to one other in an exchange: bytes in all, and never modulo. */
typedef struct shm_pair {
    _Alignas(SHM_PAIR) _Atomic uint64_t sent;
    _Atomic uint64_t got;
} shm_pair;

/* How far this rank is with one other in an exchange: what it has said in shm_pair, where no peer can write over it. */
typedef struct shm_room {
    uint64_t sent, got;
} shm_room;

typedef struct shm_face {
    shm_count ended;   /* operations, by sequence; written in kinds where some need not wait for all */
    shm_count posted;  /* positions of the ring, counted since the set began and never modulo */
    shm_count reduced;
    shm_count taken;
    _Alignas(SHM_PAIR) _Atomic uint32_t cancelled;
    shm_pair pairs[SHM_EXCHANGE_RANKS];
    shm_line lines[SHM_LINES];
    _Alignas(SHM_PAIR) uint8_t slots[SHM_SLOTS][SHM_SLOT_BYTES];
} shm_face;

#define SHM_RING_AT ((sizeof(shm_face) + SHM_PAGE - 1) / SHM_PAGE * SHM_PAGE) /* in a piece */

struct shm_set;
struct shm_op;
enum { SHM_STUCK, SHM_MOVED, SHM_ENDED };                         /* what came of a look */
typedef int (*shm_step)(struct shm_set *set, struct shm_op *op);

/* Where a rank stands in the walk over its data. */
typedef struct shm_walk {
    uint64_t at;       /* in the tensor, or in each part of it */
    uint64_t position; /* in the ring */
} shm_walk;

typedef struct shm_op {
    ddl_native_call call;
    struct shm_op *next;
    shm_step step;          /* NULL: not begun */
    uint64_t given;         /* bytes that a rank gives in all */
    int32_t awaited, until; /* arrivals of ranks awaited .. until - 1 are to be seen */
    int32_t differs;        /* this rank called something else, -1: none */
    ddl_status failure;
    bool ended;
    bool offered;  /* others may write into out */
    bool laid_out; /* its rounds are, and some may be posted, before others have come */
    /* larger operations: native_bulk.h, native_direct.h */
    uint64_t chunk, stride; /* bytes of a round: of the tensor (or of a part), and in the ring */
    uint64_t part;          /* of this rank, where each has one; of the ring, in an exchange */
    uint64_t end;           /* position after the last round */
    uint64_t head, tail;    /* of a result that is written directly: see shm_edges */
    shm_walk post, reduce, take;
} shm_op;

typedef struct shm_member {
    const uint8_t *in; /* of the operation that runs, when it is direct */
    uint8_t *out;
    _Atomic uint32_t *sleeping;
    int32_t local;
} shm_member;

typedef struct shm_set {
    shm *t;
    struct shm_set *next;
    uint64_t group;
    int32_t count, rank;
    int32_t entry, piece; /* in the directory, in staging */
    bool found;           /* the pieces of all */
    bool cancelled, left;
    bool distant;         /* those who read what this rank writes: distance.h */
    uint64_t small_most; /* bytes that a rank gives in an operation by slots */
    uint64_t ring_bytes;
    uint64_t floor;    /* every rank has ended all operations up to this one */
    shm_room rooms[SHM_EXCHANGE_RANKS];
    uint64_t exchanged; /* bytes of each rank for each other one, in the exchanges that are over */
    uint64_t position; /* of the ring, where the next large operation begins */
    uint64_t sees;     /* of the arenas of all others: native_direct.h */
    uint64_t needed;   /* to see what was last offered */
    uint64_t unseen;   /* this much could not be mapped; UINT64_MAX: all could */
    uint32_t waited;   /* operations since then that would have needed it */
    shm_face *own;
    shm_op *head, **tail, *spare;
    const void **sources; /* for call.reduce */
    const uint8_t **pieces; /* of all ranks, as seen from here; NULL: not found yet */
    const uint8_t **views;  /* of their inputs, in a direct operation */
    shm_op ops[SHM_OPS];
    shm_member peers[];
} shm_set;

typedef struct shm_natives {
    shm_set *sets;
    uint32_t pieces; /* a bit for each that is in use */
    uint8_t dead[SHM_LOCAL_MAX];
} shm_natives;

static const shm_face *shm_face_of(const shm_set *set, int32_t j) { return (const shm_face *)(const void *)set->pieces[j]; }
static uint8_t *shm_own_piece(const shm_set *set) { return (uint8_t *)set->own; }

static uint64_t shm_piece_bytes(const shm *t) {
    uint64_t bytes = t->staging_bytes / SHM_PIECES / SHM_PAGE * SHM_PAGE;
    return bytes < SHM_PIECE_LEAST ? SHM_PIECE_LEAST : bytes;
}

/* ---- seen by the others ---- */

/* After a word that others wait for was written. One fence for all (see shm_wake). */
static inline void shm_wake_others(shm_set *set) {
#ifndef SHM_TSAN
    shm_waker_fence(set->t);
#endif
    const shm_member *own = &set->peers[set->rank], *end = set->peers + set->count;
    for (const shm_member *peer = set->peers; peer < end; peer++) {
#ifndef SHM_TSAN
        if (atomic_load_explicit(peer->sleeping, memory_order_relaxed) == 0) { /* ordered by the fence */
            continue;
        }
#endif
        if (peer != own) {
            shm_wake(set->t, peer->local);
        }
    }
}

/* Release: whoever sees the value sees what was written before. */
static inline void shm_count_to(shm_count *count, uint64_t value) {
    atomic_store_explicit(&count->value, value, memory_order_release);
}

static inline void shm_publish(shm_set *set, shm_count *count, uint64_t value) {
    shm_count_to(count, value);
    shm_wake_others(set);
}

/* Has every rank of [lo, hi) counted up to value? Acquire: then what they wrote before is seen. */
static inline bool shm_all_counted(const shm_set *set, size_t which, int32_t lo, int32_t hi, uint64_t value) {
    for (int32_t j = lo; j < hi; j++) {
        const shm_count *count = (const shm_count *)(const void *)(set->pieces[j] + which);
        if (j != set->rank && atomic_load_explicit(&count->value, memory_order_acquire) < value) {
            return false;
        }
    }
    return true;
}

/* What every other rank has counted up to, `most` at most; less than `need`: not all have come to that. Acquire, as above. */
static inline uint64_t shm_least_count(const shm_set *set, size_t which, uint64_t need, uint64_t most) {
    uint64_t least = most;
    for (int32_t j = 0; j < set->count && least >= need; j++) {
        const shm_count *count = (const shm_count *)(const void *)(set->pieces[j] + which);
        uint64_t value = j != set->rank ? atomic_load_explicit(&count->value, memory_order_acquire) : most;
        least = value < least ? value : least;
    }
    return least;
}

/* Has any rank given up? The fence pairs with that of shm_native_cancel: what was read before this look stood there while
 * the operation still ran. */
static bool shm_any_cancelled(const shm_set *set) {
    atomic_thread_fence(memory_order_acquire); /* the loads of data come first */
    for (int32_t j = 0; j < set->count; j++) {
        if (atomic_load_explicit(&shm_face_of(set, j)->cancelled, memory_order_acquire) != 0) {
            return true;
        }
    }
    return false;
}

/* ---- the directory ---- */

/* The last bit of bytes: the rank has left the set. It can be found all the same, by ranks that have not read what it
 * gave to their common operations. */
#define SHM_LEFT 1u

/* Acquire: what it wrote into its piece before. */
static shm_directory_entry *shm_entry_of(const shm *t, int32_t local, uint64_t group) {
    shm_directory_entry *sets = shm_control(t, local)->sets;
    for (int32_t k = 0; k < SHM_SETS; k++) {
        if (atomic_load_explicit(&sets[k].group, memory_order_acquire) == group) {
            return &sets[k];
        }
    }
    return NULL;
}

/* The piece of a member, NULL while it has none. What it says is checked: it must lie in its own staging. */
static const uint8_t *shm_find_piece(const shm *t, int32_t local, uint64_t group) {
    const shm_directory_entry *e = shm_entry_of(t, local, group);
    if (e == NULL || (atomic_load_explicit(&e->bytes, memory_order_relaxed) & ~(uint64_t)SHM_LEFT) != shm_piece_bytes(t)) {
        return NULL;
    }
    uint64_t offset = atomic_load_explicit(&e->offset, memory_order_relaxed) - shm_staging_offset(t, local);
    bool fits = offset <= t->staging_bytes - shm_piece_bytes(t) && offset % SHM_PAGE == 0;
    return fits ? shm_staging(t, local) + offset : NULL;
}

/* Looks for those that are not found yet. The core starts no operation before all have opened. */
static bool shm_find_all(shm_set *set) {
    for (int32_t j = 0; j < set->count; j++) {
        if (set->pieces[j] == NULL) {
            set->pieces[j] = shm_find_piece(set->t, set->peers[j].local, set->group);
        }
        if (set->pieces[j] == NULL) {
            return false;
        }
        madvise((void *)(uintptr_t)set->pieces[j], (size_t)shm_piece_bytes(set->t), MADV_POPULATE_READ);
    }
    set->found = true;
    return true;
}

/* ---- pieces ---- */

static bool shm_has_left(const shm_set *set, int32_t j) {
    const shm *t = set->t;
    int32_t local = set->peers[j].local;
    const shm_directory_entry *e = shm_entry_of(t, local, set->group);
    return j == set->rank || t->natives->dead[local] || e == NULL ||
           (atomic_load_explicit(&e->bytes, memory_order_acquire) & SHM_LEFT) != 0; /* it has read its last of ours */
}

static void shm_set_free(shm_set *set) {
    const ddl_host *host = set->t->host;
    host->free(host, set->sources);
    host->free(host, set->pieces);
    host->free(host, set->views);
    host->free(host, set);
}

/* Frees the sets that everybody has left, with their pieces. */
static void shm_reclaim(shm *t) {
    for (shm_set **at = &t->natives->sets; *at != NULL;) {
        shm_set *set = *at;
        int32_t j = 0;
        while (set->left && j < set->count && shm_has_left(set, j)) {
            j++;
        }
        if (j < set->count) {
            at = &set->next;
            continue;
        }
        shm_directory_entry *e = &shm_control(t, t->local_index)->sets[set->entry];
        atomic_store_explicit(&e->group, 0, memory_order_relaxed); /* nobody looks for it any more */
        t->natives->pieces &= ~(1u << set->piece);
        shm_withdrawn_free(t, set);
        *at = set->next;
        shm_set_free(set);
    }
}

/* A piece of staging that nobody uses, and an entry to publish it with. A group that is still being left has one. */
static bool shm_piece_deal(shm_set *set) {
    shm *t = set->t;
    uint64_t bytes = shm_piece_bytes(t);
    int32_t pieces = (int32_t)(t->staging_bytes / bytes);
    pieces = pieces < SHM_PIECES ? pieces : SHM_PIECES;
    set->piece = set->entry = 0;
    while (set->piece < pieces && (t->natives->pieces >> set->piece & 1u) != 0) {
        set->piece++;
    }
    shm_directory_entry *sets = shm_control(t, t->local_index)->sets;
    while (set->entry < SHM_SETS && atomic_load_explicit(&sets[set->entry].group, memory_order_relaxed) != 0) {
        set->entry++; /* relaxed: our own words */
    }
    uint64_t offset = shm_staging_offset(t, t->local_index) + (uint64_t)set->piece * bytes;
    if (set->piece == pieces || set->entry == SHM_SETS || shm_entry_of(t, t->local_index, set->group) != NULL ||
        shm_commit(t, offset, bytes) != DDL_OK) {
        return false;
    }
    set->own = (shm_face *)(void *)(t->base + offset);
    madvise(set->own, (size_t)bytes, MADV_POPULATE_WRITE); /* by the owner, and not in the first operation */
    memset(set->own, 0, sizeof *set->own);
    return true;
}

static void shm_piece_show(shm_set *set) {
    shm *t = set->t;
    shm_directory_entry *e = &shm_control(t, t->local_index)->sets[set->entry];
    uint64_t offset = (uint64_t)((uint8_t *)set->own - t->base);
    t->natives->pieces |= 1u << set->piece;
    atomic_store_explicit(&e->offset, offset, memory_order_relaxed); /* published by group */
    atomic_store_explicit(&e->bytes, shm_piece_bytes(t), memory_order_relaxed);
    atomic_store_explicit(&e->group, set->group, memory_order_release); /* with the cleared face */
}

/* ---- open and close ---- */

static bool shm_set_peers(shm_set *set, const int32_t *ranks) {
    const shm *t = set->t;
    for (int32_t j = 0; j < set->count; j++) {
        int32_t local = ranks[j] >= 0 && ranks[j] < t->world_size ? t->index_of[ranks[j]] : -1;
        if (local < 0 || shm_state(t, local) != SHM_IN) {
            return false;
        }
        set->peers[j].local = local;
        set->peers[j].sleeping = &shm_control(t, local)->sleeping;
    }
    return set->rank >= 0 && set->rank < set->count && set->peers[set->rank].local == t->local_index;
}

static shm_set *shm_set_make(shm *t, uint64_t group, const int32_t *ranks, int32_t count, int32_t rank) {
    shm_set *set = shm_zalloc(t, sizeof *set + (size_t)count * sizeof set->peers[0]);
    if (set == NULL) {
        return NULL;
    }
    set->t = t;
    set->group = group + 1; /* 0 says: no entry */
    set->count = count;
    set->rank = rank;
    set->tail = &set->head;
    set->unseen = UINT64_MAX;
    /* From three ranks with a core each on, as much as half a slot; see shm_splits. */
    set->small_most = count > 2 && !t->crowded ? SHM_SLOT_BYTES / 2 : SHM_SLOT_BYTES;
    set->ring_bytes = (shm_piece_bytes(t) - SHM_RING_AT) / SHM_PAIR * SHM_PAIR;
    set->sources = shm_zalloc(t, (size_t)count * sizeof *set->sources);
    set->pieces = shm_zalloc(t, (size_t)count * sizeof *set->pieces);
    set->views = shm_zalloc(t, (size_t)count * sizeof *set->views);
    for (int32_t k = 0; k < SHM_OPS; k++) {
        set->ops[k].next = set->spare;
        set->spare = &set->ops[k];
    }
    if (set->sources == NULL || set->pieces == NULL || set->views == NULL || !shm_set_peers(set, ranks) ||
        !shm_piece_deal(set)) {
        shm_set_free(set);
        return NULL;
    }
    return set;
}

static ddl_status shm_native_open(void *self, uint64_t group, const int32_t *ranks, int32_t count, int32_t rank,
                                  void **out_set) {
    shm *t = self;
    if (t->stage != SHM_JOINED || count < 1 || count > t->local_count) {
        return DDL_ERR_UNSUPPORTED;
    }
    t->natives = t->natives == NULL ? shm_zalloc(t, sizeof *t->natives) : t->natives;
    if (t->natives == NULL) {
        return DDL_ERR_NOMEM;
    }
    shm_reclaim(t);
    shm_set *set = shm_set_make(t, group, ranks, count, rank);
    if (set == NULL) {
        return DDL_ERR_UNSUPPORTED;
    }
    shm_piece_show(set);
    set->next = t->natives->sets;
    t->natives->sets = set;
    *out_set = set;
    return DDL_OK;
}

/* Release: this rank reads nothing of the others' pieces any more. */
static void shm_set_leave(shm_set *set) {
    shm_directory_entry *e = &shm_control(set->t, set->t->local_index)->sets[set->entry];
    set->left = true;
    atomic_store_explicit(&e->bytes, shm_piece_bytes(set->t) | SHM_LEFT, memory_order_release);
}

#endif /* SHM_NATIVE_SET_H */

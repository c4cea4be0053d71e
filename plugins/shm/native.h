/* native: the operations of a set, one after another in the order of their start, and the functions that the core calls.
 * Only the first of a set moves; whoever looks at any of them moves that one. The parts: native_set.h (who, and where),
 * native_small.h (what each kind is; small data), native_bulk.h (larger), native_exchange.h (larger all_to_all where ranks
 * share cores), native_direct.h (memory that all see). */
#ifndef SHM_NATIVE_H
#define SHM_NATIVE_H

#include "copy.h"
#include "native_direct.h"
#include "native_exchange.h"

/* What progress does for one set before it turns to the next. */
#define SHM_STEPS 8

#define SHM_LOOKS_CROWDED 4  /* before it is asked whether a rank that is missing needs this core */

/* ---- beginning an operation ---- */

static bool shm_is_small(const shm_set *set, const shm_op *op) { return op->given <= set->small_most; }

static bool shm_staged_lay_out(shm_set *set, shm_op *op) {
    uint64_t parts = shm_kind_of(&op->call)->parts ? (uint64_t)set->count : 1;
    if (shm_exchanges(set, op)) {
        shm_exchange_lay_out(set, op);
        return true; /* shm_native_cost_ns has looked */
    }
    return shm_splits(set, op) ? shm_split_lay_out(set, op)
                               : shm_lay_out(set, op, op->call.bytes, parts, shm_whole_aim(set, op));
}

/* All have arrived with the same call: how it is done follows from what all of them see. */
static int shm_bulk_arrive_step(shm_set *set, shm_op *op) {
    if (op->failure != DDL_OK || !shm_arrived(set, op)) {
        return SHM_STUCK;
    }
    shm_look_around(set, op->call.sequence, op->given, 0, set->count);
    if (shm_is_direct(set, op)) {
        shm_direct_begin(set, op);
        return SHM_MOVED;
    }
    if (!op->laid_out) {
        shm_staged_lay_out(set, op);
    }
    op->offered = false;
    if (shm_exchanges(set, op)) {
        op->step = shm_exchange_step;
    } else if (shm_splits(set, op)) {
        shm_split_begin(set, op);
    } else {
        shm_whole_begin(set, op);
    }
    return SHM_MOVED;
}

static bool shm_staged_post(shm_set *set, shm_op *op) {
    if (shm_exchanges(set, op)) {
        return shm_exchange_post(set, op);
    }
    return shm_splits(set, op) ? shm_split_post(set, op) : shm_gives(set, &op->call) && shm_post_chunk(set, op);
}

/* A rank that cannot offer what all would have to knows before anybody has come that it goes through the rings, and posts
 * before it arrives: where ranks share cores as much as fits, which saves each of them a turn. 4 ranks on 2 cores of one
 * cache: all_reduce of 16 and 32 KiB 18.1 -> 11.4 and 24.1 -> 18.1 us, all_to_all of 32 KiB 17.7 -> 12.1 (EPYC). */
static void shm_bulk_begin(shm_set *set, shm_op *op) {
    memset(set->rooms, 0, sizeof set->rooms);
    op->laid_out = !shm_make_offer(set, op);
    if (op->laid_out) {
        shm_tell_distant(set);
        shm_staged_lay_out(set, op); /* it fits: shm_native_start has looked */
        while (shm_staged_post(set, op) && set->t->crowded) {
        }
    }
    op->awaited = 0;
    op->until = set->count;
    op->step = shm_bulk_arrive_step;
    shm_arrive(set, &op->call, op->given);
    shm_wake_others(set);
    shm_own_next(set, &op->call, op->given, 0);
}

static inline bool shm_begin(shm_set *set, shm_op *op) {
    if ((!set->found && !shm_find_all(set)) || !shm_line_free(set, op->call.sequence, op->given)) {
        return false;
    }
    if (shm_is_small(set, op)) {
        shm_small_show(set, &op->call, op->given);
        shm_small_await(set, op);
    } else {
        shm_bulk_begin(set, op);
    }
    return true;
}

/* ---- the queue ---- */

/* It goes no further, and the core is to hear why (shm_native_test). */
static inline bool shm_op_failed(const shm_op *op) { return op->differs >= 0 || op->failure != DDL_OK; }

/* Moves the first operation. SHM_ENDED: the next one is first now. */
static inline int shm_advance(shm_set *set) {
    shm_op *op = set->head;
    if (set->cancelled || op->differs >= 0) {
        return SHM_STUCK;
    }
    if (op->step == NULL) {
        return shm_begin(set, op) ? SHM_MOVED : SHM_STUCK;
    }
    int what = op->step(set, op);
    if (what == SHM_ENDED) {
        op->ended = true;
        set->head = op->next;
        set->tail = set->head == NULL ? &set->head : set->tail;
    }
    return what;
}

static shm_op *shm_op_new(shm_set *set) {
    shm_op *op = set->spare;
    if (op == NULL) {
        return shm_zalloc(set->t, sizeof *op);
    }
    set->spare = op->next;
    return op;
}

/* What was allocated beyond the set's own is kept too: it ends with the set. */
static inline void shm_op_give_back(shm_set *set, shm_op *op) {
    op->next = set->spare;
    set->spare = op;
}

static void shm_ops_free(shm_set *set) {
    while (set->spare != NULL) {
        shm_op *op = set->spare;
        set->spare = op->next;
        if (op < set->ops || op >= set->ops + SHM_OPS) {
            set->t->host->free(set->t->host, op);
        }
    }
}

/* ---- for the core ---- */

/* Is there room in the rings for at least a cache line of each rank? Else shm_lay_out may find none for an element. */
static bool shm_has_room(const shm_set *set) { return set->ring_bytes / 2 / (uint64_t)set->count >= SHM_PAIR; }

/* About how long one takes. Only that it is not 0 matters today: a formula, not fitted to measurements. */
static uint64_t shm_native_cost_ns(void *self, void *set_, int32_t kind, uint64_t bytes) {
    const shm_set *set = set_;
    (void)self;
    bool known = kind >= DDL_BARRIER && kind <= DDL_EXSCAN;
    uint64_t ranks = (uint64_t)set->count, all = known && shm_kinds[kind].parts ? bytes * ranks : bytes;
    if (!known || (all > set->small_most && !shm_has_room(set))) {
        return 0;
    }
    return 100 + 40 * ranks + (all <= set->small_most ? all * ranks / 20 : 1000 + all * ranks / 12);
}

/* What an operation needs of a call, which an older program's has too. The core has just written some of its words: those one
 * by one. */
static inline void shm_call_copy(ddl_native_call *to, const ddl_native_call *call) {
    size_t fresh = offsetof(ddl_native_call, sequence), rest = offsetof(ddl_native_call, bytes);
    memcpy(to, call, fresh);
    *(volatile uint64_t *)&to->sequence = call->sequence; /* volatile, or the compiler makes wide ones of them */
    *(volatile uint64_t *)&to->signature = call->signature;
    *(const void *volatile *)&to->in = call->in;
    *(void *volatile *)&to->out = call->out;
    memcpy((uint8_t *)to + rest, (const uint8_t *)call + rest, offsetof(ddl_native_call, dtype) - rest);
}

/* What is small is shown before all else, where nothing is before it: others may be waiting for it. What does not fit is not
 * asked for: see shm_native_cost_ns. */
static ddl_status shm_native_queue(shm_set *set, const ddl_native_call *call, void **out_op) {
    shm_op *op = shm_op_new(set);
    if (op == NULL) {
        return DDL_ERR_NOMEM;
    }
    uint64_t given = shm_given_bytes(set, call);
    bool shown = set->head == NULL && set->found && given <= set->small_most && shm_line_free(set, call->sequence, given);
    if (shown) {
        shm_small_show(set, call, given);
    }
    shm_call_copy(&op->call, call);
    op->given = given;
    op->step = NULL;
    op->next = NULL;
    op->awaited = op->until = 0;
    op->differs = -1;
    op->failure = DDL_OK;
    op->ended = op->offered = false;
    if (shown) {
        shm_small_await(set, op);
    } else if (!shm_is_small(set, op) && !shm_staged_lay_out(set, op)) {
        shm_op_give_back(set, op);
        return DDL_ERR_UNSUPPORTED;
    }
    *set->tail = op;
    set->tail = &op->next;
    if (set->head == op && !shown) {
        shm_advance(set);
    }
    *out_op = op;
    return DDL_OK;
}

static ddl_status shm_native_start(void *self, void *set_, const ddl_native_call *call, void **out_op) {
    shm_set *set = set_;
    (void)self;
    if (call->kind < DDL_BARRIER || call->kind > DDL_EXSCAN || set->cancelled) {
        return DDL_ERR_UNSUPPORTED;
    }
    bool says = call->size >= offsetof(ddl_native_call, at_once) + sizeof call->at_once; /* an older program's is smaller */
    if (says && call->at_once && set->head == NULL && set->found && shm_small_now(set, call)) {
        *out_op = NULL;
        return DDL_OK;
    }
    return shm_native_queue(set, call, out_op);
}

static ddl_status shm_native_test(void *self, void *set_, void *op_, int32_t looks, int32_t *out_rank) {
    shm_set *set = set_;
    shm_op *op = op_;
    (void)self;
    for (int32_t k = 1; !op->ended; k++) {
        if (shm_advance(set) == SHM_STUCK && shm_op_failed(op)) {
            *out_rank = op->differs;
            return op->differs >= 0 ? DDL_ERR_MISMATCH : op->failure;
        }
        bool last = k >= looks, here = false;
        if (!op->ended && (last || (k == SHM_LOOKS_CROWDED && set->t->crowded))) {
            int32_t missing = shm_missing(set, op, &here);
            if (last || here || missing < 0) { /* those who have all come share the work of a larger one */
                *out_rank = missing;
                return DDL_IN_PROGRESS;
            }
        }
    }
    shm_op_give_back(set, op);
    return DDL_OK;
}

static void shm_unqueue(shm_set *set, const shm_op *op) {
    shm_op **at = &set->head;
    while (*at != NULL && *at != op) {
        at = &(*at)->next;
    }
    if (*at != NULL) {
        *at = op->next;
        set->tail = op->next == NULL ? at : set->tail;
    }
}

/* Others may still write to whole pages of `out`: from now on those are no longer ours. */
static void shm_take_pages_away(shm_set *set, const shm_op *op) {
    uint64_t page = shm_page(set), from = (uint64_t)(uintptr_t)op->call.out;
    uint64_t first = shm_round_to(from, page), last = (from + op->call.bytes) / page * page;
    if (first < last && shm_withdraw(set->t, (void *)(uintptr_t)first, last - first, set) != DDL_OK) {
        shm_log(set->t, DDL_LOG_WARN,
                "no memory to move %" PRIu64 " bytes of a tensor away from ranks that may still write to them", last - first);
    }
}

/* The fence: the flag is seen by whoever sees anything that is written to the buffers after this call: it looks for it
 * at last (shm_any_cancelled). */
static void shm_native_cancel(void *self, void *set_, void *op_) {
    shm_set *set = set_;
    shm_op *op = op_;
    (void)self;
    set->cancelled = true;
    atomic_store_explicit(&set->own->cancelled, 1, memory_order_release);
    shm_fence();
    if (op->offered && !op->ended && op->step != NULL) {
        shm_take_pages_away(set, op);
    }
    shm_unqueue(set, op);
    shm_op_give_back(set, op);
}

static void shm_native_close(void *self, void *set) {
    shm_ops_free(set);
    shm_set_leave(set);
    shm_reclaim(self);
}

/* ---- for the endpoint ---- */

/* Moves the first operation of each set along. Returns how many events there were; a failure is one until the core has
 * heard of it. */
static int32_t shm_natives_progress(shm *t) {
    int32_t events = 0;
    for (shm_set *set = t->natives == NULL ? NULL : t->natives->sets; set != NULL; set = set->next) {
        for (int32_t k = 0; k < SHM_STEPS && set->head != NULL && shm_advance(set) != SHM_STUCK; k++) {
            events++;
        }
        events += set->head != NULL && shm_op_failed(set->head);
    }
    return events;
}

static void shm_natives_peer_dead(shm *t, int32_t local) {
    if (t->natives != NULL) {
        t->natives->dead[local] = 1;
        shm_reclaim(t);
    }
}

/* The others go on reading what this rank gave; the segment lives as long as they map it. */
static void shm_natives_close(shm *t) {
    while (t->natives != NULL && t->natives->sets != NULL) {
        shm_set *set = t->natives->sets;
        t->natives->sets = set->next;
        if (!set->left) {
            shm_ops_free(set);
            shm_set_leave(set);
        }
        shm_set_free(set);
    }
    t->host->free(t->host, t->natives);
    t->natives = NULL;
}

#endif /* SHM_NATIVE_H */

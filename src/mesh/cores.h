/* mesh: which core each rank of this host waits on, and moving apart those that share one. Two ranks that answer each
 * other at once, each yielding to the other, stay on one core for seconds: the kernel sees a core where all get their
 * turn. Ranks say on the shared board where they wait; who finds too many on its core moves itself, and only itself. It
 * must not know what is waited for. */
#ifndef DDL_MESH_CORES_H
#define DDL_MESH_CORES_H

#include "board.h"

#include <sched.h>

enum {
    DDL__PLACE_PINNED = 1 << 16, /* of a place: the program allows that thread one core alone */
    DDL__PLACE_LEFT = 1 << 17, /* it waits no more: it computes */
    DDL__PLACE_CORE = (1 << 16) - 1,
    DDL__PLACE_STAMP_SHIFT = 18,
    DDL__PLACE_FRESH = 50,       /* milliseconds (of 2^20 ns) that a place is believed */
    DDL__CROWD_LOOKS = 2         /* in a row must find it too full: wake-ups share a core for a moment */
};

#define DDL__PLACE_LOOK_NS DDL__NS_PER_MS
/* From one move of a rank to its next; twice as long each time, up to the second, when the kernel undoes it: on a busy
 * machine it has its reasons. */
#define DDL__MOVE_NS (10 * DDL__NS_PER_MS)
#define DDL__MOVE_NS_MAX (640 * DDL__NS_PER_MS)

/* A place in one word, so that it is read whole: core + 1, whether pinned, and when; DDL__PLACE_LEFT. 0: nowhere. */
static inline uint64_t ddl__place_make(int32_t core, bool pinned, uint64_t now_ns) {
    return (now_ns >> 20) << DDL__PLACE_STAMP_SHIFT | (pinned ? (uint64_t)DDL__PLACE_PINNED : 0) |
           (uint64_t)(core + 1);
}

/* The core of a place, if it is one of `allowed` and said of late; else -1. */
static int32_t ddl__place_core(uint64_t place, uint64_t now_ns, const cpu_set_t *allowed) {
    int32_t core = (int32_t)(place & DDL__PLACE_CORE) - 1;
    int64_t age = (int64_t)((now_ns >> 20) - (place >> DDL__PLACE_STAMP_SHIFT));
    bool fresh = age <= DDL__PLACE_FRESH && age >= -DDL__PLACE_FRESH;
    return fresh && core >= 0 && core < CPU_SETSIZE && CPU_ISSET((size_t)core, allowed) ? core : -1;
}

/* Where rank `me` should go: a core of `allowed`, or -1: it stays. A core is too full when another has at least two
 * fewer; the highest rank on it that is not pinned goes, to the core with the fewest; of several the nearest by number.
 * Ranks that wait elsewhere, or have not said so of late, do not count; those that computed since do. */
static int32_t ddl__cores_choose(const _Atomic uint64_t *places, int32_t count, int32_t me, uint64_t now_ns,
                                 const cpu_set_t *allowed) {
    uint16_t load[CPU_SETSIZE] = {0};
    int32_t here = ddl__place_core(atomic_load_explicit(&places[me], memory_order_relaxed), now_ns, allowed);
    int32_t best = here;
    if (here < 0) {
        return -1;
    }
    for (int32_t i = 0; i < count; i++) { /* relaxed: a hint, and each word is whole */
        uint64_t place = atomic_load_explicit(&places[i], memory_order_relaxed);
        int32_t core = ddl__place_core(place, now_ns, allowed);
        if (core == here && i > me && (place & DDL__PLACE_PINNED) == 0) {
            return -1; /* that one's turn */
        }
        if (core >= 0 && load[core] < UINT16_MAX) {
            load[core]++;
        }
    }
    for (int32_t core = 0; core < CPU_SETSIZE && load[here] > 1; core++) {
        bool nearer = abs(core - here) < abs(best - here);
        if (CPU_ISSET((size_t)core, allowed) && (load[core] < load[best] || (load[core] == load[best] && nearer))) {
            best = core;
        }
    }
    return load[best] + 1 < load[here] ? best : -1;
}

/* Moves the calling thread, and leaves it as free as it was: from there the kernel may take it anywhere. */
static bool ddl__cores_move(int32_t core, const cpu_set_t *allowed) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET((size_t)core, &one);
    if (sched_setaffinity(0, sizeof one, &one) != 0) {
        return false;
    }
    if (sched_setaffinity(0, sizeof *allowed, allowed) != 0) { /* all of them were taken from us in between */
        memset(&one, 0xff, sizeof one);
        sched_setaffinity(0, sizeof one, &one);
    }
    return true;
}

/* Threads of ranks on the cores of this one; with a progress thread each rank has two that want one. */
static int32_t ddl__core_threads(const ddl_context *c) { return (c->has_thread ? 2 : 1) * c->core_ranks; }

static bool ddl__is_crowded(const ddl_context *c) { return ddl__core_threads(c) > c->cores; }

static void ddl__place_say(ddl_context *c, int32_t core, bool pinned, uint64_t now) {
    c->place_core = core;
    c->place_pinned = pinned;
    c->place_left = false;
    atomic_store_explicit(&c->places[c->rank], ddl__place_make(core, pinned, now), memory_order_relaxed);
}

/* Says where this rank waits, and moves it when that core is too full: see ddl__place_wait. */
static void ddl__place_look(ddl_context *c, int32_t core, uint64_t now) {
    cpu_set_t allowed;
    c->place_ns = now;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) {
        c->spread = false; /* more cores than the mask has room for, or a sandbox */
        return;
    }
    bool pinned = CPU_COUNT(&allowed) < 2;
    ddl__place_say(c, core, pinned, now);
    int32_t to = pinned ? -1 : ddl__cores_choose(c->places, c->world_size, c->rank, now, &allowed);
    c->crowd_looks = to >= 0 ? c->crowd_looks + 1 : 0;
    if (c->crowd_looks < DDL__CROWD_LOOKS || now - c->moved_ns < c->move_pause_ns) {
        return;
    }
    bool again = now - c->moved_ns < 2 * DDL__MOVE_NS_MAX;
    c->move_pause_ns = again ? DDL__MIN(2 * c->move_pause_ns, DDL__MOVE_NS_MAX) : DDL__MOVE_NS;
    c->moved_ns = now;
    c->crowd_looks = 0;
    if (ddl__cores_move(to, &allowed)) {
        ddl__place_say(c, to, false, now);
        ddl__log(&c->base, DDL_LOG_DEBUG, "moved from core %d, which other ranks wait on too, to core %d", core, to);
    }
}

/* At each wait that yields. Cheap: a number of the kernel's that is read without a call, and once a millisecond a look
 * at the others. */
static inline void ddl__place_wait(ddl_context *c, uint64_t now) {
    int32_t core = c->spread ? sched_getcpu() : -1;
    if (core < 0 || core >= DDL__PLACE_CORE) {
        return;
    }
    if (now - c->place_ns >= (uint64_t)DDL__PLACE_LOOK_NS) {
        ddl__place_look(c, core, now);
    } else if (core != c->place_core || c->place_left) {
        ddl__place_say(c, core, c->place_pinned, now);
    }
}

/* A wait is over; the rank counts where it waited for a little longer, as it will wait again (ddl__cores_choose). Who
 * slept says only where it woke, as of long ago: nobody counts it there. */
static inline void ddl__place_leave(ddl_context *c) {
    if (c->spread && !c->place_left && ddl__is_crowded(c)) {
        uint64_t place = atomic_load_explicit(&c->places[c->rank], memory_order_relaxed); /* our own word */
        place = place != 0 ? place : ddl__place_make(sched_getcpu(), false, 0);
        c->place_left = true;
        atomic_store_explicit(&c->places[c->rank], place | DDL__PLACE_LEFT, memory_order_relaxed); /* a hint */
    }
}

/* Whether a rank waits, or last waited, on the core that this one is on, as far as it said: what is expected from it
 * comes when the core is given away, and not before. */
static inline bool ddl__shares_core(const ddl_context *c, int32_t rank) {
    if (!c->spread || rank < 0) {
        return false;
    }
    uint64_t place = atomic_load_explicit(&c->places[rank], memory_order_relaxed); /* a hint */
    return (place & DDL__PLACE_CORE) != 0 && (int32_t)(place & DDL__PLACE_CORE) - 1 == sched_getcpu();
}

/* The same of one that computes: it takes its time, however often it gets the core. */
static inline bool ddl__computes_here(const ddl_context *c, int32_t rank) {
    return ddl__shares_core(c, rank) &&
           (atomic_load_explicit(&c->places[rank], memory_order_relaxed) & DDL__PLACE_LEFT) != 0;
}

/* It sleeps: whichever core it had is free. */
static inline void ddl__place_sleep(ddl_context *c) {
    if (c->spread && (c->place_core >= 0 || c->place_left)) {
        c->place_core = -1;
        c->place_left = false;
        atomic_store_explicit(&c->places[c->rank], 0, memory_order_relaxed);
    }
}

/* Once the board is there. */
static void ddl__places_open(ddl_context *c) {
    c->place_core = -1;
    c->spread = c->settings.spread && c->places != NULL && c->local_ranks > 1;
}

#endif /* DDL_MESH_CORES_H */

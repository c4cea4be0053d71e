/* help: a sender that waits for its large message to be fetched copies a part of it. The kernel's copy of a peer's
 * memory (process_vm_readv) has to find and to hold each page, which takes three times as long as the bytes; so the
 * sender stages pieces in a window that the receiver maps, as many as fit, ahead of where the receiver is, and the
 * receiver takes from the window what lies there and from the sender's memory what does not. It must not know rings or
 * requests.
 *
 * Nobody waits for anybody: a sender that computes or is stopped stages nothing, and the receiver goes on by itself;
 * one that sleeps is woken. A sender begins when the receiver has; where ranks share cores, and the receiver may get its
 * turn only when this one waits, before. It has one window, for one message at a time; of those to one receiver, for the
 * first that is not yet read. Until a receiver for which one was staged ahead has come, messages to others are read
 * without help. Pieces have stamps that never come again: a receiver that was stopped meanwhile finds none of its own in a
 * window that has gone on. */
#ifndef SHM_HELP_H
#define SHM_HELP_H

#include "distance.h"
#include "doorbell.h"
#include "memory.h"

#include <sched.h>

#define SHM_HELP_PIECE (32u << 10) /* one copy of the kernel's costs 0.3 us more than its bytes: a tenth of this one */
#define SHM_HELP_PIECES 8u         /* in a window: all of them lie in the second cache */
#define SHM_HELP_ALONE 4u          /* who got so many pieces without help takes as many at once */
#define SHM_HELP_YIELDS 2u         /* in a row that brought nothing: the sender does something else */
#define SHM_HELP_RINGS 2u          /* the same of waking it */
#define SHM_YIELD_LONG_NS 200000u  /* and more, for each rank that takes its turn on the core: somebody computes */
#define SHM_YIELD_PAUSE_NS 100000000u /* before the next try then */

/* Both sides' words about one message, in its record. Each word has one writer. */
typedef struct shm_help {
    _Atomic uint64_t window; /* the sender's: place of the window + 1; 0: no help, yet */
    _Atomic uint64_t stamp;  /* the sender's: of the first piece; piece i has stamp + i */
    _Atomic int64_t core;    /* the sender's: where it ran of late; a hint */
    _Atomic uint64_t taking; /* the receiver's: takes, or has, the bytes up to here */
    _Atomic uint64_t taken;  /* the receiver's: is done with the bytes up to here */
} shm_help;

/* In the sender's arena. */
typedef struct shm_window {
    _Alignas(SHM_LINE) _Atomic uint64_t holds[SHM_HELP_PIECES]; /* stamp of the piece that lies there, 0: none */
    _Alignas(SHM_LINE) uint8_t pieces[SHM_HELP_PIECES][SHM_HELP_PIECE];
} shm_window;

/* This rank's own. */
typedef struct shm_helper {
    shm_window *window; /* NULL: not yet made */
    uint64_t place;
    bool refused;         /* no memory for a window: no help */
    const ddl_message *whom; /* that is helped; not its record, whose place may be another's already */
    uint64_t stamp;       /* of its first piece */
    uint64_t next;        /* piece to be staged */
    uint64_t yields_ns;   /* not before: as a receiver, see shm_help_give_way */
    uint32_t alone, rings, yields; /* as one too, since the last piece that was staged */
} shm_helper;

static inline void shm_help_begin(shm_help *h) { /* relaxed: published with the record */
    atomic_store_explicit(&h->window, 0, memory_order_relaxed);
    atomic_store_explicit(&h->stamp, 0, memory_order_relaxed);
    atomic_store_explicit(&h->core, sched_getcpu(), memory_order_relaxed);
    atomic_store_explicit(&h->taking, 0, memory_order_relaxed);
    atomic_store_explicit(&h->taken, 0, memory_order_relaxed);
}

/* ---- the sender ---- */

static bool shm_helper_open(shm *t, shm_helper *own) {
    if (own->window == NULL && !own->refused) {
        bool place = shm_place_take(t, sizeof *own->window, &own->place);
        own->window = place ? shm_place_map(t, own->place, sizeof *own->window, NULL) : NULL;
        own->refused = own->window == NULL;
        own->stamp = 1;
        if (place && own->refused) {
            shm_place_give(t, own->place, sizeof *own->window);
        }
    }
    return own->window != NULL;
}

static void shm_helper_close(shm_helper *own) {
    if (own->window != NULL) {
        munmap(own->window, sizeof *own->window);
    }
}

/* The message is sent, or its memory is no longer to be read. */
static inline void shm_help_end(shm_helper *own, const ddl_message *m) {
    if (own->whom == m) {
        own->whom = NULL;
        own->stamp += own->next + 1;
        own->next = 0;
    }
}

static uint64_t shm_help_pieces(uint64_t bytes) { return (bytes + SHM_HELP_PIECE - 1) / SHM_HELP_PIECE; }

/* Stages the next piece, if there is one and room for it, from where the receiver is. Returns whether it did. */
static bool shm_help_next(shm *t, shm_helper *own, shm_help *h, const ddl_message *m, bool distant) {
    uint64_t bytes = m->payload_bytes;
    /* Acquire: the receiver has read what it is done with; its place may be written. */
    uint64_t taken = atomic_load_explicit(&h->taken, memory_order_acquire);
    uint64_t taking = atomic_load_explicit(&h->taking, memory_order_relaxed); /* where to go on: a hint */
    if (taking >= bytes || taken > taking || (own->whom != NULL && own->whom != m) || !shm_helper_open(t, own)) {
        return false;
    }
    if (own->whom == NULL) {
        own->whom = m;
        atomic_store_explicit(&h->stamp, own->stamp, memory_order_relaxed);
        atomic_store_explicit(&h->window, own->place + 1, memory_order_release); /* with the stamp: pairs with find */
    }
    atomic_store_explicit(&h->core, sched_getcpu(), memory_order_relaxed);
    uint64_t next = own->next > shm_help_pieces(taking) ? own->next : shm_help_pieces(taking);
    if (next >= shm_help_pieces(bytes) || next >= taken / SHM_HELP_PIECE + SHM_HELP_PIECES) {
        return false;
    }
    uint64_t at = next * SHM_HELP_PIECE, rest = bytes - at;
    shm_copy_for(own->window->pieces[next % SHM_HELP_PIECES], (const uint8_t *)m->payload + at,
                 rest < SHM_HELP_PIECE ? rest : SHM_HELP_PIECE, distant);
    /* Release: the piece lies there. */
    atomic_store_explicit(&own->window->holds[next % SHM_HELP_PIECES], own->stamp + next, memory_order_release);
    own->next = next + 1;
    return true;
}

/* The same, once the receiver has begun, or where ranks share cores. */
static bool shm_help_stage(shm *t, shm_helper *own, shm_help *h, const ddl_message *m, bool distant) {
    bool begun = t->crowded || atomic_load_explicit(&h->taking, memory_order_relaxed) != 0;
    return begun && shm_help_next(t, own, h, m, distant);
}

/* A window's worth, before the receiver has begun, and before it is woken. ping_pong of 128 KiB: on one core 38 -> 30 us, on
 * two 29 -> 27; woken before, 33 and 31. */
static void shm_help_ahead(shm *t, shm_helper *own, shm_help *h, const ddl_message *m, bool distant) {
    while (shm_help_next(t, own, h, m, distant)) {
    }
}

/* ---- the receiver ---- */

/* The piece that begins at byte `at`, where the sender has staged it; NULL: it has not. */
static const void *shm_help_find(shm *t, shm_help *h, uint64_t at) {
    uint64_t window = atomic_load_explicit(&h->window, memory_order_acquire); /* pairs with stage: the stamp */
    const shm_window *w = window != 0 ? shm_reach(t, window - 1, sizeof *w) : NULL;
    if (w == NULL || window % SHM_LINE != 1) {
        return NULL;
    }
    uint64_t piece = at / SHM_HELP_PIECE, stamp = atomic_load_explicit(&h->stamp, memory_order_relaxed) + piece;
    /* Acquire: pairs with the piece's release. */
    bool there = atomic_load_explicit(&w->holds[piece % SHM_HELP_PIECES], memory_order_acquire) == stamp;
    return there ? w->pieces[piece % SHM_HELP_PIECES] : NULL;
}

/* A sender that was last on this core stages nothing while this rank has it: the core is given away, for a window at a
 * time. By two switches and two copies in the second cache a window takes a third of what the kernel's copy does. */
static bool shm_help_give_way(const shm *t, shm_helper *own, const shm_help *h) {
    uint64_t before = t->host->now_ns(t->host);
    if (atomic_load_explicit(&h->core, memory_order_relaxed) != sched_getcpu() || before < own->yields_ns) {
        return false;
    }
    sched_yield();
    uint64_t after = t->host->now_ns(t->host);
    uint32_t turns = (uint32_t)t->local_count / (t->address.cores > 0 ? t->address.cores : 1);
    bool taken = after - before > (uint64_t)SHM_YIELD_LONG_NS * (turns > 2 ? turns : 2);
    own->yields_ns = taken ? after + SHM_YIELD_PAUSE_NS : 0;
    return true;
}

static void shm_help_found(shm_helper *own) { own->alone = own->rings = own->yields = 0; }

/* Nothing is staged at byte `done` of a message. A sender that sleeps is woken, while more is left than waking it costs;
 * one on this core gets it. Returns what lies there then. */
static const void *shm_help_call(shm *t, shm_helper *own, shm_help *h, int32_t sender, uint64_t done, uint64_t bytes) {
    bool worth = bytes - done > SHM_HELP_PIECES * SHM_HELP_PIECE;
    if (worth && own->rings < SHM_HELP_RINGS && shm_wake(t, sender)) {
        own->rings++;
    }
    if (own->yields < SHM_HELP_YIELDS && shm_help_give_way(t, own, h)) {
        own->yields++;
    }
    return shm_help_find(t, h, done);
}

#endif /* SHM_HELP_H */

/* ring: records from one writer to one reader through memory that both map, and nothing else: it must not know what a
 * record means, who sleeps, or where the memory comes from. Either side may die, or be stopped, at any instruction: the
 * other is left with whole records only.
 *
 *     line 0    the writer's words    line 1    the reader's words    then records, each at the start of a line
 *
 * A record begins with one word, kind << 32 | bytes, that is 0 until the record is complete: a small record is one
 * line, so that a message costs one miss. Before the word is published, that of the place behind the record is cleared:
 * there a reader always finds either 0 or a record. Records do not wrap around: what is left at the end is skipped.
 * Each word has a single writer. Nothing the other side wrote is believed: loaded once, checked, then used. */
#ifndef SHM_RING_H
#define SHM_RING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SHM_RING_LINE 64u     /* bytes of a cache line */
#define SHM_RING_WORD 8u      /* bytes of the word that begins a record */
#define SHM_RING_SKIP 0xffffu /* kind of what fills the end */
#define SHM_RING_END 0xfffeu  /* kind of the last record, without content: the writer has closed */

/* In shared memory. */
typedef struct shm_ring {
    _Alignas(64) _Atomic uint32_t wants_room; /* by the writer: it waits for this ring to be read */
    _Alignas(64) _Atomic uint64_t read;       /* by the reader: bytes of records that it is done with */
    _Atomic uint64_t refused;                 /* by the reader: see message.h */
    _Alignas(64) uint8_t records[];
} shm_ring;

/* Private to one side. */
typedef struct shm_ring_end {
    shm_ring *ring;
    uint64_t capacity; /* bytes of records, a multiple of a line */
    uint64_t place;    /* of the next record */
    uint64_t moved;    /* bytes written, or read, in all */
    uint64_t seen;     /* writer: what the reader was done with when last looked; reader: what it has told */
    uint64_t cleared;  /* writer: the words of lines before this are 0, counted as moved is */
    bool broken;       /* the other side wrote nonsense: this ring is over */
} shm_ring_end;

static inline uint64_t shm_ring_lines(uint64_t bytes) {
    return (bytes + SHM_RING_LINE - 1) / SHM_RING_LINE * SHM_RING_LINE;
}

/* memory: ring_bytes bytes, zero before the first use. */
static inline void shm_ring_open(shm_ring_end *e, void *memory, uint64_t ring_bytes) {
    *e = (shm_ring_end){.ring = memory, .capacity = ring_bytes - offsetof(shm_ring, records)};
}

/* Half of the ring less a line: it then fits at some time, wherever the last one ended. */
static inline uint64_t shm_ring_record_max(const shm_ring_end *e) {
    return (e->capacity / 2 - SHM_RING_LINE) / SHM_RING_LINE * SHM_RING_LINE - SHM_RING_WORD;
}

static inline _Atomic uint64_t *shm_ring_word(const shm_ring_end *e, uint64_t place) {
    return (_Atomic uint64_t *)(void *)(e->ring->records + (place == e->capacity ? 0 : place));
}

/* >>writer */

/* Bytes of records that the reader is done with. Acquire: its reads stand before, the places may be overwritten. */
static inline uint64_t shm_ring_done(shm_ring_end *w) {
    uint64_t read = atomic_load_explicit(&w->ring->read, memory_order_acquire);
    if (read < w->seen || read > w->moved) {
        w->broken = true;
        return w->seen;
    }
    return w->seen = read;
}

/* Room for so many bytes, and for the word behind them. */
static inline bool shm_ring_room(shm_ring_end *w, uint64_t bytes) {
    uint64_t need = bytes + SHM_RING_LINE;
    return w->moved + need - w->seen <= w->capacity || w->moved + need - shm_ring_done(w) <= w->capacity;
}

/* Clears the word of the line at a place that is free. Relaxed: the release of a later commit orders it for the reader,
 * who comes to that line through that record alone. */
static inline void shm_ring_clear(shm_ring_end *w, uint64_t place) {
    atomic_store_explicit(shm_ring_word(w, place), 0, memory_order_relaxed);
}

/* Makes the record at the current place visible, and the place behind it empty before that. A short record finds that
 * done by the one before it, so that it does not wait for another line to come from the reader's cache. */
static inline void shm_ring_commit(shm_ring_end *w, uint32_t kind, uint64_t bytes) {
    _Atomic uint64_t *word = shm_ring_word(w, w->place);
    uint64_t lines = shm_ring_lines(bytes);
    w->place += lines;
    w->moved += lines;
    if (w->cleared <= w->moved) {
        shm_ring_clear(w, w->place);
        w->cleared = w->moved + SHM_RING_LINE;
    }
    w->place = w->place == w->capacity ? 0 : w->place;
    atomic_store_explicit(word, (uint64_t)kind << 32 | bytes, memory_order_release); /* pairs with shm_ring_peek */
    if (w->cleared == w->moved + SHM_RING_LINE && w->cleared + SHM_RING_LINE - w->seen <= w->capacity) {
        shm_ring_clear(w, w->place + SHM_RING_LINE);
        w->cleared += SHM_RING_LINE;
    }
}

/* Bytes that a record of whole lines takes, with what it skips at the end. */
static inline uint64_t shm_ring_need(const shm_ring_end *w, uint64_t whole) {
    uint64_t rest = w->capacity - w->place;
    return whole > rest ? rest + whole : whole;
}

/* Where a record of so many bytes may be written now; NULL: there is no room. */
static inline void *shm_ring_reserve(shm_ring_end *w, uint64_t bytes) {
    uint64_t whole = shm_ring_lines(bytes + SHM_RING_WORD), rest = w->capacity - w->place;
    bool room = bytes <= shm_ring_record_max(w) && shm_ring_room(w, shm_ring_need(w, whole));
    if (!room || w->broken) {
        return NULL;
    }
    if (whole > rest) {
        shm_ring_commit(w, SHM_RING_SKIP, rest);
    }
    return w->ring->records + w->place + SHM_RING_WORD;
}

/* Where the next record of so many bytes will lie. NULL: the reader, as last seen, is not done with that place. */
static inline const uint8_t *shm_ring_ahead(const shm_ring_end *w, uint64_t bytes) {
    uint64_t whole = shm_ring_lines(bytes + SHM_RING_WORD), need = shm_ring_need(w, whole);
    bool free = w->moved + need + SHM_RING_LINE - w->seen <= w->capacity;
    return free ? w->ring->records + (need > whole ? 0 : w->place) : NULL;
}

/* Publishes what was reserved. Returns the number of bytes that shm_ring_done reaches when it has been read. */
static inline uint64_t shm_ring_publish(shm_ring_end *w, uint32_t kind, uint64_t bytes) {
    shm_ring_commit(w, kind, bytes + SHM_RING_WORD);
    return w->moved;
}

/* Says that nothing more will come. There is always room: the word behind the last record is kept free. */
static inline void shm_ring_finish(shm_ring_end *w) {
    uint64_t word = (uint64_t)SHM_RING_END << 32 | SHM_RING_WORD;
    atomic_store_explicit(shm_ring_word(w, w->place), word, memory_order_release); /* pairs with shm_ring_peek */
}

/* >>reader */

/* The next record, NULL: none. What it holds may still be changed by a writer that is out of its mind: copy, then
 * check. */
static inline void *shm_ring_peek(shm_ring_end *r, uint32_t *out_kind, uint64_t *out_bytes) {
    for (;;) {
        uint64_t word = atomic_load_explicit(shm_ring_word(r, r->place), memory_order_acquire); /* with commit */
        uint64_t bytes = word & UINT32_MAX, kind = word >> 32, lines = shm_ring_lines(bytes);
        if (word == 0 || r->broken) {
            return NULL;
        }
        if (bytes < SHM_RING_WORD || lines > r->capacity - r->place || kind > SHM_RING_SKIP) {
            r->broken = true;
            return NULL;
        }
        if (kind != SHM_RING_SKIP) {
            *out_kind = (uint32_t)kind;
            *out_bytes = bytes - SHM_RING_WORD;
            return r->ring->records + r->place + SHM_RING_WORD;
        }
        if (r->place == 0 || lines != r->capacity - r->place) { /* else round and round, from one skip to the next */
            r->broken = true;
            return NULL;
        }
        r->moved += lines;
        r->place = 0;
    }
}

/* Steps behind the record that peek gave; bytes as it said. The writer may reuse the place after shm_ring_tell. */
static inline void shm_ring_next(shm_ring_end *r, uint64_t bytes) {
    uint64_t lines = shm_ring_lines(bytes + SHM_RING_WORD);
    r->moved += lines;
    r->place = r->place + lines == r->capacity ? 0 : r->place + lines;
}

static inline uint64_t shm_ring_untold(const shm_ring_end *r) { return r->moved - r->seen; }

/* Gives the places of all records up to here back. Release: they have been read. */
static inline void shm_ring_tell(shm_ring_end *r) {
    r->seen = r->moved;
    atomic_store_explicit(&r->ring->read, r->moved, memory_order_release);
}

#endif /* SHM_RING_H */

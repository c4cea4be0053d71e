/* message: messages between two ranks of a host, over their two rings. It must not know what a message means.
 *
 *     small                      through the ring: the sender copies in, the core takes it where it lies
 *     a little larger            in pieces through the ring, so that one copies in while the other copies out
 *     large, in lent memory      the ring says where: the receiver copies from its view of the sender's arena
 *     large, ordinary memory     the ring says where: the receiver lets the kernel copy (process_vm_readv); a sender
 *                                that waits meanwhile helps, or has before (help.h)
 *     large, when it may not     in pieces through the ring, while the receiver copies them out
 *
 * A sender is done with a message that the receiver fetches when the receiver has stepped behind its record. If it must
 * have its memory back before (recall, the end of the endpoint), or the receiver cannot fetch after all (refused), it
 * lends a copy and writes its place into the record. A receiver looks at that word after it has copied: if it has
 * changed, the data may have too, and it copies again from there. Nobody waits for anybody who may be stopped. */
#ifndef SHM_MESSAGE_H
#define SHM_MESSAGE_H

#include "copy.h"
#include "distance.h"
#include "doorbell.h"
#include "help.h"
#include "memory.h"
#include "queue.h"
#include "ring.h"

#include <sys/uio.h>

/* Where one way becomes faster than the other, between two cores that share a cache. */
#define SHM_EAGER_BYTES (8u << 10) /* and no more than an eighth of the ring */
#define SHM_LENT_BYTES (6u << 10)
#define SHM_LINED_LEAST (1u << 10)
#define SHM_STREAM_BYTES (64u << 10) /* up to here a call of the kernel takes longer than copying twice at a time */
#define SHM_PAIR_STREAM_BYTES (128u << 10) /* the same through the longer ring of two ranks; such a message fits into it */
/* A piece: half of a message, within bounds. */
#define SHM_PIECE_SHORTEST (2u << 10)
#define SHM_PIECE_LONGEST (6u << 10)
#define SHM_PROBE_NS 50000000u    /* how long a process that was the peer's surely is */
#define SHM_TURN_BYTES (2u << 20) /* one busy peer does not keep the others waiting for longer than this */

#define SHM_TURNS 8 /* so many of an expected rank for one of the others */
#define SHM_LOOKS 64 /* for its next record, in one go */

enum { SHM_EAGER = 1, SHM_FETCH, SHM_STREAM, SHM_PIECE, SHM_LINED }; /* kinds of records; lined: eager as well */

/* SHM_FETCH: where the payload lies. */
typedef struct shm_fetch {
    uint8_t header[DDL_MESSAGE_HEADER_BYTES];
    uint64_t at, bytes, lent; /* lent: at is a place in an arena, else an address of the sender */
    _Atomic uint64_t copy;    /* 0; place of a copy + 1: that is valid, what `at` says is not; or SHM_NO_COPY */
    shm_help help;
} shm_fetch;

#define SHM_NO_COPY UINT64_MAX /* no memory was left for one: the message is lost, and the link with it */

/* SHM_STREAM: pieces of so many bytes in all follow. */
typedef struct shm_stream {
    uint8_t header[DDL_MESSAGE_HEADER_BYTES];
    uint64_t bytes;
} shm_stream;

/* The notes in a message. */
enum { SHM_NOTE_END, SHM_NOTE_DONE, SHM_NOTE_RECORD, SHM_NOTE_COPY };

/* A message of ours instead of one that was recalled. */
typedef struct shm_copy {
    ddl_message message;
    uint64_t offset, bytes; /* in the arena, bytes 0: behind this struct */
} shm_copy;

typedef struct shm_link {
    shm_ring_end out, in;
    uint64_t full_at; /* what the peer was done with when there was no room for the first that waits */
    bool out_open, in_open, gone, probed;
    bool cut; /* to be lost by the next progress: no memory for what comes, or for what was begun and is recalled */
    shm_queue fetched; /* in the ring, until the receiver has fetched them */
    shm_queue waiting; /* for room in the ring; of the first, part may be in it */
    bool landing;      /* between land and landed: of a stream, or of what was refused and will be lent */
    uint8_t *to;
    uint64_t bytes, done;
    uint64_t peeked; /* of the record that peek gave */
    void *token;
    int32_t pid; /* of the peer, and how to know that it still is the peer's */
    uint64_t probe_at, probe, probed_ns;
} shm_link;

typedef struct shm_messages {
    shm_link *links; /* by local index */
    uint64_t eager_bytes, stream_bytes; /* the most that goes so */
    bool strings; /* see shm_copy_over */
    bool stumbles; /* see shm_may_stumble */
    uint8_t *aside; /* for shm_read_aside, two pages more than a piece; NULL: not yet needed */
    int32_t open_in;
    uint32_t turns; /* in which the expected rank had something */
    uint64_t probe;
    shm_helper helper;
} shm_messages;

static shm_link *shm_link_of(const shm *t, int32_t i) { return &t->messages->links[i]; }

static shm_fetch *shm_record_of(const ddl_message *m) { return (shm_fetch *)(uintptr_t)m->priv[SHM_NOTE_RECORD]; }

/* Of a message that is on no queue any more. */
static void shm_give_back(shm *t, ddl_message *m, ddl_status status) {
    shm_help_end(&t->messages->helper, m);
    if (m->priv[SHM_NOTE_COPY] == 0) {
        t->host->sent(t->host, m, status);
        return;
    }
    shm_copy *copy = (shm_copy *)(void *)m;
    if (copy->bytes > 0) {
        shm_place_give(t, copy->offset, copy->bytes);
    }
    t->host->free(t->host, copy);
}

/* ---- the end of a link ---- */

/* Gives back what the peer has fetched. Returns how many there were. */
static int32_t shm_send_ended(shm *t, shm_link *l) {
    int32_t count = 0;
    uint64_t done = shm_ring_done(&l->out);
    while (l->fetched.first != NULL && l->fetched.first->priv[SHM_NOTE_END] <= done) {
        shm_give_back(t, shm_queue_take(&l->fetched), DDL_OK);
        count++;
    }
    return count;
}

/* What the peer fetched before it said that it closes was sent. */
static void shm_drop(shm *t, int32_t i, ddl_status status) {
    shm_link *l = shm_link_of(t, i);
    if (l->fetched.first != NULL) {
        shm_send_ended(t, l);
    }
    if (l->landing) {
        l->landing = false;
        t->host->landed(t->host, t->rank_of[i], l->token, status);
    }
    while (l->fetched.first != NULL) {
        shm_give_back(t, shm_queue_take(&l->fetched), status);
    }
    while (l->waiting.first != NULL) {
        shm_give_back(t, shm_queue_take(&l->waiting), status);
    }
}

static ddl_status shm_link_open(shm *t, int32_t i);

/* Nothing more is read or written; the peer hears of it, if it lives. */
static void shm_end(shm *t, int32_t i) {
    shm_link *l = shm_link_of(t, i);
    l->gone = true;
    if (l->out_open || (l->in_open && shm_link_open(t, i) == DDL_OK)) {
        shm_ring_finish(&l->out);
        shm_wake(t, i);
    }
}

/* Tells the core once; whether the peer is dead is for the core to say. */
static void shm_lose(shm *t, int32_t i, int error, const char *what) {
    shm_link *l = shm_link_of(t, i);
    if (!l->gone) {
        shm_end(t, i);
        t->host->lost(t->host, t->rank_of[i], error, what);
    }
    shm_drop(t, i, DDL_ERR_PEER);
}

/* ---- sending ---- */

/* The ring to a peer is this rank's to allocate, when it is needed. */
static ddl_status shm_link_open(shm *t, int32_t i) {
    shm_link *l = shm_link_of(t, i);
    if (shm_commit(t, shm_ring_offset(t, i, t->local_index), t->ring_bytes) != DDL_OK) {
        shm_log(t, DDL_LOG_WARN, "no memory for the ring of %" PRIu64 " bytes to rank %d", t->ring_bytes,
                (int)t->rank_of[i]);
        return DDL_ERR_NOMEM;
    }
    shm_ring_open(&l->out, shm_ring_memory(t, i, t->local_index), t->ring_bytes);
    l->out_open = true;
    /* Release: the ring is allocated before anybody looks at it. */
    atomic_store_explicit(&shm_control(t, i)->written[t->local_index], 1, memory_order_release);
    return DDL_OK;
}

enum { SHM_FULL, SHM_TAKEN, SHM_BORROWED };

#define SHM_LINED_AT (SHM_RING_LINE - SHM_RING_WORD) /* of a record: there a line begins, which speeds the copies up */

static int shm_push_eager(shm *t, int32_t i, const ddl_message *m) {
    shm_link *l = shm_link_of(t, i);
    uint32_t kind = m->payload_bytes >= SHM_LINED_LEAST ? SHM_LINED : SHM_EAGER;
    uint64_t at = kind == SHM_LINED ? SHM_LINED_AT : DDL_MESSAGE_HEADER_BYTES;
    uint8_t *to = shm_ring_reserve(&l->out, at + m->payload_bytes);
    if (to == NULL) {
        return SHM_FULL;
    }
    shm_copy_words(to, m->header, DDL_MESSAGE_HEADER_BYTES);
    if (m->payload_bytes > 0) {
        shm_copy_to_peer(t, i, to + at, m->payload, m->payload_bytes, t->messages->strings);
    }
    shm_ring_publish(&l->out, kind, at + m->payload_bytes);
    return SHM_TAKEN;
}

static void shm_want(shm_link *l, bool want) {
    /* Relaxed: whoever depends on the order adds a fence (shm_send_on, shm_bell_arm) or a release (the record). */
    atomic_store_explicit(&l->out.ring->wants_room, want, memory_order_relaxed);
}

/* Does the peer read this message from memory of ours that it does not map? */
static bool shm_is_read(const ddl_message *m) { return m->priv[SHM_NOTE_COPY] == 0 && !shm_record_of(m)->lent; }

static int shm_push_fetch(shm *t, int32_t i, ddl_message *m, uint64_t at, bool lent) {
    shm_link *l = shm_link_of(t, i);
    shm_fetch *to = shm_ring_reserve(&l->out, sizeof *to);
    if (to == NULL) {
        return SHM_FULL;
    }
    memcpy(to->header, m->header, sizeof to->header);
    to->at = at;
    to->bytes = m->payload_bytes;
    to->lent = lent;
    atomic_store_explicit(&to->copy, 0, memory_order_relaxed); /* the record is published below */
    shm_help_begin(&to->help);
    m->priv[SHM_NOTE_RECORD] = (uint64_t)(uintptr_t)to;
    shm_want(l, true);
    shm_sound(t);
    m->priv[SHM_NOTE_END] = shm_ring_publish(&l->out, SHM_FETCH, sizeof *to);
    const ddl_message *before = l->fetched.first;
    bool first = before == NULL || before->priv[SHM_NOTE_END] <= shm_ring_done(&l->out) || !shm_is_read(before);
    if (!lent && t->crowded && first) { /* else the window is for the one before */
        shm_help_ahead(t, &t->messages->helper, &to->help, m, t->distances[i].distant);
    }
    return SHM_BORROWED;
}

/* NOTE_DONE: bytes in the ring + 1, 0: nothing yet. */
static int shm_push_stream(shm *t, int32_t i, ddl_message *m) {
    shm_link *l = shm_link_of(t, i);
    uint64_t *done = &m->priv[SHM_NOTE_DONE];
    if (*done == 0) {
        shm_stream *to = shm_ring_reserve(&l->out, sizeof *to);
        if (to == NULL) {
            return SHM_FULL;
        }
        memcpy(to->header, m->header, sizeof to->header);
        to->bytes = m->payload_bytes;
        shm_ring_publish(&l->out, SHM_STREAM, sizeof *to);
        *done = 1;
    }
    uint64_t each = shm_ring_lines((m->payload_bytes + 1) / 2);
    each = each > SHM_PIECE_LONGEST ? SHM_PIECE_LONGEST : each < SHM_PIECE_SHORTEST ? SHM_PIECE_SHORTEST : each;
    while (*done - 1 < m->payload_bytes) {
        uint64_t rest = m->payload_bytes - (*done - 1), piece = rest < each ? rest : each;
        uint64_t most = shm_ring_record_max(&l->out) / 2;
        piece = piece < most ? piece : most;
        uint8_t *to = shm_ring_reserve(&l->out, SHM_LINED_AT + piece);
        if (to == NULL) {
            return SHM_FULL;
        }
        shm_copy_to_peer(t, i, to + SHM_LINED_AT, (const uint8_t *)m->payload + (*done - 1), piece, t->messages->strings);
        shm_ring_publish(&l->out, SHM_PIECE, SHM_LINED_AT + piece);
        *done += piece;
    }
    return SHM_TAKEN;
}

/* Puts a message into the ring, by the best way that works now. What was begun as a stream is ended as one. */
static int shm_push(shm *t, int32_t i, ddl_message *m) {
    uint64_t offset = 0;
    if (m->priv[SHM_NOTE_DONE] > 0) {
        return shm_push_stream(t, i, m);
    }
    if (m->payload_bytes > SHM_LENT_BYTES && shm_locate(t, m->payload, m->payload_bytes, &offset)) {
        return shm_push_fetch(t, i, m, offset, true);
    }
    if (m->payload_bytes <= t->messages->eager_bytes) {
        return shm_push_eager(t, i, m);
    }
    /* Relaxed: a hint, either way is right. */
    if (m->payload_bytes > t->messages->stream_bytes &&
        atomic_load_explicit(&shm_control(t, i)->pulls[t->local_index], memory_order_relaxed) == SHM_PULLS) {
        return shm_push_fetch(t, i, m, (uint64_t)(uintptr_t)m->payload, false);
    }
    return shm_push_stream(t, i, m);
}

/* Sends what has room. Returns how many messages went. */
static int32_t shm_send_on(shm *t, int32_t i) {
    shm_link *l = shm_link_of(t, i);
    int32_t count = 0;
    int pushed = SHM_TAKEN;
    uint64_t before = l->out.moved;
    while (l->waiting.first != NULL && (pushed = shm_push(t, i, l->waiting.first)) != SHM_FULL) {
        ddl_message *m = shm_queue_take(&l->waiting);
        count++;
        if (pushed == SHM_BORROWED) {
            shm_queue_add(&l->fetched, m);
        } else {
            shm_give_back(t, m, DDL_OK);
        }
    }
    if (pushed == SHM_FULL) {
        l->full_at = l->out.seen;
    }
    if (l->out.moved != before) {
        shm_wake(t, i);
    }
    return count;
}

/* Another thread may be asleep in the kernel, having looked before this message waited: it is woken if the peer has
 * made room meanwhile. Later the peer sees wants_room (the fence in shm_tell_writer). */
static void shm_wait_for_room(shm *t, shm_link *l) {
    shm_want(l, true);
    l->full_at = l->out.seen;
    if (t->armed) {
        shm_sleeper_fence(t);
        if (atomic_load_explicit(&l->out.ring->read, memory_order_relaxed) != l->full_at) { /* compared only */
            shm_bell_ring(t, t->local_index);
        }
    }
}

static ddl_status shm_message_send(shm *t, int32_t i, ddl_message *m) {
    shm_link *l = shm_link_of(t, i);
    if (l->gone || l->out.broken || l->cut) {
        return DDL_ERR_PEER; /* progress tells of what is broken */
    }
    ddl_status status = l->out_open ? DDL_OK : shm_link_open(t, i);
    if (status != DDL_OK) {
        return status;
    }
    memset(m->priv, 0, sizeof m->priv);
    int pushed = SHM_FULL;
    if (l->waiting.first == NULL) {
        uint64_t before = l->out.moved;
        pushed = shm_push(t, i, m);
        if (l->out.moved != before) {
            shm_wake(t, i);
        }
    }
    if (pushed == SHM_TAKEN) {
        uint64_t bytes = m->payload_bytes; /* the next one may be as long */
        const uint8_t *next = shm_ring_ahead(&l->out, SHM_LINED_AT + bytes);
        bool caches = !t->crowded && !(t->distances[i].distant && bytes >= SHM_DISTANT_LEAST);
        if (caches && bytes >= SHM_OWN_LEAST && bytes <= t->messages->eager_bytes && next != NULL) {
            shm_own_ahead(next + SHM_RING_LINE, bytes); /* at the first line the receiver looks */
        }
        return DDL_OK;
    }
    bool first = l->waiting.first == NULL;
    shm_queue_add(pushed == SHM_BORROWED ? &l->fetched : &l->waiting, m);
    if (pushed == SHM_FULL && first) {
        shm_wait_for_room(t, l);
    }
    return DDL_IN_PROGRESS;
}

/* Room for a small record that the core writes itself. */
static ddl_status shm_message_reserve(shm *t, int32_t i, uint64_t bytes, uint8_t **out_header, void **out_payload) {
    shm_link *l = shm_link_of(t, i);
    if (bytes >= SHM_LINED_LEAST || l->waiting.first != NULL || !l->out_open || l->gone || l->cut) {
        return DDL_IN_PROGRESS;
    }
    uint8_t *record = shm_ring_reserve(&l->out, DDL_MESSAGE_HEADER_BYTES + bytes);
    if (record == NULL) {
        return DDL_IN_PROGRESS;
    }
    *out_header = record;
    *out_payload = record + DDL_MESSAGE_HEADER_BYTES;
    return DDL_OK;
}

static void shm_message_publish(shm *t, int32_t i, uint64_t bytes) {
    shm_ring_publish(&shm_link_of(t, i)->out, SHM_EAGER, DDL_MESSAGE_HEADER_BYTES + bytes);
    shm_wake(t, i);
}

/* ---- taking back ---- */

static shm_copy *shm_copy_of(shm *t, const ddl_message *m, uint64_t extra) {
    shm_copy *copy = t->host->alloc(t->host, sizeof *copy + (size_t)extra);
    if (copy != NULL) {
        *copy = (shm_copy){.message = *m};
        copy->message.priv[SHM_NOTE_COPY] = 1;
    }
    return copy;
}

/* Of a message in the ring: if the peer has not fetched it, a copy takes its place. On return m is nobody's. */
static bool shm_lend_instead(shm *t, shm_link *l, ddl_message *m) {
    shm_fetch *record = shm_record_of(m);
    shm_help_end(&t->messages->helper, m);
    if (m->priv[SHM_NOTE_END] <= shm_ring_done(&l->out)) { /* and the record's place may be another's by now */
        return shm_queue_replace(&l->fetched, m, NULL);
    }
    shm_copy *copy = shm_copy_of(t, m, 0);
    if (copy != NULL && shm_lend_copy(t, m->payload, m->payload_bytes, &copy->offset, &copy->bytes) != DDL_OK) {
        t->host->free(t->host, copy);
        copy = NULL;
    }
    shm_queue_replace(&l->fetched, m, copy != NULL ? &copy->message : NULL);
    /* Release: the copy is there. The fence: whoever does not see the word has read all it read before what happens to
     * the message's memory from now on. */
    atomic_store_explicit(&record->copy, copy != NULL ? copy->offset + 1 : SHM_NO_COPY, memory_order_release);
    shm_fence();
    return copy != NULL;
}

/* Of a message that is partly in the ring as a stream: the rest has to follow. */
static bool shm_copy_instead(shm *t, shm_link *l, ddl_message *m) {
    shm_copy *copy = shm_copy_of(t, m, m->payload_bytes);
    if (copy != NULL) {
        copy->message.payload = copy + 1;
        shm_memcpy(copy + 1, m->payload, m->payload_bytes);
    }
    shm_queue_replace(&l->waiting, m, copy != NULL ? &copy->message : NULL);
    return copy != NULL;
}

static void shm_message_recall(shm *t, int32_t i, ddl_message *m) {
    shm_link *l = shm_link_of(t, i);
    bool kept = true;
    if (shm_queue_has(&l->fetched, m)) {
        kept = shm_lend_instead(t, l, m);
        shm_wake(t, i); /* it may wait for this word */
    } else if (shm_queue_has(&l->waiting, m) && m->priv[SHM_NOTE_DONE] > 0) {
        kept = shm_copy_instead(t, l, m);
    } else {
        shm_queue_replace(&l->waiting, m, NULL);
    }
    l->cut = l->cut || !kept; /* the core, which is ending an operation, is not to hear of its other messages now */
}

/* ---- fetching ---- */

/* The kernel copies, and from the same process a number that only the peer has: a process that got the peer's id after
 * its death cannot be taken for it. Not each time, as that is half a microsecond: no id comes around so soon. */
static bool shm_read_peer(const shm *t, shm_link *l, void *to, uint64_t at, uint64_t bytes) {
    uint64_t probe = 0, now = t->host->now_ns(t->host);
    struct iovec local[2] = {{to, (size_t)bytes}, {&probe, sizeof probe}};
    struct iovec remote[2] = {{(void *)(uintptr_t)at, (size_t)bytes}, {(void *)(uintptr_t)l->probe_at, sizeof probe}};
    if (now < l->probed_ns + SHM_PROBE_NS) {
        return process_vm_readv(l->pid, local, 1, remote, 1, 0) == (ssize_t)bytes;
    }
    ssize_t n = process_vm_readv(l->pid, local, 2, remote, 2, 0);
    bool same = n == (ssize_t)(bytes + sizeof probe) && probe == l->probe;
    l->probed_ns = same ? now : 0;
    return same;
}

/* The kernel's copy stumbles where memcpy does, and arrays of a few pages that malloc gave in a row lie so. What is read
 * into one from a peer's other goes to a place of ours first, as far into its page as where it comes from. ping_pong of
 * 128 KiB: 33 us, or 14 so. Returns as shm_read_peer. */
static bool shm_read_aside(shm *t, shm_link *l, uint8_t *to, uint64_t at, uint64_t bytes) {
    shm_messages *m = t->messages;
    if (m->aside == NULL && (m->aside = t->host->alloc(t->host, SHM_HELP_PIECE + 2 * SHM_PAGE)) == NULL) {
        return shm_read_peer(t, l, to, at, bytes);
    }
    uint8_t *page = m->aside + (0 - (uint64_t)(uintptr_t)m->aside) % SHM_PAGE;
    for (uint64_t done = 0, step; done < bytes; done += step) {
        uint8_t *aside = page + (at + done) % SHM_PAGE;
        step = bytes - done < SHM_HELP_PIECE ? bytes - done : SHM_HELP_PIECE;
        if (!shm_read_peer(t, l, aside, at + done, step)) {
            return false;
        }
        shm_memcpy(to + done, aside, step);
    }
    return true;
}

static bool shm_read_piece(shm *t, shm_link *l, uint8_t *to, uint64_t at, uint64_t bytes) {
    bool stumbles = t->messages->stumbles && shm_strings_stumble(to, (const void *)(uintptr_t)at);
    return stumbles ? shm_read_aside(t, l, to, at, bytes) : shm_read_peer(t, l, to, at, bytes);
}

/* What this rank tells the others about reading its memory. */
static void shm_probe_offer(shm *t) {
    shm_control_block *mine = shm_control(t, t->local_index);
    atomic_store_explicit(&mine->pid, (int32_t)getpid(), memory_order_relaxed); /* published by IN */
    atomic_store_explicit(&mine->probe_at, (uint64_t)(uintptr_t)&t->messages->probe, memory_order_relaxed);
    atomic_store_explicit(&mine->probe, t->messages->probe, memory_order_relaxed);
}

/* Tries with the peer's number whether its memory can be read, once both are in. */
static void shm_probe(shm *t, int32_t i) {
    shm_link *l = shm_link_of(t, i);
    shm_control_block *theirs = shm_control(t, i);
    uint64_t same = 0;
    if (l->probed) {
        return;
    }
    l->probed = true;
    l->pid = atomic_load_explicit(&theirs->pid, memory_order_relaxed); /* ordered by shm_state */
    l->probe_at = atomic_load_explicit(&theirs->probe_at, memory_order_relaxed);
    l->probe = atomic_load_explicit(&theirs->probe, memory_order_relaxed);
    bool can = t->may_fetch && shm_read_peer(t, l, &same, l->probe_at, sizeof same) && same == l->probe;
    atomic_store_explicit(&shm_control(t, t->local_index)->pulls[i], can ? SHM_PULLS : SHM_PULLS_NOT,
                          memory_order_relaxed); /* a hint */
    shm_log(t, DDL_LOG_DEBUG, "large messages of rank %d are %s", (int)t->rank_of[i],
            can ? "read from its memory" : "copied through the ring: its memory cannot be read");
}

static void shm_pulls_no_more(shm *t, int32_t i) {
    uint32_t before = atomic_exchange_explicit(&shm_control(t, t->local_index)->pulls[i], SHM_PULLS_NOT, memory_order_relaxed);
    if (before == SHM_PULLS) {
        shm_log(t, DDL_LOG_INFO, "the memory of rank %d can be read no more: its large messages are copied through the ring from now on",
                (int)t->rank_of[i]);
    }
}

enum { SHM_FETCHED, SHM_REFUSED, SHM_LOST };

/* From the sender's memory, in pieces; those that the sender has staged from there. */
static bool shm_read_helped(shm *t, int32_t i, shm_fetch *record, uint64_t at) {
    shm_link *l = shm_link_of(t, i);
    shm_help *h = &record->help;
    shm_helper *own = &t->messages->helper;
    shm_help_found(own);
    for (uint64_t done = 0; done < l->bytes;) {
        const void *staged = shm_help_find(t, h, done);
        staged = staged == NULL && done > 0 ? shm_help_call(t, own, h, i, done, l->bytes) : staged;
        own->alone++;
        if (staged != NULL) {
            shm_help_found(own);
        }
        uint64_t bytes = own->alone > SHM_HELP_ALONE ? SHM_HELP_ALONE * SHM_HELP_PIECE : SHM_HELP_PIECE;
        bytes = bytes < l->bytes - done ? bytes : l->bytes - done;
        atomic_store_explicit(&h->taking, done + bytes, memory_order_relaxed); /* a hint */
        if (staged != NULL) {
            shm_memcpy(l->to + done, staged, bytes);
        } else if (!shm_read_piece(t, l, l->to + done, at + done, bytes)) {
            return false;
        }
        done += bytes;
        atomic_store_explicit(&h->taken, done, memory_order_release); /* it has been read: pairs with stage */
    }
    return true;
}

/* Copies the payload that a record names to where it lands. */
static int shm_fetch_from(shm *t, int32_t i, shm_fetch *record, uint64_t at, bool lent) {
    shm_link *l = shm_link_of(t, i);
    /* Acquire: the copy is there when its place is. */
    uint64_t copy = atomic_load_explicit(&record->copy, memory_order_acquire);
    for (;;) {
        if (copy == SHM_NO_COPY) {
            return SHM_LOST;
        }
        bool read = copy != 0 || lent ? shm_copy_from_place(t, l->to, copy != 0 ? copy - 1 : at, l->bytes)
                                      : shm_read_helped(t, i, record, at);
        shm_fence(); /* what was read stands before the second look: pairs with shm_lend_instead */
        uint64_t now = atomic_load_explicit(&record->copy, memory_order_acquire);
        if (now == copy) {
            return read ? SHM_FETCHED : copy != 0 || lent ? SHM_LOST : SHM_REFUSED;
        }
        copy = now;
    }
}

/* The reader's `read` has moved: a writer that waits for it is woken. */
static void shm_tell_writer(shm *t, int32_t i) {
    shm_link *l = shm_link_of(t, i);
    shm_ring_tell(&l->in);
    shm_waker_fence(t); /* pairs with shm_wait_for_room and shm_bell_arm: one of the two sees the other */
    if (atomic_load_explicit(&l->in.ring->wants_room, memory_order_relaxed) != 0) {
        shm_wake(t, i);
    }
}

static void shm_landed(shm *t, int32_t i, ddl_status status) {
    shm_link_of(t, i)->landing = false;
    t->host->landed(t->host, t->rank_of[i], shm_link_of(t, i)->token, status);
}

/* A header has come and so many bytes are said to follow. false: the link is gone. */
static bool shm_land(shm *t, int32_t i, const uint8_t *header, uint64_t bytes) {
    shm_link *l = shm_link_of(t, i);
    uint64_t expected = 0;
    void *to = NULL;
    ddl_status status = t->host->land(t->host, t->rank_of[i], header, &expected, &to, &l->token);
    if (status < 0) {
        bool damaged = status == DDL_ERR_CORRUPT;
        shm_lose(t, i, damaged ? EBADMSG : ENOMEM,
                 damaged ? "the peer sent a damaged header" : "the core cannot take what the peer sent");
        return false;
    }
    l->landing = true;
    l->to = to;
    l->bytes = bytes;
    l->done = 0;
    if (expected != bytes) {
        shm_lose(t, i, EBADMSG, "the peer sent a payload of another length than its header says");
        return false;
    }
    return true;
}

/* ---- receiving ---- */

static bool shm_damaged(shm *t, int32_t i) {
    shm_lose(t, i, EBADMSG, "the peer wrote a record into the ring that makes no sense");
    return false;
}

/* Each takes one record, or part of its work. Returns whether the ring may be read on. */
static bool shm_take_eager(shm *t, int32_t i, const uint8_t *record, uint64_t at, uint64_t bytes) {
    shm_link *l = shm_link_of(t, i);
    if (bytes < at || l->landing) {
        return shm_damaged(t, i);
    }
    if (at != DDL_MESSAGE_HEADER_BYTES) {
        shm_listen(t, i, bytes - at, 1);
        shm_ask_ahead(record + at, bytes - at);
    }
    ddl_status status = /* the core copies the header before it looks at it */
        t->host->deliver(t->host, t->rank_of[i], record, record + at, bytes - at);
    if (status < 0) {
        shm_lose(t, i, status == DDL_ERR_CORRUPT ? EBADMSG : ENOMEM, "the core refuses what the peer sent");
        return false;
    }
    shm_ring_next(&l->in, bytes);
    return !l->gone;
}

/* A record that was refused is met again, with `landing` set, until the peer has lent a copy. */
static bool shm_take_fetch(shm *t, int32_t i, shm_fetch *record, uint64_t bytes) {
    shm_link *l = shm_link_of(t, i);
    if (bytes != sizeof *record) {
        return shm_damaged(t, i);
    }
    shm_fetch said;
    memcpy(&said, record, offsetof(shm_fetch, copy));
    if (l->landing && (l->bytes != said.bytes || atomic_load_explicit(&record->copy, memory_order_relaxed) == 0)) {
        return l->bytes == said.bytes ? false : shm_damaged(t, i);
    }
    if (!l->landing && !shm_land(t, i, said.header, said.bytes)) {
        return false;
    }
    shm_listen(t, i, said.bytes, 1);
    int how = l->to == NULL ? SHM_FETCHED : shm_fetch_from(t, i, record, said.at, said.lent != 0);
    if (how == SHM_REFUSED) {
        shm_pulls_no_more(t, i);
        /* Release: with shm_wake it asks the peer to lend a copy. */
        atomic_store_explicit(&l->in.ring->refused, l->in.moved + shm_ring_lines(bytes + SHM_RING_WORD),
                              memory_order_release);
        shm_wake(t, i);
        return false;
    }
    if (how == SHM_LOST) {
        shm_lose(t, i, ENOMEM, "what the peer sent can no longer be had from it");
        return false;
    }
    shm_ring_next(&l->in, bytes);
    shm_tell_writer(t, i);
    shm_landed(t, i, DDL_OK);
    return !l->gone;
}

static bool shm_take_stream(shm *t, int32_t i, const shm_stream *record, uint64_t bytes) {
    shm_link *l = shm_link_of(t, i);
    shm_stream said;
    if (bytes != sizeof said || l->landing) {
        return shm_damaged(t, i);
    }
    memcpy(&said, record, sizeof said);
    if (!shm_land(t, i, said.header, said.bytes)) {
        return false;
    }
    shm_ring_next(&l->in, bytes);
    if (l->bytes == 0) {
        shm_landed(t, i, DDL_OK);
    }
    return !l->gone;
}

static bool shm_take_piece(shm *t, int32_t i, const uint8_t *record, uint64_t bytes) {
    shm_link *l = shm_link_of(t, i);
    if (!l->landing || bytes < SHM_LINED_AT || bytes - SHM_LINED_AT > l->bytes - l->done) {
        return shm_damaged(t, i);
    }
    shm_listen(t, i, bytes - SHM_LINED_AT, 1);
    if (l->to != NULL) {
        shm_memcpy(l->to + l->done, record + SHM_LINED_AT, bytes - SHM_LINED_AT);
    }
    l->done += bytes - SHM_LINED_AT;
    shm_ring_next(&l->in, bytes);
    if (l->done == l->bytes) {
        shm_landed(t, i, DDL_OK);
    }
    return !l->gone;
}

static bool shm_take(shm *t, int32_t i, uint32_t kind, void *record, uint64_t bytes) {
    switch (kind) {
    case SHM_EAGER: return shm_take_eager(t, i, record, DDL_MESSAGE_HEADER_BYTES, bytes);
    case SHM_LINED: return shm_take_eager(t, i, record, SHM_LINED_AT, bytes);
    case SHM_FETCH: return shm_take_fetch(t, i, record, bytes);
    case SHM_STREAM: return shm_take_stream(t, i, record, bytes);
    case SHM_PIECE: return shm_take_piece(t, i, record, bytes);
    case SHM_RING_END: shm_lose(t, i, 0, "the peer closed its end"); return false;
    default: return shm_damaged(t, i);
    }
}

/* Reads one ring until it is empty, the turn is over, or what the core waits for may have come: to look whether more has
 * come costs a line of the writer's cache. Returns how many records there were. */
static int32_t shm_receive(shm *t, int32_t i, bool expected) {
    shm_link *l = shm_link_of(t, i);
    int32_t count = 0;
    uint64_t before = l->in.moved, bytes = 0, turn = 0;
    uint32_t kind = 0;
    void *record;
    while (!l->gone && turn < SHM_TURN_BYTES && (record = shm_ring_peek(&l->in, &kind, &bytes)) != NULL) {
        turn += kind == SHM_FETCH ? (uint64_t)1 << 20 : bytes;
        if (!shm_take(t, i, kind, record, bytes)) {
            break;
        }
        count++;
        if (shm_ring_untold(&l->in) >= l->in.capacity / 4) {
            shm_tell_writer(t, i);
        }
        if (expected && !l->landing) {
            break;
        }
    }
    if (l->in.broken && !l->gone) {
        shm_damaged(t, i);
    }
    return count + (l->in.moved != before && count == 0);
}

/* ---- progress ---- */

/* Stages a piece of what the peer is fetching. Returns whether it did. Once the writer has seen that a record was read, its
 * place may be another's. */
static bool shm_send_help(shm *t, int32_t i, const ddl_message *m) {
    bool there = m->priv[SHM_NOTE_END] > shm_link_of(t, i)->out.seen;
    return there && shm_is_read(m) && shm_help_stage(t, &t->messages->helper, &shm_record_of(m)->help, m,
                                                     t->distances[i].distant);
}

/* Ends what the peer has fetched, lends what it refused, sends what has room. */
static int32_t shm_send_progress(shm *t, int32_t i) {
    shm_link *l = shm_link_of(t, i);
    int32_t count = shm_send_ended(t, l);
    /* Acquire: pairs with the refusal. */
    uint64_t refused = atomic_load_explicit(&l->out.ring->refused, memory_order_acquire);
    ddl_message *first = l->fetched.first;
    if (first != NULL && first->priv[SHM_NOTE_END] == refused && first->priv[SHM_NOTE_COPY] == 0) {
        bool lent = shm_lend_instead(t, l, first);
        shm_wake(t, i);
        t->host->sent(t->host, first, lent ? DDL_OK : DDL_ERR_PEER);
        count++;
        if (!lent) {
            shm_lose(t, i, ENOMEM, "no memory was left to lend what the peer cannot read");
            return count;
        }
    }
    count += shm_send_on(t, i);
    count += l->fetched.first != NULL && shm_send_help(t, i, l->fetched.first);
    if (l->out.broken) {
        shm_damaged(t, i);
    } else if (l->fetched.first == NULL && l->waiting.first == NULL) {
        shm_want(l, false);
    }
    return count;
}

/* Who writes to this rank for the first time is met here. */
static void shm_meet(shm *t) {
    shm_control_block *mine = shm_control(t, t->local_index);
    for (int32_t i = 0; i < t->local_count; i++) {
        shm_link *l = shm_link_of(t, i);
        /* Acquire: pairs with shm_link_open. */
        if (!l->in_open && atomic_load_explicit(&mine->written[i], memory_order_acquire) != 0) {
            shm_ring_open(&l->in, shm_ring_memory(t, t->local_index, i), t->ring_bytes);
            l->in_open = true;
            t->messages->open_in++;
        }
    }
}

static int32_t shm_link_progress(shm *t, int32_t i, bool expected) {
    shm_link *l = shm_link_of(t, i);
    if (l->cut && !l->gone) {
        shm_lose(t, i, ENOMEM, "no memory was left to discard what it sent, or to end a message that was begun");
    }
    int32_t count = l->in_open && !l->gone ? shm_receive(t, i, expected) : 0;
    if (l->in_open && !l->gone && shm_ring_untold(&l->in) > 0 &&
        atomic_load_explicit(&l->in.ring->wants_room, memory_order_relaxed) != 0) { /* later looks see it too */
        shm_tell_writer(t, i);
    }
    if (!l->gone && (l->fetched.first != NULL || l->waiting.first != NULL)) {
        count += shm_send_progress(t, i);
    }
    return count;
}

/* Looks at the next record's word for a while: what comes meanwhile is met at once, and its second line is asked for (64 B by
 * ping-pong 0.94 of the time; EPYC). */
static void shm_linger(const shm_link *l, int32_t looks) {
    if (!l->in_open || l->gone) {
        return;
    }
    const _Atomic uint64_t *word = shm_ring_word(&l->in, l->in.place);
    uint64_t found = 0;
    for (int32_t look = 0; look < looks && found == 0; look++) {
        found = atomic_load_explicit(word, memory_order_relaxed);
    }
    if ((found & UINT32_MAX) > SHM_RING_LINE) {
        __builtin_prefetch((const uint8_t *)word + SHM_RING_LINE);
    }
}

/* The next record, where it is a whole message. */
static ddl_status shm_message_peek(shm *t, int32_t i, int32_t looks, const uint8_t **out_header,
                                   const void **out_payload, uint64_t *out_bytes) {
    shm_link *l = shm_link_of(t, i);
    uint32_t kind = 0;
    if (!l->in_open || l->gone || l->landing || l->cut) {
        return l->in_open ? DDL_ERR_STATE : DDL_IN_PROGRESS;
    }
    shm_linger(l, looks);
    const uint8_t *record = shm_ring_peek(&l->in, &kind, &l->peeked);
    uint64_t at = kind == SHM_EAGER ? DDL_MESSAGE_HEADER_BYTES : SHM_LINED_AT;
    if (record == NULL) {
        return l->in.broken ? DDL_ERR_STATE : DDL_IN_PROGRESS;
    }
    if ((kind != SHM_EAGER && kind != SHM_LINED) || l->peeked < at) {
        return DDL_ERR_STATE;
    }
    if (kind == SHM_LINED) {
        shm_listen(t, i, l->peeked - at, 1);
        shm_ask_ahead(record + at, l->peeked - at);
    }
    *out_header = record;
    *out_payload = record + at;
    *out_bytes = l->peeked - at;
    return DDL_OK;
}

static void shm_message_taken(shm *t, int32_t i) {
    shm_link *l = shm_link_of(t, i);
    shm_ring_next(&l->in, l->peeked);
    if (shm_ring_untold(&l->in) >= l->in.capacity / 4) {
        shm_tell_writer(t, i);
    }
}

static int32_t shm_message_progress(shm *t, int32_t expect) {
    int32_t first = expect >= 0 && expect < t->world_size ? t->index_of[expect] : -1;
    if (first >= 0 && !t->crowded) {
        shm_linger(shm_link_of(t, first), SHM_LOOKS); /* about as long as the rest of this takes */
    }
    int32_t count = first >= 0 ? shm_link_progress(t, first, true) : 0;
    if (count > 0 && ++t->messages->turns % SHM_TURNS != 0) {
        return count; /* the core looks whether that was it before it asks for more */
    }
    if (t->messages->open_in < t->local_count - 1) {
        shm_meet(t);
    }
    for (int32_t i = 0; i < t->local_count; i++) {
        count += i != first ? shm_link_progress(t, i, false) : 0;
    }
    return count;
}

/* ---- before a sleep ---- */

/* A record is there, and it is not one that waits for the peer. */
static bool shm_in_pending(shm_link *l) {
    uint32_t kind = 0;
    uint64_t bytes = 0;
    shm_fetch *record = shm_ring_peek(&l->in, &kind, &bytes);
    bool waits = l->landing && kind == SHM_FETCH && record != NULL;
    /* Relaxed: shm_wake of the peer comes after the word. */
    waits = waits && atomic_load_explicit(&record->copy, memory_order_relaxed) == 0;
    return l->in.broken || (record != NULL && !waits);
}

static bool shm_out_pending(shm_link *l) {
    uint64_t done = shm_ring_done(&l->out);
    const ddl_message *first = l->fetched.first;
    bool refused = first != NULL && first->priv[SHM_NOTE_COPY] == 0 &&
                   first->priv[SHM_NOTE_END] == atomic_load_explicit(&l->out.ring->refused, memory_order_relaxed);
    return refused || (first != NULL && first->priv[SHM_NOTE_END] <= done) || l->out.broken ||
           (l->waiting.first != NULL && done != l->full_at);
}

/* Anything to do right now? Asked after the sleep was announced, so whoever does something later wakes this rank. */
static bool shm_message_pending(shm *t) {
    bool pending = false;
    shm_meet(t);
    for (int32_t i = 0; i < t->local_count; i++) {
        shm_link *l = shm_link_of(t, i);
        if (l->in_open && !l->gone && shm_ring_untold(&l->in) > 0) {
            shm_tell_writer(t, i);
        }
        pending = pending || (!l->gone && l->in_open && shm_in_pending(l)) ||
                  (!l->gone && l->out_open && shm_out_pending(l)) || (l->cut && !l->gone);
    }
    return pending;
}

/* ---- the beginning and the end ---- */

static ddl_status shm_messages_open(shm *t) {
    shm_messages *m = t->messages = shm_zalloc(t, sizeof *m);
    if (m == NULL || (m->links = shm_zalloc(t, (size_t)t->local_count * sizeof *m->links)) == NULL) {
        return DDL_ERR_NOMEM;
    }
    for (int32_t i = 0; i < t->local_count; i++) {
        m->links[i].fetched.last = &m->links[i].fetched.first;
        m->links[i].waiting.last = &m->links[i].waiting.first;
    }
    m->strings = shm_copies_strings();
    m->stumbles = shm_may_stumble();
    m->eager_bytes = SHM_EAGER_BYTES < t->ring_bytes / 8 ? SHM_EAGER_BYTES : t->ring_bytes / 8;
    m->stream_bytes = SHM_STREAM_BYTES < t->ring_bytes ? SHM_STREAM_BYTES : t->ring_bytes;
    m->stream_bytes = t->local_count == 2 && t->ring_bytes >= SHM_PAIR_STREAM_BYTES + SHM_RING_BYTES ? SHM_PAIR_STREAM_BYTES : m->stream_bytes;
    return getrandom(&m->probe, sizeof m->probe, 0) == sizeof m->probe ? DDL_OK : DDL_ERR_SYSTEM;
}

/* What peers have not fetched stays for them as a copy in the segment, which lives as long as they hold it. */
static void shm_link_close(shm *t, int32_t i) {
    shm_link *l = shm_link_of(t, i);
    if (!l->gone && !l->cut && l->out_open) {
        shm_send_on(t, i);
    }
    if (l->out_open) {
        shm_send_ended(t, l);
    }
    while (l->fetched.first != NULL) {
        ddl_message *m = l->fetched.first;
        bool ours = m->priv[SHM_NOTE_COPY] != 0;
        if (ours) {
            t->host->free(t->host, shm_queue_take(&l->fetched)); /* but not its place */
        } else {
            shm_lend_instead(t, l, m);
            t->host->sent(t->host, m, DDL_ERR_CANCELLED);
        }
    }
    if (!l->gone) {
        shm_end(t, i);
    }
    shm_drop(t, i, DDL_ERR_CANCELLED);
}

static void shm_messages_close(shm *t) {
    shm_messages *m = t->messages;
    for (int32_t i = 0; m != NULL && m->links != NULL && t->base != NULL && i < t->local_count; i++) {
        shm_link_close(t, i);
    }
    if (m != NULL) {
        shm_helper_close(&m->helper);
        t->host->free(t->host, m->aside);
        t->host->free(t->host, m->links);
    }
    t->host->free(t->host, m);
    t->messages = NULL;
}

/* What still comes of a payload goes elsewhere. */
static void shm_message_redirect(shm *t, int32_t i, void *token, void *new_landing) {
    shm_link *l = shm_link_of(t, i);
    if (l->landing && l->token == token) {
        l->to = new_landing;
        l->cut = new_landing == NULL;
    }
}

static void shm_message_peer_dead(shm *t, int32_t i) {
    if (!shm_link_of(t, i)->gone) {
        shm_end(t, i);
    }
    shm_drop(t, i, DDL_ERR_PEER);
}

#endif /* SHM_MESSAGE_H */

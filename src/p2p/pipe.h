/* p2p, first part: the bytes of a tensor on a device, chunk by chunk through a few pieces of pinned memory, so that
 * copies and the network overlap and a message of any size takes the same memory. It must not know of messages: it says
 * which chunk is where, whoever sends or receives says when it may go on. */
#ifndef DDL_P2P_PIPE_H
#define DDL_P2P_PIPE_H

#include "../group/group.h"

enum { DDL__PIPE_SLOTS = 3 }; /* one is copied, one is on the network, one is between */
typedef enum ddl__slot_state {
    DDL__SLOT_EMPTY = 0, /* or being filled by a receiver */
    DDL__SLOT_COPIES = 1,
    DDL__SLOT_FULL = 2
} ddl__slot_state;

typedef struct ddl__pipe {
    uint64_t chunk, total; /* bytes; a chunk's number is its first byte / chunk, its slot that number % slots */
    uint64_t first;        /* all before this byte have gone through: the slots hold what follows */
    int32_t slots;
    uint8_t state[DDL__PIPE_SLOTS];
    ddl__stage *stage[DDL__PIPE_SLOTS]; /* of one item: the chunk; NULL: not made */
} ddl__pipe;

/* Nobody wants it any more; copies that are under way keep their memory until they end. */
static void ddl__pipe_leave(ddl_context *c, ddl__pipe **slot) {
    ddl__pipe *p = *slot;
    *slot = NULL;
    for (int32_t i = 0; p != NULL && i < p->slots; i++) {
        ddl__stage_leave(c, &p->stage[i]);
    }
    ddl__free(&c->base, p);
}

/* For the first `total` bytes of a contiguous tensor. comes: they are read. */
static ddl_status ddl__pipe_make(ddl_context *c, const ddl_tensor *t, uint64_t total, bool comes, void *owner,
                                 ddl__pipe **out) {
    ddl__pipe *p = ddl__alloc(&c->base, sizeof *p);
    const char *what = comes ? "send" : "receive";
    ddl_status status = p != NULL ? DDL_OK : ddl__error(c, DDL_ERR_NOMEM, "%s: no memory", what);
    if (p == NULL) {
        return status;
    }
    p->chunk = ddl__stage_chunk(total);
    p->total = total;
    p->slots = (int32_t)DDL__MIN((total + p->chunk - 1) / p->chunk, (uint64_t)DDL__PIPE_SLOTS);
    for (int32_t i = 0; i < p->slots && status == DDL_OK; i++) {
        p->stage[i] = ddl__stage_make(c, 1);
        status = p->stage[i] == NULL
                     ? ddl__error(c, DDL_ERR_NOMEM, "%s: no memory", what)
                     : ddl__stage_add(c, p->stage[i], t, DDL__MIN(p->chunk, total), NULL, DDL_HOST, what);
        if (status == DDL_OK) {
            p->stage[i]->owner = owner;
            p->stage[i]->items[0].comes = comes;
            p->stage[i]->items[0].goes = !comes;
        }
    }
    if (status < 0) {
        ddl__pipe_leave(c, &p);
    }
    *out = p;
    return status;
}

static int32_t ddl__pipe_slot(const ddl__pipe *p, uint64_t at) { return (int32_t)(at / p->chunk % (uint64_t)p->slots); }

static uint64_t ddl__pipe_length(const ddl__pipe *p, uint64_t at) { return DDL__MIN(p->chunk, p->total - at); }

/* Where byte `at` is, and how many follow it there. */
static char *ddl__pipe_at(const ddl__pipe *p, uint64_t at, uint64_t *out_bytes) {
    uint64_t into = at % p->chunk;
    *out_bytes = ddl__pipe_length(p, at - into) - into;
    return p->stage[ddl__pipe_slot(p, at)]->items[0].host + into;
}

/* Up to which byte there are slots. */
static uint64_t ddl__pipe_end(const ddl__pipe *p) {
    return DDL__MIN(p->first + p->chunk * (uint64_t)p->slots, p->total);
}

/* Begins to copy the chunk that begins `at`, of tensor t. DDL_IN_PROGRESS: done() is called. */
static ddl_status ddl__pipe_copy(ddl_context *c, ddl__pipe *p, const ddl_tensor *t, uint64_t at,
                                 void (*done)(ddl_context *c, ddl__stage *s, ddl_status status)) {
    int32_t slot = ddl__pipe_slot(p, at);
    ddl__stage *s = p->stage[slot];
    ddl__staged *item = &s->items[0];
    item->bytes = ddl__pipe_length(p, at);
    item->tensor = ddl_tensor_1d((char *)t->data + at, DDL_U8, (int64_t)item->bytes);
    item->tensor.device = t->device;
    s->done = done;
    p->state[slot] = DDL__SLOT_COPIES;
    return item->comes ? ddl__stage_fill(c, s) : ddl__stage_drain(c, s, UINT64_MAX);
}

/* The slot whose copy has ended. */
static int32_t ddl__pipe_ended(const ddl__pipe *p, const ddl__stage *s) {
    int32_t slot = 0;
    while (slot < p->slots && p->stage[slot] != s) {
        slot++;
    }
    return slot;
}

#endif /* DDL_P2P_PIPE_H */

/* ps, second part: what workers and servers say to each other.
 *
 *     worker -> server   ASK (tag 0), then its payload (tag of the ask): ids, gradients, a path
 *     server -> worker   ANSWER (that tag + 1), then the payload, empty when the answer is an error
 *
 * All through messages of a group of their own, so every transport will do. A server asks for a payload only when it
 * has room for it: until then a large one stays at the worker, and small ones are bounded by the window of p2p. A
 * worker has room for what it pulls: the ask says where, and the payload comes without a question, which would wait
 * behind the gradients that fill the way to the server. */
#ifndef DDL_PS_MESSAGE_H
#define DDL_PS_MESSAGE_H

#include "shard.h"

enum {
    DDL__PS_ASK_BYTES = 72,
    DDL__PS_ANSWER_BYTES = 56, /* and a sentence */
    DDL__PS_SENTENCE_BYTES = 300,
    DDL__PS_PATH_BYTES = 4096,
    DDL__PS_CHUNK_BITS = 20, /* of a sequence: messages of one push of rows */
    DDL__PS_TAG_ASK = 0,
    DDL__PS_TAG_MAX = 1 << 30
};

enum ddl__ps_op {
    DDL__PS_INIT = 1, /* first values of a piece */
    DDL__PS_PUSH = 2, /* gradient of a piece */
    DDL__PS_PULL = 3,
    DDL__PS_PUSH_PULL = 4,
    DDL__PS_PUSH_ROWS = 5, /* count ids, then count rows */
    DDL__PS_PULL_ROWS = 6, /* count ids */
    DDL__PS_CLOCK = 7,     /* no answer; value: nanoseconds of the iteration */
    DDL__PS_GATE = 8,      /* answered when the worker may end its iteration */
    DDL__PS_LEAVE = 9,
    /* Those that every worker asks for, and that are done once when the last has: */
    DDL__PS_TABLE = 10,  /* payload: the config */
    DDL__PS_SWITCH = 11, /* payload: the sync mode */
    DDL__PS_SAVE = 12,   /* payload: the path */
    DDL__PS_LOAD = 13,
    DDL__PS_LOOK = 14, /* payload: the path; the greatest order number of a checkpoint there, and one more */
    DDL__PS_OPS = 15
};

enum {
    DDL__PS_NOT_FINITE = 1, /* of a push: its worker has seen that the gradient is not finite */
    DDL__PS_CONTINUES = 2,  /* of a push of rows: not its first message to this server */
    DDL__PS_REPEATED = 1,   /* of an answer: the push was known already, */
    DDL__PS_SKIPPED = 2     /* the gradient was not finite, and has not been applied */
};

typedef struct ddl__ps_ask {
    int32_t op, place; /* place: a piece, or a table; of what all ask for: how many tables the workers know */
    int32_t tag;
    uint32_t flags;
    int64_t clock; /* at which it was pushed, or reads */
    uint64_t sequence; /* of a push; below DDL__PS_CHUNK_BITS its message */
    int64_t count;  /* ids; of SAVE: the program's epoch; of CLOCK: value without the waits for slower workers */
    int64_t bytes;  /* of the payload */
    uint64_t value; /* of a push: the bits of the factor of the learning rate; of SAVE: 2 * its order number, + 1 when
                       the last one failed */
    uint64_t open;  /* cookie of the receive that waits for the payload of the answer; 0: there is none */
} ddl__ps_ask;

typedef struct ddl__ps_answer {
    ddl_status status;
    uint32_t notes;
    int64_t slowest;    /* clock, as far as the server knows */
    int64_t clock;      /* SWITCH, LOAD: the worker's clock from now on */
    uint64_t sequence;  /* LOAD: its last push that was applied */
    int64_t generation; /* LOAD, LOOK */
    int64_t epoch;      /* LOAD */
    uint64_t held_ns;   /* for so long the staleness bound has kept it back */
    char text[DDL__PS_SENTENCE_BYTES];
} ddl__ps_answer;

static void ddl__ps_ask_write(uint8_t out[DDL__PS_ASK_BYTES], const ddl__ps_ask *a) {
    ddl__writer w = ddl__writer_of(out, DDL__PS_ASK_BYTES);
    memset(out, 0, DDL__PS_ASK_BYTES);
    ddl__put_u32(&w, (uint32_t)a->op);
    ddl__put_u32(&w, (uint32_t)a->place);
    ddl__put_u32(&w, (uint32_t)a->tag);
    ddl__put_u32(&w, a->flags);
    ddl__put_u64(&w, (uint64_t)a->clock);
    ddl__put_u64(&w, a->sequence);
    ddl__put_u64(&w, (uint64_t)a->count);
    ddl__put_u64(&w, (uint64_t)a->bytes);
    ddl__put_u64(&w, a->value);
    ddl__put_u64(&w, a->open);
}

/* What it returns is right in form; whether there is such a piece or row is for the server to see. */
static bool ddl__ps_ask_read(const uint8_t in[DDL__PS_ASK_BYTES], ddl__ps_ask *a) {
    ddl__reader r = ddl__reader_of(in, DDL__PS_ASK_BYTES);
    a->op = (int32_t)ddl__get_u32(&r);
    a->place = (int32_t)ddl__get_u32(&r);
    a->tag = (int32_t)ddl__get_u32(&r);
    a->flags = ddl__get_u32(&r);
    a->clock = (int64_t)ddl__get_u64(&r);
    a->sequence = ddl__get_u64(&r);
    a->count = (int64_t)ddl__get_u64(&r);
    a->bytes = (int64_t)ddl__get_u64(&r);
    a->value = ddl__get_u64(&r);
    a->open = ddl__get_u64(&r);
    return a->op >= DDL__PS_INIT && a->op < DDL__PS_OPS && a->tag > DDL__PS_TAG_ASK && a->tag <= DDL__PS_TAG_MAX &&
           a->tag % 2 == 0 && a->clock >= 0 && a->clock < INT64_MAX / 2 && a->count >= 0 && a->bytes >= 0;
}

/* Returns the bytes. */
static size_t ddl__ps_answer_write(uint8_t *out, const ddl__ps_answer *a) {
    ddl__writer w = ddl__writer_of(out, DDL__PS_ANSWER_BYTES + DDL__PS_SENTENCE_BYTES);
    ddl__put_u32(&w, (uint32_t)(int32_t)a->status);
    ddl__put_u32(&w, a->notes);
    ddl__put_u64(&w, (uint64_t)a->slowest);
    ddl__put_u64(&w, (uint64_t)a->clock);
    ddl__put_u64(&w, a->sequence);
    ddl__put_u64(&w, (uint64_t)a->generation);
    ddl__put_u64(&w, (uint64_t)a->epoch);
    ddl__put_u64(&w, a->held_ns);
    if (a->status < 0) {
        ddl__put_bytes(&w, a->text, strnlen(a->text, sizeof a->text - 1));
    }
    return w.at;
}

static bool ddl__ps_answer_read(const uint8_t *in, size_t bytes, ddl__ps_answer *a) {
    ddl__reader r = ddl__reader_of(in, bytes);
    a->status = (ddl_status)(int32_t)ddl__get_u32(&r);
    a->notes = ddl__get_u32(&r);
    a->slowest = (int64_t)ddl__get_u64(&r);
    a->clock = (int64_t)ddl__get_u64(&r);
    a->sequence = ddl__get_u64(&r);
    a->generation = (int64_t)ddl__get_u64(&r);
    a->epoch = (int64_t)ddl__get_u64(&r);
    a->held_ns = ddl__get_u64(&r);
    size_t text = DDL__MIN(r.bytes - r.at, sizeof a->text - 1);
    ddl__get_bytes(&r, a->text, text);
    a->text[r.bad ? 0 : text] = 0;
    ddl__text_clean(a->text);
    return !r.bad;
}

static bool ddl__ps_is_push(int32_t op) {
    return op == DDL__PS_PUSH || op == DDL__PS_PUSH_PULL || op == DDL__PS_PUSH_ROWS;
}
static bool ddl__ps_is_row_op(int32_t op) { return op == DDL__PS_PUSH_ROWS || op == DDL__PS_PULL_ROWS; }
static bool ddl__ps_is_piece_op(int32_t op) { return op >= DDL__PS_INIT && op <= DDL__PS_PUSH_PULL; }
static bool ddl__ps_is_joint(int32_t op) { return op >= DDL__PS_TABLE; }

/* A rank has told that it cannot go on (ddl__break_everywhere): neither will workers nor servers. A death breaks the
 * group too, for collectives; what it means here the sync mode says. */
static bool ddl__ps_is_broken(const ddl_group *g) { return g->broken != DDL_OK && g->broken != DDL_ERR_PEER; }

/* >>starting messages. The context is locked. */

/* Starts one message of a parent request, which ends when all of its parts have. Nobody attends to it by itself: that
 * is the parent's affair. open: cookie of the receive that a send is for, or 0. stays: what is sent to this rank itself
 * is not copied before its receive, or ddl__ps_move_refuse. DDL_ERR_NOMEM: nothing was sent. */
static ddl_status ddl__ps_move_to(ddl_group *g, bool is_send, const void *data, size_t bytes, int32_t peer, int32_t tag,
                                  uint64_t open, bool stays, ddl_request *parent, ddl_request **out) {
    ddl_transfer t = {is_send, ddl_tensor_1d(data, DDL_U8, (int64_t)bytes), peer, tag};
    *out = NULL;
    DDL__TRY(ddl__p2p_make(g, &t, out));
    ddl_request *r = *out;
    r->attended_ns = UINT64_MAX;
    r->open = open != 0 && bytes > DDL__P2P_EAGER_BYTES && peer != g->rank;
    r->stays = stays && peer == g->rank;
    r->remote = r->open ? open : 0;
    r->parent = parent;
    parent->parts++;
    ddl__p2p_start(g->context, r);
    if (!ddl__is_pending(r) && r->status == DDL_ERR_NOMEM) { /* what a rank sends to itself is kept in its memory */
        *out = NULL;
        ddl__request_release(r);
        return DDL_ERR_NOMEM;
    }
    return DDL_OK;
}

static ddl_status ddl__ps_move(ddl_group *g, bool is_send, const void *data, size_t bytes, int32_t peer, int32_t tag,
                               ddl_request *parent, ddl_request **out) {
    return ddl__ps_move_to(g, is_send, data, bytes, peer, tag, 0, false, parent, out);
}

/* Drops a message that nobody will receive, and ends the send of what stays with this rank. A worker takes its offers
 * back by itself. False: it has not come. */
static bool ddl__ps_move_refuse(ddl_group *g, int32_t source, int32_t tag) {
    ddl__unexpected *u = ddl__unexpected_find(g, source, tag);
    if (u == NULL) {
        return false;
    }
    ddl__offer offer = {0};
    if (u->is_offer) {
        memcpy(&offer, u->data, sizeof offer);
    } else if (source != g->rank) {
        ddl__p2p_took(g->context, g, source, u->bytes);
    }
    ddl__unexpected_remove(g, u);
    ddl_request *r = source == g->rank && offer.cookie != 0 ? ddl__request_of(g->context, offer.cookie) : NULL;
    if (r != NULL) {
        ddl__request_done(r, DDL_OK);
    }
    return true;
}

/* A parent begins with one part more, so that it cannot end while its messages are still being started. */
static void ddl__ps_moves_begin(ddl_request *parent) { parent->parts = 1; }

static void ddl__ps_moves_started(ddl_context *c, ddl_request *parent) {
    if (--parent->parts == 0) {
        parent->parts_done(c, parent);
    }
}

/* Ends a message that is still under way, and gives it back. */
static void ddl__ps_move_drop(ddl_context *c, ddl_request **message) {
    ddl_request *r = *message;
    *message = NULL;
    if (r == NULL || c->finalized) { /* ddl_finalize has ended and freed all requests */
        return;
    }
    r->parent = NULL;
    if (ddl__is_pending(r)) {
        r->ops->abandon(c, r);
        if (ddl__is_pending(r)) {
            ddl__request_done(r, DDL_ERR_CANCELLED);
        }
    }
    ddl__request_release(r);
}

#endif /* DDL_PS_MESSAGE_H */

/* engine: steps whose data goes from device to device, or through pinned memory where that fails: each is a message of
 * p2p, that is offered and fetched, with a tag that no program has. */
#ifndef DDL_ENGINE_STRAIGHT_H
#define DDL_ENGINE_STRAIGHT_H

#include "native.h"

enum { DDL__TAG_STEP = INT32_MIN + 0x60000000 }; /* and the next 2^28 */

/* Messages of one tag are matched in order, so that it need not be unique for ever. */
static int32_t ddl__step_tag(const ddl__op *op, const ddl__step *s) {
    return DDL__TAG_STEP + (int32_t)((op->sequence & 0xffu) << 20 | (s->slot & 0xfffffu));
}

static void ddl__messaging_unlist(ddl_context *c, ddl__op *op) {
    ddl__op **at = &c->messaging;
    while (*at != op) {
        at = &(*at)->messaging_next;
    }
    *at = op->messaging_next;
}

/* Whether it has ended is looked at by whoever polls. It is not ordered on a stream: its operation was. */
static void ddl__step_message(ddl_context *c, ddl__op *op, uint32_t i) {
    const ddl__step *s = &op->cached->plan.steps[i];
    ddl__step_state *st = &op->steps[i];
    bool recv = s->kind == DDL__RECV;
    ddl_request *r = NULL;
    ddl__stage *stage = ddl__stage_make(c, 1);
    if (stage == NULL || ddl__request_new(op->group, &ddl__p2p_ops, &r) < 0) {
        ddl__stage_leave(c, &stage);
        ddl__step_failed(op, i, DDL_ERR_NOMEM);
        return;
    }
    r->is_recv = recv;
    r->peer = s->peer;
    r->tag = ddl__step_tag(op, s);
    char *at = recv ? op->base[s->dst_space] + s->dst : op->base[s->src_space] + s->src;
    r->tensor = ddl_tensor_1d(at, DDL_U8, s->bytes);
    r->tensor.device = op->call.on_device;
    r->bytes = (uint64_t)s->bytes;
    r->stage = stage;
    stage->owner = r;
    st->message = r;
    if (op->messages == NULL) {
        op->messaging_next = c->messaging;
        c->messaging = op;
    }
    st->message_next = op->messages;
    op->messages = st;
    ddl__p2p_start(c, r);
    ddl__kick(c); /* it may have ended */
}

/* Looks at the messages of one operation. True: some have ended, and op may be gone. */
static bool ddl__messages_look(ddl_context *c, ddl__op *op) {
    bool moved = false;
    for (ddl__step_state **at = &op->messages; *at != NULL;) {
        ddl__step_state *st = *at;
        ddl_request *r = st->message;
        if (r->state != DDL__REQUEST_DONE) {
            at = &st->message_next;
            continue;
        }
        *at = st->message_next;
        st->message = NULL;
        moved = true;
        if (r->status < 0) {
            ddl__step_failed(op, (uint32_t)st->out.index, r->status);
        } else {
            op->last_peer = r->is_recv ? r->peer : op->last_peer;
            ddl__step_finish(op, (uint32_t)st->out.index);
        }
        ddl__request_release(r);
    }
    if (moved && op->messages == NULL) {
        ddl__messaging_unlist(c, op);
    }
    if (moved) {
        ddl__op_run(c, op);
    }
    return moved;
}

static int32_t ddl__messages_poll(ddl_context *c) {
    for (ddl__op *op = c->messaging, *next; op != NULL; op = next) {
        next = op->messaging_next;
        if (ddl__messages_look(c, op)) {
            return 1; /* the list may be another one now */
        }
    }
    return 0;
}

/* The operation ends before them. */
static void ddl__messages_leave(ddl_context *c, ddl__op *op) {
    if (op->messages != NULL) {
        ddl__messaging_unlist(c, op);
    }
    while (op->messages != NULL) {
        ddl_request *r = op->messages->message;
        op->messages->message = NULL;
        op->messages = op->messages->message_next;
        if (r->state == DDL__REQUEST_ACTIVE) {
            ddl__p2p_abandon(c, r);
            ddl__request_done(r, DDL_ERR_CANCELLED);
        }
        ddl__request_release(r);
    }
}

#endif /* DDL_ENGINE_STRAIGHT_H */

/* engine, fourth part: who is missing, and who calls something else.
 *
 * A rank that has waited 100 ms, or got a frame of another signature, tells those it waits for what it called (QUERY:
 * sequence, hash of the call, signature, call); whoever finds that its own call of that number differs tells the whole
 * group both calls (MISMATCH), and the group breaks everywhere with the same sentence. Before a stall report all
 * members are asked, and their answers (STATUS) are in the report. */
#ifndef DDL_ENGINE_WATCH_H
#define DDL_ENGINE_WATCH_H

#include "frames.h"

#define DDL__ASK_FIRST_NS (100 * DDL__NS_PER_MS)
#define DDL__ASK_AGAIN_NS (1 * DDL__NS_PER_S)
#define DDL__MISMATCH_NS (500 * DDL__NS_PER_MS) /* for the other side to spell out its call */

typedef enum ddl__answer_code {
    DDL__NOT_ASKED = 0,
    DDL__NOT_ARRIVED = 1, /* is in ddl, but has not called this collective */
    DDL__ARRIVED = 2,
    DDL__PASSED = 3, /* has finished it */
    DDL__SILENT = 4  /* was asked, has not answered: computing, or stopped; is never sent */
} ddl__answer_code;

typedef struct ddl__answer {
    uint8_t code;
    uint32_t sequence; /* of its newest collective in the group */
    char doing[56];
} ddl__answer;

/* >>telling the group */

/* Passes bad news on, once, over the links that are there: whoever told us may leave before it has connected to all. */
static void ddl__pass_on(ddl_context *c, const ddl_group *g, int32_t but, const ddl__frame *f, const void *payload) {
    for (int32_t i = 0; i < g->size; i++) {
        const ddl__link *l = &c->links[g->ranks[i]];
        if (i != g->rank && g->ranks[i] != but && l->connected && l->life == DDL__ALIVE) {
            ddl__frame same = {.type = f->type, .group = f->group, .epoch = f->epoch};
            ddl__tell(c, g->ranks[i], same, payload, f->bytes);
        }
    }
}

static ddl_status ddl__on_mismatch(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl_group *g = ddl__frame_group(c, peer, f);
    ddl__reader r = ddl__reader_of(payload, f->bytes);
    char text[DDL__SENTENCE_BYTES];
    int32_t code = (int32_t)(0u - ddl__get_u32(&r));
    ddl__get_string(&r, text, sizeof text);
    if (r.bad || !ddl__may_break((ddl_status)code)) {
        return DDL_ERR_CORRUPT;
    }
    if (g != NULL && g->broken == DDL_OK) {
        ddl__pass_on(c, g, peer, f, payload);
        ddl__group_break(g, (ddl_status)code, "%s", text);
    }
    return DDL_OK;
}

/* >>asking */

/* Our call of that number, running or over; NULL when we have not made it, or have forgotten it. */
static const ddl__flight *ddl__own_call(ddl_group *g, uint32_t sequence, char *out, size_t bytes) {
    const ddl__flight *r = ddl__record_of(g, sequence);
    if (r == NULL || (int32_t)(sequence - g->sequence) > 0) {
        return NULL;
    }
    ddl__text text = {out, bytes, 0};
    const ddl__op *op = ddl__op_find(g, sequence);
    if (op != NULL) { /* which knows more of it */
        ddl__describe_call(g, &op->call, op->cached->plan.algorithm, &text);
    } else {
        ddl__describe_record(g, r, &text);
    }
    return r;
}

/* Says what we called as that number, and makes the peer look whether it called the same. */
static void ddl__ask(ddl_context *c, ddl_group *g, int32_t peer, uint32_t sequence) {
    char ours[160];
    const ddl__flight *r = ddl__own_call(g, sequence, ours, sizeof ours);
    if (r == NULL || c->links[g->ranks[peer]].life != DDL__ALIVE) {
        return;
    }
    uint8_t payload[256];
    ddl__writer w = ddl__writer_of(payload, sizeof payload);
    ddl__put_u32(&w, sequence);
    ddl__put_u64(&w, r->call_hash);
    ddl__put_u64(&w, r->signature);
    ddl__put_string(&w, ours);
    ddl__frame f = {.type = DDL__FRAME_QUERY, .group = g->id, .epoch = g->epoch};
    ddl__tell(c, g->ranks[peer], f, payload, w.at);
}

/* True when a receive from the peer is still to come. */
static bool ddl__op_waits_for(const ddl__op *op, int32_t peer) {
    const ddl__cached *e = op->cached;
    if (op->is_native) {
        return op->native_waits == peer;
    }
    for (uint32_t i = 0; i < e->recv_count; i++) {
        const ddl__step *s = ddl__op_step(op, e->recvs[i]);
        if (s->peer == peer && !op->steps[e->recvs[i]].arrived) {
            return true;
        }
    }
    return false;
}

static void ddl__ask_members(ddl_context *c, ddl__op *op, bool all) {
    if (op->answers == NULL) {
        op->answers = ddl__alloc_array(&c->base, (size_t)op->group->size, sizeof *op->answers);
    }
    for (int32_t i = 0; i < op->group->size && op->answers != NULL; i++) {
        if (i != op->group->rank && (all || op->is_native || ddl__op_waits_for(op, i))) {
            op->answers[i].code = op->answers[i].code == DDL__NOT_ASKED ? DDL__SILENT : op->answers[i].code;
            ddl__ask(c, op->group, i, op->sequence);
        }
    }
}

/* Calls that are alike but for the algorithm, which is one of devices in one of them. */
static bool ddl__differ_by_place(const char *ours, const char *theirs) {
    const char *by = strstr(ours, ") by ");
    bool alike = by != NULL && strncmp(ours, theirs, (size_t)(by - ours) + 5) == 0;
    return alike && (strstr(by, "device") != NULL) != (strstr(theirs, "device") != NULL);
}

/* Both calls are known: everybody learns them. */
static void ddl__mismatch_spell(ddl_context *c, ddl_group *g, uint32_t sequence, const char *ours, int32_t peer,
                                const char *theirs) {
    ddl__break_everywhere(
        c, g, DDL_ERR_MISMATCH,
        "operation %u is different on two ranks: rank %d called %s, but rank %d called %s. %s",
        sequence, g->rank, ours, peer, theirs,
        ddl__differ_by_place(ours, theirs)
            ? "One of them passed a tensor on a device, the other tensors in ordinary memory: either all ranks pass "
              "one on a device or none; an empty tensor counts by its `device` too"
            : "All ranks of a group must make the same calls in the same order");
}

/* A peer has told its call of a number, and the signatures differ. Where the calls are alike, an earlier one was not:
 * the question goes back and forth, to the call before, until the first that differs is found. */
static void ddl__mismatch_found(ddl_context *c, ddl_group *g, const ddl__flight *own, const char *ours, int32_t peer,
                                uint64_t call_hash, const char *theirs) {
    if (own->call_hash != call_hash) {
        ddl__mismatch_spell(c, g, own->sequence, ours, peer, theirs);
    } else if (ddl__record_of(g, own->sequence - 1) != NULL) {
        ddl__ask(c, g, peer, own->sequence - 1);
    } else {
        ddl__break_everywhere(c, g, DDL_ERR_MISMATCH,
                              "ranks %d and %d made different calls some time before operation %u. "
                              "All ranks of a group must make the same calls in the same order",
                              g->rank, peer, own->sequence);
    }
}

static ddl_status ddl__on_query(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl_group *g = ddl__frame_group(c, peer, f);
    ddl__reader r = ddl__reader_of(payload, f->bytes);
    uint32_t sequence = ddl__get_u32(&r);
    uint64_t call_hash = ddl__get_u64(&r), signature = ddl__get_u64(&r);
    char theirs[160], ours[160];
    ddl__get_string(&r, theirs, sizeof theirs);
    if (r.bad) {
        return DDL_ERR_CORRUPT;
    }
    if (g == NULL) {
        return DDL_OK;
    }
    int32_t from = g->rank_of[peer];
    uint8_t code = DDL__NOT_ARRIVED;
    const ddl__flight *own = ddl__own_call(g, sequence, ours, sizeof ours);
    if (own != NULL) {
        if (own->signature != signature) {
            ddl__mismatch_found(c, g, own, ours, from, call_hash, theirs);
            return DDL_OK;
        }
        code = ddl__op_find(g, sequence) != NULL ? DDL__ARRIVED : DDL__PASSED;
    } else if ((int32_t)(sequence - g->sequence) > 0) {
        g->announced =
            (ddl__announced){.sequence = sequence, .peer = from, .call_hash = call_hash, .signature = signature};
        snprintf(g->announced.call, sizeof g->announced.call, "%s", theirs);
    }
    uint8_t out[80];
    ddl__writer w = ddl__writer_of(out, sizeof out);
    ddl__put_u32(&w, sequence);
    ddl__put_u8(&w, code);
    ddl__put_u32(&w, g->sequence);
    ddl__put_string(&w, c->doing != NULL ? c->doing : "other code");
    ddl__tell(c, peer, (ddl__frame){.type = DDL__FRAME_STATUS, .group = g->id, .epoch = g->epoch}, out, w.at);
    return DDL_OK;
}

static ddl_status ddl__on_status(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl_group *g = ddl__frame_group(c, peer, f);
    ddl__reader r = ddl__reader_of(payload, f->bytes);
    ddl__answer answer = {0};
    uint32_t sequence = ddl__get_u32(&r);
    answer.code = ddl__get_u8(&r);
    answer.sequence = ddl__get_u32(&r);
    ddl__get_string(&r, answer.doing, sizeof answer.doing);
    if (r.bad || answer.code > DDL__PASSED) {
        return DDL_ERR_CORRUPT;
    }
    ddl__op *op = g != NULL ? ddl__op_find(g, sequence) : NULL;
    if (op != NULL && op->answers != NULL) {
        op->answers[g->rank_of[peer]] = answer;
    }
    return DDL_OK;
}

/* A frame shows that the peer's call differs from ours. It is asked to spell it out; if it cannot (it computes), the
 * group breaks without its words. */
static void ddl__mismatch_seen(ddl_context *c, ddl_group *g, int32_t peer, uint32_t sequence) {
    if (g->doubt_ns == 0) {
        g->doubt_ns = ddl__now_ns();
        g->doubt_sequence = sequence;
        ddl__ask(c, g, peer, sequence);
    }
}

/* The lengths of an all_to_allv are each pair's own, and no part of the signature. */
static void ddl__lengths_differ(ddl_context *c, ddl__op *op, int32_t peer, uint64_t came, uint64_t expected) {
    int32_t rank = op->group->rank;
    ddl__break_everywhere(
        c, op->group, DDL_ERR_MISMATCH,
        "operation %u, all_to_allv: rank %d sends %s to rank %d than that expects (%llu bytes came where "
        "%llu were next): send_counts[%d] of rank %d must be recv_counts[%d] of rank %d",
        op->sequence, peer, came > expected ? "more" : "less", rank, (unsigned long long)came,
        (unsigned long long)expected, rank, peer, peer, rank);
}

/* Somebody asked for this collective before we called it: if that was another call, we know at once. */
static void ddl__announced_check(ddl_context *c, ddl_group *g, const ddl__op *op) {
    if (g->announced.sequence != op->sequence || g->announced.signature == op->call.signature) {
        return;
    }
    ddl__announced a = g->announced; /* what is said to others may bring a newer one */
    char ours[160];
    const ddl__flight *own = ddl__own_call(g, op->sequence, ours, sizeof ours);
    if (own != NULL) {
        ddl__mismatch_found(c, g, own, ours, a.peer, a.call_hash, a.call);
    }
}

/* >>request ops of a collective */

static void ddl__explain_answer(const ddl__op *op, int32_t rank, ddl__text *text) {
    const ddl__answer *a = op->answers != NULL ? &op->answers[rank] : NULL;
    if (a == NULL || a->code == DDL__NOT_ASKED) {
        ddl__text_add(text, " rank %d", rank);
    } else if (a->code == DDL__SILENT) {
        ddl__text_add(text, " rank %d (does not answer: it computes outside ddl, or is stopped)", rank);
    } else if (a->code == DDL__NOT_ARRIVED) {
        ddl__text_add(text, " rank %d (has not arrived; its last collective here was operation %u; now in %s)", rank,
                      a->sequence, a->doing);
    } else {
        ddl__text_add(text, " rank %d (has arrived)", rank);
    }
}

static void ddl__coll_explain(ddl_context *c, ddl_request *r, ddl__text *text) {
    (void)c;
    const ddl__op *op = r->op;
    if (op == NULL) {
        ddl__text_add(text, "a collective of group \"%s\" has ended, and a device copies the result", r->group->name);
        return;
    }
    const ddl_group *g = op->group;
    ddl__describe_call(g, &op->call, op->cached->plan.algorithm, text);
    ddl__text_add(text, ", operation %u of group \"%s\" (%d ranks), rank %d waits for", op->sequence, g->name, g->size,
                  g->rank);
    int32_t arrived = 1, named = 0, unknown = 0;
    for (int32_t i = 0; i < g->size; i++) {
        uint8_t code = op->answers != NULL ? op->answers[i].code : (uint8_t)DDL__NOT_ASKED;
        bool here = code == DDL__ARRIVED || code == DDL__PASSED, asked = code != DDL__NOT_ASKED;
        arrived += i != g->rank && here;
        unknown += i != g->rank && !asked;
        if (i != g->rank && !here && (asked || ddl__op_waits_for(op, i)) && named++ < 8) {
            ddl__text_add(text, "%s", named > 1 ? "," : "");
            ddl__explain_answer(op, i, text);
        }
    }
    if (named == 0) {
        ddl__text_add(text, " data of ranks that have arrived");
    }
    ddl__text_add(text, "; %d of %d %s arrived", arrived, g->size, unknown > 0 ? "are known to have" : "have");
}

/* Often enough that everybody has answered before a report or a deadline, however soon that is. */
static uint64_t ddl__ask_interval(const ddl_group *g) {
    uint64_t ns = DDL__ASK_AGAIN_NS;
    if (g->stall_ms > 0) {
        ns = DDL__MIN(ns, (uint64_t)g->stall_ms * DDL__NS_PER_MS / 4);
    }
    return g->timeout_ms > 0 ? DDL__MIN(ns, (uint64_t)g->timeout_ms * DDL__NS_PER_MS / 4) : ns;
}

static void ddl__coll_tick(ddl_context *c, ddl_request *r, uint64_t waited) {
    ddl__op *op = r->op;
    if (op == NULL) {
        return; /* nobody else is needed */
    }
    ddl_group *g = op->group;
    uint64_t now = ddl__now_ns();
    if (g->doubt_ns != 0 && now - g->doubt_ns > DDL__MISMATCH_NS) {
        char ours[160] = "something that it has forgotten";
        ddl__own_call(g, g->doubt_sequence, ours, sizeof ours);
        ddl__break_everywhere(c, g, DDL_ERR_MISMATCH,
                              "operation %u is different on two ranks: rank %d called %s, another "
                              "rank called something else and does not answer",
                              g->doubt_sequence, g->rank, ours);
        return;
    }
    for (int32_t i = 0; i < g->size; i++) {
        if (c->links[g->ranks[i]].life == DDL__LEFT && ddl__is_drained(g, i) && ddl__op_waits_for(op, i)) {
            ddl__break_everywhere(c, g, DDL_ERR_PEER,
                                  "rank %d has left the job (it called ddl_finalize) and takes no part "
                                  "in operation %u",
                                  i, op->sequence);
            return;
        }
    }
    uint64_t interval = ddl__ask_interval(g);
    if (waited > DDL__MIN(DDL__ASK_FIRST_NS, interval) && now - op->asked_ns > interval) {
        op->asked_ns = now;
        uint64_t stall = (uint64_t)g->stall_ms * DDL__NS_PER_MS, limit = (uint64_t)g->timeout_ms * DDL__NS_PER_MS;
        bool all = (g->stall_ms > 0 && waited > stall / 2) || (g->timeout_ms > 0 && waited > limit / 2);
        ddl__ask_members(c, op, all);
    }
}

static void ddl__coll_abandon(ddl_context *c, ddl_request *r) {
    ddl__op *op = r->op;
    if (op == NULL) {
        ddl__stage_leave(c, &r->stage);
        return;
    }
    char text[DDL__SENTENCE_BYTES - 256];
    ddl__text out = {text, sizeof text, 0};
    ddl__coll_explain(c, r, &out);
    ddl_group *g = op->group;
    ddl__op_abandon(c, op, DDL_ERR_TIMEOUT);
    ddl__break_everywhere(c, g, DDL_ERR_TIMEOUT, "rank %d gave up: %s", g->rank, text);
}

static int32_t ddl__coll_expect(ddl_context *c, ddl_request *r) {
    (void)c;
    const ddl__op *op = r->op;
    if (op == NULL) {
        return -1;
    }
    const ddl__cached *e = op->cached;
    uint32_t first = op->cursor < e->recv_count ? op->cursor : 0;
    for (uint32_t n = 0; n < e->recv_count && n < 16; n++) {
        uint32_t i = e->recvs[(first + n) % e->recv_count];
        if (!op->steps[i].arrived) {
            return op->group->ranks[ddl__op_step(op, i)->peer];
        }
    }
    return -1;
}

static const ddl__request_ops ddl__coll_ops = {ddl__coll_abandon, ddl__coll_explain, ddl__coll_tick, ddl__coll_expect,
                                               NULL};

#endif /* DDL_ENGINE_WATCH_H */

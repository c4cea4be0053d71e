/* coll, fifth part: agreement in spite of deaths, and the group of the survivors that stands on it.
 *
 * What it has to give is what MPI's ULFM calls agreement (Herault, Bouteiller, Bosilca et al., "Practical scalable
 * consensus for pseudo-synchronous distributed systems", SC'15): all who return have the same value, although ranks,
 * the coordinator too, die at any moment. This is their problem, not their tree: a star around the lowest living rank.
 *
 *     JOIN     member -> coordinator   my contribution, or the value that I have accepted, and who proposed it
 *     PROPOSE  coordinator -> all      when all who live have joined: the accepted value of the highest round, or, if
 *                                      nobody has accepted one, the contributions put together
 *     ACCEPT   member -> coordinator
 *     DECIDE   coordinator -> all      when all who live have accepted; passed on, once, by everybody who hears it
 *
 * A round is named by its coordinator. A member is in the round of the lowest rank that it does not know to be gone, so
 * its rounds only grow; it accepts proposals of its own round only. Why two ranks never decide differently: if c
 * decided v, all who were alive had accepted v in round c. The coordinator of a later round hears from all who are
 * alive then, each of them in round c or above, so the accepted value of the highest round that it adopts is v again,
 * by induction over rounds. The detector may be slow but must not be wrong: who is declared dead and lives is cut off
 * by everybody, finds the others dead and can at best form a minority. Why it ends: each death that matters moves
 * everybody who lives to a higher round; nobody waits for the dead. DECIDE is passed on so that a coordinator that dies
 * while it tells the result leaves nobody behind who would have to ask ranks that have long been computing again.
 *
 * Agreements of a group are numbered; a rank that gave up at its deadline takes up the same number when it calls again.
 * n messages for each step and n * n for the passing on: this runs once per failure or checkpoint, not per
 * iteration. */
#ifndef DDL_COLL_AGREE_H
#define DDL_COLL_AGREE_H

#include "groups.h"

enum { DDL__AGREE_JOIN = 1, DDL__AGREE_PROPOSE = 2, DDL__AGREE_ACCEPT = 3, DDL__AGREE_DECIDE = 4,
       DDL__AGREE_GO_ON = 5 /* no part of an agreement: see ddl__agree_go_on */ };
enum { DDL__AGREE_FIXED_BYTES = 18 }; /* of a frame, before the bit per rank */

/* What is agreed on. A number of the sequence that ranks use for different purposes ends in DDL_ERR_MISMATCH. */
typedef enum ddl__purpose {
    DDL__AGREE_FLAG = 1,   /* ddl_agree */
    DDL__AGREE_SHRINK = 2, /* who is left, and the id of their group */
    DDL__AGREE_MADE = 3,   /* all have made it, or not */
    DDL__AGREE_GROW = 4,   /* who is left, and the id of the group that newcomers join: see grow.h */
    DDL__AGREE_GROWN = 5   /* all have made it, or not */
} ddl__purpose;

/* What a survivor has of the new group; the agreement keeps what all have. DDL__MADE_TRIED: that it came so far, in
 * ddl_group.shrunk_parts only. */
enum { DDL__MADE_NOT = 0, DDL__MADE_GROUP = 1, DDL__MADE_NATIVE = 2 /* DDL__NATIVE_HOST, and the next bits, so often */,
       DDL__MADE_TRIED = 1 << 16 };

#define DDL__AGREE_PAUSE_NS (1 * DDL__NS_PER_S)

typedef struct ddl__value {
    uint8_t purpose;
    int32_t verdict; /* a ddl_status */
    uint32_t flag, id;
    uint8_t *gone; /* one bit per rank of the group: dead, or left */
} ddl__value;

/* What the coordinator knows of one member. */
typedef struct ddl__voter {
    bool joined, accepted;
    uint8_t purpose;
    uint32_t flag;
} ddl__voter;

typedef struct ddl__agreement {
    struct ddl__agreement *next;
    uint32_t sequence;
    int32_t joined;   /* the round that this rank is in, -1: not called yet */
    int32_t accepted; /* the round whose proposal it has accepted, -1: none */
    bool proposed, decided;
    uint64_t joined_ns;
    ddl__value mine, value; /* own contribution; accepted, then decided */
    int32_t best;           /* the highest round of an accepted value that a JOIN brought, -1: none */
    ddl__value heard;       /* that value */
    uint8_t *gone_of;       /* coordinator: whom each rank takes for gone, a bitmap each; NULL until the first JOIN */
    ddl__voter voters[];    /* by group rank; behind them the three bitmaps */
} ddl__agreement;

static size_t ddl__agree_bytes(const ddl_group *g) { return ((size_t)g->size + 7) / 8; }

static bool ddl__bit(const uint8_t *bits, int32_t i) { return (bits[i / 8] >> (i % 8) & 1) != 0; }

static void ddl__bit_set(uint8_t *bits, int32_t i) { bits[i / 8] = (uint8_t)(bits[i / 8] | 1u << (i % 8)); }

static ddl__agreement *ddl__agreement_find(const ddl_group *g, uint32_t sequence) {
    ddl__agreement *a = g->agreements;
    while (a != NULL && a->sequence != sequence) {
        a = a->next;
    }
    return a;
}

static void ddl__agreement_free(ddl__base *base, ddl__agreement *a) {
    ddl__free(base, a->gone_of);
    ddl__free(base, a);
}

/* Finds or makes it. The one before stays, to tell who asks late; older ones go. */
static ddl__agreement *ddl__agreement_get(ddl_group *g, uint32_t sequence) {
    ddl__base *base = &g->context->base;
    ddl__agreement *a = ddl__agreement_find(g, sequence);
    if (a != NULL) {
        return a;
    }
    size_t bits = ddl__agree_bytes(g), fixed = sizeof *a + (size_t)g->size * sizeof a->voters[0];
    a = ddl__alloc(base, fixed + 3 * bits);
    if (a == NULL) {
        return NULL;
    }
    a->sequence = sequence;
    a->joined = a->accepted = a->best = -1;
    a->mine.gone = (uint8_t *)a + fixed;
    a->value.gone = a->mine.gone + bits;
    a->heard.gone = a->value.gone + bits;
    a->next = g->agreements;
    g->agreements = a;
    for (ddl__agreement **at = &a->next; *at != NULL;) {
        ddl__agreement *old = *at;
        if (old->sequence + 1 < g->agree_sequence) {
            *at = old->next;
            ddl__agreement_free(base, old);
        } else {
            at = &old->next;
        }
    }
    return a;
}

static void ddl__grow_drop(ddl_group *g);

/* What a call left at its deadline between its two agreements is not taken up any more. */
static void ddl__agree_drop(ddl_group *g) {
    ddl__grow_drop(g);
    ddl__form_undo(g->shrunk);
    g->shrunk = NULL;
    g->shrunk_parts = DDL__MADE_NOT;
}

static void ddl__agree_group_free(ddl_group *g) {
    ddl__agree_drop(g);
    while (g->agreements != NULL) {
        ddl__agreement *a = g->agreements;
        g->agreements = a->next;
        ddl__agreement_free(&g->context->base, a);
    }
}

static void ddl__value_copy(const ddl_group *g, ddl__value *to, const ddl__value *from) {
    uint8_t *gone = to->gone;
    memcpy(gone, from->gone, ddl__agree_bytes(g));
    *to = *from;
    to->gone = gone;
}

/* >>frames
 *     kind u8, purpose u8, round u32, verdict u32, flag u32, id u32, a bit per rank; `sequence` is the agreement's */

static void ddl__agree_tell(ddl_group *g, int32_t rank, uint32_t sequence, uint8_t kind, int32_t round,
                            const ddl__value *value) {
    size_t bytes = DDL__AGREE_FIXED_BYTES + ddl__agree_bytes(g);
    uint8_t *payload = ddl__scratch_get(g->context, bytes);
    if (payload == NULL) {
        return; /* as lost: whoever misses it asks again */
    }
    ddl__writer w = ddl__writer_of(payload, bytes);
    ddl__put_u8(&w, kind);
    ddl__put_u8(&w, value->purpose);
    ddl__put_u32(&w, (uint32_t)round);
    ddl__put_u32(&w, (uint32_t)value->verdict);
    ddl__put_u32(&w, value->flag);
    ddl__put_u32(&w, value->id);
    ddl__put_bytes(&w, value->gone, ddl__agree_bytes(g));
    ddl__frame f = {.type = DDL__FRAME_AGREE, .group = g->id, .epoch = g->epoch, .sequence = sequence};
    ddl__tell(g->context, g->ranks[rank], f, payload, w.at);
    ddl__scratch_put(g->context, payload);
}

static void ddl__agree_tell_all(ddl_group *g, const ddl__agreement *a, uint8_t kind, int32_t round) {
    for (int32_t i = 0; i < g->size; i++) {
        if (i != g->rank && !ddl__is_gone(g, i)) {
            ddl__agree_tell(g, i, a->sequence, kind, round, &a->value);
        }
    }
}

static void ddl__agree_decide(ddl_group *g, ddl__agreement *a) {
    a->decided = true;
    ddl__agree_tell_all(g, a, DDL__AGREE_DECIDE, g->rank);
    ddl__changed(g->context);
}

static void ddl__agree_take_join(ddl_group *g, ddl__agreement *a, int32_t from, int32_t round, const ddl__value *v) {
    size_t bits = ddl__agree_bytes(g);
    if (a->gone_of == NULL) {
        a->gone_of = ddl__alloc_array(&g->context->base, (size_t)g->size, bits);
        if (a->gone_of == NULL) {
            return; /* as lost: it asks again */
        }
    }
    a->voters[from] = (ddl__voter){.joined = true, .accepted = a->voters[from].accepted, .purpose = v->purpose,
                                   .flag = v->flag};
    if (a->proposed) { /* it asks again: our proposal, or its answer, was lost to failing memory */
        a->voters[from].accepted = a->voters[from].accepted || round == g->rank;
        if (!a->voters[from].accepted) {
            ddl__agree_tell(g, from, a->sequence, DDL__AGREE_PROPOSE, g->rank, &a->value);
        }
    } else if (round > a->best) {
        a->best = round;
        ddl__value_copy(g, &a->heard, v);
    } else {
        memcpy(a->gone_of + (size_t)from * bits, v->gone, bits);
    }
}

/* One frame, its form checked. A member's agreement is at most one ahead of ours: it needed us for the one before. */
static void ddl__agree_heard(ddl_group *g, int32_t from, uint32_t sequence, uint8_t kind, int32_t round,
                             const ddl__value *v) {
    int32_t ahead = (int32_t)(sequence - g->agree_sequence);
    ddl__agreement *a = ahead >= 1 && ahead <= 2 ? ddl__agreement_get(g, sequence) : ddl__agreement_find(g, sequence);
    if (a == NULL) {
        return; /* too old, or no memory: the sender asks again */
    }
    if (a->decided) {
        if (kind == DDL__AGREE_JOIN) {
            ddl__agree_tell(g, from, sequence, DDL__AGREE_DECIDE, g->rank, &a->value);
        }
        return;
    }
    switch (kind) {
    case DDL__AGREE_JOIN:
        ddl__agree_take_join(g, a, from, round, v);
        break;
    case DDL__AGREE_PROPOSE:
        if (from == a->joined) {
            a->accepted = from;
            ddl__value_copy(g, &a->value, v);
            ddl__agree_tell(g, from, sequence, DDL__AGREE_ACCEPT, from, &a->value);
        }
        break;
    case DDL__AGREE_ACCEPT:
        a->voters[from].accepted = a->proposed && round == g->rank;
        break;
    default:
        ddl__value_copy(g, &a->value, v);
        ddl__agree_decide(g, a);
    }
}

/* Tells everybody that this rank, which knows of a death, has left the group's operations for an agreement on who is
 * left. Of its messages some may have met the dead rank alone, so that others have not noticed, and wait for it. This
 * is MPI's revoke (ULFM: MPI_Comm_revoke), without a call of its own.
 *     kind u8, whose death u32 (rank of the world), link u8 (only a link to it was lost), cause string; `sequence` is
 *     the agreement's */
static void ddl__agree_go_on(ddl_group *g) {
    uint8_t payload[1 + 4 + 1 + 2 + sizeof g->cause];
    if (g->cause[0] == 0) {
        return;
    }
    ddl__writer w = ddl__writer_of(payload, sizeof payload);
    ddl__put_u8(&w, DDL__AGREE_GO_ON);
    ddl__put_u32(&w, (uint32_t)g->cause_rank);
    ddl__put_u8(&w, g->cause_link);
    ddl__put_string(&w, g->cause);
    g->flows[g->rank].gone_on = g->agree_sequence + 1;
    for (int32_t i = 0; i < g->size; i++) {
        if (i != g->rank && !ddl__is_gone(g, i)) {
            ddl__frame f = {.type = DDL__FRAME_AGREE, .group = g->id, .epoch = g->epoch,
                            .sequence = g->agree_sequence + 1};
            ddl__tell(g->context, g->ranks[i], f, payload, w.at); /* lost without memory: then deadlines are left */
        }
        if (i != g->rank && g->flows[i].gone_on == g->flows[g->rank].gone_on) { /* it will not keep them, either */
            ddl__p2p_drop_offers(g, i);
        }
    }
}

/* The first death that this rank hears of may be this one. Who has been cut off does not take the word of the other
 * side, which calls this one dead: it finds out itself, and says the same as its host. */
static ddl_status ddl__on_go_on(ddl_group *g, int32_t from, uint32_t sequence, ddl__reader *r) {
    ddl_context *c = g->context;
    char cause[sizeof g->cause];
    uint32_t rank = ddl__get_u32(r);
    bool link_lost = ddl__get_u8(r) != 0;
    ddl__get_string(r, cause, sizeof cause);
    if (r->bad || cause[0] == 0 || rank >= (uint32_t)c->world_size) {
        return DDL_ERR_CORRUPT;
    }
    if (ddl__knows_better(c, (int32_t)rank, g->ranks[from], link_lost)) {
        c->next_look_ns = 0;
        return DDL_OK;
    }
    g->flows[from].gone_on = sequence;
    if (g->cause[0] == 0) {
        memcpy(g->cause, cause, sizeof cause);
        g->cause_rank = (int32_t)rank;
        g->cause_link = link_lost;
    }
    ddl__group_break(g, DDL_ERR_PEER, "%s", g->cause);
    if (g->flows[g->rank].gone_on == sequence) {
        ddl__p2p_drop_offers(g, from);
    }
    ddl__changed(c);
    return DDL_OK;
}

static ddl_status ddl__on_agree(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl_group *g = ddl__frame_group(c, peer, f);
    if (g == NULL) {
        return DDL_OK;
    }
    ddl__reader r = ddl__reader_of(payload, f->bytes);
    uint8_t kind = ddl__get_u8(&r);
    if (kind == DDL__AGREE_GO_ON) {
        return ddl__on_go_on(g, g->rank_of[peer], (uint32_t)f->sequence, &r);
    }
    ddl__value v = {.purpose = ddl__get_u8(&r)};
    int32_t round = (int32_t)ddl__get_u32(&r);
    v.verdict = (int32_t)ddl__get_u32(&r);
    v.flag = ddl__get_u32(&r);
    v.id = ddl__get_u32(&r);
    v.gone = (uint8_t *)(uintptr_t)ddl__get_view(&r, ddl__agree_bytes(g)); /* it is only read */
    if (r.bad || v.verdict > 0 || kind < DDL__AGREE_JOIN || kind > DDL__AGREE_DECIDE || round < -1 ||
        round >= g->size) {
        return DDL_ERR_CORRUPT;
    }
    ddl__agree_heard(g, g->rank_of[peer], (uint32_t)f->sequence, kind, round, &v);
    return DDL_OK;
}

/* >>rounds */

/* The value of a first round: the contributions of all who live. Who joined and was cut off since finds everybody else
 * dead: it takes nobody with it. */
static void ddl__agree_put_together(ddl_group *g, ddl__agreement *a) {
    ddl__value *v = &a->value;
    size_t bits = ddl__agree_bytes(g);
    ddl__value_copy(g, v, &a->mine);
    for (int32_t i = 0; i < g->size; i++) {
        if (ddl__is_gone(g, i)) {
            ddl__bit_set(v->gone, i);
        } else if (i != g->rank) {
            for (size_t at = 0; at < bits; at++) {
                v->gone[at] |= a->gone_of[(size_t)i * bits + at];
            }
            v->flag &= a->voters[i].flag;
            v->verdict = a->voters[i].purpose != v->purpose ? DDL_ERR_MISMATCH : v->verdict;
        }
    }
    bool makes = v->purpose == DDL__AGREE_SHRINK || v->purpose == DDL__AGREE_GROW;
    v->id = makes ? ddl__group_id(g->context) : 0;
}

static bool ddl__agree_all(const ddl_group *g, const ddl__agreement *a, bool accepted) {
    for (int32_t i = 0; i < g->size; i++) {
        const ddl__voter *v = &a->voters[i];
        if (i != g->rank && !(accepted ? v->accepted : v->joined) && !ddl__is_gone(g, i)) {
            return false;
        }
    }
    return true;
}

static void ddl__agree_lead(ddl_group *g, ddl__agreement *a) {
    if (!a->proposed && ddl__agree_all(g, a, false)) {
        a->proposed = true;
        if (a->accepted >= 0 && a->accepted >= a->best) {
            /* our own accepted value is the newest */
        } else if (a->best >= 0) {
            ddl__value_copy(g, &a->value, &a->heard);
        } else {
            ddl__agree_put_together(g, a);
        }
        a->accepted = g->rank;
        ddl__agree_tell_all(g, a, DDL__AGREE_PROPOSE, g->rank);
    }
    if (a->proposed && ddl__agree_all(g, a, true)) {
        ddl__agree_decide(g, a);
    }
}

/* Goes to the round of the lowest rank that lives. Joining again after a while mends what failing memory has lost. */
static void ddl__agree_step(ddl_group *g, ddl__agreement *a) {
    int32_t lowest = 0;
    while (ddl__is_gone(g, lowest)) {
        lowest++;
    }
    uint64_t now = ddl__now_ns();
    if (lowest == g->rank) {
        a->joined = lowest;
        ddl__agree_lead(g, a);
    } else if (lowest != a->joined || now - a->joined_ns > DDL__AGREE_PAUSE_NS) {
        a->joined = lowest;
        a->joined_ns = now;
        ddl__agree_tell(g, lowest, a->sequence, DDL__AGREE_JOIN, a->accepted,
                        a->accepted >= 0 ? &a->value : &a->mine);
    }
}

/* >>waiting */

typedef struct ddl__agree_wait {
    ddl_group *group;
    ddl__agreement *agreement;
    uint64_t start_ns, report_ns;
} ddl__agree_wait;

static void ddl__grow_tend(ddl_group *g);

static bool ddl__agree_done(ddl_context *c, void *arg) {
    ddl__agree_wait *w = arg;
    ddl__grow_tend(w->group);
    if (!w->agreement->decided && !c->finalized && !c->aborted) {
        ddl__agree_step(w->group, w->agreement);
    }
    return w->agreement->decided || c->finalized || c->aborted;
}

static int32_t ddl__agree_expect(ddl_context *c, void *arg) {
    (void)c;
    const ddl__agree_wait *w = arg;
    return w->agreement->joined >= 0 && w->agreement->joined != w->group->rank
               ? w->group->ranks[w->agreement->joined]
               : -1;
}

/* Who is missing: the coordinator knows; the others know only the coordinator. */
static void ddl__agree_explain(const ddl__agree_wait *w, const char *what, ddl__text *text) {
    const ddl_group *g = w->group;
    const ddl__agreement *a = w->agreement;
    ddl__text_add(text, "%s on group \"%s\" (%d ranks), rank %d waits for", what, g->name, g->size, g->rank);
    if (a->joined != g->rank) {
        ddl__text_add(text, " rank %d, which collects what all say", a->joined);
        return;
    }
    int32_t named = 0;
    for (int32_t i = 0; i < g->size; i++) {
        const ddl__voter *v = &a->voters[i];
        if (i != g->rank && !(a->proposed ? v->accepted : v->joined) && !ddl__is_gone(g, i) && named++ < 8) {
            ddl__text_add(text, " rank %d", i);
        }
    }
}

static void ddl__agree_tick(ddl_context *c, void *arg, uint64_t now) {
    ddl__agree_wait *w = arg;
    int64_t stall_ms = w->group->stall_ms;
    if (stall_ms > 0 && now - w->report_ns > (uint64_t)stall_ms * DDL__NS_PER_MS) {
        w->report_ns = now;
        char line[DDL__SENTENCE_BYTES];
        ddl__text text = {line, sizeof line, 0};
        ddl__agree_explain(w, c->doing, &text);
        ddl__log(&c->base, DDL_LOG_WARN, "stalled for %.1f s: %s", (double)(now - w->start_ns) / 1e9, line);
    }
}

static ddl_status ddl__agree_undecided(const ddl__agree_wait *w) {
    ddl_context *c = w->group->context;
    char line[DDL__SENTENCE_BYTES - 200];
    ddl__text text = {line, sizeof line, 0};
    if (c->aborted) {
        return ddl__error(c, DDL_ERR_ABORTED, "%s", c->abort_text);
    }
    if (c->finalized) {
        return ddl__error(c, DDL_ERR_STATE, "%s: the context was finalized meanwhile", c->doing);
    }
    ddl__agree_explain(w, c->doing, &text);
    return ddl__error(c, DDL_ERR_TIMEOUT,
                      "%s; the deadline passed after %.1f s. Every rank that lives must call; calling again "
                      "takes it up where it was",
                      line, (double)(ddl__now_ns() - w->start_ns) / 1e9);
}

/* The next agreement of the sequence with this rank's part; NULL without memory. */
static ddl__agreement *ddl__agree_begin(ddl_group *g, ddl__purpose purpose, uint32_t flag) {
    ddl__agreement *a = ddl__agreement_get(g, g->agree_sequence + 1);
    const ddl__agreement *before = ddl__agreement_find(g, g->agree_sequence);
    if (a == NULL) {
        return NULL;
    }
    a->mine.purpose = (uint8_t)purpose;
    a->mine.flag = flag;
    a->joined_ns = 0;
    for (int32_t i = 0; i < g->size; i++) {
        if (ddl__is_gone(g, i) || (before != NULL && ddl__bit(before->value.gone, i))) {
            ddl__bit_set(a->mine.gone, i);
        }
    }
    return a;
}

/* Agrees on one number of the sequence. *out is valid until the group's next but one. */
static ddl_status ddl__agree_once(ddl_group *g, ddl__purpose purpose, uint32_t flag, uint64_t deadline,
                                  ddl__agreement **out) {
    ddl_context *c = g->context;
    ddl__agreement *a = ddl__agree_begin(g, purpose, flag);
    if (a == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "%s: no memory", c->doing);
    }
    ddl__agree_wait state = {.group = g, .agreement = a, .start_ns = ddl__now_ns()};
    state.report_ns = state.start_ns;
    ddl__wait w = {.done = ddl__agree_done,
                   .tick = ddl__agree_tick,
                   .expect = ddl__agree_expect,
                   .arg = &state,
                   .deadline = deadline};
    ddl__wait_for(c, &w);
    if (!a->decided) {
        return ddl__agree_undecided(&state);
    }
    ddl__flush_notes(c);
    g->agree_sequence = a->sequence;
    *out = a;
    return DDL_OK;
}

/* Agrees for a purpose. A number that this rank had left at its deadline, and that was decided for another purpose
 * meanwhile, is passed by. */
static ddl_status ddl__agree_until(ddl_group *g, ddl__purpose purpose, uint32_t flag, uint64_t deadline,
                                   ddl__agreement **out) {
    ddl_context *c = g->context;
    do {
        DDL__TRY(ddl__agree_once(g, purpose, flag, deadline, out));
        if ((*out)->value.verdict < 0) {
            return ddl__error(c, (ddl_status)(*out)->value.verdict,
                              "%s on group \"%s\": its ranks called different ones of ddl_agree, ddl_group_shrink "
                              "and ddl_group_grow",
                              c->doing, g->name);
        }
        if (ddl__bit((*out)->value.gone, g->rank)) {
            return ddl__error(c, DDL_ERR_QUORUM,
                              "%s on group \"%s\": the others agreed that this rank (%d) is dead; it "
                              "cannot take part any more",
                              c->doing, g->name, g->rank);
        }
    } while ((*out)->value.purpose != purpose);
    return DDL_OK;
}

static ddl_status ddl__agree_on(ddl_group *g, ddl__purpose purpose, uint32_t flag, ddl__agreement **out) {
    return ddl__agree_until(g, purpose, flag, ddl__deadline(ddl__now_ns(), g->timeout_ms), out);
}

/* >>public */

/* One thread at a time; and the context must not go away under the wait. */
static ddl_status ddl__agree_enter(ddl_group *g, const char *what) {
    ddl_context *c = g->context;
    if (g->agreeing) {
        return ddl__error(c, DDL_ERR_STATE,
                          "%s: another thread is in ddl_agree, ddl_group_shrink or ddl_group_grow on group \"%s\"",
                          what, g->name);
    }
    if (c->aborted) {
        return ddl__error(c, DDL_ERR_ABORTED, "%s", c->abort_text);
    }
    c->doing = what;
    g->agreeing = true;
    g->outstanding++; /* it is not freed while we wait */
    return DDL_OK;
}

static void ddl__agree_leave(ddl_group *g) {
    g->context->doing = NULL;
    g->agreeing = false;
    g->outstanding--;
}

/* DDL_ERR_PEER when ranks are gone that the agreement before did not know of. */
static ddl_status ddl__agree_news(ddl_group *g, const ddl__agreement *a) {
    const ddl__agreement *before = ddl__agreement_find(g, a->sequence - 1);
    char list[128];
    ddl__text text = {list, sizeof list, 0};
    for (int32_t i = 0; i < g->size; i++) {
        if (ddl__bit(a->value.gone, i) && !(before != NULL && ddl__bit(before->value.gone, i))) {
            ddl__text_add(&text, " %d", i);
        }
    }
    if (text.used == 0) {
        return DDL_OK;
    }
    return ddl__error(g->context, DDL_ERR_PEER, "ddl_agree on group \"%s\": all agree that these ranks are gone:%s%s%s",
                      g->name, list, g->cause[0] != 0 ? ". " : "", g->cause);
}

DDL_API ddl_status ddl_agree(ddl_group *group, int32_t *flag) {
    if (flag == NULL) {
        return ddl__refuse_group(group, "ddl_agree", "flag");
    }
    DDL__TRY(ddl__enter_group(group, "ddl_agree"));
    ddl_context *c = group->context;
    ddl__agreement *a;
    ddl_status status = ddl__agree_enter(group, "ddl_agree");
    if (status == DDL_OK) {
        ddl__agree_drop(group);
        status = ddl__agree_on(group, DDL__AGREE_FLAG, (uint32_t)*flag, &a);
        if (status == DDL_OK) {
            *flag = (int32_t)a->value.flag;
            status = ddl__agree_news(group, a);
        }
        ddl__agree_leave(group);
    }
    ddl__unlock(c);
    return status;
}

/* The local part of the survivors' group; NULL without memory. */
static ddl_group *ddl__shrink_local(ddl_group *g, const ddl__value *v, int32_t count) {
    ddl_context *c = g->context;
    bool usable = v->id != 0 && ddl__group_find(c, v->id) == NULL;
    int32_t *ranks = usable ? ddl__alloc_array(&c->base, (size_t)count, sizeof *ranks) : NULL;
    if (ranks == NULL) {
        return NULL;
    }
    int32_t at = 0;
    for (int32_t i = 0; i < g->size; i++) {
        if (!ddl__bit(v->gone, i)) {
            ranks[at++] = i;
        }
    }
    char name[64];
    snprintf(name, sizeof name, "%.*s@%u", (int)DDL__MIN(strcspn(g->name, "@"), 48u), g->name, g->epoch + 1);
    ddl_group *made = ddl__form_local(g, ranks, count, v->id, name);
    ddl__free(&c->base, ranks);
    if (made != NULL) {
        made->epoch = g->epoch + 1;
    }
    return made;
}

static int32_t ddl__count_left(const ddl_group *g, const uint8_t *gone) {
    int32_t left = 0;
    for (int32_t i = 0; i < g->size; i++) {
        left += !ddl__bit(gone, i);
    }
    return left;
}

/* Makes it, and keeps it at hand. */
static void ddl__shrink_begin(ddl_group *g, const ddl__value *v) {
    g->shrunk = ddl__shrink_local(g, v, ddl__count_left(g, v->gone));
    g->shrunk_parts = DDL__MADE_TRIED;
    if (g->shrunk != NULL) {
        g->shrunk_parts |= DDL__MADE_GROUP | (uint32_t)ddl__native_open(g->shrunk) * DDL__MADE_NATIVE;
    }
}

/* More than half of the group must be left after an agreement on who is. */
static ddl_status ddl__agree_quorum(const ddl_group *g, const ddl__agreement *a) {
    int32_t left = ddl__count_left(g, a->value.gone);
    if (2 * left > g->size) {
        return DDL_OK;
    }
    return ddl__error(g->context, DDL_ERR_QUORUM,
                      "%s: %d of the %d ranks of group \"%s\" are left, which is not more than half: others may go on "
                      "elsewhere. Start the job again from a checkpoint",
                      g->context->doing, left, g->size, g->name);
}

/* Agree on who is left, make their group, agree that all have made it: nobody may use it before. If somebody died
 * meanwhile, once more; all see the same agreements and so take the same turns. */
static ddl_status ddl__shrink(ddl_group *g, ddl_group **out) {
    ddl_context *c = g->context;
    for (;;) {
        ddl__agreement *a = ddl__agreement_find(g, g->agree_sequence);
        bool again = a != NULL && (g->shrunk_parts & DDL__MADE_TRIED) != 0;
        if (!again) {
            DDL__TRY(ddl__agree_on(g, DDL__AGREE_SHRINK, 1, &a));
            DDL__TRY(ddl__agree_quorum(g, a));
            ddl__shrink_begin(g, &a->value);
        }
        int32_t left = ddl__count_left(g, a->value.gone);
        ddl_status status = ddl__agree_on(g, DDL__AGREE_MADE, g->shrunk_parts & ~(uint32_t)DDL__MADE_TRIED, &a);
        if (status == DDL_ERR_TIMEOUT) {
            return status; /* the next call takes it up: others may have decided by then */
        }
        ddl_group *made = g->shrunk;
        g->shrunk = NULL;
        g->shrunk_parts = DDL__MADE_NOT;
        bool all_have_it = status == DDL_OK && (a->value.flag & DDL__MADE_GROUP) != 0;
        if (made != NULL && status == DDL_OK) {
            ddl__native_close(made, (int32_t)(a->value.flag / DDL__MADE_NATIVE));
        }
        if (all_have_it && ddl__count_left(g, a->value.gone) == left) {
            *out = made;
            return DDL_OK;
        }
        ddl__form_undo(made);
        DDL__TRY(status);
        if (!all_have_it) {
            return ddl__error(c, DDL_ERR_NOMEM,
                              "ddl_group_shrink: one of the ranks that are left has no memory for the new "
                              "group");
        }
    }
}

DDL_API ddl_status ddl_group_shrink(ddl_group *group, ddl_group **out_group) {
    if (out_group == NULL) {
        return ddl__refuse_group(group, "ddl_group_shrink", "out_group");
    }
    *out_group = NULL;
    DDL__TRY(ddl__enter_group(group, "ddl_group_shrink"));
    ddl_context *c = group->context;
    ddl_status status = ddl__agree_enter(group, "ddl_group_shrink");
    if (status == DDL_OK) {
        ddl__grow_drop(group);
        ddl__agree_go_on(group);
        status = ddl__shrink(group, out_group);
        ddl__agree_leave(group);
    }
    ddl__unlock(c);
    return status;
}

#endif /* DDL_COLL_AGREE_H */

/* group: an ordered set of ranks, what is under way in it, and why it is broken when it is.
 * It must not know how messages are matched or plans are run; p2p and engine keep their lists here. */
#ifndef DDL_GROUP_H
#define DDL_GROUP_H

#include "../tensor.h"

enum {
    DDL__GROUP_MAGIC = 0x67726f75,
    DDL__GROUP_FREED = 0x66726565,
    DDL__TOMBSTONES = 64,         /* freed handles that are still known as such */
    DDL__WINDOW_BYTES = 128 * 1024, /* of eager data to one peer that it has not taken, per group and kind */
    /* An eager part of a collective counts as its bytes and this: so that a peer is at most half as many collectives
     * behind as are recorded, and what it calls can still be compared with what was called here. */
    DDL__AHEAD_BYTES = 2 * DDL__WINDOW_BYTES / DDL__RECORDS
};

/* The other side of one peer in one group: how far it is, and how much of ours it may not have taken yet. Bounds what
 * an early sender can make a late receiver store. */
typedef struct ddl__toward {
    uint32_t started;    /* newest collective of the peer that we know it has started */
    /* bytes of eager data for collectives beyond `started`: the older half of the window, the newer */
    uint32_t ahead[2];
    uint32_t ahead_last[2]; /* newest collective in each half */
    uint32_t wanted;        /* the peer asked to be told when we start this collective, */
    bool wants;             /* which we have not done */
    uint32_t gone_on;       /* the agreement to which it (or this rank itself) went on after a death; 0: to none */
    uint32_t p2p_out;    /* eager message bytes that the peer has not said it took; */
    uint32_t p2p_large;  /* those of one that is too large for the window, and stands beside it; 0: none */
    uint32_t p2p_in;     /* taken since we last said so */
    struct ddl__step_state *held_first, *held_last; /* sends that wait for the peer to catch up: see engine */
} ddl__toward;

/* bench/check.c measures what the mismatch check and the flight recorder cost, by a build without them. Nobody else
 * defines the macro. */
#ifdef DDL__BENCH_NO_CHECK
enum { DDL__CHECKS = 0 };
#else
enum { DDL__CHECKS = 1 };
#endif

/* What runs collectives of the group by itself: see engine/native.h. */
typedef struct ddl__native {
    const ddl_transport *table;
    void *self, *set; /* set NULL: nothing does */
    uint64_t sequence; /* of its newest operation */
} ddl__native;

/* Calls that went the short way (coll/fast.h) and are not in the counters yet; they are all alike. */
typedef struct ddl__pending {
    uint64_t runs, ns;
    uint64_t bytes; /* of each */
    const char *algorithm;
} ddl__pending;

/* What a peer said it is calling, before we have called that ourselves. */
typedef struct ddl__announced {
    uint32_t sequence;
    int32_t peer;
    uint64_t call_hash, signature;
    char call[160];
} ddl__announced;

enum { DDL__MARKS = 4 }; /* of messages that a call begins on a stream; more are marked with the lock */

struct ddl_group {
    uint32_t magic;
    uint32_t id, epoch;
    int32_t rank, size;
    int32_t *ranks;   /* world ranks, in group order; world_size: one that is dead, whose rank another process has */
    int32_t *rank_of; /* by world rank, -1: not a member; also of world_size */
    int32_t *host_of; /* by group rank, hosts numbered by first appearance */
    ddl_context *context;
    ddl_group *next;
    char name[64];

    int64_t timeout_ms, stall_ms;
    ddl__tuning tuning;
    int64_t *packed; /* 2 * size: offsets of v-forms that the caller left to us */
    bool user_holds;
    uint32_t buried; /* its number among the freed groups, from 1 */
    uint32_t settings_version; /* cached plans of older settings are not used */

    ddl_status broken; /* DDL_OK, or what all collectives return from now on */
    char broken_text[DDL__SENTENCE_BYTES];

    ddl__toward *flows; /* by group rank */
    ddl_request *posted_first, *posted_last;
    struct ddl__unexpected *unexpected_first, *unexpected_last;
    uint64_t unexpected_bytes;
    int32_t outstanding; /* requests that are not freed */

    uint32_t sequence; /* of the newest collective that was started */
    uint64_t
        signature;     /* and its signature. It covers all calls before: whoever once called something else, and did not
                         * need anybody's answer for it, cannot complete a later call with the others */
    int32_t wants;     /* flows of which somebody waits for us to start one */
    struct ddl__op *ops;            /* running */
    struct ddl__early *early;       /* frames of collectives that this rank has not started */
    struct ddl__cached *cache;      /* plans */
    ddl__native native;
    struct ddl__fast *fast; /* see coll/fast.h */
    ddl__pending pending;
    ddl__announced announced;
    uint64_t doubt_ns;       /* since when it is known that a peer's call differs from ours; 0: it is not */
    uint32_t doubt_sequence; /* which call */
    uint64_t glanced_ns;     /* when a call on this group last looked for what had come */
    uint64_t fast_ns;        /* when the last one that went the short way began */
    ddl__flight *records; /* DDL__RECORDS */
    ddl__page_group *page; /* in which they are; NULL: in memory of their own */
    uint32_t shown; /* the last that was written while the records are */
    uint32_t agree_sequence; /* of the newest agreement that has ended here */
    bool agreeing;
    uint64_t slow_told[DDL_ALL_TO_ALLV + 1]; /* by kind: of which powers of two of bytes one was slow and reported */
    struct ddl__agreement *agreements;
    struct ddl__grow *grow; /* while newcomers are taken in, and after a call that was left at its deadline in GROWN */
    ddl_group *shrunk; /* likewise in MADE: the group of the survivors */
    uint32_t shrunk_parts;
    bool admitted;          /* a newcomer's: a member has said that the group is there */

    int32_t deaths, deaths_probed; /* among its ranks; of which probes of any rank were told */
    char cause[256]; /* the first death among its ranks: what all errors that come of it say; "" for none */
    int32_t cause_rank; /* of the world: whose death */
    bool cause_link;    /* only a link to it was lost: DDL__DEAD_LINK */

    ddl__native device_native;  /* for tensors on devices */
    bool straight;              /* all ranks reach devices of all others without their hosts */
    bool folds;                 /* and all these devices reduce */
    bool pulled;                /* all ranks read each other's large messages (DDL_TRANSPORT_PULLS), as all know */
    ddl__device *stream_device; /* NULL: operations are ordered on no stream */
    void *stream;
    void *marks[DDL__MARKS]; /* events on the stream for what the call that is in here begins: ddl__enter_ordered */
    int32_t mark_count;
};

typedef struct ddl__groups {
    ddl_group *first; /* linked by next, those that were freed included: a handle that is used after free is told so */
    uint32_t allocated; /* ids this rank has given out as leader */
    uint32_t buried;
} ddl__groups;

static void ddl__p2p_rank_dead(ddl_group *g, int32_t rank);
static void ddl__ops_fail_all(ddl_group *g);
static void ddl__p2p_group_free(ddl_group *g);
static void ddl__engine_group_free(ddl_group *g);
static void ddl__native_close(ddl_group *g, int32_t keep);
static void ddl__agree_group_free(ddl_group *g);

/* >>making */

static ddl_group *ddl__group_find(ddl_context *c, uint32_t id) {
    for (ddl_group *g = c->groups->first; g != NULL; g = g->next) {
        if (g->id == id && g->magic == DDL__GROUP_MAGIC) {
            return g;
        }
    }
    return NULL;
}

static void ddl__group_release(ddl_group *g) {
    ddl__base *base = &g->context->base;
    ddl__free(base, g->ranks);
    ddl__free(base, g->rank_of);
    ddl__free(base, g->host_of);
    ddl__free(base, g->flows);
    ddl__free(base, g->packed);
    if (g->page != NULL) {
        ddl__page_group_close(g->context, g->page);
    } else {
        ddl__free(base, g->records);
    }
    g->page = NULL;
    g->records = NULL;
    g->packed = NULL;
    g->ranks = g->rank_of = g->host_of = NULL;
    g->flows = NULL;
}

static void ddl__group_number_hosts(ddl_group *g) {
    ddl_context *c = g->context;
    int32_t hosts = 0;
    for (int32_t i = 0; i < g->size; i++) {
        int32_t j = 0;
        while (j < i && c->links[g->ranks[j]].host != c->links[g->ranks[i]].host) {
            j++;
        }
        g->host_of[i] = j < i ? g->host_of[j] : hosts++;
    }
}

/* The flight recorder, on the page where that is possible. */
static void ddl__group_records_make(ddl_context *c, ddl_group *g, const int32_t *ranks) {
    ddl__page_group *s = g->page = ddl__page_group_open(c);
    g->records = s != NULL ? s->records : ddl__alloc_array(&c->base, DDL__RECORDS, sizeof *g->records);
    if (s != NULL) {
        s->id = g->id;
        s->epoch = g->epoch;
        s->size = g->size;
        memcpy(s->ranks, ranks, (size_t)g->size * sizeof *ranks);
    }
}

/* Makes the local part of a group; ranks are world ranks. The caller has made sure that all members do the same. */
static ddl_group *ddl__group_new(ddl_context *c, const int32_t *ranks, int32_t size, uint32_t id, uint32_t epoch,
                                 const char *name) {
    ddl_group *g = ddl__alloc(&c->base, sizeof *g);
    if (g == NULL) {
        return NULL;
    }
    g->context = c;
    g->size = size;
    g->id = id;
    g->epoch = epoch;
    g->ranks = ddl__alloc_array(&c->base, (size_t)size, sizeof *g->ranks);
    g->rank_of = ddl__alloc_array(&c->base, (size_t)c->world_size + 1, sizeof *g->rank_of);
    g->host_of = ddl__alloc_array(&c->base, (size_t)size, sizeof *g->host_of);
    g->flows = ddl__alloc_array(&c->base, (size_t)size, sizeof *g->flows);
    g->packed = ddl__alloc_array(&c->base, (size_t)size, 2 * sizeof *g->packed);
    ddl__group_records_make(c, g, ranks);
    if (g->records == NULL || g->packed == NULL || g->ranks == NULL || g->rank_of == NULL ||
        g->host_of == NULL || g->flows == NULL) {
        ddl__group_release(g);
        ddl__free(&c->base, g);
        return NULL;
    }
    for (int32_t i = 0; i <= c->world_size; i++) {
        g->rank_of[i] = -1;
    }
    for (int32_t i = 0; i < size; i++) {
        g->ranks[i] = ranks[i];
        g->rank_of[ranks[i]] = i;
    }
    g->rank = g->rank_of[c->rank];
    ddl__group_number_hosts(g);
    snprintf(g->name, sizeof g->name, "%s", name);
    if (g->page != NULL) {
        g->page->rank = g->rank;
        memcpy(g->page->name, g->name, sizeof g->page->name);
        g->page->used = 1;
    }
    g->timeout_ms = c->settings.timeout_ms;
    g->stall_ms = c->settings.stall_ms;
    g->tuning = c->tuning;
    g->magic = DDL__GROUP_MAGIC;
    g->next = c->groups->first;
    c->groups->first = g;
    return g;
}

/* Gives up the oldest tombstone when there are many: a program that makes and frees groups all day must not grow. */
static void ddl__group_forget(ddl_context *c) {
    ddl_group **oldest = NULL;
    int32_t count = 0;
    for (ddl_group **at = &c->groups->first; *at != NULL; at = &(*at)->next) {
        if ((*at)->magic == DDL__GROUP_FREED && !(*at)->user_holds) {
            count++;
            oldest = oldest == NULL || (*at)->buried < (*oldest)->buried ? at : oldest;
        }
    }
    if (count > DDL__TOMBSTONES) {
        ddl_group *gone = *oldest;
        *oldest = gone->next;
        ddl__free(&c->base, gone);
    }
}

/* Frees what a group holds; the handle itself stays as a tombstone for a while, at most until the context goes. */
static void ddl__group_bury(ddl_group *g) {
    ddl__p2p_group_free(g);
    ddl__engine_group_free(g);
    ddl__agree_group_free(g);
    g->magic = DDL__GROUP_FREED;
    g->buried = ++g->context->groups->buried;
    ddl__group_release(g);
}

/* >>checking */

/* Begins a public call on a group; the context is locked on success. what: the call, for the sentence. */
static inline ddl_status ddl__enter_group(ddl_group *g, const char *what) {
    if (g == NULL || (g->magic != DDL__GROUP_MAGIC && g->magic != DDL__GROUP_FREED)) {
        return DDL_ERR_ARG;
    }
    DDL__TRY(ddl__enter(g->context));
    if (g->magic == DDL__GROUP_FREED) {
        ddl_status status = ddl__error(g->context, DDL_ERR_STATE, "%s: the group \"%s\" was freed", what, g->name);
        ddl__unlock(g->context);
        return status;
    }
    return DDL_OK;
}

/* Refuses a call that was given NULL where something must be; group may be NULL too. */
static ddl_status ddl__refuse_group(ddl_group *g, const char *what, const char *which) {
    DDL__TRY(ddl__enter_group(g, what));
    ddl_status status = ddl__error(g->context, DDL_ERR_ARG, "%s: %s is NULL", what, which);
    ddl__unlock(g->context);
    return status;
}

/* The error of a broken group or an aborted context. */
static ddl_status ddl__group_usable(ddl_group *g, const char *what) {
    if (g->broken != DDL_OK) {
        return ddl__error(g->context, g->broken, "%s on group \"%s\": %s", what, g->name, g->broken_text);
    }
    return DDL_OK;
}

/* Breaks a group for all collectives to come; the first reason stays. */
static void __attribute__((format(printf, 3, 4))) ddl__group_break(ddl_group *g, ddl_status status, const char *format,
                                                                  ...) {
    if (g->broken != DDL_OK) {
        return;
    }
    g->broken = status;
    if (g->page != NULL) {
        g->page->broken = status;
    }
    va_list args;
    va_start(args, format);
    vsnprintf(g->broken_text, sizeof g->broken_text, format, args);
    va_end(args);
    ddl__ops_fail_all(g);
    ddl__changed(g->context);
}

/* What may be the reason for all members. */
static bool ddl__may_break(ddl_status status) {
    return status == DDL_ERR_MISMATCH || status == DDL_ERR_TIMEOUT || status == DDL_ERR_NOMEM ||
           status == DDL_ERR_PEER || status == DDL_ERR_SYSTEM || status == DDL_ERR_UNSUPPORTED ||
           status == DDL_ERR_INTERNAL;
}

/* Breaks the group here and at all members, with one sentence. */
static void __attribute__((format(printf, 4, 5))) ddl__break_everywhere(ddl_context *c, ddl_group *g, ddl_status status,
                                                                       const char *format, ...) {
    char text[DDL__SENTENCE_BYTES - 128];
    uint8_t payload[DDL__NOTE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    ddl__writer w = ddl__writer_of(payload, sizeof payload);
    ddl__put_u32(&w, (uint32_t)-(int32_t)status);
    ddl__put_string(&w, text);
    for (int32_t i = 0; i < g->size; i++) {
        if (i != g->rank && c->links[g->ranks[i]].life == DDL__ALIVE) {
            ddl__frame f = {.type = DDL__FRAME_MISMATCH, .group = g->id, .epoch = g->epoch};
            ddl__tell(c, g->ranks[i], f, payload, w.at);
        }
    }
    ddl__group_break(g, status, "%s", text);
}

/* The peer's epoch and membership; NULL when the frame is of a group that is gone or not yet there. */
static ddl_group *ddl__frame_group(ddl_context *c, int32_t peer, const ddl__frame *f) {
    ddl_group *g = ddl__group_find(c, f->group);
    return g != NULL && g->epoch == f->epoch && g->rank_of[peer] >= 0 ? g : NULL;
}

/* >>failure */

/* A rank died: collectives of its groups cannot end any more, messages with it neither. Each group reports the first
 * death among its ranks: those that follow are mostly its ripples. */
static void ddl__groups_rank_dead(ddl_context *c, int32_t rank, const char *text, bool link_lost) {
    for (ddl_group *g = c->groups != NULL ? c->groups->first : NULL; g != NULL; g = g->next) {
        if (g->magic == DDL__GROUP_MAGIC && g->rank_of[rank] >= 0) {
            g->deaths++;
            if (g->cause[0] == 0) {
                snprintf(g->cause, sizeof g->cause, "%s", text);
                g->cause_rank = rank;
                g->cause_link = link_lost;
            }
            ddl__group_break(g, DDL_ERR_PEER, "%s", g->cause);
            ddl__p2p_rank_dead(g, g->rank_of[rank]);
        }
    }
    ddl__changed(c);
}

/* A new process is about to take the rank of one that is dead: in groups that were made before, that one stays dead. */
static void ddl__groups_rank_rejoined(ddl_context *c, int32_t rank) {
    for (ddl_group *g = c->groups->first; g != NULL; g = g->next) {
        if (g->magic == DDL__GROUP_MAGIC && g->rank_of[rank] >= 0) {
            g->ranks[g->rank_of[rank]] = c->world_size;
            g->rank_of[rank] = -1;
        }
    }
}

/* 1 when a rank has left in order and nothing of it is still on its way: waiting for it is in vain. Where its goodbye
 * came through another rank, its own last words may lie unread in a connection that has brought nothing so far. */
static bool ddl__is_drained(const ddl_group *g, int32_t group_rank) {
    const ddl__link *l = &g->context->links[g->ranks[group_rank]];
    bool settled = ddl__now_ns() - l->missed_ns > DDL__GOODBYE_NS; /* why it left may still come from somebody else */
    return l->life == DDL__LEFT && l->drained && settled;
}

static bool ddl__is_gone(const ddl_group *g, int32_t rank) {
    return rank != g->rank && (g->context->links[g->ranks[rank]].life == DDL__DEAD || ddl__is_drained(g, rank));
}

/* After a death it shrinks or grows the group, where this rank is not yet: what this rank waits for in the old group it
 * will not do, and would wait for this rank in vain. The frame that said so came after all that it had sent before. */
static bool ddl__goes_on_after(const ddl_group *g, int32_t rank, uint32_t agreed) {
    return g->flows[rank].gone_on != 0 && (int32_t)(g->flows[rank].gone_on - agreed) > 0;
}

static bool ddl__has_gone_on(const ddl_group *g, int32_t rank) {
    return ddl__goes_on_after(g, rank, g->agree_sequence);
}

/* All others of a group that had others are gone, or have gone on. */
static bool ddl__is_alone(const ddl_group *g) {
    bool alone = g->size > 1;
    for (int32_t i = 0; alone && i < g->size; i++) {
        alone = i == g->rank || ddl__is_gone(g, i) || ddl__has_gone_on(g, i);
    }
    return alone;
}
static const char ddl__why_alone[] = "all others are dead, have left the job, or shrink or grow the group";

#endif /* DDL_GROUP_H */

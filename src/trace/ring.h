/* trace, first part: what a rank has done, in a ring of fixed size: the newest events stay, the others are counted.
 * Recording is one store of at most 72 bytes under the context's lock. It must not know of messages and files. */
#ifndef DDL_TRACE_RING_H
#define DDL_TRACE_RING_H

#include "../base.h"

enum { DDL__TRACE_GROUPS = 32, DDL__TRACE_NAME = 24, DDL__TRACE_DEPTH = 16 };

typedef enum ddl__trace_what {
    DDL__TRACE_OP,   /* a collective, of a group */
    DDL__TRACE_SEND, /* a message */
    DDL__TRACE_RECV,
    DDL__TRACE_WAIT,   /* the program was inside ddl until something ended */
    DDL__TRACE_SPAN,   /* ddl_trace_begin to ddl_trace_end */
    DDL__TRACE_STEP,   /* of an algorithm: from when it could start until it ended; with DDL_TRACE_STEPS */
    DDL__TRACE_BUCKET, /* gradients of a trainer that travel together */
    DDL__TRACE_CODE    /* a tensor is compressed (kind 0) or taken out of what came (kind 1) */
} ddl__trace_what;

typedef struct ddl__trace_event {
    uint64_t start_ns, end_ns; /* of this rank's clock */
    int64_t bytes;
    const char *algorithm; /* of a collective or step; of a bucket the strategy; the compression: lives for ever */
    uint32_t sequence;     /* of a collective, in its group; of a bucket, in its step; of a compressed tensor */
    int32_t peer;          /* world rank: whose part came last, or the other side of a message; -1: not known */
    int16_t status;
    uint8_t what, group, kind, blocking; /* group: of ddl__trace.groups; blocking: the program waited all the time */
    union {
        char name[DDL__TRACE_NAME]; /* of a span, wait or bucket */
        int64_t coded_bytes;        /* what `bytes` are when they are compressed */
    };
} ddl__trace_event;

/* Clock of rank 0 minus this rank's, measured at a moment of this rank's clock. */
typedef struct ddl__trace_offset {
    uint64_t at_ns;
    int64_t ns, error_ns; /* half of the round trip that it was measured with */
} ddl__trace_offset;

typedef struct ddl__trace {
    ddl__trace_event *events;
    uint64_t capacity, count; /* count: of all that happened */
    uint64_t next;            /* count modulo capacity; a division takes longer than all else of an event */
    struct {
        uint32_t id, epoch;
        char name[64];
    } groups[DDL__TRACE_GROUPS]; /* the last is for all that have no place */
    int32_t group_count, group_last; /* group_last: of the event before */
    struct {
        uint64_t start_ns;
        char name[DDL__TRACE_NAME];
    } open[DDL__TRACE_DEPTH];     /* spans that have begun */
    int32_t depth;                /* may be more than DDL__TRACE_DEPTH: those are not recorded */
    uint64_t base_ns;             /* of rank 0's clock: zero of the file */
    ddl__trace_offset offsets[2]; /* when the job began, and when it ends */
    int32_t ended_peer;           /* of the operation or message that ended last; -1: not known */
    uint64_t ended_ns;
    bool together;                /* all ranks trace: one file */
    bool steps;                   /* so fine that it costs something */
} ddl__trace;

static void ddl__trace_free(ddl__base *base, ddl__trace *t) {
    if (t != NULL) {
        ddl__free(base, t->events);
        ddl__free(base, t);
    }
}

/* NULL: no memory. */
static ddl__trace *ddl__trace_new(ddl__base *base, uint64_t capacity) {
    ddl__trace *t = ddl__alloc(base, sizeof *t);
    if (t == NULL) {
        return NULL;
    }
    t->events = ddl__alloc_array(base, (size_t)capacity, sizeof *t->events);
    t->capacity = capacity;
    t->base_ns = ddl__now_ns();
    if (t->events == NULL) {
        ddl__trace_free(base, t);
        return NULL;
    }
    return t;
}

/* The place of the next event, in the stead of the oldest when the ring is full. */
static ddl__trace_event *ddl__trace_next(ddl__trace *t) {
    ddl__trace_event *e = &t->events[t->next++];
    t->next = t->next == t->capacity ? 0 : t->next;
    t->count++;
    return e;
}

static bool ddl__trace_group_is(const ddl__trace *t, int32_t i, uint32_t id, uint32_t epoch) {
    return t->groups[i].id == id && t->groups[i].epoch == epoch;
}

static int32_t ddl__trace_group_find(ddl__trace *t, uint32_t id, uint32_t epoch, const char *name) {
    int32_t i = 0;
    while (i < t->group_count && !ddl__trace_group_is(t, i, id, epoch)) {
        i++;
    }
    if (i == t->group_count && i < DDL__TRACE_GROUPS - 1) {
        t->groups[i].id = id;
        t->groups[i].epoch = epoch;
        snprintf(t->groups[i].name, sizeof t->groups[i].name, "%s", name);
        t->group_count++;
    }
    return t->group_last = i;
}

static inline uint8_t ddl__trace_group(ddl__trace *t, uint32_t id, uint32_t epoch, const char *name) {
    int32_t i = t->group_last;
    bool same = i < t->group_count && ddl__trace_group_is(t, i, id, epoch);
    return (uint8_t)(same ? i : ddl__trace_group_find(t, id, epoch, name));
}

/* What ended last ended the wait, and whoever its last part came from was waited for. */
static void ddl__trace_wait(ddl__trace *t, uint64_t start_ns, uint64_t end_ns, const char *name) {
    ddl__trace_event *e = ddl__trace_next(t);
    *e = (ddl__trace_event){.start_ns = start_ns, .end_ns = end_ns, .what = DDL__TRACE_WAIT, .peer = t->ended_peer};
    memccpy(e->name, name != NULL ? name : "wait", 0, sizeof e->name - 1); /* a third of what snprintf takes */
}

static void ddl__trace_span_begin(ddl__trace *t, const char *name) {
    if (t->depth < DDL__TRACE_DEPTH) {
        t->open[t->depth].start_ns = ddl__now_ns();
        snprintf(t->open[t->depth].name, DDL__TRACE_NAME, "%s", name);
    }
    t->depth++;
}

static void ddl__trace_code(ddl__trace *t, bool decodes, uint32_t tensor, const char *kind, uint64_t start_ns,
                            uint64_t end_ns, int64_t bytes, int64_t coded_bytes) {
    *ddl__trace_next(t) = (ddl__trace_event){.start_ns = start_ns,
                                             .end_ns = end_ns,
                                             .bytes = bytes,
                                             .algorithm = kind,
                                             .sequence = tensor,
                                             .peer = -1,
                                             .what = DDL__TRACE_CODE,
                                             .kind = decodes,
                                             .coded_bytes = coded_bytes};
}

/* False: none has begun. */
static bool ddl__trace_span_end(ddl__trace *t) {
    if (t->depth == 0) {
        return false;
    }
    if (--t->depth < DDL__TRACE_DEPTH) {
        ddl__trace_event *e = ddl__trace_next(t);
        *e = (ddl__trace_event){
            .start_ns = t->open[t->depth].start_ns, .end_ns = ddl__now_ns(), .what = DDL__TRACE_SPAN, .peer = -1};
        memcpy(e->name, t->open[t->depth].name, sizeof e->name);
    }
    return true;
}

/* A time of this rank's clock, in ns since the zero of the file. Between the measurements the clocks drift evenly. */
static int64_t ddl__trace_time(const ddl__trace *t, uint64_t ns) {
    const ddl__trace_offset *a = &t->offsets[0], *b = &t->offsets[1];
    double offset = (double)a->ns;
    if (b->at_ns > a->at_ns) {
        offset += (double)(b->ns - a->ns) * ((double)ns - (double)a->at_ns) / (double)(b->at_ns - a->at_ns);
    }
    return (int64_t)ns + (int64_t)offset - (int64_t)t->base_ns;
}

/* What a rank tells of itself for the summary. */
typedef struct ddl__trace_sum {
    uint64_t ops, lost;
    uint64_t communicating_ns; /* in collectives and messages, each counted */
    uint64_t exposed_ns;       /* the program waited meanwhile */
} ddl__trace_sum;

static uint64_t ddl__trace_length(const ddl__trace_event *e) { return e->end_ns - DDL__MIN(e->start_ns, e->end_ns); }

static ddl__trace_sum ddl__trace_summed(const ddl__trace *t) {
    ddl__trace_sum sum = {.lost = t->count - DDL__MIN(t->count, t->capacity)};
    for (uint64_t i = 0; i < DDL__MIN(t->count, t->capacity); i++) {
        const ddl__trace_event *e = &t->events[i];
        uint64_t length = ddl__trace_length(e);
        if (e->what <= DDL__TRACE_RECV) {
            sum.ops++;
            sum.communicating_ns += length;
        }
        sum.exposed_ns += e->what == DDL__TRACE_WAIT || e->blocking ? length : 0;
    }
    return sum;
}

#endif /* DDL_TRACE_RING_H */

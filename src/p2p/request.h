/* p2p, second part: requests, and waiting for one, any or all of them.
 * A request knows what it is through its ops table; the engine brings its own. */
#ifndef DDL_P2P_REQUEST_H
#define DDL_P2P_REQUEST_H

#include "pipe.h"

enum { DDL__REQUEST_MAGIC = 0x72657175, DDL__REQUESTS_CHUNK = 64 };
#define DDL__ATTEND_NS (5 * DDL__NS_PER_MS)
#define DDL__ABSENT_NS (500 * DDL__NS_PER_MS) /* longer between two looks: nobody waited, or the process was stopped */

typedef enum ddl__request_state {
    DDL__REQUEST_FREE = 0,
    DDL__REQUEST_ACTIVE = 1,
    DDL__REQUEST_DONE = 2,
    DDL__REQUEST_IDLE = 3 /* persistent, not started */
} ddl__request_state;

typedef struct ddl__request_ops {
    /* Ends it now with r->status set: takes its memory back from whoever uses it. */
    void (*abandon)(ddl_context *c, ddl_request *r);
    /* Says for whom or what it waits, for the stall report and the timeout's sentence. */
    void (*explain)(ddl_context *c, ddl_request *r, ddl__text *text);
    /* Every 10 ms or so while somebody waits for it; waited_ns: for how long. */
    void (*tick)(ddl_context *c, ddl_request *r, uint64_t waited_ns);
    int32_t (*expect)(ddl_context *c, ddl_request *r); /* world rank, or -1 */
    void (*release)(ddl_context *c, ddl_request *r); /* frees what `kept` holds; may be NULL */
} ddl__request_ops;

struct ddl_request {
    uint32_t magic;
    uint32_t generation; /* grows with each use: an old cookie is known */
    int32_t index;       /* in the pool */
    uint8_t state;
    bool persistent, is_recv;
    bool unseen; /* no handle of it was given out */
    ddl_context *context;
    ddl_group *group;
    const ddl__request_ops *ops;
    ddl_status status;
    ddl_info info;
    char *why; /* the error's sentence; NULL: the status text has to do */
    uint64_t attended_ns, waited_ns; /* when somebody last asked for it; how long somebody has waited */
    uint64_t next_report_ns;
    uint64_t start_ns; /* of a message, while the timeline is recorded; else 0 */
    ddl_request *next; /* free list, or posted receives */
    void *op;          /* of the engine */
    void *kept;        /* a persistent request's own copy of its call */
    ddl_request *parent; /* of which this is a part: see coll/many.h */
    int32_t parts;
    uint32_t agreed; /* the group's newest agreement when it began */
    void (*parts_done)(ddl_context *c, ddl_request *r);
    ddl__stage *stage; /* of tensors on devices; NULL: there is none (any more) */
    bool ordered;      /* it begins when its group's stream has come to its call */
    bool captured;     /* it is put into a graph: its call waits for that */
    bool detached;     /* nobody waits for it but the stream */
    ddl__device *gate_device;
    void *gate;                 /* what holds the stream until it is over; NULL: nothing does */
    ddl_request *detached_next; /* of the context's */

    /* messages */
    bool filling;  /* what is sent is on its way from a device */
    bool stays;    /* to this rank itself: it waits where it lies for its receive, without a copy */
    bool draining; /* all has come, and is on its way to one */
    void *packed; /* scratch for a strided tensor, or NULL */
    char *data;
    uint64_t bytes, moved, total; /* total: what the sender says */
    int32_t peer, tag;            /* group rank; receives may say any */
    uint64_t remote;              /* cookie of the other side's request */
    ddl__landing *landing;
    bool matched;
    bool open; /* its data may come before it is asked for: the sender was told the cookie; or it is that sender's */
    uint8_t lent;   /* frames of its data that are the transport's: 1 by out, 2 by out_next */
    ddl_status unsent; /* why one of them could not be sent; DDL_OK: all were */
    uint64_t window; /* a sender may send the bytes before this one: 0 before it was asked for them */
    uint64_t longest; /* frame of data that its receiver takes; 0: it has not said so */
    ddl__pipe *pipe; /* of a message that goes through pinned memory in chunks; NULL: it does not */
    bool fetching;   /* the receiver copies it from the sender's device: see devices.h */
    bool getting;    /* ... and that copy is under way */
    bool told;       /* a receiver: the data may be fetched */
    ddl__endpoint *fetcher; /* by which */
    void *memory;           /* this side's registration there; NULL: there is none */
    ddl__outgoing out;
    /* from here: not cleared for a new request */
    ddl__outgoing out_next;
    uint64_t lent_ns[2]; /* when the one by out, and by out_next, was lent */
    ddl_tensor tensor; /* of one that is not packed only its type is set */
    ddl_memory_key key; /* of the sender's memory, while it is fetched */
};

/* Requests come in chunks that stay until the end: a pointer that is kept too long finds a free request, not
 * rubbish. */
typedef struct ddl__requests {
    ddl_request **chunks;
    int32_t chunk_count;
    ddl_request *free_first, *free_last; /* first in, first out, so that reuse comes late: but for those nobody saw */
} ddl__requests;

/* >>pool */

static ddl_status ddl__requests_grow(ddl_context *c) {
    ddl__requests *q = c->requests;
    ddl_request **chunks = ddl__alloc_array(&c->base, (size_t)q->chunk_count + 1, sizeof *chunks);
    ddl_request *chunk = ddl__alloc_array(&c->base, DDL__REQUESTS_CHUNK, sizeof *chunk);
    if (chunks == NULL || chunk == NULL) {
        ddl__free(&c->base, chunks);
        ddl__free(&c->base, chunk);
        return ddl__error(c, DDL_ERR_NOMEM, "no memory for more requests");
    }
    if (q->chunks != NULL) {
        memcpy(chunks, q->chunks, (size_t)q->chunk_count * sizeof *chunks);
        ddl__free(&c->base, q->chunks);
    }
    q->chunks = chunks;
    q->chunks[q->chunk_count] = chunk;
    for (int32_t i = 0; i < DDL__REQUESTS_CHUNK; i++) {
        ddl_request *r = &chunk[i];
        r->magic = DDL__REQUEST_MAGIC;
        r->index = q->chunk_count * DDL__REQUESTS_CHUNK + i;
        r->context = c;
        r->next = q->free_first;
        q->free_first = r;
        q->free_last = q->free_last == NULL ? r : q->free_last;
    }
    q->chunk_count++;
    return DDL_OK;
}

/* Takes a request off the free list as it is. */
static ddl_status ddl__request_take(ddl_context *c, ddl_request **out) {
    ddl__requests *q = c->requests;
    if (q->free_first == NULL) {
        DDL__TRY(ddl__requests_grow(c));
    }
    ddl_request *r = q->free_first;
    q->free_first = r->next;
    if (q->free_first == NULL) {
        q->free_last = NULL;
    }
    *out = r;
    return DDL_OK;
}

/* Puts one back that nobody has seen: it is the next to be taken, while it is in the cache. */
static void ddl__request_untake(ddl_context *c, ddl_request *r) {
    ddl__requests *q = c->requests;
    r->next = q->free_first;
    q->free_first = r;
    q->free_last = q->free_last == NULL ? r : q->free_last;
}

/* Makes a new request of one that was taken. */
static void ddl__request_init(ddl_group *g, const ddl__request_ops *ops, ddl_request *r) {
    ddl_context *c = g->context;
    uint32_t generation = r->generation + 1;
    int32_t index = r->index;
    memset(r, 0, offsetof(ddl_request, tensor));
    r->magic = DDL__REQUEST_MAGIC;
    r->generation = generation;
    r->index = index;
    r->state = DDL__REQUEST_ACTIVE;
    r->context = c;
    r->group = g;
    r->ops = ops;
    r->agreed = g->agree_sequence;
    r->info.source = DDL_NO_RANK;
    g->outstanding++;
    c->stats.ops_started++;
}

static ddl_status ddl__request_new(ddl_group *g, const ddl__request_ops *ops, ddl_request **out) {
    DDL__TRY(ddl__request_take(g->context, out));
    ddl__request_init(g, ops, *out);
    return DDL_OK;
}

static void ddl__request_release(ddl_request *r) {
    ddl_context *c = r->context;
    ddl__requests *q = c->requests;
    ddl__free(&c->base, r->why);
    ddl__stage_leave(c, &r->stage);
    if (r->ops->release != NULL && r->kept != NULL) {
        r->ops->release(c, r);
    }
    ddl__free(&c->base, r->kept);
    ddl__scratch_put(c, r->packed);
    r->kept = NULL;
    r->why = NULL;
    r->packed = NULL;
    r->state = DDL__REQUEST_FREE;
    r->group->outstanding--;
    if (r->unseen) {
        ddl__request_untake(c, r);
        return;
    }
    r->next = NULL;
    if (q->free_last != NULL) {
        q->free_last->next = r;
    } else {
        q->free_first = r;
    }
    q->free_last = r;
}

static uint64_t ddl__request_cookie(const ddl_request *r) {
    return (uint64_t)r->generation << 32 | (uint32_t)r->index;
}

/* The request of a cookie that came from a peer; NULL when it is over, or never was. */
static ddl_request *ddl__request_of(ddl_context *c, uint64_t cookie) {
    uint32_t index = (uint32_t)cookie;
    if (index >= (uint32_t)(c->requests->chunk_count * DDL__REQUESTS_CHUNK)) {
        return NULL;
    }
    ddl_request *r = &c->requests->chunks[index / DDL__REQUESTS_CHUNK][index % DDL__REQUESTS_CHUNK];
    return r->generation == (uint32_t)(cookie >> 32) && r->state == DDL__REQUEST_ACTIVE ? r : NULL;
}

/* >>ending */

/* For the timeline. peer: a rank of the group, or DDL_ANY_RANK when none was found. start_ns 0: whoever called records
 * it, but the wait for it must know the peer. */
static void ddl__message_trace(ddl_group *g, bool recv, int32_t peer, int64_t bytes, uint64_t start_ns, bool blocking) {
    ddl__trace *t = g->context->trace;
    t->ended_peer = peer >= 0 && peer < g->size ? g->ranks[peer] : -1;
    if (start_ns == 0) {
        return;
    }
    *ddl__trace_next(t) =
        (ddl__trace_event){.start_ns = start_ns,
                           .end_ns = ddl__now_ns(),
                           .bytes = bytes,
                           .peer = t->ended_peer,
                           .what = recv ? DDL__TRACE_RECV : DDL__TRACE_SEND,
                           .blocking = blocking};
}

static void ddl__request_done(ddl_request *r, ddl_status status) {
    ddl_context *c = r->context;
    if (c->trace != NULL && (r->start_ns != 0 || r->is_recv)) {
        ddl__message_trace(r->group, r->is_recv, r->is_recv && r->matched ? r->info.source : r->peer, (int64_t)r->moved,
                           r->start_ns, false);
    }
    r->start_ns = 0;
    if (r->gate != NULL) { /* before the stage: to free pinned memory may wait for the device */
        r->gate_device->table->gate_open(r->gate_device->self, r->gate);
        r->gate = NULL;
    }
    if (r->stage != NULL) {
        ddl__stage_leave(c, &r->stage);
    }
    if (r->pipe != NULL) {
        ddl__pipe_leave(c, &r->pipe);
    }
    ddl__page_wait_over(c, r);
    r->status = status;
    r->info.status = status;
    r->state = DDL__REQUEST_DONE;
    *(status < 0 ? &c->stats.ops_failed : &c->stats.ops_completed) += 1; /* two sums would become one vector */
    if (r->parent == NULL) {
        ddl__changed(c);
    } else if (--r->parent->parts == 0) { /* nobody waits for a part alone */
        r->parent->parts_done(c, r->parent);
    }
}

static void __attribute__((format(printf, 3, 4))) ddl__request_fail(ddl_request *r, ddl_status status,
                                                                   const char *format, ...) {
    char text[DDL__SENTENCE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    ddl__free(&r->context->base, r->why);
    r->why = ddl__copy_string(&r->context->base, text);
    ddl__request_done(r, status);
}

/* Hands the outcome to the caller and frees the request; a persistent one becomes idle. */
static ddl_status ddl__request_report(ddl_request **slot, ddl_info *out_info) {
    ddl_request *r = *slot;
    ddl_status status = r->status;
    if (out_info != NULL) {
        *out_info = r->info;
    }
    if (status < 0) {
        ddl__error(r->context, status, "%s", r->why != NULL ? r->why : ddl_status_text(status));
    }
    if (r->persistent) {
        r->waited_ns = r->next_report_ns = 0;
        r->state = DDL__REQUEST_IDLE;
        return status;
    }
    ddl__request_release(r);
    *slot = NULL;
    return status;
}

/* >>streams */

static bool ddl__stream_captured(const ddl__device *d, void *stream) {
    return DDL_HAS(d->table, capturing) && d->table->capturing(d->self, stream) == 1;
}

/* For what the host has a part in. */
static ddl_status ddl__stream_check(const ddl_group *g, const char *what) {
    return ddl__stream_captured(g->stream_device, g->stream)
               ? ddl__error(g->context, DDL_ERR_UNSUPPORTED, "%s on group \"%s\": its stream is being captured into a "
                            "graph, and the host has a part in this operation; what can be captured is a collective of "
                            "contiguous tensors, all on device %d, of a group whose GPUs reach each other on one host",
                            what, g->name, g->stream_device->number)
               : DDL_OK;
}

/* Where a stream's queue is full a driver waits for room in it, and that may need the lock: whoever opens a gate on
 * the stream does. So what a call puts on a program's stream is put there without the lock: `count` events before it
 * begins, which what it begins takes (what is left over is dropped), and the gate behind it. */
static void *ddl__mark_take(ddl_group *g) { return g->mark_count > 0 ? g->marks[--g->mark_count] : NULL; }

static void ddl__marks_drop(ddl_group *g) {
    const ddl__device *d = g->stream_device;
    for (void *mark; (mark = ddl__mark_take(g)) != NULL;) {
        d->table->event_free(d->self, mark);
    }
}

/* The lock is held, and given away for a while. */
static ddl_status ddl__mark_stream(ddl_group *g, const char *what, int32_t count) {
    void *marks[DDL__MARKS], *stream = g->stream;
    int32_t made = 0;
    ddl_context *c = g->context;
    const ddl__device *d = g->stream_device;
    if (ddl__stream_captured(d, stream)) {
        return DDL_OK;
    }
    ddl__unlock_shortly(c);
    count = DDL__MIN(count, DDL__MARKS);
    while (made < count && d->table->event_record(d->self, stream, &marks[made]) == DDL_OK) {
        made++; /* what is missing is recorded with the lock, and there it is told why that fails */
    }
    ddl_status status = ddl__enter_group(g, what);
    ddl__locked_again(c);
    bool good = status == DDL_OK && g->mark_count == 0 && g->stream_device == d && g->stream == stream;
    for (int32_t i = 0; i < made; i++) {
        if (good) {
            g->marks[g->mark_count++] = marks[i];
        } else {
            d->table->event_free(d->self, marks[i]);
        }
    }
    return status;
}

/* ddl__enter_group, with marks on the group's stream; ddl__marks_drop follows before the lock is given away. */
static inline ddl_status ddl__enter_ordered(ddl_group *g, const char *what, int32_t count) {
    DDL__TRY(ddl__enter_group(g, what));
    return g->stream_device == NULL ? DDL_OK : ddl__mark_stream(g, what, count);
}

/* Orders what a stage does on the group's stream. */
static ddl_status ddl__stage_order(ddl_group *g, ddl_request *r, ddl__stage *s, const char *what) {
    if (g->stream_device == NULL) {
        return DDL_OK;
    }
    DDL__TRY(ddl__stream_check(g, what));
    s->stream_device = g->stream_device;
    s->stream = g->stream;
    s->events[s->stream_device->number - 1] = ddl__mark_take(g);
    r->ordered = true;
    return DDL_OK;
}

/* Nobody waits for the request any more: the group's stream does. False: the stream cannot, somebody has to, or it has
 * ended meanwhile: the lock is given away for a while (ddl__enter_ordered). */
static bool ddl__request_detach(ddl_context *c, ddl_request *r) {
    const ddl_group *g = r->group;
    ddl__device *d = g->stream_device;
    if (d == NULL || r->state != DDL__REQUEST_ACTIVE) {
        return false;
    }
    void *gate = NULL, *stream = g->stream;
    ddl__unlock_shortly(c);
    ddl_status status = d->table->gate_put(d->self, stream, &gate);
    ddl__lock(c);
    ddl__locked_again(c);
    if (status >= 0 && r->state != DDL__REQUEST_ACTIVE) {
        d->table->gate_open(d->self, gate);
        return false;
    }
    if (status < 0) {
        return false;
    }
    r->gate_device = d;
    r->gate = gate;
    r->detached = true;
    r->detached_next = c->detached;
    c->detached = r;
    return true;
}

static void ddl__detached_reap(ddl_context *c) {
    for (ddl_request **at = &c->detached; *at != NULL;) {
        ddl_request *r = *at;
        if (r->state == DDL__REQUEST_ACTIVE) {
            at = &r->detached_next;
            continue;
        }
        *at = r->detached_next;
        if (r->status < 0 && !c->finalized) {
            ddl__log(&c->base, DDL_LOG_WARN, "an operation that was ordered on a stream failed, and its result is not "
                     "there: %s", r->why != NULL ? r->why : ddl_status_text(r->status));
        }
        ddl__request_release(r);
    }
}

/* >>waiting */

typedef struct ddl__waiting {
    ddl_request **requests;
    int32_t count;
    int32_t at;   /* all before this one are done: a wait for all looks only ahead */
} ddl__waiting;

static bool ddl__is_pending(const ddl_request *r) { return r != NULL && r->state == DDL__REQUEST_ACTIVE; }

static bool ddl__all_done(ddl_context *c, void *arg) {
    (void)c;
    ddl__waiting *w = arg;
    while (w->at < w->count && !ddl__is_pending(w->requests[w->at])) {
        w->at++;
    }
    return w->at == w->count;
}

static bool ddl__any_done(ddl_context *c, void *arg) {
    (void)c;
    ddl__waiting *w = arg;
    bool pending = false;
    for (int32_t i = 0; i < w->count; i++) {
        const ddl_request *r = w->requests[i];
        if (r != NULL && r->state == DDL__REQUEST_DONE) {
            return true;
        }
        pending = pending || ddl__is_pending(r);
    }
    return !pending;
}

static int32_t ddl__wait_expect(ddl_context *c, void *arg) {
    ddl__waiting *w = arg;
    for (int32_t i = w->at; i < w->count; i++) {
        if (ddl__is_pending(w->requests[i])) {
            return w->requests[i]->ops->expect(c, w->requests[i]);
        }
    }
    return -1;
}

static void ddl__report_stall(ddl_context *c, ddl_request *r, uint64_t waited) {
    char line[DDL__SENTENCE_BYTES];
    ddl__text text = {line, sizeof line, 0};
    r->ops->explain(c, r, &text);
    ddl__log(&c->base, DDL_LOG_WARN, "stalled for %.1f s: %s", (double)waited / 1e9, line);
}

/* The deadline passed: the request ends with a sentence that says for whom it waited. */
static void ddl__request_expire(ddl_context *c, ddl_request *r) {
    char line[DDL__SENTENCE_BYTES];
    ddl__text text = {line, sizeof line, 0};
    r->ops->explain(c, r, &text);
    r->ops->abandon(c, r);
    if (ddl__is_pending(r)) {
        ddl__request_fail(r, DDL_ERR_TIMEOUT,
                          "%s; the deadline of %.1f s passed. A rank that is slow, stopped or in "
                          "other code is the usual cause; DDL_TIMEOUT_MS or ddl_group_set change the deadline",
                          line, (double)r->waited_ns / 1e9);
    }
}

/* For ddl-info --attach. */
static void ddl__request_tell(ddl_context *c, ddl_request *r, uint64_t now) {
    char line[sizeof c->page->wait.text];
    ddl__text text = {line, sizeof line, 0};
    line[0] = 0;
    r->ops->explain(c, r, &text);
    ddl__page_wait_tell(c, r, r->waited_ns, now, r->ops->expect(c, r), line);
}

/* Somebody waits for the request, asks for it again and again, or a progress thread watches it: only that time counts
 * for reports and deadlines, not the time in which nobody looks, or the program is stopped. */
static void ddl__request_attend(ddl_context *c, ddl_request *r, uint64_t now, bool may_expire) {
    uint64_t gap = now - DDL__MIN(r->attended_ns, now);
    r->waited_ns += gap < DDL__ABSENT_NS ? gap : 0;
    r->attended_ns = now;
    r->ops->tick(c, r, r->waited_ns);
    if (ddl__is_pending(r) && ddl__page_wants(c, r, r->waited_ns, now)) {
        ddl__request_tell(c, r, now);
    }
    int64_t stall_ms = r->group->stall_ms, timeout_ms = r->group->timeout_ms;
    uint64_t stall = (uint64_t)stall_ms * DDL__NS_PER_MS;
    if (ddl__is_pending(r) && stall_ms > 0 && r->waited_ns >= stall && now >= r->next_report_ns) {
        r->next_report_ns = now + stall;
        ddl__report_stall(c, r, r->waited_ns);
    }
    if (ddl__is_pending(r) && may_expire && timeout_ms > 0 && r->waited_ns >= (uint64_t)timeout_ms * DDL__NS_PER_MS) {
        ddl__request_expire(c, r);
    }
}

static void ddl__wait_tick(ddl_context *c, void *arg, uint64_t now) {
    ddl__waiting *w = arg;
    for (int32_t i = w->at; i < w->count; i++) {
        if (ddl__is_pending(w->requests[i])) {
            ddl__request_attend(c, w->requests[i], now, true);
        }
    }
}

/* What this rank is in, for the stall reports of others. */
static const char *ddl__wait_name(const ddl_request *r) {
    return r->op != NULL ? "ddl_wait for a collective" : r->is_recv ? "ddl_recv" : "ddl_send";
}

/* When a wait begins; 0: nothing is recorded. */
static uint64_t ddl__wait_from(ddl_context *c) {
    if (c->trace == NULL) {
        return 0;
    }
    c->trace->ended_peer = -1;
    return ddl__now_ns();
}

static void ddl__wait_trace(ddl_context *c, uint64_t from) {
    if (c->trace != NULL && from != 0) {
        bool known = c->trace->ended_ns > from && !c->settings.progress_thread; /* we saw it, so that was the end */
        ddl__trace_wait(c->trace, from, known ? c->trace->ended_ns : ddl__now_ns(), c->doing);
    }
}

/* Waits for all, or for any one. The lock is held. */
static void ddl__wait_requests(ddl_context *c, ddl_request **requests, int32_t count, bool any) {
    ddl__waiting waiting = {.requests = requests, .count = count};
    if (any ? ddl__any_done(c, &waiting) : ddl__all_done(c, &waiting)) {
        return; /* many sends have ended when they were started */
    }
    uint64_t from = ddl__wait_from(c);
    /* Each request has its own deadline, which ends it alone: see ddl__request_attend. */
    ddl__wait w = {.done = any ? ddl__any_done : ddl__all_done,
                   .tick = ddl__wait_tick,
                   .expect = ddl__wait_expect,
                   .arg = &waiting,
                   .deadline = DDL__NEVER};
    if (ddl__wait_shortly(c, &w)) {
        ddl__wait_trace(c, from);
        return;
    }
    const char *doing = c->doing;
    uint64_t start = ddl__now_ns();
    for (int32_t i = 0; i < count; i++) {
        if (ddl__is_pending(requests[i])) {
            requests[i]->attended_ns = start;
            c->doing = c->doing != NULL ? c->doing : ddl__wait_name(requests[i]);
        }
    }
    ddl__wait_for(c, &w);
    c->stats.wait_ns += ddl__now_ns() - start;
    ddl__wait_trace(c, from);
    c->doing = doing;
}

/* >>public */

static ddl_status ddl__request_check(const ddl_request *r, const char *what) {
    if (r->magic != DDL__REQUEST_MAGIC) {
        return DDL_ERR_ARG;
    }
    if (r->state == DDL__REQUEST_FREE) {
        return ddl__error(r->context, DDL_ERR_STATE, "%s: the request has already been waited for or freed", what);
    }
    return DDL_OK;
}

/* Locks the context of the first request that is not NULL; *out NULL: there is none. */
static ddl_status ddl__enter_requests(ddl_request **requests, int32_t count, const char *what, ddl_context **out) {
    *out = NULL;
    if (count < 0 || (requests == NULL && count > 0)) {
        return DDL_ERR_ARG;
    }
    for (int32_t i = 0; i < count; i++) {
        ddl_request *r = requests[i];
        if (r == NULL) {
            continue;
        }
        if (*out == NULL) {
            if (r->magic != DDL__REQUEST_MAGIC) {
                return DDL_ERR_ARG;
            }
            DDL__TRY(ddl__enter(r->context));
            *out = r->context;
        }
        ddl_status status = r->magic == DDL__REQUEST_MAGIC && r->context != *out
                                ? ddl__error(*out, DDL_ERR_ARG, "%s: the requests are of different contexts", what)
                                : ddl__request_check(r, what);
        if (status < 0) {
            ddl__unlock(*out);
            return status;
        }
    }
    return DDL_OK;
}

static ddl_status ddl__refuse_requests(ddl_request **requests, int32_t count, const char *what, const char *which) {
    ddl_context *c;
    DDL__TRY(ddl__enter_requests(requests, count, what, &c));
    if (c != NULL) {
        ddl__error(c, DDL_ERR_ARG, "%s: %s is NULL", what, which);
        ddl__unlock(c);
    }
    return DDL_ERR_ARG;
}

/* Reports all requests; the first error by index is the result. */
static ddl_status ddl__report_all(ddl_context *c, ddl_request **requests, int32_t count, ddl_info *out_infos) {
    ddl_status first = DDL_OK;
    for (int32_t i = count - 1; i >= 0; i--) { /* backwards: the first error is written last and stays */
        ddl_info info = {.source = DDL_NO_RANK, .status = DDL_OK};
        if (requests[i] != NULL && requests[i]->state == DDL__REQUEST_DONE) {
            ddl_status status = ddl__request_report(&requests[i], &info);
            first = status < 0 ? status : first;
        }
        if (out_infos != NULL) {
            out_infos[i] = info;
        }
    }
    (void)c;
    return first;
}

/* What a NULL request brings. */
static void ddl__no_infos(ddl_info *out_infos, int32_t count) {
    for (int32_t i = 0; out_infos != NULL && i < count; i++) {
        out_infos[i] = (ddl_info){.source = DDL_NO_RANK};
    }
}

DDL_API ddl_status ddl_wait_all(ddl_request **requests, int32_t count, ddl_info *out_infos) {
    ddl_context *c;
    DDL__TRY(ddl__enter_requests(requests, count, "ddl_wait_all", &c));
    if (c == NULL) {
        ddl__no_infos(out_infos, count);
        return DDL_OK;
    }
    ddl__wait_requests(c, requests, count, false);
    ddl_status status = ddl__report_all(c, requests, count, out_infos);
    ddl__unlock(c);
    return status;
}

DDL_API ddl_status ddl_wait(ddl_request **request, ddl_info *out_info) {
    return request == NULL ? DDL_ERR_ARG : ddl_wait_all(request, 1, out_info);
}

/* A loop of tests is a wait too: who is missing is asked for, and deadlines pass. Not for each call of a tight loop. */
static void ddl__attend_all(ddl_context *c, ddl__waiting *w) {
    uint64_t now = ddl__now_ns();
    for (int32_t i = w->at; i < w->count; i++) {
        ddl_request *r = w->requests[i];
        if (ddl__is_pending(r) && now - DDL__MIN(r->attended_ns, now) > DDL__ATTEND_NS) {
            ddl__request_attend(c, r, now, true);
        }
    }
}

DDL_API ddl_status ddl_test_all(ddl_request **requests, int32_t count, ddl_info *out_infos) {
    ddl_context *c;
    DDL__TRY(ddl__enter_requests(requests, count, "ddl_test_all", &c));
    if (c == NULL) {
        ddl__no_infos(out_infos, count);
        return DDL_OK;
    }
    ddl__waiting w = {.requests = requests, .count = count};
    if (!ddl__all_done(c, &w) && !c->polling) {
        ddl__poll(c, ddl__wait_expect(c, &w));
        ddl__look(c, ddl__now_ns());
    }
    ddl__attend_all(c, &w);
    ddl_status status = DDL_IN_PROGRESS;
    if (ddl__all_done(c, &w)) {
        status = ddl__report_all(c, requests, count, out_infos);
    }
    ddl__unlock(c);
    return status;
}

DDL_API ddl_status ddl_test(ddl_request **request, ddl_info *out_info) {
    return request == NULL ? DDL_ERR_ARG : ddl_test_all(request, 1, out_info);
}

DDL_API ddl_status ddl_wait_some(ddl_request **requests, int32_t count, int32_t *out_done, int32_t *out_indices,
                                 ddl_info *out_infos) {
    ddl_context *c;
    if (out_done == NULL || (out_indices == NULL && count > 0)) {
        return ddl__refuse_requests(requests, count, "ddl_wait_some", out_done == NULL ? "out_done" : "out_indices");
    }
    *out_done = 0;
    DDL__TRY(ddl__enter_requests(requests, count, "ddl_wait_some", &c));
    if (c == NULL) {
        return DDL_OK;
    }
    ddl__wait_requests(c, requests, count, true);
    ddl_status first = DDL_OK;
    for (int32_t i = 0; i < count; i++) {
        if (requests[i] != NULL && requests[i]->state == DDL__REQUEST_DONE) {
            ddl_info info;
            ddl_status status = ddl__request_report(&requests[i], &info);
            first = first < 0 ? first : status;
            if (out_infos != NULL) {
                out_infos[*out_done] = info;
            }
            out_indices[(*out_done)++] = i;
        }
    }
    ddl__unlock(c);
    return first;
}

DDL_API ddl_status ddl_wait_any(ddl_request **requests, int32_t count, int32_t *out_index, ddl_info *out_info) {
    ddl_context *c;
    if (out_index == NULL) {
        return ddl__refuse_requests(requests, count, "ddl_wait_any", "out_index");
    }
    *out_index = -1;
    DDL__TRY(ddl__enter_requests(requests, count, "ddl_wait_any", &c));
    if (c == NULL) {
        return DDL_OK;
    }
    ddl__wait_requests(c, requests, count, true);
    ddl_status status = DDL_OK;
    for (int32_t i = 0; i < count && *out_index < 0; i++) {
        if (requests[i] != NULL && requests[i]->state == DDL__REQUEST_DONE) {
            *out_index = i;
            status = ddl__request_report(&requests[i], out_info);
        }
    }
    ddl__unlock(c);
    return status;
}

DDL_API ddl_status ddl_request_free(ddl_request **request) {
    if (request == NULL || *request == NULL) {
        return DDL_OK;
    }
    ddl_context *c;
    DDL__TRY(ddl__enter_requests(request, 1, "ddl_request_free", &c));
    ddl_status status = DDL_OK;
    if (ddl__is_pending(*request)) {
        status = ddl__error(c, DDL_ERR_STATE, "ddl_request_free: the request is still running; wait for it first");
    } else {
        if ((*request)->persistent && (*request)->state == DDL__REQUEST_DONE) {
            ddl__request_report(request, NULL);
        }
        ddl__request_release(*request);
        *request = NULL;
    }
    ddl__unlock(c);
    return status;
}

#endif /* DDL_P2P_REQUEST_H */

/* ps, eighth part: the side of a worker. A call is one request whose parts are messages with the servers that hold a
 * piece of what is asked for. */
#ifndef DDL_PS_WORKER_H
#define DDL_PS_WORKER_H

#include "server.h"

enum {
    DDL__PS_MAGIC = 0x70736572,
    DDL__PS_PIECE_BYTES = 1 << 20,
    DDL__PS_STALENESS = 3,
    DDL__PS_TRIES = 8, /* of what finds no memory, and can be tried again with no harm */
    DDL__PS_TABLES = 4096
};

struct ddl_ps {
    uint32_t magic;
    ddl_context *c;
    ddl_group *group;     /* its own */
    ddl_ps_config config; /* with its defaults filled in */
    ddl__ps_details extra;
    int32_t workers, worker; /* worker -1: this rank only serves */
    int32_t params;
    int64_t *lengths;
    ddl_dtype *types; /* by parameter */
    ddl__ps_piece *pieces;
    int64_t *first; /* of each parameter's pieces; and one past the last */
    uint64_t *signatures; /* scratch, by rank */
    int64_t piece_count;
    /* under the context's lock */
    ddl_sync_config sync;
    int64_t clock, slowest;
    int64_t *pushed; /* by parameter: 1 + clock of its last push */
    uint64_t sequence;
    uint64_t clock_ns; /* when the last iteration ended */
    uint64_t held_ns, held_until_ns; /* in this one: how long slower workers have kept answers back, until when */
    uint64_t waits_ns;               /* when the last one ended: the context's wait_ns */
    int32_t next_tag;
    int32_t under_way, held; /* calls that have not ended; and requests that were not waited for */
    double rate;
    uint64_t save_order; /* of the checkpoint that is being written */
    int64_t epoch;       /* of the trainer's program, that it is to keep */
    bool left, clocking, save_failed; /* a thread is in ddl_ps_clock; the last ddl_ps_save */
    ddl_ps_table_config *tables;
    int32_t table_count;
    ddl__ps_server *server; /* on this rank; or NULL */
    pthread_t thread;
    bool has_thread;
};

typedef struct ddl__ps_part {
    int32_t server;
    bool skipped;             /* what was pushed is not finite */
    ddl_request *messages[4]; /* ask, payload out, answer, payload in */
    uint8_t ask[DDL__PS_ASK_BYTES];
    uint8_t answer[DDL__PS_ANSWER_BYTES + DDL__PS_SENTENCE_BYTES];
} ddl__ps_part;

/* One call. It knows what it is for, so that its sentences can say so. */
typedef struct ddl__ps_call {
    ddl_ps *ps;
    const char *what; /* "ddl_ps_push" */
    const char *of;   /* "parameter"; NULL: of nothing */
    int32_t number;
    bool answers; /* else asks alone are sent */
    bool over;
    ddl__ps_answer answer; /* of the last part; generation -1: they differ */
    int32_t part_count;
    ddl__ps_part parts[];
} ddl__ps_call;

static int32_t ddl__ps_server_rank(const ddl_ps *ps, int32_t server) {
    return ps->config.dedicated ? ps->workers + server : server;
}

/* >>the request of a call */

static void ddl__ps_call_over(ddl__ps_call *call) {
    if (!call->over) {
        call->over = true;
        call->ps->under_way--;
    }
}

static void ddl__ps_call_name(const ddl__ps_call *call, char *out, size_t bytes) {
    if (call->of != NULL) {
        snprintf(out, bytes, "%s of %s %d", call->what, call->of, call->number);
    } else {
        snprintf(out, bytes, "%s", call->what);
    }
}

/* The first message of a part that failed, the answer's own first: it says why the others did. */
static const ddl_request *ddl__ps_part_failed(const ddl__ps_part *part) {
    static const int order[4] = {2, 0, 1, 3};
    for (int i = 0; i < 4; i++) {
        const ddl_request *r = part->messages[order[i]];
        if (r != NULL && r->status < 0) {
            return r;
        }
    }
    return NULL;
}

/* Has the server said no? Then it does not take what else was sent to it. */
static bool ddl__ps_part_refused(const ddl__ps_part *part) {
    const ddl_request *answer = part->messages[2];
    ddl__ps_answer a;
    return answer != NULL && !ddl__is_pending(answer) && answer->status == DDL_OK &&
           ddl__ps_answer_read(part->answer, (size_t)answer->info.count, &a) && a.status < 0;
}

/* Slower workers have kept an answer back for so long, until now. Times that overlap count once. */
static void ddl__ps_was_held(ddl_ps *ps, uint64_t held_ns) {
    if (held_ns > 0) {
        uint64_t now = ddl__now_ns();
        ps->held_ns += DDL__MIN(held_ns, now - ps->held_until_ns);
        ps->held_until_ns = now;
    }
}

/* What one server said. False: the call has failed, and its request ended. */
static bool ddl__ps_part_good(ddl__ps_call *call, ddl_request *r, ddl__ps_part *part) {
    char name[96];
    ddl__ps_answer a = {.status = DDL_OK};
    const ddl_request *failed = ddl__ps_part_failed(part), *answer = part->messages[2];
    int32_t rank = ddl__ps_server_rank(call->ps, part->server);
    ddl__ps_call_name(call, name, sizeof name);
    if (failed != NULL && !ddl__ps_part_refused(part)) {
        ddl__request_fail(r, failed->status, "%s: server %d on rank %d does not answer: %s", name, part->server, rank,
                          failed->why != NULL ? failed->why : ddl_status_text(failed->status));
        return false;
    }
    if (answer != NULL && !ddl__ps_answer_read(part->answer, (size_t)answer->info.count, &a)) {
        ddl__request_fail(r, DDL_ERR_CORRUPT, "%s: the answer of server %d on rank %d cannot be read", name,
                          part->server, rank);
        return false;
    }
    if (a.status < 0) {
        ddl__request_fail(r, a.status, "%s: server %d on rank %d: %s", name, part->server, rank, a.text);
        return false;
    }
    if (answer != NULL) {
        part->skipped = a.notes & DDL__PS_SKIPPED;
        call->ps->slowest = DDL__MAX(call->ps->slowest, a.slowest);
        ddl__ps_was_held(call->ps, a.held_ns);
        a.generation = call->answer.generation != 0 && call->answer.generation != a.generation ? -1 : a.generation;
        call->answer = a;
    }
    return true;
}

static void ddl__ps_call_done(ddl_context *c, ddl_request *r) {
    (void)c;
    ddl__ps_call *call = r->kept;
    ddl__ps_call_over(call);
    if (!ddl__is_pending(r)) {
        return;
    }
    for (int32_t i = 0; i < call->part_count; i++) {
        if (!ddl__ps_part_good(call, r, &call->parts[i])) {
            return;
        }
    }
    ddl__request_done(r, DDL_OK);
}

static void ddl__ps_call_drop(ddl_context *c, ddl_request *r) {
    ddl__ps_call *call = r->kept;
    ddl__ps_call_over(call);
    for (int32_t i = 0; i < call->part_count; i++) {
        for (int m = 0; m < 4; m++) {
            ddl_request *message = call->parts[i].messages[m];
            call->parts[i].messages[m] = NULL;
            if (message != NULL) { /* not ddl__ps_move_drop: ddl_finalize calls this, before requests are freed */
                message->parent = NULL;
                if (ddl__is_pending(message)) {
                    message->ops->abandon(c, message);
                }
                if (ddl__is_pending(message)) {
                    ddl__request_done(message, DDL_ERR_CANCELLED);
                }
                ddl__request_release(message);
            }
        }
    }
}

static void ddl__ps_call_release(ddl_context *c, ddl_request *r) {
    ddl__ps_call_drop(c, r);
    ((ddl__ps_call *)r->kept)->ps->held--;
}

static const ddl__ps_part *ddl__ps_call_pending(const ddl_request *r, const ddl_request **out_message) {
    const ddl__ps_call *call = r->kept;
    for (int32_t i = 0; i < call->part_count; i++) {
        for (int m = 3; m >= 0; m--) {
            *out_message = call->parts[i].messages[m];
            if (ddl__is_pending(*out_message)) {
                return &call->parts[i];
            }
        }
    }
    *out_message = NULL;
    return NULL;
}

static void ddl__ps_call_explain(ddl_context *c, ddl_request *r, ddl__text *text) {
    (void)c;
    char name[96];
    const ddl_request *message;
    const ddl__ps_call *call = r->kept;
    const ddl__ps_part *part = ddl__ps_call_pending(r, &message);
    ddl__ps_call_name(call, name, sizeof name);
    ddl__text_add(text,
                  "%s: worker %d at clock %lld waits for server %d on rank %d; the slowest worker that it knows "
                  "of is at clock %lld",
                  name, call->ps->worker, (long long)call->ps->clock, part != NULL ? part->server : -1,
                  part != NULL ? ddl__ps_server_rank(call->ps, part->server) : -1, (long long)call->ps->slowest);
}

/* Ends the payload of an ask that was refused before the server took it. True: the call may have ended with that. */
static bool ddl__ps_call_take_back(ddl_context *c, ddl__ps_call *call) {
    for (int32_t i = 0; i < call->part_count; i++) {
        ddl_request *payload = call->parts[i].messages[1];
        if (payload != NULL && ddl__is_pending(payload) && ddl__ps_part_refused(&call->parts[i])) {
            payload->ops->abandon(c, payload);
            if (ddl__is_pending(payload)) {
                ddl__request_done(payload, DDL_OK);
            }
            return true;
        }
    }
    return false;
}

/* Finds out that a server has left the job or does not want what it was offered, or that a rank has told that it cannot
 * go on. */
static void ddl__ps_call_tick(ddl_context *c, ddl_request *r, uint64_t waited) {
    const ddl_request *pending;
    if (ddl__ps_is_broken(r->group)) {
        char name[96];
        ddl__ps_call_name(r->kept, name, sizeof name);
        ddl__ps_call_drop(c, r);
        ddl__request_fail(r, r->group->broken, "%s: %s", name, r->group->broken_text);
        return;
    }
    if (ddl__ps_call_take_back(c, r->kept)) {
        return;
    }
    (void)ddl__ps_call_pending(r, &pending);
    if (pending != NULL) {
        pending->ops->tick(c, (ddl_request *)(uintptr_t)pending, waited);
    }
}

static int32_t ddl__ps_call_expect(ddl_context *c, ddl_request *r) {
    const ddl_request *pending;
    (void)ddl__ps_call_pending(r, &pending);
    return pending != NULL ? pending->ops->expect(c, (ddl_request *)(uintptr_t)pending) : -1;
}

static const ddl__request_ops ddl__ps_call_ops = {ddl__ps_call_drop, ddl__ps_call_explain, ddl__ps_call_tick,
                                                  ddl__ps_call_expect, ddl__ps_call_release};

/* >>making calls. The context is locked. */

static ddl_status ddl__ps_call_new(ddl_ps *ps, const char *what, const char *of, int32_t number, int64_t parts,
                                   ddl_request **out) {
    DDL__TRY(ddl__ps_is_broken(ps->group) ? ddl__group_usable(ps->group, what) : DDL_OK);
    DDL__TRY(ddl__request_new(ps->group, &ddl__ps_call_ops, out));
    ddl_request *r = *out;
    size_t bytes = sizeof(ddl__ps_call) + (size_t)parts * sizeof(ddl__ps_part);
    ddl__ps_call *call = ddl__alloc(&ps->c->base, bytes);
    if (call == NULL) {
        ddl__request_release(r);
        *out = NULL;
        return ddl__error(ps->c, DDL_ERR_NOMEM, "%s: no memory for a request of %lld messages", what, (long long)parts);
    }
    *call = (ddl__ps_call){.ps = ps, .what = what, .of = of, .number = number, .answers = true};
    r->kept = call;
    r->parts_done = ddl__ps_call_done;
    ps->under_way++;
    ps->held++;
    ddl__ps_moves_begin(r);
    return DDL_OK;
}

/* The server waits for a payload that there is no memory to send: an empty one in its place makes it say so, which ends
 * the call. Without memory for that either, servers and workers are told that this one cannot go on. */
static ddl_status ddl__ps_call_withdraw(ddl_request *r, ddl__ps_part *part, const ddl__ps_ask *ask) {
    const ddl__ps_call *call = r->kept;
    ddl_ps *ps = call->ps;
    int32_t rank = ddl__ps_server_rank(ps, part->server);
    ddl_status status = DDL_ERR_NOMEM;
    for (int32_t n = 0; n < DDL__PS_TRIES && status == DDL_ERR_NOMEM; n++) {
        status = ddl__ps_move(ps->group, true, part->ask, 0, rank, ask->tag, r, &part->messages[1]);
    }
    if (status == DDL_ERR_NOMEM && ps->group->broken == DDL_OK) {
        ddl__break_everywhere(ps->c, ps->group, status,
                              "%s: worker %d has no memory to send what it has announced to server %d, nor to take "
                              "that back",
                              call->what, ps->worker, part->server);
    }
    return status;
}

/* Adds a message to a server. out: the payload of the ask; in: of the answer. */
static ddl_status ddl__ps_call_add(ddl_request *r, int32_t server, ddl__ps_ask *ask, const void *out, void *in,
                                   size_t in_bytes) {
    ddl__ps_call *call = r->kept;
    ddl_ps *ps = call->ps;
    ddl__ps_part *part = &call->parts[call->part_count++];
    int32_t rank = ddl__ps_server_rank(ps, server);
    part->server = server;
    ps->next_tag = ps->next_tag % DDL__PS_TAG_MAX + 2; /* even, from 2 */
    ask->tag = ps->next_tag;
    ask->open = 0;
    if (call->answers) { /* receives first: then nothing comes unexpected */
        DDL__TRY(ddl__ps_move(ps->group, false, part->answer, sizeof part->answer, rank, ask->tag + 1, r,
                              &part->messages[2]));
        if (in != NULL) {
            DDL__TRY(ddl__ps_move(ps->group, false, in, in_bytes, rank, ask->tag + 1, r, &part->messages[3]));
            part->messages[3]->open = true;
            ask->open = ddl__request_cookie(part->messages[3]);
        }
    }
    ddl__ps_ask_write(part->ask, ask);
    DDL__TRY(ddl__ps_move(ps->group, true, part->ask, DDL__PS_ASK_BYTES, rank, DDL__PS_TAG_ASK, r, &part->messages[0]));
    ddl_status status = ask->bytes > 0 ? DDL_ERR_NOMEM : DDL_OK;
    for (int32_t n = 0; n < DDL__PS_TRIES && status == DDL_ERR_NOMEM; n++) { /* the server waits for it by now */
        status = ddl__ps_move_to(ps->group, true, out, (size_t)ask->bytes, rank, ask->tag, 0,
                                 ask->op == DDL__PS_PUSH_PULL, r, &part->messages[1]);
    }
    return status == DDL_ERR_NOMEM ? ddl__ps_call_withdraw(r, part, ask) : status;
}

/* All parts have been added, or one could not be. */
static ddl_status ddl__ps_call_start(ddl_request **out, ddl_status status) {
    ddl_request *r = *out;
    if (status < 0) {
        ddl__request_release(r); /* and with it the messages that were started */
        *out = NULL;
        return status;
    }
    ddl__ps_moves_started(r->context, r);
    return DDL_OK;
}

/* Waits for a call; out_answer may be NULL. */
static ddl_status ddl__ps_call_wait(ddl_request **r, ddl__ps_answer *out_answer) {
    ddl_context *c = (*r)->context;
    ddl__wait_requests(c, r, 1, false);
    if (out_answer != NULL) {
        const ddl__ps_call *call = (*r)->kept;
        *out_answer = call->answer;
    }
    return ddl__request_report(r, NULL);
}

/* One ask to every server (or to the first alone), with one payload. Blocks. */
static ddl_status ddl__ps_ask_all(ddl_ps *ps, const char *what, int32_t servers, ddl__ps_ask ask, const void *payload,
                                  bool answers, ddl__ps_answer *out) {
    ddl_request *r;
    DDL__TRY(ddl__ps_call_new(ps, what, NULL, 0, servers, &r));
    ((ddl__ps_call *)r->kept)->answers = answers;
    ddl_status status = DDL_OK;
    for (int32_t s = 0; s < servers && status == DDL_OK; s++) {
        status = ddl__ps_call_add(r, s, &ask, payload, NULL, 0);
    }
    DDL__TRY(ddl__ps_call_start(&r, status));
    return ddl__ps_call_wait(&r, out);
}

/* >>parameters */

/* A call about all pieces of a parameter. grad, out: its elements, or NULL where the op has none. */
static ddl_status ddl__ps_param_call(ddl_ps *ps, const char *what, int32_t op, int32_t param, const void *grad,
                                     void *out, uint64_t sequence, ddl_request **out_request) {
    int64_t first = ps->first[param], end = ps->first[param + 1];
    DDL__TRY(ddl__ps_call_new(ps, what, "parameter", param, end - first, out_request));
    ddl_status status = DDL_OK;
    for (int64_t i = first; i < end && status == DDL_OK; i++) {
        const ddl__ps_piece *piece = &ps->pieces[i];
        size_t bytes = ddl__ps_piece_bytes(piece), at = (size_t)piece->begin * ddl_dtype_bytes(piece->dtype);
        ddl__ps_ask ask = {.op = op,
                           .place = (int32_t)i,
                           .clock = ps->clock,
                           .sequence = sequence << DDL__PS_CHUNK_BITS,
                           .bytes = grad != NULL ? (int64_t)bytes : 0};
        memcpy(&ask.value, &ps->rate, sizeof ask.value);
        status = ddl__ps_call_add(*out_request, piece->server, &ask,
                                  grad != NULL ? (const char *)grad + at : NULL, out != NULL ? (char *)out + at : NULL,
                                  bytes);
    }
    return ddl__ps_call_start(out_request, status);
}

/* Gradients that were encoded piece by piece. */
typedef struct ddl__ps_codes {
    const char *data;
    const int64_t *at; /* by piece: where its code begins, -1: it has none */
} ddl__ps_codes;

/* A call about pieces first ... end - 1, of several parameters or a part of one, all of one type: pushes their
 * gradients and pulls what the next clock may see; grads NULL: pulls what this one may. Elements of all pieces lie one
 * after the other, from `grads` (of pieces with a code from there) and from `out`. not_finite, by parameter, says which
 * gradients of this worker are not. */
static ddl_status ddl__ps_range_call(ddl_ps *ps, const char *what, int64_t first, int64_t end, const void *grads,
                                     const ddl__ps_codes *codes, void *out, const bool *not_finite,
                                     ddl_request **out_request) {
    const char *grad = grads;
    char *to = out;
    uint64_t sequence = grads != NULL ? ++ps->sequence : 0;
    DDL__TRY(
        ddl__ps_call_new(ps, what, "parameter", first < end ? ps->pieces[first].param : 0, end - first, out_request));
    ddl_status status = DDL_OK;
    for (int64_t i = first; i < end && status == DDL_OK; i++) {
        const ddl__ps_piece *piece = &ps->pieces[i];
        size_t bytes = ddl__ps_piece_bytes(piece);
        ddl__ps_ask ask = {.op = grads != NULL ? DDL__PS_PUSH_PULL : DDL__PS_PULL,
                           .place = (int32_t)i,
                           .flags = not_finite[piece->param] ? DDL__PS_NOT_FINITE : 0,
                           .clock = ps->clock,
                           .sequence = sequence << DDL__PS_CHUNK_BITS,
                           .bytes = grads != NULL ? ddl__ps_push_bytes(ps->extra.traits, piece) : 0};
        const char *push = grads != NULL && codes->at[i] >= 0 ? codes->data + codes->at[i] : grad;
        memcpy(&ask.value, &ps->rate, sizeof ask.value);
        status = ddl__ps_call_add(*out_request, piece->server, &ask, push, to, bytes);
        grad = grads != NULL ? grad + bytes : NULL;
        to += bytes;
    }
    return ddl__ps_call_start(out_request, status);
}

/* >>rows */

/* Rows of one call, each id once, in the order of servers: what goes to which, and where it belongs at the caller. */
typedef struct ddl__ps_pick {
    uint64_t id;
    int64_t at; /* position at the caller */
    int32_t server;
} ddl__ps_pick;

typedef struct ddl__ps_picks {
    ddl__ps_pick *all; /* sorted by server, id, position */
    int64_t count;     /* of the caller's rows */
    int64_t rows;      /* ids */
    int64_t chunks;    /* messages */
    int64_t most;      /* rows of a message */
} ddl__ps_picks;

static int ddl__ps_pick_order(const void *a, const void *b) {
    const ddl__ps_pick *x = a, *y = b;
    if (x->server != y->server) {
        return (x->server > y->server) - (x->server < y->server);
    }
    return x->id != y->id ? (x->id > y->id) - (x->id < y->id) : (x->at > y->at) - (x->at < y->at);
}

static bool ddl__ps_is_new_row(const ddl__ps_picks *p, int64_t i) { return i == 0 || p->all[i].id != p->all[i - 1].id; }

/* Where the next chunk begins after caller's row i, the first of a chunk; *out_rows: the ids in between. */
static int64_t ddl__ps_chunk_end(const ddl__ps_picks *p, int64_t i, int64_t *out_rows) {
    int64_t rows = 0, at = i;
    for (; at < p->count && p->all[at].server == p->all[i].server; at++) {
        bool fresh = ddl__ps_is_new_row(p, at);
        if (fresh && rows == p->most) {
            break;
        }
        rows += fresh;
    }
    *out_rows = rows;
    return at;
}

static ddl_status ddl__ps_pick_rows(ddl_ps *ps, const uint64_t *ids, int64_t count, int64_t row_bytes,
                                    ddl__ps_picks *p) {
    int64_t rows;
    *p = (ddl__ps_picks){.count = count, .most = DDL__MAX(ps->config.piece_bytes / row_bytes, 1)};
    p->all = ddl__alloc_array(&ps->c->base, (size_t)count, sizeof *p->all);
    if (p->all == NULL) {
        return ddl__error(ps->c, DDL_ERR_NOMEM, "no memory to sort %lld ids of rows by server", (long long)count);
    }
    for (int64_t i = 0; i < count; i++) {
        p->all[i] = (ddl__ps_pick){ids[i], i, ddl__ps_server_of_row(ids[i], ps->config.servers)};
    }
    if (count > 0) {
        qsort(p->all, (size_t)count, sizeof *p->all, ddl__ps_pick_order);
    }
    for (int64_t i = 0; i < count; p->chunks++) {
        i = ddl__ps_chunk_end(p, i, &rows);
        p->rows += rows;
    }
    return DDL_OK;
}

/* Writes ids, and for a push the sums of the gradients, of one chunk. */
static void ddl__ps_pack_chunk(const ddl__ps_picks *p, int64_t begin, int64_t end, int64_t rows, const float *grads,
                               int32_t width, char *out) {
    char *sums = out + (size_t)rows * sizeof(uint64_t);
    size_t bytes = (size_t)width * sizeof(float);
    int64_t row = -1;
    for (int64_t i = begin; i < end; i++) {
        const ddl__ps_pick *pick = &p->all[i];
        bool fresh = ddl__ps_is_new_row(p, i);
        row += fresh;
        if (fresh) {
            memcpy(out + (size_t)row * sizeof(uint64_t), &pick->id, sizeof pick->id);
        }
        if (grads != NULL && fresh) {
            memcpy(sums + (size_t)row * bytes, grads + pick->at * width, bytes);
        } else if (grads != NULL) {
            for (int32_t j = 0; j < width; j++) { /* f32 at an address that is aligned to 4: width is whole floats */
                float *sum = (float *)(void *)(sums + (size_t)row * bytes) + j;
                *sum += grads[pick->at * width + j];
            }
        }
    }
}

/* Gives each of the caller's rows a copy of what was pulled. */
static void ddl__ps_scatter_rows(const ddl__ps_picks *p, const float *rows, int32_t width, float *out) {
    int64_t row = -1;
    for (int64_t i = 0; i < p->count; i++) {
        row += ddl__ps_is_new_row(p, i);
        memcpy(out + p->all[i].at * width, rows + row * width, (size_t)width * sizeof(float));
    }
}

/* Pushes (grads) or pulls (out) rows. Blocks. */
static ddl_status ddl__ps_rows_call(ddl_ps *ps, const char *what, int32_t table, const ddl__ps_picks *p,
                                    const float *grads, float *out, uint64_t sequence) {
    int32_t width = ps->tables[table].width;
    size_t row_bytes = (size_t)width * sizeof(float);
    char *packed = ddl__alloc_array(&ps->c->base, (size_t)p->rows, sizeof(uint64_t) + row_bytes);
    ddl_request *r = NULL;
    if (packed == NULL) {
        return ddl__error(ps->c, DDL_ERR_NOMEM, "%s: no memory to pack %lld rows", what, (long long)p->rows);
    }
    char *ids = out != NULL ? packed + (size_t)p->rows * row_bytes : packed, *in = packed;
    ddl_status status = ddl__ps_call_new(ps, what, "table", table, p->chunks, &r);
    bool made = status == DDL_OK;
    for (int64_t i = 0, end, rows, chunk = 0; made && i < p->count && status == DDL_OK; i = end, chunk++) {
        end = ddl__ps_chunk_end(p, i, &rows);
        ddl__ps_pack_chunk(p, i, end, rows, grads, width, ids);
        ddl__ps_ask ask = {.op = grads != NULL ? DDL__PS_PUSH_ROWS : DDL__PS_PULL_ROWS,
                           .place = table,
                           .flags = grads != NULL && i > 0 && p->all[i].server == p->all[i - 1].server
                                        ? DDL__PS_CONTINUES
                                        : 0,
                           .clock = ps->clock,
                           .sequence = sequence << DDL__PS_CHUNK_BITS | (uint64_t)chunk,
                           .count = rows,
                           .bytes = rows * (int64_t)(sizeof(uint64_t) + (grads != NULL ? row_bytes : 0))};
        memcpy(&ask.value, &ps->rate, sizeof ask.value);
        status = ddl__ps_call_add(r, p->all[i].server, &ask, ids, out != NULL ? in : NULL, (size_t)rows * row_bytes);
        ids += ask.bytes;
        in += (size_t)rows * row_bytes;
    }
    status = made ? ddl__ps_call_start(&r, status) : status;
    status = status == DDL_OK ? ddl__ps_call_wait(&r, NULL) : status;
    if (status == DDL_OK && out != NULL) {
        ddl__ps_scatter_rows(p, (const float *)(void *)packed, width, out);
    }
    ddl__free(&ps->c->base, packed);
    return status;
}

#endif /* DDL_PS_WORKER_H */

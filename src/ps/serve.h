/* ps, fifth part: how a server answers. Every ask stands in the queue of its place until it can be done. Those of one
 * worker on one place are done in the order they came; whose turn it is beyond that, the sync mode says. */
#ifndef DDL_PS_SERVE_H
#define DDL_PS_SERVE_H

#include "state.h"

/* >>answers */

/* Sends what has not been sent yet of an answer. */
static void ddl__ps_send_parts(ddl__ps_server *s, ddl__ps_job *job) {
    ddl__lock(s->c);
    if (s->c->finalized) {
        ddl__unlock(s->c);
        return;
    }
    ddl__ps_moves_begin(job->gate);
    int32_t tag = job->ask.tag + 1;
    ddl_status status = DDL_OK;
    if (job->messages[0] == NULL) {
        status = ddl__ps_move(s->group, true, job->answer, job->answer_bytes, job->source, tag, job->gate,
                              &job->messages[0]);
    }
    if (status == DDL_OK && job->has_payload) {
        status = ddl__ps_move_to(s->group, true, job->payload, job->payload_bytes, job->source, tag, job->ask.open,
                                 false, job->gate, &job->messages[1]);
    }
    job->unsent = status == DDL_ERR_NOMEM;
    job->resend = false;
    ddl__ps_moves_started(s->c, job->gate);
    ddl__unlock(s->c);
}

/* Sends an answer and, where the op has one, its payload. The job stays until both have left. */
static void ddl__ps_send(ddl__ps_server *s, ddl__ps_job *job, const ddl__ps_answer *a, const void *data, size_t bytes) {
    bool payload = job->ask.op == DDL__PS_PULL || job->ask.op == DDL__PS_PUSH_PULL || job->ask.op == DDL__PS_PULL_ROWS;
    ddl__ps_answer said = *a;
    said.held_ns = job->held_from_ns > 0 ? ddl__now_ns() - job->held_from_ns : 0;
    job->answer_bytes = ddl__ps_answer_write(job->answer, &said);
    job->has_payload = payload;
    job->payload = data;
    job->payload_bytes = bytes;
    ddl__lock(s->c);
    ddl__ps_move_drop(s->c, &job->messages[0]);
    ddl__ps_move_drop(s->c, &job->messages[1]);
    job->sending = !s->c->finalized;
    ddl__unlock(s->c);
    ddl__ps_send_parts(s, job);
}

static ddl__ps_answer ddl__ps_answer_ok(const ddl__ps_server *s) {
    return (ddl__ps_answer){.status = DDL_OK, .slowest = ddl__ps_slowest(s)};
}

static void __attribute__((format(printf, 4, 5)))
ddl__ps_refuse(ddl__ps_server *s, ddl__ps_job *job, ddl_status status, const char *format, ...) {
    ddl__ps_answer a = ddl__ps_answer_ok(s);
    va_list args;
    va_start(args, format);
    vsnprintf(a.text, sizeof a.text, format, args);
    va_end(args);
    a.status = status;
    ddl__ps_send(s, job, &a, NULL, 0);
}

static void ddl__ps_refuse_lost(ddl__ps_server *s, ddl__ps_job *job) {
    ddl__ps_refuse(s, job, DDL_ERR_PEER,
                   "worker %d died, and in BSP a clock needs the pushes of all; load a checkpoint into servers of the "
                   "workers that are left, or use SSP or ASP, which go on",
                   s->lost);
}

/* >>payloads */

/* Nobody will receive the payload of this ask. One that is still on its way comes before its worker's next ask. */
static void ddl__ps_drop_payload(ddl__ps_server *s, const ddl__ps_job *job) {
    if (job->ask.bytes > 0) {
        ddl__lock(s->c);
        bool came = s->c->finalized || ddl__ps_move_refuse(s->group, job->source, job->ask.tag);
        s->unwanted[job->source] = came ? s->unwanted[job->source] : job->ask.tag;
        ddl__unlock(s->c);
    }
}

/* The worker asks again: what it sent before has come. */
static void ddl__ps_drop_unwanted(ddl__ps_server *s, int32_t worker) {
    if (s->unwanted[worker] != 0) {
        ddl__lock(s->c);
        (void)ddl__ps_move_refuse(s->group, worker, s->unwanted[worker]);
        ddl__unlock(s->c);
        s->unwanted[worker] = 0;
    }
}

/* Takes the memory of a payload, and of the rows that a pull will be answered with: whoever has one half and waits for
 * the other could wait for ever. Nothing is taken when not all is. */
static bool ddl__ps_take_room(ddl__ps_server *s, ddl__ps_job *job, uint64_t kept) {
    if (!ddl__ps_fits(&s->memory, ddl__ps_in_bytes(job) + job->out_bytes + kept)) {
        return false;
    }
    job->in = ddl__ps_buffer_get(s, ddl__ps_in_bytes(job), true);
    job->out = job->in != NULL && job->out_bytes > 0 ? ddl__ps_buffer_get(s, job->out_bytes, true) : NULL;
    if (job->in == NULL || (job->out == NULL && job->out_bytes > 0)) {
        ddl__ps_buffer_put(s, job->in, ddl__ps_in_bytes(job));
        job->in = NULL;
        return false;
    }
    return true;
}

/* Asks for the payload when there is room. urgent: it is next, and will not stay; others leave a reserve, and pushes to
 * a table that wait for their turn half of the room, for those that have it. False: it waits, or was refused because no
 * room will ever come (*out_refused). */
static bool ddl__ps_receive(ddl__ps_server *s, ddl__ps_place *p, ddl__ps_job *job, bool urgent, bool *out_refused) {
    bool rows = ddl__ps_is_row_op(job->ask.op), push = ddl__ps_is_push(job->ask.op), turns = ddl__ps_in_turns(s);
    bool early = turns && push && !urgent;
    uint64_t room = ddl__ps_room(s), kept = urgent ? 0 : s->memory.reserve;
    job->out_bytes =
        job->ask.op == DDL__PS_PULL_ROWS ? (size_t)job->ask.count * (size_t)p->rows.config.width * sizeof(float) : 0;
    *out_refused = false;
    if (!ddl__ps_take_room(s, job, early && rows ? DDL__MAX(kept, room / 2) : kept)) {
        uint64_t need = ddl__ps_in_bytes(job) + job->out_bytes;
        uint64_t gone = early ? 0 : kept + ddl__ps_waiting_bytes(s, job); /* early ones have a turn yet */
        if (s->passing == 0 && !early && need <= room) {
            ddl__ps_refuse(s, job, DDL_ERR_NOMEM, "server %d's machine has no memory for a %s of %llu bytes", s->number,
                           push ? "push" : "request", (unsigned long long)need);
            *out_refused = true;
            return false;
        }
        if (need > room - DDL__MIN(gone, room)) {
            ddl__ps_refuse(s, job, DDL_ERR_NOMEM,
                           "a %s of %llu bytes does not fit on server %d: %llu of memory_bytes (%llu) are left for "
                           "pushes and pulls; raise memory_bytes, or lower piece_bytes, which bounds a message",
                           push ? "push" : "request", (unsigned long long)need, s->number,
                           (unsigned long long)(room - DDL__MIN(gone, room)), (unsigned long long)s->memory.limit);
            *out_refused = true;
            return false;
        }
        s->starved = true;
        return false;
    }
    job->phase = DDL__PS_RECEIVING;
    s->coming += ddl__ps_in_bytes(job);
    ddl__lock(s->c);
    ddl__ps_move_drop(s->c, &job->messages[0]);
    if (!s->c->finalized) {
        ddl__ps_moves_begin(job->gate);
        ddl__ps_move(s->group, false, job->in, ddl__ps_in_bytes(job), job->source, job->ask.tag, job->gate,
                     &job->messages[0]);
        ddl__ps_moves_started(s->c, job->gate);
    }
    ddl__unlock(s->c);
    return true;
}

static const uint64_t *ddl__ps_ids(const ddl__ps_job *job) { return (const uint64_t *)(const void *)job->in; }
static const float *ddl__ps_grads(const ddl__ps_job *job) {
    size_t ids = ddl__ps_is_row_op(job->ask.op) ? (size_t)job->ask.count * sizeof(uint64_t) : 0;
    return (const float *)(const void *)(job->in + ids);
}

static double ddl__ps_rate_of(const ddl__ps_job *job) {
    double rate;
    memcpy(&rate, &job->ask.value, sizeof rate);
    return rate;
}

/* >>steps */

/* sum = gradient, or sum += gradient, of a push that may be a code. */
static void ddl__ps_take_gradient(const ddl__ps_server *s, ddl__ps_place *p, ddl__ps_job *job, bool first) {
    size_t count = (size_t)p->piece->count;
    const ddl__ps_trait *trait = s->extra.traits != NULL ? &s->extra.traits[p->piece->param] : NULL;
    if (trait != NULL && trait->code.kind != DDL_COMPRESS_NONE) {
        memset(p->sum, 0, first ? count * sizeof(float) : 0); /* only f32 is encoded */
        ddl__decode_add(&trait->code, (ddl__code_key){0, 0, 0}, job->in, p->piece->count, p->sum);
    } else if (first) {
        char *in = job->in; /* of the same size */
        job->in = p->sum;
        p->sum = in;
    } else {
        ddl__reduce_kernel(p->piece->dtype, DDL_SUM)(p->sum, p->sum, job->in, count);
    }
}

/* One step with a gradient, which is changed. False: it is not finite, and nothing was done. */
static bool ddl__ps_step_piece(ddl__ps_server *s, ddl__ps_place *p, void *grad, int32_t among, double rate, bool bad) {
    static const ddl__ps_trait plain;
    const ddl__ps_trait *trait = s->extra.traits != NULL ? &s->extra.traits[p->piece->param] : &plain;
    size_t count = (size_t)p->piece->count;
    ddl_optimizer o = s->optimizer;
    double factor = trait->rate_factor == 0 ? 1 : trait->rate_factor;
    if (s->op == DDL_AVG) {
        ddl__average(grad, count, p->piece->dtype, among);
    }
    if (s->extra.check && (bad || ddl__not_finite(grad, p->piece->count, p->piece->dtype))) { /* or overflowed */
        return false;
    }
    if (factor < 0) {
        return true;
    }
    o.weight_decay = trait->no_decay ? 0 : o.weight_decay;
    ddl_optimizer_part part = {.step = ++p->steps,
                               .learning_rate = o.learning_rate * rate * factor,
                               .tensor = s->extra.traits != NULL ? trait->tensor : p->piece->param,
                               .offset = p->piece->begin,
                               .count = p->piece->count,
                               .param = (float *)(void *)p->value->data,
                               .grad = grad,
                               .state = p->state,
                               .state_stride = p->piece->count,
                               .dtype = p->piece->dtype};
    double sums[2];
    ddl__optim_sums(&o, &part, sums); /* of LARS and LAMB: the piece is the whole tensor */
    ddl__optim_step(&o, &part, sums);
    return true;
}

/* Workers of the clock that is being added up: those who are there, and those who left after it. */
static int32_t ddl__ps_workers_of_clock(const ddl__ps_server *s, const ddl__ps_place *p) {
    int32_t count = 0;
    for (int32_t w = 0; w < s->workers; w++) {
        count += s->present[w] || DDL__MAX(s->clock[w], p->pushed[w]) > p->clock;
    }
    return count;
}

static void ddl__ps_step_rows(ddl__ps_server *s, ddl__ps_place *p, int32_t workers, double rate) {
    int32_t among = s->op == DDL_AVG ? workers : 1;
    ddl__ps_rows_step(&p->rows, &s->optimizer, s->params + p->number, among, rate);
}

/* SSP and ASP: the push is a step by itself. False: not before a reply has gone. */
static bool ddl__ps_apply(ddl__ps_server *s, ddl__ps_place *p, ddl__ps_job *job) {
    if (p->piece == NULL) {
        ddl__ps_rows_add(&p->rows, ddl__ps_ids(job), ddl__ps_grads(job), job->ask.count);
        ddl__ps_step_rows(s, p, s->present_count, ddl__ps_rate_of(job));
    } else {
        if (!ddl__ps_own(s, p)) {
            return false;
        }
        ddl__ps_take_gradient(s, p, job, true);
        job->skipped = !ddl__ps_step_piece(s, p, p->sum, s->present_count, ddl__ps_rate_of(job),
                                           job->ask.flags & DDL__PS_NOT_FINITE);
    }
    s->applied++;
    return true;
}

/* BSP: the push is added to the sum of its clock. */
static void ddl__ps_add(ddl__ps_server *s, ddl__ps_place *p, ddl__ps_job *job) {
    p->rate = p->given == 0 ? ddl__ps_rate_of(job) : p->rate;
    p->bad = (p->given > 0 && p->bad) || (job->ask.flags & DDL__PS_NOT_FINITE);
    if (p->piece == NULL) {
        ddl__ps_rows_add(&p->rows, ddl__ps_ids(job), ddl__ps_grads(job), job->ask.count);
    } else {
        ddl__ps_take_gradient(s, p, job, p->given == 0);
    }
    p->given++;
    s->applied++;
}

/* Servers that only add: workers run the optimizer. */
static void ddl__ps_show_sum(ddl__ps_server *s, ddl__ps_place *p) {
    memcpy(p->value->data, p->sum, ddl__ps_piece_bytes(p->piece));
    if (s->op == DDL_AVG) {
        ddl__average(p->value->data, (size_t)p->piece->count, p->piece->dtype, p->given);
    }
}

/* The clock has the pushes of all: one step. False: not before a reply has gone. */
static bool ddl__ps_finish_clock(ddl__ps_server *s, ddl__ps_place *p) {
    if (p->given > 0 && p->piece != NULL) {
        if (!ddl__ps_own(s, p)) {
            return false;
        }
        if (s->extra.sums) {
            ddl__ps_show_sum(s, p);
        } else {
            p->skipped = !ddl__ps_step_piece(s, p, p->sum, p->given, p->rate, p->bad);
        }
    } else if (p->given > 0) {
        ddl__ps_step_rows(s, p, ddl__ps_workers_of_clock(s, p), p->rate);
    }
    p->clock++;
    p->turn = p->given = 0;
    return true;
}

/* >>one ask */

typedef enum ddl__ps_step {
    DDL__PS_WAIT = 0,  /* and so do later ones of the same worker */
    DDL__PS_ASIDE = 1, /* it waits, later ones need not */
    DDL__PS_MOVED = 2, /* look at it again */
    DDL__PS_GONE = 3   /* it is out of the queue */
} ddl__ps_step;

/* Takes it out of the queue; its answer has been sent, or is not wanted. */
static ddl__ps_step ddl__ps_leave_queue(ddl__ps_server *s, ddl__ps_place *p, ddl__ps_job *job) {
    ddl__ps_dequeue(p, job);
    if (job->phase == DDL__PS_ASKED) {
        ddl__ps_drop_payload(s, job);
    }
    ddl__ps_buffer_put(s, job->in, ddl__ps_in_bytes(job));
    job->in = NULL;
    if (!job->sending) {
        ddl__ps_job_free(s, job);
    }
    return DDL__PS_GONE;
}

/* What came after its push has been consumed: nothing, or the pull half. */
static ddl__ps_step ddl__ps_consumed(ddl__ps_server *s, ddl__ps_place *p, ddl__ps_job *job) {
    if (job->ask.op != DDL__PS_PUSH_PULL) {
        return ddl__ps_leave_queue(s, p, job);
    }
    ddl__ps_buffer_put(s, job->in, ddl__ps_in_bytes(job));
    job->in = NULL;
    job->phase = DDL__PS_ACCEPTED;
    return DDL__PS_MOVED;
}

/* A push has come: known already, refused, or accepted. It is accepted when nothing can keep it from being applied. */
static ddl__ps_step ddl__ps_accept(ddl__ps_server *s, ddl__ps_place *p, ddl__ps_job *job) {
    ddl__ps_answer ok = ddl__ps_answer_ok(s);
    bool turns = ddl__ps_in_turns(s), pull = job->ask.op == DDL__PS_PUSH_PULL;
    if (turns && s->lost >= 0) {
        ddl__ps_refuse_lost(s, job);
        return ddl__ps_leave_queue(s, p, job);
    }
    uint64_t push = job->ask.sequence >> DDL__PS_CHUNK_BITS, last = p->sequence[job->source] >> DDL__PS_CHUNK_BITS;
    if (push < last) {
        ddl__ps_refuse(s, job, DDL_ERR_STATE,
                       "push %llu of worker %d comes after its push %llu to the same place, which was accepted; server "
                       "%d cannot tell whether push %llu was applied before, and leaves it out: make a push again "
                       "before a newer one",
                       (unsigned long long)push, job->source, (unsigned long long)last, s->number,
                       (unsigned long long)push);
        return ddl__ps_leave_queue(s, p, job);
    }
    if (job->ask.sequence <= p->sequence[job->source]) {
        s->repeated++;
        ok.notes = DDL__PS_REPEATED;
        if (pull) {
            return ddl__ps_consumed(s, p, job);
        }
        ddl__ps_send(s, job, &ok, NULL, 0);
        return ddl__ps_leave_queue(s, p, job);
    }
    if ((job->ask.flags & DDL__PS_CONTINUES) && job->ask.sequence != p->sequence[job->source] + 1) {
        ddl__ps_refuse(s, job, DDL_ERR_STATE, /* else the one before would count as known when it comes again */
                       "the message before it of the same push to table %d was not applied; push again with the same "
                       "sequence", p->number);
        return ddl__ps_leave_queue(s, p, job);
    }
    bool twice = p->piece != NULL && s->sync.mode != DDL_SYNC_ASP && p->pushed[job->source] > job->ask.clock;
    if (twice || (turns && job->ask.clock < p->clock)) {
        ddl__ps_refuse(s, job, DDL_ERR_STATE,
                       "worker %d has pushed it at clock %lld before; in BSP and SSP each worker pushes a "
                       "parameter once in a clock",
                       job->source, (long long)job->ask.clock);
        return ddl__ps_leave_queue(s, p, job);
    }
    if (p->piece == NULL && !ddl__ps_rows_pin(&p->rows, ddl__ps_ids(job), job->ask.count)) {
        ddl__ps_refuse(s, job, DDL_ERR_NOMEM,
                       "table %d has %u rows on server %d and no room for more within its bound (rows, memory_bytes); "
                       "evict = 1 makes room",
                       p->number, p->rows.count, s->number);
        return ddl__ps_leave_queue(s, p, job);
    }
    if (!turns && (!p->ready || !ddl__ps_apply(s, p, job))) {
        return DDL__PS_WAIT;
    }
    p->sequence[job->source] = job->ask.sequence;
    p->pushed[job->source] = DDL__MAX(p->pushed[job->source], job->ask.clock + 1);
    job->phase = DDL__PS_ACCEPTED;
    if (!pull) {
        ddl__ps_send(s, job, &ok, NULL, 0);
    }
    return turns ? DDL__PS_MOVED : ddl__ps_consumed(s, p, job);
}

static void ddl__ps_send_rows(ddl__ps_server *s, ddl__ps_place *p, ddl__ps_job *job) {
    ddl__ps_answer ok = ddl__ps_answer_ok(s);
    size_t row = (size_t)p->rows.config.width * sizeof(float);
    const uint64_t *ids = ddl__ps_ids(job);
    for (int64_t i = 0; i < job->ask.count; i++) {
        uint32_t slot = ddl__ps_row_get(&p->rows, ids[i], !p->rows.config.fixed);
        if (slot == DDL__PS_NO_ROW && p->rows.config.fixed) {
            ddl__ps_refuse(s, job, DDL_ERR_ARG,
                           "table %d has no row %llu on server %d, and the pull of worker %d does not make one in it "
                           "(fixed): push it first",
                           p->number, (unsigned long long)ids[i], s->number, job->source);
            return;
        }
        if (slot == DDL__PS_NO_ROW) {
            ddl__ps_refuse(s, job, DDL_ERR_NOMEM,
                           "table %d has %u rows on server %d and no room for row %llu within its bound (rows, "
                           "memory_bytes); evict = 1 makes room",
                           p->number, p->rows.count, s->number, (unsigned long long)ids[i]);
            return;
        }
        memcpy(job->out + (size_t)i * row, ddl__ps_row_values(&p->rows, slot), row);
    }
    ddl__ps_send(s, job, &ok, job->out, (size_t)job->ask.count * row);
}

/* BSP: the clock whose values a read gets: its own; after its worker's push of the same parameter, and in a push_pull,
 * the next. (To a table the worker may push again, until it ends its iteration.) */
static int64_t ddl__ps_read_clock(const ddl__ps_place *p, const ddl__ps_job *job) {
    bool pushed = p->piece != NULL && p->pushed[job->source] > job->ask.clock;
    return job->ask.clock + (pushed || job->ask.op == DDL__PS_PUSH_PULL);
}

/* May this read be answered? */
static bool ddl__ps_visible(const ddl__ps_server *s, const ddl__ps_place *p, const ddl__ps_job *job) {
    int64_t clock = job->ask.clock + (job->ask.op == DDL__PS_PUSH_PULL);
    if (!p->ready) {
        return false;
    }
    if (ddl__ps_in_turns(s)) {
        return p->clock >= ddl__ps_read_clock(p, job);
    }
    return s->sync.mode == DDL_SYNC_ASP || ddl__ps_place_slowest(s, p) >= clock - job->bound;
}

/* Slower workers keep it back: from now on, if they have not before. */
static void ddl__ps_held(ddl__ps_job *job) {
    job->held_from_ns = job->held_from_ns > 0 ? job->held_from_ns : ddl__now_ns();
}

/* A read that may not be answered yet. */
static ddl__ps_step ddl__ps_read_later(ddl__ps_server *s, ddl__ps_place *p, ddl__ps_job *job) {
    ddl__ps_held(job);
    if (!ddl__ps_in_turns(s) || s->lost < 0) {
        return DDL__PS_WAIT;
    }
    ddl__ps_refuse_lost(s, job);
    return ddl__ps_leave_queue(s, p, job);
}

static ddl__ps_step ddl__ps_read(ddl__ps_server *s, ddl__ps_place *p, ddl__ps_job *job) {
    if (!ddl__ps_visible(s, p, job)) {
        return ddl__ps_read_later(s, p, job);
    }
    if (p->piece == NULL) {
        ddl__ps_send_rows(s, p, job);
        return ddl__ps_leave_queue(s, p, job);
    }
    ddl__ps_answer ok = ddl__ps_answer_ok(s);
    bool skipped = job->ask.op == DDL__PS_PUSH_PULL && (ddl__ps_in_turns(s) ? p->skipped : job->skipped);
    ok.notes = skipped ? DDL__PS_SKIPPED : 0;
    job->value = p->value;
    p->value->readers++;
    ddl__ps_send(s, job, &ok, p->value->data, ddl__ps_piece_bytes(p->piece));
    return ddl__ps_leave_queue(s, p, job);
}

static ddl__ps_step ddl__ps_init(ddl__ps_server *s, ddl__ps_place *p, ddl__ps_job *job) {
    ddl__ps_answer ok = ddl__ps_answer_ok(s);
    memcpy(p->value->data, job->in, ddl__ps_in_bytes(job));
    p->ready = true;
    ddl__ps_send(s, job, &ok, NULL, 0);
    return ddl__ps_leave_queue(s, p, job);
}

/* BSP: does this push stay with its worker for now? Pieces come in the same order from all, so that one is complete,
 * and goes back, while the next come: links carry as much in both directions. Bytes that were asked for stand in queues
 * on the way here, and the first words of a worker that begins later stand behind them. */
static bool ddl__ps_hold(ddl__ps_server *s, const ddl__ps_place *p, const ddl__ps_job *job) {
    bool silent = false; /* with a credit, a worker says of some pieces late: what it has begun, it goes on with */
    for (int32_t w = 0; w < s->workers; w++) {
        silent = silent || (s->present[w] && s->begun[w] <= job->ask.clock);
    }
    if (s->coming < (silent ? DDL__PS_EARLY_BYTES : DDL__PS_COMING_BYTES)) {
        return false;
    }
    s->held = DDL__MIN(s->held, (int64_t)p->number);
    return true;
}

/* Does its payload lie in this process, where it stays until it is asked for? */
static bool ddl__ps_is_near(const ddl__ps_server *s, const ddl__ps_job *job) {
    return job->source == s->group->rank && job->ask.op == DDL__PS_PUSH_PULL;
}

/* BSP: will the turn of this push come? Until then one that is near needs no memory. */
static bool ddl__ps_has_turn(const ddl__ps_server *s, const ddl__ps_place *p, const ddl__ps_job *job) {
    return s->lost < 0 && job->ask.clock >= p->clock && p->pushed[job->source] <= job->ask.clock &&
           job->ask.sequence > p->sequence[job->source];
}

/* An ask whose payload is still with the worker. Ids of a pull come when it can be answered: so it takes memory only
 * while nothing keeps it. */
static ddl__ps_step ddl__ps_look_asked(ddl__ps_server *s, ddl__ps_place *p, ddl__ps_job *job) {
    bool push = ddl__ps_is_push(job->ask.op), refused;
    if (job->ask.op == DDL__PS_PULL_ROWS && !ddl__ps_visible(s, p, job)) {
        return ddl__ps_read_later(s, p, job);
    }
    if (job->ask.bytes == 0) {
        job->phase = DDL__PS_RECEIVED;
        return DDL__PS_MOVED;
    }
    bool next = ddl__ps_in_turns(s) && push && job->ask.clock == p->clock && job->source == p->turn;
    if (push && p->piece != NULL && ddl__ps_in_turns(s) &&
        (ddl__ps_is_near(s, job) ? !next && ddl__ps_has_turn(s, p, job) : ddl__ps_hold(s, p, job))) {
        return DDL__PS_WAIT;
    }
    ddl__ps_receive(s, p, job, next || job->ask.op == DDL__PS_INIT, &refused);
    return refused ? ddl__ps_leave_queue(s, p, job) : DDL__PS_WAIT;
}

static ddl__ps_step ddl__ps_look(ddl__ps_server *s, ddl__ps_place *p, ddl__ps_job *job) {
    bool push = ddl__ps_is_push(job->ask.op), turns = ddl__ps_in_turns(s);
    switch (job->phase) {
    case DDL__PS_LISTENING:
    case DDL__PS_RECEIVING:
        return DDL__PS_WAIT;
    case DDL__PS_ASKED:
        return ddl__ps_look_asked(s, p, job);
    case DDL__PS_RECEIVED:
        return push                          ? ddl__ps_accept(s, p, job)
               : job->ask.op == DDL__PS_INIT ? ddl__ps_init(s, p, job)
                                             : ddl__ps_read(s, p, job);
    case DDL__PS_ACCEPTED: /* its gradient is in, or waits for its turn, which never comes when a worker is lost */
        if (job->in != NULL && turns && s->lost >= 0 && job->ask.op == DDL__PS_PUSH_PULL) {
            ddl__ps_refuse_lost(s, job);
            return ddl__ps_leave_queue(s, p, job);
        }
        return job->in != NULL || job->ask.op != DDL__PS_PUSH_PULL ? DDL__PS_ASIDE : ddl__ps_read(s, p, job);
    }
    return DDL__PS_WAIT;
}

/* >>turns */

/* The worker's next push of the clock that is being added up; *out_coming: it has been announced. */
static ddl__ps_job *ddl__ps_turn_job(const ddl__ps_place *p, int32_t worker, bool *out_coming) {
    *out_coming = false;
    for (ddl__ps_job *job = p->first; job != NULL; job = job->next) {
        if (job->source == worker && ddl__ps_is_push(job->ask.op) && job->ask.clock == p->clock) {
            if (job->phase == DDL__PS_ACCEPTED && job->in != NULL) {
                return job;
            }
            *out_coming = *out_coming || job->phase < DDL__PS_ACCEPTED;
        }
    }
    return NULL;
}

/* Is a read here that must be answered before the clock that is being added up ends? */
static bool ddl__ps_has_read(const ddl__ps_place *p) {
    for (const ddl__ps_job *job = p->first; job != NULL; job = job->next) {
        bool read = !ddl__ps_is_push(job->ask.op) ||
                    (job->ask.op == DDL__PS_PUSH_PULL && job->in == NULL && job->phase >= DDL__PS_RECEIVED);
        if (read && job->ask.op != DDL__PS_INIT && ddl__ps_read_clock(p, job) <= p->clock) {
            return true;
        }
    }
    return false;
}

/* BSP: adds what has its turn, and steps when a clock is complete. True: something happened. */
static bool ddl__ps_take_turns(ddl__ps_server *s, ddl__ps_place *p) {
    bool moved = false, coming;
    while (ddl__ps_in_turns(s) && s->lost < 0 && s->present_count > 0) {
        if (p->turn == s->workers) {
            if (ddl__ps_has_read(p) || !ddl__ps_finish_clock(s, p)) {
                return moved;
            }
            moved = true;
            continue;
        }
        ddl__ps_job *job = ddl__ps_turn_job(p, p->turn, &coming);
        if (job != NULL) {
            p->turn += p->piece != NULL; /* to a table a worker may push more than once */
            ddl__ps_add(s, p, job);
            ddl__ps_consumed(s, p, job);
            moved = true;
        } else if (!coming && (!s->present[p->turn] || s->clock[p->turn] > p->clock)) {
            p->turn++;
        } else {
            return moved;
        }
    }
    return moved;
}

/* Does all that can be done at a place. */
static void ddl__ps_run(ddl__ps_server *s, ddl__ps_place *p) {
    bool moved = true;
    while (moved) {
        moved = false;
        memset(s->busy, 0, (size_t)s->workers * sizeof *s->busy);
        for (ddl__ps_job *job = p->first, *next; job != NULL; job = next) {
            next = job->next;
            if (s->busy[job->source]) {
                continue;
            }
            ddl__ps_step step = ddl__ps_look(s, p, job);
            s->busy[job->source] = step == DDL__PS_WAIT || step == DDL__PS_MOVED;
            moved = moved || step == DDL__PS_MOVED || step == DDL__PS_GONE;
        }
        moved = ddl__ps_take_turns(s, p) || moved;
    }
}

#endif /* DDL_PS_SERVE_H */

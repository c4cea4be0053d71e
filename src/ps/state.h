/* ps, fourth part: what a server holds, and the requests of workers that wait in it. Only the server's own thread
 * touches it; the context's lock is for messages and memory. */
#ifndef DDL_PS_STATE_H
#define DDL_PS_STATE_H

#include "rows.h"

enum {
    DDL__PS_JOBS_MAX = 1 << 16,      /* of one worker: what waits beyond stays with p2p */
    DDL__PS_COMING_BYTES = 16 << 20, /* of payloads that were asked for: 1 Gbit/s and 100 ms there and back */
    DDL__PS_EARLY_BYTES = 2 << 20    /* ... while a worker has not said yet that it pushes */
};

/* Values of a piece. A reply sends from here without a copy; a step meanwhile goes to a copy: see ddl__ps_own. */
typedef struct ddl__ps_value {
    int32_t readers;
    bool current; /* else it goes when its last reader has */
    _Alignas(double) char data[]; /* of the piece's type */
} ddl__ps_value;

typedef enum ddl__ps_phase {
    DDL__PS_LISTENING = 0, /* for an ask */
    DDL__PS_ASKED = 1,     /* its payload is still with the worker */
    DDL__PS_RECEIVING = 2,
    DDL__PS_RECEIVED = 3,
    DDL__PS_ACCEPTED = 4 /* a push that counts, and waits for its turn (BSP) */
} ddl__ps_phase;

/* A checkpoint: see save.h. */
typedef struct ddl__ps_generation {
    uint64_t order; /* in a folder later ones have greater numbers, whatever run they are of */
    int64_t clock;
    uint64_t pushes;
    int32_t servers;
    int64_t epoch; /* the program's */
} ddl__ps_generation;

/* One request of a worker, from the ask to the end of the answer. */
typedef struct ddl__ps_job {
    struct ddl__ps_job *next;     /* in the queue of its place, or free */
    struct ddl__ps_job *all_next; /* in the list of all */
    struct ddl__ps_job *ended;    /* in the list of jobs whose messages have ended; under the lock */
    struct ddl__ps_server *server;
    ddl_request *gate; /* parent of the messages that are under way */
    ddl_request *messages[2];
    ddl__ps_ask ask;
    int32_t source; /* worker */
    ddl__ps_phase phase;
    bool queued, sending;
    bool skipped;  /* SSP, ASP: its gradient was not finite */
    int32_t bound; /* staleness that this read was given */
    uint64_t held_from_ns; /* when that began to keep it back; 0: it has not */
    char *in;      /* payload */
    char *out;     /* rows that are sent */
    size_t out_bytes;
    ddl__ps_value *value; /* that is sent */
    const void *payload;  /* of the answer: rows, or values */
    size_t payload_bytes, answer_bytes;
    bool has_payload;    /* it may be empty */
    bool unsent, resend; /* there was no memory to send a part of the answer; and the other part has gone */
    uint8_t ask_bytes[DDL__PS_ASK_BYTES];
    uint8_t answer[DDL__PS_ANSWER_BYTES + DDL__PS_SENTENCE_BYTES];
} ddl__ps_job;

/* A piece of a parameter, or a table: what is pushed to and pulled from as one. */
typedef struct ddl__ps_place {
    ddl__ps_job *first, *last;  /* in the order they came */
    const ddl__ps_piece *piece; /* NULL: a table */
    int32_t number;             /* of the piece or table */
    bool ready;                 /* has its first values */
    int64_t *pushed;            /* by worker: clocks for which its push has been accepted */
    uint64_t *sequence;         /* by worker: last push that was accepted */
    /* BSP */
    int64_t clock; /* clocks whose updates are in */
    int32_t turn;  /* whose push is added next */
    int32_t given; /* workers whose pushes are in the sum */
    double rate;   /* the lowest rank's */
    bool bad;      /* a worker has said that its gradient is not finite */
    bool skipped;  /* ... and so the last clock made no step */
    /* of a piece */
    ddl__ps_value *value;
    void *sum, *state; /* sum: as payloads, of a buffer */
    int64_t steps;
    /* of a table */
    ddl__ps_rows rows;
} ddl__ps_place;

typedef struct ddl__ps_server {
    ddl_context *c;
    ddl_group *group;
    int32_t number, servers, workers, params;
    const int64_t *lengths;      /* elements of each parameter */
    const ddl_dtype *types;
    const ddl__ps_piece *pieces; /* all, of all servers */
    int64_t piece_count;
    ddl__ps_place **places; /* by piece; NULL: another server's */
    ddl__ps_place **tables;
    int32_t table_count, table_cap;
    ddl_optimizer optimizer;
    ddl_op op;
    ddl__ps_details extra;
    ddl_sync_config sync; /* resolved: a bound of 0 is 0 */
    ddl__ps_memory memory;
    uint64_t coming;  /* bytes of payloads that were asked for, and are not here */
    int64_t held;     /* first piece with a push that waits for some of those; INT64_MAX: there is none */
    uint64_t passing; /* of the bytes in use, those that are given back by themselves: payloads, old values */

    bool *present; /* by worker: neither dead nor gone */
    int32_t present_count;
    int32_t lost;                  /* BSP: a worker that died; -1: none */
    int64_t *clock;                /* by worker: iterations that it has finished */
    int64_t *begun;                /* by worker: iterations of which it has announced a push of a piece */
    uint64_t *ended_ns, *takes_ns; /* by worker: when its last iteration ended, and how long one takes */
    uint64_t *own_ns;              /* ... and how long without waits for slower workers */
    int32_t *jobs;                 /* by worker */
    bool *busy;                    /* scratch, by worker */
    bool *deaf;                    /* by worker: no receive is posted for its next ask */
    int32_t *unwanted; /* by worker: tag of a payload that had not come when its ask was refused, 0: there is none */
    ddl__ps_job *spare, *all;
    ddl__ps_job **listeners; /* by worker: the job of the receive that is posted for its next ask */
    ddl__ps_generation saved, saved_last;
    ddl__ps_place control; /* gates, and what all workers ask for together */

    ddl__ps_job *ended_first, *ended_last; /* under the lock, as is stop */
    bool starved, freed;                   /* something waits for room; some was given back since */
    bool unsent; /* an answer found no memory, and is to be sent again */
    bool stop, ended, served;
    ddl_status status;          /* why it ended */
    uint64_t applied, repeated; /* pushes */
    ddl_ps_info told;           /* under the lock: what is said of this server */
} ddl__ps_server;

/* BSP, and SSP whose bound is 0: updates of a clock are added up in the order of ranks and make one step. */
static bool ddl__ps_in_turns(const ddl__ps_server *s) {
    return s->sync.mode == DDL_SYNC_BSP || (s->sync.mode == DDL_SYNC_SSP && s->sync.staleness_max == 0);
}

/* >>buffers: not zeroed, kept for the next time by the context */

static void *ddl__ps_buffer_get(ddl__ps_server *s, size_t bytes, bool urgent) {
    if (!ddl__ps_fits(&s->memory, bytes + (urgent ? 0 : s->memory.reserve))) {
        return NULL;
    }
    ddl__lock(s->c);
    void *memory = ddl__scratch_get(s->c, bytes);
    ddl__unlock(s->c);
    if (memory != NULL) {
        ddl__ps_use(&s->memory, bytes);
        s->passing += bytes;
    }
    return memory;
}

static void ddl__ps_buffer_put(ddl__ps_server *s, void *memory, size_t bytes) {
    if (memory != NULL) {
        ddl__lock(s->c);
        ddl__scratch_put(s->c, memory);
        ddl__unlock(s->c);
        s->memory.used -= bytes;
        s->passing -= bytes;
        s->freed = true;
    }
}

/* >>values */

static size_t ddl__ps_value_bytes(const ddl__ps_place *p) {
    return sizeof(ddl__ps_value) + ddl__ps_piece_bytes(p->piece);
}

static ddl__ps_value *ddl__ps_value_new(ddl__ps_server *s, const ddl__ps_place *p) {
    ddl__ps_value *v = ddl__ps_buffer_get(s, ddl__ps_value_bytes(p), true);
    if (v != NULL) {
        v->readers = 0;
        v->current = true;
    }
    return v;
}

static void ddl__ps_value_left(ddl__ps_server *s, const ddl__ps_place *p, ddl__ps_value *v) {
    if (--v->readers == 0 && !v->current) {
        ddl__ps_buffer_put(s, v, ddl__ps_value_bytes(p));
    }
}

/* Makes the values writable: while a reply is still sending them, they are its own. False: no room for a copy, until a
 * reply has gone. */
static bool ddl__ps_own(ddl__ps_server *s, ddl__ps_place *p) {
    if (p->value->readers == 0) {
        return true;
    }
    ddl__ps_value *copy = ddl__ps_value_new(s, p);
    if (copy == NULL) {
        s->starved = true;
        return false;
    }
    memcpy(copy->data, p->value->data, ddl__ps_piece_bytes(p->piece));
    p->value->current = false;
    p->value = copy;
    return true;
}

/* >>jobs */

static void ddl__ps_job_ended(ddl_context *c, ddl_request *gate) {
    (void)c;
    ddl__ps_job *job = gate->op;
    ddl__ps_server *s = job->server;
    job->ended = NULL;
    if (s->ended_last != NULL) {
        s->ended_last->ended = job;
    } else {
        s->ended_first = job;
    }
    s->ended_last = job;
    ddl__changed(c);
}

static void ddl__ps_job_abandon(ddl_context *c, ddl_request *gate) {
    (void)c;
    (void)gate; /* its messages are ended by themselves */
}

static void ddl__ps_job_explain(ddl_context *c, ddl_request *gate, ddl__text *text) {
    (void)c;
    (void)gate;
    ddl__text_add(text, "a parameter server answers");
}

static void ddl__ps_job_tick(ddl_context *c, ddl_request *gate, uint64_t waited) {
    (void)c;
    (void)gate;
    (void)waited;
}

static int32_t ddl__ps_job_expect(ddl_context *c, ddl_request *gate) {
    (void)c;
    (void)gate;
    return -1;
}

static const ddl__request_ops ddl__ps_job_ops = {ddl__ps_job_abandon, ddl__ps_job_explain, ddl__ps_job_tick,
                                                 ddl__ps_job_expect, NULL};

/* Takes a job, with the gate that its messages are parts of. NULL: no memory. The lock is held. */
static ddl__ps_job *ddl__ps_job_new(ddl__ps_server *s, int32_t source) {
    ddl__ps_job *job = s->spare;
    if (job != NULL) {
        s->spare = job->next;
        ddl_request *gate = job->gate;
        ddl__ps_job *all_next = job->all_next;
        memset(job, 0, sizeof *job);
        job->gate = gate;
        job->all_next = all_next;
    } else {
        job = ddl__alloc(&s->c->base, sizeof *job);
        if (job == NULL || ddl__request_new(s->group, &ddl__ps_job_ops, &job->gate) < 0) {
            ddl__free(&s->c->base, job);
            return NULL;
        }
        ddl__ps_use(&s->memory, sizeof *job);
        job->all_next = s->all;
        s->all = job;
    }
    job->server = s;
    job->source = source;
    job->gate->op = job;
    job->gate->attended_ns = UINT64_MAX;
    job->gate->parts_done = ddl__ps_job_ended;
    s->jobs[source]++;
    return job;
}

static size_t ddl__ps_in_bytes(const ddl__ps_job *job) { return (size_t)job->ask.bytes; }

/* Bytes that payloads can have when no other is here. */
static uint64_t ddl__ps_room(const ddl__ps_server *s) {
    uint64_t stays = s->memory.used - s->passing;
    return s->memory.limit - DDL__MIN(stays, s->memory.limit);
}

/* BSP: bytes of pushes that wait for their turn, and will not get it before this job is done. */
static uint64_t ddl__ps_waiting_bytes(const ddl__ps_server *s, const ddl__ps_job *job) {
    int64_t from = job->ask.clock + !ddl__ps_is_push(job->ask.op);
    uint64_t bytes = 0;
    for (const ddl__ps_job *other = s->all; ddl__ps_in_turns(s) && other != NULL; other = other->all_next) {
        bool waits = other->queued && other->phase == DDL__PS_ACCEPTED && other->in != NULL;
        bytes += waits && other->ask.clock >= from ? ddl__ps_in_bytes(other) : 0;
    }
    return bytes;
}

static ddl__ps_place *ddl__ps_place_of(ddl__ps_server *s, const ddl__ps_ask *a) {
    if (ddl__ps_is_row_op(a->op)) {
        return s->tables[a->place];
    }
    return ddl__ps_is_piece_op(a->op) ? s->places[a->place] : &s->control;
}

/* Gives a job back that is in no queue and sends nothing. */
static void ddl__ps_job_free(ddl__ps_server *s, ddl__ps_job *job) {
    ddl__ps_buffer_put(s, job->in, ddl__ps_in_bytes(job));
    ddl__ps_buffer_put(s, job->out, job->out_bytes);
    if (job->value != NULL) {
        ddl__ps_value_left(s, ddl__ps_place_of(s, &job->ask), job->value);
    }
    job->in = job->out = NULL;
    job->value = NULL;
    ddl__lock(s->c);
    ddl__ps_move_drop(s->c, &job->messages[0]);
    ddl__ps_move_drop(s->c, &job->messages[1]);
    job->next = s->spare;
    s->spare = job;
    s->jobs[job->source]--;
    ddl__unlock(s->c);
}

static void ddl__ps_enqueue(ddl__ps_place *p, ddl__ps_job *job) {
    job->next = NULL;
    job->queued = true;
    if (p->last != NULL) {
        p->last->next = job;
    } else {
        p->first = job;
    }
    p->last = job;
}

static void ddl__ps_dequeue(ddl__ps_place *p, ddl__ps_job *job) {
    ddl__ps_job *before = NULL;
    for (ddl__ps_job *at = p->first; at != job; at = at->next) {
        before = at;
    }
    *(before != NULL ? &before->next : &p->first) = job->next;
    p->last = p->last == job ? before : p->last;
    job->next = NULL;
    job->queued = false;
}

/* Does any answer still have to leave? */
static bool ddl__ps_is_sending(const ddl__ps_server *s) {
    for (const ddl__ps_job *job = s->all; job != NULL; job = job->all_next) {
        if (job->sending) {
            return true;
        }
    }
    return false;
}

/* >>clocks */

static int64_t ddl__ps_slowest(const ddl__ps_server *s) {
    int64_t least = INT64_MAX;
    for (int32_t w = 0; w < s->workers; w++) {
        least = s->present[w] ? DDL__MIN(least, s->clock[w]) : least;
    }
    return least == INT64_MAX ? 0 : least;
}

/* Clocks of which all updates of this place are in, of the workers that are left. To a table a worker may push more
 * than once in a clock, so that only its clock tells. A push that was announced and has not come yet holds its worker
 * back. */
static int64_t ddl__ps_place_slowest(const ddl__ps_server *s, const ddl__ps_place *p) {
    int64_t least = INT64_MAX;
    for (int32_t w = 0; w < s->workers; w++) {
        int64_t at = p->piece != NULL ? DDL__MAX(s->clock[w], p->pushed[w]) : s->clock[w];
        least = s->present[w] ? DDL__MIN(least, at) : least;
    }
    for (const ddl__ps_job *job = p->first; job != NULL; job = job->next) {
        if (ddl__ps_is_push(job->ask.op) && job->phase < DDL__PS_ACCEPTED) {
            least = DDL__MIN(least, job->ask.clock);
        }
    }
    return least;
}

/* The staleness that a worker is given for a read or at the end of an iteration, at a clock. The iterations that it is
 * let go on (DSSP) count from where it is now; at none of them it waits for one end of the slowest's. */
static int32_t ddl__ps_bound(const ddl__ps_server *s, int32_t worker, int64_t clock) {
    int32_t range = s->sync.staleness_max - s->sync.staleness, slow = -1;
    for (int32_t w = 0; range > 0 && w < s->workers; w++) {
        slow = s->present[w] && (slow < 0 || s->clock[w] < s->clock[slow]) ? w : slow;
    }
    if (range <= 0 || slow < 0 || slow == worker) {
        return s->sync.staleness;
    }
    int64_t ahead = clock - s->clock[slow];
    if (ahead <= s->sync.staleness) {
        return s->sync.staleness; /* nothing keeps it back */
    }
    if (ahead > s->sync.staleness_max) {
        return s->sync.staleness_max;
    }
    if (s->takes_ns[slow] == 0 || s->own_ns[worker] == 0) {
        return s->sync.staleness; /* nothing was measured yet */
    }
    range = s->sync.staleness_max - (int32_t)ahead + 1;
    return (int32_t)ahead - 1 +
           ddl__ps_extra(ddl__now_ns(), s->ended_ns[slow], s->takes_ns[slow], s->own_ns[worker], range);
}

#endif /* DDL_PS_STATE_H */

/* ps, seventh part: the server itself: its loop, the asks that concern all of it, its beginning and end. */
#ifndef DDL_PS_SERVER_H
#define DDL_PS_SERVER_H

#include "save.h"

/* >>what all workers ask for together */

static ddl__reader ddl__ps_payload(const ddl__ps_job *job) { return ddl__reader_of(job->in, ddl__ps_in_bytes(job)); }

static ddl_sync_config ddl__ps_get_sync(ddl__reader *r) {
    ddl_sync_config sync = {.mode = (ddl_sync)ddl__get_u32(r)};
    sync.staleness = (int32_t)ddl__get_u32(r);
    sync.staleness_max = (int32_t)ddl__get_u32(r);
    return sync;
}

static ddl_ps_table_config ddl__ps_get_table(ddl__reader *r) {
    ddl_ps_table_config t = {.width = (int32_t)ddl__get_u32(r)};
    uint32_t uniform = ddl__get_u32(r);
    memcpy(&t.uniform, &uniform, sizeof uniform);
    t.seed = ddl__get_u64(r);
    t.rows = (int64_t)ddl__get_u64(r);
    t.evict = (int32_t)ddl__get_u32(r);
    t.fixed = (int32_t)ddl__get_u32(r);
    return t;
}

/* The arrays by worker of a place. */
static bool ddl__ps_place_begin(ddl__ps_server *s, ddl__ps_place *p, int32_t number) {
    p->number = number;
    p->pushed = ddl__ps_alloc(&s->memory, (size_t)s->workers, sizeof *p->pushed);
    p->sequence = ddl__ps_alloc(&s->memory, (size_t)s->workers, sizeof *p->sequence);
    for (int32_t w = 0; p->pushed != NULL && w < s->workers; w++) {
        p->clock = DDL__MAX(p->clock, ddl__ps_in_turns(s) ? s->clock[w] : 0);
    }
    return p->pushed != NULL && p->sequence != NULL;
}

static void ddl__ps_place_end(ddl__ps_server *s, ddl__ps_place *p) {
    ddl__ps_free(&s->memory, p->pushed, (size_t)s->workers, sizeof *p->pushed);
    ddl__ps_free(&s->memory, p->sequence, (size_t)s->workers, sizeof *p->sequence);
}

/* Bytes that a table with a bound of rows takes, without its index. */
static uint64_t ddl__ps_rows_need(const ddl__ps_rows *t) {
    uint64_t slabs = ((uint64_t)t->config.rows + DDL__PS_SLAB_ROWS - 1) / DDL__PS_SLAB_ROWS;
    return slabs * (ddl__ps_slab_bytes(t) + DDL__PS_SLAB_ROWS * sizeof(uint32_t) + sizeof(void *));
}

static void ddl__ps_table_end(ddl__ps_server *s, ddl__ps_place *p) {
    ddl__ps_rows_free(&p->rows);
    ddl__ps_place_end(s, p);
    ddl__ps_free(&s->memory, p, 1, sizeof *p);
}

/* Workers know so many tables. One more here is one that another server could not make: it goes, so that a number
 * means the same table on all servers. */
static ddl_status ddl__ps_tables_keep(ddl__ps_server *s, int32_t count, ddl__sentence *why) {
    if (count < 0 || count > s->table_count) {
        return ddl__fail(why, DDL_ERR_MISMATCH, "server %d has %d tables, and the workers know %d", s->number,
                         s->table_count, count);
    }
    while (s->table_count > count) {
        ddl__ps_table_end(s, s->tables[--s->table_count]);
    }
    return DDL_OK;
}

static ddl_status ddl__ps_table_add(ddl__ps_server *s, const ddl_ps_table_config *config, ddl__sentence *why) {
    ddl__ps_place *p = ddl__ps_alloc(&s->memory, 1, sizeof *p);
    size_t cap = (size_t)s->table_count;
    ddl__ps_place **tables = ddl__ps_alloc(&s->memory, cap + 1, sizeof *tables);
    if (p == NULL || tables == NULL || !ddl__ps_place_begin(s, p, s->table_count)) {
        if (p != NULL) {
            ddl__ps_place_end(s, p);
        }
        ddl__ps_free(&s->memory, p, 1, sizeof *p);
        ddl__ps_free(&s->memory, tables, cap + 1, sizeof *tables);
        return ddl__fail(why, DDL_ERR_NOMEM, "server %d has no memory for table %d", s->number, s->table_count);
    }
    p->ready = true;
    p->rows = (ddl__ps_rows){.config = *config,
                             .slots = ddl__optim_slots(&s->optimizer),
                             .newest = DDL__PS_NO_ROW,
                             .oldest = DDL__PS_NO_ROW,
                             .memory = &s->memory};
    if (!ddl__ps_fits(&s->memory, ddl__ps_rows_need(&p->rows) + s->memory.reserve)) {
        uint64_t need = ddl__ps_rows_need(&p->rows);
        ddl__ps_place_end(s, p);
        ddl__ps_free(&s->memory, p, 1, sizeof *p);
        ddl__ps_free(&s->memory, tables, cap + 1, sizeof *tables);
        return ddl__fail(
            why, DDL_ERR_NOMEM,
            "table %d: %lld rows of width %d take %llu bytes on server %d, which has %llu of its %llu left; "
            "ask for fewer rows or raise memory_bytes",
            s->table_count, (long long)config->rows, config->width, (unsigned long long)need, s->number,
            (unsigned long long)(s->memory.limit - s->memory.used), (unsigned long long)s->memory.limit);
    }
    if (s->tables != NULL) {
        memcpy(tables, s->tables, cap * sizeof *tables);
        ddl__ps_free(&s->memory, s->tables, (size_t)s->table_cap, sizeof *tables);
    }
    s->tables = tables;
    s->table_cap = s->table_count + 1;
    s->tables[s->table_count++] = p;
    return DDL_OK;
}

/* A sum that some have added to and others not: neither to be saved nor to be forgotten. */
static ddl_status ddl__ps_between_clocks(const ddl__ps_server *s, ddl__sentence *why) {
    for (int64_t i = 0; i < s->piece_count + s->table_count; i++) {
        const ddl__ps_place *p = i < s->piece_count ? s->places[i] : s->tables[i - s->piece_count];
        if (p != NULL && (p->first != NULL || p->given > 0)) {
            return ddl__fail(why, DDL_ERR_STATE,
                             "%s %d: some workers have pushed for clock %lld and others have not; do this when all "
                             "have called ddl_ps_clock for the same clock",
                             p->piece != NULL ? "parameter" : "table", p->piece != NULL ? p->piece->param : p->number,
                             (long long)p->clock);
        }
    }
    return DDL_OK;
}

/* All places go on from the workers' clocks. */
static void ddl__ps_set_clocks(ddl__ps_server *s, const int64_t *clocks) {
    int64_t most = 0;
    for (int32_t w = 0; w < s->workers; w++) {
        s->clock[w] = s->begun[w] = clocks[w];
        most = s->present[w] ? DDL__MAX(most, clocks[w]) : most;
    }
    for (int64_t i = 0; i < s->piece_count + s->table_count; i++) {
        ddl__ps_place *p = i < s->piece_count ? s->places[i] : s->tables[i - s->piece_count];
        for (int32_t w = 0; p != NULL && w < s->workers; w++) {
            p->pushed[w] = clocks[w];
            p->clock = most;
            p->turn = p->given = 0;
        }
    }
}

static ddl_status ddl__ps_switch_to(ddl__ps_server *s, const ddl_sync_config *sync, int64_t *clocks,
                                    ddl__sentence *why) {
    int64_t most = 0;
    DDL__TRY(ddl__ps_between_clocks(s, why));
    for (int32_t w = 0; w < s->workers; w++) {
        most = s->present[w] ? DDL__MAX(most, s->clock[w]) : most;
    }
    for (int32_t w = 0; w < s->workers; w++) {
        clocks[w] = most;
    }
    s->sync = *sync;
    s->lost = -1; /* no sum waits for it */
    ddl__ps_set_clocks(s, clocks);
    return DDL_OK;
}

/* What workers and clocks say of the moment: the same on all servers. */
static ddl__ps_generation ddl__ps_moment(const ddl__ps_server *s, uint64_t order, const uint64_t *sequences) {
    ddl__ps_generation g = {.order = order, .servers = s->servers};
    for (const ddl__ps_job *job = s->control.first; job != NULL; job = job->next) {
        g.epoch = job->ask.op == DDL__PS_SAVE ? DDL__MAX(g.epoch, job->ask.count) : g.epoch;
    }
    for (int32_t w = 0; w < s->workers; w++) {
        g.clock = DDL__MAX(g.clock, s->clock[w]);
        g.pushes += sequences[w];
    }
    return g;
}

/* Could any server not write the last checkpoint? Workers have heard all of them. */
static bool ddl__ps_last_save_failed(const ddl__ps_server *s) {
    bool failed = false;
    for (const ddl__ps_job *job = s->control.first; job != NULL; job = job->next) {
        failed = failed || (job->ask.op == DDL__PS_SAVE && (job->ask.value & 1) != 0);
    }
    return failed;
}

/* Two generations are kept: this one and the newest before it that all servers have. An older one, or one that is not
 * whole, goes when this server's file of the new one is there. */
static ddl_status ddl__ps_do_save(ddl__ps_server *s, const char *folder, const ddl__ps_generation *g,
                                  const uint64_t *sequences, ddl__sentence *why) {
    char name[DDL__PS_NAME_BYTES], path[DDL__PS_PATH_BYTES + 160];
    bool failed = ddl__ps_last_save_failed(s);
    ddl__ps_generation old = failed ? s->saved_last : s->saved;
    s->saved = failed ? s->saved : s->saved_last;
    s->saved_last = (ddl__ps_generation){0};
    DDL__TRY(ddl__ps_save(s, folder, g, sequences, why));
    s->saved_last = *g;
    if (old.servers > 0 && ddl__ps_newer_first(&old, g) != 0 && ddl__ps_newer_first(&old, &s->saved) != 0) {
        ddl__ps_name(name, &old, s->number);
        snprintf(path, sizeof path, "%s/%s", folder, name);
        unlink(path);
    }
    return DDL_OK;
}

/* Does what all have asked for; clocks and sequences are by worker, in and out. */
static ddl_status ddl__ps_do_joint(ddl__ps_server *s, const ddl__ps_job *job, int64_t *clocks, uint64_t *sequences,
                                   ddl__ps_generation *g, ddl__sentence *why) {
    ddl__reader r = ddl__ps_payload(job);
    DDL__TRY(ddl__ps_tables_keep(s, job->ask.place, why));
    if (job->ask.op >= DDL__PS_SAVE && memchr(job->in, 0, ddl__ps_in_bytes(job)) == NULL) {
        return ddl__fail(why, DDL_ERR_MISMATCH,
                         "server %d was given a path that does not end; all ranks must run the same program",
                         s->number);
    }
    if (job->ask.op == DDL__PS_TABLE) {
        ddl_ps_table_config config = ddl__ps_get_table(&r);
        return ddl__ps_table_add(s, &config, why);
    }
    if (job->ask.op == DDL__PS_SWITCH) {
        ddl_sync_config sync = ddl__ps_get_sync(&r);
        return ddl__ps_switch_to(s, &sync, clocks, why);
    }
    if (job->ask.op == DDL__PS_LOOK) {
        ddl__ps_generation found[DDL__PS_GENERATIONS];
        g->order = ddl__ps_generations(job->in, found) > 0 ? found[0].order : 0;
        return DDL_OK;
    }
    DDL__TRY(ddl__ps_between_clocks(s, why));
    if (job->ask.op == DDL__PS_SAVE) {
        *g = ddl__ps_moment(s, job->ask.value >> 1, sequences);
        return ddl__ps_do_save(s, job->in, g, sequences, why);
    }
    DDL__TRY(ddl__ps_load(s, job->in, clocks, sequences, g, why));
    for (int64_t i = 0; i < s->piece_count; i++) {
        if (s->places[i] != NULL) {
            s->places[i]->ready = true;
        }
    }
    s->lost = -1;
    ddl__ps_set_clocks(s, clocks);
    return DDL_OK;
}

/* A joint ask that has come. One whose payload has not is of a worker that died or left meanwhile: it is not looked at,
 * and goes when the receive of its payload has failed. */
static bool ddl__ps_is_asked(const ddl__ps_job *job) {
    return ddl__ps_is_joint(job->ask.op) && job->phase == DDL__PS_RECEIVED;
}

/* All asks of the same kind, with the same payload? */
static bool ddl__ps_joint_agree(const ddl__ps_server *s, const ddl__ps_job *first) {
    for (const ddl__ps_job *job = s->control.first; job != NULL; job = job->next) {
        if (ddl__ps_is_asked(job) &&
            (job->ask.op != first->ask.op || job->ask.place != first->ask.place || job->ask.bytes != first->ask.bytes ||
             memcmp(job->in, first->in, ddl__ps_in_bytes(first)) != 0)) {
            return false;
        }
    }
    return true;
}

static void ddl__ps_answer_joint(ddl__ps_server *s, ddl_status status, const ddl__sentence *why, const int64_t *clocks,
                                 const uint64_t *sequences, const ddl__ps_generation *g) {
    ddl__ps_job *next;
    for (ddl__ps_job *job = s->control.first; job != NULL; job = next) {
        next = job->next;
        if (ddl__ps_is_asked(job)) {
            ddl__ps_answer a = ddl__ps_answer_ok(s);
            a.status = status;
            a.clock = clocks[job->source];
            a.sequence = sequences[job->source];
            a.epoch = g->epoch;
            a.generation = job->ask.op == DDL__PS_LOOK
                               ? (int64_t)(g->order + 1)
                               : (int64_t)(ddl__mix(ddl__mix(g->order, (uint64_t)g->clock), g->pushes) >> 1);
            snprintf(a.text, sizeof a.text, "%.*s", (int)sizeof a.text - 1, status < 0 ? why->text : "");
            ddl__ps_send(s, job, &a, NULL, 0);
            ddl__ps_leave_queue(s, &s->control, job);
        }
    }
}

/* There is no memory to do it with: all are told, and may ask again. */
static void ddl__ps_refuse_joint(ddl__ps_server *s) {
    ddl__ps_job *next;
    for (ddl__ps_job *job = s->control.first; job != NULL; job = next) {
        next = job->next;
        if (ddl__ps_is_asked(job)) {
            ddl__ps_refuse(s, job, DDL_ERR_NOMEM, "server %d has no memory for what all workers ask for", s->number);
            ddl__ps_leave_queue(s, &s->control, job);
        }
    }
}

/* When every worker that is left has asked. True: it was done. */
static bool ddl__ps_run_joint(ddl__ps_server *s) {
    int32_t asked = 0;
    ddl__ps_job *first = NULL;
    for (ddl__ps_job *job = s->control.first; job != NULL; job = job->next) {
        if (ddl__ps_is_asked(job) && s->present[job->source]) {
            first = first == NULL ? job : first;
            asked++;
        }
    }
    if (first == NULL || asked < s->present_count) {
        return false;
    }
    ddl__sentence why = {0};
    ddl__ps_generation g = {0};
    size_t n = (size_t)s->workers;
    int64_t *clocks = ddl__ps_alloc(&s->memory, n, sizeof *clocks);
    uint64_t *sequences = ddl__ps_alloc(&s->memory, n, sizeof *sequences);
    ddl_status status = DDL_ERR_NOMEM;
    if (clocks == NULL || sequences == NULL) {
        ddl__ps_free(&s->memory, clocks, n, sizeof *clocks);
        ddl__ps_free(&s->memory, sequences, n, sizeof *sequences);
        ddl__ps_refuse_joint(s);
        return true;
    }
    memcpy(clocks, s->clock, n * sizeof *clocks);
    for (const ddl__ps_job *job = s->control.first; job != NULL; job = job->next) {
        sequences[job->source] = ddl__ps_is_joint(job->ask.op) ? job->ask.sequence : sequences[job->source];
    }
    status =
        ddl__ps_joint_agree(s, first)
            ? ddl__ps_do_joint(s, first, clocks, sequences, &g, &why)
            : ddl__fail(&why, DDL_ERR_MISMATCH,
                        "the workers ask for different things; all must call the same of "
                        "ddl_ps_table_create, ddl_ps_switch, ddl_ps_save and ddl_ps_load, with the same arguments");
    ddl__ps_answer_joint(s, status, &why, clocks, sequences, &g);
    ddl__ps_free(&s->memory, clocks, n, sizeof *clocks);
    ddl__ps_free(&s->memory, sequences, n, sizeof *sequences);
    return true;
}

/* >>control */

static void ddl__ps_run_all(ddl__ps_server *s) {
    for (int64_t i = 0; i < s->piece_count; i++) {
        if (s->places[i] != NULL) {
            ddl__ps_run(s, s->places[i]);
        }
    }
    for (int32_t i = 0; i < s->table_count; i++) {
        ddl__ps_run(s, s->tables[i]);
    }
}

/* Some of what was asked for has come: what waited for that may come. */
static void ddl__ps_run_held(ddl__ps_server *s) {
    int64_t i = s->held;
    s->held = INT64_MAX;
    for (; i < s->piece_count && s->held == INT64_MAX; i++) {
        if (s->places[i] != NULL) {
            ddl__ps_run(s, s->places[i]);
        }
    }
}

static void ddl__ps_worker_gone(ddl__ps_server *s, int32_t worker, bool died) {
    if (s->present[worker]) {
        s->present[worker] = false;
        s->present_count--;
        s->lost = died && s->lost < 0 ? worker : s->lost;
    }
}

static void ddl__ps_take_clock(ddl__ps_server *s, const ddl__ps_job *job) {
    int32_t w = job->source;
    s->clock[w] = DDL__MAX(s->clock[w], job->ask.clock);
    s->ended_ns[w] = ddl__now_ns();
    /* Smoothed: one slow iteration is no slow worker. */
    uint64_t own = DDL__MAX((uint64_t)job->ask.count, 1);
    s->takes_ns[w] = s->takes_ns[w] == 0 ? job->ask.value : (3 * s->takes_ns[w] + job->ask.value) / 4;
    s->own_ns[w] = s->own_ns[w] == 0 ? own : (3 * s->own_ns[w] + own) / 4;
}

/* One look at one control ask. */
static ddl__ps_step ddl__ps_look_control(ddl__ps_server *s, ddl__ps_job *job) {
    bool refused = false;
    ddl__ps_answer ok = ddl__ps_answer_ok(s);
    switch (job->ask.op) {
    case DDL__PS_CLOCK:
        ddl__ps_take_clock(s, job);
        return ddl__ps_leave_queue(s, &s->control, job);
    case DDL__PS_LEAVE:
        ddl__ps_worker_gone(s, job->source, false);
        break;
    case DDL__PS_GATE:
        if (s->lost >= 0 && ddl__ps_in_turns(s)) {
            ddl__ps_refuse_lost(s, job);
            return ddl__ps_leave_queue(s, &s->control, job);
        }
        if (s->sync.mode != DDL_SYNC_ASP && ddl__ps_slowest(s) < job->ask.clock - job->bound) {
            ddl__ps_held(job);
            return DDL__PS_WAIT;
        }
        break;
    default:
        if (job->phase == DDL__PS_ASKED) {
            ddl__ps_receive(s, &s->control, job, true, &refused);
        }
        return refused ? ddl__ps_leave_queue(s, &s->control, job) : DDL__PS_WAIT;
    }
    ddl__ps_send(s, job, &ok, NULL, 0);
    return ddl__ps_leave_queue(s, &s->control, job);
}

/* Control asks concern all places: clocks have grown, somebody has left, a table has come. */
static void ddl__ps_run_control(ddl__ps_server *s) {
    bool moved = false, again = true;
    while (again) {
        again = false;
        ddl__ps_job *next;
        for (ddl__ps_job *job = s->control.first; job != NULL; job = next) {
            next = job->next;
            again = ddl__ps_look_control(s, job) == DDL__PS_GONE || again;
        }
        again = ddl__ps_run_joint(s) || again;
        moved = moved || again;
    }
    if (moved) {
        ddl__ps_run_all(s);
    }
}

/* >>asks */

/* Is there such a place here, and are the sizes as they must be? What a worker of the same version sends is. */
static bool ddl__ps_ask_fits(const ddl__ps_server *s, const ddl__ps_ask *a) {
    if (ddl__ps_is_row_op(a->op)) {
        if (a->place < 0 || a->place >= s->table_count || a->count > INT32_MAX) {
            return false;
        }
        int64_t width = a->op == DDL__PS_PUSH_ROWS ? s->tables[a->place]->rows.config.width : 0;
        return a->bytes == a->count * (int64_t)(sizeof(uint64_t) + (uint64_t)width * sizeof(float));
    }
    if (ddl__ps_is_piece_op(a->op)) {
        bool here = a->place >= 0 && a->place < s->piece_count && s->places[a->place] != NULL;
        if (!here || a->op == DDL__PS_PULL) {
            return here && a->bytes == 0;
        }
        const ddl__ps_piece *piece = &s->pieces[a->place];
        const ddl__ps_trait *traits = a->op == DDL__PS_INIT ? NULL : s->extra.traits;
        return a->bytes == ddl__ps_push_bytes(traits, piece);
    }
    int64_t most = a->op >= DDL__PS_SAVE ? DDL__PS_PATH_BYTES : 64;
    return ddl__ps_is_joint(a->op) ? a->bytes > 0 && a->bytes <= most : a->bytes == 0;
}

/* Posts the receive of a worker's next ask. Where there is no memory for it the worker stays unheard, and its ask with
 * it, until ddl__ps_listen_again. */
static void ddl__ps_listen(ddl__ps_server *s, int32_t worker) {
    ddl__lock(s->c);
    bool room = s->jobs[worker] < DDL__PS_JOBS_MAX && !s->c->finalized;
    ddl__ps_job *job = room ? ddl__ps_job_new(s, worker) : NULL;
    s->deaf[worker] = job == NULL;
    if (job != NULL) {
        ddl__ps_moves_begin(job->gate);
        if (ddl__ps_move(s->group, false, job->ask_bytes, DDL__PS_ASK_BYTES, worker, DDL__PS_TAG_ASK, job->gate,
                         &job->messages[0]) < 0) {
            job->next = s->spare;
            s->spare = job;
            s->jobs[worker]--;
            s->deaf[worker] = true;
        } else {
            s->listeners[worker] = job;
            ddl__ps_moves_started(s->c, job->gate);
        }
    }
    ddl__unlock(s->c);
}

/* Is a worker unheard for want of memory? The lock is held. */
static bool ddl__ps_is_deaf(const ddl__ps_server *s) {
    for (int32_t w = 0; w < s->workers; w++) {
        if (s->deaf[w] && s->present[w] && s->jobs[w] < DDL__PS_JOBS_MAX) {
            return true;
        }
    }
    return false;
}

/* The lock is not held. */
static void ddl__ps_listen_again(ddl__ps_server *s) {
    for (int32_t w = 0; w < s->workers; w++) {
        if (s->deaf[w] && s->present[w]) {
            ddl__ps_listen(s, w);
        }
    }
}

static void ddl__ps_heard(ddl__ps_server *s, ddl__ps_job *job) {
    const ddl_request *r = job->messages[0];
    s->listeners[job->source] = NULL;
    if (r == NULL || r->status < 0) {
        ddl__lock(s->c);
        bool silent = s->c->aborted || s->c->finalized;
        ddl__unlock(s->c);
        ddl__ps_worker_gone(s, job->source, true);
        ddl__ps_job_free(s, job);
        if (!silent) {
            ddl__ps_run_control(s);
            ddl__ps_run_all(s);
        }
        return;
    }
    bool good = r->info.count == DDL__PS_ASK_BYTES && ddl__ps_ask_read(job->ask_bytes, &job->ask);
    ddl__ps_drop_unwanted(s, job->source);
    ddl__ps_listen(s, job->source);
    if (!good || !ddl__ps_ask_fits(s, &job->ask)) {
        if (good) {
            ddl__ps_drop_payload(s, job);
        }
        job->ask = (ddl__ps_ask){.op = DDL__PS_GATE, .tag = good ? job->ask.tag : DDL__PS_TAG_MAX};
        ddl__ps_refuse(s, job, DDL_ERR_MISMATCH,
                       "server %d does not understand what worker %d asks for; all ranks must "
                       "run the same program",
                       s->number, job->source);
        return;
    }
    ddl__ps_place *p = ddl__ps_place_of(s, &job->ask);
    job->phase = DDL__PS_ASKED;
    job->bound = ddl__ps_bound(s, job->source, job->ask.clock + (job->ask.op == DDL__PS_PUSH_PULL));
    bool begins = ddl__ps_is_push(job->ask.op) && p->piece != NULL && s->begun[job->source] <= job->ask.clock;
    s->begun[job->source] = begins ? job->ask.clock + 1 : s->begun[job->source];
    ddl__ps_enqueue(p, job);
    if (p == &s->control) {
        ddl__ps_run_control(s);
    } else {
        ddl__ps_run(s, p);
    }
    if (begins) {
        ddl__ps_run_held(s);
    }
}

/* All messages of a job have ended. */
static void ddl__ps_advance(ddl__ps_server *s, ddl__ps_job *job) {
    if (job->phase == DDL__PS_LISTENING && !job->sending) {
        ddl__ps_heard(s, job);
        return;
    }
    ddl__ps_place *p = ddl__ps_place_of(s, &job->ask);
    if (job->sending) {
        job->resend = job->unsent;
        s->unsent = s->unsent || job->unsent;
        job->sending = job->unsent;
        if (!job->queued && !job->sending) {
            ddl__ps_job_free(s, job);
        }
        return;
    }
    bool came = job->messages[0] != NULL && job->messages[0]->status == DDL_OK;
    bool good = came && (size_t)job->messages[0]->info.count == ddl__ps_in_bytes(job);
    job->phase = DDL__PS_RECEIVED;
    s->coming -= ddl__ps_in_bytes(job);
    if (job->messages[0] == NULL) {
        ddl__ps_drop_payload(s, job);
        ddl__ps_refuse(s, job, DDL_ERR_NOMEM, "server %d has no memory to receive what worker %d sends", s->number,
                       job->source);
    } else if (came && !good) {
        ddl__ps_refuse(s, job, DDL_ERR_NOMEM,
                       "worker %d has no memory to send the %lld bytes that it has announced; nothing was done, the "
                       "call may be made again",
                       job->source, (long long)job->ask.bytes);
    }
    if (!good) { /* the worker died, or gave up and may come again with the same sequence */
        ddl__ps_leave_queue(s, p, job);
    }
    if (p == &s->control) {
        ddl__ps_run_control(s);
    } else {
        ddl__ps_run(s, p);
    }
    ddl__ps_run_held(s);
}

/* >>loop */

#define DDL__PS_AGAIN_NS ((uint64_t)10000000) /* between two tries for memory */

static bool ddl__ps_has_work(ddl_context *c, void *arg) {
    const ddl__ps_server *s = arg;
    return s->ended_first != NULL || s->stop || ddl__ps_is_broken(s->group) || c->aborted || c->finalized;
}

/* A worker that left the job without a word ends its receive here. */
static void ddl__ps_server_tick(ddl_context *c, void *arg, uint64_t now) {
    ddl__ps_server *s = arg;
    (void)now;
    for (int32_t w = 0; w < s->workers; w++) {
        ddl_request *r = s->listeners[w] != NULL ? s->listeners[w]->messages[0] : NULL;
        if (r != NULL && ddl__is_pending(r)) {
            r->ops->tick(c, r, 0);
        }
    }
}

/* What ddl_ps_info_get tells. The lock is held. */
static void ddl__ps_publish(ddl__ps_server *s) {
    s->told = (ddl_ps_info){.pushes_applied = s->applied,
                            .pushes_repeated = s->repeated,
                            .memory_bytes = s->memory.used,
                            .memory_peak_bytes = s->memory.peak,
                            .slowest = ddl__ps_slowest(s)};
    for (int32_t i = 0; i < s->table_count; i++) {
        s->told.rows += s->tables[i]->rows.count;
        s->told.rows_evicted += s->tables[i]->rows.evicted;
    }
}

/* What had no memory looks once more. The lock is not held. */
static void ddl__ps_try_again(ddl__ps_server *s) {
    ddl__ps_listen_again(s);
    if (s->unsent) {
        s->unsent = false;
        for (ddl__ps_job *job = s->all; job != NULL; job = job->all_next) {
            if (job->resend) {
                ddl__ps_send_parts(s, job);
            }
        }
    }
    if (s->starved) {
        s->starved = s->freed = false;
        ddl__ps_run_control(s);
        ddl__ps_run_all(s);
    }
}

/* Works off jobs whose messages have ended, until there is none. */
static void ddl__ps_work(ddl__ps_server *s) {
    for (ddl__ps_job *job = s->ended_first; job != NULL && !s->c->finalized; job = s->ended_first) {
        s->ended_first = job->ended;
        s->ended_last = s->ended_first == NULL ? NULL : s->ended_last;
        ddl__unlock(s->c);
        ddl__ps_advance(s, job);
        while (s->starved && s->freed) {
            s->starved = s->freed = false;
            ddl__ps_run_control(s);
            ddl__ps_run_all(s);
        }
        ddl__ps_listen_again(s);
        ddl__lock(s->c);
        ddl__ps_publish(s);
    }
}

/* Waits for work, and does it; the lock is held. No message says that the machine has memory again: what has found none
 * looks again by itself. */
static void ddl__ps_serve_once(ddl__ps_server *s) {
    bool again = s->starved || s->unsent || ddl__ps_is_deaf(s);
    ddl__wait w = {.done = ddl__ps_has_work,
                   .tick = ddl__ps_server_tick,
                   .arg = s,
                   .deadline = again ? ddl__now_ns() + DDL__PS_AGAIN_NS : DDL__NEVER};
    ddl__wait_for(s->c, &w);
    ddl__ps_work(s);
    if (again) {
        ddl__unlock(s->c);
        ddl__ps_try_again(s);
        ddl__lock(s->c);
    }
}

/* Serves until all workers have left or died, the context ends, a rank cannot go on, or it is told to stop; then gives
 * all jobs back. */
static ddl_status ddl__ps_serve(ddl__ps_server *s) {
    ddl_context *c = s->c;
    const ddl_group *g = s->group;
    for (int32_t worker = 0; worker < s->workers; worker++) {
        ddl__ps_listen(s, worker);
    }
    ddl__lock(c);
    while (!s->stop && !c->aborted && !c->finalized && !ddl__ps_is_broken(g) &&
           (s->present_count > 0 || ddl__ps_is_sending(s))) {
        ddl__ps_serve_once(s); /* at the end, the last answers */
    }
    s->status = c->aborted             ? DDL_ERR_ABORTED
                : c->finalized         ? DDL_ERR_STATE
                : ddl__ps_is_broken(g) ? g->broken
                                       : DDL_OK;
    s->ended = true;
    ddl__changed(c);
    ddl__unlock(c);
    return s->status;
}

static void *ddl__ps_thread(void *arg) {
    ddl__ps_serve(arg);
    return NULL;
}

/* >>beginning and end */

/* Bytes of a server's parameters, optimizer state and sums; *out_largest: of a piece. */
static uint64_t ddl__ps_fixed_bytes(const ddl__ps_server *s, uint64_t *out_largest) {
    uint64_t slots = (uint64_t)ddl__optim_slots(&s->optimizer), need = 0;
    *out_largest = 0;
    for (int64_t i = 0; i < s->piece_count; i++) {
        if (s->pieces[i].server == s->number) {
            uint64_t bytes = ddl__ps_piece_bytes(&s->pieces[i]);
            uint64_t by_worker = (uint64_t)s->workers * (sizeof(int64_t) + sizeof(uint64_t));
            *out_largest = DDL__MAX(*out_largest, bytes + sizeof(ddl__ps_value));
            need += bytes * (2 + slots) + sizeof(ddl__ps_value) + sizeof(ddl__ps_place) + by_worker;
        }
    }
    uint64_t by_worker = sizeof(ddl__ps_job) + 3 * sizeof(bool) + 5 * sizeof(uint64_t) + 2 * sizeof(int32_t);
    return need + (uint64_t)s->piece_count * sizeof(void *) + (uint64_t)s->workers * (by_worker + sizeof(void *)) +
           3 * *out_largest;
}

static bool ddl__ps_piece_begin(ddl__ps_server *s, int64_t number) {
    const ddl__ps_piece *piece = &s->pieces[number];
    ddl__ps_place *p = ddl__ps_alloc(&s->memory, 1, sizeof *p);
    s->places[number] = p;
    if (p == NULL || !ddl__ps_place_begin(s, p, (int32_t)number)) {
        return false;
    }
    size_t bytes = ddl__ps_piece_bytes(piece);
    p->piece = piece;
    p->ready = s->extra.sums;
    p->value = ddl__ps_value_new(s, p);
    s->passing -= p->value != NULL ? ddl__ps_value_bytes(p) : 0; /* one value stays */
    p->sum = ddl__ps_buffer_get(s, bytes, true);
    s->passing -= p->sum != NULL ? bytes : 0; /* it changes places with payloads */
    p->state = ddl__ps_alloc(&s->memory, bytes, (size_t)ddl__optim_slots(&s->optimizer));
    return p->value != NULL && p->sum != NULL && p->state != NULL;
}

static bool ddl__ps_server_arrays(ddl__ps_server *s) {
    size_t n = (size_t)s->workers;
    s->places = ddl__ps_alloc(&s->memory, (size_t)s->piece_count, sizeof *s->places);
    s->present = ddl__ps_alloc(&s->memory, n, sizeof *s->present);
    s->clock = ddl__ps_alloc(&s->memory, n, sizeof *s->clock);
    s->begun = ddl__ps_alloc(&s->memory, n, sizeof *s->begun);
    s->ended_ns = ddl__ps_alloc(&s->memory, n, sizeof *s->ended_ns);
    s->takes_ns = ddl__ps_alloc(&s->memory, n, sizeof *s->takes_ns);
    s->own_ns = ddl__ps_alloc(&s->memory, n, sizeof *s->own_ns);
    s->jobs = ddl__ps_alloc(&s->memory, n, sizeof *s->jobs);
    s->busy = ddl__ps_alloc(&s->memory, n, sizeof *s->busy);
    s->deaf = ddl__ps_alloc(&s->memory, n, sizeof *s->deaf);
    s->unwanted = ddl__ps_alloc(&s->memory, n, sizeof *s->unwanted);
    s->listeners = ddl__ps_alloc(&s->memory, n, sizeof(ddl__ps_job *));
    return s->places != NULL && s->present != NULL && s->clock != NULL && s->begun != NULL && s->ended_ns != NULL &&
           s->takes_ns != NULL && s->own_ns != NULL && s->jobs != NULL && s->busy != NULL && s->deaf != NULL &&
           s->unwanted != NULL && s->listeners != NULL;
}

/* Fills a server whose first members are set. */
static ddl_status ddl__ps_server_begin(ddl__ps_server *s, ddl__sentence *why) {
    uint64_t largest, need = ddl__ps_fixed_bytes(s, &largest);
    if (!ddl__ps_fits(&s->memory, need)) {
        return ddl__fail(why, DDL_ERR_NOMEM,
                         "server %d needs %llu bytes for its parameters, their optimizer state and one push; "
                         "memory_bytes is %llu: raise it, or take more servers",
                         s->number, (unsigned long long)need, (unsigned long long)s->memory.limit);
    }
    bool good = ddl__ps_server_arrays(s);
    for (int32_t w = 0; good && w < s->workers; w++) {
        s->present[w] = true;
    }
    s->present_count = s->workers;
    s->lost = -1;
    s->held = INT64_MAX;
    for (int64_t i = 0; good && i < s->piece_count; i++) {
        good = s->pieces[i].server != s->number || ddl__ps_piece_begin(s, i);
    }
    s->memory.reserve = 2 * largest;
    return good ? DDL_OK : ddl__fail(why, DDL_ERR_NOMEM, "server %d: no memory for its parameters", s->number);
}

static void ddl__ps_piece_end(ddl__ps_server *s, ddl__ps_place *p) {
    size_t bytes = p->piece != NULL ? ddl__ps_piece_bytes(p->piece) : 0;
    if (p->sum != NULL) {
        s->passing += bytes;
        ddl__ps_buffer_put(s, p->sum, bytes);
    }
    ddl__ps_free(&s->memory, p->state, bytes, (size_t)ddl__optim_slots(&s->optimizer));
    if (p->value != NULL) {
        s->passing += ddl__ps_value_bytes(p);
        ddl__ps_buffer_put(s, p->value, ddl__ps_value_bytes(p));
    }
    ddl__ps_place_end(s, p);
    ddl__ps_free(&s->memory, p, 1, sizeof *p);
}

/* All jobs, whatever they wait for. */
static void ddl__ps_jobs_end(ddl__ps_server *s) {
    for (ddl__ps_job *job = s->all, *next; job != NULL; job = next) {
        next = job->all_next;
        ddl__lock(s->c);
        ddl__ps_move_drop(s->c, &job->messages[0]);
        ddl__ps_move_drop(s->c, &job->messages[1]);
        ddl__scratch_put(s->c, job->in);
        ddl__scratch_put(s->c, job->out);
        if (job->value != NULL && --job->value->readers == 0 && !job->value->current) {
            ddl__scratch_put(s->c, job->value);
        }
        if (!s->c->finalized) {
            ddl__request_release(job->gate);
        }
        ddl__free(&s->c->base, job);
        ddl__unlock(s->c);
    }
    s->all = s->spare = NULL;
}

/* Frees what a server holds; its thread has ended. */
static void ddl__ps_server_end(ddl__ps_server *s) {
    size_t n = (size_t)s->workers;
    ddl__ps_jobs_end(s);
    for (int64_t i = 0; s->places != NULL && i < s->piece_count; i++) {
        if (s->places[i] != NULL) {
            ddl__ps_piece_end(s, s->places[i]);
        }
    }
    for (int32_t i = 0; i < s->table_count; i++) {
        ddl__ps_table_end(s, s->tables[i]);
    }
    ddl__ps_free(&s->memory, s->tables, (size_t)s->table_cap, sizeof *s->tables);
    ddl__ps_free(&s->memory, s->places, (size_t)s->piece_count, sizeof *s->places);
    ddl__ps_free(&s->memory, s->present, n, sizeof *s->present);
    ddl__ps_free(&s->memory, s->clock, n, sizeof *s->clock);
    ddl__ps_free(&s->memory, s->begun, n, sizeof *s->begun);
    ddl__ps_free(&s->memory, s->ended_ns, n, sizeof *s->ended_ns);
    ddl__ps_free(&s->memory, s->takes_ns, n, sizeof *s->takes_ns);
    ddl__ps_free(&s->memory, s->own_ns, n, sizeof *s->own_ns);
    ddl__ps_free(&s->memory, s->jobs, n, sizeof *s->jobs);
    ddl__ps_free(&s->memory, s->busy, n, sizeof *s->busy);
    ddl__ps_free(&s->memory, s->deaf, n, sizeof *s->deaf);
    ddl__ps_free(&s->memory, s->unwanted, n, sizeof *s->unwanted);
    ddl__ps_free(&s->memory, s->listeners, n, sizeof *s->listeners);
}

#endif /* DDL_PS_SERVER_H */

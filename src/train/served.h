/* train, between second and third part: parameters that live on servers. A unit is then no collective but a push of its
 * gradients and a pull of what the servers make of them; it ends when the sync mode lets this worker see that. The
 * servers' parameters are the trainer's tensors in backward's order, so that their pieces, which cannot be cut, are
 * ranges of the arena. Workers are the first ranks of the caller's group. */
#ifndef DDL_TRAIN_SERVED_H
#define DDL_TRAIN_SERVED_H

#include "trainer.h"

enum { DDL__SERVED_PIECE_BYTES = 1 << 20 }; /* most of one message */

/* The parameter of the servers that tensor `index` is, and the reverse. */
static int32_t ddl__served_number(const ddl_trainer *t, int32_t index) { return t->count - 1 - index; }

/* What comes of element `at` of an arena. */
static void *ddl__served_pulled(const ddl_trainer *t, ddl_dtype dtype, int64_t at) {
    return (char *)t->served.pulled[dtype].data + (size_t)at * ddl_dtype_bytes(dtype);
}

/* Element `at` of an arena in ordinary memory. */
static void *ddl__served_mirror(const ddl_trainer *t, ddl_dtype dtype, int64_t at) {
    char *mirror = t->mirrors[dtype];
    return (mirror != NULL ? mirror : (char *)t->arenas[dtype].data) + (size_t)at * ddl_dtype_bytes(dtype);
}

/* Starts a unit. The lock is held. */
static ddl_status ddl__served_begin(ddl_trainer *t, ddl__unit *u) {
    ddl_ps *ps = t->served.ps;
    ps->rate = t->rate; /* the servers' own is 1 */
    ddl__ps_codes codes = {t->served.codes, t->served.code_at};
    return ddl__ps_range_call(ps, "ddl_step", u->grain_first, u->grain_end,
                              ddl__served_mirror(t, u->dtype, u->begin), &codes,
                              ddl__served_pulled(t, u->dtype, u->begin), t->served.bad, &u->request);
}

/* What a unit pushes. */
static int64_t ddl__served_bytes(const ddl_trainer *t, const ddl__unit *u) {
    int64_t bytes = 0;
    for (int64_t i = u->grain_first; i < u->grain_end; i++) {
        bytes += ddl__ps_push_bytes(t->served.traits, &t->served.ps->pieces[i]);
    }
    return bytes;
}

/* Encodes a gradient that lies in the arena, piece by piece. */
static void ddl__served_encode(ddl_trainer *t, ddl__weight *w, const float *grad) {
    const ddl_ps *ps = t->served.ps;
    int32_t number = ddl__served_number(t, (int32_t)(w - t->weights));
    if (w->residual != NULL && !t->config.unchecked) {
        memcpy(w->before, w->residual, (size_t)w->count * sizeof(float));
    }
    for (int64_t i = ps->first[number]; w->coded != NULL && i < ps->first[number + 1]; i++) {
        const ddl__ps_piece *piece = &ps->pieces[i];
        ddl__code_key key = {t->coded + 1, (int32_t)i, t->rank};
        ddl__encode(&w->coded->code, key, grad + piece->begin, w->residual != NULL ? w->residual + piece->begin : NULL,
                    piece->count, t->served.codes + t->served.code_at[i]);
    }
}

/* A unit has ended: notes which tensors were passed over; codes that no step was made of were not sent. The lock is
 * held. */
static void ddl__served_note(ddl_trainer *t, const ddl__unit *u) {
    const ddl__ps_call *call = u->request->kept;
    for (int32_t i = 0; i < call->part_count; i++) {
        const ddl__ps_piece *piece = &t->served.ps->pieces[u->grain_first + i];
        ddl__weight *w = &t->weights[ddl__served_number(t, piece->param)];
        w->skipped |= call->parts[i].skipped;
        if (call->parts[i].skipped && w->residual != NULL) {
            memcpy(w->residual + piece->begin, w->before + piece->begin, (size_t)piece->count * sizeof(float));
        }
    }
}

/* Ends this worker's iteration, where there are servers. The lock is held, and given up. */
static ddl_status ddl__served_clock(ddl_trainer *t) {
    if (t->served.ps == NULL) {
        return DDL_OK;
    }
    uint64_t start = ddl__now_ns();
    ddl__unlock(t->context);
    ddl_status status = ddl_ps_clock(t->served.ps);
    ddl__lock(t->context);
    t->exposed_ns += ddl__now_ns() - start;
    return status;
}

/* Pulls pieces first ... end - 1, as this iteration may see them. The lock is not held. */
static ddl_status ddl__served_pull(ddl_trainer *t, const char *what, int64_t first, int64_t end) {
    const ddl__ps_piece *pieces = t->served.ps->pieces;
    ddl_status status = DDL_OK;
    for (int64_t i = first, next; i < end && status == DDL_OK; i = next) {
        ddl_request *r;
        const ddl__weight *w = &t->weights[ddl__served_number(t, pieces[i].param)];
        for (next = i + 1; next < end && pieces[next].dtype == pieces[i].dtype; next++) {
        }
        DDL__TRY(ddl__enter(t->context));
        status = ddl__ps_range_call(t->served.ps, what, i, next, NULL, NULL,
                                    ddl__served_pulled(t, pieces[i].dtype, w->at + pieces[i].begin), t->served.bad, &r);
        status = status == DDL_OK ? ddl__ps_call_wait(&r, NULL) : status;
        ddl__unlock(t->context);
    }
    return status;
}

/* >>making. The lock is not held. */

static ddl_ps_config ddl__served_config(const ddl_trainer *t) {
    const ddl_trainer_config *o = &t->config;
    ddl_ps_config ps = {.servers = o->servers,
                        .dedicated = o->dedicated,
                        .sync = {.mode = o->sync, .staleness = o->staleness, .staleness_max = o->staleness_max},
                        .optimizer = o->optimizer,
                        .piece_bytes = DDL__MIN(o->piece_bytes, (int64_t)DDL__SERVED_PIECE_BYTES)};
    if (t->served.sums) {
        ps.optimizer = (ddl_optimizer){.kind = DDL_SGD};
        ps.op = o->uneven ? DDL_SUM : DDL_AVG;
    }
    ps.optimizer.learning_rate = 1; /* each push brings the trainer's */
    return ps;
}

/* All ranks of the caller's group. */
static int32_t ddl__served_ranks(const ddl_trainer *t) {
    return t->size + (t->config.dedicated ? t->config.servers : 0);
}

/* Whether ranks are at different steps. */
static bool ddl__served_alone(const ddl_trainer_config *o) {
    bool bound = o->sync == DDL_SYNC_SSP && (o->staleness >= 0 || o->staleness_max > 0);
    return o->architecture == DDL_ARCHITECTURE_PS && (bound || o->sync == DDL_SYNC_ASP);
}

/* Elements of a tensor that the servers have: f32, and f64 where all go there. */
static int64_t ddl__served_count(const ddl_trainer *t, const ddl__weight *w) {
    bool compressed =
        t->config.architecture == DDL_ARCHITECTURE_AUTO && w->options.compression.kind != DDL_COMPRESS_NONE;
    bool all = t->config.architecture == DDL_ARCHITECTURE_PS;
    return (all || ddl__weight_wire_type(t, w) == DDL_F32) && !compressed ? w->count : 0;
}

/* Which line an operation is on. */
static int32_t ddl__served_way(const ddl_trainer *t, bool served) {
    return served && t->config.architecture == DDL_ARCHITECTURE_AUTO;
}

/* Architecture auto: each tensor goes where the lines say that it takes less time. Another way has to promise a tenth,
 * so that noise moves nothing. Lines are the same on all ranks. */
static void ddl__served_choose(ddl_trainer *t) {
    for (int32_t i = 0; i < t->count && t->config.architecture == DDL_ARCHITECTURE_AUTO; i++) {
        ddl__weight *w = &t->weights[i];
        int64_t bytes = ddl__served_count(t, w) * (int64_t)sizeof(float);
        double reduced = ddl__line_time(&t->lines[0], bytes), served = ddl__line_time(&t->lines[1], bytes);
        bool better = bytes > 0 && (w->served ? served < 1.1 * reduced : 1.1 * served < reduced);
        t->served.chosen = t->served.chosen || better != w->served;
        w->served = better;
    }
}

/* A number of elements to keep is that of the tensor: pieces get their parts. */
static ddl_status ddl__served_code(ddl_trainer *t, ddl__weight *w, ddl__ps_trait *trait) {
    ddl_context *c = t->context;
    w->coded = NULL;
    if (w->options.compression.kind == DDL_COMPRESS_NONE || t->config.architecture == DDL_ARCHITECTURE_AUTO) {
        return DDL_OK;
    }
    DDL__TRY(ddl__enter(c));
    ddl_status status = ddl__compress_init(&c->error, &w->options.compression, &trait->code);
    if (status == DDL_OK && trait->code.k > 0) {
        trait->code.ratio = w->count > 0 ? (double)DDL__MIN(trait->code.k, w->count) / (double)w->count : 1;
        trait->code.k = 0;
    }
    if (status == DDL_OK && trait->code.error_feedback && !t->served.only) {
        size_t n = (size_t)w->count + 1;
        w->residual = ddl__alloc_array(&c->base, n, sizeof *w->residual);
        w->before = ddl__alloc_array(&c->base, n, sizeof *w->before);
        status = w->residual != NULL && w->before != NULL
                     ? DDL_OK
                     : ddl__error(c, DDL_ERR_NOMEM, "ddl_trainer_start: no memory to compress \"%s\"", w->name);
    }
    w->coded = status == DDL_OK ? trait : NULL;
    ddl__unlock(c);
    return status;
}

/* The parameter in the type that servers keep it in, in ordinary memory. */
static ddl_status ddl__served_first(ddl_trainer *t, const ddl__weight *w, void *to) {
    ddl_dtype dtype = ddl__weight_type(w);
    if (ddl__lane_is_host(&t->lane)) {
        ddl__convert(to, dtype, w->param.data, w->param.dtype, w->count);
        return DDL_OK;
    }
    ddl__lane_convert(&t->lane, t->lane.scratch[0], dtype, w->param.data, w->param.dtype, w->count);
    ddl__lane_copy(&t->lane, to, t->lane.scratch[0], (size_t)w->count * ddl_dtype_bytes(dtype));
    return ddl__lane_wait(&t->lane, "ddl_trainer_start");
}

/* Memory for parameters as they come. */
static ddl_status ddl__served_room(ddl_trainer *t) {
    int64_t totals[DDL__ARENAS] = {0};
    for (int32_t i = 0; i < t->count; i++) {
        totals[ddl__weight_type(&t->weights[i])] += ddl__served_count(t, &t->weights[i]);
    }
    for (int32_t d = 0; d < DDL__ARENAS && !t->served.only; d++) {
        if (d == DDL_F32 || d == DDL_F64) {
            DDL__TRY(ddl_tensor_alloc(t->context, (ddl_dtype)d, 1, &(int64_t){totals[d] + 1}, &t->served.pulled[d]));
        }
    }
    return DDL_OK;
}

/* Memory by parameter, and the parameters as the servers' first values. */
static ddl_status ddl__served_memory(ddl_trainer *t, ddl_tensor *params) {
    ddl__served *s = &t->served;
    int64_t at[DDL__ARENAS] = {0};
    DDL__TRY(ddl__enter(t->context));
    s->traits = ddl__alloc_array(&t->context->base, (size_t)t->count + 1, sizeof *s->traits);
    s->bad = ddl__alloc_array(&t->context->base, (size_t)t->count + 1, sizeof *s->bad);
    ddl_status status = s->traits != NULL && s->bad != NULL
                            ? DDL_OK
                            : ddl__error(t->context, DDL_ERR_NOMEM, "ddl_trainer_start: no memory");
    ddl__unlock(t->context);
    DDL__TRY(status);
    DDL__TRY(ddl__served_room(t));
    for (int32_t i = t->count - 1; i >= 0; i--) {
        ddl__weight *w = &t->weights[i];
        ddl_dtype dtype = ddl__weight_type(w);
        int64_t count = ddl__served_count(t, w);
        void *to = s->only || count == 0 ? NULL : ddl__served_pulled(t, dtype, at[dtype]);
        int32_t number = ddl__served_number(t, i);
        params[number] = ddl_tensor_1d(to, dtype, count);
        at[dtype] += count;
        w->served = t->config.architecture == DDL_ARCHITECTURE_PS;
        s->traits[number] =
            (ddl__ps_trait){.rate_factor = w->options.rate_factor, .no_decay = w->options.no_decay != 0, .tensor = i};
        DDL__TRY(ddl__served_code(t, w, &s->traits[number]));
        if (t->served.sums || to == NULL) {
            continue; /* gradients are averaged there: nothing comes first */
        }
        DDL__TRY(ddl__served_first(t, w, to));
    }
    return DDL_OK;
}

/* The group of the workers alone takes the place of the group of all: servers make no steps, and their own tensors,
 * which may be in other memory than the workers', are never read or written. */
static ddl_status ddl__served_split(ddl_trainer *t) {
    int32_t workers = t->size - (t->config.dedicated ? t->config.servers : 0);
    ddl_group *workers_group;
    t->served.only = t->rank >= workers;
    if (!t->config.dedicated) {
        return DDL_OK;
    }
    DDL__TRY(ddl_group_split(t->group, t->served.only, 0, &workers_group));
    ddl_group_free(&t->group);
    t->group = workers_group;
    t->size = workers;
    return DDL_OK;
}

static ddl_status ddl__served_grains(ddl_trainer *t) {
    const ddl_ps *ps = t->served.ps;
    DDL__TRY(ddl__enter(t->context));
    int64_t *grains = ddl__alloc_array(&t->context->base, (size_t)ps->piece_count + 1, sizeof *grains);
    int64_t *at = ddl__alloc_array(&t->context->base, (size_t)ps->piece_count + 1, sizeof *at), bytes = 0;
    for (int64_t i = 0; grains != NULL && at != NULL && i < ps->piece_count; i++) {
        const ddl__ps_piece *piece = &ps->pieces[i];
        bool coded = t->served.traits[piece->param].code.kind != DDL_COMPRESS_NONE;
        grains[i] = (int64_t)ddl__ps_piece_bytes(piece);
        at[i] = coded ? bytes : -1;
        bytes += coded ? (int64_t)ddl__round_64((size_t)ddl__ps_push_bytes(t->served.traits, piece)) : 0;
    }
    t->served.grains = grains;
    t->served.code_at = at;
    t->served.codes = ddl__alloc(&t->context->base, (size_t)bytes + 1);
    ddl_status status = grains != NULL && at != NULL && t->served.codes != NULL
                            ? DDL_OK
                            : ddl__error(t->context, DDL_ERR_NOMEM, "ddl_trainer_start: no memory");
    ddl__unlock(t->context);
    return status;
}

/* Makes the servers. Every rank calls. */
static ddl_status ddl__served_make(ddl_trainer *t) {
    t->served.sums = ddl__served_sums(&t->config);
    ddl_ps_config config = ddl__served_config(t);
    ddl_tensor *params = calloc((size_t)t->count + 1, sizeof *params);
    if (params == NULL) {
        return DDL_ERR_NOMEM;
    }
    ddl_status status = ddl__served_memory(t, params);
    ddl__ps_details extra = {.traits = t->served.traits, .check = !t->config.unchecked, .sums = t->served.sums};
    status = status < 0 ? status : ddl__ps_make(t->parent, &config, &extra, params, t->count, &t->served.ps);
    free(params);
    status = status < 0 ? status : ddl__served_grains(t);
    t->served.alone = ddl__served_alone(&t->config);
    return status;
}

/* The servers take the sync mode of a new config. */
static ddl_status ddl__served_switch(ddl_trainer *t) {
    ddl_sync_config sync = ddl__served_config(t).sync;
    t->served.alone = ddl__served_alone(&t->config);
    return t->served.ps != NULL ? ddl_ps_switch(t->served.ps, &sync) : DDL_OK;
}

/* Frees the servers, this rank's when nobody needs it any more. */
static void ddl__served_free(ddl_trainer *t) {
    ddl__served *s = &t->served;
    ddl_ps_free(&s->ps);
    for (int32_t d = 0; d < DDL__ARENAS && !t->context->finalized; d++) {
        if (s->pulled[d].data != NULL) {
            ddl_tensor_free(t->context, &s->pulled[d]);
        }
    }
    ddl__lock(t->context);
    ddl__free(&t->context->base, s->traits);
    ddl__free(&t->context->base, s->bad);
    ddl__free(&t->context->base, s->grains);
    ddl__free(&t->context->base, s->codes);
    ddl__free(&t->context->base, s->code_at);
    for (int32_t i = 0; i < t->count; i++) {
        ddl__free(&t->context->base, t->weights[i].residual);
        ddl__free(&t->context->base, t->weights[i].before);
        t->weights[i].residual = t->weights[i].before = NULL;
        t->weights[i].coded = NULL;
    }
    ddl__unlock(t->context);
    *s = (ddl__served){0};
}

DDL_API ddl_status ddl_trainer_serve(ddl_trainer *trainer) {
    DDL__TRY(ddl__trainer_ok(trainer, "ddl_trainer_serve", true));
    ddl_status status =
        trainer->served.only
            ? DDL_OK
            : ddl__error(trainer->context, DDL_ERR_ARG,
                         "ddl_trainer_serve: rank %d is no dedicated server; it makes steps", trainer->rank);
    ddl__unlock(trainer->context);
    return status < 0 ? status : ddl_ps_serve(trainer->served.ps);
}

#endif /* DDL_TRAIN_SERVED_H */

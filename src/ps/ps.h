/* ps, ninth part: the public calls, and checks of what callers pass. */
#ifndef DDL_PS_PS_H
#define DDL_PS_PS_H

#include "worker.h"

/* >>checking */

/* The sync mode with its defaults filled in: a bound of 0 is 0. */
static ddl_status ddl__ps_sync_resolve(ddl__sentence *why, const ddl_sync_config *in, ddl_sync_config *out) {
    ddl_sync_config s = *in;
    if (s.mode != DDL_SYNC_BSP && s.mode != DDL_SYNC_SSP && s.mode != DDL_SYNC_ASP) {
        return ddl__fail(why, DDL_ERR_ARG,
                         "%d is no sync mode of servers; DDL_SYNC_BSP, DDL_SYNC_SSP and DDL_SYNC_ASP are", (int)s.mode);
    }
    if (s.staleness < -1 || s.staleness > 1000000 || s.staleness_max > 1000000) {
        return ddl__fail(why, DDL_ERR_ARG,
                         "a staleness of %d, at most %d, is out of range: -1 (bound 0), 0 (the default, 3), or 1 to "
                         "1000000 clocks",
                         s.staleness, s.staleness_max);
    }
    s.staleness = s.staleness == 0 ? DDL__PS_STALENESS : s.staleness == -1 ? 0 : s.staleness;
    if (s.staleness_max != 0 && s.staleness_max < s.staleness) {
        return ddl__fail(why, DDL_ERR_ARG,
                         "staleness_max is %d, less than the staleness of %d; it is the upper bound, or "
                         "0 for none",
                         s.staleness_max, s.staleness);
    }
    s.staleness_max = DDL__MAX(s.staleness_max, s.staleness);
    if (s.mode != DDL_SYNC_SSP) {
        s.staleness = s.staleness_max = 0;
    }
    *out = s;
    return DDL_OK;
}

static ddl_status ddl__ps_config_resolve(ddl__sentence *why, const ddl_ps_config *in, int32_t ranks,
                                         ddl_ps_config *out) {
    ddl_ps_config o = *in;
    o.servers = o.servers == 0 ? 1 : o.servers;
    o.op = o.op == DDL_OP_NONE ? DDL_AVG : o.op;
    o.piece_bytes = o.piece_bytes == 0 ? DDL__PS_PIECE_BYTES : o.piece_bytes;
    if (o.servers < 0 || o.servers > ranks || (o.dedicated && o.servers >= ranks)) {
        return ddl__fail(why, DDL_ERR_ARG, "%d %s servers in a group of %d ranks: %s", o.servers,
                         o.dedicated ? "dedicated" : "colocated", ranks,
                         o.dedicated ? "at least one rank has to work" : "a rank has one server at most");
    }
    if (o.op != DDL_AVG && o.op != DDL_SUM) {
        return ddl__fail(why, DDL_ERR_ARG, "the op of parameter servers is DDL_AVG or DDL_SUM, not %d", o.op);
    }
    if (o.piece_bytes < 64 || o.piece_bytes > (int64_t)1 << 30 || o.memory_bytes < 0) {
        return ddl__fail(why, DDL_ERR_ARG,
                         "piece_bytes is %lld and memory_bytes %lld; 64 to 2^30, and 0 or more, are "
                         "possible",
                         (long long)o.piece_bytes, (long long)o.memory_bytes);
    }
    DDL__TRY(ddl__optim_init(why, &in->optimizer, &o.optimizer));
    DDL__TRY(ddl__ps_sync_resolve(why, &in->sync, &o.sync));
    *out = o;
    return DDL_OK;
}

/* A contiguous view of so many elements of a type. */
static ddl_status ddl__ps_tensor_check(ddl_ps *ps, const ddl_tensor *t, ddl_dtype dtype, int64_t count, bool output,
                                       const char *what, const char *name) {
    ddl_context *c = ps->c;
    DDL__TRY(ddl__tensor_check_host(c, t, what, name));
    if (output) {
        DDL__TRY(ddl__tensor_check_output(c, t, what, name));
    }
    if (t->dtype != dtype || !ddl__is_contiguous(t) || ddl_tensor_count(t) != count) {
        return ddl__error(c, DDL_ERR_ARG, "%s: `%s` has %lld elements of %s%s; %lld contiguous %s are wanted", what,
                          name, (long long)ddl_tensor_count(t), ddl_dtype_name(t->dtype),
                          ddl__is_contiguous(t) ? "" : ", with strides", (long long)count, ddl_dtype_name(dtype));
    }
    return DDL_OK;
}

/* Begins a public call; the context is locked on success. worker: only workers may. */
static ddl_status ddl__ps_enter(ddl_ps *ps, bool worker, const char *what) {
    if (ps == NULL || ps->magic != DDL__PS_MAGIC) {
        return DDL_ERR_ARG;
    }
    DDL__TRY(ddl__enter_group(ps->group, what));
    ddl_status status = DDL_OK;
    if (worker && ps->worker < 0) {
        status = ddl__error(ps->c, DDL_ERR_ARG, "%s: rank %d only serves; ddl_ps_serve and ddl_ps_free are for it",
                            what, ps->group->rank);
    } else if (worker && ps->left) {
        status = ddl__error(ps->c, DDL_ERR_STATE, "%s: worker %d has left (ddl_ps_leave)", what, ps->worker);
    }
    if (status < 0) {
        ddl__unlock(ps->c);
    }
    return status;
}

static ddl_status ddl__ps_refuse_null(ddl_ps *ps, const char *what, const char *which) {
    DDL__TRY(ddl__ps_enter(ps, false, what));
    ddl_status status = ddl__error(ps->c, DDL_ERR_ARG, "%s: %s is NULL", what, which);
    ddl__unlock(ps->c);
    return status;
}

static ddl_status ddl__ps_idle(ddl_ps *ps, const char *what) {
    return ps->under_way == 0 ? DDL_OK
                              : ddl__error(ps->c, DDL_ERR_STATE,
                                           "%s: %d pushes or pulls are under way; wait for them "
                                           "first",
                                           what, ps->under_way);
}

/* >>making */

static void ddl__ps_release(ddl_ps *ps) {
    ddl_context *c = ps->c;
    ddl_group *group = ps->group;
    if (ps->server != NULL) {
        ddl__ps_server_end(ps->server);
    }
    ps->magic = 0;
    ddl__lock(c);
    ddl__free(&c->base, ps->server);
    ddl__free(&c->base, ps->lengths);
    ddl__free(&c->base, ps->types);
    ddl__free(&c->base, ps->pieces);
    ddl__free(&c->base, ps->first);
    ddl__free(&c->base, ps->pushed);
    ddl__free(&c->base, ps->signatures);
    ddl__free(&c->base, ps->tables);
    ddl__free(&c->base, ps);
    ddl__unlock(c);
    if (group != NULL) {
        ddl_group_free(&group); /* the context may end with it */
    }
}

/* Ends the thread of this rank's server. */
static void ddl__ps_stop(ddl_ps *ps) {
    if (ps->has_thread) {
        ddl__lock(ps->c);
        ps->server->stop = true;
        ddl__wake(ps->c);
        ddl__unlock(ps->c);
        pthread_join(ps->thread, NULL);
        ps->has_thread = false;
    }
}

static bool ddl__ps_has_ended(ddl_context *c, void *arg) {
    const ddl__ps_server *s = arg;
    return s->ended || c->aborted || c->finalized;
}

/* Cuts the parameters; the context is locked. */
static ddl_status ddl__ps_shard(ddl_ps *ps, const ddl_tensor *params, ddl__sentence *why) {
    ddl__base *base = &ps->c->base;
    int64_t total = 0, n;
    size_t count = (size_t)ps->params, size = sizeof(float);
    ps->lengths = ddl__alloc_array(base, count, sizeof *ps->lengths);
    ps->types = ddl__alloc_array(base, count, sizeof *ps->types);
    ps->first = ddl__alloc_array(base, count + 1, sizeof *ps->first);
    ps->pushed = ddl__alloc_array(base, count, sizeof *ps->pushed);
    ps->signatures = ddl__alloc_array(base, (size_t)ps->group->size, sizeof *ps->signatures);
    bool listed = ps->lengths != NULL && ps->types != NULL;
    for (int32_t i = 0; listed && i < ps->params; i++) {
        ps->lengths[i] = ddl_tensor_count(&params[i]);
        ps->types[i] = params[i].dtype;
        size = ps->lengths[i] > 0 ? DDL__MAX(size, ddl_dtype_bytes(params[i].dtype)) : size;
        total += ps->lengths[i];
    }
    int64_t limit = ddl__ps_piece_limit(total, size, ps->config.servers, ps->config.piece_bytes,
                                        ddl__optim_needs_sums(&ps->config.optimizer));
    n = ps->piece_count = listed ? ddl__ps_cut(ps->lengths, ps->types, ps->params, limit, NULL) : 0;
    ps->pieces = ddl__alloc_array(base, (size_t)n, sizeof *ps->pieces);
    ddl__ps_piece **order = ddl__alloc_array(base, (size_t)n, sizeof *order);
    int64_t *load = ddl__alloc_array(base, (size_t)ps->config.servers, sizeof *load);
    bool good = listed && ps->first != NULL && ps->pushed != NULL && ps->pieces != NULL && order != NULL &&
                load != NULL && ps->signatures != NULL && n < INT32_MAX;
    if (good) {
        ddl__ps_cut(ps->lengths, ps->types, ps->params, limit, ps->pieces);
        ddl__ps_assign(ps->pieces, n, ps->config.servers, order, load);
        for (int64_t i = n - 1; i >= 0; i--) {
            ps->first[ps->pieces[i].param] = i;
        }
        ps->first[ps->params] = n;
        for (int32_t i = ps->params - 1; i >= 0; i--) {
            ps->first[i] = ps->lengths[i] == 0 ? ps->first[i + 1] : ps->first[i];
        }
    }
    ddl__free(base, order);
    ddl__free(base, load);
    return good ? DDL_OK : ddl__fail(why, DDL_ERR_NOMEM, "no memory for the pieces of %d parameters", ps->params);
}

/* What all ranks must have alike. */
static uint64_t ddl__ps_signature(const ddl_ps *ps) {
    const ddl_ps_config *o = &ps->config;
    uint64_t h = ddl__mix_bytes(0x7073, ps->lengths, (size_t)ps->params * sizeof *ps->lengths);
    h = ddl__mix_bytes(h, ps->types, (size_t)ps->params * sizeof *ps->types);
    const uint64_t words[] = {(uint64_t)o->servers,
                              (uint64_t)o->dedicated,
                              (uint64_t)o->sync.mode,
                              (uint64_t)o->sync.staleness,
                              (uint64_t)o->sync.staleness_max,
                              (uint64_t)o->op,
                              (uint64_t)o->piece_bytes,
                              (uint64_t)o->memory_bytes,
                              (uint64_t)o->optimizer.kind,
                              (uint64_t)o->optimizer.state_slots};
    h = ddl__mix_bytes(h, words, sizeof words);
    const double numbers[] = {o->optimizer.learning_rate, o->optimizer.momentum, o->optimizer.beta1,
                              o->optimizer.beta2,         o->optimizer.epsilon,  o->optimizer.weight_decay,
                              o->optimizer.trust};
    return ddl__mix_bytes(h, numbers, sizeof numbers);
}

/* Makes the server of this rank, if it has one. */
static ddl_status ddl__ps_make_server(ddl_ps *ps, ddl__sentence *why) {
    int32_t number = ps->config.dedicated ? ps->group->rank - ps->workers : ps->group->rank;
    if (number < 0 || number >= ps->config.servers) {
        return DDL_OK;
    }
    ddl__lock(ps->c);
    ddl__ps_server *s = ddl__alloc(&ps->c->base, sizeof *s);
    ddl__unlock(ps->c);
    if (s == NULL) {
        return ddl__fail(why, DDL_ERR_NOMEM, "no memory for server %d", number);
    }
    ps->server = s;
    s->c = ps->c;
    s->group = ps->group;
    s->number = number;
    s->servers = ps->config.servers;
    s->workers = ps->workers;
    s->params = ps->params;
    s->lengths = ps->lengths;
    s->types = ps->types;
    s->pieces = ps->pieces;
    s->piece_count = ps->piece_count;
    s->optimizer = ps->config.optimizer;
    s->op = ps->config.op;
    s->extra = ps->extra;
    s->sync = ps->config.sync;
    s->memory = (ddl__ps_memory){.c = ps->c, .limit = UINT64_MAX};
    s->memory.limit = ps->config.memory_bytes > 0 ? (uint64_t)ps->config.memory_bytes : UINT64_MAX;
    return ddl__ps_server_begin(s, why);
}

/* Ends a collective of the making. A rank that has no memory for it has sent nothing: the others are told by breaking
 * the group, which is the servers' own. The lock is not held. */
static ddl_status ddl__ps_met(ddl_group *g, ddl_status status) {
    if (status == DDL_ERR_NOMEM) {
        DDL__TRY(ddl__enter_group(g, "ddl_ps_create"));
        if (g->broken == DDL_OK) {
            ddl__break_everywhere(g->context, g, status, "ddl_ps_create: rank %d has no memory for its part", g->rank);
        }
        ddl__unlock(g->context);
    }
    return status;
}

/* All ranks have made their part, or all fail, with the lowest that has not. */
static ddl_status ddl__ps_agree(ddl_group *g, ddl_status mine, const ddl__sentence *why) {
    uint64_t failed = mine < 0 ? (uint64_t)g->rank << 32 | (uint64_t) - (int64_t)mine : UINT64_MAX;
    DDL__TRY(ddl__ps_met(g, ddl_all_reduce(g, DDL_VIEW(&failed, 1), DDL_VIEW(&failed, 1), DDL_MIN)));
    if (failed == UINT64_MAX) {
        return DDL_OK;
    }
    ddl_status status = (ddl_status) - (int32_t)(failed & UINT32_MAX);
    DDL__TRY(ddl__enter_group(g, "ddl_ps_create"));
    if (mine < 0) {
        status = ddl__error(g->context, mine, "ddl_ps_create: %s", why->text);
    } else {
        ddl__error(g->context, status, "ddl_ps_create: rank %d cannot make its part: %s; it says why",
                   (int)(failed >> 32), ddl_status_text(status));
    }
    ddl__unlock(g->context);
    return status;
}

/* All ranks have passed the same, or all fail. */
static ddl_status ddl__ps_match(ddl_ps *ps) {
    ddl_group *g = ps->group;
    uint64_t own = ddl__ps_signature(ps), *all = ps->signatures;
    DDL__TRY(ddl__ps_met(g, ddl_all_gather(g, DDL_VIEW(&own, 1), DDL_VIEW(all, g->size))));
    for (int32_t r = 0; r < g->size; r++) {
        if (all[r] != own) {
            DDL__TRY(ddl__enter_group(g, "ddl_ps_create"));
            ddl__error(ps->c, DDL_ERR_MISMATCH,
                       "ddl_ps_create: rank %d passed other parameters or another config than rank %d", r, g->rank);
            ddl__unlock(ps->c);
            return DDL_ERR_MISMATCH;
        }
    }
    return DDL_OK;
}

/* Rank 0 gives the servers their first values. What finds no memory is made again: to do so twice changes nothing. */
static ddl_status ddl__ps_give_values(ddl_ps *ps, const ddl_tensor *params) {
    for (int32_t i = 0; ps->worker == 0 && !ps->extra.sums && i < ps->params; i++) {
        ddl_status status = DDL_ERR_NOMEM;
        for (int32_t n = 0; n < DDL__PS_TRIES && status == DDL_ERR_NOMEM; n++) {
            ddl_request *r;
            ddl__lock(ps->c);
            status = ddl__ps_param_call(ps, "ddl_ps_create", DDL__PS_INIT, i, params[i].data, NULL, 0, &r);
            status = status == DDL_OK ? ddl__ps_call_wait(&r, NULL) : status;
            ddl__unlock(ps->c);
        }
        DDL__TRY(status);
    }
    return DDL_OK;
}

/* What this rank makes without the others: pieces, and its server. */
static ddl_status ddl__ps_make_own(ddl_ps *ps, const ddl_tensor *params, ddl__sentence *why) {
    if (ps == NULL) {
        return ddl__fail(why, DDL_ERR_NOMEM, "no memory");
    }
    ddl__lock(ps->c);
    ddl_status status = ddl__ps_shard(ps, params, why);
    ddl__unlock(ps->c);
    status = status == DDL_OK ? ddl__ps_make_server(ps, why) : status;
    if (status == DDL_OK && ps->server != NULL && !ps->config.dedicated) {
        if (pthread_create(&ps->thread, NULL, ddl__ps_thread, ps->server) != 0) {
            return ddl__fail(why, DDL_ERR_SYSTEM, "no thread for server %d", ps->server->number);
        }
        ps->has_thread = true;
    }
    return status;
}

/* From here on others take part: what fails, fails on all. ps NULL: there was no memory for it. */
static ddl_status ddl__ps_open(ddl_ps *ps, ddl_group *group, const ddl_tensor *params) {
    ddl__sentence why = {0};
    ddl_group *own = NULL;
    ddl_status status = DDL_ERR_NOMEM;
    for (int32_t n = 0; n < DDL__PS_TRIES && status == DDL_ERR_NOMEM; n++) { /* the others wait in it for this rank */
        status = ddl_group_duplicate(group, &own);
    }
    DDL__TRY(status);
    if (ps != NULL) {
        ps->group = own;
    }
    status = ddl__ps_agree(own, ddl__ps_make_own(ps, params, &why), &why);
    if (ps == NULL) {
        ddl_group_free(&own);
        return status;
    }
    DDL__TRY(status);
    DDL__TRY(ddl__ps_match(ps));
    return ddl__ps_give_values(ps, params);
}

static ddl_status ddl__ps_check_create(ddl_group *group, const ddl_ps_config *config, const ddl_tensor *params,
                                       int32_t count, ddl_ps_config *out) {
    ddl_context *c = group->context;
    ddl__sentence why = {0};
    if (count < 0) {
        return ddl__error(c, DDL_ERR_ARG, "ddl_ps_create: the count of parameters is %d", count);
    }
    ddl_status status = ddl__ps_config_resolve(&why, config, group->size, out);
    if (status < 0) {
        return ddl__error(c, status, "ddl_ps_create: %s", why.text);
    }
    bool serves_only = out->dedicated && group->rank >= group->size - out->servers;
    for (int32_t i = 0; i < count; i++) {
        const ddl_tensor *t = &params[i];
        bool type = t->dtype == DDL_F32 || t->dtype == DDL_F64;
        bool good = type && t->device == DDL_HOST && ddl_tensor_count(t) >= 0 && ddl__is_contiguous(t) &&
                    (serves_only || t->data != NULL || ddl_tensor_count(t) == 0);
        if (!good) {
            return ddl__error(c, DDL_ERR_ARG,
                              "ddl_ps_create: parameter %d is %s; contiguous f32 or f64 in ordinary memory is "
                              "wanted",
                              i, !type ? ddl_dtype_name(t->dtype) : "NULL, strided or on a device");
        }
    }
    return DDL_OK;
}

static ddl_status ddl__ps_make(ddl_group *group, const ddl_ps_config *config, const ddl__ps_details *extra,
                               const ddl_tensor *params, int32_t count, ddl_ps **out_ps) {
    if (out_ps == NULL || config == NULL || (params == NULL && count > 0)) {
        return ddl__refuse_group(group, "ddl_ps_create",
                                 out_ps == NULL   ? "out_ps"
                                 : config == NULL ? "config"
                                                  : "params");
    }
    *out_ps = NULL;
    DDL__TRY(ddl__enter_group(group, "ddl_ps_create"));
    ddl_context *c = group->context;
    ddl_ps_config resolved;
    ddl_status status = ddl__ps_check_create(group, config, params, count, &resolved);
    ddl_ps *ps = status == DDL_OK ? ddl__alloc(&c->base, sizeof *ps) : NULL;
    if (ps != NULL) {
        ps->c = c;
        ps->config = resolved;
        ps->extra = *extra;
        ps->sync = resolved.sync;
        ps->params = count;
        ps->rate = 1;
        ps->workers = group->size - (resolved.dedicated ? resolved.servers : 0);
        ps->worker = group->rank < ps->workers ? group->rank : -1;
        ps->clock_ns = ps->held_until_ns = ddl__now_ns();
        ps->waits_ns = c->stats.wait_ns;
    }
    ddl__unlock(c);
    status = status == DDL_OK ? ddl__ps_open(ps, group, params) : status;
    if (status < 0 && ps != NULL) {
        ddl__ps_stop(ps);
        ddl__ps_release(ps);
        return status;
    }
    if (status == DDL_OK) {
        ps->magic = DDL__PS_MAGIC;
        *out_ps = ps;
    }
    return status;
}

DDL_API ddl_status ddl_ps_create(ddl_group *group, const ddl_ps_config *config, const ddl_tensor *params, int32_t count,
                                 ddl_ps **out_ps) {
    static const ddl__ps_details none;
    return ddl__ps_make(group, config, &none, params, count, out_ps);
}

/* >>leaving */

DDL_API ddl_status ddl_ps_serve(ddl_ps *ps) {
    DDL__TRY(ddl__ps_enter(ps, false, "ddl_ps_serve"));
    ddl_status status = DDL_OK;
    if (!ps->config.dedicated || ps->server == NULL) {
        status = ddl__error(ps->c, DDL_ERR_ARG, "ddl_ps_serve: rank %d is no dedicated server", ps->group->rank);
    } else if (ps->server->served) {
        status = ddl__error(ps->c, DDL_ERR_STATE, "ddl_ps_serve: server %d serves or has served", ps->server->number);
    } else {
        ps->server->served = true;
    }
    ddl__unlock(ps->c);
    DDL__TRY(status);
    status = ddl__ps_serve(ps->server);
    if (status < 0) {
        DDL__TRY(ddl__ps_enter(ps, false, "ddl_ps_serve"));
        status = ddl__error(ps->c, status, "ddl_ps_serve: server %d ends: %s", ps->server->number,
                            ddl__ps_is_broken(ps->group) ? ps->group->broken_text : ddl_status_text(status));
        ddl__unlock(ps->c);
    }
    return status;
}

DDL_API ddl_status ddl_ps_leave(ddl_ps *ps) {
    DDL__TRY(ddl__ps_enter(ps, true, "ddl_ps_leave"));
    ddl_status status = ddl__ps_idle(ps, "ddl_ps_leave");
    if (status == DDL_OK) {
        ddl__ps_ask ask = {.op = DDL__PS_LEAVE, .clock = ps->clock};
        status = ddl__ps_ask_all(ps, "ddl_ps_leave", ps->config.servers, ask, NULL, true, NULL);
        ps->left = true;
    }
    ddl__unlock(ps->c);
    return status;
}

DDL_API ddl_status ddl_ps_free(ddl_ps **ps) {
    if (ps == NULL || *ps == NULL) {
        return DDL_OK;
    }
    ddl_ps *p = *ps;
    if (p->magic != DDL__PS_MAGIC) {
        return DDL_ERR_ARG;
    }
    ddl__lock(p->c);
    bool over = p->c->finalized;
    ddl_status status = p->held == 0 || over ? DDL_OK
                                             : ddl__error(p->c, DDL_ERR_STATE,
                                                          "ddl_ps_free: %d requests were not waited "
                                                          "for",
                                                          p->held);
    ddl__unlock(p->c);
    DDL__TRY(status);
    *ps = NULL;
    if (!over && p->worker >= 0 && !p->left) {
        status = ddl_ps_leave(p); /* a server that is gone needs not be told */
    }
    if (p->has_thread) {
        ddl__lock(p->c);
        ddl__wait w = {.done = ddl__ps_has_ended,
                       .tick = ddl__no_tick,
                       .arg = p->server,
                       .deadline = ddl__deadline(ddl__now_ns(), p->group->timeout_ms)};
        if (!over && !ddl__wait_for(p->c, &w)) {
            status = ddl__error(p->c, DDL_ERR_TIMEOUT,
                                "ddl_ps_free: some workers still need server %d; it ends all the same",
                                p->server->number); /* how many, only its thread knows */
        }
        ddl__unlock(p->c);
    }
    ddl__ps_stop(p);
    ddl__ps_release(p);
    return status;
}

/* >>parameters */

/* Numbers a push. False: *sequence is not one that was given out. */
static bool ddl__ps_number(ddl_ps *ps, uint64_t *sequence, uint64_t *out) {
    if (sequence != NULL && *sequence > ps->sequence) {
        return false;
    }
    *out = sequence != NULL && *sequence > 0 ? *sequence : ++ps->sequence;
    if (sequence != NULL) {
        *sequence = *out;
    }
    return true;
}

typedef struct ddl__ps_move_args {
    const char *what;
    int32_t op, param;
    const ddl_tensor *grad, *out; /* or NULL */
    uint64_t *sequence;
} ddl__ps_move_args;

static ddl_status ddl__ps_param_check(ddl_ps *ps, const ddl__ps_move_args *a) {
    if (a->param < 0 || a->param >= ps->params) {
        return ddl__error(ps->c, DDL_ERR_ARG, "%s: there is no parameter %d; 0 to %d are registered", a->what, a->param,
                          ps->params - 1);
    }
    int64_t count = ps->lengths[a->param];
    ddl_dtype dtype = ps->types[a->param];
    if (a->grad != NULL) {
        DDL__TRY(ddl__ps_tensor_check(ps, a->grad, dtype, count, false, a->what, "grad"));
    }
    if (a->out != NULL) {
        DDL__TRY(ddl__ps_tensor_check(ps, a->out, dtype, count, true, a->what, "out"));
    }
    if (a->grad != NULL && a->out != NULL && ddl__tensor_touches(a->grad, a->out)) {
        return ddl__error(ps->c, DDL_ERR_ARG, "%s: `grad` and `out` overlap; they must be apart", a->what);
    }
    bool repeated = a->sequence != NULL && *a->sequence > 0;
    if (a->grad != NULL && !repeated && ps->sync.mode != DDL_SYNC_ASP && ps->pushed[a->param] > ps->clock) {
        return ddl__error(ps->c, DDL_ERR_STATE,
                          "%s: parameter %d was pushed at clock %lld before; in BSP and SSP it is pushed once in a "
                          "clock: add gradients up, or call ddl_ps_clock",
                          a->what, a->param, (long long)ps->clock);
    }
    return DDL_OK;
}

/* The first element that is not finite, or count; *out_value: what it is. */
static int64_t ddl__ps_first_odd(const ddl_tensor *t, int64_t count, double *out_value) {
    int64_t i = 0;
    for (*out_value = 0; i < count; i++) {
        *out_value = t->dtype == DDL_F64 ? ((const double *)t->data)[i] : (double)((const float *)t->data)[i];
        if (*out_value - *out_value != 0) {
            break;
        }
    }
    return i;
}

/* Whether a gradient may be pushed: servers would keep what is not finite for ever. ids: of rows of table `number`. The
 * lock is not held: others must not wait for a look at all of it. */
static ddl_status ddl__ps_push_look(ddl_ps *ps, const char *what, const ddl_tensor *grad, int32_t number,
                                    const uint64_t *ids) {
    int64_t count = ddl_tensor_count(grad);
    if (ps->config.unchecked || !ddl__not_finite(grad->data, count, grad->dtype)) {
        return DDL_OK;
    }
    char where[64];
    double value;
    int64_t at = ddl__ps_first_odd(grad, count, &value);
    DDL__TRY(ddl__ps_enter(ps, true, what));
    int32_t width = ids != NULL ? ps->tables[number].width : 1;
    if (ids != NULL) {
        snprintf(where, sizeof where, "row %llu of table %d", (unsigned long long)ids[at / width], number);
    } else {
        snprintf(where, sizeof where, "parameter %d", number);
    }
    ddl_status status = ddl__error(ps->c, DDL_ERR_ARG,
                                   "%s: the gradient of %s is not finite on worker %d (element %lld is %g); nothing "
                                   "was pushed",
                                   what, where, ps->worker, (long long)(ids != NULL ? at % width : at), value);
    ddl__unlock(ps->c);
    return status;
}

static ddl_status ddl__ps_push_check(ddl_ps *ps, const ddl__ps_move_args *a) {
    DDL__TRY(ddl__ps_enter(ps, true, a->what));
    ddl_status status = ddl__ps_param_check(ps, a);
    ddl__unlock(ps->c);
    return status < 0 ? status : ddl__ps_push_look(ps, a->what, a->grad, a->param, NULL);
}

/* A push, pull or both; out_request NULL: blocks. */
static ddl_status ddl__ps_move_param(ddl_ps *ps, const ddl__ps_move_args *a, ddl_request **out_request) {
    ddl_request *own = NULL, **r = out_request != NULL ? out_request : &own;
    uint64_t sequence = 0;
    *r = NULL;
    DDL__TRY(a->grad != NULL ? ddl__ps_push_check(ps, a) : DDL_OK);
    DDL__TRY(ddl__ps_enter(ps, true, a->what)); /* what was checked may be otherwise by now */
    ddl_status status = ddl__ps_param_check(ps, a);
    if (status == DDL_OK && a->grad != NULL && !ddl__ps_number(ps, a->sequence, &sequence)) {
        status = ddl__error(ps->c, DDL_ERR_ARG, "%s: no push has had the sequence %llu; the last was %llu", a->what,
                            (unsigned long long)*a->sequence, (unsigned long long)ps->sequence);
    }
    if (status == DDL_OK) {
        status = ddl__ps_param_call(ps, a->what, a->op, a->param, a->grad != NULL ? a->grad->data : NULL,
                                    a->out != NULL ? a->out->data : NULL, sequence, r);
    }
    if (status == DDL_OK && a->grad != NULL) {
        ps->pushed[a->param] = ps->clock + 1;
    }
    if (status == DDL_OK && out_request == NULL) {
        status = ddl__ps_call_wait(r, NULL);
    }
    ddl__unlock(ps->c);
    return status;
}

DDL_API ddl_status ddl_ps_push(ddl_ps *ps, int32_t param, ddl_tensor grad, uint64_t *sequence) {
    ddl__ps_move_args a = {"ddl_ps_push", DDL__PS_PUSH, param, &grad, NULL, sequence};
    return ddl__ps_move_param(ps, &a, NULL);
}

DDL_API ddl_status ddl_ps_ipush(ddl_ps *ps, int32_t param, ddl_tensor grad, uint64_t *sequence,
                                ddl_request **out_request) {
    ddl__ps_move_args a = {"ddl_ps_ipush", DDL__PS_PUSH, param, &grad, NULL, sequence};
    return out_request == NULL ? ddl__ps_refuse_null(ps, a.what, "out_request")
                               : ddl__ps_move_param(ps, &a, out_request);
}

DDL_API ddl_status ddl_ps_pull(ddl_ps *ps, int32_t param, ddl_tensor out) {
    ddl__ps_move_args a = {"ddl_ps_pull", DDL__PS_PULL, param, NULL, &out, NULL};
    return ddl__ps_move_param(ps, &a, NULL);
}

DDL_API ddl_status ddl_ps_ipull(ddl_ps *ps, int32_t param, ddl_tensor out, ddl_request **out_request) {
    ddl__ps_move_args a = {"ddl_ps_ipull", DDL__PS_PULL, param, NULL, &out, NULL};
    return out_request == NULL ? ddl__ps_refuse_null(ps, a.what, "out_request")
                               : ddl__ps_move_param(ps, &a, out_request);
}

DDL_API ddl_status ddl_ps_push_pull(ddl_ps *ps, int32_t param, ddl_tensor grad, ddl_tensor out, uint64_t *sequence) {
    ddl__ps_move_args a = {"ddl_ps_push_pull", DDL__PS_PUSH_PULL, param, &grad, &out, sequence};
    return ddl__ps_move_param(ps, &a, NULL);
}

DDL_API ddl_status ddl_ps_ipush_pull(ddl_ps *ps, int32_t param, ddl_tensor grad, ddl_tensor out, uint64_t *sequence,
                                     ddl_request **out_request) {
    ddl__ps_move_args a = {"ddl_ps_ipush_pull", DDL__PS_PUSH_PULL, param, &grad, &out, sequence};
    return out_request == NULL ? ddl__ps_refuse_null(ps, a.what, "out_request")
                               : ddl__ps_move_param(ps, &a, out_request);
}

/* >>clocks */

/* How long this iteration took, and without the waits for slower workers: what is kept back while the program goes on
 * is no wait. The next one begins. */
static void ddl__ps_take_times(ddl_ps *ps, ddl__ps_ask *ask) {
    uint64_t now = ddl__now_ns(), takes = now - ps->clock_ns;
    uint64_t waited = DDL__MIN(ps->held_ns, ps->c->stats.wait_ns - ps->waits_ns);
    ask->value = takes;
    ask->count = (int64_t)(takes - DDL__MIN(waited, takes));
    ps->clock_ns = ps->held_until_ns = now;
    ps->held_ns = 0;
    ps->waits_ns = ps->c->stats.wait_ns;
}

DDL_API ddl_status ddl_ps_clock(ddl_ps *ps) {
    DDL__TRY(ddl__ps_enter(ps, true, "ddl_ps_clock"));
    if (ps->clocking) { /* both would end the same iteration */
        ddl_status twice = ddl__error(ps->c, DDL_ERR_STATE,
                                      "ddl_ps_clock: another thread of worker %d is ending its iteration at clock "
                                      "%lld; let one thread call it",
                                      ps->worker, (long long)ps->clock);
        ddl__unlock(ps->c);
        return twice;
    }
    ddl_status status = DDL_OK;
    ps->clocking = true;
    if (ps->sync.mode != DDL_SYNC_ASP && ps->slowest < ps->clock - ps->sync.staleness) {
        ddl__ps_ask gate = {.op = DDL__PS_GATE, .clock = ps->clock};
        status = ddl__ps_ask_all(ps, "ddl_ps_clock", 1, gate, NULL, true, NULL);
    }
    if (status == DDL_OK) {
        ddl__ps_ask ask = {.op = DDL__PS_CLOCK, .clock = ps->clock + 1};
        ddl__ps_take_times(ps, &ask);
        status = ddl__ps_ask_all(ps, "ddl_ps_clock", ps->config.servers, ask, NULL, false, NULL);
        ps->clock += status == DDL_OK;
    }
    ps->clocking = false;
    ddl__unlock(ps->c);
    return status;
}

DDL_API ddl_status ddl_ps_rate(ddl_ps *ps, double factor) {
    DDL__TRY(ddl__ps_enter(ps, true, "ddl_ps_rate"));
    ddl_status status = DDL_OK;
    if (!(factor >= 0 && factor < 1e30)) {
        status = ddl__error(ps->c, DDL_ERR_ARG, "ddl_ps_rate: the factor is %g; 0 to 1e30 is possible", factor);
    } else {
        ps->rate = factor;
    }
    ddl__unlock(ps->c);
    return status;
}

/* Asks all servers for what all workers ask for. */
static ddl_status ddl__ps_joint(ddl_ps *ps, int32_t op, const void *payload, size_t bytes, const char *what,
                                ddl__ps_answer *out) {
    DDL__TRY(ddl__ps_idle(ps, what));
    ddl__ps_ask ask = {
        .op = op, .place = ps->table_count, .clock = ps->clock, .sequence = ps->sequence, .bytes = (int64_t)bytes};
    ask.value = op == DDL__PS_SAVE ? ps->save_order << 1 | ps->save_failed : 0;
    ask.count = op == DDL__PS_SAVE ? ps->epoch : 0;
    return ddl__ps_ask_all(ps, what, ps->config.servers, ask, payload, true, out);
}

/* The worker goes on at the clock that the servers tell. */
static void ddl__ps_resume(ddl_ps *ps, const ddl__ps_answer *a) {
    ps->clock = a->clock;
    ps->slowest = 0;
    for (int32_t i = 0; i < ps->params; i++) {
        ps->pushed[i] = a->clock;
    }
}

DDL_API ddl_status ddl_ps_switch(ddl_ps *ps, const ddl_sync_config *sync) {
    ddl__sentence why = {0};
    ddl_sync_config resolved;
    ddl__ps_answer answer;
    uint8_t payload[12];
    ddl__writer w = ddl__writer_of(payload, sizeof payload);
    if (sync == NULL) {
        return ddl__ps_refuse_null(ps, "ddl_ps_switch", "sync");
    }
    DDL__TRY(ddl__ps_enter(ps, true, "ddl_ps_switch"));
    ddl_status status = ddl__ps_sync_resolve(&why, sync, &resolved);
    if (status < 0) {
        ddl__error(ps->c, status, "ddl_ps_switch: %s", why.text);
    } else {
        ddl__put_u32(&w, (uint32_t)resolved.mode);
        ddl__put_u32(&w, (uint32_t)resolved.staleness);
        ddl__put_u32(&w, (uint32_t)resolved.staleness_max);
        status = ddl__ps_joint(ps, DDL__PS_SWITCH, payload, w.at, "ddl_ps_switch", &answer);
    }
    if (status == DDL_OK) {
        ps->sync = resolved;
        ddl__ps_resume(ps, &answer);
    }
    ddl__unlock(ps->c);
    return status;
}

DDL_API ddl_status ddl_ps_info_get(ddl_ps *ps, ddl_ps_info *out_info) {
    if (out_info == NULL) {
        return ddl__ps_refuse_null(ps, "ddl_ps_info_get", "out_info");
    }
    DDL__TRY(ddl__ps_enter(ps, false, "ddl_ps_info_get"));
    *out_info = ps->server != NULL ? ps->server->told : (ddl_ps_info){0};
    out_info->worker = ps->worker;
    out_info->workers = ps->workers;
    out_info->server = ps->server != NULL ? ps->server->number : -1;
    out_info->servers = ps->config.servers;
    out_info->clock = ps->clock;
    out_info->slowest = DDL__MAX(ps->slowest, out_info->slowest);
    out_info->sequence = ps->sequence;
    for (int64_t i = 0; i < ps->piece_count; i++) {
        out_info->elements += ps->pieces[i].server == out_info->server ? ps->pieces[i].count : 0;
    }
    ddl__unlock(ps->c);
    return DDL_OK;
}

/* >>tables */

static ddl_status ddl__ps_check_table(ddl_ps *ps, const ddl_ps_table_config *t) {
    if (t->width < 1 || t->width > 1 << 20 || t->rows < 0 || t->rows > INT32_MAX ||
        !(t->uniform >= 0 && t->uniform - t->uniform == 0)) {
        return ddl__error(
            ps->c, DDL_ERR_ARG,
            "ddl_ps_table_create: width %d, rows %lld, uniform %g; a width of 1 to 2^20, 0 to 2^31 - 1 rows "
            "and a finite uniform of at least 0 are possible",
            t->width, (long long)t->rows, (double)t->uniform);
    }
    if (ddl__optim_needs_sums(&ps->config.optimizer)) {
        return ddl__error(ps->c, DDL_ERR_UNSUPPORTED,
                          "ddl_ps_table_create: LARS and LAMB need the norm of a whole tensor, and no server has all "
                          "rows of a table; take an elementwise optimizer");
    }
    if (ps->table_count == DDL__PS_TABLES) {
        return ddl__error(ps->c, DDL_ERR_ARG, "ddl_ps_table_create: there are %d tables; more are not possible",
                          DDL__PS_TABLES);
    }
    return DDL_OK;
}

/* The worker's own note of a table. */
static ddl_status ddl__ps_note_table(ddl_ps *ps, const ddl_ps_table_config *config) {
    size_t n = (size_t)ps->table_count;
    ddl_ps_table_config *tables = ddl__alloc_array(&ps->c->base, n + 1, sizeof *tables);
    if (tables == NULL) {
        return ddl__error(ps->c, DDL_ERR_NOMEM, "ddl_ps_table_create: no memory");
    }
    if (n > 0) {
        memcpy(tables, ps->tables, n * sizeof *tables);
    }
    ddl__free(&ps->c->base, ps->tables);
    ps->tables = tables;
    ps->tables[n] = *config;
    return DDL_OK;
}

DDL_API ddl_status ddl_ps_table_create(ddl_ps *ps, const ddl_ps_table_config *config, int32_t *out_table) {
    uint8_t payload[32];
    uint32_t uniform;
    ddl__writer w = ddl__writer_of(payload, sizeof payload);
    if (config == NULL || out_table == NULL) {
        return ddl__ps_refuse_null(ps, "ddl_ps_table_create", config == NULL ? "config" : "out_table");
    }
    *out_table = -1;
    DDL__TRY(ddl__ps_enter(ps, true, "ddl_ps_table_create"));
    ddl_status status = ddl__ps_check_table(ps, config);
    status = status == DDL_OK ? ddl__ps_idle(ps, "ddl_ps_table_create") : status; /* not over another thread's note */
    if (status == DDL_OK) {
        memcpy(&uniform, &config->uniform, sizeof uniform);
        ddl__put_u32(&w, (uint32_t)config->width);
        ddl__put_u32(&w, uniform);
        ddl__put_u64(&w, config->seed);
        ddl__put_u64(&w, (uint64_t)config->rows);
        ddl__put_u32(&w, config->evict != 0);
        ddl__put_u32(&w, config->fixed != 0);
        status = ddl__ps_note_table(ps, config);
    }
    if (status == DDL_OK) {
        status = ddl__ps_joint(ps, DDL__PS_TABLE, payload, w.at, "ddl_ps_table_create", NULL);
    }
    if (status == DDL_OK) {
        *out_table = ps->table_count++;
    }
    ddl__unlock(ps->c);
    return status;
}

static ddl_status ddl__ps_rows_check(ddl_ps *ps, int32_t table, const uint64_t *ids, int64_t count, const ddl_tensor *t,
                                     bool output, const char *what) {
    if (table < 0 || table >= ps->table_count) {
        return ddl__error(ps->c, DDL_ERR_ARG, "%s: there is no table %d; %d were made", what, table, ps->table_count);
    }
    if (count < 0 || count > INT32_MAX || (count > 0 && ids == NULL)) {
        return ddl__error(ps->c, DDL_ERR_ARG, "%s: %lld ids at %p", what, (long long)count, (const void *)ids);
    }
    return ddl__ps_tensor_check(ps, t, DDL_F32, count * ps->tables[table].width, output, what,
                                output ? "out" : "grads");
}

static ddl_status ddl__ps_push_rows_check(ddl_ps *ps, int32_t table, const uint64_t *ids, int64_t count,
                                          const ddl_tensor *grads, const char *what) {
    DDL__TRY(ddl__ps_enter(ps, true, what));
    ddl_status status = ddl__ps_rows_check(ps, table, ids, count, grads, false, what);
    ddl__unlock(ps->c);
    return status < 0 ? status : ddl__ps_push_look(ps, what, grads, table, ids);
}

/* Rows are picked with the lock held: it keeps the order of calls. */
static ddl_status ddl__ps_move_rows(ddl_ps *ps, int32_t table, const uint64_t *ids, int64_t count,
                                    const ddl_tensor *grads, const ddl_tensor *out, uint64_t *sequence,
                                    const char *what) {
    ddl__ps_picks picks = {0};
    uint64_t number = 0;
    DDL__TRY(grads != NULL ? ddl__ps_push_rows_check(ps, table, ids, count, grads, what) : DDL_OK);
    DDL__TRY(ddl__ps_enter(ps, true, what));
    ddl_status status = ddl__ps_rows_check(ps, table, ids, count, out != NULL ? out : grads, out != NULL, what);
    if (status == DDL_OK) {
        int64_t row_bytes = 8 + 4 * (int64_t)ps->tables[table].width;
        status = ddl__ps_pick_rows(ps, ids, count, row_bytes, &picks);
    }
    if (status == DDL_OK && picks.chunks >= 1 << DDL__PS_CHUNK_BITS) {
        status = ddl__error(ps->c, DDL_ERR_ARG, "%s: %lld messages of rows in one call; 2^20 are possible", what,
                            (long long)picks.chunks);
    }
    if (status == DDL_OK && grads != NULL && !ddl__ps_number(ps, sequence, &number)) {
        status = ddl__error(ps->c, DDL_ERR_ARG, "%s: no push has had the sequence %llu; the last was %llu", what,
                            (unsigned long long)*sequence, (unsigned long long)ps->sequence);
    }
    if (status == DDL_OK) {
        status = ddl__ps_rows_call(ps, what, table, &picks, grads != NULL ? grads->data : NULL,
                                   out != NULL ? out->data : NULL, number);
    }
    ddl__free(&ps->c->base, picks.all);
    ddl__unlock(ps->c);
    return status;
}

DDL_API ddl_status ddl_ps_pull_rows(ddl_ps *ps, int32_t table, const uint64_t *ids, int64_t count, ddl_tensor out) {
    return ddl__ps_move_rows(ps, table, ids, count, NULL, &out, NULL, "ddl_ps_pull_rows");
}

DDL_API ddl_status ddl_ps_push_rows(ddl_ps *ps, int32_t table, const uint64_t *ids, int64_t count, ddl_tensor grads,
                                    uint64_t *sequence) {
    return ddl__ps_move_rows(ps, table, ids, count, &grads, NULL, sequence, "ddl_ps_push_rows");
}

/* >>checkpoints */

/* One of LOOK, SAVE and LOAD, at all servers. */
static ddl_status ddl__ps_at_folder(ddl_ps *ps, int32_t op, const char *folder, const char *what, ddl__ps_answer *out) {
    DDL__TRY(ddl__ps_joint(ps, op, folder, strlen(folder) + 1, what, out));
    return out->generation >= 0
               ? DDL_OK
               : ddl__error(ps->c, DDL_ERR_STATE,
                            "%s: the servers do not agree on the newest checkpoint in %s; it must be "
                            "a folder that all of them share, and nobody else writes to",
                            what, folder);
}

/* Servers look before any of them writes: no worker asks for the save before it knows of all that they have looked. */
static ddl_status ddl__ps_checkpoint(ddl_ps *ps, int32_t op, const char *folder, const char *what) {
    ddl__ps_answer answer;
    if (folder == NULL) {
        return ddl__ps_refuse_null(ps, what, "folder");
    }
    DDL__TRY(ddl__ps_enter(ps, true, what));
    size_t bytes = strlen(folder) + 1;
    ddl_status status = bytes == 1 || bytes > DDL__PS_PATH_BYTES
                            ? ddl__error(ps->c, DDL_ERR_ARG, "%s: a folder of %zu characters; 1 to %d are possible",
                                         what, bytes - 1, DDL__PS_PATH_BYTES - 1)
                            : DDL_OK;
    if (status == DDL_OK && op == DDL__PS_SAVE) {
        status = ddl__ps_at_folder(ps, DDL__PS_LOOK, folder, what, &answer);
        ps->save_order = status == DDL_OK ? (uint64_t)answer.generation : 0;
    }
    if (status == DDL_OK) {
        status = ddl__ps_at_folder(ps, op, folder, what, &answer);
        ps->save_failed = op == DDL__PS_SAVE ? status < 0 : ps->save_failed;
    }
    if (status == DDL_OK && op == DDL__PS_LOAD) {
        ps->sequence = DDL__MAX(ps->sequence, answer.sequence); /* servers know those after the checkpoint too */
        ps->epoch = answer.epoch;
        ddl__ps_resume(ps, &answer);
    }
    ddl__unlock(ps->c);
    return status;
}

DDL_API ddl_status ddl_ps_save(ddl_ps *ps, const char *folder) {
    return ddl__ps_checkpoint(ps, DDL__PS_SAVE, folder, "ddl_ps_save");
}

DDL_API ddl_status ddl_ps_load(ddl_ps *ps, const char *folder) {
    return ddl__ps_checkpoint(ps, DDL__PS_LOAD, folder, "ddl_ps_load");
}

#endif /* DDL_PS_PS_H */

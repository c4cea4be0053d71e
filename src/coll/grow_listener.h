/* coll: where newcomers come in: the place of the rendezvous, which is served again while a group grows. And the public
 * call. */
#ifndef DDL_COLL_GROW_LISTENER_H
#define DDL_COLL_GROW_LISTENER_H

#include "grow.h"
#include "measure.h"

/* Another thread of the context that polls sees what happens here at once: the server's set is in the context's. */
#define DDL__GROW_LISTENER_EVENT (UINT32_MAX - 2)
#define DDL__GROW_LISTENER_TOLD_NS (1 * DDL__NS_PER_S) /* for newcomers to take what they are told; mostly they have */

static ddl_status ddl__grow_listener_open(ddl__grow *w) {
    ddl_context *c = w->group->context;
    ddl__server *server = ddl__alloc(&c->base, sizeof *server);
    if (server == NULL) {
        return ddl__fail(&w->why, DDL_ERR_NOMEM, "no memory to receive newcomers");
    }
    *server = (ddl__server){.settings = &c->settings, .base = &c->base, .blob_bytes = DDL__BLOB_BYTES,
                            .table = w->table, .why = &w->why, .grows = true, .epoll = -1, .spare = -1};
    ddl_status status = c->settings.place.kind == DDL__MEET_TCP
                            ? ddl__listen(server)
                            : ddl__fail(&w->why, DDL_ERR_UNSUPPORTED,
                                        "newcomers come to a rendezvous by TCP: give MASTER_ADDR and MASTER_PORT, or "
                                        "DDL_RENDEZVOUS=tcp://host:port, instead of a folder or an exchange function");
    status = status == DDL_OK ? ddl__server_open(server) : status;
    if (status < 0) {
        ddl__server_close_listeners(server);
        ddl__free(&c->base, server);
        return status;
    }
    struct epoll_event event = {.events = EPOLLIN, .data = {.u32 = DDL__GROW_LISTENER_EVENT}};
    (void)epoll_ctl(c->epoll_fd, EPOLL_CTL_ADD, server->epoll, &event);
    w->states = server->ranks;
    w->self = server;
    return DDL_OK;
}

static void ddl__grow_listener_turn(ddl__grow *w) { ddl__server_turn(w->self, 0); }

static void ddl__grow_listener_tell(ddl__grow *w, int32_t rank, const uint8_t *roster, size_t bytes) {
    ddl__server *server = w->self;
    for (int32_t i = 0; i < server->guest_count; i++) {
        ddl__guest *g = &server->guests[i];
        if (g->stage == DDL__GUEST_HEAD && g->rank == (uint32_t)rank) {
            ddl__guest_say(g, DDL__RECORD_TABLE, DDL_OK, roster, bytes);
            if (!ddl__guest_flush(server, g)) {
                ddl__guest_close(server, g);
            }
            return;
        }
    }
}

/* Somebody has not taken all that it is told. */
static bool ddl__grow_listener_tells(const ddl__server *server) {
    for (int32_t i = 0; i < server->guest_count; i++) {
        if (server->guests[i].stage == DDL__GUEST_HEAD && server->guests[i].tail_at < server->guests[i].tail_bytes) {
            return true;
        }
    }
    return false;
}

static void ddl__grow_listener_close(ddl__grow *w, bool admitted) {
    static const char again[] = "the members begin anew: one of them died, or time was over";
    ddl__server *server = w->self;
    uint64_t until = ddl__now_ns() + DDL__GROW_LISTENER_TOLD_NS;
    while (admitted && ddl__grow_listener_tells(server) && ddl__now_ns() < until) {
        ddl__server_turn(server, 10);
    }
    for (int32_t i = 0; i < server->guest_count && !admitted; i++) {
        ddl__guest *g = &server->guests[i];
        if (g->stage == DDL__GUEST_HEAD && g->tail_at == g->tail_bytes) {
            ddl__guest_say(g, DDL__RECORD_FAILED, DDL_ERR_STATE, again, strlen(again));
            (void)ddl__guest_flush(server, g);
        }
    }
    w->group->context->stats.strangers_refused += server->strangers;
    ddl__server_close(server);
    ddl__free(server->base, server);
    w->self = NULL;
    w->states = NULL;
}

static const ddl__grow_listener ddl__grow_listener_sockets = {ddl__grow_listener_open, ddl__grow_listener_turn,
                                                              ddl__grow_listener_tell, ddl__grow_listener_close};

/* >>public */

static bool ddl__grow_done(ddl_context *c, void *arg) {
    ddl__grow *w = arg;
    if (!w->over && !c->finalized && !c->aborted) {
        ddl__grow_step(w);
    }
    return w->over || c->finalized || c->aborted;
}

static ddl_status ddl__grow_failed(const ddl__grow *w) {
    ddl_group *g = w->group;
    bool known = w->told && w->roster.verdict < 0 && w->roster.verdict != DDL_ERR_PEER;
    return ddl__error(g->context, known ? w->roster.verdict : DDL_ERR_TIMEOUT, "ddl_group_grow on group \"%s\": %s",
                      g->name, known ? w->roster.text
                                     : "nobody was admitted before the deadline: ranks died meanwhile, newcomers went "
                                       "away, or a rank could not make a link to one; warnings tell which");
}

/* Until the roster is here, or will not come. */
static ddl_status ddl__grow_attempt(ddl__grow *w) {
    ddl_group *g = w->group;
    ddl__agreement *a = NULL;
    DDL__TRY(ddl__agree_until(g, DDL__AGREE_GROW, 1, w->end_ns, &a));
    DDL__TRY(ddl__agree_quorum(g, a));
    ddl__grow_begin(w, a);
    ddl__wait until = {.done = ddl__grow_done, .tick = ddl__no_tick, .arg = w, .deadline = w->end_ns};
    ddl__wait_for(g->context, &until);
    if (!w->over) {
        w->over = w->late = true;
    }
    return DDL_OK;
}

/* A grown group has what one that was made at the start has: collectives that a transport runs by itself, where all
 * ranks can. Members and newcomers call it. When it fails the group is broken, which the next call on it tells. */
static void ddl__grown_natives(ddl_group *g, uint64_t end_ns, const char *what) {
    uint64_t now = ddl__now_ns(), left = end_ns > now ? (end_ns - now) / DDL__NS_PER_MS : 0;
    int64_t timeout_ms = g->timeout_ms;
    g->timeout_ms = (int64_t)DDL__MIN(DDL__MAX(left, (uint64_t)1000), (uint64_t)DDL__MS_MAX);
    ddl_status status = ddl__native_agree(g, what);
    g->timeout_ms = timeout_ms;
    if (status < 0) {
        ddl__log(&g->context->base, DDL_LOG_DEBUG, "%s: group \"%s\" failed as it began: %s", what, g->name,
                 g->context->error.text);
    }
}

static ddl_status ddl__grow_run(ddl__grow *w, ddl_group **out) {
    ddl_group *g = w->group;
    ddl_context *c = g->context;
    for (;;) {
        ddl__agreement *a = NULL;
        uint32_t flag = DDL__GROWN_AGAIN; /* who comes back to the fence: newcomers have been sent away meanwhile */
        if (!w->fences) {
            DDL__TRY(ddl__grow_attempt(w));
            flag = ddl__grow_flag(w);
            w->fences = true;
        }
        ddl_status status = ddl__agree_until(g, DDL__AGREE_GROWN, flag, w->end_ns, &a);
        if (status == DDL_ERR_TIMEOUT) {
            ddl__grow_leave(w);
            bool known = w->told && w->roster.verdict == DDL_ERR_TIMEOUT; /* who is missing */
            return known ? ddl__grow_failed(w) : status;
        }
        w->fences = false;
        if (ddl__grow_end(w, status == DDL_OK ? a : NULL)) {
            ddl__flush_notes(c);
            *out = w->made;
            w->made = NULL; /* the caller's now */
            ddl__grown_natives(*out, w->end_ns, "ddl_group_grow");
            return DDL_OK;
        }
        DDL__TRY(status);
        if ((a->value.flag & DDL__GROWN_AGAIN) == 0) {
            return ddl__grow_failed(w);
        }
    }
}

/* What the call before left, or anew. */
static ddl__grow *ddl__grow_get(ddl_group *g) {
    if (g->grow == NULL) {
        ddl__grow *w = ddl__alloc(&g->context->base, sizeof *w);
        if (w == NULL) {
            return NULL;
        }
        *w = (ddl__grow){.group = g, .listener = &ddl__grow_listener_sockets};
        g->grow = w;
        if (!ddl__grow_alloc(w)) {
            ddl__grow_drop(g);
        }
    }
    return g->grow;
}

DDL_API ddl_status ddl_group_grow(ddl_group *group, int32_t max_joiners, int64_t timeout_ms, ddl_group **out_group) {
    if (out_group == NULL) {
        return ddl__refuse_group(group, "ddl_group_grow", "out_group");
    }
    *out_group = NULL;
    DDL__TRY(ddl__enter_group(group, "ddl_group_grow"));
    ddl_context *c = group->context;
    ddl_status status = DDL_OK;
    if (max_joiners < 0 || timeout_ms < 0 || timeout_ms > DDL__MS_MAX) {
        status = ddl__error(c, DDL_ERR_ARG, "ddl_group_grow on group \"%s\": max_joiners is %d, timeout_ms %lld; "
                            "neither may be negative, nor timeout_ms longer than a year",
                            group->name, max_joiners, (long long)timeout_ms);
    }
    status = status == DDL_OK ? ddl__agree_enter(group, "ddl_group_grow") : status;
    if (status == DDL_OK) {
        ddl__form_undo(group->shrunk);
        group->shrunk = NULL;
        group->shrunk_parts = DDL__MADE_NOT;
        ddl__grow *w = ddl__grow_get(group);
        if (w == NULL) {
            status = ddl__error(c, DDL_ERR_NOMEM, "ddl_group_grow: no memory");
        } else {
            w->most = max_joiners > 0 ? DDL__MIN(max_joiners, (int32_t)DDL__ROSTER_MOST) : DDL__ROSTER_MOST;
            w->until_ns = ddl__deadline(ddl__now_ns(), timeout_ms > 0 ? timeout_ms : group->timeout_ms);
            w->until_ns = DDL__MIN(w->until_ns, DDL__NEVER / 2);
            w->end_ns = ddl__deadline(w->until_ns, group->timeout_ms);
            ddl__agree_go_on(group);
            status = ddl__grow_run(w, out_group);
            if (!w->fences) {
                w->told = false; /* the attempt has ended */
                ddl__grow_drop(group);
            }
        }
        ddl__agree_leave(group);
    }
    ddl__unlock(c);
    return status;
}

#endif /* DDL_COLL_GROW_LISTENER_H */

/* coll: the counters, for programs and for people. */
#ifndef DDL_COLL_STATS_H
#define DDL_COLL_STATS_H

#include "call.h"

enum { DDL__LATE_LEAST = 8 }; /* collectives that a judgement takes */

/* Another rank that was last in two thirds of the collectives of which it is known who was, and cost this rank a tenth
 * of its time in collectives; -1: none. */
static int32_t ddl__stats_slow_rank(const ddl_context *c) {
    uint64_t total = 0, time_ns = 0;
    int32_t most = -1;
    for (int32_t i = 0; i < c->world_size; i++) {
        uint64_t last = c->links[i].stats.last;
        total += last;
        most = i != c->rank && last > 0 && (most < 0 || last > c->links[most].stats.last) ? i : most;
    }
    for (int32_t i = 0; i < DDL_STATS_ALGORITHMS; i++) {
        time_ns += c->stats.algorithms[i].time_ns;
    }
    const ddl_rank_stats *s = most >= 0 ? &c->links[most].stats : NULL;
    bool stands_out = s != NULL && s->last >= DDL__LATE_LEAST && s->last > total / 3 * 2 && s->late_ns > time_ns / 10;
    return stands_out ? most : -1;
}

static int32_t ddl__stats_kind(const ddl_context *c, const ddl__link *l) {
    return l->endpoint != NULL ? ddl__pace_kind((int32_t)(l->endpoint - c->endpoints), l->same_host) : -1;
}

/* Of the links to this rank. A single one between hosts is held against what was measured when the job began. */
static ddl__slow_link ddl__stats_slow_link(const ddl_context *c) {
    ddl__paces paces = {0};
    ddl__slow_link slow = {.from = -1, .to = c->rank};
    for (int32_t i = 0; i < c->world_size; i++) {
        const ddl__link *l = &c->links[i];
        ddl__paces_add(&paces, ddl__stats_kind(c, l), l->stats.large_messages, l->stats.bytes_per_s);
    }
    for (int32_t i = 0; i < c->world_size; i++) {
        const ddl__link *l = &c->links[i];
        int32_t kind = ddl__stats_kind(c, l);
        uint64_t usual = kind >= 0 && l->stats.large_messages > 0 ? ddl__paces_usual(&paces, kind) : 0;
        double model = c->tuning.model.s_per_byte[1];
        usual = usual == 0 && !l->same_host && model > 0 ? (uint64_t)(1 / model) : usual;
        ddl__slow_link_look(&slow, i, c->rank, l->stats.large_messages, l->stats.bytes_per_s, usual);
    }
    return slow;
}

/* The context's own counters, and what is only looked up. */
static void ddl__stats_fill(ddl_context *context, ddl_stats *out_stats) {
    for (ddl_group *g = context->groups->first; g != NULL; g = g->next) {
        if (g->magic == DDL__GROUP_MAGIC) {
            ddl__account_pending(g);
        }
    }
    *out_stats = context->stats;
    out_stats->memory_bytes = context->base.memory;
    out_stats->memory_peak_bytes = context->base.memory_peak;
    for (int32_t i = 0; i < context->endpoint_count; i++) {
        out_stats->transports[i] = context->endpoints[i].stats;
        out_stats->transports[i].name = context->endpoints[i].plugin->name;
    }
    for (int32_t i = 0; i < context->world_size; i++) {
        const ddl__link *l = &context->links[i];
        out_stats->peers_connected += l->connected;
        if (l->endpoint != NULL) {
            out_stats->transports[l->endpoint - context->endpoints].peers++;
        }
    }
    ddl__slow_link slow = ddl__stats_slow_link(context);
    out_stats->slow_rank = ddl__stats_slow_rank(context);
    out_stats->slow_link = slow.from;
    out_stats->slow_link_usual_bytes_per_s = slow.from >= 0 ? slow.usual : 0;
}

DDL_API ddl_status ddl_stats_get(ddl_context *context, ddl_stats *out_stats) {
    if (out_stats == NULL) {
        return ddl__refuse(context, "ddl_stats_get", "out_stats");
    }
    DDL__TRY(ddl__enter(context));
    ddl__stats_fill(context, out_stats);
    ddl__unlock(context);
    return DDL_OK;
}

DDL_API ddl_status ddl_rank_stats_get(ddl_context *context, int32_t rank, ddl_rank_stats *out_stats) {
    if (out_stats == NULL) {
        return ddl__refuse(context, "ddl_rank_stats_get", "out_stats");
    }
    DDL__TRY(ddl__enter(context));
    ddl_status status = DDL_OK;
    if (rank >= 0 && rank < context->world_size) {
        *out_stats = context->links[rank].stats;
    } else {
        status = ddl__error(context, DDL_ERR_ARG, "ddl_rank_stats_get: rank %d; ranks go from 0 to %d", rank,
                            context->world_size - 1);
    }
    ddl__unlock(context);
    return status;
}

/* >>stats_text */

static void ddl__stats_transports(const ddl_stats *s, ddl__text *text) {
    for (int32_t i = 0; i < DDL_STATS_TRANSPORTS && s->transports[i].name != NULL; i++) {
        const ddl_transport_stats *t = &s->transports[i];
        ddl__text_add(text, "  transport %-21s %llu peers, sent %llu messages %.3f MB, received %llu messages %.3f MB",
                      t->name, (unsigned long long)t->peers, (unsigned long long)t->messages_sent,
                      (double)t->bytes_sent * 1e-6, (unsigned long long)t->messages_received,
                      (double)t->bytes_received * 1e-6);
        if (t->native_operations > 0) {
            ddl__text_add(text, ", ran %llu collectives %.3f MB %.3f ms", (unsigned long long)t->native_operations,
                          (double)t->native_bytes * 1e-6, (double)t->native_ns * 1e-6);
        }
        ddl__text_add(text, "\n");
    }
}

static void ddl__stats_algorithms(const ddl_stats *s, ddl__text *text) {
    for (int32_t i = 0; i < DDL_STATS_ALGORITHMS && s->algorithms[i].name != NULL; i++) {
        const ddl_algorithm_stats *a = &s->algorithms[i];
        ddl__text_add(text, "  algorithm %-21s %llu collectives, %.3f MB, %.3f ms\n", a->name,
                      (unsigned long long)a->operations, (double)a->bytes * 1e-6, (double)a->time_ns * 1e-6);
    }
}

/* The ranks that were last most often, at most eight, this one among them. */
static void ddl__stats_late(const ddl_context *c, ddl__text *text) {
    uint64_t below = UINT64_MAX;
    for (int32_t shown = 0; shown < 8;) {
        uint64_t most = 0;
        for (int32_t i = 0; i < c->world_size; i++) {
            uint64_t last = c->links[i].stats.last;
            most = last < below && last > most ? last : most;
        }
        if (most == 0) {
            return;
        }
        for (int32_t i = 0; i < c->world_size && shown < 8; i++) {
            const ddl_rank_stats *r = &c->links[i].stats;
            if (r->last == most && i == c->rank) {
                ddl__text_add(text, "  rank %d, this one, was last %llu times\n", i, (unsigned long long)r->last);
            } else if (r->last == most) {
                ddl__text_add(text, "  rank %d was last %llu times, by %.1f us on average, %.1f us at most\n", i,
                              (unsigned long long)r->last, (double)r->late_ns / (double)r->last * 1e-3,
                              (double)r->late_max_ns * 1e-3);
            }
            shown += r->last == most;
        }
        below = most;
    }
}

/* Who is to blame, if anybody. */
static void ddl__stats_slow(const ddl_context *c, const ddl_stats *s, ddl__text *text) {
    if (s->slow_rank >= 0) {
        ddl__text_add(text, "  the slow rank is rank %d: this one waited %.3f ms for it\n", s->slow_rank,
                      (double)c->links[s->slow_rank].stats.late_ns * 1e-6);
    }
    if (s->slow_link >= 0) {
        ddl__text_add(text, "  the slow link is that from rank %d: %.3f MB/s, the usual one of its kind %.3f MB/s\n",
                      s->slow_link, (double)c->links[s->slow_link].stats.bytes_per_s * 1e-6,
                      (double)s->slow_link_usual_bytes_per_s * 1e-6);
    }
}

DDL_API size_t ddl_stats_text(ddl_context *context, char *out_text, size_t bytes) {
    if (ddl__enter(context) < 0) {
        return 0;
    }
    ddl_stats s;
    ddl__text text = {out_text, out_text != NULL ? bytes : 0, 0};
    ddl__stats_fill(context, &s);
    ddl__text_add(&text, "rank %d of %d: %llu operations started, %llu completed, %llu failed, %llu slow; waited "
                  "%.3f ms; memory %.3f MB, at most %.3f MB\n", context->rank, context->world_size,
                  (unsigned long long)s.ops_started, (unsigned long long)s.ops_completed,
                  (unsigned long long)s.ops_failed, (unsigned long long)s.ops_slow, (double)s.wait_ns * 1e-6,
                  (double)s.memory_bytes * 1e-6, (double)s.memory_peak_bytes * 1e-6);
    ddl__stats_transports(&s, &text);
    ddl__stats_algorithms(&s, &text);
    ddl__stats_late(context, &text);
    ddl__stats_slow(context, &s, &text);
    ddl__unlock(context);
    return text.used;
}

#endif /* DDL_COLL_STATS_H */

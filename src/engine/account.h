/* engine: what collectives cost, by algorithm and transport; who was the last to arrive; which took far too long. The
 * information is there anyway: this adds it up, in constant memory. */
#ifndef DDL_ENGINE_ACCOUNT_H
#define DDL_ENGINE_ACCOUNT_H

#include "op.h"

/* What is over sooner is never slow: alone, and where ranks wait for a core as much as for each other. */
#define DDL__SLOW_NS DDL__NS_PER_MS
#define DDL__SLOW_CROWDED_NS (100 * DDL__NS_PER_MS)
#define DDL__SLOW_WARN_NS DDL__NS_PER_S /* no scheduler takes a core away for so long */

/* The counters of an algorithm. Its name is a literal, one pointer in most builds. NULL: there are too many. */
static ddl_algorithm_stats *ddl__account_of(ddl_context *c, const char *name) {
    ddl_algorithm_stats *all = c->stats.algorithms;
    int32_t i = 0;
    while (i < DDL_STATS_ALGORITHMS && all[i].name != name && all[i].name != NULL && strcmp(all[i].name, name) != 0) {
        i++;
    }
    if (i == DDL_STATS_ALGORITHMS) {
        return NULL;
    }
    all[i].name = name;
    return &all[i];
}

/* Calls that ended well: of so many bytes and so much time all together. */
static void ddl__account_calls(const ddl_group *g, const char *algorithm, uint64_t calls, uint64_t bytes, uint64_t ns) {
    ddl_context *c = g->context;
    ddl_algorithm_stats *a = ddl__account_of(c, algorithm);
    if (a != NULL) {
        a->operations += calls;
        a->bytes += bytes;
        a->time_ns += ns;
    }
    const ddl__native *n = strncmp(algorithm, "native_device", 13) == 0 ? &g->device_native : &g->native;
    bool native = n->set != NULL && strncmp(algorithm, "native", 6) == 0;
    for (int32_t i = 0; native && i < c->endpoint_count; i++) {
        if (c->endpoints[i].self == n->self) {
            c->endpoints[i].stats.native_operations += calls;
            c->endpoints[i].stats.native_bytes += bytes;
            c->endpoints[i].stats.native_ns += ns;
        }
    }
}

/* The short way only counts its calls: whoever reads the counters, or ends what it counts, adds them up. */
static void ddl__account_pending(ddl_group *g) {
    ddl__pending *p = &g->pending;
    if (p->runs > 0) {
        ddl__account_calls(g, p->algorithm, p->runs, p->runs * p->bytes, p->ns);
    }
    p->runs = p->ns = 0;
}

/* A rank of the world was the last to arrive, so long after this one. */
static void ddl__account_last(ddl_context *c, int32_t rank, uint64_t late_ns) {
    ddl_rank_stats *s = &c->links[rank].stats;
    s->last++;
    s->late_ns += late_ns;
    s->late_max_ns = DDL__MAX(s->late_max_ns, late_ns);
    if (c->page != NULL && rank < c->world_size) { /* not those who have lost their rank to a newcomer */
        c->page->links[rank].last = s->last;
        c->page->links[rank].late_ns = s->late_ns;
    }
}

/* Each kind of operation is reported once for each power of two of bytes: a large one may be slow where small ones are
 * not. DDL_SLOW_RUNS in a row, as once another program may have had the core. A warning where somebody has asked
 * (DDL_SLOW is set) or it is certain; else the info log's, as a busy machine is no fault of the job. */
static void ddl__account_slow(ddl_context *c, const ddl__op *op, uint64_t bytes, uint64_t took_ns) {
    ddl_group *g = op->group;
    double estimate_ns = op->cached->estimate_s * 1e9;
    uint64_t size = 1ull << (bytes > 0 ? 63 - __builtin_clzll(bytes) : 0), *told = &g->slow_told[op->call.kind];
    c->stats.ops_slow++;
    if (++op->cached->slow_runs >= c->settings.slow_runs && (*told & size) == 0) {
        char line[DDL__SENTENCE_BYTES];
        ddl__text text = {line, sizeof line, 0};
        ddl__describe_call(g, &op->call, op->cached->plan.algorithm, &text);
        *told |= size;
        ddl__log(&c->base, c->settings.slow_warns || took_ns >= DDL__SLOW_WARN_NS ? DDL_LOG_WARN : DDL_LOG_INFO,
                 "%s, operation %u of group \"%s\", took %.3f ms after the last rank had arrived, %.0f times its "
                 "estimate of %.3f ms; others of this kind and size are only counted (ddl_stats, which names the slow "
                 "rank and link)",
                 line, op->sequence, g->name, (double)took_ns * 1e-6, (double)took_ns / estimate_ns,
                 estimate_ns * 1e-6);
    }
}

/* An operation ended well at `now`. */
static void ddl__account_op(ddl_context *c, const ddl__op *op, const ddl__flight *r, uint64_t now) {
    ddl_group *g = op->group;
    uint64_t start = DDL__MIN(r->start_ns, now); /* one clock is wrong by a little */
    uint64_t bytes = (uint64_t)r->count * ddl_dtype_bytes((ddl_dtype)r->dtype);
    ddl__account_calls(g, r->algorithm, 1, bytes, now - start);
    uint64_t arrived = op->late < 0 ? start : op->late_ns == 0 ? now : DDL__MIN(op->late_ns, now);
    if (op->late >= 0) {
        ddl__account_last(c, g->ranks[op->late], arrived - DDL__MIN(start, arrived));
    } else if (op->cached->recv_count > 0) {
        ddl__account_last(c, c->rank, 0);
    }
    uint64_t took = now - DDL__MAX(start, arrived);
    double estimate_ns = op->cached->estimate_s * 1e9;
    uint64_t least = c->core_ranks > c->cores ? DDL__SLOW_CROWDED_NS : DDL__SLOW_NS;
    if (c->joined && c->settings.slow > 0 && estimate_ns > 0 && took > least && /* ddl_init's make connections */
        (double)took > estimate_ns * (double)c->settings.slow) {
        ddl__account_slow(c, op, bytes, took);
    } else {
        op->cached->slow_runs = 0;
    }
}

#endif /* DDL_ENGINE_ACCOUNT_H */

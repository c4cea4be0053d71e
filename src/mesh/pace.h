/* mesh: how fast large messages come from each rank, and which link is slow, in constant memory. Timed is what a
 * transport brings in pieces, from its header to its last byte: a sender that comes late costs nothing. A link is
 * judged by the median of its last few, which neither a rank that was away from its core moves, nor a message that had
 * come already when this rank looked. Compared are links of one kind: the same transport, inside a host or between. */
#ifndef DDL_MESH_PACE_H
#define DDL_MESH_PACE_H

#include "page.h"

enum {
    DDL__PACE_LEAST = 4,  /* messages that a judgement takes */
    DDL__PACE_FACTOR = 4, /* so many times slower than the usual link of its kind is slow */
    DDL__PACE_KINDS = 2 * DDL__ENDPOINTS_MAX,
    DDL__PACE_STEPS = 128 /* of speed: half powers of two, in bytes per second */
};
#define DDL__PACE_BYTES (128u * 1024) /* of a message that is timed: the header's read brings up to half of it */

/* A message has come whole that took so long. */
static void ddl__pace_add(ddl_context *c, int32_t peer, uint64_t bytes, uint64_t ns) {
    ddl__link *l = &c->links[peer];
    ddl_rank_stats *s = &l->stats;
    float sorted[DDL__PACE_KEPT];
    l->pace[s->large_messages++ % DDL__PACE_KEPT] = (float)((double)bytes * 1e9 / (double)DDL__MAX(ns, (uint64_t)1));
    size_t count = (size_t)DDL__MIN(s->large_messages, (uint64_t)DDL__PACE_KEPT);
    for (size_t i = 0; i < count; i++) { /* by insertion */
        size_t at = i;
        for (; at > 0 && sorted[at - 1] > l->pace[i]; at--) {
            sorted[at] = sorted[at - 1];
        }
        sorted[at] = l->pace[i];
    }
    s->bytes_per_s = (uint64_t)sorted[count / 2];
    if (c->page != NULL) {
        c->page->links[peer].large_messages = s->large_messages;
        c->page->links[peer].bytes_per_s = s->bytes_per_s;
    }
}

/* >>judging */

/* The messages by which a job measures its links while it begins, all at once, say nothing of its work. */
static void ddl__pace_forget(ddl_context *c) {
    for (int32_t i = 0; i < c->world_size; i++) {
        c->links[i].stats.large_messages = c->links[i].stats.bytes_per_s = 0;
        if (c->page != NULL) {
            c->page->links[i].large_messages = c->page->links[i].bytes_per_s = 0;
        }
    }
}

/* How many links of each kind have which speed. */
typedef struct ddl__paces {
    uint32_t links[DDL__PACE_KINDS][DDL__PACE_STEPS];
} ddl__paces;

static int32_t ddl__pace_kind(int32_t transport, bool same_host) { return 2 * transport + same_host; }

static int32_t ddl__pace_step(uint64_t bytes_per_s) {
    int32_t log = bytes_per_s > 0 ? 63 - __builtin_clzll(bytes_per_s) : 0;
    return 2 * log + (log > 0 && (bytes_per_s >> (log - 1) & 1) != 0);
}

static void ddl__paces_add(ddl__paces *p, int32_t kind, uint64_t messages, uint64_t bytes_per_s) {
    if (messages >= DDL__PACE_LEAST && kind >= 0 && kind < DDL__PACE_KINDS) {
        p->links[kind][ddl__pace_step(bytes_per_s)]++;
    }
}

/* The median link of a kind, of two the faster, rounded down; 0: there are no two. */
static uint64_t ddl__paces_usual(const ddl__paces *p, int32_t kind) {
    uint32_t links = 0, below = 0;
    for (int32_t i = 0; i < DDL__PACE_STEPS; i++) {
        links += p->links[kind][i];
    }
    for (int32_t i = 0; i < DDL__PACE_STEPS && links > 1; i++) {
        below += p->links[kind][i];
        if (below > links / 2) {
            return (uint64_t)(i % 2 == 0 ? 2 : 3) << (i / 2) >> 1;
        }
    }
    return 0;
}

/* The link that stands out most, so far. */
typedef struct ddl__slow_link {
    int32_t from, to; /* of the world; -1: none stands out */
    uint64_t bytes_per_s, usual;
} ddl__slow_link;

/* usual: of links of its kind. */
static void ddl__slow_link_look(ddl__slow_link *s, int32_t from, int32_t to, uint64_t messages, uint64_t bytes_per_s,
                                uint64_t usual) {
    bool slow = messages >= DDL__PACE_LEAST && (double)bytes_per_s * DDL__PACE_FACTOR < (double)usual;
    double ratio = (double)bytes_per_s / (double)DDL__MAX(usual, (uint64_t)1);
    if (slow && (s->from < 0 || ratio < (double)s->bytes_per_s / (double)s->usual)) {
        *s = (ddl__slow_link){from, to, bytes_per_s, usual};
    }
}

#endif /* DDL_MESH_PACE_H */

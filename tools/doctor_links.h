/* ddl-info --doctor, stragglers: every two ranks exchange messages, and each rank does the same small work. Who cannot be
 * reached shows, and which link and which rank is slow. */
#ifndef DDL_TOOLS_DOCTOR_LINKS_H
#define DDL_TOOLS_DOCTOR_LINKS_H

#include "finding.h"

enum {
    PAIR_SMALL = 8192,      /* more than a frame of Ethernet: an MTU that is too large shows */
    PAIR_LARGE = 256 << 10, /* bytes; several, as the core times them: see src/mesh/pace.h */
    PAIR_LARGE_COUNT = 6,
    PAIR_PINGS = 20,
    PAIRS_RANKS = 64, /* in larger jobs each rank measures so many others; all are reached */
    WORK_ROUNDS = 20,
    SLOW_LINKS_SHOWN = 4,
    WORK_FACTOR = 2, /* a rank that takes so many times the median rank's time for the same work is slow */
    PING_FACTOR = 5
};
#define PING_SLACK_NS (2 * DDL__NS_PER_MS) /* beyond the usual one: less is the scheduler's, where ranks share cores */

/* What a rank has measured of the way from another one to it. */
typedef struct pace {
    uint64_t ping_ns, messages, bytes_per_s; /* ping: one way; 0: not measured */
} pace;

/* The time of the same arithmetic on every rank: the least of some rounds, which a neighbour on the core does not
 * change. Its result is returned, so that it is not optimised away. */
static uint32_t work(uint64_t *out_ns) {
    uint32_t x = 1;
    *out_ns = UINT64_MAX;
    for (int32_t i = 0; i < WORK_ROUNDS; i++) {
        uint64_t start = ddl__now_ns();
        for (int32_t k = 0; k < 100000; k++) {
            x = x * 1664525u + 1013904223u; /* each waits for the one before: no compiler makes less of it */
        }
        uint64_t took = ddl__now_ns() - start;
        *out_ns = took < *out_ns ? took : *out_ns;
    }
    return x;
}

/* With whom a rank meets in a round of a tournament, in which everybody meets everybody once; itself: with nobody. */
static int32_t pair_of(int32_t rank, int32_t ranks, int32_t round) {
    int32_t even = ranks + ranks % 2, last = even - 1, other;
    if (rank == last) {
        other = round * (even / 2) % last; /* 2 * other = round, modulo last */
    } else {
        other = ((round - rank) % last + last) % last;
        other = other == rank ? last : other;
    }
    return other < ranks ? other : rank;
}

/* One pair: a message each way; then, where it is measured, pings and large ones. */
static ddl_status meet(ddl_group *world, int32_t other, bool measures, pace *out) {
    static uint8_t small_out[PAIR_SMALL], small_in[PAIR_SMALL], large[PAIR_LARGE];
    bool first = ddl_rank(world) < other;
    DDL__TRY(ddl_send_recv(world, DDL_VIEW(small_out, sizeof small_out), other, 77,
                           DDL_VIEW(small_in, sizeof small_in), other, 77, NULL));
    uint64_t least = UINT64_MAX;
    for (int32_t i = 0; measures && i < PAIR_PINGS; i++) {
        uint64_t start = ddl__now_ns();
        for (int32_t turn = 0; turn < 2; turn++) {
            DDL__TRY((turn == 0) == first ? ddl_send(world, DDL_VIEW(small_out, 8), other, 77)
                                          : ddl_recv(world, DDL_VIEW(small_in, 8), other, 77, NULL));
        }
        least = DDL__MIN(least, ddl__now_ns() - start);
    }
    for (int32_t i = 0; measures && i < 2 * PAIR_LARGE_COUNT; i++) {
        DDL__TRY((i % 2 == 0) == first ? ddl_send(world, DDL_VIEW(large, sizeof large), other, 77)
                                       : ddl_recv(world, DDL_VIEW(large, sizeof large), other, 77, NULL));
    }
    out->ping_ns = measures ? DDL__MAX(least / 2, (uint64_t)1) : 0;
    return DDL_OK;
}

/* A firewall, a wrong interface, or a stopped rank shows. paces: of this rank, by the other. */
static void look_at_pairs(findings *f, ddl_context *c, pace *paces) {
    ddl_group *world = ddl_world(c);
    int32_t n = c->world_size, bad = 0;
    for (int32_t round = 0; round < n - 1 + n % 2; round++) {
        int32_t other = pair_of(c->rank, n, round);
        ddl_rank_stats came;
        if (other == c->rank) {
            continue;
        }
        if (meet(world, other, n <= PAIRS_RANKS || round < PAIRS_RANKS, &paces[other]) != DDL_OK && bad++ < 3) {
            found(f, 2, "reachability", "open all ports between the hosts (or DDL_PORT_RANGE); DDL_INTERFACE names the network; "
                  "`ip link` on both: equal MTU", "to rank %d or from rank %d: %.300s", (int)other, (int)other, ddl_error(c));
        }
        if (ddl_rank_stats_get(c, other, &came) == DDL_OK) {
            paces[other].messages = came.large_messages;
            paces[other].bytes_per_s = came.bytes_per_s;
        }
    }
    if (bad == 0) {
        found(f, 0, "reachability", "", "8 KiB to and from each of %d ranks", (int)(n - 1));
    }
}

/* >>judging, on rank 0 */

static int by_size(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Of two the smaller. Sorts. 0: there are no two. */
static uint64_t lower_median(uint64_t *values, size_t count) {
    qsort(values, count, sizeof *values, by_size);
    return count > 1 ? values[(count - 1) / 2] : 0;
}

/* The usual ping inside a host, or between hosts. room: for n * n. */
static uint64_t usual_ping(const ddl_context *c, const pace *all, bool same_host, uint64_t *room) {
    size_t n = (size_t)c->world_size, count = 0;
    for (size_t i = 0; i < n * n; i++) {
        if (all[i].ping_ns > 0 && (c->links[i / n].host == c->links[i % n].host) == same_host) {
            room[count++] = all[i].ping_ns;
        }
    }
    return lower_median(room, count);
}

static void judge_slow_links(findings *f, const ddl_context *c, const pace *all, const ddl__paces *paces,
                             const uint64_t ping_usual[2]) {
    size_t n = (size_t)c->world_size;
    int32_t slow = 0, judged = 0;
    for (size_t i = 0; i < n * n; i++) {
        int32_t to = (int32_t)(i / n), from = (int32_t)(i % n);
        bool same = c->links[to].host == c->links[from].host;
        ddl__slow_link s = {.from = -1};
        ddl__slow_link_look(&s, from, to, all[i].messages, all[i].bytes_per_s, ddl__paces_usual(paces, same));
        bool late = all[i].ping_ns > PING_FACTOR * ping_usual[same] + PING_SLACK_NS && ping_usual[same] > 0;
        judged += all[i].ping_ns > 0;
        if ((s.from >= 0 || late) && slow++ < SLOW_LINKS_SHOWN) {
            char took[80], rate[120] = "";
            snprintf(took, sizeof took, "8 bytes take %.1f us, on the usual link %.1f us", (double)all[i].ping_ns * 1e-3,
                     (double)ping_usual[same] * 1e-3);
            if (s.from >= 0) {
                snprintf(rate, sizeof rate, "%.3f MB/s, the usual link has %.3f MB/s; ", (double)s.bytes_per_s * 1e-6,
                         (double)s.usual * 1e-6);
            }
            found(f, 1, "slow link", "ethtool on both hosts (speed, duplex, errors), `tc qdisc show`, `ip -s link`; "
                  "DDL_INTERFACE=name chooses another network", "from rank %d (%s) to rank %d (%s): %s%s", (int)from,
                  c->links[from].host_name, (int)to, c->links[to].host_name, rate, took);
        }
    }
    if (slow == 0 && judged > 0) {
        found(f, 0, "slow link", "", "none stands out of %d", (int)judged);
    }
}

static void judge_slow_ranks(findings *f, const ddl_context *c, const uint64_t *work_ns, uint64_t *room) {
    size_t n = (size_t)c->world_size;
    memcpy(room, work_ns, n * sizeof *room);
    uint64_t usual = lower_median(room, n);
    int32_t slow = 0;
    for (size_t r = 0; r < n && usual > 0; r++) {
        if (work_ns[r] > WORK_FACTOR * usual && slow++ < SLOW_LINKS_SHOWN) {
            found(f, 1, "slow rank", "`top` and `lscpu` there: another program on its cores, a low clock (cpupower "
                  "frequency-info), heat; leave that host out", "rank %d (%s) takes %.1f us for what takes the median rank "
                  "%.1f us, at its best of %d times", (int)r, c->links[r].host_name, (double)work_ns[r] * 1e-3,
                  (double)usual * 1e-3, (int)WORK_ROUNDS);
        }
    }
    if (slow == 0 && n > 1) {
        found(f, 0, "slow rank", "", "none stands out: the same work takes each less than %d times %.1f us",
              (int)WORK_FACTOR, (double)usual * 1e-3);
    }
}

/* Messages between every two ranks and work on each; rank 0 judges. */
static ddl_status look_at_stragglers(findings *f, ddl_context *c) {
    size_t n = (size_t)c->world_size;
    pace *mine = calloc(n, sizeof *mine), *all = calloc(n * (c->rank == 0 ? n : 1), sizeof *all);
    uint64_t own_ns, *work_ns = calloc(n, sizeof *work_ns), *room = calloc(n * (c->rank == 0 ? n : 1), sizeof *room);
    ddl__paces *paces = calloc(1, sizeof *paces);
    ddl_status status = DDL_ERR_NOMEM;
    if (mine != NULL && all != NULL && work_ns != NULL && room != NULL && paces != NULL) {
        volatile uint32_t used = work(&own_ns);
        (void)used;
        look_at_pairs(f, c, mine);
        status = ddl_gather(ddl_world(c), DDL_VIEW((uint64_t *)(void *)mine, 3 * n),
                            DDL_VIEW((uint64_t *)(void *)all, 3 * n * n), 0);
    }
    status = status == DDL_OK ? ddl_gather(ddl_world(c), DDL_VIEW(&own_ns, 1), DDL_VIEW(work_ns, n), 0) : status;
    if (status == DDL_OK && c->rank == 0) {
        uint64_t ping_usual[2] = {usual_ping(c, all, false, room), usual_ping(c, all, true, room)};
        for (size_t i = 0; i < n * n; i++) {
            bool same = c->links[i / n].host == c->links[i % n].host;
            ddl__paces_add(paces, same, all[i].messages, all[i].bytes_per_s);
        }
        judge_slow_links(f, c, all, paces, ping_usual);
        judge_slow_ranks(f, c, work_ns, room);
    }
    free(mine);
    free(all);
    free(work_ns);
    free(room);
    free(paces);
    return status;
}

#endif /* DDL_TOOLS_DOCTOR_LINKS_H */

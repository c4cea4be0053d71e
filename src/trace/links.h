/* trace, third part: which link is slow. A transfer counts from when both sides were ready, in aligned time, until
 * it had come: what a late rank costs is not the link's. Transfers are messages of the program, and with
 * DDL_TRACE_STEPS the sends and receives of algorithms. A link is judged by its median, which a rank that the scheduler
 * takes away now and then does not move. It must not know of messages and files. */
#ifndef DDL_TRACE_LINKS_H
#define DDL_TRACE_LINKS_H

#include "ring.h"

enum {
    DDL__LINK_SIDES = 1 << 18, /* of all ranks together: 12 MiB */
    DDL__LINK_WORDS = 6,
    DDL__LINK_FACTOR = 3 /* so many times the median link stands out */
};

/* One side of a transfer; once both are joined, the transfer. */
typedef struct ddl__link_side {
    uint64_t link;   /* world rank of the sender << 32 | of the receiver */
    uint64_t group;  /* id << 32 | epoch; UINT64_MAX: a message of the program */
    uint64_t number; /* of the operation in its group, times two; plus one: the receiver's side */
    uint64_t bytes;
    int64_t start_ns; /* in rank 0's time */
    int64_t end_ns;
} ddl__link_side;

/* What the sides tell. link: that which stands out, or UINT64_MAX. */
typedef struct ddl__link_verdict {
    uint64_t links, transfers, link;
    double median_s, usual_s; /* of a transfer of that link; of as many bytes on the median link */
} ddl__link_verdict;

static int ddl__link_compare(uint64_t a, uint64_t b) { return (a > b) - (a < b); }

static int ddl__link_side_order(const void *x, const void *y) {
    const ddl__link_side *a = x, *b = y;
    int by = ddl__link_compare(a->link, b->link);
    by = by != 0 ? by : ddl__link_compare(a->group, b->group);
    by = by != 0 ? by : ddl__link_compare(a->number / 2, b->number / 2);
    by = by != 0 ? by : ddl__link_compare(a->bytes, b->bytes);
    by = by != 0 ? by : ddl__link_compare(a->number, b->number);
    return by != 0 ? by : (a->start_ns > b->start_ns) - (a->start_ns < b->start_ns);
}

/* Of joined transfers: start_ns is how long it took. */
static int ddl__link_time_order(const void *x, const void *y) {
    const ddl__link_side *a = x, *b = y;
    int by = ddl__link_compare(a->link, b->link);
    return by != 0 ? by : (a->start_ns > b->start_ns) - (a->start_ns < b->start_ns);
}

static bool ddl__link_event(const ddl__trace_event *e, bool *out_received) {
    *out_received = e->what == DDL__TRACE_RECV || (e->what == DDL__TRACE_STEP && e->kind > 1);
    return e->peer >= 0 && e->bytes > 0 && (e->what == DDL__TRACE_SEND || *out_received || e->what == DDL__TRACE_STEP);
}

/* The newest of this rank's sides, at most `most`; how many. The ring must be in the order in which it was written: who
 * was outside of ddl while a transfer ran was ready for it when it came back. */
static uint64_t ddl__link_sides(const ddl__trace *t, int32_t rank, ddl__link_side *out, uint64_t most) {
    uint64_t count = 0, kept = DDL__MIN(t->count, t->capacity);
    const ddl__trace_event *inside = NULL;
    for (uint64_t i = 1; i <= kept && count < most; i++) {
        const ddl__trace_event *e = &t->events[(t->count - i) % t->capacity];
        inside = e->what == DDL__TRACE_WAIT || (e->what == DDL__TRACE_OP && e->blocking) ? e : inside;
        bool received;
        if (!ddl__link_event(e, &received)) {
            continue;
        }
        bool ended_inside = inside != NULL && inside->start_ns <= e->end_ns && e->end_ns <= inside->end_ns;
        uint64_t ready = ended_inside ? DDL__MAX(e->start_ns, inside->start_ns) : e->start_ns;
        uint64_t from = (uint64_t)(received ? e->peer : rank), to = (uint64_t)(received ? rank : e->peer);
        bool step = e->what == DDL__TRACE_STEP;
        out[count++] =
            (ddl__link_side){from << 32 | to,
                             step ? (uint64_t)t->groups[e->group].id << 32 | t->groups[e->group].epoch : UINT64_MAX,
                             (step ? (uint64_t)e->sequence * 2 : 0) + received,
                             (uint64_t)e->bytes,
                             ddl__trace_time(t, ready),
                             ddl__trace_time(t, e->end_ns)};
    }
    return count;
}

/* Joins what belongs together, in place; start_ns becomes the duration. Where one side is lost, none is joined. */
static uint64_t ddl__link_join(ddl__link_side *s, uint64_t count) {
    uint64_t joined = 0;
    qsort(s, (size_t)count, sizeof *s, ddl__link_side_order);
    for (uint64_t first = 0, end; first < count; first = end) {
        uint64_t sent = 0;
        for (end = first; end < count && s[end].link == s[first].link && s[end].group == s[first].group &&
                          s[end].number / 2 == s[first].number / 2 && s[end].bytes == s[first].bytes;
             end++) {
            sent += s[end].number % 2 == 0;
        }
        for (uint64_t i = first; sent * 2 == end - first && i < first + sent; i++) {
            int64_t ready = DDL__MAX(s[i].start_ns, s[i + sent].start_ns);
            ddl__link_side both = s[i];
            both.start_ns = DDL__MAX(s[i + sent].end_ns - ready, 1);
            s[joined++] = both;
        }
    }
    return joined;
}

/* The median transfer of each link, in place: bytes, start_ns; number becomes how many there were. */
static uint64_t ddl__link_medians(ddl__link_side *s, uint64_t count) {
    uint64_t links = 0;
    qsort(s, (size_t)count, sizeof *s, ddl__link_time_order);
    for (uint64_t first = 0, end; first < count; first = end) {
        for (end = first; end < count && s[end].link == s[first].link; end++) {
        }
        ddl__link_side median = s[first + (end - first) / 2];
        median.number = end - first;
        s[links++] = median;
    }
    return links;
}

static double ddl__link_per_byte(const ddl__link_side *s) { return (double)s->start_ns / (double)s->bytes; }

static int ddl__link_byte_order(const void *x, const void *y) {
    double a = ddl__link_per_byte(x), b = ddl__link_per_byte(y);
    return (a > b) - (a < b);
}

static int ddl__link_duration_order(const void *x, const void *y) {
    const ddl__link_side *a = x, *b = y;
    return (a->start_ns > b->start_ns) - (a->start_ns < b->start_ns);
}

/* A link stands out when its median transfer takes DDL__LINK_FACTOR times that of the median link, by the transfer and
 * by the byte, for links carry messages of different sizes; and when all its transfers are a hundredth of the job. The
 * sides are sorted and overwritten. */
static ddl__link_verdict ddl__link_judge(ddl__link_side *s, uint64_t count, uint64_t job_ns) {
    ddl__link_verdict v = {.link = UINT64_MAX, .transfers = ddl__link_join(s, count)};
    v.links = ddl__link_medians(s, v.transfers);
    if (v.links < 2) {
        return v;
    }
    uint64_t middle = (v.links - 1) / 2; /* of two the faster */
    qsort(s, (size_t)v.links, sizeof *s, ddl__link_duration_order);
    double usual_ns = (double)s[middle].start_ns;
    qsort(s, (size_t)v.links, sizeof *s, ddl__link_byte_order);
    double per_byte = ddl__link_per_byte(&s[middle]);
    for (uint64_t i = v.links; i-- > 0 && v.link == UINT64_MAX;) {
        double ns = (double)s[i].start_ns;
        if (ns > DDL__LINK_FACTOR * usual_ns && ddl__link_per_byte(&s[i]) > DDL__LINK_FACTOR * per_byte &&
            ns * (double)s[i].number * 100 > (double)job_ns) {
            v.link = s[i].link;
            v.median_s = ns * 1e-9;
            v.usual_s = per_byte * (double)s[i].bytes * 1e-9;
        }
    }
    return v;
}

#endif /* DDL_TRACE_LINKS_H */

/* train, first part: which gradients travel together, and in which order. Pure functions of sizes and times: ranks that
 * agree on these have the same plan. They know nothing of trainers, groups or memory. */
#ifndef DDL_TRAIN_PLAN_H
#define DDL_TRAIN_PLAN_H

#include "../base.h"

/* The link: an operation of m bytes takes latency_s + m * seconds_per_byte, one after the other. Where there is
 * more than one way to go there is an array of such lines. */
typedef struct ddl__line {
    double latency_s, seconds_per_byte;
} ddl__line;

static double ddl__line_time(const ddl__line *line, int64_t bytes) {
    return line->latency_s + line->seconds_per_byte * (double)bytes;
}

/* What operations took in all: those that are under way together share the link and end in any order, so that single
 * times say little. */
typedef struct ddl__fit {
    double operations, bytes, seconds;
    double most; /* bytes of the largest */
} ddl__fit;

/* Operations that are all smaller say nothing about the time of a byte. */
#define DDL__FIT_LEAST (128 << 10)

/* seconds: from the end of the operation before, or its own start if that was later. */
static void ddl__fit_add(ddl__fit *f, int64_t bytes, double seconds) {
    f->operations++;
    f->bytes += (double)bytes;
    f->seconds += seconds;
    f->most = DDL__MAX(f->most, (double)bytes);
}

/* The time of a byte, when the latency is known. */
static void ddl__fit_line(const ddl__fit *f, ddl__line *line) {
    double moving_s = f->seconds - f->operations * line->latency_s;
    if (f->most >= DDL__FIT_LEAST && moving_s > 0) {
        line->seconds_per_byte = moving_s / f->bytes;
    }
}

/* A gradient in the order in which backward makes them. */
typedef struct ddl__layer {
    int64_t bytes;
    double ready_s;        /* not before the one before it */
    double needed_s;       /* forward of the next step uses its parameter so long after the first parameter */
    bool apart;            /* lies in other memory than the one before it: they cannot travel together */
    int32_t way;           /* which line it goes by; all that travel together go by one */
    const int64_t *grains; /* bytes of what cannot be cut, such as lies on servers; NULL: any cut will do */
} ddl__layer;

/* Merges neighbours so that the last operation ends as early as it can, with as few operations as that allows:
 * out_first[i] says that an operation begins with layer i. This is the objective of MG-WFBP (Shi, Chu, Li, INFOCOM
 * 2019). Its greedy rule knows nothing of layers that are apart; dynamic programming does, and is as exact:
 *     end[j] = min over i of max(end[i], ready[j - 1]) + time(bytes of layers i ... j - 1)
 * is right because an operation that ends earlier never makes a later one end later. end and from have count + 1
 * entries. */
static double ddl__plan_merge(const ddl__layer *layers, int32_t count, const ddl__line *line, double *end,
                              int32_t *from, bool *out_first) {
    end[0] = 0;
    for (int32_t j = 1; j <= count; j++) {
        int64_t bytes = 0;
        end[j] = -1;
        for (int32_t i = j - 1; i >= 0; i--) {
            bytes += layers[i].bytes;
            double last = DDL__MAX(end[i], layers[j - 1].ready_s) + ddl__line_time(&line[layers[i].way], bytes);
            if (end[j] < 0 || last <= end[j]) {
                end[j] = last;
                from[j] = i;
            }
            if (layers[i].apart) {
                break;
            }
        }
    }
    for (int32_t i = 0; i < count; i++) {
        out_first[i] = false;
    }
    for (int32_t j = count; j > 0; j = from[j]) {
        out_first[from[j]] = true;
    }
    return end[count];
}

/* ---- adaptive compression: one of several codes for each tensor ---- */

typedef struct ddl__bid {
    double time_s, error; /* of a tensor in one code: on the link, and how much its gradient loses */
} ddl__bid;

/* Codes of the first tensors that no others beat in both: when the last one of them ends, and what all lose. */
typedef struct ddl__front {
    double end_s, error;
    int32_t from, offer; /* the front before it, and the code of the last tensor */
} ddl__front;
enum { DDL__FRONT = 256 };

/* The next front: all of `before`, each with all offers, in ascending order of their ends; what is no better than
 * one that ends before it is left out. out has room for DDL__FRONT * offers entries, and keeps at most DDL__FRONT: the
 * first, the last, and some between. */
static int32_t ddl__plan_front(const ddl__front *before, int32_t before_count, double ready_s, const ddl__bid *offers,
                               int32_t offer_count, ddl__front *out) {
    int32_t at[16] = {0}, made = 0; /* at: by offer, in `before`, which ascends, and with it the ends */
    for (int32_t step = 0; step < before_count * offer_count; step++) {
        int32_t best = -1;
        ddl__front next = {0};
        for (int32_t o = 0; o < offer_count; o++) {
            if (at[o] < before_count) {
                const ddl__front *b = &before[at[o]];
                ddl__front one = {DDL__MAX(b->end_s, ready_s) + offers[o].time_s, b->error + offers[o].error, at[o], o};
                bool first = best < 0 || one.end_s < next.end_s || (one.end_s == next.end_s && one.error < next.error);
                best = first ? o : best;
                next = first ? one : next;
            }
        }
        at[best]++;
        if (made == 0 || next.error < out[made - 1].error) {
            made -= made > 0 && out[made - 1].end_s == next.end_s;
            out[made++] = next;
        }
    }
    for (int32_t i = 0; made > DDL__FRONT && i < DDL__FRONT; i++) {
        out[i] = out[(int64_t)i * (made - 1) / (DDL__FRONT - 1)];
    }
    return DDL__MIN(made, DDL__FRONT);
}

/* Chooses a code for each of count tensors, which become ready in this order and travel one after the other, so that
 * the sum of errors is least among all choices whose last tensor ends by limit_s; where none does, among those that end
 * first. Exact as long as no front has more than DDL__FRONT entries. offers: offer_count (at most 16) for each tensor;
 * fronts: room for (count + offer_count) * DDL__FRONT entries, made: for count + 1. Returns the sum of errors. */
static double ddl__plan_offers(const double *ready_s, const ddl__bid *offers, int32_t count, int32_t offer_count,
                               double limit_s, ddl__front *fronts, int32_t *made, int32_t *out_offer) {
    fronts[0] = (ddl__front){0, 0, 0, 0};
    made[0] = 1;
    for (int32_t i = 0; i < count; i++) {
        made[i + 1] = ddl__plan_front(fronts + (int64_t)i * DDL__FRONT, made[i], ready_s[i], offers + i * offer_count,
                                      offer_count, fronts + (int64_t)(i + 1) * DDL__FRONT);
    }
    const ddl__front *last = fronts + (int64_t)count * DDL__FRONT;
    int32_t at = 0; /* errors fall as ends rise */
    while (at + 1 < made[count] && last[at + 1].end_s <= limit_s) {
        at++;
    }
    double error = last[at].error;
    for (int32_t i = count; i > 0; i--) {
        const ddl__front *f = &fronts[(int64_t)i * DDL__FRONT + at];
        out_offer[i - 1] = f->offer;
        at = f->from;
    }
    return error;
}

/* Buckets of at least `bytes` each, but for the last: a bucket that has them is closed. */
static void ddl__plan_fuse(const ddl__layer *layers, int32_t count, int64_t bytes, bool *out_first) {
    int64_t filled = 0;
    for (int32_t i = 0; i < count; i++) {
        out_first[i] = i == 0 || layers[i].apart || filled >= bytes;
        filled = out_first[i] ? layers[i].bytes : filled + layers[i].bytes;
    }
}

/* What is started at once: a part of a range of layers. */
typedef struct ddl__piece {
    int32_t first, last;        /* layers; of a part of one layer both are that layer */
    int64_t begin_bytes, bytes; /* from the begin of layer `first` */
    int64_t grain, grains;      /* where there are such: its first one in layer `first`, and how many it has */
} ddl__piece;

/* Cuts layers i ... j - 1, which lie one after the other, into pieces of piece_bytes. Returns how many. */
static int32_t ddl__plan_cut_range(const ddl__layer *layers, int32_t i, int32_t j, int64_t piece_bytes,
                                   ddl__piece *out) {
    int32_t made = 0, layer = i;
    int64_t bytes = 0, at = 0, passed = 0; /* passed: bytes of the layers before `layer` */
    for (int32_t k = i; k < j; k++) {
        bytes += layers[k].bytes;
    }
    do {
        ddl__piece p = {
            .first = layer, .last = layer, .begin_bytes = at - passed, .bytes = DDL__MIN(piece_bytes, bytes - at)};
        at += p.bytes;
        while (p.last + 1 < j && (passed + layers[p.last].bytes < at || at == bytes)) {
            passed += layers[p.last++].bytes; /* the last piece takes empty layers at the end with it */
        }
        bool whole = passed + layers[p.last].bytes == at;
        passed += whole ? layers[p.last].bytes : 0;
        layer = p.last + whole;
        out[made++] = p;
    } while (at < bytes);
    return made;
}

/* The same, but cuts only between grains, which are put together as long as they are at most piece_bytes. */
static int32_t ddl__plan_cut_grains(const ddl__layer *layers, int32_t i, int32_t j, int64_t piece_bytes,
                                    ddl__piece *out) {
    int32_t made = 0, layer = i;
    int64_t at = 0, grain = 0; /* of `layer`: bytes and grains before the next */
    do {
        ddl__piece p = {.first = layer, .last = layer, .begin_bytes = at, .grain = grain};
        while (layer < j) {
            int64_t bytes = layers[layer].bytes == 0 ? 0 : layers[layer].grains[grain];
            if (p.bytes > 0 && bytes > piece_bytes - p.bytes) {
                break;
            }
            p.bytes += bytes;
            p.grains += bytes > 0;
            p.last = layer;
            at += bytes;
            grain++;
            if (at == layers[layer].bytes) {
                layer++;
                at = grain = 0;
            }
        }
        out[made++] = p;
    } while (layer < j);
    return made;
}

/* Cuts ranges into pieces, in backward's order. A piece covers all layers that it touches. */
static int32_t ddl__plan_cut(const ddl__layer *layers, int32_t count, const bool *first, int64_t piece_bytes,
                             ddl__piece *out) {
    int32_t made = 0;
    for (int32_t i = 0, j; i < count; i = j) {
        for (j = i + 1; j < count && !first[j]; j++) {
        }
        made += layers[i].grains != NULL ? ddl__plan_cut_grains(layers, i, j, piece_bytes, &out[made])
                                         : ddl__plan_cut_range(layers, i, j, piece_bytes, &out[made]);
    }
    return made;
}

/* The order of ByteScheduler (Peng et al., SOSP 2019): whenever less than credit bytes are under way, the ready piece
 * that the next forward needs first is started; one piece may overdraw the credit. Here the order is computed
 * beforehand from agreed times, because collectives need the same order on all ranks. pieces: in backward's order,
 * which is the reverse of the order in which forward needs them. out_order[k] is the k-th piece that is started,
 * started_s and ended_s (by piece) are when. Returns when the last one ends. */
static double ddl__plan_priority(const ddl__layer *layers, const ddl__piece *pieces, int32_t count,
                                 const ddl__line *line, int64_t credit_bytes, int32_t *out_order, double *started_s,
                                 double *ended_s) {
    int32_t made = 0, known = 0, oldest = 0; /* known: pieces before it are ready; oldest: in out_order, under way */
    double now = 0, free_s = 0;
    int64_t out_bytes = 0;
    for (int32_t i = 0; i < count; i++) {
        ended_s[i] = -1;
    }
    while (made < count) {
        while (known < count && layers[pieces[known].last].ready_s <= now) {
            known++;
        }
        while (oldest < made && ended_s[out_order[oldest]] <= now) {
            out_bytes -= pieces[out_order[oldest++]].bytes;
        }
        int32_t best = -1;
        for (int32_t i = known - 1; i >= 0 && best < 0; i--) { /* of one range the first piece first */
            if (ended_s[i] < 0) {
                best = i;
            }
        }
        while (best > 0 && pieces[best - 1].last == pieces[best].last && ended_s[best - 1] < 0) {
            best--;
        }
        if (best >= 0 && (out_bytes < credit_bytes || oldest == made)) {
            started_s[best] = now;
            free_s = DDL__MAX(free_s, now) + ddl__line_time(&line[layers[pieces[best].first].way], pieces[best].bytes);
            ended_s[best] = free_s;
            out_bytes += pieces[best].bytes;
            out_order[made++] = best;
            continue;
        }
        double next = known < count ? layers[pieces[known].last].ready_s : -1;
        double ends = best >= 0 ? ended_s[out_order[oldest]] : -1; /* without one that is ready no end matters */
        now = next < 0 ? ends : ends < 0 ? next : DDL__MIN(next, ends);
    }
    return free_s;
}

/* When pieces end that are started in this order, each when it is ready and the one before it has been started. */
static double ddl__plan_run(const ddl__layer *layers, const ddl__piece *pieces, const int32_t *order, int32_t count,
                            const ddl__line *line, double *ended_s) {
    double end = 0;
    for (int32_t k = 0; k < count; k++) {
        const ddl__piece *p = &pieces[order[k]];
        end = DDL__MAX(end, layers[p->last].ready_s) + ddl__line_time(&line[layers[p->first].way], p->bytes);
        ended_s[order[k]] = end;
    }
    return end;
}

/* How long forward of the next step waits in all, when it may begin at begin_s (the end of backward): each layer's
 * parameter is there when its last piece has ended. */
static double ddl__plan_stall(const ddl__layer *layers, int32_t layer_count, const ddl__piece *pieces, int32_t count,
                              const double *ended_s, double begin_s) {
    double late = 0;
    for (int32_t p = 0; p < count; p++) {
        for (int32_t l = pieces[p].first; l <= pieces[p].last && l < layer_count; l++) {
            late = DDL__MAX(late, ended_s[p] - begin_s - layers[l].needed_s);
        }
    }
    return late;
}

#endif /* DDL_TRAIN_PLAN_H */

/* train, fifth part: what all ranks must agree on. That they have registered the same, the figures that plans are made
 * from, and the plan. Plans depend on sizes and agreed figures only, never on addresses. */
#ifndef DDL_TRAIN_AGREE_H
#define DDL_TRAIN_AGREE_H

#include "compression.h"

enum { DDL__WARM_STEPS = 3 }; /* steps whose times are thrown away: caches are cold, memory is touched first */

/* >>same everywhere */

static uint64_t ddl__mix_double(uint64_t hash, double x) { return ddl__mix_bytes(hash, &x, sizeof x); }

static uint64_t ddl__code_hash(uint64_t hash, const ddl_compression *c) {
    hash = ddl__mix(ddl__mix(ddl__mix(hash, (uint64_t)c->kind), (uint64_t)c->k), (uint64_t)c->rank);
    hash = ddl__mix(ddl__mix(ddl__mix(hash, (uint64_t)c->levels), (uint64_t)c->error_feedback), c->seed);
    return ddl__mix_double(hash, c->ratio);
}

static uint64_t ddl__config_hash(const ddl_trainer_config *o) {
    const ddl_optimizer *m = &o->optimizer;
    const int64_t whole[] = {o->sync,         o->schedule,     m->kind,         m->state_slots,  o->step != NULL,
                             o->accumulate,   o->unchecked,    o->shard,        o->uneven,       o->overlap_forward,
                             o->bucket_bytes, o->piece_bytes,  o->credit_bytes, o->replan_steps, o->local_steps,
                             o->local_after,  o->architecture, o->servers,      o->dedicated,    o->staleness,
                             o->staleness_max};
    const double real[] = {m->learning_rate, m->momentum,       m->beta1,     m->beta2,     m->epsilon,
                           m->weight_decay,  m->trust,          o->clip_norm, o->latency_s, o->seconds_per_byte,
                           o->outer_rate,    o->outer_momentum, o->exposed_s};
    uint64_t hash = 0;
    for (size_t i = 0; i < DDL__COUNT_OF(whole); i++) {
        hash = ddl__mix(hash, (uint64_t)whole[i]);
    }
    for (size_t i = 0; i < DDL__COUNT_OF(real); i++) {
        hash = ddl__mix_double(hash, real[i]);
    }
    return ddl__code_hash(hash, &o->compression);
}

static uint64_t ddl__weight_hash(const ddl__weight *w) {
    uint64_t hash = ddl__mix_bytes((uint64_t)w->param.dtype << 8 | (uint64_t)w->grad.dtype, w->name, strlen(w->name));
    for (int32_t d = 0; d < w->param.ndim; d++) {
        hash = ddl__mix(hash, (uint64_t)w->param.shape[d]);
    }
    hash = ddl__code_hash(hash, &w->options.compression);
    return ddl__mix(ddl__mix_double(hash, w->options.rate_factor), (uint64_t)(w->options.no_decay != 0));
}

/* "w2" (f32[3,4]). */
static void ddl__weight_tell(const ddl__weight *w, ddl__text *text) {
    ddl__text_add(text, "\"%s\" (%s[", w->name, ddl_dtype_name(w->param.dtype));
    for (int32_t d = 0; d < w->param.ndim; d++) {
        ddl__text_add(text, "%s%lld", d > 0 ? "," : "", (long long)w->param.shape[d]);
    }
    ddl__text_add(text, "], gradient %s)", ddl_dtype_name(w->grad.dtype));
}

/* An error sentence, of a caller that does not hold the lock. */
static ddl_status ddl__trainer_say(ddl_trainer *t, ddl_status status, const char *text) {
    DDL__TRY(ddl__enter(t->context));
    ddl__error(t->context, status, "%s", text);
    ddl__unlock(t->context);
    return status;
}

static ddl_status ddl__trainer_lacks(ddl_trainer *t, const char *what) {
    DDL__TRY(ddl__enter(t->context));
    ddl_status status = ddl__error(t->context, DDL_ERR_NOMEM, "%s: no memory to compare ranks", what);
    ddl__trainer_tell(t, status);
    ddl__unlock(t->context);
    return status;
}

/* Says which ranks have another hash than rank 0. values: of a tensor's values. Every rank calls. */
static ddl_status ddl__trainer_differs(ddl_trainer *t, const char *what, int32_t index, uint64_t hash, bool values) {
    uint64_t *all = calloc((size_t)t->size, sizeof *all);
    if (all == NULL) {
        return ddl__trainer_lacks(t, what);
    }
    ddl_status status =
        ddl_all_gather(t->group, ddl_tensor_1d(&hash, DDL_U64, 1), ddl_tensor_1d(all, DDL_U64, t->size));
    char line[DDL__SENTENCE_BYTES];
    ddl__text text = {line, sizeof line, 0};
    ddl__text_add(&text, "%s: ranks differ in ", what);
    if (index < 0) {
        ddl__text_add(&text, "the config of the trainer");
    } else {
        ddl__text_add(&text, "%stensor %d, here on rank %d ", values ? "the values of " : "", index, t->rank);
        ddl__weight_tell(&t->weights[index], &text);
    }
    ddl__text_add(&text, "%s", values ? ", when rank 0's were sent to all" : "");
    const char *before = values ? ": not as on rank 0 are they on rank " : ": not as on rank 0 is it on rank ";
    for (int32_t r = 1; r < t->size; r++) {
        if (all[r] != all[0]) {
            ddl__text_add(&text, "%s%d", before, r);
            before = ", ";
        }
    }
    ddl__text_add(&text, "; %s",
                  values      ? "look whether another tensor or thread of that rank uses the same memory"
                  : index < 0 ? "give all ranks the same config"
                              : "give all ranks the same tensors, in the same order");
    free(all);
    return status < 0 ? status : ddl__trainer_say(t, DDL_ERR_MISMATCH, line);
}

/* A checksum of a parameter's values. The lock is not held. */
static ddl_status ddl__weight_sum(ddl_trainer *t, const ddl__weight *w, uint64_t *out) {
    const char *data = w->param.data;
    size_t bytes = (size_t)w->count * ddl_dtype_bytes(w->param.dtype);
    uint32_t crc = 0;
    if (ddl__lane_is_host(&t->lane)) {
        crc = bytes > 0 ? ddl__crc32c(0, data, bytes) : 0;
    } else {
        char block[65536];
        for (size_t at = 0, some; at < bytes; at += some) {
            some = DDL__MIN(bytes - at, sizeof block);
            ddl__lane_copy(&t->lane, block, data + at, some);
            DDL__TRY(ddl__lane_wait(&t->lane, "ddl_trainer_start"));
            crc = ddl__crc32c(crc, block, some);
        }
    }
    *out = crc;
    return DDL_OK;
}

/* Another rank could not read its values. worst: 1 + the rank << 32 | -status. */
static ddl_status ddl__trainer_unread(ddl_trainer *t, const char *what, uint64_t worst) {
    char line[DDL__SENTENCE_BYTES];
    ddl_status status = (ddl_status)-(int32_t)(worst & UINT32_MAX);
    snprintf(line, sizeof line, "%s: rank %d cannot read its parameters, to compare them with the other ranks': %s; it "
             "says why", what, (int)(worst >> 32) - 1, ddl_status_text(status));
    return ddl__trainer_say(t, status, line);
}

/* Compares n hashes, by tensor after the first: of the config, or for values nothing. status: a rank that has failed
 * comes too, or the others would wait for it. hashes: 3 * n, the last third is given. */
static ddl_status ddl__hashes_compare(ddl_trainer *t, const char *what, uint64_t *hashes, size_t n, bool values,
                                      ddl_status status) {
    const uint64_t *own = hashes + 2 * n;
    for (size_t i = 0; i < n; i++) {
        hashes[i] = own[i];
        hashes[n + i] = ~own[i];
    }
    if (values) {
        hashes[0] = status < 0 ? (uint64_t)(t->rank + 1) << 32 | (uint64_t) - (int64_t)status : 0;
        hashes[n] = ~hashes[0];
    }
    ddl_tensor both = ddl_tensor_1d(hashes, DDL_U64, (int64_t)(2 * n));
    ddl_status met = ddl_all_reduce(t->group, both, both, DDL_MIN);
    DDL__TRY(status < 0 ? status : met);
    if (values && ~hashes[n] != 0) {
        return ddl__trainer_unread(t, what, ~hashes[n]);
    }
    for (size_t i = 0; i < n && status == DDL_OK; i++) {
        if (hashes[i] != ~hashes[n + i]) {
            status = ddl__trainer_differs(t, what, (int32_t)i - 1, own[i], values);
        }
    }
    return status;
}

/* Compares the configs and all tensors; config NULL: the values of all parameters. */
static ddl_status ddl__trainer_compare(ddl_trainer *t, const char *what, const ddl_trainer_config *config) {
    size_t n = (size_t)t->count + 1; /* the config, then the tensors; least values, then those of the complements */
    uint64_t *hashes = calloc(3 * n, sizeof *hashes);
    if (hashes == NULL) {
        return ddl__trainer_lacks(t, what);
    }
    ddl_status status = DDL_OK;
    for (size_t i = 0; i < n && status == DDL_OK; i++) {
        uint64_t *hash = &hashes[2 * n + i];
        if (config != NULL) {
            *hash = i == 0 ? ddl__config_hash(config) : ddl__weight_hash(&t->weights[i - 1]);
        } else if (i > 0) {
            status = ddl__weight_sum(t, &t->weights[i - 1], hash);
        }
    }
    status = ddl__hashes_compare(t, what, hashes, n, config == NULL, status);
    free(hashes);
    return status;
}

/* Compares the numbers of tensors, the configs and all tensors. Every rank gets the same answer. */
static ddl_status ddl__trainer_match(ddl_trainer *t, const char *what, const ddl_trainer_config *config) {
    int64_t count[2] = {t->count, -t->count};
    DDL__TRY(ddl_all_reduce(t->group, DDL_ARRAY(count), DDL_ARRAY(count), DDL_MIN));
    if (count[0] != -count[1]) {
        char line[DDL__SENTENCE_BYTES];
        snprintf(line, sizeof line,
                 "%s: ranks have registered between %lld and %lld tensors, rank %d has %d; "
                 "register the same tensors in the same order on all ranks",
                 what, (long long)count[0], (long long)-count[1], t->rank, t->count);
        return ddl__trainer_say(t, DDL_ERR_MISMATCH, line);
    }
    return ddl__trainer_compare(t, what, config);
}

/* >>figures */

static bool ddl__trainer_plans(const ddl_trainer *t) {
    ddl_schedule s = t->config.schedule;
    return !t->config.shard && (t->size > 1 || t->served.ps != NULL) &&
           (t->config.architecture == DDL_ARCHITECTURE_AUTO || s == DDL_SCHEDULE_AUTO || s == DDL_SCHEDULE_MERGED ||
            s == DDL_SCHEDULE_PRIORITY);
}

/* The least time of a few all-reduces of some bytes, on the slowest rank. */
static ddl_status ddl__line_probe(ddl_trainer *t, void *data, int64_t bytes, int32_t times, double *out_s) {
    ddl_tensor view = ddl__lane_tensor(&t->lane, data, DDL_F32, bytes / 4);
    *out_s = 1e9;
    for (int32_t i = 0; i < times; i++) {
        uint64_t start = ddl__now_ns();
        DDL__TRY(ddl_all_reduce(t->group, view, view, DDL_MAX));
        *out_s = DDL__MIN(*out_s, (double)(ddl__now_ns() - start) / 1e9);
    }
    return ddl_all_reduce_scalar(t->group, out_s, DDL_MAX);
}

/* The least time in which pieces of the servers are pulled, on the slowest worker. */
static ddl_status ddl__line_probe_servers(ddl_trainer *t, int64_t first, int64_t end, int32_t times, double *out_s) {
    *out_s = 1e9;
    for (int32_t i = 0; i < times; i++) {
        uint64_t start = ddl__now_ns();
        DDL__TRY(ddl__served_pull(t, "ddl_trainer_start", first, end));
        *out_s = DDL__MIN(*out_s, (double)(ddl__now_ns() - start) / 1e9);
    }
    return ddl_all_reduce_scalar(t->group, out_s, DDL_MAX);
}

static void ddl__line_fit(ddl__line *line, double brief_s, double lengthy_s, int64_t brief_bytes,
                          int64_t lengthy_bytes) {
    double per_byte = DDL__MAX(lengthy_s - brief_s, 1e-9) / (double)DDL__MAX(lengthy_bytes - brief_bytes, 1);
    line->seconds_per_byte = line->seconds_per_byte > 0 ? line->seconds_per_byte : per_byte;
    line->latency_s =
        line->latency_s > 0 ? line->latency_s : DDL__MAX(brief_s - per_byte * (double)brief_bytes, brief_s / 2);
}

/* A pull of the first piece, and of many: pushes go the other way at the same time. */
static ddl_status ddl__line_measure_servers(ddl_trainer *t, ddl__line *line) {
    enum { LONG_BYTES = 1 << 20 };
    const ddl_ps *ps = t->served.ps;
    double brief, lengthy;
    int64_t end = 0, bytes = 0;
    while (end < ps->piece_count && bytes < LONG_BYTES) {
        bytes += (int64_t)ddl__ps_piece_bytes(&ps->pieces[end++]);
    }
    if (end == 0) {
        return DDL_OK;
    }
    DDL__TRY(ddl__line_probe_servers(t, 0, 1, 8, &brief));
    DDL__TRY(ddl__line_probe_servers(t, 0, end, 4, &lengthy));
    ddl__line_fit(line, brief, lengthy, ps->pieces[0].count * (int64_t)sizeof(float), bytes);
    return DDL_OK;
}

/* Measures the line where the config does not give it: a short and a long all-reduce. */
static ddl_status ddl__line_measure_reduce(ddl_trainer *t) {
    enum { SHORT_BYTES = 1024, LONG_BYTES = 1 << 20 };
    int32_t fresh = LONG_BYTES;
    ddl_tensor data;
    double brief, lengthy;
    DDL__TRY(ddl__lane_is_host(&t->lane)
                 ? ddl_tensor_alloc(t->context, DDL_U8, 1, &(int64_t){fresh}, &data)
                 : ddl_tensor_alloc_on(t->context, t->lane.device->number, DDL_U8, 1, &(int64_t){fresh}, &data));
    ddl__lane_zero(&t->lane, data.data, LONG_BYTES);
    ddl_status status = ddl__lane_wait(&t->lane, "ddl_trainer_start");
    status = status < 0 ? status : ddl__line_probe(t, data.data, SHORT_BYTES, 8, &brief);
    status = status < 0 ? status : ddl__line_probe(t, data.data, LONG_BYTES, 4, &lengthy);
    ddl_tensor_free(t->context, &data);
    DDL__TRY(status);
    ddl__line_fit(&t->lines[0], brief, lengthy, SHORT_BYTES, LONG_BYTES);
    return DDL_OK;
}

/* Measures all lines that plans are made from, as far as the config does not give them. */
static ddl_status ddl__line_measure(ddl_trainer *t) {
    bool known = t->config.latency_s > 0 && t->config.seconds_per_byte > 0;
    t->lines[0] = (ddl__line){t->config.latency_s, t->config.seconds_per_byte};
    t->lines[1] = (ddl__line){0, 0};
    if ((ddl__trainer_plans(t) || t->adaptive > 0) && !known) {
        DDL__TRY(t->config.architecture == DDL_ARCHITECTURE_PS ? ddl__line_measure_servers(t, &t->lines[0])
                                                               : ddl__line_measure_reduce(t));
    }
    if (t->config.architecture == DDL_ARCHITECTURE_AUTO) {
        DDL__TRY(ddl__line_measure_servers(t, &t->lines[1]));
    }
    memcpy(t->served.measured, t->lines, sizeof t->lines);
    return DDL_OK;
}

/* Combines figures of all ranks, where these are at one step; else each rank plans for itself. */
static ddl_status ddl__figures_share(ddl_trainer *t, ddl_tensor figures, ddl_op op) {
    return t->served.alone ? DDL_OK : ddl_all_reduce(t->group, figures, figures, op);
}

/* Architecture auto, with new figures: when the way that is used has become another, the one that is not may have, too,
 * and both are measured. The lock is not held. */
static ddl_status ddl__served_look_again(ddl_trainer *t, const bool used[2]) {
    enum { BYTES = 256 << 10 };
    bool again = false;
    for (int32_t k = 0; k < 2; k++) {
        double before = ddl__line_time(&t->served.measured[k], BYTES), now = ddl__line_time(&t->lines[k], BYTES);
        again = again || (used[k] && !used[1 - k] && (now > 1.5 * before || before > 1.5 * now));
    }
    if (again && t->config.architecture == DDL_ARCHITECTURE_AUTO) {
        DDL__TRY(ddl__line_measure(t));
    }
    ddl__served_choose(t);
    return DDL_OK;
}

/* Agrees on the ready times of all ranks, and fits the line to what operations have taken on all of them since
 * the last plan; what the config gives stays. */
static ddl_status ddl__figures_agree(ddl_trainer *t) {
    enum { SUMS = 2 * sizeof(ddl__fit) / sizeof(double) };
    size_t n = (size_t)t->count;
    bool used[2] = {false, false};
    double *figures = malloc((n + SUMS) * sizeof *figures);
    if (figures == NULL) {
        return ddl__trainer_say(t, DDL_ERR_NOMEM, "ddl_step: no memory to plan anew");
    }
    for (size_t i = 0; i < n; i++) {
        figures[i] = t->weights[i].ready_s;
    }
    memcpy(figures + n, &t->fits[0], sizeof t->fits);
    ddl_tensor all = ddl_tensor_1d(figures, DDL_F64, (int64_t)n + SUMS);
    ddl_status status = ddl__figures_share(t, all, DDL_AVG);
    for (size_t i = 0; i < n && status == DDL_OK; i++) {
        t->weights[i].agreed_s = figures[i];
    }
    if (status == DDL_OK) {
        ddl__fit fits[2];
        ddl__line line = t->lines[0];
        memcpy(fits, figures + n, sizeof fits);
        used[0] = fits[0].operations > 0;
        used[1] = fits[1].operations > 0;
        ddl__fit_line(&fits[0], &line);
        ddl__fit_line(&fits[1], &t->lines[1]);
        t->lines[0].seconds_per_byte =
            t->config.seconds_per_byte > 0 ? t->lines[0].seconds_per_byte : line.seconds_per_byte;
    }
    memset(t->fits, 0, sizeof t->fits);
    free(figures);
    return status < 0 ? status : ddl__served_look_again(t, used);
}

/* >>plans */

/* A plan that is being made. Arrays of one allocation. */
typedef struct ddl__draft {
    ddl__layer *layers;
    double *end, *started_s, *ended_s;
    ddl__piece *pieces;
    int32_t *from, *order;
    bool *first;
    int32_t count; /* pieces */
    int64_t credit_bytes;
    double late_s; /* exposed, as far as the model sees it */
    const char *name;
} ddl__draft;

/* Room for count layers and so many pieces; NULL: no memory. Free with free(). */
static void *ddl__draft_make(ddl__draft *d, int32_t layers, int32_t pieces) {
    size_t n = (size_t)layers + 1, p = (size_t)pieces + 1;
    char *memory = malloc(n * (sizeof *d->layers + sizeof *d->end + sizeof *d->from + sizeof *d->first) +
                          p * (sizeof *d->pieces + 2 * sizeof *d->started_s + sizeof *d->order));
    if (memory == NULL) {
        return NULL;
    }
    char *at = memory; /* the widest types first */
    d->layers = (ddl__layer *)(void *)at;
    d->pieces = (ddl__piece *)(void *)(at += n * sizeof *d->layers);
    d->end = (double *)(void *)(at += p * sizeof *d->pieces);
    d->started_s = (double *)(void *)(at += n * sizeof *d->end);
    d->ended_s = (double *)(void *)(at += p * sizeof *d->started_s);
    d->from = (int32_t *)(void *)(at += p * sizeof *d->ended_s);
    d->order = (int32_t *)(void *)(at += n * sizeof *d->from);
    d->first = (bool *)(void *)(at + p * sizeof *d->order);
    return memory;
}

/* Sizes and times in backward's order. forward is taken to run twice as fast as backward. */
static void ddl__draft_layers(const ddl_trainer *t, ddl__layer *layers) {
    double ready = 0;
    for (int32_t p = 0; p < t->count; p++) {
        const ddl__weight *w = &t->weights[t->count - 1 - p];
        ready = DDL__MAX(ready, w->agreed_s);
        int64_t bytes = ddl__weight_is_compressed(w) ? 0 : w->count * (int64_t)ddl_dtype_bytes(w->wire);
        layers[p] = (ddl__layer){.bytes = bytes, .ready_s = ready};
        if (w->served) {
            layers[p].way = ddl__served_way(t, true);
            layers[p].grains = t->served.grains + t->served.ps->first[p];
        }
        layers[p].apart = p > 0 && (w->wire != t->weights[t->count - p].wire || layers[p].way != layers[p - 1].way);
    }
    for (int32_t p = 0; p < t->count; p++) {
        layers[p].needed_s = (ready - layers[p].ready_s) / 2;
    }
}

/* How late the last parameter of forward, or the whole step, is by the model; needs ended_s. */
static double ddl__draft_late(const ddl_trainer *t, const ddl__draft *d, double end) {
    double begin = t->count > 0 ? d->layers[t->count - 1].ready_s : 0;
    return t->config.overlap_forward ? ddl__plan_stall(d->layers, t->count, d->pieces, d->count, d->ended_s, begin)
                                     : end - begin;
}

static void ddl__draft_all_first(const ddl_trainer *t, ddl__draft *d) {
    for (int32_t i = 0; i < t->count; i++) {
        d->first[i] = true;
    }
}

/* Pieces in backward's order. */
static void ddl__draft_in_order(const ddl_trainer *t, ddl__draft *d, int64_t piece_bytes) {
    d->count = ddl__plan_cut(d->layers, t->count, d->first, piece_bytes, d->pieces);
    for (int32_t i = 0; i < d->count; i++) {
        d->order[i] = i;
    }
    d->credit_bytes = INT64_MAX;
    d->late_s =
        ddl__draft_late(t, d, ddl__plan_run(d->layers, d->pieces, d->order, d->count, &t->lines[0], d->ended_s));
}

/* Pieces in the order in which forward needs them, as far as backward allows. */
static void ddl__draft_by_priority(const ddl_trainer *t, ddl__draft *d, int64_t piece_bytes, int64_t credit_bytes) {
    d->count = ddl__plan_cut(d->layers, t->count, d->first, piece_bytes, d->pieces);
    double end = ddl__plan_priority(d->layers, d->pieces, d->count, &t->lines[0], credit_bytes, d->order, d->started_s,
                                    d->ended_s);
    d->credit_bytes = credit_bytes;
    d->late_s = ddl__draft_late(t, d, end);
}

/* The least pieces of auto; also what draft_room counts with. */
#define DDL__AUTO_PIECE (256 * 1024)
#define DDL__AUTO_BEST (-1) /* the merge that ends first by the measured line */

/* The plans that auto lets race: those of the schedules that can be named, so that none of these is better but by what
 * times of trials miss, and some between them. Gradients are put together until they have `fuse` bytes, pieces have at
 * most `piece` bytes, and start in backward's order or with what forward needs first. */
static const struct ddl__way {
    int64_t fuse, piece;
    bool priority, named;
    const char *name;
} ddl__ways[] = {
    {DDL__AUTO_BEST, INT64_MAX, false, true, "auto: best merge"},
    {INT64_MAX, INT64_MAX, false, true, "auto: all as one"},
    {0, INT64_MAX, false, true, "auto: one by one"},
    {0, 4 << 20, true, true, "auto: one by one, forward's order"},
    {512 << 10, 512 << 10, false, false, "auto: 512 KiB"},
    {1 << 20, 1 << 20, false, false, "auto: 1 MiB"},
    {4 << 20, 4 << 20, false, false, "auto: 4 MiB"},
    {128 << 10, DDL__AUTO_PIECE, true, false, "auto: 256 KiB, forward's order"},
    {512 << 10, 512 << 10, true, false, "auto: 512 KiB, forward's order"},
    {2 << 20, 2 << 20, true, false, "auto: 2 MiB, forward's order"},
    {8 << 20, 8 << 20, true, false, "auto: 8 MiB, forward's order"},
};
enum { DDL__WAYS = sizeof ddl__ways / sizeof ddl__ways[0] };
_Static_assert((int)DDL__WAYS <= (int)DDL__RACERS, "each plan is a racer");

static void ddl__draft_way(const ddl_trainer *t, ddl__draft *d, int32_t way) {
    const struct ddl__way *w = &ddl__ways[way];
    if (w->fuse == DDL__AUTO_BEST) {
        ddl__plan_merge(d->layers, t->count, &t->lines[0], d->end, d->from, d->first);
    } else {
        ddl__plan_fuse(d->layers, t->count, w->fuse, d->first);
    }
    if (w->priority) {
        ddl__draft_by_priority(t, d, w->piece, DDL__MAX(w->fuse == 0 ? 4 * w->piece : 2 * w->piece, 1 << 20));
    } else {
        ddl__draft_in_order(t, d, w->piece);
    }
    d->name = w->name;
}

/* The plan of the config's schedule. Without times (before the first are measured) those that need them use buckets. */
static void ddl__draft_fill(const ddl_trainer *t, ddl__draft *d, bool timed) {
    ddl_schedule s = t->config.schedule;
    ddl__draft_layers(t, d->layers);
    ddl__draft_all_first(t, d);
    d->name = s == DDL_SCHEDULE_MERGED ? "MG-WFBP" : s == DDL_SCHEDULE_WAIT_FREE ? "wait-free" : "fused";
    if (s == DDL_SCHEDULE_PRIORITY) {
        d->name = "priority";
        if (timed) {
            ddl__draft_by_priority(t, d, t->config.piece_bytes, t->config.credit_bytes);
        } else {
            ddl__draft_in_order(t, d, t->config.piece_bytes);
            d->credit_bytes = t->config.credit_bytes;
        }
        return;
    }
    if (s == DDL_SCHEDULE_AUTO && timed) {
        ddl__draft_way(t, d, t->trial.way);
        return;
    }
    if (s == DDL_SCHEDULE_NONE) {
        d->name = "none";
        ddl__plan_fuse(d->layers, t->count, INT64_MAX, d->first);
    } else if (s == DDL_SCHEDULE_MERGED && timed) {
        ddl__plan_merge(d->layers, t->count, &t->lines[0], d->end, d->from, d->first);
    } else if (s != DDL_SCHEDULE_WAIT_FREE) {
        ddl__plan_fuse(d->layers, t->count, t->config.bucket_bytes, d->first);
    }
    ddl__draft_in_order(t, d, INT64_MAX);
}

/* The most pieces that any schedule of this config makes. */
static int32_t ddl__draft_room(const ddl_trainer *t) {
    int64_t least = t->config.schedule == DDL_SCHEDULE_AUTO ? DDL__AUTO_PIECE : t->config.piece_bytes;
    int64_t pieces = t->served.ps != NULL ? t->served.ps->piece_count : 0;
    for (int32_t i = 0; i < t->count; i++) {
        pieces += 2 + t->weights[i].count * (int64_t)ddl_dtype_bytes(t->weights[i].wire) / least;
    }
    return (int32_t)DDL__MIN(pieces, (int64_t)INT32_MAX / 2);
}

/* The first tensor of a piece that it carries something of: where the piece begins. */
static const ddl__weight *ddl__piece_home(const ddl_trainer *t, const ddl__piece *p) {
    int32_t k = p->first;
    while (k < p->last && ddl__weight_is_compressed(&t->weights[t->count - 1 - k])) {
        k++;
    }
    return &t->weights[t->count - 1 - k];
}

/* "head.w ... block0.w": what the timeline calls a unit, by the first and the last tensor, in backward's order. */
static void ddl__unit_label(ddl__unit *u, const ddl__weight *first, const ddl__weight *last) {
    if (first == last) {
        snprintf(u->label, sizeof u->label, "%.23s", first->name);
    } else {
        snprintf(u->label, sizeof u->label, "%.9s ... %.9s", first->name, last->name);
    }
}

/* Which units carry which tensors. */
static void ddl__units_fill(ddl_trainer *t, const ddl__draft *d) {
    for (int32_t i = 0; i < t->count; i++) {
        t->weights[i].unit_first = INT32_MAX;
    }
    for (int32_t i = 0; i < d->count; i++) {
        const ddl__piece *p = &d->pieces[i];
        const ddl__weight *first = ddl__piece_home(t, p);
        int64_t size = (int64_t)ddl_dtype_bytes(first->wire);
        ddl__unit *u = &t->units[i];
        *u = (ddl__unit){.kind = t->config.shard ? DDL_REDUCE_SCATTERV : DDL_ALL_REDUCE,
                         .dtype = first->wire,
                         .begin = first->at + p->begin_bytes / size,
                         .count = p->bytes / size,
                         .served = first->served,
                         .members = p->last - p->first + 1};
        if (first->served) {
            u->grain_first = t->served.ps->first[p->first] + p->grain;
            u->grain_end = u->grain_first + p->grains;
        }
        for (int32_t k = p->first; k <= p->last; k++) {
            ddl__weight *w = &t->weights[t->count - 1 - k];
            w->unit_first = DDL__MIN(w->unit_first, i);
            w->unit_last = i;
            u->tensors += !ddl__weight_is_compressed(w);
        }
        ddl__unit_label(u, first, &t->weights[t->count - 1 - p->last]);
    }
}

/* Replaces the units by those of a draft. Nothing is under way. On error the trainer is left without units. */
static ddl_status ddl__units_make(ddl_trainer *t, const ddl__draft *d) {
    ddl__base *base = &t->context->base;
    int32_t gathers = t->config.shard ? d->count : 0, flag = t->config.uneven ? 1 : 0,
            total = d->count + gathers + flag;
    ddl__units_free(t);
    t->units = ddl__alloc_array(base, (size_t)total + 1, sizeof *t->units);
    t->order = ddl__alloc_array(base, (size_t)total + 1, sizeof *t->order);
    if (t->units == NULL || t->order == NULL) {
        ddl__units_free(t);
        return ddl__error(t->context, DDL_ERR_NOMEM, "no memory for the trainer's plan");
    }
    t->piece_count = d->count;
    t->unit_count = total;
    t->credit_bytes = d->credit_bytes;
    t->plan_name = d->name;
    ddl__units_fill(t, d);
    for (int32_t i = 0; i < d->count; i++) {
        t->order[flag + i] = d->order[i];
        if (gathers > 0) { /* what forward needs first goes first, where it does not wait for all */
            t->units[d->count + i] = t->units[i];
            t->units[d->count + i].kind = DDL_ALL_GATHERV;
            t->units[d->count + i].members = 1;
            t->order[flag + d->count + i] = t->config.overlap_forward ? 2 * d->count - 1 - i : d->count + i;
        }
    }
    if (flag) { /* first, so that it is known when the gradients are */
        t->units[total - 1] = (ddl__unit){.kind = DDL_ALL_REDUCE, .dtype = DDL_DTYPE_NONE, .count = 1, .members = 1,
                                             .label = "who contributes"};
        t->order[0] = total - 1;
    }
    ddl_status status = ddl__units_plan(t);
    if (status < 0) {
        ddl__units_free(t);
    }
    t->head = t->next = t->unit_count; /* nothing may start before units_reset */
    return status;
}

/* Whether a draft has the pieces and the order of the units that there are. */
static bool ddl__draft_is_current(const ddl_trainer *t, const ddl__draft *d) {
    bool same = d->count == t->piece_count && d->credit_bytes == t->credit_bytes;
    int32_t flag = t->config.uneven ? 1 : 0;
    for (int32_t i = 0; same && i < d->count; i++) {
        const ddl__piece *p = &d->pieces[i];
        const ddl__weight *w = ddl__piece_home(t, p);
        const ddl__unit *u = &t->units[i];
        int64_t size = (int64_t)ddl_dtype_bytes(w->wire);
        same = u->dtype == w->wire && u->begin == w->at + p->begin_bytes / size && u->count == p->bytes / size &&
               u->members == p->last - p->first + 1 && u->served == w->served && t->order[flag + i] == d->order[i];
    }
    return same;
}

/* What the units that there are cost by new figures. */
static double ddl__units_late(const ddl_trainer *t, ddl__draft *d) {
    int32_t flag = t->config.uneven ? 1 : 0;
    d->count = t->piece_count;
    for (int32_t i = 0, layer = 0; i < t->piece_count; i++) {
        d->order[i] = t->order[flag + i];
        while (layer + 1 < t->count && t->weights[t->count - 1 - layer].unit_last < i) {
            layer++;
        }
        d->pieces[i] =
            (ddl__piece){.first = layer, .last = layer + t->units[i].members - 1, .bytes = t->units[i].bytes};
    }
    return ddl__draft_late(t, d, ddl__plan_run(d->layers, d->pieces, d->order, d->count, &t->lines[0], d->ended_s));
}

/* Makes the units: the first time (timed false), or when another plan is clearly better by the newest figures. All
 * ranks have the same figures and decide alike. */
static ddl_status ddl__trainer_plan(ddl_trainer *t, bool timed) {
    ddl__draft draft = {0};
    int32_t room = DDL__MAX(ddl__draft_room(t), t->piece_count);
    void *memory = ddl__draft_make(&draft, t->count, room);
    if (memory == NULL) {
        return ddl__error(t->context, DDL_ERR_NOMEM, "no memory for the trainer's plan");
    }
    double current = 0;
    bool first_timed = t->planned_at == 0;
    if (!timed) {
        ddl__served_choose(t);
    }
    if (timed && !first_timed) {
        ddl__draft_layers(t, draft.layers);
        current = ddl__units_late(t, &draft);
    }
    ddl__draft_fill(t, &draft, timed);
    bool better = !timed || first_timed || t->trial.on || t->served.chosen || draft.late_s < 0.95 * current;
    ddl_status status = DDL_OK;
    if (better && (!timed || !ddl__draft_is_current(t, &draft))) {
        status = ddl__units_make(t, &draft);
        t->stats.replans += timed && status == DDL_OK;
    }
    t->plan_name = better ? draft.name : t->plan_name;
    t->served.chosen = false;
    t->planned_at = timed ? t->steps_tried : 0;
    t->planned_s = draft.late_s;
    free(memory);
    return status;
}

/* >>start */

/* The elements of a tensor that a rank updates: all, or the part of its unit's share that lies in it. */
static void ddl__weight_share(const ddl_trainer *t, const ddl__weight *w, int32_t rank, int64_t *out_begin,
                              int64_t *out_count) {
    *out_begin = 0;
    *out_count = w->count;
    if (t->config.shard && w->count > 0) {
        const ddl__unit *u = &t->units[w->unit_first];
        int64_t begin = 0, count = 0, at = w->at - u->begin; /* of the tensor in the unit */
        ddl_part(u->count, t->size, rank, &begin, &count);
        int64_t low = DDL__MAX(begin, at), high = DDL__MIN(begin + count, at + w->count);
        *out_begin = DDL__MIN(DDL__MAX(low - at, 0), w->count);
        *out_count = DDL__MAX(high - low, 0);
    }
}

/* Memory of the outer optimizer: made if there is one and it has none yet, given back if there is none (any more). */
static ddl_status ddl__weight_prepare_outer(ddl_trainer *t, ddl__weight *w) {
    size_t n = (size_t)w->count + 1;
    if (t->config.outer_rate == 0) {
        ddl__lane_free(&t->lane, w->anchor);
        ddl__lane_free(&t->lane, w->momentum);
        w->anchor = w->momentum = NULL;
        return DDL_OK;
    }
    if (w->anchor != NULL) {
        return DDL_OK;
    }
    w->anchor = ddl__lane_alloc(&t->lane, n, sizeof(float));
    w->momentum = ddl__lane_alloc(&t->lane, n, sizeof(float));
    if (w->anchor == NULL || w->momentum == NULL) {
        return ddl__error(t->context, DDL_ERR_NOMEM, "no memory for the outer optimizer of \"%s\"", w->name);
    }
    return DDL_OK;
}

static void ddl__weight_arrived(ddl_context *c, ddl__stage *mark, ddl_status status);

/* On a device: what tells that a gradient is in the arena. */
static ddl_status ddl__weight_prepare_arrival(ddl_trainer *t, ddl__weight *w) {
    ddl_context *c = t->context;
    if (ddl__lane_is_host(&t->lane)) {
        return DDL_OK;
    }
    w->arrival = ddl__alloc(&c->base, sizeof *w->arrival);
    ddl__stage *mark = w->arrival != NULL ? ddl__stage_make(c, 1) : NULL;
    if (mark == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "no memory for the gradient of \"%s\"", w->name);
    }
    mark->done = ddl__weight_arrived;
    mark->owner = w->arrival;
    *w->arrival = (ddl__arrival){.trainer = t, .index = (int32_t)(w - t->weights), .mark = mark};
    return DDL_OK;
}

/* What the optimizer needs for the elements that this rank updates. */
static ddl_status ddl__weight_prepare(ddl_trainer *t, ddl__weight *w) {
    ddl__lane *lane = &t->lane;
    bool mine = t->config.step == NULL && !ddl__trainer_hands_over(t);
    ddl__weight_share(t, w, t->rank, &w->own_begin, &w->own_count);
    size_t n = (size_t)w->own_count, slots = (size_t)ddl__optim_slots(&t->optimizer);
    bool half = mine && ddl_dtype_bytes(w->param.dtype) == 2;
    w->master = half ? ddl__lane_alloc(lane, n + 1, sizeof(float)) : NULL;
    w->state = mine && slots > 0 ? ddl__lane_alloc(lane, n * slots + 1, ddl__weight_size(w)) : NULL;
    if ((half && w->master == NULL) || (mine && slots > 0 && w->state == NULL)) {
        return ddl__error(t->context, DDL_ERR_NOMEM, "no memory for the optimizer's state of \"%s\"", w->name);
    }
    DDL__TRY(ddl__weight_prepare_arrival(t, w));
    return ddl__weight_prepare_outer(t, w);
}

/* The f32 copies follow the parameters. */
static void ddl__weight_adopt(ddl_trainer *t, const ddl__weight *w) {
    if (w->master != NULL) {
        ddl__lane_convert(&t->lane, w->master, DDL_F32, (const char *)w->param.data + 2 * w->own_begin, w->param.dtype,
                          w->own_count);
    }
}

/* The lane of the tensors, with room for work on the largest. The lock is not held. */
static ddl_status ddl__trainer_lane(ddl_trainer *t) {
    bool device = t->count > 0 && t->weights[0].param.device != DDL_HOST;
    int64_t most = t->adaptive > 0 ? DDL__ADAPT_SAMPLE : 0;
    size_t n = (size_t)t->count + 1;
    for (int32_t i = 0; i < t->count && device; i++) {
        most = DDL__MAX(most, t->weights[i].count);
    }
    DDL__TRY(ddl__enter(t->context));
    ddl_status status = ddl__lane_open(t->context, &t->lane, t->count > 0 ? t->weights[0].param.device : DDL_HOST,
                                       "ddl_trainer_start");
    t->lane.user = t->stream;
    if (status == DDL_OK) {
        bool there = ddl__lane_room(&t->lane, (int64_t)DDL__OFFERS * t->count, most);
        t->odds = ddl__lane_alloc(&t->lane, n, sizeof *t->odds);
        t->odds_told = ddl__lane_is_host(&t->lane) ? t->odds
                                                   : ddl__lane_alloc_pinned(&t->lane, n * sizeof *t->odds_told);
        there = there && t->odds != NULL && t->odds_told != NULL;
        status = there ? DDL_OK : ddl__error(t->context, DDL_ERR_NOMEM, "ddl_trainer_start: no memory for the trainer");
    }
    ddl__unlock(t->context);
    return status;
}

/* All work of the lane has ended. The lock is held. */
static void ddl__trainer_unlane(ddl_trainer *t) {
    if (!ddl__lane_is_host(&t->lane)) {
        ddl__lane_free_pinned(&t->lane, t->odds_told);
    }
    if (t->lane.context != NULL) {
        ddl__lane_free(&t->lane, t->odds);
        ddl__lane_close(&t->lane);
    }
    t->odds = t->odds_told = NULL;
}

static ddl_status ddl__trainer_arrange(ddl_trainer *t) {
    DDL__TRY(ddl__arenas_make(t));
    DDL__TRY(ddl__enter(t->context));
    t->shares = ddl__alloc_array(&t->context->base, (size_t)t->size, sizeof *t->shares);
    ddl_status status = t->shares != NULL ? ddl__trainer_plan(t, false)
                                          : ddl__error(t->context, DDL_ERR_NOMEM, "no memory for the trainer");
    for (int32_t i = 0; i < t->count && status == DDL_OK; i++) {
        status = ddl__weight_prepare(t, &t->weights[i]);
        if (status == DDL_OK && ddl__weight_is_compressed(&t->weights[i])) {
            status = ddl__compression_make(t, &t->weights[i]);
        }
    }
    if (status == DDL_OK) {
        t->pump.next = t->context->pumps;
        t->context->pumps = &t->pump;
    }
    ddl__unlock(t->context);
    return status;
}

/* A group of the trainer's own, of the ranks of another. What finds no memory is tried again: the others wait in it for
 * this rank. */
static ddl_status ddl__trainer_group(ddl_group *ranks, ddl_group **out_group) {
    ddl_status status = DDL_ERR_NOMEM;
    for (int32_t n = 0; n < DDL__PS_TRIES && status == DDL_ERR_NOMEM; n++) {
        status = ddl_group_duplicate(ranks, out_group);
    }
    return status;
}

static ddl_status ddl__trainer_begin(ddl_trainer *t) {
    DDL__TRY(ddl__trainer_group(t->parent, &t->group));
    t->size = t->group->size;
    DDL__TRY(ddl__trainer_lane(t));
    DDL__TRY(ddl__trainer_match(t, "ddl_trainer_start", &t->config));
    DDL__TRY(ddl__served_split(t));
    for (int32_t i = 0; i < t->count && !t->served.only; i++) {
        DDL__TRY(ddl_broadcast(t->group, t->weights[i].param, 0));
    }
    if (t->config.architecture != DDL_ARCHITECTURE_ALL_REDUCE) {
        DDL__TRY(ddl__served_make(t));
        t->started = t->served.only;
    }
    if (t->started) {
        return DDL_OK;
    }
    DDL__TRY(ddl__trainer_compare(t, "ddl_trainer_start", NULL));
    DDL__TRY(ddl__line_measure(t));
    for (int32_t i = 0; i < t->count && t->compress_group == NULL; i++) {
        if (ddl__weight_is_compressed(&t->weights[i])) {
            /* of the trainer's own: a rank that could not come here has broken that one, not the parent */
            DDL__TRY(ddl__trainer_group(t->group, &t->compress_group));
        }
    }
    DDL__TRY(ddl__trainer_arrange(t));
    for (int32_t i = 0; i < t->count; i++) {
        ddl__weight_adopt(t, &t->weights[i]);
    }
    DDL__TRY(ddl__lane_wait(&t->lane, "ddl_trainer_start"));
    t->last_end_ns = ddl__now_ns();
    t->started = true;
    return DDL_OK;
}

static void ddl__trainer_undo(ddl_trainer *t);

static ddl_status ddl__trainer_start(ddl_trainer *t) {
    DDL__TRY(ddl__trainer_ok(t, "ddl_trainer_start", false));
    ddl_context *c = t->context;
    ddl_status status =
        !t->started ? DDL_OK : ddl__error(c, DDL_ERR_STATE, "ddl_trainer_start: it has started already");
    ddl__unlock(c);
    DDL__TRY(status);
    status = ddl__trainer_begin(t);
    if (status < 0) {
        ddl__lock(c);
        ddl__trainer_tell(t, status);
        ddl__unlock(c);
        ddl__trainer_undo(t);
    }
    return status;
}

DDL_API ddl_status ddl_trainer_start(ddl_trainer *trainer) {
    DDL__TRY(ddl__trainer_hold(trainer, "ddl_trainer_start"));
    return ddl__trainer_let_go(trainer, ddl__trainer_start(trainer));
}

/* >>end */

static void ddl__unpump(ddl_trainer *t) {
    for (ddl__pump **at = &t->context->pumps; *at != NULL; at = &(*at)->next) {
        if (*at == &t->pump) {
            *at = t->pump.next;
            return;
        }
    }
}

/* An operation that is under way gives its memory back; the other ranks learn of it when theirs fail. */
static void ddl__request_abandon(ddl_context *c, ddl_request **request) {
    ddl_request *r = *request;
    if (c->finalized) {
        return;
    }
    if (ddl__is_pending(r)) {
        r->ops->abandon(c, r);
        if (ddl__is_pending(r)) {
            ddl__request_fail(r, DDL_ERR_CANCELLED, "the trainer was freed while the operation was running");
        }
    }
    if (r != NULL && r->state == DDL__REQUEST_DONE) {
        ddl__request_report(request, NULL);
    }
}

static void ddl__weight_undo(ddl_trainer *t, ddl__weight *w) {
    ddl_context *c = t->context;
    ddl__request_abandon(c, &w->compressing);
    ddl__compression_free(t, w);
    ddl__lane_free(&t->lane, w->master);
    ddl__lane_free(&t->lane, w->state);
    ddl__lane_free(&t->lane, w->anchor);
    ddl__lane_free(&t->lane, w->momentum);
    w->master = w->state = w->anchor = w->momentum = NULL;
    if (w->arrival != NULL && c->finalized) {
        ddl__free(&c->base, w->arrival->mark);
    } else if (w->arrival != NULL) {
        ddl__stage_leave(c, &w->arrival->mark);
    }
    ddl__free(&c->base, w->arrival);
    w->arrival = NULL;
}

/* Takes back what ddl_trainer_start has made. The lock is not held. */
static void ddl__trainer_undo(ddl_trainer *t) {
    ddl_context *c = t->context;
    ddl__base *base = &c->base;
    if (!c->finalized) {
        ddl__lane_wait(&t->lane, "ddl_trainer_free"); /* it may still use what is freed below */
    }
    ddl__lock(c);
    ddl__unpump(t);
    for (int32_t i = 0; i < t->unit_count; i++) {
        ddl__request_abandon(c, &t->units[i].request);
    }
    ddl__units_free(t);
    ddl__free(base, t->shares);
    t->shares = NULL;
    for (int32_t i = 0; i < t->count; i++) {
        ddl__weight_undo(t, &t->weights[i]);
    }
    ddl__unlock(c);
    ddl__served_free(t);
    ddl__arenas_free(t);
    ddl__lock(c);
    ddl__trainer_unlane(t);
    ddl__unlock(c);
    ddl_group_free(&t->group);
    ddl_group_free(&t->compress_group);
}

DDL_API ddl_status ddl_trainer_free(ddl_trainer **trainer) {
    if (trainer == NULL || *trainer == NULL) {
        return DDL_OK;
    }
    ddl_trainer *t = *trainer;
    ddl_context *c = t->context;
    if (t->magic != DDL__TRAINER_MAGIC || ddl__is_forked(c)) {
        return t->magic == DDL__TRAINER_MAGIC ? DDL_ERR_FORK : DDL_ERR_ARG;
    }
    ddl__hold(c, "ddl_trainer_free");
    ddl__trainer_undo(t);
    ddl__lock(c);
    for (int32_t i = 0; i < t->count; i++) {
        ddl__free(&c->base, t->weights[i].name);
    }
    ddl__free(&c->base, t->weights);
    t->magic = 0;
    ddl__free(&c->base, t);
    *trainer = NULL;
    ddl__let_go(c);
    ddl__context_unref(c);
    return DDL_OK;
}

#endif /* DDL_TRAIN_AGREE_H */

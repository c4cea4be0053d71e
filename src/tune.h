/* tune: chooses the algorithm of a call, how finely it is cut, and whether it begins with a fence. Every rank must
 * choose alike without asking, so nothing here may look at what only this rank knows: its rank, whether its buffers
 * are in place, its lengths of an all_to_allv. */
#ifndef DDL_TUNE_H
#define DDL_TUNE_H

#include "algo/table.h"

#define DDL__CHUNK_BYTES (256 * 1024)
#define DDL__PULLED_CHUNK_BYTES (512 * 1024) /* where messages of that size are read: ddl__tune_usual */
#define DDL__MIN_CHUNK_BYTES (32 * 1024)
#define DDL__MAX_CHUNK_BYTES (1024 * 1024)
#define DDL__MAX_CHUNKS 512 /* of one vector: bounds the length of plans */

/* Settings of a group, the same on every rank. */
typedef struct ddl__tuning {
    ddl__cost_model model;
    int64_t eager_bytes; /* a plan that sends more to one peer begins with a fence; 0: the default */
    int64_t chunk_bytes; /* 0: by the model */
    bool deterministic;  /* reduce in rank order */
    const ddl__algo *forced[DDL_ALL_TO_ALLV + 1]; /* by base kind; NULL: by the model */
} ddl__tuning;

typedef struct ddl__choice {
    const ddl__algo *algo;
    int64_t chunk_bytes;
    bool fence;
    double seconds;
    const ddl__algo *inner; /* of a plan on devices: what goes between hosts */
} ddl__choice;

/* Typical of shared memory and of 10 Gbit/s Ethernet; for who has not measured. To reduce is never measured: with AVX2
 * a byte of f32 takes 0.008 ns in the caches and 0.015 ns beyond, of bf16 0.022 ns, a copy on the way 0.008. */
static const ddl__cost_model ddl__model_default = {{2e-6, 30e-6}, {0.2e-9, 1e-9}, 0.04e-9, 0.3e-6, 1};

/* Large vectors take larger chunks, so that a plan stays short. */
static int64_t ddl__tune_chunk(const ddl__tuning *tuning, const ddl__plan_args *args, int64_t wanted) {
    if (tuning->chunk_bytes > 0) {
        return tuning->chunk_bytes;
    }
    int64_t total = ddl__total_bytes(args);
    while (total / wanted > DDL__MAX_CHUNKS) {
        wanted *= 2;
    }
    return wanted;
}

/* Where large messages are read, a chunk costs an offer and an answer, and larger ones are fewer. With a root the time
 * to fill a tree counts more (docs/design.md). */
static int64_t ddl__tune_usual(const ddl__plan_args *args) {
    ddl_kind base = ddl__kind_base(args->kind);
    bool around = base == DDL_ALL_REDUCE || base == DDL_ALL_GATHER || base == DDL_REDUCE_SCATTER;
    return args->pulled && (args->size == 2 || around) ? DDL__PULLED_CHUNK_BYTES : DDL__CHUNK_BYTES;
}

/* Tries sizes of chunks. The default comes first, so that it wins where size makes no difference; a vector that is one
 * chunk anyway is tried once. Whether a fence is needed follows from the bytes to one peer alone: it must not depend on
 * what this rank sends. */
static void ddl__tune_chunks(const ddl__tuning *tuning, ddl__plan_args *args, const ddl__algo *algo,
                             ddl__choice *best) {
    ddl__terms terms;
    bool fence = algo->peer_bytes(args) > (tuning->eager_bytes > 0 ? tuning->eager_bytes : DDL__EAGER_BYTES);
    bool fenced = fence || ddl__algo_fences(algo, args);
    int64_t usual = ddl__tune_usual(args);
    for (int64_t next = DDL__MIN_CHUNK_BYTES / 2, wanted = usual; next <= DDL__MAX_CHUNK_BYTES;
         next *= 2, wanted = next) {
        args->chunk_bytes = ddl__tune_chunk(tuning, args, wanted);
        ddl__terms_of(&terms, args, &tuning->model);
        double seconds = algo->cost(&terms) + (fenced ? terms.rounds * terms.latency : 0);
        if (best->algo == NULL || seconds < best->seconds) {
            *best = (ddl__choice){algo, args->chunk_bytes, fence, seconds, NULL};
        }
        if (terms.bytes <= DDL__MIN_CHUNK_BYTES) {
            break;
        }
    }
}

static ddl__choice ddl__tune_choose(const ddl__tuning *tuning, const ddl__plan_args *args);

/* Between hosts a plan on devices is one of ordinary memory, piece by piece: that one is chosen (an exchange has its
 * estimate). Asked for by name, it is taken among all ranks, and the devices of a host do nothing by themselves. */
static ddl__choice ddl__tune_on_device(const ddl__tuning *tuning, const ddl__plan_args *args) {
    bool straight = ddl__can_straight(args), inside = false;
    bool asked = tuning->forced[ddl__kind_base(args->kind)] != NULL;
    bool last_digit = tuning->deterministic && args->scaled; /* devices multiply where the host divides */
    const ddl__algo *algo = straight                                             ? &ddl__algo_straight
                            : !asked && !last_digit && ddl__can_exchange(args) ? &ddl__algo_exchange
                                                                                 : &ddl__algo_pieces;
    for (size_t i = 0; !straight && !asked && i < DDL__COUNT_OF(ddl__algos_on_device); i++) {
        if (ddl__algo_can(&ddl__algos_on_device[i], args, tuning->deterministic)) {
            algo = &ddl__algos_on_device[i];
            inside = true;
        }
    }
    ddl__plan_args piece = ddl__piece_args(args, inside);
    ddl__choice best = ddl__tune_choose(tuning, &piece);
    best.seconds *= (double)ddl__total_bytes(args) / (double)DDL__MAX(ddl__total_bytes(&piece), 1);
    best.inner = best.algo;
    best.algo = algo;
    if (straight) { /* each chunk is a message that is offered and fetched */
        best.chunk_bytes = DDL__MAX(best.chunk_bytes, args->move_bytes);
    }
    best.fence = true;
    return best;
}

/* Chooses for a call; a forced algorithm that cannot serve it (an op that is not commutative, hosts of unequal size)
 * gives way to the best that can. Needs no memory and cannot fail: every kind has an algorithm that always fits. */
static ddl__choice ddl__tune_choose(const ddl__tuning *tuning, const ddl__plan_args *args) {
    ddl__plan_args common = *args;
    common.rank = 0;
    common.in_place = false;
    ddl__choice best = {0};
    const ddl__algo *forced = tuning->forced[ddl__kind_base(args->kind)];
    if (args->on_device && ddl__host_count(args) > 1) {
        return ddl__tune_on_device(tuning, &common);
    }
    if (forced == NULL && args->native_s > 0) {
        const ddl__algo *native = ddl__algo_find(args->kind, "native"); /* no plan of messages comes near */
        forced = native != NULL && ddl__algo_can(native, &common, tuning->deterministic) ? native : NULL;
    }
    if (forced != NULL && ddl__algo_can(forced, &common, tuning->deterministic)) {
        ddl__tune_chunks(tuning, &common, forced, &best);
    }
    bool served = best.algo != NULL;
    for (size_t i = 0; !served && i < DDL__COUNT_OF(ddl__algos); i++) {
        if (ddl__algo_can(&ddl__algos[i], &common, tuning->deterministic)) {
            ddl__tune_chunks(tuning, &common, &ddl__algos[i], &best);
        }
    }
    best.fence = best.fence && args->size > 1;
    best.seconds = args->size > 1 ? best.seconds : 0;
    return best;
}

/* >>tune-names: DDL_ALGO. "ring", "auto", or by operation: "all_reduce=ring,broadcast=tree". */

/* Names of a kind's algorithms, of all kinds' when it is DDL_KIND_NONE. */
static void ddl__tune_list(ddl__text *text, ddl_kind kind) {
    ddl__text_add(text, "auto");
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__algos); i++) {
        bool known = kind != DDL_KIND_NONE && ddl__algos[i].kind != kind;
        for (size_t j = 0; j < i && kind == DDL_KIND_NONE; j++) {
            known = known || strcmp(ddl__algos[j].name, ddl__algos[i].name) == 0;
        }
        if (!known) {
            ddl__text_add(text, ", %s", ddl__algos[i].name);
        }
    }
}

/* Operations are named without the v: both forms share algorithms. */
static ddl_kind ddl__tune_kind(const char *name, size_t length) {
    for (int kind = DDL_BARRIER; kind <= DDL_EXSCAN; kind++) {
        const char *known = ddl__kind_name((ddl_kind)kind);
        if (strlen(known) == length && memcmp(known, name, length) == 0) {
            return (ddl_kind)kind;
        }
    }
    return DDL_KIND_NONE;
}

/* Forces one name for a kind, or for every kind that has it. */
static bool ddl__tune_force(ddl__tuning *tuning, ddl_kind kind, const char *name) {
    bool found = false;
    for (int k = DDL_BARRIER; k <= DDL_EXSCAN; k++) {
        const ddl__algo *algo = ddl__algo_find((ddl_kind)k, name);
        bool is_auto = strcmp(name, "auto") == 0;
        if ((kind == DDL_KIND_NONE || kind == (ddl_kind)k) && (algo != NULL || is_auto)) {
            tuning->forced[k] = algo;
            found = true;
        }
    }
    return found;
}

/* One entry: "name" or "operation=name". */
static ddl_status ddl__tune_entry(ddl__tuning *tuning, const char *entry, ddl__sentence *error) {
    const char *equals = strchr(entry, '=');
    const char *name = equals != NULL ? equals + 1 : entry;
    ddl_kind kind = equals != NULL ? ddl__tune_kind(entry, (size_t)(equals - entry)) : DDL_KIND_NONE;
    if (equals != NULL && kind == DDL_KIND_NONE) {
        return ddl__fail(error, DDL_ERR_ARG,
                         "algorithm setting \"%s\" names no operation: use barrier, broadcast, reduce, all_reduce, "
                         "gather, scatter, all_gather, reduce_scatter, all_to_all, scan or exscan",
                         entry);
    }
    if (ddl__tune_force(tuning, kind, name)) {
        return DDL_OK;
    }
    char names[400];
    ddl__text list = {names, sizeof names, 0};
    ddl__tune_list(&list, kind);
    return kind == DDL_KIND_NONE
               ? ddl__fail(error, DDL_ERR_ARG, "no operation has an algorithm \"%s\": use one of %s", name, names)
               : ddl__fail(error, DDL_ERR_ARG, "%s has no algorithm \"%s\": use one of %s", ddl__kind_name(kind), name,
                           names);
}

/* Reads DDL_ALGO into tuning->forced; entries that are not named stay as they are. Errors: DDL_ERR_ARG with a sentence
 * that lists the valid names; tuning is unchanged then. */
static ddl_status ddl__tune_parse(ddl__tuning *tuning, const char *text, ddl__sentence *error) {
    ddl__tuning parsed = *tuning;
    for (const char *at = text; *at != '\0';) {
        char entry[64]; /* longer than any operation and algorithm together */
        size_t length = strcspn(at, ","), begin = strspn(at, " "), end = length;
        while (end > begin && at[end - 1] == ' ') {
            end--;
        }
        begin = DDL__MIN(begin, end);
        if (end - begin >= sizeof entry) {
            return ddl__fail(error, DDL_ERR_ARG, "algorithm setting \"%.80s\" is too long", at);
        }
        memcpy(entry, at + begin, end - begin);
        entry[end - begin] = '\0';
        if (entry[0] != '\0') {
            DDL__TRY(ddl__tune_entry(&parsed, entry, error));
        }
        at += length + (at[length] == ',');
    }
    *tuning = parsed;
    return DDL_OK;
}

/* >>tune-cache: DDL_TUNE_CACHE. A line is the shape's key and four figures: latency and seconds per byte, inside a host
 * and between hosts. */

/* What a measurement can come to: outside, a figure is damage, and would make the model's numbers overflow. */
#define DDL__FIGURE_MIN 1e-12
#define DDL__FIGURE_MAX 1e7

/* Returns the line's bytes. */
static size_t ddl__model_write(char *out, size_t cap, uint64_t key, const double figures[4]) {
    ddl__text line = {out, cap, 0};
    ddl__text_add(&line, "%llx %.9g %.9g %.9g %.9g\n", (unsigned long long)key, figures[0], figures[1], figures[2],
                  figures[3]);
    return line.used;
}

/* False: it is no such line, or its figures are none. */
static bool ddl__model_parse(const char *line, uint64_t *out_key, double figures[4]) {
    size_t digits = strspn(line, "0123456789abcdef");
    if (digits == 0 || digits > 16 || line[digits] != ' ') { /* strtoull takes 0x as well */
        return false;
    }
    char *at;
    *out_key = strtoull(line, &at, 16);
    for (int i = 0; i < 4; i++) {
        const char *from = at;
        figures[i] = *from == ' ' ? strtod(from, &at) : 0;
        if (at == from || !(figures[i] >= DDL__FIGURE_MIN && figures[i] <= DDL__FIGURE_MAX)) { /* a NaN is not */
            return false;
        }
    }
    return *at == '\n' || *at == 0;
}

#endif /* DDL_TUNE_H */

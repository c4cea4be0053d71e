/* plan: a collective as data. A plan is the list of steps that one rank takes, with their dependencies; algorithms
 * write plans, the engine runs them, the checker proves them. It must not know of sockets, requests or time. */
#ifndef DDL_PLAN_H
#define DDL_PLAN_H

#include "base.h"

typedef enum ddl__step_kind {
    DDL__SEND = 1,        /* src -> peer */
    DDL__RECV = 2,        /* peer -> dst */
    DDL__RECV_REDUCE = 3, /* dst = src op what peer sent (DDL__THEIRS_FIRST: what peer sent op src) */
    DDL__COPY = 4,        /* dst = src */
    DDL__REDUCE = 5,      /* dst = src op dst (DDL__DST_FIRST: dst op src) */
    DDL__NATIVE = 6,      /* a collective of this host's ranks, run by a transport: slot is its kind, peer its root */
    DDL__MOVE = 7,        /* dst = src, one of them TMP: in the host's memory, where all others are a device's. Out of
                           * TMP it divides an average, in place */
    DDL__FOLD = 8         /* dst = (src[0] op src[1]) op ... of `slot` blocks, each ddl__fold_room behind the last, by
                           * the device, which divides an average; dst is none of them, or the first */
} ddl__step_kind;

/* What an offset counts from. When a call is in place, the engine makes IN and OUT point at the same elements. */
typedef enum ddl__space {
    DDL__IN = 0,
    DDL__OUT = 1,
    DDL__TMP = 2,  /* scratch */
    DDL__THERE = 3 /* scratch on the device, where IN and OUT are on one */
} ddl__space;

enum { DDL__SPACES = 4 };

/* DDL__AT_ONCE: a send that does not wait for the fence. DDL__SCALED: a copy on a device that multiplies by what the
 * call's inputs are scaled by. */
enum { DDL__THEIRS_FIRST = 1, DDL__DST_FIRST = 1, DDL__AT_ONCE = 2, DDL__SCALED = 4 };

#define DDL__EAGER_BYTES 65536 /* to a rank that may not have called yet */

typedef struct ddl__step {
    uint8_t kind, flags, src_space, dst_space;
    int32_t peer;  /* rank in the group */
    uint32_t slot; /* pairs a send with its receive: unique for (sender, receiver) within the operation */
    uint32_t waits;      /* how many steps must end before this one may start */
    uint32_t first_next; /* the steps that wait for this one: nexts[first_next .. + next_count - 1] of the plan */
    uint32_t next_count;
    int64_t src, dst; /* byte offsets */
    int64_t bytes;    /* 0 is a pure signal */
} ddl__step;

/* What an algorithm is told. count is elements of the smaller tensor, as in api.h. */
typedef struct ddl__plan_args {
    ddl_kind kind;
    int32_t size, rank, root;
    int32_t element_bytes;
    int64_t count;
    bool in_place;
    bool commutative;
    bool fence;          /* begin with a fence, see below */
    int64_t chunk_bytes; /* how finely to cut for pipelining; > 0 */
    const int64_t *counts, *offsets, *recv_counts, *recv_offsets; /* v-forms; elements; offsets never NULL here */
    const int32_t *host_of; /* size entries: which host each rank is on, numbered from 0 by first appearance */
    bool pulled;            /* all read each other's large messages: see ddl_group.pulled */
    double native_s;        /* how long a transport takes by itself, for the ranks of one host; 0: it cannot */
    bool apart;             /* each rank is on a host of its own, whatever host_of says */
    bool on_device;         /* IN and OUT are memory of devices: only native steps and moves touch them */
    int64_t move_bytes;     /* then: how much of it is in the host's memory in one piece, which goes by the network */
    bool straight;          /* or not at all: devices of all ranks reach each other through the network */
    bool folds, scaled;     /* devices have kernels for the op; that scale its inputs first */
    const struct ddl__algo *inner; /* and by what it goes; NULL: the plan knows */
} ddl__plan_args;

/* What algorithms are told and the engine runs. All steps that wait for nothing start at once; a step that ends lets
 * go the steps that wait for it; the operation ends with its last step. A send reads its memory when it is let go and
 * ends when the memory may be reused; data that arrives before a receive is let go is kept by the engine.
 *
 * Two rules make a mismatched call harmless ("buffers untouched"; every message carries the signature of the call):
 * - barrier, all_reduce, all_gather, reduce_scatter, all_to_all, and every fenced plan: a step that writes OUT comes
 *   after a chain of messages from every rank;
 * - the rooted kinds and the scans, not fenced: it comes after a message from each rank that this rank ever receives
 *   from. The message that a receive itself waits for counts.
 * A plan that is not fenced sends so little that each send may count on ending before its receiver looks at it; a
 * fenced plan also ends when a send does not end before its receive has been let go, and sends at most
 * DDL__EAGER_BYTES to a rank that it has not heard of. */
typedef struct ddl__plan {
    const char *algorithm;
    ddl__step *steps;
    uint32_t *nexts;
    uint32_t step_count, next_count;
    int64_t tmp_bytes, there_bytes;
    bool fenced;
    bool straight; /* its data goes from device to device: TMP is not used */
} ddl__plan;

/* >>plan-part: cutting memory. A span is bytes of a space, or of something that is mapped to one by a place. */
typedef struct ddl__span {
    int64_t at, bytes;
} ddl__span;

DDL_API ddl_status ddl_part(int64_t count, int32_t parts, int32_t index, int64_t *out_begin, int64_t *out_count) {
    if (count < 0 || parts < 1 || index < 0 || index >= parts || out_begin == NULL || out_count == NULL) {
        return DDL_ERR_ARG;
    }
    int64_t each = count / parts, more = count % parts;
    *out_begin = index * each + DDL__MIN((int64_t)index, more);
    *out_count = each + (index < more);
    return DDL_OK;
}

/* Parts first .. end-1 of a span that is cut into equal parts at borders of elements. */
static ddl__span ddl__span_parts(ddl__span whole, int32_t parts, int32_t first, int32_t end, int32_t element_bytes) {
    int64_t count = whole.bytes / element_bytes, each = count / parts, more = count % parts;
    int64_t begin = first * each + DDL__MIN((int64_t)first, more);
    int64_t stop = end * each + DDL__MIN((int64_t)end, more);
    return (ddl__span){whole.at + begin * element_bytes, (stop - begin) * element_bytes};
}

/* One part of the equal parts of a span. */
static ddl__span ddl__span_part(ddl__span whole, int32_t parts, int32_t index, int32_t element_bytes) {
    return ddl__span_parts(whole, parts, index, index + 1, element_bytes);
}

/* chunk_bytes in whole elements. */
static int64_t ddl__chunk_bytes(const ddl__plan_args *args) {
    int64_t elements = args->chunk_bytes / args->element_bytes;
    return DDL__MAX(elements, 1) * args->element_bytes;
}

/* An empty span has one empty chunk, so that loops over chunks still exchange a signal. */
static uint32_t ddl__chunk_count(const ddl__plan_args *args, int64_t bytes) {
    int64_t chunk = ddl__chunk_bytes(args);
    return bytes <= chunk ? 1 : (uint32_t)((bytes + chunk - 1) / chunk);
}

/* The last chunk is what is left. */
static ddl__span ddl__chunk(const ddl__plan_args *args, ddl__span span, uint32_t index) {
    int64_t chunk = ddl__chunk_bytes(args), skip = chunk * (int64_t)index;
    return (ddl__span){span.at + skip, DDL__MIN(chunk, span.bytes - skip)};
}

/* The v-form's kind without the v. */
static ddl_kind ddl__kind_base(ddl_kind kind) {
    switch (kind) {
    case DDL_GATHERV:
        return DDL_GATHER;
    case DDL_SCATTERV:
        return DDL_SCATTER;
    case DDL_ALL_GATHERV:
        return DDL_ALL_GATHER;
    case DDL_REDUCE_SCATTERV:
        return DDL_REDUCE_SCATTER;
    case DDL_ALL_TO_ALLV:
        return DDL_ALL_TO_ALL;
    default:
        return kind;
    }
}

/* What users call it, in DDL_ALGO and in sentences. */
static const char *ddl__kind_name(ddl_kind kind) {
    static const char *const names[] = {"?",           "barrier",        "broadcast",       "reduce",
                                        "all_reduce",  "gather",         "scatter",         "all_gather",
                                        "reduce_scatter", "all_to_all",  "scan",            "exscan",
                                        "gatherv",     "scatterv",       "all_gatherv",     "reduce_scatterv",
                                        "all_to_allv"};
    return kind > 0 && (size_t)kind < DDL__COUNT_OF(names) ? names[kind] : "?";
}

static bool ddl__kind_is_v(ddl_kind kind) { return ddl__kind_base(kind) != kind; }

/* Where the block of a rank lies in the larger tensor; of an all_to_all: the block that is sent to that rank. */
static ddl__span ddl__block(const ddl__plan_args *args, int32_t rank) {
    int64_t size = args->element_bytes;
    if (!ddl__kind_is_v(args->kind)) {
        return (ddl__span){rank * args->count * size, args->count * size};
    }
    return (ddl__span){args->offsets[rank] * size, args->counts[rank] * size};
}

/* Of an all_to_all: where the block that comes from a rank goes. */
static ddl__span ddl__recv_block(const ddl__plan_args *args, int32_t rank) {
    if (args->kind != DDL_ALL_TO_ALLV) {
        return ddl__block(args, rank);
    }
    int64_t size = args->element_bytes;
    return (ddl__span){args->recv_offsets[rank] * size, args->recv_counts[rank] * size};
}

/* Smallest r with 2^r >= n: the rounds in which n ranks can all hear of each other. */
static uint32_t ddl__log2_ceil(int32_t n) {
    uint32_t rounds = 0;
    while (((int64_t)1 << rounds) < n) {
        rounds++;
    }
    return rounds;
}

/* >>plan-build: the builder. An algorithm adds steps in an order that would be right on a machine that runs them one
 * by one; the builder finds which of them really depend on each other from the memory they touch, as a processor's
 * scoreboard does (Thornton, "Parallel operation in the Control Data 6600", 1964). So no algorithm states a data
 * dependency by hand, and none can be forgotten; ddl__plan_after is for order that memory does not show.
 * An error sticks: later calls do nothing and ddl__plan_finish returns it. */
#define DDL__NO_STEP UINT32_MAX

typedef struct ddl__edge {
    uint32_t before, after;
} ddl__edge;

/* Readers of a cell: a list that only grows at its head, so that two halves of a split cell can share the tail. */
typedef struct ddl__cell_reader {
    uint32_t step, next; /* next: index + 1, 0 ends */
} ddl__cell_reader;

/* A stretch of memory whose bytes have one history: who wrote it last, who has read it since. */
typedef struct ddl__cell {
    int64_t begin, end;
    uint32_t writer;  /* DDL__NO_STEP: nobody */
    uint32_t readers; /* index + 1 */
} ddl__cell;

/* The touched cells of one memory in order of address, without overlap; gaps have no history. */
typedef struct ddl__cells {
    ddl__cell *at;
    uint32_t count, cap;
} ddl__cells;

enum { DDL__USER_MEMORY = 0, DDL__TMP_MEMORY = 1, DDL__THERE_MEMORY = 2, DDL__MEMORIES = 3 };

/* A part of a plan that an algorithm writes as if it were a call of its own: among which ranks, and where in scratch
 * its IN and OUT are. */
typedef struct ddl__scope {
    const int32_t *ranks; /* of the group; NULL: all */
    int64_t at[2];
} ddl__scope;

typedef struct ddl__planner {
    ddl__base *base;
    const ddl__plan_args *args;
    ddl_status status;
    ddl__step *steps;
    ddl__edge *edges;
    ddl__cell_reader *readers;
    uint32_t step_count, step_cap, edge_count, edge_cap, reader_count, reader_cap;
    ddl__cells cells[DDL__MEMORIES];
    const ddl__scope *scope; /* NULL: none */
    bool aliased;     /* IN and OUT are the same memory ... */
    int64_t shift[2]; /* ... in which IN and OUT begin here */
    int64_t tmp_bytes, there_bytes;
    uint32_t next_slot;
    uint32_t gate; /* the step that ends the fence; steps after it wait for it */
    bool fenced, straight;
} ddl__planner;

/* Where "in place" puts the smaller tensor: at the rank's own part of the larger one. */
static void ddl__plan_alias(ddl__planner *p, const ddl__plan_args *args) {
    p->aliased = args->in_place || args->kind == DDL_BROADCAST;
    switch (ddl__kind_base(args->kind)) {
    case DDL_GATHER:
    case DDL_ALL_GATHER:
        p->shift[DDL__IN] = ddl__block(args, args->rank).at;
        break;
    case DDL_SCATTER:
    case DDL_REDUCE_SCATTER:
        p->shift[DDL__OUT] = ddl__block(args, args->rank).at;
        break;
    default:
        break;
    }
}

/* args must outlive the planner; the plan itself does not point into them. */
static void ddl__plan_open(ddl__planner *p, ddl__base *base, const ddl__plan_args *args) {
    *p = (ddl__planner){.base = base, .args = args, .gate = DDL__NO_STEP};
    ddl__plan_alias(p, args);
}

/* Frees what the plan has not taken over. */
static void ddl__plan_close(ddl__planner *p) {
    ddl__free(p->base, p->steps);
    ddl__free(p->base, p->edges);
    ddl__free(p->base, p->readers);
    p->steps = NULL;
    p->edges = NULL;
    p->readers = NULL;
    for (int i = 0; i < DDL__MEMORIES; i++) {
        ddl__free(p->base, p->cells[i].at);
        p->cells[i].at = NULL;
    }
}

/* Room for one more item: returns the array, moved if it had to grow; on failure the old one, and the error sticks. */
static void *ddl__plan_grow(ddl__planner *p, void *items, uint32_t count, uint32_t *cap, size_t item_bytes) {
    if (count < *cap) {
        return items;
    }
    uint32_t wanted = DDL__MAX(*cap * 2, 16u);
    void *larger = *cap > UINT32_MAX / 4 ? NULL : ddl__alloc_array(p->base, wanted, item_bytes);
    if (larger == NULL) {
        p->status = DDL_ERR_NOMEM;
        return items;
    }
    if (count > 0) {
        memcpy(larger, items, count * item_bytes);
    }
    ddl__free(p->base, items);
    *cap = wanted;
    return larger;
}

/* after does not start before `before` has ended. DDL__NO_STEP on either side means nothing. */
static void ddl__plan_after(ddl__planner *p, uint32_t after, uint32_t before) {
    if (before == DDL__NO_STEP || after == DDL__NO_STEP || before == after) {
        return;
    }
    for (uint32_t i = p->edge_count; i > 0 && p->edge_count - i < 8 && p->edges[i - 1].after == after; i--) {
        if (p->edges[i - 1].before == before) {
            return;
        }
    }
    p->edges = ddl__plan_grow(p, p->edges, p->edge_count, &p->edge_cap, sizeof *p->edges);
    if (p->status >= 0) {
        p->edges[p->edge_count++] = (ddl__edge){before, after};
    }
}

/* The first cell that ends after address. Algorithms walk upwards, so the last cell is tried first. */
static uint32_t ddl__cell_find(const ddl__cells *cells, int64_t address) {
    if (cells->count == 0 || cells->at[cells->count - 1].end <= address) {
        return cells->count;
    }
    uint32_t low = 0, high = cells->count - 1;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (cells->at[middle].end <= address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* Cells are few where algorithms write whole chunks, and mostly come in order, so moving the rest is cheap. */
static void ddl__cell_insert(ddl__planner *p, ddl__cells *cells, uint32_t index, ddl__cell cell) {
    cells->at = ddl__plan_grow(p, cells->at, cells->count, &cells->cap, sizeof *cells->at);
    if (p->status < 0) {
        return;
    }
    memmove(&cells->at[index + 1], &cells->at[index], (cells->count - index) * sizeof *cells->at);
    cells->at[index] = cell;
    cells->count++;
}

/* Makes address a border between cells and returns the first cell at or above it. */
static uint32_t ddl__cell_split(ddl__planner *p, ddl__cells *cells, int64_t address) {
    uint32_t index = ddl__cell_find(cells, address);
    if (index == cells->count || cells->at[index].begin >= address) {
        return index;
    }
    ddl__cell lower = cells->at[index];
    lower.end = address;
    ddl__cell_insert(p, cells, index, lower);
    if (p->status >= 0) {
        cells->at[index + 1].begin = address;
    }
    return index + 1;
}

/* The newest reader becomes the head of the list. */
static void ddl__cell_add_reader(ddl__planner *p, ddl__cell *cell, uint32_t step) {
    p->readers = ddl__plan_grow(p, p->readers, p->reader_count, &p->reader_cap, sizeof *p->readers);
    if (p->status >= 0) {
        p->readers[p->reader_count++] = (ddl__cell_reader){step, cell->readers};
        cell->readers = p->reader_count;
    }
}

/* A reader waits for whoever wrote what it reads. */
static void ddl__cells_read(ddl__planner *p, ddl__cells *cells, int64_t begin, int64_t end, uint32_t step) {
    uint32_t i = ddl__cell_split(p, cells, begin);
    ddl__cell_split(p, cells, end);
    for (int64_t at = begin; at < end && p->status >= 0; at = cells->at[i++].end) {
        if (i == cells->count || cells->at[i].begin > at) {
            int64_t stop = i == cells->count ? end : DDL__MIN(end, cells->at[i].begin);
            ddl__cell_insert(p, cells, i, (ddl__cell){at, stop, DDL__NO_STEP, 0});
            if (p->status < 0) {
                return;
            }
        }
        ddl__plan_after(p, step, cells->at[i].writer);
        ddl__cell_add_reader(p, &cells->at[i], step);
    }
}

/* A writer waits for those who read the old bytes; they waited for the writer before, so it need not. */
static void ddl__cells_write(ddl__planner *p, ddl__cells *cells, int64_t begin, int64_t end, uint32_t step) {
    uint32_t first = ddl__cell_split(p, cells, begin), i = first;
    ddl__cell_split(p, cells, end);
    for (; p->status >= 0 && i < cells->count && cells->at[i].begin < end; i++) {
        uint32_t reader = cells->at[i].readers;
        if (reader == 0) {
            ddl__plan_after(p, step, cells->at[i].writer);
        }
        for (; reader != 0; reader = p->readers[reader - 1].next) {
            ddl__plan_after(p, step, p->readers[reader - 1].step);
        }
    }
    ddl__cell whole = {begin, end, step, 0};
    if (p->status < 0) {
        return;
    }
    if (i == first) {
        ddl__cell_insert(p, cells, first, whole);
        return;
    }
    cells->at[first] = whole;
    memmove(&cells->at[first + 1], &cells->at[i], (cells->count - i) * sizeof *cells->at);
    cells->count -= i - first - 1;
}

/* IN that is not also OUT is never written, so nobody ever waits for its readers. */
static void ddl__plan_touch(ddl__planner *p, uint32_t step, uint8_t space, int64_t offset, int64_t bytes, bool write) {
    if (bytes <= 0 || p->status < 0 || (space == DDL__IN && !p->aliased)) {
        return;
    }
    int64_t begin = offset + (space <= DDL__OUT && p->aliased ? p->shift[space] : 0);
    ddl__cells *cells = &p->cells[space == DDL__TMP     ? DDL__TMP_MEMORY
                                  : space == DDL__THERE ? DDL__THERE_MEMORY
                                                        : DDL__USER_MEMORY];
    if (write) {
        ddl__cells_write(p, cells, begin, begin + bytes, step);
    } else {
        ddl__cells_read(p, cells, begin, begin + bytes, step);
    }
}

static void ddl__scope_apply(const ddl__scope *scope, ddl__step *step) {
    step->peer = step->peer >= 0 && scope->ranks != NULL ? scope->ranks[step->peer] : step->peer;
    if (step->src_space <= DDL__OUT) {
        step->src += scope->at[step->src_space];
        step->src_space = DDL__TMP;
    }
    if (step->dst_space <= DDL__OUT) {
        step->dst += scope->at[step->dst_space];
        step->dst_space = DDL__TMP;
    }
}

/* A step that reduces in place reads what it overwrites: writing orders it after all that reading would, and more. A
 * step that reads what it writes finds itself among the readers, which ddl__plan_after ignores. */
static uint32_t ddl__plan_add(ddl__planner *p, ddl__step step) {
    p->steps = p->status < 0 ? p->steps
                             : ddl__plan_grow(p, p->steps, p->step_count, &p->step_cap, sizeof *p->steps);
    if (p->status < 0) {
        return DDL__NO_STEP;
    }
    uint32_t index = p->step_count++;
    if (p->scope != NULL) {
        ddl__scope_apply(p->scope, &step);
    }
    p->steps[index] = step;
    if (step.kind == DDL__NATIVE || step.kind == DDL__FOLD) {
        return index; /* see ddl__plan_native, ddl__plan_fold */
    }
    if (step.kind != DDL__RECV) { /* what is moved out of scratch is averaged there: sends of it go before */
        bool changes = step.kind == DDL__MOVE && step.src_space == DDL__TMP;
        ddl__plan_touch(p, index, step.src_space, step.src, step.bytes, changes);
    }
    if (step.kind != DDL__SEND) {
        ddl__plan_touch(p, index, step.dst_space, step.dst, step.bytes, true);
    }
    return index;
}

/* Maps spans to a space: span.at + base is the offset there. Scratch holds only the part that is worked on. */
typedef struct ddl__place {
    ddl__space space;
    int64_t base;
} ddl__place;

static const ddl__place ddl__in = {DDL__IN, 0}, ddl__out = {DDL__OUT, 0};

/* The memory must not change until the step ends; the builder lets nobody write it before. */
static uint32_t ddl__plan_send(ddl__planner *p, int32_t peer, uint32_t slot, ddl__place src, ddl__span span) {
    return ddl__plan_add(p, (ddl__step){.kind = DDL__SEND,
                                        .peer = peer,
                                        .slot = slot,
                                        .src_space = (uint8_t)src.space,
                                        .src = span.at + src.base,
                                        .bytes = span.bytes});
}

/* The send of peer has the same slot and size. */
static uint32_t ddl__plan_recv(ddl__planner *p, int32_t peer, uint32_t slot, ddl__place dst, ddl__span span) {
    return ddl__plan_add(p, (ddl__step){.kind = DDL__RECV,
                                        .peer = peer,
                                        .slot = slot,
                                        .dst_space = (uint8_t)dst.space,
                                        .dst = span.at + dst.base,
                                        .bytes = span.bytes});
}

/* dst = src op what peer sent; flags DDL__THEIRS_FIRST turns the operands. */
static uint32_t ddl__plan_recv_reduce(ddl__planner *p, int32_t peer, uint32_t slot, ddl__place src, ddl__place dst,
                                      ddl__span span, uint8_t flags) {
    return ddl__plan_add(p, (ddl__step){.kind = DDL__RECV_REDUCE,
                                        .flags = flags,
                                        .peer = peer,
                                        .slot = slot,
                                        .src_space = (uint8_t)src.space,
                                        .dst_space = (uint8_t)dst.space,
                                        .src = span.at + src.base,
                                        .dst = span.at + dst.base,
                                        .bytes = span.bytes});
}

/* Steps without a message. */
static uint32_t ddl__plan_local(ddl__planner *p, ddl__step_kind kind, ddl__place src, ddl__place dst, ddl__span span,
                                uint8_t flags) {
    return ddl__plan_add(p, (ddl__step){.kind = (uint8_t)kind,
                                        .flags = flags,
                                        .peer = -1,
                                        .src_space = (uint8_t)src.space,
                                        .dst_space = (uint8_t)dst.space,
                                        .src = span.at + src.base,
                                        .dst = span.at + dst.base,
                                        .bytes = span.bytes});
}

/* A collective of the ranks of this host, by a transport. bytes are those of the smaller tensor, as in ddl_native_call;
 * it reads all of `from` and writes all of `to`. */
static uint32_t ddl__plan_native(ddl__planner *p, ddl_kind kind, int32_t root, ddl__place src, ddl__span from,
                                 ddl__place dst, ddl__span to) {
    uint32_t step = ddl__plan_add(p, (ddl__step){.kind = DDL__NATIVE,
                                                 .peer = root,
                                                 .slot = (uint32_t)kind,
                                                 .src_space = (uint8_t)src.space,
                                                 .dst_space = (uint8_t)dst.space,
                                                 .src = from.at + src.base,
                                                 .dst = to.at + dst.base,
                                                 .bytes = DDL__MIN(from.bytes, to.bytes)});
    if (step != DDL__NO_STEP) {
        ddl__plan_touch(p, step, (uint8_t)src.space, from.at + src.base, from.bytes, false);
        ddl__plan_touch(p, step, (uint8_t)dst.space, to.at + dst.base, to.bytes, true);
    }
    return step;
}

/* Between the blocks of a FOLD: aligned for any vector. */
static int64_t ddl__fold_room(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* count blocks that begin at `blocks` of THERE are reduced in their order. */
static uint32_t ddl__plan_fold(ddl__planner *p, int32_t count, int64_t blocks, ddl__place dst, ddl__span span) {
    uint32_t step = ddl__plan_add(p, (ddl__step){.kind = DDL__FOLD,
                                                 .peer = -1,
                                                 .slot = (uint32_t)count,
                                                 .src_space = DDL__THERE,
                                                 .dst_space = (uint8_t)dst.space,
                                                 .src = blocks,
                                                 .dst = span.at + dst.base,
                                                 .bytes = span.bytes});
    if (step != DDL__NO_STEP) {
        ddl__plan_touch(p, step, DDL__THERE, blocks, count * ddl__fold_room(span.bytes), false);
        ddl__plan_touch(p, step, (uint8_t)dst.space, span.at + dst.base, span.bytes, true);
    }
    return step;
}

/* Source and target may overlap, as with memmove. */
static uint32_t ddl__plan_copy(ddl__planner *p, ddl__place src, ddl__place dst, ddl__span span) {
    return ddl__plan_local(p, DDL__COPY, src, dst, span, 0);
}

/* dst = src op dst; flags DDL__DST_FIRST turns the operands. */
static uint32_t ddl__plan_reduce(ddl__planner *p, ddl__place src, ddl__place dst, ddl__span span, uint8_t flags) {
    return ddl__plan_local(p, DDL__REDUCE, src, dst, span, flags);
}

/* Scratch for a span, aligned for any vector. */
static ddl__place ddl__plan_tmp(ddl__planner *p, ddl__span span) {
    int64_t at = p->tmp_bytes;
    p->tmp_bytes += (span.bytes + 63) / 64 * 64;
    return (ddl__place){DDL__TMP, at - span.at};
}

/* The same on the device. */
static ddl__place ddl__plan_there(ddl__planner *p, int64_t bytes) {
    int64_t at = p->there_bytes;
    p->there_bytes += (bytes + 63) / 64 * 64;
    return (ddl__place){DDL__THERE, at};
}

/* count slots that no other phase of the plan uses. Every rank takes the same slots in the same order, also for
 * phases that it has no part in. */
static uint32_t ddl__plan_slots(ddl__planner *p, uint32_t count) {
    uint32_t first = p->next_slot;
    p->next_slot += count;
    return first;
}

/* What is sent before this rank knows that the receiver has called: see DDL__EAGER_BYTES. */
static void ddl__plan_at_once(ddl__planner *p, uint32_t send) {
    if (send != DDL__NO_STEP) {
        p->steps[send].flags = DDL__AT_ONCE;
    }
}

/* A step that does nothing and ends after all receives up to now: then this rank has heard of everybody it hears of. */
static uint32_t ddl__plan_join(ddl__planner *p) {
    uint32_t end = p->step_count;
    uint32_t join = ddl__plan_copy(p, ddl__in, ddl__out, (ddl__span){0, 0});
    for (uint32_t i = 0; i < end && p->status >= 0; i++) {
        if (p->steps[i].kind == DDL__RECV || p->steps[i].kind == DDL__RECV_REDUCE) {
            ddl__plan_after(p, join, i);
        }
    }
    return join;
}

/* Signals in ceil(log2 n) rounds, after which each rank knows that every rank has begun the operation: the
 * dissemination barrier of Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988. Round k
 * hears from rank + 2^k. Each round waits for the one before, which is what makes the knowledge add up. */
static void ddl__plan_fence(ddl__planner *p) {
    int32_t size = p->args->size, rank = p->args->rank;
    uint32_t rounds = ddl__log2_ceil(size), slot = ddl__plan_slots(p, rounds);
    uint32_t heard = DDL__NO_STEP;
    for (uint32_t k = 0; k < rounds; k++) {
        int32_t distance = (int32_t)(1u << k);
        ddl__span signal = {0, 0};
        ddl__plan_after(p, ddl__plan_send(p, (rank - distance + size) % size, slot + k, ddl__in, signal), heard);
        uint32_t recv = ddl__plan_recv(p, (rank + distance) % size, slot + k, ddl__out, signal);
        ddl__plan_after(p, recv, heard);
        heard = recv;
    }
    p->gate = heard;
    p->fenced = true;
}

/* The fence of what comes from one root: signals up a binomial tree, n - 1 in all. When the root has heard of everybody
 * it begins; its data brings the others word of everybody. */
static void ddl__plan_fence_up(ddl__planner *p) {
    int32_t size = p->args->size, root = p->args->root, v = (p->args->rank - root + size) % size, parent = v & (v - 1);
    uint32_t slot = ddl__plan_slots(p, 1);
    ddl__span signal = {0, 0};
    for (int64_t bit = 1; bit < size - v && (v & bit) == 0; bit *= 2) {
        ddl__plan_recv(p, (int32_t)((v + bit + root) % size), slot, ddl__out, signal);
    }
    uint32_t heard = p->step_count > 0 ? ddl__plan_join(p) : DDL__NO_STEP;
    if (v > 0) {
        ddl__plan_after(p, ddl__plan_send(p, (parent + root) % size, slot, ddl__in, signal), heard);
    } else {
        p->gate = heard;
    }
    p->fenced = true;
}

/* Steps that wait for nothing wait for the fence; then waits are counted. */
static void ddl__plan_count_waits(ddl__planner *p) {
    for (uint32_t i = 0; i < p->edge_count; i++) {
        p->steps[p->edges[i].after].waits++;
    }
    for (uint32_t i = p->gate == DDL__NO_STEP ? p->step_count : p->gate + 1; i < p->step_count; i++) {
        if (p->steps[i].waits == 0 && p->steps[i].flags != DDL__AT_ONCE) {
            ddl__plan_after(p, i, p->gate);
            p->steps[i].waits = 1;
        }
    }
}

/* Turns the edges into lists per step (compressed sparse rows) and hands the plan over; the planner is closed either
 * way. Errors: DDL_ERR_NOMEM. Free with ddl__plan_free. */
static ddl_status ddl__plan_finish(ddl__planner *p, ddl__plan *out) {
    *out = (ddl__plan){0};
    if (p->status >= 0) {
        ddl__plan_count_waits(p);
    }
    uint32_t *nexts = p->status < 0 ? NULL : ddl__alloc_array(p->base, DDL__MAX(p->edge_count, 1u), sizeof *nexts);
    if (nexts == NULL) {
        ddl__plan_close(p);
        return DDL_ERR_NOMEM;
    }
    for (uint32_t i = 0; i < p->edge_count; i++) {
        p->steps[p->edges[i].before].next_count++;
    }
    for (uint32_t i = 0, first = 0; i < p->step_count; i++) {
        p->steps[i].first_next = first;
        first += p->steps[i].next_count;
        p->steps[i].next_count = 0;
    }
    for (uint32_t i = 0; i < p->edge_count; i++) {
        ddl__step *before = &p->steps[p->edges[i].before];
        nexts[before->first_next + before->next_count++] = p->edges[i].after;
    }
    *out = (ddl__plan){.steps = p->steps,
                       .nexts = nexts,
                       .step_count = p->step_count,
                       .next_count = p->edge_count,
                       .tmp_bytes = p->tmp_bytes,
                       .there_bytes = p->there_bytes,
                       .fenced = p->fenced,
                       .straight = p->straight};
    p->steps = NULL;
    ddl__plan_close(p);
    return DDL_OK;
}

static void ddl__plan_free(ddl__base *base, ddl__plan *plan) {
    ddl__free(base, plan->steps);
    ddl__free(base, plan->nexts);
    *plan = (ddl__plan){0};
}

#endif /* DDL_PLAN_H */

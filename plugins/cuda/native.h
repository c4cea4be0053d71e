/* native: collectives by the GPUs' own loads and stores, for ranks that reach each other's GPU memory. No kernel waits
 * for another rank, as ranks that share a GPU take turns on it: the hosts do, who see that work has ended (mark.h) and tell
 * each other in words of their boards. One operation of a set runs at a time, in five steps:
 *
 *     ready     the input is there (an event on the user's stream), shared, and copied where it cannot be shared
 *     arrived   the arrival of every rank has been seen, with the same signature; nothing was written so far
 *     mapped    the memory that the others told of is in this GPU's address space, if this rank has work
 *     running   the launch of native_plan.h, or the rounds of native_ring.h; its end is told as `done`, and at once by
 *               ranks whose work rank 0 does on the GPU that they share
 *     done      all are done: the operation has ended, here and for what others read or wrote of it
 *
 * Because every rank waits for all to be done, the words of an arrival are free again for the next operation. Those of
 * a set that is closed stay until all have closed it, as some may still look for the last `done`. A rank that cancels
 * says so before it looks at who has launched, and a rank that launches says so before it looks at who has cancelled:
 * so either the launch does not happen, or the canceller waits for its end.
 *
 * An operation that is captured into a graph takes the same steps once, when it is captured: its launch is nodes of the
 * graph (capture.h), between which GPUs wait for each other at each replay. */
#ifndef CUDA_NATIVE_H
#define CUDA_NATIVE_H

#include "device.h"

#include "mark.h"

#include "native_ring.h"

#include "share.h"

#include "probe.h"

#include "capture.h"

enum { CUDA_ARRIVAL, CUDA_IN, CUDA_OUT, CUDA_STATE, CUDA_WORDS };   /* lines of a rank in a set */
enum { CUDA_SEQUENCE, CUDA_SIGNATURE, CUDA_FACTOR, CUDA_IN_PLACE, CUDA_WHICH_GPU }; /* words of CUDA_ARRIVAL */
/* Of CUDA_STATE: two sequences, two times 1, and which round of a ring has ended (cuda_round_word). */
enum { CUDA_LAUNCHED, CUDA_DONE, CUDA_CANCELLED, CUDA_LEFT, CUDA_ROUNDS };

#define CUDA_CANCEL_PATIENCE_NS 2000000000ull /* for launches that are under way when an operation is given up */

enum { CUDA_STUCK, CUDA_MOVED, CUDA_ENDED };
struct cuda_native;
struct cuda_op;
typedef int (*cuda_step)(struct cuda_native *set, struct cuda_op *op);

typedef struct cuda_op {
    ddl_native_call call;
    struct cuda_op *next;
    cuda_step step;
    cuda_gpu *gpu;
    cuda_mark mark;   /* that the step waits for */
    int32_t awaited;  /* rank in the set */
    int32_t differs;  /* this rank called something else; -1: none */
    ddl_status failure;
    bool ended;
    CUdeviceptr copy_in, copy_out; /* instead of the user's memory; 0: that itself is used */
    cuda_capture *capture;         /* NULL: it is not captured */
    cuda_job job;
    cuda_import *imports[3 * CUDA_PLACES];
    int32_t import_count;
    int32_t round; /* of a ring: so many have ended */
    bool round_runs;
} cuda_op;

typedef struct cuda_native {
    cuda_ipc *t;
    struct cuda_native *next;
    uint64_t group;
    int32_t count, rank;
    bool cancelled, left;
    cuda_set *own;
    cuda_op *head, **tail, *spare;
    CUstream stream; /* of the GPU of the operations so far */
    cuda_beacon *beacon; /* of that stream; NULL: none */
    cuda_gpu *stream_gpu;
    cuda_capture *captures; /* operations that are in graphs */
    uint64_t released_ns;
    cuda_links links;
    int32_t ranks[CUDA_PLACES]; /* world ranks */
    const cuda_set *sets[CUDA_PLACES]; /* their words; NULL: not found yet */
} cuda_native;

typedef struct cuda_natives {
    cuda_native *first;
} cuda_natives;

static void cuda_native_ring(const cuda_native *set) {
    for (int32_t j = 0; j < set->count; j++) {
        if (j != set->rank) {
            cuda_ring(set->t, set->ranks[j]);
        }
    }
}

/* The words of a rank; NULL: it has not opened the set, or they serve another one by now. */
static const cuda_set *cuda_native_words(cuda_native *set, int32_t j) {
    if (set->sets[j] == NULL) {
        set->sets[j] = cuda_set_of(set->t, set->ranks[j], set->group);
    }
    cuda_set *words = (cuda_set *)(uintptr_t)set->sets[j];
    /* acquire: with the words */
    return words != NULL && atomic_load_explicit(&words->group, memory_order_acquire) == set->group ? words : NULL;
}

/* What a rank says in its state; 0 from one without words. */
static uint64_t cuda_native_state(cuda_native *set, int32_t j, int32_t word) {
    const cuda_set *words = cuda_native_words(set, j);
    return words != NULL ? cuda_told(words, CUDA_STATE, word) : 0;
}

/* ---- the GPU ---- */

/* A stream of its own, so that an operation waits for nothing but its own work. */
static ddl_status cuda_native_stream(cuda_native *set, cuda_gpu *gpu) {
    if (set->stream_gpu == gpu) {
        return DDL_OK;
    }
    CUstream stream = NULL;
    ddl_status status = cuda_check(gpu, cuda_stream_make(gpu, &stream), "making a stream");
    if (status == DDL_OK && set->stream_gpu != NULL) { /* nothing is on it: one operation runs at a time */
        cuda_beacon_give(set->beacon);
        set->stream_gpu->cu.cuStreamDestroy(set->stream);
    }
    if (status == DDL_OK) {
        set->stream = stream;
        set->stream_gpu = gpu;
        set->beacon = set->count > 1 ? cuda_beacon_take(gpu) : NULL; /* a rank alone has nobody who launches beside it */
    }
    return status;
}

/* From now on the operation waits for what is on the set's stream. The context is current. */
static ddl_status cuda_op_mark(const cuda_native *set, cuda_op *op) {
    return cuda_mark_put(op->gpu, set->beacon, set->stream, &op->mark);
}

/* DDL_IN_PROGRESS until what was marked has happened. */
static ddl_status cuda_op_marked(cuda_op *op) { return cuda_mark_look(op->gpu, &op->mark); }

/* The same, where there are few looks. */
static ddl_status cuda_op_asked(cuda_op *op) {
    cuda_mark_ask_next(&op->mark);
    return cuda_op_marked(op);
}

static ddl_status cuda_op_memory(cuda_op *op, uint64_t bytes, CUdeviceptr *out) {
    void *memory = NULL;
    ddl_status status = cuda_device_alloc(op->gpu, (size_t)bytes, &memory);
    *out = (CUdeviceptr)(uintptr_t)memory;
    return status;
}

/* Of a captured one everything stays: graphs use it. */
static void cuda_op_keep(cuda_native *set, cuda_op *op) {
    cuda_capture *c = op->capture;
    c->copy_in = op->copy_in;
    c->copy_out = op->copy_out;
    memcpy(c->imports, op->imports, sizeof c->imports);
    c->import_count = op->import_count;
    c->next = set->captures;
    set->captures = c;
    op->capture = NULL;
    op->copy_in = op->copy_out = 0;
    op->import_count = 0;
}

static void cuda_op_release(cuda_native *set, cuda_op *op) {
    if (op->capture != NULL) {
        cuda_op_keep(set, op);
    }
    for (int32_t i = 0; i < op->import_count; i++) {
        cuda_let_go(set->t, op->imports[i]);
    }
    op->import_count = 0;
    cuda_device_free(op->gpu, (void *)(uintptr_t)op->copy_in);
    cuda_device_free(op->gpu, (void *)(uintptr_t)op->copy_out);
    op->copy_in = op->copy_out = 0;
}

static int cuda_op_fails(cuda_op *op, ddl_status status) {
    op->failure = status;
    return CUDA_STUCK;
}

/* ---- the steps, from the last to the first ---- */

static int cuda_copied_step(cuda_native *set, cuda_op *op) {
    ddl_status status = cuda_op_marked(op);
    if (status != DDL_OK) {
        return status == DDL_IN_PROGRESS ? CUDA_STUCK : cuda_op_fails(op, status);
    }
    cuda_op_release(set, op);
    return CUDA_ENDED;
}

static int cuda_done_step(cuda_native *set, cuda_op *op) {
    for (; op->awaited < set->count; op->awaited++) {
        if (cuda_native_state(set, op->awaited, CUDA_DONE) < op->call.sequence) {
            return CUDA_STUCK;
        }
    }
    if (op->copy_out != 0 && op->call.bytes > 0 && op->capture == NULL) {
        cuda_guard guard;
        ddl_status status = cuda_enter(op->gpu, &guard);
        if (status == DDL_OK) {
            size_t bytes = (size_t)cuda_job_out_bytes(&op->call, set->count);
            CUresult result = op->gpu->cu.cuMemcpyAsync((CUdeviceptr)(uintptr_t)op->call.out, op->copy_out, bytes,
                                                        set->stream);
            status = cuda_check(op->gpu, result, "copying the result of a collective");
            status = status == DDL_OK ? cuda_op_mark(set, op) : status;
            cuda_leave(&guard);
        }
        if (status != DDL_OK) {
            return cuda_op_fails(op, status);
        }
    }
    op->step = cuda_copied_step;
    return CUDA_MOVED;
}

static int cuda_running_step(cuda_native *set, cuda_op *op) {
    ddl_status status = cuda_op_marked(op);
    if (status != DDL_OK) {
        return status == DDL_IN_PROGRESS ? CUDA_STUCK : cuda_op_fails(op, status);
    }
    op->awaited = 0;
    op->step = cuda_done_step;
    cuda_tell(set->own, CUDA_STATE, CUDA_DONE, op->call.sequence);
    cuda_native_ring(set);
    return CUDA_MOVED;
}

/* Has anybody given up? Then nobody need wait for this rank, on which nothing is under way; the core hears of it from
 * whoever cancelled. */
static bool cuda_given_up(cuda_native *set, const cuda_op *op) {
    for (int32_t j = 0; j < set->count; j++) {
        if (cuda_native_state(set, j, CUDA_CANCELLED) != 0) {
            cuda_tell(set->own, CUDA_STATE, CUDA_LAUNCHED, op->call.sequence - 1);
            set->cancelled = true;
            return true;
        }
    }
    return false;
}

/* Says that it launches, and then looks whether anybody has given up: see the head of this file. */
static bool cuda_may_launch(cuda_native *set, const cuda_op *op) {
    cuda_tell(set->own, CUDA_STATE, CUDA_LAUNCHED, op->call.sequence);
    atomic_thread_fence(memory_order_seq_cst); /* launched, then cancelled; the canceller: cancelled, then launched */
    return !cuda_given_up(set, op);
}

/* Where this rank's work goes. */
static cuda_sink cuda_native_sink(const cuda_native *set, const cuda_op *op, CUstream stream) {
    cuda_sink sink = cuda_sink_of(op->gpu, stream);
    sink.copy = set->links.apart ? cuda_engine_copy : NULL;
    return sink;
}

/* The nodes of a graph: all wait for all, the launch, all wait for all, and the result to where it is to be. Around a
 * ring neighbours wait for each other before each round and after the last, on the two lines of words in turn, and an
 * even number of times, so that each replay begins with the first line. */
static ddl_status cuda_op_capture(cuda_native *set, cuda_op *op) {
    CUstream stream = op->call.stream;
    cuda_sink sink = cuda_native_sink(set, op, stream);
    int32_t rounds = set->links.is_ring ? cuda_ring_rounds(op->call.kind, op->call.bytes, set->count) : 1;
    ddl_status status = DDL_OK;
    for (int32_t i = 0; i < rounds + 1 + (rounds + 1) % 2 && status == DDL_OK; i++) {
        status = cuda_capture_meet(op->capture, stream, i % 2 == 0 ? CUDA_BEFORE : CUDA_AFTER, set->count, set->rank);
        if (status == DDL_OK && i < rounds) {
            status = set->links.is_ring ? cuda_ring_put(&sink, &op->job, &set->links, i)
                                        : cuda_job_put(&sink, &op->job);
        }
    }
    if (status == DDL_OK && op->copy_out != 0) {
        size_t bytes = (size_t)cuda_job_out_bytes(&op->call, set->count);
        CUresult result = op->gpu->cu.cuMemcpyAsync((CUdeviceptr)(uintptr_t)op->call.out, op->copy_out, bytes, stream);
        status = cuda_check(op->gpu, result, "capturing the copy of a result");
    }
    return status;
}

/* Puts the launch, or a round, on the set's stream. After a failure nothing of it is under way. */
static ddl_status cuda_op_launch(cuda_native *set, cuda_op *op) {
    cuda_sink sink = cuda_native_sink(set, op, set->stream);
    ddl_status status = set->links.is_ring ? cuda_ring_put(&sink, &op->job, &set->links, op->round)
                                           : cuda_job_put(&sink, &op->job);
    status = status == DDL_OK ? cuda_op_mark(set, op) : status;
    if (status != DDL_OK) {
        op->gpu->cu.cuStreamSynchronize(set->stream);
    }
    return status;
}

/* A launch failed: nobody need wait for it. */
static int cuda_launch_fails(cuda_native *set, cuda_op *op, ddl_status status) {
    cuda_tell(set->own, CUDA_STATE, CUDA_LAUNCHED, op->call.sequence - 1);
    return cuda_op_fails(op, status);
}

/* Rounds of operations, as one number that never falls. */
static uint64_t cuda_round_word(const cuda_op *op) { return op->call.sequence << 16 | (uint64_t)op->round; }

/* A neighbour in the ring that has not ended as many rounds as this rank; -1: both have. In the first round they have
 * arrived, which is enough. */
static int32_t cuda_round_awaits(cuda_native *set, const cuda_op *op) {
    for (int32_t way = -1; way <= 1 && op->round > 0; way += 2) {
        int32_t j = cuda_ring_neighbour(&set->links, set->count, set->rank, way);
        if (cuda_native_state(set, j, CUDA_ROUNDS) < cuda_round_word(op)) {
            return j;
        }
    }
    return -1;
}

static int cuda_ring_step(cuda_native *set, cuda_op *op) {
    cuda_guard guard;
    ddl_status status = cuda_op_marked(op);
    if (status != DDL_OK) {
        return status == DDL_IN_PROGRESS ? CUDA_STUCK : cuda_op_fails(op, status);
    }
    if (op->round_runs) {
        op->round_runs = false;
        op->round++;
        cuda_tell(set->own, CUDA_STATE, CUDA_ROUNDS, cuda_round_word(op));
        for (int32_t way = -1; way <= 1; way += 2) {
            cuda_ring(set->t, set->ranks[cuda_ring_neighbour(&set->links, set->count, set->rank, way)]);
        }
    }
    if (op->round >= cuda_ring_rounds(op->call.kind, op->call.bytes, set->count)) {
        op->step = cuda_running_step;
        return CUDA_MOVED;
    }
    int32_t awaited = cuda_round_awaits(set, op);
    if (cuda_given_up(set, op) || awaited >= 0) {
        op->awaited = awaited >= 0 ? awaited : op->awaited;
        return CUDA_STUCK;
    }
    status = cuda_enter(op->gpu, &guard);
    if (status == DDL_OK) {
        status = cuda_op_launch(set, op);
        cuda_leave(&guard);
    }
    op->round_runs = status == DDL_OK;
    return status == DDL_OK ? CUDA_MOVED : cuda_launch_fails(set, op, status);
}

static int cuda_launch_step(cuda_native *set, cuda_op *op) {
    cuda_guard guard;
    ddl_status status = DDL_OK;
    if (!cuda_may_launch(set, op)) {
        return CUDA_STUCK;
    }
    bool works = cuda_job_works(&op->job);
    bool rounds = works && set->links.is_ring && op->capture == NULL;
    if (works && !rounds) {
        status = cuda_enter(op->gpu, &guard);
        if (status == DDL_OK) {
            status = op->capture != NULL ? cuda_op_capture(set, op) : cuda_op_launch(set, op);
            cuda_leave(&guard);
        }
    }
    if (status != DDL_OK) {
        return cuda_launch_fails(set, op, status);
    }
    op->step = rounds ? cuda_ring_step : cuda_running_step;
    return CUDA_MOVED;
}

/* Bytes of the output that others touch: around a ring those of two partial sums. */
static uint64_t cuda_op_out_bytes(const cuda_native *set, const cuda_op *op) {
    return set->links.is_ring && op->call.kind == DDL_REDUCE_SCATTER ? 2 * op->call.bytes
                                                                     : cuda_job_out_bytes(&op->call, set->count);
}

static cuda_place cuda_told_place(const cuda_set *words, int32_t line) {
    return (cuda_place){cuda_told(words, line, 0), cuda_told(words, line, 1), cuda_told(words, line, 2)};
}

/* Maps what rank j told of its input or output, if it told of it. */
static ddl_status cuda_map_one(cuda_native *set, cuda_op *op, int32_t j, int32_t line, uint64_t bytes, char **out) {
    cuda_place place = cuda_told_place(set->sets[j], line);
    CUdeviceptr at = 0;
    if (*out != NULL || cuda_told(set->sets[j], line, 3) != op->call.sequence) {
        return DDL_OK;
    }
    ddl_status status = cuda_reach(set->t, set->ranks[j], &place, bytes, op->gpu, &op->imports[op->import_count], &at);
    if (status == DDL_OK) {
        op->import_count++;
        *out = (char *)(uintptr_t)at;
    }
    return status;
}

/* Whether a rank has both, and its output lies where its input does: that is mapped once. */
static bool cuda_told_twice(const cuda_set *words, const cuda_op *op, uint64_t in_bytes, uint64_t out_bytes) {
    cuda_place in = cuda_told_place(words, CUDA_IN), out = cuda_told_place(words, CUDA_OUT);
    uint64_t sequence = op->call.sequence;
    return cuda_told(words, CUDA_IN, 3) == sequence && cuda_told(words, CUDA_OUT, 3) == sequence &&
           out_bytes <= in_bytes && in.id == out.id && in.slot == out.slot && in.offset == out.offset;
}

/* Around a ring a rank reads memory of the one before it, and writes words of both neighbours where that is captured. */
static int cuda_mapped_step(cuda_native *set, cuda_op *op) {
    uint64_t in_bytes = cuda_job_in_bytes(&op->call, set->count), out_bytes = cuda_op_out_bytes(set, op);
    for (; op->awaited < set->count; op->awaited++) {
        int32_t j = op->awaited, n = set->count;
        char *in = (char *)(uintptr_t)op->job.in[j];
        bool before = j != set->rank && cuda_job_works(&op->job), near = before;
        if (set->links.is_ring) {
            before = j == cuda_ring_neighbour(&set->links, n, set->rank, -1);
            near = before || j == cuda_ring_neighbour(&set->links, n, set->rank, 1);
        }
        ddl_status status = before ? cuda_map_one(set, op, j, CUDA_IN, in_bytes, &in) : DDL_OK;
        op->job.in[j] = in;
        if (status == DDL_OK && before && cuda_told_twice(set->sets[j], op, in_bytes, out_bytes)) {
            op->job.out[j] = in;
        } else if (status == DDL_OK && before) {
            status = cuda_map_one(set, op, j, CUDA_OUT, out_bytes, &op->job.out[j]);
        }
        if (status == DDL_OK && near && op->capture != NULL) {
            status = cuda_map_one(set, op, j, CUDA_WORDS, CUDA_WORDS_BYTES, &op->capture->words_of[j]);
        }
        if (status != DDL_OK) {
            return status == DDL_IN_PROGRESS ? CUDA_STUCK : cuda_op_fails(op, status);
        }
    }
    op->step = cuda_launch_step;
    return CUDA_MOVED;
}

/* All capture an operation, or none does. */
static uint64_t cuda_op_signature(const cuda_op *op) {
    return op->capture != NULL ? ~op->call.signature : op->call.signature;
}

/* 64 bits of its UUID, for ranks to tell whether theirs is the same. */
static uint64_t cuda_which_gpu(const cuda_gpu *gpu) {
    uint64_t half[2];
    memcpy(half, &gpu->uuid, sizeof half);
    return half[0] ^ half[1];
}

/* Has everybody come, and with the same call? What is done together is settled here. */
static int cuda_arrived_step(cuda_native *set, cuda_op *op) {
    for (; op->awaited < set->count; op->awaited++) {
        const cuda_set *words = cuda_native_words(set, op->awaited);
        if (words == NULL || cuda_told(words, CUDA_ARRIVAL, CUDA_SEQUENCE) != op->call.sequence) {
            return CUDA_STUCK;
        }
        if (cuda_told(words, CUDA_ARRIVAL, CUDA_SIGNATURE) != cuda_op_signature(op)) {
            op->differs = op->awaited;
            return CUDA_STUCK;
        }
        uint64_t factor = cuda_told(words, CUDA_ARRIVAL, CUDA_FACTOR);
        memcpy(&op->job.factor[op->awaited], &factor, sizeof factor);
        op->job.has_factor = op->job.has_factor || op->job.factor[op->awaited] != 1;
        op->job.in_place = op->job.in_place || cuda_told(words, CUDA_ARRIVAL, CUDA_IN_PLACE) != 0;
        op->job.one_gpu = op->job.one_gpu && cuda_told(words, CUDA_ARRIVAL, CUDA_WHICH_GPU) == cuda_which_gpu(op->gpu);
    }
    op->awaited = 0;
    op->step = cuda_mapped_step;
    return CUDA_MOVED;
}

static void cuda_op_tell_place(cuda_native *set, const cuda_op *op, int32_t line, const cuda_place *place) {
    cuda_tell(set->own, line, 0, place->id);
    cuda_tell(set->own, line, 1, place->slot);
    cuda_tell(set->own, line, 2, place->offset);
    cuda_tell(set->own, line, 3, op->call.sequence);
}

/* Tells the others of memory that they will touch: *place. Memory that cannot be shared is replaced: *copy. */
static ddl_status cuda_op_share(cuda_native *set, cuda_op *op, int32_t line, const void *memory, uint64_t bytes,
                                CUdeviceptr *copy, cuda_place *place) {
    ddl_status status = *copy == 0 ? cuda_share(set->t, memory, bytes, place) : DDL_ERR_UNSUPPORTED;
    if (status == DDL_ERR_UNSUPPORTED) {
        status = *copy == 0 ? cuda_op_memory(op, bytes, copy) : DDL_OK;
        status = status == DDL_OK ? cuda_share(set->t, (void *)(uintptr_t)*copy, bytes, place) : status;
    }
    if (status == DDL_OK) {
        cuda_op_tell_place(set, op, line, place);
    }
    return status;
}

static int cuda_arrive_step(cuda_native *set, cuda_op *op) {
    uint64_t factor;
    double own = cuda_job_reduces(op->call.kind) && op->call.op == DDL_SUM ? op->call.factor : 1;
    ddl_status status = cuda_op_marked(op);
    if (status != DDL_OK) {
        return status == DDL_IN_PROGRESS ? CUDA_STUCK : cuda_op_fails(op, status);
    }
    memcpy(&factor, &own, sizeof factor);
    op->awaited = 0;
    op->step = cuda_arrived_step;
    cuda_tell(set->own, CUDA_ARRIVAL, CUDA_SIGNATURE, cuda_op_signature(op));
    cuda_tell(set->own, CUDA_ARRIVAL, CUDA_FACTOR, factor);
    cuda_tell(set->own, CUDA_ARRIVAL, CUDA_IN_PLACE, op->job.in_place);
    cuda_tell(set->own, CUDA_ARRIVAL, CUDA_WHICH_GPU, cuda_which_gpu(op->gpu));
    cuda_tell(set->own, CUDA_ARRIVAL, CUDA_SEQUENCE, op->call.sequence); /* last: with all the others */
    cuda_native_ring(set);
    return CUDA_MOVED;
}

/* Words for the graph, which others may write once the operation has arrived. */
static ddl_status cuda_op_prepare_capture(cuda_native *set, cuda_op *op) {
    cuda_capture *c = op->capture;
    cuda_place place;
    c->gpu = op->gpu;
    ddl_status status = cuda_capture_make(c, set->stream);
    status = status == DDL_OK ? cuda_op_mark(set, op) : status;
    status = status == DDL_OK ? cuda_share(set->t, (void *)(uintptr_t)c->words, CUDA_WORDS_BYTES, &place) : status;
    if (status == DDL_OK) {
        cuda_op_tell_place(set, op, CUDA_WORDS, &place);
    }
    return status;
}

/* Shares the memory, and copies what cannot be shared. A scan in place would overwrite what others read; a ring's
 * reduce-scatter has sums on their way that are nobody's result. */
static ddl_status cuda_op_prepare(cuda_native *set, cuda_op *op) {
    const ddl_native_call *call = &op->call;
    bool is_root = call->root == set->rank;
    bool scan = call->kind == DDL_SCAN || (call->kind == DDL_EXSCAN && set->rank > 0), ring = set->links.is_ring;
    bool apart = (scan && call->in == call->out) || (ring && call->kind == DDL_REDUCE_SCATTER);
    uint64_t in_bytes = cuda_job_in_bytes(call, set->count), out_bytes = cuda_op_out_bytes(set, op);
    cuda_place place = {0, 0, 0};
    bool served = op->job.one_gpu && set->rank > 0; /* if all are there, rank 0 reaches what this rank alone would */
    bool in_shared = ring     ? cuda_ring_in_shared(call->kind, is_root)
                     : served ? cuda_job_in_read(call->kind, is_root)
                              : cuda_job_in_shared(call->kind, is_root);
    bool out_shared = ring     ? cuda_ring_out_shared(call->kind, is_root)
                      : served ? cuda_job_out_written(call->kind, is_root)
                               : cuda_job_out_shared(call->kind, is_root);
    ddl_status status = cuda_native_stream(set, op->gpu);
    if (status == DDL_OK && op->capture != NULL) {
        status = cuda_op_prepare_capture(set, op);
    }
    if (status == DDL_OK && in_shared) {
        status = cuda_op_share(set, op, CUDA_IN, call->in, in_bytes, &op->copy_in, &place);
    }
    if (status == DDL_OK && apart) {
        status = cuda_op_memory(op, out_bytes, &op->copy_out);
    }
    bool as_in = in_shared && call->out == call->in && out_bytes <= in_bytes && op->copy_in == 0 && !apart;
    if (status == DDL_OK && out_shared && as_in) {
        cuda_op_tell_place(set, op, CUDA_OUT, &place);
    } else if (status == DDL_OK && out_shared) {
        status = cuda_op_share(set, op, CUDA_OUT, call->out, out_bytes, &op->copy_out, &place);
    }
    if (status == DDL_OK && op->copy_in != 0) {
        CUstream stream = op->capture != NULL ? (CUstream)call->stream : set->stream;
        CUresult result = op->gpu->cu.cuMemcpyAsync(op->copy_in, (CUdeviceptr)(uintptr_t)call->in, (size_t)in_bytes,
                                                    stream);
        status = cuda_check(op->gpu, result, "copying the input of a collective");
        status = status == DDL_OK && op->capture == NULL ? cuda_op_mark(set, op) : status;
    }
    op->job.in[set->rank] = op->copy_in != 0 ? (const char *)(uintptr_t)op->copy_in : call->in;
    op->job.out[set->rank] = op->copy_out != 0 ? (char *)(uintptr_t)op->copy_out : call->out;
    return status;
}

/* What the user put on the stream before has happened: the input is there. */
static int cuda_ready_step(cuda_native *set, cuda_op *op) {
    cuda_guard guard;
    ddl_status status = cuda_op_marked(op);
    if (status != DDL_OK) {
        return status == DDL_IN_PROGRESS ? CUDA_STUCK : cuda_op_fails(op, status);
    }
    if (op->call.kind != DDL_BARRIER && op->call.bytes > 0) {
        status = cuda_enter(op->gpu, &guard);
        if (status == DDL_OK) {
            status = cuda_op_prepare(set, op);
            cuda_leave(&guard);
        }
    }
    op->step = cuda_arrive_step;
    return status == DDL_OK ? CUDA_MOVED : cuda_op_fails(op, status);
}

/* ---- the queue ---- */

static int cuda_native_advance(cuda_native *set) {
    cuda_op *op = set->head;
    if (op == NULL || set->cancelled || op->differs >= 0 || op->failure != DDL_OK) {
        return CUDA_STUCK;
    }
    int what = op->step(set, op);
    if (what == CUDA_ENDED) {
        op->ended = true;
        set->head = op->next;
        set->tail = set->head == NULL ? &set->head : set->tail;
    }
    return what;
}

/* ---- for the core ---- */

/* About how long one takes: what hosts and launches take, and the bytes at 2 TB/s; around a ring that for each round, and
 * the bytes at 25 GB/s, as by PCIe. It is a formula, not a measurement; the same on all ranks. */
static uint64_t cuda_native_cost_ns(void *self, void *set_, int32_t kind, uint64_t bytes) {
    const cuda_native *set = set_;
    (void)self;
    if (kind < DDL_BARRIER || kind > DDL_EXSCAN || (set->links.is_ring && !cuda_ring_serves(kind))) {
        return 0;
    }
    if (set->links.is_ring) {
        uint64_t parts = kind == DDL_ALL_REDUCE ? 2 * (uint64_t)(set->count - 1) : (uint64_t)(set->count - 1);
        uint64_t moved = kind == DDL_ALL_REDUCE ? bytes / (uint64_t)set->count * parts
                         : kind == DDL_BROADCAST ? bytes : bytes * parts;
        return 10000 + 15000 * (uint64_t)cuda_ring_rounds(kind, bytes, set->count) + moved / 25;
    }
    return 10000 + 500 * (uint64_t)set->count + bytes * (uint64_t)set->count / 2000;
}

static ddl_status cuda_native_start(void *self, void *set_, const ddl_native_call *call, void **out_op) {
    cuda_native *set = set_;
    cuda_ipc *t = self;
    cuda_kernel kernel;
    if (set->cancelled || call->kind < DDL_BARRIER || call->kind > DDL_EXSCAN ||
        (set->links.is_ring && !cuda_ring_serves(call->kind)) ||
        (cuda_job_reduces(call->kind) && !cuda_reduce_kernel(call->dtype, call->op, &kernel))) {
        return DDL_ERR_UNSUPPORTED;
    }
    cuda_op *op = set->spare != NULL ? set->spare : t->host->alloc(t->host, sizeof *op);
    if (op == NULL) {
        return DDL_ERR_NOMEM;
    }
    set->spare = op == set->spare ? op->next : set->spare;
    memset(op, 0, sizeof *op);
    bool capture = call->size >= offsetof(ddl_native_call, event) && call->capture != 0;
    op->step = cuda_ready_step;
    op->differs = -1;
    size_t known = offsetof(ddl_native_call, event); /* what follows is looked at here */
    memcpy(&op->call, call, call->size < known ? call->size : known);
    op->job.call = op->call;
    op->job.count = set->count;
    op->job.rank = set->rank;
    op->job.in_place = call->in == call->out;
    op->job.one_gpu = !set->links.apart && !set->links.is_ring && !capture;
    ddl_status status = cuda_ipc_gpu(t, call->device > 0 ? call->device - 1 : 0, &op->gpu);
    op->mark = cuda_mark_of(DDL_HAS(call, event) ? call->event : NULL);
    cuda_guard guard;
    if (status == DDL_OK && capture) {
        op->capture = t->host->alloc(t->host, sizeof *op->capture);
        status = op->capture != NULL ? DDL_OK : DDL_ERR_NOMEM;
    }
    if (status == DDL_OK && set->count > 1 && !op->gpu->asked_beacons && cuda_enter(op->gpu, &guard) == DDL_OK) {
        cuda_beacons_need(op->gpu); /* here, as the caller's gate for this operation is not closed yet */
        cuda_leave(&guard);
    }
    if (op->capture != NULL) {
        memset(op->capture, 0, sizeof *op->capture);
    } else if (status == DDL_OK && call->stream != NULL && !cuda_mark_is_put(&op->mark) &&
               (status = cuda_enter(op->gpu, &guard)) == DDL_OK) {
        status = cuda_mark_put(op->gpu, NULL, call->stream, &op->mark);
        cuda_leave(&guard);
    }
    if (status != DDL_OK) {
        t->host->free(t->host, op->capture);
        op->next = set->spare;
        set->spare = op;
        return status;
    }
    *set->tail = op;
    set->tail = &op->next;
    if (set->head == op) {
        cuda_native_advance(set);
    }
    *out_op = op;
    return DDL_OK;
}

static ddl_status cuda_native_test(void *self, void *set_, void *op_, int32_t looks, int32_t *out_rank) {
    cuda_native *set = set_;
    cuda_op *op = op_;
    (void)self;
    while (!op->ended) {
        int what = cuda_native_advance(set);
        if (what == CUDA_STUCK && (op->differs >= 0 || op->failure != DDL_OK)) {
            *out_rank = op->differs;
            return op->differs >= 0 ? DDL_ERR_MISMATCH : op->failure;
        }
        if (--looks <= 0 && !op->ended) {
            bool for_ranks = op == set->head && !cuda_mark_is_put(&op->mark) && op->awaited < set->count;
            *out_rank = for_ranks ? op->awaited : -1;
            return DDL_IN_PROGRESS;
        }
    }
    op->next = set->spare;
    set->spare = op;
    return DDL_OK;
}

/* Waits for the set's own work, which waits for nobody. Neither cuStreamDestroy nor cuMemUnmap does. */
static void cuda_native_drain(cuda_native *set) {
    cuda_guard guard;
    if (set->stream_gpu != NULL && cuda_enter(set->stream_gpu, &guard) == DDL_OK) {
        set->stream_gpu->cu.cuStreamSynchronize(set->stream);
        cuda_leave(&guard);
    }
}

/* Waits until no GPU touches the buffers of an operation any more: this rank's own work, then that of ranks that
 * launched before they saw that it is given up. A launch takes as long as its bytes, and no rank begins another. */
static void cuda_native_settle(cuda_native *set, cuda_op *op) {
    cuda_ipc *t = set->t;
    uint64_t until = t->host->now_ns(t->host) + CUDA_CANCEL_PATIENCE_NS, sequence = op->call.sequence;
    struct timespec nap = {0, 50000};
    /* before it is ready the event is of the user's stream, and nothing of ours is under way */
    ddl_status status = op->step != cuda_ready_step ? cuda_op_asked(op) : DDL_OK;
    for (; status == DDL_IN_PROGRESS && t->host->now_ns(t->host) < until; status = cuda_op_asked(op)) {
        nanosleep(&nap, NULL);
    }
    /* what stands behind a long kernel, or was not seen to end, uses memory that must not be unmapped */
    if (op->step != cuda_ready_step && (status == DDL_IN_PROGRESS || op->failure != DDL_OK)) {
        cuda_native_drain(set);
        status = cuda_op_asked(op);
    }
    if (op->step == cuda_running_step && status == DDL_OK && op->failure == DDL_OK) {
        cuda_tell(set->own, CUDA_STATE, CUDA_DONE, sequence); /* others may wait here for this rank */
    } else if ((op->step == cuda_ring_step || op->step == cuda_running_step) && status != DDL_IN_PROGRESS) {
        cuda_tell(set->own, CUDA_STATE, CUDA_LAUNCHED, sequence - 1); /* likewise, and its result is not complete */
    }
    for (int32_t j = 0; j < set->count; j++) {
        bool other = j != set->rank && !t->peers[set->ranks[j]].dead;
        while (other && cuda_native_state(set, j, CUDA_LAUNCHED) >= sequence &&
               cuda_native_state(set, j, CUDA_DONE) < sequence) {
            if (t->host->now_ns(t->host) >= until) {
                cuda_log(t->host, DDL_LOG_WARN, "rank %d does not say that its GPU is done with memory of rank %d, "
                         "whose operation was given up: it may still read or write it", set->ranks[j], t->rank);
                break;
            }
            nanosleep(&nap, NULL);
        }
    }
}

static void cuda_native_unqueue(cuda_native *set, const cuda_op *op) {
    cuda_op **at = &set->head;
    while (*at != NULL && *at != op) {
        at = &(*at)->next;
    }
    if (*at != NULL) {
        *at = op->next;
        set->tail = op->next == NULL ? at : set->tail;
    }
}

static void cuda_native_cancel(void *self, void *set_, void *op_) {
    cuda_native *set = set_;
    cuda_op *op = op_;
    (void)self;
    set->cancelled = true;
    cuda_tell(set->own, CUDA_STATE, CUDA_CANCELLED, 1);
    atomic_thread_fence(memory_order_seq_cst); /* cancelled, then launched: see cuda_may_launch */
    cuda_native_ring(set);
    if (op == set->head) {
        cuda_native_settle(set, op);
    }
    cuda_native_unqueue(set, op);
    cuda_op_release(set, op);
    cuda_mark_drop(op->gpu, &op->mark);
    op->next = set->spare;
    set->spare = op;
}

/* ---- closing ---- */

static void cuda_native_free(cuda_native *set) {
    cuda_guard guard;
    while (set->spare != NULL) {
        cuda_op *op = set->spare;
        set->spare = op->next;
        set->t->host->free(set->t->host, op);
    }
    cuda_native_drain(set);
    if (set->stream_gpu != NULL && cuda_enter(set->stream_gpu, &guard) == DDL_OK) {
        cuda_beacon_give(set->beacon);
        set->stream_gpu->cu.cuStreamDestroy(set->stream);
        cuda_leave(&guard);
    }
    while (set->captures != NULL) {
        cuda_capture *c = set->captures;
        set->captures = c->next;
        cuda_capture_free(set->t, c);
    }
    set->t->host->free(set->t->host, set);
}

/* May the words of a set that is closed here be used for another one? Not while a rank may look for the last `done`. A
 * rank whose words are gone has closed it, or never looked. */
static bool cuda_native_forgotten(cuda_native *set) {
    for (int32_t j = 0; j < set->count; j++) {
        if (j != set->rank && !set->t->peers[set->ranks[j]].dead && cuda_native_words(set, j) != NULL &&
            cuda_native_state(set, j, CUDA_LEFT) == 0) {
            return false;
        }
    }
    return true;
}

/* Frees sets that all ranks have closed; at the end `all` of them, with the words left as they are for the others. */
static void cuda_natives_reclaim(cuda_ipc *t, bool all) {
    cuda_native **at = t->natives != NULL ? &t->natives->first : NULL;
    while (at != NULL && *at != NULL) {
        cuda_native *set = *at;
        if (all || (set->left && cuda_native_forgotten(set))) {
            *at = set->next;
            if (!all) { /* at the end the words stay as they are: peers may still look, in their mappings of the board */
                cuda_set_end(set->own);
            }
            cuda_native_free(set);
        } else {
            at = &set->next;
        }
    }
}

static void cuda_native_close(void *self, void *set_) {
    cuda_native *set = set_;
    set->left = true;
    cuda_tell(set->own, CUDA_STATE, CUDA_LEFT, 1);
    cuda_natives_reclaim(self, false);
}

/* ---- opening ---- */

static ddl_status cuda_native_open(void *self, uint64_t group, const int32_t *ranks, int32_t count, int32_t rank,
                                   void **out_set) {
    cuda_ipc *t = self;
    if (count < 1 || count > CUDA_PLACES) {
        return DDL_ERR_UNSUPPORTED;
    }
    for (int32_t j = 0; j < count; j++) {
        if (t->peers[ranks[j]].board == NULL || t->peers[ranks[j]].dead || t->peers[ranks[j]].failed) {
            return DDL_ERR_UNSUPPORTED;
        }
    }
    cuda_links links;
    if (cuda_probe_set(t, ranks, count, rank, &links) != DDL_OK) { /* all ranks use plans then: the core sees to it */
        return DDL_ERR_UNSUPPORTED;
    }
    cuda_natives_reclaim(t, false);
    if (t->natives == NULL && (t->natives = t->host->alloc(t->host, sizeof *t->natives)) != NULL) {
        t->natives->first = NULL;
    }
    cuda_native *set = t->natives != NULL ? t->host->alloc(t->host, sizeof *set) : NULL;
    if (set == NULL) {
        return DDL_ERR_NOMEM;
    }
    memset(set, 0, sizeof *set);
    *set = (cuda_native){.t = t, .group = group + 1, .count = count, .rank = rank, .links = links};
    memcpy(set->ranks, ranks, (size_t)count * sizeof *ranks);
    set->tail = &set->head;
    set->own = cuda_set_begin(t, set->group);
    if (set->own == NULL) { /* so many groups: this one uses plans */
        t->host->free(t->host, set);
        return DDL_ERR_UNSUPPORTED;
    }
    set->next = t->natives->first;
    t->natives->first = set;
    *out_set = set;
    return DDL_OK;
}

/* ---- for the endpoint ---- */

/* Of a set that has lost a rank, or given up. */
static void cuda_native_release_graphs(cuda_native *set) {
    bool broken = set->cancelled;
    for (int32_t j = 0; j < set->count; j++) {
        broken = broken || set->t->peers[set->ranks[j]].dead;
    }
    uint64_t now = broken ? set->t->host->now_ns(set->t->host) : 0;
    if (broken && now - set->released_ns >= CUDA_RELEASE_NS) {
        set->released_ns = now;
        for (const cuda_capture *c = set->captures; c != NULL; c = c->next) {
            cuda_capture_release(c);
        }
    }
}

/* Moves the first operation of each set. Returns how many events there were. */
static int32_t cuda_natives_progress(cuda_ipc *t) {
    int32_t events = 0;
    for (cuda_native *set = t->natives == NULL ? NULL : t->natives->first; set != NULL; set = set->next) {
        for (int32_t k = 0; k < 8 && cuda_native_advance(set) != CUDA_STUCK; k++) {
            events++;
        }
        if (set->captures != NULL) {
            cuda_native_release_graphs(set);
        }
    }
    return events;
}

/* The next look at each set asks the driver. */
static void cuda_natives_ask_next(cuda_ipc *t) {
    for (cuda_native *set = t->natives == NULL ? NULL : t->natives->first; set != NULL; set = set->next) {
        if (set->head != NULL) {
            cuda_mark_ask_next(&set->head->mark);
        }
    }
}

static void cuda_natives_close(cuda_ipc *t) {
    cuda_natives_reclaim(t, true);
    t->host->free(t->host, t->natives);
    t->natives = NULL;
}

#endif /* CUDA_NATIVE_H */

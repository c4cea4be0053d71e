/* native_plan: what a rank's GPU does in a collective whose inputs and outputs all ranks reach: one launch, or copies.
 * Reductions read all inputs in rank order, so that every element has the same bits on all ranks, whoever made it.
 * It must not know when an operation may begin, or how ranks find each other's memory.
 *
 *     small, nobody in place   each rank reduces all of the inputs into its own output (one-shot)
 *     all_reduce, reduce       rank r reduces slice r of all inputs and stores it in every output (two-shot: a
 *                              reduce-scatter by loads and an all-gather by stores, without a wait in between)
 *     broadcast                rank r copies slice r from the root to all: each link carries a share
 *     all_to_all               of a pair of ranks one exchanges both parts, word by word: that is good in place too
 *     large copies             all_gather, broadcast, gather, scatter, all_to_all out of place: by copy engines
 *
 * Ranks whose tensors are all on one GPU leave the work of all to the first of them, in launches that serve all ranks:
 * processes take turns on a GPU, and a turn takes longer than a small operation.
 *
 * In place is safe where each element of an input is read by the thread that overwrites it, and by no other: that is so
 * for slices, and not for scans, whose results go to other memory first. */
#ifndef CUDA_NATIVE_PLAN_H
#define CUDA_NATIVE_PLAN_H

#include "launch.h"

#define CUDA_ONE_SHOT_BYTES (32u << 10) /* up to here every rank reads everything */
#define CUDA_ENGINE_BYTES (4u << 20)    /* from here on a copy between GPUs is worth the start of a copy engine */
#define CUDA_SLICE_LEAST 4096u          /* bytes; smaller data is one rank's work */
#define CUDA_SLICE_UNIT 512u            /* slices are multiples of it: whole words, whole elements */

/* One operation as all ranks see it, in the addresses of this rank's GPU. */
typedef struct cuda_job {
    ddl_native_call call;
    int32_t count, rank;
    bool in_place;   /* of any rank */
    bool one_gpu;    /* all tensors are on one: rank 0 does the work of all */
    bool has_factor; /* likewise */
    const char *in[CUDA_PLACES];
    char *out[CUDA_PLACES];
    double factor[CUDA_PLACES]; /* what each rank's input is multiplied by */
} cuda_job;

static bool cuda_job_reduces(int32_t kind) {
    return kind == DDL_REDUCE || kind == DDL_ALL_REDUCE || kind == DDL_REDUCE_SCATTER || kind == DDL_SCAN ||
           kind == DDL_EXSCAN;
}

/* Whose input, and whose output, some other rank touches: what has to be shared. */
static bool cuda_job_in_shared(int32_t kind, bool is_root) {
    return cuda_job_reduces(kind) || kind == DDL_ALL_TO_ALL ||
           ((kind == DDL_BROADCAST || kind == DDL_SCATTER) && is_root);
}
static bool cuda_job_out_shared(int32_t kind, bool is_root) {
    return kind == DDL_ALL_REDUCE || kind == DDL_ALL_GATHER || kind == DDL_ALL_TO_ALL || kind == DDL_BROADCAST ||
           ((kind == DDL_REDUCE || kind == DDL_GATHER) && is_root);
}
/* The same where rank 0 does the work of all: what an operation reads and writes. */
static bool cuda_job_in_read(int32_t kind, bool is_root) {
    return cuda_job_in_shared(kind, is_root) || kind == DDL_ALL_GATHER || kind == DDL_GATHER;
}
static bool cuda_job_out_written(int32_t kind, bool is_root) {
    return cuda_job_out_shared(kind, is_root) || kind == DDL_REDUCE_SCATTER || kind == DDL_SCATTER ||
           kind == DDL_SCAN || kind == DDL_EXSCAN;
}
/* Bytes behind in and out. */
static uint64_t cuda_job_in_bytes(const ddl_native_call *call, int32_t count) {
    bool parts = call->kind == DDL_SCATTER || call->kind == DDL_REDUCE_SCATTER || call->kind == DDL_ALL_TO_ALL;
    return parts ? call->bytes * (uint64_t)count : call->bytes;
}
static uint64_t cuda_job_out_bytes(const ddl_native_call *call, int32_t count) {
    bool parts = call->kind == DDL_GATHER || call->kind == DDL_ALL_GATHER || call->kind == DDL_ALL_TO_ALL;
    return parts ? call->bytes * (uint64_t)count : call->bytes;
}

/* A slice of the bytes of a job, one for each rank: [*at, *at + result). On one GPU the first is all. */
static uint64_t cuda_job_slice(const cuda_job *job, int32_t slice, uint64_t *at) {
    if (job->one_gpu) {
        *at = 0;
        return slice == 0 ? job->call.bytes : 0;
    }
    uint64_t n = (uint64_t)job->count, bytes = job->call.bytes, each = (bytes + n - 1) / n;
    each = (each + CUDA_SLICE_UNIT - 1) / CUDA_SLICE_UNIT * CUDA_SLICE_UNIT;
    each = each < CUDA_SLICE_LEAST ? CUDA_SLICE_LEAST : each;
    *at = each * (uint64_t)slice < bytes ? each * (uint64_t)slice : bytes;
    return bytes - *at < each ? bytes - *at : each;
}

/* Sources of a reduction: inputs, each with its rank's factor, of which the first may be reduced in part already. */
typedef struct cuda_fold {
    const void *src[CUDA_PLACES];
    double factor[CUDA_PLACES];
    int32_t count;
    bool is_partial, is_last; /* is_last: what comes out is the result, and an average is divided */
} cuda_fold;

static ddl_status cuda_job_fold(const cuda_sink *sink, const cuda_job *job, cuda_fold *fold, void *const *dsts,
                                int32_t dst_count, uint64_t bytes) {
    const ddl_native_call *call = &job->call;
    cuda_reduction what = {call->dtype, call->op, job->has_factor, 0, fold->factor};
    if (call->op == DDL_AVG) { /* a division rounds like the host's; see ddl__averages_scaled */
        double scale = 1, divisor = call->factor > 0 ? (double)(int32_t)(1 / call->factor + 0.5) : 0;
        bool small = call->dtype == DDL_F16 || call->dtype == DDL_E4M3 || call->dtype == DDL_E5M2;
        what.has_factor = small && divisor > 1;
        while (what.has_factor && divisor > 1) {
            scale /= 2;
            divisor /= 2;
        }
        for (int32_t j = 0; j < fold->count; j++) {
            fold->factor[j] = scale;
        }
        what.divisor = fold->is_last ? divisor : 0;
    }
    fold->factor[0] = fold->is_partial ? 1 : fold->factor[0];
    return cuda_put_reduce(sink, &what, dsts, dst_count, fold->src, fold->count,
                           (int64_t)(bytes / (uint64_t)call->element_bytes));
}

/* dsts = the inputs [0, hi), reduced: bytes [at, at + bytes) of each, from part `part` on. */
static ddl_status cuda_job_reduce(const cuda_sink *sink, const cuda_job *job, char *const *dsts, int32_t dst_count,
                                  int32_t hi, uint64_t part, uint64_t at, uint64_t bytes) {
    cuda_fold fold = {.count = hi, .is_last = true};
    void *to[CUDA_PLACES];
    for (int32_t j = 0; j < hi; j++) {
        fold.src[j] = job->in[j] + part + at;
        fold.factor[j] = job->factor[j];
    }
    for (int32_t j = 0; j < dst_count; j++) {
        to[j] = dsts[j] + at;
    }
    return cuda_job_fold(sink, job, &fold, to, dst_count, bytes);
}

/* Copies go by the GPU's copy engines where ranks are on several GPUs and there is much to copy: links are full with
 * them, and multiprocessors stay free for the program's kernels. Within one GPU kernels are better: they read once. */
static bool cuda_by_engines(const cuda_sink *sink, uint64_t bytes) {
    return sink->copy != NULL && bytes >= CUDA_ENGINE_BYTES;
}

/* Copies to every destination that is not the source itself. */
static ddl_status cuda_job_spread(const cuda_sink *sink, const cuda_job *job, const char *from, uint64_t to_at,
                                  uint64_t bytes) {
    void *to[CUDA_PLACES];
    int32_t n = 0;
    ddl_status status = DDL_OK;
    for (int32_t k = 1; k <= job->count; k++) { /* from the next rank on: not all of them to one at a time */
        int32_t j = (job->rank + k) % job->count;
        if (job->out[j] + to_at != from) {
            to[n++] = job->out[j] + to_at;
        }
    }
    if (cuda_by_engines(sink, bytes)) {
        for (int32_t k = 0; k < n && status == DDL_OK; k++) {
            status = sink->copy(sink, to[k], from, bytes);
        }
        return status;
    }
    return n > 0 ? cuda_put_copy(sink, to, n, from, (int64_t)bytes) : DDL_OK;
}

static ddl_status cuda_job_one(const cuda_sink *sink, char *to, const char *from, uint64_t bytes) {
    void *dst = to;
    return to == from || bytes == 0       ? DDL_OK
           : cuda_by_engines(sink, bytes) ? sink->copy(sink, to, from, bytes)
                                          : cuda_put_copy(sink, &dst, 1, from, (int64_t)bytes);
}

static ddl_status cuda_job_all_to_all(const cuda_sink *sink, const cuda_job *job) {
    cuda_pair pairs[CUDA_PLACES];
    uint64_t bytes = job->call.bytes, r = (uint64_t)job->rank;
    int32_t n = 0;
    ddl_status status = DDL_OK;
    if (cuda_by_engines(sink, bytes) && !job->in_place) {
        for (int32_t k = 1; k <= job->count && status == DDL_OK; k++) {
            int32_t j = (job->rank + k) % job->count;
            status = cuda_job_one(sink, job->out[j] + r * bytes, job->in[r] + (uint64_t)j * bytes, bytes);
        }
        return status;
    }
    for (int32_t j = 0; j < job->count; j++) {
        bool mine = j > job->rank ? (j + job->rank) % 2 == 0 : (j + job->rank) % 2 != 0; /* half of the pairs each */
        const char *from = job->in[r] + (uint64_t)j * bytes;
        if (j == job->rank && from != job->out[r] + r * bytes) {
            pairs[n++] = (cuda_pair){{from, NULL}, {job->out[r] + r * bytes, NULL}, {(int64_t)bytes, 0, 0, 0}};
        } else if (j != job->rank && mine) {
            pairs[n++] = (cuda_pair){{from, job->in[j] + r * bytes},
                                     {job->out[j] + r * bytes, job->out[r] + (uint64_t)j * bytes},
                                     {(int64_t)bytes, 0, 0, 0}};
        }
    }
    return cuda_put_exchange(sink, pairs, n);
}

static ddl_status cuda_job_all_reduce(const cuda_sink *sink, const cuda_job *job) {
    bool one_shot = job->call.bytes <= CUDA_ONE_SHOT_BYTES && !job->in_place && !job->one_gpu;
    bool to_root = job->call.kind == DDL_REDUCE;
    char *const *dsts = to_root ? &job->out[job->call.root] : job->out;
    uint64_t at = 0, bytes = job->call.bytes;
    if (one_shot && to_root && job->rank != job->call.root) {
        return DDL_OK;
    }
    if (one_shot) {
        dsts = &job->out[job->rank];
    } else {
        bytes = cuda_job_slice(job, job->rank, &at);
    }
    return cuda_job_reduce(sink, job, dsts, one_shot || to_root ? 1 : job->count, job->count, 0, at, bytes);
}

/* The part of one rank. */
static ddl_status cuda_job_put_part(const cuda_sink *sink, const cuda_job *job) {
    uint64_t bytes = job->call.bytes, at = 0, own = (uint64_t)job->rank * bytes;
    int32_t r = job->rank, root = job->call.root;
    if (bytes == 0) {
        return DDL_OK;
    }
    switch (job->call.kind) {
    case DDL_ALL_REDUCE:
    case DDL_REDUCE: return cuda_job_all_reduce(sink, job);
    case DDL_REDUCE_SCATTER: return cuda_job_reduce(sink, job, &job->out[r], 1, job->count, own, 0, bytes);
    case DDL_SCAN: return cuda_job_reduce(sink, job, &job->out[r], 1, r + 1, 0, 0, bytes);
    case DDL_EXSCAN: return r == 0 ? DDL_OK : cuda_job_reduce(sink, job, &job->out[r], 1, r, 0, 0, bytes);
    case DDL_ALL_GATHER: return cuda_job_spread(sink, job, job->in[r], own, bytes);
    case DDL_BROADCAST: bytes = cuda_job_slice(job, job->rank, &at);
        return cuda_job_spread(sink, job, job->in[root] + at, at, bytes);
    case DDL_GATHER: return cuda_job_one(sink, job->out[root] + own, job->in[r], bytes);
    case DDL_SCATTER: return cuda_job_one(sink, job->out[r], job->in[root] + own, bytes);
    case DDL_ALL_TO_ALL: return cuda_job_all_to_all(sink, job);
    default: return DDL_OK; /* a barrier */
    }
}

/* Whether this rank's GPU has work of it. */
static bool cuda_job_works(const cuda_job *job) {
    return job->call.kind != DDL_BARRIER && job->call.bytes > 0 && !(job->one_gpu && job->rank > 0);
}

/* This rank's launch, or those of all. */
static ddl_status cuda_job_put(const cuda_sink *sink, const cuda_job *job) {
    cuda_job part = *job;
    int32_t end = job->one_gpu ? job->count : job->rank + 1;
    ddl_status status = DDL_OK;
    for (; part.rank < end && cuda_job_works(job) && status == DDL_OK; part.rank++) {
        status = cuda_job_put_part(sink, &part);
    }
    return status;
}

#endif /* CUDA_NATIVE_PLAN_H */

/* native_ring: collectives around a ring of GPUs, for hosts where not all of them reach all. In each round a rank reads
 * from the one before it, and from no other; it begins one when both neighbours have ended the round before
 * (native.h, or stream memory operations in a graph). In places of the ring (n ranks, parts of 1/n):
 *
 *     reduce-scatter  n - 1 rounds: in round s place p adds its own part p - 2 - s to what p - 1 has of it, so that p
 *                     ends with part p; each element is reduced once, and all ranks have the same bits
 *     all-gather      n - 1 rounds: in round s place p copies part p - 1 - s
 *     all_reduce      both: 2 (n - 1) / n of the tensor over each link (Patarasu and Yuan, "Bandwidth optimal
 *                     all-reduce algorithms")
 *     broadcast       pieces, one behind the other: place d behind the root copies piece s - d + 1 in round s
 *
 * What a round overwrites nobody reads any more: a part comes around only when all have read what stood there, and the
 * two places of a reduce-scatter's sums are used in turn. It must not know when a round may begin. */
#ifndef CUDA_NATIVE_RING_H
#define CUDA_NATIVE_RING_H

#include "links.h"

#include "native_plan.h"

#define CUDA_RING_PIECE (4u << 20) /* bytes of a broadcast's pieces, or more: they hide the wait between rounds */
#define CUDA_RING_PIECES 64u

static bool cuda_ring_serves(int32_t kind) {
    return kind == DDL_BARRIER || kind == DDL_ALL_REDUCE || kind == DDL_REDUCE_SCATTER || kind == DDL_ALL_GATHER ||
           kind == DDL_BROADCAST;
}

/* Whose input, and whose output, the next rank reads. */
static bool cuda_ring_in_shared(int32_t kind, bool is_root) { return kind != DDL_BROADCAST || is_root; }
static bool cuda_ring_out_shared(int32_t kind, bool is_root) { return kind != DDL_BROADCAST || !is_root; }

static uint64_t cuda_ring_piece(uint64_t bytes) {
    uint64_t each = (bytes + CUDA_RING_PIECES - 1) / CUDA_RING_PIECES;
    each = (each + CUDA_SLICE_UNIT - 1) / CUDA_SLICE_UNIT * CUDA_SLICE_UNIT;
    return each > CUDA_RING_PIECE ? each : CUDA_RING_PIECE;
}

static int32_t cuda_ring_rounds(int32_t kind, uint64_t bytes, int32_t count) {
    uint64_t pieces = (bytes + cuda_ring_piece(bytes) - 1) / cuda_ring_piece(bytes);
    switch (kind) {
    case DDL_ALL_REDUCE: return 2 * (count - 1);
    case DDL_REDUCE_SCATTER:
    case DDL_ALL_GATHER: return count - 1;
    case DDL_BROADCAST: return count - 2 + (int32_t)pieces;
    default: return 0;
    }
}

/* Who is where, as this rank needs it. */
typedef struct cuda_ring_at {
    int32_t place, before; /* its own; the rank before it */
    const cuda_links *links;
} cuda_ring_at;

static int32_t cuda_ring_part(const cuda_job *job, const cuda_ring_at *at, int32_t place) {
    return at->links->rank[(place % job->count + job->count) % job->count];
}

/* Round s of a reduce-scatter: all_reduce's in out, its own in two places of `bytes`, in the first of which it ends. */
static ddl_status cuda_ring_reduce(const cuda_sink *sink, const cuda_job *job, const cuda_ring_at *at, int32_t s) {
    int32_t part = cuda_ring_part(job, at, at->place - 2 - s), r = job->rank;
    bool whole = job->call.kind == DDL_ALL_REDUCE, first = s == 0, last = s == job->count - 2;
    uint64_t bytes = job->call.bytes, from = (uint64_t)part * bytes; /* where the part is in the input, ... */
    bytes = whole ? cuda_job_slice(job, part, &from) : bytes;
    uint64_t turn = (uint64_t)(job->count - 2 - s) & 1; /* ... and in the output */
    uint64_t to = whole ? from : turn * bytes, was = whole ? from : (1 - turn) * bytes;
    cuda_fold fold = {.count = 2, .is_partial = !first, .is_last = last};
    fold.src[0] = first ? job->in[at->before] + from : job->out[at->before] + was;
    fold.src[1] = job->in[r] + from;
    fold.factor[0] = job->factor[at->before];
    fold.factor[1] = job->factor[r];
    void *dst = job->out[r] + to;
    return bytes > 0 ? cuda_job_fold(sink, job, &fold, &dst, 1, bytes) : DDL_OK;
}

/* This rank's work in a round. */
static ddl_status cuda_ring_put(const cuda_sink *sink, const cuda_job *job, const cuda_links *links, int32_t round) {
    int32_t n = job->count, r = job->rank, kind = job->call.kind, place = links->place[r];
    const cuda_ring_at at = {place, links->rank[(place + n - 1) % n], links};
    uint64_t from = 0, bytes = job->call.bytes;
    if (kind == DDL_REDUCE_SCATTER || (kind == DDL_ALL_REDUCE && round < n - 1)) {
        return cuda_ring_reduce(sink, job, &at, round);
    }
    if (kind == DDL_ALL_REDUCE) {
        bytes = cuda_job_slice(job, cuda_ring_part(job, &at, place - 1 - (round - (n - 1))), &from);
        return cuda_job_one(sink, job->out[r] + from, job->out[at.before] + from, bytes);
    }
    if (kind == DDL_ALL_GATHER) {
        uint64_t part = (uint64_t)cuda_ring_part(job, &at, place - 1 - round) * bytes;
        const char *source = round == 0 ? job->in[at.before] : job->out[at.before] + part;
        char *own = job->out[r] + (uint64_t)r * bytes;
        ddl_status status = round == 0 ? cuda_job_one(sink, own, job->in[r], bytes) : DDL_OK;
        return status == DDL_OK ? cuda_job_one(sink, job->out[r] + part, source, bytes) : status;
    }
    int32_t behind = (place - links->place[job->call.root] + n) % n; /* a broadcast */
    int64_t piece = (int64_t)round - behind + 1;
    from = (uint64_t)piece * cuda_ring_piece(bytes);
    if (behind == 0 || piece < 0 || from >= bytes) {
        return DDL_OK;
    }
    const char *source = behind == 1 ? job->in[at.before] : job->out[at.before];
    bytes = bytes - from < cuda_ring_piece(bytes) ? bytes - from : cuda_ring_piece(bytes);
    return cuda_job_one(sink, job->out[r] + from, source + from, bytes);
}

#endif /* CUDA_NATIVE_RING_H */

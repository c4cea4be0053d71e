/* compress/reduce: compressed all-reduce: each kind's way through the collectives of a group.
 * Must not know: trainers, buckets, schedules.
 *
 *     ddl__compressor c;
 *     ddl__compressor_init(sentence, &c, &config, tensor, rows, cols, group size)     checks, computes c.bytes
 *     ddl__compressor_place(&c, zeroed memory of c.bytes, aligned to 64)              the caller's, until it is done
 *     ddl__compressed_all_reduce(&c, group, step, grad)                               blocks
 *
 * or, without blocking:
 *
 *     ddl__compressed_code(&c, group, step, grad);        on a device: puts it on the lane, which must come there
 *     ddl__compressed_send(&c, &request);                 before this
 *     while (request != NULL) { wait for request; ddl__compressed_next(&c, &request); }
 *
 * Starts and nexts of one group come in the same order on all its ranks, like the collectives that they begin. grad
 * (rows * cols floats) then holds the average, the same bits on every rank (of majority: 1 and -1), and c.odd how many
 * values of this rank were not finite. Nothing is allocated. After an error the residual is that of a gradient that
 * was not sent; DDL_ERR_CORRUPT: a partner of gTop-k sent places that are none. c.residual and c.q with their counts
 * are what a checkpoint keeps. */
#ifndef DDL_COMPRESS_REDUCE_H
#define DDL_COMPRESS_REDUCE_H

#include "../optim/lane.h"
#include "power.h"

/* gTop-k's messages: tags that no program is likely to use, one for each tensor modulo 2^20. */
#define DDL__GTOP_K_TAG 0x7d000000
#define DDL__GTOP_K_SENT 30 /* the round of a rank that has nothing left to merge */

typedef struct ddl__compressor {
    ddl_compression config;
    int32_t tensor, size, rank; /* ranks of the group, and the own one once started */
    int64_t rows, cols, count, kept;
    bool dense;    /* goes as it is: no compression, or PowerSGD that does not pay */
    bool adaptive; /* the trainer changes config: see ddl__compressor_choose */
    ddl__lane *lane; /* of all arrays and of grad, set before place; NULL: ordinary memory */
    size_t code_bytes, code_room; /* of config's code; the room for it */
    size_t bytes; /* of the memory it needs */
    float *residual; /* residual_count floats, NULL without error feedback */
    float *q;        /* PowerSGD: q_count floats, warm from the last step */
    int64_t residual_count, q_count;
    unsigned char *code;     /* the own one */
    unsigned char *gathered; /* all of them by rank; gTop-k: the partner's, then the union of both */
    float *p;
    /* the run in progress */
    ddl_group *group;
    float *grad;
    int64_t step;
    int32_t phase, round;
    uint64_t odd;
    uint64_t coded_ns; /* when its first code was there */
} ddl__compressor;

static inline bool ddl__compress_gathers(ddl_compression_kind kind) {
    return (kind >= DDL_COMPRESS_INT8 && kind <= DDL_COMPRESS_TOP_K);
}

/* Bytes of the second buffer: the codes of all ranks, or for gTop-k the partner's and the union of both. */
static inline size_t ddl__compressor_gathered(const ddl__compressor *c) {
    if (c->adaptive) {
        size_t most = 0;
        for (int32_t i = 0; i < DDL__OFFERS; i++) {
            ddl_compression offer = ddl__compress_offer(i);
            most = ddl__compress_gathers(offer.kind) ? DDL__MAX(most, ddl__code_bytes(&offer, c->count)) : most;
        }
        return most * (size_t)c->size;
    }
    if (c->config.kind == DDL_COMPRESS_GTOP_K) {
        return 3 * c->code_bytes;
    }
    return ddl__compress_gathers(c->config.kind) && !c->dense ? c->code_bytes * (size_t)c->size : 0;
}

static inline size_t ddl__round_64(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

/* Makes one of the parts of PowerSGD (DDL_POWER_...). */
static inline void ddl__lane_power(ddl__compressor *c, int32_t part) {
    ddl__cpu level = ddl__cpu_level();
    ddl__matrix a = {c->rows, c->cols, c->config.rank, c->residual, c->p, c->q};
    ddl_kernel_power k = {.part = part, .rank = a.rank, .rows = a.rows, .cols = a.cols, .g = c->grad, .m = a.m,
                          .p = a.p, .q = a.q, .out = c->grad,
                          .stream = ddl__code_stream(&c->config, (ddl__code_key){0, c->tensor, 0})};
    if (!ddl__lane_is_host(c->lane)) {
        ddl__lane_kernel(c->lane, DDL_KERNEL_POWER, &k);
        return;
    }
    switch (part) {
    case DDL_POWER_BEGIN: ddl__power_begin(&a, k.stream); break;
    case DDL_POWER_LEFT:
        c->odd = ddl__sparse_correct(level, c->grad, c->residual, c->count);
        ddl__power_left(level, &a);
        break;
    case DDL_POWER_RIGHT:
        ddl__power_orthonormalize(&a);
        ddl__power_right(level, &a);
        break;
    default: ddl__power_rebuild(level, &a, c->grad);
    }
}

static inline ddl_status ddl__compressor_init(ddl__sentence *sentence, ddl__compressor *out,
                                              const ddl_compression *config, int32_t tensor, int64_t rows,
                                              int64_t cols, int32_t size) {
    ddl__compressor c = {.tensor = tensor, .rows = rows, .cols = cols, .size = size};
    DDL__TRY(ddl__compress_init(sentence, config, &c.config));
    if (rows < 0 || cols < 0 || size < 1 || __builtin_mul_overflow(rows, cols, &c.count) || c.count > INT32_MAX) {
        return ddl__fail(sentence, DDL_ERR_ARG,
                         "compression %s of tensor %d with %lld x %lld elements: at most 2,147,483,647 can be "
                         "compressed at once; leave it uncompressed or split it",
                         ddl__compress_name(c.config.kind), tensor, (long long)rows, (long long)cols);
    }
    bool power = c.config.kind == DDL_COMPRESS_POWER;
    c.adaptive = c.config.kind == DDL_COMPRESS_ADAPTIVE;
    c.dense =
        c.adaptive || c.config.kind == DDL_COMPRESS_NONE || (power && !ddl__power_pays(rows, cols, c.config.rank));
    c.kept = ddl__compress_is_sparse(c.config.kind) ? ddl__compress_kept(&c.config, c.count) : 0;
    c.code_bytes = c.dense ? 0 : ddl__code_bytes(&c.config, c.count);
    c.code_room = c.adaptive ? (size_t)c.count * 2 + 64 : c.code_bytes; /* f16 is the largest code */
    c.residual_count = c.adaptive || (c.config.error_feedback && !c.dense) ? c.count : 0;
    c.q_count = power && !c.dense ? cols * c.config.rank : 0;
    size_t p_bytes = c.q_count > 0 ? (size_t)(rows * c.config.rank) * sizeof(float) : 0;
    c.bytes = ddl__round_64((size_t)c.residual_count * sizeof(float)) +
              ddl__round_64((size_t)c.q_count * sizeof(float)) + ddl__round_64(c.code_room) +
              ddl__round_64(ddl__compressor_gathered(&c)) + ddl__round_64(p_bytes);
    *out = c;
    return DDL_OK;
}

/* Lays the compressor's arrays out in memory, which is zeroed and aligned to 64. */
static inline void ddl__compressor_place(ddl__compressor *c, void *memory) {
    unsigned char *at = memory;
    c->residual = c->residual_count > 0 ? (float *)(void *)at : NULL;
    at += ddl__round_64((size_t)c->residual_count * sizeof(float));
    c->q = (float *)(void *)at;
    at += ddl__round_64((size_t)c->q_count * sizeof(float));
    c->code = at;
    at += ddl__round_64(c->code_room);
    c->gathered = at;
    at += ddl__round_64(ddl__compressor_gathered(c));
    c->p = (float *)(void *)at;
    if (c->q_count > 0) {
        ddl__lane_power(c, DDL_POWER_BEGIN);
    }
}

/* Changes the code of an adaptive compressor between two runs, on all ranks alike. The residual stays; one that goes as
 * it is takes it along. */
static inline void ddl__compressor_choose(ddl__compressor *c, int32_t offer) {
    c->config = ddl__compress_offer(offer);
    c->dense = c->config.kind == DDL_COMPRESS_NONE;
    c->kept = ddl__compress_is_sparse(c->config.kind) ? ddl__compress_kept(&c->config, c->count) : 0;
    c->code_bytes = c->dense ? 0 : ddl__code_bytes(&c->config, c->count);
}

static inline ddl__code_key ddl__compressor_key(const ddl__compressor *c) {
    int32_t rank = c->config.kind == DDL_COMPRESS_RANDOM_K ? 0 : c->rank;
    return (ddl__code_key){c->step, c->tensor, rank};
}

static inline ddl_status ddl__average_floats(ddl__compressor *c, void *data, int64_t count, ddl_dtype dtype,
                                             ddl_request **out_request) {
    ddl_tensor tensor = ddl__lane_tensor(c->lane, data, dtype, count);
    return ddl_iall_reduce(c->group, tensor, tensor, DDL_AVG, out_request);
}

/* ---- codes that are gathered ---- */

static inline ddl_status ddl__gather_codes(ddl__compressor *c, ddl_request **out_request) {
    ddl_tensor in = ddl__lane_tensor(c->lane, c->code, DDL_U8, (int64_t)c->code_bytes);
    ddl_tensor out = ddl__lane_tensor(c->lane, c->gathered, DDL_U8, (int64_t)c->code_bytes * c->size);
    return ddl_iall_gather(c->group, in, out, out_request);
}

/* What a kernel of a device is told about a code. */
static inline ddl_kernel_code ddl__code_kernel(const ddl__compressor *c, ddl__code_key key, void *code) {
    return (ddl_kernel_code){.config = &c->config, .stream = ddl__code_stream(&c->config, key), .g = c->grad,
                             .e = c->residual, .sum = c->grad, .count = c->count, .code = code,
                             .scratch = c->lane->partial};
}

static inline uint64_t ddl__lane_encode(ddl__compressor *c) {
    ddl__code_key key = ddl__compressor_key(c);
    if (ddl__lane_is_host(c->lane)) {
        return ddl__encode(&c->config, key, c->grad, c->residual, c->count, c->code);
    }
    ddl_kernel_code k = ddl__code_kernel(c, key, c->code);
    ddl__lane_kernel(c->lane, DDL_KERNEL_ENCODE, &k);
    return 0;
}

static inline void ddl__lane_decode_add(ddl__compressor *c, ddl__code_key key, unsigned char *code) {
    if (ddl__lane_is_host(c->lane)) {
        ddl__decode_add(&c->config, key, code, c->count, c->grad);
    } else {
        ddl_kernel_code k = ddl__code_kernel(c, key, code);
        ddl__lane_kernel(c->lane, DDL_KERNEL_DECODE_ADD, &k);
    }
}

/* What a vote has come to. */
static inline void ddl__lane_signs(ddl__compressor *c) {
    ddl_kernel_convert k = {.dst = c->grad, .count = c->count};
    if (!ddl__lane_is_host(c->lane)) {
        ddl__lane_kernel(c->lane, DDL_KERNEL_SIGNS, &k);
        return;
    }
    for (int64_t i = 0; i < c->count; i++) {
        c->grad[i] = !ddl__is_finite(c->grad[i]) ? c->grad[i] : c->grad[i] < 0 ? -1.0f : 1.0f;
    }
}

/* The codes are added in rank order, on every rank alike. */
static inline void ddl__add_gathered(ddl__compressor *c) {
    ddl__lane_zero(c->lane, c->grad, (size_t)c->count * sizeof(float));
    for (int32_t r = 0; r < c->size; r++) {
        ddl__code_key key = {c->step, c->tensor, r};
        ddl__lane_decode_add(c, key, c->gathered + (size_t)r * c->code_bytes);
    }
    if (c->config.kind != DDL_COMPRESS_MAJORITY) {
        ddl__lane_average(c->lane, c->grad, c->count, DDL_F32, c->size);
    } else {
        ddl__lane_signs(c);
    }
}

/* ---- codes that are averaged as they are ---- */

static inline ddl_status ddl__average_codes(ddl__compressor *c, ddl_request **out_request) {
    if (c->config.kind == DDL_COMPRESS_RANDOM_K) {
        return ddl__average_floats(c, c->code, c->kept, DDL_F32, out_request);
    }
    return ddl__average_floats(c, c->code, c->count, ddl__cast_dtype(&c->config), out_request);
}

static inline void ddl__take_averaged(ddl__compressor *c) {
    if (c->config.kind == DDL_COMPRESS_RANDOM_K) {
        ddl__lane_zero(c->lane, c->grad, (size_t)c->count * sizeof(float));
        ddl__lane_decode_add(c, ddl__compressor_key(c), c->code);
    } else {
        ddl__lane_convert(c->lane, c->grad, DDL_F32, c->code, ddl__cast_dtype(&c->config), c->count);
    }
}

/* ---- gTop-k: a binomial tree to rank 0, then a broadcast. Shi et al., ICDCS 2019, arXiv 1901.04359 ----
 * In round i (distance d = 2^i) the ranks that are odd multiples of d send to the one d below, and are done; the others
 * merge. A partner beyond the last rank is missing, which folds any number of ranks in. */

static inline ddl_status ddl__gtop_k_round(ddl__compressor *c, ddl_request **out_request) {
    int32_t tag = DDL__GTOP_K_TAG + (c->tensor & 0xfffff);
    for (; (1 << c->round) < c->size; c->round++) {
        int32_t distance = 1 << c->round;
        if (c->rank % (2 * distance) != 0) {
            ddl_tensor own = ddl__lane_tensor(c->lane, c->code, DDL_U8, (int64_t)c->code_bytes);
            c->round = DDL__GTOP_K_SENT;
            return ddl_isend(c->group, own, c->rank - distance, tag, out_request);
        }
        if (c->rank + distance < c->size) {
            ddl_tensor theirs = ddl__lane_tensor(c->lane, c->gathered, DDL_U8, (int64_t)c->code_bytes);
            return ddl_irecv(c->group, theirs, c->rank + distance, tag, out_request);
        }
    }
    c->phase = 2;
    ddl_tensor result = ddl__lane_tensor(c->lane, c->code, DDL_U8, (int64_t)c->code_bytes);
    return ddl_ibroadcast(c->group, result, 0, out_request);
}

/* By the device, which also counts places that are none; the host waits for that, as the code is sent next. The count
 * is kept in a number of the lane that the optimizer needs later. */
static inline ddl_status ddl__gtop_k_merge_there(ddl__compressor *c, int32_t *own, const int32_t *theirs, void *both) {
    double *wrong = c->lane->numbers + c->tensor, *told = c->lane->told + c->tensor;
    ddl_kernel_merge k = {own, theirs, both, c->residual, c->count, c->kept, c->lane->partial,
                          (uint64_t *)(void *)wrong};
    ddl__lane_zero(c->lane, wrong, sizeof *wrong);
    ddl__lane_kernel(c->lane, DDL_KERNEL_MERGE, &k);
    ddl__lane_copy(c->lane, told, wrong, sizeof *told);
    DDL__TRY(ddl__lane_wait(c->lane, "merging codes of gTop-k"));
    uint64_t count;
    memcpy(&count, told, sizeof count);
    return count == 0 ? DDL_OK : DDL_ERR_CORRUPT;
}

/* The union has room for 2k places and 2k values behind the partner's code. What a merge drops stays in the residual of
 * the rank that merged, so that nothing is lost. (In the paper each rank takes back its own entries that are not in the
 * result; that loses what one branch of the tree drops at a place that another branch keeps.) */
static inline ddl_status ddl__gtop_k_merge(ddl__compressor *c) {
    int64_t k = c->kept;
    int32_t *own = (int32_t *)(void *)c->code, *theirs = (int32_t *)(void *)c->gathered, *both = theirs + 2 * k;
    float *values = (float *)both + 2 * k;
    if (!ddl__lane_is_host(c->lane)) {
        return ddl__gtop_k_merge_there(c, own, theirs, both);
    }
    if (!ddl__places_ascend(theirs, k, c->count)) {
        return DDL_ERR_CORRUPT;
    }
    ddl__top_k_merge(own, (float *)own + k, theirs, (float *)theirs + k, k, both, values, c->residual);
    memcpy(own, both, (size_t)k * 4);
    memcpy(own + k, values, (size_t)k * 4);
    return DDL_OK;
}

static inline void ddl__gtop_k_finish(ddl__compressor *c) {
    ddl__lane_zero(c->lane, c->grad, (size_t)c->count * sizeof(float));
    ddl__lane_decode_add(c, ddl__compressor_key(c), c->code);
    ddl__lane_average(c->lane, c->grad, c->count, DDL_F32, c->size);
}

static inline ddl_status ddl__gtop_k_next(ddl__compressor *c, ddl_request **out_request) {
    if (c->phase == 2) {
        ddl__gtop_k_finish(c);
        c->phase = 0;
        return DDL_OK;
    }
    if (c->round < DDL__GTOP_K_SENT) {
        DDL__TRY(ddl__gtop_k_merge(c));
        c->round++;
    }
    return ddl__gtop_k_round(c, out_request);
}

/* ---- PowerSGD ---- */

static inline ddl_status ddl__power_next(ddl__compressor *c, ddl_request **out_request) {
    if (c->phase == 2) {
        ddl__lane_power(c, DDL_POWER_REBUILD);
        c->phase = 0;
        return DDL_OK;
    }
    ddl__lane_power(c, DDL_POWER_RIGHT);
    DDL__TRY(ddl__lane_wait(c->lane, "compressing"));
    c->phase = 2;
    return ddl__average_floats(c, c->q, c->q_count, DDL_F32, out_request);
}

/* ---- all kinds ---- */

/* Codes grad. Errors: DDL_ERR_STATE when the last run has not ended, DDL_ERR_ARG when the group has another size than
 * the compressor was made for. */
static inline ddl_status ddl__compressed_code(ddl__compressor *c, ddl_group *group, int64_t step, float *grad) {
    if (c->phase != 0) {
        return DDL_ERR_STATE;
    }
    if (ddl_size(group) != c->size) {
        return DDL_ERR_ARG;
    }
    c->group = group;
    c->grad = grad;
    c->step = step;
    c->rank = ddl_rank(group);
    c->phase = 1;
    c->round = 0;
    if (c->dense) {
        if (c->residual != NULL) {
            ddl__lane_add(c->lane, c->grad, c->residual, c->count, DDL_F32);
            ddl__lane_zero(c->lane, c->residual, (size_t)c->count * sizeof(float));
        }
        c->odd = ddl__lane_is_host(c->lane) ? ddl__count_odd(c->grad, c->count) : 0;
    } else if (c->config.kind == DDL_COMPRESS_POWER) {
        ddl__lane_power(c, DDL_POWER_LEFT);
    } else {
        c->odd = ddl__lane_encode(c);
    }
    c->coded_ns = ddl__now_ns();
    return DDL_OK;
}

/* Starts the first collective of what was coded. Errors: those of collectives. */
static inline ddl_status ddl__compressed_send(ddl__compressor *c, ddl_request **out_request) {
    *out_request = NULL;
    ddl_status status = c->dense ? ddl__average_floats(c, c->grad, c->count, DDL_F32, out_request)
                        : c->config.kind == DDL_COMPRESS_POWER
                            ? ddl__average_floats(c, c->p, c->rows * c->config.rank, DDL_F32, out_request)
                        : c->config.kind == DDL_COMPRESS_GTOP_K      ? ddl__gtop_k_round(c, out_request)
                        : ddl__compress_gathers(c->config.kind) ? ddl__gather_codes(c, out_request)
                                                                 : ddl__average_codes(c, out_request);
    c->phase = status < 0 ? 0 : c->phase;
    return status;
}

static inline ddl_status ddl__compressed_start(ddl__compressor *c, ddl_group *group, int64_t step, float *grad,
                                               ddl_request **out_request) {
    *out_request = NULL;
    ddl_status status = ddl__compressed_code(c, group, step, grad);
    status = status < 0 ? status : ddl__lane_wait(c->lane, "compressing");
    return status < 0 ? status : ddl__compressed_send(c, out_request);
}

/* After *request has ended with success: does what comes next, and leaves NULL in *request when grad is complete. */
static inline ddl_status ddl__compressed_next(ddl__compressor *c, ddl_request **request) {
    ddl_status status = DDL_OK;
    *request = NULL;
    if (!c->dense && c->config.kind == DDL_COMPRESS_GTOP_K) {
        status = ddl__gtop_k_next(c, request);
    } else if (!c->dense && c->config.kind == DDL_COMPRESS_POWER) {
        status = ddl__power_next(c, request);
    } else {
        c->phase = 0;
        if (!c->dense && ddl__compress_gathers(c->config.kind)) {
            ddl__add_gathered(c);
        } else if (!c->dense) {
            ddl__take_averaged(c);
        }
    }
    c->phase = status < 0 ? 0 : c->phase;
    return status;
}

/* Makes the compressor ready again after a request of it has failed. */
static inline void ddl__compressed_drop(ddl__compressor *c) { c->phase = 0; }

/* Replaces grad by the average over the group. Every rank calls. Blocks. Errors: as start, and of the collectives. */
static inline ddl_status ddl__compressed_all_reduce(ddl__compressor *c, ddl_group *group, int64_t step, float *grad) {
    ddl_request *request;
    ddl_status status = ddl__compressed_start(c, group, step, grad, &request);
    while (status >= 0 && request != NULL) {
        status = ddl_wait(&request, NULL);
        if (status >= 0) {
            status = ddl__compressed_next(c, &request);
        }
    }
    if (status < 0) {
        ddl__compressed_drop(c);
    }
    return status;
}

#endif /* DDL_COMPRESS_REDUCE_H */

/* choose: which kernels an operation is made of, with what arguments and how many blocks. Every function gives its
 * launches one after another to a cuda_sink: the driver or, in tests, a CPU. It must not know streams.
 *
 * A launch has a thread for each piece of work, not as many as the GPU can hold: blocks that the GPU deals out when
 * others end balance better than a loop in each. Only kernels that hand in counts at their end have few blocks. */
#ifndef CUDA_CHOOSE_H
#define CUDA_CHOOSE_H

#include "../../ddl.h"

#include "kernels.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

typedef struct cuda_sink {
    ddl_status (*put)(const struct cuda_sink *sink, cuda_kernel kernel, uint32_t blocks, uint32_t rows,
                      const void *args);
    void *user, *stream;
    int32_t multiprocessors;
    /* By a copy engine; NULL: there is none to use. */
    ddl_status (*copy)(const struct cuda_sink *sink, void *dst, const void *src, uint64_t bytes);
} cuda_sink;

#define CUDA_BLOCKS_MOST (1 << 22)

/* Of an element; a plugin has no symbol of the program, so not ddl_dtype_bytes. */
static int64_t cuda_dtype_bytes(int32_t dtype) {
    static const uint8_t bytes[] = {[DDL_F16] = 2,     [DDL_BF16] = 2,     [DDL_F32] = 4,     [DDL_F64] = 8,
                                    [DDL_I8] = 1,      [DDL_U8] = 1,       [DDL_I32] = 4,     [DDL_U32] = 4,
                                    [DDL_I64] = 8,     [DDL_U64] = 8,      [DDL_BOOL] = 1,    [DDL_F32_I32] = 8,
                                    [DDL_F64_I64] = 16, [DDL_I32_I32] = 8, [DDL_I64_I64] = 16, [DDL_E4M3] = 1,
                                    [DDL_E5M2] = 1};
    return dtype > 0 && dtype < (int32_t)sizeof bytes ? bytes[dtype] : 0;
}

/* Blocks for so many pieces of work, `each` of them to a block. */
static uint32_t cuda_blocks_for(int64_t pieces, int64_t each) {
    int64_t blocks = (pieces + each - 1) / each;
    return (uint32_t)(blocks < 1 ? 1 : blocks > CUDA_BLOCKS_MOST ? CUDA_BLOCKS_MOST : blocks);
}

/* ---- ranges ---- */

/* How `count` elements behind these pointers are cut; the first pointer is the one that is aligned. */
static cuda_range cuda_range_of(int64_t count, int64_t element_bytes, const void *const *pointers, int32_t n) {
    uintptr_t place = (uintptr_t)pointers[0] & 15;
    bool words = place % (uintptr_t)element_bytes == 0 || element_bytes > 16;
    int64_t head = words ? (int64_t)(16 - place) % 16 / element_bytes : 0;
    cuda_range r = {count, head < count ? head : count, words, 0};
    for (int32_t i = 1; i < n; i++) {
        r.aligned = r.aligned && ((uintptr_t)pointers[i] & 15) == place;
    }
    return r;
}

static uint32_t cuda_range_blocks(const cuda_range *r, int64_t element_bytes) {
    return cuda_blocks_for(r->count * element_bytes / 16, r->aligned ? CUDA_THREADS * CUDA_UNROLL : CUDA_THREADS);
}

/* ---- reductions ---- */

#define CUDA_FLOAT_ROW(T)                                                                                              \
    {[DDL_SUM] = CUDA_K_##T##_sum, [DDL_PROD] = CUDA_K_##T##_prod, [DDL_MIN] = CUDA_K_##T##_min,                       \
     [DDL_MAX] = CUDA_K_##T##_max, [DDL_AVG] = CUDA_K_##T##_sum}
#define CUDA_INTEGER_ROW(T, ORDER)                                                                                     \
    {[DDL_SUM] = CUDA_K_##T##_sum, [DDL_PROD] = CUDA_K_##T##_prod, [DDL_MIN] = CUDA_K_##ORDER##_min,                   \
     [DDL_MAX] = CUDA_K_##ORDER##_max, [DDL_AVG] = CUDA_K_##T##_sum, [DDL_BAND] = CUDA_K_bits_band,                    \
     [DDL_BOR] = CUDA_K_bits_bor, [DDL_BXOR] = CUDA_K_bits_bxor, [DDL_LAND] = CUDA_K_##T##_land,                       \
     [DDL_LOR] = CUDA_K_##T##_lor, [DDL_LXOR] = CUDA_K_##T##_lxor}
#define CUDA_PAIR_ROW(T) {[DDL_MIN_INDEX] = CUDA_K_##T##_min_index, [DDL_MAX_INDEX] = CUDA_K_##T##_max_index}

/* The kernel of an op: false where it is not defined. AVG gives that of SUM: the division comes at the end. */
static bool cuda_reduce_kernel(int32_t dtype, int32_t op, cuda_kernel *out) {
    enum { NONE = 0, OPS = DDL_MAX_INDEX + 1 };
    static const uint8_t table[DDL_E5M2 + 1][OPS] = {
        [DDL_F16] = CUDA_FLOAT_ROW(f16),
        [DDL_BF16] = CUDA_FLOAT_ROW(bf16),
        [DDL_F32] = CUDA_FLOAT_ROW(f32),
        [DDL_F64] = CUDA_FLOAT_ROW(f64),
        [DDL_I8] = CUDA_INTEGER_ROW(u8, i8),
        [DDL_U8] = CUDA_INTEGER_ROW(u8, u8),
        [DDL_I32] = CUDA_INTEGER_ROW(u32, i32),
        [DDL_U32] = CUDA_INTEGER_ROW(u32, u32),
        [DDL_I64] = CUDA_INTEGER_ROW(u64, i64),
        [DDL_U64] = CUDA_INTEGER_ROW(u64, u64),
        [DDL_BOOL] = {[DDL_SUM] = CUDA_K_u8_lor, [DDL_PROD] = CUDA_K_u8_land, [DDL_MIN] = CUDA_K_u8_land,
                      [DDL_MAX] = CUDA_K_u8_lor, [DDL_BAND] = CUDA_K_u8_land, [DDL_BOR] = CUDA_K_u8_lor,
                      [DDL_BXOR] = CUDA_K_u8_lxor, [DDL_LAND] = CUDA_K_u8_land, [DDL_LOR] = CUDA_K_u8_lor,
                      [DDL_LXOR] = CUDA_K_u8_lxor},
        [DDL_F32_I32] = CUDA_PAIR_ROW(f32_i32),
        [DDL_F64_I64] = CUDA_PAIR_ROW(f64_i64),
        [DDL_I32_I32] = CUDA_PAIR_ROW(i32_i32),
        [DDL_I64_I64] = CUDA_PAIR_ROW(i64_i64),
        [DDL_E4M3] = CUDA_FLOAT_ROW(e4m3),
        [DDL_E5M2] = CUDA_FLOAT_ROW(e5m2),
    };
    if (dtype <= DDL_DTYPE_NONE || dtype > DDL_E5M2 || op <= DDL_OP_NONE || op >= OPS || table[dtype][op] == NONE) {
        return false;
    }
    *out = (cuda_kernel)table[dtype][op];
    return true;
}

/* Bytes of an element of a kernel: bits are of any type. */
static int64_t cuda_element_bytes(cuda_kernel kernel, int32_t dtype) {
    bool bits = kernel == CUDA_K_bits_band || kernel == CUDA_K_bits_bor || kernel == CUDA_K_bits_bxor;
    return bits ? 1 : cuda_dtype_bytes(dtype);
}

/* What a reduction is: the op, or for sums a factor per source and a divisor of the result. */
typedef struct cuda_reduction {
    int32_t dtype, op;
    int32_t has_factor;
    double divisor; /* 0 and 1: none */
    const double *factor; /* per source */
} cuda_reduction;

static bool cuda_scaled_kernel(int32_t dtype, cuda_kernel *out) {
    static const cuda_kernel table[] = {
        [DDL_F16] = CUDA_K_f16_scaled, [DDL_BF16] = CUDA_K_bf16_scaled, [DDL_F32] = CUDA_K_f32_scaled,
        [DDL_F64] = CUDA_K_f64_scaled, [DDL_I8] = CUDA_K_i8_scaled,     [DDL_U8] = CUDA_K_u8_scaled,
        [DDL_I32] = CUDA_K_i32_scaled, [DDL_U32] = CUDA_K_u32_scaled,   [DDL_I64] = CUDA_K_i64_scaled,
        [DDL_U64] = CUDA_K_u64_scaled, [DDL_E4M3] = CUDA_K_e4m3_scaled, [DDL_E5M2] = CUDA_K_e5m2_scaled};
    if (dtype < DDL_F16 || dtype > DDL_E5M2 || table[dtype] == 0) { /* no reduction has number 0: kernels.h */
        return false;
    }
    *out = table[dtype];
    return true;
}

/* At most CUDA_PLACES sources and destinations. */
static ddl_status cuda_put_reduce(const cuda_sink *sink, const cuda_reduction *what, void *const *dsts,
                                  int32_t dst_count, const void *const *srcs, int32_t src_count, int64_t count) {
    cuda_scaled_args a;
    const void *all[2 * CUDA_PLACES];
    bool divides = what->divisor > 0 && what->divisor != 1;
    bool scaled = (what->has_factor || divides) && (what->op == DDL_SUM || what->op == DDL_AVG);
    cuda_kernel kernel = CUDA_K_bits_bor;
    bool known = scaled ? cuda_scaled_kernel(what->dtype, &kernel) : cuda_reduce_kernel(what->dtype, what->op, &kernel);
    if (!known || src_count < 1 || src_count > CUDA_PLACES || dst_count < 1 || dst_count > CUDA_PLACES) {
        return DDL_ERR_ARG;
    }
    if (count <= 0) {
        return DDL_OK;
    }
    memset(&a, 0, sizeof a);
    int64_t element = cuda_element_bytes(kernel, what->dtype);
    count *= cuda_dtype_bytes((int32_t)what->dtype) / element;
    for (int32_t i = 0; i < dst_count; i++) {
        all[i] = a.reduce.dst[i] = dsts[i];
    }
    for (int32_t i = 0; i < src_count; i++) {
        all[dst_count + i] = a.reduce.src[i] = srcs[i];
        a.factor[i] = what->has_factor ? what->factor[i] : 1;
    }
    a.reduce.range = cuda_range_of(count, element, all, dst_count + src_count);
    a.reduce.src_count = src_count;
    a.reduce.dst_count = dst_count;
    a.has_factor = what->has_factor;
    a.divisor = divides ? what->divisor : 1;
    uint32_t blocks = cuda_range_blocks(&a.reduce.range, element);
    return sink->put(sink, kernel, blocks, 1, scaled ? (const void *)&a : (const void *)&a.reduce);
}

/* dst = (srcs[0] op srcs[1]) op ... for any number of sources: so many at a time, the first of the next being dst.
 * Where that is more than one launch dst must be none of the sources but the first. */
static ddl_status cuda_put_reduce_many(const cuda_sink *sink, int32_t dtype, int32_t op, void *dst,
                                       const void *const *srcs, int32_t src_count, int64_t count) {
    const cuda_reduction what = {.dtype = dtype, .op = op};
    const void *part[CUDA_PLACES];
    int32_t done = src_count < CUDA_PLACES ? src_count : CUDA_PLACES;
    ddl_status status = cuda_put_reduce(sink, &what, &dst, 1, srcs, done, count);
    while (status == DDL_OK && done < src_count) {
        int32_t more = src_count - done < CUDA_PLACES - 1 ? src_count - done : CUDA_PLACES - 1;
        part[0] = dst;
        memcpy(part + 1, srcs + done, (size_t)more * sizeof *part);
        status = cuda_put_reduce(sink, &what, &dst, 1, part, more + 1, count);
        done += more;
    }
    return status;
}

/* One source to all destinations. */
static ddl_status cuda_put_copy(const cuda_sink *sink, void *const *dsts, int32_t dst_count, const void *src,
                                int64_t bytes) {
    const cuda_reduction bits = {.dtype = DDL_U8, .op = DDL_BOR};
    return cuda_put_reduce(sink, &bits, dsts, dst_count, &src, 1, bytes);
}

static ddl_status cuda_put_scale(const cuda_sink *sink, const ddl_kernel_scale *p) {
    void *dst = p->dst;
    cuda_reduction what = {p->dtype, DDL_SUM, p->factor != 1, p->divisor, &p->factor};
    cuda_kernel kernel;
    if (!cuda_scaled_kernel(p->dtype, &kernel)) { /* bool and pairs have no factor */
        return cuda_put_copy(sink, &dst, 1, p->src, p->count * cuda_dtype_bytes((int32_t)p->dtype));
    }
    return cuda_put_reduce(sink, &what, &dst, 1, &p->src, 1, p->count);
}

/* ---- exchanges ---- */

/* Pairs of which from, to and range.count are set; those of no bytes are left out. */
static inline ddl_status cuda_put_exchange(const cuda_sink *sink, const cuda_pair *pairs, int32_t n) {
    cuda_exchange_args a;
    uint32_t rows = 0;
    int64_t most = 0;
    memset(&a, 0, sizeof a);
    for (int32_t i = 0; i < n; i++) {
        const void *all[4] = {pairs[i].to[0], pairs[i].from[0], pairs[i].to[1], pairs[i].from[1]};
        if (pairs[i].range.count > 0) {
            a.pair[rows] = pairs[i];
            a.pair[rows].range = cuda_range_of(pairs[i].range.count, 1, all, pairs[i].from[1] != NULL ? 4 : 2);
            most = pairs[i].range.count > most ? pairs[i].range.count : most;
            rows++;
        }
    }
    return rows == 0 ? DDL_OK
                     : sink->put(sink, CUDA_K_exchange, cuda_blocks_for(most / 16, CUDA_THREADS), rows, &a);
}

/* ---- strided tensors ---- */

/* Adds a dimension inside those that are there, joined to the one before where both are one walk. */
static void cuda_dimension(cuda_strided_args *a, int64_t shape, int64_t stride) {
    int32_t last = a->ndim - 1;
    if (shape == 1) {
        return;
    }
    if (last >= 0 && a->stride[last] == stride * shape) {
        a->shape[last] *= shape;
        a->stride[last] = stride;
        return;
    }
    a->shape[a->ndim] = shape;
    a->stride[a->ndim++] = stride;
}

/* The largest word that all runs of neighbouring bytes, all strides and both addresses are multiples of. */
static int32_t cuda_strided_word(const cuda_strided_args *a) {
    uint64_t all = (uint64_t)(uintptr_t)a->packed | (uint64_t)(uintptr_t)a->data | 16;
    all |= (uint64_t)a->shape[a->ndim - 1];
    for (int32_t d = 0; d < a->ndim - 1; d++) {
        all |= (uint64_t)a->stride[d];
    }
    return (int32_t)(all & (~all + 1));
}

/* packed = the elements of a tensor, or the tensor's elements = packed. */
static ddl_status cuda_put_strided(const cuda_sink *sink, const ddl_tensor *t, void *packed, int32_t unpack) {
    cuda_strided_args a;
    int64_t size = cuda_dtype_bytes((int32_t)t->dtype), bytes = size;
    if (t->ndim < 0 || t->ndim > DDL_MAX_DIMS) {
        return DDL_ERR_ARG;
    }
    memset(&a, 0, sizeof a);
    a.packed = packed;
    a.data = t->data;
    a.unpack = unpack;
    for (int32_t d = 0; d < t->ndim; d++) {
        bytes *= t->shape[d];
        cuda_dimension(&a, t->shape[d], t->strides[d] * size);
    }
    if (bytes <= 0) {
        return bytes == 0 ? DDL_OK : DDL_ERR_ARG;
    }
    if (a.ndim > 0 && a.stride[a.ndim - 1] == size) {
        a.shape[a.ndim - 1] *= size;
        a.stride[a.ndim - 1] = 1;
    } else {
        a.shape[a.ndim] = size;
        a.stride[a.ndim++] = 1;
    }
    a.word_bytes = cuda_strided_word(&a);
    a.shape[a.ndim - 1] /= a.word_bytes;
    a.stride[a.ndim - 1] = a.word_bytes;
    a.ndim -= a.shape[a.ndim - 1] == 1;
    a.count = bytes / a.word_bytes;
    return sink->put(sink, CUDA_K_strided, cuda_blocks_for(a.count, CUDA_THREADS), 1, &a);
}

/* ---- optimizers ---- */

static ddl_status cuda_put_step(const cuda_sink *sink, const ddl_kernel_step *p) {
    static const cuda_kernel table[] = {[DDL_SGD] = CUDA_K_sgd,           [DDL_MOMENTUM] = CUDA_K_momentum,
                                        [DDL_NESTEROV] = CUDA_K_nesterov, [DDL_ADAM] = CUDA_K_adam,
                                        [DDL_ADAMW] = CUDA_K_adam,        [DDL_LARS] = CUDA_K_lars,
                                        [DDL_LAMB] = CUDA_K_lamb};
    static const cuda_kernel table_f64[] = {[DDL_SGD] = CUDA_K_sgd_f64,           [DDL_MOMENTUM] = CUDA_K_momentum_f64,
                                            [DDL_NESTEROV] = CUDA_K_nesterov_f64, [DDL_ADAM] = CUDA_K_adam_f64,
                                            [DDL_ADAMW] = CUDA_K_adam_f64,        [DDL_LARS] = CUDA_K_lars_f64,
                                            [DDL_LAMB] = CUDA_K_lamb_f64};
    if (p->kind < 0 || p->kind > DDL_LAMB || (p->moments && p->kind != DDL_LAMB) ||
        (p->dtype != DDL_F32 && p->dtype != DDL_F64)) {
        return DDL_ERR_ARG;
    }
    cuda_optim_args a = {.w = p->w, .g = p->g, .m = p->m, .v = p->v, .r = p->r};
#define CUDA_TAKE(name) (a.f32.name = (float)p->name, a.f64.name = p->name);
    CUDA_SCALARS(CUDA_TAKE)
    const void *given[5] = {p->w, p->g, p->m, p->v, p->r}, *used[5];
    int32_t n = 0;
    for (int32_t i = 0; i < 5; i++) {
        if (given[i] != NULL) {
            used[n++] = given[i];
        }
    }
    if (p->count <= 0) {
        return DDL_OK;
    }
    bool wide = p->dtype == DDL_F64;
    cuda_kernel kernel = wide ? table_f64[p->kind] : table[p->kind];
    if (p->moments) {
        kernel = wide ? CUDA_K_lamb_moments_f64 : CUDA_K_lamb_moments;
    }
    a.range = cuda_range_of(p->count, wide ? 8 : 4, used, n);
    return sink->put(sink, kernel, cuda_blocks_for(p->count / (a.range.aligned ? wide ? 2 : 4 : 1), CUDA_THREADS), 1,
                     &a);
}

static ddl_status cuda_put_squares(const cuda_sink *sink, const ddl_kernel_squares *p) {
    cuda_squares_args a = {p->x, p->count, p->partial, p->out};
    ddl_status status = DDL_OK;
    if (p->count > 0) {
        status = sink->put(sink, p->dtype == DDL_F64 ? CUDA_K_squares_f64 : CUDA_K_squares,
                           cuda_blocks_for(p->count, CUDA_SUM_STRETCH), 1, &a);
    }
    return status == DDL_OK ? sink->put(sink, CUDA_K_squares_total, 1, 1, &a) : status;
}

static ddl_status cuda_put_convert(const cuda_sink *sink, const ddl_kernel_convert *p) {
    static const cuda_kernel table[DDL_F64 + 1][DDL_F64 + 1] = { /* by to, from; number 0 is no conversion */
        [DDL_F16] = {[DDL_F16] = CUDA_K_f16_f16, [DDL_BF16] = CUDA_K_f16_bf16, [DDL_F32] = CUDA_K_f16_f32},
        [DDL_BF16] = {[DDL_F16] = CUDA_K_bf16_f16, [DDL_BF16] = CUDA_K_bf16_bf16, [DDL_F32] = CUDA_K_bf16_f32},
        [DDL_F32] = {[DDL_F16] = CUDA_K_f32_f16, [DDL_BF16] = CUDA_K_f32_bf16, [DDL_F32] = CUDA_K_f32_f32},
        [DDL_F64] = {[DDL_F64] = CUDA_K_f64_f64}};
    bool known = p->to >= 0 && p->to <= DDL_F64 && p->from >= 0 && p->from <= DDL_F64 && table[p->to][p->from] != 0;
    cuda_convert_args a = {.dst = p->dst, .src = p->src, .odd = (unsigned long long *)p->odd, .count = p->count,
                           .add = p->add};
    return !known          ? DDL_ERR_ARG
           : p->count <= 0 ? DDL_OK
                           : sink->put(sink, table[p->to][p->from], cuda_blocks_for(p->count, 4 * CUDA_THREADS), 1, &a);
}

static ddl_status cuda_put_signs(const cuda_sink *sink, const ddl_kernel_convert *p) {
    cuda_convert_args a = {.dst = p->dst, .count = p->count};
    return p->count <= 0 ? DDL_OK : sink->put(sink, CUDA_K_signs, cuda_blocks_for(p->count, CUDA_THREADS), 1, &a);
}

/* ---- codes ---- */

/* Bits per element of the kinds that go in blocks; 0 for the others. */
static int32_t cuda_code_bits(const ddl_compression *c) {
    switch (c->kind) {
    case DDL_COMPRESS_INT8: return 8;
    case DDL_COMPRESS_QSGD: return c->levels <= 7 ? 4 : 8;
    case DDL_COMPRESS_SIGN:
    case DDL_COMPRESS_MAJORITY: return 1;
    default: return 0;
    }
}

static ddl_status cuda_put_blocks(const cuda_sink *sink, const ddl_kernel_code *p, int32_t decode) {
    const ddl_compression *c = p->config;
    int32_t bits = cuda_code_bits(c);
    cuda_kernel kernel = bits == 8 ? CUDA_K_encode_bits8 : bits == 4 ? CUDA_K_encode_bits4 : CUDA_K_encode_bits1;
    if (decode) {
        kernel = bits == 8 ? CUDA_K_decode_bits8 : bits == 4 ? CUDA_K_decode_bits4 : CUDA_K_decode_bits1;
    }
    cuda_code_args a = {.g = p->g, .e = p->e, .sum = p->sum, .code = p->code, .count = p->count, .bits = bits,
                        .odd = (unsigned long long *)p->odd, .levels = c->levels,
                        .dither = c->kind == DDL_COMPRESS_QSGD, .majority = c->kind == DDL_COMPRESS_MAJORITY,
                        .key = {(uint32_t)p->stream, (uint32_t)(p->stream >> 32)}};
    int64_t blocks = (p->count + CUDA_CODE_BLOCK - 1) / CUDA_CODE_BLOCK;
    return sink->put(sink, kernel, cuda_blocks_for(blocks, CUDA_THREADS / 32), 1, &a);
}

static ddl_status cuda_put_cast(const cuda_sink *sink, const ddl_kernel_code *p, int32_t decode) {
    bool f16 = p->config->kind == DDL_COMPRESS_F16;
    cuda_kernel kernel = decode ? (f16 ? CUDA_K_decode_f16 : CUDA_K_decode_bf16)
                                : (f16 ? CUDA_K_encode_f16 : CUDA_K_encode_bf16);
    cuda_code_args a = {.g = p->g, .e = p->e, .sum = p->sum, .code = p->code, .count = p->count,
                        .odd = (unsigned long long *)p->odd};
    return sink->put(sink, kernel, cuda_blocks_for(p->count, 4 * CUDA_THREADS), 1, &a);
}

/* How many of n elements a sparse kind sends. */
static int64_t cuda_code_kept(const ddl_compression *c, int64_t n) {
    int64_t k = c->k > 0 ? c->k : (int64_t)(c->ratio * (double)n + 0.5);
    k = k > 1 ? k : 1;
    return k < n ? k : n;
}

/* The k largest of a.count elements. a.e and what it is for are set; scratch: DDL_KERNEL_SCRATCH_BYTES(a.count). */
static ddl_status cuda_put_select(const cuda_sink *sink, cuda_top_args a, void *scratch) {
    uint32_t few = cuda_blocks_for(a.count, CUDA_TILE), most = 8u * (uint32_t)sink->multiprocessors;
    uint32_t each = few;
    few = few < most || most == 0 ? few : most;
    a.state = scratch;
    a.tiles = (uint64_t *)(void *)((char *)scratch + 16384);
    a.shift = 20;
    ddl_status status = sink->put(sink, CUDA_K_top_clear, 1, 1, &a);
    status = status == DDL_OK ? sink->put(sink, CUDA_K_top_correct, few, 1, &a) : status;
    status = status == DDL_OK ? sink->put(sink, CUDA_K_top_pick, 1, 1, &a) : status;
    for (a.shift = 10; a.shift >= 0 && status == DDL_OK; a.shift -= 10) {
        status = sink->put(sink, CUDA_K_top_count, few, 1, &a);
        status = status == DDL_OK ? sink->put(sink, CUDA_K_top_pick, 1, 1, &a) : status;
    }
    status = status == DDL_OK ? sink->put(sink, CUDA_K_top_tiles, each, 1, &a) : status;
    status = status == DDL_OK ? sink->put(sink, CUDA_K_top_scan, 1, 1, &a) : status;
    return status == DDL_OK ? sink->put(sink, CUDA_K_top_write, each, 1, &a) : status;
}

static ddl_status cuda_put_top(const cuda_sink *sink, const ddl_kernel_code *p) {
    if (p->e == NULL) { /* the residual is where they work */
        return DDL_ERR_UNSUPPORTED;
    }
    int64_t k = cuda_code_kept(p->config, p->count);
    cuda_top_args a = {.g = p->g, .e = p->e, .places = p->code, .values = (float *)p->code + k,
                       .odd = (unsigned long long *)p->odd, .count = p->count, .k = k};
    return cuda_put_select(sink, a, p->scratch);
}

static ddl_status cuda_put_merge(const cuda_sink *sink, const ddl_kernel_merge *p) {
    if (p->k <= 0) {
        return DDL_OK;
    }
    float *e = (float *)p->both + 2 * p->k;
    cuda_merge_args m = {.own = p->own, .theirs = p->theirs, .labels = p->both, .e = e, .rest = p->rest,
                         .wrong = (unsigned long long *)p->wrong, .count = p->count, .k = p->k};
    cuda_top_args a = {.e = e, .labels = p->both, .places = p->own, .values = (float *)p->own + p->k,
                       .count = 2 * p->k, .k = p->k};
    uint32_t blocks = cuda_blocks_for(2 * p->k, CUDA_THREADS);
    ddl_status status = sink->put(sink, CUDA_K_top_union, blocks, 1, &m);
    status = status == DDL_OK ? cuda_put_select(sink, a, p->scratch) : status;
    return status == DDL_OK ? sink->put(sink, CUDA_K_top_rest, blocks, 1, &m) : status;
}

static ddl_status cuda_put_random(const cuda_sink *sink, const ddl_kernel_code *p) {
    if (p->e == NULL) { /* the residual is where they work */
        return DDL_ERR_UNSUPPORTED;
    }
    int64_t k = cuda_code_kept(p->config, p->count);
    cuda_top_args correct = {.g = p->g, .e = p->e, .odd = (unsigned long long *)p->odd, .count = p->count};
    cuda_sparse_args a = {.values = p->code, .e = p->e, .count = p->count, .k = k, .stream = p->stream};
    ddl_status status = sink->put(sink, CUDA_K_top_correct, cuda_blocks_for(p->count, CUDA_TILE), 1, &correct);
    return status == DDL_OK ? sink->put(sink, CUDA_K_random_take, cuda_blocks_for(k, CUDA_THREADS), 1, &a) : status;
}

static ddl_status cuda_put_power(const cuda_sink *sink, const ddl_kernel_power *p) {
    cuda_power_args a = {.m = p->m, .p = p->p, .q = p->q, .out = p->out, .rows = p->rows, .cols = p->cols,
                         .stream = p->stream, .rank = p->rank};
    cuda_top_args correct = {.g = p->g, .e = p->m, .count = p->rows * p->cols};
    uint32_t rows = cuda_blocks_for(p->rows, CUDA_THREADS / 32);
    ddl_status status;
    if (correct.count <= 0 || p->rank <= 0) {
        return DDL_ERR_ARG;
    }
    switch (p->part) {
    case DDL_POWER_BEGIN:
        return sink->put(sink, CUDA_K_power_begin, cuda_blocks_for(p->cols * p->rank, CUDA_THREADS), 1, &a);
    case DDL_POWER_LEFT:
        status = sink->put(sink, CUDA_K_top_correct, cuda_blocks_for(correct.count, CUDA_TILE), 1, &correct);
        return status == DDL_OK ? sink->put(sink, CUDA_K_power_left, rows, 1, &a) : status;
    case DDL_POWER_RIGHT:
        status = sink->put(sink, CUDA_K_power_orthonormalize, 1, 1, &a);
        return status == DDL_OK ? sink->put(sink, CUDA_K_power_right, cuda_blocks_for(p->cols, 8), 1, &a) : status;
    case DDL_POWER_REBUILD: return sink->put(sink, CUDA_K_power_rebuild, rows, 1, &a);
    default: return DDL_ERR_UNSUPPORTED;
    }
}

static ddl_status cuda_put_sparse_add(const cuda_sink *sink, const ddl_kernel_code *p) {
    bool random = p->config->kind == DDL_COMPRESS_RANDOM_K;
    int64_t k = cuda_code_kept(p->config, p->count);
    cuda_sparse_args a = {.places = random ? NULL : p->code, .values = (float *)p->code + (random ? 0 : k),
                          .sum = p->sum, .count = p->count, .k = k, .stream = p->stream};
    return sink->put(sink, CUDA_K_sparse_add, cuda_blocks_for(k, CUDA_THREADS), 1, &a);
}

static ddl_status cuda_put_code(const cuda_sink *sink, const ddl_kernel_code *p, int32_t decode) {
    if (p->count <= 0) {
        return DDL_OK;
    }
    switch (p->config->kind) {
    case DDL_COMPRESS_F16:
    case DDL_COMPRESS_BF16: return cuda_put_cast(sink, p, decode);
    case DDL_COMPRESS_INT8:
    case DDL_COMPRESS_QSGD:
    case DDL_COMPRESS_SIGN:
    case DDL_COMPRESS_MAJORITY: return cuda_put_blocks(sink, p, decode);
    case DDL_COMPRESS_TOP_K:
    case DDL_COMPRESS_GTOP_K: return decode ? cuda_put_sparse_add(sink, p) : cuda_put_top(sink, p);
    case DDL_COMPRESS_RANDOM_K: return decode ? cuda_put_sparse_add(sink, p) : cuda_put_random(sink, p);
    default: return DDL_ERR_UNSUPPORTED;
    }
}

/* A kernel of the device table, by its number. */
static ddl_status cuda_put_kernel(const cuda_sink *sink, int32_t which, const void *params) {
    switch (which) {
    case DDL_KERNEL_SCALE: return cuda_put_scale(sink, params);
    case DDL_KERNEL_STEP: return cuda_put_step(sink, params);
    case DDL_KERNEL_SQUARES: return cuda_put_squares(sink, params);
    case DDL_KERNEL_ENCODE: return cuda_put_code(sink, params, 0);
    case DDL_KERNEL_DECODE_ADD: return cuda_put_code(sink, params, 1);
    case DDL_KERNEL_CONVERT: return cuda_put_convert(sink, params);
    case DDL_KERNEL_SIGNS: return cuda_put_signs(sink, params);
    case DDL_KERNEL_MERGE: return cuda_put_merge(sink, params);
    case DDL_KERNEL_POWER: return cuda_put_power(sink, params);
    default: return DDL_ERR_UNSUPPORTED;
    }
}

#endif /* CUDA_CHOOSE_H */

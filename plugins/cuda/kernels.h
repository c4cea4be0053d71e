/* kernels: names and arguments of the kernels, for the C that launches them and the CUDA that is them. Each kernel is
 * an extern "C" function ddl_k_NAME that takes one of these structs by value. Pointers are device addresses.
 * It must not know how many blocks a launch has: kernels walk with the stride of their grid. */
#ifndef CUDA_KERNELS_H
#define CUDA_KERNELS_H

#include <stdint.h>

#define CUDA_PLACES 32    /* sources, and destinations, of one launch */
#define CUDA_THREADS 256  /* of a block, in every launch */
#define CUDA_UNROLL 4     /* 16-byte words per thread and step of a reduction: keeps enough loads in flight */
#define CUDA_CODE_BLOCK 512 /* elements that share a scale, as in the layout of codes of ddl.h */
#define CUDA_SUM_BLOCK 4096 /* elements that 16 threads sum the squares of, as on the host */
#define CUDA_SUM_STRETCH (CUDA_THREADS / 16 * CUDA_SUM_BLOCK) /* of a partial sum */
#define CUDA_BINS 2048      /* of the first digit of top-k; the others have 1024 */
#define CUDA_DIMS 9         /* of a strided tensor, and one within an element at an odd address */
#define CUDA_TILE 4096      /* elements that a block of top-k places at once: 16 per thread */

/* How a range is cut: `head` elements up to the first one at a 16-byte boundary of the destination, whole 16-byte
 * words, and what remains. aligned: all pointers are at the same place within 16 bytes, so that words are words. */
typedef struct cuda_range {
    int64_t count, head;
    int32_t aligned;
    int32_t reserved;
} cuda_range;

/* dsts[..] = (srcs[0] op srcs[1]) op ...; with one source a copy. A destination may be a source. */
typedef struct cuda_reduce_args {
    cuda_range range;
    int32_t src_count, dst_count;
    const void *src[CUDA_PLACES];
    void *dst[CUDA_PLACES];
} cuda_reduce_args;

/* dsts[..] = (factor[0] * srcs[0] + factor[1] * srcs[1] + ...) / divisor, rounded after each step. */
typedef struct cuda_scaled_args {
    cuda_reduce_args reduce;
    int32_t has_factor, reserved;
    double divisor; /* 1: none; a whole number for integers */
    double factor[CUDA_PLACES];
} cuda_scaled_args;

/* One exchange: to[0] = from[0] and to[1] = from[1], byte by byte at the same time, so that from[0] may be to[1].
 * from[1] NULL: a copy. Row y of the grid does pair y. */
typedef struct cuda_pair {
    const void *from[2];
    void *to[2];
    cuda_range range; /* in bytes */
} cuda_pair;
typedef struct cuda_exchange_args {
    cuda_pair pair[CUDA_PLACES];
} cuda_exchange_args;

/* packed = the elements of a strided tensor in C order, or back. Sizes and strides may be those of larger or smaller
 * words than the tensor's elements. */
typedef struct cuda_strided_args {
    char *packed, *data;
    int64_t count;
    int64_t shape[CUDA_DIMS], stride[CUDA_DIMS]; /* in words, in bytes */
    int32_t ndim, word_bytes;    /* 1, 2, 4, 8 or 16, to which all addresses are aligned */
    int32_t unpack, reserved;
} cuda_strided_args;

/* ---- optimizers ---- */

/* The numbers of one step, X(name), as ddl_kernel_step names them; in the type of the arrays. */
#define CUDA_SCALARS(X)                                                                                                \
    X(rate) X(decay) X(keep) X(beta1) X(fresh1) X(beta2) X(fresh2) X(unbias1) X(unbias2) X(epsilon)
#define CUDA_SCALAR_F32(name) float name;
#define CUDA_SCALAR_F64(name) double name;
typedef struct cuda_scalars_f32 {
    CUDA_SCALARS(CUDA_SCALAR_F32)
} cuda_scalars_f32;
typedef struct cuda_scalars_f64 {
    CUDA_SCALARS(CUDA_SCALAR_F64)
} cuda_scalars_f64;

typedef struct cuda_optim_args {
    cuda_scalars_f32 f32; /* of kernels for f32 */
    cuda_scalars_f64 f64;
    cuda_range range; /* of all arrays that the kernel uses */
    void *w;
    const void *g;
    void *m, *v, *r;
} cuda_optim_args;

/* partial[i] = the sum of the squares of stretch i of x; then out[0] = the sum of partial[..] in order. */
typedef struct cuda_squares_args {
    const void *x; /* of f32 or f64 */
    int64_t count;
    double *partial; /* one for each CUDA_SUM_STRETCH elements begun */
    double *out;
} cuda_squares_args;

/* dst = src in another type, or dst += that; odd[0] += results that are not finite. Of signs: dst alone. */
typedef struct cuda_convert_args {
    void *dst;
    const void *src;
    unsigned long long *odd; /* or NULL */
    int64_t count;
    int32_t add, reserved;
} cuda_convert_args;

/* ---- codes ---- */

/* code = g + e and e = what the code misses, or sum += code. e may be NULL: no residual. g, e and sum are aligned to 4
 * bytes, and so is code. odd[0] += how many values were not finite. */
typedef struct cuda_code_args {
    const float *g;
    float *e, *sum;
    unsigned char *code;
    unsigned long long *odd; /* or NULL */
    int64_t count;
    int32_t bits, levels; /* 8, 4 or 1 of each element; the largest level */
    int32_t dither;       /* levels are drawn (QSGD), not rounded */
    int32_t majority;     /* of 1 bit: the step is 1 */
    uint32_t key[2];      /* of the draws */
} cuda_code_args;

/* The state of a search for the k largest magnitudes, in device memory. */
typedef struct cuda_top_state {
    unsigned long long need; /* place of the k-th largest among those that begin with prefix */
    uint32_t prefix, shift;
    uint32_t bins[CUDA_BINS];
} cuda_top_state;

/* places = the k largest of e in ascending order, values those, which become 0 in e. */
typedef struct cuda_top_args {
    const float *g;
    float *e;
    int32_t *places;
    float *values;
    unsigned long long *odd; /* or NULL */
    cuda_top_state *state;
    uint64_t *tiles; /* of each CUDA_TILE elements begun: magnitudes above the threshold << 32, and equal to it */
    const int32_t *labels; /* of a merge: the place of each element, below 0: there is none; NULL: its own number */
    int64_t count, k;
    int32_t shift; /* of the digit: 20, 10, 0 */
    int32_t reserved;
} cuda_top_args;

/* Two sparse arrays of k places in ascending order and k floats become one of 2 k elements: of a place in both, the sum
 * stands where the own one is, and there is none where theirs is. Then rest += what is left of it in e, by its label. */
typedef struct cuda_merge_args {
    const int32_t *own, *theirs;
    int32_t *labels;
    float *e, *rest;
    unsigned long long *wrong; /* wrong[0] += places of theirs that do not ascend within count */
    int64_t count, k;
} cuda_merge_args;

/* sum[places[j]] += values[j] where the place is in 0 .. count - 1; with stream and no places: the places that
 * random-k draws. Of random-k's encoder: values = e there, and e = 0. */
typedef struct cuda_sparse_args {
    const int32_t *places;
    float *values, *sum, *e;
    int64_t count, k;
    uint64_t stream;
} cuda_sparse_args;

/* ---- PowerSGD ---- */

/* m: rows x cols, row by row; p and q: `rank` columns of rows and of cols elements, one after the other. */
typedef struct cuda_power_args {
    float *m, *p, *q, *out; /* out: as m, of the last kernel */
    int64_t rows, cols;
    uint64_t stream; /* of the first q */
    int32_t rank, reserved;
} cuda_power_args;

/* ---- the list: X(name, argument) ---- */

#define CUDA_FLOAT_KERNELS(X, T)                                                                                       \
    X(T##_sum, cuda_reduce_args) X(T##_prod, cuda_reduce_args) X(T##_min, cuda_reduce_args) X(T##_max, cuda_reduce_args)
#define CUDA_LOGIC_KERNELS(X, T)                                                                                       \
    X(T##_land, cuda_reduce_args) X(T##_lor, cuda_reduce_args) X(T##_lxor, cuda_reduce_args)
/* Only order tells a signed type from an unsigned one. */
#define CUDA_INTEGER_KERNELS(X, T, SIGNED)                                                                             \
    CUDA_FLOAT_KERNELS(X, T) CUDA_LOGIC_KERNELS(X, T)                                                                  \
    X(SIGNED##_min, cuda_reduce_args) X(SIGNED##_max, cuda_reduce_args)
#define CUDA_PAIR_KERNELS(X, T) X(T##_min_index, cuda_reduce_args) X(T##_max_index, cuda_reduce_args)
/* Of any type: bits are bits. With one source any of these three copies. */
#define CUDA_BIT_KERNELS(X) X(bits_band, cuda_reduce_args) X(bits_bor, cuda_reduce_args) X(bits_bxor, cuda_reduce_args)
#define CUDA_REDUCE_KERNELS(X)                                                                                         \
    CUDA_FLOAT_KERNELS(X, f16) CUDA_FLOAT_KERNELS(X, bf16) CUDA_FLOAT_KERNELS(X, f32) CUDA_FLOAT_KERNELS(X, f64)       \
    CUDA_FLOAT_KERNELS(X, e4m3) CUDA_FLOAT_KERNELS(X, e5m2)                                                            \
    CUDA_INTEGER_KERNELS(X, u8, i8) CUDA_INTEGER_KERNELS(X, u32, i32) CUDA_INTEGER_KERNELS(X, u64, i64)                \
    CUDA_PAIR_KERNELS(X, f32_i32) CUDA_PAIR_KERNELS(X, f64_i64)                                                        \
    CUDA_PAIR_KERNELS(X, i32_i32) CUDA_PAIR_KERNELS(X, i64_i64) CUDA_BIT_KERNELS(X)
#define CUDA_SCALED_KERNELS(X)                                                                                         \
    X(f16_scaled, cuda_scaled_args) X(bf16_scaled, cuda_scaled_args) X(f32_scaled, cuda_scaled_args)                   \
    X(f64_scaled, cuda_scaled_args) X(i8_scaled, cuda_scaled_args) X(u8_scaled, cuda_scaled_args)                      \
    X(i32_scaled, cuda_scaled_args) X(u32_scaled, cuda_scaled_args) X(i64_scaled, cuda_scaled_args)                    \
    X(u64_scaled, cuda_scaled_args) X(e4m3_scaled, cuda_scaled_args) X(e5m2_scaled, cuda_scaled_args)
#define CUDA_OPTIM_KERNELS(X)                                                                                          \
    X(sgd, cuda_optim_args) X(momentum, cuda_optim_args) X(nesterov, cuda_optim_args) X(adam, cuda_optim_args)         \
    X(lars, cuda_optim_args) X(lamb_moments, cuda_optim_args) X(lamb, cuda_optim_args)                                 \
    X(sgd_f64, cuda_optim_args) X(momentum_f64, cuda_optim_args) X(nesterov_f64, cuda_optim_args)                      \
    X(adam_f64, cuda_optim_args) X(lars_f64, cuda_optim_args) X(lamb_moments_f64, cuda_optim_args)                     \
    X(lamb_f64, cuda_optim_args)
#define CUDA_CODE_KERNELS(X)                                                                                           \
    X(encode_f16, cuda_code_args) X(encode_bf16, cuda_code_args) X(decode_f16, cuda_code_args)                         \
    X(decode_bf16, cuda_code_args) X(encode_bits8, cuda_code_args) X(encode_bits4, cuda_code_args)                     \
    X(encode_bits1, cuda_code_args) X(decode_bits8, cuda_code_args) X(decode_bits4, cuda_code_args)                    \
    X(decode_bits1, cuda_code_args)
#define CUDA_TOP_KERNELS(X)                                                                                            \
    X(top_clear, cuda_top_args) X(top_correct, cuda_top_args) X(top_count, cuda_top_args) X(top_pick, cuda_top_args)   \
    X(top_tiles, cuda_top_args) X(top_scan, cuda_top_args) X(top_write, cuda_top_args)                                 \
    X(top_union, cuda_merge_args) X(top_rest, cuda_merge_args)                                                         \
    X(sparse_add, cuda_sparse_args) X(random_take, cuda_sparse_args)
#define CUDA_POWER_KERNELS(X)                                                                                          \
    X(power_begin, cuda_power_args) X(power_left, cuda_power_args) X(power_orthonormalize, cuda_power_args)            \
    X(power_right, cuda_power_args) X(power_rebuild, cuda_power_args)
#define CUDA_CONVERT_KERNELS(X)                                                                                        \
    X(f16_f16, cuda_convert_args) X(f16_bf16, cuda_convert_args) X(f16_f32, cuda_convert_args)                         \
    X(bf16_f16, cuda_convert_args) X(bf16_bf16, cuda_convert_args) X(bf16_f32, cuda_convert_args)                      \
    X(f32_f16, cuda_convert_args) X(f32_bf16, cuda_convert_args) X(f32_f32, cuda_convert_args)                         \
    X(f64_f64, cuda_convert_args) X(signs, cuda_convert_args)
#define CUDA_KERNELS(X)                                                                                                \
    X(exchange, cuda_exchange_args) X(strided, cuda_strided_args) CUDA_REDUCE_KERNELS(X) CUDA_SCALED_KERNELS(X)        \
    CUDA_OPTIM_KERNELS(X) X(squares, cuda_squares_args) X(squares_f64, cuda_squares_args)                              \
    X(squares_total, cuda_squares_args) CUDA_CODE_KERNELS(X)                                                           \
    CUDA_TOP_KERNELS(X) CUDA_POWER_KERNELS(X) CUDA_CONVERT_KERNELS(X)

/* Numbers of the kernels, CUDA_K_f32_sum and so on. No reduction has number 0. */
#define CUDA_KERNEL_NUMBER(name, args) CUDA_K_##name,
typedef enum cuda_kernel { CUDA_KERNELS(CUDA_KERNEL_NUMBER) CUDA_K_COUNT } cuda_kernel;

#endif /* CUDA_KERNELS_H */

/* kernels: all kernels of the plugin, as one file for the compiler:
 *
 *     nvcc -std=c++17 -O3 -fatbin -gencode arch=compute_75,code=sm_75 ... -o kernels.fatbin kernels.cu
 *
 * Each takes its arguments as one struct by value, and is called through the driver by its name (kernels.h). */
#include "kernel_convert.h"
#include "kernel_power.h"

#define CUDA_KERNEL extern "C" __global__ void __launch_bounds__(CUDA_THREADS)
#define CUDA_ARGS(type) const __grid_constant__ type a

/* f32_sum: the op cuda_sum on the type cuda_f32. */
#define CUDA_REDUCE(T, OP)                                                                                             \
    CUDA_KERNEL ddl_k_##T##_##OP(CUDA_ARGS(cuda_reduce_args)) {                                                        \
        cuda_reduce<cuda_##T, cuda_folding<cuda_##T, cuda_##OP<cuda_##T>>>(a);                                         \
    }
#define CUDA_FLOAT(T) CUDA_REDUCE(T, sum) CUDA_REDUCE(T, prod) CUDA_REDUCE(T, min) CUDA_REDUCE(T, max)
#define CUDA_INTEGER(T, SIGNED)                                                                                        \
    CUDA_FLOAT(T)                                                                                                      \
    CUDA_REDUCE(T, land) CUDA_REDUCE(T, lor) CUDA_REDUCE(T, lxor) CUDA_REDUCE(SIGNED, min) CUDA_REDUCE(SIGNED, max)
#define CUDA_PAIR(T) CUDA_REDUCE(T, min_index) CUDA_REDUCE(T, max_index)
CUDA_FLOAT(f16)
CUDA_FLOAT(bf16)
CUDA_FLOAT(f32)
CUDA_FLOAT(f64)
CUDA_FLOAT(e4m3)
CUDA_FLOAT(e5m2)
CUDA_INTEGER(u8, i8)
CUDA_INTEGER(u32, i32)
CUDA_INTEGER(u64, i64)
CUDA_PAIR(f32_i32)
CUDA_PAIR(f64_i64)
CUDA_PAIR(i32_i32)
CUDA_PAIR(i64_i64)
CUDA_REDUCE(bits, band)
CUDA_REDUCE(bits, bor)
CUDA_REDUCE(bits, bxor)

#define CUDA_SCALED(T)                                                                                                 \
    CUDA_KERNEL ddl_k_##T##_scaled(CUDA_ARGS(cuda_scaled_args)) { cuda_reduce<cuda_##T, cuda_scaling<cuda_##T>>(a); }
CUDA_SCALED(f16)
CUDA_SCALED(bf16)
CUDA_SCALED(f32)
CUDA_SCALED(f64)
CUDA_SCALED(i8)
CUDA_SCALED(u8)
CUDA_SCALED(i32)
CUDA_SCALED(u32)
CUDA_SCALED(i64)
CUDA_SCALED(u64)
CUDA_SCALED(e4m3)
CUDA_SCALED(e5m2)

CUDA_KERNEL ddl_k_exchange(CUDA_ARGS(cuda_exchange_args)) { cuda_exchange(a.pair[blockIdx.y]); }

CUDA_KERNEL ddl_k_strided(CUDA_ARGS(cuda_strided_args)) {
    switch (a.word_bytes) {
    case 1: cuda_strided<uint8_t>(a); break;
    case 2: cuda_strided<uint16_t>(a); break;
    case 4: cuda_strided<uint32_t>(a); break;
    case 8: cuda_strided<uint64_t>(a); break;
    default: cuda_strided<uint4>(a);
    }
}

#define CUDA_OPTIM(NAME)                                                                                               \
    CUDA_KERNEL ddl_k_##NAME(CUDA_ARGS(cuda_optim_args)) { cuda_optim<cuda_##NAME, float>(a, a.f32); }                 \
    CUDA_KERNEL ddl_k_##NAME##_f64(CUDA_ARGS(cuda_optim_args)) { cuda_optim<cuda_##NAME, double>(a, a.f64); }
CUDA_OPTIM(sgd)
CUDA_OPTIM(momentum)
CUDA_OPTIM(nesterov)
CUDA_OPTIM(adam)
CUDA_OPTIM(lars)
CUDA_OPTIM(lamb_moments)
CUDA_OPTIM(lamb)

CUDA_KERNEL ddl_k_squares(CUDA_ARGS(cuda_squares_args)) { cuda_squares<float>(a); }
CUDA_KERNEL ddl_k_squares_f64(CUDA_ARGS(cuda_squares_args)) { cuda_squares<double>(a); }
CUDA_KERNEL ddl_k_squares_total(CUDA_ARGS(cuda_squares_args)) { cuda_squares_total(a); }

CUDA_KERNEL ddl_k_encode_f16(CUDA_ARGS(cuda_code_args)) { cuda_cast_encode<cuda_f16>(a, 65504.0f); }
CUDA_KERNEL ddl_k_encode_bf16(CUDA_ARGS(cuda_code_args)) { cuda_cast_encode<cuda_bf16>(a, 0x1.fep127f); }
CUDA_KERNEL ddl_k_decode_f16(CUDA_ARGS(cuda_code_args)) { cuda_cast_decode<cuda_f16>(a); }
CUDA_KERNEL ddl_k_decode_bf16(CUDA_ARGS(cuda_code_args)) { cuda_cast_decode<cuda_bf16>(a); }
CUDA_KERNEL ddl_k_encode_bits8(CUDA_ARGS(cuda_code_args)) { cuda_blocks<8, true>(a); }
CUDA_KERNEL ddl_k_encode_bits4(CUDA_ARGS(cuda_code_args)) { cuda_blocks<4, true>(a); }
CUDA_KERNEL ddl_k_encode_bits1(CUDA_ARGS(cuda_code_args)) { cuda_blocks<1, true>(a); }
CUDA_KERNEL ddl_k_decode_bits8(CUDA_ARGS(cuda_code_args)) { cuda_blocks<8, false>(a); }
CUDA_KERNEL ddl_k_decode_bits4(CUDA_ARGS(cuda_code_args)) { cuda_blocks<4, false>(a); }
CUDA_KERNEL ddl_k_decode_bits1(CUDA_ARGS(cuda_code_args)) { cuda_blocks<1, false>(a); }

CUDA_KERNEL ddl_k_top_clear(CUDA_ARGS(cuda_top_args)) { cuda_top_clear(a); }
CUDA_KERNEL ddl_k_top_correct(CUDA_ARGS(cuda_top_args)) { cuda_top_correct(a); }
CUDA_KERNEL ddl_k_top_count(CUDA_ARGS(cuda_top_args)) { cuda_top_count(a); }
CUDA_KERNEL ddl_k_top_pick(CUDA_ARGS(cuda_top_args)) { cuda_top_pick(a); }
CUDA_KERNEL ddl_k_top_tiles(CUDA_ARGS(cuda_top_args)) { cuda_top_tiles(a); }
CUDA_KERNEL ddl_k_top_scan(CUDA_ARGS(cuda_top_args)) { cuda_top_scan(a); }
CUDA_KERNEL ddl_k_top_write(CUDA_ARGS(cuda_top_args)) { cuda_top_write(a); }
CUDA_KERNEL ddl_k_top_union(CUDA_ARGS(cuda_merge_args)) { cuda_top_union(a); }
CUDA_KERNEL ddl_k_top_rest(CUDA_ARGS(cuda_merge_args)) { cuda_top_rest(a); }
CUDA_KERNEL ddl_k_sparse_add(CUDA_ARGS(cuda_sparse_args)) { cuda_sparse_add(a); }
CUDA_KERNEL ddl_k_random_take(CUDA_ARGS(cuda_sparse_args)) { cuda_random_take(a); }

CUDA_KERNEL ddl_k_power_begin(CUDA_ARGS(cuda_power_args)) { cuda_power_begin(a); }
CUDA_KERNEL ddl_k_power_left(CUDA_ARGS(cuda_power_args)) { cuda_power_left(a); }
CUDA_KERNEL ddl_k_power_orthonormalize(CUDA_ARGS(cuda_power_args)) { cuda_power_orthonormalize(a); }
CUDA_KERNEL ddl_k_power_right(CUDA_ARGS(cuda_power_args)) { cuda_power_right(a); }
CUDA_KERNEL ddl_k_power_rebuild(CUDA_ARGS(cuda_power_args)) { cuda_power_rebuild(a); }

/* f16_f32: to f16 from f32. */
#define CUDA_CONVERT(TO, FROM)                                                                                         \
    CUDA_KERNEL ddl_k_##TO##_##FROM(CUDA_ARGS(cuda_convert_args)) { cuda_convert<cuda_##TO, cuda_##FROM>(a); }
CUDA_CONVERT(f16, f16)
CUDA_CONVERT(f16, bf16)
CUDA_CONVERT(f16, f32)
CUDA_CONVERT(bf16, f16)
CUDA_CONVERT(bf16, bf16)
CUDA_CONVERT(bf16, f32)
CUDA_CONVERT(f32, f16)
CUDA_CONVERT(f32, bf16)
CUDA_CONVERT(f32, f32)
CUDA_CONVERT(f64, f64)
CUDA_KERNEL ddl_k_signs(CUDA_ARGS(cuda_convert_args)) { cuda_signs(a); }

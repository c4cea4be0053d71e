/* kernel_power: the linear algebra of PowerSGD on one rank (src/compress/power.h): P = M Q, orthonormal columns of P,
 * Q = M' P, and M = P Q'. The first and third are sums in another order than the host's, which changes nothing for the
 * other ranks: they are averaged before they are used. The second and fourth give the bits of the host, so that ranks on
 * GPUs and ranks without one agree. It must not know configs. */
#ifndef CUDA_KERNEL_POWER_H
#define CUDA_KERNEL_POWER_H

#include "kernel_top.h"

#define CUDA_POWER_EACH 4 /* columns of P or Q for which an element of M is read once */

/* The first Q, as the host draws it. */
CUDA_INLINE void cuda_power_begin(const cuda_power_args &a) {
    for (int64_t i = cuda_thread(); i < a.cols * a.rank; i += cuda_threads()) {
        a.q[i] = CUDA_MUL((float)((int64_t)(cuda_mix(a.stream, (uint64_t)i) >> 40) - (1 << 23)), 0x1p-23f);
    }
}

/* P = M Q: a warp does a row. */
CUDA_INLINE void cuda_power_left(const cuda_power_args &a) {
    const int lane = (int)threadIdx.x % 32, warps = (int)blockDim.x / 32;
    int64_t row = (int64_t)blockIdx.x * warps + (int)threadIdx.x / 32;
    for (; row < a.rows; row += (int64_t)gridDim.x * warps) {
        for (int c = 0; c < a.rank; c += CUDA_POWER_EACH) {
            const int some = a.rank - c < CUDA_POWER_EACH ? a.rank - c : CUDA_POWER_EACH;
            float sum[CUDA_POWER_EACH] = {0};
            for (int64_t j = lane; j < a.cols; j += 32) {
                float x = a.m[row * a.cols + j];
#pragma unroll
                for (int k = 0; k < CUDA_POWER_EACH; k++) {
                    sum[k] += x * (k < some ? a.q[(c + k) * a.cols + j] : 0.0f);
                }
            }
            for (int k = 0; k < some; k++) {
                for (int far = 16; far > 0; far >>= 1) {
                    sum[k] += __shfl_xor_sync(CUDA_WARP_ALL, sum[k], far, 32);
                }
                if (lane == 0) {
                    a.p[(c + k) * a.rows + row] = sum[k];
                }
            }
        }
    }
}

/* The sum of x[i] * y[i] where x[i] is finite, in double: thread t adds those at t, t + 256, ..., then halves are added.
 * It is the order of the host; a product of floats is exact in double. */
CUDA_INLINE double cuda_power_dot(const float *x, const float *y, int64_t n) {
    __shared__ double lanes[CUDA_THREADS];
    const int t = (int)threadIdx.x;
    double sum = 0;
    for (int64_t i = t; i < n; i += CUDA_THREADS) {
        sum = cuda_finite(x[i]) ? __dadd_rn(sum, __dmul_rn((double)x[i], (double)y[i])) : sum;
    }
    __syncthreads(); /* what the call before left has been read */
    lanes[t] = sum;
    for (int half = CUDA_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (t < half) {
            lanes[t] = __dadd_rn(lanes[t], lanes[t + half]);
        }
    }
    __syncthreads();
    return lanes[0];
}

/* As the host's: a first guess that halves the exponent, then Newton's iteration. */
CUDA_INLINE double cuda_power_root(double x) {
    double guess = __longlong_as_double((__double_as_longlong(x) >> 1) + (1023ll << 51));
    for (int i = 0; i < 6; i++) {
        guess = __dmul_rn(0.5, __dadd_rn(guess, __ddiv_rn(x, guess)));
    }
    return guess;
}

/* Rows in which a column is not finite are NaN in all. */
CUDA_INLINE void cuda_power_mark(const cuda_power_args &a) {
    for (int64_t i = (int)threadIdx.x; i < a.rows; i += CUDA_THREADS) {
        bool odd = false;
        for (int c = 0; c < a.rank; c++) {
            odd = odd || !cuda_finite(a.p[c * a.rows + i]);
        }
        for (int c = 0; c < a.rank && odd; c++) {
            a.p[c * a.rows + i] = __uint_as_float(0x7fffffffu);
        }
    }
    __syncthreads();
}

/* One block: modified Gram-Schmidt. A column that depends on those before it becomes zero. */
CUDA_INLINE void cuda_power_orthonormalize(const cuda_power_args &a) {
    cuda_power_mark(a);
    for (int c = 0; c < a.rank; c++) {
        float *column = a.p + c * a.rows;
        double before = cuda_power_dot(column, column, a.rows);
        for (int d = 0; d < c; d++) {
            const float *other = a.p + d * a.rows;
            float factor = (float)cuda_power_dot(column, other, a.rows);
            for (int64_t i = (int)threadIdx.x; i < a.rows; i += CUDA_THREADS) {
                column[i] = CUDA_SUB(column[i], CUDA_MUL(factor, other[i]));
            }
        }
        double norm = cuda_power_dot(column, column, a.rows);
        float inverse =
            norm > 1e-12 * before && norm > 1e-70 ? (float)__ddiv_rn(1.0, cuda_power_root(norm)) : 0.0f;
        for (int64_t i = (int)threadIdx.x; i < a.rows; i += CUDA_THREADS) {
            column[i] = CUDA_MUL(column[i], inverse);
        }
    }
}

/* Q = M' P over the rows that are finite on all ranks: a block does 8 columns of M, which are one sector of memory, by 32
 * threads each. */
CUDA_INLINE void cuda_power_right(const cuda_power_args &a) {
    const int wide = 8, deep = CUDA_THREADS / wide, t = (int)threadIdx.x;
    __shared__ float sums[CUDA_POWER_EACH][CUDA_THREADS];
    for (int64_t first = (int64_t)blockIdx.x * wide; first < a.cols; first += (int64_t)gridDim.x * wide) {
        const int64_t j = first + t % wide;
        for (int c = 0; c < a.rank; c += CUDA_POWER_EACH) {
            const int some = a.rank - c < CUDA_POWER_EACH ? a.rank - c : CUDA_POWER_EACH;
            float sum[CUDA_POWER_EACH] = {0};
            for (int64_t i = t / wide; i < a.rows && j < a.cols; i += deep) {
                if (cuda_finite(a.p[i])) {
                    float x = a.m[i * a.cols + j];
#pragma unroll
                    for (int k = 0; k < CUDA_POWER_EACH; k++) {
                        sum[k] += x * (k < some ? a.p[(c + k) * a.rows + i] : 0.0f);
                    }
                }
            }
            __syncthreads(); /* the sums of the columns before have been read */
            for (int k = 0; k < CUDA_POWER_EACH; k++) {
                sums[k][t] = sum[k];
            }
            for (int half = CUDA_THREADS / 2; half >= wide; half /= 2) { /* a multiple of `wide` */
                __syncthreads();
                for (int k = 0; k < some && t < half; k++) {
                    sums[k][t] += sums[k][t + half];
                }
            }
            for (int k = 0; k < some && t < wide && j < a.cols; k++) {
                a.q[(c + k) * a.cols + j] = sums[k][t];
            }
        }
    }
}

/* out = P Q', and M becomes the residual: a warp does a row. An odd row is NaN, and its finite values stay. */
CUDA_INLINE void cuda_power_rebuild(const cuda_power_args &a) {
    const int lane = (int)threadIdx.x % 32, warps = (int)blockDim.x / 32;
    int64_t row = (int64_t)blockIdx.x * warps + (int)threadIdx.x / 32;
    for (; row < a.rows; row += (int64_t)gridDim.x * warps) {
        const bool odd = !cuda_finite(a.p[row]);
        for (int64_t j = lane; j < a.cols; j += 32) {
            float sum = odd ? __uint_as_float(0xffffffffu) : 0.0f, m = a.m[row * a.cols + j];
            for (int c = 0; c < a.rank && !odd; c++) {
                sum = CUDA_ADD(sum, CUDA_MUL(a.p[c * a.rows + row], a.q[c * a.cols + j]));
            }
            a.out[row * a.cols + j] = sum;
            a.m[row * a.cols + j] = !odd ? CUDA_SUB(m, sum) : cuda_finite(m) ? m : 0.0f;
        }
    }
}

#endif /* CUDA_KERNEL_POWER_H */

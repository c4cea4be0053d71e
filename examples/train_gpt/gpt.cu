/* gpt.cu: the kernels of train_gpt on a GPU. nvcc -ptx -arch=compute_75 -o train_gpt.ptx gpt.cu
 *
 * The arithmetic is that of kernels_isa.h, in another order. Nothing is added up by atomics: the same input gives the
 * same bits each time. All blocks have GPT_BLOCK threads; rows belong to warps. */
#include <math.h>

#include "shapes.h"

#define GPT_KERNEL extern "C" __global__ void __launch_bounds__(GPT_BLOCK)

static __device__ inline size_t gpt_thread() { return (size_t)blockIdx.x * GPT_BLOCK + threadIdx.x; }
static __device__ inline size_t gpt_row() { return gpt_thread() / GPT_WARP; }
static __device__ inline unsigned gpt_lane() { return threadIdx.x % GPT_WARP; }

static __device__ inline float gpt_warp_sum(float x) {
    for (int apart = GPT_WARP / 2; apart > 0; apart /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, apart, GPT_WARP);
    }
    return x;
}

static __device__ inline float gpt_warp_max(float x) {
    for (int apart = GPT_WARP / 2; apart > 0; apart /= 2) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, apart, GPT_WARP));
    }
    return x;
}

/* ---- matrix product: a block computes a tile of C, each thread 4 x 4 of it --------------------------------------- */

enum { GPT_DEPTH = 16, GPT_EACH = 4 };
typedef float gpt_slice[GPT_TILE + 1]; /* one more: threads that walk down a column meet different banks */

/* to[p][i] = from[(at + i) wide + (first + p) deep], zero beyond the matrix; neighbours read neighbours. */
static __device__ inline void gpt_load(gpt_slice *to, const float *from, size_t wide, size_t deep, size_t at,
                                       size_t end, size_t first, size_t last) {
    for (unsigned e = threadIdx.x; e < GPT_TILE * GPT_DEPTH; e += GPT_BLOCK) {
        unsigned p = deep == 1 ? e % GPT_DEPTH : e / GPT_TILE, i = deep == 1 ? e / GPT_DEPTH : e % GPT_TILE;
        to[p][i] = at + i < end && first + p < last ? from[(at + i) * wide + (first + p) * deep] : 0.0f;
    }
}

static __device__ inline size_t gpt_matrix(const gpt_stride &s, size_t which, size_t heads) {
    return which / heads * s.sequence + which % heads * s.head;
}

GPT_KERNEL gpt_gemm(const __grid_constant__ gpt_gemm_args x) {
    __shared__ gpt_slice a[GPT_DEPTH], b[GPT_DEPTH];
    const gemm &g = x.g;
    size_t across = (g.n + GPT_TILE - 1) / GPT_TILE, tiles = (g.m + GPT_TILE - 1) / GPT_TILE * across;
    size_t which = blockIdx.x / tiles, top = blockIdx.x % tiles / across * GPT_TILE;
    size_t left = blockIdx.x % tiles % across * GPT_TILE;
    if (g.zeros == C_UNUSED_ABOVE && left >= top + GPT_TILE) {
        return;
    }
    size_t first = g.zeros == A_ZERO_BELOW ? top : 0;
    size_t last = g.zeros == A_ZERO_ABOVE && top + GPT_TILE < g.k ? top + GPT_TILE : g.k;
    const float *from_a = g.a + gpt_matrix(x.a, which, x.heads), *from_b = g.b + gpt_matrix(x.b, which, x.heads);
    unsigned row = threadIdx.x / 16 * GPT_EACH, column = threadIdx.x % 16;
    float sum[GPT_EACH][GPT_EACH] = {};
    for (size_t p0 = first; p0 < last; p0 += GPT_DEPTH) {
        gpt_load(a, from_a, g.a_row, g.a_col, top, g.m, p0, last);
        gpt_load(b, from_b, g.b_col, g.b_row, left, g.n, p0, last);
        __syncthreads();
        for (int p = 0; p < GPT_DEPTH; p++) {
            for (int i = 0; i < GPT_EACH; i++) {
                for (int j = 0; j < GPT_EACH; j++) {
                    sum[i][j] = fmaf(a[p][row + i], b[p][column + 16 * j], sum[i][j]);
                }
            }
        }
        __syncthreads();
    }
    float *c = g.c + gpt_matrix(x.c, which, x.heads);
    for (int i = 0; i < GPT_EACH; i++) {
        for (int j = 0; j < GPT_EACH; j++) {
            size_t down = top + row + i, right = left + column + 16 * j;
            if (down < g.m && right < g.n) {
                float *at = c + down * g.c_row + right;
                *at = g.add ? *at + sum[i][j] : sum[i][j];
            }
        }
    }
}

/* ---- layer norm -------------------------------------------------------------------------------------------------- */

GPT_KERNEL gpt_norm(const __grid_constant__ gpt_norm_args a) {
    size_t row = gpt_row();
    if (row >= a.rows) {
        return;
    }
    const float *x = a.x + row * a.dim;
    float sum = 0.0f, square = 0.0f;
    for (size_t i = gpt_lane(); i < a.dim; i += GPT_WARP) {
        sum += x[i];
    }
    float mean = gpt_warp_sum(sum) / (float)a.dim;
    for (size_t i = gpt_lane(); i < a.dim; i += GPT_WARP) { /* a second pass: E[x^2] - mean^2 would cancel */
        square += (x[i] - mean) * (x[i] - mean);
    }
    float scale = 1.0f / sqrtf(gpt_warp_sum(square) / (float)a.dim + 1e-5f);
    for (size_t i = gpt_lane(); i < a.dim; i += GPT_WARP) {
        a.out[row * a.dim + i] = (x[i] - mean) * scale * a.gain[i] + a.bias[i];
    }
    if (gpt_lane() == 0) {
        a.stats[2 * row] = mean;
        a.stats[2 * row + 1] = scale;
    }
}

/* Adds the gradient with respect to x to d_x. */
GPT_KERNEL gpt_norm_back(const __grid_constant__ gpt_norm_back_args a) {
    size_t row = gpt_row();
    if (row >= a.rows) {
        return;
    }
    const float *x = a.x + row * a.dim, *d_out = a.d_out + row * a.dim;
    float mean = a.stats[2 * row], scale = a.stats[2 * row + 1], sum = 0.0f, sum_unit = 0.0f;
    for (size_t i = gpt_lane(); i < a.dim; i += GPT_WARP) {
        float d = d_out[i] * a.gain[i];
        sum += d;
        sum_unit += d * (x[i] - mean) * scale;
    }
    float m = gpt_warp_sum(sum) / (float)a.dim, m_unit = gpt_warp_sum(sum_unit) / (float)a.dim;
    for (size_t i = gpt_lane(); i < a.dim; i += GPT_WARP) {
        float unit = (x[i] - mean) * scale;
        a.d_x[row * a.dim + i] += (d_out[i] * a.gain[i] - m - unit * m_unit) * scale;
    }
}

/* d_gain and d_bias: a block takes GPT_COLUMNS columns; the threads of a column share its rows. */
GPT_KERNEL gpt_norm_columns(const __grid_constant__ gpt_norm_back_args a) {
    enum { PARTS = GPT_BLOCK / GPT_COLUMNS };
    __shared__ float gains[GPT_BLOCK], biases[GPT_BLOCK];
    size_t column = (size_t)blockIdx.x * GPT_COLUMNS + threadIdx.x % GPT_COLUMNS;
    float gain = 0.0f, bias = 0.0f;
    for (size_t row = threadIdx.x / GPT_COLUMNS; row < a.rows && column < a.dim; row += PARTS) {
        float d = a.d_out[row * a.dim + column];
        gain += d * (a.x[row * a.dim + column] - a.stats[2 * row]) * a.stats[2 * row + 1];
        bias += d;
    }
    gains[threadIdx.x] = gain;
    biases[threadIdx.x] = bias;
    __syncthreads();
    if (threadIdx.x < GPT_COLUMNS && column < a.dim) {
        for (int i = 1; i < PARTS; i++) {
            gain += gains[i * GPT_COLUMNS + threadIdx.x];
            bias += biases[i * GPT_COLUMNS + threadIdx.x];
        }
        a.d_gain[column] = gain;
        a.d_bias[column] = bias;
    }
}

/* ---- element by element ------------------------------------------------------------------------------------------ */

GPT_KERNEL gpt_copy(const __grid_constant__ gpt_map_args a) {
    size_t i = gpt_thread();
    if (i < a.count) {
        a.to[i] = a.from != NULL ? a.from[i] : 0.0f;
    }
}

/* GELU's tanh form is x sigmoid(2u). */
static __device__ inline float gpt_gate(float x) {
    float twice_u = 1.5957691216f * (x + 0.044715f * x * x * x);
    return 1.0f / (1.0f + expf(-fmaxf(twice_u, -80.0f)));
}

GPT_KERNEL gpt_gelu(const __grid_constant__ gpt_map_args a) {
    size_t i = gpt_thread();
    if (i < a.count) {
        a.to[i] = a.from[i] * gpt_gate(a.from[i]);
    }
}

GPT_KERNEL gpt_gelu_back(const __grid_constant__ gpt_map_args a) {
    size_t i = gpt_thread();
    if (i < a.count) {
        float x = a.from[i], gate = gpt_gate(x), slope = 1.5957691216f * (1.0f + 0.134145f * x * x);
        a.to[i] *= gate + x * gate * (1.0f - gate) * slope;
    }
}

GPT_KERNEL gpt_adamw(const __grid_constant__ gpt_adamw_args a) {
    size_t i = gpt_thread();
    if (i < a.count) {
        const adamw_rates &r = a.rates;
        float g = a.grad[i] * r.grad_scale;
        float m = a.mean[i] * r.beta1 + g * (1.0f - r.beta1), v = a.square[i] * r.beta2 + g * g * (1.0f - r.beta2);
        a.mean[i] = m;
        a.square[i] = v;
        float step = m * r.mean_scale / (sqrtf(v * r.square_scale) + r.epsilon);
        a.param[i] -= r.lr * (step + r.decay * a.param[i]);
    }
}

/* ---- softmax ----------------------------------------------------------------------------------------------------- */

GPT_KERNEL gpt_softmax(const __grid_constant__ gpt_softmax_args a) {
    size_t row = gpt_row();
    if (row >= a.rows) {
        return;
    }
    float *x = a.x + row * a.context, top = -INFINITY, sum = 0.0f;
    size_t seen = row % a.context + 1;
    for (size_t j = gpt_lane(); j < seen; j += GPT_WARP) {
        top = fmaxf(top, x[j]);
    }
    top = gpt_warp_max(top);
    for (size_t j = gpt_lane(); j < seen; j += GPT_WARP) {
        x[j] = expf((x[j] - top) * a.scale);
        sum += x[j];
    }
    float inverse = 1.0f / gpt_warp_sum(sum);
    for (size_t j = gpt_lane(); j < a.context; j += GPT_WARP) {
        x[j] = j < seen ? x[j] * inverse : 0.0f;
    }
}

/* x becomes the gradient of the scores: p (x - sum(p x)) scale. */
GPT_KERNEL gpt_softmax_back(const __grid_constant__ gpt_softmax_args a) {
    size_t row = gpt_row();
    if (row >= a.rows) {
        return;
    }
    float *x = a.x + row * a.context, sum = 0.0f;
    const float *p = a.p + row * a.context;
    size_t seen = row % a.context + 1;
    for (size_t j = gpt_lane(); j < seen; j += GPT_WARP) {
        sum += p[j] * x[j];
    }
    float inner = gpt_warp_sum(sum);
    for (size_t j = gpt_lane(); j < a.context; j += GPT_WARP) { /* x may be unwritten where no position looks */
        x[j] = j < seen ? p[j] * (x[j] - inner) * a.scale : 0.0f;
    }
}

/* Logits become their gradient of the mean loss; each row's cross-entropy, in nats, goes to `losses`. */
GPT_KERNEL gpt_cross_entropy(const __grid_constant__ gpt_cross_entropy_args a) {
    size_t row = gpt_row();
    if (row >= a.rows) {
        return;
    }
    float *x = a.x + row * a.classes, top = -INFINITY, sum = 0.0f;
    float right = 0.0f; /* the target's logit, from the lane that has it */
    size_t target = a.target[row];
    for (size_t i = gpt_lane(); i < a.classes; i += GPT_WARP) {
        top = fmaxf(top, x[i]);
        right = i == target ? x[i] : right;
    }
    top = gpt_warp_max(top);
    right = gpt_warp_sum(right);
    for (size_t i = gpt_lane(); i < a.classes; i += GPT_WARP) {
        x[i] = expf(x[i] - top);
        sum += x[i];
    }
    sum = gpt_warp_sum(sum);
    for (size_t i = gpt_lane(); i < a.classes; i += GPT_WARP) {
        x[i] = x[i] / (sum * (float)a.rows) - (i == target ? 1.0f / (float)a.rows : 0.0f);
    }
    if (gpt_lane() == 0) {
        a.losses[row] = logf(sum) + top - right;
    }
}

/* Sums of x, or of its squares: short float sums, long double ones. The host adds the blocks up. */
GPT_KERNEL gpt_sums(const __grid_constant__ gpt_sums_args a) {
    __shared__ double sums[GPT_BLOCK / GPT_WARP];
    double mine = 0.0;
    for (size_t i = gpt_thread(); i < a.count; i += (size_t)gridDim.x * GPT_BLOCK) {
        mine += (double)(a.squares ? a.x[i] * a.x[i] : a.x[i]);
    }
    for (int apart = GPT_WARP / 2; apart > 0; apart /= 2) {
        mine += __shfl_xor_sync(0xffffffffu, mine, apart, GPT_WARP);
    }
    if (gpt_lane() == 0) {
        sums[threadIdx.x / GPT_WARP] = mine;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < GPT_BLOCK / GPT_WARP; i++) {
            mine += sums[i];
        }
        a.sums[blockIdx.x] = mine;
    }
}

/* ---- embedding --------------------------------------------------------------------------------------------------- */

GPT_KERNEL gpt_embed(const __grid_constant__ gpt_embed_args a) {
    size_t i = gpt_thread(), row = i / a.dim, column = i % a.dim;
    if (row < a.rows) {
        a.out[i] = a.in[a.bytes[row] * a.dim + column] + a.in[(a.classes + row % a.context) * a.dim + column];
    }
}

/* A thread for each number of the table: it adds up the rows that used it, in their order. */
GPT_KERNEL gpt_embed_back(const __grid_constant__ gpt_embed_args a) {
    size_t i = gpt_thread(), entry = i / a.dim, column = i % a.dim;
    float sum = 0.0f;
    if (entry >= a.classes + a.context) {
        return;
    }
    if (entry < a.classes) {
        for (size_t row = 0; row < a.rows; row++) {
            sum += a.bytes[row] == entry ? a.in[row * a.dim + column] : 0.0f;
        }
    } else {
        for (size_t row = entry - a.classes; row < a.rows; row += a.context) {
            sum += a.in[row * a.dim + column];
        }
    }
    a.out[i] = sum;
}

/* cuda.h: the table of kernels of a GPU, which gpt.cu has. Calls are put on one stream and return; the host waits where
 * it reads (a loss, a norm, logits) and before it gives the GPU the next bytes.
 *
 * Pointers that the kernels get are the GPU's; bytes, targets and what read and write call `host` are the host's. The
 * table's functions return nothing, so the first failure is kept, and cuda_good tells it. */
#ifndef CUDA_H
#define CUDA_H

#include "../gpu.h"
#include "kernels.h"

enum { CUDA_MEMORIES = 8 };

static struct cuda {
    ddl_context *context;
    int32_t device; /* as ddl numbers it; DDL_HOST: no GPU is used */
    gpu gpu;
    ddl_tensor memories[CUDA_MEMORIES]; /* to be freed */
    size_t count;
    uint8_t *bytes, *targets; /* (N) */
    float *losses;            /* (N) */
    double *sums;             /* (GPT_SUMS) */
    const char *failed;       /* the first that did not work */
    int code;                 /* what the driver said */
} cuda;

static bool cuda_good(void) {
    return cuda.failed == NULL ||
           problem("The GPU failed at \"%s\" (CUDA error %d; %s); checkpoints are left as they are.", cuda.failed,
                   cuda.code, ddl_error(cuda.context));
}

static void cuda_note(const char *what, int code) {
    if (code != 0 && cuda.failed == NULL) {
        cuda.failed = what;
        cuda.code = code;
    }
}

static void cuda_run(const char *name, size_t blocks, const void *args) {
    if (cuda.failed == NULL && blocks > 0) {
        cuda_note(name, gpu_run(&cuda.gpu, name, (int64_t)(blocks * GPT_BLOCK), args));
    }
}

static size_t cuda_blocks(size_t count, size_t per_block) { return (count + per_block - 1) / per_block; }

static size_t cuda_row_blocks(size_t rows) { return cuda_blocks(rows, GPT_BLOCK / GPT_WARP); }

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static void *cuda_alloc(ddl_dtype type, size_t count) {
    int64_t shape = (int64_t)count;
    ddl_tensor *t = &cuda.memories[cuda.count];
    if (cuda.count == CUDA_MEMORIES || ddl_tensor_alloc_on(cuda.context, cuda.device, type, 1, &shape, t) != DDL_OK) {
        problem("There is no memory for %zu MB on the GPU; choose a smaller --batch, --context, --dim or --layers: %s",
                count * ddl_dtype_bytes(type) >> 20, ddl_error(cuda.context));
        return NULL;
    }
    cuda.count++;
    return t->data;
}

static float *cuda_floats(size_t count) { return cuda_alloc(DDL_F32, count); }

/* Between host and GPU, when the GPU has done what it was told before. */
static void cuda_move(void *to, int32_t to_device, const void *from, int32_t from_device, ddl_dtype type,
                      size_t count) {
    ddl_tensor dst = ddl_tensor_1d(to, type, (int64_t)count), src = ddl_tensor_1d(from, type, (int64_t)count);
    dst.device = to_device;
    src.device = from_device;
    cuda_note("waiting for the stream", cuda.gpu.stream_wait(cuda.gpu.stream));
    if (cuda.failed == NULL) {
        cuda_note("copying", ddl_tensor_copy(cuda.context, dst, src));
    }
}

static void cuda_read(float *host, const float *from, size_t count) {
    cuda_move(host, DDL_HOST, from, cuda.device, DDL_F32, count);
}

static void cuda_write(float *to, const float *host, size_t count) {
    cuda_move(to, cuda.device, host, DDL_HOST, DDL_F32, count);
}

/* ---- the table --------------------------------------------------------------------------------------------------- */

static void cuda_gemms(const struct gpt_gemm_args *a) {
    size_t tiles = cuda_blocks(a->g.m, GPT_TILE) * cuda_blocks(a->g.n, GPT_TILE);
    cuda_run("gpt_gemm", tiles * a->count, a);
}

static void cuda_gemm(const struct gemm *g) { cuda_gemms(&(struct gpt_gemm_args){.g = *g, .count = 1, .heads = 1}); }

static void cuda_norm(float *out, float *stats, const float *x, const float *gain, const float *bias, size_t rows,
                      size_t dim) {
    cuda_run("gpt_norm", cuda_row_blocks(rows), &(struct gpt_norm_args){out, stats, x, gain, bias, rows, dim});
}

static void cuda_norm_back(float *d_x, float *d_gain, float *d_bias, const float *d_out, const float *x,
                           const float *stats, const float *gain, size_t rows, size_t dim) {
    struct gpt_norm_back_args a = {d_x, d_gain, d_bias, d_out, x, stats, gain, rows, dim};
    cuda_run("gpt_norm_columns", cuda_blocks(dim, GPT_COLUMNS), &a);
    cuda_run("gpt_norm_back", cuda_row_blocks(rows), &a);
}

static void cuda_map(const char *name, float *to, const float *from, size_t count) {
    cuda_run(name, cuda_blocks(count, GPT_BLOCK), &(struct gpt_map_args){to, from, count});
}

static void cuda_gelu(float *out, const float *x, size_t count) { cuda_map("gpt_gelu", out, x, count); }

static void cuda_gelu_back(float *d, const float *x, size_t count) { cuda_map("gpt_gelu_back", d, x, count); }

static void cuda_copy(float *to, const float *from, size_t count) { cuda_map("gpt_copy", to, from, count); }

static void cuda_zero(float *to, size_t count) { cuda_map("gpt_copy", to, NULL, count); }

/* Sequences and heads are matrices of one launch: as kernels_isa.h does it for one after another. */
static void cuda_attention(float *out, float *p, const float *qkv, struct attention_shape s) {
    size_t c = s.dim, t = s.context, size = c / s.heads, w = 3 * c, count = s.batch * s.heads;
    struct gpt_stride in = {t * w, size}, square = {s.heads * t * t, t * t}, rows = {t * c, size};
    cuda_gemms(&(struct gpt_gemm_args){
        {t, t, size, qkv, w, 1, qkv + c, 1, w, p, t, false, C_UNUSED_ABOVE}, count, s.heads, in, in, square});
    cuda_run("gpt_softmax", cuda_row_blocks(count * t),
             &(struct gpt_softmax_args){p, NULL, count * t, t, 1.0f / sqrtf((float)size)});
    cuda_gemms(&(struct gpt_gemm_args){
        {t, size, t, p, t, 1, qkv + 2 * c, w, 1, out, c, false, A_ZERO_ABOVE}, count, s.heads, square, in, rows});
}

static void cuda_attention_back(float *d_qkv, float *d_p, const float *d_out, const float *p, const float *qkv,
                                struct attention_shape s) {
    size_t c = s.dim, t = s.context, size = c / s.heads, w = 3 * c, count = s.batch * s.heads;
    struct gpt_stride in = {t * w, size}, square = {s.heads * t * t, t * t}, rows = {t * c, size};
    const float *q = qkv, *k = q + c, *v = k + c;
    cuda_gemms(&(struct gpt_gemm_args){
        {t, t, size, d_out, c, 1, v, 1, w, d_p, t, false, C_UNUSED_ABOVE}, count, s.heads, rows, in, square});
    cuda_gemms(&(struct gpt_gemm_args){
        {t, size, t, p, 1, t, d_out, c, 1, d_qkv + 2 * c, w, false, A_ZERO_BELOW}, count, s.heads, square, rows, in});
    cuda_run("gpt_softmax_back", cuda_row_blocks(count * t),
             &(struct gpt_softmax_args){d_p, p, count * t, t, 1.0f / sqrtf((float)size)});
    cuda_gemms(&(struct gpt_gemm_args){
        {t, size, t, d_p, t, 1, k, w, 1, d_qkv, w, false, A_ZERO_ABOVE}, count, s.heads, square, in, in});
    cuda_gemms(&(struct gpt_gemm_args){
        {t, size, t, d_p, 1, t, q, w, 1, d_qkv + c, w, false, A_ZERO_BELOW}, count, s.heads, square, in, in});
}

static double cuda_sums(const float *x, size_t count, bool squares) {
    double sums[GPT_SUMS], total = 0.0;
    size_t blocks = cuda_blocks(count, 16 * GPT_BLOCK);
    blocks = blocks < GPT_SUMS ? blocks : GPT_SUMS;
    cuda_run("gpt_sums", blocks, &(struct gpt_sums_args){cuda.sums, x, count, squares});
    cuda_move(sums, DDL_HOST, cuda.sums, cuda.device, DDL_F64, blocks);
    for (size_t i = 0; i < blocks && cuda.failed == NULL; i++) {
        total += sums[i];
    }
    return total;
}

static double cuda_sum_squares(const float *x, size_t count) { return cuda_sums(x, count, true); }

static double cuda_cross_entropy(float *x, const uint8_t *target, size_t rows, size_t classes) {
    cuda_move(cuda.targets, cuda.device, target, DDL_HOST, DDL_U8, rows);
    cuda_run("gpt_cross_entropy", cuda_row_blocks(rows),
             &(struct gpt_cross_entropy_args){x, cuda.losses, cuda.targets, rows, classes});
    return cuda_sums(cuda.losses, rows, false);
}

static void cuda_adamw(const struct adamw_rates *rates, float *param, const float *grad, float *mean, float *square,
                       size_t count) {
    cuda_run("gpt_adamw", cuda_blocks(count, GPT_BLOCK),
             &(struct gpt_adamw_args){*rates, param, grad, mean, square, count});
}

static void cuda_embed(float *out, const uint8_t *bytes, const float *in, size_t rows, size_t context, size_t dim,
                       size_t classes) {
    cuda_move(cuda.bytes, cuda.device, bytes, DDL_HOST, DDL_U8, rows);
    cuda_run("gpt_embed", cuda_blocks(rows * dim, GPT_BLOCK),
             &(struct gpt_embed_args){out, in, cuda.bytes, rows, context, dim, classes});
}

static void cuda_embed_back(float *d_in, const uint8_t *bytes, const float *d_out, size_t rows, size_t context,
                            size_t dim, size_t classes) {
    (void)bytes; /* the GPU still has them */
    cuda_run("gpt_embed_back", cuda_blocks((classes + context) * dim, GPT_BLOCK),
             &(struct gpt_embed_args){d_in, d_out, cuda.bytes, rows, context, dim, classes});
}

static const struct kernels kernels_cuda = {
    .gemm = cuda_gemm,
    .norm = cuda_norm,
    .norm_back = cuda_norm_back,
    .gelu = cuda_gelu,
    .gelu_back = cuda_gelu_back,
    .attention = cuda_attention,
    .attention_back = cuda_attention_back,
    .cross_entropy = cuda_cross_entropy,
    .sum_squares = cuda_sum_squares,
    .adamw = cuda_adamw,
    .copy = cuda_copy,
    .zero = cuda_zero,
    .embed = cuda_embed,
    .embed_back = cuda_embed_back,
    .read = cuda_read,
    .write = cuda_write,
    .floats = cuda_floats,
    .heads_at_once = true,
};

/* ---- begin and end ----------------------------------------------------------------------------------------------- */

/* A GPU for this rank, kernels, and a stream; `rows` positions at once. From here on `kernel` is the GPU's table. */
static bool cuda_open(ddl_context *context, const char *program, size_t rows) {
    int32_t count = ddl_device_count(context), rank = ddl_rank(ddl_world(context));
    const char *why = count == 0 ? "ddl finds no GPU (ddl-info says why; docs/cuda.md has what to do)"
                                 : gpu_open(&cuda.gpu, rank % count, program, "train_gpt");
    if (why != NULL) {
        return problem("--device cuda cannot be used on rank %d: %s. Without it the processor computes.", (int)rank,
                       why);
    }
    cuda.context = context;
    cuda.device = rank % count + 1;
    cuda.bytes = cuda_alloc(DDL_U8, rows);
    cuda.targets = cuda.bytes == NULL ? NULL : cuda_alloc(DDL_U8, rows);
    cuda.losses = cuda.targets == NULL ? NULL : cuda_floats(rows);
    cuda.sums = cuda.losses == NULL ? NULL : cuda_alloc(DDL_F64, GPT_SUMS);
    kernel = &kernels_cuda;
    return cuda.sums != NULL;
}

/* When nothing uses the GPU any more. */
static void cuda_close(void) {
    if (cuda.gpu.stream != NULL) {
        cuda.gpu.stream_wait(cuda.gpu.stream);
    }
    while (cuda.count > 0) {
        ddl_tensor_free(cuda.context, &cuda.memories[--cuda.count]);
    }
}

#endif

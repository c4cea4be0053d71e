/* model.h: a byte-level GPT: where its parameters lie, the forward pass, the backward pass.
 *
 * Shapes in comments: B sequences, T positions (the context), C channels (dim), H heads, V = 256 byte values; N = B T.
 * Pre-norm blocks as in GPT-2; linear layers without bias, since the layer norm before each has one; the output matrix
 * is not tied to the embedding, so that every gradient belongs to exactly one layer. It must not know that other ranks
 * exist. */
#ifndef MODEL_H
#define MODEL_H

#include "kernels.h"
#include "random.h"

enum { VOCAB = 256 };

struct shape {
    size_t layers, dim, heads, context;
};

struct tensor {
    size_t first, count; /* its place among the parameters */
    size_t rows;         /* of a matrix; a vector has one */
    double deviation;    /* of the random initial values; 0: all are `fill` */
    float fill;
    bool decays; /* matrices decay; gains and biases do not */
};

struct range {
    size_t first, count;
};

enum { HEAD_TENSORS = 3, BLOCK_TENSORS = 8, EMBEDDING_TENSORS = 2, MAX_LAYERS = 64 };
enum { MAX_TENSORS = HEAD_TENSORS + BLOCK_TENSORS * MAX_LAYERS + EMBEDDING_TENSORS };

/* One block's weights, or, with the same offsets into another array, their gradients. */
struct block {
    float *norm1_gain, *norm1_bias; /* (C) */
    float *qkv;                     /* (C, 3C) */
    float *mix;                     /* (C, C) */
    float *norm2_gain, *norm2_bias; /* (C) */
    float *up;                      /* (C, 4C) */
    float *down;                    /* (4C, C) */
};

/* What a block's forward pass leaves for its backward pass. */
struct trace {
    float *in;             /* (N, C) the residual stream, before attention */
    float *norm1, *stats1; /* (N, C), (N, 2) */
    float *qkv;            /* (N, 3C) */
    float *attention;      /* (B, H, T, T) */
    float *heads;          /* (N, C) */
    float *middle;         /* (N, C) the residual stream, before the MLP */
    float *norm2, *stats2; /* (N, C), (N, 2) */
    float *up, *gelu;      /* (N, 4C) */
};

struct model {
    struct shape shape;
    size_t batch; /* B, per rank */
    size_t count; /* parameters */
    size_t tensor_count;
    struct tensor tensors[MAX_TENSORS];
    struct range layers[MAX_LAYERS + 2]; /* in the order in which backward finishes them */
    float *params, *grads;               /* where the kernels work */
    float *home;                         /* params in the host's memory, for files; the same ones on the host */
    struct trace traces[MAX_LAYERS];
    float *final, *final_norm, *final_stats; /* (N, C), (N, C), (N, 2) */
    float *logits;                           /* (N, V) */
    float *d_stream, *d_norm;                /* (N, C) */
    float *d_qkv, *d_up;                     /* (N, 3C), (N, 4C) */
    float *d_attention;                      /* (T, T), or one for each sequence and head */
    void *activation_memory;                 /* of the host */
};

/* Called by backward when the gradient of layers[index] is final; the caller may start to send it. */
typedef void layer_ready(void *user, size_t index);

/* ---- layout ----------------------------------------------------------------------------------------------------- */

static void add_matrix(struct model *m, size_t rows, size_t columns, double deviation) {
    m->tensors[m->tensor_count++] = (struct tensor){m->count, rows * columns, rows, deviation, 0.0f, true};
    m->count += rows * columns;
}

static void add_vector(struct model *m, size_t count, float fill) {
    m->tensors[m->tensor_count++] = (struct tensor){m->count, count, 1, 0.0, fill, false};
    m->count += count;
}

static void close_layer(struct model *m, size_t index, size_t first) {
    m->layers[index] = (struct range){first, m->count - first};
}

/* Lays the layers out in the order in which backward finishes them: head, last block ... first block, embeddings. A
 * bucket of finished gradients is then one contiguous range, and ranges become ready from the front of the array to its
 * end. */
static void model_layout(struct model *m) {
    size_t c = m->shape.dim, first = 0;
    double width = 1.0 / sqrt((double)c);
    add_vector(m, c, 1.0f);
    add_vector(m, c, 0.0f);
    add_matrix(m, c, VOCAB, 0.02);
    close_layer(m, 0, first);
    for (size_t i = 0; i < m->shape.layers; i++) {
        first = m->count;
        add_vector(m, c, 1.0f);
        add_vector(m, c, 0.0f);
        add_matrix(m, c, 3 * c, width);
        add_matrix(m, c, c, 0.0); /* a block starts as the identity: what it adds is learned, not noise to unlearn */
        add_vector(m, c, 1.0f);
        add_vector(m, c, 0.0f);
        add_matrix(m, c, 4 * c, width);
        add_matrix(m, 4 * c, c, 0.0);
        close_layer(m, 1 + i, first);
    }
    first = m->count;
    add_matrix(m, VOCAB, c, 0.3);
    add_matrix(m, m->shape.context, c, 0.03); /* which byte matters more at first than where it stands */
    close_layer(m, 1 + m->shape.layers, first);
}

/* Block i of the forward order in `base`, which is params or grads. */
static struct block block_at(const struct model *m, float *base, size_t i) {
    const struct tensor *t = m->tensors + HEAD_TENSORS + BLOCK_TENSORS * (m->shape.layers - 1 - i);
    return (struct block){base + t[0].first, base + t[1].first, base + t[2].first, base + t[3].first,
                          base + t[4].first, base + t[5].first, base + t[6].first, base + t[7].first};
}

static float *head_at(const struct model *m, float *base, size_t tensor) { return base + m->tensors[tensor].first; }

/* Bytes (V, C), and positions (T, C) right behind them. */
static float *embedding_at(const struct model *m, float *base) {
    return base + m->tensors[m->tensor_count - EMBEDDING_TENSORS].first;
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

/* Hands out `count` floats of *arena, or only counts them while *arena is NULL. */
static float *take(float **arena, size_t *total, size_t count) {
    float *here = *arena;
    count = (count + 15) / 16 * 16;
    *total += count;
    if (*arena != NULL) {
        *arena += count;
    }
    return here;
}

static size_t place_activations(struct model *m, float *arena) {
    size_t total = 0, c = m->shape.dim, t = m->shape.context, n = m->batch * t;
    for (size_t i = 0; i < m->shape.layers; i++) {
        struct trace *a = &m->traces[i];
        a->in = take(&arena, &total, n * c);
        a->norm1 = take(&arena, &total, n * c);
        a->stats1 = take(&arena, &total, n * 2);
        a->qkv = take(&arena, &total, n * 3 * c);
        a->attention = take(&arena, &total, m->batch * m->shape.heads * t * t);
        a->heads = take(&arena, &total, n * c);
        a->middle = take(&arena, &total, n * c);
        a->norm2 = take(&arena, &total, n * c);
        a->stats2 = take(&arena, &total, n * 2);
        a->up = take(&arena, &total, n * 4 * c);
        a->gelu = take(&arena, &total, n * 4 * c);
    }
    m->final = take(&arena, &total, n * c);
    m->final_norm = take(&arena, &total, n * c);
    m->final_stats = take(&arena, &total, n * 2);
    m->logits = take(&arena, &total, n * VOCAB);
    m->d_stream = take(&arena, &total, n * c);
    m->d_norm = take(&arena, &total, n * c);
    m->d_qkv = take(&arena, &total, n * 3 * c);
    m->d_up = take(&arena, &total, n * 4 * c);
    m->d_attention = take(&arena, &total, (kernel->heads_at_once ? m->batch * m->shape.heads : 1) * t * t);
    return total;
}

static bool model_create(struct model *m, struct shape shape, size_t batch) {
    memset(m, 0, sizeof *m);
    m->shape = shape;
    m->batch = batch;
    model_layout(m);
    m->home = m->params = host_floats(2 * m->count);
    float *arena = m->params == NULL ? NULL : kernel->floats(place_activations(m, NULL));
    if (arena == NULL) {
        return false; /* model_free frees */
    }
    m->grads = m->params + m->count;
    m->activation_memory = kernel->floats == host_floats ? arena : NULL;
    place_activations(m, arena);
    return true;
}

static void model_free(struct model *m) {
    free(m->home);
    free(m->activation_memory);
}

static void model_initialize(struct model *m, uint64_t seed) {
    for (size_t i = 0; i < m->tensor_count; i++) {
        const struct tensor *t = &m->tensors[i];
        for (size_t j = 0; j < t->count; j++) {
            m->params[t->first + j] =
                t->deviation > 0.0 ? (float)(t->deviation * random_normal(seed, RANDOM_WEIGHT, i, j)) : t->fill;
        }
    }
}

/* ---- layers ----------------------------------------------------------------------------------------------------- */

/* y (n, out) = or += x (n, in) w (in, out). */
static void linear(float *y, const float *x, const float *w, size_t n, size_t in, size_t out, bool add) {
    kernel->gemm(&(struct gemm){n, out, in, x, in, 1, w, out, 1, y, out, add, DENSE});
}

/* d_x (n, in) = d_y (n, out) w^T;  d_w (in, out) = x^T d_y. Each weight is used once per step, so that d_w is written,
 * not added. */
static void linear_back(float *d_x, float *d_w, const float *d_y, const float *x, const float *w, size_t n, size_t in,
                        size_t out) {
    kernel->gemm(&(struct gemm){n, in, out, d_y, out, 1, w, 1, out, d_x, in, false, DENSE});
    kernel->gemm(&(struct gemm){in, out, n, x, 1, in, d_y, out, 1, d_w, out, false, DENSE});
}

static struct attention_shape attention_shape(const struct model *m) {
    return (struct attention_shape){m->batch, m->shape.context, m->shape.heads, m->shape.dim};
}

/* out (N, C) = the residual stream after block w; a->in holds it before. */
static void block_forward(const struct model *m, const struct trace *a, struct block w, float *out) {
    size_t c = m->shape.dim, n = m->batch * m->shape.context;
    kernel->norm(a->norm1, a->stats1, a->in, w.norm1_gain, w.norm1_bias, n, c);
    linear(a->qkv, a->norm1, w.qkv, n, c, 3 * c, false);
    kernel->attention(a->heads, a->attention, a->qkv, attention_shape(m));
    kernel->copy(a->middle, a->in, n * c);
    linear(a->middle, a->heads, w.mix, n, c, c, true);
    kernel->norm(a->norm2, a->stats2, a->middle, w.norm2_gain, w.norm2_bias, n, c);
    linear(a->up, a->norm2, w.up, n, c, 4 * c, false);
    kernel->gelu(a->gelu, a->up, n * 4 * c);
    kernel->copy(out, a->middle, n * c);
    linear(out, a->gelu, w.down, n, 4 * c, c, true);
}

/* d_stream (N, C): in, the gradient of the block's output; out, that of its input. */
static void block_backward(const struct model *m, const struct trace *a, struct block w, struct block d) {
    size_t c = m->shape.dim, n = m->batch * m->shape.context;
    linear_back(m->d_up, d.down, m->d_stream, a->gelu, w.down, n, 4 * c, c);
    kernel->gelu_back(m->d_up, a->up, n * 4 * c);
    linear_back(m->d_norm, d.up, m->d_up, a->norm2, w.up, n, c, 4 * c);
    kernel->norm_back(m->d_stream, d.norm2_gain, d.norm2_bias, m->d_norm, a->middle, a->stats2, w.norm2_gain, n, c);
    linear_back(m->d_norm, d.mix, m->d_stream, a->heads, w.mix, n, c, c);
    kernel->attention_back(m->d_qkv, m->d_attention, m->d_norm, a->attention, a->qkv, attention_shape(m));
    linear_back(m->d_norm, d.qkv, m->d_qkv, a->norm1, w.qkv, n, c, 3 * c);
    kernel->norm_back(m->d_stream, d.norm1_gain, d.norm1_bias, m->d_norm, a->in, a->stats1, w.norm1_gain, n, c);
}

/* ---- the whole model -------------------------------------------------------------------------------------------- */

/* Leaves in m->logits (N, V) what the model expects after each of `bytes` (N). */
static void model_forward(struct model *m, const uint8_t *bytes) {
    size_t c = m->shape.dim, n = m->batch * m->shape.context, last = m->shape.layers - 1;
    kernel->embed(m->traces[0].in, bytes, embedding_at(m, m->params), n, m->shape.context, c, VOCAB);
    for (size_t i = 0; i <= last; i++) {
        block_forward(m, &m->traces[i], block_at(m, m->params, i), i < last ? m->traces[i + 1].in : m->final);
    }
    kernel->norm(m->final_norm, m->final_stats, m->final, head_at(m, m->params, 0), head_at(m, m->params, 1), n, c);
    linear(m->logits, m->final_norm, head_at(m, m->params, 2), n, c, VOCAB, false);
}

/* Turns m->logits into their gradient; returns the mean cross-entropy in nats per byte. */
static double model_loss(struct model *m, const uint8_t *targets) {
    size_t n = m->batch * m->shape.context;
    return kernel->cross_entropy(m->logits, targets, n, VOCAB) / (double)n;
}

/* Call after model_loss. Overwrites m->grads, and says through `ready` when each layer's part is final. */
static void model_backward(struct model *m, const uint8_t *bytes, layer_ready *ready, void *user) {
    size_t c = m->shape.dim, n = m->batch * m->shape.context;
    linear_back(m->d_norm, head_at(m, m->grads, 2), m->logits, m->final_norm, head_at(m, m->params, 2), n, c, VOCAB);
    kernel->zero(m->d_stream, n * c);
    kernel->norm_back(m->d_stream, head_at(m, m->grads, 0), head_at(m, m->grads, 1), m->d_norm, m->final,
                      m->final_stats, head_at(m, m->params, 0), n, c);
    ready(user, 0);
    for (size_t i = m->shape.layers; i-- > 0;) {
        block_backward(m, &m->traces[i], block_at(m, m->params, i), block_at(m, m->grads, i));
        ready(user, m->shape.layers - i);
    }
    kernel->embed_back(embedding_at(m, m->grads), bytes, m->d_stream, n, m->shape.context, c, VOCAB);
    ready(user, m->shape.layers + 1);
}

#endif

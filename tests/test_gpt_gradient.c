/* The arithmetic of examples/train_gpt: products against plain loops, and every gradient against the change of the
 * loss. tests/run: variants=gcc,asan timeout=120 libs=-lm quick=yes */
#include "test.h"

#include "../examples/train_gpt/model.h"

static const char *const kernel_sets[] = {"base", "avx2", NULL};
enum { KERNEL_SETS = 3 };

/* ---- products ---- */

/* Small integers, so that float sums are exact in any order. */
static void fill(float *x, size_t count, uint64_t seed) {
    for (size_t i = 0; i < count; i++) {
        x[i] = (float)(random_bits(seed, RANDOM_WEIGHT, i, 0) % 7) - 3.0f;
    }
}

static float *clear_triangle(float *a, size_t m, size_t k, size_t row, size_t column, enum gemm_zeros zeros) {
    for (size_t i = 0; i < m; i++) {
        for (size_t p = 0; p < k; p++) {
            if ((zeros == A_ZERO_ABOVE && p > i) || (zeros == A_ZERO_BELOW && p < i)) {
                a[i * row + p * column] = 0.0f;
            }
        }
    }
    return a;
}

static void check_product(size_t m, size_t n, size_t k, bool a_turned, bool b_turned, bool add, enum gemm_zeros zeros) {
    static float a[160 * 600], b[600 * 160], c[160 * 160], before[160 * 160];
    struct gemm g = {m, n,     k,   a,    a_turned ? 1 : k, a_turned ? m : 1, b, b_turned ? 1 : n, b_turned ? k : 1,
                     c, n + 3, add, zeros};
    size_t wrong = 0;
    fill(a, m * k, 1);
    fill(b, k * n, 2);
    fill(before, m * (n + 3), 3);
    memcpy(c, before, sizeof c);
    clear_triangle(a, m, k, g.a_row, g.a_col, zeros);
    kernel->gemm(&g);
    for (size_t i = 0; i < m; i++) {
        for (size_t j = 0; j < n + 3; j++) {
            float sum = add || j >= n ? before[i * (n + 3) + j] : 0.0f;
            for (size_t p = 0; j < n && p < k; p++) {
                sum += a[i * g.a_row + p * g.a_col] * b[p * g.b_row + j * g.b_col];
            }
            wrong += c[i * (n + 3) + j] != sum && !(zeros == C_UNUSED_ABOVE && j > i && j < n);
        }
    }
    CHECK_EQ(wrong, (size_t)0);
}

TEST(products_equal_plain_loops) {
    static const size_t sizes[][3] = {{1, 1, 1},      {6, 16, 8},    {7, 17, 3},
                                      {128, 128, 32}, {97, 33, 300}, {70, 90, 520}};
    for (int set = 0; set < KERNEL_SETS; set++) {
        kernels_choose(kernel_sets[set]);
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            for (int turned = 0; turned < 4; turned++) {
                size_t m = sizes[s][0], n = sizes[s][1], k = sizes[s][2];
                check_product(m, n, k, turned & 1, turned & 2, false, DENSE);
                check_product(m, n, k, turned & 1, turned & 2, true, DENSE);
                check_product(m, m, k, turned & 1, turned & 2, false, C_UNUSED_ABOVE);
                check_product(m, n, m, turned & 1, turned & 2, false, A_ZERO_ABOVE);
                check_product(m, n, m, turned & 1, turned & 2, true, A_ZERO_BELOW);
            }
        }
    }
}

/* ---- gradients ---- */

enum { BATCH = 3, CONTEXT = 48 };
static uint8_t text_bytes[BATCH * CONTEXT], text_targets[BATCH * CONTEXT];

static void count_layer(void *user, size_t index) {
    size_t *next = user;
    CHECK_EQ(index, *next);
    ++*next;
}

static double loss_of(struct model *m) {
    model_forward(m, text_bytes);
    return model_loss(m, text_targets);
}

/* The slope of the loss along a direction that is half the gradient and half chance, by central difference and by the
 * gradient. */
static void check_tensor(struct model *m, size_t index) {
    const struct tensor *t = &m->tensors[index];
    const float *grad = m->grads + t->first;
    float *param = m->params + t->first, *kept = malloc(t->count * sizeof *kept);
    double length = sqrt(kernel->sum_squares(grad, t->count)), slope = 0.0, losses[2];
    REQUIRE(kept != NULL);
    memcpy(kept, param, t->count * sizeof *kept);
    for (int side = 0; side < 2; side++) {
        for (size_t i = 0; i < t->count; i++) {
            double chance = random_normal(5, RANDOM_SAMPLE, index, i) / sqrt((double)t->count);
            double direction = (double)grad[i] / length + chance;
            slope += side == 0 ? direction * (double)grad[i] : 0.0;
            param[i] = kept[i] + (float)((side == 0 ? -0.007 : 0.007) * direction);
        }
        losses[side] = loss_of(m);
    }
    memcpy(param, kept, t->count * sizeof *kept);
    free(kept);
    double measured = (losses[1] - losses[0]) / 0.014;
    if (!(fabs(measured - slope) < 2e-3 * fabs(slope))) {
        fprintf(stderr, "tensor %zu: the gradient says %g, the loss says %g\n", index, slope, measured);
        CHECK(false);
    }
}

TEST(gradients_are_the_slopes_of_the_loss) {
    for (size_t i = 0; i < BATCH * CONTEXT; i++) {
        text_bytes[i] = (uint8_t)(i * 37 % 101);
        text_targets[i] = (uint8_t)(i * 53 % 97);
    }
    for (int set = 0; set < KERNEL_SETS; set++) {
        static struct model m;
        size_t layers = 0;
        kernels_choose(kernel_sets[set]);
        REQUIRE(model_create(&m, (struct shape){2, 48, 3, CONTEXT}, BATCH));
        for (size_t i = 0; i < m.count; i++) { /* from anywhere: the model's own start has many zeros */
            m.params[i] = (float)(0.3 * random_normal(9, RANDOM_WEIGHT, i, 0));
            m.grads[i] = NAN;
        }
        loss_of(&m);
        model_backward(&m, text_bytes, count_layer, &layers);
        CHECK_EQ(layers, (size_t)4);
        for (size_t i = 0; i < m.tensor_count; i++) {
            check_tensor(&m, i);
        }
        model_free(&m);
    }
}

TEST(layers_tile_the_gradient_from_front_to_end) {
    static struct model m;
    size_t end = 0;
    REQUIRE(model_create(&m, (struct shape){3, 32, 2, 16}, 1));
    for (size_t i = 0; i < m.shape.layers + 2; i++) {
        CHECK_EQ(m.layers[i].first, end);
        end += m.layers[i].count;
    }
    CHECK_EQ(end, m.count);
    model_free(&m);
}

TEST(a_new_model_expects_every_byte_alike) {
    static struct model m;
    REQUIRE(model_create(&m, (struct shape){2, 48, 3, CONTEXT}, BATCH));
    model_initialize(&m, 1);
    CHECK(fabs(loss_of(&m) - log(VOCAB)) < 0.1);
    model_free(&m);
}

TEST(no_byte_sees_a_later_one) {
    static struct model m;
    static float before[BATCH * CONTEXT * VOCAB];
    REQUIRE(model_create(&m, (struct shape){2, 48, 3, CONTEXT}, BATCH));
    for (size_t i = 0; i < m.count; i++) {
        m.params[i] = (float)(0.3 * random_normal(9, RANDOM_WEIGHT, i, 0));
    }
    model_forward(&m, text_bytes);
    memcpy(before, m.logits, sizeof before);
    text_bytes[20] ^= 1;
    model_forward(&m, text_bytes);
    CHECK(memcmp(before, m.logits, 20 * VOCAB * sizeof(float)) == 0);
    CHECK(memcmp(before + 20 * VOCAB, m.logits + 20 * VOCAB, VOCAB * sizeof(float)) != 0);
    model_free(&m);
}

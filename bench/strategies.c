/* One rank of bench/strategies: the training loop of a network whose compute is emulated by sleep, so that cores are free
 * for communication, with the strategies of src/train taking turns. Gradients have the sizes of published networks, each
 * divided by SCALE; so is the time of compute, which keeps the ratio between the two.
 *
 *     strategies MODEL ROUNDS STEPS strategy...      beside another rank (RANK, WORLD_SIZE, MASTER_ADDR, ...)
 *     strategies MODEL list                          the gradients: name, elements, multiply-adds of one sample
 *
 * Rank 0 prints lines of `word value...`, which bench/strategies reads. */
#define _GNU_SOURCE
#include "ddl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

enum { SCALE = 16, MAX_LAYERS = 512, MAX_METHODS = 16, MAX_STEPS = 4096, WARM_STEPS = 5, AUTO_STEPS = 210, MAX_PARTS = 16 };

/* ---- networks ---- */

typedef struct layer {
    char name[48];
    int64_t elements;
    double macs; /* multiply-adds of forward for one sample; backward takes twice as many */
} layer;

typedef struct network {
    layer layers[MAX_LAYERS];
    int count;
    double samples; /* of a step of one worker */
} network;

static void add(network *n, const char *block, const char *name, int64_t elements, double macs) {
    layer *l = &n->layers[n->count++];
    snprintf(l->name, sizeof l->name, "%s%s", block, name);
    l->elements = elements;
    l->macs = macs;
}

/* A k x k convolution without bias to `size` x `size` outputs, and its batch normalization. */
static void add_conv(network *n, const char *block, const char *name, int k, int in, int out, int size) {
    char text[48];
    int64_t elements = (int64_t)k * k * in * out;
    snprintf(text, sizeof text, "%s.weight", name);
    add(n, block, text, elements, (double)elements * size * size);
    snprintf(text, sizeof text, "%s.norm.gamma", name);
    add(n, block, text, out, (double)out * size * size);
    snprintf(text, sizeof text, "%s.norm.beta", name);
    add(n, block, text, out, (double)out * size * size);
}

/* ResNet-50: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, table 1 and figure 5 (right).
 * 25,557,032 parameters in 161 tensors, 3.8 G multiply-adds for an image of 224 x 224. */
static void make_resnet50(network *n) {
    static const int blocks[] = {3, 4, 6, 3};
    n->samples = 64;
    add_conv(n, "", "conv1", 7, 3, 64, 112);
    int in = 64, width = 64, size = 56;
    for (int stage = 0; stage < 4; stage++, width *= 2, size /= 2) {
        for (int b = 0; b < blocks[stage]; b++, in = 4 * width) {
            char block[32];
            snprintf(block, sizeof block, "conv%d_%d.", stage + 2, b + 1);
            add_conv(n, block, "a", 1, in, width, size);
            add_conv(n, block, "b", 3, width, width, size);
            add_conv(n, block, "c", 1, width, 4 * width, size);
            if (b == 0) {
                add_conv(n, block, "shortcut", 1, in, 4 * width, size);
            }
        }
    }
    add(n, "", "fc.weight", 2048 * 1000, 2048 * 1000);
    add(n, "", "fc.bias", 1000, 1000);
}

static void add_dense(network *n, const char *block, const char *name, int64_t in, int64_t out, double tokens) {
    char text[48];
    snprintf(text, sizeof text, "%s.weight", name);
    add(n, block, text, in * out, (double)(in * out) * tokens);
    snprintf(text, sizeof text, "%s.bias", name);
    add(n, block, text, out, (double)out * tokens);
}

static void add_norm(network *n, const char *block, const char *name, int64_t width, double tokens) {
    char text[48];
    snprintf(text, sizeof text, "%s.gamma", name);
    add(n, block, text, width, (double)width * tokens);
    snprintf(text, sizeof text, "%s.beta", name);
    add(n, block, text, width, (double)width * tokens);
}

/* BERT: Devlin, Chang, Lee, Toutanova, "BERT: Pre-training of Deep Bidirectional Transformers", NAACL 2019, section 3,
 * with the vocabulary of 30,522 and 512 positions of the released models; a layer is that of Vaswani et al. 2017. Base:
 * 12 layers of 768, 109,482,240 parameters; Large: 24 of 1024, 335,141,888. Sequences of 128 tokens, as in nine tenths
 * of the paper's pre-training. */
static void make_bert(network *n, int layers, int64_t width, double samples) {
    const double tokens = 128;
    n->samples = samples;
    add(n, "embeddings.", "word", 30522 * width, 0);
    add(n, "embeddings.", "position", 512 * width, (double)width * tokens);
    add(n, "embeddings.", "type", 2 * width, (double)width * tokens);
    add_norm(n, "embeddings.", "norm", width, tokens);
    for (int i = 0; i < layers; i++) {
        char block[32];
        snprintf(block, sizeof block, "layer%d.", i);
        add_dense(n, block, "query", width, width, tokens);
        add_dense(n, block, "key", width, width, tokens);
        add_dense(n, block, "value", width, width, tokens);
        n->layers[n->count - 1].macs += 2 * tokens * tokens * (double)width; /* scores, and their sums of values */
        add_dense(n, block, "output", width, width, tokens);
        add_norm(n, block, "norm1", width, tokens);
        add_dense(n, block, "up", width, 4 * width, tokens);
        add_dense(n, block, "down", 4 * width, width, tokens);
        add_norm(n, block, "norm2", width, tokens);
    }
    add_dense(n, "", "pooler", width, width, 1);
}

static int make_network(network *n, const char *name) {
    if (strcmp(name, "ResNet-50") == 0) {
        make_resnet50(n);
    } else if (strcmp(name, "BERT-Base") == 0) {
        make_bert(n, 12, 768, 32);
    } else if (strcmp(name, "BERT-Large") == 0) {
        make_bert(n, 24, 1024, 16);
    }
    return n->count > 0;
}

/* A device that keeps up 8 T floating point operations per second, such as a V100 in f32. */
static double forward_s(const network *n, int i) { return 2 * n->layers[i].macs * n->samples / 8e12 / SCALE; }
static int64_t scaled(const network *n, int i) { return (n->layers[i].elements + SCALE - 1) / SCALE; }

/* ---- compute ---- */

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Sleeps for what has come together when it is worth a sleep; what it slept too long counts for later layers. */
static double owed_s;

static void compute(double seconds) {
    owed_s += seconds;
    if (owed_s > 150e-6) {
        double begin = now_s();
        struct timespec t = {(time_t)owed_s, (long)((owed_s - (double)(time_t)owed_s) * 1e9)};
        nanosleep(&t, NULL);
        owed_s -= now_s() - begin;
    }
}

/* What this process has taken of the processor. */
static double worked_s(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + 1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

/* ---- methods ---- */

typedef struct method {
    const char *name;
    ddl_trainer *trainer;
    double step_s[MAX_STEPS], exposed_s[MAX_STEPS];
    int steps;
    double worked_s; /* of the processor: all of this rank's blocks; */
    int worked;      /* steps in them */
} method;

static ddl_context *context;
static network net;
static float *params[MAX_LAYERS], *grads[MAX_LAYERS];

static int fail(const char *what) {
    fprintf(stderr, "strategies: %s: %s\n", what, ddl_error(context));
    ddl_abort(context, "the benchmark failed");
    return 1;
}

/* 1: there is no such strategy. */
static int method_make(method *m, ddl_group *group) {
    ddl_trainer_config config;
    if (ddl_trainer_preset(m->name, &config) < 0) {
        return 1;
    }
    config.optimizer.learning_rate = 1e-6;
    config.overlap_forward = config.overlap_forward || strcmp(m->name, "auto") == 0;
    if (ddl_trainer_create(group, &config, &m->trainer) < 0) {
        return -1;
    }
    for (int i = 0; i < net.count; i++) {
        int64_t count = scaled(&net, i);
        if (ddl_trainer_add(m->trainer, net.layers[i].name, DDL_VIEW(params[i], count), DDL_VIEW(grads[i], count), NULL,
                            NULL) < 0) {
            return -1;
        }
    }
    return ddl_trainer_start(m->trainer) < 0 ? -1 : 0;
}

/* One pass of the loop. needed_s, ready_s: when each layer is computed, from the begin; may be NULL. */
static int step(method *m, double *needed_s, double *ready_s) {
    double begin = now_s();
    for (int i = 0; i < net.count; i++) {
        if (ddl_param_wait(m->trainer, i) < 0) {
            return fail("ddl_param_wait");
        }
        if (needed_s != NULL) {
            needed_s[i] = now_s() - begin;
        }
        compute(forward_s(&net, i));
    }
    for (int i = net.count - 1; i >= 0; i--) {
        compute(2 * forward_s(&net, i));
        if (ddl_grad_ready(m->trainer, i) < 0) {
            return fail("ddl_grad_ready");
        }
        if (ready_s != NULL) {
            ready_s[i] = now_s() - begin;
        }
    }
    return ddl_step(m->trainer) < 0 ? fail("ddl_step") : 0;
}

/* A block of steps. A step lasts from forward to forward; the first, before which nothing is under way, does not count. */
static int block(method *m, int steps, int keep) {
    owed_s = 0;
    double worked = worked_s();
    for (int s = 0; s <= steps; s++) {
        double begin = now_s();
        ddl_trainer_stats stats;
        if (step(m, NULL, NULL)) {
            return 1;
        }
        ddl_trainer_stats_get(m->trainer, &stats);
        if (keep && s > 0 && m->steps < MAX_STEPS) {
            m->exposed_s[m->steps] = stats.exposed_s;
            m->step_s[m->steps++] = now_s() - begin;
        }
    }
    if (ddl_param_wait(m->trainer, DDL_ALL) < 0) {
        return fail("ddl_param_wait");
    }
    m->worked_s += keep ? worked_s() - worked : 0;
    m->worked += keep ? steps + 1 : 0;
    return 0;
}

/* ---- figures ---- */

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, ascending);
    return n == 0 ? 0 : n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

/* The least time of an all-reduce of so many bytes, of the slowest rank, in so many parts at once. */
static double reduce_s(ddl_group *world, float *data, int64_t count, int parts, int times) {
    double least = 1e9;
    for (int t = 0; t < times; t++) {
        ddl_request *requests[MAX_PARTS];
        ddl_barrier(world);
        double begin = now_s();
        for (int p = 0; p < parts; p++) {
            int64_t from = 0, some = 0;
            ddl_part(count, parts, p, &from, &some);
            ddl_tensor view = ddl_tensor_1d(data + from, DDL_F32, some);
            if (ddl_iall_reduce(world, view, view, DDL_MAX, &requests[p]) < 0) {
                return -1;
            }
        }
        if (ddl_wait_all(requests, parts, NULL) < 0) {
            return -1;
        }
        double s = now_s() - begin;
        least = s < least ? s : least;
    }
    return ddl_all_reduce_scalar(world, &least, DDL_MAX) < 0 ? -1 : least;
}

/* What no schedule on this link can avoid to expose. A step without communication (a group of one rank) says when each
 * layer is computed. The gradients of the first l layers of forward are made after those behind them, and must be there
 * when layer l is computed again: what they take beyond the time between is exposed, for every l. For all layers
 * that is max(0, total communication - what can be hidden). */
static double bound_s(double total_s, double step_s, const double *needed_s, const double *ready_s) {
    double all = 0, some = 0, worst = 0;
    for (int i = 0; i < net.count; i++) {
        all += (double)scaled(&net, i);
    }
    for (int i = 0; i < net.count; i++) {
        some += (double)scaled(&net, i);
        double room = step_s - ready_s[i] + needed_s[i], over = total_s * some / all - room;
        worst = over > worst ? over : worst;
    }
    return worst;
}

static int measure_alone(double total_s) {
    static method alone = {.name = "WFBP-A2A"};
    double needed[MAX_LAYERS], ready[MAX_LAYERS], steps[16];
    int32_t rank = ddl_rank(ddl_world(context));
    ddl_group *self;
    if (ddl_group_split(ddl_world(context), rank, 0, &self) < 0 || method_make(&alone, self) != 0) {
        return fail("a group of one");
    }
    for (int s = 0; s < 16; s++) {
        double begin = now_s();
        if (step(&alone, needed, ready)) {
            return 1;
        }
        steps[s] = now_s() - begin;
    }
    double compute_s = 0;
    for (int i = 0; i < net.count; i++) {
        compute_s += 3 * forward_s(&net, i);
    }
    double whole = median(steps, 16), bound = bound_s(total_s, whole, needed, ready);
    if (rank == 0) {
        printf("alone %.9g\ncompute %.9g\nbound %.9g\n", whole, compute_s, bound);
    }
    ddl_trainer_free(&alone.trainer);
    return ddl_group_free(&self) < 0;
}

static int measure_link(double *out_total_s) {
    ddl_group *world = ddl_world(context);
    int64_t all = 0;
    for (int i = 0; i < net.count; i++) {
        all += scaled(&net, i);
    }
    float *data = calloc((size_t)all, sizeof *data);
    double latency = reduce_s(world, data, 2, 1, 30); /* before a limited link has a queue */
    double least = 1e9;
    for (int parts = 1; parts <= MAX_PARTS && least > 0; parts *= 2) {
        double s = reduce_s(world, data, all, parts, 3);
        least = s < least ? s : least;
    }
    free(data);
    if (latency < 0 || least < 0) {
        return fail("ddl_all_reduce");
    }
    *out_total_s = least;
    if (ddl_rank(world) == 0) {
        printf("bytes %lld\ntensors %d\ntotal %.9g\nlatency %.9g\n", (long long)all * 4, net.count, *out_total_s,
               latency);
    }
    return 0;
}

static int report(method *m) {
    char text[400];
    double work_s = m->worked_s / (m->worked > 0 ? m->worked : 1); /* of all ranks together */
    if (ddl_all_reduce_scalar(ddl_world(context), &work_s, DDL_SUM) < 0) {
        return fail("ddl_all_reduce_scalar");
    }
    if (ddl_rank(ddl_world(context)) != 0) {
        return 0;
    }
    ddl_trainer_stats s;
    ddl_trainer_stats_get(m->trainer, &s);
    ddl_trainer_describe(m->trainer, text, sizeof text);
    printf("says %s %s\n", m->name, text);
    printf("model %s latency %.9g per_byte %.9g replans %d\n", m->name, s.latency_s, s.seconds_per_byte, s.replans);
    printf("result %s %.9g %.9g %.9g %d\n", m->name, median(m->step_s, m->steps), median(m->exposed_s, m->steps), work_s,
           m->steps);
    return 0;
}

/* Adds rounds, each of which takes round_s, until all together take least_s: short steps differ most. */
static int more_rounds(double round_s, int steps, double least_s, int *rounds) {
    double wanted = least_s / round_s;
    wanted = wanted < MAX_STEPS / steps ? wanted : MAX_STEPS / steps;
    if (ddl_all_reduce_scalar(ddl_world(context), &wanted, DDL_MAX) < 0) {
        return fail("ddl_all_reduce_scalar");
    }
    *rounds = *rounds > (int)wanted ? *rounds : (int)wanted;
    return 0;
}

static int run(int count, char **names, int rounds, int steps, double least_s) {
    static method methods[MAX_METHODS];
    double total_s = 0;
    if (measure_link(&total_s) || measure_alone(total_s)) {
        return 1;
    }
    int made = 0, rank = ddl_rank(ddl_world(context));
    for (int i = 0; i < count && made < MAX_METHODS; i++) {
        methods[made].name = names[i];
        int missing = method_make(&methods[made], ddl_world(context));
        if (missing < 0) {
            return fail(names[i]);
        }
        if (missing && rank == 0) {
            printf("missing %s\n", names[i]);
        }
        made += !missing;
    }
    double begin_s = 0;
    for (int round = -1; round < rounds; round++) {
        if (round == 1 && more_rounds(now_s() - begin_s, steps, least_s, &rounds)) {
            return 1;
        }
        begin_s = now_s();
        for (int i = 0; i < made; i++) {
            int warm = strcmp(methods[i].name, "auto") == 0 ? AUTO_STEPS : WARM_STEPS; /* auto tries plans first */
            if (block(&methods[i], round >= 0 ? steps : warm, round >= 0)) {
                return 1;
            }
        }
    }
    for (int i = 0; i < made; i++) {
        if (report(&methods[i])) {
            return 1;
        }
        ddl_trainer_free(&methods[i].trainer);
    }
    return 0;
}

static int list(void) {
    for (int i = 0; i < net.count; i++) {
        printf("%s %lld %.0f\n", net.layers[i].name, (long long)net.layers[i].elements, net.layers[i].macs);
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 3 || !make_network(&net, argv[1]) || (argc < 6 && strcmp(argv[2], "list") != 0)) {
        fprintf(stderr, "usage: strategies ResNet-50|BERT-Base|BERT-Large ROUNDS STEPS LEAST_SECONDS strategy... | list\n");
        return 2;
    }
    if (argc < 6) {
        return list();
    }
    for (int i = 0; i < net.count; i++) {
        params[i] = calloc((size_t)scaled(&net, i), sizeof(float));
        grads[i] = calloc((size_t)scaled(&net, i), sizeof(float));
        for (int64_t k = 0; k < scaled(&net, i); k++) {
            grads[i][k] = 1e-3f;
        }
    }
    if (ddl_init(&(ddl_config){.progress_thread = 1}, &context) < 0) {
        fprintf(stderr, "strategies: %s\n", ddl_error(NULL));
        return 1;
    }
    int status = run(argc - 5, argv + 5, atoi(argv[2]), atoi(argv[3]), atof(argv[4]));
    ddl_finalize(&context);
    return status;
}

/* gpu_trainer: the trainer with parameters and gradients on a GPU gives the bits of the trainer in ordinary memory: all
 * optimizers and one of its own, types, schedules, sync modes and from one to another, ranks whose data ends, codes, servers,
 * shards, checkpoints, with a stream and without. Two ranks that train, threads; gradients are poisoned as soon as the trainer has them. tests/gpu runs it on GPUs, test_cuda_suite.py over
 * the stand-in for the driver. */
#define TEST_TIMEOUT_S 240
#include "coll.h"

#include <dlfcn.h>
#include <math.h>
#include <sys/stat.h>

enum { TENSORS = 5, LARGEST = 9001, STEPS = 4, RANKS = 2 };
static const int64_t shapes[TENSORS][2] = {{1, 1}, {70, 11}, {1, 0}, {1, LARGEST}, {64, 40}};

typedef struct job {
    ddl_trainer_config config;
    ddl_dtype dtype, grad_dtype;
    bool streamed;
    int bad_step; /* a gradient is NaN in this one; 0: none */
    const char *folder; /* saved after half of the steps, and loaded by a second trainer */
    const ddl_trainer_config *then; /* switched to after half of the steps; NULL: not */
    bool leaves;        /* rank 1 has data for half of the steps */
    bool plain_server;  /* dedicated servers have no GPU: their tensors are in ordinary memory */
    bool spikes;        /* a gradient is small but for one element in 128 */
    uint32_t digest;    /* of rank 0's parameters at the end */
    unsigned char *result[2][RANKS]; /* on the host, on the GPU; all parameters */
    ddl_trainer_stats stats[2][RANKS];
    char text[256];
} job;

static int failures(void) { return test__now->failures; }
static int64_t count_of(int i) { return shapes[i][0] * shapes[i][1]; }

/* ---- the driver, for streams ---- */

static struct {
    int (*retain)(void **context, int device);
    int (*push)(void *context);
    int (*stream)(void **out, unsigned flags);
    int (*copy)(uintptr_t dst, uintptr_t src, size_t bytes, void *stream);
    int (*fill)(uintptr_t dst, unsigned char value, size_t bytes, void *stream);
    int (*wait)(void *stream);
    int (*pinned)(void **out, size_t bytes, unsigned flags);
    int (*unpin)(void *memory);
    int (*end)(void *stream);
} cu;

static bool driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    const char *const names[] = {"cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuStreamCreate", "cuMemcpyAsync",
                                 "cuMemsetD8Async", "cuStreamSynchronize", "cuMemHostAlloc", "cuMemFreeHost",
                                 "cuStreamDestroy_v2"};
    for (size_t i = 0; library != NULL && i < sizeof names / sizeof names[0]; i++) {
        void *found = dlsym(library, names[i]);
        if (found == NULL) {
            return false;
        }
        memcpy((char *)&cu + i * sizeof found, &found, sizeof found);
    }
    return library != NULL;
}

static void *stream_of(int device) {
    void *context = NULL, *stream = NULL;
    CHECK_EQ(cu.retain(&context, device), 0);
    CHECK_EQ(cu.push(context), 0);
    CHECK_EQ(cu.stream(&stream, 1), 0);
    return stream;
}

/* ---- the net ---- */

static void store(void *at, ddl_dtype dtype, int64_t i, float x) {
    uint32_t bits;
    uint16_t half;
    if (dtype == DDL_F32 || dtype == DDL_F64) {
        dtype == DDL_F32 ? (void)(((float *)at)[i] = x) : (void)(((double *)at)[i] = 1.1 * (double)x); /* no float */
        return;
    }
    memcpy(&bits, &x, 4);
    half = (uint16_t)(bits >> 16); /* of bf16; f16 below, for small normal numbers */
    if (dtype == DDL_F16) {
        int exponent = (int)(bits >> 23 & 255) - 127 + 15;
        int normal = exponent << 10 | (int)(bits >> 13 & 1023);
        half = (uint16_t)((int)(bits >> 16 & 0x8000) | (exponent > 0 && exponent < 31 ? normal : 0));
    }
    ((uint16_t *)at)[i] = half;
}

static float load(const void *at, ddl_dtype dtype, int64_t i) {
    if (dtype == DDL_F32 || dtype == DDL_F64) {
        return dtype == DDL_F32 ? ((const float *)at)[i] : (float)((const double *)at)[i];
    }
    uint16_t half = ((const uint16_t *)at)[i];
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    if (dtype == DDL_BF16) {
        return x;
    }
    int exponent = half >> 10 & 31, mantissa = (half & 1023) | (exponent > 0 ? 1024 : 0);
    return (half & 0x8000 ? -1.0f : 1.0f) * ldexpf((float)mantissa, (exponent > 0 ? exponent : 1) - 25);
}

/* A gradient that depends on the parameter, the rank and the step. */
static void backward(const job *j, const void *param, void *grad, int tensor, int rank, int step) {
    for (int64_t k = 0; k < count_of(tensor); k++) {
        float w = load(param, j->dtype, k), noise = (float)((step * 31 + rank * 17 + k * 7 + tensor * 3) % 13 - 6) / 8;
        float scale = j->spikes && k % 128 != 5 ? 0x1p-9f : 1;
        store(grad, j->grad_dtype, k, scale * (0.25f * (w - (float)(k % 7)) + noise));
    }
    if (step == j->bad_step && tensor == 1 && rank == 1) {
        store(grad, j->grad_dtype, 5, NAN);
    }
}

typedef struct net {
    ddl_tensor param[TENSORS], grad[TENSORS];
    void *host_param[TENSORS], *host_grad[TENSORS]; /* pinned with a stream */
} net;

static void unpin(void *memory) { CHECK_EQ(cu.unpin(memory), 0); }

static void *memory(const job *j, bool gpu, size_t bytes) {
    void *p = NULL;
    if (!gpu || !j->streamed || cu.pinned(&p, bytes + 8, 1) != 0) {
        p = malloc(bytes + 8);
    }
    CHECK(p != NULL);
    return p;
}

static void net_make(ddl_context *c, const job *j, net *m, bool gpu, int rank) {
    for (int i = 0; i < TENSORS; i++) {
        size_t bytes = (size_t)count_of(i) * 8;
        m->host_param[i] = memory(j, gpu, bytes);
        m->host_grad[i] = memory(j, gpu, bytes);
        for (int64_t k = 0; k < count_of(i); k++) {
            store(m->host_param[i], j->dtype, k, rank == 0 ? (float)((i + k) % 5) - 1.75f : NAN);
        }
        memset(m->host_grad[i], 0xff, bytes);
        if (gpu) {
            CHECK_EQ(ddl_tensor_alloc_on(c, 1, j->dtype, 2, shapes[i], &m->param[i]), DDL_OK);
            CHECK_EQ(ddl_tensor_alloc_on(c, 1, j->grad_dtype, 2, shapes[i], &m->grad[i]), DDL_OK);
            ddl_tensor from = m->param[i];
            from.device = DDL_HOST;
            from.data = m->host_param[i];
            CHECK_EQ(ddl_tensor_copy(c, m->param[i], from), DDL_OK);
        } else {
            m->param[i] = ddl_tensor_nd(m->host_param[i], j->dtype, 2, shapes[i]);
            m->grad[i] = ddl_tensor_nd(m->host_grad[i], j->grad_dtype, 2, shapes[i]);
        }
    }
}

static void read_param(ddl_context *c, net *m, int i, void *stream) {
    size_t bytes = (size_t)ddl_tensor_count(&m->param[i]) * ddl_dtype_bytes(m->param[i].dtype);
    ddl_tensor to = m->param[i];
    to.device = DDL_HOST;
    to.data = m->host_param[i];
    if (m->param[i].device == DDL_HOST || bytes == 0) {
        return;
    }
    if (stream != NULL) {
        CHECK_EQ(cu.copy((uintptr_t)to.data, (uintptr_t)m->param[i].data, bytes, stream), 0);
        CHECK_EQ(cu.wait(stream), 0);
    } else {
        CHECK_EQ(ddl_tensor_copy(c, to, m->param[i]), DDL_OK);
    }
}

/* The gradient goes where the trainer looks for it, and is poisoned when the trainer has it. */
static void hand_over(ddl_context *c, ddl_trainer *t, net *m, int i, void *stream) {
    size_t bytes = (size_t)ddl_tensor_count(&m->grad[i]) * ddl_dtype_bytes(m->grad[i].dtype);
    ddl_tensor from = m->grad[i];
    bool gpu = m->grad[i].device != DDL_HOST;
    from.device = DDL_HOST;
    from.data = m->host_grad[i];
    if (stream != NULL && bytes > 0) {
        CHECK_EQ(cu.copy((uintptr_t)m->grad[i].data, (uintptr_t)from.data, bytes, stream), 0);
    } else if (gpu) {
        CHECK_EQ(ddl_tensor_copy(c, m->grad[i], from), DDL_OK);
    }
    CHECK_EQ(ddl_grad_ready(t, i), DDL_OK);
    if (stream != NULL && bytes > 0) {
        CHECK_EQ(cu.fill((uintptr_t)m->grad[i].data, 0xff, bytes, stream), 0);
    } else {
        memset(m->host_grad[i], 0xff, bytes);
        if (gpu) {
            CHECK_EQ(ddl_tensor_copy(c, m->grad[i], from), DDL_OK);
        }
    }
}

static ddl_trainer *trainer_make(ddl_context *c, const job *j, net *m, void *stream) {
    ddl_trainer *t = NULL;
    CHECK_EQ(ddl_trainer_create(ddl_world(c), &j->config, &t), DDL_OK);
    for (int i = 0; i < TENSORS; i++) {
        ddl_trainer_options options = {.no_decay = i == 1, .rate_factor = i == 3 ? 0.5 : 0};
        CHECK_EQ(ddl_trainer_add(t, NULL, m->param[i], m->grad[i], &options, NULL), DDL_OK);
    }
    if (stream != NULL) {
        CHECK_EQ(ddl_trainer_set_stream(t, stream), DDL_OK);
    }
    if (ddl_trainer_start(t) != DDL_OK) {
        test__fail(__FILE__, __LINE__, "start: %s", ddl_error(c));
    }
    return t;
}

/* What comes after a step: the optimizer's own, of a program. */
static void step(ddl_context *c, const job *j, ddl_trainer *t, net *m, int number, void *stream) {
    int micro = j->config.accumulate > 0 ? j->config.accumulate : 1, rank = ddl_rank(ddl_world(c));
    for (int k = 0; k < micro; k++) {
        for (int i = TENSORS - 1; i >= 0; i--) {
            if (stream != NULL) {
                CHECK_EQ(cu.wait(stream), 0); /* the copy of the last gradient has ended */
            }
            read_param(c, m, i, stream);
            backward(j, m->host_param[i], m->host_grad[i], i, rank, number * 3 + k);
            hand_over(c, t, m, i, stream);
        }
        ddl_status status = ddl_step(t);
        for (int i = 0; j->config.overlap_forward && i < TENSORS; i++) {
            ddl_status waited = ddl_param_wait(t, i);
            status = waited < 0 ? waited : status;
        }
        if (status != (number * 3 == j->bad_step && j->bad_step > 0 ? DDL_ERR_ARG : DDL_OK)) {
            test__fail(__FILE__, __LINE__, "step %d of %s: %s", number, j->text, ddl_error(c));
        }
    }
}

/* An optimizer of the program's own: momentum, by the host. What it is given is on the GPU where this thread has a stream for it. */
static _Thread_local void *own_stream;
static _Thread_local int own_calls;

static float *own_down(const float *from, size_t bytes) {
    if (own_stream == NULL) {
        return (float *)(uintptr_t)from;
    }
    float *to = malloc(bytes);
    CHECK_EQ(cu.copy((uintptr_t)to, (uintptr_t)from, bytes, own_stream), 0);
    CHECK_EQ(cu.wait(own_stream), 0);
    return to;
}
static void own_up(float *to, float *from, size_t bytes, bool changed) {
    if (own_stream != NULL) {
        CHECK_EQ(changed ? cu.copy((uintptr_t)to, (uintptr_t)from, bytes, own_stream) : 0, 0);
        CHECK_EQ(cu.wait(own_stream), 0);
        free(from);
    }
}
static void own_optimizer(void *user, const ddl_optimizer_part *part) {
    size_t bytes = (size_t)part->count * sizeof(float);
    CHECK(user == NULL);
    own_calls++;
    if (part->count == 0) {
        return;
    }
    float *w = own_down(part->param, bytes), *g = own_down(part->grad, bytes), *m = own_down(part->state, bytes);
    for (int64_t i = 0; i < part->count; i++) {
        m[i] = 0.5f * m[i] + g[i];
        w[i] -= (float)part->learning_rate * m[i];
    }
    own_up((float *)(uintptr_t)part->grad, g, bytes, false);
    own_up(part->state, m, bytes, true);
    own_up(part->param, w, bytes, true);
}

static void train(ddl_context *c, job *given, int rank, bool gpu) {
    net m = {0};
    job now = *given, *j = &now; /* its config may be switched */
    void *stream = gpu && j->streamed ? stream_of(0) : NULL;
    own_stream = gpu && j->config.optimizer.kind == DDL_OPTIMIZER_FN ? stream_of(0) : NULL;
    own_calls = 0;
    net_make(c, j, &m, gpu, rank);
    ddl_trainer *t = trainer_make(c, j, &m, stream);
    char folder[300] = "";
    for (int s = 1; s <= (j->leaves && rank == 1 ? STEPS / 2 : STEPS) && failures() == 0; s++) {
        step(c, j, t, &m, s, stream);
        if (j->then != NULL && s == STEPS / 2) {
            if (ddl_trainer_switch(t, j->then) != DDL_OK) {
                test__fail(__FILE__, __LINE__, "switch of %s: %s", j->text, ddl_error(c));
            }
            j->config = *j->then;
        }
        if (j->folder != NULL && s == STEPS / 2) {
            snprintf(folder, sizeof folder, "%s/%d", j->folder, gpu);
            CHECK_EQ(rank == 0 ? mkdir(folder, 0700) : 0, 0);
            CHECK_EQ(ddl_barrier(ddl_world(c)), DDL_OK);
            CHECK_EQ(ddl_trainer_save(t, folder), DDL_OK);
            step(c, j, t, &m, 99, stream); /* which is forgotten */
            CHECK_EQ(ddl_trainer_free(&t), DDL_OK);
            t = trainer_make(c, j, &m, stream);
            if (ddl_trainer_load(t, folder, NULL) != DDL_OK) {
                test__fail(__FILE__, __LINE__, "load: %s", ddl_error(c));
            }
        }
    }
    CHECK_EQ(j->leaves ? ddl_trainer_join_out(t) : DDL_OK, DDL_OK);
    CHECK_EQ(j->config.sync == DDL_SYNC_LOCAL ? ddl_trainer_sync(t) : DDL_OK, DDL_OK);
    CHECK(own_calls >= STEPS || j->config.optimizer.kind != DDL_OPTIMIZER_FN);
    CHECK_EQ(ddl_trainer_stats_get(t, &given->stats[gpu][rank]), DDL_OK);
    size_t at = 0;
    for (int i = 0; i < TENSORS; i++) {
        size_t bytes = (size_t)count_of(i) * ddl_dtype_bytes(j->dtype);
        read_param(c, &m, i, stream);
        memcpy(j->result[gpu][rank] + at, m.host_param[i], bytes);
        at += bytes;
    }
    CHECK_EQ(ddl_trainer_free(&t), DDL_OK);
    for (int i = 0; gpu && i < TENSORS; i++) {
        CHECK_EQ(ddl_tensor_free(c, &m.param[i]), DDL_OK);
        CHECK_EQ(ddl_tensor_free(c, &m.grad[i]), DDL_OK);
    }
    for (int i = 0; i < TENSORS; i++) {
        void (*give)(void *) = gpu && j->streamed ? unpin : free;
        give(m.host_param[i]);
        give(m.host_grad[i]);
    }
    if (stream != NULL) {
        CHECK_EQ(cu.end(stream), 0);
    }
    if (own_stream != NULL) {
        CHECK_EQ(cu.end(own_stream), 0);
    }
}

/* A rank that only serves; its tensors are where the workers' are, or in ordinary memory. */
static void serve(ddl_context *c, const job *given, bool gpu) {
    net m = {0};
    job plain = *given, *j = &plain; /* its host's memory is not pinned */
    j->streamed = false;
    net_make(c, j, &m, gpu, 1);
    ddl_trainer *t = trainer_make(c, j, &m, NULL);
    if (ddl_trainer_serve(t) != DDL_OK) {
        test__fail(__FILE__, __LINE__, "%s: %s", j->text, ddl_error(c));
    }
    CHECK_EQ(ddl_trainer_free(&t), DDL_OK);
    CHECK(gpu || isnan(load(m.host_param[1], j->dtype, 3))); /* a server's own tensors are left alone */
    for (int i = 0; i < TENSORS; i++) {
        CHECK_EQ(gpu ? ddl_tensor_free(c, &m.param[i]) : DDL_OK, DDL_OK);
        CHECK_EQ(gpu ? ddl_tensor_free(c, &m.grad[i]) : DDL_OK, DDL_OK);
        free(m.host_param[i]);
        free(m.host_grad[i]);
    }
}

/* ---- configurations ---- */

typedef struct list {
    coll_job coll;
    job *jobs;
    int count;
} list;

static void each(int rank, int n, void *arg) {
    list *all = arg;
    ddl_context *c = coll_join(rank, n, &all->coll);
    REQUIRE(c != NULL);
    REQUIRE(ddl_device_count(c) > 0);
    for (int i = 0; i < 2 * all->count && failures() == 0; i++) {
        if (rank < RANKS) {
            train(c, &all->jobs[i / 2], rank, i % 2 != 0);
        } else {
            serve(c, &all->jobs[i / 2], i % 2 != 0 && !all->jobs[i / 2].plain_server);
        }
    }
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

static size_t all_bytes(const job *j) {
    size_t bytes = 0;
    for (int i = 0; i < TENSORS; i++) {
        bytes += (size_t)count_of(i) * ddl_dtype_bytes(j->dtype);
    }
    return bytes;
}

/* Where two results differ first; -1: nowhere. */
static long differs(const unsigned char *x, const unsigned char *y, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        if (x[i] != y[i]) {
            return (long)i;
        }
    }
    return -1;
}

/* The same for numbers that are to be near each other. */
static long far_apart(const unsigned char *x, const unsigned char *y, size_t count) {
    for (size_t i = 0; i < count; i++) {
        float a, b;
        memcpy(&a, x + 4 * i, 4);
        memcpy(&b, y + 4 * i, 4);
        if (!(fabsf(a - b) <= 1e-5f * (1 + fabsf(b)))) {
            return (long)(4 * i);
        }
    }
    return -1;
}

static void compare(job *j) {
    size_t bytes = all_bytes(j);
    bool alone = j->config.sync == DDL_SYNC_ASP || j->config.sync == DDL_SYNC_SSP || /* each run has other bits */
                 (j->config.compression.kind == DDL_COMPRESS_ADAPTIVE && j->config.seconds_per_byte == 0); /* as measured */
    bool near = j->config.compression.kind == DDL_COMPRESS_POWER; /* its products are added in another order */
    for (int r = 0; r < RANKS && failures() == 0 && !alone; r++) {
        long at = near ? far_apart(j->result[1][r], j->result[0][0], bytes / sizeof(float))
                       : differs(j->result[1][r], j->result[0][0], bytes);
        if (at >= 0) {
            test__fail(__FILE__, __LINE__, "%s: rank %d on the GPU differs from the host at byte %ld of %zu", j->text,
                       r, at, bytes);
        }
    }
    CHECK_EQ(differs(j->result[1][1], j->result[1][0], j->config.sync == DDL_SYNC_BSP ? bytes : 0), -1);
    for (size_t i = 0; i < bytes; i++) {
        j->digest = j->digest * 31 + j->result[1][0][i];
    }
    for (int r = 0; r < RANKS; r++) {
        CHECK_EQ(j->stats[1][r].not_finite, j->stats[0][r].not_finite);
        CHECK_EQ(j->stats[1][r].steps, j->stats[0][r].steps);
    }
}

/* Trains by each on the host and on the GPU. */
static void same_bits(job *jobs, int count) {
    list all = {.jobs = jobs, .count = count};
    coll_job_make(&all.coll);
    all.coll.config.progress_thread = 1;
    all.coll.config.deterministic = 1;
    REQUIRE(driver());
    for (int i = 0; i < count; i++) {
        job *j = &jobs[i];
        j->dtype = j->dtype == DDL_DTYPE_NONE ? DDL_F32 : j->dtype;
        j->grad_dtype = j->grad_dtype == DDL_DTYPE_NONE ? j->dtype : j->grad_dtype;
        for (int k = 0; k < 2 * RANKS; k++) {
            j->result[k / RANKS][k % RANKS] = malloc(all_bytes(j));
            memset(j->result[k / RANKS][k % RANKS], 0x5a + k, all_bytes(j));
        }
    }
    ranks_threads(RANKS + jobs[0].config.servers * jobs[0].config.dedicated, each, &all);
    for (int i = 0; i < count; i++) {
        if (failures() == 0) {
            compare(&jobs[i]);
        }
        for (int k = 0; k < 2 * RANKS; k++) {
            free(jobs[i].result[k / RANKS][k % RANKS]);
        }
    }
}

static ddl_optimizer rated(ddl_optimizer_kind kind) {
    return (ddl_optimizer){.kind = kind, .learning_rate = 0.05, .weight_decay = 0.01};
}

TEST(optimizers) {
    static const char *const names[] = {"SGD", "momentum", "Nesterov", "Adam", "AdamW", "LARS", "LAMB"};
    job jobs[DDL_LAMB + 1];
    for (int k = DDL_SGD; k <= DDL_LAMB; k++) {
        jobs[k] = (job){.config = {.optimizer = rated((ddl_optimizer_kind)k)}, .streamed = k % 2 == 0};
        snprintf(jobs[k].text, sizeof jobs[k].text, "%s", names[k]);
    }
    same_bits(jobs, DDL_LAMB + 1);
}

TEST(types) {
    job jobs[] = {
        {.text = "f16", .config = {.optimizer = rated(DDL_ADAMW)}, .dtype = DDL_F16},
        {.text = "bf16", .config = {.optimizer = rated(DDL_LAMB)}, .dtype = DDL_BF16, .streamed = true},
        {.text = "bf16 and f32", .config = {.optimizer = rated(DDL_ADAMW)}, .dtype = DDL_BF16, .grad_dtype = DDL_F32},
        {.text = "f32 and f16", .config = {.optimizer = rated(DDL_LAMB), .accumulate = 2}, .grad_dtype = DDL_F16,
         .streamed = true},
    };
    same_bits(jobs, 4);
}

/* All optimizers in f64, ZeRO-1, clipping, local SGD, sums over calls, a checkpoint, a NaN. */
TEST(wide_types) {
    char folder[] = "/tmp/ddl-test-gpu-trainer-XXXXXX", command[80];
    job jobs[DDL_LAMB + 4];
    REQUIRE(mkdtemp(folder) != NULL);
    for (int k = 0; k < DDL_LAMB + 4; k++) {
        jobs[k] = (job){.config = {.optimizer = rated((ddl_optimizer_kind)(k % (DDL_LAMB + 1)))}, .dtype = DDL_F64,
                        .streamed = k % 2 == 0};
        snprintf(jobs[k].text, sizeof jobs[k].text, "f64, optimizer %d", k);
    }
    jobs[DDL_MOMENTUM].config.accumulate = 3;
    jobs[DDL_NESTEROV].config.sync = DDL_SYNC_LOCAL;
    jobs[DDL_NESTEROV].config.local_steps = 2;
    jobs[DDL_ADAMW].config.clip_norm = 0.5;
    jobs[DDL_LAMB].folder = folder;
    jobs[DDL_LAMB + 1].bad_step = 6;
    jobs[DDL_LAMB + 2].config.overlap_forward = 1;
    jobs[DDL_LAMB + 3].config.optimizer = rated(DDL_ADAM);
    jobs[DDL_LAMB + 3].config.shard = 1;
    same_bits(jobs, DDL_LAMB + 4);
    snprintf(command, sizeof command, "rm -rf %s", folder);
    CHECK_EQ(system(command), 0);
}

TEST(schedules) {
    job jobs[DDL_SCHEDULE_PRIORITY + 1];
    for (int s = DDL_SCHEDULE_AUTO; s <= DDL_SCHEDULE_PRIORITY; s++) {
        jobs[s] = (job){.text = "a schedule", .streamed = s % 2 == 1,
                        .config = {.optimizer = rated(DDL_ADAM), .schedule = (ddl_schedule)s, .piece_bytes = 4096,
                                   .bucket_bytes = 8192, .overlap_forward = s == DDL_SCHEDULE_PRIORITY,
                                   .latency_s = 1e-5, .seconds_per_byte = 1e-9,
                                   .unchecked = s == DDL_SCHEDULE_WAIT_FREE}};
    }
    same_bits(jobs, DDL_SCHEDULE_PRIORITY + 1);
}

TEST(shards_clipping_accumulation) {
    job jobs[] = {
        {.text = "ZeRO-1", .config = {.optimizer = rated(DDL_ADAM), .shard = 1, .clip_norm = 0.5}},
        {.text = "ZeRO-1 of bf16", .config = {.optimizer = rated(DDL_ADAM), .shard = 1, .accumulate = 3},
         .dtype = DDL_BF16, .streamed = true},
        {.text = "clipping", .config = {.optimizer = rated(DDL_ADAM), .clip_norm = 0.5, .accumulate = 3},
         .streamed = true},
        {.text = "uneven", .config = {.optimizer = rated(DDL_ADAM), .uneven = 1}, .streamed = true},
    };
    same_bits(jobs, 4);
}

TEST(local_sgd) {
    job jobs[] = {
        {.text = "local SGD", .dtype = DDL_BF16, .streamed = true,
         .config = {.optimizer = rated(DDL_MOMENTUM), .sync = DDL_SYNC_LOCAL, .local_steps = 2}},
        {.text = "DiLoCo", .config = {.optimizer = rated(DDL_ADAM), .sync = DDL_SYNC_LOCAL, .local_steps = 2,
                                      .outer_rate = 0.7, .local_after = 1}},
    };
    same_bits(jobs, 2);
}

TEST(codes) {
    static const ddl_compression codes[] = {
        {.kind = DDL_COMPRESS_F16},
        {.kind = DDL_COMPRESS_F16, .error_feedback = 1},
        {.kind = DDL_COMPRESS_BF16},
        {.kind = DDL_COMPRESS_INT8},
        {.kind = DDL_COMPRESS_QSGD},
        {.kind = DDL_COMPRESS_SIGN},
        {.kind = DDL_COMPRESS_MAJORITY},
        {.kind = DDL_COMPRESS_TOP_K, .ratio = 0.1},
        {.kind = DDL_COMPRESS_RANDOM_K, .ratio = 0.2},
        {.kind = DDL_COMPRESS_GTOP_K, .ratio = 0.1},
        {.kind = DDL_COMPRESS_POWER, .rank = 2},
        {.kind = DDL_COMPRESS_ADAPTIVE},
    };
    enum { CODES = sizeof codes / sizeof codes[0] };
    job jobs[CODES];
    for (int i = 0; i < CODES; i++) {
        jobs[i] = (job){.config = {.optimizer = rated(DDL_SGD), .compression = codes[i]}, .streamed = i % 2 == 0};
        snprintf(jobs[i].text, sizeof jobs[i].text, "code %d", codes[i].kind);
    }
    same_bits(jobs, CODES);
}

/* With a link so slow that all but this follows from it: the largest tensor goes as it is at first, then as int8, since f16
 * takes too long and the errors of the others are larger. */
TEST(adaptive_compression_chooses_as_on_the_host) {
    ddl_trainer_config plain = {.optimizer = rated(DDL_SGD), .latency_s = 1e-3, .seconds_per_byte = 1e-3,
                                .replan_steps = 1, .exposed_s = 25}, adaptive = plain, other = plain;
    adaptive.compression.kind = DDL_COMPRESS_ADAPTIVE;
    other.compression.kind = DDL_COMPRESS_INT8;
    job jobs[] = {{.text = "none", .config = plain}, {.text = "int8", .config = other},
                  {.text = "adaptive", .config = adaptive, .streamed = true},
                  {.text = "adaptive, spikes", .config = adaptive, .spikes = true}};
    jobs[3].config.exposed_s = 15; /* signs have the time, and so has top-k, which loses less of these */
    same_bits(jobs, 4);
    CHECK(jobs[2].digest != jobs[0].digest && jobs[2].digest != jobs[1].digest);
}

TEST(servers) {
    job jobs[] = {
        {.text = "Adam", .config = {.optimizer = rated(DDL_ADAM)}, .dtype = DDL_BF16},
        {.text = "LAMB", .config = {.optimizer = rated(DDL_LAMB)}, .streamed = true},
        {.text = "int8", .config = {.optimizer = rated(DDL_SGD), .compression = {.kind = DDL_COMPRESS_INT8}}},
        {.text = "auto", .streamed = true,
         .config = {.optimizer = rated(DDL_ADAM), .architecture = DDL_ARCHITECTURE_AUTO}},
        {.text = "SSP", .config = {.optimizer = rated(DDL_SGD), .sync = DDL_SYNC_SSP}, .streamed = true},
        {.text = "ASP", .config = {.optimizer = rated(DDL_SGD), .sync = DDL_SYNC_ASP, .servers = 1}},
        {.text = "f64", .config = {.optimizer = rated(DDL_ADAM)}, .dtype = DDL_F64, .streamed = true},
        {.text = "f64, sums", .config = {.optimizer = rated(DDL_ADAM), .clip_norm = 0.5}, .dtype = DDL_F64},
    };
    for (int i = 0; i < 8; i++) {
        ddl_trainer_config *o = &jobs[i].config;
        o->architecture = o->architecture == DDL_ARCHITECTURE_AUTO ? o->architecture : DDL_ARCHITECTURE_PS;
        o->latency_s = 1e-5;
        o->seconds_per_byte = 1e-9;
    }
    same_bits(jobs, 8);
}

TEST(dedicated_servers) {
    ddl_trainer_config config = {.architecture = DDL_ARCHITECTURE_PS, .dedicated = 1, .servers = 1, .latency_s = 1e-5,
                                 .seconds_per_byte = 1e-9};
    job jobs[] = {{.text = "Adam, dedicated", .config = config, .streamed = true},
                  {.text = "momentum of bf16, dedicated", .config = config, .dtype = DDL_BF16},
                  {.text = "SSP, dedicated", .config = config},
                  {.text = "Adam, a server without a GPU", .config = config, .plain_server = true},
                  {.text = "int8, a server without a GPU", .config = config, .plain_server = true, .dtype = DDL_BF16}};
    jobs[0].config.optimizer = rated(DDL_ADAM);
    jobs[1].config.optimizer = rated(DDL_MOMENTUM);
    jobs[2].config.optimizer = rated(DDL_SGD);
    jobs[2].config.sync = DDL_SYNC_SSP;
    jobs[3].config.optimizer = rated(DDL_ADAM);
    jobs[4].config.optimizer = rated(DDL_SGD);
    jobs[4].config.compression.kind = DDL_COMPRESS_INT8;
    same_bits(jobs, 5);
}

TEST(an_optimizer_of_its_own) {
    ddl_optimizer own = {.kind = DDL_OPTIMIZER_FN, .learning_rate = 0.05, .fn = own_optimizer, .state_slots = 1};
    job jobs[] = {{.text = "its own", .config = {.optimizer = own}},
                  {.text = "its own, on a stream", .config = {.optimizer = own, .shard = 1}, .streamed = true}};
    same_bits(jobs, 2);
}

TEST(switches) {
    ddl_trainer_config bsp = {.optimizer = rated(DDL_MOMENTUM)}, local = bsp, other = bsp;
    local.sync = DDL_SYNC_LOCAL;
    local.local_steps = 2;
    other.schedule = DDL_SCHEDULE_WAIT_FREE;
    other.clip_norm = 0.5;
    job jobs[] = {{.text = "to local SGD", .config = bsp, .then = &local, .streamed = true},
                  {.text = "from local SGD", .config = local, .then = &other, .dtype = DDL_BF16},
                  {.text = "to another schedule", .config = bsp, .then = &other}};
    same_bits(jobs, 3);
}

TEST(data_that_ends) {
    job jobs[] = {{.text = "fewer steps", .config = {.optimizer = rated(DDL_ADAM), .uneven = 1}, .leaves = true},
                  {.text = "fewer, on a stream", .config = {.optimizer = rated(DDL_LAMB), .uneven = 1}, .leaves = true,
                   .dtype = DDL_BF16, .streamed = true}};
    same_bits(jobs, 2);
}

TEST(not_finite) {
    job jobs[] = {
        {.text = "NaN", .config = {.optimizer = rated(DDL_ADAM)}, .bad_step = 6, .streamed = true},
        {.text = "NaN, overlap", .config = {.optimizer = rated(DDL_ADAM), .overlap_forward = 1}, .bad_step = 6},
        {.text = "NaN, clipped", .config = {.optimizer = rated(DDL_ADAM), .clip_norm = 1}, .bad_step = 6,
         .streamed = true},
    };
    same_bits(jobs, 3);
}

TEST(checkpoints) {
    char folder[] = "/tmp/ddl-test-gpu-trainer-XXXXXX", inner[5][64], command[80];
    REQUIRE(mkdtemp(folder) != NULL);
    job jobs[] = {
        {.text = "a checkpoint", .config = {.optimizer = rated(DDL_ADAM)}, .dtype = DDL_BF16, .streamed = true},
        {.text = "shards", .config = {.optimizer = rated(DDL_ADAM), .shard = 1}},
        {.text = "residuals", .streamed = true,
         .config = {.optimizer = rated(DDL_ADAM), .compression = {.kind = DDL_COMPRESS_TOP_K, .ratio = 0.1}}},
        {.text = "residuals of gTop-k", .streamed = true,
         .config = {.optimizer = rated(DDL_ADAM), .compression = {.kind = DDL_COMPRESS_GTOP_K, .ratio = 0.1}}},
        {.text = "PowerSGD's Q",
         .config = {.optimizer = rated(DDL_SGD), .compression = {.kind = DDL_COMPRESS_POWER, .rank = 2}}},
    };
    for (int i = 0; i < 5; i++) {
        snprintf(inner[i], sizeof inner[i], "%s/%d", folder, i);
        REQUIRE(mkdir(inner[i], 0700) == 0);
        jobs[i].folder = inner[i];
    }
    same_bits(jobs, 5);
    snprintf(command, sizeof command, "rm -rf %s", folder);
    CHECK_EQ(system(command), 0);
}

/* ---- what cannot be ---- */

static void refusals(int rank, int n, void *arg) {
    ddl_context *c = coll_join(rank, n, arg);
    REQUIRE(c != NULL);
    ddl_trainer *t = NULL;
    int64_t count = 8;
    float host[8] = {0};
    ddl_tensor there, wide, here = ddl_tensor_1d(host, DDL_F32, 8);
    CHECK_EQ(ddl_tensor_alloc_on(c, 1, DDL_F32, 1, &count, &there), DDL_OK);
    CHECK_EQ(ddl_tensor_alloc_on(c, 1, DDL_F64, 1, &count, &wide), DDL_OK);
    CHECK_EQ(ddl_trainer_create(ddl_world(c), NULL, &t), DDL_OK);
    CHECK_EQ(ddl_trainer_set_stream(t, &count), DDL_ERR_STATE);
    CHECK_EQ(ddl_trainer_add(t, "a", there, here, NULL, NULL), DDL_ERR_ARG);
    CHECK_STR(ddl_error(c), "parameter on device 1 and its gradient on device 0");
    CHECK_EQ(ddl_trainer_add(t, "a", wide, there, NULL, NULL), DDL_ERR_ARG);
    CHECK_STR(ddl_error(c), "f64 with f64");
    CHECK_EQ(ddl_trainer_add(t, "a", there, there, NULL, NULL), DDL_OK);
    CHECK_EQ(ddl_trainer_add(t, "b", here, here, NULL, NULL), DDL_ERR_ARG);
    CHECK_STR(ddl_error(c), "all tensors of this trainer must be on device 1");
    CHECK_EQ(ddl_trainer_free(&t), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &there), DDL_OK);
    CHECK_EQ(ddl_tensor_free(c, &wide), DDL_OK);
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

TEST(refused) {
    coll_job j;
    coll_job_make(&j);
    ranks_threads(1, refusals, &j);
}


/* gpu_kernels: every kernel of plugins/cuda beside a plain copy within the GPU, as a table.
 *
 *     make build/cuda.fatbin
 *     cc -std=c11 -O2 -D_GNU_SOURCE -I. -DCUDA_FATBIN='"build/cuda.fatbin"' -o build/gpu_kernels bench/gpu_kernels.c \
 *         build/libddl.a -lpthread -ldl && build/gpu_kernels
 *
 * Each figure is the best of some blocks of launches, timed by the host around a wait for the stream, so that a launch
 * counts when it is the limit. GB/s counts each byte that has to be read or written once, of the copy too. Without a
 * GPU it says so and ends with 2. The last lines hold the figures against what is asked for: 90 % of the copy for
 * reductions and optimizers, 70 % for encoders. Arguments: MiB of one array (256), blocks
 * (7), launches of each (10). */
#include "../plugins/cuda/cuda.c"

enum { ARRAYS = 6, FILLED = 1 << 20 };

static char *array[ARRAYS];
static int64_t array_bytes = 256 << 20;
static int blocks = 7, launches = 10; /* launches of a block */
static cuda_gpu *gpu;
static double copy_rate; /* bytes per second */

static void *host_alloc(const ddl_host *host, size_t bytes) { return (void)host, malloc(bytes); }
static void host_free(const ddl_host *host, void *memory) { (void)host, free(memory); }
static void host_log(const ddl_host *host, ddl_log_level level, const char *line) {
    (void)host, (void)level;
    fprintf(stderr, "%s\n", line);
}
static const ddl_host bench_host = {.size = sizeof(ddl_host), .alloc = host_alloc, .free = host_free, .log = host_log};

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef ddl_status (*launch_fn)(const cuda_sink *sink, void *arg);

/* Seconds of one launch. */
static double best_s(launch_fn launch, void *arg) {
    double best = 1e9;
    cuda_guard guard;
    if (cuda_enter(gpu, &guard) != DDL_OK) {
        exit(2);
    }
    cuda_sink sink = cuda_sink_of(gpu, NULL);
    for (int block = 0; block <= blocks; block++) { /* the first one loads the kernel */
        double start = now_s();
        for (int i = 0; i < launches; i++) {
            if (launch(&sink, arg) != DDL_OK) {
                fprintf(stderr, "a kernel does not start\n");
                exit(1);
            }
        }
        if (gpu->cu.cuStreamSynchronize(gpu->stream) != CUDA_SUCCESS) {
            fprintf(stderr, "a kernel failed\n");
            exit(1);
        }
        double took = (now_s() - start) / launches;
        best = block > 0 && took < best ? took : best;
    }
    cuda_leave(&guard);
    return best;
}

typedef struct tally {
    double asked; /* part of the copy's rate */
    int met, of;
} tally;
static tally fast = {0.9, 0, 0}, encoders = {0.7, 0, 0};

static void row(const char *name, const char *more, double bytes, launch_fn launch, void *arg, tally *t) {
    double s = best_s(launch, arg), part = bytes / s / copy_rate;
    printf("| %s %s | %.1f | %.0f | %.0f %% |\n", name, more, s * 1e6, bytes / s * 1e-9, 100 * part);
    if (t != NULL) {
        t->of++;
        t->met += part >= t->asked;
    }
}

/* ---- what is launched ---- */

static ddl_status launch_copy(const cuda_sink *sink, void *arg) {
    (void)arg;
    CUresult result = gpu->cu.cuMemcpyAsync((CUdeviceptr)(uintptr_t)array[0], (CUdeviceptr)(uintptr_t)array[1],
                                            (size_t)array_bytes, sink->stream);
    return cuda_check(gpu, result, "copying");
}

typedef struct reduce_case {
    cuda_reduction what;
    int32_t sources;
} reduce_case;
static ddl_status launch_reduce(const cuda_sink *sink, void *arg) {
    const reduce_case *c = arg;
    void *dst = array[0];
    int64_t count = array_bytes / (int64_t)ddl_dtype_bytes((ddl_dtype)c->what.dtype);
    return cuda_put_reduce(sink, &c->what, &dst, 1, (const void *const *)(array + 1), c->sources, count);
}

typedef struct kernel_case {
    int32_t which;
    const void *params;
} kernel_case;
static ddl_status launch_kernel(const cuda_sink *sink, void *arg) {
    const kernel_case *c = arg;
    return cuda_put_kernel(sink, c->which, c->params);
}

/* Rows that become columns: a quarter of the array, since most of its words are alone. */
static ddl_status launch_transpose(const cuda_sink *sink, void *arg) {
    int64_t side = 1;
    (void)arg;
    while (side * side * 16 <= array_bytes) {
        side *= 2;
    }
    side /= 2;
    ddl_tensor t = {.data = array[1], .dtype = DDL_F32, .ndim = 2, .shape = {side, side}, .strides = {1, side}};
    return cuda_put_strided(sink, &t, array[0], 0);
}

/* ---- rows ---- */

static void reductions(void) {
    static const char *const ops[] = {"", "sum",  "prod", "min", "max",  "avg",       "band",
                                      "bor", "bxor", "land", "lor", "lxor", "min_index", "max_index"};
    static const double halves[CUDA_PLACES] = {0.5, 0.5, 0.5, 0.5};
    cuda_kernel kernel;
    for (int32_t dtype = DDL_F16; dtype <= DDL_E5M2; dtype++) {
        for (int32_t op = DDL_SUM; op <= DDL_MAX_INDEX; op++) {
            reduce_case c = {{.dtype = dtype, .op = op}, 2};
            if (op != DDL_AVG && cuda_reduce_kernel(dtype, op, &kernel)) {
                row(ddl_dtype_name((ddl_dtype)dtype), ops[op], 3.0 * (double)array_bytes, launch_reduce, &c, &fast);
            }
        }
    }
    for (int32_t n = 3; n < ARRAYS; n++) {
        char more[40];
        reduce_case c = {{.dtype = DDL_BF16, .op = DDL_SUM}, n};
        snprintf(more, sizeof more, "sum of %d", n);
        row("bf16", more, (n + 1.0) * (double)array_bytes, launch_reduce, &c, &fast);
    }
    for (int32_t dtype = DDL_F16; dtype <= DDL_F64; dtype++) {
        reduce_case c = {{.dtype = dtype, .op = DDL_AVG, .has_factor = 1, .divisor = 3, .factor = halves}, 2};
        row(ddl_dtype_name((ddl_dtype)dtype), "sum with factors, divided", 3.0 * (double)array_bytes, launch_reduce, &c,
            NULL);
    }
}

static void optimizers(void) {
    static const struct {
        const char *name;
        int32_t kind, streams; /* reads and writes of arrays */
    } kinds[] = {{"SGD", DDL_SGD, 3},   {"momentum", DDL_MOMENTUM, 5}, {"Nesterov", DDL_NESTEROV, 5},
                 {"Adam", DDL_ADAM, 7}, {"LARS", DDL_LARS, 5},         {"LAMB", DDL_LAMB, 4}};
    for (size_t i = 0; i < 2 * (sizeof kinds / sizeof kinds[0]); i++) {
        ddl_dtype dtype = i % 2 == 0 ? DDL_F32 : DDL_F64;
        ddl_kernel_step p = {.kind = kinds[i / 2].kind, .rate = 1e-3, .keep = 1, .beta1 = 0.9, .fresh1 = 0.1,
                             .beta2 = 0.99, .fresh2 = 0.01, .unbias1 = 1, .unbias2 = 1, .epsilon = 1e-8, .dtype = dtype,
                             .count = array_bytes / (int64_t)ddl_dtype_bytes(dtype), .w = array[0], .g = array[1],
                             .m = array[2], .v = array[3]};
        kernel_case c = {DDL_KERNEL_STEP, &p};
        row(kinds[i / 2].name, dtype == DDL_F32 ? "step" : "step in f64", kinds[i / 2].streams * (double)array_bytes,
            launch_kernel, &c, dtype == DDL_F32 ? &fast : NULL); /* some GPUs have few units for f64 */
    }
    ddl_kernel_squares p = {.x = array[1], .count = array_bytes / 4, .partial = (double *)(void *)array[2],
                            .out = (double *)(void *)array[3], .dtype = DDL_F32};
    kernel_case c = {DDL_KERNEL_SQUARES, &p};
    row("f32", "sum of squares", (double)array_bytes, launch_kernel, &c, NULL);
}

/* Bytes of code per byte of f32; arrays: g and e are read, e is written. */
static void codes(void) {
    static const struct {
        const char *name;
        ddl_compression config;
        double part;
    } kinds[] = {{"f16", {.kind = DDL_COMPRESS_F16}, 0.5},
                 {"bf16", {.kind = DDL_COMPRESS_BF16}, 0.5},
                 {"int8", {.kind = DDL_COMPRESS_INT8, .levels = 127}, 516.0 / 2048},
                 {"QSGD of 4 bits", {.kind = DDL_COMPRESS_QSGD, .levels = 7}, 260.0 / 2048},
                 {"sign", {.kind = DDL_COMPRESS_SIGN}, 68.0 / 2048},
                 {"top-k of 1 %", {.kind = DDL_COMPRESS_TOP_K, .ratio = 0.01}, 0.02}};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        ddl_kernel_code p = {.config = &kinds[i].config, .g = (const float *)(const void *)array[0],
                             .e = (float *)(void *)array[1], .sum = (float *)(void *)array[2], .code = array[3],
                             .scratch = array[4], .count = array_bytes / 4};
        kernel_case encode = {DDL_KERNEL_ENCODE, &p}, decode = {DDL_KERNEL_DECODE_ADD, &p};
        double bytes = (double)array_bytes, part = kinds[i].part;
        bool top = kinds[i].config.kind == DDL_COMPRESS_TOP_K; /* reads of e beyond the first are its own */
        row(kinds[i].name, "encoder", (3 + part) * bytes, launch_kernel, &encode, &encoders);
        row(kinds[i].name, "decoder", top ? 2 * part * bytes : (2 + part) * bytes, launch_kernel, &decode,
            top ? NULL : &encoders);
    }
}

/* Numbers like those of gradients, about normal, none of them NaN; arrays 2 and 3, which hold moments, have no sign.
 * The same in parts of FILLED; before each group of kernels, as what they leave is not all numbers. */
static void fill_arrays(void) {
    static float part[FILLED];
    uint32_t random = 1;
    for (int i = 0; i < ARRAYS; i++) {
        for (int64_t j = 0; j < FILLED; j++) {
            float sum = 0;
            for (int k = 0; k < 4; k++) {
                random = random * 1664525u + 1013904223u;
                sum += (float)(random >> 8) * 0x1p-23f - 1;
            }
            part[j] = i == 2 || i == 3 ? (sum < 0 ? -sum : sum) : sum;
        }
        for (int64_t at = 0; at < array_bytes; at += (int64_t)sizeof part) {
            int64_t left = array_bytes - at, some = left < (int64_t)sizeof part ? left : (int64_t)sizeof part;
            if (cuda_device_copy(gpu, array[i] + at, part, (size_t)some, NULL) != DDL_OK) {
                fprintf(stderr, "the arrays cannot be filled\n");
                exit(1);
            }
        }
    }
}

static void make_arrays(void) {
    for (int i = 0; i < ARRAYS; i++) {
        void *memory = NULL;
        if (cuda_device_alloc(gpu, (size_t)array_bytes, &memory) != DDL_OK) {
            fprintf(stderr, "the GPU has no room for %d arrays of %lld MiB; give a smaller size\n", (int)ARRAYS,
                    (long long)array_bytes >> 20);
            exit(1);
        }
        array[i] = memory;
    }
    fill_arrays();
}

int main(int count, char **words) {
    int64_t mib = count > 1 ? atoll(words[1]) : 256;
    blocks = count > 2 ? atoi(words[2]) : blocks;
    launches = count > 3 ? atoi(words[3]) : launches;
    if (mib < 1 || mib > 8192 || blocks < 1 || launches < 1) {
        fprintf(stderr, "usage: gpu_kernels [MiB of one array, 1 to 8192 [blocks [launches of each]]]\n");
        return 1;
    }
    array_bytes = mib << 20;
    if (cuda_image() == NULL || cuda_gpu_open(&bench_host, 0, &gpu) != DDL_OK) {
        fprintf(stderr, "nothing was measured: it needs a GPU of NVIDIA, its driver, and build/cuda.fatbin\n");
        return 2;
    }
    make_arrays();
    double s = best_s(launch_copy, NULL);
    copy_rate = 2 * (double)array_bytes / s;
    printf("%s, arrays of %lld MiB, copy %.0f GB/s (read and write counted)\n\n", gpu->name, (long long)mib,
           copy_rate * 1e-9);
    printf("| kernel | us | GB/s | of the copy |\n|---|---|---|---|\n");
    reductions();
    fill_arrays();
    optimizers();
    fill_arrays();
    codes();
    double gathered = 1;
    while (gathered * gathered * 16 <= (double)array_bytes) {
        gathered *= 2;
    }
    gathered /= 2;
    row("f32", "transposed", 8 * gathered * gathered, launch_transpose, NULL, NULL);
    printf("\n%d of %d reductions and optimizers reach 90 %% of the copy, %d of %d encoders and decoders 70 %%\n",
           fast.met, fast.of, encoders.met, encoders.of);
    for (int i = 0; i < ARRAYS; i++) {
        cuda_device_free(gpu, array[i]);
    }
    cuda_device_close(gpu);
    return 0;
}

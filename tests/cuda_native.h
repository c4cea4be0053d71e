/* cuda_native.h: ranks for tests of plugins/cuda/native.h. A small stand-in for the driver runs what was put on a stream at
 * a random later time, kernels on the CPU (cuda_cpu.cc); boards are memory that all ranks have. */
#ifndef CUDA_NATIVE_TEST_H
#define CUDA_NATIVE_TEST_H

#include "test.h"

#include "random.h"

#define DDL_IMPLEMENTATION
#include "ddl.h"

/* Memory of others is reached by its pointer here: share.h and probe.h are tested elsewhere. */
#define CUDA_SHARE_H
#define CUDA_PROBE_H
#include "../plugins/cuda/board.h"
#include "../plugins/cuda/links.h"
typedef struct cuda_place {
    uint64_t id, slot, offset;
} cuda_place;
typedef struct cuda_import {
    int ignored;
} cuda_import;
static ddl_status cuda_share(cuda_ipc *t, const void *memory, uint64_t bytes, cuda_place *out);
static ddl_status cuda_reach(cuda_ipc *t, int32_t peer, const cuda_place *place, uint64_t bytes, cuda_gpu *gpu,
                             cuda_import **out_import, CUdeviceptr *out);
static void cuda_let_go(cuda_ipc *t, cuda_import *import);
static ddl_status cuda_probe_set(cuda_ipc *t, const int32_t *ranks, int32_t count, int32_t rank, cuda_links *out);
#include "../plugins/cuda/native.h"

int cuda_cpu_find(const char *name);
size_t cuda_cpu_args_bytes(int kernel);
int cuda_cpu_run(int kernel, const unsigned grid[3], const unsigned block[3], void *const *args);

/* ---- a driver: streams are queues, and a look at an event may run the next of its stream ---- */

typedef struct work {
    int kernel; /* -1: a copy; -2: `bytes` is written to the word at dst */
    unsigned grid[3];
    void *args;
    void *dst;
    const void *src;
    size_t bytes;
} work;
struct CUstream_st {
    work queue[64];
    int from, to; /* counted on, never modulo */
};
struct CUevent_st {
    CUstream stream;
    int until;
};
struct CUfunc_st {
    int kernel;
};
static CUstream streams[64];
static CUstream held; /* behind a long kernel of somebody else's, until it is waited for */
static int stream_count, launch_count, live_events;

static void run_one(CUstream s) {
    if (s->from < s->to && s != held) {
        work *w = &s->queue[s->from++ % 64];
        if (w->kernel == -2) {
            atomic_store((_Atomic uint32_t *)w->dst, (uint32_t)w->bytes);
        } else if (w->kernel < 0) {
            memmove(w->dst, w->src, w->bytes);
        } else {
            const unsigned block[3] = {CUDA_THREADS, 1, 1};
            CHECK_EQ(cuda_cpu_run(w->kernel, w->grid, block, &w->args), 0);
            free(w->args);
        }
    }
}
static void run_all(void) {
    for (int i = 0; i < stream_count; i++) {
        while (streams[i] != NULL && streams[i] != held && streams[i]->from < streams[i]->to) {
            run_one(streams[i]);
        }
    }
}
static void put(CUstream s, work w) {
    if (s->to - s->from >= 64) {
        abort();
    }
    s->queue[s->to++ % 64] = w;
}
static CUresult ctx_push(CUcontext c) { return c == NULL; }
static CUresult ctx_pop(CUcontext *out) { return *out = NULL, CUDA_SUCCESS; }
static CUresult capture_mode(int *mode) { return (void)mode, CUDA_SUCCESS; }
static CUresult stream_create(CUstream *out, unsigned flags) {
    (void)flags;
    *out = streams[stream_count++ % 64] = calloc(1, sizeof **out);
    return stream_count > 64 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
static CUresult priority_range(int *least, int *greatest) { return *least = 0, *greatest = -1, CUDA_SUCCESS; }
static CUresult priority_create(CUstream *out, unsigned flags, int priority) {
    return (void)priority, stream_create(out, flags);
}
static CUresult stream_synchronize(CUstream s) {
    held = held == s ? NULL : held;
    while (s->from < s->to) {
        run_one(s);
    }
    return CUDA_SUCCESS;
}
static CUresult stream_destroy(CUstream s) {
    for (int i = 0; i < stream_count; i++) {
        if (streams[i] == s) {
            streams[i] = streams[--stream_count];
            break;
        }
    }
    free(s);
    return CUDA_SUCCESS;
}
static CUresult event_create(CUevent *out, unsigned flags) {
    (void)flags;
    live_events++;
    return (*out = calloc(1, sizeof **out)) == NULL;
}
static CUresult event_destroy(CUevent e) {
    live_events--;
    return free(e), CUDA_SUCCESS;
}
static CUresult event_record(CUevent e, CUstream s) { return e->stream = s, e->until = s->to, CUDA_SUCCESS; }
static bool queries_fail; /* as of a GPU that has failed, which is told */
static CUresult event_query(CUevent e) {
    if (queries_fail) {
        return CUDA_ERROR_LAUNCH_FAILED;
    }
    if (random_bits() % 3 == 0) {
        run_one(e->stream);
    }
    return e->stream->from >= e->until ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
static CUresult memory_copy(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream s) {
    put(s, (work){.kernel = -1, .dst = (void *)(uintptr_t)dst, .src = (const void *)(uintptr_t)src, .bytes = bytes});
    return CUDA_SUCCESS;
}
static bool no_words; /* the driver writes none */
static int live_pinned, words_written;
static CUresult host_pin(void **out, size_t bytes, unsigned flags) {
    (void)flags;
    live_pinned++;
    return (*out = aligned_alloc(64, bytes)) == NULL;
}
static CUresult host_unpin(void *at) {
    live_pinned--;
    return free(at), CUDA_SUCCESS;
}
static CUresult device_pointer(CUdeviceptr *out, void *at, unsigned flags) {
    return *out = (CUdeviceptr)(uintptr_t)at, (CUresult)flags;
}
static CUresult write_word(CUstream s, CUdeviceptr word, uint32_t value, unsigned flags) {
    (void)flags;
    if (no_words) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    put(s, (work){.kernel = -2, .dst = (void *)(uintptr_t)word, .bytes = value});
    words_written++;
    return CUDA_SUCCESS;
}
static CUresult memory_alloc(CUdeviceptr *out, size_t bytes) {
    *out = (CUdeviceptr)(uintptr_t)aligned_alloc(512, (bytes + 511) / 512 * 512);
    return *out == 0;
}
static CUresult memory_free(CUdeviceptr at) { return free((void *)(uintptr_t)at), CUDA_SUCCESS; }
static CUresult get_function(CUfunction *out, CUmodule module, const char *name) {
    static struct CUfunc_st functions[CUDA_K_COUNT];
    int number = cuda_cpu_find(name);
    (void)module;
    *out = &functions[number];
    functions[number].kernel = number;
    return number < 0;
}
static CUresult launch(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                       unsigned shared, CUstream s, void **params, void **extra) {
    work w = {.kernel = f->kernel, .grid = {gx, gy, gz}, .args = malloc(cuda_cpu_args_bytes(f->kernel))};
    (void)by, (void)bz, (void)shared, (void)extra;
    CHECK_EQ(bx, (unsigned)CUDA_THREADS);
    memcpy(w.args, params[0], cuda_cpu_args_bytes(f->kernel));
    put(s, w);
    launch_count++;
    return CUDA_SUCCESS;
}
static CUresult error_name(CUresult result, const char **out) { return *out = "stand-in", (void)result, CUDA_SUCCESS; }

/* ---- ranks ---- */

enum { RANKS = 4, MOST_BYTES = 1 << 17 };
static struct rank {
    cuda_ipc t;
    cuda_gpu gpu;
    cuda_peer peers[RANKS];
    void *set, *op;
    bool failed, gone;
    char *in, *out; /* of the operation, and what in is before the stream has come so far */
    CUstream stream;
} ranks[RANKS];
static int unshareable; /* one in so many allocations cannot be shared; 0: none */
static int reaches;     /* without a cuda_let_go so far */
static int reached;     /* in all */
static uint64_t clock_ns, clock_step_ns = 100000;
static int stepping;

static void step_others(void);
static void *host_alloc(const ddl_host *host, size_t bytes) { return (void)host, malloc(bytes); }
static void host_free(const ddl_host *host, void *memory) { (void)host, free(memory); }
static void host_log(const ddl_host *host, ddl_log_level level, const char *line) {
    (void)host, (void)level;
    if (!queries_fail) {
        test__fail(__FILE__, __LINE__, "unexpected: %s", line);
    }
}
/* Who looks at the clock waits: the others go on meanwhile, as other threads would. */
static uint64_t host_now(const ddl_host *host) {
    (void)host;
    if (stepping++ == 0) {
        step_others();
    }
    stepping--;
    return clock_ns += clock_step_ns;
}
static ddl_host host = {.size = sizeof(ddl_host), .alloc = host_alloc, .free = host_free, .log = host_log,
                        .now_ns = host_now};

/* Memory of the pool can always be shared: it is the plugin's own. */
static ddl_status cuda_share(cuda_ipc *t, const void *memory, uint64_t bytes, cuda_place *out) {
    struct rank *r = &ranks[t->rank];
    bool users = (const char *)memory == r->in || (const char *)memory == r->out;
    (void)bytes;
    if (users && unshareable > 0 && random_bits() % (uint64_t)unshareable == 0) {
        return DDL_ERR_UNSUPPORTED;
    }
    *out = (cuda_place){7, (uint64_t)t->rank, (uint64_t)(uintptr_t)memory};
    return DDL_OK;
}
static cuda_links links; /* how the GPUs of the sets that are opened reach each other */
/* Whose tensors are where: all on one GPU; on several, as the set is told; or the set is told of one, and they are not. */
enum { ON_ONE, ON_SEVERAL, ELSEWHERE, WHERES };
static int where;
static ddl_status cuda_reach(cuda_ipc *t, int32_t peer, const cuda_place *place, uint64_t bytes, cuda_gpu *gpu,
                             cuda_import **out_import, CUdeviceptr *out) {
    static cuda_import import;
    (void)bytes;
    CHECK_EQ(place->id, 7u);
    CHECK_EQ(place->slot, (uint64_t)peer);
    if (links.is_ring) { /* a rank reads from the one before it alone */
        CHECK_EQ(peer, cuda_ring_neighbour(&links, t->world_size, t->rank, -1));
    }
    CHECK(where != ON_ONE || t->rank == 0); /* which does the work of all */
    CHECK(gpu == &ranks[t->rank].gpu);
    if (random_bits() % 3 == 0) {
        return DDL_IN_PROGRESS;
    }
    reaches++;
    reached++;
    *out_import = &import;
    *out = place->offset;
    return DDL_OK;
}
static void cuda_let_go(cuda_ipc *t, cuda_import *import) {
    (void)t, (void)import;
    reaches--;
}

static ddl_status cuda_probe_set(cuda_ipc *t, const int32_t *ranks_, int32_t count, int32_t rank, cuda_links *out) {
    (void)t, (void)ranks_, (void)count, (void)rank;
    return *out = links, DDL_OK;
}

static void make_ranks(int n) {
    cuda_driver cu = {.cuCtxPushCurrent = ctx_push, .cuCtxPopCurrent = ctx_pop, .cuGetErrorName = error_name,
                      .cuThreadExchangeStreamCaptureMode = capture_mode, .cuCtxGetStreamPriorityRange = priority_range,
                      .cuStreamCreateWithPriority = priority_create,
                      .cuStreamDestroy = stream_destroy, .cuStreamSynchronize = stream_synchronize,
                      .cuEventCreate = event_create,
                      .cuEventDestroy = event_destroy, .cuEventRecord = event_record, .cuEventQuery = event_query,
                      .cuMemcpyAsync = memory_copy, .cuMemAlloc = memory_alloc, .cuMemFree = memory_free,
                      .cuMemHostAlloc = host_pin, .cuMemFreeHost = host_unpin, .cuMemHostGetDevicePointer = device_pointer,
                      .cuStreamWriteValue32 = write_word,
                      .cuModuleGetFunction = get_function, .cuLaunchKernel = launch};
    memset(ranks, 0, sizeof ranks);
    no_words = random_bits() % 4 == 0;
    for (int r = 0; r < n; r++) {
        struct rank *x = &ranks[r];
        x->gpu = (cuda_gpu){.host = &host, .cu = cu, .multiprocessors = 4, .name = "stand-in"};
        x->gpu.uuid.bytes[0] = (char)(where == ON_SEVERAL ? r : where == ELSEWHERE ? (r + 1) / 2 : 0);
        x->gpu.module = (CUmodule)(uintptr_t)&x->gpu;
        atomic_store(&x->gpu.context, (CUcontext)(uintptr_t)&x->gpu);
        pthread_mutex_init(&x->gpu.lock, NULL);
        x->t = (cuda_ipc){.host = &host, .rank = r, .world_size = n, .peers = x->peers, .gpu_count = 1};
        x->t.gpus[0] = &x->gpu;
        x->t.board = aligned_alloc(64, sizeof(cuda_board));
        memset(x->t.board, 0, sizeof(cuda_board));
        stream_create(&x->stream, 0);
    }
    for (int r = 0; r < n * n; r++) {
        ranks[r / n].peers[r % n] = (cuda_peer){.here = true, .board = ranks[r % n].t.board, .bell = -1};
    }
}

static void free_ranks(int n) {
    for (int r = 0; r < n; r++) {
        struct rank *x = &ranks[r];
        cuda_natives_close(&x->t);
        stream_destroy(x->stream);
        if (x->gpu.pool != NULL) {
            cuda_pool_close(&x->gpu);
        }
        cuda_beacons_give(&x->gpu);
        while (x->gpu.spare_count > 0) {
            event_destroy(x->gpu.spare[--x->gpu.spare_count]);
        }
        free(x->t.board);
    }
    CHECK_EQ(live_events, 0);
    CHECK_EQ(live_pinned, 0);
    for (int i = 0; i < CUDA_BEACONS; i++) {
        CHECK(!cuda_beacons.page[0].of[i].taken);
    }
    CHECK_EQ(reaches, 0);
    CHECK_EQ(stream_count, 0);
}

static void open_sets(int n, uint64_t group) {
    int32_t world[RANKS];
    for (int r = 0; r < n; r++) {
        world[r] = r;
    }
    for (int r = 0; r < n; r++) {
        REQUIRE(cuda_native_open(&ranks[r].t, group, world, n, r, &ranks[r].set) == DDL_OK);
        CHECK(cuda_native_cost_ns(&ranks[r].t, ranks[r].set, DDL_ALL_REDUCE, 4) > 0);
    }
}

#endif /* CUDA_NATIVE_TEST_H */

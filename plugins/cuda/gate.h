/* gate: a place on a stream that the host opens. The GPU's front end waits there for a word of pinned memory (no kernel runs
 * meanwhile); where it cannot, streams are refused: a function of the host would keep the driver's thread from others. */
#ifndef CUDA_GATE_H
#define CUDA_GATE_H

#include "launch.h"

#include "mark.h"

enum { CUDA_GATE_WORDS = 1024 }; /* gates that are closed at one time, of one GPU and context */

/* A word is used for one closed gate after the other. The n-th waits for n or more (the comparison is cyclic), so that
 * nobody has to know when the GPU has looked: a word never falls. */
typedef struct cuda_gate {
    struct cuda_gate *next; /* of those that are open */
    cuda_gpu *gpu;
    _Atomic uint32_t *word; /* pinned */
    uint32_t value;         /* that opens it */
} cuda_gate;

typedef struct cuda_gates {
    _Atomic uint32_t *words;
    CUdeviceptr words_there; /* as the GPU sees them */
    cuda_gate *open;
    cuda_gate all[CUDA_GATE_WORDS];
} cuda_gates;

/* The lock is held, the context current. */
static ddl_status cuda_gates_need(cuda_gpu *gpu) {
    if (gpu->gates != NULL) {
        return DDL_OK;
    }
    cuda_gates *g = gpu->host->alloc(gpu->host, sizeof *g);
    if (g == NULL) {
        return DDL_ERR_NOMEM;
    }
    memset(g, 0, sizeof *g);
    void *words = NULL;
    CUresult result = gpu->cu.cuMemHostAlloc(&words, CUDA_GATE_WORDS * sizeof *g->words,
                                             CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
    if (result == CUDA_SUCCESS) {
        result = gpu->cu.cuMemHostGetDevicePointer(&g->words_there, words, 0);
        if (result != CUDA_SUCCESS) {
            gpu->cu.cuMemFreeHost(words);
        }
    }
    ddl_status status = cuda_check(gpu, result, "pinning words that streams wait for");
    if (status != DDL_OK) {
        gpu->host->free(gpu->host, g);
        return status;
    }
    g->words = words;
    for (int32_t i = CUDA_GATE_WORDS - 1; i >= 0; i--) {
        atomic_store_explicit(&g->words[i], 0, memory_order_relaxed); /* nobody waits yet */
        g->all[i] = (cuda_gate){g->open, gpu, &g->words[i], 0};
        g->open = &g->all[i];
    }
    gpu->gates = g;
    return DDL_OK;
}

/* What a GPU first needs of the driver may wait for all that is on it, and so for a gate that this host is to open: the
 * kernels are loaded, to the end, and words pinned that the GPU writes, before there is one, for all endpoints of the process
 * (cuda_loaded, cuda_beacons). A kernel that is not found says so when it is launched. */
static ddl_status cuda_gates_prepare(cuda_gpu *gpu) {
    pthread_mutex_lock(&gpu->lock);
    bool first = gpu->gates == NULL;
    pthread_mutex_unlock(&gpu->lock);
    if (first) {
        cuda_beacons_need(gpu);
    }
    ddl_status status = first ? cuda_module_need(gpu) : DDL_OK;
    for (int32_t i = 0; status == DDL_OK && first && i < CUDA_K_COUNT; i++) {
        CUfunction function = NULL;
        if (gpu->cu.cuModuleGetFunction(&function, gpu->module, cuda_kernel_names[i]) != CUDA_SUCCESS) {
            break;
        }
        if (gpu->cu.cuFuncLoad != NULL) { /* what cuModuleGetFunction gives may be loaded in part */
            status = cuda_check(gpu, gpu->cu.cuFuncLoad(function), "loading the kernel %s", cuda_kernel_names[i]);
        }
        atomic_store_explicit(&gpu->kernels[i], function, memory_order_release); /* with the module's code */
    }
    return status;
}

/* Streams of other contexts cannot be ordered on this GPU. The context is current. */
static ddl_status cuda_gate_check(cuda_gpu *gpu, CUstream stream) {
    CUcontext context = NULL;
    ddl_status status = cuda_check(gpu, gpu->cu.cuStreamGetCtx(stream, &context), "asking whose a stream is");
    if (status == DDL_OK && context != atomic_load_explicit(&gpu->context, memory_order_acquire)) {
        cuda_log(gpu->host, DDL_LOG_WARN, "GPU %d (%s): the stream is of another GPU, or of another context than the "
                 "primary one", gpu->ordinal, gpu->name);
        return DDL_ERR_ARG;
    }
    return status;
}

/* The flush, where the GPU has it: what adapters and other GPUs wrote into its memory before the gate was opened is seen by
 * what follows on the stream, which the GPU has no other reason to think newer than the wait. The context is current. */
static CUresult cuda_gate_close_on(cuda_gpu *gpu, CUstream stream, cuda_gate *gate) {
    CUdeviceptr word = gpu->gates->words_there + (CUdeviceptr)(gate->word - gpu->gates->words) * sizeof(uint32_t);
    return gpu->cu.cuStreamWaitValue32(stream, word, gate->value, CU_STREAM_WAIT_VALUE_GEQ | gpu->flush);
}

/* One that is open, with the value of its next use. */
static ddl_status cuda_gate_take(cuda_gpu *gpu, cuda_gate **out) {
    pthread_mutex_lock(&gpu->lock);
    ddl_status status = cuda_gates_need(gpu);
    cuda_gate *gate = status == DDL_OK ? gpu->gates->open : NULL;
    if (gate != NULL) {
        gpu->gates->open = gate->next;
        gate->value++;
    } else if (status == DDL_OK) {
        status = DDL_ERR_NOMEM; /* so many operations wait on streams already */
    }
    pthread_mutex_unlock(&gpu->lock);
    *out = gate;
    return status;
}

static void cuda_gate_give(cuda_gpu *gpu, cuda_gate *gate) {
    pthread_mutex_lock(&gpu->lock);
    gate->next = gpu->gates->open;
    gpu->gates->open = gate;
    pthread_mutex_unlock(&gpu->lock);
}

static ddl_status cuda_device_gate_put(void *self, void *stream, void **out_gate) {
    cuda_gpu *gpu = self;
    cuda_guard guard;
    if (cuda_device_capturing(self, stream)) {
        cuda_log(gpu->host, DDL_LOG_WARN,
                 "GPU %d (%s): a stream that is captured into a graph cannot wait for the host", gpu->ordinal,
                 gpu->name);
        return DDL_ERR_UNSUPPORTED;
    }
    ddl_status status = cuda_enter(gpu, &guard);
    if (status != DDL_OK) {
        return status;
    }
    status = cuda_gate_check(gpu, cuda_stream_of(gpu, stream));
    status = status == DDL_OK ? cuda_gates_prepare(gpu) : status;
    cuda_gate *gate = NULL;
    status = status == DDL_OK ? cuda_gate_take(gpu, &gate) : status;
    if (status == DDL_OK) { /* without the lock: where a stream's queue is full, the driver waits here for room in it */
        status = cuda_check(gpu, cuda_gate_close_on(gpu, cuda_stream_of(gpu, stream), gate),
                            "letting a stream wait for the host");
        if (status != DDL_OK) { /* the word stays behind: its next gate has a value of its own */
            cuda_gate_give(gpu, gate);
        } else {
            *out_gate = gate;
        }
    }
    cuda_leave(&guard);
    return status;
}

static void cuda_device_gate_open(void *self, void *opened) {
    cuda_gpu *gpu = self;
    cuda_gate *gate = opened;
    /* release: the GPU sees what the host wrote before; x86 and Arm order it towards PCIe as well */
    atomic_store_explicit(gate->word, gate->value, memory_order_release);
    cuda_gate_give(gpu, gate);
}

/* At the end: nothing may wait for ever. */
static void cuda_gates_close(cuda_gpu *gpu) {
    if (gpu->gates == NULL) {
        return;
    }
    for (int32_t i = 0; i < CUDA_GATE_WORDS; i++) {
        atomic_store_explicit(gpu->gates->all[i].word, gpu->gates->all[i].value, memory_order_release); /* as above */
    }
    gpu->cu.cuCtxSynchronize();
    gpu->cu.cuMemFreeHost((void *)(uintptr_t)gpu->gates->words);
    gpu->host->free(gpu->host, gpu->gates);
    gpu->gates = NULL;
}

/* ---- the end of a GPU ---- */

/* Gates are opened, so that nothing waits for ever; then memory goes. The host's memory goes in any case: where the context
 * cannot be entered, the driver refuses the rest. */
static void cuda_device_close(void *self) {
    cuda_gpu *gpu = self;
    cuda_guard guard;
    bool used = gpu->gates != NULL || gpu->pool != NULL;
    bool inside = (used || gpu->has_beacons) && cuda_enter(gpu, &guard) == DDL_OK;
    if (used) {
        cuda_gates_close(gpu);
        gpu->cu.cuStreamSynchronize(gpu->stream);
        cuda_pool_close(gpu);
    }
    cuda_beacons_give(gpu);
    if (inside) {
        cuda_leave(&guard);
    }
    cuda_gpu_close(gpu);
}

#endif /* CUDA_GATE_H */

/* gpu: one GPU as one endpoint sees it, errors of the driver as sentences, and the context around each call. It must
 * not know what is done with the GPU.
 *
 * Work goes to the primary context, the one that the CUDA runtime and frameworks use, so that their pointers and streams
 * are good here. It is made when it is first needed, not before: it takes some 300 MiB of the GPU's memory, and a program
 * on the CPU wants none of it. Each call that needs the context stands between cuda_enter and cuda_leave:
 *
 *     cuda_guard guard;
 *     ddl_status status = cuda_enter(gpu, &guard);
 *     if (status == DDL_OK) {
 *         status = cuda_check(gpu, gpu->cu.cuMemcpyAsync(...), "copying %zu bytes", bytes);
 *         cuda_leave(&guard);
 *     }
 *
 * which leaves the caller's current context as it was. They may be nested, in any thread. */
#ifndef CUDA_GPU_H
#define CUDA_GPU_H

#include "../../ddl.h"

#include "driver.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { CUDA_GPUS_MAX = 32, CUDA_SPARE_EVENTS = 64, CUDA_KERNELS_MAX = 512 };

typedef struct cuda_gpu {
    const ddl_host *host;
    cuda_driver cu;
    int ordinal; /* ddl's device number is ordinal + 1 */
    CUdevice device;
    char name[96];
    CUuuid uuid;
    int32_t multiprocessors, capability; /* capability: 10 * major + minor */
    bool asked_beacons, has_beacons;     /* it is a user of those of its number: mark.h */
    bool vmm;                            /* memory can be exported as a file descriptor */
    bool rdma;                           /* and such memory can be made for adapters to read (GPUDirect RDMA) */
    unsigned int flush;                  /* flag of a wait for a word that is written after data: gate.h, capture.h */

    pthread_mutex_t lock;             /* of what follows */
    _Atomic(CUcontext) context;       /* NULL: not needed so far */
    CUstream stream;                  /* what NULL means in the device table */
    CUstream wakes;                   /* ipc.h: where events ring; NULL: not needed so far */
    CUmodule module;                  /* the kernels, once one was needed; shared: cuda_loaded */
    struct cuda_pool *pool;           /* of alloc and free: pool.h */
    struct cuda_gates *gates;         /* gate.h */
    CUevent spare[CUDA_SPARE_EVENTS]; /* events that exist and are not in use */
    int32_t spare_count;
    _Atomic(CUfunction) kernels[CUDA_KERNELS_MAX]; /* launch.h: found so far, by its own numbers */
} cuda_gpu;

/* The kernels in the primary context of each GPU, for all endpoints of the process. When a driver loads kernels it may wait
 * for all that is on the GPU ("Lazy Loading" in the CUDA C++ Programming Guide), and so for a gate that some endpoint is to
 * open: what one has loaded before its first gate is there for all. */
static struct {
    pthread_mutex_t lock;
    struct {
        CUmodule module; /* NULL: not loaded */
        int32_t users;   /* endpoints whose `module` it is */
    } of[CUDA_GPUS_MAX]; /* by ordinal */
} cuda_loaded = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- sentences ---- */

__attribute__((format(printf, 3, 4))) static void cuda_log(const ddl_host *host, ddl_log_level level,
                                                           const char *format, ...) {
    char line[700] = "cuda: ";
    va_list args;
    va_start(args, format);
    vsnprintf(line + 6, sizeof line - 6, format, args);
    va_end(args);
    host->log(host, level, line);
}

static ddl_status cuda_status(CUresult result) {
    switch (result) {
    case CUDA_SUCCESS:
        return DDL_OK;
    case CUDA_ERROR_NOT_READY:
        return DDL_IN_PROGRESS;
    case CUDA_ERROR_OUT_OF_MEMORY:
        return DDL_ERR_NOMEM;
    case CUDA_ERROR_INVALID_VALUE:
    case CUDA_ERROR_INVALID_HANDLE:
    case CUDA_ERROR_INVALID_CONTEXT:
        return DDL_ERR_ARG;
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_PEER_ACCESS_UNSUPPORTED:
    case CUDA_ERROR_TOO_MANY_PEERS:
    case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
    case CUDA_ERROR_STREAM_CAPTURE_INVALIDATED:
    case CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
    case CUDA_ERROR_CAPTURED_EVENT:
        return DDL_ERR_UNSUPPORTED;
    default:
        return DDL_ERR_SYSTEM;
    }
}

/* What somebody can do about it; "" where there is nothing to say. */
static const char *cuda_advice(CUresult result) {
    switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
        return "; other programs may use this GPU (nvidia-smi), or tensors can be freed";
    case CUDA_ERROR_NOT_INITIALIZED:
        return "; a process that was forked from one that used CUDA cannot use it: fork earlier, or exec";
    case CUDA_ERROR_DEINITIALIZED:
        return "; the process is ending";
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
        return "; the plugin was not built for this GPU: build it again with its architecture in CUDA_ARCHS";
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
        return "; the driver is older than the toolkit that built the plugin: install a newer driver";
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_FAILED:
        return "; a kernel that ran earlier failed, perhaps the program's own, and this process cannot use the GPU any "
               "more (compute-sanitizer finds which)";
    case CUDA_ERROR_INVALID_CONTEXT:
    case CUDA_ERROR_INVALID_HANDLE:
        return "; a stream or event of another GPU, or one that was destroyed, was given";
    case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
    case CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
    case CUDA_ERROR_CAPTURED_EVENT:
        return "; this cannot be captured into a graph";
    case CUDA_ERROR_STREAM_CAPTURE_INVALIDATED:
        return "; an earlier call that cannot be captured has spoiled the graph: end the capture and begin anew";
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
        return "; the program has reset this GPU (cudaDeviceReset), and what was on it is gone";
    default:
        return "";
    }
}

static const char *cuda_error_name(const cuda_driver *cu, CUresult result) {
    const char *name = NULL;
    return cu->cuGetErrorName(result, &name) == CUDA_SUCCESS && name != NULL ? name : "an unknown error";
}

/* The status of a result; of a failure it says what was tried. NOT_READY is no failure. */
__attribute__((format(printf, 3, 4))) static ddl_status cuda_check(const cuda_gpu *gpu, CUresult result,
                                                                   const char *format, ...) {
    ddl_status status = cuda_status(result);
    if (status < 0) {
        char what[300];
        va_list args;
        va_start(args, format);
        vsnprintf(what, sizeof what, format, args);
        va_end(args);
        cuda_log(gpu->host, DDL_LOG_WARN, "GPU %d (%s): %s failed with %s%s", gpu->ordinal, gpu->name, what,
                 cuda_error_name(&gpu->cu, result), cuda_advice(result));
    }
    return status;
}

/* ---- the context ---- */

/* A stream of the plugin's own, of the highest priority there is. A GPU has a few hardware queues (8, or
 * CUDA_DEVICE_MAX_CONNECTIONS), which streams share: what the plugin does must not stand behind a gate on a stream of the
 * user's, which waits for it. Streams of different priorities are in different queues. The context is current. */
static CUresult cuda_stream_make(const cuda_gpu *gpu, CUstream *out) {
    int least = 0, greatest = 0; /* numbers: the greatest priority is the lower one */
    CUresult result = gpu->cu.cuCtxGetStreamPriorityRange(&least, &greatest);
    return result != CUDA_SUCCESS ? result : gpu->cu.cuStreamCreateWithPriority(out, CU_STREAM_NON_BLOCKING, greatest);
}

/* Makes the primary context and the plugin's own stream; the lock is held. */
static ddl_status cuda_context_make(cuda_gpu *gpu) {
    CUcontext context = NULL, ignored;
    ddl_status status =
        cuda_check(gpu, gpu->cu.cuDevicePrimaryCtxRetain(&context, gpu->device), "making its primary context");
    if (status != DDL_OK) {
        return status;
    }
    CUresult result = gpu->cu.cuCtxPushCurrent(context);
    if (result == CUDA_SUCCESS) {
        int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        gpu->cu.cuThreadExchangeStreamCaptureMode(&mode);
        result = cuda_stream_make(gpu, &gpu->stream);
        gpu->cu.cuThreadExchangeStreamCaptureMode(&mode);
        gpu->cu.cuCtxPopCurrent(&ignored);
    }
    status = cuda_check(gpu, result, "making a stream");
    if (status != DDL_OK) {
        gpu->cu.cuDevicePrimaryCtxRelease(gpu->device);
        return status;
    }
    atomic_store_explicit(&gpu->context, context, memory_order_release); /* with the stream */
    return DDL_OK;
}

static ddl_status cuda_context_need(cuda_gpu *gpu) {
    if (atomic_load_explicit(&gpu->context, memory_order_acquire) != NULL) {
        return DDL_OK;
    }
    pthread_mutex_lock(&gpu->lock);
    CUcontext context = atomic_load_explicit(&gpu->context, memory_order_relaxed); /* under the lock */
    ddl_status status = context != NULL ? DDL_OK : cuda_context_make(gpu);
    pthread_mutex_unlock(&gpu->lock);
    return status;
}

/* What cuda_leave needs. */
typedef struct cuda_guard {
    cuda_gpu *gpu;
    int mode;
} cuda_guard;

/* A thread that captures a graph in the strict mode may not allocate, nor ask for events, anywhere: what the plugin does
 * is no part of the graph unless it goes to a captured stream, so its calls are made in the relaxed mode. */
static ddl_status cuda_enter(cuda_gpu *gpu, cuda_guard *out) {
    ddl_status status = cuda_context_need(gpu);
    CUcontext context = atomic_load_explicit(&gpu->context, memory_order_acquire); /* with the stream */
    if (status == DDL_OK) {
        status = cuda_check(gpu, gpu->cu.cuCtxPushCurrent(context), "entering its context");
    }
    if (status == DDL_OK) {
        *out = (cuda_guard){gpu, CU_STREAM_CAPTURE_MODE_RELAXED};
        gpu->cu.cuThreadExchangeStreamCaptureMode(&out->mode);
    }
    return status;
}

static void cuda_leave(cuda_guard *guard) {
    CUcontext ignored;
    guard->gpu->cu.cuThreadExchangeStreamCaptureMode(&guard->mode);
    guard->gpu->cu.cuCtxPopCurrent(&ignored);
}

/* The plugin's stream for NULL. Streams of the user are the driver's: CUstream, which is cudaStream_t. */
static CUstream cuda_stream_of(const cuda_gpu *gpu, void *stream) {
    return stream != NULL ? (CUstream)stream : gpu->stream;
}

/* ---- opening ---- */

static int32_t cuda_attribute(const cuda_gpu *gpu, int attribute) {
    int value = 0;
    return gpu->cu.cuDeviceGetAttribute(&value, attribute, gpu->device) == CUDA_SUCCESS ? value : 0;
}

/* What the driver says when it is asked for the first time; NULL: it can be used. A sentence in `text` otherwise. */
static const char *cuda_driver_open(cuda_driver *cu, char *text, size_t bytes) {
    const char *missing = cuda_driver_find(cu);
    int version = 0, count = 0;
    if (missing != NULL && strcmp(missing, "libcuda.so.1") == 0) {
        const char *told = dlerror();
        snprintf(
            text, bytes,
            "there is no NVIDIA driver here: libcuda.so.1 cannot be loaded; in a container, start it with the GPUs "
            "(docker run --gpus all) (%s)",
            told != NULL ? told : "no reason given");
        return text;
    }
    if (missing != NULL) {
        snprintf(text, bytes, "the NVIDIA driver is older than CUDA 11.8 (libcuda.so.1 lacks %s); install a newer one",
                 missing);
        return text;
    }
    CUresult result = cu->cuInit(0);
    if (result == CUDA_ERROR_NO_DEVICE ||
        (result == CUDA_SUCCESS && (result = cu->cuDeviceGetCount(&count)) == 0 && count == 0)) {
        return "there is an NVIDIA driver and no GPU that this process may use; CUDA_VISIBLE_DEVICES may hide them, or "
               "the container was started without them (docker run --gpus all)";
    }
    if (result == CUDA_SUCCESS) {
        result = cu->cuDriverGetVersion(&version);
    }
    if (result != CUDA_SUCCESS) {
        snprintf(text, bytes, "the NVIDIA driver does not start: %s%s", cuda_error_name(cu, result),
                 result == CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
                     ? "; its kernel module and libcuda.so.1 are of different versions: reboot, or reload the module"
                     : cuda_advice(result));
        return text;
    }
    if (version < CUDA_DRIVER_OLDEST) {
        snprintf(text, bytes,
                 "the NVIDIA driver is for CUDA %d.%d; 11.8 is the oldest that serves: install a newer one",
                 version / 1000, version % 1000 / 10);
        return text;
    }
    return NULL;
}

/* Everything but the context. */
static ddl_status cuda_gpu_open(const ddl_host *host, int32_t ordinal, cuda_gpu **out) {
    char text[600];
    cuda_gpu *gpu = host->alloc(host, sizeof *gpu);
    if (gpu == NULL) {
        return DDL_ERR_NOMEM;
    }
    memset(gpu, 0, sizeof *gpu);
    gpu->host = host;
    gpu->ordinal = ordinal;
    const char *why = cuda_driver_open(&gpu->cu, text, sizeof text);
    if (why != NULL) {
        cuda_log(host, DDL_LOG_WARN, "%s", why);
        host->free(host, gpu);
        return DDL_ERR_UNSUPPORTED;
    }
    CUresult result = gpu->cu.cuDeviceGet(&gpu->device, ordinal);
    result = result == CUDA_SUCCESS ? gpu->cu.cuDeviceGetName(gpu->name, sizeof gpu->name, gpu->device) : result;
    result = result == CUDA_SUCCESS ? gpu->cu.cuDeviceGetUuid(&gpu->uuid, gpu->device) : result;
    ddl_status status = cuda_check(gpu, result, "finding it");
    if (status != DDL_OK) {
        host->free(host, gpu);
        return status;
    }
    gpu->multiprocessors = cuda_attribute(gpu, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    gpu->capability = 10 * cuda_attribute(gpu, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
                      cuda_attribute(gpu, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    gpu->vmm = cuda_attribute(gpu, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) != 0 &&
               cuda_attribute(gpu, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) != 0;
    gpu->rdma = cuda_attribute(gpu, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) != 0;
    gpu->flush = cuda_attribute(gpu, CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES) != 0 ? CU_STREAM_WAIT_VALUE_FLUSH : 0;
    pthread_mutex_init(&gpu->lock, NULL);
    *out = gpu;
    return DDL_OK;
}

/* The last one unloads; the context is current. */
static void cuda_module_give(cuda_gpu *gpu) {
    if (gpu->module == NULL) {
        return;
    }
    pthread_mutex_lock(&cuda_loaded.lock);
    if (--cuda_loaded.of[gpu->ordinal].users == 0) {
        gpu->cu.cuModuleUnload(gpu->module);
        cuda_loaded.of[gpu->ordinal].module = NULL;
    }
    pthread_mutex_unlock(&cuda_loaded.lock);
    gpu->module = NULL;
}

/* What is on the plugin's stream ends first. The primary context goes when nobody in the process holds it. */
static void cuda_gpu_close(cuda_gpu *gpu) {
    cuda_guard guard;
    if (atomic_load_explicit(&gpu->context, memory_order_acquire) != NULL) {
        bool inside = cuda_enter(gpu, &guard) == DDL_OK;
        gpu->cu.cuStreamSynchronize(gpu->stream);
        gpu->cu.cuStreamDestroy(gpu->stream);
        if (gpu->wakes != NULL) {
            gpu->cu.cuStreamSynchronize(gpu->wakes);
            gpu->cu.cuStreamDestroy(gpu->wakes);
        }
        while (gpu->spare_count > 0) {
            gpu->cu.cuEventDestroy(gpu->spare[--gpu->spare_count]);
        }
        cuda_module_give(gpu);
        if (inside) {
            cuda_leave(&guard);
        }
        gpu->cu.cuDevicePrimaryCtxRelease(gpu->device);
    }
    pthread_mutex_destroy(&gpu->lock);
    gpu->host->free(gpu->host, gpu);
}

#endif /* CUDA_GPU_H */

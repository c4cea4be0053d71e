/* device: memory, copies, streams, events and gates of one GPU, as the device table has them. Kernels are launch.h's. */
#ifndef CUDA_DEVICE_H
#define CUDA_DEVICE_H

#include "pool.h"

/* ---- opening ---- */

static int32_t cuda_device_count(void) {
    cuda_driver cu;
    char text[300];
    int count = 0;
    bool can = cuda_driver_open(&cu, text, sizeof text) == NULL && cu.cuDeviceGetCount(&count) == CUDA_SUCCESS;
    return !can ? 0 : count < CUDA_GPUS_MAX ? count : CUDA_GPUS_MAX;
}

static ddl_status cuda_device_open(const ddl_host *host, int32_t device, void **out_self) {
    int32_t count = cuda_device_count();
    if (device < 0 || device >= count) {
        cuda_log(host, DDL_LOG_WARN, "there is no GPU %d: this process sees %d, counted from 0 (CUDA_VISIBLE_DEVICES)",
                 device, count);
        return DDL_ERR_ARG;
    }
    cuda_gpu *gpu = NULL;
    ddl_status status = cuda_gpu_open(host, device, &gpu);
    if (status == DDL_OK) {
        cuda_log(host, DDL_LOG_INFO, "GPU %d is %s: compute capability %d.%d, %d multiprocessors, memory %s", device,
                 gpu->name, gpu->capability / 10, gpu->capability % 10, gpu->multiprocessors,
                 gpu->vmm ? "by descriptors" : "by handles of CUDA IPC");
        *out_self = gpu;
    }
    return status;
}

/* ---- whose is it ---- */

/* Managed memory counts as the GPU's: it is reached by the driver's copies and by kernels, never by the CPU here, so that
 * cards that cannot share it at one time do not matter. Pinned memory is the host's. */
static int32_t cuda_device_owner(void *self, const void *pointer) {
    cuda_gpu *gpu = self;
    uint32_t type = 0, managed = 0;
    int32_t ordinal = -1;
    int attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
                        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
    void *values[] = {&type, &managed, &ordinal};
    CUresult result = gpu->cu.cuPointerGetAttributes(3, attributes, values, (CUdeviceptr)(uintptr_t)pointer);
    if (result == CUDA_ERROR_INVALID_VALUE || result == CUDA_ERROR_INVALID_CONTEXT) {
        return 0; /* nothing that CUDA knows of */
    }
    if (result != CUDA_SUCCESS) {
        return (int32_t)cuda_check(gpu, result, "asking whose pointer %p is", pointer);
    }
    return (type == CU_MEMORYTYPE_DEVICE || managed != 0) && ordinal >= 0 ? ordinal + 1 : 0;
}

/* ---- memory ---- */

static ddl_status cuda_device_alloc(void *self, size_t bytes, void **out_memory) {
    cuda_gpu *gpu = self;
    cuda_guard guard;
    CUdeviceptr at = 0;
    ddl_status status = cuda_enter(gpu, &guard);
    if (status != DDL_OK) {
        return status;
    }
    pthread_mutex_lock(&gpu->lock);
    if (gpu->pool == NULL && (gpu->pool = gpu->host->alloc(gpu->host, sizeof *gpu->pool)) != NULL) {
        *gpu->pool = (cuda_pool){NULL, 0, 0};
    }
    status = gpu->pool != NULL ? cuda_pool_alloc(gpu, bytes, &at) : DDL_ERR_NOMEM;
    pthread_mutex_unlock(&gpu->lock);
    cuda_leave(&guard);
    if (status == DDL_OK) {
        *out_memory = (void *)(uintptr_t)at;
    }
    return status;
}

static void cuda_device_free(void *self, void *memory) {
    cuda_gpu *gpu = self;
    cuda_guard guard;
    if (memory == NULL || cuda_enter(gpu, &guard) != DDL_OK) {
        return;
    }
    pthread_mutex_lock(&gpu->lock);
    bool known = gpu->pool != NULL && cuda_pool_free(gpu, (CUdeviceptr)(uintptr_t)memory);
    pthread_mutex_unlock(&gpu->lock);
    cuda_leave(&guard);
    if (!known) {
        cuda_log(gpu->host, DDL_LOG_WARN,
                 "GPU %d (%s): %p is not freed, as it is not the start of memory that was "
                 "allocated there",
                 gpu->ordinal, gpu->name, memory);
    }
}

/* Blocks of ours have numbers of ours, odd ones; memory of cuMemAlloc and its kin has a buffer ID, "guaranteed unique within
 * the process" (cuda.h). That is not said of what a program maps by cuMemMap: PyTorch's expandable segments put other
 * memory at an address that stays. */
static ddl_status cuda_device_allocation(void *self, const void *pointer, ddl_allocation *out) {
    cuda_gpu *gpu = self;
    cuda_guard guard;
    CUdeviceptr at = (CUdeviceptr)(uintptr_t)pointer, base = 0;
    CUmemGenericAllocationHandle handle = 0;
    uint64_t id = 0;
    size_t bytes = 0;
    ddl_status status = cuda_enter(gpu, &guard);
    if (status != DDL_OK) {
        return status;
    }
    pthread_mutex_lock(&gpu->lock);
    const cuda_block *b = cuda_pool_block(gpu, at);
    if (b != NULL) {
        *out = (ddl_allocation){(void *)(uintptr_t)b->base, b->bytes, 2 * b->serial + 1};
    }
    pthread_mutex_unlock(&gpu->lock);
    if (b == NULL && gpu->cu.cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)at) == CUDA_SUCCESS) {
        gpu->cu.cuMemRelease(handle);
        status = DDL_ERR_UNSUPPORTED;
    } else if (b == NULL) {
        bool known = gpu->cu.cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, at) == CUDA_SUCCESS && id != 0 &&
                     gpu->cu.cuMemGetAddressRange(&base, &bytes, at) == CUDA_SUCCESS;
        *out = (ddl_allocation){(void *)(uintptr_t)base, bytes, 2 * id};
        status = known ? DDL_OK : DDL_ERR_UNSUPPORTED;
    }
    cuda_leave(&guard);
    return status;
}

static ddl_status cuda_device_host_alloc(void *self, size_t bytes, void **out_memory) {
    cuda_gpu *gpu = self;
    cuda_guard guard;
    ddl_status status = cuda_enter(gpu, &guard);
    if (status == DDL_OK) {
        status = cuda_check(gpu, gpu->cu.cuMemHostAlloc(out_memory, bytes > 0 ? bytes : 1, CU_MEMHOSTALLOC_PORTABLE),
                            "allocating %zu bytes of pinned memory", bytes);
        cuda_leave(&guard);
    }
    return status;
}

static void cuda_device_host_free(void *self, void *memory) {
    cuda_gpu *gpu = self;
    cuda_guard guard;
    if (memory != NULL && cuda_enter(gpu, &guard) == DDL_OK) {
        cuda_check(gpu, gpu->cu.cuMemFreeHost(memory), "freeing pinned memory");
        cuda_leave(&guard);
    }
}

/* ---- work ---- */

/* Each direction, also to another GPU. Host memory should be pinned (host_alloc): for other memory the driver may wait
 * here for all that is on the stream. */
static ddl_status cuda_device_copy(void *self, void *dst, const void *src, size_t bytes, void *stream) {
    cuda_gpu *gpu = self;
    cuda_guard guard;
    ddl_status status = bytes > 0 ? cuda_enter(gpu, &guard) : DDL_OK;
    if (bytes > 0 && status == DDL_OK) {
        status = cuda_check(gpu,
                            gpu->cu.cuMemcpyAsync((CUdeviceptr)(uintptr_t)dst, (CUdeviceptr)(uintptr_t)src, bytes,
                                                  cuda_stream_of(gpu, stream)),
                            "copying %zu bytes from %p to %p", bytes, src, dst);
        cuda_leave(&guard);
    }
    return status;
}

static ddl_status cuda_device_fill(void *self, void *dst, int value, size_t bytes, void *stream) {
    cuda_gpu *gpu = self;
    cuda_guard guard;
    ddl_status status = bytes > 0 ? cuda_enter(gpu, &guard) : DDL_OK;
    if (bytes > 0 && status == DDL_OK) {
        status = cuda_check(gpu,
                            gpu->cu.cuMemsetD8Async((CUdeviceptr)(uintptr_t)dst, (unsigned char)value, bytes,
                                                    cuda_stream_of(gpu, stream)),
                            "filling %zu bytes at %p", bytes, dst);
        cuda_leave(&guard);
    }
    return status;
}

/* ---- streams and events ---- */

static ddl_status cuda_device_stream_make(void *self, void **out_stream) {
    cuda_gpu *gpu = self;
    cuda_guard guard;
    CUstream stream = NULL;
    ddl_status status = cuda_enter(gpu, &guard);
    if (status == DDL_OK) {
        status = cuda_check(gpu, cuda_stream_make(gpu, &stream), "making a stream");
        cuda_leave(&guard);
    }
    if (status == DDL_OK) {
        *out_stream = stream;
    }
    return status;
}

/* What is on it still runs to its end. */
static void cuda_device_stream_free(void *self, void *stream) {
    cuda_gpu *gpu = self;
    cuda_guard guard;
    if (stream != NULL && cuda_enter(gpu, &guard) == DDL_OK) {
        cuda_check(gpu, gpu->cu.cuStreamDestroy((CUstream)stream), "ending a stream");
        cuda_leave(&guard);
    }
}

/* An event that is not in use; the context is current. */
static ddl_status cuda_event_take(cuda_gpu *gpu, CUevent *out) {
    pthread_mutex_lock(&gpu->lock);
    *out = gpu->spare_count > 0 ? gpu->spare[--gpu->spare_count] : NULL;
    pthread_mutex_unlock(&gpu->lock);
    return *out != NULL ? DDL_OK
                        : cuda_check(gpu, gpu->cu.cuEventCreate(out, CU_EVENT_DISABLE_TIMING), "making an event");
}

static void cuda_event_give(cuda_gpu *gpu, CUevent event) {
    pthread_mutex_lock(&gpu->lock);
    bool kept = gpu->spare_count < CUDA_SPARE_EVENTS;
    if (kept) {
        gpu->spare[gpu->spare_count++] = event;
    }
    pthread_mutex_unlock(&gpu->lock);
    cuda_guard guard;
    if (!kept && cuda_enter(gpu, &guard) == DDL_OK) {
        gpu->cu.cuEventDestroy(event);
        cuda_leave(&guard);
    }
}

/* An event behind what is on the stream; NULL after a failure. The context is current. */
static ddl_status cuda_event_put(cuda_gpu *gpu, CUstream stream, CUevent *out) {
    ddl_status status = cuda_event_take(gpu, out);
    if (status == DDL_OK) {
        status = cuda_check(gpu, gpu->cu.cuEventRecord(*out, stream), "recording an event");
        if (status != DDL_OK) {
            cuda_event_give(gpu, *out);
        }
    }
    *out = status == DDL_OK ? *out : NULL;
    return status;
}

static ddl_status cuda_device_event_record(void *self, void *stream, void **out_event) {
    cuda_gpu *gpu = self;
    cuda_guard guard;
    CUevent event = NULL;
    ddl_status status = cuda_enter(gpu, &guard);
    if (status == DDL_OK) {
        status = cuda_event_put(gpu, cuda_stream_of(gpu, stream), &event);
        cuda_leave(&guard);
    }
    if (status == DDL_OK) {
        *out_event = event;
    }
    return status;
}

static ddl_status cuda_device_event_test(void *self, void *event) {
    cuda_gpu *gpu = self;
    cuda_guard guard;
    ddl_status status = cuda_enter(gpu, &guard);
    if (status == DDL_OK) {
        status = cuda_check(gpu, gpu->cu.cuEventQuery((CUevent)event), "work that was put on a stream");
        cuda_leave(&guard);
    }
    return status;
}

static void cuda_device_event_free(void *self, void *event) {
    if (event != NULL) {
        cuda_event_give(self, (CUevent)event);
    }
}

static ddl_status cuda_device_stream_wait(void *self, void *stream, void *event) {
    cuda_gpu *gpu = self;
    cuda_guard guard;
    ddl_status status = cuda_enter(gpu, &guard);
    if (status == DDL_OK) {
        status = cuda_check(gpu, gpu->cu.cuStreamWaitEvent(cuda_stream_of(gpu, stream), (CUevent)event, 0),
                            "letting a stream wait for an event");
        cuda_leave(&guard);
    }
    return status;
}

static int32_t cuda_device_capturing(void *self, void *stream) {
    cuda_gpu *gpu = self;
    cuda_guard guard;
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (stream != NULL && cuda_enter(gpu, &guard) == DDL_OK) {
        if (gpu->cu.cuStreamIsCapturing((CUstream)stream, &status) != CUDA_SUCCESS) {
            status = CU_STREAM_CAPTURE_STATUS_NONE; /* of the legacy stream, while another is captured */
        }
        cuda_leave(&guard);
    }
    return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

#endif /* CUDA_DEVICE_H */

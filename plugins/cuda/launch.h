/* launch: kernels on a stream, and the functions of the device table that are made of them. What is launched, and with
 * what, is choose.h's. */
#ifndef CUDA_LAUNCH_H
#define CUDA_LAUNCH_H

#include "choose.h"
#include "module.h"

#define CUDA_KERNEL_NAME(name, args) "ddl_k_" #name,
static const char *const cuda_kernel_names[] = {CUDA_KERNELS(CUDA_KERNEL_NAME)};

_Static_assert((int)CUDA_K_COUNT <= (int)CUDA_KERNELS_MAX, "a GPU has a place for each kernel");
_Static_assert(sizeof(cuda_top_state) <= 16384, "DDL_KERNEL_SCRATCH_BYTES has room for it");

/* Between cuda_enter and cuda_leave. Launches are asynchronous: an error of the kernel shows at a later call. */
static ddl_status cuda_launch(const cuda_sink *sink, cuda_kernel kernel, uint32_t blocks, uint32_t rows,
                              const void *args) {
    cuda_gpu *gpu = sink->user;
    CUfunction function = atomic_load_explicit(&gpu->kernels[kernel], memory_order_acquire);
    if (function == NULL) { /* two threads may look at once: they find the same */
        ddl_status status = cuda_kernel_find(gpu, cuda_kernel_names[kernel], &function);
        if (status != DDL_OK) {
            return status;
        }
        atomic_store_explicit(&gpu->kernels[kernel], function, memory_order_release); /* with the module's code */
    }
    void *params[] = {(void *)(uintptr_t)args}; /* the driver copies what it points to */
    CUresult result =
        gpu->cu.cuLaunchKernel(function, blocks, rows, 1, CUDA_THREADS, 1, 1, 0, sink->stream, params, NULL);
    return cuda_check(gpu, result, "starting the kernel %s", cuda_kernel_names[kernel]);
}

static cuda_sink cuda_sink_of(cuda_gpu *gpu, void *stream) {
    return (cuda_sink){cuda_launch, gpu, cuda_stream_of(gpu, stream), gpu->multiprocessors, NULL};
}

/* A sink's `copy`. */
static ddl_status cuda_engine_copy(const cuda_sink *sink, void *dst, const void *src, uint64_t bytes) {
    cuda_gpu *gpu = sink->user;
    CUresult result = gpu->cu.cuMemcpyAsync((CUdeviceptr)(uintptr_t)dst, (CUdeviceptr)(uintptr_t)src, (size_t)bytes,
                                            sink->stream);
    return cuda_check(gpu, result, "copying %llu bytes between GPUs", (unsigned long long)bytes);
}

/* ---- for the device table ---- */

static ddl_status cuda_device_reduce(void *self, void *dst, const void *const *srcs, int32_t src_count, int64_t count,
                                     int32_t dtype, int32_t op, void *stream) {
    cuda_gpu *gpu = self;
    cuda_guard guard;
    ddl_status status = cuda_enter(gpu, &guard);
    if (status == DDL_OK) {
        cuda_sink sink = cuda_sink_of(gpu, stream);
        status = cuda_put_reduce_many(&sink, dtype, op, dst, srcs, src_count, count);
        cuda_leave(&guard);
    }
    return status;
}

static ddl_status cuda_device_strided(void *self, const ddl_tensor *tensor, void *packed, int32_t unpack,
                                      void *stream) {
    cuda_gpu *gpu = self;
    cuda_guard guard;
    ddl_status status = cuda_enter(gpu, &guard);
    if (status == DDL_OK) {
        cuda_sink sink = cuda_sink_of(gpu, stream);
        status = cuda_put_strided(&sink, tensor, packed, unpack);
        cuda_leave(&guard);
    }
    return status;
}

static ddl_status cuda_device_kernel(void *self, int32_t which, const void *params, void *stream) {
    cuda_gpu *gpu = self;
    cuda_guard guard;
    ddl_status status = cuda_enter(gpu, &guard);
    if (status == DDL_OK) {
        cuda_sink sink = cuda_sink_of(gpu, stream);
        status = cuda_put_kernel(&sink, which, params);
        cuda_leave(&guard);
    }
    return status;
}

#endif /* CUDA_LAUNCH_H */

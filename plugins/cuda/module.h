/* module: the kernels of kernels.cu, which nvcc compiled into one image (machine code for each architecture, and PTX for
 * those to come) that is a part of this object. It is loaded into a GPU's context when the first kernel is needed. */
#ifndef CUDA_MODULE_H
#define CUDA_MODULE_H

#include "gpu.h"

/* CUDA_FATBIN is the image's path, given by the Makefile; a build without it has no kernels, and the plugin declines.
 * A test brings an image of its own (CUDA_IMAGE). */
#ifdef CUDA_FATBIN
__asm__(".pushsection .rodata\n"
        ".balign 16\n"
        "cuda_fatbin_bytes:\n"
        ".incbin \"" CUDA_FATBIN "\"\n"
        ".balign 16\n"
        ".popsection\n");
extern const unsigned char cuda_fatbin_bytes[] __attribute__((visibility("hidden")));
#define CUDA_IMAGE cuda_fatbin_bytes
#endif
#ifndef CUDA_IMAGE
#define CUDA_IMAGE NULL
#endif
#ifndef CUDA_TOOLKIT
#define CUDA_TOOLKIT 0 /* of the nvcc that made the image, like CUDA_DRIVER_OLDEST; 0: not known */
#endif

static const void *cuda_image(void) { return CUDA_IMAGE; }

/* The one of the process, loaded now if it was not; the GPU's lock is held. */
static ddl_status cuda_module_take(cuda_gpu *gpu) {
    pthread_mutex_lock(&cuda_loaded.lock);
    CUmodule module = cuda_loaded.of[gpu->ordinal].module;
    ddl_status status =
        module != NULL ? DDL_OK : cuda_check(gpu, gpu->cu.cuModuleLoadData(&module, cuda_image()), "loading the kernels");
    if (status == DDL_OK) {
        gpu->module = cuda_loaded.of[gpu->ordinal].module = module;
        cuda_loaded.of[gpu->ordinal].users++;
    }
    pthread_mutex_unlock(&cuda_loaded.lock);
    return status;
}

static ddl_status cuda_module_need(cuda_gpu *gpu) {
    pthread_mutex_lock(&gpu->lock);
    ddl_status status = DDL_OK;
    if (gpu->module == NULL && cuda_image() == NULL) {
        cuda_log(gpu->host, DDL_LOG_WARN, "this build of the plugin has no kernels: build it where nvcc is");
        status = DDL_ERR_UNSUPPORTED;
    } else if (gpu->module == NULL) {
        status = cuda_module_take(gpu);
    }
    pthread_mutex_unlock(&gpu->lock);
    return status;
}

/* The kernel ddl_k_..., between cuda_enter and cuda_leave. Keep what it gives: the driver looks names up slowly. */
static ddl_status cuda_kernel_find(cuda_gpu *gpu, const char *name, CUfunction *out) {
    ddl_status status = cuda_module_need(gpu);
    return status != DDL_OK
               ? status
               : cuda_check(gpu, gpu->cu.cuModuleGetFunction(out, gpu->module, name), "finding the kernel %s", name);
}

#endif /* CUDA_MODULE_H */

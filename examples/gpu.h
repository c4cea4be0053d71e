/* gpu.h: kernels of an example on a GPU, by NVIDIA's driver alone, which is opened when it is asked for: the program
 * needs no CUDA to be built or to run without a GPU. nvcc makes NAME.ptx from NAME.cu, beside the program.
 *
 * A kernel is an extern "C" function that takes one struct by value. */
#ifndef EXAMPLES_GPU_H
#define EXAMPLES_GPU_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GPU_THREADS = 256 };

typedef struct gpu {
    void *context, *module, *stream;
    int (*init)(unsigned flags);
    int (*retain)(void **context, int device);
    int (*enter)(void *context);
    int (*load)(void **module, const void *image);
    int (*find)(void **function, void *module, const char *name);
    int (*launch)(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                  unsigned shared_bytes, void *stream, void **params, void **extra);
    int (*stream_make)(void **stream, unsigned flags);
    int (*stream_wait)(void *stream);
} gpu;

static int gpu_symbols(gpu *g, void *library) {
    const struct {
        const char *name;
        void *to;
    } all[] = {{"cuInit", &g->init},
               {"cuDevicePrimaryCtxRetain", &g->retain},
               {"cuCtxPushCurrent_v2", &g->enter},
               {"cuModuleLoadData", &g->load},
               {"cuModuleGetFunction", &g->find},
               {"cuLaunchKernel", &g->launch},
               {"cuStreamCreate", &g->stream_make},
               {"cuStreamSynchronize", &g->stream_wait}};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        void *found = dlsym(library, all[i].name);
        if (found == NULL) {
            return 0;
        }
        memcpy(all[i].to, &found, sizeof found);
    }
    return 1;
}

/* The kernels NAME.ptx from the folder of the program; NULL: it cannot be read. */
static char *gpu_image(const char *program, const char *name) {
    char path[4096];
    const char *slash = strrchr(program, '/');
    snprintf(path, sizeof path, "%.*s%s.ptx", slash != NULL ? (int)(slash - program + 1) : 0, program, name);
    FILE *file = fopen(path, "rb");
    long bytes = file != NULL && fseek(file, 0, SEEK_END) == 0 ? ftell(file) : -1;
    char *text = bytes >= 0 ? calloc((size_t)bytes + 1, 1) : NULL;
    if (text != NULL && (fseek(file, 0, SEEK_SET) != 0 || fread(text, 1, (size_t)bytes, file) != (size_t)bytes)) {
        free(text);
        text = NULL;
    }
    if (file != NULL) {
        fclose(file);
    }
    return text;
}

/* Before ddl_init, which may begin the driver: kernels are there when their module is loaded. Else the driver loads each at
 * its first launch, and may then wait for all that is on the GPU: for a stream that waits for another rank, too. */
static void gpu_prepare(void) { setenv("CUDA_MODULE_LOADING", "EAGER", 0); }

/* Opens CUDA device `index` for this thread: its kernels and a stream. Returns NULL, or why not. */
static const char *gpu_open(gpu *g, int index, const char *program, const char *name) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (library == NULL || !gpu_symbols(g, library) || g->init(0) != 0) {
        return "there is no NVIDIA driver here that finds a GPU";
    }
    char *image = gpu_image(program, name);
    if (image == NULL) {
        return "its kernels were not built: nvcc is needed (make examples)";
    }
    int failed = g->retain(&g->context, index) != 0 || g->enter(g->context) != 0 ||
                 g->load(&g->module, image) != 0 || g->stream_make(&g->stream, 1) != 0;
    free(image);
    return failed ? "the driver refuses the GPU or the kernels" : NULL;
}

/* Puts a kernel on the stream, with a thread for each of count elements. 0: it went. */
static int gpu_run(const gpu *g, const char *name, int64_t count, const void *args) {
    void *function, *params[1];
    memcpy(params, &args, sizeof args); /* the driver only reads */
    int failed = g->find(&function, g->module, name);
    return failed ? failed
                  : g->launch(function, (unsigned)((count + GPU_THREADS - 1) / GPU_THREADS), 1, 1, GPU_THREADS, 1, 1, 0,
                              g->stream, params, NULL);
}

#endif /* EXAMPLES_GPU_H */

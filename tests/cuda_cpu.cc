/* cuda_cpu: the kernels of plugins/cuda and of examples, compiled for a CPU (cuda_cpu.h), and a way to call them by name as a driver
 * would: for tests, and for a stand-in of the driver.
 *
 *     g++ -std=c++17 -O1 -ffp-contract=off -c tests/cuda_cpu.cc */
#pragma GCC optimize("no-strict-aliasing") /* kernels read arrays as words of several types */
#include "cuda_cpu.h"

#include "../plugins/cuda/kernels.cu"

#define __CUDACC__ 1
#include "../examples/halo.cu"
#include "../examples/train_gpt/gpt.cu"
#undef __CUDACC__

#include <stdlib.h>
#include <sys/mman.h>

struct cpu_kernel {
    const char *name;
    size_t args_bytes;
    void (*run)(const void *args);
};

#define CPU_RUN(NAME, ARGS)                                                                                            \
    static void cpu_##NAME(const void *args) { ddl_k_##NAME(*(const ARGS *)args); }
CUDA_KERNELS(CPU_RUN)
#define CPU_ROW(NAME, ARGS) {"ddl_k_" #NAME, sizeof(ARGS), cpu_##NAME},
static void cpu_halo(const void *args) { halo_step(*(const halo_args *)args); }
#define CPU_GPT_RUN(NAME, ARGS)                                                                                        \
    static void cpu_gpt_##NAME(const void *args) { gpt_##NAME(*(const ARGS *)args); }
GPT_KERNELS(CPU_GPT_RUN)
#define CPU_GPT_ROW(NAME, ARGS) {"gpt_" #NAME, sizeof(ARGS), cpu_gpt_##NAME},
static const cpu_kernel cpu_kernels[] = {
    CUDA_KERNELS(CPU_ROW) GPT_KERNELS(CPU_GPT_ROW){"halo_step", sizeof(halo_args), cpu_halo}};

/* Kernels whose threads wait for each other. */
static bool cpu_waits(const char *name) {
    static const char *const waiting[] = {"ddl_k_squares", "ddl_k_squares_f64", "ddl_k_top_correct", "ddl_k_top_count", "ddl_k_top_pick",
                                          "ddl_k_top_tiles", "ddl_k_top_scan", "ddl_k_top_write",
                                          "ddl_k_power_left", "ddl_k_power_orthonormalize", "ddl_k_power_right",
                                          "gpt_gemm", "gpt_norm", "gpt_norm_back", "gpt_norm_columns", "gpt_softmax",
                                          "gpt_softmax_back", "gpt_cross_entropy", "gpt_sums"};
    for (const char *w : waiting) {
        if (strcmp(w, name) == 0) {
            return true;
        }
    }
    return strncmp(name, "ddl_k_encode_bits", 17) == 0;
}

/* The number of a kernel, -1: there is none of that name. */
extern "C" int cuda_cpu_find(const char *name) {
    for (size_t i = 0; i < sizeof cpu_kernels / sizeof cpu_kernels[0]; i++) {
        if (strcmp(cpu_kernels[i].name, name) == 0) {
            return (int)i;
        }
    }
    return -1;
}

extern "C" size_t cuda_cpu_args_bytes(int kernel) { return cpu_kernels[kernel].args_bytes; }

/* Runs a grid: args as for cuLaunchKernel, one pointer to the struct. Returns 0; -1: such a launch is refused. */
extern "C" int cuda_cpu_run(int kernel, const unsigned grid[3], const unsigned block[3], void *const *args) {
    const cpu_kernel *k = &cpu_kernels[kernel];
    static const size_t stacks = (size_t)CPU_FIBERS * CPU_STACK_BYTES;
    if (block[0] == 0 || block[0] > CPU_FIBERS || block[1] != 1 || block[2] != 1 || grid[0] == 0 || grid[1] == 0 ||
        grid[2] != 1 || grid[1] > 65535) {
        return -1;
    }
    cpu_block *waiting = cpu_waits(k->name) ? (cpu_block *)calloc(1, sizeof *waiting) : NULL;
    if (waiting != NULL) {
        waiting->stacks = (char *)mmap(NULL, stacks, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    static unsigned launches;
    const unsigned launch = __atomic_fetch_add(&launches, 1, __ATOMIC_RELAXED);
    const bool backward = launch % 2 != 0;
    gridDim = cpu_dim{grid[0], grid[1], grid[2]};
    blockDim = cpu_dim{block[0], 1, 1};
    for (unsigned y = 0; y < grid[1]; y++) {
        for (unsigned x = 0; x < grid[0]; x++) {
            blockIdx = cpu_dim{backward ? grid[0] - 1 - x : x, backward ? grid[1] - 1 - y : y, 0};
            if (waiting != NULL) {
                waiting->backward = backward;
                waiting->first = launch * 101 % block[0];
                cpu_run_block(waiting, k->run, args[0]);
                continue;
            }
            for (unsigned t = 0; t < block[0]; t++) {
                threadIdx.x = backward ? block[0] - 1 - t : t;
                k->run(args[0]);
            }
        }
    }
    if (waiting != NULL) {
        munmap(waiting->stacks, stacks);
    }
    free(waiting);
    return 0;
}

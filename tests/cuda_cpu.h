/* cuda_cpu: enough of CUDA C++ to compile plugins/cuda/kernels.cu as C++ and to run it on a CPU, one thread of one
 * block after another. It proves the logic of the kernels, their arithmetic and their bounds; it says nothing about a
 * GPU: not how memory is ordered there, nor what the instructions in asm do, nor how fast anything is.
 *
 * Threads of kernels that wait for each other (__syncthreads, shuffles) are fibers with a stack each, that take turns
 * in the order of their numbers; others are calls in a loop. Launches begin with one thread or another, and each second one takes threads
 * and blocks the other way round, so that what is right in one order alone, for want of a barrier, is wrong in some launch. */
#ifndef TESTS_CUDA_CPU_H
#define TESTS_CUDA_CPU_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static thread_local
#define __grid_constant__
#define __launch_bounds__(threads)

struct cpu_dim {
    unsigned x, y, z;
};
static thread_local cpu_dim blockIdx, threadIdx, blockDim, gridDim;

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) ushort4 {
    uint16_t x, y, z, w;
};
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return uint4{x, y, z, w}; }
static inline float4 make_float4(float x, float y, float z, float w) { return float4{x, y, z, w}; }

/* ---- arithmetic: each rounds once, as long as the compiler fuses nothing (-ffp-contract=off) ---- */

template <class To, class From> static inline To cpu_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "one size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
static inline float __uint_as_float(uint32_t x) { return cpu_bits<float>(x); }
static inline uint32_t __float_as_uint(float x) { return cpu_bits<uint32_t>(x); }
static inline double __longlong_as_double(long long x) { return cpu_bits<double>(x); }
static inline long long __double_as_longlong(double x) { return cpu_bits<long long>(x); }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fsub_rn(float x, float y) { return x - y; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline double __dadd_rn(double x, double y) { return x + y; }
static inline double __dsub_rn(double x, double y) { return x - y; }
static inline double __dsqrt_rn(double x) { return sqrt(x); }
static inline double __dmul_rn(double x, double y) { return x * y; }
static inline double __ddiv_rn(double x, double y) { return x / y; }
static inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
template <class T> static inline T atomicAdd(T *at, T value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }

/* ---- fibers ---- */

enum { CPU_FIBERS = 256, CPU_STACK_BYTES = 256 << 10 };

struct cpu_block {
    ucontext_t from, fiber[CPU_FIBERS];
    bool ended[CPU_FIBERS];
    bool backward;  /* whose turn is next: of the thread below */
    unsigned first; /* whose turn is first */
    unsigned running, live, waiting, generation;
    uint64_t shown[CPU_FIBERS]; /* what each thread offers in a shuffle */
    void (*kernel)(const void *args);
    const void *args;
    char *stacks;
};
static thread_local cpu_block *cpu_now; /* NULL: threads do not wait for each other */

static inline void cpu_run_on(void) { /* the next thread that has not ended; back to the caller when all have */
    cpu_block *b = cpu_now;
    unsigned was = b->running;
    for (unsigned i = 1; i <= blockDim.x; i++) {
        unsigned next = (was + (b->backward ? blockDim.x - i : i)) % blockDim.x;
        if (!b->ended[next]) {
            b->running = threadIdx.x = next;
            if (next != was) {
                swapcontext(&b->fiber[was], &b->fiber[next]);
            }
            return;
        }
    }
    swapcontext(&b->fiber[was], &b->from);
}

static inline void cpu_fiber_main(void) {
    cpu_block *b = cpu_now;
    b->kernel(b->args);
    b->ended[b->running] = true;
    b->live--;
    if (b->live > 0 && b->waiting == b->live) { /* the others wait for nobody else */
        b->waiting = 0;
        b->generation++;
    }
    cpu_run_on();
}

static inline void __syncthreads(void) {
    cpu_block *b = cpu_now;
    unsigned generation = b->generation;
    if (++b->waiting == b->live) {
        b->waiting = 0;
        b->generation++;
    }
    while (b->generation == generation) {
        cpu_run_on();
    }
}

/* All threads of a warp come here in step, because each takes one turn at a time. */
template <class T> static inline T cpu_shuffle(T value, unsigned from) {
    cpu_block *b = cpu_now;
    uint64_t out = 0;
    memcpy(&out, &value, sizeof value);
    b->shown[threadIdx.x] = out;
    cpu_run_on();
    out = b->shown[from];
    cpu_run_on();
    memcpy(&value, &out, sizeof value);
    return value;
}
/* What one thread writes no other reads behind it: kernels only keep the compiler from moving loads across it. */
static inline void __syncwarp(void) {}
static inline unsigned __ballot_sync(unsigned, bool mine) {
    cpu_block *b = cpu_now;
    unsigned out = 0, warp = threadIdx.x / 32 * 32;
    b->shown[threadIdx.x] = mine;
    cpu_run_on();
    for (unsigned i = 0; i < 32; i++) {
        out |= (unsigned)b->shown[warp + i] << i;
    }
    cpu_run_on();
    return out;
}
template <class T> static inline T __shfl_sync(unsigned, T value, int lane, int width) {
    unsigned w = (unsigned)width;
    return cpu_shuffle(value, threadIdx.x / w * w + (unsigned)lane % w);
}
template <class T> static inline T __shfl_xor_sync(unsigned, T value, int mask, int) {
    return cpu_shuffle(value, threadIdx.x ^ (unsigned)mask);
}

static inline void cpu_fiber_make(ucontext_t *fiber, char *stack) {
    getcontext(fiber);
    fiber->uc_stack.ss_sp = stack;
    fiber->uc_stack.ss_size = CPU_STACK_BYTES;
    fiber->uc_link = 0;
    makecontext(fiber, cpu_fiber_main, 0);
}

/* One block whose threads wait for each other. */
static inline void cpu_run_block(cpu_block *b, void (*kernel)(const void *), const void *args) {
    cpu_now = b;
    b->kernel = kernel;
    b->args = args;
    b->live = blockDim.x;
    b->waiting = 0;
    for (unsigned t = 0; t < blockDim.x; t++) {
        b->ended[t] = false;
        cpu_fiber_make(&b->fiber[t], b->stacks + (size_t)t * CPU_STACK_BYTES);
    }
    b->running = threadIdx.x = b->first;
    swapcontext(&b->from, &b->fiber[b->first]);
    cpu_now = 0;
}

#endif /* TESTS_CUDA_CPU_H */

/* cuda_driver: a stand-in for libcuda.so.1 on machines without a GPU, for tests of plugins/cuda. "Device" memory is shared
 * memory that the CPU may not touch but through this driver; streams are threads; kernels are those of the plugin compiled
 * for a CPU (cuda_cpu.cc), when they are linked in. It proves the plugin's logic: who maps, waits, closes and frees what,
 * and what happens when a call fails. It proves nothing about a GPU.
 *
 *     gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -o libcuda.so.1 tests/cuda_driver.c -lpthread
 *
 * Stricter than a driver: copies of pageable memory do not wait, and an address that was freed is given again at once.
 * STANDIN_GPUS (2), STANDIN_VERSION (13000) and STANDIN_RING (set: a GPU reaches the one before and the one behind it, and
 * no other) are read by cuInit; the functions standin_* are for tests. Where it returns
 * at once what a GPU would find out later (access to memory that is not mapped), it says so by the call's result. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "../plugins/cuda/driver.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { GPUS = 8, RANGES = 4096, STACK = 64, UNIT = 64 << 10 };
#define SPACE ((size_t)1 << 38)

/* The kernels, or not: cuda_cpu.cc. */
__attribute__((weak)) int cuda_cpu_find(const char *name);
__attribute__((weak)) size_t cuda_cpu_args_bytes(int kernel);
__attribute__((weak)) int cuda_cpu_run(int kernel, const unsigned grid[3], const unsigned block[3], void *const *args);

/* What a test makes us fail to end stays: that is no leak of the plugin's. */
__attribute__((weak)) void __lsan_ignore_object(const void *p);
static void *make(size_t bytes) {
    void *p = calloc(1, bytes);
    if (__lsan_ignore_object != NULL) {
        __lsan_ignore_object(p);
    }
    return p;
}

typedef struct memory { /* what cuMemCreate makes */
    int fd, device, refs;
    size_t bytes;
} memory;

typedef struct range { /* addresses: reserved, and perhaps mapped */
    CUdeviceptr at;
    size_t bytes;
    memory *is;     /* NULL: nothing is mapped */
    uint8_t *alias; /* where this driver touches it */
    uint64_t buffer_id;
    uint32_t access; /* bit n: GPU n may */
    int opened;      /* by cuIpcOpenMemHandle so often */
    CUipcMemHandle handle;
    bool plain; /* of cuMemAlloc */
} range;

enum { COPY, FILL, KERNEL, HOST, RECORD, WAIT, WAIT_WORD, WRITE_WORD };
typedef struct work {
    struct work *next;
    int kind, kernel;
    CUdeviceptr dst, src;
    size_t bytes;
    uint32_t value;
    unsigned grid[3], block[3];
    CUhostFn function;
    void *user;
    CUevent event;
    uint64_t turn;
    int device;
    size_t args_bytes;
    uint64_t args[];
} work;

struct CUctx_st {
    int device;
};
struct CUstream_st {
    int device, works; /* works: in its queue */
    bool ending, capturing, running;
    bool spoiled; /* its capture has ended: something was done that a capture forbids */
    bool *gone;   /* who destroys it waits for this */
    int mode;     /* of its capture */
    work *first, **last;
    work *graph, **graph_last; /* what is captured */
    pthread_cond_t more;
};
struct CUgraph_st {
    work *first;
};
typedef struct CUgraph_st *CUgraph, *CUgraphExec; /* one stream's works, one after the other */
struct CUevent_st {
    uint64_t recorded, happened; /* how often */
    bool ended, captured;
    int device; /* of its context: only streams of that record it */
    int held; /* works that name it */
};
struct CUfunc_st {
    int kernel, device;
    bool loaded;
};
struct CUmod_st {
    int device;
    struct CUfunc_st functions[1024];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all that follows */
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static range ranges[RANGES];
static struct CUctx_st contexts[GPUS];
static int retained[GPUS], gpus, version, kernels_running, strict_captures;
static _Thread_local int capture_mode; /* of this thread: CU_STREAM_CAPTURE_MODE_GLOBAL at first */
static uint64_t next_buffer_id = 1;
static CUdeviceptr space;
static bool ready, broken_peers, parted_peers, ring_of_peers, no_vmm, no_ipc, no_words;
static int pending[GPUS]; /* works on the streams of a GPU */
static int places; /* in the queue of each stream; 0: as many as one likes */
static size_t device_bytes = (size_t)1 << 32, device_used[GPUS];
static struct CUstream_st null_stream[GPUS];
static struct { int allocations, handles, reservations, streams, events, pinned, modules, imports; } live;
static _Thread_local CUcontext stack[STACK];
static _Thread_local int depth;

/* ---- for tests ---- */

static char fail_name[64];
static long fail_at, calls;
static CUresult fail_with;
static struct {
    void *at;
    size_t bytes;
} pinned[256];

/* The n-th call from now fails (of that function, or of any with NULL); n 0: none does. */
void standin_fail(const char *function, long n, CUresult result) {
    pthread_mutex_lock(&lock);
    snprintf(fail_name, sizeof fail_name, "%s", function != NULL ? function : "");
    fail_at = n;
    calls = 0;
    fail_with = result;
    pthread_mutex_unlock(&lock);
}
long standin_calls(void) { return calls; }
/* What is alive: nothing, when all was given back. */
int standin_live(char *text, size_t bytes) {
    pthread_mutex_lock(&lock);
    int contexts_held = 0;
    for (int i = 0; i < GPUS; i++) {
        contexts_held += retained[i];
    }
    int sum = live.allocations + live.handles + live.reservations + live.streams + live.events + live.pinned +
              live.modules + live.imports + contexts_held;
    snprintf(
        text, bytes,
        "%d contexts, %d allocations, %d handles, %d reservations, %d streams, %d events, %d pinned, %d modules, %d "
        "imports",
        contexts_held, live.allocations, live.handles, live.reservations, live.streams, live.events, live.pinned,
        live.modules, live.imports);
    pthread_mutex_unlock(&lock);
    return sum;
}
int standin_imports(void) { return live.imports; }
void standin_places(int n) { places = n; }
void standin_break_peers(int on) { broken_peers = on != 0; }
void standin_part_peers(int on) { parted_peers = on != 0; } /* the driver says that they do not reach each other */
void standin_without(int vmm, int ipc, int words) {
    no_vmm = vmm != 0;
    no_ipc = ipc != 0;
    no_words = words != 0;
}
static CUdeviceptr managed;
void standin_managed(void *at) { managed = (CUdeviceptr)(uintptr_t)at; } /* one allocation, by its first byte */
void standin_memory(size_t bytes) { device_bytes = bytes; }
int standin_depth(void) { return depth; } /* contexts that this thread has pushed */

static bool refused(const char *name) {
    pthread_mutex_lock(&lock);
    bool counts = fail_at > 0 && (fail_name[0] == 0 || strcmp(fail_name, name) == 0);
    calls += fail_name[0] == 0 || strcmp(fail_name, name) == 0;
    bool now = counts && calls == fail_at;
    pthread_mutex_unlock(&lock);
    return now;
}
#define ENTER(name)                                                                                                    \
    if (refused(#name)) {                                                                                              \
        return fail_with;                                                                                              \
    }                                                                                                                  \
    if (!ready) {                                                                                                      \
        return CUDA_ERROR_NOT_INITIALIZED;                                                                             \
    }
#define NEED_CONTEXT                                                                                                   \
    if (depth == 0) {                                                                                                  \
        return CUDA_ERROR_INVALID_CONTEXT;                                                                             \
    }
/* Calls that a driver holds for unsafe while a capture of the mode GLOBAL is under way, in threads of that mode. */
#define NOT_IN_A_CAPTURE                                                                                               \
    if (strict_captures > 0 && capture_mode == 0) {                                                                    \
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;                                                                  \
    }
/* Until nothing is on a GPU, as a driver may where it loads kernels or frees memory; the lock is held. */
static void settle(int device) {
    while (pending[device] > 0) {
        pthread_cond_wait(&changed, &lock);
    }
}
static int here(void) { return stack[depth - 1]->device; }
static CUresult unlocked(CUresult result) {
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- the driver and its devices ---- */

static void forked(void) { ready = false; } /* as with the driver: a child cannot use it */

CUresult cuInit(unsigned int flags) {
    if (refused("cuInit")) {
        return fail_with;
    }
    static pid_t owner;
    if (owner != 0 && owner != getpid()) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    pthread_mutex_lock(&lock);
    const char *count = getenv("STANDIN_GPUS"), *v = getenv("STANDIN_VERSION");
    gpus = count != NULL ? atoi(count) : 2;
    version = v != NULL ? atoi(v) : 13000;
    ring_of_peers = getenv("STANDIN_RING") != NULL;
    if (!ready && gpus > 0) {
        void *at = mmap(NULL, SPACE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) {
            return unlocked(CUDA_ERROR_OUT_OF_MEMORY);
        }
        space = (CUdeviceptr)(uintptr_t)at;
        for (int i = 0; i < GPUS; i++) {
            contexts[i].device = null_stream[i].device = i;
            null_stream[i].last = &null_stream[i].first;
            pthread_cond_init(&null_stream[i].more, NULL);
        }
        owner = getpid();
        pthread_atfork(NULL, NULL, forked);
        ready = true;
    }
    return unlocked(flags != 0 ? CUDA_ERROR_INVALID_VALUE : gpus > 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE);
}
CUresult cuDriverGetVersion(int *out) {
    *out = version;
    return refused("cuDriverGetVersion") ? fail_with : CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY   ? "CUDA_ERROR_OUT_OF_MEMORY"
            : error == CUDA_ERROR_NOT_PERMITTED ? "CUDA_ERROR_NOT_PERMITTED"
                                                : "CUDA_ERROR_STANDIN";
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int *count) {
    ENTER(cuDeviceGetCount)
    *count = gpus;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER(cuDeviceGet)
    *device = ordinal;
    return ordinal >= 0 && ordinal < gpus ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetName(char *name, int bytes, CUdevice device) {
    ENTER(cuDeviceGetName)
    snprintf(name, (size_t)bytes, "stand-in %d, no GPU", device);
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    ENTER(cuDeviceGetAttribute)
    (void)device;
    *value = attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT                  ? 4
             : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR            ? 9
             : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR            ? 0
             : attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ? !no_vmm
                                                                                    : 1;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    ENTER(cuDeviceGetUuid_v2)
    memset(uuid, 0x5a, sizeof *uuid);
    uuid->bytes[0] = (char)device; /* the same in all processes */
    return CUDA_SUCCESS;
}
CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    ENTER(cuDeviceCanAccessPeer)
    int apart = device < peer ? peer - device : device - peer;
    *can = device != peer && !parted_peers && (!ring_of_peers || apart == 1 || apart == gpus - 1);
    return CUDA_SUCCESS;
}

/* ---- contexts ---- */

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER(cuDevicePrimaryCtxRetain)
    pthread_mutex_lock(&lock);
    retained[device]++;
    *context = &contexts[device];
    return unlocked(CUDA_SUCCESS);
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    ENTER(cuDevicePrimaryCtxRelease_v2)
    pthread_mutex_lock(&lock);
    CUresult result = retained[device] > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    retained[device] -= retained[device] > 0;
    return unlocked(result);
}
CUresult cuCtxPushCurrent_v2(CUcontext context) {
    ENTER(cuCtxPushCurrent_v2)
    if (depth == STACK || context == NULL || retained[context->device] == 0) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    stack[depth++] = context;
    return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    NEED_CONTEXT
    *context = stack[--depth];
    return CUDA_SUCCESS;
}
CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags) {
    ENTER(cuCtxEnablePeerAccess)
    (void)flags;
    return peer != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

/* ---- memory ---- */

static range *find(CUdeviceptr at, size_t bytes) { /* the range around these bytes; the lock is held */
    for (range *r = ranges; r < ranges + RANGES; r++) {
        if (r->bytes > 0 && at >= r->at && at - r->at <= r->bytes && bytes <= r->bytes - (at - r->at) &&
            (bytes > 0 || at < r->at + r->bytes)) {
            return r;
        }
    }
    return NULL;
}
/* Where this driver reads and writes; NULL: nothing is mapped, or GPU `device` may not. Host memory is itself. */
static uint8_t *touch(CUdeviceptr at, size_t bytes, int device) {
    if (at - space >= SPACE) {
        return (uint8_t *)(uintptr_t)at;
    }
    range *r = find(at, bytes);
    return r == NULL || r->is == NULL || (r->access >> device & 1) == 0 ? NULL : r->alias + (at - r->at);
}
/* The same for an adapter, which reads memory of any GPU. */
void *standin_alias(void *memory) {
    CUdeviceptr at = (CUdeviceptr)(uintptr_t)memory;
    pthread_mutex_lock(&lock);
    range *r = at - space < SPACE ? find(at, 1) : NULL;
    void *alias = r != NULL && r->is != NULL ? r->alias + (at - r->at) : memory;
    pthread_mutex_unlock(&lock);
    return alias;
}
static memory *memory_make(size_t bytes, int device) {
    char name[32];
    if (device_used[device] + bytes > device_bytes) {
        return NULL;
    }
    snprintf(name, sizeof name, "standin-gpu-%d", device);
    memory *m = make(sizeof *m);
    *m = (memory){memfd_create(name, MFD_CLOEXEC), device, 1, bytes};
    if (m->fd < 0 || ftruncate(m->fd, (off_t)bytes) != 0) {
        abort();
    }
    device_used[device] += bytes;
    return m;
}
static void memory_drop(memory *m) {
    if (--m->refs == 0) {
        device_used[m->device] -= m->bytes;
        close(m->fd);
        free(m);
    }
}
static range *reserve(size_t bytes) { /* the lowest place that is free: an address comes back soon */
    range *slot = NULL;
    for (range *r = ranges; r < ranges + RANGES; r++) {
        slot = slot == NULL && r->bytes == 0 ? r : slot;
    }
    CUdeviceptr at = space;
    for (int moved = 1; moved;) {
        moved = 0;
        for (range *r = ranges; r < ranges + RANGES; r++) {
            if (r->bytes > 0 && r->at < at + bytes && at < r->at + r->bytes) {
                at = (r->at + r->bytes + UNIT - 1) / UNIT * UNIT;
                moved = 1;
            }
        }
    }
    if (slot == NULL || at + bytes > space + SPACE) {
        return NULL;
    }
    *slot = (range){.at = at, .bytes = bytes};
    return slot;
}
static void put(range *r, memory *m, uint32_t access) {
    r->is = m;
    m->refs++;
    r->access = access;
    r->buffer_id = next_buffer_id++;
    r->alias = mmap(NULL, r->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, m->fd, 0);
    if (r->alias == MAP_FAILED ||
        mmap((void *)(uintptr_t)r->at, r->bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, m->fd, 0) == MAP_FAILED) {
        abort();
    }
}
static void take(range *r) {
    munmap(r->alias, r->bytes);
    mmap((void *)(uintptr_t)r->at, r->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    memory_drop(r->is);
    r->is = NULL;
    r->access = 0;
}

CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes) {
    ENTER(cuMemAlloc_v2)
    NOT_IN_A_CAPTURE
    NEED_CONTEXT
    if (bytes == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_lock(&lock);
    memory *m = memory_make(bytes, here());
    if (m == NULL) {
        return unlocked(CUDA_ERROR_OUT_OF_MEMORY);
    }
    range *r = reserve(bytes);
    put(r, m, ~0u);
    m->refs--; /* the range's alone */
    r->plain = true;
    *out = r->at;
    live.allocations++;
    return unlocked(CUDA_SUCCESS);
}
CUresult cuMemFree_v2(CUdeviceptr at) {
    ENTER(cuMemFree_v2)
    NOT_IN_A_CAPTURE
    NEED_CONTEXT
    pthread_mutex_lock(&lock);
    range *r = find(at, 0);
    if (r == NULL || r->at != at || !r->plain) {
        return unlocked(CUDA_ERROR_INVALID_VALUE);
    }
    settle(r->is->device);
    take(r);
    r->bytes = 0;
    live.allocations--;
    return unlocked(CUDA_SUCCESS);
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr at) {
    ENTER(cuMemGetAddressRange_v2)
    NEED_CONTEXT
    pthread_mutex_lock(&lock);
    range *r = find(at, 0);
    if (r == NULL || r->is == NULL) {
        return unlocked(CUDA_ERROR_NOT_FOUND);
    }
    *base = r->at;
    *bytes = r->bytes;
    return unlocked(CUDA_SUCCESS);
}
static CUresult pin(void *at, size_t bytes) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < sizeof pinned / sizeof pinned[0]; i++) {
        if (pinned[i].at == NULL) {
            pinned[i].at = at;
            pinned[i].bytes = bytes;
            live.pinned++;
            return unlocked(CUDA_SUCCESS);
        }
    }
    return unlocked(CUDA_ERROR_OUT_OF_MEMORY);
}
static CUresult unpin(void *at) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < sizeof pinned / sizeof pinned[0]; i++) {
        if (at != NULL && pinned[i].at == at) {
            pinned[i].at = NULL;
            live.pinned--;
            return unlocked(CUDA_SUCCESS);
        }
    }
    return unlocked(CUDA_ERROR_INVALID_VALUE);
}
CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned int flags) {
    ENTER(cuMemHostAlloc)
    NOT_IN_A_CAPTURE
    NEED_CONTEXT(void) flags;
    *out = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    return pin(*out, bytes);
}
CUresult cuMemFreeHost(void *at) {
    ENTER(cuMemFreeHost)
    NEED_CONTEXT
    CUresult result = unpin(at);
    if (result == CUDA_SUCCESS) {
        free(at);
    }
    return result;
}
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *at, unsigned int flags) {
    ENTER(cuMemHostGetDevicePointer_v2)
    NEED_CONTEXT
    *out = (CUdeviceptr)(uintptr_t)at;
    return flags != 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
static bool attribute_of(void *data, int attribute, CUdeviceptr at) {
    range *r = find(at, 0);
    bool mapped = r != NULL && r->is != NULL;
    bool host = false;
    for (size_t i = 0; i < sizeof pinned / sizeof pinned[0]; i++) {
        host = host || (pinned[i].at != NULL && at - (CUdeviceptr)(uintptr_t)pinned[i].at < pinned[i].bytes);
    }
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: {
        uint32_t type = mapped ? CU_MEMORYTYPE_DEVICE : host ? CU_MEMORYTYPE_HOST : 0;
        memcpy(data, &type, sizeof type);
        break;
    }
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        memcpy(data, &(uint32_t){mapped && managed - r->at < r->bytes}, 4);
        break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        memcpy(data, mapped ? &r->buffer_id : &(uint64_t){0}, 8);
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        memcpy(data, mapped ? &r->is->device : &(int){-2}, 4);
        break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        memcpy(data, &(int){mapped && r->plain}, 4);
        break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        memcpy(data, &(int){mapped && !r->plain}, 4);
        break;
    default:
        memset(data, 0, 4);
    }
    return mapped || host;
}
CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr at) {
    ENTER(cuPointerGetAttribute)
    NEED_CONTEXT
    pthread_mutex_lock(&lock);
    return unlocked(attribute_of(data, attribute, at) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}
CUresult cuPointerGetAttributes(unsigned int count, int *attributes, void **data, CUdeviceptr at) {
    ENTER(cuPointerGetAttributes)
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < count; i++) {
        attribute_of(data[i], attributes[i], at);
    }
    return unlocked(CUDA_SUCCESS);
}

/* ---- virtual memory ---- */

static memory *of_handle(CUmemGenericAllocationHandle handle) { return (memory *)(uintptr_t)handle; }

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties, int option) {
    ENTER(cuMemGetAllocationGranularity)
    (void)properties, (void)option;
    *bytes = UNIT;
    return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *p,
                     unsigned long long f) {
    ENTER(cuMemCreate)
    NOT_IN_A_CAPTURE
    if (no_vmm) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (f != 0 || bytes == 0 || bytes % UNIT != 0 || p->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        p->allocFlags.gpuDirectRDMACapable != 1) { /* as all of these GPUs can */
        return CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_lock(&lock);
    memory *m = memory_make(bytes, p->location.id);
    *out = (CUmemGenericAllocationHandle)(uintptr_t)m;
    live.handles += m != NULL;
    return unlocked(m != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER(cuMemRelease)
    pthread_mutex_lock(&lock);
    live.handles--;
    memory_drop(of_handle(handle));
    return unlocked(CUDA_SUCCESS);
}
CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr wanted,
                             unsigned long long f) {
    ENTER(cuMemAddressReserve)
    (void)wanted;
    if (bytes == 0 || bytes % UNIT != 0 || (alignment & (alignment - 1)) != 0 || f != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_lock(&lock);
    range *r = reserve(bytes);
    *out = r != NULL ? r->at : 0;
    live.reservations += r != NULL;
    return unlocked(r != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}
CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) {
    ENTER(cuMemAddressFree)
    pthread_mutex_lock(&lock);
    range *r = find(at, 0);
    if (r == NULL || r->at != at || r->bytes != bytes || r->is != NULL || r->plain) {
        return unlocked(CUDA_ERROR_INVALID_VALUE);
    }
    r->bytes = 0;
    live.reservations--;
    return unlocked(CUDA_SUCCESS);
}
CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long f) {
    ENTER(cuMemMap)
    pthread_mutex_lock(&lock);
    range *r = find(at, 0);
    if (r == NULL || r->at != at || r->bytes != bytes || r->is != NULL || r->plain || offset != 0 || f != 0 ||
        of_handle(handle)->bytes != bytes) {
        return unlocked(CUDA_ERROR_INVALID_VALUE);
    }
    put(r, of_handle(handle), 0);
    live.allocations++;
    return unlocked(CUDA_SUCCESS);
}
CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
    ENTER(cuMemUnmap)
    pthread_mutex_lock(&lock);
    range *r = find(at, 0);
    if (r == NULL || r->at != at || r->bytes != bytes || r->is == NULL || r->plain) {
        return unlocked(CUDA_ERROR_INVALID_VALUE);
    }
    take(r);
    live.allocations--;
    return unlocked(CUDA_SUCCESS);
}
CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *accesses, size_t count) {
    ENTER(cuMemSetAccess)
    pthread_mutex_lock(&lock);
    range *r = find(at, bytes);
    for (size_t i = 0; r != NULL && i < count; i++) {
        r->access |= accesses[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? 1u << accesses[i].location.id : 0;
    }
    return unlocked(r != NULL && r->is != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address) {
    ENTER(cuMemRetainAllocationHandle)
    NEED_CONTEXT
    pthread_mutex_lock(&lock);
    range *r = find((CUdeviceptr)(uintptr_t)address, 0);
    if (r == NULL || r->is == NULL || r->plain) {
        return unlocked(CUDA_ERROR_INVALID_VALUE);
    }
    r->is->refs++;
    live.handles++;
    *out = (CUmemGenericAllocationHandle)(uintptr_t)r->is;
    return unlocked(CUDA_SUCCESS);
}
CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type, unsigned long long f) {
    ENTER(cuMemExportToShareableHandle)
    int fd = fcntl(of_handle(handle)->fd, F_DUPFD, 0);
    memcpy(out, &fd, sizeof fd);
    return type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || f != 0 || fd < 0 ? CUDA_ERROR_INVALID_VALUE
                                                                                : CUDA_SUCCESS;
}
static memory *memory_of(int fd) { /* of another process; the descriptor becomes its own */
    char path[64], name[128] = "";
    struct stat info;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    const char *at = readlink(path, name, sizeof name - 1) > 0 ? strstr(name, "standin-gpu-") : NULL;
    if (at == NULL || fstat(fd, &info) != 0) {
        return NULL;
    }
    memory *m = make(sizeof *m);
    *m = (memory){fd, at[12] - '0', 1, (size_t)info.st_size};
    device_used[m->device] += m->bytes;
    return m;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *fd, int type) {
    ENTER(cuMemImportFromShareableHandle)
    int copy = fcntl((int)(intptr_t)fd, F_DUPFD_CLOEXEC, 0);
    pthread_mutex_lock(&lock);
    memory *m = type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && copy >= 0 ? memory_of(copy) : NULL;
    if (m == NULL) {
        close(copy);
        return unlocked(CUDA_ERROR_INVALID_VALUE);
    }
    live.handles++;
    *out = (CUmemGenericAllocationHandle)(uintptr_t)m;
    return unlocked(CUDA_SUCCESS);
}

/* ---- legacy handles: process, descriptor, and which file it is ---- */

typedef struct ticket {
    int pid, fd;
    uint64_t file, id;
} ticket;

CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr at) {
    ENTER(cuIpcGetMemHandle)
    NEED_CONTEXT
    pthread_mutex_lock(&lock);
    range *r = find(at, 0);
    struct stat info;
    if (no_ipc) {
        return unlocked(CUDA_ERROR_NOT_SUPPORTED);
    }
    if (r == NULL || r->is == NULL || !r->plain || fstat(r->is->fd, &info) != 0) {
        return unlocked(CUDA_ERROR_INVALID_VALUE);
    }
    ticket t = {getpid(), r->is->fd, info.st_ino, r->buffer_id};
    memset(out, 0, sizeof *out);
    memcpy(out, &t, sizeof t);
    return unlocked(CUDA_SUCCESS);
}
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle handle, unsigned int flags) {
    ENTER(cuIpcOpenMemHandle_v2)
    NEED_CONTEXT
    ticket t;
    char path[64];
    struct stat info;
    memcpy(&t, &handle, sizeof t);
    if (t.pid == getpid() || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    pthread_mutex_lock(&lock);
    for (range *r = ranges; r < ranges + RANGES; r++) {
        if (r->opened > 0 && memcmp(&r->handle, &handle, sizeof handle) == 0) {
            r->opened++;
            *out = r->at;
            live.imports++;
            return unlocked(CUDA_SUCCESS);
        }
    }
    snprintf(path, sizeof path, "/proc/%d/fd/%d", t.pid, t.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    memory *m = fd >= 0 && fstat(fd, &info) == 0 && info.st_ino == t.file ? memory_of(fd) : NULL;
    /* the name of a memfd opened through /proc is the same */
    if (m == NULL) {
        if (fd >= 0) {
            close(fd);
        }
        return unlocked(CUDA_ERROR_INVALID_VALUE);
    }
    range *r = reserve(m->bytes);
    put(r, m, ~0u);
    memory_drop(m);
    r->opened = 1;
    r->handle = handle;
    *out = r->at;
    live.imports++;
    return unlocked(CUDA_SUCCESS);
}
CUresult cuIpcCloseMemHandle(CUdeviceptr at) {
    ENTER(cuIpcCloseMemHandle)
    NEED_CONTEXT
    pthread_mutex_lock(&lock);
    range *r = find(at, 0);
    if (r == NULL || r->at != at || r->opened == 0) {
        return unlocked(CUDA_ERROR_INVALID_VALUE);
    }
    live.imports--;
    if (--r->opened == 0) {
        take(r);
        r->bytes = 0;
    }
    return unlocked(CUDA_SUCCESS);
}

#include "cuda_driver_work.h"

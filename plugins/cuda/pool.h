/* pool: memory of a GPU for alloc and free. Blocks come from cuMemCreate, which can be exported to other processes as file
 * descriptors; small tensors share a block. A GPU or a system that cannot do that has blocks of cuMemAlloc.
 *
 * A block that is not in use any more stays for the next allocation, up to CUDA_POOL_KEEP bytes of them, because making
 * one takes the driver about a millisecond. Peers may have it mapped: it stays the same allocation all its life, whatever
 * tensors lie in it. */
#ifndef CUDA_POOL_H
#define CUDA_POOL_H

#include "gpu.h"

#include <fcntl.h>

#define CUDA_POOL_ALIGN ((size_t)512)       /* of what alloc gives, as cuMemAlloc does at least 256 */
#define CUDA_POOL_SHARED ((size_t)32 << 20) /* a block of small ones ... */
#define CUDA_POOL_SMALL ((size_t)1 << 20)   /* ... of at most this */
#define CUDA_POOL_KEEP ((size_t)256 << 20)

/* A part of a block, in use or free; parts of a block are a list without gaps. */
typedef struct cuda_part {
    struct cuda_part *next;
    size_t offset, bytes;
    bool used;
} cuda_part;

typedef struct cuda_block {
    struct cuda_block *next;
    CUdeviceptr base;
    size_t bytes;
    size_t used; /* bytes of parts in use */
    bool vmm, small;
    uint64_t serial; /* of this GPU's blocks: 1, 2, ... */
    CUmemGenericAllocationHandle handle; /* of vmm */
    cuda_part *parts;
} cuda_block;

typedef struct cuda_pool {
    cuda_block *blocks;
    size_t kept; /* bytes of blocks without a used part */
    uint64_t made; /* blocks so far */
} cuda_pool;

/* All functions here are called with the GPU's lock held and its context current. */

static void cuda_block_properties(const cuda_gpu *gpu, CUmemAllocationProp *out) {
    memset(out, 0, sizeof *out);
    out->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    out->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    out->location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, gpu->device};
    out->allocFlags.gpuDirectRDMACapable = gpu->rdma; /* without it an adapter cannot register such memory */
}

/* A descriptor of an allocation, for other ranks and not for programs that this one starts: each holder keeps the memory. */
static CUresult cuda_export_fd(const cuda_gpu *gpu, CUmemGenericAllocationHandle handle, int *out_fd) {
    CUresult result = gpu->cu.cuMemExportToShareableHandle(out_fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (result == CUDA_SUCCESS) {
        fcntl(*out_fd, F_SETFD, FD_CLOEXEC);
    }
    return result;
}

/* Maps an allocation where there is room, for this GPU and, if `others`, all that reach it: threads of this process may
 * work on those. The handle stays the caller's. */
static CUresult cuda_map(cuda_gpu *gpu, CUmemGenericAllocationHandle handle, size_t bytes, bool others,
                         CUdeviceptr *out) {
    CUmemAccessDesc access[CUDA_GPUS_MAX] = {
        {{CU_MEM_LOCATION_TYPE_DEVICE, gpu->device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE}};
    size_t accesses = 1;
    int count = 0, can = 0;
    CUresult result = gpu->cu.cuDeviceGetCount(&count);
    for (int i = 0; others && result == CUDA_SUCCESS && i < count && i < CUDA_GPUS_MAX; i++) {
        CUdevice device;
        if (i != gpu->ordinal && gpu->cu.cuDeviceGet(&device, i) == CUDA_SUCCESS &&
            gpu->cu.cuDeviceCanAccessPeer(&can, device, gpu->device) == CUDA_SUCCESS && can) {
            access[accesses++] =
                (CUmemAccessDesc){{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        }
    }
    result = result == CUDA_SUCCESS ? gpu->cu.cuMemAddressReserve(out, bytes, 0, 0, 0) : result;
    if (result != CUDA_SUCCESS) {
        return result;
    }
    result = gpu->cu.cuMemMap(*out, bytes, 0, handle, 0);
    if (result == CUDA_SUCCESS) {
        result = gpu->cu.cuMemSetAccess(*out, bytes, access, accesses);
        if (result != CUDA_SUCCESS && accesses > 1) { /* a peer that says it can and cannot: without them */
            result = gpu->cu.cuMemSetAccess(*out, bytes, access, 1);
        }
        if (result != CUDA_SUCCESS) {
            gpu->cu.cuMemUnmap(*out, bytes);
        }
    }
    if (result != CUDA_SUCCESS) {
        gpu->cu.cuMemAddressFree(*out, bytes);
        *out = 0; /* another thread may have it next */
    }
    return result;
}

/* Nothing that uses it may be under way: cuMemUnmap waits for no kernel. */
static void cuda_unmap(cuda_gpu *gpu, CUdeviceptr base, size_t bytes) {
    gpu->cu.cuMemUnmap(base, bytes);
    gpu->cu.cuMemAddressFree(base, bytes);
}

static void cuda_block_free(cuda_gpu *gpu, cuda_block *b) {
    while (b->parts != NULL) {
        cuda_part *p = b->parts;
        b->parts = p->next;
        gpu->host->free(gpu->host, p);
    }
    if (b->base != 0 && b->vmm) {
        cuda_unmap(gpu, b->base, b->bytes);
        gpu->cu.cuMemRelease(b->handle);
    } else if (b->base != 0) {
        gpu->cu.cuMemFree(b->base);
    }
    gpu->host->free(gpu->host, b);
}

/* The memory of a block; b->bytes are rounded up. */
static CUresult cuda_block_memory(cuda_gpu *gpu, cuda_block *b) {
    CUmemAllocationProp properties;
    size_t unit = 0;
    if (!gpu->vmm) {
        return gpu->cu.cuMemAlloc(&b->base, b->bytes);
    }
    cuda_block_properties(gpu, &properties);
    CUresult result = gpu->cu.cuMemGetAllocationGranularity(&unit, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    if (result != CUDA_SUCCESS || unit == 0) {
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_UNKNOWN;
    }
    b->bytes = (b->bytes + unit - 1) / unit * unit;
    result = gpu->cu.cuMemCreate(&b->handle, b->bytes, &properties, 0);
    if (result == CUDA_ERROR_NOT_PERMITTED || result == CUDA_ERROR_NOT_SUPPORTED) {
        cuda_log(gpu->host, DDL_LOG_INFO,
                 "GPU %d (%s): memory cannot be exported as descriptors here (%s), cuMemAlloc "
                 "is used instead",
                 gpu->ordinal, gpu->name, cuda_error_name(&gpu->cu, result));
        gpu->vmm = false;
        return gpu->cu.cuMemAlloc(&b->base, b->bytes);
    }
    if (result != CUDA_SUCCESS) {
        return result;
    }
    result = cuda_map(gpu, b->handle, b->bytes, true, &b->base);
    b->vmm = result == CUDA_SUCCESS;
    if (result != CUDA_SUCCESS) {
        b->base = 0;
        gpu->cu.cuMemRelease(b->handle);
    }
    return result;
}

static ddl_status cuda_block_make(cuda_gpu *gpu, size_t bytes, bool small, cuda_block **out) {
    cuda_block *b = gpu->host->alloc(gpu->host, sizeof *b);
    cuda_part *p = gpu->host->alloc(gpu->host, sizeof *p);
    if (b == NULL || p == NULL) {
        gpu->host->free(gpu->host, b);
        gpu->host->free(gpu->host, p);
        return DDL_ERR_NOMEM;
    }
    *b = (cuda_block){.bytes = bytes, .small = small, .parts = p};
    *p = (cuda_part){NULL, 0, bytes, false};
    ddl_status status = cuda_check(gpu, cuda_block_memory(gpu, b), "allocating %zu bytes", bytes);
    if (status != DDL_OK) {
        cuda_block_free(gpu, b);
        return status;
    }
    p->bytes = b->bytes;
    b->serial = ++gpu->pool->made;
    b->next = gpu->pool->blocks;
    gpu->pool->blocks = b;
    gpu->pool->kept += b->bytes;
    *out = b;
    return DDL_OK;
}

/* Gives unused blocks back until at most `keep` bytes of them are left. */
static void cuda_pool_trim(cuda_gpu *gpu, size_t keep) {
    for (cuda_block **at = &gpu->pool->blocks; *at != NULL && gpu->pool->kept > keep;) {
        cuda_block *b = *at;
        if (b->used == 0) {
            *at = b->next;
            gpu->pool->kept -= b->bytes;
            cuda_block_free(gpu, b);
        } else {
            at = &b->next;
        }
    }
}

/* The first free part of that many bytes, or NULL. Large tensors take no block that is much larger than they. */
static cuda_part *cuda_pool_look(cuda_gpu *gpu, size_t bytes, bool small, cuda_block **out_block) {
    for (cuda_block *b = gpu->pool->blocks; b != NULL; b = b->next) {
        bool fits = b->small == small && (small || (b->used == 0 && b->bytes / 2 <= bytes));
        for (cuda_part *p = fits ? b->parts : NULL; p != NULL; p = p->next) {
            if (!p->used && p->bytes >= bytes) {
                *out_block = b;
                return p;
            }
        }
    }
    return NULL;
}

static ddl_status cuda_pool_alloc(cuda_gpu *gpu, size_t bytes, CUdeviceptr *out) {
    bytes = bytes == 0 ? CUDA_POOL_ALIGN : (bytes + CUDA_POOL_ALIGN - 1) / CUDA_POOL_ALIGN * CUDA_POOL_ALIGN;
    bool small = bytes <= CUDA_POOL_SMALL;
    cuda_block *b = NULL;
    cuda_part *p = cuda_pool_look(gpu, bytes, small, &b);
    if (p == NULL) {
        ddl_status status = cuda_block_make(gpu, small ? CUDA_POOL_SHARED : bytes, small, &b);
        if (status == DDL_ERR_NOMEM && gpu->pool->kept > 0) {
            cuda_pool_trim(gpu, 0);
            status = cuda_block_make(gpu, small ? CUDA_POOL_SHARED : bytes, small, &b);
        }
        if (status != DDL_OK) {
            return status;
        }
        p = b->parts;
    }
    cuda_part *rest = p->bytes > bytes && small ? gpu->host->alloc(gpu->host, sizeof *rest) : NULL;
    if (rest != NULL) { /* without memory for it the tensor has more than it asked for */
        *rest = (cuda_part){p->next, p->offset + bytes, p->bytes - bytes, false};
        p->next = rest;
        p->bytes = bytes;
    }
    gpu->pool->kept -= b->used == 0 ? b->bytes : 0;
    p->used = true;
    b->used += p->bytes;
    *out = b->base + p->offset;
    return DDL_OK;
}

/* The block around an address, or NULL. */
static cuda_block *cuda_pool_block(const cuda_gpu *gpu, CUdeviceptr address) {
    cuda_block *b = gpu->pool != NULL ? gpu->pool->blocks : NULL;
    while (b != NULL && (address < b->base || address >= b->base + b->bytes)) {
        b = b->next;
    }
    return b;
}

/* False: that is not the beginning of anything that was allocated here. */
static bool cuda_pool_free(cuda_gpu *gpu, CUdeviceptr address) {
    cuda_block *b = cuda_pool_block(gpu, address);
    cuda_part *before = NULL, *p = b != NULL ? b->parts : NULL;
    while (p != NULL && b->base + p->offset != address) {
        before = p;
        p = p->next;
    }
    if (p == NULL || !p->used) {
        return false;
    }
    p->used = false;
    b->used -= p->bytes;
    cuda_part *next = p->next;
    if (next != NULL && !next->used) {
        p->bytes += next->bytes;
        p->next = next->next;
        gpu->host->free(gpu->host, next);
    }
    if (before != NULL && !before->used) {
        before->bytes += p->bytes;
        before->next = p->next;
        gpu->host->free(gpu->host, p);
    }
    if (b->used == 0) {
        gpu->pool->kept += b->bytes;
        cuda_pool_trim(gpu, CUDA_POOL_KEEP);
    }
    return true;
}

static void cuda_pool_close(cuda_gpu *gpu) {
    while (gpu->pool != NULL && gpu->pool->blocks != NULL) {
        cuda_block *b = gpu->pool->blocks;
        gpu->pool->blocks = b->next;
        cuda_block_free(gpu, b);
    }
    gpu->host->free(gpu->host, gpu->pool);
    gpu->pool = NULL;
}

#endif /* CUDA_POOL_H */

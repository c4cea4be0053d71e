/* probe: does memory of another GPU arrive as it was written? Drivers say that two GPUs reach each other, and where an IOMMU
 * or ACS (access control of PCIe switches) stands between, what is read is garbage. So before the first mapping between two
 * GPUs a known pattern is read from the other's memory and written to it, by the same means as data. */
#ifndef CUDA_PROBE_H
#define CUDA_PROBE_H

#include "links.h"

#include "share.h"

#include <time.h>

enum { CUDA_PROBE_BYTES = 64 << 10, CUDA_PROBE_PART = 512 }; /* PART: what each local rank writes */
enum { CUDA_PROBE_ROOM = 2 * CUDA_PROBE_BYTES };             /* the pattern, and where its owner copies others' to */

#define CUDA_PROBE_PATIENCE_NS 5000000000ull /* for a peer to pass its memory */

/* One GPU's memory with the pattern, for others to read; its first bytes are theirs to write. */
typedef struct cuda_probe_memory {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr base;
    size_t bytes;
    int fd;
    bool tried;
} cuda_probe_memory;

/* What was found of two GPUs. */
typedef struct cuda_verdict {
    CUuuid other;
    int32_t ordinal; /* this rank's */
    bool good;
} cuda_verdict;

typedef struct cuda_probes {
    cuda_probe_memory memory[CUDA_GPUS_MAX];
    cuda_verdict verdicts[CUDA_GPUS_MAX * 4];
    int32_t verdict_count;
} cuda_probes;

static uint8_t cuda_probe_byte(size_t i, uint32_t seed) { return (uint8_t)((i * 2654435761u >> 11) + i + seed * 101); }

/* Host to GPU or back, and waits: some microseconds. The context is current. */
static CUresult cuda_probe_copy(cuda_gpu *gpu, CUdeviceptr dst, CUdeviceptr src, size_t bytes) {
    CUresult result = gpu->cu.cuMemcpyAsync(dst, src, bytes, gpu->stream);
    if (result == CUDA_SUCCESS) {
        result = gpu->cu.cuStreamSynchronize(gpu->stream);
        if (result != CUDA_SUCCESS) {
            gpu->cu.cuStreamSynchronize(gpu->stream); /* nothing may be under way when its memory goes */
        }
    }
    return result;
}

static CUresult cuda_probe_fill(cuda_gpu *gpu, cuda_probe_memory *m) {
    CUmemAllocationProp properties;
    cuda_block_properties(gpu, &properties);
    CUresult result =
        gpu->cu.cuMemGetAllocationGranularity(&m->bytes, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    m->bytes = m->bytes < CUDA_PROBE_ROOM ? CUDA_PROBE_ROOM : m->bytes;
    result = result == CUDA_SUCCESS ? gpu->cu.cuMemCreate(&m->handle, m->bytes, &properties, 0) : result;
    if (result != CUDA_SUCCESS) {
        return result;
    }
    result = cuda_map(gpu, m->handle, m->bytes, true, &m->base);
    uint8_t *pattern = result == CUDA_SUCCESS ? gpu->host->alloc(gpu->host, CUDA_PROBE_BYTES) : NULL;
    for (size_t i = 0; pattern != NULL && i < CUDA_PROBE_BYTES; i++) {
        pattern[i] = cuda_probe_byte(i, 0);
    }
    if (pattern != NULL) {
        result = cuda_probe_copy(gpu, m->base, (CUdeviceptr)(uintptr_t)pattern, CUDA_PROBE_BYTES);
    }
    gpu->host->free(gpu->host, pattern);
    int fd = -1;
    result = result == CUDA_SUCCESS ? cuda_export_fd(gpu, m->handle, &fd) : result;
    if (result != CUDA_SUCCESS || pattern == NULL) {
        if (m->base != 0) {
            cuda_unmap(gpu, m->base, m->bytes);
        }
        gpu->cu.cuMemRelease(m->handle);
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_OUT_OF_MEMORY;
    }
    m->fd = fd;
    return CUDA_SUCCESS;
}

/* The memory of this rank's GPU with that number, made when the first one asks. NULL: it cannot be made. */
static cuda_probe_memory *cuda_probe_memory_of(cuda_ipc *t, int32_t ordinal) {
    cuda_gpu *gpu = NULL;
    cuda_guard guard;
    if (cuda_ipc_gpu(t, ordinal, &gpu) != DDL_OK) {
        return NULL;
    }
    cuda_probe_memory *m = &t->probes->memory[ordinal];
    if (!m->tried && gpu->vmm && cuda_enter(gpu, &guard) == DDL_OK) {
        m->fd = -1;
        cuda_check(gpu, cuda_probe_fill(gpu, m), "making memory that other GPUs read for a test");
        cuda_leave(&guard);
    }
    m->tried = true;
    return gpu->vmm && m->fd >= 0 ? m : NULL;
}

static int cuda_probe_fd(cuda_ipc *t, int32_t ordinal) {
    const cuda_probe_memory *m = ordinal >= 0 ? cuda_probe_memory_of(t, ordinal) : NULL;
    return m != NULL ? m->fd : -1;
}

/* Reads the pattern by way of memory of this GPU, as a collective would, then writes and reads back. The context is
 * current. *out_good says whether all bytes were right. Nothing is allocated for it: cuMemFree may wait for all that is on the
 * GPU, and so for a gate. */
static CUresult cuda_probe_look(cuda_ipc *t, cuda_gpu *gpu, CUdeviceptr there, bool *out_good) {
    uint8_t *got = t->host->alloc(t->host, CUDA_PROBE_BYTES), part[CUDA_PROBE_PART];
    const cuda_probe_memory *own = cuda_probe_memory_of(t, gpu->ordinal);
    CUdeviceptr here = own != NULL ? own->base + CUDA_PROBE_BYTES : 0;
    CUdeviceptr mine = there + (CUdeviceptr)t->local_index * CUDA_PROBE_PART;
    size_t shared = (size_t)CUDA_LOCAL_MAX * CUDA_PROBE_PART, wrong = 0;
    CUresult result = got != NULL && own != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS) {
        result = cuda_probe_copy(gpu, here, there, CUDA_PROBE_BYTES);
        result =
            result == CUDA_SUCCESS ? cuda_probe_copy(gpu, (CUdeviceptr)(uintptr_t)got, here, CUDA_PROBE_BYTES) : result;
        for (size_t i = shared; result == CUDA_SUCCESS && i < CUDA_PROBE_BYTES; i++) {
            wrong += got[i] != cuda_probe_byte(i, 0);
        }
        for (size_t i = 0; i < sizeof part; i++) {
            part[i] = cuda_probe_byte(i, (uint32_t)t->rank + 1);
        }
        CUdeviceptr from = (CUdeviceptr)(uintptr_t)part;
        result = result == CUDA_SUCCESS ? cuda_probe_copy(gpu, here, from, sizeof part) : result;
        result = result == CUDA_SUCCESS ? cuda_probe_copy(gpu, mine, here, sizeof part) : result;
        result = result == CUDA_SUCCESS ? cuda_probe_copy(gpu, here + sizeof part, mine, sizeof part) : result;
        result = result == CUDA_SUCCESS
                     ? cuda_probe_copy(gpu, (CUdeviceptr)(uintptr_t)got, here + sizeof part, sizeof part)
                     : result;
        wrong += result == CUDA_SUCCESS && memcmp(got, part, sizeof part) != 0;
    }
    t->host->free(t->host, got);
    *out_good = result == CUDA_SUCCESS && wrong == 0;
    return result;
}

/* Where this GPU finds the other's pattern: *out_bytes 0: that is a pointer of this process. */
static ddl_status cuda_probe_reach(cuda_ipc *t, int32_t peer, int32_t ordinal, cuda_gpu *gpu, CUdeviceptr *out,
                                   size_t *out_bytes) {
    CUmemGenericAllocationHandle memory = 0;
    CUmemAllocationProp properties;
    int fd = -1;
    *out_bytes = 0;
    if (t->peers[peer].same_process) {
        cuda_probe_memory *m = cuda_probe_memory_of(t, ordinal);
        *out = m != NULL ? m->base : 0;
        return m != NULL ? cuda_peer_access(t, gpu, ordinal) : DDL_ERR_UNSUPPORTED;
    }
    ddl_status status = cuda_want(t, peer, (uint64_t)ordinal + 1, &fd);
    if (status != DDL_OK) {
        return status;
    }
    size_t bytes = 0;
    cuda_block_properties(gpu, &properties);
    CUresult result = gpu->cu.cuMemGetAllocationGranularity(&bytes, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    bytes = bytes < CUDA_PROBE_ROOM ? CUDA_PROBE_ROOM : bytes;
    result = result == CUDA_SUCCESS ? gpu->cu.cuMemImportFromShareableHandle(&memory, (void *)(intptr_t)fd,
                                                                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
                                    : result;
    close(fd);
    if (result == CUDA_SUCCESS) {
        result = cuda_map(gpu, memory, bytes, false, out);
        gpu->cu.cuMemRelease(memory);
    }
    *out_bytes = bytes;
    return cuda_check(gpu, result, "mapping memory of rank %d's GPU %d for a test", peer, ordinal);
}

static ddl_status cuda_verdict_keep(cuda_ipc *t, int32_t peer, int32_t ordinal, const cuda_gpu *gpu, bool good) {
    cuda_probes *all = t->probes;
    if (all->verdict_count < (int32_t)(sizeof all->verdicts / sizeof all->verdicts[0])) {
        all->verdicts[all->verdict_count++] = (cuda_verdict){t->peers[peer].board->gpus[ordinal], gpu->ordinal, good};
    }
    return good ? DDL_OK : DDL_ERR_UNSUPPORTED;
}

/* Does the driver say that they reach each other? Of a GPU that this process does not see it says nothing: then yes. */
static bool cuda_probe_may(const cuda_ipc *t, const CUuuid *other, const cuda_gpu *gpu) {
    int can = 1;
    for (int32_t i = 0; i < t->gpu_count; i++) {
        CUdevice device;
        if (memcmp(&t->uuids[i], other, sizeof *other) == 0 && gpu->cu.cuDeviceGet(&device, i) == CUDA_SUCCESS &&
            gpu->cu.cuDeviceCanAccessPeer(&can, gpu->device, device) != CUDA_SUCCESS) {
            can = 1; /* data will tell */
        }
    }
    return can != 0;
}

/* Sends data through it. Only what the data says is a verdict: other failures may pass. */
static ddl_status cuda_probe_data(cuda_ipc *t, int32_t peer, int32_t ordinal, cuda_gpu *gpu) {
    cuda_guard guard;
    CUdeviceptr there = 0;
    size_t bytes = 0;
    bool good = false;
    ddl_status status = cuda_enter(gpu, &guard);
    if (status != DDL_OK) {
        return status;
    }
    status = cuda_probe_reach(t, peer, ordinal, gpu, &there, &bytes);
    if (status == DDL_OK) {
        status = cuda_check(gpu, cuda_probe_look(t, gpu, there, &good),
                            "reading memory of GPU %d of rank %d for a test", ordinal, peer);
        if (bytes > 0) {
            cuda_unmap(gpu, there, bytes);
        }
    }
    cuda_leave(&guard);
    if (status == DDL_OK && !good) {
        cuda_log(
            t->host, DDL_LOG_WARN,
            "GPU %d (%s) and GPU %d of rank %d damage what goes between them, though the driver says that they reach "
            "each other: the host carries it. An IOMMU or ACS on a PCIe switch does that: turn it off (iommu=pt, "
            "setpci ACSCtl) or pass the GPUs into a virtual machine as NVIDIA describes",
            gpu->ordinal, gpu->name, ordinal, peer);
    }
    return status == DDL_OK ? cuda_verdict_keep(t, peer, ordinal, gpu, good) : status;
}

static ddl_status cuda_probe(cuda_ipc *t, int32_t peer, int32_t ordinal, cuda_gpu *gpu) {
    const CUuuid *other = &t->peers[peer].board->gpus[ordinal];
    if (memcmp(other, &gpu->uuid, sizeof *other) == 0) {
        return DDL_OK; /* one GPU */
    }
    for (int32_t i = 0; i < t->probes->verdict_count; i++) {
        const cuda_verdict *v = &t->probes->verdicts[i];
        if (v->ordinal == gpu->ordinal && memcmp(&v->other, other, sizeof *other) == 0) {
            return v->good ? DDL_OK : DDL_ERR_UNSUPPORTED;
        }
    }
    if (!cuda_probe_may(t, other, gpu)) {
        cuda_log(t->host, DDL_LOG_WARN, "GPU %d (%s) and GPU %d of rank %d do not reach each other, says the driver: the "
                 "host carries what goes between them", gpu->ordinal, gpu->name, ordinal, peer);
        return cuda_verdict_keep(t, peer, ordinal, gpu, false);
    }
    return gpu->vmm ? cuda_probe_data(t, peer, ordinal, gpu) : DDL_OK; /* an old system: nothing can be tried */
}

/* The GPU that a local rank uses mostly: that of its number, as is the custom. */
static int32_t cuda_probe_usual(int32_t index, int32_t gpu_count) { return gpu_count > 0 ? index % gpu_count : -1; }

/* The GPU that a local rank uses mostly, as its board names it. NULL: it has none. */
static const CUuuid *cuda_probe_uuid(const cuda_ipc *t, int32_t rank) {
    const cuda_peer *p = &t->peers[rank];
    int32_t usual = cuda_probe_usual(p->index, p->board->gpu_count);
    return usual >= 0 && usual < CUDA_GPUS_MAX ? &p->board->gpus[usual] : NULL;
}

/* The number of a GPU on the board of a rank; -1: its process does not see it. */
static int32_t cuda_probe_number(const cuda_ipc *t, int32_t rank, const CUuuid *gpu) {
    const cuda_board *board = t->peers[rank].board;
    for (int32_t i = 0; gpu != NULL && i < board->gpu_count && i < CUDA_GPUS_MAX; i++) {
        if (memcmp(&board->gpus[i], gpu, sizeof *gpu) == 0) {
            return i;
        }
    }
    return -1;
}

/* What the driver says of two GPUs, by their numbers here, in both directions. */
static bool cuda_probe_pair(const cuda_ipc *t, int32_t a, int32_t b) {
    CUdevice one, other;
    int there = 0, back = 0;
    return a == b || (t->cu.cuDeviceGet(&one, a) == CUDA_SUCCESS && t->cu.cuDeviceGet(&other, b) == CUDA_SUCCESS &&
                      t->cu.cuDeviceCanAccessPeer(&there, one, other) == CUDA_SUCCESS && there != 0 &&
                      t->cu.cuDeviceCanAccessPeer(&back, other, one) == CUDA_SUCCESS && back != 0);
}

/* Who reaches whom, says the driver. All ranks of a set come to one answer, as none goes around a ring unless all see
 * the GPUs of all; otherwise data will tell. */
static void cuda_links_find(const cuda_ipc *t, const int32_t *ranks, int32_t count, cuda_links *out) {
    uint32_t reach[CUDA_PLACES] = {0};
    bool seen = true, all = true;
    memset(out, 0, sizeof *out);
    for (int32_t i = 0; i < count; i++) {
        const CUuuid *one = cuda_probe_uuid(t, ranks[i]);
        for (int32_t j = 0; j < count; j++) {
            const CUuuid *other = cuda_probe_uuid(t, ranks[j]);
            seen = seen && cuda_probe_number(t, ranks[i], other) >= 0;
            out->apart = out->apart || one == NULL || other == NULL || memcmp(one, other, sizeof *one) != 0;
            if (cuda_probe_pair(t, cuda_probe_number(t, t->rank, one), cuda_probe_number(t, t->rank, other))) {
                reach[i] |= 1u << j;
            } else {
                all = false;
            }
        }
    }
    out->is_ring = seen && !all && cuda_ring_find(reach, count, out);
}

/* Asks until the peer has answered, and answers meanwhile: it does the same. */
static ddl_status cuda_probe_await(cuda_ipc *t, int32_t peer, int32_t ordinal, cuda_gpu *gpu) {
    uint64_t until = t->host->now_ns(t->host) + CUDA_PROBE_PATIENCE_NS;
    struct timespec nap = {0, 100000};
    ddl_status status = cuda_probe(t, peer, ordinal, gpu);
    while (status == DDL_IN_PROGRESS && t->host->now_ns(t->host) < until) {
        cuda_share_progress(t);
        nanosleep(&nap, NULL);
        status = cuda_probe(t, peer, ordinal, gpu);
    }
    return status;
}

/* From this rank's usual GPU to those of the others, or of its neighbours in the ring; on each rank of the set, so that
 * all pairs that are used are tried. To try more would make a context on GPUs that nobody uses. */
static ddl_status cuda_probe_set(cuda_ipc *t, const int32_t *ranks, int32_t count, int32_t rank, cuda_links *out) {
    cuda_gpu *gpu = NULL;
    ddl_status status = cuda_ipc_gpu(t, cuda_probe_usual(t->local_index, t->gpu_count), &gpu);
    cuda_links_find(t, ranks, count, out);
    for (int32_t j = 0; j < count && status == DDL_OK; j++) {
        const cuda_peer *p = &t->peers[ranks[j]];
        int32_t ordinal = cuda_probe_usual(p->index, p->board->gpu_count);
        bool other = ranks[j] != t->rank && ordinal >= 0 && ordinal < CUDA_GPUS_MAX;
        if (other && out->is_ring) {
            other = j == cuda_ring_neighbour(out, count, rank, -1) || j == cuda_ring_neighbour(out, count, rank, 1);
        }
        status = other ? cuda_probe_await(t, ranks[j], ordinal, gpu) : DDL_OK;
    }
    if (status == DDL_OK && out->is_ring) {
        cuda_log(t->host, DDL_LOG_INFO, "the GPUs of %d ranks do not all reach each other: collectives go around a ring",
                 (int)count);
    }
    return status;
}

static ddl_status cuda_probes_open(cuda_ipc *t) {
    t->probes = t->host->alloc(t->host, sizeof *t->probes);
    if (t->probes != NULL) {
        memset(t->probes, 0, sizeof *t->probes);
    }
    return t->probes != NULL ? DDL_OK : DDL_ERR_NOMEM;
}

static void cuda_probes_close(cuda_ipc *t) {
    for (int32_t i = 0; t->probes != NULL && i < t->gpu_count; i++) {
        cuda_probe_memory *m = &t->probes->memory[i];
        cuda_guard guard;
        if (m->tried && t->gpus[i] != NULL && m->base != 0 && m->fd >= 0) {
            bool inside = cuda_enter(t->gpus[i], &guard) == DDL_OK;
            cuda_unmap(t->gpus[i], m->base, m->bytes);
            t->gpus[i]->cu.cuMemRelease(m->handle);
            close(m->fd);
            if (inside) {
                cuda_leave(&guard);
            }
        }
    }
    t->host->free(t->host, t->probes);
    t->probes = NULL;
}

#endif /* CUDA_PROBE_H */

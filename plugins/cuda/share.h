/* share: GPU memory of one rank in the address space of another.
 *
 * A rank that wants others to reach an allocation puts it on its board (cuda_share), once for each allocation; what it
 * tells others, in words of a set or in a key, is a cuda_place: which allocation, and how far into it. The other maps the
 * allocation once (cuda_reach) and keeps the mapping, under the allocation's number, which is never given twice: an address
 * that was freed and allocated again is another allocation, and known to be one, because
 *     memory of cuMemCreate (alloc's is) is held here by its handle, and its address is asked for its handle each time,
 *     memory of cuMemAlloc has a CU_POINTER_ATTRIBUTE_BUFFER_ID, which the driver never gives twice.
 * Memory of cuMemCreate goes as a descriptor, on request (`wants` on the board): so only those have it that use it. Memory
 * of cuMemAlloc goes as a handle of 64 bytes on the board itself. Ranks that are threads of one process use pointers.
 *
 * What a rank frees leaves its board within a second, at the next look (cuda_share_progress), and then the mappings of its
 * peers; until then its memory is not free for others. */
#ifndef CUDA_SHARE_H
#define CUDA_SHARE_H

#include "board.h"

#include "pool.h"

#define CUDA_LOOK_NS 1000000000u /* between looks for what was freed */
#define CUDA_FIRST_ID 64u        /* smaller ones ask for probes: probe.h */

/* Three words, to be passed on as they are. */
typedef struct cuda_place {
    uint64_t id, slot; /* the allocation, and its place on the owner's board */
    uint64_t offset;   /* bytes into it */
} cuda_place;

/* An allocation of a peer, mapped for one GPU. */
typedef struct cuda_import {
    struct cuda_import *next;
    int32_t peer, ordinal; /* whose, and mapped for which GPU of this rank */
    uint64_t id, slot, bytes;
    uint32_t kind; /* CUDA_BY_POINTER, _FD, _HANDLE */
    int32_t uses;  /* cuda_reach without cuda_let_go */
    bool stale;    /* to be closed when nobody uses it */
    CUdeviceptr base;
} cuda_import;

/* What this rank keeps of an allocation on its board; beside the slot of the same number. */
typedef struct cuda_shared {
    uint64_t id; /* 0: none */
    CUdeviceptr base;
    uint64_t bytes, buffer_id;
    CUmemGenericAllocationHandle handle; /* CUDA_BY_FD: held, so that it is not given to other memory meanwhile */
    int fd;                              /* likewise; -1: none */
    int32_t ordinal;
    uint32_t kind;
} cuda_shared;

typedef struct cuda_shares {
    cuda_shared own[CUDA_EXPORTS];
    cuda_import *imports; /* the last used first */
    uint64_t looked_ns;
    bool told; /* why something could not be shared; once is enough */
} cuda_shares;

static void cuda_share_told(cuda_ipc *t, const char *why) {
    if (!t->shares->told) {
        cuda_log(t->host, DDL_LOG_WARN, "GPU memory goes through the host: %s", why);
        t->shares->told = true;
    }
}

/* ---- this rank's memory ---- */

/* Is what lies at that address still the allocation that was shared? The context is current. */
static bool cuda_shared_is_current(cuda_ipc *t, const cuda_shared *s) {
    cuda_gpu *gpu = t->gpus[s->ordinal];
    if (s->kind == CUDA_BY_FD) {
        CUmemGenericAllocationHandle handle = 0;
        bool is = gpu->cu.cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)s->base) == CUDA_SUCCESS;
        if (is) {
            gpu->cu.cuMemRelease(handle);
        }
        return is && handle == s->handle;
    }
    uint64_t id = 0;
    return gpu->cu.cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, s->base) == CUDA_SUCCESS &&
           id == s->buffer_id;
}

static void cuda_shared_retire(cuda_ipc *t, int32_t slot) {
    cuda_shared *s = &t->shares->own[slot];
    atomic_store_explicit(&t->board->exports[slot].id, 0, memory_order_release); /* before its memory goes */
    if (s->fd >= 0) {
        close(s->fd);
    }
    if (s->kind == CUDA_BY_FD) {
        t->gpus[s->ordinal]->cu.cuMemRelease(s->handle);
    }
    *s = (cuda_shared){.fd = -1};
}

/* Fills in how others reach s->base; the context is current. */
static ddl_status cuda_shared_export(cuda_ipc *t, cuda_gpu *gpu, cuda_shared *s, CUipcMemHandle *out) {
    if (!t->processes) {
        s->kind = CUDA_BY_POINTER;
        return DDL_OK;
    }
    if (gpu->cu.cuMemRetainAllocationHandle(&s->handle, (void *)(uintptr_t)s->base) == CUDA_SUCCESS) {
        CUresult result = cuda_export_fd(gpu, s->handle, &s->fd);
        if (result != CUDA_SUCCESS) {
            gpu->cu.cuMemRelease(s->handle);
            s->fd = -1;
            cuda_share_told(t,
                            "memory of cuMemCreate was not made for export (CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR; "
                            "PyTorch makes such with expandable_segments), or descriptors have run out");
            return DDL_ERR_UNSUPPORTED;
        }
        s->kind = CUDA_BY_FD;
        return DDL_OK;
    }
    CUresult result = gpu->cu.cuIpcGetMemHandle(out, s->base);
    if (result != CUDA_SUCCESS) {
        cuda_share_told(t, "CUDA IPC is refused for memory of cudaMalloc (in containers start them with --ipc=host "
                           "--pid=host; pools of cudaMallocAsync have none); ddl_tensor_alloc_on gives memory that needs "
                           "no CUDA IPC");
        return DDL_ERR_UNSUPPORTED;
    }
    s->kind = CUDA_BY_HANDLE;
    return DDL_OK;
}

/* Onto the board, the number last. */
static void cuda_shared_publish(cuda_ipc *t, int32_t slot, const CUipcMemHandle *handle) {
    const cuda_shared *s = &t->shares->own[slot];
    cuda_export *e = &t->board->exports[slot];
    uint64_t words[8];
    memcpy(words, handle, sizeof words);
    atomic_store_explicit(&e->base, s->base, memory_order_relaxed); /* all relaxed: the number releases them */
    atomic_store_explicit(&e->bytes, s->bytes, memory_order_relaxed);
    atomic_store_explicit(&e->kind, s->kind, memory_order_relaxed);
    atomic_store_explicit(&e->ordinal, (uint32_t)s->ordinal, memory_order_relaxed);
    for (int32_t i = 0; i < 8; i++) {
        atomic_store_explicit(&e->handle[i], words[i], memory_order_relaxed);
    }
    atomic_store_explicit(&e->id, s->id, memory_order_release);
}

/* A slot without an allocation, or with one that was freed; -1: all are in use. */
static int32_t cuda_shared_slot(cuda_ipc *t) {
    for (int32_t i = 0; i < CUDA_EXPORTS; i++) {
        if (t->shares->own[i].id == 0) {
            return i;
        }
    }
    for (int32_t i = 0; i < CUDA_EXPORTS; i++) {
        if (!cuda_shared_is_current(t, &t->shares->own[i])) {
            cuda_shared_retire(t, i);
            return i;
        }
    }
    return -1;
}

/* The slot of the allocation at base, shared now if it was not. The context is current. */
static ddl_status cuda_share_base(cuda_ipc *t, cuda_gpu *gpu, CUdeviceptr base, uint64_t bytes, int32_t *out_slot) {
    cuda_shared s = {.base = base, .bytes = bytes, .fd = -1, .ordinal = gpu->ordinal};
    CUipcMemHandle handle = {{0}};
    for (int32_t i = 0; i < CUDA_EXPORTS; i++) {
        const cuda_shared *o = &t->shares->own[i];
        if (o->id != 0 && o->base == base && o->bytes == bytes && cuda_shared_is_current(t, o)) {
            *out_slot = i;
            return DDL_OK;
        }
        if (o->id != 0 && o->base < base + bytes && base < o->base + o->bytes) {
            cuda_shared_retire(t, i); /* lay where this lies now */
        }
    }
    int32_t slot = cuda_shared_slot(t);
    if (slot < 0) {
        return DDL_ERR_NOMEM;
    }
    gpu->cu.cuPointerGetAttribute(&s.buffer_id, CU_POINTER_ATTRIBUTE_BUFFER_ID, base);
    ddl_status status = cuda_shared_export(t, gpu, &s, &handle);
    if (status == DDL_OK) {
        s.id = ++t->last_id;
        t->shares->own[slot] = s;
        cuda_shared_publish(t, slot, &handle);
        *out_slot = slot;
    }
    return status;
}

/* Puts the allocation around [memory, memory + bytes) on the board, if it is not there, and says where the bytes are.
 * DDL_ERR_UNSUPPORTED: it cannot be shared (it says why, once); go through other memory. */
static ddl_status cuda_share(cuda_ipc *t, const void *memory, uint64_t bytes, cuda_place *out) {
    cuda_guard guard;
    cuda_gpu *gpu = NULL;
    uint32_t type = 0, managed = 0;
    int32_t ordinal = -1, slot = -1;
    int attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
                        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
    void *values[] = {&type, &managed, &ordinal};
    CUdeviceptr at = (CUdeviceptr)(uintptr_t)memory, base = 0;
    size_t room = 0;
    CUresult result = t->cu.cuPointerGetAttributes(3, attributes, values, at);
    if (result == CUDA_SUCCESS && managed != 0) {
        cuda_share_told(t, "managed memory (cudaMallocManaged) cannot be shared between ranks, on no card; memory of "
                           "cudaMalloc and ddl_tensor_alloc_on can");
        return DDL_ERR_UNSUPPORTED;
    }
    if (result != CUDA_SUCCESS || type != CU_MEMORYTYPE_DEVICE) {
        return DDL_ERR_UNSUPPORTED;
    }
    ddl_status status = cuda_ipc_gpu(t, ordinal, &gpu);
    status = status == DDL_OK ? cuda_enter(gpu, &guard) : status;
    if (status != DDL_OK) {
        return status;
    }
    result = gpu->cu.cuMemGetAddressRange(&base, &room, at);
    if (result != CUDA_SUCCESS || at + bytes > base + room) {
        cuda_share_told(t, "a tensor lies in several allocations that were mapped side by side");
        status = DDL_ERR_UNSUPPORTED;
    }
    status = status == DDL_OK ? cuda_share_base(t, gpu, base, room, &slot) : status;
    cuda_leave(&guard);
    if (status == DDL_OK) {
        *out = (cuda_place){t->shares->own[slot].id, (uint64_t)slot, at - base};
    }
    return status;
}

/* ---- descriptors on request ---- */

/* A request is a number of this rank's (16 bits, so that the same allocation can be asked for again) and the allocation's. */
static uint64_t cuda_want_word(cuda_ipc *t, uint64_t id) { return ++t->requests << 48 | (id & 0xffffffffffffu); }

static uint64_t cuda_tag_of(uint64_t word) { return (uint64_t)CUDA_TAG_MEMORY << 32 ^ word; }

/* What has come for another caller than this one waits for it; one does, an older one goes. */
static void cuda_want_aside(cuda_peer *p, int fd) {
    if (p->aside_fd >= 0) {
        close(p->aside_fd);
    }
    p->aside_fd = fd;
    p->aside_id = p->want_id;
}

/* Asks a peer for a descriptor, one at a time. DDL_IN_PROGRESS until it has come; DDL_ERR_UNSUPPORTED: it has none. */
static ddl_status cuda_want(cuda_ipc *t, int32_t peer, uint64_t id, int *out_fd) {
    cuda_peer *p = &t->peers[peer];
    _Atomic uint64_t *asked = &t->board->wants[p->index];
    int fd = -1;
    if (p->aside_fd >= 0 && p->aside_id == id) {
        *out_fd = p->aside_fd;
        p->aside_fd = -1;
        return DDL_OK;
    }
    ddl_status status = p->want != 0 ? t->host->take_fd(t->host, peer, cuda_tag_of(p->want), &fd) : DDL_OK;
    if (status == DDL_IN_PROGRESS) {
        return status;
    }
    bool mine = p->want != 0 && p->want_id == id;
    if (!mine) {
        cuda_want_aside(p, fd);
    }
    p->want = mine ? 0 : cuda_want_word(t, id);
    p->want_id = id;
    atomic_store_explicit(asked, p->want, memory_order_release); /* own */
    cuda_ring(t, peer);
    *out_fd = fd;
    return !mine ? DDL_IN_PROGRESS : status != DDL_OK ? status : fd >= 0 ? DDL_OK : DDL_ERR_UNSUPPORTED;
}

static int cuda_probe_fd(cuda_ipc *t, int32_t ordinal); /* probe.h; -1: none can be made */

/* Gives peers what they want. */
static int32_t cuda_wants_answer(cuda_ipc *t) {
    int32_t done = 0;
    for (int32_t i = 0; i < t->local_count; i++) {
        cuda_peer *p = &t->peers[t->local[i]];
        if (p->board == NULL || p->same_process || p->dead) {
            continue;
        }
        uint64_t word =
            atomic_load_explicit(&((cuda_board *)(uintptr_t)p->board)->wants[t->local_index], memory_order_acquire);
        uint64_t id = word & 0xffffffffffffu;
        if (word == 0 || word == p->answered) {
            continue;
        }
        int fd = id < CUDA_FIRST_ID ? cuda_probe_fd(t, (int32_t)id - 1) : -1;
        for (int32_t k = 0; k < CUDA_EXPORTS && id >= CUDA_FIRST_ID; k++) {
            fd = t->shares->own[k].id == id ? t->shares->own[k].fd : fd;
        }
        ddl_status status = t->host->send_fd(t->host, t->local[i], cuda_tag_of(word), fd);
        if (status != DDL_ERR_NOMEM) { /* tried again */
            p->answered = word;
            done++;
        }
    }
    return done;
}

/* ---- peers' memory ---- */

/* Whether memory of a peer's GPU arrives as it was sent, from this GPU's side. Found out once. probe.h */
static ddl_status cuda_probe(cuda_ipc *t, int32_t peer, int32_t ordinal, cuda_gpu *gpu);

/* What a peer's board says of a place: checked, as somebody else wrote it. */
static bool cuda_export_read(const cuda_peer *p, const cuda_place *place, uint64_t bytes, cuda_shared *out,
                             CUipcMemHandle *out_handle) {
    if (p->board == NULL || place->slot >= CUDA_EXPORTS || place->id < CUDA_FIRST_ID) {
        return false;
    }
    cuda_export *e = &((cuda_board *)(uintptr_t)p->board)->exports[place->slot];
    uint64_t id = atomic_load_explicit(&e->id, memory_order_acquire), words[8];
    *out = (cuda_shared){.id = id, .fd = -1};
    out->base = atomic_load_explicit(&e->base, memory_order_relaxed); /* all relaxed: checked by the number below */
    out->bytes = atomic_load_explicit(&e->bytes, memory_order_relaxed);
    out->kind = atomic_load_explicit(&e->kind, memory_order_relaxed);
    out->ordinal = (int32_t)atomic_load_explicit(&e->ordinal, memory_order_relaxed);
    for (int32_t i = 0; i < 8; i++) {
        words[i] = atomic_load_explicit(&e->handle[i], memory_order_relaxed);
    }
    memcpy(out_handle, words, sizeof *out_handle);
    atomic_thread_fence(memory_order_acquire);
    return id == place->id && atomic_load_explicit(&e->id, memory_order_relaxed) == id && out->ordinal >= 0 &&
           out->ordinal < CUDA_GPUS_MAX && place->offset <= out->bytes && bytes <= out->bytes - place->offset;
}

/* Between GPUs of one process. */
static ddl_status cuda_peer_access(cuda_ipc *t, cuda_gpu *gpu, int32_t ordinal) {
    cuda_gpu *other = NULL;
    ddl_status status = ordinal == gpu->ordinal ? DDL_OK : cuda_ipc_gpu(t, ordinal, &other);
    if (other == NULL || status != DDL_OK) {
        return status;
    }
    status = cuda_context_need(other);
    if (status == DDL_OK) {
        CUresult result = gpu->cu.cuCtxEnablePeerAccess(atomic_load(&other->context), 0);
        status = result == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
                     ? DDL_OK
                     : cuda_check(gpu, result, "reaching the memory of GPU %d", ordinal);
    }
    return status;
}

static int32_t cuda_imports_close(cuda_ipc *t);

/* By CUDA IPC. What a peer freed and allocated again at the same address cannot be opened while the old one is (208). */
static CUresult cuda_import_open(cuda_ipc *t, int32_t peer, CUipcMemHandle handle, cuda_gpu *gpu, CUdeviceptr *out) {
    CUresult result = gpu->cu.cuIpcOpenMemHandle(out, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    if (result == CUDA_ERROR_ALREADY_MAPPED) {
        for (cuda_import *i = t->shares->imports; i != NULL; i = i->next) {
            i->stale = i->stale || (i->peer == peer && i->uses == 0);
        }
        cuda_imports_close(t);
        result = gpu->cu.cuIpcOpenMemHandle(out, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    }
    return result;
}

/* Maps it; the context is current. */
static ddl_status cuda_import_map(cuda_ipc *t, int32_t peer, const cuda_shared *s, CUipcMemHandle handle, cuda_gpu *gpu,
                                  CUdeviceptr *out) {
    if (s->kind == CUDA_BY_POINTER || t->peers[peer].same_process) {
        *out = s->base;
        return t->peers[peer].same_process ? cuda_peer_access(t, gpu, s->ordinal) : DDL_ERR_CORRUPT;
    }
    if (s->kind == CUDA_BY_HANDLE) {
        return cuda_check(gpu, cuda_import_open(t, peer, handle, gpu, out),
                          "opening memory of rank %d by CUDA IPC (containers of one job need --ipc=host and "
                          "--pid=host, or memory of ddl_tensor_alloc)",
                          peer);
    }
    int fd = -1;
    CUmemGenericAllocationHandle memory = 0;
    ddl_status status = s->kind == CUDA_BY_FD ? cuda_want(t, peer, s->id, &fd) : DDL_ERR_CORRUPT;
    if (status != DDL_OK) {
        return status;
    }
    CUresult result =
        gpu->cu.cuMemImportFromShareableHandle(&memory, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    close(fd);
    if (result == CUDA_SUCCESS) {
        result = cuda_map(gpu, memory, s->bytes, false, out);
        gpu->cu.cuMemRelease(memory); /* the mapping holds it */
    }
    return cuda_check(gpu, result, "mapping %llu bytes of rank %d", (unsigned long long)s->bytes, peer);
}

static void cuda_import_close(cuda_ipc *t, cuda_import *import) {
    cuda_guard guard;
    cuda_gpu *gpu = t->gpus[import->ordinal];
    if (import->kind != CUDA_BY_POINTER && cuda_enter(gpu, &guard) == DDL_OK) {
        if (import->kind == CUDA_BY_FD) {
            cuda_unmap(gpu, import->base, import->bytes);
        } else {
            gpu->cu.cuIpcCloseMemHandle(import->base);
        }
        cuda_leave(&guard);
    }
    t->host->free(t->host, import);
}

/* One that is mapped already. Lists are short: a few allocations of each peer; what is used comes first. */
static cuda_import *cuda_import_find(cuda_ipc *t, int32_t peer, const cuda_place *place, int32_t ordinal) {
    for (cuda_import **at = &t->shares->imports; *at != NULL; at = &(*at)->next) {
        cuda_import *i = *at;
        if (i->id == place->id && i->peer == peer && i->ordinal == ordinal && !i->stale) {
            *at = i->next;
            i->next = t->shares->imports;
            t->shares->imports = i;
            return i;
        }
    }
    return NULL;
}

static ddl_status cuda_import_make(cuda_ipc *t, int32_t peer, const cuda_place *place, uint64_t bytes, cuda_gpu *gpu,
                                   cuda_import **out) {
    cuda_guard guard;
    cuda_shared s;
    CUipcMemHandle handle;
    const cuda_peer *p = &t->peers[peer];
    if (!cuda_export_read(p, place, bytes, &s, &handle)) {
        return DDL_ERR_STATE; /* freed meanwhile, or nonsense */
    }
    ddl_status status = cuda_probe(t, peer, s.ordinal, gpu);
    if (status != DDL_OK) {
        return status;
    }
    cuda_import *i = t->host->alloc(t->host, sizeof *i);
    status = i == NULL ? DDL_ERR_NOMEM : cuda_enter(gpu, &guard);
    if (status == DDL_OK) {
        *i = (cuda_import){NULL,
                           peer,
                           gpu->ordinal,
                           s.id,
                           place->slot,
                           s.bytes,
                           p->same_process ? CUDA_BY_POINTER : s.kind,
                           0,
                           false,
                           0};
        status = cuda_import_map(t, peer, &s, handle, gpu, &i->base);
        cuda_leave(&guard);
    }
    if (status != DDL_OK) {
        t->host->free(t->host, i);
        return status;
    }
    i->next = t->shares->imports; /* now: mapping may have closed some */
    t->shares->imports = i;
    *out = i;
    return DDL_OK;
}

/* Maps a place of a peer (this rank too) for a GPU of this rank: *out is where that GPU finds it. DDL_IN_PROGRESS: the peer
 * was asked for its descriptor; ask again. DDL_ERR_PEER: it is dead. DDL_ERR_STATE: it has freed that memory. Others: it
 * cannot be reached. Each DDL_OK is followed by one cuda_let_go, after the GPU is done with it. */
static ddl_status cuda_reach(cuda_ipc *t, int32_t peer, const cuda_place *place, uint64_t bytes, cuda_gpu *gpu,
                             cuda_import **out_import, CUdeviceptr *out) {
    if (t->peers[peer].dead) {
        return DDL_ERR_PEER;
    }
    cuda_import *i = cuda_import_find(t, peer, place, gpu->ordinal);
    ddl_status status = i != NULL ? DDL_OK : cuda_import_make(t, peer, place, bytes, gpu, &i);
    if (status == DDL_OK && (place->offset > i->bytes || bytes > i->bytes - place->offset)) {
        status = DDL_ERR_CORRUPT;
    }
    if (status == DDL_OK) {
        i->uses++;
        *out_import = i;
        *out = i->base + place->offset;
    }
    return status;
}

/* Closes imports that are stale and not in use. */
static int32_t cuda_imports_close(cuda_ipc *t) {
    int32_t closed = 0;
    for (cuda_import **at = &t->shares->imports; *at != NULL;) {
        cuda_import *i = *at;
        if (i->stale && i->uses == 0) {
            *at = i->next;
            cuda_import_close(t, i);
            closed++;
        } else {
            at = &i->next;
        }
    }
    return closed;
}

static void cuda_let_go(cuda_ipc *t, cuda_import *import) {
    import->uses--;
    if (import->uses == 0 && import->stale) {
        cuda_imports_close(t);
    }
}

/* ---- life ---- */

static void cuda_look_for_freed(cuda_ipc *t) {
    for (int32_t i = 0; i < CUDA_EXPORTS; i++) {
        const cuda_shared *s = &t->shares->own[i];
        cuda_guard guard;
        if (s->id != 0 && cuda_enter(t->gpus[s->ordinal], &guard) == DDL_OK) {
            if (!cuda_shared_is_current(t, s)) {
                cuda_shared_retire(t, i);
            }
            cuda_leave(&guard);
        }
    }
    for (cuda_import *i = t->shares->imports; i != NULL; i = i->next) {
        cuda_export *e = &((cuda_board *)(uintptr_t)t->peers[i->peer].board)->exports[i->slot];
        i->stale = i->stale || atomic_load_explicit(&e->id, memory_order_relaxed) != i->id; /* at rest or gone */
    }
    cuda_imports_close(t);
}

/* Answers requests and, once a second, looks for what was freed; from progress. Returns how much was done. */
static int32_t cuda_share_progress(cuda_ipc *t) {
    int32_t done = cuda_wants_answer(t);
    uint64_t now = t->host->now_ns(t->host);
    if (now - t->shares->looked_ns >= CUDA_LOOK_NS) {
        t->shares->looked_ns = now;
        cuda_look_for_freed(t);
    }
    return done;
}

static void cuda_share_peer_dead(cuda_ipc *t, int32_t peer) {
    for (cuda_import *i = t->shares->imports; i != NULL; i = i->next) {
        i->stale = i->stale || i->peer == peer;
    }
    cuda_imports_close(t);
}

static ddl_status cuda_share_open(cuda_ipc *t) {
    t->shares = t->host->alloc(t->host, sizeof *t->shares);
    if (t->shares == NULL) {
        return DDL_ERR_NOMEM;
    }
    memset(t->shares, 0, sizeof *t->shares);
    for (int32_t i = 0; i < CUDA_EXPORTS; i++) {
        t->shares->own[i].fd = -1;
    }
    t->last_id = CUDA_FIRST_ID;
    return DDL_OK;
}

static void cuda_share_close(cuda_ipc *t) {
    for (int32_t i = 0; t->shares != NULL && i < CUDA_EXPORTS; i++) {
        if (t->shares->own[i].id != 0) {
            cuda_shared_retire(t, i);
        }
    }
    while (t->shares != NULL && t->shares->imports != NULL) {
        cuda_import *i = t->shares->imports;
        t->shares->imports = i->next;
        cuda_import_close(t, i);
    }
    t->host->free(t->host, t->shares);
    t->shares = NULL;
}

#endif /* CUDA_SHARE_H */

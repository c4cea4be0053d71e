/* share: GPU memory of one rank in the address space of another.
 *
 * A rank that wants others to reach an allocation puts it on its board (cuda_share), once for each allocation; what it
 * tells others, in words of a set or in a key, is a cuda_place: which allocation, and how far into it. The other maps the
 * allocation once (cuda_reach) and keeps the mapping, under the allocation's number, which is never given twice: an address
 * that was freed and allocated again is another allocation, and known to be one because
 *     memory of alloc (pool.h) and other memory of cuMemCreate is held here by a handle, and its address is asked for its
 *     handle again each time,
 *     memory of cuMemAlloc has a CU_POINTER_ATTRIBUTE_BUFFER_ID, which the driver never gives twice.
 * Memory of cuMemCreate goes as a descriptor, on request (`wants` on the board): so only those have it that use it, and none
 * keeps memory alive that it has forgotten. Memory of cuMemAlloc goes as a handle of 64 bytes on the board itself. Ranks
 * that are threads of one process use pointers. */
#ifndef CUDA_SHARE_H
#define CUDA_SHARE_H

#include "board.h"

/* Three words, to be passed on as they are. */
typedef struct cuda_place {
    uint64_t id, slot; /* the allocation, and its place on the owner's board */
    uint64_t offset;   /* bytes into it */
} cuda_place;

/* An allocation of a peer, mapped for one GPU. */
typedef struct cuda_import {
    struct cuda_import *next;
    int32_t peer, ordinal; /* whose, and mapped for which GPU of this rank */
    uint64_t id, bytes;
    uint32_t kind; /* 0: a pointer of this process */
    int32_t uses;  /* cuda_reach without cuda_let_go */
    bool stale;    /* to be closed when nobody uses it */
    CUdeviceptr base;
} cuda_import;

/* Puts the allocation around [memory, memory + bytes) on the board, if it is not there, and says where the bytes are.
 * DDL_ERR_UNSUPPORTED: it cannot be shared (it says why, once for each kind); go through other memory. */
static ddl_status cuda_share(cuda_ipc *t, const void *memory, uint64_t bytes, cuda_place *out);

/* Maps a place of a peer for a GPU of this rank: *out is where that GPU finds it. DDL_IN_PROGRESS: the peer was asked for
 * its descriptor; ask again. Each DDL_OK is followed by one cuda_let_go, after the GPU is done with it. */
static ddl_status cuda_reach(cuda_ipc *t, int32_t peer, const cuda_place *place, uint64_t bytes, cuda_gpu *gpu,
                             cuda_import **out_import, CUdeviceptr *out);
static void cuda_let_go(cuda_ipc *t, cuda_import *import);

/* Answers requests and closes what is stale; from progress. Returns how much was done. */
static int32_t cuda_share_progress(cuda_ipc *t);

#endif /* CUDA_SHARE_H */

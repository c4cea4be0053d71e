/* capture: a collective as nodes of a CUDA graph, which run again and again without the host. What hosts tell each other
 * about an operation that runs once (native.h), GPUs do here by words of their memory, with stream memory operations
 * (cuStreamWriteValue32 and cuStreamWaitValue32 of the driver's "Stream Memory Operations", which a capture takes as nodes):
 * no kernel waits for another rank. It must not know what the operation does.
 *
 * Each rank has a line of words for each of the two times at which all wait for all: before the work, when all inputs are
 * there, and after it. A rank writes 1 into its place of everybody's line, waits for all places of its own line, and puts
 * them back to 0, so that a graph, whose values are fixed, finds at each replay what it found at the first. Nobody is told
 * again too early: whoever has passed the second line has seen all pass the first, and put it back, and so on in turn. */
#ifndef CUDA_CAPTURE_H
#define CUDA_CAPTURE_H

#include "device.h"

#include "launch.h"

#include "share.h"

enum { CUDA_BEFORE, CUDA_AFTER, CUDA_MEETINGS };
#define CUDA_WORD_BYTES ((CUdeviceptr)sizeof(uint32_t))
#define CUDA_WORDS_BYTES (CUDA_MEETINGS * CUDA_PLACES * CUDA_WORD_BYTES)
#define CUDA_RELEASE_NS 5000000u /* between looks at graphs that wait for a rank that is gone */

/* What a captured operation uses, as long as its set is open: graphs may be replayed until then. */
typedef struct cuda_capture {
    struct cuda_capture *next;
    cuda_gpu *gpu;
    CUdeviceptr words;              /* this rank's */
    char *words_of[CUDA_PLACES];    /* the others', where this GPU finds them; NULL: they do not meet this rank */
    CUdeviceptr copy_in, copy_out;  /* instead of the user's memory; 0: that itself is used */
    cuda_import *imports[3 * CUDA_PLACES];
    int32_t import_count;
} cuda_capture;

/* Words that are all 0 once what is on `stream` has happened. The context is current. */
static ddl_status cuda_capture_make(cuda_capture *c, CUstream stream) {
    void *memory = NULL;
    ddl_status status = cuda_device_alloc(c->gpu, CUDA_WORDS_BYTES, &memory);
    c->words = (CUdeviceptr)(uintptr_t)memory;
    return status != DDL_OK ? status
                            : cuda_check(c->gpu, c->gpu->cu.cuMemsetD8Async(c->words, 0, CUDA_WORDS_BYTES, stream),
                                         "clearing words of a captured collective");
}

/* Puts one meeting of this rank and those whose words it has on a stream that is captured. The write waits until what is before it on the stream is
 * seen by all GPUs (CU_STREAM_WRITE_VALUE_DEFAULT); a GPU that may order such writes anew flushes them behind the wait. The
 * context is current. */
static ddl_status cuda_capture_meet(const cuda_capture *c, CUstream stream, int32_t which, int32_t count, int32_t rank) {
    const cuda_driver *cu = &c->gpu->cu;
    CUdeviceptr line = (CUdeviceptr)which * CUDA_PLACES * CUDA_WORD_BYTES, own = c->words + line;
    CUresult result = CUDA_SUCCESS;
    for (int32_t j = 0; j < count && result == CUDA_SUCCESS; j++) {
        CUdeviceptr there = (CUdeviceptr)(uintptr_t)c->words_of[j] + line + (CUdeviceptr)rank * CUDA_WORD_BYTES;
        result = c->words_of[j] != NULL ? cu->cuStreamWriteValue32(stream, there, 1, 0) : result;
    }
    for (int32_t j = 0; j < count && result == CUDA_SUCCESS; j++) {
        CUdeviceptr here = own + (CUdeviceptr)j * CUDA_WORD_BYTES;
        unsigned int how = CU_STREAM_WAIT_VALUE_GEQ | c->gpu->flush;
        result = c->words_of[j] != NULL ? cu->cuStreamWaitValue32(stream, here, 1, how) : result;
    }
    for (int32_t j = 0; j < count && result == CUDA_SUCCESS; j++) {
        CUdeviceptr here = own + (CUdeviceptr)j * CUDA_WORD_BYTES;
        result = c->words_of[j] != NULL ? cu->cuStreamWriteValue32(stream, here, 0, 0) : result;
    }
    return cuda_check(c->gpu, result, "capturing a wait for other ranks");
}

/* A rank is gone: graphs that wait for it go on, with whatever there is, instead of holding their stream for ever. Words
 * are put back by each replay, so this is done again and again. */
static void cuda_capture_release(const cuda_capture *c) {
    cuda_guard guard;
    if (c->gpu != NULL && c->words != 0 && cuda_enter(c->gpu, &guard) == DDL_OK) {
        c->gpu->cu.cuMemsetD8Async(c->words, 1, CUDA_WORDS_BYTES, c->gpu->stream); /* 0x01010101: more than 1 */
        cuda_leave(&guard);
    }
}

static void cuda_capture_free(cuda_ipc *t, cuda_capture *c) {
    for (int32_t i = 0; i < c->import_count; i++) {
        cuda_let_go(t, c->imports[i]);
    }
    if (c->gpu != NULL) {
        cuda_device_free(c->gpu, (void *)(uintptr_t)c->words);
        cuda_device_free(c->gpu, (void *)(uintptr_t)c->copy_in);
        cuda_device_free(c->gpu, (void *)(uintptr_t)c->copy_out);
    }
    t->host->free(t->host, c);
}

#endif /* CUDA_CAPTURE_H */

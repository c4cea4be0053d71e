/* mark: a place on a stream, and whether the GPU has come there. On streams of the plugin's own the GPU writes a word of
 * pinned memory there: to put it costs a microsecond more than an event (bench/results/2026-11-26-gpu.md), but a look at it
 * is a load, where one at an event is a call of the driver that other threads' launches wait for. By an event it is seen on
 * a user's stream, where the driver writes no words, where a rank is about to sleep, as an event can ring, and now and then,
 * as only events tell of errors. It must not know what the work is. */
#ifndef CUDA_MARK_H
#define CUDA_MARK_H

#include "device.h"

enum {
    CUDA_BEACONS = 128,     /* streams with a word at one time, of a GPU and process */
    CUDA_BEACON_WORDS = 16, /* each has a line of its own: the host looks at it while the GPU writes others */
    CUDA_LOOKS = 4096,      /* at a word, before an event is asked */
    CUDA_ASK_NS = 1500,     /* between two questions about an event; */
    CUDA_ASK_RARELY_NS = 200000 /* where there is a word, too */
};

/* ---- words ---- */

/* A word that one stream after the other has, and the GPU writes. It never falls: comparisons are cyclic. */
typedef struct cuda_beacon {
    bool taken;
    uint32_t last; /* that the GPU was told to write */
    const _Atomic uint32_t *word;
    CUdeviceptr there; /* as the GPU sees it */
} cuda_beacon;

/* Of each GPU, by ordinal, for all endpoints of the process. To pin memory may wait for all that is on the GPU, and so for a
 * gate that some endpoint is to open: the words are there before there is a gate (cuda_gates_prepare). */
static struct {
    pthread_mutex_t lock;
    struct {
        void *words; /* NULL: not pinned */
        int32_t users; /* endpoints that have them: gpu->has_beacons */
        cuda_beacon of[CUDA_BEACONS];
    } page[CUDA_GPUS_MAX];
} cuda_beacons = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* The lock is held, the context current. Without words marks are events. */
static void cuda_beacons_pin(cuda_gpu *gpu) {
    CUdeviceptr there = 0;
    void *words = NULL;
    size_t line = CUDA_BEACON_WORDS * sizeof(uint32_t);
    if (gpu->cu.cuMemHostAlloc(&words, CUDA_BEACONS * line, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP) !=
        CUDA_SUCCESS) {
        return;
    }
    if (gpu->cu.cuMemHostGetDevicePointer(&there, words, 0) != CUDA_SUCCESS) {
        gpu->cu.cuMemFreeHost(words);
        return;
    }
    memset(words, 0, CUDA_BEACONS * line);
    cuda_beacons.page[gpu->ordinal].words = words;
    for (size_t i = 0; i < CUDA_BEACONS; i++) {
        cuda_beacons.page[gpu->ordinal].of[i] =
            (cuda_beacon){.word = (_Atomic uint32_t *)(void *)((char *)words + i * line), .there = there + i * line};
    }
}

/* Asked once. The context is current. */
static void cuda_beacons_need(cuda_gpu *gpu) {
    pthread_mutex_lock(&cuda_beacons.lock);
    if (!gpu->asked_beacons && cuda_beacons.page[gpu->ordinal].words == NULL) {
        cuda_beacons_pin(gpu);
    }
    if (!gpu->asked_beacons && cuda_beacons.page[gpu->ordinal].words != NULL) {
        gpu->has_beacons = true;
        cuda_beacons.page[gpu->ordinal].users++;
    }
    gpu->asked_beacons = true;
    pthread_mutex_unlock(&cuda_beacons.lock);
}

/* No stream of the endpoint's has a beacon any more. The last one unpins; the context is current. */
static void cuda_beacons_give(cuda_gpu *gpu) {
    pthread_mutex_lock(&cuda_beacons.lock);
    if (gpu->has_beacons && --cuda_beacons.page[gpu->ordinal].users == 0) {
        gpu->cu.cuMemFreeHost(cuda_beacons.page[gpu->ordinal].words);
        cuda_beacons.page[gpu->ordinal].words = NULL;
    }
    gpu->asked_beacons = gpu->has_beacons = false;
    pthread_mutex_unlock(&cuda_beacons.lock);
}

/* For a stream. NULL: there are no words, or no more; its marks are events then. */
static cuda_beacon *cuda_beacon_take(const cuda_gpu *gpu) {
    cuda_beacon *beacon = NULL;
    pthread_mutex_lock(&cuda_beacons.lock);
    for (int32_t i = 0; i < CUDA_BEACONS && gpu->has_beacons && beacon == NULL; i++) {
        cuda_beacon *b = &cuda_beacons.page[gpu->ordinal].of[i];
        beacon = b->taken ? NULL : b;
    }
    if (beacon != NULL) {
        beacon->taken = true;
    }
    pthread_mutex_unlock(&cuda_beacons.lock);
    return beacon;
}

/* What the stream was told to write has been written. */
static void cuda_beacon_give(cuda_beacon *beacon) {
    if (beacon != NULL) {
        pthread_mutex_lock(&cuda_beacons.lock);
        beacon->taken = false;
        pthread_mutex_unlock(&cuda_beacons.lock);
    }
}

/* ---- marks ---- */

typedef struct cuda_mark {
    CUstream stream;
    const _Atomic uint32_t *word; /* NULL: by the event alone */
    uint32_t value;               /* that it comes to, or passes */
    int32_t looks;                /* at the word, without an event */
    CUevent event;                /* NULL: none */
    uint64_t asked_ns;            /* about that, last */
    bool wakes;                   /* and it rings when it happens: ipc.h */
} cuda_mark;

/* By an event that stands on some stream already. */
static cuda_mark cuda_mark_of(CUevent event) { return (cuda_mark){.event = event}; }

static bool cuda_mark_is_put(const cuda_mark *mark) { return mark->word != NULL || mark->event != NULL; }

/* Behind what is on the stream; beacon: of that stream, or NULL. The context is current. */
static ddl_status cuda_mark_put(cuda_gpu *gpu, cuda_beacon *beacon, CUstream stream, cuda_mark *out) {
    *out = (cuda_mark){.stream = stream};
    if (beacon == NULL || gpu->cu.cuStreamWriteValue32(stream, beacon->there, beacon->last + 1, 0) != CUDA_SUCCESS) {
        return cuda_event_put(gpu, stream, &out->event);
    }
    out->word = beacon->word;
    out->value = ++beacon->last;
    return DDL_OK;
}

static void cuda_mark_drop(cuda_gpu *gpu, cuda_mark *mark) {
    if (mark->event != NULL) {
        cuda_event_give(gpu, mark->event);
    }
    *mark = (cuda_mark){.event = NULL};
}

/* The next look asks the driver: before a sleep, and after one; and where there will not be many looks. */
static void cuda_mark_ask_next(cuda_mark *mark) {
    mark->looks = CUDA_LOOKS;
    mark->asked_ns = 0;
}

/* Whether it is time to ask the driver. */
static bool cuda_mark_is_due(const cuda_gpu *gpu, const cuda_mark *mark, uint64_t *now) {
    *now = mark->event != NULL || mark->looks >= CUDA_LOOKS ? gpu->host->now_ns(gpu->host) : 0;
    uint64_t pause = mark->word != NULL ? CUDA_ASK_RARELY_NS : CUDA_ASK_NS;
    return mark->event != NULL ? *now - mark->asked_ns >= pause : mark->looks >= CUDA_LOOKS;
}

/* Asks about the event, which a mark that is a word gets for that: behind it on its stream, which is soon enough. Where there is
 * no memory for one, the word will do. */
static ddl_status cuda_mark_ask(cuda_gpu *gpu, cuda_mark *mark) {
    cuda_guard guard;
    ddl_status status = cuda_enter(gpu, &guard);
    if (status != DDL_OK) {
        return status;
    }
    status = mark->event == NULL ? cuda_event_put(gpu, mark->stream, &mark->event) : DDL_OK;
    bool without = status == DDL_ERR_NOMEM && mark->word != NULL;
    if (status == DDL_OK) {
        status = cuda_check(gpu, gpu->cu.cuEventQuery(mark->event), "work on a stream");
    }
    cuda_leave(&guard);
    return without ? DDL_IN_PROGRESS : status;
}

/* DDL_IN_PROGRESS until the GPU has come there; DDL_OK where no mark was put. */
static ddl_status cuda_mark_look(cuda_gpu *gpu, cuda_mark *mark) {
    uint64_t now;
    if (!cuda_mark_is_put(mark)) {
        return DDL_OK;
    }
    /* acquire: with what the GPU did before; the difference, as numbers go round */
    if (mark->word != NULL && (int32_t)(atomic_load_explicit(mark->word, memory_order_acquire) - mark->value) >= 0) {
        cuda_mark_drop(gpu, mark);
        return DDL_OK;
    }
    if (!cuda_mark_is_due(gpu, mark, &now)) {
        mark->looks += mark->event == NULL; /* counted until there is one */
        return DDL_IN_PROGRESS;
    }
    mark->looks = 0;
    mark->asked_ns = now;
    ddl_status status = cuda_mark_ask(gpu, mark);
    if (status != DDL_IN_PROGRESS) {
        cuda_mark_drop(gpu, mark);
    }
    return status;
}

#endif /* CUDA_MARK_H */

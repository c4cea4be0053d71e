/* mark: a place on a stream, and whether the GPU has come there. On streams of the plugin's own the GPU writes a word of
 * pinned memory there: to put it costs a microsecond more than an event (bench/results), but a look at it is a load, where
 * one at an event is a call of the driver that other threads' launches wait for. By an event it is seen on a user's stream,
 * where the driver writes no words, where a rank is about to sleep, as an event can ring, and now and then, as only events
 * tell of errors; no more often than is of use. It must not know what the work is. */
#ifndef CUDA_MARK_H
#define CUDA_MARK_H

#include "gate.h"

enum {
    CUDA_LOOKS = 4096,  /* at a word, before an event is asked */
    CUDA_ASK_NS = 1500  /* between two questions about an event */
};

typedef struct cuda_mark {
    CUstream stream;
    const _Atomic uint32_t *word; /* NULL: by the event alone */
    uint32_t value;               /* that it comes to, or passes */
    int32_t looks;                /* at the word, so far */
    CUevent event;                /* NULL: none */
    uint64_t asked_ns;            /* about that, last */
    bool wakes;                   /* and it rings when it happens: ipc.h */
} cuda_mark;

/* By an event that stands on some stream already. */
static cuda_mark cuda_mark_of(CUevent event) { return (cuda_mark){.event = event}; }

static bool cuda_mark_is_put(const cuda_mark *mark) { return mark->word != NULL || mark->event != NULL; }

/* The event of a mark, where it has none: behind it on its stream, which is soon enough. The context is current. */
static ddl_status cuda_mark_record(cuda_gpu *gpu, cuda_mark *mark) {
    ddl_status status = mark->event == NULL ? cuda_event_take(gpu, &mark->event) : DDL_OK;
    if (status == DDL_OK) {
        status = cuda_check(gpu, gpu->cu.cuEventRecord(mark->event, mark->stream), "recording an event");
    }
    if (status != DDL_OK && mark->event != NULL) {
        cuda_event_give(gpu, mark->event);
        mark->event = NULL;
    }
    return status;
}

/* Behind what is on the stream; beacon: of that stream, or NULL. The context is current. */
static ddl_status cuda_mark_put(cuda_gpu *gpu, cuda_beacon *beacon, CUstream stream, cuda_mark *out) {
    *out = (cuda_mark){.stream = stream};
    if (beacon == NULL || gpu->cu.cuStreamWriteValue32(stream, beacon->there, beacon->last + 1, 0) != CUDA_SUCCESS) {
        return cuda_mark_record(gpu, out);
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

/* The next look asks: before a sleep, and after one. */
static void cuda_mark_ask(cuda_mark *mark) {
    mark->looks = CUDA_LOOKS;
    mark->asked_ns = 0;
}

/* Whether a look that found no word asks about an event. */
static bool cuda_mark_asks(const cuda_gpu *gpu, cuda_mark *mark) {
    if (mark->event == NULL) {
        return ++mark->looks > CUDA_LOOKS;
    }
    uint64_t now = gpu->host->now_ns(gpu->host);
    bool asks = now - mark->asked_ns >= CUDA_ASK_NS;
    mark->asked_ns = asks ? now : mark->asked_ns;
    return asks;
}

/* DDL_IN_PROGRESS until the GPU has come there; DDL_OK where no mark was put. */
static ddl_status cuda_mark_look(cuda_gpu *gpu, cuda_mark *mark) {
    cuda_guard guard;
    if (!cuda_mark_is_put(mark)) {
        return DDL_OK;
    }
    /* acquire: with what the GPU did before; the difference, as numbers go round */
    if (mark->word != NULL && (int32_t)(atomic_load_explicit(mark->word, memory_order_acquire) - mark->value) >= 0) {
        cuda_mark_drop(gpu, mark);
        return DDL_OK;
    }
    if (!cuda_mark_asks(gpu, mark)) {
        return DDL_IN_PROGRESS;
    }
    ddl_status status = cuda_enter(gpu, &guard);
    if (status == DDL_OK) {
        status = mark->event == NULL ? cuda_mark_record(gpu, mark) : DDL_OK;
        status = status == DDL_OK ? cuda_check(gpu, gpu->cu.cuEventQuery(mark->event), "a collective") : status;
        cuda_leave(&guard);
    }
    if (status != DDL_IN_PROGRESS) {
        cuda_mark_drop(gpu, mark);
    }
    return status;
}

#endif /* CUDA_MARK_H */

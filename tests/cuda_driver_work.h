/* cuda_driver_work.h: the part of the stand-in (cuda_driver.c) that does work: streams, events, kernels. */
#ifndef TEST_CUDA_DRIVER_WORK_H
#define TEST_CUDA_DRIVER_WORK_H

/* ---- events and streams ---- */

static void event_drop(CUevent event) { /* the lock is held */
    if (event->ended && event->held == 0) {
        free(event);
    }
}

/* Kernels get the addresses as a GPU would: while one runs they are open to the CPU. */
static void open_all(bool open) {
    for (range *r = ranges; r < ranges + RANGES; r++) {
        if (r->is != NULL) {
            mprotect((void *)(uintptr_t)r->at, r->bytes, open ? PROT_READ | PROT_WRITE : PROT_NONE);
        }
    }
}

static bool crosses(CUdeviceptr at, int device) { /* peer access: memory of another GPU */
    range *r = at - space < SPACE ? find(at, 0) : NULL;
    return r != NULL && r->is != NULL && r->is->device != device;
}

/* Of pinned memory or of a GPU's. */
static _Atomic uint32_t *word_at(const work *w) {
    uint8_t *at = touch(w->dst, sizeof(uint32_t), w->device);
    if (at == NULL) {
        fprintf(stderr, "stand-in: memory went while a stream waited for a word of it\n");
        abort();
    }
    return (_Atomic uint32_t *)(void *)at;
}

/* Does it, with the lock held; may let it go meanwhile. */
static void run(work *w) {
    uint8_t *dst = w->kind == COPY || w->kind == FILL ? touch(w->dst, w->bytes, w->device) : NULL;
    const uint8_t *src = w->kind == COPY ? touch(w->src, w->bytes, w->device) : NULL;
    if (w->kind == COPY && dst != NULL && src != NULL) {
        if (broken_peers && (crosses(w->src, w->device) || crosses(w->dst, w->device))) {
            memset(dst, 0xdb, w->bytes);
        } else {
            memmove(dst, src, w->bytes);
        }
    } else if (w->kind == FILL && dst != NULL) {
        memset(dst, (int)w->value, w->bytes);
    } else if (w->kind == COPY || w->kind == FILL) {
        fprintf(stderr, "stand-in: memory went while work on it was under way\n");
        abort();
    } else if (w->kind == KERNEL) {
        kernels_running++;
        open_all(true);
        pthread_mutex_unlock(&lock);
        void *args[] = {w->args};
        cuda_cpu_run(w->kernel, w->grid, w->block, args);
        pthread_mutex_lock(&lock);
        if (--kernels_running == 0) {
            open_all(false);
        }
    } else if (w->kind == HOST) {
        pthread_mutex_unlock(&lock);
        w->function(w->user);
        pthread_mutex_lock(&lock);
    } else if (w->kind == RECORD) {
        w->event->happened = w->event->happened < w->turn ? w->turn : w->event->happened;
    } else if (w->kind == WAIT) {
        while (w->event->happened < w->turn) {
            pthread_cond_wait(&changed, &lock);
        }
    } else {
        struct timespec nap = {0, 50000};
        if (w->kind == WRITE_WORD) {
            atomic_store(word_at(w), w->value);
        }
        while (w->kind == WAIT_WORD && (int32_t)(atomic_load(word_at(w)) - w->value) < 0) {
            pthread_mutex_unlock(&lock);
            nanosleep(&nap, NULL);
            pthread_mutex_lock(&lock);
        }
    }
    if (w->event != NULL) {
        w->event->held--;
        event_drop(w->event);
    }
    pthread_cond_broadcast(&changed);
}

static void *runner(void *user) {
    CUstream s = user;
    pthread_mutex_lock(&lock);
    while (!s->ending || s->first != NULL) {
        work *w = s->first;
        if (w == NULL) {
            pthread_cond_wait(&s->more, &lock);
            continue;
        }
        run(w);
        s->first = w->next;
        s->last = s->first == NULL ? &s->first : s->last;
        pending[s->device]--;
        s->works--;
        free(w);
        pthread_cond_broadcast(&changed);
    }
    live.streams--;
    *s->gone = true;
    pthread_cond_broadcast(&changed);
    pthread_cond_destroy(&s->more);
    free(s);
    pthread_mutex_unlock(&lock);
    return NULL;
}

static CUstream actual(CUstream s) { return s == NULL || s == (CUstream)1 ? &null_stream[here()] : s; }

/* Takes the work; the thread that does it starts with the first. */
static CUresult enqueue(CUstream stream, work w, size_t args_bytes, const void *args) {
    NEED_CONTEXT
    work *copy = make(sizeof *copy + args_bytes);
    pthread_mutex_lock(&lock);
    CUstream s = actual(stream);
    *copy = w;
    copy->next = NULL;
    copy->device = s->device;
    copy->args_bytes = args_bytes;
    if (args_bytes > 0) {
        memcpy(copy->args, args, args_bytes);
    }
    bool moves = w.kind == COPY || w.kind == FILL;
    if ((w.kind == WAIT_WORD || w.kind == WRITE_WORD) &&
        (w.dst % sizeof(uint32_t) != 0 || touch(w.dst, sizeof(uint32_t), s->device) == NULL)) {
        free(copy);
        return unlocked(CUDA_ERROR_INVALID_VALUE);
    }
    if (moves &&
        (touch(w.dst, w.bytes, s->device) == NULL || (w.kind == COPY && touch(w.src, w.bytes, s->device) == NULL))) {
        free(copy);
        return unlocked(CUDA_ERROR_INVALID_VALUE);
    }
    if (s->capturing) { /* a node of the graph; an event of outside cannot be waited for */
        if (w.kind == WAIT || w.kind == RECORD) {
            free(copy);
            s->spoiled = true;
            return unlocked(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        *s->graph_last = copy;
        s->graph_last = &copy->next;
        return unlocked(CUDA_SUCCESS);
    }
    while (places > 0 && s->works >= places) { /* a full queue: a driver waits here */
        pthread_cond_wait(&changed, &lock);
    }
    s->works++;
    if (!s->running) {
        pthread_t id;
        if (pthread_create(&id, NULL, runner, s) != 0) {
            abort();
        }
        pthread_detach(id);
        s->running = true;
    }
    if (copy->event != NULL) {
        copy->event->held++;
        copy->turn = w.kind == RECORD ? ++copy->event->recorded : copy->event->recorded;
    }
    *s->last = copy;
    s->last = &copy->next;
    pending[s->device]++;
    pthread_cond_signal(&s->more);
    return unlocked(CUDA_SUCCESS);
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER(cuCtxGetStreamPriorityRange)
    NEED_CONTEXT
    *least = 0;
    *greatest = -5;
    return CUDA_SUCCESS;
}
static CUresult stream_create(CUstream *out, unsigned int flags) {
    NEED_CONTEXT
    CUstream s = make(sizeof *s);
    s->device = here();
    s->last = &s->first;
    pthread_cond_init(&s->more, NULL);
    pthread_mutex_lock(&lock);
    live.streams++;
    *out = s;
    return unlocked(flags == CU_STREAM_NON_BLOCKING ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}
CUresult cuStreamCreate(CUstream *out, unsigned int flags) {
    ENTER(cuStreamCreate)
    return stream_create(out, flags);
}
CUresult cuStreamCreateWithPriority(CUstream *out, unsigned int flags, int priority) {
    ENTER(cuStreamCreateWithPriority)
    return priority != -5 ? CUDA_ERROR_INVALID_VALUE : stream_create(out, flags); /* a driver would take the nearest */
}
static CUresult drain(CUstream s) {
    pthread_mutex_lock(&lock);
    while (s->first != NULL) {
        pthread_cond_wait(&changed, &lock);
    }
    return unlocked(CUDA_SUCCESS);
}
CUresult cuStreamDestroy_v2(CUstream s) {
    ENTER(cuStreamDestroy_v2)
    pthread_mutex_lock(&lock);
    s->ending = true;
    if (!s->running) {
        live.streams--;
        pthread_cond_destroy(&s->more);
        free(s);
    } else {
        bool gone = false;
        s->gone = &gone;
        pthread_cond_signal(&s->more);
        /* so that a test can count: this driver waits, a real one does not */
        while (!gone) {
            pthread_cond_wait(&changed, &lock);
        }
    }
    return unlocked(CUDA_SUCCESS);
}
CUresult cuStreamSynchronize(CUstream s) {
    ENTER(cuStreamSynchronize)
    NEED_CONTEXT
    if (actual(s)->capturing) {
        actual(s)->spoiled = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return drain(actual(s));
}
CUresult cuCtxSynchronize(void) {
    ENTER(cuCtxSynchronize)
    NEED_CONTEXT
    return drain(&null_stream[here()]);
}
CUresult cuStreamGetCtx(CUstream s, CUcontext *context) {
    ENTER(cuStreamGetCtx)
    NEED_CONTEXT
    *context = &contexts[actual(s)->device];
    return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream s, int *status) {
    *status = 77; /* says nothing, if it fails */
    ENTER(cuStreamIsCapturing)
    NEED_CONTEXT
    *status = actual(s)->capturing;
    return CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    int was = capture_mode;
    capture_mode = *mode;
    *mode = was;
    return CUDA_SUCCESS;
}

/* ---- graphs: what one stream was given while it was captured ---- */

static void graph_free(struct CUgraph_st *graph) {
    while (graph != NULL && graph->first != NULL) {
        work *w = graph->first;
        graph->first = w->next;
        free(w);
    }
    free(graph);
}
static work *work_copy(const work *w) {
    work *copy = make(sizeof *copy + w->args_bytes);
    memcpy(copy, w, sizeof *copy + w->args_bytes);
    copy->next = NULL;
    return copy;
}
static CUresult capture_begin(CUstream s, int mode) {
    pthread_mutex_lock(&lock);
    if (s == NULL || s == (CUstream)1 || s->capturing) {
        return unlocked(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    s->capturing = true;
    s->spoiled = false;
    s->mode = mode;
    strict_captures += mode == 0;
    s->graph = NULL;
    s->graph_last = &s->graph;
    return unlocked(CUDA_SUCCESS);
}
static CUresult capture_end(CUstream s, CUgraph *out) {
    pthread_mutex_lock(&lock);
    *out = NULL;
    if (!s->capturing) {
        return unlocked(CUDA_ERROR_INVALID_VALUE);
    }
    CUgraph graph = make(sizeof *graph);
    graph->first = s->graph;
    s->capturing = false;
    strict_captures -= s->mode == 0;
    if (s->spoiled) {
        graph_free(graph);
        return unlocked(901); /* CUDA_ERROR_STREAM_CAPTURE_INVALIDATED */
    }
    *out = graph;
    return unlocked(CUDA_SUCCESS);
}
CUresult cuStreamBeginCapture_v2(CUstream s, int mode) {
    ENTER(cuStreamBeginCapture_v2)
    NEED_CONTEXT
    return capture_begin(s, mode);
}
CUresult cuStreamEndCapture(CUstream s, CUgraph *out) {
    ENTER(cuStreamEndCapture)
    NEED_CONTEXT
    return capture_end(s, out);
}
void standin_capture(CUstream s, int on) { /* a capture whose graph nobody wants */
    CUgraph graph = NULL;
    if (on) {
        capture_begin(s, CU_STREAM_CAPTURE_MODE_RELAXED);
    } else {
        capture_end(s, &graph);
        graph_free(graph);
    }
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags) {
    ENTER(cuGraphInstantiateWithFlags)
    work **last;
    *out = make(sizeof **out);
    last = &(*out)->first;
    for (const work *w = graph->first; w != NULL; w = w->next) {
        *last = work_copy(w);
        last = &(*last)->next;
    }
    return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuGraphLaunch(CUgraphExec exec, CUstream s) {
    ENTER(cuGraphLaunch)
    CUresult result = CUDA_SUCCESS;
    for (const work *w = exec->first; w != NULL && result == CUDA_SUCCESS; w = w->next) {
        result = enqueue(s, *w, w->args_bytes, w->args);
    }
    return result;
}
CUresult cuGraphExecDestroy(CUgraphExec exec) {
    ENTER(cuGraphExecDestroy)
    graph_free(exec);
    return CUDA_SUCCESS;
}
CUresult cuGraphDestroy(CUgraph graph) {
    ENTER(cuGraphDestroy)
    graph_free(graph);
    return CUDA_SUCCESS;
}
CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream s) {
    ENTER(cuMemcpyAsync)
    return enqueue(s, (work){.kind = COPY, .dst = dst, .src = src, .bytes = bytes}, 0, NULL);
}
CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t bytes, CUstream s) {
    ENTER(cuMemsetD8Async)
    return enqueue(s, (work){.kind = FILL, .dst = dst, .value = value, .bytes = bytes}, 0, NULL);
}
CUresult cuLaunchHostFunc(CUstream s, CUhostFn function, void *user) {
    ENTER(cuLaunchHostFunc)
    return enqueue(s, (work){.kind = HOST, .function = function, .user = user}, 0, NULL);
}
CUresult cuStreamWaitValue32_v2(CUstream s, CUdeviceptr word, uint32_t value, unsigned int flags) {
    ENTER(cuStreamWaitValue32_v2)
    return no_words ? CUDA_ERROR_NOT_SUPPORTED
           : flags != (CU_STREAM_WAIT_VALUE_GEQ | CU_STREAM_WAIT_VALUE_FLUSH) /* what this GPU may reorder is to be seen */
               ? CUDA_ERROR_INVALID_VALUE
               : enqueue(s, (work){.kind = WAIT_WORD, .dst = word, .value = value}, 0, NULL);
}
CUresult cuStreamWriteValue32_v2(CUstream s, CUdeviceptr word, uint32_t value, unsigned int flags) {
    ENTER(cuStreamWriteValue32_v2)
    (void)flags;
    return no_words ? CUDA_ERROR_NOT_SUPPORTED : enqueue(s, (work){.kind = WRITE_WORD, .dst = word, .value = value}, 0, NULL);
}
CUresult cuEventCreate(CUevent *out, unsigned int flags) {
    ENTER(cuEventCreate)
    NEED_CONTEXT(void) flags;
    *out = make(sizeof **out);
    (*out)->device = here();
    pthread_mutex_lock(&lock);
    live.events++;
    return unlocked(CUDA_SUCCESS);
}
CUresult cuEventDestroy_v2(CUevent event) {
    ENTER(cuEventDestroy_v2)
    NEED_CONTEXT
    pthread_mutex_lock(&lock);
    live.events--;
    event->ended = true;
    event_drop(event);
    return unlocked(CUDA_SUCCESS);
}
CUresult cuEventRecord(CUevent event, CUstream s) {
    ENTER(cuEventRecord)
    NEED_CONTEXT
    if (event->device != actual(s)->device) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    event->captured = actual(s)->capturing; /* then it is a node of the graph, and never happens */
    if (event->captured) {
        return CUDA_SUCCESS;
    }
    return enqueue(s, (work){.kind = RECORD, .event = event}, 0, NULL);
}
CUresult cuStreamWaitEvent(CUstream s, CUevent event, unsigned int flags) {
    ENTER(cuStreamWaitEvent)
    (void)flags;
    return enqueue(s, (work){.kind = WAIT, .event = event}, 0, NULL);
}
CUresult cuEventQuery(CUevent event) {
    ENTER(cuEventQuery)
    NOT_IN_A_CAPTURE
    pthread_mutex_lock(&lock);
    if (event->captured) {
        return unlocked(CUDA_ERROR_CAPTURED_EVENT);
    }
    return unlocked(event->happened >= event->recorded ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

/* ---- kernels ---- */

/* Kernels are loaded when they are needed ("lazy loading"), and to load waits for all that is on the GPU. */
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    ENTER(cuModuleLoadData)
    NEED_CONTEXT
    if (image == NULL) {
        return CUDA_ERROR_INVALID_IMAGE;
    }
    *module = make(sizeof **module);
    (*module)->device = here();
    pthread_mutex_lock(&lock);
    settle(here());
    live.modules++;
    return unlocked(CUDA_SUCCESS);
}
CUresult cuModuleUnload(CUmodule module) {
    ENTER(cuModuleUnload)
    NEED_CONTEXT
    pthread_mutex_lock(&lock);
    settle(module->device);
    live.modules--;
    free(module);
    return unlocked(CUDA_SUCCESS);
}
CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name) {
    ENTER(cuModuleGetFunction)
    NEED_CONTEXT
    int kernel = cuda_cpu_find != NULL && module != NULL ? cuda_cpu_find(name) : -1;
    if (kernel < 0 || kernel >= 1024) {
        return CUDA_ERROR_NOT_FOUND;
    }
    module->functions[kernel].kernel = kernel;
    module->functions[kernel].device = module->device;
    *out = &module->functions[kernel];
    return CUDA_SUCCESS;
}
CUresult cuFuncLoad(CUfunction function) {
    ENTER(cuFuncLoad)
    NEED_CONTEXT
    pthread_mutex_lock(&lock);
    if (!function->loaded) {
        settle(function->device);
    }
    function->loaded = true;
    return unlocked(CUDA_SUCCESS);
}
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream s, void **params, void **extra) {
    ENTER(cuLaunchKernel)
    NEED_CONTEXT
    if (shared != 0 || extra != NULL || gx == 0 || gx > INT32_MAX || gy == 0 || gy > 65535 || gz != 1 ||
        bx == 0 || bx > 1024 || by != 1 || bz != 1) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_lock(&lock);
    if (f->device != here() || actual(s)->device != here()) { /* of another context */
        return unlocked(CUDA_ERROR_INVALID_HANDLE);
    }
    if (!f->loaded) {
        settle(f->device);
    }
    f->loaded = true;
    pthread_mutex_unlock(&lock);
    work w = {.kind = KERNEL, .kernel = f->kernel, .grid = {gx, gy, gz}, .block = {bx, by, bz}};
    return enqueue(s, w, cuda_cpu_args_bytes(f->kernel), params[0]);
}

#endif /* TEST_CUDA_DRIVER_WORK_H */

/* train, part of a step: tensors that travel compressed. They go over a group of their own, because some take several
 * collectives, each after the one before has ended: codes are started in backward's order as gradients become ready,
 * and what follows is done tensor by tensor in the step, so that the order is the same on all ranks. */
#ifndef DDL_TRAIN_COMPRESSION_H
#define DDL_TRAIN_COMPRESSION_H

#include "arena.h"

static char *ddl__compression_memory(const ddl__weight *w) {
    return (char *)(((uintptr_t)w->compressor_memory + 63) & ~(uintptr_t)63);
}

/* Forgets what error feedback and PowerSGD have kept. */
static void ddl__compression_reset(ddl__weight *w) {
    ddl__lane_zero(w->compressor->lane, w->compressor_memory, w->compressor->bytes + 64);
    ddl__compressor_place(w->compressor, ddl__compression_memory(w));
}

/* Bytes of what a code changes and a refused step gives back: residual and q, which lie first. */
static size_t ddl__compression_kept(const ddl__compressor *c) {
    return ddl__round_64((size_t)c->residual_count * sizeof(float)) + (size_t)c->q_count * sizeof(float);
}

/* A step is refused: what compression keeps is again that of before it. The lock is not held. */
static void ddl__compression_undo(ddl_trainer *t) {
    for (int32_t i = 0; i < t->count; i++) {
        ddl__weight *w = &t->weights[i];
        if (w->compressor != NULL) {
            char *memory = ddl__compression_memory(w);
            const ddl__compressor *c = w->compressor;
            ddl__lane_copy(c->lane, memory, memory + c->bytes, ddl__compression_kept(c));
        }
        if (w->residual != NULL) {
            memcpy(w->residual, w->before, (size_t)w->count * sizeof(float));
        }
    }
    t->coded--; /* as many random numbers as without it */
}

/* Matrices are taken as (first dimension) x (the rest), for PowerSGD. */
static ddl_status ddl__compression_make(ddl_trainer *t, ddl__weight *w) {
    ddl_context *c = t->context;
    int64_t rows = w->param.ndim > 1 ? w->param.shape[0] : w->count, cols = rows > 0 ? w->count / rows : 1;
    w->compressor = ddl__alloc(&c->base, sizeof *w->compressor);
    if (w->compressor == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "no memory to compress \"%s\"", w->name);
    }
    ddl_status status = ddl__compressor_init(&c->error, w->compressor, &w->options.compression,
                                             (int32_t)(w - t->weights), rows, cols, t->size);
    if (status < 0) {
        return ddl__said(c, status);
    }
    w->compressor->lane = &t->lane;
    size_t bytes = w->compressor->bytes + 64 + ddl__compression_kept(w->compressor);
    w->compressor_memory = ddl__lane_alloc(&t->lane, bytes, 1);
    if (w->compressor_memory == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "no memory to compress \"%s\"", w->name);
    }
    ddl__compression_reset(w);
    return DDL_OK;
}

static void ddl__compression_free(ddl_trainer *t, ddl__weight *w) {
    if (w->compressor_memory != NULL) {
        ddl__lane_free(&t->lane, w->compressor_memory);
    }
    ddl__free(&t->context->base, w->compressor);
    w->compressor = NULL;
    w->compressor_memory = NULL;
}

static ddl_status ddl__compression_failed(ddl_trainer *t, const ddl__weight *w, ddl_status status) {
    ddl__lock(t->context);
    if (t->context->error.status != status) {
        ddl__error(t->context, status, "averaging \"%s\" compressed failed", w->name);
    }
    ddl__trainer_break(t, status);
    ddl__unlock(t->context);
    return status;
}

/* What this rank sends of a tensor, as if to one other. PowerSGD: p, then q. */
static int64_t ddl__compression_bytes(const ddl__compressor *c) {
    int64_t power = c->q_count > 0 ? (c->rows + c->cols) * c->config.rank * (int64_t)sizeof(float) : 0;
    return c->dense ? c->count * (int64_t)sizeof(float) : power + (int64_t)c->code_bytes;
}

/* For the timeline: from start_ns to end_ns a tensor was compressed, or taken out of what has come. */
static void ddl__compression_trace(ddl_trainer *t, const ddl__weight *w, bool decodes, uint64_t start_ns,
                                   uint64_t end_ns) {
    const ddl__compressor *c = w->compressor;
    ddl__lock(t->context);
    if (t->context->trace != NULL && !c->dense) {
        ddl__trace_code(t->context->trace, decodes, (uint32_t)(w - t->weights), ddl__compress_name(c->config.kind),
                        start_ns, end_ns, c->count * (int64_t)sizeof(float), ddl__compression_bytes(c));
    }
    ddl__unlock(t->context);
}

static ddl_status ddl__compression_code(ddl_trainer *t, ddl__weight *w) {
    uint64_t start = ddl__now_ns();
    char *memory = ddl__compression_memory(w);
    if (!t->config.unchecked) {
        const ddl__compressor *c = w->compressor;
        ddl__lane_copy(c->lane, memory + c->bytes, memory, ddl__compression_kept(c));
    }
    ddl_status status =
        ddl__compressed_code(w->compressor, t->compress_group, t->coded + 1, (float *)(void *)ddl__weight_wire(t, w));
    if (status >= 0) {
        ddl__compression_trace(t, w, false, start, w->compressor->coded_ns);
    }
    return status;
}

/* A device codes a gradient behind its copy, whenever it comes there. */
static void ddl__compression_early(ddl_trainer *t, ddl__weight *w) {
    ddl_status status = ddl__lane_is_host(&t->lane) ? DDL_OK : ddl__compression_code(t, w);
    if (status < 0) {
        ddl__compression_failed(t, w, status);
    }
}

static bool ddl__compression_arrived(ddl_context *c, void *arg) {
    const ddl_trainer *t = ((ddl__unit_wait *)arg)->t;
    return t->weights[t->compress_next].taken || t->status < 0 || c->aborted || c->finalized;
}

/* Whether the gradient of the tensor whose turn it is lies in the arena; waits: for those that were made ready. */
static bool ddl__compression_is_next(ddl_trainer *t, bool waits) {
    ddl__unit_wait at = {t, 0, 0};
    const ddl__weight *w = &t->weights[t->compress_next];
    ddl__lock(t->context);
    if (waits && w->ready) {
        ddl__arrivals_pass(t, ddl__compression_arrived, &at);
    }
    bool taken = w->taken && t->status >= 0;
    ddl__unlock(t->context);
    return taken;
}

/* Starts the codes of those tensors whose turn has come: all before them in backward's order have started. The lock is
 * not held. */
static ddl_status ddl__compression_start(ddl_trainer *t, bool waits) {
    while (t->compress_next >= 0) {
        ddl__weight *w = &t->weights[t->compress_next];
        if (w->compressor != NULL && !ddl__compression_is_next(t, waits)) {
            return DDL_OK;
        }
        t->compress_next--;
        if (w->compressor != NULL) {
            ddl_status status = ddl__lane_is_host(&t->lane) ? ddl__compression_code(t, w) : DDL_OK;
            status = status < 0 ? status : ddl__compressed_send(w->compressor, &w->compressing);
            if (status < 0) {
                return ddl__compression_failed(t, w, status);
            }
            ddl__lock(t->context); /* whoever polls counts the units that it starts */
            t->started_units++;
            t->started_bytes += ddl__compression_bytes(w->compressor);
            ddl__unlock(t->context);
        }
    }
    return DDL_OK;
}

/* Ends all of them, in backward's order: their averages are in the arena. The lock is not held. */
static ddl_status ddl__compression_finish(ddl_trainer *t) {
    uint64_t start = ddl__now_ns();
    for (int32_t i = t->count - 1; i >= 0; i--) {
        ddl__weight *w = &t->weights[i];
        while (w->compressor != NULL && w->compressing != NULL) {
            ddl_status status = ddl_wait(&w->compressing, NULL);
            uint64_t since = ddl__now_ns();
            status = status < 0 ? status : ddl__compressed_next(w->compressor, &w->compressing);
            if (status >= 0 && w->compressing == NULL) {
                ddl__compression_trace(t, w, true, since, ddl__now_ns());
            }
            if (status < 0) {
                ddl__compressed_drop(w->compressor);
                return ddl__compression_failed(t, w, status);
            }
        }
    }
    t->exposed_ns += ddl__now_ns() - start;
    return DDL_OK;
}

#endif /* DDL_TRAIN_COMPRESSION_H */

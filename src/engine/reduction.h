/* engine: what reduces in a collective: one of our kernels, or a program's own function, for two operands or for as
 * many as there are ranks. Operands come in the order of ranks, and the brackets open from the left. */
#ifndef DDL_ENGINE_REDUCTION_H
#define DDL_ENGINE_REDUCTION_H

#include "../p2p/p2p.h"

/* A user's op, or a scaled sum. */
typedef struct ddl__user_op {
    struct ddl__user_op *next;
    ddl_op id;
    bool commutative, freed;
    int32_t users; /* running operations and persistent requests: a freed op goes with the last */
    ddl_op_fn fn;  /* NULL: scaled sum */
    void *user;
    double factor;
} ddl__user_op;

/* Ids follow the order of creation alone, for they are compared between ranks: which operations still run, and hold an
 * op that was freed, differs from rank to rank. */
typedef struct ddl__ops {
    ddl__user_op *first;
    int32_t count;    /* that are not freed */
    uint32_t created;
} ddl__ops;

static void ddl__user_op_release(ddl_context *c, ddl__user_op *op) {
    for (ddl__user_op **at = &c->ops->first; *at != NULL; at = &(*at)->next) {
        if (*at == op) {
            *at = op->next;
            ddl__free(&c->base, op);
            return;
        }
    }
}

/* One user less. */
static void ddl__user_op_drop(ddl_context *c, ddl__user_op *op) {
    if (--op->users == 0 && op->freed) {
        ddl__user_op_release(c, op);
    }
}

typedef struct ddl__reduction {
    ddl__reduce_fn kernel;
    const ddl__user_op *user; /* NULL, or a scaled sum: the kernel does it */
    ddl_dtype dtype;
    uint32_t element_shift; /* log2 of the bytes of an element */
} ddl__reduction;

static ddl__reduction ddl__reduction_of(ddl_op op, ddl_dtype dtype, const ddl__user_op *user) {
    ddl__reduction r = {.kernel = ddl__reduce_kernel(dtype, user != NULL ? DDL_SUM : op),
                        .user = user != NULL && user->fn != NULL ? user : NULL,
                        .dtype = dtype};
    while ((size_t)1 << r.element_shift < ddl_dtype_bytes(dtype)) {
        r.element_shift++;
    }
    return r;
}

/* dst = a op b, a from the lower ranks; dst may be either. */
static void ddl__reduce_pair(const ddl__reduction *r, void *dst, const void *a, const void *b, uint64_t bytes) {
    size_t count = bytes >> r->element_shift;
    if (count == 0) {
        return; /* nothing to reduce is none of a program's function's business */
    }
    if (r->user != NULL) {
        r->user->fn(dst, a, b, (int64_t)count, r->dtype, r->user->user);
    } else {
        r->kernel(dst, a, b, count);
    }
}

/* Our kernels read bytes at any address; a user's function has typed pointers, but a payload begins where the stream of
 * frames puts it. */
static void ddl__reduce_aligned(const ddl__reduction *r, char *dst, const char *own, const char *theirs, uint64_t bytes,
                                bool theirs_first) {
    char piece[4096] __attribute__((aligned(64))); /* a multiple of every element */
    for (uint64_t at = 0; at < bytes; at += sizeof piece) {
        uint64_t n = DDL__MIN(bytes - at, (uint64_t)sizeof piece);
        memcpy(piece, theirs + at, n);
        ddl__reduce_pair(r, dst + at, theirs_first ? piece : own + at, theirs_first ? own + at : piece, n);
    }
}

/* dst = (srcs[0] op srcs[1]) op ...; dst may be any of them, so what is between stays in a piece of our own. The piece
 * is small: while one source is added the next ones are fetched, which larger pieces lose beyond the caches. */
static void ddl__reduce_many(const ddl__reduction *r, char *dst, const char *const *srcs, int32_t count,
                             uint64_t bytes) {
    char piece[2048] __attribute__((aligned(64)));
    if (count <= 2) {
        ddl__reduce_pair(r, dst, srcs[0], srcs[count - 1], count == 2 ? bytes : 0);
        if (count == 1 && bytes > 0) {
            memmove(dst, srcs[0], (size_t)bytes);
        }
        return;
    }
    for (uint64_t at = 0; at < bytes; at += sizeof piece) {
        uint64_t n = DDL__MIN(bytes - at, (uint64_t)sizeof piece);
        ddl__reduce_pair(r, piece, srcs[0] + at, srcs[1] + at, n);
        for (int32_t i = 2; i < count - 1; i++) {
            ddl__reduce_pair(r, piece, piece, srcs[i] + at, n);
        }
        ddl__reduce_pair(r, dst + at, piece, srcs[count - 1] + at, n);
    }
}

#endif /* DDL_ENGINE_REDUCTION_H */

/* coll.h: collectives in tests: joining a job, guarded buffers, an oracle of plain loops for every kind, running a case.
 *
 *     coll_job job;
 *     coll_job_make(&job);                      before the ranks start
 *     ddl_context *c = coll_join(rank, n, &job);     in each rank, thread or process
 *     coll_case k = {.kind = DDL_ALL_REDUCE, .dtype = DDL_F32, .op = DDL_SUM, .count = 1000};
 *     coll_check(ddl_world(c), &k);             runs it, and compares every byte of both buffers with the oracle
 *
 * An oracle knows the inputs of all ranks, because they are a function of (rank, index, salt): it folds them with a plain
 * loop in rank order. Values are small integers, so that sums and products are exact in every type. */
#ifndef TEST_COLL_H
#define TEST_COLL_H

#include "ranks.h"

#include "ddl.h"

#include <stdbool.h>

/* TEST_LENT=1: the buffers of this thread's rank are tensor memory of its context, which others may reach. */
static _Thread_local ddl_context *coll_lender;

/* ---- joining ---- */

typedef struct coll_job {
    int port;
    char secret[65];
    ddl_config config; /* more settings; rank, size and place are filled in by coll_join */
} coll_job;

static inline void coll_job_make(coll_job *job) {
    memset(job, 0, sizeof *job);
    job->port = ranks_port();
    ranks_secret(job->secret);
}

static inline ddl_context *coll_join(int rank, int n, const coll_job *job) {
    char place[64], error[1024] = "";
    ddl_config config = job->config;
    ddl_context *c = NULL;
    const char *master = getenv("MASTER_ADDR"); /* of ranks that are threads there is none */
    snprintf(place, sizeof place, "tcp://%s:%d", master != NULL ? master : "127.0.0.1", job->port);
    config.world_size = n;
    config.rank = rank;
    config.rendezvous = place;
    config.secret = job->secret;
    config.secret_bytes = strlen(job->secret);
    config.error_text = error;
    config.error_bytes = sizeof error;
    if (config.timeout_ms == 0) {
        config.timeout_ms = (int64_t)(30000 * test_slow()); /* a hang becomes a sentence */
    }
    if (ddl_init(&config, &c) != DDL_OK) {
        test__fail(__FILE__, __LINE__, "ddl_init of rank %d of %d: %s", rank, n, error);
        return NULL;
    }
    coll_lender = getenv("TEST_LENT") != NULL ? c : NULL;
    return c;
}

/* The seed of samples; the same on all ranks. TEST_SEED=n takes another sample. */
static inline unsigned coll_seed(void) { return test_seed(); }

static inline unsigned coll_random(unsigned *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* ---- values ---- */

static inline float coll_bf16_round(float x, uint16_t *bits) {
    uint32_t u;
    memcpy(&u, &x, 4);
    u = (u + 0x7fff + (u >> 16 & 1)) & 0xffff0000u;
    *bits = (uint16_t)(u >> 16);
    memcpy(&x, &u, 4);
    return x;
}

/* Normal numbers and zero only: that is all the tests use. */
static inline float coll_f16_round(float x, uint16_t *bits) {
    uint32_t u;
    memcpy(&u, &x, 4);
    uint32_t sign = u & 0x80000000u, rest = u & 0x7fffffffu;
    if (rest == 0) {
        *bits = (uint16_t)(sign >> 16);
        return x;
    }
    rest = (rest + 0xfff + (rest >> 13 & 1)) & ~0x1fffu;
    *bits = (uint16_t)(sign >> 16 | (rest - (112u << 23)) >> 13);
    u = sign | rest;
    memcpy(&x, &u, 4);
    return x;
}

/* A float of 8 bits, by search: the nearest value, of two the even one. Finite values only. */
static inline uint8_t coll_byte_float(ddl_dtype dtype, double x) {
    int cut = dtype == DDL_E4M3 ? 3 : 2, bias = dtype == DDL_E4M3 ? 7 : 15, last = dtype == DDL_E4M3 ? 0x7e : 0x7b;
    double least = 1e300, magnitude = x < 0 ? -x : x;
    int best = 0;
    for (int b = 0; b <= last; b++) {
        int e = b >> cut, m = b & ((1 << cut) - 1);
        double v = e > 0 ? m + (1 << cut) : m;
        for (int i = (e > 0 ? e : 1) - bias - cut; i != 0; i += i < 0 ? 1 : -1) {
            v = i < 0 ? v / 2 : v * 2;
        }
        double off = v < magnitude ? magnitude - v : v - magnitude;
        if (off < least || (off == least && b % 2 == 0)) {
            least = off;
            best = b;
        }
    }
    return (uint8_t)(best | (x < 0 ? 0x80 : 0));
}

static inline bool coll_is_byte_float(ddl_dtype d) { return d == DDL_E4M3 || d == DDL_E5M2; }

static inline bool coll_is_float(ddl_dtype d) { return (d >= DDL_F16 && d <= DDL_F64) || coll_is_byte_float(d); }

static inline bool coll_is_pair(ddl_dtype d) { return d >= DDL_F32_I32 && d <= DDL_I64_I64; }

/* Writes value (and index, for the pairs) as an element; floats round to nearest, integers wrap. */
static inline void coll_put(void *at, ddl_dtype dtype, double value, int64_t index) {
    float f = (float)value;
    int64_t i = coll_is_float(dtype) ? 0 : (int64_t)value;
    uint16_t half;
    unsigned char b = (unsigned char)i;
    int32_t w = (int32_t)i, wi = (int32_t)index;
    switch (dtype) {
    case DDL_F16: coll_f16_round(f, &half); memcpy(at, &half, 2); break;
    case DDL_BF16: coll_bf16_round(f, &half); memcpy(at, &half, 2); break;
    case DDL_F32: memcpy(at, &f, 4); break;
    case DDL_F64: memcpy(at, &value, 8); break;
    case DDL_I8: case DDL_U8: memcpy(at, &b, 1); break;
    case DDL_BOOL: b = value != 0; memcpy(at, &b, 1); break;
    case DDL_I32: case DDL_U32: memcpy(at, &w, 4); break;
    case DDL_I64: case DDL_U64: memcpy(at, &i, 8); break;
    case DDL_F32_I32: memcpy(at, &f, 4); memcpy((char *)at + 4, &wi, 4); break;
    case DDL_F64_I64: memcpy(at, &value, 8); memcpy((char *)at + 8, &index, 8); break;
    case DDL_I32_I32: memcpy(at, &w, 4); memcpy((char *)at + 4, &wi, 4); break;
    case DDL_I64_I64: memcpy(at, &i, 8); memcpy((char *)at + 8, &index, 8); break;
    case DDL_E4M3: case DDL_E5M2: b = coll_byte_float(dtype, value); memcpy(at, &b, 1); break;
    default: break;
    }
}

/* Element i of the input of a rank. Products stay small: mostly 1 and -1, a 2 now and then. */
static inline double coll_value(ddl_dtype dtype, ddl_op op, unsigned salt, int rank, int64_t i) {
    uint64_t h = (uint64_t)rank * 31 + (uint64_t)i * 7 + salt * 13;
    bool is_signed = dtype != DDL_U8 && dtype != DDL_U32 && dtype != DDL_U64 && dtype != DDL_BOOL;
    if (dtype == DDL_BOOL) {
        return (double)(h % 3 != 0);
    }
    if (op == DDL_PROD) {
        return h % 8 == 0 ? 2 : is_signed && h % 3 == 0 ? -1 : 1;
    }
    if (op >= DDL_LAND && op <= DDL_LXOR) {
        return (double)(h % 3);
    }
    if (coll_is_byte_float(dtype)) {
        return (double)(h % 3) - 1; /* sums of 8 are exact */
    }
    return is_signed ? (double)(h % 11) - 5 : (double)(h % 11);
}

/* One step of the fold, on exact values. Integers are held in doubles: they are small. */
static inline double coll_fold(ddl_op op, double a, double b) {
    int64_t x = (int64_t)a, y = (int64_t)b;
    switch (op) {
    case DDL_PROD: return a * b;
    case DDL_MIN: return a < b ? a : b;
    case DDL_MAX: return a > b ? a : b;
    case DDL_BAND: return (double)(x & y);
    case DDL_BOR: return (double)(x | y);
    case DDL_BXOR: return (double)(x ^ y);
    case DDL_LAND: return x && y;
    case DDL_LOR: return x || y;
    case DDL_LXOR: return !x != !y;
    default: return a + b;
    }
}

/* ---- a case ---- */

typedef enum coll_layout {
    COLL_PACKED = 0,
    COLL_EVERY_OTHER = 1, /* stride 2 */
    COLL_BACKWARD = 2,    /* stride -1 */
    COLL_TRANSPOSED = 3   /* two dimensions, the first one the fast one, with a gap after each column */
} coll_layout;

typedef enum coll_way { COLL_BLOCKING = 0, COLL_REQUEST = 1, COLL_PERSISTENT = 2 } coll_way;

typedef struct coll_case {
    ddl_kind kind;
    ddl_dtype dtype;
    ddl_op op;
    int root;
    int64_t count;
    bool in_place;
    coll_way way;
    coll_layout in_layout, out_layout;
    unsigned salt;
    const char *algorithm; /* only for the report */
    /* v-forms: counts of all ranks. all_to_allv: counts[r * n + s] elements go from rank r to rank s. gap: elements left
     * free before each block, through offsets; -1: offsets are NULL. */
    const int64_t *counts;
    int64_t gap;
    int32_t in_device, out_device; /* where the buffers are; in place and of a broadcast the second counts */
} coll_case;

/* A region of memory with a tensor in it. expect: what every byte must be in the end. */
typedef struct coll_buffer {
    unsigned char *memory, *expect;
    size_t bytes;
    int64_t count;
    ddl_tensor tensor, lent; /* lent: where memory comes from a context */
    ddl_tensor device;       /* where a case runs on a device */
} coll_buffer;

enum { COLL_GUARD = 64 };

static inline size_t coll_element_at(const coll_buffer *b, int64_t i) {
    const ddl_tensor *t = &b->tensor;
    int64_t at = 0;
    for (int d = t->ndim - 1; d >= 0 && t->shape[d] > 0; d--) {
        at += i % t->shape[d] * (t->strides[d] != 0 ? t->strides[d] : 1);
        i /= t->shape[d];
    }
    return (size_t)((const unsigned char *)t->data - b->memory) + (size_t)(at * (int64_t)ddl_dtype_bytes(t->dtype));
}

static inline void coll_buffer_make(coll_buffer *b, ddl_dtype dtype, int64_t count, coll_layout layout) {
    size_t size = ddl_dtype_bytes(dtype);
    int64_t columns = count % 3 == 0 ? 3 : 1, rows = count / columns;
    size_t span = (size_t)(layout == COLL_EVERY_OTHER ? 2 * count : layout == COLL_TRANSPOSED ? (rows + 1) * columns : count);
    b->count = count;
    b->bytes = span * size + (size_t)2 * COLL_GUARD;
    if (coll_lender != NULL) {
        int64_t bytes = (int64_t)b->bytes;
        CHECK_EQ(ddl_tensor_alloc(coll_lender, DDL_U8, 1, &bytes, &b->lent), DDL_OK);
        b->memory = (unsigned char *)b->lent.data;
    } else {
        b->memory = (unsigned char *)malloc(b->bytes);
    }
    b->expect = (unsigned char *)malloc(b->bytes);
    memset(b->memory, 0xCB, b->bytes);
    b->tensor = ddl_tensor_1d(b->memory + COLL_GUARD, dtype, count);
    if (layout == COLL_EVERY_OTHER) {
        b->tensor.strides[0] = 2;
    } else if (layout == COLL_BACKWARD) {
        b->tensor.strides[0] = -1;
        b->tensor.data = b->memory + COLL_GUARD + (count > 0 ? (size_t)(count - 1) * size : 0);
    } else if (layout == COLL_TRANSPOSED) {
        int64_t shape[2] = {rows, columns};
        b->tensor = ddl_tensor_nd(b->memory + COLL_GUARD, dtype, 2, shape);
        b->tensor.strides[0] = 1;
        b->tensor.strides[1] = rows + 1;
    }
}

static inline void coll_buffer_free(coll_buffer *b) {
    if (coll_lender != NULL && b->memory != NULL) {
        CHECK_EQ(ddl_tensor_free(coll_lender, &b->lent), DDL_OK);
    } else {
        free(b->memory);
    }
    free(b->expect);
    b->memory = b->expect = NULL;
}

/* Offset of the block of rank b in the larger tensor, and its length. of: whose arrays (all_to_allv). */
static inline int64_t coll_count_of(const coll_case *k, int n, int of, int b, bool receiving) {
    if (k->counts == NULL) {
        return k->count;
    }
    if (k->kind == DDL_ALL_TO_ALLV) {
        return receiving ? k->counts[b * n + of] : k->counts[of * n + b];
    }
    return k->counts[b];
}

static inline int64_t coll_offset_of(const coll_case *k, int n, int of, int b, bool receiving) {
    int64_t at = 0, gap = k->counts != NULL && k->gap > 0 ? k->gap : 0;
    for (int i = 0; i < b; i++) {
        at += coll_count_of(k, n, of, i, receiving) + gap;
    }
    return at + gap;
}

static inline int64_t coll_total(const coll_case *k, int n, int of, bool receiving) {
    return coll_offset_of(k, n, of, n, receiving);
}

static inline ddl_kind coll_base(ddl_kind k) {
    static const ddl_kind base[] = {DDL_GATHER, DDL_SCATTER, DDL_ALL_GATHER, DDL_REDUCE_SCATTER, DDL_ALL_TO_ALL};
    return k >= DDL_GATHERV ? base[k - DDL_GATHERV] : k;
}

static inline bool coll_many_in(ddl_kind k) {
    ddl_kind b = coll_base(k);
    return b == DDL_SCATTER || b == DDL_REDUCE_SCATTER || b == DDL_ALL_TO_ALL;
}

static inline bool coll_many_out(ddl_kind k) {
    ddl_kind b = coll_base(k);
    return b == DDL_GATHER || b == DDL_ALL_GATHER || b == DDL_ALL_TO_ALL;
}

static inline bool coll_rooted(ddl_kind k) {
    ddl_kind b = coll_base(k);
    return b == DDL_BROADCAST || b == DDL_REDUCE || b == DDL_GATHER || b == DDL_SCATTER;
}

static inline bool coll_reduces(ddl_kind k) {
    ddl_kind b = coll_base(k);
    return b == DDL_REDUCE || b == DDL_ALL_REDUCE || b == DDL_REDUCE_SCATTER || b == DDL_SCAN || b == DDL_EXSCAN;
}

/* The reduction of element i of the inputs of ranks 0 .. last. */
static inline void coll_expect_fold(const coll_case *k, int n, int last, int64_t i, void *at) {
    ddl_op op = k->op;
    double value = coll_value(k->dtype, op, k->salt, 0, i);
    int64_t index = 0;
    for (int r = 1; r <= last; r++) {
        double x = coll_value(k->dtype, op, k->salt, r, i);
        if (op == DDL_MIN_INDEX || op == DDL_MAX_INDEX) {
            bool better = op == DDL_MIN_INDEX ? x < value : x > value;
            index = better ? r : index;
            value = better ? x : value;
        } else {
            value = coll_fold(op, value, x);
        }
    }
    if (op == DDL_AVG) {
        value = k->dtype == DDL_F64 ? value / n : coll_is_float(k->dtype) ? (double)((float)value / (float)n)
                                                                           : (double)((int64_t)value / n);
    }
    coll_put(at, k->dtype, value, index);
}

/* The input of rank r at element i; pairs carry the rank as the index. */
static inline void coll_put_input(const coll_case *k, int r, int64_t i, void *at) {
    coll_put(at, k->dtype, coll_value(k->dtype, k->op, k->salt, r, i), r);
}

/* Element j of block b of out of a rank, as the definition of the kind says. */
static inline void coll_expect_element(const coll_case *k, int n, int rank, int b, int64_t j, void *at) {
    switch (coll_base(k->kind)) {
    case DDL_BROADCAST: coll_put_input(k, k->root, j, at); break;
    case DDL_REDUCE:
    case DDL_ALL_REDUCE: coll_expect_fold(k, n, n - 1, j, at); break;
    case DDL_GATHER:
    case DDL_ALL_GATHER: coll_put_input(k, b, j, at); break;
    case DDL_SCATTER: coll_put_input(k, k->root, coll_offset_of(k, n, k->root, rank, false) + j, at); break;
    case DDL_REDUCE_SCATTER: coll_expect_fold(k, n, n - 1, coll_offset_of(k, n, 0, rank, false) + j, at); break;
    case DDL_ALL_TO_ALL: coll_put_input(k, b, coll_offset_of(k, n, b, rank, false) + j, at); break;
    case DDL_SCAN: coll_expect_fold(k, n, rank, j, at); break;
    case DDL_EXSCAN: coll_expect_fold(k, n, rank - 1, j, at); break;
    default: break;
    }
}

/* Two buffers of a case. In place: `small` is not there, its tensor lies in `large` (or is the same). */
typedef struct coll_run {
    coll_buffer in, out;
    ddl_tensor in_tensor, out_tensor;
    bool writes; /* out of this rank gets a result */
} coll_run;

static inline void coll_fill(const coll_case *k, coll_buffer *b, int rank, int64_t first, int64_t count, int64_t input_first) {
    for (int64_t i = 0; i < count; i++) {
        coll_put_input(k, rank, input_first + i, b->memory + coll_element_at(b, first + i));
    }
}

static inline void coll_expect_out(const coll_case *k, int n, int rank, coll_buffer *b, int64_t shift) {
    bool many = coll_many_out(k->kind);
    for (int block = 0; block < (many ? n : 1); block++) {
        int64_t at = many ? coll_offset_of(k, n, rank, block, true) : 0;
        int64_t count = many ? coll_count_of(k, n, rank, block, true)
                        : coll_many_in(k->kind) ? coll_count_of(k, n, 0, rank, false) : k->count;
        for (int64_t j = 0; j < count; j++) {
            coll_expect_element(k, n, rank, block, j, b->expect + coll_element_at(b, shift + at + j));
        }
    }
}

static inline void coll_prepare(const coll_case *k, int n, int rank, coll_run *x) {
    ddl_kind base = coll_base(k->kind);
    int64_t own = coll_count_of(k, n, 0, rank, false);
    int64_t in_count = coll_many_in(k->kind) ? coll_total(k, n, rank, false) : own;
    int64_t out_count = coll_many_out(k->kind) ? coll_total(k, n, rank, true) : own;
    bool at_root = !coll_rooted(k->kind) || rank == k->root;
    bool in_place = k->in_place && (at_root || base == DDL_BROADCAST);
    x->writes = base == DDL_SCATTER || base == DDL_BROADCAST || (at_root && base != DDL_BARRIER);
    x->writes = x->writes && !(base == DDL_EXSCAN && rank == 0);
    memset(&x->in, 0, sizeof x->in);
    memset(&x->out, 0, sizeof x->out);
    if (base == DDL_BROADCAST) {
        coll_buffer_make(&x->out, k->dtype, k->count, k->out_layout);
        if (rank == k->root) {
            coll_fill(k, &x->out, rank, 0, k->count, 0);
        }
        x->in_tensor = x->out_tensor = x->out.tensor;
    } else if (in_place && coll_many_in(k->kind) && base != DDL_ALL_TO_ALL) {
        int64_t shift = coll_offset_of(k, n, 0, rank, false); /* out is a part of in */
        coll_buffer_make(&x->out, k->dtype, in_count, COLL_PACKED);
        coll_fill(k, &x->out, rank, 0, in_count, 0);
        x->in_tensor = x->out.tensor;
        x->out_tensor = ddl_tensor_1d(x->out.memory + coll_element_at(&x->out, shift), k->dtype, own);
    } else if (in_place && coll_many_out(k->kind) && base != DDL_ALL_TO_ALL) {
        int64_t shift = coll_offset_of(k, n, 0, rank, true); /* in is a part of out */
        coll_buffer_make(&x->out, k->dtype, out_count, COLL_PACKED);
        coll_fill(k, &x->out, rank, shift, own, 0);
        x->out_tensor = x->out.tensor;
        x->in_tensor = ddl_tensor_1d(x->out.memory + coll_element_at(&x->out, shift), k->dtype, own);
    } else if (in_place) {
        coll_buffer_make(&x->out, k->dtype, out_count, k->out_layout);
        coll_fill(k, &x->out, rank, 0, in_count, 0);
        x->in_tensor = x->out_tensor = x->out.tensor;
    } else {
        coll_buffer_make(&x->in, k->dtype, in_count, k->in_layout);
        coll_buffer_make(&x->out, k->dtype, out_count, k->out_layout);
        coll_fill(k, &x->in, rank, 0, in_count, 0);
        memcpy(x->in.expect, x->in.memory, x->in.bytes);
        x->in_tensor = x->in.tensor;
        x->out_tensor = x->out.tensor;
    }
    memcpy(x->out.expect, x->out.memory, x->out.bytes);
    if (x->writes) {
        bool part = in_place && coll_many_in(k->kind) && base != DDL_ALL_TO_ALL;
        coll_expect_out(k, n, rank, &x->out, part ? coll_offset_of(k, n, 0, rank, false) : 0);
    }
}

/* Blocking, by a request, or persistent. arrays: 4 * n numbers that are overwritten once the call has returned, because
 * it must have copied them. */
static inline ddl_status coll_call(ddl_group *g, const coll_case *k, ddl_tensor in, ddl_tensor out, int64_t *arrays,
                                   ddl_request **request) {
    int n = ddl_size(g), rank = ddl_rank(g);
    int64_t *counts = arrays, *offsets = &arrays[n], *recv_counts = &arrays[2 * n], *recv_offsets = &arrays[3 * n];
    for (int b = 0; k->counts != NULL && b < n; b++) {
        bool recv = coll_base(k->kind) == DDL_GATHER || coll_base(k->kind) == DDL_ALL_GATHER;
        counts[b] = coll_count_of(k, n, rank, b, recv);
        offsets[b] = coll_offset_of(k, n, rank, b, recv);
        recv_counts[b] = coll_count_of(k, n, rank, b, true);
        recv_offsets[b] = coll_offset_of(k, n, rank, b, true);
    }
    const int64_t *off = k->gap < 0 ? NULL : offsets, *recv_off = k->gap < 0 ? NULL : recv_offsets;
    if (k->way == COLL_PERSISTENT) {
        ddl_collective d = {.kind = k->kind, .op = k->op, .root = k->root, .in = in, .out = out,
                            .counts = k->counts != NULL ? counts : NULL, .offsets = off, .recv_counts = recv_counts,
                            .recv_offsets = recv_off};
        return ddl_collective_init(g, &d, request);
    }
    bool now = k->way == COLL_BLOCKING;
    switch (k->kind) {
    case DDL_BARRIER: return now ? ddl_barrier(g) : ddl_ibarrier(g, request);
    case DDL_BROADCAST: return now ? ddl_broadcast(g, out, k->root) : ddl_ibroadcast(g, out, k->root, request);
    case DDL_REDUCE:
        return now ? ddl_reduce(g, in, out, k->op, k->root) : ddl_ireduce(g, in, out, k->op, k->root, request);
    case DDL_ALL_REDUCE: return now ? ddl_all_reduce(g, in, out, k->op) : ddl_iall_reduce(g, in, out, k->op, request);
    case DDL_GATHER: return now ? ddl_gather(g, in, out, k->root) : ddl_igather(g, in, out, k->root, request);
    case DDL_SCATTER: return now ? ddl_scatter(g, in, out, k->root) : ddl_iscatter(g, in, out, k->root, request);
    case DDL_ALL_GATHER: return now ? ddl_all_gather(g, in, out) : ddl_iall_gather(g, in, out, request);
    case DDL_REDUCE_SCATTER:
        return now ? ddl_reduce_scatter(g, in, out, k->op) : ddl_ireduce_scatter(g, in, out, k->op, request);
    case DDL_ALL_TO_ALL: return now ? ddl_all_to_all(g, in, out) : ddl_iall_to_all(g, in, out, request);
    case DDL_SCAN: return now ? ddl_scan(g, in, out, k->op) : ddl_iscan(g, in, out, k->op, request);
    case DDL_EXSCAN: return now ? ddl_exscan(g, in, out, k->op) : ddl_iexscan(g, in, out, k->op, request);
    case DDL_GATHERV:
        return now ? ddl_gatherv(g, in, out, counts, off, k->root)
                   : ddl_igatherv(g, in, out, counts, off, k->root, request);
    case DDL_SCATTERV:
        return now ? ddl_scatterv(g, in, out, counts, off, k->root)
                   : ddl_iscatterv(g, in, out, counts, off, k->root, request);
    case DDL_ALL_GATHERV:
        return now ? ddl_all_gatherv(g, in, out, counts, off) : ddl_iall_gatherv(g, in, out, counts, off, request);
    case DDL_REDUCE_SCATTERV:
        return now ? ddl_reduce_scatterv(g, in, out, counts, k->op)
                   : ddl_ireduce_scatterv(g, in, out, counts, k->op, request);
    case DDL_ALL_TO_ALLV:
        return now ? ddl_all_to_allv(g, in, counts, off, out, recv_counts, recv_off)
                   : ddl_iall_to_allv(g, in, counts, off, out, recv_counts, recv_off, request);
    default: return DDL_ERR_INTERNAL;
    }
}

static inline void coll_describe(const coll_case *k, int n, char *text, size_t bytes) {
    static const char *const names[] = {"?",      "barrier", "broadcast", "reduce",  "all_reduce", "gather",
                                        "scatter", "all_gather", "reduce_scatter", "all_to_all", "scan", "exscan",
                                        "gatherv", "scatterv", "all_gatherv", "reduce_scatterv", "all_to_allv"};
    snprintf(text, bytes, "%s of %lld %s op %d root %d on %d ranks by %s%s, way %d, layouts %d %d, gap %lld, devices %d %d",
             names[k->kind],
             (long long)k->count, ddl_dtype_name(k->dtype), k->op, k->root, n, k->algorithm ? k->algorithm : "auto",
             k->in_place ? ", in place" : "", (int)k->way, (int)k->in_layout, (int)k->out_layout, (long long)k->gap, k->in_device, k->out_device);
}

/* Every byte of the region, gaps and guards included. */
static inline bool coll_compare(const coll_case *k, int n, const coll_buffer *b, const char *which) {
    char text[300];
    if (b->memory == NULL || memcmp(b->memory, b->expect, b->bytes) == 0) {
        return true;
    }
    size_t at = 0, size = ddl_dtype_bytes(k->dtype);
    while (b->memory[at] == b->expect[at]) {
        at++;
    }
    coll_describe(k, n, text, sizeof text);
    bool inside = at >= COLL_GUARD && at < b->bytes - COLL_GUARD;
    test__fail(__FILE__, __LINE__, "%s: tensor %s differs first at byte %zu (%s, element %lld of memory): %02x, not %02x", text,
               which, at, inside ? "inside" : "GUARD ZONE", inside ? (long long)((at - COLL_GUARD) / size) : -1LL,
               b->memory[at], b->expect[at]);
    return false;
}

static inline bool coll_verify(const coll_case *k, int n, coll_run *x) {
    return coll_compare(k, n, &x->in, "in") && coll_compare(k, n, &x->out, "out");
}

static inline void coll_release(coll_run *x) {
    coll_buffer_free(&x->in);
    coll_buffer_free(&x->out);
}

/* The same bytes on a device; the tensors of that buffer are there then. */
static inline void coll_to_device(ddl_context *c, coll_buffer *b, int32_t device, ddl_tensor *a, ddl_tensor *other) {
    ddl_tensor *tensors[2] = {a, other};
    int64_t bytes = (int64_t)b->bytes;
    if (b->memory == NULL || device == DDL_HOST) {
        return;
    }
    CHECK_EQ(ddl_tensor_alloc_on(c, device, DDL_U8, 1, &bytes, &b->device), DDL_OK);
    CHECK_EQ(ddl_tensor_copy(c, b->device, ddl_tensor_1d(b->memory, DDL_U8, bytes)), DDL_OK);
    for (int i = 0; i < 2; i++) {
        const unsigned char *at = (const unsigned char *)tensors[i]->data;
        if (tensors[i]->device == DDL_HOST && at >= b->memory && at < b->memory + b->bytes) {
            tensors[i]->data = (unsigned char *)b->device.data + (at - b->memory);
            tensors[i]->device = device;
        }
    }
}

static inline void coll_from_device(ddl_context *c, coll_buffer *b) {
    if (b->device.data != NULL) {
        CHECK_EQ(ddl_tensor_copy(c, ddl_tensor_1d(b->memory, DDL_U8, (int64_t)b->bytes), b->device), DDL_OK);
        CHECK_EQ(ddl_tensor_free(c, &b->device), DDL_OK);
    }
}

/* Runs a case and checks its result. False: it failed (and the rank should stop: the group may be broken). */
static inline bool coll_check(ddl_group *g, const coll_case *k) {
    int n = ddl_size(g), rank = ddl_rank(g);
    coll_run x;
    ddl_request *request = NULL;
    int64_t *arrays = (int64_t *)calloc((size_t)n * 4, sizeof *arrays);
    coll_prepare(k, n, rank, &x);
    coll_to_device(ddl_group_context(g), &x.in, k->in_device, &x.in_tensor, &x.out_tensor);
    coll_to_device(ddl_group_context(g), &x.out, k->out_device, &x.in_tensor, &x.out_tensor);
    ddl_status status = coll_call(g, k, x.in_tensor, x.out_tensor, arrays, &request);
    memset(arrays, 0x7f, (size_t)n * 4 * sizeof *arrays);
    if (status == DDL_OK && k->way == COLL_PERSISTENT) {
        status = ddl_start(request);
    }
    if (status == DDL_OK && k->way != COLL_BLOCKING) {
        status = ddl_wait(&request, NULL);
    }
    if (status == DDL_OK && k->way == COLL_PERSISTENT) {
        status = ddl_request_free(&request);
    }
    if (status != DDL_OK) {
        char text[300];
        coll_describe(k, n, text, sizeof text);
        test__fail(__FILE__, __LINE__, "%s: %s: %s", text, ddl_status_name(status), ddl_error(ddl_group_context(g)));
    }
    coll_from_device(ddl_group_context(g), &x.in);
    coll_from_device(ddl_group_context(g), &x.out);
    bool ok = status == DDL_OK && coll_verify(k, n, &x);
    coll_release(&x);
    free(arrays);
    return ok;
}

/* Forces an algorithm ("kind=name"); "auto" for all after that. */
static inline bool coll_force(ddl_group *g, const char *setting) {
    ddl_group_options options = {.algorithm = setting};
    ddl_status status = ddl_group_set(g, &options);
    if (status != DDL_OK) {
        test__fail(__FILE__, __LINE__, "algorithm %s: %s", setting, ddl_error(ddl_group_context(g)));
    }
    return status == DDL_OK;
}

typedef struct coll_algo {
    ddl_kind kind;
    const char *setting;
} coll_algo;

/* What DDL_ALGO can be, written out here: a name that vanishes from ddl must be missed. */
static const coll_algo coll_algos[] = {
    {DDL_BARRIER, "barrier=dissemination"},
    {DDL_BARRIER, "barrier=tree"},
    {DDL_BROADCAST, "broadcast=tree"},
    {DDL_BROADCAST, "broadcast=chain"},
    {DDL_BROADCAST, "broadcast=scatter_all_gather"},
    {DDL_BROADCAST, "broadcast=double_tree"},
    {DDL_REDUCE, "reduce=tree"},
    {DDL_REDUCE, "reduce=chain"},
    {DDL_REDUCE, "reduce=reduce_scatter_gather"},
    {DDL_REDUCE, "reduce=double_tree"},
    {DDL_REDUCE, "reduce=direct"},
    {DDL_ALL_REDUCE, "all_reduce=recursive_doubling"},
    {DDL_ALL_REDUCE, "all_reduce=halving_doubling"},
    {DDL_ALL_REDUCE, "all_reduce=ring"},
    {DDL_ALL_REDUCE, "all_reduce=double_tree"},
    {DDL_ALL_REDUCE, "all_reduce=hierarchical"},
    {DDL_ALL_REDUCE, "all_reduce=direct"},
    {DDL_ALL_REDUCE, "all_reduce=all_gather"},
    {DDL_GATHER, "gather=linear"},
    {DDL_GATHER, "gather=tree"},
    {DDL_SCATTER, "scatter=linear"},
    {DDL_SCATTER, "scatter=tree"},
    {DDL_ALL_GATHER, "all_gather=linear"},
    {DDL_ALL_GATHER, "all_gather=recursive_doubling"},
    {DDL_ALL_GATHER, "all_gather=bruck"},
    {DDL_ALL_GATHER, "all_gather=ring"},
    {DDL_REDUCE_SCATTER, "reduce_scatter=recursive_halving"},
    {DDL_REDUCE_SCATTER, "reduce_scatter=pairwise"},
    {DDL_REDUCE_SCATTER, "reduce_scatter=ring"},
    {DDL_REDUCE_SCATTER, "reduce_scatter=direct"},
    {DDL_ALL_TO_ALL, "all_to_all=linear"},
    {DDL_ALL_TO_ALL, "all_to_all=bruck"},
    {DDL_ALL_TO_ALL, "all_to_all=pairwise"},
    {DDL_SCAN, "scan=recursive_doubling"},
    {DDL_SCAN, "scan=chain"},
    {DDL_EXSCAN, "exscan=recursive_doubling"},
    {DDL_EXSCAN, "exscan=chain"},
};
enum { COLL_ALGOS = sizeof coll_algos / sizeof coll_algos[0] };

/* Leaves the job. A barrier first, so that no rank is gone while others still check. */
static inline void coll_leave(ddl_context *c) { CHECK(ddl_finalize(&c) == DDL_OK); }

#endif /* TEST_COLL_H */

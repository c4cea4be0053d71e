/* tensor: views of memory. Making, checking, packing and lending them. It must not know of messages. */
#ifndef DDL_TENSOR_H
#define DDL_TENSOR_H

#include "mesh/wait.h"

/* >>views */

DDL_API ddl_tensor ddl_tensor_nd(const void *data, ddl_dtype dtype, int32_t ndim, const int64_t *shape) {
    ddl_tensor t = {0};
    if (ndim < 0 || ndim > DDL_MAX_DIMS || (ndim > 0 && shape == NULL)) {
        return t;
    }
    t.data = (void *)(uintptr_t)data;
    t.dtype = dtype;
    t.ndim = ndim;
    for (int32_t i = 0; i < ndim; i++) {
        t.shape[i] = shape[i];
    }
    return t;
}

/* A view is copied into each call, 16 bytes at a time. Loads that wide wait until narrower stores have reached the
 * cache, some 15 ns for each view, a tenth of a small call; so it is stored in the same width. */
typedef uint64_t ddl__pair DDL__VECTOR(16);
_Static_assert(offsetof(ddl_tensor, shape) == 24 && sizeof(ddl_tensor) == 152, "the pairs below are the members");

/* Two 32-bit members, the second of which is 0. */
static inline uint64_t ddl__and_zero(int32_t first) {
    return __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__ ? (uint64_t)(uint32_t)first << 32 : (uint32_t)first;
}

DDL_API ddl_tensor ddl_tensor_1d(const void *data, ddl_dtype dtype, int64_t count) {
    ddl_tensor t;
    ddl__pair *at = (ddl__pair *)(void *)&t;
    at[0] = (ddl__pair){(uintptr_t)data, ddl__and_zero((int32_t)dtype)};
    at[1] = (ddl__pair){ddl__and_zero(1), (uint64_t)count};
    for (size_t i = 2; i < sizeof t / sizeof *at; i++) {
        at[i] = (ddl__pair){0, 0};
    }
    t.strides[DDL_MAX_DIMS - 1] = 0;
    return t;
}

DDL_API int64_t ddl_tensor_count(const ddl_tensor *tensor) {
    if (tensor == NULL || tensor->ndim < 0 || tensor->ndim > DDL_MAX_DIMS) {
        return -1;
    }
    int64_t count = 1;
    for (int32_t i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] < 0 || __builtin_mul_overflow(count, tensor->shape[i], &count)) {
            return -1;
        }
    }
    return count;
}

static bool ddl__is_contiguous(const ddl_tensor *t) {
    bool zero = true, packed = true;
    uint64_t expected = 1; /* may wrap beside a dimension of 0 elements, where it does not matter */
    for (int32_t i = t->ndim - 1; i >= 0; i--) {
        zero = zero && t->strides[i] == 0;
        packed = packed && (t->shape[i] <= 1 || (uint64_t)t->strides[i] == expected);
        expected *= (uint64_t)t->shape[i];
    }
    return zero || packed || expected <= 1 || ddl_tensor_count(t) <= 1;
}

/* Lowest and one past the highest byte that a tensor touches. */
static void ddl__tensor_extent(const ddl_tensor *t, const char **out_low, const char **out_high) {
    int64_t size = (int64_t)ddl_dtype_bytes(t->dtype), low = 0, high = size;
    int64_t count = ddl_tensor_count(t);
    if (count <= 0) {
        *out_low = *out_high = t->data;
        return;
    }
    if (ddl__is_contiguous(t)) {
        high = count * size;
    } else {
        for (int32_t i = 0; i < t->ndim; i++) {
            int64_t span = (t->shape[i] - 1) * t->strides[i] * size;
            low += span < 0 ? span : 0;
            high += span > 0 ? span : 0;
        }
    }
    *out_low = (const char *)t->data + low;
    *out_high = (const char *)t->data + high;
}

static bool ddl__tensors_overlap(const ddl_tensor *a, const ddl_tensor *b) {
    const char *al, *ah, *bl, *bh;
    ddl__tensor_extent(a, &al, &ah);
    ddl__tensor_extent(b, &bl, &bh);
    return al < ah && bl < bh && al < bh && bl < ah;
}

/* Goes to the next element in C order; offset is in elements. */
static int64_t ddl__tensor_next(const ddl_tensor *t, int64_t index[DDL_MAX_DIMS], int64_t offset) {
    for (int32_t d = t->ndim - 1; d >= 0; d--) {
        offset += t->strides[d];
        if (++index[d] < t->shape[d]) {
            break;
        }
        offset -= t->shape[d] * t->strides[d];
        index[d] = 0;
    }
    return offset;
}

/* Whether t has an element in a contiguous tensor. What lies between the elements of t does not count. */
static bool ddl__tensor_touches(const ddl_tensor *t, const ddl_tensor *contiguous) {
    const char *low, *high;
    int64_t size = (int64_t)ddl_dtype_bytes(t->dtype), index[DDL_MAX_DIMS] = {0}, offset = 0;
    if (!ddl__tensors_overlap(t, contiguous) || ddl__is_contiguous(t)) {
        return ddl__tensors_overlap(t, contiguous);
    }
    ddl__tensor_extent(contiguous, &low, &high);
    for (int64_t left = ddl_tensor_count(t); left > 0; left--) {
        const char *at = (const char *)t->data + offset * size;
        if (at < high && low < at + size) {
            return true;
        }
        offset = ddl__tensor_next(t, index, offset);
    }
    return false;
}

/* Copies the first bytes of a strided tensor to packed memory or back. A stride that is negative or zero is as good as
 * any. */
static void ddl__pack_bytes(const ddl_tensor *t, char *packed, uint64_t bytes, bool unpack) {
    uint64_t size = ddl_dtype_bytes(t->dtype);
    int64_t index[DDL_MAX_DIMS] = {0}, at = 0;
    if (ddl__is_contiguous(t)) { /* strides that are all zero say so too */
        memcpy(unpack ? t->data : packed, unpack ? packed : t->data, (size_t)bytes);
        return;
    }
    for (; bytes > 0; bytes -= DDL__MIN(bytes, size)) {
        char *element = (char *)t->data + at * (int64_t)size;
        memcpy(unpack ? element : packed, unpack ? packed : element, (size_t)DDL__MIN(bytes, size));
        packed += size;
        at = ddl__tensor_next(t, index, at);
    }
}

static void ddl__pack(const ddl_tensor *t, char *packed, bool unpack) {
    ddl__pack_bytes(t, packed, (uint64_t)ddl_tensor_count(t) * ddl_dtype_bytes(t->dtype), unpack);
}

/* False when the strides lead so far away that offsets in bytes overflow. */
static bool ddl__strides_valid(const ddl_tensor *t) {
    int64_t size = (int64_t)ddl_dtype_bytes(t->dtype), low = 0, high = size;
    for (int32_t i = 0; i < t->ndim; i++) {
        int64_t span;
        if (t->shape[i] > 1 && (__builtin_mul_overflow(t->shape[i] - 1, t->strides[i], &span) ||
                                __builtin_mul_overflow(span, size, &span) ||
                                __builtin_add_overflow(span < 0 ? low : high, span, span < 0 ? &low : &high))) {
            return false;
        }
    }
    return true;
}

/* Checks a tensor that a caller passed. what: the call, which: the argument, for the sentence. */
static ddl_status ddl__tensor_check(ddl_context *c, const ddl_tensor *t, const char *what, const char *which) {
    int64_t count = ddl_tensor_count(t);
    size_t size = ddl_dtype_bytes(t->dtype);
    if (size == 0) {
        return ddl__error(c, DDL_ERR_ARG, "%s: the type of tensor `%s` is %d, which is no ddl_dtype", what, which,
                          (int)t->dtype);
    }
    if (count < 0 || (uint64_t)count > (uint64_t)INT64_MAX / size) {
        return ddl__error(c, DDL_ERR_ARG, "%s: the shape of tensor `%s` is not valid (ndim %d; no dimension may be "
                          "negative, at most %d dimensions)", what, which, t->ndim, DDL_MAX_DIMS);
    }
    if (count > 0 && !ddl__strides_valid(t)) {
        return ddl__error(c, DDL_ERR_ARG, "%s: the strides of tensor `%s` lead out of the address space", what, which);
    }
    if (count > 0 && t->data == NULL) {
        return ddl__error(c, DDL_ERR_ARG, "%s: tensor `%s` has %lld elements but its data pointer is NULL", what, which,
                          (long long)count);
    }
    if (t->device != DDL_HOST) {
        return ddl__error(c, DDL_ERR_UNSUPPORTED,
                          "%s: tensor `%s` is on device %d, but no device plugin is loaded; see "
                          "DDL_PLUGINS",
                          what, which, t->device);
    }
    return DDL_OK;
}

/* Whether two dimensions lead to one element: a steps in one are as far as b in the other, for some a and b within the
 * shape. Three that do so only together are not found. */
static bool ddl__dims_meet(const ddl_tensor *t, int32_t i, int32_t j) {
    uint64_t p = t->strides[i] < 0 ? 0 - (uint64_t)t->strides[i] : (uint64_t)t->strides[i];
    uint64_t q = t->strides[j] < 0 ? 0 - (uint64_t)t->strides[j] : (uint64_t)t->strides[j];
    uint64_t gcd = p;
    for (uint64_t rest = q; rest != 0;) {
        uint64_t next = gcd % rest;
        gcd = rest;
        rest = next;
    }
    return gcd == 0 || (q / gcd < (uint64_t)t->shape[i] && p / gcd < (uint64_t)t->shape[j]);
}

/* An output must have each element in a place of its own: of two values for one place, one would be lost. For tensors
 * that ddl__tensor_check has seen. */
static ddl_status ddl__tensor_check_output(ddl_context *c, const ddl_tensor *t, const char *what, const char *which) {
    bool meet = false;
    if (ddl__is_contiguous(t) || ddl_tensor_count(t) <= 1) {
        return DDL_OK;
    }
    for (int32_t i = 0; i < t->ndim && !meet; i++) {
        meet = t->shape[i] > 1 && t->strides[i] == 0;
        for (int32_t j = 0; j < i && !meet; j++) {
            meet = t->shape[i] > 1 && t->shape[j] > 1 && ddl__dims_meet(t, i, j);
        }
    }
    return !meet ? DDL_OK
                 : ddl__error(c, DDL_ERR_ARG,
                              "%s: the strides of tensor `%s` lead to one element more than once, so it cannot be "
                              "written to; give it memory for each element",
                              what, which);
}

/* >>memory */

/* Memory of ddl_tensor_alloc: a transport's, which peers reach without a copy, or what follows this record. */
typedef struct ddl__lent {
    struct ddl__lent *next;
    void *data;
    uint64_t counted;
    const ddl__endpoint *endpoint; /* whose it is; NULL: ours */
} ddl__lent;

/* The caller's memory is not counted as the context's own. */
static ddl__lent *ddl__lend_own(ddl_context *c, size_t bytes) {
    ddl__base *base = &c->base;
    uint64_t memory = base->memory, peak = base->memory_peak;
    ddl__lent *lent = bytes > SIZE_MAX - 128 ? NULL : ddl__alloc(base, sizeof *lent + 64 + bytes);
    if (lent != NULL) {
        lent->counted = base->memory - memory;
        base->memory = memory;
        base->memory_peak = peak;
        lent->data = (void *)(((uintptr_t)(lent + 1) + 63) & ~(uintptr_t)63);
    }
    return lent;
}

/* From the first transport that lends some; NULL: none does. */
static ddl__lent *ddl__lend_shared(ddl_context *c, size_t bytes) {
    for (int32_t i = 0; i < c->endpoint_count; i++) {
        const ddl__endpoint *e = &c->endpoints[i];
        ddl__lent *lent = DDL_HAS(e->table, memory_alloc) ? ddl__alloc(&c->base, sizeof *lent) : NULL;
        if (lent != NULL && e->table->memory_alloc(e->self, bytes, &lent->data) == DDL_OK) {
            lent->endpoint = e;
            return lent;
        }
        ddl__free(&c->base, lent);
    }
    return NULL;
}

static ddl__lent *ddl__lend(ddl_context *c, size_t bytes) {
    ddl__lent *lent = ddl__lend_shared(c, bytes);
    if (lent == NULL) {
        lent = ddl__lend_own(c, bytes);
    }
    if (lent != NULL) {
        lent->next = c->lent;
        c->lent = lent;
    }
    return lent;
}

static void ddl__lent_free(ddl_context *c, ddl__lent *lent) {
    if (lent->endpoint != NULL) {
        lent->endpoint->table->memory_free(lent->endpoint->self, lent->data);
    }
    c->base.memory += lent->counted; /* ddl__free takes it off again */
    ddl__free(&c->base, lent);
}

DDL_API ddl_status ddl_tensor_alloc(ddl_context *context, ddl_dtype dtype, int32_t ndim, const int64_t *shape,
                                    ddl_tensor *out_tensor) {
    DDL__TRY(ddl__enter(context));
    ddl_tensor t = ddl_tensor_nd(context, dtype, ndim, shape);
    ddl_status status = DDL_OK;
    if (out_tensor == NULL || (ndim > 0 && shape == NULL)) {
        status = ddl__error(context, DDL_ERR_ARG, "ddl_tensor_alloc: %s is NULL",
                            out_tensor == NULL ? "out_tensor" : "shape");
    } else if (ndim < 0 || ndim > DDL_MAX_DIMS) {
        status = ddl__error(context, DDL_ERR_ARG, "ddl_tensor_alloc: %d dimensions; 0 to %d are possible", ndim,
                            DDL_MAX_DIMS);
    } else {
        status = ddl__tensor_check(context, &t, "ddl_tensor_alloc", "out_tensor");
    }
    if (status == DDL_OK) {
        size_t bytes = (size_t)ddl_tensor_count(&t) * ddl_dtype_bytes(dtype);
        ddl__lent *lent = ddl__lend(context, bytes);
        if (lent == NULL) {
            status = ddl__error(context, DDL_ERR_NOMEM, "ddl_tensor_alloc: no memory for %zu bytes", bytes);
        } else {
            t.data = lent->data;
            *out_tensor = t;
        }
    }
    ddl__unlock(context);
    return status;
}

DDL_API ddl_status ddl_tensor_free(ddl_context *context, ddl_tensor *tensor) {
    if (tensor == NULL || tensor->data == NULL) {
        return DDL_OK;
    }
    DDL__TRY(ddl__enter(context));
    ddl_status status = DDL_ERR_ARG;
    for (ddl__lent **at = &context->lent; *at != NULL; at = &(*at)->next) {
        if ((*at)->data == tensor->data) {
            ddl__lent *gone = *at;
            *at = gone->next;
            ddl__lent_free(context, gone);
            *tensor = (ddl_tensor){0};
            status = DDL_OK;
            break;
        }
    }
    if (status < 0) {
        ddl__error(context, status,
                   "ddl_tensor_free: the memory at %p was not made by ddl_tensor_alloc of this context, or "
                   "was freed before",
                   tensor->data);
    }
    ddl__unlock(context);
    return status;
}

/* >>dlpack */

static const struct {
    ddl_dtype dtype;
    uint8_t code, bits;
} ddl__dlpack_types[] = {
    {DDL_F16, 2, 16}, {DDL_BF16, 4, 16}, {DDL_F32, 2, 32}, {DDL_F64, 2, 64}, {DDL_I8, 0, 8},   {DDL_U8, 1, 8},
    {DDL_I32, 0, 32}, {DDL_U32, 1, 32},  {DDL_I64, 0, 64}, {DDL_U64, 1, 64}, {DDL_BOOL, 6, 8},
};

static ddl_status ddl__dlpack_view(const ddl_dlpack *dlpack, ddl_dtype dtype, ddl_tensor *out_tensor) {
    uintptr_t data = (uintptr_t)dlpack->data + (uintptr_t)dlpack->byte_offset;
    ddl_tensor t = ddl_tensor_nd((const void *)data, dtype, dlpack->ndim, dlpack->shape);
    int64_t count = ddl_tensor_count(&t);
    if (count < 0) {
        return DDL_ERR_ARG;
    }
    bool zero = dlpack->strides != NULL;
    for (int32_t d = 0; dlpack->strides != NULL && d < t.ndim; d++) {
        t.strides[d] = dlpack->strides[d];
        zero = zero && t.strides[d] == 0;
    }
    if (zero && count > 1) { /* one element shown as many: strides of zero would mean contiguous here */
        return DDL_ERR_UNSUPPORTED;
    }
    *out_tensor = t;
    return DDL_OK;
}

DDL_API ddl_status ddl_tensor_from_dlpack(const ddl_dlpack *dlpack, ddl_tensor *out_tensor) {
    if (dlpack == NULL || out_tensor == NULL || dlpack->ndim < 0 || dlpack->ndim > DDL_MAX_DIMS ||
        dlpack->dtype.lanes != 1 || (dlpack->ndim > 0 && dlpack->shape == NULL)) {
        return DDL_ERR_ARG;
    }
    if (dlpack->device.type != 1 && dlpack->device.type != 3) {
        return DDL_ERR_UNSUPPORTED;
    }
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__dlpack_types); i++) {
        if (ddl__dlpack_types[i].code == dlpack->dtype.code && ddl__dlpack_types[i].bits == dlpack->dtype.bits) {
            return ddl__dlpack_view(dlpack, ddl__dlpack_types[i].dtype, out_tensor);
        }
    }
    return DDL_ERR_UNSUPPORTED;
}

DDL_API ddl_status ddl_tensor_to_dlpack(ddl_tensor *tensor, ddl_dlpack *out_dlpack) {
    if (tensor == NULL || out_dlpack == NULL || ddl_tensor_count(tensor) < 0) {
        return DDL_ERR_ARG;
    }
    for (size_t i = 0; tensor->device == DDL_HOST && i < DDL__COUNT_OF(ddl__dlpack_types); i++) {
        if (ddl__dlpack_types[i].dtype == tensor->dtype) {
            bool contiguous = ddl__is_contiguous(tensor);
            *out_dlpack = (ddl_dlpack){
                .data = tensor->data,
                .device = {1, 0},
                .ndim = tensor->ndim,
                .dtype = {ddl__dlpack_types[i].code, ddl__dlpack_types[i].bits, 1},
                .shape = tensor->shape,
                .strides = contiguous ? NULL : tensor->strides,
            };
            return DDL_OK;
        }
    }
    return DDL_ERR_UNSUPPORTED;
}

#endif /* DDL_TENSOR_H */

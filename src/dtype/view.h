/* dtype/view: views of memory: making them, where their elements lie, packing them. It must not know of a context. */
#ifndef DDL_DTYPE_VIEW_H
#define DDL_DTYPE_VIEW_H

#include "../base.h"
#include "vectors.h"

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
_Static_assert(offsetof(ddl_tensor, shape) == 24 && sizeof(ddl_tensor) == 152, "the pairs below are all members");

/* Two 32-bit members, the second of which, behind the first, is 0. */
static inline uint64_t ddl__and_zero(int32_t first) { return (uint32_t)first; }

DDL_API ddl_tensor ddl_tensor_1d(const void *data, ddl_dtype dtype, int64_t count) {
    ddl_tensor t;
    ddl__pair *at = (ddl__pair *)(void *)&t;
    at[0] = (ddl__pair){(uintptr_t)data, ddl__and_zero((int32_t)dtype)};
    at[1] = (ddl__pair){ddl__and_zero(1), (uint64_t)count};
    /* no loop: gcc makes "rep stos" of one, which takes 10 ns */
    at[2] = at[3] = at[4] = at[5] = at[6] = at[7] = at[8] = (ddl__pair){0, 0};
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

#endif /* DDL_DTYPE_VIEW_H */

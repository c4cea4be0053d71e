/* hmem_device: a device plugin by the name of cuda whose memory is ordinary memory and whose copies are done at once: for
 * tests of transports that register such memory. No device at all. Its kernels are the host's. */
#define DDL_STATIC
#define DDL_IMPLEMENTATION
#include "ddl.h"

#include <stdlib.h>
#include <string.h>

enum { BLOCKS = 64 };
static struct {
    char *at;
    size_t bytes;
    uint64_t id;
} blocks[BLOCKS]; /* one rank in a process, whose lock is held */
static uint64_t ids;

static ddl_status device_open(const ddl_host *host, int32_t device, void **out_self) {
    (void)host, (void)device;
    *out_self = blocks;
    return DDL_OK;
}

static void device_close(void *self) { (void)self; }

static int32_t count(void) { return 1; }

static int32_t owner(void *self, const void *pointer) {
    (void)self;
    for (int i = 0; i < BLOCKS; i++) {
        if (blocks[i].at != NULL && (const char *)pointer >= blocks[i].at &&
            (const char *)pointer < blocks[i].at + blocks[i].bytes) {
            return 1;
        }
    }
    return 0;
}

static ddl_status device_alloc(void *self, size_t bytes, void **out_memory) {
    (void)self;
    for (int i = 0; i < BLOCKS; i++) {
        if (blocks[i].at == NULL && (blocks[i].at = malloc(bytes + 1)) != NULL) {
            blocks[i].bytes = bytes;
            blocks[i].id = ++ids;
            *out_memory = blocks[i].at;
            return DDL_OK;
        }
    }
    return DDL_ERR_NOMEM;
}

static ddl_status allocation(void *self, const void *pointer, ddl_allocation *out) {
    (void)self;
    for (int i = 0; i < BLOCKS; i++) {
        if (blocks[i].at != NULL && (const char *)pointer >= blocks[i].at &&
            (const char *)pointer < blocks[i].at + blocks[i].bytes) {
            *out = (ddl_allocation){blocks[i].at, blocks[i].bytes, blocks[i].id};
            return DDL_OK;
        }
    }
    return DDL_ERR_UNSUPPORTED;
}

static void device_free(void *self, void *memory) {
    (void)self;
    for (int i = 0; i < BLOCKS; i++) {
        if (blocks[i].at == memory) {
            free(memory);
            blocks[i].at = NULL;
        }
    }
}

static ddl_status copy(void *self, void *dst, const void *src, size_t bytes, void *stream) {
    (void)self, (void)stream;
    memmove(dst, src, bytes);
    return DDL_OK;
}

/* The first source, at most, is where the result goes. DDL_HMEM_FAIL=n: the n-th fails. */
static ddl_status reduce(void *self, void *dst, const void *const *srcs, int32_t src_count, int64_t elements,
                         int32_t dtype, int32_t op, void *stream) {
    static int calls;
    ddl__reduction r = ddl__reduction_of((ddl_op)op, (ddl_dtype)dtype, NULL);
    const char *fail = getenv("DDL_HMEM_FAIL");
    (void)self, (void)stream;
    for (int32_t i = 1; i < src_count; i++) {
        if (srcs[i] == dst) {
            return DDL_ERR_ARG;
        }
    }
    if (r.kernel == NULL || (fail != NULL && ++calls == atoi(fail))) {
        return DDL_ERR_SYSTEM;
    }
    ddl__reduce_many(&r, dst, (const char *const *)srcs, src_count, (uint64_t)elements << r.element_shift);
    return DDL_OK;
}

static ddl_status kernel(void *self, int32_t which, const void *params, void *stream) {
    const ddl_kernel_scale *k = params;
    (void)self, (void)stream;
    if (which != DDL_KERNEL_SCALE) {
        return DDL_ERR_UNSUPPORTED;
    }
    ddl__scale(k->dst, k->src, (size_t)k->count, (ddl_dtype)k->dtype, k->factor);
    ddl__average(k->dst, (size_t)k->count, (ddl_dtype)k->dtype, k->divisor);
    return DDL_OK;
}

static ddl_status event_record(void *self, void *stream, void **out_event) {
    (void)stream;
    *out_event = self;
    return DDL_OK;
}

static ddl_status event_test(void *self, void *event) {
    (void)self, (void)event;
    return DDL_OK;
}

static void event_free(void *self, void *event) { (void)self, (void)event; }

DDL_PLUGIN_EXPORT const ddl_plugin *ddl_plugin_cuda_v1(const ddl_host *host);
const ddl_plugin *ddl_plugin_cuda_v1(const ddl_host *host) {
    static const ddl_device device = {.size = sizeof device, .open = device_open, .close = device_close, .count = count,
                                      .owner = owner, .alloc = device_alloc, .free = device_free, .copy = copy,
                                      .event_record = event_record, .event_test = event_test, .event_free = event_free,
                                      .allocation = allocation, .reduce = reduce, .kernel = kernel};
    static const ddl_plugin plugin = {.size = sizeof plugin, .abi = DDL_PLUGIN_ABI, .name = "cuda", .version = "0",
                                      .about = "Ordinary memory under the name of a device, for tests.", .device = &device};
    (void)host;
    return &plugin;
}

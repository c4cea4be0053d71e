/* hmem_device: a device plugin by the name of cuda whose memory is ordinary memory and whose copies are done at once: for
 * tests of transports that register such memory. No device at all. */
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
                                      .allocation = allocation};
    static const ddl_plugin plugin = {.size = sizeof plugin, .abi = DDL_PLUGIN_ABI, .name = "cuda", .version = "0",
                                      .about = "Ordinary memory under the name of a device, for tests.", .device = &device};
    (void)host;
    return &plugin;
}

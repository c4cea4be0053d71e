/* cuda: GPUs of NVIDIA. A device, whose memory every operation of ddl takes, and a transport between the ranks of one
 * host that share GPU memory.
 *
 *     cc -std=c11 -O2 -fPIC -shared -fvisibility=hidden -o libddl-cuda.so plugins/cuda/cuda.c -lpthread -ldl
 *
 * makes it without kernels: it loads, and declines. `make plugins` makes it whole, where it finds nvcc:
 *
 *     nvcc -fatbin -o build/cuda.fatbin plugins/cuda/kernels.cu        (for each architecture: CUDA_ARCHS)
 *     (the line above) -DCUDA_FATBIN='"build/cuda.fatbin"' -DCUDA_TOOLKIT=13000
 *
 * Neither needs a GPU or a driver, and what was built runs on machines without: docs/cuda.md. */
#define _GNU_SOURCE 1
#include "../../ddl.h"

#include "driver.h"

#include "gpu.h"

#include "pool.h"

#include "device.h"

#include "mark.h"

#include "gate.h"

#include "module.h"

#include "launch.h"

#include "board.h"

#include "share.h"

#include "links.h"

#include "probe.h"

#include "native_plan.h"

#include "native_ring.h"

#include "capture.h"

#include "native.h"

#include "ipc.h"

static const ddl_device cuda_device = {
    .size = sizeof(ddl_device),
    .open = cuda_device_open,
    .close = cuda_device_close,
    .count = cuda_device_count,
    .owner = cuda_device_owner,
    .alloc = cuda_device_alloc,
    .free = cuda_device_free,
    .copy = cuda_device_copy,
    .fill = cuda_device_fill,
    .event_record = cuda_device_event_record,
    .event_test = cuda_device_event_test,
    .event_free = cuda_device_event_free,
    .host_alloc = cuda_device_host_alloc,
    .host_free = cuda_device_host_free,
    .stream_make = cuda_device_stream_make,
    .stream_free = cuda_device_stream_free,
    .stream_wait = cuda_device_stream_wait,
    .gate_put = cuda_device_gate_put,
    .gate_open = cuda_device_gate_open,
    .capturing = cuda_device_capturing,
    .reduce = cuda_device_reduce,
    .strided = cuda_device_strided,
    .kernel = cuda_device_kernel,
    .allocation = cuda_device_allocation,
};

static const char *const cuda_settings[] = {NULL};

static const ddl_plugin cuda_plugin = {
    .size = sizeof(ddl_plugin),
    .abi = DDL_PLUGIN_ABI,
    .name = "cuda",
    .version = "1",
    .about = "Memory of NVIDIA GPUs, and its exchange between the ranks of one host.",
    .transport = &cuda_transport,
    .device = &cuda_device,
    .settings = cuda_settings,
};

/* Minor versions of one major version understand each other's machine code; a driver of an older major one does not
 * know what a newer toolkit writes. */
static bool cuda_toolkit_fits(const ddl_host *host, const cuda_driver *cu) {
    int version = 0;
    if (cu->cuDriverGetVersion(&version) == CUDA_SUCCESS && version / 1000 < CUDA_TOOLKIT / 1000) {
        cuda_log(host, DDL_LOG_WARN,
                 "the NVIDIA driver is for CUDA %d.%d and the plugin was built by the toolkit %d.%d: install a newer "
                 "driver, or build the plugin with a toolkit of that version",
                 version / 1000, version % 1000 / 10, CUDA_TOOLKIT / 1000, CUDA_TOOLKIT % 1000 / 10);
        return false;
    }
    return true;
}

DDL_PLUGIN_EXPORT const ddl_plugin *ddl_plugin_cuda_v1(const ddl_host *host);
const ddl_plugin *ddl_plugin_cuda_v1(const ddl_host *host) {
    cuda_driver cu;
    char text[600];
    const char *why = cuda_driver_open(&cu, text, sizeof text);
    if (why == NULL && cuda_image() == NULL) {
        why = "this build of the plugin has no kernels: build it where nvcc is (make plugins)";
    }
    if (why != NULL) {
        cuda_log(host, DDL_LOG_WARN, "%s", why);
        return NULL;
    }
    return cuda_toolkit_fits(host, &cu) ? &cuda_plugin : NULL;
}

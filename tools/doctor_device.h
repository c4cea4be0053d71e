/* ddl-info --doctor, devices: what device plugins bring, whether bytes go through each device and between every two of
 * them unharmed, and why there may be none. */
#ifndef DDL_TOOLS_DOCTOR_DEVICE_H
#define DDL_TOOLS_DOCTOR_DEVICE_H

#include "finding.h"

enum { DEVICE_BYTES = 1 << 16 };
#define DEVICE_WAIT_NS (5 * DDL__NS_PER_S)

/* Waits for all that is on the stream of a device. */
static bool device_settle(const ddl__device *d) {
    void *event = NULL;
    uint64_t deadline = ddl__now_ns() + DEVICE_WAIT_NS;
    if (d->table->event_record(d->self, d->stream, &event) < 0) {
        return false;
    }
    ddl_status status;
    while ((status = d->table->event_test(d->self, event)) == DDL_IN_PROGRESS && ddl__now_ns() < deadline) {
        sched_yield();
    }
    d->table->event_free(d->self, event);
    return status == DDL_OK;
}

static bool device_copy(const ddl__device *d, void *dst, const void *src) {
    return d->table->copy(d->self, dst, src, DEVICE_BYTES, d->stream) == DDL_OK && device_settle(d);
}

/* Host -> device a -> device b (the same: none) -> host, and compares. NULL, or what fails. */
static const char *device_carry(const ddl__device *a, const ddl__device *b) {
    static uint8_t out[DEVICE_BYTES], in[DEVICE_BYTES];
    void *there = NULL, *beyond = NULL;
    const char *wrong = NULL;
    for (int32_t i = 0; i < DEVICE_BYTES; i++) {
        out[i] = (uint8_t)(i * 7 + i / 251 + a->number + 16 * b->number);
    }
    memset(in, 0xa5, sizeof in);
    if (a->table->alloc(a->self, DEVICE_BYTES, &there) < 0 || b->table->alloc(b->self, DEVICE_BYTES, &beyond) < 0) {
        wrong = "it has no memory left";
    } else if (!device_copy(a, there, out)) {
        wrong = "a copy to it fails";
    } else if (!device_copy(b, beyond, there)) {
        wrong = a == b ? "a copy inside it fails" : "a copy between them fails";
    } else if (!device_copy(b, in, beyond)) {
        wrong = "a copy from it fails";
    } else if (memcmp(in, out, sizeof in) != 0) {
        wrong = "the bytes that come back are others";
    }
    if (there != NULL) {
        a->table->free(a->self, there);
    }
    if (beyond != NULL) {
        b->table->free(b->self, beyond);
    }
    return wrong;
}

static void look_at_pair_of_devices(findings *f, ddl_context *c, int32_t a, int32_t b, int32_t *out_bad) {
    ddl__device *x = NULL, *y = NULL;
    const char *fix = a == b ? "nvidia-smi -q, dmesg (Xid lines); another process may hold its memory"
                             : "nvidia-smi topo -p2p rw; in a virtual machine or container pass both devices and their "
                               "switch; ACS of the PCIe switches off";
    if (ddl__device_get(c, a, "ddl-info", &x) < 0 || ddl__device_get(c, b, "ddl-info", &y) < 0) {
        ++*out_bad;
        found(f, 2, "devices", fix, "%.300s", ddl_error(c));
        return;
    }
    const char *wrong = x->plugin == y->plugin ? device_carry(x, y) : NULL;
    if (wrong != NULL) {
        ++*out_bad;
        found(f, 2, "devices", fix, "device %d%s%.0d (%s): %s", (int)a, a == b ? "" : " to device ", a == b ? 0 : (int)b,
              x->plugin->name, wrong);
    }
}

/* Of a rank's own devices; a machine has few. */
static void look_at_devices(findings *f, ddl_context *c) {
    int32_t count = c->devices != NULL ? c->devices->count : 0, bad = 0;
    bool cuda = false;
    for (const ddl__plugin_record *p = c->loader.loaded; p != NULL; p = p->next) {
        cuda = cuda || strcmp(p->name, "cuda") == 0;
    }
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL); /* stays open: it has threads */
    if (driver != NULL && !cuda) {
        found(f, 1, "CUDA", "make plugins, and DDL_PLUGIN_PATH=folder of libddl-cuda.so, on all ranks",
              "the driver is here (libcuda.so.1), but the plugin cuda is not loaded");
    } else if (driver == NULL && access("/dev/nvidiactl", F_OK) == 0) {
        found(f, 1, "CUDA", "install the driver's libraries, or run the container with --gpus all (nvidia-container-toolkit)",
              "/dev/nvidiactl is here, but libcuda.so.1 is not found");
    } else if (driver == NULL) {
        found(f, 0, "CUDA", "", "no driver is here (libcuda.so.1)");
    } else if (count == 0) {
        found(f, 1, "CUDA", "nvidia-smi; CUDA_VISIBLE_DEVICES must not be empty", "the driver is here, but has no device");
    }
    ddl__lock(c);
    for (int32_t a = 1; a <= count; a++) {
        for (int32_t b = 1; b <= count; b++) {
            look_at_pair_of_devices(f, c, a, b, &bad);
        }
    }
    ddl__unlock(c);
    if (count > 0 && bad == 0) {
        found(f, 0, "devices", "", "%d; 64 KiB through each and between every two came back as they were", (int)count);
    }
}

#endif /* DDL_TOOLS_DOCTOR_DEVICE_H */

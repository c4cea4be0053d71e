/* library: libfabric, opened when an endpoint is. The functions that are not inline are looked up here, once for each
 * endpoint; there are six.
 *
 * Why it is not linked: a program finds this plugin in a folder and may never use it. To load libfabric takes some 50
 * ms, its first fi_getinfo some 100 ms more, and the libraries behind it (PSM) install handlers for SIGSEGV and others
 * as they load. So it is loaded when it is needed, and the handlers are put back as they were. */
#ifndef FABRIC_LIBRARY_H
#define FABRIC_LIBRARY_H

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>

#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What we ask for, and the oldest library that gives it: what is written here is in all from 1.14 to 2.x. */
#define FABRIC_API FI_VERSION(1, 14)

enum { FABRIC_SLOT_BYTES = 16384 }; /* the buffers of ofi_rxm: more costs it a round trip of its own; */
enum { FABRIC_HEADS_BYTES = 128 };    /* room for the heads before a payload */
#define FABRIC_SOCKETS_BUFFER "32896" /* the buffers that it is given over sockets: 32 KiB and the heads before them */
#define FABRIC_SOCKETS_EAGER "262272" /* what it sends without a round trip there: 256 KiB and the heads */

typedef struct fabric_library {
    int (*getinfo)(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **);
    void (*freeinfo)(struct fi_info *);
    struct fi_info *(*dupinfo)(const struct fi_info *);
    int (*fabric)(struct fi_fabric_attr *, struct fid_fabric **, void *);
    uint32_t (*version)(void);
    const char *(*strerror)(int);
} fabric_library;

static const int fabric_signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGABRT, SIGFPE, SIGTERM, SIGINT};
enum { FABRIC_SIGNALS = sizeof fabric_signals / sizeof fabric_signals[0] };

static void fabric_signals_save(struct sigaction *out) {
    for (int i = 0; i < FABRIC_SIGNALS; i++) {
        sigaction(fabric_signals[i], NULL, &out[i]);
    }
}

static void fabric_signals_restore(const struct sigaction *saved) {
    for (int i = 0; i < FABRIC_SIGNALS; i++) {
        struct sigaction now;
        if (sigaction(fabric_signals[i], NULL, &now) == 0 && now.sa_sigaction != saved[i].sa_sigaction) {
            sigaction(fabric_signals[i], &saved[i], NULL);
        }
    }
}

/* ISO C has no cast between pointers to data and to functions; POSIX does. */
static int fabric_symbol(void *library, const char *name, void *out_function) {
    void *address = dlsym(library, name);
    memcpy(out_function, &address, sizeof address);
    return address != NULL;
}

static int fabric_symbols(void *handle, fabric_library *out) {
    return fabric_symbol(handle, "fi_getinfo", &out->getinfo) && fabric_symbol(handle, "fi_freeinfo", &out->freeinfo) &&
           fabric_symbol(handle, "fi_dupinfo", &out->dupinfo) && fabric_symbol(handle, "fi_fabric", &out->fabric) &&
           fabric_symbol(handle, "fi_version", &out->version) &&
           fabric_symbol(handle, "fi_strerror", &out->strerror);
}

/* Choices that libfabric offers in no other way; the user's own, if there is one, stays.
 *
 * ofi_rxm of libfabric 1.17 crashes (SIGSEGV) when it closes a connection of verbs whose receives still hold messages: it
 * posts each anew on the endpoint that it has just closed. With receives that all connections share, as its tcp has
 * anyway, nothing is posted to a connection; they also take less memory. The variable is read whenever an endpoint is
 * opened, so it stays set.
 *
 * Without the other one ofi_rxm keeps the connection of an address that is removed, and goes on writing what is being
 * read from that peer into memory that was given back (fabric_cut).
 *
 * Over sockets, buffers of ofi_rxm of twice its 16 KiB: what fits them leaves without a round trip, and a payload of 32 KiB
 * takes half as long; what is longer, up to 256 KiB, leaves so from our memory, and is received into ours. With 512 of
 * them to receive into, which all connections share, instead of 4,096, ofi_rxm takes less memory than with its defaults
 * (tests/test_fabric_many.c). An adapter would pin them: there its defaults stay.
 *
 * Ports: the tcp provider listens where DDL_PORT_RANGE allows, so that a firewall may be closed but for these.
 *
 * They are set before libfabric is loaded. glibc orders setenv among threads, but not with a getenv at the same time:
 * docs/operations.md says what to do about that. */
static void fabric_library_variables(const char *port_range, int sockets) {
    char low[8], high[8];
    setenv("FI_OFI_RXM_USE_SRX", "1", 0);
    setenv("FI_AV_REMOVE_CLEANUP", "1", 0);
    if (sockets) {
        setenv("FI_OFI_RXM_BUFFER_SIZE", FABRIC_SOCKETS_BUFFER, 0);
        setenv("FI_OFI_RXM_MSG_RX_SIZE", "512", 0);
        setenv("FI_OFI_RXM_EAGER_LIMIT", FABRIC_SOCKETS_EAGER, 0);
    }
    if (port_range != NULL && sscanf(port_range, "%5[0-9]-%5[0-9]", low, high) == 2) {
        setenv("FI_TCP_PORT_LOW_RANGE", low, 0);
        setenv("FI_TCP_PORT_HIGH_RANGE", high, 0);
    }
}

/* Up to here ofi_rxm sends a message as one, in the order of the others; 0: up to its buffer. */
static uint64_t fabric_library_eager(void) {
    const char *text = getenv("FI_OFI_RXM_EAGER_LIMIT");
    uint64_t bytes = text != NULL ? strtoull(text, NULL, 10) : 0;
    return bytes < UINT32_MAX ? bytes : UINT32_MAX;
}

/* What ofi_rxm over sockets sends without a round trip of its own. */
static uint64_t fabric_library_buffer(void) {
    const char *text = getenv("FI_OFI_RXM_BUFFER_SIZE");
    uint64_t bytes = text != NULL ? strtoull(text, NULL, 10) : 0, most = strtoull(FABRIC_SOCKETS_BUFFER, NULL, 10);
    return bytes < FABRIC_SLOT_BYTES ? FABRIC_SLOT_BYTES : bytes < most ? bytes & ~(uint64_t)15 : most;
}

/* Whether tcp;ofi_rxm was told to move data without a call of ours: by a thread, or by the kernel. */
static int fabric_library_moves(void) {
    static const char *const names[] = {"FI_OFI_RXM_DATA_AUTO_PROGRESS", "FI_TCP_IO_URING"};
    int moves = 0;
    for (int i = 0; i < 2; i++) {
        const char *value = getenv(names[i]);
        moves |= value != NULL && value[0] != 0 && strchr("1tTyYoO", value[0]) != NULL && strcmp(value, "off") != 0;
    }
    return moves;
}

/* sockets: the tcp provider is asked for, or there is no adapter. Never closed: providers may have started threads. NULL: it
 * can be used; else a sentence why not. */
static const char *fabric_library_open(fabric_library *out, const char *port_range, int sockets) {
    struct sigaction saved[FABRIC_SIGNALS];
    fabric_library_variables(port_range, sockets);
    fabric_signals_save(saved);
    void *handle = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
    fabric_signals_restore(saved);
    if (handle == NULL) {
        return "libfabric.so.1 is not installed or cannot be loaded; install it (Debian, Ubuntu: libfabric1; AWS: the "
               "EFA installer)";
    }
    if (!fabric_symbols(handle, out)) {
        return "libfabric.so.1 lacks functions that every version has; it is damaged or another library";
    }
    if (FI_VERSION_LT(out->version(), FABRIC_API)) {
        return "libfabric is older than 1.14, the first version that this plugin was written for; install a newer one";
    }
    return NULL;
}

/* The first call looks for devices and loads what they need. */
static int fabric_getinfo(const fabric_library *lib, const char *node, uint64_t flags, const struct fi_info *hints,
                          struct fi_info **out) {
    struct sigaction saved[FABRIC_SIGNALS];
    *out = NULL;
    fabric_signals_save(saved);
    int result = lib->getinfo(FABRIC_API, node, NULL, flags, hints, out);
    fabric_signals_restore(saved);
    return result;
}

#endif /* FABRIC_LIBRARY_H */

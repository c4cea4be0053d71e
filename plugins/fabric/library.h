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

#include <dlfcn.h>
#include <gnu/libc-version.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What is written here is in all libraries from 1.14 to 2.x. Of one that has it, 1.18 is asked for: asked for less, EFA
 * does not read by the adapter of its first two kinds, and reaches no memory of GPUs there (efa_rdm_get_use_device_rdma in
 * prov/efa/src/rdm/efa_rdm_util.c). But never more than the headers are of: by that number the library tells how long our
 * structs are, and one of a later version would be right to read more than there is (up to 1.19 none does: pull request 8826 of
 * libfabric, which reads hmem_data of fi_mr_attr from then on). */
#define FABRIC_API_LEAST FI_VERSION(1, 14)
#define FABRIC_API_MOST FI_VERSION(1, 18)
#define FABRIC_API_HEADERS FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION)

enum {
    FABRIC_SLOT_BYTES = 16384,           /* the buffers of ofi_rxm: more costs it a round trip of its own */
    FABRIC_SLOT_CONNECTED = 32768 + 128 /* where there is no ofi_rxm: 32 KiB and the heads before them */
};

typedef struct fabric_library {
    int (*getinfo)(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **);
    void (*freeinfo)(struct fi_info *);
    struct fi_info *(*dupinfo)(const struct fi_info *);
    int (*fabric)(struct fi_fabric_attr *, struct fid_fabric **, void *);
    uint32_t (*version)(void);
    const char *(*strerror)(int);
    uint32_t api; /* that is asked for */
    int late;     /* fabric_library_late */
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

/* Held from save to restore, as handlers are the process's: of two contexts that begin at once one would take libfabric's
 * for those of before. */
static pthread_mutex_t fabric_signals_lock = PTHREAD_MUTEX_INITIALIZER;

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

/* Whether one of the lines, NAME=value each, has the name of this one. */
static int fabric_environ_has(char **lines, const char *line) {
    size_t length = (size_t)(strchr(line, '=') - line) + 1;
    while (lines != NULL && *lines != NULL && strncmp(*lines, line, length) != 0) {
        lines++;
    }
    return lines != NULL && *lines != NULL;
}

/* The last array that was made: each has behind its end the one before, as leak checkers want it. */
static char **fabric_environ_last;

/* Adds those lines to the environment whose names are not there, but leaves the array of before as it is: getenv of another
 * thread may be walking it, and setenv of glibc before 2.41 frees it (SIGSEGV in getenv). A longer copy takes its place. That
 * is no lock against setenv of another thread, which has one of its own: one of two changes at the same moment may be lost. */
static void fabric_environ_add(const char *const *lines, size_t count) {
    for (int tries = 0; tries < 100; tries++) { /* again where the array was replaced meanwhile */
        char **old = __atomic_load_n(&environ, __ATOMIC_ACQUIRE);
        size_t n = 0;
        while (old != NULL && old[n] != NULL) {
            n++;
        }
        char **longer = malloc((n + count + 2) * sizeof *longer);
        if (longer == NULL) {
            return;
        }
        size_t end = n;
        for (size_t i = 0; i < n; i++) {
            longer[i] = old[i];
        }
        for (size_t i = 0; i < count; i++) {
            longer[end] = fabric_environ_has(old, lines[i]) ? NULL : strdup(lines[i]);
            end += longer[end] != NULL;
        }
        longer[end] = NULL;
        if (end > n && __atomic_compare_exchange_n(&environ, &old, longer, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
            longer[end + 1] = (char *)__atomic_exchange_n(&fabric_environ_last, longer, __ATOMIC_ACQ_REL);
            return;
        }
        for (size_t i = n; i < end; i++) {
            free(longer[i]);
        }
        free(longer);
        if (end == n) {
            return;
        }
    }
}

/* Since 2.41 glibc sees to it itself, and has a lock. */
static int fabric_setenv_moves_nothing(void) {
    int major = 0, minor = 0;
    return sscanf(gnu_get_libc_version(), "%d.%d", &major, &minor) == 2 && (major > 2 || (major == 2 && minor >= 41));
}

/* Whether EFA is to be told that this process may fork. Where a word of rdma-core says so it is told already; with huge pages
 * it would open no domain. */
static int fabric_library_may_fork(void) {
    return getenv("RDMAV_FORK_SAFE") == NULL && getenv("IBV_FORK_SAFE") == NULL && getenv("RDMAV_HUGEPAGES_SAFE") == NULL;
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
 * EFA ends a process that forks while it has a domain, as a data loader does on a kernel before 5.13, unless it was told
 * (efa_atfork_callback_warn_and_abort in prov/efa/src/efa_fork_support.c). Told, rdma-core gives a child none of the pages that are
 * registered (MADV_DONTFORK), for a system call at each registration, as verbs does unasked; newer kernels copy them, and
 * nothing is done.
 *
 * Ports: the tcp provider listens where DDL_PORT_RANGE allows, so that a firewall may be closed but for these.
 *
 * They are set before libfabric is loaded, unless the program has done that: fabric_library_late. */
static void fabric_library_variables(const char *port_range) {
    char low[8], high[8], low_line[40], high_line[40];
    const char *lines[5] = {"FI_OFI_RXM_USE_SRX=1", "FI_AV_REMOVE_CLEANUP=1"};
    size_t count = 2;
    if (fabric_library_may_fork()) {
        lines[count++] = "FI_EFA_FORK_SAFE=1";
    }
    if (port_range != NULL && sscanf(port_range, "%5[0-9]-%5[0-9]", low, high) == 2) {
        snprintf(low_line, sizeof low_line, "FI_TCP_PORT_LOW_RANGE=%s", low);
        snprintf(high_line, sizeof high_line, "FI_TCP_PORT_HIGH_RANGE=%s", high);
        lines[count++] = low_line;
        lines[count++] = high_line;
    }
    if (!fabric_setenv_moves_nothing()) {
        fabric_environ_add(lines, count);
        return;
    }
    for (size_t i = 0; i < count; i++) {
        char name[40];
        snprintf(name, sizeof name, "%.*s", (int)strcspn(lines[i], "="), lines[i]);
        setenv(name, strchr(lines[i], '=') + 1, 0);
    }
}

/* Whether tcp was told to leave data to the kernel, which then reads and writes memory also when its connection is closed. */
static int fabric_library_moves(void) {
    const char *ring = getenv("FI_TCP_IO_URING"), *zero_copy = getenv("FI_TCP_ZEROCOPY_SIZE");
    int moves = ring != NULL && ring[0] != 0 && strchr("1tTyYoO", ring[0]) != NULL && strcmp(ring, "off") != 0;
    return moves || (zero_copy != NULL && zero_copy[0] != 0 && strcmp(zero_copy, "-1") != 0);
}

/* Whether libfabric was loaded before the first of us came, without FI_AV_REMOVE_CLEANUP, which it reads once: it may have done
 * so. Under fabric_signals_lock; of the process, as the library is. */
static int fabric_library_late(void) {
    static int known, late;
    if (!known) {
        known = 1;
        late = getenv("FI_AV_REMOVE_CLEANUP") == NULL && dlopen("libfabric.so.1", RTLD_NOLOAD | RTLD_LAZY) != NULL;
    }
    return late;
}

static uint32_t fabric_library_api(uint32_t headers, uint32_t library) {
    uint32_t most = FI_VERSION_LT(headers, FABRIC_API_MOST) ? headers : FABRIC_API_MOST;
    return FI_VERSION_LT(library, most) ? FABRIC_API_LEAST : most;
}

/* Never closed: providers may have started threads. NULL: it
 * can be used; else a sentence why not. */
static const char *fabric_library_open(fabric_library *out, const char *port_range) {
    struct sigaction saved[FABRIC_SIGNALS];
    pthread_mutex_lock(&fabric_signals_lock);
    out->late = fabric_library_late();
    fabric_library_variables(port_range);
    fabric_signals_save(saved);
    void *handle = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
    fabric_signals_restore(saved);
    pthread_mutex_unlock(&fabric_signals_lock);
    if (handle == NULL) {
        return "libfabric.so.1 is not installed or cannot be loaded; install it (Debian, Ubuntu: libfabric1; AWS: the "
               "EFA installer)";
    }
    if (!fabric_symbols(handle, out)) {
        return "libfabric.so.1 lacks functions that every version has; it is damaged or another library";
    }
    out->api = fabric_library_api(FABRIC_API_HEADERS, out->version());
    if (FI_VERSION_LT(out->version(), FABRIC_API_LEAST)) {
        return "libfabric is older than 1.14, the first version that this plugin was written for; install a newer one";
    }
    return NULL;
}

/* The first call looks for devices and loads what they need. */
static int fabric_getinfo(const fabric_library *lib, const char *node, uint64_t flags, const struct fi_info *hints,
                          struct fi_info **out) {
    struct sigaction saved[FABRIC_SIGNALS];
    *out = NULL;
    pthread_mutex_lock(&fabric_signals_lock);
    fabric_signals_save(saved);
    int result = lib->getinfo(lib->api, node, NULL, flags, hints, out);
    fabric_signals_restore(saved);
    pthread_mutex_unlock(&fabric_signals_lock);
    return result;
}

#endif /* FABRIC_LIBRARY_H */

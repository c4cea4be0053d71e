/* cuda_standin.h: plugins/cuda over the stand-in for the driver (cuda_driver.c), and a small host for it. A program includes
 * this and not the plugin: the plugin's source is a part of the test, so that sanitizers see it. */
#ifndef TEST_CUDA_STANDIN_H
#define TEST_CUDA_STANDIN_H

#include "test.h"

#define CUDA_IMAGE "the stand-in takes any image"
#include "../plugins/cuda/cuda.c"

#include <dlfcn.h>

/* ---- the stand-in ---- */

static struct {
    void (*fail)(const char *function, long n, CUresult result);
    long (*calls)(void);
    int (*live)(char *text, size_t bytes);
    int (*imports)(void);
    void (*capture)(CUstream stream, int on);
    void (*break_peers)(int on);
    void (*without)(int vmm, int ipc, int words);
    void (*memory)(size_t bytes);
    int (*depth)(void);
} standin;

static char standin_folder[64];

static pid_t standin_maker; /* a forked rank removes nothing */

static void standin_remove(void) {
    char path[128];
    if (getpid() != standin_maker) {
        return;
    }
    snprintf(path, sizeof path, "%s/libcuda.so.1", standin_folder);
    unlink(path);
    rmdir(standin_folder);
}

/* Compiles it, once for the program. With kernels it takes longer. */
static int standin_build(int kernels) {
    char command[1400], here[300] = __FILE__, made[200];
    char *slash = strrchr(here, '/');
    snprintf(slash != NULL ? slash : here, 3, "%s", slash != NULL ? "" : ".");
    snprintf(standin_folder, sizeof standin_folder, "/tmp/ddl-standin-XXXXXX");
    if (mkdtemp(standin_folder) == NULL) {
        return -1;
    }
    standin_maker = getpid();
    atexit(standin_remove);
    snprintf(made, sizeof made, "%s/kernels.o", standin_folder);
    snprintf(command, sizeof command,
             "gcc -std=c11 -g -w -fPIC -c -o %s/driver.o %s/cuda_driver.c && %s%s%s%s%s "
             "gcc -shared -Wl,-soname,libcuda.so.1 -o %s/libcuda.so.1 %s/*.o -lstdc++ -lpthread -lm && rm %s/*.o",
             standin_folder, here, kernels ? "g++ -std=c++17 -O1 -w -fPIC -fno-strict-aliasing -ffp-contract=off -c -o " : "",
             kernels ? made : "", kernels ? " " : "", kernels ? here : "", kernels ? "/cuda_cpu.cc &&" : "",
             standin_folder, standin_folder, standin_folder);
    return system(command);
}

/* Opened by its path here, it is the libcuda.so.1 that the plugin finds: the loader goes by that name. */
static int standin_open(void) {
    char path[128];
    snprintf(path, sizeof path, "%s/libcuda.so.1", standin_folder);
    void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return -1;
    }
#define STANDIN_FIND(member)                                                                                           \
    {                                                                                                                  \
        void *found = dlsym(library, "standin_" #member);                                                              \
        memcpy(&standin.member, &found, sizeof found);                                                                 \
    }
    STANDIN_FIND(fail)
            STANDIN_FIND(calls) STANDIN_FIND(live) STANDIN_FIND(imports) STANDIN_FIND(capture) STANDIN_FIND(break_peers)
                STANDIN_FIND(without) STANDIN_FIND(memory) STANDIN_FIND(depth) return standin.depth != NULL
        ? 0
        : -1;
}

/* The stand-in, built and opened when it is first needed. Forked ranks that need one each: build before, open there. */
static int standin_need(int kernels) {
    return standin.fail != NULL || ((standin_folder[0] != 0 || standin_build(kernels) == 0) && standin_open() == 0);
}

/* ---- a host ---- */

typedef struct small_host {
    ddl_host host; /* first */
    _Atomic int blocks;
    int warnings;
    char said[700]; /* the last warning */
} small_host;

static void *small_alloc(const ddl_host *host, size_t bytes) {
    void *p = malloc(bytes);
    memset(p, 0xa5, bytes);
    ((small_host *)(uintptr_t)host)->blocks++;
    return p;
}
static void small_free(const ddl_host *host, void *memory) {
    ((small_host *)(uintptr_t)host)->blocks -= memory != NULL;
    free(memory);
}
static void small_log(const ddl_host *host, ddl_log_level level, const char *line) {
    small_host *h = (small_host *)(uintptr_t)host;
    if (level == DDL_LOG_WARN) {
        h->warnings++;
        snprintf(h->said, sizeof h->said, "%s", line);
    }
}
static const char *small_setting(const ddl_host *host, const char *name) {
    (void)host, (void)name;
    return NULL;
}
static uint64_t small_now_ns(const ddl_host *host) {
    (void)host;
    return (uint64_t)(test_now_s() * 1e9);
}
static void small_host_make(small_host *h) {
    memset(h, 0, sizeof *h);
    h->host = (ddl_host){.size = sizeof(ddl_host),
                         .abi = DDL_PLUGIN_ABI,
                         .core = h,
                         .alloc = small_alloc,
                         .free = small_free,
                         .log = small_log,
                         .setting = small_setting,
                         .now_ns = small_now_ns};
}

/* Nothing of the driver's or the host's is left. */
#define CHECK_NOTHING_LEFT(h)                                                                                          \
    do {                                                                                                               \
        char left_[300];                                                                                               \
        if (standin.live(left_, sizeof left_) != 0 || (h)->blocks != 0) {                                              \
            test__fail(__FILE__, __LINE__, "left: %s; %d blocks of memory", left_, (h)->blocks);                       \
        }                                                                                                              \
        CHECK_EQ(standin.depth(), 0);                                                                                  \
    } while (0)

#endif /* TEST_CUDA_STANDIN_H */

/* device.h: the stand-in for a device, for tests of what the core does with devices.
 *
 *     standin("");                              before ranks start: compiles it, and lets jobs find it
 *     standin("1");                             the same without optional members
 *     standin("native");                        with collectives of its own, for ranks that are threads
 *     standin_state *s = standin_of();          what tests can do to it, in this process */
#ifndef TEST_DEVICE_H
#define TEST_DEVICE_H

#include "coll.h"
#include "device_standin.h"

#include <dlfcn.h>
#include <limits.h>

static char standin_folder[] = "/tmp/ddl-standin-XXXXXX";
static pid_t standin_maker;

static inline void standin_remove(void) {
    char command[256];
    if (getpid() == standin_maker) { /* not in forked ranks */
        snprintf(command, sizeof command, "rm -r %s", standin_folder);
        (void)!system(command);
    }
}

static inline void standin(const char *bare) {
    static bool made;
    char tests[PATH_MAX], command[5 * PATH_MAX];
    if (!made) {
        snprintf(tests, sizeof tests, "%s", __FILE__);
        *strrchr(tests, '/') = 0;
        made = mkdtemp(standin_folder) != NULL;
        standin_maker = getpid();
        atexit(standin_remove);
        snprintf(command, sizeof command, "cc -std=c11 -D_GNU_SOURCE -g -O1 -w -shared -fPIC -fvisibility=hidden "
                 "-I%s -I%s/.. -o %s/libddl-standin.so %s/device_standin.c -lpthread", tests, tests, standin_folder, tests);
        made = made && system(command) == 0;
    }
    REQUIRE(made);
    setenv("DDL_PLUGIN_PATH", standin_folder, 1);
    setenv("DDL_PLUGINS", "standin", 1);
    setenv("DDL_STANDIN_BARE", bare, 1);
    setenv("DDL_STANDIN_NATIVE", strcmp(bare, "native") == 0 ? "1" : "0", 1);
}

/* What the stand-in exports for tests. After ddl_init: it is loaded then. */
static inline void *standin_symbol(const char *name) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/libddl-standin.so", standin_folder);
    void *handle = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    void *symbol = handle != NULL ? dlsym(handle, name) : NULL;
    CHECK(symbol != NULL);
    return symbol;
}

static inline standin_state *standin_of(void) { return (standin_state *)standin_symbol("standin_control"); }

/* Its table, to put work on streams as a program with kernels of its own does. */
static inline const ddl_device *standin_table(void) { return (const ddl_device *)standin_symbol("standin_device"); }

/* A tensor on a device that holds the bytes. */
static inline ddl_tensor standin_tensor(ddl_context *c, int32_t device, const void *bytes, ddl_dtype dtype,
                                        int64_t count) {
    ddl_tensor t = {0};
    CHECK_EQ(ddl_tensor_alloc_on(c, device, dtype, 1, &count, &t), DDL_OK);
    if (bytes != NULL) {
        CHECK_EQ(ddl_tensor_copy(c, t, ddl_tensor_1d(bytes, dtype, count)), DDL_OK);
    }
    return t;
}

/* What a tensor on a device holds. */
static inline void standin_read(ddl_context *c, ddl_tensor t, void *out) {
    CHECK_EQ(ddl_tensor_copy(c, ddl_tensor_1d(out, t.dtype, ddl_tensor_count(&t)), t), DDL_OK);
}

#endif /* TEST_DEVICE_H */

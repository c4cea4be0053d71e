/* Functions of the driver library, or of its stand-in, as tests call them beside the plugin. */
#ifndef CUDA_SYMBOL_H
#define CUDA_SYMBOL_H

#include "test.h"

#include <dlfcn.h>

/* Ranks may be threads: the library is opened by the first, and by others at worst once more. */
static void *cuda_symbol(const char *name) {
    static _Atomic(void *) library;
    if (library == NULL) {
        library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    }
    void *found = library != NULL ? dlsym(library, name) : NULL;
    CHECK(found != NULL);
    return found;
}

#define DRIVER(type, name) ((type)cuda_symbol(name))
#define DRIVER_CALL(name, ...) DRIVER(int (*)(__VA_ARGS__), name) /* with the types of its arguments */

#endif /* CUDA_SYMBOL_H */

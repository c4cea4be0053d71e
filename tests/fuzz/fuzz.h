/* What all fuzz targets share. A target is one C file; this is all it takes:
 *     clang -std=c11 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -I. \
 *         tests/fuzz/fuzz_NAME.c -o fuzz_NAME -lpthread -ldl && ./fuzz_NAME tests/fuzz/corpus/NAME
 * tests/test_fuzz.py does that; RUNS.md says what has been run. */
#ifndef FUZZ_H
#define FUZZ_H

#define _GNU_SOURCE 1
#ifndef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION
#define FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION 1 /* a cheap mixing in place of SHA-256: see src/wire/sha256.h */
#endif

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define REQUIRE(cond)                                                                                                  \
    do {                                                                                                               \
        if (!(cond)) {                                                                                                 \
            __builtin_trap();                                                                                          \
        }                                                                                                              \
    } while (0)

/* For code of the target itself: its branches are not worth inputs of their own. */
#define FUZZ_QUIET __attribute__((no_sanitize("coverage")))

/* A sentence may go to a terminal: it ends, and has no control characters. */
__attribute__((no_sanitize("address", "undefined", "coverage"))) static inline void fuzz_clean(const char *text,
                                                                                               size_t cap) {
    size_t n = 0;
    while (n < cap && text[n] != 0) {
        REQUIRE((unsigned char)text[n] >= 32 && text[n] != 127);
        n++;
    }
    REQUIRE(n < cap);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Freed memory is kept poisoned for a while; the default of 256 MiB of it is more than caches like. */
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "quarantine_size_mb=2:malloc_context_size=4"; }

/* The input, read field by field; zeros after its end. */
typedef struct fuzz_input {
    const uint8_t *at, *end;
} fuzz_input;

static inline size_t fuzz_left(const fuzz_input *in) { return (size_t)(in->end - in->at); }

static inline uint8_t fuzz_u8(fuzz_input *in) { return in->at < in->end ? *in->at++ : 0; }

static inline uint64_t fuzz_int(fuzz_input *in, size_t bytes) {
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; i++) {
        value |= (uint64_t)fuzz_u8(in) << (8 * i);
    }
    return value;
}

/* The next bytes in place, at most what is left. */
static inline const uint8_t *fuzz_take(fuzz_input *in, size_t *bytes) {
    const uint8_t *p = in->at;
    *bytes = *bytes < fuzz_left(in) ? *bytes : fuzz_left(in);
    in->at += *bytes;
    return p;
}

#endif

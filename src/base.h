/* base: what every room above stands on: error sentences, log, clock, memory hook, hash.
 * It must not know of ranks, sockets or tensors. */
#ifndef DDL_BASE_H
#define DDL_BASE_H

#include "plugin.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define DDL__COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define DDL__MIN(a, b) ((a) < (b) ? (a) : (b))
#define DDL__MAX(a, b) ((a) > (b) ? (a) : (b))
#define DDL__NS_PER_MS 1000000ull
#define DDL__NS_PER_S 1000000000ull
#define DDL__NEVER UINT64_MAX /* a deadline that does not come */

/* Passes an error on: the sentence has been written where it happened. */
#define DDL__TRY(call)                                                                                                 \
    do {                                                                                                               \
        ddl_status try_status_ = (call);                                                                               \
        if (try_status_ < 0) {                                                                                         \
            return try_status_;                                                                                        \
        }                                                                                                              \
    } while (0)

DDL_API const char *ddl_status_name(ddl_status status) {
    switch (status) {
#define DDL__STATUS_NAME(name, value, text)                                                                            \
    case name:                                                                                                         \
        return #name;
        DDL_STATUS_LIST(DDL__STATUS_NAME)
#undef DDL__STATUS_NAME
    }
    return "DDL_?";
}

DDL_API const char *ddl_status_text(ddl_status status) {
    switch (status) {
#define DDL__STATUS_TEXT(name, value, text)                                                                            \
    case name:                                                                                                         \
        return text;
        DDL_STATUS_LIST(DDL__STATUS_TEXT)
#undef DDL__STATUS_TEXT
    }
    return "unknown status";
}

/* An error sentence and its status, kept by whoever reports it. Long enough for a mismatch with two calls in it. */
#define DDL__SENTENCE_BYTES 1024
typedef struct ddl__sentence {
    ddl_status status;
    char text[DDL__SENTENCE_BYTES];
} ddl__sentence;

/* Writes the sentence and returns the status, so that an error is one `return ddl__fail(...)`. errno is kept.
 * sentence may be NULL. */
static ddl_status __attribute__((format(printf, 3, 4))) ddl__fail(ddl__sentence *sentence, ddl_status status,
                                                                 const char *format, ...) {
    int saved = errno;
    if (sentence != NULL) {
        va_list args;
        va_start(args, format);
        vsnprintf(sentence->text, sizeof sentence->text, format, args);
        va_end(args);
        sentence->status = status;
    }
    errno = saved;
    return status;
}

/* Text that is built piece by piece in a fixed buffer; what does not fit is counted and dropped. */
typedef struct ddl__text {
    char *out;
    size_t cap, used;
} ddl__text;

static void __attribute__((format(printf, 2, 3))) ddl__text_add(ddl__text *text, const char *format, ...) {
    size_t at = DDL__MIN(text->used, text->cap);
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text->cap > at ? text->out + at : NULL, text->cap - at, format, args);
    va_end(args);
    text->used += n > 0 ? (size_t)n : 0;
}

static uint64_t ddl__now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * DDL__NS_PER_S + (uint64_t)t.tv_nsec;
}

/* now + ms, and never for a negative ms. */
static uint64_t ddl__deadline(uint64_t now_ns, int64_t ms) {
    return ms < 0 ? DDL__NEVER : now_ns + (uint64_t)ms * DDL__NS_PER_MS;
}

/* Memory and log of one context: the part of it that low rooms may see. The counters are under the context's lock. */
typedef struct ddl__base {
    ddl_allocator allocator; /* alloc NULL: malloc and free */
    ddl_log_fn log;
    void *log_user;
    ddl_log_level log_level;
    int32_t rank; /* only to sign log lines; -1 until it is known */
    uint64_t memory, memory_peak;
} ddl__base;

static void __attribute__((format(printf, 3, 4))) ddl__log(const ddl__base *base, ddl_log_level level,
                                                          const char *format, ...) {
    if (level > base->log_level) {
        return;
    }
    int saved = errno;
    char line[DDL__SENTENCE_BYTES + 64];
    ddl__text text = {line, sizeof line, 0};
    if (base->rank >= 0) {
        ddl__text_add(&text, "ddl: rank %d: ", base->rank);
    } else {
        ddl__text_add(&text, "ddl: ");
    }
    va_list args;
    va_start(args, format);
    vsnprintf(line + text.used, sizeof line - text.used, format, args);
    va_end(args);
    if (base->log != NULL) {
        base->log(base->log_user, level, line);
    } else {
        fprintf(stderr, "%s\n", line);
    }
    errno = saved;
}

/* Each block remembers its size, for the count of memory held. 16 bytes keep malloc's alignment. */
#define DDL__SIZE_BYTES 16

/* Zeroed memory or NULL. */
static void *ddl__alloc(ddl__base *base, size_t bytes) {
    if (bytes > SIZE_MAX - DDL__SIZE_BYTES) {
        return NULL;
    }
    size_t whole = bytes + DDL__SIZE_BYTES;
    char *block = base->allocator.alloc != NULL ? base->allocator.alloc(base->allocator.user, whole) : malloc(whole);
    if (block == NULL) {
        return NULL;
    }
    memset(block, 0, whole);
    memcpy(block, &whole, sizeof whole);
    base->memory += whole;
    base->memory_peak = DDL__MAX(base->memory_peak, base->memory);
    return block + DDL__SIZE_BYTES;
}

static void ddl__free(ddl__base *base, void *memory) {
    if (memory == NULL) {
        return;
    }
    char *block = (char *)memory - DDL__SIZE_BYTES;
    size_t whole;
    memcpy(&whole, block, sizeof whole);
    base->memory -= whole;
    if (base->allocator.free != NULL) {
        base->allocator.free(base->allocator.user, block);
    } else {
        free(block);
    }
}

/* count * bytes, NULL when that overflows. */
static void *ddl__alloc_array(ddl__base *base, size_t count, size_t bytes) {
    size_t whole;
    return __builtin_mul_overflow(count, bytes, &whole) ? NULL : ddl__alloc(base, whole);
}

static char *ddl__copy_string(ddl__base *base, const char *string) {
    size_t bytes = strlen(string) + 1;
    char *copy = ddl__alloc(base, bytes);
    if (copy != NULL) {
        memcpy(copy, string, bytes);
    }
    return copy;
}

/* Mixes a word into a hash: the finalizer of splitmix64 (Steele, Lea, Flood, OOPSLA 2014). For signatures of calls:
 * collisions must be unlikely, not hard to make. */
static uint64_t ddl__mix(uint64_t hash, uint64_t word) {
    uint64_t z = (hash ^ word) + 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

static uint64_t ddl__mix_bytes(uint64_t hash, const void *data, size_t bytes) {
    const unsigned char *at = data;
    for (size_t i = 0; i < bytes; i++) {
        hash = ddl__mix(hash, at[i]);
    }
    return ddl__mix(hash, bytes);
}

#endif /* DDL_BASE_H */

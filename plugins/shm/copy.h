/* copy: how bytes are copied, where memcpy is not the best way.
 *
 * Past the caches: a store to a line that is in memory first fetches it; a streaming store does not, which
 * saves a third of what a large copy moves. Where the line is in the cache of a near core it loses: what is staged for a
 * rank there is written in the ordinary way (1 MiB by broadcast: 90 us, or 127 if it is streamed; EPYC). See distance.h. */
#ifndef SHM_COPY_H
#define SHM_COPY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#ifndef SHM_FAR_BYTES
#define SHM_FAR_BYTES (8u << 20) /* of a result: its beginning has left the caches when its end comes */
#endif
#define SHM_STREAMED_LEAST 2048u /* less is slower than an ordinary copy */
#define SHM_OWN_LEAST 2048u      /* of a message: up to 1 KiB shm_own_ahead gains nothing */
#define SHM_STRING_LEAST 2048u   /* from here on glibc's memcpy copies strings */
#define SHM_LINES_MOST (1u << 20) /* what is longer does not come out of one core's cache */

/* Copies whole words one by one, as somebody has just written them: a wider load would wait until those have left the
 * store buffer. `to` is aligned to 8. */
static inline void shm_copy_words(void *to, const void *from, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t word;
        memcpy(&word, (const uint8_t *)from + i, sizeof word);
        /* Relaxed: others see them by a later release. Atomic, or the compiler makes wide ones of them. */
        atomic_store_explicit((_Atomic uint64_t *)(void *)((uint8_t *)to + i), word, memory_order_relaxed);
    }
}

/* Zen 3 and 4 copy strings at 3 GB/s instead of 50 where the destination is 1 to 31 bytes behind the source within its
 * page (glibc bug 30994; newer ones avoid it), and that is where most of malloc is: 16 bytes behind pages of ours. */
static inline bool shm_strings_stumble(const void *to, const void *from) {
    return ((uintptr_t)to - (uintptr_t)from) % 4096 - 1 < 31;
}

/* Whether this processor is one of those, by its family. Our own copies avoid it on any, at no cost; the kernel's do not,
 * and to avoid it for them costs a copy. */
static bool shm_may_stumble(void) {
#if defined(__x86_64__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    char maker[13] = "";
    __get_cpuid(0, &a, &b, &c, &d);
    memcpy(maker, &b, 4);
    memcpy(maker + 4, &d, 4);
    memcpy(maker + 8, &c, 4);
    unsigned family = __get_cpuid(1, &a, &b, &c, &d) != 0 ? (a >> 8 & 15u) + (a >> 20 & 255u) : 0;
    return strcmp(maker, "AuthenticAMD") == 0 && family == 0x19;
#else
    return false;
#endif
}

/* Whether shm_copy_past is more than a copy. */
#if defined(__x86_64__)
#define SHM_STREAMS 1
#else
#define SHM_STREAMS 0
#endif

#if defined(__x86_64__)
/* Whole lines, to the beginning of one. */
__attribute__((target("avx2"))) static void shm_copy_lines(uint8_t *to, const uint8_t *from, uint64_t bytes) {
    for (uint64_t at = 0; at < bytes; at += 64) {
        __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)(from + at));
        __m256i high = _mm256_loadu_si256((const __m256i *)(const void *)(from + at + 32));
        _mm256_store_si256((__m256i *)(void *)(to + at), low);
        _mm256_store_si256((__m256i *)(void *)(to + at + 32), high);
    }
    _mm256_zeroupper(); /* gcc adds it by itself only from -O2 */
}
#endif

/* As memcpy, which copies strings from SHM_STRING_LEAST on. What another core has just written comes line by line, and
 * loads ask for more of them at once: all_to_all of 128 KiB between two cores of one cache takes 0.80 of the time,
 * all_reduce of 32 KiB 0.86 (EPYC). */
static inline void shm_memcpy(void *to, const void *from, uint64_t bytes) {
    uint8_t *dst = to;
    const uint8_t *src = from;
    uint64_t done = 0;
#if defined(__x86_64__)
    bool lines = bytes >= SHM_STRING_LEAST && (bytes <= SHM_LINES_MOST || shm_strings_stumble(to, from));
    if (lines && __builtin_cpu_supports("avx2")) {
        uint64_t head = (0 - (uint64_t)(uintptr_t)dst) % 64;
        memcpy(dst, src, (size_t)head);
        done = head + (bytes - head) / 64 * 64;
        shm_copy_lines(dst + head, src + head, done - head);
    }
#endif
    memcpy(dst + done, src + done, (size_t)(bytes - done));
}

/* What is written is visible to others in the order of the stores that follow, as with memcpy. */
static inline void shm_copy_past(void *to, const void *from, uint64_t bytes) {
#if defined(__x86_64__)
    uint8_t *dst = to;
    const uint8_t *src = from;
    uint64_t head = (0 - (uint64_t)(uintptr_t)dst) % 64, at;
    if (bytes >= SHM_STREAMED_LEAST) {
        memcpy(dst, src, head);
        for (at = head; at + 64 <= bytes; at += 64) {
            for (uint64_t k = 0; k < 64; k += 16) {
                _mm_stream_si128((__m128i *)(void *)(dst + at + k),
                                 _mm_loadu_si128((const __m128i *)(const void *)(src + at + k)));
            }
        }
        _mm_sfence(); /* streaming stores are not ordered otherwise */
        memcpy(dst + at, src + at, bytes - at);
        return;
    }
#endif
    shm_memcpy(to, from, bytes);
}

/* Is the string copy of this processor fast (ERMS)? */
static bool shm_copies_strings(void) {
#if defined(__x86_64__)
    unsigned a, b = 0, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & 1u << 9) != 0;
#else
    return false;
#endif
}

/* Into lines that the reader's core holds from the last time: a string copy asks for many of them at once, where stores
 * get them one after another. 4 KiB by ping-pong between cores that are far apart:
 * 1.20 us, or 0.77 so; between near ones no difference (EPYC). */
static inline void shm_copy_over(void *to, const void *from, uint64_t bytes, bool strings) {
#if defined(__x86_64__)
    if (strings && bytes >= SHM_STRING_LEAST && !shm_strings_stumble(to, from)) {
        __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
        return;
    }
#else
    (void)strings; /* false */
#endif
    shm_memcpy(to, from, bytes);
}

/* Asks for what another core has written, all lines at once, while its header is looked at. With AVX2 the core copies by
 * wide loads, which ask as early, and what is asked here only takes time: 8 KiB by ping-pong between cores of one cache
 * take 0.97 of the time without (EPYC). */
static inline void shm_ask_ahead(const uint8_t *from, uint64_t bytes) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        return;
    }
#endif
    for (uint64_t at = 0; at < bytes; at += 64) {
        __builtin_prefetch(from + at);
    }
}

/* Makes a cache line ours before it is written, so that the write itself is not waited for. */
static inline void shm_prefetch_write(const void *line) {
#if defined(__x86_64__)
    __asm__ volatile("prefetchw %0" : : "m"(*(const char *)line));
#else
    __builtin_prefetch(line, 1);
#endif
}

/* The same for many lines, where the next record will be written; they come while the receiver copies this one out. */
static inline void shm_own_ahead(const uint8_t *to, uint64_t bytes) {
    for (uint64_t at = 0; at < bytes; at += 64) {
        shm_prefetch_write(to + at);
    }
}

#endif /* SHM_COPY_H */

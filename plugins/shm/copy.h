/* copy: copying past the caches. A store to a line that is in memory first fetches it; a streaming store does not, which
 * saves a third of what a large copy moves. Where the line is in somebody's cache it loses: what is staged for another
 * rank is written in the ordinary way (1 MiB by broadcast: 90 us, or 127 if it is streamed; EPYC). */
#ifndef SHM_COPY_H
#define SHM_COPY_H

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#ifndef SHM_FAR_BYTES
#define SHM_FAR_BYTES (8u << 20) /* of a result: its beginning has left the caches when its end comes */
#endif
#define SHM_STREAMED_LEAST 2048u /* less is slower than an ordinary copy */

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
    memcpy(to, from, (size_t)bytes);
}

#endif /* SHM_COPY_H */

/* distance: how far the core of another rank is, and how to write what that rank will read. The time of one load tells, of
 * a word that the peer has just written: 50 ns between cores of one cache, 150 between others (EPYC), where memory answers
 * within 140. Data comes faster out of a near core's cache than from memory. Out of that of a distant one it comes slower
 * than from memory, and to write there again costs as much; so for that one it is written past the caches. 2 ranks on
 * distant cores: all_reduce of 64 KiB and 1 MiB takes 0.56 and 0.48 of the time, ping_pong of 64 KiB and 1 MiB 0.54 and 0.55.
 * On near cores it would take 1.1 to 1.8 times as long.
 *
 * Ranks move from core to core, and virtual machines under them, so it is measured again now and then. Each rank decides for
 * what it writes itself, and nobody depends on it. A rank that sends and is sent nothing large measures nothing, and takes its
 * peers to be near. It must not know messages or operations. */
#ifndef SHM_DISTANCE_H
#define SHM_DISTANCE_H

#include "copy.h"
#include "segment.h"

#define SHM_DISTANT_LEAST 4096u /* what is smaller does not gain */
#define SHM_LISTEN_EACH 64u     /* so many times that something large has come */

/* Writes the word by which others measure, before something large is published: who finds that finds the word in this
 * core's cache. */
static inline void shm_sound(shm *t) {
    _Atomic uint32_t *word = &shm_control(t, t->local_index)->sounding;
    atomic_store_explicit(word, atomic_load_explicit(word, memory_order_relaxed) + 1, memory_order_relaxed); /* our own */
}

/* Who is interrupted measures too much, and what was fetched ahead is there at once, so two loads must say the same. A word
 * that is as it was may lie in this core's own cache, and tells nothing; one that another rank has read since may lie in a
 * nearer one than its writer's. */
static void shm_measure(shm *t, int32_t i) {
    shm_distance *d = &t->distances[i];
    uint64_t before = t->host->now_ns(t->host);
    uint32_t word = atomic_load_explicit(&shm_control(t, i)->sounding, memory_order_relaxed); /* any value will do */
    uint64_t after = t->host->now_ns(t->host), clock = t->host->now_ns(t->host) - after;
    uint64_t ns = after - before > clock ? after - before - clock : 0;
    if (word != d->word) {
        bool distant = ns >= t->distant_ns, last = d->last_ns >= t->distant_ns;
        distant = distant == last ? distant : d->distant;
        if (distant != d->distant) {
            shm_log(t, DDL_LOG_DEBUG, "rank %d has a %s core: a word of it takes %" PRIu64 " ns", (int)t->rank_of[i],
                    distant ? "distant" : "near", ns);
        }
        d->word = word;
        d->last_ns = ns;
        d->distant = distant;
    }
    bool differ = (d->last_ns >= t->distant_ns) != d->distant;
    d->wait = differ ? 0 : SHM_LISTEN_EACH - 1;
}

/* So many bytes of peer i have just been found; for the first time since so many occasions. */
static inline void shm_listen(shm *t, int32_t i, uint64_t bytes, uint32_t occasions) {
    shm_distance *d = &t->distances[i];
    if (!SHM_STREAMS || bytes < SHM_DISTANT_LEAST) {
        return;
    }
    if (d->wait >= occasions) {
        d->wait -= occasions;
    } else {
        shm_measure(t, i);
    }
}

static inline void shm_copy_for(void *to, const void *from, uint64_t bytes, bool distant) {
    if (distant && bytes >= SHM_DISTANT_LEAST) {
        shm_copy_past(to, from, bytes);
    } else {
        shm_memcpy(to, from, bytes);
    }
}

/* Into the ring to peer i; see shm_copy_over. */
static inline void shm_copy_to_peer(shm *t, int32_t i, void *to, const void *from, uint64_t bytes, bool strings) {
    bool large = bytes >= SHM_DISTANT_LEAST;
    if (large) {
        shm_sound(t);
    }
    if (large && t->distances[i].distant) {
        shm_copy_past(to, from, bytes);
    } else {
        shm_copy_over(to, from, bytes, strings);
    }
}

#endif /* SHM_DISTANCE_H */

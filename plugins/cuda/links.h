/* links: a ring of the GPUs of a set of ranks in which neighbours reach each other, where not all reach all: as on hosts
 * whose GPUs have NVLink to some of the others only. It must not know who found out which do. */
#ifndef CUDA_LINKS_H
#define CUDA_LINKS_H

#include "kernels.h"

#include <stdbool.h>
#include <stdint.h>

#define CUDA_RING_TRIES 100000 /* steps of the search; the same on all ranks, so that all find the same ring, or none */

/* The same on all ranks of a set. */
typedef struct cuda_links {
    bool apart;                 /* not all of the ranks are on one GPU */
    bool is_ring;               /* not all GPUs reach all: collectives go around */
    int32_t rank[CUDA_PLACES];  /* of the set, at each place of the ring */
    int32_t place[CUDA_PLACES]; /* in the ring, of each rank */
} cuda_links;

/* The rank before (-1) or behind (1) another one in the ring. */
static int32_t cuda_ring_neighbour(const cuda_links *l, int32_t count, int32_t rank, int32_t way) {
    return l->rank[(l->place[rank] + way + count) % count];
}

/* Fills places [at, count) of the ring with ranks that are not in `used`, if it can. */
static bool cuda_ring_fill(const uint32_t *reach, int32_t count, int32_t at, uint32_t used, cuda_links *out,
                           int32_t *tries) {
    int32_t last = out->rank[at - 1];
    if (at == count) {
        return (reach[last] >> out->rank[0] & 1) != 0;
    }
    for (int32_t j = 0; j < count && *tries > 0; j++) {
        if ((used >> j & 1) == 0 && (reach[last] >> j & 1) != 0) {
            --*tries;
            out->rank[at] = j;
            out->place[j] = at;
            if (cuda_ring_fill(reach, count, at + 1, used | 1u << j, out, tries)) {
                return true;
            }
        }
    }
    return false;
}

/* A ring of all ranks in which neighbours reach each other. reach[i], bit j: i and j do. False: there is none, or it was
 * not found (a Hamiltonian cycle: the search is exponential at worst, so it is bounded). */
static bool cuda_ring_find(const uint32_t *reach, int32_t count, cuda_links *out) {
    int32_t tries = CUDA_RING_TRIES;
    out->rank[0] = out->place[0] = 0;
    return count > 2 && cuda_ring_fill(reach, count, 1, 1, out, &tries);
}

#endif /* CUDA_LINKS_H */

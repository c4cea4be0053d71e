/* kernel_top: the k largest magnitudes of an array, in ascending order of their places, with the bits and the choice
 * among equals of src/compress/sparse.h. In order on one stream:
 *
 *     top_clear                               the bins are zero
 *     top_correct                             e = g + e, and the counts of the top digit (11 bits) of the magnitudes
 *     top_pick(20)                            the bin that the k-th largest lies in
 *     top_count(10), top_pick(10), top_count(0), top_pick(0)         the same for the next two digits of 10 bits
 *     top_tiles, top_scan, top_write          per tile how many are above and equal; where each tile's begin; the list
 *
 * Two such lists are merged (gTop-k) by top_union, the same kernels over the union, and top_rest.
 *
 * It must not know configs. */
#ifndef CUDA_KERNEL_TOP_H
#define CUDA_KERNEL_TOP_H

#include "kernel_code.h"

/* Counts of a block are gathered in shared memory first: most values of an array share a few bins. */
CUDA_INLINE void cuda_bins_clear(uint32_t *bins) {
    for (int i = (int)threadIdx.x; i < CUDA_BINS; i += (int)blockDim.x) {
        bins[i] = 0;
    }
    __syncthreads();
}
CUDA_INLINE void cuda_bins_add(cuda_top_state *state, const uint32_t *bins) {
    __syncthreads();
    for (int i = (int)threadIdx.x; i < CUDA_BINS; i += (int)blockDim.x) {
        if (bins[i] > 0) {
            atomicAdd(&state->bins[i], bins[i]);
        }
    }
}

/* One block. */
CUDA_INLINE void cuda_top_clear(const cuda_top_args &a) {
    for (int i = (int)threadIdx.x; i < CUDA_BINS; i += (int)blockDim.x) {
        a.state->bins[i] = 0;
    }
}

/* state NULL in the arguments: e = g + e alone (random-k, PowerSGD); g NULL: the counts alone. */
CUDA_INLINE void cuda_top_correct(const cuda_top_args &a) {
    __shared__ uint32_t bins[CUDA_BINS];
    uint32_t odd = 0;
    cuda_bins_clear(bins);
#pragma unroll 4
    for (int64_t i = cuda_thread(); i < a.count; i += cuda_threads()) {
        float x = a.g != 0 ? CUDA_ADD(a.g[i], a.e[i]) : a.e[i];
        a.e[i] = x;
        odd += !cuda_finite(x);
        if (a.state != 0) {
            atomicAdd(&bins[cuda_magnitude(x) >> 20], 1u);
        }
    }
    cuda_count_odd(a.odd, odd);
    if (a.state != 0) {
        cuda_bins_add(a.state, bins);
    }
}

CUDA_INLINE void cuda_top_count(const cuda_top_args &a) {
    __shared__ uint32_t bins[CUDA_BINS];
    const uint32_t prefix = a.state->prefix;
    cuda_bins_clear(bins);
#pragma unroll 4
    for (int64_t i = cuda_thread(); i < a.count; i += cuda_threads()) {
        uint32_t bits = cuda_magnitude(a.e[i]);
        if (bits >> (a.shift + 10) == prefix) {
            atomicAdd(&bins[bits >> a.shift & 1023], 1u);
        }
    }
    cuda_bins_add(a.state, bins);
}

/* One block: the bin from the top in which the need-th largest lies. Thread t sums eight bins, thread 0 walks over the
 * sums, then over eight. The bins are left zero. */
CUDA_INLINE void cuda_top_pick(const cuda_top_args &a) {
    __shared__ unsigned long long sums[CUDA_THREADS];
    const int each = CUDA_BINS / CUDA_THREADS, t = (int)threadIdx.x;
    cuda_top_state *s = a.state;
    sums[t] = 0;
    for (int i = 0; i < each; i++) {
        sums[t] += s->bins[t * each + i];
    }
    __syncthreads();
    if (t == 0) {
        unsigned long long need = a.shift == 20 ? (unsigned long long)a.k : s->need;
        int group = CUDA_THREADS - 1;
        for (; group > 0 && need > sums[group]; group--) {
            need -= sums[group];
        }
        int bin = group * each + each - 1;
        for (; bin > group * each && need > s->bins[bin]; bin--) {
            need -= s->bins[bin];
        }
        s->need = need;
        s->prefix = a.shift == 20 ? (uint32_t)bin : s->prefix << 10 | (uint32_t)bin;
    }
    __syncthreads();
    for (int i = 0; i < each; i++) {
        s->bins[t * each + i] = 0;
    }
}

/* The sum over the threads below this one, and over all of them in *all. */
CUDA_INLINE int64_t cuda_block_before(int64_t mine, int64_t *all) {
    __shared__ long long sums[CUDA_THREADS];
    const int t = (int)threadIdx.x;
    __syncthreads(); /* the sums of the call before have been read */
    sums[t] = mine;
    for (int far = 1; far < CUDA_THREADS; far *= 2) {
        __syncthreads();
        long long other = t >= far ? sums[t - far] : 0;
        __syncthreads();
        sums[t] += other;
    }
    __syncthreads();
    *all = sums[CUDA_THREADS - 1];
    return sums[t] - mine;
}

/* Where an element belongs; below 0: it is none. */
CUDA_INLINE int32_t cuda_top_place(const cuda_top_args &a, int64_t i) {
    return a.labels != 0 ? a.labels[i] : (int32_t)i;
}

/* What a thread counts in its part of a tile: 16 elements in a row. */
#define CUDA_TILE_EACH (CUDA_TILE / CUDA_THREADS)
CUDA_INLINE void cuda_tile_count(const cuda_top_args &a, int64_t first, int64_t *above, int64_t *equal) {
    const uint32_t least = a.state->prefix;
    *above = *equal = 0;
    for (int64_t i = first; i < first + CUDA_TILE_EACH && i < a.count; i++) {
        uint32_t bits = cuda_magnitude(a.e[i]);
        bool is = cuda_top_place(a, i) >= 0;
        *above += is && bits > least;
        *equal += is && bits == least;
    }
}

CUDA_INLINE void cuda_top_tiles(const cuda_top_args &a) {
    const int64_t tiles = (a.count + CUDA_TILE - 1) / CUDA_TILE;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        int64_t above, equal, all;
        cuda_tile_count(a, tile * CUDA_TILE + (int)threadIdx.x * CUDA_TILE_EACH, &above, &equal);
        cuda_block_before(above << 32 | equal, &all);
        if (threadIdx.x == 0) {
            a.tiles[2 * tile] = all >> 32;
            a.tiles[2 * tile + 1] = all & 0xffffffff;
        }
    }
}

/* One block: counts of tiles become how many lie before each. */
CUDA_INLINE void cuda_top_scan(const cuda_top_args &a) {
    const int64_t tiles = (a.count + CUDA_TILE - 1) / CUDA_TILE;
    int64_t before[2] = {0, 0};
    for (int64_t first = 0; first < tiles; first += CUDA_THREADS) {
        int64_t tile = first + (int)threadIdx.x;
        for (int what = 0; what < 2; what++) {
            int64_t all, mine = tile < tiles ? a.tiles[2 * tile + what] : 0, below = cuda_block_before(mine, &all);
            if (tile < tiles) {
                a.tiles[2 * tile + what] = before[what] + below;
            }
            before[what] += all;
        }
    }
}

/* Of those that equal the threshold the first `need` are taken. An element's number in the list follows from how many
 * of either kind lie before it. */
CUDA_INLINE void cuda_top_write(const cuda_top_args &a) {
    const int64_t tiles = (a.count + CUDA_TILE - 1) / CUDA_TILE, ties = (int64_t)a.state->need;
    const uint32_t least = a.state->prefix;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        int64_t first = tile * CUDA_TILE + (int)threadIdx.x * CUDA_TILE_EACH, above, equal, all;
        cuda_tile_count(a, first, &above, &equal);
        int64_t before = cuda_block_before(above << 32 | equal, &all);
        int64_t larger = a.tiles[2 * tile] + (before >> 32), same = a.tiles[2 * tile + 1] + (before & 0xffffffff);
        for (int64_t i = first; i < first + CUDA_TILE_EACH && i < a.count; i++) {
            float x = a.e[i];
            uint32_t bits = cuda_magnitude(x);
            int32_t place = cuda_top_place(a, i);
            if (place >= 0 && (bits > least || (bits == least && same < ties))) {
                int64_t at = larger + (same < ties ? same : ties);
                a.places[at] = place;
                a.values[at] = x;
                a.e[i] = 0;
            }
            larger += place >= 0 && bits > least;
            same += place >= 0 && bits == least;
        }
    }
}

/* ---- sparse arrays ---- */

/* How many of k places in ascending order are below `place`; with same: or equal to it. */
CUDA_INLINE int64_t cuda_places_below(const int32_t *places, int64_t k, int32_t place, bool same) {
    int64_t low = 0, high = k;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        bool below = places[middle] < place || (same && places[middle] == place);
        low = below ? middle + 1 : low;
        high = below ? high : middle;
    }
    return low;
}

/* An element's place in the union is its own number and how many of the others come before it; own ones stand before
 * equal ones of theirs. Places that do not ascend make a wrong union, but nothing is written beyond it. */
CUDA_INLINE void cuda_top_union(const cuda_merge_args &a) {
    for (int64_t t = cuda_thread(); t < 2 * a.k; t += cuda_threads()) {
        const bool mine = t < a.k;
        const int32_t *places = mine ? a.own : a.theirs, *others = mine ? a.theirs : a.own;
        int64_t j = mine ? t : t - a.k;
        int32_t place = places[j];
        int64_t before = cuda_places_below(others, a.k, place, !mine), twin = mine ? before : before - 1;
        bool both = twin >= 0 && twin < a.k && others[twin] == place;
        float x = ((const float *)places)[a.k + j];
        if (both) {
            x = mine ? CUDA_ADD(x, ((const float *)others)[a.k + twin]) : 0.0f;
        }
        a.labels[j + before] = both && !mine ? -1 : place;
        a.e[j + before] = x;
        if (!mine && (place < 0 || place >= a.count || (j > 0 && places[j - 1] >= place))) {
            atomicAdd(a.wrong, 1ull);
        }
    }
}

CUDA_INLINE void cuda_top_rest(const cuda_merge_args &a) {
    for (int64_t i = cuda_thread(); i < 2 * a.k; i += cuda_threads()) {
        float x = a.e[i];
        int32_t place = a.labels[i];
        if (place >= 0 && place < a.count && cuda_finite(x) && x != 0) { /* those that were taken are 0 */
            a.rest[place] = CUDA_ADD(a.rest[place], x);
        }
    }
}

/* splitmix64 of (stream, number) */
CUDA_INLINE uint64_t cuda_mix(uint64_t stream, uint64_t number) {
    uint64_t z = (stream ^ number) + 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

/* The j-th of k places that random-k draws in n: in the j-th of k strata. */
CUDA_INLINE int64_t cuda_random_place(uint64_t stream, int64_t n, int64_t k, int64_t j) {
    int64_t from = j * n / k, to = (j + 1) * n / k;
    return from + (int64_t)((cuda_mix(stream, (uint64_t)j) >> 32) * (uint64_t)(to - from) >> 32);
}

CUDA_INLINE void cuda_sparse_add(const cuda_sparse_args &a) {
    for (int64_t j = cuda_thread(); j < a.k; j += cuda_threads()) {
        int64_t place = a.places != 0 ? a.places[j] : cuda_random_place(a.stream, a.count, a.k, j);
        if (place >= 0 && place < a.count) { /* it may come from the wire */
            a.sum[place] = CUDA_ADD(a.sum[place], a.values[j]);
        }
    }
}

CUDA_INLINE void cuda_random_take(const cuda_sparse_args &a) {
    for (int64_t j = cuda_thread(); j < a.k; j += cuda_threads()) {
        int64_t place = cuda_random_place(a.stream, a.count, a.k, j);
        a.values[j] = a.e[place];
        a.e[place] = 0;
    }
}

#endif /* CUDA_KERNEL_TOP_H */

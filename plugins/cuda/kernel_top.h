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

/* state NULL in the arguments: e = g + e alone (random-k, PowerSGD); g NULL: the counts alone. Equal bins of a warp are
 * counted by one atomic: what is added is a constant, and nobody asks for the sum. */
CUDA_INLINE void cuda_top_correct(const cuda_top_args &a) {
    __shared__ uint32_t bins[CUDA_BINS];
    uint32_t odd = 0;
    cuda_bins_clear(bins);
    cuda_each_block(a.count, [&](int64_t first, int count) {
        float x[CUDA_EACH];
        cuda_block_load(x, a.e + first, count);
        if (a.g != 0) {
            float g[CUDA_EACH];
            cuda_block_load(g, a.g + first, count);
#pragma unroll
            for (int j = 0; j < CUDA_EACH; j++) {
                x[j] = CUDA_ADD(g[j], x[j]);
            }
            cuda_block_store(a.e + first, x, count);
        }
#pragma unroll
        for (int j = 0; j < CUDA_EACH; j++) {
            odd += !cuda_finite(x[j]); /* what is beyond the count is 0 */
        }
        if (a.state != 0) {
#pragma unroll
            for (int j = 0; j < CUDA_EACH; j++) {
                if (32 * j + cuda_lane() < count) {
                    atomicAdd(&bins[cuda_magnitude(x[j]) >> 20], 1u);
                }
            }
        }
    });
    cuda_count_odd(a.odd, odd);
    if (a.state != 0) {
        cuda_bins_add(a.state, bins);
    }
}

CUDA_INLINE void cuda_top_count(const cuda_top_args &a) {
    __shared__ uint32_t bins[CUDA_BINS];
    const uint32_t prefix = a.state->prefix;
    cuda_bins_clear(bins);
    cuda_each_block(a.count, [&](int64_t first, int count) {
        float x[CUDA_EACH];
        cuda_block_load(x, a.e + first, count);
#pragma unroll
        for (int j = 0; j < CUDA_EACH; j++) {
            uint32_t bits = cuda_magnitude(x[j]);
            if (bits >> (a.shift + 10) == prefix && 32 * j + cuda_lane() < count) {
                atomicAdd(&bins[bits >> a.shift & 1023], 1u);
            }
        }
    });
    cuda_bins_add(a.state, bins);
}

/* The sum over the warps below this one, and over all of them in *all. The last thread of each brings its sum. */
CUDA_INLINE uint64_t cuda_warps_before(uint64_t sum, uint64_t *all) {
    __shared__ unsigned long long sums[CUDA_THREADS / 32];
    const int warp = (int)threadIdx.x / 32;
    uint64_t before = 0;
    __syncthreads(); /* the sums of the call before have been read */
    if (cuda_lane() == 31) {
        sums[warp] = sum;
    }
    __syncthreads();
    *all = 0;
#pragma unroll
    for (int w = 0; w < CUDA_THREADS / 32; w++) {
        before += w < warp ? sums[w] : 0;
        *all += sums[w];
    }
    return before;
}

/* The sum over the threads below this one, and over all of them in *all. */
CUDA_INLINE uint64_t cuda_block_before(uint64_t mine, uint64_t *all) {
    uint64_t sum = mine;
#pragma unroll
    for (int far = 1; far < 32; far *= 2) {
        uint64_t other = __shfl_sync(CUDA_WARP_ALL, sum, (cuda_lane() - far) & 31, 32);
        sum += cuda_lane() >= far ? other : 0;
    }
    return cuda_warps_before(sum, all) + sum - mine;
}

/* One block: the bin from the top in which the need-th largest lies. Thread 0 has the eight uppermost bins; of all
 * threads one finds that the need-th largest is among its own. The bins are left zero. */
CUDA_INLINE void cuda_top_pick(const cuda_top_args &a) {
    const int each = CUDA_BINS / CUDA_THREADS, least = CUDA_BINS - each * ((int)threadIdx.x + 1);
    cuda_top_state *s = a.state;
    uint32_t *bins = s->bins + least;
    uint64_t sum = 0, all, need = a.shift == 20 ? (uint64_t)a.k : s->need;
    for (int i = 0; i < each; i++) {
        sum += bins[i];
    }
    const uint64_t before = cuda_block_before(sum, &all); /* all threads have read need */
    if (before < need && need <= before + sum) {
        int i = each - 1;
        for (need -= before; i > 0 && need > bins[i]; i--) {
            need -= bins[i];
        }
        s->need = need;
        s->prefix = (a.shift == 20 ? 0 : s->prefix << 10) | (uint32_t)(least + i);
    }
    for (int i = 0; i < each; i++) {
        bins[i] = 0;
    }
}

/* ---- tiles: a block of threads does one, each of its warps a block of elements ---- */

/* Where an element belongs; below 0: it is none. */
CUDA_INLINE int32_t cuda_top_place(const cuda_top_args &a, int64_t i) {
    return a.labels != 0 ? a.labels[i] : (int32_t)i;
}

/* The magnitudes of a warp's part of a tile; -1: there is no element. Returns how many of the warp's are above the
 * threshold, and in the lower half how many equal it. */
CUDA_INLINE uint64_t cuda_tile_load(const cuda_top_args &a, int64_t first, int32_t least, int32_t *size) {
    const int64_t left = a.count - first;
    const int count = left < CUDA_CODE_BLOCK ? (int)left : CUDA_CODE_BLOCK; /* below 0: none */
    float x[CUDA_EACH];
    uint32_t found = 0;
    if (count == CUDA_CODE_BLOCK) {
        cuda_block_load(x, a.e + first, CUDA_CODE_BLOCK);
    } else {
        cuda_block_load(x, a.e + first, count);
    }
#pragma unroll
    for (int j = 0; j < CUDA_EACH; j++) {
        size[j] = cuda_lane() < count - 32 * j ? (int32_t)cuda_magnitude(x[j]) : -1;
    }
    if (a.labels != 0) {
#pragma unroll
        for (int j = 0; j < CUDA_EACH; j++) {
            size[j] = size[j] >= 0 && a.labels[first + 32 * j + cuda_lane()] < 0 ? -1 : size[j];
        }
    }
#pragma unroll
    for (int j = 0; j < CUDA_EACH; j++) {
        found += (size[j] > least ? 0x10000u : 0) + (size[j] == least ? 1u : 0);
    }
    found = cuda_warp_total(found);
    return (uint64_t)(found >> 16) << 32 | (found & 0xffffu);
}
CUDA_INLINE int64_t cuda_tile_first(int64_t tile) {
    return tile * CUDA_TILE + (int)threadIdx.x / 32 * CUDA_CODE_BLOCK;
}

CUDA_INLINE void cuda_top_tiles(const cuda_top_args &a) {
    const int64_t tiles = (a.count + CUDA_TILE - 1) / CUDA_TILE;
    const int32_t least = (int32_t)a.state->prefix;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        int32_t size[CUDA_EACH];
        uint64_t all;
        cuda_warps_before(cuda_tile_load(a, cuda_tile_first(tile), least, size), &all);
        if (threadIdx.x == 0) {
            a.tiles[tile] = all;
        }
    }
}

/* One block: counts of tiles become how many lie before each. */
CUDA_INLINE void cuda_top_scan(const cuda_top_args &a) {
    const int64_t tiles = (a.count + CUDA_TILE - 1) / CUDA_TILE;
    const int each = 8;
    uint64_t before = 0;
    for (int64_t first = 0; first < tiles; first += CUDA_THREADS * each) {
        const int64_t tile = first + (int)threadIdx.x * each;
        uint64_t mine[each], sum = 0, all;
#pragma unroll
        for (int i = 0; i < each; i++) {
            mine[i] = tile + i < tiles ? a.tiles[tile + i] : 0;
            sum += mine[i];
        }
        sum = before + cuda_block_before(sum, &all);
#pragma unroll
        for (int i = 0; i < each; i++) {
            if (tile + i < tiles) {
                a.tiles[tile + i] = sum;
            }
            sum += mine[i];
        }
        before += all;
    }
}

/* Of those that equal the threshold the first `need` are taken. An element's number in the list follows from how many
 * of either kind lie before it. */
CUDA_INLINE void cuda_top_write(const cuda_top_args &a) {
    const int64_t tiles = (a.count + CUDA_TILE - 1) / CUDA_TILE;
    const int32_t least = (int32_t)a.state->prefix;
    const uint32_t ties = (uint32_t)a.state->need, below = (1u << cuda_lane()) - 1;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int64_t first = cuda_tile_first(tile);
        int32_t size[CUDA_EACH];
        uint64_t all, before = cuda_tile_load(a, first, least, size);
        before = a.tiles[tile] + cuda_warps_before(before, &all);
        uint32_t larger = (uint32_t)(before >> 32), same = (uint32_t)before;
#pragma unroll
        for (int j = 0; j < CUDA_EACH; j++) {
            const uint32_t above = __ballot_sync(CUDA_WARP_ALL, size[j] > least);
            const uint32_t equal = __ballot_sync(CUDA_WARP_ALL, size[j] == least);
            if ((above | equal) == 0) { /* as in most rows */
                continue;
            }
            const uint32_t mine = same + (uint32_t)__popc(equal & below);
            if (size[j] > least || (size[j] == least && mine < ties)) {
                const int64_t i = first + cuda_lane() + 32 * j;
                const uint32_t at = larger + (uint32_t)__popc(above & below) + (mine < ties ? mine : ties);
                a.places[at] = cuda_top_place(a, i);
                a.values[at] = a.e[i];
                a.e[i] = 0;
            }
            larger += (uint32_t)__popc(above);
            same += (uint32_t)__popc(equal);
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

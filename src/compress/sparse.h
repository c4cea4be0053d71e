/* compress/sparse: the k largest magnitudes of an array, k places drawn at random, and the merge of two sparse arrays.
 * Must not know: ranks, collectives.
 *
 * A sparse array is k int32 places in ascending order, then k floats. Magnitudes are compared as bits: that orders
 * finite values, puts infinity above them and NaN above all, so that what is not finite is sent first. */
#ifndef DDL_COMPRESS_SPARSE_H
#define DDL_COMPRESS_SPARSE_H

#include "block.h"

/* What is chosen: magnitudes above `bits`, and the first `ties` that equal it. */
typedef struct ddl__threshold {
    uint32_t bits;
    int64_t ties;
} ddl__threshold;

/* The 31 bits of a magnitude are searched in three digits from the top: 11, 10 and 10 bits. */
#define DDL__DIGIT_BINS 2048

/* Two histograms that take turns: equal digits in a row, which are common, would wait for each other's count. */
static inline void ddl__count_top_digits(uint32_t bins[2][DDL__DIGIT_BINS], const float *x, int64_t count) {
    int64_t i = 0;
    for (; i + 1 < count; i += 2) {
        bins[0][ddl__magnitude_bits(x[i]) >> 20]++;
        bins[1][ddl__magnitude_bits(x[i + 1]) >> 20]++;
    }
    if (i < count) {
        bins[0][ddl__magnitude_bits(x[i]) >> 20]++;
    }
}

/* The bin in which the need-th largest lies; need becomes its place within the bin. */
static inline uint32_t ddl__pick_bin(const uint32_t *bins, int count, int64_t *need) {
    int bin = count - 1;
    for (; bin > 0 && *need > (int64_t)bins[bin]; bin--) {
        *need -= bins[bin];
    }
    return (uint32_t)bin;
}

/* The next digit of the need-th largest: of those whose bits above it are `prefix`. */
static inline uint32_t ddl__next_digit(const float *x, int64_t n, uint32_t prefix, int shift, int64_t *need) {
    uint32_t bins[1024] = {0};
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = ddl__magnitude_bits(x[i]);
        if (bits >> (shift + 10) == prefix) {
            bins[bits >> shift & 1023]++;
        }
    }
    return prefix << 10 | ddl__pick_bin(bins, 1024, need);
}

/* The threshold of the k largest, 1 <= k <= n; bins: counts of the top digits. */
static inline ddl__threshold ddl__find_threshold(const float *x, int64_t n, int64_t k,
                                                 uint32_t bins[2][DDL__DIGIT_BINS]) {
    for (int i = 0; i < DDL__DIGIT_BINS; i++) {
        bins[0][i] += bins[1][i];
    }
    uint32_t bits = ddl__pick_bin(bins[0], DDL__DIGIT_BINS, &k);
    bits = ddl__next_digit(x, n, bits, 10, &k);
    bits = ddl__next_digit(x, n, bits, 0, &k);
    return (ddl__threshold){bits, k};
}

static inline bool ddl__is_chosen(ddl__threshold *threshold, float x) {
    uint32_t bits = ddl__magnitude_bits(x);
    return bits > threshold->bits || (bits == threshold->bits && threshold->ties-- > 0);
}

/* e = g + e; returns how many are not finite. */
static inline uint64_t ddl__sparse_correct(ddl__cpu level, const float *g, float *e, int64_t n) {
    uint64_t odd = 0;
    for (int64_t i = 0; i < n; i += DDL__CODE_BLOCK) {
        float x[DDL__CODE_BLOCK];
        int64_t count = DDL__MIN(n - i, DDL__CODE_BLOCK);
        bool whole = count == DDL__CODE_BLOCK; /* then in place */
        ddl__correct_fn correct = DDL__AT_LEVEL(level, ddl__correct);
        ddl__block_facts facts = ddl__block_correct(correct, whole ? e + i : x, g + i, e + i, count);
        if (!whole) {
            memcpy(e + i, x, (size_t)count * sizeof(float));
        }
        odd += facts.max_bits >= DDL__INFINITE_BITS ? ddl__count_odd(e + i, count) : 0;
    }
    return odd;
}

/* One block in so many is looked at for a first guess of the threshold. */
#define DDL__SAMPLE_EVERY 32

/* A digit's counts over the sampled blocks of g + e: of the top digit (shift 20), or of the next of those that begin
 * with prefix (shift 10). */
static inline void ddl__sample_digits(ddl__cpu level, const float *g, const float *e, int64_t n, int shift,
                                      uint32_t prefix, uint32_t *bins) {
    float x[DDL__CODE_BLOCK];
    for (int64_t i = 0; i + DDL__CODE_BLOCK <= n; i += DDL__SAMPLE_EVERY * DDL__CODE_BLOCK) {
        ddl__block_correct(DDL__AT_LEVEL(level, ddl__correct), x, g + i, e + i, DDL__CODE_BLOCK);
        for (int64_t j = 0; j < DDL__CODE_BLOCK; j++) {
            uint32_t bits = ddl__magnitude_bits(x[j]);
            if (shift == 20) {
                bins[bits >> 20]++;
            } else if (bits >> 20 == prefix) {
                bins[bits >> 10 & 1023]++;
            }
        }
    }
}

/* Bits that probably somewhat more than k magnitudes reach: aims at 1.4 k, between the k needed and the 2 k that there
 * is room for. 0 when there is too little to sample. */
static inline uint32_t ddl__guess_threshold(ddl__cpu level, const float *g, const float *e, int64_t n, int64_t k) {
    uint32_t bins[DDL__DIGIT_BINS] = {0};
    if (k < 4 * DDL__SAMPLE_EVERY || n < 4 * DDL__SAMPLE_EVERY * DDL__CODE_BLOCK || k > n / 4) {
        return 0;
    }
    int64_t stride = DDL__SAMPLE_EVERY * DDL__CODE_BLOCK, sampled = (n + stride - DDL__CODE_BLOCK) / stride;
    int64_t need = (int64_t)(1.4 * (double)k * (double)(sampled * DDL__CODE_BLOCK) / (double)n) + 1;
    ddl__sample_digits(level, g, e, n, 20, 0, bins);
    uint32_t prefix = ddl__pick_bin(bins, DDL__DIGIT_BINS, &need);
    memset(bins, 0, sizeof bins);
    ddl__sample_digits(level, g, e, n, 10, prefix, bins);
    return (prefix << 10 | ddl__pick_bin(bins, 1024, &need)) << 10;
}

/* Candidates are counted as they are found, by how far they are above the guess, in steps of 2^DDL__NEAR_SHIFT bits up
 * to twice the guess; the last bin has all beyond. Those in the bin of the k-th largest are its edge: which of them are
 * chosen takes a closer look. */
enum { DDL__NEAR_SHIFT = 11, DDL__NEAR_BINS = 4097, DDL__EDGE = 1024 };

static inline void ddl__count_near(uint32_t *bins, const float *e, const int32_t *places, int64_t count,
                                   uint32_t guess) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t step = (ddl__magnitude_bits(e[places[i]]) - guess) >> DDL__NEAR_SHIFT;
        bins[DDL__MIN(step, DDL__NEAR_BINS - 1)]++;
    }
}

/* Takes out of places those of an edge that are not among the `need` largest of it: edge has their numbers in places,
 * bits how far they are above its begin. */
static inline void ddl__trim_edge(int32_t *places, int64_t count, const int64_t *edge, const uint32_t *bits,
                                  int64_t edge_count, int64_t need) {
    uint32_t bins[1 << DDL__NEAR_SHIFT] = {0};
    for (int64_t j = 0; j < edge_count; j++) {
        bins[bits[j]]++;
    }
    uint32_t last = ddl__pick_bin(bins, 1 << DDL__NEAR_SHIFT, &need);
    ddl__threshold threshold = {last, need};
    int64_t from = 0, to = 0;
    for (int64_t j = 0; j <= edge_count; j++) {
        if (j == edge_count || !ddl__is_chosen(&threshold, ddl__bits_float(bits[j]))) {
            int64_t end = j == edge_count ? count : edge[j];
            memmove(places + to, places + from, (size_t)(end - from) * sizeof *places);
            to += end - from;
            from = end + 1;
        }
    }
}

/* The k largest of e among `count` places, of which all that reach the guess are there, bins their counts: moves them
 * to the front. False, and nothing is done, when too many are at the edge, or it is beyond the bins. */
static inline bool ddl__choose_places(const float *e, int32_t *places, int64_t count, int64_t k, uint32_t guess,
                                      const uint32_t *bins) {
    int64_t edge[DDL__EDGE], need = k, taken = 0, edge_count = 0;
    uint32_t edge_bits[DDL__EDGE], bin = ddl__pick_bin(bins, DDL__NEAR_BINS, &need);
    if (bin == DDL__NEAR_BINS - 1 || bins[bin] > DDL__EDGE) {
        return false;
    }
    uint32_t least = guess + (bin << DDL__NEAR_SHIFT);
    for (int64_t i = 0; i < count; i++) {
        __builtin_prefetch(&e[places[DDL__MIN(i + 24, count - 1)]]);
        uint32_t bits = ddl__magnitude_bits(e[places[i]]);
        if ((bits - least) >> DDL__NEAR_SHIFT == 0) {
            edge[edge_count] = taken;
            edge_bits[edge_count++] = bits - least;
        }
        places[taken] = places[i];
        taken += bits >= least;
    }
    ddl__trim_edge(places, taken, edge, edge_bits, edge_count, need);
    return true;
}

/* The k largest of all of e, in three passes: for what a guess cannot do (many equal values, small arrays). */
static inline void ddl__choose_by_digits(const float *e, int64_t n, int64_t k, int32_t *places) {
    uint32_t bins[2][DDL__DIGIT_BINS] = {{0}};
    ddl__count_top_digits(bins, e, n);
    ddl__threshold threshold = ddl__find_threshold(e, n, k, bins);
    for (int64_t i = 0, taken = 0; taken < k; i++) {
        if (ddl__is_chosen(&threshold, e[i])) {
            places[taken++] = (int32_t)i;
        }
    }
}

/* places, values = the k largest of g + e; e = the others, and zero where one was taken. values lies behind places:
 * until the choice is made, both are room for candidates. A guess saves passes and changes no result. */
static inline uint64_t ddl__top_k_encode(ddl__cpu level, const float *g, float *e, int64_t n, int64_t k,
                                         int32_t *places) {
    float *values = (float *)(void *)(places + k);
    uint32_t guess = ddl__guess_threshold(level, g, e, n, k), bins[DDL__NEAR_BINS] = {0};
    int64_t found = 0;
    uint64_t odd = 0;
    for (int64_t i = 0; i < n; i += DDL__CODE_BLOCK) {
        int32_t above[DDL__CODE_BLOCK + DDL__RUN];
        int64_t count = DDL__MIN(n - i, DDL__CODE_BLOCK);
        odd += ddl__sparse_correct(level, g + i, e + i, count);
        if (guess > 0 && found <= 2 * k) {
            int64_t more = DDL__AT_LEVEL(level, ddl__above)(e + i, count, guess, (int32_t)i, above);
            ddl__count_near(bins, e, above, more, guess);
            memcpy(places + DDL__MIN(found, 2 * k), above, (size_t)DDL__MIN(more, 2 * k - found) * sizeof *places);
            found += more;
        }
    }
    bool near = found >= k && found <= 2 * k && ddl__choose_places(e, places, found, k, guess, bins);
    if (!near && k > 0) {
        ddl__choose_by_digits(e, n, k, places);
    }
    for (int64_t i = 0; i < k; i++) {
        __builtin_prefetch(&e[places[DDL__MIN(i + 24, k - 1)]], 1);
        values[i] = e[places[i]];
        e[places[i]] = 0;
    }
    return odd;
}

/* The j-th of k places in n: one from each of k equal strata, so that places are distinct and in order without a list
 * of those already drawn. */
static inline int64_t ddl__random_place(uint64_t stream, int64_t n, int64_t k, int64_t j) {
    int64_t from = j * n / k, to = (j + 1) * n / k;
    return from + (int64_t)((ddl__mix(stream, (uint64_t)j) >> 32) * (uint64_t)(to - from) >> 32);
}

/* values = g + e at the drawn places; the rest stays in e. key.rank must be the same on all ranks. */
static inline uint64_t ddl__random_k_encode(ddl__cpu level, const ddl_compression *c, ddl__code_key key,
                                            const float *g, float *e, int64_t n, int64_t k, float *values) {
    uint64_t stream = ddl__code_stream(c, key), odd = 0;
    int64_t j = 0, at = k > 0 ? ddl__random_place(stream, n, k, 0) : n;
    for (int64_t i = 0; i < n; i += DDL__CODE_BLOCK) {
        int64_t end = DDL__MIN(n, i + DDL__CODE_BLOCK);
        odd += ddl__sparse_correct(level, g + i, e + i, end - i);
        for (; at < end; at = ++j < k ? ddl__random_place(stream, n, k, j) : n) {
            values[j] = e[at];
            e[at] = 0;
        }
    }
    return odd;
}

/* Whether the places of a sparse array ascend within n: one from the wire must not make us write elsewhere. */
static inline bool ddl__places_ascend(const int32_t *places, int64_t k, int64_t n) {
    int64_t last = -1;
    for (int64_t i = 0; i < k; i++) {
        if (places[i] <= last || places[i] >= n) {
            return false;
        }
        last = places[i];
    }
    return true;
}

/* Top of a pair of sparse arrays: values at equal places are added, then the k largest are kept (Shi et al., gTop-k,
 * operator T); the others are added to rest, where they are finite. places and values have room for 2k. */
static inline void ddl__top_k_merge(const int32_t *a_places, const float *a, const int32_t *b_places, const float *b,
                                    int64_t k, int32_t *places, float *values, float *rest) {
    uint32_t bins[2][DDL__DIGIT_BINS] = {{0}};
    int64_t i = 0, j = 0, n = 0, kept = 0;
    for (; i < k || j < k; n++) {
        bool from_a = i < k && (j >= k || a_places[i] <= b_places[j]);
        bool from_b = j < k && (i >= k || b_places[j] <= a_places[i]);
        places[n] = from_a ? a_places[i] : b_places[j];
        values[n] = from_a && from_b ? a[i] + b[j] : from_a ? a[i] : b[j];
        i += from_a;
        j += from_b;
    }
    if (k == 0) {
        return;
    }
    ddl__count_top_digits(bins, values, n);
    ddl__threshold threshold = ddl__find_threshold(values, n, k, bins);
    for (i = 0; i < n; i++) {
        if (ddl__is_chosen(&threshold, values[i])) {
            places[kept] = places[i];
            values[kept++] = values[i];
        } else if (ddl__is_finite(values[i])) {
            rest[places[i]] += values[i];
        }
    }
}

/* ---- any code, by its kind ---- */

/* code (ddl__code_bytes) = g + e; e = what the code misses, NULL when the config has no error feedback. Returns how
 * many values of g + e are not finite. code is aligned to 4. Not for PowerSGD. */
static inline uint64_t ddl__encode_at(ddl__cpu level, const ddl_compression *c, ddl__code_key key, const float *g,
                                      float *e, int64_t n, void *code) {
    int64_t k = ddl__compress_is_sparse(c->kind) ? ddl__compress_kept(c, n) : 0;
    switch (c->kind) {
    case DDL_COMPRESS_F16:
    case DDL_COMPRESS_BF16: return ddl__cast_encode(level, c, g, e, n, code);
    case DDL_COMPRESS_TOP_K:
    case DDL_COMPRESS_GTOP_K: return ddl__top_k_encode(level, g, e, n, k, code);
    case DDL_COMPRESS_RANDOM_K: return ddl__random_k_encode(level, c, key, g, e, n, k, code);
    case DDL_COMPRESS_NONE:
    case DDL_COMPRESS_POWER: memcpy(code, g, (size_t)n * sizeof(float)); return ddl__count_odd(g, n);
    default: return ddl__blocks_encode(level, c, key, g, e, n, code);
    }
}

/* sum += what the code stands for. key: as for encoding. */
static inline void ddl__decode_add_at(ddl__cpu level, const ddl_compression *c, ddl__code_key key, const void *code,
                                      int64_t n, float *sum) {
    int64_t k = ddl__compress_is_sparse(c->kind) ? ddl__compress_kept(c, n) : 0;
    const float *values = code;
    uint64_t stream = ddl__code_stream(c, key);
    switch (c->kind) {
    case DDL_COMPRESS_F16:
    case DDL_COMPRESS_BF16: ddl__cast_decode_add(level, c, code, n, sum); break;
    case DDL_COMPRESS_TOP_K:
    case DDL_COMPRESS_GTOP_K:
        for (int64_t j = 0; j < k; j++) {
            int32_t place = ((const int32_t *)code)[j];
            if (place >= 0 && place < n) { /* it may come from the wire */
                sum[place] += values[k + j];
            }
        }
        break;
    case DDL_COMPRESS_RANDOM_K:
        for (int64_t j = 0; j < k; j++) {
            sum[ddl__random_place(stream, n, k, j)] += values[j];
        }
        break;
    case DDL_COMPRESS_NONE:
    case DDL_COMPRESS_POWER:
        ddl__reduce_kernel_at(level, DDL_F32, DDL_SUM)(sum, sum, code, (size_t)n);
        break;
    default: ddl__blocks_decode_add(level, c, code, n, sum);
    }
}

static inline uint64_t ddl__encode(const ddl_compression *c, ddl__code_key key, const float *g, float *e, int64_t n,
                                   void *code) {
    return ddl__encode_at(ddl__cpu_level(), c, key, g, e, n, code);
}

static inline void ddl__decode_add(const ddl_compression *c, ddl__code_key key, const void *code, int64_t n,
                                   float *sum) {
    ddl__decode_add_at(ddl__cpu_level(), c, key, code, n, sum);
}

#endif /* DDL_COMPRESS_SPARSE_H */

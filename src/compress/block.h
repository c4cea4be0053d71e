/* compress/block: codes with a scale per block (int8, QSGD, sign, majority) and casts (f16, bf16), of any length.
 * Must not know: ranks, collectives.
 *
 * A block of up to 512 elements is a float, its step, and runs of 64 bytes (kernels.h). A block with values that are
 * not finite is odd: it has one level less, codes for infinities and NaN, and a step with its sign bit set. An odd
 * block of signs has the value that was not finite as its step (NaN when they differ) and says with the bits where
 * that was; its finite elements stay in the residual. So the fast loops need not look for special values. */
#ifndef DDL_COMPRESS_BLOCK_H
#define DDL_COMPRESS_BLOCK_H

#include "../dtype/reduce.h"
#include "kernels.h"

static inline uint32_t ddl__float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float ddl__bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#define DDL__INFINITY ddl__bits_float(DDL__INFINITE_BITS)

static inline uint32_t ddl__magnitude_bits(float x) { return ddl__float_bits(x) & 0x7fffffffu; }
static inline bool ddl__is_finite(float x) { return ddl__magnitude_bits(x) < DDL__INFINITE_BITS; }

static inline uint64_t ddl__count_odd(const float *x, int64_t count) {
    uint64_t odd = 0;
    for (int64_t i = 0; i < count; i++) {
        odd += !ddl__is_finite(x[i]);
    }
    return odd;
}

/* x = g + e for at most a block, padded with zeros to its end. */
static inline ddl__block_facts ddl__block_correct(ddl__correct_fn correct, float *x, const float *g, const float *e,
                                                  int64_t count) {
    float pad[2][DDL__CODE_BLOCK];
    ddl__block_facts facts;
    if (count < DDL__CODE_BLOCK) {
        memset(pad, 0, sizeof pad);
        g = memcpy(pad[0], g, (size_t)count * sizeof(float));
        e = memcpy(pad[1], e, (size_t)count * sizeof(float));
    }
    correct(x, g, e, DDL__CODE_BLOCK, &facts);
    return facts;
}

/* Asks for the memory of the code of a block some blocks ahead: stores that miss would come one after the other. */
static inline void ddl__code_ahead(const unsigned char *code, size_t block_bytes) {
    for (size_t i = 0; i < block_bytes; i += 64) {
        __builtin_prefetch(code + DDL__AHEAD / DDL__CODE_BLOCK * block_bytes + i, 1);
    }
}

/* A block to code: x is g + e; where that already is, so that as little as possible is copied. Without e it is g
 * itself, which is not written; so the sign of a zero stays. */
typedef struct ddl__coding {
    float *x;
    ddl__block_facts facts;
} ddl__coding;

static inline ddl__coding ddl__block_begin(ddl__cpu level, ddl__correct_fn correct, float *pad, const float *g,
                                           float *e, int64_t count) {
    bool whole = count == DDL__CODE_BLOCK;
    ddl__coding b = {!whole ? pad : e != NULL ? e : (float *)(uintptr_t)g, {0, 0}};
    if (e != NULL) {
        b.facts = ddl__block_correct(correct, b.x, g, e, count);
        return b;
    }
    if (!whole) {
        memset(pad, 0, DDL__CODE_BLOCK * sizeof *pad);
        memcpy(pad, g, (size_t)count * sizeof *pad);
    }
    DDL__AT_LEVEL(level, ddl__survey)(NULL, b.x, NULL, DDL__CODE_BLOCK, &b.facts);
    return b;
}

/* x is what the code misses: that is the new e. */
static inline void ddl__block_end(const ddl__coding *b, float *e, int64_t count) {
    if (e != NULL && b->x != e) {
        memcpy(e, b->x, (size_t)count * sizeof(float));
    }
}

/* ---- odd blocks, one element at a time ---- */

/* Where element i of a block is: the word, and the lowest bit in it. */
static inline size_t ddl__code_word(int bits, int64_t i) {
    return (size_t)(i / ddl__code_run(bits) * 16 + i % 16);
}
static inline int ddl__code_shift(int bits, int64_t i) { return (int)(i / 16 % (32 / bits)) * bits; }

static inline void ddl__code_put(unsigned char *words, int bits, int64_t i, int32_t level) {
    uint32_t word;
    unsigned char *at = words + 4 * ddl__code_word(bits, i);
    memcpy(&word, at, sizeof word);
    word |= ((uint32_t)level & ((1u << bits) - 1)) << ddl__code_shift(bits, i);
    memcpy(at, &word, sizeof word);
}

/* The level of element i, with its sign (a single bit: 0 or -1). */
static inline int32_t ddl__code_get(const unsigned char *words, int bits, int64_t i) {
    uint32_t word;
    memcpy(&word, words + 4 * ddl__code_word(bits, i), sizeof word);
    return (int32_t)(word << (32 - bits - ddl__code_shift(bits, i))) >> (32 - bits);
}

/* Signs: the bits say which elements are not finite. x becomes the residual. */
static inline void ddl__odd_signs_encode(float *x, int64_t count, unsigned char *code) {
    float value = 0;
    bool found = false;
    for (int64_t i = 0; i < count; i++) {
        if (!ddl__is_finite(x[i])) {
            value = !found || ddl__float_bits(value) == ddl__float_bits(x[i]) ? x[i] : ddl__bits_float(0x7fffffff);
            found = true;
            ddl__code_put(code + 4, 1, i, 1);
            x[i] = 0;
        }
    }
    memcpy(code, &value, sizeof value);
}

/* Levels to nearest. The three levels at the ends stand for infinity, minus infinity and NaN. */
static inline void ddl__odd_levels_encode(const ddl_compression *c, float *x, int64_t count, unsigned char *code) {
    int bits = ddl__compress_bits(c);
    int32_t end = (1 << (bits - 1)) - 1, levels = DDL__MIN(c->levels, end - 1);
    uint32_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        most = ddl__is_finite(x[i]) ? DDL__MAX(most, ddl__magnitude_bits(x[i])) : most;
    }
    float step = ddl__bits_float(most) / (float)levels;
    for (int64_t i = 0; i < count; i++) {
        float size = ddl__bits_float(ddl__magnitude_bits(x[i]));
        int32_t level = -end - 1;
        if (ddl__is_finite(size)) {
            level = step > 0 ? DDL__MIN((int32_t)(size / step + 0.5f), levels) : 0;
            level = x[i] < 0 ? -level : level;
            x[i] -= (float)level * step;
        } else {
            level = size > 0 ? (x[i] < 0 ? -end : end) : level;
            x[i] = 0;
        }
        ddl__code_put(code + 4, bits, i, level);
    }
    step = -step;
    memcpy(code, &step, sizeof step);
}

static inline bool ddl__code_is_odd(int bits, float step) {
    return bits == 1 ? !ddl__is_finite(step) : ddl__float_bits(step) >> 31 != 0;
}

static inline void ddl__odd_decode(int bits, const unsigned char *code, float step, int64_t count, float *sum) {
    int32_t end = (1 << (bits - 1)) - 1;
    for (int64_t i = 0; i < count; i++) {
        int32_t level = ddl__code_get(code + 4, bits, i);
        if (bits == 1) {
            sum[i] += level != 0 ? step : 0;
        } else if (level > -end && level < end) {
            float value = (float)level * -step;
            DDL__ROUNDED(value);
            sum[i] += value;
        } else {
            sum[i] += level == end ? DDL__INFINITY : level == -end ? -DDL__INFINITY : ddl__bits_float(0x7fffffff);
        }
    }
}

/* ---- blocks ---- */

/* Below this a scale's inverse may overflow; such a block goes as zeros and stays in the residual. */
#define DDL__CODE_LEAST 1e-30f

static inline float ddl__block_step(const ddl_compression *c, ddl__block_facts facts, int64_t count) {
    float most = ddl__bits_float(facts.max_bits);
    if (c->kind == DDL_COMPRESS_MAJORITY) {
        return 1;
    }
    if (c->kind == DDL_COMPRESS_SIGN) {
        return ddl__is_finite(facts.sum) ? facts.sum / (float)count : most / 2;
    }
    return most < DDL__CODE_LEAST ? 0 : most / (float)c->levels;
}

typedef void (*ddl__pack_fn)(void *code, float *x, int64_t runs, const ddl__quantum *quantum);

/* keep: x becomes what the code misses; otherwise it is not written. */
static inline ddl__pack_fn ddl__pack_at(ddl__cpu level, const ddl_compression *c, bool keep) {
    if (ddl__compress_bits(c) == 1) {
        return keep ? DDL__AT_LEVEL(level, ddl__pack_sign) : DDL__AT_LEVEL(level, ddl__pack_sign_only);
    }
    if (c->kind == DDL_COMPRESS_INT8) {
        return keep ? DDL__AT_LEVEL(level, ddl__pack_nearest8) : DDL__AT_LEVEL(level, ddl__pack_nearest8_only);
    }
    if (c->levels <= 7) {
        return keep ? DDL__AT_LEVEL(level, ddl__pack_dither4) : DDL__AT_LEVEL(level, ddl__pack_dither4_only);
    }
    return keep ? DDL__AT_LEVEL(level, ddl__pack_dither8) : DDL__AT_LEVEL(level, ddl__pack_dither8_only);
}

/* Codes one block x (512 elements, zeros at the end), which becomes what the code misses; keep: as for the pack. */
static inline uint64_t ddl__block_encode(ddl__cpu level, const ddl_compression *c, uint64_t stream, int64_t first,
                                         float *x, bool keep, ddl__block_facts facts, int64_t count,
                                         unsigned char *code) {
    float copy[DDL__CODE_BLOCK];
    int bits = ddl__compress_bits(c);
    if (facts.max_bits >= DDL__INFINITE_BITS) {
        uint64_t odd = ddl__count_odd(x, count);
        memset(code, 0, ddl__code_block_bytes(bits, count));
        x = keep ? x : memcpy(copy, x, (size_t)count * sizeof(float));
        if (bits == 1) {
            ddl__odd_signs_encode(x, count, code);
        } else {
            ddl__odd_levels_encode(c, x, count, code);
        }
        return odd;
    }
    float step = ddl__block_step(c, facts, count);
    ddl__quantum q = {step, 0, c->levels, {(uint32_t)stream, (uint32_t)(stream >> 32)}, (uint32_t)first};
    q.inverse = step > 0 ? (float)c->levels / ddl__bits_float(facts.max_bits) : 0;
    memcpy(code, &step, sizeof step);
    int64_t run = ddl__code_run(bits);
    ddl__pack_at(level, c, keep)(code + sizeof step, x, (count + run - 1) / run, &q);
    return 0;
}

/* code = g + e in blocks, e = what the code misses (NULL: no residual). Returns how many values were not finite. */
static inline uint64_t ddl__blocks_encode(ddl__cpu level, const ddl_compression *c, ddl__code_key key, const float *g,
                                          float *e, int64_t n, unsigned char *code) {
    uint64_t stream = ddl__code_stream(c, key), odd = 0;
    int bits = ddl__compress_bits(c);
    ddl__correct_fn correct = bits == 1 ? DDL__AT_LEVEL(level, ddl__correct_g) : DDL__AT_LEVEL(level, ddl__correct);
    float pad[DDL__CODE_BLOCK];
    for (int64_t i = 0; i < n; i += DDL__CODE_BLOCK) {
        int64_t count = DDL__MIN(n - i, DDL__CODE_BLOCK);
        ddl__coding b = ddl__block_begin(level, correct, pad, g + i, e != NULL ? e + i : NULL, count);
        ddl__code_ahead(code, ddl__code_block_bytes(bits, count));
        odd += ddl__block_encode(level, c, stream, i, b.x, e != NULL, b.facts, count, code);
        ddl__block_end(&b, e != NULL ? e + i : NULL, count);
        code += ddl__code_block_bytes(bits, count);
    }
    return odd;
}

typedef void (*ddl__unpack_fn)(float *sum, const void *code, int64_t runs, float step);

static inline void ddl__blocks_decode_add(ddl__cpu level, const ddl_compression *c, const unsigned char *code,
                                          int64_t n, float *sum) {
    int bits = ddl__compress_bits(c);
    ddl__unpack_fn unpack = bits == 1   ? DDL__AT_LEVEL(level, ddl__unpack_sign)
                            : bits == 4 ? DDL__AT_LEVEL(level, ddl__unpack_level4)
                                        : DDL__AT_LEVEL(level, ddl__unpack_level8);
    for (int64_t i = 0; i < n; i += DDL__CODE_BLOCK) {
        int64_t count = DDL__MIN(n - i, DDL__CODE_BLOCK), run = ddl__code_run(bits);
        float step, pad[DDL__CODE_BLOCK], *to = sum + i;
        memcpy(&step, code, sizeof step);
        if (ddl__code_is_odd(bits, step)) {
            ddl__odd_decode(bits, code, step, count, to);
        } else if (count == DDL__CODE_BLOCK) {
            unpack(to, code + sizeof step, DDL__CODE_BLOCK / run, step);
        } else {
            memcpy(pad, to, (size_t)count * sizeof(float));
            memset(pad + count, 0, (size_t)(DDL__CODE_BLOCK - count) * sizeof(float));
            unpack(pad, code + sizeof step, (count + run - 1) / run, step);
            memcpy(to, pad, (size_t)count * sizeof(float));
        }
        code += ddl__code_block_bytes(bits, count);
    }
}

/* ---- casts ---- */

static inline ddl_dtype ddl__cast_dtype(const ddl_compression *c) {
    return c->kind == DDL_COMPRESS_F16 ? DDL_F16 : DDL_BF16;
}

static inline float ddl__cast_most(ddl_dtype dtype) { return dtype == DDL_F16 ? 65504.0f : 0x1.fep127f; }

/* Finite values beyond the type become its largest one: what is lost stays in the residual, and no infinity is made. */
static inline void ddl__clamp(float *x, float most, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (ddl__is_finite(x[i])) {
            x[i] = x[i] > most ? most : x[i] < -most ? -most : x[i];
        }
    }
}

/* A block with values that the type does not hold, or that are not finite; e becomes the residual, unless NULL; it may
 * be x. */
static inline uint64_t ddl__cast_odd(ddl__cpu level, ddl_dtype dtype, const float *x, float *e, int64_t count,
                                     void *code) {
    float sent[DDL__CODE_BLOCK];
    uint64_t odd = ddl__count_odd(x, count);
    memcpy(sent, x, (size_t)count * sizeof(float));
    ddl__clamp(sent, ddl__cast_most(dtype), count);
    ddl__narrow_at(level, dtype)(code, sent, (size_t)count);
    ddl__widen_at(level, dtype)(sent, code, (size_t)count);
    for (int64_t j = 0; j < count && e != NULL; j++) {
        e[j] = ddl__is_finite(x[j]) ? x[j] - sent[j] : 0;
    }
    return odd;
}

/* What goes past the caches: codes so large that little of them would still be there when they are sent. A store into
 * memory that is not in a cache reads it first; that is more than the half of what a cast writes. */
#define DDL__STREAM_LEAST (4 << 20)

/* Elements of the next block of a cast: whole ones begin at a multiple of 64 bytes where the code is streamed. */
static inline int64_t ddl__cast_count(const unsigned char *code, int64_t left, bool stream) {
    int64_t before = stream ? (int64_t)(-(uintptr_t)code % 64 / 2) : 0;
    return DDL__MIN(left, before > 0 ? before : DDL__CODE_BLOCK);
}

static inline uint64_t ddl__cast_block(ddl__cpu level, ddl_dtype dtype, const float *g, float *e, int64_t count,
                                       void *code) {
    float pad[DDL__CODE_BLOCK];
    uint64_t odd = 0;
    ddl__coding b = ddl__block_begin(level, DDL__AT_LEVEL(level, ddl__correct), pad, g, e, count);
    if (b.facts.max_bits > ddl__float_bits(ddl__cast_most(dtype))) {
        odd = ddl__cast_odd(level, dtype, b.x, e != NULL ? b.x : NULL, count, code);
    } else if (e == NULL) {
        ddl__narrow_at(level, dtype)(code, b.x, (size_t)count);
    } else {
        ddl__narrow_keep_at(level, dtype)(code, b.x, (size_t)count);
    }
    ddl__block_end(&b, e, count);
    return odd;
}

static inline uint64_t ddl__cast_encode(ddl__cpu level, const ddl_compression *c, const float *g, float *e, int64_t n,
                                        unsigned char *code) {
    _Alignas(64) unsigned char block[2 * DDL__CODE_BLOCK];
    bool stream = 2 * n >= DDL__STREAM_LEAST && (uintptr_t)code % 2 == 0;
    uint64_t odd = 0;
    for (int64_t i = 0, count; i < n; i += count) {
        unsigned char *to = code + 2 * i;
        count = ddl__cast_count(to, n - i, stream);
        bool staged = stream && count == DDL__CODE_BLOCK;
        odd += ddl__cast_block(level, ddl__cast_dtype(c), g + i, e != NULL ? e + i : NULL, count, staged ? block : to);
        if (staged) {
            DDL__AT_LEVEL(level, ddl__stream)(to, block, sizeof block);
        }
    }
    if (stream) {
        ddl__stream_end();
    }
    return odd;
}

static inline void ddl__cast_decode_add(ddl__cpu level, const ddl_compression *c, const unsigned char *code, int64_t n,
                                        float *sum) {
    ddl__cast_fn widen = ddl__widen_at(level, ddl__cast_dtype(c));
    ddl__reduce_fn add = ddl__reduce_kernel_at(level, DDL_F32, DDL_SUM);
    for (int64_t i = 0; i < n; i += DDL__CODE_BLOCK) {
        float x[DDL__CODE_BLOCK];
        size_t count = (size_t)DDL__MIN(n - i, DDL__CODE_BLOCK);
        widen(x, code + 2 * i, count);
        add(sum + i, sum + i, x, count);
    }
}

#endif /* DDL_COMPRESS_BLOCK_H */

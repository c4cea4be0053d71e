/* compress/config: which compressions make sense, their defaults and the size of their codes.
 * Must not know: how a code is made or sent. */
#ifndef DDL_COMPRESS_CONFIG_H
#define DDL_COMPRESS_CONFIG_H

#include "../base.h"

/* Elements that share a scale. */
#define DDL__CODE_BLOCK 512

static inline const char *ddl__compress_name(ddl_compression_kind kind) {
    static const char *const names[] = {"none",     "f16",   "bf16",     "int8",   "QSGD",     "sign",
                                        "majority", "top-k", "random-k", "gTop-k", "PowerSGD", "adaptive"};
    return (unsigned)kind < DDL__COUNT_OF(names) ? names[kind] : "?";
}

static inline bool ddl__compress_is_sparse(ddl_compression_kind kind) {
    return kind >= DDL_COMPRESS_TOP_K && kind <= DDL_COMPRESS_GTOP_K;
}

/* Bits per element of the kinds that go in blocks; 0 for the others. */
static inline int ddl__compress_bits(const ddl_compression *c) {
    switch (c->kind) {
    case DDL_COMPRESS_INT8: return 8;
    case DDL_COMPRESS_QSGD: return c->levels <= 7 ? 4 : 8;
    case DDL_COMPRESS_SIGN:
    case DDL_COMPRESS_MAJORITY: return 1;
    default: return 0;
    }
}

/* Members that belong to other kinds must be zero: a k that is ignored is a mistake nobody would see. */
static inline ddl_status ddl__compress_check_members(ddl__sentence *sentence, const ddl_compression *c) {
    const char *name = ddl__compress_name(c->kind);
    if (!ddl__compress_is_sparse(c->kind) && (c->ratio != 0 || c->k != 0)) {
        return ddl__fail(sentence, DDL_ERR_ARG,
                         "compression %s has no ratio and no k (they are %g and %lld); top-k, random-k and gTop-k have",
                         name, c->ratio, (long long)c->k);
    }
    if (!(c->ratio >= 0 && c->ratio <= 1) || c->k < 0 || (c->ratio != 0 && c->k != 0)) {
        return ddl__fail(sentence, DDL_ERR_ARG,
                         "compression %s: ratio is %g and k is %lld; set one of them, ratio above 0 and at most 1",
                         name, c->ratio, (long long)c->k);
    }
    if (c->rank < 0 || c->rank > 64 || (c->kind != DDL_COMPRESS_POWER && c->rank != 0)) {
        return ddl__fail(sentence, DDL_ERR_ARG, "compression %s: rank is %d; PowerSGD has 1 to 64, others none", name,
                         c->rank);
    }
    if (c->levels < 0 || c->levels > 127 || (c->kind != DDL_COMPRESS_QSGD && c->levels != 0)) {
        return ddl__fail(sentence, DDL_ERR_ARG, "compression %s: levels is %d; QSGD has 1 to 127, others none", name,
                         c->levels);
    }
    return DDL_OK;
}

static inline ddl_status ddl__compress_check_feedback(ddl__sentence *sentence, const ddl_compression *c) {
    const char *name = ddl__compress_name(c->kind);
    if (c->error_feedback < -1 || c->error_feedback > 1) {
        return ddl__fail(sentence, DDL_ERR_ARG, "compression %s: error_feedback is %d; 1 is on, -1 off, 0 the default",
                         name, c->error_feedback);
    }
    if (c->error_feedback == -1 && (c->kind == DDL_COMPRESS_SIGN || c->kind >= DDL_COMPRESS_TOP_K)) {
        return ddl__fail(sentence, DDL_ERR_ARG,
                         "compression %s without error feedback would lose what it does not send for good; leave "
                         "error_feedback on, or take f16, bf16, int8 or QSGD",
                         name);
    }
    if (c->error_feedback == 1 && (c->kind == DDL_COMPRESS_MAJORITY || c->kind == DDL_COMPRESS_NONE)) {
        return ddl__fail(sentence, DDL_ERR_ARG,
                         "compression %s cannot have error feedback: it has no error with a magnitude; take sign, or "
                         "leave error_feedback off",
                         name);
    }
    return DDL_OK;
}

/* Checks a config and writes it with all defaults filled in: error_feedback is 0 or 1 then. Untouched on an error. */
static inline ddl_status ddl__compress_init(ddl__sentence *sentence, const ddl_compression *config,
                                            ddl_compression *out) {
    ddl_compression c = *config;
    if ((unsigned)c.kind > DDL_COMPRESS_ADAPTIVE) {
        return ddl__fail(sentence, DDL_ERR_ARG, "%d is not a kind of compression; see ddl_compression_kind",
                         (int)c.kind);
    }
    DDL__TRY(ddl__compress_check_members(sentence, &c));
    DDL__TRY(ddl__compress_check_feedback(sentence, &c));
    bool keeps = c.kind == DDL_COMPRESS_INT8 || c.kind == DDL_COMPRESS_SIGN || c.kind >= DDL_COMPRESS_TOP_K;
    c.error_feedback = c.error_feedback == 0 ? keeps : c.error_feedback == 1;
    c.rank = c.kind == DDL_COMPRESS_POWER && c.rank == 0 ? 2 : c.rank;
    c.levels = c.kind == DDL_COMPRESS_QSGD && c.levels == 0 ? 7 : c.kind == DDL_COMPRESS_INT8 ? 127 : c.levels;
    if (ddl__compress_is_sparse(c.kind) && c.k == 0 && c.ratio == 0) {
        c.ratio = 0.01;
    }
    *out = c;
    return DDL_OK;
}

/* How many of n elements a sparse kind sends: at least one of a tensor that has any. */
static inline int64_t ddl__compress_kept(const ddl_compression *c, int64_t n) {
    int64_t k = c->k > 0 ? c->k : (int64_t)(c->ratio * (double)n + 0.5);
    return DDL__MIN(DDL__MAX(k, 1), n);
}

/* Elements in 64 bytes of code. */
static inline int64_t ddl__code_run(int bits) { return 512 / bits; }

static inline size_t ddl__code_block_bytes(int bits, int64_t count) {
    int64_t run = ddl__code_run(bits);
    return sizeof(float) + (size_t)((count + run - 1) / run) * 64;
}

/* Bytes of the code of n elements. PowerSGD is no code of one rank: 0. */
static inline size_t ddl__code_bytes(const ddl_compression *c, int64_t n) {
    int bits = ddl__compress_bits(c);
    if (bits > 0) {
        size_t last = n % DDL__CODE_BLOCK > 0 ? ddl__code_block_bytes(bits, n % DDL__CODE_BLOCK) : 0;
        return (size_t)(n / DDL__CODE_BLOCK) * ddl__code_block_bytes(bits, DDL__CODE_BLOCK) + last;
    }
    switch (c->kind) {
    case DDL_COMPRESS_ADAPTIVE: /* until one is chosen */
    case DDL_COMPRESS_NONE: return (size_t)n * 4;
    case DDL_COMPRESS_F16:
    case DDL_COMPRESS_BF16: return (size_t)n * 2;
    case DDL_COMPRESS_TOP_K:
    case DDL_COMPRESS_GTOP_K: return (size_t)ddl__compress_kept(c, n) * 8;
    case DDL_COMPRESS_RANDOM_K: return (size_t)ddl__compress_kept(c, n) * 4;
    default: return 0;
    }
}

/* What DDL_COMPRESS_ADAPTIVE chooses from: exact, then fewer and fewer bytes. */
enum { DDL__OFFERS = 5 };
static inline ddl_compression ddl__compress_offer(int32_t number) {
    static const ddl_compression offers[DDL__OFFERS] = {
        {.kind = DDL_COMPRESS_NONE},
        {.kind = DDL_COMPRESS_F16, .error_feedback = 1},
        {.kind = DDL_COMPRESS_INT8, .error_feedback = 1, .levels = 127},
        {.kind = DDL_COMPRESS_SIGN, .error_feedback = 1},
        {.kind = DDL_COMPRESS_TOP_K, .error_feedback = 1, .ratio = 0.01},
    };
    return offers[number];
}

/* What a random stream depends on, and nothing else, so that a replay gives the same bits. */
typedef struct ddl__code_key {
    int64_t step;
    int32_t tensor, rank; /* rank 0 on all ranks where they must draw the same */
} ddl__code_key;

static inline uint64_t ddl__code_stream(const ddl_compression *c, ddl__code_key key) {
    uint64_t hash = ddl__mix(c->seed, 0x636f6d7072657373ull);
    hash = ddl__mix(hash, (uint64_t)key.step);
    return ddl__mix(hash, (uint64_t)(uint32_t)key.tensor << 32 | (uint32_t)key.rank);
}

#endif /* DDL_COMPRESS_CONFIG_H */

/* crc32c: the checksum of frame headers and, when asked for, of payloads.
 * CRC-32C (Castagnoli, polynomial 0x1EDC6F41 reflected; RFC 3720 B.4), the one that x86 computes in hardware. This part
 * knows nothing of frames, and it has no mutable state: the tables are constants, the processor is asked each time. */
#ifndef DDL_WIRE_CRC32C_H
#define DDL_WIRE_CRC32C_H

#include "../base.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define DDL__CRC32C_X86 1
#include <nmmintrin.h>
#include <wmmintrin.h>
#endif

/* Little-endian words, as all that this is built for has them, at any address; one load or store each. */
static inline uint32_t ddl__load_le32(const uint8_t *p) {
    uint32_t value;
    memcpy(&value, p, 4);
    return value;
}

static inline uint64_t ddl__load_le64(const uint8_t *p) {
    uint64_t value;
    memcpy(&value, p, 8);
    return value;
}

static inline void ddl__store_le32(uint8_t *p, uint32_t value) {
    memcpy(p, &value, 4);
}

static inline void ddl__store_le64(uint8_t *p, uint64_t value) {
    memcpy(p, &value, 8);
}

/* A CRC is linear: the entry for a byte is the XOR of the entries for its bits. So each table of slice-by-8 (Kounavis
 * and Berry, "A Systematic Approach to Building High Performance Software-based CRC Generators", 2005) is given by its
 * eight one-bit entries, lowest bit first, and the preprocessor writes out the 256. */
#define DDL__CRC_1(x, a) (x), ((x) ^ a)
#define DDL__CRC_2(x, a, b) DDL__CRC_1(x, a), DDL__CRC_1((x) ^ b, a)
#define DDL__CRC_3(x, a, b, c) DDL__CRC_2(x, a, b), DDL__CRC_2((x) ^ c, a, b)
#define DDL__CRC_4(x, a, b, c, d) DDL__CRC_3(x, a, b, c), DDL__CRC_3((x) ^ d, a, b, c)
#define DDL__CRC_5(x, a, b, c, d, e) DDL__CRC_4(x, a, b, c, d), DDL__CRC_4((x) ^ e, a, b, c, d)
#define DDL__CRC_6(x, a, b, c, d, e, f) DDL__CRC_5(x, a, b, c, d, e), DDL__CRC_5((x) ^ f, a, b, c, d, e)
#define DDL__CRC_7(x, a, b, c, d, e, f, g) DDL__CRC_6(x, a, b, c, d, e, f), DDL__CRC_6((x) ^ g, a, b, c, d, e, f)
#define DDL__CRC_8(a, b, c, d, e, f, g, h)                                                                             \
    { DDL__CRC_7(0u, a, b, c, d, e, f, g), DDL__CRC_7(h, a, b, c, d, e, f, g) }

/* Table t advances a byte past t further bytes of zeros. */
static const uint32_t ddl__crc32c_table[8][256] = {
    DDL__CRC_8(0xf26b8303u, 0xe13b70f7u, 0xc79a971fu, 0x8ad958cfu, 0x105ec76fu, 0x20bd8edeu, 0x417b1dbcu, 0x82f63b78u),
    DDL__CRC_8(0x13a29877u, 0x274530eeu, 0x4e8a61dcu, 0x9d14c3b8u, 0x3fc5f181u, 0x7f8be302u, 0xff17c604u, 0xfbc3faf9u),
    DDL__CRC_8(0xa541927eu, 0x4f6f520du, 0x9edea41au, 0x38513ec5u, 0x70a27d8au, 0xe144fb14u, 0xc76580d9u, 0x8b277743u),
    DDL__CRC_8(0xdd45aab8u, 0xbf672381u, 0x7b2231f3u, 0xf64463e6u, 0xe964b13du, 0xd725148bu, 0xaba65fe7u, 0x52a0c93fu),
    DDL__CRC_8(0x38116facu, 0x7022df58u, 0xe045beb0u, 0xc5670b91u, 0x8f2261d3u, 0x1ba8b557u, 0x37516aaeu, 0x6ea2d55cu),
    DDL__CRC_8(0xef306b19u, 0xdb8ca0c3u, 0xb2f53777u, 0x6006181fu, 0xc00c303eu, 0x85f4168du, 0x0e045bebu, 0x1c08b7d6u),
    DDL__CRC_8(0x68032cc8u, 0xd0065990u, 0xa5e0c5d1u, 0x4e2dfd53u, 0x9c5bfaa6u, 0x3d5b83bdu, 0x7ab7077au, 0xf56e0ef4u),
    DDL__CRC_8(0x493c7d27u, 0x9278fa4eu, 0x211d826du, 0x423b04dau, 0x847609b4u, 0x0d006599u, 0x1a00cb32u, 0x34019664u),
};

/* The raw register in, the raw register out: the inversions of the standard are in ddl__crc32c. */
static inline uint32_t ddl__crc32c_portable(uint32_t crc, const uint8_t *p, size_t bytes) {
    const uint32_t(*t)[256] = ddl__crc32c_table;
    for (; bytes >= 8; bytes -= 8, p += 8) {
        uint64_t w = ddl__load_le64(p) ^ crc;
        crc = t[7][w & 255] ^ t[6][(w >> 8) & 255] ^ t[5][(w >> 16) & 255] ^ t[4][(w >> 24) & 255] ^
              t[3][(w >> 32) & 255] ^ t[2][(w >> 40) & 255] ^ t[1][(w >> 48) & 255] ^ t[0][w >> 56];
    }
    for (; bytes > 0; bytes--, p++) {
        crc = (crc >> 8) ^ t[0][(crc ^ *p) & 255];
    }
    return crc;
}

#ifdef DDL__CRC32C_X86
/* The instruction takes 3 cycles and starts every cycle, so a long buffer is read as three lanes side by side; their
 * registers are joined by multiplying with x^(8n-33) modulo the polynomial, n = bytes that a lane is followed by
 * (Gopal et al., "Fast CRC Computation for iSCSI Polynomial Using CRC32 Instruction", Intel 2011). */
#define DDL__CRC32C_LANE 512

__attribute__((target("sse4.2,pclmul"))) static inline uint32_t ddl__crc32c_lanes(uint32_t crc, const uint8_t *p) {
    uint64_t a = crc, b = 0, c = 0;
    for (size_t i = 0; i < DDL__CRC32C_LANE; i += 8) {
        a = _mm_crc32_u64(a, ddl__load_le64(p + i));
        b = _mm_crc32_u64(b, ddl__load_le64(p + DDL__CRC32C_LANE + i));
        c = _mm_crc32_u64(c, ddl__load_le64(p + 2 * DDL__CRC32C_LANE + i));
    }
    __m128i shift = _mm_set_epi64x(0xdd7e3b0c, 0x170076fa); /* past one lane, past two */
    __m128i joined = _mm_xor_si128(_mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)a), shift, 0x00),
                                   _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)b), shift, 0x10));
    return (uint32_t)(_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(joined)) ^ c);
}

__attribute__((target("sse4.2"))) static inline uint32_t ddl__crc32c_x86(uint32_t crc, const uint8_t *p, size_t bytes) {
    uint64_t wide = crc;
    for (; bytes >= 8; bytes -= 8, p += 8) {
        wide = _mm_crc32_u64(wide, ddl__load_le64(p));
    }
    crc = (uint32_t)wide;
    if (bytes >= 4) {
        crc = _mm_crc32_u32(crc, ddl__load_le32(p));
        bytes -= 4;
        p += 4;
    }
    for (; bytes > 0; bytes--, p++) {
        crc = _mm_crc32_u8(crc, *p);
    }
    return crc;
}
#endif

/* CRC-32C of data. Start with 0; a buffer may come in pieces, each call taking the result of the one before. */
static inline uint32_t ddl__crc32c(uint32_t crc, const void *data, size_t bytes) {
    const uint8_t *p = (const uint8_t *)data;
    crc = ~crc;
#ifdef DDL__CRC32C_X86
    if (__builtin_cpu_supports("sse4.2")) {
        if (bytes >= 3 * DDL__CRC32C_LANE && __builtin_cpu_supports("pclmul")) {
            for (; bytes >= 3 * DDL__CRC32C_LANE; bytes -= 3 * DDL__CRC32C_LANE, p += 3 * DDL__CRC32C_LANE) {
                crc = ddl__crc32c_lanes(crc, p);
            }
        }
        return ~ddl__crc32c_x86(crc, p, bytes);
    }
#endif
    return ~ddl__crc32c_portable(crc, p, bytes);
}

#endif

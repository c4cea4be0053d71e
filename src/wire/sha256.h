/* sha256: what the handshake is made of: SHA-256 (FIPS 180-4), HMAC-SHA256 (RFC 2104), constant-time comparison, wiping
 * and random bytes. A job makes a handful of MACs for each connection, so this is short rather than fast. */
#ifndef DDL_WIRE_SHA256_H
#define DDL_WIRE_SHA256_H

#include "../base.h"

#include <fcntl.h>
#include <sys/random.h>

typedef struct ddl__sha256 {
    uint32_t state[8];
    uint64_t bytes; /* hashed so far; the low 6 bits say how full block is */
    uint8_t block[64];
} ddl__sha256;

/* Zeroes memory that held a secret. The barrier tells the compiler that somebody looks, or it drops the stores. */
static void ddl__wipe(void *memory, size_t bytes) {
    if (bytes > 0) {
        memset(memory, 0, bytes);
    }
    __asm__ volatile("" : : "r"(memory) : "memory");
}

/* Compares in a time that depends on bytes alone: how far a forgery agrees must not show. */
static int ddl__ct_equal(const void *a, const void *b, size_t bytes) {
    const volatile uint8_t *x = (const volatile uint8_t *)a, *y = (const volatile uint8_t *)b;
    uint8_t difference = 0;
    for (size_t i = 0; i < bytes; i++) {
        difference = (uint8_t)(difference | (x[i] ^ y[i]));
    }
    return difference == 0;
}

static void ddl__sha256_store(uint8_t *out, uint64_t value, unsigned bytes) {
    for (unsigned i = 0; i < bytes; i++) {
        out[i] = (uint8_t)(value >> (8 * (bytes - 1 - i)));
    }
}

#ifdef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION
/* NOT a hash, and no protection: a keyed mixing that a fuzzer can afford a hundred thousand times a second, so that it
 * reaches the states behind the proofs. Only the macro that fuzzers agree on (libFuzzer, OSS-Fuzz) brings it in. */
static void ddl__sha256_block(uint32_t state[8], const uint8_t block[64]) {
    uint64_t lanes[4], words[8];
    memcpy(lanes, state, sizeof(lanes));
    memcpy(words, block, sizeof(words));
    for (size_t i = 0; i < 8; i++) {
        uint64_t x = (lanes[i & 3] ^ words[i]) * 0x9E3779B97F4A7C15u;
        lanes[i & 3] = x ^ x >> 32;
        lanes[(i + 1) & 3] += lanes[i & 3];
    }
    for (size_t i = 0; i < 8; i++) { /* so that the last word reaches all lanes */
        lanes[(i + 1) & 3] += (lanes[i & 3] ^ lanes[i & 3] >> 29) * 0xBF58476D1CE4E5B9u;
    }
    memcpy(state, lanes, sizeof(lanes));
}
#else
static const uint32_t ddl__sha256_k[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t ddl__sha256_rotate(uint32_t x, unsigned n) { return x >> n | x << (32 - n); }

static void ddl__sha256_schedule(uint32_t w[64], const uint8_t block[64]) {
    for (size_t i = 0; i < 16; i++) {
        const uint8_t *p = block + 4 * i;
        w[i] = (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
    }
    for (size_t i = 16; i < 64; i++) {
        uint32_t a = w[i - 15], b = w[i - 2];
        uint32_t s0 = ddl__sha256_rotate(a, 7) ^ ddl__sha256_rotate(a, 18) ^ (a >> 3);
        uint32_t s1 = ddl__sha256_rotate(b, 17) ^ ddl__sha256_rotate(b, 19) ^ (b >> 10);
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
}

/* FIPS 180-4, 6.2.2. */
static void ddl__sha256_block(uint32_t state[8], const uint8_t block[64]) {
    uint32_t w[64];
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    ddl__sha256_schedule(w, block);
    for (size_t i = 0; i < 64; i++) {
        uint32_t s1 = ddl__sha256_rotate(e, 6) ^ ddl__sha256_rotate(e, 11) ^ ddl__sha256_rotate(e, 25);
        uint32_t s0 = ddl__sha256_rotate(a, 2) ^ ddl__sha256_rotate(a, 13) ^ ddl__sha256_rotate(a, 22);
        uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + ddl__sha256_k[i] + w[i];
        uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
        h = g, g = f, f = e, e = d + t1;
        d = c, c = b, b = a, a = t1 + t2;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d;
    state[4] += e, state[5] += f, state[6] += g, state[7] += h;
    ddl__wipe(w, sizeof(w)); /* the schedule of a key block gives the key */
}
#endif

static void ddl__sha256_init(ddl__sha256 *h) {
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(h->state, start, sizeof(start));
    h->bytes = 0;
}

static void ddl__sha256_update(ddl__sha256 *h, const void *data, size_t bytes) {
    const uint8_t *p = (const uint8_t *)data;
    while (bytes > 0) {
        size_t at = h->bytes & 63, room = 64 - at, n = bytes < room ? bytes : room;
        memcpy(h->block + at, p, n);
        h->bytes += n;
        p += n;
        bytes -= n;
        if (n == room) {
            ddl__sha256_block(h->state, h->block);
        }
    }
}

static void ddl__sha256_final(ddl__sha256 *h, uint8_t out[32]) {
    static const uint8_t padding[64] = {0x80};
    uint8_t length[8];
    ddl__sha256_store(length, h->bytes * 8, 8);
    /* 0x80 and zeros up to 8 bytes before the end of a block */
    ddl__sha256_update(h, padding, 1 + ((55 - h->bytes) & 63));
    ddl__sha256_update(h, length, 8);
    for (size_t i = 0; i < 8; i++) {
        ddl__sha256_store(out + 4 * i, h->state[i], 4);
    }
    ddl__wipe(h, sizeof(*h));
}

/* A key after its two blocks are hashed. Whoever keeps this need not keep the secret, and each MAC is half the work. */
typedef struct ddl__hmac_key {
    uint32_t inner[8], outer[8];
} ddl__hmac_key;

static void ddl__hmac_key_half(uint32_t state[8], const uint8_t key[64], uint8_t pad) {
    ddl__sha256 h;
    uint8_t block[64];
    for (size_t i = 0; i < 64; i++) {
        block[i] = key[i] ^ pad;
    }
    ddl__sha256_init(&h);
    ddl__sha256_block(h.state, block);
    memcpy(state, h.state, sizeof(h.state));
    ddl__wipe(block, sizeof(block));
    ddl__wipe(&h, sizeof(h));
}

/* Any length of secret; a long one is hashed first, as RFC 2104 says. */
static void ddl__hmac_key_init(ddl__hmac_key *key, const void *secret, size_t bytes) {
    uint8_t block[64] = {0};
    if (bytes > sizeof(block)) {
        ddl__sha256 h;
        ddl__sha256_init(&h);
        ddl__sha256_update(&h, secret, bytes);
        ddl__sha256_final(&h, block);
    } else if (bytes > 0) {
        memcpy(block, secret, bytes);
    }
    ddl__hmac_key_half(key->inner, block, 0x36);
    ddl__hmac_key_half(key->outer, block, 0x5c);
    ddl__wipe(block, sizeof(block));
}

static void ddl__hmac_begin(ddl__sha256 *h, const ddl__hmac_key *key) {
    memcpy(h->state, key->inner, sizeof(h->state));
    h->bytes = 64;
}

static void ddl__hmac_end(ddl__sha256 *h, const ddl__hmac_key *key, uint8_t out[32]) {
    uint8_t inner[32];
    ddl__sha256_final(h, inner);
    memcpy(h->state, key->outer, sizeof(h->state));
    h->bytes = 64;
    ddl__sha256_update(h, inner, sizeof(inner));
    ddl__sha256_final(h, out);
}

/* The whole of it for one message. */
static __attribute__((unused)) void ddl__hmac_sha256(const void *secret, size_t secret_bytes, const void *data,
                                                     size_t bytes, uint8_t out[32]) {
    ddl__hmac_key key;
    ddl__sha256 h;
    ddl__hmac_key_init(&key, secret, secret_bytes);
    ddl__hmac_begin(&h, &key);
    ddl__sha256_update(&h, data, bytes);
    ddl__hmac_end(&h, &key, out);
    ddl__wipe(&key, sizeof(key));
}

/* For kernels and sandboxes without the system call. */
static ddl_status ddl__random_from_file(uint8_t *out, size_t bytes) {
    int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return DDL_ERR_SYSTEM;
    }
    while (bytes > 0) {
        ssize_t n = read(fd, out, bytes);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            break;
        }
        out += n;
        bytes -= (size_t)n;
    }
    close(fd);
    return bytes == 0 ? DDL_OK : DDL_ERR_SYSTEM;
}

/* Fills out with random bytes from the kernel. On DDL_ERR_SYSTEM out must not be used. */
static ddl_status ddl__random(void *out, size_t bytes) {
    uint8_t *p = (uint8_t *)out;
    while (bytes > 0) {
        ssize_t n = getrandom(p, bytes, 0);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return ddl__random_from_file(p, bytes);
        }
        p += n;
        bytes -= (size_t)n;
    }
    return DDL_OK;
}

#endif

/* siphash: SipHash-2-4, the keyed checksum of frames (DDL_MAC), and the keys and counters of one direction of a link.
 * Source: Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012. */
#ifndef DDL_WIRE_SIPHASH_H
#define DDL_WIRE_SIPHASH_H

#include "frame.h"
#include "sha256.h"

static inline uint64_t ddl__rotl64(uint64_t x, int by) { return x << by | x >> (64 - by); }

static inline void ddl__sip_rounds(uint64_t v[4], int rounds) {
    for (int i = 0; i < rounds; i++) {
        v[0] += v[1];
        v[2] += v[3];
        v[1] = ddl__rotl64(v[1], 13) ^ v[0];
        v[3] = ddl__rotl64(v[3], 16) ^ v[2];
        v[0] = ddl__rotl64(v[0], 32) + v[3];
        v[2] += v[1];
        v[3] = ddl__rotl64(v[3], 21) ^ v[0];
        v[1] = ddl__rotl64(v[1], 17) ^ v[2];
        v[2] = ddl__rotl64(v[2], 32);
    }
}

static uint64_t ddl__siphash(const uint64_t key[2], const void *data, size_t bytes) {
    const uint8_t *p = data;
    uint64_t v[4] = {key[0] ^ 0x736f6d6570736575u, key[1] ^ 0x646f72616e646f6du, key[0] ^ 0x6c7967656e657261u,
                     key[1] ^ 0x7465646279746573u};
    size_t whole = bytes & ~(size_t)7;
    for (size_t at = 0; at < whole; at += 8) {
        uint64_t word = ddl__load_le64(p + at);
        v[3] ^= word;
        ddl__sip_rounds(v, 2);
        v[0] ^= word;
    }
    uint64_t last = (uint64_t)bytes << 56;
    for (size_t at = whole; at < bytes; at++) {
        last |= (uint64_t)p[at] << (8 * (at - whole));
    }
    v[3] ^= last;
    ddl__sip_rounds(v, 2);
    v[0] ^= last;
    v[2] ^= 0xff;
    ddl__sip_rounds(v, 4);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

/* >>mac
 * Frames that are sealed have the same 48 bytes. The magic and the header's checksum, which a key makes superfluous,
 * give their places to the two halves of a tag of 64 bits; the version gives its byte to a counter's low bits:
 *
 *     offset  0  tag, low half         u32
 *             4  counter, low 8 bits   u8
 *            40  payload tag           u32  with DDL_CHECK=payload: of the payload, under a key of its own
 *            44  tag, high half        u32
 *
 * tag = SipHash(key, counter as u64, bytes 4..43). The counter keeps a frame that was recorded from being sent again,
 * and frames from changing places: it only grows. What a sender takes back leaves a gap, of less than 256 * 256 frames:
 * the reader tries as many turns of the low bits, which costs 8 of the tag's 64 bits. */

enum { DDL__MAC_NONCE_BYTES = 16, DDL__MAC_TURN = 256, DDL__MAC_TURNS = 256 };

typedef struct ddl__mac {
    uint64_t header_key[2], payload_key[2];
    uint64_t next; /* counter of the next frame */
} ddl__mac;

/* Keys of the frames from one rank to another: both told a nonce when they joined, so that no run has the keys of
 * another. Needs a secret. */
static void ddl__mac_init(ddl__mac *out, const uint8_t *secret, size_t secret_bytes, uint64_t job, uint32_t from,
                          uint32_t to, const uint8_t from_nonce[DDL__MAC_NONCE_BYTES],
                          const uint8_t to_nonce[DDL__MAC_NONCE_BYTES]) {
    static const char label[16] = "ddl1 frames"; /* as those of the handshake, and none of them */
    uint8_t fields[16], digest[32];
    ddl__hmac_key key;
    ddl__sha256 h;
    ddl__store_le64(fields, job);
    ddl__store_le32(fields + 8, from);
    ddl__store_le32(fields + 12, to);
    ddl__hmac_key_init(&key, secret, secret_bytes);
    ddl__hmac_begin(&h, &key);
    ddl__sha256_update(&h, label, sizeof label);
    ddl__sha256_update(&h, fields, sizeof fields);
    ddl__sha256_update(&h, from_nonce, DDL__MAC_NONCE_BYTES);
    ddl__sha256_update(&h, to_nonce, DDL__MAC_NONCE_BYTES);
    ddl__hmac_end(&h, &key, digest);
    for (int i = 0; i < 2; i++) {
        out->header_key[i] = ddl__load_le64(digest + 8 * i);
        out->payload_key[i] = ddl__load_le64(digest + 16 + 8 * i);
    }
    out->next = 0;
    ddl__wipe(&key, sizeof key);
    ddl__wipe(digest, sizeof digest);
}

static uint64_t ddl__mac_header(const ddl__mac *m, uint64_t counter, const uint8_t header[DDL__FRAME_BYTES]) {
    uint8_t covered[8 + 40];
    ddl__store_le64(covered, counter);
    memcpy(covered + 8, header + 4, 40);
    return ddl__siphash(m->header_key, covered, sizeof covered);
}

static uint32_t ddl__mac_payload(const ddl__mac *m, const void *payload, size_t bytes) {
    return (uint32_t)ddl__siphash(m->payload_key, payload, bytes);
}

/* Seals a header that ddl__frame_write wrote. */
static void ddl__mac_seal(ddl__mac *m, uint8_t header[DDL__FRAME_BYTES]) {
    uint64_t counter = m->next++;
    header[4] = (uint8_t)counter;
    uint64_t tag = ddl__mac_header(m, counter, header);
    ddl__store_le32(header, (uint32_t)tag);
    ddl__store_le32(header + 44, (uint32_t)(tag >> 32));
}

/* Reads a sealed header, like ddl__frame_read, and its counter; whoever takes the frame sets m->next to one more.
 * Errors: DDL_ERR_CORRUPT. */
static ddl_status ddl__mac_read(const ddl__mac *m, const uint8_t in[DDL__FRAME_BYTES], ddl__frame *out,
                                uint64_t *out_counter) {
    uint8_t h[DDL__FRAME_BYTES];
    memcpy(h, in, sizeof h);
    uint64_t counter = m->next + (uint8_t)(h[4] - (uint8_t)m->next);
    uint64_t tag = ddl__load_le32(h) | (uint64_t)ddl__load_le32(h + 44) << 32;
    uint64_t end = counter + DDL__MAC_TURN * DDL__MAC_TURNS;
    while ((tag ^ ddl__mac_header(m, counter, h)) != 0) {
        counter += DDL__MAC_TURN;
        if (counter == end) {
            return DDL_ERR_CORRUPT;
        }
    }
    *out_counter = counter;
    return ddl__frame_fields(h, out);
}

#endif /* DDL_WIRE_SIPHASH_H */

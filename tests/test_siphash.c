/* The keyed checksum of frames: SipHash-2-4 against the vectors of its paper and hashes made with OpenSSL; sealed headers
 * against every change of a bit, replay, exchange and gaps. What it is for is in test_mac.c. */
#include "test.h"

#include "../src/wire/siphash.h"

/* ---- SipHash ---- */

static const uint64_t paper_key[2] = {0x0706050403020100u, 0x0f0e0d0c0b0a0908u};

TEST(siphash_is_that_of_the_paper) {
    uint8_t message[64];
    for (unsigned i = 0; i < sizeof message; i++) {
        message[i] = (uint8_t)i;
    }
    CHECK_EQ(ddl__siphash(paper_key, message, 15), 0xa129ca6149be45e5u); /* appendix A */
    /* The first of the reference implementation's vectors, as bytes. */
    static const uint64_t first[] = {0x726fdb47dd0e0e31u, 0x74f839c593dc67fdu, 0x0d6c8009d9a94f5au,
                                     0x85676696d7fb7e2du, 0xcf2794e0277187b7u, 0x18765564cd99a68du,
                                     0xcbc9466e58fee3ceu, 0xab0200f58b01d137u, 0x93f5f5799a932462u};
    for (size_t i = 0; i < sizeof first / sizeof first[0]; i++) {
        CHECK_EQ(ddl__siphash(paper_key, message, i), first[i]);
    }
    /* All 64, made with OpenSSL 3: the hash of the hashes. */
    static const uint8_t expected[32] = {0x02, 0x26, 0xa9, 0x10, 0x02, 0xaf, 0x97, 0x75, 0xa7, 0x91, 0xb3,
                                         0xec, 0x5a, 0x48, 0xe6, 0x43, 0xf8, 0x84, 0x8d, 0x2d, 0x57, 0x74,
                                         0xde, 0xa9, 0xbe, 0x34, 0x38, 0xd5, 0x78, 0x6b, 0xb5, 0x8e};
    ddl__sha256 h;
    uint8_t one[8], digest[32];
    ddl__sha256_init(&h);
    for (size_t i = 0; i < 64; i++) {
        ddl__store_le64(one, ddl__siphash(paper_key, message, i));
        ddl__sha256_update(&h, one, sizeof one);
    }
    ddl__sha256_final(&h, digest);
    CHECK(memcmp(digest, expected, sizeof digest) == 0);
}

/* ---- sealed headers ---- */

static const uint8_t secret[] = "a secret of at least 16 bytes", nonces[3][DDL__MAC_NONCE_BYTES] = {"one", "two", "3"};

static ddl__mac keys(uint64_t job, uint32_t from, uint32_t to, int from_nonce, int to_nonce) {
    ddl__mac m;
    ddl__mac_init(&m, secret, sizeof secret - 1, job, from, to, nonces[from_nonce], nonces[to_nonce]);
    return m;
}

static ddl__frame some_frame(uint64_t i) {
    return (ddl__frame){.type = (uint8_t)(1 + i % DDL__FRAME_TYPE_MAX), .flags = (uint16_t)(i * 7), .bytes = 1000,
                        .source = 3, .group = 5, .epoch = 2, .sequence = i, .signature = i * 0x9e3779b97f4a7c15u,
                        .payload_crc = (uint32_t)i};
}

static void seal(ddl__mac *m, uint64_t i, uint8_t out[DDL__FRAME_BYTES]) {
    ddl__frame f = some_frame(i);
    ddl__frame_write(out, &f);
    ddl__mac_seal(m, out);
}

/* Takes a header as the mesh does: 1 when it is frame i. */
static int takes(ddl__mac *m, const uint8_t header[DDL__FRAME_BYTES], uint64_t i) {
    ddl__frame f, poison, want = some_frame(i);
    uint64_t counter = 0;
    memset(&f, 0xa5, sizeof f);
    poison = f;
    if (ddl__mac_read(m, header, &f, &counter) != DDL_OK) {
        CHECK(memcmp(&f, &poison, sizeof f) == 0);
        return 0;
    }
    m->next = counter + 1;
    CHECK(f.type == want.type && f.flags == want.flags && f.bytes == want.bytes && f.source == want.source &&
          f.group == want.group && f.epoch == want.epoch && f.sequence == want.sequence &&
          f.signature == want.signature && f.payload_crc == want.payload_crc);
    return 1;
}

TEST(sealed_headers_come_back_as_they_went) {
    ddl__mac out = keys(1, 3, 4, 0, 1), in = out;
    uint8_t header[DDL__FRAME_BYTES];
    for (uint64_t i = 0; i < 1000; i++) {
        seal(&out, i, header);
        CHECK(takes(&in, header, i));
    }
    ddl__frame f;
    CHECK_EQ(ddl__frame_read(header, &f), DDL_ERR_CORRUPT); /* a rank without DDL_MAC does not take it */
}

TEST(every_change_of_a_bit_is_seen) {
    ddl__mac out = keys(1, 3, 4, 0, 1), in = out;
    uint8_t header[DDL__FRAME_BYTES];
    seal(&out, 1, header);
    for (int bit = 0; bit < DDL__FRAME_BYTES * 8; bit++) {
        header[bit / 8] ^= (uint8_t)(1 << bit % 8);
        CHECK(!takes(&in, header, 1));
        header[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    CHECK(takes(&in, header, 1));
}

TEST(neither_again_nor_in_another_order) {
    ddl__mac out = keys(1, 3, 4, 0, 1), in = out;
    uint8_t headers[300][DDL__FRAME_BYTES];
    for (uint64_t i = 0; i < 300; i++) {
        seal(&out, i, headers[i]);
    }
    CHECK(takes(&in, headers[0], 0));
    CHECK(!takes(&in, headers[0], 0));   /* again */
    CHECK(takes(&in, headers[255], 255)); /* 254 were taken back by the sender */
    CHECK(!takes(&in, headers[1], 1));   /* they do not come later */
    CHECK(!takes(&in, headers[254], 254));
    CHECK(takes(&in, headers[256], 256));
}

/* Whoever takes many frames back in a row is still understood; what it took back or had sent is not. */
TEST(gaps_may_be_wide) {
    ddl__mac out = keys(1, 3, 4, 0, 1), in = out;
    static uint8_t headers[300][DDL__FRAME_BYTES];
    uint8_t last[DDL__FRAME_BYTES], next[DDL__FRAME_BYTES];
    for (uint64_t i = 0; i < 300; i++) {
        seal(&out, i, headers[i]);
    }
    CHECK(takes(&in, headers[299], 299));
    for (uint64_t i = 0; i < 300; i++) {
        CHECK(!takes(&in, headers[i], i));
    }
    CHECK_EQ(in.next, 300);
    out.next = 300 + 65535; /* the widest gap, and one that is too wide */
    seal(&out, 7, last);
    seal(&out, 8, next);
    CHECK(!takes(&in, next, 8));
    CHECK(takes(&in, last, 7));
    CHECK(takes(&in, next, 8));
}

TEST(keys_are_of_one_job_one_run_one_direction) {
    const ddl__mac m = keys(1, 3, 4, 0, 1);
    const ddl__mac others[] = {keys(2, 3, 4, 0, 1), keys(1, 4, 3, 1, 0), keys(1, 3, 4, 1, 0), keys(1, 3, 4, 0, 2),
                               keys(1, 3, 4, 2, 1), keys(1, 3, 5, 0, 1)};
    uint8_t header[DDL__FRAME_BYTES];
    ddl__mac out = m;
    seal(&out, 9, header);
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        ddl__mac in = others[i];
        CHECK(!takes(&in, header, 9));
        CHECK(ddl__mac_payload(&in, "payload", 7) != ddl__mac_payload(&m, "payload", 7));
    }
    CHECK(m.header_key[0] != m.payload_key[0] && m.header_key[1] != m.payload_key[1]);
}

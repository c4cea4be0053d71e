/* The checksum against a bit-by-bit loop and published values; the frame header against its layout, and against damage
 * of every bit; the field reader and writer against every truncation.
 * tests/run: variants=gcc,asan,arm64 */
#include "test.h"

#include "../src/wire/frame.h"

static uint64_t seed = 1;
static uint64_t rnd(void) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return ddl__mix(seed, 0);
}

static uint32_t crc_by_bits(const uint8_t *p, size_t n) {
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < n; i++) {
        crc ^= p[i];
        for (int b = 0; b < 8; b++) {
            crc = (crc >> 1) ^ (0x82f63b78u & (0u - (crc & 1)));
        }
    }
    return ~crc;
}

TEST(crc_of_published_values) {
    uint8_t zeros[32] = {0}, ones[32], up[32], down[32];
    for (size_t i = 0; i < 32; i++) {
        ones[i] = 0xff;
        up[i] = (uint8_t)i;
        down[i] = (uint8_t)(31 - i);
    }
    CHECK_EQ(ddl__crc32c(0, "123456789", 9), 0xe3069283u);
    CHECK_EQ(ddl__crc32c(0, zeros, 32), 0x8a9136aau); /* RFC 3720 B.4 */
    CHECK_EQ(ddl__crc32c(0, ones, 32), 0x62a8ab43u);
    CHECK_EQ(ddl__crc32c(0, up, 32), 0x46dd794eu);
    CHECK_EQ(ddl__crc32c(0, down, 32), 0x113fdb5cu);
    CHECK_EQ(ddl__crc32c(0, NULL, 0), 0u);
}

/* Every size up to three lanes and a bit, both ways of computing, at every alignment. */
TEST(crc_equals_a_loop_over_bits) {
    enum { MAX = 3 * 512 * 2 + 700 };
    static uint8_t data[MAX + 8];
    for (size_t i = 0; i < sizeof data; i++) {
        data[i] = (uint8_t)rnd();
    }
    for (size_t n = 0; n <= MAX; n++) {
        const uint8_t *p = data + n % 8;
        uint32_t want = crc_by_bits(p, n);
        CHECK_EQ(ddl__crc32c(0, p, n), want);
        CHECK_EQ(~ddl__crc32c_portable(0xffffffffu, p, n), want);
        size_t cut = n == 0 ? 0 : rnd() % n;
        CHECK_EQ(ddl__crc32c(ddl__crc32c(0, p, cut), p + cut, n - cut), want);
    }
    static uint8_t large[(1u << 20) + 3];
    for (size_t i = 0; i < sizeof large; i++) {
        large[i] = (uint8_t)rnd();
    }
    CHECK_EQ(ddl__crc32c(0, large, sizeof large), crc_by_bits(large, sizeof large));
}

static ddl__frame random_frame(void) {
    ddl__frame f = {0};
    f.type = (uint8_t)(1 + rnd() % DDL__FRAME_TYPE_MAX);
    f.flags = (uint16_t)rnd();
    f.bytes = (uint32_t)(rnd() % (DDL__FRAME_MAX_PAYLOAD + 1));
    f.source = (uint32_t)rnd();
    f.group = (uint32_t)rnd();
    f.epoch = (uint32_t)rnd();
    f.sequence = rnd();
    f.signature = rnd();
    f.payload_crc = (uint32_t)rnd();
    return f;
}

static int frames_equal(const ddl__frame *a, const ddl__frame *b) {
    return a->type == b->type && a->flags == b->flags && a->bytes == b->bytes && a->source == b->source &&
           a->group == b->group && a->epoch == b->epoch && a->sequence == b->sequence && a->signature == b->signature &&
           a->payload_crc == b->payload_crc;
}

/* Golden bytes: they may not change while DDL__WIRE_MAJOR is 1, on any machine. */
TEST(header_layout_is_as_documented) {
    static const uint8_t want[44] = {'d',  'd',  'l',  '1',  1,    5,    0x02, 0x81, 0x00, 0x00, 0x10,
                                     0x00, 0x44, 0x33, 0x22, 0x11, 0x48, 0x37, 0x26, 0x15, 0x4c, 0x3b,
                                     0x2a, 0x19, 8,    7,    6,    5,    4,    3,    2,    1,    0x18,
                                     0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11, 0xdd, 0xcc, 0xbb, 0xaa};
    ddl__frame f = {.type = DDL__FRAME_COLL,
                    .flags = 0x8102,
                    .bytes = 1u << 20,
                    .source = 0x11223344,
                    .group = 0x15263748,
                    .epoch = 0x192a3b4c,
                    .sequence = 0x0102030405060708,
                    .signature = 0x1112131415161718,
                    .payload_crc = 0xaabbccdd};
    uint8_t out[DDL__FRAME_BYTES + 1];
    memset(out, 0xee, sizeof out);
    ddl__frame_write(out, &f);
    for (size_t i = 0; i < sizeof want; i++) {
        CHECK_EQ(out[i], want[i]);
    }
    uint32_t crc = crc_by_bits(want, sizeof want);
    for (unsigned i = 0; i < 4; i++) {
        CHECK_EQ(out[44 + i], (uint8_t)(crc >> (8 * i)));
    }
    CHECK_EQ(out[DDL__FRAME_BYTES], 0xee);
}

TEST(headers_come_back_as_they_went) {
    for (int i = 0; i < 200000; i++) {
        ddl__frame f = random_frame(), g;
        uint8_t bytes[DDL__FRAME_BYTES];
        memset(&g, 0xa5, sizeof g);
        ddl__frame_write(bytes, &f);
        CHECK_EQ(ddl__frame_read(bytes, &g), DDL_OK);
        CHECK(frames_equal(&f, &g));
    }
}

/* A bare header is taken from a transport that keeps bytes intact, from no other; a sum that is there is compared. */
TEST(bare_headers_are_for_intact_transports) {
    for (int i = 0; i < 20000; i++) {
        ddl__frame f = random_frame(), g;
        uint8_t bytes[DDL__FRAME_BYTES], summed[DDL__FRAME_BYTES];
        memset(bytes, 0xee, sizeof bytes);
        memset(&g, 0xa5, sizeof g);
        ddl__frame_write_bare(bytes, &f);
        CHECK_EQ(ddl__frame_read(bytes, &g), DDL_ERR_CORRUPT);
        CHECK_EQ(ddl__frame_read_by(bytes, 1, &g), DDL_OK);
        CHECK(frames_equal(&f, &g));
        ddl__frame_write(summed, &f);
        CHECK(memcmp(bytes, summed, 44) == 0);
        CHECK_EQ(ddl__frame_read_by(summed, 1, &g), DDL_OK);
        summed[rnd() % 44] ^= (uint8_t)(1u << rnd() % 8);
        CHECK_EQ(ddl__frame_read_by(summed, 1, &g), DDL_ERR_CORRUPT);
        bytes[rnd() % 4] ^= (uint8_t)(1u << rnd() % 8); /* the magic word is always looked at, and so are ranges */
        CHECK_EQ(ddl__frame_read_by(bytes, 1, &g), DDL_ERR_CORRUPT);
        f.bytes = (f.type == DDL__FRAME_DATA ? DDL__FRAME_MAX_DATA : DDL__FRAME_MAX_PAYLOAD) + 1;
        ddl__frame_write_bare(bytes, &f);
        CHECK_EQ(ddl__frame_read_by(bytes, 1, &g), DDL_ERR_CORRUPT);
    }
}

static void expect_refused(const uint8_t *bytes, ddl_status status) {
    ddl__frame g, poison;
    memset(&g, 0xa5, sizeof g);
    memset(&poison, 0xa5, sizeof poison);
    CHECK_EQ(ddl__frame_read(bytes, &g), status);
    CHECK(memcmp(&g, &poison, sizeof g) == 0);
}

TEST(every_flipped_bit_of_a_header_is_found) {
    for (int i = 0; i < 5000; i++) {
        ddl__frame f = random_frame();
        uint8_t bytes[DDL__FRAME_BYTES];
        ddl__frame_write(bytes, &f);
        for (unsigned bit = 0; bit < 384; bit++) {
            bytes[bit / 8] = (uint8_t)(bytes[bit / 8] ^ (1u << bit % 8));
            expect_refused(bytes, DDL_ERR_CORRUPT);
            bytes[bit / 8] = (uint8_t)(bytes[bit / 8] ^ (1u << bit % 8));
        }
    }
}

/* Every pair of flips, every burst of up to 32 bits in sample, and headers that stop early. */
TEST(pairs_bursts_and_truncations_of_a_header_are_found) {
    for (int i = 0; i < 5; i++) {
        ddl__frame f = random_frame();
        uint8_t good[DDL__FRAME_BYTES], bytes[DDL__FRAME_BYTES];
        ddl__frame_write(good, &f);
        memcpy(bytes, good, sizeof bytes);
        for (unsigned a = 0; a < 384; a++) {
            bytes[a / 8] = (uint8_t)(bytes[a / 8] ^ (1u << a % 8));
            for (unsigned b = a + 1; b < 384; b++) {
                bytes[b / 8] = (uint8_t)(bytes[b / 8] ^ (1u << b % 8));
                expect_refused(bytes, DDL_ERR_CORRUPT);
                bytes[b / 8] = (uint8_t)(bytes[b / 8] ^ (1u << b % 8));
            }
            bytes[a / 8] = (uint8_t)(bytes[a / 8] ^ (1u << a % 8));
        }
        for (int k = 0; k < 100000; k++) {
            uint64_t burst = (rnd() & 0xffffffffu) | 1;
            unsigned at = (unsigned)(rnd() % (384 - 32));
            memcpy(bytes, good, sizeof bytes);
            for (unsigned b = 0; b < 32; b++) {
                bytes[(at + b) / 8] = (uint8_t)(bytes[(at + b) / 8] ^ (((burst >> b) & 1) << (at + b) % 8));
            }
            expect_refused(bytes, DDL_ERR_CORRUPT);
        }
        for (size_t n = 0; n < DDL__FRAME_BYTES; n++) {
            memset(bytes, 0, sizeof bytes);
            memcpy(bytes, good, n);
            if (memcmp(bytes, good, sizeof bytes) != 0) {
                expect_refused(bytes, DDL_ERR_CORRUPT);
            }
        }
    }
}

/* The checksum is right here, so that only the range checks can refuse. */
static void reseal(uint8_t *bytes) { ddl__store_le32(bytes + 44, crc_by_bits(bytes, 44)); }

TEST(fields_out_of_range_are_refused) {
    ddl__frame f = random_frame(), g = {0};
    uint8_t good[DDL__FRAME_BYTES], bytes[DDL__FRAME_BYTES];
    ddl__frame_write(good, &f);
    for (unsigned v = 0; v < 256; v++) {
        memcpy(bytes, good, sizeof bytes);
        bytes[4] = (uint8_t)v;
        reseal(bytes);
        if (v == DDL__WIRE_MAJOR) {
            CHECK_EQ(ddl__frame_read(bytes, &g), DDL_OK);
        } else {
            expect_refused(bytes, DDL_ERR_VERSION);
        }
        memcpy(bytes, good, sizeof bytes);
        bytes[5] = (uint8_t)v;
        reseal(bytes);
        if (v >= DDL__FRAME_P2P && v <= DDL__FRAME_AGREE) {
            CHECK_EQ(ddl__frame_read(bytes, &g), DDL_OK);
            CHECK_EQ(g.type, v);
        } else {
            expect_refused(bytes, DDL_ERR_CORRUPT);
        }
    }
    static const uint32_t lengths[] = {(1u << 20) + 1, 1u << 21, (16u << 20) + 1, 0x7fffffffu, 0x80000000u, 0xffffffffu};
    for (size_t i = 0; i < 2 * DDL__COUNT_OF(lengths); i++) {
        uint32_t length = lengths[i / 2];
        memcpy(bytes, good, sizeof bytes);
        bytes[5] = i % 2 ? DDL__FRAME_DATA : DDL__FRAME_COLL;
        ddl__store_le32(bytes + 8, length);
        reseal(bytes);
        if (i % 2 && length <= 16u << 20) { /* data alone may be longer */
            CHECK_EQ(ddl__frame_read(bytes, &g), DDL_OK);
            CHECK_EQ(g.bytes, length);
        } else {
            expect_refused(bytes, DDL_ERR_CORRUPT);
        }
    }
    memcpy(bytes, good, sizeof bytes);
    memcpy(bytes, "ddl2", 4);
    reseal(bytes);
    expect_refused(bytes, DDL_ERR_CORRUPT);
}

TEST(payload_checksum_is_looked_at_when_the_flag_says_so) {
    uint8_t payload[1000];
    for (size_t i = 0; i < sizeof payload; i++) {
        payload[i] = (uint8_t)rnd();
    }
    ddl__frame f = {.type = DDL__FRAME_DATA, .flags = DDL__FRAME_FLAG_CRC, .bytes = sizeof payload};
    f.payload_crc = crc_by_bits(payload, sizeof payload);
    CHECK(ddl__frame_payload_ok(&f, payload));
    for (size_t bit = 0; bit < 8 * sizeof payload; bit++) {
        payload[bit / 8] = (uint8_t)(payload[bit / 8] ^ (1u << bit % 8));
        CHECK(!ddl__frame_payload_ok(&f, payload));
        payload[bit / 8] = (uint8_t)(payload[bit / 8] ^ (1u << bit % 8));
    }
    f.flags = 0;
    f.payload_crc = 0;
    CHECK(ddl__frame_payload_ok(&f, payload));
}

static void put_all(ddl__writer *w) {
    ddl__put_u8(w, 0xf1);
    ddl__put_u16(w, 0xf2e2);
    ddl__put_u32(w, 0xf3e3d3c3u);
    ddl__put_u64(w, 0xf4e4d4c4b4a49484u);
    ddl__put_string(w, "rank");
    ddl__put_bytes(w, "\0\1\2", 3);
    ddl__put_string(w, "");
}
enum { ALL_BYTES = 1 + 2 + 4 + 8 + 2 + 4 + 3 + 2 };

TEST(fields_come_back_and_lie_as_documented) {
    static const uint8_t want[ALL_BYTES] = {0xf1, 0xe2, 0xf2, 0xc3, 0xd3, 0xe3, 0xf3, 0x84, 0x94,
                                            0xa4, 0xb4, 0xc4, 0xd4, 0xe4, 0xf4, 4,    0,    'r',
                                            'a',  'n',  'k',  0,    1,    2,    0,    0};
    uint8_t buffer[ALL_BYTES];
    ddl__writer w = ddl__writer_of(buffer, sizeof buffer);
    put_all(&w);
    CHECK(!w.bad);
    CHECK_EQ(w.at, sizeof buffer);
    CHECK(memcmp(buffer, want, sizeof want) == 0);
    ddl__reader r = ddl__reader_of(buffer, sizeof buffer);
    char text[5], empty[1] = {'x'};
    uint8_t three[3];
    CHECK_EQ(ddl__get_u8(&r), 0xf1);
    CHECK_EQ(ddl__get_u16(&r), 0xf2e2);
    CHECK_EQ(ddl__get_u32(&r), 0xf3e3d3c3u);
    CHECK_EQ(ddl__get_u64(&r), 0xf4e4d4c4b4a49484u);
    ddl__get_string(&r, text, sizeof text);
    CHECK_EQ(text, "rank");
    ddl__get_bytes(&r, three, 3);
    CHECK(memcmp(three, "\0\1\2", 3) == 0);
    ddl__get_string(&r, empty, sizeof empty);
    CHECK_EQ(empty[0], 0);
    CHECK(!r.bad);
    CHECK_EQ(r.at, sizeof buffer);
    CHECK_EQ(ddl__get_u8(&r), 0);
    CHECK(r.bad);
}

/* Buffers of the exact size on the heap, so that a sanitizer sees one byte too far. */
TEST(a_reader_stops_at_every_truncation_and_stays_bad) {
    uint8_t whole[ALL_BYTES];
    ddl__writer w = ddl__writer_of(whole, sizeof whole);
    put_all(&w);
    for (size_t n = 0; n < ALL_BYTES; n++) {
        uint8_t *cut = (uint8_t *)malloc(n + (n == 0)), three[3] = {9, 9, 9};
        memcpy(cut, whole, n);
        ddl__reader r = ddl__reader_of(cut, n);
        char text[5] = "????", empty[1] = {'?'};
        CHECK_EQ(ddl__get_u8(&r), n >= 1 ? 0xf1 : 0);
        CHECK_EQ(ddl__get_u16(&r), n >= 3 ? 0xf2e2 : 0);
        CHECK_EQ(ddl__get_u32(&r), n >= 7 ? 0xf3e3d3c3u : 0);
        CHECK_EQ(ddl__get_u64(&r), n >= 15 ? 0xf4e4d4c4b4a49484u : 0);
        ddl__get_string(&r, text, sizeof text);
        CHECK_EQ(text, n >= 21 ? "rank" : "");
        ddl__get_bytes(&r, three, 3);
        CHECK_EQ(three[2], n >= 24 ? 2 : 0);
        ddl__get_string(&r, empty, 1);
        CHECK_EQ(empty[0], 0);
        CHECK(r.bad);
        CHECK(r.at <= n);
        free(cut);
    }
}

TEST(a_reader_refuses_lengths_that_overflow_and_bad_strings) {
    uint8_t bytes[8] = {3, 0, 'a', 0, 'b', 'c', 'd', 'e'};
    char text[16];
    ddl__reader r = ddl__reader_of(bytes, sizeof bytes);
    CHECK_EQ(ddl__get_u8(&r), 3);
    CHECK(ddl__get_view(&r, SIZE_MAX) == NULL);
    CHECK(r.bad);
    CHECK_EQ(ddl__get_u8(&r), 0); /* sticky: there are bytes left */
    memset(text, '?', sizeof text);
    r = ddl__reader_of(bytes, sizeof bytes);
    ddl__get_string(&r, text, sizeof text); /* a zero inside would make two readers see two strings */
    CHECK(r.bad);
    CHECK_EQ(text[0], 0);
    memset(bytes + 2, 'x', 6);
    r = ddl__reader_of(bytes, sizeof bytes);
    text[2] = '?';
    text[3] = '!';
    ddl__get_string(&r, text, 3); /* no room for the terminator */
    CHECK(r.bad);
    CHECK_EQ(text[0], 0);
    CHECK_EQ(text[3], '!');
    r = ddl__reader_of(bytes, sizeof bytes);
    ddl__get_string(&r, text, 4);
    CHECK(!r.bad);
    CHECK_EQ(text, "xxx");
    r = ddl__reader_of(bytes, sizeof bytes);
    ddl__get_string(&r, NULL, 0);
    CHECK(r.bad);
    r = ddl__reader_of(NULL, 0);
    CHECK_EQ(ddl__get_u64(&r), 0);
    CHECK(r.bad);
}

TEST(a_writer_stops_at_its_capacity_and_stays_bad) {
    for (size_t cap = 0; cap < ALL_BYTES; cap++) {
        uint8_t *buffer = (uint8_t *)malloc(cap + 1);
        memset(buffer, 0xee, cap + 1);
        ddl__writer w = ddl__writer_of(buffer, cap);
        put_all(&w);
        CHECK(w.bad);
        CHECK(w.at <= cap);
        CHECK_EQ(buffer[cap], 0xee);
        free(buffer);
    }
    static char text[70000];
    static uint8_t room[80000];
    memset(text, 'a', sizeof text - 1);
    ddl__writer w = ddl__writer_of(room, sizeof room);
    ddl__put_string(&w, text); /* its length does not fit in 16 bits */
    CHECK(w.bad);
    CHECK_EQ(w.at, 0);
    ddl__put_u8(&w, 1); /* there is room, but a message with a hole in it must not go out */
    CHECK(w.bad);
    CHECK_EQ(w.at, 0);
}

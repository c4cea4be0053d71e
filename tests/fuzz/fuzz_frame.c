/* libFuzzer target: the frame header, plain and sealed, and the field reader on bytes of a stranger.
 * Input: 48 bytes of header, then a script for the reader (one byte a field) that runs over the same bytes.
 * campaign: parser max_len=1024 */
#include "fuzz.h"

#include "../../src/wire/siphash.h"

static uint32_t most_of(const ddl__frame *f) {
    return f->type == DDL__FRAME_DATA ? DDL__FRAME_MAX_DATA : DDL__FRAME_MAX_PAYLOAD;
}

/* What is accepted is in range and is written back as the same bytes. */
static void read_header(const uint8_t *bytes) {
    ddl__frame f, poison;
    uint8_t again[DDL__FRAME_BYTES];
    memset(&f, 0xa5, sizeof f);
    memset(&poison, 0xa5, sizeof poison);
    if (ddl__frame_read(bytes, &f) != DDL_OK) {
        REQUIRE(memcmp(&f, &poison, sizeof f) == 0);
        return;
    }
    REQUIRE(f.bytes <= most_of(&f) && f.type >= 1 && f.type <= DDL__FRAME_TYPE_MAX);
    ddl__frame_write(again, &f);
    REQUIRE(memcmp(again, bytes, sizeof again) == 0);
}

/* Nobody guesses a tag; under a right one (DDL_MAC) the same holds as above. */
static void read_sealed(const uint8_t *bytes) {
    ddl__mac out = {{1, 2}, {3, 4}, 250}, in = out;
    ddl__frame f, poison;
    uint8_t sealed[DDL__FRAME_BYTES], again[DDL__FRAME_BYTES];
    uint64_t counter = 0;
    memset(&f, 0xa5, sizeof f);
    memset(&poison, 0xa5, sizeof poison);
    REQUIRE(ddl__mac_read(&in, bytes, &f, &counter) != DDL_OK && memcmp(&f, &poison, sizeof f) == 0);
    memcpy(sealed, bytes, sizeof sealed);
    ddl__mac_seal(&out, sealed);
    if (ddl__mac_read(&in, sealed, &f, &counter) != DDL_OK) {
        REQUIRE(memcmp(&f, &poison, sizeof f) == 0);
        return;
    }
    REQUIRE(counter == 250 && f.bytes <= most_of(&f) && f.type >= 1 && f.type <= DDL__FRAME_TYPE_MAX);
    ddl__frame_write(again, &f);
    ddl__mac_seal(&in, again);
    REQUIRE(memcmp(again, sealed, sizeof again) == 0);
}

static void read_fields(const uint8_t *data, size_t bytes) {
    ddl__reader r = ddl__reader_of(data, bytes);
    uint8_t copy[64];
    char text[40];
    for (size_t i = 0; i < bytes && i < 64; i++) {
        size_t before = r.at, n = data[i] >> 3;
        int was_bad = r.bad;
        switch (data[i] & 7) {
        case 0:
            (void)ddl__get_u8(&r);
            break;
        case 1:
            (void)ddl__get_u16(&r);
            break;
        case 2:
            (void)ddl__get_u32(&r);
            break;
        case 3:
            (void)ddl__get_u64(&r);
            break;
        case 4:
            ddl__get_bytes(&r, copy, n);
            break;
        case 5:
            memset(text, '?', sizeof text);
            ddl__get_string(&r, text, n);
            REQUIRE(n == 0 || strlen(text) < n);
            break;
        case 6: { /* a length from the wire, as a careless caller would use it */
            size_t wire = (size_t)ddl__get_u64(&r);
            const uint8_t *p = ddl__get_view(&r, wire);
            REQUIRE(p == NULL || (!r.bad && wire > 0 && (size_t)(data + bytes - p) >= wire));
            break;
        }
        default:
            (void)ddl__get_view(&r, n);
            break;
        }
        REQUIRE(r.at <= bytes && r.at >= before && (!was_bad || r.bad));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size >= DDL__FRAME_BYTES) {
        uint8_t sealed[DDL__FRAME_BYTES];
        read_header(data);
        memcpy(sealed, data, sizeof sealed); /* and with a right magic and checksum, which guessing does not find */
        ddl__store_le32(sealed, DDL__FRAME_MAGIC);
        ddl__store_le32(sealed + 44, ddl__crc32c(0, sealed, 44));
        read_header(sealed);
        read_sealed(data);
        ddl__frame f = {.flags = DDL__FRAME_FLAG_CRC, .bytes = (uint32_t)(size - DDL__FRAME_BYTES)};
        (void)ddl__frame_payload_ok(&f, data + DDL__FRAME_BYTES);
    }
    read_fields(data, size);
    return 0;
}

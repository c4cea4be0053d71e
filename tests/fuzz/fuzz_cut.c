/* libFuzzer target: a stream of bytes of a proven peer is cut into frames, whatever the sizes of the reads; against a
 * plain loop over the whole stream. No sockets: recv and readv take from an array.
 *     while building  0 n u16: a frame        1 n u16 at x: one with a bent header    2 n: zeros    3: a large frame, once
 *                     other: the stream is built, so many bytes short
 *     then            sizes of the reads, a byte each; after them one read takes all that is left
 * campaign: parser max_len=128 */
#include "fuzz.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

static ssize_t fuzz_readv(int fd, const struct iovec *iov, int count);
#define recv(fd, out, cap, flags) fuzz_readv(fd, &(struct iovec){out, cap}, 1)
#define readv(fd, iov, count) fuzz_readv(fd, iov, count)
#include "src/tcp/link.h"

enum { LARGE = DDL__TCP_STAGE_BYTES + 100, STREAM_MAX = LARGE + 20000 };

static uint8_t stream[STREAM_MAX], landings[LARGE];
static size_t stream_end, stream_at; /* what there is, and what was read */
static size_t open_bytes;            /* what the next read may see */
static size_t cursor;                /* where the frame begins that comes next */
static size_t landing;               /* bytes of the payload that is landing; SIZE_MAX: none is */
static ddl__tcp tcp;

FUZZ_QUIET static ssize_t fuzz_readv(int fd, const struct iovec *iov, int count) {
    size_t got = 0;
    (void)fd;
    for (int i = 0; i < count && got < open_bytes; i++) {
        size_t n = DDL__MIN(iov[i].iov_len, open_bytes - got);
        memcpy(iov[i].iov_base, stream + stream_at + got, n);
        got += n;
    }
    stream_at += got;
    open_bytes -= got;
    errno = EAGAIN;
    return got > 0 ? (ssize_t)got : -1;
}

/* >>host: the frames in the order of the stream, byte for byte */

FUZZ_QUIET static ddl_status fuzz_measure(const ddl_host *host, int32_t peer, const uint8_t *header, uint64_t *out) {
    ddl__frame f;
    (void)host;
    (void)peer;
    ddl_status status = ddl__frame_read(header, &f);
    *out = status == DDL_OK ? f.bytes : 0;
    return status;
}

FUZZ_QUIET static void fuzz_expect(const uint8_t *header, uint64_t bytes) {
    REQUIRE(cursor + DDL__FRAME_BYTES <= stream_end && landing == SIZE_MAX);
    REQUIRE(memcmp(header, stream + cursor, DDL__FRAME_BYTES) == 0);
    REQUIRE(ddl__load_le32(stream + cursor + 8) == bytes);
}

FUZZ_QUIET static ddl_status fuzz_deliver(const ddl_host *host, int32_t peer, const uint8_t *header, const void *payload,
                                          uint64_t bytes) {
    (void)host;
    (void)peer;
    fuzz_expect(header, bytes);
    REQUIRE(memcmp(payload, stream + cursor + DDL__FRAME_BYTES, bytes) == 0);
    cursor += DDL__FRAME_BYTES + bytes;
    return DDL_OK;
}

FUZZ_QUIET static ddl_status fuzz_land(const ddl_host *host, int32_t peer, const uint8_t *header, uint64_t *bytes,
                                       void **out_landing, void **out_token) {
    (void)host;
    (void)peer;
    fuzz_expect(header, *bytes);
    REQUIRE(*bytes <= sizeof landings);
    landing = *bytes;
    *out_landing = landings + sizeof landings - landing; /* ends where the array does */
    *out_token = &tcp;
    return DDL_OK;
}

FUZZ_QUIET static void fuzz_landed(const ddl_host *host, int32_t peer, void *token, ddl_status status) {
    (void)host;
    (void)peer;
    REQUIRE(token == &tcp && status == DDL_OK && landing != SIZE_MAX);
    REQUIRE(memcmp(landings + sizeof landings - landing, stream + cursor + DDL__FRAME_BYTES, landing) == 0);
    cursor += DDL__FRAME_BYTES + landing;
    landing = SIZE_MAX;
}

/* >>stream */

FUZZ_QUIET static void fuzz_frame(size_t bytes, uint8_t **out_header) {
    ddl__frame f = {.type = DDL__FRAME_P2P, .bytes = (uint32_t)bytes, .sequence = stream_end};
    *out_header = stream + stream_end;
    if (bytes + DDL__FRAME_BYTES > STREAM_MAX - stream_end) {
        return;
    }
    ddl__frame_write(stream + stream_end, &f);
    stream_end += DDL__FRAME_BYTES + bytes; /* the payload is what stands there */
}

FUZZ_QUIET static void fuzz_build(fuzz_input *in) {
    bool large = false;
    uint8_t *header;
    size_t n, at;
    stream_end = 0;
    while (fuzz_left(in) > 0 && stream_end < 8192 + (large ? LARGE : 0)) {
        uint8_t op = fuzz_u8(in);
        switch (op) {
        case 0:
            fuzz_frame(fuzz_int(in, 2) % 1500, &header);
            break;
        case 1:
            n = fuzz_int(in, 2) % 300;
            at = fuzz_u8(in) % DDL__FRAME_BYTES;
            fuzz_frame(n, &header);
            header[at] ^= fuzz_u8(in);
            break;
        case 2:
            n = fuzz_u8(in) % 64;
            memset(stream + stream_end, 0, n);
            stream_end += n;
            break;
        case 3:
            n = large ? 0 : LARGE - 50u;
            large = true;
            fuzz_frame(n, &header);
            break;
        default:
            stream_end -= DDL__MIN(op - 4u, stream_end);
            return;
        }
    }
}

/* Where a plain loop stops, and whether it is at a header that is wrong. */
FUZZ_QUIET static size_t fuzz_plain(bool *out_bad) {
    size_t at = 0;
    ddl__frame f;
    *out_bad = false;
    while (stream_end - at >= DDL__FRAME_BYTES && !*out_bad) {
        *out_bad = ddl__frame_read(stream + at, &f) != DDL_OK;
        if (*out_bad || f.bytes > stream_end - at - DDL__FRAME_BYTES) {
            break;
        }
        at += DDL__FRAME_BYTES + f.bytes;
    }
    return at;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const ddl_host host = {.size = sizeof host, .measure = fuzz_measure, .deliver = fuzz_deliver,
                                  .land = fuzz_land, .landed = fuzz_landed};
    ddl__tcp_conn conn = {.fd = -1, .state = DDL__TCP_READY};
    fuzz_input in = {data, data + size};
    int error = 0;
    bool bad;
    tcp.host = &host;
    cursor = stream_at = 0;
    landing = SIZE_MAX;
    fuzz_build(&in);
    while (stream_at < stream_end && error == 0) {
        open_bytes = stream_end - stream_at;
        if (fuzz_left(&in) > 0) {
            size_t b = fuzz_u8(&in);
            open_bytes = DDL__MIN(open_bytes, b * b / 8 + 1);
        }
        (void)ddl__tcp_read(&tcp, &conn, &error);
        REQUIRE(conn.head_bytes < DDL__FRAME_BYTES && cursor <= stream_at);
    }
    REQUIRE(cursor == fuzz_plain(&bad) && (error == EBADMSG) == bad && (error == 0 || bad));
    return 0;
}

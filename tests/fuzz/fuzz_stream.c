/* libFuzzer target: fuzz_frames through the TCP transport's own reading: bytes of a proven peer, in reads of any size,
 * are cut into frames, of which several come at once and large ones land in pieces. Input and corpus are those of
 * fuzz_frames; there "whole" is one read, "in two pieces" two, "its beginning" leaves the rest for later.
 * campaign: machine max_len=4096 */
#define FUZZ_STREAM 1
#define FUZZ_NO_MAIN 1
#include "fuzz_frames.c"

enum { STREAM_FD = 5000, STREAM_MAX = 2 * (PAYLOAD_MAX + DDL__FRAME_BYTES) };

/* What has come from a peer and was not read, and how much of it the next read may see. */
static struct {
    uint8_t bytes[STREAM_MAX];
    size_t at, end, open;
} pipes[WORLD];
static ddl__tcp_conn conns[WORLD];
static ddl__tcp tcp;

FUZZ_QUIET static ssize_t fuzz_readv(int fd, const struct iovec *iov, int count) {
    int32_t peer = fd - STREAM_FD;
    ssize_t got = 0;
    REQUIRE(peer >= 0 && peer < WORLD);
    for (int i = 0; i < count && pipes[peer].open > 0; i++) {
        size_t n = DDL__MIN(iov[i].iov_len, pipes[peer].open);
        memcpy(iov[i].iov_base, pipes[peer].bytes + pipes[peer].at, n);
        pipes[peer].at += n;
        pipes[peer].open -= n;
        got += (ssize_t)n;
    }
    errno = EAGAIN;
    return got > 0 ? got : -1;
}

FUZZ_QUIET static void stream_pump(fuzz *f, int32_t peer, size_t bytes) {
    size_t waits = pipes[peer].end - pipes[peer].at;
    int error = 0;
    pipes[peer].open = bytes == 0 ? waits : DDL__MIN(bytes, waits);
    if (!f->peers[peer].down && pipes[peer].open > 0) {
        (void)ddl__tcp_read(&tcp, &conns[peer], &error);
        REQUIRE(conns[peer].head_bytes < DDL__FRAME_BYTES);
        if (error != 0) {
            fuzz_lose(f, peer, error > 0 ? error : 0);
        }
    }
    if (pipes[peer].at == pipes[peer].end) {
        pipes[peer].at = pipes[peer].end = 0;
    }
}

FUZZ_QUIET static void stream_arrive(fuzz *f, int32_t peer, const uint8_t *header, const uint8_t *payload, size_t bytes,
                                     int way) {
    size_t whole = DDL__FRAME_BYTES + bytes;
    if (whole > STREAM_MAX - pipes[peer].end) {
        stream_pump(f, peer, 0);
    }
    if (f->peers[peer].down || whole > STREAM_MAX - pipes[peer].end) {
        return;
    }
    memcpy(pipes[peer].bytes + pipes[peer].end, header, DDL__FRAME_BYTES);
    memcpy(pipes[peer].bytes + pipes[peer].end + DDL__FRAME_BYTES, payload, bytes);
    pipes[peer].end += whole;
    if (way > 0) {
        stream_pump(f, peer, way == 1 ? whole / 2 : whole / 4 + 1);
    }
    if (way < 2) {
        stream_pump(f, peer, 0);
    }
}

/* As when a connection is freed. */
FUZZ_QUIET static void stream_end(fuzz *f, int32_t peer, ddl_status status) {
    void *token = conns[peer].token;
    conns[peer].token = NULL;
    conns[peer].landing_left = 0;
    pipes[peer].at = pipes[peer].end = pipes[peer].open = 0;
    if (token != NULL) {
        f->host->landed(f->host, peer, token, status);
    }
}

FUZZ_QUIET static void stream_redirect(int32_t peer, void *token, void *new_landing) {
    if (conns[peer].token == token) {
        conns[peer].landing = new_landing;
        conns[peer].cut = new_landing == NULL;
    }
}


FUZZ_QUIET static void stream_first(fuzz *f, int32_t peer, const uint8_t *header, const uint8_t *payload, size_t bytes,
                                    int way) {
    tcp.host = f->host;
    stream_arrive(f, peer, header, payload, bytes, way);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const fuzz_stream stream = {stream_first, stream_pump, stream_end, stream_redirect};
    memset(conns, 0, sizeof conns);
    for (int32_t i = 0; i < WORLD; i++) {
        conns[i].fd = STREAM_FD + i;
        conns[i].peer = i;
        conns[i].state = DDL__TCP_READY;
        pipes[i].at = pipes[i].end = pipes[i].open = 0;
    }
    fuzz_one(data, size, &stream);
    return 0;
}

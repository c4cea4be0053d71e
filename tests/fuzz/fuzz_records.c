/* libFuzzer target: what the rendezvous reads, past its proofs: records, blobs, the table, sentences, the files of a
 * shared folder. Raw bytes, in pieces; the handshake before them is fuzz_auth_*, the machine around them fuzz_store.
 *     byte 0   bits 0-1: rank 0's server, a client, a rank's file, the table's file; the rest: see each
 * campaign: parser max_len=512 */
#include "fuzz.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static fuzz_input in;

static ssize_t fuzz_recv(void *out, size_t cap);

FUZZ_QUIET static int fuzz_clock(struct timespec *out) {
    *out = (struct timespec){1000, 0};
    return 0;
}

#define clock_gettime(id, out) fuzz_clock(out)
#define poll(fds, count, ms) 1
#define send(fd, data, bytes, flags) ((ssize_t)(bytes))
#define recv(fd, out, cap, flags) fuzz_recv(out, cap)
#define close(fd) 0
#define shutdown(fd, how) 0
#define epoll_ctl(epoll, op, fd, event) 0
#define gethostname(out, cap) (memcpy(out, "fuzz", 5), 0)
#define getpid() 4711
#pragma clang diagnostic ignored "-Wunused-value"
#include "src/wire/frame.h"
/* The seals of files are of one size each; see fuzz_auth.h. */
#pragma clang attribute push(__attribute__((no_sanitize("address", "undefined", "coverage"))), apply_to = function)
#include "src/wire/sha256.h"
#pragma clang attribute pop
#include "src/store.h"

enum { RANKS = 4, BLOB = 24 };
enum { ROOM = DDL__FILE_HEAD + DDL__SENTENCE_BYTES + RANKS * (DDL__FILE_NONCE + BLOB) + DDL__FILE_MAC };

static ddl__settings settings = {.launch = {"fuzz", 1, RANKS, -1, -1}, .job_id = 42, .init_timeout_ms = 1000};
static ddl__base base = {.rank = 1};
static ddl__sentence why;
static uint8_t table[RANKS * BLOB];

/* Some of what is left: at most as much as a byte of it says. */
FUZZ_QUIET static ssize_t fuzz_recv(void *out, size_t cap) {
    size_t n = (size_t)fuzz_u8(&in) + 1;
    n = DDL__MIN(cap, n);
    const uint8_t *from = fuzz_take(&in, &n);
    if (n > 0) {
        memcpy(out, from, n);
    }
    return (ssize_t)n;
}

FUZZ_QUIET static void fuzz_sentence(void) {
    REQUIRE(why.text[0] != 0 && why.status < 0);
    fuzz_clean(why.text, sizeof why.text);
}

/* A proven rank says anything. Bits 2-3: who of the others is here. */
static void fuzz_server(uint8_t how) {
    static ddl__guest guests[2];
    uint8_t states[RANKS] = {DDL__RANK_SERVED, DDL__RANK_PROVEN, how & 4 ? DDL__RANK_HERE : 0, how & 8 ? DDL__RANK_HERE : 0};
    ddl__server server = {.settings = &settings, .base = &base, .blob_bytes = BLOB, .table = table, .guests = guests,
                          .guest_count = 2, .ranks = states, .here = 1 + (how >> 2 & 1) + (how >> 3 & 1), .served = 1,
                          .why = &why};
    ddl__guest *g = &guests[0];
    g->stage = DDL__GUEST_HEAD;
    g->rank = 1;
    uint8_t piece[256];
    while (fuzz_left(&in) > 0 && g->stage != DDL__GUEST_NONE) {
        size_t n = (size_t)fuzz_recv(piece, sizeof piece);
        memmove(piece + sizeof piece - n, piece, n);
        ddl__guest_feed(&server, g, piece + sizeof piece - n, n);
        REQUIRE(g->head_bytes < DDL__RECORD_BYTES && g->blob_bytes <= BLOB && g->out_end <= sizeof g->out);
        REQUIRE((states[1] == DDL__RANK_HERE || states[1] == DDL__RANK_SERVED) == (g->blob_bytes == BLOB) || g->stage == 0);
        REQUIRE(server.here <= RANKS && server.served <= 2 && (!server.delivering || server.here == RANKS));
        if (server.failing) {
            fuzz_sentence();
        }
    }
    for (int i = 0; i < 2; i++) {
        ddl__guest_close(&server, &guests[i]);
    }
}

/* Rank 0 answers anything. Bit 2: instead of the proof, bits 3-5 the code. */
static void fuzz_client(uint8_t how) {
    static const uint8_t blob[BLOB] = {1};
    ddl__client c = {.settings = &settings, .base = &base, .blob = blob, .blob_bytes = BLOB, .table = table,
                     .where = "node0:29500", .deadline_ns = UINT64_MAX / 2, .why = &why};
    ddl__auth auth = {.code = how >> 3 & 7};
    size_t had = fuzz_left(&in);
    ddl_status status =
        (how & 4) != 0 ? ddl__client_unproven(&c, &auth, DDL_ERR_CONFIG) : ddl__client_trade(&c);
    if (status == DDL_OK) {
        REQUIRE(had > DDL__RECORD_BYTES + sizeof table && (how & 4) == 0);
    } else if (status < 0) {
        REQUIRE(why.status == status);
        fuzz_sentence();
    }
}

/* A file of the folder. Bit 2: whoever wrote it knows the secret. Bits 3-4: a head as it must be, and state bits 5-6. */
static void fuzz_file(uint8_t how, bool is_table) {
    static uint8_t content[ROOM], whole[ROOM];
    static const uint8_t zero[DDL__FILE_NONCE];
    ddl__file f = {.settings = &settings, .base = &base, .why = &why, .blob_bytes = BLOB,
                   .slot_bytes = DDL__FILE_NONCE + BLOB, .table_bytes = ROOM, .nonce = {1}, .table = whole};
    static const uint8_t secret[32] = {7};
    size_t count = is_table ? ROOM : ddl__file_rank_bytes(&f), at = 0;
    uint8_t *bytes = content + sizeof content - count;
    const char *name = is_table ? "table" : "rank.2";
    ddl__hmac_key_init(&f.key, secret, sizeof secret);
    memset(bytes, 0, count);
    while (fuzz_left(&in) > 1 && at < count) { /* pieces, and gaps between them */
        size_t gap = (size_t)fuzz_u8(&in) * 4;
        at += DDL__MIN(gap, count - at);
        at += (size_t)fuzz_recv(bytes + at, count - at);
    }
    if ((how & 8) != 0) {
        ddl__file_head(&f, (uint16_t)(how >> 5 & 3), (how & 16) != 0 ? f.nonce : zero, bytes);
    }
    if ((how & 4) != 0) {
        ddl__file_mac(&f, name, bytes, count - DDL__FILE_MAC, bytes + count - DDL__FILE_MAC);
    }
    bool genuine = ddl__file_genuine(&f, name, bytes, count);
    REQUIRE(!genuine || (how & 4) != 0);
    if (!genuine) {
        return;
    }
    if (!is_table) {
        bool fresh = ddl__file_admit(&f, 2, bytes);
        REQUIRE(!fresh || memcmp(ddl__file_slot(&f, whole, 2), bytes + 24, DDL__FILE_NONCE) == 0);
        return;
    }
    memcpy(whole, bytes, ROOM);
    if (ddl__file_state(&f, whole) >= 0) {
        if ((how & 16) != 0) {
            memcpy(ddl__file_slot(&f, whole, 1), f.nonce, DDL__FILE_NONCE);
        }
        ddl_status status = ddl__file_take(&f, table);
        REQUIRE(status == DDL_OK || status == DDL_IN_PROGRESS || status == DDL_ERR_TIMEOUT);
        if (status < 0) {
            fuzz_sentence();
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    in = (fuzz_input){data, data + size};
    uint8_t how = fuzz_u8(&in);
    why.text[0] = 0;
    why.status = DDL_OK;
    settings.launch.rank = (how & 3) == 1 || (how & 3) == 3;
    switch (how & 3) {
    case 0:
        fuzz_server(how);
        break;
    case 1:
        fuzz_client(how);
        break;
    default:
        fuzz_file(how, (how & 3) == 3);
        break;
    }
    return 0;
}

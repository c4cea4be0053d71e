/* What the two handshake targets share. An input drives one side of the handshake (the victim), facing an attacker who
 * has the bytes of an honest peer with the right secret and may change, drop, repeat and split them; so the input
 * reaches the states behind the MACs, which no guessing would.
 *     byte 0      bit 0: the honest peer takes part; bit 1: same secret; bits 2-4: which parameter differs
 *     then ops    0 n: deliver n bytes of the peer          1 n: skip n of them       2 n bytes...: insert bytes
 *                 3 n x: deliver n, the first XOR x         4 n: room for output      5: an empty read
 * The victim may say DDL_OK only when every byte that it took is what the honest peer, with the same secret and fitting
 * parameters, said. */
#ifndef FUZZ_AUTH_H
#define FUZZ_AUTH_H

#include "fuzz.h"

#include "../../src/wire/frame.h"
/* The MAC sees only sizes that the handshake fixes, and test_hmac runs the real one under the sanitizers; without
 * instruments here it leaves most of the time to the state machine. */
#pragma clang attribute push(__attribute__((no_sanitize("address", "undefined", "coverage"))), apply_to = function)
#include "../../src/wire/sha256.h"
#pragma clang attribute pop
#include "../../src/wire/auth.h"

typedef struct fuzz {
    ddl__auth victim, peer;
    ddl_status status;
    int peer_speaks, may_succeed;
    uint8_t heard[512]; /* what the peer says, and how much of it was used up */
    size_t heard_bytes, heard_at, room;
    uint8_t said[512];
    size_t said_bytes, said_at;
    uint8_t taken[512]; /* what the victim took */
    size_t taken_bytes;
} fuzz;

/* The peer answers whatever the victim said. */
FUZZ_QUIET static void fuzz_peer(fuzz *f) {
    size_t used = 0, wrote = 0;
    if (!f->peer_speaks) {
        return;
    }
    (void)ddl__auth_step(&f->peer, f->said + f->said_at, f->said_bytes - f->said_at, &used, f->heard + f->heard_bytes,
                         sizeof f->heard - f->heard_bytes, &wrote);
    f->said_at += used;
    f->heard_bytes += wrote;
}

/* The victim gets a copy of exactly n bytes and room bytes to answer in: both end where their array does, so that one
 * byte further is an error, without an allocation for each delivery. */
FUZZ_QUIET static void fuzz_deliver(fuzz *f, const uint8_t *bytes, size_t n) {
    static uint8_t ins[512], outs[256];
    size_t used = n + 1, wrote = f->room + 1;
    uint8_t *in = ins + sizeof ins - n, *out = outs + sizeof outs - f->room;
    ddl_status before = f->status;
    if (n > 0) {
        memcpy(in, bytes, n);
    }
    f->status = ddl__auth_step(&f->victim, in, n, &used, out, f->room, &wrote);
    REQUIRE(used <= n && wrote <= f->room && wrote <= DDL__AUTH_MAX_OUT);
    REQUIRE(before == DDL_IN_PROGRESS || (f->status == before && used == 0 && wrote == 0));
    REQUIRE(f->said_bytes + wrote <= 116 && f->taken_bytes + used <= 116);
    memcpy(f->said + f->said_bytes, out, wrote);
    memcpy(f->taken + f->taken_bytes, in, used);
    f->said_bytes += wrote;
    f->taken_bytes += used;
    fuzz_peer(f);
}

FUZZ_QUIET static void fuzz_start(fuzz *f, uint8_t flags, int victim_is_server) {
    static const uint8_t secret[32] = {7}, other[32] = {8};
    ddl__auth_params c = {secret, 32, 42, DDL__AUTH_MESH, 3, 1, 4, 9}, s = {secret, 32, 42, DDL__AUTH_MESH, 1, 0, 4, 9};
    ddl__auth_params *p = victim_is_server ? &c : &s; /* the peer is the one with the mistake */
    uint8_t client_nonce[32] = {1}, server_nonce[32] = {2};
    unsigned wrong = (flags >> 2) & 7;
    memset(f, 0, sizeof *f);
    f->room = 200;
    f->peer_speaks = flags & 1;
    f->may_succeed = (flags & 3) == 3 && (wrong == 0 || wrong == 6 || wrong == 7);
    p->secret = (flags & 2) != 0 ? secret : other;
    p->job += wrong == 1;
    p->world += wrong == 2;
    p->rank = wrong == 3 ? 2 : p->rank;
    p->purpose = wrong == 4 ? DDL__AUTH_STORE : p->purpose;
    c.peer = wrong == 5 ? 0 : c.peer;
    p->incarnation += wrong == 6;
    f->may_succeed |= (flags & 3) == 3 && wrong == 3 && victim_is_server; /* rank 2 is as good as 3 */
    REQUIRE(ddl__auth_client(victim_is_server ? &f->peer : &f->victim, &c, client_nonce) == DDL_OK);
    REQUIRE(ddl__auth_server(victim_is_server ? &f->victim : &f->peer, &s, server_nonce) == DDL_OK);
    f->status = DDL_IN_PROGRESS;
    fuzz_peer(f);
}

FUZZ_QUIET static size_t fuzz_from_peer(const fuzz *f, size_t n) { return DDL__MIN(n, f->heard_bytes - f->heard_at); }

/* One op; returns the script bytes that it used. */
FUZZ_QUIET static size_t fuzz_op(fuzz *f, const uint8_t *op, size_t left) {
    uint8_t bent[512];
    size_t n = left > 1 ? op[1] : 0, k = fuzz_from_peer(f, n);
    switch (op[0] % 6) {
    case 0:
        fuzz_deliver(f, f->heard + f->heard_at, k);
        f->heard_at += k;
        return 2;
    case 1:
        f->heard_at += k;
        return 2;
    case 2:
        n = left > 2 ? DDL__MIN(n, left - 2) : 0;
        fuzz_deliver(f, op + 2, n);
        return 2 + n;
    case 3:
        memcpy(bent, f->heard + f->heard_at, k);
        bent[0] ^= left > 2 ? op[2] : 1;
        fuzz_deliver(f, bent, k);
        f->heard_at += k;
        return 3;
    case 4:
        f->room = n;
        return 2;
    default:
        fuzz_deliver(f, NULL, 0);
        return 1;
    }
}

FUZZ_QUIET static void fuzz_run(const uint8_t *data, size_t size, int victim_is_server) {
    fuzz f;
    if (size == 0) {
        return;
    }
    fuzz_start(&f, data[0], victim_is_server);
    for (size_t at = 1; at < size && at < 200;) {
        at += fuzz_op(&f, data + at, size - at);
    }
    if (f.status == DDL_OK) {
        REQUIRE(f.may_succeed);
        REQUIRE(f.taken_bytes == (victim_is_server ? 96 : 116) && memcmp(f.taken, f.heard, f.taken_bytes) == 0);
        REQUIRE(memcmp(f.victim.key, f.peer.key, 32) == 0);
    }
    ddl__auth_wipe(&f.victim);
}

#endif

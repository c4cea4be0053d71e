/* auth: the handshake that every connection begins with. Both sides prove that they hold the job's secret, the server
 * first, before a byte of anything else is parsed. A pure machine: bytes in, bytes out; no sockets, no clock, no
 * allocation, and no size that comes from the wire. The caller limits how long and how often.
 *
 *     HELLO      client   0  magic "ddlh", major u8, minor u8, kind u8 = 1, purpose u8
 *                         8  job u64, rank u32, target rank u32, world u32, incarnation u32, client nonce [32]
 *     CHALLENGE  server  64  magic "ddlh", major u8, minor u8, kind u8 = 2, purpose u8
 *                        72  rank u32, incarnation u32, server nonce [32], MAC(secret, "ddl1 server") [32]
 *     PROOF      client 144  MAC(secret, "ddl1 client") [32]
 *     VERDICT    server 176  kind u8 = 4, code u8, 0 u16, MAC(k, "ddl1 verdict") [32]
 *                       212  end;   k = MAC(secret, "ddl1 key") over bytes 0..175
 *
 * Offsets are in the conversation, which both sides keep whole: MAC(key, label) is HMAC-SHA256 over the label, padded
 * with zeros to 16 bytes, and every byte of the conversation before the MAC. So roles, purpose, job, versions, ranks,
 * world, incarnations and both nonces are all inside, a label keeps one side's proof from serving as the other's, and a
 * nonce keeps yesterday's from serving today. Integers are little-endian.
 *
 * The first 8 bytes of HELLO and CHALLENGE keep this shape in all versions. Another major version is refused after
 * them: the server answers with the same 8 bytes of its own, so that both sides can name both versions. To somebody who
 * has not proven the secret the server says no more than that; a wrong job, world or rank is told after the proof. */
#ifndef DDL_WIRE_AUTH_H
#define DDL_WIRE_AUTH_H

#include "frame.h"
#include "sha256.h"

#define DDL__AUTH_MAGIC 0x686c6464u /* "ddlh" */
#define DDL__AUTH_MAX_OUT 80        /* a step never writes more than this */
#define DDL__AUTH_BYTES 212         /* the whole conversation */
#define DDL__RANK_ANY UINT32_MAX    /* not in the mesh: a client without a rank, or "whoever serves" */

enum ddl__auth_purpose { DDL__AUTH_STORE = 1, DDL__AUTH_MESH = 2, DDL__AUTH_GROW = 3 };
enum ddl__auth_role { DDL__AUTH_CLIENT = 1, DDL__AUTH_SERVER = 2 };

/* Why a handshake was refused. On the wire in VERDICT; values never change. */
enum ddl__auth_code {
    DDL__AUTH_OK = 0,
    DDL__AUTH_PROOF = 1, /* the MAC is wrong: another secret, or none */
    DDL__AUTH_VERSION = 2,
    DDL__AUTH_JOB = 3,
    DDL__AUTH_WORLD = 4,
    DDL__AUTH_RANK = 5,
    DDL__AUTH_DUPLICATE = 6,
    DDL__AUTH_PURPOSE = 7,
    DDL__AUTH_NOT_DDL = 8, /* never sent: what came was no handshake */
    DDL__AUTH_INCARNATION = 9 /* another process has, or had, this rank: see mesh/rejoin.h */
};

typedef struct ddl__auth_params {
    const uint8_t *secret; /* not needed after ddl__auth_client/_server; 0 bytes: something else vouches for the peer */
    size_t secret_bytes;
    uint64_t job;
    uint8_t purpose;
    uint32_t rank;  /* mine */
    uint32_t peer;  /* client: whom I mean to reach; server: not used */
    uint32_t world; /* a store's server may say 0: any */
    uint32_t incarnation; /* of this rank: shown to the peer, not compared: the mesh knows whom it admits */
} ddl__auth_params;

/* The conversation in sections. A prefix is a section of its own so that strangers are known by 8 bytes. */
enum ddl__auth_section {
    DDL__AUTH_S_HELLO8,
    DDL__AUTH_S_HELLO,
    DDL__AUTH_S_CHALLENGE8,
    DDL__AUTH_S_CHALLENGE,
    DDL__AUTH_S_PROOF,
    DDL__AUTH_S_VERDICT
};

typedef struct ddl__auth {
    /* results; peer_* of a server are claims until DDL_OK */
    uint32_t peer_rank, peer_world, peer_incarnation;
    uint16_t peer_version; /* major << 8 | minor, known from the first 8 bytes on, else 0 */
    uint8_t code;          /* enum ddl__auth_code, when it was refused */
    uint8_t key[32];       /* session key, on DDL_OK */
    /* private */
    uint8_t role, purpose, section, refusal;
    uint16_t at; /* bytes of the conversation that went either way */
    ddl_status status, failure;
    uint32_t rank, peer, world;
    uint64_t job;
    ddl__hmac_key secret;
    uint8_t wire[DDL__AUTH_BYTES];
} ddl__auth;

static void ddl__auth_mac(const ddl__auth *a, const ddl__hmac_key *key, const char *label, size_t bytes,
                          uint8_t out[32]) {
    ddl__sha256 h;
    char padded[16] = {0};
    memcpy(padded, label, strlen(label));
    ddl__hmac_begin(&h, key);
    ddl__sha256_update(&h, padded, sizeof(padded));
    ddl__sha256_update(&h, a->wire, bytes);
    ddl__hmac_end(&h, key, out);
}

static int ddl__auth_mac_ok(const ddl__auth *a, const ddl__hmac_key *key, const char *label, size_t bytes) {
    uint8_t expected[32];
    ddl__auth_mac(a, key, label, bytes, expected);
    int same = ddl__ct_equal(expected, a->wire + bytes, sizeof(expected));
    ddl__wipe(expected, sizeof(expected));
    return same;
}

static void ddl__auth_fail(ddl__auth *a, ddl_status status, uint8_t code) {
    a->status = status;
    a->code = code;
}

static void ddl__auth_put_prefix(ddl__writer *w, uint8_t kind, uint8_t purpose) {
    ddl__put_u32(w, DDL__AUTH_MAGIC);
    ddl__put_u8(w, DDL__WIRE_MAJOR);
    ddl__put_u8(w, DDL__WIRE_MINOR);
    ddl__put_u8(w, kind);
    ddl__put_u8(w, purpose);
}

static ddl_status ddl__auth_start(ddl__auth *a, const ddl__auth_params *p, uint8_t role) {
    int store = p->purpose == DDL__AUTH_STORE || p->purpose == DDL__AUTH_GROW;
    if ((!store && p->purpose != DDL__AUTH_MESH) || (p->secret == NULL && p->secret_bytes > 0) ||
        (p->rank >= p->world && !(store && (p->rank == DDL__RANK_ANY || p->world == 0)))) {
        return DDL_ERR_ARG;
    }
    memset(a, 0, sizeof(*a));
    a->role = role;
    a->purpose = p->purpose;
    a->status = DDL_IN_PROGRESS;
    a->rank = p->rank;
    a->peer = p->peer;
    a->world = p->world;
    a->job = p->job;
    ddl__hmac_key_init(&a->secret, p->secret, p->secret_bytes);
    return DDL_OK;
}

/* Begins as client. nonce: 32 bytes of ddl__random, never used before. Errors: DDL_ERR_ARG. */
static ddl_status ddl__auth_client(ddl__auth *a, const ddl__auth_params *p, const uint8_t nonce[32]) {
    if (p->world == 0 || (p->peer >= p->world && !(p->purpose != DDL__AUTH_MESH && p->peer == DDL__RANK_ANY))) {
        return DDL_ERR_ARG;
    }
    DDL__TRY(ddl__auth_start(a, p, DDL__AUTH_CLIENT));
    ddl__writer w = ddl__writer_of(a->wire, 64);
    ddl__auth_put_prefix(&w, 1, p->purpose);
    ddl__put_u64(&w, p->job);
    ddl__put_u32(&w, p->rank);
    ddl__put_u32(&w, p->peer);
    ddl__put_u32(&w, p->world);
    ddl__put_u32(&w, p->incarnation);
    ddl__put_bytes(&w, nonce, 32);
    return DDL_OK;
}

/* Begins as server. */
static ddl_status ddl__auth_server(ddl__auth *a, const ddl__auth_params *p, const uint8_t nonce[32]) {
    DDL__TRY(ddl__auth_start(a, p, DDL__AUTH_SERVER));
    ddl__writer w = ddl__writer_of(a->wire + 64, 48);
    ddl__auth_put_prefix(&w, 2, p->purpose);
    ddl__put_u32(&w, p->rank);
    ddl__put_u32(&w, p->incarnation);
    ddl__put_bytes(&w, nonce, 32);
    return DDL_OK;
}

/* Lets a server turn down a peer that proves itself: call it between steps, before DDL_OK, when a->peer_rank is known
 * to be taken (DDL__AUTH_DUPLICATE). A stranger never hears of it. */
static void ddl__auth_refuse(ddl__auth *a, uint8_t code) { a->refusal = code; }

/* Forgets the keys and everything else. */
static void ddl__auth_wipe(ddl__auth *a) { ddl__wipe(a, sizeof(*a)); }

/* The first 8 bytes of either side. */
static void ddl__auth_read_prefix(ddl__auth *a, const uint8_t *p, uint8_t kind) {
    if (ddl__load_le32(p) != DDL__AUTH_MAGIC || p[6] != kind) {
        ddl__auth_fail(a, DDL_ERR_CORRUPT, DDL__AUTH_NOT_DDL);
        return;
    }
    a->peer_version = (uint16_t)(p[4] << 8 | p[5]);
    if (p[4] == DDL__WIRE_MAJOR) {
        return;
    }
    if (a->role == DDL__AUTH_CLIENT) {
        ddl__auth_fail(a, DDL_ERR_VERSION, DDL__AUTH_VERSION);
        return;
    }
    a->code = DDL__AUTH_VERSION;
    a->failure = DDL_ERR_VERSION; /* once the client has our 8 bytes */
    a->section = DDL__AUTH_S_CHALLENGE8;
    a->at = 64;
}

/* Server: takes HELLO as a claim, and proves itself whatever it says: a mistaken honest client then learns from VERDICT
 * what is wrong, a stranger learns nothing. */
static void ddl__auth_read_hello(ddl__auth *a) {
    ddl__reader r = ddl__reader_of(a->wire + 16, 16);
    a->peer_rank = ddl__get_u32(&r);
    (void)ddl__get_u32(&r); /* target: ddl__auth_judge looks */
    a->peer_world = ddl__get_u32(&r);
    a->peer_incarnation = ddl__get_u32(&r);
    ddl__auth_mac(a, &a->secret, "ddl1 server", 112, a->wire + 112);
}

/* Client: the server's proof, then ours. */
static void ddl__auth_read_challenge(ddl__auth *a) {
    if (!ddl__auth_mac_ok(a, &a->secret, "ddl1 server", 112)) {
        ddl__auth_fail(a, DDL_ERR_AUTH, DDL__AUTH_PROOF);
        return;
    }
    a->peer_rank = ddl__load_le32(a->wire + 72);
    a->peer_incarnation = ddl__load_le32(a->wire + 76);
    a->peer_world = a->world;
    if (a->wire[71] != a->purpose) {
        ddl__auth_fail(a, DDL_ERR_AUTH, DDL__AUTH_PURPOSE);
    } else if (a->peer != DDL__RANK_ANY && a->peer_rank != a->peer) {
        ddl__auth_fail(a, DDL_ERR_AUTH, DDL__AUTH_RANK);
    } else {
        ddl__auth_mac(a, &a->secret, "ddl1 client", 144, a->wire + 144);
        ddl__auth_mac(a, &a->secret, "ddl1 key", 176, a->key);
    }
}

/* Server: what to tell a client that has proven itself. */
static uint8_t ddl__auth_judge(const ddl__auth *a) {
    uint32_t target = ddl__load_le32(a->wire + 20);
    int store = a->purpose != DDL__AUTH_MESH;
    if (a->wire[7] != a->purpose) {
        return DDL__AUTH_PURPOSE;
    }
    if (ddl__load_le64(a->wire + 8) != a->job) {
        return DDL__AUTH_JOB;
    }
    if (a->peer_world == 0 || (a->world != 0 && a->peer_world != a->world)) {
        return DDL__AUTH_WORLD;
    }
    if ((target != a->rank && !(store && target == DDL__RANK_ANY)) || (!store && a->peer_rank == a->rank) ||
        (a->peer_rank >= a->peer_world && !(store && a->peer_rank == DDL__RANK_ANY))) {
        return DDL__AUTH_RANK;
    }
    return a->refusal;
}

static ddl_status ddl__auth_code_status(uint8_t code) {
    return code == DDL__AUTH_OK ? DDL_OK : code == DDL__AUTH_VERSION ? DDL_ERR_VERSION : DDL_ERR_AUTH;
}

/* Server: a wrong proof is answered with silence, a right one with the verdict under the key that only it can know. */
static void ddl__auth_read_proof(ddl__auth *a) {
    ddl__hmac_key key;
    if (!ddl__auth_mac_ok(a, &a->secret, "ddl1 client", 144)) {
        ddl__auth_fail(a, DDL_ERR_AUTH, DDL__AUTH_PROOF);
        return;
    }
    ddl__auth_mac(a, &a->secret, "ddl1 key", 176, a->key);
    a->code = ddl__auth_judge(a);
    a->failure = ddl__auth_code_status(a->code);
    a->wire[176] = 4;
    a->wire[177] = a->code;
    ddl__hmac_key_init(&key, a->key, sizeof(a->key));
    ddl__auth_mac(a, &key, "ddl1 verdict", 180, a->wire + 180);
    ddl__wipe(&key, sizeof(key));
}

static void ddl__auth_read_verdict(ddl__auth *a) {
    ddl__hmac_key key;
    ddl__hmac_key_init(&key, a->key, sizeof(a->key));
    int proven = a->wire[176] == 4 && ddl__auth_mac_ok(a, &key, "ddl1 verdict", 180);
    ddl__wipe(&key, sizeof(key));
    a->code = proven ? a->wire[177] : DDL__AUTH_PROOF;
    a->status = ddl__auth_code_status(a->code);
}

/* A section has arrived in full. */
static void ddl__auth_received(ddl__auth *a, unsigned section) {
    switch (section) {
    case DDL__AUTH_S_HELLO8:
        ddl__auth_read_prefix(a, a->wire, 1);
        break;
    case DDL__AUTH_S_HELLO:
        ddl__auth_read_hello(a);
        break;
    case DDL__AUTH_S_CHALLENGE8:
        ddl__auth_read_prefix(a, a->wire + 64, 2);
        break;
    case DDL__AUTH_S_CHALLENGE:
        ddl__auth_read_challenge(a);
        break;
    case DDL__AUTH_S_PROOF:
        ddl__auth_read_proof(a);
        break;
    default:
        ddl__auth_read_verdict(a);
        break;
    }
}

/* Moves the handshake on with what has arrived, in pieces of any size, and gives what is to be sent; in_bytes may be 0.
 * Takes no byte that follows the handshake: *out_used <= in_bytes says where frames begin. out_cap of DDL__AUTH_MAX_OUT
 * is always enough; with less, call again. What it wrote is to be sent also when it returns an error.
 * DDL_IN_PROGRESS: needs more. DDL_OK: both are proven. Errors, for good: DDL_ERR_AUTH, DDL_ERR_VERSION,
 * DDL_ERR_CORRUPT (no handshake at all), DDL_ERR_ARG (never begun, or wiped). */
static ddl_status ddl__auth_step(ddl__auth *a, const uint8_t *in, size_t in_bytes, size_t *out_used, uint8_t *out,
                                 size_t out_cap, size_t *out_bytes) {
    static const uint8_t ends[] = {8, 64, 72, 144, 176, DDL__AUTH_BYTES};
    static const uint8_t senders[] = {DDL__AUTH_CLIENT, DDL__AUTH_CLIENT, DDL__AUTH_SERVER,
                                      DDL__AUTH_SERVER, DDL__AUTH_CLIENT, DDL__AUTH_SERVER};
    *out_used = *out_bytes = 0;
    if (a->role == 0) {
        return DDL_ERR_ARG; /* all zero would read as DDL_OK */
    }
    while (a->status == DDL_IN_PROGRESS) {
        unsigned section = a->section;
        int mine = senders[section] == a->role;
        size_t have = mine ? out_cap - *out_bytes : in_bytes - *out_used, need = (size_t)(ends[section] - a->at);
        size_t n = have < need ? have : need;
        if (n > 0 && mine) {
            memcpy(out + *out_bytes, a->wire + a->at, n);
            *out_bytes += n;
        } else if (n > 0) {
            memcpy(a->wire + a->at, in + *out_used, n);
            *out_used += n;
        }
        a->at = (uint16_t)(a->at + n);
        if (n < need) {
            return DDL_IN_PROGRESS;
        }
        a->section++;
        if (!mine) {
            ddl__auth_received(a, section);
        } else if (section == DDL__AUTH_S_VERDICT || a->failure != DDL_OK) {
            a->status = a->failure;
        }
    }
    return a->status;
}

#endif

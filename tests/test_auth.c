/* The handshake: honest pairs under every split of the bytes, a conversation made with another implementation, and
 * everybody who must not get in: wrong or no secret, replay, reflection, forgery, wrong job, world, rank, purpose,
 * version. */
#include "test.h"

#include "../src/wire/auth.h"

static uint64_t seed = 7;
static uint64_t rnd(void) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return ddl__mix(seed, 0);
}

static void fill(uint8_t *p, size_t n) {
    for (size_t i = 0; i < n; i++) {
        p[i] = (uint8_t)rnd();
    }
}

static const uint8_t secret[32] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16,
                                   17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32};

static ddl__auth_params client_params(void) {
    return (ddl__auth_params){secret, sizeof secret, 0x1122334455667788u, DDL__AUTH_MESH, 3, 1, 4, 7};
}

static ddl__auth_params server_params(void) {
    return (ddl__auth_params){secret, sizeof secret, 0x1122334455667788u, DDL__AUTH_MESH, 1, 0, 4, 7};
}

typedef struct pair {
    ddl__auth client, server;
    ddl_status client_status, server_status;
    uint8_t said[2][256]; /* what the client, the server sent */
    size_t bytes[2];
} pair;

static void begin(pair *x, const ddl__auth_params *c, const ddl__auth_params *s) {
    uint8_t nonce[2][32];
    memset(x, 0, sizeof *x);
    fill(nonce[0], 64);
    CHECK_EQ(ddl__auth_client(&x->client, c, nonce[0]), DDL_OK);
    CHECK_EQ(ddl__auth_server(&x->server, s, nonce[1]), DDL_OK);
    x->client_status = x->server_status = DDL_IN_PROGRESS;
}

/* One step of a with its unread part of heard, at most chunk bytes in, at most room bytes out. Returns bytes moved. */
static size_t move(ddl__auth *a, ddl_status *status, const uint8_t *heard, size_t heard_bytes, size_t *read,
                   size_t chunk, uint8_t *said, size_t *said_bytes, size_t room) {
    size_t n = heard_bytes - *read, used = 77, wrote = 77;
    uint8_t *in = (uint8_t *)malloc(chunk + 1), *out = (uint8_t *)malloc(room + 1); /* exact, for the sanitizer */
    n = n < chunk ? n : chunk;
    memcpy(in, heard + *read, n);
    *status = ddl__auth_step(a, in, n, &used, out, room, &wrote);
    CHECK(used <= n);
    CHECK(wrote <= room);
    memcpy(said + *said_bytes, out, wrote);
    *read += used;
    *said_bytes += wrote;
    free(in);
    free(out);
    return used + wrote;
}

/* Lets both talk until nothing moves. A side that has failed closes: it hears nothing more. */
static void talk(pair *x, size_t chunk, size_t room) {
    size_t read[2] = {0, 0}, moved;
    do {
        moved = 0;
        if (x->client_status == DDL_IN_PROGRESS) {
            moved += move(&x->client, &x->client_status, x->said[1], x->bytes[1], &read[0], chunk, x->said[0],
                          &x->bytes[0], room);
        }
        if (x->server_status == DDL_IN_PROGRESS) {
            moved += move(&x->server, &x->server_status, x->said[0], x->bytes[0], &read[1], chunk, x->said[1],
                          &x->bytes[1], room);
        }
    } while (moved > 0);
}

static void check_agreed(const pair *x) {
    CHECK_EQ(x->client_status, DDL_OK);
    CHECK_EQ(x->server_status, DDL_OK);
    CHECK_EQ(x->client.peer_rank, 1);
    CHECK_EQ(x->server.peer_rank, 3);
    CHECK_EQ(x->server.peer_world, 4);
    CHECK_EQ(x->server.peer_incarnation, 7);
    CHECK_EQ(x->client.peer_incarnation, 7);
    CHECK_EQ(x->client.peer_version, DDL__WIRE_MAJOR << 8 | DDL__WIRE_MINOR);
    CHECK_EQ(x->server.peer_version, DDL__WIRE_MAJOR << 8 | DDL__WIRE_MINOR);
    CHECK(memcmp(x->client.key, x->server.key, 32) == 0);
    CHECK_EQ(x->bytes[0], 96);
    CHECK_EQ(x->bytes[1], 116);
}

TEST(both_prove_themselves_under_every_split) {
    CHECK(sizeof(ddl__auth) <= 512);
    ddl__auth_params c = client_params(), s = server_params();
    pair x;
    for (size_t chunk = 1; chunk <= 130; chunk++) {
        for (size_t room = 1; room <= 81; room += chunk < 4 ? 1 : 16) {
            begin(&x, &c, &s);
            talk(&x, chunk, room);
            check_agreed(&x);
        }
    }
    uint8_t first[32];
    memcpy(first, x.client.key, 32);
    begin(&x, &c, &s);
    talk(&x, 256, DDL__AUTH_MAX_OUT);
    CHECK(memcmp(first, x.client.key, 32) != 0); /* fresh nonces, fresh key */
}

/* Golden bytes, made with Python's hmac and struct: the wire format may not change while DDL__WIRE_MAJOR is 1. */
TEST(conversation_is_as_documented) {
    static const char *want[] = {
        "64646c68010001028877665544332211030000000100000004000000070000004041424344454647"
        "48494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f"
        "4414523b0abb05ee0466576777c77383441ece0f3ff5d42866e7705270aa49ea",
        "64646c68010002020100000007000000808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9f"
        "7d83dd30adb426e25b2924651be2e7c54e2ead91adc996cdd1369c868ccb836c"
        "040000002a2690ee16c4cd615a382ba96d3bee0eccbacd60a3cb0d75413f0b3b24655c5d",
        "ac8f22c53207b1437ecf2a7171c8d35d103900e9ab686f4d097a7beefe6ffa43"};
    uint8_t client_nonce[32], server_nonce[32];
    for (size_t i = 0; i < 32; i++) {
        client_nonce[i] = (uint8_t)(0x40 + i);
        server_nonce[i] = (uint8_t)(0x80 + i);
    }
    ddl__auth_params c = client_params(), s = server_params();
    pair x;
    begin(&x, &c, &s);
    CHECK_EQ(ddl__auth_client(&x.client, &c, client_nonce), DDL_OK);
    CHECK_EQ(ddl__auth_server(&x.server, &s, server_nonce), DDL_OK);
    talk(&x, 256, DDL__AUTH_MAX_OUT);
    check_agreed(&x);
    const uint8_t *have[] = {x.said[0], x.said[1], x.client.key};
    for (size_t k = 0; k < 3; k++) {
        for (size_t i = 0; i < strlen(want[k]) / 2; i++) {
            char hex[3];
            snprintf(hex, sizeof hex, "%02x", have[k][i]);
            CHECK(memcmp(hex, want[k] + 2 * i, 2) == 0);
        }
    }
}

/* Frames may come in the same read as the last message. */
TEST(bytes_after_the_handshake_are_left_alone) {
    ddl__auth_params c = client_params(), s = server_params();
    pair y;
    begin(&y, &c, &s);
    uint8_t said[80 + 36 + 48], out[DDL__AUTH_MAX_OUT];
    size_t used, wrote, wrote2;
    CHECK_EQ(ddl__auth_step(&y.client, NULL, 0, &used, said, 80, &wrote), DDL_IN_PROGRESS);
    CHECK_EQ(wrote, 64);
    CHECK_EQ(ddl__auth_step(&y.server, said, 64, &used, out, sizeof out, &wrote), DDL_IN_PROGRESS);
    CHECK_EQ(wrote, 80);
    CHECK_EQ(ddl__auth_step(&y.client, out, 80, &used, said, 80, &wrote), DDL_IN_PROGRESS);
    CHECK_EQ(wrote, 32);
    memset(said + 32, 0xdd, 48); /* the client's first frame */
    CHECK_EQ(ddl__auth_step(&y.server, said, 80, &used, out, sizeof out, &wrote), DDL_OK);
    CHECK_EQ(used, 32);
    CHECK_EQ(wrote, 36);
    memcpy(said, out, 36);
    memset(said + 36, 0xdd, 48);
    CHECK_EQ(ddl__auth_step(&y.client, said, 84, &used, out, sizeof out, &wrote2), DDL_OK);
    CHECK_EQ(used, 36);
    CHECK_EQ(wrote2, 0);
    CHECK_EQ(ddl__auth_step(&y.client, said, 84, &used, out, sizeof out, &wrote2), DDL_OK); /* and again: nothing */
    CHECK_EQ(used + wrote2, 0);
}

TEST(no_secret_at_all_works_when_both_have_none) {
    ddl__auth_params c = client_params(), s = server_params();
    c.secret = s.secret = NULL;
    c.secret_bytes = s.secret_bytes = 0;
    pair x;
    begin(&x, &c, &s);
    talk(&x, 256, DDL__AUTH_MAX_OUT);
    check_agreed(&x);
}

/* The secret may be wiped as soon as the handshake has begun. */
TEST(the_secret_is_not_borrowed) {
    uint8_t copy[32];
    memcpy(copy, secret, 32);
    ddl__auth_params c = client_params(), s = server_params();
    c.secret = copy;
    pair x;
    begin(&x, &c, &s);
    memset(copy, 0, 32);
    talk(&x, 256, DDL__AUTH_MAX_OUT);
    check_agreed(&x);
}

TEST(another_secret_is_refused_by_the_client_first) {
    static const size_t lengths[] = {0, 1, 16, 31, 33, 64, 200};
    uint8_t other[200];
    for (size_t k = 0; k < DDL__COUNT_OF(lengths) + 256; k++) {
        ddl__auth_params c = client_params(), s = server_params();
        memset(other, 9, sizeof other);
        memcpy(other, secret, 32);
        c.secret = other;
        c.secret_bytes = k < 256 ? 32 : lengths[k - 256];
        if (k < 256) {
            other[k / 8] = (uint8_t)(other[k / 8] ^ (1u << k % 8)); /* one bit */
        }
        pair x;
        begin(&x, &c, &s);
        talk(&x, 256, DDL__AUTH_MAX_OUT);
        CHECK_EQ(x.client_status, DDL_ERR_AUTH);
        CHECK_EQ(x.client.code, DDL__AUTH_PROOF);
        CHECK_EQ(x.server_status, DDL_IN_PROGRESS); /* it sees the connection close */
        CHECK_EQ(x.bytes[0], 64);                   /* the client gave no proof away */
        CHECK_EQ(x.bytes[1], 80);
    }
}

/* What the server says to a stranger does not depend on what is wrong with him; after a bad proof it says nothing. */
TEST(a_stranger_learns_nothing) {
    for (int wrong = 0; wrong < 6; wrong++) {
        ddl__auth_params c = client_params(), s = server_params();
        uint8_t guess[32] = {0};
        c.secret = guess;
        c.job += wrong == 1;
        c.world += wrong == 2;
        c.peer = wrong == 3 ? 2 : c.peer;
        c.purpose = wrong == 4 ? DDL__AUTH_STORE : c.purpose;
        pair x;
        begin(&x, &c, &s);
        if (wrong == 5) {
            ddl__auth_refuse(&x.server, DDL__AUTH_DUPLICATE);
        }
        uint8_t said[80 + 32], out[DDL__AUTH_MAX_OUT];
        size_t used, wrote;
        ddl__auth_step(&x.client, NULL, 0, &used, said, sizeof said, &wrote);
        CHECK_EQ(ddl__auth_step(&x.server, said, 64, &used, out, sizeof out, &wrote), DDL_IN_PROGRESS);
        CHECK_EQ(wrote, 80);
        fill(said, 32);
        CHECK_EQ(ddl__auth_step(&x.server, said, 32, &used, out, sizeof out, &wrote), DDL_ERR_AUTH);
        CHECK_EQ(wrote, 0);
        CHECK_EQ(x.server.code, DDL__AUTH_PROOF);
        CHECK_EQ(ddl__auth_step(&x.server, said, 32, &used, out, sizeof out, &wrote), DDL_ERR_AUTH); /* for good */
        CHECK_EQ(used + wrote, 0);
    }
}

static void expect_verdict(const ddl__auth_params *c, const ddl__auth_params *s, uint8_t refusal, uint8_t code) {
    pair x;
    begin(&x, c, s);
    ddl__auth_refuse(&x.server, refusal);
    talk(&x, 256, DDL__AUTH_MAX_OUT);
    ddl_status status = code == DDL__AUTH_OK ? DDL_OK : code == DDL__AUTH_VERSION ? DDL_ERR_VERSION : DDL_ERR_AUTH;
    CHECK_EQ(x.client_status, status);
    CHECK_EQ(x.client.code, code);
    CHECK_EQ(x.server_status, status);
    CHECK_EQ(x.server.code, code);
}

/* An honest client with a mistake proves itself and then hears what is wrong. */
TEST(a_proven_peer_hears_what_is_wrong) {
    ddl__auth_params c = client_params(), s = server_params();
    expect_verdict(&c, &s, DDL__AUTH_OK, DDL__AUTH_OK);
    expect_verdict(&c, &s, DDL__AUTH_DUPLICATE, DDL__AUTH_DUPLICATE);
    expect_verdict(&c, &s, DDL__AUTH_VERSION, DDL__AUTH_VERSION);
    c.job ^= 1u << 31;
    expect_verdict(&c, &s, DDL__AUTH_OK, DDL__AUTH_JOB);
    expect_verdict(&c, &s, DDL__AUTH_DUPLICATE, DDL__AUTH_JOB);
    c = client_params();
    c.world = 5;
    expect_verdict(&c, &s, DDL__AUTH_OK, DDL__AUTH_WORLD);
    c = client_params();
    c.incarnation = 6; /* the mesh decides */
    expect_verdict(&c, &s, DDL__AUTH_OK, DDL__AUTH_OK);
    c = client_params();
    c.rank = 1; /* the server's own */
    expect_verdict(&c, &s, DDL__AUTH_OK, DDL__AUTH_RANK);
}

/* Cases in which the client itself turns away after the server's proof: it has reached somebody else. */
TEST(a_client_refuses_a_server_that_is_not_whom_it_meant) {
    for (int wrong = 0; wrong < 2; wrong++) {
        ddl__auth_params c = client_params(), s = server_params();
        c.peer = wrong == 0 ? 2 : c.peer;
        c.purpose = wrong == 1 ? DDL__AUTH_STORE : c.purpose;
        pair x;
        begin(&x, &c, &s);
        talk(&x, 256, DDL__AUTH_MAX_OUT);
        CHECK_EQ(x.client_status, DDL_ERR_AUTH);
        CHECK_EQ(x.client.code, wrong == 0 ? DDL__AUTH_RANK : DDL__AUTH_PURPOSE);
        CHECK_EQ(x.bytes[0], 64);
    }
}

/* A client that holds the secret and lies: its own code is patched, so every range is the server's to check. */
static void expect_lie_refused(const ddl__auth_params *s, size_t at, uint32_t value, uint8_t code) {
    ddl__auth_params c = client_params();
    c.purpose = s->purpose;
    pair x;
    begin(&x, &c, s);
    ddl__store_le32(x.client.wire + at, value);
    talk(&x, 256, DDL__AUTH_MAX_OUT);
    CHECK_EQ(x.server_status, DDL_ERR_AUTH);
    CHECK_EQ(x.server.code, code);
    CHECK_EQ(x.client.code, code);
}

TEST(a_server_checks_every_range_of_a_proven_client) {
    static const uint32_t ranks[] = {1, 4, 5, 0x7fffffff, 0x80000000, 0xfffffffe};
    ddl__auth_params s = server_params();
    for (size_t i = 0; i < DDL__COUNT_OF(ranks); i++) {
        expect_lie_refused(&s, 16, ranks[i], DDL__AUTH_RANK);
    }
    expect_lie_refused(&s, 16, DDL__RANK_ANY, DDL__AUTH_RANK);
    expect_lie_refused(&s, 20, 2, DDL__AUTH_RANK); /* meant for another */
    expect_lie_refused(&s, 20, DDL__RANK_ANY, DDL__AUTH_RANK);
    expect_lie_refused(&s, 24, 0, DDL__AUTH_WORLD);
    expect_lie_refused(&s, 24, 0xffffffff, DDL__AUTH_WORLD);
    expect_lie_refused(&s, 8, 0, DDL__AUTH_JOB);
    expect_lie_refused(&s, 12, 0, DDL__AUTH_JOB);
    s.purpose = DDL__AUTH_STORE;
    s.world = 0;
    expect_lie_refused(&s, 16, 4, DDL__AUTH_RANK);
    expect_lie_refused(&s, 24, 0, DDL__AUTH_WORLD);
    for (unsigned purpose = 0; purpose < 256; purpose++) {
        if (purpose != DDL__AUTH_MESH) {
            ddl__auth_params mesh = server_params(), c = client_params();
            pair x;
            begin(&x, &c, &mesh);
            x.client.wire[7] = (uint8_t)purpose;
            talk(&x, 256, DDL__AUTH_MAX_OUT);
            CHECK_EQ(x.server.code, DDL__AUTH_PURPOSE);
            CHECK_EQ(x.client_status, DDL_ERR_AUTH);
        }
    }
}

/* A store serves clients that have no rank yet, whoever hosts it, and its own host's rank. */
TEST(a_store_is_less_strict_about_ranks) {
    ddl__auth_params c = client_params(), s = server_params();
    c.purpose = s.purpose = DDL__AUTH_STORE;
    expect_verdict(&c, &s, DDL__AUTH_OK, DDL__AUTH_OK);
    c.rank = 1;
    expect_verdict(&c, &s, DDL__AUTH_OK, DDL__AUTH_OK);
    c.rank = c.peer = DDL__RANK_ANY;
    expect_verdict(&c, &s, DDL__AUTH_OK, DDL__AUTH_OK);
    s.rank = DDL__RANK_ANY;
    expect_verdict(&c, &s, DDL__AUTH_OK, DDL__AUTH_OK);
    s.world = 0;
    c.world = 1000;
    expect_verdict(&c, &s, DDL__AUTH_OK, DDL__AUTH_OK);
}

/* Another major version: each side learns the other's, and no byte after the first eight is looked at. */
TEST(another_major_version_is_named_on_both_sides) {
    for (unsigned major = 0; major < 256; major++) {
        if (major == DDL__WIRE_MAJOR) {
            continue;
        }
        ddl__auth_params c = client_params(), s = server_params();
        pair x;
        begin(&x, &c, &s);
        x.client.wire[4] = (uint8_t)major; /* a client of another release */
        x.client.wire[5] = 9;
        talk(&x, 1 + major % 90, DDL__AUTH_MAX_OUT);
        CHECK_EQ(x.server_status, DDL_ERR_VERSION);
        CHECK_EQ(x.server.peer_version, major << 8 | 9);
        CHECK_EQ(x.server.code, DDL__AUTH_VERSION);
        CHECK_EQ(x.server.peer_rank, 0);
        CHECK_EQ(x.bytes[1], 8);
        begin(&x, &c, &s);
        x.server.wire[68] = (uint8_t)major; /* a server of another release */
        talk(&x, 1 + major % 90, DDL__AUTH_MAX_OUT);
        CHECK_EQ(x.client_status, DDL_ERR_VERSION);
        CHECK_EQ(x.client.peer_version, major << 8 | DDL__WIRE_MINOR);
        CHECK_EQ(x.bytes[0], 64);
        /* and our own client, answered by what our own server says to a client of another major version */
        begin(&x, &c, &s);
        x.client.wire[4] = (uint8_t)major;
        talk(&x, 256, DDL__AUTH_MAX_OUT);
        CHECK_EQ(memcmp(x.said[1], "ddlh\1\0\2\2", 8), 0);
    }
}

TEST(another_minor_version_works) {
    for (unsigned minor = 0; minor < 256; minor++) {
        ddl__auth_params c = client_params(), s = server_params();
        pair x;
        begin(&x, &c, &s);
        x.client.wire[5] = (uint8_t)minor;
        x.server.wire[69] = (uint8_t)(255 - minor);
        talk(&x, 256, DDL__AUTH_MAX_OUT);
        CHECK_EQ(x.client_status, DDL_OK);
        CHECK_EQ(x.server_status, DDL_OK);
        CHECK_EQ(x.server.peer_version, DDL__WIRE_MAJOR << 8 | minor);
        CHECK_EQ(x.client.peer_version, DDL__WIRE_MAJOR << 8 | (255 - minor));
    }
}

/* One bit of the conversation changes on its way: nobody is ever satisfied with it. The receiver's copy is flipped. */
TEST(every_bit_that_flips_on_the_way_is_found) {
    for (unsigned bit = 0; bit < 8 * 212; bit++) {
        ddl__auth_params c = client_params(), s = server_params();
        pair x;
        begin(&x, &c, &s);
        uint8_t to[2][256], out[DDL__AUTH_MAX_OUT];
        size_t sent[2] = {0, 0}, read[2] = {0, 0}, used, wrote;
        /* place of each side's bytes in the conversation */
        static const size_t at[2][2] = {{0, 144}, {64, 176}}, first[2] = {64, 80};
        ddl__auth *side[2] = {&x.client, &x.server};
        ddl_status status[2] = {DDL_IN_PROGRESS, DDL_IN_PROGRESS};
        for (int round = 0; round < 8; round++) {
            int me = round % 2;
            if (status[me] != DDL_IN_PROGRESS) {
                continue;
            }
            status[me] =
                ddl__auth_step(side[me], to[me] + read[me], sent[me] - read[me], &used, out, sizeof out, &wrote);
            read[me] += used;
            for (size_t i = 0; i < wrote; i++, sent[!me]++) {
                size_t n = sent[!me], place = n < first[me] ? at[me][0] + n : at[me][1] + n - first[me];
                to[!me][n] = (uint8_t)(out[i] ^ (place == bit / 8 ? 1u << bit % 8 : 0));
            }
        }
        CHECK(status[0] != DDL_OK); /* a change of VERDICT is the client's alone to see, all others both sides' */
        CHECK(status[1] != DDL_OK || bit >= 8 * 176);
        CHECK(status[0] < 0 || status[1] < 0);
    }
}

/* Yesterday's bytes, from either side, in either order. */
TEST(a_replayed_conversation_is_refused) {
    for (int i = 0; i < 10000; i++) {
        ddl__auth_params c = client_params(), s = server_params();
        static pair old;
        if (i % 100 == 0) {
            begin(&old, &c, &s);
            talk(&old, 256, DDL__AUTH_MAX_OUT);
            check_agreed(&old);
        }
        pair x;
        begin(&x, &c, &s);
        size_t used, wrote;
        uint8_t out[DDL__AUTH_MAX_OUT];
        CHECK_EQ(ddl__auth_step(&x.server, old.said[0], 96, &used, out, sizeof out, &wrote), DDL_ERR_AUTH);
        CHECK_EQ(wrote, 80); /* the challenge, no verdict */
        CHECK_EQ(ddl__auth_step(&x.client, old.said[1], 116, &used, out, sizeof out, &wrote), DDL_ERR_AUTH);
        CHECK_EQ(wrote, 64);
    }
}

/* The server's own words thrown back at it, or at a second server, as HELLO, PROOF or both; and the client's at it. */
TEST(a_reflected_proof_is_refused) {
    for (int i = 0; i < 10000; i++) {
        ddl__auth_params c = client_params(), s = server_params();
        pair x;
        begin(&x, &c, &s);
        uint8_t hello[DDL__AUTH_MAX_OUT], challenge[DDL__AUTH_MAX_OUT], out[DDL__AUTH_MAX_OUT];
        size_t used, wrote;
        ddl__auth_step(&x.client, NULL, 0, &used, hello, sizeof hello, &wrote);
        if (i % 2 == 0) {
            ddl__auth_step(&x.server, hello, 64, &used, challenge, sizeof challenge, &wrote);
            CHECK_EQ(ddl__auth_step(&x.server, challenge + 48, 32, &used, out, sizeof out, &wrote), DDL_ERR_AUTH);
            CHECK_EQ(wrote, 0);
        } else { /* the client's own HELLO, bent into the shape of a CHALLENGE with its own bytes as proof */
            hello[6] = 2;
            fill(hello + 64, 16);
            CHECK_EQ(ddl__auth_step(&x.client, hello, 80, &used, out, sizeof out, &wrote), DDL_ERR_AUTH);
            CHECK_EQ(wrote, 0);
        }
    }
}

/* A man in the middle who passes a proof on to another server: the target rank is inside. */
TEST(a_proof_for_one_server_does_not_serve_at_another) {
    ddl__auth_params c = client_params(), s1 = server_params(), s2 = server_params();
    s2.rank = 2;
    pair x;
    begin(&x, &c, &s2);
    talk(&x, 256, DDL__AUTH_MAX_OUT);
    CHECK_EQ(x.client_status, DDL_ERR_AUTH);
    CHECK_EQ(x.client.code, DDL__AUTH_RANK);
    begin(&x, &c, &s1);
    talk(&x, 256, DDL__AUTH_MAX_OUT);
    check_agreed(&x);
}

TEST(two_clients_or_two_servers_do_not_agree) {
    ddl__auth_params c = client_params(), s = server_params();
    pair x, y;
    begin(&x, &c, &s);
    begin(&y, &c, &s);
    uint8_t hello[DDL__AUTH_MAX_OUT], out[DDL__AUTH_MAX_OUT];
    size_t used, wrote;
    ddl__auth_step(&x.client, NULL, 0, &used, hello, sizeof hello, &wrote);
    CHECK_EQ(ddl__auth_step(&y.client, hello, 64, &used, out, sizeof out, &wrote), DDL_ERR_CORRUPT);
    CHECK_EQ(y.client.code, DDL__AUTH_NOT_DDL);
    ddl__auth_step(&x.server, hello, 64, &used, out, sizeof out, &wrote);
    CHECK_EQ(ddl__auth_step(&y.server, out, 80, &used, hello, sizeof hello, &wrote), DDL_ERR_CORRUPT);
    CHECK_EQ(wrote, 0);
}

TEST(what_is_no_handshake_is_refused_after_eight_bytes) {
    static const char *lines[] = {"HTTP/1.1 400 Bad Request\r\n\r\n",
                                  "GET / HTTP/1.0\r\n\r\n",
                                  "SSH-2.0-OpenSSH_9.2\r\n",
                                  "ddl1\1\1\0\0\0\0\0\0",
                                  "ddlh\1\0\0\0",
                                  "ddlh\1\0\4\0",
                                  "ddlg\1\0\1\2",
                                  "ddlg\1\0\2\2",
                                  "\0\0\0\0\1\0\1\2",
                                  "\x16\x03\x01\x02\x00\x01\x00\x01"};
    for (size_t i = 0; i < DDL__COUNT_OF(lines); i++) {
        ddl__auth_params c = client_params(), s = server_params();
        pair x;
        begin(&x, &c, &s);
        uint8_t out[DDL__AUTH_MAX_OUT];
        size_t used, wrote;
        CHECK_EQ(ddl__auth_step(&x.server, (const uint8_t *)lines[i], 8, &used, out, sizeof out, &wrote),
                 DDL_ERR_CORRUPT);
        CHECK_EQ(used, 8);
        CHECK_EQ(wrote, 0);
        CHECK_EQ(ddl__auth_step(&x.client, (const uint8_t *)lines[i], 8, &used, out, sizeof out, &wrote),
                 DDL_ERR_CORRUPT);
        CHECK_EQ(wrote, 64);
    }
}

TEST(forged_proofs_are_refused) {
    enum { FORGERIES = 200000 };
    ddl__auth_params c = client_params(), s = server_params();
    pair x;
    begin(&x, &c, &s);
    uint8_t hello[DDL__AUTH_MAX_OUT], challenge[DDL__AUTH_MAX_OUT], out[DDL__AUTH_MAX_OUT], forged[80];
    size_t used, wrote;
    ddl__auth_step(&x.client, NULL, 0, &used, hello, sizeof hello, &wrote);
    ddl__auth_step(&x.server, hello, 64, &used, challenge, sizeof challenge, &wrote);
    ddl__auth at_challenge = x.client, at_proof = x.server; /* resume from here each time */
    for (int i = 0; i < FORGERIES; i++) {
        x.server = at_proof;
        fill(forged, 32);
        CHECK_EQ(ddl__auth_step(&x.server, forged, 32, &used, out, sizeof out, &wrote), DDL_ERR_AUTH);
        CHECK_EQ(wrote, 0);
        x.client = at_challenge;
        memcpy(forged, challenge, 48);
        fill(forged + 48, 32);
        CHECK_EQ(ddl__auth_step(&x.client, forged, 80, &used, out, sizeof out, &wrote), DDL_ERR_AUTH);
        CHECK_EQ(wrote, 0);
    }
    x.client = at_challenge;
    ddl__auth_step(&x.client, challenge, 80, &used, out, sizeof out, &wrote);
    for (int i = 0; i < FORGERIES; i++) { /* a forged WELCOME */
        ddl__auth proven = x.client;
        memcpy(forged, "\4\0\0\0", 4);
        fill(forged + 4, 32);
        CHECK_EQ(ddl__auth_step(&proven, forged, 36, &used, out, sizeof out, &wrote), DDL_ERR_AUTH);
    }
    /* the true proof is still taken */
    CHECK_EQ(ddl__auth_step(&at_proof, out, 32, &used, forged, sizeof forged, &wrote), DDL_OK);
}

TEST(bad_parameters_are_refused) {
    static const uint8_t nonce[32] = {1};
    struct {
        uint8_t purpose;
        uint32_t rank, peer, world;
        ddl_status client, server;
    } table[] = {
        {DDL__AUTH_MESH, 0, 1, 2, DDL_OK, DDL_OK},
        {0, 0, 1, 2, DDL_ERR_ARG, DDL_ERR_ARG},
        {4, 0, 1, 2, DDL_ERR_ARG, DDL_ERR_ARG},
        {255, 0, 1, 2, DDL_ERR_ARG, DDL_ERR_ARG},
        {DDL__AUTH_MESH, 2, 1, 2, DDL_ERR_ARG, DDL_ERR_ARG},
        {DDL__AUTH_MESH, 0, 2, 2, DDL_ERR_ARG, DDL_OK},
        {DDL__AUTH_MESH, 0, 0, 0, DDL_ERR_ARG, DDL_ERR_ARG},
        {DDL__AUTH_MESH, DDL__RANK_ANY, 1, 2, DDL_ERR_ARG, DDL_ERR_ARG},
        {DDL__AUTH_MESH, 0, DDL__RANK_ANY, 2, DDL_ERR_ARG, DDL_OK},
        {DDL__AUTH_STORE, DDL__RANK_ANY, DDL__RANK_ANY, 2, DDL_OK, DDL_OK},
        {DDL__AUTH_STORE, 0, 0, 0, DDL_ERR_ARG, DDL_OK},
        {DDL__AUTH_STORE, 7, 0, 2, DDL_ERR_ARG, DDL_ERR_ARG},
        {DDL__AUTH_GROW, 1, DDL__RANK_ANY, 2, DDL_OK, DDL_OK},
        {DDL__AUTH_GROW, 2, DDL__RANK_ANY, 2, DDL_ERR_ARG, DDL_ERR_ARG},
    };
    for (size_t i = 0; i < DDL__COUNT_OF(table); i++) {
        ddl__auth_params p = {secret, 32, 1, table[i].purpose, table[i].rank, table[i].peer, table[i].world, 0};
        ddl__auth a;
        CHECK_EQ(ddl__auth_client(&a, &p, nonce), table[i].client);
        CHECK_EQ(ddl__auth_server(&a, &p, nonce), table[i].server);
        p.secret = NULL;
        CHECK_EQ(ddl__auth_client(&a, &p, nonce), DDL_ERR_ARG);
    }
}

TEST(a_wiped_handshake_holds_nothing_and_proves_nothing) {
    ddl__auth_params c = client_params(), s = server_params();
    pair x;
    begin(&x, &c, &s);
    talk(&x, 256, DDL__AUTH_MAX_OUT);
    ddl__auth_wipe(&x.client);
    const uint8_t *p = (const uint8_t *)&x.client;
    for (size_t i = 0; i < sizeof x.client; i++) {
        CHECK_EQ(p[i], 0);
    }
    size_t used, wrote;
    uint8_t out[DDL__AUTH_MAX_OUT];
    CHECK_EQ(ddl__auth_step(&x.client, NULL, 0, &used, out, sizeof out, &wrote), DDL_ERR_ARG);
}

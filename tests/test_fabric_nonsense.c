/* The libfabric plugin against a member of the job that makes no sense: messages with the right token of each kind, in each
 * state of a link that it is wrong in. The link ends, with EBADMSG, or the word is ignored where it may have been overtaken;
 * nothing is written but where a payload lands, and other links go on.
 * tests/run: variants=gcc,asan timeout=150 quick=yes */
#include "mini_host.h"

#include "fabric_host.h"

/* tcp of libfabric 1.17 itself leaks: see test_fabric.c. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void) { return "leak:libfabric.so\n"; }

/* What rank 0 says to rank 1, and what comes of it. Numbers that are 0 here are as they should be. */
typedef struct nonsense {
    const char *what;
    int state;              /* of the link: see below */
    uint8_t kind;
    int error;              /* of its end; GOES_ON */
    uint16_t total, bytes;  /* of payload: by the header of the core's; that come */
    size_t cut;             /* so much of the end is not sent */
    uint32_t claims, ahead; /* in the head: so many bytes, or messages, more */
    uint64_t place;         /* of a REPAIR */
    int unlike;             /* an offer of so many bytes more than the header says */
} nonsense;

/* Nothing is under way; of a payload of 200 bytes 64 have come; its offer has come and was refused. */
enum { QUIET, BEGUN, REFUSED };
enum { GOES_ON = -1, PAYLOAD = 200, FIRST_PART = 64 };

static const nonsense all_nonsense[] = {
    {"a whole message without all of a header", QUIET, FABRIC_WHOLE, .error = EBADMSG, .cut = 1},
    {"a head alone", QUIET, FABRIC_WHOLE, .error = EBADMSG, .cut = DDL_MESSAGE_HEADER_BYTES},
    {"a whole message that claims more", QUIET, FABRIC_WHOLE, .error = EBADMSG, .total = 10, .bytes = 10, .claims = 1},
    {"a whole message that claims less", QUIET, FABRIC_WHOLE, .error = EBADMSG, .total = 10, .bytes = 10, .claims = -1u},
    {"a whole message of another length than its header says", QUIET, FABRIC_WHOLE, .error = EBADMSG, .total = 11, .bytes = 10},
    {"a whole message in the midst of a payload", BEGUN, FABRIC_WHOLE, .error = EBADMSG, .total = 10, .bytes = 10},
    {"a first part without all of a header", QUIET, FABRIC_FIRST, .error = EBADMSG, .cut = 1},
    {"a first part that claims more", QUIET, FABRIC_FIRST, .error = EBADMSG, .total = PAYLOAD, .bytes = 10, .claims = 1},
    {"a first part of more than all", QUIET, FABRIC_FIRST, .error = EBADMSG, .total = 10, .bytes = 11},
    {"a first part of nothing", QUIET, FABRIC_FIRST, .error = EBADMSG, .total = PAYLOAD},
    {"two first parts", BEGUN, FABRIC_FIRST, .error = EBADMSG, .total = PAYLOAD, .bytes = 10},
    {"a part without a first one", QUIET, FABRIC_PIECE, .error = EBADMSG, .bytes = 10},
    {"a part of nothing without a first one", QUIET, FABRIC_PIECE, .error = EBADMSG},
    {"a part that claims more", BEGUN, FABRIC_PIECE, .error = EBADMSG, .bytes = 10, .claims = 1},
    {"a part of nothing", BEGUN, FABRIC_PIECE, .error = EBADMSG},
    {"a part past the end", BEGUN, FABRIC_PIECE, .error = EBADMSG, .bytes = PAYLOAD - FIRST_PART + 1},
    {"an offer without a header", QUIET, FABRIC_OFFER, .error = EBADMSG, .cut = sizeof(fabric_offer_body) + 1},
    {"an offer without a body", QUIET, FABRIC_OFFER, .error = EBADMSG, .total = PAYLOAD, .cut = sizeof(fabric_offer_body)},
    {"an offer with less than a body", QUIET, FABRIC_OFFER, .error = EBADMSG, .total = PAYLOAD, .cut = 1},
    {"an offer with more than a body", QUIET, FABRIC_OFFER, .error = EBADMSG, .total = PAYLOAD, .bytes = 1},
    {"an offer of more than the header says", QUIET, FABRIC_OFFER, .error = EBADMSG, .total = PAYLOAD, .unlike = 1},
    {"an offer of less than the header says", QUIET, FABRIC_OFFER, .error = EBADMSG, .total = PAYLOAD, .unlike = -1},
    {"an offer of nothing", QUIET, FABRIC_OFFER, .error = EBADMSG},
    {"an offer in the midst of a payload", BEGUN, FABRIC_OFFER, .error = EBADMSG, .total = PAYLOAD},
    {"a repair of nothing", QUIET, FABRIC_REPAIR, .error = EBADMSG, .bytes = 10},
    {"a repair of what comes in parts", BEGUN, FABRIC_REPAIR, .error = EBADMSG, .place = FIRST_PART, .bytes = 10},
    {"a repair of another offer", REFUSED, FABRIC_REPAIR, .error = EBADMSG, .bytes = 10, .ahead = 1},
    {"a repair without a place", REFUSED, FABRIC_REPAIR, .error = EBADMSG, .cut = 1},
    {"a repair that claims more", REFUSED, FABRIC_REPAIR, .error = EBADMSG, .bytes = 10, .claims = 1},
    {"a repair that claims 4 GiB", REFUSED, FABRIC_REPAIR, .error = EBADMSG, .claims = -1u},
    {"a repair by nothing", REFUSED, FABRIC_REPAIR, .error = EBADMSG, .place = 10},
    {"a repair of more than all", REFUSED, FABRIC_REPAIR, .error = EBADMSG, .bytes = PAYLOAD + 1},
    {"a repair over the end", REFUSED, FABRIC_REPAIR, .error = EBADMSG, .place = PAYLOAD - 1, .bytes = 2},
    {"a repair past the end", REFUSED, FABRIC_REPAIR, .error = EBADMSG, .place = PAYLOAD + 1, .bytes = 1},
    {"a repair before the beginning", REFUSED, FABRIC_REPAIR, .error = EBADMSG, .place = (uint64_t)-1, .bytes = 2},
    {"the same number again", BEGUN, FABRIC_WHOLE, .error = EBADMSG, .ahead = -1u},
    {"a number that no window has", QUIET, FABRIC_WHOLE, .error = EBADMSG, .ahead = FABRIC_HOLD},
    {"a number that leaves one out", QUIET, FABRIC_WHOLE, .error = ECONNRESET, .ahead = 1},
    {"kind 0", QUIET, 0, .error = EBADMSG, .bytes = 10},
    {"a kind that there is not", QUIET, FABRIC_BYE + 1, .error = EBADMSG, .bytes = 10},
    {"the last of kinds", QUIET, 255, .error = EBADMSG},
    {"a goodbye at once", QUIET, FABRIC_BYE, .error = ECANCELED, .claims = FABRIC_AT_ONCE},
    {"a goodbye at once in the midst of a payload", BEGUN, FABRIC_BYE, .error = ECANCELED, .claims = FABRIC_AT_ONCE},
    {"a goodbye", QUIET, FABRIC_BYE, .error = 0},
    /* What may have been overtaken, or says nothing that is not known. */
    {"a refusal of nothing", QUIET, FABRIC_REFUSE, .error = GOES_ON},
    {"a refusal with bytes behind it", QUIET, FABRIC_REFUSE, .error = GOES_ON, .bytes = 10, .ahead = 7},
    {"a question about nothing", QUIET, FABRIC_CHECK, .error = GOES_ON},
    {"an answer to no question", QUIET, FABRIC_VALID, .error = GOES_ON},
    {"an answer in the midst of a payload", BEGUN, FABRIC_VALID, .error = GOES_ON},
    {"an answer about what was refused", REFUSED, FABRIC_VALID, .error = GOES_ON},
    {"nothing is withdrawn", QUIET, FABRIC_WITHDRAW, .error = GOES_ON},
    {"what will never be is withdrawn", QUIET, FABRIC_WITHDRAW, .error = GOES_ON, .ahead = 1u << 31},
    {"a payload in parts is withdrawn", BEGUN, FABRIC_WITHDRAW, .error = GOES_ON},
    {"what was refused is withdrawn", REFUSED, FABRIC_WITHDRAW, .error = GOES_ON},
    {"an acknowledgement of a kind that there is not", QUIET, FABRIC_ACK, .error = GOES_ON, .ahead = 77, .bytes = 10},
    {"a goodbye before its time", QUIET, FABRIC_BYE, .error = GOES_ON, .ahead = 5},
    {"a goodbye in the midst of a payload", BEGUN, FABRIC_BYE, .error = GOES_ON},
};

/* What rank 1 has of rank 0: a landing with much around it that nobody may write to. */
static struct {
    uint8_t memory[4096];
    int delivered, landings, ended;
    ddl_status status;
} of_member;
enum { LANDING_AT = 1024, UNTOUCHED = 0xee };

static ddl_status member_deliver(const ddl_host *host, int32_t peer, const uint8_t *header, const void *payload, uint64_t bytes) {
    if (peer != 0) {
        return mini_deliver(host, peer, header, payload, bytes);
    }
    of_member.delivered += word(header, 0) == bytes;
    return word(header, 0) == bytes ? DDL_OK : DDL_ERR_CORRUPT;
}

static ddl_status member_land(const ddl_host *host, int32_t peer, const uint8_t *header, uint64_t *out_bytes, void **out_to,
                              void **out_token) {
    if (peer != 0) {
        return mini_land(host, peer, header, out_bytes, out_to, out_token);
    }
    of_member.landings++;
    *out_bytes = word(header, 0);
    *out_to = *out_token = of_member.memory + LANDING_AT;
    return DDL_OK;
}

static void member_landed(const ddl_host *host, int32_t peer, void *token, ddl_status status) {
    if (peer != 0) {
        mini_landed(host, peer, token, status);
        return;
    }
    CHECK(token == of_member.memory + LANDING_AT);
    of_member.ended++;
    of_member.status = status;
}

/* Sends one message, with the right token and, but for what is to be wrong, the right number. */
static void member_says(endpoint *e, const nonsense *n) {
    fabric_link *link = fabric_link_of(e[0].self, 1);
    uint64_t header[DDL_MESSAGE_HEADER_BYTES / 8] = {n->total};
    fabric_offer_body offer = {.bytes = (uint64_t)n->total + (uint64_t)(int64_t)n->unlike}; /* by a connection that was never made */
    uint8_t body[600];
    size_t length = 0;
    int about_offers = n->kind >= FABRIC_REFUSE && n->kind <= FABRIC_ACK;
    int has_header = n->kind == FABRIC_WHOLE || n->kind == FABRIC_FIRST || n->kind == FABRIC_OFFER;
    memset(body, 0x11, sizeof body);
    if (has_header) {
        memcpy(body, header, length = sizeof header);
    }
    if (n->kind == FABRIC_OFFER) {
        memcpy(body + length, &offer, sizeof offer);
        length += sizeof offer;
    } else if (n->kind == FABRIC_REPAIR) {
        memcpy(body, &n->place, length = sizeof n->place);
    }
    length += n->bytes;
    uint32_t claims = (n->kind == FABRIC_OFFER ? 0 : n->bytes) + n->claims;
    fabric_head head = fabric_head_of(e[0].self, link, n->kind, (about_offers ? 0 : link->sequence) + n->ahead, claims);
    double until = test_now_s() + 20 * test_slow(); /* no timer runs for what is said so */
    while (fabric_put(e[0].self, link, &head, body, length - n->cut, NULL, 0) != FABRIC_GONE && test_now_s() < until) {
        progress_all(e, 3);
    }
    CHECK(test_now_s() < until);
    link->sequence += !about_offers && n->kind != FABRIC_BYE;
}

static ssize_t no_read(struct fid_ep *ep, void *buf, size_t len, void *desc, fi_addr_t at, uint64_t address, uint64_t key,
                       void *context) {
    (void)ep, (void)buf, (void)len, (void)desc, (void)at, (void)address, (void)key, (void)context;
    return -FI_EIO;
}

static void member_begins(endpoint *e, int state) {
    const fabric_link *link = fabric_link_of(e[1].self, 0);
    hooks.of = e[1].self;
    hooks.read = no_read;
    if (state == BEGUN) {
        member_says(e, &(nonsense){.kind = FABRIC_FIRST, .total = PAYLOAD, .bytes = FIRST_PART});
        DRIVE(e, 3, link->landing.done == FIRST_PART) {}
    } else if (state == REFUSED) {
        member_says(e, &(nonsense){.kind = FABRIC_OFFER, .total = PAYLOAD});
        DRIVE(e, 3, link->landing.refused && !link->refusing) {}
    }
}

/* What was not understood has changed nothing: the link does what it would have done. */
static void member_goes_on(endpoint *e, int state) {
    letter l = {0};
    if (state == QUIET) {
        CHECK(post(&e[0], 1, &l, 100) >= 0);
        DRIVE(e, 3, of_member.delivered == 1 && l.returned == l.borrowed) {}
        letter_free(&l);
        return;
    }
    nonsense rest = {.kind = FABRIC_REPAIR, .bytes = PAYLOAD};
    if (state == BEGUN) {
        rest = (nonsense){.kind = FABRIC_PIECE, .bytes = PAYLOAD - FIRST_PART};
    }
    member_says(e, &rest);
    DRIVE(e, 3, of_member.ended == 1) {}
    CHECK_EQ(of_member.status, DDL_OK);
}

static size_t untouched(size_t from, size_t to) {
    size_t count = 0;
    for (size_t i = from; i < to; i++) {
        count += of_member.memory[i] == UNTOUCHED;
    }
    return count;
}

/* Rank 2 has nothing to do with it, and is heard and reached as before. */
static void others_go_on(endpoint *e) {
    letter there = {0}, back = {0};
    CHECK(post(&e[2], 1, &there, 100000) >= 0);
    CHECK(post(&e[1], 2, &back, 100000) >= 0);
    DRIVE(e, 3, e[1].arrived[2] == 1 && e[2].arrived[1] == 1 && there.returned == there.borrowed && back.returned == back.borrowed) {}
    letter_free(&there);
    letter_free(&back);
    CHECK_EQ(e[1].lost[2] + e[2].lost[1], 0);
}

static void nonsense_comes(const nonsense *n, const char *setting) {
    endpoint *e = world_open(3, setting, NULL);
    memset(&of_member, 0, sizeof of_member);
    memset(of_member.memory, UNTOUCHED, sizeof of_member.memory);
    e[1].host.deliver = member_deliver;
    e[1].host.land = member_land;
    e[1].host.landed = member_landed;
    member_begins(e, n->state);
    member_says(e, n);
    size_t legal = n->state == BEGUN ? FIRST_PART : 0;
    if (n->error == GOES_ON) {
        member_goes_on(e, n->state);
        legal = n->state == QUIET ? 0 : PAYLOAD;
    } else {
        DRIVE(e, 3, e[1].lost[0] > 0) {}
        CHECK_EQ(e[1].lost_error[0], n->error);
        CHECK_EQ(of_member.delivered, 0);
        CHECK(of_member.ended == 0 || of_member.status == DDL_ERR_PEER);
    }
    CHECK_EQ(e[1].lost[0], n->error != GOES_ON);
    CHECK_EQ(of_member.ended, of_member.landings);
    CHECK_EQ(untouched(0, LANDING_AT), LANDING_AT);
    CHECK_EQ(untouched(LANDING_AT, LANDING_AT + legal), 0);
    CHECK_EQ(untouched(LANDING_AT + legal, sizeof of_member.memory), sizeof of_member.memory - LANDING_AT - legal);
    hooks_end();
    others_go_on(e);
    world_end(e, 3);
}

/* A member cuts payloads smaller than we take it to: what has not come is not handed on as if it had. */
static ssize_t half_a_part(struct fid_ep *ep, const void *buf, size_t len, void *desc, fi_addr_t at, void *context) {
    const fabric_slot *slot = (fabric_slot *)((char *)context - offsetof(fabric_slot, context));
    return real_send(ep, buf, slot->role == FABRIC_STREAM ? len / 2 : len, desc, at, context);
}

TEST(half_a_part_of_a_payload_ends_the_link) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(3, NULL, NULL);
    letter l;
    hooks.of = e[0].self;
    hooks.send = half_a_part;
    CHECK_EQ(post(&e[0], 1, &l, 400000), DDL_IN_PROGRESS);
    DRIVE(e, 3, e[1].lost[0] + (int)e[1].arrived[0] > 0) {}
    CHECK_EQ(e[1].arrived[0], 0);
    CHECK_EQ(e[1].lost_error[0], EBADMSG);
    CHECK_EQ(e[1].landing_failed[0], 1);
    hooks_end();
    others_go_on(e);
    fabric_transport.peer_dead(e[0].self, 1);
    letter_free(&l);
    world_end(e, 3);
}

/* It holds the secret, and is heard: its link ends where it makes no sense, and nothing is written that is not its landing. */
static void nonsense_of_each_kind(const char *setting, int offers_alone) {
    NEED_LIBFABRIC();
    for (size_t i = 0; i < sizeof all_nonsense / sizeof all_nonsense[0]; i++) {
        const nonsense *n = &all_nonsense[i];
        int before = test__now->failures;
        if (!offers_alone || n->state == REFUSED || n->kind == FABRIC_OFFER || n->kind == FABRIC_REPAIR) {
            nonsense_comes(n, setting);
        }
        if (test__now->failures > before) {
            fprintf(stderr, "      when there comes %s\n", n->what);
            hooks_end();
        }
    }
}

TEST(nonsense_of_a_member_ends_its_link) { nonsense_of_each_kind(NULL, 0); }

/* Where payloads are read there is a difference. */
TEST(nonsense_about_offers_over_an_adapter_ends_the_link) { nonsense_of_each_kind("FABRIC_FORCE_MR=local", 1); }

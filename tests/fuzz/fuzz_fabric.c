/* libFuzzer target: all that peers, and who is none, say to the libfabric plugin: messages, calls (fabric_hello), addresses;
 * meanwhile the core sends and wants memory back, and a made-up libfabric ends operations well, badly or not at all.
 * Input: byte 0: bit 0: connections, else an adapter; bit 1: as EFA, which drops completions; bit 2: no order; bit 3: two
 * rails; bit 4: what is under way by a connection that closes has no completion, and reads from a rank that is removed go
 * on; bits 5-6: our rank; bit 7: keys are ours to choose; byte 1: the allocation that fails, 0: none; then ops, of one byte
 * (fuzz_op) and what that needs.
 * campaign: machine max_len=1024 */
#include "fuzz_fabric.h"

/* >>what comes */

/* A receive takes a message; without one it is not taken off the wire, and lost here. */
FUZZ_QUIET static void fuzz_arrive(fuzz *f, const uint8_t *bytes, size_t length) {
    int i = 0;
    while (i < f->operation_count && (f->operations[i].slot->role != FABRIC_RECV || f->operations[i].error >= 0)) {
        i++;
    }
    if (i == f->operation_count) {
        return;
    }
    fuzz_operation *o = &f->operations[i];
    size_t fits = length < o->length ? length : o->length;
    memcpy(o->bytes, bytes, fits);
    __asan_poison_memory_region((uint8_t *)o->bytes + fits, o->length - fits);
    o->length = fits;
    o->error = length > fits ? FI_ETRUNC : 0;
}

/* The number that a kind has when all is well. */
FUZZ_QUIET static uint32_t fuzz_sequence(const fuzz_rank *r, const fabric_link *l, uint8_t kind) {
    uint32_t of_offer = l != NULL && l->offers != NULL ? l->offers->number : 0;
    switch (kind) {
    case FABRIC_REFUSE:
    case FABRIC_CHECK: return of_offer;
    case FABRIC_REPAIR:
    case FABRIC_VALID:
    case FABRIC_WITHDRAW: return l != NULL ? l->pulled : 0;
    case FABRIC_ACK: return 0;
    default:
        return r->sequence;
    }
}

/* The body of a kind; returns its length. At most MESSAGE bytes behind the head. */
FUZZ_QUIET static size_t fuzz_body(fuzz *f, const fabric_link *l, uint8_t kind, uint8_t *out, uint32_t *bytes) {
    uint16_t total = (uint16_t)fuzz_int(&f->in, 2);
    size_t payload = (size_t)fuzz_u8(&f->in) * 2, at = 0;
    uint8_t header[DDL_MESSAGE_HEADER_BYTES] = {(uint8_t)total, (uint8_t)(total >> 8), fuzz_u8(&f->in)};
    fabric_offer_body body = {.bytes = fuzz_header_bytes(header), .address = l != NULL ? l->way[FABRIC_IN].number : 0};
    uint64_t place = total;
    if (kind == FABRIC_WHOLE) {
        header[0] = (uint8_t)payload;
        header[1] = (uint8_t)(payload >> 8);
    }
    if (kind == FABRIC_WHOLE || kind == FABRIC_FIRST || kind == FABRIC_OFFER) {
        memcpy(out, header, sizeof header);
        at = sizeof header;
    }
    if (kind == FABRIC_OFFER) {
        body.bytes += header[2] >= 0xf0;
        body.address += header[3];
        memcpy(out + at, &body, sizeof body);
        at += sizeof body;
        payload = header[2] == 0xef;
    } else if (kind == FABRIC_REPAIR) {
        memcpy(out, &place, sizeof place);
        at = sizeof place;
    } else if (kind > FABRIC_REPAIR || kind == FABRIC_REFUSE) {
        payload = header[2] == 0xef ? payload : 0;
    }
    payload = payload < MESSAGE - at ? payload : MESSAGE - at;
    memset(out + at, 0xb7, payload);
    *bytes = kind == FABRIC_OFFER ? 0 : (uint32_t)payload;
    return at + payload;
}

/* A message whose parts are right, but for those that the flags say are not. */
FUZZ_QUIET static void fuzz_message(fuzz *f) {
    uint8_t who = fuzz_u8(&f->in), kind = fuzz_u8(&f->in) % 14, flags = fuzz_u8(&f->in), room[sizeof(fabric_head) + MESSAGE];
    int32_t peer = who & 3;
    fabric_self *s = f->s;
    fabric_link *l = s->peers[peer].link;
    fuzz_rank *r = &f->ranks[peer];
    uint32_t limit = l != NULL ? l->spent + FABRIC_WINDOW : FABRIC_FIRST_WINDOW, ended = l != NULL ? l->ended : 0, bytes;
    size_t length = sizeof(fabric_head) + fuzz_body(f, l, kind, room + sizeof(fabric_head), &bytes);
    fabric_head head = {.token = fabric_token(s, peer, s->rank, s->address.nonce), .source = peer, .kind = kind,
                        .sequence = fuzz_sequence(r, l, kind), .granted = limit, .pulled = ended + (who >> 2 & 1), .bytes = bytes};
    head.token ^= (flags & 1) != 0 ? (uint64_t)1 << fuzz_u8(&f->in) % 64 : 0;
    head.sequence += (flags & 2) != 0 ? (uint32_t)(int8_t)fuzz_u8(&f->in) : (flags & 4) != 0 ? (uint32_t)fuzz_int(&f->in, 4) : 0;
    head.granted += (flags & 8) != 0 ? (uint32_t)fuzz_int(&f->in, 4) : 0;
    head.pulled += (flags & 16) != 0 ? (uint32_t)fuzz_int(&f->in, 4) : 0;
    head.bytes += (flags & 32) != 0 ? (uint32_t)fuzz_int(&f->in, 4) : 0;
    length = (flags & 64) != 0 ? (size_t)fuzz_int(&f->in, 2) % (sizeof room + 1) : length;
    head.source = (flags & 128) != 0 ? (int32_t)fuzz_int(&f->in, 4) : peer;
    memcpy(room, &head, sizeof head);
    int ordered = kind <= FABRIC_OFFER || kind > FABRIC_BYE;
    r->sequence += ordered && flags == 0;
    r->credit += kind != FABRIC_ACK && kind != FABRIC_BYE; /* at most */
    int alone = fuzz_next(f, 0, 1) == f->operation_count && s->late == NULL && f->event_count == 0;
    fuzz_arrive(f, room, length);
    if (alone && l == NULL && head.source == peer && head.token != fabric_token(s, peer, s->rank, s->address.nonce)) {
        (void)fabric_poll(s);
        REQUIRE(s->peers[peer].link == NULL); /* a stranger costs nothing */
    }
}

FUZZ_QUIET static void fuzz_event_add(fuzz *f, const fuzz_event *event) {
    if (f->event_count < EVENTS) {
        f->events[f->event_count++] = *event;
    } else if (event->info != NULL) {
        fuzz_freeinfo(event->info);
    }
}

/* Somebody calls. */
FUZZ_QUIET static void fuzz_call(fuzz *f) {
    uint8_t who = fuzz_u8(&f->in), flags = fuzz_u8(&f->in);
    int32_t peer = who & 3;
    const fabric_link *l = f->s->peers[peer].link;
    uint32_t kind = who >> 2 & 3, next = l != NULL ? l->way[kind == FABRIC_WORDS ? FABRIC_WORDS : FABRIC_IN].number + 1 : 1;
    fabric_hello hello = {.token = fabric_token(f->s, peer, f->s->rank, f->s->address.nonce), .source = peer, .kind = kind, .number = next};
    hello.token ^= (flags & 1) != 0 ? 1u << (flags >> 3) : 0;
    hello.number += (flags & 2) != 0 ? (uint32_t)fuzz_int(&f->in, 4) : 0;
    hello.source = (flags & 4) != 0 ? (int32_t)fuzz_int(&f->in, 4) : peer;
    fuzz_event event = {.event = FI_CONNREQ, .fid = &peps[0].fid, .info = calloc(1, sizeof *event.info), .bytes = sizeof hello};
    event.info->handle = (fid_t)&f->keys;
    event.bytes = (flags & 0x80) != 0 ? fuzz_u8(&f->in) % sizeof event.data : event.bytes;
    event.is_of_member = peer != f->s->rank && hello.source == peer && (flags & 1) == 0 && event.bytes >= sizeof hello;
    memcpy(event.data, &hello, sizeof hello);
    f->objects++;
    fuzz_event_add(f, &event);
}

/* A connection comes about, ends, or fails. */
FUZZ_QUIET static void fuzz_connection(fuzz *f) {
    uint8_t which = fuzz_u8(&f->in), how = fuzz_u8(&f->in) % 4;
    fuzz_endpoint *e = f->endpoints[which % ENDPOINTS];
    if (e != NULL && e->ep.fid.context != NULL && e->is_called) {
        fuzz_event event = {.event = how < 2 ? FI_CONNECTED : FI_SHUTDOWN, .fid = &e->ep.fid, .error = how == 3 ? FI_ECONNREFUSED : 0};
        fuzz_event_add(f, &event);
    }
}

/* An address with some bytes changed. It is taken when it says what ours does. */
FUZZ_QUIET static void fuzz_address(fuzz *f) {
    int32_t peer = fuzz_u8(&f->in) & 3;
    fabric_self *s = f->s;
    fabric_address a = s->address;
    uint64_t latency = 0, speed = 0;
    for (uint8_t changes = fuzz_u8(&f->in) % 8; changes > 0; changes--) {
        size_t at = fuzz_u8(&f->in) % sizeof a;
        ((uint8_t *)&a)[at] = fuzz_u8(&f->in);
    }
    if (peer == s->rank || s->peers[peer].known) {
        return;
    }
    char provider[sizeof a.provider + 1] = "";
    memcpy(provider, a.provider, sizeof a.provider - 1);
    const fabric_address *ours = &s->address;
    int same = a.version == ours->version && a.rails == ours->rails && a.name_bytes == ours->name_bytes && a.has_rma == ours->has_rma &&
               strcmp(provider, ours->provider) == 0 && a.protocol == ours->protocol && a.slot_bytes == ours->slot_bytes &&
               a.part_bytes == ours->part_bytes;
    ddl_status status = fabric_transport.add_peer(s, peer, &a, sizeof a, "here", &latency, &speed);
    int taken = same && (f->connects || (f->refuses & REFUSES_CM) == 0);
    REQUIRE((status == DDL_OK) == taken && s->peers[peer].known == taken && (latency > 0 && speed > 0) == taken);
    REQUIRE(status == DDL_OK || status == DDL_ERR_UNSUPPORTED);
}

/* >>what the core wants */

FUZZ_QUIET static void fuzz_post(fuzz *f) {
    static const uint16_t sizes[8] = {0, 1, 100, 432, 433, 1024, 1025, 5000};
    uint8_t who = fuzz_u8(&f->in);
    int32_t peer = who & 3;
    int i = 0;
    while (i < LETTERS && f->letters[i] != NULL) {
        i++;
    }
    if (i == LETTERS || peer == f->s->rank || !f->s->peers[peer].known || f->ranks[peer].is_dead) {
        return;
    }
    ddl_message *m = f->letters[i] = malloc(sizeof *m);
    memset(m, 0x77, sizeof *m);
    m->payload_bytes = sizes[who >> 2 & 7];
    m->payload = calloc(1, m->payload_bytes);
    ddl_status status = fabric_transport.send(f->s, peer, m);
    REQUIRE(status == DDL_OK || status == DDL_IN_PROGRESS || status == DDL_ERR_PEER || status == DDL_ERR_NOMEM);
    if (status != DDL_IN_PROGRESS) {
        fuzz_letter_free(&f->letters[i]);
    }
}

/* On return nobody reads the message any more: it is freed. Its rank is not told here, as recall looks for it. */
FUZZ_QUIET static void fuzz_recall(fuzz *f) {
    ddl_message **letter = &f->letters[fuzz_u8(&f->in) % LETTERS];
    for (int32_t peer = 0; peer < WORLD && *letter != NULL; peer++) {
        const fabric_link *l = f->s->peers[peer].link;
        const ddl_message *m = l != NULL ? l->first : NULL;
        const fabric_offer *o = l != NULL ? l->offers : NULL;
        while (m != NULL && m != *letter) {
            m = m->next;
        }
        while (o != NULL && o->message != *letter) {
            o = o->next;
        }
        if (m != NULL || o != NULL) {
            ddl_message *recalled = *letter;
            *letter = NULL; /* sent() would not find it */
            fabric_transport.recall(f->s, peer, recalled);
            fuzz_letter_free(&recalled);
            return;
        }
    }
}

FUZZ_QUIET static void fuzz_redirect(fuzz *f) {
    uint8_t who = fuzz_u8(&f->in);
    fuzz_rank *r = &f->ranks[who & 3];
    if (r->landing != NULL && !r->is_lost) {
        uint8_t *old = r->landing;
        r->landing = malloc(r->landing_bytes);
        fabric_transport.redirect(f->s, who & 3, r, (who & 12) == 12 ? NULL : r->landing);
        free(old);
    }
}

FUZZ_QUIET static void fuzz_mood(fuzz *f) {
    static const int errors[4] = {-FI_EAGAIN, -FI_EAGAIN, -FI_EIO, -FI_ENOMEM};
    uint8_t how = fuzz_u8(&f->in);
    f->refuses = how & 63;
    f->error = errors[how >> 6];
    f->automatic = fuzz_u8(&f->in) & 1;
}

FUZZ_QUIET static void fuzz_kill(fuzz *f, int32_t peer) {
    if (peer != f->s->rank) {
        fabric_transport.peer_dead(f->s, peer);
        f->ranks[peer].is_dead = 1;
        REQUIRE(f->ranks[peer].landing == NULL);
    }
}

/* >>a run */

FUZZ_QUIET static int32_t fuzz_count(const fabric_slot *slot, int32_t most) {
    int32_t count = 0;
    for (; slot != NULL; slot = slot->next) {
        REQUIRE(count++ < most);
    }
    return count;
}

FUZZ_QUIET static int32_t fuzz_under_way(const fuzz *f, int role, int other) {
    int32_t count = 0;
    for (int i = 0; i < f->operation_count; i++) {
        const fuzz_operation *o = &f->operations[i];
        count += !o->is_ghost && (o->slot->role == role || o->slot->role == other);
    }
    return count;
}

/* Each buffer is in one place, and none is lost. */
FUZZ_QUIET static void fuzz_sound(const fuzz *f) {
    const fabric_self *s = f->s;
    int32_t held = 0, dead = 0;
    for (const fabric_link *l = s->links; l != NULL; l = l->next) {
        for (int i = 0; i < FABRIC_HOLD; i++) {
            held += l->held[i] != NULL;
        }
        REQUIRE(l->window <= FABRIC_WINDOW && l->reads >= 0 && l->sends >= 0 && l->landing.reading >= 0);
        REQUIRE((int32_t)(f->ranks[l->peer].credit - l->taken) >= 0);
        REQUIRE(!l->landing.active || f->ranks[l->peer].landing != NULL);
        dead += f->ranks[l->peer].is_dead;
    }
    int32_t all = s->receives;
    REQUIRE(fuzz_count(s->unposted, all) + fuzz_count(s->arrived, all) + fuzz_count(s->late, all) + held +
            fuzz_under_way(f, FABRIC_RECV, 0) == all);
    if (!f->drops && !f->efa) {
        int32_t sends = fuzz_count(s->send_free, 1024) + fuzz_under_way(f, FABRIC_SEND, 0);
        REQUIRE(dead > 0 ? sends >= FABRIC_SEND_SLOTS : sends == FABRIC_SEND_SLOTS); /* fabric_sends_renew */
        REQUIRE((fuzz_count(s->read_free, 4096) + fuzz_under_way(f, FABRIC_READ, FABRIC_STREAM)) % FABRIC_READ_SLOTS == 0);
    }
}

FUZZ_QUIET static void fuzz_op(fuzz *f, uint8_t op) {
    int fd;
    switch (op & 15) {
    case 5: f->connects ? fuzz_call(f) : fuzz_message(f); break;
    case 6: f->connects ? fuzz_connection(f) : fuzz_message(f); break;
    case 7:
    case 8: {
        uint8_t which = fuzz_u8(&f->in), error = fuzz_u8(&f->in);
        if (f->operation_count > 0) {
            fuzz_operation *o = &f->operations[f->operation_count - 1 - which % f->operation_count];
            o->length -= o->slot->role == FABRIC_READ && o->error < 0 && (error & 0xf0) == 0xe0; /* a part comes short */
            fuzz_operation_end(f, f->operation_count - 1 - which % f->operation_count, error >= 0xf0 ? error - 0xef : 0);
        }
        break;
    }
    case 9: fuzz_post(f); break;
    case 10: fuzz_recall(f); break;
    case 11: fuzz_redirect(f); break;
    case 12: fuzz_address(f); break;
    case 13: f->clock_ns += (uint64_t)fuzz_u8(&f->in) << 24; break;
    case 14: fuzz_mood(f); break;
    case 15:
        if ((op & 0x40) != 0) {
            fuzz_kill(f, op >> 4 & 3);
        } else if ((op & 0x20) != 0) {
            f->fail_in = fuzz_u8(&f->in);
        } else {
            (void)fabric_transport.arm(f->s, &fd);
        }
        break;
    default:
        fuzz_message(f);
    }
}

FUZZ_QUIET static void fuzz_run(fuzz *f) {
    while (fuzz_left(&f->in) > 0 && !f->s->failed) {
        uint8_t op = fuzz_u8(&f->in);
        fuzz_op(f, op);
        if ((op & 0x10) != 0 || f->s->failed) {
            continue;
        }
        int32_t events = fabric_transport.progress(f->s, -1);
        REQUIRE((events < 0) == f->s->failed);
        for (int32_t i = 0; i < WORLD && !f->s->failed; i++) {
            if (f->ranks[i].is_lost && !f->ranks[i].is_dead) {
                fuzz_kill(f, i);
            }
        }
        if (!f->s->failed) {
            fuzz_sound(f);
        }
    }
}

/* Whatever has happened, all memory and all that libfabric made goes back. */
FUZZ_QUIET static void fuzz_end(fuzz *f) {
    f->fail_in = 0;
    for (int32_t i = 0; i < WORLD && f->s->peers != NULL; i++) {
        fuzz_kill(f, i);
    }
    if (f->s->peers != NULL && f->s->backlog != NULL) {
        fabric_transport.close(f->s);
    } else {
        fabric_free(f->s);
    }
    for (int i = 0; i < LETTERS; i++) {
        REQUIRE(f->letters[i] == NULL);
    }
    for (int i = 0; i < f->event_count; i++) { /* calls that nobody has read */
        REQUIRE(f->events[i].info != NULL);
        fuzz_freeinfo(f->events[i].info);
    }
    REQUIRE(f->live == 0 && f->objects == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static fuzz f;
    memset(&f, 0, sizeof f);
    f.host = (ddl_host){.size = sizeof f.host, .abi = DDL_PLUGIN_ABI, .alloc = fuzz_alloc, .free = fuzz_free, .log = fuzz_log,
                        .setting = fuzz_setting, .now_ns = fuzz_now, .deliver = fuzz_deliver, .land = fuzz_land,
                        .landed = fuzz_landed, .sent = fuzz_sent, .lost = fuzz_lost, .derive = fuzz_derive};
    f.in = (fuzz_input){data, data + size};
    world = &f;
    uint8_t how = fuzz_u8(&f.in);
    f.connects = how & 1;
    f.efa = !f.connects && (how & 2) != 0;
    f.unordered = (how & 4) != 0;
    f.drops = (how & 16) != 0;
    f.own_keys = (how & 128) != 0;
    f.fail_in = fuzz_u8(&f.in);
    f.error = -FI_EAGAIN;
    f.clock_ns = 1000000000;
    if (fuzz_open(&f, how >> 5 & 3, (how & 8) != 0 ? 2 : 1) == DDL_OK) {
        for (int32_t i = 0; i < WORLD - 1; i++) { /* the last comes by fuzz_address */
            uint64_t latency, speed;
            int32_t peer = (f.s->rank + 1 + i) % WORLD;
            REQUIRE(i == WORLD - 2 || fabric_transport.add_peer(f.s, peer, &f.s->address, sizeof f.s->address, "here", &latency,
                                                                &speed) == DDL_OK);
        }
        fuzz_run(&f);
    }
    fuzz_end(&f);
    return 0;
}

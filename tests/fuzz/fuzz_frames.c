/* libFuzzer target: all that arrives at a rank, from the transport's call to the program's memory. Rank 1 of a world of
 * four posts receives, sends, runs collectives of many algorithms, agrees and makes groups, while three peers send
 * whatever the input says: whole, in pieces, damaged, of other collectives, and while they die, memory fails and time
 * passes. fuzz_world.h is the world.
 *
 * Input: one operation after the other: a byte that names it and its fields, see the functions. Operations of the
 * transport (below OP_API) happen inside calls that wait as well; such a call ends at its deadline when the next
 * operation is one of the program's. corpus/frames has recordings of honest worlds: see record_frames.c.
 * campaign: machine max_len=4096 */
#include "fuzz_world.h"

enum {
    OP_DELIVER, OP_FRAME, OP_PIECE, OP_LOSE, OP_SENT, OP_TIME, OP_BORROW, OP_NOMEM, OP_API,
    OP_RECV = OP_API, OP_SEND, OP_COLL, OP_MANY, OP_TEST, OP_CANCEL, OP_WAIT, OP_BLOCK, OP_GROUP, OP_ASK, OP_SET,
    OP_ABORT, OP_COUNT
};

static uint8_t fuzz_payload[PAYLOAD_MAX];
static uint64_t fuzz_budget; /* payload bytes that one input may move */

/* >>what arrives */

/* So many bytes of what is landing come next, out of the input; 0: all the rest, of no matter what. */
static void op_piece(fuzz *f, int32_t peer, uint64_t bytes) {
    fuzz_peer *p = &f->peers[peer];
    if (f->stream != NULL) {
        f->stream->pump(f, peer, bytes);
        return;
    }
    if (p->cut) {
        fuzz_lose(f, peer, ENOBUFS);
    }
    if (p->token == NULL) {
        return;
    }
    size_t here = DDL__MIN(bytes, p->left);
    bytes = here == 0 ? p->left : here;
    const uint8_t *from = fuzz_take(&f->in, &here);
    memset(p->landing, 0x3f, bytes);
    if (here > 0) {
        memcpy(p->landing, from, here);
    }
    p->landing += bytes;
    p->landed += bytes;
    p->left -= bytes;
    if (p->left == 0) {
        fuzz_landing_end(f, peer, DDL_OK);
    }
}

/* One frame as the transport hands it on: way 0 whole, 1 in two pieces, 2 its beginning only. The link ends when the
 * core says so. */
static void fuzz_arrive(fuzz *f, int32_t peer, const uint8_t *header, size_t bytes, int way) {
    fuzz_peer *p = &f->peers[peer];
    uint64_t payload = 0;
    const uint8_t *from = fuzz_payload + PAYLOAD_MAX - bytes; /* it ends where the array does */
    if (f->stream != NULL) {
        f->stream->arrive(f, peer, header, from, bytes, way);
        return;
    }
    ddl_status status = f->host->measure(f->host, peer, header, &payload);
    if (status == DDL_OK && (payload != bytes || payload == 0 || way == 0)) {
        status = f->host->deliver(f->host, peer, header, from, bytes);
        REQUIRE(status == DDL_ERR_CORRUPT || payload == bytes);
    } else if (status == DDL_OK) {
        void *landing = NULL, *token = NULL;
        status = f->host->land(f->host, peer, header, &payload, &landing, &token);
        if (status == DDL_OK) {
            REQUIRE(payload == bytes && landing != NULL);
            *p = (fuzz_peer){p->first, p->last, token, landing, 0, payload, p->down, false};
            uint64_t first = way == 1 ? payload / 2 : payload / 4;
            if (first > 0) {
                memcpy(landing, from, first);
                p->landing += first;
                p->landed = first;
                p->left -= first;
            }
            if (way == 1) {
                op_piece(f, peer, 0);
            }
        }
    }
    if (status < 0) {
        fuzz_lose(f, peer, EBADMSG);
    }
}

/* Signature of our own collective of that number, so that a frame can be one of it. */
static uint64_t own_signature(const ddl_group *g, uint32_t sequence) {
    const ddl__op *op = g != NULL ? ddl__op_find(g, sequence) : NULL;
    return op != NULL ? op->call.signature : 0x5151;
}

static ddl_group *group_of(fuzz *f, unsigned index) {
    ddl_group *g = f->groups[index % GROUPS];
    return g != NULL ? g : f->groups[0];
}

/* A payload of the input, or of a pattern; the number of bytes. */
static size_t take_payload(fuzz *f, size_t bytes, bool pattern) {
    bytes = DDL__MIN(bytes, (size_t)DDL__MIN(fuzz_budget, (uint64_t)PAYLOAD_MAX));
    fuzz_budget -= bytes;
    uint8_t *at = fuzz_payload + PAYLOAD_MAX - bytes;
    memset(at, 1, bytes);
    if (!pattern) {
        size_t here = bytes;
        const uint8_t *from = fuzz_take(&f->in, &here);
        if (here > 0) {
            memcpy(at, from, here);
        }
    }
    return bytes;
}

static int32_t peer_of(const fuzz *f, unsigned index) {
    int32_t peer = (int32_t)(index % (WORLD - 1));
    return peer + (peer >= f->rank);
}

/* A stream brings one frame after the other: what is landing ends first. */
static bool stream_ready(fuzz *f, int32_t peer) {
    if (f->stream == NULL) {
        op_piece(f, peer, 0);
    }
    return !f->peers[peer].down;
}

/* A frame that mostly fits: how u8, type u8, flags u8, group u8, sequence i8, slot u8, bytes u16, payload. */
static void op_frame(fuzz *f) {
    uint8_t how = fuzz_u8(&f->in), header[DDL__FRAME_BYTES];
    int32_t peer = peer_of(f, how & 3);
    ddl__frame frame = {.type = (uint8_t)(fuzz_u8(&f->in) % (DDL__FRAME_TYPE_MAX + 1))};
    frame.flags = fuzz_u8(&f->in);
    uint8_t group = fuzz_u8(&f->in);
    const ddl_group *g = group_of(f, group & 7);
    int8_t ahead = (int8_t)fuzz_u8(&f->in);
    uint8_t slot = fuzz_u8(&f->in);
    size_t bytes = fuzz_int(&f->in, 2);
    if (!stream_ready(f, peer)) {
        return;
    }
    bytes = take_payload(f, (group & 64) != 0 ? bytes << 4 : bytes, (how & 64) != 0);
    frame.bytes = (uint32_t)bytes;
    frame.source = (uint32_t)peer;
    frame.group = g->id;
    frame.epoch = g->epoch + (group >> 7);
    uint32_t sequence = frame.type == DDL__FRAME_AGREE ? g->agree_sequence : g->sequence;
    frame.sequence = frame.type == DDL__FRAME_AGREE ? sequence + (uint32_t)ahead
                     : frame.type == DDL__FRAME_COLL ? (uint64_t)(sequence + (uint32_t)ahead) << 32 | slot
                     : frame.type == DDL__FRAME_DATA ? (uint64_t)(uint32_t)ahead << 32 | slot
                                                     : (uint64_t)slot << 32 | (uint32_t)ahead;
    frame.signature = frame.type == DDL__FRAME_COLL ? own_signature(g, (uint32_t)(frame.sequence >> 32)) + (how >> 7)
                                                    : bytes;
    if ((how & 32) != 0) {
        frame.flags |= DDL__FRAME_FLAG_CRC;
        frame.payload_crc = ddl__crc32c(0, fuzz_payload + PAYLOAD_MAX - bytes, bytes) + (how >> 7);
    }
    ddl__frame_write(header, &frame);
    fuzz_arrive(f, peer, header, bytes, (how >> 2 & 3) % 3);
}

/* Any header: how u8, bytes u16, type u8, flags u16, group u32, epoch u32, sequence u64, signature u64, payload. This
 * is what recordings are made of. Bit 7 of how: damage at one byte. */
static void op_deliver(fuzz *f) {
    uint8_t how = fuzz_u8(&f->in), header[DDL__FRAME_BYTES];
    int32_t peer = peer_of(f, how & 3);
    size_t bytes = fuzz_int(&f->in, 2);
    ddl__frame frame = {.type = fuzz_u8(&f->in), .source = (uint32_t)peer};
    frame.flags = (uint16_t)fuzz_int(&f->in, 2);
    frame.group = (uint32_t)fuzz_int(&f->in, 4);
    frame.epoch = (uint32_t)fuzz_int(&f->in, 4);
    frame.sequence = fuzz_int(&f->in, 8);
    frame.signature = fuzz_int(&f->in, 8);
    bytes = take_payload(f, (how & 32) != 0 ? bytes << 4 : bytes, (how & 64) != 0);
    frame.bytes = (uint32_t)bytes;
    ddl__frame_write(header, &frame);
    if ((how & 128) != 0) {
        uint8_t at = fuzz_u8(&f->in);
        header[at % DDL__FRAME_BYTES] ^= (uint8_t)(at / DDL__FRAME_BYTES + 1);
        ddl__store_le32(header + 44, ddl__load_le32(header + 44) ^ (at & 1 ? 0 : 1));
    }
    if (stream_ready(f, peer)) {
        fuzz_arrive(f, peer, header, bytes, (how >> 2 & 3) % 3);
    }
}

static void op_time(fuzz *f) {
    fuzz_clock_ns += (uint64_t)fuzz_u8(&f->in) * 10 * DDL__NS_PER_MS;
    f->idle = f->blocking ? 64 : 0; /* polls until a wait looks at the clock */
}

static void op_sent(fuzz *f) {
    uint8_t what = fuzz_u8(&f->in);
    int32_t peer = peer_of(f, what & 3);
    for (int i = 0; i < 1 + (what >> 4) && f->peers[peer].first != NULL; i++) {
        fuzz_sent(f, peer, (what & 8) != 0 ? DDL_ERR_PEER : DDL_OK);
    }
}

static void fuzz_transport_op(fuzz *f, uint8_t op) {
    static const int32_t errors[] = {0, ECONNRESET, ETIMEDOUT, EBADMSG};
    uint8_t b;
    switch (op) {
    case OP_DELIVER:
        op_deliver(f);
        break;
    case OP_FRAME:
        op_frame(f);
        break;
    case OP_PIECE:
        b = fuzz_u8(&f->in);
        op_piece(f, peer_of(f, b & 3), b >> 2);
        break;
    case OP_LOSE:
        b = fuzz_u8(&f->in);
        fuzz_lose(f, peer_of(f, b & 3), errors[b >> 2 & 3]);
        break;
    case OP_SENT:
        op_sent(f);
        break;
    case OP_TIME:
        op_time(f);
        break;
    case OP_BORROW:
        f->borrow = fuzz_u8(&f->in) & 3;
        break;
    default:
        f->fail_in = fuzz_u8(&f->in) & 31;
        break;
    }
}

/* Inside a call that waits: the next operation, when it is the transport's. */
static int fuzz_step(fuzz *f) {
    if (fuzz_left(&f->in) == 0 || *f->in.at % OP_COUNT >= OP_API) {
        return 0;
    }
    fuzz_transport_op(f, fuzz_u8(&f->in) % OP_COUNT);
    return 1;
}

/* >>what the program does */

static fuzz_slot *free_slot(fuzz *f) {
    for (int i = 0; i < SLOTS; i++) {
        if (f->slots[i].request == NULL && f->slots[i].memory[0] == NULL) {
            return &f->slots[i];
        }
    }
    return NULL;
}

/* The memory goes at once: who writes into it later is caught. */
static void settle(fuzz_slot *s) {
    if (s->request == NULL) {
        free(s->memory[0]);
        free(s->memory[1]);
        s->memory[0] = s->memory[1] = NULL;
    }
}

static ddl_tensor tensor_of(void **memory, ddl_dtype dtype, int64_t count) {
    size_t bytes = (size_t)count * ddl_dtype_bytes(dtype);
    *memory = calloc(1, bytes + 1);
    return ddl_tensor_1d(*memory, dtype, count);
}

/* A message: group u8, peer u8, tag u8, dtype u8, count u16. */
static void op_message(fuzz *f, bool send) {
    fuzz_slot *s = free_slot(f);
    ddl_group *g = group_of(f, fuzz_u8(&f->in));
    int32_t peer = fuzz_u8(&f->in) % 6 - 1, tag = fuzz_u8(&f->in) % 4 - 1;
    ddl_dtype dtype = (ddl_dtype)(fuzz_u8(&f->in) % (DDL_E5M2 + 1));
    int64_t count = (int64_t)fuzz_int(&f->in, 2) & 0x3fff;
    peer = peer == -1 ? DDL_ANY_SOURCE : peer == 4 ? DDL_NO_RANK : peer;
    if (s == NULL) {
        return;
    }
    ddl_tensor t = tensor_of(&s->memory[0], dtype, count);
    if (send) {
        (void)ddl_isend(g, t, peer, tag, &s->request);
    } else {
        (void)ddl_irecv(g, t, peer, tag < 0 ? DDL_ANY_TAG : tag, &s->request);
    }
    settle(s);
}

static const char *some_algorithm(uint8_t which) {
    return which == 0 ? "auto" : ddl__algos[which % DDL__COUNT_OF(ddl__algos)].name;
}

/* Fills a collective for `count` elements of each rank. counts has room for the group. */
static void collective_of(fuzz_slot *s, ddl_group *g, ddl_collective *d, ddl_dtype dtype, int64_t count,
                          int64_t *counts, bool in_place) {
    ddl_kind base = ddl__kind_base(d->kind);
    bool v = ddl__kind_is_v(d->kind);
    int64_t own = count, all = 0;
    for (int32_t i = 0; i < g->size; i++) {
        counts[i] = d->kind == DDL_ALL_TO_ALLV ? count % 7 : v ? (count + i) % 7 : count;
        all += counts[i];
    }
    own = v ? counts[g->rank] : count;
    bool many_in = base == DDL_SCATTER || base == DDL_REDUCE_SCATTER || base == DDL_ALL_TO_ALL;
    bool many_out = base == DDL_GATHER || base == DDL_ALL_GATHER || base == DDL_ALL_TO_ALL;
    d->in = tensor_of(&s->memory[0], dtype, many_in ? all : own);
    d->out = tensor_of(&s->memory[1], dtype, many_out ? all : own);
    if (in_place && many_in == many_out) {
        d->out = d->in;
    }
    d->counts = d->recv_counts = v ? counts : NULL;
}

/* A collective: group u8, kind u8, dtype u8, op u8, root u8, count u16, how u8 (in place, persistent, algorithm). */
static void op_coll(fuzz *f) {
    fuzz_slot *s = free_slot(f);
    ddl_group *g = group_of(f, fuzz_u8(&f->in));
    ddl_collective d = {.kind = (ddl_kind)(fuzz_u8(&f->in) % (DDL_ALL_TO_ALLV + 1))};
    ddl_dtype dtype = (ddl_dtype)(fuzz_u8(&f->in) % (DDL_E5M2 + 1));
    uint8_t op = fuzz_u8(&f->in) % (DDL_MAX_INDEX + 3);
    d.op = op <= DDL_MAX_INDEX ? op : f->ops[op - DDL_MAX_INDEX - 1];
    d.root = fuzz_u8(&f->in) % (WORLD + 1);
    int64_t count = (int64_t)fuzz_int(&f->in, 2) & 0x1fff, counts[WORLD];
    uint8_t how = fuzz_u8(&f->in);
    if (s == NULL || g->size > WORLD) {
        return;
    }
    ddl_group_options options = {.algorithm = some_algorithm(how >> 2)};
    if (how >> 2 != 0) {
        (void)ddl_group_set(g, &options);
    }
    collective_of(s, g, &d, dtype, count, counts, (how & 1) != 0);
    if ((how & 2) != 0) {
        if (ddl_collective_init(g, &d, &s->request) == DDL_OK && ddl_start(s->request) != DDL_OK) {
            (void)ddl_request_free(&s->request);
        }
    } else {
        ddl__blocks blocks = ddl__blocks_of(&d);
        ddl__asked ask = ddl__asked_of(&d, &blocks);
        (void)ddl__coll_icall(g, &ask, "fuzz", &s->request);
    }
    settle(s);
}

/* all_reduce_many of two tensors: group u8, op u8, counts u8 u8. */
static void op_many(fuzz *f) {
    fuzz_slot *s = free_slot(f);
    ddl_group *g = group_of(f, fuzz_u8(&f->in));
    ddl_op op = fuzz_u8(&f->in) % (DDL_MAX_INDEX + 1);
    uint8_t first = fuzz_u8(&f->in), second = fuzz_u8(&f->in);
    if (s == NULL) {
        return;
    }
    ddl_tensor both[2] = {tensor_of(&s->memory[0], DDL_F32, first), tensor_of(&s->memory[1], DDL_I64, second)};
    (void)ddl_iall_reduce_many(g, both, 2, op, &s->request);
    settle(s);
}

static void test_all(fuzz *f) {
    for (int i = 0; i < SLOTS; i++) {
        fuzz_slot *s = &f->slots[i];
        if (s->request == NULL) {
            continue;
        }
        bool persistent = s->request->persistent;
        ddl_status status = ddl_test(&s->request, NULL);
        if (persistent && status != DDL_IN_PROGRESS) {
            status = ddl_start(s->request);
            if (status != DDL_OK) {
                (void)ddl_request_free(&s->request);
            }
        }
        settle(s);
    }
}

static void wait_one(fuzz *f, fuzz_slot *s) {
    f->blocking = true;
    if (s->request != NULL) {
        (void)ddl_wait(&s->request, NULL);
        (void)ddl_request_free(&s->request);
    }
    f->blocking = false;
    settle(s);
}

static void keep_group(fuzz *f, ddl_group *made) {
    for (int i = 2; i < GROUPS && made != NULL; i++) {
        if (f->groups[i] == NULL) {
            f->groups[i] = made;
            return;
        }
    }
    REQUIRE(ddl_group_free(&made) == DDL_OK);
}

/* A call that waits: what u8, group u8, argument u8. */
static void op_block(fuzz *f) {
    static const int32_t two[] = {2, 1}, members[] = {0, 1, 3};
    uint8_t what = fuzz_u8(&f->in);
    ddl_group *g = group_of(f, fuzz_u8(&f->in)), *made = NULL;
    uint8_t b = fuzz_u8(&f->in);
    double value[64] = {0};
    ddl_tensor t = ddl_tensor_1d(value, DDL_F64, b & 63);
    int32_t flag = b;
    f->blocking = true;
    switch (what % 8) {
    case 0:
        (void)ddl_barrier(g);
        break;
    case 1:
        (void)ddl_agree(g, &flag);
        break;
    case 2:
        REQUIRE((ddl_group_shrink(g, &made) == DDL_OK) == (made != NULL));
        break;
    case 3:
        REQUIRE((ddl_group_create(g, (b & 1) != 0 ? two : members, (b & 1) != 0 ? 2 : 3, "made", &made) == DDL_OK) ==
                (made != NULL));
        break;
    case 4:
        (void)ddl_group_split(g, b & 1, b >> 1, &made);
        break;
    case 5:
        (void)ddl_probe(g, b % 5 - 1, b >> 6, NULL);
        break;
    case 6:
        (void)ddl_recv(g, t, b % 4, 0, NULL);
        break;
    default:
        (void)ddl_all_reduce(g, t, t, DDL_SUM);
        break;
    }
    f->blocking = false;
    if (made != NULL) {
        keep_group(f, made);
    }
}

/* Questions, which change nothing. */
static void op_ask(fuzz *f) {
    char text[600];
    ddl_stats stats;
    ddl_info info;
    uint8_t b = fuzz_u8(&f->in);
    (void)ddl_iprobe(group_of(f, b), b % 5 - 1, (b >> 4) - 1, &info);
    (void)ddl_flight_record(f->c, text, sizeof text);
    REQUIRE(ddl_stats_get(f->c, &stats) == DDL_OK);
    REQUIRE(ddl_progress(f->c) == DDL_OK);
    fuzz_clean(ddl_error(f->c), DDL__SENTENCE_BYTES);
}

static void op_set(fuzz *f) {
    uint8_t b = fuzz_u8(&f->in);
    ddl_group_options options = {.timeout_ms = 1 + (b & 15) * 100, .stall_ms = (b & 16) != 0 ? -1 : 200,
                                 .deterministic = (b & 32) != 0 ? 1 : -1};
    (void)ddl_group_set(group_of(f, b >> 6), &options);
}

static void fuzz_api_op(fuzz *f, uint8_t op) {
    uint8_t b;
    switch (op) {
    case OP_RECV:
    case OP_SEND:
        op_message(f, op == OP_SEND);
        break;
    case OP_COLL:
        op_coll(f);
        break;
    case OP_MANY:
        op_many(f);
        break;
    case OP_TEST:
        test_all(f);
        break;
    case OP_CANCEL:
        b = fuzz_u8(&f->in);
        (void)ddl_cancel(f->slots[b % SLOTS].request);
        (void)ddl_request_free(&f->slots[b % SLOTS].request);
        settle(&f->slots[b % SLOTS]);
        break;
    case OP_WAIT:
        wait_one(f, &f->slots[fuzz_u8(&f->in) % SLOTS]);
        break;
    case OP_BLOCK:
        op_block(f);
        break;
    case OP_GROUP:
        (void)ddl_group_free(&f->groups[1 + fuzz_u8(&f->in) % (GROUPS - 1)]);
        break;
    case OP_ASK:
        op_ask(f);
        break;
    case OP_SET:
        op_set(f);
        break;
    default:
        (void)ddl_abort(f->c, "fuzz");
        break;
    }
}

static void fuzz_script(fuzz *f) {
    for (int i = 0; i < 200 && fuzz_left(&f->in) > 0; i++) {
        uint8_t op = fuzz_u8(&f->in) % OP_COUNT;
        if (op < OP_API) {
            fuzz_transport_op(f, op);
        } else {
            fuzz_api_op(f, op);
        }
    }
}

static void fuzz_one(const uint8_t *data, size_t size, const fuzz_stream *stream) {
    static fuzz f;
    memset(&f, 0, sizeof f);
    f.in = (fuzz_input){data, data + size};
    f.step = fuzz_step;
    f.stream = stream;
    fuzz_clock_ns = 1000 * DDL__NS_PER_S;
    fuzz_budget = PAYLOAD_MAX;
    fuzz_world_make(&f, 1);
    fuzz_script(&f);
    fuzz_sound(&f);
    fuzz_world_end(&f);
}

#ifndef FUZZ_NO_MAIN /* other targets include this one */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_one(data, size, NULL);
    return 0;
}
#endif

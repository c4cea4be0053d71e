/* What ddl itself sends beside the data of its callers: one form on all machines, and no size that breaks anything.
 * tests/run: variants=asan timeout=30 */
#define DDL_IMPLEMENTATION
#include "test.h"

#include "ddl.h"

TEST(the_making_of_a_group_is_little_endian) {
    static const uint8_t wire[DDL__FORMATION_BYTES] = {8,    7,    6,    5,    4, 3, 2, 1, 0x0c, 0x0b, 0x0a, 0x09,
                                                       0xfe, 0xff, 0xff, 0xff, 1, 0, 0, 0};
    ddl__formation f = {.fingerprint = 0x0102030405060708, .id = 0x090a0b0c, .verdict = DDL_ERR_NOMEM, .native = 1};
    uint8_t out[DDL__FORMATION_BYTES];
    ddl__formation_write(&f, out);
    CHECK_EQ(memcmp(out, wire, sizeof wire), 0);
    ddl__formation back = ddl__formation_read(wire);
    CHECK_EQ(back.fingerprint, f.fingerprint);
    CHECK_EQ(back.id, f.id);
    CHECK_EQ(back.verdict, f.verdict);
    CHECK_EQ(back.native, f.native);
}

TEST(what_a_rank_tells_about_itself_is_little_endian) {
    static const uint8_t head[44] = {4,    3,    2,    1,    0x0a, 9,    8,    7,    5,    0,    0,    0,    6, 0,
                                     0,    0,    0xff, 0xff, 0xff, 0xff, 1,    0,    0,    0,    2,    0,    0,    0,
                                     0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11, 0x28, 0x27, 0x26, 0x25, 0x24, 0x23,
                                     0x22, 0x21};
    static uint8_t wire[DDL__BLOB_BYTES + 1], again[DDL__BLOB_BYTES];
    static ddl__blob b, back;
    b = (ddl__blob){.magic = 0x01020304, .version = 0x0708090a, .pid = 5, .cores = 6, .board_fd = -1,
                    .abilities = 1, .guard = 2, .pid_start = 0x1112131415161718, .pid_space = 0x2122232425262728,
                    .core_set = 0x3132333435363738, .host_id = "id", .host_name = "name", .pass_name = {7, 8}, .nonce = {9}};
    for (int32_t i = 0; i < DDL__BLOB_TRANSPORTS; i++) {
        snprintf(b.transports[i].name, DDL__NAME_BYTES, "t%d", (int)i);
        b.transports[i].bytes = 0x100u + (uint32_t)i;
        memset(b.transports[i].address, 0x30 + i, DDL__ADDRESS_BYTES);
    }
    wire[DDL__BLOB_BYTES] = 0x77;
    ddl__blob_write(&b, wire);
    CHECK_EQ(memcmp(wire, head, sizeof head), 0);
    const uint8_t *last = wire + DDL__BLOB_BYTES - 8 - DDL__BLOB_TRANSPORT_BYTES;
    CHECK(last[0] == 't' && last[1] == '3' && last[DDL__NAME_BYTES] == 3 && last[DDL__NAME_BYTES + 1] == 1);
    CHECK(wire[DDL__BLOB_BYTES - 9] == 0x33 && wire[DDL__BLOB_BYTES - 8] == 0x38 && wire[DDL__BLOB_BYTES - 1] == 0x31);
    CHECK(wire[DDL__BLOB_BYTES] == 0x77);
    ddl__blob_read(wire, &back);
    CHECK_EQ(back.magic, b.magic);
    CHECK_EQ(back.board_fd, -1);
    CHECK_EQ(back.pid_start, b.pid_start);
    CHECK_EQ(back.pid_space, b.pid_space);
    CHECK_EQ(back.core_set, b.core_set);
    ddl__blob_write(&back, again);
    CHECK_EQ(memcmp(wire, again, DDL__BLOB_BYTES), 0);
}

TEST(measured_figures_are_little_endian) {
    static const uint8_t wire[16] = {0, 0, 0, 0, 0, 0, 0xf8, 0x3f, 0, 0, 0, 0, 0, 0, 0, 0xc0}; /* 1.5 and -2 */
    double figures[2] = {1.5, -2}, back[2] = {0, 0};
    uint8_t out[16];
    ddl__figures_write(figures, 2, out);
    CHECK_EQ(memcmp(out, wire, sizeof wire), 0);
    ddl__figures_read(wire, 2, back);
    CHECK_EQ(back[0], 1.5);
    CHECK_EQ(back[1], -2.0);
}

/* One rank that sends into a queue: a transport that lends the memory, and gives it back later. */
enum { RANKS = 4, QUEUE = 16 };

typedef struct wire {
    ddl_context context;
    ddl__groups groups;
    ddl__link links[RANKS];
    ddl__endpoint endpoint;
    ddl_message *lent[QUEUE];
    int lent_count;
} wire;

static ddl_status lend(void *self, int32_t peer, ddl_message *m) {
    wire *w = (wire *)self;
    (void)peer;
    if (w->lent_count == QUEUE) {
        test__fail(__FILE__, __LINE__, "more than %d messages", QUEUE);
        return DDL_OK;
    }
    w->lent[w->lent_count++] = m;
    return DDL_IN_PROGRESS;
}

static const ddl_transport lending = {.size = sizeof(ddl_transport), .send = lend};

static void give_back(wire *w) {
    for (int i = 0; i < w->lent_count; i++) {
        ddl__outgoing *out = (ddl__outgoing *)w->lent[i];
        out->done(&w->context, out, DDL_OK);
    }
    w->lent_count = 0;
}

static ddl_group *wire_open(wire *w) {
    static const int32_t ranks[RANKS] = {0, 1, 2, 3};
    memset(w, 0, sizeof *w);
    w->context.world_size = RANKS;
    w->context.base.rank = -1;
    w->context.base.log_level = DDL_LOG_NONE;
    w->context.wake_fd = w->context.epoll_fd = -1;
    w->context.groups = &w->groups;
    w->context.links = w->links;
    w->endpoint.table = &lending;
    w->endpoint.self = w;
    for (int i = 0; i < RANKS; i++) {
        w->links[i].endpoint = i == 0 ? NULL : &w->endpoint;
        w->links[i].connected = i != 0;
    }
    return ddl__group_new(&w->context, ranks, RANKS, 0, 0, "world");
}

static void wire_close(wire *w, ddl_group *g) {
    ddl__group_release(g);
    ddl__free(&w->context.base, g);
    while (w->context.notes != NULL) {
        ddl__note *note = w->context.notes;
        w->context.notes = note->next;
        ddl__free(&w->context.base, note);
    }
    CHECK_EQ(w->context.base.memory, 0);
}

/* Control messages of every size up to a frame go out whole; longer ones are refused. Nothing is kept of large ones. */
TEST(control_messages_of_any_size) {
    static const size_t sizes[] = {0, 1, DDL__NOTE_BYTES, DDL__NOTE_BYTES + 1, 40000, DDL__FRAME_MAX_PAYLOAD};
    static uint8_t payload[DDL__FRAME_MAX_PAYLOAD + 1];
    wire w;
    ddl_group *g = wire_open(&w);
    for (size_t i = 0; i < sizeof payload; i++) {
        payload[i] = (uint8_t)(i * 7 + (i >> 8));
    }
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        ddl__frame f = {.type = DDL__FRAME_AGREE};
        CHECK_EQ((int)ddl__tell(&w.context, 1, f, payload, sizes[i]), (int)DDL_OK);
        REQUIRE(w.lent_count == 1);
        CHECK_EQ(w.lent[0]->payload_bytes, sizes[i]);
        CHECK(sizes[i] == 0 || memcmp(w.lent[0]->payload, payload, sizes[i]) == 0);
        give_back(&w);
    }
    uint64_t held = w.context.base.memory;
    CHECK_EQ((int)ddl__tell(&w.context, 1, (ddl__frame){.type = DDL__FRAME_AGREE}, payload, sizeof payload),
             (int)DDL_ERR_NOMEM);
    CHECK_EQ(w.lent_count, 0);
    CHECK_EQ(w.context.base.memory, held);
    CHECK(held < 200 * 1024); /* the group and one small note */
    wire_close(&w, g);
}

/* Bad news with more behind it than this version knows (a later one may add to it) is passed on as it came. */
TEST(bad_news_longer_than_a_note_is_passed_on_whole) {
    static uint8_t payload[5000];
    wire w;
    ddl_group *g = wire_open(&w);
    ddl__writer out = ddl__writer_of(payload, sizeof payload);
    ddl__put_u32(&out, (uint32_t)-DDL_ERR_TIMEOUT);
    ddl__put_string(&out, "rank 1 gave up");
    payload[sizeof payload - 1] = 0x5a;
    ddl__frame f = {.type = DDL__FRAME_MISMATCH, .bytes = sizeof payload};
    CHECK_EQ((int)ddl__on_mismatch(&w.context, 1, &f, payload), (int)DDL_OK);
    CHECK_EQ((int)g->broken, (int)DDL_ERR_TIMEOUT);
    CHECK_EQ(w.lent_count, 2); /* ranks 2 and 3 */
    for (int i = 0; i < w.lent_count; i++) {
        CHECK_EQ(w.lent[i]->payload_bytes, sizeof payload);
        CHECK_EQ(memcmp(w.lent[i]->payload, payload, sizeof payload), 0);
    }
    give_back(&w);
    wire_close(&w, g);
}

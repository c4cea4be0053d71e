/* libFuzzer target: what each rank told about itself at the rendezvous, as a rank of four makes links of it.
 * Input: bits 0-1 of byte 0: which rank this is; then changes of an honest table: whose line in bits 0-1 and
 * which member of it above, where in that, how many bytes, the bytes.
 * campaign: parser max_len=256 */
#include "fuzz.h"

/* Only the room that makes links is worth inputs of its own; addresses are fuzz_tcp_address. */
#pragma clang attribute push(__attribute__((no_sanitize("coverage"))), apply_to = function)
#include "src/dtype/reduce.h"
#include "src/coll/agree.h"
#include "src/coll/measure.h"
#pragma clang attribute pop
#include "src/coll/join.h"

enum { WORLD = 4 };

static uint8_t honest[WORLD][DDL__BLOB_BYTES], room[2 * sizeof honest], *wire;
static ddl__blob table[WORLD];
static ddl_context context;
static ddl__link links[WORLD];
static ddl__reach offers[WORLD * DDL__ENDPOINTS_MAX];
static ddl__tcp tcp;
static ddl__tcp_peer peers[WORLD];

/* A transport that reaches whoever has an address of eight bytes. */
FUZZ_QUIET static ddl_status fuzz_add_peer(void *self, int32_t peer, const void *address, size_t bytes,
                                           const char *host_id, uint64_t *out_latency_ns, uint64_t *out_bytes_per_s) {
    uint64_t speed;
    (void)self;
    REQUIRE(peer >= 0 && peer < WORLD && peer != context.rank && memchr(host_id, 0, sizeof table->host_id) != NULL);
    REQUIRE(bytes > 0 && bytes <= DDL__ADDRESS_BYTES);
    if (bytes != sizeof speed) {
        return DDL_ERR_UNSUPPORTED;
    }
    memcpy(&speed, address, sizeof speed);
    *out_latency_ns = speed & 0xffff;
    *out_bytes_per_s = speed >> 16;
    return DDL_OK;
}

static const ddl_transport fuzz_transport = {.size = sizeof(ddl_transport), .add_peer = fuzz_add_peer};
static const ddl_plugin fuzz_plugin = {.size = sizeof(ddl_plugin), .abi = DDL_PLUGIN_ABI, .name = "fuzz",
                                       .transport = &fuzz_transport};

/* Two hosts of two ranks; all have TCP, the last two another transport besides. */
FUZZ_QUIET static void fuzz_honest(void) {
    for (int32_t i = 0; i < WORLD; i++) {
        ddl__blob *b = &table[i];
        struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(4000), .sin_addr = {htonl(0x0a000001)}};
        uint64_t speed = 1000000u << 16 | 900;
        *b = (ddl__blob){.magic = DDL__BLOB_MAGIC, .version = ddl_version(), .pid = 100 + i, .cores = 2, .board_fd = -1};
        snprintf(b->host_id, sizeof b->host_id, "boot/%d", i / 2);
        snprintf(b->host_name, sizeof b->host_name, "node%d", i / 2);
        memcpy(b->transports[0].name, "tcp", 4);
        b->transports[0].bytes = sizeof at + 2;
        b->transports[0].address[0] = sizeof at;
        memcpy(b->transports[0].address + 1, &at, sizeof at);
        if (i >= 2) {
            memcpy(b->transports[1].name, "fuzz", 5);
            b->transports[1].bytes = sizeof speed;
            memcpy(b->transports[1].address, &speed, sizeof speed);
        }
        ddl__blob_write(b, honest[i]);
    }
    wire = room + sizeof room - sizeof honest; /* ends where the array does */
    context.world_size = WORLD;
    context.links = links;
    context.endpoints[0] = (ddl__endpoint){.plugin = &ddl__tcp_plugin, .table = &ddl__tcp_transport, .self = &tcp};
    context.endpoints[1] = (ddl__endpoint){.plugin = &fuzz_plugin, .table = &fuzz_transport};
    context.endpoint_count = 2;
    tcp.peers = peers;
    pthread_mutex_init(&context.error_lock, NULL);
}

FUZZ_QUIET static void fuzz_change(fuzz_input *in) {
    enum { AT = DDL__BLOB_AT_TRANSPORTS, EACH = DDL__BLOB_TRANSPORT_BYTES };
    static const size_t members[] = {0, 4, 8, 12, 16, 24, DDL__BLOB_AT_HOST, DDL__BLOB_AT_HOST + 64,
                                     AT, AT + EACH, AT + 2 * EACH, AT + 3 * EACH, 28};
    uint8_t which = fuzz_u8(in);
    size_t at = members[(which >> 2) % DDL__COUNT_OF(members)] + fuzz_u8(in), n = fuzz_u8(in);
    const uint8_t *bytes = fuzz_take(in, &n);
    size_t room_left = at < DDL__BLOB_BYTES ? DDL__BLOB_BYTES - at : 0;
    if (n > 0 && room_left > 0) {
        memcpy(wire + (which & 3) * DDL__BLOB_BYTES + at, bytes, DDL__MIN(n, room_left));
    }
}

FUZZ_QUIET static void fuzz_sound(void) {
    int32_t here = 0, sharing = 0;
    REQUIRE(context.host_count >= 1 && context.host_count <= WORLD);
    for (int32_t i = 0; i < WORLD; i++) {
        const ddl__link *l = &links[i];
        fuzz_clean(l->host_id, sizeof l->host_id);
        fuzz_clean(l->host_name, sizeof l->host_name);
        REQUIRE(l->host >= 0 && l->host < context.host_count && (l->endpoint != NULL) == (i != context.rank));
        REQUIRE(l->same_host == (strcmp(table[i].host_id, table[context.rank].host_id) == 0));
        here += l->same_host;
        sharing += l->same_host && table[i].core_set == table[context.rank].core_set;
    }
    REQUIRE(here == context.local_ranks && here >= 1 && sharing == context.core_ranks);
    int32_t crowding;
    REQUIRE(ddl__crowding(&context, table, &crowding) == DDL_OK);
    REQUIRE(crowding >= 1 && crowding <= WORLD);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = {data, data + size};
    if (wire == NULL) {
        fuzz_honest();
    }
    memcpy(wire, honest, sizeof honest);
    memset(links, 0, sizeof links);
    context.rank = fuzz_u8(&in) & 3;
    context.host_count = context.local_ranks = context.core_ranks = 0;
    context.error.text[0] = 0;
    tcp.params.host_id = context.rank < 2 ? "boot/0" : "boot/1";
    while (fuzz_left(&in) > 3) {
        fuzz_change(&in);
    }
    for (int32_t i = 0; i < WORLD; i++) {
        ddl__blob_read(wire + i * DDL__BLOB_BYTES, &table[i]);
    }
    ddl_status status = ddl__links_read(&context, table, offers);
    for (int32_t i = 0; i < WORLD && status == DDL_OK; i++) {
        status = i == context.rank ? DDL_OK : ddl__link_choose(&context, i, &table[i], offers + i * DDL__ENDPOINTS_MAX);
    }
    if (status == DDL_OK) {
        fuzz_sound();
    } else {
        fuzz_clean(context.error.text, sizeof context.error.text);
        REQUIRE(status < 0 && context.error.text[0] != 0);
    }
    return 0;
}

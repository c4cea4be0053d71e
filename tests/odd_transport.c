/* odd_transport: the template with one fault, which DDL_TEST_ODD_FAULT names. For tests/test_selftest.c, in a world of two
 * only, the self-test's, so that a job of three over it works; and for tests/test_mac.c, in a job, somebody on the way
 * who changes messages of 1000 bytes and mends their checksums. */
#include "../plugins/template/template.c"

static char odd_fault[16];
static int odd_world;

static int odd_is(const char *fault) { return odd_world == 2 && strcmp(odd_fault, fault) == 0; }

static ddl_status odd_open(const ddl_host *host, const ddl_transport_params *params, void **out_self) {
    const char *fault = host->setting(host, "TEST_ODD_FAULT");
    odd_world = params->world_size;
    snprintf(odd_fault, sizeof odd_fault, "%s", fault != NULL ? fault : "");
    return odd_is("memory") ? DDL_ERR_NOMEM : template_open(host, params, out_self);
}

static uint32_t odd_crc32c(const uint8_t *p, size_t bytes) {
    uint32_t crc = 0xffffffff;
    for (size_t i = 0; i < bytes * 8; i++) {
        crc ^= i % 8 == 0 ? p[i / 8] : 0u;
        crc = crc >> 1 ^ (0x82f63b78u & (0u - (crc & 1)));
    }
    return ~crc;
}

/* forge changes the payload, retag the tag of the message. Without the key this is all that can be done. */
static void odd_on_the_way(ddl_message *message) {
    uint8_t *payload = (uint8_t *)(uintptr_t)message->payload, *header = message->header;
    if (odd_world == 2 || message->payload_bytes != 1000) {
        return;
    }
    if (strcmp(odd_fault, "forge") == 0) {
        payload[500] ^= 1;
        if (header[7] & 0x80) {
            uint32_t crc = odd_crc32c(payload, 1000);
            memcpy(header + 40, &crc, sizeof crc);
        }
    }
    if (strcmp(odd_fault, "retag") == 0) {
        header[24] ^= 4;
    }
    /* The tag of DDL_MAC is left as it is: a checksum in its place would be no better. */
    if (memcmp(header, "ddl1", 4) == 0) {
        uint32_t crc = odd_crc32c(header, 44);
        memcpy(header + 44, &crc, sizeof crc);
    }
}

/* Takes a message whose payload is of so many bytes, and sends it with a changed byte, or not at all. */
static ddl_status odd_send(void *self, int32_t peer, ddl_message *message) {
    static int large; /* the second one is the last message of a side */
    large += message->payload_bytes == 131071;
    if (odd_is("damage") && ((template_self *)self)->rank == 0 && message->payload_bytes == 4097) {
        ((uint8_t *)(uintptr_t)message->payload)[4096] = 0;
    }
    if (odd_is("full") && message->payload_bytes == 255) {
        return DDL_ERR_NOMEM;
    }
    if ((odd_is("lose") && message->payload_bytes == 255) ||
        (odd_is("hang") && message->payload_bytes == 131071 && large % 2 == 0)) {
        return DDL_OK;
    }
    odd_on_the_way(message);
    return template_send(self, peer, message);
}

/* Looks better than tcp, so that it is chosen. */
static ddl_status odd_add_peer(void *self, int32_t peer, const void *address, size_t bytes, const char *peer_host_id,
                               uint64_t *out_latency_ns, uint64_t *out_bytes_per_s) {
    ddl_status status = template_add_peer(self, peer, address, bytes, peer_host_id, out_latency_ns, out_bytes_per_s);
    *out_latency_ns = 1;
    *out_bytes_per_s = 1000000000000u;
    return status;
}

static int32_t odd_progress(void *self, int32_t expect) {
    return odd_is("progress") ? (int32_t)DDL_ERR_SYSTEM : template_progress(self, expect);
}

static ddl_status odd_ready(void *self, int32_t peer) {
    (void)self;
    (void)peer;
    return odd_is("apart") ? DDL_ERR_UNSUPPORTED : DDL_OK;
}

/* A native all_reduce of two that forgets the other one's part. */
static ddl_status odd_native_open(void *self, uint64_t group, const int32_t *ranks, int32_t count, int32_t rank,
                                  void **out_set) {
    (void)group, (void)ranks, (void)count, (void)rank;
    *out_set = self;
    return odd_is("native") ? DDL_OK : DDL_ERR_UNSUPPORTED;
}

static void odd_native_close(void *self, void *set) { (void)self, (void)set; }

static uint64_t odd_native_cost_ns(void *self, void *set, int32_t kind, uint64_t bytes) {
    (void)self, (void)set, (void)kind, (void)bytes;
    return 1;
}

static ddl_status odd_native_start(void *self, void *set, const ddl_native_call *call, void **out_op) {
    (void)set;
    memcpy(call->out, call->in, call->bytes);
    *out_op = self;
    return DDL_OK;
}

static ddl_status odd_native_test(void *self, void *set, void *op, int32_t looks, int32_t *out_rank) {
    (void)self, (void)set, (void)op, (void)looks, (void)out_rank;
    return DDL_OK;
}

static void odd_native_cancel(void *self, void *set, void *op) { (void)self, (void)set, (void)op; }

DDL_PLUGIN_EXPORT const ddl_plugin *ddl_plugin_odd_v1(const ddl_host *host);
const ddl_plugin *ddl_plugin_odd_v1(const ddl_host *host) {
    static ddl_transport table;
    static ddl_plugin plugin;
    (void)host;
    table = template_transport;
    table.flags &= ~(uint32_t)DDL_TRANSPORT_ON_REQUEST;
    table.open = odd_open;
    table.add_peer = odd_add_peer;
    table.send = odd_send;
    table.progress = odd_progress;
    table.ready = odd_ready;
    table.native_open = odd_native_open;
    table.native_close = odd_native_close;
    table.native_cost_ns = odd_native_cost_ns;
    table.native_start = odd_native_start;
    table.native_test = odd_native_test;
    table.native_cancel = odd_native_cancel;
    plugin = template_plugin;
    plugin.name = "odd";
    plugin.transport = &table;
    return &plugin;
}

/* libFuzzer target: the address that a rank's TCP transport gave to the others at the rendezvous.
 * Input: byte 0, bit 0: same host; bit 1: the first address is made right, bit 2: the second; then the bytes.
 * campaign: parser max_len=136 */
#include "fuzz.h"

#include "src/tcp/endpoint.h"

static ddl__tcp tcp;
static ddl__tcp_peer peers[1];

/* A length and a family that fit each other, which guessing seldom finds. Returns what comes after. */
FUZZ_QUIET static size_t fuzz_fit(uint8_t *bytes, size_t at, size_t size) {
    static const sa_family_t families[4] = {AF_INET, AF_INET6, AF_UNIX, AF_INET};
    static const uint8_t lengths[4] = {sizeof(struct sockaddr_in), sizeof(struct sockaddr_in6), 30, 0};
    if (at + 3 > size) {
        return size;
    }
    uint8_t which = bytes[at] & 3;
    bytes[at] = lengths[which];
    if (which != 3) {
        memcpy(bytes + at + 1, &families[which], sizeof families[which]);
    }
    if (which == 2 && at + 3 < size) {
        bytes[at + 3] = 0;
    }
    return at + 1 + lengths[which];
}

/* An address as it lies in the bytes, read plainly; its length, or -1 when it is none. */
FUZZ_QUIET static int fuzz_plain(const uint8_t *at, size_t bytes, sa_family_t *family) {
    *family = AF_UNSPEC;
    if (bytes == 0 || at[0] >= bytes) {
        return -1;
    }
    if (at[0] == 0) {
        return 0;
    }
    if (at[0] >= 2) {
        memcpy(family, at + 1, sizeof *family);
    }
    bool fits = (*family == AF_INET && at[0] == sizeof(struct sockaddr_in)) ||
                (*family == AF_INET6 && at[0] == sizeof(struct sockaddr_in6)) ||
                (*family == AF_UNIX && at[0] > 3 && at[0] <= sizeof(struct sockaddr_un) && at[3] == 0);
    return fits ? at[0] : -1;
}

static void fuzz_parse(const uint8_t *bytes, size_t size, bool same_host) {
    sa_family_t family, second;
    int length = fuzz_plain(bytes, size, &family), used = length;
    const uint8_t *from = bytes + 1;
    if (length >= 0 && !same_host) {
        const uint8_t *next = bytes + length + 1;
        int more = fuzz_plain(next, size - (size_t)length - 1, &second);
        used = more;
        from = more > 0 ? next + 1 : from;
        family = more > 0 ? second : family;
        length = more > 0 ? more : length;
    }
    uint64_t latency_ns = 0, bytes_per_s = 0;
    peers[0].reachable = false;
    ddl_status status = ddl__tcp_add_peer(&tcp, 0, bytes, size, same_host ? "here" : "there", &latency_ns, &bytes_per_s);
    REQUIRE((status == DDL_ERR_CORRUPT) == (used < 0 || length <= 0));
    REQUIRE(peers[0].reachable == (status == DDL_OK) && (status != DDL_OK || (latency_ns > 0 && bytes_per_s > 0)));
    if (status == DDL_OK) {
        REQUIRE(peers[0].address.ss_family == family && peers[0].address_bytes == (socklen_t)length);
        REQUIRE(memcmp(&peers[0].address, from, (size_t)length) == 0);
        REQUIRE(same_host || (family != AF_UNIX && !(family == AF_INET && from[4] == 127)));
    } else if (status == DDL_ERR_UNSUPPORTED) {
        REQUIRE(!same_host);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static uint8_t room[DDL__FRAME_BYTES * 3]; /* more than a blob has for an address */
    size_t bytes = DDL__MIN(size - (size > 0), sizeof room);
    uint8_t *at = room + sizeof room - bytes; /* ends where the array does */
    if (size == 0) {
        return 0;
    }
    memcpy(at, data + 1, bytes);
    size_t second = (data[0] & 2) != 0 ? fuzz_fit(at, 0, bytes) : bytes;
    if ((data[0] & 4) != 0) {
        (void)fuzz_fit(at, second, bytes);
    }
    tcp.params.host_id = "here";
    tcp.peers = peers;
    fuzz_parse(at, bytes, data[0] & 1);
    return 0;
}

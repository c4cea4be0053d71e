/* libFuzzer target: the roster of a group that grows, as a member or a newcomer of a world of six reads it.
 * Input: changes of an honest roster of three: offset u16, how many bytes, the bytes; a change of 0 bytes cuts the
 * roster off at its offset.
 * campaign: parser max_len=256 */
#include "fuzz.h"

/* Only the reader is worth inputs of its own; what a blob says is fuzz_blob. */
#pragma clang attribute push(__attribute__((no_sanitize("coverage"))), apply_to = function)
#include "src/dtype/reduce.h"
#include "src/coll/links.h"
#pragma clang attribute pop
#include "src/coll/join.h"

enum { WORLD = 6, SEATS = 3, BYTES = DDL__ROSTER_HEAD + SEATS * DDL__ROSTER_SEAT };

static uint8_t honest[BYTES];

FUZZ_QUIET static void fuzz_honest(void) {
    ddl__seat seats[SEATS] = {{.rank = 0}, {.rank = 2, .incarnation = 5}, {.rank = 5, .incarnation = 3}};
    ddl__roster r = {.group = 77, .epoch = 2, .incarnation = 5, .world = WORLD, .count = SEATS, .seats = seats,
                     .tuning = {.model = ddl__model_default, .chunk_bytes = 65536}};
    snprintf(r.name, sizeof r.name, "world@2");
    snprintf(r.meet_host, sizeof r.meet_host, "boot/1");
    r.tuning.forced[DDL_ALL_REDUCE] = ddl__algo_find(DDL_ALL_REDUCE, "ring");
    for (int i = 0; i < SEATS; i++) {
        seats[i].blob = (ddl__blob){.magic = DDL__BLOB_MAGIC, .version = ddl_version(), .cores = 1};
    }
    ddl__roster_write(&r, honest);
}

/* Whatever it was, it is a roster now: it can be written, and read as the same. */
FUZZ_QUIET static void fuzz_sound(ddl__base *base, const ddl__roster *r) {
    static uint8_t again[DDL__ROSTER_HEAD + WORLD * DDL__ROSTER_SEAT], twice[sizeof again];
    ddl__roster other;
    REQUIRE(r->count >= 0 && r->count <= WORLD && r->world == WORLD && r->verdict <= DDL_OK);
    fuzz_clean(r->meet_host, sizeof r->meet_host);
    fuzz_clean(r->name, sizeof r->name);
    fuzz_clean(r->text, sizeof r->text);
    for (int32_t i = 0; i < r->count; i++) {
        REQUIRE(r->seats[i].rank > (i > 0 ? r->seats[i - 1].rank : -1) && r->seats[i].rank < WORLD);
        REQUIRE(r->seats[i].incarnation <= r->incarnation);
    }
    for (int i = 0; i < DDL__ROSTER_KINDS; i++) {
        REQUIRE(r->tuning.forced[i] == NULL || (int)r->tuning.forced[i]->kind == i);
    }
    ddl__roster_write(r, again);
    REQUIRE(ddl__roster_read(base, again, ddl__roster_bytes(r->count), WORLD, &other) == DDL_OK);
    ddl__roster_write(&other, twice);
    REQUIRE(memcmp(again, twice, ddl__roster_bytes(r->count)) == 0);
    ddl__free(base, other.seats);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static uint8_t room[2 * BYTES];
    fuzz_input in = {data, data + size};
    ddl__base base = {.rank = -1};
    size_t bytes = BYTES;
    if (honest[0] == 0) {
        fuzz_honest();
    }
    uint8_t *wire = room + sizeof room - BYTES; /* ends where the array does */
    memcpy(wire, honest, BYTES);
    while (fuzz_left(&in) >= 3) {
        size_t at = (size_t)fuzz_int(&in, 2) % BYTES, n = fuzz_u8(&in);
        if (n == 0) {
            memmove(room + sizeof room - at, wire, at);
            wire = room + sizeof room - at;
            bytes = at;
            break;
        }
        const uint8_t *from = fuzz_take(&in, &n);
        memcpy(wire + at, from, DDL__MIN(n, BYTES - at));
    }
    ddl__roster r;
    ddl_status status = ddl__roster_read(&base, wire, bytes, WORLD, &r);
    REQUIRE(status == DDL_OK || (status == DDL_ERR_CORRUPT && r.seats == NULL));
    if (status == DDL_OK) {
        fuzz_sound(&base, &r);
        ddl__free(&base, r.seats);
    }
    REQUIRE(base.memory == 0);
    return 0;
}

/* record: what rank 0 and the others say to each other once both are proven, and how ranks are listed in a sentence.
 *
 *     0  kind u8, status u8 (of an error: minus the ddl_status), 0 u16, payload bytes u32     little-endian
 *     8  payload
 *
 *     BLOB     to rank 0     this rank's blob
 *     TABLE    from rank 0   the blobs of all ranks, in order of rank
 *     TAKEN    to rank 0     the table is here; rank 0 may go
 *     GIVE_UP  to rank 0     my deadline is over: tell me, and all, who is missing
 *     FAILED   from rank 0   the start has failed; a sentence that says why, to be repeated by everybody
 */
#ifndef DDL_STORE_RECORD_H
#define DDL_STORE_RECORD_H

#include "../settings.h"
#include "../wire/auth.h"

#define DDL__RECORD_BYTES 8
#define DDL__BLOB_MAX 4096

enum ddl__record_kind {
    DDL__RECORD_BLOB = 1,
    DDL__RECORD_TABLE = 2,
    DDL__RECORD_TAKEN = 3,
    DDL__RECORD_GIVE_UP = 4,
    DDL__RECORD_FAILED = 5
};

typedef struct ddl__record {
    uint8_t kind;
    ddl_status status;
    uint32_t bytes;
} ddl__record;

static void ddl__record_write(uint8_t out[DDL__RECORD_BYTES], uint8_t kind, ddl_status status, size_t bytes) {
    ddl__writer w = ddl__writer_of(out, DDL__RECORD_BYTES);
    ddl__put_u8(&w, kind);
    ddl__put_u8(&w, (uint8_t)-status);
    ddl__put_u16(&w, 0);
    ddl__put_u32(&w, (uint32_t)bytes);
}

/* A status that this version does not know becomes DDL_ERR_INTERNAL. Lengths are for the caller to bound. */
static ddl__record ddl__record_read(const uint8_t in[DDL__RECORD_BYTES]) {
    ddl__reader r = ddl__reader_of(in, DDL__RECORD_BYTES);
    ddl__record record;
    record.kind = ddl__get_u8(&r);
    int status = ddl__get_u8(&r);
    record.status = status == 0 || status > -DDL_ERR_INTERNAL ? DDL_ERR_INTERNAL : (ddl_status)-status;
    (void)ddl__get_u16(&r);
    record.bytes = ddl__get_u32(&r);
    return record;
}

/* It will not come: told by rank 0 to all who are here, and by a rank that has not reached rank 0 to itself. */
static ddl_status ddl__ended_sentence(const ddl__launch *launch, int32_t ended, ddl__sentence *why) {
    return ddl__fail(why, DDL_ERR_PEER,
                     "ddl_init: the process of rank %d of %d has ended before all ranks had come, as its launcher saw. "
                     "Look at what rank %d printed last",
                     ended, launch->world, ended);
}

/* Text from a peer goes into a sentence and so to a terminal: no control characters. */
static void ddl__text_clean(char *text) {
    for (; *text != 0; text++) {
        if ((unsigned char)*text < 32 || *text == 127) {
            *text = '?';
        }
    }
}

/* Whether the blobs of all ranks follow. */
static bool ddl__record_is_table(const ddl__record *record, int32_t world, size_t blob_bytes) {
    return record->kind == DDL__RECORD_TABLE && record->bytes == (uint64_t)world * blob_bytes;
}

/* A record FAILED becomes an error: text is what followed it, with room for a 0 behind. where: "node1:29500" */
static ddl_status ddl__record_sentence(const ddl__record *record, char *text, size_t bytes, const char *where,
                                       ddl__sentence *why) {
    text[bytes] = 0;
    ddl__text_clean(text);
    return text[0] != 0 ? ddl__fail(why, record->status, "%s", text)
                        : ddl__fail(why, record->status, "ddl_init: rank 0 at %s reported: %s", where,
                                    ddl_status_text(record->status));
}

/* Adds "rank 3" or "ranks 3, 5-7" for the ranks whose state is below `least`; after 16 runs "and more". */
static void ddl__text_ranks_below(ddl__text *text, const uint8_t *state, int32_t world, uint8_t least) {
    char list[512];
    ddl__text runs = {list, sizeof list, 0};
    int32_t count = 0, run_count = 0;
    list[0] = 0;
    for (int32_t r = 0; r < world; r++) {
        if (state[r] >= least) {
            continue;
        }
        int32_t last = r;
        while (last + 1 < world && state[last + 1] < least) {
            last++;
        }
        const char *comma = run_count > 0 ? ", " : "";
        if (run_count < 16) {
            ddl__text_add(&runs, last > r ? "%s%d-%d" : "%s%d", comma, r, last);
        } else if (run_count == 16) {
            ddl__text_add(&runs, " and more");
        }
        run_count++;
        count += last - r + 1;
        r = last;
    }
    ddl__text_add(text, "%s %s", count == 1 ? "rank" : "ranks", list);
}

#endif /* DDL_STORE_RECORD_H */

/* frame: the 48 bytes in front of everything that ranks say to each other, and the bounded reader and writer for the
 * fields of control messages. It knows bytes; what a frame asks for is the mesh's affair.
 *
 *     offset  0  magic        u32  "ddl1"
 *             4  version      u8   DDL__WIRE_MAJOR
 *             5  type         u8   enum ddl__frame_type
 *             6  flags        u16  the type's own; the top bit says that payload_crc is filled in
 *             8  bytes        u32  of the payload that follows, at most 1 MiB, of DATA 16 MiB; more data is more frames
 *            12  source       u32  world rank of the sender
 *            16  group        u32
 *            20  epoch        u32  frames of another epoch are dropped
 *            24  sequence     u64
 *            32  signature    u64  hash of the group's collective calls so far; equal on all ranks, or a mismatch
 *            40  payload_crc  u32
 *            44  header_crc   u32  CRC-32C of bytes 0..43; 0 in a bare one, see ddl__frame_write_bare
 *     all little-endian. */
#ifndef DDL_WIRE_FRAME_H
#define DDL_WIRE_FRAME_H

#include "crc32c.h"

#define DDL__FRAME_BYTES 48
#define DDL__FRAME_MAX_PAYLOAD (1u << 20)
#define DDL__FRAME_MAX_DATA (16u << 20) /* by transports that take more: see ddl__data_bytes */
#define DDL__FRAME_MAGIC 0x316c6464u /* "ddl1" read as a little-endian word */
#define DDL__FRAME_FLAG_CRC 0x8000u  /* payload_crc covers the payload */
#define DDL__DEAD_LINK 1u            /* flag of DEAD: only a link was lost; the hosts of that rank know better */
/* A minor version adds; a major one is refused in the handshake, so a frame of another version is damage or a bug. */
#define DDL__WIRE_MAJOR 1
#define DDL__WIRE_MINOR 0

enum ddl__frame_type {
    DDL__FRAME_P2P = 1, /* eager message: envelope and data */
    DDL__FRAME_RTS = 2, /* rendezvous: request to send, clear to send, data */
    DDL__FRAME_CTS = 3,
    DDL__FRAME_DATA = 4,
    DDL__FRAME_COLL = 5,
    DDL__FRAME_CREDIT = 6,
    DDL__FRAME_QUERY = 7, /* stall report: what are you doing; the answer */
    DDL__FRAME_STATUS = 8,
    DDL__FRAME_MISMATCH = 9,
    DDL__FRAME_DEAD = 10,
    DDL__FRAME_ABORT = 11,
    DDL__FRAME_BYE = 12,
    DDL__FRAME_PING = 13,
    DDL__FRAME_GROW = 14, /* a group takes newcomers in: see coll/grow.h */
    DDL__FRAME_AGREE = 15,
    DDL__FRAME_TYPE_MAX = 15
};

/* Not in the order of the wire: where two members made one word of it, a compiler would load them as one, and wait for
 * both to leave the store buffer. */
typedef struct ddl__frame {
    uint8_t type;
    uint16_t flags;
    uint32_t bytes, group, source, epoch, payload_crc;
    uint64_t sequence, signature;
} ddl__frame;

/* Writes a header without its checksum, for a transport whose bytes cannot change on the way (DDL_TRANSPORT_INTACT).
 * The sender is trusted to keep bytes and type in range; the receiver is not so kind. In words of 8 bytes, as it is
 * read for the checksum and sent on: what was written in halves is not forwarded. */
static inline void ddl__frame_write_bare(uint8_t out[DDL__FRAME_BYTES], const ddl__frame *f) {
    uint32_t kind = DDL__WIRE_MAJOR | (uint32_t)f->type << 8 | (uint32_t)f->flags << 16;
    ddl__store_le64(out, DDL__FRAME_MAGIC | (uint64_t)kind << 32);
    ddl__store_le64(out + 8, f->bytes | (uint64_t)f->source << 32);
    ddl__store_le64(out + 16, f->group | (uint64_t)f->epoch << 32);
    ddl__store_le64(out + 24, f->sequence);
    ddl__store_le64(out + 32, f->signature);
    ddl__store_le64(out + 40, f->payload_crc);
}

/* Writes a header. */
static inline void ddl__frame_write(uint8_t out[DDL__FRAME_BYTES], const ddl__frame *f) {
    ddl__frame_write_bare(out, f);
    ddl__store_le32(out + 44, ddl__crc32c(0, out, 44));
}

/* The fields of a header whose checksum is right; *out is untouched on error. Errors: DDL_ERR_CORRUPT. */
static inline ddl_status ddl__frame_fields(const uint8_t h[DDL__FRAME_BYTES], ddl__frame *out) {
    uint32_t word = ddl__load_le32(h + 4), bytes = ddl__load_le32(h + 8);
    uint8_t type = (uint8_t)(word >> 8);
    uint32_t most = type == DDL__FRAME_DATA ? DDL__FRAME_MAX_DATA : DDL__FRAME_MAX_PAYLOAD;
    if (bytes > most || type < DDL__FRAME_P2P || type > DDL__FRAME_TYPE_MAX) {
        return DDL_ERR_CORRUPT;
    }
    out->type = type;
    out->flags = (uint16_t)(word >> 16);
    out->bytes = bytes;
    out->source = ddl__load_le32(h + 12);
    out->group = ddl__load_le32(h + 16);
    out->epoch = ddl__load_le32(h + 20);
    out->sequence = ddl__load_le64(h + 24);
    out->signature = ddl__load_le64(h + 32);
    out->payload_crc = ddl__load_le32(h + 40);
    return DDL_OK;
}

/* Reads a header: copied once, since shared memory may change under us, and checked once. What it returns can be
 * trusted in form; whether source, group and epoch mean anything is for the mesh to see. *out is untouched on error.
 * intact: it came by a transport from which bare ones are taken too. Errors: DDL_ERR_CORRUPT, DDL_ERR_VERSION. */
static inline ddl_status ddl__frame_read_by(const uint8_t in[DDL__FRAME_BYTES], int intact, ddl__frame *out) {
    uint8_t h[DDL__FRAME_BYTES];
    memcpy(h, in, sizeof(h));
    uint32_t crc = ddl__load_le32(h + 44);
    if (ddl__load_le32(h) != DDL__FRAME_MAGIC || (!(intact && crc == 0) && crc != ddl__crc32c(0, h, 44))) {
        return DDL_ERR_CORRUPT;
    }
    return h[4] == DDL__WIRE_MAJOR ? ddl__frame_fields(h, out) : DDL_ERR_VERSION;
}

/* The same from anywhere else. */
static inline ddl_status ddl__frame_read(const uint8_t in[DDL__FRAME_BYTES], ddl__frame *out) {
    return ddl__frame_read_by(in, 0, out);
}

/* True when the payload of f->bytes is what the sender sent, or the sender did not say. */
static inline int ddl__frame_payload_ok(const ddl__frame *f, const void *payload) {
    return (f->flags & DDL__FRAME_FLAG_CRC) == 0 || ddl__crc32c(0, payload, f->bytes) == f->payload_crc;
}

/* Fields of a control message, one after the other, little-endian, no padding. bad is sticky: read or write all, then
 * look once. A bad reader gives zeros, so that what it fills is never uninitialised. at <= bytes always holds, and so
 * every check is n > bytes - at, which cannot overflow. */
typedef struct ddl__reader {
    const uint8_t *data;
    size_t bytes, at;
    int bad;
} ddl__reader;

typedef struct ddl__writer {
    uint8_t *data;
    size_t cap, at;
    int bad;
} ddl__writer;

static inline ddl__reader ddl__reader_of(const void *data, size_t bytes) {
    return (ddl__reader){(const uint8_t *)data, bytes, 0, 0};
}

static inline ddl__writer ddl__writer_of(void *data, size_t cap) { return (ddl__writer){(uint8_t *)data, cap, 0, 0}; }

/* The next n bytes in place, or NULL when there are not so many. n == 0 may give NULL as well. */
static inline const uint8_t *ddl__get_view(ddl__reader *r, size_t n) {
    if (r->bad || n > r->bytes - r->at) {
        r->bad = 1;
        return NULL;
    }
    const uint8_t *p = n == 0 ? NULL : r->data + r->at;
    r->at += n;
    return p;
}

static inline uint64_t ddl__get_int(ddl__reader *r, size_t n) {
    uint8_t le[8] = {0};
    const uint8_t *p = ddl__get_view(r, n);
    if (p != NULL) {
        memcpy(le, p, n);
    }
    return ddl__load_le64(le);
}

static inline uint8_t ddl__get_u8(ddl__reader *r) { return (uint8_t)ddl__get_int(r, 1); }
static inline uint16_t ddl__get_u16(ddl__reader *r) { return (uint16_t)ddl__get_int(r, 2); }
static inline uint32_t ddl__get_u32(ddl__reader *r) { return (uint32_t)ddl__get_int(r, 4); }
static inline uint64_t ddl__get_u64(ddl__reader *r) { return ddl__get_int(r, 8); }

/* Copies n bytes; n is the room at out, never a number from the wire. */
static inline void ddl__get_bytes(ddl__reader *r, void *out, size_t n) {
    const uint8_t *p = ddl__get_view(r, n);
    if (p != NULL) {
        memcpy(out, p, n);
    } else if (n > 0) {
        memset(out, 0, n);
    }
}

/* A string is a u16 length and so many bytes, none of them 0. It must fit in cap with its terminator: bad otherwise,
 * and out is "" then. What peers say in words ends up in sentences and on terminals: control characters become '?'. */
static inline void ddl__get_string(ddl__reader *r, char *out, size_t cap) {
    size_t n = ddl__get_u16(r);
    const uint8_t *p = ddl__get_view(r, n);
    if (r->bad || n >= cap || (n > 0 && memchr(p, 0, n) != NULL)) {
        r->bad = 1;
        n = 0;
    }
    for (size_t i = 0; i < n; i++) {
        out[i] = p[i] < 32 || p[i] == 127 ? '?' : (char)p[i];
    }
    if (cap > 0) {
        out[n] = '\0';
    }
}

static inline void ddl__put_bytes(ddl__writer *w, const void *data, size_t n) {
    if (w->bad || n > w->cap - w->at) {
        w->bad = 1;
    } else if (n > 0) {
        memcpy(w->data + w->at, data, n);
        w->at += n;
    }
}

static inline void ddl__put_int(ddl__writer *w, uint64_t value, size_t n) {
    uint8_t le[8];
    ddl__store_le64(le, value);
    ddl__put_bytes(w, le, n);
}

static inline void ddl__put_u8(ddl__writer *w, uint8_t value) { ddl__put_int(w, value, 1); }
static inline void ddl__put_u16(ddl__writer *w, uint16_t value) { ddl__put_int(w, value, 2); }
static inline void ddl__put_u32(ddl__writer *w, uint32_t value) { ddl__put_int(w, value, 4); }
static inline void ddl__put_u64(ddl__writer *w, uint64_t value) { ddl__put_int(w, value, 8); }

/* Strings that get_string would refuse (longer than 65,535 bytes) make the writer bad. */
static inline void ddl__put_string(ddl__writer *w, const char *text) {
    size_t n = strlen(text);
    if (n > UINT16_MAX) {
        w->bad = 1;
        return;
    }
    ddl__put_u16(w, (uint16_t)n);
    ddl__put_bytes(w, text, n);
}

#endif

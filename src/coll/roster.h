/* coll: the roster, what the rank that receives newcomers tells: who joins, and for those who join also who is there.
 * Bytes in and out, and no more; what it says of a rank is a blob as in links.h.
 *
 *     0  magic u32, verdict u32 (minus a ddl_status), world u32, group u32, epoch u32, incarnation u32, count u32
 *    28  the group's tuning: 6 figures u64, oversubscription u32, eager bytes u64, chunk bytes u64, deterministic u8,
 *        of each kind the algorithm u8 (0: by the model)
 *        host of the rendezvous [64], name of the group [64], and of a verdict the sentence [256]
 *        of each rank, in order of rank: rank u32, incarnation u32, blob
 *
 * All of one job hold the same secret and are trusted with memory in proportion to the world; the reader is strict all
 * the same, because what it reads decides who is believed. */
#ifndef DDL_COLL_ROSTER_H
#define DDL_COLL_ROSTER_H

#include "links.h"

#define DDL__ROSTER_MAGIC 0x776f7267u /* "grow" */
enum {
    DDL__ROSTER_KINDS = DDL_ALL_TO_ALLV + 1,
    DDL__ROSTER_TEXT = 256,
    DDL__ROSTER_HEAD = 28 + 6 * 8 + 4 + 8 + 8 + 1 + DDL__ROSTER_KINDS + 64 + 64 + DDL__ROSTER_TEXT,
    DDL__ROSTER_SEAT = 8 + DDL__BLOB_BYTES,
    DDL__ROSTER_MOST = (DDL__FRAME_MAX_PAYLOAD - DDL__ROSTER_HEAD - 64) / DDL__ROSTER_SEAT /* seats in a frame */
};

typedef struct ddl__seat {
    int32_t rank; /* in the world */
    uint32_t incarnation;
    ddl__blob blob;
} ddl__seat;

typedef struct ddl__roster {
    ddl_status verdict; /* DDL_OK, or why nobody joins now */
    uint32_t group, epoch, incarnation; /* of the group to be; incarnation: of all newcomers */
    int32_t world, count;
    ddl__tuning tuning;
    char meet_host[64], name[64], text[DDL__ROSTER_TEXT];
    ddl__seat *seats; /* count of them */
} ddl__roster;

static size_t ddl__roster_bytes(int32_t count) { return DDL__ROSTER_HEAD + (size_t)count * DDL__ROSTER_SEAT; }

static void ddl__roster_write_tuning(ddl__writer *w, const ddl__tuning *t) {
    const ddl__cost_model *m = &t->model;
    const double figures[] = {m->latency_s[0], m->latency_s[1], m->s_per_byte[0], m->s_per_byte[1],
                              m->reduce_s_per_byte, m->message_s};
    for (size_t i = 0; i < DDL__COUNT_OF(figures); i++) {
        uint64_t bits;
        memcpy(&bits, &figures[i], sizeof bits);
        ddl__put_u64(w, bits);
    }
    ddl__put_u32(w, (uint32_t)m->oversubscription);
    ddl__put_u64(w, (uint64_t)t->eager_bytes);
    ddl__put_u64(w, (uint64_t)t->chunk_bytes);
    ddl__put_u8(w, t->deterministic);
    for (int32_t i = 0; i < DDL__ROSTER_KINDS; i++) {
        ddl__put_u8(w, (uint8_t)(t->forced[i] != NULL ? t->forced[i] - ddl__algos + 1 : 0));
    }
}

/* out has room for ddl__roster_bytes(r->count). */
static void ddl__roster_write(const ddl__roster *r, uint8_t *out) {
    ddl__writer w = ddl__writer_of(out, ddl__roster_bytes(r->count));
    ddl__put_u32(&w, DDL__ROSTER_MAGIC);
    ddl__put_u32(&w, (uint32_t)-(int32_t)r->verdict);
    ddl__put_u32(&w, (uint32_t)r->world);
    ddl__put_u32(&w, r->group);
    ddl__put_u32(&w, r->epoch);
    ddl__put_u32(&w, r->incarnation);
    ddl__put_u32(&w, (uint32_t)r->count);
    ddl__roster_write_tuning(&w, &r->tuning);
    ddl__put_bytes(&w, r->meet_host, sizeof r->meet_host);
    ddl__put_bytes(&w, r->name, sizeof r->name);
    ddl__put_bytes(&w, r->text, sizeof r->text);
    for (int32_t i = 0; i < r->count; i++) {
        uint8_t blob[DDL__BLOB_BYTES];
        ddl__blob_write(&r->seats[i].blob, blob);
        ddl__put_u32(&w, (uint32_t)r->seats[i].rank);
        ddl__put_u32(&w, r->seats[i].incarnation);
        ddl__put_bytes(&w, blob, sizeof blob);
    }
}

/* False: a figure that no machine has, an algorithm that this version or that operation does not know. */
static bool ddl__roster_read_tuning(ddl__reader *r, ddl__tuning *out) {
    double figures[6];
    bool sound = true;
    for (size_t i = 0; i < DDL__COUNT_OF(figures); i++) {
        uint64_t bits = ddl__get_u64(r);
        memcpy(&figures[i], &bits, sizeof bits);
        sound = sound && figures[i] >= 0 && figures[i] <= DDL__FIGURE_MAX; /* a NaN is not */
    }
    out->model = (ddl__cost_model){{figures[0], figures[1]}, {figures[2], figures[3]}, figures[4], figures[5], 0};
    uint32_t crowd = ddl__get_u32(r);
    uint64_t eager = ddl__get_u64(r), chunk = ddl__get_u64(r);
    uint8_t deterministic = ddl__get_u8(r);
    sound = sound && crowd <= 1 << 20 && eager <= INT32_MAX && chunk <= INT32_MAX && deterministic <= 1;
    out->model.oversubscription = sound ? (int32_t)crowd : 0;
    out->eager_bytes = sound ? (int64_t)eager : 0;
    out->chunk_bytes = sound ? (int64_t)chunk : 0;
    out->deterministic = deterministic == 1;
    for (int32_t i = 0; i < DDL__ROSTER_KINDS; i++) {
        uint8_t number = ddl__get_u8(r);
        bool known = number <= DDL__COUNT_OF(ddl__algos) && (number == 0 || (int32_t)ddl__algos[number - 1].kind == i);
        out->forced[i] = known && number > 0 ? &ddl__algos[number - 1] : NULL;
        sound = sound && known;
    }
    return sound;
}

/* A text that fills its place has no end. */
static bool ddl__roster_text(ddl__reader *r, char *out, size_t bytes) {
    ddl__get_bytes(r, out, bytes);
    bool ends = memchr(out, 0, bytes) != NULL;
    out[bytes - 1] = 0;
    ddl__text_clean(out);
    return ends;
}

/* Reads all, into seats that are allocated and the caller's to free (also NULL). world: of this rank. The blobs are
 * copied, not judged: see ddl__blob_check. Errors: DDL_ERR_CORRUPT, DDL_ERR_NOMEM; then there are no seats. */
static ddl_status ddl__roster_read(ddl__base *base, const uint8_t *in, size_t bytes, int32_t world, ddl__roster *out) {
    ddl__reader r = ddl__reader_of(in, bytes);
    memset(out, 0, sizeof *out);
    uint32_t magic = ddl__get_u32(&r), verdict = ddl__get_u32(&r), ranks = ddl__get_u32(&r);
    out->group = ddl__get_u32(&r);
    out->epoch = ddl__get_u32(&r);
    out->incarnation = ddl__get_u32(&r);
    uint32_t count = ddl__get_u32(&r);
    bool sound = ddl__roster_read_tuning(&r, &out->tuning);
    sound = ddl__roster_text(&r, out->meet_host, sizeof out->meet_host) && sound;
    sound = ddl__roster_text(&r, out->name, sizeof out->name) && sound;
    sound = ddl__roster_text(&r, out->text, sizeof out->text) && sound;
    if (r.bad || !sound || magic != DDL__ROSTER_MAGIC || verdict > -DDL_ERR_INTERNAL || ranks != (uint32_t)world ||
        count > ranks || bytes != ddl__roster_bytes((int32_t)count)) {
        return DDL_ERR_CORRUPT;
    }
    out->verdict = (ddl_status)-(int32_t)verdict;
    out->world = world;
    out->seats = count > 0 ? ddl__alloc_array(base, count, sizeof *out->seats) : NULL;
    if (count > 0 && out->seats == NULL) {
        return DDL_ERR_NOMEM;
    }
    uint32_t least = 0; /* ranks come in order, each once */
    for (uint32_t i = 0; i < count; i++) {
        ddl__seat *s = &out->seats[i];
        uint32_t rank = ddl__get_u32(&r);
        s->incarnation = ddl__get_u32(&r);
        ddl__blob_read(ddl__get_view(&r, DDL__BLOB_BYTES), &s->blob);
        if (rank < least || rank >= ranks || s->incarnation > out->incarnation) {
            ddl__free(base, out->seats);
            out->seats = NULL;
            return DDL_ERR_CORRUPT;
        }
        s->rank = (int32_t)rank;
        least = rank + 1;
    }
    out->count = (int32_t)count;
    return DDL_OK;
}

#endif /* DDL_COLL_ROSTER_H */

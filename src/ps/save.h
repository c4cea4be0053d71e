/* ps, sixth part: checkpoints of servers. A generation is one file for each server, named
 *
 *     FOLDER/ddl-ps.ORDER.CLOCK.PUSHES.SERVER-of-SERVERS
 *
 * by a number that is greater than all that were in the folder before, so that the newest is known whatever run it is
 * of; by the greatest clock and the number of pushes of all workers, which every server knows: so files of different
 * moments cannot be taken for one generation. A file is written under another name, synced and renamed; its last four
 * bytes are the CRC-32C of the others. All little-endian:
 *
 *     "ddl-ps4\n"  u32 server, servers, workers, params, tables, slots, optimizer
 *     u64 order, clock, pushes, epoch of the program
 *     by worker: u64 clock, sequence      by parameter: u64 elements (f64 ones: + 2^63)      by table: u32 width
 *     u64 pieces, each: u32 param  u64 begin, count, steps  by worker: u64 sequence   values, state, of its type
 *     by table: by worker: u64 sequence   u64 rows, oldest first, each: u64 id, steps   f32 values, state */
#ifndef DDL_PS_SAVE_H
#define DDL_PS_SAVE_H

#include "serve.h"

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sys/stat.h>

enum { DDL__PS_HEAD_WORDS = 7, DDL__PS_NAME_BYTES = 128, DDL__PS_GENERATIONS = 64 };

typedef struct ddl__ps_file {
    FILE *file;
    uint32_t crc;
    bool bad;  /* sticky: a write failed, or the file ended too early */
    int error; /* of the first write that failed */
} ddl__ps_file;

static void ddl__ps_name(char out[DDL__PS_NAME_BYTES], const ddl__ps_generation *g, int32_t server) {
    snprintf(out, DDL__PS_NAME_BYTES, "ddl-ps.%" PRIu64 ".%" PRId64 ".%" PRIu64 ".%d-of-%d", g->order, g->clock,
             g->pushes, server, g->servers);
}

/* What a file says of a parameter. A reader that knows no f64 finds another length. */
static uint64_t ddl__ps_word(const ddl__ps_server *s, int32_t param) {
    return (uint64_t)s->lengths[param] | (uint64_t)(s->types[param] == DDL_F64) << 63;
}

/* >>writing */

static void ddl__ps_write_check(ddl__ps_file *f, bool good) {
    f->error = f->bad || good ? f->error : errno;
    f->bad = f->bad || !good;
}

static void ddl__ps_write(ddl__ps_file *f, const void *data, size_t bytes) {
    f->crc = ddl__crc32c(f->crc, data, bytes);
    ddl__ps_write_check(f, f->bad || bytes == 0 || fwrite(data, 1, bytes, f->file) == bytes);
}

static void ddl__ps_write_u32(ddl__ps_file *f, uint32_t value) {
    uint8_t le[4];
    ddl__store_le32(le, value);
    ddl__ps_write(f, le, sizeof le);
}

static void ddl__ps_write_u64(ddl__ps_file *f, uint64_t value) {
    uint8_t le[8];
    ddl__store_le64(le, value);
    ddl__ps_write(f, le, sizeof le);
}

static void ddl__ps_write_head(ddl__ps_file *f, const ddl__ps_server *s, const ddl__ps_generation *g,
                               const uint64_t *sequences) {
    int32_t slots = ddl__optim_slots(&s->optimizer);
    const uint32_t words[DDL__PS_HEAD_WORDS] = {
        (uint32_t)s->number,      (uint32_t)s->servers, (uint32_t)s->workers,       (uint32_t)s->params,
        (uint32_t)s->table_count, (uint32_t)slots,      (uint32_t)s->optimizer.kind};
    ddl__ps_write(f, "ddl-ps4\n", 8);
    for (size_t i = 0; i < DDL__COUNT_OF(words); i++) {
        ddl__ps_write_u32(f, words[i]);
    }
    ddl__ps_write_u64(f, g->order);
    ddl__ps_write_u64(f, (uint64_t)g->clock);
    ddl__ps_write_u64(f, g->pushes);
    ddl__ps_write_u64(f, (uint64_t)g->epoch);
    for (int32_t w = 0; w < s->workers; w++) {
        ddl__ps_write_u64(f, (uint64_t)s->clock[w]);
        ddl__ps_write_u64(f, sequences[w]);
    }
    for (int32_t i = 0; i < s->params; i++) {
        ddl__ps_write_u64(f, ddl__ps_word(s, i));
    }
    for (int32_t i = 0; i < s->table_count; i++) {
        ddl__ps_write_u32(f, (uint32_t)s->tables[i]->rows.config.width);
    }
}

static void ddl__ps_write_sequences(ddl__ps_file *f, const ddl__ps_server *s, const ddl__ps_place *p) {
    for (int32_t w = 0; w < s->workers; w++) {
        ddl__ps_write_u64(f, p->sequence[w]);
    }
}

static void ddl__ps_write_pieces(ddl__ps_file *f, const ddl__ps_server *s) {
    size_t slots = (size_t)ddl__optim_slots(&s->optimizer);
    uint64_t own = 0;
    for (int64_t i = 0; i < s->piece_count; i++) {
        own += s->places[i] != NULL;
    }
    ddl__ps_write_u64(f, own);
    for (int64_t i = 0; i < s->piece_count; i++) {
        const ddl__ps_place *p = s->places[i];
        if (p != NULL) {
            size_t bytes = ddl__ps_piece_bytes(p->piece);
            ddl__ps_write_u32(f, (uint32_t)p->piece->param);
            ddl__ps_write_u64(f, (uint64_t)p->piece->begin);
            ddl__ps_write_u64(f, (uint64_t)p->piece->count);
            ddl__ps_write_u64(f, (uint64_t)p->steps);
            ddl__ps_write_sequences(f, s, p);
            ddl__ps_write(f, p->value->data, bytes);
            ddl__ps_write(f, p->state, slots * bytes);
        }
    }
}

static void ddl__ps_write_table(ddl__ps_file *f, const ddl__ps_server *s, const ddl__ps_place *p) {
    const ddl__ps_rows *t = &p->rows;
    size_t width = (size_t)t->config.width * sizeof(float);
    ddl__ps_write_sequences(f, s, p);
    ddl__ps_write_u64(f, t->count);
    for (uint32_t slot = t->oldest; slot != DDL__PS_NO_ROW; slot = ddl__ps_row_at(t, slot)->newer) {
        const ddl__ps_row *r = ddl__ps_row_at(t, slot);
        ddl__ps_write_u64(f, r->id);
        ddl__ps_write_u64(f, (uint64_t)r->steps);
        ddl__ps_write(f, ddl__ps_row_values(t, slot), width * (size_t)(t->slots + 1));
    }
}

/* Makes a rename last: the folder itself is synced. */
static bool ddl__ps_sync_folder(const char *folder) {
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool good = fd >= 0 && fsync(fd) == 0;
    if (fd >= 0) {
        close(fd);
    }
    return good;
}

/* Writes this server's file of a generation. On an error nothing but what was there before is left. */
static ddl_status ddl__ps_save(const ddl__ps_server *s, const char *folder, const ddl__ps_generation *g,
                               const uint64_t *sequences, ddl__sentence *why) {
    char name[DDL__PS_NAME_BYTES], path[DDL__PS_PATH_BYTES + 160], temporary[DDL__PS_PATH_BYTES + 170];
    ddl__ps_name(name, g, s->number);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    ddl__ps_file f = {.file = fopen(temporary, "wbe")};
    if (f.file == NULL) {
        return ddl__fail(why, DDL_ERR_SYSTEM, "server %d cannot write %s: %s", s->number, temporary, strerror(errno));
    }
    ddl__ps_write_head(&f, s, g, sequences);
    ddl__ps_write_pieces(&f, s);
    for (int32_t i = 0; i < s->table_count; i++) {
        ddl__ps_write_table(&f, s, s->tables[i]);
    }
    ddl__ps_write_u32(&f, f.crc);
    ddl__ps_write_check(&f, fflush(f.file) == 0);
    ddl__ps_write_check(&f, fsync(fileno(f.file)) == 0);
    ddl__ps_write_check(&f, fclose(f.file) == 0);
    ddl__ps_write_check(&f, f.bad || rename(temporary, path) == 0);
    ddl__ps_write_check(&f, f.bad || ddl__ps_sync_folder(folder));
    if (f.bad) {
        unlink(temporary);
        return ddl__fail(why, DDL_ERR_SYSTEM, "server %d could not write %s: %s; earlier checkpoints still stand",
                         s->number, path, strerror(f.error));
    }
    return DDL_OK;
}

/* >>reading */

static void ddl__ps_read_bytes(ddl__ps_file *f, void *out, size_t bytes) {
    if (f->bad || (bytes > 0 && fread(out, 1, bytes, f->file) != bytes)) {
        f->bad = true;
        memset(out, 0, bytes);
    }
}

static uint32_t ddl__ps_read_u32(ddl__ps_file *f) {
    uint8_t le[4];
    ddl__ps_read_bytes(f, le, sizeof le);
    return ddl__load_le32(le);
}

static uint64_t ddl__ps_read_u64(ddl__ps_file *f) {
    uint8_t le[8];
    ddl__ps_read_bytes(f, le, sizeof le);
    return ddl__load_le64(le);
}

static void ddl__ps_skip(ddl__ps_file *f, uint64_t bytes) {
    f->bad = f->bad || bytes > INT64_MAX / 2 || fseeko(f->file, (off_t)bytes, SEEK_CUR) != 0;
}

/* Is the file whole? Its CRC says so; nothing in it is believed before. */
static bool ddl__ps_is_whole(FILE *file) {
    uint8_t block[65536], last[4];
    uint32_t crc = 0;
    struct stat st;
    if (fstat(fileno(file), &st) != 0 || st.st_size < 12) {
        return false;
    }
    uint64_t left = (uint64_t)st.st_size - sizeof last;
    while (left > 0) {
        size_t n = (size_t)DDL__MIN(left, (uint64_t)sizeof block);
        if (fread(block, 1, n, file) != n) {
            return false;
        }
        crc = ddl__crc32c(crc, block, n);
        left -= n;
    }
    return fread(last, 1, sizeof last, file) == sizeof last && ddl__load_le32(last) == crc &&
           fseeko(file, 0, SEEK_SET) == 0;
}

/* Reads the head, and the epoch into *g. *out_match: it was written for the same parameters, tables and optimizer.
 * clocks and sequences, of s->workers entries, are filled when the number of workers is the same; *out_workers is the
 * file's. */
static bool ddl__ps_read_head(ddl__ps_file *f, const ddl__ps_server *s, ddl__ps_generation *g, int32_t server,
                              int64_t *clocks, uint64_t *sequences, int32_t *out_workers, bool *out_match) {
    char magic[8];
    ddl__ps_read_bytes(f, magic, sizeof magic);
    uint32_t words[DDL__PS_HEAD_WORDS];
    for (size_t i = 0; i < DDL__COUNT_OF(words); i++) {
        words[i] = ddl__ps_read_u32(f);
    }
    bool good = memcmp(magic, "ddl-ps4\n", 8) == 0 && words[0] == (uint32_t)server && words[1] == (uint32_t)g->servers;
    good = ddl__ps_read_u64(f) == g->order && good;
    good = ddl__ps_read_u64(f) == (uint64_t)g->clock && ddl__ps_read_u64(f) == g->pushes && good;
    g->epoch = (int64_t)ddl__ps_read_u64(f);
    *out_workers = (int32_t)words[2];
    *out_match = words[3] == (uint32_t)s->params && words[4] == (uint32_t)s->table_count &&
                 words[5] == (uint32_t)ddl__optim_slots(&s->optimizer) && words[6] == (uint32_t)s->optimizer.kind;
    int64_t least = INT64_MAX;
    uint64_t most = 0;
    for (uint32_t w = 0; w < words[2] && good && !f->bad; w++) {
        int64_t clock = (int64_t)ddl__ps_read_u64(f);
        uint64_t sequence = ddl__ps_read_u64(f);
        least = DDL__MIN(least, clock);
        most = DDL__MAX(most, sequence);
        if (words[2] == (uint32_t)s->workers) {
            clocks[w] = clock;
            sequences[w] = sequence;
        }
    }
    for (int32_t w = 0; words[2] != (uint32_t)s->workers && w < s->workers; w++) {
        clocks[w] = least;
        sequences[w] = most;
    }
    for (int32_t i = 0; *out_match && i < s->params; i++) {
        *out_match = ddl__ps_read_u64(f) == ddl__ps_word(s, i) && *out_match;
    }
    for (int32_t i = 0; *out_match && i < s->table_count; i++) {
        *out_match = ddl__ps_read_u32(f) == (uint32_t)s->tables[i]->rows.config.width && *out_match;
    }
    return good && !f->bad;
}

/* Last pushes: by worker where the workers are the same; else none is known, and numbers go on from the greatest. */
static void ddl__ps_read_sequences(ddl__ps_file *f, const ddl__ps_server *s, uint64_t *out, int32_t workers) {
    for (int32_t w = 0; w < workers; w++) {
        uint64_t sequence = ddl__ps_read_u64(f);
        if (workers == s->workers) {
            out[w] = DDL__MAX(out[w], sequence);
        }
    }
}

/* Copies what a piece of the file and a piece of ours have in common; file holds the values, then the state slots. */
static void ddl__ps_take_piece(ddl__ps_file *f, ddl__ps_place *p, int64_t begin, int64_t count, size_t slots,
                               off_t data) {
    int64_t from = DDL__MAX(begin, p->piece->begin);
    int64_t end = DDL__MIN(begin + count, p->piece->begin + p->piece->count);
    int64_t size = (int64_t)ddl_dtype_bytes(p->piece->dtype);
    for (size_t slot = 0; from < end && slot <= slots; slot++) {
        char *to = slot == 0 ? p->value->data : (char *)p->state + (slot - 1) * ddl__ps_piece_bytes(p->piece);
        off_t at = data + (off_t)(((int64_t)slot * count + from - begin) * size);
        f->bad = f->bad || fseeko(f->file, at, SEEK_SET) != 0;
        ddl__ps_read_bytes(f, to + (from - p->piece->begin) * size, (size_t)((end - from) * size));
    }
}

static void ddl__ps_read_pieces(ddl__ps_file *f, ddl__ps_server *s, uint64_t *scratch, int32_t workers) {
    size_t slots = (size_t)ddl__optim_slots(&s->optimizer);
    uint64_t pieces = ddl__ps_read_u64(f);
    for (uint64_t i = 0; i < pieces && !f->bad; i++) {
        int32_t param = (int32_t)ddl__ps_read_u32(f);
        int64_t begin = (int64_t)ddl__ps_read_u64(f), count = (int64_t)ddl__ps_read_u64(f);
        int64_t steps = (int64_t)ddl__ps_read_u64(f);
        if (param < 0 || param >= s->params) {
            f->bad = true;
            return;
        }
        memset(scratch, 0, (size_t)s->workers * sizeof *scratch);
        ddl__ps_read_sequences(f, s, scratch, workers);
        off_t data = ftello(f->file);
        for (int64_t j = 0; j < s->piece_count; j++) {
            ddl__ps_place *p = s->places[j];
            if (p != NULL && p->piece->param == param && p->piece->begin < begin + count &&
                begin < p->piece->begin + p->piece->count) {
                ddl__ps_take_piece(f, p, begin, count, slots, data);
                p->steps = steps;
                for (int32_t w = 0; w < s->workers; w++) {
                    p->sequence[w] = DDL__MAX(p->sequence[w], scratch[w]);
                }
            }
        }
        f->bad = f->bad || fseeko(f->file, data, SEEK_SET) != 0;
        ddl__ps_skip(f, (uint64_t)count * ddl_dtype_bytes(s->types[param]) * (slots + 1));
    }
}

/* False: a row of ours did not fit. */
static bool ddl__ps_read_table(ddl__ps_file *f, ddl__ps_server *s, ddl__ps_place *p, int32_t workers) {
    ddl__ps_rows *t = &p->rows;
    size_t bytes = (size_t)t->config.width * sizeof(float) * (size_t)(t->slots + 1);
    ddl__ps_read_sequences(f, s, p->sequence, workers);
    uint64_t rows = ddl__ps_read_u64(f);
    for (uint64_t i = 0; i < rows && !f->bad; i++) {
        uint64_t id = ddl__ps_read_u64(f);
        int64_t steps = (int64_t)ddl__ps_read_u64(f);
        if (ddl__ps_server_of_row(id, s->servers) != s->number) {
            ddl__ps_skip(f, bytes);
            continue;
        }
        uint32_t slot = ddl__ps_row_get(t, id, true);
        if (slot == DDL__PS_NO_ROW) {
            return false;
        }
        ddl__ps_row_at(t, slot)->steps = steps;
        ddl__ps_read_bytes(f, ddl__ps_row_values(t, slot), bytes);
    }
    return true;
}

/* >>choosing */

static int ddl__ps_newer_first(const void *a, const void *b) {
    const ddl__ps_generation *x = a, *y = b;
    if (x->order != y->order) {
        return (x->order < y->order) - (x->order > y->order);
    }
    if (x->clock != y->clock) {
        return (x->clock < y->clock) - (x->clock > y->clock);
    }
    return x->pushes != y->pushes ? (x->pushes < y->pushes) - (x->pushes > y->pushes)
                                  : (x->servers > y->servers) - (x->servers < y->servers);
}

/* The generations of which any file is there, the newest first. */
static int32_t ddl__ps_generations(const char *folder, ddl__ps_generation out[DDL__PS_GENERATIONS]) {
    DIR *dir = opendir(folder);
    int32_t count = 0;
    for (struct dirent *e = dir != NULL ? readdir(dir) : NULL; e != NULL; e = readdir(dir)) {
        ddl__ps_generation g;
        int32_t server;
        int used = 0;
        if (sscanf(e->d_name, "ddl-ps.%" SCNu64 ".%" SCNd64 ".%" SCNu64 ".%d-of-%d%n", &g.order, &g.clock, &g.pushes,
                   &server, &g.servers, &used) != 5 ||
            e->d_name[used] != 0 || g.servers < 1) {
            continue;
        }
        bool known = false;
        for (int32_t i = 0; i < count; i++) {
            known = known || ddl__ps_newer_first(&out[i], &g) == 0;
        }
        if (!known && count < DDL__PS_GENERATIONS) {
            out[count++] = g;
            qsort(out, (size_t)count, sizeof *out, ddl__ps_newer_first);
        } else if (!known && ddl__ps_newer_first(&out[count - 1], &g) > 0) {
            out[count - 1] = g; /* of very many the newest are kept */
            qsort(out, (size_t)count, sizeof *out, ddl__ps_newer_first);
        }
    }
    if (dir != NULL) {
        closedir(dir);
    }
    return count;
}

static FILE *ddl__ps_open_file(const char *folder, const ddl__ps_generation *g, int32_t server) {
    char name[DDL__PS_NAME_BYTES], path[DDL__PS_PATH_BYTES + 160];
    ddl__ps_name(name, g, server);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return fopen(path, "rbe");
}

/* Are all files of a generation there, whole, and for this model? DDL_ERR_CORRUPT: another generation may be. */
static ddl_status ddl__ps_check(const ddl__ps_server *s, const char *folder, ddl__ps_generation *g,
                                int64_t *clocks, uint64_t *sequences, ddl__text *text, ddl__sentence *why) {
    for (int32_t i = 0; i < g->servers; i++) {
        char name[DDL__PS_NAME_BYTES];
        int32_t workers;
        bool match = true;
        ddl__ps_file f = {.file = ddl__ps_open_file(folder, g, i)};
        ddl__ps_name(name, g, i);
        bool whole = f.file != NULL && ddl__ps_is_whole(f.file) &&
                     ddl__ps_read_head(&f, s, g, i, clocks, sequences, &workers, &match);
        if (!whole) {
            ddl__text_add(text, "; %s is %s", name, f.file == NULL ? "missing" : "damaged");
        }
        if (f.file != NULL) {
            fclose(f.file);
        }
        if (!whole) {
            return DDL_ERR_CORRUPT;
        }
        if (!match) {
            return ddl__fail(why, DDL_ERR_MISMATCH,
                             "%s/%s was written for other parameters, tables or another optimizer", folder, name);
        }
    }
    return DDL_OK;
}

/* Takes what is ours of all files of a generation that was checked. */
static ddl_status ddl__ps_take(ddl__ps_server *s, const char *folder, ddl__ps_generation *g, int64_t *clocks,
                               uint64_t *sequences, ddl__sentence *why) {
    for (int32_t i = 0; i < s->table_count; i++) {
        ddl__ps_rows_clear(&s->tables[i]->rows);
    }
    for (int32_t i = 0; i < g->servers; i++) {
        int32_t workers = 0;
        bool match, room = true;
        uint64_t *scratch = ddl__ps_alloc(&s->memory, (size_t)s->workers, sizeof *scratch);
        ddl__ps_file f = {.file = scratch != NULL ? ddl__ps_open_file(folder, g, i) : NULL};
        f.bad = f.file == NULL || !ddl__ps_read_head(&f, s, g, i, clocks, sequences, &workers, &match);
        if (!f.bad) {
            ddl__ps_read_pieces(&f, s, scratch, workers);
        }
        for (int32_t t = 0; !f.bad && room && t < s->table_count; t++) {
            room = ddl__ps_read_table(&f, s, s->tables[t], workers);
        }
        if (f.file != NULL) {
            fclose(f.file);
        }
        ddl__ps_free(&s->memory, scratch, (size_t)s->workers, sizeof *scratch);
        if (f.bad || !room) {
            return ddl__fail(why, room ? DDL_ERR_SYSTEM : DDL_ERR_NOMEM,
                             room ? "server %d: reading file %d of a checkpoint in %s failed midway; load again"
                                  : "server %d: the rows of file %d of a checkpoint in %s do not fit its bound",
                             s->number, i, folder);
        }
    }
    return DDL_OK;
}

/* Loads the newest generation that is whole. clocks and sequences (s->workers entries) are what the workers go on
 * with. Nothing is changed when there is none, or when it is another model's. */
static ddl_status ddl__ps_load(ddl__ps_server *s, const char *folder, int64_t *clocks, uint64_t *sequences,
                               ddl__ps_generation *out, ddl__sentence *why) {
    ddl__ps_generation found[DDL__PS_GENERATIONS];
    char wrong[200] = "";
    ddl__text text = {wrong, sizeof wrong, 0};
    int32_t count = ddl__ps_generations(folder, found);
    for (int32_t i = 0; i < count; i++) {
        ddl_status status = ddl__ps_check(s, folder, &found[i], clocks, sequences, &text, why);
        if (status == DDL_OK) {
            *out = found[i];
            return ddl__ps_take(s, folder, &found[i], clocks, sequences, why);
        }
        if (status != DDL_ERR_CORRUPT) {
            return status;
        }
    }
    return ddl__fail(why, DDL_ERR_SYSTEM, "server %d: %s holds no checkpoint that is whole (%d were looked at%s)",
                     s->number, folder, count, wrong);
}

#endif /* DDL_PS_SAVE_H */

/* train, eighth part: checkpoints. Rank 0 writes and reads; what others hold comes and goes over the group, so that a
 * checkpoint has no shards and loads onto any number of ranks. A file is whole or not there: it is written beside, made
 * durable and renamed; the one before it stays, and is used when this one is damaged.
 *
 * ddl-EPOCH-STEP.ckpt, hexadecimal and decimal: names sort by age. Numbers are little-endian, arrays as in memory:
 *     head     "ddlckpt3", order u32 (0x01020304 in memory order), epoch of the group u32, steps u64, coded steps u64,
 *              epoch of the program u64, tensors u32, slots u32, optimizer u32, crc32c u32 of all before
 *     tensor   name bytes u32, name, type u32, count u64, floats u32 (f32 arrays of count that follow the parameter),
 *              residuals u32 (f32 arrays of count, one for each rank; 0: none), q floats u64 (of PowerSGD),
 *              crc32c u32 of these, parameter, arrays (copy of a 16-bit parameter; optimizer slots; outer momentum),
 *              q, residuals by rank, crc32c u32 of all from the parameter on */
#ifndef DDL_TRAIN_CHECKPOINT_H
#define DDL_TRAIN_CHECKPOINT_H

#include "switch.h"

#include <dirent.h>
#include <fcntl.h>

enum { DDL__SAVE_KEEP = 2, DDL__SAVE_LIST = 64, DDL__SAVE_NAME = 64 };
#define DDL__SAVE_ORDER 0x01020304u

/* A file that is being written or read. The first failure stays. */
typedef struct ddl__archive {
    FILE *file;
    uint32_t crc; /* of this section so far */
    bool failed;
    char why[256];
    bool unlike; /* residuals are not used: of other ranks, or of another compression */
} ddl__archive;

/* What compression keeps of a tensor. */
typedef struct ddl__feedback {
    uint64_t residuals, q; /* ranks, floats */
} ddl__feedback;

static void __attribute__((format(printf, 2, 3))) ddl__archive_fail(ddl__archive *a, const char *format, ...) {
    if (!a->failed) {
        va_list args;
        va_start(args, format);
        vsnprintf(a->why, sizeof a->why, format, args);
        va_end(args);
        a->failed = true;
    }
}

static void ddl__archive_cannot(ddl__archive *a, const char *what) {
    ddl__archive_fail(a, "%s failed: %s; earlier checkpoints still stand", what, strerror(errno));
}

static void ddl__archive_put(ddl__archive *a, const void *data, size_t bytes) {
    if (!a->failed && bytes > 0 && fwrite(data, 1, bytes, a->file) != bytes) {
        ddl__archive_cannot(a, "writing it");
    }
    a->crc = bytes > 0 ? ddl__crc32c(a->crc, data, bytes) : a->crc;
}

/* data NULL: the bytes are only counted into the checksum. */
static void ddl__archive_get(ddl__archive *a, void *data, uint64_t bytes) {
    char block[16384];
    while (bytes > 0 && !a->failed) {
        size_t some = data != NULL ? (size_t)bytes : (size_t)DDL__MIN(bytes, (uint64_t)sizeof block);
        void *to = data != NULL ? data : block;
        if (fread(to, 1, some, a->file) != some) {
            ddl__archive_fail(a, "it ends too early");
            return;
        }
        a->crc = ddl__crc32c(a->crc, to, some);
        bytes -= some;
    }
}

static void ddl__archive_put_number(ddl__archive *a, uint64_t value, size_t bytes) {
    uint8_t wire[8];
    ddl__store_le64(wire, value);
    ddl__archive_put(a, wire, bytes);
}

static uint64_t ddl__archive_get_number(ddl__archive *a, size_t bytes) {
    uint8_t wire[8] = {0};
    ddl__archive_get(a, wire, bytes);
    return a->failed ? 0 : ddl__load_le64(wire);
}

/* Ends a section: its checksum, which is not part of itself. */
static void ddl__archive_seal(ddl__archive *a) {
    uint32_t crc = a->crc;
    ddl__archive_put_number(a, crc, 4);
    a->crc = 0;
}

static void ddl__archive_check(ddl__archive *a, const char *section) {
    uint32_t crc = a->crc;
    if (ddl__archive_get_number(a, 4) != crc) {
        ddl__archive_fail(a, "the checksum of %s is wrong", section);
    }
    a->crc = 0;
}

/* >>folder */

typedef struct ddl__saves {
    int32_t count;
    char names[DDL__SAVE_LIST][DDL__SAVE_NAME]; /* newest first */
} ddl__saves;

static bool ddl__save_name(const char *name, unsigned *epoch, long long *step) {
    int end = 0;
    return sscanf(name, "ddl-%8x-%12lld.ckpt%n", epoch, step, &end) == 2 && end > 0 && name[end] == '\0' &&
           strlen(name) < DDL__SAVE_NAME;
}

/* Puts a name in its place. Of more than the list holds the newest stay. */
static void ddl__saves_add(ddl__saves *list, const char *name) {
    int32_t at = list->count, kept = DDL__MIN(list->count, DDL__SAVE_LIST - 1);
    while (at > 0 && strcmp(list->names[at - 1], name) < 0) {
        at--;
    }
    if (at < DDL__SAVE_LIST) {
        memmove(list->names[at + 1], list->names[at], (size_t)(kept - at) * DDL__SAVE_NAME);
        snprintf(list->names[at], DDL__SAVE_NAME, "%.*s", DDL__SAVE_NAME - 1, name);
        list->count = kept + 1;
    }
}

/* The newest checkpoints of a folder that are older than `before` (NULL: of all). Those that the list has no room for
 * come with the last of it as `before`. */
static bool ddl__saves_read(const char *folder, const char *before, ddl__saves *out) {
    unsigned epoch;
    long long step;
    DIR *dir = opendir(folder);
    out->count = 0;
    if (dir == NULL) {
        return false;
    }
    for (struct dirent *e = readdir(dir); e != NULL; e = readdir(dir)) {
        if (ddl__save_name(e->d_name, &epoch, &step) && (before == NULL || strcmp(e->d_name, before) < 0)) {
            ddl__saves_add(out, e->d_name);
        }
    }
    closedir(dir);
    return true;
}

static bool ddl__sync_path(const char *path, int flags) {
    int fd = open(path, flags | O_CLOEXEC);
    bool good = fd >= 0 && fsync(fd) == 0;
    int saved = errno;
    if (fd >= 0) {
        close(fd);
    }
    errno = saved;
    return good;
}

/* >>what is in it */

/* Arrays that a tensor has beside the parameter: of f32, or f64 of f64 parameters. */
static int32_t ddl__save_floats(const ddl_trainer *t, const ddl__weight *w) {
    return (w->master != NULL) + (w->state != NULL ? ddl__optim_slots(&t->optimizer) : 0) + (w->momentum != NULL);
}

/* The own part of the k-th of them. */
static void *ddl__save_array(const ddl_trainer *t, const ddl__weight *w, int32_t k) {
    int32_t slots = w->state != NULL ? ddl__optim_slots(&t->optimizer) : 0;
    if (w->master != NULL && k-- == 0) {
        return w->master;
    }
    return k < slots ? (char *)w->state + (size_t)(k * w->own_count) * ddl__weight_size(w) : (char *)w->momentum;
}

static ddl__feedback ddl__save_kept(const ddl_trainer *t, const ddl__weight *w) {
    const ddl__compressor *s = w->compressor;
    ddl__feedback none = {0, 0};
    return s == NULL ? none : (ddl__feedback){s->residual != NULL ? (uint64_t)t->size : 0, (uint64_t)s->q_count};
}

/* What lies on the lane, in ordinary memory: there it is, or room gets it. A failure is in *status. */
static const void *ddl__save_bytes(ddl_trainer *t, const void *data, size_t bytes, void *room, ddl_status *status) {
    if (ddl__lane_is_host(&t->lane)) {
        return data;
    }
    ddl__lane_copy(&t->lane, room, data, bytes);
    ddl_status waited = ddl__lane_wait(&t->lane, "ddl_trainer_save");
    *status = *status < 0 ? *status : waited;
    return room;
}

static void ddl__save_head(ddl__archive *a, const ddl_trainer *t, int64_t epoch) {
    uint32_t order = DDL__SAVE_ORDER;
    ddl__archive_put(a, "ddlckpt3", 8);
    ddl__archive_put(a, &order, 4);
    ddl__archive_put_number(a, t->group->epoch, 4);
    ddl__archive_put_number(a, (uint64_t)t->stats.steps, 8);
    ddl__archive_put_number(a, (uint64_t)t->coded, 8);
    ddl__archive_put_number(a, (uint64_t)epoch, 8);
    ddl__archive_put_number(a, (uint64_t)t->count, 4);
    ddl__archive_put_number(a, (uint64_t)ddl__optim_slots(&t->optimizer), 4);
    ddl__archive_put_number(a, t->config.step != NULL ? UINT32_MAX : (uint64_t)t->optimizer.kind, 4);
    ddl__archive_seal(a);
}

static void ddl__save_weight_head(ddl__archive *a, const ddl_trainer *t, const ddl__weight *w) {
    ddl__feedback kept = ddl__save_kept(t, w);
    ddl__archive_put_number(a, strlen(w->name), 4);
    ddl__archive_put(a, w->name, strlen(w->name));
    ddl__archive_put_number(a, (uint64_t)w->param.dtype, 4);
    ddl__archive_put_number(a, (uint64_t)w->count, 8);
    ddl__archive_put_number(a, (uint64_t)ddl__save_floats(t, w), 4);
    ddl__archive_put_number(a, kept.residuals, 4);
    ddl__archive_put_number(a, kept.q, 8);
    ddl__archive_seal(a);
}

/* q is the same on all ranks; residuals come to rank 0 one by one, so that it needs no more room than for one. */
static ddl_status ddl__save_compression(ddl_trainer *t, ddl__weight *w, ddl__archive *a, float *temporary) {
    ddl__feedback kept = ddl__save_kept(t, w);
    ddl_status status = DDL_OK;
    size_t bytes = (size_t)w->count * sizeof(float);
    if (a != NULL && kept.q > 0) {
        size_t q_bytes = (size_t)kept.q * sizeof(float);
        ddl__archive_put(a, ddl__save_bytes(t, w->compressor->q, q_bytes, temporary, &status), q_bytes);
    }
    for (int32_t r = 0; r < (int32_t)kept.residuals; r++) {
        const float *residual = w->compressor->residual;
        const ddl__lane *lane = w->compressor->lane;
        if (r > 0 && t->rank == r) {
            DDL__TRY(ddl_send(t->group, ddl__lane_tensor(lane, residual, DDL_F32, w->count), 0, 0));
        }
        if (r > 0 && a != NULL) {
            DDL__TRY(ddl_recv(t->group, ddl_tensor_1d(temporary, DDL_F32, w->count), r, 0, NULL));
        }
        if (a != NULL && r == 0) {
            residual = ddl__save_bytes(t, residual, bytes, temporary, &status);
        }
        if (a != NULL) {
            ddl__archive_put(a, r == 0 ? residual : temporary, bytes);
        }
    }
    return status;
}

/* One tensor. Every rank calls; a is NULL but on rank 0, which needs temporary for what the others have. */
static ddl_status ddl__save_weight(ddl_trainer *t, ddl__weight *w, ddl__archive *a, float *temporary) {
    int32_t floats = ddl__save_floats(t, w);
    ddl_status status = DDL_OK;
    size_t bytes = (size_t)w->count * ddl_dtype_bytes(w->param.dtype);
    if (a != NULL) {
        ddl__save_weight_head(a, t, w);
        ddl__archive_put(a, ddl__save_bytes(t, w->param.data, bytes, temporary, &status), bytes);
    }
    for (int32_t k = 0; k < floats; k++) {
        const void *whole = ddl__save_array(t, w, k);
        if (t->config.shard) {
            int64_t begin;
            for (int32_t r = 0; r < t->size; r++) {
                ddl__weight_share(t, w, r, &begin, &t->shares[r]);
            }
            DDL__TRY(ddl_gatherv(t->group, ddl__lane_tensor(&t->lane, whole, ddl__weight_type(w), w->own_count),
                                 ddl_tensor_1d(temporary, ddl__weight_type(w), w->count), t->shares, NULL, 0));
            whole = temporary;
        } else if (a != NULL) {
            whole = ddl__save_bytes(t, whole, (size_t)w->count * ddl__weight_size(w), temporary, &status);
        }
        if (a != NULL) {
            ddl__archive_put(a, whole, (size_t)w->count * ddl__weight_size(w));
        }
    }
    ddl_status kept = ddl__save_compression(t, w, a, temporary);
    if (a != NULL) {
        ddl__archive_seal(a);
    }
    return kept < 0 ? kept : status;
}

/* >>agreement */

/* Rank 0's outcome, told to all with its sentence. The lock is not held. */
static ddl_status ddl__save_outcome(ddl_trainer *t, const char *what, ddl_status status, const char *why) {
    struct {
        int64_t status;
        char why[512];
    } told = {.status = status};
    snprintf(told.why, sizeof told.why, "%s", why);
    DDL__TRY(ddl_broadcast(t->group, ddl_tensor_1d(&told, DDL_U8, sizeof told), 0));
    if (told.status >= 0) {
        return DDL_OK;
    }
    char line[DDL__SENTENCE_BYTES];
    told.why[sizeof told.why - 1] = '\0';
    snprintf(line, sizeof line, "%s: on rank 0 %s", what, told.why);
    return ddl__trainer_say(t, (ddl_status)told.status, line);
}

/* Room for the largest tensor in f32, or f64 where there are such, on all ranks or on none. */
static ddl_status ddl__save_room(ddl_trainer *t, const char *what, float **out) {
    size_t most = 1;
    for (int32_t i = 0; i < t->count; i++) {
        most = DDL__MAX(most, (size_t)t->weights[i].count * ddl__weight_size(&t->weights[i]));
    }
    *out = malloc(most);
    double good = *out != NULL;
    ddl_status status = ddl_all_reduce_scalar(t->group, &good, DDL_MIN);
    if (status == DDL_OK && good < 1) {
        char line[128];
        snprintf(line, sizeof line, "%s: a rank has no memory for one tensor", what);
        status = ddl__trainer_say(t, DDL_ERR_NOMEM, line);
    }
    if (status < 0) {
        free(*out);
    }
    return status;
}

/* >>saving */

/* A checkpoint must not hide a later one by accident: one of a later epoch never, one of later steps only after this
 * folder's newest sound one was loaded. */
static bool ddl__save_allowed(const ddl_trainer *t, const char *folder, char *why, size_t bytes) {
    ddl__saves list;
    unsigned epoch;
    long long step;
    if (!ddl__saves_read(folder, NULL, &list)) {
        snprintf(why, bytes, "the folder \"%s\" cannot be read: %s", folder, strerror(errno));
        return false;
    }
    for (int32_t i = 0; i < list.count; i++) {
        if (!ddl__save_name(list.names[i], &epoch, &step)) {
            continue;
        }
        bool later = step > t->stats.steps && !t->loaded;
        if (epoch > t->group->epoch || (epoch == t->group->epoch && later)) {
            snprintf(why, bytes,
                     "\"%s\" holds a checkpoint of epoch %u and step %lld, later than epoch %u and step %lld "
                     "here; load it, or name another folder",
                     folder, epoch, step, t->group->epoch, (long long)t->stats.steps);
            return false;
        }
    }
    return true;
}

/* What is left of attempts that died, and all but the newest few of this run. */
static void ddl__save_prune(const ddl_trainer *t, const char *folder) {
    ddl__saves list = {0};
    char path[4096], last[DDL__SAVE_NAME];
    unsigned epoch;
    long long step;
    int32_t kept = 0;
    do {
        snprintf(last, sizeof last, "%s", list.count > 0 ? list.names[list.count - 1] : "");
        ddl__saves_read(folder, list.count > 0 ? last : NULL, &list);
        for (int32_t i = 0; i < list.count; i++) {
            bool future = ddl__save_name(list.names[i], &epoch, &step) && step > t->stats.steps;
            kept += !future;
            if (future || kept > DDL__SAVE_KEEP) {
                snprintf(path, sizeof path, "%s/%s", folder, list.names[i]);
                unlink(path);
            }
        }
    } while (list.count == DDL__SAVE_LIST);
}

/* Durable under its name, or not there. */
static void ddl__save_finish(ddl__archive *a, const char *folder, const char *temporary, const char *path) {
    if (a->file == NULL) {
        return;
    }
    if (!a->failed && (fflush(a->file) != 0 || fsync(fileno(a->file)) != 0)) {
        ddl__archive_cannot(a, "making it durable");
    }
    if (fclose(a->file) != 0) {
        ddl__archive_cannot(a, "closing it");
    }
    if (!a->failed && rename(temporary, path) != 0) {
        ddl__archive_cannot(a, "renaming it");
    }
    if (!a->failed && !ddl__sync_path(folder, O_RDONLY | O_DIRECTORY)) {
        ddl__archive_cannot(a, "making its name durable");
    }
    if (a->failed) {
        unlink(temporary);
    }
}

static ddl_status ddl__save_all(ddl_trainer *t, const char *folder, float *room) {
    char temporary[4096], path[4096];
    ddl__archive archive = {0}, *a = t->rank == 0 ? &archive : NULL;
    int64_t epoch = t->stats.epoch;
    DDL__TRY(ddl_all_reduce(t->group, DDL_VIEW(&epoch, 1), DDL_VIEW(&epoch, 1), DDL_MAX));
    snprintf(path, sizeof path, "%s/ddl-%08x-%012lld.ckpt", folder, t->group->epoch, (long long)t->stats.steps);
    snprintf(temporary, sizeof temporary, "%s/ddl.tmp.%d.%u", folder, t->rank, t->group->epoch);
    if (a != NULL && ddl__save_allowed(t, folder, a->why, sizeof a->why)) {
        a->file = fopen(temporary, "wbe");
    } else if (a != NULL) {
        a->failed = true;
    }
    if (a != NULL && a->file == NULL) {
        ddl__archive_fail(a, "the file %s cannot be made: %s", temporary, strerror(errno));
    }
    if (a != NULL) {
        ddl__save_head(a, t, epoch);
    }
    ddl_status status = DDL_OK;
    for (int32_t i = 0; i < t->count && status == DDL_OK; i++) { /* also after a failure here: others send shards */
        status = ddl__save_weight(t, &t->weights[i], a, room);
    }
    if (a != NULL && status < 0) {
        ddl__archive_fail(a, "a rank did not send its part");
    }
    if (a != NULL) {
        ddl__save_finish(a, folder, temporary, path);
    }
    if (a != NULL && !a->failed) {
        ddl__save_prune(t, folder);
    }
    DDL__TRY(status);
    return ddl__save_outcome(t, "ddl_trainer_save", archive.failed ? DDL_ERR_SYSTEM : DDL_OK, archive.why);
}

/* Between two steps; local SGD synchronises first. The lock is not held after this. */
static ddl_status ddl__save_enter(ddl_trainer *t, const char *what, const char *folder, bool sync) {
    DDL__TRY(ddl__trainer_enter(t, what));
    ddl_status status = DDL_OK;
    if (folder == NULL || strlen(folder) > 3900) {
        status = ddl__error(t->context, DDL_ERR_ARG, "%s: folder is NULL or too long", what);
    } else if (t->step_open || t->over) {
        status = ddl__step_under_way(t, what);
    } else if (sync && t->config.sync == DDL_SYNC_LOCAL && t->since_sync > 0) {
        status = ddl__sync_round(t, what, true);
    }
    DDL__TRY(ddl__trainer_leave(t, status));
    return ddl__lane_wait(&t->lane, what); /* operations on arrays of the lane are not ordered with it */
}

/* >>servers: they have the parameters, and their files (ps/save.h) take the place of rank 0's. */

static ddl_status ddl__served_load(ddl_trainer *t, const char *folder, int64_t *out_step) {
    ddl__ps_generation found[DDL__PS_GENERATIONS];
    double any = ddl__ps_generations(folder, found), lacks = access(folder, R_OK | X_OK) == 0 ? t->size : t->rank;
    ddl_ps *ps = t->served.ps;
    *out_step = -1;
    DDL__TRY(ddl_all_reduce_scalar(t->group, &lacks, DDL_MIN));
    DDL__TRY(ddl_all_reduce_scalar(t->group, &any, DDL_MAX));
    if (lacks < t->size) {
        char line[DDL__SENTENCE_BYTES];
        snprintf(line, sizeof line,
                 "ddl_trainer_load: on rank %d the folder \"%.600s\" cannot be read; it must be there, and be one that "
                 "all servers and workers share",
                 (int)lacks, folder);
        return ddl__trainer_say(t, DDL_ERR_SYSTEM, line);
    }
    if (any == 0) {
        return DDL_OK; /* an empty folder */
    }
    DDL__TRY(ddl_ps_load(ps, folder));
    DDL__TRY(ddl__enter(t->context));
    for (int32_t i = 0; i < t->count; i++) { /* what the codes of another run have missed is nothing to this one */
        if (t->weights[i].residual != NULL) {
            memset(t->weights[i].residual, 0, (size_t)t->weights[i].count * sizeof(float));
        }
    }
    ddl__unlock(t->context);
    ddl_status status = ddl__served_pull(t, "ddl_trainer_load", 0, ps->piece_count);
    status = status < 0 ? status : ddl__weights_update(t, 0, t->count - 1);
    status = status < 0 ? status : ddl__lane_wait(&t->lane, "ddl_trainer_load");
    if (status == DDL_OK) {
        *out_step = t->stats.steps = t->coded = ps->clock;
        t->stats.epoch = ps->epoch;
    }
    return status;
}

static ddl_status ddl__trainer_save(ddl_trainer *t, const char *folder) {
    const char *what = "ddl_trainer_save";
    float *room;
    DDL__TRY(ddl__save_enter(t, what, folder, true));
    if (ddl__trainer_hands_over(t)) {
        t->served.ps->epoch = t->stats.epoch;
        return ddl_ps_save(t->served.ps, folder);
    }
    DDL__TRY(ddl__save_room(t, what, &room));
    ddl_status status = ddl__save_all(t, folder, room);
    free(room);
    return status;
}

DDL_API ddl_status ddl_trainer_save(ddl_trainer *trainer, const char *folder) {
    DDL__TRY(ddl__trainer_hold(trainer, "ddl_trainer_save"));
    return ddl__trainer_let_go(trainer, ddl__trainer_save(trainer, folder));
}

/* >>loading */

/* Reads a tensor's head and compares it. Returns what follows for compression. */
static ddl__feedback ddl__load_check(ddl__archive *a, const ddl_trainer *t, const ddl__weight *w, bool *other) {
    char name[128] = "";
    ddl__feedback kept = {0, 0};
    uint64_t length = ddl__archive_get_number(a, 4);
    if (length >= sizeof name) {
        ddl__archive_fail(a, "the name of tensor %d is too long", (int)(w - t->weights));
        return kept;
    }
    ddl__archive_get(a, name, length);
    uint64_t dtype = ddl__archive_get_number(a, 4), count = ddl__archive_get_number(a, 8);
    uint64_t floats = ddl__archive_get_number(a, 4);
    kept.residuals = ddl__archive_get_number(a, 4);
    kept.q = ddl__archive_get_number(a, 8);
    ddl__archive_check(a, "the head of a tensor");
    if (!a->failed && (strcmp(name, w->name) != 0 || dtype != (uint64_t)w->param.dtype || count != (uint64_t)w->count ||
                       floats != (uint64_t)ddl__save_floats(t, w))) {
        *other = true;
        ddl__archive_fail(
            a,
            "it has \"%s\" (type %d, %llu elements, %llu arrays) where \"%s\" (type %d, %lld elements, %d "
            "arrays) is registered",
            name, (int)dtype, (unsigned long long)count, (unsigned long long)floats, w->name, (int)w->param.dtype,
            (long long)w->count, ddl__save_floats(t, w));
    }
    return kept;
}

/* Reads the head; the number of steps, or -1. counts: coded steps, and the program's epoch. */
static int64_t ddl__load_head(ddl__archive *a, const ddl_trainer *t, bool *other, int64_t counts[2]) {
    char magic[8];
    uint32_t order = 0;
    ddl__archive_get(a, magic, sizeof magic);
    ddl__archive_get(a, &order, 4);
    ddl__archive_get_number(a, 4); /* epoch: it is in the name too */
    int64_t steps = (int64_t)ddl__archive_get_number(a, 8);
    counts[0] = (int64_t)ddl__archive_get_number(a, 8);
    counts[1] = (int64_t)ddl__archive_get_number(a, 8);
    uint64_t count = ddl__archive_get_number(a, 4), slots = ddl__archive_get_number(a, 4);
    uint64_t kind = ddl__archive_get_number(a, 4);
    ddl__archive_check(a, "its head");
    uint64_t mine = t->config.step != NULL ? UINT32_MAX : (uint64_t)t->optimizer.kind;
    if (!a->failed && (memcmp(magic, "ddlckpt3", 8) != 0 || order != DDL__SAVE_ORDER)) {
        ddl__archive_fail(a, "it is no checkpoint of this version and byte order");
    }
    if (!a->failed &&
        (count != (uint64_t)t->count || kind != mine || slots != (uint64_t)ddl__optim_slots(&t->optimizer))) {
        *other = true;
        ddl__archive_fail(a, "it has %d tensors of optimizer %d, the trainer %d of optimizer %d", (int)count, (int)kind,
                          t->count, (int)mine);
    }
    return a->failed ? -1 : steps;
}

/* Reads a whole file without using it. Returns its steps; -1: damaged, or (*other) sound but of another model. */
static int64_t ddl__load_verify(ddl__archive *a, const ddl_trainer *t, bool *other) {
    int64_t counts[2];
    *other = false;
    int64_t steps = ddl__load_head(a, t, other, counts);
    for (int32_t i = 0; i < t->count && !a->failed; i++) {
        const ddl__weight *w = &t->weights[i];
        ddl__feedback kept = ddl__load_check(a, t, w, other);
        ddl__archive_get(a, NULL, (uint64_t)w->count * ddl_dtype_bytes(w->param.dtype));
        ddl__archive_get(a, NULL, (uint64_t)w->count * ddl__weight_size(w) * (uint64_t)ddl__save_floats(t, w));
        ddl__archive_get(a, NULL, kept.q * sizeof(float) + kept.residuals * (uint64_t)w->count * sizeof(float));
        ddl__archive_check(a, w->name);
    }
    if (!a->failed && fgetc(a->file) != EOF) {
        ddl__archive_fail(a, "something follows its end");
    }
    return a->failed ? -1 : steps;
}

/* A file that cannot be used: why it is said, and logged. */
static void ddl__load_pass_over(ddl_trainer *t, ddl__archive *a, const char *path, const char *name) {
    char why[256];
    if (a->file != NULL) {
        fclose(a->file);
        a->file = NULL;
    }
    ddl__lock(t->context);
    ddl__log(&t->context->base, DDL_LOG_WARN, "checkpoint %s is not used: %s", path, a->why);
    ddl__unlock(t->context);
    snprintf(why, sizeof why, "%s: %.180s", name, a->why);
    snprintf(a->why, sizeof a->why, "%s", why);
}

/* The newest sound file, open at its beginning; file NULL: there is none, and why says what was found. */
static int64_t ddl__load_choose(ddl_trainer *t, const char *folder, ddl__archive *a, ddl_status *out_status) {
    ddl__saves list = {0};
    char path[4096], last[DDL__SAVE_NAME];
    bool other = false;
    *out_status = DDL_OK;
    do {
        snprintf(last, sizeof last, "%s", list.count > 0 ? list.names[list.count - 1] : "");
        if (!ddl__saves_read(folder, list.count > 0 ? last : NULL, &list)) {
            *out_status = DDL_ERR_SYSTEM;
            ddl__archive_fail(a, "the folder \"%s\" cannot be read: %s", folder, strerror(errno));
            return -1;
        }
        for (int32_t i = 0; i < list.count && !other; i++) { /* another model's: an older one would be no better */
            *a = (ddl__archive){0};
            snprintf(path, sizeof path, "%s/%s", folder, list.names[i]);
            a->file = fopen(path, "rbe");
            if (a->file == NULL) {
                ddl__archive_fail(a, "it cannot be opened: %s", strerror(errno));
            }
            int64_t steps = a->file != NULL ? ddl__load_verify(a, t, &other) : -1;
            if (steps >= 0) {
                rewind(a->file);
                return steps;
            }
            *out_status = other ? DDL_ERR_MISMATCH : DDL_ERR_CORRUPT;
            ddl__load_pass_over(t, a, path, list.names[i]);
        }
    } while (list.count == DDL__SAVE_LIST && !other);
    return -1;
}

/* What compression has kept, where it is of the same number of ranks and the same compression; else it begins anew. */
static ddl_status ddl__load_compression(ddl_trainer *t, ddl__weight *w, ddl__archive *a, const ddl__feedback *kept,
                                        float *room) {
    ddl__feedback mine = ddl__save_kept(t, w);
    uint8_t same = a != NULL && kept->residuals == mine.residuals && kept->q == mine.q;
    if (a != NULL && !same) {
        ddl__archive_get(a, NULL, kept->q * sizeof(float) + kept->residuals * (uint64_t)w->count * sizeof(float));
        a->unlike = true;
    }
    if (w->compressor == NULL) {
        return DDL_OK;
    }
    ddl__compression_reset(w);
    DDL__TRY(ddl__lane_wait(&t->lane, "ddl_trainer_load"));
    DDL__TRY(ddl_broadcast(t->group, ddl_tensor_1d(&same, DDL_U8, 1), 0));
    if (!same) {
        return DDL_OK;
    }
    if (mine.q > 0) {
        if (a != NULL) {
            ddl__archive_get(a, room, mine.q * sizeof(float));
            ddl__lane_copy(&t->lane, w->compressor->q, room, mine.q * sizeof(float));
            DDL__TRY(ddl__lane_wait(&t->lane, "ddl_trainer_load"));
        }
        DDL__TRY(ddl_broadcast(t->group, ddl__lane_tensor(&t->lane, w->compressor->q, DDL_F32, (int64_t)mine.q), 0));
    }
    for (int32_t r = 0; r < (int32_t)mine.residuals; r++) {
        if (a != NULL) {
            ddl__archive_get(a, room, (uint64_t)w->count * sizeof(float));
        }
        if (r == 0 && a != NULL) {
            ddl__lane_copy(w->compressor->lane, w->compressor->residual, room, (size_t)w->count * sizeof(float));
            DDL__TRY(ddl__lane_wait(w->compressor->lane, "ddl_trainer_load"));
        }
        if (r > 0 && a != NULL) {
            DDL__TRY(ddl_send(t->group, ddl_tensor_1d(room, DDL_F32, w->count), r, 0));
        }
        if (r > 0 && t->rank == r) {
            ddl_tensor residual = ddl__lane_tensor(w->compressor->lane, w->compressor->residual, DDL_F32, w->count);
            DDL__TRY(ddl_recv(t->group, residual, 0, 0, NULL));
        }
    }
    return DDL_OK;
}

/* One tensor from rank 0's file to all. */
static ddl_status ddl__load_weight(ddl_trainer *t, ddl__weight *w, ddl__archive *a, float *room) {
    bool other;
    size_t size = ddl__weight_size(w);
    ddl__feedback kept = {0, 0};
    if (a != NULL) {
        kept = ddl__load_check(a, t, w, &other);
        uint64_t bytes = (uint64_t)w->count * ddl_dtype_bytes(w->param.dtype);
        void *to = ddl__lane_is_host(&t->lane) ? w->param.data : room;
        ddl__archive_get(a, to, bytes);
        ddl__lane_copy(&t->lane, w->param.data, to, (size_t)bytes);
        DDL__TRY(ddl__lane_wait(&t->lane, "ddl_trainer_load"));
    }
    DDL__TRY(ddl_broadcast(t->group, w->param, 0));
    for (int32_t k = 0; k < ddl__save_floats(t, w); k++) {
        if (a != NULL) {
            ddl__archive_get(a, room, (uint64_t)w->count * size);
        }
        DDL__TRY(ddl_broadcast(t->group, ddl_tensor_1d(room, ddl__weight_type(w), w->count), 0));
        ddl__lane_copy(&t->lane, ddl__save_array(t, w, k), (char *)room + (size_t)w->own_begin * size,
                       (size_t)w->own_count * size);
        DDL__TRY(ddl__lane_wait(&t->lane, "ddl_trainer_load"));
    }
    DDL__TRY(ddl__load_compression(t, w, a, &kept, room));
    if (a != NULL) {
        ddl__archive_check(a, w->name);
    }
    return DDL_OK;
}

/* All tensors. When this fails some are new and some old: the trainer cannot go on. */
static ddl_status ddl__load_weights(ddl_trainer *t, ddl__archive *a, float *room) {
    bool other;
    int64_t counts[2] = {0, 0};
    if (a != NULL) {
        ddl__load_head(a, t, &other, counts);
    }
    ddl_status status = ddl_broadcast(t->group, DDL_VIEW(counts, 2), 0);
    t->coded = counts[0];
    t->stats.epoch = counts[1];
    for (int32_t i = 0; i < t->count && status == DDL_OK; i++) {
        status = ddl__load_weight(t, &t->weights[i], a, room);
    }
    bool failed = a != NULL && a->failed;
    status = status < 0
                 ? status
                 : ddl__save_outcome(t, "ddl_trainer_load", failed ? DDL_ERR_CORRUPT : DDL_OK, failed ? a->why : "");
    if (status < 0) {
        ddl__lock(t->context);
        ddl__trainer_break(t, status);
        ddl__unlock(t->context);
    }
    return status;
}

/* a: on rank 0 what the file is kept in, which the caller closes; else NULL. */
static ddl_status ddl__load_all(ddl_trainer *t, const char *folder, float *room, ddl__archive *a, int64_t *out_step) {
    ddl_status status = DDL_OK;
    int64_t steps = a != NULL ? ddl__load_choose(t, folder, a, &status) : -1;
    DDL__TRY(
        ddl__save_outcome(t, "ddl_trainer_load", a != NULL && steps < 0 ? status : DDL_OK, a != NULL ? a->why : ""));
    DDL__TRY(ddl_broadcast(t->group, ddl_tensor_1d(&steps, DDL_I64, 1), 0));
    *out_step = steps;
    if (steps < 0) {
        return DDL_OK; /* an empty folder */
    }
    DDL__TRY(ddl__load_weights(t, a, room));
    if (a != NULL && a->unlike) {
        ddl__lock(t->context);
        ddl__log(&t->context->base, DDL_LOG_INFO,
                 "the checkpoint in %s is of another number of ranks than %d, or of another compression: the residuals "
                 "of compressed gradients begin at zero",
                 folder, t->size);
        ddl__unlock(t->context);
    }
    t->stats.steps = steps;
    t->since_sync = 0;
    t->loaded = true;
    return DDL_OK;
}

static ddl_status ddl__trainer_load(ddl_trainer *t, const char *folder, int64_t *out_step) {
    const char *what = "ddl_trainer_load";
    float *room;
    int64_t step = -1;
    ddl__archive archive = {0};
    DDL__TRY(ddl__save_enter(t, what, folder, false));
    ddl_status status = DDL_OK;
    if (ddl__trainer_hands_over(t)) {
        status = ddl__served_load(t, folder, &step);
    } else {
        DDL__TRY(ddl__save_room(t, what, &room));
        status = ddl__load_all(t, folder, room, t->rank == 0 ? &archive : NULL, &step);
        free(room);
    }
    if (archive.file != NULL) {
        fclose(archive.file);
    }
    if (out_step != NULL) {
        *out_step = status == DDL_OK ? step : -1;
    }
    return status;
}

DDL_API ddl_status ddl_trainer_load(ddl_trainer *trainer, const char *folder, int64_t *out_step) {
    DDL__TRY(ddl__trainer_hold(trainer, "ddl_trainer_load"));
    return ddl__trainer_let_go(trainer, ddl__trainer_load(trainer, folder, out_step));
}

#endif /* DDL_TRAIN_CHECKPOINT_H */

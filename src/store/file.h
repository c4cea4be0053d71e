/* file: the rendezvous through a folder that all ranks share, NFS included: no locks, no sockets; a file appears by
 * being renamed.
 *
 *     <folder>/ddl-<job>-<hash>/rank.<r>   written by rank r: its nonce, the table's nonce it has seen, its blob
 *     <folder>/ddl-<job>-<hash>/table      written by rank 0: its nonce, and of each rank the nonce and the blob
 *
 * Files of a run that died look like those of this one, the job's name does not tell them apart, and clocks differ. So
 * freshness is shown by echo. Rank 0 draws a nonce and puts up an empty table with it; a rank answers by writing that
 * nonce into its file beside its own. Rank 0 counts only files with its nonce: their writers live. A rank believes only
 * a table with its own nonce in its place: its writer has read the file of this run. When all have answered, rank 0
 * completes the table; its state tells whether it is open, complete or failed. Whoever misses its file writes it again,
 * so that a late clean-up of an earlier run does no harm.
 *
 *     0  magic "ddlf", version u16, state u16, world u32, blob bytes u32, job u64, nonce [16]
 *    40  rank's file: nonce of the table [16], blob
 *    40  table: text [1024], then of each rank: nonce [16], blob
 *    end HMAC-SHA256 of all before it; the key is the job secret, or empty: then it is a checksum
 */
#ifndef DDL_STORE_FILE_H
#define DDL_STORE_FILE_H

#include "listen.h"

#define DDL__FILE_MAGIC 0x666c6464u
#define DDL__FILE_HEAD 40
#define DDL__FILE_NONCE 16
#define DDL__FILE_MAC 32
#define DDL__FILE_VERSION 1
#define DDL__FILE_LINGER_NS (1 * DDL__NS_PER_S) /* of rank 0, for the others to take their files away */

enum ddl__file_state { DDL__FILE_RANK, DDL__FILE_OPEN, DDL__FILE_COMPLETE, DDL__FILE_FAILED };

typedef struct ddl__file {
    const ddl__settings *settings;
    ddl__base *base;
    ddl__sentence *why;
    size_t blob_bytes, slot_bytes, table_bytes; /* of a slot of the table, of the table's file */
    uint64_t start_ns, deadline_ns;
    int folder; /* descriptor of the job's folder */
    char path[1024], name[128];
    uid_t owner; /* of files that this process writes, as the file system sees it */
    uint8_t nonce[DDL__FILE_NONCE], seen[DDL__FILE_NONCE];
    ddl__hmac_key key;
    uint8_t *table, *scratch; /* both of table_bytes */
    uint8_t *ranks;           /* rank 0: enum ddl__rank_state */
} ddl__file;

static size_t ddl__file_rank_bytes(const ddl__file *f) {
    return DDL__FILE_HEAD + DDL__FILE_NONCE + f->blob_bytes + DDL__FILE_MAC;
}

static uint8_t *ddl__file_slot(const ddl__file *f, uint8_t *table, int32_t rank) {
    return table + DDL__FILE_HEAD + DDL__SENTENCE_BYTES + (size_t)rank * f->slot_bytes;
}

static void ddl__file_head(const ddl__file *f, uint16_t state, const uint8_t nonce[DDL__FILE_NONCE], uint8_t *out) {
    ddl__writer w = ddl__writer_of(out, DDL__FILE_HEAD);
    ddl__put_u32(&w, DDL__FILE_MAGIC);
    ddl__put_u16(&w, DDL__FILE_VERSION);
    ddl__put_u16(&w, state);
    ddl__put_u32(&w, (uint32_t)f->settings->launch.world);
    ddl__put_u32(&w, (uint32_t)f->blob_bytes);
    ddl__put_u64(&w, f->settings->job_id);
    ddl__put_bytes(&w, nonce, DDL__FILE_NONCE);
}

/* The label keeps one rank's file from serving as another's. */
static void ddl__file_mac(const ddl__file *f, const char *name, const uint8_t *bytes, size_t count, uint8_t out[32]) {
    ddl__sha256 h;
    ddl__hmac_begin(&h, &f->key);
    ddl__sha256_update(&h, name, strlen(name) + 1);
    ddl__sha256_update(&h, bytes, count);
    ddl__hmac_end(&h, &f->key, out);
}

static ddl_status ddl__file_error(const ddl__file *f, const char *what) {
    return ddl__fail(f->why, DDL_ERR_SYSTEM, "ddl_init: rank %d cannot %s in %.300s/%s (%s): %s",
                     f->settings->launch.rank, what, f->path, f->name, f->settings->place.from, strerror(errno));
}

static bool ddl__file_put(int fd, const uint8_t *bytes, size_t count) {
    while (count > 0) {
        ssize_t n = write(fd, bytes, count);
        if (n < 0 && errno != EINTR) {
            return false;
        }
        bytes += n > 0 ? n : 0;
        count -= n > 0 ? (size_t)n : 0;
    }
    return true;
}

/* Opens the job's folder, and makes it when it is not there (or not any more). */
static ddl_status ddl__file_open_folder(ddl__file *f) {
    int parent = open(f->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (parent < 0) {
        return ddl__file_error(f, "open the folder");
    }
    int folder = -1;
    if (mkdirat(parent, f->name, 0700) == 0 || errno == EEXIST) {
        folder = openat(parent, f->name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    }
    int error = errno;
    close(parent);
    if (f->folder >= 0) {
        close(f->folder);
    }
    f->folder = folder;
    errno = error;
    return folder >= 0 ? DDL_OK : ddl__file_error(f, "make a folder");
}

/* Writes a file whole or not at all. bytes has room for the MAC at its end. */
static ddl_status ddl__file_write(ddl__file *f, const char *name, uint8_t *bytes, size_t count) {
    char temporary[64];
    struct stat info;
    snprintf(temporary, sizeof temporary, ".%s.%02x%02x%02x%02x", name, f->nonce[0], f->nonce[1], f->nonce[2],
             f->nonce[3]);
    ddl__file_mac(f, name, bytes, count - DDL__FILE_MAC, bytes + count - DDL__FILE_MAC);
    for (int tries = 0; tries < 3; tries++) {
        int fd = openat(f->folder, temporary, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
        bool done = fd >= 0 && ddl__file_put(fd, bytes, count) && fstat(fd, &info) == 0;
        if (fd >= 0) {
            done = close(fd) == 0 && done; /* NFS reports a full disk here */
        }
        if (done && renameat(f->folder, temporary, f->folder, name) == 0) {
            f->owner = info.st_uid;
            return DDL_OK;
        }
        if (errno != ENOENT && errno != ESTALE) {
            break;
        }
        DDL__TRY(ddl__file_open_folder(f)); /* somebody cleaned up under us */
    }
    ddl_status status = ddl__file_error(f, "write a file");
    (void)unlinkat(f->folder, temporary, 0);
    return status;
}

/* Whether a file's bytes are whole and of this job's. */
static bool ddl__file_genuine(const ddl__file *f, const char *name, const uint8_t *bytes, size_t count) {
    uint8_t mac[DDL__FILE_MAC];
    ddl__file_mac(f, name, bytes, count - DDL__FILE_MAC, mac);
    return ddl__ct_equal(mac, bytes + count - DDL__FILE_MAC, sizeof mac) && ddl__load_le32(bytes) == DDL__FILE_MAGIC;
}

/* Reads a file of exactly count bytes into out. False: not there, or not what it should be. Without a secret the owner
 * vouches for the content. */
static bool ddl__file_read(const ddl__file *f, const char *name, uint8_t *out, size_t count) {
    int fd = openat(f->folder, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    struct stat info;
    if (fd < 0) {
        return false;
    }
    size_t have = 0;
    if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_size == (off_t)count &&
        (info.st_uid == f->owner || f->settings->secret != NULL)) {
        ssize_t n = 1;
        while (have < count && n > 0) {
            n = read(fd, out + have, count - have);
            have += n > 0 ? (size_t)n : 0;
        }
    }
    close(fd);
    return have == count && ddl__file_genuine(f, name, out, count);
}

/* The head alone, not checked: to see whether the file is worth reading again. A table is long, and so is its MAC. */
static bool ddl__file_peek(const ddl__file *f, const char *name, uint8_t out[DDL__FILE_HEAD]) {
    int fd = openat(f->folder, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        return false;
    }
    ssize_t n = read(fd, out, DDL__FILE_HEAD);
    close(fd);
    return n == DDL__FILE_HEAD;
}

/* The head of a file that was read: its state, or -1 when it is of another job, world or version. */
static int ddl__file_state(const ddl__file *f, const uint8_t *bytes) {
    ddl__reader r = ddl__reader_of(bytes + 4, DDL__FILE_HEAD - 4);
    uint16_t version = ddl__get_u16(&r), state = ddl__get_u16(&r);
    bool same = version == DDL__FILE_VERSION && ddl__get_u32(&r) == (uint32_t)f->settings->launch.world;
    same = ddl__get_u32(&r) == f->blob_bytes && same;
    same = ddl__get_u64(&r) == f->settings->job_id && same;
    return same ? state : -1;
}

/* NFS may serve a name that it looked up before for half a minute; opening the folder makes it ask again. */
static void ddl__file_refresh(const ddl__file *f) {
    int fd = openat(f->folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        close(fd);
    }
}

static ddl_status ddl__file_put_table(ddl__file *f, uint16_t state) {
    ddl__file_head(f, state, f->nonce, f->table);
    return ddl__file_write(f, "table", f->table, f->table_bytes);
}

/* Rank 0: takes in the blob of a rank whose file bears our nonce. False: it is of another run. */
static bool ddl__file_admit(ddl__file *f, int32_t rank, const uint8_t *in) {
    if (ddl__file_state(f, in) != DDL__FILE_RANK || memcmp(in + DDL__FILE_HEAD, f->nonce, DDL__FILE_NONCE) != 0) {
        return false;
    }
    uint8_t *slot = ddl__file_slot(f, f->table, rank);
    memcpy(slot, in + 24, DDL__FILE_NONCE);
    memcpy(slot + DDL__FILE_NONCE, in + DDL__FILE_HEAD + DDL__FILE_NONCE, f->blob_bytes);
    return true;
}

/* Rank 0: takes in all that have answered. Returns how many are here. A restarted rank replaces itself. */
static int32_t ddl__file_collect(ddl__file *f) {
    char name[32];
    int32_t here = 1;
    for (int32_t r = 1; r < f->settings->launch.world; r++) {
        snprintf(name, sizeof name, "rank.%d", r);
        bool fresh = ddl__file_read(f, name, f->scratch, ddl__file_rank_bytes(f)) && ddl__file_admit(f, r, f->scratch);
        f->ranks[r] = fresh ? DDL__RANK_HERE : DDL__RANK_AWAY;
        here += fresh;
    }
    return here;
}

/* Rank 0 gives up: the sentence goes into the table, for those who are here. */
static ddl_status ddl__file_fail(ddl__file *f) {
    ddl__text text = {f->why->text, sizeof f->why->text, 0};
    int32_t here = ddl__file_collect(f), world = f->settings->launch.world;
    ddl__text_add(&text, "ddl_init: ");
    ddl__text_ranks_below(&text, f->ranks, world, DDL__RANK_HERE);
    ddl__text_add(
        &text,
        " of %d %s not come within %.1f s to %.300s/%s. Look at what the missing ranks print; they need the same "
        "folder, job and secret as the others",
        world, world - here == 1 ? "has" : "have", (double)(ddl__now_ns() - f->start_ns) / (double)DDL__NS_PER_S,
        f->path, f->name);
    f->why->status = DDL_ERR_TIMEOUT;
    memcpy(f->table + DDL__FILE_HEAD, f->why->text, DDL__SENTENCE_BYTES);
    ddl__sentence kept = *f->why;
    (void)ddl__file_put_table(f, DDL__FILE_FAILED);
    *f->why = kept;
    return f->why->status;
}

static uint64_t ddl__file_pause(uint64_t ms) {
    ddl__pause_ms(ms);
    return DDL__MIN(ms * 2, 50u);
}

/* Whoever is last takes the table away, and the folder: a rank that has its own file there still wants to read. nonce
 * is the table's: a new run may have put up its own. What stays when a rank dies here harms nobody. */
static void ddl__file_clean(ddl__file *f, const uint8_t nonce[DDL__FILE_NONCE]) {
    char name[32];
    uint8_t head[DDL__FILE_HEAD];
    struct stat info;
    for (int32_t r = 1; r < f->settings->launch.world; r++) {
        snprintf(name, sizeof name, "rank.%d", r);
        if (fstatat(f->folder, name, &info, AT_SYMLINK_NOFOLLOW) == 0) {
            return;
        }
    }
    if (ddl__file_peek(f, "table", head) && memcmp(head + 24, nonce, DDL__FILE_NONCE) == 0) {
        (void)unlinkat(f->folder, "table", 0);
    }
    int parent = open(f->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (parent >= 0) {
        (void)unlinkat(parent, f->name, AT_REMOVEDIR); /* refused while somebody's file is in it */
        close(parent);
    }
}

/* Rank 0 stays for a moment, so that as a rule the place is empty when it goes on. */
static void ddl__file_linger(ddl__file *f) {
    uint64_t until = ddl__now_ns() + DDL__FILE_LINGER_NS, pause = 1;
    while (ddl__file_collect(f) > 1 && ddl__now_ns() < until) {
        pause = ddl__file_pause(pause);
        ddl__file_refresh(f);
    }
    ddl__file_clean(f, f->nonce);
}

static ddl_status ddl__file_lead(ddl__file *f, uint8_t *blobs) {
    int32_t world = f->settings->launch.world;
    uint64_t pause = 1;
    uint8_t head[DDL__FILE_HEAD];
    memcpy(ddl__file_slot(f, f->table, 0) + DDL__FILE_NONCE, blobs, f->blob_bytes);
    DDL__TRY(ddl__file_put_table(f, DDL__FILE_OPEN));
    while (ddl__file_collect(f) < world) {
        if (ddl__now_ns() >= f->deadline_ns) {
            return ddl__file_fail(f);
        }
        pause = ddl__file_pause(pause);
        ddl__file_refresh(f);
        if (!ddl__file_peek(f, "table", head) || memcmp(head + 24, f->nonce, DDL__FILE_NONCE) != 0) {
            DDL__TRY(ddl__file_put_table(f, DDL__FILE_OPEN)); /* an earlier run cleaned up late */
        }
    }
    DDL__TRY(ddl__file_put_table(f, DDL__FILE_COMPLETE));
    for (int32_t r = 1; r < world; r++) {
        memcpy(blobs + (size_t)r * f->blob_bytes, ddl__file_slot(f, f->table, r) + DDL__FILE_NONCE, f->blob_bytes);
    }
    ddl__file_linger(f);
    return DDL_OK;
}

/* A rank writes its file when there is a table to answer, and when the file is not there. */
static ddl_status ddl__file_answer(ddl__file *f, const char *name, const uint8_t *blob, bool *written) {
    uint8_t bytes[DDL__FILE_HEAD + DDL__FILE_NONCE + DDL__BLOB_MAX + DDL__FILE_MAC];
    size_t count = ddl__file_rank_bytes(f);
    if (*written && ddl__file_read(f, name, bytes, count) && memcmp(bytes + 24, f->nonce, DDL__FILE_NONCE) != 0 &&
        memcmp(bytes + DDL__FILE_HEAD, f->seen, DDL__FILE_NONCE) == 0) {
        return ddl__fail(
            f->why, DDL_ERR_CONFIG,
            "ddl_init: another process has come as rank %d to %.300s/%s; every rank is started once, with its "
            "own RANK, and jobs that run at the same time need different DDL_JOB",
            f->settings->launch.rank, f->path, f->name);
    }
    if (*written && ddl__file_read(f, name, bytes, count) &&
        memcmp(bytes + DDL__FILE_HEAD, f->seen, DDL__FILE_NONCE) == 0) {
        return DDL_OK;
    }
    ddl__file_head(f, DDL__FILE_RANK, f->nonce, bytes);
    memcpy(bytes + DDL__FILE_HEAD, f->seen, DDL__FILE_NONCE);
    memcpy(bytes + DDL__FILE_HEAD + DDL__FILE_NONCE, blob, f->blob_bytes);
    DDL__TRY(ddl__file_write(f, name, bytes, count));
    *written = true;
    return DDL_OK;
}

/* The table that was read into f->table concerns this run when our nonce is in our place. DDL_IN_PROGRESS: not yet. */
static ddl_status ddl__file_take(ddl__file *f, uint8_t *blobs) {
    int state = ddl__file_state(f, f->table);
    const uint8_t *mine = ddl__file_slot(f, f->table, f->settings->launch.rank);
    if (memcmp(mine, f->nonce, DDL__FILE_NONCE) != 0 || (state != DDL__FILE_COMPLETE && state != DDL__FILE_FAILED)) {
        return DDL_IN_PROGRESS;
    }
    if (state == DDL__FILE_FAILED) {
        char *text = (char *)f->table + DDL__FILE_HEAD;
        text[DDL__SENTENCE_BYTES - 1] = 0;
        ddl__text_clean(text);
        return ddl__fail(f->why, DDL_ERR_TIMEOUT, "%s", text[0] != 0 ? text : "ddl_init: rank 0 gave up");
    }
    for (int32_t r = 0; r < f->settings->launch.world; r++) {
        memcpy(blobs + (size_t)r * f->blob_bytes, ddl__file_slot(f, f->table, r) + DDL__FILE_NONCE, f->blob_bytes);
    }
    return DDL_OK;
}

static ddl_status ddl__file_overdue(ddl__file *f, const char *name, bool written) {
    (void)unlinkat(f->folder, name, 0);
    return ddl__fail(
        f->why, DDL_ERR_TIMEOUT,
        "ddl_init: rank %d of %d waited %.1f s at %.300s/%s, but %s. Look at what rank 0 prints, and whether all "
        "ranks have the same folder, job and secret",
        f->settings->launch.rank, f->settings->launch.world,
        (double)(ddl__now_ns() - f->start_ns) / (double)DDL__NS_PER_S, f->path, f->name,
        written ? "rank 0 did not complete the table" : "rank 0 has not come");
}

/* Rank 0 speaks first at the deadline: it knows who is missing. */
static ddl_status ddl__file_follow(ddl__file *f, uint8_t *blobs) {
    char name[32];
    uint8_t head[DDL__FILE_HEAD];
    bool written = false, known = false; /* known: there is a table to answer */
    uint64_t pause = 1;
    const uint8_t *blob = blobs + (size_t)f->settings->launch.rank * f->blob_bytes;
    snprintf(name, sizeof name, "rank.%d", f->settings->launch.rank);
    for (;;) {
        bool there = ddl__file_peek(f, "table", head);
        bool news = there && memcmp(head, f->table, sizeof head) != 0;
        bool whole = news && ddl__file_read(f, "table", f->table, f->table_bytes);
        if (news && !whole) {
            memset(f->table, 0, sizeof head); /* so that it is news again */
        }
        if (whole && ddl__file_state(f, f->table) >= 0) {
            ddl_status status = ddl__file_take(f, blobs);
            if (status != DDL_IN_PROGRESS) {
                (void)unlinkat(f->folder, name, 0);
                ddl__file_clean(f, f->table + 24); /* when this rank is the last */
                return status;
            }
            memcpy(f->seen, f->table + 24, DDL__FILE_NONCE);
            known = true;
        }
        if (known) {
            DDL__TRY(ddl__file_answer(f, name, blob, &written));
        }
        if (ddl__now_ns() >= f->deadline_ns + DDL__LEAVE_NS) {
            return ddl__file_overdue(f, name, written);
        }
        pause = ddl__file_pause(pause);
        ddl__file_refresh(f);
    }
}

/* The folder's name: readable, and safe whatever the job is called. */
static void ddl__file_name(ddl__file *f) {
    const char *job = f->settings->job != NULL ? f->settings->job : "default";
    char clean[41];
    size_t n = 0;
    for (; job[n] != 0 && n < sizeof clean - 1; n++) {
        char c = job[n];
        bool plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '_';
        clean[n] = plain ? c : '_';
    }
    clean[n] = 0;
    snprintf(f->name, sizeof f->name, "ddl-%s-%016" PRIx64, clean, f->settings->job_id);
}

static ddl_status ddl__file_run(ddl__file *f, uint8_t *blobs) {
    const ddl__settings *s = f->settings;
    f->table = ddl__alloc(f->base, f->table_bytes);
    f->scratch = ddl__alloc(f->base, DDL__MAX(f->table_bytes, ddl__file_rank_bytes(f)));
    f->ranks = ddl__alloc(f->base, (size_t)s->launch.world);
    if (f->table == NULL || f->scratch == NULL || f->ranks == NULL) {
        return ddl__fail(f->why, DDL_ERR_NOMEM, "ddl_init: no memory for the table of %d ranks", s->launch.world);
    }
    if (ddl__random(f->nonce, sizeof f->nonce) != DDL_OK) {
        return ddl__fail(f->why, DDL_ERR_SYSTEM, "ddl_init: the kernel gives no random bytes: %s", strerror(errno));
    }
    ddl__hmac_key_init(&f->key, s->secret, s->secret_bytes);
    f->owner = geteuid();
    f->ranks[0] = DDL__RANK_HERE;
    DDL__TRY(ddl__file_open_folder(f));
    return s->launch.rank == 0 ? ddl__file_lead(f, blobs) : ddl__file_follow(f, blobs);
}

/* blobs holds this rank's own already. Blocks. Errors: DDL_ERR_TIMEOUT, DDL_ERR_CONFIG, DDL_ERR_SYSTEM,
 * DDL_ERR_NOMEM. */
static ddl_status ddl__file_rendezvous(const ddl__settings *s, ddl__base *base, size_t bytes, uint8_t *blobs,
                                       uint64_t deadline_ns, ddl__sentence *why) {
    ddl__file f = {.settings = s, .base = base, .why = why, .blob_bytes = bytes, .folder = -1};
    f.start_ns = ddl__now_ns();
    f.deadline_ns = deadline_ns;
    f.slot_bytes = DDL__FILE_NONCE + bytes;
    f.table_bytes = DDL__FILE_HEAD + DDL__SENTENCE_BYTES + (size_t)s->launch.world * f.slot_bytes + DDL__FILE_MAC;
    snprintf(f.path, sizeof f.path, "%s", s->place.folder);
    ddl__file_name(&f);
    ddl_status status = ddl__file_run(&f, blobs);
    if (f.folder >= 0) {
        close(f.folder);
    }
    ddl__wipe(&f.key, sizeof f.key);
    ddl__free(base, f.table);
    ddl__free(base, f.scratch);
    ddl__free(base, f.ranks);
    return status;
}

#endif /* DDL_STORE_FILE_H */

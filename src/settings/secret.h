/* secret: where the job secret comes from. It is held in one block, wiped when that is freed, and appears in no log
 * line and no sentence. Order: the program, an inherited descriptor, a file, a variable. */
#ifndef DDL_SETTINGS_SECRET_H
#define DDL_SETTINGS_SECRET_H

#include "machine.h"
#include "table.h"

#define DDL__SECRET_MIN 16
#define DDL__SECRET_MAX 4096

typedef struct ddl__secret {
    uint8_t *bytes; /* NULL: the job has none */
    size_t count;
    const char *source; /* for messages: "DDL_SECRET_FILE" */
} ddl__secret;

static void ddl__secret_free(ddl__base *base, ddl__secret *secret) {
    if (secret->bytes != NULL) {
        ddl__wipe(secret->bytes, secret->count);
        ddl__free(base, secret->bytes);
    }
    memset(secret, 0, sizeof *secret);
}

static ddl_status ddl__secret_set(ddl__base *base, const char *source, const void *bytes, size_t count,
                                  ddl__secret *out, ddl__sentence *why) {
    if (count < DDL__SECRET_MIN || count > DDL__SECRET_MAX) {
        return ddl__fail(
            why, DDL_ERR_CONFIG,
            "ddl_init: the secret of %s has %zu bytes; %d to %d are possible. Make one: head -c 32 /dev/urandom",
            source, count, DDL__SECRET_MIN, DDL__SECRET_MAX);
    }
    out->bytes = ddl__alloc(base, count);
    if (out->bytes == NULL) {
        return ddl__fail(why, DDL_ERR_NOMEM, "ddl_init: no memory for the secret");
    }
    memcpy(out->bytes, bytes, count);
    out->count = count;
    out->source = source;
    return DDL_OK;
}

/* Reads to the end, from byte 0 where the descriptor can seek: the ranks of one launcher share one file offset.
 * Returns the bytes, or -1. One byte more than allowed is read, so that too long shows. */
static ssize_t ddl__secret_read(int fd, bool seekable, uint8_t out[DDL__SECRET_MAX + 1]) {
    size_t used = 0;
    while (used < DDL__SECRET_MAX + 1) {
        size_t room = DDL__SECRET_MAX + 1 - used;
        ssize_t n = seekable ? pread(fd, out + used, room, (off_t)used) : read(fd, out + used, room);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return -1;
        }
        if (n == 0) {
            break;
        }
        used += (size_t)n;
    }
    return (ssize_t)used;
}

/* A pipe is read once and closed. A file (ddlrun gives a sealed memfd) stays open for a later ddl_init of the same
 * process, hidden from programs that this one executes. */
static ddl_status ddl__secret_from_fd(ddl__base *base, const char *text, ddl__secret *out, ddl__sentence *why) {
    int64_t fd;
    struct stat info;
    uint8_t bytes[DDL__SECRET_MAX + 1];
    if (!ddl__parse_int(text, 0, INT32_MAX, &fd)) {
        return ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: DDL_SECRET_FD is \"%.60s\", which is no descriptor's number",
                         text);
    }
    if (fstat((int)fd, &info) != 0) {
        return ddl__fail(
            why, DDL_ERR_CONFIG,
            "ddl_init: DDL_SECRET_FD is %d, but no such descriptor is open: the launcher must leave it open "
            "for its ranks, and from a pipe it can be read only once",
            (int)fd);
    }
    bool file = S_ISREG(info.st_mode);
    ssize_t n = ddl__secret_read((int)fd, file, bytes);
    int error = errno;
    if (file) {
        (void)fcntl((int)fd, F_SETFD, FD_CLOEXEC);
    } else {
        close((int)fd);
    }
    ddl_status status = n < 0
                            ? ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: cannot read descriptor %d of DDL_SECRET_FD: %s",
                                        (int)fd, strerror(error))
                            : ddl__secret_set(base, "DDL_SECRET_FD", bytes, (size_t)n, out, why);
    ddl__wipe(bytes, sizeof bytes);
    return status;
}

/* Looks at the open file, not at the path, which may change in between. A link is fine: Kubernetes mounts them so. */
static ddl_status ddl__secret_check_file(int fd, const char *path, ddl__sentence *why) {
    struct stat info;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        return ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: %.400s of DDL_SECRET_FILE is not a file", path);
    }
    if (info.st_uid != geteuid()) {
        return ddl__fail(
            why, DDL_ERR_CONFIG,
            "ddl_init: %.400s of DDL_SECRET_FILE belongs to user %ld, this process to user %ld: a secret that "
            "others can change proves nothing",
            path, (long)info.st_uid, (long)geteuid());
    }
    if ((info.st_mode & 077) != 0) {
        return ddl__fail(
            why, DDL_ERR_CONFIG,
            "ddl_init: %.400s of DDL_SECRET_FILE has mode %03o, so others may read or change it: chmod 600 it", path,
            (unsigned)(info.st_mode & 0777));
    }
    return DDL_OK;
}

/* One newline at the end is the editor's, not the secret's. O_NONBLOCK: a pipe in its place must not block us. */
static ddl_status ddl__secret_from_file(ddl__base *base, const char *path, ddl__secret *out, ddl__sentence *why) {
    uint8_t bytes[DDL__SECRET_MAX + 1];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        return ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: cannot open %.400s of DDL_SECRET_FILE: %s", path,
                         strerror(errno));
    }
    ddl_status status = ddl__secret_check_file(fd, path, why);
    ssize_t n = status == DDL_OK ? ddl__secret_read(fd, true, bytes) : 0;
    if (n < 0) {
        status = ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: cannot read %.400s of DDL_SECRET_FILE: %s", path,
                           strerror(errno));
    }
    close(fd);
    if (status == DDL_OK) {
        n -= n > 0 && bytes[n - 1] == '\n';
        status = ddl__secret_set(base, "DDL_SECRET_FILE", bytes, (size_t)n, out, why);
    }
    ddl__wipe(bytes, sizeof bytes);
    return status;
}

static ddl_status ddl__secret_find(ddl__base *base, const ddl_config *config, ddl__secret *out, ddl__sentence *why) {
    if (config->secret != NULL || config->secret_bytes > 0) {
        return ddl__secret_set(base, "ddl_config", config->secret, config->secret != NULL ? config->secret_bytes : 0,
                               out, why);
    }
    const char *fd = ddl__setting_env("DDL_SECRET_FD"), *file = ddl__setting_env("DDL_SECRET_FILE");
    const char *text = ddl__setting_env("DDL_SECRET");
    if (fd != NULL) {
        return ddl__secret_from_fd(base, fd, out, why);
    }
    if (file != NULL) {
        return ddl__secret_from_file(base, file, out, why);
    }
    return text != NULL ? ddl__secret_set(base, "DDL_SECRET", text, strlen(text), out, why) : DDL_OK;
}

#endif /* DDL_SETTINGS_SECRET_H */

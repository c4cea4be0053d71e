/* output.h: a file that is either wholly there or not at all, and the checksum that tells.
 *
 * Written under a temporary name, forced to the disk, renamed, and the folder forced to the disk: after a crash at any
 * moment the name holds the old bytes or the new ones. Any failure removes the temporary file and touches nothing else.
 */
#ifndef OUTPUT_H
#define OUTPUT_H

#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#include "problem.h"

struct output {
    const char *folder, *name;
    char temporary[PATH_MAX];
    int fd; /* -1 once something failed; the sentence is in problem_text */
    size_t used;
    char buffer[65536];
};

/* CRC-32C (Castagnoli, as in iSCSI and ext4), one byte at a time. Start with 0; the result goes on where it stopped. */
static uint32_t crc32c(uint32_t crc, const void *data, size_t count) {
    static uint32_t table[256];
    if (table[1] == 0) {
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t x = i;
            for (int bit = 0; bit < 8; bit++) {
                x = (x >> 1) ^ ((x & 1) != 0 ? 0x82f63b78u : 0);
            }
            table[i] = x;
        }
    }
    crc = ~crc;
    const unsigned char *bytes = data;
    for (size_t i = 0; i < count; i++) {
        crc = (crc >> 8) ^ table[(crc ^ bytes[i]) & 255];
    }
    return ~crc;
}

static bool output_fail(struct output *o, const char *what) {
    int reason = errno;
    if (o->fd >= 0) {
        close(o->fd);
        o->fd = -1;
    }
    unlink(o->temporary);
    return problem("%s/%s was not written, and what was there before is untouched: %s: %s.", o->folder, o->name, what,
                   strerror(reason));
}

/* folder and name are borrowed until the commit. */
static bool output_open(struct output *o, const char *folder, const char *name) {
    o->folder = folder;
    o->name = name;
    o->used = 0;
    o->fd = -1;
    if (snprintf(o->temporary, sizeof o->temporary, "%s/%s.tmp", folder, name) >= (int)sizeof o->temporary) {
        return problem("The name %s/%s is too long for a file.", folder, name);
    }
    o->fd = open(o->temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    return o->fd >= 0 || output_fail(o, "the temporary file cannot be created");
}

static bool output_flush(struct output *o) {
    for (size_t done = 0; o->fd >= 0 && done < o->used;) {
        ssize_t n = write(o->fd, o->buffer + done, o->used - done);
        if (n < 0 && errno != EINTR) {
            return output_fail(o, "a write failed");
        }
        done += n > 0 ? (size_t)n : 0;
    }
    o->used = 0;
    return o->fd >= 0;
}

/* A failure is remembered: a caller may write on and look at output_commit alone. */
static bool output_write(struct output *o, const void *data, size_t count) {
    for (const char *from = data; o->fd >= 0 && count > 0;) {
        size_t n = sizeof o->buffer - o->used < count ? sizeof o->buffer - o->used : count;
        memcpy(o->buffer + o->used, from, n);
        o->used += n;
        from += n;
        count -= n;
        if (o->used == sizeof o->buffer && !output_flush(o)) {
            return false;
        }
    }
    return o->fd >= 0;
}

static void __attribute__((format(printf, 2, 3))) output_print(struct output *o, const char *format, ...) {
    char line[1024];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    output_write(o, line, n < (int)sizeof line ? (size_t)n : sizeof line - 1);
}

static bool sync_folder(const char *folder) {
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool good = fd >= 0 && (fsync(fd) == 0 || errno == EINVAL); /* EINVAL: this file system has no such thing */
    if (fd >= 0) {
        close(fd);
    }
    return good;
}

static bool output_commit(struct output *o) {
    if (!output_flush(o)) {
        return false;
    }
    if (fsync(o->fd) != 0 && errno != EINVAL && errno != EROFS) {
        return output_fail(o, "fsync failed");
    }
    int fd = o->fd;
    o->fd = -1;
    if (close(fd) != 0) {
        return output_fail(o, "close failed");
    }
    char path[PATH_MAX + 256];
    snprintf(path, sizeof path, "%s/%s", o->folder, o->name);
    if (rename(o->temporary, path) != 0) {
        return output_fail(o, "rename failed");
    }
    return sync_folder(o->folder) ||
           problem("%s may be lost in a power cut: its folder's fsync failed: %s.", path, strerror(errno));
}

#endif

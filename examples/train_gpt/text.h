/* text.h: what the model reads: one file, or the sources and documents around the program.
 *
 * A window is chosen by (seed, step, number of the sequence in the global batch) and nothing else. So two ranks with B
 * sequences each see what one rank with 2B sees, and a resumed run goes on where it stopped. It must not know which
 * rank it serves. */
#ifndef TEXT_H
#define TEXT_H

#include <dirent.h>
#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "problem.h"
#include "random.h"

struct bytes {
    uint8_t *data;
    size_t count, room;
};

struct text {
    struct bytes train, held_out;
    size_t context;
};

enum { TEXT_LIMIT = 1 << 30 };

/* ---- reading ---------------------------------------------------------------------------------------------------- */

static bool bytes_append(struct bytes *b, const void *data, size_t count) {
    if (b->count + count > b->room) {
        size_t room = (b->count + count) * 2;
        uint8_t *grown = realloc(b->data, room);
        if (grown == NULL) {
            return problem("There is no memory for a text of %zu bytes.", room);
        }
        b->data = grown;
        b->room = room;
    }
    memcpy(b->data + b->count, data, count);
    b->count += count;
    return true;
}

static bool bytes_append_file(struct bytes *b, const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        return problem("The text %s cannot be opened: %s.", path, strerror(errno));
    }
    char chunk[65536];
    bool good = true;
    for (size_t n; good && (n = fread(chunk, 1, sizeof chunk, file)) > 0;) {
        good = b->count + n <= TEXT_LIMIT ? bytes_append(b, chunk, n)
                                          : problem("The text %s is longer than 1 GiB; train on a part of it.", path);
    }
    if (good && ferror(file)) {
        good = problem("The text %s cannot be read: %s.", path, strerror(errno));
    }
    fclose(file);
    return good;
}

/* ---- the default text ------------------------------------------------------------------------------------------- */

struct paths {
    char **at;
    size_t count;
};

static bool paths_add(struct paths *p, const char *path) {
    char **grown = realloc(p->at, (p->count + 1) * sizeof *grown);
    if (grown == NULL) {
        return problem("There is no memory for a list of files.");
    }
    p->at = grown;
    p->at[p->count] = strdup(path);
    return p->at[p->count++] != NULL || problem("There is no memory for a list of files.");
}

static bool is_text_name(const char *name) {
    const char *dot = strrchr(name, '.');
    return dot != NULL &&
           (strcmp(dot, ".md") == 0 || strcmp(dot, ".h") == 0 || strcmp(dot, ".c") == 0 || strcmp(dot, ".py") == 0);
}

/* Adds the sources and documents below `folder`. A folder that is not there adds nothing. */
static bool paths_add_folder(struct paths *p, const char *folder, int depth) {
    DIR *list = depth > 0 ? opendir(folder) : NULL;
    bool good = true;
    for (struct dirent *entry; good && list != NULL && (entry = readdir(list)) != NULL;) {
        char path[PATH_MAX];
        struct stat status;
        if (entry->d_name[0] == '.' ||
            snprintf(path, sizeof path, "%s/%s", folder, entry->d_name) >= (int)sizeof path ||
            lstat(path, &status) != 0) {
            continue;
        }
        if (S_ISDIR(status.st_mode)) {
            good = paths_add_folder(p, path, depth - 1);
        } else if (S_ISREG(status.st_mode) && is_text_name(path)) {
            good = paths_add(p, path);
        }
    }
    if (list != NULL) {
        closedir(list);
    }
    return good;
}

/* Climbs from `path` to the folder that holds src/api.h; leaves it in path. */
static bool climb_to_root(char *path) {
    for (int i = 0; i < 6; i++) {
        char probe[PATH_MAX + 16];
        snprintf(probe, sizeof probe, "%s/src/api.h", path);
        if (access(probe, R_OK) == 0) {
            return true;
        }
        char *slash = strrchr(path, '/');
        if (slash == NULL || slash == path) {
            return false;
        }
        *slash = '\0';
    }
    return false;
}

static bool find_root(char root[PATH_MAX]) {
    ssize_t n = readlink("/proc/self/exe", root, PATH_MAX - 1);
    root[n > 0 ? n : 0] = '\0';
    return climb_to_root(root) || (getcwd(root, PATH_MAX) != NULL && climb_to_root(root));
}

static int compare_paths(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* Sorted, because the order of a directory differs between machines and every rank must read the same text. ddl.h
 * itself is left out: it is src/ once more, and half of the held-out text would be known by heart. */
static bool read_default(struct bytes *b) {
    static const char *const folders[] = {"docs", "src", "plugins", "examples", "tools", "tests", "bench"};
    char root[PATH_MAX], path[PATH_MAX + 16];
    if (!find_root(root)) {
        return problem(
            "The default text, ddl's own sources, is not around this program; name a text with --data FILE.");
    }
    struct paths paths = {NULL, 0};
    snprintf(path, sizeof path, "%s/README.md", root);
    bool good = access(path, R_OK) != 0 || paths_add(&paths, path);
    for (size_t i = 0; good && i < sizeof folders / sizeof *folders; i++) {
        snprintf(path, sizeof path, "%s/%s", root, folders[i]);
        good = paths_add_folder(&paths, path, 6);
    }
    if (paths.count > 0) {
        qsort(paths.at, paths.count, sizeof *paths.at, compare_paths);
    }
    for (size_t i = 0; good && i < paths.count; i++) {
        good = bytes_append_file(b, paths.at[i]);
    }
    for (size_t i = 0; i < paths.count; i++) {
        free(paths.at[i]);
    }
    free(paths.at);
    return good;
}

/* ---- windows ---------------------------------------------------------------------------------------------------- */

/* Of every 20 windows' worth of text, the last two are held out: from everywhere, since a text changes its subject as
 * it goes. */
static bool text_split(struct text *t, const struct bytes *all) {
    size_t window = t->context + 1, block = 20 * window, at = 0;
    for (; all->count - at >= block; at += block) {
        if (!bytes_append(&t->train, all->data + at, 18 * window) ||
            !bytes_append(&t->held_out, all->data + at + 18 * window, 2 * window)) {
            return false;
        }
    }
    return bytes_append(&t->train, all->data + at, all->count - at);
}

/* path NULL: the default text. */
static bool text_load(struct text *t, const char *path, size_t context) {
    struct bytes all = {NULL, 0, 0};
    *t = (struct text){.context = context};
    bool good = path != NULL ? bytes_append_file(&all, path) : read_default(&all);
    if (good && all.count < 20 * (context + 1)) {
        good = problem("%s has %zu bytes; with --context %zu at least %zu are needed.",
                       path != NULL ? path : "The default text", all.count, context, 20 * (context + 1));
    }
    good = good && text_split(t, &all);
    free(all.data);
    return good;
}

static void text_free(struct text *t) {
    free(t->train.data);
    free(t->held_out.data);
}

/* Writes `context` bytes and, for each, the byte that follows it. */
static void text_window(const struct text *t, const uint8_t *from, uint8_t *bytes, uint8_t *targets) {
    memcpy(bytes, from, t->context);
    memcpy(targets, from + 1, t->context);
}

static void text_training(const struct text *t, uint64_t seed, uint64_t step, uint64_t sequence, uint8_t *bytes,
                          uint8_t *targets) {
    uint64_t places = t->train.count - t->context;
    text_window(t, t->train.data + random_bits(seed, RANDOM_WINDOW, step, sequence) % places, bytes, targets);
}

static size_t text_held_windows(const struct text *t) { return t->held_out.count / (t->context + 1); }

static void text_held(const struct text *t, size_t window, uint8_t *bytes, uint8_t *targets) {
    text_window(t, t->held_out.data + window * (t->context + 1), bytes, targets);
}

#endif

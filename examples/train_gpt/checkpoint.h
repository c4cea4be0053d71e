/* checkpoint.h: the whole state of a run in one file, and back.
 *
 *     file     = section*, in this order: "setup", "params", "moments", "curve", "end"
 *     section  = tag (8 bytes, zero padded), length (u64), CRC-32C of tag, length and data (u64), data
 *
 * Integers and floats lie in the machine's own byte order; another order shows as a wrong length. Two files are kept,
 * so that a file damaged after it was written costs --save steps, not the run. */
#ifndef CHECKPOINT_H
#define CHECKPOINT_H

#include <dirent.h>
#include <sys/stat.h>

#include "adamw.h"
#include "output.h"

/* What must match (the shape), and what decides whether the continuation repeats the run that wrote it (the rest). */
struct setup {
    uint64_t layers, dim, heads, context;
    uint64_t step;
    uint64_t seed, sequences, steps, warmup, text_crc;
    double lr, decay, clip;
};

/* One row of the loss curve; held_out is NaN where nobody looked. */
struct point {
    uint64_t step;
    double seconds;
    float loss, held_out, lr, tokens_per_second, comm_share, norm;
};

struct curve {
    struct point *at;
    size_t count, room;
};

struct run {
    struct setup setup;
    struct model *model;
    struct adamw *optimizer;
    struct curve *curve;
};

static bool curve_reserve(struct curve *c, size_t room) {
    if (room <= c->room) {
        return true;
    }
    struct point *grown = realloc(c->at, room * sizeof *grown);
    if (grown == NULL) {
        return problem("There is no memory for a curve of %zu points.", room);
    }
    c->at = grown;
    c->room = room;
    return true;
}

/* ---- the list of checkpoints in a folder ------------------------------------------------------------------------ */

enum { CHECKPOINT_LIST = 64, CHECKPOINT_NAME = 48 };

/* Fills steps[] with the newest first; returns how many there are, at most CHECKPOINT_LIST. */
static size_t checkpoint_list(const char *folder, uint64_t steps[CHECKPOINT_LIST]) {
    DIR *list = opendir(folder);
    size_t count = 0;
    for (struct dirent *entry; list != NULL && (entry = readdir(list)) != NULL;) {
        unsigned long long step;
        int end = 0;
        if (sscanf(entry->d_name, "checkpoint-%8llu.gpt%n", &step, &end) != 1 || end == 0 ||
            entry->d_name[end] != '\0') {
            continue;
        }
        size_t i = count < CHECKPOINT_LIST ? count++ : CHECKPOINT_LIST - 1;
        for (; i > 0 && steps[i - 1] < step; i--) {
            steps[i] = steps[i - 1];
        }
        steps[i] = step;
    }
    if (list != NULL) {
        closedir(list);
    }
    return count;
}

static void checkpoint_name(char name[CHECKPOINT_NAME], uint64_t step) {
    snprintf(name, CHECKPOINT_NAME, "checkpoint-%08llu.gpt", (unsigned long long)step);
}

/* Deletes all but the newest `keep` up to `step`. Those beyond `step` were passed over as damaged when the run resumed.
 */
static void checkpoint_prune(const char *folder, uint64_t step, size_t keep) {
    uint64_t steps[CHECKPOINT_LIST];
    for (size_t i = 0, count = checkpoint_list(folder, steps); i < count; i++) {
        char name[CHECKPOINT_NAME], path[PATH_MAX];
        checkpoint_name(name, steps[i]);
        if (steps[i] <= step && keep > 0) {
            keep--;
        } else if (snprintf(path, sizeof path, "%s/%s", folder, name) < (int)sizeof path) {
            unlink(path);
        }
    }
}

/* ---- saving ----------------------------------------------------------------------------------------------------- */

struct section {
    char tag[8];
    uint64_t length, crc;
};

static uint32_t section_crc(const struct section *s, const void *data) {
    return crc32c(crc32c(0, s, offsetof(struct section, crc)), data, s->length);
}

static void write_section(struct output *o, const char *tag, const void *data, size_t length) {
    struct section s = {.length = length};
    memcpy(s.tag, tag, strlen(tag));
    s.crc = section_crc(&s, data);
    output_write(o, &s, sizeof s);
    output_write(o, data, length);
}

static bool checkpoint_save(const struct run *run, const char *folder) {
    static struct output o;
    char name[CHECKPOINT_NAME];
    size_t floats_bytes = run->model->count * sizeof(float);
    checkpoint_name(name, run->setup.step);
    if (!output_open(&o, folder, name)) {
        return false;
    }
    write_section(&o, "setup", &run->setup, sizeof run->setup);
    write_section(&o, "params", run->model->home, floats_bytes);
    write_section(&o, "moments", run->optimizer->home, 2 * floats_bytes);
    write_section(&o, "curve", run->curve->at, run->curve->count * sizeof *run->curve->at);
    write_section(&o, "end", "", 0);
    if (!output_commit(&o)) {
        return false;
    }
    checkpoint_prune(folder, run->setup.step, 2); /* only now are older ones not needed */
    return true;
}

/* ---- loading ---------------------------------------------------------------------------------------------------- */

/* Reads a section of exactly `length` bytes into data and checks it. */
static bool read_section(FILE *file, const char *path, const char *tag, void *data, size_t length) {
    struct section s;
    char want[8] = {0};
    memcpy(want, tag, strlen(tag));
    if (fread(&s, sizeof s, 1, file) != 1) {
        return problem("%s ends before its section \"%s\".", path, tag);
    }
    if (memcmp(s.tag, want, sizeof want) != 0 || s.length != length) {
        return problem("%s has no section \"%s\" of %zu bytes where one must be.", path, tag, length);
    }
    if (length > 0 && fread(data, length, 1, file) != 1) {
        return problem("%s ends within its section \"%s\".", path, tag);
    }
    return s.crc == section_crc(&s, data) || problem("The checksum of section \"%s\" of %s is wrong.", tag, path);
}

/* The curve's length is the one thing that this program does not know before: it follows from the setup's step. */
static bool read_curve(FILE *file, const char *path, struct run *run) {
    struct stat status;
    uint64_t count = run->setup.step;
    if (fstat(fileno(file), &status) != 0 || count > (uint64_t)status.st_size / sizeof(struct point)) {
        return problem("%s is shorter than its curve.", path);
    }
    if (!curve_reserve(run->curve, count + 1)) {
        return false;
    }
    run->curve->count = count;
    return read_section(file, path, "curve", run->curve->at, count * sizeof(struct point));
}

/* *out_fatal: a sound checkpoint of another model; an older one would be of that other model too. */
static bool checkpoint_read(struct run *run, const char *path, bool *out_fatal) {
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        return problem("%s cannot be opened: %s.", path, strerror(errno));
    }
    struct setup found, want = run->setup;
    size_t floats_bytes = run->model->count * sizeof(float);
    bool good = read_section(file, path, "setup", &found, sizeof found);
    if (good && (found.layers != want.layers || found.dim != want.dim || found.heads != want.heads ||
                 found.context != want.context)) {
        *out_fatal = true;
        good =
            problem("%s is of a model with --layers %llu --dim %llu --heads %llu --context %llu; this run has %llu, "
                    "%llu, %llu, %llu.",
                    path, (unsigned long long)found.layers, (unsigned long long)found.dim,
                    (unsigned long long)found.heads, (unsigned long long)found.context, (unsigned long long)want.layers,
                    (unsigned long long)want.dim, (unsigned long long)want.heads, (unsigned long long)want.context);
    }
    if (good) {
        run->setup = found;
        good = read_section(file, path, "params", run->model->home, floats_bytes) &&
               read_section(file, path, "moments", run->optimizer->home, 2 * floats_bytes) &&
               read_curve(file, path, run) && read_section(file, path, "end", NULL, 0);
    }
    fclose(file);
    run->setup = good ? found : want;
    return good;
}

/* Loads the newest sound checkpoint; says on stderr which ones it passed over. run->setup becomes the one that was
 * saved. */
static bool checkpoint_load(struct run *run, const char *folder) {
    uint64_t steps[CHECKPOINT_LIST];
    size_t count = checkpoint_list(folder, steps);
    bool fatal = false;
    for (size_t i = 0; i < count; i++) {
        char name[CHECKPOINT_NAME], path[PATH_MAX];
        checkpoint_name(name, steps[i]);
        if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) {
            return problem("The name %s/%s is too long for a file.", folder, name);
        }
        if (checkpoint_read(run, path, &fatal)) {
            return true;
        }
        if (fatal) {
            return false;
        }
        fprintf(stderr, "train_gpt: %s Passed over.\n", problem_text);
    }
    return count > 0
               ? problem("None of the %zu checkpoints in %s is sound; start again without --resume in another --out.",
                         count, folder)
               : problem("There is no checkpoint in %s to resume from; leave --resume out to start.", folder);
}

#endif

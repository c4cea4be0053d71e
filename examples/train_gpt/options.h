/* options.h: the command line. One table is the parser, the checks, the defaults and --help. */
#ifndef OPTIONS_H
#define OPTIONS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "../../tools/nearest.h"
#include "model.h"
#include "problem.h"

struct options {
    size_t steps, batch, layers, dim, heads, context, seed, eval, save, sample, warmup;
    double lr, clip, decay, beta1, temperature, ratio;
    size_t accumulate, bucket, local, rank, staleness;
    const char *data, *out, *prompt, *strategy, *compress, *device;
    bool resume, fresh, help, cuda;
};

static const struct options default_options = {
    .steps = 600,
    .batch = 16,
    .layers = 3,
    .dim = 128,
    .heads = 4,
    .context = 64,
    .seed = 1,
    .eval = 100,
    .save = 200,
    .sample = 400,
    .warmup = 40,
    .lr = 3e-3,
    .clip = 1.0,
    .decay = 0.1,
    .beta1 = -1.0,
    .temperature = 0.7,
    .out = "gpt-run",
    .prompt = "The ",
    .strategy = "auto",
    .compress = "none",
    .device = "cpu",
    .accumulate = 1,
};

enum option_kind { OPTION_COUNT, OPTION_REAL, OPTION_TEXT, OPTION_FLAG };

struct option_row {
    const char *name, *argument, *help;
    enum option_kind kind;
    size_t offset;
    double least, most;
};

#define OPTION(member) offsetof(struct options, member)
static const struct option_row option_rows[] = {
    {"data", "FILE", "train on this file; default: ddl's own sources and documents", OPTION_TEXT, OPTION(data), 0, 0},
    {"out", "DIR", "where checkpoints, loss.csv and loss.svg go", OPTION_TEXT, OPTION(out), 0, 0},
    {"resume", NULL, "continue from the newest sound checkpoint in DIR", OPTION_FLAG, OPTION(resume), 0, 0},
    {"fresh", NULL, "delete the checkpoints in DIR and start anew", OPTION_FLAG, OPTION(fresh), 0, 0},
    {"device", "NAME", "cpu, or cuda: a GPU for each rank (docs/cuda.md)", OPTION_TEXT, OPTION(device), 0, 0},
    {"steps", "N", "optimizer steps in total", OPTION_COUNT, OPTION(steps), 1, 1e9},
    {"batch", "N", "sequences per rank and step", OPTION_COUNT, OPTION(batch), 1, 4096},
    {"context", "N", "bytes the model looks back at; a multiple of 16", OPTION_COUNT, OPTION(context), 16, 8192},
    {"layers", "N", "transformer blocks", OPTION_COUNT, OPTION(layers), 1, MAX_LAYERS},
    {"dim", "N", "channels; a multiple of 16 and of --heads", OPTION_COUNT, OPTION(dim), 16, 8192},
    {"heads", "N", "attention heads", OPTION_COUNT, OPTION(heads), 1, 512},
    {"lr", "X", "highest learning rate", OPTION_REAL, OPTION(lr), 1e-9, 10},
    {"warmup", "N", "steps until the learning rate is reached", OPTION_COUNT, OPTION(warmup), 0, 1e9},
    {"clip", "X", "largest norm of the gradient; 0: any", OPTION_REAL, OPTION(clip), 0, 1e9},
    {"decay", "X", "AdamW's weight decay", OPTION_REAL, OPTION(decay), 0, 1},
    {"beta1", "X", "AdamW's momentum; -1: 0.9, and 0 beside a --compress that delays, whose residual is one", OPTION_REAL,
     OPTION(beta1), -1, 0.999},
    {"strategy", "NAME", "how gradients travel: auto, BSP-A2A, WFBP-A2A, MG-WFBP, local-SGD, ... (docs/training.md)",
     OPTION_TEXT, OPTION(strategy), 0, 0},
    {"compress", "KIND", "f16, bf16, int8, qsgd, sign, top-k, random-k, gtop-k, power, adaptive: what gradients travel as",
     OPTION_TEXT, OPTION(compress), 0, 0},
    {"ratio", "X", "the part of the gradients that top-k, random-k and gtop-k send; 0: 0.01", OPTION_REAL, OPTION(ratio),
     0, 1},
    {"rank", "N", "of power; 0: 2", OPTION_COUNT, OPTION(rank), 0, 64},
    {"accumulate", "N", "batches that make one step", OPTION_COUNT, OPTION(accumulate), 1, 1024},
    {"bucket", "N", "KiB of a bucket, for strategies that have them; 0: theirs", OPTION_COUNT, OPTION(bucket), 0, 1e6},
    {"local", "N", "steps alone between averages, for local SGD; 0: the strategy's", OPTION_COUNT, OPTION(local), 0,
     1e6},
    {"staleness", "N", "iterations that SSP lets a rank run ahead; 0: 3", OPTION_COUNT, OPTION(staleness), 0, 1e6},
    {"seed", "N", "of the initial weights and of what is read when", OPTION_COUNT, OPTION(seed), 0, 1e15},
    {"eval", "N", "steps between looks at the held-out text; 0: at the end only", OPTION_COUNT, OPTION(eval), 0, 1e9},
    {"save", "N", "steps between checkpoints; 0: at the end only", OPTION_COUNT, OPTION(save), 0, 1e9},
    {"sample", "N", "bytes to write at the end", OPTION_COUNT, OPTION(sample), 0, 1e6},
    {"temperature", "X", "of the sample; 0: always the likeliest byte", OPTION_REAL, OPTION(temperature), 0, 100},
    {"prompt", "TEXT", "what the sample continues", OPTION_TEXT, OPTION(prompt), 0, 0},
    {"help", NULL, "this text", OPTION_FLAG, OPTION(help), 0, 0},
};

static void print_help(void) {
    printf("train_gpt trains a byte-level GPT on a text, data-parallel over all ranks of the job.\n\n"
           "    train_gpt [options]                 one rank\n"
           "    ddlrun -n 2 train_gpt [options]     two ranks, each with its own --batch sequences\n\n");
    for (size_t i = 0; i < sizeof option_rows / sizeof *option_rows; i++) {
        const struct option_row *row = &option_rows[i];
        const char *at = (const char *)&default_options + row->offset;
        char left[40];
        snprintf(left, sizeof left, "--%s %s", row->name, row->argument == NULL ? "" : row->argument);
        printf("    %-20s %s", left, row->help);
        if (row->kind == OPTION_COUNT) {
            printf(" (%zu)", *(const size_t *)(const void *)at);
        } else if (row->kind == OPTION_REAL) {
            printf(" (%g)", *(const double *)(const void *)at);
        }
        printf("\n");
    }
}

static const struct option_row *find_option(const char *word, size_t length) {
    for (size_t i = 0; i < sizeof option_rows / sizeof *option_rows; i++) {
        if (strlen(option_rows[i].name) == length && memcmp(option_rows[i].name, word, length) == 0) {
            return &option_rows[i];
        }
    }
    return NULL;
}

static bool set_option(struct options *o, const struct option_row *row, const char *value) {
    void *at = (char *)o + row->offset;
    if (row->kind == OPTION_TEXT) {
        if (*value == '\0') {
            return problem("--%s %s: the value is empty.", row->name, row->argument);
        }
        *(const char **)at = value;
        return true;
    }
    char *end = NULL;
    double number = strtod(value, &end);
    bool whole = row->kind == OPTION_REAL || number == floor(number);
    if (end == value || *end != '\0' || !whole || !(number >= row->least && number <= row->most)) {
        return problem("--%s needs a %s from %.15g to %.15g, not \"%s\".", row->name,
                       row->kind == OPTION_REAL ? "number" : "whole number", row->least, row->most, value);
    }
    if (row->kind == OPTION_REAL) {
        *(double *)at = number;
    } else {
        *(size_t *)at = (size_t)number;
    }
    return true;
}

static bool check_options(const struct options *o) {
    if (o->dim % 16 != 0 || o->dim % o->heads != 0) {
        return problem("--dim %zu must be a multiple of 16 and of --heads %zu.", o->dim, o->heads);
    }
    if (o->resume && o->fresh) {
        return problem("--resume goes on from a checkpoint, --fresh deletes it: give one of them.");
    }
    if (!o->cuda && strcmp(o->device, "cpu") != 0) {
        return problem("--device is cpu or cuda, not \"%s\".", o->device);
    }
    if (o->context % 16 != 0) {
        return problem("--context %zu must be a multiple of 16.", o->context);
    }
    return true;
}

static bool unknown_option(const char *word) {
    char usage[1024] = "usage: [ddlrun -n 2] train_gpt [--name value]...\n", text[400];
    for (size_t i = 0; i < sizeof option_rows / sizeof *option_rows; i++) {
        size_t used = strlen(usage);
        snprintf(usage + used, sizeof usage - used, " --%s", option_rows[i].name);
    }
    return problem("%s", unknown_flag(usage, word, text, sizeof text));
}

/* Accepts "--name value" and "--name=value". */
static bool parse_options(struct options *o, int argc, char **argv) {
    *o = default_options;
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i];
        size_t dashes = strncmp(word, "--", 2) == 0 ? 2 : 0, length = strcspn(word + dashes, "=");
        const struct option_row *row = dashes == 2 ? find_option(word + 2, length) : NULL;
        const char *value = dashes == 2 && word[2 + length] == '=' ? word + 3 + length : NULL;
        if (row == NULL) {
            return unknown_option(word);
        }
        if (row->kind == OPTION_FLAG) {
            if (value != NULL) {
                return problem("--%s takes no value.", row->name);
            }
            *(bool *)(void *)((char *)o + row->offset) = true;
            continue;
        }
        if (value == NULL) {
            value = i + 1 < argc ? argv[++i] : NULL;
        }
        if (value == NULL) {
            return problem("--%s needs a value: --%s %s.", row->name, row->name, row->argument);
        }
        if (!set_option(o, row, value)) {
            return false;
        }
    }
    o->cuda = strcmp(o->device, "cuda") == 0;
    return o->help || check_options(o);
}

#endif

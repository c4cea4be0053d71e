/* nearest: what to say of a flag that a program does not have: which one may be meant, and how the program is used. The
 * flags are those of its usage text, so that there is no second list. Knows neither ddl nor getopt. */
#ifndef DDL_NEAREST_H
#define DDL_NEAREST_H

#include <stdio.h>
#include <string.h>

enum { NEAREST_MAX = 32 }; /* letters of a flag */

/* Letters that must be inserted, deleted or changed (Levenshtein, by rows). */
static size_t nearest_distance(const char *a, size_t a_length, const char *b, size_t b_length) {
    size_t row[NEAREST_MAX + 1];
    for (size_t j = 0; j <= b_length; j++) {
        row[j] = j;
    }
    for (size_t i = 0; i < a_length; i++) {
        size_t corner = row[0];
        row[0] = i + 1;
        for (size_t j = 0; j < b_length; j++) {
            size_t changed = corner + (a[i] != b[j]), moved = (row[j] < row[j + 1] ? row[j] : row[j + 1]) + 1;
            corner = row[j + 1];
            row[j + 1] = changed < moved ? changed : moved;
        }
    }
    return row[b_length];
}

/* The length of a flag, without "=value". */
static size_t nearest_length(const char *word) {
    return strspn(word, "-_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789");
}

/* "--port" for "--prot", out of a usage text; NULL when nothing is near. *out_length: of what is returned. */
static const char *nearest_flag(const char *usage, const char *word, size_t *out_length) {
    size_t length = nearest_length(word), least = length / 3 + 1; /* so many letters may be wrong */
    const char *found = NULL;
    for (const char *at = strstr(usage, "--"); at != NULL; at = strstr(at + nearest_length(at), "--")) {
        size_t here = nearest_length(at);
        if (here <= 2 || here > NEAREST_MAX || length > NEAREST_MAX) {
            continue;
        }
        size_t distance = nearest_distance(word, length, at, here);
        if (distance < least || (found == NULL && distance == least)) {
            least = distance;
            found = at;
            *out_length = here;
        }
    }
    return found;
}

/* "unknown flag --prot: did you mean --port?", and the first line of the usage text below it. */
static const char *unknown_flag(const char *usage, const char *word, char *out, size_t cap) {
    size_t length = 0;
    const char *found = word[0] == '-' ? nearest_flag(usage, word, &length) : NULL;
    int first_line = (int)strcspn(usage, "\n");
    if (found != NULL) {
        snprintf(out, cap, "unknown flag %.60s: did you mean %.*s?\n%.*s", word, (int)length, found, first_line, usage);
    } else {
        snprintf(out, cap, "unknown %s %.60s; --help lists what there is.\n%.*s", word[0] == '-' ? "flag" : "argument",
                 word, first_line, usage);
    }
    return out;
}

#endif

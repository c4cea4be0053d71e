/* unknown: DDL_ variables that nobody reads, and which one may have been meant. A misspelt setting that is silently
 * ignored costs an afternoon. Values are not looked at: one may be a secret. */
#ifndef DDL_SETTINGS_UNKNOWN_H
#define DDL_SETTINGS_UNKNOWN_H

#include "table.h"

enum { DDL__NAME_MAX = 64 };

/* Insertions, deletions and changes of a letter that lead from one name to the other (Levenshtein, by rows). */
static int32_t ddl__name_distance(const char *a, size_t a_length, const char *b) {
    int32_t row[DDL__NAME_MAX + 1];
    size_t b_length = strlen(b);
    if (a_length > DDL__NAME_MAX || b_length > DDL__NAME_MAX) {
        return DDL__NAME_MAX;
    }
    for (size_t j = 0; j <= b_length; j++) {
        row[j] = (int32_t)j;
    }
    for (size_t i = 0; i < a_length; i++) {
        int32_t corner = row[0];
        row[0] = (int32_t)i + 1;
        for (size_t j = 0; j < b_length; j++) {
            int32_t changed = corner + (a[i] != b[j]), moved = DDL__MIN(row[j], row[j + 1]) + 1;
            corner = row[j + 1];
            row[j + 1] = DDL__MIN(changed, moved);
        }
    }
    return row[b_length];
}

typedef struct ddl__name_search {
    const char *nearest; /* NULL when none is near */
    int32_t least;
} ddl__name_search;

static void ddl__name_try(ddl__name_search *search, const char *name, size_t length, const char *known) {
    int32_t distance = ddl__name_distance(name, length, known);
    if (distance < search->least || (search->nearest == NULL && distance == search->least)) {
        search->least = distance;
        search->nearest = known;
    }
}

/* The setting that a name of that length is nearest to; NULL when none is near. */
static const char *ddl__setting_near(const char *name, size_t length) {
    ddl__name_search search = {NULL, (int32_t)(length - strlen("DDL_")) / 3 + 1}; /* so many letters may be wrong */
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__setting_table); i++) {
        ddl__name_try(&search, name, length, ddl__setting_table[i].name);
    }
    return search.nearest;
}

/* The same among a plugin's (ddl_plugin.settings); neither here nor there do names have the DDL_ in front. */
static const char *ddl__plugin_setting_near(const char *const *known, const char *name, size_t length) {
    ddl__name_search search = {NULL, (int32_t)length / 3 + 1};
    for (; *known != NULL; known++) {
        ddl__name_try(&search, name, length, *known);
    }
    return search.nearest;
}

/* A line of the environment that a plugin's list does not have. Gives the length of the name, 0 for others. */
static size_t ddl__plugin_setting_unknown(const char *const *known, const char *line) {
    size_t length = strcspn(line, "=");
    for (; *known != NULL; known++) {
        if (strlen(*known) + 4 == length && strncmp(line + 4, *known, length - 4) == 0) {
            return 0;
        }
    }
    return length;
}

static bool ddl__setting_is_ours(const char *name, size_t length) {
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__setting_table); i++) {
        if (strlen(ddl__setting_table[i].name) == length && strncmp(name, ddl__setting_table[i].name, length) == 0) {
            return true;
        }
    }
    return false;
}

/* A line of the environment, NAME=value, that names a setting, neither ours nor of a plugin of ddl's (which may not be
 * loaded here), its module for Python, benchmarks or tests. Gives the length of the name, 0 for others. */
static size_t ddl__setting_unknown(const char *line) {
    static const char *const others[] = {"FABRIC_", "SHM_", "CUDA_", "BENCH_", "TEST_", "PYTHON_"};
    size_t length = strcspn(line, "=");
    if (strncmp(line, "DDL_", 4) != 0) {
        return 0;
    }
    for (size_t i = 0; i < DDL__COUNT_OF(others); i++) {
        if (strncmp(line + 4, others[i], strlen(others[i])) == 0) {
            return 0;
        }
    }
    return ddl__setting_is_ours(line, length) ? 0 : length;
}

static void ddl__setting_warn(const ddl__base *base, ddl_log_level level, const char *name, size_t length) {
    const char *near_name = ddl__setting_near(name, length);
    int shown = (int)DDL__MIN(length, (size_t)DDL__NAME_MAX);
    if (near_name != NULL) {
        ddl__log(base, level, "%.*s is no setting of ddl; did you mean %s?", shown, name, near_name);
    } else {
        ddl__log(base, level, "%.*s is no setting of ddl; ddl-info lists those that there are", shown, name);
    }
}

static void ddl__plugin_setting_warn(const ddl__base *base, ddl_log_level level, const char *plugin,
                                     const char *const *known, const char *name, size_t length) {
    const char *nearest = ddl__plugin_setting_near(known, name + 4, length - 4);
    int shown = (int)DDL__MIN(length, (size_t)DDL__NAME_MAX);
    if (nearest != NULL) {
        ddl__log(base, level, "%.*s is no setting of plugin %s; did you mean DDL_%s?", shown, name, plugin, nearest);
    } else {
        ddl__log(base, level, "%.*s is no setting of plugin %s%s", shown, name, plugin,
                 *known == NULL ? ", which has none" : "; its documentation lists those that there are");
    }
}

#endif /* DDL_SETTINGS_UNKNOWN_H */

/* finding: what ddl-info --doctor has found on one rank, and the line that fixes it. */
#ifndef DDL_TOOLS_FINDING_H
#define DDL_TOOLS_FINDING_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

enum { FINDINGS_MAX = 48, FINDING_BYTES = 900 };

typedef struct finding {
    int32_t rank, level; /* 0 fine, 1 warning, 2 wrong */
    bool each_host; /* though it is fine, rank 0's host is not the only one to tell it */
    char what[32], text[FINDING_BYTES], fix[FINDING_BYTES];
} finding;

typedef struct findings {
    int32_t count, rank;
    finding list[FINDINGS_MAX];
} findings;

static void __attribute__((format(printf, 5, 6))) found(findings *f, int32_t level, const char *what, const char *fix,
                                                       const char *format, ...) {
    if (f->count == FINDINGS_MAX) {
        return;
    }
    finding *n = &f->list[f->count++];
    va_list args;
    va_start(args, format);
    vsnprintf(n->text, sizeof n->text, format, args);
    va_end(args);
    n->rank = f->rank;
    n->level = level;
    snprintf(n->what, sizeof n->what, "%s", what);
    snprintf(n->fix, sizeof n->fix, "%s", level > 0 ? fix : "");
}

#endif /* DDL_TOOLS_FINDING_H */

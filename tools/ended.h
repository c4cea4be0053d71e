/* ended: the end of a tool that prints: whether all could be written. */
#ifndef DDL_TOOLS_ENDED_H
#define DDL_TOOLS_ENDED_H

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* The exit code: 1, and a sentence, where standard output was not written. */
static int ended(const char *tool, int code) {
    int earlier = ferror(stdout);
    if (fflush(stdout) == 0 && !earlier) {
        return code;
    }
    fprintf(stderr, "%s: cannot write standard output%s%s.\n", tool, earlier ? "" : ": ", earlier ? "" : strerror(errno));
    return code != 0 ? code : 1;
}

#endif /* DDL_TOOLS_ENDED_H */

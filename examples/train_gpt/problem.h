/* problem.h: one sentence per failure.
 *
 * A function that can fail returns false and leaves a sentence here; main prints it once and ends with status 1. What
 * only one rank knows is printed before the others hear of it: a launcher ends all ranks as soon as one has failed. */
#ifndef PROBLEM_H
#define PROBLEM_H

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static char problem_text[1024];

/* Always returns false: `return problem("...");`. */
static bool __attribute__((format(printf, 1, 2))) problem(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(problem_text, sizeof problem_text, format, args);
    va_end(args);
    return false;
}

/* Prints the sentence unless that has been done. */
static void problem_tell(void) {
    if (problem_text[0] != 0) {
        fprintf(stderr, "train_gpt: %s\n", problem_text);
        problem_text[0] = 0;
    }
}

#endif

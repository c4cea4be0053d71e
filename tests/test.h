/* test.h: the whole test harness; C11, also compiles as C++.
 *
 *     #include "test.h"
 *     TEST(sum_is_exact) {
 *         CHECK(ok);                    goes on after a failure
 *         CHECK_EQ(sum, 10);            prints both values; numbers by value, strings by content, pointers as void *
 *         CHECK_STR(sentence, "rank 2");
 *         REQUIRE(p != NULL);           leaves the (void) function after a failure
 *         if (!root) { SKIP("needs root"); }
 *     }
 *
 * main() is here. Arguments are parts of names: `./test_x ring tree` runs what matches one of them; -l lists.
 * The last line is "N passed, N failed, N skipped"; the exit status is 1 when something failed or nothing ran.
 * All macros work in threads and in forked children too: the counters live in memory shared with them.
 * In the environment, for machines that are emulated or busy:
 *     TEST_SLOW=5      stretches every timeout (sanitizers, valgrind too)
 *     TEST_APART=1     each test in a process of its own: what one has begun (verbs) may not survive the forks of the next
 *     TEST_SAMPLE=10   of long lists of cases one in ten; a line before the last says how many were left out
 *     TEST_SEED=n      other ones, and other random numbers
 *     TEST_PART=2/7    of the tests every seventh, from the third on; a line before the last says how many were left out
 *     TEST_MOST_RANKS=8  with TEST_APART=1: tests of more ranks are skipped
 *     TEST_LARGEST=n   neither larger counts nor messages of more than 16 MiB */
#ifndef TEST_H
#define TEST_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* 1 where a sanitizer watches: for tests whose size or tricks are for the plain build alone. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TEST_SANITIZED 1
#elif defined(__has_feature)
#define TEST_SANITIZED (__has_feature(address_sanitizer) || __has_feature(thread_sanitizer))
#else
#define TEST_SANITIZED 0
#endif

/* ---- what a test writes ---- */

#define TEST(name)                                                                                         \
    static void test_##name(void);                                                                         \
    static test__case test__case_##name = {#name, test_##name, NULL};                                      \
    __attribute__((constructor)) static void test__add_##name(void) { test__add(&test__case_##name); }     \
    static void test_##name(void)

/* Longest time one test may take, before TEST_SLOW; #define it before the include to change it. */
#ifndef TEST_TIMEOUT_S
#define TEST_TIMEOUT_S 60
#endif

#define CHECK(cond)                                                                                        \
    do {                                                                                                   \
        if (!(cond)) {                                                                                     \
            test__fail(__FILE__, __LINE__, "%s is false", #cond);                                          \
        }                                                                                                  \
    } while (0)

#define REQUIRE(cond)                                                                                      \
    do {                                                                                                   \
        if (!(cond)) {                                                                                     \
            test__fail(__FILE__, __LINE__, "%s is false", #cond);                                          \
            return;                                                                                        \
        }                                                                                                  \
    } while (0)

#define CHECK_EQ(a, b) test__check_eq(__FILE__, __LINE__, #a, #b, TEST__VALUE(a), TEST__VALUE(b))
#define CHECK_STR(haystack, needle) test__check_str(__FILE__, __LINE__, #haystack, (haystack), (needle))

/* Leaves the test (or the rank's function) and counts it as skipped, unless something failed. */
#define SKIP(reason)                                                                                       \
    do {                                                                                                   \
        test__skip(reason);                                                                                \
        return;                                                                                            \
    } while (0)

/* ---- inside ---- */

typedef struct test__case {
    const char *name;
    void (*run)(void);
    struct test__case *next;
} test__case;

/* Shared with forked ranks, so that a failed CHECK in a child counts even if the child then exits with 0. */
typedef struct test__counters {
    int failures;
    int skipped;
    int left_out; /* cases, by TEST_SAMPLE */
    char reason[200];
} test__counters;

static test__case *test__first, **test__last = &test__first;
static test__counters *test__now;
static const char *test__name = "";
static __thread int test__rank = -1; /* set by ranks.h; -1 outside a rank */
static int test__is_apart;           /* this process runs one test, and may end with it */

typedef struct test__value {
    char kind; /* 'i' signed, 'u' unsigned, 'f' floating, 's' string, 'p' pointer */
    long long i;
    unsigned long long u;
    long double f;
    const void *p;
} test__value;

static inline void test__add(test__case *c) {
    *test__last = c;
    test__last = &c->next;
}

/* The factor by which timeouts stretch here. */
static inline double test_slow(void) {
    const char *s = getenv("TEST_SLOW");
    double f = s ? atof(s) : 1.0;
    return f >= 1.0 ? f : 1.0;
}

/* Of the cases of long lists one in so many is to be run. */
static inline unsigned test_sample(void) {
    const char *s = getenv("TEST_SAMPLE");
    int of = s ? atoi(s) : 1;
    return of > 1 ? (unsigned)of : 1;
}

/* What is drawn by lot is drawn from here. */
static inline unsigned test_seed(void) {
    const char *s = getenv("TEST_SEED");
    return s ? (unsigned)strtoul(s, NULL, 10) : 1u;
}

/* Counts cases that were left out; of ranks that all leave them out, the first does. */
static inline void test_count_left_out(int cases) {
    if (test__rank <= 0) {
        __atomic_fetch_add(&test__now->left_out, cases, __ATOMIC_RELAXED);
    }
}

/* Whether a case of a long list is to be left out, by a number that is another one for each. */
static inline int test_left_out(unsigned number) {
    int left_out = (number + test_seed()) % test_sample() != 0;
    test_count_left_out(left_out);
    return left_out;
}

/* The folder with the tools and plugins that `make` builds; tests/run exports it. */
static inline const char *test_build_dir(void) {
    const char *s = getenv("TEST_BUILD");
    return s ? s : "build";
}

static inline double test_now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* One write per message, so that the lines of concurrent ranks do not mix; after 20 failures only the count goes on. */
__attribute__((format(printf, 3, 4))) static inline void test__fail(const char *file, int line, const char *fmt, ...) {
    char text[1024], who[24] = "";
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (test__rank >= 0) {
        snprintf(who, sizeof who, "[rank %d] ", test__rank);
    }
    int before = test__now ? __atomic_fetch_add(&test__now->failures, 1, __ATOMIC_RELAXED) : 0;
    if (before < 20) {
        fprintf(stderr, "%s%s:%d: %s: %s\n", who, file, line, test__name, text);
    }
}

static inline void test__skip(const char *reason) {
    if (__atomic_exchange_n(&test__now->skipped, 1, __ATOMIC_ACQ_REL) == 0) {
        snprintf(test__now->reason, sizeof test__now->reason, "%s", reason);
    }
}

static inline test__value test__i(long long x) { test__value v = {'i', x, 0, 0, NULL}; return v; }
static inline test__value test__u(unsigned long long x) { test__value v = {'u', 0, x, 0, NULL}; return v; }
static inline test__value test__f(long double x) { test__value v = {'f', 0, 0, x, NULL}; return v; }
static inline test__value test__s(const char *x) { test__value v = {'s', 0, 0, 0, x}; return v; }
static inline test__value test__p(const void *x) { test__value v = {'p', 0, 0, 0, x}; return v; }

#ifdef __cplusplus
static inline test__value test__of(const char *x) { return test__s(x); }
static inline test__value test__of(char *x) { return test__s(x); }
template <class T> static inline test__value test__of(T *x) { return test__p(x); }
static inline test__value test__of(float x) { return test__f(x); }
static inline test__value test__of(double x) { return test__f(x); }
static inline test__value test__of(unsigned long x) { return test__u(x); }
static inline test__value test__of(unsigned long long x) { return test__u(x); }
template <class T> static inline test__value test__of(T x) { return test__i((long long)x); }
#define TEST__VALUE(x) test__of(x)
#else
#define TEST__VALUE(x)                                                                                     \
    _Generic((x), float: test__f, double: test__f, long double: test__f, unsigned long: test__u,           \
             unsigned long long: test__u, char *: test__s, const char *: test__s, void *: test__p,         \
             const void *: test__p, default: test__i)(x)
#endif

static inline int test__is_negative(test__value a) { return a.kind == 'i' && a.i < 0; }

/* Equal as numbers, whatever the signedness: -1 and UINT64_MAX differ. NaN equals nothing. */
static inline int test__equal(test__value a, test__value b) {
    if (a.kind == 's' && b.kind == 's') {
        const char *x = (const char *)a.p, *y = (const char *)b.p;
        return x == y || (x && y && strcmp(x, y) == 0);
    }
    if (strchr("sp", a.kind) || strchr("sp", b.kind)) {
        return a.p == b.p && a.i == b.i && a.u == b.u;
    }
    if (a.kind == 'f' || b.kind == 'f') {
        long double x = a.kind == 'f' ? a.f : a.kind == 'i' ? (long double)a.i : (long double)a.u;
        long double y = b.kind == 'f' ? b.f : b.kind == 'i' ? (long double)b.i : (long double)b.u;
        return !(x < y) && !(x > y) && x == x && y == y;
    }
    if (test__is_negative(a) || test__is_negative(b)) {
        return a.kind == b.kind && a.i == b.i;
    }
    return (a.kind == 'i' ? (unsigned long long)a.i : a.u) == (b.kind == 'i' ? (unsigned long long)b.i : b.u);
}

static inline const char *test__show(test__value v, char *text, size_t size) {
    switch (v.kind) {
    case 'i': snprintf(text, size, "%lld", v.i); break;
    case 'u': snprintf(text, size, "%llu", v.u); break;
    case 'f': snprintf(text, size, "%.17Lg", v.f); break;
    case 's': snprintf(text, size, "\"%s\"", v.p ? (const char *)v.p : "(null)"); break;
    default: snprintf(text, size, "%p", v.p); break;
    }
    return text;
}

static inline void test__check_eq(const char *file, int line, const char *sa, const char *sb, test__value a,
                                  test__value b) {
    char ta[300], tb[300];
    if (!test__equal(a, b)) {
        test__fail(file, line, "%s is %s, expected %s which is %s", sa, test__show(a, ta, sizeof ta), sb,
                   test__show(b, tb, sizeof tb));
    }
}

static inline void test__check_str(const char *file, int line, const char *expr, const char *haystack,
                                   const char *needle) {
    if (!haystack || !strstr(haystack, needle)) {
        test__fail(file, line, "%s is \"%.600s\", lacks \"%.200s\"", expr, haystack ? haystack : "(null)", needle);
    }
}

/* A hung test ends the program: threads cannot be killed one by one. Only async-signal-safe calls here. */
static inline void test__on_alarm(int sig) {
    static const char text[] = ": the test hung, the program ends here\n0 passed, 1 failed, 0 skipped\n";
    (void)sig;
    ssize_t n = write(1, test__name, strlen(test__name));
    n += write(1, text, sizeof text - 1);
    _exit(n > 0 ? 1 : 2);
}

static inline int test__wanted(const char *name, int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (strstr(name, argv[i])) {
            return 1;
        }
    }
    return argc <= 1;
}

/* Whether a test is of the part that TEST_PART names, by its number in the list. */
static inline int test__is_of_part(int number) {
    const char *s = getenv("TEST_PART");
    int part = 0, of = 1;
    if (s && (sscanf(s, "%d/%d", &part, &of) != 2 || part < 0 || part >= of)) {
        fprintf(stderr, "TEST_PART is \"%s\"; a part and how many there are is possible, from 0/7 to 6/7\n", s);
        exit(1);
    }
    return number % of == part;
}

static inline void test__run_here(const test__case *c) {
    alarm((unsigned)(TEST_TIMEOUT_S * test_slow()));
    c->run();
    alarm(0);
}

static inline void test__run_apart(const test__case *c) {
    int status = 0;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        test__is_apart = 1;
        test__run_here(c);
        fflush(NULL);
        exit(0);
    }
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) {
        test__fail(__FILE__, __LINE__, "the process of this test ended with %#x, as from waitpid", (unsigned)status);
    }
}

/* Runs one test; returns 'p'assed, 'f'ailed or 's'kipped. */
static inline char test__run(const test__case *c) {
    memset(test__now, 0, sizeof *test__now);
    test__name = c->name;
    double start = test_now_s();
    if (getenv("TEST_APART") != NULL) {
        test__run_apart(c);
    } else {
        test__run_here(c);
    }
    double took = test_now_s() - start;
    if (test__now->failures) {
        printf("FAIL %s: %d failed checks (%.2f s)\n", c->name, test__now->failures, took);
        return 'f';
    }
    if (test__now->skipped) {
        printf("skip %s: %s\n", c->name, test__now->reason);
        return 's';
    }
    printf("ok   %s (%.2f s)\n", c->name, took);
    return 'p';
}

int main(int argc, char **argv) {
    int passed = 0, failed = 0, skipped = 0, left_out = 0, number = 0, elsewhere = 0;
    void *shared = mmap(NULL, sizeof *test__now, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) {
        perror("mmap");
        return 1;
    }
    test__now = (test__counters *)shared;
    setvbuf(stdout, NULL, _IOLBF, 0); /* lines appear in order with stderr, and none is doubled by fork */
    signal(SIGALRM, test__on_alarm);
    for (const test__case *c = test__first; c; c = c->next) {
        if (argc == 2 && strcmp(argv[1], "-l") == 0) {
            puts(c->name);
        } else if (test__wanted(c->name, argc, argv) && !test__is_of_part(number++)) {
            elsewhere++;
        } else if (test__wanted(c->name, argc, argv)) {
            char r = test__run(c);
            left_out += test__now->left_out;
            passed += r == 'p';
            failed += r == 'f';
            skipped += r == 's';
        }
    }
    if (argc == 2 && strcmp(argv[1], "-l") == 0) {
        return 0;
    }
    if (left_out > 0) {
        printf("%d cases left out by TEST_SAMPLE\n", left_out);
    }
    if (elsewhere > 0) {
        printf("%d tests left out by TEST_PART\n", elsewhere);
    }
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed > 0 || passed + skipped == 0;
}

#endif /* TEST_H */

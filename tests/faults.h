/* faults.h: what tests of failures share: a seed that is printed, verified all_reduces, open descriptors. */
#ifndef TEST_FAULTS_H
#define TEST_FAULTS_H

#include "ranks.h"

#include "ddl.h"

#include <dirent.h>
#include <stdbool.h>

/* splitmix64: small, and every seed is a good one. */
static inline uint64_t fault_random(uint64_t *state) {
    uint64_t z = (*state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

/* TEST_SEED repeats a run. */
static inline uint64_t fault_seed(const char *what) {
    const char *s = getenv("TEST_SEED");
    uint64_t seed = s != NULL ? strtoull(s, NULL, 10) : (uint64_t)(test_now_s() * 1e6) % 1000000000u;
    printf("%s: TEST_SEED=%llu\n", what, (unsigned long long)seed);
    return seed;
}

static inline int fault_torture(void) { return getenv("TEST_TORTURE") != NULL; }

/* How often the long loop is run here; FAULT_RUNS in the environment overrides both. */
static inline int fault_runs(int normal, int torture) {
    const char *s = getenv("FAULT_RUNS");
    return s != NULL ? atoi(s) : fault_torture() ? torture : normal;
}

/* Where the plugins that were built lie; an absolute path. */
static inline const char *fault_plugins(void) {
    static char here[4096];
    const char *build = getenv("TEST_BUILD");
    return build != NULL ? build : realpath("build", here) != NULL ? here : "";
}

static inline bool fault_has_plugin(const char *name) {
    char path[4200];
    snprintf(path, sizeof path, "%s/libddl-%s.so", fault_plugins(), name);
    return access(path, R_OK) == 0;
}

/* Open descriptors of this process, less the one that reads the folder and those of devices for RDMA, which their
 * libraries keep to the end of the process. */
static inline int fault_fds(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    for (struct dirent *e = folder != NULL ? readdir(folder) : NULL; e != NULL; e = readdir(folder)) {
        char at[4096];
        ssize_t bytes = readlinkat(dirfd(folder), e->d_name, at, sizeof at - 1);
        at[bytes > 0 ? bytes : 0] = 0;
        count += e->d_name[0] != '.' && strncmp(at, "/dev/infiniband/", 16) != 0;
    }
    if (folder != NULL) {
        closedir(folder);
    }
    return count - 1;
}

/* One all_reduce of integers in floats, every element compared with a plain sum. */
static inline ddl_status fault_all_reduce(ddl_group *g, int64_t count, int64_t salt) {
    int32_t n = ddl_size(g), me = ddl_rank(g);
    float *in = (float *)malloc((size_t)count * sizeof *in), *out = (float *)malloc((size_t)count * sizeof *out);
    for (int64_t i = 0; i < count; i++) {
        in[i] = (float)((i + salt) % 97 * (me + 1));
        out[i] = -12345.0f;
    }
    ddl_status status = ddl_all_reduce(g, ddl_tensor_1d(in, DDL_F32, count), ddl_tensor_1d(out, DDL_F32, count), DDL_SUM);
    for (int64_t i = 0; status == DDL_OK && i < count; i++) {
        float expected = (float)((i + salt) % 97 * (n * (n + 1) / 2));
        if (!(out[i] >= expected && out[i] <= expected)) {
            test__fail(__FILE__, __LINE__, "element %lld of %lld is %g, expected %g", (long long)i, (long long)count,
                       (double)out[i], (double)expected);
            break;
        }
    }
    free(in);
    free(out);
    return status;
}

/* Verified all_reduces of many sizes; the first status that is not DDL_OK. */
static inline ddl_status fault_all_reduces(ddl_group *g, int rounds) {
    static const int64_t counts[] = {1, 7, 1000, 20011, 3, 100003};
    for (int i = 0; i < rounds; i++) {
        ddl_status status = fault_all_reduce(g, counts[i % 6], i);
        if (status != DDL_OK) {
            return status;
        }
    }
    return DDL_OK;
}

static inline int fault_compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts, and gives the value that a share of them does not exceed. */
static inline double fault_percentile(double *values, int count, double share) {
    if (count == 0) {
        return 0;
    }
    qsort(values, (size_t)count, sizeof *values, fault_compare_doubles);
    int at = (int)(share * count);
    return values[at < count ? at : count - 1];
}

#endif /* TEST_FAULTS_H */

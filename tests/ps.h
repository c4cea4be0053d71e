/* ps.h: workers and servers for tests of parameter servers.
 *
 *     static void work(ddl_group *w, ddl_ps *ps, void *arg) { ... OK(ddl_ps_push(ps, ...)) ... }
 *     ps_run(w, &config, params, count, work, arg);     every rank: creates, works or serves, frees */
#ifndef TEST_PS_H
#define TEST_PS_H

#include "world.h"

typedef void (*ps_fn)(ddl_group *w, ddl_ps *ps, void *arg);

static inline void ps_run(ddl_group *w, const ddl_ps_config *config, const ddl_tensor *params, int32_t count, ps_fn fn,
                          void *arg) {
    ddl_ps *ps = NULL;
    ddl_ps_info info;
    if (OK(ddl_ps_create(w, config, params, count, &ps)) != DDL_OK) {
        return;
    }
    OK(ddl_ps_info_get(ps, &info));
    if (info.worker >= 0) {
        fn(w, ps, arg);
    } else {
        OK(ddl_ps_serve(ps));
    }
    OK(ddl_ps_free(&ps));
    CHECK(ps == NULL);
}

static inline int32_t ps_worker(ddl_ps *ps) {
    ddl_ps_info info;
    ddl_ps_info_get(ps, &info);
    return info.worker;
}

static inline int32_t ps_workers(ddl_ps *ps) {
    ddl_ps_info info;
    ddl_ps_info_get(ps, &info);
    return info.workers;
}

/* Element i of the gradient of a worker at a step: differs with all three, and its sums are rounded. */
static inline float ps_grad(int worker, int step, int64_t i) {
    uint64_t x = (uint64_t)(worker + 1) * 0x9E3779B97F4A7C15ull + (uint64_t)(step + 1) * 0xBF58476D1CE4E5B9ull +
                 (uint64_t)(i + 1) * 0x94D049BB133111EBull;
    x ^= x >> 31;
    x *= 0xD6E8FEB86659FD93ull;
    return (float)((double)(x >> 40) / 16777216.0 - 0.5);
}

static inline void ps_fill(float *to, int64_t count, int worker, int step) {
    for (int64_t i = 0; i < count; i++) {
        to[i] = ps_grad(worker, step, i);
    }
}

#endif /* TEST_PS_H */

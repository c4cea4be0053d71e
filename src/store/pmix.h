/* pmix: the key-value space of a launcher that speaks PMIx (srun --mpi=pmix, Open MPI's mpirun, prun), through its
 * client library, opened at run time. The structs are those of the PMIx Standard 2 to 5, whose layout libpmix keeps;
 * a test compares them with its headers. */
#ifndef DDL_STORE_PMIX_H
#define DDL_STORE_PMIX_H

#include "client.h"

#ifndef DDL_NO_PLUGINS
#include <dlfcn.h>
#include <semaphore.h>
#include <stdatomic.h>

typedef struct ddl__pmix_proc {
    char space[256];
    uint32_t rank;
} ddl__pmix_proc;

typedef struct ddl__pmix_value {
    uint16_t type;
    union {
        bool flag;
        int32_t integer;
        char *string;
        uint64_t room[3];
    } data;
} ddl__pmix_value;

typedef struct ddl__pmix_info {
    char key[512];
    uint32_t flags;
    ddl__pmix_value value;
} ddl__pmix_info;

enum { DDL__PMIX_BOOL = 1, DDL__PMIX_STRING = 3, DDL__PMIX_INT = 6, DDL__PMIX_GLOBAL = 3 };

typedef void (*ddl__pmix_done_fn)(int status, void *user);

typedef struct ddl__pmix {
    void *library;
    int (*init)(ddl__pmix_proc *me, ddl__pmix_info *info, size_t count);
    int (*finalize)(const ddl__pmix_info *info, size_t count);
    int (*put)(uint8_t scope, const char *key, ddl__pmix_value *value);
    int (*commit)(void);
    int (*fence)(const ddl__pmix_proc *procs, size_t proc_count, const ddl__pmix_info *info, size_t count,
                 ddl__pmix_done_fn done, void *user);
    int (*get)(const ddl__pmix_proc *proc, const char *key, const ddl__pmix_info *info, size_t count,
               ddl__pmix_value **out);
    const char *(*text)(int status);
} ddl__pmix;

/* A fence cannot be cancelled. Who comes last of its end and its waiter frees this. */
typedef struct ddl__pmix_fence {
    sem_t ended;
    int status;
    atomic_int holders;
} ddl__pmix_fence;

static void ddl__pmix_fence_drop(ddl__pmix_fence *f) {
    /* acq_rel: the last one sees all that the other did with it */
    if (atomic_fetch_sub_explicit(&f->holders, 1, memory_order_acq_rel) == 1) {
        sem_destroy(&f->ended);
        free(f);
    }
}

static void ddl__pmix_fence_ended(int status, void *user) {
    ddl__pmix_fence *f = user;
    f->status = status;
    sem_post(&f->ended);
    ddl__pmix_fence_drop(f);
}

static const char *ddl__pmix_library(void) {
    const char *named = ddl__setting_env("DDL_PMIX_LIBRARY");
    return named != NULL ? named : "libpmix.so.2";
}

/* NULL, or what is wrong with the library. It stays open: it has threads of its own. */
static const char *ddl__pmix_load(ddl__pmix *p) {
    p->library = dlopen(ddl__pmix_library(), RTLD_NOW | RTLD_LOCAL);
    if (p->library == NULL) {
        return dlerror();
    }
    const struct {
        const char *name;
        void *to;
    } symbols[] = {{"PMIx_Init", &p->init},        {"PMIx_Finalize", &p->finalize}, {"PMIx_Put", &p->put},
                   {"PMIx_Commit", &p->commit},    {"PMIx_Fence_nb", &p->fence},    {"PMIx_Get", &p->get},
                   {"PMIx_Error_string", &p->text}};
    for (size_t i = 0; i < DDL__COUNT_OF(symbols); i++) {
        void *found = dlsym(p->library, symbols[i].name);
        if (found == NULL) {
            return dlerror();
        }
        memcpy(symbols[i].to, &found, sizeof found);
    }
    return NULL;
}

static ddl_status ddl__pmix_fail(const ddl__pmix *p, const ddl__settings *s, const char *what, int status,
                                 ddl__sentence *why) {
    return ddl__fail(why, DDL_ERR_SYSTEM,
                     "ddl_init: %s of the launcher's PMIx (%s) failed on rank %d: %s (%d). Set MASTER_ADDR and "
                     "MASTER_PORT on all ranks instead",
                     what, s->launch.by, s->launch.rank, p->text(status), status);
}

/* All ranks have called, and what they put is known everywhere. */
static ddl_status ddl__pmix_fence_wait(const ddl__pmix *p, const ddl__settings *s, uint64_t deadline_ns,
                                       ddl__sentence *why) {
    ddl__pmix_info collect = {.key = "pmix.collect", .value = {.type = DDL__PMIX_BOOL, .data = {.flag = true}}};
    ddl__pmix_fence *f = malloc(sizeof *f); /* not the program's allocator: it may outlive the context */
    if (f == NULL) {
        return ddl__fail(why, DDL_ERR_NOMEM, "ddl_init: no memory to meet by PMIx");
    }
    f->status = 0;
    sem_init(&f->ended, 0, 0);
    atomic_init(&f->holders, 2);
    int status = p->fence(NULL, 0, &collect, 1, ddl__pmix_fence_ended, f);
    if (status != 0) {
        ddl__pmix_fence_drop(f);
        ddl__pmix_fence_drop(f);
        return ddl__pmix_fail(p, s, "the fence", status, why);
    }
    bool ended = false;
    while (!(ended = sem_trywait(&f->ended) == 0) && ddl__now_ns() < deadline_ns) {
        ddl__pause_ms(1);
    }
    status = ended ? f->status : 0;
    ddl__pmix_fence_drop(f);
    if (!ended) {
        return ddl__fail(why, DDL_ERR_TIMEOUT,
                         "ddl_init: not all of the %d ranks have come to the fence of the launcher's PMIx (%s) after "
                         "%lld ms. Look at what the others printed last",
                         s->launch.world, s->launch.by, (long long)s->init_timeout_ms);
    }
    return status == 0 ? DDL_OK : ddl__pmix_fail(p, s, "the fence", status, why);
}

/* The text of a value. False: it has none, or one that is too long. */
static bool ddl__pmix_take(const ddl__pmix_value *value, char *text, size_t cap) {
    bool good = value != NULL && value->type == DDL__PMIX_STRING && value->data.string != NULL &&
                strlen(value->data.string) < cap;
    if (good) {
        memcpy(text, value->data.string, strlen(value->data.string) + 1);
    }
    return good;
}

static ddl_status ddl__pmix_talk(const ddl__pmix *p, const ddl__settings *s, const ddl__pmix_proc *me, char *text,
                                 size_t cap, uint64_t deadline_ns, ddl__sentence *why) {
    int status = 0;
    if (s->launch.rank == 0) {
        ddl__pmix_value value = {.type = DDL__PMIX_STRING, .data = {.string = text}};
        status = p->put(DDL__PMIX_GLOBAL, "ddl", &value);
        status = status == 0 ? p->commit() : status;
    }
    if (status != 0) {
        return ddl__pmix_fail(p, s, "the key-value space", status, why);
    }
    DDL__TRY(ddl__pmix_fence_wait(p, s, deadline_ns, why));
    if (s->launch.rank == 0) {
        return DDL_OK;
    }
    ddl__pmix_proc zero = *me;
    ddl__pmix_value *value = NULL;
    ddl__pmix_info limit = {.key = "pmix.timeout", .value = {.type = DDL__PMIX_INT, .data = {.integer = 10}}};
    zero.rank = 0;
    status = p->get(&zero, "ddl", &limit, 1, &value);
    if (status != 0 || !ddl__pmix_take(value, text, cap)) {
        return ddl__pmix_fail(p, s, "the word of rank 0", status, why);
    }
    ddl__wipe(value->data.string, strlen(value->data.string));
    free(value->data.string);
    free(value);
    return DDL_OK;
}

/* text of rank 0 reaches all. Blocks until all ranks have called, or the deadline. The library is left at once, as the
 * launcher takes the end of a process that has not left for an accident. */
static ddl_status ddl__pmix_share(const ddl__settings *s, char *text, size_t cap, uint64_t deadline_ns,
                                  ddl__sentence *why) {
    ddl__pmix p = {0};
    ddl__pmix_proc me = {.rank = 0};
    const char *wrong = ddl__pmix_load(&p);
    if (wrong != NULL) {
        return ddl__fail(
            why, DDL_ERR_CONFIG,
            "ddl_init: this process is rank %d of %d (by %s), and to meet through the launcher's PMIx it needs "
            "%s: %.200s. Install it, name it in DDL_PMIX_LIBRARY, or set MASTER_ADDR and MASTER_PORT on all "
            "ranks (mpirun -x, srun --export)",
            s->launch.rank, s->launch.world, s->launch.by, ddl__pmix_library(), wrong);
    }
    int status = p.init(&me, NULL, 0);
    if (status != 0) {
        return ddl__pmix_fail(&p, s, "the library", status, why);
    }
    ddl_status result = ddl__pmix_talk(&p, s, &me, text, cap, deadline_ns, why);
    if (result != DDL_ERR_TIMEOUT) { /* with a fence under way it might wait for ever */
        p.finalize(NULL, 0);
    }
    return result;
}

#else /* DDL_NO_PLUGINS */

static ddl_status ddl__pmix_share(const ddl__settings *s, char *text, size_t cap, uint64_t deadline_ns,
                                  ddl__sentence *why) {
    (void)text, (void)cap, (void)deadline_ns;
    return ddl__fail(why, DDL_ERR_CONFIG,
                     "ddl_init: this process is rank %d of %d (by %s), but was built with DDL_NO_PLUGINS and so cannot "
                     "meet through PMIx. Set MASTER_ADDR and MASTER_PORT on all ranks (mpirun -x, srun --export)",
                     s->launch.rank, s->launch.world, s->launch.by);
}

#endif /* DDL_NO_PLUGINS */
#endif /* DDL_STORE_PMIX_H */

/* rendezvous.h: ranks that meet and no more, for the tests of the store: what each is given, and what it came to. */
#ifndef TEST_RENDEZVOUS_H
#define TEST_RENDEZVOUS_H

#include "test.h"

#include "ranks.h"

#define DDL__BIND_NS (uint64_t)(700e6 * test_slow())
#define DDL__REFUSED_NS (uint64_t)(800e6 * test_slow())
#include "../src/store.h"

#include <sched.h>

#define N_MAX 64

/* One rank: what it is given, and what it came to. */
typedef struct one {
    ddl_config config;
    size_t bytes;
    int delay_ms, ports; /* ports: when not 0, as beside torchrun's agent */
    unsigned mark;       /* goes into the blobs, so that tables of two jobs differ */
    ddl_status status;
    ddl__sentence why;
    uint64_t strangers;
    double took_s;
    bool table_right;
} one;

static const char secret[] = "a secret that only tests use";
static char rendezvous[200];

static void new_place(void) { snprintf(rendezvous, sizeof rendezvous, "tcp://127.0.0.1:%d", ranks_port()); }

static uint8_t byte_of(unsigned mark, int rank, size_t at) {
    return (uint8_t)(mark * 91 + (unsigned)rank * 7 + at * 13 + (at >> 8));
}

static void *run_one(void *p) {
    one *o = p;
    ddl__base base = {0};
    ddl__settings s;
    double start;
    ddl__pause_ms((uint64_t)o->delay_ms);
    start = test_now_s();
    o->status = ddl__settings_read(&o->config, &base, &s, &o->why);
    if (o->status == DDL_OK) {
        s.place.ports = o->ports != 0 ? o->ports : s.place.ports;
        size_t whole = (size_t)s.launch.world * o->bytes;
        uint8_t *blob = malloc(o->bytes), *table = malloc(whole);
        memset(table, 0xee, whole);
        for (size_t i = 0; i < o->bytes; i++) {
            blob[i] = byte_of(o->mark, s.launch.rank, i);
        }
        o->status = ddl__rendezvous(&s, &base, blob, o->bytes, table, &o->strangers, &o->why);
        o->table_right = o->status == DDL_OK;
        for (size_t i = 0; i < whole && o->table_right; i++) {
            o->table_right = table[i] == byte_of(o->mark, (int)(i / o->bytes), i % o->bytes);
        }
        free(blob);
        free(table);
        ddl__settings_free(&base, &s);
    }
    o->took_s = test_now_s() - start;
    CHECK_EQ(base.memory, 0);
    return NULL;
}

/* Warnings of rank 0 about intruders are wanted, but not on the screen. */
static int warnings;
static void count_warning(void *user, ddl_log_level level, const char *line) {
    (void)user;
    CHECK(level == DDL_LOG_WARN && strncmp(line, "ddl: rank ", 10) == 0 && strstr(line, "secret that") == NULL);
    __atomic_add_fetch(&warnings, 1, __ATOMIC_RELAXED);
}

static one rank_of(int world, int rank, const char *with_secret) {
    one o = {.bytes = 100};
    o.config.world_size = world;
    o.config.log = count_warning;
    o.config.rank = rank;
    o.config.rendezvous = rendezvous;
    o.config.secret = with_secret;
    o.config.secret_bytes = with_secret != NULL ? strlen(with_secret) : 0;
    o.config.init_timeout_ms = (int64_t)(20000 * test_slow());
    return o;
}

static void make_job(one *ones, int world, const char *with_secret) {
    for (int r = 0; r < world; r++) {
        ones[r] = rank_of(world, r, with_secret);
    }
}

static void run_all(one *ones, int count) {
    pthread_t threads[N_MAX * 2];
    for (int i = 0; i < count; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, run_one, &ones[i]), 0);
    }
    for (int i = 0; i < count; i++) {
        pthread_join(threads[i], NULL);
    }
}

static void check_good(const one *ones, int count) {
    for (int i = 0; i < count; i++) {
        CHECK_EQ(ones[i].status, DDL_OK);
        CHECK(ones[i].table_right);
        if (ones[i].status != DDL_OK) {
            CHECK_STR(ones[i].why.text, "no error"); /* prints it */
        }
    }
}

/* Descriptors before and after a test are as many. */
#define LEAKS_NOTHING(call)                                                                                            \
    do {                                                                                                               \
        int fds_before = ddl__open_fds();                                                                              \
        call;                                                                                                          \
        CHECK_EQ(ddl__open_fds(), fds_before);                                                                         \
    } while (0)

static const int worlds[] = {1, 2, 3, 16, 64};

static void all_sizes(const char *with_secret) {
    static const size_t sizes[] = {100, 1, DDL__BLOB_MAX};
    static one ones[N_MAX];
    for (size_t w = 0; w < DDL__COUNT_OF(worlds); w++) {
        for (size_t b = 0; b < DDL__COUNT_OF(sizes); b++) {
            int n = worlds[w];
            if (strncmp(rendezvous, "file", 4) != 0) {
                new_place();
            }
            make_job(ones, n, with_secret);
            for (int r = 0; r < n; r++) {
                ones[r].bytes = sizes[b];
                ones[r].mark = (unsigned)(w * 3 + b);
            }
            LEAKS_NOTHING(run_all(ones, n));
            check_good(ones, n);
            CHECK_EQ(ones[0].strangers, 0);
            if (getenv("TEST_TIMES") != NULL) {
                printf("%d ranks, %zu bytes: %.1f ms\n", n, sizes[b], ones[0].took_s * 1e3);
            }
            for (int r = 0; r < n && b == 0; r++) {
                CHECK(ones[r].took_s < 1.5 * test_slow());
            }
        }
    }
}

/* Ranks 0, 1, 2 and 4 of 8 come. */
static void missing(const char *with_secret, int short_rank) {
    static const int present[] = {0, 1, 2, 4};
    one ones[4];
    for (int i = 0; i < 4; i++) {
        ones[i] = rank_of(8, present[i], with_secret);
        ones[i].config.init_timeout_ms = i == short_rank ? 500 : 700 + (short_rank >= 0 ? 20000 : 0);
    }
    LEAKS_NOTHING(run_all(ones, 4));
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(ones[i].status, DDL_ERR_TIMEOUT);
        CHECK_STR(ones[i].why.text, "ranks 3, 5-7 of 8 have not come within");
        CHECK_EQ(strcmp(ones[i].why.text, ones[0].why.text), 0);
        CHECK(ones[i].took_s < 3 * test_slow());
    }
}

/* A rank as a process, to be killed. */
static pid_t spawn(one *o) {
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        run_one(o);
        _exit(o->status == DDL_OK ? 0 : 1);
    }
    return pid;
}

static void end(pid_t pid) {
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

#endif /* TEST_RENDEZVOUS_H */

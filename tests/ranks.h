/* ranks.h: run n ranks in a test, as threads (logic) or as forked processes (transports, faults).
 *
 * A rank is `void fn(int rank, int n, void *arg)`. CHECK, REQUIRE and SKIP work inside it and name the rank.
 *
 *     ranks_threads(4, fn, arg);               threads of this process; join all
 *     ranks_fork(4, fn, arg, 20);              processes; SIGKILL to all after 20 s; a rank that fails, fails the test
 *     int *seen = ranks_shared(64);            zeroed memory that forked ranks share; munmap is not needed
 *
 *     ranks r;                                 fault tests: the pieces of ranks_fork
 *     ranks_start(&r, 4, fn, arg);
 *     ranks_kill(&r, 2, SIGKILL);              or SIGSTOP, SIGCONT
 *     ranks_reaped(&r, 2);                     once it is gone,
 *     ranks_again(&r, 2, other_fn, arg);       another process takes its place
 *     ranks_wait(&r, 20);                      then look at r.status[i] (as from waitpid) and r.timed_out
 *
 * A forked rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and DDL_SECRET in its
 * environment, as from a launcher. Threads share one environment: give them ranks_port() and a secret by config.
 *
 * TEST_HOSTS="PID PID" spreads forked ranks over hosts: rank i enters the network, mounts and host name of the i-th of
 * these processes, counted round, and takes over its DDL_*, FI_* and MASTER_ADDR. jobs.py has them (Hosts.spread). Threads
 * stay where they are; with TEST_APART=1 too they are skipped. */
#ifndef TEST_RANKS_H
#define TEST_RANKS_H

#include "test.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <pthread.h>
#include <stdbool.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define RANKS_MAX 256

typedef void (*ranks_fn)(int rank, int n, void *arg);

typedef struct ranks {
    int n, port, timed_out;
    int running;           /* ranks not yet reaped */
    pid_t pid[RANKS_MAX];  /* 0 once reaped */
    int status[RANKS_MAX]; /* from waitpid */
    char secret[65];
} ranks;

static inline void *ranks_shared(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        perror("ranks_shared");
        exit(1);
    }
    return p;
}

/* A TCP port free on 127.0.0.1 now. Below the ephemeral range, so that no outgoing connection takes it meanwhile;
 * tests/run gives programs that it runs at once different ports (TEST_PORTS). */
static inline int ranks_port(void) {
    static int next;
    const char *first = getenv("TEST_PORTS");
    for (int tries = 0; tries < 3000; tries++) {
        int port = (first ? atoi(first) : 20000) + (int)((unsigned)getpid() * 31u + (unsigned)next++) % 3000;
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        struct sockaddr_in a;
        memset(&a, 0, sizeof a);
        a.sin_family = AF_INET;
        a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        a.sin_port = htons((unsigned short)port);
        int ok = bind(fd, (struct sockaddr *)&a, sizeof a) == 0 && listen(fd, 1) == 0;
        close(fd);
        if (ok) {
            return port;
        }
    }
    fprintf(stderr, "ranks_port: no free port\n");
    exit(1);
}

/* Between hosts loopback does not serve: an address of this machine's own. False: there is none. */
static inline bool ranks_own_address(char out[INET_ADDRSTRLEN]) {
    struct ifaddrs *all = NULL;
    bool found = false;
    for (struct ifaddrs *a = getifaddrs(&all) == 0 ? all : NULL; a != NULL && !found; a = a->ifa_next) {
        if (a->ifa_addr != NULL && a->ifa_addr->sa_family == AF_INET) {
            struct sockaddr_in in;
            memcpy(&in, a->ifa_addr, sizeof in);
            found = ntohl(in.sin_addr.s_addr) >> 24 != 127 &&
                    inet_ntop(AF_INET, &in.sin_addr, out, INET_ADDRSTRLEN) != NULL;
        }
    }
    freeifaddrs(all);
    return found;
}

/* Writes 64 random hexadecimal characters and a NUL. */
static inline void ranks_secret(char out[65]) {
    unsigned char raw[32];
    if (getrandom(raw, sizeof raw, 0) != (ssize_t)sizeof raw) {
        perror("getrandom");
        exit(1);
    }
    for (int i = 0; i < 32; i++) {
        snprintf(out + 2 * i, 3, "%02x", raw[i]);
    }
}

static inline void ranks__set(const char *name, int value) {
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

/* Sets what a launcher sets for one rank. Public: a test that execs a program calls it in the child itself. */
static inline void ranks_env(const ranks *r, int rank) {
    ranks__set("RANK", rank);
    ranks__set("WORLD_SIZE", r->n);
    ranks__set("LOCAL_RANK", rank);
    ranks__set("LOCAL_WORLD_SIZE", r->n);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    ranks__set("MASTER_PORT", r->port);
    setenv("DDL_SECRET", r->secret, 1);
}

/* Makes what this process is told by `pid`'s variables its own. */
static inline void ranks__take_variables(int pid) {
    static char text[1 << 17]; /* putenv keeps pointers into it */
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/environ", pid);
    FILE *file = fopen(path, "r");
    size_t bytes = file != NULL ? fread(text, 1, sizeof text - 1, file) : 0;
    for (char *at = text; at < text + bytes; at += strlen(at) + 1) {
        if (strncmp(at, "DDL_", 4) == 0 || strncmp(at, "FI_", 3) == 0 || strncmp(at, "MASTER_ADDR=", 12) == 0) {
            putenv(at);
        }
    }
    if (file != NULL) {
        fclose(file);
    }
}

static inline int ranks__enter_namespace(int pid, const char *name) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/ns/%s", pid, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    int rc = fd >= 0 ? setns(fd, 0) : -1;
    if (rc != 0) {
        fprintf(stderr, "ranks: entering %s: %s\n", path, strerror(errno));
    }
    close(fd);
    return rc;
}

/* Mounts come last: the host's /proc may be another, and this program's folder may not be there. */
static inline void ranks__enter_host(int n, int rank) {
    const char *list = getenv("TEST_HOSTS");
    int pid[8] = {0}, hosts = 0;
    for (char *end; list != NULL && *list != 0 && hosts < 8; list = end + strspn(end, " ")) {
        pid[hosts++] = (int)strtol(list, &end, 10);
    }
    if (hosts == 0) {
        return;
    }
    int host = pid[rank % hosts];
    ranks__take_variables(host);
    ranks__set("LOCAL_RANK", rank / hosts);
    ranks__set("LOCAL_WORLD_SIZE", (n - rank % hosts + hosts - 1) / hosts);
    if (ranks__enter_namespace(host, "net") != 0 || ranks__enter_namespace(host, "uts") != 0 ||
        ranks__enter_namespace(host, "mnt") != 0) {
        _exit(1);
    }
}

/* exit() rather than _exit(): the leak checker looks at each rank too. */
static inline void ranks__child(const ranks *r, int rank, ranks_fn fn, void *arg, pid_t parent) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) {
        _exit(1);
    }
    setpgid(0, 0);
    test__rank = rank;
    ranks_env(r, rank);
    ranks__enter_host(r->n, rank);
    fn(rank, r->n, arg);
    fflush(NULL);
    exit(0);
}

/* Ends a test that is in a process of its own (TEST_APART=1) as skipped. */
static inline void ranks__leave_out(const char *why) {
    if (test__is_apart) {
        test__skip(why);
        fflush(NULL);
        exit(0);
    }
}

static inline void ranks__admit(int n) {
    const char *most = getenv("TEST_MOST_RANKS");
    if (most != NULL && n > atoi(most)) {
        ranks__leave_out("TEST_MOST_RANKS leaves so many ranks out");
    }
}

static inline void ranks_start(ranks *r, int n, ranks_fn fn, void *arg) {
    pid_t self = getpid();
    ranks__admit(n);
    memset(r, 0, sizeof *r);
    if (n < 1 || n > RANKS_MAX) {
        fprintf(stderr, "ranks_start: %d ranks; 1 to %d are possible\n", n, RANKS_MAX);
        exit(1);
    }
    r->n = n;
    r->port = ranks_port();
    ranks_secret(r->secret);
    fflush(NULL);
    for (int i = 0; i < n; i++) {
        r->pid[i] = fork();
        if (r->pid[i] == 0) {
            ranks__child(r, i, fn, arg, self);
        }
        if (r->pid[i] < 0) {
            perror("fork");
            exit(1);
        }
        setpgid(r->pid[i], r->pid[i]); /* here and in the child: whoever comes first */
        r->running++;
    }
}

/* Starts a rank again that has ended and was reaped (ranks_reaped), as a launcher would. */
static inline void ranks_again(ranks *r, int rank, ranks_fn fn, void *arg) {
    pid_t self = getpid();
    fflush(NULL);
    r->pid[rank] = fork();
    if (r->pid[rank] == 0) {
        ranks__child(r, rank, fn, arg, self);
    }
    setpgid(r->pid[rank], r->pid[rank]);
    r->status[rank] = 0;
    r->running++;
}

/* Signals a rank and whatever it started. A rank that has been waited for is left alone. */
static inline void ranks_kill(ranks *r, int rank, int sig) {
    if (r->pid[rank] > 0) {
        kill(-r->pid[rank], sig);
    }
}

static inline void ranks__reap(ranks *r) {
    for (int i = 0; i < r->n; i++) {
        if (r->pid[i] > 0 && waitpid(r->pid[i], &r->status[i], WNOHANG) == r->pid[i]) {
            kill(-r->pid[i], SIGKILL); /* what the rank left behind */
            r->pid[i] = 0;
            r->running--;
        }
    }
}

/* Waits until a rank that was killed is gone. */
static inline void ranks_reaped(ranks *r, int rank) {
    while (r->pid[rank] > 0) {
        ranks__reap(r);
        usleep(200);
    }
}

/* Waits for all ranks; kills all after timeout_s (stretched by TEST_SLOW). Returns how many did not exit with 0. */
static inline int ranks_wait(ranks *r, double timeout_s) {
    double deadline = test_now_s() + timeout_s * test_slow();
    int bad = 0;
    for (ranks__reap(r); r->running; ranks__reap(r)) {
        if (test_now_s() > deadline) {
            r->timed_out = 1;
            for (int i = 0; i < r->n; i++) {
                ranks_kill(r, i, SIGKILL);
            }
        }
        usleep(1000);
    }
    for (int i = 0; i < r->n; i++) {
        bad += r->status[i] != 0;
    }
    return bad;
}

static inline void ranks__report(const ranks *r, double timeout_s) {
    if (r->timed_out) {
        test__fail(__FILE__, __LINE__, "%d ranks did not end within %.0f s and were killed", r->n,
                   timeout_s * test_slow());
    }
    for (int i = 0; i < r->n; i++) {
        if (WIFEXITED(r->status[i]) && WEXITSTATUS(r->status[i]) != 0) {
            test__fail(__FILE__, __LINE__, "rank %d of %d exited with %d", i, r->n, WEXITSTATUS(r->status[i]));
        } else if (WIFSIGNALED(r->status[i])) {
            test__fail(__FILE__, __LINE__, "rank %d of %d ended by signal %d (%s)", i, r->n, WTERMSIG(r->status[i]),
                       strsignal(WTERMSIG(r->status[i])));
        }
    }
}

static inline void ranks_fork(int n, ranks_fn fn, void *arg, double timeout_s) {
    ranks r;
    ranks_start(&r, n, fn, arg);
    if (ranks_wait(&r, timeout_s) || r.timed_out) {
        ranks__report(&r, timeout_s);
    }
}

typedef struct ranks__thread {
    pthread_t id;
    int rank, n;
    ranks_fn fn;
    void *arg;
} ranks__thread;

static inline void *ranks__thread_main(void *p) {
    ranks__thread *t = (ranks__thread *)p;
    test__rank = t->rank;
    t->fn(t->rank, t->n, t->arg);
    return NULL;
}

/* A rank that hangs is ended by the test's own timeout (TEST_TIMEOUT_S), with the whole program. */
static inline void ranks_threads(int n, ranks_fn fn, void *arg) {
    ranks__admit(n);
    if (getenv("TEST_HOSTS") != NULL) {
        ranks__leave_out("its ranks are threads of one process, which cannot be on two hosts");
    }
    ranks__thread *t = (ranks__thread *)calloc((size_t)n, sizeof *t);
    for (int i = 0; i < n; i++) {
        t[i].rank = i;
        t[i].n = n;
        t[i].fn = fn;
        t[i].arg = arg;
        if (pthread_create(&t[i].id, NULL, ranks__thread_main, &t[i]) != 0) {
            fprintf(stderr, "ranks_threads: no thread for rank %d\n", i);
            exit(1);
        }
    }
    for (int i = 0; i < n; i++) {
        pthread_join(t[i].id, NULL);
    }
    free(t);
}

#endif /* TEST_RANKS_H */

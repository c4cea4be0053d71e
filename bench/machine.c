/* machine: raw figures of this machine that bound what any library can reach on it. No library is involved: two
 * processes, sockets, memory. A collective's time can be held against them: an 8-byte all-reduce of two ranks cannot
 * beat one socket exchange, a large one cannot beat the stream rate.
 *
 *     cc -O2 -march=native -o machine bench/machine.c && ./machine
 *     ./machine all_reduce RANKS BYTES...    what an all_reduce in shared memory has to move at the least, and nothing else
 *     ./machine distance                     nanoseconds that a cache line takes from one core to another
 *
 * Medians; each block takes well under a second. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* How a process waits for bytes that are not there yet. */
typedef enum wait_mode { WAIT_SPIN, WAIT_YIELD, WAIT_POLL } wait_mode;
static const char *const wait_names[] = {"spin", "sched_yield", "poll"};

enum { RANKS_MAX = 64, ROUNDS_MAX = 4096 };

/* Shared by the processes: a barrier and the figures of all. */
typedef struct common {
    _Atomic int arrived;
    _Atomic int turn;
    double ns[RANKS_MAX][ROUNDS_MAX];
    double began[RANKS_MAX][ROUNDS_MAX];
} common;

static common *shared;
static int members = 2; /* that meet */

static void die(const char *what) {
    perror(what);
    exit(1);
}

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int count) {
    qsort(values, (size_t)count, sizeof *values, by_value);
    return values[count / 2];
}

/* Seq-cst defaults: this barrier is outside of what is measured. */
static void meet(void) {
    int turn = shared->turn;
    if (++shared->arrived == members) {
        shared->arrived = 0;
        shared->turn = turn + 1;
        return;
    }
    while (shared->turn == turn) {
        sched_yield();
    }
}

static void tcp_pair(int fds[2], const char *control) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int one = 1;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, length) != 0 || listen(listener, 1) != 0 ||
        getsockname(listener, (struct sockaddr *)&address, &length) != 0) {
        die("listen on loopback");
    }
    fds[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fds[0] < 0 || connect(fds[0], (struct sockaddr *)&address, length) != 0) {
        die("connect over loopback");
    }
    fds[1] = accept(listener, NULL, NULL);
    close(listener);
    for (int i = 0; i < 2; i++) {
        setsockopt(fds[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (control != NULL) {
            setsockopt(fds[i], IPPROTO_TCP, TCP_CONGESTION, control, (socklen_t)strlen(control));
        }
    }
}

static void make_pair(int fds[2], int is_unix, const char *control) {
    if (is_unix) {
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) {
            die("socketpair");
        }
    } else {
        tcp_pair(fds, control);
    }
    fcntl(fds[0], F_SETFL, O_NONBLOCK);
    fcntl(fds[1], F_SETFL, O_NONBLOCK);
}

static void pause_for(int fd, short events, wait_mode mode) {
    struct pollfd p = {.fd = fd, .events = events};
    if (mode == WAIT_POLL) {
        poll(&p, 1, -1);
    } else if (mode == WAIT_YIELD) {
        sched_yield();
    }
}

static size_t moved(ssize_t n) {
    if (n == 0 || (n < 0 && errno != EAGAIN)) {
        exit(1); /* the other process ended */
    }
    return n > 0 ? (size_t)n : 0;
}

/* Sends `out` bytes and receives `in` bytes at once, alternating, as a transport with one thread does. */
static void transfer(int fd, char *data, size_t out, size_t in, wait_mode mode) {
    while (out > 0 || in > 0) {
        size_t sent = out > 0 ? moved(send(fd, data, out, MSG_NOSIGNAL)) : 0;
        size_t got = in > 0 ? moved(recv(fd, data, in, 0)) : 0;
        out -= sent;
        in -= got;
        if (sent + got == 0 && (out > 0 || in > 0)) {
            pause_for(fd, (short)((in > 0 ? POLLIN : 0) | (out > 0 ? POLLOUT : 0)), mode);
        }
    }
}

typedef enum pattern { PING_PONG, BOTH_WAYS, ONE_WAY } pattern;
typedef struct experiment {
    pattern pattern;
    wait_mode mode;
    size_t bytes;
    int rounds;
} experiment;

static void play(int fd, int side, const experiment *e) {
    char *data = malloc(e->bytes);
    if (data == NULL) {
        die("malloc");
    }
    memset(data, side, e->bytes);
    for (int i = 0; i < e->rounds; i++) {
        meet();
        double start = now_ns();
        if (e->pattern == BOTH_WAYS) {
            transfer(fd, data, e->bytes, e->bytes, e->mode);
        } else {
            transfer(fd, data, side == 0 ? e->bytes : 0, side == 0 ? 0 : e->bytes, e->mode);
            if (e->pattern == PING_PONG) {
                transfer(fd, data, side == 0 ? 0 : e->bytes, side == 0 ? e->bytes : 0, e->mode);
            }
        }
        shared->ns[side][i] = now_ns() - start;
    }
    free(data);
}

/* Median over rounds of the slower side's time. */
static double between_two(int is_unix, const char *control, experiment e) {
    int fds[2];
    make_pair(fds, is_unix, control);
    shared->arrived = 0;
    pid_t child = fork();
    if (child < 0) {
        die("fork");
    }
    if (child == 0) {
        close(fds[0]);
        play(fds[1], 1, &e);
        _exit(0);
    }
    close(fds[1]);
    play(fds[0], 0, &e);
    waitpid(child, NULL, 0);
    close(fds[0]);
    for (int i = 0; i < e.rounds; i++) {
        double other = shared->ns[1][i];
        shared->ns[0][i] = other > shared->ns[0][i] ? other : shared->ns[0][i];
    }
    return median(shared->ns[0], e.rounds);
}

static void latencies(void) {
    printf("\n8 bytes between two processes, microseconds\n%-12s %14s %14s %14s %14s\n", "waiting by", "tcp round trip",
           "tcp exchange", "unix round trip", "unix exchange");
    for (int mode = WAIT_SPIN; mode <= WAIT_POLL; mode++) {
        printf("%-12s", wait_names[mode]);
        for (int is_unix = 0; is_unix < 2; is_unix++) {
            experiment there = {PING_PONG, (wait_mode)mode, 8, 4000};
            experiment both = {BOTH_WAYS, (wait_mode)mode, 8, 4000};
            printf(" %14.1f %14.1f", between_two(is_unix, NULL, there) / 1e3, between_two(is_unix, NULL, both) / 1e3);
        }
        printf("\n");
    }
}

/* Some systems default to a congestion control that paces (bbr): on loopback that costs, and reno is always allowed. */
static void streams(void) {
    static const struct {
        const char *name;
        int is_unix;
        const char *control;
        wait_mode mode;
    } rows[] = {{"tcp, poll", 0, NULL, WAIT_POLL},
                {"tcp, sched_yield", 0, NULL, WAIT_YIELD},
                {"tcp reno, poll", 0, "reno", WAIT_POLL},
                {"tcp reno, sched_yield", 0, "reno", WAIT_YIELD},
                {"unix, poll", 1, NULL, WAIT_POLL}};
    printf("\nstreams between two processes, GB/s of payload in one direction\n%-22s %12s %12s %12s %12s\n", "",
           "1M one way", "1M both ways", "16M one way", "16M both ways");
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        printf("%-22s", rows[i].name);
        for (size_t bytes = 1u << 20; bytes <= 16u << 20; bytes *= 16) {
            int rounds = bytes > 1u << 20 ? 11 : 101;
            experiment one = {ONE_WAY, rows[i].mode, bytes, rounds};
            experiment both = {BOTH_WAYS, rows[i].mode, bytes, rounds};
            printf(" %12.2f %12.2f", (double)bytes / between_two(rows[i].is_unix, rows[i].control, one),
                   (double)bytes / between_two(rows[i].is_unix, rows[i].control, both));
        }
        printf("\n");
    }
}

/* How far apart two cores are, in nanoseconds that a cache line takes from one to the other: the least of many short
 * series, since what else runs only makes them longer. A virtual machine may find its cores moved while it runs. */
static double line_ns(int from, int to) {
    enum { SERIES = 100, TRIPS = 200 };
    double least = 1e9;
    pid_t child = fork();
    if (child < 0) {
        die("fork");
    }
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(child == 0 ? to : from, &one);
    sched_setaffinity(0, sizeof one, &one);
    for (int i = 0; i < SERIES; i++) {
        double start = now_ns();
        for (int k = 0; k < TRIPS; k++) {
            int mine = 2 * (i * TRIPS + k) + (child == 0);
            for (int tries = 1; shared->turn != mine; tries++) {
                if (tries % 4096 == 0) {
                    sched_yield(); /* the other may share this core, if the mask was refused */
                }
            }
            shared->turn = mine + 1;
        }
        double ns = (now_ns() - start) / TRIPS / 2;
        least = ns < least ? ns : least;
    }
    if (child == 0) {
        _exit(0);
    }
    waitpid(child, NULL, 0);
    return least;
}

/* Between the first two cores that this process may use; 0 where there is one. */
static int distance(void) {
    cpu_set_t all;
    int cpus[2] = {0, 0}, found = 0;
    sched_getaffinity(0, sizeof all, &all);
    for (int i = 0; i < CPU_SETSIZE && found < 2; i++) {
        if (CPU_ISSET(i, &all)) {
            cpus[found++] = i;
        }
    }
    printf("%.1f\n", found == 2 ? line_ns(cpus[0], cpus[1]) : 0.0);
    return 0;
}

/* The plain loop a user would write; what the compiler makes of it is the machine's offer. */
static void add(float *restrict dst, const float *restrict src, size_t count) {
    for (size_t i = 0; i < count; i++) {
        dst[i] += src[i];
    }
}

static double memory_rate(int reduces, float *dst, float *src, size_t bytes) {
    double ns[64];
    int repeat = bytes < 1u << 20 ? 64 : 1;
    for (int i = 0; i < 31; i++) {
        double start = now_ns();
        for (int k = 0; k < repeat; k++) {
            if (reduces) {
                add(dst, src, bytes / sizeof *dst);
            } else {
                memcpy(dst, src, bytes);
            }
            __asm__ volatile("" : : "r"(dst) : "memory"); /* or the compiler drops repeats of the same copy */
        }
        ns[i] = (now_ns() - start) / repeat;
    }
    return (double)bytes / median(ns, 31);
}

static void memories(void) {
    size_t most = 64u << 20;
    float *dst = malloc(most);
    float *src = malloc(most);
    if (dst == NULL || src == NULL) {
        die("malloc");
    }
    memset(dst, 0, most);
    memset(src, 0, most);
    printf("\nmemory on one core, GB/s of destination bytes\n%-12s %12s %12s\n", "bytes", "memcpy", "d[i] += s[i]");
    for (size_t bytes = 32u << 10; bytes <= most; bytes *= bytes == 16u << 20 ? 4 : 8) {
        printf("%-12zu %12.1f %12.1f\n", bytes, memory_rate(0, dst, src, bytes), memory_rate(1, dst, src, bytes));
    }
    free(dst);
    free(src);
}

/* Where ranks see each other's memory, each has to read its part of all buffers and to write it to all. Nothing is added
 * here: a part goes from one buffer to the next, block by block. */
static void move_part(char *const *buffers, int ranks, int rank, size_t bytes) {
    char held[65536];
    size_t part = bytes / (size_t)ranks / 64 * 64, at = part * (size_t)rank;
    size_t end = rank == ranks - 1 ? bytes : at + part;
    for (size_t n; at < end; at += n) {
        n = end - at < sizeof held ? end - at : sizeof held;
        memcpy(held, buffers[0] + at, n);
        for (int j = 1; j < ranks; j++) {
            memcpy(buffers[j - 1] + at, buffers[j] + at, n);
        }
        memcpy(buffers[ranks - 1] + at, held, n);
    }
}

/* To the core of its number, of those that this process may use. Two that share one, as after a fork on a busy machine,
 * would find each other's data in their own cache: 39 us for 2 MiB where it takes 55 between the cores. */
static void keep_to_core(int rank, int ranks) {
    cpu_set_t all, one;
    if (sched_getaffinity(0, sizeof all, &all) != 0 || ranks > CPU_COUNT(&all)) {
        return;
    }
    for (int i = 0; i < CPU_SETSIZE; i++) {
        if (CPU_ISSET(i, &all) && rank-- == 0) {
            CPU_ZERO(&one);
            CPU_SET(i, &one);
            sched_setaffinity(0, sizeof one, &one);
        }
    }
}

/* Each rewrites its buffer before each round, as in peers/measure.h. */
static void play_limit(char *const *buffers, int ranks, int rank, size_t bytes, int rounds) {
    for (int i = -2; i < rounds; i++) {
        memset(buffers[rank], i & 127, bytes);
        meet();
        double start = now_ns();
        move_part(buffers, ranks, rank, bytes);
        if (i >= 0) {
            shared->ns[rank][i] = now_ns();
            shared->began[rank][i] = start;
        }
        meet();
    }
}

/* The slowest rank's time, as in peers/measure.h; where ranks share cores, and so work one after the other, from the first
 * that begins to the last that ends. */
static double limit_round(int ranks, int i) {
    double first = shared->began[0][i], last = shared->ns[0][i], slowest = last - first;
    for (int j = 1; j < ranks; j++) {
        double own = shared->ns[j][i] - shared->began[j][i];
        slowest = own > slowest ? own : slowest;
        first = shared->began[j][i] < first ? shared->began[j][i] : first;
        last = shared->ns[j][i] > last ? shared->ns[j][i] : last;
    }
    return ranks > sysconf(_SC_NPROCESSORS_ONLN) ? last - first : slowest;
}

/* Prints a line as the peers do: microseconds, median and least over rounds. */
static void limit_of(int ranks, size_t bytes) {
    char *buffers[RANKS_MAX];
    int rounds = bytes <= 1u << 20 ? 60 : 15, rank = ranks - 1;
    for (int j = 0; j < ranks; j++) {
        buffers[j] = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (buffers[j] == MAP_FAILED) {
            die("mmap");
        }
        madvise(buffers[j], bytes, MADV_HUGEPAGE);
    }
    while (rank > 0 && fork() != 0) {
        rank--;
    }
    cpu_set_t before;
    sched_getaffinity(0, sizeof before, &before);
    keep_to_core(rank, ranks);
    play_limit(buffers, ranks, rank, bytes, rounds);
    if (rank > 0) {
        _exit(0);
    }
    sched_setaffinity(0, sizeof before, &before);
    for (int i = 0; i < rounds; i++) {
        shared->ns[0][i] = limit_round(ranks, i);
    }
    double middle = median(shared->ns[0], rounds);
    printf("all_reduce %d %zu %.4f %.4f\n", ranks, bytes, middle / 1e3, shared->ns[0][0] / 1e3);
    while (waitpid(-1, NULL, 0) > 0) {
    }
    for (int j = 0; j < ranks; j++) {
        munmap(buffers[j], bytes);
    }
}

/* Of small data the time to meet would be all there is. */
static int limits(int argc, char **argv) {
    members = atoi(argv[2]);
    if (members < 2 || members > RANKS_MAX) {
        fprintf(stderr, "usage: %s [all_reduce RANKS BYTES...], 2 to %d ranks\n", argv[0], (int)RANKS_MAX);
        return 2;
    }
    for (int i = 3; i < argc; i++) {
        size_t bytes = (size_t)strtoull(argv[i], NULL, 10);
        if (bytes >= 32u << 10) {
            limit_of(members, bytes);
        }
    }
    return 0;
}

int main(int argc, char **argv) {
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) {
        die("mmap");
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc > 2 && strcmp(argv[1], "all_reduce") == 0) {
        return limits(argc, argv);
    }
    if (argc == 2 && strcmp(argv[1], "distance") == 0) {
        return distance();
    }
    char control[64] = "?";
    FILE *file = fopen("/proc/sys/net/ipv4/tcp_congestion_control", "r");
    if (file != NULL) {
        if (fscanf(file, "%63s", control) != 1) {
            control[0] = '?';
        }
        fclose(file);
    }
    printf("%ld cores, default congestion control %s\n", sysconf(_SC_NPROCESSORS_ONLN), control);
    latencies();
    streams();
    memories();
    return 0;
}

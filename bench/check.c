/* What the mismatch check and the flight recorder cost, which are always on: the library beside itself without them.
 *
 *     for side in whole again bare; do
 *         cc -O2 -D_GNU_SOURCE -I. -DSIDE=$side $([ $side = bare ] && echo -DDDL__BENCH_NO_CHECK) -c -o /tmp/$side.o \
 *             bench/check.c; done
 *     cc -O2 -D_GNU_SOURCE -I. -o /tmp/check bench/check.c /tmp/whole.o /tmp/again.o /tmp/bare.o -lpthread -ldl
 *     /tmp/check [seconds]
 *
 * DDL__BENCH_NO_CHECK leaves out exactly the hash of a call, the comparison with what peers send, and the record. Each
 * side is the whole library, static in one file, so that all live in one process: two ranks are two processes, each
 * with a context of every side, and the sides take turns every few hundred calls; the machine's moods hit all alike.
 * "again" is the whole library a second time: what it differs by is what this measurement cannot see. Each round starts
 * the processes anew, because where memory happens to lie matters as much. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct side {
    const char *name;
    void *(*open)(int rank, int ranks, const char *folder); /* NULL after it has said why */
    int (*run)(void *world, int calls);                     /* 8-byte all_reduce; 0, or -1 after it has said why */
    void (*close)(void);
} side;

#ifdef SIDE

#define DDL_STATIC
#define DDL_IMPLEMENTATION
#include "ddl.h"

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

static ddl_context *context;

static void *side_open(int rank, int ranks, const char *folder) {
    char why[1024] = "", where[512];
    snprintf(where, sizeof where, "file://%s", folder);
    ddl_config config = {.world_size = ranks, .rank = rank, .rendezvous = where, .job = TEXT(SIDE),
                         .transports = "tcp", .error_text = why, .error_bytes = sizeof why};
    if (ddl_init(&config, &context) != DDL_OK) {
        fprintf(stderr, "check: %s\n", why);
        return NULL;
    }
    return ddl_world(context);
}

static int side_run(void *world, int calls) {
    double value = 0;
    ddl_tensor t = DDL_VIEW(&value, 1);
    for (int i = 0; i < calls; i++) {
        value = 1;
        if (ddl_all_reduce(world, t, t, DDL_SUM) != DDL_OK || value != ddl_size(world)) {
            fprintf(stderr, "check: the sum is %g: %s\n", value, ddl_error(context));
            return -1;
        }
    }
    return 0;
}

static void side_close(void) { ddl_finalize(&context); }

extern const side PASTE(side_, SIDE);
const side PASTE(side_, SIDE) = {TEXT(SIDE), side_open, side_run, side_close};

#else

#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

extern const side side_whole, side_again, side_bare;
enum { SIDES = 3, CALLS = 200, TURNS = 150, ROUNDS = 200 };
static const side *const sides[SIDES] = {&side_whole, &side_again, &side_bare};

/* Median microseconds of a call on rank 0, for one start of the processes. */
typedef struct figures {
    double us[SIDES];
} figures;

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int count) {
    qsort(values, (size_t)count, sizeof *values, by_value);
    return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

/* All sides in turn, in another order each time. */
static int take_turns(void *const *worlds, figures *out) {
    static double us[SIDES][TURNS];
    for (int turn = -5; turn < TURNS; turn++) {
        for (int i = 0; i < SIDES; i++) {
            int s = (i + turn + SIDES * 2) % SIDES;
            double start = now_us();
            if (sides[s]->run(worlds[s], CALLS) != 0) {
                return -1;
            }
            us[s][turn < 0 ? 0 : turn] = (now_us() - start) / CALLS;
        }
    }
    for (int s = 0; s < SIDES; s++) {
        out->us[s] = median(us[s], TURNS);
    }
    return 0;
}

static int member(int rank, int ranks, const char *folder, int first, figures *out) {
    void *worlds[SIDES];
    for (int i = 0; i < SIDES; i++) {
        int s = (i + first) % SIDES;
        worlds[s] = sides[s]->open(rank, ranks, folder);
        if (worlds[s] == NULL) {
            return 1;
        }
    }
    figures mine;
    int status = take_turns(worlds, &mine);
    for (int s = 0; s < SIDES; s++) {
        sides[s]->close();
    }
    if (rank == 0) {
        *out = mine;
    }
    return status == 0 ? 0 : 1;
}

/* Starts the ranks anew; which side is made first changes with the round. */
static int one_round(int ranks, int round, figures *shared) {
    char folder[] = "/tmp/ddl-check-XXXXXX", clean[64];
    int bad = mkdtemp(folder) == NULL;
    for (int rank = 0; rank < ranks && !bad; rank++) {
        pid_t pid = fork();
        if (pid == 0) {
            _exit(member(rank, ranks, folder, round, shared));
        }
        bad = pid < 0;
    }
    for (int status; wait(&status) > 0;) {
        bad |= status != 0;
    }
    snprintf(clean, sizeof clean, "rm -rf %s", folder);
    return bad | (system(clean) != 0);
}

static int measure(int ranks, double seconds, figures *shared) {
    static double us[SIDES][ROUNDS], cost[ROUNDS], noise[ROUNDS];
    int n = 0;
    for (double end = now_us() + seconds * 1e6; n < ROUNDS && (n < 3 || now_us() < end); n++) {
        if (one_round(ranks, n, shared) != 0) {
            return 1;
        }
        for (int s = 0; s < SIDES; s++) {
            us[s][n] = shared->us[s];
        }
        double whole = (us[0][n] + us[1][n]) / 2;
        cost[n] = whole - us[2][n];
        noise[n] = us[0][n] - us[1][n];
    }
    double bare = median(us[2], n), ns = median(cost, n) * 1e3, apart = median(noise, n) * 1e3;
    printf("%d rank%s  %2d starts  whole %8.3f us  again %8.3f us  without %8.3f us  cost %5.0f ns = %.2f %%"
           "  (the same twice: %.0f ns = %.2f %%)\n",
           ranks, ranks == 1 ? " " : "s", n, median(us[0], n), median(us[1], n), bare, ns, ns / bare / 10, apart,
           apart / bare / 10);
    fflush(stdout);
    return 0;
}

int main(int argc, char **argv) {
    double seconds = argc > 1 ? atof(argv[1]) : 20;
    figures *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) {
        perror("check: mmap");
        return 1;
    }
    printf("8-byte all_reduce, built-in TCP; 1 rank sends nothing and shows the cost by itself\n");
    return measure(1, seconds / 4, shared) | measure(2, seconds, shared);
}

#endif

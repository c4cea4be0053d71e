/* steps: how many instructions a small blocking call takes, one by one, whatever else the machine is doing.
 *
 *     make plugins && cc -O2 -I. -o /tmp/steps bench/steps.c -lpthread -ldl -lm
 *     DDL_PLUGIN_PATH=$PWD/build /tmp/steps [bytes]
 *
 * Two ranks over shared memory. One posts its part of an operation and looks no more until the other is through, whose
 * processor stops after each instruction (the trap flag of x86-64) meanwhile: everything that it needs is there, so that it
 * waits for nothing. Those of the kernel's clock are left out: it is asked once a millisecond, and the stops take longer.
 * Of a few calls the least counts, as the first ones learn. Making the tensors is in, as it is in each program's call. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <ucontext.h>

#define DDL_IMPLEMENTATION
#include "ddl.h"

#if !defined(__x86_64__)
int main(void) {
    fprintf(stderr, "steps: only an x86-64 is stopped after each instruction\n");
    return 77;
}
#else

enum { RANKS = 2, TRIES = 8, WARM = 3000, MOST = 4096, CLOCK_BYTES = 16384, TRAP_FLAG = 0x100 };

typedef struct op {
    const char *name, *role[RANKS];
} op;

static const op ops[] = {{"reduce", {"root", "leaf"}},
                         {"broadcast", {"root", "leaf"}},
                         {"gather", {"root", "leaf"}},
                         {"all_reduce", {"first", "second"}},
                         {"all_gather", {"first", "second"}},
                         {"barrier", {"first", "second"}}};
enum { OPS = sizeof ops / sizeof ops[0] };

typedef struct meeting {
    _Atomic int posted, through; /* how many calls */
    int steps[OPS][RANKS];
} meeting;

static volatile int steps;
static uintptr_t clock_at;
static float in[MOST], out[RANKS * MOST];
static size_t count;

static void count_step(int signal, siginfo_t *info, void *context) {
    uintptr_t at = (uintptr_t)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
    (void)signal;
    (void)info;
    steps += at - clock_at >= CLOCK_BYTES;
}

static void set_trap(bool on) {
    if (on) {
        __asm__ volatile("subq $128, %%rsp; pushfq; orq %0, (%%rsp); popfq; leaq 128(%%rsp), %%rsp" : : "i"(TRAP_FLAG) : "memory", "cc");
    } else {
        __asm__ volatile("subq $128, %%rsp; pushfq; andq %0, (%%rsp); popfq; leaq 128(%%rsp), %%rsp" : : "i"(~(long)TRAP_FLAG) : "memory", "cc");
    }
}

/* noinline: the call as another file makes it. */
static __attribute__((noinline)) ddl_status call(ddl_group *w, int i) {
    size_t all = count * RANKS;
    switch (i) {
    case 0:
        return ddl_reduce(w, DDL_VIEW(in, count), DDL_VIEW(out, count), DDL_SUM, 0);
    case 1:
        return ddl_broadcast(w, DDL_VIEW(in, count), 0);
    case 2:
        return ddl_gather(w, DDL_VIEW(in, count), DDL_VIEW(out, all), 0);
    case 3:
        return ddl_all_reduce(w, DDL_VIEW(in, count), DDL_VIEW(out, count), DDL_SUM);
    case 4:
        return ddl_all_gather(w, DDL_VIEW(in, count), DDL_VIEW(out, all));
    default:
        return ddl_barrier(w);
    }
}

static ddl_status post(ddl_group *w, int i, ddl_request **r) {
    size_t all = count * RANKS;
    switch (i) {
    case 0:
        return ddl_ireduce(w, DDL_VIEW(in, count), DDL_VIEW(out, count), DDL_SUM, 0, r);
    case 1:
        return ddl_ibroadcast(w, DDL_VIEW(in, count), 0, r);
    case 2:
        return ddl_igather(w, DDL_VIEW(in, count), DDL_VIEW(out, all), 0, r);
    case 3:
        return ddl_iall_reduce(w, DDL_VIEW(in, count), DDL_VIEW(out, count), DDL_SUM, r);
    case 4:
        return ddl_iall_gather(w, DDL_VIEW(in, count), DDL_VIEW(out, all), r);
    default:
        return ddl_ibarrier(w, r);
    }
}

/* One operation, of which `stepper` has the steps counted; a few in a row before it, so that it is the same call again. */
static ddl_status one(ddl_group *w, int i, bool stepper, meeting *m, int number, int *least) {
    ddl_request *r = NULL;
    for (int k = 0; k < 3; k++) {
        ddl_status status = call(w, i);
        if (status != DDL_OK) {
            return status;
        }
    }
    if (!stepper) {
        ddl_status status = post(w, i, &r);
        atomic_store(&m->posted, number);
        while (atomic_load(&m->through) < number) {
            sched_yield();
        }
        return status == DDL_OK ? ddl_wait(&r, NULL) : status;
    }
    while (atomic_load(&m->posted) < number) {
        sched_yield();
    }
    steps = 0;
    set_trap(true);
    ddl_status status = call(w, i);
    set_trap(false);
    *least = *least == 0 || steps < *least ? steps : *least;
    atomic_store(&m->through, number);
    return status;
}

static int member(int rank, const char *folder, meeting *m) {
    alarm(60); /* a rank whose peer has ended would wait for ever */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    char why[1024] = "", where[512];
    snprintf(where, sizeof where, "file://%s", folder);
    ddl_config config = {.world_size = RANKS, .rank = rank, .rendezvous = where, .transports = "shm",
                         .error_text = why, .error_bytes = sizeof why};
    ddl_context *context = NULL;
    if (ddl_init(&config, &context) != DDL_OK) {
        fprintf(stderr, "steps: %s\n", why);
        return 1;
    }
    ddl_group *w = ddl_world(context);
    clock_at = (uintptr_t)getauxval(AT_SYSINFO_EHDR);
    ddl_status status = DDL_OK;
    for (int k = 0; k < WARM && status == DDL_OK; k++) { /* until the transport runs them by itself */
        status = call(w, k % OPS);
    }
    int number = 0;
    for (int i = 0; i < OPS; i++) {
        for (int who = 0; who < RANKS; who++) {
            for (int k = 0; k < TRIES && status == DDL_OK; k++) {
                status = one(w, i, who == rank, m, ++number, &m->steps[i][who]);
            }
        }
    }
    if (status != DDL_OK) {
        fprintf(stderr, "steps: rank %d: %s\n", rank, ddl_error(context));
        atomic_store(&m->posted, 1 << 30);
        atomic_store(&m->through, 1 << 30);
    }
    ddl_finalize(&context);
    return status == DDL_OK ? 0 : 1;
}

int main(int argc, char **argv) {
    char folder[] = "/tmp/ddl-steps-XXXXXX", clean[64];
    size_t bytes = argc > 1 ? (size_t)strtoull(argv[1], NULL, 10) : 8;
    count = bytes / sizeof(float);
    meeting *m = mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (count == 0 || count > MOST || m == MAP_FAILED || mkdtemp(folder) == NULL) {
        fprintf(stderr, "usage: steps [BYTES, 4 to %d]\n", (int)(MOST * sizeof(float)));
        return 2;
    }
    struct sigaction action = {.sa_sigaction = count_step, .sa_flags = SA_SIGINFO};
    sigaction(SIGTRAP, &action, NULL);
    set_trap(true);
    __asm__ volatile("nop; nop; nop");
    set_trap(false);
    if (steps == 0) {
        fprintf(stderr, "steps: this machine stops after no instruction\n");
        return 77;
    }
    int bad = 0, status;
    pid_t pids[RANKS];
    for (int rank = 0; rank < RANKS; rank++) {
        pids[rank] = fork();
        if (pids[rank] == 0) {
            exit(member(rank, folder, m));
        }
        if (pids[rank] < 0) {
            bad = 1;
            for (int started = 0; started < rank; started++) {
                kill(pids[started], SIGKILL);
            }
        }
    }
    for (pid_t ended; (ended = wait(&status)) > 0;) {
        bad |= status != 0;
        for (int rank = 0; rank < RANKS; rank++) {
            pids[rank] = pids[rank] == ended ? -1 : pids[rank];
            if (status != 0 && pids[rank] > 0) {
                kill(pids[rank], SIGKILL);
            }
        }
    }
    for (int i = 0; i < OPS && !bad; i++) {
        printf("%-10s %5zu B  %s %4d  %s %4d instructions\n", ops[i].name, i == OPS - 1 ? 0 : bytes, ops[i].role[0],
               m->steps[i][0], ops[i].role[1], m->steps[i][1]);
    }
    snprintf(clean, sizeof clean, "rm -rf %s", folder);
    return system(clean) != 0 || bad;
}
#endif

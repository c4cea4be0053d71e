/* doorbell: waking a rank that sleeps in the kernel. Each rank has an unconnected unix datagram socket of a random
 * abstract name (no file), which is readable exactly when somebody rang; who rings says the token of the segment, and a
 * filter in the kernel drops whatever says anything else, so that strangers who read the name cannot wake anybody.
 * It must not know what there is to do: the caller of shm_bell_arm looks again after having announced the sleep. */
#ifndef SHM_DOORBELL_H
#define SHM_DOORBELL_H

#include "segment.h"

#include <linux/filter.h>
#include <linux/membarrier.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

/* ---- who sees whom ----
 *
 * One writes a word and then looks who sleeps; the other says that it sleeps and then looks at the word. At least one
 * must see the other (Dekker), so each needs a fence between its two. The writer's would cost every message the time
 * until its line has come from the other core; the sleeper has time. So, where every rank of the host has registered
 * with membarrier, the sleeper asks the kernel for a fence on all their cores, and the writer needs none. */

static bool shm_membarrier(int command) { return syscall(SYS_membarrier, command, 0, 0) == 0; }

/* May the others leave the fence to the sleepers, as far as this process is concerned? */
static bool shm_hears_barriers(void) {
#ifdef SHM_TSAN
    return false; /* the sanitizer does not know of it */
#else
    return shm_membarrier(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED) && shm_membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED);
#endif
}

static inline void shm_waker_fence(const shm *t) {
    if (t->sleepers_fence) {
        atomic_signal_fence(memory_order_seq_cst); /* the compiler keeps the order */
    } else {
        shm_fence();
    }
}

static void shm_sleeper_fence(const shm *t) {
    shm_fence();
    if (t->sleepers_fence) {
        shm_membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED); /* it worked when this rank registered */
    }
}

/* ---- the bell ---- */

static socklen_t shm_bell_name(const shm_address *address, struct sockaddr_un *out) {
    memset(out, 0, sizeof *out);
    out->sun_family = AF_UNIX;
    char *at = out->sun_path + 1; /* after the NUL that makes it abstract */
    memcpy(at, "ddl-shm-", 8);
    for (size_t i = 0; i < sizeof address->bell; i++) { /* not snprintf: each ring would pay for it */
        at[8 + 2 * i] = "0123456789abcdef"[address->bell[i] >> 4];
        at[9 + 2 * i] = "0123456789abcdef"[address->bell[i] & 15];
    }
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + 8 + 2 * sizeof address->bell);
}

/* Until there is a token nothing can ring: the filter of shm_bell_guard is what opens it. */
static ddl_status shm_bell_filter(shm *t, struct sock_filter *code, size_t count) {
    struct sock_fprog program = {.len = (unsigned short)count, .filter = code};
    return setsockopt(t->bell, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) == 0 ? DDL_OK : DDL_ERR_SYSTEM;
}

static ddl_status shm_bell_open(shm *t) {
    struct sock_filter nothing[] = {BPF_STMT(BPF_RET | BPF_K, 0)};
    struct sockaddr_un name;
    if (getrandom(t->address.bell, sizeof t->address.bell, 0) != sizeof t->address.bell) {
        return DDL_ERR_SYSTEM;
    }
    t->address.hears_barriers = shm_hears_barriers() ? 1 : 0;
    socklen_t bytes = shm_bell_name(&t->address, &name);
    t->bell = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    bool fine = t->bell >= 0 && shm_bell_filter(t, nothing, 1) == DDL_OK &&
                bind(t->bell, (struct sockaddr *)&name, bytes) == 0;
    return fine ? DDL_OK : DDL_ERR_SYSTEM;
}

/* Lets through datagrams of the token alone: four words compared, then one byte too many looked for. */
static ddl_status shm_bell_guard(shm *t) {
    struct sock_filter code[13];
    size_t n = 0;
    code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_LEN, 0);
    code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 16, 0, 9);
    for (uint32_t word = 0; word < 4; word++) {
        const uint8_t *b = shm_head(t)->bell_token + 4 * word; /* the filter reads in network order */
        uint32_t value = (uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | b[3];
        code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 4 * word);
        code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, (uint8_t)(7 - 2 * word));
    }
    code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, 16);
    code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, 0);
    return shm_bell_filter(t, code, n);
}

static void shm_bell_ring(shm *t, int32_t i) {
    struct sockaddr_un name;
    socklen_t bytes = shm_bell_name(&t->addresses[t->rank_of[i]], &name);
    ssize_t n = sendto(t->bell, shm_head(t)->bell_token, sizeof shm_head(t)->bell_token, MSG_DONTWAIT | MSG_NOSIGNAL,
                       (struct sockaddr *)&name, bytes);
    (void)n; /* full: it has been rung; gone: the core hears of it elsewhere */
}

/* Wakes local rank i when it sleeps, and returns whether it did. What was written before this call is seen by it. A caller
 * that ends or is stopped after the exchange has not rung, and nobody else will: the sleeper then goes on at the core's next
 * look, 50 ms later at most. */
static inline bool shm_wake(shm *t, int32_t i) {
    _Atomic uint32_t *sleeping = &shm_control(t, i)->sleeping;
#ifdef SHM_TSAN /* which does not know fences; a read-modify-write of the word itself does as well */
    bool asleep = atomic_fetch_or_explicit(sleeping, 0, memory_order_seq_cst) != 0;
#else
    shm_waker_fence(t);
    bool asleep = atomic_load_explicit(sleeping, memory_order_relaxed) != 0; /* ordered by the fence */
#endif
    if (!asleep || atomic_exchange_explicit(sleeping, 0, memory_order_relaxed) == 0) { /* one of many rings */
        return false;
    }
    shm_bell_ring(t, i);
    return true;
}

/* Announces the sleep. Then the caller looks once more at all there may be to do. */
static void shm_bell_arm(shm *t) {
    t->armed = true;
    atomic_exchange_explicit(&shm_control(t, t->local_index)->sleeping, 1, memory_order_seq_cst); /* for SHM_TSAN */
    shm_sleeper_fence(t);
}

/* Awake again. The socket is emptied, or the next sleep would be none. */
static void shm_bell_disarm(shm *t) {
    uint8_t what[16];
    if (t->armed) {
        t->armed = false;
        atomic_store_explicit(&shm_control(t, t->local_index)->sleeping, 0, memory_order_relaxed); /* saves a ring */
        while (recv(t->bell, what, sizeof what, MSG_DONTWAIT) >= 0) {
        }
    }
}

#endif /* SHM_DOORBELL_H */

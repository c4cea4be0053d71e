/* board: what ranks of one host tell each other about GPU memory, in ordinary shared memory. Each rank has one board, a
 * sealed memfd that it alone writes; the others map it for reading, so that nobody can damage what another says. It is
 * passed over a socket that proved to be of this job, together with a bell (an eventfd) that wakes its owner.
 *
 * On it: allocations that the rank lets others reach (share.h), requests for descriptors, and for each set of native
 * collectives a few lines of words. Nothing on a GPU waits for these words, as ranks that share a GPU take turns on it and
 * one that spins there holds the others up: a rank's host sees an event of its GPU happen, writes a word, and rings.
 *
 * A peer's words are loaded once and checked before they are used as an index. */
#ifndef CUDA_BOARD_H
#define CUDA_BOARD_H

#include "gpu.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>

enum {
    CUDA_LOCAL_MAX = 64, /* ranks of one host; more of them do without */
    CUDA_EXPORTS = 512,  /* allocations that one rank shares at a time */
    CUDA_SETS = 32,      /* sets of native collectives of one rank */
    CUDA_REGISTERED = 256, /* pieces of memory that peers may copy at a time: messages under way */
    CUDA_TOUCHES = 16,   /* such copies of one rank at a time */
    CUDA_SET_LINES = 8,  /* lines of words of one rank in one set */
    CUDA_LINE_WORDS = 8
};
enum { CUDA_TAG_BOARD = 0x63750001, CUDA_TAG_BELL = 0x63750002, CUDA_TAG_MEMORY = 0x63800000 }; /* + slot */
enum { CUDA_SEEN_NOT_YET, CUDA_SEEN, CUDA_SEEN_NOT };
#define CUDA_BOARD_MAGIC "ddlcuda1"

typedef struct cuda_line {
    _Alignas(64) _Atomic uint64_t word[CUDA_LINE_WORDS];
} cuda_line;

/* The words of one rank in one set. Their meaning is native.h's. */
typedef struct cuda_set {
    _Alignas(64) _Atomic uint64_t group; /* 0: not in use; written last when it begins, first when it ends */
    cuda_line line[CUDA_SET_LINES];
} cuda_set;

enum {
    CUDA_BY_POINTER = 0,
    CUDA_BY_FD = 1,
    CUDA_BY_HANDLE = 2
}; /* how an allocation is reached from another process */

/* One allocation that peers may reach. `id` is written last; it is never used again by this rank, so what a peer has
 * mapped under it is this allocation and no later one at the same address. */
typedef struct cuda_export {
    _Alignas(64) _Atomic uint64_t id; /* 0: none */
    _Atomic uint64_t base, bytes;     /* in the owner's address space */
    _Atomic uint32_t kind, ordinal;   /* CUDA_BY_..., and the owner's number of the GPU */
    _Atomic uint64_t handle[8];       /* CUDA_BY_HANDLE: CUipcMemHandle */
} cuda_export;

typedef struct cuda_board {
    uint8_t magic[8];
    int32_t rank, gpu_count;
    CUuuid gpus[CUDA_GPUS_MAX];
    _Alignas(64) _Atomic uint32_t sleeping;              /* 1: ring my bell after writing what I may wait for */
    _Alignas(64) _Atomic uint64_t wants[CUDA_LOCAL_MAX]; /* [i]: id of the export of rank i whose descriptor I lack */
    _Atomic uint8_t seen[CUDA_LOCAL_MAX]; /* [i]: CUDA_SEEN, or CUDA_SEEN_NOT: rank i's board cannot be used here */
    _Atomic uint64_t registered[CUDA_REGISTERED]; /* serials of this rank's; 0: none. ipc.h, as the next */
    _Atomic uint64_t touching[CUDA_TOUCHES];      /* what it copies: the owner's local index, and a serial of the owner's */
    cuda_export exports[CUDA_EXPORTS];
    cuda_set sets[CUDA_SETS];
} cuda_board;

/* What others know of a rank before there are boards. */
typedef struct cuda_address {
    uint8_t magic[8];
    uint64_t process; /* equal on ranks that are threads of one process */
    uint32_t uid, gpu_count;
} cuda_address;

typedef struct cuda_peer {
    bool here;         /* on this host, with this plugin */
    bool same_process; /* its pointers are good here */
    bool told;         /* has been passed this rank's board and bell */
    bool failed, dead;
    int32_t index;           /* local index, in rank order */
    const cuda_board *board; /* NULL: it has not come */
    int bell;                /* -1: likewise */
    uint64_t want, want_id;  /* what was asked of it (share.h); 0: nothing */
    uint64_t answered;       /* the last of its requests that was answered */
    int aside_fd;            /* a descriptor that came for somebody who did not look; -1: none */
    uint64_t aside_id;
} cuda_peer;

/* The endpoint of one context. */
typedef struct cuda_ipc {
    const ddl_host *host;
    cuda_driver cu;
    int32_t rank, world_size, local_count, local_index;
    bool joined;    /* local numbers are given */
    bool processes; /* not all peers here are threads of this process */
    ddl_status join_status;
    cuda_address address;
    char *host_id;
    cuda_peer *peers;  /* by world rank; peers[rank].board is this rank's own */
    int32_t *local;    /* by local index: world rank */
    cuda_board *board; /* writable; NULL: this rank does not take part */
    int board_fd, bell;
    cuda_gpu *gpus[CUDA_GPUS_MAX]; /* by ordinal; NULL: not needed so far */
    CUuuid uuids[CUDA_GPUS_MAX];
    int32_t gpu_count;
    uint64_t last_id, last_serial, requests;
    struct cuda_shares *shares;      /* share.h */
    struct cuda_probes *probes;      /* probe.h */
    struct cuda_transfer *transfers; /* ipc.h, as the next */
    struct cuda_registered *registrations;
    struct cuda_natives *natives;    /* native.h */
} cuda_ipc;

/* ---- words ---- */

static void cuda_tell(cuda_set *set, int32_t line, int32_t word, uint64_t value) {
    /* release: who sees it sees what was written before */
    atomic_store_explicit(&set->line[line].word[word], value, memory_order_release);
}

static uint64_t cuda_told(const cuda_set *set, int32_t line, int32_t word) {
    return atomic_load_explicit(&((cuda_set *)(uintptr_t)set)->line[line].word[word], memory_order_acquire);
}

/* This rank's words of a set, all 0. NULL: it has CUDA_SETS already. */
static cuda_set *cuda_set_begin(cuda_ipc *t, uint64_t group) {
    for (int32_t i = 0; i < CUDA_SETS; i++) {
        cuda_set *set = &t->board->sets[i];
        if (atomic_load_explicit(&set->group, memory_order_relaxed) == 0) { /* own */
            memset(set->line, 0, sizeof set->line);
            atomic_store_explicit(&set->group, group, memory_order_release);
            return set;
        }
    }
    return NULL;
}

static void cuda_set_end(cuda_set *set) { atomic_store_explicit(&set->group, 0, memory_order_release); }

/* The words of a peer (a world rank, this one too); NULL: it has not begun this set, or has ended it. Its place does not
 * change: look once, keep it, and see that `group` is still the set's. */
static const cuda_set *cuda_set_of(const cuda_ipc *t, int32_t peer, uint64_t group) {
    const cuda_board *board = t->peers[peer].board;
    for (int32_t i = 0; board != NULL && i < CUDA_SETS; i++) {
        cuda_set *set = (cuda_set *)(uintptr_t)&board->sets[i];
        if (atomic_load_explicit(&set->group, memory_order_acquire) == group) {
            return set;
        }
    }
    return NULL;
}

/* Wakes a peer that sleeps, after words were written that it may wait for. */
static void cuda_ring(const cuda_ipc *t, int32_t peer) {
    const cuda_peer *p = &t->peers[peer];
    static const uint64_t one = 1;
    atomic_thread_fence(memory_order_seq_cst); /* words, then sleeping; the sleeper: sleeping, then words */
    if (p->board != NULL && p->bell >= 0 &&
        atomic_load_explicit(&((cuda_board *)(uintptr_t)p->board)->sleeping, memory_order_relaxed) != 0) {
        ssize_t n = write(p->bell, &one, sizeof one);
        (void)n; /* a full counter is readable anyway */
    }
}

/* ---- making and passing ---- */

static ddl_status cuda_board_make(cuda_ipc *t) {
    t->board_fd = memfd_create("ddl-cuda-board", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    t->bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (t->board_fd < 0 || t->bell < 0 || ftruncate(t->board_fd, sizeof(cuda_board)) != 0 ||
        posix_fallocate(t->board_fd, 0, sizeof(cuda_board)) != 0) {
        return DDL_ERR_SYSTEM;
    }
    void *at = mmap(NULL, sizeof(cuda_board), PROT_READ | PROT_WRITE, MAP_SHARED, t->board_fd, 0);
    if (at == MAP_FAILED || fcntl(t->board_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        t->board = at == MAP_FAILED ? NULL : at;
        return DDL_ERR_SYSTEM;
    }
    t->board = at;
    memcpy(t->board->magic, CUDA_BOARD_MAGIC, sizeof t->board->magic);
    t->board->rank = t->rank;
    t->board->gpu_count = t->gpu_count;
    memcpy(t->board->gpus, t->uuids, sizeof t->uuids);
    t->peers[t->rank].board = t->board;
    t->peers[t->rank].bell = -1; /* nobody rings for oneself */
    return DDL_OK;
}

/* Maps what a peer passed, if it is a board of this user, of the right size, that cannot shrink. */
static const cuda_board *cuda_board_map(int fd, int32_t rank) {
    struct stat info;
    int seals = fcntl(fd, F_GET_SEALS); /* -1: of what cannot be sealed */
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || info.st_uid != geteuid() ||
        info.st_size != (off_t)sizeof(cuda_board) || seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
        return NULL;
    }
    void *at = mmap(NULL, sizeof(cuda_board), PROT_READ, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) {
        return NULL;
    }
    const cuda_board *board = at;
    if (memcmp(board->magic, CUDA_BOARD_MAGIC, sizeof board->magic) != 0 || board->rank != rank) {
        munmap(at, sizeof(cuda_board));
        return NULL;
    }
    return board;
}

/* Takes a peer's board and bell. DDL_IN_PROGRESS until both are here. */
static ddl_status cuda_board_take(cuda_ipc *t, int32_t peer) {
    cuda_peer *p = &t->peers[peer];
    int fd = -1;
    ddl_status status = p->board != NULL ? DDL_OK : t->host->take_fd(t->host, peer, CUDA_TAG_BOARD, &fd);
    if (status == DDL_OK && p->board == NULL) {
        p->board = fd >= 0 ? cuda_board_map(fd, peer) : NULL; /* -1: it does not take part */
        if (fd >= 0) {
            close(fd);
        }
        status = p->board != NULL ? DDL_OK : DDL_ERR_UNSUPPORTED;
    }
    if (status == DDL_OK && p->bell < 0) {
        status = t->host->take_fd(t->host, peer, CUDA_TAG_BELL, &p->bell);
    }
    return status == DDL_OK && p->bell < 0 ? DDL_ERR_UNSUPPORTED : status;
}

/* Passes this rank's board and bell to a peer and takes the peer's; then both say on their boards whether they can use the
 * other's, so that they come to one answer. Without a board of its own a rank passes the tags alone. */
static ddl_status cuda_board_exchange(cuda_ipc *t, int32_t peer) {
    cuda_peer *p = &t->peers[peer];
    if (!p->told) {
        bool can = t->board != NULL;
        ddl_status status = t->host->send_fd(t->host, peer, CUDA_TAG_BOARD, can ? t->board_fd : -1);
        status = status == DDL_OK ? t->host->send_fd(t->host, peer, CUDA_TAG_BELL, can ? t->bell : -1) : status;
        p->failed = status != DDL_OK || !can;
        p->told = true;
    }
    ddl_status status = p->failed ? DDL_ERR_UNSUPPORTED : cuda_board_take(t, peer);
    if (status == DDL_IN_PROGRESS) {
        return status;
    }
    p->failed = status != DDL_OK;
    if (t->board != NULL) { /* release: nothing else is written for it */
        atomic_store_explicit(&t->board->seen[p->index], p->failed ? CUDA_SEEN_NOT : CUDA_SEEN, memory_order_release);
    }
    if (p->failed) {
        return DDL_ERR_UNSUPPORTED;
    }
    uint8_t seen =
        atomic_load_explicit(&((cuda_board *)(uintptr_t)p->board)->seen[t->local_index], memory_order_acquire);
    p->failed = seen == CUDA_SEEN_NOT;
    return seen == CUDA_SEEN ? DDL_OK : p->failed ? DDL_ERR_UNSUPPORTED : DDL_IN_PROGRESS;
}

static void cuda_board_drop(cuda_peer *p) {
    if (p->board != NULL) {
        munmap((void *)(uintptr_t)p->board, sizeof(cuda_board));
    }
    if (p->bell >= 0) {
        close(p->bell);
    }
    if (p->aside_fd >= 0) {
        close(p->aside_fd);
    }
    p->board = NULL;
    p->bell = p->aside_fd = -1;
}

/* The GPU of that number as this endpoint sees it, opened when it is first asked for. */
static ddl_status cuda_ipc_gpu(cuda_ipc *t, int32_t ordinal, cuda_gpu **out) {
    if (ordinal < 0 || ordinal >= t->gpu_count) {
        return DDL_ERR_ARG;
    }
    ddl_status status = t->gpus[ordinal] != NULL ? DDL_OK : cuda_gpu_open(t->host, ordinal, &t->gpus[ordinal]);
    *out = t->gpus[ordinal];
    return status;
}

#endif /* CUDA_BOARD_H */

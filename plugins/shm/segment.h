/* segment: the one piece of memory that the ranks of a host share. Its layout, how it is made, passed, checked and
 * mapped, and who is in. It must not know what is said in it: rings, collectives and allocations are others' business.
 *
 * The leader, the lowest rank of those here that offer shared memory, makes a memfd, seals its size and passes it over
 * a socket that proved to be of this job. It has no name anywhere and goes with the last process that holds it. It is
 * sparse: each part is allocated by the rank that owns it before its first use (shm_commit), because touching a hole
 * when memory has run out is a SIGBUS, and because memory lies near the core that touches it first.
 *
 *     header     what everybody must agree on, and one word of state for each local rank
 *     control    a page for each rank (shm_control_block)
 *     rings      for each rank one inbound ring from each other (ring.h), owned by the writer
 *     staging    for each rank (native.h)
 *     arenas     for each rank the memory of ddl_tensor_alloc (memory.h); large, mapped in pieces on demand
 *
 * All but the arenas is one mapping. Places come from the addresses alone, which all ranks know; nothing that a peer
 * wrote is used as an index before it was loaded once and checked. */
#ifndef SHM_SEGMENT_H
#define SHM_SEGMENT_H

#include "../../ddl.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__SANITIZE_THREAD__)
#define SHM_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define SHM_TSAN 1
#endif
#endif

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* as Linux 5.14 names them; older kernels refuse, and the first use pays for each page */
#define MADV_POPULATE_WRITE 23
#endif

#define SHM_LOCAL_MAX 512 /* ranks of one host; rings grow with its square */
#define SHM_PAGE 4096u
#define SHM_LINE 64 /* bytes of a cache line */
#define SHM_RING_BYTES (64u << 10)
#define SHM_PAIR_RING_BYTES (512u << 10) /* where a host has two ranks; the difference is taken from their staging */
#define SHM_STAGING_BYTES (118u << 15) /* with the window of help.h at most 4 MiB, also of pages of 64 KiB */
#define SHM_ARENAS_MAX ((uint64_t)16 << 40)
#define SHM_COMMIT_STEP ((uint64_t)32 << 20) /* a signal undoes what one fallocate has done so far */
#define SHM_ASK_BYTES (1u << 20)             /* from here on what a control group allows is asked before memory is taken */
#define SHM_DISTANT_NS 100u                  /* see distance.h */
#define SHM_SETS 32                          /* entries of a rank's directory: sets of native collectives */
#define SHM_HEADER_BYTES ((SHM_LOCAL_MAX * 4u + 2 * SHM_PAGE - 1) / SHM_PAGE * SHM_PAGE)

enum { SHM_TAG_SEGMENT = 0x73686d01, SHM_TAG_OUT }; /* of passed descriptors */

/* What a rank tells its peers before there is a segment, byte for byte. Settings that differ make two ranks reach each
 * other in another way. */
typedef struct shm_address {
    uint8_t magic[8];
    uint8_t bell[16]; /* random: names the socket that wakes the rank (doorbell.h) */
    uint32_t page_bytes, uid;
    uint32_t hears_barriers; /* registered with membarrier: doorbell.h */
    int32_t fd; /* to newcomers: the segment, as a descriptor of process pid; 0: in none */
    int32_t pid;
    uint32_t cores; /* that this rank may use, */
    uint64_t core_set; /* and which: ranks with the same number share theirs */
    uint64_t ring_bytes, staging_bytes; /* 0: by the number of ranks */
    uint64_t arena_bytes; /* the smallest of all is taken */
} shm_address;

/* SHM_WAITING: has not said yet. Written by the rank itself, or by the leader when the rank passed SHM_TAG_OUT. */
enum { SHM_WAITING, SHM_IN, SHM_OUT };

typedef struct shm_header {
    uint8_t magic[8];
    uint32_t local_count, leader;
    uint64_t ring_bytes, staging_bytes, arena_bytes;
    uint32_t sleepers_fence, crowded;
    int32_t rank_of[SHM_LOCAL_MAX]; /* by local index, for newcomers */
    uint8_t bell_token[16]; /* what a wake-up says; strangers do not know it */
    _Alignas(SHM_LINE) _Atomic uint32_t state[SHM_LOCAL_MAX];
} shm_header;

/* One set of native collectives, published by a rank to the others of the set: group last (release), 0: no entry. */
typedef struct shm_directory_entry {
    _Atomic uint64_t group;
    _Atomic uint64_t offset, bytes; /* of the rank's part, in the segment */
} shm_directory_entry;

enum { SHM_PULLS_UNKNOWN, SHM_PULLS, SHM_PULLS_NOT };

/* One page for each rank. Written by that rank, but for the words that say otherwise. */
typedef struct shm_control_block {
    _Alignas(SHM_LINE) _Atomic uint32_t sleeping; /* 1: wake me; whoever wakes makes it 0 */
    _Alignas(SHM_LINE) _Atomic int32_t pid;       /* where process_vm_readv finds ... */
    _Atomic uint64_t probe_at, probe;             /* ... this number at this address */
    _Alignas(SHM_LINE) _Atomic uint8_t written[SHM_LOCAL_MAX]; /* [i] by rank i: its ring to this rank is in use */
    _Alignas(SHM_LINE) _Atomic uint8_t pulls[SHM_LOCAL_MAX];   /* [i]: SHM_PULLS if it can read i's memory */
    _Alignas(SHM_LINE) shm_directory_entry sets[SHM_SETS];
    _Alignas(1024) _Atomic uint32_t sounding; /* distance.h; far from what is read often, or it would be fetched ahead with that */
} shm_control_block;

_Static_assert(sizeof(shm_header) <= SHM_HEADER_BYTES, "the states fit");
_Static_assert(sizeof(shm_control_block) <= SHM_PAGE, "a control block is a page");

enum { SHM_GATHERING, SHM_JOINING, SHM_JOINED, SHM_DECLINED, SHM_BARRED }; /* barred: all know without a word */

/* What this rank knows of where another runs: distance.h. */
typedef struct shm_distance {
    uint64_t last_ns;
    uint32_t word, wait;
    bool distant;
} shm_distance;

/* The endpoint of one context. The last part belongs to the other files. */
typedef struct shm {
    const ddl_host *host;
    int32_t rank, world_size;
    char *host_id;
    shm_address address;
    shm_address *addresses; /* by world rank; magic[0] == 0: that one is not reached this way */

    int32_t stage;                    /* SHM_GATHERING until the first ready() */
    int32_t local_count, local_index; /* ranks of this host that offer shm, and this one's place; in rank order */
    int32_t *index_of;                /* by world rank: local index, -1: not here */
    int32_t *rank_of;                 /* by local index: world rank */
    bool crowded;                     /* the ranks share cores; all say the same */
    bool *told;                       /* by local index: knows what this rank has to tell it of its joining */
    int32_t attach;                   /* a newcomer: the rank whose segment it may come into; -1: none */
    int fd;                           /* the segment, -1: none yet */
    uint8_t *base;                    /* all but the arenas */
    uint64_t ring_bytes, staging_bytes, shared_bytes, segment_bytes, arena_bytes;

    shm_distance distances[SHM_LOCAL_MAX]; /* by local index */
    uint64_t distant_ns; /* DDL_SHM_DISTANT_NS */
    bool may_fetch; /* DDL_SHM_CMA */
    int bell; /* the socket that wakes this rank */
    bool armed;
    bool sleepers_fence; /* who wakes need not: doorbell.h */
    struct shm_messages *messages;
    struct shm_memory *memory;
    struct shm_natives *natives;
} shm;

__attribute__((format(printf, 3, 4))) static void shm_log(const shm *t, ddl_log_level level, const char *format, ...) {
    char line[400] = "shm: ";
    va_list args;
    va_start(args, format);
    vsnprintf(line + 5, sizeof line - 5, format, args);
    va_end(args);
    t->host->log(t->host, level, line);
}

static void *shm_zalloc(const shm *t, size_t bytes) {
    void *memory = t->host->alloc(t->host, bytes);
    if (memory != NULL) {
        memset(memory, 0, bytes);
    }
    return memory;
}

/* Whatever this rank does before stands before what it does after, in the eyes of all. */
static inline void shm_fence(void) {
#ifdef SHM_TSAN
    _Atomic int any = 0; /* the sanitizer does not know fences; on x86 this is one */
    atomic_exchange_explicit(&any, 1, memory_order_seq_cst);
#else
    atomic_thread_fence(memory_order_seq_cst);
#endif
}

/* ---- where things are ---- */

static uint64_t shm_controls_at(void) { return SHM_HEADER_BYTES; }
static uint64_t shm_rings_at(const shm *t) { return shm_controls_at() + (uint64_t)t->local_count * SHM_PAGE; }

static uint64_t shm_ring_offset(const shm *t, int32_t to, int32_t from) {
    return shm_rings_at(t) + ((uint64_t)to * (uint64_t)t->local_count + (uint64_t)from) * t->ring_bytes;
}

static uint64_t shm_staging_offset(const shm *t, int32_t i) {
    return shm_ring_offset(t, t->local_count, 0) + (uint64_t)i * t->staging_bytes;
}

static uint64_t shm_arena_offset(const shm *t, int32_t i) { return t->shared_bytes + (uint64_t)i * t->arena_bytes; }
static shm_header *shm_head(const shm *t) { return (shm_header *)(void *)t->base; }

static shm_control_block *shm_control(const shm *t, int32_t i) {
    return (shm_control_block *)(void *)(t->base + shm_controls_at() + (uint64_t)i * SHM_PAGE);
}

/* ring_bytes bytes for messages from one local rank to another. */
static inline void *shm_ring_memory(const shm *t, int32_t to, int32_t from) {
    return t->base + shm_ring_offset(t, to, from);
}
static inline uint8_t *shm_staging(const shm *t, int32_t i) { return t->base + shm_staging_offset(t, i); }

/* Is local rank i one that takes part? Final once it is not SHM_WAITING. Acquire: what it wrote before it came in. */
static uint32_t shm_state(const shm *t, int32_t i) {
    return atomic_load_explicit(&shm_head(t)->state[i], memory_order_acquire);
}

/* What the limit of a container still allows: whoever goes beyond is killed, and not refused. */
static uint64_t shm_memory_left(const shm *t) {
    return DDL_HAS(t->host, memory_left) ? t->host->memory_left(t->host) : UINT64_MAX;
}

/* Allocates part of the segment, so that touching it cannot fail. Twice is fine. */
static ddl_status shm_commit(const shm *t, uint64_t offset, uint64_t bytes) {
    if (bytes >= SHM_ASK_BYTES && shm_memory_left(t) < bytes + SHM_ASK_BYTES) {
        return DDL_ERR_NOMEM;
    }
    while (bytes > 0) {
        uint64_t step = bytes < SHM_COMMIT_STEP ? bytes : SHM_COMMIT_STEP;
        if (fallocate(t->fd, FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)step) == 0) {
            offset += step;
            bytes -= step;
        } else if (errno != EINTR) {
            return DDL_ERR_NOMEM;
        }
    }
    return DDL_OK;
}

/* ---- the address ---- */

/* A number of `what` from a setting, brought to a multiple of unit. *number stays when there is none. */
static bool shm_setting_number(const shm *t, const char *name, const char *what, uint64_t least, uint64_t most,
                               uint64_t unit, uint64_t *number) {
    const char *text = t->host->setting(t->host, name);
    if (text == NULL) {
        return true;
    }
    char *end;
    unsigned long long n = text[0] >= '0' && text[0] <= '9' ? strtoull(text, &end, 10) : UINT64_MAX;
    int shift = n > most ? 0 : *end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0;
    if (n > most || end[shift > 0] != 0 || n > (most >> shift) || (n << shift) < least) {
        shm_log(t, DDL_LOG_WARN, "DDL_%s is \"%.40s\"; %s from %" PRIu64 " to %" PRIu64 " are possible, with K, M or "
                "G behind the number; no shared memory until it is corrected or unset", name, text, what, least, most);
        return false;
    }
    *number = ((uint64_t)n << shift) / unit * unit + ((n << shift) % unit != 0 ? unit : 0);
    return true;
}

/* 1 unless it says 0. */
static bool shm_setting_switch(const shm *t, const char *name, bool *on) {
    const char *text = t->host->setting(t->host, name);
    *on = text == NULL || strcmp(text, "0") != 0;
    if (text != NULL && strcmp(text, "0") != 0 && strcmp(text, "1") != 0) {
        shm_log(t, DDL_LOG_WARN, "DDL_%s is \"%.40s\"; 0 or 1 is possible; no shared memory until it is corrected or unset", name,
                text);
        return false;
    }
    return true;
}

/* An arena has to hold whatever one rank may allocate: all memory there is, as sparse as it comes. */
static uint64_t shm_arena_offer(void) {
    uint64_t ram = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE), bytes = 1u << 30;
    while (bytes < ram && bytes < SHM_ARENAS_MAX) {
        bytes *= 2;
    }
    return bytes;
}

/* False: a setting makes no sense, and was told so. */
static bool shm_address_make(shm *t) {
    shm_address *a = &t->address;
    memcpy(a->magic, "ddlshm11", 8);
    a->page_bytes = (uint32_t)sysconf(_SC_PAGESIZE);
    a->uid = (uint32_t)geteuid();
    a->arena_bytes = shm_arena_offer();
    t->distant_ns = SHM_DISTANT_NS;
    return shm_setting_number(t, "SHM_RING_BYTES", "bytes", 16u << 10, 16u << 20, SHM_PAGE, &a->ring_bytes) &&
           shm_setting_number(t, "SHM_STAGING_BYTES", "bytes", 128u << 10, 1u << 30, SHM_PAGE, &a->staging_bytes) &&
           shm_setting_number(t, "SHM_ARENA_BYTES", "bytes", 64u << 20, SHM_ARENAS_MAX, 2u << 20, &a->arena_bytes) &&
           shm_setting_number(t, "SHM_DISTANT_NS", "nanoseconds", 0, 1u << 30, 1, &t->distant_ns) &&
           shm_setting_switch(t, "SHM_CMA", &t->may_fetch);
}

/* Equal settings, same user: an equivalence, so that each rank of a host comes to the same set. */
static bool shm_address_fits(const shm *t, const shm_address *other) {
    return memcmp(other->magic, t->address.magic, 8) == 0 && other->page_bytes == t->address.page_bytes &&
           other->uid == t->address.uid && other->ring_bytes == t->address.ring_bytes &&
           other->staging_bytes == t->address.staging_bytes;
}

/* ---- one for all ---- */

/* Whether more ranks share a set of cores than one of them may use of it. */
static bool shm_is_crowded(const shm *t) {
    bool crowded = false;
    for (int32_t i = 0; i < t->local_count; i++) {
        const shm_address *a = &t->addresses[t->rank_of[i]];
        uint32_t ranks = 0;
        for (int32_t j = 0; j < t->local_count; j++) {
            ranks += t->addresses[t->rank_of[j]].core_set == a->core_set;
        }
        crowded = crowded || ranks > a->cores;
    }
    return crowded;
}

/* What was not set follows from the number of ranks. Lines of a longer ring have left the reader's nearest cache when they
 * are written again (docs/design.md). */
static void shm_sizes(shm *t, int32_t local_count) {
    bool pair = local_count == 2 && t->address.ring_bytes == 0 && t->address.staging_bytes == 0;
    uint64_t ring = pair ? SHM_PAIR_RING_BYTES : SHM_RING_BYTES;
    t->ring_bytes = t->address.ring_bytes != 0 ? t->address.ring_bytes : ring;
    t->staging_bytes = t->address.staging_bytes != 0 ? t->address.staging_bytes : SHM_STAGING_BYTES + SHM_RING_BYTES - ring;
}

/* Nothing is known yet of where peer i runs; distance.h. */
static void shm_distance_begin(shm *t, int32_t i) { t->distances[i] = (shm_distance){.distant = t->distant_ns == 0}; }

/* The set of local ranks is known when every peer's address is; the layout follows from it. */
static ddl_status shm_settle(shm *t) {
    uint64_t arena = t->address.arena_bytes;
    t->local_count = 0;
    t->sleepers_fence = true;
    for (int32_t r = 0; r < t->world_size; r++) {
        bool here = t->addresses[r].magic[0] != 0;
        t->index_of[r] = here ? t->local_count : -1;
        if (here) {
            t->rank_of[t->local_count++] = r;
            t->sleepers_fence = t->sleepers_fence && t->addresses[r].hears_barriers == 1;
            arena = t->addresses[r].arena_bytes < arena ? t->addresses[r].arena_bytes : arena;
        }
    }
    t->local_index = t->index_of[t->rank];
    t->crowded = shm_is_crowded(t);
    if (t->local_count > SHM_LOCAL_MAX) {
        shm_log(t, DDL_LOG_WARN, "%d ranks share this host, shared memory serves at most %d", (int)t->local_count,
                SHM_LOCAL_MAX);
        return DDL_ERR_UNSUPPORTED;
    }
    for (int32_t i = 0; i < t->local_count; i++) {
        shm_distance_begin(t, i);
    }
    shm_sizes(t, t->local_count);
    while (arena > 0 && arena > SHM_ARENAS_MAX / (uint64_t)t->local_count) {
        arena /= 2;
    }
    t->arena_bytes = arena / (2u << 20) * (2u << 20);
    t->shared_bytes = (shm_staging_offset(t, t->local_count) + (2u << 20) - 1) / (2u << 20) * (2u << 20);
    t->segment_bytes = shm_arena_offset(t, t->local_count);
    return DDL_OK;
}

/* All but the arenas. A forked child has no business here. */
static ddl_status shm_map(shm *t) {
    void *at = mmap(NULL, (size_t)t->shared_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, t->fd, 0);
    if (at == MAP_FAILED) {
        shm_log(t, DDL_LOG_WARN, "the segment of %" PRIu64 " bytes cannot be mapped: %s", t->shared_bytes,
                strerror(errno));
        return DDL_ERR_NOMEM;
    }
    t->base = at;
    madvise(at, (size_t)t->shared_bytes, MADV_DONTFORK);
    madvise(at, (size_t)t->shared_bytes, MADV_DONTDUMP);
    return DDL_OK;
}

/* A memfd of the full size whose size nobody can change. MFD_NOEXEC_SEAL: some systems refuse one without. */
static int shm_memfd(const shm *t) {
    unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING, noexec = 8u;
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < t->segment_bytes) {
        errno = EFBIG; /* ftruncate would raise SIGXFSZ */
        return -1;
    }
    int fd = memfd_create("ddl-shm", flags | noexec);
    fd = fd < 0 && errno == EINVAL ? memfd_create("ddl-shm", flags) : fd;
    if (fd >= 0 && (ftruncate(fd, (off_t)t->segment_bytes) != 0 ||
                    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)) {
        int error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

static void shm_header_fill(const shm *t, shm_header *h) {
    memcpy(h->magic, t->address.magic, 8);
    h->local_count = (uint32_t)t->local_count;
    h->leader = (uint32_t)t->rank_of[0];
    h->ring_bytes = t->ring_bytes;
    h->staging_bytes = t->staging_bytes;
    h->arena_bytes = t->arena_bytes;
    h->sleepers_fence = t->sleepers_fence;
    h->crowded = t->crowded;
    memcpy(h->rank_of, t->rank_of, (size_t)t->local_count * sizeof h->rank_of[0]);
}

/* The leader's part. */
static ddl_status shm_make(shm *t) {
    t->fd = shm_memfd(t);
    if (t->fd < 0 || shm_commit(t, 0, SHM_HEADER_BYTES) != DDL_OK) {
        shm_log(t, DDL_LOG_WARN, "no segment of %" PRIu64 " bytes for %d ranks can be made: %s%s", t->segment_bytes,
                (int)t->local_count, strerror(errno),
                errno == EFBIG ? " (look at ulimit -f, or set DDL_SHM_ARENA_BYTES)" : "");
        return DDL_ERR_SYSTEM;
    }
    if (shm_map(t) != DDL_OK) {
        return DDL_ERR_NOMEM;
    }
    shm_header_fill(t, shm_head(t));
    return getrandom(shm_head(t)->bell_token, 16, 0) == 16 ? DDL_OK : DDL_ERR_SYSTEM;
}

/* What came must be what the leader would have made: ours, of that size, and sealed, so that no look at it can be a
 * SIGBUS later. Returns what is wrong, or NULL. */
static const char *shm_fd_fault(const shm *t) {
    struct stat st;
    int seals = fcntl(t->fd, F_GET_SEALS);
    if (fstat(t->fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        return "it is no file of memory";
    }
    if (st.st_uid != geteuid()) {
        return "it belongs to another user";
    }
    if ((uint64_t)st.st_size != t->segment_bytes) {
        return "its size is not that of the agreed layout";
    }
    if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW)) {
        return "its size is not sealed";
    }
    return NULL;
}

static const char *shm_header_fault(const shm *t) {
    shm_header mine, theirs;
    memset(&mine, 0, sizeof mine);
    memcpy(&theirs, t->base, offsetof(shm_header, bell_token));
    shm_header_fill(t, &mine);
    return memcmp(&mine, &theirs, offsetof(shm_header, bell_token)) == 0 ? NULL : "its first page says another layout";
}

static ddl_status shm_accept(shm *t) {
    const char *fault = shm_fd_fault(t);
    if (fault == NULL && shm_map(t) != DDL_OK) {
        return DDL_ERR_NOMEM;
    }
    fault = fault != NULL ? fault : shm_header_fault(t);
    if (fault != NULL) {
        shm_log(t, DDL_LOG_WARN, "the segment that rank %d passed is refused: %s", (int)t->rank_of[0], fault);
        return DDL_ERR_CORRUPT;
    }
    return DDL_OK;
}

static void shm_unmap(shm *t) {
    if (t->base != NULL) {
        munmap(t->base, (size_t)t->shared_bytes);
        t->base = NULL;
    }
    if (t->fd >= 0) {
        close(t->fd);
        t->fd = -1;
    }
}

/* ---- who is in ---- */

/* Whether there is room for what all ranks here take sooner or later, as they may be in one container. */
static bool shm_may_take_memory(const shm *t) {
    uint64_t each = t->staging_bytes + (uint64_t)(t->local_count - 1) * t->ring_bytes, left = shm_memory_left(t);
    bool enough = left / (uint64_t)t->local_count >= each;
    if (!enough) {
        shm_log(t, DDL_LOG_WARN,
                "no shared memory: the control group (container) of this process allows %" PRIu64 " MiB more, and %d ranks "
                "may take %" PRIu64 " MiB; raise its memory limit, or lower DDL_SHM_STAGING_BYTES on all ranks",
                left >> 20, (int)t->local_count, ((uint64_t)t->local_count * each) >> 20);
    }
    return enough;
}

/* Says IN, unless the leader has given this rank up. What `prepared` wrote is seen by whoever sees IN. */
static ddl_status shm_enter(shm *t, ddl_status (*prepare)(shm *t)) {
    uint32_t waiting = SHM_WAITING;
    if (!shm_may_take_memory(t)) {
        return DDL_ERR_NOMEM;
    }
    ddl_status status = shm_commit(t, shm_controls_at() + (uint64_t)t->local_index * SHM_PAGE, SHM_PAGE);
    if (status != DDL_OK) {
        shm_log(t, DDL_LOG_WARN, "no memory for this rank's page of the segment");
        return status;
    }
    if ((status = prepare(t)) != DDL_OK) {
        return status;
    }
    /* Release: pairs with shm_state. */
    bool in = atomic_compare_exchange_strong_explicit(&shm_head(t)->state[t->local_index], &waiting, SHM_IN,
                                                      memory_order_release, memory_order_relaxed);
    return in ? DDL_OK : DDL_ERR_UNSUPPORTED;
}

/* The leader hears who cannot take part; the rank itself cannot write it, having no segment. */
static void shm_hear_declines(shm *t) {
    for (int32_t i = 1; i < t->local_count; i++) {
        int fd = -1;
        uint32_t waiting = SHM_WAITING;
        if (shm_state(t, i) == SHM_WAITING &&
            t->host->take_fd(t->host, t->rank_of[i], SHM_TAG_OUT, &fd) != DDL_IN_PROGRESS) {
            atomic_compare_exchange_strong_explicit(&shm_head(t)->state[i], &waiting, SHM_OUT, memory_order_relaxed,
                                                    memory_order_relaxed); /* nothing but the word itself is said */
        }
        if (fd >= 0) {
            close(fd);
        }
    }
}

/* Tells local rank i, unless it has been told. No room on the way is no answer: the next call tries again. */
static void shm_tell(shm *t, int32_t i, uint64_t tag, int fd) {
    ddl_status status = t->told[i] ? DDL_OK : t->host->send_fd(t->host, t->rank_of[i], tag, fd);
    t->told[i] = status == DDL_OK || status == DDL_ERR_UNSUPPORTED;
    if (status == DDL_ERR_UNSUPPORTED && t->base != NULL && t->local_index == 0) {
        atomic_store_explicit(&shm_head(t)->state[i], SHM_OUT, memory_order_relaxed); /* it never gets one */
    }
}

/* The leader tells all, the others tell the leader. */
static void shm_tell_all(shm *t) {
    bool in = t->stage == SHM_JOINED;
    for (int32_t i = 1; t->local_index == 0 && i < t->local_count; i++) {
        shm_tell(t, i, SHM_TAG_SEGMENT, in ? t->fd : -1);
    }
    if (t->local_index > 0 && !in) {
        shm_tell(t, 0, SHM_TAG_OUT, -1);
    }
}

static ddl_status shm_lead(shm *t, ddl_status (*prepare)(shm *t)) {
    ddl_status status = shm_make(t);
    return status == DDL_OK ? shm_enter(t, prepare) : status;
}

static ddl_status shm_follow(shm *t, ddl_status (*prepare)(shm *t)) {
    ddl_status status = t->host->take_fd(t->host, t->rank_of[0], SHM_TAG_SEGMENT, &t->fd);
    if (status == DDL_OK && t->fd >= 0) {
        status = shm_accept(t);
        return status == DDL_OK ? shm_enter(t, prepare) : status;
    }
    if (status != DDL_IN_PROGRESS) {
        shm_log(t, DDL_LOG_INFO, "rank %d, which leads on this host, made no segment", (int)t->rank_of[0]);
        t->told[0] = true; /* it knows */
        status = DDL_ERR_UNSUPPORTED;
    }
    return status;
}

/* Moves the joining along. DDL_IN_PROGRESS, DDL_OK when this rank is in, or an error: it is out. */
static ddl_status shm_join(shm *t, ddl_status (*prepare)(shm *t)) {
    if (t->stage == SHM_GATHERING) {
        bool can = shm_settle(t) == DDL_OK && DDL_HAS(t->host, send_fd) && DDL_HAS(t->host, take_fd);
        t->stage = can ? SHM_JOINING : SHM_BARRED;
    }
    if (t->stage == SHM_JOINING) {
        ddl_status status = t->local_index == 0 ? shm_lead(t, prepare) : shm_follow(t, prepare);
        if (status == DDL_IN_PROGRESS) {
            return status;
        }
        t->stage = status == DDL_OK ? SHM_JOINED : SHM_DECLINED;
        if (status != DDL_OK) {
            shm_unmap(t);
        }
    }
    if (t->stage != SHM_BARRED) {
        shm_tell_all(t);
    }
    return t->stage == SHM_JOINED ? DDL_OK : DDL_ERR_UNSUPPORTED;
}

/* Both of a pair come to the same answer: it is read from words that change once. */
static ddl_status shm_pair_ready(shm *t, int32_t peer) {
    int32_t i = t->index_of[peer];
    if (i < 0) {
        return DDL_ERR_UNSUPPORTED;
    }
    if (t->local_index == 0) {
        shm_hear_declines(t);
    }
    uint32_t state = shm_state(t, i);
    return state == SHM_WAITING ? DDL_IN_PROGRESS : state == SHM_IN ? DDL_OK : DDL_ERR_UNSUPPORTED;
}

#endif /* SHM_SEGMENT_H */

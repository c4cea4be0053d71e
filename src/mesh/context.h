/* mesh, first part: the context, one member of one job. All state hangs off it. There are no globals,
 * but for the shells of contexts that ended: see coll/join.h.
 * Rooms above keep their own parts behind pointers that this room only carries. */
#ifndef DDL_MESH_CONTEXT_H
#define DDL_MESH_CONTEXT_H

#include "../loader.h"
#include "../settings.h"
#include "../store.h"
#include "../tcp/endpoint.h"
#include "../trace/ring.h"
#include "../tune.h"
#include "../wire/siphash.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

#if defined(__has_include)
#if __has_include(<sys/single_threaded.h>) /* glibc 2.32 */
#include <sys/single_threaded.h>
#define DDL__SINGLE_THREADED 1
#endif
#endif

enum {
    DDL__ENDPOINTS_MAX = DDL_STATS_TRANSPORTS,
    DDL__SCRATCH_CLASSES = 4,
    DDL__TOLD = 16, /* threads whose last errors are kept apart */
    DDL__HOLDERS = 16, /* calls whose threads are known: see ddl__hold */
    DDL__NOTE_BYTES = 1024, /* payload of a usual control message */
    DDL__PASS_NAME_BYTES = 16,
    DDL__PACE_KEPT = 16 /* large messages of each link: see pace.h */
};

/* Memory whose end is told to transports: see lasting.h. id 0: none. */
typedef struct ddl__lasting {
    ddl_allocation is;
} ddl__lasting;

/* A message of ours: done() is called when the transport needs it no more, unless the send ended at once. */
typedef struct ddl__outgoing {
    ddl_message message; /* first: the transport knows only this */
    void (*done)(ddl_context *c, struct ddl__outgoing *out, ddl_status status);
    void *owner;
    int64_t index;
} ddl__outgoing;

/* A control message with room for its payload. Those of the usual size are reused and never freed before the end. */
typedef struct ddl__note {
    ddl__outgoing out;
    struct ddl__note *next;
    size_t room;
    uint8_t payload[];
} ddl__note;

/* Scratch memory that is kept for the next time. */
typedef struct ddl__scratch {
    size_t bytes;
    struct ddl__scratch *next;
    uint64_t pad[2]; /* the data begins 32 bytes in, aligned for vectors */
} ddl__scratch;

/* A payload on its way in. target NULL: into scratch, and delivered from there when it is whole. */
typedef struct ddl__landing {
    ddl__frame frame;
    void *scratch;
    void *target;
    void *owner; /* of the target: set by the room that placed it */
    int64_t index;
    uint64_t begin_ns; /* when its header came */
    struct ddl__landing *next;
} ddl__landing;

/* What a room above does with frames of one type. deliver: the payload is whole. place (optional): where it may go
 * directly, NULL for scratch; placed: it is there, or will never be. A negative status closes the link. */
typedef struct ddl__handler {
    ddl_status (*deliver)(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload);
    void *(*place)(ddl_context *c, int32_t peer, const ddl__frame *f, ddl__landing *landing);
    void (*placed)(ddl_context *c, int32_t peer, ddl__landing *landing, ddl_status status);
} ddl__handler;

/* One opened transport. */
typedef struct ddl__endpoint {
    const ddl_plugin *plugin;
    const ddl_transport *table;
    void *self;
    ddl_host host; /* host.core is the context */
    bool only_watches; /* TCP that was not asked for: carries nothing, see DDL_TRANSPORT_BLIND */
    uint32_t address_bytes;
    uint8_t address[256];
    ddl_transport_stats stats;
} ddl__endpoint;

typedef enum ddl__life {
    DDL__ALIVE = 0,
    DDL__MISSED = 1, /* its process or its link is gone, without goodbye so far: see detector.h */
    DDL__LEFT = 2,   /* said goodbye */
    DDL__DEAD = 3
} ddl__life;

typedef struct ddl__link {
    ddl__endpoint *endpoint; /* the transport that reaches it; NULL for this rank itself */
    ddl__endpoint *watch;    /* TCP beside a transport that would not notice the end of that host; or NULL */
    ddl__endpoint *native;   /* runs collectives with it though messages go another way, as with a newcomer; or NULL */
    ddl__endpoint *device;   /* what shares device memory with it (DDL_TRANSPORT_DEVICE); or NULL */
    ddl__endpoint *slower;   /* reaches it too, was measured and carries nothing; or NULL */
    bool watching;           /* connected there */
    ddl__life life;
    bool same_host, connected;
    bool named; /* it is known who and where it is */
    bool same_cores;     /* shares those of this rank */
    bool same_space;     /* numbers processes as we do: what /proc says of its pid is true */
    bool passes_process; /* it does not, but passes us its process, as we do: see spaces.h */
    bool process_told, board_told, board_taken;
    bool drained; /* left, and its link has ended: nothing more will come */
    bool closing; /* dead, but the transport has not been told yet: not from inside its own calls */
    int32_t host; /* number of its host, from 0 by first appearance */
    int32_t pid, pidfd;
    uint64_t pid_start; /* start time in /proc/pid/stat: a number that was given to a new process does not fool us */
    uint32_t incarnation; /* 0: the process that began the job with this rank; each that took its place has a higher */
    uint64_t missed_ns; /* when it was missed, or left */
    uint64_t latency_ns, bytes_per_s;
    uint64_t data_bytes; /* of a frame of DATA to it, at most: see ddl__data_bytes */
    uint64_t data_ns;    /* when the last one had gone */
    ddl__mac mac_out, mac_in; /* with DDL_MAC: of frames to it and from it */
    ddl_rank_stats stats;
    float pace[DDL__PACE_KEPT]; /* bytes per second of large messages from it */
    const char *missed_how;
    char host_id[64], host_name[32];
    uint8_t pass_name[DDL__PASS_NAME_BYTES]; /* where descriptors can be passed to it: see passing.h; 0: nowhere */
} ddl__link;

/* How a link can end, for missed_how; other texts are possible. */
static const char ddl__how_ended[] = "its process ended";
static const char ddl__how_cut[] = "it has not answered for 4 s";
static const char ddl__how_unreached[] =
    "no connection to it could be made; perhaps a firewall drops what goes to its port "
    "(DDL_PORT_RANGE) or its address leads elsewhere (DDL_INTERFACE, DDL_ADVERTISE)";
static const char ddl__how_closed[] =
    "its link had to be closed, as memory was wanted back that a message of it was still to come to or to be read from";
static const char ddl__how_damaged[] = "it sent damaged bytes";
static const char ddl__how_no_memory[] = "a receiver had no memory for its messages";
static const char ddl__how_unexpected[] = "it sent a part of a collective that was not expected";

/* A clock that costs a few nanoseconds, for what is only reported: set right by the real one now and then. */
typedef struct ddl__clock {
    uint64_t ticks, ns; /* of one moment */
    double ns_per_tick;
} ddl__clock;

/* The last error of one thread. */
typedef struct ddl__told {
    pthread_t thread;
    uint64_t number; /* 0: free; the highest is the newest */
    char text[DDL__SENTENCE_BYTES];
} ddl__told;

/* A thread in a call that ddl_finalize waits for. */
typedef struct ddl__holder {
    atomic_uintptr_t thread;    /* 0: free */
    _Atomic(const char *) call; /* its public name; NULL for a moment */
} ddl__holder;

typedef struct ddl__devices ddl__devices;

/* Work that is done whenever somebody polls: operations that wait for others to end are started. Under the lock. */
typedef struct ddl__pump {
    void (*run)(ddl_context *c, struct ddl__pump *pump);
    struct ddl__pump *next;
} ddl__pump;

struct ddl_context {
    ddl__base base;
    ddl__settings settings;
    ddl__loader loader;
    int32_t rank, world_size, host_count, local_ranks;
    int32_t cores, core_ranks; /* that this rank may use; that use them, itself among them: see ddl__cores */
    volatile unsigned char *own_page; /* empty in a child of fork; NULL where the kernel cannot do that */
    pid_t pid; /* whose context this is: a child of fork gets DDL_ERR_FORK */
    uint64_t job;
    double choice[4];   /* latency and seconds per byte between hosts, by a plugin and by TCP; 0: not measured */
    const char *choice_name; /* of that plugin */
    ddl__tuning tuning; /* what new groups begin with: the measured model and DDL_ALGO */
    const char *doing;  /* the public call that is under way, for stall reports; NULL: none */

    pthread_mutex_t lock; /* one lock; everything below is under it */
    pthread_cond_t changed;
    atomic_bool locked_alone; /* instead of `lock`, by the only thread of the process: see ddl__lock */
    atomic_int lock_waiters; /* relaxed: only a hint to the thread that polls, to let others in */
    atomic_int lock_spins;   /* relaxed: looks at the lock before the kernel is asked; 0: threads share cores */
    int lock_passed;         /* the poller's: so many waiters did not take the lock when they could; 0: none */
    int32_t cond_waiters;
    bool yielded_long; /* the last yield took long; of each kind there were so many of late: see ddl__yielded */
    int32_t long_yields, short_yields;
    int32_t sleeps_at_once; /* so many to come have no yield before them */
    bool polling, aborted, joined;
    atomic_bool finalized; /* written under the lock; ddl_grad_ready looks without it, and again with it */
    atomic_int held; /* calls that use what ddl_finalize frees, at times without the lock: see ddl__hold */
    ddl__holder holders[DDL__HOLDERS];
    bool opening; /* a transport that must open */
    bool sleeping; /* the thread that polls is in the kernel, and has not been woken */
    char abort_text[256];
    int32_t wake_fd, epoll_fd; /* wake_fd: as it was made until the last handle is freed */
    int32_t refs; /* the user's handle and every group that the user still holds */
    pthread_t thread;
    atomic_bool has_thread; /* as finalized */
    bool thread_stop;

    ddl__endpoint endpoints[DDL__ENDPOINTS_MAX];
    int32_t endpoint_count;
    /* By world rank. One more stands for all who were dead when a new process took their rank: for groups that were
     * made before. It is dead for ever. */
    ddl__link *links;
    uint32_t incarnation;      /* of this rank */
    uint32_t incarnation_seen; /* the highest of any rank that was ever admitted */
    uint8_t nonce[DDL__MAC_NONCE_BYTES]; /* told to peers, for the keys of DDL_MAC */
    char meet_host[64];        /* the host that the rendezvous leads to, as in ddl__link.host_id */
    _Atomic unsigned char *board; /* goodbyes, by world rank: see board.h; NULL: there is none */
    int32_t board_fd;
    _Atomic uint64_t *places; /* on the board too: where each rank waits, see cores.h */
    bool spread, place_pinned, place_left;
    int32_t place_core, crowd_looks;
    uint64_t place_ns, moved_ns, move_pause_ns;
    struct ddl__page *page; /* what ddl-info --attach reads: see page.h; NULL: there is none */
    int32_t page_fd;
    uint64_t page_slots;   /* that groups have, a bit each */
    const void *page_told; /* the request whose wait it tells */
    const char *page_doing;
    int32_t pass_fd; /* listens for passed descriptors */
    int32_t passing_count;
    uint8_t pass_name[DDL__PASS_NAME_BYTES];
    struct ddl__passing *passings; /* on their way */
    struct ddl__passed *passed;    /* have come */
    ddl__handler handlers[DDL__FRAME_TYPE_MAX + 1];
    int32_t missed_count, closing_count;
    uint64_t next_look_ns; /* when the detector looks again */

    ddl__note *notes;
    int32_t notes_out; /* that a transport still holds */
    ddl__landing *landings;
    ddl__scratch *scratch[DDL__SCRATCH_CLASSES];
    int32_t scratch_count[DDL__SCRATCH_CLASSES];

    struct ddl__lent *lent; /* what ddl_tensor_alloc gave out */
    ddl__lasting **lasting; /* sorted by address */
    uint32_t lasting_held, lasting_room;
    uint64_t lasting_count; /* so many there have been */
    ddl__clock clock;
    struct ddl__op *natives; /* operations that a transport runs by itself */
    struct ddl__op *messaging; /* that have messages under way: engine/straight.h */
    uint32_t polls;
    ddl_group *world;
    struct ddl__groups *groups;
    struct ddl__requests *requests;
    struct ddl__ops *ops;
    ddl__pump *pumps; /* of trainers */
    uint64_t called; /* collectives that this rank has begun, of all groups */
    ddl_stats stats;
    ddl__trace *trace; /* NULL: nothing is recorded */
    ddl__sentence error; /* the newest, and what each thread was told */
    pthread_mutex_t error_lock;
    ddl__told told[DDL__TOLD];
    uint64_t told_count;

    ddl__devices *devices;     /* NULL: no plugin brings any */
    struct ddl__stage *stages; /* copies to and from devices that are under way */
    ddl_request *detached;     /* that nobody waits for: streams do */
    int32_t device_natives;    /* among natives; and copies of messages from devices of peers */
    bool fetch_told;           /* why such a copy was not possible; once is enough */
};

/* Writes the error that ddl_error shows. */
#define ddl__error(c, status, ...) ddl__said((c), ddl__fail(&(c)->error, (status), __VA_ARGS__))

/* Keeps the newest sentence for the calling thread: others that fail meanwhile do not change what it reads. The thread
 * whose error is oldest gives up its place. */
static ddl_status ddl__said(ddl_context *c, ddl_status status) {
    pthread_mutex_lock(&c->error_lock);
    ddl__told *mine = &c->told[0];
    for (int32_t i = 0; i < DDL__TOLD; i++) {
        ddl__told *t = &c->told[i];
        if (t->number > 0 && pthread_equal(t->thread, pthread_self())) {
            mine = t;
            break;
        }
        mine = t->number < mine->number ? t : mine;
    }
    mine->thread = pthread_self();
    mine->number = ++c->told_count;
    memcpy(mine->text, c->error.text, sizeof mine->text);
    pthread_mutex_unlock(&c->error_lock);
    return status;
}

/* ddl__tune_parse, and who asked for it. */
static ddl_status ddl__tune_set(ddl_context *c, ddl__tuning *tuning, const char *text, const char *what) {
    ddl__sentence why;
    ddl_status status = ddl__tune_parse(tuning, text, &why);
    return status < 0 ? ddl__error(c, status, "%s: %s", what, why.text) : status;
}

/* >>clock */

static inline uint64_t ddl__ticks(void) {
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
    uint64_t ticks;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks));
    return ticks;
#else
    return ddl__now_ns();
#endif
}

/* Measures the length of a tick since the last time, unless that is too short ago to tell. */
static uint64_t ddl__clock_set(ddl_context *c) {
    uint64_t ticks = ddl__ticks(), ns = ddl__now_ns();
    if (ns - c->clock.ns > DDL__NS_PER_MS / 2 && ticks > c->clock.ticks) {
        c->clock.ns_per_tick = (double)(ns - c->clock.ns) / (double)(ticks - c->clock.ticks);
        c->clock.ticks = ticks;
        c->clock.ns = ns;
    }
    return ns;
}

/* The time, wrong by a few microseconds at most: the real clock is asked once a millisecond. */
static inline uint64_t ddl__about_ns(ddl_context *c) {
    double since = (double)(int64_t)(ddl__ticks() - c->clock.ticks) * c->clock.ns_per_tick;
    return since > 0 && since < (double)DDL__NS_PER_MS ? c->clock.ns + (uint64_t)(int64_t)since : ddl__clock_set(c);
}

/* >>lock */

static inline bool ddl__only_thread(void) {
#ifdef DDL__SINGLE_THREADED
    return __libc_single_threaded != 0;
#else
    return false;
#endif
}

/* Tells the core that a loop waits. */
static inline void ddl__relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#define DDL__LOCK_SPINS 1000 /* some 20 us: what a progress thread does with the lock at one time takes less, mostly */

/* A thread that was the only one may have locked before this one began. Acquire: what it did. */
static inline bool ddl__trylock(ddl_context *c) {
    if (pthread_mutex_trylock(&c->lock) != 0) {
        return false;
    }
    if (!atomic_load_explicit(&c->locked_alone, memory_order_acquire)) {
        return true;
    }
    pthread_mutex_unlock(&c->lock);
    return false;
}

/* Who holds the lock goes on holding it, by the mutex: before it begins a thread, or waits for one. Others that come
 * meanwhile give the mutex back. */
static void ddl__lock_by_mutex(ddl_context *c) {
    if (atomic_load_explicit(&c->locked_alone, memory_order_relaxed)) {
        pthread_mutex_lock(&c->lock);
        atomic_store_explicit(&c->locked_alone, false, memory_order_release);
    }
}

static void ddl__lock_patiently(ddl_context *c) {
    const struct timespec moment = {0, 50000};
    pthread_mutex_lock(&c->lock);
    while (atomic_load_explicit(&c->locked_alone, memory_order_acquire)) { /* a callback has begun this thread */
        pthread_mutex_unlock(&c->lock);
        nanosleep(&moment, NULL);
        pthread_mutex_lock(&c->lock);
    }
}

/* Mostly nobody else has it. A progress thread that has a core of its own gives it away soon, and sooner than the
 * kernel could wake this thread: it is looked for, for a while. */
static void ddl__lock_shared(ddl_context *c) {
    if (ddl__trylock(c)) {
        return;
    }
    atomic_fetch_add_explicit(&c->lock_waiters, 1, memory_order_relaxed);
    int spins = atomic_load_explicit(&c->lock_spins, memory_order_relaxed);
    while (spins > 0 && !ddl__trylock(c)) {
        ddl__relax();
        spins--;
    }
    if (spins == 0) {
        ddl__lock_patiently(c);
    }
    atomic_fetch_sub_explicit(&c->lock_waiters, 1, memory_order_relaxed);
}

/* The only thread of its process leaves a mark, which takes fewer instructions than a mutex; threads that begin later
 * look for it. */
static inline void ddl__lock(ddl_context *c) {
    if (ddl__only_thread() && !atomic_load_explicit(&c->locked_alone, memory_order_relaxed)) {
        atomic_store_explicit(&c->locked_alone, true, memory_order_relaxed);
    } else {
        ddl__lock_shared(c);
    }
}

static inline void ddl__unlock(ddl_context *c) {
    if (atomic_load_explicit(&c->locked_alone, memory_order_relaxed)) { /* by this thread: others wait for its end */
        atomic_store_explicit(&c->locked_alone, false, memory_order_release);
    } else {
        pthread_mutex_unlock(&c->lock);
    }
}

/* Gives the lock away for a moment, within one call: the thread that polls may begin nothing long meanwhile. */
static inline void ddl__unlock_shortly(ddl_context *c) {
    atomic_fetch_add_explicit(&c->lock_waiters, 1, memory_order_relaxed);
    ddl__unlock(c);
}
/* It is back, or has given up. */
static inline void ddl__locked_again(ddl_context *c) {
    atomic_fetch_sub_explicit(&c->lock_waiters, 1, memory_order_relaxed);
}

/* A page that the kernel empties in a child of fork: to ask it costs a load, getpid a system call each time. */
static void ddl__own_page_make(ddl_context *c) {
    size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
    void *page = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page != MAP_FAILED && madvise(page, bytes, MADV_WIPEONFORK) == 0) {
        c->own_page = page;
        *c->own_page = 1;
    } else if (page != MAP_FAILED) {
        munmap(page, bytes);
    }
}

static inline bool ddl__is_forked(const ddl_context *c) {
    return c->own_page != NULL ? *c->own_page == 0 : c->pid != getpid();
}

/* Begins a public call: checks that the context may be used, and locks it. */
static inline ddl_status ddl__enter(ddl_context *c) {
    if (c == NULL) {
        return DDL_ERR_ARG;
    }
    if (ddl__is_forked(c)) {
        return DDL_ERR_FORK; /* the lock may be held for ever by a thread that this process has not */
    }
    ddl__lock(c);
    if (c->finalized) {
        ddl_status status = ddl__error(c, DDL_ERR_STATE, "the context was finalized; nothing can be started on it");
        ddl__unlock(c);
        return status;
    }
    return DDL_OK;
}

/* ddl_finalize frees nothing until ddl__let_go. Such calls nest. Both counts and `finalized` are sequentially
 * consistent: either ddl_finalize sees the call, or the call sees the end. */
static void ddl__hold(ddl_context *c, const char *call) {
    uintptr_t self = (uintptr_t)pthread_self();
    c->held++;
    for (int32_t i = 0; i < DDL__HOLDERS; i++) {
        uintptr_t none = 0;
        if (atomic_compare_exchange_strong(&c->holders[i].thread, &none, self)) {
            atomic_store_explicit(&c->holders[i].call, call, memory_order_relaxed);
            return;
        }
    } /* more at once: they are waited for, and not named */
}

static void ddl__let_go(ddl_context *c) {
    uintptr_t self = (uintptr_t)pthread_self();
    int32_t i = DDL__HOLDERS - 1; /* the inner call is mostly behind the outer one */
    while (i >= 0 && c->holders[i].thread != self) {
        i--;
    }
    if (i >= 0) {
        atomic_store_explicit(&c->holders[i].call, NULL, memory_order_relaxed);
        c->holders[i].thread = 0;
    }
    c->held--;
}

/* The call that a thread is in, or with thread 0 any thread. NULL: none that is known. */
static const char *ddl__held_call(ddl_context *c, uintptr_t thread) {
    for (int32_t i = 0; i < DDL__HOLDERS; i++) {
        uintptr_t holder = c->holders[i].thread;
        if (holder != 0 && (thread == 0 || holder == thread)) {
            const char *call = atomic_load_explicit(&c->holders[i].call, memory_order_relaxed);
            return call != NULL ? call : "a call of a trainer";
        }
    }
    return NULL;
}

DDL_API const char *ddl_error(const ddl_context *context) {
    ddl_context *c = (ddl_context *)(uintptr_t)context;
    if (c == NULL) {
        return "";
    }
    if (ddl__is_forked(c)) { /* the parent's words, and a lock that may be held for ever */
        return "the context belongs to the parent process, a child of fork cannot use it; start processes before "
               "ddl_init, or call ddl_init in the child";
    }
    pthread_mutex_lock(&c->error_lock);
    const ddl__told *found = NULL;
    for (int32_t i = 0; i < DDL__TOLD; i++) {
        const ddl__told *t = &c->told[i];
        bool mine = t->number > 0 && pthread_equal(t->thread, pthread_self());
        if (mine || found == NULL || t->number > found->number) {
            found = t;
        }
        if (mine) {
            break;
        }
    }
    pthread_mutex_unlock(&c->error_lock);
    return found->text;
}

/* Refuses a call that was given NULL where something must be. c may be NULL too: then there is nowhere to say why. */
static ddl_status ddl__refuse(ddl_context *c, const char *what, const char *which) {
    DDL__TRY(ddl__enter(c));
    ddl_status status = ddl__error(c, DDL_ERR_ARG, "%s: %s is NULL", what, which);
    ddl__unlock(c);
    return status;
}

/* Wakes the thread that polls, when it sleeps: another one did something that it may be waiting for, or that needs
 * it. */
static void ddl__kick(ddl_context *c) {
    uint64_t one = 1;
    if (c->sleeping) {
        c->sleeping = false;
        if (c->wake_fd >= 0 && write(c->wake_fd, &one, sizeof one) < 0) {
            return; /* full: it wakes anyway */
        }
    }
}

/* >>memory */

/* Memory of one class is of one size, but for the last, which is of any. Many small pieces are in use at once:
 * frames that came early; their sizes differ from time to time, the number of each class hardly. */
static const size_t ddl__scratch_bytes[DDL__SCRATCH_CLASSES - 1] = {256, 4096, 65536};
static const int32_t ddl__scratch_kept[DDL__SCRATCH_CLASSES] = {256, 64, 32, 8};

static int32_t ddl__scratch_class(size_t bytes) {
    int32_t i = 0;
    while (i < DDL__SCRATCH_CLASSES - 1 && bytes > ddl__scratch_bytes[i]) {
        i++;
    }
    return i;
}

/* At least bytes bytes, not zeroed, aligned to 16; NULL when there is no memory. The smallest that fits is taken. */
static void *ddl__scratch_get(ddl_context *c, size_t bytes) {
    int32_t size_class = ddl__scratch_class(bytes);
    bool fixed = size_class < DDL__SCRATCH_CLASSES - 1;
    ddl__scratch **best = NULL;
    ddl__scratch **at = &c->scratch[size_class];
    for (; *at != NULL && !(fixed && best != NULL); at = &(*at)->next) {
        if ((*at)->bytes >= bytes && (best == NULL || (*at)->bytes < (*best)->bytes)) {
            best = at;
        }
    }
    if (best != NULL) {
        ddl__scratch *s = *best;
        *best = s->next;
        c->scratch_count[size_class]--;
        return s + 1;
    }
    size_t rounded = fixed ? ddl__scratch_bytes[size_class] : bytes;
    ddl__scratch *s = rounded > SIZE_MAX - sizeof *s ? NULL : ddl__alloc(&c->base, sizeof *s + rounded);
    if (s == NULL) {
        return NULL;
    }
    s->bytes = rounded;
    return s + 1;
}

/* Some of each size_class are kept, of the last one the largest. */
static void ddl__scratch_put(ddl_context *c, void *memory) {
    if (memory == NULL) {
        return;
    }
    ddl__scratch *s = (ddl__scratch *)memory - 1;
    int32_t size_class = ddl__scratch_class(s->bytes);
    s->next = c->scratch[size_class];
    c->scratch[size_class] = s;
    if (++c->scratch_count[size_class] <= ddl__scratch_kept[size_class]) {
        return;
    }
    ddl__scratch **least = &c->scratch[size_class];
    for (ddl__scratch **at = least; size_class == DDL__SCRATCH_CLASSES - 1 && *at != NULL; at = &(*at)->next) {
        if ((*at)->bytes < (*least)->bytes) {
            least = at;
        }
    }
    ddl__scratch *gone = *least;
    *least = gone->next;
    c->scratch_count[size_class]--;
    ddl__free(&c->base, gone);
}

static void ddl__scratch_free_all(ddl_context *c) {
    for (int32_t size_class = 0; size_class < DDL__SCRATCH_CLASSES; size_class++) {
        while (c->scratch[size_class] != NULL) {
            ddl__scratch *s = c->scratch[size_class];
            c->scratch[size_class] = s->next;
            ddl__free(&c->base, s);
        }
    }
}

static ddl__landing *ddl__landing_get(ddl_context *c) {
    ddl__landing *l = c->landings;
    if (l == NULL) {
        return ddl__alloc(&c->base, sizeof *l);
    }
    c->landings = l->next;
    memset(l, 0, sizeof *l);
    return l;
}

static void ddl__landing_put(ddl_context *c, ddl__landing *l) {
    ddl__scratch_put(c, l->scratch);
    l->scratch = NULL;
    l->next = c->landings;
    c->landings = l;
}

#endif /* DDL_MESH_CONTEXT_H */

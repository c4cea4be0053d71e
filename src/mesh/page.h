/* mesh: the page, memory of this rank in which ddl-info --attach reads what the rank does, also while it computes or
 * is stopped: nobody has to answer. A memfd that a process of the same user opens by /proc/PID/fd, only to read.
 * The flight recorders of the groups lie in it, where they are written anyway; what else it tells is written when a
 * wait has become long, before a sleep, or when a link changes, and a few counters. So it costs next to nothing. It has
 * no data of tensors, and no secret. Where it cannot be made, recorders are in ordinary memory, and nobody can attach.
 *
 * Layout: the head; the links, by world rank; from groups_at a slot of group_bytes for each group. Who reads it may not
 * trust it: the writer goes on meanwhile. */
#ifndef DDL_MESH_PAGE_H
#define DDL_MESH_PAGE_H

#include "context.h"

#include <fcntl.h>

enum {
    DDL__PAGE_VERSION = 2, /* of this layout */
    DDL__PAGE_GROUPS = 64, /* that can be seen */
    DDL__PAGE_NAMES = 64,
    DDL__RECORDS = 256
};
#define DDL__PAGE_MAGIC "ddlpage"
#define DDL__PAGE_TOLD_NS (100 * DDL__NS_PER_MS) /* a wait that is shorter is not told */
#define DDL__PAGE_AGAIN_NS (500 * DDL__NS_PER_MS)

/* One line of the flight recorder. */
typedef struct ddl__flight {
    uint64_t order; /* among the collectives of all groups of this rank */
    uint32_t sequence;
    int32_t root;
    ddl_op op;
    uint8_t kind, dtype;
    int16_t status; /* DDL_IN_PROGRESS while it runs */
    uint8_t nature; /* as in ddl__call */
    int32_t tensors;
    int64_t count; /* of a v-form the elements of all ranks */
    uint64_t detail;
    uint64_t call_hash; /* of this call */
    uint64_t signature; /* of this call and all before it: what its frames carry */
    uint64_t start_ns, end_ns;
    const char *algorithm;
} ddl__flight;

typedef struct ddl__page_link {
    int32_t pid, host;
    uint8_t life, connected, transport; /* transport: among the head's; 255: this rank itself */
    char host_name[32];
    uint64_t last, late_ns, large_messages, bytes_per_s; /* as in ddl_rank_stats, and always new */
} ddl__page_link;

/* A slot; records[DDL__RECORDS] and the members' world ranks follow. */
typedef struct ddl__page_group {
    uint32_t used, slot, id, epoch;
    int32_t rank, size, broken;
    char name[64];
    ddl__flight records[DDL__RECORDS];
    int32_t ranks[];
} ddl__page_group;

/* What this rank waits for, by the request that waits longest. */
typedef struct ddl__page_wait {
    uint64_t since_ns, told_ns; /* since 0: for nothing, or not for long */
    int32_t rank;               /* of the world, -1: not known */
    char text[600];
} ddl__page_wait;

typedef enum ddl__page_stage {
    DDL__PAGE_JOINING = 0,
    DDL__PAGE_JOINED = 1,
    DDL__PAGE_LEAVING = 2
} ddl__page_stage;

typedef struct ddl__page {
    char magic[8];
    uint32_t version, flight_bytes, link_bytes, group_bytes, groups_at, group_count; /* count: that have had a slot */
    int32_t pid, rank, world_size, stage;
    uint64_t job, start_ns;
    char job_name[64];
    char transports[DDL__ENDPOINTS_MAX][16];
    struct {
        uint64_t at; /* the address that records give */
        char text[24];
    } names[DDL__PAGE_NAMES];
    uint32_t sleeps;       /* the thread that polls is in the kernel */
    _Atomic uint32_t turn; /* odd while what follows is written */
    char doing[48];        /* the call that slept last; "" for none, or a progress thread */
    uint64_t doing_ns;     /* since when */
    ddl__page_wait wait;
    ddl__page_link links[];
} ddl__page;

/* >>making */

static size_t ddl__page_up(size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

static size_t ddl__page_head_bytes(int32_t world_size) {
    return ddl__page_up(sizeof(ddl__page) + (size_t)world_size * sizeof(ddl__page_link));
}

static size_t ddl__page_group_bytes(int32_t world_size) {
    return ddl__page_up(sizeof(ddl__page_group) + (size_t)world_size * sizeof(int32_t));
}

/* Maps a part of the file, which gets its memory now: a full system would say so later by a signal. */
static void *ddl__page_map(int fd, size_t at, size_t bytes) {
    if (posix_fallocate(fd, (off_t)at, (off_t)bytes) != 0) {
        return NULL;
    }
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)at);
    return memory != MAP_FAILED ? memory : NULL;
}

static void ddl__page_close(ddl_context *c) {
    if (c->page != NULL) {
        munmap(c->page, ddl__page_head_bytes(c->world_size));
        c->page = NULL;
    }
    if (c->page_fd >= 0) {
        close(c->page_fd);
        c->page_fd = -1;
    }
    c->page_told = NULL;
}

static void ddl__page_open(ddl_context *c) {
    size_t head = ddl__page_head_bytes(c->world_size);
    c->page_fd = memfd_create("ddl-page", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    ddl__page *p = c->page_fd >= 0 ? ddl__page_map(c->page_fd, 0, head) : NULL;
    if (p == NULL || fcntl(c->page_fd, F_ADD_SEALS, F_SEAL_SHRINK) != 0) {
        c->page = p;
        ddl__page_close(c);
        ddl__log(&c->base, DDL_LOG_DEBUG, "no page for ddl-info --attach: %s", strerror(errno));
        return;
    }
    p->version = DDL__PAGE_VERSION;
    p->flight_bytes = sizeof(ddl__flight);
    p->link_bytes = sizeof(ddl__page_link);
    p->group_bytes = (uint32_t)ddl__page_group_bytes(c->world_size);
    p->groups_at = (uint32_t)head;
    p->pid = c->pid;
    p->rank = c->rank;
    p->world_size = c->world_size;
    p->job = c->job;
    p->start_ns = ddl__now_ns();
    snprintf(p->job_name, sizeof p->job_name, "%s", c->settings.job != NULL ? c->settings.job : "");
    memcpy(p->magic, DDL__PAGE_MAGIC, sizeof p->magic);
    c->page = p;
}

/* A slot for a group, zeroed. NULL: there is none. */
static ddl__page_group *ddl__page_group_open(ddl_context *c) {
    if (c->page == NULL) {
        return NULL;
    }
    uint32_t slot = 0;
    while (slot < DDL__PAGE_GROUPS && (c->page_slots >> slot & 1) != 0) {
        slot++;
    }
    if (slot == DDL__PAGE_GROUPS) {
        return NULL;
    }
    size_t bytes = c->page->group_bytes;
    ddl__page_group *s = ddl__page_map(c->page_fd, c->page->groups_at + slot * bytes, bytes);
    if (s != NULL) {
        memset(s, 0, bytes); /* a group that is gone was there */
        c->page_slots |= 1ull << slot;
        c->page->group_count = DDL__MAX(c->page->group_count, slot + 1);
        s->slot = slot;
    }
    return s;
}

static void ddl__page_group_close(ddl_context *c, ddl__page_group *s) {
    c->page_slots &= ~(1ull << s->slot);
    s->used = 0;
    munmap(s, ddl__page_group_bytes(c->world_size));
}

/* >>telling */

/* The name of an algorithm: records have only its address. */
static void ddl__page_algorithm(ddl_context *c, const char *name) {
    for (int32_t i = 0; c->page != NULL && i < DDL__PAGE_NAMES; i++) {
        uint64_t at = (uint64_t)(uintptr_t)name;
        if (c->page->names[i].at == 0) {
            snprintf(c->page->names[i].text, sizeof c->page->names[i].text, "%s", name);
            c->page->names[i].at = at;
        }
        if (c->page->names[i].at == at) {
            return;
        }
    }
}

static void ddl__page_link_tell(ddl_context *c, int32_t rank) {
    if (c->page == NULL) {
        return;
    }
    const ddl__link *l = &c->links[rank];
    ddl__page_link *p = &c->page->links[rank];
    p->pid = l->pid;
    p->host = l->host;
    p->life = (uint8_t)l->life;
    p->connected = l->connected;
    p->transport = l->endpoint != NULL ? (uint8_t)(l->endpoint - c->endpoints) : 255;
    snprintf(p->host_name, sizeof p->host_name, "%.31s", l->host_name);
}

static void ddl__page_stage_tell(ddl_context *c, ddl__page_stage stage) {
    for (int32_t i = 0; c->page != NULL && i < c->endpoint_count; i++) {
        snprintf(c->page->transports[i], sizeof c->page->transports[i], "%s", c->endpoints[i].plugin->name);
    }
    for (int32_t i = 0; c->page != NULL && stage == DDL__PAGE_JOINED && i < c->world_size; i++) {
        ddl__page_link_tell(c, i);
    }
    if (c->page != NULL) {
        c->page->stage = (int32_t)stage;
    }
}

/* Between the two the reader does not believe what it reads. One writer: the lock is held. */
static void ddl__page_begin(ddl__page *p) {
    /* relaxed, then a release fence: whoever sees a new byte sees the odd number too */
    atomic_store_explicit(&p->turn, atomic_load_explicit(&p->turn, memory_order_relaxed) + 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
}

static void ddl__page_end(ddl__page *p) {
    /* release: all that was written is there before the even number */
    atomic_store_explicit(&p->turn, atomic_load_explicit(&p->turn, memory_order_relaxed) + 1, memory_order_release);
}

/* Whether a request that has waited so long is to be told: the one that is told already, or the only one. */
static bool ddl__page_wants(const ddl_context *c, const void *request, uint64_t waited_ns, uint64_t now) {
    const ddl__page *p = c->page;
    return p != NULL && waited_ns >= DDL__PAGE_TOLD_NS && (c->page_told == NULL || c->page_told == request) &&
           (c->page_told == NULL || now - p->wait.told_ns >= DDL__PAGE_AGAIN_NS);
}

static void ddl__page_wait_tell(ddl_context *c, const void *request, uint64_t waited_ns, uint64_t now, int32_t rank,
                                const char *text) {
    ddl__page *p = c->page;
    c->page_told = request;
    ddl__page_begin(p);
    p->wait.since_ns = now - DDL__MIN(waited_ns, now - 1);
    p->wait.told_ns = now;
    p->wait.rank = rank;
    snprintf(p->wait.text, sizeof p->wait.text, "%s", text);
    ddl__page_end(p);
    for (int32_t i = 0; i < c->world_size; i++) {
        ddl__page_link_tell(c, i);
    }
}

/* The request has ended. */
static inline void ddl__page_wait_over(ddl_context *c, const void *request) {
    if (c->page_told == request && request != NULL) {
        ddl__page_begin(c->page);
        c->page->wait.since_ns = 0;
        ddl__page_end(c->page);
        c->page_told = NULL;
    }
}

/* Before and after a sleep in the kernel. A wait sets page_doing back when it begins. */
static void ddl__page_sleep_tell(ddl_context *c, bool sleeps) {
    if (c->page != NULL && sleeps && c->page_doing != c->doing) { /* names of calls are literals */
        const char *doing = c->doing != NULL ? c->doing : "";
        size_t length = strnlen(doing, sizeof c->page->doing - 1);
        ddl__page_begin(c->page);
        memcpy(c->page->doing, doing, length); /* not snprintf: this is done before each sleep */
        c->page->doing[length] = '\0';
        c->page->doing_ns = ddl__now_ns();
        ddl__page_end(c->page);
        c->page_doing = c->doing;
    }
    if (c->page != NULL) {
        c->page->sleeps = sleeps;
    }
}

#endif /* DDL_MESH_PAGE_H */

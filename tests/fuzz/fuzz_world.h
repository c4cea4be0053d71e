/* One rank of a world of four without processes, sockets or time: a context as ddl_init leaves it, whose transport is
 * the input. The clock stands still until it is told to go on, memory fails when it is told to. */
#ifndef FUZZ_WORLD_H
#define FUZZ_WORLD_H

#include "fuzz.h"

#include <sanitizer/asan_interface.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

static uint64_t fuzz_clock_ns;

FUZZ_QUIET static int fuzz_clock(struct timespec *out) {
    out->tv_sec = (time_t)(fuzz_clock_ns / 1000000000u);
    out->tv_nsec = (long)(fuzz_clock_ns % 1000000000u);
    return 0;
}

#ifdef FUZZ_STREAM /* the sockets of fuzz_stream.c */
#include <sys/socket.h>
#include <sys/uio.h>
static ssize_t fuzz_readv(int fd, const struct iovec *iov, int count);
#define recv(fd, out, cap, flags) fuzz_readv(fd, &(struct iovec){out, cap}, 1)
#define readv(fd, iov, count) fuzz_readv(fd, iov, count)
#endif
#define clock_gettime(id, out) fuzz_clock(out)
#define sched_yield() ((void)0)
#define getpid() 4711
#define epoll_create1(flags) 4000 /* no such descriptors: what is done with them fails, and nothing depends on it */
#define eventfd(count, flags) 4001
#define epoll_ctl(epoll, op, fd, event) 0
#define DDL_IMPLEMENTATION
#include "ddl.h"

enum { WORLD = 4, SLOTS = 12, GROUPS = 5, PAYLOAD_MAX = 1 << 17 };

/* The stream from one peer, and what waits to go to it. */
typedef struct fuzz_peer {
    ddl_message *first, *last;
    void *token; /* of a payload that is landing */
    uint8_t *landing;
    uint64_t landed, left;
    bool down, cut; /* cut: there is nowhere to land, so the link goes */
} fuzz_peer;

/* A request of the program, and its memory, which is gone at once when the request has ended. */
typedef struct fuzz_slot {
    ddl_request *request;
    void *memory[2];
} fuzz_slot;

typedef struct fuzz {
    fuzz_input in;
    ddl_context *c;
    const ddl_host *host;
    int32_t rank;
    fuzz_peer peers[WORLD];
    fuzz_slot slots[SLOTS];
    ddl_group *groups[GROUPS];
    ddl_op ops[2]; /* of the program: a function, and a scaled sum */
    int64_t live;    /* blocks of memory that ddl holds */
    int32_t fail_in; /* the allocation that fails, counted from now; 0: none */
    int32_t borrow;  /* whether sends end at once: 0 all, 1 none, 2 every other, 3 they fail */
    int32_t sends, idle;
    bool blocking; /* inside a call that waits: it goes on when something arrives */
    int (*step)(struct fuzz *f); /* something arrives, 1; or not, 0 */
    void (*route)(struct fuzz *f, int32_t peer, const ddl_message *m); /* of the recorder */
    const struct fuzz_stream *stream; /* how frames arrive; NULL: as this transport hands them on */
} fuzz;

/* Another way in: through the code that cuts a stream of bytes. */
typedef struct fuzz_stream {
    void (*arrive)(fuzz *f, int32_t peer, const uint8_t *header, const uint8_t *payload, size_t bytes, int way);
    void (*pump)(fuzz *f, int32_t peer, size_t bytes); /* 0: all */
    void (*end)(fuzz *f, int32_t peer, ddl_status status);
    void (*redirect)(int32_t peer, void *token, void *new_landing);
} fuzz_stream;

/* >>memory and log */

FUZZ_QUIET static void *fuzz_alloc(void *user, size_t bytes) {
    fuzz *f = user;
    if (f->fail_in > 0 && --f->fail_in == 0) {
        return NULL;
    }
    REQUIRE(bytes < 64u << 20); /* nothing that a peer says makes this rank take so much */
    f->live++;
    return malloc(bytes);
}

FUZZ_QUIET static void fuzz_free(void *user, void *memory) {
    ((fuzz *)user)->live--;
    free(memory);
}

FUZZ_QUIET static void fuzz_log(void *user, ddl_log_level level, const char *line) {
    (void)user;
    (void)level;
    fuzz_clean(line, DDL__SENTENCE_BYTES + 64);
}

/* >>transport */

FUZZ_QUIET static void fuzz_readable(const ddl_message *m) {
    void *payload = (void *)(uintptr_t)m->payload;
    REQUIRE(m->payload_bytes == 0 || __asan_region_is_poisoned(payload, m->payload_bytes) == NULL);
}

FUZZ_QUIET static ddl_status fuzz_send(void *self, int32_t peer, ddl_message *m) {
    fuzz *f = self;
    fuzz_peer *p = &f->peers[peer];
    ddl__frame frame;
    REQUIRE(peer >= 0 && peer < WORLD && peer != f->rank);
    REQUIRE(ddl__frame_read(m->header, &frame) == DDL_OK && frame.source == (uint32_t)f->rank);
    REQUIRE(frame.bytes == m->payload_bytes && m->payload_bytes <= DDL__FRAME_MAX_PAYLOAD);
    fuzz_readable(m);
    if (f->route != NULL) {
        f->route(f, peer, m);
        return DDL_OK;
    }
    f->sends++;
    if (f->borrow == 3 && p->first == NULL) {
        return DDL_ERR_PEER;
    }
    if (p->first == NULL && !p->down && (f->borrow == 0 || (f->borrow == 2 && f->sends % 2 == 0))) {
        return DDL_OK;
    }
    m->next = NULL;
    if (p->first == NULL) {
        p->first = m;
    } else {
        p->last->next = m;
    }
    p->last = m;
    return DDL_IN_PROGRESS;
}

/* The oldest message to a peer has gone out. */
FUZZ_QUIET static void fuzz_sent(fuzz *f, int32_t peer, ddl_status status) {
    fuzz_peer *p = &f->peers[peer];
    ddl_message *m = p->first;
    if (m != NULL) {
        fuzz_readable(m);
        p->first = m->next;
        p->last = p->first != NULL ? p->last : NULL;
        f->host->sent(f->host, m, status);
    }
}

FUZZ_QUIET static void fuzz_landing_end(fuzz *f, int32_t peer, ddl_status status) {
    void *token = f->peers[peer].token;
    f->peers[peer].token = NULL;
    if (f->stream != NULL) {
        f->stream->end(f, peer, status);
    }
    if (token != NULL) {
        f->host->landed(f->host, peer, token, status);
    }
}

/* The link ends, from inside the transport. */
FUZZ_QUIET static void fuzz_lose(fuzz *f, int32_t peer, int32_t error) {
    if (!f->peers[peer].down) {
        f->peers[peer].down = true;
        f->peers[peer].cut = false;
        fuzz_landing_end(f, peer, DDL_ERR_PEER);
        f->host->lost(f->host, peer, error, "its connection ended");
    }
}

FUZZ_QUIET static void fuzz_peer_dead(void *self, int32_t peer) {
    fuzz *f = self;
    f->peers[peer].down = true;
    fuzz_landing_end(f, peer, DDL_ERR_PEER);
    ddl_message *m = f->peers[peer].first;
    f->peers[peer].first = f->peers[peer].last = NULL;
    while (m != NULL) {
        ddl_message *next = m->next;
        fuzz_readable(m);
        f->host->sent(f->host, m, DDL_ERR_PEER);
        m = next;
    }
}

FUZZ_QUIET static void fuzz_close(void *self) {
    for (int32_t i = 0; i < WORLD; i++) {
        fuzz_peer_dead(self, i);
    }
}

FUZZ_QUIET static void fuzz_recall(void *self, int32_t peer, ddl_message *m) {
    fuzz_peer *p = &((fuzz *)self)->peers[peer];
    ddl_message *last = NULL;
    for (ddl_message **at = &p->first; *at != NULL; last = *at, at = &(*at)->next) {
        if (*at == m) {
            *at = m->next;
            p->last = p->last == m ? last : p->last;
            return;
        }
    }
}

FUZZ_QUIET static void fuzz_redirect(void *self, int32_t peer, void *token, void *new_landing) {
    fuzz *f = self;
    fuzz_peer *p = &f->peers[peer];
    if (f->stream != NULL) {
        f->stream->redirect(peer, token, new_landing);
    } else if (p->token == token) {
        p->cut = new_landing == NULL;
        p->landing = new_landing == NULL ? NULL : (uint8_t *)new_landing + p->landed;
    }
}

FUZZ_QUIET static int32_t fuzz_progress(void *self, int32_t expect) {
    fuzz *f = self;
    REQUIRE(expect >= -1 && expect < WORLD);
    if (!f->blocking || f->step == NULL) {
        return 0;
    }
    if (f->idle > 0) {
        f->idle--;
        return 0;
    }
    if (f->step(f)) {
        return 1;
    }
    fuzz_clock_ns += 20 * DDL__NS_PER_MS; /* until the call's deadline */
    return 0;
}

FUZZ_QUIET static ddl_status fuzz_wait(void *self, int64_t timeout_ns, const int *fds, int32_t count) {
    (void)self;
    (void)fds;
    (void)count;
    fuzz_clock_ns += (uint64_t)timeout_ns;
    return DDL_OK;
}

static const ddl_transport fuzz_transport = {.size = sizeof(ddl_transport),
                                             .flags = DDL_TRANSPORT_ORDERED,
                                             .max_payload_bytes = DDL__FRAME_MAX_PAYLOAD,
                                             .close = fuzz_close,
                                             .send = fuzz_send,
                                             .progress = fuzz_progress,
                                             .peer_dead = fuzz_peer_dead,
                                             .wait = fuzz_wait,
                                             .recall = fuzz_recall,
                                             .redirect = fuzz_redirect};
static const ddl_plugin fuzz_plugin = {.size = sizeof(ddl_plugin), .abi = DDL_PLUGIN_ABI, .name = "fuzz",
                                       .transport = &fuzz_transport};

/* >>world */

FUZZ_QUIET static void fuzz_links(fuzz *f) {
    ddl_context *c = f->c;
    for (int32_t i = 0; i < WORLD; i++) {
        ddl__link *l = &c->links[i];
        l->endpoint = i == f->rank ? NULL : &c->endpoints[0];
        l->pid = l->pidfd = -1; /* no process to ask: a lost link is proof */
        l->host = i / 2;
        l->same_host = l->same_space = i / 2 == f->rank / 2;
        snprintf(l->host_id, sizeof l->host_id, "host%d", i / 2);
    }
    c->host_count = c->local_ranks = 2;
    c->cores = 4;
}

/* Takes the smaller bytes; the memory is as the type needs it. */
FUZZ_QUIET static void fuzz_user_op(void *dst, const void *a, const void *b, int64_t count, ddl_dtype dtype,
                                    void *user) {
    size_t bytes = ddl_dtype_bytes(dtype), align = DDL__MIN(bytes, 8u);
    (void)user;
    REQUIRE(count > 0 && count <= PAYLOAD_MAX);
    REQUIRE((uintptr_t)dst % align == 0 && (uintptr_t)a % align == 0 && (uintptr_t)b % align == 0);
    for (size_t i = 0; i < (size_t)count * bytes; i++) {
        ((uint8_t *)dst)[i] = DDL__MIN(((const uint8_t *)a)[i], ((const uint8_t *)b)[i]);
    }
}

/* What ddl_init makes, without the meeting. Two groups: the world, and ranks 3, 1, 0 of it (2 is not in it). */
FUZZ_QUIET static void fuzz_world_make(fuzz *f, int32_t rank) {
    static const int32_t three[] = {3, 1, 0};
    ddl__base base = {.allocator = {fuzz_alloc, fuzz_free, f}, .log = fuzz_log, .log_level = DDL_LOG_WARN};
    base.rank = rank;
    ddl_context *c = f->c = ddl__alloc(&base, sizeof *c);
    c->base = base;
    c->pid = getpid();
    c->refs = 1;
    c->board_fd = -1;
    c->settings.timeout_ms = 1000;
    c->settings.stall_ms = 300;
    c->rank = c->settings.launch.rank = f->rank = rank;
    c->world_size = c->settings.launch.world = WORLD;
    c->tuning.model = ddl__model_default;
    REQUIRE(ddl__context_parts(c) == DDL_OK);
    ddl__links_alloc(c, DDL__ALIVE);
    ddl__endpoint *e = &c->endpoints[c->endpoint_count++];
    *e = (ddl__endpoint){.plugin = &fuzz_plugin, .table = &fuzz_transport, .self = f, .host = ddl__host_table(c)};
    f->host = &e->host;
    fuzz_links(f);
    REQUIRE(ddl__world_make(c) == DDL_OK);
    c->joined = true;
    f->groups[0] = c->world;
    REQUIRE(ddl_op_create(c, fuzz_user_op, NULL, 0, &f->ops[0]) == DDL_OK);
    REQUIRE(ddl_op_create_scaled_sum(c, 0.5, &f->ops[1]) == DDL_OK);
    f->groups[1] = rank == 2 ? NULL : ddl__form_local(c->world, three, 3, 77, "three");
}

/* The count of what is kept for later is what is kept, and groups can be told apart. */
FUZZ_QUIET static void fuzz_sound(fuzz *f) {
    uint64_t kept = 0;
    for (const ddl_group *g = f->c->groups->first; g != NULL; g = g->next) {
        if (g->magic != DDL__GROUP_MAGIC) {
            continue;
        }
        for (const ddl__early *e = g->early; e != NULL; e = e->next) {
            kept += e->frame.bytes;
        }
        for (const ddl__unexpected *u = g->unexpected_first; u != NULL; u = u->next) {
            kept += u->is_offer ? 0 : u->bytes;
        }
        REQUIRE(g->outstanding >= 0 && g->wants >= 0 && ddl__group_find(f->c, g->id) == g);
    }
    REQUIRE(f->c->stats.unexpected_bytes == kept && f->c->notes_out >= 0 && f->c->missed_count >= 0);
}

/* Ends everything; whatever has happened, nothing is left. */
FUZZ_QUIET static void fuzz_world_end(fuzz *f) {
    f->fail_in = 0;
    REQUIRE(ddl_finalize(&f->c) == DDL_OK);
    for (int32_t i = 1; i < GROUPS; i++) {
        REQUIRE(ddl_group_free(&f->groups[i]) == DDL_OK);
    }
    for (int32_t i = 0; i < SLOTS; i++) {
        free(f->slots[i].memory[0]);
        free(f->slots[i].memory[1]);
    }
    REQUIRE(f->live == 0);
}

#endif

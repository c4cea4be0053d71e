/* mesh, third part: who is dead. On one host a pidfd is the proof, between hosts a broken connection. Plugins are not
 * the detector.
 *
 * A rank whose process or link is gone is MISSED first: its goodbye may still be in the socket, or on its way through
 * another rank (goodbyes are passed on once on each host, because most ranks of a host are not connected to each other).
 * It is DEAD when its link has ended without goodbye and its process is known to be gone, or after a grace time.
 * The first cause is flooded before anything else fails, and wins over the ripples that follow. */
#ifndef DDL_MESH_DETECTOR_H
#define DDL_MESH_DETECTOR_H

#include "host.h"

#include <poll.h>
#include <sys/syscall.h>

#define DDL__GRACE_NS (200 * DDL__NS_PER_MS)
#define DDL__LOOK_NS (10 * DDL__NS_PER_MS)

/* Group room: fails what needs the rank. */
static void ddl__groups_rank_dead(ddl_context *c, int32_t rank, const char *text);

/* >>process */

/* The start time of a process in ticks since boot, field 22 of its stat; 0 when there is no such process. */
static uint64_t ddl__process_start(int32_t pid) {
    char path[48], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return 0;
    }
    size_t n = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[n] = 0;
    char *at = strrchr(text, ')'); /* the name may contain anything */
    if (at == NULL || at[1] != ' ' || at[2] == 'Z' || at[2] == 'X') {
        return 0; /* a zombie is dead, its parent only has not asked */
    }
    unsigned long long start = 0;
    for (int field = 2; at != NULL && field < 22; field++) {
        at = strchr(at + 1, ' ');
    }
    return at != NULL && sscanf(at, " %llu", &start) == 1 ? start : 0;
}

/* Where pidfds exist one is kept per rank of this host; -1 falls back to /proc. */
static int32_t ddl__process_open(int32_t pid, uint64_t start) {
#ifdef SYS_pidfd_open
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (fd >= 0 && ddl__process_start(pid) != start) {
        close(fd); /* another process has the number already: /proc will say that ours is gone */
        return -1;
    }
    return fd;
#else
    (void)pid;
    (void)start;
    return -1;
#endif
}

static bool ddl__process_gone(const ddl__link *l) {
    if (l->pidfd >= 0) {
        struct pollfd p = {.fd = l->pidfd, .events = POLLIN};
        return poll(&p, 1, 0) == 1;
    }
    return ddl__process_start(l->pid) != l->pid_start;
}

static bool ddl__has_process(const ddl_context *c, const ddl__link *l) {
    return l->same_host && l->pid > 0 && l->pid != c->pid;
}

/* >>death */

static void ddl__flood(ddl_context *c, uint8_t type, int32_t rank, const char *text, int32_t but) {
    uint8_t payload[300];
    ddl__writer w = ddl__writer_of(payload, sizeof payload);
    ddl__put_u32(&w, (uint32_t)rank);
    ddl__put_string(&w, text);
    for (int32_t i = 0; i < c->world_size; i++) {
        ddl__link *l = &c->links[i];
        if (i != rank && i != but && l->connected && l->life == DDL__ALIVE) {
            ddl__tell(c, i, (ddl__frame){.type = type}, payload, w.at);
        }
    }
}

static void ddl__settle(ddl_context *c, ddl__link *l, ddl__life life) {
    c->missed_count -= l->life == DDL__MISSED;
    l->life = life;
    if (l->pidfd >= 0) {
        close(l->pidfd); /* leaves the epoll set with it */
        l->pidfd = -1;
    }
}

/* Declares a rank dead: text is the cause that everybody will report. but: who told us, -1 for nobody. */
static void ddl__dead(ddl_context *c, int32_t rank, const char *text, int32_t but) {
    ddl__link *l = &c->links[rank];
    if (l->life == DDL__DEAD || rank == c->rank || c->finalized) {
        return;
    }
    ddl__settle(c, l, DDL__DEAD);
    ddl__log(&c->base, DDL_LOG_WARN, "%s", text);
    ddl__flood(c, DDL__FRAME_DEAD, rank, text, but);
    l->closing = true; /* from inside the transport's own calls it cannot be closed: see ddl__reap */
    c->closing_count++;
    ddl__groups_rank_dead(c, rank, text);
}

/* Its process or its link is gone; what that means is decided by ddl__look. After a goodbye it is as it should be. */
static void ddl__missed(ddl_context *c, int32_t peer, const char *how) {
    ddl__link *l = &c->links[peer];
    l->drained = l->drained || (l->life == DDL__LEFT && how != NULL);
    if (l->life == DDL__ALIVE && peer != c->rank) {
        l->life = DDL__MISSED;
        l->missed_ns = ddl__now_ns();
        l->missed_how = how;
        c->missed_count++;
        c->next_look_ns = 0;
    } else if (l->life == DDL__MISSED && l->missed_how == NULL) {
        l->missed_how = how;
    }
}

static void ddl__judge(ddl_context *c, int32_t rank) {
    ddl__link *l = &c->links[rank];
    bool local = ddl__has_process(c, l);
    bool gone = local && ddl__process_gone(l);
    /* Its own link told us, and its process agrees (or there is none to ask): that is proof. Seen only by the pidfd, its
     * goodbye may still come through somebody else, or through a socket that a forked child holds open. */
    bool by_link = l->missed_how != NULL;
    if ((by_link && (gone || !local)) || ddl__now_ns() - l->missed_ns > DDL__GRACE_NS) {
        char text[256];
        const char *how = by_link && !gone && local ? "its process lives but closed its link" : l->missed_how;
        snprintf(text, sizeof text, "rank %d (pid %d on host %.40s) is dead: %s", rank, l->pid, l->host_id,
                 how != NULL ? how : "its process ended");
        ddl__dead(c, rank, text, -1);
    }
}

/* Looks at processes and at those who are missed, every 10 ms while there is a wait. */
static void ddl__look(ddl_context *c, uint64_t now) {
    if (now < c->next_look_ns) {
        return;
    }
    c->next_look_ns = now + DDL__LOOK_NS;
    for (int32_t i = 0; i < c->world_size; i++) {
        ddl__link *l = &c->links[i];
        if (l->life == DDL__ALIVE && ddl__has_process(c, l) && ddl__process_gone(l)) {
            ddl__missed(c, i, NULL);
        }
    }
    c->next_look_ns = now + DDL__LOOK_NS;
    for (int32_t i = 0; c->missed_count > 0 && i < c->world_size; i++) {
        if (c->links[i].life == DDL__MISSED) {
            ddl__judge(c, i);
        }
    }
}

/* Tells transports about the dead, outside of their own calls. */
static void ddl__reap(ddl_context *c) {
    for (int32_t i = 0; c->closing_count > 0 && i < c->world_size; i++) {
        ddl__link *l = &c->links[i];
        if (l->closing) {
            l->closing = false;
            c->closing_count--;
            if (l->endpoint != NULL) {
                l->endpoint->table->peer_dead(l->endpoint->self, i);
            }
        }
    }
}

/* >>frames */

static ddl_status ddl__on_dead(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl__reader r = ddl__reader_of(payload, f->bytes);
    char text[256];
    uint32_t rank = ddl__get_u32(&r);
    ddl__get_string(&r, text, sizeof text);
    if (r.bad || rank >= (uint32_t)c->world_size) {
        return DDL_ERR_CORRUPT;
    }
    ddl__dead(c, (int32_t)rank, text, peer);
    return DDL_OK;
}

/* Somebody leaves in order. Passed on within the host, once. */
static ddl_status ddl__on_bye(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl__reader r = ddl__reader_of(payload, f->bytes);
    uint32_t rank = ddl__get_u32(&r);
    if (r.bad || rank >= (uint32_t)c->world_size) {
        return DDL_ERR_CORRUPT;
    }
    ddl__link *l = &c->links[rank];
    if (l->life == DDL__DEAD || l->life == DDL__LEFT || (int32_t)rank == c->rank) {
        return DDL_OK;
    }
    for (int32_t i = 0; i < c->world_size; i++) {
        ddl__link *to = &c->links[i];
        if (i != peer && i != (int32_t)rank && to->connected && to->same_host && to->life == DDL__ALIVE) {
            ddl__tell(c, i, (ddl__frame){.type = DDL__FRAME_BYE}, payload, f->bytes);
        }
    }
    l->drained = l->life == DDL__MISSED && l->missed_how != NULL; /* its link ended before somebody else told us why */
    ddl__settle(c, l, DDL__LEFT);
    l->missed_ns = ddl__now_ns();
    return DDL_OK;
}

static void ddl__say_goodbye(ddl_context *c) {
    uint8_t payload[4];
    ddl__writer w = ddl__writer_of(payload, sizeof payload);
    ddl__put_u32(&w, (uint32_t)c->rank);
    for (int32_t i = 0; i < c->world_size; i++) {
        if (c->links[i].connected && (c->links[i].life == DDL__ALIVE || c->links[i].life == DDL__MISSED)) {
            ddl__tell(c, i, (ddl__frame){.type = DDL__FRAME_BYE}, payload, sizeof payload);
        }
    }
}

#endif /* DDL_MESH_DETECTOR_H */

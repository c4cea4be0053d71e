/* mesh, third part: who is dead. On one host a pidfd is the proof, between hosts a broken connection. Plugins are not
 * the detector.
 *
 * A rank whose process or link is gone is MISSED first. When its process is known to be gone, all that it sent is read
 * before the verdict: with a goodbye, in its link or on the board (board.h), it has LEFT, without one it is DEAD.
 * The first cause is flooded before anything else fails, and wins over the ripples that follow. */
#ifndef DDL_MESH_DETECTOR_H
#define DDL_MESH_DETECTOR_H

#include "board.h"

#include <poll.h>
#include <sys/syscall.h>

#define DDL__GRACE_NS (1 * DDL__NS_PER_S) /* from the end of a link to the end of its process, on a busy machine */
#define DDL__GOODBYE_NS (250 * DDL__NS_PER_MS) /* from a goodbye to the error of those who still waited for that rank */
#define DDL__LOOK_NS (10 * DDL__NS_PER_MS)
#define DDL__LAST_WORDS_MS 500u /* from the end of a connection that watches to the last words on another transport */
#define DDL__PATIENCE_MS 300u /* for the other ranks of a host to say how one of them ended */

/* Group room: fails what needs the rank. */
static void ddl__groups_rank_dead(ddl_context *c, int32_t rank, const char *text, bool link_lost);

/* >>process */

/* The start time of a process in ticks since boot, field 22 of its stat; 0 when there is no such process. That of its
 * first thread says the same, and to all the same: qemu-user, which containers for other processors run in, makes up
 * /proc/PID/stat for the process itself. */
static uint64_t ddl__process_start(int32_t pid) {
    char path[48], text[1024];
    snprintf(path, sizeof path, "/proc/%d/task/%d/stat", pid, pid);
    ddl__process process;
    if (ddl__read_text(path, text, sizeof text) <= 0 || !ddl__process_parse(text, &process)) {
        return 0;
    }
    return process.state == 'Z' || process.state == 'X' ? 0 : process.start;
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
    return l->same_space ? l->pid > 0 && l->pid != c->pid : l->pidfd >= 0;
}

/* >>death */

static void ddl__flood(ddl_context *c, ddl__frame f, int32_t rank, const char *text, int32_t but) {
    uint8_t payload[300];
    ddl__writer w = ddl__writer_of(payload, sizeof payload);
    ddl__put_u32(&w, (uint32_t)rank);
    ddl__put_string(&w, text);
    for (int32_t i = 0; i < c->world_size; i++) {
        ddl__link *l = &c->links[i];
        if (i != rank && i != but && l->connected && l->life == DDL__ALIVE) {
            ddl__tell(c, i, f, payload, w.at);
        }
    }
}

static void ddl__settle(ddl_context *c, ddl__link *l, ddl__life life) {
    c->missed_count -= l->life == DDL__MISSED;
    l->life = life;
    l->missed_ns = ddl__now_ns();
    ddl__page_link_tell(c, (int32_t)(l - c->links));
    if (l->pidfd >= 0) {
        close(l->pidfd); /* leaves the epoll set with it */
        l->pidfd = -1;
    }
}

/* Declares a rank dead: text is the cause that everybody will report. flags: DDL__DEAD_LINK or 0. but: who told us, -1
 * for nobody. */
static void ddl__dead(ddl_context *c, int32_t rank, const char *text, uint16_t flags, int32_t but) {
    ddl__link *l = &c->links[rank];
    if (l->life == DDL__DEAD || rank == c->rank || c->finalized) {
        return;
    }
    ddl__settle(c, l, DDL__DEAD);
    ddl__log(&c->base, DDL_LOG_WARN, "%s", text);
    /* epoch: a word about the process that had the rank before says nothing of its successor */
    ddl__flood(c, (ddl__frame){.type = DDL__FRAME_DEAD, .flags = flags, .epoch = l->incarnation}, rank, text, but);
    c->closing_count += !l->closing; /* it may be closing since its goodbye */
    l->closing = true; /* from inside the transport's own calls it cannot be closed: see ddl__reap */
    ddl__groups_rank_dead(c, rank, text, (flags & DDL__DEAD_LINK) != 0);
}

/* Its process or its link is gone; what that means is decided by ddl__look. After a goodbye it is as it should be. */
static void ddl__missed(ddl_context *c, int32_t peer, const char *how) {
    ddl__link *l = &c->links[peer];
    if (l->life == DDL__LEFT && how != NULL && !l->drained) {
        l->drained = true;
        l->closing = true; /* what still waits to be sent to it ends */
        c->closing_count++;
    }
    if (l->life == DDL__ALIVE && peer != c->rank) {
        l->life = DDL__MISSED;
        l->missed_ns = ddl__now_ns();
        l->missed_how = how;
        c->missed_count++;
        ddl__page_link_tell(c, peer);
        c->next_look_ns = 0;
    } else if (l->life == DDL__MISSED && l->missed_how == NULL) {
        l->missed_how = how;
    }
}

static void ddl__dead_rank(ddl_context *c, int32_t rank, const char *how, uint16_t flags) {
    ddl__link *l = &c->links[rank];
    char text[256];
    snprintf(text, sizeof text, "rank %d (pid %d on host %s) is dead: %s", rank, l->pid, l->host_name, how);
    ddl__dead(c, rank, text, flags, -1);
}

/* A cut is between hosts, not ranks. Several here see it at once, each on a link of its own: they must tell the same,
 * so all ranks of that host are named. */
static void ddl__dead_host(ddl_context *c, int32_t host, const char *how) {
    uint8_t *state = ddl__alloc_array(&c->base, (size_t)c->world_size, 1);
    char text[256];
    ddl__text out = {text, sizeof text, 0};
    const char *name = "?";
    for (int32_t i = 0; i < c->world_size; i++) {
        ddl__link *l = &c->links[i];
        bool lost = l->host == host && (l->life == DDL__ALIVE || l->life == DDL__MISSED);
        name = lost ? l->host_name : name;
        if (state != NULL) {
            state[i] = lost ? 0 : 1;
        }
    }
    ddl__text_add(&out, "host %s with ", name);
    if (state != NULL) {
        ddl__text_ranks_below(&out, state, c->world_size, 1);
    }
    ddl__free(&c->base, state);
    ddl__text_add(&out, " is cut off: %s", how);
    for (int32_t i = 0; i < c->world_size; i++) {
        if (c->links[i].host == host) {
            ddl__missed(c, i, how); /* all of them first: the cut may be one way, and none is to be told of another */
        }
    }
    for (int32_t i = 0; i < c->world_size; i++) {
        if (c->links[i].host == host && c->links[i].life == DDL__MISSED) {
            ddl__dead(c, i, text, DDL__DEAD_LINK, -1);
        }
    }
}

/* Ranks of this host do not cry all at once, each for a rank of its own, so that one cause goes round. */
static uint64_t ddl__turn_ns(const ddl_context *c) {
    uint64_t before_me = 0;
    for (int32_t i = 0; i < c->rank; i++) {
        before_me += c->links[i].same_host && c->links[i].life == DDL__ALIVE;
    }
    return DDL__MIN(before_me * 20, 200u) * DDL__NS_PER_MS;
}

/* How long to wait for a word of those who know better: the other ranks of its host see whether its process ended. They
 * may be computing. */
static uint64_t ddl__patience(const ddl_context *c, const ddl__link *l) {
    uint64_t mates = 0, least = l->watch != NULL ? DDL__LAST_WORDS_MS * DDL__NS_PER_MS : 0;
    for (int32_t i = 0; i < c->world_size; i++) {
        const ddl__link *o = &c->links[i];
        mates += o != l && o->host == l->host && o->life <= DDL__MISSED;
    }
    return mates == 0 ? least : DDL__PATIENCE_MS * DDL__NS_PER_MS + ddl__turn_ns(c) + least;
}

/* The verdict on a process of this host that is gone. All that it sent is in our sockets: that is read first. */
static void ddl__judge_gone(ddl_context *c, int32_t rank) {
    ddl__link *l = &c->links[rank];
    while (l->endpoint->table->progress(l->endpoint->self, rank) > 0) {
    }
    if (l->life != DDL__MISSED) {
        return; /* its goodbye was there */
    }
    if (ddl__board_left(c, rank)) {
        ddl__settle(c, l, DDL__LEFT);
        l->drained = true;
    } else if (c->board != NULL || l->connected) {
        ddl__dead_rank(c, rank, ddl__how_ended, 0);
    } /* else it may have left in order: those who are connected to it know and tell */
}

/* It is cut off for what it sent, or as that found no memory, and not because it cannot be heard from here. */
static bool ddl__did_wrong(const ddl__link *l) {
    return l->missed_how == ddl__how_damaged || l->missed_how == ddl__how_unexpected ||
           l->missed_how == ddl__how_no_memory;
}

static void ddl__judge(ddl_context *c, int32_t rank, uint64_t now) {
    ddl__link *l = &c->links[rank];
    uint64_t missed = now - DDL__MIN(l->missed_ns, now);
    bool told = l->missed_how != NULL && l->missed_how != ddl__how_ended; /* the link itself is what is wrong */
    if (ddl__has_process(c, l) && ddl__process_gone(l)) {
        ddl__judge_gone(c, rank);
    } else if (!l->same_host && l->missed_how == ddl__how_cut) {
        ddl__dead_host(c, l->host, ddl__how_cut);
    } else if (told) {
        if (l->same_host || missed >= ddl__turn_ns(c)) {
            ddl__dead_rank(c, rank, l->missed_how, (uint16_t)(ddl__did_wrong(l) ? 0 : DDL__DEAD_LINK));
        }
    } else if (ddl__has_process(c, l) && missed > DDL__GRACE_NS) {
        ddl__dead_rank(c, rank, "its process lives but closed its link", 0);
    } else if (!ddl__has_process(c, l) && missed >= ddl__patience(c, l)) {
        ddl__dead_rank(c, rank,
                       "its connection ended without a goodbye: its process died, or something between the hosts "
                       "cut the connection",
                       DDL__DEAD_LINK);
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
            ddl__judge(c, i, now);
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
            if (l->watch != NULL) {
                l->watch->table->peer_dead(l->watch->self, i);
            }
            if (l->native != NULL) {
                l->native->table->peer_dead(l->native->self, i);
            }
            if (l->slower != NULL) {
                l->slower->table->peer_dead(l->slower->self, i);
            }
            if (l->device != NULL) {
                l->device->table->peer_dead(l->device->self, i);
                l->device = NULL; /* a process that takes the rank goes by the host */
            }
        }
    }
}

/* >>frames */

/* Whether a teller on another host, which has only lost its link to that rank, knows less of it than we: it is this
 * rank, or of this host, where one sees whether its process lives. */
static bool ddl__knows_better(const ddl_context *c, int32_t rank, int32_t teller, bool link_lost) {
    const ddl__link *l = &c->links[rank];
    return link_lost && l->host == c->links[c->rank].host && l->host != c->links[teller].host &&
           (rank == c->rank || ddl__has_process(c, l));
}

static ddl_status ddl__on_dead(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl__reader r = ddl__reader_of(payload, f->bytes);
    char text[256];
    uint32_t rank = ddl__get_u32(&r);
    ddl__get_string(&r, text, sizeof text);
    if (r.bad || rank >= (uint32_t)c->world_size) {
        return DDL_ERR_CORRUPT;
    }
    const ddl__link *l = &c->links[rank];
    if (f->epoch != l->incarnation) {
        return DDL_OK;
    }
    if (ddl__knows_better(c, (int32_t)rank, peer, (f->flags & DDL__DEAD_LINK) != 0)) {
        c->next_look_ns = 0;
        return DDL_OK;
    }
    ddl__dead(c, (int32_t)rank, text, f->flags & DDL__DEAD_LINK, peer);
    return DDL_OK;
}

/* The peer leaves in order. */
static ddl_status ddl__on_bye(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    (void)payload;
    ddl__link *l = &c->links[peer];
    if (f->bytes != 0) {
        return DDL_ERR_CORRUPT;
    }
    if (l->life == DDL__ALIVE || l->life == DDL__MISSED) {
        ddl__settle(c, l, DDL__LEFT); /* drained when its link ends */
        l->drained = false;
    }
    return DDL_OK;
}

static void ddl__say_goodbye(ddl_context *c) {
    for (int32_t i = 0; i < c->world_size; i++) {
        if (c->links[i].connected && (c->links[i].life == DDL__ALIVE || c->links[i].life == DDL__MISSED)) {
            ddl__tell(c, i, (ddl__frame){.type = DDL__FRAME_BYE}, NULL, 0);
        }
    }
}

#endif /* DDL_MESH_DETECTOR_H */

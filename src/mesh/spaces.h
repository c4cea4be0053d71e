/* mesh: ranks of one host that number processes each on its own, as containers do that share a network and no more.
 * What others look up in /proc they pass to each other as descriptors when they join: their process, for the detector,
 * and the goodbye board. It must not know what is done with them. */
#ifndef DDL_MESH_SPACES_H
#define DDL_MESH_SPACES_H

#include "detector.h"

enum { DDL__TAG_PROCESS = 0x64646c01, DDL__TAG_BOARD }; /* of passed descriptors */

/* The space in which this process has its number; 0 where /proc does not say. */
static uint64_t ddl__process_space(void) {
    struct stat space;
    return stat("/proc/self/ns/pid", &space) == 0 ? (uint64_t)space.st_ino : 0;
}

static int ddl__process_own(void) {
#ifdef SYS_pidfd_open
    return (int)syscall(SYS_pidfd_open, getpid(), 0);
#else
    return -1;
#endif
}

static bool ddl__can_pass_process(void) {
    int fd = ddl__process_own();
    if (fd >= 0) {
        close(fd);
    }
    return fd >= 0;
}

/* Its end is noticed at once, whatever this rank waits for. */
static void ddl__link_watch_fd(ddl_context *c, int32_t rank, int fd) {
    struct epoll_event event = {.events = EPOLLIN, .data = {.u32 = (uint32_t)rank}};
    c->links[rank].pidfd = fd;
    epoll_ctl(c->epoll_fd, EPOLL_CTL_ADD, fd, &event);
}

static void ddl__space_tell(ddl_context *c, int32_t rank, int32_t board_rank) {
    ddl__link *l = &c->links[rank];
    int own = l->process_told ? -1 : ddl__process_own();
    if (own >= 0) {
        l->process_told = ddl__host_send_fd(&c->endpoints[0].host, rank, DDL__TAG_PROCESS, own) == DDL_OK;
        close(own);
    }
    if (board_rank == c->rank && !l->board_told) {
        l->board_told = ddl__host_send_fd(&c->endpoints[0].host, rank, DDL__TAG_BOARD, c->board_fd) == DDL_OK;
    }
}

/* Tells the ranks of other spaces, and takes what they tell; *board becomes that of board_rank, when it comes. Returns
 * how many descriptors are still to come or to go. */
static int32_t ddl__spaces_settling(ddl_context *c, int32_t board_rank, int *board, int32_t *out_rank) {
    int32_t open = 0;
    for (int32_t rank = 0; rank < c->world_size; rank++) {
        ddl__link *l = &c->links[rank];
        if (!l->passes_process) {
            continue;
        }
        ddl__space_tell(c, rank, board_rank);
        int fd = -1;
        if (l->pidfd < 0 && ddl__passed_take(c, rank, DDL__TAG_PROCESS, &fd) && fd >= 0) {
            ddl__link_watch_fd(c, rank, fd);
        }
        bool boards = rank == board_rank && !l->board_taken;
        l->board_taken = l->board_taken || (boards && ddl__passed_take(c, rank, DDL__TAG_BOARD, board));
        bool waits = l->pidfd < 0 || (rank == board_rank && !l->board_taken) || !l->process_told ||
                     (board_rank == c->rank && !l->board_told);
        open += waits;
        *out_rank = waits ? rank : *out_rank;
    }
    return open;
}

#endif /* DDL_MESH_SPACES_H */

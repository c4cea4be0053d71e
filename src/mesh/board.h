/* mesh: the board, memory that the ranks of a host share. For each rank it has a byte, its goodbye, and then a word
 * that says on which core it waits, or waited before it computed (cores.h). A rank that leaves in order sets its byte
 * before its process can end, so that whoever sees the process gone knows at once which it was: a goodbye message may
 * still be in a socket, and most ranks of a host are not connected to each other.
 *
 * Every rank makes a sealed memfd before the rendezvous; afterwards all of a host use that of its lowest rank, opened
 * through /proc or passed (spaces.h), close their own, and keep that one open for who joins later. Nothing is left
 * behind. Without both there is no board. */
#ifndef DDL_MESH_BOARD_H
#define DDL_MESH_BOARD_H

#include "passing.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

/* The words begin in a cache line of their own. */
static size_t ddl__board_places(int32_t world_size) { return ((size_t)world_size + 63) / 64 * 64; }

static size_t ddl__board_bytes(int32_t world_size) {
    return ddl__board_places(world_size) + (size_t)world_size * sizeof(uint64_t);
}

/* This rank's own board as a descriptor, -1 when there can be none. */
static int32_t ddl__board_make(int32_t world_size) {
    int fd = memfd_create("ddl-board", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd >= 0 && (posix_fallocate(fd, 0, (off_t)ddl__board_bytes(world_size)) != 0 ||
                    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)) {
        close(fd);
        fd = -1;
    }
    return fd;
}

/* The board that process pid has as descriptor fd; -1: it cannot be reached. */
static int ddl__board_reach(int32_t pid, int32_t fd) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
    return open(path, O_RDWR | O_CLOEXEC);
}

/* Whether a descriptor that came is a board: ours, of that size, and sealed, as one that could shrink would turn a look
 * at it into SIGBUS. */
static bool ddl__board_is_one(int fd, size_t bytes, struct stat *out_st) {
    int seals = fcntl(fd, F_GET_SEALS); /* -1: of what cannot be sealed */
    return fd >= 0 && fstat(fd, out_st) == 0 && S_ISREG(out_st->st_mode) && out_st->st_uid == geteuid() &&
           out_st->st_size == (off_t)bytes && seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
}

/* Maps a board, and keeps its descriptor instead of the own one; who made it keeps that one, whose number the others
 * know. */
static void ddl__board_open(ddl_context *c, int fd) {
    struct stat st, mine;
    size_t bytes = ddl__board_bytes(c->world_size);
    if (ddl__board_is_one(fd, bytes, &st)) {
        void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        c->board = at != MAP_FAILED ? at : NULL;
        c->places = at != MAP_FAILED ? (void *)((char *)at + ddl__board_places(c->world_size)) : NULL;
    }
    bool made_it = c->board != NULL && c->board_fd >= 0 && fstat(c->board_fd, &mine) == 0 && mine.st_ino == st.st_ino;
    bool takes = c->board != NULL && !made_it;
    int spare = takes ? c->board_fd : fd;
    c->board_fd = takes ? fd : c->board_fd;
    if (spare >= 0) {
        close(spare);
    }
    if (c->board == NULL) {
        ddl__log(&c->base, DDL_LOG_DEBUG, "no goodbye board: it cannot be shared; deaths of ranks that this one is not "
                 "connected to are noticed a few seconds late");
    }
}

static void ddl__board_close(ddl_context *c) {
    if (c->board != NULL) {
        munmap(c->board, ddl__board_bytes(c->world_size));
        c->board = NULL;
        c->places = NULL;
        c->spread = false;
    }
    if (c->board_fd >= 0) {
        close(c->board_fd);
        c->board_fd = -1;
    }
}

/* Release: everything this rank did stands before its goodbye. */
static void ddl__board_leave(ddl_context *c) {
    if (c->board != NULL) {
        c->spread = false;
        atomic_store_explicit(&c->places[c->rank], 0, memory_order_relaxed); /* only a hint: it computes nowhere */
        atomic_store_explicit(&c->board[c->rank], 1, memory_order_release);
    }
}

/* A new process has the place of a rank that is gone. */
static void ddl__board_again(ddl_context *c, int32_t rank) {
    if (c->board != NULL) {
        atomic_store_explicit(&c->board[rank], 0, memory_order_release); /* it is admitted after this */
        atomic_store_explicit(&c->places[rank], 0, memory_order_relaxed); /* only a hint */
    }
}

static bool ddl__board_left(const ddl_context *c, int32_t rank) {
    return c->board != NULL && atomic_load_explicit(&c->board[rank], memory_order_acquire) == 1; /* pairs with leave */
}

#endif /* DDL_MESH_BOARD_H */

/* File descriptors go from rank to rank inside a host, to whom they were meant for, and strangers get nowhere.
 * tests/run: variants=asan,tsan timeout=60 */
#define DDL_IMPLEMENTATION
#include "world.h"

#include <sys/mman.h>

static const ddl_host *host_of(ddl_group *w) { return &w->context->endpoints[0].host; }

static ddl_status give(ddl_group *w, int peer, uint64_t tag, int fd) {
    ddl_context *c = w->context;
    ddl__lock(c);
    ddl_status status = host_of(w)->send_fd(host_of(w), peer, tag, fd);
    ddl__unlock(c);
    return status;
}

/* Takes it within ten seconds. */
static int take(ddl_group *w, int peer, uint64_t tag, int *out_fd) {
    ddl_context *c = w->context;
    for (double end = test_now_s() + 10 * test_slow(); test_now_s() < end;) {
        ddl__lock(c);
        ddl_status status = host_of(w)->take_fd(host_of(w), peer, tag, out_fd);
        ddl__unlock(c);
        if (status != DDL_IN_PROGRESS) {
            return status == DDL_OK;
        }
        OK(ddl_progress(c));
        usleep(1000);
    }
    return 0;
}

/* Everybody passes a memory to everybody: it holds both ranks' numbers, and a store through one shows in the other. */
static void to_all(ddl_group *w, void *arg) {
    (void)arg;
    int rank = ddl_rank(w), n = ddl_size(w);
    int32_t *mine[16] = {NULL};
    for (int peer = 0; peer < n; peer++) {
        int fd = peer == rank ? -1 : memfd_create("test", MFD_CLOEXEC);
        if (fd >= 0) {
            REQUIRE(ftruncate(fd, 4096) == 0);
            mine[peer] = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            mine[peer][0] = rank * 100 + peer;
            CHECK_EQ((int)give(w, peer, 7, fd), (int)DDL_OK);
            close(fd);
        }
    }
    for (int peer = 0; peer < n; peer++) {
        int fd = -1;
        if (peer == rank || !take(w, peer, 7, &fd)) {
            CHECK(peer == rank);
            continue;
        }
        int32_t *theirs = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        REQUIRE(theirs != MAP_FAILED);
        CHECK_EQ(theirs[0], peer * 100 + rank);
        __atomic_store_n(&theirs[1], rank + 1, __ATOMIC_RELEASE);
        CHECK_EQ(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
        munmap(theirs, 4096);
        close(fd);
    }
    OK(ddl_barrier(w));
    for (int peer = 0; peer < n; peer++) {
        if (peer != rank) {
            CHECK_EQ(__atomic_load_n(&mine[peer][1], __ATOMIC_ACQUIRE), peer + 1);
            munmap(mine[peer], 4096);
        }
    }
}

TEST(every_process_gets_what_was_meant_for_it) {
    world_fork(4, to_all, NULL, 30);
}

TEST(every_thread_gets_what_was_meant_for_it) {
    world_threads(3, to_all, NULL);
}

/* Tags tell things apart, whatever comes first; a tag may come alone. */
static void by_tag(ddl_group *w, void *arg) {
    (void)arg;
    int fd = 0;
    if (ddl_rank(w) == 0) {
        int zero = open("/dev/zero", O_RDONLY | O_CLOEXEC);
        CHECK_EQ((int)give(w, 1, 1, zero), (int)DDL_OK);
        CHECK_EQ((int)give(w, 1, 2, -1), (int)DDL_OK);
        close(zero);
        CHECK_EQ((int)give(w, 0, 3, -1), (int)DDL_ERR_UNSUPPORTED);
        CHECK(!take(w, 0, 3, &fd)); /* at once: from oneself nothing comes */
        REQUIRE(take(w, 1, 3, &fd)); /* what is under way leaves while this rank waits */
        return;
    }
    REQUIRE(take(w, 0, 2, &fd));
    CHECK_EQ(fd, -1);
    REQUIRE(take(w, 0, 1, &fd));
    char byte = 1;
    CHECK_EQ((int)read(fd, &byte, 1), 1);
    CHECK_EQ(byte, 0);
    close(fd);
    CHECK_EQ((int)give(w, 0, 3, -1), (int)DDL_OK);
    OK(ddl_progress(ddl_group_context(w)));
    for (int i = 0; i < 100 && ddl_group_context(w)->passings != NULL; i++) {
        usleep(10000);
        OK(ddl_progress(ddl_group_context(w)));
    }
}

TEST(tags_tell_descriptors_apart) {
    world_fork(2, by_tag, NULL, 30);
}

/* A stranger that knows the name but not the secret is refused and leaves nothing behind. */
static void strangers(ddl_group *w, void *arg) {
    (void)arg;
    ddl_context *c = ddl_group_context(w);
    struct sockaddr_un address;
    ddl_stats stats;
    socklen_t bytes = ddl__pass_address(c->pass_name, &address);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    REQUIRE(connect(fd, (struct sockaddr *)&address, bytes) == 0);
    char junk[300];
    memset(junk, 'x', sizeof junk);
    CHECK_EQ((int)send(fd, junk, sizeof junk, MSG_NOSIGNAL), (int)sizeof junk);
    for (int i = 0; i < 1000 && (c->passings != NULL || i < 20); i++) {
        OK(ddl_progress(c));
        ddl__lock(c);
        ddl__pass_progress(c);
        ddl__unlock(c);
        usleep(1000);
    }
    CHECK(c->passings == NULL);
    CHECK(c->passed == NULL);
    OK(ddl_stats_get(c, &stats));
    CHECK(stats.strangers_refused >= 1);
    close(fd);
    OK(ddl_barrier(w)); /* before it the other rank's descriptor would be taken for the stranger's */
    to_all(w, NULL);
}

TEST(a_stranger_gets_nowhere) {
    world_fork(2, strangers, NULL, 30);
}

/* A rank that is stopped for longer than a connection may take gets what was meant for it when it goes on; so does one whom a
 * rank that was stopped itself had begun to pass something to. */
static void stopped(ddl_group *w, void *arg) {
    int which = *(int *)arg;
    ddl_context *c = ddl_group_context(w);
    OK(ddl_barrier(w));
    if (ddl_rank(w) == 0) {
        int zero = open("/dev/zero", O_RDONLY | O_CLOEXEC);
        CHECK_EQ((int)give(w, 1, 1, zero), (int)DDL_OK);
        close(zero);
        ddl__lock(c);
        ddl__pass_progress(c); /* it has connected, and said who it is */
        ddl__unlock(c);
    }
    if (ddl_rank(w) == which) {
        usleep(5500000); /* it does nothing, and so it hears nothing */
    }
    int fd = -1;
    if (ddl_rank(w) == 1) {
        REQUIRE(take(w, 0, 1, &fd));
        char byte = 1;
        CHECK_EQ((int)read(fd, &byte, 1), 1);
        CHECK_EQ(byte, 0);
        close(fd);
    }
    OK(ddl_barrier(w)); /* what is under way leaves while a rank waits */
    CHECK(c->passings == NULL);
}

TEST(a_rank_that_was_stopped_gets_what_was_passed) {
    int which = 1;
    world_fork(2, stopped, &which, 30);
}

TEST(a_rank_that_was_stopped_passes_it_all_the_same) {
    int which = 0;
    world_fork(2, stopped, &which, 30);
}

/* What is not sealed may shrink under who looks at it, and what cannot be sealed is no board at all. */
static void unsealed(ddl_group *w, void *arg) {
    (void)arg;
    ddl_context *c = ddl_group_context(w);
    size_t bytes = ddl__board_bytes(c->world_size);
    struct stat st;
    char path[] = "/tmp/ddl-test-board-XXXXXX";
    int file = mkstemp(path), memory = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    REQUIRE(file >= 0 && memory >= 0 && unlink(path) == 0);
    REQUIRE(ftruncate(file, (off_t)bytes) == 0 && ftruncate(memory, (off_t)bytes) == 0);
    CHECK(!ddl__board_is_one(file, bytes, &st));
    CHECK(!ddl__board_is_one(memory, bytes, &st));
    CHECK(!ddl__board_is_one(-1, bytes, &st));
    REQUIRE(fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    CHECK(ddl__board_is_one(memory, bytes, &st));
    CHECK(!ddl__board_is_one(memory, bytes + 1, &st));
    close(file);
    close(memory);
}

TEST(a_board_is_a_sealed_file_of_ours) {
    world_threads(1, unsealed, NULL);
}

/* Limits of the process that the libfabric plugin meets, over tcp on loopback: what fails for want of locked memory is said with
 * the remedy, and once; descriptors are raised as far as they may be, what is missing is said, and where there is none a peer is lost, and no more.
 * tests/run: variants=gcc,asan timeout=60 quick=yes */
#include "ranks.h"

#include "fabric_host.h"

#include <sys/resource.h>
#include <sys/wait.h>

/* tests/vm/verbs has a kernel that refuses by itself. */
static void lock_at_most(rlim_t bytes, struct rlimit *before) {
    REQUIRE(getrlimit(RLIMIT_MEMLOCK, before) == 0);
    struct rlimit small = *before;
    small.rlim_cur = bytes;
    REQUIRE(setrlimit(RLIMIT_MEMLOCK, &small) == 0);
}

static void lock_as(const struct rlimit *before) { CHECK_EQ(setrlimit(RLIMIT_MEMLOCK, before), 0); }

TEST(a_small_limit_of_locked_memory_is_told_with_the_remedy) {
    NEED_LIBFABRIC();
    struct rlimit before;
    lock_at_most(65536, &before);
    world_detail = "sockets";
    if (!available()) {
        world_detail = "tcp";
    }
    endpoint *e = world_open(2, "FABRIC_FORCE_FAIL_REGISTRATION=1", "FABRIC_FORCE_MR=virt_addr");
    world_detail = "tcp";
    exchange_in(e, 2, 1);
    CHECK_STR(e[0].log, "may lock 64 KiB of memory. Raise the limit");
    lock_as(&before);
    world_end(e, 2);
}

/* An adapter wants the memory of messages themselves registered, and is not to be had without. */
TEST(so_it_is_when_no_message_can_be_registered) {
    NEED_LIBFABRIC();
    struct rlimit before;
    endpoint *e = calloc(1, sizeof *e);
    lock_at_most(65536, &before);
    endpoint_prepare(e, 0, "tcp", "FABRIC_FORCE_FAIL_REGISTRATION=1", "FABRIC_FORCE_MR=local");
    CHECK_EQ(endpoint_try(e, 2, &fabric_transport), DDL_ERR_NOMEM);
    CHECK_STR(e->log, "for messages failed");
    CHECK_STR(e->log, "may lock 64 KiB of memory. Raise the limit");
    CHECK_STR(e->log, "Without them it cannot be used");
    lock_as(&before);
    CHECK_EQ(e->blocks, 0);
    free(e);
}

/* Or a queue that a connection brings: then it is a receive, or the first send to a peer, that fails. */
static ssize_t unlocked_send(struct fid_ep *ep, const void *buf, size_t len, void *desc, fi_addr_t at, void *context) {
    (void)ep, (void)buf, (void)len, (void)desc, (void)at, (void)context;
    return -FI_ENOMEM;
}

static ssize_t unlocked_inject(struct fid_ep *ep, const void *buf, size_t len, fi_addr_t at) {
    (void)ep, (void)buf, (void)len, (void)at;
    return -FI_ENOMEM;
}

static ssize_t unlocked_recv(struct fid_ep *ep, void *buf, size_t len, void *desc, fi_addr_t at, void *context) {
    (void)ep, (void)buf, (void)len, (void)desc, (void)at, (void)context;
    return -FI_ENOMEM;
}

TEST(so_it_is_when_a_receive_cannot_be_posted) {
    NEED_LIBFABRIC();
    struct rlimit before;
    endpoint *e = calloc(1, sizeof *e);
    lock_at_most(65536, &before);
    hooks.recv = unlocked_recv;
    endpoint_prepare(e, 0, "tcp", "FABRIC_FORCE_MR=local", NULL);
    CHECK_EQ(endpoint_try(e, 2, &fabric_transport), DDL_OK);
    CHECK(fabric_transport.progress(e->self, -1) < 0);
    CHECK_STR(e->log, "a receive cannot be posted: ");
    CHECK_STR(e->log, "may lock 64 KiB of memory. Raise the limit");
    CHECK_EQ(e->warnings, 1);
    lock_as(&before);
    hooks_end();
    endpoint_close(e);
    free(e);
}

TEST(so_it_is_when_a_message_cannot_be_sent) {
    NEED_LIBFABRIC();
    struct rlimit before;
    letter l[2] = {0};
    endpoint *e = world_open(3, "FABRIC_FORCE_MR=local", NULL);
    lock_at_most(65536, &before);
    hooks = (struct hooks){.of = e[0].self, .send = unlocked_send, .inject = unlocked_inject};
    for (int i = 0; i < 2; i++) {
        CHECK(post(&e[0], i + 1, &l[i], 100) >= 0);
    }
    DRIVE(e, 3, e[0].lost[1] > 0 && e[0].lost[2] > 0) {}
    CHECK_STR(e[0].log, "a send to rank 1 cannot be posted: ");
    CHECK_STR(e[0].log, "may lock 64 KiB of memory. Raise the limit");
    CHECK_EQ(e[0].warnings, 1); /* not once for each peer */
    lock_as(&before);
    hooks_end();
    fabric_transport.peer_dead(e[0].self, 1);
    fabric_transport.peer_dead(e[0].self, 2);
    letter_free(&l[0]);
    letter_free(&l[1]);
    world_end(e, 3);
}

/* ofi_rxm asks for ever to repeat what needs buffers that it cannot register. The clock runs twenty times as fast. */
static uint64_t hurried_now_ns(const ddl_host *host) { return 20 * mini_now_ns(host); }

static ssize_t busy_read(struct fid_ep *ep, void *buf, size_t len, void *desc, fi_addr_t at, uint64_t address, uint64_t key,
                         void *context) {
    (void)ep, (void)buf, (void)len, (void)desc, (void)at, (void)address, (void)key, (void)context;
    return -FI_EAGAIN;
}

static ssize_t busy_send(struct fid_ep *ep, const void *buf, size_t len, void *desc, fi_addr_t at, void *context) {
    (void)ep, (void)buf, (void)len, (void)desc, (void)at, (void)context;
    return -FI_EAGAIN;
}

static void begins_nothing(struct hooks busy, uint64_t bytes, const char *sentence) {
    NEED_LIBFABRIC();
    struct rlimit before;
    letter l[2] = {0};
    endpoint *e = world_open(2, "FABRIC_FORCE_MR=local", NULL);
    CHECK(post(&e[1], 0, &l[0], 10) >= 0 && post(&e[0], 1, &l[1], 10) >= 0); /* both have heard of each other */
    DRIVE(e, 2, all_arrived(e, 2) == 2 && all_returned(l, 2)) {}
    letter_free(&l[0]);
    lock_at_most(65536, &before);
    hooks = busy;
    hooks.of = e[0].self;
    e[0].host.now_ns = hurried_now_ns;
    int from = busy.read != NULL;
    letter late = {0};
    CHECK(post(&e[from], !from, &late, bytes) >= 0);
    DRIVE(e, 2, e[0].warnings > 0) {}
    CHECK_STR(e[0].log, sentence);
    CHECK_STR(e[0].log, "may lock 64 KiB of memory. Raise the limit");
    lock_as(&before);
    hooks_end();
    DRIVE(e, 2, all_arrived(e, 2) == 3 && all_returned(&late, 1)) {}
    CHECK_EQ(e[0].warnings, 1);
    letter_free(&l[1]);
    letter_free(&late);
    world_end(e, 2);
}

TEST(a_read_that_never_begins_is_told_with_the_remedy) {
    begins_nothing((struct hooks){.read = busy_read}, 300000, "no read from rank 1 over");
}
TEST(and_a_send) { begins_nothing((struct hooks){.send = busy_send}, 20000, "has begun no send to rank 1 for 5 s"); }

/* ---- descriptors ---- */

/* An endpoint of a job of so many ranks, with limits in a process of its own, as they go down only. */
static void opened_with(rlim_t soft, rlim_t hard, int ranks, const char *rails, rlim_t becomes, const char *sentence) {
    NEED_LIBFABRIC();
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        struct rlimit limit = {soft, hard};
        endpoint *e = calloc(1, sizeof *e);
        CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
        endpoint_prepare(e, 0, "tcp", rails, NULL);
        CHECK_EQ(endpoint_try(e, ranks, &fabric_transport), DDL_OK);
        CHECK_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
        CHECK_EQ(limit.rlim_cur, becomes);
        CHECK_EQ(e->warnings, sentence != NULL);
        CHECK_STR(e->log, sentence != NULL ? sentence : "");
        CHECK_STR(e->log, sentence != NULL ? "Raise it where the job is started: ulimit -n" : "");
        endpoint_close(e);
        free(e);
        fflush(NULL);
        _exit(0);
    }
    int status = 1;
    waitpid(pid, &status, 0);
    CHECK_EQ(status, 0);
}

TEST(enough_descriptors_are_left_alone) { opened_with(500, 600, 50, NULL, 500, NULL); }
TEST(too_few_are_raised) { opened_with(200, 600, 50, NULL, 364, NULL); }
TEST(what_may_not_be_raised_is_told) {
    opened_with(200, 300, 50, NULL, 300, "50 ranks that all exchange large payloads by connections of tcp need 364 file descriptors each, "
                                         "and this one may have 300");
}

/* ofi_rxm finds no descriptor to call a peer with, and keeps the connection that it has not made: to remove the address of that would
 * crash (rxm_av_remove_handler of 1.17 closes its endpoint, which is NULL). A peer that can be called is removed as ever. */
TEST(a_peer_that_no_descriptor_is_left_for_is_lost) {
    NEED_LIBFABRIC();
    struct rlimit before, none;
    letter l[2] = {0};
    world_detail = "tcp;ofi_rxm";
    endpoint *e = world_open(3, "FABRIC_FORCE_MR=local", NULL);
    world_detail = "tcp";
    CHECK(post(&e[0], 2, &l[1], 100) >= 0);
    DRIVE(e, 3, e[2].arrived[0] == 1) {}
    REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
    int next = dup(0);
    close(next);
    none = before;
    none.rlim_cur = (rlim_t)next;
    REQUIRE(setrlimit(RLIMIT_NOFILE, &none) == 0);
    (void)post(&e[0], 1, &l[0], 100);
    for (int i = 0; i < 100 && e[0].lost[1] == 0; i++) {
        fabric_transport.progress(e[0].self, 1);
    }
    fabric_transport.peer_dead(e[0].self, 1);
    CHECK_EQ(l[0].returned, 1);
    CHECK_EQ(e[0].lost[1], 1);
    CHECK_EQ(self_of(&e[0])->peers[1].at[0], FI_ADDR_NOTAVAIL);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
    letter_free(&l[1]);
    CHECK(post(&e[0], 2, &l[1], 100) >= 0);
    DRIVE(e, 3, e[2].arrived[0] == 2) {}
    letter_free(&l[0]);
    letter_free(&l[1]);
    world_end(e, 3);
}

/* GPU memory between ranks: the transport of plugins/cuda over a stand-in for the driver (cuda_driver.c), so logic and no
 * GPU. Ranks are processes, or threads of one; descriptors go over socket pairs as the core would pass them. Descriptors and
 * handles, addresses that come back after a free, peers that are killed, GPUs that damage what goes between them, calls of
 * the driver that fail, sleep.
 * tests/run: variants=gcc,asan timeout=200 quick=yes */
#include "cuda_standin.h"

#include "ranks.h"

#include <poll.h>
#include <sys/socket.h>

enum { N = 3, LETTERS = 64 };
enum { SAYS_ADDRESS = 1, SAYS_KEY, SAYS_DONE, SAYS_GO };

typedef struct letter {
    uint64_t tag;
    uint8_t data[128];
    int fd; /* here only */
} letter;

/* One rank: a host that passes descriptors, the transport, a GPU. */
typedef struct rank_world {
    small_host h;       /* first */
    int rank, n, *wire; /* wire[peer] */
    letter got[N][LETTERS];
    int count[N];
    cuda_ipc *t;
    cuda_gpu *gpu;
    int ended;
    ddl_status end;
} rank_world;

static int wires[N][N];

static void make_wires(void) {
    for (int i = 0; i < N; i++) {
        for (int k = 0; k < i; k++) {
            int pair[2];
            if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) != 0) {
                abort();
            }
            wires[i][k] = pair[0];
            wires[k][i] = pair[1];
        }
    }
}

static void close_wires(void) {
    for (int i = 0; i < N; i++) {
        for (int k = 0; k < N; k++) {
            if (i != k) {
                close(wires[i][k]);
            }
        }
    }
}

static ddl_status wire_send(const ddl_host *host, int32_t peer, uint64_t tag, const void *data, size_t bytes, int fd) {
    rank_world *w = (rank_world *)(uintptr_t)host;
    letter l = {.tag = tag};
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    if (bytes > 0) {
        memcpy(l.data, data, bytes);
    }
    struct iovec part = {&l, sizeof l};
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        m.msg_control = control.room;
        m.msg_controllen = sizeof control.room;
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        *c = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    return sendmsg(w->wire[peer], &m, MSG_NOSIGNAL) == (ssize_t)sizeof l ? DDL_OK : DDL_ERR_SYSTEM;
}

static void wire_read(rank_world *w, int peer) {
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    while (w->count[peer] < LETTERS) {
        letter *l = &w->got[peer][w->count[peer]];
        struct iovec part = {l, sizeof *l};
        struct msghdr m = {
            .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.room, .msg_controllen = sizeof control.room};
        if (recvmsg(w->wire[peer], &m, MSG_CMSG_CLOEXEC) != (ssize_t)sizeof *l) {
            return;
        }
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        l->fd = -1;
        if (c != NULL) {
            memcpy(&l->fd, CMSG_DATA(c), sizeof l->fd);
        }
        w->count[peer]++;
    }
}

static int wire_take(rank_world *w, int peer, uint64_t tag, letter *out) {
    wire_read(w, peer);
    for (int i = 0; i < w->count[peer]; i++) {
        if (w->got[peer][i].tag == tag) {
            *out = w->got[peer][i];
            memmove(&w->got[peer][i], &w->got[peer][i + 1], (size_t)(w->count[peer] - i - 1) * sizeof *out);
            w->count[peer]--;
            return 1;
        }
    }
    return 0;
}

static ddl_status world_send_fd(const ddl_host *host, int32_t peer, uint64_t tag, int fd) {
    return wire_send(host, peer, tag, NULL, 0, fd);
}
static ddl_status world_take_fd(const ddl_host *host, int32_t peer, uint64_t tag, int *out_fd) {
    letter l;
    if (!wire_take((rank_world *)(uintptr_t)host, peer, tag, &l)) {
        return DDL_IN_PROGRESS;
    }
    *out_fd = l.fd;
    return DDL_OK;
}
static void world_transferred(const ddl_host *host, void *cookie, ddl_status status) {
    rank_world *w = (rank_world *)(uintptr_t)host;
    CHECK(cookie == w);
    w->ended++;
    w->end = status;
}

/* Waits for what a peer says, and works meanwhile, as the core does. */
static void await(rank_world *w, int peer, uint64_t tag, letter *out) {
    while (!wire_take(w, peer, tag, out)) {
        w->t != NULL ? cuda_ipc_progress(w->t, -1) : 0;
        usleep(200);
    }
}

static void world_open(rank_world *w, int rank, int n, int gpu) {
    memset(w, 0, sizeof *w);
    small_host_make(&w->h);
    w->h.host.send_fd = world_send_fd;
    w->h.host.take_fd = world_take_fd;
    w->h.host.transferred = world_transferred;
    w->rank = rank;
    w->n = n;
    w->wire = wires[rank];
    ddl_transport_params params = {
        .size = sizeof params, .rank = rank, .world_size = n, .local_ranks = n, .cores = 2, .host_id = "here"};
    uint8_t address[128];
    size_t bytes = sizeof address;
    void *self = NULL;
    letter l;
    REQUIRE(cuda_transport.open(&w->h.host, &params, &self) == DDL_OK);
    w->t = self;
    CHECK_EQ(cuda_transport.address(self, address, &bytes), DDL_OK);
    for (int i = 0; i < n; i++) {
        if (i != rank) {
            wire_send(&w->h.host, i, SAYS_ADDRESS, address, bytes, -1);
        }
    }
    for (int i = 0; i < n; i++) {
        uint64_t latency = 0, bandwidth = 0;
        if (i != rank) {
            await(w, i, SAYS_ADDRESS, &l);
            CHECK_EQ(cuda_transport.add_peer(self, i, l.data, bytes, "elsewhere", &latency, &bandwidth),
                     DDL_ERR_UNSUPPORTED);
            CHECK_EQ(cuda_transport.add_peer(self, i, l.data, bytes, "here", &latency, &bandwidth), DDL_OK);
        }
    }
    for (int i = 0; i < n; i++) {
        ddl_status status = i == rank ? DDL_OK : DDL_IN_PROGRESS;
        while (status == DDL_IN_PROGRESS) {
            status = cuda_transport.ready(self, i);
            usleep(100);
        }
        CHECK_EQ(status, DDL_OK);
    }
    REQUIRE(cuda_device.open(&w->h.host, gpu, &self) == DDL_OK);
    w->gpu = self;
}

static void world_close(rank_world *w) {
    cuda_transport.close(w->t);
    cuda_device.close(w->gpu);
    for (int i = 0; i < w->n; i++) {
        for (int k = 0; k < w->count[i]; k++) {
            if (w->got[i][k].fd >= 0) {
                close(w->got[i][k].fd);
            }
        }
    }
}

static uint8_t pattern(size_t i, int seed) { return (uint8_t)(i * 31 + (i >> 8) * 7 + (size_t)seed * 53 + 1); }

/* Moves bytes between the test and GPU memory, and waits. */
static void move(rank_world *w, void *dst, const void *src, size_t bytes) {
    void *event = NULL;
    CHECK_EQ(cuda_device.copy(w->gpu, dst, src, bytes, NULL), DDL_OK);
    CHECK_EQ(cuda_device.event_record(w->gpu, NULL, &event), DDL_OK);
    while (event != NULL && cuda_device.event_test(w->gpu, event) == DDL_IN_PROGRESS) {
        usleep(50);
    }
    cuda_device.event_free(w->gpu, event);
}

static void paint(rank_world *w, void *memory, size_t bytes, int seed) {
    uint8_t *host = malloc(bytes);
    for (size_t i = 0; i < bytes; i++) {
        host[i] = pattern(i, seed);
    }
    move(w, memory, host, bytes);
    free(host);
}

/* How many bytes are not those of the pattern, which begins `from` bytes in. */
static size_t wrong(rank_world *w, const void *memory, size_t bytes, size_t from, int seed) {
    uint8_t *host = malloc(bytes);
    size_t bad = 0;
    memset(host, 0xee, bytes);
    move(w, host, memory, bytes);
    for (size_t i = 0; i < bytes; i++) {
        bad += host[i] != pattern(from + i, seed);
    }
    free(host);
    return bad;
}

/* A transfer to its end. */
static ddl_status finish(rank_world *w, ddl_status status) {
    int before = w->ended;
    while (status == DDL_IN_PROGRESS && w->ended == before) {
        cuda_ipc_progress(w->t, -1);
        usleep(100);
    }
    return status == DDL_IN_PROGRESS ? w->end : status;
}

static void say_key(rank_world *w, int peer, void *memory, size_t bytes, void **handle) {
    ddl_memory_key key;
    REQUIRE(cuda_transport.memory_register(w->t, memory, bytes, handle, &key) == DDL_OK);
    wire_send(&w->h.host, peer, SAYS_KEY, &key, sizeof key, -1);
}

static void hear_key(rank_world *w, int peer, ddl_memory_key *key) {
    letter l;
    await(w, peer, SAYS_KEY, &l);
    memcpy(key, l.data, sizeof *key);
}

static void say(rank_world *w, int peer, uint64_t tag) { wire_send(&w->h.host, peer, tag, NULL, 0, -1); }

/* ---- get and put ---- */

enum { BYTES = 300001 };

/* How memory is made, and on which GPUs the ranks are. */
typedef struct setting {
    int plain, gpu_of_one, threads, broken;
} setting;

static void *make_memory(rank_world *w, const setting *s, size_t bytes) {
    void *memory = NULL;
    if (!s->plain) {
        CHECK_EQ(cuda_device.alloc(w->gpu, bytes, &memory), DDL_OK);
        return memory;
    }
    cuda_guard guard;
    CUdeviceptr at = 0;
    CHECK_EQ(cuda_enter(w->gpu, &guard), DDL_OK);
    CHECK_EQ(w->gpu->cu.cuMemAlloc(&at, bytes), CUDA_SUCCESS);
    cuda_leave(&guard);
    return (void *)(uintptr_t)at;
}

static void free_memory(rank_world *w, const setting *s, void *memory) {
    cuda_guard guard;
    if (!s->plain) {
        cuda_device.free(w->gpu, memory);
    } else if (cuda_enter(w->gpu, &guard) == DDL_OK) {
        CHECK_EQ(w->gpu->cu.cuMemFree((CUdeviceptr)(uintptr_t)memory), CUDA_SUCCESS);
        cuda_leave(&guard);
    }
}

static void owner_serves(rank_world *w, const setting *s) {
    void *handle = NULL, *memory = make_memory(w, s, BYTES);
    letter l;
    paint(w, memory, BYTES, 1);
    say_key(w, 1, memory, BYTES, &handle);
    await(w, 1, SAYS_DONE, &l);
    for (int i = 0; i < CUDA_EXPORTS; i++) { /* programs that a rank starts hold no memory of a GPU */
        int fd = w->t->shares->own[i].fd;
        CHECK(fd < 0 || (fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
    }
    if (!s->broken || !s->gpu_of_one) {
        CHECK_EQ(wrong(w, memory, 1000, 0, 1), 0);
        CHECK_EQ(wrong(w, (char *)memory + 1000, 777, 50, 2), 0); /* what was put */
        CHECK_EQ(wrong(w, (char *)memory + 1777, BYTES - 1777, 1777, 1), 0);
    }
    cuda_transport.memory_release(w->t, handle);
    free_memory(w, s, memory);
}

static void other_gets(rank_world *w, const setting *s) {
    static const struct {
        size_t from, bytes;
    } pieces[] = {{0, 1}, {0, BYTES}, {BYTES - 1, 1}, {12345, 4096}, {7, 0}, {3, 65537}};
    void *handle = NULL, *memory = make_memory(w, s, BYTES);
    ddl_memory_key key, mine;
    CHECK_EQ(cuda_transport.memory_register(w->t, memory, BYTES, &handle, &mine), DDL_OK);
    hear_key(w, 0, &key);
    for (size_t i = 0; i < sizeof pieces / sizeof pieces[0]; i++) {
        paint(w, memory, BYTES, 9);
        ddl_status status = cuda_transport.get(w->t, 0, (char *)memory + 100 * (i != 1), handle, &key, pieces[i].from,
                                               pieces[i].bytes, w);
        status = finish(w, status);
        if (s->broken && s->gpu_of_one && pieces[i].bytes > 0) {
            CHECK_EQ(status, DDL_ERR_UNSUPPORTED);
            CHECK_STR(w->h.said, "damage what goes between them");
            continue;
        }
        CHECK_EQ(status, DDL_OK);
        CHECK_EQ(wrong(w, (char *)memory + 100 * (i != 1), pieces[i].bytes, pieces[i].from, 1), 0);
        CHECK_EQ(i == 1 ? 0 : wrong(w, memory, 100, 0, 9), 0); /* nothing before it */
        CHECK_EQ(i == 1 ? 0 : wrong(w, (char *)memory + 100 + pieces[i].bytes, 900, 100 + pieces[i].bytes, 9), 0);
    }
    CHECK_EQ(cuda_transport.get(w->t, 0, memory, handle, &key, BYTES, 1, w), DDL_ERR_ARG);
    CHECK_EQ(cuda_transport.get(w->t, 0, memory, handle, &key, 1, UINT64_MAX, w), DDL_ERR_ARG);
    CHECK_EQ(cuda_transport.get(w->t, 0, memory, handle, &mine, 0, 1, w), DDL_ERR_ARG);
    if (!s->broken || !s->gpu_of_one) {
        paint(w, memory, BYTES, 2);
        CHECK_EQ(finish(w, cuda_transport.put(w->t, 0, (char *)memory + 50, handle, &key, 1000, 777, w)), DDL_OK);
        CHECK_EQ(s->threads ? 1 : standin.imports() + (w->t->shares->imports != NULL), 1 + (s->plain && !s->threads));
    }
    say(w, 0, SAYS_DONE);
    cuda_transport.memory_release(w->t, handle);
    free_memory(w, s, memory);
}

static void two_ranks(int rank, int n, void *arg) {
    const setting *s = arg;
    rank_world *w = malloc(sizeof *w);
    standin.break_peers(s->broken);
    world_open(w, rank, n, rank == 1 ? s->gpu_of_one : 0);
    rank == 0 ? owner_serves(w, s) : other_gets(w, s);
    say(w, 1 - rank, SAYS_GO); /* nobody leaves first */
    letter l;
    await(w, 1 - rank, SAYS_GO, &l);
    world_close(w);
    if (!s->threads) {
        CHECK_NOTHING_LEFT(&w->h);
    }
    free(w);
}

static void in_process(int rank, int n, void *arg) { /* each process has a driver of its own */
    REQUIRE(standin_open() == 0);
    two_ranks(rank, n, arg);
}

static void with(setting s) {
    REQUIRE(standin_folder[0] != 0 || standin_build(0) == 0);
    make_wires();
    if (s.threads) {
        REQUIRE(standin_need(0));
        ranks_threads(2, two_ranks, &s);
        char left[300];
        CHECK_EQ(standin.live(left, sizeof left), 0);
        standin.break_peers(0);
    } else {
        ranks_fork(2, in_process, &s, 40);
    }
    close_wires();
}

TEST(processes_by_descriptor) { with((setting){0, 0, 0, 0}); }
TEST(processes_by_handle) { with((setting){1, 0, 0, 0}); }
TEST(processes_on_two_gpus) { with((setting){0, 1, 0, 0}); }
TEST(processes_on_two_gpus_by_handle) { with((setting){1, 1, 0, 0}); }
TEST(gpus_that_damage_are_found) { with((setting){0, 1, 0, 1}); }
TEST(one_gpu_is_never_in_doubt) { with((setting){0, 0, 0, 1}); }

/* ---- addresses that come back ---- */

static void share_anew(int rank, int n, void *arg) {
    setting *s = arg;
    rank_world *w = malloc(sizeof *w);
    void *handle = NULL, *memory = NULL, *first = NULL;
    ddl_memory_key key, old = {0};
    letter l;
    REQUIRE(standin_open() == 0);
    world_open(w, rank, n, 0);
    for (int turn = 0; turn < 5 && rank == 0; turn++) {
        memory = make_memory(w, s, 3 << 20);
        first = turn == 0 ? memory : first;
        CHECK_EQ((uintptr_t)memory, (uintptr_t)first); /* or it is no test */
        paint(w, memory, 5000, turn);
        say_key(w, 1, memory, 5000, &handle);
        await(w, 1, SAYS_DONE, &l);
        cuda_transport.memory_release(w->t, handle);
        free_memory(w, s, memory);
        if (!s->plain) {
            cuda_guard guard;
            REQUIRE(cuda_enter(w->gpu, &guard) == DDL_OK);
            cuda_pool_trim(w->gpu, 0); /* to the driver */
            cuda_leave(&guard);
        }
    }
    for (int turn = 0; turn < 5 && rank == 1; turn++) {
        memory = make_memory(w, s, 5000);
        ddl_memory_key mine;
        REQUIRE(cuda_transport.memory_register(w->t, memory, 5000, &handle, &mine) == DDL_OK);
        hear_key(w, 0, &key);
        paint(w, memory, 5000, 77);
        standin.fail(s->plain && turn == 2 ? "cuIpcOpenMemHandle_v2" : NULL, s->plain && turn == 2, CUDA_ERROR_ALREADY_MAPPED);
        CHECK_EQ(finish(w, cuda_transport.get(w->t, 0, memory, handle, &key, 0, 5000, w)), DDL_OK);
        CHECK_EQ(wrong(w, memory, 5000, 0, turn), 0); /* this turn's, not an older one's */
        if (turn > 0) {
            CHECK(memcmp(&old, &key, sizeof key) != 0);
            w->t->shares->looked_ns = 0; /* as if a second had gone: what the owner freed is closed here */
            cuda_ipc_progress(w->t, -1);
            CHECK_EQ(finish(w, cuda_transport.get(w->t, 0, memory, handle, &old, 0, 5000, w)), DDL_ERR_STATE);
            CHECK(w->t->shares->imports != NULL && w->t->shares->imports->next == NULL);
        }
        old = key;
        cuda_transport.memory_release(w->t, handle);
        free_memory(w, s, memory);
        say(w, 0, SAYS_DONE);
    }
    world_close(w);
    CHECK_NOTHING_LEFT(&w->h);
    free(w);
}

static void anew(setting s) {
    REQUIRE(standin_folder[0] != 0 || standin_build(0) == 0);
    make_wires();
    ranks_fork(2, share_anew, &s, 40);
    close_wires();
}

TEST(a_freed_address_is_another_allocation) { anew((setting){0, 0, 0, 0}); }
TEST(a_freed_address_of_cuda_malloc) { anew((setting){1, 0, 0, 0}); }

/* ---- a peer that is killed ---- */

static void killed_owner(rank_world *w, const setting *s) {
    void *handle = NULL, *memory = make_memory(w, s, 5000);
    letter l;
    paint(w, memory, 5000, 3);
    say_key(w, 1, memory, 5000, &handle);
    await(w, 1, SAYS_DONE, &l);
    raise(SIGKILL);
}

static void survivor(rank_world *w, const setting *s) {
    void *handle = NULL, *memory = make_memory(w, s, 5000);
    ddl_memory_key key, mine;
    char byte;
    REQUIRE(cuda_transport.memory_register(w->t, memory, 5000, &handle, &mine) == DDL_OK);
    hear_key(w, 0, &key);
    CHECK_EQ(finish(w, cuda_transport.get(w->t, 0, memory, handle, &key, 0, 5000, w)), DDL_OK);
    CHECK(w->t->shares->imports != NULL);
    void *gate = NULL; /* the plugin's own stream stands: a copy is under way when the peer dies */
    REQUIRE(cuda_device_gate_put(((cuda_registered *)handle)->gpu, NULL, &gate) == DDL_OK);
    CHECK_EQ(cuda_transport.get(w->t, 0, memory, handle, &key, 0, 5000, w), DDL_IN_PROGRESS);
    say(w, 0, SAYS_DONE);
    while (recv(w->wire[0], &byte, 1, MSG_PEEK) != 0) {
        usleep(1000);
    }
    int before = w->ended;
    cuda_transport.peer_dead(w->t, 0);
    cuda_ipc_progress(w->t, -1);
    CHECK_EQ(w->ended, before);           /* the copy still goes on */
    CHECK(w->t->shares->imports != NULL); /* and so its memory is kept */
    cuda_device_gate_open(((cuda_registered *)handle)->gpu, gate);
    CHECK_EQ(finish(w, DDL_IN_PROGRESS), DDL_ERR_PEER);
    CHECK(w->t->shares->imports == NULL); /* nothing pins the dead one's memory */
    CHECK_EQ(standin.imports(), 0);
    CHECK_EQ(cuda_transport.get(w->t, 0, memory, handle, &key, 0, 1, w), DDL_ERR_PEER);
    cuda_transport.memory_release(w->t, handle);
    free_memory(w, s, memory);
    world_close(w);
    CHECK_NOTHING_LEFT(&w->h);
}

static void kill_rank(int rank, int n, void *arg) {
    rank_world *w = malloc(sizeof *w);
    REQUIRE(standin_open() == 0);
    for (int i = 0; i < n; i++) { /* the end of a process is the end of its wires */
        close(wires[1 - rank][i]);
    }
    world_open(w, rank, n, 0);
    rank == 0 ? killed_owner(w, arg) : survivor(w, arg);
    free(w);
}

static void killing(setting s) {
    ranks r;
    REQUIRE(standin_folder[0] != 0 || standin_build(0) == 0);
    make_wires();
    ranks_start(&r, 2, kill_rank, &s);
    close_wires();
    ranks_wait(&r, 40);
    CHECK_EQ(r.timed_out, 0);
    CHECK_EQ(WIFSIGNALED(r.status[0]) ? WTERMSIG(r.status[0]) : 0, SIGKILL);
    CHECK_EQ(r.status[1], 0);
}

TEST(a_killed_owner_is_let_go) { killing((setting){0, 0, 0, 0}); }
TEST(a_killed_owner_is_let_go_by_handle) { killing((setting){1, 0, 0, 0}); }

/* ---- sleep ---- */

static void sleep_until(rank_world *w, int peer, uint64_t tag) { /* woken by the bell or by the wire alone */
    letter l;
    while (!wire_take(w, peer, tag, &l)) {
        int fd = -1;
        if (cuda_transport.arm(w->t, &fd) == DDL_OK) {
            struct pollfd fds[2] = {{fd, POLLIN, 0}, {w->wire[peer], POLLIN, 0}};
            poll(fds, 2, -1);
        }
        cuda_ipc_progress(w->t, -1);
    }
}

static void sleepers(int rank, int n, void *arg) {
    setting *s = arg;
    rank_world *w = malloc(sizeof *w);
    void *handle = NULL, *memory;
    letter l;
    REQUIRE(standin_open() == 0);
    world_open(w, rank, n, 0);
    memory = make_memory(w, s, 5000);
    if (rank == 0) {
        paint(w, memory, 5000, 4);
        say_key(w, 1, memory, 5000, &handle);
        sleep_until(w, 1, SAYS_DONE); /* and is woken to pass a descriptor */
    } else {
        ddl_memory_key key, mine;
        REQUIRE(cuda_transport.memory_register(w->t, memory, 5000, &handle, &mine) == DDL_OK);
        hear_key(w, 0, &key);
        ddl_status status = cuda_transport.get(w->t, 0, memory, handle, &key, 0, 5000, w);
        standin.fail("cuLaunchHostFunc", 0, 0); /* counts */
        while (status == DDL_IN_PROGRESS && w->ended == 0) {
            int fd = -1;
            status = cuda_transport.arm(w->t, &fd) == DDL_OK ? DDL_IN_PROGRESS : status;
            struct pollfd fds[2] = {{fd, POLLIN, 0}, {w->wire[0], POLLIN, 0}};
            w->ended == 0 ? poll(fds, 2, -1) : 0;
            cuda_ipc_progress(w->t, -1);
        }
        CHECK_EQ(w->end, DDL_OK);
        CHECK(standin.calls() <= 1); /* one wake-up, however often it was armed */
        CHECK_EQ(wrong(w, memory, 5000, 0, 4), 0);
        say(w, 0, SAYS_DONE);
    }
    say(w, 1 - rank, SAYS_GO);
    await(w, 1 - rank, SAYS_GO, &l);
    cuda_transport.memory_release(w->t, handle);
    free_memory(w, s, memory);
    world_close(w);
    CHECK_NOTHING_LEFT(&w->h);
    free(w);
}

TEST(who_sleeps_is_woken) {
    setting s = {0, 0, 0, 0};
    REQUIRE(standin_folder[0] != 0 || standin_build(0) == 0);
    make_wires();
    ranks_fork(2, sleepers, &s, 40);
    close_wires();
}

/* ---- calls that fail ---- */

/* One mapping and copy of the importer's, from nothing, with the call that must fail. */
static ddl_status one_get(rank_world *w, void *memory, void *handle, const ddl_memory_key *key, long fail) {
    standin.fail(NULL, fail, fail % 2 == 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_UNKNOWN);
    ddl_status status = finish(w, cuda_transport.get(w->t, 0, memory, handle, key, 0, 5000, w));
    for (cuda_import *i = w->t->shares->imports; i != NULL; i = i->next) {
        CHECK_EQ(i->uses, 0);
        i->stale = true;
    }
    w->t->probes->verdict_count = 0;
    cuda_imports_close(w->t);
    standin.fail(NULL, 0, 0);
    return status;
}

static void failing_calls(int rank, int n, void *arg) {
    setting *s = arg;
    rank_world *w = malloc(sizeof *w);
    void *handle = NULL, *memory;
    ddl_memory_key key, mine;
    letter l;
    REQUIRE(standin_open() == 0);
    world_open(w, rank, n, rank);
    memory = make_memory(w, s, 5000);
    paint(w, memory, 5000, 5 + rank);
    if (rank == 0) {
        say_key(w, 1, memory, 5000, &handle);
        await(w, 1, SAYS_DONE, &l);
    } else {
        REQUIRE(cuda_transport.memory_register(w->t, memory, 5000, &handle, &mine) == DDL_OK);
        hear_key(w, 0, &key);
        CHECK_EQ(one_get(w, memory, handle, &key, 0), DDL_OK);
        int failed = 0, open = w->h.blocks;
        for (long i = 1; i <= 120; i++) {
            ddl_status status = one_get(w, memory, handle, &key, i);
            failed += status < 0;
            CHECK_EQ(w->h.blocks, open);
            CHECK_EQ(standin.depth(), 0);
        }
        CHECK(failed > (s->plain ? 5 : 20));
        paint(w, memory, 5000, 8);
        CHECK_EQ(one_get(w, memory, handle, &key, 0), DDL_OK); /* and then it works again */
        CHECK_EQ(wrong(w, memory, 5000, 0, 5), 0);
        say(w, 0, SAYS_DONE);
    }
    cuda_transport.memory_release(w->t, handle);
    free_memory(w, s, memory);
    world_close(w);
    CHECK_EQ(w->h.blocks, 0);
    free(w);
}

static void failing(setting s) {
    REQUIRE(standin_folder[0] != 0 || standin_build(0) == 0);
    make_wires();
    ranks_fork(2, failing_calls, &s, 60);
    close_wires();
}

TEST(each_call_of_an_import_fails_once) { failing((setting){0, 0, 0, 0}); }
TEST(each_call_of_a_handle_fails_once) { failing((setting){1, 0, 0, 0}); }

/* The owner's side: sharing, with each call failing. */
TEST(each_call_of_sharing_fails_once) {
    rank_world *w = malloc(sizeof *w);
    REQUIRE(standin_need(0));
    for (int plain = 0; plain < 2; plain++) {
        setting s = {plain, 0, 0, 0};
        make_wires();
        world_open(w, 0, 1, 0);
        CHECK_EQ(cuda_ipc_join(w->t), DDL_OK);
        w->t->processes = true; /* as if others were elsewhere */
        void *memory = make_memory(w, &s, 5000);
        int failed = 0, worked = 0;
        for (long i = 1; i <= 20; i++) {
            void *handle = NULL;
            ddl_memory_key key;
            standin.fail(NULL, i, CUDA_ERROR_UNKNOWN);
            ddl_status status = cuda_transport.memory_register(w->t, memory, 5000, &handle, &key);
            standin.fail(NULL, 0, 0);
            CHECK(status == DDL_OK || handle == NULL);
            failed += status < 0;
            worked += status == DDL_OK;
            cuda_transport.memory_release(w->t, handle);
            for (int32_t k = 0; k < CUDA_EXPORTS; k++) {
                if (w->t->shares->own[k].id != 0) {
                    cuda_shared_retire(w->t, k);
                }
            }
        }
        CHECK(failed >= 5);
        CHECK(worked >= 5);
        free_memory(w, &s, memory);
        world_close(w);
        CHECK_EQ(w->h.blocks, 0);
        close_wires();
    }
    free(w);
}

/* Threads, last: here this process opens the driver, and could fork no rank that uses it. */
TEST(threads_by_pointer) { with((setting){0, 0, 1, 0}); }
TEST(threads_by_pointer_of_cuda_malloc) { with((setting){1, 0, 1, 0}); }
TEST(threads_on_two_gpus) { with((setting){0, 1, 1, 0}); }
TEST(threads_on_gpus_that_damage) { with((setting){0, 1, 1, 1}); }

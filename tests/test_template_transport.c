/* The template transport against a small host instead of the core: content and order of messages of all sizes,
 * back-pressure, both ways to prove a connection, the death of a peer, hostile connections, and an idle that sleeps.
 * Endpoints of one process are driven in turn; a kill needs a real process.
 * tests/run: variants=gcc,asan timeout=120 */
#include "mini_host.h"

#include "../plugins/template/template.c"

/* A toy with the shape of the real one: 4 messages, a state that has to be freed, input that comes in any pieces.
 *   client: 'H' from to | server: 'C' | client: 'P' secret[8] | server: 'W' */
static ddl_status mini_prove(const ddl_host *host, void **state, int32_t is_client, int32_t peer, const uint8_t *in,
                             size_t in_bytes, size_t *out_used, uint8_t *out, size_t *out_bytes, int32_t *out_peer) {
    endpoint *e = of(host);
    int *step = *state;
    if (in == NULL && out == NULL) {
        e->proofs--;
        free(step);
        *state = NULL;
        return DDL_OK;
    }
    CHECK(*out_bytes >= 256);
    if (step == NULL) {
        *state = step = calloc(2, sizeof *step);
        e->proofs++;
        step[1] = -1;
    }
    ddl_status status = DDL_IN_PROGRESS;
    size_t need[2][3] = {{3, 9, 99}, {0, 1, 1}}; /* bytes that server and client need in each step */
    *out_used = *out_bytes = 0;
    if (in_bytes >= need[is_client][*step]) {
        *out_used = need[is_client][*step];
        if (is_client) {
            uint8_t said[3][9] = {{'H', (uint8_t)e->rank, (uint8_t)peer}, {'P'}, {0}};
            memcpy(said[1] + 1, e->secret, 8);
            *out_bytes = *step == 0 ? 3 : *step == 1 ? 9 : 0;
            memcpy(out, said[*step], *out_bytes);
            *out_peer = peer;
            status = *step == 0 ? DDL_IN_PROGRESS : in[0] != (*step == 1 ? 'C' : 'W') ? DDL_ERR_AUTH
                     : *step == 2 ? DDL_OK : DDL_IN_PROGRESS;
        } else if (*step == 0) {
            out[0] = 'C';
            *out_bytes = 1;
            step[1] = in[1];
            status = in[0] == 'H' && in[2] == e->rank ? DDL_IN_PROGRESS : DDL_ERR_AUTH;
        } else {
            status = in[0] == 'P' && memcmp(in + 1, e->secret, 8) == 0 ? DDL_OK : DDL_ERR_AUTH;
            out[0] = 'W';
            *out_bytes = status == DDL_OK;
            *out_peer = step[1];
        }
        ++*step;
    }
    if (status != DDL_IN_PROGRESS) {
        e->proofs--;
        free(step);
        *state = NULL;
    }
    return status;
}

/* ---- what the tests do with it ---- */

static void endpoint_open(endpoint *e, int rank, int n, const char *secret) {
    endpoint_host(e, rank);
    e->secret = secret;
    e->host.prove = secret != NULL ? mini_prove : NULL;
    endpoint_start(e, n, ddl_plugin_template_v1(&e->host));
}

static void endpoint_meet(endpoint *e, int peer, const void *address, size_t bytes) {
    uint64_t latency = 0, bandwidth = 0;
    CHECK_EQ(e->transport->add_peer(e->self, peer, address, bytes, "here", &latency, &bandwidth), DDL_OK);
    CHECK(latency > 0 && bandwidth > 0);
}

static void world_open(endpoint *e, int n, const char *secret) {
    uint8_t address[RANKS][256];
    size_t bytes[RANKS];
    for (int i = 0; i < n; i++) {
        endpoint_open(&e[i], i, n, secret);
        bytes[i] = sizeof address[i];
        CHECK_EQ(e[i].transport->address(e[i].self, address[i], &bytes[i]), DDL_OK);
    }
    for (int i = 0; i < n * n; i++) {
        if (i / n != i % n) {
            endpoint_meet(&e[i / n], i % n, address[i % n], bytes[i % n]);
        }
    }
}

static const uint64_t sizes[] = {0, 1, 47, 48, 49, 4095, 65536, 0, 65537, 300001, 1 << 20, 3};
enum { SIZES = sizeof sizes / sizeof sizes[0] };

/* All to all: each rank has all its letters under way before anybody reads. */
static void exchange(int n, const char *secret) {
    static endpoint e[RANKS];
    static letter l[RANKS][RANKS][SIZES];
    int before = fd_count();
    world_open(e, n, secret);
    for (int i = 0; i < n * n * SIZES; i++) {
        int from = i % n, to = i / n % n, k = i / n / n;
        if (from != to) {
            CHECK(post(&e[from], to, &l[from][to][k], sizes[k]) >= 0);
        }
    }
    uint64_t done = 0;
    DRIVE(e, n, done == (uint64_t)(n * (n - 1)) * SIZES) {
        done = 0;
        for (int i = 0; i < n * n; i++) {
            done += e[i / n].arrived[i % n];
        }
    }
    for (int i = 0; i < n * n; i++) {
        for (int k = 0; i / n != i % n && k < SIZES; k++) {
            letter_free(&l[i / n][i % n][k]);
            CHECK(!l[i / n][i % n][k].borrowed || l[i / n][i % n][k].status == DDL_OK);
        }
        CHECK_EQ(e[i / n].lost[i % n], 0);
    }
    world_close(e, n);
    CHECK_EQ(fd_count(), before);
}

TEST(all_sizes_both_ways_by_uid) { exchange(2, NULL); }
TEST(all_sizes_both_ways_by_secret) { exchange(2, "swordfish"); }
TEST(eight_ranks_all_to_all_by_uid) { exchange(RANKS, NULL); }
TEST(eight_ranks_all_to_all_by_secret) { exchange(RANKS, "swordfish"); }

/* send() from inside landed(): the way a core answers a request. */
TEST(answers_from_within_a_host_function) {
    static endpoint e[2];
    letter l[DEPTH];
    world_open(e, 2, NULL);
    e[1].echo = 1;
    for (int i = 0; i < DEPTH; i++) {
        CHECK(post(&e[0], 1, &l[i], sizes[i % SIZES]) >= 0);
    }
    DRIVE(e, 2, e[0].arrived[1] == DEPTH) {}
    for (int i = 0; i < DEPTH; i++) {
        letter_free(&l[i]);
    }
    world_close(e, 2);
}

/* The receiver does nothing: send() comes back at once, the memory stays borrowed, the socket's buffer bounds it. */
TEST(a_stuck_receiver_holds_the_sender_up_without_blocking_it) {
    static endpoint e[2];
    letter l[DEPTH], first;
    world_open(e, 2, NULL);
    post(&e[0], 1, &first, 1);
    DRIVE(e, 2, e[1].arrived[0] == 1) {}
    double start = test_now_s();
    for (int i = 0; i < DEPTH; i++) {
        CHECK(post(&e[0], 1, &l[i], 1 << 20) >= 0);
    }
    for (int i = 0; i < 100; i++) {
        e[0].transport->progress(e[0].self, 1);
    }
    CHECK(test_now_s() - start < 10 * test_slow());
    CHECK(e[0].returned < DEPTH / 2);
    CHECK(l[DEPTH - 1].borrowed && !l[DEPTH - 1].returned);
    /* Nothing can move, so that nothing may be readable: a core that slept here would spin. */
    struct pollfd fd = {.events = POLLIN};
    CHECK_EQ(e[0].transport->arm(e[0].self, &fd.fd), DDL_OK);
    CHECK_EQ(poll(&fd, 1, 30), 0);
    DRIVE(e, 2, e[1].arrived[0] == DEPTH + 1) {}
    DRIVE(e, 2, l[DEPTH - 1].returned) {}
    letter_free(&first);
    for (int i = 0; i < DEPTH; i++) {
        letter_free(&l[i]);
    }
    world_close(e, 2);
}

TEST(an_idle_endpoint_sleeps) {
    static endpoint e[RANKS];
    letter l;
    world_open(e, RANKS, "swordfish");
    CHECK_EQ(sleep_all(e, RANKS, 50), 0); /* before anything happened */
    post(&e[0], 1, &l, 8);
    CHECK(sleep_all(e, RANKS, 1000) > 0); /* the connection is something to do */
    DRIVE(e, RANKS, e[1].arrived[0] == 1 && l.returned) {}
    while (progress_all(e, RANKS) > 0) {
    }
    CHECK_EQ(sleep_all(e, RANKS, 50), 0); /* and after */
    letter_free(&l);
    world_close(e, RANKS);
}

/* What is queued comes back once, with the status of a death; what was landing ends; others are not touched. */
TEST(peer_dead_gives_everything_back) {
    static endpoint e[3];
    letter l[DEPTH], other, later;
    world_open(e, 3, NULL);
    for (int i = 0; i < DEPTH; i++) {
        CHECK(post(&e[0], 1, &l[i], 1 << 20) >= 0);
    }
    DRIVE(e, 3, e[1].open_landings == 1) {
        e[0].transport->progress(e[0].self, -1);
        e[1].transport->progress(e[1].self, -1);
    }
    e[1].transport->peer_dead(e[1].self, 0);
    CHECK_EQ(e[1].landing_failed[0], 1);
    CHECK_EQ(e[1].lost[0], 0); /* the core said it, nobody has to tell the core */
    e[0].transport->peer_dead(e[0].self, 1);
    int failed = 0;
    for (int i = 0; i < DEPTH; i++) {
        failed += l[i].returned && l[i].status == DDL_ERR_PEER;
        letter_free(&l[i]);
    }
    CHECK(failed > 0);
    CHECK_EQ(post(&e[0], 1, &later, 5), DDL_ERR_PEER);
    CHECK_EQ(later.returned, 0);
    free(later.payload);
    post(&e[0], 2, &other, 5);
    DRIVE(e, 3, e[2].arrived[0] == 1) {}
    letter_free(&other);
    CHECK_EQ(e[0].lost[1] + e[1].lost[0] + e[0].lost[2] + e[2].lost[0], 0);
    world_close(e, 3);
}

/* A rank that finishes early: what it sent comes first, then the news that it is gone, once, without an error. */
TEST(words_sent_before_close_arrive_before_the_loss) {
    static endpoint e[2];
    letter l[4], greeting;
    world_open(e, 2, NULL);
    post(&e[1], 0, &greeting, 3);
    DRIVE(e, 2, e[0].arrived[1] == 1 && greeting.returned) {}
    post(&e[0], 1, &l[0], 1);
    DRIVE(e, 2, e[1].arrived[0] == 1) {}
    for (int i = 1; i < 4; i++) {
        CHECK_EQ(post(&e[0], 1, &l[i], 1000), DDL_OK); /* the socket has room */
    }
    endpoint_close(&e[0]);
    /* The kernel may tell of the end of one socket before the bytes in the other: as if it did. */
    template_out_event(e[1].self, 0, EPOLLIN | EPOLLHUP);
    DRIVE(e + 1, 1, e[1].lost[0] > 0) {}
    CHECK_EQ(e[1].arrived[0], 4);
    CHECK_EQ(e[1].lost[0], 1);
    CHECK_EQ(e[1].lost_error[0], 0);
    letter_free(&greeting);
    for (int i = 0; i < 4; i++) {
        letter_free(&l[i]);
    }
    endpoint_close(&e[1]);
}

/* close() does not wait for a peer that does not read; what could not go comes back. */
TEST(close_does_not_wait) {
    static endpoint e[2];
    letter l[DEPTH];
    world_open(e, 2, NULL);
    for (int i = 0; i < DEPTH; i++) {
        CHECK_EQ(post(&e[0], 1, &l[i], 1 << 20), DDL_IN_PROGRESS);
    }
    double start = test_now_s();
    endpoint_close(&e[0]);
    CHECK(test_now_s() - start < 2 * test_slow());
    for (int i = 0; i < DEPTH; i++) {
        CHECK(l[i].status == DDL_ERR_CANCELLED);
        letter_free(&l[i]);
    }
    endpoint_close(&e[1]);
}

TEST(a_damaged_header_ends_the_link) {
    static endpoint e[2];
    letter l[3];
    world_open(e, 2, NULL);
    e[1].refuse = 1;
    for (int i = 0; i < 3; i++) {
        post(&e[0], 1, &l[i], 1000);
    }
    DRIVE(e, 2, e[1].lost[0] == 1 && e[0].lost[1] == 1) {}
    CHECK_EQ(e[1].lost_error[0], EBADMSG);
    CHECK_EQ(e[1].arrived[0], 0);
    for (int i = 0; i < 3; i++) {
        letter_free(&l[i]);
    }
    world_close(e, 2);
}

TEST(a_payload_that_nobody_wants_is_skipped) {
    static endpoint e[2];
    letter l[SIZES];
    world_open(e, 2, NULL);
    e[1].discard = 1;
    for (int i = 0; i < SIZES; i++) {
        post(&e[0], 1, &l[i], sizes[i]);
    }
    DRIVE(e, 2, e[1].arrived[0] == SIZES) {}
    for (int i = 0; i < SIZES; i++) {
        letter_free(&l[i]);
    }
    world_close(e, 2);
}

/* An operation fails and wants its memory back: what was begun is ended from a copy, what was not is never sent. */
TEST(recall_gives_memory_back_at_once) {
    static endpoint e[2];
    letter l[DEPTH], first, last;
    world_open(e, 2, NULL);
    post(&e[0], 1, &first, 1);
    DRIVE(e, 2, e[1].arrived[0] == 1) {}
    for (int i = 0; i < 4; i++) {
        CHECK(post(&e[0], 1, &l[i], 1 << 20) >= 0);
    }
    CHECK(l[0].borrowed && l[0].message.priv[0] > 0 && l[1].message.priv[0] == 0);
    for (int k = 0; k < 3; k++) { /* one that was begun, one in the middle, the last */
        letter *gone = &l[(int[]){0, 2, 3}[k]];
        e[0].transport->recall(e[0].self, 1, &gone->message);
        gone->borrowed = 0; /* and letter_free checks that sent() is not called */
        memset(gone->payload, 0xdd, 1 << 20);
        memset(&gone->message, 0xdd, sizeof gone->message);
        e[0].transport->recall(e[0].self, 1, &gone->message); /* of one it does not have: nothing */
    }
    e[0].sent_number[1] = 3; /* first, l[0], l[1], last */
    post(&e[0], 1, &last, 5);
    DRIVE(e, 2, e[1].arrived[0] == 4 && last.returned == last.borrowed) {}
    CHECK(l[1].returned);
    letter_free(&first);
    letter_free(&last);
    for (int i = 0; i < 4; i++) {
        letter_free(&l[i]);
    }
    world_close(e, 2);
}

TEST(redirect_moves_what_still_comes) {
    static endpoint e[2];
    letter l;
    world_open(e, 2, NULL);
    post(&e[0], 1, &l, 1 << 20);
    DRIVE(e, 2, e[1].open_landings == 1) {}
    uint64_t done = ((template_self *)e[1].self)->peers[0].in.done;
    CHECK(done > 0 && done < 1 << 20);
    uint8_t *elsewhere = calloc(1, 1 << 20);
    e[1].transport->redirect(e[1].self, 0, &e, NULL); /* of another token: nothing */
    e[1].transport->redirect(e[1].self, 0, e[1].landing[0], elsewhere);
    e[1].discard = 1;
    DRIVE(e, 2, e[1].arrived[0] == 1 && l.returned) {}
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < 1 << 20; i++) {
        wrong += elsewhere[i] != (i < done ? 0 : pattern(0, 0, i));
    }
    CHECK_EQ(wrong, 0u);
    free(elsewhere);
    letter_free(&l);
    world_close(e, 2);
}

/* A rank of another job knows the address but not the secret: it hears no, the victim hears nothing. */
TEST(a_wrong_secret_is_refused) {
    static endpoint e[2];
    letter l, back;
    int before = fd_count();
    world_open(e, 2, "swordfish");
    e[0].secret = "goldfish";
    post(&e[0], 1, &l, 100);
    DRIVE(e, 2, e[0].lost[1] == 1) {}
    CHECK(l.returned && l.status == DDL_ERR_PEER);
    CHECK_EQ(e[1].arrived[0], 0);
    CHECK_EQ(e[1].lost[0], 0);
    CHECK_EQ(post(&e[0], 1, &back, 1), DDL_ERR_PEER);
    free(back.payload);
    letter_free(&l);
    world_close(e, 2);
    CHECK_EQ(fd_count(), before);
}

/* The same without a secret: an address of another job of this user, at a name that was used again. */
TEST(a_wrong_token_is_refused) {
    static endpoint e[2];
    letter l;
    world_open(e, 2, NULL);
    ((template_self *)e[0].self)->peers[1].address.token[3] ^= 1;
    post(&e[0], 1, &l, 100);
    DRIVE(e, 2, e[0].lost[1] == 1) {}
    CHECK_EQ(e[1].arrived[0], 0);
    CHECK_EQ(e[1].lost[0], 0);
    letter_free(&l);
    world_close(e, 2);
}

/* Connects to an endpoint by hand, says hello as rank `from`, and returns the socket. */
static int impostor(endpoint *e, int from) {
    template_self *s = e->self;
    struct sockaddr_un name;
    socklen_t bytes = template_name(&s->address, &name);
    template_hello hello = {.from = from, .to = e->rank};
    memcpy(hello.magic, "ddltmpl1", 8);
    memcpy(hello.token, s->address.token, sizeof hello.token);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK_EQ(connect(fd, (struct sockaddr *)&name, bytes), 0);
    CHECK_EQ(send(fd, &hello, sizeof hello, MSG_NOSIGNAL), (ssize_t)sizeof hello);
    return fd;
}

/* 1: the other side has closed it without a word. */
static int turned_away(int fd) {
    char byte;
    ssize_t n = recv(fd, &byte, 1, MSG_DONTWAIT);
    return n == 0 || (n < 0 && errno == ECONNRESET);
}

TEST(a_second_connection_and_one_of_the_dead_are_refused) {
    static endpoint e[3];
    letter l[2];
    int before = fd_count();
    world_open(e, 3, NULL);
    post(&e[0], 1, &l[0], 10);
    DRIVE(e, 3, e[1].arrived[0] == 1 && l[0].returned) {}
    e[1].transport->peer_dead(e[1].self, 2);
    int second = impostor(&e[1], 0), dead = impostor(&e[1], 2), nobody = impostor(&e[1], 7), self = impostor(&e[1], -1);
    DRIVE(e, 3, turned_away(second) && turned_away(dead) && turned_away(nobody) && turned_away(self)) {}
    post(&e[0], 1, &l[1], 10); /* and the first goes on */
    DRIVE(e, 3, e[1].arrived[0] == 2) {}
    CHECK_EQ(e[1].lost[0], 0);
    int fds[] = {second, dead, nobody, self};
    for (int i = 0; i < 4; i++) {
        close(fds[i]);
    }
    letter_free(&l[0]);
    letter_free(&l[1]);
    world_close(e, 3);
    CHECK_EQ(fd_count(), before);
}

/* Another user of this host, who even knows the token: as a client, and as a server under a name that became free. */
static void stranger_main(endpoint *e, const template_address *free_name, int *ready) {
    struct sockaddr_un name;
    socklen_t bytes = template_name(free_name, &name);
    char word[64];
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK_EQ(bind(listener, (struct sockaddr *)&name, bytes) + listen(listener, 1), 0);
    int client = impostor(e, 1);
    __atomic_store_n(ready, 1, __ATOMIC_RELEASE);
    CHECK(recv(client, word, sizeof word, 0) <= 0); /* no welcome */
    int server = accept(listener, NULL, NULL);
    CHECK(recv(server, word, sizeof word, 0) <= 0); /* no hello: it holds a token */
    _exit(0);
}

TEST(another_user_is_refused) {
    static endpoint e[2];
    letter l;
    if (geteuid() != 0) {
        SKIP("only root can become another user");
    }
    world_open(e, 2, NULL);
    int *ready = ranks_shared(sizeof *ready), status = 1;
    template_address *other = &((template_self *)e[0].self)->peers[1].address;
    other->name[3] ^= 1;
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (setgid(12345) != 0 || setuid(12345) != 0) {
            _exit(3);
        }
        stranger_main(&e[0], other, ready);
    }
    for (double until = test_now_s() + 10 * test_slow(); !__atomic_load_n(ready, __ATOMIC_ACQUIRE);) {
        REQUIRE(test_now_s() < until);
        usleep(500);
    }
    post(&e[0], 1, &l, 10);
    DRIVE(e, 2, e[0].lost[1] == 1) {}
    CHECK_EQ(e[0].lost_error[1], EACCES);
    DRIVE(e, 2, waitpid(child, &status, WNOHANG) == child) {}
    CHECK_EQ(status, 0);
    CHECK_EQ(e[0].arrived[1], 0);
    letter_free(&l);
    world_close(e, 2);
}

/* Garbage, silence and hang-ups on the listener, more of them than there are slots; then a peer comes and is heard. */
static void storm(const char *secret) {
    static endpoint e[2];
    letter l;
    int fds[200], before = fd_count();
    world_open(e, 2, secret);
    template_address address;
    size_t bytes = sizeof address;
    CHECK_EQ(e[1].transport->address(e[1].self, &address, &bytes), DDL_OK);
    struct sockaddr_un name;
    socklen_t name_bytes = template_name(&address, &name);
    for (int i = 0; i < 200; i++) {
        char junk[300];
        memset(junk, i, sizeof junk);
        fds[i] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        REQUIRE(connect(fds[i], (struct sockaddr *)&name, name_bytes) == 0);
        if (i % 3 == 0) {
            CHECK(send(fds[i], junk, sizeof junk, MSG_NOSIGNAL) > 0);
        } else if (i % 3 == 1) {
            close(fds[i]);
            fds[i] = -1;
        }
    }
    progress_all(e, 2);
    for (int i = 0; i < 200; i++) { /* the silent ones leave; while they stay, the limit of five seconds ends them */
        if (fds[i] >= 0) {
            close(fds[i]);
        }
    }
    post(&e[0], 1, &l, 70000);
    DRIVE(e, 2, e[1].arrived[0] == 1 && l.returned) {}
    CHECK_EQ(e[1].lost[0], 0);
    letter_free(&l);
    world_close(e, 2);
    CHECK_EQ(fd_count(), before);
}
TEST(strangers_do_no_harm_by_uid) { storm(NULL); }
TEST(strangers_do_no_harm_by_secret) { storm("swordfish"); }

/* Two processes; rank 1 is killed in the middle of a message of its own, while messages to it are queued. */
typedef struct booth {
    int there[2];
    uint8_t address[2][256];
    uint64_t bytes[2];
} booth;

static void booth_enter(booth *b, endpoint *e, int rank, const char *secret) {
    endpoint_open(e, rank, 2, secret);
    size_t bytes = 256;
    CHECK_EQ(e->transport->address(e->self, b->address[rank], &bytes), DDL_OK);
    b->bytes[rank] = bytes;
    __atomic_store_n(&b->there[rank], 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&b->there[1 - rank], __ATOMIC_ACQUIRE)) {
        usleep(500);
    }
    endpoint_meet(e, 1 - rank, b->address[1 - rank], b->bytes[1 - rank]);
}

static void victim_and_survivor(int rank, int n, void *arg) {
    static endpoint e;
    static letter l[DEPTH];
    (void)n;
    booth_enter(arg, &e, rank, "swordfish");
    for (int i = 0; i < DEPTH; i++) {
        CHECK(post(&e, 1 - rank, &l[i], 1 << 20) >= 0);
    }
    if (rank == 1) {
        DRIVE(&e, 1, e.arrived[0] >= 3) {} /* reads little and never ends its own letters */
        kill(getpid(), SIGKILL);
    }
    DRIVE(&e, 1, e.lost[1] > 0) {}
    CHECK_EQ(e.lost[1], 1);
    CHECK(e.arrived[1] < DEPTH || e.next[1] == DEPTH);
    for (int i = 0; i < DEPTH; i++) {
        letter_free(&l[i]);
    }
    CHECK(l[DEPTH - 1].status == DDL_ERR_PEER);
    endpoint_close(&e);
}

TEST(a_kill_is_a_loss_and_returns_everything) {
    ranks r;
    ranks_start(&r, 2, victim_and_survivor, ranks_shared(sizeof(booth)));
    ranks_wait(&r, 30);
    CHECK(!r.timed_out);
    CHECK_EQ(r.status[0], 0);
    CHECK_EQ(WTERMSIG(r.status[1]), SIGKILL);
}

/* Two processes that both send and both sleep: the ordinary case. */
static void talker(int rank, int n, void *arg) {
    static endpoint e;
    static letter l[10 * SIZES];
    (void)n;
    booth_enter(arg, &e, rank, NULL);
    for (int i = 0; i < 10 * SIZES; i++) {
        CHECK(post(&e, 1 - rank, &l[i], sizes[i % SIZES]) >= 0);
        e.transport->progress(e.self, 1 - rank);
    }
    int returned = 0;
    DRIVE(&e, 1, e.arrived[1 - rank] == 10 * SIZES && returned == 10 * SIZES) {
        returned = 0;
        for (int i = 0; i < 10 * SIZES; i++) {
            returned += l[i].returned == l[i].borrowed;
        }
    }
    for (int i = 0; i < 10 * SIZES; i++) {
        letter_free(&l[i]);
    }
    endpoint_close(&e);
}

TEST(two_processes_talk) { ranks_fork(2, talker, ranks_shared(sizeof(booth)), 30); }

/* A child that the program forked holds copies of the sockets; the end must be seen all the same, and nothing spins. */
TEST(a_forked_child_does_not_hide_the_end) {
    static endpoint e[2];
    letter l;
    world_open(e, 2, NULL);
    post(&e[0], 1, &l, 10);
    DRIVE(e, 2, e[1].arrived[0] == 1 && l.returned) {}
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        sleep(100);
        _exit(0);
    }
    endpoint_close(&e[0]);
    DRIVE(e + 1, 1, e[1].lost[0] == 1) {}
    CHECK_EQ(sleep_all(e + 1, 1, 50), 0);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    letter_free(&l);
    endpoint_close(&e[1]);
}

/* Everything that can knock at a port knocks at those of running ranks: garbage, HTTP, half-open and silent clients, more
 * than the table of strangers holds, wrong secrets, wrong jobs, replayed handshakes, ranks that are there already. The
 * job's all_reduces stay right, nobody is declared dead, and the refused are counted.
 * tests/run: variants=asan timeout=90 */
#define TEST_TIMEOUT_S 600
#define DDL_IMPLEMENTATION
#include "faults.h"

#include <fcntl.h>

enum { RANKS = 3, SILENT = 120 };

typedef struct shared {
    volatile int running, stop;
    volatile int rounds;
    volatile uint64_t refused[RANKS];
    int pid[RANKS];
} shared;

static void work(int rank, int n, void *arg) {
    shared *s = (shared *)arg;
    (void)n;
    char why[1024] = "";
    ddl_context *c = NULL;
    ddl_config config = {.timeout_ms = 20000, .job = "strangers", .error_text = why, .error_bytes = sizeof why};
    if (ddl_init(&config, &c) != DDL_OK) {
        test__fail(__FILE__, __LINE__, "ddl_init: %s", why);
        return;
    }
    s->pid[rank] = (int)getpid();
    __atomic_fetch_add(&s->running, 1, __ATOMIC_SEQ_CST);
    int32_t stop = 0;
    for (int64_t i = 0; !stop; i++) {
        ddl_status status = fault_all_reduce(ddl_world(c), i % 8 == 0 ? 100003 : 10 + i % 100, i);
        if (status != DDL_OK) {
            test__fail(__FILE__, __LINE__, "%s: %s", ddl_status_name(status), ddl_error(c));
            break;
        }
        stop = s->stop;
        REQUIRE(ddl_broadcast(ddl_world(c), DDL_VIEW(&stop, 1), 0) == DDL_OK);
        s->rounds += rank == 0;
        ddl_stats stats;
        CHECK_EQ(ddl_stats_get(c, &stats), DDL_OK);
        s->refused[rank] = stats.strangers_refused;
    }
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

/* >>finding the ports: listening sockets in /proc/net/tcp whose inode is open in the rank */

static int has_inode(int pid, unsigned long inode) {
    char path[64], link[64], wanted[40];
    int found = 0;
    snprintf(path, sizeof path, "/proc/%d/fd", pid);
    snprintf(wanted, sizeof wanted, "socket:[%lu]", inode);
    DIR *folder = opendir(path);
    for (struct dirent *e = folder != NULL ? readdir(folder) : NULL; e != NULL; e = readdir(folder)) {
        char name[400];
        snprintf(name, sizeof name, "%s/%s", path, e->d_name);
        ssize_t bytes = readlink(name, link, sizeof link - 1);
        link[bytes > 0 ? bytes : 0] = 0;
        found = found || strcmp(link, wanted) == 0;
    }
    if (folder != NULL) {
        closedir(folder);
    }
    return found;
}

static int port_of(int pid) {
    char line[512];
    int port = 0;
    FILE *table = fopen("/proc/net/tcp", "r");
    while (table != NULL && fgets(line, sizeof line, table) != NULL) {
        unsigned address, at, state;
        unsigned long inode;
        if (sscanf(line, " %*d: %x:%x %*x:%*x %x %*s %*s %*s %*s %*s %lu", &address, &at, &state, &inode) == 4 &&
            state == 10 && has_inode(pid, inode)) {
            port = (int)at;
        }
    }
    if (table != NULL) {
        fclose(table);
    }
    return port;
}

static int knock(int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in a;
    memset(&a, 0, sizeof a);
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    a.sin_port = htons((uint16_t)port);
    struct timeval patience = {3, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (connect(fd, (struct sockaddr *)&a, sizeof a) != 0) {
        test__fail(__FILE__, __LINE__, "connect: %s", strerror(errno));
    }
    return fd;
}

static void say(int fd, const void *bytes, size_t count) {
    ssize_t n = send(fd, bytes, count, MSG_NOSIGNAL);
    (void)n; /* the other end may have closed already: that is its right */
}

/* True when the other end closes within the patience. */
static int is_closed(int fd) {
    char sink[512];
    ssize_t n;
    do {
        n = recv(fd, sink, sizeof sink, 0);
    } while (n > 0);
    return n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK);
}

/* A client's handshake. Returns the status it ends with; the bytes it sent are kept for a replay. */
typedef struct handshake {
    const char *secret;
    uint64_t job;
    uint32_t rank, target;
    uint8_t sent[512];
    size_t sent_bytes;
} handshake;

static ddl_status shake(int port, handshake *h, int *out_fd) {
    uint8_t nonce[32], in[512], out[256];
    size_t have = 0, used = 0, out_bytes = 0;
    ddl__auth a;
    memset(nonce, 7, sizeof nonce);
    ddl__auth_params p = {.secret = (const uint8_t *)h->secret, .secret_bytes = strlen(h->secret), .job = h->job,
                          .purpose = DDL__AUTH_MESH, .rank = h->rank, .peer = h->target, .world = RANKS};
    int fd = *out_fd = knock(port);
    ddl_status status = ddl__auth_client(&a, &p, nonce);
    h->sent_bytes = 0;
    while (status >= 0) {
        status = ddl__auth_step(&a, in, have, &used, out, sizeof out, &out_bytes);
        have -= used;
        memmove(in, in + used, have);
        say(fd, out, out_bytes);
        memcpy(h->sent + h->sent_bytes, out, out_bytes);
        h->sent_bytes += out_bytes;
        if (status != DDL_IN_PROGRESS) {
            break;
        }
        ssize_t n = recv(fd, in + have, sizeof in - have, 0);
        status = n > 0 ? DDL_OK : DDL_ERR_AUTH;
        have += n > 0 ? (size_t)n : 0;
    }
    ddl__auth_wipe(&a);
    return status;
}

/* >>the attacks; each returns how many connections must be counted as refused */

static int garbage(int port, uint64_t *random) {
    for (int i = 0; i < 20; i++) {
        uint8_t bytes[300];
        for (size_t k = 0; k < sizeof bytes; k++) {
            bytes[k] = (uint8_t)fault_random(random);
        }
        int fd = knock(port);
        say(fd, bytes, 1 + fault_random(random) % sizeof bytes);
        shutdown(fd, SHUT_WR);
        CHECK(is_closed(fd));
        close(fd);
    }
    return 15; /* of 20, those with at least the 8 bytes that are judged; short ones are only closed */
}

static int http(int port) {
    static const char request[] = "GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: scanner\r\nAccept: */*\r\n\r\n";
    for (int i = 0; i < 10; i++) {
        int fd = knock(port);
        say(fd, request, sizeof request - 1);
        CHECK(is_closed(fd));
        close(fd);
    }
    return 10;
}

static int wrong_proofs(int port, const char *secret, uint32_t target) {
    uint64_t job = ddl__mix_bytes(0, "strangers", strlen("strangers"));
    handshake cases[] = {
        {.secret = "not the secret, but long enough", .job = job, .rank = (target + 1) % RANKS, .target = target},
        {.secret = secret, .job = job + 1, .rank = (target + 1) % RANKS, .target = target},
        {.secret = secret, .job = job, .rank = (target + 1) % RANKS, .target = (target + 2) % RANKS},
        {.secret = secret, .job = job, .rank = RANKS + 5, .target = target},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int fd;
        CHECK(shake(port, &cases[i], &fd) < 0);
        shutdown(fd, SHUT_WR); /* the server proves first: a client with another secret knows enough, and goes */
        CHECK(is_closed(fd));
        close(fd);
    }
    return 4;
}

/* A handshake that is right, of a rank that is there already, and then the same bytes again. */
static int replays(int port, const char *secret, uint32_t target) {
    handshake h = {.secret = secret, .job = ddl__mix_bytes(0, "strangers", strlen("strangers")),
                   .rank = (target + 1) % RANKS, .target = target};
    int fd;
    CHECK_EQ(shake(port, &h, &fd), DDL_OK);
    say(fd, "D", 1);
    CHECK(is_closed(fd)); /* proven, but not wanted: the rank is connected */
    close(fd);
    for (int i = 0; i < 10; i++) {
        fd = knock(port);
        say(fd, h.sent, h.sent_bytes);
        say(fd, "D", 1);
        CHECK(is_closed(fd));
        close(fd);
    }
    return 10;
}

/* Connections that say nothing, or half a handshake, and stay. More than a rank keeps: the oldest go. */
static void silent(int port, int *fds, int count) {
    for (int i = 0; i < count; i++) {
        fds[i] = knock(port);
        if (i % 3 == 1) {
            say(fds[i], "ddlh", 4);
        } else if (i % 3 == 2) { /* half-open: reset without a word */
            struct linger hard = {1, 0};
            setsockopt(fds[i], SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
            close(fds[i]);
            fds[i] = -1;
        }
    }
}

static void await_rounds(const shared *s, int more) {
    int from = s->rounds;
    double limit = test_now_s() + 20 * test_slow();
    while (s->rounds < from + more && test_now_s() < limit) {
        usleep(1000);
    }
    CHECK(s->rounds >= from + more);
}

TEST(strangers_at_the_port_of_a_rank_do_not_disturb_the_job) {
    uint64_t random = fault_seed("strangers"), refused = 0;
    shared *s = (shared *)ranks_shared(sizeof *s);
    ranks r;
    ranks_start(&r, RANKS, work, s);
    double limit = test_now_s() + 20 * test_slow();
    while (s->running < RANKS && test_now_s() < limit) {
        usleep(1000);
    }
    int fds[SILENT], expected = 0;
    for (uint32_t target = 0; target < RANKS; target++) {
        int port = port_of(s->pid[target]);
        CHECK(port != 0);
        if (port != 0) {
            expected += garbage(port, &random) + http(port) + wrong_proofs(port, r.secret, target) +
                        replays(port, r.secret, target);
        }
        await_rounds(s, 2);
    }
    silent(port_of(s->pid[1]), fds, SILENT);
    await_rounds(s, 3);
    expected += http(port_of(s->pid[1])); /* it still answers, however many are silent */
    await_rounds(s, 3);
    int rounds = s->rounds;
    s->stop = 1;
    CHECK_EQ(ranks_wait(&r, 30), 0);
    for (int i = 0; i < SILENT; i++) {
        if (fds[i] >= 0) {
            close(fds[i]);
        }
    }
    for (int i = 0; i < RANKS; i++) {
        refused += s->refused[i];
    }
    printf("  %d rounds; %llu strangers counted as refused, at least %d expected\n", rounds, (unsigned long long)refused,
           expected);
    CHECK(refused >= (uint64_t)expected);
}

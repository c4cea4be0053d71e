/* Sockets of libfabric's tcp, which the libfabric plugin finds and changes: their congestion control, and the signals that tcp sends
 * itself.
 * tests/run: variants=gcc,asan,valgrind timeout=60 quick=yes */
#include "fabric_host.h"

/* Whether a socket is connected to a listener of these endpoints, and what its congestion control is. */
static int calls_one_of(const endpoint *e, int n, int fd, char control[16]) {
    struct sockaddr_in name = {0}, listener;
    socklen_t bytes = sizeof name, control_bytes = 16;
    if (getpeername(fd, (struct sockaddr *)&name, &bytes) != 0 || name.sin_family != AF_INET) {
        return 0;
    }
    CHECK_EQ(getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, control, &control_bytes), 0);
    for (int i = 0; i < n; i++) {
        memcpy(&listener, self_of(&e[i])->address.names, sizeof listener);
        if (name.sin_port == listener.sin_port) {
            return 1;
        }
    }
    return 0;
}

/* Sockets of calls that have that congestion control, and how many there are. */
static int called_with(const endpoint *e, int n, const char *control, int *out_with) {
    char its[16];
    int called = 0;
    *out_with = 0;
    for (int fd = 0; fd < 1024; fd++) {
        if (calls_one_of(e, n, fd, its)) {
            *out_with += strcmp(its, control) == 0;
            called++;
        }
    }
    return called;
}

static void called_on_a_system_that(int paces, const char *control) {
    endpoint *e = world_open(2, NULL, NULL);
    letter l = {0};
    int with;
    self_of(&e[0])->paces = self_of(&e[1])->paces = paces;
    CHECK(post(&e[0], 1, &l, 1 << 20) >= 0);
    DRIVE(e, 2, all_arrived(e, 2) == 1 && all_returned(&l, 1)) {}
    int called = called_with(e, 2, control, &with);
    CHECK(called >= 2); /* words and a payload */
    CHECK_EQ(with, called);
    letter_free(&l);
    world_end(e, 2);
}

TEST(what_stays_on_this_host_is_not_paced) {
    char control[16] = "";
    socklen_t bytes = sizeof control - 1;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK_EQ(getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, control, &bytes), 0);
    close(fd);
    CHECK_EQ(fabric_paces(), strncmp(control, "bbr", 3) == 0);
    NEED_LIBFABRIC();
    called_on_a_system_that(0, control);
    called_on_a_system_that(1, "reno");
}

/* A call that was accepted, and of which more has come since, is refused by who closes: libfabric would keep the socket. */
TEST(who_closes_keeps_no_socket_of_a_call) {
    NEED_LIBFABRIC();
    world_end(world_open(2, NULL, NULL), 2); /* what libfabric opens for the whole process stays */
    int before = fd_count();
    endpoint *e = world_open(2, NULL, NULL);
    fabric_self *called = self_of(&e[1]);
    letter l = {0};
    CHECK(post(&e[0], 1, &l, 8) >= 0);
    fabric_events(called, &called->rails[0]); /* accepts; who calls has not said a word yet */
    for (int i = 0; i < 100; i++) {
        progress_all(e, 1);
    }
    endpoint_close(&e[1]);
    world_end(e, 2);
    letter_free(&l);
    CHECK_EQ(fd_count(), before);
}

/* Calls of write() by this process so far; -1: the kernel does not count them. */
static long writes_so_far(void) {
    FILE *f = fopen("/proc/self/io", "re");
    char line[80];
    long writes = -1;
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        sscanf(line, "syscw: %ld", &writes);
    }
    if (f != NULL) {
        fclose(f);
    }
    return writes;
}

/* tcp of libfabric before 1.18 wakes itself with a byte for each completion. That of the first is taken, and no other is written,
 * whatever moves afterwards and whether or not somebody slept; without a byte to take all is as it was. */
TEST(completions_wake_nobody_who_does_not_sleep) {
    NEED_LIBFABRIC();
    enum { MESSAGES = 200 };
    endpoint *e = world_open(2, NULL, NULL);
    exchange_in(e, 2, 2);
    if (!self_of(&e[0])->by_sockets) {
        world_end(e, 2);
        SKIP("this libfabric has another tcp");
    }
    CHECK(self_of(&e[0])->hushed && self_of(&e[1])->hushed);
    sleep_all(e, 2, 0);
    long none = writes_so_far();
    FILE *null = fopen("/dev/null", "we");
    CHECK(null != NULL && fputc(0, null) == 0);
    fclose(null);
    long before = writes_so_far();
    uint64_t arrived = all_arrived(e, 2);
    for (uint64_t i = 1; i <= MESSAGES; i++) {
        letter l = {0};
        CHECK(post(&e[i % 2], (int)(i + 1) % 2, &l, i % 16 == 0 ? 100000 : 8) >= 0);
        DRIVE(e, 2, all_arrived(e, 2) == arrived + i && all_returned(&l, 1)) {
            if (i % 8 == 0) {
                sleep_all(e, 2, 0);
            }
        }
        letter_free(&l);
    }
    long after = writes_so_far();
    CHECK(none == before || after - before < MESSAGES / 10);
    world_end(e, 2);
    if (none == before) {
        SKIP("the kernel does not count calls of write");
    }
}

/* A socket is found by its name from a descriptor on, and only a little further. */
TEST(the_socket_of_a_name) {
    struct sockaddr_storage name = {0};
    struct sockaddr_in *at = (struct sockaddr_in *)(void *)&name;
    int sockets[3], no_port = 1;
    char control[16];
    *at = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    for (int i = 0; i < 3; i++) {
        int next = fabric_next_descriptor(0);
        sockets[i] = socket(AF_INET, SOCK_STREAM, 0);
        CHECK_EQ(sockets[i], next);
        CHECK_EQ(setsockopt(sockets[i], IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &no_port, sizeof no_port), 0);
        CHECK_EQ(setsockopt(sockets[i], IPPROTO_TCP, TCP_CONGESTION, "cubic", 5), 0);
        CHECK(i == 0 || bind(sockets[i], (struct sockaddr *)at, sizeof *at) == 0); /* the first has no name */
    }
    CHECK(fabric_unpace(sockets[0], &name, sizeof *at));
    for (int i = 0; i < 3; i++) {
        socklen_t bytes = sizeof control;
        CHECK_EQ(getsockopt(sockets[i], IPPROTO_TCP, TCP_CONGESTION, control, &bytes), 0);
        CHECK_STR(control, i == 1 ? "reno" : "cubic");
    }
    CHECK(!fabric_unpace(sockets[2] + 1, &name, sizeof *at));
    CHECK(!fabric_unpace(-1, &name, sizeof *at)); /* there was no descriptor */
    at->sin_addr.s_addr = htonl(0x7f000002);
    CHECK(!fabric_unpace(sockets[0], &name, sizeof *at));
    for (int i = 0; i < 3; i++) {
        close(sockets[i]);
    }
}

TEST(addresses_of_one_interface) {
    struct sockaddr_storage a = {0}, b = {0}, a6 = {0}, b6 = {0};
    memcpy(&a, &(struct sockaddr_in){.sin_family = AF_INET, .sin_port = 1, .sin_addr.s_addr = htonl(0x0a000001)}, sizeof(struct sockaddr_in));
    memcpy(&b, &(struct sockaddr_in){.sin_family = AF_INET, .sin_port = 2, .sin_addr.s_addr = htonl(0x0a000001)}, sizeof(struct sockaddr_in));
    memcpy(&a6, &(struct sockaddr_in6){.sin6_family = AF_INET6, .sin6_port = 1, .sin6_addr.s6_addr = {[15] = 1}}, sizeof(struct sockaddr_in6));
    memcpy(&b6, &(struct sockaddr_in6){.sin6_family = AF_INET6, .sin6_port = 2, .sin6_addr.s6_addr = {[15] = 2}}, sizeof(struct sockaddr_in6));
    CHECK(fabric_ip_equal(&a, &b));
    CHECK(fabric_ip_equal(&a6, &a6));
    CHECK(!fabric_ip_equal(&a, &a6));
    CHECK(!fabric_ip_equal(&a6, &b6));
    ((struct sockaddr_in *)(void *)&b)->sin_addr.s_addr++;
    CHECK(!fabric_ip_equal(&a, &b));
}

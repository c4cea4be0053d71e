/* loopback: connections between two ranks of one address are not paced. Congestion control that paces (bbr) takes half of the
 * bandwidth of loopback, where there is nothing to be gentle with, and a socket that was paced once stays so: another is chosen
 * before it connects. libfabric does not say which socket an endpoint has; a new one is the next descriptor, as a rule, and has
 * the endpoint's address and no port yet. */
#ifndef FABRIC_LOOPBACK_H
#define FABRIC_LOOPBACK_H

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { FABRIC_NEXT = 16 }; /* descriptors that other threads may open meanwhile */

static const uint8_t *fabric_ip(const struct sockaddr_storage *a, size_t *bytes) {
    *bytes = a->ss_family == AF_INET ? 4 : a->ss_family == AF_INET6 ? 16 : 0;
    return a->ss_family == AF_INET ? (const uint8_t *)&((const struct sockaddr_in *)a)->sin_addr
                                   : (const uint8_t *)&((const struct sockaddr_in6 *)a)->sin6_addr;
}

static int fabric_ip_equal(const struct sockaddr_storage *a, const struct sockaddr_storage *b) {
    size_t bytes, others;
    const uint8_t *x = fabric_ip(a, &bytes), *y = fabric_ip(b, &others);
    return bytes != 0 && bytes == others && memcmp(x, y, bytes) == 0;
}

/* Whether this system paces what nobody has chosen otherwise. */
static int fabric_paces(void) {
    char control[16] = "";
    socklen_t bytes = sizeof control - 1;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int paces = fd >= 0 && getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, control, &bytes) == 0 && strncmp(control, "bbr", 3) == 0;
    if (fd >= 0) {
        close(fd);
    }
    return paces;
}

/* The descriptor that is opened next. */
static int fabric_next_descriptor(int any) {
    int fd = fcntl(any, F_DUPFD_CLOEXEC, 0);
    if (fd >= 0) {
        close(fd);
    }
    return fd;
}

/* Whether a socket has that name. */
static int fabric_is_named(int fd, const struct sockaddr_storage *name, socklen_t bytes) {
    struct sockaddr_storage its;
    socklen_t its_bytes = sizeof its;
    return getsockname(fd, (struct sockaddr *)&its, &its_bytes) == 0 && its_bytes == bytes && memcmp(&its, name, bytes) == 0;
}

/* The socket of that name, which is none before next, is not paced. Returns whether it was found; else all is as it was. */
static int fabric_unpace(int next, const struct sockaddr_storage *name, socklen_t bytes) {
    for (int fd = next; fd >= 0 && fd < next + FABRIC_NEXT; fd++) {
        if (fabric_is_named(fd, name, bytes)) {
            return setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4) == 0;
        }
    }
    return 0;
}

#endif /* FABRIC_LOOPBACK_H */

/* loopback: connections between ranks of one host are not paced. Congestion control that paces (bbr) takes half of the bandwidth of
 * loopback, where there is nothing to be gentle with, and a socket that was paced once stays so: another is to be chosen before it
 * connects. libfabric does not say which socket an endpoint has; but one that is to have a certain port is found by it. */
#ifndef FABRIC_LOOPBACK_H
#define FABRIC_LOOPBACK_H

#include <dirent.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Whether both names have one address. */
static int fabric_is_loopback(const struct sockaddr *a, const struct sockaddr *b) {
    if (a->sa_family == AF_INET6 && b->sa_family == AF_INET6) {
        const struct sockaddr_in6 *a6 = (const void *)a, *b6 = (const void *)b;
        return memcmp(&a6->sin6_addr, &b6->sin6_addr, sizeof a6->sin6_addr) == 0;
    }
    const struct sockaddr_in *a4 = (const void *)a, *b4 = (const void *)b;
    return a->sa_family == AF_INET && b->sa_family == AF_INET && a4->sin_addr.s_addr == b4->sin_addr.s_addr;
}

/* Gives a name a port that nobody else takes while the descriptor returned is open; -1: there is none. */
static int fabric_port_take(struct sockaddr *name, socklen_t bytes) {
    int fd = socket(name->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0), shared = 1;
    if (fd >= 0 && (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &shared, sizeof shared) != 0 || bind(fd, name, bytes) != 0 ||
                    getsockname(fd, name, &bytes) != 0)) {
        close(fd);
        return -1;
    }
    return fd;
}

/* The socket of that name is not to be paced. Where it is not found all is as it was. */
static void fabric_unpace(const struct sockaddr *name, socklen_t bytes) {
    DIR *folder = opendir("/proc/self/fd");
    for (struct dirent *at; folder != NULL && (at = readdir(folder)) != NULL;) {
        struct sockaddr_storage its;
        socklen_t its_bytes = sizeof its;
        int fd = atoi(at->d_name);
        if (getsockname(fd, (struct sockaddr *)&its, &its_bytes) == 0 && its_bytes == bytes && memcmp(&its, name, bytes) == 0) {
            (void)setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
            break;
        }
    }
    if (folder != NULL) {
        closedir(folder);
    }
}

#endif /* FABRIC_LOOPBACK_H */

/* address: names to addresses, which of them are this machine's, and who holds a port. */
#ifndef DDL_STORE_ADDRESS_H
#define DDL_STORE_ADDRESS_H

#include "record.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#define DDL__ADDRESSES_MAX 8

typedef struct ddl__address {
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
        struct sockaddr_un local;
        struct sockaddr_storage room;
    } at;
    socklen_t bytes;
} ddl__address;

typedef struct ddl__addresses {
    ddl__address list[DDL__ADDRESSES_MAX];
    int count;
} ddl__addresses;

static void ddl__address_set_port(ddl__address *a, int32_t port) {
    if (a->at.any.sa_family == AF_INET6) {
        a->at.v6.sin6_port = htons((uint16_t)port);
    } else if (a->at.any.sa_family == AF_INET) {
        a->at.v4.sin_port = htons((uint16_t)port);
    }
}

static void ddl__addresses_add(ddl__addresses *out, const struct sockaddr *from) {
    socklen_t bytes = from->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
    if ((from->sa_family == AF_INET || from->sa_family == AF_INET6) && out->count < DDL__ADDRESSES_MAX) {
        ddl__address *a = &out->list[out->count++];
        memset(a, 0, sizeof *a);
        memcpy(&a->at, from, bytes);
        a->bytes = bytes;
    }
}

/* 0, or what gai_strerror explains. May block as long as the system's resolver does. */
static int ddl__resolve(const char *host, ddl__addresses *out) {
    struct addrinfo want, *found = NULL;
    memset(&want, 0, sizeof want);
    want.ai_socktype = SOCK_STREAM;
    out->count = 0;
    int error = getaddrinfo(host, NULL, &want, &found);
    for (struct addrinfo *i = found; error == 0 && i != NULL; i = i->ai_next) {
        ddl__addresses_add(out, i->ai_addr);
    }
    if (found != NULL) {
        freeaddrinfo(found);
    }
    return error == 0 && out->count == 0 ? EAI_NONAME : error;
}

/* Addresses of one interface, or of all when name is NULL; without the link-local ones, which need a scope. */
static void ddl__interface_addresses(const char *name, ddl__addresses *out) {
    struct ifaddrs *all = NULL;
    out->count = 0;
    if (getifaddrs(&all) != 0) {
        return;
    }
    for (struct ifaddrs *i = all; i != NULL; i = i->ifa_next) {
        bool wanted = name != NULL ? strcmp(i->ifa_name, name) == 0 : (i->ifa_flags & IFF_LOOPBACK) == 0;
        if (!wanted || i->ifa_addr == NULL || (i->ifa_flags & IFF_UP) == 0) {
            continue;
        }
        if (i->ifa_addr->sa_family == AF_INET6) {
            struct sockaddr_in6 v6;
            memcpy(&v6, i->ifa_addr, sizeof v6);
            if (IN6_IS_ADDR_LINKLOCAL(&v6.sin6_addr)) {
                continue;
            }
        }
        ddl__addresses_add(out, i->ifa_addr);
    }
    freeifaddrs(all);
}

/* "10.0.0.5:29500", "[::1]:29500", or "a unix socket". */
static const char *ddl__address_text(const ddl__address *a, char *out, size_t cap) {
    char host[INET6_ADDRSTRLEN] = "?";
    if (a->at.any.sa_family == AF_INET6) {
        inet_ntop(AF_INET6, &a->at.v6.sin6_addr, host, sizeof host);
        snprintf(out, cap, "[%s]:%d", host, ntohs(a->at.v6.sin6_port));
    } else if (a->at.any.sa_family == AF_INET) {
        inet_ntop(AF_INET, &a->at.v4.sin_addr, host, sizeof host);
        snprintf(out, cap, "%s:%d", host, ntohs(a->at.v4.sin_port));
    } else {
        snprintf(out, cap, "a unix socket");
    }
    return out;
}

static bool ddl__address_is_loopback(const ddl__address *a) {
    if (a->at.any.sa_family == AF_INET6) {
        return IN6_IS_ADDR_LOOPBACK(&a->at.v6.sin6_addr);
    }
    return a->at.any.sa_family == AF_INET && (ntohl(a->at.v4.sin_addr.s_addr) >> 24) == 127;
}

/* Whether a socket of this machine can have the address: the kernel decides, with any port. */
static bool ddl__address_is_mine(const ddl__address *a) {
    ddl__address probe = *a;
    ddl__address_set_port(&probe, 0);
    int fd = socket(probe.at.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return false;
    }
    bool mine = bind(fd, &probe.at.any, probe.bytes) == 0;
    close(fd);
    return mine;
}

static bool ddl__addresses_have_mine(const ddl__addresses *list) {
    for (int i = 0; i < list->count; i++) {
        if (ddl__address_is_mine(&list->list[i])) {
            return true;
        }
    }
    return false;
}

/* The ranks meet on a unix socket: there is no secret, or their launcher says that they are all on this host. */
static bool ddl__place_is_here(const ddl__settings *s) { return s->secret == NULL || s->place.port == 0; }

/* The socket of a job without a secret: in the abstract namespace, so nothing is left behind whatever happens. Names
 * are free to all users of the host; who is behind one is checked by SO_PEERCRED. */
static void ddl__address_of_unix(ddl__address *out, int32_t port, uint64_t job) {
    memset(out, 0, sizeof *out);
    out->at.local.sun_family = AF_UNIX;
    int n = snprintf(out->at.local.sun_path + 1, sizeof out->at.local.sun_path - 1, "ddl-%lu-%d-%016" PRIx64,
                     (unsigned long)geteuid(), port, job);
    out->bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

/* What a sentence calls that socket. */
static void ddl__unix_text(const ddl__settings *s, char *out, size_t cap) {
    if (s->place.port == 0) {
        snprintf(out, cap, "the unix socket of job %.80s on this host", s->job);
    } else {
        snprintf(out, cap, "the unix socket of %.80s port %d", s->place.host, s->place.port);
    }
}

/* The user at the other end of a connected unix socket, -1 when unknown. */
static long ddl__socket_uid(int fd) {
    struct ucred peer;
    socklen_t bytes = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 ? (long)peer.uid : -1;
}

/* A line of a table of /proc/net: whether its socket listens on the port (state 0A), and its inode and user. */
static bool ddl__listener_parse(const char *line, int32_t port, unsigned long *out_inode, unsigned *out_uid) {
    unsigned local, state;
    return sscanf(line, " %*d: %*[0-9A-F]:%4x %*[0-9A-F]:%*4x %2x %*s %*s %*s %u %*d %lu", &local, &state, out_uid,
                  out_inode) == 4 &&
           state == 0x0a && local == (unsigned)port;
}

static bool ddl__find_listener(const char *path, int32_t port, unsigned long *out_inode, unsigned *out_uid) {
    FILE *file = fopen(path, "re");
    char line[512];
    bool found = false;
    while (file != NULL && !found && fgets(line, sizeof line, file) != NULL) {
        found = ddl__listener_parse(line, port, out_inode, out_uid);
    }
    if (file != NULL) {
        fclose(file);
    }
    return found;
}

static bool ddl__process_holds(const char *pid, const char *socket_name) {
    char path[300], link[64];
    snprintf(path, sizeof path, "/proc/%.32s/fd", pid);
    DIR *folder = opendir(path);
    bool holds = false;
    for (struct dirent *e; folder != NULL && !holds && (e = readdir(folder)) != NULL;) {
        ssize_t n = readlinkat(dirfd(folder), e->d_name, link, sizeof link - 1);
        holds = n > 0 && (size_t)n == strlen(socket_name) && memcmp(link, socket_name, (size_t)n) == 0;
    }
    if (folder != NULL) {
        closedir(folder);
    }
    return holds;
}

/* Adds who listens on a port of this machine, as far as /proc tells: " by process 12 (nginx)". For a sentence. */
static void ddl__text_port_holder(ddl__text *text, int32_t port) {
    unsigned long inode = 0;
    unsigned uid = 0;
    char name[64], path[80], program[64];
    if (!ddl__find_listener("/proc/net/tcp", port, &inode, &uid) &&
        !ddl__find_listener("/proc/net/tcp6", port, &inode, &uid)) {
        return;
    }
    snprintf(name, sizeof name, "socket:[%lu]", inode);
    DIR *processes = opendir("/proc");
    for (struct dirent *e; processes != NULL && (e = readdir(processes)) != NULL;) {
        if (e->d_name[0] >= '1' && e->d_name[0] <= '9' && ddl__process_holds(e->d_name, name)) {
            snprintf(path, sizeof path, "/proc/%.32s/comm", e->d_name);
            ssize_t n = ddl__read_text(path, program, sizeof program);
            program[n > 0 ? strcspn(program, "\n") : 0] = 0;
            ddl__text_clean(program);
            ddl__text_add(text, " by process %.32s (%s)", e->d_name, program);
            closedir(processes);
            return;
        }
    }
    if (processes != NULL) {
        closedir(processes);
    }
    ddl__text_add(text, " by a process of user %u", uid);
}

#endif /* DDL_STORE_ADDRESS_H */

/* ddl-info --doctor between hosts: which interface of which host is reached from where, by TCP and by whole packets, and
 * whether clocks and plugins agree. The first rank of each host speaks for it. Collective: all ranks call. */
#ifndef DDL_TOOLS_DOCTOR_NET_H
#define DDL_TOOLS_DOCTOR_NET_H

#include "finding.h"

#include <net/if.h>
#include <sys/ioctl.h>

enum { FACES_MAX = 8, NET_PINGS = 20, NET_SMALL = 64 };
#define NET_WAIT_NS (2 * DDL__NS_PER_S)
#define CLOCK_BOUND_NS (100 * (int64_t)DDL__NS_PER_MS)

/* One address of an interface that is up. */
typedef struct face {
    char name[16], text[48];
    int32_t mtu, bits; /* bits: of the network's part of the address */
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } at;
} face;

/* What each rank tells all. */
typedef struct card {
    int32_t host, version, abi, count;
    uint16_t tcp_port, udp_port; /* network order; 0: no socket could be made */
    char host_name[32], plugins[200];
    face faces[FACES_MAX];
} card;

typedef enum reach {
    NOT_TRIED = 0,
    REACHED = 1,
    REFUSED = 2,
    NO_ANSWER = 3,
    NO_ROUTE = 4
} reach;

/* Of one host to each interface of each other: [host][face]. */
typedef struct reached {
    uint8_t tcp[FACES_MAX];
    uint8_t small[FACES_MAX], whole[FACES_MAX]; /* datagrams that came from that host to this one's interfaces */
} reached;

typedef struct net {
    ddl_context *c;
    card own, *cards;      /* by rank */
    int32_t *leaders;      /* the first rank of each host */
    int32_t hosts;
    reached *row, *matrix; /* this host's; matrix[rank * hosts + host] */
    int tcp, udp;
} net;

/* >>interfaces */

static socklen_t face_bytes(const face *f) {
    return f->at.any.sa_family == AF_INET ? sizeof f->at.v4 : sizeof f->at.v6;
}

static const void *face_address(const face *f) {
    return f->at.any.sa_family == AF_INET ? (const void *)&f->at.v4.sin_addr : (const void *)&f->at.v6.sin6_addr;
}

static bool same_network(const face *a, const face *b) {
    if (a->at.any.sa_family != b->at.any.sa_family || a->bits != b->bits || a->bits == 0) {
        return false;
    }
    const uint8_t *x = face_address(a), *y = face_address(b);
    int32_t whole = a->bits / 8, rest = a->bits % 8;
    return memcmp(x, y, (size_t)whole) == 0 && (rest == 0 || (x[whole] ^ y[whole]) >> (8 - rest) == 0);
}

static bool same_address(const face *a, const face *b) {
    return a->at.any.sa_family == b->at.any.sa_family &&
           memcmp(face_address(a), face_address(b), a->at.any.sa_family == AF_INET ? 4 : 16) == 0;
}

static int32_t count_bits(const struct sockaddr *mask) {
    struct sockaddr_in6 at = {0};
    int32_t bits = 0;
    memcpy(&at, mask, mask->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof at);
    const uint8_t *bytes = mask->sa_family == AF_INET ? (const uint8_t *)&((struct sockaddr_in *)(void *)&at)->sin_addr
                                                      : (const uint8_t *)&at.sin6_addr;
    for (int32_t i = 0; i < (mask->sa_family == AF_INET ? 4 : 16); i++) {
        bits += __builtin_popcount(bytes[i]);
    }
    return bits;
}

/* Those that other hosts could reach: up, not the loopback, not link-local. DDL_INTERFACE leaves only that one. */
static void faces_read(net *n) {
    struct ifaddrs *list = NULL;
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    const char *only = n->c->settings.interface_name;
    for (struct ifaddrs *i = getifaddrs(&list) == 0 ? list : NULL; i != NULL && n->own.count < FACES_MAX; i = i->ifa_next) {
        int kind = i->ifa_addr != NULL ? i->ifa_addr->sa_family : 0;
        bool wanted = (kind == AF_INET || kind == AF_INET6) && (i->ifa_flags & IFF_UP) != 0 &&
                      (i->ifa_flags & IFF_LOOPBACK) == 0 && (only == NULL || strcmp(only, i->ifa_name) == 0);
        face *f = &n->own.faces[n->own.count];
        struct ifreq ask;
        memset(&ask, 0, sizeof ask);
        if (!wanted) {
            continue;
        }
        memset(f, 0, sizeof *f);
        memcpy(&f->at, i->ifa_addr, kind == AF_INET ? sizeof f->at.v4 : sizeof f->at.v6);
        if (kind == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&f->at.v6.sin6_addr)) {
            continue;
        }
        snprintf(f->name, sizeof f->name, "%s", i->ifa_name);
        inet_ntop(kind, face_address(f), f->text, sizeof f->text);
        snprintf(ask.ifr_name, sizeof ask.ifr_name, "%s", f->name);
        f->mtu = fd >= 0 && ioctl(fd, SIOCGIFMTU, &ask) == 0 ? ask.ifr_mtu : 0;
        f->bits = i->ifa_netmask != NULL ? count_bits(i->ifa_netmask) : 0;
        n->own.count++;
    }
    freeifaddrs(list);
    if (fd >= 0) {
        close(fd);
    }
}

/* A socket on all addresses, on a port of DDL_PORT_RANGE where there is one. The kernel itself answers connections. */
static int net_socket(const net *n, int type, uint16_t *out_port) {
    int fd = socket(AF_INET6, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), no = 0;
    struct sockaddr_in6 at = {.sin6_family = AF_INET6};
    socklen_t bytes = sizeof at;
    int32_t port = n->c->settings.port_last;
    bool bound = false;
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
    while (fd >= 0 && !bound && port >= n->c->settings.port_first) {
        at.sin6_port = htons((uint16_t)port);
        bound = bind(fd, (struct sockaddr *)&at, sizeof at) == 0;
        if (port-- == 0) {
            break;
        }
    }
    if (!bound || (type == SOCK_STREAM && listen(fd, 1024) != 0) ||
        getsockname(fd, (struct sockaddr *)&at, &bytes) != 0) {
        if (fd >= 0) {
            close(fd);
        }
        return -1;
    }
    *out_port = at.sin6_port;
    return fd;
}

/* >>tries */

static void face_with_port(const face *f, uint16_t port, face *out) {
    *out = *f;
    if (f->at.any.sa_family == AF_INET) {
        out->at.v4.sin_port = port;
    } else {
        out->at.v6.sin6_port = port;
    }
}

static uint8_t reach_of(int error) {
    return error == 0 ? REACHED : error == ECONNREFUSED ? REFUSED : error == ETIMEDOUT ? NO_ANSWER : NO_ROUTE;
}

/* Tries all interfaces of one host at once, for two seconds at most. */
static void try_host(const net *n, const card *to, reached *out) {
    struct pollfd fds[FACES_MAX];
    uint64_t deadline = ddl__now_ns() + NET_WAIT_NS;
    int32_t waiting = 0;
    for (int32_t i = 0; i < FACES_MAX; i++) {
        fds[i] = (struct pollfd){.fd = -1, .events = POLLOUT};
        bool own = false;
        for (int32_t k = 0; i < to->count && k < n->own.count; k++) {
            own = own || same_address(&to->faces[i], &n->own.faces[k]); /* docker0 has one address on all hosts */
        }
        if (i >= to->count || own || to->tcp_port == 0) {
            continue;
        }
        face at;
        face_with_port(&to->faces[i], to->tcp_port, &at);
        fds[i].fd = socket(at.at.any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        bool begun = fds[i].fd >= 0 && (connect(fds[i].fd, &at.at.any, face_bytes(&at)) == 0 || errno == EINPROGRESS);
        out->tcp[i] = begun ? NO_ANSWER : reach_of(errno);
        waiting += begun;
    }
    for (uint64_t now = ddl__now_ns(); waiting > 0 && now < deadline; now = ddl__now_ns()) {
        poll(fds, FACES_MAX, (int)((deadline - now) / DDL__NS_PER_MS) + 1);
        for (int32_t i = 0; i < FACES_MAX; i++) {
            int error = 0;
            socklen_t bytes = sizeof error;
            if (fds[i].fd >= 0 && fds[i].revents != 0 && out->tcp[i] == NO_ANSWER) {
                getsockopt(fds[i].fd, SOL_SOCKET, SO_ERROR, &error, &bytes);
                out->tcp[i] = reach_of(error);
                waiting--;
                close(fds[i].fd);
                fds[i].fd = -1;
            }
        }
    }
    for (int32_t i = 0; i < FACES_MAX; i++) {
        if (fds[i].fd >= 0) {
            close(fds[i].fd);
        }
    }
}

/* Three small datagrams and three as large as this host's interface on that network takes, which may not be cut. */
static void send_whole(const net *n, const card *to) {
    static char bytes[65536];
    int always = IP_PMTUDISC_PROBE;
    for (int32_t i = 0; i < to->count && to->udp_port != 0; i++) {
        const face *own = NULL;
        for (int32_t k = 0; k < n->own.count; k++) {
            own = same_network(&to->faces[i], &n->own.faces[k]) ? &n->own.faces[k] : own;
        }
        if (own == NULL || own->mtu < 576 || own->mtu > 65536 || same_address(own, &to->faces[i])) {
            continue;
        }
        face at;
        face_with_port(&to->faces[i], to->udp_port, &at);
        bool v4 = at.at.any.sa_family == AF_INET;
        size_t whole = (size_t)own->mtu - (v4 ? 28 : 48);
        int fd = socket(at.at.any.sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
        setsockopt(fd, v4 ? IPPROTO_IP : IPPROTO_IPV6, v4 ? IP_MTU_DISCOVER : IPV6_MTU_DISCOVER, &always, sizeof always);
        memcpy(bytes, &n->own.host, 4);
        memcpy(bytes + 4, &i, 4);
        memcpy(bytes + 8, &n->c->job, 8);
        for (int32_t again = 0; fd >= 0 && again < 3; again++) {
            (void)!sendto(fd, bytes, NET_SMALL, 0, &at.at.any, face_bytes(&at));
            (void)!sendto(fd, bytes, whole, 0, &at.at.any, face_bytes(&at));
        }
        if (fd >= 0) {
            close(fd);
        }
    }
}

static void take_whole(net *n) {
    static char bytes[65536];
    for (ssize_t got; n->udp >= 0 && (got = recv(n->udp, bytes, sizeof bytes, MSG_DONTWAIT)) >= 0;) {
        int32_t host, i;
        uint64_t of_job;
        memcpy(&host, bytes, 4);
        memcpy(&i, bytes + 4, 4);
        memcpy(&of_job, bytes + 8, 8);
        if (got >= NET_SMALL && of_job == n->c->job && host >= 0 && host < n->hosts && i >= 0 && i < FACES_MAX) {
            *(got > NET_SMALL ? &n->row[host].whole[i] : &n->row[host].small[i]) = 1;
        }
    }
}

static ddl_status net_gather(const net *n, const void *own, void *all, size_t bytes) {
    return ddl_all_gather(ddl_world(n->c), DDL_VIEW((uint8_t *)(uintptr_t)own, bytes),
                          DDL_VIEW((uint8_t *)all, bytes * (size_t)n->c->world_size));
}

static void net_close(net *n) {
    for (int32_t i = 0; i < 2; i++) {
        int fd = i == 0 ? n->tcp : n->udp;
        if (fd >= 0) {
            close(fd);
        }
    }
    free(n->cards);
    free(n->leaders);
    free(n->row);
    free(n->matrix);
}

static void card_fill(net *n) {
    ddl_context *c = n->c;
    ddl__text plugins = {n->own.plugins, sizeof n->own.plugins, 0};
    n->own.host = c->links[c->rank].host;
    n->own.version = ddl_version();
    n->own.abi = DDL_PLUGIN_ABI;
    snprintf(n->own.host_name, sizeof n->own.host_name, "%.31s", c->links[c->rank].host_name);
    for (const ddl__plugin_record *p = c->loader.loaded; p != NULL; p = p->next) {
        ddl__text_add(&plugins, "%s%s %s", plugins.used > 0 ? ", " : "", p->name,
                      p->plugin->version != NULL ? p->plugin->version : "?");
    }
    faces_read(n);
    n->tcp = net_socket(n, SOCK_STREAM, &n->own.tcp_port);
    n->udp = net_socket(n, SOCK_DGRAM, &n->own.udp_port);
}

/* Everybody tells, tries and tells again. A negative status: the ranks cannot talk. */
static ddl_status net_look(net *n, ddl_context *c) {
    int32_t world = c->world_size;
    memset(n, 0, sizeof *n);
    n->c = c;
    n->hosts = c->host_count;
    n->tcp = n->udp = -1;
    n->cards = calloc((size_t)world, sizeof *n->cards);
    n->leaders = calloc((size_t)n->hosts, sizeof *n->leaders);
    n->row = calloc((size_t)n->hosts, sizeof *n->row);
    n->matrix = calloc((size_t)world * (size_t)n->hosts, sizeof *n->matrix);
    if (n->cards == NULL || n->leaders == NULL || n->row == NULL || n->matrix == NULL) {
        return DDL_ERR_NOMEM;
    }
    card_fill(n);
    DDL__TRY(net_gather(n, &n->own, n->cards, sizeof n->own));
    for (int32_t r = world - 1; r >= 0; r--) {
        n->leaders[c->links[r].host] = r;
    }
    bool speaks = n->leaders[n->own.host] == c->rank;
    for (int32_t h = 0; speaks && h < n->hosts; h++) {
        if (h != n->own.host) {
            try_host(n, &n->cards[n->leaders[h]], &n->row[h]);
            send_whole(n, &n->cards[n->leaders[h]]);
        }
    }
    DDL__TRY(ddl_barrier(ddl_world(c)));
    if (n->hosts > 1) {
        ddl__pause_ms(200); /* for what is still on its way */
    }
    take_whole(n);
    return net_gather(n, n->row, n->matrix, sizeof *n->row * (size_t)n->hosts);
}

/* >>findings: rank 0 sees all */

static const char *reach_text(uint8_t how) {
    static const char *const texts[] = {"not tried", "reached", "refused", "no answer", "no route"};
    return texts[how <= NO_ROUTE ? how : 0];
}

/* From host a to host b. */
static const reached *net_cell(const net *n, int32_t a, int32_t b) {
    return &n->matrix[(size_t)n->leaders[a] * (size_t)n->hosts + (size_t)b];
}

/* An interface by which every host is reached from every other, "" when there is none. */
static const char *net_common(const net *n) {
    const card *first = &n->cards[n->leaders[0]];
    for (int32_t i = 0; i < first->count; i++) {
        bool all = true;
        for (int32_t b = 0; all && b < n->hosts; b++) {
            const card *to = &n->cards[n->leaders[b]];
            for (int32_t a = 0; all && a < n->hosts; a++) {
                bool good = a == b;
                for (int32_t k = 0; k < to->count && !good; k++) {
                    good = strcmp(to->faces[k].name, first->faces[i].name) == 0 && net_cell(n, a, b)->tcp[k] == REACHED;
                }
                all = good;
            }
        }
        if (all) {
            return first->faces[i].name;
        }
    }
    return "";
}

/* What was tried from host a to the interfaces of host b. All that fail are told, as wrong when none is left. */
static void judge_pair(const net *n, findings *f, int32_t a, int32_t b) {
    const card *from = &n->cards[n->leaders[a]], *to = &n->cards[n->leaders[b]];
    const reached *tried = net_cell(n, a, b), *came = net_cell(n, b, a);
    const char *common = net_common(n);
    char fix[FINDING_BYTES];
    int32_t good = 0;
    for (int32_t i = 0; i < to->count; i++) {
        good += tried->tcp[i] == REACHED;
    }
    for (int32_t i = 0; i < to->count; i++) {
        if (tried->tcp[i] > REACHED) {
            snprintf(fix, sizeof fix, "open TCP from %s to %s on all ports, or on DDL_PORT_RANGE; or name a network that "
                     "all reach: DDL_INTERFACE=%s", from->host_name, to->faces[i].text, common[0] != 0 ? common : "...");
            found(f, good > 0 ? 1 : 2, "interfaces", fix, "rank %d (%s) does not reach %s, %s of rank %d (%s): %s",
                  (int)n->leaders[a], from->host_name, to->faces[i].text, to->faces[i].name, (int)n->leaders[b],
                  to->host_name, reach_text(tried->tcp[i]));
        }
        if (came->small[i] && !came->whole[i]) {
            found(f, 1, "packets", "set the MTU of both ends to what the path takes: ip link set dev ... mtu 1500",
                  "from rank %d (%s) to %s, %s of rank %d (%s), packets as large as the sender's MTU are lost, small ones "
                  "are not", (int)n->leaders[a], from->host_name, to->faces[i].text, to->faces[i].name,
                  (int)n->leaders[b], to->host_name);
        }
    }
}

/* Interfaces of one network that differ in their MTU. */
static void judge_mtu(const net *n, findings *f, int32_t a, int32_t b) {
    const card *x = &n->cards[n->leaders[a]], *y = &n->cards[n->leaders[b]];
    char fix[FINDING_BYTES];
    for (int32_t i = 0; i < x->count; i++) {
        for (int32_t k = 0; k < y->count; k++) {
            const face *p = &x->faces[i], *q = &y->faces[k];
            if (same_network(p, q) && p->mtu != q->mtu) {
                bool first = p->mtu > q->mtu;
                snprintf(fix, sizeof fix, "on %s: ip link set dev %s mtu %d, or the larger one on both and all switches",
                         first ? x->host_name : y->host_name, first ? p->name : q->name,
                         (int)(first ? q->mtu : p->mtu));
                found(f, 1, "MTU", fix, "%s of rank %d (%s, %s) has %d, %s of rank %d (%s, %s) has %d, in one network",
                      p->name, (int)n->leaders[a], x->host_name, p->text, (int)p->mtu, q->name, (int)n->leaders[b],
                      y->host_name, q->text, (int)q->mtu);
            }
        }
    }
}

static void judge_versions(const net *n, findings *f) {
    const card *zero = &n->cards[0];
    int32_t differ = 0;
    for (int32_t r = 1; r < n->c->world_size; r++) {
        const card *o = &n->cards[r];
        if ((o->version != zero->version || o->abi != zero->abi || strcmp(o->plugins, zero->plugins) != 0) && differ++ < 4) {
            found(f, 1, "versions", "install the same ddl and the same plugins on all hosts (DDL_PLUGIN_PATH, make plugins)",
                  "rank %d (%s) has ddl %d, plugin ABI %d, plugins %s; rank 0 has ddl %d, ABI %d, plugins %s", (int)r,
                  o->host_name, (int)o->version, (int)o->abi, o->plugins[0] != 0 ? o->plugins : "none",
                  (int)zero->version, (int)zero->abi, zero->plugins[0] != 0 ? zero->plugins : "none");
        }
    }
    if (differ == 0) {
        found(f, 0, "versions", "", "all %d ranks have ddl %d.%d.%d, plugin ABI %d, plugins: %s", (int)n->c->world_size,
              DDL_VERSION_MAJOR, DDL_VERSION_MINOR, DDL_VERSION_PATCH, DDL_PLUGIN_ABI,
              zero->plugins[0] != 0 ? zero->plugins : "none");
    }
}

/* On rank 0. */
static void judge_network(const net *n, findings *f) {
    int32_t before = f->count;
    for (int32_t a = 0; a < n->hosts; a++) {
        for (int32_t b = 0; b < n->hosts; b++) {
            if (a != b) {
                judge_pair(n, f, a, b);
            }
            if (a < b) {
                judge_mtu(n, f, a, b);
            }
        }
    }
    if (f->count == before && n->hosts > 1) {
        found(f, 0, "interfaces", "", "every interface of %d hosts is reached from every other; whole packets pass",
              (int)n->hosts);
    } else if (n->hosts == 1) {
        found(f, 0, "interfaces", "", "all ranks are on one host: no network is between them");
    }
    judge_versions(n, f);
}

/* For people: from whom (rows) to whom (columns) by which interfaces, where something fails. */
static void print_matrix(const net *n) {
    bool bad = false;
    for (int32_t i = 0; i < n->hosts * n->hosts; i++) {
        for (int32_t k = 0; k < FACES_MAX; k++) {
            bad = bad || net_cell(n, i / n->hosts, i % n->hosts)->tcp[k] > REACHED;
        }
    }
    for (int32_t a = 0; bad && a < n->hosts && n->hosts <= 16; a++) {
        printf("%s  from rank %-4d", a == 0 ? "\n  who reaches whom, by TCP to each interface\n" : "", (int)n->leaders[a]);
        for (int32_t b = 0; b < n->hosts; b++) {
            const card *to = &n->cards[n->leaders[b]];
            printf("  | to rank %d:", (int)n->leaders[b]);
            for (int32_t i = 0; i < to->count && a != b; i++) {
                printf(" %s %s", to->faces[i].name, reach_text(net_cell(n, a, b)->tcp[i]));
            }
            printf("%s", a == b ? " itself" : "");
        }
        printf("\n");
    }
}

/* "network": a list of what was tried. */
static void print_matrix_json(const net *n) {
    bool first = true;
    printf("\"network\": [");
    for (int32_t i = 0; i < n->hosts * n->hosts; i++) {
        int32_t a = i / n->hosts, b = i % n->hosts;
        const card *to = &n->cards[n->leaders[b]];
        for (int32_t k = 0; k < to->count && a != b; k++) {
            const reached *came = net_cell(n, b, a);
            char name[64];
            printf("%s\n  {\"from\": %d, \"to\": %d, \"interface\": \"%s\", \"address\": \"%s\", \"mtu\": %d, \"tcp\": \"%s\", "
                   "\"small_packets\": %s, \"whole_packets\": %s}", first ? "" : ",", (int)n->leaders[a],
                   (int)n->leaders[b], ddl__json_text(to->faces[k].name, name, sizeof name), to->faces[k].text,
                   (int)to->faces[k].mtu, reach_text(net_cell(n, a, b)->tcp[k]), came->small[k] ? "true" : "false",
                   came->whole[k] ? "true" : "false");
            first = false;
        }
    }
    printf("%s],\n", first ? "" : "\n");
}

/* >>clocks */

/* One question and its answer, in nanoseconds: when it was sent and came back by the asker's clock, and what the other's
 * said in between. */
typedef struct clock_sample {
    int64_t sent, theirs, back;
} clock_sample;

/* How far the other clock is ahead, by the round trip that was shortest; *out_error: at most so far from the truth, half
 * of that round trip. The method is Cristian's ("Probabilistic clock synchronization", 1989). */
static int64_t clock_offset(const clock_sample *samples, int32_t count, int64_t *out_error) {
    const clock_sample *best = &samples[0];
    for (int32_t i = 1; i < count; i++) {
        best = samples[i].back - samples[i].sent < best->back - best->sent ? &samples[i] : best;
    }
    *out_error = (best->back - best->sent + 1) / 2;
    return best->theirs - (best->sent + (best->back - best->sent) / 2);
}

static int64_t wall_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * (int64_t)DDL__NS_PER_S + t.tv_nsec;
}

/* Rank 0 asks each rank in turn; the others answer. */
static ddl_status look_at_clocks(findings *f, ddl_context *c) {
    ddl_group *world = ddl_world(c);
    int64_t worst = 0;
    for (int32_t r = 1; r < c->world_size; r++) {
        clock_sample samples[NET_PINGS];
        for (int32_t i = 0; i < NET_PINGS && (c->rank == 0 || c->rank == r); i++) {
            int64_t word = 0;
            if (c->rank == 0) {
                samples[i].sent = wall_ns();
                DDL__TRY(ddl_send(world, DDL_VIEW(&word, 1), r, 78));
                DDL__TRY(ddl_recv(world, DDL_VIEW(&samples[i].theirs, 1), r, 78, NULL));
                samples[i].back = wall_ns();
            } else {
                DDL__TRY(ddl_recv(world, DDL_VIEW(&word, 1), 0, 78, NULL));
                word = wall_ns();
                DDL__TRY(ddl_send(world, DDL_VIEW(&word, 1), 0, 78));
            }
        }
        int64_t error = 0, offset = c->rank == 0 ? clock_offset(samples, NET_PINGS, &error) : 0;
        int64_t surely = (offset < 0 ? -offset : offset) - error;
        worst = surely > worst ? surely : worst;
        if (surely > CLOCK_BOUND_NS) {
            found(f, 1, "clocks", "chronyc makestep, and let chrony or systemd-timesyncd run on all hosts: logs, caches and "
                  "build tools compare times", "the clock of rank %d (%s) is %.3f s %s that of rank 0, give or take %.3f ms",
                  (int)r, c->links[r].host_name, (double)(offset < 0 ? -offset : offset) * 1e-9,
                  offset < 0 ? "behind" : "ahead of", (double)error * 1e-6);
        }
    }
    if (c->rank == 0 && worst <= CLOCK_BOUND_NS) {
        found(f, 0, "clocks", "", "of all %d ranks they differ by less than %d ms", (int)c->world_size,
              (int)(CLOCK_BOUND_NS / (int64_t)DDL__NS_PER_MS));
    }
    return DDL_OK;
}

#endif /* DDL_TOOLS_DOCTOR_NET_H */

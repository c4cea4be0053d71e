/* select: which provider, which adapter, which address.
 *
 * The order is efa, verbs, tcp; DDL_TRANSPORTS=fabric:NAME or DDL_FABRIC_PROVIDER takes one. Of its adapters those stay
 * that the settings admit and that other hosts can reach: loopback and bridges are never told to another host. Of these come
 * first those in the network by which the master is reached, as all ranks have one there, then those that are near to the
 * cores of this process; of equally good ones in one network the ranks of a host take turns. DDL_FABRIC_RAILS=2 takes two. Every
 * candidate and what became of it goes to the log (DDL_LOG=info) and is shown by ddl-info. */
#ifndef FABRIC_SELECT_H
#define FABRIC_SELECT_H

#include "loopback.h"
#include "rail.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#ifndef FABRIC_SYSFS
#define FABRIC_SYSFS "/sys" /* tests have one of their own */
#endif

/* What candidates are judged by. */
typedef struct fabric_wish {
    const char *provider;  /* or NULL */
    const char *domain, *interface_name;
    int interface_is_ours; /* named by DDL_FABRIC_INTERFACE, not by DDL_INTERFACE, which means sockets */
    struct sockaddr_storage subnet, route; /* ss_family 0: none */
    int subnet_bits, route_bits, rails;
    int32_t turn;      /* of equally good adapters this rank takes that one, modulo their number */
    int loopback_only; /* sockets: all ranks are here, or anybody could send to us */
    int authenticated; /* adapters: there is a job secret */
} fabric_wish;

static const char *const fabric_order[] = {"efa", "verbs", "tcp"};
enum { FABRIC_ORDER = 3, FABRIC_ALIKE = 64 };

/* >>addresses */

static int fabric_ip_within(const struct sockaddr_storage *a, const struct sockaddr_storage *net, int bits) {
    size_t bytes, others;
    const uint8_t *x = fabric_ip(a, &bytes), *y = fabric_ip(net, &others);
    int same = bytes == others && bits <= (int)bytes * 8;
    for (int i = 0; same && i < bits; i++) {
        same = ((x[i / 8] ^ y[i / 8]) & (0x80 >> i % 8)) == 0;
    }
    return same;
}

static int fabric_ip_is_loopback(const struct sockaddr_storage *a) {
    size_t bytes;
    const uint8_t *x = fabric_ip(a, &bytes);
    return (bytes == 4 && x[0] == 127) || (bytes == 16 && IN6_IS_ADDR_LOOPBACK((const struct in6_addr *)(const void *)x));
}

static int fabric_ip_is_link_local(const struct sockaddr_storage *a) {
    size_t bytes;
    const uint8_t *x = fabric_ip(a, &bytes);
    return bytes == 16 && IN6_IS_ADDR_LINKLOCAL((const struct in6_addr *)(const void *)x);
}

static void fabric_ip_text(const struct sockaddr_storage *a, char out[INET6_ADDRSTRLEN]) {
    size_t bytes;
    const uint8_t *x = fabric_ip(a, &bytes);
    if (bytes == 0 || inet_ntop(a->ss_family, x, out, INET6_ADDRSTRLEN) == NULL) {
        snprintf(out, INET6_ADDRSTRLEN, "-");
    }
}

/* The address of a candidate, when it is one of IP. */
static int fabric_info_ip(const struct fi_info *info, struct sockaddr_storage *out) {
    memset(out, 0, sizeof *out);
    int is_ip = info->addr_format == FI_SOCKADDR || info->addr_format == FI_SOCKADDR_IN ||
                info->addr_format == FI_SOCKADDR_IN6;
    if (is_ip && info->src_addr != NULL && info->src_addrlen <= sizeof *out) {
        memcpy(out, info->src_addr, info->src_addrlen);
    }
    return is_ip;
}

/* How many bits the network of an interface has; all where that is not known. */
static int fabric_bits_of(const struct sockaddr *mask, int family) {
    static const size_t first[] = {offsetof(struct sockaddr_in, sin_addr), offsetof(struct sockaddr_in6, sin6_addr)};
    int six = family == AF_INET6, bits = 0, all = six ? 128 : 32;
    const uint8_t *bytes = mask != NULL ? (const uint8_t *)mask + first[six] : NULL;
    while (bytes != NULL && bits < all && (bytes[bits / 8] & (0x80 >> bits % 8)) != 0) {
        bits++;
    }
    return bits > 0 ? bits : all;
}

/* The interface that has an address. Returns the bits of its network; 0: there is none. */
static int fabric_interface_of(const struct sockaddr_storage *a, char out[IF_NAMESIZE]) {
    struct ifaddrs *list = NULL;
    int bits = 0;
    snprintf(out, IF_NAMESIZE, "?");
    if (getifaddrs(&list) != 0) {
        return 0;
    }
    for (struct ifaddrs *i = list; i != NULL; i = i->ifa_next) {
        struct sockaddr_storage at;
        memset(&at, 0, sizeof at);
        int family = i->ifa_addr != NULL ? i->ifa_addr->sa_family : 0;
        if (family == AF_INET || family == AF_INET6) {
            memcpy(&at, i->ifa_addr, family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6));
            if (fabric_ip_equal(&at, a)) {
                snprintf(out, IF_NAMESIZE, "%s", i->ifa_name);
                bits = fabric_bits_of(i->ifa_netmask, family);
                break;
            }
        }
    }
    freeifaddrs(list);
    return bits;
}

static int fabric_exists(const char *format, const char *name) {
    char path[256];
    snprintf(path, sizeof path, format, name);
    return access(path, F_OK) == 0;
}

/* The address of this machine on the way to another: what the routing table would use. Nothing is sent. */
static void fabric_route(const char *towards, struct sockaddr_storage *out) {
    struct addrinfo hints = {.ai_socktype = SOCK_DGRAM}, *found = NULL;
    socklen_t bytes = sizeof *out;
    memset(out, 0, sizeof *out);
    if (getaddrinfo(towards, "9", &hints, &found) != 0) {
        return;
    }
    int fd = socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, found->ai_addr, found->ai_addrlen) != 0 ||
        getsockname(fd, (struct sockaddr *)out, &bytes) != 0) {
        memset(out, 0, sizeof *out);
    }
    if (fd >= 0) {
        close(fd);
    }
    freeaddrinfo(found);
}

/* "10.1.0.0/16" */
static int fabric_subnet_parse(const char *text, struct sockaddr_storage *out, int *bits) {
    char address[64];
    int n = 0;
    memset(out, 0, sizeof *out);
    if (sscanf(text, "%63[0-9a-fA-F.:]/%d%n", address, bits, &n) != 2 || text[n] != 0 || *bits < 0) {
        return 0;
    }
    struct sockaddr_in *in = (struct sockaddr_in *)out;
    struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)out;
    if (inet_pton(AF_INET, address, &in->sin_addr) == 1) {
        out->ss_family = AF_INET;
        return *bits <= 32;
    }
    if (inet_pton(AF_INET6, address, &in6->sin6_addr) == 1) {
        out->ss_family = AF_INET6;
        return *bits <= 128;
    }
    return 0;
}

/* >>adapters */

/* Whether a list of cores as in sysfs, "0-3,8", has one that this process may use. */
static int fabric_cores_meet(const char *list) {
    cpu_set_t mine;
    CPU_ZERO(&mine);
    sched_getaffinity(0, sizeof mine, &mine);
    while (*list >= '0' && *list <= '9') {
        char *end;
        long first = strtol(list, &end, 10), last = first;
        if (*end == '-') {
            last = strtol(end + 1, &end, 10);
        }
        for (long core = first; core <= last && core < CPU_SETSIZE; core++) {
            if (CPU_ISSET((size_t)core, &mine)) {
                return 1;
            }
        }
        list = *end == ',' ? end + 1 : end;
    }
    return 0;
}

/* 0: near to the cores of this process; 1: not known; 2: far. */
static int fabric_distance(const struct fi_info *info) {
    const struct fi_bus_attr *bus = info->nic != NULL ? info->nic->bus_attr : NULL;
    char path[128], cores[512] = "";
    if (bus == NULL || bus->bus_type != FI_BUS_PCI) {
        return 1;
    }
    const struct fi_pci_attr *pci = &bus->attr.pci;
    snprintf(path, sizeof path, FABRIC_SYSFS "/bus/pci/devices/%04x:%02x:%02x.%x/local_cpulist", pci->domain_id,
             pci->bus_id, pci->device_id, pci->function_id);
    FILE *file = fopen(path, "re");
    int known = file != NULL && fgets(cores, sizeof cores, file) != NULL;
    if (file != NULL) {
        fclose(file);
    }
    return !known ? 1 : fabric_cores_meet(cores) ? 0 : 2;
}

/* An RDMA device without hardware behind it (rxe, siw) is slower than the sockets of the kernel. */
static int fabric_is_software(const struct fi_info *info) {
    char device[64];
    snprintf(device, sizeof device, "%.63s", info->domain_attr->name != NULL ? info->domain_attr->name : "");
    device[strcspn(device, "-")] = 0; /* verbs: mlx5_0-xrc and the like */
    return fabric_exists(FABRIC_SYSFS "/class/infiniband/%s", device) &&
           !fabric_exists(FABRIC_SYSFS "/class/infiniband/%s/device", device);
}

static int fabric_any_device(void) {
    DIR *dir = opendir(FABRIC_SYSFS "/class/infiniband");
    int found = 0;
    for (struct dirent *e = dir != NULL ? readdir(dir) : NULL; e != NULL && !found; e = readdir(dir)) {
        found = e->d_name[0] != '.';
    }
    if (dir != NULL) {
        closedir(dir);
    }
    return found;
}

/* verbs lists an adapter once more by another protocol, mlx5_0 as mlx5_0-xrc and mlx5_0-dgram too: the first since ofi_rxm may
 * share receives (FI_OFI_RXM_USE_SRX, which we set). Two rails of one adapter and port would gain nothing. */
static int fabric_is_again(const struct fi_info *info) {
    static const char *const suffixes[] = {"-xrc", "-dgram"};
    const char *last = info->domain_attr->name != NULL ? strrchr(info->domain_attr->name, '-') : NULL;
    int again = 0;
    for (size_t i = 0; i < sizeof suffixes / sizeof suffixes[0] && last != NULL; i++) {
        again |= strcmp(last, suffixes[i]) == 0;
    }
    return again && fabric_provider_is(info, "verbs");
}

/* EFA of libfabric 2.x lists each adapter first by a kind of endpoint whose messages are no longer than a packet, with domain and
 * address of the other kind: the name of the fabric differs (efa_util_prov_initialize in prov/efa/src/efa_prov.c). */
static int fabric_is_direct(const struct fi_info *info) {
    return info->fabric_attr->name != NULL && strcmp(info->fabric_attr->name, "efa-direct") == 0;
}

/* >>judging */

/* Why a candidate is not taken; NULL: it may be. */
static const char *fabric_refusal(const fabric_wish *w, const struct fi_info *info) {
    struct sockaddr_storage at;
    char name[IF_NAMESIZE];
    int is_ip = fabric_info_ip(info, &at);
    if (w->domain != NULL && (info->domain_attr->name == NULL || strcmp(w->domain, info->domain_attr->name) != 0)) {
        return "DDL_FABRIC_DOMAIN names another";
    }
    if (w->domain == NULL && fabric_is_again(info)) {
        return "it is an adapter that is listed without -xrc or -dgram too, and counts once; DDL_FABRIC_DOMAIN chooses it all the same";
    }
    if (fabric_is_direct(info)) {
        return "it is efa-direct, whose messages are no longer than a packet; the adapter is listed as efa, too";
    }
    int sockets = fabric_is_sockets(info);
    if (!sockets && !w->authenticated) {
        return "without a job secret no adapter is used, as it hears other hosts; ddlrun makes one, DDL_SECRET gives one";
    }
    if (!is_ip) {
        return w->subnet.ss_family != 0 || (w->interface_name != NULL && w->interface_is_ours)
                   ? "it has no address of IP for DDL_FABRIC_INTERFACE or DDL_FABRIC_SUBNET; DDL_FABRIC_DOMAIN chooses it" : NULL;
    }
    if (at.ss_family == 0 || fabric_ip_is_link_local(&at)) {
        return "it has no address that others can use";
    }
    fabric_interface_of(&at, name);
    if (w->interface_name != NULL && strcmp(w->interface_name, name) != 0) {
        return "another interface was asked for";
    }
    if (w->subnet.ss_family != 0 && !fabric_ip_within(&at, &w->subnet, w->subnet_bits)) {
        return "it is not in DDL_FABRIC_SUBNET";
    }
    if (w->loopback_only && sockets) {
        return fabric_ip_is_loopback(&at) ? NULL : "only loopback is used: all ranks are here, or there is no job secret";
    }
    if (fabric_ip_is_loopback(&at)) {
        return "loopback leads to no other host";
    }
    if (w->interface_name == NULL && w->subnet.ss_family == 0) {
        if (fabric_exists(FABRIC_SYSFS "/class/net/%s/bridge", name)) {
            return "it is a bridge";
        }
        if (sockets && w->route.ss_family != 0 && !fabric_ip_equal(&w->route, &at)) {
            return "it does not lead to the master";
        }
    }
    return NULL;
}

static const char *fabric_domain_name(const struct fi_info *info) {
    return info->domain_attr->name != NULL ? info->domain_attr->name : "?";
}

static void fabric_tell(fabric_self *s, const struct fi_info *info, const char *verdict) {
    struct sockaddr_storage at;
    char text[INET6_ADDRSTRLEN];
    fabric_info_ip(info, &at);
    fabric_ip_text(&at, text);
    fabric_log(s, DDL_LOG_INFO, "%s on %s (%s): %s", info->fabric_attr->prov_name, fabric_domain_name(info), text, verdict);
}

/* By one kind of endpoint. */
static int fabric_same_adapter(const struct fi_info *a, const struct fi_info *b) {
    return strcmp(a->fabric_attr->prov_name, b->fabric_attr->prov_name) == 0 &&
           fabric_is_direct(a) == fabric_is_direct(b) && a->domain_attr->name != NULL &&
           b->domain_attr->name != NULL && strcmp(a->domain_attr->name, b->domain_attr->name) == 0 &&
           a->src_addrlen == b->src_addrlen &&
           (a->src_addr == NULL || memcmp(a->src_addr, b->src_addr, a->src_addrlen) == 0);
}

/* libfabric lists one adapter several times, with fewer and fewer capabilities: the first counts. */
static int fabric_seen(const struct fi_info *list, const struct fi_info *info) {
    for (const struct fi_info *i = list; i != info; i = i->next) {
        if (fabric_same_adapter(i, info)) {
            return 1;
        }
    }
    return 0;
}

/* 0 to 2: in the network by which the master is reached, and as near as fabric_distance says; 3 to 5: in another one. Where
 * each host has adapters in several networks, as of one rail each, the nearest may be in one that others are not in. */
static int fabric_rank(const fabric_wish *w, const struct fi_info *info) {
    struct sockaddr_storage at;
    int there = fabric_info_ip(info, &at) && w->route.ss_family != 0 && fabric_ip_within(&at, &w->route, w->route_bits);
    return fabric_distance(info) + (there ? 0 : 3);
}

/* The best of those that are admitted and not taken by a rail yet. */
static const struct fi_info *fabric_best(fabric_self *s, const fabric_wish *w, const char *provider,
                                         const struct fi_info *list) {
    const struct fi_info *best = NULL;
    int best_rank = 6;
    for (const struct fi_info *i = list; i != NULL; i = i->next) {
        int taken = fabric_seen(list, i) || !fabric_provider_is(i, provider);
        for (int32_t r = 0; r < s->rail_count && !taken; r++) {
            const struct fi_info *rail = s->rails[r].info;
            taken = strcmp(rail->fabric_attr->prov_name, i->fabric_attr->prov_name) != 0 ||
                    strcmp(fabric_domain_name(rail), fabric_domain_name(i)) == 0;
        }
        if (taken) {
            continue;
        }
        const char *why = fabric_refusal(w, i);
        int rank = fabric_rank(w, i);
        if (s->rail_count == 0) {
            fabric_tell(s, i, why != NULL ? why : rank % 3 == 2 ? "can be used, but is far from these cores" : "can be used");
        }
        if (why == NULL && rank < best_rank) {
            best = i;
            best_rank = rank;
        }
    }
    return best;
}

static ddl_status fabric_take(fabric_self *s, const struct fi_info *info) {
    struct fi_info *copy = s->lib.dupinfo(info);
    if (copy == NULL) {
        return DDL_ERR_NOMEM;
    }
    copy->next = NULL;
    s->rails[s->rail_count].wait_fd = -1;
    s->rails[s->rail_count++].info = copy;
    return DDL_OK;
}

/* >>turns
 * Eight ranks beside eight adapters, four of each socket, would all take the first of their socket. */

/* In bits per second; 0: not known. */
static uint64_t fabric_speed(const struct fi_info *info) {
    return info->nic != NULL && info->nic->link_attr != NULL ? info->nic->link_attr->speed : 0;
}

/* Whether two adapters have one subnet prefix of InfiniBand's own addresses (bytes 8 to 15 of struct sockaddr_ib), and one that
 * somebody has given: where nobody did all networks have fe80::. */
static int fabric_ib_same_subnet(const struct fi_info *a, const struct fi_info *b) {
    static const uint8_t nobody_s[8] = {0xfe, 0x80};
    const uint8_t *x = a->src_addr, *y = b->src_addr;
    return x != NULL && y != NULL && a->src_addrlen >= 16 && b->src_addrlen >= 16 && b->addr_format == FI_SOCKADDR_IB &&
           memcmp(x + 8, y + 8, 8) == 0 && memcmp(x + 8, nobody_s, 8) != 0;
}

/* Whether a rank with the one reaches ranks with the other, as far as their addresses tell: in one network of IP or InfiniBand, or
 * of EFA, whose adapters all reach each other. Where it cannot be told: no. */
static int fabric_same_network(const struct fi_info *a, const struct fi_info *b) {
    struct sockaddr_storage at, other;
    char name[IF_NAMESIZE];
    if (strcmp(a->fabric_attr->prov_name, b->fabric_attr->prov_name) != 0 || fabric_is_sockets(a)) {
        return 0;
    }
    if (a->addr_format == FI_SOCKADDR_IB) {
        return fabric_ib_same_subnet(a, b);
    }
    int bits = fabric_info_ip(a, &at) && fabric_info_ip(b, &other) ? fabric_interface_of(&at, name) : 0;
    return fabric_provider_is(a, "efa") || (bits > 0 && fabric_ip_within(&other, &at, bits));
}

/* Those of the list that are as good as the one that was taken first: admitted, as near, as fast, and in its network. One that has
 * several addresses there counts once. */
static int fabric_alike(const fabric_self *s, const fabric_wish *w, const char *provider, const struct fi_info *list,
                        const struct fi_info *out[FABRIC_ALIKE]) {
    const struct fi_info *first = s->rails[0].info;
    int count = 0;
    for (const struct fi_info *i = list; i != NULL && count < FABRIC_ALIKE; i = i->next) {
        int alike = fabric_provider_is(i, provider) && fabric_same_network(first, i) && fabric_refusal(w, i) == NULL &&
                    fabric_rank(w, i) == fabric_rank(w, first) && fabric_speed(i) == fabric_speed(first);
        for (int k = 0; k < count && alike; k++) {
            alike = strcmp(fabric_domain_name(out[k]), fabric_domain_name(i)) != 0;
        }
        if (alike) {
            out[count++] = i;
        }
    }
    return count;
}

/* Whether a rail is one of those. */
static int fabric_is_among(const fabric_rail *r, const struct fi_info *const *those, int count) {
    int among = 0;
    for (int i = 0; i < count && !among; i++) {
        among = strcmp(fabric_domain_name(those[i]), fabric_domain_name(r->info)) == 0;
    }
    return among;
}

/* Others in place of the rails that were taken, where all are alike: then each rank reaches all others with whichever it has.
 * Rails in several networks stay, as rail i is to be in the network of all other ranks' rail i. */
static ddl_status fabric_take_turns(fabric_self *s, const fabric_wish *w, const char *provider, const struct fi_info *list) {
    const struct fi_info *alike[FABRIC_ALIKE];
    int count = s->rail_count > 0 ? fabric_alike(s, w, provider, list, alike) : 0;
    for (int32_t r = 0; r < s->rail_count; r++) {
        if (!fabric_is_among(&s->rails[r], alike, count)) {
            return DDL_OK;
        }
    }
    if (count <= s->rail_count) {
        return DDL_OK;
    }
    int taken = s->rail_count;
    while (s->rail_count > 0) {
        s->lib.freeinfo(s->rails[--s->rail_count].info);
    }
    fabric_log(s, DDL_LOG_INFO, "%d adapters of %s are equally near and fast, and in one network: the ranks of a host take turns", count,
               alike[0]->fabric_attr->prov_name);
    ddl_status status = DDL_OK;
    for (int r = 0; r < taken && status == DDL_OK; r++) {
        status = fabric_take(s, alike[((int64_t)w->turn * taken + r) % count]);
    }
    return status;
}

/* Of the names that were tried, the one that a candidate is of; else NULL. */
static const char *fabric_tried(const struct fi_info *info, const char *const *names, int tried) {
    for (int i = 0; i < tried; i++) {
        if (fabric_provider_is(info, names[i])) {
            return names[i];
        }
    }
    return NULL;
}

/* Why the other providers were not looked at, a line for each, and which of the order libfabric does not offer. */
static void fabric_tell_others(fabric_self *s, const fabric_wish *w, const struct fi_info *list, const char *const *names,
                               int tried) {
    for (const struct fi_info *i = list; i != NULL; i = i->next) {
        const char *name = i->fabric_attr->prov_name;
        int again = fabric_tried(i, names, tried) != NULL;
        for (const struct fi_info *before = list; before != i && !again; before = before->next) {
            again = strcmp(before->fabric_attr->prov_name, name) == 0;
        }
        if (!again && w->provider != NULL) {
            fabric_log(s, DDL_LOG_INFO, "%s: not looked at, as %s is asked for", name, w->provider);
        } else if (!again && fabric_tried(i, fabric_order, FABRIC_ORDER) != NULL) {
            fabric_log(s, DDL_LOG_INFO, "%s: not looked at, as %s comes first", name, names[tried - 1]);
        } else if (!again) {
            const char *layer = strstr(name, ";ofi_rxm");
            fabric_log(s, DDL_LOG_INFO, "%s: only looked at when DDL_TRANSPORTS or DDL_FABRIC_PROVIDER names %.*s", name,
                       layer != NULL ? (int)(layer - name) : (int)strlen(name), name);
        }
    }
    for (int i = 0; i < tried; i++) {
        const struct fi_info *found = list;
        while (found != NULL && !fabric_provider_is(found, names[i])) {
            found = found->next;
        }
        if (found == NULL) {
            fabric_log(s, DDL_LOG_INFO, "%s: not in this libfabric, or without an adapter that has what is needed", names[i]);
        }
    }
}

static int fabric_goes_before(const fabric_wish *w, const struct fi_info *a, const struct fi_info *b) {
    int elsewhere = fabric_rank(w, a) / 3 - fabric_rank(w, b) / 3;
    return elsewhere != 0 ? elsewhere < 0 : strcmp(fabric_domain_name(a), fabric_domain_name(b)) < 0;
}

/* The network of the master first, then by name: rail i of a rank talks to rail i of another, and adapters of one name hang on
 * one switch, as a rule, wherever the cores of their ranks are. */
static void fabric_rails_sort(fabric_self *s, const fabric_wish *w) {
    for (int32_t i = 1; i < s->rail_count; i++) {
        struct fi_info *info = s->rails[i].info;
        int32_t at = i;
        for (; at > 0 && fabric_goes_before(w, info, s->rails[at - 1].info); at--) {
            s->rails[at].info = s->rails[at - 1].info;
        }
        s->rails[at].info = info;
    }
}

/* The provider by its name, or the first of the order that has an adapter. */
static ddl_status fabric_choose(fabric_self *s, const fabric_wish *w, const struct fi_info *list) {
    const char *const *names = w->provider != NULL ? &w->provider : fabric_order;
    int count = w->provider != NULL ? 1 : FABRIC_ORDER, tried = 0;
    while (tried < count && s->rail_count == 0) {
        const char *name = names[tried++];
        const struct fi_info *best;
        while (s->rail_count < w->rails && (best = fabric_best(s, w, name, list)) != NULL) {
            ddl_status status = fabric_take(s, best);
            if (status < 0) {
                return status;
            }
        }
    }
    ddl_status status = fabric_take_turns(s, w, names[tried - 1], list);
    if (status < 0) {
        return status;
    }
    fabric_tell_others(s, w, list, names, tried);
    fabric_rails_sort(s, w);
    for (int32_t i = 0; i < s->rail_count; i++) {
        fabric_tell(s, s->rails[i].info, "is taken");
    }
    if (s->rail_count > 0 && s->rail_count < w->rails) {
        fabric_log(s, DDL_LOG_WARN, "DDL_FABRIC_RAILS asks for %d adapters, and of %s there %s %d; DDL_LOG=info says why others "
                   "were refused", w->rails, s->rails[0].info->fabric_attr->prov_name, s->rail_count == 1 ? "is" : "are",
                   s->rail_count);
    }
    return s->rail_count > 0 ? DDL_OK : DDL_ERR_UNSUPPORTED;
}

/* >>asking */

static struct fi_info *fabric_hints(fabric_self *s) {
    struct fi_info *hints = s->lib.dupinfo(NULL);
    const char *progress = s->host->setting(s->host, "FABRIC_PROGRESS"); /* NULL, auto or manual */
    if (hints == NULL) {
        return NULL;
    }
    hints->caps = FI_MSG | FI_RMA;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
    hints->domain_attr->threading = FI_THREAD_DOMAIN; /* the context's lock */
    hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
    if (progress != NULL) {
        int automatic = strcmp(progress, "auto") == 0;
        hints->domain_attr->data_progress = automatic ? FI_PROGRESS_AUTO : FI_PROGRESS_MANUAL;
        hints->domain_attr->control_progress = hints->domain_attr->data_progress;
        hints->domain_attr->threading = automatic ? FI_THREAD_SAFE : FI_THREAD_DOMAIN;
    }
    return hints;
}

/* Why nothing was found, and what to do. */
static void fabric_nothing(fabric_self *s, const fabric_wish *w, int result, const struct fi_info *list) {
    int there = 0;
    for (const struct fi_info *i = list; i != NULL && w->provider != NULL; i = i->next) {
        there += fabric_provider_is(i, w->provider);
    }
    if (w->interface_name != NULL && if_nametoindex(w->interface_name) == 0) {
        fabric_log(s, DDL_LOG_WARN, "there is no interface %s; check DDL_FABRIC_INTERFACE or DDL_INTERFACE against `ip "
                   "link`", w->interface_name);
    } else if (result != 0 || w->provider != NULL) {
        fabric_log(s, DDL_LOG_WARN, "libfabric has no provider%s%s with an adapter that can be used here (%s); `fi_info` "
                   "lists what it has, DDL_LOG=info why each was refused", w->provider != NULL ? " " : "",
                   w->provider != NULL ? w->provider : "", result != 0    ? fabric_error(s, result)
                   : there == 0 ? "it is not in this libfabric, or found no adapter"
                                : "all were refused");
    } else {
        fabric_log(s, DDL_LOG_WARN, "no adapter that libfabric has can be used; DDL_LOG=info says why each was refused");
    }
}

static ddl_status fabric_select(fabric_self *s, const fabric_wish *w) {
    struct fi_info *hints = fabric_hints(s), *list = NULL;
    if (hints == NULL) {
        return DDL_ERR_NOMEM;
    }
    int result = fabric_getinfo(&s->lib, NULL, 0, hints, &list);
    ddl_status status = result == 0 ? fabric_choose(s, w, list) : DDL_ERR_UNSUPPORTED;
    if (status == DDL_ERR_UNSUPPORTED) {
        fabric_nothing(s, w, result, list);
    }
    if (list != NULL) {
        s->lib.freeinfo(list);
    }
    s->lib.freeinfo(hints);
    return status;
}

/* >>connections */

/* tcp's own endpoint of the address that was chosen; NULL: there is none. */
static struct fi_info *fabric_connected_info(fabric_self *s, const struct fi_info *list, const struct fi_info *chosen) {
    for (const struct fi_info *i = list; i != NULL; i = i->next) {
        if (strcmp(i->fabric_attr->prov_name, "tcp") == 0 && i->src_addrlen == chosen->src_addrlen && i->src_addr != NULL &&
            memcmp(i->src_addr, chosen->src_addr, i->src_addrlen) == 0) {
            struct fi_info *copy = s->lib.dupinfo(i);
            if (copy != NULL) {
                copy->next = NULL;
            }
            return copy;
        }
    }
    return NULL;
}

/* Of all rails, or of none. tcp;ofi_rxm by its whole name, the modes that tests demand, and data that the kernel moves go without
 * connections of our own. */
static ddl_status fabric_connects_select(fabric_self *s, const fabric_wish *w) {
    struct fi_info *found[FABRIC_RAILS_MAX] = {NULL}, *list = NULL;
    int named = w->provider != NULL && strchr(w->provider, ';') != NULL;
    if (!fabric_provider_is(s->rails[0].info, "tcp") || named || s->force_mr != 0 || fabric_library_moves()) {
        return DDL_OK;
    }
    struct fi_info *hints = fabric_hints(s);
    if (hints == NULL) {
        return DDL_ERR_NOMEM;
    }
    hints->caps = FI_MSG;
    hints->ep_attr->type = FI_EP_MSG;
    hints->domain_attr->mr_mode = 0;
    int result = fabric_getinfo(&s->lib, NULL, 0, hints, &list);
    s->connects = result == 0;
    for (int32_t i = 0; i < s->rail_count && s->connects; i++) {
        found[i] = fabric_connected_info(s, list, s->rails[i].info);
        s->connects = found[i] != NULL;
    }
    for (int32_t i = 0; i < s->rail_count; i++) {
        struct fi_info *not_used = s->connects ? s->rails[i].info : found[i];
        s->rails[i].info = s->connects ? found[i] : s->rails[i].info;
        if (not_used != NULL) {
            s->lib.freeinfo(not_used);
        }
    }
    s->lib.freeinfo(hints);
    if (list != NULL) {
        s->lib.freeinfo(list);
    }
    if (s->connects) {
        fabric_tell(s, s->rails[0].info, "its own connections are used, without ofi_rxm");
    } else {
        fabric_log(s, DDL_LOG_INFO, "tcp has no endpoints for connections at these addresses: payloads go in pieces");
    }
    return DDL_OK;
}

/* >>hmem
 * FI_HMEM is asked for when the adapters are chosen: asked for at once it would leave out those without it, and sockets
 * with it would be taken for an adapter without. */

/* Why an adapter does not read and write memory of devices; NULL: it does, and is described anew. */
static const char *fabric_hmem_ask(fabric_self *s, fabric_rail *r) {
    struct fi_info *hints = fabric_hints(s), *list = NULL, *copy = NULL;
    if (hints == NULL) {
        return "there is no memory to ask for it";
    }
    hints->caps |= FI_HMEM;
    hints->domain_attr->mr_mode |= FI_MR_HMEM;
    int result = fabric_getinfo(&s->lib, NULL, 0, hints, &list);
    const char *why = result != 0 ? fabric_error(s, result) : "other adapters have it";
    const struct fi_info *i = list;
    while (i != NULL && !fabric_same_adapter(i, r->info)) {
        i = i->next;
    }
    if (i != NULL) {
        copy = s->lib.dupinfo(i);
        why = copy == NULL ? "there is no memory to ask for it" : NULL;
    }
    if (copy != NULL) {
        copy->next = NULL;
        s->lib.freeinfo(r->info);
        r->info = copy;
    }
    if (list != NULL) {
        s->lib.freeinfo(list);
    }
    s->lib.freeinfo(hints);
    return why;
}

static void fabric_hmem_select(fabric_self *s) {
    int cuda = s->device != NULL && strcmp(s->device, "cuda") == 0;
    s->hmem_refused = !cuda ? "the plugin knows how to register memory of CUDA alone"
                      : s->connects ? "it is software, and would go through memory of the host anyway" : NULL;
    for (int32_t i = 0; s->device != NULL && i < s->rail_count && s->hmem_refused == NULL; i++) {
        s->hmem_refused = fabric_hmem_ask(s, &s->rails[i]);
    }
}

/* When all attributes are known. All ranks come to the same, as a rule: one says it. */
static void fabric_hmem_tell(fabric_self *s) {
    const char *provider = s->rails[0].info->fabric_attr->prov_name;
    ddl_log_level level = s->rank == 0 ? DDL_LOG_INFO : DDL_LOG_DEBUG;
    if (s->hmem_refused == NULL && (s->force_no_rma || (s->rails[0].info->caps & FI_RMA) == 0)) {
        s->hmem_refused = "it has no reads";
    }
    if (s->hmem_refused == NULL && s->unread) {
        s->hmem_refused = "it is software, and would go through memory of the host anyway";
    }
    if (s->device != NULL && s->hmem_refused == NULL) {
        fabric_log(s, level, "%s has FI_HMEM: messages between tensors on devices are read by the adapter", provider);
    } else if (s->device != NULL) {
        fabric_log(s, level, "%s does not reach memory of devices (FI_HMEM): %s. Messages between tensors there go through "
                   "pinned memory of the host", provider, s->hmem_refused);
    }
}

#endif /* FABRIC_SELECT_H */

/* Which adapter the libfabric plugin takes, of lists of fi_info that are made up, with interfaces and a /sys that are too:
 * loopback and bridges are never told to another host, the nearest adapter comes first. libfabric itself is not needed.
 * tests/run: variants=gcc,asan,valgrind timeout=60 quick=yes */
#include "test.h"

#include <ifaddrs.h>
#include <pthread.h>
#include <sys/stat.h>

#define FABRIC_SYSFS "sys" /* in a folder of this test */
#define getifaddrs(list) made_up_getifaddrs(list)
#define freeifaddrs(list) ((void)(list))
static int made_up_getifaddrs(struct ifaddrs **list);

/* Gives others a turn in the midst of a change of the environment. */
static char *slow_strdup(const char *text) {
    nanosleep(&(struct timespec){0, 20000}, NULL);
    return strdup(text);
}
#define strdup(text) slow_strdup(text)

#include "fabric_host.h"

/* ---- a machine ---- */

enum { NICS = 10 };

typedef struct machine {
    endpoint e;
    fabric_self s;
    int count;
    struct fi_info info[NICS];
    struct fi_fabric_attr fabric[NICS];
    struct fi_domain_attr domain[NICS];
    struct fid_nic nic[NICS];
    struct fi_bus_attr bus[NICS];
    struct fi_link_attr link[NICS];
    struct sockaddr_storage at[NICS];
    char interface[NICS][16], domain_name[NICS][16];
    char folder[64];
} machine;

static machine *here;

static int made_up_getifaddrs(struct ifaddrs **list) {
    static struct ifaddrs each[NICS];
    static struct sockaddr_in mask = {.sin_family = AF_INET};
    memset(&mask.sin_addr, 255, 3); /* each network is a /24 */
    memset(each, 0, sizeof each);
    for (int i = 0; i < here->count; i++) {
        each[i] = (struct ifaddrs){.ifa_next = i + 1 < here->count ? &each[i + 1] : NULL, .ifa_name = here->interface[i],
                                   .ifa_addr = (struct sockaddr *)&here->at[i], .ifa_netmask = (struct sockaddr *)&mask};
    }
    *list = here->count > 0 ? each : NULL;
    return 0;
}

static struct fi_info *made_up_dupinfo(const struct fi_info *info) {
    static struct fi_info copies[FABRIC_RAILS_MAX], hints;
    static struct fi_ep_attr ep;
    static struct fi_domain_attr domain;
    if (info == NULL) {
        hints = (struct fi_info){.ep_attr = &ep, .domain_attr = &domain};
        return &hints;
    }
    copies[here->s.rail_count] = *info;
    return &copies[here->s.rail_count];
}

static void made_up_freeinfo(struct fi_info *info) { (void)info; }

static int made_up_getinfo(uint32_t api, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
                           struct fi_info **out) {
    (void)api, (void)node, (void)service, (void)flags, (void)hints;
    *out = here->info;
    return 0;
}

/* Writes a file of the made-up /sys, with its folders. */
static void sys_file(const char *path, const char *text) {
    char part[256];
    for (const char *slash = strchr(path, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        snprintf(part, sizeof part, "%.*s", (int)(slash - path), path);
        mkdir(part, 0700);
    }
    FILE *file = fopen(path, "w");
    REQUIRE(file != NULL);
    fputs(text, file);
    fclose(file);
}

static machine *machine_make(void) {
    machine *m = here = calloc(1, sizeof *m);
    endpoint_prepare(&m->e, 0, "tcp", NULL, NULL);
    m->s.host = &m->e.host;
    m->s.lib.dupinfo = made_up_dupinfo;
    m->s.lib.freeinfo = made_up_freeinfo;
    m->s.lib.getinfo = made_up_getinfo;
    snprintf(m->folder, sizeof m->folder, "/tmp/ddl-select-XXXXXX");
    CHECK(mkdtemp(m->folder) != NULL && chdir(m->folder) == 0);
    return m;
}

static void machine_free(machine *m) {
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", m->folder);
    CHECK(chdir("/") == 0 && system(command) == 0);
    free(m);
}

/* The next candidate of the list. ip NULL: it has no address of IP. */
static struct fi_info *adapter(machine *m, const char *provider, const char *domain, const char *interface, const char *ip) {
    int i = m->count++;
    struct sockaddr_in *in = (struct sockaddr_in *)&m->at[i];
    snprintf(m->interface[i], sizeof m->interface[i], "%s", interface);
    snprintf(m->domain_name[i], sizeof m->domain_name[i], "%s", domain);
    m->fabric[i].prov_name = (char *)(uintptr_t)provider;
    m->domain[i].name = m->domain_name[i];
    m->info[i] = (struct fi_info){.fabric_attr = &m->fabric[i], .domain_attr = &m->domain[i]};
    if (ip != NULL) {
        in->sin_family = AF_INET;
        CHECK_EQ(inet_pton(AF_INET, ip, &in->sin_addr), 1);
        m->info[i].addr_format = FI_SOCKADDR_IN;
        m->info[i].src_addr = in;
        m->info[i].src_addrlen = sizeof *in;
    }
    if (i > 0) {
        m->info[i - 1].next = &m->info[i];
    }
    return &m->info[i];
}

/* Where an adapter sits: PCI bus number i, near to `cores` ("0-3"; NULL: nobody knows). */
static void sits_at(machine *m, struct fi_info *info, const char *cores) {
    int i = (int)(info - m->info);
    char path[128];
    m->bus[i] = (struct fi_bus_attr){.bus_type = FI_BUS_PCI, .attr.pci.bus_id = (uint8_t)i};
    m->nic[i].bus_attr = &m->bus[i];
    info->nic = &m->nic[i];
    snprintf(path, sizeof path, "sys/bus/pci/devices/0000:%02x:00.0/local_cpulist", i);
    if (cores != NULL) {
        sys_file(path, cores);
    }
}

/* In Gbit/s. */
static void is_fast(machine *m, struct fi_info *info, size_t speed) {
    int i = (int)(info - m->info);
    m->link[i].speed = speed * 1000000000u;
    m->nic[i].link_attr = &m->link[i];
    info->nic = &m->nic[i];
}

/* An address of InfiniBand's own (struct sockaddr_ib), in that subnet. */
static void is_of_infiniband(machine *m, struct fi_info *info, const char prefix[8]) {
    int i = (int)(info - m->info);
    uint8_t *at = (uint8_t *)&m->at[i];
    memset(at, 0, 48);
    at[0] = 27; /* AF_IB */
    memcpy(at + 8, prefix, 8);
    at[23] = (uint8_t)i;
    info->addr_format = FI_SOCKADDR_IB;
    info->src_addr = at;
    info->src_addrlen = 48;
}

/* As libfabric 2.x describes an adapter of EFA, once for each kind of endpoint: what differs is the name of the fabric. */
static void is_of_efa(machine *m, const char *kind, const char *domain, char gid) {
    struct fi_info *info = adapter(m, "efa", domain, "-", NULL);
    int i = (int)(info - m->info);
    memset(&m->at[i], gid, 32);
    m->fabric[i].name = (char *)(uintptr_t)kind;
    info->addr_format = FI_ADDR_EFA;
    info->src_addr = &m->at[i];
    info->src_addrlen = 32;
}

/* What was taken, by its domain; "" when nothing was. */
static const char *taken(machine *m, fabric_wish w, int rail) {
    w.rails = w.rails > 0 ? w.rails : 1;
    m->s.rail_count = 0;
    ddl_status status = fabric_choose(&m->s, &w, m->info);
    CHECK_EQ(status, m->s.rail_count > 0 ? DDL_OK : DDL_ERR_UNSUPPORTED);
    return rail < m->s.rail_count ? m->s.rails[rail].info->domain_attr->name : "";
}

static const fabric_wish others = {.authenticated = 1}; /* ranks on other hosts, too */

/* ---- what others can reach ---- */

TEST(loopback_and_bridges_are_not_for_other_hosts) {
    machine *m = machine_make();
    sys_file("sys/class/net/br0/bridge/bridge_id", "8000\n");
    adapter(m, "tcp;ofi_rxm", "lo", "lo", "127.0.0.1");
    adapter(m, "tcp;ofi_rxm", "br0", "br0", "172.17.0.1");
    CHECK_EQ(strcmp(taken(m, others, 0), ""), 0);
    CHECK_STR(m->e.log, "tcp;ofi_rxm on lo (127.0.0.1): loopback leads to no other host");
    CHECK_STR(m->e.log, "tcp;ofi_rxm on br0 (172.17.0.1): it is a bridge");
    adapter(m, "tcp;ofi_rxm", "eth0", "eth0", "10.1.0.5");
    CHECK_EQ(strcmp(taken(m, others, 0), "eth0"), 0);
    fabric_wish w = others;
    w.interface_name = "lo"; /* not even when it is asked for */
    CHECK_EQ(strcmp(taken(m, w, 0), ""), 0);
    w.interface_name = "br0"; /* who names a bridge knows what it leads to */
    CHECK_EQ(strcmp(taken(m, w, 0), "br0"), 0);
    machine_free(m);
}

TEST(nor_are_adapters_whose_address_is_that_of_a_bridge_or_loopback) {
    machine *m = machine_make();
    sys_file("sys/class/net/br0/bridge/bridge_id", "8000\n");
    adapter(m, "verbs;ofi_rxm", "rxe0", "br0", "172.17.0.1");
    adapter(m, "verbs;ofi_rxm", "siw_lo", "lo", "127.0.0.1");
    CHECK_EQ(strcmp(taken(m, others, 0), ""), 0);
    adapter(m, "verbs;ofi_rxm", "mlx5_0", "ib0", "10.2.0.5");
    CHECK_EQ(strcmp(taken(m, others, 0), "mlx5_0"), 0);
    machine_free(m);
}

TEST(inside_a_host_sockets_use_loopback_alone) {
    machine *m = machine_make();
    adapter(m, "tcp;ofi_rxm", "eth0", "eth0", "10.1.0.5");
    adapter(m, "tcp;ofi_rxm", "lo", "lo", "127.0.0.1");
    CHECK_EQ(strcmp(taken(m, (fabric_wish){.loopback_only = 1}, 0), "lo"), 0);
    machine_free(m);
}

TEST(sockets_take_the_way_to_the_master) {
    machine *m = machine_make();
    fabric_wish w = others;
    adapter(m, "tcp;ofi_rxm", "eth0", "eth0", "10.1.0.5");
    adapter(m, "tcp;ofi_rxm", "eth1", "eth1", "10.2.0.5");
    w.route = m->at[1];
    CHECK_EQ(strcmp(taken(m, w, 0), "eth1"), 0);
    machine_free(m);
}

/* Of a peer that says it lives on loopback. */
TEST(the_loopback_of_another_host_is_not_taken_for_ours) {
    machine *m = machine_make();
    fabric_address a = {.name_bytes = sizeof(struct sockaddr_in)};
    m->s.rails[0].info = adapter(m, "tcp;ofi_rxm", "lo", "lo", "127.0.0.1");
    memcpy(a.names, &m->at[0], sizeof(struct sockaddr_in));
    CHECK_EQ(fabric_is_far_loopback(&m->s, &a, 0), 1);
    CHECK_EQ(fabric_is_far_loopback(&m->s, &a, 1), 0);
    a.names[4] = 10; /* the first byte of sin_addr */
    CHECK_EQ(fabric_is_far_loopback(&m->s, &a, 0), 0);
    machine_free(m);
}

/* ---- which of several ---- */

/* Lists of cores, as in sysfs, with and without one that this process may use. */
static void core_lists(char near_by[32], char far_off[32]) {
    cpu_set_t mine;
    CHECK_EQ(sched_getaffinity(0, sizeof mine, &mine), 0);
    int in = 0, out = 0;
    while (!CPU_ISSET((size_t)in, &mine)) {
        in++;
    }
    while (CPU_ISSET((size_t)out, &mine)) {
        out++;
    }
    snprintf(near_by, 32, "%d-%d,%d\n", CPU_SETSIZE - 2, CPU_SETSIZE - 1, in);
    snprintf(far_off, 32, "%d\n", out);
}

TEST(the_nearest_adapter_comes_first) {
    machine *m = machine_make();
    char near_by[32], far_off[32];
    core_lists(near_by, far_off);
    sits_at(m, adapter(m, "verbs;ofi_rxm", "mlx5_0", "ib0", "10.2.0.5"), far_off);
    sits_at(m, adapter(m, "verbs;ofi_rxm", "mlx5_1", "ib1", "10.2.1.5"), NULL);
    CHECK_EQ(strcmp(taken(m, others, 0), "mlx5_1"), 0); /* what is not known is better than far */
    sits_at(m, adapter(m, "verbs;ofi_rxm", "mlx5_2", "ib2", "10.2.2.5"), near_by);
    CHECK_EQ(strcmp(taken(m, others, 0), "mlx5_2"), 0);
    CHECK_STR(m->e.log, "verbs;ofi_rxm on mlx5_0 (10.2.0.5): can be used, but is far from these cores");
    fabric_wish w = others;
    w.rails = 3;
    CHECK_EQ(strcmp(taken(m, w, 0), "mlx5_0"), 0); /* by name: which is the nearest differs from rank to rank */
    CHECK_EQ(strcmp(taken(m, w, 1), "mlx5_1"), 0);
    CHECK_EQ(strcmp(taken(m, w, 2), "mlx5_2"), 0);
    CHECK(strstr(m->e.log, "DDL_FABRIC_RAILS") == NULL);
    w.rails = 2;
    CHECK_EQ(strcmp(taken(m, w, 0), "mlx5_1"), 0);
    CHECK_EQ(strcmp(taken(m, w, 1), "mlx5_2"), 0);
    w.rails = 4;
    taken(m, w, 0);
    CHECK_EQ(m->s.rail_count, 3);
    CHECK_STR(m->e.log, "DDL_FABRIC_RAILS asks for 4 adapters, and of verbs;ofi_rxm there are 3");
    CHECK_STR(m->e.log, "verbs;ofi_rxm on mlx5_1 (10.2.1.5): is taken");
    machine_free(m);
}

/* A rank beside one adapter and a rank beside the other both take the one that all hosts have in the network of the master. */
TEST(the_network_of_the_master_comes_before_the_nearest) {
    machine *m = machine_make();
    fabric_wish w = others;
    char near_by[32], far_off[32], name[IF_NAMESIZE];
    core_lists(near_by, far_off);
    sits_at(m, adapter(m, "verbs;ofi_rxm", "mlx5_0", "ib0", "10.2.0.5"), near_by);
    sits_at(m, adapter(m, "verbs;ofi_rxm", "mlx5_1", "ib1", "10.2.1.5"), far_off);
    sits_at(m, adapter(m, "verbs;ofi_rxm", "mlx5_2", "ib2", "10.2.1.6"), NULL);
    w.route = m->at[1];
    w.route_bits = fabric_interface_of(&w.route, name);
    CHECK_EQ(w.route_bits, 24);
    CHECK_EQ(strcmp(taken(m, w, 0), "mlx5_2"), 0); /* of those in it the nearest */
    w.rails = 2; /* and the first of two, whatever their names */
    CHECK_EQ(strcmp(taken(m, w, 0), "mlx5_1"), 0);
    w.route = m->at[0];
    CHECK_EQ(strcmp(taken(m, w, 0), "mlx5_0"), 0);
    w.route = m->at[2];
    snprintf(m->domain_name[0], sizeof m->domain_name[0], "mlx5_9");
    w.rails = 3;
    CHECK_EQ(strcmp(taken(m, w, 0), "mlx5_1"), 0);
    CHECK_EQ(strcmp(taken(m, w, 2), "mlx5_9"), 0);
    snprintf(m->domain_name[2], sizeof m->domain_name[2], "mlx5_z");
    CHECK_EQ(strcmp(taken(m, w, 1), "mlx5_z"), 0);
    snprintf(m->domain_name[0], sizeof m->domain_name[0], "mlx5_0");
    CHECK_EQ(strcmp(taken(m, w, 2), "mlx5_0"), 0); /* its name comes first, its network does not */
    w.rails = 1;
    adapter(m, "tcp;ofi_rxm", "eth0", "eth0", "192.168.7.5");
    w.route = m->at[3]; /* no adapter is there: the nearest of all */
    w.route_bits = fabric_interface_of(&w.route, name);
    CHECK_EQ(strcmp(taken(m, w, 0), "mlx5_0"), 0);
    memset(&w.route, 0, sizeof w.route);
    CHECK_EQ(fabric_interface_of(&w.route, name), 0);
    CHECK_EQ(strcmp(taken(m, w, 0), "mlx5_0"), 0);
    machine_free(m);
}

TEST(settings_of_ip_refuse_an_adapter_without) {
    machine *m = machine_make();
    fabric_wish w = others;
    adapter(m, "efa", "rdmap0s6-rdm", "-", NULL);
    w.interface_name = "eth0"; /* DDL_INTERFACE: of the sockets of the core */
    CHECK_EQ(strcmp(taken(m, w, 0), "rdmap0s6-rdm"), 0);
    w.interface_is_ours = 1;
    CHECK_EQ(strcmp(taken(m, w, 0), ""), 0);
    CHECK_STR(m->e.log, "it has no address of IP for DDL_FABRIC_INTERFACE or DDL_FABRIC_SUBNET; DDL_FABRIC_DOMAIN chooses it");
    w = others;
    CHECK_EQ(fabric_subnet_parse("10.1.0.0/16", &w.subnet, &w.subnet_bits), 1);
    CHECK_EQ(strcmp(taken(m, w, 0), ""), 0);
    w = others;
    w.domain = "rdmap0s6-rdm";
    CHECK_EQ(strcmp(taken(m, w, 0), "rdmap0s6-rdm"), 0);
    machine_free(m);
}

/* What a rank takes, by its place among those of its host, as the last digits of the names: "0" or "01" for two rails. */
static const char *turn(machine *m, fabric_wish w, int32_t local_rank) {
    static char digits[FABRIC_RAILS_MAX + 1];
    w.turn = local_rank;
    taken(m, w, 0);
    for (int32_t r = 0; r < m->s.rail_count; r++) {
        const char *name = fabric_domain_name(m->s.rails[r].info);
        digits[r] = name[strlen(name) - 1];
    }
    digits[m->s.rail_count] = 0;
    return digits;
}

static void takes(machine *m, fabric_wish w, int32_t local_rank, const char *digits) {
    CHECK_EQ(strcmp(turn(m, w, local_rank), digits), 0);
}

/* Networks of one rail each are common: two ranks with the first of two reach each other, with one of each they would not. */
TEST(of_equally_near_ones_in_two_networks_the_first_is_taken) {
    machine *m = machine_make();
    char near_by[32], far_off[32];
    core_lists(near_by, far_off);
    sits_at(m, adapter(m, "verbs;ofi_rxm", "mlx5_0", "ib0", "10.2.0.5"), near_by);
    sits_at(m, adapter(m, "verbs;ofi_rxm", "mlx5_1", "ib1", "10.2.1.5"), near_by);
    for (int i = 0; i < 4; i++) {
        takes(m, others, i, "0");
    }
    adapter(m, "verbs;ofi_rxm", "mlx5_2", "?", "10.2.0.6");
    m->interface[2][0] = 0;
    takes(m, others, 1, "0"); /* and nobody knows how near that one is */
    CHECK(strstr(m->e.log, "take turns") == NULL);
    machine_free(m);
}

/* Eight adapters in one network, four beside each socket: of eight ranks, four of each, each has one to itself. */
TEST(of_equally_near_ones_in_one_network_ranks_take_turns) {
    machine *m = machine_make();
    char near_by[32], far_off[32], name[16], ip[16], digit[2] = "";
    core_lists(near_by, far_off);
    for (int i = 0; i < 8; i++) {
        snprintf(name, sizeof name, "mlx5_%d", i);
        snprintf(ip, sizeof ip, "10.2.0.%d", i + 5);
        sits_at(m, adapter(m, "verbs;ofi_rxm", name, name, ip), i < 4 ? far_off : near_by);
    }
    for (int i = 0; i < 12; i++) {
        digit[0] = (char)('4' + i % 4);
        takes(m, others, i, digit);
    }
    CHECK_STR(m->e.log, "4 adapters of verbs;ofi_rxm are equally near and fast, and in one network: the ranks of a host take turns");
    CHECK_STR(m->e.log, "verbs;ofi_rxm on mlx5_5 (10.2.0.10): is taken");
    fabric_wish w = others;
    w.rails = 2;
    takes(m, w, 0, "45");
    takes(m, w, 1, "67");
    takes(m, w, 2, "45");
    w.rails = 3;
    takes(m, w, 1, "457"); /* by name, whichever came first */
    w.rails = 4;
    takes(m, w, 1, "4567");
    w.rails = 1;
    w.domain = "mlx5_6";
    takes(m, w, 1, "6");
    w.domain = NULL;
    adapter(m, "verbs;ofi_rxm", "mlx5_5", "mlx5_5b", "10.2.0.77"); /* has two addresses, and counts once */
    m->info[8].nic = m->info[5].nic;
    takes(m, w, 2, "6");
    is_fast(m, &m->info[4], 100);
    is_fast(m, &m->info[6], 100); /* the others: not known */
    takes(m, w, 0, "4");
    takes(m, w, 1, "6");
    takes(m, w, 2, "4");
    machine_free(m);
}

/* Two rails in two networks: the first of each rank in the one, the second in the other. */
TEST(rails_in_several_networks_take_no_turns) {
    machine *m = machine_make();
    fabric_wish w = others;
    adapter(m, "verbs;ofi_rxm", "mlx5_0", "ib0", "10.2.0.5");
    adapter(m, "verbs;ofi_rxm", "mlx5_1", "ib1", "10.2.1.5");
    adapter(m, "verbs;ofi_rxm", "mlx5_2", "ib2", "10.2.0.6");
    adapter(m, "verbs;ofi_rxm", "mlx5_3", "ib3", "10.2.1.6");
    w.rails = 2;
    takes(m, w, 0, "01");
    takes(m, w, 1, "01");
    w.rails = 1;
    takes(m, w, 1, "2");
    w.route = m->at[3]; /* in the master's network, ranks take turns there */
    w.route_bits = 24;
    takes(m, w, 0, "1");
    takes(m, w, 1, "3");
    machine_free(m);
}

TEST(sockets_take_no_turns) {
    machine *m = machine_make();
    adapter(m, "tcp;ofi_rxm", "eth0", "eth0", "10.1.0.5");
    adapter(m, "tcp;ofi_rxm", "eth1", "eth1", "10.1.0.6");
    takes(m, others, 1, "0");
    machine_free(m);
}

TEST(adapters_of_efa_are_in_one_network) {
    machine *m = machine_make();
    adapter(m, "efa", "rdmap0", "-", NULL);
    adapter(m, "efa", "rdmap2", "-", NULL);
    takes(m, others, 0, "0");
    takes(m, others, 1, "2");
    takes(m, others, 2, "0");
    machine_free(m);
}

/* efa-direct comes first, with the same domain and address. */
TEST(efa_is_taken_behind_the_kind_of_endpoint_that_it_lists_first) {
    machine *m = machine_make();
    fabric_wish w = others;
    is_of_efa(m, "efa-direct", "rdmap0-rdm", 1);
    is_of_efa(m, "efa-direct", "rdmap1-rdm", 2);
    CHECK_EQ(strcmp(taken(m, w, 0), ""), 0); /* alone it is not taken */
    is_of_efa(m, "efa", "rdmap0-rdm", 1);
    is_of_efa(m, "efa", "rdmap1-rdm", 2);
    w.rails = 2;
    for (int rail = 0; rail < 2; rail++) {
        CHECK_EQ(strcmp(taken(m, w, rail), rail == 0 ? "rdmap0-rdm" : "rdmap1-rdm"), 0);
        CHECK(rail < m->s.rail_count && m->s.rails[rail].info->fabric_attr == &m->fabric[2 + rail]);
    }
    w.rails = 1;
    w.turn = 1;
    w.domain = "rdmap1-rdm"; /* nor is it by its name */
    CHECK_EQ(strcmp(taken(m, w, 0), "rdmap1-rdm"), 0);
    CHECK(m->s.rail_count == 1 && m->s.rails[0].info->fabric_attr == &m->fabric[3]);
    CHECK_STR(m->e.log, "efa on rdmap0-rdm (-): it is efa-direct");
    CHECK_STR(m->e.log, "efa on rdmap1-rdm (-): is taken");
    CHECK(strstr(m->e.log, "efa: only looked at") == NULL);
    machine_free(m);
}

TEST(memory_of_devices_is_asked_of_the_kind_of_endpoint_that_was_taken) {
    machine *m = machine_make();
    is_of_efa(m, "efa-direct", "rdmap0-rdm", 1);
    is_of_efa(m, "efa", "rdmap0-rdm", 1);
    m->s.rails[0].info = &m->info[1];
    m->s.rail_count = 1;
    CHECK(fabric_hmem_ask(&m->s, &m->s.rails[0]) == NULL);
    CHECK(m->s.rails[0].info->fabric_attr == &m->fabric[1]);
    m->info[0].next = NULL; /* EFA itself has no FI_HMEM */
    m->s.rails[0].info = &m->info[1];
    CHECK(fabric_hmem_ask(&m->s, &m->s.rails[0]) != NULL);
    CHECK(m->s.rails[0].info == &m->info[1]);
    machine_free(m);
}

/* Where nobody has given a prefix, all networks have fe80::, also those that are not connected. */
TEST(infiniband_without_ip_takes_turns_in_a_subnet_that_has_a_prefix) {
    machine *m = machine_make();
    is_of_infiniband(m, adapter(m, "verbs;ofi_rxm", "mlx5_0", "-", NULL), "\xfe\x80\0\0\0\0\0\0");
    is_of_infiniband(m, adapter(m, "verbs;ofi_rxm", "mlx5_1", "-", NULL), "\xfe\x80\0\0\0\0\0\0");
    takes(m, others, 1, "0");
    is_of_infiniband(m, &m->info[0], "\xfe\xc0\0\0\0\0\0\1");
    takes(m, others, 1, "0");
    is_of_infiniband(m, &m->info[1], "\xfe\xc0\0\0\0\0\0\1");
    takes(m, others, 0, "0");
    takes(m, others, 1, "1");
    machine_free(m);
}

/* A core of before does not say which rank of its host this is, and some launchers do not: then the rank itself counts. */
TEST(whose_turn_it_is_the_core_says) {
    machine *m = machine_make();
    ddl_transport_params p = {.size = sizeof p, .rank = 9, .world_size = 16, .local_ranks = -1, .local_rank = 3};
    fabric_wish w;
    CHECK_EQ(fabric_settings_wish(&m->s, &p, &w), 1);
    CHECK_EQ(w.turn, 3);
    p.local_rank = -1;
    CHECK_EQ(fabric_settings_wish(&m->s, &p, &w), 1);
    CHECK_EQ(w.turn, 9);
    p.local_rank = 3;
    p.size = offsetof(ddl_transport_params, local_rank);
    CHECK_EQ(fabric_settings_wish(&m->s, &p, &w), 1);
    CHECK_EQ(w.turn, 9);
    machine_free(m);
}

/* Where receives are shared, verbs lists each adapter by other protocols too, and maybe those first. */
TEST(an_adapter_that_is_listed_by_several_protocols_counts_once) {
    machine *m = machine_make();
    fabric_wish w = others;
    adapter(m, "verbs;ofi_rxm", "mlx5_0-xrc", "ib0", "10.2.0.5");
    adapter(m, "verbs;ofi_rxm", "mlx5_0", "ib0", "10.2.0.5");
    adapter(m, "verbs;ofi_rxm", "mlx5_0-dgram", "ib0", "10.2.0.5");
    CHECK_EQ(strcmp(taken(m, w, 0), "mlx5_0"), 0);
    CHECK_STR(m->e.log, "verbs;ofi_rxm on mlx5_0-xrc (10.2.0.5): it is an adapter that is listed without -xrc or -dgram too, and counts "
                        "once; DDL_FABRIC_DOMAIN chooses it all the same");
    CHECK_STR(m->e.log, "verbs;ofi_rxm on mlx5_0-dgram (10.2.0.5): it is an adapter");
    w.rails = 2;
    CHECK_EQ(strcmp(taken(m, w, 0), "mlx5_0"), 0);
    CHECK_EQ(m->s.rail_count, 1);
    CHECK_STR(m->e.log, "DDL_FABRIC_RAILS asks for 2 adapters, and of verbs;ofi_rxm there is 1");
    w.domain = "mlx5_0-xrc";
    CHECK_EQ(strcmp(taken(m, w, 0), "mlx5_0-xrc"), 0);
    CHECK_EQ(m->s.rail_count, 1);
    w = others;
    w.rails = 2; /* a name with a hyphen of its own is no protocol */
    adapter(m, "verbs;ofi_rxm", "bnxt-re0", "eth1", "10.2.0.6");
    CHECK_EQ(strcmp(taken(m, w, 0), "bnxt-re0"), 0);
    CHECK_EQ(strcmp(taken(m, w, 1), "mlx5_0"), 0);
    machine_free(m);
}

TEST(efa_before_verbs_before_tcp) {
    machine *m = machine_make();
    adapter(m, "tcp;ofi_rxm", "eth0", "eth0", "10.1.0.5");
    CHECK_EQ(strcmp(taken(m, others, 0), "eth0"), 0);
    adapter(m, "verbs;ofi_rxm", "mlx5_0", "ib0", "10.2.0.5");
    CHECK_EQ(strcmp(taken(m, others, 0), "mlx5_0"), 0);
    adapter(m, "efa", "rdmap0s6-rdm", "-", NULL);
    CHECK_EQ(strcmp(taken(m, others, 0), "rdmap0s6-rdm"), 0);
    CHECK_EQ(strcmp(taken(m, (fabric_wish){.loopback_only = 1}, 0), ""), 0); /* no secret: nobody's adapter, no loopback */
    machine_free(m);
}

/* What ddl-info shows: nothing that libfabric has goes without a word. */
TEST(who_is_not_looked_at_has_a_reason) {
    machine *m = machine_make();
    adapter(m, "sockets", "eth0", "eth0", "10.1.0.5");
    adapter(m, "udp;ofi_rxd", "eth0", "eth0", "10.1.0.5");
    adapter(m, "tcp;ofi_rxm", "eth0", "eth0", "10.1.0.5");
    adapter(m, "tcp;ofi_rxm", "eth1", "eth1", "10.2.0.5");
    adapter(m, "verbs;ofi_rxm", "mlx5_0", "ib0", "10.3.0.5");
    taken(m, others, 0);
    CHECK_STR(m->e.log, "efa: not in this libfabric");
    CHECK_STR(m->e.log, "verbs;ofi_rxm on mlx5_0 (10.3.0.5): is taken");
    CHECK_STR(m->e.log, "sockets: only looked at when DDL_TRANSPORTS or DDL_FABRIC_PROVIDER names sockets");
    CHECK_STR(m->e.log, "udp;ofi_rxd: only looked at when DDL_TRANSPORTS or DDL_FABRIC_PROVIDER names udp;ofi_rxd");
    const char *tcp = strstr(m->e.log, "tcp;ofi_rxm: not looked at, as verbs comes first");
    CHECK(tcp != NULL && strstr(tcp + 1, "tcp;ofi_rxm: ") == NULL); /* once, not for each adapter */
    m->e.log[0] = 0;
    fabric_wish w = others;
    w.provider = "verbs";
    taken(m, w, 0);
    CHECK_STR(m->e.log, "sockets: not looked at, as verbs is asked for");
    CHECK(strstr(m->e.log, "efa") == NULL && strstr(m->e.log, "verbs;ofi_rxm: not looked at") == NULL);
    machine_free(m);
}

/* ---- what peers are told ---- */

static size_t a_name_bytes; /* of each address that an endpoint has */
static int closed;

static int made_up_getname(fid_t fid, void *name, size_t *bytes) {
    int fits = *bytes >= a_name_bytes;
    (void)fid;
    memset(name, 1, fits ? a_name_bytes : 0);
    *bytes = a_name_bytes;
    return fits ? 0 : -FI_ETOOSMALL;
}

static int made_up_close(fid_t fid) {
    (void)fid;
    closed++;
    return 0;
}

/* Four rails, open, of addresses that are so long. Returns how many are used. */
static int rails_used(int rank, size_t name_bytes, char log[512]) {
    static struct fi_ops_cm cm = {.getname = made_up_getname};
    static struct fi_ops ops = {.close = made_up_close};
    machine *m = machine_make();
    struct fid_ep ep[FABRIC_RAILS_MAX];
    struct fi_ep_attr attr = {.protocol = 1};
    memset(ep, 0, sizeof ep);
    m->e.settings[0] = "FABRIC_RAILS=4";
    m->s.rank = rank;
    for (int i = 0; i < FABRIC_RAILS_MAX; i++) {
        char name[16];
        snprintf(name, sizeof name, "mlx5_%d", i);
        ep[i] = (struct fid_ep){.fid.ops = &ops, .cm = &cm};
        m->s.rails[i] = (fabric_rail){.info = adapter(m, "verbs;ofi_rxm", name, "ib0", NULL), .ep = &ep[i]};
        m->s.rails[i].info->ep_attr = &attr;
    }
    m->s.rail_count = FABRIC_RAILS_MAX;
    a_name_bytes = name_bytes;
    closed = 0;
    CHECK_EQ(fabric_address_make(&m->s), DDL_OK);
    CHECK_EQ(m->s.address.rails, m->s.rail_count);
    CHECK_EQ(closed, FABRIC_RAILS_MAX - m->s.rail_count);
    CHECK_EQ(m->e.warnings, m->s.rail_count < FABRIC_RAILS_MAX && rank == 0);
    snprintf(log, 512, "%.511s", m->e.log);
    int used = m->s.rail_count;
    machine_free(m);
    return used;
}

/* Four are asked for: who is given fewer hears of it, and why. */
TEST(rails_whose_addresses_do_not_fit_are_told_of_by_one_rank) {
    char log[512];
    CHECK_EQ(rails_used(0, sizeof(struct sockaddr_in), log), 4);
    CHECK_EQ(strcmp(log, ""), 0);
    CHECK_EQ(rails_used(0, sizeof(struct sockaddr_in6), log), 2);
    CHECK_STR(log, "DDL_FABRIC_RAILS asks for 4 adapters, and 2 are used: all addresses that a peer is told have 76 bytes of room together, and "
                   "each of verbs;ofi_rxm takes 28; set DDL_FABRIC_RAILS=2");
    CHECK_EQ(rails_used(0, 32, log), 2); /* EFA */
    CHECK_STR(log, "takes 32; set DDL_FABRIC_RAILS=2");
    CHECK_EQ(rails_used(0, 48, log), 1); /* FI_SOCKADDR_IB */
    CHECK_STR(log, "and 1 is used");
    CHECK_STR(log, "takes 48; set DDL_FABRIC_RAILS=1");
    CHECK_EQ(rails_used(3, 48, log), 1);
    CHECK_EQ(strcmp(log, ""), 0);
}

/* ---- what is relied on ---- */

/* EFA of libfabric 1.17 claims the order of sends, and completes receives in any. */
TEST(an_order_of_sends_is_not_one_of_receives) {
    struct fi_fabric_attr fabric = {.prov_name = (char *)(uintptr_t) "efa"};
    struct fi_tx_attr tx = {.msg_order = FI_ORDER_SAS};
    struct fi_rx_attr rx = {.msg_order = FI_ORDER_SAS};
    struct fi_ep_attr ep = {.type = FI_EP_RDM};
    struct fi_info info = {.fabric_attr = &fabric, .tx_attr = &tx, .rx_attr = &rx, .ep_attr = &ep};
    CHECK_EQ(fabric_is_ordered(&info), 0);
    fabric.prov_name = (char *)(uintptr_t) "verbs;ofi_rxm";
    CHECK_EQ(fabric_is_ordered(&info), 1); /* each peer has a connection */
    fabric.prov_name = (char *)(uintptr_t) "tcp";
    CHECK_EQ(fabric_is_ordered(&info), 0);
    ep.type = FI_EP_MSG;
    CHECK_EQ(fabric_is_ordered(&info), 1);
    rx.msg_order = 0;
    CHECK_EQ(fabric_is_ordered(&info), 0);
}

/* The version that is asked for is a promise of how long structs are: not more than the headers say, nor than the library has. */
TEST(no_newer_api_is_asked_for_than_headers_and_library_have) {
    static const struct {
        uint32_t headers, library, asked;
    } cases[] = {
        {FI_VERSION(1, 14), FI_VERSION(2, 1), FI_VERSION(1, 14)}, {FI_VERSION(1, 17), FI_VERSION(1, 17), FI_VERSION(1, 17)},
        {FI_VERSION(1, 17), FI_VERSION(1, 18), FI_VERSION(1, 17)}, {FI_VERSION(1, 18), FI_VERSION(1, 18), FI_VERSION(1, 18)},
        {FI_VERSION(2, 1), FI_VERSION(1, 18), FI_VERSION(1, 18)}, {FI_VERSION(2, 1), FI_VERSION(2, 5), FI_VERSION(1, 18)},
        {FI_VERSION(2, 1), FI_VERSION(1, 17), FI_VERSION(1, 14)}, {FI_VERSION(1, 17), FI_VERSION(1, 16), FI_VERSION(1, 14)},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        CHECK_EQ(fabric_library_api(cases[i].headers, cases[i].library), cases[i].asked);
    }
    CHECK(fabric_library_api(FABRIC_API_HEADERS, FI_VERSION(9, 0)) <= FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION));
}

/* ---- what is the process's ---- */

static const char *const names[] = {"FI_OFI_RXM_USE_SRX", "FI_AV_REMOVE_CLEANUP", "FI_TCP_PORT_LOW_RANGE",
                                    "FI_TCP_PORT_HIGH_RANGE"};

static void forget_names(void) {
    for (int i = 0; i < 4; i++) {
        unsetenv(names[i]);
    }
}

static void check_values(const char *srx, const char *cleanup, const char *low, const char *high) {
    const char *const values[] = {srx, cleanup, low, high};
    for (int i = 0; i < 4; i++) {
        const char *is = getenv(names[i]);
        CHECK(is != NULL ? values[i] != NULL && strcmp(is, values[i]) == 0 : values[i] == NULL);
    }
}

/* What setenv of glibc before 2.41 moves and gives back stays: the array that getenv of another thread walks. */
TEST(the_array_of_the_environment_stays_as_it_was) {
    static const char *const lines[] = {"FI_OFI_RXM_USE_SRX=1", "FI_AV_REMOVE_CLEANUP=1", "FI_TCP_PORT_LOW_RANGE=7"};
    enum { LINES = 1000 };
    forget_names();
    setenv("FI_THE_FIRST", "1", 1); /* from now on the array is one that glibc would move */
    setenv("FI_THE_SECOND", "1", 1);
    setenv("FI_AV_REMOVE_CLEANUP", "0", 1); /* of the user */
    char **before = environ, *copies[LINES];
    int n = 0, count = 0;
    while (before[n] != NULL) {
        REQUIRE(n + 1 < LINES);
        copies[n] = before[n];
        n++;
    }
    fabric_environ_add(lines, 3);
    char **after = environ;
    CHECK(after != before);
    CHECK(memcmp(before, copies, (size_t)n * sizeof *copies) == 0 && before[n] == NULL);
    check_values("1", "0", "7", NULL);
    fabric_environ_add(lines, 3);
    CHECK(environ == after); /* all were there */
    while (after[count] != NULL) {
        count++;
    }
    CHECK_EQ(count, n + 2);
    setenv("FI_THE_FIRST", "of glibc", 1); /* whose own functions go on as before */
    setenv("FI_THE_THIRD", "1", 1);
    CHECK_EQ(strcmp(getenv("FI_THE_FIRST"), "of glibc"), 0);
    check_values("1", "0", "7", NULL);
}

TEST(variables_for_libfabric_are_set_unless_they_are) {
    forget_names();
    setenv("FI_OFI_RXM_USE_SRX", "0", 1);
    fabric_library_variables(NULL);
    check_values("0", "1", NULL, NULL);
    fabric_library_variables("20000-20100");
    check_values("0", "1", "20000", "20100");
    fabric_library_variables("1-2");
    check_values("0", "1", "20000", "20100");
}

/* What EFA is told where the environment has but this line. */
static const char *told_to_efa(char *line) {
    char *lines[] = {line, NULL}, **before = environ;
    environ = lines;
    fabric_library_variables("20000-20100");
    check_values("1", "1", "20000", "20100");
    const char *told = getenv("FI_EFA_FORK_SAFE");
    environ = before;
    return told;
}

/* Unless somebody has said what it is to do when the process forks, in libfabric's words or in rdma-core's; with huge pages it
 * would open no domain. */
TEST(efa_is_told_to_bear_fork) {
    static char own[] = "FI_EFA_FORK_SAFE=0", others[][32] = {"RDMAV_FORK_SAFE=1", "IBV_FORK_SAFE=1", "RDMAV_HUGEPAGES_SAFE=1"};
    const char *unasked = told_to_efa(NULL), *asked = told_to_efa(own);
    CHECK(unasked != NULL && strcmp(unasked, "1") == 0);
    CHECK(asked != NULL && strcmp(asked, "0") == 0);
    for (int i = 0; i < 3; i++) {
        CHECK(told_to_efa(others[i]) == NULL);
    }
}

TEST(a_domain_of_efa_that_cannot_bear_fork_is_told_with_the_remedy) {
    static char on[] = "FI_EFA_FORK_SAFE=1", off[] = "FI_EFA_FORK_SAFE=0";
    struct fi_fabric_attr efa = {.prov_name = (char *)(uintptr_t) "efa", .name = (char *)(uintptr_t) "efa"};
    struct fi_fabric_attr verbs = {.prov_name = (char *)(uintptr_t) "verbs;ofi_rxm"};
    struct fi_info of_efa = {.fabric_attr = &efa}, of_verbs = {.fabric_attr = &verbs};
    char *lines[] = {on, NULL}, **before = environ;
    environ = lines;
    CHECK_STR(fabric_fork_remedy(&of_efa, -FI_EINVAL), "FI_EFA_FORK_SAFE=0");
    CHECK_EQ(fabric_fork_remedy(&of_efa, -FI_ENOMEM)[0], 0);
    CHECK_EQ(fabric_fork_remedy(&of_verbs, -FI_EINVAL)[0], 0);
    lines[0] = off;
    CHECK_EQ(fabric_fork_remedy(&of_efa, -FI_EINVAL)[0], 0);
    environ = before;
}

/* Threads that add at once lose nothing, and add nothing twice. */
static pthread_barrier_t both_are_here;

static void *adds(void *which) {
    char own[32], shared[32];
    const char *lines[] = {own, shared};
    pthread_barrier_wait(&both_are_here);
    for (int i = 0; i < 100; i++) {
        snprintf(own, sizeof own, "FI_OF_%d_%d=x", *(int *)which, i);
        snprintf(shared, sizeof shared, "FI_OF_BOTH_%d=x", i);
        fabric_environ_add(lines, 2);
    }
    return NULL;
}

TEST(two_threads_that_add_variables_lose_none) {
    pthread_t thread[2];
    int which[] = {0, 1}, own = 0, both = 0;
    pthread_barrier_init(&both_are_here, NULL, 2);
    for (int i = 0; i < 2; i++) {
        REQUIRE(pthread_create(&thread[i], NULL, adds, &which[i]) == 0);
    }
    for (int i = 0; i < 2; i++) {
        pthread_join(thread[i], NULL);
    }
    pthread_barrier_destroy(&both_are_here);
    for (char **line = environ; *line != NULL; line++) {
        both += strncmp(*line, "FI_OF_BOTH_", 11) == 0;
        own += strncmp(*line, "FI_OF_0_", 8) == 0 || strncmp(*line, "FI_OF_1_", 8) == 0;
    }
    CHECK_EQ(own, 200);
    CHECK_EQ(both, 100);
}

/* Two contexts that begin at once: each call installs handlers and takes a while, the second begins within the first. */
static void of_a_library(int number) { (void)number; }
static void of_the_program(int number) { (void)number; }

static int installs(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
                    struct fi_info **out) {
    (void)version, (void)node, (void)service, (void)flags, (void)hints, (void)out;
    signal(SIGTERM, of_a_library);
    nanosleep(&(struct timespec){0, 100000000}, NULL);
    return 0;
}

static void *looks_for_devices(void *lib) {
    struct fi_info *found;
    CHECK_EQ(fabric_getinfo(lib, NULL, 0, NULL, &found), 0);
    return NULL;
}

TEST(handlers_are_the_programs_after_two_calls_at_once) {
    fabric_library lib = {.getinfo = installs, .api = FABRIC_API_LEAST};
    pthread_t first, second;
    struct sigaction now;
    signal(SIGTERM, of_the_program);
    REQUIRE(pthread_create(&first, NULL, looks_for_devices, &lib) == 0);
    nanosleep(&(struct timespec){0, 50000000}, NULL);
    REQUIRE(pthread_create(&second, NULL, looks_for_devices, &lib) == 0);
    pthread_join(first, NULL);
    pthread_join(second, NULL);
    REQUIRE(sigaction(SIGTERM, NULL, &now) == 0);
    CHECK(now.sa_handler == of_the_program);
    signal(SIGTERM, SIG_DFL);
}

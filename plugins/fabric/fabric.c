/* fabric: messages by libfabric: verbs and EFA adapters, and TCP for where there is neither.
 *
 *     cc -std=c11 -O2 -fPIC -shared -fvisibility=hidden -o libddl-fabric.so plugins/fabric/fabric.c
 *
 * Read library.h, state.h, memory.h, cache.h, rail.h, loopback.h, connect.h, link.h, message.h, receive.h, device.h, wait.h, select.h in this
 * order; this file is the settings and the table. DDL_TRANSPORTS=fabric, fabric:tcp, fabric:verbs or fabric:efa uses it.
 *
 * A message of up to 32 KiB is copied into registered buffers of 16 KiB and sent; of a larger one the receiver reads the
 * payload straight into its place (fi_read), or, over sockets, it comes by a connection of its own. What a peer may have under way
 * is bounded by credit, and messages carry numbers, so that they are handed on in order also where the provider does not keep it.
 *
 * Settings, each of one rank; ranks whose provider, protocol or buffers differ cannot reach each other:
 *     DDL_FABRIC_PROVIDER      efa, verbs, tcp or any other name of fi_info
 *     DDL_FABRIC_DOMAIN        one adapter by its name (mlx5_0)
 *     DDL_FABRIC_INTERFACE     one network interface by its name; else DDL_INTERFACE
 *     DDL_FABRIC_SUBNET        adapters with an address in 10.1.0.0/16
 *     DDL_FABRIC_RAILS         1; so many adapters share what is read
 *     DDL_FABRIC_OFFER_BYTES   32K; payloads above are not copied
 *     DDL_FABRIC_CACHE         512; so many registrations are kept at most, 0: none (cache.h)
 *     DDL_FABRIC_CACHE_BYTES   4G; and so many bytes
 *     DDL_FABRIC_PROGRESS      auto or manual; the provider's own choice without it
 * and for tests, what only some providers do:
 *     DDL_FABRIC_FORCE_UNORDERED 1, _NO_RMA 1, _NO_WAIT 1, _NO_INJECT 1, _EVENTS 1, _DROPS 1, _MAX_MESSAGE bytes,
 *     _MR local,virt_addr,..., _FAIL_REGISTRATION n (every n-th fails)
 *
 * All calls come under the context's lock: there are no locks here, and no globals, as one process may play many
 * ranks, except for what is the process's: its environment, its signal handlers, whether it had libfabric (library.h). */
#define _GNU_SOURCE 1
#include "../../ddl.h"

#include "library.h"

#include "select.h"
#include "wait.h"

/* >>settings */

static const char *fabric_setting(const ddl_host *host, const char *name) {
    const char *value = host->setting(host, name);
    return value != NULL && value[0] != 0 ? value : NULL;
}

/* "64K" and the like. *out stays when there is none; 0 when it makes no sense. */
static int fabric_setting_bytes(fabric_self *s, const char *name, uint64_t least, uint64_t most, uint64_t *out) {
    const char *text = fabric_setting(s->host, name);
    if (text == NULL) {
        return 1;
    }
    char *end;
    unsigned long long value = strtoull(text, &end, 10);
    int shift = *end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0;
    end += shift > 0;
    value = value <= most >> shift ? value << shift : most + 1;
    if (text[0] < '0' || text[0] > '9' || *end != 0 || value < least || value > most) {
        fabric_log(s, DDL_LOG_WARN, "DDL_%s is \"%.40s\"; a number from %llu to %llu is possible, K, M or G behind it",
                   name, text, (unsigned long long)least, (unsigned long long)most);
        return 0;
    }
    *out = value;
    return 1;
}

static int fabric_setting_on(const ddl_host *host, const char *name) {
    const char *value = fabric_setting(host, name);
    return value != NULL && strcmp(value, "0") != 0;
}

static int fabric_settings_wish(fabric_self *s, const ddl_transport_params *p, fabric_wish *out) {
    const char *subnet = fabric_setting(s->host, "FABRIC_SUBNET");
    const char *detail = DDL_HAS(p, detail) ? p->detail : NULL;
    uint64_t rails = 1;
    memset(out, 0, sizeof *out);
    out->provider = detail != NULL ? detail : fabric_setting(s->host, "FABRIC_PROVIDER");
    out->domain = fabric_setting(s->host, "FABRIC_DOMAIN");
    out->interface_name = fabric_setting(s->host, "FABRIC_INTERFACE");
    out->interface_is_ours = out->interface_name != NULL;
    out->interface_name = out->interface_name != NULL ? out->interface_name : p->interface_name;
    if (subnet != NULL && !fabric_subnet_parse(subnet, &out->subnet, &out->subnet_bits)) {
        fabric_log(s, DDL_LOG_WARN, "DDL_FABRIC_SUBNET is \"%.60s\"; an address and a number of bits are possible, as "
                   "10.1.0.0/16", subnet);
        return 0;
    }
    if (!fabric_setting_bytes(s, "FABRIC_RAILS", 1, FABRIC_RAILS_MAX, &rails)) {
        return 0;
    }
    out->rails = (int)rails;
    int32_t local = p->size > offsetof(ddl_transport_params, local_rank) ? p->local_rank : -1;
    out->turn = local >= 0 ? local : p->rank; /* ranks that follow each other are on one host, as a rule */
    int chosen = out->interface_name != NULL || subnet != NULL || out->domain != NULL;
    if (p->master_host != NULL && p->authenticated) {
        char name[IF_NAMESIZE];
        fabric_route(p->master_host, &out->route);
        out->route_bits = fabric_interface_of(&out->route, name);
    }
    int here = fabric_ip_is_loopback(&out->route) || (p->master_host == NULL && p->local_ranks == p->world_size);
    out->authenticated = p->authenticated != 0;
    out->loopback_only = !p->authenticated || (here && !chosen);
    return 1;
}

/* The modes of registration that tests ask for: words, with commas between them. */
static int fabric_settings_modes(fabric_self *s) {
    static const struct {
        const char *name;
        int bit;
    } modes[] = {{"local", FI_MR_LOCAL}, {"virt_addr", FI_MR_VIRT_ADDR}, {"allocated", FI_MR_ALLOCATED},
                 {"prov_key", FI_MR_PROV_KEY}};
    s->force_mr = 0;
    for (const char *word = fabric_setting(s->host, "FABRIC_FORCE_MR"); word != NULL && *word != 0;) {
        size_t length = strcspn(word, ","), i = 0, count = sizeof modes / sizeof modes[0];
        while (i < count && (strlen(modes[i].name) != length || strncmp(word, modes[i].name, length) != 0)) {
            i++;
        }
        if (i == count) {
            fabric_log(s, DDL_LOG_WARN, "DDL_FABRIC_FORCE_MR is \"%.60s\"; local, virt_addr, allocated and prov_key are "
                       "possible, with commas between them", fabric_setting(s->host, "FABRIC_FORCE_MR"));
            return 0;
        }
        s->force_mr |= modes[i].bit;
        word += length + (word[length] == ',');
    }
    return 1;
}

static int fabric_settings_read(fabric_self *s) {
    const ddl_host *host = s->host;
    const char *progress = fabric_setting(host, "FABRIC_PROGRESS");
    if (progress != NULL && strcmp(progress, "auto") != 0 && strcmp(progress, "manual") != 0) {
        fabric_log(s, DDL_LOG_WARN, "DDL_FABRIC_PROGRESS is \"%.40s\"; auto and manual are possible", progress);
        return 0;
    }
    if (!fabric_settings_modes(s)) {
        return 0;
    }
    s->force_unordered = fabric_setting_on(host, "FABRIC_FORCE_UNORDERED");
    s->force_no_rma = fabric_setting_on(host, "FABRIC_FORCE_NO_RMA");
    s->force_no_wait = fabric_setting_on(host, "FABRIC_FORCE_NO_WAIT");
    s->force_events = fabric_setting_on(host, "FABRIC_FORCE_EVENTS");
    s->force_drops = fabric_setting_on(host, "FABRIC_FORCE_DROPS");
    s->offer_bytes = FABRIC_OFFER_BYTES;
    s->max_read = 1u << 30;
    s->cache.most = FABRIC_REGIONS;
    s->cache.most_bytes = FABRIC_REGION_BYTES;
    uint64_t most = UINT64_MAX;
    int ok = fabric_setting_bytes(s, "FABRIC_OFFER_BYTES", 0, 1u << 30, &s->offer_bytes) &&
             fabric_setting_bytes(s, "FABRIC_CACHE", 0, 1u << 20, &s->cache.most) &&
             fabric_setting_bytes(s, "FABRIC_CACHE_BYTES", 0, (uint64_t)1 << 48, &s->cache.most_bytes) &&
             fabric_setting_bytes(s, "FABRIC_FORCE_FAIL_REGISTRATION", 1, 1u << 30, &s->fail_registration) &&
             fabric_setting_bytes(s, "FABRIC_FORCE_MAX_MESSAGE", 256, 1u << 30, &most);
    s->max_read = most < s->max_read ? most : s->max_read;
    return ok;
}

/* Whether what was sent first is also told of first. EFA before pull request 9988 of libfabric says that it keeps the order of
 * sends, unasked, and completes receives as they are done: of a larger one a packet may still be missing. Connections keep both;
 * what others say of completions 2.x has no field for any more. */
static int fabric_is_ordered(const struct fi_info *info) {
    int sends = (info->tx_attr->msg_order & FI_ORDER_SAS) != 0 && (info->rx_attr->msg_order & FI_ORDER_SAS) != 0;
    return sends && (info->ep_attr->type == FI_EP_MSG || strstr(info->fabric_attr->prov_name, ";ofi_rxm") != NULL);
}

/* What the provider demands, and what tests demand besides. */
static void fabric_attributes(fabric_self *s) {
    struct fi_info *info = s->rails[0].info;
    for (int32_t r = 0; r < s->rail_count; r++) {
        s->rails[r].info->domain_attr->mr_mode |= s->force_mr;
    }
    s->mr_mode = (uint64_t)info->domain_attr->mr_mode;
    s->ordered = fabric_is_ordered(info) && !s->force_unordered;
    uint64_t most = info->ep_attr->max_msg_size;
    int sockets = fabric_is_sockets(info);
    s->unread = sockets && !s->connects && (s->mr_mode & (FI_MR_LOCAL | FI_MR_PROV_KEY | FI_MR_VIRT_ADDR)) == 0;
    s->max_read = most < s->max_read ? most : s->max_read;
    s->slot_bytes = s->connects ? FABRIC_SLOT_CONNECTED : FABRIC_SLOT_BYTES;
    s->slot_bytes = s->max_read < s->slot_bytes ? s->max_read & ~(uint64_t)15 : s->slot_bytes;
    s->inject_bytes = fabric_setting_on(s->host, "FABRIC_FORCE_NO_INJECT") ? 0 : info->tx_attr->inject_size;
    s->receive_limit = s->connects ? FABRIC_RECEIVES : (int32_t)(info->rx_attr->size < 65536 ? info->rx_attr->size : 65536);
    s->speed = fabric_speed(info) / 8;
    s->faster = !fabric_is_sockets(info) && !fabric_is_software(info);
}

/* >>address */

/* For who writes the rules of a firewall. */
static void fabric_tell_port(fabric_self *s, int32_t rail, const void *name, size_t bytes) {
    struct sockaddr_in at;
    if (s->rails[rail].info->addr_format == FI_SOCKADDR_IN && bytes == sizeof at) {
        memcpy(&at, name, sizeof at);
        fabric_log(s, DDL_LOG_INFO, "listens on port %d", ntohs(at.sin_port));
    }
}

/* All ranks come to the same, as addresses of a kind are equally long: one says it. */
static void fabric_tell_room(fabric_self *s, int32_t fit, size_t name_bytes) {
    const char *asked = fabric_setting(s->host, "FABRIC_RAILS");
    fabric_log(s, s->rank == 0 ? DDL_LOG_WARN : DDL_LOG_DEBUG, "DDL_FABRIC_RAILS asks for %s adapters, and %d %s used: all addresses that "
               "a peer is told have %d bytes of room together, and each of %s takes %d; set DDL_FABRIC_RAILS=%d", asked != NULL ? asked : "more",
               fit, fit == 1 ? "is" : "are", (int)sizeof s->address.names, s->rails[0].info->fabric_attr->prov_name, (int)name_bytes, fit);
}

/* Peers call the address of an interface, as libfabric tells it: there is no word for another one. Where that is not what leads to this
 * rank, it is offered to its own host alone. */
static void fabric_address_inner(fabric_self *s) {
    s->address.inner = s->advertised && fabric_is_sockets(s->rails[0].info);
    if (s->address.inner && s->local_ranks < s->world_size) {
        fabric_log(s, s->asked ? DDL_LOG_WARN : DDL_LOG_INFO, "DDL_ADVERTISE is set, and libfabric tells peers the interface's own address: TCP is "
                   "used between this host and others, where DDL_TRANSPORTS has it");
    }
}

static ddl_status fabric_address_make(fabric_self *s) {
    fabric_address *a = &s->address;
    const struct fi_info *info = s->rails[0].info;
    a->version = 7;
    a->has_rma = !s->force_no_rma && (s->connects || (info->caps & FI_RMA) != 0);
    a->has_rma &= !s->unread;
    snprintf(a->provider, sizeof a->provider, "%s", info->fabric_attr->prov_name);
    a->protocol = info->ep_attr->protocol;
    a->slot_bytes = (uint32_t)s->slot_bytes;
    a->part_bytes = s->connects ? (uint32_t)fabric_part(s, UINT32_MAX) : 0;
    fabric_address_inner(s);
    if (getrandom(a->nonce, sizeof a->nonce, 0) != (ssize_t)sizeof a->nonce ||
        getrandom(&s->key_next, sizeof s->key_next, 0) != (ssize_t)sizeof s->key_next) {
        return DDL_ERR_SYSTEM;
    }
    size_t used = 0;
    for (int32_t i = 0; i < s->rail_count; i++) {
        size_t bytes = sizeof a->names - used;
        int result = fi_getname(s->connects ? &s->rails[i].listener->fid : &s->rails[i].ep->fid, a->names + used, &bytes);
        if (result == -FI_ETOOSMALL && i > 0) { /* peers are told only as many as there is room for */
            fabric_tell_room(s, i, a->name_bytes);
            break;
        }
        if (result != 0 || bytes > sizeof a->names - used) {
            return fabric_failed(s, "fi_getname", result != 0 ? result : -FI_ETOOSMALL);
        }
        fabric_tell_port(s, i, a->names + used, bytes);
        a->name_bytes = (uint8_t)bytes;
        a->rails = (uint8_t)(i + 1);
        used += bytes;
    }
    while (s->rail_count > a->rails) {
        fabric_rail_close(s, &s->rails[--s->rail_count]);
    }
    return DDL_OK;
}

static ddl_status fabric_address_of(void *self, void *out_address, size_t *bytes) {
    fabric_self *s = self;
    if (*bytes < sizeof s->address) {
        return DDL_ERR_ARG;
    }
    memcpy(out_address, &s->address, sizeof s->address);
    *bytes = sizeof s->address;
    return DDL_OK;
}

/* Why two addresses do not meet, and what makes them; NULL: they do. */
static const char *fabric_differs(const fabric_address *a, const fabric_address *ours) {
    return a->version != ours->version               ? "give all the same version of this plugin"
           : strcmp(a->provider, ours->provider) != 0 ? "set DDL_TRANSPORTS or DDL_FABRIC_PROVIDER to what all have"
           : a->protocol != ours->protocol           ? "their protocols differ: give all the same libfabric and kind of adapter"
           : a->rails != ours->rails                 ? "set DDL_FABRIC_RAILS to the number that all have"
           : a->name_bytes != ours->name_bytes || (size_t)a->name_bytes * a->rails > sizeof a->names
               ? "their addresses are of two kinds (IPv4 and IPv6?): DDL_FABRIC_SUBNET chooses one"
           : a->has_rma != ours->has_rma       ? "only one of them reads: give both the same libfabric, kind of adapter and FI_ variables"
           : a->slot_bytes != ours->slot_bytes ? "their messages differ in size: give both the same libfabric and FI_ variables"
           : a->part_bytes != ours->part_bytes
               ? "they cut payloads into parts that differ in size: give both the same libfabric, DDL_FABRIC_ and FI_ variables"
               : NULL;
}

/* Ranks that see different adapters are told so, once. */
static ddl_status fabric_unequal(fabric_self *s, int32_t peer, const fabric_address *a, const char *remedy) {
    fabric_log(s, s->told_unequal ? DDL_LOG_DEBUG : DDL_LOG_WARN,
               "rank %d uses %.20s (protocol %u, %d rails, addresses of %d bytes, messages of %u, parts of %u, %s), rank %d %.20s (%u, %d, %d, %u, "
               "parts of %u, %s): they cannot reach each other this way; %s", peer, a->provider, (unsigned)a->protocol, a->rails, a->name_bytes,
               (unsigned)a->slot_bytes, (unsigned)a->part_bytes, a->has_rma ? "reads" : "no reads", s->rank, s->address.provider,
               (unsigned)s->address.protocol, s->address.rails, s->address.name_bytes, (unsigned)s->address.slot_bytes,
               (unsigned)s->address.part_bytes, s->address.has_rma ? "reads" : "no reads", remedy);
    s->told_unequal = 1;
    return DDL_ERR_UNSUPPORTED;
}

static int fabric_is_far_loopback(const fabric_self *s, const fabric_address *a, int same_host) {
    struct sockaddr_storage at;
    uint32_t format = s->rails[0].info->addr_format;
    int is_ip = format == FI_SOCKADDR || format == FI_SOCKADDR_IN || format == FI_SOCKADDR_IN6;
    memset(&at, 0, sizeof at);
    memcpy(&at, a->names, a->name_bytes < sizeof a->names ? a->name_bytes : sizeof a->names);
    return is_ip && !same_host && fabric_ip_is_loopback(&at);
}

/* The name of a provider, as a peer tells it: it is printed. */
static void fabric_name_clean(char *name, size_t bytes) {
    name[bytes - 1] = 0;
    for (; *name != 0; name++) {
        *name = (unsigned char)*name < 32 || *name == 127 ? '?' : *name;
    }
}

/* One of the two is at the address of its interface only from within its host. */
static int fabric_is_inner(fabric_self *s, int32_t peer, const fabric_address *a) {
    int inner = !s->peers[peer].same_host && (a->inner || s->address.inner);
    if (inner && a->inner) {
        fabric_log(s, s->told_inner ? DDL_LOG_DEBUG : DDL_LOG_INFO, "rank %d has DDL_ADVERTISE set, and libfabric tells peers the interface's own "
                   "address: it is not called there", peer);
        s->told_inner = 1;
    }
    return inner;
}

static ddl_status fabric_add_peer(void *self, int32_t peer, const void *address, size_t bytes, const char *peer_host_id,
                                  uint64_t *out_latency_ns, uint64_t *out_bytes_per_s) {
    fabric_self *s = self;
    fabric_address a;
    if (peer < 0 || peer >= s->world_size || bytes != sizeof a) {
        return DDL_ERR_ARG;
    }
    memcpy(&a, address, sizeof a);
    fabric_name_clean(a.provider, sizeof a.provider);
    fabric_peer *p = &s->peers[peer];
    p->same_host = peer_host_id != NULL && strcmp(peer_host_id, s->host_id) == 0;
    const char *what = fabric_differs(&a, &s->address);
    if (what != NULL) {
        return fabric_unequal(s, peer, &a, what);
    }
    if (fabric_is_inner(s, peer, &a) || (!s->authenticated && !p->same_host) || fabric_is_far_loopback(s, &a, p->same_host)) {
        return DDL_ERR_UNSUPPORTED;
    }
    memcpy(p->names, a.names, sizeof p->names);
    p->at[0] = s->connects ? 0 : FI_ADDR_NOTAVAIL;
    for (int32_t i = 0; i < s->rail_count && !s->connects; i++) {
        if (fi_av_insert(s->rails[i].av, a.names + (size_t)i * a.name_bytes, 1, &p->at[i], 0, NULL) != 1) {
            fabric_log(s, DDL_LOG_WARN, "the address of rank %d is not taken by %s", peer, s->address.provider);
            p->at[i] = FI_ADDR_NOTAVAIL;
            while (i-- > 0) {
                fi_av_remove(s->rails[i].av, &p->at[i], 1, 0);
                p->at[i] = FI_ADDR_NOTAVAIL;
            }
            return DDL_ERR_UNSUPPORTED;
        }
    }
    p->token_out = fabric_token(s, s->rank, peer, a.nonce);
    p->known = 1;
    *out_latency_ns = s->faster ? 3000 : 40000;
    *out_bytes_per_s = !s->faster ? 900000000u : s->speed != 0 ? s->speed : 5000000000u;
    return DDL_OK;
}

/* >>open */

static ddl_status fabric_allocate(fabric_self *s, const char *host_id) {
    size_t world = (size_t)s->world_size, id_bytes = strlen(host_id) + 1;
    s->host_id = fabric_zalloc(s, id_bytes);
    s->peers = fabric_zalloc(s, world * sizeof *s->peers);
    s->backlog = fabric_zalloc(s, world * sizeof *s->backlog);
    s->arrived_last = &s->arrived;
    if (s->host_id == NULL || s->peers == NULL || s->backlog == NULL) {
        return DDL_ERR_NOMEM;
    }
    memcpy(s->host_id, host_id, id_bytes);
    for (size_t i = 0; i < world; i++) {
        for (int r = 0; r < FABRIC_RAILS_MAX; r++) {
            s->peers[i].at[r] = FI_ADDR_NOTAVAIL;
        }
    }
    ddl_status status = fabric_block_make(s, FABRIC_SEND_SLOTS, s->slot_bytes, FABRIC_SEND, &s->send_free);
    if (status == DDL_OK && fabric_receives_add(s, FABRIC_BASE_SLOTS) == 0) {
        status = DDL_ERR_NOMEM;
    }
    return status;
}

/* What a machine without adapters costs: one look into a folder. */
static ddl_status fabric_is_wanted(fabric_self *s) {
    if (s->asked || fabric_any_device()) {
        return DDL_OK;
    }
    fabric_log(s, DDL_LOG_INFO, "there is no RDMA device (/sys/class/infiniband); libfabric over sockets is used "
               "only when DDL_TRANSPORTS names fabric or DDL_FABRIC_PROVIDER a provider");
    return DDL_ERR_UNSUPPORTED;
}

static ddl_status fabric_objects(fabric_self *s, const ddl_transport_params *params) {
    fabric_wish wish;
    if (!fabric_settings_read(s) || !fabric_settings_wish(s, params, &wish)) {
        return DDL_ERR_CONFIG;
    }
    const char *why = fabric_library_open(&s->lib, fabric_setting(s->host, "PORT_RANGE"));
    if (why != NULL) {
        fabric_log(s, s->asked ? DDL_LOG_WARN : DDL_LOG_INFO, "%s", why);
        return DDL_ERR_UNSUPPORTED;
    }
    ddl_status status = fabric_select(s, &wish);
    if (status != DDL_OK) {
        return status;
    }
    status = fabric_connects_select(s, &wish);
    if (status != DDL_OK) {
        return status;
    }
    fabric_hmem_select(s);
    fabric_attributes(s);
    if (!s->asked && !s->faster) {
        fabric_log(s, DDL_LOG_INFO, "the best that was found, %s on %s, is no faster than the sockets of the core: not used "
                   "unless DDL_TRANSPORTS names fabric or DDL_FABRIC_PROVIDER the provider",
                   s->rails[0].info->fabric_attr->prov_name, s->rails[0].info->domain_attr->name);
        return DDL_ERR_UNSUPPORTED;
    }
    fabric_hmem_tell(s);
    if (s->lib.late && !s->connects) {
        fabric_log(s, s->faster ? DDL_LOG_WARN : DDL_LOG_INFO, "libfabric was loaded before ddl_init, without FI_AV_REMOVE_CLEANUP=1 "
                   "in the environment: a rank that dies while an adapter reads from it may cost all links; set it for the job");
    }
    if (s->connects) {
        return fabric_connections_open(s);
    }
    for (int32_t i = 0; i < s->rail_count && status == DDL_OK; i++) {
        status = fabric_rail_open(s, &s->rails[i], (size_t)s->world_size);
    }
    return status;
}

/* Takes what still waits: ofi_rxm with receives of each connection crashes on it (fabric_library_variables). Bounded, as
 * peers may go on sending. */
static void fabric_drain(fabric_rail *r) {
    struct fi_cq_msg_entry entry[16];
    struct fi_cq_err_entry wrong;
    ssize_t n = 1;
    for (int i = 0; i < 1000 && r->enabled && (n > 0 || n == -FI_EAVAIL); i++) {
        n = fi_cq_read(r->cq, entry, 16);
        memset(&wrong, 0, sizeof wrong);
        if (n == -FI_EAVAIL) {
            fi_cq_readerr(r->cq, &wrong, 0);
        }
    }
}

/* Receives refer to slots until the endpoint is closed; regions that are bound to it go before it. */
static void fabric_free(fabric_self *s) {
    fabric_cache_close(s);
    for (fabric_block *b = s->blocks; b != NULL && (s->mr_mode & FI_MR_ENDPOINT) != 0; b = b->next) {
        fabric_mr_close(&b->mr);
    }
    for (fabric_link *l = s->links; l != NULL; l = l->next) {
        fabric_ways_close(s, l);
    }
    fabric_calls_refuse(s);
    if (s->shared != NULL) {
        fi_close(&s->shared->fid);
    }
    s->host->free(s->host, s->scratch);
    for (int32_t i = 0; i < s->rail_count; i++) {
        if (s->rails[i].ep != NULL) {
            fabric_drain(&s->rails[i]);
            fi_close(&s->rails[i].ep->fid);
            s->rails[i].ep = NULL;
        }
    }
    fabric_blocks_free(s);
    for (int32_t i = 0; i < s->rail_count; i++) {
        fabric_rail_close(s, &s->rails[i]);
    }
    while (s->offer_free != NULL) {
        fabric_offer *o = s->offer_free;
        s->offer_free = o->next;
        s->host->free(s->host, o);
    }
    while (s->links != NULL) {
        fabric_link *l = s->links;
        s->links = l->next;
        s->host->free(s->host, l);
    }
    if (s->epoll >= 0) {
        close(s->epoll);
    }
    if (s->timer >= 0) {
        close(s->timer);
    }
    s->host->free(s->host, s->backlog);
    s->host->free(s->host, s->peers);
    s->host->free(s->host, s->host_id);
    s->host->free(s->host, s);
}

static ddl_status fabric_open(const ddl_host *host, const ddl_transport_params *params, void **out_self) {
    fabric_self *s = host->alloc(host, sizeof *s);
    if (s == NULL) {
        return DDL_ERR_NOMEM;
    }
    memset(s, 0, sizeof *s);
    s->host = host;
    s->rank = params->rank;
    s->world_size = params->world_size;
    s->local_ranks = params->local_ranks;
    s->authenticated = params->authenticated && DDL_HAS(host, derive);
    s->asked = params->size > offsetof(ddl_transport_params, asked) && params->asked;
    s->asked |= fabric_setting(host, "FABRIC_PROVIDER") != NULL; /* to be measured against TCP */
    s->advertised = params->advertise != NULL && params->advertise[0] != 0;
    s->device = DDL_HAS(params, device) ? params->device : NULL;
    s->force_seed = (uint32_t)params->rank + 1;
    s->epoll = s->timer = -1;
    ddl_status status = fabric_is_wanted(s);
    status = status == DDL_OK ? fabric_objects(s, params) : status;
    status = status == DDL_OK ? fabric_address_make(s) : status;
    status = status == DDL_OK ? fabric_allocate(s, params->host_id) : status;
    status = status == DDL_OK ? fabric_wait_open(s) : status;
    if (status != DDL_OK) {
        fabric_free(s);
        return status;
    }
    *out_self = s;
    return DDL_OK;
}

/* >>close */

static int fabric_has_last_words(const fabric_self *s) {
    for (const fabric_link *l = s->links; l != NULL; l = l->next) {
        if (!s->peers[l->peer].gone && l->broken == 0 && (!l->told_bye || l->sends > 0 || !l->heard_out)) {
            return 1;
        }
    }
    return 0;
}

/* Closing an endpoint drops what it has not sent, and what the kernel has taken but not the peer: a send that is complete
 * is no proof, so the peer's word is waited for. The host is not called any more: nothing that still arrives counts. */
static void fabric_linger(fabric_self *s) {
    uint64_t deadline = s->host->now_ns(s->host) + FABRIC_LINGER_NS;
    while (!s->failed && fabric_has_last_words(s) && s->host->now_ns(s->host) < deadline) {
        fabric_poll(s);
        for (fabric_link *l = s->links; l != NULL; l = l->next) {
            if (!s->peers[l->peer].gone && l->broken == 0) {
                fabric_push(s, l);
                fabric_push_bye(s, l);
            }
        }
        if (fabric_has_last_words(s)) { /* the peers need the cores */
            nanosleep(&(struct timespec){0, 50000}, NULL);
        }
    }
}

static void fabric_close(void *self) {
    fabric_self *s = self;
    s->told_inject = 1;
    fabric_linger(s);
    for (fabric_link *l = s->links; l != NULL; l = l->next) {
        fabric_drop(s, l->peer, DDL_ERR_CANCELLED);
    }
    fabric_free(s);
}

static void fabric_peer_dead(void *self, int32_t peer) {
    fabric_self *s = self;
    if (peer >= 0 && peer < s->world_size) {
        fabric_drop(s, peer, DDL_ERR_PEER);
    }
}

static ddl_status fabric_connect(void *self, int32_t peer) {
    fabric_self *s = self;
    if (peer >= 0 && peer < s->world_size && s->peers[peer].known && !s->peers[peer].gone) {
        fabric_link *l = fabric_link_of(s, peer);
        if (l != NULL && l->sequence == 0) {
            l->ack_due = 1; /* any message connects */
            fabric_backlog_add(s, l);
        }
    }
    return DDL_OK;
}

/* >>table */

static const ddl_transport fabric_transport = {
    .size = sizeof(ddl_transport),
    .flags = DDL_TRANSPORT_ORDERED | DDL_TRANSPORT_BLIND | DDL_TRANSPORT_PULLS,
    .max_payload_bytes = DDL_MESSAGE_DATA_BYTES,
    .open = fabric_open,
    .close = fabric_close,
    .address = fabric_address_of,
    .add_peer = fabric_add_peer,
    .send = fabric_send,
    .progress = fabric_progress,
    .arm = fabric_arm,
    .peer_dead = fabric_peer_dead,
    .connect = fabric_connect,
    .recall = fabric_recall,
    .redirect = fabric_redirect,
    .memory_register_on = fabric_memory_register_on,
    .memory_release = fabric_memory_release,
    .memory_forget = fabric_memory_forget,
    .describe = fabric_describe,
    .get = fabric_get_begin,
};

static const char *const fabric_names[] = {
    "FABRIC_PROVIDER", "FABRIC_DOMAIN", "FABRIC_INTERFACE", "FABRIC_SUBNET", "FABRIC_RAILS", "FABRIC_OFFER_BYTES",
    "FABRIC_CACHE", "FABRIC_CACHE_BYTES", "FABRIC_PROGRESS", "FABRIC_FORCE_UNORDERED", "FABRIC_FORCE_NO_RMA",
    "FABRIC_FORCE_NO_WAIT", "FABRIC_FORCE_NO_INJECT", "FABRIC_FORCE_EVENTS", "FABRIC_FORCE_DROPS",
    "FABRIC_FORCE_MAX_MESSAGE", "FABRIC_FORCE_MR", "FABRIC_FORCE_FAIL_REGISTRATION", NULL};

static const ddl_plugin fabric_plugin = {
    .size = sizeof(ddl_plugin),
    .abi = DDL_PLUGIN_ABI,
    .name = "fabric",
    .version = "1",
    .about = "libfabric: verbs and EFA adapters between hosts, TCP where it is asked for.",
    .transport = &fabric_transport,
    .settings = fabric_names,
};

/* Whether there is something to use is found out by open, which knows what was asked for. */
DDL_PLUGIN_EXPORT const ddl_plugin *ddl_plugin_fabric_v1(const ddl_host *host);
const ddl_plugin *ddl_plugin_fabric_v1(const ddl_host *host) {
    (void)host;
    return &fabric_plugin;
}

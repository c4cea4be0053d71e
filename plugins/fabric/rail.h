/* rail: the objects of libfabric that belong to one adapter. */
#ifndef FABRIC_RAIL_H
#define FABRIC_RAIL_H

#include "cache.h"

#include <sys/epoll.h>
#include <sys/socket.h>

/* Whether a provider is what a name means: tcp is tcp itself where it has RDM endpoints (2.x), else tcp;ofi_rxm. */
static int fabric_provider_is(const struct fi_info *info, const char *name) {
    const char *provider = info->fabric_attr->prov_name;
    size_t bytes = strlen(name);
    if (provider == NULL || strncmp(provider, name, bytes) != 0) {
        return 0;
    }
    return provider[bytes] == 0 || strcmp(provider + bytes, ";ofi_rxm") == 0;
}

static int fabric_is_sockets(const struct fi_info *info) {
    return !fabric_provider_is(info, "efa") && !fabric_provider_is(info, "verbs") &&
           !fabric_provider_is(info, "psm3") && !fabric_provider_is(info, "psm2") && !fabric_provider_is(info, "opx") &&
           !fabric_provider_is(info, "cxi");
}

/* EFA was told to bear fork (fabric_library_variables), which rdma-core takes before the first registration of a process alone. */
static const char *fabric_fork_remedy(const struct fi_info *info, long error) {
    const char *told = getenv("FI_EFA_FORK_SAFE");
    int may_be = error == -FI_EINVAL && fabric_provider_is(info, "efa") && told != NULL && strcmp(told, "0") != 0;
    return !may_be ? "" : ". Where another library has registered memory before ddl_init, or RDMAV_HUGEPAGES_SAFE is set, EFA cannot "
                          "be made to bear fork on this kernel: set FI_EFA_FORK_SAFE=0 in a job that does not fork, or "
                          "RDMAV_FORK_SAFE=1 for all of it";
}

static ddl_status fabric_failed(fabric_self *s, const char *what, long result) {
    char remedy[256];
    fabric_log(s, DDL_LOG_WARN, "%s failed on %s: %s%s%s", what, s->rails[0].info->fabric_attr->prov_name, fabric_error(s, result),
               fabric_memlock_remedy(s, result, remedy), fabric_fork_remedy(s->rails[0].info, result));
    return DDL_ERR_SYSTEM;
}

/* tcp of libfabric before 1.18 looks at its connections with poll or with epoll. epoll is one descriptor for all, and costs every
 * message 2 us; poll looks at each connection every time. So a job of a few ranks sleeps on the connections themselves
 * (fabric_sockets_watch). */
static int fabric_sleeps_on_sockets(const fabric_self *s) {
    return s->connects && s->rail_count == 1 && !s->force_no_wait && s->world_size <= FABRIC_POLL_RANKS &&
           FI_VERSION_LT(s->lib.version(), FI_VERSION(1, 18));
}

/* A descriptor to sleep on is not everywhere: EFA has none ("Wait objects are not currently supported", fi_efa(7)). */
static int fabric_cq_open(fabric_self *s, fabric_rail *r) {
    struct fi_cq_attr attr = {.size = r->info->tx_attr->size + r->info->rx_attr->size, .format = FI_CQ_FORMAT_MSG};
    int result = -FI_ENOSYS;
    if (fabric_sleeps_on_sockets(s)) {
        attr.wait_obj = FI_WAIT_POLLFD;
        result = fi_cq_open(r->domain, &attr, &r->cq, r);
        s->by_sockets = result == 0;
    }
    if (result != 0 && !s->force_no_wait) {
        attr.wait_obj = FI_WAIT_FD;
        result = fi_cq_open(r->domain, &attr, &r->cq, r);
    }
    if (result == 0) {
        return s->by_sockets ? 0 : fi_control(&r->cq->fid, FI_GETWAIT, &r->wait_fd);
    }
    attr.wait_obj = FI_WAIT_NONE;
    return fi_cq_open(r->domain, &attr, &r->cq, r);
}

/* What else libfabric has in its list are its own signals. */
static int fabric_socket_connects(int fd) {
    int family = AF_UNIX;
    socklen_t bytes = sizeof family;
    return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &bytes) == 0 && (family == AF_INET || family == AF_INET6);
}

/* For each completion tcp of libfabric before 1.18 writes a byte to itself, to wake who sleeps in its list, unless one is there that was
 * not taken yet; its next look reads it, and finds nothing else. Nobody sleeps there: we sleep on the connections. So the byte of a
 * first completion is taken here, where libfabric does not see it, and no other is ever written: of five system calls of a small
 * message two fewer, and no look in vain. fi_trywait would wait for the byte, and is not asked about this queue any more (fabric_arm).
 * Of the list the first descriptor tells of changes to the list itself, and is left alone; the second is the queue's. */
static void fabric_queue_hush(fabric_self *s) {
    struct pollfd list[FABRIC_SOCKETS];
    struct fi_wait_pollfd wait = {.nfds = FABRIC_SOCKETS, .fd = list};
    char byte;
    s->hush_tries++;
    if (fi_control(&s->rails[0].cq->fid, FI_GETWAIT, &wait) != 0 || wait.nfds < 2 || fabric_socket_connects(list[1].fd)) {
        return;
    }
    if (recv(list[1].fd, &byte, sizeof byte, MSG_DONTWAIT) == sizeof byte) {
        s->hushed = 1;
    }
}

/* EFA tells errors that belong to no operation of ours to a queue of events; without one it prints and calls abort()
 * (efa_base_ep_write_eq_error in prov/efa/src/efa_base_ep.c). Without memory for a queue it does so still. */
static void fabric_events_open(fabric_self *s, fabric_rail *r) {
    struct fi_eq_attr attr = {.wait_obj = FI_WAIT_NONE};
    if (!s->force_events && !fabric_provider_is(r->info, "efa")) {
        return;
    }
    int result = fi_eq_open(r->fabric, &attr, &r->eq, NULL);
    if (result == 0 && (result = fi_ep_bind(r->ep, &r->eq->fid, 0)) != 0) {
        fi_close(&r->eq->fid);
    }
    if (result != 0) {
        r->eq = NULL;
        fabric_log(s, DDL_LOG_WARN, "there is no queue for events (%s): an internal error of %s would end this process",
                   fabric_error(s, result), r->info->fabric_attr->prov_name);
    }
}

static ddl_status fabric_rail_open(fabric_self *s, fabric_rail *r, size_t peers) {
    struct fi_av_attr av = {.type = FI_AV_TABLE, .count = peers};
    int result = s->lib.fabric(r->info->fabric_attr, &r->fabric, NULL);
    if (result != 0) {
        return fabric_failed(s, "fi_fabric", result);
    }
    if ((result = fi_domain(r->fabric, r->info, &r->domain, NULL)) != 0) {
        return fabric_failed(s, "fi_domain", result);
    }
    if ((result = fi_av_open(r->domain, &av, &r->av, NULL)) != 0) {
        return fabric_failed(s, "fi_av_open", result);
    }
    if ((result = fabric_cq_open(s, r)) != 0) {
        return fabric_failed(s, "fi_cq_open", result);
    }
    if ((result = fi_endpoint(r->domain, r->info, &r->ep, NULL)) != 0) {
        return fabric_failed(s, "fi_endpoint", result);
    }
    if ((result = fi_ep_bind(r->ep, &r->av->fid, 0)) != 0) {
        r->ep = NULL; /* lost: ofi_rxm of libfabric 1.17 crashes when it closes an endpoint without addresses */
        return fabric_failed(s, "fi_ep_bind", result);
    }
    fabric_events_open(s, r);
    if ((result = fi_ep_bind(r->ep, &r->cq->fid, FI_TRANSMIT | FI_RECV)) != 0 || (result = fi_enable(r->ep)) != 0) {
        return fabric_failed(s, "making an endpoint", result);
    }
    r->enabled = 1;
    return DDL_OK;
}

static void fabric_rail_close(fabric_self *s, fabric_rail *r) {
    struct fid *objects[] = {r->ep != NULL ? &r->ep->fid : NULL,         r->listener != NULL ? &r->listener->fid : NULL,
                             r->eq != NULL ? &r->eq->fid : NULL,         r->cq != NULL ? &r->cq->fid : NULL,
                             r->av != NULL ? &r->av->fid : NULL,         r->domain != NULL ? &r->domain->fid : NULL,
                             r->fabric != NULL ? &r->fabric->fid : NULL};
    for (size_t i = 0; i < sizeof objects / sizeof objects[0]; i++) {
        if (objects[i] != NULL) {
            fi_close(objects[i]);
        }
    }
    if (r->info != NULL) {
        s->lib.freeinfo(r->info);
    }
    memset(r, 0, sizeof *r);
}

/* What is moved at once of so many bytes; all rails have some of it. */
static uint64_t fabric_rail_part(const fabric_self *s, uint64_t bytes) {
    uint64_t part = (bytes / (uint64_t)s->rail_count + 4096) & ~(uint64_t)4095;
    return part < s->max_read ? part : s->max_read;
}

/* While a rank sleeps, a rail's descriptor is in our set when others are, too: one that is in a set costs every message a
 * wake-up more. Returns whether it is as it should be. */
static int fabric_watch(fabric_self *s, fabric_rail *r, int watch) {
    struct epoll_event event = {.events = EPOLLIN};
    if (r->watched != watch && r->wait_fd >= 0 &&
        epoll_ctl(s->epoll, watch ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, r->wait_fd, &event) == 0) {
        r->watched = watch;
    }
    return r->watched == watch || r->wait_fd < 0;
}

#endif /* FABRIC_RAIL_H */

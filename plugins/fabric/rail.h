/* rail: the objects of libfabric that belong to one adapter; and endpoints of their own for reads, where an adapter does not
 * answer them. */
#ifndef FABRIC_RAIL_H
#define FABRIC_RAIL_H

#include "cache.h"

#include <sys/epoll.h>

/* Whether a provider is what a name means: tcp is tcp itself where it has RDM endpoints (2.x), else tcp;ofi_rxm. */
static int fabric_provider_is(const struct fi_info *info, const char *name) {
    const char *provider = info->fabric_attr->prov_name;
    size_t bytes = strlen(name);
    if (provider == NULL || strncmp(provider, name, bytes) != 0) {
        return 0;
    }
    /* EFA offers a second kind of endpoint without reads of any length. */
    if (info->fabric_attr->name != NULL && strcmp(info->fabric_attr->name, "efa-direct") == 0) {
        return 0;
    }
    return provider[bytes] == 0 || strcmp(provider + bytes, ";ofi_rxm") == 0;
}

static int fabric_is_sockets(const struct fi_info *info) {
    return !fabric_provider_is(info, "efa") && !fabric_provider_is(info, "verbs") &&
           !fabric_provider_is(info, "psm3") && !fabric_provider_is(info, "psm2") && !fabric_provider_is(info, "opx") &&
           !fabric_provider_is(info, "cxi");
}

static ddl_status fabric_failed(fabric_self *s, const char *what, long result) {
    fabric_log(s, DDL_LOG_WARN, "%s failed on %s: %s", what, s->rails[0].info->fabric_attr->prov_name,
               fabric_error(s, result));
    return DDL_ERR_SYSTEM;
}

/* A descriptor to sleep on is not everywhere: EFA has none ("Wait objects are not currently supported", fi_efa(7)). */
static int fabric_cq_open(fabric_self *s, fabric_rail *r) {
    struct fi_cq_attr attr = {.size = r->info->tx_attr->size + r->info->rx_attr->size,
                              .format = FI_CQ_FORMAT_MSG,
                              .wait_obj = FI_WAIT_FD};
    int result = s->force_no_wait ? -FI_ENOSYS : fi_cq_open(r->domain, &attr, &r->cq, r);
    if (result == 0) {
        return fi_control(&r->cq->fid, FI_GETWAIT, &r->wait_fd);
    }
    attr.wait_obj = FI_WAIT_NONE;
    return fi_cq_open(r->domain, &attr, &r->cq, r);
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
    struct fid *objects[] = {r->ep != NULL ? &r->ep->fid : NULL, r->eq != NULL ? &r->eq->fid : NULL,
                             r->cq != NULL ? &r->cq->fid : NULL, r->av != NULL ? &r->av->fid : NULL, r->domain != NULL ? &r->domain->fid : NULL,
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

/* >>readers
 * An adapter answers a read whatever its process does. Over sockets the peer's process has to help, and one that is stopped or
 * computes does not: a read would hold the memory it goes to for as long. So reads are made by endpoints that do nothing else,
 * one for each rail, and can be given up with them; peers answer them as they would the rail. */

/* Whether there are some: opened when the first payload is to be read, and anew after they were abandoned. */
static int fabric_readers_open(fabric_self *s) {
    if (s->readers_open || s->readers_left == 0) {
        return s->readers_open;
    }
    int opened = 1;
    for (int32_t i = 0; i < s->rail_count && opened; i++) {
        fabric_rail *r = &s->readers[i];
        r->wait_fd = -1;
        r->info = s->lib.dupinfo(s->rails[i].info);
        opened = r->info != NULL;
        if (opened) { /* by no thread of the provider's: see fabric_readers_abandon */
            r->info->domain_attr->data_progress = r->info->domain_attr->control_progress = FI_PROGRESS_MANUAL;
            opened = fabric_rail_open(s, r, (size_t)s->world_size) == DDL_OK;
        }
    }
    for (int32_t i = 0; i < s->rail_count && !opened; i++) {
        fabric_rail_close(s, &s->readers[i]);
    }
    if (!opened) {
        fabric_log(s, DDL_LOG_WARN, "there is no endpoint to read large payloads by; they are sent in pieces instead");
    }
    s->readers_open = opened;
    s->readers_left = opened ? s->readers_left - 1 : 0;
    s->readers_round++;
    return opened;
}

/* Gives up all that is being read, as some peer does not answer: an endpoint that nobody serves takes nothing from its sockets,
 * so it writes to no memory any more. It stays as it is to the end of the process; tcp of libfabric before 1.20 crashes when
 * it closes a connection on which the answer to a read is half-way (its flush reports that read twice). */
static void fabric_readers_abandon(fabric_self *s) {
    int32_t reads = 0;
    for (int32_t i = 0; i < s->rail_count; i++) {
        reads += s->readers[i].reads;
    }
    if (reads == 0) {
        return;
    }
    fabric_log(s, s->readers_left > 0 ? DDL_LOG_INFO : DDL_LOG_WARN, "%d reads are given up; the connections that they go by "
               "are left as they are%s", reads, s->readers_left > 0 ? "" : "; from now on large payloads are sent in pieces");
    for (fabric_link *l = s->links; l != NULL; l = l->next) {
        if (l->reads > 0) {
            l->landing.failed = 1;
            l->landing.reading = l->reads = 0;
            fabric_backlog_add(s, l);
        }
    }
    for (int32_t i = 0; i < s->rail_count && s->readers_open; i++) {
        fabric_watch(s, &s->readers[i], 0);
        s->lib.freeinfo(s->readers[i].info);
        memset(&s->readers[i], 0, sizeof s->readers[i]);
    }
    s->readers_open = 0;
}

static void fabric_readers_close(fabric_self *s) {
    for (int32_t i = 0; i < s->rail_count && s->readers_open; i++) {
        fabric_rail_close(s, &s->readers[i]);
    }
    s->readers_open = 0;
}

/* What a payload of a peer's is read by. */
static fabric_rail *fabric_reader(fabric_self *s, int32_t rail) {
    return s->reads_apart ? &s->readers[rail] : &s->rails[rail];
}

/* The peer's rail as fabric_reader knows it; FI_ADDR_NOTAVAIL: it cannot be read from. */
static fi_addr_t fabric_reader_at(fabric_self *s, fabric_link *l, int32_t rail) {
    fi_addr_t at = s->peers[l->peer].at[rail];
    if (!s->reads_apart || at == FI_ADDR_NOTAVAIL) {
        return at;
    }
    if (!fabric_readers_open(s)) {
        return FI_ADDR_NOTAVAIL;
    }
    if (l->readers_round != s->readers_round) {
        for (int32_t i = 0; i < FABRIC_RAILS_MAX; i++) {
            l->reader_at[i] = FI_ADDR_NOTAVAIL;
        }
        l->readers_round = s->readers_round;
    }
    uint8_t name[FABRIC_ADDRESS_BYTES];
    size_t bytes = sizeof name;
    if (l->reader_at[rail] == FI_ADDR_NOTAVAIL &&
        (fi_av_lookup(s->rails[rail].av, at, name, &bytes) != 0 || bytes > sizeof name ||
         fi_av_insert(s->readers[rail].av, name, 1, &l->reader_at[rail], 0, NULL) != 1)) {
        l->reader_at[rail] = FI_ADDR_NOTAVAIL;
    }
    return l->reader_at[rail];
}

/* Nothing is read from a peer any more. */
static void fabric_readers_forget(fabric_self *s, fabric_link *l) {
    for (int32_t i = 0; i < s->rail_count && s->readers_open && l->readers_round == s->readers_round; i++) {
        if (l->reader_at[i] != FI_ADDR_NOTAVAIL) {
            fi_av_remove(s->readers[i].av, &l->reader_at[i], 1, 0);
            l->reader_at[i] = FI_ADDR_NOTAVAIL;
        }
    }
}

/* A peer's readers, as it names them. */
static void fabric_answers_begin(fabric_self *s, fabric_link *l, const uint8_t *names) {
    for (int32_t i = 0; i < s->rail_count; i++) {
        if (fi_av_insert(s->rails[i].av, names + (size_t)i * s->address.name_bytes, 1, &l->answers[i], 0, NULL) != 1) {
            l->answers[i] = FI_ADDR_NOTAVAIL;
        }
    }
}

/* Ends the connections by which a peer reads from us, and with them answers that are half-way: the memory is wanted back, or
 * nobody takes the rest. again: it may connect anew. */
static void fabric_answers_end(fabric_self *s, fabric_link *l, int again) {
    for (int32_t i = 0; i < s->rail_count; i++) {
        uint8_t name[FABRIC_ADDRESS_BYTES];
        size_t bytes = sizeof name;
        if (l->answers[i] == FI_ADDR_NOTAVAIL || s->rails[i].ep == NULL) {
            continue;
        }
        int known = fi_av_lookup(s->rails[i].av, l->answers[i], name, &bytes) == 0 && bytes <= sizeof name;
        fi_av_remove(s->rails[i].av, &l->answers[i], 1, 0);
        if (!again || !known || fi_av_insert(s->rails[i].av, name, 1, &l->answers[i], 0, NULL) != 1) {
            l->answers[i] = FI_ADDR_NOTAVAIL;
        }
    }
}

#endif /* FABRIC_RAIL_H */

/* listen: how rank 0 comes to its place: the addresses that its name means here, never all of them. */
#ifndef DDL_STORE_LISTEN_H
#define DDL_STORE_LISTEN_H

#include "server.h"

#ifndef DDL__BIND_NS                     /* tests have less patience */
#define DDL__BIND_NS (2 * DDL__NS_PER_S) /* a job that ends frees the port of one that starts */
#endif

/* Binds and listens; the descriptor, or -1 with errno. */
static int ddl__listen_at(const ddl__address *a) {
    int fd = socket(a->at.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), yes = 1;
    if (fd < 0) {
        return -1;
    }
    if (a->at.any.sa_family != AF_UNIX) { /* connections of the job before, in TIME_WAIT, hold no port */
        (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    }
    if (a->at.any.sa_family == AF_INET6) {
        (void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &yes, sizeof yes);
    }
    if (bind(fd, &a->at.any, a->bytes) == 0 && listen(fd, 4096) == 0) {
        return fd;
    }
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

/* Listens at every address of the list that is this machine's. Returns 0, or the errno of one that failed: half a name
 * would be reachable for half the ranks. */
static int ddl__listen_all(ddl__server *server, const ddl__addresses *list, int32_t port) {
    int error = EADDRNOTAVAIL;
    for (int i = 0; i < list->count && server->listener_count < DDL__LISTENERS_MAX; i++) {
        ddl__address a = list->list[i];
        ddl__address_set_port(&a, port);
        int fd = ddl__listen_at(&a);
        if (fd >= 0) {
            server->listeners[server->listener_count++] = fd;
            ddl__address_text(&a, server->where, sizeof server->where);
        } else if (errno != EADDRNOTAVAIL && errno != EAFNOSUPPORT) {
            error = errno;
            ddl__server_close_listeners(server);
            return error;
        }
    }
    return server->listener_count > 0 ? 0 : error;
}

static ddl_status ddl__listen_failed(ddl__server *server, int error) {
    const ddl__meeting_place *place = &server->settings->place;
    ddl__text text = {server->why->text, sizeof server->why->text, 0};
    server->why->status = DDL_ERR_CONFIG;
    if (error == EADDRNOTAVAIL) {
        char mine[64] = "none";
        ddl__addresses all;
        ddl__interface_addresses(NULL, &all);
        if (all.count > 0) {
            ddl__address_text(&all.list[0], mine, sizeof mine);
            *strrchr(mine, ':') = 0;
        }
        ddl__text_add(
            &text,
            "ddl_init: rank 0 runs here, but %s (of %s) is no address of this machine (it has %s). Start rank 0 "
            "there, name this machine on all ranks, or set DDL_INTERFACE on rank 0 when the name leads here by "
            "a proxy",
            place->host, place->from, mine);
    } else if (error == EADDRINUSE) {
        ddl__text_add(&text, "ddl_init: rank 0 cannot listen on port %d of %s: it is taken", place->port, place->host);
        ddl__text_port_holder(&text, place->port);
        ddl__text_add(&text, ". Give this job another MASTER_PORT, or end the other program");
    } else {
        server->why->status = DDL_ERR_SYSTEM;
        ddl__text_add(&text, "ddl_init: rank 0 cannot listen on port %d of %s: %s", place->port, place->host,
                      strerror(error));
    }
    return server->why->status;
}

static void ddl__pause_ms(uint64_t ms) {
    struct timespec t = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000};
    (void)nanosleep(&t, NULL);
}

/* Tries the ports of the place in turn until one is free. */
static ddl_status ddl__listen_ports(ddl__server *server, const ddl__addresses *list) {
    const ddl__meeting_place *place = &server->settings->place;
    uint64_t until = ddl__now_ns() + DDL__BIND_NS;
    for (;;) {
        int error = EADDRINUSE;
        for (int32_t i = 0; i < place->ports && error == EADDRINUSE; i++) {
            error = ddl__listen_all(server, list, place->port + i);
        }
        if (error != EADDRINUSE || ddl__now_ns() >= until) {
            return error == 0 ? DDL_OK : ddl__listen_failed(server, error);
        }
        ddl__pause_ms(20);
    }
}

/* The interface that was named. Where the name of rank 0's host means a loopback address (Debian's 127.0.1.1), ranks of
 * this host come there. */
static ddl_status ddl__listen_interface(ddl__server *server, ddl__addresses *list) {
    const ddl__settings *s = server->settings;
    ddl__addresses named;
    ddl__interface_addresses(s->interface_name, list);
    if (list->count == 0) {
        return ddl__fail(server->why, DDL_ERR_CONFIG,
                         "ddl_init: there is no interface %s with an address here (DDL_INTERFACE)", s->interface_name);
    }
    if (ddl__resolve(s->place.host, &named) == 0) {
        for (int i = 0; i < named.count; i++) {
            if (ddl__address_is_loopback(&named.list[i])) {
                ddl__addresses_add(list, &named.list[i].at.any);
            }
        }
    }
    return DDL_OK;
}

/* Where the name of rank 0's host is to be bound. */
static ddl_status ddl__listen_addresses(ddl__server *server, ddl__addresses *list) {
    const ddl__settings *s = server->settings;
    if (s->interface_name != NULL) {
        return ddl__listen_interface(server, list);
    }
    int error = ddl__resolve(s->place.host, list);
    if (error != 0) {
        return ddl__fail(
            server->why, DDL_ERR_CONFIG,
            "ddl_init: rank 0 cannot find the address of %s (of %s): %s. Name the host that rank 0 runs on as "
            "the others reach it, or give its address",
            s->place.host, s->place.from, gai_strerror(error));
    }
    struct in6_addr literal;
    bool name = inet_pton(AF_INET, s->place.host, &literal) != 1 && inet_pton(AF_INET6, s->place.host, &literal) != 1;
    if (name && strncmp(s->place.host, "localhost", 9) != 0 && list->count > 0 &&
        ddl__address_is_loopback(&list->list[0])) { /* Debian's 127.0.1.1 */
        ddl__log(
            server->base, DDL_LOG_WARN,
            "%s means a loopback address here (see /etc/hosts), so that only this machine reaches rank 0; for more "
            "machines give its address",
            s->place.host);
    }
    return DDL_OK;
}

static ddl_status ddl__no_secret_between_hosts(const ddl__settings *s, ddl__sentence *why) {
    return ddl__fail(
        why, DDL_ERR_AUTH,
        "ddl_init: rank 0 is at %s, which is another machine, and this job has no secret to prove who belongs "
        "to it. Make one, the same on every machine: head -c 32 /dev/urandom > ~/.ddl-secret; chmod 600 "
        "~/.ddl-secret; export DDL_SECRET_FILE=~/.ddl-secret",
        s->place.host);
}

/* Without a secret the job stays on this machine, on a unix socket. */
static ddl_status ddl__listen_unix(ddl__server *server, const ddl__addresses *list) {
    const ddl__settings *s = server->settings;
    uint64_t until = ddl__now_ns() + DDL__BIND_NS;
    ddl__address a;
    int fd;
    if (!ddl__addresses_have_mine(list)) {
        return ddl__no_secret_between_hosts(s, server->why);
    }
    ddl__unix_text(s, server->where, sizeof server->where);
    ddl__address_of_unix(&a, s->place.port, s->job_id);
    while ((fd = ddl__listen_at(&a)) < 0 && errno == EADDRINUSE && ddl__now_ns() < until) {
        ddl__pause_ms(20);
    }
    if (fd < 0) {
        return ddl__fail(server->why, errno == EADDRINUSE ? DDL_ERR_CONFIG : DDL_ERR_SYSTEM,
                         "ddl_init: rank 0 cannot take %s: %s. Another job of this user may have it: "
                         "give this one another MASTER_PORT or DDL_JOB",
                         server->where, strerror(errno));
    }
    server->by_uid = true;
    server->listeners[server->listener_count++] = fd;
    return DDL_OK;
}

static ddl_status ddl__listen(ddl__server *server) {
    ddl__addresses list;
    DDL__TRY(ddl__listen_addresses(server, &list));
    if (ddl__place_is_here(server->settings)) {
        return ddl__listen_unix(server, &list);
    }
    DDL__TRY(ddl__listen_ports(server, &list));
    ddl__log(server->base, DDL_LOG_DEBUG, "rank 0 listens at %s", server->where);
    return DDL_OK;
}

#endif /* DDL_STORE_LISTEN_H */

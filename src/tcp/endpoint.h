/* tcp, second part: listening, connecting, proving who is there; the transport table.
 *
 * Connections are made at first use, by whoever sends first; when two ranks connect to each other at once, the one of
 * the lower rank stays. Without a job secret, ranks of one host use unix sockets in the abstract namespace (no file is
 * left behind) whose other end must have the same uid. Between hosts each pair has a second, silent connection: on it
 * keepalive and TCP_USER_TIMEOUT notice a cut link in 4 s, while a peer that is only stopped still answers (on a
 * connection with data the user timeout would take a full window of a stopped peer for a cut link). */
#ifndef DDL_TCP_ENDPOINT_H
#define DDL_TCP_ENDPOINT_H

#include "link.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/un.h>

enum {
    DDL__TCP_STRANGERS_MAX = 64,
    DDL__TCP_EPOLL_EVERY = 8 /* polls of the expected peer for each look at all the others */
};
#define DDL__TCP_PROOF_NS (5 * DDL__NS_PER_S)
#define DDL__TCP_DEAF_NS (100 * DDL__NS_PER_MS)
#define DDL__TCP_RETRY_NS (50 * DDL__NS_PER_MS)
#define DDL__TCP_ENDING_MS 400u                /* from the end of a control connection to that of its data connection */
#define DDL__TCP_REFUSED_NS (1 * DDL__NS_PER_S) /* nobody has listened at its port for so long: it is gone */
#define DDL__TCP_UNSENT_BYTES (256 << 10)       /* of data that the kernel holds beyond the window, between hosts */
#define DDL__TCP_SILENT_MS 3500u                /* its host has not answered: at the fourth probe, one a second */

static void ddl__tcp_start(ddl__tcp *t, int32_t peer);

/* >>sockets */

static bool ddl__tcp_is_unix(const struct sockaddr_storage *a) { return a->ss_family == AF_UNIX; }

static bool ddl__tcp_is_loopback(const struct sockaddr_storage *a) {
    if (a->ss_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)a;
        return (ntohl(in->sin_addr.s_addr) >> 24) == 127;
    }
    return a->ss_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)a)->sin6_addr);
}

static void ddl__tcp_set(int fd, int level, int option, int value) {
    setsockopt(fd, level, option, &value, sizeof value);
}

/* Errors are ignored: each option is an improvement, none is needed. */
static void ddl__tcp_tune_socket(ddl__tcp *t, int fd, bool same_host, bool is_control) {
    ddl__tcp_set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    ddl__tcp_set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    ddl__tcp_set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 1);
    ddl__tcp_set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 1);
    ddl__tcp_set(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
    /* A probe is no sign of life, but a byte that is sent again is one, to the side that hears it: with nothing
     * unacknowledged on either side, both give a cut in one direction up at the same time. */
    if (is_control) {
        ddl__tcp_set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, DDL__TCP_SILENT_MS);
    }
    /* Congestion control that paces (bbr) halves the bandwidth of loopback, where there is nothing to be gentle with. A
     * socket that was paced once stays so, therefore the listener begins without and only links to other hosts get the
     * system's choice. */
    const char *control = same_host ? "reno" : t->congestion;
    setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, control, (socklen_t)strlen(control));
    /* What the kernel took cannot be overtaken: between hosts it holds the window and little more, so that control
     * messages do not wait behind megabytes. The window itself is not limited by it. */
    if (!same_host) {
        ddl__tcp_set(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, DDL__TCP_UNSENT_BYTES);
    }
}

/* Without a secret, the uid of the other end is the proof. */
static bool ddl__tcp_same_user(int fd) {
    struct ucred cred;
    socklen_t bytes = sizeof cred;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &bytes) == 0 && cred.uid == geteuid();
}

/* >>connections */

static ddl__tcp_conn *ddl__tcp_conn_new(ddl__tcp *t, int fd, int32_t peer, bool is_client) {
    ddl__tcp_conn *c = t->host->alloc(t->host, sizeof *c);
    if (c == NULL) {
        return NULL;
    }
    c->fd = fd;
    c->peer = peer;
    c->is_client = is_client;
    c->since_ns = t->host->now_ns(t->host);
    return c;
}

static void ddl__tcp_proof_free(ddl__tcp *t, ddl__tcp_conn *c) {
    if (c->proof != NULL) {
        t->host->prove(t->host, &c->proof, c->is_client, c->peer, NULL, 0, NULL, NULL, NULL, NULL);
        c->proof = NULL;
    }
}

static void ddl__tcp_conn_free(ddl__tcp *t, ddl__tcp_conn *c) {
    if (c == NULL) {
        return;
    }
    ddl__tcp_proof_free(t, c);
    if (c->token != NULL) {
        t->host->landed(t->host, c->peer, c->token, DDL_ERR_PEER);
    }
    close(c->fd);
    t->host->free(t->host, c);
}

static void ddl__tcp_stranger_unlink(ddl__tcp *t, ddl__tcp_conn *c) {
    for (ddl__tcp_conn **at = &t->strangers; *at != NULL; at = &(*at)->next) {
        if (*at == c) {
            *at = c->next;
            c->next = NULL;
            t->stranger_count--;
            return;
        }
    }
}

static void ddl__tcp_stranger_drop(ddl__tcp *t, ddl__tcp_conn *c, const char *why) {
    ddl__tcp_log(t, DDL_LOG_DEBUG, "tcp: closed a connection to our port that %s", why);
    ddl__tcp_stranger_unlink(t, c);
    ddl__tcp_conn_free(t, c);
}

/* The side that made the data connection makes the control connection. */
static bool ddl__tcp_wants_control(const ddl__tcp_peer *p) {
    return p->data != NULL && p->data->state == DDL__TCP_READY && p->data->is_client && p->control == NULL &&
           !p->same_host;
}

static void ddl__tcp_look_again(ddl__tcp *t, ddl__tcp_peer *p, uint64_t after_ns) {
    if (p->retry_ns == 0) {
        t->retry_count++;
    }
    p->retry_ns = t->host->now_ns(t->host) + after_ns;
}

/* Plans another attempt to connect, or gives the peer up. Nothing has been sent on the failed one. */
static void ddl__tcp_retry(ddl__tcp *t, int32_t peer, int error) {
    ddl__tcp_peer *p = &t->peers[peer];
    if (p->dead || p->lost || (p->data != NULL && !ddl__tcp_wants_control(p))) {
        return;
    }
    uint64_t limit = error == ECONNREFUSED ? DDL__TCP_REFUSED_NS : DDL__TCP_SILENT_MS * DDL__NS_PER_MS;
    if (p->data == NULL && t->host->now_ns(t->host) - p->trying_ns >= limit) {
        t->host->lost(t->host, peer, error == ECONNREFUSED ? error : ENOTCONN, "it could not be connected to");
        return;
    }
    ddl__tcp_look_again(t, p, p->data == NULL ? DDL__TCP_RETRY_NS : DDL__NS_PER_S);
}

/* A connection broke. One that was ready is a loss, which the core judges; one that was being made is tried again. */
static void ddl__tcp_broken(ddl__tcp *t, ddl__tcp_conn *c, int error) {
    if (c->peer < 0 || (!c->is_client && c->state != DDL__TCP_READY)) {
        ddl__tcp_stranger_drop(t, c, "ended before it proved anything");
        return;
    }
    ddl__tcp_peer *p = &t->peers[c->peer];
    int32_t peer = c->peer;
    bool was_ready = c->state == DDL__TCP_READY;
    if (p->control == c) {
        p->control = NULL;
        ddl__tcp_conn_free(t, c);
        /* When the peer ends, so does the data connection, and its last words are read first. An attempt that nobody
         * answers is a cut like any other; one that is refused is repeated. */
        bool ended = error == ECONNRESET || error == EPIPE;
        if (error == ETIMEDOUT || (was_ready && error > 0 && !ended)) {
            t->host->lost(t->host, peer, error, "its control connection ended");
        } else if (was_ready && p->data != NULL) {
            p->ending = true;
            ddl__tcp_look_again(t, p, DDL__TCP_ENDING_MS * DDL__NS_PER_MS);
        } else {
            ddl__tcp_retry(t, peer, error);
        }
        return;
    }
    p->data = NULL;
    ddl__tcp_conn_free(t, c);
    if (was_ready) {
        p->lost = true;
        t->host->lost(t->host, peer, error > 0 ? error : 0, "its connection ended");
    } else if (p->first != NULL || p->wanted) {
        ddl__tcp_retry(t, peer, error);
    }
}

static void ddl__tcp_backlog_add(ddl__tcp *t, int32_t peer) {
    if (!t->peers[peer].backlogged) {
        t->peers[peer].backlogged = true;
        t->backlog[t->backlog_count++] = peer;
    }
}

/* The peer takes nothing more, but what it said before is still to be read: its results, its goodbye. */
static void ddl__tcp_hear_out(ddl__tcp *t, ddl__tcp_conn *c) {
    int error = 0;
    while (error == 0 && ddl__tcp_read(t, c, &error) > 0) {
    }
}

/* Sends what waits for the peer; what the socket does not take stays in the backlog. */
static void ddl__tcp_push(ddl__tcp *t, int32_t peer) {
    ddl__tcp_peer *p = &t->peers[peer];
    if (p->first == NULL || p->data == NULL || p->data->state != DDL__TCP_READY) {
        return;
    }
    int error = ddl__tcp_flush(t, p);
    if (error != 0) {
        ddl__tcp_hear_out(t, p->data);
        ddl__tcp_broken(t, p->data, error);
    } else if (p->first != NULL) {
        ddl__tcp_backlog_add(t, peer);
    }
}

static void ddl__tcp_ready(ddl__tcp *t, ddl__tcp_conn *c) {
    ddl__tcp_peer *p = &t->peers[c->peer];
    c->state = DDL__TCP_READY;
    c->writing = true;
    ddl__tcp_want_write(t, c, false);
    if (c->is_control) {
        return;
    }
    p->trying_ns = 0;
    c->acks = !ddl__tcp_is_unix(&t->bound) && t->params.local_ranks <= t->params.cores;
    ddl__tcp_set(c->fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 0); /* a stopped peer's full window is no cut */
    if (ddl__tcp_wants_control(p)) {
        ddl__tcp_start(t, c->peer);
    }
    ddl__tcp_push(t, c->peer);
}

/* >>proof */

/* The server knows now who is there and for what. False: the connection is not wanted. True: it is the peer's, and may
 * be broken and freed already. */
static bool ddl__tcp_adopt(ddl__tcp *t, ddl__tcp_conn *c) {
    ddl__tcp_peer *p = &t->peers[c->peer];
    if (p->dead || p->lost || !p->reachable) {
        return false;
    }
    if (c->is_control) {
        if (p->control != NULL) {
            return false;
        }
        p->control = c;
    } else {
        /* Both connect at once: the attempt of the lower rank stays, if it gets through at all: before it has, the
         * other side cannot have taken it. A ready one is never replaced. */
        if (p->data != NULL && (p->data->state == DDL__TCP_READY ||
                                (c->peer > t->params.rank && p->data->state != DDL__TCP_CONNECTING))) {
            return false;
        }
        ddl__tcp_conn_free(t, p->data);
        p->data = c;
        if (p->retry_ns != 0) {
            p->retry_ns = 0;
            t->retry_count--;
        }
    }
    ddl__tcp_stranger_unlink(t, c);
    /* Until the go the client does not take the connection for ready: a refusal costs it nothing but another try. */
    if (send(c->fd, "G", 1, MSG_NOSIGNAL | MSG_DONTWAIT) != 1) {
        ddl__tcp_log(t, DDL_LOG_DEBUG, "tcp: rank %d went away while it connected", c->peer); /* reading shows it too */
    }
    ddl__tcp_ready(t, c);
    return true;
}

/* The client waits for the server's go. */
static void ddl__tcp_await_go(ddl__tcp *t, ddl__tcp_conn *c) {
    uint8_t go = 0;
    ssize_t n = recv(c->fd, &go, 1, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    if (n == 1 && go == 'G') {
        ddl__tcp_ready(t, c);
    } else {
        ddl__tcp_broken(t, c, n < 0 ? errno : ECONNABORTED);
    }
}

static void ddl__tcp_channel(ddl__tcp *t, ddl__tcp_conn *c) {
    uint8_t channel;
    ssize_t n = recv(c->fd, &channel, 1, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    c->is_control = n == 1 && channel == 'C';
    ddl__tcp_tune_socket(t, c->fd, t->peers[c->peer].same_host, c->is_control);
    if (n != 1 || (channel != 'C' && channel != 'D') || !ddl__tcp_adopt(t, c)) {
        ddl__tcp_stranger_drop(t, c, "was not wanted");
    }
}

static void ddl__tcp_proven(ddl__tcp *t, ddl__tcp_conn *c, int32_t peer) {
    c->proof = NULL;
    if (!c->is_client) {
        c->peer = peer;
        c->state = DDL__TCP_CHANNEL;
        ddl__tcp_channel(t, c);
    } else if (send(c->fd, c->is_control ? "C" : "D", 1, MSG_NOSIGNAL | MSG_DONTWAIT) != 1) {
        ddl__tcp_broken(t, c, errno);
    } else {
        c->state = DDL__TCP_CHANNEL;
        if (c->is_control) { /* the go is acknowledged at once: see ddl__tcp_tune_socket */
            ddl__tcp_set(c->fd, IPPROTO_TCP, TCP_QUICKACK, 1);
        }
        ddl__tcp_await_go(t, c);
    }
}

/* Feeds the handshake over a socket with what has come. It is peeked at first, so that bytes behind the handshake
 * stay. *peer: a client's is known, a server's is found out. DDL_ERR_PEER: the socket broke, errno says how (0: its
 * end). */
static ddl_status ddl__tcp_handshake(const ddl_host *host, int fd, bool is_client, void **proof, int32_t *peer) {
    uint8_t in[256], out[256];
    ssize_t n = recv(fd, in, sizeof in, MSG_DONTWAIT | MSG_PEEK);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
        errno = n < 0 ? errno : 0;
        return DDL_ERR_PEER;
    }
    size_t used = 0, out_bytes = 0;
    int32_t other = *peer;
    ddl_status status =
        host->prove(host, proof, is_client, *peer, in, n > 0 ? (size_t)n : 0, &used, out, &out_bytes, &other);
    if (used > 0 && recv(fd, in, used, MSG_DONTWAIT) != (ssize_t)used) {
        status = DDL_ERR_SYSTEM;
    }
    /* A fresh socket takes 256 bytes or is broken. */
    if (out_bytes > 0 && send(fd, out, out_bytes, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)out_bytes) {
        status = DDL_ERR_SYSTEM;
    }
    *peer = status == DDL_OK ? other : *peer;
    return status;
}

static void ddl__tcp_prove(ddl__tcp *t, ddl__tcp_conn *c) {
    int32_t peer = c->peer;
    ddl_status status = ddl__tcp_handshake(t->host, c->fd, c->is_client, &c->proof, &peer);
    if (status == DDL_OK) {
        ddl__tcp_proven(t, c, peer);
    } else if (status == DDL_ERR_PEER) {
        ddl__tcp_broken(t, c, errno);
    } else if (status < 0 && c->is_client) {
        ddl__tcp_broken(t, c, ECONNREFUSED);
    } else if (status < 0) {
        ddl__tcp_stranger_drop(t, c, "could not prove that it belongs to this job");
    }
}

/* >>connecting */

/* Starts the data connection to a peer, or its control connection when the data connection is ready. */
static void ddl__tcp_start(ddl__tcp *t, int32_t peer) {
    ddl__tcp_peer *p = &t->peers[peer];
    bool is_control = p->data != NULL;
    int fd = socket(p->address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    ddl__tcp_conn *c = fd < 0 ? NULL : ddl__tcp_conn_new(t, fd, peer, true);
    if (c == NULL) {
        if (fd >= 0) {
            close(fd);
        }
        ddl__tcp_retry(t, peer, fd < 0 ? errno : ENOMEM);
        return;
    }
    c->is_control = is_control;
    c->state = DDL__TCP_CONNECTING;
    p->trying_ns = p->trying_ns != 0 || is_control ? p->trying_ns : c->since_ns;
    *(is_control ? &p->control : &p->data) = c;
    ddl__tcp_tune_socket(t, fd, p->same_host, true); /* attempts to connect end like cuts */
    int result = connect(fd, (struct sockaddr *)&p->address, p->address_bytes);
    if (result < 0 && errno != EINPROGRESS && errno != EINTR) {
        ddl__tcp_broken(t, c, errno);
        return;
    }
    c->writing = true;
    ddl__tcp_watch(t, c, EPOLL_CTL_ADD, EPOLLIN | EPOLLOUT);
}

static void ddl__tcp_connected(ddl__tcp *t, ddl__tcp_conn *c) {
    int error = 0;
    socklen_t bytes = sizeof error;
    getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &bytes);
    if (error == 0 && ddl__tcp_is_unix(&t->peers[c->peer].address) && !ddl__tcp_same_user(c->fd)) {
        error = EACCES;
    }
    if (error != 0) {
        ddl__tcp_broken(t, c, error);
        return;
    }
    c->state = DDL__TCP_PROVING;
    ddl__tcp_want_write(t, c, false);
    ddl__tcp_prove(t, c);
}

/* Whether the set of descriptors tells of connections to our port. */
static void ddl__tcp_hear(ddl__tcp *t, bool on) {
    struct epoll_event event = {.events = on ? EPOLLIN : 0, .data = {.ptr = NULL}};
    (void)epoll_ctl(t->epoll_fd, EPOLL_CTL_MOD, t->listen_fd, &event);
    t->deaf_ns = on ? 0 : t->host->now_ns(t->host) + DDL__TCP_DEAF_NS;
}

static void ddl__tcp_accept(ddl__tcp *t) {
    for (;;) {
        int fd = accept4(t->listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if (errno == EINTR || errno == ECONNABORTED) {
                continue;
            }
            if (errno != EAGAIN) { /* they wait, and would wake every sleep meanwhile */
                ddl__tcp_log(t, DDL_LOG_WARN, "tcp: cannot accept a connection, it waits: %s; see `ulimit -n`",
                             strerror(errno));
                ddl__tcp_hear(t, false);
            }
            return;
        }
        if (t->stranger_count >= DDL__TCP_STRANGERS_MAX) {
            ddl__tcp_stranger_drop(t, t->strangers, "was the oldest of too many silent ones");
        }
        bool known = !ddl__tcp_is_unix(&t->bound) || ddl__tcp_same_user(fd);
        ddl__tcp_conn *c = known ? ddl__tcp_conn_new(t, fd, -1, false) : NULL;
        if (c == NULL) {
            close(fd);
            continue;
        }
        c->state = DDL__TCP_PROVING;
        ddl__tcp_conn **end = &t->strangers;
        while (*end != NULL) {
            end = &(*end)->next;
        }
        *end = c;
        t->stranger_count++;
        ddl__tcp_watch(t, c, EPOLL_CTL_ADD, EPOLLIN);
    }
}

/* Silent strangers are closed after 5 s; what they sent has been read before this is asked. */
static void ddl__tcp_evict(ddl__tcp *t) {
    uint64_t now = t->host->now_ns(t->host);
    while (t->strangers != NULL && now - t->strangers->since_ns > DDL__TCP_PROOF_NS) {
        ddl__tcp_stranger_drop(t, t->strangers, "said nothing useful for 5 s");
    }
}

/* The control connection of a peer has ended. Its last words may take long on a slow link; but where nothing of ours
 * gets through to it, its kernel never comes to sending the end of the data connection. */
static void ddl__tcp_end(ddl__tcp *t, ddl__tcp_peer *p) {
    struct tcp_info info;
    socklen_t bytes = sizeof info;
    memset(&info, 0, sizeof info);
    if (getsockopt(p->data->fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0 &&
        info.tcpi_last_data_recv < DDL__TCP_ENDING_MS) {
        ddl__tcp_look_again(t, p, DDL__TCP_ENDING_MS * DDL__NS_PER_MS);
        return;
    }
    ddl__tcp_hear_out(t, p->data);
    ddl__tcp_broken(t, p->data, ECONNRESET);
}

static void ddl__tcp_retries(ddl__tcp *t) {
    uint64_t now = t->host->now_ns(t->host);
    for (int32_t i = 0; i < t->params.world_size && t->retry_count > 0; i++) {
        ddl__tcp_peer *p = &t->peers[i];
        if (p->retry_ns != 0 && now >= p->retry_ns) {
            p->retry_ns = 0;
            t->retry_count--;
            if (p->ending && p->data != NULL) {
                ddl__tcp_end(t, p);
            } else if (!p->dead && !p->lost && (p->data == NULL || ddl__tcp_wants_control(p))) {
                ddl__tcp_start(t, i);
            }
        }
    }
}

/* >>progress */

static int ddl__tcp_receive(ddl__tcp *t, ddl__tcp_conn *c) {
    int error;
    int events = ddl__tcp_read(t, c, &error);
    if (error != 0) {
        ddl__tcp_broken(t, c, error > 0 ? error : 0);
        events++;
    }
    return events;
}

static void ddl__tcp_event(ddl__tcp *t, ddl__tcp_conn *c, uint32_t events) {
    if (c == NULL) {
        ddl__tcp_accept(t);
        return;
    }
    switch (c->state) {
    case DDL__TCP_CONNECTING:
        ddl__tcp_connected(t, c);
        break;
    case DDL__TCP_PROVING:
        ddl__tcp_prove(t, c);
        break;
    case DDL__TCP_CHANNEL:
        if (c->is_client) {
            ddl__tcp_await_go(t, c);
        } else {
            ddl__tcp_channel(t, c);
        }
        break;
    case DDL__TCP_READY:
        if (events & EPOLLOUT) {
            ddl__tcp_want_write(t, c, false);
            ddl__tcp_push(t, c->peer);
        } else {
            ddl__tcp_receive(t, c);
        }
        break;
    }
}

static int ddl__tcp_poll_all(ddl__tcp *t) {
    /* Few at a time: a connection that is freed while its event waits in this array must not be touched, so events are
     * taken one by one where that can happen. */
    struct epoll_event event;
    int events = 0;
    while (events < 64 && epoll_wait(t->epoll_fd, &event, 1, 0) == 1) {
        ddl__tcp_event(t, event.data.ptr, event.events);
        events++;
    }
    if (t->strangers != NULL) {
        ddl__tcp_evict(t);
    }
    if (t->retry_count > 0) {
        ddl__tcp_retries(t);
    }
    if (t->deaf_ns != 0 && t->host->now_ns(t->host) >= t->deaf_ns) {
        ddl__tcp_hear(t, true);
    }
    return events;
}

/* sent() may bring new messages, and so new peers into the backlog: those that are served leave it only at the end. */
static void ddl__tcp_push_backlog(ddl__tcp *t) {
    for (int32_t i = 0; i < t->backlog_count; i++) {
        ddl__tcp_push(t, t->backlog[i]);
    }
    int32_t kept = 0;
    for (int32_t i = 0; i < t->backlog_count; i++) {
        int32_t peer = t->backlog[i];
        t->peers[peer].backlogged = t->peers[peer].first != NULL;
        if (t->peers[peer].backlogged) {
            t->backlog[kept++] = peer;
        }
    }
    t->backlog_count = kept;
}

static int32_t ddl__tcp_progress(void *self, int32_t expect) {
    ddl__tcp *t = self;
    int32_t events = 0;
    if (t->backlog_count > 0) {
        ddl__tcp_push_backlog(t);
    }
    if (expect >= 0 && t->peers[expect].data != NULL && t->peers[expect].data->state == DDL__TCP_READY) {
        events = ddl__tcp_receive(t, t->peers[expect].data);
        if (events > 0 || ++t->misses < DDL__TCP_EPOLL_EVERY) {
            return events;
        }
    }
    t->misses = 0;
    return events + ddl__tcp_poll_all(t);
}

static ddl_status ddl__tcp_arm(void *self, int *out_fd) {
    ddl__tcp *t = self;
    for (int32_t i = 0; i < t->backlog_count; i++) {
        ddl__tcp_conn *c = t->peers[t->backlog[i]].data;
        if (c != NULL && c->state == DDL__TCP_READY) {
            ddl__tcp_want_write(t, c, true);
        }
    }
    *out_fd = t->epoll_fd;
    return DDL_OK;
}

/* >>table */

static ddl_status ddl__tcp_send(void *self, int32_t peer, ddl_message *m) {
    ddl__tcp *t = self;
    ddl__tcp_peer *p = &t->peers[peer];
    if (p->dead || !p->reachable) {
        return DDL_ERR_PEER;
    }
    m->next = NULL;
    if (p->first == NULL && p->data != NULL && p->data->state == DDL__TCP_READY) {
        ssize_t n = ddl__tcp_send_now(p, m);
        if (n == (ssize_t)ddl__tcp_message_bytes(m)) {
            return DDL_OK;
        }
        /* An error shows again when the queue is flushed, where a broken connection is dealt with. */
        p->first_sent = n > 0 ? (uint64_t)n : 0;
    }
    ddl__tcp_enqueue(p, m);
    if (p->data == NULL && p->retry_ns == 0 && !p->lost) {
        ddl__tcp_start(t, peer);
    } else if (p->data != NULL && p->data->state == DDL__TCP_READY) {
        ddl__tcp_backlog_add(t, peer);
    }
    return DDL_IN_PROGRESS;
}

static ddl_status ddl__tcp_connect(void *self, int32_t peer) {
    ddl__tcp *t = self;
    ddl__tcp_peer *p = &t->peers[peer];
    p->wanted = true;
    if (p->reachable && p->data == NULL && p->retry_ns == 0 && !p->lost) {
        ddl__tcp_start(t, peer);
    }
    return DDL_OK;
}

static void ddl__tcp_peer_dead(void *self, int32_t peer) {
    ddl__tcp *t = self;
    ddl__tcp_peer *p = &t->peers[peer];
    p->dead = true;
    if (p->retry_ns != 0) {
        p->retry_ns = 0;
        t->retry_count--;
    }
    ddl__tcp_conn *data = p->data, *control = p->control;
    p->data = p->control = NULL;
    ddl__tcp_conn_free(t, data);
    ddl__tcp_conn_free(t, control);
    ddl__tcp_drop(t, p, DDL_ERR_PEER);
}

/* Whoever proved to be the dead one, and has not said what for, goes too. Its place in the backlog stays its own. */
static void ddl__tcp_peer_again(void *self, int32_t peer) {
    ddl__tcp *t = self;
    for (ddl__tcp_conn *c = t->strangers, *next; c != NULL; c = next) {
        next = c->next;
        if (c->peer == peer) {
            ddl__tcp_stranger_drop(t, c, "was of a rank that is dead");
        }
    }
    t->peers[peer] = (ddl__tcp_peer){.backlogged = t->peers[peer].backlogged};
}

static void ddl__tcp_redirect(void *self, int32_t peer, void *token, void *new_landing) {
    ddl__tcp *t = self;
    ddl__tcp_conn *c = t->peers[peer].data;
    if (c != NULL && c->token == token) {
        c->landing = new_landing; /* the core discards it: where in it the rest goes does not matter */
        c->cut = new_landing == NULL;
    }
}

/* Waits until the kernel has the last bytes acknowledged, 500 ms at most: closing with bytes unread makes the kernel
 * drop what it has not sent, and so does a peer that speaks to a socket that is gone. */
static void ddl__tcp_linger(ddl__tcp *t, ddl__tcp_conn *c, uint64_t deadline) {
    shutdown(c->fd, SHUT_WR);
    int unsent = 0;
    bool safe = ddl__tcp_is_unix(&t->peers[c->peer].address); /* its bytes are in the peer's hands already */
    while (!safe && ioctl(c->fd, TIOCOUTQ, &unsent) == 0 && unsent > 0 &&
           ddl__now_ns() < deadline) {
        struct timespec pause = {0, 1000000};
        nanosleep(&pause, NULL);
    }
    while (recv(c->fd, t->stage, sizeof t->stage, MSG_DONTWAIT) > 0 && ddl__now_ns() < deadline) {
    }
}

static void ddl__tcp_close(void *self) {
    ddl__tcp *t = self;
    const ddl_host *host = t->host;
    while (t->strangers != NULL) {
        ddl__tcp_stranger_drop(t, t->strangers, "came too late");
    }
    uint64_t deadline = ddl__now_ns() + 500 * DDL__NS_PER_MS;
    for (int32_t i = 0; t->peers != NULL && i < t->params.world_size; i++) {
        ddl__tcp_peer *p = &t->peers[i];
        if (p->data != NULL && p->data->state == DDL__TCP_READY) {
            ddl__tcp_flush(t, p);
            ddl__tcp_linger(t, p->data, deadline);
        }
        ddl__tcp_peer_dead(t, i);
    }
    if (t->listen_fd >= 0) {
        close(t->listen_fd);
    }
    if (t->epoll_fd >= 0) {
        close(t->epoll_fd);
    }
    host->free(host, t->backlog);
    host->free(host, t->peers);
    host->free(host, t);
}

/* >>address */

static const char *ddl__tcp_text(const struct sockaddr_storage *a, char *out, size_t bytes) {
    char host[INET6_ADDRSTRLEN] = "?";
    if (a->ss_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)a;
        inet_ntop(AF_INET, &in->sin_addr, host, sizeof host);
        snprintf(out, bytes, "%s:%d", host, ntohs(in->sin_port));
    } else if (a->ss_family == AF_INET6) {
        const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)a;
        inet_ntop(AF_INET6, &in6->sin6_addr, host, sizeof host);
        snprintf(out, bytes, "[%s]:%d", host, ntohs(in6->sin6_port));
    } else {
        snprintf(out, bytes, "unix socket");
    }
    return out;
}

static void ddl__tcp_set_port(struct sockaddr_storage *a, int port) {
    if (a->ss_family == AF_INET) {
        ((struct sockaddr_in *)a)->sin_port = htons((uint16_t)port);
    } else {
        ((struct sockaddr_in6 *)a)->sin6_port = htons((uint16_t)port);
    }
}

/* 0, or what gai_strerror explains. */
static int ddl__tcp_resolve(const char *name, struct sockaddr_storage *out, socklen_t *out_bytes) {
    ddl__addresses found;
    int error = ddl__resolve(name, &found);
    if (error == 0) {
        *out = found.list[0].at.room;
        *out_bytes = found.list[0].bytes;
    }
    return error;
}

/* The address of this machine on the way to another: what the routing table would use. Nothing is sent. */
static bool ddl__tcp_route(struct sockaddr_storage far, socklen_t far_bytes, struct sockaddr_storage *out,
                           socklen_t *out_bytes) {
    ddl__tcp_set_port(&far, 9);
    int fd = socket(far.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    *out_bytes = sizeof *out;
    bool found = fd >= 0 && connect(fd, (struct sockaddr *)&far, far_bytes) == 0 &&
                 getsockname(fd, (struct sockaddr *)out, out_bytes) == 0;
    if (fd >= 0) {
        close(fd);
    }
    return found;
}

static ddl_status ddl__tcp_towards(ddl__tcp *t, const char *master) {
    struct sockaddr_storage far;
    socklen_t far_bytes = 0;
    int error = ddl__tcp_resolve(master, &far, &far_bytes);
    if (error != 0) {
        ddl__tcp_log(t, DDL_LOG_WARN, "tcp: the name of the master, %s, cannot be resolved: %s; check MASTER_ADDR",
                     master, gai_strerror(error));
        return DDL_ERR_CONFIG;
    }
    if (!ddl__tcp_route(far, far_bytes, &t->bound, &t->bound_bytes)) {
        ddl__tcp_log(t, DDL_LOG_WARN, "tcp: there is no route to the master %s: %s; check MASTER_ADDR and the network",
                     master, strerror(errno));
        return DDL_ERR_CONFIG;
    }
    return DDL_OK;
}

/* Where to listen: the interface that was named, else the one that leads to the master. */
static ddl_status ddl__tcp_choose(ddl__tcp *t) {
    const ddl_transport_params *q = &t->params;
    if (!q->authenticated) {
        struct sockaddr_un *un = (struct sockaddr_un *)&t->bound;
        uint64_t salt = ddl__mix(ddl__now_ns(), (uint64_t)getpid());
        un->sun_family = AF_UNIX;
        int n = snprintf(un->sun_path + 1, sizeof un->sun_path - 1, "ddl-%d-%016llx", (int)getpid(),
                         (unsigned long long)ddl__mix(salt, (uint64_t)(uintptr_t)t));
        t->bound_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
        return DDL_OK;
    }
    if (q->interface_name != NULL) {
        ddl__addresses found = {0};
        ddl__interface_addresses(q->interface_name, &found);
        if (found.count > 0) {
            memcpy(&t->bound, &found.list[0].at, sizeof t->bound);
            t->bound_bytes = found.list[0].bytes;
            return DDL_OK;
        }
        ddl__tcp_log(t, DDL_LOG_WARN, "tcp: interface %s has no address; check DDL_INTERFACE and `ip addr`",
                     q->interface_name);
        return DDL_ERR_CONFIG;
    }
    return ddl__tcp_towards(t, q->master_host != NULL ? q->master_host : "127.0.0.1");
}

/* The descriptor, or -1 with errno. Connections of the job before, in TIME_WAIT, hold no port of a range; two that
 * bind the same port are told apart by listen(). */
static int ddl__tcp_listen_at(ddl__tcp *t, int port) {
    int fd = socket(t->bound.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return -1;
    }
    if (!ddl__tcp_is_unix(&t->bound)) {
        ddl__tcp_set_port(&t->bound, port);
        ddl__tcp_set(fd, SOL_SOCKET, SO_REUSEADDR, port != 0);
    }
    if (bind(fd, (struct sockaddr *)&t->bound, t->bound_bytes) == 0 && listen(fd, 1024) == 0) {
        return fd;
    }
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

static ddl_status ddl__tcp_listen(ddl__tcp *t) {
    int low = 0, high = 0;
    if (t->params.port_range != NULL && sscanf(t->params.port_range, "%d-%d", &low, &high) < 2) {
        high = low;
    }
    for (int port = low; port <= high && t->listen_fd < 0; port++) {
        t->listen_fd = ddl__tcp_listen_at(t, port);
    }
    char text[80];
    if (t->listen_fd < 0) {
        ddl__tcp_log(t, DDL_LOG_WARN, "tcp: cannot listen on %s%s%s: %s", ddl__tcp_text(&t->bound, text, sizeof text),
                     t->params.port_range != NULL ? " or any other port of the range " : "",
                     t->params.port_range != NULL ? t->params.port_range : "", strerror(errno));
        return DDL_ERR_SYSTEM;
    }
    socklen_t name_bytes = sizeof t->congestion - 1;
    if (getsockopt(t->listen_fd, IPPROTO_TCP, TCP_CONGESTION, t->congestion, &name_bytes) == 0) {
        setsockopt(t->listen_fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
    }
    socklen_t bytes = sizeof t->bound;
    getsockname(t->listen_fd, (struct sockaddr *)&t->bound, &bytes);
    ddl__tcp_log(t, DDL_LOG_DEBUG, "tcp: listening on %s", ddl__tcp_text(&t->bound, text, sizeof text));
    struct epoll_event event = {.events = EPOLLIN, .data = {.ptr = NULL}};
    return epoll_ctl(t->epoll_fd, EPOLL_CTL_ADD, t->listen_fd, &event) == 0 ? DDL_OK : DDL_ERR_SYSTEM;
}

static ddl_status ddl__tcp_open(const ddl_host *host, const ddl_transport_params *params, void **out_self) {
    ddl__tcp *t = host->alloc(host, sizeof *t);
    if (t == NULL) {
        return DDL_ERR_NOMEM;
    }
    t->host = host;
    t->params = *params;
    t->listen_fd = -1;
    t->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    t->peers = host->alloc(host, (size_t)params->world_size * sizeof *t->peers);
    t->backlog = host->alloc(host, (size_t)params->world_size * sizeof *t->backlog);
    ddl_status status = t->peers == NULL || t->backlog == NULL ? DDL_ERR_NOMEM
                        : t->epoll_fd < 0                      ? DDL_ERR_SYSTEM
                                                               : ddl__tcp_choose(t);
    if (status == DDL_OK) {
        status = ddl__tcp_listen(t);
    }
    if (status != DDL_OK) {
        ddl__tcp_close(t);
        return status;
    }
    *out_self = t;
    return DDL_OK;
}

/* The address on the wire: where we listen, for ranks of this host, then what others are to use, nothing when it is the
 * same. Each is length u8, then the sockaddr as it is, family first: peers run the same OS and byte order, which the
 * handshake's magic has checked. */
static ddl_status ddl__tcp_address(void *self, void *out_address, size_t *bytes) {
    ddl__tcp *t = self;
    struct sockaddr_storage a;
    socklen_t length = 0;
    if (t->params.advertise != NULL && !ddl__tcp_is_unix(&t->bound)) {
        int port = ntohs(((struct sockaddr_in *)&t->bound)->sin_port); /* at the same place in both families */
        int error = ddl__tcp_resolve(t->params.advertise, &a, &length);
        if (error != 0) {
            ddl__tcp_log(t, DDL_LOG_WARN,
                         "tcp: the address to advertise, %s, cannot be resolved: %s; check DDL_ADVERTISE",
                         t->params.advertise, gai_strerror(error));
            return DDL_ERR_CONFIG;
        }
        ddl__tcp_set_port(&a, port);
    }
    size_t first = (size_t)t->bound_bytes + 1;
    if (*bytes < first + length + 1) {
        return DDL_ERR_ARG;
    }
    uint8_t *out = out_address;
    out[0] = (uint8_t)t->bound_bytes;
    memcpy(out + 1, &t->bound, t->bound_bytes);
    out[first] = (uint8_t)length;
    memcpy(out + first + 1, &a, length);
    *bytes = first + length + 1;
    return DDL_OK;
}

/* A family that ranks listen on, whole; a unix socket in the abstract namespace. */
static bool ddl__tcp_address_ok(const struct sockaddr_storage *a, size_t bytes) {
    size_t name = offsetof(struct sockaddr_un, sun_path);
    switch (a->ss_family) {
    case AF_INET:
        return bytes == sizeof(struct sockaddr_in);
    case AF_INET6:
        return bytes == sizeof(struct sockaddr_in6);
    default:
        return ddl__tcp_is_unix(a) && bytes > name + 1 && bytes <= sizeof(struct sockaddr_un) &&
               ((const char *)a)[name] == 0;
    }
}

/* One of the addresses of a rank. Returns the bytes it took, 0 when they make no sense. No address leaves *out as it
 * is. */
static size_t ddl__tcp_address_read(const uint8_t *in, size_t bytes, struct sockaddr_storage *out,
                                    socklen_t *out_bytes) {
    struct sockaddr_storage a;
    size_t length = bytes > 0 ? in[0] : 0;
    if (length >= bytes || length > sizeof a) {
        return 0;
    }
    if (length > 0) {
        memset(&a, 0, sizeof a);
        memcpy(&a, in + 1, length);
        if (!ddl__tcp_address_ok(&a, length)) {
            return 0;
        }
        *out = a;
        *out_bytes = (socklen_t)length;
    }
    return length + 1;
}

/* Of what ddl__tcp_address of another rank gave, the address that this rank is to use. DDL_ERR_CORRUPT: it makes no
 * sense; DDL_ERR_UNSUPPORTED: it does not lead out of the other's host. */
static ddl_status ddl__tcp_address_parse(const uint8_t *in, size_t bytes, bool same_host, struct sockaddr_storage *out,
                                         socklen_t *out_bytes) {
    *out_bytes = 0;
    size_t used = ddl__tcp_address_read(in, bytes, out, out_bytes);
    if (used > 0 && !same_host) {
        used = ddl__tcp_address_read(in + used, bytes - used, out, out_bytes);
    }
    if (used == 0 || *out_bytes == 0) {
        return DDL_ERR_CORRUPT;
    }
    return !same_host && (ddl__tcp_is_unix(out) || ddl__tcp_is_loopback(out)) ? DDL_ERR_UNSUPPORTED : DDL_OK;
}

static ddl_status ddl__tcp_add_peer(void *self, int32_t peer, const void *address, size_t bytes,
                                    const char *peer_host_id, uint64_t *out_latency_ns, uint64_t *out_bytes_per_s) {
    ddl__tcp *t = self;
    ddl__tcp_peer *p = &t->peers[peer];
    p->same_host = strcmp(peer_host_id, t->params.host_id) == 0;
    DDL__TRY(ddl__tcp_address_parse(address, bytes, p->same_host, &p->address, &p->address_bytes));
    p->reachable = true;
    *out_latency_ns = p->same_host ? 8000 : 25000;
    *out_bytes_per_s = p->same_host ? 3000000000u : 1200000000u;
    return DDL_OK;
}

static const ddl_transport ddl__tcp_transport = {
    .size = sizeof(ddl_transport),
    .flags = DDL_TRANSPORT_ORDERED,
    .max_payload_bytes = DDL__FRAME_MAX_PAYLOAD,
    .open = ddl__tcp_open,
    .close = ddl__tcp_close,
    .address = ddl__tcp_address,
    .add_peer = ddl__tcp_add_peer,
    .send = ddl__tcp_send,
    .progress = ddl__tcp_progress,
    .arm = ddl__tcp_arm,
    .peer_dead = ddl__tcp_peer_dead,
    .connect = ddl__tcp_connect,
    .recall = ddl__tcp_recall,
    .redirect = ddl__tcp_redirect,
    .peer_again = ddl__tcp_peer_again,
};

static const ddl_plugin ddl__tcp_plugin = {
    .size = sizeof(ddl_plugin),
    .abi = DDL_PLUGIN_ABI,
    .name = "tcp",
    .version = "built in",
    .about = "TCP between hosts, TCP or unix sockets on one host.",
    .transport = &ddl__tcp_transport,
};

#endif /* DDL_TCP_ENDPOINT_H */

/* tcp, first part: one connection. Bytes in, cut into frames; messages out, joined into few system calls.
 * It knows the host table and sockets; it must not know how connections come about (endpoint.h) or what frames mean. */
#ifndef DDL_TCP_LINK_H
#define DDL_TCP_LINK_H

#include "../store/address.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

enum {
    DDL__TCP_STAGE_BYTES = 68 * 1024, /* read ahead of this much; small frames are handed on from here */
    DDL__TCP_SPARE_BYTES = 2048,      /* read behind a large payload: the next header, little to copy */
    DDL__TCP_BATCH = 16,              /* messages joined into one sendmsg */
    DDL__TCP_READS = 32               /* reads from one connection before others get their turn */
};

typedef enum ddl__tcp_state {
    DDL__TCP_CONNECTING = 1, /* connect() has not ended */
    DDL__TCP_PROVING = 2,    /* handshake */
    DDL__TCP_CHANNEL = 3,    /* proven: the client says what for ("D" data, "C" control), the server "G" for go */
    DDL__TCP_READY = 4
} ddl__tcp_state;

typedef struct ddl__tcp_conn {
    int fd;
    int32_t peer; /* -1 while a stranger */
    ddl__tcp_state state;
    bool is_client;
    bool is_control; /* carries no data: keepalive on it notices a cut link, see endpoint.h */
    bool writing;    /* EPOLLOUT is asked for */
    bool bulk;       /* the last payload was large: do not read far ahead of the next header */
    void *proof;     /* state of host->prove */
    uint64_t since_ns;
    struct ddl__tcp_conn *next; /* strangers, oldest first */
    uint8_t head[DDL__FRAME_BYTES]; /* of a frame whose header has come in part */
    uint32_t head_bytes;
    uint8_t *landing; /* where the rest of the current payload goes */
    uint64_t landing_left;
    void *token;
    bool acks;     /* acknowledges while it waits: see ddl__tcp_acknowledge */
    bool owes_ack; /* has read since it last wrote */
    bool cut; /* what is landing has no place any more: read nothing, the connection ends */
} ddl__tcp_conn;

/* What is known of one rank. Messages wait here, so that they outlive an attempt to connect. */
typedef struct ddl__tcp_peer {
    ddl__tcp_conn *data, *control;
    ddl_message *first, *last;
    ddl_message *done; /* left the queue, to be reported */
    ddl_message *orphan; /* the first one is a copy of ours, whose owner has taken the original back */
    uint64_t first_sent; /* bytes of *first that are gone, header included */
    struct sockaddr_storage address;
    socklen_t address_bytes;
    bool reachable, same_host, dead, backlogged;
    bool wanted; /* asked for by connect, also while there is nothing to send */
    bool lost; /* a connection that was ready broke: what was in it is gone, a second one would have a gap */
    bool ending; /* its control connection has ended: if no data comes either, it has */
    uint64_t trying_ns; /* when the first attempt to connect began; 0: connected, or never tried */
    uint64_t retry_ns;  /* 0: no retry is due */
} ddl__tcp_peer;

typedef struct ddl__tcp {
    const ddl_host *host;
    ddl_transport_params params;
    int listen_fd, epoll_fd;
    ddl__tcp_peer *peers;
    ddl__tcp_conn *strangers;
    int32_t stranger_count, retry_count, backlog_count, misses;
    int32_t *backlog; /* peers with messages that wait for the socket */
    uint64_t deaf_ns; /* until when nobody is accepted, for want of descriptors; 0: all are */
    struct sockaddr_storage bound;
    socklen_t bound_bytes;
    char congestion[32]; /* the system's congestion control */
    uint8_t stage[DDL__TCP_STAGE_BYTES + DDL__FRAME_BYTES];
} ddl__tcp;

static void ddl__tcp_log(ddl__tcp *t, ddl_log_level level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void ddl__tcp_log(ddl__tcp *t, ddl_log_level level, const char *format, ...) {
    char line[512];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    t->host->log(t->host, level, line);
}

static void ddl__tcp_watch(ddl__tcp *t, ddl__tcp_conn *c, int operation, uint32_t events) {
    struct epoll_event event = {.events = events, .data = {.ptr = c}};
    epoll_ctl(t->epoll_fd, operation, c->fd, &event);
}

static void ddl__tcp_want_write(ddl__tcp *t, ddl__tcp_conn *c, bool want) {
    if (c->writing != want) {
        c->writing = want;
        ddl__tcp_watch(t, c, EPOLL_CTL_MOD, want ? EPOLLIN | EPOLLOUT : EPOLLIN);
    }
}

/* >>out */

static uint64_t ddl__tcp_message_bytes(const ddl_message *m) { return DDL_MESSAGE_HEADER_BYTES + m->payload_bytes; }

/* Puts a message at the end of the queue, an urgent one behind those before it and what is partly sent. */
static void ddl__tcp_enqueue(ddl__tcp_peer *p, ddl_message *m) {
    ddl_message **at = p->first == NULL ? &p->first : &p->last->next;
    if (p->first != NULL && (m->flags & DDL_MESSAGE_URGENT) != 0) {
        at = p->first_sent > 0 ? &p->first->next : &p->first;
        while (*at != NULL && ((*at)->flags & DDL_MESSAGE_URGENT) != 0) {
            at = &(*at)->next;
        }
    }
    m->next = *at;
    *at = m;
    p->last = m->next == NULL ? m : p->last;
}

/* The unsent bytes of up to DDL__TCP_BATCH messages from the queue as an iovec; returns its length. */
static int ddl__tcp_gather(const ddl__tcp_peer *p, struct iovec *iov) {
    int n = 0;
    uint64_t skip = p->first_sent;
    for (ddl_message *m = p->first; m != NULL && n + 2 <= 2 * DDL__TCP_BATCH; m = m->next) {
        if (skip < DDL_MESSAGE_HEADER_BYTES) {
            iov[n++] = (struct iovec){m->header + skip, DDL_MESSAGE_HEADER_BYTES - skip};
            skip = 0;
        } else {
            skip -= DDL_MESSAGE_HEADER_BYTES;
        }
        if (m->payload_bytes > skip) {
            iov[n++] = (struct iovec){(char *)(uintptr_t)m->payload + skip, m->payload_bytes - skip};
        }
        skip = 0;
    }
    return n;
}

static ssize_t ddl__tcp_sendmsg(ddl__tcp_conn *c, struct iovec *iov, int count) {
    c->owes_ack = false;
    struct msghdr msg = {.msg_iov = iov, .msg_iovlen = (size_t)count};
    ssize_t n;
    do {
        n = sendmsg(c->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    return n;
}

static void ddl__tcp_sent(ddl__tcp *t, ddl__tcp_peer *p, ddl_message *m, ddl_status status) {
    if (m == p->orphan) {
        p->orphan = NULL;
        t->host->free(t->host, m);
    } else {
        t->host->sent(t->host, m, status);
    }
}

/* Reports messages that left the queue. sent() may recall others of them, or send more: each is off the list before. */
static void ddl__tcp_report(ddl__tcp *t, ddl__tcp_peer *p, ddl_status status) {
    while (p->done != NULL) {
        ddl_message *m = p->done;
        p->done = m->next;
        ddl__tcp_sent(t, p, m, status);
    }
}

/* Takes a message that is recalled off the list of those that wait to be reported. */
static bool ddl__tcp_unlist(ddl_message **at, const ddl_message *m) {
    while (*at != NULL && *at != m) {
        at = &(*at)->next;
    }
    bool found = *at != NULL;
    if (found) {
        *at = m->next;
    }
    return found;
}

/* Takes messages that are wholly sent off the queue. sent() may append to the queue, so it is called last. */
static void ddl__tcp_account(ddl__tcp *t, ddl__tcp_peer *p, uint64_t bytes) {
    ddl_message **end = &p->done;
    while (*end != NULL) {
        end = &(*end)->next;
    }
    p->first_sent += bytes;
    while (p->first != NULL && p->first_sent >= ddl__tcp_message_bytes(p->first)) {
        ddl_message *m = p->first;
        p->first_sent -= ddl__tcp_message_bytes(m);
        p->first = m->next;
        p->last = p->first == NULL ? NULL : p->last;
        m->next = NULL;
        *end = m;
        end = &m->next;
    }
    ddl__tcp_report(t, p, DDL_OK);
}

/* Writes what the socket takes. Returns 0, or the errno that the connection broke with. */
static int ddl__tcp_flush(ddl__tcp *t, ddl__tcp_peer *p) {
    while (p->first != NULL) {
        struct iovec iov[2 * DDL__TCP_BATCH];
        ssize_t n = ddl__tcp_sendmsg(p->data, iov, ddl__tcp_gather(p, iov));
        if (n < 0) {
            if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS || errno == ENOMEM) {
                return 0;
            }
            return errno;
        }
        ddl__tcp_account(t, p, (uint64_t)n);
    }
    return 0;
}

/* The common case: nothing waits, and the socket takes the whole message at once. Returns the bytes that went. */
static ssize_t ddl__tcp_send_now(ddl__tcp_peer *p, const ddl_message *m) {
    struct iovec iov[2] = {{(char *)(uintptr_t)m->header, DDL_MESSAGE_HEADER_BYTES},
                           {(char *)(uintptr_t)m->payload, m->payload_bytes}};
    return ddl__tcp_sendmsg(p->data, iov, m->payload_bytes > 0 ? 2 : 1);
}

/* Ends all waiting messages with an error. */
static void ddl__tcp_drop(ddl__tcp *t, ddl__tcp_peer *p, ddl_status status) {
    ddl__tcp_report(t, p, DDL_OK);
    p->done = p->first;
    p->first = p->last = NULL;
    p->first_sent = 0;
    ddl__tcp_report(t, p, status);
}

/* A frame cannot end in the middle: of a message that is partly sent a copy takes its place in the queue, which is
 * freed instead of sent(). Without memory for it the connection is given up; not at once, we may be inside a read of
 * it. */
static bool ddl__tcp_orphan(ddl__tcp *t, ddl__tcp_peer *p, const ddl_message *m) {
    ddl_message *copy = t->host->alloc(t->host, sizeof *copy + m->payload_bytes);
    if (copy == NULL) {
        ddl__tcp_log(t, DDL_LOG_WARN, "tcp: no memory to end a message in order; its connection is closed");
        shutdown(p->data->fd, SHUT_RDWR);
        return false;
    }
    memcpy(copy, m, sizeof *copy);
    copy->payload = copy + 1;
    if (m->payload_bytes > 0) {
        memcpy(copy + 1, m->payload, m->payload_bytes);
    }
    p->orphan = p->first = copy;
    p->last = p->last == m ? copy : p->last;
    return true;
}

static void ddl__tcp_recall(void *self, int32_t peer, ddl_message *m) {
    ddl__tcp *t = self;
    ddl__tcp_peer *p = &t->peers[peer];
    if (ddl__tcp_unlist(&p->done, m)) {
        return;
    }
    if (p->first == m && p->first_sent > 0) {
        if (p->data != NULL && ddl__tcp_orphan(t, p, m)) {
            return;
        }
        p->first_sent = 0;
    }
    for (ddl_message **at = &p->first, *last = NULL; *at != NULL; last = *at, at = &(*at)->next) {
        if (*at == m) {
            *at = m->next;
            if (p->last == m) {
                p->last = last;
            }
            return;
        }
    }
}

/* >>in */

static int ddl__tcp_refused(ddl_status status) { return status == DDL_ERR_NOMEM ? ENOMEM : EBADMSG; }

/* Hands on the frames that lie whole in data; what remains begins a header or a landing. Returns 0 or an errno. */
static int ddl__tcp_cut(ddl__tcp *t, ddl__tcp_conn *c, const uint8_t *data, size_t bytes) {
    while (bytes >= DDL__FRAME_BYTES) {
        uint64_t payload;
        if (t->host->measure(t->host, c->peer, data, &payload) < 0) {
            return EBADMSG;
        }
        const uint8_t *header = data;
        data += DDL__FRAME_BYTES;
        bytes -= DDL__FRAME_BYTES;
        c->bulk = payload >= DDL__TCP_STAGE_BYTES;
        if (bytes >= payload) {
            ddl_status status = t->host->deliver(t->host, c->peer, header, data, payload);
            if (status < 0) {
                return ddl__tcp_refused(status);
            }
            data += payload;
            bytes -= payload;
            continue;
        }
        void *landing;
        ddl_status status = t->host->land(t->host, c->peer, header, &payload, &landing, &c->token);
        if (status < 0) {
            return ddl__tcp_refused(status);
        }
        c->landing = landing;
        memcpy(c->landing, data, bytes);
        c->landing += bytes;
        c->landing_left = payload - bytes;
        bytes = 0;
    }
    if (bytes > 0) {
        memcpy(c->head, data, bytes);
    }
    c->head_bytes = (uint32_t)bytes;
    return 0;
}

/* One read: first the rest of the current payload where it belongs, then ahead into the stage. Returns the bytes read,
 * 0 at the end of the stream, -1 with errno. */
static ssize_t ddl__tcp_readv(ddl__tcp *t, ddl__tcp_conn *c, size_t *out_asked) {
    struct iovec iov[2];
    int n = 0;
    if (c->landing_left > 0) {
        iov[n++] = (struct iovec){c->landing, c->landing_left};
    }
    size_t ahead = c->bulk ? DDL__TCP_SPARE_BYTES : DDL__TCP_STAGE_BYTES;
    iov[n++] = (struct iovec){t->stage + c->head_bytes, ahead};
    *out_asked = (size_t)c->landing_left + ahead;
    ssize_t got;
    do {
        got = n == 1 ? recv(c->fd, iov[0].iov_base, iov[0].iov_len, MSG_DONTWAIT) : readv(c->fd, iov, n);
    } while (got < 0 && errno == EINTR);
    return got;
}

/* Two small messages in a row make the kernel acknowledge inside the read of the second, which then takes as long as a
 * send. A rank that has a core to itself and waits anyway acknowledges the first before the second comes. */
static void ddl__tcp_acknowledge(ddl__tcp_conn *c) {
    if (c->acks && c->owes_ack) {
        int now_only = 2; /* even: further ones may be delayed again */
        c->owes_ack = false;
        setsockopt(c->fd, IPPROTO_TCP, TCP_QUICKACK, &now_only, sizeof now_only);
    }
}

/* Reads until nothing is there. *out_error: 0, an errno, or -1 for the end of the stream. Returns how many reads
 * brought something. */
static int ddl__tcp_read(ddl__tcp *t, ddl__tcp_conn *c, int *out_error) {
    int events = 0;
    *out_error = 0;
    while (events < DDL__TCP_READS) {
        if (c->cut) {
            *out_error = ENOMEM;
            return events;
        }
        size_t asked;
        ssize_t got = ddl__tcp_readv(t, c, &asked);
        if (got <= 0) {
            bool empty = got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
            *out_error = got == 0 ? -1 : empty ? 0 : errno;
            ddl__tcp_acknowledge(c);
            return events;
        }
        events++;
        c->owes_ack = true;
        size_t landed = DDL__MIN((size_t)got, (size_t)c->landing_left);
        if (c->landing_left > 0) {
            c->landing += landed;
            c->landing_left -= landed;
            if (c->landing_left == 0) {
                t->host->landed(t->host, c->peer, c->token, DDL_OK);
                c->token = NULL;
            }
        }
        size_t rest = (size_t)got - landed;
        if (rest > 0) {
            memcpy(t->stage, c->head, c->head_bytes);
            *out_error = ddl__tcp_cut(t, c, t->stage, c->head_bytes + rest);
            if (*out_error != 0) {
                return events;
            }
        }
        if ((size_t)got < asked) {
            return events; /* the socket is empty: asking again would only cost a call */
        }
    }
    return events;
}

#endif /* DDL_TCP_LINK_H */

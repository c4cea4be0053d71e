/* template: a complete transport to copy from, over unix-domain stream sockets between the processes of one host.
 *
 *     cc -std=c11 -O2 -fPIC -shared -fvisibility=hidden -o libddl-template.so plugins/template/template.c
 *
 * Then DDL_PLUGIN_PATH=/its/folder DDL_TRANSPORTS=template runs any program over it. Simple and robust before fast:
 * read it next to docs/plugins.md, which says what every function here promises.
 *
 * How it works. Each rank listens on an abstract name (no file, so nothing is left after a kill). There is one socket
 * for each direction: whoever has something to say connects, so that two ranks that connect at the same moment need no
 * rule about who wins. On the socket comes first the proof that both ends belong to the job, then messages: 48 bytes
 * of header and the payload, as the core gave them. The header tells the core how long the payload is; here it is
 * opaque.
 *
 *     out socket   CLOSED -> WANTED (connect at the next tick) -> PROVING -> OPEN -> CLOSED
 *     in socket    a stranger (in one of few slots, until proven) -> open -> closed
 *
 * All calls come under the context's lock: there are no locks here, and no globals, as one process may play many ranks.
 * A host function may call back send() or peer_dead(): after each one, look again at whatever it may have closed. */
#define _GNU_SOURCE 1
#include "../../ddl.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#define TEMPLATE_TOKEN_BYTES 16
#define TEMPLATE_PROOF_BYTES 256            /* the most that prove() writes, or needs to read, at once */
#define TEMPLATE_WAITING_SPARE 64           /* strangers that may be in the middle of a proof, besides all peers */
#define TEMPLATE_PROOF_LIMIT_NS 5000000000u /* a stranger has this long */
#define TEMPLATE_TICK_NS 5000000 /* how often WANTED sockets and overdue strangers are looked at, when there are any */
#define TEMPLATE_READ_TURN_BYTES (2u << 20) /* one busy peer does not keep the others waiting for longer than this */
#define TEMPLATE_EVENTS_AT_ONCE 64
#define TEMPLATE_CONNECT_ATTEMPTS 5

/* What peers are told, byte for byte. The token is secret to the job as long as the rendezvous is: it keeps apart two
 * jobs of one user, where there is no job secret. */
typedef struct template_address {
    char name[32]; /* after the NUL that makes it abstract */
    uint8_t token[TEMPLATE_TOKEN_BYTES];
} template_address;

/* Says who connects, when there is no job secret and the uid of the other end is the proof. */
typedef struct template_hello {
    char magic[8];
    int32_t from, to; /* one host, one byte order */
    uint8_t token[TEMPLATE_TOKEN_BYTES];
} template_hello;

/* The notes in a message: how many bytes went, and whether it is our own copy (see recall). */
enum { TEMPLATE_DONE_BYTES, TEMPLATE_IS_COPY };

typedef struct template_proof {
    void *state; /* of host->prove */
    uint8_t in[TEMPLATE_PROOF_BYTES];
    size_t in_bytes;
} template_proof;

enum { TEMPLATE_CLOSED, TEMPLATE_WANTED, TEMPLATE_PROVING, TEMPLATE_OPEN };

typedef struct template_out {
    int fd, stage, attempts;
    uint32_t events; /* that epoll watches */
    template_proof proof;
    ddl_message *first, **last; /* waiting to be sent, chained through next */
} template_out;

typedef struct template_in {
    int fd;
    uint8_t header[DDL_MESSAGE_HEADER_BYTES];
    size_t header_bytes;
    int landing; /* between land() and landed() */
    uint8_t *to; /* NULL: the core does not want it */
    uint64_t bytes, done;
    void *token;
} template_in;

typedef struct template_peer {
    int known, gone; /* gone: lost, or declared dead */
    template_address address;
    template_out out;
    template_in in;
} template_peer;

typedef struct template_stranger {
    int fd;
    uint64_t deadline_ns;
    template_proof proof;
} template_stranger;

typedef struct template_self {
    const ddl_host *host;
    int32_t rank, world_size, proven_by_secret;
    template_address address;
    int epoll, listener, timer;
    int listening, ticking, wanted; /* wanted: out sockets in that stage */
    char *host_id;
    template_peer *peers;
    template_stranger *strangers;
    int stranger_cap, stranger_count;
} template_self;

/* Where an event comes from, in the upper half of epoll's number; the lower half is a peer or a slot. */
enum { TEMPLATE_FROM_LISTENER = 1, TEMPLATE_FROM_TIMER, TEMPLATE_FROM_STRANGER, TEMPLATE_FROM_IN, TEMPLATE_FROM_OUT };

static void template_watch(template_self *s, int how, int fd, uint32_t events, uint32_t from, uint32_t index) {
    struct epoll_event e = {.events = events, .data.u64 = (uint64_t)from << 32 | index};
    epoll_ctl(s->epoll, how, fd, &e);
}

/* A child that the program forked has copies of our sockets: close alone would neither tell the peer nor take the
 * socket out of epoll. */
static void template_shut(template_self *s, int *fd) {
    if (*fd >= 0) {
        epoll_ctl(s->epoll, EPOLL_CTL_DEL, *fd, NULL);
        shutdown(*fd, SHUT_RDWR);
        close(*fd);
        *fd = -1;
    }
}

static void template_log(template_self *s, ddl_log_level level, const char *what, int32_t peer, int error) {
    char line[200];
    snprintf(line, sizeof line, "template: %s (rank %d)%s%s", what, (int)peer, error ? ": " : "",
             error ? strerror(error) : "");
    s->host->log(s->host, level, line);
}

/* Runs only while something waits for it, so that an idle rank sleeps. */
static void template_tick(template_self *s) {
    int need = s->wanted > 0 || s->stranger_count > 0 || !s->listening;
    if (need != s->ticking) {
        struct itimerspec every = {{0, need ? TEMPLATE_TICK_NS : 0}, {0, need ? TEMPLATE_TICK_NS : 0}};
        s->ticking = timerfd_settime(s->timer, 0, &every, NULL) == 0 ? need : s->ticking;
    }
}

/* Makes the timer fire at once, which makes the socket that arm() gave readable: the next progress connects. */
static void template_kick(template_self *s) {
    struct itimerspec soon = {{0, TEMPLATE_TICK_NS}, {0, 1}};
    timerfd_settime(s->timer, 0, &soon, NULL);
    s->ticking = 1;
}

static void template_listen(template_self *s, int on) {
    if (on != s->listening) {
        s->listening = on;
        template_watch(s, EPOLL_CTL_MOD, s->listener, on ? EPOLLIN : 0, TEMPLATE_FROM_LISTENER, 0);
    }
}

static void template_forget_proof(template_self *s, template_proof *proof) {
    if (proof->state != NULL) { /* frees it: see docs/plugins.md */
        s->host->prove(s->host, &proof->state, 0, -1, NULL, 0, NULL, NULL, NULL, NULL);
    }
    memset(proof, 0, sizeof *proof);
}

/* ---- the end of a link ---- */

static void template_close_out(template_self *s, template_out *out) {
    s->wanted -= out->stage == TEMPLATE_WANTED;
    template_forget_proof(s, &out->proof);
    template_shut(s, &out->fd);
    out->stage = TEMPLATE_CLOSED;
    out->events = 0;
}

/* The first of the queue goes back to its owner, once. It leaves the queue before: sent() may lead to another call. */
static void template_give_back(template_self *s, template_out *out, ddl_status status) {
    ddl_message *message = out->first;
    out->first = message->next;
    if (out->first == NULL) {
        out->last = &out->first;
    }
    if (message->priv[TEMPLATE_IS_COPY]) {
        s->host->free(s->host, message);
    } else {
        s->host->sent(s->host, message, status);
    }
}

static void template_drop(template_self *s, int32_t peer, ddl_status status) {
    template_peer *p = &s->peers[peer];
    template_close_out(s, &p->out);
    template_shut(s, &p->in.fd);
    p->in.header_bytes = 0;
    if (p->in.landing) {
        p->in.landing = 0;
        s->host->landed(s->host, peer, p->in.token, status);
    }
    while (p->out.first != NULL) {
        template_give_back(s, &p->out, status);
    }
}

/* Tells the core once; whether the peer is dead is for the core to say. */
static void template_lose(template_self *s, int32_t peer, int error, const char *what) {
    template_peer *p = &s->peers[peer];
    if (!p->gone) {
        p->gone = 1;
        s->host->lost(s->host, peer, error, what);
    }
    template_drop(s, peer, DDL_ERR_PEER);
}

/* ---- sending ---- */

/* Sends what the socket takes of a message. 1: all of it, 0: the socket is full, negative: -errno. */
static int template_push(int fd, ddl_message *m) {
    uint64_t whole = DDL_MESSAGE_HEADER_BYTES + m->payload_bytes;
    while (m->priv[TEMPLATE_DONE_BYTES] < whole) {
        uint64_t done = m->priv[TEMPLATE_DONE_BYTES];
        uint64_t head = done < DDL_MESSAGE_HEADER_BYTES ? DDL_MESSAGE_HEADER_BYTES - done : 0;
        uint64_t skip = head > 0 ? 0 : done - DDL_MESSAGE_HEADER_BYTES;
        struct iovec parts[2] = {{m->header + (DDL_MESSAGE_HEADER_BYTES - head), (size_t)head},
                                 {(void *)((uintptr_t)m->payload + skip), (size_t)(m->payload_bytes - skip)}};
        struct msghdr msg = {.msg_iov = parts, .msg_iovlen = 2};
        ssize_t n = sendmsg(fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0) {
            return errno == EAGAIN ? 0 : errno == EINTR ? 0 : -errno;
        }
        m->priv[TEMPLATE_DONE_BYTES] += (uint64_t)n;
    }
    return 1;
}

/* Watches for room only while something waits for it; errors are watched always. */
static void template_watch_out(template_self *s, int32_t peer) {
    template_out *out = &s->peers[peer].out;
    uint32_t events = EPOLLIN | (out->stage == TEMPLATE_OPEN && out->first != NULL ? EPOLLOUT : 0u);
    if (out->fd >= 0 && events != out->events) {
        int how = out->events == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
        template_watch(s, how, out->fd, events, TEMPLATE_FROM_OUT, (uint32_t)peer);
        out->events = events;
    }
}

static void template_flush(template_self *s, int32_t peer) {
    template_out *out = &s->peers[peer].out;
    int pushed = 1;
    while (out->stage == TEMPLATE_OPEN && out->first != NULL && (pushed = template_push(out->fd, out->first)) == 1) {
        template_give_back(s, out, DDL_OK);
    }
    if (pushed < 0) {
        template_lose(s, peer, -pushed, "sending to the peer failed");
    }
    template_watch_out(s, peer);
}

/* ---- the proof, both sides ---- */

/* Small and first on its socket: it fits, or something is wrong with the socket. */
static int template_say(int fd, const void *data, size_t bytes) {
    return bytes == 0 || send(fd, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)bytes;
}

static int template_uid_ok(int fd) {
    struct ucred other;
    socklen_t bytes = sizeof other;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &other, &bytes) == 0 && other.uid == geteuid();
}

/* With a job secret the core proves; bytes go back and forth until it is content. peer: known to the client only. */
static ddl_status template_prove(template_self *s, int fd, template_proof *proof, int32_t peer, int32_t *out_peer) {
    for (;;) {
        uint8_t answer[TEMPLATE_PROOF_BYTES] = {0};
        size_t used = 0, bytes = sizeof answer;
        ddl_status status = s->host->prove(s->host, &proof->state, peer >= 0, peer, proof->in, proof->in_bytes, &used,
                                           answer, &bytes, out_peer);
        memmove(proof->in, proof->in + used, proof->in_bytes - used);
        proof->in_bytes -= used;
        if (!template_say(fd, answer, bytes) && status >= 0) {
            return DDL_ERR_SYSTEM;
        }
        if (status != DDL_IN_PROGRESS || used == 0 || proof->in_bytes == 0) {
            return status;
        }
    }
}

/* Without one: the kernel says whose process the other end is, and the hello says which rank of which job. */
static ddl_status template_prove_by_uid(template_self *s, int fd, template_proof *proof, int32_t *out_peer) {
    template_hello hello;
    if (!template_uid_ok(fd)) {
        return DDL_ERR_AUTH;
    }
    if (proof->in_bytes < sizeof hello) {
        return DDL_IN_PROGRESS;
    }
    memcpy(&hello, proof->in, sizeof hello);
    proof->in_bytes -= sizeof hello;
    if (memcmp(hello.magic, "ddltmpl1", 8) != 0 || hello.to != s->rank ||
        memcmp(hello.token, s->address.token, TEMPLATE_TOKEN_BYTES) != 0) {
        return DDL_ERR_AUTH;
    }
    *out_peer = hello.from;
    return template_say(fd, "welcome", 8) ? DDL_OK : DDL_ERR_SYSTEM;
}

/* Reads what has come of a proof. 1: something, 0: nothing yet, negative: -errno, or -EPIPE at the end. */
static int template_hear(int fd, template_proof *proof) {
    ssize_t n = recv(fd, proof->in + proof->in_bytes, TEMPLATE_PROOF_BYTES - proof->in_bytes, MSG_DONTWAIT);
    if (n < 0) {
        return errno == EAGAIN || errno == EINTR ? 0 : -errno;
    }
    proof->in_bytes += (size_t)n;
    return n > 0 ? 1 : -EPIPE;
}

/* ---- connecting ---- */

static socklen_t template_name(const template_address *address, struct sockaddr_un *out) {
    memset(out, 0, sizeof *out);
    out->sun_family = AF_UNIX;
    memcpy(out->sun_path + 1, address->name, sizeof address->name);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + sizeof address->name);
}

static void template_want(template_self *s, template_out *out) {
    template_close_out(s, out);
    out->stage = TEMPLATE_WANTED;
    s->wanted++;
}

/* Says the first word on a socket that is connected. */
static ddl_status template_greet(template_self *s, int32_t peer) {
    template_out *out = &s->peers[peer].out;
    int32_t other = peer;
    if (s->proven_by_secret) {
        return template_prove(s, out->fd, &out->proof, peer, &other);
    }
    template_hello hello = {.from = s->rank, .to = peer};
    memcpy(hello.magic, "ddltmpl1", 8);
    memcpy(hello.token, s->peers[peer].address.token, TEMPLATE_TOKEN_BYTES);
    if (!template_uid_ok(out->fd)) {
        return DDL_ERR_AUTH; /* somebody else listens there now */
    }
    return template_say(out->fd, &hello, sizeof hello) ? DDL_IN_PROGRESS : DDL_ERR_SYSTEM;
}

/* A unix socket connects at once or not at all; EAGAIN is a full backlog: again at the next tick. */
static void template_connect(template_self *s, int32_t peer) {
    template_out *out = &s->peers[peer].out;
    struct sockaddr_un name;
    socklen_t bytes = template_name(&s->peers[peer].address, &name);
    template_close_out(s, out);
    out->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (out->fd < 0 || connect(out->fd, (struct sockaddr *)&name, bytes) != 0) {
        int error = errno;
        if (error == EAGAIN || error == EINTR || error == EMFILE || error == ENFILE) {
            template_want(s, out);
        } else {
            template_lose(s, peer, error, "connecting to the peer failed");
        }
        return;
    }
    out->stage = TEMPLATE_PROVING;
    ddl_status status = template_greet(s, peer);
    if (status < 0) {
        template_lose(s, peer, EACCES, "the peer did not prove that it is of this job");
        return;
    }
    template_watch_out(s, peer);
}

/* The answer of the other end. It may have been out of slots or too slow for us to be proven: so we try again. */
static void template_connecting(template_self *s, int32_t peer) {
    template_out *out = &s->peers[peer].out;
    int32_t other = peer;
    int heard = template_hear(out->fd, &out->proof);
    if (heard < 0 && ++out->attempts < TEMPLATE_CONNECT_ATTEMPTS) {
        template_want(s, out);
        return;
    }
    ddl_status status = DDL_IN_PROGRESS;
    if (heard > 0 && s->proven_by_secret) {
        status = template_prove(s, out->fd, &out->proof, peer, &other);
    } else if (heard > 0 && out->proof.in_bytes >= 8) {
        status = memcmp(out->proof.in, "welcome", 8) == 0 ? DDL_OK : DDL_ERR_AUTH;
        out->proof.in_bytes -= 8;
    }
    if (heard < 0 || status < 0 || (status == DDL_OK && (other != peer || out->proof.in_bytes != 0))) {
        template_lose(s, peer, heard < 0 ? -heard : EACCES, "the peer did not prove that it is of this job");
    } else if (status == DDL_OK) {
        template_forget_proof(s, &out->proof);
        out->stage = TEMPLATE_OPEN;
        template_flush(s, peer);
    }
}

/* ---- accepting ---- */

static void template_accept(template_self *s) {
    for (int i = 0; i < s->stranger_cap; i++) {
        template_stranger *stranger = &s->strangers[i];
        if (stranger->fd >= 0) {
            continue;
        }
        stranger->fd = accept4(s->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (stranger->fd < 0) {
            if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
                template_listen(s, 0); /* out of descriptors: not a reason to spin; the tick tries again */
            }
            return;
        }
        s->stranger_count++;
        stranger->deadline_ns = s->host->now_ns(s->host) + TEMPLATE_PROOF_LIMIT_NS;
        template_watch(s, EPOLL_CTL_ADD, stranger->fd, EPOLLIN, TEMPLATE_FROM_STRANGER, (uint32_t)i);
    }
    template_listen(s, 0); /* all slots are taken: the others wait in the kernel */
}

static void template_dismiss(template_self *s, template_stranger *stranger, int keep_socket) {
    template_forget_proof(s, &stranger->proof);
    if (!keep_socket) {
        template_shut(s, &stranger->fd);
    }
    stranger->fd = -1;
    s->stranger_count--;
    template_listen(s, 1);
}

/* A bad connection costs a line in the debug log, never an error of the job. */
static void template_stranger_speaks(template_self *s, uint32_t slot) {
    template_stranger *stranger = &s->strangers[slot];
    int32_t peer = -1;
    int heard = template_hear(stranger->fd, &stranger->proof);
    ddl_status status = DDL_IN_PROGRESS;
    if (heard > 0) {
        status = s->proven_by_secret ? template_prove(s, stranger->fd, &stranger->proof, -1, &peer)
                                     : template_prove_by_uid(s, stranger->fd, &stranger->proof, &peer);
    }
    if (heard == 0 || (heard > 0 && status == DDL_IN_PROGRESS)) {
        return;
    }
    template_peer *p = peer >= 0 && peer < s->world_size ? &s->peers[peer] : NULL;
    if (heard < 0 || status < 0 || p == NULL || p->gone || p->in.fd >= 0 || stranger->proof.in_bytes != 0) {
        template_log(s, DDL_LOG_DEBUG, "a connection was refused", peer, 0);
        template_dismiss(s, stranger, 0);
        return;
    }
    p->in.fd = stranger->fd;
    template_watch(s, EPOLL_CTL_MOD, p->in.fd, EPOLLIN, TEMPLATE_FROM_IN, (uint32_t)peer);
    template_dismiss(s, stranger, 1);
}

/* ---- receiving ---- */

/* A whole header is here. The core says where the payload goes. */
static int template_land(template_self *s, int32_t peer) {
    template_in *in = &s->peers[peer].in;
    void *to = NULL;
    in->header_bytes = 0;
    in->done = 0;
    ddl_status status = s->host->land(s->host, peer, in->header, &in->bytes, &to, &in->token);
    if (status < 0) {
        int damaged = status == DDL_ERR_CORRUPT;
        template_lose(s, peer, damaged ? EBADMSG : ENOMEM,
                      damaged ? "the peer sent a damaged header" : "the core cannot take what the peer sent");
        return 0;
    }
    in->to = to;
    in->landing = 1;
    return 1;
}

/* Reads once from the kernel: a part of a header or of a payload. Returns the bytes, 0: there is nothing more now. */
static uint64_t template_read_once(template_self *s, int32_t peer) {
    template_in *in = &s->peers[peer].in;
    uint8_t unwanted[4096], *to = in->header + in->header_bytes;
    uint64_t room = DDL_MESSAGE_HEADER_BYTES - in->header_bytes;
    if (in->landing) {
        room = in->bytes - in->done;
        to = in->to != NULL ? in->to + in->done : unwanted;
        room = in->to == NULL && room > sizeof unwanted ? sizeof unwanted : room;
    }
    ssize_t n = recv(in->fd, to, (size_t)room, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return 0;
    }
    if (n <= 0) {
        template_lose(s, peer, n < 0 ? errno : 0, n < 0 ? "reading from the peer failed" : "the peer closed its end");
        return 0;
    }
    if (in->landing) {
        in->done += (uint64_t)n;
    } else {
        in->header_bytes += (size_t)n;
    }
    return (uint64_t)n;
}

/* Reads whole messages until the socket is empty or the turn is over. The core may close the link from any of its
 * functions (peer_dead), so fd is asked again each time. */
static int template_read(template_self *s, int32_t peer, uint64_t turn_bytes) {
    template_in *in = &s->peers[peer].in;
    int events = 0;
    for (uint64_t n = 1, read = 0; in->fd >= 0 && n > 0 && read < turn_bytes; read += n) {
        n = template_read_once(s, peer);
        if (n > 0 && !in->landing && in->header_bytes == DDL_MESSAGE_HEADER_BYTES && !template_land(s, peer)) {
            return events + 1;
        }
        if (in->landing && in->done == in->bytes) { /* at once after a header without payload */
            in->landing = 0;
            events++;
            s->host->landed(s->host, peer, in->token, DDL_OK);
        }
    }
    return events;
}

/* ---- progress ---- */

/* The peer closed the socket that we write to. What it said before lies in the other one: first that, then the news. */
static void template_out_ended(template_self *s, int32_t peer, int error) {
    template_read(s, peer, UINT64_MAX);
    template_lose(s, peer, error, "the peer closed its end");
}

static void template_out_event(template_self *s, int32_t peer, uint32_t events) {
    template_out *out = &s->peers[peer].out;
    if (out->stage == TEMPLATE_PROVING) {
        template_connecting(s, peer);
    } else if (out->stage == TEMPLATE_OPEN && (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) {
        int error = 0; /* nothing is ever said on this side of the socket after the proof, so it is the end */
        socklen_t bytes = sizeof error;
        getsockopt(out->fd, SOL_SOCKET, SO_ERROR, &error, &bytes);
        template_out_ended(s, peer, error);
    } else if (out->stage == TEMPLATE_OPEN) {
        template_flush(s, peer);
    }
}

static void template_timer_event(template_self *s) {
    uint64_t ticks, now = s->host->now_ns(s->host);
    ssize_t n = read(s->timer, &ticks, sizeof ticks); /* makes it unreadable; how many there were does not matter */
    (void)n;
    for (int i = 0; i < s->stranger_cap; i++) {
        if (s->strangers[i].fd >= 0 && now > s->strangers[i].deadline_ns) {
            template_log(s, DDL_LOG_DEBUG, "a connection proved nothing in time", -1, 0);
            template_dismiss(s, &s->strangers[i], 0);
        }
    }
    for (int32_t i = 0; s->wanted > 0 && i < s->world_size; i++) {
        if (s->peers[i].out.stage == TEMPLATE_WANTED) {
            template_connect(s, i);
        }
    }
    template_listen(s, s->stranger_count < s->stranger_cap);
}

static int template_event(template_self *s, uint64_t data, uint32_t events) {
    uint32_t index = (uint32_t)data;
    int32_t peer = (int32_t)index;
    switch (data >> 32) {
    case TEMPLATE_FROM_LISTENER: template_accept(s); return 1;
    case TEMPLATE_FROM_TIMER: template_timer_event(s); return 1;
    case TEMPLATE_FROM_STRANGER:
        if (s->strangers[index].fd >= 0) {
            template_stranger_speaks(s, index);
        }
        return 1;
    case TEMPLATE_FROM_IN: return template_read(s, peer, TEMPLATE_READ_TURN_BYTES);
    default: template_out_event(s, peer, events); return 1;
    }
}

static int32_t template_progress(void *self, int32_t expect) {
    template_self *s = self;
    struct epoll_event events[TEMPLATE_EVENTS_AT_ONCE];
    int32_t count = 0;
    (void)expect; /* a hint for transports that would otherwise poll many places */
    int n = epoll_wait(s->epoll, events, TEMPLATE_EVENTS_AT_ONCE, 0);
    if (n < 0 && errno != EINTR) {
        return DDL_ERR_SYSTEM;
    }
    for (int i = 0; i < n; i++) {
        count += template_event(s, events[i].data.u64, events[i].events);
    }
    template_tick(s);
    return count;
}

/* Level-triggered epoll: readable exactly while there is something to do. */
static ddl_status template_arm(void *self, int *out_fd) {
    *out_fd = ((template_self *)self)->epoll;
    return DDL_OK;
}

static ddl_status template_send(void *self, int32_t peer, ddl_message *message) {
    template_self *s = self;
    if (peer < 0 || peer >= s->world_size || !s->peers[peer].known) {
        return DDL_ERR_ARG;
    }
    template_peer *p = &s->peers[peer];
    if (p->gone) {
        return DDL_ERR_PEER;
    }
    message->next = NULL;
    message->priv[TEMPLATE_DONE_BYTES] = message->priv[TEMPLATE_IS_COPY] = 0;
    if (p->out.stage == TEMPLATE_OPEN && p->out.first == NULL) {
        int pushed = template_push(p->out.fd, message);
        if (pushed == 1) {
            return DDL_OK;
        }
        if (pushed < 0) {
            return DDL_ERR_PEER; /* the socket stays readable, so that progress tells the whole story */
        }
    }
    *p->out.last = message;
    p->out.last = &message->next;
    if (p->out.stage == TEMPLATE_CLOSED) { /* not from here: connecting may fail, and then calls the core back */
        template_want(s, &p->out);
        template_kick(s);
    }
    template_watch_out(s, peer);
    return DDL_IN_PROGRESS;
}

/* Starts a connection ahead of its first use: optional, and one line. */
static ddl_status template_connect_early(void *self, int32_t peer) {
    template_self *s = self;
    if (peer >= 0 && peer < s->world_size && s->peers[peer].known && s->peers[peer].out.stage == TEMPLATE_CLOSED &&
        !s->peers[peer].gone) {
        template_want(s, &s->peers[peer].out);
        template_kick(s);
    }
    return DDL_OK;
}

/* Optional: an operation that failed wants its memory back. A message that was begun must be ended, or the peer would
 * take the next header for payload: so the queue keeps a copy of it. */
static void template_recall(void *self, int32_t peer, ddl_message *message) {
    template_self *s = self;
    template_out *out = &s->peers[peer].out;
    ddl_message **at = &out->first, *copy = NULL;
    while (*at != NULL && *at != message) {
        at = &(*at)->next;
    }
    if (*at == NULL) {
        return;
    }
    int begun = message->priv[TEMPLATE_DONE_BYTES] > 0;
    if (begun && (copy = s->host->alloc(s->host, sizeof *copy + (size_t)message->payload_bytes)) != NULL) {
        *copy = *message;
        copy->priv[TEMPLATE_IS_COPY] = 1;
        copy->payload = copy + 1;
        if (message->payload_bytes > 0) { /* else payload may be NULL */
            memcpy(copy + 1, message->payload, (size_t)message->payload_bytes);
        }
    }
    *at = copy != NULL ? copy : message->next;
    if (out->last == &message->next) {
        out->last = copy != NULL ? &copy->next : at;
    }
    if (begun && copy == NULL) {
        template_lose(s, peer, ENOMEM, "no memory was left to end a message that was begun");
    }
}

/* Optional, and the same for the other direction: what still comes of a payload goes elsewhere. */
static void template_redirect(void *self, int32_t peer, void *token, void *new_landing) {
    template_in *in = &((template_self *)self)->peers[peer].in;
    if (in->landing && in->token == token && new_landing == NULL) {
        template_lose(self, peer, ENOMEM, "no memory was left to discard what it sent");
    } else if (in->landing && in->token == token) {
        in->to = new_landing;
    }
}

static void template_peer_dead(void *self, int32_t peer) {
    template_self *s = self;
    if (peer >= 0 && peer < s->world_size) {
        s->peers[peer].gone = 1;
        template_drop(s, peer, DDL_ERR_PEER);
        template_tick(s);
    }
}

/* ---- open, address, close ---- */

static ddl_status template_address_of(void *self, void *out_address, size_t *bytes) {
    template_self *s = self;
    if (*bytes < sizeof s->address) {
        return DDL_ERR_ARG;
    }
    memcpy(out_address, &s->address, sizeof s->address);
    *bytes = sizeof s->address;
    return DDL_OK;
}

static ddl_status template_add_peer(void *self, int32_t peer, const void *address, size_t bytes,
                                    const char *peer_host_id, uint64_t *out_latency_ns, uint64_t *out_bytes_per_s) {
    template_self *s = self;
    if (peer < 0 || peer >= s->world_size || bytes != sizeof(template_address)) {
        return DDL_ERR_ARG;
    }
    if (peer_host_id == NULL || strcmp(peer_host_id, s->host_id) != 0) {
        return DDL_ERR_UNSUPPORTED; /* another transport's business */
    }
    s->peers[peer].known = 1; /* it may have connected to us already */
    s->peers[peer].gone = 0;  /* a rank that died may come back under a new address */
    s->peers[peer].out.attempts = 0;
    memcpy(&s->peers[peer].address, address, bytes);
    *out_latency_ns = 20000;
    *out_bytes_per_s = 1000000000;
    return DDL_OK;
}

static void template_close(void *self) {
    template_self *s = self;
    for (int32_t i = 0; s->peers != NULL && i < s->world_size; i++) {
        int flush = !s->peers[i].gone;
        s->peers[i].gone = 1; /* from here on nothing is news to the core */
        if (flush) {
            template_flush(s, i);
        }
        template_drop(s, i, DDL_ERR_CANCELLED);
    }
    for (int i = 0; i < s->stranger_cap; i++) {
        if (s->strangers[i].fd >= 0) {
            template_dismiss(s, &s->strangers[i], 0);
        }
    }
    template_shut(s, &s->listener);
    if (s->timer >= 0) {
        close(s->timer);
    }
    if (s->epoll >= 0) {
        close(s->epoll);
    }
    s->host->free(s->host, s->strangers); /* NULL is fine */
    s->host->free(s->host, s->peers);
    s->host->free(s->host, s->host_id);
    s->host->free(s->host, s);
}

/* A name that nobody has, and a token that nobody knows. */
static ddl_status template_bind(template_self *s) {
    uint8_t random[8];
    struct sockaddr_un name;
    if (getrandom(s->address.token, TEMPLATE_TOKEN_BYTES, 0) != TEMPLATE_TOKEN_BYTES || getrandom(random, 8, 0) != 8) {
        return DDL_ERR_SYSTEM;
    }
    snprintf(s->address.name, sizeof s->address.name, "ddl-template-%02x%02x%02x%02x%02x%02x%02x%02x", random[0],
             random[1], random[2], random[3], random[4], random[5], random[6], random[7]);
    socklen_t bytes = template_name(&s->address, &name);
    if (bind(s->listener, (struct sockaddr *)&name, bytes) != 0 || listen(s->listener, 4096) != 0) {
        return DDL_ERR_SYSTEM;
    }
    return DDL_OK;
}

/* What was taken already is freed by template_close. */
static ddl_status template_allocate(template_self *s, const char *host_id) {
    size_t id_bytes = strlen(host_id) + 1;
    size_t peer_bytes = (size_t)s->world_size * sizeof *s->peers;
    size_t stranger_bytes = (size_t)(s->world_size + TEMPLATE_WAITING_SPARE) * sizeof *s->strangers;
    s->host_id = s->host->alloc(s->host, id_bytes);
    s->peers = s->host->alloc(s->host, peer_bytes);
    s->strangers = s->host->alloc(s->host, stranger_bytes);
    if (s->peers != NULL) {
        memset(s->peers, 0, peer_bytes);
    }
    for (int32_t i = 0; s->peers != NULL && i < s->world_size; i++) {
        s->peers[i].out.fd = s->peers[i].in.fd = -1;
        s->peers[i].out.last = &s->peers[i].out.first;
    }
    if (s->host_id == NULL || s->peers == NULL || s->strangers == NULL) {
        return DDL_ERR_NOMEM;
    }
    memcpy(s->host_id, host_id, id_bytes);
    memset(s->strangers, 0, stranger_bytes);
    s->stranger_cap = s->world_size + TEMPLATE_WAITING_SPARE;
    for (int i = 0; i < s->stranger_cap; i++) {
        s->strangers[i].fd = -1;
    }
    return DDL_OK;
}

static ddl_status template_open(const ddl_host *host, const ddl_transport_params *params, void **out_self) {
    template_self *s = host->alloc(host, sizeof *s);
    if (s == NULL) {
        return DDL_ERR_NOMEM;
    }
    memset(s, 0, sizeof *s);
    s->host = host;
    s->rank = params->rank;
    s->world_size = params->world_size;
    s->proven_by_secret = params->authenticated && DDL_HAS(host, prove);
    s->epoll = epoll_create1(EPOLL_CLOEXEC);
    s->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    s->timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    ddl_status status = s->epoll >= 0 && s->listener >= 0 && s->timer >= 0 ? template_allocate(s, params->host_id)
                                                                            : DDL_ERR_SYSTEM;
    status = status == DDL_OK ? template_bind(s) : status;
    if (status != DDL_OK) {
        template_log(s, DDL_LOG_WARN, "no endpoint could be made", s->rank, errno);
        template_close(s);
        return status;
    }
    s->listening = 1;
    template_watch(s, EPOLL_CTL_ADD, s->listener, EPOLLIN, TEMPLATE_FROM_LISTENER, 0);
    template_watch(s, EPOLL_CTL_ADD, s->timer, EPOLLIN, TEMPLATE_FROM_TIMER, 0);
    *out_self = s;
    return DDL_OK;
}

/* Members that are not named are NULL: the core does without them. size is how much of the table this compiler knew. */
static const ddl_transport template_transport = {
    .size = sizeof(ddl_transport),
    .flags = DDL_TRANSPORT_LOCAL | DDL_TRANSPORT_ORDERED | DDL_TRANSPORT_ON_REQUEST,
    .max_payload_bytes = 1 << 20,
    .open = template_open,
    .close = template_close,
    .address = template_address_of,
    .add_peer = template_add_peer,
    .send = template_send,
    .progress = template_progress,
    .arm = template_arm,
    .peer_dead = template_peer_dead,
    .connect = template_connect_early,
    .recall = template_recall,
    .redirect = template_redirect,
};

/* The DDL_TEMPLATE_ variables that it reads, without that; of others users are told. */
static const char *const template_settings[] = {NULL};

static const ddl_plugin template_plugin = {
    .size = sizeof(ddl_plugin),
    .abi = DDL_PLUGIN_ABI,
    .name = "template",
    .version = "1",
    .about = "Unix-domain sockets between processes of one host; an example to copy from.",
    .transport = &template_transport,
    .settings = template_settings,
};

DDL_PLUGIN_EXPORT const ddl_plugin *ddl_plugin_template_v1(const ddl_host *host);
const ddl_plugin *ddl_plugin_template_v1(const ddl_host *host) {
    (void)host; /* sockets work everywhere; one that needs hardware looks for it here, logs why not, and returns NULL */
    return &template_plugin;
}

/* mesh: passing file descriptors between the ranks of a host, for memory and devices that plugins share. Each rank
 * listens on an abstract unix socket with a random name; to pass one, a rank connects, both sides prove that they are
 * of this job and this user, then the descriptor and a tag go over and the connection ends. Nothing here blocks. */
#ifndef DDL_MESH_PASSING_H
#define DDL_MESH_PASSING_H

#include "host.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/un.h>

enum { DDL__PASSINGS_MAX = 256, DDL__PASSING_EVENT = 0x7fffffff };
#define DDL__PASSING_NS (5 * DDL__NS_PER_S) /* of one connection, for the proof and then for what is passed */
#define DDL__PASSING_TRIES 12               /* of whoever passes: a minute, if the other one is stopped meanwhile */

/* A descriptor on its way out or in. */
typedef struct ddl__passing {
    struct ddl__passing *next;
    int fd;       /* the connection; -1: not connected yet */
    int32_t peer; /* -1 while a stranger */
    bool is_client, proven;
    void *proof;
    uint64_t tag;
    int passed; /* what goes out; -1: the tag alone */
    int32_t tries; /* that failed */
    uint64_t since_ns;
} ddl__passing;

/* One that has come, until it is taken. */
typedef struct ddl__passed {
    struct ddl__passed *next;
    int32_t peer;
    uint64_t tag;
    int fd;
} ddl__passed;

static socklen_t ddl__pass_address(const uint8_t name[DDL__PASS_NAME_BYTES], struct sockaddr_un *out) {
    memset(out, 0, sizeof *out);
    out->sun_family = AF_UNIX;
    memcpy(out->sun_path + 1, "ddl-pass-", 9); /* after a 0: the name is abstract, no file */
    for (int32_t i = 0; i < DDL__PASS_NAME_BYTES; i++) {
        snprintf(out->sun_path + 10 + 2 * i, 3, "%02x", name[i]);
    }
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 10 + 2 * DDL__PASS_NAME_BYTES);
}

/* Without a listener there is no passing: the name stays all 0, which peers know. */
static void ddl__pass_open(ddl_context *c) {
    struct sockaddr_un address;
    struct epoll_event event = {.events = EPOLLIN, .data = {.u32 = DDL__PASSING_EVENT}};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0 || ddl__random(c->pass_name, sizeof c->pass_name) < 0 ||
        bind(fd, (struct sockaddr *)&address, ddl__pass_address(c->pass_name, &address)) != 0 ||
        listen(fd, DDL__PASSINGS_MAX) != 0 || epoll_ctl(c->epoll_fd, EPOLL_CTL_ADD, fd, &event) != 0) {
        ddl__log(&c->base, DDL_LOG_DEBUG, "no descriptors can be passed on this host: %s", strerror(errno));
        memset(c->pass_name, 0, sizeof c->pass_name);
        if (fd >= 0) {
            close(fd);
        }
        return;
    }
    c->pass_fd = fd;
}

static ddl__passing *ddl__passing_new(ddl_context *c, int32_t peer, bool is_client) {
    ddl__passing *p = c->passing_count < DDL__PASSINGS_MAX ? ddl__alloc(&c->base, sizeof *p) : NULL;
    if (p != NULL) {
        *p = (ddl__passing){.next = c->passings, .fd = -1, .peer = peer, .is_client = is_client, .passed = -1,
                            .since_ns = ddl__now_ns()};
        c->passings = p;
        c->passing_count++;
    }
    return p;
}

static void ddl__passing_hang_up(ddl_context *c, ddl__passing *p) {
    if (p->proof != NULL) {
        ddl__host_prove(&c->endpoints[0].host, &p->proof, p->is_client, p->peer, NULL, 0, NULL, NULL, NULL, NULL);
    }
    if (p->fd >= 0) {
        close(p->fd);
        p->fd = -1;
    }
}

static void ddl__passing_free(ddl_context *c, ddl__passing *p) {
    for (ddl__passing **at = &c->passings; *at != NULL; at = &(*at)->next) {
        if (*at == p) {
            *at = p->next;
            c->passing_count--;
            break;
        }
    }
    ddl__passing_hang_up(c, p);
    if (p->passed >= 0) {
        close(p->passed);
    }
    ddl__free(&c->base, p);
}

static void ddl__pass_watch(ddl_context *c, int fd) {
    struct epoll_event event = {.events = EPOLLIN, .data = {.u32 = DDL__PASSING_EVENT}};
    epoll_ctl(c->epoll_fd, EPOLL_CTL_ADD, fd, &event);
}

/* >>moving */

/* Connects. DDL_IN_PROGRESS: the peer's queue is full, again later. */
static ddl_status ddl__passing_connect(ddl_context *c, ddl__passing *p) {
    struct sockaddr_un address;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return DDL_ERR_SYSTEM;
    }
    socklen_t bytes = ddl__pass_address(c->links[p->peer].pass_name, &address);
    if (connect(fd, (struct sockaddr *)&address, bytes) != 0 || !ddl__tcp_same_user(fd)) {
        bool full = errno == EAGAIN;
        close(fd);
        return full ? DDL_IN_PROGRESS : DDL_ERR_SYSTEM;
    }
    p->fd = fd;
    ddl__pass_watch(c, fd);
    return DDL_OK;
}

static ddl_status ddl__passing_send(const ddl__passing *p) {
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {.bytes = {0}};
    uint8_t tag[8];
    ddl__store_le64(tag, p->tag);
    struct iovec iov = {tag, sizeof tag};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};
    if (p->passed >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        *head = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(head), &p->passed, sizeof p->passed);
    }
    return sendmsg(p->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof tag ? DDL_OK : DDL_ERR_SYSTEM;
}

/* The descriptors of a message; all but the first are closed: nobody sends more. */
static int ddl__passed_fd(struct msghdr *message) {
    int fd = -1;
    for (struct cmsghdr *head = CMSG_FIRSTHDR(message); head != NULL; head = CMSG_NXTHDR(message, head)) {
        size_t count = head->cmsg_type == SCM_RIGHTS ? (head->cmsg_len - CMSG_LEN(0)) / sizeof(int) : 0;
        for (size_t i = 0; i < count; i++) {
            int one;
            memcpy(&one, CMSG_DATA(head) + i * sizeof one, sizeof one);
            if (fd < 0) {
                fd = one;
            } else {
                close(one);
            }
        }
    }
    return fd;
}

static ddl_status ddl__passing_receive(ddl_context *c, const ddl__passing *p) {
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    uint8_t tag[8];
    struct iovec iov = {tag, sizeof tag};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    ssize_t n = recvmsg(p->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return DDL_IN_PROGRESS;
    }
    int fd = n > 0 ? ddl__passed_fd(&message) : -1;
    ddl__passed *passed = n == (ssize_t)sizeof tag ? ddl__alloc(&c->base, sizeof *passed) : NULL;
    if (passed == NULL) {
        if (fd >= 0) {
            close(fd);
        }
        return DDL_ERR_SYSTEM;
    }
    *passed = (ddl__passed){.next = c->passed, .peer = p->peer, .tag = ddl__load_le64(tag), .fd = fd};
    c->passed = passed;
    return DDL_OK;
}

/* One step of one passing. DDL_OK: it is done; DDL_IN_PROGRESS, or an error. */
static ddl_status ddl__passing_step(ddl_context *c, ddl__passing *p) {
    ddl_status status = p->fd < 0 ? ddl__passing_connect(c, p) : DDL_OK;
    if (status == DDL_OK && !p->proven) {
        status = ddl__tcp_handshake(&c->endpoints[0].host, p->fd, p->is_client, &p->proof, &p->peer);
        p->proven = status == DDL_OK;
        p->since_ns = p->proven ? ddl__now_ns() : p->since_ns;
        status = p->proven && !c->links[p->peer].same_host ? DDL_ERR_CORRUPT : status;
    }
    if (status != DDL_OK) {
        return status;
    }
    return p->is_client ? ddl__passing_send(p) : ddl__passing_receive(c, p);
}

static void ddl__pass_accept(ddl_context *c) {
    int fd;
    while ((fd = accept4(c->pass_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        ddl__passing *p = ddl__tcp_same_user(fd) ? ddl__passing_new(c, -1, false) : NULL;
        if (p == NULL) {
            c->stats.strangers_refused++;
            close(fd);
            continue;
        }
        p->fd = fd;
        ddl__pass_watch(c, fd);
    }
}

/* A connection that came to nothing. Whoever passes connects anew, as either side may have been stopped in the middle;
 * false: that was the last try, or it is for the other side to try. */
static bool ddl__passing_again(ddl_context *c, ddl__passing *p, uint64_t now) {
    if (!p->is_client || ++p->tries == DDL__PASSING_TRIES) {
        return false;
    }
    ddl__passing_hang_up(c, p);
    p->proven = false;
    p->since_ns = now;
    return true;
}

/* Moves all passings along. */
static void ddl__pass_progress(ddl_context *c) {
    if (c->pass_fd < 0) {
        return;
    }
    ddl__pass_accept(c);
    uint64_t now = ddl__now_ns();
    for (ddl__passing *p = c->passings, *next; p != NULL; p = next) {
        next = p->next;
        ddl_status status = ddl__passing_step(c, p);
        if (status == DDL_IN_PROGRESS && now - DDL__MIN(p->since_ns, now) < DDL__PASSING_NS) {
            continue;
        }
        if (status != DDL_OK && ddl__passing_again(c, p, now)) {
            continue;
        }
        if (status != DDL_OK) {
            ddl__log(&c->base, DDL_LOG_DEBUG, "a descriptor could not be passed %s rank %d: %s",
                     p->is_client ? "to" : "from", p->peer, ddl_status_text(status));
        }
        ddl__passing_free(c, p);
    }
}

/* To whom something of this rank's is still on its way; -1: to nobody. What its peer does not take is given up after a
 * while. */
static int32_t ddl__pass_sends_to(const ddl_context *c) {
    const ddl__passing *p = c->passings;
    while (p != NULL && !p->is_client) {
        p = p->next;
    }
    return p != NULL ? p->peer : -1;
}

/* >>host */

/* Whether both sides listen. */
static bool ddl__can_pass(const ddl_context *c, int32_t peer) {
    static const uint8_t none[DDL__PASS_NAME_BYTES] = {0};
    const ddl__link *l = &c->links[peer];
    return c->pass_fd >= 0 && l->same_host && peer != c->rank && memcmp(l->pass_name, none, sizeof none) != 0;
}

static ddl_status ddl__host_send_fd(const ddl_host *host, int32_t peer, uint64_t tag, int fd) {
    ddl_context *c = ddl__core(host);
    if (!ddl__can_pass(c, peer)) {
        return DDL_ERR_UNSUPPORTED;
    }
    int copy = fd >= 0 ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
    ddl__passing *p = fd >= 0 && copy < 0 ? NULL : ddl__passing_new(c, peer, true);
    if (p == NULL) {
        if (copy >= 0) {
            close(copy);
        }
        return copy < 0 && fd >= 0 ? DDL_ERR_SYSTEM : DDL_ERR_NOMEM;
    }
    p->passed = copy;
    p->tag = tag;
    return DDL_OK;
}

/* Takes one that has come off the list. */
static bool ddl__passed_take(ddl_context *c, int32_t peer, uint64_t tag, int *out_fd) {
    for (ddl__passed **at = &c->passed; *at != NULL; at = &(*at)->next) {
        ddl__passed *p = *at;
        if (p->peer == peer && p->tag == tag) {
            *out_fd = p->fd;
            *at = p->next;
            ddl__free(&c->base, p);
            return true;
        }
    }
    return false;
}

/* Whoever asks waits for it: the listener is looked at too. */
static ddl_status ddl__host_take_fd(const ddl_host *host, int32_t peer, uint64_t tag, int *out_fd) {
    ddl_context *c = ddl__core(host);
    bool here = ddl__passed_take(c, peer, tag, out_fd);
    if (!here) {
        ddl__pass_progress(c);
        here = ddl__passed_take(c, peer, tag, out_fd);
    }
    return here ? DDL_OK : ddl__can_pass(c, peer) ? DDL_IN_PROGRESS : DDL_ERR_UNSUPPORTED;
}

static void ddl__pass_close(ddl_context *c) {
    while (c->passings != NULL) {
        ddl__passing_free(c, c->passings);
    }
    while (c->passed != NULL) {
        ddl__passed *p = c->passed;
        c->passed = p->next;
        if (p->fd >= 0) {
            close(p->fd);
        }
        ddl__free(&c->base, p);
    }
    if (c->pass_fd >= 0) {
        close(c->pass_fd);
        c->pass_fd = -1;
    }
}

#endif /* DDL_MESH_PASSING_H */

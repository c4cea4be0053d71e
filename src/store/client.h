/* client: the side of every rank but 0. It comes again until its deadline: rank 0 may be the last to start, its name
 * may not resolve yet, its port may still belong to the job before. */
#ifndef DDL_STORE_CLIENT_H
#define DDL_STORE_CLIENT_H

#include "listen.h"

#define DDL__CONNECT_NS (2 * DDL__NS_PER_S)
#ifndef DDL__REFUSED_NS
#define DDL__REFUSED_NS (3 * DDL__NS_PER_S) /* how long somebody else may sit at rank 0's place */
#endif

typedef struct ddl__client {
    const ddl__settings *settings;
    ddl__base *base;
    const void *blob;
    size_t blob_bytes;
    uint8_t *table;
    int fd;
    uint64_t deadline_ns, start_ns;
    uint64_t refused_ns; /* since when somebody answers who is not our rank 0; 0: nobody does */
    ddl_status refusal;
    const char *refusal_text;
    char last[200];  /* how the last try ended */
    char where[160]; /* "node1:29500" */
    ddl__sentence *why;
    /* A newcomer (ddl_join): it takes what the members tell instead of the table, and keeps the connection. */
    bool grows;
    uint8_t *told; /* to be freed by the caller */
    size_t told_bytes, told_max;
} ddl__client;

/* Waits until the socket can be read or written. False: the time is over. */
static bool ddl__socket_wait(int fd, short events, uint64_t until_ns) {
    for (;;) {
        uint64_t now = ddl__now_ns();
        if (now >= until_ns) {
            return false;
        }
        struct pollfd p = {fd, events, 0};
        int n = poll(&p, 1, (int)DDL__MIN((until_ns - now) / DDL__NS_PER_MS + 1, 10000u));
        if (n > 0) {
            return true;
        }
    }
}

/* Bytes sent; false when the connection or the time ends, errno says which (ETIMEDOUT). */
static bool ddl__socket_send(int fd, const void *data, size_t bytes, uint64_t until_ns) {
    const uint8_t *at = data;
    while (bytes > 0) {
        ssize_t n = send(fd, at, bytes, MSG_NOSIGNAL);
        if (n >= 0) {
            at += n;
            bytes -= (size_t)n;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            if (!ddl__socket_wait(fd, POLLOUT, until_ns)) {
                errno = ETIMEDOUT;
                return false;
            }
        } else if (errno != EINTR) {
            return false;
        }
    }
    return true;
}

/* Some bytes, at least one. 0: the other side closed. -1: errno, ETIMEDOUT among them. */
static ssize_t ddl__socket_some(int fd, void *out, size_t cap, uint64_t until_ns) {
    for (;;) {
        ssize_t n = recv(fd, out, cap, 0);
        if (n >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
            return n;
        }
        if (!ddl__socket_wait(fd, POLLIN, until_ns)) {
            errno = ETIMEDOUT;
            return -1;
        }
    }
}

/* All bytes. 1, or what ddl__socket_some said. */
static int ddl__socket_all(int fd, void *out, size_t bytes, uint64_t until_ns) {
    for (size_t have = 0; have < bytes;) {
        ssize_t n = ddl__socket_some(fd, (uint8_t *)out + have, bytes - have, until_ns);
        if (n <= 0) {
            return (int)n;
        }
        have += (size_t)n;
    }
    return 1;
}

static ddl_status __attribute__((format(printf, 2, 3))) ddl__client_again(ddl__client *c, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(c->last, sizeof c->last, format, args);
    va_end(args);
    return DDL_IN_PROGRESS;
}

/* Somebody is there who is not our rank 0. */
static ddl_status ddl__client_refused(ddl__client *c, ddl_status status, const char *text) {
    c->refusal = status;
    c->refusal_text = text;
    c->refused_ns = c->refused_ns != 0 ? c->refused_ns : ddl__now_ns();
    return ddl__client_again(c, "%s", text);
}

/* Rank 0's sentence, as it is. */
static ddl_status ddl__client_failed(ddl__client *c, const ddl__record *record, uint64_t until_ns) {
    char text[DDL__SENTENCE_BYTES];
    size_t bytes = DDL__MIN((size_t)record->bytes, sizeof text - 1);
    if (bytes > 0 && ddl__socket_all(c->fd, text, bytes, until_ns) != 1) {
        bytes = 0;
    }
    if (c->grows && record->status == DDL_ERR_STATE) { /* not now */
        text[bytes] = 0;
        ddl__text_clean(text);
        return ddl__client_again(c, "%.160s", text);
    }
    return ddl__record_sentence(record, text, bytes, c->where, c->why);
}

static ddl_status ddl__client_version(ddl__client *c, const ddl__auth *auth) {
    return ddl__fail(
        c->why, DDL_ERR_VERSION,
        "ddl_init: rank %d speaks version %d.%d of ddl's wire format, rank 0 at %s version %d.%d. Build all ranks "
        "with the same ddl.h",
        c->settings->launch.rank, DDL__WIRE_MAJOR, DDL__WIRE_MINOR, c->where, auth->peer_version >> 8,
        auth->peer_version & 255);
}

/* The handshake was refused, by us or by the other side. */
static ddl_status ddl__client_unproven(ddl__client *c, const ddl__auth *auth, ddl_status status) {
    uint8_t head[DDL__RECORD_BYTES];
    uint64_t until = ddl__now_ns() + DDL__LEAVE_NS;
    if (status == DDL_ERR_CORRUPT) {
        return ddl__client_refused(c, DDL_ERR_CONFIG, "something that is not ddl listens there");
    }
    if (status == DDL_ERR_VERSION) {
        return ddl__client_version(c, auth);
    }
    if (auth->code == DDL__AUTH_PROOF) {
        return ddl__client_refused(c, DDL_ERR_AUTH,
                                   "who listens there does not hold this job's secret: it is another job, or the ranks "
                                   "were given different secrets");
    }
    if (auth->code == DDL__AUTH_JOB) {
        return ddl__client_refused(c, DDL_ERR_AUTH, "who listens there holds the secret, but for another job");
    }
    if (ddl__socket_all(c->fd, head, sizeof head, until) == 1 && head[0] == DDL__RECORD_FAILED) {
        ddl__record record = ddl__record_read(head);
        return ddl__client_failed(c, &record, until);
    }
    if (c->grows) {
        return ddl__client_again(c, "the connection ended before the reason of a refusal came");
    }
    return ddl__fail(c->why, DDL_ERR_CONFIG, "ddl_init: rank 0 at %s refuses rank %d of %d: %s", c->where,
                     c->settings->launch.rank, c->settings->launch.world,
                     auth->code == DDL__AUTH_WORLD       ? "its world size is another"
                     : auth->code == DDL__AUTH_DUPLICATE ? "another process has that rank"
                                                         : "it knows no such rank");
}

static ddl_status ddl__client_step(ddl__client *c, ddl__auth *auth, uint64_t until_ns) {
    uint8_t in[DDL__AUTH_BYTES], out[DDL__AUTH_MAX_OUT];
    size_t have = 0, used = 0, wrote = 0;
    for (;;) {
        ddl_status status = ddl__auth_step(auth, in, have, &used, out, sizeof out, &wrote);
        if (wrote > 0 && !ddl__socket_send(c->fd, out, wrote, until_ns)) {
            return ddl__client_again(c, "the handshake broke off: %s", strerror(errno));
        }
        if (status != DDL_IN_PROGRESS) {
            return status == DDL_OK ? DDL_OK : ddl__client_unproven(c, auth, status);
        }
        /* Not a byte beyond the handshake: the reason of a refusal follows the verdict, and stays in the socket. */
        ssize_t n = ddl__socket_some(c->fd, in, (size_t)(DDL__AUTH_BYTES - auth->at), until_ns);
        if (n <= 0) {
            return ddl__client_again(c, "the handshake broke off: %s", n == 0 ? "closed" : strerror(errno));
        }
        have = (size_t)n;
    }
}

static ddl_status ddl__client_prove(ddl__client *c, bool by_uid) {
    const ddl__settings *s = c->settings;
    ddl__auth auth;
    ddl__auth_params params = {.secret = s->secret,
                               .secret_bytes = by_uid ? 0 : s->secret_bytes,
                               .job = s->job_id,
                               .purpose = c->grows ? DDL__AUTH_GROW : DDL__AUTH_STORE,
                               .rank = (uint32_t)s->launch.rank,
                               .peer = c->grows ? DDL__RANK_ANY : 0,
                               .world = (uint32_t)s->launch.world};
    uint8_t nonce[32];
    if (ddl__random(nonce, sizeof nonce) != DDL_OK || ddl__auth_client(&auth, &params, nonce) != DDL_OK) {
        return ddl__fail(c->why, DDL_ERR_SYSTEM, "ddl_init: the kernel gives no random bytes: %s", strerror(errno));
    }
    ddl_status status = ddl__client_step(c, &auth, DDL__MIN(c->deadline_ns, ddl__now_ns() + 2 * DDL__PROOF_NS));
    ddl__auth_wipe(&auth);
    return status;
}

static ddl_status ddl__client_lost(ddl__client *c) {
    return ddl__fail(
        c->why, DDL_ERR_PEER,
        "ddl_init: rank 0 at %s closed the connection to rank %d before all ranks had come: it probably ended. "
        "Look at what rank 0 printed last",
        c->where, c->settings->launch.rank);
}

/* The header of rank 0's answer. At our deadline rank 0 is asked who is missing, and has a moment for its answer. */
static ddl_status ddl__client_answer(ddl__client *c, ddl__record *out) {
    uint8_t head[DDL__RECORD_BYTES];
    if (!ddl__socket_wait(c->fd, POLLIN, c->deadline_ns)) {
        ddl__record_write(head, DDL__RECORD_GIVE_UP, DDL_OK, 0);
        (void)ddl__socket_send(c->fd, head, sizeof head, c->deadline_ns + DDL__LEAVE_NS);
    }
    int got = ddl__socket_all(c->fd, head, sizeof head, c->deadline_ns + DDL__LEAVE_NS);
    if (got < 0 && errno == ETIMEDOUT) {
        return ddl__fail(
            c->why, DDL_ERR_TIMEOUT,
            "ddl_init: rank %d of %d has come to rank 0 at %s, but not all others have within %lld ms, and rank 0 "
            "does not answer",
            c->settings->launch.rank, c->settings->launch.world, c->where, (long long)c->settings->init_timeout_ms);
    }
    if (got != 1) {
        return ddl__client_lost(c);
    }
    *out = ddl__record_read(head);
    return DDL_OK;
}

/* Proven: gives the blob, takes the table. */
static ddl_status ddl__client_trade(ddl__client *c) {
    uint8_t head[DDL__RECORD_BYTES];
    ddl__record answer;
    size_t bytes = (size_t)c->settings->launch.world * c->blob_bytes;
    ddl__record_write(head, DDL__RECORD_BLOB, DDL_OK, c->blob_bytes);
    if (!ddl__socket_send(c->fd, head, sizeof head, c->deadline_ns) ||
        !ddl__socket_send(c->fd, c->blob, c->blob_bytes, c->deadline_ns)) {
        return ddl__client_again(c, "the connection broke off: %s", strerror(errno));
    }
    DDL__TRY(ddl__client_answer(c, &answer));
    if (answer.kind == DDL__RECORD_FAILED) {
        return ddl__client_failed(c, &answer, ddl__now_ns() + DDL__LEAVE_NS);
    }
    if (!ddl__record_is_table(&answer, c->settings->launch.world, c->blob_bytes)) {
        return ddl__fail(c->why, DDL_ERR_CORRUPT, "ddl_init: the answer of rank 0 at %s makes no sense", c->where);
    }
    if (ddl__socket_all(c->fd, c->table, bytes, ddl__now_ns() + DDL__DELIVER_NS) != 1) {
        return ddl__client_lost(c);
    }
    ddl__record_write(head, DDL__RECORD_TAKEN, DDL_OK, 0);
    (void)ddl__socket_send(c->fd, head, sizeof head, ddl__now_ns() + DDL__LEAVE_NS);
    return DDL_OK;
}

/* The same of a newcomer: gives the blob, takes what the members tell once they have made up their minds. A connection
 * that ends means that they begin anew, or that who received us has died: then we come again too. */
static ddl_status ddl__client_come(ddl__client *c) {
    uint8_t head[DDL__RECORD_BYTES];
    ddl__record_write(head, DDL__RECORD_BLOB, DDL_OK, c->blob_bytes);
    if (!ddl__socket_send(c->fd, head, sizeof head, c->deadline_ns) ||
        !ddl__socket_send(c->fd, c->blob, c->blob_bytes, c->deadline_ns) ||
        ddl__socket_all(c->fd, head, sizeof head, c->deadline_ns) != 1) {
        return ddl__client_again(c, "the members have not admitted it yet");
    }
    ddl__record answer = ddl__record_read(head);
    if (answer.kind == DDL__RECORD_FAILED) {
        return ddl__client_failed(c, &answer, ddl__now_ns() + DDL__LEAVE_NS);
    }
    if (answer.kind != DDL__RECORD_TABLE || answer.bytes == 0 || answer.bytes > c->told_max) {
        return ddl__fail(c->why, DDL_ERR_CORRUPT, "ddl_join: the answer of %s makes no sense", c->where);
    }
    c->told_bytes = answer.bytes;
    c->told = ddl__alloc(c->base, c->told_bytes);
    if (c->told == NULL) {
        return ddl__fail(c->why, DDL_ERR_NOMEM, "ddl_join: no memory for what the members tell");
    }
    if (ddl__socket_all(c->fd, c->told, c->told_bytes, ddl__now_ns() + DDL__DELIVER_NS) != 1) {
        ddl__free(c->base, c->told);
        c->told = NULL;
        return ddl__client_again(c, "the connection ended while the members told who they are");
    }
    return DDL_OK;
}

static int ddl__connect_at(const ddl__address *a, uint64_t until_ns) {
    int fd = socket(a->at.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), error = 0, yes = 1;
    socklen_t bytes = sizeof error;
    if (fd < 0) {
        return -1;
    }
    if (connect(fd, &a->at.any, a->bytes) != 0) {
        error = errno;
        if (error == EINPROGRESS) {
            error = ETIMEDOUT;
            if (ddl__socket_wait(fd, POLLOUT, until_ns)) {
                (void)getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes);
            }
        }
    }
    if (error != 0) {
        close(fd);
        errno = error;
        return -1;
    }
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes); /* fails on a unix socket, which has no delay */
    return fd;
}

/* One connection, from its beginning to its end. DDL_IN_PROGRESS: come again. */
static ddl_status ddl__client_try(ddl__client *c, const ddl__address *a) {
    bool by_uid = a->at.any.sa_family == AF_UNIX;
    c->fd = ddl__connect_at(a, DDL__MIN(c->deadline_ns, ddl__now_ns() + DDL__CONNECT_NS));
    if (c->fd < 0) {
        bool over = errno == ETIMEDOUT && ddl__now_ns() >= c->deadline_ns; /* our time is, nothing is learnt */
        return over && c->last[0] != 0 ? DDL_IN_PROGRESS : ddl__client_again(c, "%s", strerror(errno));
    }
    ddl_status status;
    if (by_uid && ddl__socket_uid(c->fd) != (long)geteuid()) {
        status = ddl__client_refused(c, DDL_ERR_AUTH, "the unix socket there belongs to another user");
    } else {
        status = ddl__client_prove(c, by_uid);
    }
    if (status == DDL_OK) {
        status = c->grows ? ddl__client_come(c) : ddl__client_trade(c);
    }
    if (!c->grows || status != DDL_OK) {
        close(c->fd);
        c->fd = -1;
    }
    return status;
}

/* Every address and port that rank 0 may be at, once. */
static ddl_status ddl__client_round(ddl__client *c) {
    const ddl__settings *s = c->settings;
    ddl__addresses list;
    int error = ddl__resolve(s->place.host, &list);
    if (error != 0) {
        return ddl__client_again(c, "the name does not resolve: %s", gai_strerror(error));
    }
    if (ddl__place_is_here(s)) {
        if (!ddl__addresses_have_mine(&list)) {
            return ddl__no_secret_between_hosts(s, c->why);
        }
        ddl__address_of_unix(&list.list[0], s->place.port, s->job_id);
        list.count = 1;
    }
    ddl_status status = DDL_IN_PROGRESS;
    for (int32_t port = 0; port < s->place.ports && status == DDL_IN_PROGRESS; port++) {
        for (int i = 0; i < list.count && status == DDL_IN_PROGRESS; i++) {
            ddl__address_set_port(&list.list[i], s->place.port + port);
            status = ddl__client_try(c, &list.list[i]);
        }
    }
    return status;
}

/* What is most often wrong. */
static const char *ddl__client_hint(const ddl__client *c) {
    ddl__addresses list;
    if (c->settings->secret == NULL) {
        return "; this rank has no secret, so rank 0 must have none either";
    }
    bool loopback = ddl__resolve(c->settings->place.host, &list) == 0 && ddl__address_is_loopback(&list.list[0]);
    return loopback
               ? "; this is a loopback address, which leads only to processes of the same machine: with more machines, "
                 "give rank 0's address in the network"
               : "";
}

static ddl_status ddl__client_give_up(ddl__client *c) {
    const ddl__launch *l = &c->settings->launch;
    double waited = (double)(ddl__now_ns() - c->start_ns) / (double)DDL__NS_PER_S;
    if (c->grows) {
        return ddl__fail(c->why, c->refused_ns != 0 ? c->refusal : DDL_ERR_TIMEOUT,
                         "ddl_join: nobody admitted a new rank %d of %d at %s within %.1f s (last: %s). The members "
                         "admit newcomers while they are in ddl_group_grow; job, secret and WORLD_SIZE are theirs",
                         l->rank, l->world, c->where, waited, c->last);
    }
    if (c->refused_ns != 0) {
        return ddl__fail(
            c->why, c->refusal,
            "ddl_init: rank %d of %d finds no rank 0 of its job at %s: %s. Is MASTER_PORT free for this job alone, "
            "and the secret the same on all ranks",
            l->rank, l->world, c->where, c->refusal_text);
    }
    return ddl__fail(
        c->why, DDL_ERR_TIMEOUT,
        "ddl_init: rank %d of %d could not reach rank 0 at %s within %.1f s (last: %s). Look whether rank 0 is "
        "started and what it prints, and whether %s name its machine%s",
        l->rank, l->world, c->where, waited, c->last, c->settings->place.from, ddl__client_hint(c));
}

/* Blocks. Errors: DDL_ERR_TIMEOUT, DDL_ERR_AUTH, DDL_ERR_VERSION, DDL_ERR_CONFIG, DDL_ERR_PEER, and those that rank 0
 * reports. */
static ddl_status ddl__client_run(ddl__client *c) {
    const ddl__settings *s = c->settings;
    uint64_t pause_ms = 1;
    c->start_ns = ddl__now_ns();
    if (ddl__place_is_here(s)) {
        ddl__unix_text(s, c->where, sizeof c->where);
    } else {
        snprintf(c->where, sizeof c->where, strchr(s->place.host, ':') ? "[%.100s]:%d" : "%.100s:%d", s->place.host,
                 s->place.port);
    }
    for (;;) {
        ddl_status status = ddl__client_round(c);
        if (status != DDL_IN_PROGRESS) {
            return status;
        }
        int32_t ended = c->grows ? -1 : ddl__launch_ended(&s->launch, s->ended_fd);
        if (ended >= 0) {
            return ddl__ended_sentence(&s->launch, ended, c->why);
        }
        uint64_t now = ddl__now_ns();
        bool taken = c->refused_ns != 0 && s->place.ports == 1 && now - c->refused_ns > DDL__REFUSED_NS;
        if (taken || now >= c->deadline_ns) {
            return ddl__client_give_up(c);
        }
        ddl__pause_ms(DDL__MIN(pause_ms, (c->deadline_ns - now) / DDL__NS_PER_MS + 1));
        pause_ms = DDL__MIN(pause_ms * 2, 100u);
    }
}

#endif /* DDL_STORE_CLIENT_H */

/* server: rank 0's side of the rendezvous, and, while a group grows, that of the rank that receives newcomers
 * (`grows`): there each comes for one rank, and the caller takes those who are HERE. One thread, one epoll, no waiting
 * for any one connection: whoever does not prove the job's secret in time costs a counter and a debug line. It sees
 * descriptors that listen, not how they came to be. What a stranger can make it hold: DDL__STRANGERS_MAX connections of
 * sizeof(ddl__guest) bytes. */
#ifndef DDL_STORE_SERVER_H
#define DDL_STORE_SERVER_H

#include "address.h"

#include <sys/epoll.h>

#define DDL__LISTENERS_MAX DDL__ADDRESSES_MAX
#define DDL__STRANGERS_MAX 64
#define DDL__PROOF_NS (5 * DDL__NS_PER_S)    /* to prove oneself */
#define DDL__EVICT_NS (250 * DDL__NS_PER_MS) /* so old is a silent one that makes room for another */
#define DDL__LEAVE_NS (1 * DDL__NS_PER_S)    /* for the last words to arrive */
#define DDL__DELIVER_NS (5 * DDL__NS_PER_S)  /* for the table to arrive */

/* What a connection is at. From DDL__GUEST_HEAD on it is proven and its rank is its own. */
enum ddl__guest_stage {
    DDL__GUEST_NONE,
    DDL__GUEST_PROOF,   /* in the handshake */
    DDL__GUEST_HEAD,    /* a record's header comes next */
    DDL__GUEST_BLOB,    /* its blob comes next */
    DDL__GUEST_LEAVING, /* told why; what it still says is thrown away */
};

/* What is known of a rank. */
enum ddl__rank_state { DDL__RANK_AWAY, DDL__RANK_PROVEN, DDL__RANK_HERE, DDL__RANK_SERVED };

typedef struct ddl__guest {
    int fd;
    uint8_t stage, head_bytes, out_at, out_end;
    bool heard, writing;
    uint32_t rank, blob_bytes;
    uint64_t since_ns;
    uint8_t head[DDL__RECORD_BYTES];
    uint8_t out[192]; /* all that is ever sent but for tails: challenge 80, verdict 36, record 8 */
    const void *tail; /* the table or a sentence, not copied */
    size_t tail_at, tail_bytes;
    ddl__auth auth;
    char from[64];
} ddl__guest;

_Static_assert(sizeof(ddl__guest) <= 4096, "a stranger holds more than 4 KiB");

typedef struct ddl__server {
    const ddl__settings *settings;
    ddl__base *base;
    size_t blob_bytes;
    uint8_t *table;
    int epoll, spare, listeners[DDL__LISTENERS_MAX], listener_count;
    bool by_uid;     /* unix sockets: the kernel says who it is */
    bool resting;    /* listeners are out of the epoll until rest_ns: no room */
    char where[160]; /* "10.0.0.5:29500" */
    ddl__guest *guests;
    int32_t guest_count, strangers_now;
    uint8_t *ranks; /* enum ddl__rank_state of each */
    int32_t here, served;
    uint64_t start_ns, swept_ns, rest_ns, end_ns; /* end_ns: deadline of what goes on now */
    uint64_t strangers;
    char last_stranger[160];
    char world_text[160]; /* for ranks that count otherwise */
    bool delivering, failing;
    bool grows;
    ddl__sentence *why;
} ddl__server;

static bool ddl__guest_proven(const ddl__guest *g) { return g->stage >= DDL__GUEST_HEAD; }

static void ddl__guest_close(ddl__server *server, ddl__guest *g) {
    if (g->stage == DDL__GUEST_NONE) {
        return;
    }
    server->strangers_now -= g->stage == DDL__GUEST_PROOF;
    close(g->fd); /* leaves the epoll by itself: no other descriptor shares the socket */
    ddl__auth_wipe(&g->auth);
    memset(g, 0, sizeof *g);
    g->fd = -1;
}

static void ddl__guest_stranger(ddl__server *server, ddl__guest *g, const char *what) {
    server->strangers++;
    snprintf(server->last_stranger, sizeof server->last_stranger, "%s: %s", g->from, what);
    ddl__log(server->base, DDL_LOG_DEBUG, "a connection from %s was turned away: %s", g->from, what);
    ddl__guest_close(server, g);
}

static void ddl__guest_arm(ddl__server *server, ddl__guest *g, bool writing) {
    struct epoll_event event = {.events = EPOLLIN | (writing ? EPOLLOUT : 0u),
                                .data.u32 = (uint32_t)(g - server->guests) + DDL__LISTENERS_MAX};
    if (writing != g->writing) {
        (void)epoll_ctl(server->epoll, EPOLL_CTL_MOD, g->fd, &event);
        g->writing = writing;
    }
}

/* Sends what it takes. False: the connection is gone. */
static bool ddl__guest_flush(ddl__server *server, ddl__guest *g) {
    while (g->out_at < g->out_end || g->tail_at < g->tail_bytes) {
        bool head = g->out_at < g->out_end;
        const void *from = head ? g->out + g->out_at : (const uint8_t *)g->tail + g->tail_at;
        size_t bytes = head ? (size_t)(g->out_end - g->out_at) : g->tail_bytes - g->tail_at;
        ssize_t n = send(g->fd, from, bytes, MSG_NOSIGNAL | (head && g->tail_bytes > 0 ? MSG_MORE : 0));
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            ddl__guest_arm(server, g, true);
            return true;
        }
        if (n < 0) {
            return false;
        }
        if (head) {
            g->out_at = (uint8_t)(g->out_at + n);
        } else {
            g->tail_at += (size_t)n;
        }
    }
    ddl__guest_arm(server, g, false);
    if (g->stage == DDL__GUEST_LEAVING) { /* not close: unread input would turn it into a reset, and that eats words */
        (void)shutdown(g->fd, SHUT_WR);
    }
    return true;
}

/* Queues a record. What tail points to must stay. */
static void ddl__guest_say(ddl__guest *g, uint8_t kind, ddl_status status, const void *tail, size_t bytes) {
    ddl__record_write(g->out + g->out_end, kind, status, bytes);
    g->out_end = (uint8_t)(g->out_end + DDL__RECORD_BYTES);
    g->tail = tail;
    g->tail_at = 0;
    g->tail_bytes = bytes;
}

/* Tells a proven member why it cannot take part, and lets it go. The job goes on. text must stay: a literal. */
static void ddl__guest_dismiss(ddl__server *server, ddl__guest *g, ddl_status status, const char *text) {
    ddl_log_level level = g->auth.code == DDL__AUTH_JOB ? DDL_LOG_DEBUG : DDL_LOG_WARN; /* that one will come again */
    ddl__log(server->base, level, "turned away rank %u from %s: %s", g->auth.peer_rank, g->from, text);
    server->strangers_now -= g->stage == DDL__GUEST_PROOF;
    ddl__guest_say(g, DDL__RECORD_FAILED, status, text, strlen(text));
    g->stage = DDL__GUEST_LEAVING;
    g->since_ns = ddl__now_ns();
}

static void ddl__server_close_listeners(ddl__server *server) {
    for (int i = 0; i < server->listener_count; i++) {
        close(server->listeners[i]);
    }
    server->listener_count = 0;
}

/* The start has failed: everybody who is here hears the sentence in server->why. Returns its status. */
static void ddl__server_fail(ddl__server *server) {
    server->failing = true;
    server->end_ns = ddl__now_ns() + DDL__LEAVE_NS;
    ddl__server_close_listeners(server);
    for (int32_t i = 0; i < server->guest_count; i++) {
        ddl__guest *g = &server->guests[i];
        if (g->stage == DDL__GUEST_PROOF || (ddl__guest_proven(g) && g->tail_at < g->tail_bytes)) {
            ddl__guest_close(server, g);
        } else if (g->stage == DDL__GUEST_HEAD || g->stage == DDL__GUEST_BLOB) {
            ddl__guest_say(g, DDL__RECORD_FAILED, server->why->status, server->why->text, strlen(server->why->text));
            g->stage = DDL__GUEST_LEAVING;
            g->since_ns = ddl__now_ns();
            if (!ddl__guest_flush(server, g)) {
                ddl__guest_close(server, g);
            }
        }
    }
}

static void ddl__server_fail_missing(ddl__server *server) {
    ddl__text text = {server->why->text, sizeof server->why->text, 0};
    char host[65] = "?";
    int32_t world = server->settings->launch.world;
    (void)gethostname(host, sizeof host - 1);
    ddl__text_add(&text, "ddl_init: ");
    ddl__text_ranks_below(&text, server->ranks, world, DDL__RANK_HERE);
    ddl__text_add(&text, " of %d %s not come within %.1f s to rank 0 at %s (process %ld on %s)", world,
                  world - server->here == 1 ? "has" : "have",
                  (double)(ddl__now_ns() - server->start_ns) / (double)DDL__NS_PER_S, server->where, (long)getpid(),
                  host);
    if (server->strangers > 0) {
        ddl__text_add(&text, "; %llu connections did not prove that they belong to the job, the last from %s",
                      (unsigned long long)server->strangers, server->last_stranger);
    }
    ddl__text_add(&text, ". Look at what the missing ranks print; they need the same rendezvous, job and secret as the "
                         "others");
    server->why->status = DDL_ERR_TIMEOUT;
    ddl__server_fail(server);
}

static void ddl__server_name_lost(ddl__server *server, const ddl__guest *g, const char *what) {
    ddl__text text = {server->why->text, sizeof server->why->text, 0};
    ddl__text_add(&text, "ddl_init: rank %u (from %s) %s during the start, while ", g->rank, g->from, what);
    ddl__text_ranks_below(&text, server->ranks, server->settings->launch.world, DDL__RANK_HERE);
    ddl__text_add(&text, " of %d had not come yet. Look at what rank %u printed last", server->settings->launch.world,
                  g->rank);
    server->why->status = DDL_ERR_PEER;
}

/* The connection is gone, whoever closed it. Before its blob is here a rank may come again; after it, it has died. */
static void ddl__guest_gone(ddl__server *server, ddl__guest *g, const char *what) {
    uint8_t *state = &server->ranks[g->rank];
    if (g->stage == DDL__GUEST_PROOF) {
        ddl__guest_stranger(server, g, g->heard ? "it left during the handshake" : "it left without a word");
        return;
    }
    if (server->grows && g->stage != DDL__GUEST_LEAVING) {
        server->here -= *state == DDL__RANK_HERE;
        *state = DDL__RANK_AWAY;
        ddl__guest_close(server, g);
        return;
    }
    bool died = *state == DDL__RANK_HERE && g->stage != DDL__GUEST_LEAVING && !server->failing;
    if (g->stage != DDL__GUEST_LEAVING && *state == DDL__RANK_PROVEN) {
        *state = DDL__RANK_AWAY;
    }
    if (died && server->delivering) { /* it will be missed by its peers; the table is on its way to all */
        *state = DDL__RANK_SERVED;
        server->served++;
    } else if (died) {
        ddl__server_name_lost(server, g, what);
        ddl__guest_close(server, g);
        ddl__server_fail(server);
        return;
    }
    ddl__guest_close(server, g);
}

/* All blobs are here. */
static void ddl__server_deliver(ddl__server *server) {
    size_t bytes = (size_t)server->settings->launch.world * server->blob_bytes;
    server->delivering = true;
    server->end_ns = ddl__now_ns() + DDL__DELIVER_NS;
    ddl__server_close_listeners(server);
    for (int32_t i = 0; i < server->guest_count; i++) {
        ddl__guest *g = &server->guests[i];
        if (g->stage == DDL__GUEST_PROOF) {
            ddl__guest_stranger(server, g, "the job is complete without it");
        } else if (g->stage == DDL__GUEST_HEAD) {
            ddl__guest_say(g, DDL__RECORD_TABLE, DDL_OK, server->table, bytes);
            if (!ddl__guest_flush(server, g)) {
                ddl__guest_gone(server, g, "left");
            }
        }
    }
}

static void ddl__guest_record(ddl__server *server, ddl__guest *g) {
    ddl__record record = ddl__record_read(g->head);
    uint8_t *state = &server->ranks[g->rank];
    g->head_bytes = 0;
    if (record.kind == DDL__RECORD_BLOB && *state == DDL__RANK_PROVEN && record.bytes == server->blob_bytes) {
        g->stage = DDL__GUEST_BLOB;
    } else if (record.kind == DDL__RECORD_BLOB && *state == DDL__RANK_PROVEN) {
        *state = DDL__RANK_AWAY;
        ddl__guest_dismiss(
            server, g, DDL_ERR_VERSION,
            "ddl_init: this rank brings another amount of data than rank 0: they are built from different "
            "versions of ddl.h");
    } else if (record.kind == DDL__RECORD_TAKEN && server->delivering) {
        *state = DDL__RANK_SERVED;
        server->served++;
        ddl__guest_close(server, g);
    } else if (record.kind == DDL__RECORD_GIVE_UP && !server->delivering && !server->grows) {
        ddl__server_fail_missing(server);
    } else {
        ddl__guest_gone(server, g, "sent what makes no sense");
    }
}

static void ddl__guest_admit(ddl__server *server, ddl__guest *g) {
    server->strangers_now--;
    g->stage = DDL__GUEST_HEAD;
    g->rank = g->auth.peer_rank;
    server->ranks[g->rank] = DDL__RANK_PROVEN;
    ddl__wipe(&g->auth.secret, sizeof g->auth.secret);
    ddl__log(server->base, DDL_LOG_DEBUG, "rank %u has come from %s", g->rank, g->from);
}

/* The handshake has ended badly. Only who holds the secret hears why. */
static void ddl__guest_refuse(ddl__server *server, ddl__guest *g, ddl_status status) {
    switch (g->auth.code) {
    case DDL__AUTH_JOB:
        ddl__guest_dismiss(server, g, DDL_ERR_AUTH,
                           "ddl_init: the rank 0 that listens at MASTER_ADDR and MASTER_PORT belongs to another job; "
                           "give each job its own port");
        break;
    case DDL__AUTH_WORLD:
        ddl__guest_dismiss(server, g, DDL_ERR_CONFIG, server->world_text);
        break;
    case DDL__AUTH_DUPLICATE:
        if (server->grows) {
            ddl__guest_dismiss(server, g, DDL_ERR_STATE, "the rank lives, or another process has come for it");
            break;
        }
        ddl__guest_dismiss(
            server, g, DDL_ERR_CONFIG,
            "ddl_init: another process with the same rank has come before this one; every rank is started "
            "once, with its own RANK");
        break;
    case DDL__AUTH_RANK:
        ddl__guest_dismiss(server, g, DDL_ERR_CONFIG, "ddl_init: rank 0 knows no such rank");
        break;
    case DDL__AUTH_VERSION:
        (void)ddl__guest_flush(server, g);
        ddl__guest_stranger(server, g, "it speaks another version of ddl");
        break;
    default:
        ddl__guest_stranger(server, g,
                            status == DDL_ERR_CORRUPT ? "it does not speak ddl" : "it does not know the job's secret");
    }
}

/* Takes bytes for the handshake; returns how many. */
static size_t ddl__guest_prove(ddl__server *server, ddl__guest *g, const uint8_t *in, size_t bytes) {
    size_t used = 0, wrote = 0;
    uint32_t claimed = g->auth.peer_rank, world = (uint32_t)server->settings->launch.world;
    if (g->auth.peer_world != 0 && claimed >= world) {
        ddl__auth_refuse(&g->auth, DDL__AUTH_RANK);
    } else if (g->auth.peer_world != 0 && server->ranks[claimed] != DDL__RANK_AWAY) {
        ddl__auth_refuse(&g->auth, DDL__AUTH_DUPLICATE);
    }
    ddl_status status =
        ddl__auth_step(&g->auth, in, bytes, &used, g->out + g->out_end, sizeof g->out - g->out_end, &wrote);
    g->out_end = (uint8_t)(g->out_end + wrote);
    g->heard = true;
    if (status == DDL_OK) {
        ddl__guest_admit(server, g);
    } else if (status < 0) {
        ddl__guest_refuse(server, g, status);
    }
    return used;
}

/* Takes bytes of a record; returns how many. */
static size_t ddl__guest_collect(ddl__server *server, ddl__guest *g, const uint8_t *in, size_t bytes) {
    size_t n;
    if (g->stage == DDL__GUEST_HEAD) {
        n = DDL__MIN(bytes, (size_t)(DDL__RECORD_BYTES - g->head_bytes));
        memcpy(g->head + g->head_bytes, in, n);
        g->head_bytes = (uint8_t)(g->head_bytes + n);
        if (g->head_bytes == DDL__RECORD_BYTES) {
            ddl__guest_record(server, g);
        }
        return n;
    }
    n = DDL__MIN(bytes, server->blob_bytes - g->blob_bytes);
    memcpy(server->table + (size_t)g->rank * server->blob_bytes + g->blob_bytes, in, n);
    g->blob_bytes += (uint32_t)n;
    if (g->blob_bytes == server->blob_bytes) {
        g->stage = DDL__GUEST_HEAD;
        server->ranks[g->rank] = DDL__RANK_HERE;
        if (++server->here == server->settings->launch.world && !server->grows) {
            ddl__server_deliver(server);
        }
    }
    return n;
}

static void ddl__guest_feed(ddl__server *server, ddl__guest *g, const uint8_t *in, size_t bytes) {
    while (bytes > 0 && g->stage != DDL__GUEST_NONE && g->stage != DDL__GUEST_LEAVING) {
        size_t n = g->stage == DDL__GUEST_PROOF ? ddl__guest_prove(server, g, in, bytes)
                                                : ddl__guest_collect(server, g, in, bytes);
        in += n;
        bytes -= n;
    }
}

/* One read an event: a fast talker must not keep the others waiting. */
static void ddl__guest_event(ddl__server *server, ddl__guest *g, uint32_t events) {
    uint8_t in[4096];
    if (g->stage == DDL__GUEST_NONE) {
        return; /* closed by an event before this one */
    }
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
        ssize_t n = recv(g->fd, in, sizeof in, 0);
        bool later = n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
        if (n <= 0 && !later) {
            ddl__guest_gone(server, g, n == 0 ? "left" : "broke off");
            return;
        }
        if (n > 0) {
            ddl__guest_feed(server, g, in, (size_t)n);
        }
    }
    if (g->stage != DDL__GUEST_NONE && !ddl__guest_flush(server, g)) {
        ddl__guest_gone(server, g, "broke off");
    }
}

static void ddl__server_rest(ddl__server *server, bool rest) {
    for (int i = 0; rest != server->resting && i < server->listener_count; i++) {
        struct epoll_event event = {.events = rest ? 0 : EPOLLIN, .data.u32 = (uint32_t)i};
        (void)epoll_ctl(server->epoll, EPOLL_CTL_MOD, server->listeners[i], &event);
    }
    server->resting = rest;
}

/* Makes sure that one more stranger fits: the one that has been silent longest goes, but not before it had a moment.
 * A storm of honest ranks waits in the kernel's queue meanwhile. */
static bool ddl__server_room(ddl__server *server) {
    if (server->strangers_now < DDL__STRANGERS_MAX) {
        return true;
    }
    ddl__guest *oldest = NULL;
    for (int32_t i = 0; i < server->guest_count; i++) {
        ddl__guest *g = &server->guests[i];
        bool older = oldest == NULL || (g->heard != oldest->heard ? oldest->heard : g->since_ns < oldest->since_ns);
        oldest = g->stage == DDL__GUEST_PROOF && older ? g : oldest;
    }
    uint64_t now = ddl__now_ns();
    if (oldest == NULL || now - oldest->since_ns < DDL__EVICT_NS) {
        server->rest_ns = now + 10 * DDL__NS_PER_MS;
        ddl__server_rest(server, true);
        return false;
    }
    ddl__guest_stranger(server, oldest, "it was silent while others waited");
    return true;
}

static void ddl__guest_begin(ddl__server *server, int fd, const ddl__address *from) {
    ddl__guest *g = NULL;
    for (int32_t i = 0; i < server->guest_count && g == NULL; i++) {
        g = server->guests[i].stage == DDL__GUEST_NONE ? &server->guests[i] : NULL;
    }
    const ddl__settings *s = server->settings;
    ddl__auth_params params = {.secret = s->secret,
                               .secret_bytes = server->by_uid ? 0 : s->secret_bytes,
                               .job = s->job_id,
                               .purpose = server->grows ? DDL__AUTH_GROW : DDL__AUTH_STORE,
                               .world = (uint32_t)s->launch.world};
    uint8_t nonce[32];
    struct epoll_event event = {.events = EPOLLIN};
    int yes = 1;
    if (g == NULL || ddl__random(nonce, sizeof nonce) != DDL_OK) {
        close(fd);
        return;
    }
    event.data.u32 = (uint32_t)(g - server->guests) + DDL__LISTENERS_MAX;
    if (ddl__auth_server(&g->auth, &params, nonce) != DDL_OK ||
        epoll_ctl(server->epoll, EPOLL_CTL_ADD, fd, &event) != 0) {
        close(fd);
        return;
    }
    g->fd = fd;
    g->stage = DDL__GUEST_PROOF;
    g->since_ns = ddl__now_ns();
    server->strangers_now++;
    ddl__address_text(from, g->from, sizeof g->from);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes); /* fails on a unix socket, which has no delay */
    if (server->by_uid && ddl__socket_uid(fd) != (long)geteuid()) {
        ddl__guest_stranger(server, g, "it is another user's");
    }
}

/* Out of descriptors: takes the connection off the queue with the spare one and lets it go, or accept would report it
 * for ever. The rank tries again. */
static void ddl__server_shed(ddl__server *server, int listener) {
    close(server->spare);
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd >= 0) {
        close(fd);
    }
    server->spare = open("/dev/null", O_RDONLY | O_CLOEXEC);
    ddl__log(server->base, DDL_LOG_WARN, "out of file descriptors: a connection was turned away");
}

static void ddl__server_accept(ddl__server *server, int listener) {
    for (int i = 0; i < DDL__STRANGERS_MAX && ddl__server_room(server); i++) {
        ddl__address from;
        memset(&from, 0, sizeof from);
        from.bytes = sizeof from.at;
        int fd = accept4(listener, &from.at.any, &from.bytes, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0) {
            ddl__guest_begin(server, fd, &from);
        } else if (errno == EMFILE || errno == ENFILE) {
            ddl__server_shed(server, listener);
        } else if (errno != EINTR && errno != ECONNABORTED) {
            return;
        }
    }
}

/* Ends what has lasted too long. */
static void ddl__server_sweep(ddl__server *server, uint64_t now) {
    for (int32_t i = 0; i < server->guest_count; i++) {
        ddl__guest *g = &server->guests[i];
        if (g->stage == DDL__GUEST_PROOF && now - g->since_ns > DDL__PROOF_NS) {
            ddl__guest_stranger(server, g, "it did not finish the handshake in time");
        } else if (g->stage == DDL__GUEST_LEAVING && now - g->since_ns > DDL__LEAVE_NS) {
            ddl__guest_close(server, g);
        }
    }
    if (server->resting && now >= server->rest_ns) {
        ddl__server_rest(server, false);
    }
}

static bool ddl__server_done(const ddl__server *server) {
    if (server->failing) {
        for (int32_t i = 0; i < server->guest_count; i++) {
            if (server->guests[i].stage != DDL__GUEST_NONE) {
                return false;
            }
        }
        return true;
    }
    return server->delivering && server->served == server->settings->launch.world;
}

/* The deadline of what goes on has come. False: it ends here. */
static bool ddl__server_overdue(ddl__server *server) {
    if (server->failing) {
        return false;
    }
    if (server->delivering) {
        char list[600] = "";
        ddl__text text = {list, sizeof list, 0};
        ddl__text_ranks_below(&text, server->ranks, server->settings->launch.world, DDL__RANK_SERVED);
        ddl__log(server->base, DDL_LOG_WARN, "%s did not confirm the table of addresses; going on", list);
        return false;
    }
    ddl__server_fail_missing(server);
    return true;
}

/* Lets happen what can, within so many milliseconds. */
static void ddl__server_turn(ddl__server *server, int ms) {
    struct epoll_event events[64];
    int n = epoll_wait(server->epoll, events, 64, ms);
    for (int i = 0; i < n; i++) {
        uint32_t id = events[i].data.u32;
        if (id >= DDL__LISTENERS_MAX) {
            ddl__guest_event(server, &server->guests[id - DDL__LISTENERS_MAX], events[i].events);
        } else if ((int)id < server->listener_count) {
            ddl__server_accept(server, server->listeners[id]);
        }
    }
    uint64_t now = ddl__now_ns();
    if (now - server->swept_ns > 5 * DDL__NS_PER_MS) {
        server->swept_ns = now;
        ddl__server_sweep(server, now);
    }
}

/* A rank that is here and ends is seen by its connection; one that has not come, by its launcher. */
static void ddl__server_look(ddl__server *server) {
    const ddl__settings *s = server->settings;
    int32_t ended = ddl__launch_ended(&s->launch, s->ended_fd);
    if (ended >= 0 && server->ranks[ended] < DDL__RANK_HERE && !server->failing) {
        (void)ddl__ended_sentence(&s->launch, ended, server->why);
        ddl__server_fail(server);
    }
}

static ddl_status ddl__server_loop(ddl__server *server) {
    while (!ddl__server_done(server)) {
        ddl__server_look(server);
        uint64_t now = ddl__now_ns();
        if (now >= server->end_ns && !ddl__server_overdue(server)) {
            break;
        }
        uint64_t left = server->end_ns > now ? (server->end_ns - now) / DDL__NS_PER_MS + 1 : 0;
        ddl__server_turn(server, (int)DDL__MIN(left, server->resting ? 5u : 100u));
    }
    return server->failing ? server->why->status : DDL_OK;
}

/* Ends it, and what ddl__server_open has begun. */
static void ddl__server_close(ddl__server *server) {
    ddl__server_close_listeners(server);
    for (int32_t i = 0; server->guests != NULL && i < server->guest_count; i++) {
        ddl__guest_close(server, &server->guests[i]);
    }
    if (server->epoll >= 0) {
        close(server->epoll);
    }
    if (server->spare >= 0) {
        close(server->spare);
    }
    ddl__free(server->base, server->guests);
    ddl__free(server->base, server->ranks);
}

/* Makes what it works with, all ranks AWAY; listens on what the caller has bound. On error it is closed. */
static ddl_status ddl__server_open(ddl__server *server) {
    int32_t world = server->settings->launch.world;
    ddl_status status = DDL_OK;
    server->start_ns = ddl__now_ns();
    snprintf(
        server->world_text, sizeof server->world_text,
        "ddl_init: rank 0 was started for a world of %d, this rank for another; all ranks need the same WORLD_SIZE",
        world);
    server->guest_count = world + DDL__STRANGERS_MAX;
    server->guests = ddl__alloc_array(server->base, (size_t)server->guest_count, sizeof *server->guests);
    server->ranks = ddl__alloc(server->base, (size_t)world);
    server->spare = open("/dev/null", O_RDONLY | O_CLOEXEC);
    server->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (server->guests == NULL || server->ranks == NULL) {
        status = ddl__fail(server->why, DDL_ERR_NOMEM, "ddl_init: no memory for %d connections of rank 0", world);
    } else if (server->epoll < 0) {
        status = ddl__fail(server->why, DDL_ERR_SYSTEM, "ddl_init: epoll_create1: %s", strerror(errno));
    }
    for (int i = 0; status == DDL_OK && i < server->listener_count; i++) {
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = (uint32_t)i};
        (void)epoll_ctl(server->epoll, EPOLL_CTL_ADD, server->listeners[i], &event);
    }
    if (status < 0) {
        ddl__server_close(server);
    }
    return status;
}

/* Takes the table from all and gives it to all. Listens on what the caller has bound; closes it. table holds rank 0's
 * blob already. Blocks. Errors: DDL_ERR_TIMEOUT, DDL_ERR_PEER, DDL_ERR_NOMEM, DDL_ERR_SYSTEM. */
static ddl_status ddl__server_serve(ddl__server *server, uint64_t deadline_ns) {
    DDL__TRY(ddl__server_open(server));
    server->end_ns = deadline_ns;
    server->ranks[0] = DDL__RANK_SERVED;
    server->here = server->served = 1;
    ddl_status status = ddl__server_loop(server);
    ddl__server_close(server);
    return status;
}

#endif /* DDL_STORE_SERVER_H */

/* The host of the libfabric plugin and the libfabric below it, both made up: one rank of a world of four, whose peers are the
 * input. What the plugin gave to libfabric ends when the script says so; what it gave back, and in what state, is checked. */
#ifndef FUZZ_FABRIC_H
#define FUZZ_FABRIC_H

#include "fuzz.h"

#include <fcntl.h>
#include <sanitizer/asan_interface.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "plugins/fabric/library.h"

#define epoll_create1(flags) 4000 /* no such descriptors: nothing depends on them */
#define epoll_ctl(epoll, op, fd, event) 0
#define timerfd_create(clock, flags) 4001
#define timerfd_settime(fd, flags, at, old) ((void)(at))
#define getrandom(out, bytes, flags) (memset(out, 0x3c, bytes), (ssize_t)(bytes))
#define nanosleep(...) ((void)0)
#define socket(domain, type, protocol) (-1)
#define setrlimit(which, limit) 0
#include "plugins/fabric/fabric.c"

enum { WORLD = 4, MESSAGE = 512, PENDING = 512, EVENTS = 32, ENDPOINTS = 64, LETTERS = 16, RAILS = 2 };

/* An operation that the provider has taken, until its completion is read. error: -1: it is under way. */
typedef struct fuzz_operation {
    struct fid_ep *ep;
    fabric_slot *slot;
    void *bytes;
    size_t length;
    void *desc;
    int error;
    int is_ghost; /* of an address that was removed: there will be no completion, and an adapter may still write */
} fuzz_operation;

typedef struct fuzz_endpoint {
    struct fid_ep ep; /* first */
    int is_called;    /* by connect or accept: it may open */
} fuzz_endpoint;

typedef struct fuzz_event {
    uint32_t event;
    int error; /* 0: none */
    struct fid *fid;
    struct fi_info *info;
    size_t bytes;
    int is_of_member; /* a call with all that makes it one */
    uint8_t data[40];
} fuzz_event;

/* A rank as the core and the script see it. */
typedef struct fuzz_rank {
    int is_lost, is_dead;
    uint32_t sequence, credit; /* ordered messages that it has sent; messages with credit that have come from it */
    uint8_t *landing;
    uint64_t landing_bytes;
} fuzz_rank;

typedef struct fuzz {
    ddl_host host; /* first */
    fuzz_input in;
    fabric_self *s;
    fuzz_rank ranks[WORLD];
    ddl_message *letters[LETTERS];
    fuzz_operation operations[PENDING];
    fuzz_event events[EVENTS];
    fuzz_endpoint *endpoints[ENDPOINTS];
    int operation_count, event_count, endpoint_count;
    int connects, efa, unordered, drops, own_keys, automatic;
    int live, objects, fail_in; /* blocks of memory; what libfabric has made */
    int may_accept;             /* the call that was read last is a member's */
    int refuses;                /* bits: it takes no send, receive, read, registration, endpoint, connection now */
    int error;                  /* of what it refuses */
    uint64_t clock_ns, keys;
} fuzz;

enum { REFUSES_SEND = 1, REFUSES_RECV = 2, REFUSES_READ = 4, REFUSES_MR = 8, REFUSES_EP = 16, REFUSES_CM = 32 };

static fuzz *world; /* of calls of libfabric, which know no better */

/* >>host */

FUZZ_QUIET static fuzz *fuzz_of(const ddl_host *host) { return (fuzz *)(uintptr_t)host; }

FUZZ_QUIET static void *fuzz_alloc(const ddl_host *host, size_t bytes) {
    fuzz *f = fuzz_of(host);
    REQUIRE(bytes <= FABRIC_PART);
    if (f->fail_in > 0 && --f->fail_in == 0) {
        return NULL;
    }
    f->live++;
    return malloc(bytes);
}

FUZZ_QUIET static void fuzz_free(const ddl_host *host, void *memory) {
    fuzz_of(host)->live -= memory != NULL;
    free(memory);
}

FUZZ_QUIET static void fuzz_log(const ddl_host *host, ddl_log_level level, const char *line) {
    (void)host, (void)level;
    fuzz_clean(line, 512);
}

FUZZ_QUIET static const char *fuzz_setting(const ddl_host *host, const char *name) {
    const char *unordered = fuzz_of(host)->unordered ? "1" : NULL;
    return strcmp(name, "FABRIC_OFFER_BYTES") == 0 ? "1K" : strcmp(name, "FABRIC_FORCE_NO_WAIT") == 0 ? "1" :
           strcmp(name, "FABRIC_FORCE_UNORDERED") == 0 ? unordered : NULL;
}

/* Whoever waits in a loop sees the time pass. */
FUZZ_QUIET static uint64_t fuzz_now(const ddl_host *host) { return fuzz_of(host)->clock_ns += 2000000; }

FUZZ_QUIET static ddl_status fuzz_derive(const ddl_host *host, const void *data, size_t bytes, uint8_t out[32]) {
    const uint8_t *at = data;
    (void)host;
    for (size_t i = 0; i < 32; i++) {
        out[i] = (uint8_t)(at[i % bytes] * 5 + at[(i + 8) % bytes] + 17 * i);
    }
    return DDL_OK;
}

/* What the core makes of a header here: its first two bytes are the payload's, the third says whether it is wanted. */
enum { HEADER_UNWANTED = 5, HEADER_NO_MEMORY = 6, HEADER_DAMAGED = 7 };

FUZZ_QUIET static uint64_t fuzz_header_bytes(const uint8_t *header) { return header[0] + 256u * (header[1] & 31); }

FUZZ_QUIET static ddl_status fuzz_header_status(const uint8_t *header) {
    int is = header[2] & 7;
    return is == HEADER_DAMAGED ? DDL_ERR_CORRUPT : is == HEADER_NO_MEMORY ? DDL_ERR_NOMEM : DDL_OK;
}

FUZZ_QUIET static fuzz_rank *fuzz_talks(const ddl_host *host, int32_t peer) {
    fuzz *f = fuzz_of(host);
    REQUIRE(peer >= 0 && peer < WORLD && peer != f->s->rank);
    fuzz_rank *r = &f->ranks[peer];
    REQUIRE(!r->is_lost && !r->is_dead && r->landing == NULL);
    return r;
}

FUZZ_QUIET static ddl_status fuzz_deliver(const ddl_host *host, int32_t peer, const uint8_t *header, const void *payload,
                                          uint64_t bytes) {
    (void)fuzz_talks(host, peer);
    REQUIRE(bytes <= MESSAGE && __asan_region_is_poisoned((void *)(uintptr_t)header, DDL_MESSAGE_HEADER_BYTES) == NULL);
    REQUIRE(bytes == 0 || __asan_region_is_poisoned((void *)(uintptr_t)payload, bytes) == NULL);
    return bytes == fuzz_header_bytes(header) ? fuzz_header_status(header) : DDL_ERR_CORRUPT;
}

/* The landing has not a byte more than the payload, so that ASan sees who writes further, or later. */
FUZZ_QUIET static ddl_status fuzz_land(const ddl_host *host, int32_t peer, const uint8_t *header, uint64_t *out_bytes,
                                       void **out_to, void **out_token) {
    fuzz_rank *r = fuzz_talks(host, peer);
    REQUIRE(__asan_region_is_poisoned((void *)(uintptr_t)header, DDL_MESSAGE_HEADER_BYTES) == NULL);
    if (fuzz_header_status(header) != DDL_OK) {
        return fuzz_header_status(header);
    }
    *out_bytes = r->landing_bytes = fuzz_header_bytes(header);
    r->landing = malloc(r->landing_bytes);
    *out_to = (header[2] & 7) == HEADER_UNWANTED ? NULL : r->landing;
    *out_token = r;
    return DDL_OK;
}

FUZZ_QUIET static void fuzz_landed(const ddl_host *host, int32_t peer, void *token, ddl_status status) {
    fuzz_rank *r = &fuzz_of(host)->ranks[peer];
    REQUIRE(token == r && r->landing != NULL && (status == DDL_OK || status == DDL_ERR_PEER || status == DDL_ERR_CANCELLED));
    REQUIRE(status != DDL_OK || !r->is_lost);
    free(r->landing);
    r->landing = NULL;
}

FUZZ_QUIET static void fuzz_letter_free(ddl_message **letter) {
    free((void *)(uintptr_t)(*letter)->payload);
    free(*letter);
    *letter = NULL;
}

FUZZ_QUIET static void fuzz_sent(const ddl_host *host, ddl_message *message, ddl_status status) {
    fuzz *f = fuzz_of(host);
    int i = 0;
    (void)status;
    while (i < LETTERS && f->letters[i] != message) {
        i++;
    }
    REQUIRE(i < LETTERS);
    fuzz_letter_free(&f->letters[i]);
}

FUZZ_QUIET static void fuzz_lost(const ddl_host *host, int32_t peer, int32_t error, const char *what) {
    fuzz_rank *r = &fuzz_of(host)->ranks[peer];
    REQUIRE(!r->is_lost && !r->is_dead && error >= 0);
    fuzz_clean(what, 200);
    r->is_lost = 1;
}

/* >>libfabric: operations */

FUZZ_QUIET static ssize_t fuzz_begin(struct fid_ep *ep, const void *bytes, size_t length, void *desc, void *context, int refuses) {
    fuzz *f = world;
    if ((f->refuses & refuses) != 0 || f->operation_count == PENDING) {
        return f->operation_count == PENDING ? -FI_EAGAIN : f->error;
    }
    f->operations[f->operation_count++] = (fuzz_operation){ep, context, (void *)(uintptr_t)bytes, length, desc, -1, 0};
    return 0;
}

/* What leaves us: by whose hand, to whom, and within the credit that we have. */
FUZZ_QUIET static void fuzz_leaves(fuzz *f, struct fid_ep *ep, const uint8_t *bytes, size_t length, fi_addr_t at) {
    fabric_head head;
    int32_t peer = f->connects ? ((fabric_strand *)ep->fid.context)->way->link->peer : (int32_t)at;
    REQUIRE(length >= sizeof head && length <= MESSAGE && __asan_region_is_poisoned((void *)(uintptr_t)bytes, length) == NULL);
    memcpy(&head, bytes, sizeof head);
    const fabric_link *l = f->s->peers[peer].link;
    REQUIRE(head.token == f->s->peers[peer].token_out && head.source == f->s->rank);
    REQUIRE(head.kind >= FABRIC_WHOLE && head.kind <= FABRIC_BYE);
    REQUIRE(head.kind >= FABRIC_ACK || (int32_t)(l->limit - l->spent) > 0);
    REQUIRE((int32_t)(f->ranks[peer].credit + FABRIC_WINDOW - head.granted) >= 0);
    REQUIRE((int32_t)(head.sequence - l->sequence) <= 0 || head.kind >= FABRIC_OFFER);
}

FUZZ_QUIET static ssize_t fuzz_send(struct fid_ep *ep, const void *bytes, size_t length, void *desc, fi_addr_t at, void *context) {
    const fabric_slot *slot = context;
    if (slot->role == FABRIC_SEND && (world->refuses & REFUSES_SEND) == 0) {
        fuzz_leaves(world, ep, bytes, length, at);
    }
    REQUIRE(__asan_region_is_poisoned((void *)(uintptr_t)bytes, length) == NULL);
    return fuzz_begin(ep, bytes, length, desc, context, REFUSES_SEND);
}

FUZZ_QUIET static ssize_t fuzz_inject(struct fid_ep *ep, const void *bytes, size_t length, fi_addr_t at) {
    if ((world->refuses & REFUSES_SEND) != 0) {
        return world->error;
    }
    fuzz_leaves(world, ep, bytes, length, at);
    return 0;
}

FUZZ_QUIET static ssize_t fuzz_recv(struct fid_ep *ep, void *bytes, size_t length, void *desc, fi_addr_t at, void *context) {
    (void)at;
    ssize_t result = fuzz_begin(ep, bytes, length, desc, context, REFUSES_RECV);
    if (result == 0 && ((fabric_slot *)context)->role == FABRIC_RECV) {
        __asan_unpoison_memory_region(bytes, length); /* fuzz_arrive poisons what does not come */
    }
    return result;
}

FUZZ_QUIET static ssize_t fuzz_read(struct fid_ep *ep, void *bytes, size_t length, void *desc, fi_addr_t at, uint64_t address,
                                    uint64_t key, void *context) {
    (void)address, (void)key;
    REQUIRE(at < WORLD && length <= MESSAGE);
    return fuzz_begin(ep, bytes, length, desc, context, REFUSES_READ);
}

FUZZ_QUIET static void fuzz_operation_drop(fuzz *f, int i) {
    memmove(&f->operations[i], &f->operations[i + 1], (size_t)(--f->operation_count - i) * sizeof f->operations[0]);
}

/* One ends, well or not: what is received or read is written, what is sent must be there still. */
FUZZ_QUIET static void fuzz_operation_end(fuzz *f, int i, int error) {
    fuzz_operation *o = &f->operations[i];
    if (o->error >= 0 || (o->slot->role == FABRIC_RECV && error == 0)) {
        return; /* fuzz_arrive does that */
    }
    if (error == 0 && o->slot->role == FABRIC_READ) {
        memset(o->bytes, 0x5a, o->length);
    } else if (error == 0) {
        REQUIRE(__asan_region_is_poisoned(o->bytes, o->length) == NULL);
    }
    o->error = error;
    if (o->is_ghost) {
        fuzz_operation_drop(f, i);
    }
}

FUZZ_QUIET static int fuzz_next(const fuzz *f, int from, int ended) {
    int i = from;
    while (i < f->operation_count && (f->operations[i].error >= 0) != ended) {
        i++;
    }
    return i;
}

/* What has ended, until one has failed. */
FUZZ_QUIET static ssize_t fuzz_cq_read(struct fid_cq *cq, void *out, size_t count) {
    fuzz *f = world;
    struct fi_cq_msg_entry *entries = out;
    size_t got = 0;
    int on_rail = cq == f->s->rails[0].cq; /* all completions come by the first */
    for (int i = 0; i < f->operation_count && f->automatic && on_rail; i++) {
        if (f->operations[i].slot->role != FABRIC_RECV && f->operations[i].error < 0) {
            fuzz_operation_end(f, i, 0);
            break;
        }
    }
    for (int i; on_rail && got < count && (i = fuzz_next(f, 0, 1)) < f->operation_count;) {
        if (f->operations[i].error > 0) {
            return got > 0 ? (ssize_t)got : -FI_EAVAIL;
        }
        entries[got++] = (struct fi_cq_msg_entry){.op_context = f->operations[i].slot, .len = f->operations[i].length};
        fuzz_operation_drop(f, i);
    }
    return got > 0 ? (ssize_t)got : -FI_EAGAIN;
}

FUZZ_QUIET static ssize_t fuzz_cq_readerr(struct fid_cq *cq, struct fi_cq_err_entry *out, uint64_t flags) {
    int i = fuzz_next(world, 0, 1);
    (void)cq, (void)flags;
    REQUIRE(i < world->operation_count);
    out->op_context = world->operations[i].slot;
    out->err = world->operations[i].error;
    fuzz_operation_drop(world, i);
    return 1;
}

FUZZ_QUIET static const char *fuzz_cq_strerror(struct fid_cq *cq, int error, const void *data, char *out, size_t bytes) {
    (void)cq, (void)error, (void)data, (void)out, (void)bytes;
    return "it was made up";
}

/* What is under way by an endpoint, or to an address, ends with it. */
FUZZ_QUIET static void fuzz_operations_cancel(fuzz *f, const struct fid_ep *ep, int32_t peer, int drop) {
    for (int i = f->operation_count - 1; i >= 0; i--) {
        fuzz_operation *o = &f->operations[i];
        int its = ep != NULL ? o->ep == ep : o->slot->role != FABRIC_RECV && o->slot->peer == peer;
        if (its && o->error < 0 && !o->is_ghost) {
            o->error = drop ? -1 : FI_ECANCELED;
            o->is_ghost = drop;
            if (ep != NULL && drop) {
                fuzz_operation_drop(f, i);
            }
        }
    }
}

/* >>libfabric: objects */

FUZZ_QUIET static int fuzz_close_static(struct fid *fid) {
    (void)fid;
    world->objects--;
    return 0;
}

FUZZ_QUIET static int fuzz_close_endpoint(struct fid *fid) {
    fuzz *f = world;
    fuzz_endpoint *e = (fuzz_endpoint *)(void *)fid;
    fuzz_operations_cancel(f, &e->ep, 0, f->drops || !f->connects);
    for (int i = f->event_count - 1; i >= 0; i--) {
        if (f->events[i].fid == fid) {
            memmove(&f->events[i], &f->events[i + 1], (size_t)(--f->event_count - i) * sizeof f->events[0]);
        }
    }
    for (int i = 0; i < ENDPOINTS; i++) {
        f->endpoints[i] = f->endpoints[i] == e ? NULL : f->endpoints[i];
    }
    f->objects--;
    free(e);
    return 0;
}

/* A read by a registration that is closed fails; the adapter writes no more, also where nobody hears of it. */
FUZZ_QUIET static int fuzz_close_mr(struct fid *fid) {
    fuzz *f = world;
    for (int i = f->operation_count - 1; i >= 0; i--) {
        if (f->operations[i].desc == fid && f->operations[i].slot->role == FABRIC_READ && f->operations[i].error < 0) {
            fuzz_operation_end(f, i, FI_EIO);
        }
    }
    f->objects--;
    free(fid);
    return 0;
}

FUZZ_QUIET static int fuzz_bind(struct fid *fid, struct fid *to, uint64_t flags) {
    (void)fid, (void)to, (void)flags;
    return 0;
}

FUZZ_QUIET static int fuzz_control(struct fid *fid, int command, void *arg) {
    (void)fid;
    if (command == FI_GETWAIT) {
        *(int *)arg = 4002;
    }
    return 0;
}

static struct fi_ops static_ops = {.close = fuzz_close_static, .bind = fuzz_bind, .control = fuzz_control};
static struct fi_ops endpoint_ops = {.close = fuzz_close_endpoint, .bind = fuzz_bind, .control = fuzz_control};
static struct fi_ops mr_ops = {.close = fuzz_close_mr, .bind = fuzz_bind, .control = fuzz_control};
static struct fi_ops_msg msg_ops = {.recv = fuzz_recv, .send = fuzz_send, .inject = fuzz_inject};
static struct fi_ops_rma rma_ops = {.read = fuzz_read};

/* The name of either kind of endpoint. */
FUZZ_QUIET static int fuzz_getname(struct fid *fid, void *out, size_t *bytes) {
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_port = 1, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    (void)fid;
    REQUIRE(*bytes >= sizeof name);
    *bytes = sizeof name;
    memcpy(out, &name, sizeof name);
    return 0;
}

FUZZ_QUIET static int fuzz_connect(struct fid_ep *ep, const void *at, const void *param, size_t bytes) {
    fabric_hello hello;
    (void)at;
    REQUIRE(bytes == sizeof hello);
    memcpy(&hello, param, sizeof hello);
    REQUIRE(hello.source == world->s->rank && hello.kind < FABRIC_IN && hello.zero == 0);
    ((fuzz_endpoint *)(void *)ep)->is_called = (world->refuses & REFUSES_CM) == 0;
    return (world->refuses & REFUSES_CM) != 0 ? (int)world->error : 0;
}

FUZZ_QUIET static int fuzz_accept(struct fid_ep *ep, const void *param, size_t bytes) {
    (void)param, (void)bytes;
    REQUIRE(world->may_accept);
    ((fuzz_endpoint *)(void *)ep)->is_called = (world->refuses & REFUSES_CM) == 0;
    return (world->refuses & REFUSES_CM) != 0 ? (int)world->error : 0;
}

FUZZ_QUIET static int fuzz_shutdown(struct fid_ep *ep, uint64_t flags) {
    (void)ep, (void)flags;
    return 0;
}

FUZZ_QUIET static int fuzz_listen(struct fid_pep *pep) {
    (void)pep;
    return 0;
}

FUZZ_QUIET static int fuzz_reject(struct fid_pep *pep, fid_t handle, const void *param, size_t bytes) {
    (void)pep, (void)param, (void)bytes;
    REQUIRE(handle == (fid_t)&world->keys);
    return 0;
}

static struct fi_ops_cm cm_ops = {.getname = fuzz_getname, .connect = fuzz_connect, .accept = fuzz_accept,
                                  .shutdown = fuzz_shutdown, .listen = fuzz_listen, .reject = fuzz_reject};

FUZZ_QUIET static int fuzz_endpoint_open(struct fid_domain *domain, struct fi_info *info, struct fid_ep **out, void *context) {
    fuzz *f = world;
    int i = 0;
    (void)domain, (void)info;
    while (i < ENDPOINTS && f->endpoints[i] != NULL) {
        i++;
    }
    if ((f->refuses & REFUSES_EP) != 0 || i == ENDPOINTS) {
        return -FI_EMFILE;
    }
    fuzz_endpoint *e = f->endpoints[i] = calloc(1, sizeof *e);
    e->ep = (struct fid_ep){.fid = {FI_CLASS_EP, context, &endpoint_ops}, .cm = &cm_ops, .msg = &msg_ops, .rma = &rma_ops};
    f->objects++;
    *out = &e->ep;
    return 0;
}

FUZZ_QUIET static int fuzz_srx_open(struct fid_domain *domain, struct fi_rx_attr *attr, struct fid_ep **out, void *context) {
    (void)attr;
    return fuzz_endpoint_open(domain, NULL, out, context);
}

FUZZ_QUIET static int fuzz_mr_open(struct fid *fid, const void *bytes, size_t length, uint64_t access, uint64_t offset, uint64_t key,
                                   uint64_t flags, struct fid_mr **out, void *context) {
    (void)fid, (void)access, (void)offset, (void)key, (void)flags;
    if ((world->refuses & REFUSES_MR) != 0) {
        return -FI_ENOMEM;
    }
    REQUIRE(__asan_region_is_poisoned((void *)(uintptr_t)bytes, length) == NULL);
    struct fid_mr *mr = *out = calloc(1, sizeof *mr);
    *mr = (struct fid_mr){.fid = {FI_CLASS_MR, context, &mr_ops}, .mem_desc = mr, .key = ++world->keys};
    world->objects++;
    return 0;
}

FUZZ_QUIET static int fuzz_av_insert(struct fid_av *av, const void *at, size_t count, fi_addr_t *out, uint64_t flags, void *context) {
    (void)av, (void)at, (void)flags, (void)context;
    for (int32_t i = 0; i < WORLD; i++) {
        for (int32_t r = 0; r < RAILS; r++) {
            *out = out == &world->s->peers[i].at[r] ? (fi_addr_t)i : *out;
        }
    }
    return (world->refuses & REFUSES_CM) != 0 ? 0 : (int)count;
}

FUZZ_QUIET static int fuzz_av_remove(struct fid_av *av, fi_addr_t *at, size_t count, uint64_t flags) {
    (void)count, (void)flags;
    REQUIRE(*at < WORLD);
    if (av == world->s->rails[0].av && (world->efa || !world->drops)) {
        fuzz_operations_cancel(world, NULL, (int32_t)*at, world->efa);
    }
    return 0;
}

FUZZ_QUIET static ssize_t fuzz_eq_read(struct fid_eq *eq, uint32_t *event, void *out, size_t bytes, uint64_t flags) {
    fuzz *f = world;
    (void)flags;
    if (f->event_count == 0 || eq != f->s->rails[0].eq || !f->connects) {
        return -FI_EAGAIN;
    }
    if (f->events[0].error != 0) {
        return -FI_EAVAIL;
    }
    fuzz_event first = f->events[0];
    memmove(&f->events[0], &f->events[1], (size_t)--f->event_count * sizeof first);
    struct fi_eq_cm_entry *entry = out;
    REQUIRE(bytes >= sizeof *entry + sizeof first.data);
    *event = first.event;
    f->may_accept = first.is_of_member;
    entry->fid = first.fid;
    entry->info = first.info;
    memcpy(entry->data, first.data, first.bytes);
    return (ssize_t)(sizeof *entry + first.bytes);
}

FUZZ_QUIET static ssize_t fuzz_eq_readerr(struct fid_eq *eq, struct fi_eq_err_entry *out, uint64_t flags) {
    fuzz *f = world;
    (void)eq, (void)flags;
    out->fid = f->events[0].fid;
    out->err = f->events[0].error;
    memmove(&f->events[0], &f->events[1], (size_t)--f->event_count * sizeof f->events[0]);
    return sizeof *out;
}

FUZZ_QUIET static int fuzz_trywait(struct fid_fabric *fabric, struct fid **fids, int count) {
    (void)fabric, (void)fids, (void)count;
    return 0;
}

static struct fi_ops_cq cq_ops = {.read = fuzz_cq_read, .readerr = fuzz_cq_readerr, .strerror = fuzz_cq_strerror};
static struct fi_ops_eq eq_ops = {.read = fuzz_eq_read, .readerr = fuzz_eq_readerr};
static struct fi_ops_av av_ops = {.insert = fuzz_av_insert, .remove = fuzz_av_remove};
static struct fi_ops_mr reg_ops = {.reg = fuzz_mr_open};
static struct fid_cq cqs[RAILS];
static struct fid_eq eqs[RAILS];
static struct fid_av avs[RAILS];
static struct fid_pep peps[RAILS];
static struct fid_domain domains[RAILS];
static struct fid_fabric fabrics[RAILS];
static int opened; /* the rail whose objects are asked for */

FUZZ_QUIET static int fuzz_cq_open(struct fid_domain *domain, struct fi_cq_attr *attr, struct fid_cq **out, void *context) {
    (void)domain, (void)attr, (void)context;
    cqs[opened] = (struct fid_cq){.fid = {FI_CLASS_CQ, NULL, &static_ops}, .ops = &cq_ops};
    *out = &cqs[opened];
    world->objects++;
    return 0;
}

FUZZ_QUIET static int fuzz_eq_open(struct fid_fabric *fabric, struct fi_eq_attr *attr, struct fid_eq **out, void *context) {
    (void)fabric, (void)attr, (void)context;
    eqs[opened] = (struct fid_eq){.fid = {FI_CLASS_EQ, NULL, &static_ops}, .ops = &eq_ops};
    *out = &eqs[opened];
    world->objects++;
    return 0;
}

FUZZ_QUIET static int fuzz_av_open(struct fid_domain *domain, struct fi_av_attr *attr, struct fid_av **out, void *context) {
    (void)domain, (void)attr, (void)context;
    avs[opened] = (struct fid_av){.fid = {FI_CLASS_AV, NULL, &static_ops}, .ops = &av_ops};
    *out = &avs[opened];
    world->objects++;
    return 0;
}

FUZZ_QUIET static int fuzz_pep_open(struct fid_fabric *fabric, struct fi_info *info, struct fid_pep **out, void *context) {
    (void)fabric, (void)info, (void)context;
    peps[opened] = (struct fid_pep){.fid = {FI_CLASS_PEP, NULL, &static_ops}, .cm = &cm_ops};
    *out = &peps[opened];
    world->objects++;
    return 0;
}

static struct fi_ops_domain domain_ops = {.av_open = fuzz_av_open, .cq_open = fuzz_cq_open, .endpoint = fuzz_endpoint_open,
                                          .srx_ctx = fuzz_srx_open};

FUZZ_QUIET static int fuzz_domain_open(struct fid_fabric *fabric, struct fi_info *info, struct fid_domain **out, void *context) {
    (void)fabric, (void)info, (void)context;
    domains[opened] = (struct fid_domain){.fid = {FI_CLASS_DOMAIN, NULL, &static_ops}, .ops = &domain_ops, .mr = &reg_ops};
    *out = &domains[opened];
    world->objects++;
    return 0;
}

static struct fi_ops_fabric fabric_ops = {.domain = fuzz_domain_open, .passive_ep = fuzz_pep_open, .eq_open = fuzz_eq_open,
                                          .trywait = fuzz_trywait};

FUZZ_QUIET static int fuzz_fabric_open(struct fi_fabric_attr *attr, struct fid_fabric **out, void *context) {
    (void)attr, (void)context;
    fabrics[opened] = (struct fid_fabric){.fid = {FI_CLASS_FABRIC, NULL, &static_ops}, .ops = &fabric_ops};
    *out = &fabrics[opened];
    world->objects++;
    return 0;
}

/* >>an endpoint */

static struct fi_info infos[RAILS];

FUZZ_QUIET static void fuzz_freeinfo(struct fi_info *info) {
    if (info != &infos[0] && info != &infos[1]) {
        world->objects--;
        free(info);
    }
}

FUZZ_QUIET static uint32_t fuzz_version(void) { return FI_VERSION(1, 17); }
FUZZ_QUIET static const char *fuzz_strerror(int error) { return error == FI_EIO ? "EIO" : "another"; }

FUZZ_QUIET static void fuzz_info_make(fuzz *f) {
    static struct fi_fabric_attr fabric;
    static struct fi_domain_attr domain;
    static struct fi_ep_attr ep;
    static struct fi_tx_attr tx;
    static struct fi_rx_attr rx;
    int modes = f->own_keys ? FI_MR_LOCAL : FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY;
    fabric = (struct fi_fabric_attr){.prov_name = f->connects ? "tcp" : f->efa ? "efa" : "verbs;ofi_rxm"};
    domain = (struct fi_domain_attr){.name = "made-up", .mr_mode = f->connects ? 0 : modes};
    ep = (struct fi_ep_attr){.type = f->connects ? FI_EP_MSG : FI_EP_RDM, .protocol = 7, .max_msg_size = MESSAGE};
    tx = (struct fi_tx_attr){.size = 64, .inject_size = 128, .msg_order = FI_ORDER_SAS};
    rx = (struct fi_rx_attr){.size = 128, .msg_order = FI_ORDER_SAS};
    for (int i = 0; i < RAILS; i++) {
        infos[i] = (struct fi_info){.caps = FI_MSG | FI_RMA, .addr_format = FI_SOCKADDR_IN, .src_addrlen = sizeof(struct sockaddr_in),
                                    .fabric_attr = &fabric, .domain_attr = &domain, .ep_attr = &ep, .tx_attr = &tx, .rx_attr = &rx};
    }
}

/* As fabric_open, behind the choice of a provider. */
FUZZ_QUIET static ddl_status fuzz_open(fuzz *f, int32_t rank, int32_t rails) {
    fabric_self *s = f->s = calloc(1, sizeof *s);
    ddl_status status = DDL_OK;
    f->live++;
    s->host = &f->host;
    s->rank = rank;
    s->world_size = s->local_ranks = WORLD;
    s->authenticated = s->asked = 1;
    s->force_seed = 1;
    s->epoll = s->timer = -1;
    s->lib.freeinfo = fuzz_freeinfo;
    s->lib.fabric = fuzz_fabric_open;
    s->lib.version = fuzz_version;
    s->lib.strerror = fuzz_strerror;
    s->connects = f->connects;
    fuzz_info_make(f);
    for (; s->rail_count < rails; s->rail_count++) {
        s->rails[s->rail_count].info = &infos[s->rail_count];
        s->rails[s->rail_count].wait_fd = -1;
    }
    REQUIRE(fabric_settings_read(s));
    fabric_attributes(s);
    fabric_descriptors_raise(s);
    for (opened = 0; opened < rails && status == DDL_OK; opened++) {
        fabric_rail *r = &s->rails[opened];
        status = f->connects ? fabric_listen(s, r) : fabric_rail_open(s, r, WORLD);
    }
    opened = 0;
    if (f->connects && status == DDL_OK) {
        status = fi_srx_context(s->rails[0].domain, infos[0].rx_attr, &s->shared, NULL) == 0 ? DDL_OK : DDL_ERR_SYSTEM;
    }
    status = status == DDL_OK ? fabric_address_make(s) : status;
    status = status == DDL_OK ? fabric_allocate(s, "here") : status;
    return status == DDL_OK ? fabric_wait_open(s) : status;
}

#endif

/* state: what an endpoint is made of, and what travels between two of them. */
#ifndef FABRIC_STATE_H
#define FABRIC_STATE_H

#include "library.h"

#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/timerfd.h>

enum {
    FABRIC_RAILS_MAX = 4,
    FABRIC_HOLD = 64,         /* ordered messages that may be here before their turn; no window is larger */
    FABRIC_WINDOW = 16,       /* messages that a peer may have under way to us */
    FABRIC_RESERVE = 2,       /* of them, so many are kept for REFUSE and REPAIR, which unblock the others */
    FABRIC_FIRST_WINDOW = 4,  /* before we have heard of a peer */
    FABRIC_ACK_SLOTS = 4,     /* receives per peer for ACKs, which need no credit */
    FABRIC_BASE_SLOTS = 32,   /* receives for first messages */
    FABRIC_SEND_SLOTS = 64,
    FABRIC_RECEIVES = 2048, /* at most, over sockets */
    FABRIC_READ_SLOTS = 16,
    FABRIC_OFFER_BYTES = 32768, /* payloads above are read by the receiver: beyond, copies cost more than a round trip */
    FABRIC_ADDRESS_BYTES = 128,
    FABRIC_POLL_RANKS = 8, /* fabric_sleeps_on_sockets */
    FABRIC_SOCKETS = 64,
    FABRIC_HUSH_TRIES = 8,
    FABRIC_BATCH = 16,         /* completions read at once; fewer: there are no more, and to ask again costs a system call */
    FABRIC_CUT_POLLS = 16, /* to take what has come before a connection is closed */
    FABRIC_REGIONS = 512, /* that are kept registered, and their bytes */
    FABRIC_EVENT_POLLS = 64, /* of the completion queue, between looks at the queue of events */
    FABRIC_TURN = 64 /* completions before the core gets its turn again */
};
#define FABRIC_REGION_BYTES ((uint64_t)4 << 30)
#define FABRIC_CUT_NS 200000000u    /* for a read that is under way to end, when its memory is wanted back */
#define FABRIC_WITHDRAW_NS 50000000u /* from a WITHDRAW to other use of the memory; */
#define FABRIC_AWAKE_NS 2000000u     /* for a peer to answer it that is awake */
#define FABRIC_ROW_NS 20000000u      /* between two recalls in a row, at most */
#define FABRIC_SLOW_NS 20000000u     /* a read that took longer may have seen that, and is checked */
#define FABRIC_CONNECT_NS 1000000000u /* for a connection to read by; then the peer is asked to send */
#define FABRIC_RAIL_NS 3000000000u    /* the same for a read by an adapter, which connects when the peer looks; */
#define FABRIC_NO_READS_NS 1000000000u /* then nothing is read from it for so long, then twice as long, */
#define FABRIC_NO_READS_MOST_NS 32000000000u
#define FABRIC_UNHEARD_NS 20000000000u /* for a first message to go, before we say what may be wrong */
#define FABRIC_SUSPECT_NS 5000000000u /* for the provider to begin what it wants to be asked for again */
#define FABRIC_STUCK_NS 1000000 /* until what the provider does not take is tried again */
#define FABRIC_STALL_NS 50000000u /* between two looks, at most, of who waits */
#define FABRIC_LINGER_NS 1000000000u /* for the last words to be heard, when an endpoint closes */

/* Kinds of messages. WHOLE, FIRST, PIECE and OFFER are ordered; all but ACK and BYE need a credit. */
enum {
    FABRIC_WHOLE = 1, /* a message of the core's with all of its payload */
    FABRIC_FIRST,     /* the same, with the first part of its payload; PIECEs follow */
    FABRIC_PIECE,  /* of nothing: no more comes, nor by a REPAIR of nothing (fabric_is_data) */
    FABRIC_OFFER,  /* a message whose payload is to be read: fabric_offer_body */
    FABRIC_REFUSE, /* the payload of an offer cannot be read: send it */
    FABRIC_REPAIR, /* a part of what was refused, at its place */
    FABRIC_WITHDRAW, /* the payload of an offer is wanted back, and those of so many behind it as it has bytes: read them no more, and use
                      * nothing of them that was slow */
    FABRIC_CHECK,    /* a payload that was slow to read has come: was the offer withdrawn meanwhile? */
    FABRIC_VALID,    /* it was not */
    FABRIC_ACK,    /* head alone; its number is 0, or FABRIC_HEARD */
    FABRIC_BYE     /* nothing follows the ordered messages before its number: head alone, no credit */
};
enum { FABRIC_HEARD = 1 };   /* your BYE is here, and all before it: you may close */
enum { FABRIC_AT_ONCE = 1 }; /* in place of the bytes of a BYE: nothing more comes, also of what is half-way */

/* Before everything that is sent. Hosts of a job have one byte order. */
typedef struct fabric_head {
    uint64_t token; /* only members of the job can make it: see fabric_token */
    int32_t source;
    uint8_t kind, pad[3];
    uint32_t sequence; /* of ordered kinds; of those about an offer, its number */
    uint32_t granted;  /* so many messages with credit may be sent to me in all */
    uint32_t pulled;   /* so many of your offers have ended */
    uint32_t bytes;    /* of payload in this message */
} fabric_head;

typedef struct fabric_offer_body {
    uint64_t bytes, address, key[FABRIC_RAILS_MAX];
} fabric_offer_body;

/* What peers are told, byte for byte; at most FABRIC_ADDRESS_BYTES. */
typedef struct fabric_address {
    uint8_t version, rails, name_bytes, has_rma;
    char provider[19];
    uint8_t inner; /* names that lead nowhere from another host */
    uint32_t protocol, slot_bytes, part_bytes; /* part_bytes: see fabric_part; 0: payloads are read */
    uint8_t nonce[16];
    uint8_t names[FABRIC_ADDRESS_BYTES - 52];
} fabric_address;

/* Since when, and for how long, something has been tried in vain: fabric_stall_look. All 0: it is not. */
typedef struct fabric_stall {
    uint64_t since_ns, looked_ns, waited_ns;
} fabric_stall;

/* One operation of libfabric: a receive, a send with its buffer, or a read. The context is what its completion names. */
typedef struct fabric_slot {
    struct fi_context2 context; /* first */
    int32_t role, rail, peer;
    uint32_t length; /* of what arrived */
    uint32_t number; /* of a part of a payload that is sent: its offer; that is received: its connection */
    struct fabric_slot *next;
    uint8_t *bytes;
    void *desc;
    struct fabric_get *get; /* of a read: for which; NULL: for a landing */
} fabric_slot;

enum { FABRIC_RECV = 1, FABRIC_SEND, FABRIC_READ, FABRIC_STREAM };
enum { FABRIC_HOST = -1 }; /* instead of a device */

/* Slots come in blocks, registered as a whole. */
typedef struct fabric_block {
    struct fabric_block *next;
    struct fid_mr *mr;
    uint8_t *memory;
    size_t memory_bytes;
    fabric_slot *slots;
} fabric_block;

typedef struct fabric_rail {
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_av *av;
    struct fid_cq *cq;
    struct fid_ep *ep;
    struct fid_eq *eq; /* NULL: not needed */
    struct fid_pep *listener; /* where endpoints have connections; the descriptor of its events: */
    int eq_fd;
    uint32_t polls;
    int enabled; /* the queue may be read */
    int wait_fd; /* -1: the provider gives none */
    int watched; /* it is in our set */
} fabric_rail;

/* Registered memory, on each rail: see cache.h. */
typedef struct fabric_region {
    struct fabric_region *next; /* of those that are kept, the last used first; or of free records */
    uint8_t *at;
    uint64_t bytes, access, id; /* id: of the allocation, when it is kept */
    int32_t device, users;
    int kept;
    struct fid_mr *mr[FABRIC_RAILS_MAX];
} fabric_region;

typedef struct fabric_cache {
    fabric_region *first;
    uint64_t count, bytes, most, most_bytes; /* most: bounds */
    uint64_t on_devices, looked_ns;
    uint64_t made, found, evicted, stale;
} fabric_cache;

/* One connection, and a way to a peer, which is made of some: see connect.h. */
typedef struct fabric_strand {
    struct fid_ep *ep; /* NULL: there is none */
    struct fabric_way *way;
    int32_t rail, state;
} fabric_strand;

typedef struct fabric_way {
    fabric_strand strand[FABRIC_RAILS_MAX];
    struct fabric_link *link;
    int32_t kind, failures;
    int ended;         /* the errno of its end, while what came by it is read; */
    uint64_t ended_ns; /* since then */
    uint32_t number;   /* it is the so manieth */
    uint64_t called_ns, since_ns, retry_ns; /* the last call, or when a kernel was seen to have answered it; since then all fail; none before */
} fabric_way;

enum { FABRIC_WORDS, FABRIC_OUT, FABRIC_IN, FABRIC_WAYS };
enum { FABRIC_SHUT, FABRIC_CALLING, FABRIC_ANSWERING, FABRIC_OPEN };

/* A payload of ours that a peer may read, until it has. */
typedef struct fabric_offer {
    struct fabric_offer *next;
    ddl_message *message; /* NULL: recalled after it was pulled */
    uint32_t number;
    int refused, valid_due;
    int withdrawn; /* 1: to be told, 2: the word is under way, 3: it is with the peer, since told_ns: see fabric_put */
    uint64_t told_ns;
    uint64_t repaired; /* bytes that went by REPAIR */
    uint64_t streamed; /* bytes that were given to OUT of that number; */
    uint32_t way;
    int32_t streaming; /* parts of it that are under way */
    int held;          /* its memory is wanted back */
    fabric_region *region;
} fabric_offer;

/* What is coming in from a peer, one message at a time, as the core wants it. */
typedef struct fabric_landing {
    int active, offered, failed, refused;
    int checking; /* 1: to be asked, 2: asked */
    uint64_t since_ns;
    fabric_stall stall; /* no read of it can be started */
    void *token;
    uint8_t *to; /* NULL: unwanted */
    uint64_t bytes, done, asked; /* asked: reads have been started up to here */
    int32_t reading;             /* reads that are under way */
    fabric_offer_body offer;
    fabric_region *region; /* when the provider wants that */
} fabric_landing;

/* A peer that something was sent to or has come from. */
typedef struct fabric_link {
    struct fabric_link *next; /* all links */
    int32_t peer;
    int in_backlog, again, ack_due, broken; /* again: to be served once more; broken: the errno that progress is to tell, -1: none is known */
    ddl_message *first, **last;      /* waiting to be sent */
    uint32_t sequence, spent, limit; /* ordered messages sent; credits used; credits given by the peer */
    uint32_t offer_count, ended;     /* offers made; offers that the peer says have ended */
    fabric_offer *offers, **offers_last;
    uint32_t arrived, turn; /* ordered messages that came; that were dealt with */
    uint32_t taken, window, told_limit, pulled, told_pulled;
    uint64_t withdrawn;  /* by number of the offer, modulo 64 */
    uint32_t refusing; /* REFUSEs that wait to be sent: 0 or 1 */
    int bye, told_bye;     /* the peer said it, and its number; we did */
    int bye_at_once;
    int heard_out;         /* the peer has heard all of ours, or wants nothing more */
    int reached;           /* something has gone to it */
    uint32_t refused;      /* rails by which the provider did not take what was last to go to it, or to be read from it */
    uint64_t no_reads_ns, no_reads_for_ns; /* until then nothing is read from it, as that could not be started; for so long */
    uint32_t bye_at;
    uint64_t bye_ns;       /* since then we try to say that it was heard; 0: not yet */
    int32_t sends, reads; /* operations of libfabric that are under way */
    fabric_stall send_stall; /* no send is begun */
    fabric_way way[FABRIC_WAYS];
    uint32_t in_lost; /* the last IN that has ended */
    fabric_slot *held[FABRIC_HOLD];
    fabric_landing landing;
} fabric_link;

/* What the core wants read into memory of a device, from a peer's. */
typedef struct fabric_get {
    struct fabric_get *next;
    struct fabric_memory *memory;
    int32_t peer, reading; /* reads that are under way */
    int failed;
    uint8_t *to;
    fabric_stall stall; /* no read of it can be started */
    uint64_t from, key[FABRIC_RAILS_MAX], bytes, asked; /* asked: reads have been started up to here */
    void *cookie;
} fabric_get;

typedef struct fabric_peer {
    int known, gone, same_host, heard; /* heard: token_in is known */
    uint64_t token_in, token_out;
    fi_addr_t at[FABRIC_RAILS_MAX];
    uint8_t names[sizeof((fabric_address *)0)->names]; /* to call */
    fabric_link *link;
} fabric_peer;

typedef struct fabric_self {
    const ddl_host *host;
    int32_t rank, world_size, local_ranks, authenticated, asked, advertised;
    fabric_library lib;
    fabric_address address;
    char *host_id;
    fabric_rail rails[FABRIC_RAILS_MAX];
    int32_t rail_count;
    int unread; /* sockets without connect.h: a read ends when its peer helps, or never, so that nothing is read */
    int connects; /* connect.h */
    int paces;    /* loopback.h */
    struct fid_ep *shared; /* receives of all WORDS */
    int calling, ends, look; /* look: for events, at once */
    int hushed, hush_tries; /* fabric_queue_hush */
    int by_sockets; /* we sleep on these, which our set has: */
    struct pollfd sockets[FABRIC_SOCKETS];
    size_t socket_count;
    uint64_t sockets_change;
    uint8_t *scratch; /* for payloads that nobody wants */
    uint64_t mr_mode, key_next, max_read, inject_bytes, slot_bytes, offer_bytes, speed;
    int ordered, failed;
    int stuck; /* the provider takes nothing now: to be tried again in a while */
    int again; /* a link waits to be served, at once */
    int faster;                 /* than the sockets of the core, as far as can be known before measuring */
    int told_stranger, told_unequal, told_inner, told_registration, told_slots, told_locked, told_device, told_inject, told_unheard, told_reads, told_calls;
    const char *device;        /* a device plugin that is loaded; or NULL */
    const char *hmem_refused;  /* why the provider does not reach memory of that; NULL: it does */
    struct fabric_get *gets;
    int epoll, timer;
    int ticking; /* the timer runs */
    int armed;   /* somebody may sleep on our descriptor */
    int force_unordered, force_no_rma, force_no_wait, force_events, force_drops;
    int force_mr; /* FI_MR_... */
    uint32_t force_seed;
    uint64_t fail_registration; /* for tests: of every so many registrations one fails */
    uint64_t registrations;
    uint64_t recall_ns, recalled_ns; /* of recalls in a row: when the first began and the last ended */
    fabric_peer *peers;
    fabric_link *links;
    fabric_block *blocks;
    fabric_slot *send_free, *read_free, *unposted, *arrived, **arrived_last;
    fabric_slot *late; /* for tests: what has come, and is heard of later */
    fabric_offer *offer_free;
    fabric_region *region_free;
    fabric_cache cache;
    char described[160];
    int32_t receives, receive_limit;
    int32_t *backlog;
    int32_t backlog_count;
} fabric_self;

__attribute__((format(printf, 3, 4))) static void fabric_log(fabric_self *s, ddl_log_level level, const char *format,
                                                              ...) {
    char line[512];
    int used = snprintf(line, sizeof line, "fabric: ");
    va_list args;
    va_start(args, format);
    vsnprintf(line + used, sizeof line - (size_t)used, format, args);
    va_end(args);
    s->host->log(s->host, level, line);
}

static const char *fabric_error(const fabric_self *s, long error) {
    return s->lib.strerror((int)(error < 0 ? -error : error));
}

/* What libfabric cancels belongs to a connection that has ended. To the core ECANCELED says that we ended it (fabric_part_with). */
static int fabric_reset(int error) { return error == FI_ECANCELED ? ECONNRESET : error; }

static void *fabric_zalloc(fabric_self *s, size_t bytes) {
    void *memory = s->host->alloc(s->host, bytes);
    if (memory != NULL) {
        memset(memory, 0, bytes);
    }
    return memory;
}

/* One more try in vain. Returns for how long it has been in vain while we looked: who computes meanwhile, and does not call us, has
 * waited for nobody. */
static uint64_t fabric_stall_look(fabric_self *s, fabric_stall *stall) {
    uint64_t now = s->host->now_ns(s->host), since = stall->looked_ns != 0 ? now - stall->looked_ns : 0;
    stall->since_ns = stall->looked_ns != 0 ? stall->since_ns : now;
    stall->waited_ns += since < FABRIC_STALL_NS ? since : FABRIC_STALL_NS;
    stall->looked_ns = now;
    return stall->waited_ns;
}

static void fabric_stall_end(fabric_stall *stall) { *stall = (fabric_stall){0, 0, 0}; }

/* To be served by the next progress, whenever that is. */
static void fabric_backlog_keep(fabric_self *s, fabric_link *l) {
    if (!l->in_backlog) {
        l->in_backlog = 1;
        s->backlog[s->backlog_count++] = l->peer;
    }
}

/* To be served at once. */
static void fabric_backlog_add(fabric_self *s, fabric_link *l) {
    l->again = s->again = 1;
    fabric_backlog_keep(s, l);
}

/* A timer makes the descriptor readable where the provider has none, or takes nothing and will not say when it does
 * again (while it connects), or may have taken a part of what another thread sends. It runs only then, so that an idle rank sleeps. */
static void fabric_timer(fabric_self *s, long period_ns) {
    struct itimerspec at = {{0, 0}, {0, period_ns}};
    uint64_t ticks;
    ssize_t n = s->ticking ? read(s->timer, &ticks, sizeof ticks) : 0;
    (void)n;
    if (s->ticking || period_ns > 0) {
        timerfd_settime(s->timer, 0, &at, NULL);
    }
    s->ticking = period_ns > 0;
}

#endif /* FABRIC_STATE_H */

/* fake_transport: a transport for ranks that are threads of one process: letters in boxes. It is made to be poor and to
 * misbehave as DDL_TEST_FAKE says, for tests/test_transport_abi.c; a table of each kind that the ABI allows.
 *     cc -shared -fPIC -I.. -o libddl-fake.so fake_transport.c -lpthread
 *
 * old       a table that ends with its last required member
 * sleeper   no arm, but wait
 * borrow    send borrows; payloads land in slices; no recall, no redirect
 * frozen    the same, and after the first slice of a large payload nothing lands for 1.5 s
 * even      ranks with odd numbers are not reached
 * shut, mute, broken, torn, gone   open fails; address fails; and at rank 1, when the test has called fake_trouble():
 *           progress fails; a header is damaged; a link is lost */
#define _GNU_SOURCE
#include "ddl.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { RANKS = 16, SLICE = 64 * 1024 };

typedef struct letter {
    struct letter *next;
    int from;
    ddl_message *message;  /* borrowed, or NULL */
    const uint8_t *data;   /* the payload: borrowed, or copy */
    uint8_t *copy;
    uint64_t bytes, landed;
    uint8_t *landing;
    void *token;
    uint8_t header[DDL_MESSAGE_HEADER_BYTES];
} letter;

typedef struct fake {
    const ddl_host *host;
    const char *mode;
    int rank, bell, trouble, closed_to[RANKS], left[RANKS]; /* left: to be told */
    uint64_t frozen_until_ns;
    letter *in, *back; /* in: to be delivered. back: borrowed messages whose letters were read */
    const letter *reading; /* the core has it in hand */
} fake;

static fake *at[RANKS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int is(const fake *f, const char *mode) { return strcmp(f->mode, mode) == 0; }
static int borrows(const fake *f) { return is(f, "borrow") || is(f, "frozen"); }

DDL_PLUGIN_EXPORT void fake_trouble(void);
void fake_trouble(void) {
    pthread_mutex_lock(&lock);
    if (at[1] != NULL) {
        __atomic_store_n(&at[1]->trouble, 1, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&lock);
}

static int trouble(const fake *f) { return __atomic_load_n(&f->trouble, __ATOMIC_RELAXED); }

static void append(letter **list, letter *l) {
    while (*list != NULL) {
        list = &(*list)->next;
    }
    l->next = NULL;
    *list = l;
}

static void ring(const fake *f) {
    uint64_t one = 1;
    (void)!write(f->bell, &one, sizeof one);
}

static int told_local_rank; /* read by the test */
DDL_PLUGIN_EXPORT int fake_told_local_rank(void);
int fake_told_local_rank(void) { return __atomic_load_n(&told_local_rank, __ATOMIC_RELAXED); }

static ddl_status fake_open(const ddl_host *host, const ddl_transport_params *params, void **out_self) {
    const char *mode = host->setting(host, "TEST_FAKE");
    fake *f = host->alloc(host, sizeof *f);
    memset(f, 0, sizeof *f);
    f->host = host;
    f->mode = mode != NULL ? mode : "old";
    f->rank = params->rank;
    __atomic_store_n(&told_local_rank, params->local_rank, __ATOMIC_RELAXED);
    if (is(f, "shut") || params->world_size > RANKS) {
        host->log(host, DDL_LOG_WARN, "the fake is shut");
        host->free(host, f);
        return DDL_ERR_UNSUPPORTED;
    }
    f->bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    pthread_mutex_lock(&lock);
    at[f->rank] = f;
    pthread_mutex_unlock(&lock);
    *out_self = f;
    return DDL_OK;
}

/* What was borrowed becomes a copy, as a socket's buffer would hold it. Returns the message. */
static ddl_message *keep_copy(letter *l) {
    ddl_message *m = l->message;
    if (m != NULL) {
        l->copy = malloc(l->bytes);
        l->data = memcpy(l->copy, l->data, l->bytes);
        l->message = NULL;
    }
    return m;
}

/* The next message that this rank lent and that has not come back, or NULL. */
static ddl_message *take_back(fake *f) {
    ddl_message *found = NULL;
    pthread_mutex_lock(&lock);
    for (int r = 0; r < RANKS && found == NULL; r++) {
        for (letter *l = at[r] != NULL ? at[r]->in : NULL; l != NULL && found == NULL; l = l->next) {
            found = l->from == f->rank ? keep_copy(l) : NULL;
        }
    }
    if (found == NULL && f->back != NULL) {
        letter *l = f->back;
        f->back = l->next;
        found = l->message;
        free(l);
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static void letter_free(letter *l) {
    free(l->copy);
    free(l);
}

/* With the lock held. */
static void give_back(letter *l) {
    fake *sender = at[l->from];
    if (l->message != NULL && sender != NULL) {
        append(&sender->back, l);
        ring(sender);
    } else {
        letter_free(l);
    }
}

static void fake_close(void *self) {
    fake *f = self;
    for (ddl_message *m; (m = take_back(f)) != NULL;) {
        f->host->sent(f->host, m, DDL_ERR_CANCELLED);
    }
    pthread_mutex_lock(&lock);
    at[f->rank] = NULL;
    for (int r = 0; r < RANKS; r++) {
        if (at[r] != NULL) {
            at[r]->left[f->rank] = 1;
            ring(at[r]);
        }
    }
    pthread_mutex_unlock(&lock);
    for (letter *l; (l = f->in) != NULL;) {
        f->in = l->next;
        if (l->landing != NULL) {
            f->host->landed(f->host, l->from, l->token, DDL_ERR_CANCELLED);
        }
        pthread_mutex_lock(&lock);
        give_back(l);
        pthread_mutex_unlock(&lock);
    }
    close(f->bell);
    f->host->free(f->host, f);
}

static ddl_status fake_address(void *self, void *out, size_t *bytes) {
    *(uint8_t *)out = (uint8_t)((fake *)self)->rank;
    *bytes = 1;
    return is(self, "mute") ? DDL_ERR_SYSTEM : DDL_OK;
}

static ddl_status fake_add_peer(void *self, int32_t peer, const void *address, size_t bytes, const char *host_id,
                                uint64_t *out_latency_ns, uint64_t *out_bytes_per_s) {
    (void)host_id;
    *out_latency_ns = 1;
    *out_bytes_per_s = 1000000000000;
    if (bytes != 1 || *(const uint8_t *)address != peer) {
        return DDL_ERR_CORRUPT;
    }
    return is(self, "even") && (peer % 2 != 0 || ((fake *)self)->rank % 2 != 0) ? DDL_ERR_UNSUPPORTED : DDL_OK;
}

static ddl_status fake_send(void *self, int32_t peer, ddl_message *m) {
    fake *f = self;
    int borrow = borrows(f) && m->payload_bytes > 0;
    letter *l = calloc(1, sizeof *l);
    l->from = f->rank;
    l->bytes = m->payload_bytes;
    l->message = borrow ? m : NULL;
    l->data = m->payload;
    memcpy(l->header, m->header, sizeof l->header);
    if (is(f, "torn") && trouble(f)) {
        l->header[20] ^= 1;
    }
    if (!borrow && l->bytes > 0) {
        l->copy = malloc(l->bytes);
        l->data = memcpy(l->copy, m->payload, l->bytes);
    }
    pthread_mutex_lock(&lock);
    int there = at[peer] != NULL && !f->closed_to[peer];
    if (there) {
        append(&at[peer]->in, l);
        ring(at[peer]);
    }
    pthread_mutex_unlock(&lock);
    if (!there) {
        letter_free(l);
        return DDL_ERR_PEER;
    }
    return borrow ? DDL_IN_PROGRESS : DDL_OK;
}

/* Lets a slice land. Returns 1 when the letter is read. */
static int land(fake *f, letter *l) {
    const ddl_host *host = f->host;
    if (l->landing == NULL && host->land(host, l->from, l->header, &l->bytes, (void **)&l->landing, &l->token) != DDL_OK) {
        return 1;
    }
    uint64_t now = host->now_ns(host), slice = l->bytes - l->landed < SLICE ? l->bytes - l->landed : SLICE;
    if (is(f, "frozen") && l->landed > 0 && l->bytes > 8 * SLICE && f->frozen_until_ns == 0) {
        f->frozen_until_ns = now + 1500000000;
    }
    if (f->frozen_until_ns > now) {
        return 0;
    }
    pthread_mutex_lock(&lock); /* the sender may be about to close, and take its memory with it */
    memcpy(l->landing + l->landed, l->data + l->landed, slice);
    l->landed += slice;
    pthread_mutex_unlock(&lock);
    if (l->landed < l->bytes) {
        return 0;
    }
    host->landed(host, l->from, l->token, DDL_OK);
    return 1;
}

static int read_letter(fake *f, letter *l) {
    const ddl_host *host = f->host;
    if (borrows(f) && l->bytes > 0) {
        return land(f, l);
    }
    int from = l->from;
    ddl_status status = host->deliver(host, from, l->header, l->data, l->bytes);
    if (status == DDL_ERR_CORRUPT) {
        f->closed_to[from] = 1;
        host->lost(host, from, EBADMSG, "the fake saw a damaged header");
    }
    return 1;
}

/* When all that they sent has been read. */
static int32_t tell_who_left(fake *f) {
    int32_t events = 0;
    for (int r = 0; r < RANKS; r++) {
        pthread_mutex_lock(&lock);
        int left = f->left[r] && f->in == NULL;
        f->left[r] = left ? 0 : f->left[r];
        pthread_mutex_unlock(&lock);
        if (left && !f->closed_to[r]) {
            f->closed_to[r] = 1;
            f->host->lost(f->host, r, 0, "the fake was closed");
            events++;
        }
    }
    return events;
}

static int32_t fake_progress(void *self, int32_t expect) {
    fake *f = self;
    (void)expect;
    if (is(f, "broken") && trouble(f)) {
        return DDL_ERR_SYSTEM;
    }
    if (is(f, "gone") && trouble(f) && !f->closed_to[0]) {
        f->closed_to[0] = 1;
        f->host->lost(f->host, 0, ECONNRESET, "the fake lost its link");
    }
    pthread_mutex_lock(&lock);
    letter *l = f->in, *back = f->back;
    f->back = NULL;
    f->reading = l;
    pthread_mutex_unlock(&lock);
    int32_t events = 0;
    for (letter *next; back != NULL; back = next, events++) {
        next = back->next;
        ddl_message *message = back->message;
        letter_free(back);
        f->host->sent(f->host, message, DDL_OK);
    }
    uint64_t before = l != NULL ? l->landed : 0;
    int done = l != NULL && read_letter(f, l);
    if (done) {
        pthread_mutex_lock(&lock);
        f->in = l->next;
        f->reading = NULL;
        give_back(l);
        pthread_mutex_unlock(&lock);
        return events + 1;
    }
    return events + (l != NULL ? l->landed != before : tell_who_left(f));
}

static ddl_status fake_arm(void *self, int *out_fd) {
    fake *f = self;
    uint64_t count;
    (void)!read(f->bell, &count, sizeof count);
    pthread_mutex_lock(&lock);
    int busy = f->back != NULL || (f->in != NULL && f->frozen_until_ns == 0);
    for (int r = 0; r < RANKS && f->in == NULL; r++) {
        busy |= f->left[r];
    }
    pthread_mutex_unlock(&lock);
    *out_fd = f->bell;
    return busy ? DDL_IN_PROGRESS : DDL_OK;
}

static int slept; /* read by the test: this way of sleeping was used */
DDL_PLUGIN_EXPORT int fake_slept(void);
int fake_slept(void) { return __atomic_load_n(&slept, __ATOMIC_RELAXED); }

static ddl_status fake_wait(void *self, int64_t timeout_ns, const int *fds, int32_t fd_count) {
    struct pollfd polled[8];
    int bell;
    polled[0] = (struct pollfd){.events = POLLIN};
    for (int32_t i = 0; i < fd_count; i++) {
        polled[i + 1] = (struct pollfd){.fd = fds[i], .events = POLLIN};
    }
    if (fake_arm(self, &bell) == DDL_OK) {
        polled[0].fd = bell;
        __atomic_add_fetch(&slept, 1, __ATOMIC_RELAXED);
        (void)poll(polled, (nfds_t)fd_count + 1, (int)(timeout_ns / 1000000));
    }
    return DDL_OK;
}

/* Takes the letters from a rank out of a box, but for the one that is being read. */
static letter *take(fake *box, int from) {
    letter *taken = NULL;
    for (letter **l = box != NULL ? &box->in : NULL; l != NULL && *l != NULL;) {
        letter *found = *l;
        if (found->from != from || found->landing != NULL || found == box->reading) {
            l = &found->next;
            continue;
        }
        *l = found->next;
        append(&taken, found);
    }
    return taken;
}

/* What is borrowed for the dead comes back; what has begun to land ends by itself, from a copy. */
static void fake_peer_dead(void *self, int32_t peer) {
    fake *f = self;
    ddl_message *begun = NULL;
    f->closed_to[peer] = 1;
    pthread_mutex_lock(&lock);
    letter *mine = take(at[peer], f->rank), *theirs = take(f, peer);
    for (letter *l = at[peer] != NULL ? at[peer]->in : NULL; l != NULL; l = l->next) {
        begun = l->from == f->rank && l->message != NULL ? l->message : begun; /* one at most: they land in turn */
        if (l->from == f->rank) {
            keep_copy(l);
        }
    }
    for (letter *l; (l = theirs) != NULL;) {
        theirs = l->next;
        give_back(l);
    }
    pthread_mutex_unlock(&lock);
    if (begun != NULL) {
        f->host->sent(f->host, begun, DDL_ERR_PEER);
    }
    for (letter *l; (l = mine) != NULL; letter_free(l)) {
        mine = l->next;
        if (l->message != NULL) {
            f->host->sent(f->host, l->message, DDL_ERR_PEER);
        }
    }
}

#define REQUIRED                                                                                                       \
    .flags = DDL_TRANSPORT_ORDERED | DDL_TRANSPORT_ON_REQUEST, .max_payload_bytes = DDL_MESSAGE_PAYLOAD_BYTES,         \
    .open = fake_open, .close = fake_close, .address = fake_address, .add_peer = fake_add_peer, .send = fake_send,     \
    .progress = fake_progress, .peer_dead = fake_peer_dead

static const ddl_transport old = {.size = offsetof(ddl_transport, wait), REQUIRED, .arm = fake_arm};
static const ddl_transport sleeper = {.size = offsetof(ddl_transport, clock_ns), REQUIRED, .wait = fake_wait};

#define FAKE(table) {.size = sizeof(ddl_plugin), .abi = DDL_PLUGIN_ABI, .name = "fake", .version = "1",                        \
                     .about = "letters in boxes", .transport = (table)}
static const ddl_plugin plugin_old = FAKE(&old), plugin_sleeper = FAKE(&sleeper);

DDL_PLUGIN_EXPORT const ddl_plugin *ddl_plugin_fake_v1(const ddl_host *host);
const ddl_plugin *ddl_plugin_fake_v1(const ddl_host *host) {
    const char *mode = host->setting(host, "TEST_FAKE");
    return mode != NULL && strcmp(mode, "sleeper") == 0 ? &plugin_sleeper : &plugin_old;
}

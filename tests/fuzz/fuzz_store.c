/* libFuzzer target: the rendezvous, on bytes of strangers, of honest ranks with bent messages, and of files in a shared
 * folder. No sockets and no files: the calls of the system are these below, and what they give is the input.
 *     byte 0      which side: rank 0's server, a client, rank 0 or a follower at a folder
 *     then ops    see server_op, client_recv and file_content
 * What must hold: who lacks the secret gets no further than the challenge; the table goes out when all blobs are there;
 * a file without the right seal is as if it were not there.
 * campaign: machine max_len=4096 */
#include "fuzz.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static uint64_t fuzz_clock_ns;
static uint8_t fuzz_nonce; /* the next "random" byte */
static ssize_t fuzz_recv(int fd, void *out, size_t cap);
static ssize_t fuzz_send(int fd, const void *data, size_t bytes);
static void fuzz_closed(int fd);
static int fuzz_openat(const char *name, int flags, ...);
static int fuzz_stat(int fd, struct stat *out);

FUZZ_QUIET static int fuzz_clock(struct timespec *out) {
    out->tv_sec = (time_t)(fuzz_clock_ns / 1000000000u);
    out->tv_nsec = (long)(fuzz_clock_ns % 1000000000u);
    return 0;
}

FUZZ_QUIET static ssize_t fuzz_random(void *out, size_t bytes) {
    memset(out, ++fuzz_nonce, bytes);
    return (ssize_t)bytes;
}

/* The input says by EAGAIN that it needs time, so time is all that passes. */
FUZZ_QUIET static int fuzz_poll(int ms) {
    fuzz_clock_ns += (uint64_t)(ms > 0 ? ms : 1) * 1000000u;
    return fuzz_clock_ns / 7 % 2 == 0;
}

#define clock_gettime(id, out) fuzz_clock(out)
#define getrandom(out, bytes, flags) fuzz_random(out, bytes)
#define poll(fds, count, ms) fuzz_poll(ms)
#define send(fd, data, bytes, flags) fuzz_send(fd, data, bytes)
#define recv(fd, out, cap, flags) fuzz_recv(fd, out, cap)
#define read(fd, out, cap) fuzz_recv(fd, out, cap)
#define write(fd, data, bytes) ((ssize_t)(bytes))
#define close(fd) (fuzz_closed(fd), 0)
#define shutdown(fd, how) 0
#define epoll_ctl(epoll, op, fd, event) 0
#define setsockopt(fd, level, option, value, bytes) 0
#define gethostname(out, cap) (memcpy(out, "fuzz", 5), 0)
#define getpid() 4711
#define openat(folder, name, ...) fuzz_openat(name, __VA_ARGS__)
#define open(path, ...) 4001
#define mkdirat(folder, name, mode) 0
#define renameat(from, name, to, other) 0
#define unlinkat(folder, name, flags) 0
#define fstat(fd, out) fuzz_stat(fd, out)
#pragma clang diagnostic ignored "-Wunused-value"
#include "src/store.h"

enum { RANKS = 4, BLOB = 24, LINKS = 6, FIRST_FD = 100, CLIENT_FD = 200, FILE_FD = 300, WRITE_FD = 399 };

static const uint8_t secret[32] = {7}, other_secret[32] = {8};
static fuzz_input in;
static ddl__settings settings;
static ddl__base base;
static ddl__sentence why;
static uint8_t table[RANKS * BLOB];
static const uint8_t blob[BLOB] = "the blob of one rank 1";

FUZZ_QUIET static void fuzz_log(void *user, ddl_log_level level, const char *line) {
    (void)user;
    (void)level;
    REQUIRE(strlen(line) < DDL__SENTENCE_BYTES + 64);
}

FUZZ_QUIET static void fuzz_begin(int32_t rank) {
    memset(&settings, 0, sizeof settings);
    settings.launch = (ddl__launch){"fuzz", rank, RANKS, -1, -1};
    settings.secret = secret;
    settings.secret_bytes = sizeof secret;
    settings.job_id = 42;
    settings.init_timeout_ms = 1000;
    settings.place.from = "the fuzzer";
    base = (ddl__base){.log = fuzz_log, .log_level = DDL_LOG_DEBUG, .rank = rank};
    memset(&why, 0, sizeof why);
    memset(table, 0, sizeof table);
    fuzz_clock_ns = 1000 * DDL__NS_PER_S;
    fuzz_nonce = 0;
}

/* Bytes on their way, as the other side wrote them. */
typedef struct queue {
    uint8_t bytes[1200];
    size_t at, end;
} queue;

FUZZ_QUIET static void queue_add(queue *q, const void *bytes, size_t n) {
    n = DDL__MIN(n, sizeof q->bytes - q->end);
    memcpy(q->bytes + q->end, bytes, n);
    q->end += n;
}

FUZZ_QUIET static size_t queue_take(queue *q, uint8_t *out, size_t n) {
    n = DDL__MIN(n, q->end - q->at);
    memcpy(out, q->bytes + q->at, n);
    q->at += n;
    return n;
}

/* Runs one side's honest handshake with what it has heard. */
FUZZ_QUIET static ddl_status peer_step(ddl__auth *a, const void *heard, size_t bytes, queue *say) {
    uint8_t out[DDL__AUTH_MAX_OUT];
    size_t used, wrote;
    ddl_status status = ddl__auth_step(a, heard, bytes, &used, out, sizeof out, &wrote);
    queue_add(say, out, wrote);
    return status;
}

/* >>server */

typedef struct visit {
    bool open, knows, ends;
    int error; /* of recv, when nothing is given */
    ddl__auth auth;
    queue say;
    size_t heard, room;
    const uint8_t *given; /* to recv, once */
    size_t given_bytes;
} visit;

static visit links[LINKS];
static ddl__server server;
static ddl__guest guests[LINKS + 1];
static uint8_t states[RANKS];

FUZZ_QUIET static void server_heard(visit *l, const void *data, size_t bytes) {
    l->heard += bytes;
    REQUIRE(l->knows || l->heard <= 80);
    if (l->auth.role != 0 && l->auth.status == DDL_IN_PROGRESS) {
        (void)peer_step(&l->auth, data, bytes, &l->say);
    }
}

FUZZ_QUIET static void server_new(uint8_t b) {
    visit *l = links;
    while (l < links + LINKS && l->open) {
        l++;
    }
    if (l == links + LINKS || server.failing) {
        return;
    }
    uint32_t world = RANKS + (b >> 4 & 1), rank = b >> 1 & 7;
    ddl__auth_params p = {.secret = (b & 1) != 0 ? secret : other_secret,
                          .secret_bytes = 32,
                          .job = 42 + (b >> 5 & 1),
                          .purpose = DDL__AUTH_STORE,
                          .rank = rank == 7 ? DDL__RANK_ANY : rank % world,
                          .world = world};
    uint8_t nonce[32] = {9};
    ddl__address from = {.bytes = sizeof(struct sockaddr_in)};
    from.at.v4.sin_family = AF_INET;
    memset(l, 0, sizeof *l);
    l->open = true;
    l->knows = (b & 1) != 0;
    l->room = SIZE_MAX;
    if (ddl__auth_client(&l->auth, &p, nonce) == DDL_OK) {
        (void)peer_step(&l->auth, NULL, 0, &l->say);
    }
    ddl__guest_begin(&server, FIRST_FD + (int)(l - links), &from);
}

FUZZ_QUIET static ddl__guest *server_guest(const visit *l) {
    for (size_t i = 0; i < DDL__COUNT_OF(guests); i++) {
        if (guests[i].stage != DDL__GUEST_NONE && guests[i].fd == FIRST_FD + (int)(l - links)) {
            return &guests[i];
        }
    }
    return NULL;
}

FUZZ_QUIET static void server_event(visit *l, const uint8_t *bytes, size_t n, uint32_t events) {
    ddl__guest *g = l->open ? server_guest(l) : NULL;
    l->given = bytes;
    l->given_bytes = n;
    if (g != NULL) {
        ddl__guest_event(&server, g, events);
    }
}

/* What an honest rank says after its proof; more or less. */
FUZZ_QUIET static void server_say(visit *l, uint8_t b) {
    static const uint8_t kinds[] = {DDL__RECORD_BLOB, DDL__RECORD_TAKEN, DDL__RECORD_GIVE_UP, DDL__RECORD_FAILED};
    uint8_t head[DDL__RECORD_BYTES];
    uint8_t kind = kinds[b & 3];
    ddl__record_write(head, kind, DDL_OK, kind == DDL__RECORD_BLOB ? BLOB + (b >> 2 & 1) : 0);
    queue_add(&l->say, head, sizeof head);
    if (kind == DDL__RECORD_BLOB) {
        queue_add(&l->say, blob, BLOB);
    }
}

FUZZ_QUIET static void server_time(uint8_t b) {
    fuzz_clock_ns += (uint64_t)b * 50 * DDL__NS_PER_MS;
    ddl__server_sweep(&server, fuzz_clock_ns);
    if (fuzz_clock_ns >= server.end_ns && !server.failing) {
        (void)ddl__server_overdue(&server);
    }
}

/* A byte: which operation and which connection; mostly one more for a number. */
FUZZ_QUIET static void server_op(void) {
    uint8_t b = fuzz_u8(&in), bytes[300];
    visit *l = &links[(b >> 3) % LINKS];
    size_t n;
    const uint8_t *raw;
    switch (b & 7) {
    case 0:
        server_new(fuzz_u8(&in));
        break;
    case 1:
        n = queue_take(&l->say, bytes, fuzz_u8(&in));
        server_event(l, bytes, n, EPOLLIN);
        break;
    case 2:
        n = fuzz_u8(&in);
        raw = fuzz_take(&in, &n);
        server_event(l, raw, n, EPOLLIN);
        break;
    case 3:
        n = queue_take(&l->say, bytes, fuzz_u8(&in));
        bytes[0] ^= fuzz_u8(&in);
        server_event(l, bytes, n, EPOLLIN);
        break;
    case 4:
        server_say(l, fuzz_u8(&in));
        break;
    case 5:
        l->ends = true;
        l->error = (fuzz_u8(&in) & 1) != 0 ? ECONNRESET : 0;
        server_event(l, NULL, 0, EPOLLIN | EPOLLHUP);
        break;
    case 6:
        n = fuzz_u8(&in);
        l->room = n == 255 ? SIZE_MAX : n;
        server_event(l, NULL, 0, EPOLLOUT);
        break;
    default:
        server_time(fuzz_u8(&in));
        break;
    }
}

FUZZ_QUIET static void server_sound(void) {
    int32_t strangers = 0, here = 0;
    for (size_t i = 0; i < DDL__COUNT_OF(guests); i++) {
        const ddl__guest *g = &guests[i];
        strangers += g->stage == DDL__GUEST_PROOF;
        REQUIRE(g->out_at <= g->out_end && g->out_end <= sizeof g->out && g->tail_at <= g->tail_bytes);
        if (g->stage == DDL__GUEST_HEAD || g->stage == DDL__GUEST_BLOB) {
            REQUIRE(g->rank > 0 && g->rank < RANKS && states[g->rank] != DDL__RANK_AWAY);
            REQUIRE(links[g->fd - FIRST_FD].knows && g->blob_bytes <= BLOB);
        }
    }
    for (int32_t r = 0; r < RANKS; r++) {
        here += states[r] >= DDL__RANK_HERE;
    }
    REQUIRE(server.strangers_now == strangers);
    REQUIRE(server.failing || server.here == here);
    REQUIRE(!server.delivering || here == RANKS);
}

FUZZ_QUIET static void fuzz_server(void) {
    fuzz_begin(0);
    memset(links, 0, sizeof links);
    memset(guests, 0, sizeof guests);
    memset(states, 0, sizeof states);
    memset(&server, 0, sizeof server);
    server = (ddl__server){.settings = &settings, .base = &base, .blob_bytes = BLOB, .table = table, .why = &why};
    server.guests = guests;
    server.guest_count = DDL__COUNT_OF(guests);
    server.ranks = states;
    server.start_ns = fuzz_clock_ns;
    server.end_ns = fuzz_clock_ns + 10 * DDL__NS_PER_S;
    states[0] = DDL__RANK_SERVED;
    server.here = server.served = 1;
    for (int i = 0; i < 120 && fuzz_left(&in) > 0 && !ddl__server_done(&server); i++) {
        server_op();
        server_sound();
    }
    for (size_t i = 0; i < DDL__COUNT_OF(guests); i++) {
        ddl__guest_close(&server, &guests[i]);
    }
    REQUIRE(strnlen(why.text, sizeof why.text) < sizeof why.text);
}

/* >>client */

static struct {
    ddl__auth auth;
    queue say;
    bool knows, answered, broken;
    uint8_t answer;
} rank0;

/* What rank 0 says once it has seen the proof. */
FUZZ_QUIET static void rank0_answer(void) {
    uint8_t head[DDL__RECORD_BYTES], blobs[RANKS * BLOB] = {1};
    static const char sentence[] = "ddl_init: rank 2 of 4 has not come\n\x1b[31m";
    rank0.answered = true;
    if (rank0.auth.code != DDL__AUTH_OK || (rank0.answer & 1) != 0) {
        ddl__record_write(head, DDL__RECORD_FAILED, DDL_ERR_TIMEOUT, sizeof sentence - 1);
        queue_add(&rank0.say, head, sizeof head);
        queue_add(&rank0.say, sentence, sizeof sentence - 1);
    } else {
        ddl__record_write(head, DDL__RECORD_TABLE, DDL_OK, sizeof blobs - (rank0.answer >> 1 & 1));
        queue_add(&rank0.say, head, sizeof head);
        queue_add(&rank0.say, blobs, sizeof blobs);
    }
}

FUZZ_QUIET static ssize_t client_send(const void *data, size_t bytes) {
    if (rank0.broken) {
        errno = EPIPE;
        return -1;
    }
    if (rank0.auth.status == DDL_IN_PROGRESS) {
        (void)peer_step(&rank0.auth, data, bytes, &rank0.say);
    }
    if (rank0.auth.status != DDL_IN_PROGRESS && !rank0.answered) {
        rank0_answer();
    }
    return (ssize_t)bytes;
}

/* A byte: what this read brings, and how many bytes. After the input the connection is closed. */
FUZZ_QUIET static ssize_t client_recv(uint8_t *out, size_t cap) {
    static const int errors[] = {0, EAGAIN, EINTR, ECONNRESET};
    uint8_t b = fuzz_u8(&in);
    size_t n = DDL__MIN(cap, (size_t)(b >> 3) * 8 + 1);
    const uint8_t *raw;
    switch (fuzz_left(&in) == 0 ? 4 : b & 7) {
    case 0:
    case 1:
        n = queue_take(&rank0.say, out, cap);
        break;
    case 2:
        n = queue_take(&rank0.say, out, n);
        break;
    case 3:
        n = queue_take(&rank0.say, out, n);
        out[0] ^= fuzz_u8(&in);
        break;
    case 5:
        raw = fuzz_take(&in, &n);
        memcpy(out, raw, n);
        break;
    case 6:
        rank0.broken = (b & 128) != 0;
        n = queue_take(&rank0.say, out, 1);
        break;
    default:
        errno = errors[b >> 3 & 3];
        return errno == 0 || fuzz_left(&in) == 0 ? 0 : -1;
    }
    errno = EAGAIN;
    return n > 0 ? (ssize_t)n : -1;
}

FUZZ_QUIET static void fuzz_client(uint8_t b) {
    uint8_t nonce[32] = {3}, bytes = fuzz_u8(&in);
    bool by_uid = (bytes & 1) != 0;
    fuzz_begin(1);
    memset(&rank0, 0, sizeof rank0);
    rank0.knows = (bytes & 2) != 0;
    rank0.answer = bytes >> 2;
    ddl__auth_params p = {.secret = rank0.knows ? secret : other_secret,
                          .secret_bytes = by_uid ? 0 : 32,
                          .job = 42 + (bytes >> 4 & 1),
                          .purpose = DDL__AUTH_STORE,
                          .world = RANKS + (bytes >> 5 & 1)};
    ddl__client c = {.settings = &settings, .base = &base, .blob = blob, .blob_bytes = BLOB, .table = table,
                     .fd = CLIENT_FD, .deadline_ns = fuzz_clock_ns + 1000 * DDL__NS_PER_MS, .why = &why};
    (void)b;
    REQUIRE(ddl__auth_server(&rank0.auth, &p, nonce) == DDL_OK);
    ddl_status status = ddl__client_prove(&c, by_uid);
    if (status == DDL_OK) {
        REQUIRE(rank0.knows || by_uid);
        status = ddl__client_trade(&c);
    }
    REQUIRE(status <= 0 || status == DDL_IN_PROGRESS);
    REQUIRE(status >= 0 || why.text[0] != 0);
    fuzz_clean(why.text, sizeof why.text);
}

/* >>folder */

enum { FILES = 4, FILE_MAX = DDL__FILE_HEAD + DDL__SENTENCE_BYTES + RANKS * (DDL__FILE_NONCE + BLOB) + DDL__FILE_MAC };

static struct {
    ddl__file f;
    uint8_t content[FILES][FILE_MAX + 1]; /* "table", "rank.1" ... */
    size_t bytes[FILES], at[FILES];
    bool there[FILES], genuine[FILES];
} folder;

FUZZ_QUIET static int fuzz_openat(const char *name, int flags, ...) {
    int index = strcmp(name, "table") == 0 ? 0 : strncmp(name, "rank.", 5) == 0 ? atoi(name + 5) : -1;
    if ((flags & O_WRONLY) != 0) {
        return WRITE_FD;
    }
    if (index < 0 || index >= FILES || !folder.there[index]) {
        errno = ENOENT;
        return index < 0 ? 4001 : -1;
    }
    folder.at[index] = 0;
    return FILE_FD + index;
}

FUZZ_QUIET static int fuzz_stat(int fd, struct stat *out) {
    memset(out, 0, sizeof *out);
    out->st_mode = S_IFREG | 0600;
    out->st_size = fd >= FILE_FD && fd < FILE_FD + FILES ? (off_t)folder.bytes[fd - FILE_FD] : 0;
    out->st_uid = geteuid();
    return 0;
}

FUZZ_QUIET static ssize_t file_recv(int index, void *out, size_t cap) {
    size_t n = DDL__MIN(cap, folder.bytes[index] - folder.at[index]);
    memcpy(out, folder.content[index] + folder.at[index], n);
    folder.at[index] += n;
    return (ssize_t)n;
}

/* One file: how u8 (absent, whose nonces, state, sealed by whom, length), then changes: offset u16, xor u8, until 0. */
FUZZ_QUIET static void file_content(int index) {
    static const uint8_t strange[DDL__FILE_NONCE] = {99};
    ddl__file *f = &folder.f;
    uint8_t how = fuzz_u8(&in), state = fuzz_u8(&in), x, *bytes = folder.content[index];
    char name[16];
    size_t count = index == 0 ? f->table_bytes : ddl__file_rank_bytes(f);
    bool lead = settings.launch.rank == 0, fresh = (how & 2) != 0;
    snprintf(name, sizeof name, index == 0 ? "table" : "rank.%d", index);
    memset(bytes, 5, FILE_MAX);
    ddl__file_head(f, index == 0 ? state & 3 : DDL__FILE_RANK, index == 0 && lead ? f->nonce : strange, bytes);
    if (index == 0) {
        memcpy(ddl__file_slot(f, bytes, 1), fresh ? f->nonce : strange, DDL__FILE_NONCE);
    } else {
        memcpy(bytes + DDL__FILE_HEAD, fresh ? f->nonce : strange, DDL__FILE_NONCE);
    }
    while ((x = fuzz_u8(&in)) != 0) {
        bytes[fuzz_int(&in, 2) % count] ^= x;
    }
    if ((how & 4) != 0) {
        ddl__file_mac(f, name, bytes, count - DDL__FILE_MAC, bytes + count - DDL__FILE_MAC);
    }
    folder.genuine[index] = (how & 4) != 0 && (how & 24) == 0;
    folder.there[index] = (how & 1) != 0;
    folder.bytes[index] = (how & 8) != 0 ? count / 2 : (how & 16) != 0 ? count - 1 : count;
}

FUZZ_QUIET static void fuzz_folder(int32_t rank) {
    static uint8_t tables[2][FILE_MAX], states_here[RANKS];
    ddl__file *f = &folder.f;
    fuzz_begin(rank);
    memset(&folder.there, 0, sizeof folder.there);
    *f = (ddl__file){.settings = &settings, .base = &base, .why = &why, .blob_bytes = BLOB, .folder = 4000,
                     .slot_bytes = DDL__FILE_NONCE + BLOB, .table_bytes = FILE_MAX, .name = "job", .path = "/folder",
                     .owner = geteuid(), .nonce = {1}, .table = tables[0], .scratch = tables[1], .ranks = states_here};
    ddl__hmac_key_init(&f->key, secret, sizeof secret);
    for (int i = 0; i < FILES; i++) {
        file_content(i);
    }
    if (rank == 0) {
        int32_t here = ddl__file_collect(f), genuine = 1;
        for (int i = 1; i < FILES; i++) {
            genuine += folder.there[i] && folder.genuine[i];
            REQUIRE(states_here[i] != DDL__RANK_HERE || (folder.there[i] && folder.genuine[i]));
        }
        REQUIRE(here >= 1 && here <= genuine);
        return;
    }
    uint8_t head[DDL__FILE_HEAD];
    bool written = (fuzz_u8(&in) & 1) != 0;
    (void)ddl__file_peek(f, "table", head);
    if (ddl__file_read(f, "table", f->table, f->table_bytes)) {
        REQUIRE(folder.there[0] && folder.genuine[0]);
        if (ddl__file_state(f, f->table) >= 0) {
            REQUIRE(ddl__file_take(f, table) >= 0 || why.text[0] != 0);
            memcpy(f->seen, f->table + 24, DDL__FILE_NONCE);
        }
    }
    (void)ddl__file_answer(f, "rank.1", blob, &written);
    REQUIRE(strnlen(why.text, sizeof why.text) < sizeof why.text);
}

/* >>system */

FUZZ_QUIET static ssize_t fuzz_send(int fd, const void *data, size_t bytes) {
    if (fd == CLIENT_FD) {
        return client_send(data, bytes);
    }
    REQUIRE(fd >= FIRST_FD && fd < FIRST_FD + LINKS);
    visit *l = &links[fd - FIRST_FD];
    if (l->room == 0 || l->ends) {
        errno = l->ends ? EPIPE : EAGAIN;
        return -1;
    }
    bytes = DDL__MIN(bytes, l->room);
    l->room -= l->room == SIZE_MAX ? 0 : bytes;
    server_heard(l, data, bytes);
    return (ssize_t)bytes;
}

FUZZ_QUIET static ssize_t fuzz_recv(int fd, void *out, size_t cap) {
    if (fd == CLIENT_FD) {
        return client_recv(out, cap);
    }
    if (fd >= FILE_FD && fd < FILE_FD + FILES) {
        return file_recv(fd - FILE_FD, out, cap);
    }
    REQUIRE(fd >= FIRST_FD && fd < FIRST_FD + LINKS);
    visit *l = &links[fd - FIRST_FD];
    size_t n = DDL__MIN(cap, l->given_bytes);
    l->given_bytes = 0;
    if (n > 0) {
        memcpy(out, l->given, n);
        return (ssize_t)n;
    }
    errno = l->ends ? l->error : EAGAIN;
    return l->ends && l->error == 0 ? 0 : -1;
}

FUZZ_QUIET static void fuzz_closed(int fd) {
    if (fd >= FIRST_FD && fd < FIRST_FD + LINKS) {
        REQUIRE(links[fd - FIRST_FD].open); /* not twice */
        links[fd - FIRST_FD].open = false;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    in = (fuzz_input){data, data + size};
    uint8_t side = fuzz_u8(&in) & 3;
    if (side == 0) {
        fuzz_server();
    } else if (side == 1) {
        fuzz_client(side);
    } else {
        fuzz_folder(side == 2 ? 0 : 1);
    }
    return 0;
}

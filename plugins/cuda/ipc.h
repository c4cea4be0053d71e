/* ipc: the transport between the ranks of one host whose tensors are on GPUs. It carries no messages: it says who is here,
 * sets up boards, and copies between registered memory (get, put); collectives are native.h's. Copies are ordered by events:
 * a GPU that several ranks share is never kept busy with waiting. */
#ifndef CUDA_IPC_H
#define CUDA_IPC_H

#include "probe.h"

#include "gate.h"

#include "mark.h"

#include "native.h"

/* What a key holds for peers. */
typedef struct cuda_key {
    cuda_place place;
    uint64_t bytes, serial; /* serial: of the registration; never given twice by a rank */
    int32_t rank, slot;     /* slot: where its owner's board says whether it still holds */
} cuda_key;
_Static_assert(sizeof(cuda_key) <= sizeof((ddl_memory_key *)NULL)->bytes, "a key fits");

typedef struct cuda_registered {
    struct cuda_registered *next; /* of this rank's */
    cuda_gpu *gpu;
    cuda_key key;
} cuda_registered;

#define CUDA_TOUCH_BITS 56 /* of a serial in a word of `touching`; above them the owner's local index */
#define CUDA_RELEASE_PATIENCE_NS 2000000000ull /* for copies of peers that are under way when memory is released */

/* A copy to or from a peer's memory: it waits for a mapping first, then for its event. */
typedef struct cuda_transfer {
    struct cuda_transfer *next;
    int32_t peer;
    bool is_put, failed; /* failed: the peer is dead */
    cuda_gpu *gpu;
    CUdeviceptr local;
    cuda_place place;
    uint64_t bytes;
    void *cookie;
    const cuda_registered *own; /* the local memory's */
    uint64_t serial; /* the peer's registration, and where it is on the peer's board */
    int32_t slot, touch; /* touch: this copy's word on this rank's board; -1: none */
    cuda_import *import; /* NULL: not begun */
    CUevent event;
    bool wakes; /* the event rings when it happens */
} cuda_transfer;

static void cuda_transfer_settle(const cuda_transfer *x);
static void cuda_transfer_end(cuda_ipc *t, cuda_transfer *x);

/* ---- opening ---- */

static uint64_t cuda_process_token(void) {
    struct stat space = {0};
    stat("/proc/self/ns/pid", &space);
    return (uint64_t)space.st_ino << 32 ^ (uint64_t)getpid();
}

static void cuda_ipc_close(void *self) {
    cuda_ipc *t = self;
    while (t->transfers != NULL) { /* what is under way ends before memory goes: close of the GPUs waits for it */
        cuda_transfer *x = t->transfers;
        t->transfers = x->next;
        if (x->event != NULL) {
            cuda_transfer_settle(x);
        }
        cuda_transfer_end(t, x);
        t->host->free(t->host, x);
    }
    while (t->registrations != NULL) {
        cuda_registered *r = t->registrations;
        t->registrations = r->next;
        t->host->free(t->host, r);
    }
    if (t->natives != NULL) {
        cuda_natives_close(t);
    }
    cuda_share_close(t);
    cuda_probes_close(t);
    for (int32_t i = 0; i < t->gpu_count; i++) {
        if (t->gpus[i] != NULL) {
            cuda_device_close(t->gpus[i]);
        }
    }
    for (int32_t i = 0; t->peers != NULL && i < t->world_size; i++) {
        cuda_board_drop(&t->peers[i]);
    }
    if (t->board_fd >= 0) {
        close(t->board_fd);
    }
    if (t->bell >= 0) {
        close(t->bell);
    }
    t->host->free(t->host, t->peers);
    t->host->free(t->host, t->local);
    t->host->free(t->host, t->host_id);
    t->host->free(t->host, t);
}

static ddl_status cuda_ipc_allocate(cuda_ipc *t, const char *host_id) {
    size_t ranks = (size_t)t->world_size, id_bytes = strlen(host_id) + 1;
    t->peers = t->host->alloc(t->host, ranks * sizeof *t->peers);
    t->local = t->host->alloc(t->host, ranks * sizeof *t->local);
    t->host_id = t->host->alloc(t->host, id_bytes);
    if (t->peers == NULL || t->local == NULL || t->host_id == NULL) {
        return DDL_ERR_NOMEM;
    }
    memset(t->peers, 0, ranks * sizeof *t->peers);
    for (size_t i = 0; i < ranks; i++) {
        t->peers[i].bell = t->peers[i].aside_fd = -1;
    }
    memcpy(t->host_id, host_id, id_bytes);
    t->peers[t->rank].here = t->peers[t->rank].same_process = true;
    return DDL_OK;
}

/* Who the GPUs are: known without a context. */
static ddl_status cuda_ipc_gpus(cuda_ipc *t) {
    for (int32_t i = 0; i < t->gpu_count; i++) {
        CUdevice device;
        CUresult result = t->cu.cuDeviceGet(&device, i);
        result = result == CUDA_SUCCESS ? t->cu.cuDeviceGetUuid(&t->uuids[i], device) : result;
        if (result != CUDA_SUCCESS) {
            cuda_log(t->host, DDL_LOG_WARN, "GPU %d does not say who it is: %s", i, cuda_error_name(&t->cu, result));
            return DDL_ERR_SYSTEM;
        }
    }
    return DDL_OK;
}

static ddl_status cuda_ipc_open(const ddl_host *host, const ddl_transport_params *params, void **out_self) {
    char text[300];
    int count = 0;
    cuda_ipc *t = host->alloc(host, sizeof *t);
    if (t == NULL) {
        return DDL_ERR_NOMEM;
    }
    memset(t, 0, sizeof *t);
    t->host = host;
    t->rank = params->rank;
    t->world_size = params->world_size;
    t->board_fd = t->bell = -1;
    const char *why = cuda_driver_open(&t->cu, text, sizeof text);
    ddl_status status = why == NULL ? DDL_OK : DDL_ERR_UNSUPPORTED;
    if (why != NULL) {
        cuda_log(host, DDL_LOG_WARN, "%s", why);
    } else if (t->cu.cuDeviceGetCount(&count) == CUDA_SUCCESS) {
        t->gpu_count = count < CUDA_GPUS_MAX ? count : CUDA_GPUS_MAX;
    }
    status = status == DDL_OK ? cuda_ipc_gpus(t) : status;
    status = status == DDL_OK ? cuda_ipc_allocate(t, params->host_id) : status;
    if (status != DDL_OK) {
        cuda_ipc_close(t);
        return status;
    }
    memcpy(t->address.magic, CUDA_BOARD_MAGIC, sizeof t->address.magic);
    t->address.process = cuda_process_token();
    t->address.uid = (uint32_t)getuid();
    t->address.gpu_count = (uint32_t)t->gpu_count;
    *out_self = t;
    return DDL_OK;
}

static ddl_status cuda_ipc_address(void *self, void *out_address, size_t *bytes) {
    const cuda_ipc *t = self;
    if (*bytes < sizeof t->address) {
        return DDL_ERR_ARG;
    }
    memcpy(out_address, &t->address, sizeof t->address);
    *bytes = sizeof t->address;
    return DDL_OK;
}

static ddl_status cuda_ipc_add_peer(void *self, int32_t peer, const void *address, size_t bytes,
                                    const char *peer_host_id, uint64_t *out_latency_ns, uint64_t *out_bytes_per_s) {
    cuda_ipc *t = self;
    cuda_address other;
    if (peer < 0 || peer >= t->world_size || peer == t->rank || bytes != sizeof other) {
        return DDL_ERR_ARG;
    }
    memcpy(&other, address, sizeof other);
    if (t->joined || peer_host_id == NULL || strcmp(peer_host_id, t->host_id) != 0 || other.uid != t->address.uid ||
        memcmp(other.magic, CUDA_BOARD_MAGIC, sizeof other.magic) != 0) {
        return DDL_ERR_UNSUPPORTED;
    }
    t->peers[peer].here = true;
    t->peers[peer].same_process = other.process == t->address.process;
    t->processes = t->processes || !t->peers[peer].same_process;
    *out_latency_ns = 10000;
    *out_bytes_per_s = 200000000000u;
    return DDL_OK;
}

/* Local numbers follow from the addresses, which all know; then this rank's board is made. */
static ddl_status cuda_ipc_join(cuda_ipc *t) {
    t->joined = true;
    for (int32_t i = 0; i < t->world_size; i++) {
        if (t->peers[i].here) {
            t->local_index = i == t->rank ? t->local_count : t->local_index;
            t->peers[i].index = t->local_count;
            t->local[t->local_count++] = i;
        }
    }
    if (t->local_count > CUDA_LOCAL_MAX) {
        cuda_log(t->host, DDL_LOG_WARN, "more than %d ranks on this host: GPU memory goes through the host",
                 CUDA_LOCAL_MAX);
        return DDL_ERR_UNSUPPORTED;
    }
    ddl_status status = DDL_HAS(t->host, send_fd) && DDL_HAS(t->host, take_fd) ? DDL_OK : DDL_ERR_UNSUPPORTED;
    status = status == DDL_OK ? cuda_share_open(t) : status;
    status = status == DDL_OK ? cuda_probes_open(t) : status;
    return status == DDL_OK ? cuda_board_make(t) : status;
}

static ddl_status cuda_ipc_ready(void *self, int32_t peer) {
    cuda_ipc *t = self;
    if (peer < 0 || peer >= t->world_size || peer == t->rank || !t->peers[peer].here) {
        return DDL_ERR_ARG;
    }
    if (!t->joined) {
        t->join_status = cuda_ipc_join(t);
        if (t->join_status != DDL_OK) {
            cuda_log(t->host, DDL_LOG_WARN, "this rank cannot share GPU memory: status %d", (int)t->join_status);
        }
    }
    return cuda_board_exchange(t, peer);
}

/* ---- registered memory ----
 * A registration holds until its owner takes it back, and then no copy of a peer's touches the memory, nor begins to: a rank
 * that copies says so on its board (`touching`) before it looks whether the registration still holds, and an owner takes it
 * back before it looks who copies. So either the copy does not begin, or the owner waits for its end. */

static ddl_status cuda_ipc_register(void *self, void *memory, size_t bytes, void **out_handle,
                                    ddl_memory_key *out_key) {
    cuda_ipc *t = self;
    int32_t slot = 0;
    while (t->board != NULL && slot < CUDA_REGISTERED &&
           atomic_load_explicit(&t->board->registered[slot], memory_order_relaxed) != 0) { /* own */
        slot++;
    }
    if (t->board == NULL || slot == CUDA_REGISTERED) { /* so many messages at a time: the rest goes another way */
        return DDL_ERR_UNSUPPORTED;
    }
    cuda_registered *r = t->host->alloc(t->host, sizeof *r);
    if (r == NULL) {
        return DDL_ERR_NOMEM;
    }
    memset(r, 0, sizeof *r);
    ddl_status status = cuda_share(t, memory, bytes, &r->key.place);
    if (status != DDL_OK) {
        t->host->free(t->host, r);
        return status;
    }
    r->gpu = t->gpus[t->shares->own[r->key.place.slot].ordinal];
    r->key.bytes = bytes;
    r->key.rank = t->rank;
    r->key.slot = slot;
    r->key.serial = ++t->last_serial;
    atomic_store_explicit(&t->board->registered[slot], r->key.serial, memory_order_release); /* nothing goes with it */
    memset(out_key, 0, sizeof *out_key);
    memcpy(out_key->bytes, &r->key, sizeof r->key);
    r->next = t->registrations;
    t->registrations = r;
    *out_handle = r;
    return DDL_OK;
}

/* Whether a peer copies to or from a registration of this rank's. */
static bool cuda_is_touched(const cuda_ipc *t, int32_t peer, uint64_t serial) {
    cuda_board *board = (cuda_board *)(uintptr_t)t->peers[peer].board;
    uint64_t word = (uint64_t)t->local_index << CUDA_TOUCH_BITS | serial;
    for (int32_t i = 0; board != NULL && i < CUDA_TOUCHES; i++) {
        if (atomic_load_explicit(&board->touching[i], memory_order_acquire) == word) { /* then what was copied is seen */
            return true;
        }
    }
    return false;
}

static void cuda_untouched_wait(cuda_ipc *t, int32_t peer, uint64_t serial) {
    uint64_t until = t->host->now_ns(t->host) + CUDA_RELEASE_PATIENCE_NS;
    struct timespec nap = {0, 50000};
    while (!t->peers[peer].dead && cuda_is_touched(t, peer, serial)) {
        if (t->host->now_ns(t->host) >= until) {
            cuda_log(t->host, DDL_LOG_WARN, "rank %d does not say that it has ended its copy of memory of rank %d, whose "
                     "message was given up: its GPU may still read it", peer, t->rank);
            return;
        }
        nanosleep(&nap, NULL);
    }
}

static void cuda_transfers_cancel(cuda_ipc *t, const cuda_registered *r);

static void cuda_ipc_release(void *self, void *handle) {
    cuda_ipc *t = self;
    cuda_registered *r = handle;
    if (r == NULL) {
        return;
    }
    cuda_transfers_cancel(t, r);
    atomic_store_explicit(&t->board->registered[r->key.slot], 0, memory_order_relaxed); /* the fence orders it */
    atomic_thread_fence(memory_order_seq_cst); /* taken back, then touching; the peer: touching, then looked */
    for (int32_t i = 0; i < t->local_count; i++) {
        if (t->local[i] != t->rank) {
            cuda_untouched_wait(t, t->local[i], r->key.serial);
        }
    }
    cuda_registered **at = &t->registrations;
    while (*at != r) {
        at = &(*at)->next;
    }
    *at = r->next;
    t->host->free(t->host, r);
}

/* Says on the board that a copy begins. DDL_IN_PROGRESS: as many as there are words are under way. DDL_ERR_STATE: the
 * peer has taken its memory back. */
static ddl_status cuda_touch_begin(cuda_ipc *t, cuda_transfer *x) {
    cuda_board *theirs = (cuda_board *)(uintptr_t)t->peers[x->peer].board;
    int32_t i = 0;
    while (i < CUDA_TOUCHES && atomic_load_explicit(&t->board->touching[i], memory_order_relaxed) != 0) { /* own */
        i++;
    }
    if (i == CUDA_TOUCHES) {
        return DDL_IN_PROGRESS;
    }
    atomic_store_explicit(&t->board->touching[i], (uint64_t)t->peers[x->peer].index << CUDA_TOUCH_BITS | x->serial,
                          memory_order_relaxed); /* the fence orders it */
    atomic_thread_fence(memory_order_seq_cst);   /* see cuda_ipc_release */
    if (atomic_load_explicit(&theirs->registered[x->slot], memory_order_acquire) != x->serial) {
        atomic_store_explicit(&t->board->touching[i], 0, memory_order_relaxed); /* nothing was touched */
        return DDL_ERR_STATE;
    }
    x->touch = i;
    return DDL_OK;
}

static void cuda_touch_end(cuda_ipc *t, cuda_transfer *x) {
    if (x->touch >= 0) { /* release: the copy has ended */
        atomic_store_explicit(&t->board->touching[x->touch], 0, memory_order_release);
        x->touch = -1;
    }
}

/* Begins the copy when the peer's memory is mapped. */
static ddl_status cuda_transfer_begin(cuda_ipc *t, cuda_transfer *x) {
    cuda_guard guard;
    CUdeviceptr there = 0;
    ddl_status status = cuda_reach(t, x->peer, &x->place, x->bytes, x->gpu, &x->import, &there);
    if (status != DDL_OK) {
        return status;
    }
    status = cuda_touch_begin(t, x);
    if (status != DDL_OK) {
        cuda_let_go(t, x->import);
        x->import = NULL;
        return status;
    }
    status = cuda_enter(x->gpu, &guard);
    if (status == DDL_OK) {
        status = cuda_event_take(x->gpu, &x->event);
        CUdeviceptr dst = x->is_put ? there : x->local, src = x->is_put ? x->local : there;
        if (status == DDL_OK) {
            CUresult result = x->gpu->cu.cuMemcpyAsync(dst, src, x->bytes, x->gpu->stream);
            result = result == CUDA_SUCCESS ? x->gpu->cu.cuEventRecord(x->event, x->gpu->stream) : result;
            status = cuda_check(x->gpu, result, "copying %llu bytes %s rank %d", (unsigned long long)x->bytes,
                                x->is_put ? "to" : "from", x->peer);
        }
        cuda_leave(&guard);
    }
    return status;
}

/* After a failure the copy may still be under way, and the memory of both sides in use. */
static void cuda_transfer_settle(const cuda_transfer *x) {
    cuda_guard guard;
    bool inside = cuda_enter(x->gpu, &guard) == DDL_OK;
    x->gpu->cu.cuStreamSynchronize(x->gpu->stream);
    if (inside) {
        cuda_leave(&guard);
    }
}

/* Gives back everything but itself; its copy has ended, or never began. */
static void cuda_transfer_end(cuda_ipc *t, cuda_transfer *x) {
    cuda_touch_end(t, x);
    if (x->event != NULL) {
        cuda_event_give(x->gpu, x->event);
    }
    if (x->import != NULL) {
        cuda_let_go(t, x->import);
    }
}

/* DDL_IN_PROGRESS, or how it ended; then everything but itself is given back. */
static ddl_status cuda_transfer_look(cuda_ipc *t, cuda_transfer *x) {
    cuda_guard guard;
    ddl_status status = DDL_OK;
    if (x->import == NULL && x->failed) {
        status = DDL_ERR_PEER;
    } else if (x->import == NULL) {
        status = cuda_transfer_begin(t, x);
        status = status == DDL_OK ? DDL_IN_PROGRESS : status;
    } else if ((status = cuda_enter(x->gpu, &guard)) == DDL_OK) {
        status = cuda_check(x->gpu, x->gpu->cu.cuEventQuery(x->event), "a copy %s rank %d", x->is_put ? "to" : "from",
                            x->peer);
        status = status == DDL_OK && x->failed ? DDL_ERR_PEER : status;
        cuda_leave(&guard);
    }
    if (status < 0 && x->import != NULL) {
        cuda_transfer_settle(x);
    }
    if (status != DDL_IN_PROGRESS) {
        cuda_transfer_end(t, x);
    }
    return status;
}

static ddl_status cuda_transfer_make(cuda_ipc *t, int32_t peer, uint64_t local, void *handle, const ddl_memory_key *key,
                                     uint64_t offset, uint64_t bytes, void *cookie, bool is_put) {
    const cuda_registered *r = handle;
    cuda_key k;
    memcpy(&k, key->bytes, sizeof k);
    if (peer < 0 || peer >= t->world_size || t->peers[peer].board == NULL || r == NULL || k.rank != peer ||
        offset > k.bytes || bytes > k.bytes - offset || k.slot < 0 || k.slot >= CUDA_REGISTERED ||
        k.serial >> CUDA_TOUCH_BITS != 0) {
        return DDL_ERR_ARG;
    }
    if (t->peers[peer].dead) {
        return DDL_ERR_PEER;
    }
    if (bytes == 0) {
        return DDL_OK;
    }
    cuda_transfer *x = t->host->alloc(t->host, sizeof *x);
    if (x == NULL) {
        return DDL_ERR_NOMEM;
    }
    *x = (cuda_transfer){.peer = peer,
                         .is_put = is_put,
                         .gpu = r->gpu,
                         .local = local,
                         .place = k.place,
                         .bytes = bytes,
                         .cookie = cookie,
                         .own = r,
                         .serial = k.serial,
                         .slot = k.slot,
                         .touch = -1};
    x->place.offset += offset;
    ddl_status status = cuda_transfer_look(t, x);
    if (status != DDL_IN_PROGRESS) {
        t->host->free(t->host, x);
        return status;
    }
    x->next = t->transfers;
    t->transfers = x;
    return status;
}

static ddl_status cuda_ipc_get(void *self, int32_t peer, void *local, void *local_handle, const ddl_memory_key *key,
                               uint64_t offset, uint64_t bytes, void *cookie) {
    return cuda_transfer_make(self, peer, (uintptr_t)local, local_handle, key, offset, bytes, cookie, false);
}

static ddl_status cuda_ipc_put(void *self, int32_t peer, const void *local, void *local_handle,
                               const ddl_memory_key *key, uint64_t offset, uint64_t bytes, void *cookie) {
    return cuda_transfer_make(self, peer, (uintptr_t)local, local_handle, key, offset, bytes, cookie, true);
}

/* Ends those that have happened, with the host called last: it may begin others. Of a dead peer all end; the copies that
 * have begun run on in memory that stays mapped until their event (the import is let go then). */
static int32_t cuda_transfers_progress(cuda_ipc *t) {
    int32_t done = 0;
    cuda_transfer *ended = NULL;
    for (cuda_transfer **at = &t->transfers; *at != NULL;) {
        cuda_transfer *x = *at;
        ddl_status status = cuda_transfer_look(t, x);
        if (status == DDL_IN_PROGRESS) {
            at = &x->next;
            continue;
        }
        *at = x->next;
        x->next = ended;
        x->bytes = (uint64_t)(int64_t)status;
        ended = x;
    }
    while (ended != NULL) {
        cuda_transfer x = *ended;
        t->host->free(t->host, ended);
        ended = x.next;
        t->host->transferred(t->host, x.cookie, (ddl_status)(int64_t)x.bytes);
        done++;
    }
    return done;
}

/* Of memory that is released here: copies that have begun are waited for (nothing but copies is on their stream), and then
 * the host is told of all. */
static void cuda_transfers_cancel(cuda_ipc *t, const cuda_registered *r) {
    for (cuda_transfer **at = &t->transfers; *at != NULL;) {
        cuda_transfer *x = *at;
        if (x->own != r) {
            at = &x->next;
            continue;
        }
        *at = x->next;
        if (x->event != NULL) {
            cuda_transfer_settle(x);
        }
        cuda_transfer_end(t, x);
        void *cookie = x->cookie;
        t->host->free(t->host, x);
        t->host->transferred(t->host, cookie, DDL_ERR_CANCELLED); /* it may begin and end others */
        at = &t->transfers;
    }
}

/* ---- what a transport must have ---- */

static ddl_status cuda_ipc_send(void *self, int32_t peer, ddl_message *message) {
    (void)self, (void)peer, (void)message;
    return DDL_ERR_UNSUPPORTED; /* DDL_TRANSPORT_DEVICE: nobody asks */
}

static int32_t cuda_ipc_work(cuda_ipc *t) {
    return cuda_share_progress(t) + cuda_transfers_progress(t) + cuda_natives_progress(t);
}

static int32_t cuda_ipc_progress(void *self, int32_t expect) {
    cuda_ipc *t = self;
    uint64_t rung;
    (void)expect;
    if (t->board == NULL) {
        return 0;
    }
    if (atomic_load_explicit(&t->board->sleeping, memory_order_relaxed) != 0) { /* own */
        atomic_store_explicit(&t->board->sleeping, 0, memory_order_relaxed);
        ssize_t n = read(t->bell, &rung, sizeof rung);
        (void)n; /* nothing rung is fine */
        cuda_natives_ask_next(t);
    }
    return cuda_ipc_work(t);
}

/* Runs on a thread of the driver's. The descriptor lives: GPUs are closed before it is. */
static void cuda_ipc_wake(void *user) {
    static const uint64_t one = 1;
    ssize_t n = write((int)(intptr_t)user, &one, sizeof one);
    (void)n;
}

/* Rings when an event (or none) has happened: put there once for each event. On a stream of its own, as others must not wait
 * behind a user's stream. */
static bool cuda_ipc_wake_after(cuda_ipc *t, cuda_gpu *gpu, CUevent event, bool *wakes) {
    cuda_guard guard;
    if (event == NULL || *wakes) {
        return true;
    }
    if (cuda_enter(gpu, &guard) != DDL_OK) {
        return false;
    }
    CUresult result = gpu->wakes != NULL ? CUDA_SUCCESS : cuda_stream_make(gpu, &gpu->wakes);
    result = result == CUDA_SUCCESS ? gpu->cu.cuStreamWaitEvent(gpu->wakes, event, 0) : result;
    result = result == CUDA_SUCCESS ? gpu->cu.cuLaunchHostFunc(gpu->wakes, cuda_ipc_wake, (void *)(intptr_t)t->bell)
                                    : result;
    cuda_leave(&guard);
    *wakes = result == CUDA_SUCCESS;
    return *wakes;
}

/* The same for a mark: words ring no bell. */
static bool cuda_ipc_wake_at(cuda_ipc *t, cuda_gpu *gpu, cuda_mark *mark) {
    cuda_guard guard;
    ddl_status status = DDL_OK;
    if (mark->word != NULL && mark->event == NULL && (status = cuda_enter(gpu, &guard)) == DDL_OK) {
        status = cuda_event_put(gpu, mark->stream, &mark->event);
        cuda_leave(&guard);
    }
    return status == DDL_OK && cuda_ipc_wake_after(t, gpu, mark->event, &mark->wakes);
}

/* Work on a GPU rings when it is done; where it cannot, the core has to look. */
static ddl_status cuda_ipc_arm(void *self, int *out_fd) {
    cuda_ipc *t = self;
    bool wakes = true;
    *out_fd = t->bell;
    if (t->board == NULL) {
        return DDL_OK;
    }
    atomic_store_explicit(&t->board->sleeping, 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst); /* sleeping, then a last look; cuda_ring has the other half */
    cuda_natives_ask_next(t);
    if (cuda_ipc_work(t) > 0) {
        return DDL_IN_PROGRESS;
    }
    for (cuda_transfer *x = t->transfers; wakes && x != NULL; x = x->next) {
        wakes = cuda_ipc_wake_after(t, x->gpu, x->event, &x->wakes);
    }
    for (cuda_native *set = t->natives != NULL ? t->natives->first : NULL; wakes && set != NULL; set = set->next) {
        wakes = set->head == NULL || cuda_ipc_wake_at(t, set->head->gpu, &set->head->mark);
    }
    return wakes ? DDL_OK : DDL_IN_PROGRESS;
}

static void cuda_ipc_peer_dead(void *self, int32_t peer) {
    cuda_ipc *t = self;
    if (peer < 0 || peer >= t->world_size || !t->peers[peer].here || t->board == NULL) {
        return;
    }
    t->peers[peer].dead = true;
    for (cuda_transfer *x = t->transfers; x != NULL; x = x->next) {
        x->failed = x->failed || x->peer == peer;
    }
    cuda_share_peer_dead(t, peer);
    cuda_natives_reclaim(t, false);
}

static const char *cuda_ipc_describe(void *self, int32_t peer) {
    const cuda_ipc *t = self;
    const cuda_peer *p = peer >= 0 && peer < t->world_size ? &t->peers[peer] : NULL;
    return p == NULL || p->board == NULL ? "not joined"
           : p->same_process             ? "GPU memory by pointer"
                                         : "GPU memory by CUDA IPC and file descriptors";
}

static const ddl_transport cuda_transport = {
    .size = sizeof(ddl_transport),
    .flags = DDL_TRANSPORT_LOCAL | DDL_TRANSPORT_ORDERED | DDL_TRANSPORT_DEVICE | /* no messages, so none out of order */
             DDL_TRANSPORT_CAPTURE | DDL_TRANSPORT_EVENT,
    .max_payload_bytes = DDL_MESSAGE_PAYLOAD_BYTES,
    .open = cuda_ipc_open,
    .close = cuda_ipc_close,
    .address = cuda_ipc_address,
    .add_peer = cuda_ipc_add_peer,
    .send = cuda_ipc_send,
    .progress = cuda_ipc_progress,
    .arm = cuda_ipc_arm,
    .peer_dead = cuda_ipc_peer_dead,
    .memory_register = cuda_ipc_register,
    .memory_release = cuda_ipc_release,
    .get = cuda_ipc_get,
    .put = cuda_ipc_put,
    .native_open = cuda_native_open,
    .native_close = cuda_native_close,
    .native_cost_ns = cuda_native_cost_ns,
    .native_start = cuda_native_start,
    .native_test = cuda_native_test,
    .native_cancel = cuda_native_cancel,
    .ready = cuda_ipc_ready,
    .describe = cuda_ipc_describe,
};

#endif /* CUDA_IPC_H */

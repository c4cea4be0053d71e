/* fi_rdm: the fi_rdm column: libfabric without a library on top, as a program would use it that does nothing but these
 * two operations. Reliable datagram endpoints, tagged messages, receives posted before their sends, completions polled,
 * tiny messages injected, memory registered once, outside of the measurement. What ddl's fabric plugin adds to the time
 * of the provider shows here.
 *
 *   ping_pong    one message each way, cut where the provider's limit is
 *   all_reduce   exchange with the partner at each distance (recursive doubling) for small ones, else a ring of segments
 *                whose reduction and forwarding overlap with what still arrives; a plain loop adds
 *
 * Environment: RANK, WORLD_SIZE, DDL_BENCH_STORE (a folder that all ranks see, for their addresses), DDL_BENCH_PROVIDER
 * ("tcp;ofi_rxm"), DDL_BENCH_NODE (the address to use; 127.0.0.1), DDL_BENCH_SEGMENT (bytes). */
#define _GNU_SOURCE
#include "measure.h"
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_tagged.h>

enum { RDM_REGIONS = 16, RDM_NAME_BYTES = 256, RDM_PIECES = 512, RDM_DOUBLING_BYTES = 256 << 10 };

/* An operation under way. libfabric owns `context` until the operation has completed. */
typedef struct rdm_request {
    struct fi_context2 context;
    bool done;
} rdm_request;

typedef struct rdm_region {
    char *from;
    size_t bytes;
    struct fid_mr *mr;
} rdm_region;

typedef struct rdm {
    int rank, ranks;
    unsigned empty,
        yield_after; /* polls that found nothing. Who never yields loses whole time slices to what else runs */
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_av *av;
    struct fid_cq *cq;
    struct fid_ep *ep;
    fi_addr_t peer[BENCH_MAX_RANKS];
    rdm_region region[RDM_REGIONS];
    float *scratch;
    size_t scratch_bytes, segment_bytes, piece_bytes;
    rdm_request recv[RDM_PIECES], send[RDM_PIECES];
} rdm;

static int rdm_said(const char *what, ssize_t rc) {
    if (rc < 0) {
        fprintf(stderr, "fi_rdm: %s failed: %s\n", what, fi_strerror((int)-rc));
    }
    return rc < 0 ? -1 : 0;
}

static int rdm_number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text != NULL ? atoi(text) : otherwise;
}

/* ---- completions ---- */

static int rdm_completion_error(rdm *r) {
    struct fi_cq_err_entry entry;
    char text[200];
    memset(&entry, 0, sizeof entry);
    if (fi_cq_readerr(r->cq, &entry, 0) < 0) {
        return rdm_said("fi_cq_readerr", -FI_EIO);
    }
    fprintf(stderr, "fi_rdm: an operation failed: %s (%s)\n", fi_strerror(entry.err),
            fi_cq_strerror(r->cq, entry.prov_errno, entry.err_data, text, sizeof text));
    return -1;
}

static int rdm_progress(rdm *r) {
    struct fi_cq_entry entry[16];
    ssize_t n = fi_cq_read(r->cq, entry, 16);
    for (ssize_t i = 0; i < n; i++) {
        ((rdm_request *)entry[i].op_context)->done = true;
    }
    if (n == -FI_EAGAIN) {
        if (++r->empty % r->yield_after == 0) {
            sched_yield();
        }
        return 0;
    }
    return n == -FI_EAVAIL ? rdm_completion_error(r) : rdm_said("fi_cq_read", n);
}

static int rdm_wait(rdm *r, const rdm_request *request) {
    while (!request->done) {
        if (rdm_progress(r) != 0) {
            return -1;
        }
    }
    return 0;
}

/* ---- messages ---- */

static void *rdm_descriptor(rdm *r, const void *p) {
    for (int i = 0; i < RDM_REGIONS; i++) {
        const rdm_region *g = &r->region[i];
        if (g->mr != NULL && (const char *)p >= g->from && (const char *)p < g->from + g->bytes) {
            return fi_mr_desc(g->mr);
        }
    }
    return NULL;
}

static int rdm_start_recv(rdm *r, rdm_request *request, int from, void *to, size_t bytes, uint64_t tag) {
    request->done = false;
    for (;;) {
        ssize_t rc = fi_trecv(r->ep, to, bytes, rdm_descriptor(r, to), r->peer[from], tag, 0, request);
        if (rc != -FI_EAGAIN) {
            return rdm_said("fi_trecv", rc);
        }
        if (rdm_progress(r) != 0) {
            return -1;
        }
    }
}

static int rdm_start_send(rdm *r, rdm_request *request, int to, const void *from, size_t bytes, uint64_t tag) {
    bool inject = bytes <= r->info->tx_attr->inject_size;
    request->done = inject;
    for (;;) {
        ssize_t rc = inject ? fi_tinject(r->ep, from, bytes, r->peer[to], tag)
                            : fi_tsend(r->ep, from, bytes, rdm_descriptor(r, from), r->peer[to], tag, request);
        if (rc != -FI_EAGAIN) {
            return rdm_said("fi_tsend", rc);
        }
        if (rdm_progress(r) != 0) {
            return -1;
        }
    }
}

static int rdm_wait_all(rdm *r, const rdm_request *requests, size_t count) {
    int failed = 0;
    for (size_t i = 0; i < count && failed == 0; i++) {
        failed = rdm_wait(r, &requests[i]);
    }
    return failed;
}

static size_t rdm_pieces(size_t bytes, size_t piece) { return bytes == 0 ? 1 : (bytes + piece - 1) / piece; }

static size_t rdm_piece_bytes(size_t bytes, size_t piece, size_t index) {
    size_t at = index * piece;
    return bytes - at < piece ? bytes - at : piece;
}

/* A message that may be longer than the provider allows. */
static int rdm_start_parts(rdm *r, bool sends, int peer, void *p, size_t bytes) {
    size_t piece = r->piece_bytes;
    for (size_t i = 0; i < rdm_pieces(bytes, piece); i++) {
        char *at = (char *)p + i * piece;
        size_t n = rdm_piece_bytes(bytes, piece, i);
        int failed = sends ? rdm_start_send(r, &r->send[i], peer, at, n, 1000 + i)
                           : rdm_start_recv(r, &r->recv[i], peer, at, n, 1000 + i);
        if (failed != 0) {
            return failed;
        }
    }
    return 0;
}

/* ---- operations ---- */

static int rdm_ping_pong(rdm *r, float *in, float *out, size_t bytes) {
    if (r->rank > 1) {
        return 0;
    }
    int peer = 1 - r->rank;
    size_t pieces = rdm_pieces(bytes, r->piece_bytes);
    int failed = rdm_start_parts(r, false, peer, out, bytes);
    if (failed == 0 && r->rank == 0) {
        failed = rdm_start_parts(r, true, peer, in, bytes);
    }
    failed = failed == 0 ? rdm_wait_all(r, r->recv, pieces) : failed;
    if (failed == 0 && r->rank == 1) {
        failed = rdm_start_parts(r, true, peer, in, bytes);
    }
    return failed == 0 ? rdm_wait_all(r, r->send, pieces) : failed;
}

static void rdm_add(float *restrict to, const float *restrict from, size_t count) {
    for (size_t i = 0; i < count; i++) {
        to[i] += from[i];
    }
}

static int rdm_exchange(rdm *r, int peer, const void *from, void *to, size_t bytes, uint64_t tag) {
    int failed = rdm_start_recv(r, &r->recv[0], peer, to, bytes, tag);
    failed = failed == 0 ? rdm_start_send(r, &r->send[0], peer, from, bytes, tag) : failed;
    failed = failed == 0 ? rdm_wait(r, &r->recv[0]) : failed;
    return failed == 0 ? rdm_wait(r, &r->send[0]) : failed;
}

static int rdm_doubling(rdm *r, float *data, size_t count) {
    for (int distance = 1; distance < r->ranks; distance *= 2) {
        if (rdm_exchange(r, r->rank ^ distance, data, r->scratch, count * sizeof(float), (uint64_t)distance) != 0) {
            return -1;
        }
        rdm_add(data, r->scratch, count);
    }
    return 0;
}

/* A ring of `ranks` blocks: in step s rank r sends block r - s to the right and receives block r - s - 1 from the left;
 * the first ranks - 1 steps add, the others only carry. Segments of a block go their way one by one. */
typedef struct rdm_ring {
    rdm *r;
    float *data;
    size_t count, block, segment, segments; /* elements; segments of a block */
} rdm_ring;

static int ring_block(const rdm_ring *g, int step) { return (g->r->rank - step + 2 * g->r->ranks) % g->r->ranks; }

static size_t ring_count(const rdm_ring *g, int block, size_t k) {
    size_t from = (size_t)block * g->block + k * g->segment;
    size_t end = (size_t)(block + 1) * g->block;
    end = end < g->count ? end : g->count;
    size_t left = from < end ? end - from : 0;
    return left < g->segment ? left : g->segment;
}

static float *ring_place(const rdm_ring *g, int block, size_t k) {
    return g->data + (size_t)block * g->block + k * g->segment;
}

static float *ring_inbox(const rdm_ring *g, int step, size_t k) {
    bool adds = step < g->r->ranks - 1;
    return adds ? g->r->scratch + (size_t)step * g->block + k * g->segment : ring_place(g, ring_block(g, step + 1), k);
}

static int ring_send(const rdm_ring *g, int step, size_t k) {
    rdm *r = g->r;
    int block = ring_block(g, step);
    size_t at = (size_t)step * g->segments + k;
    return rdm_start_send(r, &r->send[at], (r->rank + 1) % r->ranks, ring_place(g, block, k),
                          ring_count(g, block, k) * sizeof(float), 100000 + at);
}

static int ring_recv(const rdm_ring *g, int step, size_t k) {
    rdm *r = g->r;
    size_t at = (size_t)step * g->segments + k;
    return rdm_start_recv(r, &r->recv[at], (r->rank + r->ranks - 1) % r->ranks, ring_inbox(g, step, k),
                          ring_count(g, ring_block(g, step + 1), k) * sizeof(float), 100000 + at);
}

static int ring_arrived(const rdm_ring *g, int step, size_t k) {
    rdm *r = g->r;
    int block = ring_block(g, step + 1);
    if (rdm_wait(r, &r->recv[(size_t)step * g->segments + k]) != 0) {
        return -1;
    }
    if (step < r->ranks - 1) {
        rdm_add(ring_place(g, block, k), ring_inbox(g, step, k), ring_count(g, block, k));
    }
    return step + 1 < 2 * (r->ranks - 1) ? ring_send(g, step + 1, k) : 0;
}

static int rdm_ring_all(const rdm_ring *g, int steps, int (*part)(const rdm_ring *, int, size_t)) {
    for (int step = 0; step < steps; step++) {
        for (size_t k = 0; k < g->segments; k++) {
            if (part(g, step, k) != 0) {
                return -1;
            }
        }
    }
    return 0;
}

static int rdm_ring_reduce(rdm *r, float *data, size_t count) {
    rdm_ring g = {.r = r, .data = data, .count = count};
    int steps = 2 * (r->ranks - 1);
    size_t most = RDM_PIECES / (size_t)steps;
    g.block = (count + (size_t)r->ranks - 1) / (size_t)r->ranks;
    g.segment = r->segment_bytes / sizeof(float);
    g.segment = g.segment < (g.block + most - 1) / most ? (g.block + most - 1) / most : g.segment;
    g.segments = rdm_pieces(g.block, g.segment);
    if (rdm_ring_all(&g, steps, ring_recv) != 0 || rdm_ring_all(&g, 1, ring_send) != 0 ||
        rdm_ring_all(&g, steps, ring_arrived) != 0) {
        return -1;
    }
    return rdm_wait_all(r, r->send, (size_t)steps * g.segments);
}

static int rdm_run(void *state, bench_op op, float *in, float *out, size_t count) {
    rdm *r = state;
    size_t bytes = count * sizeof(float);
    bool power_of_two = (r->ranks & (r->ranks - 1)) == 0;
    switch (op) {
    case BENCH_PING_PONG:
        return rdm_ping_pong(r, in, out, bytes);
    case BENCH_ALL_REDUCE:
        return bytes <= RDM_DOUBLING_BYTES && power_of_two ? rdm_doubling(r, out, count)
                                                           : rdm_ring_reduce(r, out, count);
    default:
        fprintf(stderr, "fi_rdm: only ping_pong and all_reduce are written here\n");
        return -1;
    }
}

/* Dissemination. A sender waits for its completion, because nothing makes progress in the barrier that follows. */
static int rdm_sync(void *state) {
    rdm *r = state;
    char *token = (char *)r->scratch;
    for (int distance = 1; distance < r->ranks; distance *= 2) {
        int to = (r->rank + distance) % r->ranks;
        int from = (r->rank - distance + r->ranks) % r->ranks;
        rdm_request send = {.done = false};
        ssize_t rc;
        if (rdm_start_recv(r, &r->recv[0], from, token + 64, 1, (uint64_t)(5000 + distance)) != 0) {
            return -1;
        }
        do {
            rc = fi_tsend(r->ep, token, 1, rdm_descriptor(r, token), r->peer[to], (uint64_t)(5000 + distance), &send);
        } while (rc == -FI_EAGAIN && rdm_progress(r) == 0);
        if (rdm_said("fi_tsend", rc) != 0 || rdm_wait(r, &send) != 0 || rdm_wait(r, &r->recv[0]) != 0) {
            return -1;
        }
    }
    return 0;
}

/* ---- memory ---- */

static int rdm_register(rdm *r, void *p, size_t bytes) {
    int i = 0;
    while (i < RDM_REGIONS && r->region[i].mr != NULL) {
        i++;
    }
    if (i == RDM_REGIONS || (r->info->domain_attr->mr_mode & FI_MR_LOCAL) == 0) {
        return i == RDM_REGIONS ? rdm_said("one more region", -FI_ENOSPC) : 0;
    }
    r->region[i] = (rdm_region){.from = p, .bytes = bytes};
    return rdm_said("fi_mr_reg",
                    fi_mr_reg(r->domain, p, bytes, FI_SEND | FI_RECV, 0, (uint64_t)i + 1, 0, &r->region[i].mr, NULL));
}

static void rdm_give(void *state, void *memory) {
    rdm *r = state;
    for (int i = 0; i < RDM_REGIONS && memory != NULL; i++) {
        if (r->region[i].mr != NULL && r->region[i].from == memory) {
            fi_close(&r->region[i].mr->fid);
            r->region[i].mr = NULL;
        }
    }
    bench_memory_free(memory);
}

/* measure.h takes both buffers of a size here: the scratch memory of a ring is less than one of them. */
static void *rdm_take(void *state, size_t bytes) {
    rdm *r = state;
    void *p = bench_memory(bytes);
    if (p == NULL || rdm_register(r, p, bytes) != 0) {
        return NULL;
    }
    if (r->scratch_bytes < bytes + 4096) {
        rdm_give(r, r->scratch);
        r->scratch_bytes = bytes + 4096;
        r->scratch = bench_memory(r->scratch_bytes);
        if (r->scratch == NULL || rdm_register(r, r->scratch, r->scratch_bytes) != 0) {
            return NULL;
        }
        memset(r->scratch, 0, r->scratch_bytes);
    }
    return p;
}

/* ---- start ---- */

static struct fi_info *rdm_hints(void) {
    struct fi_info *hints = fi_allocinfo();
    const char *provider = getenv("DDL_BENCH_PROVIDER");
    if (hints == NULL) {
        return NULL;
    }
    hints->caps = FI_TAGGED;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->av_type = FI_AV_TABLE;
    hints->fabric_attr->prov_name = strdup(provider != NULL ? provider : "tcp;ofi_rxm");
    return hints;
}

static int rdm_open(rdm *r) {
    const char *node = getenv("DDL_BENCH_NODE");
    struct fi_info *hints = rdm_hints();
    int rc = fi_getinfo(FI_VERSION(1, 14), node != NULL ? node : "127.0.0.1", NULL, FI_SOURCE, hints, &r->info);
    fi_freeinfo(hints);
    if (rdm_said("fi_getinfo", rc) != 0) {
        return -1;
    }
    r->piece_bytes = r->info->ep_attr->max_msg_size < 1u << 30 ? r->info->ep_attr->max_msg_size : 1u << 30;
    r->segment_bytes = r->segment_bytes < r->piece_bytes ? r->segment_bytes : r->piece_bytes;
    bool sleeps = getenv("DDL_BENCH_SLEEPS") != NULL; /* it could: with a descriptor the provider polls another way */
    struct fi_cq_attr cq = {.format = FI_CQ_FORMAT_CONTEXT, .wait_obj = sleeps ? FI_WAIT_FD : FI_WAIT_NONE};
    struct fi_av_attr av = {.type = FI_AV_TABLE, .count = BENCH_MAX_RANKS};
    if (rdm_said("fi_fabric", fi_fabric(r->info->fabric_attr, &r->fabric, NULL)) != 0 ||
        rdm_said("fi_domain", fi_domain(r->fabric, r->info, &r->domain, NULL)) != 0 ||
        rdm_said("fi_av_open", fi_av_open(r->domain, &av, &r->av, NULL)) != 0 ||
        rdm_said("fi_cq_open", fi_cq_open(r->domain, &cq, &r->cq, NULL)) != 0 ||
        rdm_said("fi_endpoint", fi_endpoint(r->domain, r->info, &r->ep, NULL)) != 0 ||
        rdm_said("fi_ep_bind", fi_ep_bind(r->ep, &r->av->fid, 0)) != 0 ||
        rdm_said("fi_ep_bind", fi_ep_bind(r->ep, &r->cq->fid, FI_TRANSMIT | FI_RECV)) != 0) {
        return -1;
    }
    return rdm_said("fi_enable", fi_enable(r->ep));
}

/* Written under another name first, so that nobody reads half of it. */
static int rdm_publish(rdm *r, const char *folder) {
    char name[RDM_NAME_BYTES], path[600], made[600];
    size_t bytes = sizeof name;
    if (rdm_said("fi_getname", fi_getname(&r->ep->fid, name, &bytes)) != 0) {
        return -1;
    }
    snprintf(path, sizeof path, "%s/%d", folder, r->rank);
    snprintf(made, sizeof made, "%s/%d.new", folder, r->rank);
    FILE *file = fopen(made, "wb");
    if (file == NULL || fwrite(name, 1, bytes, file) != bytes || fclose(file) != 0 || rename(made, path) != 0) {
        perror(made);
        return -1;
    }
    return 0;
}

static int rdm_find(rdm *r, const char *folder, int peer) {
    char name[RDM_NAME_BYTES] = {0}, path[600];
    snprintf(path, sizeof path, "%s/%d", folder, peer);
    FILE *file = NULL;
    for (int tries = 0; tries < 30000 && (file = fopen(path, "rb")) == NULL; tries++) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    if (file == NULL || fread(name, 1, sizeof name, file) == 0) {
        fprintf(stderr, "fi_rdm: rank %d has no address in %s after 30 s\n", peer, path);
        return -1;
    }
    fclose(file);
    return fi_av_insert(r->av, name, 1, &r->peer[peer], 0, NULL) == 1 ? 0 : rdm_said("fi_av_insert", -FI_EINVAL);
}

static int rdm_join(rdm *r) {
    const char *folder = getenv("DDL_BENCH_STORE");
    int failed = folder != NULL && r->ranks <= BENCH_MAX_RANKS ? rdm_publish(r, folder) : -1;
    for (int i = 0; i < r->ranks && failed == 0; i++) {
        failed = rdm_find(r, folder, i);
    }
    return failed;
}

static void rdm_close(rdm *r) {
    rdm_give(r, r->scratch);
    fi_close(&r->ep->fid);
    fi_close(&r->cq->fid);
    fi_close(&r->av->fid);
    fi_close(&r->domain->fid);
    fi_close(&r->fabric->fid);
    fi_freeinfo(r->info);
}

int main(int argc, char **argv) {
    static rdm r;
    r.rank = rdm_number("RANK", 0);
    r.ranks = rdm_number("WORLD_SIZE", 0);
    r.segment_bytes = (size_t)rdm_number("DDL_BENCH_SEGMENT", 1 << 20);
    r.yield_after = r.ranks > sysconf(_SC_NPROCESSORS_ONLN) ? 1 : 16;
    bench_peer peer = {.rank = r.rank,
                       .ranks = r.ranks,
                       .state = &r,
                       .sync = rdm_sync,
                       .run = rdm_run,
                       .take = rdm_take,
                       .give = rdm_give};
    if (r.ranks < 2 || rdm_open(&r) != 0 || rdm_join(&r) != 0) {
        fprintf(stderr, "fi_rdm: rank %d of %d could not join\n", r.rank, r.ranks);
        return 1;
    }
    int rc = bench_main(&peer, argc, argv);
    if (rc == 0) {
        rdm_close(&r);
    }
    return rc;
}

/* plan_sim.h: runs the plans of all ranks of a call together, without a network, and checks what the header of
 * src/plan.h promises. It shares no code with the builder: dependencies are read from the finished plans, races are
 * found by comparing all accesses, results are compared with plain loops. */
#ifndef PLAN_SIM_H
#define PLAN_SIM_H

#include "../src/tune.h"

#define SIM_MAX 64
#define SIM_MAX_STEPS 4096 /* of one rank in the cases that are tried */

/* What the elements are: u32 added; affine maps over a prime, composed (associative, not commutative); f32 added. */
typedef enum sim_op { SIM_U32, SIM_AFFINE, SIM_F32 } sim_op;

typedef struct sim_case {
    const ddl__algo *algo;
    ddl_kind kind;
    int32_t n, root;
    int64_t count, chunk_bytes;
    bool fence;
    sim_op op;
    uint64_t in_place; /* by rank */
    int64_t counts[SIM_MAX], offsets[SIM_MAX];
    int64_t send_counts[SIM_MAX][SIM_MAX], send_offsets[SIM_MAX][SIM_MAX]; /* of all_to_allv, by rank */
    int64_t recv_counts[SIM_MAX][SIM_MAX], recv_offsets[SIM_MAX][SIM_MAX];
    int32_t host_of[SIM_MAX];
    int64_t move_bytes;     /* tensors are on devices, and go by the host in such pieces; 0: they are not */
    const ddl__algo *inner; /* then: what goes between hosts */
    bool straight;          /* or not by the host at all */
    bool scaled;            /* inputs are scaled before they are reduced: see sim_scale */
    bool natives;           /* devices run collectives inside hosts */
    uint64_t seed;
} sim_case;

typedef struct sim_node {
    int32_t rank;
    uint32_t step;
    uint32_t match; /* the node of the other end of a message */
    uint32_t waits;
    int32_t native; /* of a native step: the how many-th of its rank */
    uint64_t known; /* ranks this step has heard of, directly or not */
    int32_t depth;  /* messages one after the other until this step */
    unsigned char *message; /* data that arrived */
    bool posted, sent, arrived, done;
} sim_node;

typedef struct sim_rank {
    ddl__plan_args args;
    ddl__plan plan;
    int32_t natives, natives_ready;
    int64_t kept, most_kept; /* bytes that came before their receive was let go */
    unsigned char *there; /* scratch on the device */
    unsigned char *user, *before, *expected, *tmp; /* user: IN and OUT; before and expected: images of it */
    int64_t user_bytes, at[2], bytes[2];           /* where IN and OUT are in user */
    uint32_t first;                                /* node of step 0 */
    int64_t sent_bytes;
} sim_rank;

typedef struct sim {
    const sim_case *c;
    ddl__base base;
    sim_rank rank[SIM_MAX];
    sim_node *nodes;
    uint32_t node_count;
    uint64_t random;
    char error[300];
} sim;

static uint64_t sim_random(uint64_t *state) {
    *state += 0x9E3779B97F4A7C15ull;
    uint64_t z = (*state ^ (*state >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

/* Returns false, so that a check is `return sim_fail(...)`; the first complaint stays. */
__attribute__((format(printf, 2, 3))) static bool sim_fail(sim *s, const char *format, ...) {
    if (s->error[0] == '\0') {
        va_list args;
        va_start(args, format);
        vsnprintf(s->error, sizeof s->error, format, args);
        va_end(args);
    }
    return false;
}

static int32_t sim_element_bytes(sim_op op) { return op == SIM_AFFINE ? 8 : 4; }

/* dst = a op b for one element; dst may be a or b. An affine map is (factor, summand) modulo 65521. */
static void sim_combine(sim_op op, void *dst, const void *a, const void *b) {
    uint32_t x[2] = {0, 0}, y[2] = {0, 0}, z[2];
    memcpy(x, a, (size_t)sim_element_bytes(op));
    memcpy(y, b, (size_t)sim_element_bytes(op));
    if (op == SIM_AFFINE) {
        z[0] = x[0] % 65521 * (y[0] % 65521) % 65521;
        z[1] = (x[0] % 65521 * (y[1] % 65521) % 65521 + x[1] % 65521) % 65521;
    } else if (op == SIM_U32) {
        z[0] = x[0] + y[0];
    } else {
        float f, g;
        memcpy(&f, x, 4);
        memcpy(&g, y, 4);
        f += g;
        memcpy(z, &f, 4);
    }
    memcpy(dst, z, (size_t)sim_element_bytes(op));
}

static void sim_combine_all(sim_op op, unsigned char *dst, const unsigned char *a, const unsigned char *b,
                            int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += sim_element_bytes(op)) {
        sim_combine(op, dst + i, a + i, b + i);
    }
}

/* What stands for a scaled sum: u32 times 3, f32 times 2; affine maps are not scaled. */
static void sim_scale(sim_op op, unsigned char *dst, const unsigned char *src, int64_t bytes) {
    memmove(dst, src, (size_t)bytes);
    for (int64_t i = 0; op != SIM_AFFINE && i < bytes; i += 4) {
        uint32_t x;
        float f;
        memcpy(&x, src + i, 4);
        memcpy(&f, src + i, 4);
        x *= 3;
        f *= 2;
        memcpy(dst + i, op == SIM_U32 ? (const void *)&x : &f, 4);
    }
}

/* ---- setting up ---- */

static int64_t sim_extent(const sim_case *c, const int64_t *counts, const int64_t *offsets) {
    int64_t end = 0;
    for (int32_t r = 0; r < c->n; r++) {
        end = DDL__MAX(end, offsets[r] + counts[r]);
    }
    return end;
}

/* Elements that IN and OUT have at a rank; 0 for a tensor that is not looked at there. */
static void sim_lengths(const sim_case *c, int32_t rank, int64_t *in, int64_t *out) {
    int64_t whole = ddl__kind_is_v(c->kind) ? sim_extent(c, c->counts, c->offsets) : c->n * c->count;
    int64_t mine = ddl__kind_is_v(c->kind) ? c->counts[rank] : c->count;
    *in = *out = c->count;
    switch (c->kind) {
    case DDL_BARRIER:
        *in = *out = 0;
        break;
    case DDL_REDUCE:
        *out = rank == c->root ? c->count : 0;
        break;
    case DDL_GATHER:
    case DDL_GATHERV:
        *in = mine;
        *out = rank == c->root ? whole : 0;
        break;
    case DDL_SCATTER:
    case DDL_SCATTERV:
        *in = rank == c->root ? whole : 0;
        *out = mine;
        break;
    case DDL_ALL_GATHER:
    case DDL_ALL_GATHERV:
        *in = mine;
        *out = whole;
        break;
    case DDL_REDUCE_SCATTER:
    case DDL_REDUCE_SCATTERV:
        *in = whole;
        *out = mine;
        break;
    case DDL_ALL_TO_ALL:
        *in = *out = whole;
        break;
    case DDL_ALL_TO_ALLV:
        *in = sim_extent(c, c->send_counts[rank], c->send_offsets[rank]);
        *out = sim_extent(c, c->recv_counts[rank], c->recv_offsets[rank]);
        break;
    default:
        break;
    }
}

/* IN and OUT apart, or the smaller one at the rank's own part of the larger one. */
static void sim_layout(const sim_case *c, sim_rank *r) {
    int64_t size = sim_element_bytes(c->op), in, out;
    int32_t rank = r->args.rank;
    sim_lengths(c, rank, &in, &out);
    int64_t own = (ddl__kind_is_v(c->kind) && c->kind != DDL_ALL_TO_ALLV ? c->offsets[rank] : rank * c->count) * size;
    r->bytes[DDL__IN] = in * size;
    r->bytes[DDL__OUT] = out * size;
    r->at[DDL__OUT] = r->bytes[DDL__IN] + 32;
    ddl_kind kind = ddl__kind_base(c->kind);
    if (r->args.in_place || kind == DDL_BROADCAST) {
        r->at[DDL__IN] = kind == DDL_GATHER || kind == DDL_ALL_GATHER ? own : 0;
        r->at[DDL__OUT] = kind == DDL_SCATTER || kind == DDL_REDUCE_SCATTER ? own : 0;
    }
    r->user_bytes = DDL__MAX(r->at[0] + r->bytes[0], r->at[1] + r->bytes[1]) + 32;
}

static void sim_fill(sim *s, sim_rank *r) {
    for (int64_t i = 0; i < r->user_bytes; i += 4) {
        uint32_t word = (uint32_t)sim_random(&s->random);
        if (s->c->op == SIM_F32) {
            float f = (float)((double)word / 4294967296.0 - 0.5) * (float)(1 << (word % 12));
            memcpy(&word, &f, 4);
        }
        memcpy(r->user + i, &word, (size_t)DDL__MIN(4, r->user_bytes - i));
    }
    memcpy(r->before, r->user, (size_t)r->user_bytes);
    memcpy(r->expected, r->user, (size_t)r->user_bytes);
}

static void sim_args(const sim_case *c, int32_t rank, ddl__plan_args *args) {
    bool at_root_only = c->kind == DDL_REDUCE || ddl__kind_base(c->kind) == DDL_GATHER ||
                        ddl__kind_base(c->kind) == DDL_SCATTER;
    bool all_to_allv = c->kind == DDL_ALL_TO_ALLV;
    *args = (ddl__plan_args){.kind = c->kind,
                             .size = c->n,
                             .rank = rank,
                             .root = c->root,
                             .element_bytes = sim_element_bytes(c->op),
                             .count = c->count,
                             .in_place = (c->in_place >> rank & 1) != 0 && (!at_root_only || rank == c->root),
                             .commutative = c->op != SIM_AFFINE,
                             .fence = c->fence,
                             .chunk_bytes = c->chunk_bytes,
                             .counts = all_to_allv ? c->send_counts[rank] : c->counts,
                             .offsets = all_to_allv ? c->send_offsets[rank] : c->offsets,
                             .recv_counts = c->recv_counts[rank],
                             .recv_offsets = c->recv_offsets[rank],
                             .host_of = c->host_of,
                             .on_device = c->move_bytes > 0,
                             .move_bytes = c->move_bytes,
                             .inner = c->inner,
                             .straight = c->straight,
                             .folds = c->straight,
                             .scaled = c->scaled,
                             .native_s = c->natives ? 1e-6 : 0};
}

static bool sim_open(sim *s, const sim_case *c) {
    *s = (sim){.c = c, .random = c->seed};
    for (int32_t i = 0; i < c->n; i++) {
        sim_rank *r = &s->rank[i];
        sim_args(c, i, &r->args);
        sim_layout(c, r);
        if (ddl__plan_make(&s->base, c->algo, &r->args, &r->plan) != DDL_OK) {
            return sim_fail(s, "rank %d has no plan", i);
        }
        r->first = s->node_count;
        s->node_count += r->plan.step_count;
        r->user = malloc((size_t)r->user_bytes);
        r->before = malloc((size_t)r->user_bytes);
        r->expected = malloc((size_t)r->user_bytes);
        r->tmp = malloc((size_t)r->plan.tmp_bytes + 1);
        memset(r->tmp, 0xA5, (size_t)r->plan.tmp_bytes + 1);
        r->there = malloc((size_t)r->plan.there_bytes + 1);
        memset(r->there, 0xA5, (size_t)r->plan.there_bytes + 1);
        sim_fill(s, r);
    }
    s->nodes = calloc(s->node_count + 1, sizeof *s->nodes);
    for (int32_t i = 0; i < c->n; i++) {
        for (uint32_t k = 0; k < s->rank[i].plan.step_count; k++) {
            bool native = s->rank[i].plan.steps[k].kind == DDL__NATIVE;
            s->nodes[s->rank[i].first + k] = (sim_node){.rank = i, .step = k, .native = s->rank[i].natives};
            s->rank[i].natives += native;
        }
    }
    return true;
}

static void sim_close(sim *s) {
    for (int32_t i = 0; i < s->c->n; i++) {
        sim_rank *r = &s->rank[i];
        ddl__plan_free(&s->base, &r->plan);
        free(r->user);
        free(r->before);
        free(r->expected);
        free(r->tmp);
        free(r->there);
    }
    for (uint32_t i = 0; i < s->node_count; i++) {
        free(s->nodes[i].message);
    }
    free(s->nodes);
}

static ddl__step *sim_step(sim *s, uint32_t node) {
    return &s->rank[s->nodes[node].rank].plan.steps[s->nodes[node].step];
}

/* ---- native steps: a collective of the ranks of a host, whose j-th native steps belong together ---- */

static int32_t sim_on_host(const sim *s, int32_t rank) {
    int32_t n = 0;
    for (int32_t r = 0; r < s->c->n; r++) {
        n += s->c->host_of[r] == s->c->host_of[rank];
    }
    return n;
}

/* What it reads and writes, in bytes; step->bytes are those of the smaller tensor. */
static int64_t sim_reads(const sim *s, const sim_rank *r, const ddl__step *step) {
    bool many = step->kind == DDL__NATIVE && step->slot == DDL_REDUCE_SCATTER;
    if (step->kind == DDL__FOLD) {
        return step->slot * ((step->bytes + 63) / 64 * 64);
    }
    return step->bytes * (many ? sim_on_host(s, r->args.rank) : 1);
}

static int64_t sim_writes(const sim *s, const sim_rank *r, const ddl__step *step) {
    bool many = step->kind == DDL__NATIVE && step->slot == DDL_ALL_GATHER;
    return step->bytes * (many ? sim_on_host(s, r->args.rank) : 1);
}

/* The nodes of the same native step on all ranks of its host, in the order of ranks. */
static int32_t sim_partners(sim *s, uint32_t node, uint32_t *out) {
    int32_t count = 0, host = s->c->host_of[s->nodes[node].rank];
    for (int32_t r = 0; r < s->c->n; r++) {
        for (uint32_t k = 0; s->c->host_of[r] == host && k < s->rank[r].plan.step_count; k++) {
            uint32_t at = s->rank[r].first + k;
            if (sim_step(s, at)->kind == DDL__NATIVE && s->nodes[at].native == s->nodes[node].native) {
                out[count++] = at;
            }
        }
    }
    return count;
}

/* Native steps of a rank stand in one order. */
static bool sim_check_natives(sim *s, const sim_rank *r) {
    bool *after = calloc(r->plan.step_count + 1, sizeof *after), ok = true; /* the last native step so far */
    int32_t seen = 0;
    for (uint32_t k = 0; ok && k < r->plan.step_count; k++) {
        const ddl__step *step = &r->plan.steps[k];
        if (step->kind == DDL__NATIVE) {
            ok = seen++ == 0 || after[k] || sim_fail(s, "rank %d: native step %u may begin before the last", r->args.rank, k);
            memset(after, 0, r->plan.step_count);
            after[k] = true;
        }
        for (uint32_t i = 0; i < step->next_count; i++) {
            after[r->plan.nexts[step->first_next + i]] |= after[k];
        }
    }
    free(after);
    return ok;
}

/* All ranks of a host have the same native steps; and only these and moves touch what is on the device. */
static bool sim_check_devices(sim *s, sim_rank *r) {
    uint32_t partners[SIM_MAX];
    for (uint32_t k = 0; k < r->plan.step_count; k++) {
        const ddl__step *step = &r->plan.steps[k];
        bool from = step->kind != DDL__RECV && step->src_space != DDL__TMP;
        bool to = step->kind != DDL__SEND && step->dst_space != DDL__TMP;
        if (step->kind == DDL__NATIVE) {
            int32_t count = sim_partners(s, r->first + k, partners);
            for (int32_t i = 0; i < count; i++) {
                const ddl__step *other = sim_step(s, partners[i]);
                if (other->slot != step->slot || other->bytes != step->bytes || other->peer != step->peer) {
                    return sim_fail(s, "rank %d step %u is another native step elsewhere", r->args.rank, k);
                }
            }
            if (count != sim_on_host(s, r->args.rank) || !from || !to) {
                return sim_fail(s, "rank %d step %u is not on the device of all", r->args.rank, k);
            }
        } else if (r->plan.straight ? r->plan.tmp_bytes > 0 || step->kind == DDL__MOVE
                                    : step->bytes > 0 && (step->kind == DDL__MOVE ? from == to : from || to)) {
            return sim_fail(s, "rank %d step %u of kind %d works on the device", r->args.rank, k, step->kind);
        }
    }
    return true;
}

/* Scratch of an exchange: of three pieces, again where they are scaled, and parts rounded up. What comes for the second
 * piece and the third waits for no data of a peer. */
static bool sim_check_exchange(sim *s, sim_rank *r) {
    const sim_case *c = s->c;
    int64_t piece = DDL__MAX(c->move_bytes, c->n * (int64_t)r->args.element_bytes), receives = 0, at_once = 0;
    int64_t bound = DDL__MOVE_SLOTS * (1 + c->scaled) * (piece + c->n * (64 + (int64_t)r->args.element_bytes));
    bool *data = calloc(r->plan.step_count + 1, sizeof *data);
    for (uint32_t k = 0; k < r->plan.step_count; k++) {
        const ddl__step *step = &r->plan.steps[k];
        bool comes = step->kind == DDL__RECV && step->bytes > 0;
        receives += comes && step->dst_space == DDL__THERE;
        at_once += comes && step->dst_space == DDL__THERE && !data[k];
        for (uint32_t i = 0; i < step->next_count; i++) {
            data[r->plan.nexts[step->first_next + i]] |= data[k] || comes;
        }
    }
    free(data);
    if (r->plan.there_bytes > bound) {
        return sim_fail(s, "rank %d has %lld bytes of scratch on its device, in pieces of %lld", r->args.rank,
                        (long long)r->plan.there_bytes, (long long)c->move_bytes);
    }
    return at_once >= DDL__MIN(receives, DDL__MOVE_SLOTS * (c->n - 1)) ||
           sim_fail(s, "rank %d: %lld of %lld parts come at once", r->args.rank, (long long)at_once, (long long)receives);
}

static bool sim_receives(const ddl__step *step) { return step->kind == DDL__RECV || step->kind == DDL__RECV_REDUCE; }

/* ---- what can be seen without running ---- */

static bool sim_check_range(sim *s, sim_rank *r, uint32_t index, uint8_t space, int64_t offset, int64_t bytes) {
    int64_t size = space == DDL__TMP     ? r->plan.tmp_bytes
                   : space == DDL__THERE ? r->plan.there_bytes
                                         : r->bytes[space];
    if (bytes == 0 || (offset >= 0 && offset + bytes <= size)) {
        return true;
    }
    return sim_fail(s, "rank %d step %u leaves space %d: %lld + %lld of %lld", r->args.rank, index, space,
                    (long long)offset, (long long)bytes, (long long)size);
}

/* Steps stand in an order in which they could run, inside their memory, and count their predecessors rightly. */
static bool sim_check_steps(sim *s, sim_rank *r) {
    static uint32_t waits[SIM_MAX_STEPS];
    memset(waits, 0, sizeof waits);
    if (r->plan.step_count > SIM_MAX_STEPS) {
        return sim_fail(s, "rank %d has %u steps", r->args.rank, r->plan.step_count);
    }
    for (uint32_t k = 0; k < r->plan.step_count; k++) {
        ddl__step *step = &r->plan.steps[k];
        if (step->waits != waits[k]) {
            return sim_fail(s, "rank %d step %u waits for %u steps, has %u", r->args.rank, k, step->waits, waits[k]);
        }
        for (uint32_t i = 0; i < step->next_count; i++) {
            uint32_t next = r->plan.nexts[step->first_next + i];
            if (next <= k || next >= r->plan.step_count) {
                return sim_fail(s, "rank %d step %u lets go step %u", r->args.rank, k, next);
            }
            waits[next]++;
        }
        if (step->kind != DDL__RECV && !sim_check_range(s, r, k, step->src_space, step->src, sim_reads(s, r, step))) {
            return false;
        }
        bool lost = step->kind == DDL__NATIVE && step->slot == DDL_REDUCE && step->dst_space == DDL__OUT &&
                    r->bytes[DDL__OUT] == 0; /* not its root, which has no OUT */
        if (step->kind != DDL__SEND && !lost &&
            !sim_check_range(s, r, k, step->dst_space, step->dst, sim_writes(s, r, step))) {
            return false;
        }
        if (step->kind != DDL__SEND && step->dst_space == DDL__IN && step->bytes > 0 &&
            s->c->kind != DDL_BROADCAST) {
            return sim_fail(s, "rank %d step %u writes IN", r->args.rank, k);
        }
    }
    return true;
}

typedef struct sim_end {
    uint64_t pair; /* sender, receiver */
    uint32_t slot, node;
    bool receive;
} sim_end;

static int sim_compare_ends(const void *a, const void *b) {
    const sim_end *x = a, *y = b;
    if (x->pair != y->pair) {
        return x->pair < y->pair ? -1 : 1;
    }
    if (x->slot != y->slot) {
        return x->slot < y->slot ? -1 : 1;
    }
    return (int)x->receive - (int)y->receive;
}

/* Every send has exactly one receive of the same size. */
static bool sim_check_pairs(sim *s) {
    sim_end *ends = malloc((s->node_count + 1) * sizeof *ends);
    uint32_t count = 0;
    for (uint32_t i = 0; i < s->node_count; i++) {
        ddl__step *step = sim_step(s, i);
        uint64_t rank = (uint64_t)s->nodes[i].rank, peer = (uint64_t)(uint32_t)step->peer;
        if (step->kind == DDL__SEND) {
            ends[count++] = (sim_end){rank << 32 | peer, step->slot, i, false};
        } else if (sim_receives(step)) {
            ends[count++] = (sim_end){peer << 32 | rank, step->slot, i, true};
        }
    }
    qsort(ends, count, sizeof *ends, sim_compare_ends);
    bool ok = count % 2 == 0 || sim_fail(s, "an odd number of message ends");
    for (uint32_t i = 0; ok && i < count; i += 2) {
        const sim_end *a = &ends[i], *b = &ends[i + 1];
        if (a->pair != b->pair || a->slot != b->slot || a->receive || !b->receive) {
            ok = sim_fail(s, "message %d -> %d slot %u has no other end", (int)(a->pair >> 32), (int)(uint32_t)a->pair,
                          a->slot);
        } else if (sim_step(s, a->node)->bytes != sim_step(s, b->node)->bytes) {
            ok = sim_fail(s, "message %d -> %d slot %u: %lld bytes sent, %lld received", (int)(a->pair >> 32),
                          (int)(uint32_t)a->pair, a->slot, (long long)sim_step(s, a->node)->bytes,
                          (long long)sim_step(s, b->node)->bytes);
        } else {
            s->nodes[a->node].match = b->node;
            s->nodes[b->node].match = a->node;
        }
    }
    free(ends);
    return ok;
}

typedef struct sim_access {
    int64_t begin, end;
    uint32_t step;
    bool write;
} sim_access;

static int sim_compare_access(const void *a, const void *b) {
    const sim_access *x = a, *y = b;
    return x->begin != y->begin ? (x->begin < y->begin ? -1 : 1) : (int)(x->step > y->step) - (int)(x->step < y->step);
}

static void sim_add_access(const sim *s, const sim_rank *r, sim_access *list, uint32_t *count, uint32_t k, bool write) {
    const ddl__step *step = &r->plan.steps[k];
    uint8_t space = write ? step->dst_space : step->src_space;
    int64_t bytes = write ? sim_writes(s, r, step) : sim_reads(s, r, step);
    /* TMP comes after user memory in one line of addresses, then THERE. */
    int64_t begin = (write ? step->dst : step->src) + (space == DDL__TMP     ? r->user_bytes
                                                       : space == DDL__THERE ? r->user_bytes + r->plan.tmp_bytes
                                                                             : r->at[space]);
    if (bytes > 0) {
        list[(*count)++] = (sim_access){begin, begin + bytes, k, write};
    }
}

/* Two steps that touch the same bytes, one writing, must be ordered by dependencies of this rank. */
static bool sim_check_races(sim *s, sim_rank *r) {
    uint32_t n = r->plan.step_count, words = (n + 63) / 64, count = 0;
    uint64_t *past = calloc((size_t)n * words + 1, sizeof *past); /* past[k]: steps that end before k starts */
    sim_access *list = malloc((2 * (size_t)n + 1) * sizeof *list);
    for (uint32_t k = 0; k < n; k++) {
        const ddl__step *step = &r->plan.steps[k];
        for (uint32_t i = 0; i < step->next_count; i++) {
            uint64_t *next = past + (size_t)r->plan.nexts[step->first_next + i] * words;
            for (uint32_t w = 0; w < words; w++) {
                next[w] |= past[(size_t)k * words + w];
            }
            next[k / 64] |= 1ull << (k % 64);
        }
        if (step->kind != DDL__RECV) {
            sim_add_access(s, r, list, &count, k, false);
        }
        if (step->kind != DDL__SEND) {
            sim_add_access(s, r, list, &count, k, true);
        }
    }
    qsort(list, count, sizeof *list, sim_compare_access);
    bool ok = true;
    for (uint32_t i = 0; ok && i < count; i++) {
        for (uint32_t j = i + 1; ok && j < count && list[j].begin < list[i].end; j++) {
            uint32_t a = DDL__MIN(list[i].step, list[j].step), b = DDL__MAX(list[i].step, list[j].step);
            if (a != b && (list[i].write || list[j].write) && !(past[(size_t)b * words + a / 64] >> (a % 64) & 1)) {
                ok = sim_fail(s, "rank %d: steps %u and %u race", r->args.rank, a, b);
            }
        }
    }
    free(past);
    free(list);
    return ok;
}

static uint64_t sim_everybody(const sim *s) { return s->c->n == 64 ? ~0ull : (1ull << s->c->n) - 1; }

/* Whom a step that writes OUT must have heard of: see the header of plan.h. */
static uint64_t sim_must_know(const sim *s, const sim_rank *r) {
    ddl_kind kind = ddl__kind_base(s->c->kind);
    bool rooted = kind == DDL_BROADCAST || kind == DDL_REDUCE || kind == DDL_GATHER || kind == DDL_SCATTER ||
                  kind == DDL_SCAN || kind == DDL_EXSCAN;
    if (!rooted || r->plan.fenced) {
        return sim_everybody(s);
    }
    uint64_t peers = 0;
    for (uint32_t k = 0; k < r->plan.step_count; k++) {
        if (sim_receives(&r->plan.steps[k])) {
            peers |= 1ull << r->plan.steps[k].peer;
        }
    }
    return peers;
}

/* Counts what a fenced plan sends to ranks it has not heard of: with too little memory there, that is lost. */
static bool sim_check_eager(sim *s, const sim_node *node, int64_t *eager) {
    const ddl__step *step = &s->rank[node->rank].plan.steps[node->step];
    if (!s->rank[node->rank].plan.fenced || step->kind != DDL__SEND || (node->known >> step->peer & 1) != 0) {
        return true;
    }
    int64_t *sent = &eager[node->rank * SIM_MAX + step->peer];
    return (*sent += step->bytes) <= DDL__EAGER_BYTES ||
           sim_fail(s, "rank %d sends %lld bytes to rank %d, of which it has not heard", node->rank, (long long)*sent,
                    step->peer);
}

/* Follows dependencies and messages in an order that respects both; a circle would be a deadlock. */
static bool sim_check_knowledge(sim *s) {
    uint32_t *queue = malloc((2 * (size_t)s->node_count + 1) * sizeof *queue), head = 0, tail = 0, passed = 0;
    int64_t *eager = calloc((size_t)s->c->n * SIM_MAX, sizeof *eager);
    uint64_t must[SIM_MAX];
    for (int32_t i = 0; i < s->c->n; i++) {
        must[i] = sim_must_know(s, &s->rank[i]);
    }
    for (uint32_t i = 0; i < s->node_count; i++) {
        sim_node *node = &s->nodes[i];
        node->known = 1ull << node->rank;
        node->depth = 0;
        node->posted = node->arrived = false;
        node->waits = sim_step(s, i)->waits + (sim_receives(sim_step(s, i)) ? 1 : 0);
        if (node->waits == 0) {
            queue[tail++] = i;
        }
    }
    bool ok = true;
    while (ok && head < tail) {
        uint32_t at = queue[head++], partners[SIM_MAX];
        sim_node *node = &s->nodes[at];
        const ddl__step *step = sim_step(s, at);
        if (step->kind == DDL__NATIVE && !node->posted) { /* goes on when all have come to it */
            int32_t count = sim_partners(s, at, partners), come = 0;
            node->arrived = true;
            for (int32_t i = 0; i < count; i++) {
                come += s->nodes[partners[i]].arrived;
                node->known |= s->nodes[partners[i]].arrived ? s->nodes[partners[i]].known : 0;
            }
            for (int32_t i = 0; come == count && i < count; i++) {
                s->nodes[partners[i]].known = node->known;
                s->nodes[partners[i]].posted = true;
                queue[tail++] = partners[i];
            }
            passed++;
            continue;
        }
        ok = sim_check_eager(s, node, eager);
        if (step->kind != DDL__SEND && step->dst_space == DDL__OUT && step->bytes > 0 &&
            (node->known & must[node->rank]) != must[node->rank]) {
            ok = sim_fail(s, "rank %d step %u writes OUT knowing %llx of %llx", node->rank, node->step,
                          (unsigned long long)node->known, (unsigned long long)must[node->rank]);
        }
        for (uint32_t i = 0; i <= step->next_count; i++) {
            bool message = i == step->next_count;
            if (message && step->kind != DDL__SEND) {
                continue;
            }
            const ddl__plan *plan = &s->rank[node->rank].plan;
            uint32_t next = message ? node->match : s->rank[node->rank].first + plan->nexts[step->first_next + i];
            s->nodes[next].known |= node->known;
            s->nodes[next].depth = DDL__MAX(s->nodes[next].depth, node->depth + message);
            if (--s->nodes[next].waits == 0) {
                queue[tail++] = next;
            }
        }
    }
    ok = ok && (head - passed == s->node_count || sim_fail(s, "steps wait for each other in a circle"));
    free(queue);
    free(eager);
    return ok;
}

/* ---- running ---- */

/* EAGER: a send ends at once. LATE: its memory is read at any later time, and it ends then. SYNC: it ends when its
 * receive has been let go, and its memory is read then. */
typedef enum sim_mode { SIM_EAGER, SIM_LATE, SIM_SYNC } sim_mode;

typedef struct sim_run {
    sim *s;
    sim_mode mode;
    uint32_t *todo; /* nodes that may go on: steps let go, messages in flight */
    uint32_t todo_count, done_count;
} sim_run;

static unsigned char *sim_at(sim_rank *r, uint8_t space, int64_t offset) {
    return (space == DDL__TMP ? r->tmp : space == DDL__THERE ? r->there : r->user + r->at[space]) + offset;
}

static void sim_finish(sim_run *run, uint32_t at) {
    sim *s = run->s;
    const ddl__step *step = sim_step(s, at);
    const sim_rank *r = &s->rank[s->nodes[at].rank];
    s->nodes[at].done = true;
    run->done_count++;
    for (uint32_t i = 0; i < step->next_count; i++) {
        uint32_t next = r->first + r->plan.nexts[step->first_next + i];
        if (--s->nodes[next].waits == 0) {
            run->todo[run->todo_count++] = next;
        }
    }
}

/* The result of a step as if the source were read and the target written in one go. */
static void sim_apply(sim *s, uint32_t at, const unsigned char *message) {
    const ddl__step *step = sim_step(s, at);
    sim_rank *r = &s->rank[s->nodes[at].rank];
    if (step->bytes == 0) {
        return;
    }
    unsigned char *dst = sim_at(r, step->dst_space, step->dst), *src = sim_at(r, step->src_space, step->src);
    bool turned = step->flags != 0;
    switch (step->kind) {
    case DDL__RECV:
        memcpy(dst, message, (size_t)step->bytes);
        break;
    case DDL__RECV_REDUCE:
        sim_combine_all(s->c->op, dst, turned ? message : src, turned ? src : message, step->bytes);
        break;
    case DDL__FOLD: {
        int64_t room = (step->bytes + 63) / 64 * 64;
        memmove(dst, src, (size_t)step->bytes);
        for (int32_t i = 1; i < (int32_t)step->slot; i++) {
            sim_combine_all(s->c->op, dst, dst, src + i * room, step->bytes);
        }
        break;
    }
    case DDL__COPY:
        if (step->flags == DDL__SCALED) {
            sim_scale(s->c->op, dst, src, step->bytes);
            break;
        }
    /* fall through */
    case DDL__MOVE:
        memmove(dst, src, (size_t)step->bytes);
        if (step->kind == DDL__MOVE && step->src_space == DDL__TMP) {
            memset(src, 0x5a, (size_t)step->bytes); /* an average is divided there: whoever sends it after that, sends less */
        }
        break;
    default:
        sim_combine_all(s->c->op, dst, turned ? dst : src, turned ? src : dst, step->bytes);
        break;
    }
}

/* Reads a send's memory into the message of its receive. */
static void sim_read(sim *s, uint32_t send) {
    const ddl__step *step = sim_step(s, send);
    sim_rank *r = &s->rank[s->nodes[send].rank];
    sim_node *receive = &s->nodes[s->nodes[send].match];
    free(receive->message);
    receive->message = malloc((size_t)step->bytes + 1);
    if (step->bytes > 0) {
        memcpy(receive->message, sim_at(r, step->src_space, step->src), (size_t)step->bytes);
    }
    r->sent_bytes += step->bytes;
}

/* A native step that all ranks of its host have come to: reads everything, then writes everything. */
static void sim_native(sim_run *run, const uint32_t *nodes, int32_t count) {
    sim *s = run->s;
    const ddl__step *first = sim_step(s, nodes[0]);
    size_t bytes = (size_t)first->bytes;
    unsigned char *sums = malloc(bytes * (size_t)count + 1), *all = malloc(bytes * (size_t)count + 1);
    bool scatters = first->slot == DDL_REDUCE_SCATTER, gathers = first->slot == DDL_ALL_GATHER;
    for (int32_t i = 0; i < count; i++) {
        const ddl__step *step = sim_step(s, nodes[i]);
        const unsigned char *src = sim_at(&s->rank[s->nodes[nodes[i]].rank], step->src_space, step->src);
        size_t reads = scatters ? bytes * (size_t)count : bytes;
        if (gathers) {
            memcpy(all + bytes * (size_t)i, src, bytes);
        } else if (first->slot == DDL_BROADCAST) {
            memcpy(i == first->peer ? sums : all, src, bytes);
        } else if (i == 0) {
            memcpy(sums, src, reads);
        } else {
            sim_combine_all(s->c->op, sums, sums, src, (int64_t)reads);
        }
    }
    for (int32_t i = 0; i < count; i++) {
        const ddl__step *step = sim_step(s, nodes[i]);
        unsigned char *dst = sim_at(&s->rank[s->nodes[nodes[i]].rank], step->dst_space, step->dst);
        if (gathers) {
            memcpy(dst, all, bytes * (size_t)count);
        } else if (first->slot != DDL_REDUCE || i == first->peer) {
            memcpy(dst, sums + (scatters ? bytes * (size_t)i : 0), bytes);
        }
        sim_finish(run, nodes[i]);
    }
    free(sums);
    free(all);
}

static void sim_deliver(sim_run *run, uint32_t receive) {
    sim_node *node = &run->s->nodes[receive];
    sim_rank *r = &run->s->rank[node->rank];
    if (node->posted != node->arrived) { /* data that waits for its receive is kept */
        r->kept += node->arrived ? sim_step(run->s, receive)->bytes : 0;
        r->most_kept = DDL__MAX(r->most_kept, r->kept);
    }
    if (node->posted && node->arrived) {
        sim_apply(run->s, receive, node->message);
        sim_finish(run, receive);
    }
}

/* A send comes up twice: when it is let go, and as a message in flight. */
static void sim_go_send(sim_run *run, uint32_t at) {
    sim_node *node = &run->s->nodes[at], *receive = &run->s->nodes[node->match];
    if (!node->sent) {
        node->sent = true;
        if (run->mode == SIM_EAGER) {
            sim_read(run->s, at);
            sim_finish(run, at);
        }
        if (run->mode != SIM_SYNC || receive->posted) {
            run->todo[run->todo_count++] = at;
        }
        return;
    }
    if (run->mode != SIM_EAGER) {
        sim_read(run->s, at);
        sim_finish(run, at);
    }
    receive->arrived = true;
    sim_deliver(run, node->match);
}

static void sim_go(sim_run *run, uint32_t at) {
    sim_node *node = &run->s->nodes[at];
    const ddl__step *step = sim_step(run->s, at);
    if (step->kind == DDL__SEND) {
        sim_go_send(run, at);
    } else if (step->kind == DDL__NATIVE) {
        uint32_t partners[SIM_MAX];
        int32_t count = sim_partners(run->s, at, partners), come = 0;
        node->posted = true;
        for (int32_t i = 0; i < count; i++) {
            come += run->s->nodes[partners[i]].posted;
        }
        if (come == count) {
            sim_native(run, partners, count);
        }
    } else if (sim_receives(step)) {
        node->posted = true;
        run->s->rank[node->rank].kept -= node->arrived ? step->bytes : 0;
        if (run->mode == SIM_SYNC && run->s->nodes[node->match].sent) {
            run->todo[run->todo_count++] = node->match;
        }
        sim_deliver(run, at);
    } else {
        sim_apply(run->s, at, NULL);
        sim_finish(run, at);
    }
}

/* The device of the last rank copies back only when nobody else has anything to do. */
static bool sim_is_slow(sim *s, uint32_t at) {
    return s->nodes[at].rank == s->c->n - 1 && sim_step(s, at)->kind == DDL__MOVE &&
           sim_step(s, at)->src_space == DDL__TMP;
}

/* Runs everything in a random order. */
static bool sim_execute(sim *s, sim_mode mode) {
    sim_run run = {.s = s, .mode = mode, .todo = malloc((2 * (size_t)s->node_count + 1) * sizeof *run.todo)};
    for (int32_t i = 0; i < s->c->n; i++) {
        sim_rank *r = &s->rank[i];
        memcpy(r->user, r->before, (size_t)r->user_bytes);
        r->sent_bytes = r->kept = r->most_kept = 0;
    }
    for (uint32_t i = 0; i < s->node_count; i++) {
        sim_node *node = &s->nodes[i];
        node->posted = node->sent = node->arrived = node->done = false;
        node->waits = sim_step(s, i)->waits;
        if (node->waits == 0) {
            run.todo[run.todo_count++] = i;
        }
    }
    while (run.todo_count > 0) {
        uint32_t pick = (uint32_t)(sim_random(&s->random) % run.todo_count);
        for (uint32_t i = 0; i < run.todo_count && sim_is_slow(s, run.todo[pick]); i++) {
            pick = (pick + 1) % run.todo_count;
        }
        uint32_t at = run.todo[pick];
        run.todo[pick] = run.todo[--run.todo_count];
        sim_go(&run, at);
    }
    free(run.todo);
    if (run.done_count == s->node_count) {
        return true;
    }
    return sim_fail(s, "%u of %u steps never end (mode %d)", s->node_count - run.done_count, s->node_count, (int)mode);
}

#endif /* PLAN_SIM_H */

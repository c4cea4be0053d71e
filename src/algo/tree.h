/* algo/tree: what runs along trees: barrier, broadcast, reduce, and all_reduce as one after the other.
 * Trees differ only in who is whose child; data moves the same way in all of them. */
#ifndef DDL_ALGO_TREE_H
#define DDL_ALGO_TREE_H

#include "cost.h"

/* A span as messages of one chunk each, in slots from `slot` on, so that what comes after can begin with the first
 * chunk. Nothing for an empty span: where these are used, both ends know that it is empty. */
static void ddl__send_chunks(ddl__planner *p, int32_t peer, uint32_t slot, ddl__place src, ddl__span span) {
    for (uint32_t c = 0; span.bytes > 0 && c < ddl__chunk_count(p->args, span.bytes); c++) {
        ddl__plan_send(p, peer, slot + c, src, ddl__chunk(p->args, span, c));
    }
}

static void ddl__recv_chunks(ddl__planner *p, int32_t peer, uint32_t slot, ddl__place dst, ddl__span span) {
    for (uint32_t c = 0; span.bytes > 0 && c < ddl__chunk_count(p->args, span.bytes); c++) {
        ddl__plan_recv(p, peer, slot + c, dst, ddl__chunk(p->args, span, c));
    }
}

static void ddl__recv_reduce_chunks(ddl__planner *p, int32_t peer, uint32_t slot, ddl__place src, ddl__place dst,
                                    ddl__span span, uint8_t flags) {
    for (uint32_t c = 0; span.bytes > 0 && c < ddl__chunk_count(p->args, span.bytes); c++) {
        ddl__plan_recv_reduce(p, peer, slot + c, src, dst, ddl__chunk(p->args, span, c), flags);
    }
}

#define DDL__MAX_CHILDREN 32

/* One rank's place in a tree. Children stand in the order in which they are reduced. */
typedef struct ddl__tree {
    int32_t parent; /* -1 at the root */
    int32_t child_count;
    int32_t child[DDL__MAX_CHILDREN];
} ddl__tree;

/* Binomial: ranks count from the root; the parent of v is v without its lowest set bit, its children are v plus each
 * smaller power of two. The subtree of v is v .. v + lowbit - 1, so ascending children keep the order of ranks. */
static ddl__tree ddl__tree_binomial(int32_t size, int32_t rank, int32_t root) {
    int32_t v = (rank - root + size) % size, lowest = v & -v;
    ddl__tree tree = {.parent = v == 0 ? -1 : (v - lowest + root) % size};
    for (int32_t bit = 1; (v == 0 || bit < lowest) && bit < size - v; bit *= 2) {
        tree.child[tree.child_count++] = (v + bit + root) % size;
        if (bit > INT32_MAX / 2) {
            break;
        }
    }
    return tree;
}

/* A line that begins at the root: everybody passes on to the next rank, so each link carries the data once. */
static ddl__tree ddl__tree_chain(int32_t size, int32_t rank, int32_t root) {
    int32_t v = (rank - root + size) % size;
    ddl__tree tree = {.parent = v == 0 ? -1 : (rank - 1 + size) % size};
    if (v + 1 < size) {
        tree.child[tree.child_count++] = (rank + 1) % size;
    }
    return tree;
}

/* The in-order tree of NCCL (src/graph/trees.cc) over 0 .. size-1: odd numbers are leaves, 0 is the root and has one
 * child, the highest power of two below size. Fills in numbers, not ranks. */
static ddl__tree ddl__tree_inorder(int32_t size, int32_t v) {
    int32_t bit = 1;
    while (v == 0 ? bit < size : (v & bit) == 0) {
        bit *= 2;
    }
    ddl__tree tree = {.parent = -1};
    if (v > 0) {
        int32_t up = (v ^ bit) | (bit * 2);
        tree.parent = up < size ? up : v ^ bit;
    }
    int32_t low = bit / 2;
    if (v > 0 && low > 0) {
        tree.child[tree.child_count++] = v - low;
    }
    while (low > 0 && v + low >= size) {
        low /= 2;
    }
    if (low > 0) {
        tree.child[tree.child_count++] = v + low;
    }
    return tree;
}

/* The second tree gives the numbers 1 .. size-1 to other ranks, so that a leaf of one tree is inner in the other: it
 * mirrors them when size is odd, else shifts them by one. Its own inverse is `back`. */
static int32_t ddl__tree_second(int32_t size, int32_t v, bool back) {
    if (v <= 0) {
        return v;
    }
    if (size % 2 == 1) {
        return size - v;
    }
    return back ? (v + size - 3) % (size - 1) + 1 : v % (size - 1) + 1;
}

/* One of the two trees of Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and
 * scan", Parallel Computing 35, 2009. Both have the same root, as theirs; every other rank has children in at most
 * one tree, so with half of the data in each, nobody sends or receives more than the root does. */
static ddl__tree ddl__tree_double(int32_t size, int32_t rank, int32_t root, bool second) {
    int32_t v = (rank - root + size) % size;
    ddl__tree tree = ddl__tree_inorder(size, second ? ddl__tree_second(size, v, false) : v);
    for (int32_t i = -1; i < tree.child_count; i++) {
        int32_t *at = i < 0 ? &tree.parent : &tree.child[i];
        if (*at >= 0) {
            *at = ((second ? ddl__tree_second(size, *at, true) : *at) + root) % size;
        }
    }
    return tree;
}

/* Sends one chunk from the root (where it is in `source`) to OUT of all others; the largest subtree first. */
static void ddl__tree_down(ddl__planner *p, const ddl__tree *tree, uint32_t slot, ddl__place source, ddl__span chunk) {
    if (tree->parent >= 0) {
        ddl__plan_recv(p, tree->parent, slot, ddl__out, chunk);
        source = ddl__out;
    }
    for (int32_t i = tree->child_count - 1; i >= 0; i--) {
        ddl__plan_send(p, tree->child[i], slot, source, chunk);
    }
}

/* Reduces one chunk towards the root: own IN first, then the children in order. Partial results stand in `partial`;
 * the last one at the root goes to OUT, which the other children may not have touched before. */
static void ddl__tree_up(ddl__planner *p, const ddl__tree *tree, uint32_t slot, ddl__place partial, ddl__span chunk) {
    ddl__place from = ddl__in;
    for (int32_t i = 0; i < tree->child_count; i++) {
        bool last = tree->parent < 0 && i == tree->child_count - 1;
        ddl__place to = last ? ddl__out : partial;
        ddl__plan_recv_reduce(p, tree->child[i], slot, from, to, chunk, 0);
        from = to;
    }
    if (tree->parent >= 0) {
        ddl__plan_send(p, tree->parent, slot, from, chunk);
    }
}

/* Scratch for partial results: a few chunks that are used in turn. */
#define DDL__WINDOW 16
typedef struct ddl__window {
    ddl__place at[DDL__WINDOW];
} ddl__window;

/* No more of them than there are chunks. The builder makes a chunk wait until the one whose place it takes has left:
 * scratch stays small, however long the vector is, and the pipeline is at most this deep. */
static ddl__window ddl__plan_window(ddl__planner *p, uint32_t chunks, int64_t chunk_bytes) {
    ddl__window window = {0};
    for (uint32_t i = 0; i < DDL__MIN(chunks, (uint32_t)DDL__WINDOW); i++) {
        window.at[i] = ddl__plan_tmp(p, (ddl__span){0, chunk_bytes});
    }
    return window;
}

static ddl__place ddl__window_place(const ddl__window *window, uint32_t index, ddl__span chunk) {
    ddl__place place = window->at[index % DDL__WINDOW];
    place.base -= chunk.at;
    return place;
}

/* slots: one for each chunk */
static void ddl__plan_tree_broadcast(ddl__planner *p, const ddl__plan_args *args, const ddl__tree *tree,
                                     ddl__span span) {
    uint32_t chunks = ddl__chunk_count(args, span.bytes), slot = ddl__plan_slots(p, chunks);
    for (uint32_t c = 0; c < chunks; c++) {
        ddl__tree_down(p, tree, slot + c, ddl__in, ddl__chunk(args, span, c));
    }
}

/* The same upwards. Leaves send straight from IN and need no scratch. */
static void ddl__plan_tree_reduce(ddl__planner *p, const ddl__plan_args *args, const ddl__tree *tree, ddl__span span) {
    uint32_t chunks = ddl__chunk_count(args, span.bytes), slot = ddl__plan_slots(p, chunks);
    ddl__window window = {0};
    if (tree->child_count > 0) {
        window = ddl__plan_window(p, chunks, DDL__MIN(span.bytes, ddl__chunk_bytes(args)));
    }
    for (uint32_t c = 0; c < chunks; c++) {
        ddl__span chunk = ddl__chunk(args, span, c);
        ddl__tree_up(p, tree, slot + c, ddl__window_place(&window, c, chunk), chunk);
    }
}

static ddl__span ddl__whole(const ddl__plan_args *args) { return (ddl__span){0, args->count * args->element_bytes}; }

/* The part of the vector that goes through one of the two trees; the second may be empty, and is then a signal. */
static ddl__span ddl__tree_half(const ddl__plan_args *args, int32_t half) {
    return ddl__span_part(ddl__whole(args), 2, half, args->element_bytes);
}

/* barrier */

/* Nothing after the fence. */
static void ddl__algo_barrier(ddl__planner *p, const ddl__plan_args *args) {
    (void)p;
    (void)args;
}

/* Costs below are those of the sources, in Hockney's terms: alpha is t->latency, beta t->byte, gamma t->reduce; M is
 * t->bytes. ceil(log2 n) alpha. */
static double ddl__cost_barrier(const ddl__terms *t) { return t->rounds * t->latency; }

/* Signals up a binomial tree and down again: twice the rounds, but 2 (n - 1) messages in all instead of n ceil(log2 n),
 * which is what counts where many ranks share a core. */
static void ddl__algo_barrier_tree(ddl__planner *p, const ddl__plan_args *args) {
    ddl__tree tree = ddl__tree_binomial(args->size, args->rank, 0);
    uint32_t slot = ddl__plan_slots(p, 1);
    ddl__span signal = {0, 0};
    for (int32_t i = 0; i < tree.child_count; i++) {
        ddl__plan_recv(p, tree.child[i], slot, ddl__out, signal);
    }
    uint32_t heard = tree.child_count > 0 ? ddl__plan_join(p) : DDL__NO_STEP;
    if (tree.parent >= 0) {
        ddl__plan_after(p, ddl__plan_send(p, tree.parent, slot, ddl__in, signal), heard);
        heard = ddl__plan_recv(p, tree.parent, slot, ddl__out, signal);
    }
    for (int32_t i = tree.child_count - 1; i >= 0; i--) {
        ddl__plan_after(p, ddl__plan_send(p, tree.child[i], slot, ddl__in, signal), heard);
    }
}

static double ddl__cost_barrier_tree(const ddl__terms *t) { return 2 * t->rounds * t->latency / t->turns; }

/* broadcast */

/* What the root of two ranks sends while the other one's signal is on its way. Its first message is word of everybody,
 * so the other may write at once. Returns what remains. */
static ddl__span ddl__broadcast_head(ddl__planner *p, const ddl__tree *tree, ddl__span whole) {
    ddl__span head = {0, DDL__MIN(whole.bytes, DDL__EAGER_BYTES)};
    uint32_t slot = ddl__plan_slots(p, 1);
    if (tree->parent >= 0) {
        ddl__plan_recv(p, tree->parent, slot, ddl__out, head);
    } else {
        ddl__plan_at_once(p, ddl__plan_send(p, tree->child[0], slot, ddl__in, head));
    }
    return (ddl__span){head.bytes, whole.bytes - head.bytes};
}

/* Whole or in chunks: a rank gives its first child the second chunk while that child passes on the first. */
static void ddl__algo_broadcast_tree(ddl__planner *p, const ddl__plan_args *args) {
    ddl__tree tree = ddl__tree_binomial(args->size, args->rank, args->root);
    ddl__span rest = ddl__whole(args);
    if (p->fenced && args->size == 2) {
        rest = ddl__broadcast_head(p, &tree, rest);
    }
    if (rest.at == 0 || rest.bytes > 0) {
        ddl__plan_tree_broadcast(p, args, &tree, rest);
    }
}


static double ddl__cost_chunks(const ddl__terms *t, double bytes) {
    double chunks = bytes / t->chunk;
    return chunks < 1 ? 1 : chunks;
}

/* ceil(log2 n) (alpha + M beta): the root sends everything to each of its children. */
static double ddl__cost_broadcast_tree(const ddl__terms *t) { return t->rounds * (t->latency + t->bytes * t->byte); }

/* Pipelined along a line of ranks: the best for large data, the worst for small. */
static void ddl__algo_broadcast_chain(ddl__planner *p, const ddl__plan_args *args) {
    ddl__tree tree = ddl__tree_chain(args->size, args->rank, args->root);
    ddl__plan_tree_broadcast(p, args, &tree, ddl__whole(args));
}

/* k chunks: the last one has to wait for k - 1 others at the root, then passes n - 1 links. */
static double ddl__cost_broadcast_chain(const ddl__terms *t) {
    double chunks = ddl__cost_chunks(t, t->bytes);
    return (t->n - 2 + chunks) * (t->latency + t->bytes / chunks * t->byte);
}

/* Two parents may write OUT, so it always begins with a fence. */
static void ddl__algo_broadcast_double_tree(ddl__planner *p, const ddl__plan_args *args) {
    for (int32_t half = 0; half < 2; half++) {
        ddl__tree tree = ddl__tree_double(args->size, args->rank, args->root, half == 1);
        ddl__plan_tree_broadcast(p, args, &tree, ddl__tree_half(args, half));
    }
}

/* Each round of the pipeline moves a chunk in each tree. */
static double ddl__cost_broadcast_double_tree(const ddl__terms *t) {
    double chunks = ddl__cost_chunks(t, t->bytes / 2);
    return (t->rounds + chunks) * 2 * (t->latency + t->bytes / 2 / chunks * t->byte * t->crossing);
}

/* reduce. An op that is not commutative is reduced to rank 0, whose tree keeps the order, and sent on from there. */

static void ddl__algo_reduce_tree(ddl__planner *p, const ddl__plan_args *args) {
    if (args->commutative || args->root == 0) {
        ddl__tree tree = ddl__tree_binomial(args->size, args->rank, args->root);
        ddl__plan_tree_reduce(p, args, &tree, ddl__whole(args));
        return;
    }
    ddl__tree tree = ddl__tree_binomial(args->size, args->rank, 0);
    if (args->rank == 0) {
        tree.parent = args->root;
    }
    ddl__span whole = ddl__whole(args);
    ddl__plan_tree_reduce(p, args, &tree, whole);
    uint32_t chunks = ddl__chunk_count(args, whole.bytes), slot = p->next_slot - chunks;
    for (uint32_t c = 0; args->rank == args->root && c < chunks; c++) {
        ddl__plan_recv(p, 0, slot + c, ddl__out, ddl__chunk(args, whole, c));
    }
}

/* ceil(log2 n) (alpha + M (beta + gamma)) */
static double ddl__cost_reduce_tree(const ddl__terms *t) {
    return t->rounds * (t->latency + t->bytes * (t->byte + t->reduce));
}

/* From the far end of the line towards the root. Operands come in the order x_root, x_root+1, ... around, so the op
 * must commute. */
static void ddl__algo_reduce_chain(ddl__planner *p, const ddl__plan_args *args) {
    ddl__tree tree = ddl__tree_chain(args->size, args->rank, args->root);
    ddl__plan_tree_reduce(p, args, &tree, ddl__whole(args));
}

static double ddl__cost_reduce_chain(const ddl__terms *t) {
    double chunks = ddl__cost_chunks(t, t->bytes);
    return (t->n - 2 + chunks) * (t->latency + t->bytes / chunks * (t->byte + t->reduce));
}

/* Reductions from two sides into one OUT: the fence comes first. The second tree does not keep the order of ranks. */
static void ddl__algo_reduce_double_tree(ddl__planner *p, const ddl__plan_args *args) {
    for (int32_t half = 0; half < 2; half++) {
        ddl__tree tree = ddl__tree_double(args->size, args->rank, args->root, half == 1);
        ddl__plan_tree_reduce(p, args, &tree, ddl__tree_half(args, half));
    }
}

static double ddl__cost_reduce_double_tree(const ddl__terms *t) {
    double chunks = ddl__cost_chunks(t, t->bytes / 2);
    return (t->rounds + chunks) * 2 *
           (t->latency + t->bytes / 2 / chunks * (t->byte * t->crossing + t->reduce));
}

/* all_reduce: up and down both trees, chunk by chunk. */
static void ddl__algo_all_reduce_double_tree(ddl__planner *p, const ddl__plan_args *args) {
    for (int32_t half = 0; half < 2; half++) {
        ddl__tree tree = ddl__tree_double(args->size, args->rank, 0, half == 1);
        ddl__span span = ddl__tree_half(args, half);
        uint32_t chunks = ddl__chunk_count(args, span.bytes), slot = ddl__plan_slots(p, 2 * chunks);
        for (uint32_t c = 0; c < chunks; c++) {
            ddl__span chunk = ddl__chunk(args, span, c);
            ddl__tree_up(p, &tree, slot + 2 * c, ddl__out, chunk);
            ddl__tree_down(p, &tree, slot + 2 * c + 1, ddl__out, chunk);
        }
    }
}

/* Up and down overlap but for the first chunks: the way down adds its latency, and its bytes again. */
static double ddl__cost_all_reduce_double_tree(const ddl__terms *t) {
    return ddl__cost_reduce_double_tree(t) + t->rounds * t->latency + t->bytes * t->byte * t->crossing;
}

#endif /* DDL_ALGO_TREE_H */

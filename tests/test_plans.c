/* Every algorithm writes right plans: for group sizes 1 to 64, run together without a network, against plain loops.
 * Groups up to 9 ranks take a full grid of counts, roots and fences; larger ones a sample drawn from a seed, which
 * DDL_TEST_SEED (hexadecimal) replaces. Slow builds (sanitizers) leave out most groups of more than 16.
 *
 * tests/run: timeout=300 quick=yes */
#define TEST_TIMEOUT_S 120
#define _GNU_SOURCE 1
#include "plan_sim.h"
#include "test.h"

/* ---- the oracle: what the call means, in plain loops ---- */

/* The operand of a rank for element i of its IN, before anything ran. */
static const unsigned char *operand(const sim *s, int32_t rank, int64_t at) {
    const sim_rank *r = &s->rank[rank];
    return r->before + r->at[DDL__IN] + at;
}

static void expect_copy(sim *s, int32_t to, int64_t to_at, int32_t from, int64_t from_at, int64_t bytes) {
    sim_rank *r = &s->rank[to];
    memcpy(r->expected + r->at[DDL__OUT] + to_at, operand(s, from, from_at), (size_t)bytes);
}

/* x0 op x1 ... of ranks 0 .. last, from byte from_at of each IN, bracketed from the left. */
static void expect_fold(sim *s, int32_t to, int64_t from_at, int64_t bytes, int32_t last) {
    sim_rank *r = &s->rank[to];
    unsigned char *out = r->expected + r->at[DDL__OUT];
    unsigned char *scaled = malloc((size_t)bytes + 1);
    for (int32_t i = 0; i <= last; i++) {
        const unsigned char *x = operand(s, i, from_at);
        if (s->c->scaled) {
            sim_scale(s->c->op, scaled, x, bytes);
            x = scaled;
        }
        if (i == 0) {
            memcpy(out, x, (size_t)bytes);
        } else {
            sim_combine_all(s->c->op, out, out, x, bytes);
        }
    }
    free(scaled);
}

static void expect_all_to_all(sim *s, int32_t rank) {
    const sim_case *c = s->c;
    int64_t size = sim_element_bytes(c->op);
    for (int32_t i = 0; i < c->n; i++) {
        if (c->kind == DDL_ALL_TO_ALL) {
            expect_copy(s, rank, i * c->count * size, i, rank * c->count * size, c->count * size);
        } else {
            expect_copy(s, rank, c->recv_offsets[rank][i] * size, i, c->send_offsets[i][rank] * size,
                        c->recv_counts[rank][i] * size);
        }
    }
}

static void expect(sim *s, int32_t rank) {
    const sim_case *c = s->c;
    bool v = ddl__kind_is_v(c->kind), root = rank == c->root;
    int64_t size = sim_element_bytes(c->op), bytes = c->count * size;
    switch (ddl__kind_base(c->kind)) {
    case DDL_BROADCAST:
        expect_copy(s, rank, 0, c->root, 0, bytes);
        break;
    case DDL_REDUCE:
        if (root) {
            expect_fold(s, rank, 0, bytes, c->n - 1);
        }
        break;
    case DDL_ALL_REDUCE:
        expect_fold(s, rank, 0, bytes, c->n - 1);
        break;
    case DDL_SCAN:
        expect_fold(s, rank, 0, bytes, rank);
        break;
    case DDL_EXSCAN:
        if (rank > 0) {
            expect_fold(s, rank, 0, bytes, rank - 1);
        }
        break;
    case DDL_GATHER:
    case DDL_ALL_GATHER:
        for (int32_t i = 0; i < c->n && (root || ddl__kind_base(c->kind) == DDL_ALL_GATHER); i++) {
            expect_copy(s, rank, v ? c->offsets[i] * size : i * bytes, i, 0, v ? c->counts[i] * size : bytes);
        }
        break;
    case DDL_SCATTER:
        expect_copy(s, rank, 0, c->root, v ? c->offsets[rank] * size : rank * bytes,
                    v ? c->counts[rank] * size : bytes);
        break;
    case DDL_REDUCE_SCATTER:
        expect_fold(s, rank, v ? c->offsets[rank] * size : rank * bytes, v ? c->counts[rank] * size : bytes, c->n - 1);
        break;
    case DDL_ALL_TO_ALL:
        expect_all_to_all(s, rank);
        break;
    default:
        break;
    }
}

/* f32 sums depend on the brackets: exact where the algorithm promises rank order, else close. What is not a result
 * must be untouched, so whole images of memory are compared. */
static bool same_memory(const sim *s, const sim_rank *r, int64_t *where) {
    bool by_inner = s->c->inner == NULL || ddl__algo_has(s->c->inner, DDL__RANK_ORDER);
    bool by_algo = s->c->algo == &ddl__algo_pieces || ddl__algo_has(s->c->algo, DDL__RANK_ORDER);
    bool exact = s->c->op != SIM_F32 || s->c->algo == &ddl__algo_exchange || (by_inner && by_algo);
    for (int64_t i = 0; i < r->user_bytes; i += exact ? 1 : 4) {
        bool same = r->user[i] == r->expected[i];
        if (!exact && i + 4 <= r->user_bytes) {
            float a, b;
            memcpy(&a, r->user + i, 4);
            memcpy(&b, r->expected + i, 4);
            double gap = (double)a - (double)b;
            same = gap < 0.2 && gap > -0.2; /* operands are below 2048, at most 64 of them */
        }
        if (!same) {
            *where = i;
            return false;
        }
    }
    return true;
}

static bool check_result(sim *s) {
    int64_t where = 0;
    for (int32_t i = 0; i < s->c->n; i++) {
        if (!same_memory(s, &s->rank[i], &where)) {
            return sim_fail(s, "rank %d: byte %lld of its memory is wrong (IN at %lld, OUT at %lld)", i,
                            (long long)where, (long long)s->rank[i].at[0], (long long)s->rank[i].at[1]);
        }
        if (s->c->kind == DDL_ALL_REDUCE && memcmp(s->rank[i].user + s->rank[i].at[DDL__OUT],
                                                   s->rank[0].user + s->rank[0].at[DDL__OUT],
                                                   (size_t)s->rank[0].bytes[DDL__OUT]) != 0) {
            return sim_fail(s, "ranks 0 and %d have different bits", i);
        }
    }
    return true;
}

/* ---- one case ---- */

/* A plan that does not begin with a fence may count on eager sends; only the exchange of two ranks in place does. */
static bool may_need_eager(const sim *s) {
    return !s->rank[0].plan.fenced && s->c->kind == DDL_ALL_REDUCE && s->c->n == 2;
}

/* The bound by which the fence is decided: what a rank sends to any one other. */
static bool check_bound(sim *s, const sim_rank *r) {
    int64_t sent[SIM_MAX] = {0}, bound = s->c->algo->peer_bytes(&r->args);
    for (uint32_t k = 0; k < r->plan.step_count; k++) {
        const ddl__step *step = &r->plan.steps[k];
        if (step->kind == DDL__SEND && (sent[step->peer] += step->bytes) > bound) {
            return sim_fail(s, "rank %d sends rank %d more than %lld bytes", r->args.rank, step->peer,
                            (long long)bound);
        }
    }
    return true;
}

/* ---- plans on devices ---- */

/* Pinned scratch: three pieces, each with what its algorithm keeps beside it, which is as much again at most; parts
 * are rounded up to 64 bytes. */
static int64_t pinned_bound(const sim_case *c, const sim_rank *r) {
    int64_t piece = DDL__MAX(c->move_bytes, 2 * c->n * (int64_t)r->args.element_bytes);
    return DDL__MOVE_SLOTS * (2 * piece + 64 * (2 + 2 * c->n));
}

static double pinned_most;

/* Copies to the host overlap the network: those of the second piece and the third wait for no data of a peer. And data
 * leaves for the network before what came with an earlier piece is back on the device. */
static bool check_overlap(sim *s, sim_rank *r, int64_t pieces) {
    uint32_t n = r->plan.step_count;
    bool *data = calloc(n + 1, sizeof *data), *back = calloc(n + 1, sizeof *back);
    int64_t free_moves = 0, moves = 0, sends = 0, free_sends = 0;
    for (uint32_t k = 0; k < n; k++) {
        const ddl__step *step = &r->plan.steps[k];
        bool comes = step->kind == DDL__MOVE && step->dst_space == DDL__TMP;
        moves += comes;
        free_moves += comes && !data[k];
        sends += step->kind == DDL__SEND && step->bytes > 0;
        free_sends += step->kind == DDL__SEND && step->bytes > 0 && !back[k];
        for (uint32_t i = 0; i < step->next_count; i++) {
            uint32_t next = r->plan.nexts[step->first_next + i];
            data[next] |= data[k] || (sim_receives(step) && step->bytes > 0);
            back[next] |= back[k] || (step->kind == DDL__MOVE && !comes);
        }
    }
    free(data);
    free(back);
    int64_t ahead = DDL__MIN(pieces, DDL__MOVE_SLOTS);
    if (moves > 0 && pieces > 0 && free_moves * pieces < moves * ahead) {
        return sim_fail(s, "rank %d: %lld of %lld copies begin before any data comes, in %lld pieces", r->args.rank,
                        (long long)free_moves, (long long)moves, (long long)pieces);
    }
    if (sends > 0 && free_sends * pieces < sends * ahead) {
        return sim_fail(s, "rank %d: %lld of %lld sends begin before any result is copied back, in %lld pieces",
                        r->args.rank, (long long)free_sends, (long long)sends, (long long)pieces);
    }
    return true;
}

static bool check_device(sim *s, sim_rank *r) {
    const sim_case *c = s->c;
    bool across = c->natives;
    ddl__plan_args whole = r->args;
    whole.size = across ? ddl__host_count(&whole) : c->n;
    int64_t longest = c->count, each = ddl__piece_elements(&whole);
    for (int32_t i = 0; ddl__kind_is_v(c->kind) && i < c->n; i++) {
        longest = i == 0 ? c->counts[0] : DDL__MAX(longest, c->counts[i]);
    }
    int64_t pieces = (longest + each - 1) / each;
    pinned_most = DDL__MAX(pinned_most, (double)r->plan.tmp_bytes / (double)pinned_bound(c, r));
    if (r->plan.tmp_bytes > pinned_bound(c, r)) {
        return sim_fail(s, "rank %d has %lld bytes pinned, in pieces of %lld", r->args.rank, (long long)r->plan.tmp_bytes,
                        (long long)c->move_bytes);
    }
    return sim_check_devices(s, r) && sim_check_natives(s, r) && (!c->straight || r->plan.straight) &&
           (c->algo != &ddl__algo_exchange || sim_check_exchange(s, r)) &&
           (ddl__kind_is_v(c->kind) || c->straight || c->kind == DDL_ALL_REDUCE || check_overlap(s, r, pieces));
}

static bool check_plans(sim *s) {
    for (int32_t i = 0; i < s->c->n; i++) {
        if (!sim_check_steps(s, &s->rank[i])) {
            return false;
        }
    }
    if (!sim_check_pairs(s) || !sim_check_knowledge(s)) {
        return false;
    }
    for (int32_t i = 0; i < s->c->n; i++) {
        if (!sim_check_races(s, &s->rank[i]) ||
            !(s->c->move_bytes > 0 ? check_device(s, &s->rank[i]) : check_bound(s, &s->rank[i]))) {
            return false;
        }
        expect(s, i);
    }
    for (int mode = SIM_EAGER; mode <= SIM_SYNC; mode++) {
        if (mode == SIM_SYNC && may_need_eager(s)) {
            continue;
        }
        if (!sim_execute(s, (sim_mode)mode) || !check_result(s)) {
            return false;
        }
    }
    return true;
}

static const char *describe(const sim_case *c, const char *error) {
    static char text[700];
    snprintf(text, sizeof text, "%s %s (%s, pieces of %lld) n %d root %d count %lld chunk %lld fence %d op %d in place %llx seed %llx: %s",
             ddl__kind_name(c->kind), c->algo->name, c->inner != NULL ? c->inner->name : "", (long long)c->move_bytes, c->n, c->root, (long long)c->count, (long long)c->chunk_bytes,
             c->fence, (int)c->op, (unsigned long long)c->in_place, (unsigned long long)c->seed, error);
    return text;
}

static void run_case(const sim_case *c) {
    sim *s = malloc(sizeof *s);
    REQUIRE(s != NULL);
    bool ok = sim_open(s, c) && check_plans(s);
    if (!ok) {
        test__fail(__FILE__, __LINE__, "%s", describe(c, s->error));
    }
    sim_close(s);
    CHECK_EQ(s->base.memory, 0);
    free(s);
}

/* ---- drawing cases ---- */

static uint64_t plans_seed(void) {
    const char *text = getenv("DDL_TEST_SEED");
    return text != NULL ? strtoull(text, NULL, 16) : 0x5EEDull;
}

/* Blocks of uneven length, some empty, in any order and with gaps; packed for reduce_scatterv, which has no offsets. */
static void draw_blocks(sim_case *c, uint64_t *random, int64_t *counts, int64_t *offsets) {
    int32_t order[SIM_MAX];
    for (int32_t i = 0; i < c->n; i++) {
        int32_t j = (int32_t)(sim_random(random) % (uint64_t)(i + 1));
        order[i] = order[j];
        order[j] = i;
        counts[i] = sim_random(random) % 3 == 0 ? 0 : (int64_t)(sim_random(random) % (uint64_t)(c->count + 1));
    }
    int64_t at = 0;
    for (int32_t i = 0; i < c->n; i++) {
        int32_t r = c->kind == DDL_REDUCE_SCATTERV ? i : order[i];
        at += c->kind == DDL_REDUCE_SCATTERV ? 0 : (int64_t)(sim_random(random) % 3);
        offsets[r] = at;
        at += counts[r];
    }
}

static void draw_all_to_allv(sim_case *c, uint64_t *random) {
    for (int32_t i = 0; i < c->n; i++) {
        draw_blocks(c, random, c->send_counts[i], c->send_offsets[i]);
    }
    for (int32_t i = 0; i < c->n; i++) {
        int64_t at = 0;
        for (int32_t j = 0; j < c->n; j++) {
            at += (int64_t)(sim_random(random) % 3);
            c->recv_counts[i][j] = c->send_counts[j][i];
            c->recv_offsets[i][j] = at;
            at += c->recv_counts[i][j];
        }
    }
}

/* One host, blocks of ranks, dealt out in turn, or at random; numbered by first appearance. */
static void draw_hosts(sim_case *c, uint64_t *random) {
    int32_t per_host = 1 + (int32_t)(sim_random(random) % 8), names[SIM_MAX], known = 0;
    while (c->n % per_host != 0) {
        per_host--;
    }
    int32_t hosts = c->n / per_host, shape = (int32_t)(sim_random(random) % 4);
    memset(names, -1, sizeof names);
    for (int32_t r = 0; r < c->n; r++) {
        int32_t random_host = (int32_t)(sim_random(random) % (uint64_t)hosts);
        int32_t host = shape == 0 ? 0 : shape == 1 ? r / per_host : shape == 2 ? r % hosts : random_host;
        names[host] = names[host] < 0 ? known++ : names[host];
        c->host_of[r] = names[host];
    }
}

static void draw_rest(sim_case *c, uint64_t *random) {
    c->seed = sim_random(random);
    /* One chunk to about twenty, of sizes that do not divide anything. */
    int64_t chunks = 1 + (int64_t)(sim_random(random) % 20);
    c->chunk_bytes = 16 + 8 * (int64_t)(sim_random(random) % 8) + c->count * 8 / chunks;
    c->in_place = sim_random(random) % 3 == 0 ? 0 : sim_random(random) % 2 == 0 ? ~0ull : sim_random(random);
    c->op = (sim_op)(sim_random(random) % 3);
    if (c->op == SIM_AFFINE && !ddl__algo_has(c->algo, DDL__KEEPS_ORDER)) {
        c->op = SIM_U32;
    }
    draw_hosts(c, random);
    if (c->kind == DDL_ALL_TO_ALLV) {
        draw_all_to_allv(c, random);
    } else if (ddl__kind_is_v(c->kind)) {
        draw_blocks(c, random, c->counts, c->offsets);
    }
}

static ddl_kind v_form(ddl_kind kind) {
    for (int k = DDL_GATHERV; k <= DDL_ALL_TO_ALLV; k++) {
        if (ddl__kind_base((ddl_kind)k) == kind) {
            return (ddl_kind)k;
        }
    }
    return DDL_KIND_NONE;
}

/* The counts that break things: none, fewer than ranks, as many, odd, several chunks in every part. */
#define COUNTS 6
static int64_t nth_count(int32_t n, int which) {
    const int64_t counts[COUNTS] = {0, 1, n - 1, n, 7 * n + 3, 23 * n + 5};
    return counts[which];
}

static int try_case(sim_case *c, uint64_t *random, int count, int root, bool fence) {
    const int32_t roots[3] = {0, c->n / 2, c->n - 1};
    ddl__plan_args args;
    bool spreads = nth_count(c->n, count) > 200 && ddl__kind_base(c->kind) >= DDL_GATHER && c->kind != DDL_SCAN &&
                   c->kind != DDL_EXSCAN;
    c->count = spreads ? 37 : nth_count(c->n, count); /* n blocks of this length are enough */
    c->root = roots[root];
    c->fence = fence;
    draw_rest(c, random);
    sim_args(c, 0, &args);
    if (!ddl__algo_can(c->algo, &args, false)) {
        return 0;
    }
    run_case(c);
    return 1;
}

static bool has_root(ddl_kind kind) {
    kind = ddl__kind_base(kind);
    return kind == DDL_BROADCAST || kind == DDL_REDUCE || kind == DDL_GATHER || kind == DDL_SCATTER;
}

static int try_size(sim_case *c, uint64_t *random) {
    int ran = 0;
    if (c->n <= 9) {
        for (int i = 0; i < COUNTS * 3 * 2; i++) {
            bool skip = !has_root(c->kind) && i / 2 % 3 != 0;
            ran += skip ? 0 : try_case(c, random, i / 6, i / 2 % 3, i % 2 == 1);
        }
        return ran;
    }
    for (int i = 0; i < (c->n > 32 ? 1 : 2); i++) {
        uint64_t draw = sim_random(random);
        ran += try_case(c, random, (int)(draw % COUNTS), (int)(draw / 8 % 3), (draw >> 8) % 2 == 1);
    }
    return ran;
}

static bool leave_out(int32_t n) { return TEST_SANITIZED && n > 16 && n % 16 != 0 && n != 63; }

static void try_kind(ddl_kind kind) {
    uint64_t random = plans_seed() + (uint64_t)kind;
    sim_case *c = malloc(sizeof *c);
    int ran = 0;
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__algos); i++) {
        const ddl__algo *algo = &ddl__algos[i];
        for (int32_t n = 1; algo->kind == kind && n <= SIM_MAX; n++) {
            if (leave_out(n)) {
                continue;
            }
            *c = (sim_case){.algo = algo, .kind = kind, .n = n};
            ran += try_size(c, &random);
            *c = (sim_case){.algo = algo, .kind = v_form(kind), .n = n};
            ran += ddl__algo_has(algo, DDL__SERVES_V) ? try_size(c, &random) : 0;
        }
    }
    free(c);
    CHECK(ran >= SIM_MAX / 2);
    printf("     %d calls, seed %llx\n", ran, (unsigned long long)plans_seed());
}

TEST(barrier) { try_kind(DDL_BARRIER); }
TEST(broadcast) { try_kind(DDL_BROADCAST); }
TEST(reduce) { try_kind(DDL_REDUCE); }
TEST(all_reduce) { try_kind(DDL_ALL_REDUCE); }
TEST(gather) { try_kind(DDL_GATHER); }
TEST(scatter) { try_kind(DDL_SCATTER); }
TEST(all_gather) { try_kind(DDL_ALL_GATHER); }
TEST(reduce_scatter) { try_kind(DDL_REDUCE_SCATTER); }
TEST(all_to_all) { try_kind(DDL_ALL_TO_ALL); }
TEST(scan) { try_kind(DDL_SCAN); }
TEST(exscan) { try_kind(DDL_EXSCAN); }

/* ---- on devices, between hosts ---- */

/* A call by an algorithm on devices, with one of ordinary memory between hosts: tensors of several pieces mostly. */
static int try_device(sim_case *c, const ddl__algo *algo, const ddl__algo *inner, uint64_t *random) {
    ddl__plan_args args;
    int64_t element = inner->kind >= DDL_GATHER && inner->kind <= DDL_ALL_TO_ALL ? c->n : 1;
    c->algo = inner; /* for what is drawn by its traits */
    c->inner = inner;
    c->count = 1 + (int64_t)(sim_random(random) % 40);
    c->root = (int32_t)(sim_random(random) % (uint64_t)c->n);
    c->fence = true;
    draw_rest(c, random);
    if (algo->kind != DDL_KIND_NONE || sim_random(random) % 2 == 0) { /* blocks of ranks, one to each, two ... */
        int32_t each = 1 + (int32_t)(sim_random(random) % 4);
        for (int32_t r = 0; r < c->n; r++) {
            c->host_of[r] = c->n % each == 0 ? r / each : r;
        }
    }
    c->algo = algo;
    c->natives = algo->kind != DDL_KIND_NONE;
    c->straight = algo == &ddl__algo_straight || algo == &ddl__algo_exchange;
    c->straight = c->straight || (c->natives && algo->kind != DDL_BROADCAST && algo->kind != DDL_ALL_GATHER &&
                                  sim_random(random) % 2 == 0);
    c->scaled = algo == &ddl__algo_exchange && sim_random(random) % 3 == 0;
    c->op = c->natives && c->op == SIM_AFFINE ? SIM_U32 : c->op;
    c->move_bytes = element * sim_element_bytes(c->op) * (1 + (int64_t)(sim_random(random) % 12)) + 3;
    sim_args(c, 0, &args);
    if (ddl__host_count(&args) < 2 || (c->natives && !ddl__algo_can(algo, &args, false))) {
        return 0;
    }
    ddl__plan_args piece = ddl__piece_args(&args, c->natives);
    if (!ddl__algo_can(inner, &piece, false)) {
        return 0;
    }
    run_case(c);
    return 1;
}

/* At least so many of what is drawn can be run. */
enum { DEVICE_CALLS = TEST_SANITIZED ? 12 : 24 };

static int try_device_kind(const ddl__algo *algo, ddl_kind kind, uint64_t *random) {
    sim_case *c = malloc(sizeof *c);
    int ran = 0;
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__algos); i++) {
        const ddl__algo *inner = &ddl__algos[i];
        for (int32_t n = 2; inner->kind == kind && n <= (TEST_SANITIZED ? 6 : 12); n++) {
            for (int turn = 0; turn < 8; turn++) {
                bool v = turn % 4 == 3 && algo->kind == DDL_KIND_NONE && ddl__algo_has(inner, DDL__SERVES_V);
                *c = (sim_case){.kind = v ? v_form(kind) : kind, .n = n};
                ran += c->kind == DDL_ALL_TO_ALLV ? 0 : try_device(c, algo, inner, random);
            }
        }
    }
    free(c);
    CHECK(ran >= DEVICE_CALLS);
    return ran;
}

TEST(devices_by_pieces) {
    uint64_t random = plans_seed();
    for (int kind = DDL_BROADCAST; kind <= DDL_EXSCAN; kind++) {
        int ran = try_device_kind(&ddl__algo_pieces, (ddl_kind)kind, &random);
        printf("     %s: %d calls\n", ddl__kind_name((ddl_kind)kind), ran);
    }
    printf("     at most %.2f of the bound is pinned\n", pinned_most);
    CHECK(pinned_most > 0.3);
}

TEST(devices_straight) {
    static const ddl_kind kinds[] = {DDL_BROADCAST, DDL_GATHER, DDL_SCATTER, DDL_ALL_GATHER, DDL_ALL_TO_ALL};
    uint64_t random = plans_seed() + 2;
    for (size_t i = 0; i < DDL__COUNT_OF(kinds); i++) {
        try_device_kind(&ddl__algo_straight, kinds[i], &random);
    }
}

TEST(devices_exchange) {
    static const ddl_kind kinds[] = {DDL_REDUCE, DDL_ALL_REDUCE, DDL_REDUCE_SCATTER};
    uint64_t random = plans_seed() + 3;
    for (size_t i = 0; i < DDL__COUNT_OF(kinds); i++) {
        int ran = try_device_kind(&ddl__algo_exchange, kinds[i], &random);
        printf("     %s: %d calls\n", ddl__kind_name(kinds[i]), ran);
    }
}

TEST(devices_inside_hosts) {
    uint64_t random = plans_seed() + 1;
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__algos_on_device); i++) {
        const ddl__algo *algo = &ddl__algos_on_device[i];
        int ran = try_device_kind(algo, algo->kind, &random);
        printf("     %s: %d calls\n", ddl__kind_name(algo->kind), ran);
    }
}

/* A device that is slow to take its data does not let peers run ahead by more than the pieces under way: what would have
 * to be kept meanwhile does not grow with the tensor. */
TEST(devices_that_are_slow_are_waited_for) {
    static const ddl_kind kinds[] = {DDL_BROADCAST, DDL_SCATTER, DDL_ALL_TO_ALL, DDL_ALL_GATHER, DDL_GATHER};
    sim_case *c = malloc(sizeof *c);
    sim *s = malloc(sizeof *s);
    for (size_t i = 0; i < DDL__COUNT_OF(kinds); i++) {
        int64_t most[2];
        for (int turn = 0; turn < 2; turn++) {
            *c = (sim_case){.algo = &ddl__algo_pieces, .kind = kinds[i], .n = 3, .fence = true, .chunk_bytes = 1 << 20,
                            .move_bytes = kinds[i] == DDL_BROADCAST ? 64 : kinds[i] == DDL_ALL_TO_ALL ? 6 * 64 : 3 * 64,
                            .count = turn == 0 ? 16 * 6 : 16 * 40, .host_of = {0, 1, 2}, .root = kinds[i] == DDL_GATHER ? 2 : 0};
            c->inner = ddl__algo_find(kinds[i], kinds[i] == DDL_BROADCAST ? "chain" : "linear");
            REQUIRE(sim_open(s, c));
            CHECK(check_plans(s));
            CHECK(sim_execute(s, SIM_EAGER));
            most[turn] = s->rank[2].most_kept;
            sim_close(s);
        }
        CHECK(most[0] <= 2 * DDL__MOVE_SLOTS * 64 && most[1] <= 2 * DDL__MOVE_SLOTS * 64);
        printf("     %s keeps %lld bytes of 6 pieces, %lld of 40\n", ddl__kind_name(kinds[i]), (long long)most[0],
               (long long)most[1]);
    }
    free(c);
    free(s);
}

/* ---- bytes on the wire ---- */

static int popcount_sum(int32_t n) {
    int bits = 0;
    for (int32_t i = 0; i < n; i++) {
        bits += __builtin_popcount((unsigned)i);
    }
    return bits;
}

/* What each rank sends when n divides everything, in units of vector / n (a block, for gather and its like); -1 where
 * ranks differ. */
static int64_t theory(const ddl__algo *algo, int32_t n) {
    bool pow2 = (n & (n - 1)) == 0;
    const char *name = algo->name;
    switch (algo->kind) {
    case DDL_ALL_REDUCE:
        if (strcmp(name, "recursive_doubling") == 0) {
            return pow2 ? (int64_t)ddl__log2_ceil(n) * n : -1;
        }
        if (strcmp(name, "all_gather") == 0) {
            return (int64_t)(n - 1) * n;
        }
        return strcmp(name, "double_tree") == 0 || (strcmp(name, "halving_doubling") == 0 && !pow2) ? -1 : 2 * (n - 1);
    case DDL_REDUCE_SCATTER:
        return strcmp(name, "recursive_halving") == 0 && !pow2 ? -1 : n - 1;
    case DDL_ALL_TO_ALL:
        return strcmp(name, "bruck") == 0 ? popcount_sum(n) : n - 1;
    case DDL_ALL_GATHER:
        return n - 1;
    default:
        return algo->kind == DDL_BARRIER ? 0 : -1;
    }
}

/* The same of all ranks together, -1 where there is no simple figure. */
static int64_t theory_sum(const ddl__algo *algo, int32_t n) {
    bool passes_all = strcmp(algo->name, "scatter_all_gather") == 0 || strcmp(algo->name, "reduce_scatter_gather") == 0;
    bool subtrees = passes_all || strcmp(algo->name, "tree") == 0;
    int64_t below = 0; /* sizes of all subtrees of a binomial tree but the whole */
    for (int32_t v = 1; v < n; v++) {
        below += DDL__MIN(v & -v, n - v);
    }
    switch (algo->kind) {
    case DDL_BROADCAST:
    case DDL_REDUCE:
        return passes_all ? below + (int64_t)n * (n - 1) : (int64_t)n * (n - 1);
    case DDL_GATHER:
    case DDL_SCATTER:
        return subtrees ? below : n - 1;
    case DDL_ALL_REDUCE:
        return strcmp(algo->name, "double_tree") == 0 ? 2 * (int64_t)n * (n - 1) : -1;
    default:
        return -1;
    }
}

static int64_t sent_by(const sim_rank *r) {
    int64_t bytes = 0;
    for (uint32_t k = 0; k < r->plan.step_count; k++) {
        bytes += r->plan.steps[k].kind == DDL__SEND ? r->plan.steps[k].bytes : 0;
    }
    return bytes;
}

static void check_bytes(const sim_case *c) {
    sim *s = malloc(sizeof *s);
    REQUIRE(s != NULL && sim_open(s, c));
    bool whole = ddl__kind_base(c->kind) <= DDL_ALL_REDUCE;
    int64_t unit = c->count * 4 / (whole ? c->n : 1), sum = 0, most = 0;
    int64_t each = theory(c->algo, c->n), all = theory_sum(c->algo, c->n);
    for (int32_t i = 0; i < c->n; i++) {
        int64_t sent = sent_by(&s->rank[i]);
        sum += sent;
        most = DDL__MAX(most, sent);
        if (each >= 0 && sent != each * unit) {
            test__fail(__FILE__, __LINE__, "%s: rank %d sends %lld bytes, theory says %lld", describe(c, ""), i,
                       (long long)sent, (long long)(each * unit));
        }
    }
    if (all >= 0 && sum != all * unit) {
        test__fail(__FILE__, __LINE__, "%s: %lld bytes, theory says %lld", describe(c, ""), (long long)sum,
                   (long long)(all * unit));
    }
    if (strcmp(c->algo->name, "double_tree") == 0) {
        /* The point of two trees: nobody sends more than the vector in each direction. */
        CHECK(most <= c->n * unit * (c->kind == DDL_ALL_REDUCE ? 2 : 1));
    }
    sim_close(s);
    free(s);
}

TEST(bytes_on_the_wire_are_those_of_the_theory) {
    sim_case *c = malloc(sizeof *c);
    int checked = 0;
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__algos); i++) {
        for (int32_t n = 2; n <= SIM_MAX; n++) {
            ddl__plan_args args;
            if (leave_out(n)) {
                continue;
            }
            *c = (sim_case){.algo = &ddl__algos[i], .kind = ddl__algos[i].kind, .n = n, .chunk_bytes = 40};
            c->count = c->kind <= DDL_ALL_REDUCE ? 6 * n : 6;
            for (int32_t r = 0; r < n; r++) {
                c->host_of[r] = n % 4 == 0 ? r / 4 : 0;
            }
            sim_args(c, 0, &args);
            if (ddl__algo_can(c->algo, &args, false) && (theory(c->algo, n) >= 0 || theory_sum(c->algo, n) >= 0)) {
                check_bytes(c);
                checked++;
            }
        }
    }
    free(c);
    CHECK(checked > 300);
}

/* ---- messages one after the other ---- */

/* Latency terms of a call that fits one chunk, in messages on the longest path; -1 where there is no simple figure. */
static int32_t theory_depth(const ddl__algo *algo, int32_t n) {
    int32_t rounds = (int32_t)ddl__log2_ceil(n);
    bool pow2 = (n & (n - 1)) == 0;
    const char *name = algo->name;
    if (strcmp(name, "ring") == 0) {
        return (algo->kind == DDL_ALL_REDUCE ? 2 : 1) * (n - 1) + (algo->kind == DDL_ALL_GATHER ? rounds : 0);
    }
    if (strcmp(name, "chain") == 0) {
        return n - 1;
    }
    if (strcmp(name, "tree") == 0 || algo->kind == DDL_SCAN) {
        int32_t ways = algo->kind == DDL_BARRIER ? 2 : 1; /* up and down */
        return ways * (rounds - (pow2 ? 0 : 1)); /* messages of one rank do not wait for each other */
    }
    if (strcmp(name, "recursive_doubling") == 0 && algo->kind != DDL_EXSCAN) {
        /* A message in every round leads from an id to its complement; to fold before and unfold after, both must be
         * folded, so more than half of them. */
        return rounds + (!pow2 && 2 * n > 3 << (rounds - 1));
    }
    if (strcmp(name, "halving_doubling") == 0 || strcmp(name, "recursive_halving") == 0) {
        return !pow2 ? -1 : algo->kind == DDL_ALL_REDUCE ? 2 * rounds : rounds;
    }
    if (strcmp(name, "direct") == 0) {
        return algo->kind == DDL_ALL_REDUCE ? 2 : 1;
    }
    if (strcmp(name, "linear") == 0) {
        return 1;
    }
    bool in_rounds = strcmp(name, "bruck") == 0 || strcmp(name, "all_gather") == 0 ||
                     strcmp(name, "dissemination") == 0;
    return in_rounds ? rounds : -1;
}

TEST(latency_is_that_of_the_theory) {
    sim_case *c = malloc(sizeof *c);
    sim *s = malloc(sizeof *s);
    int checked = 0;
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__algos); i++) {
        for (int32_t n = 2; n <= SIM_MAX; n++) {
            int32_t deepest = 0, depth = theory_depth(&ddl__algos[i], n);
            ddl__plan_args args;
            *c = (sim_case){.algo = &ddl__algos[i], .kind = ddl__algos[i].kind, .n = n, .count = n};
            c->chunk_bytes = 1 << 20;
            sim_args(c, 0, &args);
            if (leave_out(n) || depth < 0 || !ddl__algo_can(c->algo, &args, false)) {
                continue;
            }
            REQUIRE(sim_open(s, c) && sim_check_pairs(s) && sim_check_knowledge(s));
            for (uint32_t k = 0; k < s->node_count; k++) {
                deepest = DDL__MAX(deepest, s->nodes[k].depth);
            }
            if (deepest != depth) {
                test__fail(__FILE__, __LINE__, "%s: %d messages in a row, theory says %d", describe(c, ""), deepest,
                           depth);
            }
            sim_close(s);
            checked++;
        }
    }
    CHECK(checked > 300);
    free(c);
    free(s);
}

/* ---- the checker checks ---- */

typedef enum mutation { SLOT, DST, SRC, BYTES, PEER, TURN, LOSE, UNTIE, MUTATIONS } mutation;

/* Whether `after` has another way to wait for `before`. */
static bool is_tied_otherwise(const ddl__plan *plan, uint32_t before, uint32_t after) {
    bool reached[SIM_MAX_STEPS] = {false};
    for (uint32_t k = before; k < after; k++) {
        for (uint32_t i = 0; (k == before || reached[k]) && i < plan->steps[k].next_count; i++) {
            uint32_t next = plan->nexts[plan->steps[k].first_next + i];
            if (k != before || next != after) {
                reached[next] = true;
            }
        }
    }
    return reached[after];
}

static bool overlap(const sim_rank *r, const ddl__step *writer, const ddl__step *other, bool other_reads) {
    uint8_t space = other_reads ? other->src_space : other->dst_space;
    int64_t a = writer->dst + (writer->dst_space == DDL__TMP ? r->user_bytes : r->at[writer->dst_space]);
    int64_t b = (other_reads ? other->src : other->dst) + (space == DDL__TMP ? r->user_bytes : r->at[space]);
    bool touches = other->kind != (other_reads ? DDL__RECV : DDL__SEND);
    return writer->kind != DDL__SEND && touches && a < b + other->bytes && b < a + writer->bytes;
}

/* Cuts one dependency that memory needs and that no others imply. Mere throttles and signals do not count. */
static bool untie(sim_rank *r, uint32_t k, uint64_t draw) {
    ddl__plan *plan = &r->plan;
    ddl__step *step = &plan->steps[k];
    if (step->next_count == 0) {
        return false;
    }
    uint32_t *nexts = plan->nexts + step->first_next, i = (uint32_t)(draw % step->next_count), after = nexts[i];
    ddl__step *next = &plan->steps[after];
    bool conflict = overlap(r, step, next, true) || overlap(r, step, next, false) || overlap(r, next, step, true);
    if (!conflict || step->bytes == 0 || next->bytes == 0 || is_tied_otherwise(plan, k, after)) {
        return false;
    }
    next->waits--;
    nexts[i] = nexts[--step->next_count];
    return true;
}

static bool mutate(sim *s, mutation what, uint64_t draw) {
    sim_rank *r = &s->rank[draw % (uint64_t)s->c->n];
    uint32_t k = (uint32_t)((draw >> 8) % r->plan.step_count);
    ddl__step *step = &r->plan.steps[k];
    bool message = step->peer >= 0;
    int32_t size = sim_element_bytes(s->c->op);
    switch (what) {
    case SLOT:
        step->slot += message ? 1000 : 0;
        return message;
    case DST:
        step->dst += size;
        return step->kind != DDL__SEND && step->bytes > 0;
    case SRC:
        step->src += size;
        return step->kind != DDL__RECV && step->bytes > 0;
    case BYTES:
        step->bytes -= size;
        return message && step->bytes > 0;
    case PEER:
        step->peer = (step->peer + 1) % s->c->n;
        return message && s->c->n > 2;
    case TURN:
        step->flags ^= 1;
        return s->c->op == SIM_AFFINE && (step->kind == DDL__REDUCE || step->kind == DDL__RECV_REDUCE) &&
               step->bytes > 0;
    case LOSE:
        /* In an all_to_all in place the own block is put back to where it never left. */
        if (message || step->bytes == 0 || (s->c->kind == DDL_ALL_TO_ALL && step->dst_space == DDL__OUT)) {
            return false;
        }
        step->bytes = 0;
        return true;
    default:
        return untie(r, k, draw >> 40);
    }
}

TEST(broken_plans_are_noticed) {
    uint64_t random = plans_seed();
    int broken[MUTATIONS] = {0}, noticed[MUTATIONS] = {0};
    sim_case *c = malloc(sizeof *c);
    sim *s = malloc(sizeof *s);
    for (int i = 0; i < 6000; i++) {
        const ddl__algo *algo = &ddl__algos[sim_random(&random) % DDL__COUNT_OF(ddl__algos)];
        ddl__plan_args args;
        *c = (sim_case){.algo = algo, .kind = algo->kind, .n = 2 + (int32_t)(sim_random(&random) % 8)};
        c->count = 5 * c->n + 1;
        c->fence = sim_random(&random) % 2 == 0;
        draw_rest(c, &random);
        c->op = ddl__algo_has(algo, DDL__KEEPS_ORDER) ? SIM_AFFINE : SIM_U32;
        sim_args(c, 0, &args);
        mutation what = (mutation)(i % MUTATIONS);
        if (ddl__algo_can(algo, &args, false) && sim_open(s, c)) {
            if (s->rank[0].plan.step_count > 0 && mutate(s, what, sim_random(&random))) {
                broken[what]++;
                noticed[what] += !check_plans(s);
            }
            sim_close(s);
        }
    }
    for (int what = 0; what < MUTATIONS; what++) {
        CHECK(broken[what] > 30);
        CHECK_EQ(noticed[what], broken[what]);
    }
    free(c);
    free(s);
}

/* Cuts everything loose from the last step of the fence: OUT may then change before all ranks are known to agree. */
TEST(forgotten_fence_is_noticed) {
    sim_case *c = malloc(sizeof *c);
    sim *s = malloc(sizeof *s);
    *c = (sim_case){.algo = ddl__algo_find(DDL_ALL_GATHER, "linear"), .kind = DDL_ALL_GATHER, .n = 5, .count = 3};
    c->chunk_bytes = 64;
    c->fence = true;
    REQUIRE(sim_open(s, c));
    CHECK(check_plans(s));
    ddl__plan *plan = &s->rank[2].plan;
    ddl__step *gate = plan->steps;
    for (uint32_t k = 0; k < plan->step_count && plan->steps[k].bytes == 0; k++) {
        gate = plan->steps[k].kind == DDL__RECV ? &plan->steps[k] : gate;
    }
    CHECK(gate->next_count > 0);
    for (uint32_t i = 0; i < gate->next_count; i++) {
        plan->steps[plan->nexts[gate->first_next + i]].waits--;
    }
    gate->next_count = 0;
    CHECK(!check_plans(s));
    CHECK_STR(s->error, "rank 2 step");
    CHECK_STR(s->error, "writes OUT knowing");
    sim_close(s);
    free(c);
    free(s);
}

/* The root of two ranks begins before it has heard of the other, with no more than the other may have to keep. */
TEST(a_fenced_broadcast_begins_with_what_may_be_early) {
    sim_case *c = malloc(sizeof *c);
    sim *s = malloc(sizeof *s);
    *c = (sim_case){.algo = ddl__algo_find(DDL_BROADCAST, "tree"), .kind = DDL_BROADCAST, .n = 2, .root = 1};
    c->count = DDL__EAGER_BYTES;
    c->chunk_bytes = DDL__EAGER_BYTES;
    c->fence = true;
    REQUIRE(sim_open(s, c));
    CHECK(check_plans(s));
    ddl__plan *plan = &s->rank[1].plan;
    int at_once = 0;
    for (uint32_t k = 0; k < plan->step_count; k++) {
        ddl__step *step = &plan->steps[k];
        if (step->kind == DDL__SEND) {
            at_once += step->waits == 0;
            CHECK_EQ(step->waits == 0, step->src == 0);
        }
    }
    CHECK_EQ(at_once, 1);
    sim_close(s);
    free(c);
    free(s);
}

TEST(early_data_that_is_too_much_is_noticed) {
    sim_case *c = malloc(sizeof *c);
    sim *s = malloc(sizeof *s);
    *c = (sim_case){.algo = ddl__algo_find(DDL_BROADCAST, "tree"), .kind = DDL_BROADCAST, .n = 2};
    c->count = DDL__EAGER_BYTES;
    c->chunk_bytes = DDL__EAGER_BYTES;
    c->fence = true;
    REQUIRE(sim_open(s, c));
    ddl__plan *plan = &s->rank[0].plan;
    for (uint32_t k = 0; k < plan->step_count; k++) {
        plan->steps[k].waits = 0;
        plan->steps[k].next_count = 0;
    }
    CHECK(!check_plans(s));
    CHECK_STR(s->error, "of which it has not heard");
    sim_close(s);
    free(c);
    free(s);
}

/* ---- memory ---- */

typedef struct failing {
    int left, held;
} failing;

static void *failing_alloc(void *user, size_t bytes) {
    failing *f = user;
    if (f->left-- <= 0) {
        return NULL;
    }
    f->held++;
    return malloc(bytes);
}

static void failing_free(void *user, void *memory) {
    ((failing *)user)->held--;
    free(memory);
}

static void fails_cleanly(const sim_case *c) {
    ddl__plan_args args;
    sim_args(c, 0, &args);
    ddl_status status = DDL_ERR_NOMEM;
    for (int left = 0; status == DDL_ERR_NOMEM && left < 200; left++) {
        failing f = {left, 0};
        ddl__base base = {.allocator = {failing_alloc, failing_free, &f}};
        ddl__plan plan;
        status = ddl__plan_make(&base, c->algo, &args, &plan);
        CHECK(status == DDL_OK || (plan.steps == NULL && f.held == 0));
        ddl__plan_free(&base, &plan);
        CHECK_EQ(f.held, 0);
    }
    CHECK_EQ(status, DDL_OK);
}

TEST(running_out_of_memory_is_clean) {
    sim_case *c = malloc(sizeof *c);
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__algos); i++) {
        *c = (sim_case){.algo = &ddl__algos[i], .kind = ddl__algos[i].kind, .n = 8, .count = 40, .chunk_bytes = 16};
        fails_cleanly(c);
        c->inner = c->algo;
        c->algo = &ddl__algo_pieces;
        c->move_bytes = 200;
        bool fits = c->kind != DDL_BARRIER && (c->inner->can == NULL || strstr(c->inner->name, "recursive") != NULL);
        if (fits) {
            fails_cleanly(c);
        }
    }
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__algos_on_device); i++) {
        *c = (sim_case){.algo = &ddl__algos_on_device[i], .kind = ddl__algos_on_device[i].kind, .n = 4, .count = 40,
                        .chunk_bytes = 16, .move_bytes = 64, .host_of = {0, 0, 1, 1}, .natives = true};
        for (size_t k = 0; k < DDL__COUNT_OF(ddl__algos) && c->inner == NULL; k++) {
            c->inner = ddl__algos[k].kind == c->kind && ddl__algos[k].can == NULL ? &ddl__algos[k] : NULL;
        }
        fails_cleanly(c);
    }
    free(c);
}

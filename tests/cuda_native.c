/* Native collectives of plugins/cuda (native.h), all ranks stepped by one thread in random order (cuda_native.h). Every kind,
 * odd sizes and addresses, in place, memory that cannot be shared, streams; other calls, cancelled and dead ranks, sets
 * that come and go. Built and run by test_cuda_kernels.py. It proves the logic, not a GPU. */
#include "cuda_native.h"

/* ---- one operation ---- */

typedef struct call {
    int32_t kind, n, root;
    ddl_dtype dtype;
    ddl_op op;
    int64_t count;
    uint64_t sequence;
    int in_place; /* bit r: of rank r */
    int streams;  /* likewise: on the user's stream, after what makes the input */
    size_t place; /* where in 16 bytes the buffers begin */
    double factor;
} call;

static char *memory[RANKS][3], *expected[RANKS]; /* in, out, and the input before its time */
static size_t in_bytes, out_bytes;

static bool is_kind(const call *c, int32_t a, int32_t b) { return c->kind == a || c->kind == b; }

/* Where the input stands in the output when it is in place, and the other way round. */
static void lay_out(const call *c, int r) {
    size_t bytes = (size_t)c->count * ddl_dtype_bytes(c->dtype);
    bool in_place = (c->in_place >> r & 1) != 0, own = r == c->root;
    struct rank *x = &ranks[r];
    x->in = memory[r][0] + c->place;
    x->out = memory[r][1] + c->place;
    if (c->kind == DDL_BROADCAST) {
        x->out = x->in;
    } else if (in_place && (is_kind(c, DDL_ALL_GATHER, DDL_GATHER)) && (own || c->kind == DDL_ALL_GATHER)) {
        x->in = x->out + (size_t)r * bytes;
    } else if (in_place && (c->kind == DDL_REDUCE_SCATTER || (c->kind == DDL_SCATTER && own))) {
        x->out = x->in + (size_t)r * bytes;
    } else if (in_place && !is_kind(c, DDL_GATHER, DDL_SCATTER) && (c->kind != DDL_REDUCE || own)) {
        x->out = x->in;
    }
}

/* In the order of ranks from rank 0 or, around the ring, from the one behind `owner`, which is the last. */
static void expect_range(const call *c, char *want, char *const *inputs, int hi, int owner, size_t part, size_t count) {
    ddl__reduce_fn kernel = ddl__reduce_kernel_at(DDL__CPU_PORTABLE, c->dtype, c->op);
    size_t bytes = count * ddl_dtype_bytes(c->dtype);
    char *scaled = malloc(bytes + 1);
    for (int j = 0; j < hi; j++) {
        int rank = links.is_ring ? links.rank[(links.place[owner] + 1 + j) % c->n] : j;
        double factor = c->op == DDL_SUM && c->factor != 0 ? c->factor + rank : 1;
        memcpy(scaled, inputs[rank] + part, bytes);
        if (c->op == DDL_AVG && c->dtype == DDL_F16) {
            factor = ddl__average_scale(c->n);
        }
        if (factor != 1) {
            ddl__scale(scaled, scaled, count, c->dtype, factor);
        }
        if (j == 0) {
            memcpy(want, scaled, bytes);
        } else {
            kernel(want, want, scaled, count);
        }
    }
    if (c->op == DDL_AVG && c->dtype != DDL_F16) {
        ddl__average(want, count, c->dtype, c->n);
    } else if (c->op == DDL_AVG && c->n == 3) {
        ddl__apply_float(want, want, count, c->dtype, 3 * ddl__average_scale(3), 1);
    }
    free(scaled);
}

/* Around a ring each rank owns a slice, in whole units of 512 bytes and at least 4096. */
static void expect_reduced(const call *c, char *want, char *const *inputs, int hi, size_t part) {
    size_t element = ddl_dtype_bytes(c->dtype), bytes = (size_t)c->count * element;
    size_t each = ((bytes + (size_t)c->n - 1) / (size_t)c->n + 511) / 512 * 512;
    each = each < 4096 ? 4096 : each;
    if (!links.is_ring || c->kind != DDL_ALL_REDUCE) {
        expect_range(c, want, inputs, hi, bytes > 0 ? (int)(part / bytes) : 0, part, (size_t)c->count);
        return;
    }
    for (int owner = 0; owner < c->n && (size_t)owner * each < bytes; owner++) {
        size_t at = (size_t)owner * each, left = bytes - at < each ? bytes - at : each;
        expect_range(c, want + at, inputs, hi, owner, part + at, left / element);
    }
}

/* What rank r's output holds afterwards; it begins as what it was. */
static void expect(const call *c, char *const *inputs, int r) {
    size_t bytes = (size_t)c->count * ddl_dtype_bytes(c->dtype);
    char *want = expected[r];
    switch (c->kind) {
    case DDL_BROADCAST: memcpy(want, inputs[c->root], bytes); break;
    case DDL_REDUCE:
        if (r == c->root) {
            expect_reduced(c, want, inputs, c->n, 0);
        }
        break;
    case DDL_ALL_REDUCE: expect_reduced(c, want, inputs, c->n, 0); break;
    case DDL_REDUCE_SCATTER: expect_reduced(c, want, inputs, c->n, (size_t)r * bytes); break;
    case DDL_SCAN: expect_reduced(c, want, inputs, r + 1, 0); break;
    case DDL_EXSCAN:
        if (r > 0) {
            expect_reduced(c, want, inputs, r, 0);
        }
        break;
    case DDL_SCATTER: memcpy(want, inputs[c->root] + (size_t)r * bytes, bytes); break;
    default:
        for (int j = 0; j < c->n && (c->kind != DDL_GATHER || r == c->root) && c->kind != DDL_BARRIER; j++) {
            size_t from = c->kind == DDL_ALL_TO_ALL ? (size_t)r * bytes : 0;
            memcpy(want + (size_t)j * bytes, inputs[j] + from, bytes);
        }
    }
}

static void step(struct rank *x) {
    int32_t waits = -2;
    if (x->op == NULL || x->failed || x->gone) {
        return;
    }
    if (random_bits() % 3 == 0) { /* GPUs go on, whether anybody looks or not */
        run_one(streams[random_bits() % (uint64_t)stream_count]);
    }
    stepping++; /* its looks at the clock are no waits */
    ddl_status status = cuda_native_test(&x->t, x->set, x->op, 1 + (int32_t)(random_bits() % 3), &waits);
    stepping--;
    if (status == DDL_OK) {
        x->op = NULL;
    } else if (status == DDL_ERR_MISMATCH) {
        x->failed = true;
        CHECK(waits >= 0 && waits < x->t.world_size);
    } else {
        CHECK_EQ(status, DDL_IN_PROGRESS);
        CHECK(waits >= -1 && waits < x->t.world_size);
    }
}
static void step_others(void) {
    for (int r = 0; r < RANKS; r++) {
        if (ranks[r].set != NULL && ranks[r].op != NULL && !((cuda_native *)ranks[r].set)->cancelled) {
            step(&ranks[r]);
        }
    }
    if (random_bits() % 4 == 0 && stream_count > 0) {
        run_one(streams[random_bits() % (uint64_t)stream_count]);
    }
}

static void start(const call *c, int r, uint64_t signature) {
    struct rank *x = &ranks[r];
    bool streamed = (c->streams >> r & 1) != 0;
    ddl_native_call native = {.size = sizeof native, .kind = c->kind, .root = c->root, .sequence = c->sequence,
                              .element_bytes = (int32_t)ddl_dtype_bytes(c->dtype), .signature = signature, .in = x->in,
                              .out = x->out, .bytes = (uint64_t)c->count * ddl_dtype_bytes(c->dtype), .dtype = c->dtype,
                              .op = c->op, .device = 1, .stream = streamed ? x->stream : NULL};
    native.factor = c->op == DDL_AVG ? 1.0 / c->n : c->factor != 0 ? c->factor + r : 1; /* as the core says it */
    if (streamed && in_bytes > 0) { /* until this has run the input is garbage */
        memory_copy((CUdeviceptr)(uintptr_t)x->in, (CUdeviceptr)(uintptr_t)memory[r][2], in_bytes, x->stream);
    }
    x->failed = x->gone = false;
    CHECK_EQ(cuda_native_start(&x->t, x->set, &native, &x->op), DDL_OK);
}

/* Fills the memory of all ranks and computes what is expected. */
static void prepare(const call *c) {
    size_t bytes = (size_t)c->count * ddl_dtype_bytes(c->dtype), parts = bytes * (size_t)c->n;
    bool in_parts = c->kind == DDL_SCATTER || is_kind(c, DDL_REDUCE_SCATTER, DDL_ALL_TO_ALL);
    bool out_parts = c->kind == DDL_ALL_TO_ALL || is_kind(c, DDL_GATHER, DDL_ALL_GATHER);
    char *inputs[RANKS];
    in_bytes = c->kind == DDL_BARRIER ? 0 : in_parts ? parts : bytes;
    out_bytes = c->kind == DDL_BARRIER ? 0 : out_parts ? parts : bytes;
    for (int r = 0; r < c->n; r++) {
        for (int m = 0; m < 3; m++) {
            memory[r][m] = malloc(parts + 72);
            for (size_t i = 0; i < parts + 64; i += 8) { /* floats that are finite, and integers */
                memcpy(memory[r][m] + i, &(uint64_t){random_bits() & 0x3f3f3f3f3f3f3f3f}, 8);
            }
        }
        lay_out(c, r);
        inputs[r] = memory[r][2];
        if ((c->streams >> r & 1) == 0) {
            memcpy(memory[r][2], ranks[r].in, in_bytes);
        }
        expected[r] = malloc(parts + 64);
    }
    for (int r = 0; r < c->n; r++) {
        memcpy(expected[r], ranks[r].out, out_bytes);
        if (ranks[r].in >= ranks[r].out && ranks[r].in < ranks[r].out + out_bytes) {
            memcpy(expected[r] + (ranks[r].in - ranks[r].out), inputs[r],
                   in_bytes < out_bytes ? in_bytes : out_bytes); /* what is in place and is not written stays */
        }
        expect(c, inputs, r);
    }
}

static void give_back(const call *c) {
    for (int r = 0; r < c->n; r++) {
        for (int m = 0; m < 3; m++) {
            free(memory[r][m]);
        }
        free(expected[r]);
    }
}

static bool run(const call *c) {
    bool good = true;
    int order[RANKS], left = c->n;
    prepare(c);
    for (int r = 0; r < c->n; r++) {
        order[r] = r;
    }
    for (int64_t steps = 0; steps < 1000000; steps++) { /* ranks begin at any time */
        if (left > 0 && random_bits() % 4 == 0) {
            int k = (int)(random_bits() % (uint64_t)left), r = order[k];
            order[k] = order[--left];
            start(c, r, 1000 + c->sequence);
        }
        step(&ranks[random_bits() % (uint64_t)c->n]);
        bool ended = left == 0;
        for (int r = 0; r < c->n; r++) {
            ended = ended && ranks[r].op == NULL;
        }
        if (ended) {
            break;
        }
    }
    for (int r = 0; r < c->n; r++) {
        good = good && ranks[r].op == NULL && memcmp(ranks[r].out, expected[r], out_bytes) == 0;
    }
    give_back(c);
    return good;
}

TEST(every_kind_in_place_or_not_with_streams_and_memory_of_all_sorts) {
    static const struct {
        ddl_dtype dtype;
        ddl_op op;
    } types[] = {{DDL_F32, DDL_SUM}, {DDL_BF16, DDL_SUM}, {DDL_U8, DDL_BXOR}, {DDL_F64, DDL_MAX}, {DDL_I64, DDL_AVG},
                 {DDL_F32_I32, DDL_MIN_INDEX}, {DDL_F16, DDL_AVG}};
    static const int64_t counts[] = {0, 1, 7, 1001, 5000, 30001};
    static const size_t places[] = {0, 0, 8, 3};
    int tried = 0;
    for (int turn = 0; turn < RANKS * WHERES; turn++) {
        int n = turn / WHERES + 1;
        where = turn % WHERES;
        links.apart = where == ON_SEVERAL;
        make_ranks(n);
        open_sets(n, (uint64_t)n);
        for (int i = 0; i < 11 * 7 * 6; i++) {
            call c = {.kind = DDL_BARRIER + i % 11, .n = n, .root = (int)(random_bits() % (uint64_t)n),
                      .dtype = types[i / 11 % 7].dtype, .op = types[i / 11 % 7].op, .count = counts[i / 77 % 6],
                      .sequence = (uint64_t)i + 1, .in_place = (int)(random_bits() % 3 == 0 ? 0 : random_bits() % 16),
                      .streams = (int)(random_bits() % 16), .place = places[random_bits() % 4],
                      .factor = random_bits() % 2 == 0 ? 0 : 0.5};
            c.factor = c.op == DDL_SUM ? c.factor : 0;
            unshareable = i % 3;
            if (!run(&c)) {
                test__fail(__FILE__, __LINE__, "%s of %d, where %d: %s %s, %lld elements, in place %x, streams %x, place %zu, "
                           "factor %g, unshareable %d", ddl__kind_name(c.kind), n, where, ddl_dtype_name(c.dtype),
                           ddl__op_name(c.op), (long long)c.count, (unsigned)c.in_place, (unsigned)c.streams, c.place,
                           c.factor, unshareable);
            }
            tried++;
        }
        free_ranks(n);
    }
    CHECK_EQ(tried, RANKS * WHERES * 462);
    CHECK(words_written > 2000);
    where = ON_ONE;
    links = (cuda_links){0};
}

/* Around a ring of any order: what is reduced and copied is right, and nobody reads but from the one before. A broadcast's
 * pieces are of 4 MiB, so a large one has several; with `apart` copies go by engines (the stand-in's copies). */
TEST(around_a_ring_everything_is_right) {
    static const struct {
        ddl_dtype dtype;
        ddl_op op;
    } types[] = {{DDL_F32, DDL_SUM}, {DDL_BF16, DDL_SUM}, {DDL_I64, DDL_AVG}, {DDL_F16, DDL_AVG}, {DDL_F64, DDL_MAX},
                 {DDL_F32_I32, DDL_MIN_INDEX}};
    static const int32_t kinds[] = {DDL_ALL_REDUCE, DDL_REDUCE_SCATTER, DDL_ALL_GATHER, DDL_BROADCAST, DDL_BARRIER};
    static const int64_t counts[] = {0, 1, 7, 1001, 5000, 30001};
    where = ON_SEVERAL;
    for (int n = 3; n <= RANKS; n++) {
        for (int order = 0; order < 3; order++) {
            links = (cuda_links){.is_ring = true, .apart = order > 0};
            for (int p = 0; p < n; p++) { /* 0 1 2 3, 0 3 2 1, 0 2 1 3 */
                links.rank[p] = order == 1 ? (n - p) % n : order == 2 && p > 0 && p < 3 ? 3 - p : p;
                links.place[links.rank[p]] = p;
            }
            make_ranks(n);
            open_sets(n, (uint64_t)n);
            CHECK_EQ(cuda_native_cost_ns(&ranks[0].t, ranks[0].set, DDL_ALL_TO_ALL, 8), 0u); /* by plans */
            for (int i = 0; i < 5 * 6 * 6; i++) {
                call c = {.kind = kinds[i % 5], .n = n, .root = (int)(random_bits() % (uint64_t)n),
                          .dtype = types[i / 5 % 6].dtype, .op = types[i / 5 % 6].op, .count = counts[i / 30 % 6],
                          .sequence = (uint64_t)i + 1, .in_place = (int)(random_bits() % 2 == 0 ? 0 : random_bits() % 16),
                          .streams = (int)(random_bits() % 16), .place = random_bits() % 2 == 0 ? 0 : 8,
                          .factor = random_bits() % 2 == 0 ? 0 : 0.5};
                c.factor = c.op == DDL_SUM ? c.factor : 0;
                unshareable = i % 3;
                if (c.kind == DDL_BROADCAST && i == 3 && order == 1) {
                    c.count = ((9 << 20) + 52) / (int64_t)ddl_dtype_bytes(c.dtype);
                }
                if (!run(&c)) {
                    test__fail(__FILE__, __LINE__, "%s of %d, order %d: %s %s, %lld elements, in place %x, streams %x, root "
                               "%d, factor %g, unshareable %d", ddl__kind_name(c.kind), n, order, ddl_dtype_name(c.dtype),
                               ddl__op_name(c.op), (long long)c.count, (unsigned)c.in_place, (unsigned)c.streams, c.root,
                               c.factor, unshareable);
                }
            }
            free_ranks(n);
        }
    }
    links = (cuda_links){0};
    where = ON_ONE;
}

/* The search: rings that there are, none where there is none, each of neighbours that reach each other. */
TEST(a_ring_is_found_where_there_is_one) {
    cuda_links found;
    uint32_t reach[CUDA_PLACES] = {0};
    const uint32_t cube[8] = {0x1e, 0x2d, 0x4b, 0x87, 0xe1, 0xd2, 0xb4, 0x78}; /* two squares with diagonals, joined: DGX-1 */
    const uint32_t star[4] = {0xf, 0x3, 0x5, 0x9}, line[4] = {0x3, 0x7, 0xe, 0xc}, pair[2] = {1, 2};
    CHECK(!cuda_ring_find(star, 4, &found));
    CHECK(!cuda_ring_find(line, 4, &found));
    CHECK(!cuda_ring_find(pair, 2, &found));
    REQUIRE(cuda_ring_find(cube, 8, &found));
    uint32_t seen = 0;
    for (int p = 0; p < 8; p++) {
        int32_t a = found.rank[p], b = cuda_ring_neighbour(&found, 8, a, 1);
        CHECK(found.place[a] == p && found.rank[(p + 1) % 8] == b && (cube[a] >> b & 1) != 0);
        CHECK_EQ(cuda_ring_neighbour(&found, 8, b, -1), a);
        seen |= 1u << a;
    }
    CHECK_EQ(seen, 0xffu);
    for (int i = 0; i < CUDA_PLACES; i++) { /* all to all but one that hangs on one: the search gives up soon */
        reach[i] = i == 31 ? 1u : 0x7fffffffu;
    }
    reach[0] = ~0u;
    CHECK(!cuda_ring_find(reach, 32, &found));
}

/* Between several GPUs, not within one, large copies go by engines; in place all_to_all cannot. */
TEST(large_copies_between_gpus_go_by_engines) {
    static const int32_t kinds[] = {DDL_ALL_GATHER, DDL_BROADCAST, DDL_ALL_TO_ALL, DDL_GATHER, DDL_SCATTER, DDL_ALL_REDUCE};
    for (int i = 0; i < 12; i++) {
        where = i < 6 ? ON_SEVERAL : ON_ONE;
        links = (cuda_links){.apart = where == ON_SEVERAL};
        call c = {.kind = kinds[i % 6], .n = 2, .dtype = DDL_F32, .op = DDL_SUM, .sequence = 1, .streams = i % 4};
        c.count = (c.kind == DDL_BROADCAST ? 2 : 1) * ((int64_t)CUDA_ENGINE_BYTES / 4 + 128);
        unshareable = 0;
        make_ranks(2);
        open_sets(2, 1);
        int before = launch_count;
        CHECK(run(&c));
        CHECK_EQ(launch_count > before, i >= 6 || c.kind == DDL_ALL_REDUCE);
        if (c.kind == DDL_ALL_TO_ALL) {
            c.sequence = 2;
            c.in_place = 3;
            CHECK(run(&c));
        }
        free_ranks(2);
    }
    links = (cuda_links){0};
}

/* Memory is mapped once where the output is the input, by all; on one GPU by rank 0 alone. */
TEST(what_is_mapped) {
    for (int i = 0; i < 4; i++) {
        where = i < 2 ? ON_SEVERAL : ON_ONE;
        links = (cuda_links){.apart = where == ON_SEVERAL};
        call c = {.kind = DDL_ALL_REDUCE, .n = 3, .dtype = DDL_F32, .op = DDL_SUM, .count = 5000, .sequence = 1,
                  .in_place = i % 2 == 0 ? 7 : 0};
        unshareable = 0;
        make_ranks(3);
        open_sets(3, 1);
        reached = 0;
        CHECK(run(&c));
        CHECK_EQ(reached, (where == ON_SEVERAL ? 3 : 1) * 2 * (i % 2 == 0 ? 1 : 2));
        free_ranks(3);
    }
    links = (cuda_links){0};
    where = ON_ONE;
}

/* One rank calls something else: all that see it say so, and nothing is written. */
TEST(another_call_is_found_before_anything_is_written) {
    for (int other = 0; other < 3; other++) {
        int seen = 0;
        call c = {.kind = DDL_ALL_REDUCE, .n = 3, .dtype = DDL_F32, .op = DDL_SUM, .count = 5000, .sequence = 1,
                  .in_place = 2};
        unshareable = 0;
        make_ranks(3);
        open_sets(3, 9);
        prepare(&c);
        for (int r = 0; r < 3; r++) {
            memcpy(expected[r], ranks[r].out, out_bytes);
            start(&c, r, r == other ? 77 : 78);
        }
        int before = launch_count;
        for (int i = 0; i < 1000; i++) {
            step(&ranks[random_bits() % 3]);
        }
        for (int r = 0; r < 3; r++) {
            seen += ranks[r].failed;
            cuda_native_cancel(&ranks[r].t, ranks[r].set, ranks[r].op);
            ranks[r].op = NULL;
        }
        run_all();
        CHECK_EQ(seen, 3);
        CHECK_EQ(launch_count, before);
        for (int r = 0; r < 3; r++) {
            CHECK(memcmp(ranks[r].out, expected[r], out_bytes) == 0);
        }
        give_back(&c);
        free_ranks(3);
    }
}

/* One rank gives up at a random time. Afterwards its memory is touched by nobody, whatever the others still run. */
TEST(after_a_cancel_nobody_touches_the_memory) {
    int launched = 0, missing = 0;
    for (int trial = 0; trial < 800; trial++) {
        int r0 = trial / 4 % 3, r1 = (r0 + 1) % 3, r2 = (r0 + 2) % 3; /* r0 gives up */
        where = trial >= 400 || trial / 12 % 2 == 0 ? ON_SEVERAL : ON_ONE;
        links = (cuda_links){.is_ring = trial >= 400, .apart = where == ON_SEVERAL, .rank = {0, 1, 2}, .place = {0, 1, 2}};
        call c = {.kind = trial % 2 == 0 ? DDL_ALL_REDUCE : links.is_ring ? DDL_REDUCE_SCATTER : DDL_ALL_TO_ALL, .n = 3, .dtype = DDL_F32, .op = DDL_SUM,
                  .count = 3000, .sequence = 1, .in_place = trial % 8};
        int before = launch_count;
        unshareable = trial % 4;
        make_ranks(3);
        open_sets(3, 5);
        prepare(&c);
        for (int r = 0; r < 3; r++) {
            start(&c, r, 8);
        }
        for (uint64_t i = random_bits() % (links.is_ring ? 120 : 60); i > 0; i--) {
            step(&ranks[random_bits() % 3]);
        }
        if (ranks[r0].op != NULL) {
            uint64_t begun = clock_ns;
            cuda_native_cancel(&ranks[r0].t, ranks[r0].set, ranks[r0].op);
            CHECK(clock_ns - begun < CUDA_CANCEL_PATIENCE_NS);
            ranks[r0].op = NULL;
            memset(memory[r0][0], 0x11, in_bytes + 64);
            memset(memory[r0][1], 0x22, in_bytes + 64);
            missing++;
            for (int i = 0; i < 200; i++) {
                step(&ranks[random_bits() % 2 == 0 ? r1 : r2]);
            }
            run_all();
            for (size_t i = 0; i < in_bytes + 64; i++) {
                if (memory[r0][0][i] != 0x11 || memory[r0][1][i] != 0x22) {
                    test__fail(__FILE__, __LINE__, "byte %zu was written after the cancel, trial %d", i, trial);
                    break;
                }
            }
        }
        for (int r = 0; r < 3; r++) {
            if (ranks[r].op != NULL) {
                cuda_native_cancel(&ranks[r].t, ranks[r].set, ranks[r].op);
                ranks[r].op = NULL;
            }
        }
        launched += launch_count > before;
        give_back(&c);
        free_ranks(3);
    }
    links = (cuda_links){0};
    where = ON_ONE;
    CHECK(launched > 40 && launched < 760); /* both happen: before the launch, and after it */
    CHECK(missing > 200);
}

/* A rank gives up while its GPU is busy with something else for longer than its patience: what it has launched ends all the
 * same before the memory that it uses is given back, which the driver does not see to. */
TEST(a_cancel_outlasts_what_was_launched) {
    clock_step_ns = 10000000;
    for (int trial = 0; trial < 10; trial++) {
        call c = {.kind = DDL_ALL_REDUCE, .n = 3, .dtype = DDL_F32, .op = DDL_SUM, .count = 3000, .sequence = 1};
        links = (cuda_links){0};
        unshareable = 0;
        make_ranks(3);
        open_sets(3, 5);
        prepare(&c);
        for (int r = 0; r < 3; r++) {
            start(&c, r, 8);
        }
        CUstream own = held = ((cuda_native *)ranks[0].set)->stream;
        REQUIRE(own != NULL);
        for (int i = 0; i < 10000 && own->to == 0; i++) {
            step(&ranks[random_bits() % 3]);
        }
        REQUIRE(own->to > 0);
        uint64_t begun = clock_ns;
        cuda_native_cancel(&ranks[0].t, ranks[0].set, ranks[0].op);
        ranks[0].op = NULL;
        CHECK(clock_ns - begun >= CUDA_CANCEL_PATIENCE_NS);
        CHECK_EQ(own->from, own->to);
        held = NULL;
        for (int r = 1; r < 3; r++) {
            if (ranks[r].op != NULL) {
                cuda_native_cancel(&ranks[r].t, ranks[r].set, ranks[r].op);
                ranks[r].op = NULL;
            }
        }
        run_all();
        give_back(&c);
        free_ranks(3);
    }
    clock_step_ns = 100000;
}

/* What failed, as far as this rank was told, is waited for before its memory goes. */
TEST(what_failed_may_still_run) {
    for (int trial = 0; trial < 10; trial++) {
        call c = {.kind = DDL_ALL_REDUCE, .n = 3, .dtype = DDL_F32, .op = DDL_SUM, .count = 3000, .sequence = 1};
        int32_t waits = -2;
        make_ranks(3);
        open_sets(3, 5);
        prepare(&c);
        for (int r = 0; r < 3; r++) {
            start(&c, r, 8);
        }
        CUstream own = held = ((cuda_native *)ranks[0].set)->stream;
        for (int i = 0; i < 10000 && own->to == 0; i++) {
            step(&ranks[random_bits() % 3]);
        }
        REQUIRE(own->to > 0);
        cuda_mark_ask_next(&((cuda_op *)ranks[0].op)->mark);
        queries_fail = true;
        stepping++;
        CHECK_EQ(cuda_native_test(&ranks[0].t, ranks[0].set, ranks[0].op, 1, &waits), DDL_ERR_SYSTEM);
        stepping--;
        queries_fail = false;
        CHECK(own->from < own->to);
        cuda_native_cancel(&ranks[0].t, ranks[0].set, ranks[0].op);
        ranks[0].op = NULL;
        CHECK_EQ(own->from, own->to);
        uint64_t begun = clock_ns;
        for (int r = 1; r < 3; r++) {
            if (ranks[r].op != NULL) {
                cuda_native_cancel(&ranks[r].t, ranks[r].set, ranks[r].op);
                ranks[r].op = NULL;
            }
        }
        CHECK(clock_ns - begun < CUDA_CANCEL_PATIENCE_NS); /* nobody waits for it */
        held = NULL;
        run_all();
        give_back(&c);
        free_ranks(3);
    }
}

/* A rank is killed before it comes, or in the middle: the others wait for nothing of it. */
TEST(a_dead_rank_frees_the_others) {
    for (int trial = 0; trial < 160; trial++) { /* the last half on one GPU, where rank 0 does the work of all */
        int dead = trial >= 120 ? 0 : 2, left[2] = {dead == 0 ? 1 : 0, dead == 0 ? 2 : 1};
        where = trial < 80 ? ON_SEVERAL : ON_ONE;
        call c = {.kind = DDL_ALL_REDUCE, .n = 3, .dtype = DDL_F32, .op = DDL_SUM, .count = 3000, .sequence = 1};
        links = (cuda_links){.is_ring = trial >= 40 && trial < 80, .apart = where == ON_SEVERAL,
                             .rank = {0, 2, 1}, .place = {0, 2, 1}};
        unshareable = 0;
        make_ranks(3);
        open_sets(3, 5);
        prepare(&c);
        for (int r = 0; r < 3; r++) {
            if (r != dead || trial % 2 == 0) {
                start(&c, r, 8);
            }
        }
        for (int i = 0; i < trial % 80; i++) {
            step(&ranks[random_bits() % 3]);
        }
        ranks[dead].gone = true;
        for (int i = 0; i < 100; i++) {
            step(&ranks[left[random_bits() % 2]]);
        }
        uint64_t begun = clock_ns;
        for (int i = 0; i < 2; i++) {
            int r = left[i];
            ranks[r].peers[dead].dead = true;
            if (ranks[r].op != NULL) {
                cuda_native_cancel(&ranks[r].t, ranks[r].set, ranks[r].op);
                ranks[r].op = NULL;
            }
            cuda_native_close(&ranks[r].t, ranks[r].set);
        }
        CHECK(clock_ns - begun < CUDA_CANCEL_PATIENCE_NS);
        for (int i = 0; i < 2; i++) {
            cuda_natives_reclaim(&ranks[left[i]].t, false);
            CHECK(ranks[left[i]].t.natives->first == NULL);
        }
        run_all();
        give_back(&c);
        if (ranks[dead].op != NULL) { /* its own memory, which the operating system takes back */
            ranks[dead].peers[left[0]].dead = ranks[dead].peers[left[1]].dead = true;
            cuda_native_cancel(&ranks[dead].t, ranks[dead].set, ranks[dead].op);
        }
        free_ranks(3);
    }
    links = (cuda_links){0};
    where = ON_ONE;
}

/* More sets than a board has places for, one after another; ranks close them at different times. */
TEST(sets_come_and_go) {
    make_ranks(3);
    unshareable = 0;
    for (uint64_t group = 0; group < 200; group++) {
        int32_t world[3] = {0, 1, 2};
        void *last[3] = {ranks[0].set, ranks[1].set, ranks[2].set};
        for (int r = 0; r < 3; r++) {
            REQUIRE(cuda_native_open(&ranks[r].t, group, world, 3, r, &ranks[r].set) == DDL_OK);
        }
        call c = {.kind = DDL_ALL_REDUCE, .n = 3, .dtype = DDL_I32, .op = DDL_SUM, .count = 100, .sequence = 1};
        CHECK(run(&c));
        for (int r = 0; r < 3 && group > 0; r++) {
            cuda_native_close(&ranks[r].t, last[r]); /* the set before this one */
        }
    }
    free_ranks(3);
}

/* A rank that has ended closes its set while another still looks for the last word. */
TEST(a_closed_set_still_answers) {
    for (int trial = 0; trial < 30; trial++) {
        call c = {.kind = DDL_ALL_REDUCE, .n = 2, .dtype = DDL_F32, .op = DDL_SUM, .count = 100, .sequence = 1};
        unshareable = 0;
        make_ranks(2);
        open_sets(2, 3);
        prepare(&c);
        start(&c, 0, 1);
        start(&c, 1, 1);
        for (int i = 0; i < 10000 && ranks[0].op != NULL; i++) {
            step(&ranks[0]);
            if (random_bits() % 2 == 0 || ((cuda_native *)ranks[1].set)->head == NULL ||
                ((cuda_native *)ranks[1].set)->head->step != cuda_done_step) {
                step(&ranks[1]);
            }
        }
        void *set = ranks[0].set;
        CHECK(ranks[0].op == NULL);
        ranks[0].set = NULL;
        cuda_native_close(&ranks[0].t, set);
        const int32_t world[2] = {0, 1}; /* takes a place on the board: not that of the set that is not over */
        CHECK_EQ(cuda_native_open(&ranks[0].t, 4, world, 2, 0, &ranks[0].set), DDL_OK);
        for (int i = 0; i < 1000 && ranks[1].op != NULL; i++) {
            step(&ranks[1]);
        }
        CHECK(ranks[1].op == NULL && memcmp(ranks[1].out, expected[1], out_bytes) == 0);
        give_back(&c);
        free_ranks(2);
    }
}

/* ---- bytes per link: what kernels read from and write to each GPU's memory, by their arguments ---- */

enum { LINK_RANKS = 8 };
static int64_t moved_in[LINK_RANKS], moved_out[LINK_RANKS]; /* of one rank's launch: read from, written to, each rank */

/* Memory of rank j begins at (j + 1) << 40: nobody looks into it. */
static ddl_status count_bytes(const cuda_sink *sink, cuda_kernel kernel, uint32_t blocks, uint32_t rows,
                              const void *args) {
    const cuda_reduce_args *a = args;
    int64_t bytes = a->range.count * (kernel == CUDA_K_f32_sum ? 4 : 1);
    (void)sink, (void)blocks, (void)rows;
    CHECK(kernel == CUDA_K_f32_sum || kernel == CUDA_K_bits_bor);
    for (int32_t i = 0; i < a->src_count; i++) {
        moved_in[((uintptr_t)a->src[i] >> 40) - 1] += bytes;
    }
    for (int32_t i = 0; i < a->dst_count; i++) {
        moved_out[((uintptr_t)a->dst[i] >> 40) - 1] += bytes;
    }
    return DDL_OK;
}

/* Counts what crosses the link from rank a to rank b when all n ranks run `kind` on `bytes`: b reads of a, or a writes to b.
 * Around the ring where links.is_ring. */
static void count_links(int32_t kind, int n, int64_t bytes, int64_t link[LINK_RANKS][LINK_RANKS]) {
    const cuda_sink sink = {.put = count_bytes, .multiprocessors = 4};
    memset(link, 0, sizeof(int64_t) * LINK_RANKS * LINK_RANKS);
    for (int r = 0; r < n; r++) {
        cuda_job job = {.call = {.kind = kind, .dtype = DDL_F32, .op = DDL_SUM, .element_bytes = 4,
                                 .bytes = (uint64_t)bytes, .factor = 1}, .count = n, .rank = r};
        for (int j = 0; j < n; j++) {
            job.in[j] = (const char *)((uintptr_t)(j + 1) << 40);
            job.out[j] = (char *)((uintptr_t)(j + 1) << 40) + ((uintptr_t)1 << 39);
        }
        memset(moved_in, 0, sizeof moved_in);
        memset(moved_out, 0, sizeof moved_out);
        for (int32_t i = 0; i < (links.is_ring ? cuda_ring_rounds(kind, (uint64_t)bytes, n) : 1); i++) {
            CHECK_EQ(links.is_ring ? cuda_ring_put(&sink, &job, &links, i) : cuda_job_put(&sink, &job), DDL_OK);
        }
        for (int j = 0; j < n; j++) {
            link[j][r] += moved_in[j];
            link[r][j] += moved_out[j];
        }
    }
}

/* Each of the n - 1 links of a rank carries, in either direction, the least that a reduction of all among all can: B / n of
 * the reduce-scatter and B / n of the all-gather, so 2 (n - 1) / n B for each rank (Patarasu and Yuan, "Bandwidth optimal
 * all-reduce algorithms"). An all-gather and a reduce-scatter move each part once. Slices are whole units of 512 bytes. */
TEST(bytes_over_each_link_are_those_of_theory) {
    static int64_t link[LINK_RANKS][LINK_RANKS];
    const int64_t bytes = 840 * 4096;
    for (int n = 2; n <= LINK_RANKS; n++) {
        int64_t part = (bytes / n + CUDA_SLICE_UNIT - 1) / CUDA_SLICE_UNIT * CUDA_SLICE_UNIT, total = bytes / n * n;
        for (int kind = 0; kind < 3; kind++) {
            static const int32_t kinds[] = {DDL_ALL_REDUCE, DDL_REDUCE_SCATTER, DDL_ALL_GATHER};
            count_links(kinds[kind], n, kind == 0 ? total : bytes, link);
            for (int a = 0; a < n; a++) {
                for (int b = 0; b < n; b++) {
                    int64_t want = kind == 0 ? 2 * bytes / n : bytes;
                    int64_t slack = kind == 0 ? 2 * (n + 1) * (part - bytes / n) : 0;
                    int64_t off = link[a][b] - want;
                    if (a != b && (off > slack || off < -slack)) {
                        test__fail(__FILE__, __LINE__, "kind %d of %d ranks: %lld bytes from %d to %d, not %lld",
                                   kinds[kind], n, (long long)link[a][b], a, b, (long long)want);
                    }
                }
            }
        }
    }
}

/* Around a ring 2 (n - 1) / n B go from each rank to the next and nothing anywhere else (Patarasu and Yuan, as above); of a
 * reduce-scatter and an all-gather n - 1 parts. */
TEST(bytes_around_a_ring_are_those_of_theory) {
    static int64_t link[LINK_RANKS][LINK_RANKS];
    static const int32_t kinds[] = {DDL_ALL_REDUCE, DDL_REDUCE_SCATTER, DDL_ALL_GATHER};
    for (int n = 3; n <= LINK_RANKS; n++) {
        links = (cuda_links){.is_ring = true};
        for (int p = 0; p < n; p++) { /* 0, n - 1, ..., 1 */
            links.rank[p] = (n - p) % n;
            links.place[links.rank[p]] = p;
        }
        int64_t part = (int64_t)n * CUDA_SLICE_LEAST;
        for (int i = 0; i < 3; i++) {
            count_links(kinds[i], n, i == 0 ? part * n : part, link);
            for (int a = 0; a < n; a++) {
                for (int b = 0; b < n; b++) {
                    int64_t want = (a + n - 1) % n == b ? (i == 0 ? 2 : 1) * (n - 1) * part : 0;
                    CHECK(a == b || link[a][b] == want);
                }
            }
        }
    }
    links = (cuda_links){0};
}

TEST(what_is_not_served_is_refused) {
    make_ranks(2);
    open_sets(2, 1);
    void *set = NULL;
    int32_t many[CUDA_PLACES + 1] = {0};
    ddl_native_call call = {.size = sizeof call, .kind = DDL_ALL_REDUCE, .dtype = DDL_F32, .op = DDL_BAND, .device = 1};
    CHECK_EQ(cuda_native_start(&ranks[0].t, ranks[0].set, &call, &set), DDL_ERR_UNSUPPORTED);
    call.kind = DDL_GATHERV;
    CHECK_EQ(cuda_native_start(&ranks[0].t, ranks[0].set, &call, &set), DDL_ERR_UNSUPPORTED);
    CHECK_EQ(cuda_native_cost_ns(&ranks[0].t, ranks[0].set, DDL_GATHERV, 8), 0u);
    CHECK_EQ(cuda_native_open(&ranks[0].t, 2, many, CUDA_PLACES + 1, 0, &set), DDL_ERR_UNSUPPORTED);
    ranks[0].peers[1].failed = true;
    CHECK_EQ(cuda_native_open(&ranks[0].t, 2, (const int32_t[]){0, 1}, 2, 0, &set), DDL_ERR_UNSUPPORTED);
    free_ranks(2);
}

/* Views of memory: counts and shapes, DDL_ARRAY (which refuses a pointer at compile time), memory of ddl_tensor_alloc,
 * DLPack both ways, strides that a message must honour.
 * tests/run: variants=gcc,asan,arm64 timeout=60 */
#include "world.h"

#include <stdatomic.h>

/* ---- views ---- */

TEST(counts_and_shapes) {
    int64_t shape[9] = {2, 3, 4, 1, 1, 1, 1, 1, 1};
    int dummy = 0;
    ddl_tensor t = ddl_tensor_nd(&dummy, DDL_F32, 3, shape);
    CHECK_EQ(ddl_tensor_count(&t), 24);
    CHECK(t.data == &dummy && t.ndim == 3 && t.device == DDL_HOST && t.strides[0] == 0);
    t = ddl_tensor_nd(&dummy, DDL_F32, 0, NULL);
    CHECK_EQ(ddl_tensor_count(&t), 1);
    t = ddl_tensor_nd(&dummy, DDL_F32, 8, shape);
    CHECK_EQ(ddl_tensor_count(&t), 24);
    static const int bad[] = {-1, 9, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 4; i++) {
        t = ddl_tensor_nd(&dummy, DDL_F32, bad[i], shape);
        CHECK_EQ((int)t.dtype, (int)DDL_DTYPE_NONE);
    }
    t = ddl_tensor_nd(&dummy, DDL_F32, 2, NULL);
    CHECK_EQ((int)t.dtype, (int)DDL_DTYPE_NONE);
    t = ddl_tensor_1d(&dummy, DDL_F32, -3);
    CHECK_EQ(ddl_tensor_count(&t), -1);
    t = ddl_tensor_1d(&dummy, DDL_F32, 0);
    CHECK_EQ(ddl_tensor_count(&t), 0);
    t = ddl_tensor_nd(&dummy, DDL_F32, 3, (int64_t[]){INT64_MAX, INT64_MAX, 2});
    CHECK_EQ(ddl_tensor_count(&t), -1);
    t.ndim = 20;
    CHECK_EQ(ddl_tensor_count(&t), -1);
    CHECK_EQ(ddl_tensor_count(NULL), -1);
}

TEST(types_have_sizes_and_names) {
    static const size_t sizes[] = {0, 2, 2, 4, 8, 1, 1, 4, 4, 8, 8, 1, 8, 16, 8, 16, 1, 1, 0};
    for (int d = 0; d <= 18; d++) {
        CHECK_EQ(ddl_dtype_bytes((ddl_dtype)d), sizes[d]);
        CHECK((strcmp(ddl_dtype_name((ddl_dtype)d), "?") == 0) == (sizes[d] == 0));
        for (int e = 1; e < d && d < 18; e++) {
            CHECK(strcmp(ddl_dtype_name((ddl_dtype)d), ddl_dtype_name((ddl_dtype)e)) != 0);
        }
    }
    CHECK_EQ(ddl_dtype_bytes((ddl_dtype)-1), 0);
    CHECK_EQ(ddl_dtype_name(DDL_F32), "f32");
}

#define ARRAY_IS(type, dtype_)                                                                             \
    do {                                                                                                   \
        type a[5] = {0};                                                                                   \
        ddl_tensor t = DDL_ARRAY(a), v = DDL_VIEW(&a[1], 3);                                               \
        CHECK(t.data == a && t.dtype == dtype_ && t.ndim == 1 && ddl_tensor_count(&t) == 5);               \
        CHECK(v.data == &a[1] && v.dtype == dtype_ && ddl_tensor_count(&v) == 3);                          \
        CHECK_EQ(ddl_dtype_bytes(t.dtype), sizeof(type));                                                  \
    } while (0)

TEST(an_array_knows_its_type_and_length) {
    ARRAY_IS(float, DDL_F32);
    ARRAY_IS(double, DDL_F64);
    ARRAY_IS(int8_t, DDL_I8);
    ARRAY_IS(uint8_t, DDL_U8);
    ARRAY_IS(int32_t, DDL_I32);
    ARRAY_IS(uint32_t, DDL_U32);
    ARRAY_IS(int64_t, DDL_I64);
    ARRAY_IS(uint64_t, DDL_U64);
    ARRAY_IS(_Bool, DDL_BOOL);
}

/* Compiles a function body with a compiler; 0 when it is accepted. */
static int compiles(const char *compiler, const char *body) {
    char path[] = "/tmp/ddl-test-XXXXXX.c", command[600];
    const char *root = getenv("TEST_ROOT");
    int fd = mkstemps(path, 2);
    FILE *file = fd >= 0 ? fdopen(fd, "w") : NULL;
    if (file == NULL) {
        return -1;
    }
    fprintf(file, "#include \"ddl.h\"\nvoid f(float *p);\nvoid f(float *p) { %s (void)p; }\n", body);
    fclose(file);
    snprintf(command, sizeof command, "%s -std=c11 -fsyntax-only -I%s %s >/dev/null 2>&1", compiler, root ? root : ".", path);
    int status = system(command);
    unlink(path);
    return status;
}

TEST(a_pointer_is_no_array) {
    static const char *const compilers[] = {"gcc", "clang"};
    int tried = 0;
    for (int i = 0; i < 2; i++) {
        char probe[80];
        snprintf(probe, sizeof probe, "command -v %s >/dev/null", compilers[i]);
        if (system(probe) != 0) {
            continue;
        }
        tried++;
        CHECK_EQ(compiles(compilers[i], "float a[4]; ddl_tensor t = DDL_ARRAY(a); (void)t;"), 0);
        CHECK_EQ(compiles(compilers[i], "ddl_tensor t = DDL_VIEW(p, 4); (void)t;"), 0);
        CHECK(compiles(compilers[i], "ddl_tensor t = DDL_ARRAY(p); (void)t;") > 0);
        CHECK(compiles(compilers[i], "float a[4]; ddl_tensor t = DDL_ARRAY(a, sizeof a); (void)t;") > 0);
        CHECK(compiles(compilers[i], "struct { int x; } a[4]; ddl_tensor t = DDL_ARRAY(a); (void)t;") > 0);
    }
    if (tried == 0) {
        SKIP("no compiler here");
    }
}

/* ---- memory ---- */

static void memory(ddl_group *w, void *arg) {
    (void)arg;
    ddl_context *c = ddl_group_context(w);
    ddl_stats before, during;
    OK(ddl_stats_get(c, &before));
    enum { N = 50 };
    ddl_tensor t[N];
    for (int i = 0; i < N; i++) {
        OK(ddl_tensor_alloc(c, DDL_F64, 2, (int64_t[]){i, 1000}, &t[i]));
        CHECK_EQ((uintptr_t)t[i].data % 64, 0);
        CHECK_EQ(ddl_tensor_count(&t[i]), i * 1000);
        memset(t[i].data, i, (size_t)i * 8000);
    }
    OK(ddl_stats_get(c, &during));
    CHECK(during.memory_bytes < before.memory_bytes + 32 * N); /* the caller's memory is not the context's, a list is */
    CHECK(during.memory_peak_bytes < before.memory_peak_bytes + 64 * N);
    for (int i = 0; i < N; i++) {
        unsigned char *at = t[i].data;
        CHECK(i == 0 || (at[0] == i && at[i * 8000 - 1] == i));
    }
    ddl_tensor copy = t[7], middle = t[8];
    middle.data = (char *)middle.data + 8;
    FAILS(ddl_tensor_free(c, &middle), DDL_ERR_ARG, "ddl_tensor_free");
    for (int i = N - 1; i >= 0; i -= 2) {
        OK(ddl_tensor_free(c, &t[i]));
        CHECK(t[i].data == NULL && t[i].dtype == DDL_DTYPE_NONE && t[i].ndim == 0);
        OK(ddl_tensor_free(c, &t[i])); /* zeroed: skipped */
    }
    FAILS(ddl_tensor_free(c, &copy), DDL_ERR_ARG, "freed before");
    CHECK(copy.data != NULL);
    float own[4];
    ddl_tensor foreign = DDL_ARRAY(own);
    FAILS(ddl_tensor_free(c, &foreign), DDL_ERR_ARG, "ddl_tensor_free");
    OK(ddl_stats_get(c, &during));
    CHECK(during.memory_bytes < before.memory_bytes + 32 * N);
}

TEST(memory_is_lent_and_taken_back_once) { world_threads(1, memory, NULL); } /* the rest goes with the context */

static void refused(ddl_group *w, void *arg) {
    (void)arg;
    ddl_context *c = ddl_group_context(w);
    ddl_tensor t, poison;
    memset(&t, 0xa5, sizeof t);
    poison = t;
    int64_t shape[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    FAILS(ddl_tensor_alloc(c, DDL_F32, 9, shape, &t), DDL_ERR_ARG, "ddl_tensor_alloc: 9 dimensions");
    FAILS(ddl_tensor_alloc(c, DDL_F32, -1, shape, &t), DDL_ERR_ARG, "ddl_tensor_alloc");
    FAILS(ddl_tensor_alloc(c, DDL_F32, 1, NULL, &t), DDL_ERR_ARG, "ddl_tensor_alloc: shape");
    FAILS(ddl_tensor_alloc(c, DDL_F32, 1, shape, NULL), DDL_ERR_ARG, "ddl_tensor_alloc: out_tensor");
    FAILS(ddl_tensor_alloc(c, DDL_DTYPE_NONE, 1, shape, &t), DDL_ERR_ARG, "ddl_tensor_alloc");
    FAILS(ddl_tensor_alloc(c, (ddl_dtype)99, 1, shape, &t), DDL_ERR_ARG, "ddl_tensor_alloc");
    FAILS(ddl_tensor_alloc(c, DDL_F32, 1, (int64_t[]){-1}, &t), DDL_ERR_ARG, "ddl_tensor_alloc");
    FAILS(ddl_tensor_alloc(c, DDL_F32, 1, (int64_t[]){INT64_MAX}, &t), DDL_ERR_ARG, "ddl_tensor_alloc");
    CHECK(memcmp(&t, &poison, sizeof t) == 0);
    CHECK_EQ((int)ddl_tensor_alloc(NULL, DDL_F32, 1, shape, &t), (int)DDL_ERR_ARG);
}

TEST(allocations_that_make_no_sense_are_refused) { world_threads(1, refused, NULL); }

static atomic_int allow;

static void *picky_alloc(void *user, size_t bytes) {
    (void)user;
    return bytes > 1000000 && !atomic_load(&allow) ? NULL : malloc(bytes);
}

static void picky_free(void *user, void *memory) {
    (void)user;
    free(memory);
}

static void no_memory(ddl_group *w, void *arg) {
    (void)arg;
    ddl_context *c = ddl_group_context(w);
    ddl_tensor t = {0};
    FAILS(ddl_tensor_alloc(c, DDL_F32, 1, (int64_t[]){1000000}, &t), DDL_ERR_NOMEM, "no memory for 4000000 bytes");
    CHECK(t.data == NULL);
    atomic_store(&allow, 1);
    OK(ddl_tensor_alloc(c, DDL_F32, 1, (int64_t[]){1000000}, &t));
    OK(ddl_tensor_free(c, &t));
}

TEST(no_memory_is_an_error_not_an_end) {
    ddl_config config = {.allocator = {picky_alloc, picky_free, NULL}};
    world_config = &config;
    world_threads(1, no_memory, NULL);
    world_config = NULL;
}

/* ---- DLPack ---- */

TEST(dlpack_there_and_back) {
    static const struct {
        ddl_dtype dtype;
        uint8_t code, bits;
    } types[] = {{DDL_F16, 2, 16}, {DDL_BF16, 4, 16}, {DDL_F32, 2, 32}, {DDL_F64, 2, 64}, {DDL_I8, 0, 8}, {DDL_U8, 1, 8},
                 {DDL_I32, 0, 32}, {DDL_U32, 1, 32}, {DDL_I64, 0, 64}, {DDL_U64, 1, 64}, {DDL_BOOL, 6, 8},
                 {DDL_E4M3, 10, 8}, {DDL_E5M2, 12, 8}};
    char memory[4096];
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        int64_t shape[3] = {2, 3, 4}, strides[3] = {40, 8, 2};
        ddl_dlpack in = {.data = memory, .device = {1, 0}, .ndim = 3, .dtype = {types[i].code, types[i].bits, 1},
                         .shape = shape, .strides = i % 2 ? strides : NULL, .byte_offset = 16};
        ddl_tensor t;
        ddl_dlpack back;
        CHECK_EQ((int)ddl_tensor_from_dlpack(&in, &t), (int)DDL_OK);
        CHECK(t.data == memory + 16 && t.dtype == types[i].dtype && t.ndim == 3 && t.device == DDL_HOST);
        for (int d = 0; d < 3; d++) {
            CHECK_EQ(t.shape[d], shape[d]);
            CHECK_EQ(t.strides[d], i % 2 ? strides[d] : 0);
        }
        CHECK_EQ((int)ddl_tensor_to_dlpack(&t, &back), (int)DDL_OK);
        CHECK(back.data == memory + 16 && back.byte_offset == 0 && back.device.type == 1 && back.dtype.lanes == 1);
        CHECK(back.dtype.code == types[i].code && back.dtype.bits == types[i].bits && back.ndim == 3);
        CHECK(back.shape == t.shape);
        CHECK(i % 2 ? back.strides == t.strides : back.strides == NULL);
    }
}

TEST(dlpack_that_cannot_be_shown_is_refused) {
    float memory[64];
    int64_t shape[9] = {2, 3, 1, 1, 1, 1, 1, 1, 1}, strides[2] = {0, 0}, negative[2] = {-1, 3}, huge[2] = {INT64_MAX, 4};
    ddl_tensor t, poison;
    memset(&t, 0xa5, sizeof t);
    poison = t;
    const ddl_dlpack good = {.data = memory, .device = {1, 0}, .ndim = 2, .dtype = {2, 32, 1}, .shape = shape};
    ddl_dlpack d;
#define REFUSED(change, status_)                                                                           \
    d = good;                                                                                              \
    change;                                                                                                \
    CHECK_EQ((int)ddl_tensor_from_dlpack(&d, &t), (int)status_);                                           \
    CHECK(memcmp(&t, &poison, sizeof t) == 0)
    REFUSED(d.ndim = 9, DDL_ERR_ARG);
    REFUSED(d.ndim = -1, DDL_ERR_ARG);
    REFUSED(d.dtype.lanes = 4, DDL_ERR_ARG);
    REFUSED(d.dtype.lanes = 0, DDL_ERR_ARG);
    REFUSED(d.shape = NULL, DDL_ERR_ARG);
    REFUSED(d.shape = negative, DDL_ERR_ARG);
    REFUSED(d.shape = huge, DDL_ERR_ARG);
    REFUSED(d.device.id = -1; d.device.type = 2, DDL_ERR_ARG);
    REFUSED(d.device.type = 10, DDL_ERR_UNSUPPORTED);
    REFUSED(d.dtype.code = 5, DDL_ERR_UNSUPPORTED);  /* complex */
    REFUSED(d.dtype.bits = 128, DDL_ERR_UNSUPPORTED);
    REFUSED(d.dtype.bits = 4, DDL_ERR_UNSUPPORTED);
    REFUSED(d.strides = strides, DDL_ERR_UNSUPPORTED); /* one element shown as six; zeros would mean contiguous */
    CHECK_EQ((int)ddl_tensor_from_dlpack(NULL, &t), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_tensor_from_dlpack(&good, NULL), (int)DDL_ERR_ARG);
    d = good;
    d.device.type = 3; /* host memory that a GPU can reach */
    CHECK_EQ((int)ddl_tensor_from_dlpack(&d, &t), (int)DDL_OK);
    ddl_dlpack out;
    ddl_tensor pairs = ddl_tensor_1d(memory, DDL_F32_I32, 4), remote = ddl_tensor_1d(memory, DDL_F32, 4);
    remote.device = 1;
    CHECK_EQ((int)ddl_tensor_to_dlpack(&pairs, &out), (int)DDL_ERR_UNSUPPORTED);
    CHECK_EQ((int)ddl_tensor_to_dlpack(&remote, &out), (int)DDL_OK); /* CUDA device i is device i + 1 */
    CHECK(out.device.type == 2 && out.device.id == 0 && out.data == memory);
    d.device.type = 2;
    d.device.id = 3;
    CHECK_EQ((int)ddl_tensor_from_dlpack(&d, &t), (int)DDL_OK);
    CHECK(t.device == 4 && ddl_tensor_to_dlpack(&t, &out) == DDL_OK && out.device.type == 2 && out.device.id == 3);
    remote.device = -1;
    CHECK_EQ((int)ddl_tensor_to_dlpack(&remote, &out), (int)DDL_ERR_UNSUPPORTED);
    CHECK_EQ((int)ddl_tensor_to_dlpack(NULL, &out), (int)DDL_ERR_ARG);
    CHECK_EQ((int)ddl_tensor_to_dlpack(&t, NULL), (int)DDL_ERR_ARG);
    pairs.shape[0] = -1;
    CHECK_EQ((int)ddl_tensor_to_dlpack(&pairs, &out), (int)DDL_ERR_ARG);
}

TEST(dlpack_of_nothing) {
    int64_t shape[2] = {0, 5};
    ddl_dlpack empty = {.data = NULL, .device = {1, 0}, .ndim = 2, .dtype = {2, 32, 1}, .shape = shape};
    ddl_dlpack scalar = {.data = shape, .device = {1, 0}, .ndim = 0, .dtype = {0, 64, 1}};
    ddl_tensor t;
    CHECK_EQ((int)ddl_tensor_from_dlpack(&empty, &t), (int)DDL_OK);
    CHECK_EQ(ddl_tensor_count(&t), 0);
    CHECK_EQ((int)ddl_tensor_from_dlpack(&scalar, &t), (int)DDL_OK);
    CHECK_EQ(ddl_tensor_count(&t), 1);
    CHECK(t.data == shape);
}

/* ---- strides ---- */

/* What a message makes of a view, against a plain loop over the indices. */
static void views(ddl_group *w, void *arg) {
    (void)arg;
    int32_t a[210], b[64];
    for (int i = 0; i < 210; i++) {
        a[i] = i;
    }
    static const int64_t cases[][6] = {/* shape, strides */
                                       {2, 3, 4, 12, 4, 1}, {2, 3, 4, 1, 2, 6},    {3, 3, 3, -9, 3, -1}, {4, 1, 5, 0, 99, 7},
                                       {2, 2, 2, 0, 0, 1},  {1, 1, 1, 50, 60, 70}, {0, 3, 4, 1, 1, 1},   {5, 2, 3, 17, -4, 0}};
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        ddl_tensor t = ddl_tensor_nd(a + 100, DDL_I32, 3, cases[k]);
        memcpy(t.strides, cases[k] + 3, 3 * sizeof(int64_t));
        int64_t count = ddl_tensor_count(&t);
        memset(b, 0xa5, sizeof b);
        ddl_info info;
        OK(ddl_send_recv(w, t, ddl_rank(w), 0, DDL_VIEW(b, count), ddl_rank(w), 0, &info));
        CHECK_EQ(info.count, count);
        int64_t n = 0;
        for (int64_t x = 0; x < cases[k][0]; x++) {
            for (int64_t y = 0; y < cases[k][1]; y++) {
                for (int64_t z = 0; z < cases[k][2]; z++) {
                    CHECK_EQ(b[n], 100 + x * cases[k][3] + y * cases[k][4] + z * cases[k][5]);
                    n++;
                }
            }
        }
        CHECK_EQ((uint32_t)b[count], 0xa5a5a5a5u);
    }
    ddl_tensor far = ddl_tensor_1d(a, DDL_I32, 3);
    far.strides[0] = INT64_MAX / 3;
    FAILS(ddl_send(w, far, ddl_rank(w), 0), DDL_ERR_ARG, "strides");
    ddl_tensor empty = ddl_tensor_nd(NULL, DDL_F32, 3, (int64_t[]){0, INT64_MAX, INT64_MAX});
    empty.strides[0] = 5;
    OK(ddl_all_reduce(w, empty, empty, DDL_SUM));
}

TEST(strides_are_honoured) { world_threads(1, views, NULL); }

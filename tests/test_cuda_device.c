/* The device table of plugins/cuda over a stand-in for the driver (cuda_driver.c): no GPU is looked at. Copies, streams,
 * events and gates in order, memory that is pooled and given back, pointers told apart, contexts left as they were, and
 * each call of the driver failing once.
 * tests/run: variants=gcc,asan timeout=120 quick=yes */
#include "cuda_standin.h"

#include "ranks.h"

#include <poll.h>

static const ddl_device *device(void) { return &cuda_device; }

static void settle(void *self, void *stream) { /* all that is on stream */
    void *event = NULL;
    CHECK_EQ(device()->event_record(self, stream, &event), DDL_OK);
    while (event != NULL && device()->event_test(self, event) == DDL_IN_PROGRESS) {
        usleep(100);
    }
    device()->event_free(self, event);
}

TEST(declines_without_a_driver) {
    if (dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL) != NULL) {
        SKIP("this machine has an NVIDIA driver");
    }
    small_host h;
    small_host_make(&h);
    CHECK(ddl_plugin_cuda_v1(&h.host) == NULL);
    CHECK_STR(h.said, "there is no NVIDIA driver here: libcuda.so.1 cannot be loaded");
    CHECK_EQ(cuda_device_count(), 0);
    CHECK_EQ(h.blocks, 0);
}

typedef struct decline {
    const char *gpus, *version, *says;
} decline;

static void decline_in_a_child(int rank, int n, void *arg) {
    const decline *d = (const decline *)arg + rank;
    small_host h;
    (void)n;
    setenv("STANDIN_GPUS", d->gpus, 1);
    setenv("STANDIN_VERSION", d->version, 1);
    small_host_make(&h);
    const ddl_plugin *plugin = ddl_plugin_cuda_v1(&h.host);
    CHECK_EQ(plugin == NULL, d->says != NULL);
    if (d->says != NULL) {
        CHECK_STR(h.said, d->says);
    } else {
        CHECK_EQ(h.warnings, 0);
    }
}

TEST(declines_with_the_reason) {
    static const decline declines[] = {{"0", "13000", "no GPU that this process may use; CUDA_VISIBLE_DEVICES"},
                                       {"2", "11040", "is for CUDA 11.4; 11.8 is the oldest that serves"},
                                       {"2", "11080", NULL}};
    REQUIRE(standin_need(0));
    ranks_fork(3, decline_in_a_child, (void *)(uintptr_t)declines, 20);
}

TEST(count_and_open) {
    small_host h;
    void *self = NULL;
    small_host_make(&h);
    REQUIRE(standin_need(0));
    CHECK_EQ(cuda_device_count(), 2);
    CHECK_EQ(device()->open(&h.host, 2, &self), DDL_ERR_ARG);
    CHECK_STR(h.said, "there is no GPU 2: this process sees 2");
    CHECK_EQ(device()->open(&h.host, -1, &self), DDL_ERR_ARG);
    REQUIRE(device()->open(&h.host, 1, &self) == DDL_OK);
    CHECK_STR(((cuda_gpu *)self)->name, "stand-in"); /* it says what it is */
    char left[300];
    CHECK_EQ(standin.live(left, sizeof left), 0); /* no context before one is needed */
    device()->close(self);
    CHECK_NOTHING_LEFT(&h);
}

TEST(copies_go_in_order) {
    small_host h;
    void *self = NULL, *stream = NULL, *a = NULL, *b = NULL, *pinned = NULL;
    small_host_make(&h);
    REQUIRE(standin_need(0));
    REQUIRE(device()->open(&h.host, 0, &self) == DDL_OK);
    CHECK_EQ(device()->stream_make(self, &stream), DDL_OK);
    CHECK_EQ(device()->alloc(self, 3001, &a), DDL_OK);
    CHECK_EQ(device()->alloc(self, 3 << 20, &b), DDL_OK);
    CHECK_EQ(device()->host_alloc(self, 6000, &pinned), DDL_OK);
    uint8_t *host = pinned, plain[3001];
    for (int i = 0; i < 6000; i++) {
        host[i] = (uint8_t)(i * 7 + 3);
    }
    memset(plain, 0xee, sizeof plain);
    CHECK_EQ(device()->fill(self, b, 0x11, 3 << 20, stream), DDL_OK);
    CHECK_EQ(device()->copy(self, a, host, 3001, stream), DDL_OK);          /* to the GPU */
    CHECK_EQ(device()->copy(self, (char *)b + 5, a, 3000, stream), DDL_OK); /* within it */
    CHECK_EQ(device()->copy(self, plain, (char *)b + 4, 3001, stream), DDL_OK);
    settle(self, stream);
    CHECK_EQ(plain[0], 0x11);
    CHECK_EQ(memcmp(plain + 1, host, 3000), 0);
    CHECK_EQ(device()->copy(self, (void *)16, a, 0, NULL), DDL_OK); /* nothing is nothing */
    /* of no memory at all */
    CHECK_EQ(device()->fill(self, (char *)b + (200 << 20), 0, 16, stream), DDL_ERR_ARG);
    CHECK_STR(h.said, "filling 16 bytes");
    device()->host_free(self, pinned);
    device()->free(self, a);
    device()->free(self, b);
    device()->stream_free(self, stream);
    device()->close(self);
    CHECK_NOTHING_LEFT(&h);
}

TEST(pointers_are_told_apart) {
    small_host h;
    void *one = NULL, *two = NULL, *a = NULL, *b = NULL, *pinned = NULL;
    int local = 0;
    small_host_make(&h);
    REQUIRE(standin_need(0));
    REQUIRE(device()->open(&h.host, 0, &one) == DDL_OK && device()->open(&h.host, 1, &two) == DDL_OK);
    device()->alloc(one, 100, &a);
    device()->alloc(two, 100, &b);
    device()->host_alloc(one, 100, &pinned);
    CHECK_EQ(device()->owner(one, a), 1);
    CHECK_EQ(device()->owner(one, b), 2);
    CHECK_EQ(device()->owner(two, (char *)a + 99), 1);
    CHECK_EQ(device()->owner(one, pinned), 0);
    CHECK_EQ(device()->owner(one, &local), 0);
    CHECK_EQ(device()->owner(one, NULL), 0);
    device()->host_free(one, pinned);
    device()->free(one, a);
    device()->free(two, b);
    device()->close(two);
    device()->close(one);
    CHECK_NOTHING_LEFT(&h);
}

/* Who keeps registrations asks which allocation memory is of: never the same number for other memory. */
TEST(allocations_are_known_apart) {
    small_host h;
    void *self = NULL, *a = NULL, *b = NULL, *big = NULL;
    ddl_allocation is, other;
    CUdeviceptr plain = 0, again = 0, mapped = 0;
    CUmemGenericAllocationHandle handle = 0;
    size_t bytes = 2u << 20;
    small_host_make(&h);
    REQUIRE(standin_need(0));
    REQUIRE(device()->open(&h.host, 0, &self) == DDL_OK);
    cuda_gpu *gpu = self;
    CHECK(device()->alloc(self, 5000, &a) == DDL_OK && device()->alloc(self, 5000, &b) == DDL_OK);
    CHECK_EQ(device()->alloc(self, 3 * bytes, &big), DDL_OK);
    CHECK_EQ(device()->allocation(self, a, &is), DDL_OK);
    CHECK((char *)is.base <= (char *)a && (char *)a + 5000 <= (char *)is.base + is.bytes && is.id != 0);
    CHECK_EQ(device()->allocation(self, (char *)b + 4999, &other), DDL_OK);
    CHECK(other.id == is.id && other.base == is.base && other.bytes == is.bytes); /* they share a block */
    CHECK_EQ(device()->allocation(self, big, &other), DDL_OK);
    CHECK(other.id != is.id && other.base == big);
    /* a program's own */
    cuda_guard guard;
    REQUIRE(cuda_enter(gpu, &guard) == DDL_OK);
    CHECK_EQ(gpu->cu.cuMemAlloc(&plain, bytes), CUDA_SUCCESS);
    CHECK_EQ(device()->allocation(self, (void *)(uintptr_t)(plain + 77), &is), DDL_OK);
    CHECK(is.base == (void *)(uintptr_t)plain && is.bytes == bytes && is.id != 0 && is.id != other.id);
    gpu->cu.cuMemFree(plain);
    CHECK_EQ(device()->allocation(self, (void *)(uintptr_t)plain, &other), DDL_ERR_UNSUPPORTED);
    CHECK_EQ(gpu->cu.cuMemAlloc(&again, bytes), CUDA_SUCCESS);
    CHECK_EQ(device()->allocation(self, (void *)(uintptr_t)again, &other), DDL_OK);
    CHECK(again == plain && other.id != is.id); /* at the same address */
    gpu->cu.cuMemFree(again);
    CUmemAllocationProp properties;
    cuda_block_properties(gpu, &properties);
    CHECK_EQ(gpu->cu.cuMemCreate(&handle, bytes, &properties, 0), CUDA_SUCCESS);
    CHECK_EQ(cuda_map(gpu, handle, bytes, false, &mapped), CUDA_SUCCESS);
    CHECK_EQ(device()->allocation(self, (void *)(uintptr_t)mapped, &other), DDL_ERR_UNSUPPORTED);
    cuda_unmap(gpu, mapped, bytes);
    gpu->cu.cuMemRelease(handle);
    cuda_leave(&guard);
    CHECK_EQ(device()->allocation(self, &h, &other), DDL_ERR_UNSUPPORTED);
    device()->free(self, a);
    device()->free(self, b);
    device()->free(self, big);
    device()->close(self);
    CHECK_NOTHING_LEFT(&h);
}

/* Any order of allocations and ends: no two overlap, contents stay, and at the end there are few blocks. */
TEST(pool_gives_and_takes) {
    enum { SLOTS = 40, TURNS = 1500 };
    static struct {
        void *at;
        size_t bytes;
    } slot[SLOTS];
    small_host h;
    void *self = NULL;
    unsigned seed = 12345;
    small_host_make(&h);
    REQUIRE(standin_need(0));
    REQUIRE(device()->open(&h.host, 0, &self) == DDL_OK);
    for (int turn = 0; turn < TURNS; turn++) {
        seed = seed * 1103515245u + 12345;
        int i = (int)(seed >> 16) % SLOTS;
        if (slot[i].at != NULL) {
            device()->free(self, slot[i].at);
            slot[i].at = NULL;
            continue;
        }
        slot[i].bytes = (seed >> 8) % 5 == 0 ? (seed >> 4) % (3u << 20) : (seed >> 4) % 5000;
        REQUIRE(device()->alloc(self, slot[i].bytes, &slot[i].at) == DDL_OK);
        CHECK_EQ((uintptr_t)slot[i].at % 256, 0);
        for (int k = 0; k < SLOTS; k++) {
            char *x = slot[i].at, *y = slot[k].at;
            CHECK(k == i || y == NULL || x + slot[i].bytes <= y || y + slot[k].bytes <= x);
        }
    }
    for (int i = 0; i < SLOTS; i++) {
        device()->free(self, slot[i].at);
        slot[i].at = NULL;
    }
    int warnings = h.warnings;
    device()->free(self, &h);
    CHECK_EQ(h.warnings, warnings + 1);
    CHECK_STR(h.said, "it is not the start of memory that was allocated there");
    CHECK(((cuda_gpu *)self)->pool->kept <= CUDA_POOL_KEEP);
    for (const cuda_block *b = ((cuda_gpu *)self)->pool->blocks; b != NULL; b = b->next) {
        CHECK(b->used == 0 && b->parts->next == NULL && b->parts->bytes == b->bytes);
    }
    device()->close(self);
    CHECK_NOTHING_LEFT(&h);
}

TEST(out_of_memory_fails_and_the_context_lives) {
    small_host h;
    void *self = NULL, *a = NULL, *b = NULL;
    small_host_make(&h);
    REQUIRE(standin_need(0));
    standin.memory((size_t)100 << 20);
    REQUIRE(device()->open(&h.host, 0, &self) == DDL_OK);
    CHECK_EQ(device()->alloc(self, 60 << 20, &a), DDL_OK);
    CHECK_EQ(device()->alloc(self, 60 << 20, &b), DDL_ERR_NOMEM);
    CHECK_STR(h.said, "CUDA_ERROR_OUT_OF_MEMORY");
    CHECK_STR(h.said, "other programs may use this GPU");
    device()->free(self, a);                               /* kept for later ... */
    CHECK_EQ(device()->alloc(self, 90 << 20, &b), DDL_OK); /* ... and given up for this */
    device()->free(self, b);
    device()->close(self);
    standin.memory((size_t)1 << 32);
    CHECK_NOTHING_LEFT(&h);
}

static void work_waits_for(void *self, void *stream, uint8_t *pinned, void *memory, void *gate) {
    CHECK_EQ(device()->copy(self, memory, pinned, 100, stream), DDL_OK);
    CHECK_EQ(device()->copy(self, pinned + 100, memory, 100, stream), DDL_OK);
    void *event = NULL;
    CHECK_EQ(device()->event_record(self, stream, &event), DDL_OK);
    usleep(20000);
    CHECK_EQ(device()->event_test(self, event), DDL_IN_PROGRESS);
    memset(pinned, 0x77, 100); /* what the host does before it opens is seen */
    device()->gate_open(self, gate);
    while (device()->event_test(self, event) == DDL_IN_PROGRESS) {
        usleep(100);
    }
    CHECK_EQ(pinned[100], 0x77);
    CHECK_EQ(pinned[199], 0x77);
    device()->event_free(self, event);
}

TEST(gates_of_words) {
    small_host h;
    void *self = NULL, *stream = NULL, *memory = NULL, *pinned = NULL, *gate[3] = {NULL};
    small_host_make(&h);
    REQUIRE(standin_need(0));
    REQUIRE(device()->open(&h.host, 0, &self) == DDL_OK);
    CHECK_EQ(device()->stream_make(self, &stream), DDL_OK);
    CHECK_EQ(device()->alloc(self, 100, &memory), DDL_OK);
    CHECK_EQ(device()->host_alloc(self, 200, &pinned), DDL_OK);
    for (int i = 0; i < 5; i++) { /* the same word again and again */
        memset(pinned, 0, 200);
        REQUIRE(device()->gate_put(self, stream, &gate[0]) == DDL_OK);
        work_waits_for(self, stream, pinned, memory, gate[0]);
    }
    for (int i = 0; i < 3; i++) { /* several at once, opened in any order */
        REQUIRE(device()->gate_put(self, stream, &gate[i]) == DDL_OK);
    }
    device()->gate_open(self, gate[2]);
    device()->gate_open(self, gate[0]);
    memset(pinned, 0, 200);
    work_waits_for(self, stream, pinned, memory, gate[1]);
    CHECK_EQ(device()->gate_put(self, stream, &gate[0]), DDL_OK); /* open at the end: nothing waits for ever */
    standin.capture(stream, 1);
    CHECK_EQ(device()->capturing(self, stream), 1);
    CHECK_EQ(device()->gate_put(self, stream, &gate[1]), DDL_ERR_UNSUPPORTED);
    CHECK_STR(h.said, "captured into a graph cannot wait for the host");
    standin.capture(stream, 0);
    CHECK_EQ(device()->capturing(self, stream), 0);
    device()->gate_open(self, gate[0]);
    settle(self, stream);
    device()->host_free(self, pinned);
    device()->free(self, memory);
    device()->stream_free(self, stream);
    device()->close(self);
    standin.without(0, 0, 0);
    CHECK_NOTHING_LEFT(&h);
}

/* Of a GPU that cannot wait for words, and of another one's stream, there are no gates. */
TEST(gates_that_cannot_be) {
    small_host h;
    void *self = NULL, *other = NULL, *stream = NULL, *gate = NULL;
    small_host_make(&h);
    REQUIRE(standin_need(0));
    REQUIRE(device()->open(&h.host, 0, &self) == DDL_OK && device()->open(&h.host, 1, &other) == DDL_OK);
    CHECK_EQ(device()->stream_make(other, &stream), DDL_OK);
    CHECK_EQ(device()->gate_put(self, stream, &gate), DDL_ERR_ARG);
    CHECK_STR(h.said, "of another GPU");
    standin.without(0, 0, 1);
    CHECK_EQ(device()->gate_put(other, stream, &gate), DDL_ERR_UNSUPPORTED);
    CHECK_STR(h.said, "letting a stream wait for the host");
    standin.without(0, 0, 0);
    standin.fail("cuStreamIsCapturing", 1, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    CHECK_EQ(device()->capturing(other, stream), 0);
    standin.fail(NULL, 0, 0);
    device()->stream_free(other, stream);
    device()->close(other);
    device()->close(self);
    CHECK_NOTHING_LEFT(&h);
}

/* ---- marks ---- */

/* A mark behind a gate on a stream. Returns it looked at `looks` times while the gate is closed. */
static cuda_mark mark_behind_a_gate(cuda_gpu *gpu, cuda_beacon *beacon, CUstream stream, void **gate, int looks) {
    cuda_mark mark;
    CHECK_EQ(device()->gate_put(gpu, stream, gate), DDL_OK);
    CHECK_EQ(cuda_mark_put(gpu, beacon, stream, &mark), DDL_OK);
    for (int i = 0; i < looks; i++) {
        CHECK_EQ(cuda_mark_look(gpu, &mark), DDL_IN_PROGRESS);
    }
    return mark;
}

static void reach(cuda_gpu *gpu, void *gate, cuda_mark *mark) {
    ddl_status status;
    device()->gate_open(gpu, gate);
    while ((status = cuda_mark_look(gpu, mark)) == DDL_IN_PROGRESS) {
        usleep(1000);
    }
    CHECK_EQ(status, DDL_OK);
    CHECK(!cuda_mark_is_put(mark));
    CHECK_EQ(cuda_mark_look(gpu, mark), DDL_OK);
}

/* The streams of a GPU that is closed at the end, with nothing left behind. */
static void with_a_stream(void (*body)(cuda_gpu *gpu, CUstream stream)) {
    small_host h;
    void *self = NULL, *stream = NULL;
    cuda_guard guard;
    REQUIRE(standin_need(0));
    small_host_make(&h);
    REQUIRE(device()->open(&h.host, 0, &self) == DDL_OK && device()->stream_make(self, &stream) == DDL_OK);
    REQUIRE(cuda_enter(self, &guard) == DDL_OK);
    body(self, stream);
    cuda_leave(&guard);
    standin.fail(NULL, 0, CUDA_SUCCESS);
    standin.without(0, 0, 0);
    device()->stream_free(self, stream);
    device()->close(self);
    CHECK_NOTHING_LEFT(&h);
}

static void words_body(cuda_gpu *gpu, CUstream stream) {
    cuda_beacons_need(gpu);
    cuda_beacon *beacon = cuda_beacon_take(gpu);
    void *gate = NULL;
    REQUIRE(beacon != NULL);
    beacon->last = UINT32_MAX - 2; /* as of a stream that had so many before */
    atomic_store((_Atomic uint32_t *)(uintptr_t)beacon->word, UINT32_MAX - 2);
    standin.fail("cuEventRecord", 0, CUDA_SUCCESS);
    for (int i = 0; i < 6; i++) {
        cuda_mark mark = mark_behind_a_gate(gpu, beacon, stream, &gate, CUDA_LOOKS / 2);
        reach(gpu, gate, &mark);
    }
    CHECK_EQ(standin.calls(), 0);
    CHECK_EQ(beacon->last, 3);
    cuda_beacon_give(beacon);
    CHECK(cuda_beacon_take(gpu) == beacon); /* a stream after that goes on from there */
    cuda_mark mark = mark_behind_a_gate(gpu, beacon, stream, &gate, 1);
    reach(gpu, gate, &mark);
    cuda_beacon_give(beacon);
}

TEST(marks_are_words) { with_a_stream(words_body); }

static void events_body(cuda_gpu *gpu, CUstream stream) {
    cuda_beacon *beacons[CUDA_BEACONS];
    void *gate = NULL;
    standin.fail("cuMemHostAlloc", 1, CUDA_ERROR_OUT_OF_MEMORY);
    cuda_beacons_need(gpu);
    cuda_beacons_need(gpu); /* it is not tried for every operation */
    CHECK_EQ(standin.calls(), 1);
    CHECK(cuda_beacon_take(gpu) == NULL);
    cuda_beacons_give(gpu);
    cuda_beacons_need(gpu);
    for (int i = 0; i < CUDA_BEACONS; i++) {
        CHECK((beacons[i] = cuda_beacon_take(gpu)) != NULL);
    }
    CHECK(cuda_beacon_take(gpu) == NULL);
    standin.fail("cuEventRecord", 0, CUDA_SUCCESS);
    cuda_mark mark = mark_behind_a_gate(gpu, NULL, stream, &gate, 1); /* the streams beyond */
    reach(gpu, gate, &mark);
    CHECK_EQ(standin.calls(), 1);
    mark = mark_behind_a_gate(gpu, beacons[0], stream, &gate, CUDA_LOOKS); /* after so many looks, once */
    standin.fail("cuEventRecord", 0, CUDA_SUCCESS);
    for (int i = 0; i < CUDA_LOOKS; i++) {
        CHECK_EQ(cuda_mark_look(gpu, &mark), DDL_IN_PROGRESS);
    }
    reach(gpu, gate, &mark);
    CHECK_EQ(standin.calls(), 1);
    standin.without(0, 0, 1); /* the driver writes no words */
    CHECK_EQ(cuda_mark_put(gpu, beacons[0], stream, &mark), DDL_OK);
    while (cuda_mark_look(gpu, &mark) == DDL_IN_PROGRESS) {
        usleep(1000);
    }
    CHECK_EQ(standin.calls(), 2);
    for (int i = 0; i < CUDA_BEACONS; i++) {
        cuda_beacon_give(beacons[i]);
    }
}

TEST(marks_are_events_where_they_cannot_be_words) { with_a_stream(events_body); }

static uint64_t clock_ns;

static uint64_t told_ns(const ddl_host *host) {
    (void)host;
    return clock_ns;
}

static void questions_body(cuda_gpu *gpu, CUstream stream) {
    ddl_host *host = (ddl_host *)(uintptr_t)gpu->host;
    uint64_t (*now_ns)(const ddl_host *) = host->now_ns;
    void *gate = NULL;
    host->now_ns = told_ns;
    clock_ns = 5000000;
    cuda_mark mark = mark_behind_a_gate(gpu, NULL, stream, &gate, 0);
    standin.fail("cuEventQuery", 0, CUDA_SUCCESS);
    for (long n = 1; n <= 4; n++) {
        for (int i = 0; i < 100; i++) {
            CHECK_EQ(cuda_mark_look(gpu, &mark), DDL_IN_PROGRESS);
        }
        CHECK_EQ(standin.calls(), n);
        if (n % 2 == 0) {
            cuda_mark_ask_next(&mark);
        } else {
            clock_ns += CUDA_ASK_NS;
        }
    }
    host->now_ns = now_ns;
    reach(gpu, gate, &mark);
}

TEST(the_driver_is_not_asked_all_the_time) { with_a_stream(questions_body); }

/* Where there is a word, it is asked less often. */
static void rarely_body(cuda_gpu *gpu, CUstream stream) {
    ddl_host *host = (ddl_host *)(uintptr_t)gpu->host;
    uint64_t (*now_ns)(const ddl_host *) = host->now_ns;
    void *gate = NULL;
    cuda_beacons_need(gpu);
    cuda_beacon *beacon = cuda_beacon_take(gpu);
    host->now_ns = told_ns;
    clock_ns = 5000000;
    cuda_mark mark = mark_behind_a_gate(gpu, beacon, stream, &gate, CUDA_LOOKS);
    standin.fail("cuEventQuery", 0, CUDA_SUCCESS);
    for (int i = 0; i < 1000; i++) {
        CHECK_EQ(cuda_mark_look(gpu, &mark), DDL_IN_PROGRESS);
        clock_ns += CUDA_ASK_RARELY_NS / 100;
    }
    CHECK_EQ(standin.calls(), 10);
    host->now_ns = now_ns;
    reach(gpu, gate, &mark);
    cuda_beacon_give(beacon);
}

TEST(beside_a_word_the_driver_is_asked_rarely) { with_a_stream(rarely_body); }

/* A rank that is about to sleep has a bell rung when a word is written. */
static void sleeper_body(cuda_gpu *gpu, CUstream stream) {
    cuda_ipc t = {.host = gpu->host, .bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
    struct pollfd bell = {.fd = t.bell, .events = POLLIN};
    void *gate = NULL;
    cuda_beacons_need(gpu);
    cuda_beacon *beacon = cuda_beacon_take(gpu);
    cuda_mark mark = mark_behind_a_gate(gpu, beacon, stream, &gate, 1);
    CHECK(cuda_ipc_wake_at(&t, gpu, &mark));
    CHECK(mark.event != NULL && mark.wakes);
    CHECK(cuda_ipc_wake_at(&t, gpu, &mark)); /* once */
    CHECK_EQ(poll(&bell, 1, 20), 0);
    device()->gate_open(gpu, gate);
    CHECK_EQ(poll(&bell, 1, 5000), 1);
    uint64_t rings = 0;
    CHECK_EQ(read(t.bell, &rings, sizeof rings), (ssize_t)sizeof rings);
    CHECK_EQ(rings, 1);
    CHECK_EQ(cuda_mark_look(gpu, &mark), DDL_OK);
    cuda_beacon_give(beacon);
    gpu->cu.cuStreamSynchronize(gpu->wakes);
    close(t.bell);
}

TEST(who_sleeps_is_rung_for_when_a_word_is_written) { with_a_stream(sleeper_body); }

/* Memory is pinned before a gate is closed, once for all endpoints of the process: the driver may wait for the gate. */
static void before_body(cuda_gpu *gpu, CUstream stream) {
    void *gate = NULL, *other = NULL;
    cuda_guard guard;
    CHECK_EQ(device()->gate_put(gpu, stream, &gate), DDL_OK);
    REQUIRE(device()->open(gpu->host, 0, &other) == DDL_OK);
    REQUIRE(cuda_enter(other, &guard) == DDL_OK);
    standin.fail("cuMemHostAlloc", 0, CUDA_SUCCESS);
    cuda_beacons_need(other);
    cuda_beacon *beacon = cuda_beacon_take(other);
    CHECK(beacon != NULL);
    CHECK_EQ(standin.calls(), 0);
    standin.fail("cuMemFreeHost", 0, CUDA_SUCCESS);
    cuda_beacon_give(beacon);
    cuda_leave(&guard);
    device()->close(other);
    CHECK_EQ(standin.calls(), 0); /* nor given back */
    device()->gate_open(gpu, gate);
}

TEST(words_are_pinned_before_there_is_a_gate) { with_a_stream(before_body); }

/* A word is not written by a GPU that has failed. */
static void failures_body(cuda_gpu *gpu, CUstream stream) {
    cuda_beacons_need(gpu);
    cuda_beacon *beacon = cuda_beacon_take(gpu);
    void *gate = NULL;
    for (int i = 0; i < 2; i++) {
        cuda_mark mark = mark_behind_a_gate(gpu, beacon, stream, &gate, CUDA_LOOKS);
        standin.fail(i == 0 ? "cuEventQuery" : "cuEventRecord", 1, CUDA_ERROR_LAUNCH_FAILED);
        CHECK_EQ(cuda_mark_look(gpu, &mark), DDL_ERR_SYSTEM);
        CHECK(!cuda_mark_is_put(&mark));
        device()->gate_open(gpu, gate);
    }
    cuda_mark mark = mark_behind_a_gate(gpu, beacon, stream, &gate, CUDA_LOOKS);
    standin.fail("cuEventRecord", 1, CUDA_ERROR_OUT_OF_MEMORY); /* the work goes on, and the word will be written */
    CHECK_EQ(cuda_mark_look(gpu, &mark), DDL_IN_PROGRESS);
    CHECK(cuda_mark_is_put(&mark));
    reach(gpu, gate, &mark);
    gpu->cu.cuStreamSynchronize(stream);
    cuda_beacon_give(beacon);
}

TEST(marks_tell_of_failures) { with_a_stream(failures_body); }

TEST(a_stream_waits_for_another) {
    small_host h;
    void *self = NULL, *one = NULL, *two = NULL, *gate = NULL, *event = NULL, *after = NULL;
    small_host_make(&h);
    REQUIRE(standin_need(0));
    REQUIRE(device()->open(&h.host, 0, &self) == DDL_OK);
    CHECK_EQ(device()->stream_make(self, &one), DDL_OK);
    CHECK_EQ(device()->stream_make(self, &two), DDL_OK);
    CHECK_EQ(device()->gate_put(self, one, &gate), DDL_OK);
    CHECK_EQ(device()->event_record(self, one, &event), DDL_OK);
    CHECK_EQ(device()->stream_wait(self, two, event), DDL_OK);
    CHECK_EQ(device()->event_record(self, two, &after), DDL_OK);
    usleep(20000);
    CHECK_EQ(device()->event_test(self, after), DDL_IN_PROGRESS);
    device()->gate_open(self, gate);
    settle(self, two);
    CHECK_EQ(device()->event_test(self, after), DDL_OK);
    device()->event_free(self, event);
    device()->event_free(self, after);
    device()->stream_free(self, one);
    device()->stream_free(self, two);
    device()->close(self);
    CHECK_NOTHING_LEFT(&h);
}

/* A whole life of a device, whatever fails in it. Returns how many of its calls failed. */
static int life(small_host *h) {
    void *self = NULL, *stream = NULL, *a = NULL, *b = NULL, *pinned = NULL, *event = NULL, *gate = NULL;
    int failed = 0;
    if (device()->open(&h->host, 0, &self) != DDL_OK) {
        return 1;
    }
#define TRY(call) (failed += (call) < 0)
    TRY(device()->stream_make(self, &stream));
    TRY(device()->alloc(self, 1000, &a));
    TRY(device()->alloc(self, 2 << 20, &b));
    TRY(device()->host_alloc(self, 1000, &pinned));
    TRY(device()->owner(self, a));
    if (a != NULL && b != NULL && pinned != NULL && stream != NULL) {
        TRY(device()->fill(self, a, 1, 1000, stream));
        TRY(device()->gate_put(self, stream, &gate));
        TRY(device()->copy(self, b, a, 1000, stream));
        TRY(device()->event_record(self, stream, &event));
        if (event != NULL) {
            TRY(device()->stream_wait(self, NULL, event));
        }
        if (gate != NULL) {
            device()->gate_open(self, gate);
        }
        while (event != NULL && device()->event_test(self, event) == DDL_IN_PROGRESS) {
            usleep(100);
        }
    }
    device()->event_free(self, event);
    device()->host_free(self, pinned);
    device()->free(self, a);
    device()->free(self, b);
    device()->stream_free(self, stream);
    device()->close(self);
    return failed;
}

static void *other_thread(void *arg) {
    void *memory = NULL, *stream = NULL, *gate = NULL;
    CHECK_EQ(device()->stream_make(arg, &stream), DDL_OK);
    for (int i = 0; i < 200; i++) {
        CHECK_EQ(device()->alloc(arg, 100 + (size_t)i, &memory), DDL_OK);
        CHECK_EQ(device()->gate_put(arg, stream, &gate), DDL_OK);
        CHECK_EQ(device()->fill(arg, memory, i, 100, stream), DDL_OK);
        device()->gate_open(arg, gate);
        settle(arg, stream);
        device()->free(arg, memory);
    }
    device()->stream_free(arg, stream);
    CHECK_EQ(standin.depth(), 0);
    return NULL;
}

TEST(threads_share_a_device) {
    small_host h;
    void *self = NULL;
    pthread_t id[4];
    small_host_make(&h);
    REQUIRE(standin_need(0));
    REQUIRE(device()->open(&h.host, 0, &self) == DDL_OK);
    for (int i = 0; i < 4; i++) {
        pthread_create(&id[i], NULL, other_thread, self);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(id[i], NULL);
    }
    device()->close(self);
    CHECK_NOTHING_LEFT(&h);
}

TEST(memory_without_descriptors) {
    small_host h;
    void *self = NULL, *a = NULL;
    small_host_make(&h);
    REQUIRE(standin_need(0));
    standin.without(1, 0, 0);
    REQUIRE(device()->open(&h.host, 0, &self) == DDL_OK);
    CHECK_EQ(device()->alloc(self, 5000, &a), DDL_OK);
    CHECK_EQ(((cuda_gpu *)self)->pool->blocks->vmm, 0);
    device()->free(self, a);
    device()->close(self);
    standin.without(0, 0, 0);
    CHECK_NOTHING_LEFT(&h);
}

static void forked_rank(int rank, int n, void *arg) {
    (void)rank, (void)n;
    void *memory = NULL;
    small_host *h = (small_host *)((cuda_gpu *)arg)->host->core;
    CHECK_EQ(device()->alloc(arg, 100, &memory), DDL_ERR_SYSTEM);
    CHECK_STR(h->said, "a process that was forked from one that used CUDA cannot use it");
    h->said[0] = 0;
    CHECK(ddl_plugin_cuda_v1(&h->host) == NULL);
    CHECK_STR(h->said, "the NVIDIA driver does not start: ");
    CHECK_STR(h->said, "a process that was forked from one that used CUDA cannot use it");
}

TEST(a_forked_process_is_told) {
    small_host h;
    void *self = NULL;
    small_host_make(&h);
    REQUIRE(standin_need(0));
    REQUIRE(device()->open(&h.host, 0, &self) == DDL_OK);
    ranks_fork(1, forked_rank, self, 20);
    device()->close(self);
    CHECK_NOTHING_LEFT(&h);
}

/* The last test: a call that fails to end something leaves it behind inside the driver. */
TEST(each_call_of_the_driver_fails_once) {
    small_host h;
    REQUIRE(standin_need(0));
    small_host_make(&h);
    standin.fail(NULL, 0, 0);
    CHECK_EQ(life(&h), 0);
    long calls = standin.calls();
    CHECK(calls > 60);
    CHECK_NOTHING_LEFT(&h);
    int said = 0;
    for (long i = 1; i <= calls; i++) {
        int before = h.warnings;
        standin.fail(NULL, i,
                     i % 3 == 0   ? CUDA_ERROR_OUT_OF_MEMORY
                     : i % 3 == 1 ? CUDA_ERROR_UNKNOWN
                                  : CUDA_ERROR_INVALID_VALUE);
        (void)life(&h);
        said += h.warnings > before;
        CHECK_EQ(standin.depth(), 0);
        CHECK_EQ(h.blocks, 0);
    }
    CHECK(said > calls / 3); /* the others are attributes, and ends of what goes anyway */
}

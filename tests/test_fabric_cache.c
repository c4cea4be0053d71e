/* Registrations that the libfabric plugin keeps (plugins/fabric/cache.h): used again, never for memory that was freed and
 * mapped again, bounded, none closed that is in use; what happens when one fails or a peer dies. Registrations are those of
 * fabric_pins.h, which hold pages as an adapter does. Memory is told by a host of the test's own.
 * tests/run: variants=gcc,asan timeout=100 quick=yes */
#include "ranks.h"

#include "fabric_pins.h"

#include "fabric_host.h"

enum { ALLOCATIONS = 16, ROOM = 1 << 18 }; /* ROOM: of each, unless it says otherwise */

/* ---- memory, and who knows of it ---- */

static struct {
    ddl_allocation is[ALLOCATIONS]; /* id 0: none */
    const char *device[ALLOCATIONS];
    uint64_t ids;
    uint64_t ahead_ns; /* of the clock */
} memory;

static ddl_status allocation(const ddl_host *host, const char *device, int32_t index, const void *at, uint64_t bytes,
                             ddl_allocation *out) {
    const uint8_t *from = at;
    CHECK(host != NULL && index == (device != NULL ? 3 : 0));
    for (int i = 0; i < ALLOCATIONS; i++) {
        const uint8_t *base = memory.is[i].base;
        if (memory.is[i].id != 0 && (memory.device[i] != NULL) == (device != NULL) && from >= base &&
            from + bytes <= base + memory.is[i].bytes) {
            *out = memory.is[i];
            return DDL_OK;
        }
    }
    return DDL_ERR_UNSUPPORTED;
}

static uint64_t now_ns(const ddl_host *host) { return mini_now_ns(host) + memory.ahead_ns; }

/* Fresh pages, at an address or anywhere. */
static uint8_t *pages(uint8_t *at, size_t bytes) {
    int flags = MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE | (at != NULL ? MAP_FIXED : 0);
    uint8_t *p = mmap(at, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    CHECK(p != MAP_FAILED);
    return p;
}

/* An allocation whose identity is known. */
static uint8_t *known(int i, uint8_t *at, size_t bytes, const char *device) {
    uint8_t *p = pages(at, bytes);
    memory.is[i] = (ddl_allocation){p, bytes, ++memory.ids};
    memory.device[i] = device;
    return p;
}

static void forget_all(void) {
    for (int i = 0; i < ALLOCATIONS; i++) {
        if (memory.is[i].id != 0) {
            munmap(memory.is[i].base, memory.is[i].bytes);
        }
    }
    memset(&memory, 0, sizeof memory);
    memset(&pins, 0, sizeof pins);
}

/* ---- two ranks; what the second receives lands where the test says ---- */

static uint8_t *landing_at;
static int landed_count;
static size_t landed_wrong;

static ddl_status land(const ddl_host *host, int32_t peer, const uint8_t *header, uint64_t *out_bytes, void **out_to,
                       void **out_token) {
    CHECK_EQ(word(header, 2), peer);
    *out_bytes = of(host)->landing_bytes[peer] = word(header, 0);
    of(host)->landing_number[peer] = word(header, 1);
    memset(landing_at, 0xee, *out_bytes);
    *out_to = *out_token = landing_at;
    return DDL_OK;
}

static void landed(const ddl_host *host, int32_t peer, void *token, ddl_status status) {
    CHECK(token == landing_at);
    for (uint64_t i = 0; i < of(host)->landing_bytes[peer] && status == DDL_OK; i++) {
        landed_wrong += landing_at[i] != pattern(of(host)->landing_number[peer], (uint64_t)peer, i);
    }
    landed_count += status == DDL_OK;
}

static int gets_count;
static ddl_status gets_status;
static void transferred(const ddl_host *host, void *cookie, ddl_status status) {
    CHECK(host != NULL && cookie != NULL);
    gets_count++;
    gets_status = status;
}

/* In the modes of an adapter: FABRIC_FORCE_MR. pins.open are then the blocks of slots. */
static endpoint *begin(int n, const char *setting) {
    endpoint *e = calloc(RANKS, sizeof *e);
    memset(&pins, 0, sizeof pins);
    landed_count = gets_count = 0;
    landed_wrong = 0;
    for (int i = 0; i < n; i++) {
        endpoint_prepare(&e[i], i, world_detail, "FABRIC_FORCE_MR=local", setting);
        e[i].host.allocation = allocation;
        e[i].host.now_ns = now_ns;
        e[i].host.transferred = transferred;
        e[i].transport = &fabric_transport;
        ddl_transport_params p = {.size = sizeof p, .rank = i, .world_size = n, .local_ranks = n, .cores = 1,
                                  .host_id = "here", .asked = 1, .detail = world_detail, .device = "cuda"};
        if (fabric_transport.open(&e[i].host, &p, &e[i].self) != DDL_OK) {
            fprintf(stderr, "no endpoint:\n%s", e[i].log);
            exit(1);
        }
        self_of(&e[i])->offer_bytes = FABRIC_OFFER_BYTES; /* as over an adapter */
        if (i > 0) {
            e[i].host.land = land;
            e[i].host.landed = landed;
        }
    }
    for (int i = 0; i < n * n; i++) {
        if (i / n != i % n) {
            meet(&e[i / n], i % n, &self_of(&e[i % n])->address);
        }
    }
    double until = test_now_s() + 20 * test_slow();
    for (int i = 0; i < n * n; i++) { /* connects; windows widen, and with them the slots */
        letter l;
        if (i / n != i % n) {
            post(&e[i / n], i % n, &l, 10);
            while ((e[i % n].arrived[i / n] == 0 || l.returned != l.borrowed) && test_now_s() < until) {
                progress_all(e, n);
            }
            letter_free(&l);
        }
    }
    CHECK_EQ(all_arrived(e, n), n * (n - 1));
    pins.made = 0;
    return e;
}

static void end(endpoint *e, int n) {
    world_close(e, n);
    CHECK_EQ(landed_wrong, 0);
    CHECK_EQ(pins.open, 0);
    CHECK_EQ(pins.stale, 0);
    forget_all();
    free(e);
}

/* One message between memories of the test. Returns how many payloads were registered on its account. */
static int message(endpoint *e, uint8_t *from, uint8_t *to, uint64_t bytes) {
    letter l;
    int expect = landed_count + 1, before = pins.made;
    landing_at = to;
    CHECK(post_in(&e[0], 1, &l, bytes, from) >= 0);
    double until = test_now_s() + 20 * test_slow();
    while ((landed_count < expect || l.returned < l.borrowed) && test_now_s() < until) {
        progress_all(e, 2);
    }
    CHECK_EQ(landed_count, expect);
    CHECK_EQ(l.returned, l.borrowed);
    return pins.made - before;
}

static int kept(const endpoint *e) { return (int)self_of(e)->cache.count; }

/* ---- used again ---- */

TEST(what_is_known_is_registered_once) {
    NEED_LIBFABRIC();
    endpoint *e = begin(2, NULL);
    uint8_t *from = known(0, NULL, ROOM, NULL), *to = known(1, NULL, ROOM, NULL);
    CHECK_EQ(message(e, from, to, 65536), 2);
    CHECK_EQ(pins.last_bytes, ROOM); /* all of a small allocation */
    for (int i = 1; i < 6; i++) {
        CHECK_EQ(message(e, from + i * 1000, to + i * 77, 65536 + (uint64_t)i), 0);
    }
    CHECK_EQ(kept(&e[0]), 1);
    CHECK_EQ(self_of(&e[0])->cache.found, 5);
    CHECK_EQ(self_of(&e[1])->cache.found, 5);
    int open = pins.open;
    fabric_transport.memory_forget(e[0].self, from, ROOM);
    CHECK_EQ(pins.open, open - 1);
    CHECK_EQ(kept(&e[0]), 0);
    fabric_transport.memory_forget(e[0].self, from, ROOM); /* nothing is there */
    CHECK_EQ(message(e, from, to, 65536), 1);
    fabric_transport.close(e[0].self);
    e[0].self = NULL;
    CHECK_STR(e[0].log, "registrations that were kept: 2, used again 5 times; 0 were closed for room, 1 as their memory was "
                        "freed");
    end(e, 2);
}

TEST(none_is_kept_when_the_bound_is_0_or_nobody_knows_the_memory) {
    NEED_LIBFABRIC();
    for (int i = 0; i < 3; i++) {
        endpoint *e = begin(2, i == 0 ? "FABRIC_CACHE=0" : i == 1 ? "FABRIC_CACHE_BYTES=1K" : NULL);
        uint8_t *from = known(0, NULL, ROOM, NULL), *to = known(1, NULL, ROOM, NULL);
        memory.is[0].id = i == 2 ? 0 : memory.is[0].id;
        memory.is[1].id = i == 2 ? 0 : memory.is[1].id;
        for (int k = 0, open = pins.open; k < 4; k++) {
            CHECK_EQ(message(e, from, to, 65536), 2);
            CHECK_EQ(pins.open, open);
        }
        if (i == 2) {
            munmap(from, ROOM);
            munmap(to, ROOM);
        }
        end(e, 2);
    }
}

/* ---- freed, and mapped again ---- */

TEST(freed_and_allocated_again_at_the_same_address) {
    NEED_LIBFABRIC();
    for (int told = 0; told < 2; told++) { /* it is sound without a word, too */
        endpoint *e = begin(2, NULL);
        uint8_t *from = known(0, NULL, ROOM, NULL), *to = known(1, NULL, ROOM, NULL);
        CHECK_EQ(message(e, from, to, 65536), 2);
        int open = pins.open;
        for (int i = 0; i < 4; i++) {
            for (int k = 0; k < 2 && told; k++) {
                fabric_transport.memory_forget(e[k].self, k == 0 ? from : to, ROOM);
            }
            CHECK_EQ(pins.open, told ? open - 2 : open);
            CHECK(known(0, from, ROOM, NULL) == from && known(1, to, ROOM, NULL) == to);
            CHECK_EQ(message(e, from, to, 65536), 2);
            CHECK_EQ(message(e, from, to, 65536), 0);
            CHECK_EQ(pins.open, open);
        }
        end(e, 2);
    }
}

TEST(a_part_of_what_was_freed_lies_in_something_else_now) {
    NEED_LIBFABRIC();
    endpoint *e = begin(2, NULL);
    uint8_t *from = known(0, NULL, 2 * ROOM, NULL), *to = known(1, NULL, ROOM, NULL);
    CHECK_EQ(message(e, from, to, 65536), 2);
    memory.is[0].id = 0;
    known(2, from + ROOM / 2, ROOM, NULL); /* within it */
    CHECK_EQ(message(e, from + ROOM, to, 65536), 1);
    munmap(from, ROOM / 2);
    munmap(from + ROOM / 2 + ROOM, ROOM / 2);
    end(e, 2);
}

TEST(the_programs_own_memory_is_mapped_over) {
    NEED_LIBFABRIC();
    endpoint *e = begin(2, NULL);
    uint8_t *from = pages(NULL, ROOM), *to = pages(NULL, ROOM);
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(message(e, from, to, 100000), 2);
        CHECK(pages(from, ROOM) == from && pages(to, ROOM) == to);
    }
    end(e, 2);
    munmap(from, ROOM);
    munmap(to, ROOM);
}

/* ---- bounds ---- */

TEST(the_least_recently_used_goes_first) {
    NEED_LIBFABRIC();
    endpoint *e = begin(2, "FABRIC_CACHE=4");
    uint8_t *at[ALLOCATIONS], *to = pages(NULL, ROOM);
    for (int i = 0; i < 10; i++) {
        at[i] = known(i, NULL, ROOM, NULL);
    }
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(message(e, at[i], to, 65536), 2);
    }
    int open = pins.open;
    CHECK_EQ(message(e, at[0], to, 65536), 1); /* 1 is the oldest now */
    CHECK_EQ(message(e, at[4], to, 65536), 2);
    CHECK_EQ(message(e, at[0], to, 65536), 1);
    CHECK_EQ(message(e, at[2], to, 65536), 1);
    CHECK_EQ(message(e, at[1], to, 65536), 2);
    for (int i = 0; i < 30; i++) {
        message(e, at[i % 10], to, 65536);
        CHECK_EQ(kept(&e[0]), 4);
        CHECK_EQ(pins.open, open);
    }
    CHECK(self_of(&e[0])->cache.evicted >= 20);
    end(e, 2);
    munmap(to, ROOM);
}

TEST(large_allocations_are_registered_in_parts_within_the_bound_of_bytes) {
    NEED_LIBFABRIC();
    endpoint *e = begin(2, "FABRIC_CACHE_BYTES=192M");
    size_t part = FABRIC_SPAN, whole = 7 * part + 4096;
    uint8_t *from = known(0, NULL, whole, NULL), *to = pages(NULL, ROOM);
    CHECK_EQ(message(e, from + part + 5, to, 65536), 2);
    CHECK_EQ(self_of(&e[0])->cache.bytes, part);
    CHECK_EQ(message(e, from + 2 * part - 65536, to, 65536), 1);
    CHECK_EQ(message(e, from + 3 * part - 1000, to, 65536), 2); /* over an edge: both */
    CHECK_EQ(self_of(&e[0])->cache.bytes, 3 * part);
    CHECK_EQ(message(e, from + whole - 65536, to, 65536), 2); /* the last two, of which one is short */
    CHECK(self_of(&e[0])->cache.bytes <= 3 * part);
    CHECK_EQ(self_of(&e[0])->cache.evicted, 2);
    CHECK_EQ(kept(&e[0]), 1);
    end(e, 2);
    munmap(to, ROOM);
}

/* Each rail pins the memory once more, and the kernel counts it once more. */
TEST(the_bound_of_bytes_counts_each_rail) {
    NEED_LIBFABRIC();
    endpoint *e = begin(2, "FABRIC_CACHE_BYTES=192M");
    fabric_self *s = self_of(&e[0]);
    size_t part = FABRIC_SPAN;
    uint8_t *from = known(0, NULL, 2 * part, NULL);
    int open = pins.open;
    s->rails[1] = s->rails[0];
    s->rail_count = 2;
    fabric_region *first = fabric_region_get(s, from, 65536, FI_REMOTE_READ, FABRIC_HOST);
    CHECK_EQ(pins.open, open + 2);
    CHECK_EQ(s->cache.bytes, 2 * part);
    fabric_region *other = fabric_region_get(s, from + part, 65536, FI_REMOTE_READ, FABRIC_HOST);
    CHECK_EQ(kept(&e[0]), 1); /* the first is in use, and there is no room for both: registered for this once, and no more of it than it takes */
    CHECK_EQ(other->bytes, 65536);
    fabric_region_put(s, &other);
    fabric_region_put(s, &first);
    CHECK_EQ(pins.open, open + 2);
    other = fabric_region_get(s, from + part, 65536, FI_REMOTE_READ, FABRIC_HOST);
    CHECK_EQ(s->cache.evicted, 1);
    CHECK_EQ(pins.open, open + 2);
    CHECK_EQ(s->cache.bytes, 2 * part);
    fabric_region_put(s, &other);
    fabric_transport.memory_forget(s, from, 2 * part);
    CHECK_EQ(s->cache.bytes, 0);
    CHECK_EQ(pins.open, open);
    s->rail_count = 1;
    end(e, 2);
}

/* With a bound of one, while two are under way: the second does without. */
TEST(what_is_in_use_is_not_closed) {
    NEED_LIBFABRIC();
    endpoint *e = begin(2, "FABRIC_CACHE=1");
    uint8_t *a = known(0, NULL, ROOM, NULL), *b = known(1, NULL, ROOM, NULL), *to = pages(NULL, ROOM);
    letter first, second;
    CHECK_EQ(message(e, a, to, 65536), 2);
    landing_at = to;
    CHECK_EQ(post_in(&e[0], 1, &first, 65536, a), DDL_IN_PROGRESS);
    int open = pins.open;
    CHECK_EQ(post_in(&e[0], 1, &second, 65536, b), DDL_IN_PROGRESS);
    CHECK_EQ(pins.open, open + 1);
    CHECK_EQ(kept(&e[0]), 1);
    fabric_transport.memory_forget(e[0].self, a, ROOM); /* nor when it is forgotten */
    CHECK_EQ(pins.open, open + 1);
    CHECK_EQ(kept(&e[0]), 0);
    DRIVE(e, 2, first.returned == 1 && second.returned == 1) {}
    CHECK_EQ(landed_count, 3);
    CHECK_EQ(pins.open, open - 1);
    end(e, 2);
    munmap(to, ROOM);
}

/* ---- failures ---- */

TEST(a_registration_that_fails) {
    NEED_LIBFABRIC();
    endpoint *e = begin(2, NULL);
    uint8_t *from = known(0, NULL, ROOM, NULL), *to = known(1, NULL, ROOM, NULL), *other = known(2, NULL, ROOM, NULL);
    CHECK_EQ(message(e, other, to, 65536), 2);
    int open = pins.open;
    pins.fail = 1 << 20; /* at the sender: in pieces. What is idle was closed, as it may be what is locked */
    CHECK_EQ(message(e, from, to, 65536), 0);
    CHECK_EQ(kept(&e[0]), 0);
    CHECK_STR(e[0].log, "registering 65536 bytes failed");
    CHECK_EQ(e[0].warnings, 1);
    pins.fail = 0;
    CHECK_EQ(message(e, from, to, 65536), 1);
    fabric_transport.memory_forget(e[1].self, to, ROOM);
    pins.fail = 1 << 20; /* at the receiver, in the middle of the rendezvous: it asks for pieces */
    CHECK_EQ(message(e, from, to, 65536), 0);
    CHECK_EQ(e[1].warnings, 1);
    pins.fail = 0;
    pins.fail_above = 100000; /* what is around a message cannot be registered; the message can */
    CHECK_EQ(message(e, other, to, 65536), 2);
    CHECK_EQ(message(e, other, to, 65536), 2);
    CHECK_EQ(kept(&e[0]), 0);
    CHECK_EQ(e[0].warnings + e[1].warnings, 2);
    CHECK_EQ(pins.open, open - 2);
    end(e, 2);
}

TEST(a_peer_dies_while_a_region_is_used) {
    NEED_LIBFABRIC();
    endpoint *e = begin(3, NULL);
    uint8_t *from = known(0, NULL, ROOM, NULL), *to = known(1, NULL, ROOM, NULL);
    letter l;
    CHECK_EQ(message(e, from, to, 65536), 2);
    CHECK_EQ(post_in(&e[0], 2, &l, 65536, from), DDL_IN_PROGRESS);
    int open = pins.open;
    fabric_transport.peer_dead(e[0].self, 2);
    CHECK_EQ(l.returned, 1);
    CHECK_EQ(l.status, DDL_ERR_PEER);
    CHECK_EQ(pins.open, open);
    CHECK_EQ(self_of(&e[0])->cache.first->users, 0);
    CHECK_EQ(message(e, from, to, 65536), 0);
    end(e, 3);
}

/* The memory is wanted back before the peer has read: it gets the copy, and the region goes on for others. */
TEST(a_message_is_recalled) {
    NEED_LIBFABRIC();
    endpoint *e = begin(3, NULL);
    uint8_t *from = known(0, NULL, ROOM, NULL), *to = known(1, NULL, ROOM, NULL);
    letter l, other;
    CHECK_EQ(message(e, from, to, 65536), 2);
    CHECK_EQ(post_in(&e[0], 1, &l, 65536, from), DDL_IN_PROGRESS);
    memcpy(from + ROOM / 2, from, 16);
    CHECK_EQ(post_in(&e[0], 2, &other, 65536, from + ROOM / 2), DDL_IN_PROGRESS);
    fabric_transport.recall(e[0].self, 1, &l.message);
    memset(from, 0x99, 65536);
    DRIVE(e, 2, landed_count == 2) {}
    CHECK_EQ(l.returned, 0);
    DRIVE(e, 3, landed_count == 3 && other.returned == 1) {}
    CHECK_EQ(message(e, from, to, 65536), 0);
    end(e, 3);
}

/* ---- memory of devices ---- */

static void get(endpoint *e, uint8_t *from, uint8_t *to, uint64_t bytes) {
    void *there = NULL, *here = NULL;
    ddl_memory_key key, own;
    int cookie = 0, expect = gets_count + 1;
    for (uint64_t i = 0; i < bytes; i++) {
        from[i] = pattern((uint64_t)pins.made, 9, i);
        to[i] = 0xee;
    }
    CHECK_EQ(fabric_transport.memory_register_on(e[0].self, "cuda", 3, from, bytes, &there, &key), DDL_OK);
    CHECK_EQ(fabric_transport.memory_register_on(e[1].self, "cuda", 3, to, bytes, &here, &own), DDL_OK);
    CHECK_EQ(fabric_transport.get(e[1].self, 0, to, here, &key, 0, bytes, &cookie), DDL_IN_PROGRESS);
    DRIVE(e, 2, gets_count == expect) {}
    CHECK_EQ(gets_status, DDL_OK);
    CHECK_EQ(memcmp(from, to, bytes), 0);
    fabric_transport.memory_release(e[0].self, there);
    fabric_transport.memory_release(e[1].self, here);
}

TEST(allocations_of_a_device) {
    NEED_LIBFABRIC();
    endpoint *e = begin(2, NULL);
    uint8_t *from = known(0, NULL, ROOM, "cuda"), *to = known(1, NULL, ROOM, "cuda");
    get(e, from, to, 65536);
    int made = pins.made, open = pins.open;
    get(e, from + 4097, to + 3, 70000); /* at an offset of the region */
    CHECK_EQ(pins.made, made);
    known(0, from, ROOM, "cuda"); /* freed and allocated again: nobody tells */
    known(1, to, ROOM, "cuda");
    get(e, from, to, 65536);
    CHECK_EQ(pins.made, made + 2);
    CHECK_EQ(pins.open, open);
    CHECK_EQ(hmem.last.device.cuda, 3);
    CHECK_EQ(hmem.last_at.iov_len, ROOM);
    memory.is[0].id = 0; /* freed; within a second the pages are free */
    memory.ahead_ns += 1100000000u;
    progress_all(e, 2);
    CHECK_EQ(pins.open, open - 1);
    CHECK_EQ(kept(&e[0]), 0);
    CHECK_EQ(kept(&e[1]), 1);
    get(e, from, to, 65536); /* of that allocation nobody knows */
    CHECK_EQ(kept(&e[0]), 0);
    CHECK_EQ(pins.open, open - 1);
    fabric_transport.memory_forget(e[1].self, to + 65536, 1); /* as when a key was given away in vain */
    CHECK_EQ(pins.open, open - 2);
    munmap(from, ROOM);
    end(e, 2);
}

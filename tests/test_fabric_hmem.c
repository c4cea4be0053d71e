/* Memory of devices in the libfabric plugin: what it asks of a provider with FI_HMEM (fabric_hmem.h: a claim in front of tcp,
 * device memory being ordinary memory), that what was read is right, what happens when a registration or a read fails or
 * memory is wanted back, and what it says where the provider refuses. No GPU, no adapter.
 * tests/run: variants=gcc,asan,valgrind timeout=60 quick=yes */
#include "ranks.h"

#include "fabric_hmem.h"

#include "fabric_host.h"

enum { GETS = 8 };
static struct {
    int count;
    void *cookies[GETS];
    ddl_status status[GETS];
} transferred;

static void on_transferred(const ddl_host *host, void *cookie, ddl_status status) {
    CHECK(host != NULL && transferred.count < GETS);
    transferred.cookies[transferred.count] = cookie;
    transferred.status[transferred.count++] = status;
}

static const char *world_device = "cuda";

static ddl_status open_one(endpoint *e, int n) {
    e->transport = &fabric_transport;
    e->host.transferred = on_transferred;
    ddl_transport_params params = {.size = sizeof params, .rank = e->rank, .world_size = n, .local_ranks = n, .cores = 1,
                                   .host_id = "here", .asked = 1, .detail = e->detail, .device = world_device};
    return fabric_transport.open(&e->host, &params, &e->self);
}

/* An adapter's modes: without them reads go through memory of the host. */
static endpoint *pair_open(const char *first, const char *second) {
    endpoint *e = calloc(RANKS, sizeof *e);
    memset(&transferred, 0, sizeof transferred);
    for (int i = 0; i < 2; i++) {
        endpoint_prepare(&e[i], i, world_detail, first, second);
        if (open_one(&e[i], 2) != DDL_OK) {
            fprintf(stderr, "no endpoint:\n%s", e[i].log);
            exit(1);
        }
    }
    meet(&e[0], 1, &self_of(&e[1])->address);
    meet(&e[1], 0, &self_of(&e[0])->address);
    return e;
}

static void pair_close(endpoint *e) {
    world_close(e, 2);
    free(e);
}

static uint8_t *memory_of(int salt, size_t bytes) {
    uint8_t *p = malloc(bytes + 1);
    for (size_t i = 0; i <= bytes; i++) {
        p[i] = salt < 0 ? 0xee : (uint8_t)(i * 7 + i / 251 + (size_t)salt);
    }
    return p;
}

static size_t wrong(const uint8_t *p, int salt, size_t bytes) {
    size_t bad = p[bytes] != 0xee;
    for (size_t i = 0; i < bytes; i++) {
        bad += p[i] != (uint8_t)(i * 7 + i / 251 + (size_t)salt);
    }
    return bad;
}

static ddl_status enroll(endpoint *e, int32_t index, void *memory, size_t bytes, void **handle, ddl_memory_key *key) {
    return fabric_transport.memory_register_on(e->self, "cuda", index, memory, bytes, handle, key);
}

static void one_get(const char *first, const char *second, size_t bytes) {
    endpoint *e = pair_open(first, second);
    uint8_t *from = memory_of(3, bytes), *to = memory_of(-1, bytes);
    void *there = NULL, *here = NULL;
    ddl_memory_key key, own;
    CHECK_EQ(enroll(&e[0], 5, from, bytes, &there, &key), DDL_OK);
    CHECK_EQ(hmem.last.iface, FI_HMEM_CUDA);
    CHECK_EQ(hmem.last.device.cuda, 5);
    CHECK_EQ(hmem.last_count, 1);
    CHECK(hmem.last_at.iov_base == from && hmem.last_at.iov_len == bytes);
    CHECK((hmem.last.access & FI_REMOTE_READ) != 0 && (hmem.last.access & (FI_REMOTE_WRITE | FI_WRITE)) == 0);
    CHECK_EQ(enroll(&e[1], 2, to, bytes, &here, &own), DDL_OK);
    CHECK_EQ(hmem.last.device.cuda, 2);
    CHECK(hmem.last_at.iov_base == to && (hmem.last.access & FI_READ) != 0);
    int cookie = 0;
    CHECK_EQ(fabric_transport.get(e[1].self, 0, to, here, &key, 0, bytes, &cookie), DDL_IN_PROGRESS);
    DRIVE(e, 2, transferred.count == 1) {}
    CHECK(transferred.cookies[0] == &cookie);
    CHECK_EQ(transferred.status[0], DDL_OK);
    CHECK_EQ(wrong(to, 3, bytes), 0);
    /* the middle of it, to the middle */
    memset(to, 0xee, bytes);
    CHECK_EQ(fabric_transport.get(e[1].self, 0, to + 1, here, &key, bytes / 2, bytes / 4, &cookie), DDL_IN_PROGRESS);
    DRIVE(e, 2, transferred.count == 2) {}
    CHECK(to[0] == 0xee && memcmp(to + 1, from + bytes / 2, bytes / 4) == 0 && to[1 + bytes / 4] == 0xee);
    CHECK_EQ(fabric_transport.get(e[1].self, 0, to, here, &key, 1, bytes, &cookie), DDL_ERR_UNSUPPORTED);
    CHECK_EQ(fabric_transport.get(e[1].self, 0, to + 1, here, &key, 0, bytes, &cookie), DDL_ERR_ARG);
    memset(key.bytes, 0x55, sizeof key.bytes); /* another transport's */
    CHECK_EQ(fabric_transport.get(e[1].self, 0, to, here, &key, 0, 1, &cookie), DDL_ERR_UNSUPPORTED);
    fabric_transport.memory_release(e[0].self, there);
    fabric_transport.memory_release(e[1].self, here);
    CHECK_EQ(transferred.count, 2);
    CHECK_STR(e[0].log, "has FI_HMEM");
    CHECK(strstr(e[1].log, "FI_HMEM") == NULL); /* once for a job */
    pair_close(e);
    free(from);
    free(to);
}

TEST(what_is_registered_and_read) {
    NEED_LIBFABRIC();
    int asked = hmem.asked;
    one_get("FABRIC_FORCE_MR=local", NULL, 300001);
    CHECK(hmem.asked > asked);
    one_get("FABRIC_FORCE_MR=local", "FABRIC_FORCE_MAX_MESSAGE=8K", 1000003); /* more reads than slots */
    one_get("FABRIC_FORCE_MR=local", NULL, 64);
}

/* The sender's or the receiver's registration fails: an error, said once, and nothing stays; so does a read. */
TEST(registrations_and_reads_that_fail) {
    NEED_LIBFABRIC();
    endpoint *e = pair_open("FABRIC_FORCE_MR=local", NULL);
    uint8_t *from = memory_of(3, 5000), *to = memory_of(-1, 5000);
    void *there = NULL, *here = NULL;
    ddl_memory_key key;
    for (int i = 0; i < 3; i++) {
        hmem.fail_at = 1;
        CHECK_EQ(enroll(&e[0], 1, from, 5000, &there, &key), DDL_ERR_SYSTEM);
    }
    CHECK(there == NULL);
    CHECK_EQ(e[0].warnings, 1);
    CHECK_STR(e[0].log, "registering 5000 bytes of CUDA device 1 failed");
    CHECK_STR(e[0].log, "pinned memory");
    CHECK_EQ(enroll(&e[0], 1, from, 5000, &there, &key), DDL_OK);
    ddl_memory_key own;
    CHECK_EQ(enroll(&e[1], 0, to, 5000, &here, &own), DDL_OK);
    hmem.fail_reads = 1;
    hmem.read_code = -FI_EIO;
    CHECK_EQ(fabric_transport.get(e[1].self, 0, to, here, &key, 0, 5000, &key), DDL_IN_PROGRESS);
    DRIVE(e, 2, transferred.count == 1) {}
    CHECK_EQ(transferred.status[0], DDL_ERR_SYSTEM);
    hmem.fail_reads = 1 << 30; /* an adapter that does not reach the peer's wants it to be repeated, for ever: after 3 s it has failed */
    hmem.read_code = -FI_EAGAIN;
    double start = test_now_s();
    CHECK_EQ(fabric_transport.get(e[1].self, 0, to, here, &key, 0, 2000, &key), DDL_IN_PROGRESS);
    CHECK_EQ(fabric_transport.get(e[1].self, 0, to + 2000, here, &key, 0, 2000, &own), DDL_IN_PROGRESS);
    DRIVE(e, 2, transferred.count == 3) {}
    CHECK(test_now_s() - start >= 3);
    CHECK_EQ(transferred.status[1], DDL_ERR_SYSTEM);
    CHECK_EQ(transferred.status[2], DDL_ERR_SYSTEM);
    CHECK_STR(e[1].log, "no read from rank 0 over");
    const fabric_link *link = self_of(&e[1])->peers[0].link;
    CHECK_EQ(link->no_reads_for_ns, FABRIC_NO_READS_NS); /* the two have failed together */
    /* later ones do not wait for that, nor do messages in memory of the host */
    letter l;
    start = test_now_s();
    ddl_status third = fabric_transport.get(e[1].self, 0, to, here, &key, 0, 5000, &key);
    CHECK_EQ(third, DDL_ERR_STATE);
    CHECK_EQ(post(&e[0], 1, &l, 1 << 20), DDL_IN_PROGRESS);
    DRIVE(e, 2, e[1].arrived[0] == 1 && l.returned == 1 && (third != DDL_IN_PROGRESS || transferred.count == 4)) {}
    CHECK(test_now_s() - start < 0.1 * test_slow());
    hmem.fail_reads = 0; /* reads begin again: the next time they stop for as short */
    DRIVE(e, 2, mini_now_ns(&e[1].host) >= link->no_reads_ns) {}
    CHECK_EQ(fabric_transport.get(e[1].self, 0, to, here, &key, 0, 5000, &key), DDL_IN_PROGRESS);
    int count = transferred.count;
    DRIVE(e, 2, transferred.count == count + 1) {}
    CHECK_EQ(transferred.status[count], DDL_OK);
    CHECK_EQ(wrong(to, 3, 5000), 0);
    CHECK_EQ(link->no_reads_for_ns, 0);
    letter_free(&l);
    fabric_transport.memory_release(e[0].self, there);
    fabric_transport.memory_release(e[1].self, here);
    CHECK_EQ(fabric_transport.memory_register_on(e[0].self, "other", 0, from, 5000, &there, &key), DDL_ERR_UNSUPPORTED);
    int before = hmem.registered; /* of no bytes: only whether it could */
    CHECK_EQ(fabric_transport.memory_register_on(e[0].self, "cuda", 0, NULL, 0, &there, &key), DDL_OK);
    CHECK_EQ(fabric_transport.memory_register_on(e[0].self, "other", 0, NULL, 0, &there, &key), DDL_ERR_UNSUPPORTED);
    CHECK_EQ(hmem.registered, before);
    pair_close(e);
    free(from);
    free(to);
}

/* Both go on for a while, and nobody writes to memory that is all 0xaa. */
static void check_untouched(endpoint *e, const uint8_t *to, size_t bytes) {
    size_t bad = 0;
    for (int i = 0; i < 300; i++) {
        fabric_transport.progress(e[0].self, -1);
        fabric_transport.progress(e[1].self, -1);
    }
    for (size_t i = 0; i < bytes; i++) {
        bad += to[i] != 0xaa;
    }
    CHECK_EQ(bad, 0);
}

/* Memory that is wanted back, and a peer that dies, while the peer's process helps nobody read: the get ends before that
 * returns, once, and nothing is written afterwards. */
static void wanted_back(int dies) {
    endpoint *e = pair_open("FABRIC_FORCE_MR=local", NULL);
    size_t bytes = 4 << 20;
    uint8_t *from = memory_of(3, bytes), *to = memory_of(-1, bytes);
    uint8_t *other = memory_of(-1, bytes);
    void *there = NULL, *here = NULL, *too = NULL;
    ddl_memory_key key, own;
    letter l;
    post(&e[1], 0, &l, 10); /* connects */
    DRIVE(e, 2, e[0].arrived[1] == 1) {}
    CHECK_EQ(enroll(&e[0], 0, from, bytes, &there, &key), DDL_OK);
    CHECK_EQ(enroll(&e[1], 0, to, bytes, &here, &own), DDL_OK);
    CHECK_EQ(enroll(&e[1], 0, other, bytes, &too, &own), DDL_OK);
    CHECK_EQ(fabric_transport.get(e[1].self, 0, to, here, &key, 0, bytes, &key), DDL_IN_PROGRESS);
    hmem.fail_reads = dies ? 0 : 1000; /* it cannot even begin */
    hmem.read_code = -FI_EAGAIN;
    CHECK_EQ(fabric_transport.get(e[1].self, 0, other, too, &key, 0, bytes, &own), DDL_IN_PROGRESS);
    for (int i = 0; i < 3; i++) {
        fabric_transport.progress(e[1].self, -1);
    }
    CHECK_EQ(transferred.count, 0);
    if (dies) {
        fabric_transport.peer_dead(e[1].self, 0);
    } else {
        fabric_transport.memory_release(e[1].self, here);
    }
    hmem.fail_reads = 0;
    int reads = hmem.reads;
    CHECK_EQ(transferred.count, dies ? 2 : 1);
    CHECK_EQ(transferred.status[0], dies ? DDL_ERR_PEER : DDL_ERR_CANCELLED);
    CHECK(dies || transferred.cookies[0] == &key);
    memset(to, 0xaa, bytes);
    check_untouched(e, to, bytes);
    CHECK_EQ(hmem.reads, reads);
    CHECK_EQ(transferred.count, 2); /* the other's link was cut as well */
    CHECK_EQ(transferred.status[1], dies ? DDL_ERR_PEER : DDL_ERR_SYSTEM);
    fabric_transport.memory_release(e[1].self, too);
    if (dies) {
        fabric_transport.memory_release(e[1].self, here);
    }
    fabric_transport.memory_release(e[0].self, there);
    fabric_transport.peer_dead(e[0].self, 1);
    fabric_transport.peer_dead(e[1].self, 0);
    letter_free(&l);
    pair_close(e);
    free(from);
    free(other);
    free(to);
}

TEST(memory_that_is_wanted_back) {
    NEED_LIBFABRIC();
    wanted_back(0);
}

TEST(a_peer_that_dies) {
    NEED_LIBFABRIC();
    wanted_back(1);
}

/* Who is told of one get takes the memory of another back, as an operation that ends does with all its memory: that other has ended too,
 * and is told so before the memory is. */
static struct {
    endpoint *e;
    void *memory[2]; /* of gets with these cookies: */
    int cookies[2];
    int before, after; /* how many gets were told of, when that was asked for and when it was done */
} giver;

static void on_transferred_give(const ddl_host *host, void *cookie, ddl_status status) {
    on_transferred(host, cookie, status);
    if (giver.before == 0) {
        giver.before = transferred.count;
        fabric_transport.memory_release(giver.e->self, giver.memory[cookie == &giver.cookies[0]]);
        giver.after = transferred.count;
    }
}

static void memory_of_another_get(int dies) {
    endpoint *e = pair_open("FABRIC_FORCE_MR=local", NULL);
    uint8_t *from = memory_of(3, 5000), *to = memory_of(-1, 5000), *too = memory_of(-1, 5000);
    void *there = NULL;
    ddl_memory_key key, own;
    memset(&giver, 0, sizeof giver);
    giver.e = &e[1];
    e[1].host.transferred = on_transferred_give;
    CHECK_EQ(enroll(&e[0], 0, from, 5000, &there, &key), DDL_OK);
    CHECK_EQ(enroll(&e[1], 0, to, 5000, &giver.memory[0], &own), DDL_OK);
    CHECK_EQ(enroll(&e[1], 0, too, 5000, &giver.memory[1], &own), DDL_OK);
    hmem.fail_reads = dies ? 1000 : 2; /* both end in one look */
    hmem.read_code = dies ? -FI_EAGAIN : -FI_EIO;
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(fabric_transport.get(e[1].self, 0, i ? too : to, giver.memory[i], &key, 0, 5000, &giver.cookies[i]), DDL_IN_PROGRESS);
    }
    if (dies) {
        self_of(&e[1])->peers[0].link->refused = 0; /* by us: there is no connection that ofi_rxm waits for */
        fabric_transport.peer_dead(e[1].self, 0);
    } else {
        fabric_transport.progress(e[1].self, -1);
    }
    hmem.fail_reads = 0;
    CHECK_EQ(giver.before, 1);
    CHECK_EQ(giver.after, 2);
    CHECK_EQ(transferred.count, 2);
    CHECK(transferred.cookies[0] != transferred.cookies[1]);
    CHECK_EQ(transferred.status[0], dies ? DDL_ERR_PEER : DDL_ERR_SYSTEM);
    CHECK_EQ(transferred.status[1], DDL_ERR_CANCELLED);
    fabric_transport.memory_release(e[1].self, giver.memory[transferred.cookies[0] != &giver.cookies[0]]);
    fabric_transport.memory_release(e[0].self, there);
    fabric_transport.peer_dead(e[0].self, 1);
    pair_close(e);
    free(from);
    free(too);
    free(to);
}

TEST(memory_of_another_get_is_taken_back_as_one_ends) {
    NEED_LIBFABRIC();
    memory_of_another_get(0);
    memory_of_another_get(1);
}

/* Before libfabric 1.17 ofi_rxm keeps the connection of an address that is removed, and goes on writing what is read from
 * it: only closing the endpoint ends that. */
TEST(a_peer_dies_and_the_library_is_old) {
    NEED_LIBFABRIC();
    size_t bytes = 4 << 20;
    endpoint *e = pair_open("FABRIC_FORCE_MR=local", NULL);
    uint8_t *from = memory_of(3, bytes), *to = memory_of(-1, bytes);
    void *there = NULL, *here = NULL;
    ddl_memory_key key, own;
    letter l;
    post(&e[1], 0, &l, 10); /* connects */
    DRIVE(e, 2, e[0].arrived[1] == 1) {}
    hmem.old = 1;
    CHECK_EQ(enroll(&e[0], 0, from, bytes, &there, &key), DDL_OK);
    CHECK_EQ(enroll(&e[1], 0, to, bytes, &here, &own), DDL_OK);
    CHECK_EQ(fabric_transport.get(e[1].self, 0, to, here, &key, 0, bytes, &key), DDL_IN_PROGRESS);
    fabric_transport.peer_dead(e[1].self, 0);
    hmem.old = 0;
    memset(to, 0xaa, bytes);
    CHECK_EQ(transferred.count, 1);
    CHECK_EQ(transferred.status[0], DDL_ERR_PEER);
    CHECK_STR(e[1].log, "the endpoint is closed");
    CHECK_EQ(fabric_transport.progress(e[1].self, -1), DDL_ERR_SYSTEM);
    check_untouched(e, to, bytes);
    fabric_transport.memory_release(e[1].self, here);
    fabric_transport.memory_release(e[0].self, there);
    fabric_transport.peer_dead(e[0].self, 1);
    letter_free(&l);
    pair_close(e);
    free(from);
    free(to);
}

/* ---- no ---- */

static void refused(const char *first, const char *second, const char *sentence) {
    endpoint *e = pair_open(first, second);
    uint8_t bytes[64];
    void *handle = NULL;
    ddl_memory_key key;
    CHECK_EQ(enroll(&e[0], 0, bytes, sizeof bytes, &handle, &key), DDL_ERR_UNSUPPORTED);
    const char *said = strstr(e[0].log, "does not reach memory of devices (FI_HMEM)");
    CHECK(said != NULL && strstr(said + 1, "does not reach") == NULL && strstr(e[1].log, "FI_HMEM") == NULL);
    CHECK_STR(e[0].log, sentence);
    CHECK_STR(e[0].log, "pinned memory");
    CHECK_EQ(e[0].warnings, 0);
    pair_close(e);
}

TEST(refusals_are_said_once) {
    NEED_LIBFABRIC();
    hmem.refuses = 1;
    refused("FABRIC_FORCE_MR=local", NULL, "No data available");
    hmem.refuses = 0;
    refused(NULL, NULL, "it is software");
    refused("FABRIC_FORCE_MR=local", "FABRIC_FORCE_NO_RMA=1", "it has no reads");
    world_device = "standin";
    refused("FABRIC_FORCE_MR=local", NULL, "CUDA alone");
    world_device = "cuda";
}

TEST(without_devices_nobody_asks) {
    NEED_LIBFABRIC();
    int asked = hmem.asked;
    world_device = NULL;
    endpoint *e = pair_open(NULL, NULL);
    CHECK_EQ(hmem.asked, asked);
    CHECK(strstr(e[0].log, "FI_HMEM") == NULL);
    pair_close(e);
    world_device = "cuda";
}

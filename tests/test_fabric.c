/* The libfabric plugin against a small host instead of the core, over the tcp provider on loopback: content and order
 * of messages of all sizes; then the same with what only other providers do, forced by settings: no order between
 * messages (what SRD is below EFA's own ordering), small messages, no reads, registration of everything, no descriptor
 * to wait on, no inject (fi_efa(7): "Wait objects are not currently supported", "No support for inject"); operations of
 * libfabric that fail or ask to come back; memory that is wanted back; deaths, strangers, and settings that make no
 * sense.
 * tests/run: variants=gcc,asan,valgrind timeout=150 quick=yes */
#include "mini_host.h"

#include "fabric_faults.h"

#include "fabric_host.h"

/* tcp of libfabric 1.17 loses 376 bytes where a listener is closed before a call that it has accepted has been read
 * whole. What the plugin opens is counted (world_end), and what it allocates is its own. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void) { return "leak:libfabric.so\n"; }

static void exchange(int n, const char *first, const char *second) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(n, first, second);
    exchange_in(e, n, 3);
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < n; k++) {
            CHECK_EQ(e[i].lost[k], 0);
        }
    }
    world_end(e, n);
}

TEST(all_sizes_both_ways) { exchange(2, NULL, NULL); }
TEST(six_ranks_all_to_all) { exchange(6, NULL, NULL); }

/* Up to 32 KiB go in one message. More goes by a connection of its own; where it may not, in as many messages as that takes. */
typedef struct travels {
    uint64_t bytes;
    uint32_t messages, offers;
} travels;

static void travel(const travels *ways, size_t count, const char *setting) {
    endpoint *e = world_open(2, setting, NULL);
    for (size_t i = 0; i < count; i++) {
        letter l = {0};
        const fabric_link *link = self_of(&e[0])->peers[1].link;
        uint32_t messages = link != NULL ? link->sequence : 0, offers = link != NULL ? link->offer_count : 0;
        CHECK(post(&e[0], 1, &l, ways[i].bytes) >= 0);
        DRIVE(e, 2, all_arrived(e, 2) == i + 1 && all_returned(&l, 1)) {}
        link = self_of(&e[0])->peers[1].link;
        CHECK_EQ(link->sequence - messages, ways[i].messages);
        CHECK_EQ(link->offer_count - offers, ways[i].offers);
        letter_free(&l);
    }
    world_end(e, 2);
}

TEST(how_payloads_travel) {
    static const travels connected[] = {{0, 1, 0}, {16384, 1, 0}, {32768, 1, 0}, {32817, 1, 1}, {262144, 1, 1}, {5 << 20, 1, 1}};
    static const travels pieces[] = {{0, 1, 0}, {32768, 1, 0}, {32817, 2, 0}, {131072, 4, 0}, {131073, 1, 1}, {1 << 20, 1, 1}};
    NEED_LIBFABRIC();
    travel(connected, sizeof connected / sizeof connected[0], NULL);
    travel(pieces, sizeof pieces / sizeof pieces[0], "FABRIC_OFFER_BYTES=128K");
}

/* ---- what other providers do ---- */

TEST(without_order) { exchange(3, "FABRIC_FORCE_UNORDERED=1", NULL); }
TEST(without_order_and_with_small_messages) {
    exchange(2, "FABRIC_FORCE_UNORDERED=1", "FABRIC_FORCE_MAX_MESSAGE=2048");
}
TEST(without_reads) { exchange(3, "FABRIC_FORCE_NO_RMA=1", NULL); }
TEST(reads_of_nearly_everything) { exchange(3, "FABRIC_OFFER_BYTES=0", NULL); }
TEST(small_messages) { exchange(2, "FABRIC_FORCE_MAX_MESSAGE=512", NULL); }
TEST(reads_in_parts) { exchange(2, "FABRIC_FORCE_MAX_MESSAGE=8K", "FABRIC_OFFER_BYTES=8K"); }
TEST(nothing_to_wait_on) { exchange(2, "FABRIC_FORCE_NO_WAIT=1", NULL); }
TEST(without_inject) { exchange(2, "FABRIC_FORCE_NO_INJECT=1", NULL); }
TEST(local_registration) { exchange(2, "FABRIC_FORCE_MR=local", NULL); }

/* ofi_rxm does not hand these modes down; providers with RDM endpoints of their own do what they are told: sockets, and
 * tcp from 2.0 on. (net of 1.17 does too, and leaks.) */
static void in_mode(const char *first, const char *second) {
    world_detail = "sockets";
    if (!available()) {
        world_detail = "tcp";
    }
    exchange(2, first, second);
    world_detail = "tcp";
}

TEST(virtual_addresses) { in_mode("FABRIC_FORCE_MR=virt_addr,allocated", NULL); }
TEST(keys_of_the_provider) { in_mode("FABRIC_FORCE_MR=prov_key", NULL); }
TEST(every_mode_at_once) { in_mode("FABRIC_FORCE_MR=local,virt_addr,prov_key,allocated", "FABRIC_FORCE_UNORDERED=1"); }
TEST(automatic_progress) { exchange(2, "FABRIC_PROGRESS=auto", NULL); }
TEST(manual_progress) { exchange(2, "FABRIC_PROGRESS=manual", NULL); }

/* Payloads go in pieces where a registration fails: of the sender, of the receiver in the middle of it, or of both. */
TEST(every_third_registration_fails) { in_mode("FABRIC_FORCE_FAIL_REGISTRATION=3", "FABRIC_FORCE_MR=virt_addr"); }
TEST(registrations_fail_on_both_sides) { exchange(2, "FABRIC_FORCE_FAIL_REGISTRATION=4", "FABRIC_FORCE_MR=local"); }
TEST(no_payload_can_be_registered) { in_mode("FABRIC_FORCE_FAIL_REGISTRATION=1", "FABRIC_FORCE_MR=virt_addr"); }

/* ---- operations that fail ---- */

static int call_number, fail_every;
static ssize_t fail_with;

/* One of every so many calls fails, by lot: in turn, a caller that makes two would see the same one fail for ever. */
static int is_failing(void) {
    static uint32_t x = 1;
    x = x * 1664525u + 1013904223u;
    call_number++;
    return (x >> 16) % (uint32_t)fail_every == 0;
}

static ssize_t flaky_send(struct fid_ep *ep, const void *buf, size_t len, void *desc, fi_addr_t at, void *context) {
    return is_failing() ? fail_with : real_send(ep, buf, len, desc, at, context);
}

static ssize_t flaky_inject(struct fid_ep *ep, const void *buf, size_t len, fi_addr_t at) {
    return is_failing() ? fail_with : real_inject(ep, buf, len, at);
}

static ssize_t flaky_recv(struct fid_ep *ep, void *buf, size_t len, void *desc, fi_addr_t at, void *context) {
    return is_failing() ? -FI_EAGAIN : real_recv(ep, buf, len, desc, at, context);
}

static ssize_t flaky_read(struct fid_ep *ep, void *buf, size_t len, void *desc, fi_addr_t at, uint64_t address,
                          uint64_t key, void *context) {
    return is_failing() ? fail_with : real_read(ep, buf, len, desc, at, address, key, context);
}

/* What takes a payload cannot be posted: it is asked for once more, and comes in messages. */
static ssize_t flaky_take(struct fid_ep *ep, void *buf, size_t len, void *desc, fi_addr_t at, void *context) {
    const fabric_slot *slot = (fabric_slot *)((char *)context - offsetof(fabric_slot, context));
    int fails = slot->role == FABRIC_READ && is_failing();
    return fails ? fail_with : real_recv(ep, buf, len, desc, at, context);
}

/* Of parts of payloads every so manieth is not sent: the connection ends, and a new one is made. */
static ssize_t flaky_stream(struct fid_ep *ep, const void *buf, size_t len, void *desc, fi_addr_t at, void *context) {
    const fabric_slot *slot = (fabric_slot *)((char *)context - offsetof(fabric_slot, context));
    int fails = slot->role == FABRIC_STREAM && is_failing();
    return fails ? fail_with : real_send(ep, buf, len, desc, at, context);
}

static void exchange_flaky(struct hooks flaky, int every, ssize_t with, const char *setting) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(3, setting, NULL);
    hooks = flaky;
    call_number = 0;
    fail_every = every;
    fail_with = with;
    exchange_in(e, 3, 2);
    CHECK(call_number >= every);
    for (int i = 0; i < 9; i++) {
        CHECK_EQ(e[i / 3].lost[i % 3], 0);
    }
    hooks_end();
    world_end(e, 3);
}

static void half_of_all_calls(const char *setting) {
    for (int i = 0; i < 6; i++) { /* each time others */
        exchange_flaky((struct hooks){.send = flaky_send, .inject = flaky_inject, .recv = flaky_recv, .read = flaky_read}, 2,
                       -FI_EAGAIN, setting);
    }
}

TEST(half_of_all_calls_are_to_be_repeated) { half_of_all_calls(NULL); }
TEST(half_of_all_calls_of_an_adapter_are_to_be_repeated) { half_of_all_calls("FABRIC_FORCE_MR=local"); }

static void reads_that_fail(int every, ssize_t with) {
    exchange_flaky((struct hooks){.read = flaky_read}, every, with, "FABRIC_FORCE_MR=local");
}

TEST(every_third_read_cannot_be_started) { reads_that_fail(3, -FI_EIO); }
TEST(no_read_can_be_started) { reads_that_fail(1, -FI_ENOSYS); }

TEST(every_third_payload_cannot_be_taken) { exchange_flaky((struct hooks){.recv = flaky_take}, 3, -FI_EIO, NULL); }
TEST(no_payload_can_be_taken) { exchange_flaky((struct hooks){.recv = flaky_take}, 1, -FI_EIO, NULL); }
TEST(every_third_payload_cannot_be_sent) { exchange_flaky((struct hooks){.send = flaky_stream}, 3, -FI_EIO, NULL); }
TEST(no_payload_can_be_sent) { exchange_flaky((struct hooks){.send = flaky_stream}, 1, -FI_EIO, NULL); }

/* A provider that demands FI_MR_ENDPOINT: each region is bound to the endpoint and enabled before it is used. */
static struct fi_ops_mr *real_mr;
static int binds, enables;

static int counting_bind(struct fid *fid, struct fid *to, uint64_t flags) {
    (void)fid, (void)to, (void)flags;
    binds++;
    return 0;
}

static int counting_control(struct fid *fid, int command, void *arg) {
    (void)fid, (void)arg;
    enables += command == FI_ENABLE;
    return 0;
}

static int counting_reg(struct fid *fid, const void *buf, size_t len, uint64_t access, uint64_t offset, uint64_t key,
                        uint64_t flags, struct fid_mr **mr, void *context) {
    static struct fi_ops ops;
    int result = real_mr->reg(fid, buf, len, access, offset, key, flags, mr, context);
    if (result == 0) {
        ops = *(*mr)->fid.ops;
        ops.bind = counting_bind;
        ops.control = counting_control;
        (*mr)->fid.ops = &ops;
    }
    return result;
}

TEST(regions_are_bound_to_the_endpoint_where_that_is_demanded) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, "FABRIC_FORCE_MR=local", NULL);
    struct fi_ops_mr mr = *(real_mr = self_of(&e[0])->rails[0].domain->mr);
    mr.reg = counting_reg;
    binds = enables = 0;
    for (int i = 0; i < 2; i++) {
        self_of(&e[i])->rails[0].domain->mr = &mr;
        self_of(&e[i])->mr_mode |= FI_MR_ENDPOINT;
    }
    exchange_in(e, 2, 1);
    CHECK(binds > 0);
    CHECK_EQ(binds, enables);
    for (int i = 0; i < 2; i++) {
        self_of(&e[i])->rails[0].domain->mr = real_mr;
    }
    world_end(e, 2);
}

/* ---- limits ---- */

TEST(a_stuck_receiver_holds_the_sender_up_without_blocking_it) {
    NEED_LIBFABRIC();
    enum { COUNT = 64 };
    endpoint *e = world_open(2, NULL, NULL);
    letter *l = calloc(COUNT, sizeof *l);
    double start = test_now_s();
    for (int i = 0; i < COUNT; i++) {
        ddl_status status = post(&e[0], 1, &l[i], i % 2 ? 1 << 20 : 60000);
        CHECK(status == DDL_OK || status == DDL_IN_PROGRESS);
    }
    for (int i = 0; i < 200; i++) {
        CHECK(fabric_transport.progress(e[0].self, 1) >= 0);
    }
    CHECK(test_now_s() - start < 5 * test_slow());
    CHECK(self_of(&e[0])->peers[1].link->spent <= FABRIC_FIRST_WINDOW);
    DRIVE(e, 2, e[1].arrived[0] == COUNT && all_returned(l, COUNT)) {}
    CHECK(self_of(&e[0])->peers[1].link->spent - self_of(&e[1])->peers[0].link->taken <= FABRIC_WINDOW);
    for (int i = 0; i < COUNT; i++) {
        letter_free(&l[i]);
    }
    free(l);
    world_end(e, 2);
}

TEST(an_idle_endpoint_sleeps) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, NULL, NULL);
    exchange_in(e, 2, 1);
    for (double until = test_now_s() + 0.3; test_now_s() < until;) {
        progress_all(e, 2); /* the last acknowledgements */
    }
    struct timespec a, b;
    int wakes = 0;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &a);
    for (double until = test_now_s() + 1; test_now_s() < until; wakes++) {
        progress_all(e, 2);
        sleep_all(e, 2, 100);
    }
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &b);
    CHECK(wakes < 60);
    CHECK((double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) * 1e-9 < 0.2 * test_slow());
    world_end(e, 2);
}

/* Waits until the peer 0 of an endpoint has said something that it has not dealt with yet. */
#define COLLECT(e, peer_says)                                                                                          \
    DRIVE(e, 1, self_of(&(e)[1])->arrived != NULL) {                                                                   \
        peer_says;                                                                                                     \
        fabric_poll(self_of(&(e)[1]));                                                                                 \
    }

/* A provider that takes no read for now costs no processor time: the endpoint can be slept on, and its timer wakes. */
TEST(an_endpoint_whose_reads_are_not_taken_sleeps) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, "FABRIC_FORCE_MR=local", NULL);
    letter l;
    int fd = -1, asleep = 0;
    reads_allowed = 0;
    hooks.of = e[1].self;
    hooks.read = held_read;
    CHECK_EQ(post(&e[0], 1, &l, 1 << 20), DDL_IN_PROGRESS);
    DRIVE(e, 2, reads_allowed < 0) {}
    int before = reads_allowed;
    for (int i = 0; i < 20; i++) { /* it may be woken by what comes */
        CHECK(fabric_transport.progress(e[1].self, -1) >= 0);
        if (fabric_transport.arm(e[1].self, &fd) == DDL_OK) {
            struct pollfd wait = {.fd = fd, .events = POLLIN};
            asleep += poll(&wait, 1, 10000) == 1;
        }
    }
    CHECK(asleep > 10);
    CHECK(reads_allowed < before); /* it was tried again */
    hooks_end();
    DRIVE(e, 2, e[1].arrived[0] == 1 && l.returned == 1) {}
    letter_free(&l);
    world_end(e, 2);
}


static ssize_t counted_inject(struct fid_ep *ep, const void *buf, size_t len, fi_addr_t at) {
    call_number++;
    return real_inject(ep, buf, len, at);
}

/* An injected message has no completion: where there is no order either, nothing would show that it was lost. */
static int injected_with(const char *setting) {
    endpoint *e = world_open(2, setting, NULL);
    hooks.inject = counted_inject;
    call_number = 0;
    exchange_in(e, 2, 1);
    hooks_end();
    world_end(e, 2);
    return call_number;
}

TEST(nothing_is_injected_without_order) {
    NEED_LIBFABRIC();
    CHECK(injected_with(NULL) > 0);
    CHECK_EQ(injected_with("FABRIC_FORCE_UNORDERED=1"), 0);
}

/* The receiver has no memory for its reads from a sender: it says so, and the payload is sent. */
TEST(a_reader_without_memory_is_sent_the_payload) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, NULL, NULL);
    letter first, l;
    post(&e[0], 1, &first, 8);
    DRIVE(e, 2, e[1].arrived[0] == 1) {}
    for (int i = 0; i < 100; i++) {
        progress_all(e, 2); /* the window is wide then, and takes no more memory */
    }
    post(&e[0], 1, &l, 1 << 20);
    COLLECT(e, fabric_transport.progress(e[0].self, 1));
    e[1].fail_alloc = e[1].allocs + 1;
    CHECK(fabric_transport.progress(e[1].self, -1) >= 0);
    CHECK(e[1].allocs >= e[1].fail_alloc);
    DRIVE(e, 2, e[1].arrived[0] == 2 && l.returned == 1) {}
    CHECK(self_of(&e[1])->read_free == NULL); /* nothing was read */
    letter_free(&first);
    letter_free(&l);
    world_end(e, 2);
}

/* ---- ends ---- */

/* What is asked of the provider for an address that was removed: it would look it up without a check. */
static int to_nobody;

static ssize_t careful_read(struct fid_ep *ep, void *buf, size_t len, void *desc, fi_addr_t at, uint64_t address,
                            uint64_t key, void *context) {
    to_nobody += at == FI_ADDR_NOTAVAIL;
    return at == FI_ADDR_NOTAVAIL ? -FI_EINVAL : real_read(ep, buf, len, desc, at, address, key, context);
}

static ssize_t careful_send(struct fid_ep *ep, const void *buf, size_t len, void *desc, fi_addr_t at, void *context) {
    to_nobody += at == FI_ADDR_NOTAVAIL;
    return at == FI_ADDR_NOTAVAIL ? -FI_EINVAL : real_send(ep, buf, len, desc, at, context);
}

static ssize_t careful_inject(struct fid_ep *ep, const void *buf, size_t len, fi_addr_t at) {
    to_nobody += at == FI_ADDR_NOTAVAIL;
    return at == FI_ADDR_NOTAVAIL ? -FI_EINVAL : real_inject(ep, buf, len, at);
}

/* A link is cut while what the peer said last waits to be handed on: an offer, or its goodbye. */
static void cut_before(int goodbye, const char *setting) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, setting, NULL);
    letter first, l = {0};
    post(&e[0], 1, &first, 8);
    DRIVE(e, 2, e[1].arrived[0] == 1) {}
    to_nobody = 0;
    hooks.of = e[1].self;
    hooks.read = careful_read;
    hooks.send = careful_send;
    hooks.inject = careful_inject;
    if (goodbye) {
        fabric_push_bye(e[0].self, self_of(&e[0])->peers[1].link);
    } else {
        post(&e[0], 1, &l, 1 << 20);
    }
    COLLECT(e, fabric_poll(self_of(&e[0])));
    fabric_link *link = self_of(&e[1])->peers[0].link;
    fabric_cut(e[1].self, link);
    fabric_break(e[1].self, link, ETIMEDOUT);
    for (int i = 0; i < 10; i++) {
        CHECK(fabric_transport.progress(e[1].self, -1) >= 0);
    }
    CHECK_EQ(to_nobody, 0);
    CHECK_EQ(e[1].lost[0], 1);
    hooks_end();
    fabric_transport.peer_dead(e[0].self, 1);
    letter_free(&first);
    if (!goodbye) {
        CHECK_EQ(l.returned, 1);
        letter_free(&l);
    }
    world_end(e, 2);
}

TEST(an_offer_whose_link_is_cut_is_not_taken) { cut_before(0, NULL); }
TEST(an_offer_whose_link_is_cut_is_not_read) { cut_before(0, "FABRIC_FORCE_MR=local"); }
TEST(a_goodbye_whose_link_is_cut_is_not_answered) { cut_before(1, NULL); }
TEST(a_goodbye_over_an_adapter_whose_link_is_cut_is_not_answered) { cut_before(1, "FABRIC_FORCE_MR=local"); }

static ssize_t no_inject_now(struct fid_ep *ep, const void *buf, size_t len, fi_addr_t at) {
    (void)ep, (void)buf, (void)len, (void)at;
    return -FI_EAGAIN;
}

/* The provider takes no word for a while: the goodbye is answered when it does; who does not hear it is gone after a
 * second. */
static void goodbye_to_the_deaf(int recovers) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, NULL, NULL);
    letter first[2];
    post(&e[0], 1, &first[0], 8);
    post(&e[1], 0, &first[1], 8);
    DRIVE(e, 2, e[1].arrived[0] == 1 && e[0].arrived[1] == 1) {}
    hooks.of = e[1].self;
    hooks.inject = no_inject_now;
    fabric_push_bye(e[0].self, self_of(&e[0])->peers[1].link);
    double start = test_now_s();
    DRIVE(e, 2, self_of(&e[1])->peers[0].link->bye) {}
    if (recovers) {
        recovers = e[1].lost[0] == 0; /* else the machine was asleep for that second */
        CHECK(recovers || test_now_s() - start > 0.9);
        hooks_end();
    }
    DRIVE(e, 2, e[1].lost[0] == 1 && (!recovers || self_of(&e[0])->peers[1].link->heard_out)) {}
    CHECK(recovers || test_now_s() - start > 0.9);
    CHECK_EQ(e[1].lost_error[0], 0);
    hooks_end();
    letter_free(&first[0]);
    letter_free(&first[1]);
    world_end(e, 2);
}

TEST(a_goodbye_is_answered_when_the_provider_takes_a_word_again) { goodbye_to_the_deaf(1); }
TEST(a_goodbye_that_cannot_be_answered_is_heard_a_second_later) { goodbye_to_the_deaf(0); }

TEST(the_address_of_a_dead_rank_that_never_talked_is_removed) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, NULL, NULL);
    CHECK(self_of(&e[0])->peers[1].at[0] != FI_ADDR_NOTAVAIL);
    fabric_transport.peer_dead(e[0].self, 1);
    CHECK(self_of(&e[0])->peers[1].at[0] == FI_ADDR_NOTAVAIL);
    world_end(e, 2);
}

/* An injected message fails later: there is a warning, once. */
static struct fi_ops_cq *real_cq;

static ssize_t lost_inject_read(struct fid_cq *cq, void *buf, size_t count) {
    (void)cq, (void)buf, (void)count;
    return -FI_EAVAIL;
}

static ssize_t lost_inject_error(struct fid_cq *cq, struct fi_cq_err_entry *out, uint64_t flags) {
    (void)cq, (void)flags;
    out->err = FI_ECONNRESET;
    out->op_context = NULL;
    return 1;
}

TEST(an_injected_message_that_is_lost_is_told_once) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, NULL, NULL);
    fabric_rail *r = &self_of(&e[0])->rails[0];
    struct fi_ops_cq ops = *(real_cq = r->cq->ops);
    ops.read = lost_inject_read;
    ops.readerr = lost_inject_error;
    r->cq->ops = &ops;
    int before = e[0].warnings;
    CHECK_EQ(fabric_poll_rail(self_of(&e[0]), r), FABRIC_BATCH);
    CHECK_EQ(fabric_poll_rail(self_of(&e[0]), r), FABRIC_BATCH);
    r->cq->ops = real_cq;
    CHECK_EQ(e[0].warnings - before, 1);
    CHECK_STR(e[0].log, "a small message to some rank was lost");
    world_end(e, 2);
}

TEST(peer_dead_gives_everything_back) {
    NEED_LIBFABRIC();
    enum { COUNT = 20 };
    endpoint *e = world_open(3, NULL, NULL);
    letter l[COUNT], last;
    for (int i = 0; i < COUNT; i++) {
        post(&e[0], 1, &l[i], i % 2 ? 300000 : 60000);
    }
    for (int i = 0; i < 50; i++) {
        fabric_transport.progress(e[0].self, 1);
    }
    double start = test_now_s();
    fabric_transport.peer_dead(e[0].self, 1);
    CHECK(test_now_s() - start < 1 * test_slow());
    for (int i = 0; i < COUNT; i++) {
        CHECK_EQ(l[i].returned, l[i].borrowed);
        CHECK(!l[i].borrowed || l[i].status == DDL_ERR_PEER);
        letter_free(&l[i]);
    }
    CHECK_EQ(post(&e[0], 1, &last, 8), DDL_ERR_PEER);
    letter_free(&last);
    CHECK_EQ(e[0].lost[1], 0);
    e[0].sent_number[1] = 0;
    post(&e[0], 2, &last, 100000); /* the others are not touched by it */
    DRIVE(e, 3, e[2].arrived[0] == 1 && last.returned == last.borrowed) {}
    letter_free(&last);
    world_end(e, 3);
}

static void *close_it(void *e) {
    endpoint_close((endpoint *)e);
    return NULL;
}

/* The peer looks later, and has said something itself before: to a connection that is gone, that would end it. */
TEST(words_said_before_close_arrive_before_the_loss) {
    NEED_LIBFABRIC();
    enum { COUNT = FABRIC_WINDOW - 2 };
    endpoint *e = world_open(2, NULL, NULL);
    letter l[COUNT + 1], back[3];
    pthread_t closes;
    post(&e[0], 1, &l[COUNT], 8);
    post(&e[1], 0, &back[0], 8);
    DRIVE(e, 2, e[1].arrived[0] == 1 && e[0].arrived[1] == 1) {}
    for (int i = 0; i < COUNT; i++) {
        post(&e[0], 1, &l[i], 15000);
    }
    double start = test_now_s();
    pthread_create(&closes, NULL, close_it, &e[0]);
    for (int i = 1; i < 3; i++) {
        (void)nanosleep(&(struct timespec){0, 100000000}, NULL);
        post(&e[1], 0, &back[i], 8);
    }
    DRIVE(&e[1], 1, e[1].lost[0] == 1) {}
    pthread_join(closes, NULL);
    CHECK(test_now_s() - start < 5 * test_slow());
    CHECK_EQ(e[1].arrived[0], COUNT + 1);
    CHECK_EQ(e[1].lost_error[0], 0);
    for (int i = 0; i < 3; i++) {
        letter_free(&back[i]);
    }
    for (int i = 0; i <= COUNT; i++) {
        letter_free(&l[i]);
    }
    world_end(e, 2);
}

/* EFA calls abort() over an error of no operation's where no queue of events is bound: one is, and what comes by it is
 * told. Other providers get none. */
TEST(errors_of_no_operation_are_told) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, "FABRIC_FORCE_EVENTS=1", "FABRIC_FORCE_MR=local");
    struct fid_eq *eq = self_of(&e[0])->rails[0].eq;
    struct fi_eq_err_entry wrong = {.err = FI_EIO, .prov_errno = 4711};
    CHECK(eq != NULL);
    exchange_in(e, 2, 1);
    CHECK_EQ(e[0].warnings, 0);
    if (eq != NULL) {
        CHECK_EQ(fi_eq_write(eq, FI_NOTIFY, &wrong, sizeof wrong, (uint64_t)1 << 60 /* UTIL_FLAG_ERROR of ofi_util.h */), sizeof wrong);
    }
    for (int i = 0; i < 4 * FABRIC_EVENT_POLLS && e[0].warnings == 0; i++) {
        fabric_transport.progress(e[0].self, -1);
    }
    CHECK(strstr(e[0].log, "belongs to no message") != NULL && strstr(e[0].log, "4711") != NULL);
    CHECK_EQ(e[0].warnings, 1);
    world_end(e, 2);
    e = world_open(2, "FABRIC_FORCE_MR=local", NULL);
    CHECK(self_of(&e[0])->rails[0].eq == NULL);
    world_end(e, 2);
}

/* Takes what it is given, and never says that it is done. */
static ssize_t lost_read(struct fid_ep *ep, void *buf, size_t len, void *desc, fi_addr_t at, uint64_t address,
                         uint64_t key, void *context) {
    (void)ep, (void)buf, (void)len, (void)desc, (void)at, (void)address, (void)key, (void)context;
    return 0;
}

static ssize_t lost_send(struct fid_ep *ep, const void *buf, size_t len, void *desc, fi_addr_t at, void *context) {
    (void)ep, (void)buf, (void)len, (void)desc, (void)at, (void)context;
    return 0;
}

static int send_buffers(const endpoint *e) {
    int count = 0;
    for (const fabric_slot *slot = self_of(e)->send_free; slot != NULL; slot = slot->next) {
        count++;
    }
    return count;
}

/* EFA drops the completions of what was under way with an address that is removed: a read and sends to a peer that died.
 * The read's memory is registered anew before it goes back, the buffers of the sends are replaced, and the third rank is
 * still reached, both ways. failing: that cannot be registered; then the endpoint ends, with a sentence. */
static void completions_are_dropped(int failing) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(3, "FABRIC_FORCE_MR=local", "FABRIC_FORCE_DROPS=1");
    fabric_self *s = self_of(&e[1]);
    letter l, lost[3], last, back;
    s->inject_bytes = 0;
    hooks.of = s;
    hooks.read = lost_read;
    post(&e[0], 1, &l, 1 << 20);
    DRIVE(e, 3, s->peers[0].link != NULL && s->peers[0].link->reads > 0 && s->peers[0].link->sends == 0) {}
    int before = send_buffers(&e[1]);
    hooks.send = lost_send;
    for (int i = 0; i < 3; i++) {
        post(&e[1], 0, &lost[i], 100);
    }
    CHECK(s->peers[0].link->sends > 0);
    CHECK(send_buffers(&e[1]) < before);
    struct fid_mr *read_by = s->peers[0].link->landing.region->mr[0];
    hooks_end();
    s->fail_registration = failing ? 1 : 0;
    fabric_transport.peer_dead(e[1].self, 0);
    s->fail_registration = 0;
    CHECK(read_by != NULL && e[1].landing[0] == NULL);
    CHECK_EQ(s->failed, failing);
    if (failing) {
        CHECK(strstr(e[1].log, "its memory is not registered anew") != NULL);
    } else {
        CHECK_EQ(send_buffers(&e[1]), before);
        CHECK_EQ(s->peers[0].link->reads + s->peers[0].link->sends, 0);
        post(&e[1], 2, &last, 300000);
        post(&e[2], 1, &back, 300000);
        DRIVE(e, 3, e[2].arrived[1] == 1 && e[1].arrived[2] == 1 && last.returned == 1 && back.returned == 1) {}
        letter_free(&last);
        letter_free(&back);
    }
    fabric_transport.peer_dead(e[0].self, 1);
    for (int i = 0; i < 3; i++) {
        letter_free(&lost[i]);
    }
    letter_free(&l);
    world_end(e, 3);
}

TEST(of_a_peer_that_died_no_completion_comes) { completions_are_dropped(0); }
TEST(of_a_peer_that_died_no_completion_comes_and_nothing_can_be_registered) { completions_are_dropped(1); }

/* A clock that runs by being looked at. */
static uint64_t looked_at_ns;
static uint64_t clock_by_looks(const ddl_host *host) {
    (void)host;
    return looked_at_ns += 100000;
}

/* An adapter's memory is wanted back while the peer has not read it. The wait begins when the word is with the peer, not
 * when the provider has taken it; when it never is, the link ends, and on EFA the key with it. */
static void recall_on_an_adapter(int lost) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, "FABRIC_FORCE_MR=local", "FABRIC_FORCE_DROPS=1");
    fabric_self *s = self_of(&e[0]);
    letter first, l;
    post(&e[0], 1, &first, 8);
    DRIVE(e, 2, e[1].arrived[0] == 1 && s->peers[1].link->sends == 0) {}
    CHECK_EQ(post(&e[0], 1, &l, 1 << 20), DDL_IN_PROGRESS);
    fabric_link *link = s->peers[1].link;
    fabric_offer *o = link->offers;
    uint64_t key = fi_mr_key(o->region->mr[0]);
    hooks.of = s;
    hooks.send = lost ? lost_send : NULL;
    e[0].host.now_ns = clock_by_looks;
    uint64_t start = looked_at_ns;
    fabric_transport.recall(e[0].self, 1, &l.message);
    CHECK(looked_at_ns - start >= (lost ? FABRIC_CUT_NS : FABRIC_WITHDRAW_NS));
    CHECK_EQ(o->withdrawn, lost ? 2 : 3);
    CHECK_EQ(link->broken, lost ? ECANCELED : 0);
    CHECK(o->region->mr[0] != NULL && (fi_mr_key(o->region->mr[0]) != key) == lost);
    CHECK(!s->failed);
    hooks_end();
    fabric_transport.peer_dead(e[0].self, 1);
    fabric_transport.peer_dead(e[1].self, 0);
    free(l.payload);
    letter_free(&first);
    world_end(e, 2);
}

TEST(recall_waits_until_the_word_is_with_the_peer) { recall_on_an_adapter(0); }
TEST(recall_of_what_a_peer_cannot_be_told) { recall_on_an_adapter(1); }

/* ---- who is not of the job ---- */

/* It knows all but the nonce: over connections it is not let in, over adapters not heard. */
static void stranger(int who, const char *setting) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(3, setting, NULL);
    letter l;
    int member = 2 - who;
    fabric_link *link = fabric_link_of(e[who].self, 1);
    const fabric_way *way = &link->way[FABRIC_WORDS];
    self_of(&e[who])->peers[1].token_out ^= 1;
    for (uint8_t kind = 0; kind < 12; kind++) {
        fabric_head head = fabric_head_of(e[who].self, link, kind, 0, 0);
        DRIVE(e, 3, way->failures == FABRIC_CALLS || fabric_put(e[who].self, link, &head, NULL, 0, NULL, 0) == FABRIC_GONE) {}
    }
    CHECK_EQ(way->failures, self_of(&e[who])->connects ? FABRIC_CALLS : 0);
    post(&e[member], 1, &l, 100);
    DRIVE(e, 3, e[1].arrived[member] == 1) {}
    for (int i = 0; i < 100; i++) {
        progress_all(e, 3);
    }
    CHECK_EQ(e[1].arrived[who], 0);
    CHECK_EQ(e[1].lost[who], 0);
    int gives_up = who == 0 && self_of(&e[who])->connects; /* the higher one may be called still */
    DRIVE(e, 3, e[who].lost[1] == gives_up) {
        fabric_head head = fabric_head_of(e[who].self, link, FABRIC_ACK, 0, 0);
        (void)fabric_put(e[who].self, link, &head, NULL, 0, NULL, 0);
    }
    CHECK_EQ(e[who].lost_error[1], gives_up ? ECONNREFUSED : 0);
    CHECK(self_of(&e[1])->peers[who].link == NULL);
    letter_free(&l);
    world_end(e, 3);
}

TEST(a_stranger_is_not_let_in) { stranger(2, NULL); }
TEST(a_stranger_that_gives_up_calling_is_told_so) { stranger(0, NULL); }
TEST(a_stranger_is_not_heard) { stranger(2, "FABRIC_FORCE_MR=local"); }

/* ---- bad input ---- */

static void refused(const char *detail, const char *setting, const char *sentence) {
    NEED_LIBFABRIC();
    endpoint *e = calloc(1, sizeof *e);
    endpoint_prepare(e, 0, detail, setting, NULL);
    CHECK(endpoint_try(e, 2, &fabric_transport) < 0);
    CHECK_STR(e->log, sentence);
    CHECK_EQ(e->blocks, 0);
    free(e);
}

TEST(an_unknown_provider) { refused("nosuch", NULL, "no provider nosuch"); }
TEST(an_interface_that_does_not_exist) { refused("tcp", "FABRIC_INTERFACE=eth77", "there is no interface eth77"); }
TEST(a_subnet_that_is_none) { refused("tcp", "FABRIC_SUBNET=10.0.0.0", "as 10.1.0.0/16"); }
TEST(a_subnet_without_adapters) { refused("tcp", "FABRIC_SUBNET=203.0.113.0/24", "it is not in DDL_FABRIC_SUBNET"); }
TEST(a_domain_that_does_not_exist) { refused("tcp", "FABRIC_DOMAIN=mlx5_9", "DDL_FABRIC_DOMAIN names another"); }
TEST(a_number_that_is_none) { refused("tcp", "FABRIC_RAILS=two", "DDL_FABRIC_RAILS is \"two\""); }
TEST(hardware_that_is_not_here) { refused("efa", NULL, "no provider efa"); }

/* Rank 0 says by DDL_ADVERTISE that its own address leads nowhere from outside: it is met inside its host alone, and both know. */
TEST(an_advertised_address_is_not_of_libfabric) {
    NEED_LIBFABRIC();
    endpoint *e = calloc(RANKS, sizeof *e);
    uint64_t latency, bandwidth;
    for (int i = 0; i < 2; i++) {
        endpoint_prepare(&e[i], i, "tcp", NULL, NULL);
        e[i].local_ranks = 1;
        e[i].advertise = i == 0 ? "203.0.113.7" : NULL;
        CHECK_EQ(endpoint_try(&e[i], 2, &fabric_transport), DDL_OK);
    }
    CHECK_STR(e[0].log, "DDL_ADVERTISE is set, and libfabric tells peers the interface's own address: TCP is used between this host and others");
    CHECK(strstr(e[1].log, "DDL_ADVERTISE") == NULL);
    for (int i = 0; i < 2; i++) {
        const fabric_address *other = &self_of(&e[!i])->address;
        CHECK_EQ(fabric_transport.add_peer(e[i].self, !i, other, sizeof *other, "there", &latency, &bandwidth), DDL_ERR_UNSUPPORTED);
        meet(&e[i], !i, other);
    }
    CHECK_STR(e[1].log, "rank 0 has DDL_ADVERTISE set");
    exchange_in(e, 2, 1); /* within the host */
    world_end(e, 2);
}

/* A peer whose address differs in the fields that are not 0 here: the sentence says in which, and what to do. */
static void differ_in(endpoint *e, const fabric_address *by, const char *sentence) {
    fabric_address other = self_of(&e[1])->address;
    uint64_t latency, bandwidth;
    other.version = (uint8_t)(other.version ^ by->version);
    other.rails = (uint8_t)(other.rails + by->rails);
    other.name_bytes = (uint8_t)(other.name_bytes + by->name_bytes);
    other.has_rma ^= by->has_rma;
    other.protocol += by->protocol;
    other.slot_bytes += by->slot_bytes;
    other.part_bytes += by->part_bytes;
    e[0].log[0] = 0;
    self_of(&e[0])->told_unequal = 0;
    CHECK_EQ(fabric_transport.add_peer(e[0].self, 1, &other, sizeof other, "here", &latency, &bandwidth), DDL_ERR_UNSUPPORTED);
    CHECK_STR(e[0].log, sentence);
}

TEST(ranks_that_see_different_providers_are_told) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, NULL, NULL);
    fabric_address other = self_of(&e[1])->address;
    uint64_t latency, bandwidth;
    snprintf(other.provider, sizeof other.provider, "verbs;ofi_rxm");
    CHECK_EQ(fabric_transport.add_peer(e[0].self, 1, &other, sizeof other, "here", &latency, &bandwidth),
             DDL_ERR_UNSUPPORTED);
    CHECK_STR(e[0].log, "rank 1 uses verbs;ofi_rxm");
    CHECK_STR(e[0].log, "set DDL_TRANSPORTS or DDL_FABRIC_PROVIDER to what all have");
    snprintf(other.provider, sizeof other.provider, "\33[2Jtcp\n"); /* a terminal is not to be told what to do */
    e[0].log[0] = 0;
    self_of(&e[0])->told_unequal = 0;
    CHECK_EQ(fabric_transport.add_peer(e[0].self, 1, &other, sizeof other, "here", &latency, &bandwidth),
             DDL_ERR_UNSUPPORTED);
    CHECK_STR(e[0].log, "rank 1 uses ?[2Jtcp? (");
    differ_in(e, &(fabric_address){.rails = 1}, "set DDL_FABRIC_RAILS to the number that all have");
    differ_in(e, &(fabric_address){.name_bytes = 12}, "DDL_FABRIC_SUBNET chooses one");
    differ_in(e, &(fabric_address){.has_rma = 1}, "only one of them reads");
    differ_in(e, &(fabric_address){.version = 1}, "give all the same version of this plugin");
    differ_in(e, &(fabric_address){.protocol = 1}, "give all the same libfabric and kind of adapter");
    differ_in(e, &(fabric_address){.slot_bytes = 16}, "their messages differ in size");
    differ_in(e, &(fabric_address){.part_bytes = 4096}, "they cut payloads into parts that differ in size");
    other = self_of(&e[1])->address;
    CHECK_EQ(fabric_transport.add_peer(e[0].self, 1, &other, sizeof other, "there", &latency, &bandwidth),
             DDL_ERR_UNSUPPORTED); /* without a secret, and at a loopback address */
    CHECK_EQ(fabric_transport.add_peer(e[0].self, 1, &other, 7, "here", &latency, &bandwidth), DDL_ERR_ARG);
    world_end(e, 2);
}

/* Over connections both sides cut a payload into parts by themselves. */
TEST(ranks_that_cut_payloads_differently_are_told) {
    NEED_LIBFABRIC();
    endpoint *e = calloc(RANKS, sizeof *e);
    uint64_t latency, bandwidth;
    for (int i = 0; i < 2; i++) {
        endpoint_prepare(&e[i], i, "tcp", i == 0 ? NULL : "FABRIC_FORCE_MAX_MESSAGE=1M", NULL);
        CHECK_EQ(endpoint_try(&e[i], 2, &fabric_transport), DDL_OK);
    }
    for (int i = 0; i < 2; i++) {
        const fabric_address *other = &self_of(&e[!i])->address;
        CHECK_EQ(fabric_transport.add_peer(e[i].self, !i, other, sizeof *other, "here", &latency, &bandwidth), DDL_ERR_UNSUPPORTED);
        CHECK_STR(e[i].log, "they cut payloads into parts that differ in size");
    }
    CHECK_STR(e[0].log, "parts of 1048576,");
    CHECK_STR(e[0].log, "parts of 16777216,");
    world_end(e, 2);
}

TEST(a_lack_of_memory_leaves_nothing_behind) {
    NEED_LIBFABRIC();
    int failures = 0;
    ddl_status status = DDL_ERR_NOMEM;
    for (int i = 1; i < 100 && status != DDL_OK; i++) {
        endpoint *e = calloc(1, sizeof *e);
        endpoint_prepare(e, 0, "tcp", NULL, NULL);
        e->fail_alloc = i;
        status = endpoint_try(e, 2, &fabric_transport);
        failures += status < 0;
        CHECK(status == DDL_OK || status == DDL_ERR_NOMEM);
        endpoint_close(e);
        free(e);
    }
    CHECK(failures >= 8);
}

/* The handlers that libraries behind libfabric install are not ours to leave. */
TEST(no_signal_handler_stays) {
    struct sigaction before[FABRIC_SIGNALS], now;
    fabric_signals_save(before);
    NEED_LIBFABRIC();
    for (int i = 0; i < FABRIC_SIGNALS; i++) {
        sigaction(fabric_signals[i], NULL, &now);
        CHECK(now.sa_sigaction == before[i].sa_sigaction);
    }
}

/* Behind the heads of ofi_rxm's messages, of 24 bytes, and of tcp's own, of 16, at the start of a page. */
static size_t slots_that_stumble(const fabric_slot *list) {
    size_t count = 0;
    for (; list != NULL; list = list->next) {
        CHECK(list->bytes != NULL);
        count += (24 - (uintptr_t)list->bytes) % 4096 - 1 < 31 || (16 - (uintptr_t)list->bytes) % 4096 - 1 < 31;
    }
    return count;
}

TEST(buffers_lie_where_a_quiet_connection_copies_fast) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, NULL, NULL);
    fabric_self *s = self_of(&e[0]);
    fabric_slot *many = NULL;
    for (int i = 0; i < 64; i++) { /* from the heap: each begins at another place of a page */
        CHECK_EQ(fabric_block_make(s, 3, 5000 + 16 * (size_t)i, FABRIC_SEND, &many), DDL_OK);
    }
    REQUIRE(s->send_free != NULL);
    CHECK_EQ(slots_that_stumble(s->send_free), 0);
    CHECK_EQ(slots_that_stumble(many), 0);
    world_end(e, 2);
}

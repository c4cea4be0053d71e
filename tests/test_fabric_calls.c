/* The libfabric plugin while the n-th call of each function of libfabric fails: there is a sentence, or nothing is lost; what
 * was posted comes back, what was opened is closed, and nobody writes where nothing is to be written any more.
 * tests/run: variants=gcc,asan timeout=150 quick=yes */
#include "ranks.h"

#include "fabric_faults.h"

#include "fabric_host.h"

/* What the core does: whoever is lost to one is dead for all, and the transport that failed is closed. */
static int part_of_the_lost(endpoint *e, int n) {
    int parted = 0;
    for (int i = 0; i < n * n; i++) {
        endpoint *a = &e[i / n], *b = &e[i % n];
        if (a->lost[i % n] > 0 || (a->self != NULL && a->failed)) {
            parted = 1;
            fabric_transport.peer_dead(a->self, i % n);
            fabric_transport.peer_dead(b->self, i / n);
        }
    }
    return parted;
}

/* Two ranks say what they have to say, small and large, while one call fails. All that is posted comes back; it arrives,
 * or its link is lost with a sentence (mini_lost looks for one). */
static void disturbed_exchange(endpoint *e) {
    letter l[2][SIZES];
    double until = test_now_s() + 20 * test_slow();
    int over = 0;
    for (int i = 0; i < 2 * SIZES; i++) {
        ddl_status status = post(&e[i / SIZES], !(i / SIZES), &l[i / SIZES][i % SIZES], sizes[i % SIZES]);
        CHECK(status == DDL_OK || status == DDL_IN_PROGRESS || status == DDL_ERR_PEER || status == DDL_ERR_NOMEM);
    }
    while (!over && test_now_s() < until) {
        for (int i = 0; i < 2; i++) {
            e[i].failed |= fabric_transport.progress(e[i].self, -1) < 0;
        }
        over = part_of_the_lost(e, 2) || (all_arrived(e, 2) == 2 * SIZES && all_returned(l[0], 2 * SIZES));
        sleep_all(e, 2, 1);
    }
    CHECK(over);
    for (int i = 0; i < 2 * FABRIC_EVENT_POLLS; i++) { /* the queue of events is looked at */
        (void)fabric_transport.progress(e[i % 2].self, -1);
    }
    for (int i = 0; i < 2 * SIZES; i++) {
        letter_free(&l[i / SIZES][i % SIZES]);
    }
}

/* adapter: reads as from an adapter, else as over sockets. Returns whether the call was reached at all. */
static int disturbed_world(int which, int at, int code, int adapter) {
    endpoint *e = calloc(RANKS, sizeof *e);
    memset(&call_faults, 0, sizeof call_faults);
    call_faults.which = which;
    call_faults.at = at;
    call_faults.code = code;
    int opened = 0, met = 1;
    for (int i = 0; i < 2; i++) {
        endpoint_prepare(&e[i], i, world_detail, adapter ? "FABRIC_FORCE_MR=local" : NULL, "FABRIC_FORCE_EVENTS=1");
        ddl_status status = endpoint_try(&e[i], 2, &fabric_transport);
        opened += status == DDL_OK;
        CHECK(status == DDL_OK || status == DDL_ERR_NOMEM || e[i].log[0] != 0);
    }
    for (int i = 0; i < 2 && opened == 2; i++) {
        uint64_t latency, bandwidth;
        met &= fabric_transport.add_peer(e[i].self, !i, &self_of(&e[!i])->address, sizeof(fabric_address), "here", &latency,
                                         &bandwidth) == DDL_OK;
    }
    if (opened == 2 && met) {
        disturbed_exchange(e);
        fabric_transport.peer_dead(e[0].self, 1);
        fabric_transport.peer_dead(e[1].self, 0);
    } else {
        CHECK(which == CALL_DUPINFO || strstr(e[0].log, "fabric: ") != NULL || strstr(e[1].log, "fabric: ") != NULL);
    }
    endpoint_close(&e[0]);
    endpoint_close(&e[1]);
    /* All that was opened was closed, but for an endpoint that libfabric cannot close (fabric_rail_open), and what holds it. */
    CHECK(call_faults.objects == 0 || (adapter && which == CALL_EP_BIND && at % 3 == 1)); /* addresses, events, completions */
    free(e);
    int reached = call_faults.calls[which] >= at;
    memset(&call_faults, 0, sizeof call_faults);
    return reached;
}

void __lsan_disable(void) __attribute__((weak)); /* NULL where there is no sanitizer */
void __lsan_enable(void) __attribute__((weak));

/* What libfabric 1.17 itself loses, when an endpoint is closed while it connects, is no leak of ours: ours are counted. */
TEST(the_nth_call_of_each_function_fails) {
    NEED_LIBFABRIC();
    if (__lsan_disable) {
        __lsan_disable();
    }
    static const int codes[] = {-FI_EIO, -FI_ENOMEM, -FI_EAGAIN};
    int failed = 0;
    for (int which = 0; which < CALLS; which++) {
        int reached = 0;
        for (int adapter = 1; adapter >= 0; adapter--) {
            for (int at = 1, there = 1; there && at <= 16; at += at < 4 ? 1 : at) {
                int before = test__now->failures;
                there = disturbed_world(which, at, codes[at % 3], adapter);
                reached += there;
                if (test__now->failures > before) {
                    fprintf(stderr, "      when call %d of %s fails with %d%s\n", at, call_names[which], codes[at % 3],
                            adapter ? ", as from an adapter" : "");
                }
            }
        }
        failed += reached;
        if (reached == 0 && which != CALL_CQ_READERR && which != CALL_REJECT) { /* those are called when something has failed */
            test__fail(__FILE__, __LINE__, "%s was never called", call_names[which]);
        }
    }
    if (__lsan_enable) {
        __lsan_enable();
    }
    CHECK(failed > 100);
    printf("     %d calls failed\n", failed);
}

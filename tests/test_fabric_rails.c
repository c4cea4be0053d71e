/* The libfabric plugin with two rails: a payload of many parts goes over both alike, though each read ends by itself.
 * tests/run: variants=gcc,asan,valgrind timeout=60 quick=yes */
#include "fabric_host.h"

/* Which rail each part of a payload is asked of. The second rail is the first one once more, with its key. */
enum { RAIL_PART = 64 << 10, RAIL_PARTS = 16 };
static int rail_reads[2], rail_wrong;
static uint64_t rail_from, rail_key;

static ssize_t rail_read(struct fid_ep *ep, void *buf, size_t len, void *desc, fi_addr_t at, uint64_t address,
                         uint64_t key, void *context) {
    int rail = ((fabric_slot *)((char *)context - offsetof(fabric_slot, context)))->rail;
    if (rail_reads[0] + rail_reads[1] == 0) {
        rail_from = address;
        rail_key = key;
    }
    ssize_t result = real_read(ep, buf, len, desc, at, address, rail_key, context);
    if (result == 0) {
        rail_reads[rail]++;
        rail_wrong += (uint64_t)rail != (address - rail_from) / RAIL_PART % 2;
    }
    return result;
}

/* Each read ends by itself, as where rails are not equally fast. */
static struct fi_ops_cq *real_cq;
static int cq_turn;

static ssize_t one_completion(struct fid_cq *cq, void *buf, size_t count) {
    if (count == 0) { /* libfabric looks itself */
        return real_cq->read(cq, buf, 0);
    }
    return ++cq_turn % 2 == 0 ? -FI_EAGAIN : real_cq->read(cq, buf, 1);
}

TEST(all_parts_of_a_payload_take_turns_on_two_rails) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(2, "FABRIC_FORCE_MR=local", NULL);
    fabric_self *reader = self_of(&e[1]);
    letter first, l;
    post(&e[0], 1, &first, 8);
    DRIVE(e, 2, e[1].arrived[0] == 1) {}
    fabric_rail *r = &reader->rails[0];
    rail_reads[0] = rail_reads[1] = rail_wrong = 0;
    hooks.read = rail_read;
    struct fi_ops_cq cq = *(real_cq = r->cq->ops);
    cq.read = one_completion;
    cq_turn = 0;
    r->cq->ops = &cq;
    reader->max_read = RAIL_PART;
    reader->rails[1] = reader->rails[0];
    reader->peers[0].at[1] = reader->peers[0].at[0];
    reader->rail_count = 2;
    CHECK_EQ(post(&e[0], 1, &l, RAIL_PARTS * RAIL_PART), DDL_IN_PROGRESS);
    DRIVE(e, 2, e[1].arrived[0] == 2 && l.returned == 1) {}
    CHECK_EQ(rail_reads[0], RAIL_PARTS / 2);
    CHECK_EQ(rail_reads[1], RAIL_PARTS / 2);
    CHECK_EQ(rail_wrong, 0);
    reader->rail_count = 1;
    r->cq->ops = real_cq;
    hooks_end();
    letter_free(&first);
    letter_free(&l);
    world_close(e, 2);
    free(e);
}

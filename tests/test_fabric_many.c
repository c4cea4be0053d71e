/* The libfabric plugin with many ranks, over the tcp provider on loopback: in a ring connections are made to neighbours only,
 * and memory is what docs/operations.md says; then all talk to all, each with more under way than its first credit.
 * tests/run: variants=gcc timeout=60 */
#define MINI_RANKS 12

#include "fabric_host.h"

enum { LETTERS = 6 };
static const uint64_t lengths[LETTERS] = {100, 20000, 0, 100000, 7, 40000};

/* Buffers that a rank has taken. */
static uint64_t buffer_bytes(const endpoint *e) {
    uint64_t bytes = 0;
    for (const fabric_block *b = self_of(e)->blocks; b != NULL; b = b->next) {
        bytes += b->memory_bytes;
    }
    return bytes;
}

static int link_count(const endpoint *e) {
    int count = 0;
    for (const fabric_link *l = self_of(e)->links; l != NULL; l = l->next) {
        count++;
    }
    return count;
}

/* Over sockets 2 MiB for sending, 1 MiB for first messages; 643 KiB for each peer; and the heads of 96 messages and the starts of two
 * blocks. */
static uint64_t stated_bytes(uint64_t peers) { return (3085 + 643 * peers) << 10; }

TEST(twelve_ranks_in_a_ring_and_all_to_all) {
    NEED_LIBFABRIC();
    endpoint *e = world_open(RANKS, NULL, NULL);
    letter *ring = calloc(RANKS * LETTERS, sizeof *ring), *all = calloc(RANKS * RANKS * LETTERS, sizeof *all);
    uint64_t empty = buffer_bytes(&e[3]);
    int fds = fd_count();
    CHECK(empty > 0 && empty <= stated_bytes(0));
    for (int i = 0; i < RANKS * LETTERS; i++) {
        CHECK(post(&e[i / LETTERS], (i / LETTERS + 1) % RANKS, &ring[i], lengths[i % LETTERS]) >= 0);
    }
    DRIVE(e, RANKS, all_arrived(e, RANKS) == RANKS * LETTERS && all_returned(ring, RANKS * LETTERS)) {}
    for (int i = 0; i < RANKS; i++) {
        CHECK_EQ(link_count(&e[i]), 2);
        CHECK(buffer_bytes(&e[i]) > empty && buffer_bytes(&e[i]) <= stated_bytes(2));
    }
    int between = fd_count() - fds;
    CHECK(between >= 2 * RANKS && between < 6 * RANKS); /* both ends of a connection are here; all to all has 33 of a rank */
    int count = 0;
    for (int i = 0; i < RANKS * RANKS * LETTERS; i++) {
        int from = i / LETTERS / RANKS, to = i / LETTERS % RANKS;
        if (from != to) {
            CHECK(post(&e[from], to, &all[count++], lengths[(i + to) % LETTERS]) >= 0);
        }
    }
    uint64_t due = (uint64_t)(RANKS * LETTERS + count);
    DRIVE(e, RANKS, all_arrived(e, RANKS) == due && all_returned(all, count)) {}
    for (int i = 0; i < RANKS; i++) {
        CHECK_EQ(link_count(&e[i]), RANKS - 1);
        CHECK(buffer_bytes(&e[i]) <= stated_bytes(RANKS - 1));
        CHECK_EQ(e[i].lost[(i + 1) % RANKS], 0);
    }
    for (int i = 0; i < RANKS * LETTERS; i++) {
        letter_free(&ring[i]);
    }
    for (int i = 0; i < count; i++) {
        letter_free(&all[i]);
    }
    free(ring);
    free(all);
    world_close(e, RANKS); /* all bytes were right, all memory came back */
    free(e);
}

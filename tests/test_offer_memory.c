/* A message that is too long to be sent at once, and no memory to offer it or to ask for it: an error at once.
 * tests/run: variants=asan timeout=60 */
#define DDL_IMPLEMENTATION
#include "world.h"

enum { BYTES = 100 * 1024 };

static _Atomic int empty; /* the next call finds no memory */

static void *take(void *user, size_t bytes) {
    (void)user;
    if (empty) {
        empty = 0;
        return NULL;
    }
    return malloc(bytes);
}

static void give(void *user, void *memory) {
    (void)user;
    free(memory);
}

/* A rendezvous whose offer cannot be sent ends at once, and not by its deadline. */
static void unable(ddl_group *w, void *arg) {
    (void)arg;
    unsigned char *at = calloc(1, BYTES);
    ddl_request *r = NULL;
    int32_t value = 0;
    if (ddl_rank(w) == 0) {
        OK(ddl_send(w, DDL_VIEW(&value, 1), 1, 0)); /* connects */
        OK(ddl_recv(w, DDL_VIEW(&value, 1), 1, 0, NULL));
        ddl_context *c = ddl_group_context(w);
        ddl__note *spare = c->notes;
        c->notes = NULL;
        empty = 1;
        OK(ddl_isend(w, world_bytes(at, BYTES), 1, 1, &r));
        double start = test_now_s();
        ddl_status status = ddl_wait(&r, NULL);
        c->notes = spare;
        CHECK_EQ((int)status, (int)DDL_ERR_NOMEM);
        CHECK_STR(ddl_error(c), "no memory to offer");
        CHECK(test_now_s() - start < 2 * test_slow());
        OK(ddl_send(w, DDL_VIEW(&value, 1), 1, 2));
    } else {
        OK(ddl_recv(w, DDL_VIEW(&value, 1), 0, 0, NULL));
        OK(ddl_send(w, DDL_VIEW(&value, 1), 0, 0));
        OK(ddl_recv(w, DDL_VIEW(&value, 1), 0, 2, NULL));
    }
    free(at);
}

TEST(an_offer_without_memory_is_an_error) {
    ddl_config config = {.allocator = {take, give, NULL}};
    world_config = &config;
    world_fork(2, unable, NULL, 30);
    world_config = NULL;
}

/* The control message of the next call finds no memory. Spare ones are kept away from it; the caller gives them back. */
static ddl__note *no_notes(ddl_context *c) {
    ddl__note *spare = c->notes;
    c->notes = NULL;
    empty = 1;
    return spare;
}

static void notes_back(ddl_context *c, ddl__note *spare) {
    CHECK_EQ(empty, 0); /* it was asked for */
    while (spare != NULL) {
        ddl__note *n = spare;
        spare = n->next;
        n->next = c->notes;
        c->notes = n;
    }
}

static void check_refused(ddl_group *w, ddl_status status, const unsigned char *in, double start) {
    CHECK_EQ((int)status, (int)DDL_ERR_NOMEM);
    CHECK_STR(ddl_error(ddl_group_context(w)), "receive from rank 1");
    CHECK_STR(ddl_error(ddl_group_context(w)), "no memory to ask for the data; the message stays");
    CHECK(test_now_s() - start < 2 * test_slow());
    CHECK(in[0] == 0 && in[BYTES - 1] == 0);
}

/* An offer that cannot be accepted: the receive ends at once, the message stays, and the next receive gets it. Once the
 * offer is there when the receive begins, once the receive waits for it. */
static void unaccepted(ddl_group *w, void *arg) {
    (void)arg;
    ddl_context *c = ddl_group_context(w);
    unsigned char *at = calloc(1, BYTES);
    int32_t value = 0;
    ddl_info info;
    if (ddl_rank(w) == 1) {
        world_fill(at, 1, 5, BYTES);
        OK(ddl_send(w, world_bytes(at, BYTES), 0, 1)); /* connects, and fills what is kept for the next time */
        for (int round = 0; round < 2; round++) {
            OK(ddl_recv(w, DDL_VIEW(&value, 1), 0, 0, NULL));
            OK(ddl_send(w, world_bytes(at, BYTES), 0, 5));
        }
    } else {
        OK(ddl_recv(w, world_bytes(at, BYTES), 1, 1, NULL));
        for (int round = 0; round < 2; round++) {
            memset(at, 0, BYTES);
            double start = test_now_s();
            ddl_request *r = NULL;
            if (round == 1) {
                OK(ddl_irecv(w, world_bytes(at, BYTES), 1, 5, &r));
            }
            OK(ddl_send(w, DDL_VIEW(&value, 1), 1, 0));
            if (round == 0) {
                OK(ddl_probe(w, 1, 5, &info));
                CHECK_EQ(info.count, BYTES);
            }
            ddl__note *spare = no_notes(c);
            ddl_status status = round == 0 ? ddl_recv(w, world_bytes(at, BYTES), 1, 5, NULL) : ddl_wait(&r, NULL);
            notes_back(c, spare);
            check_refused(w, status, at, start);
            OK(ddl_recv(w, world_bytes(at, BYTES), 1, 5, NULL));
            CHECK_EQ(world_wrong(at, 1, 5, BYTES), 0);
        }
    }
    free(at);
}

TEST(an_offer_that_cannot_be_accepted_stays) {
    ddl_config config = {.allocator = {take, give, NULL}};
    world_config = &config;
    world_fork(2, unaccepted, NULL, 30);
    world_config = NULL;
}

/* A short message over a transport that takes no memory of the caller's, and none for a copy: an error, the receiver's
 * window and what is owed to it are as they were, and the next message goes. */
static void uncopied(ddl_group *w, void *arg) {
    (void)arg;
    ddl_context *c = ddl_group_context(w);
    int32_t value = 0;
    if (ddl_rank(w) == 1) {
        for (int i = 0; i < 3; i++) {
            OK(ddl_recv(w, DDL_VIEW(&value, 1), 0, 0, NULL));
            CHECK_EQ(value, i);
            OK(ddl_send(w, DDL_VIEW(&value, 1), 0, 0));
        }
        return;
    }
    OK(ddl_send(w, DDL_VIEW(&value, 1), 1, 0)); /* connects */
    OK(ddl_recv(w, DDL_VIEW(&value, 1), 1, 0, NULL));
    ddl__endpoint *e = c->links[1].endpoint;
    const ddl_transport *table = e->table;
    ddl_transport copies = *table;
    copies.recall = NULL;
    e->table = &copies;
    for (value = 1; value < 3; value++) {
        ddl_request *r = NULL;
        uint32_t used = w->flows[1].p2p_out, owed = w->flows[1].p2p_in;
        CHECK(owed > 0); /* for what was received: it rides along with what is sent */
        ddl__note *spare = no_notes(c);
        ddl_status status = value == 1 ? ddl_send(w, DDL_VIEW(&value, 1), 1, 0)
                                       : ddl_isend(w, DDL_VIEW(&value, 1), 1, 0, &r);
        status = value == 1 ? status : ddl_wait(&r, NULL);
        notes_back(c, spare);
        CHECK_EQ((int)status, (int)DDL_ERR_NOMEM);
        CHECK_STR(ddl_error(c), "to rank 1 of group \"world\" (tag 0): no memory to send it");
        CHECK_EQ(w->flows[1].p2p_out, used);
        CHECK_EQ(w->flows[1].p2p_in, owed);
        OK(ddl_send(w, DDL_VIEW(&value, 1), 1, 0));
        OK(ddl_recv(w, DDL_VIEW(&value, 1), 1, 0, NULL));
    }
    e->table = table;
}

TEST(a_short_message_without_memory_is_an_error) {
    ddl_config config = {.allocator = {take, give, NULL}};
    world_config = &config;
    world_fork(2, uncopied, NULL, 30);
    world_config = NULL;
}

/* A message that nobody has asked for yet, and no memory to keep it: its sender is cut off, and that is said. */
static void unkept(ddl_group *w, void *arg) {
    (void)arg;
    static unsigned char at[60000];
    int32_t value = 0;
    if (ddl_rank(w) == 1) {
        OK(ddl_recv(w, DDL_VIEW(&value, 1), 0, 0, NULL));
        ddl_status sent = ddl_send(w, world_bytes(at, sizeof at), 0, 5); /* the link may end meanwhile */
        CHECK(sent == DDL_OK || sent == DDL_ERR_PEER);
        CHECK(ddl_recv(w, DDL_VIEW(&value, 1), 0, 6, NULL) < 0);
    } else {
        OK(ddl_send(w, DDL_VIEW(&value, 1), 1, 0));
        empty = 1;
        CHECK_EQ((int)ddl_recv(w, DDL_VIEW(&value, 1), 1, 7, NULL), (int)DDL_ERR_PEER);
        CHECK_EQ(empty, 0); /* it was asked for */
        CHECK_STR(ddl_error(ddl_group_context(w)), "a receiver had no memory for its messages");
    }
}

TEST(an_early_message_without_memory_is_not_called_damaged) {
    ddl_config config = {.allocator = {take, give, NULL}};
    world_config = &config;
    world_fork(2, unkept, NULL, 30);
    world_config = NULL;
}

/* The agreement of ddl_agree and ddl_group_shrink as a model: its own code over a network of queues, in random schedules.
 * Ranks enter late, messages of a pair keep their order and no other, ranks die between any two sends, and each survivor
 * learns of a death at its own time, losing what the dead had still on its way. All who decide decide the same, the
 * living all decide, and the value is right. What kills of processes hit once in thousands, this hits in every run.
 * tests/run: variants=asan timeout=90 */
#define TEST_TIMEOUT_S 3000
#define DDL_IMPLEMENTATION
#include "faults.h"

enum { MOST = 5, QUEUE = 64, MANY = 10000 };

typedef struct packet {
    ddl__frame frame;
    uint8_t payload[DDL__AGREE_FIXED_BYTES + MANY / 8];
} packet;

typedef struct node {
    ddl_context context;
    ddl__groups groups;
    ddl__link *links;
    ddl__endpoint endpoint;
    ddl_group *group;
    ddl__agreement *agreement;
    int entered, dead, sends_left; /* sends_left: it dies when it has sent so many more; -1: not planned */
} node;

typedef struct queue {
    packet packets[QUEUE];
    int first, count;
} queue;

static node nodes[MOST];
static queue queues[MOST][MOST]; /* from, to */
static int size, world; /* of a larger world, all beyond size have been dead for long */

static ddl_status model_send(void *self, int32_t peer, ddl_message *m) {
    node *n = (node *)self;
    queue *q = &queues[n->context.rank][peer];
    if (n->sends_left == 0) {
        n->dead = 1;
    }
    if (n->dead || nodes[peer].dead || q->count == QUEUE) {
        CHECK(q->count < QUEUE);
        return DDL_OK;
    }
    n->sends_left -= n->sends_left > 0;
    packet *p = &q->packets[(q->first + q->count++) % QUEUE];
    CHECK_EQ(ddl__frame_read(m->header, &p->frame), DDL_OK);
    CHECK(m->payload_bytes <= sizeof p->payload);
    memcpy(p->payload, m->payload, m->payload_bytes);
    return DDL_OK;
}

static const ddl_transport model_transport = {.size = sizeof(ddl_transport), .send = model_send};

static void node_open(int rank) {
    node *n = &nodes[rank];
    static int32_t ranks[MANY];
    memset(n, 0, sizeof *n);
    n->links = (ddl__link *)calloc((size_t)world, sizeof *n->links);
    n->context.rank = rank;
    n->context.world_size = world;
    n->context.base.rank = -1;
    n->context.wake_fd = n->context.epoll_fd = -1;
    n->context.groups = &n->groups;
    n->context.links = n->links;
    n->endpoint.table = &model_transport;
    n->endpoint.self = n;
    n->sends_left = -1;
    for (int i = 0; i < world; i++) {
        ranks[i] = i;
        n->links[i].endpoint = i == rank ? NULL : &n->endpoint;
        n->links[i].pidfd = -1;
        n->links[i].life = i < size ? DDL__ALIVE : DDL__DEAD;
    }
    n->group = ddl__group_new(&n->context, ranks, world, 0, 0, "world");
}

static void node_close(node *n) {
    ddl__agree_group_free(n->group);
    ddl__group_release(n->group);
    ddl__free(&n->context.base, n->group);
    ddl__scratch_free_all(&n->context);
    free(n->links);
    while (n->context.notes != NULL) {
        ddl__note *note = n->context.notes;
        n->context.notes = note->next;
        ddl__free(&n->context.base, note);
    }
    CHECK_EQ(n->context.base.memory, 0);
}

static uint32_t vote(int rank) { return ~(1u << rank); }

/* What ddl_agree does before and while it waits. */
static void node_step(node *n) {
    if (!n->entered) {
        n->entered = 1;
        n->agreement = ddl__agreement_get(n->group, 1);
        n->agreement->mine.purpose = DDL__AGREE_FLAG;
        n->agreement->mine.flag = vote(n->context.rank);
        for (int i = 0; i < world; i++) {
            if (ddl__is_gone(n->group, i)) {
                ddl__bit_set(n->agreement->mine.gone, i);
            }
        }
    }
    if (!n->agreement->decided) {
        ddl__agree_step(n->group, n->agreement);
    }
}

static void deliver(int from, int to) {
    queue *q = &queues[from][to];
    packet p = q->packets[q->first];
    q->first = (q->first + 1) % QUEUE;
    q->count--;
    CHECK_EQ(ddl__on_agree(&nodes[to].context, from, &p.frame, p.payload), DDL_OK);
}

static void learn(int who, int of) {
    nodes[who].links[of].life = DDL__DEAD;
    queues[of][who].count = 0;
}

/* One random event. Returns 0 when the drawn one is not possible now. */
static int event(uint64_t *random, int *deaths_left) {
    int a = (int)(fault_random(random) % (uint64_t)size), b = (int)(fault_random(random) % (uint64_t)size);
    switch (fault_random(random) % 8) {
    case 0: /* a death is planned, a few sends from now: in the middle of telling all, perhaps */
        if (*deaths_left == 0 || nodes[a].sends_left >= 0) {
            return 0;
        }
        (*deaths_left)--;
        nodes[a].sends_left = (int)(fault_random(random) % 6);
        return 1;
    case 1:
    case 2:
        if (a == b || nodes[a].dead || !nodes[b].dead || nodes[a].links[b].life == DDL__DEAD) {
            return 0;
        }
        learn(a, b);
        return 1;
    case 3:
    case 4:
        if (nodes[a].dead) {
            return 0;
        }
        node_step(&nodes[a]);
        return 1;
    default:
        if (nodes[b].dead || queues[a][b].count == 0) {
            return 0;
        }
        deliver(a, b);
        return 1;
    }
}

/* All deaths are known, all messages arrive, all step: the living must decide now. */
static void settle(void) {
    for (int round = 0; round < 200; round++) {
        for (int a = 0; a < size; a++) {
            for (int b = 0; b < size; b++) {
                while (!nodes[b].dead && queues[a][b].count > 0) {
                    deliver(a, b);
                }
                if (a != b && !nodes[a].dead && nodes[b].dead) {
                    learn(a, b);
                }
            }
            if (!nodes[a].dead) {
                node_step(&nodes[a]);
            }
        }
    }
}

static void judge(void) {
    const ddl__agreement *first = NULL;
    uint32_t all = UINT32_MAX, living = UINT32_MAX;
    for (int i = 0; i < size; i++) {
        const ddl__agreement *a = nodes[i].agreement;
        all &= vote(i);
        living &= nodes[i].dead ? UINT32_MAX : vote(i);
        if (!nodes[i].dead) {
            CHECK(a != NULL && a->decided);
        }
        if (a != NULL && a->decided) {
            first = first == NULL ? a : first;
            CHECK_EQ(a->value.flag, first->value.flag);
            CHECK_EQ(memcmp(a->value.gone, first->value.gone, ddl__agree_bytes(nodes[i].group)), 0);
            CHECK(world == size || ddl__bit(a->value.gone, world - 1));
            CHECK_EQ(a->value.verdict, DDL_OK);
            CHECK(nodes[i].dead || !ddl__bit(a->value.gone, i));
        }
    }
    if (first != NULL) {
        CHECK_EQ(first->value.flag & all, all);
        CHECK_EQ(first->value.flag | living, living);
    }
}

static void queues_empty(void) {
    for (int a = 0; a < MOST; a++) {
        for (int b = 0; b < MOST; b++) {
            queues[a][b].first = queues[a][b].count = 0;
        }
    }
}

/* ranks 0: as many as there are nodes. */
static void schedules(uint64_t random, int runs, int ranks) {
    for (int i = 0; i < runs && test__now->failures == 0; i++) {
        uint64_t before = random;
        size = 3 + (int)(fault_random(&random) % (MOST - 2));
        world = ranks != 0 ? ranks : size;
        queues_empty();
        for (int k = 0; k < size; k++) {
            node_open(k);
        }
        int deaths = (int)(fault_random(&random) % (uint64_t)size), steps = (int)(fault_random(&random) % 400);
        for (int k = 0; k < steps; k++) {
            event(&random, &deaths);
        }
        settle();
        judge();
        for (int k = 0; k < size; k++) {
            node_close(&nodes[k]);
        }
        if (test__now->failures != 0) {
            printf("  schedule %d of %d ranks: TEST_SEED=%llu FAULT_RUNS=1\n", i, size, (unsigned long long)before);
        }
    }
    printf("  %d schedules\n", runs);
}

TEST(no_schedule_of_deaths_and_messages_splits_an_agreement) {
    schedules(fault_seed("schedules"), fault_runs(20000, 2000000), 0);
}

/* Who is gone does not fit into a control message of the usual size. */
TEST(a_group_of_ten_thousand_agrees) { schedules(fault_seed("large groups"), fault_runs(20, 2000), MANY); }

/* Rank 2 is cut off: it takes the others for dead and says so to rank 0, which then learns that rank 2 is gone. */
TEST(who_was_cut_off_takes_nobody_with_it) {
    size = world = 4;
    queues_empty();
    for (int k = 0; k < size; k++) {
        node_open(k);
    }
    nodes[2].links[1].life = nodes[2].links[3].life = DDL__DEAD;
    node_step(&nodes[2]);
    CHECK_EQ(queues[2][0].count, 1);
    deliver(2, 0);
    nodes[2].dead = 1;
    for (int k = 0; k < size; k++) {
        queues[2][k].count = 0;
    }
    settle();
    judge();
    CHECK(ddl__bit(nodes[0].agreement->value.gone, 2));
    for (int k = 0; k < size; k++) {
        node_close(&nodes[k]);
    }
}

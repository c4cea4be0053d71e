/* Growing a group as a model: the code of ddl_group_grow over a network of queues, in random schedules. Members and
 * newcomers come late and die between any two sends, who receives newcomers too; several newcomers want one rank; one
 * that lost who received it gives up and comes again. Nobody waits for ever, all who end with a group have the same one,
 * and a newcomer is told so only of a group that all members have made.
 * tests/run: variants=asan timeout=240 */
#define TEST_TIMEOUT_S 3000
#define DDL_IMPLEMENTATION
#include "faults.h"

enum { MOST = 5, NEWCOMERS = 4, QUEUE = 128, ROOM = 1 + DDL__ROSTER_HEAD + MOST * DDL__ROSTER_SEAT };

typedef struct packet {
    ddl__frame frame;
    uint32_t incarnation; /* of the process that it is for */
    uint8_t payload[ROOM];
} packet;

typedef struct queue {
    packet packets[QUEUE];
    int first, count;
} queue;

enum phase { AGREES, WAITS, FENCES, HAS_IT, FAILED };

typedef struct node {
    ddl_context context;
    ddl__groups groups;
    ddl__requests requests;
    ddl__link *links;
    ddl_group *group;
    ddl__agreement *agreement;
    ddl__grow grow;
    uint8_t states[MOST];
    enum phase phase;
    int present, dead, sends_left; /* present: a process that began the job */
    uint32_t made_id, made_incarnation, made_bits; /* of the group that it ended with */
} node;

/* A process that wants a rank. */
typedef struct newcomer {
    enum { OUTSIDE, RECEIVED, TOLD, INSIDE } state;
    int rank, dead, server; /* server: who received it, -1: that connection has ended */
    uint32_t incarnation, id, epoch;
} newcomer;

static node nodes[MOST];
static newcomer newcomers[NEWCOMERS];
static queue queues[MOST][MOST]; /* from, to; to a rank that newcomers want: to whichever has the incarnation */
static int size, deaths, abandoned; /* deaths: of members */

/* ---- network ---- */

static ddl_status model_send(void *self, int32_t peer, ddl_message *m) {
    node *n = (node *)self;
    queue *q = &queues[n->context.rank][peer];
    if (n->sends_left == 0) {
        n->dead = 1;
    }
    if (n->dead || q->count == QUEUE) {
        CHECK(q->count < QUEUE);
        return DDL_OK;
    }
    n->sends_left -= n->sends_left > 0;
    packet *p = &q->packets[(q->first + q->count++) % QUEUE];
    CHECK_EQ(ddl__frame_read(m->header, &p->frame), DDL_OK);
    CHECK(m->payload_bytes <= sizeof p->payload);
    memcpy(p->payload, m->payload, m->payload_bytes);
    p->incarnation = n->links[peer].incarnation;
    return DDL_OK;
}

static ddl_status model_add_peer(void *self, int32_t peer, const void *address, size_t bytes, const char *host_id,
                                 uint64_t *out_latency_ns, uint64_t *out_bytes_per_s) {
    (void)self, (void)peer, (void)address, (void)bytes, (void)host_id;
    *out_latency_ns = *out_bytes_per_s = 1;
    return DDL_OK;
}

static void model_peer(void *self, int32_t peer) { (void)self, (void)peer; }

static const ddl_transport model_transport = {.size = sizeof(ddl_transport), .send = model_send,
                                              .add_peer = model_add_peer, .peer_dead = model_peer,
                                              .peer_again = model_peer};
static const ddl_plugin model_plugin = {.size = sizeof(ddl_plugin), .name = "model", .transport = &model_transport};

/* ---- listener ---- */

static ddl_status listener_open(ddl__grow *w) {
    node *n = &nodes[w->group->context->rank];
    w->states = n->states;
    return DDL_OK;
}

static void listener_turn(ddl__grow *w) { (void)w; }

static void listener_tell(ddl__grow *w, int32_t rank, const uint8_t *roster, size_t bytes) {
    for (int i = 0; i < NEWCOMERS; i++) {
        newcomer *j = &newcomers[i];
        if (!j->dead && j->state == RECEIVED && j->server == w->group->context->rank && j->rank == rank) {
            ddl__base base = {.rank = -1};
            ddl__roster r;
            REQUIRE(ddl__roster_read(&base, roster, bytes, size, &r) == DDL_OK && r.verdict == DDL_OK);
            *j = (newcomer){.state = TOLD, .rank = rank, .server = j->server, .incarnation = r.incarnation,
                            .id = r.group, .epoch = r.epoch};
            ddl__free(&base, r.seats);
        }
    }
}

static void server_gone(int rank, bool refused) {
    for (int i = 0; i < NEWCOMERS; i++) {
        newcomer *j = &newcomers[i];
        if (j->server == rank && (j->state == RECEIVED || (j->state == TOLD && refused))) {
            j->state = OUTSIDE;
        }
        j->server = j->server == rank ? -1 : j->server;
    }
}

static void listener_close(ddl__grow *w, bool admitted) { server_gone(w->group->context->rank, !admitted); }

static const ddl__grow_listener model_listener = {listener_open, listener_turn, listener_tell, listener_close};

/* ---- processes ---- */

static void node_open(int rank, bool present) {
    node *n = &nodes[rank];
    int32_t ranks[MOST];
    memset(n, 0, sizeof *n);
    n->links = (ddl__link *)calloc((size_t)size + 1, sizeof *n->links);
    n->context.rank = rank;
    n->context.world_size = size;
    n->context.base.rank = -1;
    n->context.wake_fd = n->context.epoll_fd = -1;
    n->context.groups = &n->groups;
    n->context.requests = &n->requests;
    n->context.links = n->links;
    n->context.doing = "grow";
    n->context.endpoints[0] = (ddl__endpoint){.plugin = &model_plugin, .table = &model_transport, .self = n};
    n->context.endpoint_count = 1;
    n->present = present;
    n->dead = !present;
    n->sends_left = -1;
    for (int i = 0; i <= size; i++) {
        ranks[i < size ? i : 0] = i < size ? i : 0;
        n->links[i].endpoint = i == rank || i == size ? NULL : &n->context.endpoints[0];
        n->links[i].pidfd = -1;
        n->links[i].life = i < size ? DDL__ALIVE : DDL__DEAD;
    }
    n->group = ddl__group_new(&n->context, ranks, size, 0, 0, "world");
    n->grow = (ddl__grow){.group = n->group, .listener = &model_listener, .most = MOST, .until_ns = DDL__NEVER / 2,
                            .end_ns = DDL__NEVER};
    REQUIRE(ddl__grow_alloc(&n->grow));
    n->group->grow = &n->grow;
}

static void node_close(node *n) {
    if (n->grow.made != NULL && n->phase != HAS_IT) {
        ddl__form_undo(n->grow.made);
    }
    ddl__free(&n->context.base, n->grow.roster.seats);
    ddl__grow_free(&n->grow);
    n->group->grow = NULL; /* the node's, not the group's to free */
    for (ddl_group *g = n->groups.first, *next; g != NULL; g = next) {
        next = g->next;
        if (g->magic == DDL__GROUP_MAGIC) {
            ddl__group_bury(g);
        }
        ddl__free(&n->context.base, g);
    }
    ddl__scratch_free_all(&n->context);
    while (n->context.notes != NULL) {
        ddl__note *note = n->context.notes;
        n->context.notes = note->next;
        ddl__free(&n->context.base, note);
    }
    free(n->links);
    CHECK_EQ(n->context.base.memory, 0);
}

static void node_has_it(node *n) {
    n->phase = HAS_IT;
    n->made_id = n->grow.made->id;
    for (int i = 0; i < n->grow.made->size; i++) {
        int32_t r = n->grow.made->ranks[i];
        n->made_bits |= 1u << r;
        n->made_incarnation = DDL__MAX(n->made_incarnation, n->links[r].incarnation);
    }
}

/* What ddl__grow_run does, without waiting. */
static void node_step(node *n) {
    ddl__agreement *a = n->agreement;
    if (n->phase == WAITS) {
        if (!n->grow.over) {
            ddl__grow_step(&n->grow);
        }
        if (n->grow.over && !n->dead) {
            n->phase = FENCES;
            n->agreement = ddl__agree_begin(n->group, DDL__AGREE_GROWN, ddl__grow_flag(&n->grow));
        }
        return;
    }
    if (n->phase == HAS_IT || n->phase == FAILED) {
        return;
    }
    if (a == NULL) {
        a = n->agreement = ddl__agree_begin(n->group, DDL__AGREE_GROW, 1);
    }
    if (!a->decided) {
        ddl__agree_step(n->group, a);
    }
    if (!a->decided || n->dead) {
        return;
    }
    n->group->agree_sequence = a->sequence;
    n->agreement = NULL;
    CHECK(!ddl__bit(a->value.gone, n->context.rank));
    if (n->phase == AGREES && 2 * ddl__count_left(n->group, a->value.gone) <= size) {
        n->phase = FAILED;
    } else if (n->phase == AGREES) {
        ddl__grow_begin(&n->grow, a);
        n->phase = WAITS;
    } else if (ddl__grow_end(&n->grow, a)) {
        node_has_it(n);
    } else {
        n->phase = (a->value.flag & DDL__GROWN_AGAIN) != 0 ? AGREES : FAILED;
    }
}

static void deliver(int from, int to) {
    queue *q = &queues[from][to];
    packet p = q->packets[q->first];
    q->first = (q->first + 1) % QUEUE;
    q->count--;
    if (p.incarnation == 0 && nodes[to].present) {
        ddl_context *c = &nodes[to].context;
        ddl_status status = p.frame.type == DDL__FRAME_GROW ? ddl__on_grow(c, from, &p.frame, p.payload)
                                                            : ddl__on_agree(c, from, &p.frame, p.payload);
        CHECK_EQ(nodes[to].dead ? DDL_OK : status, DDL_OK);
        return;
    }
    for (int i = 0; i < NEWCOMERS; i++) {
        newcomer *j = &newcomers[i];
        bool for_it = !j->dead && j->state == TOLD && j->rank == to && j->incarnation == p.incarnation;
        if (for_it && p.frame.group == j->id && p.frame.epoch == j->epoch) {
            CHECK_EQ(p.payload[0], DDL__GROW_ADMIT);
            j->state = INSIDE;
        }
    }
}

/* The process that a link leads to has ended, or has closed its ports. */
static bool is_gone(int rank, uint32_t incarnation) {
    if (incarnation == 0) {
        return nodes[rank].dead;
    }
    for (int i = 0; i < NEWCOMERS; i++) {
        const newcomer *j = &newcomers[i];
        bool lives = !j->dead && (j->state == TOLD || j->state == INSIDE);
        if (lives && j->rank == rank && j->incarnation == incarnation) {
            return false;
        }
    }
    return true;
}

static bool learn(int who, int of) {
    ddl__link *l = &nodes[who].links[of];
    if (who == of || nodes[who].dead || l->life == DDL__DEAD || !is_gone(of, l->incarnation)) {
        return false;
    }
    l->life = DDL__DEAD;
    queues[of][who].count = 0;
    return true;
}

/* A newcomer comes to whoever receives now. */
static bool come(newcomer *j) {
    for (int s = 0; s < size && j->state == OUTSIDE && !j->dead; s++) {
        ddl__grow *w = &nodes[s].grow;
        if (!nodes[s].dead && nodes[s].phase == WAITS && w->open && !w->over && w->states[j->rank] == DDL__RANK_AWAY) {
            ddl__blob blob = {.magic = DDL__BLOB_MAGIC, .version = ddl_version(), .cores = 1, .board_fd = -1};
            snprintf(blob.transports[0].name, DDL__NAME_BYTES, "model");
            blob.transports[0].bytes = 1;
            ddl__blob_write(&blob, w->table + (size_t)j->rank * DDL__BLOB_BYTES);
            w->states[j->rank] = DDL__RANK_HERE;
            j->state = RECEIVED;
            j->server = s;
            return true;
        }
    }
    return false;
}

static void newcomer_dies(newcomer *j) {
    if (j->dead) {
        return; /* its place at the server may be another's by now */
    }
    j->dead = 1;
    if (j->state == RECEIVED && j->server >= 0 && nodes[j->server].grow.open && !nodes[j->server].grow.over) {
        nodes[j->server].states[j->rank] = DDL__RANK_AWAY;
    }
}

/* Who received it has ended, and no word has come for long. */
static bool give_up(newcomer *j) {
    if (j->dead || j->state != TOLD || j->server >= 0) {
        return false;
    }
    j->state = OUTSIDE;
    return true;
}

static void notice_servers(void) {
    for (int s = 0; s < size; s++) {
        if (nodes[s].dead) {
            server_gone(s, false);
        }
    }
}

/* ---- schedules ---- */

static void event(uint64_t *random, int *deaths_left) {
    int a = (int)(fault_random(random) % (uint64_t)size), b = (int)(fault_random(random) % (uint64_t)size);
    newcomer *j = &newcomers[fault_random(random) % NEWCOMERS];
    switch (fault_random(random) % 16) {
    case 0:
        if (*deaths_left > 0 && !nodes[a].dead && nodes[a].sends_left < 0) {
            (*deaths_left)--;
            deaths++;
            nodes[a].sends_left = (int)(fault_random(random) % 8);
        }
        return;
    case 1:
        if (fault_random(random) % 8 == 0) {
            newcomer_dies(j);
        } else if (fault_random(random) % 8 == 0) {
            abandoned += give_up(j);
        }
        return;
    case 2:
    case 3:
        come(j);
        return;
    case 4:
    case 5:
        learn(a, b);
        return;
    case 6:
    case 7:
    case 8:
    case 9:
        if (!nodes[a].dead) {
            node_step(&nodes[a]);
        }
        notice_servers();
        return;
    default:
        if (queues[a][b].count > 0) {
            deliver(a, b);
        }
        notice_servers();
    }
}

/* With all that can happen done and time left, a living member waits for newcomers, or for whoever waits for them. */
static void none_waits_for_the_dead(void) {
    for (int i = 0; i < size; i++) {
        const node *n = &nodes[i];
        bool waits = n->phase == WAITS && n->grow.server >= 0 && !nodes[n->grow.server].dead;
        if (!n->dead && !waits && n->phase != HAS_IT && n->phase != FAILED) {
            test__fail(__FILE__, __LINE__, "member %d waits for the dead in phase %d", i, (int)n->phase);
        }
    }
}

/* All deaths are known, all messages arrive, all step; newcomers come while there is time. */
static void settle(bool in_time) {
    for (int round = 0; round < 400; round++) {
        if (in_time && round == 300) {
            none_waits_for_the_dead();
        }
        for (int a = 0; a < size; a++) {
            nodes[a].grow.until_ns = in_time || round < 100 ? nodes[a].grow.until_ns : 1;
            nodes[a].grow.until_ns = in_time && round > 300 ? 1 : nodes[a].grow.until_ns;
            nodes[a].grow.here_until_ns = nodes[a].grow.until_ns;
            for (int b = 0; b < size; b++) {
                while (queues[a][b].count > 0) {
                    deliver(a, b);
                }
                learn(a, b);
            }
            if (!nodes[a].dead) {
                node_step(&nodes[a]);
            }
            notice_servers();
        }
        for (int i = 0; i < NEWCOMERS; i++) {
            if (round % 20 == 19) {
                give_up(&newcomers[i]);
            }
            come(&newcomers[i]);
        }
    }
}

/* Returns the members that have the group, as bits. */
static unsigned judge(bool may_succeed) {
    const node *first = NULL;
    unsigned have = 0, living = 0;
    for (int i = 0; i < size; i++) {
        const node *n = &nodes[i];
        living += !n->dead;
        if (!n->dead && n->phase != HAS_IT && n->phase != FAILED) {
            test__fail(__FILE__, __LINE__, "member %d waits for ever in phase %d", i, (int)n->phase);
        }
        if (n->phase == HAS_IT) {
            first = first == NULL ? n : first;
            have |= 1u << i;
            CHECK_EQ(n->made_id, first->made_id);
            CHECK_EQ(n->made_bits, first->made_bits);
            CHECK_EQ(n->made_incarnation, first->made_incarnation);
            CHECK(n->made_incarnation > 0);
        }
    }
    for (int i = 0; i < size; i++) { /* all or none, of those who live */
        CHECK(nodes[i].dead || first == NULL || nodes[i].phase == HAS_IT);
    }
    for (int i = 0; i < NEWCOMERS; i++) {
        const newcomer *j = &newcomers[i];
        if (j->state == INSIDE) {
            CHECK(first != NULL && first->made_id == j->id && (first->made_bits >> j->rank & 1) != 0);
            CHECK(first == NULL || first->made_incarnation == j->incarnation);
        }
        CHECK(j->dead || j->state != RECEIVED);
        bool waits = !j->dead && j->state == TOLD; /* the last to speak may be dead; then it gave up */
        CHECK(!waits || living == 0);
        for (int k = 0; k < i; k++) {
            bool both = j->state == INSIDE && newcomers[k].state == INSIDE && newcomers[k].rank == j->rank;
            CHECK(!both);
        }
    }
    CHECK(!may_succeed || have != 0);
    return have;
}

static void schedules(uint64_t random, int runs) {
    int grown = 0;
    for (int i = 0; i < runs && test__now->failures == 0; i++) {
        uint64_t before = random;
        size = 3 + (int)(fault_random(&random) % (MOST - 2));
        int vacant = (int)(fault_random(&random) % (uint64_t)size);
        memset(queues, 0, sizeof queues);
        memset(newcomers, 0, sizeof newcomers);
        for (int k = 0; k < size; k++) {
            node_open(k, k != vacant);
        }
        for (int k = 0; k < NEWCOMERS; k++) { /* most want the vacant rank, some one that may die */
            int other = (int)(fault_random(&random) % (uint64_t)size);
            newcomers[k] = (newcomer){.rank = k < 2 || fault_random(&random) % 2 == 0 ? vacant : other, .server = -1};
        }
        int left = (int)(fault_random(&random) % 3), steps = (int)(fault_random(&random) % 600);
        for (int k = 0; k < size; k++) {
            nodes[k].grow.most = 1 + (int)(fault_random(&random) % 2);
            nodes[k].grow.most = nodes[0].grow.most;
        }
        bool in_time = fault_random(&random) % 4 != 0;
        deaths = 0;
        for (int k = 0; k < steps; k++) {
            event(&random, &left);
        }
        settle(in_time);
        bool somebody = !newcomers[0].dead || !newcomers[1].dead;
        grown += judge(in_time && somebody && deaths == 0) != 0;
        for (int k = 0; k < size; k++) {
            node_close(&nodes[k]);
        }
        if (test__now->failures != 0) {
            printf("  schedule %d of %d ranks: TEST_SEED=%llu FAULT_RUNS=1\n", i, size, (unsigned long long)before);
        }
    }
    printf("  %d schedules, %d groups have grown, %d newcomers gave up and came again\n", runs, grown, abandoned);
    CHECK(runs < 100 || (grown > runs / 10 && grown < runs));
}

TEST(no_schedule_of_deaths_and_newcomers_wedges_or_splits_a_group) {
    schedules(fault_seed("schedules"), fault_runs(10000, 1000000));
}

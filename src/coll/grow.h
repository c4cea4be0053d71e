/* coll: growing a group: new processes take the world ranks of dead ones. All members admit them at one fence.
 *
 *     agreement GROW   who is left, and the id of the group to be (agree.h)
 *     HERE      member -> server    what this rank tells about itself, as at the start of a job
 *     ROSTER    server -> members   who has come, once enough have or time is over; to newcomers: all that is told here
 *     agreement GROWN  the fence: every member has made its links to the newcomers, and the group; or: nobody joins
 *     ADMIT     member -> newcomer  the group is there; one word from any member is enough
 *
 * The server is the lowest living rank on the host that the rendezvous leads to; until the roster newcomers are
 * connections that it holds, in no group, and their end costs nothing. From the roster on a newcomer that dies is
 * admitted and found dead, like any rank. What ends an attempt (a member dies, the server too, memory fails) ends in
 * GROWN at all members alike, who then undo what they made and begin again: newcomers come again by themselves. An
 * attempt needs no memory after its first agreement that it cannot do without.
 *
 * Nobody waits for who is absent: members wait for the server, whose end they see, the server for newcomers until the
 * deadline, newcomers for one word of any member, or for the end of the connection to the server. A newcomer that gave
 * up just when it was admitted has closed its port: members find that link dead. */
#ifndef DDL_COLL_GROW_H
#define DDL_COLL_GROW_H

#include "roster.h"

enum { DDL__GROW_HERE = 1, DDL__GROW_ROSTER = 2, DDL__GROW_ADMIT = 3 };
enum { DDL__GROWN_MADE = 1, DDL__GROWN_AGAIN = 2 }; /* what a member says in GROWN; all must */
#define DDL__GROW_SLACK_NS (5 * DDL__NS_PER_S) /* from the server's deadlines to that of those who wait for it */

typedef struct ddl__grow ddl__grow;

/* Where newcomers come in: sockets (grow_listener.h), or the model of a test. */
typedef struct ddl__grow_listener {
    /* Fills grow->states. Errors: with the sentence in grow->why. */
    ddl_status (*open)(ddl__grow *grow);
    void (*turn)(ddl__grow *grow); /* lets things happen: states become HERE, the table gets their blobs */
    void (*tell)(ddl__grow *grow, int32_t rank, const uint8_t *roster, size_t bytes); /* the bytes stay */
    void (*close)(ddl__grow *grow, bool admitted);
} ddl__grow_listener;

/* One call of ddl_group_grow. */
struct ddl__grow {
    ddl_group *group;
    const ddl__grow_listener *listener;
    void *self; /* of the listener */
    int32_t most; /* newcomers that may join; wanted: of these as many as there are ranks for */
    int32_t wanted;
    uint64_t until_ns, end_ns; /* of waiting for newcomers; of the call */
    /* the attempt */
    uint32_t sequence, id; /* of its first agreement */
    bool fences;           /* it is in GROWN, perhaps left at the deadline of a call: the next one takes it up */
    int32_t server;        /* rank in the group; -1: no member is where newcomers look */
    uint8_t *gone;         /* a bit per rank of the group, as agreed */
    bool over;             /* the roster is here, or will not come */
    bool told, late;       /* it is here; time was over before */
    ddl__roster roster;
    ddl_group *made;
    uint64_t here_ns; /* when HERE was last sent */
    uint64_t here_until_ns; /* until when the server waits for HERE, which comes at once from who is well */
    /* of the server */
    uint32_t *here; /* by rank of the group: the agreement that its HERE was for */
    uint8_t *blobs; /* by rank of the group */
    uint32_t seen;  /* the highest incarnation that any member knows */
    bool open;
    uint8_t *states, *table; /* by world rank: enum ddl__rank_state, blob */
    uint8_t *wire, *refusal; /* rosters for newcomers */
    ddl__sentence why;
};

static bool ddl__grow_lives(const ddl__grow *w, int32_t rank) { return !ddl__bit(w->gone, rank); }

static void ddl__grow_tell_here(ddl__grow *w) {
    ddl_group *g = w->group;
    ddl__blob mine;
    uint8_t payload[5 + DDL__BLOB_BYTES];
    ddl__blob_fill(g->context, &mine);
    payload[0] = DDL__GROW_HERE;
    ddl__store_le32(payload + 1, g->context->incarnation_seen);
    ddl__blob_write(&mine, payload + 5);
    ddl__frame f = {.type = DDL__FRAME_GROW, .group = g->id, .epoch = g->epoch, .sequence = w->sequence};
    w->here_ns = ddl__now_ns();
    ddl__tell(g->context, g->ranks[w->server], f, payload, sizeof payload);
}

static void ddl__grow_take_here(ddl__grow *w, int32_t from, uint32_t sequence, const uint8_t *in) {
    w->here[from] = sequence;
    w->seen = DDL__MAX(w->seen, ddl__load_le32(in));
    memcpy(w->blobs + (size_t)from * DDL__BLOB_BYTES, in + 4, DDL__BLOB_BYTES);
}

static void ddl__grow_tell_roster(ddl__grow *w, int32_t to) {
    ddl_group *g = w->group;
    size_t bytes = 1 + ddl__roster_bytes(w->roster.count);
    uint8_t *payload = ddl__scratch_get(g->context, bytes);
    if (payload == NULL) {
        return; /* as lost: HERE comes again */
    }
    payload[0] = DDL__GROW_ROSTER;
    ddl__roster_write(&w->roster, payload + 1);
    ddl__frame f = {.type = DDL__FRAME_GROW, .group = g->id, .epoch = g->epoch, .sequence = w->sequence};
    ddl__tell(g->context, g->ranks[to], f, payload, bytes);
    ddl__scratch_put(g->context, payload);
}

/* >>frames
 *     kind u8; HERE: incarnation u32, blob; ROSTER: as in roster.h; `sequence` is that of the agreement GROW. ADMIT
 *     goes on the new group. */

static ddl_status ddl__on_grow_roster(ddl__grow *w, const uint8_t *in, size_t bytes) {
    ddl_context *c = w->group->context;
    ddl__roster r;
    ddl_status status = ddl__roster_read(&c->base, in, bytes, c->world_size, &r);
    if (status == DDL_OK) {
        w->roster = r;
        w->told = w->over = true;
        ddl__changed(c);
    }
    return status == DDL_ERR_NOMEM ? DDL_OK : status; /* as lost: it is asked for again */
}

static ddl_status ddl__on_grow(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl_group *g = ddl__frame_group(c, peer, f);
    const uint8_t *in = payload;
    uint8_t kind = f->bytes > 0 ? in[0] : 0;
    if (kind < DDL__GROW_HERE || kind > DDL__GROW_ADMIT || (kind == DDL__GROW_ADMIT && f->bytes != 1) ||
        (kind == DDL__GROW_HERE && f->bytes != 5 + DDL__BLOB_BYTES)) {
        return DDL_ERR_CORRUPT;
    }
    ddl__grow *w = g != NULL ? g->grow : NULL;
    if (g != NULL && kind == DDL__GROW_ADMIT) {
        g->admitted = true;
        ddl__changed(c);
    }
    if (w == NULL || kind == DDL__GROW_ADMIT) {
        return DDL_OK;
    }
    int32_t from = g->rank_of[peer];
    uint32_t sequence = (uint32_t)f->sequence;
    if (kind == DDL__GROW_HERE) { /* perhaps of an agreement that ends here only now */
        bool again = w->over && w->told && w->server == g->rank && sequence == w->sequence;
        ddl__grow_take_here(w, from, sequence, in + 1);
        if (again) {
            ddl__grow_tell_roster(w, from);
        }
        return DDL_OK;
    }
    bool expected = from == w->server && sequence == w->sequence && !w->over;
    return expected ? ddl__on_grow_roster(w, in + 1, f->bytes - 1) : DDL_OK;
}

/* >>server */

/* The rank's process is gone for all that is known here, so that another may have its place. */
static bool ddl__grow_is_free(const ddl__grow *w, int32_t rank) {
    const ddl_group *g = w->group;
    const ddl__link *l = &g->context->links[rank];
    int32_t member = g->rank_of[rank];
    if (member >= 0) {
        return !ddl__grow_lives(w, member);
    }
    return rank != g->context->rank && (l->life == DDL__DEAD || (l->life == DDL__LEFT && l->drained));
}

/* Members hear that nobody joins in this attempt, and why. */
static void ddl__grow_refuse(ddl__grow *w, ddl_status status, const char *text) {
    ddl_group *g = w->group;
    w->roster.verdict = status;
    w->roster.count = 0;
    w->roster.world = g->context->world_size;
    snprintf(w->roster.text, sizeof w->roster.text, "%.255s", text);
    ddl__text_clean(w->roster.text);
    w->told = w->over = true;
    for (int32_t i = 0; i < g->size; i++) {
        if (i != g->rank && ddl__grow_lives(w, i)) {
            ddl__grow_tell_roster(w, i);
        }
    }
}

/* 1: all members are here; 0: not yet; -1: one is gone, and the attempt over. */
static int ddl__grow_members(ddl__grow *w) {
    ddl_group *g = w->group;
    for (int32_t i = 0; i < g->size; i++) {
        if (ddl__grow_lives(w, i) && ddl__is_gone(g, i)) {
            ddl__grow_refuse(w, DDL_ERR_PEER, "a member died while newcomers were waited for");
            return -1;
        }
    }
    for (int32_t i = 0; i < g->size; i++) {
        if (ddl__grow_lives(w, i) && i != g->rank && w->here[i] != w->sequence) {
            return 0;
        }
    }
    return 1;
}

/* Members that took part in the agreement and are silent since: stopped, or cut off. */
static void ddl__grow_refuse_silent(ddl__grow *w) {
    const ddl_group *g = w->group;
    char line[sizeof w->roster.text];
    ddl__text text = {line, sizeof line, 0};
    ddl__text_add(&text, "of the members who agreed to grow it some do not answer any more, stopped or cut off:");
    for (int32_t i = 0, named = 0; i < g->size && named < 8; i++) {
        if (ddl__grow_lives(w, i) && i != g->rank && w->here[i] != w->sequence) {
            ddl__text_add(&text, " rank %d", i);
            named++;
        }
    }
    ddl__grow_refuse(w, DDL_ERR_TIMEOUT, line);
}

static void ddl__grow_open(ddl__grow *w) {
    int32_t free_ranks = 0, world = w->group->context->world_size;
    for (int32_t i = 0; i < world; i++) {
        free_ranks += ddl__grow_is_free(w, i);
    }
    if (free_ranks == 0) {
        ddl__grow_refuse(w, DDL_ERR_STATE, "all ranks of the world live: a newcomer takes the rank of a dead one");
        return;
    }
    if (!ddl__meets_newcomers(w->group->context)) {
        ddl__grow_refuse(w, DDL_ERR_CONFIG, DDL__NO_NEWCOMERS);
        return;
    }
    ddl_status status = w->listener->open(w);
    if (status < 0) {
        ddl__grow_refuse(w, status, w->why.text);
        return;
    }
    w->open = true;
    w->wanted = DDL__MIN(w->most, free_ranks);
    for (int32_t i = 0; i < world; i++) {
        w->states[i] = ddl__grow_is_free(w, i) ? DDL__RANK_AWAY : DDL__RANK_SERVED;
    }
}

/* Writes what newcomers get: the members and themselves. seats: room for all of the world. */
static void ddl__grow_write(ddl__grow *w, const ddl__roster *newcomers, ddl__seat *seats) {
    const ddl_group *g = w->group;
    ddl__roster all = *newcomers;
    all.seats = seats;
    all.count = 0;
    for (int32_t r = 0, next = 0; r < all.world; r++) {
        int32_t member = g->rank_of[r];
        if (next < newcomers->count && newcomers->seats[next].rank == r) {
            seats[all.count++] = newcomers->seats[next++];
        } else if (member >= 0 && ddl__grow_lives(w, member)) {
            ddl__seat *s = &seats[all.count++];
            s->rank = r;
            s->incarnation = r == g->context->rank ? g->context->incarnation : g->context->links[r].incarnation;
            ddl__blob_read(w->blobs + (size_t)member * DDL__BLOB_BYTES, &s->blob);
        }
    }
    ddl__roster_write(&all, w->wire);
    for (int32_t i = 0; i < newcomers->count; i++) {
        w->listener->tell(w, newcomers->seats[i].rank, w->wire, ddl__roster_bytes(all.count));
    }
}

/* A newcomer that cannot take part (another version) hears why. */
static void ddl__grow_dismiss(ddl__grow *w, int32_t rank, ddl_status status) {
    ddl__roster no = {.verdict = status, .world = w->group->context->world_size};
    snprintf(no.text, sizeof no.text, "%.255s", w->group->context->error.text);
    ddl__roster_write(&no, w->refusal);
    w->states[rank] = DDL__RANK_SERVED;
    w->listener->tell(w, rank, w->refusal, ddl__roster_bytes(0));
}

/* The roster of those who have come. */
static void ddl__grow_conclude(ddl__grow *w) {
    ddl_group *g = w->group;
    ddl_context *c = g->context;
    ddl__seat *seats = ddl__alloc_array(&c->base, 2 * (size_t)c->world_size, sizeof *seats);
    if (seats == NULL) {
        ddl__grow_refuse(w, DDL_ERR_NOMEM, "the rank that receives newcomers has no memory for their roster");
        return;
    }
    ddl__roster *r = &w->roster;
    *r = (ddl__roster){.group = w->id, .epoch = g->epoch + 1, .incarnation = w->seen + 1, .world = c->world_size,
                       .tuning = g->tuning, .seats = seats};
    memcpy(r->meet_host, c->meet_host, sizeof r->meet_host);
    snprintf(r->name, sizeof r->name, "%.*s@%u", (int)DDL__MIN(strcspn(g->name, "@"), 48u), g->name, r->epoch);
    for (int32_t i = 0; i < c->world_size && r->count < w->wanted; i++) {
        ddl__seat *s = &seats[r->count];
        if (w->states[i] != DDL__RANK_HERE) {
            continue;
        }
        ddl__blob_read(w->table + (size_t)i * DDL__BLOB_BYTES, &s->blob);
        ddl_status sound = ddl__blob_check(c, &s->blob, i);
        if (sound < 0) {
            ddl__grow_dismiss(w, i, sound);
            continue;
        }
        s->rank = i;
        s->incarnation = r->incarnation;
        r->count++;
    }
    if (r->count == 0) {
        r->seats = NULL;
        ddl__free(&c->base, seats);
        ddl__grow_refuse(w, DDL_ERR_TIMEOUT, "no new process came for the rank of a dead one before the deadline");
        return;
    }
    w->told = w->over = true;
    ddl__grow_write(w, r, seats + c->world_size);
    for (int32_t i = 0; i < g->size; i++) {
        if (i != g->rank && ddl__grow_lives(w, i)) {
            ddl__grow_tell_roster(w, i);
        }
    }
}

static void ddl__grow_receive(ddl__grow *w, uint64_t now) {
    int members = ddl__grow_members(w);
    if (members < 0) {
        return;
    }
    if (members > 0 && !w->open) {
        ddl__grow_open(w);
    } else if (members == 0 && now >= w->here_until_ns) {
        ddl__grow_refuse_silent(w);
    }
    if (w->over || !w->open) {
        return;
    }
    int32_t ready = 0;
    w->listener->turn(w);
    for (int32_t i = 0; i < w->group->context->world_size; i++) {
        ready += w->states[i] == DDL__RANK_HERE;
    }
    if (ready >= w->wanted || now >= w->until_ns) {
        ddl__grow_conclude(w);
    }
}

/* >>attempt */

/* The lowest living rank where newcomers look. */
static int32_t ddl__grow_server(const ddl__grow *w) {
    const ddl_group *g = w->group;
    for (int32_t i = 0; i < g->size; i++) {
        const ddl_context *c = g->context;
        if (ddl__grow_lives(w, i) && strcmp(c->links[g->ranks[i]].host_id, c->meet_host) == 0) {
            return i;
        }
    }
    return -1;
}

/* After the agreement GROW. Cannot fail: the others count on this rank. */
static void ddl__grow_begin(ddl__grow *w, const ddl__agreement *a) {
    ddl_group *g = w->group;
    memcpy(w->gone, a->value.gone, ddl__agree_bytes(g));
    w->sequence = a->sequence;
    w->id = a->value.id;
    w->over = w->told = w->late = w->open = false;
    w->made = NULL;
    w->roster = (ddl__roster){0};
    w->seen = g->context->incarnation_seen;
    w->server = ddl__grow_server(w);
    w->here_ns = 0;
    uint64_t now = ddl__now_ns();
    w->here_until_ns = now + (w->end_ns - DDL__MIN(now, w->end_ns)) / 2; /* the other half is for GROWN */
    if (w->server == g->rank) {
        ddl__blob mine;
        ddl__blob_fill(g->context, &mine);
        ddl__blob_write(&mine, w->blobs + (size_t)g->rank * DDL__BLOB_BYTES);
    } else if (w->server < 0) {
        w->roster.verdict = DDL_ERR_UNSUPPORTED;
        snprintf(w->roster.text, sizeof w->roster.text,
                 "no member is left on the host of the rendezvous, where newcomers look");
        w->told = w->over = true;
    }
}

/* While the roster is not here. */
static void ddl__grow_step(ddl__grow *w) {
    uint64_t now = ddl__now_ns();
    if (w->server == w->group->rank) {
        ddl__grow_receive(w, now);
    } else if (ddl__is_gone(w->group, w->server)) {
        w->over = true;
    } else if (now >= DDL__MAX(w->until_ns, w->here_until_ns) + DDL__GROW_SLACK_NS) {
        w->over = w->late = true;
    } else if (w->here_ns == 0 || now - w->here_ns > DDL__AGREE_PAUSE_NS) {
        ddl__grow_tell_here(w);
    }
}

/* The server goes on to send what newcomers are told. */
static void ddl__grow_tend(ddl_group *g) {
    if (g->grow != NULL && g->grow->open) {
        g->grow->listener->turn(g->grow);
    }
}

/* The link to a newcomer, or of a newcomer to whom it finds. On error the rank stays dead. */
static ddl_status ddl__grow_link(ddl_context *c, const ddl__seat *s, const ddl__blob *mine) {
    ddl__reach offers[DDL__ENDPOINTS_MAX] = {{0}};
    ddl__link *l = &c->links[s->rank];
    DDL__TRY(ddl__blob_check(c, &s->blob, s->rank));
    ddl__link_again(c, s->rank, s->incarnation);
    ddl__link_name(c, s->rank, &s->blob, mine);
    l->passes_process = false; /* descriptors are passed when a job begins */
    ddl__link_offers(c, s->rank, &s->blob, true, offers);
    ddl__link_keys(c, s->rank, s->blob.nonce, mine->nonce);
    DDL__TRY(ddl__link_choose(c, s->rank, &s->blob, offers));
    ddl__link_native(c, s->rank, &s->blob);
    l->life = DDL__ALIVE;
    ddl__link_watch(c, s->rank);
    return DDL_OK;
}

static void ddl__grow_unlink(ddl__grow *w) {
    for (int32_t i = 0; i < w->roster.count; i++) {
        ddl_context *c = w->group->context;
        int32_t rank = w->roster.seats[i].rank;
        if (c->links[rank].incarnation == w->roster.incarnation) {
            ddl__link_end(c, rank, "it was not admitted");
        }
    }
}

/* The group of the members that live and the newcomers, in order of world rank. */
static ddl_group *ddl__grow_group(ddl__grow *w) {
    ddl_group *g = w->group;
    ddl_context *c = g->context;
    int32_t *ranks = ddl__alloc_array(&c->base, (size_t)c->world_size, sizeof *ranks);
    int32_t count = 0;
    for (int32_t r = 0, next = 0; ranks != NULL && r < c->world_size; r++) {
        bool newcomer = next < w->roster.count && w->roster.seats[next].rank == r;
        int32_t member = g->rank_of[r];
        next += newcomer;
        if (newcomer || (member >= 0 && ddl__grow_lives(w, member))) {
            ranks[count++] = r;
        }
    }
    bool usable = ranks != NULL && w->roster.group != 0 && ddl__group_find(c, w->roster.group) == NULL;
    ddl_group *made = usable ? ddl__group_new(c, ranks, count, w->roster.group, w->roster.epoch, w->roster.name) : NULL;
    ddl__free(&c->base, ranks);
    if (made != NULL) {
        made->timeout_ms = g->timeout_ms;
        made->stall_ms = g->stall_ms;
        made->tuning = w->roster.tuning;
        made->user_holds = true;
        c->refs++;
    }
    return made;
}

/* Links and group, as the roster says. False: nothing is left of them. */
static bool ddl__grow_make(ddl__grow *w) {
    ddl_group *g = w->group;
    ddl_context *c = g->context;
    ddl__blob mine;
    ddl__blob_fill(c, &mine);
    bool ok = w->told && w->roster.verdict == DDL_OK && w->roster.count > 0;
    for (int32_t i = 0; ok && i < w->roster.count; i++) {
        const ddl__seat *s = &w->roster.seats[i];
        int32_t member = g->rank_of[s->rank];
        ok = s->rank != c->rank && !(member >= 0 && ddl__grow_lives(w, member)) &&
             s->incarnation > c->links[s->rank].incarnation && s->incarnation == w->roster.incarnation &&
             ddl__grow_link(c, s, &mine) == DDL_OK;
    }
    w->made = ok ? ddl__grow_group(w) : NULL;
    if (w->made == NULL && w->told && w->roster.verdict == DDL_OK) {
        ddl__log(&c->base, DDL_LOG_WARN, "newcomers cannot be admitted by rank %d: %s", c->rank, c->error.text);
        ddl__grow_unlink(w);
    }
    return w->made != NULL;
}

/* What this rank says in GROWN. Another attempt only if it is in time on all ranks, and may end otherwise. */
static uint32_t ddl__grow_flag(ddl__grow *w) {
    bool in_time = !w->late && ddl__now_ns() < w->until_ns;
    bool hopeless = w->told && w->roster.verdict < 0 && w->roster.verdict != DDL_ERR_PEER;
    uint32_t made = ddl__grow_make(w) ? DDL__GROWN_MADE : 0;
    return made | (in_time && !hopeless ? DDL__GROWN_AGAIN : 0u);
}

/* After the agreement GROWN; a NULL: there was none. True: all have admitted the newcomers, w->made is the group. */
static bool ddl__grow_end(ddl__grow *w, const ddl__agreement *a) {
    ddl_group *g = w->group;
    ddl_context *c = g->context;
    bool same = a != NULL && memcmp(a->value.gone, w->gone, ddl__agree_bytes(g)) == 0;
    bool admitted = same && (a->value.flag & DDL__GROWN_MADE) != 0;
    if (admitted) {
        uint8_t kind = DDL__GROW_ADMIT;
        ddl__frame f = {.type = DDL__FRAME_GROW, .group = w->made->id, .epoch = w->made->epoch};
        for (int32_t i = 0; i < w->roster.count; i++) {
            ddl__tell(c, w->roster.seats[i].rank, f, &kind, 1);
        }
    } else {
        ddl__form_undo(w->made);
        w->made = NULL;
        if (w->told) {
            ddl__grow_unlink(w);
        }
    }
    if (w->open) {
        w->listener->close(w, admitted);
        w->open = false;
    }
    ddl__free(&c->base, w->roster.seats);
    w->roster.seats = NULL;
    return admitted;
}

/* Leaves the fence at the deadline. Links and group stay, for the others may decide that all have them; newcomers are
 * sent away: who decides for them is not here. */
static void ddl__grow_leave(ddl__grow *w) {
    if (w->open) {
        w->listener->close(w, false);
        w->open = false;
    }
}

static void ddl__grow_free(ddl__grow *w) {
    ddl__base *base = &w->group->context->base;
    void *parts[] = {w->gone, w->here, w->blobs, w->table, w->wire, w->refusal};
    for (size_t i = 0; i < DDL__COUNT_OF(parts); i++) {
        ddl__free(base, parts[i]);
    }
}

static bool ddl__grow_alloc(ddl__grow *w) {
    const ddl_group *g = w->group;
    ddl__base *base = &g->context->base;
    size_t size = (size_t)g->size, world = (size_t)g->context->world_size;
    w->gone = ddl__alloc(base, ddl__agree_bytes(g));
    w->here = ddl__alloc_array(base, size, sizeof *w->here);
    w->blobs = ddl__alloc_array(base, size, DDL__BLOB_BYTES);
    w->table = ddl__alloc_array(base, world, DDL__BLOB_BYTES);
    w->wire = ddl__alloc(base, ddl__roster_bytes((int32_t)world));
    w->refusal = ddl__alloc(base, ddl__roster_bytes(0));
    return w->gone != NULL && w->here != NULL && w->blobs != NULL && w->table != NULL && w->wire != NULL &&
           w->refusal != NULL;
}

/* Ends what a call left in GROWN. In a context that ends the links are gone already. */
static void ddl__grow_drop(ddl_group *g) {
    ddl__grow *w = g->grow;
    if (w != NULL) {
        w->told = w->told && !g->context->finalized;
        (void)ddl__grow_end(w, NULL);
        g->grow = NULL;
        ddl__grow_free(w);
        ddl__free(&g->context->base, w);
    }
}

#endif /* DDL_COLL_GROW_H */

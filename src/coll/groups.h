/* coll, fourth part: making groups. Members agree on the id through the group they come from: the member with the
 * lowest rank gives it out, everybody answers, and nobody uses the group before all have it. */
#ifndef DDL_COLL_GROUPS_H
#define DDL_COLL_GROUPS_H

#include "in_use.h"

enum { DDL__TAG_GROUP = INT32_MIN, DDL__FORMATION_BYTES = 20 };
#define DDL__FORM_AGAIN_NS ((uint64_t)10000000) /* between two tries for memory */

/* What the leader sends, and what a member answers. */
typedef struct ddl__formation {
    uint64_t fingerprint;
    uint32_t id;
    int32_t verdict; /* a ddl_status */
    int32_t native;  /* DDL__NATIVE_...: what can run collectives of the group by itself; at the end: on all ranks */
} ddl__formation;

/* On the wire: fingerprint u64, id u32, verdict u32, native u32. */
static void ddl__formation_write(const ddl__formation *f, uint8_t out[DDL__FORMATION_BYTES]) {
    ddl__writer w = ddl__writer_of(out, DDL__FORMATION_BYTES);
    ddl__put_u64(&w, f->fingerprint);
    ddl__put_u32(&w, f->id);
    ddl__put_u32(&w, (uint32_t)f->verdict);
    ddl__put_u32(&w, (uint32_t)f->native);
}

static ddl__formation ddl__formation_read(const uint8_t in[DDL__FORMATION_BYTES]) {
    ddl__reader r = ddl__reader_of(in, DDL__FORMATION_BYTES);
    ddl__formation f = {.fingerprint = ddl__get_u64(&r)};
    f.id = ddl__get_u32(&r);
    f.verdict = (int32_t)ddl__get_u32(&r);
    f.native = (int32_t)ddl__get_u32(&r);
    return f;
}

static bool ddl__form_ends(ddl_context *c, void *arg) {
    (void)arg;
    return c->aborted || c->finalized;
}

/* One message. Without memory for it the others could not be told either, and would wait for this rank: it tries again,
 * as long as they do. A send that failed for memory was not taken by its transport; a receive that did may have used up
 * its message, and is not made again. The lock is held, and given up while it waits. */
static ddl_status ddl__form_message(ddl_group *parent, const ddl_transfer *t, ddl_info *info) {
    ddl_context *c = parent->context;
    uint64_t deadline = ddl__deadline(ddl__now_ns(), parent->timeout_ms);
    while (true) {
        ddl_request *r = NULL;
        ddl_status status = ddl__p2p_make(parent, t, &r);
        bool again = status == DDL_ERR_NOMEM || t->is_send;
        if (status == DDL_OK) {
            ddl__p2p_start(c, r);
            ddl__wait_requests(c, &r, 1, false);
            status = ddl__request_report(&r, info);
        }
        again = again && status == DDL_ERR_NOMEM && parent->broken == DDL_OK;
        if (!again || ddl__now_ns() >= deadline || ddl__form_ends(c, NULL)) {
            return status;
        }
        ddl__wait w = {.done = ddl__form_ends, .tick = ddl__no_tick, .deadline = ddl__now_ns() + DDL__FORM_AGAIN_NS};
        ddl__wait_for(c, &w);
    }
}

/* One message each way with a member; messages of ddl's own have negative tags, which no caller can use. */
static ddl_status ddl__form_exchange(ddl_group *parent, int32_t peer, int32_t tag, bool send, ddl__formation *f) {
    uint8_t wire[DDL__FORMATION_BYTES] = {0};
    ddl_transfer t = {send, ddl_tensor_1d(wire, DDL_U8, DDL__FORMATION_BYTES), peer, tag};
    ddl_info info;
    if (send) {
        ddl__formation_write(f, wire);
    }
    DDL__TRY(ddl__form_message(parent, &t, &info));
    if (send) {
        return DDL_OK;
    }
    *f = ddl__formation_read(wire);
    if (info.count != DDL__FORMATION_BYTES || f->verdict > 0) {
        return ddl__error(parent->context, DDL_ERR_CORRUPT, "rank %d sent what is no part of making a group; build all "
                          "ranks with the same ddl.h", peer);
    }
    return DDL_OK;
}

/* The number for a new group that this rank leads: every rank has a range of its own, so that no two leaders give out
 * the same, and uses it up before it begins anew: frames of a group that was freed find none. */
static uint32_t ddl__group_id(ddl_context *c) {
    uint32_t range = UINT32_MAX / ((uint32_t)c->world_size + 1);
    uint32_t id;
    do {
        id = ((uint32_t)c->rank + 1) * range + c->groups->allocated++ % range;
    } while (ddl__group_find(c, id) != NULL);
    return id;
}

static ddl_status ddl__form_error(ddl_group *parent, ddl_status status, const char *name) {
    ddl_context *c = parent->context;
    if (status == DDL_ERR_MISMATCH) {
        return ddl__error(c, status, "making group \"%s\": its ranks gave different lists of members", name);
    }
    if (status == DDL_ERR_NOMEM) {
        return ddl__error(c, status, "making group \"%s\": one of its ranks has no memory for it", name);
    }
    if (c->error.status != status || strstr(c->error.text, "making group") != NULL) {
        return ddl__error(c, status, "making group \"%s\": one of its ranks could not be reached: %s", name,
                          ddl_status_text(status));
    }
    char why[DDL__SENTENCE_BYTES / 2];
    snprintf(why, sizeof why, "%.*s", (int)sizeof why - 1, c->error.text);
    return ddl__error(c, status, "making group \"%s\": %s", name, why);
}

/* What a member says to the leader's number. Answers to an earlier attempt, which failed, are passed over. */
static ddl_status ddl__form_answer(ddl_group *parent, int32_t peer, int32_t tag, ddl__formation *mine) {
    ddl__formation f;
    do {
        DDL__TRY(ddl__form_exchange(parent, peer, tag, false, &f));
    } while (f.id != mine->id);
    mine->native &= f.native;
    return f.fingerprint != mine->fingerprint ? DDL_ERR_MISMATCH : (ddl_status)f.verdict;
}

/* The leader: gives the id to all, hears that all have it, and says so. When one cannot (it is dead, or never calls)
 * the others are told, so that they do not wait for the leader. */
static ddl_status ddl__form_lead(ddl_group *parent, const int32_t *ranks, int32_t count, int32_t tag,
                                 ddl__formation *mine, ddl_group *made) {
    ddl_status verdict = made == NULL ? DDL_ERR_NOMEM : DDL_OK;
    for (int32_t round = 0; round < 3; round++) {
        for (int32_t i = 0; i < count; i++) {
            if (ranks[i] == parent->rank || (round == 1 && verdict == DDL_ERR_TIMEOUT)) {
                continue; /* one deadline is enough: the rest is told, not asked */
            }
            ddl__formation f = *mine;
            f.verdict = verdict;
            ddl_status status = round == 1 ? ddl__form_answer(parent, ranks[i], tag, mine)
                                           : ddl__form_exchange(parent, ranks[i], tag, true, &f);
            verdict = verdict < 0 ? verdict : status;
        }
    }
    return verdict;
}

static int32_t ddl__lowest(const int32_t *ranks, int32_t count) {
    int32_t lowest = ranks[0];
    for (int32_t i = 1; i < count; i++) {
        lowest = DDL__MIN(lowest, ranks[i]);
    }
    return lowest;
}

static ddl_group *ddl__form_local(ddl_group *parent, const int32_t *ranks, int32_t count, uint32_t id,
                                  const char *name) {
    ddl_context *c = parent->context;
    int32_t *world = ddl__alloc_array(&c->base, (size_t)count, sizeof *world);
    if (world == NULL) {
        return NULL;
    }
    for (int32_t i = 0; i < count; i++) {
        world[i] = parent->ranks[ranks[i]];
    }
    ddl_group *g = ddl__group_new(c, world, count, id, parent->epoch, name);
    ddl__free(&c->base, world);
    if (g != NULL) {
        g->timeout_ms = parent->timeout_ms;
        g->stall_ms = parent->stall_ms;
        g->tuning = parent->tuning;
        g->user_holds = true;
        c->refs++;
    }
    return g;
}

static void ddl__form_undo(ddl_group *g) {
    if (g != NULL) {
        g->user_holds = false;
        g->context->refs--;
        if (g->magic == DDL__GROUP_MAGIC) { /* finalizing buries all, in any order */
            ddl__group_bury(g);
        }
    }
}

/* Name and list: threads may make groups at once, and which list is whose is told apart. That lists differ shows when
 * the leader's offer of the same name is not taken up: see ddl__rival_offer. */
static int32_t ddl__form_tag(const char *name, uint64_t list) {
    uint64_t n = ddl__mix_bytes(0, name, strlen(name)), mask = (1u << DDL__TAG_LIST_BITS) - 1;
    return DDL__TAG_GROUP + (int32_t)((n & mask) << DDL__TAG_LIST_BITS | (list & mask));
}

/* Forms a group of ranks of parent, all of which are in here now. The lock is held. */
static ddl_status ddl__group_form(ddl_group *parent, const int32_t *ranks, int32_t count, const char *name,
                                  ddl_group **out) {
    ddl_context *c = parent->context;
    uint64_t hash = parent->id;
    for (int32_t i = 0; i < count; i++) {
        hash = ddl__mix(hash, (uint64_t)ranks[i]);
    }
    int32_t tag = ddl__form_tag(name, hash);
    int32_t leader = ddl__lowest(ranks, count);
    ddl__formation f = {.fingerprint = hash};
    ddl_group *made = NULL;
    ddl_status status;
    if (leader == parent->rank) {
        f.id = ddl__group_id(c);
        made = ddl__form_local(parent, ranks, count, f.id, name);
        f.native = made != NULL ? ddl__native_open(made) : 0;
        status = ddl__form_lead(parent, ranks, count, tag, &f, made);
    } else {
        status = ddl__form_exchange(parent, leader, tag, false, &f);
        const ddl__unexpected *rival = ddl__rival_offer(parent, leader, tag);
        if (status == DDL_ERR_MISMATCH && rival != NULL) { /* the leader is told: it gets an answer */
            tag = rival->tag;
            status = ddl__form_exchange(parent, leader, tag, false, &f);
        }
        if (status == DDL_OK) {
            bool same = f.fingerprint == hash, taken = ddl__group_find(c, f.id) != NULL;
            made = same && !taken && f.verdict == DDL_OK ? ddl__form_local(parent, ranks, count, f.id, name) : NULL;
            f.fingerprint = hash;
            f.native = made != NULL ? ddl__native_open(made) : 0;
            f.verdict = same && made == NULL ? (taken ? DDL_ERR_CORRUPT : DDL_ERR_NOMEM) : DDL_OK;
            status = ddl__form_exchange(parent, leader, tag, true, &f);
        }
        status = status < 0 ? status : ddl__form_exchange(parent, leader, tag, false, &f);
        status = status < 0 ? status : (ddl_status)f.verdict;
        status = status == DDL_OK && made == NULL ? DDL_ERR_CORRUPT : status; /* the leader contradicts itself */
    }
    if (status < 0) {
        ddl__form_undo(made);
        return ddl__form_error(parent, status, name);
    }
    ddl__native_close(made, f.native); /* but what one of the ranks has not */
    *out = made;
    return DDL_OK;
}

/* >>public */

static ddl_status ddl__check_members(ddl_group *g, const int32_t *ranks, int32_t count) {
    ddl_context *c = g->context;
    if (ranks == NULL || count < 1 || count > g->size) {
        return ddl__error(c, DDL_ERR_ARG, "ddl_group_create: %d members of a group of %d ranks are not possible", count,
                          g->size);
    }
    bool mine = false;
    for (int32_t i = 0; i < count; i++) {
        if (ranks[i] < 0 || ranks[i] >= g->size) {
            return ddl__error(c, DDL_ERR_ARG,
                              "ddl_group_create: rank %d is not in group \"%s\", whose ranks are 0 to %d", ranks[i],
                              g->name, g->size - 1);
        }
        mine = mine || ranks[i] == g->rank;
        for (int32_t j = 0; j < i; j++) {
            if (ranks[j] == ranks[i]) {
                return ddl__error(c, DDL_ERR_ARG, "ddl_group_create: rank %d is in the list twice", ranks[i]);
            }
        }
    }
    return mine ? DDL_OK
                : ddl__error(c, DDL_ERR_ARG, "ddl_group_create: this rank (%d) is not in the list; only members call",
                             g->rank);
}

DDL_API ddl_status ddl_group_create(ddl_group *parent, const int32_t *ranks, int32_t count, const char *name,
                                    ddl_group **out_group) {
    if (out_group == NULL) {
        return ddl__refuse_group(parent, "ddl_group_create", "out_group");
    }
    *out_group = NULL;
    DDL__TRY(ddl__enter_group(parent, "ddl_group_create"));
    ddl_context *c = parent->context;
    c->doing = "ddl_group_create";
    ddl_status status = ddl__check_members(parent, ranks, count);
    if (status == DDL_OK) {
        char shown[sizeof parent->name]; /* it becomes part of sentences */
        snprintf(shown, sizeof shown, "%s", name != NULL ? name : "");
        ddl__text_clean(shown);
        status = ddl__group_form(parent, ranks, count, shown, out_group);
    }
    c->doing = NULL;
    ddl__unlock(c);
    return status;
}

/* An all_gather of two numbers per rank. The lock is held. */
static ddl_status ddl__gather_pairs(ddl_group *g, int32_t first, int32_t second, int32_t *out) {
    uint8_t mine[8], *all = (uint8_t *)out;
    ddl__store_le32(mine, (uint32_t)first);
    ddl__store_le32(mine + 4, (uint32_t)second);
    ddl_tensor in = ddl_tensor_1d(mine, DDL_U8, 8), to = ddl_tensor_1d(all, DDL_U8, 8 * (int64_t)g->size);
    ddl__asked ask = {.kind = DDL_ALL_GATHER, .in = &in, .out = &to};
    ddl_request *r;
    DDL__TRY(ddl__coll_begin(g, &ask, "ddl_group_split", &r));
    ddl__wait_requests(g->context, &r, 1, false);
    DDL__TRY(ddl__request_report(&r, NULL));
    for (int32_t i = 0; i < 2 * g->size; i++) {
        out[i] = (int32_t)ddl__load_le32(all + 4 * (size_t)i);
    }
    return DDL_OK;
}

/* The ranks of a colour by (key, rank), by insertion. */
static int32_t ddl__split_members(const int32_t *pairs, int32_t size, int32_t colour, int32_t *out) {
    int32_t count = 0;
    for (int32_t r = 0; r < size; r++) {
        if (pairs[2 * r] != colour) {
            continue;
        }
        int32_t at = count++;
        while (at > 0 && pairs[2 * out[at - 1] + 1] > pairs[2 * r + 1]) {
            out[at] = out[at - 1];
            at--;
        }
        out[at] = r;
    }
    return count;
}

static ddl_status ddl__split(ddl_group *parent, int32_t colour, int32_t key, ddl_group **out_group) {
    ddl_context *c = parent->context;
    int32_t *pairs = ddl__alloc_array(&c->base, (size_t)parent->size, 3 * sizeof *pairs);
    if (pairs == NULL) { /* the others are in a collective by now, and wait for this rank */
        if (parent->broken == DDL_OK) {
            ddl__break_everywhere(c, parent, DDL_ERR_NOMEM, "ddl_group_split: rank %d has no memory for its part",
                                  parent->rank);
        }
        return ddl__error(c, DDL_ERR_NOMEM, "ddl_group_split: rank %d has no memory for its part", parent->rank);
    }
    int32_t *members = pairs + 2 * (size_t)parent->size;
    ddl_status status = ddl__gather_pairs(parent, colour, key, pairs);
    if (status == DDL_OK && colour >= 0) {
        char name[64];
        snprintf(name, sizeof name, "%.40s/%d", parent->name, colour);
        int32_t count = ddl__split_members(pairs, parent->size, colour, members);
        status = ddl__group_form(parent, members, count, name, out_group);
    }
    ddl__free(&c->base, pairs);
    return status;
}

static ddl_status ddl__split_call(ddl_group *parent, int32_t colour, int32_t key, const char *what,
                                  ddl_group **out_group) {
    if (out_group == NULL) {
        return ddl__refuse_group(parent, what, "out_group");
    }
    *out_group = NULL;
    DDL__TRY(ddl__enter_group(parent, what));
    ddl_context *c = parent->context;
    c->doing = what;
    ddl_status status = ddl__split(parent, colour, key, out_group);
    c->doing = NULL;
    ddl__unlock(c);
    return status;
}

DDL_API ddl_status ddl_group_split(ddl_group *parent, int32_t colour, int32_t key, ddl_group **out_group) {
    return ddl__split_call(parent, colour, key, "ddl_group_split", out_group);
}

DDL_API ddl_status ddl_group_duplicate(ddl_group *group, ddl_group **out_group) {
    return ddl__split_call(group, 0, 0, "ddl_group_duplicate", out_group);
}

DDL_API ddl_status ddl_group_translate(const ddl_group *from, const int32_t *ranks, int32_t count, const ddl_group *to,
                                       int32_t *out_ranks) {
    ddl_group *g = (ddl_group *)(uintptr_t)from;
    if (to == NULL || count < 0 || (count > 0 && (ranks == NULL || out_ranks == NULL))) {
        return ddl__refuse_group(g, "ddl_group_translate", to == NULL ? "`to`" : "count is negative, or an array");
    }
    DDL__TRY(ddl__enter_group(g, "ddl_group_translate"));
    ddl_status status = DDL_OK;
    if (to->magic != DDL__GROUP_MAGIC || to->context != g->context) {
        status = ddl__error(g->context, DDL_ERR_ARG, "ddl_group_translate: both groups must be of one context");
    }
    for (int32_t i = 0; i < count && status == DDL_OK; i++) {
        if (ranks[i] < 0 || ranks[i] >= g->size) {
            status = ddl__error(g->context, DDL_ERR_ARG, "ddl_group_translate: rank %d is not in group \"%s\"",
                                ranks[i], g->name);
        }
    }
    for (int32_t i = 0; i < count && status == DDL_OK; i++) {
        int32_t rank = to->rank_of[g->ranks[ranks[i]]];
        out_ranks[i] = rank >= 0 ? rank : DDL_NO_RANK;
    }
    ddl__unlock(g->context);
    return status;
}

static ddl_status ddl__check_options(ddl_group *g, const ddl_group_options *o) {
    ddl_context *c = g->context;
    const struct {
        const char *name;
        int64_t value, most;
    } numbers[] = {{"timeout_ms", o->timeout_ms, DDL__MS_MAX},
                   {"stall_ms", o->stall_ms, DDL__MS_MAX},
                   {"deterministic", o->deterministic, 1}};
    for (size_t i = 0; i < DDL__COUNT_OF(numbers); i++) {
        if (numbers[i].value != 0 && !ddl__in_range(numbers[i].value, true, numbers[i].most)) {
            return ddl__error(c, DDL_ERR_ARG,
                              "ddl_group_set: %s is %lld; 1 to %lld or -1 is possible, 0 leaves it as it is",
                              numbers[i].name, (long long)numbers[i].value, (long long)numbers[i].most);
        }
    }
    return DDL_OK;
}

DDL_API ddl_status ddl_group_set(ddl_group *group, const ddl_group_options *options) {
    if (options == NULL) {
        return ddl__refuse_group(group, "ddl_group_set", "options");
    }
    DDL__TRY(ddl__enter_group(group, "ddl_group_set"));
    ddl_context *c = group->context;
    ddl__tuning tuning = group->tuning;
    ddl_status status = ddl__check_options(group, options);
    if (status == DDL_OK && options->algorithm != NULL) {
        memset(tuning.forced, 0, sizeof tuning.forced);
        status = ddl__tune_set(c, &tuning, options->algorithm, "ddl_group_set");
    }
    if (status == DDL_OK) {
        tuning.deterministic = options->deterministic != 0 ? options->deterministic > 0 : tuning.deterministic;
        group->settings_version += options->algorithm != NULL || options->deterministic != 0;
        group->tuning = tuning;
        group->timeout_ms = options->timeout_ms != 0 ? options->timeout_ms : group->timeout_ms;
        group->stall_ms = options->stall_ms != 0 ? options->stall_ms : group->stall_ms;
    }
    ddl__unlock(c);
    return status;
}

DDL_API int32_t ddl_rank(const ddl_group *group) { return group != NULL ? group->rank : -1; }

DDL_API int32_t ddl_size(const ddl_group *group) { return group != NULL ? group->size : -1; }

DDL_API const char *ddl_group_name(const ddl_group *group) { return group != NULL ? group->name : ""; }

DDL_API ddl_context *ddl_group_context(const ddl_group *group) { return group != NULL ? group->context : NULL; }

#endif /* DDL_COLL_GROUPS_H */

/* mesh, fourth part: progress and waiting. One thread of a context polls, the others sleep until something changed.
 * The poller spins while every rank can have a core, yields for a while, then sleeps in the kernel: more ranks than
 * cores must stay fast, and an idle rank must cost nothing. */
#ifndef DDL_MESH_WAIT_H
#define DDL_MESH_WAIT_H

#include "cores.h"
#include "spaces.h"

#include <sys/eventfd.h>

enum {
    DDL__POLLS_ALONE = 4000,   /* empty polls before sleeping when ranks <= cores: a few milliseconds */
    DDL__POLLS_CROWDED = 40,   /* the same when ranks share cores: each poll gives the core away first */
    DDL__POLLS_YIELDED = 2,    /* the same after a yield that took long: one more yield */
    DDL__LONG_YIELD_NS = 200000, /* for each thread that takes its turn on this core */
    DDL__LONG_YIELDS = 3, /* with few short ones between: see ddl__yielded */
    DDL__LONG_YIELDS_MOST = 9,
    DDL__SHORT_YIELDS = 8, /* in a row end it */
    DDL__POLLS_AFTER_SLEEP = 8,
    DDL__POLLS_CHEAP = 64, /* looks at memory for each at the kernel */
    DDL__LOOKS_SHORTLY = 4096,
    DDL__YIELDS_SHORTLY = 8,
    DDL__SPINS_ALONE = 64, /* looks at memory before the core is given away */
    DDL__SPINS_CROWDED = 4, /* the same when ranks share cores; 16: ping_pong of 16 MiB, 4 ranks, 2.9 -> 4.5 ms */
    DDL__SPINS_CALLS = 8, /* the same when the kernel is asked, which is as dear as to give the core away */
    DDL__DEVICE_LOOK_NS = 50000, /* the longest sleep while a device copies */
    DDL__SLEEP_MS = 50         /* the longest sleep: timers are looked at this often */
};

/* Engine room: looks at operations that transports run by themselves. Returns how many moved. */
static int32_t ddl__natives_poll(ddl_context *c);
/* Engine room: the rank that the one that ends next misses, by its last look; -1: none, or not known. */
static int32_t ddl__natives_miss(const ddl_context *c);
/* Engine room: looks at messages of operations that have ended. Returns how many. */
static int32_t ddl__messages_poll(ddl_context *c);
/* Device room: looks at copies that are under way. Returns how many ended. */
static int32_t ddl__stages_poll(ddl_context *c);
/* Request room: frees those that nobody waits for and that are over. */
static void ddl__detached_reap(ddl_context *c);

/* A transport says that it is of no use any more: so are the links that it carried. */
static void ddl__transport_failed(ddl_context *c, const ddl__endpoint *e) {
    for (int32_t r = 0; r < c->world_size; r++) {
        if (c->links[r].endpoint == e) {
            ddl__missed(c, r, "the transport to it has failed");
        }
    }
}

/* Lets one thing happen on the transports. expect: the rank that is waited for most, -1 for none. While something is
 * expected in memory, transports that have to ask the kernel are looked at only now and then. */
static int32_t ddl__poll(ddl_context *c, int32_t expect) {
    int32_t events = c->natives != NULL ? ddl__natives_poll(c) : 0;
    events += c->stages != NULL ? ddl__stages_poll(c) : 0;
    events += c->messaging != NULL ? ddl__messages_poll(c) : 0;
    if (c->detached != NULL) {
        ddl__detached_reap(c);
    }
    const ddl__endpoint *expected = expect >= 0 ? c->links[expect].endpoint : NULL;
    bool all = (expected == NULL && c->natives == NULL) || ++c->polls % DDL__POLLS_CHEAP == 0;
    for (int32_t i = 0; i < c->endpoint_count; i++) {
        ddl__endpoint *e = &c->endpoints[i];
        if (all || e == expected || (e->table->flags & DDL_TRANSPORT_CHEAP_PROGRESS) != 0) {
            int32_t n = e->table->progress(e->self, e == expected ? expect : -1);
            events += n > 0 ? n : 0;
            if (n < 0) {
                ddl__transport_failed(c, e);
            }
        }
    }
    if (c->closing_count > 0) {
        ddl__reap(c);
    }
    if (c->passings != NULL) {
        ddl__pass_progress(c);
    }
    return events;
}

static void ddl__run_pumps(ddl_context *c) {
    for (ddl__pump *p = c->pumps; p != NULL; p = p->next) {
        p->run(c, p);
    }
}

static void ddl__wake(ddl_context *c) {
    if (c->cond_waiters > 0) {
        pthread_cond_broadcast(&c->changed);
    }
    uint64_t one = 1;
    if (c->wake_fd >= 0 && write(c->wake_fd, &one, sizeof one) < 0) {
        return; /* full: the sleeper will wake anyway */
    }
}

/* Something ended: threads that wait for it look again, the one that sleeps for all of them too. */
static void ddl__changed(ddl_context *c) {
    ddl__kick(c);
    if (c->cond_waiters > 0) {
        pthread_cond_broadcast(&c->changed);
    }
}

/* What another thread or a process that ended left in the context's own epoll set. */
static void ddl__drain_wakes(ddl_context *c) {
    struct epoll_event events[4];
    int n = epoll_wait(c->epoll_fd, events, (int)DDL__COUNT_OF(events), 0);
    for (int i = 0; i < n; i++) {
        uint64_t count;
        if (events[i].data.u32 == DDL__PASSING_EVENT) {
            ddl__pass_progress(c);
        } else if (events[i].data.u32 != UINT32_MAX) {
            c->next_look_ns = 0; /* a pidfd: the detector looks at once */
        } else if (read(c->wake_fd, &count, sizeof count) < 0) {
            continue; /* somebody else drained it */
        }
    }
}

/* Fills fds with what transports wake through, the context's own set first. Returns how many there are; 0: a transport
 * has something to do at once. */
static nfds_t ddl__arm(ddl_context *c, struct pollfd *fds) {
    nfds_t count = 0;
    fds[count++] = (struct pollfd){.fd = c->epoll_fd, .events = POLLIN};
    for (int32_t i = 0; i < c->endpoint_count; i++) {
        ddl__endpoint *e = &c->endpoints[i];
        int fd = -1;
        if (DDL_HAS(e->table, arm)) {
            if (e->table->arm(e->self, &fd) != DDL_OK) {
                return 0;
            }
            fds[count++] = (struct pollfd){.fd = fd, .events = POLLIN};
        }
    }
    return count;
}

/* Sleeps until a transport, a process or another thread has something, at most DDL__SLEEP_MS. poll() and not one epoll
 * set over the transports' own: a nested set makes every packet pay for a wake-up that nobody waits for. A single
 * transport that cannot be polled for (a simulation) sleeps its own way. */
static void ddl__sleep(ddl_context *c, uint64_t now, uint64_t deadline) {
    struct pollfd fds[DDL__ENDPOINTS_MAX + 1];
    nfds_t count = ddl__arm(c, fds);
    uint64_t ns = deadline > now ? DDL__MIN(deadline - now + 1, DDL__SLEEP_MS * DDL__NS_PER_MS) : 0;
    if (count == 0) {
        return;
    }
    if (c->missed_count > 0) {
        ns = DDL__MIN(ns, 5 * DDL__NS_PER_MS);
    }
    bool unarmed = count <= (nfds_t)c->endpoint_count; /* some transport wakes nobody by a descriptor */
    ddl__endpoint *only = c->endpoint_count == 1 ? &c->endpoints[0] : NULL;
    bool own_way = unarmed && only != NULL && DDL_HAS(only->table, wait);
    if (unarmed && !own_way) {
        ns = DDL__MIN(ns, DDL__NS_PER_MS);
    }
    if (c->stages != NULL || c->device_natives > 0) { /* a device wakes nobody */
        ns = DDL__MIN(ns, (uint64_t)DDL__DEVICE_LOOK_NS);
    }
    struct timespec at_most = {(time_t)(ns / DDL__NS_PER_S), (long)(ns % DDL__NS_PER_S)};
    ddl__place_sleep(c);
    c->sleeping = true;
    ddl__page_sleep_tell(c, true);
    ddl__unlock(c);
    if (own_way) {
        only->table->wait(only->self, (int64_t)ns, &c->epoll_fd, 1);
        fds[0].revents = POLLIN;
    } else if (ppoll(fds, count, &at_most, NULL) < 0) {
        fds[0].revents = POLLIN;
    }
    ddl__lock(c);
    c->sleeping = false;
    ddl__page_sleep_tell(c, false);
    if (fds[0].revents != 0) {
        ddl__drain_wakes(c);
    }
}

/* The lock was given away to others: they have it first, also those who give it away themselves within a call, and not
 * who had it and is faster. Those who do not take it are waited for once: one may be in a driver's call that ends when
 * this thread has moved something on. */
static void ddl__lock_last(ddl_context *c) {
    int spins = atomic_load_explicit(&c->lock_spins, memory_order_relaxed), waiters = 0;
    for (; spins > 0; spins--) {
        waiters = atomic_load_explicit(&c->lock_waiters, memory_order_relaxed);
        if (waiters > 0 && waiters == c->lock_passed) {
            break;
        }
        if (waiters == 0 && ddl__trylock(c)) {
            if (atomic_load_explicit(&c->lock_waiters, memory_order_relaxed) == 0) { /* nor since the look before */
                c->lock_passed = 0;
                return;
            }
            ddl__unlock(c);
        }
        ddl__relax();
    }
    ddl__lock(c);
    c->lock_passed = waiters;
}

/* Excused is a long yield to the very rank that is missing, and computes here: it has to be, and a sleep is dearer. But
 * not while others who compute are known of: see docs/design.md, "Waiting". */
static bool ddl__is_excused(const ddl_context *c, int32_t missing) {
    return c->sleeps_at_once == 0 && ddl__computes_here(c, missing);
}

/* Somebody who computes had the core: the next yields may cost a time slice each, and a sleeper is woken at once. So a
 * wait sleeps soon after a long yield. After three, with few short ones between, the next 8 sleeps come without any,
 * after the next long one 16, and so on. One or two come of ranks that write their tensors before they meet.
 * Returns whether it was long. */
static bool ddl__yielded(ddl_context *c, uint64_t ns, bool excused) {
    int32_t cores = DDL__MAX(c->cores, 1), turns = (ddl__core_threads(c) + cores - 1) / cores; /* on one core */
    bool is_long = ns > DDL__LONG_YIELD_NS * (uint64_t)DDL__MAX(turns, 2);
    if (is_long && excused) {
        return true;
    }
    c->yielded_long = is_long;
    if (is_long) {
        c->short_yields = 0;
        c->long_yields += c->long_yields < DDL__LONG_YIELDS_MOST;
        c->sleeps_at_once = c->long_yields < DDL__LONG_YIELDS ? 0 : 1 << c->long_yields;
    } else if (c->long_yields > 0 && ++c->short_yields == DDL__SHORT_YIELDS) {
        c->long_yields = 0;
    }
    return is_long;
}

/* Gives whoever else wants the core its turn: a rank that spins through its time slice on a busy machine may be keeping
 * the very rank from running that it waits for. On an idle core a yield is about as long as the poll. missing: the rank
 * without which an operation of all cannot end, -1: not known. Returns whether it took long. */
static bool ddl__yield(ddl_context *c, bool unlocked, int32_t missing) {
    uint64_t before = ddl__about_ns(c);
    bool excused = ddl__is_excused(c, missing);
    ddl__place_wait(c, before);
    if (unlocked) {
        ddl__unlock(c);
    }
    sched_yield();
    uint64_t after = ddl__about_ns(c);
    if (unlocked) {
        ddl__lock_last(c);
    }
    return ddl__yielded(c, after - before, excused);
}

static bool ddl__lock_is_wanted(const ddl_context *c) {
    return atomic_load_explicit(&c->lock_waiters, memory_order_relaxed) > 0;
}

/* The same, and other threads of this context too. */
static bool ddl__give_way(ddl_context *c, int32_t missing) {
    bool wanted = ddl__lock_is_wanted(c);
    c->lock_passed = wanted ? c->lock_passed : 0;
    return ddl__yield(c, wanted, missing);
}

/* Not the poller: sleeps until something changed. */
static void ddl__wait_changed(ddl_context *c, uint64_t deadline) {
    uint64_t until = DDL__MIN(deadline, ddl__now_ns() + DDL__SLEEP_MS * DDL__NS_PER_MS);
    struct timespec at = {(time_t)(until / DDL__NS_PER_S), (long)(until % DDL__NS_PER_S)};
    c->cond_waiters++;
    ddl__lock_by_mutex(c);
    pthread_cond_timedwait(&c->changed, &c->lock, &at);
    c->cond_waiters--;
}

/* What a wait is for. done is asked after each event. tick runs every 10 ms or so: deadlines, stall reports. */
typedef struct ddl__wait {
    bool (*done)(ddl_context *c, void *arg);
    void (*tick)(ddl_context *c, void *arg, uint64_t now);
    int32_t (*expect)(ddl_context *c, void *arg); /* may be NULL */
    void *arg;
    uint64_t deadline;
} ddl__wait;

/* How many looks at memory come before this core is given away. A look that asks the kernel is as dear as that. */
static int32_t ddl__spin_limit(const ddl_context *c, int32_t expect) {
    const ddl__endpoint *e = expect < 0 ? NULL : c->links[expect].endpoint;
    bool cheap = c->natives != NULL || (e != NULL && (e->table->flags & DDL_TRANSPORT_CHEAP_PROGRESS) != 0);
    if (ddl__lock_is_wanted(c) || c->yielded_long || (!cheap && ddl__is_crowded(c))) {
        return 1;
    }
    if (!ddl__is_crowded(c)) {
        return cheap ? DDL__SPINS_ALONE : DDL__SPINS_CALLS;
    }
    return ddl__shares_core(c, expect) ? 1 : DDL__SPINS_CROWDED;
}

/* How many empty polls come before sleep; all looks at memory until the core is given away are one. */
static int32_t ddl__poll_limit(const ddl_context *c, int32_t missing) {
    if (c->yielded_long && !ddl__is_excused(c, missing)) {
        return c->sleeps_at_once > 0 ? 1 : DDL__POLLS_YIELDED;
    }
    return ddl__is_crowded(c) ? DDL__POLLS_CROWDED : DDL__POLLS_ALONE;
}

/* Looks where the expected rank writes into memory, and nowhere else, for about as long as its answer takes when it
 * comes at once, and while what it sends is coming. The lock is kept: nobody else polls meanwhile. */
static bool ddl__wait_shortly(ddl_context *c, const ddl__wait *w) {
    int32_t expect = w->expect(c, w->arg);
    const ddl__endpoint *e = expect < 0 ? NULL : c->links[expect].endpoint;
    if (e == NULL || (e->table->flags & DDL_TRANSPORT_CHEAP_PROGRESS) == 0 || c->polling || c->natives != NULL) {
        return false;
    }
    int32_t limit = ddl__spin_limit(c, expect);
    for (int32_t looks = 0, empty = 0; empty < limit && looks < DDL__LOOKS_SHORTLY; looks++) {
        int32_t events = e->table->progress(e->self, expect);
        if (events != 0 && w->done(c, w->arg)) {
            return true;
        }
        empty = events != 0 ? 0 : empty + 1;
    }
    return false;
}

/* Polls until it is done, its deadline has passed or the context is aborted. Returns done. What yields cost in time is
 * bounded: after a long one deadlines and peers are looked at, and no other is excused before this thread has slept. */
static bool ddl__poll_until(ddl_context *c, const ddl__wait *w) {
    int32_t empty = 0, spins = 0;
    bool took_long = false, may_excuse = true;
    c->page_doing = NULL;
    for (uint32_t round = 1;; round++) {
        int32_t expect = w->expect != NULL ? w->expect(c, w->arg) : -1;
        may_excuse = may_excuse && !took_long;
        int32_t events = ddl__poll(c, expect), missing = may_excuse ? ddl__natives_miss(c) : -1;
        int32_t looks = ddl__spin_limit(c, expect), limit = ddl__poll_limit(c, missing);
        ddl__run_pumps(c);
        if (w->done(c, w->arg)) {
            return true;
        }
        spins = events > 0 ? 0 : spins + 1;
        if (spins > 0 && spins % looks != 0) {
            continue;
        }
        empty = events > 0 ? 0 : empty + (looks == DDL__SPINS_CALLS ? looks : 1);
        if (!took_long && events > 0 && round % 256 != 0) {
            took_long = ddl__lock_is_wanted(c) && ddl__give_way(c, missing);
            continue;
        }
        if (!took_long && empty < limit && empty % 64 != 0) {
            took_long = ddl__give_way(c, missing);
            continue;
        }
        took_long = false;
        uint64_t now = ddl__now_ns();
        ddl__look(c, now);
        w->tick(c, w->arg, now);
        if (w->done(c, w->arg)) {
            return true;
        }
        if (now >= w->deadline) {
            return false;
        }
        if (empty >= limit) {
            c->sleeps_at_once -= c->sleeps_at_once > 0;
            ddl__sleep(c, now, w->deadline);
            /* Nothing there: back to sleep soon, an idle rank costs nothing. */
            empty = DDL__MAX(limit - DDL__POLLS_AFTER_SLEEP, 0);
            may_excuse = true;
        } else if (events == 0 || round % 256 == 0) {
            took_long = ddl__give_way(c, missing);
        }
    }
}

/* Waits, as the poller or behind it. The lock is held before and after, not while sleeping. */
static bool ddl__wait_for(ddl_context *c, const ddl__wait *w) {
    while (!w->done(c, w->arg)) {
        if (!c->polling) {
            c->polling = true;
            bool done = ddl__poll_until(c, w);
            ddl__place_leave(c);
            c->polling = false;
            ddl__changed(c); /* another takes over */
            return done;
        }
        ddl__wait_changed(c, w->deadline);
        uint64_t now = ddl__now_ns();
        w->tick(c, w->arg, now);
        if (!w->done(c, w->arg) && now >= w->deadline) {
            return false;
        }
    }
    return true;
}

static bool ddl__notes_gone(ddl_context *c, void *arg) {
    (void)arg;
    return c->notes_out == 0 || c->finalized;
}

static void ddl__no_tick(ddl_context *c, void *arg, uint64_t now) {
    (void)c;
    (void)arg;
    (void)now;
}

/* Waits until control messages have left: what others depend on must not stay behind when the caller computes. Those to
 * ranks that do not take them stay behind. */
#define DDL__FLUSH_NS (100 * DDL__NS_PER_MS)
static void ddl__flush_notes(ddl_context *c) {
    ddl__wait w = {.done = ddl__notes_gone, .tick = ddl__no_tick, .deadline = ddl__now_ns() + DDL__FLUSH_NS};
    ddl__wait_for(c, &w);
}

/* The progress thread. Beside it, waits of user threads only sleep. */
static bool ddl__thread_done(ddl_context *c, void *arg) {
    (void)arg;
    return c->thread_stop;
}

static void ddl__thread_tick(ddl_context *c, void *arg, uint64_t now);

static void *ddl__thread_main(void *arg) {
    ddl_context *c = arg;
    ddl__wait w = {.done = ddl__thread_done, .tick = ddl__thread_tick, .deadline = DDL__NEVER};
    ddl__lock(c);
    while (!c->thread_stop) {
        ddl__wait_for(c, &w);
    }
    ddl__unlock(c);
    return NULL;
}

#endif /* DDL_MESH_WAIT_H */

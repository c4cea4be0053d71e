/* coll: the timeline of a job (DDL_TRACE). When it begins and when it ends every rank measures its clock against that
 * of rank 0, as NTP does: the shortest of some round trips, half of it each way. At the end every rank sends its
 * events, as text and in times of rank 0, one rank after the other; rank 0 writes one file. Who cannot reach rank 0 in
 * time writes a file of its own. Nothing of this fails an operation, and it takes a minute at most. */
#ifndef DDL_COLL_TIMELINE_H
#define DDL_COLL_TIMELINE_H

#include "../p2p/p2p.h"
#include "../trace/json.h"
#include "../trace/links.h"

#include <fcntl.h>

enum {
    DDL__TAG_TRACE = INT32_MIN + 0x50000001,
    DDL__CLOCK_ROUNDS = 10,
    DDL__TRACE_LIMIT_MS = 60000, /* for all that happens at the end */
    DDL__TRACE_SUM_BYTES = 32
};

/* One message of ddl's own, blocking. out_bytes: what came; may be NULL. */
static ddl_status ddl__timeline_move(ddl_context *c, int32_t peer, bool send, void *data, int64_t bytes,
                                     int64_t *out_bytes) {
    ddl_transfer t = {send, ddl_tensor_1d(data, DDL_U8, bytes), peer, DDL__TAG_TRACE};
    ddl_request *r = NULL;
    ddl_info info = {0};
    DDL__TRY(ddl__p2p_make(c->world, &t, &r));
    ddl__p2p_start(c, r);
    ddl__wait_requests(c, &r, 1, false);
    ddl_status status = ddl__request_report(&r, &info);
    if (out_bytes != NULL) {
        *out_bytes = info.count;
    }
    return status;
}

/* >>clocks */

/* Rank 0's side: tells its clock whenever it is asked. */
static ddl_status ddl__clock_serve(ddl_context *c, int32_t peer, uint64_t base_ns) {
    for (int32_t i = 0; i < DDL__CLOCK_ROUNDS; i++) {
        uint8_t answer[16] = {0};
        DDL__TRY(ddl__timeline_move(c, peer, false, answer, 1, NULL));
        ddl__store_le64(answer, ddl__now_ns());
        ddl__store_le64(answer + 8, base_ns);
        DDL__TRY(ddl__timeline_move(c, peer, true, answer, sizeof answer, NULL));
    }
    return DDL_OK;
}

static ddl_status ddl__clock_ask(ddl_context *c, ddl__trace *t, ddl__trace_offset *out) {
    out->error_ns = INT64_MAX;
    for (int32_t i = 0; i < DDL__CLOCK_ROUNDS; i++) {
        uint8_t answer[16] = {0};
        uint64_t start = ddl__now_ns();
        DDL__TRY(ddl__timeline_move(c, 0, true, answer, 1, NULL));
        DDL__TRY(ddl__timeline_move(c, 0, false, answer, sizeof answer, NULL));
        int64_t half = (int64_t)(ddl__now_ns() - start) / 2;
        if (half < out->error_ns) {
            *out = (ddl__trace_offset){start + (uint64_t)half,
                                       (int64_t)(ddl__load_le64(answer) - (start + (uint64_t)half)), half};
        }
        t->base_ns = ddl__load_le64(answer + 8);
    }
    return DDL_OK;
}

/* All ranks call it, when the job begins. Errors: of the messages. */
static ddl_status ddl__timeline_begin(ddl_context *c) {
    ddl__trace *t = c->trace;
    c->trace = NULL; /* these messages are not the program's */
    ddl_status status = DDL_OK;
    for (int32_t r = 1; t != NULL && t->together && c->rank == 0 && status == DDL_OK && r < c->world_size; r++) {
        status = ddl__clock_serve(c, r, t->base_ns);
    }
    if (t != NULL && t->together && c->rank != 0) {
        status = ddl__clock_ask(c, t, &t->offsets[0]);
    }
    if (t != NULL && c->rank == 0 && truncate(c->settings.trace, 0) != 0 && errno != EINVAL) { /* of pipes, devices */
        ddl__log(&c->base, DDL_LOG_WARN, "cannot empty %.400s of DDL_TRACE: %s. Until the end it is of an earlier job",
                 c->settings.trace, strerror(errno));
    }
    if (t != NULL) {
        t->count = t->next = 0; /* what ddl_init did */
        t->together = t->together && c->world_size > 1;
    }
    c->trace = t;
    return status;
}

/* >>files */

static ddl_status ddl__timeline_to_file(void *to, const char *text, size_t bytes) {
    int fd = *(int *)to;
    while (bytes > 0) {
        ssize_t n = write(fd, text, bytes);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return DDL_ERR_SYSTEM;
        }
        text += n;
        bytes -= (size_t)n;
    }
    return DDL_OK;
}

static ddl_status ddl__timeline_to_rank_0(void *to, const char *text, size_t bytes) {
    return ddl__timeline_move(to, 0, true, (void *)(uintptr_t)text, (int64_t)bytes, NULL);
}

static const char *ddl__timeline_kind(int32_t kind) { return ddl__kind_name((ddl_kind)kind); }

static int ddl__timeline_open(const char *path) { return open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666); }

static void ddl__timeline_close(ddl_context *c, ddl__sink *sink, int fd, const char *path) {
    ddl__sink_add(sink, "\n]}\n");
    ddl__sink_flush(sink);
    bool closed = close(fd) == 0;
    if (sink->status != DDL_OK || !closed) {
        ddl__log(&c->base, DDL_LOG_WARN,
                 "the timeline could not be written to %.400s of DDL_TRACE: %s. What is there is cut short. The job "
                 "itself is not concerned",
                 path, strerror(sink->status != DDL_OK ? sink->error : errno));
    }
}

static void ddl__timeline_head(ddl__sink *sink, int32_t world_size) {
    ddl__sink_add(sink, "{\"displayTimeUnit\":\"ns\",\"otherData\":{\"ranks\":%d},\"traceEvents\":[", world_size);
}

/* This rank alone: FILE.rank3. */
static void ddl__timeline_alone(ddl_context *c, ddl__trace *t, ddl__sink *sink) {
    char path[4200];
    snprintf(path, sizeof path, "%.4096s.rank%d", c->settings.trace, c->rank);
    int fd = ddl__timeline_open(path);
    if (fd < 0) {
        ddl__log(&c->base, DDL_LOG_WARN, "the timeline of this rank is lost: cannot open %.400s: %s", path,
                 strerror(errno));
        return;
    }
    ddl__log(&c->base, DDL_LOG_WARN,
             "not all ranks could bring their events to rank 0, so the timeline of this one is "
             "in %.400s",
             path);
    *sink = (ddl__sink){.write = ddl__timeline_to_file, .to = &fd};
    ddl__timeline_head(sink, c->world_size);
    ddl__trace_write(t, sink, c->rank, c->links[c->rank].host_name, true, ddl__timeline_kind);
    ddl__timeline_close(c, sink, fd, path);
}

/* >>together */

static void ddl__sum_write(const ddl__trace_sum *s, uint8_t out[DDL__TRACE_SUM_BYTES]) {
    const uint64_t words[4] = {s->ops, s->lost, s->communicating_ns, s->exposed_ns};
    for (int i = 0; i < 4; i++) {
        ddl__store_le64(out + 8 * i, words[i]);
    }
}

static void ddl__sum_read(const uint8_t in[DDL__TRACE_SUM_BYTES], ddl__trace_sum *out) {
    *out =
        (ddl__trace_sum){ddl__load_le64(in), ddl__load_le64(in + 8), ddl__load_le64(in + 16), ddl__load_le64(in + 24)};
}

/* For the summary: sides of transfers, of all ranks on rank 0. */
typedef struct ddl__timeline_links {
    ddl__link_side *sides;
    uint64_t count, each; /* each: at most so many of one rank */
} ddl__timeline_links;

static void ddl__link_side_turn(ddl__link_side *s) {
    uint8_t bytes[8 * DDL__LINK_WORDS];
    const uint64_t words[DDL__LINK_WORDS] = {
        s->link, s->group, s->number, s->bytes, (uint64_t)s->start_ns, (uint64_t)s->end_ns};
    for (int i = 0; i < DDL__LINK_WORDS; i++) {
        ddl__store_le64(bytes + 8 * i, words[i]);
    }
    memcpy(s, bytes, sizeof bytes);
}

/* One rank's sides as they travel: words of the little end first, which is its own inverse. */
static ddl_status ddl__timeline_sides(ddl_context *c, int32_t peer, bool send, ddl__timeline_links *l) {
    _Static_assert(sizeof(ddl__link_side) == 8 * DDL__LINK_WORDS, "a side travels as its words");
    ddl__link_side *s = l->sides + l->count;
    int64_t room = (int64_t)(l->each * sizeof *s), bytes = room;
    if (send) {
        for (uint64_t i = 0; i < l->count; i++) {
            ddl__link_side_turn(&l->sides[i]);
        }
        return ddl__timeline_move(c, peer, true, l->sides, (int64_t)(l->count * sizeof *s), NULL);
    }
    DDL__TRY(ddl__timeline_move(c, peer, false, s, room, &bytes));
    for (uint64_t i = 0; i < (uint64_t)bytes / sizeof *s; i++) {
        ddl__link_side_turn(&s[i]);
    }
    l->count += (uint64_t)bytes / sizeof *s;
    return DDL_OK;
}

/* Rank 0: what one rank has. Its text goes into the file as it is. */
static ddl_status ddl__timeline_fetch(ddl_context *c, ddl__trace *t, int32_t rank, ddl__sink *sink, char *piece,
                                      ddl__trace_sum *out_sum, ddl__timeline_links *links) {
    uint8_t sum[DDL__TRACE_SUM_BYTES];
    DDL__TRY(ddl__clock_serve(c, rank, t->base_ns));
    DDL__TRY(ddl__timeline_move(c, rank, false, sum, sizeof sum, NULL));
    ddl__sum_read(sum, out_sum);
    DDL__TRY(ddl__timeline_sides(c, rank, false, links));
    for (;;) {
        int64_t bytes = 0;
        DDL__TRY(ddl__timeline_move(c, rank, false, piece, DDL__TRACE_BUFFER, &bytes));
        if (bytes == 0) {
            return DDL_OK;
        }
        ddl__sink_flush(sink);
        ddl__sink_write(sink, piece, (size_t)bytes);
    }
}

static ddl_status ddl__timeline_send(ddl_context *c, ddl__trace *t, const ddl__trace_sum *sum, ddl__sink *sink,
                                     ddl__timeline_links *links) {
    uint8_t bytes[DDL__TRACE_SUM_BYTES];
    *sink = (ddl__sink){.write = ddl__timeline_to_rank_0, .to = c};
    ddl__sum_write(sum, bytes);
    DDL__TRY(ddl__clock_ask(c, t, &t->offsets[1]));
    DDL__TRY(ddl__timeline_move(c, 0, true, bytes, sizeof bytes, NULL));
    links->count = ddl__link_sides(t, c->rank, links->sides, links->each);
    DDL__TRY(ddl__timeline_sides(c, 0, true, links));
    ddl__trace_write(t, sink, c->rank, c->links[c->rank].host_name, false, ddl__timeline_kind);
    ddl__sink_flush(sink);
    return sink->status != DDL_OK ? sink->status : ddl__timeline_move(c, 0, true, bytes, 0, NULL);
}

/* Which link is slow, as a clause. */
static void ddl__timeline_slowest(const ddl__timeline_links *l, uint64_t job_ns, ddl__text *text) {
    ddl__link_verdict v = ddl__link_judge(l->sides, l->count, job_ns);
    if (v.links < 2) {
        ddl__text_add(text, "; links were not judged: DDL_TRACE_STEPS=1 records what each carries");
    } else if (v.link == UINT64_MAX) {
        ddl__text_add(text, "; no link stands out (%llu transfers on %llu links)", (unsigned long long)v.transfers,
                      (unsigned long long)v.links);
    } else {
        ddl__text_add(text,
                      "; the slowest link is that from rank %d to rank %d: a transfer takes %.3f ms once both are "
                      "ready, on the median link as many bytes take %.3f ms",
                      (int)(v.link >> 32), (int)(uint32_t)v.link, v.median_s * 1e3, v.usual_s * 1e3);
    }
}

/* The slowest rank is the one that waits least in communication: the others wait for it. */
static void ddl__timeline_summary(ddl_context *c, const ddl__trace_sum *sums, const ddl__timeline_links *links,
                                  uint64_t seconds_ns) {
    int32_t ranks = 0, slowest = -1;
    double communicating = 0, exposed = 0;
    for (int32_t r = 0; r < c->world_size; r++) {
        if (sums[r].ops == 0) {
            continue;
        }
        ranks++;
        communicating += (double)sums[r].communicating_ns / 1e9;
        exposed += (double)DDL__MIN(sums[r].exposed_ns, sums[r].communicating_ns) / 1e9;
        slowest = slowest < 0 || sums[r].communicating_ns < sums[slowest].communicating_ns ? r : slowest;
    }
    if (ranks == 0) {
        ddl__log(&c->base, DDL_LOG_WARN, "timeline: nothing happened in %.3f s", (double)seconds_ns / 1e9);
        return;
    }
    char link[240] = "";
    ddl__text text = {link, sizeof link, 0};
    ddl__timeline_slowest(links, seconds_ns, &text);
    ddl__log(
        &c->base, DDL_LOG_WARN,
        "timeline: %.3f s; communication of a rank on average %.3f s, of which %.3f s hidden and %.3f s exposed (the "
        "program waited); the others wait for rank %d: it spends %.3f s in communication%s",
        (double)seconds_ns / 1e9, communicating / ranks, (communicating - exposed) / ranks, exposed / ranks, slowest,
        (double)sums[slowest].communicating_ns / 1e9, link);
}

/* Rank 0: its own events, then those of the others, one after the other. */
static void ddl__timeline_collect(ddl_context *c, ddl__trace *t, ddl__trace_sum *sums, ddl__sink *sink, char *piece,
                                  ddl__timeline_links *links) {
    uint64_t start = ddl__now_ns(), limit = ddl__deadline(start, c->world->timeout_ms);
    int fd = ddl__timeline_open(c->settings.trace);
    ddl__text missing = {piece, DDL__TRACE_BUFFER / 2, 0};
    *sink = (ddl__sink){.write = ddl__timeline_to_file, .to = &fd, .status = fd < 0 ? DDL_ERR_SYSTEM : DDL_OK};
    if (fd < 0) {
        ddl__log(&c->base, DDL_LOG_WARN, "the timeline is lost: cannot open %.400s of DDL_TRACE: %s", c->settings.trace,
                 strerror(errno));
    }
    ddl__timeline_head(sink, c->world_size);
    links->count = ddl__link_sides(t, 0, links->sides, links->each);
    ddl__trace_write(t, sink, 0, c->links[0].host_name, true, ddl__timeline_kind);
    for (int32_t r = 1; t->together && r < c->world_size; r++) {
        uint64_t now = ddl__now_ns();
        c->world->timeout_ms = now < limit ? (int64_t)((limit - now) / DDL__NS_PER_MS) + 1 : 1;
        if (ddl__timeline_fetch(c, t, r, sink, piece + DDL__TRACE_BUFFER / 2, &sums[r], links) != DDL_OK) {
            ddl__text_add(&missing, "%s%d", missing.used > 0 ? ", " : "", r);
        }
    }
    if (missing.used > 0) {
        ddl__log(&c->base, DDL_LOG_WARN, "the timeline lacks ranks %.400s: %s", piece, c->error.text);
    }
    if (fd >= 0) {
        ddl__timeline_close(c, sink, fd, c->settings.trace);
    }
    if (c->settings.trace_summary) {
        ddl__timeline_summary(c, sums, links, start - t->base_ns);
    }
}

/* This rank leaves in order: writes or sends what it has. Never fails; takes a minute at most. The context's lock is
 * held, and given away while it waits. */
static void ddl__timeline_end(ddl_context *c) {
    ddl__trace *t = c->trace;
    if (t == NULL || !c->joined) {
        return;
    }
    c->trace = NULL; /* what follows is not the program's */
    size_t world = (size_t)c->world_size;
    int64_t timeout_ms = c->world->timeout_ms;
    ddl__timeline_links links = {.each = DDL__MAX(DDL__LINK_SIDES / (uint64_t)world, 1)};
    links.sides = ddl__alloc_array(&c->base, (size_t)links.each * (c->rank == 0 ? world : 1), sizeof *links.sides);
    ddl__trace_sum *sums = ddl__alloc_array(&c->base, world, sizeof *sums);
    ddl__sink *sink = ddl__alloc(&c->base, sizeof *sink);
    char *piece = ddl__alloc(&c->base, 2 * DDL__TRACE_BUFFER);
    if (links.sides == NULL || sums == NULL || sink == NULL || piece == NULL) {
        ddl__log(&c->base, DDL_LOG_WARN, "the timeline is lost: no memory to write it");
    } else {
        c->world->timeout_ms = timeout_ms > 0 ? DDL__MIN(timeout_ms, DDL__TRACE_LIMIT_MS) : DDL__TRACE_LIMIT_MS;
        sums[c->rank] = ddl__trace_summed(t);
        bool whole = t->together && !c->aborted;
        if (c->rank == 0) {
            t->together = whole;
            ddl__timeline_collect(c, t, sums, sink, piece, &links);
        } else if (!whole || ddl__timeline_send(c, t, &sums[c->rank], sink, &links) != DDL_OK) {
            ddl__timeline_alone(c, t, sink);
        }
        c->world->timeout_ms = timeout_ms;
    }
    ddl__free(&c->base, piece);
    ddl__free(&c->base, sink);
    ddl__free(&c->base, sums);
    ddl__free(&c->base, links.sides);
    ddl__trace_free(&c->base, t);
}

/* At the start, so that a wrong path is known then. Rank 0 writes the file of all. */
static ddl_status ddl__timeline_make(ddl_context *c) {
    if (c->settings.trace == NULL) {
        return DDL_OK;
    }
    int fd = c->rank == 0 ? open(c->settings.trace, O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666) : -1;
    if (c->rank == 0 && fd < 0) {
        return ddl__error(c, DDL_ERR_CONFIG, "ddl_init: cannot write %.400s of DDL_TRACE: %s", c->settings.trace,
                          strerror(errno));
    }
    if (fd >= 0) {
        close(fd);
    }
    c->trace = ddl__trace_new(&c->base, (uint64_t)c->settings.trace_events);
    if (c->trace == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM,
                          "ddl_init: no memory for the %lld events of DDL_TRACE; DDL_TRACE_EVENTS takes less",
                          (long long)c->settings.trace_events);
    }
    c->trace->steps = c->settings.trace_steps;
    return DDL_OK;
}

DDL_API ddl_status ddl_trace_begin(ddl_context *context, const char *name) {
    DDL__TRY(ddl__enter(context));
    ddl_status status = name != NULL ? DDL_OK : ddl__error(context, DDL_ERR_ARG, "ddl_trace_begin: name is NULL");
    if (status == DDL_OK && context->trace != NULL) {
        ddl__trace_span_begin(context->trace, name);
    }
    ddl__unlock(context);
    return status;
}

DDL_API ddl_status ddl_trace_end(ddl_context *context) {
    DDL__TRY(ddl__enter(context));
    ddl_status status = DDL_OK;
    if (context->trace != NULL && !ddl__trace_span_end(context->trace)) {
        status = ddl__error(context, DDL_ERR_STATE, "ddl_trace_end: no ddl_trace_begin is open");
    }
    ddl__unlock(context);
    return status;
}

#endif /* DDL_COLL_TIMELINE_H */

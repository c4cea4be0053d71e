/* trace, second part: events as text in the Trace Event Format, which Perfetto and chrome://tracing read: one process
 * per rank, in it one thread per group, for messages, for waits, for the program's own spans and so on. Events of a
 * thread must nest, so what overlaps goes to another lane of it. (Trace Event Format, Google, 2016.) */
#ifndef DDL_TRACE_JSON_H
#define DDL_TRACE_JSON_H

#include "ring.h"

enum { DDL__TRACE_LANES = 64, DDL__TRACE_BUFFER = 65536 };

/* In the order in which they are shown; groups are between. */
enum ddl__trace_tracks {
    DDL__TRACK_PROGRAM,
    DDL__TRACK_BUCKETS,
    DDL__TRACK_CODES,
    DDL__TRACK_WAITS,
    DDL__TRACK_GROUPS,
    DDL__TRACK_STEPS = DDL__TRACK_GROUPS + DDL__TRACE_GROUPS,
    DDL__TRACK_MESSAGES,
    DDL__TRACE_TRACKS
};

/* Takes text in pieces. After the first error nothing more is written. */
typedef struct ddl__sink {
    ddl_status (*write)(void *to, const char *text, size_t bytes);
    void *to;
    ddl_status status;
    int error; /* errno of that first error */
    size_t used;
    char buffer[DDL__TRACE_BUFFER];
} ddl__sink;

static void ddl__sink_write(ddl__sink *s, const char *text, size_t bytes) {
    if (s->status == DDL_OK && bytes > 0) {
        s->status = s->write(s->to, text, bytes);
        s->error = errno;
    }
}

static void ddl__sink_flush(ddl__sink *s) {
    ddl__sink_write(s, s->buffer, s->used);
    s->used = 0;
}

static void __attribute__((format(printf, 2, 3))) ddl__sink_add(ddl__sink *s, const char *format, ...) {
    char line[1024];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    size_t bytes = DDL__MIN((size_t)DDL__MAX(n, 0), sizeof line - 1);
    if (s->used + bytes > sizeof s->buffer) {
        ddl__sink_flush(s);
    }
    memcpy(s->buffer + s->used, line, bytes);
    s->used += bytes;
}

/* What JSON allows between quotes. Names of groups and spans are the program's. */
static const char *ddl__json_text(const char *text, char *out, size_t cap) {
    size_t used = 0;
    for (const unsigned char *p = (const unsigned char *)text; *p != 0 && used + 8 < cap; p++) {
        if (*p == '"' || *p == '\\') {
            out[used++] = '\\';
            out[used++] = (char)*p;
        } else if (*p < 32 || *p > 126) {
            used += (size_t)snprintf(out + used, cap - used, "\\u%04x", *p);
        } else {
            out[used++] = (char)*p;
        }
    }
    out[used] = 0;
    return out;
}

static int32_t ddl__trace_track(const ddl__trace_event *e) {
    static const uint8_t tracks[] = {DDL__TRACK_GROUPS,  DDL__TRACK_MESSAGES, DDL__TRACK_MESSAGES, DDL__TRACK_WAITS,
                                     DDL__TRACK_PROGRAM, DDL__TRACK_STEPS,    DDL__TRACK_BUCKETS,  DDL__TRACK_CODES};
    return tracks[e->what] + (e->what == DDL__TRACE_OP ? e->group : 0);
}

/* Longer ones first where two begin at once: they hold the others. */
static int ddl__trace_order(const void *a, const void *b) {
    const ddl__trace_event *x = a, *y = b;
    return x->start_ns != y->start_ns ? (x->start_ns > y->start_ns) - (x->start_ns < y->start_ns)
                                      : (x->end_ns < y->end_ns) - (x->end_ns > y->end_ns);
}

typedef struct ddl__json {
    const ddl__trace *trace;
    ddl__sink *sink;
    int32_t rank;
    bool first;
    const char *(*kind_name)(int32_t kind);
    uint64_t crowded; /* events that were left out, as too many happened at once */
    uint64_t busy_ns[DDL__TRACE_TRACKS][DDL__TRACE_LANES]; /* until when */
    bool named[DDL__TRACE_TRACKS][DDL__TRACE_LANES];
} ddl__json;

static void ddl__json_begin(ddl__json *j) {
    ddl__sink_add(j->sink, "%s\n", j->first ? "" : ",");
    j->first = false;
}

static void ddl__json_name(ddl__json *j, int32_t track, int32_t lane) {
    static const char *const others[] = {"program", "buckets", "compression", "waits"};
    char text[400];
    int32_t group = track - DDL__TRACK_GROUPS;
    bool of_group = group >= 0 && group < DDL__TRACE_GROUPS - 1;
    const char *name = group < 0                          ? others[track]
                       : of_group                         ? j->trace->groups[group].name
                       : group == DDL__TRACE_GROUPS - 1   ? "other groups"
                       : track == DDL__TRACK_STEPS        ? "steps"
                                                          : "messages";
    int32_t thread = track * DDL__TRACE_LANES + lane;
    ddl__json_begin(j);
    ddl__sink_add(j->sink, "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s%s\"}}",
                  j->rank, thread, of_group ? "group " : "",
                  ddl__json_text(name, text, sizeof text));
    ddl__json_begin(j);
    ddl__sink_add(j->sink,
                  "{\"ph\":\"M\",\"name\":\"thread_sort_index\",\"pid\":%d,\"tid\":%d,\"args\":{\"sort_index\":%d}}",
                  j->rank, thread, thread);
}

/* Its thread. Spans nest by themselves, as they end in the order of a stack. -1: all lanes are taken. */
static int32_t ddl__json_lane(ddl__json *j, int32_t track, const ddl__trace_event *e) {
    int32_t lane = 0;
    while (e->what != DDL__TRACE_SPAN && lane < DDL__TRACE_LANES && j->busy_ns[track][lane] > e->start_ns) {
        lane++;
    }
    if (lane == DDL__TRACE_LANES) {
        return -1;
    }
    j->busy_ns[track][lane] = e->end_ns;
    if (!j->named[track][lane]) {
        j->named[track][lane] = true;
        ddl__json_name(j, track, lane);
    }
    return track * DDL__TRACE_LANES + lane;
}

/* Microseconds, exact to the nanosecond. */
static void ddl__json_time(ddl__json *j, const char *name, int64_t ns) {
    ddl__sink_add(j->sink, "\"%s\":%s%lld.%03lld,", name, ns < 0 ? "-" : "", (long long)(ns < 0 ? -ns : ns) / 1000,
                  (long long)(ns < 0 ? -ns : ns) % 1000);
}

/* What there is to say of an event beside its name and times. */
static void ddl__json_details(ddl__json *j, const ddl__trace_event *e) {
    ddl__sink *s = j->sink;
    switch ((ddl__trace_what)e->what) {
    case DDL__TRACE_OP:
        ddl__sink_add(s, "\"operation\":%u,\"algorithm\":\"%s\",\"bytes\":%lld,\"status\":\"%s\"", e->sequence,
                      e->algorithm != NULL ? e->algorithm : "?", (long long)e->bytes,
                      ddl_status_name((ddl_status)e->status));
        if (e->peer >= 0) {
            ddl__sink_add(s, ",\"last came rank\":%d", e->peer);
        }
        return;
    case DDL__TRACE_SEND:
    case DDL__TRACE_RECV:
        ddl__sink_add(s, "\"peer\":%d,\"bytes\":%lld", e->peer, (long long)e->bytes);
        return;
    case DDL__TRACE_WAIT:
        if (e->peer >= 0) {
            ddl__sink_add(s, "\"for rank\":%d", e->peer);
        }
        return;
    case DDL__TRACE_STEP: {
        char text[400];
        bool known = e->group < DDL__TRACE_GROUPS - 1;
        ddl__sink_add(s, "\"group\":\"%s\",\"operation\":%u,\"algorithm\":\"%s\",\"bytes\":%lld",
                      known ? ddl__json_text(j->trace->groups[e->group].name, text, sizeof text) : "?", e->sequence,
                      e->algorithm, (long long)e->bytes);
        if (e->peer >= 0) {
            ddl__sink_add(s, ",\"peer\":%d", e->peer);
        }
        return;
    }
    case DDL__TRACE_BUCKET:
        ddl__sink_add(s, "\"bucket\":%u,\"operation\":\"%s\",\"plan\":\"%s\",\"tensors\":%d,\"bytes\":%lld",
                      e->sequence, e->kind == 0 ? "push and pull" : j->kind_name(e->kind), e->algorithm, e->peer,
                      (long long)e->bytes);
        return;
    case DDL__TRACE_CODE:
        ddl__sink_add(s, "\"compression\":\"%s\",\"tensor\":%u,\"bytes\":%lld,\"compressed bytes\":%lld", e->algorithm,
                      e->sequence, (long long)e->bytes, (long long)e->coded_bytes);
        return;
    case DDL__TRACE_SPAN:
        return;
    }
}

static const char *ddl__json_title(const ddl__json *j, const ddl__trace_event *e, char *text, size_t cap) {
    static const char *const steps[] = {"", "send", "receive", "receive and reduce", "copy", "reduce", "native",
                                        "move"};
    switch ((ddl__trace_what)e->what) {
    case DDL__TRACE_OP:
        return j->kind_name(e->kind);
    case DDL__TRACE_SEND:
        return "send";
    case DDL__TRACE_RECV:
        return "recv";
    case DDL__TRACE_STEP:
        return steps[e->kind];
    case DDL__TRACE_CODE:
        return e->kind == 0 ? "compress" : "decompress";
    default:
        return ddl__json_text(e->name, text, cap);
    }
}

static void ddl__json_event(ddl__json *j, const ddl__trace_event *e) {
    char text[8 * DDL__TRACE_NAME];
    int32_t thread = ddl__json_lane(j, ddl__trace_track(e), e);
    if (thread < 0) {
        j->crowded++;
        return;
    }
    ddl__json_begin(j);
    ddl__sink_add(j->sink, "{\"ph\":\"X\",\"name\":\"%s\",\"pid\":%d,\"tid\":%d,",
                  ddl__json_title(j, e, text, sizeof text), j->rank, thread);
    int64_t start = ddl__trace_time(j->trace, e->start_ns), end = ddl__trace_time(j->trace, e->end_ns);
    ddl__json_time(j, "ts", start);
    ddl__json_time(j, "dur", DDL__MAX(end - start, 0)); /* in rank 0's time too, so that what nests here nests there */
    ddl__sink_add(j->sink, "\"args\":{");
    ddl__json_details(j, e);
    ddl__sink_add(j->sink, "}}");
}

/* All events of a rank, oldest first; the ring is sorted in place. first: no comma before the first. */
static void ddl__trace_write(ddl__trace *t, ddl__sink *sink, int32_t rank, const char *host, bool first,
                             const char *(*kind_name)(int32_t)) {
    ddl__json j = {.trace = t, .sink = sink, .rank = rank, .first = first, .kind_name = kind_name};
    uint64_t kept = DDL__MIN(t->count, t->capacity);
    char text[400];
    qsort(t->events, (size_t)kept, sizeof *t->events, ddl__trace_order);
    ddl__json_begin(&j);
    ddl__sink_add(sink, "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,\"args\":{\"name\":\"rank %d on %s\"}}",
                  rank, rank, ddl__json_text(host, text, sizeof text));
    for (uint64_t i = 0; i < kept; i++) {
        ddl__json_event(&j, &t->events[i]);
    }
    ddl__json_begin(&j);
    ddl__sink_add(sink,
                  "{\"ph\":\"M\",\"name\":\"ddl\",\"pid\":%d,\"args\":{\"events\":%llu,\"older events lost\":%llu,"
                  "\"left out as too many at once\":%llu,\"clock error ns\":%lld}}",
                  rank, (unsigned long long)(kept - j.crowded), (unsigned long long)(t->count - kept),
                  (unsigned long long)j.crowded, (long long)DDL__MAX(t->offsets[0].error_ns, t->offsets[1].error_ns));
}

#endif /* DDL_TRACE_JSON_H */

/* trace, second part: events as text in the Trace Event Format, which Perfetto and chrome://tracing read: one process
 * per rank, in it one thread per group, for messages, for waits and for the program's own spans. Events of a thread
 * must nest, so what overlaps goes to another lane of it. (Trace Event Format, Google, 2016.) */
#ifndef DDL_TRACE_JSON_H
#define DDL_TRACE_JSON_H

#include "ring.h"

enum { DDL__TRACE_LANES = 8, DDL__TRACE_TRACKS = DDL__TRACE_GROUPS + 3, DDL__TRACE_BUFFER = 65536 };

/* Takes text in pieces. After the first error nothing more is written. */
typedef struct ddl__sink {
    ddl_status (*write)(void *to, const char *text, size_t bytes);
    void *to;
    ddl_status status;
    size_t used;
    char buffer[DDL__TRACE_BUFFER];
} ddl__sink;

static void ddl__sink_flush(ddl__sink *s) {
    if (s->status == DDL_OK && s->used > 0) {
        s->status = s->write(s->to, s->buffer, s->used);
    }
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
    return e->what == DDL__TRACE_OP     ? e->group
           : e->what <= DDL__TRACE_RECV ? DDL__TRACE_GROUPS
           : e->what == DDL__TRACE_WAIT ? DDL__TRACE_GROUPS + 1
                                        : DDL__TRACE_GROUPS + 2;
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
    uint64_t busy_ns[DDL__TRACE_TRACKS][DDL__TRACE_LANES]; /* until when */
    bool named[DDL__TRACE_TRACKS][DDL__TRACE_LANES];
} ddl__json;

static void ddl__json_begin(ddl__json *j) {
    ddl__sink_add(j->sink, "%s\n", j->first ? "" : ",");
    j->first = false;
}

static void ddl__json_name(ddl__json *j, int32_t track, int32_t lane) {
    static const char *const others[] = {"messages", "waits", "program"};
    char text[400];
    const char *name = track >= DDL__TRACE_GROUPS       ? others[track - DDL__TRACE_GROUPS]
                       : track == DDL__TRACE_GROUPS - 1 ? "other groups"
                                                        : j->trace->groups[track].name;
    int32_t thread = track * DDL__TRACE_LANES + lane;
    ddl__json_begin(j);
    ddl__sink_add(j->sink, "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s%s\"}}",
                  j->rank, thread, track < DDL__TRACE_GROUPS - 1 ? "group " : "",
                  ddl__json_text(name, text, sizeof text));
    ddl__json_begin(j);
    ddl__sink_add(j->sink,
                  "{\"ph\":\"M\",\"name\":\"thread_sort_index\",\"pid\":%d,\"tid\":%d,\"args\":{\"sort_index\":%d}}",
                  j->rank, thread, (track + 3) % DDL__TRACE_TRACKS * DDL__TRACE_LANES + lane);
}

/* Spans nest by themselves, as they end in the order of a stack. */
static int32_t ddl__json_lane(ddl__json *j, int32_t track, const ddl__trace_event *e) {
    int32_t lane = 0;
    while (e->what != DDL__TRACE_SPAN && lane < DDL__TRACE_LANES - 1 && j->busy_ns[track][lane] > e->start_ns) {
        lane++;
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

static void ddl__json_event(ddl__json *j, const ddl__trace_event *e) {
    char text[8 * DDL__TRACE_NAME];
    int32_t thread = ddl__json_lane(j, ddl__trace_track(e), e);
    const char *name = e->what == DDL__TRACE_OP     ? j->kind_name(e->kind)
                       : e->what == DDL__TRACE_SEND ? "send"
                       : e->what == DDL__TRACE_RECV ? "recv"
                                                    : ddl__json_text(e->name, text, sizeof text);
    ddl__json_begin(j);
    ddl__sink_add(j->sink, "{\"ph\":\"X\",\"name\":\"%s\",\"pid\":%d,\"tid\":%d,", name, j->rank, thread);
    ddl__json_time(j, "ts", ddl__trace_time(j->trace, e->start_ns));
    ddl__json_time(j, "dur", (int64_t)ddl__trace_length(e));
    ddl__sink_add(j->sink, "\"args\":{");
    if (e->what == DDL__TRACE_OP) {
        ddl__sink_add(j->sink, "\"operation\":%u,\"algorithm\":\"%s\",\"bytes\":%lld,\"status\":\"%s\"", e->sequence,
                      e->algorithm != NULL ? e->algorithm : "?", (long long)e->bytes,
                      ddl_status_name((ddl_status)e->status));
        if (e->peer >= 0) {
            ddl__sink_add(j->sink, ",\"last came rank\":%d", e->peer);
        }
    } else if (e->what <= DDL__TRACE_RECV) {
        ddl__sink_add(j->sink, "\"peer\":%d,\"bytes\":%lld", e->peer, (long long)e->bytes);
    }
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
    ddl__json_begin(&j);
    ddl__sink_add(sink,
                  "{\"ph\":\"M\",\"name\":\"ddl\",\"pid\":%d,\"args\":{\"events\":%llu,\"older events lost\":%llu,"
                  "\"clock error ns\":%lld}}",
                  rank, (unsigned long long)kept, (unsigned long long)(t->count - kept),
                  (long long)DDL__MAX(t->offsets[0].error_ns, t->offsets[1].error_ns));
    for (uint64_t i = 0; i < kept; i++) {
        ddl__json_event(&j, &t->events[i]);
    }
}

#endif /* DDL_TRACE_JSON_H */

/* ddl-info --attach PID --json: what attach.h tells, for machines. */
#ifndef DDL_TOOLS_ATTACH_JSON_H
#define DDL_TOOLS_ATTACH_JSON_H

static void json_group(const job *j, const seen *s, uint32_t slot) {
    const ddl__page_group *g = group_at(s, s->head, slot);
    uint64_t order = UINT64_MAX;
    char name[sizeof g->name];
    snprintf(name, sizeof name, "%.*s", (int)sizeof name - 1, g->name);
    json_open(NULL, '{');
    json_text("name", name);
    json_integer("rank", g->rank);
    json_integer("size", g->size);
    json_text("broken", g->broken < 0 ? ddl_status_name((ddl_status)g->broken) : NULL);
    json_open("operations", '[');
    const ddl__flight *r;
    for (int32_t i = 0; i < ATTACH_SHOWN && (r = record_before(s, slot, order)) != NULL; i++) {
        char line[300];
        ddl__text text = {line, sizeof line, 0};
        bool runs = r->status == DDL_IN_PROGRESS;
        describe_flight(s, g, r, &text);
        json_open(NULL, '{');
        json_integer("sequence", r->sequence);
        json_text("call", line);
        json_text("status", ddl_status_name((ddl_status)r->status));
        json_number("seconds", runs ? ago_s(j, r->start_ns)
                                    : r->end_ns > r->start_ns ? (double)(r->end_ns - r->start_ns) * 1e-9 : 0);
        json_number("ended_seconds_ago", runs ? 0 : ago_s(j, r->end_ns));
        json_close('}');
        order = r->order;
    }
    json_close(']');
    json_close('}');
}

static void json_links(const ddl__page *p) {
    static const char *const lives[] = {"alive", "missed", "has left", "dead"};
    json_open("links", '[');
    for (int32_t i = 0; p->stage != DDL__PAGE_JOINING && i < p->world_size; i++) {
        const ddl__page_link *l = &p->links[i];
        char transport[16] = "";
        if (i == p->rank) {
            continue;
        }
        snprintf(transport, sizeof transport, "%.15s", l->transport < DDL__ENDPOINTS_MAX ? p->transports[l->transport] : "");
        json_open(NULL, '{');
        json_integer("rank", i);
        json_text("life", l->life < 4 ? lives[l->life] : "?");
        json_text("transport", transport);
        json_integer("was_last", (int64_t)l->last);
        json_number("late_seconds", (double)l->late_ns * 1e-9);
        json_integer("large_messages", (int64_t)l->large_messages);
        json_integer("bytes_per_s", (int64_t)l->bytes_per_s);
        json_close('}');
    }
    json_close(']');
}

static void json_rank(const job *j, const seen *s) {
    char line[1200] = "";
    ddl__text text = {line, sizeof line, 0};
    describe_rank(j, s, &text);
    json_open(NULL, '{');
    json_integer("rank", s->head->rank);
    json_integer("pid", s->process.pid);
    json_text("process", process_text(s->process.state));
    json_text("does", line);
    json_bool("waits", s->waits);
    json_open("groups", '[');
    for (uint32_t slot = 0; slot < s->head->group_count; slot++) {
        if (group_at(s, s->head, slot) != NULL) {
            json_group(j, s, slot);
        }
    }
    json_close(']');
    json_links(s->head);
    json_close('}');
}

static void json_stragglers(const job *j) {
    blame b = slow_rank(j);
    ddl__slow_link l = slow_link(j);
    if (b.rank < 0) {
        json_text("slow_rank", NULL);
    } else {
        json_open("slow_rank", '{');
        json_integer("rank", b.rank);
        json_integer("was_last", (int64_t)b.times);
        json_number("late_seconds", (double)b.late_ns * 1e-9);
        json_close('}');
    }
    if (l.from < 0) {
        json_text("slow_link", NULL);
    } else {
        json_open("slow_link", '{');
        json_integer("from", l.from);
        json_integer("to", l.to);
        json_integer("bytes_per_s", (int64_t)l.bytes_per_s);
        json_integer("usual_bytes_per_s", (int64_t)l.usual);
        json_close('}');
    }
}

static void json_job(const job *j, int32_t waiting, const bool *cause) {
    const ddl__page *p = j->ranks[0].head;
    json_open(NULL, '{');
    json_integer("version", 1);
    json_text("job", p->job_name);
    json_integer("world_size", p->world_size);
    json_open("ranks", '[');
    for (int32_t i = 0; i < j->count; i++) {
        json_rank(j, &j->ranks[i]);
    }
    json_close(']');
    json_stragglers(j);
    json_integer("waiting", waiting);
    json_open("causes", '[');
    for (int32_t rank = 0; rank < p->world_size; rank++) {
        char line[1200] = "";
        ddl__text text = {line, sizeof line, 0};
        if (cause[rank]) {
            describe_cause(j, rank, &text);
            json_open(NULL, '{');
            json_integer("rank", rank);
            json_text("text", line);
            json_close('}');
        }
    }
    json_close(']');
    json_close('}');
}

/* The exit code. */
static int attach(const char *what, bool json) {
    job j = {.ranks = calloc(ATTACH_RANKS_MAX, sizeof *j.ranks)};
    bool found = j.ranks != NULL && find_job(what, &j);
    bool *cause = found ? calloc((size_t)j.ranks[0].head->world_size, sizeof *cause) : NULL;
    if (cause != NULL) {
        int32_t waiting = find_causes(&j, cause);
        (json ? json_job : print_job)(&j, waiting, cause);
    }
    for (int32_t i = 0; i < j.count; i++) {
        seen_free(&j.ranks[i]);
    }
    free(j.ranks);
    found = cause != NULL;
    free(cause);
    return found ? 0 : 1;
}

#endif /* DDL_TOOLS_ATTACH_JSON_H */

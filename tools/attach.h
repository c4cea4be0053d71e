/* ddl-info --attach: what the ranks of a running job do, from the pages that they keep (src/mesh/page.h). It reads; the
 * ranks do not notice. It does not believe what it reads: whoever wrote it may be in the middle of writing. */
#ifndef DDL_TOOLS_ATTACH_H
#define DDL_TOOLS_ATTACH_H

#include <dirent.h>
#include <pwd.h>

enum { ATTACH_RANKS_MAX = 4096, ATTACH_TRIES = 50, ATTACH_SHOWN = 3 };
#define ATTACH_PAGE_MAX (1u << 30)

/* One process, by /proc. */
typedef struct process {
    int32_t pid, parent, inner; /* inner: its number in its own PID namespace */
    char state; /* R, S, T, Z, ...; 0: there is no such process */
} process;

/* A copy of a page, taken twice: what differs is being written. */
typedef struct seen {
    process process;
    ddl__page *head, *again;
    size_t bytes;
    bool waits; /* its wait can be believed, and there is one */
} seen;

typedef struct job {
    seen *ranks;
    int32_t count;
    uint64_t now_ns;
} job;

static process process_of(int32_t pid) {
    char path[64], text[4096] = "";
    process p = {.pid = pid, .inner = pid};
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    if (ddl__read_text(path, text, sizeof text) == 0) {
        return p;
    }
    const char *state = strstr(text, "\nState:\t"), *parent = strstr(text, "\nPPid:\t"), *inner = strstr(text, "\nNSpid:");
    p.state = state != NULL ? state[8] : '?';
    p.parent = parent != NULL ? atoi(parent + 7) : 0;
    if (inner != NULL) { /* the last number of the line */
        const char *end = inner + 1 + strcspn(inner + 1, "\n"), *at = end;
        while (at > inner && at[-1] >= '0' && at[-1] <= '9') {
            at--;
        }
        p.inner = at < end ? atoi(at) : pid;
    }
    return p;
}

static const char *process_text(char state) {
    return state == 0     ? "has ended"
           : state == 'T' ? "stopped"
           : state == 't' ? "in a debugger"
           : state == 'Z' ? "has ended"
           : state == 'R' ? "runs"
           : state == 'D' ? "in the kernel"
                          : "sleeps";
}

/* >>reading */

/* What the head says of the file is true for this build and this size. */
static bool page_is_sound(const ddl__page *p, size_t bytes) {
    return bytes >= sizeof *p && memcmp(p->magic, DDL__PAGE_MAGIC, sizeof p->magic) == 0 &&
           p->version == DDL__PAGE_VERSION && p->flight_bytes == sizeof(ddl__flight) &&
           p->link_bytes == sizeof(ddl__page_link) && p->world_size > 0 && p->world_size <= (1 << 22) && p->rank >= 0 &&
           p->rank < p->world_size && p->groups_at == ddl__page_head_bytes(p->world_size) &&
           p->group_bytes == ddl__page_group_bytes(p->world_size) && p->group_count <= DDL__PAGE_GROUPS &&
           bytes >= p->groups_at + (size_t)p->group_count * p->group_bytes;
}

static void *page_copy(int fd, size_t bytes) {
    char *copy = malloc(bytes);
    for (size_t at = 0; copy != NULL && at < bytes;) {
        ssize_t n = pread(fd, copy + at, bytes - at, (off_t)at);
        if (n <= 0) {
            free(copy);
            return NULL;
        }
        at += (size_t)n;
    }
    return copy;
}

static void seen_free(seen *s) {
    free(s->head);
    free(s->again);
}

/* Copies until the number that is odd while words are written is even and the same twice. A process that was stopped in
 * between never gets there: then its wait is not believed. False: this is no page, or of another version. */
static bool page_read(int fd, seen *out) {
    struct stat st;
    if (fstat(fd, &st) != 0 || st.st_size < (off_t)sizeof(ddl__page) || st.st_size > ATTACH_PAGE_MAX) {
        return false;
    }
    out->bytes = (size_t)st.st_size;
    for (int32_t i = 0; i < ATTACH_TRIES; i++) {
        seen_free(out);
        out->head = page_copy(fd, out->bytes);
        out->again = page_copy(fd, out->bytes);
        if (out->head == NULL || out->again == NULL || !page_is_sound(out->head, out->bytes) ||
            !page_is_sound(out->again, out->bytes) || out->head->world_size != out->again->world_size) {
            return false;
        }
        uint32_t turn = out->head->turn;
        if (turn % 2 == 0 && turn == out->again->turn) {
            out->waits = out->head->wait.since_ns != 0;
            break;
        }
        ddl__pause_ms(1);
    }
    ddl__page *p = out->head;
    p->wait.text[sizeof p->wait.text - 1] = p->doing[sizeof p->doing - 1] = p->job_name[sizeof p->job_name - 1] = 0;
    ddl__text_clean(p->wait.text);
    ddl__text_clean(p->doing);
    ddl__text_clean(p->job_name);
    return true;
}

/* Calls fn for each page that a process has open. Returns how many; -1: the kernel does not let us look. strange: pages
 * of another version. */
static int32_t pages_of(int32_t pid, int32_t *strange, void (*fn)(void *user, seen *s), void *user) {
    char path[64 + 256], to[64];
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *folder = opendir(path);
    int32_t count = 0;
    for (struct dirent *e; folder != NULL && (e = readdir(folder)) != NULL;) {
        snprintf(path, sizeof path, "/proc/%d/fd/%s", (int)pid, e->d_name);
        ssize_t n = readlink(path, to, sizeof to - 1);
        to[n > 0 ? n : 0] = 0;
        int fd = strncmp(to, "/memfd:ddl-page", 15) == 0 ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        if (fd < 0) {
            continue;
        }
        seen s = {.process = process_of(pid)};
        if (page_read(fd, &s)) {
            count++;
            fn(user, &s);
        } else {
            ++*strange;
            seen_free(&s);
        }
        close(fd);
    }
    if (folder == NULL) {
        return -1;
    }
    closedir(folder);
    return count;
}

/* >>finding the ranks of a job */

typedef struct search {
    job *found;
    const ddl__page *like; /* of this job; NULL: of the job of that name, or any */
    const char *name;
    ddl__page *first; /* of the job that was found by its name */
} search;

/* Ranks of one job know each other's processes; before they have met they may know the job's name. */
static bool is_same_job(const ddl__page *a, const ddl__page *b) {
    if (a->world_size != b->world_size || a->job != b->job) {
        return false;
    }
    if (a->stage == DDL__PAGE_JOINING || b->stage == DDL__PAGE_JOINING) {
        return a->job != 0;
    }
    for (int32_t i = 0; i < a->world_size; i++) {
        if (a->links[i].pid != b->links[i].pid || a->links[i].host != b->links[i].host) {
            return false;
        }
    }
    return true;
}

static void keep_rank(void *user, seen *s) {
    search *q = user;
    const ddl__page *like = q->like != NULL ? q->like : q->first;
    bool child = s->head->pid != s->process.inner; /* of a rank: it inherited the descriptor */
    bool wanted = like != NULL ? is_same_job(like, s->head) : q->name == NULL || strcmp(q->name, s->head->job_name) == 0;
    if (child || !wanted || q->found->count == ATTACH_RANKS_MAX) {
        seen_free(s);
        return;
    }
    q->found->ranks[q->found->count++] = *s;
    q->first = q->name != NULL && q->first == NULL ? s->head : q->first;
}

static void keep_any(void *user, seen *s) {
    search *q = user;
    if (q->found->count == 0) {
        q->found->ranks[q->found->count++] = *s;
    } else {
        seen_free(s);
    }
}

/* Calls fn with each process of this user. */
static void each_process(void (*fn)(void *user, int32_t pid), void *user) {
    DIR *folder = opendir("/proc");
    for (struct dirent *e; folder != NULL && (e = readdir(folder)) != NULL;) {
        char path[300];
        struct stat st;
        snprintf(path, sizeof path, "/proc/%s", e->d_name);
        if (e->d_name[0] >= '1' && e->d_name[0] <= '9' && stat(path, &st) == 0 && st.st_uid == geteuid()) {
            fn(user, atoi(e->d_name));
        }
    }
    if (folder != NULL) {
        closedir(folder);
    }
}

static void look_into(void *user, int32_t pid) {
    search *q = user;
    int32_t strange = 0;
    pages_of(pid, &strange, keep_rank, q);
}

/* A launcher was named: the first rank among what it has started. */
typedef struct attach_family {
    int32_t of;
    search *q;
} attach_family;

static void look_at_child(void *user, int32_t pid) {
    attach_family *f = user;
    int32_t at = pid, strange = 0;
    for (int32_t i = 0; at > 1 && at != f->of && i < 32; i++) {
        at = process_of(at).parent;
    }
    if (at == f->of && f->q->found->count == 0) {
        pages_of(pid, &strange, keep_any, f->q);
    }
}

static int by_rank(const void *a, const void *b) {
    const seen *x = a, *y = b;
    return x->head->rank < y->head->rank ? -1 : x->head->rank > y->head->rank;
}

/* Whether the process may be looked at; else says why not. */
static bool may_attach(int32_t pid) {
    char path[64];
    struct stat st;
    snprintf(path, sizeof path, "/proc/%d", (int)pid);
    if (stat(path, &st) != 0) {
        fprintf(stderr, "ddl-info: There is no process %d here. Ranks on other hosts and in other containers are "
                "looked at there.\n", (int)pid);
        return false;
    }
    char state = process_of(pid).state;
    if (state == 'Z' || state == 'X') {
        fprintf(stderr, "ddl-info: Process %d has ended; only its parent has not asked how.\n", (int)pid);
        return false;
    }
    if (st.st_uid != geteuid()) {
        const struct passwd *owner = getpwuid(st.st_uid);
        const char *name = owner != NULL ? owner->pw_name : "?";
        fprintf(stderr, "ddl-info: Process %d belongs to user %s (%u), and ddl-info looks only at processes of its own "
                "user (%u): sudo -u %s ddl-info --attach %d\n", (int)pid, name, (unsigned)st.st_uid,
                (unsigned)geteuid(), name, (int)pid);
        return false;
    }
    return true;
}

/* The job of a process, or of what it has started. False after it has said why. */
static bool find_by_pid(int32_t pid, search *q) {
    int32_t strange = 0;
    int32_t pages = may_attach(pid) ? pages_of(pid, &strange, keep_any, q) : -2;
    if (pages == 0 && strange == 0) {
        attach_family f = {pid, q};
        each_process(look_at_child, &f);
        pages = q->found->count;
    }
    if (pages == -1) {
        fprintf(stderr, "ddl-info: The kernel does not let ddl-info see the descriptors of process %d (%s): it is in "
                "another user namespace, or has made itself not dumpable.\n", (int)pid, strerror(errno));
    } else if (pages == 0 && strange > 0) {
        fprintf(stderr, "ddl-info: Process %d uses another version of ddl.h than this ddl-info (%d.%d.%d): take the "
                "ddl-info that was built with it.\n", (int)pid, DDL_VERSION_MAJOR, DDL_VERSION_MINOR,
                DDL_VERSION_PATCH);
    } else if (pages == 0) {
        fprintf(stderr, "ddl-info: Process %d is no rank of a ddl job, and has started none: it has not called "
                "ddl_init, or has left again.\n", (int)pid);
    }
    return pages > 0;
}

/* All ranks that can be seen of the job that `what` means, a process or a job's name, by rank. */
static bool find_job(const char *what, job *out) {
    search q = {.found = out};
    int64_t pid = 0;
    out->now_ns = ddl__now_ns();
    if (ddl__parse_int(what, 1, INT32_MAX, &pid)) {
        if (!find_by_pid((int32_t)pid, &q)) {
            return false;
        }
        seen first = out->ranks[0]; /* found again among all */
        out->count = 0;
        q.like = first.head;
        each_process(look_into, &q);
        if (out->count == 0) { /* it ended meanwhile */
            out->ranks[out->count++] = first;
        } else {
            seen_free(&first);
        }
    } else {
        q.name = what;
        each_process(look_into, &q);
    }
    if (out->count == 0) {
        fprintf(stderr, "ddl-info: No job of this user on this host is called \"%s\" (DDL_JOB, or the launcher's name "
                "for it).\n", what);
    }
    qsort(out->ranks, (size_t)out->count, sizeof *out->ranks, by_rank);
    return out->count > 0;
}

/* >>what they do */

static double ago_s(const job *j, uint64_t ns) { return j->now_ns > ns ? (double)(j->now_ns - ns) * 1e-9 : 0; }

static const ddl__page_group *group_at(const seen *s, const ddl__page *copy, uint32_t slot) {
    const char *at = (const char *)copy + copy->groups_at + (size_t)slot * copy->group_bytes;
    const ddl__page_group *g = (const void *)at;
    bool sound = slot < s->head->group_count && slot < copy->group_count && g->used == 1 && g->size > 0 &&
                 g->size <= copy->world_size && g->rank >= 0 && g->rank < g->size;
    return sound ? g : NULL;
}

/* A record that is not being written, or NULL. */
static const ddl__flight *record_at(const seen *s, uint32_t slot, uint32_t i) {
    const ddl__page_group *a = group_at(s, s->head, slot), *b = group_at(s, s->again, slot);
    const ddl__flight *r = a != NULL && b != NULL ? &a->records[i] : NULL;
    return r != NULL && r->order > 0 && memcmp(r, &b->records[i], sizeof *r) == 0 ? r : NULL;
}

/* The newest record of a slot that came before `order`. */
static const ddl__flight *record_before(const seen *s, uint32_t slot, uint64_t order) {
    const ddl__flight *best = NULL;
    for (uint32_t i = 0; i < DDL__RECORDS; i++) {
        const ddl__flight *r = record_at(s, slot, i);
        best = r != NULL && r->order < order && (best == NULL || r->order > best->order) ? r : best;
    }
    return best;
}

static void describe_flight(const seen *s, const ddl__page_group *g, const ddl__flight *r, ddl__text *out) {
    ddl_group like = {.size = g->size};
    ddl__flight copy = *r;
    char name[sizeof s->head->names[0].text] = "?";
    for (int32_t i = 0; i < DDL__PAGE_NAMES; i++) {
        if (s->head->names[i].at == (uint64_t)(uintptr_t)r->algorithm && r->algorithm != NULL) {
            snprintf(name, sizeof name, "%.*s", (int)sizeof name - 1, s->head->names[i].text);
            ddl__text_clean(name);
        }
    }
    copy.nature = copy.nature < 4 ? copy.nature : 0;
    copy.algorithm = name;
    ddl__describe_record(&like, &copy, out);
}

static void print_group(const job *j, const seen *s, uint32_t slot) {
    const ddl__page_group *g = group_at(s, s->head, slot);
    uint64_t order = UINT64_MAX;
    char name[sizeof g->name];
    snprintf(name, sizeof name, "%.*s", (int)sizeof name - 1, g->name);
    ddl__text_clean(name);
    printf("    group \"%s\", rank %d of %d%s%s\n", name, (int)g->rank, (int)g->size, g->broken < 0 ? ", broken: " : "",
           g->broken < 0 ? ddl_status_name((ddl_status)g->broken) : "");
    for (int32_t shown = 0; shown < ATTACH_SHOWN; shown++) {
        const ddl__flight *r = record_before(s, slot, order);
        if (r == NULL) {
            return;
        }
        char line[300];
        ddl__text text = {line, sizeof line, 0};
        describe_flight(s, g, r, &text);
        if (r->status == DDL_IN_PROGRESS) {
            printf("      #%u %s, began %.3f s ago\n", r->sequence, line, ago_s(j, r->start_ns));
        } else {
            printf("      #%u %s %s in %.1f us, %.3f s ago\n", r->sequence, line, ddl_status_name((ddl_status)r->status),
                   r->end_ns > r->start_ns ? (double)(r->end_ns - r->start_ns) * 1e-3 : 0.0, ago_s(j, r->end_ns));
        }
        order = r->order;
    }
}

/* "3 alive by shm, 4 alive by tcp"; those that are not are named. */
static void print_peers(const seen *s) {
    static const char *const lives[] = {"alive", "missed", "has left", "dead"};
    const ddl__page *p = s->head;
    int32_t alive[DDL__ENDPOINTS_MAX] = {0};
    printf("    links:");
    for (int32_t i = 0; i < p->world_size; i++) {
        const ddl__page_link *l = &p->links[i];
        if (l->transport < DDL__ENDPOINTS_MAX && l->life == DDL__ALIVE) {
            alive[l->transport]++;
        } else if (l->transport != 255 && l->life < 4) {
            printf(" rank %d %s;", (int)i, lives[l->life]);
        }
    }
    for (int32_t i = 0; i < DDL__ENDPOINTS_MAX; i++) {
        if (alive[i] > 0) {
            char name[16];
            snprintf(name, sizeof name, "%.15s", p->transports[i]);
            ddl__text_clean(name);
            printf(" %d alive by %s;", (int)alive[i], name);
        }
    }
    printf("\n");
}

/* The newest record of all groups; *out_slot is its group. */
static const ddl__flight *newest_record(const seen *s, uint32_t *out_slot) {
    const ddl__flight *newest = NULL;
    for (uint32_t slot = 0; slot < s->head->group_count; slot++) {
        const ddl__flight *r = record_before(s, slot, UINT64_MAX);
        if (r != NULL && (newest == NULL || r->order > newest->order)) {
            newest = r;
            *out_slot = slot;
        }
    }
    return newest;
}

/* In one line; the same words are used to say for whom others wait. */
static void describe_rank(const job *j, const seen *s, ddl__text *out) {
    uint32_t slot = 0;
    const ddl__page *p = s->head;
    const ddl__flight *r = newest_record(s, &slot);
    if (p->stage == DDL__PAGE_JOINING) {
        ddl__text_add(out, "is in ddl_init for %.1f s: not all ranks have come", ago_s(j, p->start_ns));
    } else if (s->waits) {
        ddl__text_add(out, "waits for %.1f s: %s", ago_s(j, p->wait.since_ns), p->wait.text);
    } else if (p->sleeps && p->doing[0] != 0) {
        ddl__text_add(out, "is in %s for %.1f s", p->doing, ago_s(j, p->doing_ns));
    } else if (r != NULL && r->status == DDL_IN_PROGRESS) {
        ddl__text_add(out, "computes, or has only just begun to wait; operation %u began %.3f s ago", r->sequence,
                      ago_s(j, r->start_ns));
    } else if (r != NULL) {
        ddl__text_add(out, "computes: it waits in no call of ddl; its last collective ended %.3f s ago", ago_s(j, r->end_ns));
    } else {
        ddl__text_add(out, "computes: it waits in no call of ddl, and has called no collective");
    }
}

static void print_rank(const job *j, const seen *s) {
    char line[1200] = "";
    ddl__text text = {line, sizeof line, 0};
    describe_rank(j, s, &text);
    printf("rank %d (pid %d, %s) %s\n", (int)s->head->rank, (int)s->process.pid, process_text(s->process.state), line);
    for (uint32_t slot = 0; slot < s->head->group_count; slot++) {
        if (group_at(s, s->head, slot) != NULL) {
            print_group(j, s, slot);
        }
    }
    if (s->head->stage != DDL__PAGE_JOINING) {
        print_peers(s);
    }
}

/* >>who waits for whom */

static seen *rank_seen(const job *j, int32_t rank) {
    for (int32_t i = 0; i < j->count; i++) {
        if (j->ranks[i].head->rank == rank) {
            return &j->ranks[i];
        }
    }
    return NULL;
}

/* Whether s has called collective `sequence` of the group that g is a member's view of. */
static bool has_called(const seen *s, const ddl__page_group *g, uint32_t sequence) {
    for (uint32_t slot = 0; slot < s->head->group_count; slot++) {
        const ddl__page_group *own = group_at(s, s->head, slot);
        const ddl__flight *r = own != NULL && own->id == g->id && own->epoch == g->epoch
                                   ? record_before(s, slot, UINT64_MAX) : NULL;
        if (r != NULL && (int32_t)(r->sequence - sequence) >= 0) {
            return true;
        }
    }
    return false;
}

/* Marks those that s waits for: members that have not called its collective; else the rank that it names itself. */
static void mark_awaited(job *j, const seen *s, bool *awaited) {
    uint32_t slot = 0;
    const ddl__flight *r = newest_record(s, &slot);
    const ddl__page_group *g = r != NULL && r->status == DDL_IN_PROGRESS ? group_at(s, s->head, slot) : NULL;
    bool named = false;
    for (int32_t i = 0; g != NULL && i < g->size; i++) {
        int32_t rank = g->ranks[i];
        const seen *member = rank >= 0 && rank < s->head->world_size ? rank_seen(j, rank) : NULL;
        if (member != NULL && member != s && !has_called(member, g, r->sequence)) {
            awaited[rank] = named = true;
        }
    }
    if (!named && s->head->wait.rank >= 0 && s->head->wait.rank < s->head->world_size) {
        awaited[s->head->wait.rank] = true;
    }
}

/* Marks, by world rank, those that others wait for and that wait for nobody: there the cause is. How many ranks wait. */
static int32_t find_causes(job *j, bool *cause) {
    int32_t waiting = 0;
    for (int32_t i = 0; i < j->count; i++) {
        if (j->ranks[i].waits) {
            waiting++;
            mark_awaited(j, &j->ranks[i], cause);
        }
    }
    for (int32_t rank = 0; rank < j->ranks[0].head->world_size; rank++) {
        const seen *s = rank_seen(j, rank);
        cause[rank] = cause[rank] && (s == NULL || !s->waits || s->process.state == 'T');
    }
    return waiting;
}

/* What a cause does, as the end of "ranks wait for rank 2 (pid 7), which ...". */
static void describe_cause(const job *j, int32_t rank, ddl__text *out) {
    const seen *s = rank_seen(j, rank);
    if (s == NULL) {
        const ddl__page_link *l = &j->ranks[0].head->links[rank];
        ddl__text_add(out, "is not on this host: ddl-info --attach %d on %.31s", (int)l->pid, l->host_name);
        return;
    }
    ddl__text_add(out, "%s", s->process.state == 'T' ? "is stopped (kill -CONT lets it go on), and " : "");
    describe_rank(j, s, out);
}

static void print_verdict(const job *j, int32_t waiting, const bool *cause) {
    int32_t causes = 0;
    for (int32_t rank = 0; rank < j->ranks[0].head->world_size; rank++) {
        char line[1200] = "", pid[32] = "";
        ddl__text text = {line, sizeof line, 0};
        const seen *s = rank_seen(j, rank);
        if (cause[rank]) {
            causes++;
            describe_cause(j, rank, &text);
            if (s != NULL) {
                snprintf(pid, sizeof pid, " (pid %d)", (int)s->process.pid);
            }
            printf("%d rank%s wait%s for rank %d%s, which %s\n", (int)waiting, waiting == 1 ? "" : "s",
                   waiting == 1 ? "s" : "", (int)rank, pid, line);
        }
    }
    if (waiting == 0) {
        printf("no rank has waited for longer than %d ms\n", (int)(DDL__PAGE_TOLD_NS / DDL__NS_PER_MS));
    } else if (causes == 0) {
        printf("all that are waited for wait themselves: for each other, or for ranks that cannot be seen here\n");
    }
}

/* >>stragglers */

/* What all that are seen say of one rank. */
typedef struct blame {
    int32_t rank;             /* -1: of nobody */
    uint64_t times, late_ns;  /* others found it last so often, and waited for it so long, together */
    bool innocent;            /* it waits for others about as long as others wait for it */
} blame;

static blame blame_of(const job *j, int32_t rank) {
    blame b = {.rank = rank};
    uint64_t most_ns = 0, own_ns = 0;
    for (int32_t i = 0; i < j->count; i++) {
        const ddl__page *p = j->ranks[i].head;
        uint64_t ns = p->links[rank].late_ns;
        for (int32_t k = 0; k < p->world_size && p->rank == rank; k++) {
            own_ns += p->links[k].late_ns;
        }
        if (p->rank != rank) {
            b.times += p->links[rank].last;
            b.late_ns += ns;
            most_ns = ns > most_ns ? ns : most_ns;
        }
    }
    b.innocent = own_ns > most_ns / 2;
    return b;
}

/* The rank for which the others waited longest, of those that did not wait themselves: who hears from one only that
 * waits for a third blames the wrong one. */
static blame slow_rank(const job *j) {
    blame worst = {.rank = -1};
    uint64_t all_ns = 0;
    for (int32_t rank = 0; rank < j->ranks[0].head->world_size; rank++) {
        blame b = blame_of(j, rank);
        all_ns += b.late_ns;
        worst = !b.innocent && b.times >= DDL__LATE_LEAST && b.late_ns > worst.late_ns ? b : worst;
    }
    return worst.late_ns > all_ns / 3 ? worst : (blame){.rank = -1};
}

/* Of the links to ranks that are seen. */
static ddl__slow_link slow_link(const job *j) {
    ddl__paces *paces = calloc(1, sizeof *paces);
    ddl__slow_link slow = {.from = -1};
    for (int32_t turn = 0; paces != NULL && turn < 2; turn++) {
        for (int32_t i = 0; i < j->count; i++) {
            const ddl__page *p = j->ranks[i].head;
            for (int32_t from = 0; from < p->world_size; from++) {
                const ddl__page_link *l = &p->links[from];
                int32_t kind = l->transport < DDL__ENDPOINTS_MAX
                                   ? ddl__pace_kind(l->transport, l->host == p->links[p->rank].host) : -1;
                if (turn == 0) {
                    ddl__paces_add(paces, kind, l->large_messages, l->bytes_per_s);
                } else if (kind >= 0) {
                    ddl__slow_link_look(&slow, from, p->rank, l->large_messages, l->bytes_per_s,
                                        ddl__paces_usual(paces, kind));
                }
            }
        }
    }
    free(paces);
    return slow;
}

static void print_stragglers(const job *j) {
    blame b = slow_rank(j);
    ddl__slow_link l = slow_link(j);
    if (b.rank >= 0) {
        printf("the slow rank is rank %d: the others found it last %llu times and waited %.3f ms for it, all together\n",
               (int)b.rank, (unsigned long long)b.times, (double)b.late_ns * 1e-6);
    } else {
        printf("no rank stands out as slow\n");
    }
    if (l.from >= 0) {
        printf("the slow link is that from rank %d to rank %d: %.3f MB/s, the usual one of its kind %.3f MB/s\n",
               (int)l.from, (int)l.to, (double)l.bytes_per_s * 1e-6, (double)l.usual * 1e-6);
    } else {
        printf("no link stands out as slow\n");
    }
}

static void print_job(const job *j, int32_t waiting, const bool *cause) {
    const ddl__page *p = j->ranks[0].head;
    printf("job%s%s of %d ranks; %d are seen here\n", p->job_name[0] != 0 ? " " : "", p->job_name, (int)p->world_size,
           (int)j->count);
    for (int32_t i = 0; i < j->count; i++) {
        print_rank(j, &j->ranks[i]);
    }
    printf("\n");
    print_stragglers(j);
    print_verdict(j, waiting, cause);
}

#endif /* DDL_TOOLS_ATTACH_H */

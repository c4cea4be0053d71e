/* two_ranks: for ddl-info without a job: which transport two ranks of this host would use, and why. Two processes of its own
 * join each other as the ranks of a job do, so that what is told is what happens, and nothing of it is left in this one. */
#ifndef DDL_TOOLS_TWO_RANKS_H
#define DDL_TOOLS_TWO_RANKS_H

#include <sys/wait.h>

enum { TWO_RANKS_MS = 10000 }; /* to meet */

typedef struct two_ranks {
    ddl_status status; /* below 0: they do not meet, `text` says why */
    char transport[DDL__NAME_BYTES], way[160], among[200], text[DDL__SENTENCE_BYTES];
    char warning[DDL__SENTENCE_BYTES]; /* the first one, as of a transport that could not be set up */
    double seconds; /* that 64 KiB take, as the transport guesses */
} two_ranks;

static bool read_all(int fd, void *into, size_t bytes) {
    for (size_t at = 0; at < bytes;) {
        ssize_t n = read(fd, (char *)into + at, bytes - at);
        if (n <= 0 && !(n < 0 && errno == EINTR)) {
            return false;
        }
        at += n > 0 ? (size_t)n : 0;
    }
    return true;
}

static void first_warning(void *user, ddl_log_level level, const char *line) {
    two_ranks *t = user;
    const char *said = strncmp(line, "ddl: rank ", 10) == 0 ? strstr(line + 10, ": ") : NULL;
    if (level == DDL_LOG_WARN && t->warning[0] == 0) {
        snprintf(t->warning, sizeof t->warning, "%s", said != NULL ? said + 2 : line);
    }
}

typedef struct pair_end {
    int fd; /* one end of a socket between the two */
    size_t rank;
} pair_end;

/* A ddl_exchange_fn: what is exchanged fits into the socket's buffer. */
static int pair_exchange(void *user, const void *in, void *out, size_t bytes) {
    const pair_end *e = user;
    memcpy((char *)out + e->rank * bytes, in, bytes);
    bool sent = send(e->fd, in, bytes, MSG_NOSIGNAL) == (ssize_t)bytes;
    return sent && read_all(e->fd, (char *)out + (1 - e->rank) * bytes, bytes) ? 0 : -1;
}

/* Of rank 0, when both have joined. */
static void look_at_pair(const ddl_context *c, two_ranks *out) {
    const ddl__link *l = &c->links[1];
    ddl__text among = {out->among, sizeof out->among, 0};
    for (int32_t i = 0; i < c->endpoint_count; i++) {
        const ddl__endpoint *e = &c->endpoints[i];
        if ((e->table->flags & DDL_TRANSPORT_DEVICE) == 0 && !e->only_watches) {
            ddl__text_add(&among, "%s%s", among.used > 0 ? ", " : "", e->plugin->name);
        }
    }
    snprintf(out->transport, sizeof out->transport, "%s", l->endpoint->plugin->name);
    if (DDL_HAS(l->endpoint->table, describe)) {
        snprintf(out->way, sizeof out->way, "%s", l->endpoint->table->describe(l->endpoint->self, 1));
    }
    out->seconds = (double)l->latency_ns * 1e-9 + 65536.0 / (double)DDL__MAX(l->bytes_per_s, (uint64_t)1);
}

/* One of the two. report: where rank 0 writes what it sees, else -1. */
static void be_one_of_two(size_t rank, int fd, int report) {
    pair_end end = {fd, rank};
    two_ranks found = {.status = DDL_OK};
    ddl_config config = {.world_size = 2, .rank = (int32_t)rank, .exchange = pair_exchange, .exchange_user = &end};
    config.init_timeout_ms = config.timeout_ms = TWO_RANKS_MS;
    config.error_text = found.text;
    config.error_bytes = sizeof found.text;
    config.log_level = DDL_LOG_WARN;
    config.log = first_warning;
    config.log_user = &found;
    unsetenv("DDL_TUNE_CACHE");
    unsetenv("DDL_TRACE"); /* files of jobs */
    unsetenv("DDL_RESTARTED");
    alarm(3 * TWO_RANKS_MS / 1000); /* whatever a plugin does */
    ddl_context *c = NULL;
    found.status = ddl_init(&config, &c);
    if (found.status == DDL_OK && rank == 0) {
        look_at_pair(c, &found);
    }
    if (found.status == DDL_OK) {
        ddl_barrier(ddl_world(c)); /* none leaves before the other has looked */
    }
    if (report >= 0 && write(report, &found, sizeof found) != (ssize_t)sizeof found) {
        _exit(1);
    }
    ddl_finalize(&c);
    _exit(0);
}

static two_ranks ask_two_ranks(void) {
    two_ranks said = {.status = DDL_ERR_SYSTEM, .text = "two processes for it cannot be started, or ended without a word"};
    int between[2], report[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, between) != 0) {
        return said;
    }
    if (pipe2(report, O_CLOEXEC) != 0) {
        close(between[0]);
        close(between[1]);
        return said;
    }
    pid_t ranks[2] = {-1, -1};
    fflush(NULL); /* or both would print it again */
    for (size_t i = 0; i < 2; i++) {
        ranks[i] = fork();
        if (ranks[i] == 0) {
            close(between[1 - i]); /* so that each hears of the other's end */
            close(report[0]);
            be_one_of_two(i, between[i], i == 0 ? report[1] : -1);
        }
    }
    close(between[0]);
    close(between[1]);
    close(report[1]);
    two_ranks found;
    if (read_all(report[0], &found, sizeof found)) {
        said = found;
    }
    close(report[0]);
    for (size_t i = 0; i < 2; i++) {
        while (ranks[i] > 0 && waitpid(ranks[i], NULL, 0) < 0 && errno == EINTR) {
        }
    }
    return said;
}

static void print_two_ranks(const two_ranks *t, const ddl_context *c) {
    printf("\ntwo ranks of this host (ddlrun -n 2)\n");
    if (t->status < 0) {
        printf("  would not meet: %s\n", t->text);
        return;
    }
    printf("  would use %s%s%s\n", t->transport, t->way[0] != 0 ? ": " : "", t->way);
    if (t->warning[0] != 0) {
        printf("  why: %s\n", t->warning);
    } else if (c->settings.transports != NULL) {
        printf("  why: of DDL_TRANSPORTS (%s) it is the first that reaches both\n", c->settings.transports);
    } else if (strchr(t->among, ',') == NULL) {
        printf("  why: nothing else was found (make plugins builds shm, shared memory)\n");
    } else {
        printf("  why: of %s it promises the least time for 64 KiB (%.1f us); DDL_TRANSPORTS chooses another\n", t->among,
               t->seconds * 1e6);
    }
}

static void json_two_ranks(const two_ranks *t) {
    json_open("two_ranks", '{');
    json_text("transport", t->status < 0 ? NULL : t->transport);
    json_text("describe", t->way[0] != 0 ? t->way : NULL);
    json_text("among", t->status < 0 ? NULL : t->among);
    json_text("warning", t->warning[0] != 0 ? t->warning : NULL);
    json_text("error", t->status < 0 ? t->text : NULL);
    json_close('}');
}

#endif /* DDL_TOOLS_TWO_RANKS_H */

/* pmi: the key-value space of a launcher that speaks PMI-1 over the descriptor of PMI_FD: MPICH's hydra, and srun with
 * --mpi=pmi2, which understands it as well. Lines of `key=value` words; one command, one answer. After "PMI: A Scalable
 * Parallel Process-Management Interface for Extreme-Scale Systems" (Balaji et al., 2010) and MPICH's simple_pmi.c. */
#ifndef DDL_STORE_PMI_H
#define DDL_STORE_PMI_H

#include "client.h"

#include <sys/mman.h>
#include <sys/stat.h>

#define DDL__PMI_LINE 1280 /* hydra allows values of 1024 bytes */

typedef struct ddl__pmi {
    int fd;
    uint64_t deadline_ns;
    const char *by; /* for messages: the launcher */
    ddl__sentence *why;
    char line[DDL__PMI_LINE]; /* the last answer, without its newline */
} ddl__pmi;

/* Finds the word `key=` of a line; its value, up to the next blank, into out. False: it is not there or too long. */
static bool ddl__pmi_word(const char *line, const char *key, char *out, size_t cap) {
    size_t length = strlen(key);
    for (const char *at = line; at != NULL; at = strchr(at, ' ')) {
        at += *at == ' ';
        if (strncmp(at, key, length) == 0 && at[length] == '=') {
            size_t bytes = strcspn(at + length + 1, " ");
            snprintf(out, cap, "%.*s", (int)DDL__MIN(bytes, cap), at + length + 1);
            return bytes < cap;
        }
    }
    return false;
}

/* Reads one line. Byte by byte: what follows it belongs to whoever uses the descriptor next. */
static bool ddl__pmi_read(ddl__pmi *p) {
    size_t used = 0;
    while (used < sizeof p->line - 1 && ddl__socket_wait(p->fd, POLLIN, p->deadline_ns)) {
        ssize_t n = read(p->fd, p->line + used, 1);
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) {
            continue;
        }
        if (n <= 0) {
            errno = n == 0 ? ECONNRESET : errno;
            return false;
        }
        if (p->line[used] == '\n') {
            p->line[used] = 0;
            return true;
        }
        used++;
    }
    errno = used < sizeof p->line - 1 ? ETIMEDOUT : EPROTO;
    return false;
}

/* The answer in p->line must be `cmd=answer`, and rc=0 where it has a result. */
static ddl_status ddl__pmi_check(ddl__pmi *p, const char *answer, const char *command) {
    char got[32], result[16];
    if (ddl__pmi_word(p->line, "cmd", got, sizeof got) && strcmp(got, answer) == 0 &&
        (!ddl__pmi_word(p->line, "rc", result, sizeof result) || strcmp(result, "0") == 0)) {
        return DDL_OK;
    }
    ddl__text_clean(p->line);
    return ddl__fail(p->why, DDL_ERR_CONFIG,
                     "ddl_init: the launcher (%s, over PMI_FD %d) answered %.20s with \"%.100s\". Set MASTER_ADDR and "
                     "MASTER_PORT on all ranks instead",
                     p->by, p->fd, command, p->line);
}

/* Sends a command and reads its answer. */
static ddl_status ddl__pmi_ask(ddl__pmi *p, const char *answer, const char *command) {
    if (!ddl__socket_send(p->fd, command, strlen(command), p->deadline_ns) || !ddl__pmi_read(p)) {
        bool late = errno == ETIMEDOUT;
        return ddl__fail(p->why, late ? DDL_ERR_TIMEOUT : DDL_ERR_SYSTEM,
                         "ddl_init: the launcher (%s, over PMI_FD %d) did not answer %.20s: %s%s", p->by, p->fd,
                         command, strerror(errno),
                         late
                             ? ". Its barrier waits for every rank: look at what the others printed last"
                             : ". It ended, or took the leave of a program that this rank ran before: for several in a "
                               "row set MASTER_ADDR and MASTER_PORT on all ranks");
    }
    return ddl__pmi_check(p, answer, command);
}

/* Slurm ends a job that greets twice, and hydra needs no greeting. That it was done, and what it brought, is kept where
 * it concerns the process and nobody else: in the descriptor, which is then hidden from programs that this one
 * executes. */
static ddl_status ddl__pmi_greet(ddl__pmi *p) {
    int flags = fcntl(p->fd, F_GETFD);
    if (flags < 0) {
        return ddl__fail(
            p->why, DDL_ERR_CONFIG,
            "ddl_init: PMI_FD is %d, but no such descriptor is open: a program between the launcher (%s) and "
            "this one closed it. Set MASTER_ADDR and MASTER_PORT on all ranks instead",
            p->fd, p->by);
    }
    if ((flags & FD_CLOEXEC) != 0) {
        return DDL_OK;
    }
    DDL__TRY(ddl__pmi_ask(p, "response_to_init", "cmd=init pmi_version=1 pmi_subversion=1\n"));
    (void)fcntl(p->fd, F_SETFD, flags | FD_CLOEXEC);
    return DDL_OK;
}

/* The farewell. Without it hydra takes the end of this process, whenever that is, for a crash, and kills the others. No
 * launcher listens afterwards: from now on the descriptor is a file with the word, for the process's next ddl_init. */
static ddl_status ddl__pmi_leave(ddl__pmi *p, const char *text) {
    DDL__TRY(ddl__pmi_ask(p, "finalize_ack", "cmd=finalize\n"));
    size_t bytes = strlen(text);
    int kept = memfd_create("ddl", MFD_CLOEXEC);
    bool good = kept >= 0 && write(kept, text, bytes) == (ssize_t)bytes && dup3(kept, p->fd, O_CLOEXEC) >= 0;
    int error = errno;
    if (kept >= 0) {
        close(kept);
    }
    return good ? DDL_OK
                : ddl__fail(p->why, DDL_ERR_SYSTEM, "ddl_init: cannot keep what the launcher (%s) told: %s", p->by,
                            strerror(error));
}

/* What ddl__pmi_leave kept. False: it was not called in this process. */
static bool ddl__pmi_kept(int fd, char *text, size_t cap) {
    struct stat what;
    if (fstat(fd, &what) != 0 || !S_ISREG(what.st_mode)) {
        return false;
    }
    ssize_t bytes = pread(fd, text, cap - 1, 0);
    text[DDL__MAX(bytes, 0)] = 0;
    return true;
}

/* text of rank 0, one word without '=' and ';', reaches all. Blocks until all ranks have called, or the deadline. The
 * first time in a process; afterwards it is the word of that first time, and nobody waits. */
static ddl_status ddl__pmi_share(const ddl__settings *s, char *text, size_t cap, uint64_t deadline_ns,
                                 ddl__sentence *why) {
    int64_t fd = -1;
    char space[256], command[DDL__PMI_LINE];
    DDL__TRY(ddl__env_int("PMI_FD", 0, INT32_MAX, &fd, why));
    if (ddl__pmi_kept((int)fd, text, cap)) {
        return DDL_OK;
    }
    ddl__pmi pmi = {.fd = (int)fd, .deadline_ns = deadline_ns, .by = s->launch.by, .why = why};
    DDL__TRY(ddl__pmi_greet(&pmi));
    DDL__TRY(ddl__pmi_ask(&pmi, "my_kvsname", "cmd=get_my_kvsname\n"));
    if (!ddl__pmi_word(pmi.line, "kvsname", space, sizeof space)) {
        ddl__text_clean(pmi.line);
        return ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: the launcher (%s) has no key-value space: \"%.100s\"",
                         s->launch.by, pmi.line);
    }
    if (s->launch.rank == 0) {
        snprintf(command, sizeof command, "cmd=put kvsname=%s key=ddl value=%s\n", space, text);
        DDL__TRY(ddl__pmi_ask(&pmi, "put_result", command));
    }
    DDL__TRY(ddl__pmi_ask(&pmi, "barrier_out", "cmd=barrier_in\n"));
    snprintf(command, sizeof command, "cmd=get kvsname=%s key=ddl\n", space);
    ddl_status status = ddl__pmi_ask(&pmi, "get_result", command);
    if (status == DDL_OK && !ddl__pmi_word(pmi.line, "value", text, cap)) {
        status =
            ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: the launcher (%s) does not know where rank 0 is", s->launch.by);
    }
    status = status == DDL_OK ? ddl__pmi_leave(&pmi, text) : status;
    ddl__wipe(command, sizeof command); /* it may have held the secret */
    ddl__wipe(pmi.line, sizeof pmi.line);
    return status;
}

#endif /* DDL_STORE_PMI_H */

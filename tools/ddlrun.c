/* ddlrun: starts the ranks of a job on this machine, for development and tests; clusters have mpirun, srun, torchrun.
 * It knows ddl only by the variables it sets, and works for any program that reads them (ddlrun --help lists them).
 *
 * Processes: ddlrun, the ranks (each leads a process group, so that what a rank starts ends with it), and a warden that
 * kills these groups should ddlrun be killed itself. One thread, one poll loop; signals arrive through a descriptor. */
#define _GNU_SOURCE 1
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "ended.h"
#include "nearest.h"

#define RANKS_MAX 4096
#define LINE_MAX_BYTES (64u << 20) /* a line longer than this is passed on in pieces */
#define READ_TURN ((size_t)64 << 10) /* bytes of one output, until the others have their turn */
#define READ_LAST ((size_t)2 << 20) /* of a rank that has ended: more than a pipe holds */
#define DRAIN_MS 300 /* for output that a rank's own children still write when the rank has ended */

enum { EXIT_USAGE = 2, EXIT_TIMEOUT = 124, EXIT_NOT_EXECUTABLE = 126, EXIT_NOT_FOUND = 127 };

/* One of the two outputs of a rank: what has come of a line that is not complete yet. */
typedef struct stream {
    int fd; /* -1: closed */
    int to; /* 1 or 2 */
    char *line;
    size_t bytes, cap;
} stream;

typedef struct rank {
    pid_t pid; /* 0: has ended */
    pid_t group;
    int starts; /* again, after it failed */
    stream streams[2];
} rank;

typedef struct job {
    int ended_fd; /* a byte for each rank: 0, or as how manieth it ended for good; those who join do not wait for it */
    unsigned char ended;
    int count, port, port_fd, secret_fd, signal_fd, warden_fd, running;
    int restarts; /* that are left, of all ranks together */
    bool prefix, bind_cores, keep_going;
    double timeout_s, grace_s;
    char **extra_env; /* NULL-ended K=V */
    char **argv;
    char name[32]; /* DDL_JOB */
    rank *ranks;
    int exit_code;                /* of the first rank that failed */
    uint64_t timeout_ms, kill_ms; /* when; 0: never */
    int endings;                  /* SIGINT and SIGTERM that came */
} job;

static const char usage[] =
    "usage: ddlrun -n RANKS [options] [--] program [arguments]\n"
    "\n"
    "Starts RANKS copies of a program on this machine, as the ranks of one job.\n"
    "\n"
    "  -n, --np RANKS    how many (1 to 4096)\n"
    "      --env K=V     set a variable for the ranks (repeatable)\n"
    "      --transport T DDL_TRANSPORTS for the ranks, as fabric:tcp or shm,tcp\n"
    "      --port PORT   MASTER_PORT; a free one is chosen otherwise\n"
    "      --prefix      begin each line of output with [rank] (the default)\n"
    "      --no-prefix   pass output through as it is\n"
    "      --timeout S   end the job after S seconds, with exit code 124\n"
    "      --grace S     from SIGTERM to SIGKILL when ranks are ended (default 5)\n"
    "      --keep-going  do not end the others when a rank fails\n"
    "      --restart N   start a rank that fails again, N times in all, with DDL_RESTARTED set: it joins the others\n"
    "                    when they call ddl_group_grow\n"
    "      --bind-cores  give each rank its own cores\n"
    "  -h, --help        show this\n"
    "\n"
    "The ranks find RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, DDL_JOB, the job's\n"
    "secret behind DDL_SECRET_FD, and who has ended behind DDL_ENDED_FD. Rank 0 has the standard input, unless that\n"
    "is a terminal.\n"
    "SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are passed on to all ranks; a second SIGINT or SIGTERM kills them.\n"
    "Exit code: that of the first rank that fails, 128 + signal when a signal ended it; 0 when none fails.\n";

static uint64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* One write, so that lines of ddlrun and of ranks do not mix. */
static void __attribute__((format(printf, 1, 2))) say(const char *format, ...) {
    char text[1024] = "ddlrun: ";
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text + 8, sizeof text - 9, format, args);
    va_end(args);
    size_t bytes = 8 + (n < 0 ? 0 : (size_t)n < sizeof text - 9 ? (size_t)n : sizeof text - 10);
    text[bytes++] = '\n';
    ssize_t wrote = write(2, text, bytes);
    (void)wrote;
}

static void __attribute__((format(printf, 2, 3), noreturn)) die(int code, const char *format, ...) {
    char text[900];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    say("%s", text);
    exit(code);
}

/* ---- what the user says ---- */

static long parse_count(const char *what, const char *text, long min, long max) {
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (end == text || *end != 0) {
        die(EXIT_USAGE, "%s is \"%.60s\", which is not a whole number", what, text);
    }
    if (errno == ERANGE || value < min || value > max) {
        die(EXIT_USAGE, "%s is %.60s; %ld to %ld is possible", what, text, min, max);
    }
    return value;
}

static double parse_seconds(const char *what, const char *text) {
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end != 0 || !(value >= 0) || value > 1e8) {
        die(EXIT_USAGE, "%s is \"%.60s\", which is not a number of seconds", what, text);
    }
    return value;
}

/* The value of an option: the rest of "--port=5" or the next argument. */
static const char *option_value(int argc, char **argv, int *at, const char *name) {
    size_t n = strlen(name);
    if (argv[*at][n] == '=') {
        return argv[*at] + n + 1;
    }
    if (*at + 1 >= argc) {
        die(EXIT_USAGE, "%s needs a value; ddlrun --help explains", name);
    }
    return argv[++*at];
}

static bool is_option(const char *arg, const char *name) {
    size_t n = strlen(name);
    return strncmp(arg, name, n) == 0 && (arg[n] == 0 || (arg[n] == '=' && name[1] == '-'));
}

static void check_env(const char *text) {
    const char *equals = strchr(text, '=');
    if (equals == NULL || equals == text) {
        die(EXIT_USAGE, "--env is \"%.60s\"; NAME=VALUE is possible", text);
    }
}

/* `name` goes before the text: "" for a text that has its own. */
static void add_env(job *j, const char *name, const char *text) {
    size_t count = 0;
    while (j->extra_env != NULL && j->extra_env[count] != NULL) {
        count++;
    }
    char **grown = realloc(j->extra_env, (count + 2) * sizeof *grown);
    if (grown == NULL || asprintf(&grown[count], "%s%s", name, text) < 0) {
        die(1, "out of memory");
    }
    grown[count + 1] = NULL;
    j->extra_env = grown;
}

/* Options with a value. False: it is none of them. */
static bool parse_valued(job *j, int argc, char **argv, int *at) {
    const char *arg = argv[*at];
    if (is_option(arg, "-n") || is_option(arg, "--np")) {
        const char *name = arg[1] == '-' ? "--np" : "-n";
        j->count = (int)parse_count("the number of ranks (-n)", option_value(argc, argv, at, name), 1, RANKS_MAX);
    } else if (is_option(arg, "--port")) {
        j->port = (int)parse_count("--port", option_value(argc, argv, at, "--port"), 1, 65535);
    } else if (is_option(arg, "--restart")) {
        j->restarts = (int)parse_count("--restart", option_value(argc, argv, at, "--restart"), 0, 1000000);
    } else if (is_option(arg, "--env")) {
        const char *text = option_value(argc, argv, at, "--env");
        check_env(text);
        add_env(j, "", text);
    } else if (is_option(arg, "--transport")) {
        add_env(j, "DDL_TRANSPORTS=", option_value(argc, argv, at, "--transport"));
    } else if (is_option(arg, "--timeout")) {
        j->timeout_s = parse_seconds("--timeout", option_value(argc, argv, at, "--timeout"));
    } else if (is_option(arg, "--grace")) {
        j->grace_s = parse_seconds("--grace", option_value(argc, argv, at, "--grace"));
    } else {
        return false;
    }
    return true;
}

static void parse(job *j, int argc, char **argv) {
    int at = 1;
    for (; at < argc && argv[at][0] == '-'; at++) {
        const char *arg = argv[at];
        if (strcmp(arg, "--") == 0) {
            at++;
            break;
        } else if (strcmp(arg, "-h") == 0 || strcmp(arg, "--help") == 0) {
            fputs(usage, stdout);
            exit(ended("ddlrun", 0));
        } else if (strcmp(arg, "--prefix") == 0) {
            j->prefix = true;
        } else if (strcmp(arg, "--no-prefix") == 0) {
            j->prefix = false;
        } else if (strcmp(arg, "--bind-cores") == 0) {
            j->bind_cores = true;
        } else if (strcmp(arg, "--keep-going") == 0) {
            j->keep_going = true;
        } else if (!parse_valued(j, argc, argv, &at)) {
            char text[400];
            die(EXIT_USAGE, "%s", unknown_flag(usage, arg, text, sizeof text));
        }
    }
    if (j->count == 0) {
        die(EXIT_USAGE, "-n is missing: how many ranks to start, as in ddlrun -n 4 ./train");
    }
    if (at >= argc) {
        die(EXIT_USAGE, "which program is to be started? As in ddlrun -n 4 ./train");
    }
    j->argv = argv + at;
}

/* ---- what the ranks share ---- */

/* A port of 127.0.0.1, kept by a socket that is bound and does not listen: with SO_REUSEADDR on both, rank 0 can still
 * listen on it, but the kernel gives it to nobody else meanwhile. */
static void reserve_port(job *j) {
    struct sockaddr_in a;
    socklen_t bytes = sizeof a;
    int yes = 1;
    memset(&a, 0, sizeof a);
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    a.sin_port = htons((uint16_t)j->port);
    j->port_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    (void)setsockopt(j->port_fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (j->port_fd < 0 || bind(j->port_fd, (struct sockaddr *)&a, sizeof a) != 0) {
        die(1, "port %d of 127.0.0.1 cannot be used: %s; leave --port out for a free one", j->port, strerror(errno));
    }
    if (getsockname(j->port_fd, (struct sockaddr *)&a, &bytes) != 0) {
        die(1, "getsockname: %s", strerror(errno));
    }
    j->port = ntohs(a.sin_port);
}

/* 32 random bytes in memory that only descendants of ddlrun can open; sealed, so that no rank changes it. */
static void make_secret(job *j) {
    unsigned char bytes[32], name[8];
    if (getrandom(bytes, sizeof bytes, 0) != (ssize_t)sizeof bytes ||
        getrandom(name, sizeof name, 0) != (ssize_t)sizeof name) {
        die(1, "the kernel gives no random bytes: %s", strerror(errno));
    }
    j->secret_fd = memfd_create("ddl-secret", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (j->secret_fd < 0 || write(j->secret_fd, bytes, sizeof bytes) != (ssize_t)sizeof bytes ||
        fcntl(j->secret_fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        die(1, "cannot pass the job secret: %s", strerror(errno));
    }
    explicit_bzero(bytes, sizeof bytes);
    for (size_t i = 0; i < sizeof name; i++) {
        snprintf(j->name + 2 * i, 3, "%02x", name[i]);
    }
}

static void make_notes(job *j) {
    j->ended_fd = memfd_create("ddl-ended", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (j->ended_fd < 0 || ftruncate(j->ended_fd, j->count) != 0 ||
        fcntl(j->ended_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        die(1, "cannot make notes of ranks that end: %s", strerror(errno));
    }
}

static void catch_signals(job *j) {
    static const int caught[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGTSTP, SIGCHLD};
    sigset_t set;
    sigemptyset(&set);
    for (size_t i = 0; i < sizeof caught / sizeof *caught; i++) {
        sigaddset(&set, caught[i]);
    }
    (void)sigprocmask(SIG_BLOCK, &set, NULL);
    (void)signal(SIGPIPE, SIG_IGN);
    j->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (j->signal_fd < 0) {
        die(1, "signalfd: %s", strerror(errno));
    }
}

/* Two pipes a rank. */
static void raise_fd_limit(const job *j) {
    struct rlimit limit;
    rlim_t need = (rlim_t)j->count * 2 + 64;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < need) {
        unsigned long long hard = (unsigned long long)limit.rlim_max;
        limit.rlim_cur = need;
        if (limit.rlim_max < need || setrlimit(RLIMIT_NOFILE, &limit) != 0) {
            die(1, "%d ranks need %llu file descriptors, the limit is %llu; see ulimit -n", j->count,
                (unsigned long long)need, hard);
        }
    }
}

/* ---- the warden ---- */

typedef struct note {
    int rank; /* -1: all is well, the warden may go */
    pid_t group;
} note;

/* Collects the process group of each rank from a pipe until it ends. An end without the last note says that ddlrun was
 * killed, and with it the one who would have ended the ranks. PR_SET_PDEATHSIG alone reaches a rank but not what it
 * started. */
static void __attribute__((noreturn)) be_warden(int pipe_fd) {
    pid_t groups[RANKS_MAX] = {0};
    note n;
    setpgid(0, 0);
    while (read(pipe_fd, &n, sizeof n) == (ssize_t)sizeof n) {
        if (n.rank < 0) {
            _exit(0);
        }
        groups[n.rank] = n.group;
    }
    for (int r = 0; r < RANKS_MAX; r++) {
        if (groups[r] > 0) {
            kill(-groups[r], SIGKILL);
        }
    }
    _exit(0);
}

static void start_warden(job *j) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
        die(1, "pipe2: %s", strerror(errno));
    }
    pid_t pid = fork();
    if (pid < 0) {
        die(1, "fork: %s", strerror(errno));
    }
    if (pid == 0) { /* holds nothing of ours open: output must end when the ranks have ended */
        close(ends[1]);
        int null = open("/dev/null", O_RDWR);
        for (int fd = 0; fd < 3; fd++) {
            dup2(null, fd);
        }
        be_warden(ends[0]);
    }
    close(ends[0]);
    j->warden_fd = ends[1];
}

static void tell_warden(const job *j, int r, pid_t group) {
    note n = {r, group};
    ssize_t wrote = write(j->warden_fd, &n, sizeof n);
    (void)wrote;
}

/* ---- starting ---- */

static void set_number(const char *name, int value) {
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

static void set_env(const job *j, int r) {
    set_number("RANK", r);
    set_number("WORLD_SIZE", j->count);
    set_number("LOCAL_RANK", r);
    set_number("LOCAL_WORLD_SIZE", j->count);
    set_number("MASTER_PORT", j->port);
    set_number("DDL_SECRET_FD", j->secret_fd);
    set_number("DDL_ENDED_FD", j->ended_fd);
    set_number("DDL_RESTARTED", j->ranks[r].starts);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("DDL_JOB", j->name, 0); /* the user's own stays */
    for (char **e = j->extra_env; e != NULL && *e != NULL; e++) {
        putenv(*e);
    }
}

/* Rank r's share of the cores that ddlrun itself may use; with more ranks than cores they take turns. */
static void bind_cores(const job *j, int r) {
    cpu_set_t mine, share;
    size_t cores[CPU_SETSIZE], count = 0, n = (size_t)j->count, rank_at = (size_t)r;
    if (sched_getaffinity(0, sizeof mine, &mine) != 0) {
        return;
    }
    for (size_t c = 0; c < CPU_SETSIZE; c++) {
        if (CPU_ISSET(c, &mine)) {
            cores[count++] = c;
        }
    }
    size_t first = count * rank_at / n, last = count * (rank_at + 1) / n;
    CPU_ZERO(&share);
    for (size_t c = first; c < last; c++) {
        CPU_SET(cores[c], &share);
    }
    if (first == last) {
        CPU_SET(cores[rank_at % count], &share);
    }
    (void)sched_setaffinity(0, sizeof share, &share);
}

/* Becomes the program. What goes wrong is told to ddlrun through report_fd, which a successful exec closes. */
static void __attribute__((noreturn)) be_rank(const job *j, int r, const int outputs[2], int report_fd, pid_t parent) {
    sigset_t none;
    sigemptyset(&none);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) {
        _exit(1);
    }
    setpgid(0, 0);
    (void)signal(SIGPIPE, SIG_DFL);
    (void)sigprocmask(SIG_SETMASK, &none, NULL);
    if (r > 0 || isatty(0)) { /* reading a terminal from another process group would stop the rank */
        int null = open("/dev/null", O_RDONLY);
        dup2(null, 0);
        close(null);
    }
    for (int i = 0; j->prefix && i < 2; i++) {
        dup2(outputs[i], i + 1);
    }
    (void)fcntl(j->secret_fd, F_SETFD, 0);
    (void)fcntl(j->ended_fd, F_SETFD, 0);
    set_env(j, r);
    if (j->bind_cores) {
        bind_cores(j, r);
    }
    execvp(j->argv[0], j->argv);
    int error = errno;
    ssize_t n = write(report_fd, &error, sizeof error);
    _exit(n > 0 ? EXIT_NOT_FOUND : 1);
}

static void signal_all(const job *j, int sig) {
    for (int r = 0; r < j->count; r++) {
        if (j->ranks[r].pid > 0) {
            kill(-j->ranks[r].group, sig);
        }
    }
}

static void __attribute__((noreturn)) exec_failed(const job *j, int error) {
    signal_all(j, SIGKILL);
    tell_warden(j, -1, 0);
    if (error == ENOENT && strchr(j->argv[0], '/') == NULL) {
        die(EXIT_NOT_FOUND, "there is no program %.200s in PATH; a program of this folder is called ./%.200s",
            j->argv[0], j->argv[0]);
    }
    die(error == ENOENT ? EXIT_NOT_FOUND : EXIT_NOT_EXECUTABLE, "cannot start %.200s: %s", j->argv[0], strerror(error));
}

static void start_rank(job *j, int r) {
    int outputs[2][2] = {{-1, -1}, {-1, -1}}, report[2], error;
    rank *k = &j->ranks[r];
    if (pipe2(report, O_CLOEXEC) != 0 ||
        (j->prefix && (pipe2(outputs[0], O_CLOEXEC) != 0 || pipe2(outputs[1], O_CLOEXEC) != 0))) {
        die(1, "pipe2: %s", strerror(errno));
    }
    pid_t self = getpid(), pid = fork();
    if (pid < 0) {
        error = errno;
        signal_all(j, SIGKILL);
        die(1, "cannot start rank %d of %d: fork: %s", r, j->count, strerror(error));
    }
    if (pid == 0) {
        be_rank(j, r, (int[2]){outputs[0][1], outputs[1][1]}, report[1], self);
    }
    (void)setpgid(pid, pid); /* here and in the child: whoever comes first */
    tell_warden(j, r, pid);
    k->pid = k->group = pid;
    j->running++;
    for (int i = 0; i < 2; i++) {
        k->streams[i] = (stream){.fd = outputs[i][0], .to = i + 1};
        if (j->prefix) {
            close(outputs[i][1]);
            (void)fcntl(outputs[i][0], F_SETFL, O_NONBLOCK);
        }
    }
    close(report[1]);
    if (read(report[0], &error, sizeof error) == (ssize_t)sizeof error) {
        exec_failed(j, error);
    }
    close(report[0]);
}

/* ---- output ---- */

static bool write_all(int fd, const char *bytes, size_t count) {
    while (count > 0) {
        ssize_t n = write(fd, bytes, count);
        if (n < 0 && errno == EAGAIN) { /* somebody made our output non-blocking: it is shared with other programs */
            struct pollfd p = {fd, POLLOUT, 0};
            (void)poll(&p, 1, -1);
        } else if (n < 0 && errno != EINTR) {
            return false;
        }
        bytes += n > 0 ? n : 0;
        count -= n > 0 ? (size_t)n : 0;
    }
    return true;
}

static bool output_lost; /* it could not be written, and that was said */

static void close_stream(stream *s) {
    if (s->fd >= 0) {
        close(s->fd);
    }
    free(s->line);
    *s = (stream){.fd = -1, .to = s->to};
}

/* Writes the first `bytes` of the line buffer behind a prefix, and keeps the rest. When nobody reads our output any
 * more the rank's pipe is closed, so that the rank learns of it as it would without ddlrun. */
static void put_line(stream *s, int r, size_t bytes) {
    char prefix[24];
    int n = snprintf(prefix, sizeof prefix, "[%d] ", r);
    bool whole = bytes > 0 && s->line[bytes - 1] == '\n';
    bool good =
        write_all(s->to, prefix, (size_t)n) && write_all(s->to, s->line, bytes) && (whole || write_all(s->to, "\n", 1));
    if (!good) {
        if (errno != EPIPE && !output_lost) {
            output_lost = true;
            say("cannot write standard %s: %s. What the ranks print there is lost", s->to == 1 ? "output" : "error",
                strerror(errno));
        }
        close_stream(s);
        return;
    }
    s->bytes -= bytes;
    memmove(s->line, s->line + bytes, s->bytes);
}

static bool grow(stream *s) {
    size_t cap = s->cap == 0 ? 4096 : s->cap * 2;
    char *line = cap <= LINE_MAX_BYTES ? realloc(s->line, cap) : NULL;
    if (line == NULL) {
        return false;
    }
    s->line = line;
    s->cap = cap;
    return true;
}

/* Passes on the lines that `came` new bytes at the end of the buffer complete. */
static void put_complete(stream *s, int r, size_t came) {
    size_t from = s->bytes - came;
    while (s->fd >= 0) {
        char *end = memchr(s->line + from, '\n', s->bytes - from);
        if (end == NULL) {
            return;
        }
        put_line(s, r, (size_t)(end - s->line) + 1);
        from = 0;
    }
}

/* Reads what is there, and no more than `most` bytes: a rank that writes faster than we do must not keep us from the
 * others, from signals and from the time. */
static void read_stream(stream *s, int r, size_t most) {
    while (s->fd >= 0 && most > 0) {
        if (s->bytes == s->cap && !grow(s)) {
            put_line(s, r, s->bytes);
            continue;
        }
        ssize_t n = read(s->fd, s->line + s->bytes, s->cap - s->bytes);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0 && errno == EAGAIN) {
            return;
        }
        if (n <= 0) {
            if (s->bytes > 0) {
                put_line(s, r, s->bytes);
            }
            close_stream(s);
            return;
        }
        s->bytes += (size_t)n;
        most -= (size_t)n < most ? (size_t)n : most;
        put_complete(s, r, (size_t)n);
    }
}

/* ---- ends ---- */

static const char *signal_name(int sig) {
    static const struct {
        int sig;
        const char *name;
    } names[] = {{SIGHUP, "SIGHUP"},   {SIGINT, "SIGINT"},   {SIGQUIT, "SIGQUIT"}, {SIGILL, "SIGILL"},
                 {SIGTRAP, "SIGTRAP"}, {SIGABRT, "SIGABRT"}, {SIGBUS, "SIGBUS"},   {SIGFPE, "SIGFPE"},
                 {SIGKILL, "SIGKILL"}, {SIGUSR1, "SIGUSR1"}, {SIGSEGV, "SIGSEGV"}, {SIGUSR2, "SIGUSR2"},
                 {SIGPIPE, "SIGPIPE"}, {SIGALRM, "SIGALRM"}, {SIGTERM, "SIGTERM"}, {SIGXCPU, "SIGXCPU"},
                 {SIGSYS, "SIGSYS"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (names[i].sig == sig) {
            return names[i].name;
        }
    }
    return strsignal(sig);
}

/* SIGTERM now, SIGKILL after the grace. */
static void end_all(job *j) {
    if (j->kill_ms == 0) {
        signal_all(j, SIGTERM);
        signal_all(j, SIGCONT); /* a stopped rank cannot end */
        j->kill_ms = now_ms() + (uint64_t)(j->grace_s * 1000) + 1;
    }
}

static void report_failure(job *j, int r, int status) {
    const char *rest = j->running > 0 && !j->keep_going ? "; ending the others" : "";
    if (WIFSIGNALED(status)) {
        int sig = WTERMSIG(status);
        j->exit_code = 128 + sig;
        say("rank %d of %d was killed by signal %d (%s%s)%s%s", r, j->count, sig, signal_name(sig),
            WCOREDUMP(status) ? ", core dumped" : "", sig == SIGKILL ? ", perhaps for want of memory: see dmesg" : "",
            rest);
    } else {
        j->exit_code = WEXITSTATUS(status);
        say("rank %d of %d failed with exit code %d%s", r, j->count, j->exit_code, rest);
    }
}

/* Starts a rank that failed again, if it may be. What it wrote comes first, what it started ends. */
static bool restart(job *j, int r, int status) {
    rank *k = &j->ranks[r];
    char how[64];
    if (j->restarts == 0 || j->kill_ms != 0 || j->endings > 0) {
        return false;
    }
    j->restarts--;
    k->starts++;
    if (WIFSIGNALED(status)) {
        snprintf(how, sizeof how, "was killed by signal %d", WTERMSIG(status));
    } else {
        snprintf(how, sizeof how, "failed with exit code %d", WEXITSTATUS(status));
    }
    kill(-k->group, SIGKILL);
    for (int i = 0; i < 2; i++) {
        read_stream(&k->streams[i], r, READ_LAST);
        if (k->streams[i].bytes > 0) {
            put_line(&k->streams[i], r, k->streams[i].bytes);
        }
        close_stream(&k->streams[i]);
    }
    say("rank %d of %d %s; starting it again, %d restart%s left", r, j->count, how, j->restarts,
        j->restarts == 1 ? "" : "s");
    start_rank(j, r);
    return true;
}

/* Reaps what has ended. Of several at once one that a signal ended is named before one that gave up in consequence. */
static void reap(job *j) {
    int first = -1, first_status = 0;
    for (int r = 0; r < j->count; r++) {
        int status;
        if (j->ranks[r].pid > 0 && waitpid(j->ranks[r].pid, &status, WNOHANG) == j->ranks[r].pid) {
            j->ranks[r].pid = 0;
            j->running--;
            if (status != 0 && restart(j, r, status)) {
                continue;
            }
            j->ended = (unsigned char)(j->ended < 255 ? j->ended + 1 : 255);
            ssize_t noted = pwrite(j->ended_fd, &j->ended, 1, r);
            (void)noted; /* the others wait for their deadline then */
            if (status != 0 && (first < 0 || (WIFSIGNALED(status) && !WIFSIGNALED(first_status)))) {
                first = r;
                first_status = status;
            }
        }
    }
    if (first < 0 || j->exit_code != 0) {
        return;
    }
    for (int i = 0; i < 2; i++) { /* its last words come before our verdict */
        read_stream(&j->ranks[first].streams[i], first, READ_LAST);
    }
    report_failure(j, first, first_status);
    if (!j->keep_going) {
        end_all(j);
    }
}

static void on_signal(job *j, int sig) {
    if (sig == SIGCHLD) {
        reap(j);
    } else if (sig == SIGTSTP) {
        signal_all(j, SIGTSTP);
        (void)kill(getpid(), SIGSTOP);
        signal_all(j, SIGCONT);
    } else if ((sig == SIGINT || sig == SIGTERM) && ++j->endings > 1) {
        say("%s for the second time: killing all ranks", signal_name(sig));
        signal_all(j, SIGKILL);
    } else {
        signal_all(j, sig);
    }
}

static void on_time(job *j, uint64_t now) {
    if (j->timeout_ms != 0 && now >= j->timeout_ms) {
        j->timeout_ms = 0;
        say("%d of %d ranks did not end within %g s; ending them", j->running, j->count, j->timeout_s);
        j->exit_code = j->exit_code != 0 ? j->exit_code : EXIT_TIMEOUT;
        end_all(j);
    }
    if (j->kill_ms != 0 && now >= j->kill_ms && j->running > 0) {
        signal_all(j, SIGKILL);
        j->kill_ms = now + 1000;
    }
}

/* ---- the loop ---- */

static int next_event_ms(const job *j, uint64_t now) {
    uint64_t at = j->timeout_ms;
    if (j->kill_ms != 0 && (at == 0 || j->kill_ms < at)) {
        at = j->kill_ms;
    }
    return at == 0 ? -1 : at <= now ? 0 : at - now > 1000000 ? 1000000 : (int)(at - now);
}

/* One round: waits for output, signals or time. wait_ms < 0: as long as it takes. */
static void turn(job *j, struct pollfd *polls, int wait_ms) {
    nfds_t count = 1;
    polls[0] = (struct pollfd){j->signal_fd, POLLIN, 0};
    for (int r = 0; r < j->count; r++) {
        for (int i = 0; i < 2; i++) {
            polls[count++] = (struct pollfd){j->ranks[r].streams[i].fd, POLLIN, 0}; /* poll skips -1 */
        }
    }
    if (poll(polls, count, wait_ms) < 0) {
        return;
    }
    for (int r = 0; r < j->count; r++) {
        for (int i = 0; i < 2; i++) {
            if (polls[1 + 2 * r + i].revents != 0) {
                read_stream(&j->ranks[r].streams[i], r, READ_TURN);
            }
        }
    }
    struct signalfd_siginfo info;
    while (read(j->signal_fd, &info, sizeof info) == (ssize_t)sizeof info) {
        on_signal(j, (int)info.ssi_signo);
    }
    on_time(j, now_ms());
}

static bool streams_open(const job *j) {
    for (int r = 0; r < j->count; r++) {
        if (j->ranks[r].streams[0].fd >= 0 || j->ranks[r].streams[1].fd >= 0) {
            return true;
        }
    }
    return false;
}

static void run(job *j) {
    struct pollfd *polls = calloc(1 + 2 * (size_t)j->count, sizeof *polls);
    if (polls == NULL) {
        die(1, "out of memory");
    }
    while (j->running > 0) {
        turn(j, polls, next_event_ms(j, now_ms()));
    }
    if (j->exit_code != 0) { /* what the ranks of a failed job have started goes with them */
        for (int r = 0; r < j->count; r++) {
            kill(-j->ranks[r].group, SIGKILL);
        }
    }
    for (uint64_t until = now_ms() + DRAIN_MS, now; streams_open(j) && (now = now_ms()) < until;) {
        turn(j, polls, (int)(until - now));
    }
    for (int r = 0; r < j->count; r++) {
        for (int i = 0; i < 2; i++) {
            if (j->ranks[r].streams[i].bytes > 0) {
                put_line(&j->ranks[r].streams[i], r, j->ranks[r].streams[i].bytes);
            }
            close_stream(&j->ranks[r].streams[i]);
        }
    }
    free(polls);
}

/* Closed descriptors 0 to 2 become /dev/null, for the ranks too: else what is opened next would get what is printed. */
static void hold_standard(void) {
    int fd;
    do {
        fd = open("/dev/null", O_RDWR);
    } while (fd >= 0 && fd <= 2);
    if (fd > 2) {
        close(fd);
    }
}

int main(int argc, char **argv) {
    hold_standard();
    job j = {.prefix = true, .grace_s = 5};
    parse(&j, argc, argv);
    raise_fd_limit(&j);
    j.ranks = calloc((size_t)j.count, sizeof *j.ranks);
    if (j.ranks == NULL) {
        die(1, "out of memory");
    }
    reserve_port(&j);
    make_secret(&j);
    make_notes(&j);
    catch_signals(&j);
    start_warden(&j);
    for (int r = 0; r < j.count; r++) {
        start_rank(&j, r);
    }
    j.timeout_ms = j.timeout_s > 0 ? now_ms() + (uint64_t)(j.timeout_s * 1000) + 1 : 0;
    run(&j);
    tell_warden(&j, -1, 0);
    free(j.ranks);
    return j.exit_code == 0 && output_lost ? 1 : j.exit_code;
}

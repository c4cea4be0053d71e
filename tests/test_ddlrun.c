/* ddlrun: what the ranks find, how their output arrives, how signals reach them, and which exit code comes back. Each
 * test runs the real program on shell scripts.
 * tests/run: variants=gcc timeout=120 */
#include "test.h"

#include "ranks.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>

/* A run of ddlrun: its outputs so far, and its exit status. */
typedef struct program {
    pid_t pid;
    int fds[2];
    char *text[2];
    size_t bytes[2];
    int status; /* exit code, or 1000 + signal */
    double took_s;
} program;

static const char *ddlrun(void) {
    static char path[500];
    snprintf(path, sizeof path, "%s/ddlrun", test_build_dir());
    return path;
}

/* words: the arguments, separated by spaces; script: one more argument, as it is. */
static void begin(program *p, const char *words, const char *script) {
    char copy[1000], *argv[40], *save = NULL;
    int argc = 0, out[2], err[2];
    memset(p, 0, sizeof *p);
    snprintf(copy, sizeof copy, "%s", words);
    argv[argc++] = (char *)(size_t)ddlrun();
    for (char *w = strtok_r(copy, " ", &save); w != NULL; w = strtok_r(NULL, " ", &save)) {
        argv[argc++] = w;
    }
    if (script != NULL) {
        argv[argc++] = (char *)(size_t)script;
    }
    argv[argc] = NULL;
    if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) {
        perror("pipe2");
        exit(1);
    }
    fflush(NULL);
    p->took_s = test_now_s();
    p->pid = fork();
    if (p->pid == 0) {
        dup2(out[1], 1);
        dup2(err[1], 2);
        for (int sig = 1; sig < 16; sig++) { /* whoever runs the tests may ignore some: nohup, a job in the background */
            (void)signal(sig, SIG_DFL);
        }
        execv(argv[0], argv);
        _exit(99);
    }
    close(out[1]);
    close(err[1]);
    p->fds[0] = out[0];
    p->fds[1] = err[0];
}

/* Reads both outputs until they end, or until one contains the text. */
static void read_until(program *p, const char *text) {
    static char chunk[65536];
    while (p->fds[0] >= 0 || p->fds[1] >= 0) {
        struct pollfd polls[2] = {{p->fds[0], POLLIN, 0}, {p->fds[1], POLLIN, 0}};
        poll(polls, 2, -1);
        for (int i = 0; i < 2; i++) {
            ssize_t n = polls[i].revents != 0 ? read(p->fds[i], chunk, sizeof chunk) : -1;
            if (n == 0) {
                close(p->fds[i]);
                p->fds[i] = -1;
            }
            if (n > 0) {
                p->text[i] = realloc(p->text[i], p->bytes[i] + (size_t)n + 1);
                memcpy(p->text[i] + p->bytes[i], chunk, (size_t)n);
                p->bytes[i] += (size_t)n;
                p->text[i][p->bytes[i]] = 0;
            }
            if (text != NULL && p->text[i] != NULL && strstr(p->text[i], text) != NULL) {
                return;
            }
        }
    }
}

static void finish(program *p) {
    int status = 0;
    read_until(p, NULL);
    waitpid(p->pid, &status, 0);
    p->took_s = test_now_s() - p->took_s;
    p->status = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
    for (int i = 0; i < 2; i++) {
        p->text[i] = p->text[i] != NULL ? p->text[i] : strdup("");
    }
}

static void forget(program *p) {
    free(p->text[0]);
    free(p->text[1]);
}

static void run(program *p, const char *words, const char *script) {
    begin(p, words, script);
    finish(p);
}

/* The script with $MARK replaced by this process's number, lest another run's be taken for ours. */
static const char *marked(const char *script) {
    static char texts[4][400];
    static int next;
    char *out = texts[next++ % 4];
    const char *at = strstr(script, "$MARK");
    snprintf(out, sizeof texts[0], "%.*s%d%s", at ? (int)(at - script) : 0, script, (int)getpid(),
             at ? at + 5 : script);
    return out;
}

/* How often a line is there. */
static int lines(const char *text, const char *line) {
    int count = 0;
    for (const char *at = text; *at != 0;) {
        size_t n = strcspn(at, "\n");
        count += n == strlen(line) && memcmp(at, line, n) == 0;
        at += n + (at[n] == '\n');
    }
    return count;
}

/* Some run of the script as `sh -c` is still alive: its command line carries the mark. */
static int alive(const char *mark) {
    char command[200];
    snprintf(command, sizeof command, "pgrep -f '[%c]%s' >/dev/null", mark[0], mark + 1);
    return system(command) == 0;
}

static int alive_after(const char *mark, double seconds) {
    for (double until = test_now_s() + seconds * test_slow(); test_now_s() < until; usleep(10000)) {
        if (!alive(mark)) {
            return 0;
        }
    }
    return alive(mark);
}

TEST(ranks_find_their_place) {
    program p;
    run(&p, "-n 3 sh -c",
        "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR; echo port $MASTER_PORT job $DDL_JOB");
    CHECK_EQ(p.status, 0);
    CHECK_EQ(lines(p.text[0], "[0] 0 3 0 3 127.0.0.1"), 1);
    CHECK_EQ(lines(p.text[0], "[1] 1 3 1 3 127.0.0.1"), 1);
    CHECK_EQ(lines(p.text[0], "[2] 2 3 2 3 127.0.0.1"), 1);
    CHECK_STR(p.text[1], "");
    CHECK_EQ(p.bytes[1], 0);
    char first[200] = "", line[200];
    for (int r = 0; r < 3; r++) { /* all have the same port and job */
        char mark[20];
        snprintf(mark, sizeof mark, "[%d] port ", r);
        const char *at = strstr(p.text[0], mark);
        CHECK(at != NULL);
        snprintf(line, sizeof line, "%.*s", at ? (int)strcspn(at + 4, "\n") : 0, at ? at + 4 : "");
        if (r == 0) {
            snprintf(first, sizeof first, "%s", line);
        }
        CHECK_EQ(strcmp(first, line), 0);
    }
    int port = 0;
    char job[40] = "";
    CHECK_EQ(sscanf(first, "port %d job %39s", &port, job), 2);
    CHECK(port > 0 && strlen(job) == 16);
    forget(&p);
}

TEST(options_reach_the_ranks) {
    program p;
    char words[200];
    int port = ranks_port();
    snprintf(words, sizeof words, "--np=2 --port %d --transport shm,tcp --env A=7 --env=B=x=y --env RANK_NAME= -- sh -c",
             port);
    run(&p, words, "echo $MASTER_PORT $A $B \"<$RANK_NAME>\" $DDL_TRANSPORTS");
    char line[100];
    snprintf(line, sizeof line, "[1] %d 7 x=y <> shm,tcp", port);
    CHECK_EQ(p.status, 0);
    CHECK_EQ(lines(p.text[0], line), 1);
    forget(&p);
    run(&p, "-n 2 --bind-cores sh -c", "grep Cpus_allowed_list /proc/self/status");
    CHECK_EQ(p.status, 0);
    CHECK_STR(p.text[0], "[1] Cpus_allowed_list:");
    if (sysconf(_SC_NPROCESSORS_ONLN) >= 2) { /* different cores */
        const char *a = strstr(p.text[0], "[0] Cpus"), *b = strstr(p.text[0], "[1] Cpus");
        CHECK(a != NULL && b != NULL && strncmp(a + 3, b + 3, strcspn(a + 3, "\n")) != 0);
    }
    forget(&p);
}

TEST(ranks_that_are_bound_to_cores_of_their_own_share_none) {
    program p;
    char words[600];
    cpu_set_t all, two;
    int cores = 0;
    CHECK_EQ(sched_getaffinity(0, sizeof all, &all), 0);
    CPU_ZERO(&two);
    for (size_t k = 0; k < CPU_SETSIZE && cores < 2; k++) {
        if (CPU_ISSET(k, &all)) {
            CPU_SET(k, &two);
            cores++;
        }
    }
    if (cores < 2) {
        SKIP("needs two cores");
    }
    FILE *quota = fopen("/sys/fs/cgroup/cpu.max", "r");
    int limited = quota != NULL && getc(quota) != 'm'; /* "max 100000": none */
    if (quota != NULL) {
        fclose(quota);
    }
    if (limited) {
        SKIP("a quota of this container is shared by all ranks, however they are bound");
    }
    CHECK_EQ(sched_setaffinity(0, sizeof two, &two), 0);
    snprintf(words, sizeof words, "-n 2 --bind-cores --no-prefix %s/ddl-info", test_build_dir());
    run(&p, words, NULL);
    CHECK_EQ(p.status, 0);
    CHECK_STR(p.text[0], "  1 cores that it may use, 2 ranks on this host");
    CHECK_STR(p.text[0], "ranks per core: 1");
    forget(&p);
    snprintf(words, sizeof words, "-n 3 --bind-cores --no-prefix %s/ddl-info", test_build_dir());
    run(&p, words, NULL);
    CHECK_STR(p.text[0], "ranks per core: 2"); /* two of three take turns */
    forget(&p);
    CHECK_EQ(sched_setaffinity(0, sizeof all, &all), 0);
}

/* All ranks read the same 32 bytes; two runs differ; the environment holds none of them; programs that a rank starts
 * inherit the descriptor, as a shell's child must. */
TEST(secret_is_shared_and_fresh) {
    program p;
    char seen[2][65];
    for (int i = 0; i < 2; i++) {
        run(&p, "-n 3 --no-prefix sh -c", "od -An -v -tx1 -w32 /proc/self/fd/$DDL_SECRET_FD | tr -d ' '");
        CHECK_EQ(p.status, 0);
        CHECK_EQ(p.bytes[0], 3 * 65);
        snprintf(seen[i], sizeof seen[i], "%.64s", p.text[0]);
        CHECK_EQ(lines(p.text[0], seen[i]), 3);
        forget(&p);
    }
    CHECK(strcmp(seen[0], seen[1]) != 0);
    run(&p, "-n 1 sh -c", "echo x > /proc/self/fd/$DDL_SECRET_FD || echo sealed");
    CHECK_EQ(lines(p.text[0], "[0] sealed"), 1);
    forget(&p);
}

/* The port is the job's: rank 0 may listen on it while nobody else gets it. */
TEST(port_is_kept) {
    program p, other;
    char words[100];
    begin(&p, "-n 1 sh -c", "echo $MASTER_PORT; read -r line < /dev/tty || sleep 3");
    read_until(&p, "\n");
    int port = p.text[0] != NULL ? atoi(p.text[0] + 4) : 0;
    CHECK(port > 0);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((unsigned short)port)};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    CHECK_EQ(bind(fd, (struct sockaddr *)&a, sizeof a), -1); /* somebody else */
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    CHECK_EQ(bind(fd, (struct sockaddr *)&a, sizeof a), 0); /* a store of the job */
    CHECK_EQ(listen(fd, 5), 0);
    snprintf(words, sizeof words, "-n 1 --port %d true", port);
    run(&other, words, NULL);
    CHECK_EQ(other.status, 1);
    CHECK_STR(other.text[1], "cannot be used");
    forget(&other);
    close(fd);
    kill(p.pid, SIGTERM);
    finish(&p);
    forget(&p);
}

TEST(streams_stay_apart_and_lines_whole) {
    program p;
    run(&p, "-n 8 sh -c",
        "i=0; while [ $i -lt 200 ]; do echo out-$RANK-$i; echo err-$RANK-$i >&2; i=$((i+1)); done; printf 'no "
        "newline'; "
        "printf 'none here' >&2");
    CHECK_EQ(p.status, 0);
    int counts[2] = {0, 0};
    for (int s = 0; s < 2; s++) {
        for (char *line = strtok(p.text[s], "\n"); line != NULL; line = strtok(NULL, "\n")) {
            int prefix = -1, rank = -1, number = -1, used = 0;
            if (sscanf(line, s == 0 ? "[%d] out-%d-%d%n" : "[%d] err-%d-%d%n", &prefix, &rank, &number, &used) == 3) {
                CHECK(prefix == rank && line[used] == 0);
                counts[s]++;
            } else {
                CHECK_STR(line, s == 0 ? "] no newline" : "] none here");
                counts[s] += 1000;
            }
        }
    }
    CHECK_EQ(counts[0], 8 * 1200);
    CHECK_EQ(counts[1], 8 * 1200);
    forget(&p);
}

/* Lines of a megabyte from four ranks at once. */
TEST(long_lines_stay_whole) {
    program p;
    run(&p, "-n 4 sh -c",
        "for i in 1 2 3; do head -c 1048576 /dev/zero | tr '\\0' \"abcd$RANK\" | tr 'a' $RANK; echo; done");
    CHECK_EQ(p.status, 0);
    CHECK_EQ(p.bytes[0], 4 * 3 * (1048576 + 1 + 4));
    int count = 0;
    for (char *at = p.text[0]; at < p.text[0] + p.bytes[0]; at += 4 + 1048576 + 1, count++) {
        CHECK(at[0] == '[' && at[2] == ']' && at[3] == ' ' && at[4 + 1048576] == '\n');
        size_t same = 0;
        for (size_t i = 0; i < 1048576; i++) {
            same += at[4 + i] == at[1];
        }
        CHECK_EQ(same, 1048576);
    }
    CHECK_EQ(count, 12);
    forget(&p);
}

TEST(no_prefix_passes_through) {
    program p;
    run(&p, "-n 2 --no-prefix sh -c", "printf 'x\\n'; printf 'e\\n' >&2");
    CHECK_EQ(p.status, 0);
    CHECK_EQ(lines(p.text[0], "x"), 2);
    CHECK_EQ(lines(p.text[1], "e"), 2);
    forget(&p);
}

TEST(first_failure_gives_code_and_ends_the_rest) {
    program p;
    run(&p, "-n 4 sh -c", marked("[ $RANK = 2 ] && { echo last words >&2; exit 7; }; sleep 1291.$MARK & wait"));
    CHECK_EQ(p.status, 7);
    CHECK(p.took_s < 3 * test_slow());
    CHECK_STR(p.text[1], "ddlrun: rank 2 of 4 failed with exit code 7; ending the others\n");
    const char *words = strstr(p.text[1], "last words"), *verdict = strstr(p.text[1], "rank 2 of 4");
    CHECK(words != NULL && verdict != NULL && words < verdict);
    CHECK(!alive_after(marked("sleep 1291.$MARK"), 1)); /* children of ranks too */
    forget(&p);
}

TEST(signal_of_a_rank_is_named) {
    static const struct {
        const char *script, *name;
        int code;
    } cases[] = {{"[ $RANK = 1 ] && kill -SEGV $$; sleep 1292", "signal 11 (SIGSEGV", 139},
                 {"[ $RANK = 0 ] && kill -KILL $$; sleep 1292", "signal 9 (SIGKILL", 137},
                 {"[ $RANK = 1 ] && kill -ABRT $$; sleep 1292", "signal 6 (SIGABRT", 134}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        program p;
        run(&p, "-n 2 sh -c", cases[i].script);
        CHECK_EQ(p.status, cases[i].code);
        CHECK_STR(p.text[1], cases[i].name);
        forget(&p);
    }
}

TEST(keep_going_waits_for_the_others) {
    program p;
    run(&p, "-n 3 --keep-going sh -c", "[ $RANK = 1 ] && exit 4; sleep 0.5; echo done");
    CHECK_EQ(p.status, 4);
    CHECK_EQ(lines(p.text[0], "[0] done") + lines(p.text[0], "[2] done"), 2);
    forget(&p);
}

/* So many times in all, whichever rank it is; then the job ends as without. */
TEST(restart_starts_a_failed_rank_again) {
    program p;
    run(&p, "-n 3 --restart 2 sh -c", "echo start $DDL_RESTARTED; [ $RANK = 1 ] && [ $DDL_RESTARTED = 0 ] && kill -9 $$; "
                                      "[ $RANK = 2 ] && [ $DDL_RESTARTED = 0 ] && exit 7; echo done $DDL_RESTARTED");
    CHECK_EQ(p.status, 0);
    CHECK_EQ(lines(p.text[0], "[0] start 0") + lines(p.text[0], "[0] done 0"), 2);
    CHECK_EQ(lines(p.text[0], "[1] start 0") + lines(p.text[0], "[1] start 1") + lines(p.text[0], "[1] done 1"), 3);
    CHECK_EQ(lines(p.text[0], "[2] start 0") + lines(p.text[0], "[2] start 1") + lines(p.text[0], "[2] done 1"), 3);
    CHECK_STR(p.text[1], "rank 1 of 3 was killed by signal 9; starting it again, ");
    CHECK_STR(p.text[1], "rank 2 of 3 failed with exit code 7; starting it again, ");
    forget(&p);
    run(&p, "-n 2 --restart 3 sh -c", "[ $RANK = 0 ] && { echo try $DDL_RESTARTED; exit 9; }; sleep 100");
    CHECK_EQ(p.status, 9);
    CHECK_EQ(lines(p.text[0], "[0] try 3"), 1);
    CHECK_STR(p.text[1], "rank 0 of 2 failed with exit code 9; ending the others");
    forget(&p);
}

TEST(grace_then_kill) {
    program p;
    run(&p, "-n 3 --grace 0.5 sh -c",
        "trap 'echo deaf' TERM; [ $RANK = 1 ] && sleep 0.3 && exit 5; while :; do sleep 0.1; done");
    CHECK_EQ(p.status, 5);
    CHECK(p.took_s > 0.7 && p.took_s < 3 * test_slow());
    CHECK_EQ(lines(p.text[0], "[0] deaf"), 1);
    forget(&p);
}

TEST(timeout_ends_the_job) {
    program p;
    run(&p, "-n 2 --timeout 0.5 sh -c", marked("sleep 1293.$MARK"));
    CHECK_EQ(p.status, 124);
    CHECK(p.took_s > 0.4 && p.took_s < 3 * test_slow());
    CHECK_STR(p.text[1], "2 of 2 ranks did not end within 0.5 s");
    CHECK(!alive_after(marked("sleep 1293.$MARK"), 1));
    forget(&p);
}

/* Ranks that write faster than ddlrun reads keep it from nothing else. */
TEST(timeout_ends_a_job_that_never_stops_writing) {
    char command[700];
    snprintf(command, sizeof command, "exec timeout -s KILL %d %s -n 2 --timeout 0.5 yes > /dev/null 2> /dev/null",
             (int)(20 * test_slow()), ddlrun());
    int status = system(command);
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 124);
}

TEST(signals_are_passed_on) {
    static const int sent[] = {SIGHUP, SIGUSR1, SIGUSR2, SIGINT, SIGTERM};
    for (size_t i = 0; i < sizeof sent / sizeof *sent; i++) {
        program p;
        begin(&p, "-n 3 sh -c",
              "for s in HUP USR1 USR2 INT TERM; do trap \"echo got $s; exit 0\" $s; done; echo ready; "
              "while :; do sleep 0.05; done");
        while (p.text[0] == NULL ||
               !(strstr(p.text[0], "[0] r") && strstr(p.text[0], "[1] r") && strstr(p.text[0], "[2] r"))) {
            size_t before = p.bytes[0];
            read_until(&p, "ready\n");
            if (p.bytes[0] == before) { /* found what was there before: read on by hand */
                char byte[4096];
                ssize_t n = read(p.fds[0], byte, sizeof byte);
                REQUIRE(n > 0);
                p.text[0] = realloc(p.text[0], p.bytes[0] + (size_t)n + 1);
                memcpy(p.text[0] + p.bytes[0], byte, (size_t)n);
                p.bytes[0] += (size_t)n;
                p.text[0][p.bytes[0]] = 0;
            }
        }
        kill(p.pid, sent[i]);
        finish(&p);
        static const char *const names[] = {"HUP", "USR1", "USR2", "INT", "TERM"};
        for (int r = 0; r < 3; r++) {
            char line[40];
            snprintf(line, sizeof line, "[%d] got %s", r, names[i]);
            CHECK_EQ(lines(p.text[0], line), 1);
        }
        CHECK_EQ(p.status, 0);
        forget(&p);
    }
}

TEST(interrupt_of_ranks_gives_130_and_twice_kills) {
    program p;
    begin(&p, "-n 2 sh -c", "echo ready; exec sleep 1294");
    read_until(&p, "ready\n");
    usleep(200000);
    kill(p.pid, SIGINT);
    finish(&p);
    CHECK_EQ(p.status, 130);
    CHECK_STR(p.text[1], "SIGINT");
    forget(&p);
    begin(&p, "-n 2 sh -c", marked("trap '' INT TERM; echo ready; while :; do sleep 0.1; done; : 1295.$MARK"));
    read_until(&p, "ready\n");
    usleep(200000);
    kill(p.pid, SIGINT);
    usleep(200000);
    kill(p.pid, SIGINT);
    finish(&p);
    CHECK_EQ(p.status, 137);
    CHECK_STR(p.text[1], "second time");
    CHECK(!alive_after(marked("sh -c trap.*1295.$MARK"), 1));
    forget(&p);
}

/* kill -9 of ddlrun: the ranks and what they started are gone, ranks that ignore signals too. */
TEST(ranks_die_with_ddlrun) {
    program p;
    begin(&p, "-n 3 sh -c", marked("trap '' TERM INT HUP; echo ready; sleep 1296.$MARK & wait; sleep 9"));
    read_until(&p, "ready\n");
    usleep(200000);
    CHECK(alive(marked("sleep 1296.$MARK")));
    kill(p.pid, SIGKILL);
    finish(&p); /* reads to the end of output: nobody holds it any more */
    CHECK_EQ(p.status, 1000 + SIGKILL);
    CHECK(!alive_after(marked("sleep 1296.$MARK"), 2));
    forget(&p);
}

TEST(stopped_with_the_terminal) {
    program p;
    begin(&p, "-n 1 sh -c", "while :; do echo tick; sleep 0.05; done");
    read_until(&p, "tick\n");
    kill(p.pid, SIGTSTP);
    int status = 0;
    CHECK_EQ(waitpid(p.pid, &status, WUNTRACED), p.pid);
    CHECK(WIFSTOPPED(status));
    kill(p.pid, SIGCONT);
    usleep(300000);
    kill(p.pid, SIGTERM);
    finish(&p);
    CHECK_EQ(p.status, 143);
    forget(&p);
}

TEST(reader_that_leaves_ends_the_job) {
    program p;
    begin(&p, "-n 2 sh -c", "while echo line; do :; done; exit 3");
    read_until(&p, "line\n");
    close(p.fds[0]);
    p.fds[0] = -1;
    finish(&p);
    CHECK(p.status == 128 + SIGPIPE || p.status == 3);
    forget(&p);
}

TEST(sixty_four_ranks) {
    program p;
    run(&p, "-n 64 sh -c", "echo here $RANK of $WORLD_SIZE");
    CHECK_EQ(p.status, 0);
    for (int r = 0; r < 64; r++) {
        char line[60];
        snprintf(line, sizeof line, "[%d] here %d of 64", r, r);
        CHECK_EQ(lines(p.text[0], line), 1);
    }
    CHECK(p.took_s < 5 * test_slow());
    forget(&p);
}

TEST(standard_input_goes_to_rank_0) {
    program p;
    int ends[2], saved = dup(0);
    CHECK_EQ(pipe(ends), 0);
    CHECK_EQ(write(ends[1], "typed\n", 6), 6);
    close(ends[1]);
    dup2(ends[0], 0);
    run(&p, "-n 2 sh -c", "read x; echo \"<$x>\"");
    dup2(saved, 0);
    close(saved);
    close(ends[0]);
    CHECK_EQ(lines(p.text[0], "[0] <typed>"), 1);
    CHECK_EQ(lines(p.text[0], "[1] <>"), 1);
    forget(&p);
}

typedef struct wrong {
    const char *words, *says;
    int code;
} wrong;

TEST(wrong_usage_is_explained) {
    static const wrong cases[] = {{"", "-n is missing", 2},
                                  {"./x", "-n is missing", 2},
                                  {"-n", "-n needs a value", 2},
                                  {"-n 2", "which program", 2},
                                  {"-n two true", "\"two\", which is not a whole number", 2},
                                  {"-n 2x true", "\"2x\"", 2},
                                  {"-n 0 true", "is 0; 1 to 4096", 2},
                                  {"-n -3 true", "is -3; 1 to", 2},
                                  {"-n 5000 true", "is 5000; 1 to", 2},
                                  {"-n 99999999999999999999 true", "99999999999999999999", 2},
                                  {"-n 1 --port 0 true", "--port is 0", 2},
                                  {"-n 1 --port 70000 true", "--port is 70000", 2},
                                  {"-n 1 --env A true", "--env is \"A\"", 2},
                                  {"-n 1 --env =1 true", "--env is \"=1\"", 2},
                                  {"-n 1 --timeout soon true", "--timeout is \"soon\"", 2},
                                  {"-n 1 --grace -1 true", "--grace is \"-1\"", 2},
                                  {"-n 1 --restart -1 true", "--restart is -1", 2},
                                  {"-n 1 --nonsense true", "unknown flag --nonsense; --help lists", 2},
                                  {"-n 1 --keep-gong true", "did you mean --keep-going?\nusage: ddlrun -n", 2},
                                  {"-n 1 --prot=5 true", "unknown flag --prot=5: did you mean --port?", 2},
                                  {"-n 2 no-such-program-here", "no program no-such-program-here in PATH", 127},
                                  {"-n 2 ./no/such", "cannot start ./no/such", 127},
                                  {"-n 2 /etc/passwd", "cannot start /etc/passwd", 126},
                                  {"-n 2 /", "cannot start /", 126}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        program p;
        run(&p, cases[i].words, NULL);
        CHECK_EQ(p.status, cases[i].code);
        CHECK_STR(p.text[1], "ddlrun: ");
        CHECK_STR(p.text[1], cases[i].says);
        CHECK_EQ(p.bytes[0], 0);
        forget(&p);
    }
}

TEST(help_lists_the_options) {
    program p;
    run(&p, "--help", NULL);
    CHECK_EQ(p.status, 0);
    CHECK_STR(p.text[0], "usage: ddlrun -n RANKS");
    CHECK_STR(p.text[0], "--bind-cores");
    forget(&p);
}

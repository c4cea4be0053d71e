/* Settings: every launcher's variables, every DDL_ variable, right and wrong, beside what ddl_config says; where the
 * secret may come from; and what the machine gives. Wrong values must name the variable and the value.
 * tests/run: quick=yes */
#include "test.h"

#include "../src/settings.h"

#include <sys/wait.h>

extern char **environ;

/* "A=1 B=2": the whole environment of the test, but for PATH and what sanitizers read. */
static void env_set(const char *pairs) {
    static const char *const prefixes[] = {"DDL_", "RANK=", "WORLD_SIZE=", "LOCAL_", "MASTER_",
                                           "PMI",  "MPI_",  "OMPI_",       "SLURM_", "TORCH"};
    for (int i = 0; environ[i] != NULL;) {
        char name[200];
        bool ours = false;
        for (size_t p = 0; p < DDL__COUNT_OF(prefixes); p++) {
            ours = ours || strncmp(environ[i], prefixes[p], strlen(prefixes[p])) == 0;
        }
        snprintf(name, sizeof name, "%.*s", (int)strcspn(environ[i], "="), environ[i]);
        if (ours) {
            unsetenv(name);
        } else {
            i++;
        }
    }
    char copy[2000], *save = NULL;
    snprintf(copy, sizeof copy, "%s", pairs);
    for (char *pair = strtok_r(copy, " ", &save); pair != NULL; pair = strtok_r(NULL, " ", &save)) {
        char *equals = strchr(pair, '=');
        *equals = 0;
        setenv(pair, equals + 1, 1);
    }
}

static ddl__base base;
static ddl__sentence why;

static ddl_status read_with(const ddl_config *config, ddl__settings *s) {
    memset(&base, 0, sizeof base);
    memset(&why, 0x7f, sizeof why);
    why.text[0] = 0;
    memset(s, 0xa5, sizeof *s);
    return ddl__settings_read(config, &base, s, &why);
}

static void done(ddl__settings *s) {
    ddl__settings_free(&base, s);
    CHECK_EQ(base.memory, 0);
}

#define MASTER " MASTER_ADDR=10.0.0.7 MASTER_PORT=29500"

typedef struct launch_case {
    const char *env;
    int rank, world, local_rank;
} launch_case;

TEST(launchers_are_understood) {
    static const launch_case cases[] = {
        {"", 0, 1, 0},
        {"RANK= WORLD_SIZE=", 0, 1, 0},
        {"RANK=0 WORLD_SIZE=1", 0, 1, -1},
        {"RANK=3 WORLD_SIZE=4" MASTER, 3, 4, -1},
        {"RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2" MASTER, 3, 4, 1},
        {"OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=6 OMPI_COMM_WORLD_LOCAL_RANK=2 "
         "OMPI_COMM_WORLD_LOCAL_SIZE=3" MASTER,
         5, 6, 2},
        {"PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1" MASTER, 1, 2, 1},
        {"SLURM_PROCID=7 SLURM_NTASKS=8 SLURM_LOCALID=3 SLURM_STEP_NODELIST=n[1-4]" MASTER, 7, 8, 3},
        {"SLURM_PROCID=1 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=n1" MASTER, 1, 2, -1},
        /* a batch script is no task */
        {"SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_JOB_ID=4", 0, 1, 0},
        /* who is nearer to the program wins */
        {"RANK=1 WORLD_SIZE=3 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1" MASTER, 1, 3, -1},
        {"PMI_RANK=0 PMI_SIZE=1 SLURM_PROCID=7 SLURM_NTASKS=8 SLURM_STEP_NODELIST=n1", 0, 1, -1},
    };
    for (size_t i = 0; i < DDL__COUNT_OF(cases); i++) {
        ddl__settings s;
        env_set(cases[i].env);
        CHECK_EQ(read_with(NULL, &s), DDL_OK);
        CHECK_EQ(s.launch.rank, cases[i].rank);
        CHECK_EQ(s.launch.world, cases[i].world);
        CHECK_EQ(s.launch.local_rank, cases[i].local_rank);
        CHECK_EQ(s.place.kind, cases[i].world > 1 ? DDL__MEET_TCP : DDL__MEET_ALONE);
        if (cases[i].world > 1) {
            CHECK_EQ(s.place.host, "10.0.0.7");
            CHECK_EQ(s.place.port, 29500);
            CHECK_EQ(s.place.ports, 1);
        }
        CHECK_EQ(base.rank, cases[i].rank);
        done(&s);
    }
}

/* Each sentence holds both words: the variable and its value. */
typedef struct wrong_case {
    const char *env, *variable, *value;
} wrong_case;

TEST(wrong_variables_are_named) {
    static const wrong_case cases[] = {
        {"RANK=1", "WORLD_SIZE", "not set"},
        {"WORLD_SIZE=4", "RANK is not set", "WORLD_SIZE is \"4\""},
        {"RANK=x WORLD_SIZE=4" MASTER, "RANK", "\"x\""},
        {"RANK=+1 WORLD_SIZE=4" MASTER, "RANK", "\"+1\""},
        {"RANK=1.5 WORLD_SIZE=4" MASTER, "RANK", "\"1.5\""},
        {"RANK=-1 WORLD_SIZE=4" MASTER, "RANK", "\"-1\""},
        {"RANK=99999999999999999999 WORLD_SIZE=4" MASTER, "RANK", "\"99999999999999999999\""},
        {"RANK=0 WORLD_SIZE=0" MASTER, "WORLD_SIZE", "\"0\""},
        {"RANK=4 WORLD_SIZE=4" MASTER, "RANK is 4", "WORLD_SIZE is 4"},
        {"RANK=0 WORLD_SIZE=2 LOCAL_RANK=z" MASTER, "LOCAL_RANK", "\"z\""},
        {"RANK=0 WORLD_SIZE=2 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2" MASTER, "2 of 2 on its host", "rank 0 of 2"},
        {"RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=3" MASTER, "contradict", "rank 0 of 2"},
        {"OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE", "not set"},
        {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=q" MASTER, "OMPI_COMM_WORLD_SIZE", "\"q\""},
        {"PMI_SIZE=1", "PMI_RANK", "not set"},
        {"SLURM_NTASKS=3 SLURM_STEP_NODELIST=n1", "SLURM_PROCID", "not set"},
        {"RANK=1 WORLD_SIZE=2", "MASTER_ADDR", "not set"},
        {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=h", "MASTER_PORT", "not set"},
        {"RANK=1 WORLD_SIZE=2 MASTER_PORT=29500", "MASTER_ADDR", "not set"},
        {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=0", "MASTER_PORT", "\"0\""},
        {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=65536", "MASTER_PORT", "\"65536\""},
        {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=http", "MASTER_PORT", "\"http\""},
        {"DDL_RENDEZVOUS=udp://h:1", "DDL_RENDEZVOUS", "udp://h:1"},
        {"DDL_RENDEZVOUS=tcp://h", "DDL_RENDEZVOUS", "tcp://h"},
        {"DDL_RENDEZVOUS=tcp://h:0", "DDL_RENDEZVOUS", "\"0\""},
        {"DDL_RENDEZVOUS=tcp://:29500", "DDL_RENDEZVOUS", "no host"},
        {"DDL_RENDEZVOUS=file://folder", "DDL_RENDEZVOUS", "file://folder"},
        {"DDL_LOG=loud", "DDL_LOG", "\"loud\""},
        {"DDL_TIMEOUT_MS=soon", "DDL_TIMEOUT_MS", "\"soon\""},
        {"DDL_TIMEOUT_MS=-2", "DDL_TIMEOUT_MS", "\"-2\""},
        {"DDL_TIMEOUT_MS=0", "DDL_TIMEOUT_MS", "\"0\""},
        {"DDL_INIT_TIMEOUT_MS=-1", "DDL_INIT_TIMEOUT_MS", "\"-1\""},
        {"DDL_STALL_MS=1e3", "DDL_STALL_MS", "\"1e3\""},
        {"DDL_PROGRESS_THREAD=yes", "DDL_PROGRESS_THREAD", "\"yes\""},
        {"DDL_DETERMINISTIC=2", "DDL_DETERMINISTIC", "\"2\""},
        {"DDL_CHECK=payload,all", "DDL_CHECK", "payload,all"},
        {"DDL_PORT_RANGE=5-", "port range", "\"5-\""},
        {"DDL_PORT_RANGE=9-5", "port range", "\"9-5\""},
        {"DDL_PORT_RANGE=0-5", "port range", "\"0-5\""},
        {"DDL_PORT_RANGE=5-70000", "port range", "\"5-70000\""},
        {"DDL_PORT_RANGE=5-6-7", "port range", "\"5-6-7\""},
        {"DDL_SECRET=short", "DDL_SECRET", "5 bytes"},
        {"DDL_SECRET_FD=x", "DDL_SECRET_FD", "\"x\""},
        {"DDL_SECRET_FD=777", "DDL_SECRET_FD", "777"},
        {"DDL_SECRET_FILE=/nonexistent", "DDL_SECRET_FILE", "/nonexistent"},
        {"DDL_SECRET_FILE=/", "DDL_SECRET_FILE", "not a file"},
    };
    for (size_t i = 0; i < DDL__COUNT_OF(cases); i++) {
        ddl__settings s;
        env_set(cases[i].env);
        CHECK_EQ(read_with(NULL, &s), DDL_ERR_CONFIG);
        CHECK_EQ(why.status, DDL_ERR_CONFIG);
        CHECK_STR(why.text, "ddl_init: ");
        CHECK_STR(why.text, cases[i].variable);
        CHECK_STR(why.text, cases[i].value);
        CHECK_EQ(base.memory, 0); /* nothing is left behind */
        CHECK(s.secret == NULL && s.job == NULL && s.place.host == NULL);
    }
}

TEST(config_comes_before_the_environment) {
    ddl__settings s;
    uint8_t secret[20];
    memset(secret, 7, sizeof secret);
    env_set(
        "RANK=9 WORLD_SIZE=x DDL_JOB=no DDL_TIMEOUT_MS=5 DDL_ALGO=tree DDL_SECRET=ssssssssssssssssssss DDL_LOG=none "
        "DDL_RENDEZVOUS=file:///no DDL_TRANSPORTS=no DDL_PLUGINS=no DDL_INTERFACE=no DDL_ADVERTISE=no "
        "DDL_PORT_RANGE=1-2 DDL_STALL_MS=4 DDL_INIT_TIMEOUT_MS=4");
    ddl_config c = {.world_size = 4,
                    .rank = 2,
                    .rendezvous = "tcp://[::1]:4000",
                    .secret = secret,
                    .secret_bytes = sizeof secret,
                    .job = "mine",
                    .interface_name = "eth9",
                    .advertise = "1.2.3.4",
                    .port_range = "20000-20100",
                    .transports = "shm,tcp",
                    .plugins = "shm",
                    .algorithm = "ring",
                    .timeout_ms = -1,
                    .init_timeout_ms = 1234,
                    .stall_ms = -1,
                    .progress_thread = 1,
                    .deterministic = 1,
                    .log_level = DDL_LOG_DEBUG};
    CHECK_EQ(read_with(&c, &s), DDL_OK);
    CHECK_EQ(s.launch.rank, 2);
    CHECK_EQ(s.launch.world, 4);
    CHECK_EQ(s.place.host, "::1");
    CHECK_EQ(s.place.port, 4000);
    CHECK_EQ(s.job, "mine");
    CHECK_EQ(s.interface_name, "eth9");
    CHECK_EQ(s.advertise, "1.2.3.4");
    CHECK(s.port_first == 20000 && s.port_last == 20100);
    CHECK_EQ(s.transports, "shm,tcp");
    CHECK_EQ(s.plugins, "shm");
    CHECK_EQ(s.algorithm, "ring");
    CHECK(s.timeout_ms == -1 && s.init_timeout_ms == 1234 && s.stall_ms == -1);
    CHECK(s.progress_thread && s.deterministic);
    CHECK_EQ(base.log_level, DDL_LOG_DEBUG);
    CHECK(s.secret_bytes == sizeof secret && s.secret != secret && memcmp(s.secret, secret, sizeof secret) == 0);
    done(&s);
}

TEST(environment_and_defaults) {
    ddl__settings s;
    env_set("");
    CHECK_EQ(read_with(NULL, &s), DDL_OK);
    CHECK(s.timeout_ms == 300000 && s.init_timeout_ms == 60000 && s.stall_ms == 10000);
    CHECK(!s.progress_thread && !s.deterministic && !s.check_payload);
    CHECK(s.secret == NULL && s.job == NULL && s.job_id == 0 && s.algorithm == NULL && s.port_first == 0);
    CHECK_EQ(base.log_level, DDL_LOG_WARN);
    CHECK(s.cores >= 1 && s.cores <= sysconf(_SC_NPROCESSORS_CONF));
    CHECK(strchr(s.host_id, '/') != NULL);
    done(&s);
    env_set(
        "DDL_LOG=info DDL_JOB=j1 DDL_INTERFACE=lo DDL_ADVERTISE=a DDL_PORT_RANGE=7-9 DDL_TRANSPORTS=tcp DDL_PLUGINS=p "
        "DDL_PLUGIN_PATH=/x:/y DDL_ALGO=tree DDL_TIMEOUT_MS=-1 DDL_INIT_TIMEOUT_MS=7 DDL_STALL_MS=8 "
        "DDL_PROGRESS_THREAD=1 DDL_DETERMINISTIC=1 DDL_HOST_ID=h7 DDL_CHECK=payload "
        "DDL_SECRET=0123456789abcdef RANK=0 WORLD_SIZE=2 DDL_RENDEZVOUS=file:///shared/x");
    CHECK_EQ(read_with(NULL, &s), DDL_OK);
    CHECK(s.timeout_ms == -1 && s.init_timeout_ms == 7 && s.stall_ms == 8);
    CHECK(s.progress_thread && s.deterministic && s.check_payload);
    CHECK_EQ(base.log_level, DDL_LOG_INFO);
    CHECK_EQ(s.job, "j1");
    CHECK_EQ(s.job_id, ddl__mix_bytes(0, "j1", 2));
    CHECK_EQ(s.interface_name, "lo");
    CHECK_EQ(s.advertise, "a");
    CHECK(s.port_first == 7 && s.port_last == 9);
    CHECK_EQ(s.transports, "tcp");
    CHECK_EQ(s.plugins, "p");
    CHECK_EQ(s.plugin_path, "/x:/y");
    CHECK_EQ(s.algorithm, "tree");
    CHECK_EQ(s.host_id, "h7");
    CHECK_EQ(s.place.kind, DDL__MEET_FILE);
    CHECK_EQ(s.place.folder, "/shared/x");
    CHECK_EQ(s.secret_source, "DDL_SECRET");
    CHECK(s.secret_bytes == 16 && memcmp(s.secret, "0123456789abcdef", 16) == 0);
    done(&s);
    env_set("DDL_PORT_RANGE=5");
    CHECK_EQ(read_with(NULL, &s), DDL_OK);
    CHECK(s.port_first == 5 && s.port_last == 5);
    done(&s);
}

TEST(wrong_configs_are_refused) {
    ddl_config cases[] = {{.world_size = -1},
                          {.world_size = 2, .rank = 2, .rendezvous = "tcp://h:1"},
                          {.world_size = 2, .rank = -1, .rendezvous = "tcp://h:1"},
                          {.rank = 1},
                          {.world_size = 2},
                          {.world_size = 2, .rendezvous = "h:1"},
                          {.timeout_ms = -2},
                          {.init_timeout_ms = -1},
                          {.stall_ms = INT64_MAX},
                          {.progress_thread = 2},
                          {.deterministic = -1},
                          {.log_level = (ddl_log_level)4},
                          {.port_range = "a-b"},
                          {.secret = "0123456789abcde", .secret_bytes = 15},
                          {.secret_bytes = 16},
                          {.allocator = {.free = (void (*)(void *, void *))abort}}};
    env_set("");
    for (size_t i = 0; i < DDL__COUNT_OF(cases); i++) {
        ddl__settings s;
        CHECK_EQ(read_with(&cases[i], &s), DDL_ERR_CONFIG);
        CHECK_STR(why.text, "ddl_init: ");
        CHECK_EQ(base.memory, 0);
    }
}

TEST(slurm_names_the_host_of_rank_0) {
    static const char *const lists[][2] = {{"node7", "node7"}, {"node[03-07,9],x1", "node03"},
                                           {"a1,a2", "a1"},    {"r[1,3]-ib", "r1-ib"},
                                           {"n[10]", "n10"},   {"n[", "n"}};
    for (size_t i = 0; i < DDL__COUNT_OF(lists); i++) {
        char env[300];
        ddl__settings s;
        snprintf(env, sizeof env,
                 "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_ID=77 SLURM_STEP_ID=3 MASTER_PORT=5 SLURM_STEP_NODELIST=%s",
                 lists[i][0]);
        env_set(env);
        CHECK_EQ(read_with(NULL, &s), DDL_OK);
        CHECK_EQ(s.place.host, lists[i][1]);
        CHECK_EQ(s.job, "slurm-77.3");
        done(&s);
    }
}

/* mpirun and srun on one host need no address: all ranks know one name for the job. */
TEST(launchers_on_one_host_need_no_address) {
    static const char *const cases[][2] = {
        {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=n7", "mpi-n7"},
        {"SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_NUM_NODES=1 SLURM_JOB_ID=4 SLURM_STEP_ID=2 SLURM_STEP_NODELIST=n1",
         "slurm-4.2"},
        {"PMI_RANK=1 PMI_SIZE=2 MPI_LOCALNRANKS=2 DDL_JOB=mine", "mine"}};
    static const char *const remote[] = {
        "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2", /* the job has no name */
        "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALNRANKS=2"};
    ddl__settings s;
    for (size_t i = 0; i < DDL__COUNT_OF(cases); i++) {
        env_set(cases[i][0]);
        CHECK_EQ(read_with(NULL, &s), DDL_OK);
        CHECK(s.place.kind == DDL__MEET_TCP && s.place.port == 0);
        CHECK_EQ(s.job, cases[i][1]);
        done(&s);
    }
    for (size_t i = 0; i < DDL__COUNT_OF(remote); i++) {
        env_set(remote[i]);
        CHECK_EQ(read_with(NULL, &s), DDL_ERR_CONFIG);
        CHECK_STR(why.text, "MASTER_");
    }
}

/* Between hosts their key-value space tells where rank 0 is; Slurm without one has a first host, and a number of which
 * all tasks of the step, and no others, make one port. */
TEST(launchers_on_several_hosts_tell_where_rank_0_is) {
    static const char *const slurm = "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_NUM_NODES=2 SLURM_JOB_ID=4 "
                                     "SLURM_STEP_ID=%d SLURM_STEP_NODELIST=n[3-4]";
    ddl__settings s;
    env_set("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=n7");
    CHECK_EQ(read_with(NULL, &s), DDL_OK);
    CHECK_EQ(s.place.kind, DDL__MEET_PMIX);
    done(&s);
    env_set("PMI_RANK=1 PMI_SIZE=4 MPI_LOCALNRANKS=2 PMI_FD=5 PMIX_NAMESPACE=n7");
    CHECK_EQ(read_with(NULL, &s), DDL_OK);
    CHECK_EQ(s.place.kind, DDL__MEET_PMI);
    done(&s);
    int32_t port[3];
    for (int i = 0; i < 3; i++) {
        char env[300];
        snprintf(env, sizeof env, slurm, i < 2 ? 1 : 2);
        env_set(env);
        CHECK_EQ(read_with(NULL, &s), DDL_OK);
        CHECK_EQ(s.place.kind, DDL__MEET_TCP);
        CHECK_EQ(s.place.host, "n3");
        CHECK(s.place.port >= 20000 && s.place.port + s.place.ports <= 32768);
        port[i] = s.place.port;
        done(&s);
    }
    CHECK(port[0] == port[1] && port[0] != port[2]);
}

TEST(ancestors_are_found_by_name) {
    char program[64];
    CHECK(ddl__read_text("/proc/self/comm", program, sizeof program) > 0);
    program[strcspn(program, "\n")] = 0;
    long self = (long)getpid(), found[2] = {-1, -1};
    int ends[2];
    CHECK_EQ(pipe(ends), 0);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        found[0] = ddl__ancestor(program);
        found[1] = ddl__ancestor("no such program");
        _exit(write(ends[1], found, sizeof found) == (ssize_t)sizeof found ? 0 : 1);
    }
    CHECK_EQ(read(ends[0], found, sizeof found), (ssize_t)sizeof found);
    waitpid(pid, NULL, 0);
    close(ends[0]);
    close(ends[1]);
    CHECK_EQ(found[0], self);
    CHECK_EQ(found[1], 0);
}

TEST(torchrun_keeps_its_own_port) {
    ddl__settings s;
    env_set("RANK=1 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=run7 TORCHELASTIC_USE_AGENT_STORE=True" MASTER);
    CHECK_EQ(read_with(NULL, &s), DDL_OK);
    CHECK_EQ(s.job, "run7");
    CHECK_EQ(s.place.port, 29501);
    CHECK_EQ(s.place.ports, 8);
    done(&s);
}

/* ---- the secret ---- */

static void write_file(const char *path, const char *text, mode_t mode) {
    unlink(path);
    int fd = open(path, O_CREAT | O_WRONLY, 0600);
    CHECK_EQ(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    fchmod(fd, mode);
    close(fd);
}

TEST(secret_file_is_for_its_owner_alone) {
    char path[] = "/tmp/ddl-test-XXXXXX", env[100];
    close(mkstemp(path));
    snprintf(env, sizeof env, "DDL_SECRET_FILE=%s DDL_SECRET=not-this-one-please", path);
    static const mode_t bad[] = {0640, 0604, 0660, 0602, 0620, 0610};
    ddl__settings s;
    env_set(env);
    for (size_t i = 0; i < DDL__COUNT_OF(bad); i++) {
        write_file(path, "0123456789abcdef-file\n", bad[i]);
        CHECK_EQ(read_with(NULL, &s), DDL_ERR_CONFIG);
        CHECK_STR(why.text, path);
        CHECK_STR(why.text, "chmod 600");
        CHECK(strstr(why.text, "0123456789") == NULL);
    }
    write_file(path, "0123456789abcdef-file\n", 0600);
    CHECK_EQ(read_with(NULL, &s), DDL_OK);
    CHECK(s.secret_bytes == 21 && memcmp(s.secret, "0123456789abcdef-file", 21) == 0);
    done(&s);
    write_file(path, "0123456789abcde\n", 0400);
    CHECK_EQ(read_with(NULL, &s), DDL_ERR_CONFIG);
    CHECK_STR(why.text, "15 bytes");
    CHECK(strstr(why.text, "0123456789") == NULL);
    if (geteuid() == 0) {
        write_file(path, "0123456789abcdef-file\n", 0600);
        CHECK_EQ(chown(path, 12345, 12345), 0);
        CHECK_EQ(read_with(NULL, &s), DDL_ERR_CONFIG);
        CHECK_STR(why.text, "belongs to user 12345");
    }
    unlink(path);
    CHECK_EQ(mkfifo(path, 0600), 0); /* must not block */
    CHECK_EQ(read_with(NULL, &s), DDL_ERR_CONFIG);
    unlink(path);
}

TEST(secret_from_a_pipe_once_from_a_file_again) {
    int ends[2];
    char env[100];
    ddl__settings s;
    CHECK_EQ(pipe(ends), 0);
    CHECK_EQ(write(ends[1], "pipe-secret-1234\n", 17), 17);
    close(ends[1]);
    snprintf(env, sizeof env, "DDL_SECRET_FD=%d DDL_SECRET_FILE=/nonexistent", ends[0]);
    env_set(env);
    CHECK_EQ(read_with(NULL, &s), DDL_OK);
    CHECK(s.secret_bytes == 17 && memcmp(s.secret, "pipe-secret-1234\n", 17) == 0); /* bytes as they are */
    done(&s);
    CHECK_EQ(fcntl(ends[0], F_GETFD), -1); /* closed */
    CHECK_EQ(read_with(NULL, &s), DDL_ERR_CONFIG);

    int fd = memfd_create("t", 0);
    CHECK_EQ(write(fd, "memfd-secret-1234", 17), 17); /* the offset stays at the end */
    snprintf(env, sizeof env, "DDL_SECRET_FD=%d", fd);
    env_set(env);
    for (int again = 0; again < 2; again++) {
        CHECK_EQ(read_with(NULL, &s), DDL_OK);
        CHECK(s.secret_bytes == 17 && memcmp(s.secret, "memfd-secret-1234", 17) == 0);
        done(&s);
    }
    CHECK_EQ(fcntl(fd, F_GETFD), FD_CLOEXEC);
    close(fd);
}

/* Memory of a freed secret holds zeros: the allocator keeps what was freed, to look at it. */
static unsigned char *kept[64];
static size_t kept_bytes[64];
static int kept_count;
static void *keep_alloc(void *user, size_t bytes) {
    (void)user;
    kept_bytes[kept_count] = bytes;
    kept[kept_count] = malloc(bytes);
    return kept[kept_count++];
}
static void keep_free(void *user, void *memory) {
    (void)user;
    (void)memory;
}

TEST(secret_is_wiped) {
    ddl_config c = {.secret = "the-secret-of-the-job", .secret_bytes = 21, .allocator = {keep_alloc, keep_free, NULL}};
    ddl__settings s;
    kept_count = 0;
    env_set("DDL_JOB=j");
    CHECK_EQ(read_with(&c, &s), DDL_OK);
    bool seen = false, left = false;
    for (int i = 0; i < kept_count; i++) {
        seen = seen || memmem(kept[i], kept_bytes[i], "the-secret", 10) != NULL;
    }
    done(&s);
    for (int i = 0; i < kept_count; i++) {
        left = left || memmem(kept[i], kept_bytes[i], "secret", 6) != NULL;
        free(kept[i]);
    }
    CHECK(seen);
    CHECK(!left);
}

/* Every allocation in turn fails. */
static int fail_at, allocs;
static void *fail_alloc(void *user, size_t bytes) {
    (void)user;
    return allocs++ == fail_at ? NULL : malloc(bytes);
}
static void fail_free(void *user, void *memory) {
    (void)user;
    free(memory);
}

TEST(out_of_memory_is_clean) {
    ddl_config c = {.allocator = {fail_alloc, fail_free, NULL}};
    ddl__settings s;
    env_set(
        "RANK=1 WORLD_SIZE=2 DDL_JOB=j DDL_SECRET=0123456789abcdef DDL_ALGO=a DDL_PLUGINS=p DDL_PORT_RANGE=5" MASTER);
    ddl_status status = DDL_ERR_NOMEM;
    for (fail_at = 0; status != DDL_OK && fail_at < 100; fail_at++) {
        allocs = 0;
        status = read_with(&c, &s);
        CHECK(status == DDL_OK || status == DDL_ERR_NOMEM);
        if (status != DDL_OK) {
            CHECK_EQ(base.memory, 0);
        }
    }
    CHECK(fail_at > 6 && fail_at < 100);
    done(&s);
}

TEST(plugins_do_not_get_the_secret) {
    env_set("DDL_SECRET=0123456789abcdef DDL_SECRET_FILE=/x DDL_SHM_BYTES=12");
    CHECK_EQ(ddl__plugin_setting("SHM_BYTES"), "12");
    CHECK(ddl__plugin_setting("SECRET") == NULL && ddl__plugin_setting("SECRET_FILE") == NULL);
    CHECK(ddl__plugin_setting("NOTHING") == NULL);
}

TEST(settings_table_is_complete) {
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__setting_table); i++) {
        const ddl__setting_row *row = &ddl__setting_table[i];
        CHECK(strncmp(row->name, "DDL_", 4) == 0 && row->standard != NULL && strlen(row->help) > 5);
        for (size_t k = 0; k < i; k++) {
            CHECK(strcmp(row->name, ddl__setting_table[k].name) != 0);
        }
    }
    setenv("DDL_NO_ROW", "1", 1);
    CHECK(ddl__setting_env("DDL_NO_ROW") == NULL); /* what is not in the table is not read */
}

/* ---- the machine ---- */

TEST(cores_follow_affinity) {
    cpu_set_t all, one;
    uint64_t set;
    CHECK_EQ(sched_getaffinity(0, sizeof all, &all), 0);
    CHECK(ddl__cores(&set) >= 1 && ddl__cores(&set) <= CPU_COUNT(&all));
    for (size_t c = 0; c < CPU_SETSIZE; c++) {
        if (CPU_ISSET(c, &all)) {
            CPU_ZERO(&one);
            CPU_SET(c, &one);
            break;
        }
    }
    CHECK_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    CHECK_EQ(ddl__cores(&set), 1);
    CHECK_EQ(sched_setaffinity(0, sizeof all, &all), 0);
}

TEST(cgroup_files_are_understood) {
    char folder[] = "/tmp/ddl-test-XXXXXX", path[100], out[100];
    CHECK(mkdtemp(folder) != NULL);
    static const struct {
        const char *text;
        int32_t cores;
    } cases[] = {{"max 100000\n", INT32_MAX}, {"150000 100000\n", 2}, {"100000 100000\n", 1}, {"50000 100000\n", 1},
                 {"400000 100000\n", 4},      {"rubbish", INT32_MAX}, {"5 0", INT32_MAX}};
    snprintf(path, sizeof path, "%s/cpu.max", folder);
    for (size_t i = 0; i < DDL__COUNT_OF(cases); i++) {
        write_file(path, cases[i].text, 0600);
        CHECK_EQ(ddl__quota_of(folder), cases[i].cores);
    }
    unlink(path);
    CHECK_EQ(ddl__quota_of(folder), INT32_MAX);
    rmdir(folder);
    const char *list = "12:pids:/p\n4:cpu,cpuacct:/docker/abc\n0::/user.slice/x\n";
    CHECK(ddl__cgroup_path(list, ",,", out, sizeof out));
    CHECK_EQ((const char *)out, "/user.slice/x");
    CHECK(ddl__cgroup_path(list, ",cpu,", out, sizeof out));
    CHECK_EQ((const char *)out, "/docker/abc");
    CHECK(!ddl__cgroup_path(list, ",memory,", out, sizeof out));
    CHECK(!ddl__cgroup_path("", ",,", out, sizeof out) && !ddl__cgroup_path("0:x", ",,", out, sizeof out));
}

TEST(memory_limits_of_control_groups_are_understood) {
    static const char stat[] = "anon 7\nfile 5000\ninactive_anon 9\nactive_file 1\ninactive_file 1000\ntotal_inactive_file 3000\n";
    CHECK_EQ(ddl__memory_left_parse("10000\n", "4000\n", ""), 6000u);
    CHECK_EQ(ddl__memory_left_parse("10000\n", "4000\n", stat), 9000u); /* what is cached goes when it is needed */
    CHECK_EQ(ddl__memory_left_parse("10000\n", "2000\n", stat), 10000u);
    CHECK_EQ(ddl__memory_left_parse("10000\n", "14000\n", stat), 0u);
    CHECK_EQ(ddl__memory_left_parse("0\n", "0\n", ""), 0u);
    CHECK_EQ(ddl__memory_left_parse("max\n", "4000\n", stat), UINT64_MAX);
    CHECK_EQ(ddl__memory_left_parse("9223372036854771712\n", "4000\n", stat), UINT64_MAX); /* none, in version 1 */
    char folder[] = "/tmp/ddl-test-XXXXXX", path[100];
    static const char *const files[2][2] = {{"memory.limit_in_bytes", "memory.usage_in_bytes"},
                                            {"memory.max", "memory.current"}};
    CHECK(mkdtemp(folder) != NULL);
    CHECK_EQ(ddl__memory_left_of(folder), UINT64_MAX);
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, files[i][0]);
        write_file(path, "50000\n", 0600);
        CHECK_EQ(ddl__memory_left_of(folder), UINT64_MAX); /* half of the files is no limit */
        snprintf(path, sizeof path, "%s/%s", folder, files[i][1]);
        write_file(path, "20000\n", 0600);
        CHECK_EQ(ddl__memory_left_of(folder), 30000u);
        unlink(path);
        snprintf(path, sizeof path, "%s/%s", folder, files[i][0]);
        unlink(path);
    }
    rmdir(folder);
}

TEST(descriptor_limit_is_raised_or_named) {
    fflush(NULL);
    pid_t pid = fork(); /* limits go down only */
    if (pid == 0) {
        struct rlimit limit = {100, 200};
        CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
        CHECK_EQ(ddl__need_fds(20, &why), DDL_OK);
        getrlimit(RLIMIT_NOFILE, &limit);
        CHECK_EQ(limit.rlim_cur, 100); /* enough: left alone */
        CHECK_EQ(ddl__need_fds(150, &why), DDL_OK);
        getrlimit(RLIMIT_NOFILE, &limit);
        CHECK(limit.rlim_cur >= 150 && limit.rlim_cur <= 200);
        CHECK_EQ(ddl__need_fds(1000, &why), DDL_ERR_SYSTEM);
        CHECK_STR(why.text, "1000 file descriptors");
        CHECK_STR(why.text, "above 200");
        fflush(NULL);
        _exit(0);
    }
    int status = 1;
    waitpid(pid, &status, 0);
    CHECK_EQ(status, 0);
}

TEST(another_network_namespace_is_another_host) {
    char here[128], there[128] = "";
    int ends[2];
    ddl__host_id(here, sizeof here);
    CHECK_EQ(pipe(ends), 0);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        if (unshare(CLONE_NEWNET) == 0) {
            ddl__host_id(there, sizeof there);
            (void)!write(ends[1], there, sizeof there);
        }
        _exit(0);
    }
    close(ends[1]);
    ssize_t n = read(ends[0], there, sizeof there);
    waitpid(pid, NULL, 0);
    close(ends[0]);
    if (n <= 0) {
        SKIP("needs the right to make a network namespace (root)");
    }
    CHECK(strcmp(here, there) != 0);
    CHECK_EQ(strcspn(here, "/"), strcspn(there, "/")); /* the boot id is the same */
}

/* The same of a plugin that says what it reads. */
TEST(unknown_variables_of_a_plugin_are_seen) {
    static const char *const known[] = {"SHM_RING_BYTES", "SHM_CMA", NULL}, *const none[] = {NULL};
    CHECK_EQ(ddl__plugin_setting_unknown(known, "DDL_SHM_CMA=0"), 0);
    CHECK_EQ(ddl__plugin_setting_unknown(known, "DDL_SHM_RING_BYTES="), 0);
    CHECK_EQ(ddl__plugin_setting_unknown(known, "DDL_SHM_CMAX=0"), 12);
    CHECK_EQ(ddl__plugin_setting_unknown(known, "DDL_SHM_CM=0"), 10);
    CHECK_EQ(ddl__plugin_setting_unknown(none, "DDL_SHM_CMA=0"), 11);
    CHECK_STR(ddl__plugin_setting_near(known, "SHM_CAM", 7), "SHM_CMA");
    CHECK_STR(ddl__plugin_setting_near(known, "SHM_RING_BYTS", 13), "SHM_RING_BYTES");
    CHECK(ddl__plugin_setting_near(known, "SHM_WHATEVER", 12) == NULL);
    CHECK(ddl__plugin_setting_near(none, "SHM_CMA", 7) == NULL);
}

/* What is warned of, and what was probably meant. */
TEST(unknown_variables_are_seen) {
    static const struct {
        const char *line, *meant; /* "": known; NULL: unknown, and like none */
    } cases[] = {
        {"DDL_TIMEOUT_M=5", "DDL_TIMEOUT_MS"},
        {"DDL_TIMEOUTMS=5", "DDL_TIMEOUT_MS"},
        {"DDL_TIMOUT_MS=5", "DDL_TIMEOUT_MS"},
        {"DDL_ALGORITHM=ring", NULL},
        {"DDL_ALGOS=ring", "DDL_ALGO"},
        {"DDL_TRANSPORT=tcp", "DDL_TRANSPORTS"},
        {"DDL_SECRET_FLIE=x", "DDL_SECRET_FILE"},
        {"DDL_LOGS", "DDL_LOG"},
        {"DDL_=1", NULL},
        {"DDL_SOMETHING_ELSE=1", NULL},
        {"DDL_TIMEOUT_MS=5", ""},
        {"DDL_SECRET=x", ""},
        {"DDL_SHM_BYTES=5", ""},
        {"DDL_FABRIC_PROVIDER=x", ""},
        {"DDL_CUDA_X=", ""},
        {"DDL_BENCH_QUICK=1", ""},
        {"DDL_TEST_SEED=1", ""},
        {"DDLX=1", ""},
        {"PATH=/bin", ""},
    };
    for (size_t i = 0; i < DDL__COUNT_OF(cases); i++) {
        size_t length = ddl__setting_unknown(cases[i].line);
        bool known = cases[i].meant != NULL && cases[i].meant[0] == 0;
        CHECK_EQ(length, known ? 0 : strcspn(cases[i].line, "="));
        if (length > 0) {
            const char *meant = ddl__setting_near(cases[i].line, length);
            CHECK_EQ(meant != NULL ? meant : "none", cases[i].meant != NULL ? cases[i].meant : "none");
        }
    }
    CHECK_EQ(ddl__name_distance("abc", 3, "abc"), 0);
    CHECK_EQ(ddl__name_distance("kitten", 6, "sitting"), 3);
    CHECK_EQ(ddl__name_distance("", 0, "xyz"), 3);
}

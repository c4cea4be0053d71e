/* launch: which rank of how many this process is, by the variables of whoever started it, and where rank 0 is. */
#ifndef DDL_SETTINGS_LAUNCH_H
#define DDL_SETTINGS_LAUNCH_H

#include "machine.h"
#include "table.h"

#ifndef DDL_NO_PLUGINS
#include <dlfcn.h>
#endif

#define DDL__WORLD_MAX 1048576

typedef struct ddl__launch {
    const char *by; /* for messages: "Open MPI" */
    int32_t rank, world;
    int32_t local_rank, local_world; /* -1: not told */
} ddl__launch;

/* In the order they are asked, the inner before the outer. The first of which a rank or a world is set decides: srun
 * and mpirun often start torchrun, and Slurm starts the proxies of both mpiruns, so that ranks carry several.
 * world_too: another name of the same thing. */
typedef struct ddl__launcher {
    const char *by, *rank, *world, *world_too, *local_rank, *local_world;
} ddl__launcher;

static const ddl__launcher ddl__launchers[] = {
    {"RANK and WORLD_SIZE", "RANK", "WORLD_SIZE", NULL, "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", NULL, "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"PMI", "PMI_RANK", "PMI_SIZE", NULL, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_LOCALID", NULL},
};

static bool ddl__env_equal(const char *a, const char *b) {
    return ddl__env(a) != NULL && ddl__env(b) != NULL && strcmp(ddl__env(a), ddl__env(b)) == 0;
}

/* A batch script of Slurm carries SLURM_PROCID=0 and SLURM_NTASKS too, though it is no task: only a step has a node
 * list of its own. A plain ./train in a script is a world of one. With --mpi=pmi2 Slurm sets the variables of PMI as
 * well; they are hydra's when they say something else. */
static bool ddl__launcher_present(const ddl__launcher *l) {
    bool step = ddl__env("SLURM_STEP_NODELIST") != NULL;
    bool same = ddl__env_equal("PMI_RANK", "SLURM_PROCID") && ddl__env_equal("PMI_SIZE", "SLURM_STEP_NUM_TASKS");
    if ((strcmp(l->by, "Slurm") == 0 && !step) || (strcmp(l->by, "PMI") == 0 && step && same)) {
        return false;
    }
    return ddl__env(l->rank) != NULL || ddl__env(l->world) != NULL ||
           (l->world_too != NULL && ddl__env(l->world_too) != NULL);
}

static ddl_status ddl__launch_check(const ddl__launch *l, const char *rank_name, const char *world_name,
                                    ddl__sentence *why) {
    if (l->rank >= l->world) {
        return ddl__fail(
            why, DDL_ERR_CONFIG,
            "ddl_init: %s is %d and %s is %d, but ranks go from 0 to %d. Correct the launcher or its variables",
            rank_name, l->rank, world_name, l->world, l->world - 1);
    }
    if (l->local_world > l->world || (l->local_world > 0 && l->local_rank >= l->local_world)) {
        return ddl__fail(
            why, DDL_ERR_CONFIG,
            "ddl_init: this process is rank %d of %d, but %d of %d on its host (%s): these contradict each other",
            l->rank, l->world, l->local_rank, l->local_world, l->by);
    }
    return DDL_OK;
}

static ddl_status ddl__launch_from(const ddl__launcher *l, ddl__launch *out, ddl__sentence *why) {
    const char *world_name = l->world_too != NULL && ddl__env(l->world) == NULL ? l->world_too : l->world;
    const char *set = ddl__env(l->rank) != NULL ? l->rank : world_name, *unset = set == l->rank ? world_name : l->rank;
    if (ddl__env(unset) == NULL) {
        return ddl__fail(why, DDL_ERR_CONFIG,
                         "ddl_init: %s is \"%.60s\", but %s is not set: it takes both, or neither for a world of one",
                         set, ddl__env(set), unset);
    }
    int64_t rank = 0, world = 1, local_rank = -1, local_world = -1;
    DDL__TRY(ddl__env_int(world_name, 1, DDL__WORLD_MAX, &world, why));
    DDL__TRY(ddl__env_int(l->rank, 0, DDL__WORLD_MAX - 1, &rank, why));
    DDL__TRY(ddl__env_int(l->local_rank, 0, DDL__WORLD_MAX - 1, &local_rank, why));
    if (l->local_world != NULL) {
        DDL__TRY(ddl__env_int(l->local_world, 1, DDL__WORLD_MAX, &local_world, why));
    }
    const char *nodes = strcmp(l->by, "Slurm") == 0 ? ddl__env("SLURM_STEP_NUM_NODES") : NULL;
    if (nodes != NULL && strcmp(nodes, "1") == 0) {
        local_world = world;
    }
    *out = (ddl__launch){l->by, (int32_t)rank, (int32_t)world, (int32_t)local_rank, (int32_t)local_world};
    return ddl__launch_check(out, l->rank, world_name, why);
}

static ddl_status ddl__launch_from_config(const ddl_config *config, ddl__launch *out, ddl__sentence *why) {
    if (config->world_size < 0 || config->world_size > DDL__WORLD_MAX || config->rank < 0 ||
        config->rank >= config->world_size) {
        return ddl__fail(
            why, DDL_ERR_CONFIG,
            "ddl_init: rank %d of world_size %d in ddl_config is not possible; ranks go from 0 to world_size "
            "- 1, at most %d ranks, and both 0 takes them from the environment",
            config->rank, config->world_size, DDL__WORLD_MAX);
    }
    *out = (ddl__launch){"ddl_config", config->rank, config->world_size, -1, -1};
    return DDL_OK;
}

static ddl_status ddl__launch_find(const ddl_config *config, ddl__launch *out, ddl__sentence *why) {
    if (config->world_size != 0 || config->rank != 0) {
        return ddl__launch_from_config(config, out, why);
    }
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__launchers); i++) {
        if (ddl__launcher_present(&ddl__launchers[i])) {
            return ddl__launch_from(&ddl__launchers[i], out, why);
        }
    }
    if (ddl__env("PMIX_RANK") != NULL) {
        return ddl__fail(why, DDL_ERR_CONFIG,
                         "ddl_init: a PMIx launcher says that this is rank %.20s, but nothing says of how many. Set "
                         "WORLD_SIZE and RANK, or start it by mpirun or srun",
                         ddl__env("PMIX_RANK"));
    }
    *out = (ddl__launch){"nobody", 0, 1, 0, 1};
    return DDL_OK;
}

/* The other launchers whose variables contradict what was taken, as part of a sentence; returns how many. */
static int32_t ddl__launch_others(const ddl__launch *taken, ddl__text *out) {
    int32_t others = 0;
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__launchers); i++) {
        const ddl__launcher *l = &ddl__launchers[i];
        ddl__launch other;
        if (strcmp(l->by, taken->by) == 0 || !ddl__launcher_present(l)) {
            continue;
        }
        if (ddl__launch_from(l, &other, NULL) < 0) {
            others++;
            ddl__text_add(out, ", a rank that makes no sense by %s", l->by);
        } else if (other.rank != taken->rank || other.world != taken->world) {
            others++;
            ddl__text_add(out, ", rank %d of %d by %s", other.rank, other.world, l->by);
        }
    }
    return others;
}

/* Says so when variables of several launchers contradict each other. That is as it should be where one started the
 * other: torchrun and ddlrun are known to be started so; else one rank of a host warns. */
static void ddl__launch_warn(const ddl__base *base, const ddl__launch *taken) {
    bool inner = ddl__env("TORCHELASTIC_RUN_ID") != NULL || ddl__env("DDL_SECRET_FD") != NULL;
    bool first = taken->local_rank >= 0 ? taken->local_rank == 0 : taken->rank == 0;
    char claims[400] = "";
    ddl__text text = {claims, sizeof claims, 0};
    int32_t others = ddl__launch_others(taken, &text);
    if (others > 0) {
        ddl__log(base, inner || !first ? DDL_LOG_DEBUG : DDL_LOG_WARN,
                 "%d launchers contradict each other: this is rank %d of %d by %s%s. %s decides, as it comes first in "
                 "the order %s: what starts ranks itself comes before what may have started it; unset the variables "
                 "of those that did not start this process",
                 others + 1, taken->rank, taken->world, taken->by, claims, taken->by,
                 "ddl_config, RANK and WORLD_SIZE, Open MPI, PMI, Slurm");
    }
}

/* The process id of the ancestor with a program's name, 0 when there is none. */
static long ddl__ancestor(const char *program) {
    long pid = (long)getppid();
    for (int depth = 0; depth < 64 && pid > 1; depth++) {
        char path[64], text[1024];
        ddl__process process;
        snprintf(path, sizeof path, "/proc/%ld/stat", pid);
        if (ddl__read_text(path, text, sizeof text) <= 0 || !ddl__process_parse(text, &process)) {
            return 0;
        }
        if (strcmp(process.name, program) == 0) {
            return pid;
        }
        pid = process.parent;
    }
    return 0;
}

/* What the launcher calls this job, the same on all of its ranks and on no other's. False: it does not tell. MPICH's
 * mpirun has no name for it, but all its ranks on a host have one ancestor. */
static bool ddl__launch_job(const ddl__launch *launch, char *out, size_t cap) {
    const char *run = ddl__env("TORCHELASTIC_RUN_ID"), *mpi = ddl__env("PMIX_NAMESPACE");
    const char *slurm = ddl__env("SLURM_JOB_ID"), *step = ddl__env("SLURM_STEP_ID");
    if (run != NULL) {
        snprintf(out, cap, "%s", run);
    } else if (strcmp(launch->by, "Open MPI") == 0 && mpi != NULL) {
        snprintf(out, cap, "mpi-%s", mpi);
    } else if (strcmp(launch->by, "Slurm") == 0 && slurm != NULL) {
        snprintf(out, cap, "slurm-%s.%s", slurm, step != NULL ? step : "0");
    } else if (strcmp(launch->by, "PMI") == 0 && launch->local_world == launch->world) {
        long proxy = ddl__ancestor("hydra_pmi_proxy");
        snprintf(out, cap, "hydra-%ld", proxy);
        return proxy != 0;
    } else {
        return false;
    }
    return true;
}

/* >>ended */

/* ddlrun notes which processes have ended and will not be started again: a byte for each rank, 0 while it runs, then as
 * how manieth it ended, 255 at most. -1: nobody notes, or ranks are not counted as ddlrun counts them. */
static ddl_status ddl__ended_find(const ddl__launch *launch, int *out_fd, ddl__sentence *why) {
    const char *text = ddl__setting_env("DDL_ENDED_FD");
    int64_t fd = -1;
    struct stat info;
    *out_fd = -1;
    if (text != NULL && !ddl__parse_int(text, 0, INT32_MAX, &fd)) {
        return ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: DDL_ENDED_FD is \"%.60s\", which is no descriptor's number",
                         text);
    }
    if (fd >= 0 && strcmp(launch->by, ddl__launchers[0].by) == 0 && fstat((int)fd, &info) == 0 &&
        S_ISREG(info.st_mode) && info.st_size == launch->world) {
        *out_fd = (int)fd;
    }
    return DDL_OK;
}

/* The rank whose process ended first, and is the cause of what others do; -1: none that is known of. */
static int32_t ddl__launch_ended(const ddl__launch *launch, int ended_fd) {
    uint8_t ended[256];
    ssize_t n = 1;
    int32_t first = -1, place = 256;
    for (int32_t at = 0; ended_fd >= 0 && n > 0 && at < launch->world; at += (int32_t)n) {
        n = pread(ended_fd, ended, sizeof ended, at);
        for (ssize_t i = 0; i < n; i++) {
            if (ended[i] != 0 && ended[i] < place && at + i != launch->rank) {
                first = at + (int32_t)i;
                place = ended[i];
            }
        }
    }
    return first;
}

/* >>place */

/* Where the ranks meet. */
enum ddl__meeting {
    DDL__MEET_ALONE,
    DDL__MEET_EXCHANGE,
    DDL__MEET_TCP,
    DDL__MEET_FILE,
    DDL__MEET_PMI, /* the launcher's key-value space will tell where rank 0 is; then it is TCP */
    DDL__MEET_PMIX
};

#define DDL__MEET_PORTS 8 /* tried in a row, where nobody chose one free port */

typedef struct ddl__meeting_place {
    int kind;         /* enum ddl__meeting */
    char *host;       /* TCP: a name or an address, without brackets */
    int32_t port;     /* TCP: the first port to try; 0: all ranks are here, on a unix socket named after the job */
    int32_t ports;    /* how many in a row; 1 but for torchrun */
    char *folder;     /* FILE */
    const char *from; /* for messages: "MASTER_ADDR and MASTER_PORT" */
} ddl__meeting_place;

/* The first host of Slurm's list: "node[03-07,9],x1" is node03. */
static void ddl__first_host(const char *list, char *out, size_t cap) {
    size_t head = strcspn(list, "[,"), number = 0;
    const char *inside = list + head, *tail = "";
    if (*inside == '[') {
        inside++;
        number = strcspn(inside, "-,]");
        tail = strchr(inside, ']');
        tail = tail != NULL ? tail + 1 : "";
    }
    snprintf(out, cap, "%.*s%.*s%.*s", (int)head, list, (int)number, inside, (int)strcspn(tail, ",["), tail);
}

static ddl_status ddl__place_set_tcp(ddl__base *base, const char *host, size_t host_bytes, const char *port,
                                     const char *port_name, ddl__meeting_place *out, ddl__sentence *why) {
    int64_t number = 0;
    if (!ddl__parse_int(port, 1, 65535, &number)) {
        return ddl__fail(
            why, DDL_ERR_CONFIG,
            "ddl_init: the port of %s is \"%.60s\", which is not a whole number from 1 to 65535. All ranks "
            "need the same free port of rank 0's machine",
            port_name, port);
    }
    if (host_bytes >= 2 && host[0] == '[' && host[host_bytes - 1] == ']') { /* an IPv6 address in a URL */
        host++;
        host_bytes -= 2;
    }
    if (host_bytes == 0 || host_bytes > 255) {
        return ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: %s gives no host name where rank 0 runs", port_name);
    }
    out->host = ddl__alloc(base, host_bytes + 1);
    if (out->host == NULL) {
        return ddl__fail(why, DDL_ERR_NOMEM, "ddl_init: no memory for the name of rank 0's host");
    }
    memcpy(out->host, host, host_bytes);
    out->kind = DDL__MEET_TCP;
    out->port = (int32_t)number;
    out->ports = 1;
    return DDL_OK;
}

static ddl_status ddl__place_from_url(ddl__base *base, const char *url, const char *from, ddl__meeting_place *out,
                                      ddl__sentence *why) {
    out->from = from;
    if (strncmp(url, "tcp://", 6) == 0) {
        const char *host = url + 6, *colon = strrchr(host, ':');
        if (colon != NULL) {
            return ddl__place_set_tcp(base, host, (size_t)(colon - host), colon + 1, from, out, why);
        }
    } else if (strncmp(url, "file:///", 8) == 0) {
        out->kind = DDL__MEET_FILE;
        out->folder = ddl__copy_string(base, url + 7);
        return out->folder != NULL ? DDL_OK : ddl__fail(why, DDL_ERR_NOMEM, "ddl_init: no memory for a path");
    }
    return ddl__fail(why, DDL_ERR_CONFIG,
                     "ddl_init: %s is \"%.200s\"; tcp://host:port and file:///absolute/folder are possible", from, url);
}

/* The agent of torchrun listens on MASTER_PORT itself and says so; rank 0 then takes one of the ports that follow, and
 * the others find out which by the handshake. */
static void ddl__place_beside_agent(ddl__meeting_place *place) {
    const char *agent = ddl__env("TORCHELASTIC_USE_AGENT_STORE");
    if (agent != NULL && strcmp(agent, "True") == 0) {
        place->port = place->port < 65527 ? place->port + 1 : 65520;
        place->ports = DDL__MEET_PORTS;
    }
}

/* A program that uses MPI: then the launcher's key-value space belongs to MPI. */
static bool ddl__uses_mpi(void) {
#ifdef DDL_NO_PLUGINS
    return false;
#else
    return dlsym(RTLD_DEFAULT, "MPI_Init") != NULL;
#endif
}

static ddl_status ddl__place_missing(const ddl__launch *launch, bool has_host, bool has_port, ddl__sentence *why) {
    return ddl__fail(
        why, DDL_ERR_CONFIG,
        "ddl_init: this process is rank %d of %d (by %s), but %s is not set, so the ranks cannot find each "
        "other. Set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, on all ranks "
        "(mpirun -x, srun --export), or DDL_RENDEZVOUS=file:///shared/folder%s",
        launch->rank, launch->world, launch->by,
        has_host   ? "MASTER_PORT"
        : has_port ? "MASTER_ADDR"
                   : "MASTER_ADDR or MASTER_PORT",
        ddl__uses_mpi() ? ". This program uses MPI, to which the launcher's key-value space belongs: it may also give "
                          "ddl_config an exchange function that calls MPI_Allgather"
                        : "");
}

/* A port that all tasks of a step of Slurm derive alike, below those that Linux gives away by itself. */
static void ddl__port_of_step(char *out, size_t cap) {
    const char *job = ddl__env("SLURM_JOB_ID"), *step = ddl__env("SLURM_STEP_ID");
    uint64_t hash = ddl__mix_bytes(7, job != NULL ? job : "", job != NULL ? strlen(job) : 0);
    hash = ddl__mix_bytes(hash, step != NULL ? step : "", step != NULL ? strlen(step) : 0);
    snprintf(out, cap, "%d", 20000 + (int)(hash % 1250) * DDL__MEET_PORTS);
}

/* mpirun and srun set no MASTER_ADDR. When they say that all ranks are on this host, none is needed; else their
 * key-value space tells where rank 0 is, unless the program itself uses MPI, which may need it. The last: Slurm's first
 * host, with a port made of the number of the step. */
static ddl_status ddl__place_from_launcher(ddl__base *base, const ddl__launch *launch, bool job_known,
                                           ddl__meeting_place *out, ddl__sentence *why) {
    const char *list = strcmp(launch->by, "Slurm") == 0 ? ddl__env("SLURM_STEP_NODELIST") : NULL;
    bool mpi = ddl__uses_mpi(), pmix = ddl__env("PMIX_NAMESPACE") != NULL;
    bool theirs = strncmp(launch->by, "RANK", 4) != 0 && strcmp(launch->by, "ddl_config") != 0;
    out->from = launch->by;
    if (job_known && launch->local_world == launch->world) {
        out->kind = DDL__MEET_TCP;
        out->host = ddl__copy_string(base, "127.0.0.1");
        out->ports = 1;
        return out->host != NULL ? DDL_OK : ddl__fail(why, DDL_ERR_NOMEM, "ddl_init: no memory for an address");
    }
    if (theirs && !mpi && (ddl__env("PMI_FD") != NULL || pmix)) {
        out->kind = ddl__env("PMI_FD") != NULL ? DDL__MEET_PMI : DDL__MEET_PMIX;
        return DDL_OK;
    }
    if (list != NULL) {
        char first[256], port[16];
        ddl__first_host(list, first, sizeof first);
        ddl__port_of_step(port, sizeof port);
        DDL__TRY(ddl__place_set_tcp(base, first, strlen(first), port, "Slurm's step", out, why));
        out->ports = DDL__MEET_PORTS;
        return DDL_OK;
    }
    return ddl__place_missing(launch, false, false, why);
}

static ddl_status ddl__place_from_master(ddl__base *base, const ddl__launch *launch, bool job_known,
                                         ddl__meeting_place *out, ddl__sentence *why) {
    const char *host = ddl__env("MASTER_ADDR"), *port = ddl__env("MASTER_PORT"),
               *list = ddl__env("SLURM_STEP_NODELIST");
    char first[256];
    if (host == NULL && port == NULL) {
        return ddl__place_from_launcher(base, launch, job_known, out, why);
    }
    if (host == NULL && list != NULL && strcmp(launch->by, "Slurm") == 0) {
        ddl__first_host(list, first, sizeof first);
        host = first;
    }
    if (host == NULL || port == NULL) {
        return ddl__place_missing(launch, host != NULL, port != NULL, why);
    }
    out->from = "MASTER_ADDR and MASTER_PORT";
    DDL__TRY(ddl__place_set_tcp(base, host, strlen(host), port, "MASTER_PORT", out, why));
    ddl__place_beside_agent(out);
    return DDL_OK;
}

static ddl_status ddl__place_find(ddl__base *base, const ddl_config *config, const ddl__launch *launch, bool job_known,
                                  ddl__meeting_place *out, ddl__sentence *why) {
    const char *url = ddl__setting_env("DDL_RENDEZVOUS");
    if (config->exchange != NULL) {
        out->kind = DDL__MEET_EXCHANGE;
        return DDL_OK;
    }
    if (config->rendezvous != NULL && config->rendezvous[0] != 0) {
        return ddl__place_from_url(base, config->rendezvous, "rendezvous of ddl_config", out, why);
    }
    if (url != NULL) {
        return ddl__place_from_url(base, url, "DDL_RENDEZVOUS", out, why);
    }
    return launch->world > 1 ? ddl__place_from_master(base, launch, job_known, out, why) : DDL_OK;
}

#endif /* DDL_SETTINGS_LAUNCH_H */

/* machine: what this process has been given to run on: cores, file descriptors, and the host's identity.
 * It must not know of ranks. */
#ifndef DDL_SETTINGS_MACHINE_H
#define DDL_SETTINGS_MACHINE_H

#include "../wire/sha256.h"

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/stat.h>

/* Reads a small text file, at most cap - 1 bytes of it, and ends it with a 0. Returns its bytes, or -1. Files of /proc
 * give no size beforehand. */
static ssize_t ddl__read_text(const char *path, char *out, size_t cap) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return -1;
    }
    size_t used = 0;
    while (used < cap - 1) {
        ssize_t n = read(fd, out + used, cap - 1 - used);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            break;
        }
        used += (size_t)n;
    }
    close(fd);
    out[used] = 0;
    return (ssize_t)used;
}

/* What /proc/PID/stat tells: `pid (name) state parent ...`. The name may contain anything, parentheses too. */
typedef struct ddl__process {
    const char *name; /* in the text */
    char state;       /* Z, X: it is dead, its parent only has not asked */
    long parent;
    uint64_t start; /* field 22: when it began, in ticks since the boot */
} ddl__process;

/* False: the text is cut or is something else. Ends the name with a 0 inside the text. */
static bool ddl__process_parse(char *text, ddl__process *out) {
    char *name = strchr(text, '('), *end = strrchr(text, ')');
    if (name == NULL || end == NULL || end < name || end[1] != ' ' || end[2] == 0) {
        return false;
    }
    *end = 0;
    out->name = name + 1;
    out->state = end[2];
    const char *at = strchr(end + 2, ' ');
    out->parent = at != NULL ? strtol(at, NULL, 10) : 0;
    for (int field = 4; at != NULL && field < 22; field++) {
        at = strchr(at + 1, ' ');
    }
    out->start = at != NULL ? strtoull(at, NULL, 10) : 0;
    return at != NULL;
}

/* A quota as cores, rounded up; INT32_MAX when it is none: `max`, or -1. */
static int32_t ddl__quota_parse(const char *quota_text, const char *period_text) {
    long long quota = strtoll(quota_text, NULL, 10), period = strtoll(period_text, NULL, 10);
    if (quota <= 0 || period <= 0 || (quota - 1) / period >= INT32_MAX) {
        return INT32_MAX;
    }
    return (int32_t)((quota - 1) / period + 1);
}

/* The quota of one control group: `100000 100000` in cpu.max, two files in version 1. */
static int32_t ddl__quota_of(const char *folder) {
    char path[4300], quota[64], period[64];
    snprintf(path, sizeof path, "%s/cpu.max", folder);
    if (ddl__read_text(path, quota, sizeof quota) > 0) {
        return ddl__quota_parse(quota, quota + strcspn(quota, " "));
    }
    snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", folder);
    if (ddl__read_text(path, quota, sizeof quota) < 0) {
        return INT32_MAX;
    }
    snprintf(path, sizeof path, "%s/cpu.cfs_period_us", folder);
    return ddl__read_text(path, period, sizeof period) < 0 ? INT32_MAX : ddl__quota_parse(quota, period);
}

/* The path of this process in a hierarchy of /proc/self/cgroup: a line `0::/a/b`, or `3:cpu,cpuacct:/a/b` in version 1.
 * Inside a container it is often "/" while the quota stands at the root of what is mounted. */
static bool ddl__cgroup_path(const char *list, const char *controller, char *out, size_t cap) {
    for (const char *line = list; line != NULL && *line != 0;) {
        const char *end = strchr(line, '\n'), *first = strchr(line, ':');
        const char *second = first != NULL ? strchr(first + 1, ':') : NULL;
        if (second == NULL || (end != NULL && second > end)) {
            return false;
        }
        size_t names = (size_t)(second - first - 1);
        char field[128];
        snprintf(field, sizeof field, ",%.*s,", (int)DDL__MIN(names, sizeof field - 3), first + 1);
        if (strstr(field, controller) != NULL) {
            size_t bytes = end != NULL ? (size_t)(end - second - 1) : strlen(second + 1);
            snprintf(out, cap, "%.*s", (int)DDL__MIN(bytes, cap - 1), second + 1);
            return true;
        }
        line = end != NULL ? end + 1 : NULL;
    }
    return false;
}

/* Looks at the control groups of this process that have a controller, of version 2 and then of version 1: its own, and
 * all above it, which bind it as well. `list` is the name in version 1 between commas, `root` where that is mounted. */
static void ddl__cgroups_visit(const char *list, const char *root, void (*look)(const char *folder, void *arg),
                               void *arg) {
    const char *const roots[2] = {"/sys/fs/cgroup", root}, *const controllers[2] = {",,", list};
    char groups[4096], path[2048], folder[4096];
    if (ddl__read_text("/proc/self/cgroup", groups, sizeof groups) < 0) {
        groups[0] = 0;
    }
    for (int version = 0; version < 2; version++) {
        if (!ddl__cgroup_path(groups, controllers[version], path, sizeof path)) {
            path[0] = 0;
        }
        for (;;) {
            snprintf(folder, sizeof folder, "%s%s", roots[version], path);
            look(folder, arg);
            char *slash = strrchr(path, '/');
            if (slash == NULL) {
                break;
            }
            *slash = 0;
        }
    }
}

static void ddl__cgroup_look_cores(const char *folder, void *arg) {
    int32_t *cores = arg;
    *cores = DDL__MIN(*cores, ddl__quota_of(folder));
}

static int32_t ddl__cgroup_cores(void) {
    int32_t cores = INT32_MAX;
    ddl__cgroups_visit(",cpu,", "/sys/fs/cgroup/cpu", ddl__cgroup_look_cores, &cores);
    return cores;
}

/* Bytes that a limit still allows. What files left in the cache (inactive_file in memory.stat) goes when it is needed.
 * UINT64_MAX: there is no limit; version 1 says that by a number beyond all memory. */
static uint64_t ddl__memory_left_parse(const char *limit_text, const char *used_text, const char *stat_text) {
    static const char cached[] = "inactive_file ";
    bool none = limit_text[0] < '0' || limit_text[0] > '9'; /* "max" */
    uint64_t limit = strtoull(limit_text, NULL, 10), used = strtoull(used_text, NULL, 10), back = 0;
    for (const char *at = strstr(stat_text, cached); at != NULL; at = strstr(at + 1, cached)) {
        uint64_t bytes = strtoull(at + sizeof cached - 1, NULL, 10); /* version 1: its own, then with those below */
        back = DDL__MAX(back, bytes);
    }
    used -= DDL__MIN(used, back);
    return none || limit >= (uint64_t)1 << 60 ? UINT64_MAX : limit - DDL__MIN(limit, used);
}

static uint64_t ddl__memory_left_of(const char *folder) {
    static const char *const files[2][2] = {{"memory.max", "memory.current"},
                                            {"memory.limit_in_bytes", "memory.usage_in_bytes"}};
    char path[4300], limit[64], used[64], stat[4096];
    for (int version = 0; version < 2; version++) {
        snprintf(path, sizeof path, "%s/%s", folder, files[version][0]);
        if (ddl__read_text(path, limit, sizeof limit) <= 0) {
            continue;
        }
        snprintf(path, sizeof path, "%s/%s", folder, files[version][1]);
        if (ddl__read_text(path, used, sizeof used) <= 0) {
            continue;
        }
        snprintf(path, sizeof path, "%s/memory.stat", folder);
        stat[0] = 0;
        ddl__read_text(path, stat, sizeof stat);
        return ddl__memory_left_parse(limit, used, stat);
    }
    return UINT64_MAX;
}

static void ddl__cgroup_look_memory(const char *folder, void *arg) {
    uint64_t *left = arg, here = ddl__memory_left_of(folder);
    *left = DDL__MIN(*left, here);
}

/* Bytes of memory that the control groups of this process still allow; UINT64_MAX where none has a limit. */
static uint64_t ddl__memory_left(void) {
    uint64_t left = UINT64_MAX;
    ddl__cgroups_visit(",memory,", "/sys/fs/cgroup/memory", ddl__cgroup_look_memory, &left);
    return left;
}

/* Cores that this process may use: its affinity mask, and the quota of its control group. At least 1. *out_set is a
 * hash of the mask: ranks of a host with the same one share their cores, others have their own, as where each is bound
 * to its own. 0: a quota, which all share. Masks that overlap in part are not seen. */
static int32_t ddl__cores(uint64_t *out_set) {
    int32_t cores = 0;
    *out_set = 0;
    for (size_t most = 1024; most <= 1u << 17 && cores == 0;
         most *= 4) { /* EINVAL: the kernel has more than the mask */
        cpu_set_t *set = CPU_ALLOC(most);
        if (set == NULL) {
            break;
        }
        size_t bytes = CPU_ALLOC_SIZE(most);
        if (sched_getaffinity(0, bytes, set) == 0) {
            cores = CPU_COUNT_S(bytes, set);
            for (size_t k = 0; k < 8 * bytes; k++) {
                *out_set = CPU_ISSET_S(k, bytes, set) ? ddl__mix(*out_set, k + 1) : *out_set;
            }
        }
        CPU_FREE(set);
    }
    if (cores == 0) {
        cores = (int32_t)DDL__MAX(sysconf(_SC_NPROCESSORS_ONLN), 1);
    }
    int32_t quota = ddl__cgroup_cores();
    *out_set = quota < INT32_MAX ? 0 : *out_set;
    return DDL__MIN(cores, quota);
}

/* Descriptors in use now. Without /proc a guess that is on the safe side. */
static int32_t ddl__open_fds(void) {
    DIR *folder = opendir("/proc/self/fd");
    if (folder == NULL) {
        return 64;
    }
    int32_t count = -3; /* ".", ".." and the folder itself */
    while (readdir(folder) != NULL) {
        count++;
    }
    closedir(folder);
    return DDL__MAX(count, 0);
}

/* Makes room for `more` file descriptors above those in use: raises the soft limit as far as it needs, so that a job
 * too large for its limits fails at its start and not at its first checkpoint. Not higher: select() in the program
 * breaks above 1024. */
static ddl_status ddl__need_fds(int32_t more, ddl__sentence *why) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) {
        return DDL_OK; /* a sandbox that does not tell; it will show */
    }
    rlim_t used = (rlim_t)ddl__open_fds(), need = used + (rlim_t)more;
    if (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= need) {
        return DDL_OK;
    }
    unsigned long long hard = (unsigned long long)limit.rlim_max, soft = (unsigned long long)limit.rlim_cur;
    if (limit.rlim_max == RLIM_INFINITY || limit.rlim_max >= need) {
        limit.rlim_cur = need;
        if (setrlimit(RLIMIT_NOFILE, &limit) == 0) {
            return DDL_OK;
        }
    }
    return ddl__fail(why, DDL_ERR_SYSTEM,
                     "ddl_init: this job needs %d file descriptors besides the %llu in use, but the limit is %llu and "
                     "cannot be raised above %llu. Raise it where the job is started: ulimit -n %llu, LimitNOFILE= of "
                     "systemd, --ulimit nofile= of a container",
                     more, (unsigned long long)used, soft, hard, (unsigned long long)need);
}

/* Equal on two processes when they share a host: same boot of the same kernel, and same network namespace. A container
 * with its own network counts as its own host: unix sockets and loopback do not lead out of it. */
static void ddl__host_id(char *out, size_t cap) {
    char boot[80];
    struct stat space;
    ssize_t n = ddl__read_text("/proc/sys/kernel/random/boot_id", boot, sizeof boot);
    if (n > 0) {
        boot[strcspn(boot, "\n")] = 0;
    } else if (gethostname(boot, sizeof boot) != 0) {
        snprintf(boot, sizeof boot, "unknown");
    }
    boot[sizeof boot - 1] = 0;
    uint64_t network = stat("/proc/self/ns/net", &space) == 0 ? (uint64_t)space.st_ino : 0;
    snprintf(out, cap, "%s/%" PRIu64, boot, network);
}

#endif /* DDL_SETTINGS_MACHINE_H */

/* ddl-info --doctor: looks for what commonly goes wrong, and for each finding says the line that fixes it. Each rank looks
 * at its own process and host; then every pair exchanges a message. Rank 0 prints all. */
#ifndef DDL_TOOLS_DOCTOR_H
#define DDL_TOOLS_DOCTOR_H

#include <sys/resource.h>
#include <sys/statvfs.h>

#include "doctor_device.h"
#include "doctor_fabric.h"
#include "doctor_links.h"
#include "doctor_net.h"

/* A job of 1000 ranks needs three descriptors for each. */
static void look_at_descriptors(findings *f, int32_t world_size) {
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    unsigned long long need = 3ull * (unsigned long long)world_size + 1056;
    found(f, files.rlim_max < need ? (world_size > 300 ? 2 : 1) : 0, "file descriptors",
          "ulimit -n 65536, or `* - nofile 65536` in /etc/security/limits.conf, or LimitNOFILE= of the service",
          "at most %llu; %d ranks want %llu", (unsigned long long)files.rlim_max, (int)world_size, need);
}

static void look_at_locked_memory(findings *f) {
    struct rlimit locked;
    getrlimit(RLIMIT_MEMLOCK, &locked);
    bool adapter = access("/dev/infiniband", F_OK) == 0, none = locked.rlim_cur == RLIM_INFINITY;
    char limit[32];
    snprintf(limit, sizeof limit, "%llu KiB", (unsigned long long)locked.rlim_cur / 1024);
    found(f, adapter && !none ? 1 : 0, "locked memory",
          "ulimit -l unlimited, or `* - memlock unlimited` in /etc/security/limits.conf: RDMA registers memory",
          "%s%s", none ? "unlimited" : limit, adapter ? ", and this host has RDMA adapters" : "; no RDMA adapter needs it");
}

static long long number_in(const char *path) {
    char text[64] = "";
    return ddl__read_text(path, text, sizeof text) > 0 && text[0] >= '0' && text[0] <= '9' ? atoll(text) : -1;
}

/* What a container may still take; a rank that goes beyond is killed without a word. */
static void look_at_memory(findings *f, int32_t local_ranks) {
    long long limit = number_in("/sys/fs/cgroup/memory.max"), used = number_in("/sys/fs/cgroup/memory.current");
    if (limit < 0) {
        limit = number_in("/sys/fs/cgroup/memory/memory.limit_in_bytes");
        used = number_in("/sys/fs/cgroup/memory/memory.usage_in_bytes");
    }
    if (limit < 0 || limit > (1ll << 50)) {
        found(f, 0, "memory of the container", "", "not limited");
        return;
    }
    bool little = (limit - used) / (local_ranks > 0 ? local_ranks : 1) < 64ll << 20;
    found(f, little ? 1 : 0, "memory of the container", "raise the container's memory limit (docker --memory, resources.limits)",
          "%lld MiB of %lld MiB are free for %d ranks", (limit - used) >> 20, limit >> 20, (int)local_ranks);
}

/* Others need it (libfabric's shm, MPI, data loaders); ddl's shared memory has no name and no limit but the memory's. */
static void look_at_dev_shm(findings *f) {
    struct statvfs room;
    if (statvfs("/dev/shm", &room) != 0) {
        found(f, 1, "/dev/shm", "mount -t tmpfs tmpfs /dev/shm, or a volume of kind emptyDir with medium: Memory there",
              "is not there: data loaders, MPI and libfabric's shm need it");
        return;
    }
    unsigned long long all = (unsigned long long)room.f_blocks * room.f_frsize >> 20,
                       left = (unsigned long long)room.f_bavail * room.f_frsize >> 20;
    found(f, left < 64 ? 1 : 0, "/dev/shm", "docker run --shm-size=8g, or a volume of kind emptyDir with medium: Memory "
          "there; or rm what ended jobs have left in it", "%llu MiB of %llu MiB are free (ddl itself uses none)", left, all);
}

/* What a quota has taken away shows in the control group's own count. */
static void look_at_quota(findings *f) {
    char text[1024] = "";
    if (ddl__read_text("/sys/fs/cgroup/cpu.stat", text, sizeof text) <= 0 &&
        ddl__read_text("/sys/fs/cgroup/cpu/cpu.stat", text, sizeof text) <= 0) {
        return;
    }
    const char *periods = strstr(text, "nr_periods "), *throttled = strstr(text, "nr_throttled ");
    long long all = periods != NULL ? atoll(periods + 11) : 0, taken = throttled != NULL ? atoll(throttled + 13) : 0;
    found(f, all > 0 && taken > all / 20 ? 1 : 0, "CPU quota",
          "raise the container's CPU limit (docker --cpus, resources.limits.cpu), or use fewer ranks",
          "%s: the control group was stopped in %lld of %lld periods", all > 0 ? "limited" : "not limited", taken, all);
}

static void look_at_cores(findings *f, const ddl_context *c) {
    found(f, c->local_ranks > c->cores ? 1 : 0, "cores",
          "fewer ranks per host, or more cores: ranks that share a core wait for the scheduler at each operation",
          "%d ranks of this host may use %d cores", (int)c->local_ranks, (int)c->cores);
}

static void look_at_secret(findings *f, const ddl_context *c) {
    bool variable = c->settings.secret_source != NULL && strcmp(c->settings.secret_source, "DDL_SECRET") == 0;
    found(f, variable ? 1 : 0, "job secret", "DDL_SECRET_FILE=path of mode 600, or a launcher that makes one",
          "%s%s", c->settings.secret != NULL ? c->settings.secret_source : "none: one host and one user only",
          variable ? ": visible to other processes of this user" : "");
}

static void look_at_plugins(findings *f, const ddl_context *c) {
    int32_t loaded = 0;
    for (const ddl__plugin_record *p = c->loader.loaded; p != NULL; p = p->next) {
        loaded++;
    }
    for (const ddl__plugin_record *p = c->loader.refused; p != NULL; p = p->next) {
        if (p->declined) { /* it has nothing to do on this host: no fault, and no news from every rank */
            found(f, 0, "plugins", "", "%.300s is not used, as %s", p->path, p->reason);
            f->list[f->count - 1].each_host = true;
        } else {
            found(f, 1, "plugins", "see the reason; `make plugins`, DDL_PLUGIN_PATH, chmod go-w, or remove the file",
                  "%.300s is refused: %s", p->path, p->reason);
        }
    }
    bool shared = false;
    for (int32_t i = 0; i < c->world_size; i++) {
        const ddl__link *l = &c->links[i];
        shared = shared || (i != c->rank && l->same_host && strcmp(l->endpoint->plugin->name, "tcp") == 0);
    }
    found(f, shared ? 1 : 0, "shared memory", "make plugins, and DDL_PLUGIN_PATH=folder of libddl-shm.so, on all ranks",
          "%s (%d plugins are loaded)", shared ? "ranks of this host talk over sockets" : "fine", (int)loaded);
}

static void json_string(const char *text) {
    char room[2 * FINDING_BYTES + 64];
    printf("\"%s\"", ddl__json_text(text, room, sizeof room));
}

static void print_finding(const finding *n, bool json, bool first) {
    static const char *const levels[] = {"fine", "warning", "wrong"};
    if (!json) {
        printf("  rank %-4d %-8s %-24s %s\n", (int)n->rank, levels[n->level], n->what, n->text);
        if (n->level > 0) {
            printf("  %-18s fix: %s\n", "", n->fix);
        }
        return;
    }
    printf("%s\n  {\"rank\": %d, \"level\": \"%s\", \"what\": ", first ? "" : ",", (int)n->rank, levels[n->level]);
    json_string(n->what);
    printf(", \"text\": ");
    json_string(n->text);
    printf(", \"fix\": ");
    json_string(n->fix);
    printf("}");
}

static void look_at_rank(findings *own, ddl_context *c) {
    look_at_descriptors(own, c->world_size);
    look_at_locked_memory(own);
    look_at_memory(own, c->local_ranks);
    look_at_quota(own);
    look_at_dev_shm(own);
    look_at_cores(own, c);
    look_at_secret(own, c);
    look_at_plugins(own, c);
    look_at_fabric(own, c);
    look_at_devices(own, c);
}

static bool is_first_of_host(const ddl_context *c, int32_t rank) {
    int32_t r = 0;
    while (c->links[r].host != c->links[rank].host) {
        r++;
    }
    return r == rank;
}

/* On rank 0: those of all ranks, `each` of every one; what is fine is told once, or once a host. Returns whether
 * something is wrong. */
static bool print_findings(const ddl_context *c, const finding *all, int32_t each, bool json) {
    bool wrong = false;
    int32_t shown = 0;
    printf("%s", json ? "\"findings\": [" : "");
    for (int32_t i = 0; i < c->world_size * each; i++) {
        const finding *n = &all[i];
        bool told = n->what[0] != 0 && (n->level > 0 || i / each == 0 || (n->each_host && is_first_of_host(c, i / each)));
        if (told) {
            print_finding(n, json, shown++ == 0);
        }
        wrong = wrong || n->level == 2;
    }
    printf("%s", json ? "\n]}\n" : "");
    return wrong;
}

/* As many of each rank as the one has that has most; what is unused has no name. */
static ddl_status gather_findings(ddl_context *c, const findings *own, finding **out_all, int32_t *out_each) {
    *out_each = own->count;
    DDL__TRY(ddl_all_reduce(ddl_world(c), DDL_VIEW(out_each, 1), DDL_VIEW(out_each, 1), DDL_MAX));
    size_t bytes = sizeof(finding) * (size_t)*out_each;
    *out_all = calloc((size_t)c->world_size, bytes);
    return *out_all == NULL ? DDL_ERR_NOMEM
                            : ddl_gather(ddl_world(c), DDL_VIEW((uint8_t *)(uintptr_t)own->list, bytes),
                                         DDL_VIEW((uint8_t *)*out_all, bytes * (size_t)c->world_size), 0);
}

/* 0: all is fine or a warning; 1: something is wrong, or the ranks could not be asked. */
static int doctor(ddl_context *c, bool json) {
    findings *own = calloc(1, sizeof *own);
    finding *all = NULL;
    int32_t each = 0;
    net n;
    bool wrong = false;
    ddl_status status = own == NULL ? DDL_ERR_NOMEM : DDL_OK;
    if (status == DDL_OK) {
        own->rank = c->rank;
        look_at_rank(own, c);
        status = look_at_stragglers(own, c);
    }
    ddl_status looked = net_look(&n, c);
    status = status == DDL_OK ? looked : status;
    status = status == DDL_OK ? look_at_clocks(own, c) : status;
    if (status == DDL_OK && c->rank == 0) {
        judge_network(&n, own);
    }
    status = status == DDL_OK ? gather_findings(c, own, &all, &each) : status;
    if (status != DDL_OK) {
        fprintf(stderr, "ddl-info: The ranks could not be asked: %s\n", ddl_error(c));
    } else if (c->rank == 0) {
        if (json) {
            printf("{\"version\": 1, \"ranks\": %d, \"hosts\": %d, ", (int)c->world_size, (int)n.hosts);
            print_matrix_json(&n);
        }
        wrong = print_findings(c, all, each, json);
        if (!json) {
            print_matrix(&n);
        }
    }
    net_close(&n);
    free(own);
    free(all);
    return status == DDL_OK && !wrong ? 0 : 1;
}

#endif /* DDL_TOOLS_DOCTOR_H */

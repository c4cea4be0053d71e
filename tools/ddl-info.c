/* ddl-info: what ddl finds here, what it would choose, and why: settings, machine, plugins; and when it is started as the
 * ranks of a job (ddlrun -n 4 ddl-info), hosts, transports, measured links and the algorithm for each size.
 *
 * It is compiled with the implementation and reads a context from inside: what a person who looks for a fault needs is
 * more than what a program needs. */
#define DDL_IMPLEMENTATION
#include "ddl.h"

#include <getopt.h>

#include "attach.h"
#include "doctor.h"
#include "ended.h"
#include "json_out.h"
#include "nearest.h"

#include "attach_json.h"

static const char info_usage[] =
    "usage: ddl-info [--json] [--group RANKS | --doctor | --attach PID]\n"
    "       ddlrun -n 4 ddl-info      the same, and how the ranks reach each other\n"
    "\n"
    "Shows settings and where they come from, cores, interfaces, plugins that were loaded or refused and why; as the\n"
    "ranks of a job also hosts, transports, measured latency and bandwidth, and for each size the algorithm that is\n"
    "chosen, the transports that carry it and the time that it should take. Secrets are not shown.\n"
    "\n"
    "  --group    choices for a group of these ranks instead of all, as 0-3,8; the first of them prints\n"
    "  --doctor   look for what commonly goes wrong instead, on every rank: limits of descriptors, memory, CPU; the\n"
    "             secret, plugins, libfabric, devices; messages between every two ranks; which interface of which host\n"
    "             is reached from where, MTU, clocks, versions; each finding with the line that fixes it\n"
    "  --json     for machines: one object, described in docs/operations.md\n"
    "  --attach   of the job that process PID is a rank of, or has started, or that is called so: what each rank on\n"
    "             this host does, its last collectives, its links, and who waits for whom. The ranks do not notice, and\n"
    "             need not answer. Only processes of the same user\n"
    "  --help     show this\n"
    "\n"
    "Exit code: 0; 1 when ddl_init fails or the doctor finds something wrong; 2 when an argument is.\n";

static void print_version(void) {
    printf("ddl %d.%d.%d, plugin ABI %d; built in: tcp%s", DDL_VERSION_MAJOR, DDL_VERSION_MINOR, DDL_VERSION_PATCH,
           DDL_PLUGIN_ABI, ddl_feature("plugins") ? ", plugins" : "");
    for (const ddl__plugin_static *p = ddl__plugin_statics(); p->name != NULL; p++) {
        printf(", %s", p->name);
    }
    printf("\n");
}

static void print_settings(void) {
    printf("\nsettings (each by its variable; a program may set others in ddl_config)\n");
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__setting_table); i++) {
        const ddl__setting_row *row = &ddl__setting_table[i];
        const char *value = ddl__env(row->name);
        bool secret = strcmp(row->name, "DDL_SECRET") == 0;
        printf("  %-20s %-24s %-11s %s\n", row->name,
               value == NULL  ? (row->standard[0] != 0 ? row->standard : "-")
               : secret       ? "(set, not shown)"
                              : value,
               value == NULL ? "default" : "environment", row->help);
    }
}

/* Of an interface that is up. */
static bool interface_address(const struct ifaddrs *i, char *out, size_t cap) {
    int family = i->ifa_addr != NULL ? i->ifa_addr->sa_family : 0;
    socklen_t bytes = family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
    return (family == AF_INET || family == AF_INET6) && (i->ifa_flags & IFF_UP) != 0 &&
           getnameinfo(i->ifa_addr, bytes, out, (socklen_t)cap, NULL, 0, NI_NUMERICHOST) == 0;
}

static void print_interfaces(void) {
    struct ifaddrs *list = NULL;
    printf("\ninterfaces that are up\n");
    if (getifaddrs(&list) != 0) {
        printf("  they cannot be read: %s\n", strerror(errno));
        return;
    }
    for (struct ifaddrs *i = list; i != NULL; i = i->ifa_next) {
        char address[64];
        if (interface_address(i, address, sizeof address)) {
            printf("  %-12s %s\n", i->ifa_name, address);
        }
    }
    freeifaddrs(list);
}

static void print_machine(const ddl_context *c) {
    struct rlimit files = {0, 0};
    getrlimit(RLIMIT_NOFILE, &files);
    printf("\nthis process\n");
    printf("  rank %d of %d, by %s%s%s\n", c->rank, c->world_size, c->settings.launch.by,
           c->settings.job != NULL ? ", job " : "", c->settings.job != NULL ? c->settings.job : "");
    printf("  %d cores that it may use, %d ranks on this host\n", c->cores, c->local_ranks);
    printf("  file descriptors: %d in use, limit %llu, at most %llu\n", ddl__open_fds(), (unsigned long long)files.rlim_cur,
           (unsigned long long)files.rlim_max);
    printf("  host %s (equal on two ranks: they are on one host)\n", c->settings.host_id);
    printf("  job secret: %s\n", c->settings.secret != NULL ? c->settings.secret_source
                                                            : "none, so only ranks of this user on this host are let in");
}

static void print_plugins(const ddl_context *c) {
    printf("\nplugins\n");
    printf("  %-12s %-8s built in: TCP and unix sockets\n", "tcp", "used");
    for (const ddl__plugin_record *p = c->loader.loaded; p != NULL; p = p->next) {
        printf("  %-12s %-8s %s, version %s: %s\n", p->name, "loaded", p->path,
               p->plugin->version != NULL ? p->plugin->version : "?", p->plugin->about != NULL ? p->plugin->about : "");
    }
    for (const ddl__plugin_record *p = c->loader.refused; p != NULL; p = p->next) {
        printf("  %-12s %-8s %s: %s\n", p->name, p->declined ? "declined" : "refused",
               p->path, p->reason);
    }
    const char *path = c->settings.plugin_path, *libdir = ddl__plugin_libdir();
    printf("  looked for in: %s%sthe folder of the executable%s%s\n", path != NULL ? path : "", path != NULL ? ", " : "",
           libdir != NULL ? ", " : "", libdir != NULL ? libdir : "");
}

/* Without opening any: that takes a GPU's memory. */
static void print_devices(const ddl_context *c) {
    if (c->devices == NULL || c->devices->count == 0) {
        return;
    }
    printf("\ndevices\n");
    for (int32_t i = 0; i < c->devices->count; i++) {
        const ddl__device *d = &c->devices->list[i];
        printf("  %-12d %s %d; streams %s, strided tensors %s\n", d->number, d->plugin->name, d->index,
               DDL_HAS(d->table, gate_put) ? "can wait for operations" : "cannot wait for operations",
               DDL_HAS(d->table, strided) ? "by a kernel" : "run by run");
    }
    bool native = c->world->device_native.set != NULL;
    printf("  collectives of device tensors %s\n", native ? "run on the devices" : "go through pinned memory");
}

static void print_links(const ddl_context *c) {
    printf("\nranks, as rank %d sees them (%d ranks on %d host%s)\n", c->rank, c->world_size, c->host_count,
           c->host_count == 1 ? "" : "s");
    printf("  %5s %5s %8s  %-10s %s\n", "rank", "host", "pid", "transport", "the transport's own guess");
    for (int32_t i = 0; i < c->world_size; i++) {
        const ddl__link *l = &c->links[i];
        if (l->endpoint == NULL) {
            printf("  %5d %5d %8d  %-10s\n", i, l->host, l->pid, "itself");
            continue;
        }
        const ddl_transport *t = l->endpoint->table;
        printf("  %5d %5d %8d  %-10s %.1f us, %.2f GB/s%s%s\n", i, l->host, l->pid, l->endpoint->plugin->name,
               (double)l->latency_ns * 1e-3, (double)l->bytes_per_s * 1e-9, DDL_HAS(t, describe) ? "; " : "",
               DDL_HAS(t, describe) ? t->describe(l->endpoint->self, i) : "");
    }
    const ddl__cost_model *m = &c->tuning.model;
    for (int far_link = 0; far_link < (c->host_count > 1 ? 2 : 1); far_link++) {
        printf("  %s: %.1f us, %.2f GB/s (measured at the start, rounded to a power of the root of two)\n",
               far_link ? "between hosts" : "inside a host", m->latency_s[far_link] * 1e6, 1e-9 / m->s_per_byte[far_link]);
    }
    if (c->choice[0] > 0) {
        printf("  between hosts the faster of two was taken: 64 KiB take %.1f us by %s, %.1f us by tcp\n",
               ddl__choice_s(c->choice) * 1e6, c->choice_name, ddl__choice_s(c->choice + 2) * 1e6);
    }
    printf("  ranks per core: %d\n", m->oversubscription > 1 ? m->oversubscription : 1);
}

enum { INFO_TRANSPORT_BYTES = 80, INFO_LARGEST = 64 << 20 };

static const ddl_kind info_kinds[] = {DDL_ALL_REDUCE, DDL_BROADCAST, DDL_ALL_GATHER, DDL_REDUCE_SCATTER, DDL_ALL_TO_ALL};

/* What carries an algorithm between the members of a group: what runs it by itself, else all that is between them,
 * "shm+tcp". */
static void transport_of(const ddl_group *g, const char *algorithm, char out[INFO_TRANSPORT_BYTES]) {
    const ddl_context *c = g->context;
    const ddl__native *n = strcmp(algorithm, "native_device") == 0 ? &g->device_native : &g->native;
    bool native = n->set != NULL && (strcmp(algorithm, "native") == 0 || n == &g->device_native);
    ddl__text text = {out, INFO_TRANSPORT_BYTES, 0};
    out[0] = 0;
    for (int32_t e = 0; e < c->endpoint_count; e++) {
        bool used = native && c->endpoints[e].self == n->self;
        for (int32_t i = 0; i < g->size && !native && !used; i++) {
            used = c->links[g->ranks[i]].endpoint == &c->endpoints[e];
        }
        if (used) {
            ddl__text_add(&text, "%s%s", text.used > 0 ? "+" : "", c->endpoints[e].plugin->name);
        }
    }
    ddl__text_add(&text, "%s", text.used == 0 ? "none" : ""); /* a rank alone */
}

/* What ddl_estimate says for f32, out of place, root 0, sum. bytes: of the larger of a rank's buffers. */
static bool estimate(ddl_group *group, ddl_kind kind, int64_t bytes, ddl_estimate_info *out_info,
                     char out_transport[INFO_TRANSPORT_BYTES]) {
    bool in_large = kind == DDL_REDUCE_SCATTER || kind == DDL_ALL_TO_ALL;
    bool out_large = kind == DDL_ALL_GATHER || kind == DDL_ALL_TO_ALL;
    int64_t n = ddl_size(group), count = bytes / 4 / (in_large || out_large ? n : 1);
    count = count > 0 ? count : 1;
    char *in = (char *)(uintptr_t)(1 << 20), *out = (char *)(uintptr_t)(1ll << 40); /* nobody touches them */
    ddl_collective call = {.kind = kind,
                           .op = kind == DDL_ALL_REDUCE || kind == DDL_REDUCE || kind == DDL_REDUCE_SCATTER ? DDL_SUM
                                                                                                            : DDL_OP_NONE,
                           .in = ddl_tensor_1d(in, DDL_F32, count * (in_large ? n : 1)),
                           .out = ddl_tensor_1d(out, DDL_F32, count * (out_large ? n : 1))};
    if (ddl_estimate(group, &call, out_info) != DDL_OK) {
        return false;
    }
    transport_of(group, out_info->algorithm, out_transport);
    return true;
}

static void print_algorithms(ddl_group *group) {
    printf("\nalgorithm/transport and expected time (us) of f32 by size in bytes, of a group of %d ranks; DDL_ALGO and "
           "DDL_TRANSPORTS override\n  %10s", ddl_size(group), "size");
    for (size_t k = 0; k < DDL__COUNT_OF(info_kinds); k++) {
        printf(" %26s %10s", ddl__kind_name(info_kinds[k]), "");
    }
    printf("\n");
    for (int64_t bytes = 8; bytes <= INFO_LARGEST; bytes *= 8) {
        printf("  %10lld", (long long)bytes);
        for (size_t k = 0; k < DDL__COUNT_OF(info_kinds); k++) {
            char transport[INFO_TRANSPORT_BYTES], both[INFO_TRANSPORT_BYTES + 40] = "-";
            ddl_estimate_info info = {0};
            if (estimate(group, info_kinds[k], bytes, &info, transport)) {
                snprintf(both, sizeof both, "%.32s/%s", info.algorithm, transport);
            }
            printf(" %26s %10.2f", both, info.seconds * 1e6);
        }
        printf("\n");
    }
}

/* What transports said of themselves while they were opened ("fabric: verbs;ofi_rxm on mlx5_0: is taken"). Of one that nobody
 * asked for, and on other ranks than the first, the library tells it with DDL_LOG=debug only. */
typedef struct notes {
    bool joined;         /* they are open */
    ddl_log_level shown; /* of these, as DDL_LOG asks, all goes to stderr too */
    size_t used;
    char text[16384];
} notes;

static void note(void *user, ddl_log_level level, const char *line) {
    notes *n = user;
    if (level <= n->shown) {
        fprintf(stderr, "%s\n", line);
    }
    const char *said = strncmp(line, "ddl: rank ", 10) == 0 ? strstr(line + 10, ": ") : NULL;
    size_t name = said != NULL ? strspn(said + 2, "abcdefghijklmnopqrstuvwxyz0123456789_") : 0;
    bool ours = name == 8 && strncmp(said + 2, "ddl_init", name) == 0;
    ours = ours || (name == 7 && strncmp(said + 2, "plugins", name) == 0); /* these are listed */
    if (name > 0 && !ours && !n->joined && strncmp(said + 2 + name, ": ", 2) == 0 && n->used < sizeof n->text) {
        n->used += (size_t)snprintf(n->text + n->used, sizeof n->text - n->used, "  %s\n", said + 2);
    }
}

static void print_notes(const notes *n) {
    if (n->used > 0) {
        printf("\nwhat transports found\n%s", n->text);
    }
}

/* All is logged, for the notes. A value that makes no sense is left to ddl_init. */
static ddl_log_level info_level(notes *n) {
    ddl__sentence why;
    if (ddl__parse_log_level(DDL_LOG_NONE, &n->shown, &why) < 0) {
        return DDL_LOG_NONE;
    }
    return DDL_LOG_DEBUG;
}

#include "two_ranks.h"
#include "info_json.h"

typedef struct arguments {
    bool doctor, json;
    const char *attach, *group; /* or NULL */
} arguments;

/* The ranks of "0-3,8", in their order; false: it is no such list. ranks: room for world_size. */
static bool read_ranks(const char *list, int32_t world_size, int32_t *ranks, int32_t *out_count) {
    *out_count = 0;
    for (const char *at = list; *at >= '0' && *at <= '9';) {
        char *end;
        long first = strtol(at, &end, 10), last = first;
        if (*end == '-' && end[1] >= '0' && end[1] <= '9') {
            last = strtol(end + 1, &end, 10);
        }
        if (last < first) {
            return false;
        }
        for (long r = first; r <= last; r++) {
            bool twice = false;
            for (int32_t i = 0; i < *out_count; i++) {
                twice = twice || ranks[i] == r;
            }
            if (twice || r >= world_size) {
                return false;
            }
            ranks[(*out_count)++] = (int32_t)r;
        }
        at = end + (*end == ',');
        if (*end == 0) {
            return true;
        }
    }
    return false;
}

/* -1: go on; else the exit code. */
static int read_arguments(int argc, char **argv, arguments *out) {
    static const struct option options[] = {{"help", no_argument, NULL, 'h'},
                                            {"doctor", no_argument, NULL, 'd'},
                                            {"json", no_argument, NULL, 'j'},
                                            {"attach", required_argument, NULL, 'a'},
                                            {"group", required_argument, NULL, 'g'},
                                            {NULL, 0, NULL, 0}};
    char text[400];
    opterr = 0;
    int option;
    while ((option = getopt_long(argc, argv, ":h", options, NULL)) != -1) {
        if (option == 'h') {
            fputs(info_usage, stdout);
            return ended("ddl-info", 0);
        }
        out->doctor |= option == 'd';
        out->json |= option == 'j';
        out->attach = option == 'a' ? optarg : out->attach;
        out->group = option == 'g' ? optarg : out->group;
        int asked = option == ':' ? strncmp(argv[optind - 1], "--g", 3) == 0 ? 'g' : 'a' : option;
        bool nothing = option == ':' || (strchr("ag", option) != NULL && strchr("-", optarg[0]) != NULL); /* or a flag */
        if (nothing) {
            fprintf(stderr, asked == 'g' ? "ddl-info: --group needs ranks, as 0-3,8.\n"
                                         : "ddl-info: --attach needs the number of a process, or the name of a job.\n");
            return 2;
        }
        if (option == '?') {
            fprintf(stderr, "ddl-info: %s\n", unknown_flag(info_usage, argv[optind - 1], text, sizeof text));
            return 2;
        }
    }
    if (optind < argc) {
        fprintf(stderr, "ddl-info: %s\n", unknown_flag(info_usage, argv[optind], text, sizeof text));
        return 2;
    }
    const char *why = out->doctor && out->attach != NULL ? "--attach looks at a job that runs, --doctor is one; give one."
                      : out->group != NULL && (out->doctor || out->attach != NULL)
                          ? "--group asks for the choices of a group; --doctor and --attach tell none."
                          : NULL;
    if (why != NULL) {
        fprintf(stderr, "ddl-info: %s\n", why);
        return 2;
    }
    return -1;
}

/* On the rank that tells. */
static void tell(ddl_context *c, ddl_group *group, bool json, const notes *said, const two_ranks *two) {
    if (json) {
        json_info(c, group, said, two);
        return;
    }
    print_version();
    print_settings();
    print_machine(c);
    print_interfaces();
    print_plugins(c);
    print_devices(c);
    print_notes(said);
    if (c->world_size > 1) {
        print_links(c);
        print_algorithms(group);
    } else if (two != NULL) {
        print_two_ranks(two, c);
    }
}

/* The exit code. The first rank of the group tells. */
static int info(ddl_context *c, const arguments *asked, const notes *said, const two_ranks *two) {
    int32_t count = 0, *ranks = calloc((size_t)c->world_size, sizeof *ranks);
    ddl_group *group = NULL;
    ddl_status status = ranks != NULL ? DDL_OK : DDL_ERR_NOMEM;
    if (asked->group == NULL) {
        group = ddl_world(c);
    } else if (ranks != NULL && !read_ranks(asked->group, c->world_size, ranks, &count)) {
        if (c->rank == 0) {
            fprintf(stderr, "ddl-info: --group %.60s: ranks go from 0 to %d, each once, as 0-3,8.\n", asked->group,
                    (int)c->world_size - 1);
        }
        ddl_barrier(ddl_world(c)); /* a launcher ends all when the first has ended so */
        free(ranks);
        return 2;
    }
    for (int32_t i = 0; i < count; i++) {
        if (ranks[i] == c->rank) {
            status = ddl_group_create(ddl_world(c), ranks, count, "ddl-info", &group);
        }
    }
    if (status == DDL_OK && group != NULL && ddl_rank(group) == 0) {
        tell(c, group, asked->json, said, two);
    }
    fflush(stdout);
    ddl_status together = ddl_barrier(ddl_world(c)); /* so that nobody has left before that rank has looked */
    status = status == DDL_OK ? together : status;
    if (status != DDL_OK) {
        fprintf(stderr, "ddl-info: %s\n", ddl_error(c));
    }
    if (asked->group != NULL) {
        ddl_group_free(&group);
    }
    free(ranks);
    return status == DDL_OK ? 0 : 1;
}

int main(int argc, char **argv) {
    arguments asked = {0};
    int usage = read_arguments(argc, argv, &asked);
    if (usage >= 0) {
        return usage;
    }
    if (asked.attach != NULL) {
        return ended("ddl-info", attach(asked.attach, asked.json));
    }
    char why[DDL__SENTENCE_BYTES] = "";
    static notes said;
    ddl_log_level level = info_level(&said);
    ddl__launch launch = {0};
    bool alone = !asked.doctor && asked.group == NULL && ddl__launch_find(&(ddl_config){0}, &launch, NULL) == DDL_OK &&
                 launch.world == 1;
    two_ranks two = {0};
    if (alone) { /* before this process opens anything that a child of it should not have */
        two = ask_two_ranks();
    }
    ddl_config config = {.error_text = why, .error_bytes = sizeof why, .log = note, .log_user = &said, .log_level = level};
    ddl_context *c;
    ddl_status status = ddl_init(&config, &c);
    said.joined = true;
    if (status < 0 && asked.json) {
        json_open(NULL, '{');
        json_integer("version", 1);
        json_text("error", ddl_status_name(status));
        json_text("text", why);
        json_settings();
        json_interfaces();
        json_close('}');
        return 1;
    }
    if (status < 0) { /* what was set is what helps now */
        print_version();
        print_settings();
        print_interfaces();
        print_notes(&said);
        printf("\nddl_init fails with %s: %s\n", ddl_status_name(status), why);
        return 1;
    }
    int result = asked.doctor ? doctor(c, asked.json) : info(c, &asked, &said, alone ? &two : NULL);
    fflush(stdout);
    ddl_finalize(&c);
    return ended("ddl-info", result);
}

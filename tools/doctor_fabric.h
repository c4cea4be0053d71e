/* ddl-info --doctor, libfabric: which providers the library has, and which of those that ddl uses would be taken here and
 * why the others are not, whether or not the job uses it. On the first rank of each host: it takes some 0.2 s. */
#ifndef DDL_TOOLS_DOCTOR_FABRIC_H
#define DDL_TOOLS_DOCTOR_FABRIC_H

#include "finding.h"

#if __has_include(<rdma/fabric.h>)
#include <rdma/fabric.h>
#define DOCTOR_FABRIC_HEADERS 1
#endif

static const char fabric_fix[] = "apt-get install libfabric1 libfabric-dev rdma-core, make plugins, and DDL_PLUGIN_PATH=folder "
                                 "of libddl-fabric.so; `fi_info` lists what libfabric has, `ibv_devinfo` the adapters";

/* The names of all providers that this libfabric has, with adapters or without. */
static void fabric_providers(void *library, char *out, size_t cap) {
    ddl__text text = {out, cap, 0};
    ddl__text_add(&text, "not listed: ddl-info was built without libfabric's headers");
#ifdef DOCTOR_FABRIC_HEADERS
    int (*getinfo)(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **);
    void (*freeinfo)(struct fi_info *);
    void *address[2] = {dlsym(library, "fi_getinfo"), dlsym(library, "fi_freeinfo")};
    struct fi_info *list = NULL;
    memcpy(&getinfo, &address[0], sizeof getinfo);
    memcpy(&freeinfo, &address[1], sizeof freeinfo);
    text.used = 0;
    if (getinfo == NULL || freeinfo == NULL || getinfo(FI_VERSION(1, 14), NULL, NULL, FI_PROV_ATTR_ONLY, NULL, &list) != 0) {
        ddl__text_add(&text, "none");
        return;
    }
    for (struct fi_info *i = list; i != NULL; i = i->next) {
        const char *name = i->fabric_attr->prov_name;
        bool again = false;
        for (struct fi_info *before = list; before != i; before = before->next) {
            again = again || strcmp(before->fabric_attr->prov_name, name) == 0;
        }
        ddl__text_add(&text, "%s%s", again ? "" : i == list ? "" : ", ", again ? "" : name);
    }
    freeinfo(list);
#else
    (void)library;
#endif
}

/* What the plugin says while it tries one provider: the last line tells what became of it. */
typedef struct fabric_trial {
    ddl_host host; /* first, so that the plugin's pointer to it is one to this */
    const ddl_host *real;
    ddl__text text;
    char said[700];
} fabric_trial;

static void fabric_trial_log(const ddl_host *host, ddl_log_level level, const char *line) {
    fabric_trial *t = (fabric_trial *)(uintptr_t)host;
    if (level <= DDL_LOG_INFO && strstr(line, "listens on port") == NULL) {
        line += strncmp(line, "fabric: ", 8) == 0 ? 8 : 0;
        ddl__text_add(&t->text, "%s%s", t->text.used > 0 ? "; " : "", line);
    }
}

/* Opens the transport as if DDL_TRANSPORTS=fabric:NAME asked for it, and closes it again. The table's host functions for
 * messages are there, but no message is sent. True: the provider can be used. */
static bool fabric_try(ddl_context *c, const ddl_transport *table, const char *name, fabric_trial *t) {
    ddl_transport_params params = {.size = sizeof params, .rank = c->rank, .world_size = c->world_size,
                                   .local_ranks = c->local_ranks, .cores = c->cores, .host_id = c->settings.host_id,
                                   .interface_name = c->settings.interface_name, .advertise = c->settings.advertise,
                                   .port_range = c->settings.port_range, .master_host = c->settings.place.host,
                                   .authenticated = c->settings.secret != NULL, .asked = 1, .detail = name,
                                   .local_rank = c->settings.launch.local_rank};
    void *self = NULL;
    t->host = ddl__host_table(c);
    t->host.log = fabric_trial_log;
    t->text = (ddl__text){t->said, sizeof t->said, 0};
    t->said[0] = 0;
    ddl__lock(c);
    ddl_status status = table->open(&t->host, &params, &self);
    if (status == DDL_OK) {
        table->close(self);
    }
    ddl__unlock(c);
    if (t->said[0] == 0) {
        ddl__text_add(&t->text, "%s", status == DDL_OK ? "can be used" : ddl_status_text(status));
    }
    return status == DDL_OK;
}

static void look_at_providers(findings *f, ddl_context *c, const ddl_transport *table, bool adapter) {
    static const char *const names[] = {"efa", "verbs", "tcp"};
    bool rdma = false;
    for (size_t i = 0; i < DDL__COUNT_OF(names); i++) {
        fabric_trial t;
        bool can = fabric_try(c, table, names[i], &t);
        rdma = rdma || (can && i < 2);
        found(f, adapter && !rdma && i == 1 ? 1 : 0, "libfabric", fabric_fix, "%s: %s%s", names[i],
              can ? "can be used: " : "refused: ", t.said);
    }
}

static void look_at_fabric(findings *f, ddl_context *c) {
    char providers[400];
    const ddl_transport *table = NULL;
    bool adapter = access("/dev/infiniband", F_OK) == 0, used = false;
    int32_t before = f->count, first = 0;
    while (c->links[first].host != c->links[c->rank].host) {
        first++;
    }
    if (first != c->rank) {
        return;
    }
    for (const ddl__plugin_record *p = c->loader.loaded; p != NULL; p = p->next) {
        table = strcmp(p->name, "fabric") == 0 ? p->plugin->transport : table;
    }
    for (int32_t i = 0; i < c->endpoint_count; i++) {
        used = used || c->endpoints[i].table == table;
    }
    void *library = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL); /* stays open: it has threads */
    if (library == NULL) {
        found(f, adapter ? 1 : 0, "libfabric", fabric_fix, "is not installed (libfabric.so.1)%s",
              adapter ? ", and this host has RDMA adapters" : "; no RDMA adapter needs it");
    } else {
        fabric_providers(library, providers, sizeof providers);
        found(f, adapter && table == NULL ? 1 : 0, "libfabric", fabric_fix, "its plugin is %s%s; providers of the library: %s",
              table == NULL ? "not loaded" : used ? "used" : "loaded, and not used by this job",
              adapter && table == NULL ? ", and this host has RDMA adapters" : "", providers);
    }
    if (library != NULL && table != NULL) {
        look_at_providers(f, c, table, adapter);
    }
    for (int32_t i = before; i < f->count; i++) {
        f->list[i].each_host = true;
    }
}

#endif /* DDL_TOOLS_DOCTOR_FABRIC_H */

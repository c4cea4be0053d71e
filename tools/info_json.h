/* ddl-info --json: what ddl-info shows, for machines. */
#ifndef DDL_TOOLS_INFO_JSON_H
#define DDL_TOOLS_INFO_JSON_H

static void json_settings(void) {
    json_open("settings", '[');
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__setting_table); i++) {
        const ddl__setting_row *row = &ddl__setting_table[i];
        const char *value = ddl__env(row->name);
        json_open(NULL, '{');
        json_text("name", row->name);
        json_text("value", value == NULL ? row->standard : strcmp(row->name, "DDL_SECRET") == 0 ? "(set, not shown)" : value);
        json_text("from", value == NULL ? "default" : "environment");
        json_close('}');
    }
    json_close(']');
}

static void json_interfaces(void) {
    struct ifaddrs *list = NULL;
    char address[64];
    json_open("interfaces", '[');
    if (getifaddrs(&list) == 0) {
        for (struct ifaddrs *i = list; i != NULL; i = i->ifa_next) {
            if (interface_address(i, address, sizeof address)) {
                json_open(NULL, '{');
                json_text("name", i->ifa_name);
                json_text("address", address);
                json_close('}');
            }
        }
        freeifaddrs(list);
    }
    json_close(']');
}

static void json_machine(const ddl_context *c) {
    json_integer("rank", c->rank);
    json_integer("ranks", c->world_size);
    json_integer("hosts", c->host_count);
    json_text("launcher", c->settings.launch.by);
    json_text("job", c->settings.job);
    json_integer("cores", c->cores);
    json_integer("ranks_on_this_host", c->local_ranks);
    json_integer("open_descriptors", ddl__open_fds());
    json_text("host", c->settings.host_id);
    json_text("secret", c->settings.secret != NULL ? c->settings.secret_source : NULL);
}

static void json_plugin(const ddl__plugin_record *p, const char *state) {
    json_open(NULL, '{');
    json_text("name", p->name);
    json_text("state", state);
    json_text("path", p->path);
    json_text("version", p->plugin != NULL ? p->plugin->version : NULL);
    json_text("reason", p->plugin == NULL ? p->reason : NULL);
    json_close('}');
}

static void json_plugins(const ddl_context *c) {
    json_open("plugins", '[');
    for (const ddl__plugin_record *p = c->loader.loaded; p != NULL; p = p->next) {
        json_plugin(p, "loaded");
    }
    for (const ddl__plugin_record *p = c->loader.refused; p != NULL; p = p->next) {
        json_plugin(p, p->declined ? "declined" : "refused");
    }
    json_close(']');
}

static void json_devices(const ddl_context *c) {
    json_open("devices", '[');
    for (int32_t i = 0; c->devices != NULL && i < c->devices->count; i++) {
        json_open(NULL, '{');
        json_integer("device", c->devices->list[i].number);
        json_text("plugin", c->devices->list[i].plugin->name);
        json_integer("index", c->devices->list[i].index);
        json_close('}');
    }
    json_close(']');
}

/* The ranks as this one sees them, and what was measured between them. */
static void json_ranks(const ddl_context *c) {
    json_open("links", '[');
    for (int32_t i = 0; i < c->world_size; i++) {
        const ddl__link *l = &c->links[i];
        bool own = l->endpoint == NULL;
        json_open(NULL, '{');
        json_integer("rank", i);
        json_integer("host", l->host);
        json_text("host_name", l->host_name);
        json_integer("pid", l->pid);
        json_text("transport", own ? NULL : l->endpoint->plugin->name);
        json_text("describe", !own && DDL_HAS(l->endpoint->table, describe) ? l->endpoint->table->describe(l->endpoint->self, i)
                                                                            : NULL);
        json_close('}');
    }
    json_close(']');
    json_open("measured", '[');
    for (int far_link = 0; far_link < (c->world_size == 1 ? 0 : c->host_count > 1 ? 2 : 1); far_link++) {
        const ddl__cost_model *m = &c->tuning.model;
        json_open(NULL, '{');
        json_text("between", far_link ? "hosts" : "ranks of a host");
        json_number("latency_seconds", m->latency_s[far_link]);
        json_number("bytes_per_second", m->s_per_byte[far_link] > 0 ? 1 / m->s_per_byte[far_link] : 0);
        json_close('}');
    }
    json_close(']');
}

static void json_algorithms(ddl_group *group) {
    json_open("group", '[');
    for (int32_t i = 0; i < group->size; i++) {
        json_integer(NULL, group->ranks[i]);
    }
    json_close(']');
    json_open("algorithms", '[');
    for (int64_t bytes = 8; group->size > 1 && bytes <= INFO_LARGEST; bytes *= 8) {
        for (size_t k = 0; k < DDL__COUNT_OF(info_kinds); k++) {
            char transport[INFO_TRANSPORT_BYTES];
            ddl_estimate_info info;
            if (!estimate(group, info_kinds[k], bytes, &info, transport)) {
                continue;
            }
            json_open(NULL, '{');
            json_text("operation", ddl__kind_name(info_kinds[k]));
            json_integer("bytes", bytes);
            json_text("algorithm", info.algorithm);
            json_text("transport", transport);
            json_number("seconds", info.seconds);
            json_close('}');
        }
    }
    json_close(']');
}

static void json_info(const ddl_context *c, ddl_group *group, const notes *said, const two_ranks *two) {
    json_open(NULL, '{');
    json_integer("version", 1);
    json_integer("ddl", ddl_version());
    json_integer("plugin_abi", DDL_PLUGIN_ABI);
    json_settings();
    json_machine(c);
    json_interfaces();
    json_plugins(c);
    json_devices(c);
    json_text("transports_found", said->text);
    json_ranks(c);
    json_algorithms(group);
    if (two != NULL) {
        json_two_ranks(two);
    }
    json_close('}');
}

#endif /* DDL_TOOLS_INFO_JSON_H */

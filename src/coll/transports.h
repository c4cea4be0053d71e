/* coll: the transports of a job, opened before it is joined: those that were asked for, else all that there are. A
 * plugin's transport is tried out first. */
#ifndef DDL_COLL_TRANSPORTS_H
#define DDL_COLL_TRANSPORTS_H

#include "../mesh/selftest.h"

enum { DDL__BLOB_TRANSPORTS = 4, DDL__ADDRESS_BYTES = 128 }; /* that a rank tells the others about */

static const ddl_plugin *ddl__transport_plugin(const ddl_context *c, const char *name, size_t length) {
    if (strlen("tcp") == length && memcmp(name, "tcp", length) == 0) {
        return &ddl__tcp_plugin;
    }
    for (const ddl__plugin_record *p = c->loader.loaded; p != NULL; p = p->next) {
        if (strlen(p->name) == length && memcmp(p->name, name, length) == 0 && p->plugin->transport != NULL) {
            return p->plugin;
        }
    }
    return NULL;
}

/* The self-test of a plugin's transport. *out_usable: false when it failed and nobody had asked for it. */
static ddl_status ddl__endpoint_try(ddl_context *c, const ddl_plugin *plugin, bool wanted,
                                    const ddl_transport_params *params, bool *out_usable) {
    char reason[DDL__PLUGIN_REASON_BYTES] = "its self-test failed: ";
    size_t head = strlen(reason);
    ddl__text why = {reason + head, sizeof reason - head, 0};
    if (plugin == &ddl__tcp_plugin || ddl__selftest(c, plugin->transport, params, &why)) {
        return DDL_OK;
    }
    bool needed = ddl__loader_reject(&c->loader, plugin, reason);
    if (wanted || needed) {
        return ddl__error(c, DDL_ERR_PLUGIN,
                          "ddl_init: plugin %s, which %s asks for, cannot be used: %s. Repair it or take it off the "
                          "list (DDL_SELF_TEST=0 uses it all the same)",
                          plugin->name, wanted ? "DDL_TRANSPORTS" : "DDL_PLUGINS", reason);
    }
    *out_usable = false;
    return DDL_OK;
}

/* detail: what follows the transport's name in DDL_TRANSPORTS, or NULL. */
static ddl_status ddl__endpoint_open(ddl_context *c, const ddl_plugin *plugin, bool wanted, const char *detail) {
    if (c->endpoint_count == DDL__BLOB_TRANSPORTS) {
        return DDL_OK;
    }
    ddl__endpoint *e = &c->endpoints[c->endpoint_count];
    ddl_transport_params params = {.size = sizeof params,
                                   .rank = c->rank,
                                   .world_size = c->world_size,
                                   .local_ranks = c->settings.launch.local_world,
                                   .cores = c->cores,
                                   .host_id = c->settings.host_id,
                                   .interface_name = c->settings.interface_name,
                                   .advertise = c->settings.advertise,
                                   .port_range = c->settings.port_range,
                                   .master_host = c->settings.place.host,
                                   .authenticated = c->settings.secret != NULL,
                                   .asked = wanted,
                                   .detail = detail,
                                   .device = c->devices != NULL && c->devices->count > 0
                                                 ? c->devices->list[0].plugin->name
                                                 : NULL,
                                   .core_set = c->settings.core_set,
                                   .local_rank = c->settings.launch.local_rank};
    size_t bytes = DDL__ADDRESS_BYTES;
    bool usable = true;
    DDL__TRY(ddl__endpoint_try(c, plugin, wanted, &params, &usable));
    if (!usable) {
        return DDL_OK;
    }
    e->plugin = plugin;
    e->table = plugin->transport;
    e->host = ddl__host_table(c);
    c->error.text[0] = 0;
    c->opening = wanted;
    ddl_status status = e->table->open(&e->host, &params, &e->self);
    if (status == DDL_OK) {
        status = e->table->address(e->self, e->address, &bytes);
        if (status < 0) {
            e->table->close(e->self);
        }
    }
    if (status == DDL_OK) {
        ddl__opening_warned(c);
    }
    c->opening = false;
    if (status < 0 && !wanted) {
        ddl__log(&c->base, DDL_LOG_DEBUG, "transport %s cannot be used: %s", plugin->name, ddl_status_text(status));
        return DDL_OK;
    }
    if (status < 0) {
        char why[400];
        snprintf(why, sizeof why, "%.399s", c->error.text[0] != 0 ? c->error.text : ddl_status_text(status));
        return ddl__error(c, status == DDL_ERR_NOMEM || status == DDL_ERR_CONFIG ? status : DDL_ERR_SYSTEM,
                          "ddl_init: transport %s cannot be opened: %s", plugin->name, why);
    }
    e->address_bytes = (uint32_t)bytes;
    c->endpoint_count++;
    return DDL_OK;
}

/* Beside transports that do not notice the end of a host, TCP watches. Without a secret there is one host. */
static ddl_status ddl__watch_open(ddl_context *c) {
    bool blind = false, there = false;
    for (int32_t i = 0; i < c->endpoint_count; i++) {
        blind = blind || (c->endpoints[i].table->flags & DDL_TRANSPORT_BLIND) != 0;
        there = there || c->endpoints[i].plugin == &ddl__tcp_plugin;
    }
    int32_t before = c->endpoint_count;
    if (!blind || there || c->settings.secret == NULL) {
        return DDL_OK;
    }
    DDL__TRY(ddl__endpoint_open(c, &ddl__tcp_plugin, false, NULL));
    c->endpoints[before].only_watches = c->endpoint_count > before;
    return DDL_OK;
}

/* What DDL_TRANSPORTS names is there, also where one rank needs none. */
static ddl_status ddl__transports_check(ddl_context *c) {
    const char *list = c->settings.transports;
    for (const char *at = list != NULL ? list : ""; *at != 0;) {
        size_t length = strcspn(at, ","), name = DDL__MIN(strcspn(at, ":"), length);
        if (ddl__transport_plugin(c, at, name) == NULL) {
            return ddl__error(
                c, DDL_ERR_PLUGIN,
                "ddl_init: transport \"%.*s\" of DDL_TRANSPORTS is not loaded; built in is "
                "tcp, others are plugins (DDL_PLUGINS, DDL_PLUGIN_PATH; DDL_LOG=debug tells where they were "
                "looked for)",
                (int)DDL__MIN(name, 40u), at);
        }
        at += length + (at[length] == ',');
    }
    return DDL_OK;
}

/* Opens the transports that were asked for, in that order (ddl__transports_check has seen them); else all that there
 * are. */
static ddl_status ddl__endpoints_open(ddl_context *c) {
    const char *list = c->settings.transports;
    if (list == NULL) {
        for (const ddl__plugin_record *p = c->loader.loaded, *next; p != NULL; p = next) {
            const ddl_transport *t = p->plugin->transport;
            next = p->next; /* one that fails its self-test leaves the list */
            if (t != NULL && (t->flags & DDL_TRANSPORT_ON_REQUEST) == 0) {
                DDL__TRY(ddl__endpoint_open(c, p->plugin, false, NULL));
            }
        }
        return ddl__endpoint_open(c, &ddl__tcp_plugin, true, NULL);
    }
    for (const char *at = list; *at != 0;) {
        size_t length = strcspn(at, ","), name = DDL__MIN(strcspn(at, ":"), length);
        char detail[64];
        snprintf(detail, sizeof detail, "%.*s", (int)DDL__MIN(length - name, sizeof detail), at + name);
        const ddl_plugin *plugin = ddl__transport_plugin(c, at, name);
        DDL__TRY(ddl__endpoint_open(c, plugin, true, detail[0] != 0 && detail[1] != 0 ? detail + 1 : NULL));
        at += length + (at[length] == ',');
    }
    return ddl__watch_open(c);
}

#endif /* DDL_COLL_TRANSPORTS_H */

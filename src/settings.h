/* settings: ddl_config made whole with the environment, once, at the start of ddl_init. What comes after asks this
 * struct and not the environment. It must not open a socket, and it never changes the environment. */
#ifndef DDL_SETTINGS_H
#define DDL_SETTINGS_H

#include "settings/launch.h"
#include "settings/machine.h"
#include "settings/secret.h"
#include "settings/unknown.h"

typedef struct ddl__settings {
    ddl__launch launch;       /* rank, world, local_rank, local_world */
    int ended_fd;             /* ddlrun's notes: see ddl__launch_ended; -1: there are none */
    ddl__meeting_place place; /* where the ranks meet */
    ddl_exchange_fn exchange;
    void *exchange_user;
    const uint8_t *secret; /* NULL: the job has none */
    size_t secret_bytes;
    const char *secret_source; /* for messages: "DDL_SECRET_FILE" */
    char *job;                 /* NULL: not told */
    uint64_t job_id;           /* its hash; 0 without one */
    char *interface_name, *advertise, *transports, *plugins, *plugin_path, *algorithm, *tune_cache; /* NULL: not told */
    char *port_range, *trace; /* trace: the file of the timeline */
    int32_t port_first, port_last; /* 0: any */
    int64_t timeout_ms, stall_ms;  /* -1: none */
    int64_t init_timeout_ms;
    int64_t slow, slow_runs; /* times the estimate, 0: never; so often in a row */
    bool slow_warns;         /* somebody set it */
    int64_t trace_events; /* of each rank, at most */
    int64_t restarted; /* how often this rank was started again */
    bool progress_thread, deterministic, check_payload, self_test, mac, spread, trace_summary, trace_steps;
    int32_t cores;
    uint64_t core_set; /* see ddl__cores */
    char host_id[128];
} ddl__settings;

/* Frees what the settings hold; the secret is wiped first. All zero afterwards. */
static void ddl__settings_free(ddl__base *base, ddl__settings *s) {
    char **texts[] = {&s->place.host, &s->place.folder, &s->job,       &s->interface_name,
                      &s->advertise,  &s->transports,   &s->plugins,   &s->plugin_path,
                      &s->algorithm,  &s->tune_cache,   &s->port_range, &s->trace};
    for (size_t i = 0; i < DDL__COUNT_OF(texts); i++) {
        ddl__free(base, *texts[i]);
    }
    ddl__secret secret = {(uint8_t *)s->secret, s->secret_bytes, NULL};
    ddl__secret_free(base, &secret);
    memset(s, 0, sizeof *s);
}

/* What a plugin may ask for: the value of DDL_<name>, or NULL. The secret is none of a plugin's business. */
static const char *ddl__plugin_setting(const char *name) {
    char full[64];
    int n = snprintf(full, sizeof full, "DDL_%s", name);
    return n <= 0 || (size_t)n >= sizeof full || strncmp(name, "SECRET", 6) == 0 ? NULL : ddl__env(full);
}

static ddl_status ddl__settings_base(const ddl_config *config, ddl__base *base, ddl__sentence *why) {
    const ddl_allocator *a = &config->allocator;
    if ((a->alloc == NULL) != (a->free == NULL)) {
        return ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: allocator of ddl_config has %s without %s; give both or none",
                         a->alloc != NULL ? "alloc" : "free", a->alloc != NULL ? "free" : "alloc");
    }
    base->allocator = *a;
    base->log = config->log;
    base->log_user = config->log_user;
    base->rank = -1;
    return ddl__parse_log_level(config->log_level, &base->log_level, why);
}

/* Jobs that share a host, port or folder are told apart by a hash of the job's name. */
static ddl_status ddl__settings_job(const ddl_config *config, ddl__base *base, ddl__settings *out, ddl__sentence *why) {
    const char *job = config->job != NULL && config->job[0] != 0 ? config->job : ddl__setting_env("DDL_JOB");
    char launched[512];
    if (job == NULL && ddl__launch_job(&out->launch, launched, sizeof launched)) {
        job = launched;
    }
    if (job == NULL) {
        return DDL_OK;
    }
    out->job_id = ddl__mix_bytes(0, job, strlen(job));
    out->job = ddl__copy_string(base, job);
    return out->job != NULL ? DDL_OK : ddl__fail(why, DDL_ERR_NOMEM, "ddl_init: no memory for the job's name");
}

static ddl_status ddl__settings_check(ddl__settings *out, ddl__sentence *why) {
    const char *text = ddl__setting_env("DDL_CHECK");
    int64_t self_test = 1;
    DDL__TRY(ddl__env_int("DDL_SELF_TEST", 0, 1, &self_test, why));
    DDL__TRY(ddl__pick_switch(0, "", "DDL_MAC", &out->mac, why));
    out->self_test = self_test == 1;
    out->slow = 20;
    out->slow_runs = 1;
    out->slow_warns = ddl__setting_env("DDL_SLOW") != NULL;
    DDL__TRY(ddl__env_int("DDL_SLOW", 0, 1000000, &out->slow, why));
    DDL__TRY(ddl__env_int("DDL_SLOW_RUNS", 1, 1000000, &out->slow_runs, why));
    if (text != NULL && strcmp(text, "payload") != 0) {
        return ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: DDL_CHECK is \"%.60s\"; payload is possible", text);
    }
    out->check_payload = text != NULL;
    return DDL_OK;
}

static ddl_status ddl__settings_texts(const ddl_config *c, ddl__base *base, ddl__settings *out, ddl__sentence *why) {
    DDL__TRY(ddl__pick_text(base, c->interface_name, "DDL_INTERFACE", &out->interface_name, why));
    DDL__TRY(ddl__pick_text(base, c->advertise, "DDL_ADVERTISE", &out->advertise, why));
    DDL__TRY(ddl__pick_text(base, c->port_range, "DDL_PORT_RANGE", &out->port_range, why));
    DDL__TRY(ddl__pick_text(base, c->transports, "DDL_TRANSPORTS", &out->transports, why));
    DDL__TRY(ddl__pick_text(base, c->plugins, "DDL_PLUGINS", &out->plugins, why));
    DDL__TRY(ddl__pick_text(base, NULL, "DDL_PLUGIN_PATH", &out->plugin_path, why));
    DDL__TRY(ddl__pick_text(base, c->algorithm, "DDL_ALGO", &out->algorithm, why));
    DDL__TRY(ddl__pick_text(base, NULL, "DDL_TUNE_CACHE", &out->tune_cache, why));
    DDL__TRY(ddl__pick_text(base, NULL, "DDL_TRACE", &out->trace, why));
    return out->port_range == NULL ? DDL_OK
                                   : ddl__parse_port_range(out->port_range, &out->port_first, &out->port_last, why);
}

static ddl_status ddl__settings_numbers(const ddl_config *c, ddl__settings *out, ddl__sentence *why) {
    out->timeout_ms = 300000;
    out->init_timeout_ms = 60000;
    out->stall_ms = 10000;
    out->trace_events = 65536;
    DDL__TRY(ddl__env_int("DDL_RESTARTED", 0, 1000000, &out->restarted, why));
    DDL__TRY(ddl__pick_int(c->timeout_ms, "timeout_ms", "DDL_TIMEOUT_MS", true, DDL__MS_MAX, &out->timeout_ms, why));
    DDL__TRY(ddl__pick_int(c->init_timeout_ms, "init_timeout_ms", "DDL_INIT_TIMEOUT_MS", false, DDL__MS_MAX,
                           &out->init_timeout_ms, why));
    DDL__TRY(ddl__pick_int(c->stall_ms, "stall_ms", "DDL_STALL_MS", true, DDL__MS_MAX, &out->stall_ms, why));
    DDL__TRY(
        ddl__pick_switch(c->progress_thread, "progress_thread", "DDL_PROGRESS_THREAD", &out->progress_thread, why));
    DDL__TRY(ddl__pick_switch(c->deterministic, "deterministic", "DDL_DETERMINISTIC", &out->deterministic, why));
    out->spread = true;
    DDL__TRY(ddl__pick_switch(0, "", "DDL_SPREAD", &out->spread, why));
    DDL__TRY(ddl__pick_int(0, "", "DDL_TRACE_EVENTS", false, 1 << 24, &out->trace_events, why));
    DDL__TRY(ddl__pick_switch(0, "", "DDL_TRACE_SUMMARY", &out->trace_summary, why));
    DDL__TRY(ddl__pick_switch(0, "", "DDL_TRACE_STEPS", &out->trace_steps, why));
    return ddl__settings_check(out, why);
}

static ddl_status ddl__settings_fill(const ddl_config *config, ddl__base *base, ddl__settings *out,
                                     ddl__sentence *why) {
    DDL__TRY(ddl__settings_base(config, base, why));
    DDL__TRY(ddl__launch_find(config, &out->launch, why));
    base->rank = out->launch.rank;
    ddl__launch_warn(base, &out->launch);
    DDL__TRY(ddl__ended_find(&out->launch, &out->ended_fd, why));
    DDL__TRY(ddl__settings_job(config, base, out, why));
    DDL__TRY(ddl__place_find(base, config, &out->launch, out->job != NULL, &out->place, why));
    if (out->launch.world == 1) {
        out->place.kind = DDL__MEET_ALONE;
    }
    DDL__TRY(ddl__settings_texts(config, base, out, why));
    DDL__TRY(ddl__settings_numbers(config, out, why));
    ddl__secret secret = {NULL, 0, NULL};
    DDL__TRY(ddl__secret_find(base, config, &secret, why));
    out->secret = secret.bytes;
    out->secret_bytes = secret.count;
    out->secret_source = secret.source;
    if (out->mac && out->secret == NULL && out->launch.world > 1) {
        return ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: DDL_MAC=1 makes its keys from the job secret, and there is "
                         "none; set DDL_SECRET_FILE, or start with ddlrun");
    }
    out->exchange = config->exchange;
    out->exchange_user = config->exchange_user;
    out->cores = ddl__cores(&out->core_set);
    DDL__TRY(ddl__env_copy("DDL_HOST_ID", out->host_id, sizeof out->host_id, why));
    if (out->host_id[0] == 0) {
        ddl__host_id(out->host_id, sizeof out->host_id);
    }
    return DDL_OK;
}

/* Fills *base (allocator, log, rank) and *out. config may be NULL. Reads the environment and opens the secret's file;
 * changes nothing. On error *out is empty. Errors: DDL_ERR_CONFIG, DDL_ERR_NOMEM. */
static ddl_status ddl__settings_read(const ddl_config *config, ddl__base *base, ddl__settings *out,
                                     ddl__sentence *why) {
    static const ddl_config nothing;
    memset(out, 0, sizeof *out);
    ddl_status status = ddl__settings_fill(config != NULL ? config : &nothing, base, out, why);
    if (status != DDL_OK) {
        ddl__settings_free(base, out);
    }
    return status;
}

#endif /* DDL_SETTINGS_H */

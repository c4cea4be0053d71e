/* table: every DDL_ variable that the core reads, with its default and a line of help, and the parsing of values.
 * A variable that is not in the table is not read, so that the list cannot go stale. */
#ifndef DDL_SETTINGS_TABLE_H
#define DDL_SETTINGS_TABLE_H

#include "../base.h"

typedef struct ddl__setting_row {
    const char *name, *standard, *help;
} ddl__setting_row;

static const ddl__setting_row ddl__setting_table[] = {
    {"DDL_LOG", "warn", "what to log: none, warn, info or debug"},
    {"DDL_SECRET_FD", "", "a descriptor to read the job secret from; ddlrun sets it"},
    {"DDL_SECRET_FILE", "", "a file with the job secret (at least 16 bytes), readable by its owner alone"},
    {"DDL_SECRET", "", "the job secret itself, at least 16 bytes"},
    {"DDL_JOB", "", "a name that tells jobs on one host, port or folder apart"},
    {"DDL_ENDED_FD", "", "a descriptor to read from which ranks have ended; ddlrun sets it"},
    {"DDL_RENDEZVOUS", "", "tcp://host:port or file:///shared/folder, instead of MASTER_ADDR and MASTER_PORT"},
    {"DDL_PMIX_LIBRARY", "libpmix.so.2", "the library by which ranks meet that a PMIx launcher started"},
    {"DDL_RESTARTED", "0", "more than 0: ddl_init joins a running job, as ddl_join does; ddlrun --restart sets it"},
    {"DDL_INTERFACE", "", "the network interface to bind and to advertise"},
    {"DDL_ADVERTISE", "", "an address that peers reach this rank at, when it is not the bound one"},
    {"DDL_PORT_RANGE", "", "ports that ranks listen on, as 20000-20100; any free port without it"},
    {"DDL_TRANSPORTS", "", "transports in order of preference, as shm,tcp; all that load without it"},
    {"DDL_PLUGINS", "", "plugins that must load: names or absolute paths, separated by commas"},
    {"DDL_PLUGIN_PATH", "", "folders to find plugins in, separated by colons"},
    {"DDL_SELF_TEST", "1", "0: transports of plugins are used without having been tried out"},
    {"DDL_ALGO", "auto", "algorithms, as ring or all_reduce=ring,broadcast=tree"},
    {"DDL_TUNE_CACHE", "", "a file that keeps the measured latency and bandwidth for later runs of the same shape"},
    {"DDL_TRACE", "", "a file for the timeline of the job, for Perfetto or chrome://tracing"},
    {"DDL_TRACE_EVENTS", "65536", "so many events of each rank are kept, the newest"},
    {"DDL_TRACE_SUMMARY", "0", "1: with DDL_TRACE, rank 0 says at the end what communication cost"},
    {"DDL_TRACE_STEPS", "0", "1: with DDL_TRACE, also the steps of algorithms; many, and small operations are slower"},
    {"DDL_TIMEOUT_MS", "300000", "deadline of an operation; -1: none"},
    {"DDL_INIT_TIMEOUT_MS", "60000", "deadline of ddl_init"},
    {"DDL_STALL_MS", "10000", "a wait this long is reported; -1: never"},
    {"DDL_SLOW", "20", "a collective is reported that takes so many times its estimate, once a kind and size; 0: off"},
    {"DDL_SLOW_RUNS", "1", "only when the same call was slow so often in a row"},
    {"DDL_PROGRESS_THREAD", "0", "1: operations progress on a thread of their own"},
    {"DDL_DETERMINISTIC", "0", "1: reduce in rank order whatever the algorithm and transport"},
    {"DDL_SPREAD", "1", "0: ranks that wait on one core stay there while another core is free"},
    {"DDL_HOST_ID", "", "ranks with equal text count as on one host; for tests"},
    {"DDL_MAC", "0", "1: frames carry a keyed checksum, for networks where others can change packets"},
    {"DDL_CHECK", "", "payload: checksums of all data, and of headers everywhere"},
};

/* The value of a variable, NULL when it is unset or empty (`RANK= ./train` unsets it). For launchers' variables. */
static const char *ddl__env(const char *name) {
    const char *value = getenv(name);
    return value != NULL && value[0] != 0 ? value : NULL;
}

/* The same for a row of the table; NULL when there is no such row. */
static const char *ddl__setting_env(const char *name) {
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__setting_table); i++) {
        if (strcmp(ddl__setting_table[i].name, name) == 0) {
            return ddl__env(name);
        }
    }
    return NULL;
}

/* The whole text is a decimal number from min to max. strtoll alone would take " +7x". */
static bool ddl__parse_int(const char *text, int64_t min, int64_t max, int64_t *out) {
    if (!((text[0] >= '0' && text[0] <= '9') || (text[0] == '-' && text[1] >= '0' && text[1] <= '9'))) {
        return false;
    }
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (*end != 0 || errno == ERANGE || value < min || value > max) {
        return false;
    }
    *out = value;
    return true;
}

/* A number of the environment. *out stays as it is when the variable is unset. */
static ddl_status ddl__env_int(const char *name, int64_t min, int64_t max, int64_t *out, ddl__sentence *why) {
    const char *text = ddl__env(name);
    if (text == NULL || ddl__parse_int(text, min, max, out)) {
        return DDL_OK;
    }
    return ddl__fail(why, DDL_ERR_CONFIG,
                     "ddl_init: %s is \"%.60s\", which is not a whole number from %lld to %lld. Correct or unset it",
                     name, text, (long long)min, (long long)max);
}

#define DDL__MS_MAX (1000ll * 3600 * 24 * 366) /* a year: deadlines never overflow */

/* 1 to max; and -1, where none is possible. */
static bool ddl__in_range(int64_t value, bool none, int64_t max) {
    return value <= max && (value > 0 || (value == -1 && none));
}

/* A number that the config gives (not 0), else the environment, else *out as it is. none: -1 is allowed. */
static ddl_status ddl__pick_int(int64_t given, const char *member, const char *name, bool none, int64_t max,
                                int64_t *out, ddl__sentence *why) {
    int64_t value = given;
    if (given == 0) {
        const char *text = ddl__setting_env(name);
        if (text == NULL) {
            return DDL_OK;
        }
        if (!ddl__parse_int(text, -1, max, &value) || !ddl__in_range(value, none, max)) {
            return ddl__fail(
                why, DDL_ERR_CONFIG,
                "ddl_init: %s is \"%.60s\", which is not a whole number from 1 to %lld%s. Correct or unset it", name,
                text, (long long)max, none ? ", or -1 for none" : "");
        }
    }
    if (!ddl__in_range(value, none, max)) {
        return ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: %s of ddl_config is %lld; 1 to %lld%s is possible, 0 takes %s",
                         member, (long long)value, (long long)max, none ? " or -1 for none" : "", name);
    }
    *out = value;
    return DDL_OK;
}

/* 0 or 1: on when the config says so, else by the environment, else *out as it is. */
static ddl_status ddl__pick_switch(int32_t given, const char *member, const char *name, bool *out, ddl__sentence *why) {
    const char *text = ddl__setting_env(name);
    int64_t value = given == 1 || *out;
    if (given != 0 && given != 1) {
        return ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: %s of ddl_config is %d; 0 or 1 is possible", member, given);
    }
    if (given == 0 && text != NULL && !ddl__parse_int(text, 0, 1, &value)) {
        return ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: %s is \"%.60s\"; 0 or 1 is possible", name, text);
    }
    *out = value == 1;
    return DDL_OK;
}

/* A text that the config gives, else the environment: copied into *out, NULL when neither has it. */
static ddl_status ddl__pick_text(ddl__base *base, const char *given, const char *name, char **out, ddl__sentence *why) {
    const char *text = given != NULL && given[0] != 0 ? given : ddl__setting_env(name);
    if (text == NULL) {
        return DDL_OK;
    }
    *out = ddl__copy_string(base, text);
    return *out != NULL ? DDL_OK : ddl__fail(why, DDL_ERR_NOMEM, "ddl_init: no memory for the value of %s", name);
}

static ddl_status ddl__parse_log_level(ddl_log_level given, ddl_log_level *out, ddl__sentence *why) {
    static const char *const names[] = {"none", "warn", "info", "debug"};
    const char *text = ddl__setting_env("DDL_LOG");
    *out = given != DDL_LOG_NONE ? given : DDL_LOG_WARN;
    if (given != DDL_LOG_NONE || text == NULL) {
        return (int)given >= 0 && given <= DDL_LOG_DEBUG
                   ? DDL_OK
                   : ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: log_level of ddl_config is %d; 0 to 3 is possible",
                               (int)given);
    }
    for (int level = 0; level <= DDL_LOG_DEBUG; level++) {
        if (strcmp(text, names[level]) == 0 || (text[0] == '0' + level && text[1] == 0)) {
            *out = (ddl_log_level)level;
            return DDL_OK;
        }
    }
    return ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: DDL_LOG is \"%.60s\"; none, warn, info and debug are possible",
                     text);
}

/* A text that has to fit its place whole: two that differ only behind its end must not count as equal. */
static ddl_status ddl__env_copy(const char *name, char *out, size_t cap, ddl__sentence *why) {
    const char *text = ddl__setting_env(name);
    if (text != NULL && strlen(text) >= cap) {
        return ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: %s has %zu characters; at most %zu are possible", name,
                         strlen(text), cap - 1);
    }
    snprintf(out, cap, "%s", text != NULL ? text : "");
    return DDL_OK;
}

/* "20000-20100" or "20000". */
static ddl_status ddl__parse_port_range(const char *text, int32_t *out_first, int32_t *out_last, ddl__sentence *why) {
    char low[8] = "", high[8] = "";
    int64_t first = 0, last = 0;
    int used = 0, fields = sscanf(text, "%7[0-9]-%7[0-9]%n", low, high, &used);
    bool whole = fields == 2 ? text[used] == 0 : strlen(low) == strlen(text);
    if (!whole || !ddl__parse_int(low, 1, 65535, &first) ||
        !ddl__parse_int(fields == 2 ? high : low, first, 65535, &last)) {
        return ddl__fail(
            why, DDL_ERR_CONFIG,
            "ddl_init: the port range is \"%.60s\"; two ports from 1 to 65535 are possible, as 20000-20100", text);
    }
    *out_first = (int32_t)first;
    *out_last = (int32_t)last;
    return DDL_OK;
}

#endif /* DDL_SETTINGS_TABLE_H */

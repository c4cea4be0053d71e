/* loader: find, check and open plugins; keep a list of what was loaded and of what was refused and why.
 * It must not know which transport reaches whom, nor read settings: it is told what was asked for.
 *
 * A plugin NAME is looked for in this order, and the first that can be used is taken:
 *     1. an absolute path in a list of what must load (ddl_config.plugins, then DDL_PLUGINS, then ...)
 *     2. the plugins folded into this program (amalgamate.py --with)
 *     3. the folders of DDL_PLUGIN_PATH, in their order
 *     4. the folder of the executable
 *     5. DDL_PLUGIN_DIR, given when ddl was compiled
 * Never the current folder, never a relative path. What must load is looked for by name; besides, everything that lies
 * in these folders is tried, unless a list contains the word none. Nothing that was opened is ever closed: a plugin may
 * have started threads or registered destructors. Compiled with DDL_NO_PLUGINS, only 2 is left. */
#ifndef DDL_LOADER_H
#define DDL_LOADER_H

#include "loader/check.h"

#include <dirent.h>
#include <dlfcn.h>

#define DDL__PLUGINS_PER_FOLDER 64

/* A plugin that is part of this program. */
typedef struct ddl__plugin_static {
    const char *name;
    ddl_plugin_fn entry;
} ddl__plugin_static;

/* A list of names and absolute paths that must load, separated by commas, and how to call it in an error. */
typedef struct ddl__plugin_asked {
    const char *list; /* or NULL */
    const char *source;
} ddl__plugin_asked;

typedef struct ddl__loader_params {
    const ddl_host *host;           /* for the entry functions: alloc, free, log, setting, now_ns */
    const ddl__plugin_asked *asked; /* in order of preference */
    size_t asked_count;
    const char *const *built_in; /* names in the lists that need no plugin ("tcp"); NULL at the end; may be NULL */
    const char *path;            /* DDL_PLUGIN_PATH: absolute folders, separated by colons; or NULL */
    const char *libdir;          /* ddl__plugin_libdir(); a test gives its own; or NULL */
    const ddl__plugin_static *statics; /* ddl__plugin_statics(); ends with a NULL name; may be NULL */
} ddl__loader_params;

/* One line of ddl-info. Loaded: plugin is set. Refused: reason is. */
typedef struct ddl__plugin_record {
    struct ddl__plugin_record *next;
    const ddl_plugin *plugin;
    void *handle;     /* of dlopen; NULL when folded in or refused */
    const char *path; /* "(built in: NAME)" when folded in */
    const char *reason;
    bool needed;   /* a list of what must load led to it */
    bool declined; /* refused is it by itself: it has nothing to do here */
    char name[DDL__PLUGIN_NAME_BYTES];
} ddl__plugin_record;

typedef struct ddl__loader {
    ddl__base *base;
    const ddl__loader_params *params; /* while it opens */
    ddl__plugin_owners owners;
    ddl__plugin_record *loaded;  /* in the order of search */
    ddl__plugin_record *refused; /* declined ones too */
    bool out_of_memory;
} ddl__loader;

/* What became of one candidate. */
typedef struct ddl__plugin_try {
    char name[DDL__PLUGIN_NAME_BYTES];
    const char *path;
    const ddl_plugin *plugin;
    void *handle;
    char reason[DDL__PLUGIN_REASON_BYTES];
    ddl__text text; /* writes reason */
} ddl__plugin_try;

/* The registry that `amalgamate.py --with` fills. */
static const ddl__plugin_static *ddl__plugin_statics(void) {
    static const ddl__plugin_static statics[] = {
#ifdef DDL__STATIC_PLUGINS
#define DDL__STATIC_PLUGIN(plugin) {#plugin, ddl_plugin_##plugin##_v1},
        DDL__STATIC_PLUGINS(DDL__STATIC_PLUGIN)
#undef DDL__STATIC_PLUGIN
#endif
        {NULL, NULL}};
    return statics;
}

static const char *ddl__plugin_libdir(void) {
#ifdef DDL_PLUGIN_DIR
    return DDL_PLUGIN_DIR;
#else
    return NULL;
#endif
}

/* >>plugin_lists */

/* The loaded plugin of that name, or NULL. A handful of plugins at most: a list is all that is needed. */
static const ddl__plugin_record *ddl__loader_find(const ddl__loader *loader, const char *name) {
    const ddl__plugin_record *record = loader->loaded;
    while (record != NULL && strcmp(record->name, name) != 0) {
        record = record->next;
    }
    return record;
}

/* By path, not by name: another file of the same name may well be usable. */
static const ddl__plugin_record *ddl__loader_refused(const ddl__loader *loader, const char *path) {
    const ddl__plugin_record *record = loader->refused;
    while (record != NULL && strcmp(record->path, path) != 0) {
        record = record->next;
    }
    return record;
}

/* One block for a record and its strings, so that there is one thing to free and one that can fail. */
static ddl__plugin_record *ddl__plugin_append(ddl__loader *loader, ddl__plugin_record **list,
                                              const ddl__plugin_try *candidate) {
    size_t path_bytes = strlen(candidate->path) + 1, reason_bytes = strlen(candidate->reason) + 1;
    ddl__plugin_record *record = ddl__alloc(loader->base, sizeof *record + path_bytes + reason_bytes);
    if (record == NULL) {
        loader->out_of_memory = true;
        return NULL;
    }
    char *strings = (char *)(record + 1);
    record->path = memcpy(strings, candidate->path, path_bytes);
    record->reason = memcpy(strings + path_bytes, candidate->reason, reason_bytes);
    memcpy(record->name, candidate->name, sizeof record->name);
    record->plugin = candidate->plugin;
    record->handle = candidate->handle;
    while (*list != NULL) {
        list = &(*list)->next;
    }
    *list = record;
    return record;
}

/* >>plugin_entry */

/* A host for one call of an entry function: the last warning is held back. When the plugin then declines, the warning
 * is the reason for it, and no news to a user who never asked for this plugin; else it is logged as it was meant. */
typedef struct ddl__plugin_entry_host {
    ddl_host host; /* first, so that the plugin's pointer to it is one to this */
    const ddl_host *real;
    char warning[DDL__PLUGIN_REASON_BYTES - 32]; /* the rest is for our words before it */
} ddl__plugin_entry_host;

static void ddl__plugin_entry_log(const ddl_host *host, ddl_log_level level, const char *line) {
    ddl__plugin_entry_host *entry = (ddl__plugin_entry_host *)(uintptr_t)host;
    if (level != DDL_LOG_WARN) {
        entry->real->log(entry->real, level, line);
        return;
    }
    if (entry->warning[0] != '\0') {
        entry->real->log(entry->real, DDL_LOG_INFO, entry->warning);
    }
    snprintf(entry->warning, sizeof entry->warning, "%s", line);
}

static void *ddl__plugin_entry_alloc(const ddl_host *host, size_t bytes) {
    const ddl_host *real = ((const ddl__plugin_entry_host *)host)->real;
    return real->alloc(real, bytes);
}

static void ddl__plugin_entry_free(const ddl_host *host, void *memory) {
    const ddl_host *real = ((const ddl__plugin_entry_host *)host)->real;
    real->free(real, memory);
}

static const char *ddl__plugin_entry_setting(const ddl_host *host, const char *name) {
    const ddl_host *real = ((const ddl__plugin_entry_host *)host)->real;
    return real->setting(real, name);
}

static uint64_t ddl__plugin_entry_now_ns(const ddl_host *host) {
    const ddl_host *real = ((const ddl__plugin_entry_host *)host)->real;
    return real->now_ns(real);
}

/* Calls the entry. There is no endpoint yet, so that all of the host that needs one is NULL. */
static ddl__plugin_verdict ddl__plugin_call(const ddl__loader *loader, ddl_plugin_fn entry, ddl__plugin_try *out) {
    ddl__plugin_entry_host host = {.real = loader->params->host};
    host.host.size = sizeof host.host;
    host.host.abi = DDL_PLUGIN_ABI;
    host.host.alloc = ddl__plugin_entry_alloc;
    host.host.free = ddl__plugin_entry_free;
    host.host.log = ddl__plugin_entry_log;
    host.host.setting = ddl__plugin_entry_setting;
    host.host.now_ns = ddl__plugin_entry_now_ns;
    const ddl_plugin *plugin = entry(&host.host);
    if (plugin == NULL) {
        ddl__text_add(&out->text, "it declines: %s", host.warning[0] != '\0' ? host.warning : "it gave no reason");
        return DDL__PLUGIN_DECLINED;
    }
    if (host.warning[0] != '\0') {
        host.real->log(host.real, DDL_LOG_WARN, host.warning);
    }
    ddl__plugin_verdict verdict = ddl__plugin_check_table(plugin, out->name, &out->text);
    out->plugin = verdict == DDL__PLUGIN_USABLE ? plugin : NULL;
    return verdict;
}

/* >>plugin_open */

#ifndef DDL_NO_PLUGINS
/* Weak, so that a program links without -ldl where glibc is older than 2.34, and statically: there dlopen is NULL. */
static void *ddl__dlopen(const char *path, int flags) __attribute__((weakref("dlopen")));
static void *ddl__dlsym(void *handle, const char *name) __attribute__((weakref("dlsym")));
static char *ddl__dlerror(void) __attribute__((weakref("dlerror")));

/* Here the plugin's code runs for the first time: its constructors inside dlopen, then its entry. RTLD_NOW finds what
 * is missing now and not in the middle of training; RTLD_LOCAL keeps the names of plugins out of each other's way.
 * A plugin that is refused after this point stays mapped, which is harmless. */
static ddl__plugin_verdict ddl__plugin_open_checked(const ddl__loader *loader, const char *real,
                                                    ddl__plugin_try *out) {
    if (ddl__dlopen == NULL || ddl__dlsym == NULL || ddl__dlerror == NULL) {
        return ddl__plugin_refuse(&out->text, "this program cannot open shared objects; link it with -ldl and without "
                                  "-static");
    }
    out->handle = ddl__dlopen(real, RTLD_NOW | RTLD_LOCAL);
    if (out->handle == NULL) {
        const char *why = ddl__dlerror();
        return ddl__plugin_refuse(&out->text, "dlopen: %s", why != NULL ? why : "no reason given");
    }
    char symbol[DDL__PLUGIN_NAME_BYTES + 16];
    snprintf(symbol, sizeof symbol, "ddl_plugin_%s_v1", out->name);
    void *address = ddl__dlsym(out->handle, symbol);
    if (address == NULL) {
        return ddl__plugin_refuse(&out->text, "it exports no %s", symbol);
    }
    ddl_plugin_fn entry;
    memcpy(&entry, &address, sizeof entry); /* ISO C has no cast between these two kinds of pointer; POSIX does */
    return ddl__plugin_call(loader, entry, out);
}

static ddl__plugin_verdict ddl__plugin_open(const ddl__loader *loader, ddl__plugin_try *out) {
    char real[PATH_MAX];
    if (out->path[0] != '/') {
        return ddl__plugin_refuse(&out->text, "its path is relative; only absolute paths are opened");
    }
    if (!ddl__plugin_name_of(out->path, out->name)) {
        return ddl__plugin_refuse(&out->text, "it is not named libddl-NAME.so with NAME of a-z, 0-9 and _");
    }
    ddl__plugin_verdict verdict = ddl__plugin_check_file(&loader->owners, out->path, real, &out->text);
    return verdict == DDL__PLUGIN_USABLE ? ddl__plugin_open_checked(loader, real, out) : verdict;
}
#else
static ddl__plugin_verdict ddl__plugin_open(const ddl__loader *loader, ddl__plugin_try *out) {
    (void)loader;
    return ddl__plugin_refuse(&out->text, "this program was built without plugins (DDL_NO_PLUGINS)");
}
#endif

/* Puts the outcome on its list and says it in the log. */
static void ddl__plugin_note(ddl__loader *loader, ddl__plugin_verdict verdict, const ddl__plugin_try *candidate) {
    const char *path = candidate->path, *reason = candidate->reason;
    switch (verdict) {
    case DDL__PLUGIN_USABLE:
        if (ddl__plugin_append(loader, &loader->loaded, candidate) != NULL) {
            const char *version = candidate->plugin->version;
            ddl__log(loader->base, DDL_LOG_DEBUG, "plugin %s %s: loaded from %s", candidate->name,
                     version != NULL ? version : "", path);
        }
        return;
    case DDL__PLUGIN_ABSENT:
        ddl__log(loader->base, DDL_LOG_DEBUG, "plugin %s: %s", path, reason);
        return;
    case DDL__PLUGIN_DECLINED:
        ddl__log(loader->base, DDL_LOG_DEBUG, "plugin %s: %s", path, reason);
        break;
    case DDL__PLUGIN_REFUSED:
        ddl__log(loader->base, DDL_LOG_WARN, "plugin %s is not used: %s", path, reason);
        break;
    }
    ddl__plugin_record *record = ddl__plugin_append(loader, &loader->refused, candidate);
    if (record != NULL) {
        record->declined = verdict == DDL__PLUGIN_DECLINED;
    }
}

/* Looks at a candidate whose path and, when folded in, name are set. What was refused before is not tried again: its
 * code would run twice, and its warning be read twice. */
static ddl__plugin_verdict ddl__plugin_judge(ddl__loader *loader, const ddl__plugin_static *folded,
                                             ddl__plugin_try *out) {
    const ddl__plugin_record *before = ddl__loader_refused(loader, out->path);
    if (before != NULL) {
        return ddl__plugin_refuse(&out->text, "%s", before->reason);
    }
    ddl__plugin_verdict verdict =
        folded != NULL ? ddl__plugin_call(loader, folded->entry, out) : ddl__plugin_open(loader, out);
    /* Two paths may lead to one plugin: what is loaded stays. */
    if (verdict != DDL__PLUGIN_USABLE || ddl__loader_find(loader, out->name) == NULL) {
        ddl__plugin_note(loader, verdict, out);
    }
    return verdict;
}

/* One candidate: a file or, with folded, a part of this program. `tried` collects what happened for the sentence of an
 * error; it may be NULL. */
static bool ddl__plugin_attempt(ddl__loader *loader, const char *path, const ddl__plugin_static *folded,
                                ddl__text *tried) {
    char built_in[DDL__PLUGIN_NAME_BYTES + 16];
    ddl__plugin_try candidate = {.path = path};
    candidate.text = (ddl__text){candidate.reason, sizeof candidate.reason, 0};
    if (folded != NULL) {
        snprintf(built_in, sizeof built_in, "(built in: %s)", folded->name);
        snprintf(candidate.name, sizeof candidate.name, "%s", folded->name);
        candidate.path = built_in;
    }
    ddl__plugin_verdict verdict = ddl__plugin_judge(loader, folded, &candidate);
    if (tried != NULL && verdict != DDL__PLUGIN_USABLE) {
        ddl__text_add(tried, "%s%s (%s)", tried->used > 0 ? ", " : "", candidate.path, candidate.reason);
    }
    return verdict == DDL__PLUGIN_USABLE && !loader->out_of_memory;
}

/* >>plugin_search */

/* Gives the folders of the search one by one: index counts up from 0; false after the last. Relative ones come out too,
 * so that whoever tries a file there says why it is refused. */
static bool ddl__plugin_folder(const ddl__loader_params *params, int index, char out_folder[PATH_MAX]) {
    const char *at = params->path != NULL ? params->path : "";
    for (;; at += *at == ':') {
        size_t bytes = strcspn(at, ":");
        if (bytes == 0 && *at == '\0') {
            break;
        }
        if (bytes > 0 && bytes < PATH_MAX && index-- == 0) {
            memcpy(out_folder, at, bytes);
            out_folder[bytes] = '\0';
            return true;
        }
        at += bytes;
    }
    if (index == 0) {
        ssize_t bytes = readlink("/proc/self/exe", out_folder, PATH_MAX - 1);
        out_folder[bytes > 0 ? bytes : 0] = '\0';
        char *slash = strrchr(out_folder, '/');
        if (slash != NULL) {
            slash[slash == out_folder ? 1 : 0] = '\0';
            return true;
        }
    }
    if (index <= 1 && params->libdir != NULL && params->libdir[0] != '\0') {
        /* Without an executable's folder (no /proc) this one is met twice, which is harmless. */
        ddl__text text = {out_folder, PATH_MAX, 0};
        ddl__text_add(&text, "%s", params->libdir);
        return true;
    }
    return false;
}

#define DDL__PLUGIN_PATH_BYTES (PATH_MAX + DDL__PLUGIN_NAME_BYTES + 16)

static void ddl__plugin_path(char out_path[DDL__PLUGIN_PATH_BYTES], const char *folder, const char *name) {
    ddl__text text = {out_path, DDL__PLUGIN_PATH_BYTES, 0};
    ddl__text_add(&text, "%s/libddl-%s.so", strcmp(folder, "/") == 0 ? "" : folder, name);
}

static const ddl__plugin_static *ddl__plugin_folded(const ddl__loader_params *params, const char *name) {
    const ddl__plugin_static *folded = params->statics;
    while (folded != NULL && folded->name != NULL && strcmp(folded->name, name) != 0) {
        folded++;
    }
    return folded != NULL && folded->name != NULL ? folded : NULL;
}

/* Looks for a plugin that was asked for by name, everywhere until one can be used. */
static bool ddl__loader_by_name(ddl__loader *loader, const char *name, ddl__text *tried) {
    const ddl__plugin_static *folded = ddl__plugin_folded(loader->params, name);
    if (folded != NULL && ddl__plugin_attempt(loader, NULL, folded, tried)) {
        return true;
    }
    char folder[PATH_MAX], path[DDL__PLUGIN_PATH_BYTES];
    for (int i = 0; i < INT_MAX && ddl__plugin_folder(loader->params, i, folder); i++) {
        ddl__plugin_path(path, folder, name);
        if (ddl__plugin_attempt(loader, path, NULL, tried)) {
            return true;
        }
    }
    return false;
}

/* The same lists name transports of the core ("tcp"): nothing to load for these. */
static bool ddl__plugin_is_built_in(const ddl__loader_params *params, const char *name) {
    const char *const *built_in = params->built_in;
    while (built_in != NULL && *built_in != NULL && strcmp(*built_in, name) != 0) {
        built_in++;
    }
    return built_in != NULL && *built_in != NULL;
}

/* One item of a list of what must load. */
static ddl_status ddl__loader_need(ddl__loader *loader, const char *item, const char *source,
                                   ddl__sentence *sentence) {
    char tried_text[DDL__SENTENCE_BYTES - 256];
    ddl__text tried = {tried_text, sizeof tried_text, 0};
    tried_text[0] = '\0';
    if (strchr(item, '/') != NULL) {
        if (ddl__plugin_attempt(loader, item, NULL, &tried)) {
            return DDL_OK;
        }
    } else if (!ddl__plugin_name_ok(item)) {
        return ddl__fail(sentence, DDL_ERR_PLUGIN, "\"%.60s\" of %s is neither the name of a plugin (a-z, 0-9, _) nor "
                         "an absolute path.", item, source);
    } else if (ddl__plugin_is_built_in(loader->params, item) || ddl__loader_find(loader, item) != NULL ||
               ddl__loader_by_name(loader, item, &tried)) {
        return DDL_OK;
    }
    if (loader->out_of_memory) {
        return ddl__fail(sentence, DDL_ERR_NOMEM, "No memory is left to load plugin %.200s.", item);
    }
    return ddl__fail(sentence, DDL_ERR_PLUGIN,
                     "Plugin %.200s, asked for by %s, cannot be used; tried: %s. Repair it or take it off the list.",
                     item, source, tried.used > 0 ? tried_text : "nothing, as there is no folder to search");
}

/* Walks a list: loads what it names and finds the word none. */
static ddl_status ddl__loader_asked(ddl__loader *loader, const ddl__plugin_asked *asked, bool *none,
                                    ddl__sentence *sentence) {
    const char *at = asked->list != NULL ? asked->list : "";
    char item[PATH_MAX];
    while (*at != '\0') {
        at += strspn(at, ", \t");
        size_t bytes = strcspn(at, ",");
        size_t kept = bytes;
        while (kept > 0 && (at[kept - 1] == ' ' || at[kept - 1] == '\t')) {
            kept--;
        }
        if (kept >= sizeof item) {
            return ddl__fail(sentence, DDL_ERR_PLUGIN, "An entry of %s is longer than a path can be.", asked->source);
        }
        memcpy(item, at, kept);
        item[kept] = '\0';
        at += bytes;
        if (strcmp(item, "none") == 0) {
            *none = true;
        } else if (kept > 0) {
            DDL__TRY(ddl__loader_need(loader, item, asked->source, sentence));
        }
    }
    return DDL_OK;
}

#ifndef DDL_NO_PLUGINS
typedef struct ddl__plugin_names {
    char name[DDL__PLUGINS_PER_FOLDER][DDL__PLUGIN_NAME_BYTES];
} ddl__plugin_names;

static int ddl__plugin_compare(const void *a, const void *b) { return strcmp(a, b); }

/* Names of the plugins in a folder, sorted: the order of a directory differs between hosts. */
static size_t ddl__plugin_list(const char *folder, ddl__plugin_names *out) {
    size_t count = 0;
    DIR *dir = folder[0] == '/' ? opendir(folder) : NULL;
    if (dir == NULL) {
        return 0;
    }
    for (struct dirent *entry = readdir(dir); entry != NULL && count < DDL__PLUGINS_PER_FOLDER; entry = readdir(dir)) {
        count += ddl__plugin_name_of(entry->d_name, out->name[count]) ? 1 : 0;
    }
    closedir(dir);
    qsort(out->name, count, sizeof out->name[0], ddl__plugin_compare);
    return count;
}

/* Tries what lies in a folder and is not loaded yet. */
static void ddl__loader_scan(ddl__loader *loader, const char *folder) {
    ddl__plugin_names *names = ddl__alloc(loader->base, sizeof *names);
    if (names == NULL) {
        loader->out_of_memory = true;
        return;
    }
    size_t count = ddl__plugin_list(folder, names);
    ddl__log(loader->base, DDL_LOG_DEBUG, "plugins: %zu in %s", count, folder);
    for (size_t i = 0; i < count; i++) {
        char path[DDL__PLUGIN_PATH_BYTES];
        ddl__plugin_path(path, folder, names->name[i]);
        if (ddl__loader_find(loader, names->name[i]) == NULL) { /* an earlier folder wins */
            ddl__plugin_attempt(loader, path, NULL, NULL);
        }
    }
    ddl__free(loader->base, names);
}
#endif

/* Nobody asked for these: whatever is wrong with one of them is a warning. */
static void ddl__loader_scan_all(ddl__loader *loader) {
    const ddl__plugin_static *folded = loader->params->statics;
    for (; folded != NULL && folded->name != NULL; folded++) {
        if (ddl__loader_find(loader, folded->name) == NULL) {
            ddl__plugin_attempt(loader, NULL, folded, NULL);
        }
    }
#ifndef DDL_NO_PLUGINS
    char folder[PATH_MAX];
    for (int i = 0; i < INT_MAX && ddl__plugin_folder(loader->params, i, folder); i++) {
        if (folder[0] != '/') {
            ddl__log(loader->base, DDL_LOG_WARN, "the folder \"%s\" of DDL_PLUGIN_PATH is left out: only absolute "
                     "paths are searched", folder);
        }
        ddl__loader_scan(loader, folder);
    }
#endif
}

/* A plugin that was loaded turns out not to work: it is with the refused ones from now on. It stays open. Returns
 * whether it had to load; else the reason is a warning. */
static bool ddl__loader_reject(ddl__loader *loader, const ddl_plugin *plugin, const char *reason) {
    ddl__plugin_record **at = &loader->loaded;
    while ((*at)->plugin != plugin) {
        at = &(*at)->next;
    }
    ddl__plugin_record *record = *at;
    bool needed = record->needed;
    ddl__plugin_try again = {.path = record->path};
    memcpy(again.name, record->name, sizeof again.name);
    snprintf(again.reason, sizeof again.reason, "%s", reason);
    ddl__log(loader->base, needed ? DDL_LOG_DEBUG : DDL_LOG_WARN, "plugin %s is not used: %s", record->path, reason);
    ddl__plugin_append(loader, &loader->refused, &again);
    *at = record->next;
    ddl__free(loader->base, record);
    return needed;
}

/* Forgets the lists. The plugins stay open. */
static void ddl__loader_close(ddl__loader *loader) {
    ddl__plugin_record *lists[2] = {loader->loaded, loader->refused};
    for (int i = 0; i < 2; i++) {
        while (lists[i] != NULL) {
            ddl__plugin_record *next = lists[i]->next;
            ddl__free(loader->base, lists[i]);
            lists[i] = next;
        }
    }
    loader->loaded = loader->refused = NULL;
}

/* Loads what must load, then what else is found. On error the lists tell ddl-info how far it came; the caller closes
 * the loader in either case. */
static ddl_status ddl__loader_open(ddl__loader *loader, ddl__base *base, const ddl__loader_params *params,
                                   ddl__sentence *sentence) {
    struct stat program;
    memset(loader, 0, sizeof *loader);
    loader->base = base;
    loader->params = params;
    loader->owners.self = geteuid();
    loader->owners.program = stat("/proc/self/exe", &program) == 0 ? program.st_uid : loader->owners.self;
    bool none = false;
    ddl_status status = DDL_OK;
    for (size_t i = 0; status == DDL_OK && i < params->asked_count; i++) {
        status = ddl__loader_asked(loader, &params->asked[i], &none, sentence);
    }
    for (ddl__plugin_record *p = loader->loaded; p != NULL; p = p->next) {
        p->needed = true;
    }
    if (status == DDL_OK && !none) {
        ddl__loader_scan_all(loader);
        if (loader->out_of_memory) {
            status = ddl__fail(sentence, DDL_ERR_NOMEM, "No memory is left for the list of plugins.");
        }
    }
    loader->params = NULL; /* it is the caller's and may be gone */
    return status;
}

#endif /* DDL_LOADER_H */

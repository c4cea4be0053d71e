/* The loader against plugins that this test compiles: good ones, and one for each way to be broken. Each case checks
 * the status, the sentence or reason, and the level it is logged at.
 * tests/run: variants=gcc,asan timeout=180 */
#include "test.h"

#include "../src/loader.h"

#include <sys/wait.h>

/* ---- a folder, a compiler ---- */

static char folder[200]; /* of the running test */

static char *say(const char *format, ...) {
    static char texts[64][600];
    static int next;
    char *text = texts[next++ % 64];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof texts[0], format, args);
    va_end(args);
    return text;
}

static void make_folder(void) {
    snprintf(folder, sizeof folder, "/tmp/ddl-test-loader-XXXXXX");
    if (mkdtemp(folder) == NULL) {
        perror(folder);
        exit(1);
    }
    chmod(folder, 0755);
}

static void shell(const char *command) {
    int status = system(command);
    if (status != 0) {
        test__fail(__FILE__, __LINE__, "%s ended with %d", command, status);
    }
}

static void remove_folder(void) { shell(say("rm -rf %s", folder)); }

/* The folder of src/, from where this file is. */
static const char *source_folder(void) {
    static char path[PATH_MAX];
    char *end;
    snprintf(path, sizeof path, "%s", __FILE__);
    end = strrchr(path, '/');
    snprintf(end != NULL ? end : path, 10, "%s../src", end != NULL ? "/" : "");
    return path;
}

/* One source for all plugins; -D makes the variants. */
static const char plugin_source[] =
    "#include \"plugin.h\"\n"
    "#include <stddef.h>\n"
    "#ifndef ABI\n#define ABI DDL_PLUGIN_ABI\n#endif\n"
    "#ifndef SIZE\n#define SIZE sizeof(ddl_plugin)\n#endif\n"
    "#ifndef TSIZE\n#define TSIZE sizeof(ddl_transport)\n#endif\n"
    "#ifndef FLAGS\n#define FLAGS DDL_TRANSPORT_ORDERED\n#endif\n"
    "#ifndef PAYLOAD\n#define PAYLOAD (1 << 20)\n#endif\n"
    "#ifndef SEND\n#define SEND send_\n#endif\n"
    "#ifndef MORE\n#define MORE\n#endif\n"
    "#define HAS(member) .member = (void *)dead_,\n"
    "#ifndef TABLE\n#define TABLE NAME\n#endif\n"
    "#ifndef SYMBOL\n#define SYMBOL NAME\n#endif\n"
    "#ifndef MARK\n#define MARK \"1\"\n#endif\n"
    "#define STR2(x) #x\n#define STR(x) STR2(x)\n#define JOIN2(a,b,c) a##b##c\n#define JOIN(a,b,c) JOIN2(a,b,c)\n"
    "static ddl_status open_(const ddl_host *h, const ddl_transport_params *p, void **o)\n"
    "{ (void)h; (void)p; *o = 0; return DDL_OK; }\n"
    "static void close_(void *s) { (void)s; }\n"
    "static ddl_status address_(void *s, void *a, size_t *n) { (void)s; (void)a; *n = 0; return DDL_OK; }\n"
    "static ddl_status add_(void *s, int32_t p, const void *a, size_t n, const char *h, uint64_t *l, uint64_t *b)\n"
    "{ (void)s; (void)p; (void)a; (void)n; (void)h; (void)l; (void)b; return DDL_OK; }\n"
    "static ddl_status send_(void *s, int32_t p, ddl_message *m) { (void)s; (void)p; (void)m; return DDL_OK; }\n"
    "static int32_t progress_(void *s, int32_t e) { (void)s; (void)e; return 0; }\n"
    "static ddl_status arm_(void *s, int *fd) { (void)s; (void)fd; return DDL_IN_PROGRESS; }\n"
    "static void dead_(void *s, int32_t p) { (void)s; (void)p; }\n"
    "static const ddl_transport t = {.size = TSIZE, .flags = FLAGS, .max_payload_bytes = PAYLOAD, .open = open_,\n"
    "  .close = close_, .address = address_, .add_peer = add_, .send = SEND, .progress = progress_, .arm = arm_,\n"
    "  .peer_dead = dead_, MORE};\n"
    "#ifdef DEVICE\n"
    "static const ddl_device d = {.size = sizeof d, .open = (void *)dead_, .close = close_, .count = (void *)dead_,\n"
    "  .owner = (void *)dead_, .alloc = (void *)dead_, .free = (void *)dead_, .copy = (void *)dead_,\n"
    "  .event_record = (void *)dead_, .event_test = (void *)dead_, .event_free = (void *)dead_, DEVICE};\n"
    "#define D &d\n#else\n#define D 0\n#endif\n"
    "#ifdef OFFERS_NOTHING\n#define T 0\n#else\n#define T &t\n#endif\n"
    "static const ddl_plugin table = {.size = SIZE, .abi = ABI, .name = STR(TABLE), .version = MARK,\n"
    "  .about = \"a test\", .transport = T, .device = D};\n"
    "DDL_PLUGIN_EXPORT const ddl_plugin *JOIN(ddl_plugin_, SYMBOL, _v1)(const ddl_host *h);\n"
    "const ddl_plugin *JOIN(ddl_plugin_, SYMBOL, _v1)(const ddl_host *h) {\n"
    "#ifdef WARNS\n  h->log(h, DDL_LOG_WARN, \"no quantum adapter was found\");\n#endif\n"
    "#ifdef USES_HOST\n  void *m = h->alloc(h, 100); h->free(h, m);\n"
    "  if (m == 0 || h->setting(h, \"COLOUR\") == 0 || h->now_ns(h) == 0 || h->deliver != 0) { return 0; }\n#endif\n"
    "#ifdef DECLINES\n  return 0;\n#else\n  (void)h; return &table;\n#endif\n}\n";

/* Makes file (within folder, unless absolute) of a plugin with that name, in a variant. Returns the path. */
static const char *compile(const char *file, const char *name, const char *flags) {
    const char *source = say("%s/source.c", folder);
    const char *path = file[0] == '/' ? file : say("%s/%s", folder, file);
    FILE *out = fopen(source, "w");
    fputs(plugin_source, out);
    fclose(out);
    shell(say("cc -w -shared -fPIC -I%s -DNAME=%s %s -o %s %s", source_folder(), name, flags, path, source));
    return path;
}

/* Compiles libddl-NAME.so in the folder. */
static const char *plugin(const char *name, const char *flags) {
    return compile(say("libddl-%s.so", name), name, flags);
}

/* ---- a host and a loader ---- */

static char logged[4][8000]; /* lines by level */

static void keep_log(void *user, ddl_log_level level, const char *line) {
    (void)user;
    size_t used = strlen(logged[level]);
    snprintf(logged[level] + used, sizeof logged[level] - used, "%s\n", line);
}

static ddl__base base;
static ddl_allocator failing;
static int allocations_left;
static void *fail_alloc(void *user, size_t bytes) {
    (void)user;
    return allocations_left-- > 0 ? malloc(bytes) : NULL;
}
static void fail_free(void *user, void *memory) {
    (void)user;
    free(memory);
}

static void *host_alloc(const ddl_host *host, size_t bytes) { return ddl__alloc(host->core, bytes); }
static void host_free(const ddl_host *host, void *memory) { ddl__free(host->core, memory); }
static void host_log(const ddl_host *host, ddl_log_level level, const char *line) {
    ddl__log(host->core, level, "%s", line);
}
static const char *host_setting(const ddl_host *host, const char *name) {
    (void)host;
    return strcmp(name, "COLOUR") == 0 ? "blue" : NULL;
}
static uint64_t host_now(const ddl_host *host) {
    (void)host;
    return ddl__now_ns();
}

typedef struct opened {
    ddl__loader loader;
    ddl__sentence sentence;
    ddl_status status;
} opened;

static const ddl__plugin_static no_statics[] = {{NULL, NULL}};

/* config is ddl_config.plugins, environment DDL_PLUGINS, path DDL_PLUGIN_PATH. */
static opened open_with(const char *config, const char *environment, const char *path,
                        const ddl__plugin_static *statics) {
    static const char *const built_in[] = {"tcp", NULL};
    static ddl_host host;
    host = (ddl_host){.size = sizeof host, .abi = DDL_PLUGIN_ABI, .core = &base, .alloc = host_alloc, .free = host_free,
                      .log = host_log, .setting = host_setting, .now_ns = host_now};
    memset(logged, 0, sizeof logged);
    base = (ddl__base){.log = keep_log, .log_level = DDL_LOG_DEBUG, .rank = -1, .allocator = failing};
    ddl__plugin_asked asked[2] = {{config, "ddl_config.plugins"}, {environment, "DDL_PLUGINS"}};
    ddl__loader_params params = {.host = &host, .asked = asked, .asked_count = 2, .built_in = built_in, .path = path,
                                 .libdir = say("%s/libdir", folder), .statics = statics};
    opened o;
    memset(&o, 0, sizeof o);
    o.status = ddl__loader_open(&o.loader, &base, &params, &o.sentence);
    return o;
}

static void end(opened *o) {
    ddl__loader_close(&o->loader);
    CHECK_EQ(base.memory, 0u);
}

/* Why a name was refused, "" when it was not. */
static const char *refusal(const opened *o, const char *name) {
    for (const ddl__plugin_record *r = o->loader.refused; r != NULL; r = r->next) {
        if (strcmp(r->name, name) == 0) {
            return say("%s", r->reason);
        }
    }
    return "";
}

static const char *version_of(const opened *o, const char *name) {
    const ddl__plugin_record *r = ddl__loader_find(&o->loader, name);
    return r != NULL ? r->plugin->version : "not loaded";
}

/* A broken plugin in a folder of the search: the job goes on with a warning. Asked for: an error with the path. */
static void expect_broken(const char *name, const char *reason) {
    opened o = open_with(NULL, NULL, folder, no_statics);
    CHECK_EQ(o.status, DDL_OK);
    CHECK_EQ(version_of(&o, name), "not loaded");
    CHECK_STR(refusal(&o, name), reason);
    CHECK_STR(logged[DDL_LOG_WARN], reason);
    CHECK_STR(logged[DDL_LOG_WARN], say("%s/libddl-%s.so is not used", folder, name));
    end(&o);
    o = open_with(NULL, name, folder, no_statics);
    CHECK_EQ(o.status, DDL_ERR_PLUGIN);
    CHECK_EQ(o.sentence.status, DDL_ERR_PLUGIN);
    CHECK_STR(o.sentence.text, reason);
    CHECK_STR(o.sentence.text, "asked for by DDL_PLUGINS");
    CHECK_STR(o.sentence.text, say("%s/libddl-%s.so", folder, name));
    end(&o);
}

#define IN_FOLDER(name)                                                                                                \
    static void in_folder_##name(void);                                                                                \
    TEST(name) {                                                                                                       \
        make_folder();                                                                                                 \
        in_folder_##name();                                                                                            \
        remove_folder();                                                                                               \
    }                                                                                                                  \
    static void in_folder_##name(void)

/* ---- what works ---- */

IN_FOLDER(what_lies_in_a_folder_is_loaded) {
    plugin("beta", "");
    plugin("alpha", "");
    opened o = open_with(NULL, NULL, folder, no_statics);
    CHECK_EQ(o.status, DDL_OK);
    CHECK_EQ(version_of(&o, "alpha"), "1");
    CHECK_EQ(version_of(&o, "beta"), "1");
    /* Sorted: all hosts come to the same order. */
    CHECK_EQ((const char *)o.loader.loaded->name, "alpha");
    CHECK_STR(o.loader.loaded->path, say("%s/libddl-alpha.so", folder));
    CHECK_EQ(logged[DDL_LOG_WARN][0], 0);
    end(&o);
}

IN_FOLDER(names_and_absolute_paths_can_be_asked_for) {
    const char *path = plugin("alpha", "");
    plugin("beta", "");
    shell(say("mkdir %s/empty", folder));
    opened o = open_with(say(" tcp , %s ", path), NULL, say("%s/empty", folder), no_statics);
    CHECK_EQ(o.status, DDL_OK);
    CHECK_EQ(version_of(&o, "alpha"), "1");
    CHECK_EQ(version_of(&o, "beta"), "not loaded");
    end(&o);
    o = open_with("beta,none", NULL, folder, no_statics);
    CHECK_EQ(o.status, DDL_OK);
    CHECK_EQ(version_of(&o, "beta"), "1");
    CHECK_EQ(version_of(&o, "alpha"), "not loaded"); /* none: nothing that was not asked for */
    end(&o);
}

IN_FOLDER(the_first_folder_wins) {
    shell(say("mkdir %s/one %s/two", folder, folder));
    compile("one/libddl-alpha.so", "alpha", "-DMARK='\"one\"'");
    compile("two/libddl-alpha.so", "alpha", "-DMARK='\"two\"'");
    opened o = open_with(NULL, NULL, say("%s/one:%s/two", folder, folder), no_statics);
    CHECK_EQ(version_of(&o, "alpha"), "one");
    end(&o);
    o = open_with(NULL, NULL, say(":%s/none-such::%s/two:%s/one", folder, folder, folder), no_statics);
    CHECK_EQ(version_of(&o, "alpha"), "two");
    end(&o);
    /* A path in a list comes before every folder, ddl_config before DDL_PLUGINS. */
    o = open_with(say("%s/two/libddl-alpha.so", folder), say("%s/one/libddl-alpha.so", folder), say("%s/one", folder),
                  no_statics);
    CHECK_EQ(version_of(&o, "alpha"), "two");
    end(&o);
}

IN_FOLDER(the_folder_of_the_program_and_the_libdir_come_last) {
    shell(say("mkdir %s/libdir %s/one", folder, folder));
    compile("libdir/libddl-alpha.so", "alpha", "-DMARK='\"libdir\"'");
    opened o = open_with("alpha", NULL, NULL, no_statics);
    CHECK_EQ(version_of(&o, "alpha"), "libdir");
    end(&o);
    compile("one/libddl-alpha.so", "alpha", "-DMARK='\"one\"'");
    o = open_with("alpha", NULL, say("%s/one", folder), no_statics);
    CHECK_EQ(version_of(&o, "alpha"), "one");
    end(&o);
    /* Beside the executable of this test. */
    char self[PATH_MAX] = "";
    CHECK(readlink("/proc/self/exe", self, sizeof self - 40) > 0);
    strcpy(strrchr(self, '/'), "/libddl-beside_test_loader.so");
    compile(self, "beside_test_loader", "-DMARK='\"beside\"'");
    o = open_with("beside_test_loader", NULL, NULL, no_statics);
    unlink(self);
    if (o.status != DDL_OK) {
        CHECK_STR(o.sentence.text, self); /* the folder of the tests belongs to somebody else: it was tried at least */
    } else {
        CHECK_EQ(version_of(&o, "beside_test_loader"), "beside");
    }
    end(&o);
}

IN_FOLDER(a_broken_one_does_not_hide_a_good_one) {
    shell(say("mkdir %s/one %s/two", folder, folder));
    compile("one/libddl-alpha.so", "alpha", "-DABI=99");
    compile("two/libddl-alpha.so", "alpha", "-DMARK='\"two\"'");
    opened o = open_with("alpha", NULL, say("%s/one:%s/two", folder, folder), no_statics);
    CHECK_EQ(o.status, DDL_OK);
    CHECK_EQ(version_of(&o, "alpha"), "two");
    CHECK_STR(logged[DDL_LOG_WARN], "plugin ABI 99");
    end(&o);
}

IN_FOLDER(an_entry_may_use_the_host) {
    plugin("user", "-DUSES_HOST -DWARNS");
    opened o = open_with("user", NULL, folder, no_statics);
    CHECK_EQ(o.status, DDL_OK);
    CHECK_EQ(version_of(&o, "user"), "1");
    CHECK_STR(logged[DDL_LOG_WARN], "no quantum adapter"); /* it goes on, so the warning is one */
    end(&o);
}

/* ---- folded in ---- */

static ddl_status t_open(const ddl_host *h, const ddl_transport_params *p, void **o) {
    (void)h, (void)p, (void)o;
    return DDL_OK;
}
static void t_close(void *s) { (void)s; }
static ddl_status t_address(void *s, void *a, size_t *n) { (void)s, (void)a, (void)n; return DDL_OK; }
static ddl_status t_add(void *s, int32_t p, const void *a, size_t n, const char *h, uint64_t *l, uint64_t *b) {
    (void)s, (void)p, (void)a, (void)n, (void)h, (void)l, (void)b;
    return DDL_OK;
}
static ddl_status t_send(void *s, int32_t p, ddl_message *m) { (void)s, (void)p, (void)m; return DDL_OK; }
static int32_t t_progress(void *s, int32_t e) { (void)s, (void)e; return 0; }
static ddl_status t_wait(void *s, int64_t t, const int *f, int32_t n) {
    (void)s, (void)t, (void)f, (void)n;
    return DDL_OK;
}
static void t_dead(void *s, int32_t p) { (void)s, (void)p; }

static const ddl_plugin *folded_entry(const ddl_host *host) {
    /* Sleeps its own way: wait instead of arm. */
    static const ddl_transport transport = {
        .size = sizeof transport, .flags = DDL_TRANSPORT_ORDERED, .max_payload_bytes = 1 << 20, .open = t_open,
        .close = t_close, .address = t_address, .add_peer = t_add, .send = t_send, .progress = t_progress,
        .wait = t_wait, .peer_dead = t_dead};
    static const ddl_plugin table = {.size = sizeof table, .abi = DDL_PLUGIN_ABI, .name = "alpha", .version = "folded",
                                     .about = "", .transport = &transport};
    (void)host;
    return &table;
}
static const ddl_plugin *declining_entry(const ddl_host *host) {
    host->log(host, DDL_LOG_WARN, "not today");
    return NULL;
}

IN_FOLDER(a_folded_plugin_needs_no_file) {
    static const ddl__plugin_static statics[] = {{"alpha", folded_entry}, {"gamma", declining_entry}, {NULL, NULL}};
    const char *path = plugin("alpha", "-DMARK='\"file\"'");
    opened o = open_with(NULL, "alpha", folder, statics);
    CHECK_EQ(o.status, DDL_OK);
    CHECK_EQ(version_of(&o, "alpha"), "folded");
    CHECK_STR(ddl__loader_find(&o.loader, "alpha")->path, "built in");
    CHECK_STR(refusal(&o, "gamma"), "not today");
    end(&o);
    o = open_with(path, NULL, folder, statics); /* but a path means that file */
    CHECK_EQ(version_of(&o, "alpha"), "file");
    end(&o);
    o = open_with("gamma", NULL, folder, statics);
    CHECK_EQ(o.status, DDL_ERR_PLUGIN);
    CHECK_STR(o.sentence.text, "(built in: gamma) (it declines: not today)");
    end(&o);
}

/* ---- what is absent or declines ---- */

IN_FOLDER(absent_is_quiet_unless_asked_for) {
    opened o = open_with(NULL, NULL, say("%s:%s/none-such", folder, folder), no_statics);
    CHECK_EQ(o.status, DDL_OK);
    CHECK_EQ(logged[DDL_LOG_WARN][0], 0);
    CHECK(o.loader.loaded == NULL || strncmp(o.loader.loaded->path, folder, strlen(folder)) != 0);
    end(&o);
    o = open_with("ghost", NULL, say("%s:%s/none-such", folder, folder), no_statics);
    CHECK_EQ(o.status, DDL_ERR_PLUGIN);
    CHECK_STR(o.sentence.text, "Plugin ghost, asked for by ddl_config.plugins, cannot be used");
    CHECK_STR(o.sentence.text, say("%s/libddl-ghost.so (no such file)", folder));
    CHECK_STR(o.sentence.text, say("%s/none-such/libddl-ghost.so (no such file)", folder));
    CHECK_STR(o.sentence.text, say("%s/libdir/libddl-ghost.so (no such file)", folder));
    CHECK_EQ(logged[DDL_LOG_WARN][0], 0);
    end(&o);
}

IN_FOLDER(one_that_declines_says_why) {
    plugin("shy", "-DDECLINES -DWARNS");
    opened o = open_with(NULL, NULL, folder, no_statics);
    CHECK_EQ(o.status, DDL_OK);
    CHECK_STR(refusal(&o, "shy"), "it declines: no quantum adapter was found");
    CHECK_EQ(logged[DDL_LOG_WARN][0], 0); /* nobody asked for it */
    end(&o);
    o = open_with("shy", NULL, folder, no_statics);
    CHECK_EQ(o.status, DDL_ERR_PLUGIN);
    CHECK_STR(o.sentence.text, "it declines: no quantum adapter was found");
    end(&o);
    plugin("shy", "-DDECLINES");
    o = open_with("shy", NULL, folder, no_statics);
    CHECK_STR(o.sentence.text, "it declines");
    end(&o);
}

/* ---- what is broken ---- */

IN_FOLDER(truncated_in_the_header) {
    shell(say("head -c 20 %s > %s/x && mv %s/x %s/libddl-cut.so", plugin("cut", ""), folder, folder, folder));
    expect_broken("cut", "too short to be a shared object (20 bytes)");
}

/* dlopen itself would end this process by SIGBUS. */
IN_FOLDER(truncated_in_a_segment) {
    const char *path = plugin("cut", "");
    struct stat info;
    CHECK_EQ(stat(path, &info), 0);
    for (int part = 1; part < 8; part++) {
        plugin("cut", "");
        CHECK_EQ(truncate(path, info.st_size * part / 16), 0);
        expect_broken("cut", "it is truncated");
    }
    /* Only the last byte that some segment holds is missing. */
    Elf64_Ehdr head;
    Elf64_Phdr segment;
    uint64_t end_of_segments = 0;
    int fd = open(plugin("cut", ""), O_RDONLY);
    CHECK_EQ(pread(fd, &head, sizeof head, 0), (ssize_t)sizeof head);
    for (int i = 0; i < head.e_phnum; i++) {
        CHECK(pread(fd, &segment, sizeof segment, (off_t)head.e_phoff + i * (off_t)sizeof segment) > 0);
        end_of_segments = DDL__MAX(end_of_segments, segment.p_offset + segment.p_filesz);
    }
    close(fd);
    CHECK_EQ(truncate(path, (off_t)end_of_segments - 1), 0);
    expect_broken("cut", "it is truncated");
}

IN_FOLDER(not_an_elf_file) {
    shell(say("seq 1000 > %s/libddl-text.so", folder));
    expect_broken("text", "not a shared object");
    shell(say("mkdir %s/libddl-dir.so", folder));
    expect_broken("dir", "not a regular file");
}

/* e_ident[EI_CLASS] is byte 4, EI_DATA byte 5, e_type bytes 16-17, e_machine bytes 18-19. */
static void poke(const char *path, long at, int byte) {
    FILE *file = fopen(path, "r+");
    fseek(file, at, SEEK_SET);
    fputc(byte, file);
    fclose(file);
}

IN_FOLDER(made_for_another_machine) {
    poke(plugin("alien", ""), 18, 0x2a); /* SuperH */
    expect_broken("alien", "another processor (ELF machine 42");
    poke(plugin("alien", ""), 4, ELFCLASS32);
    expect_broken("alien", "wrong ELF class");
    poke(plugin("alien", ""), 16, ET_EXEC);
    expect_broken("alien", "not a shared object");
}

IN_FOLDER(another_abi) {
    plugin("older", "-DABI=0");
    expect_broken("older", "built for plugin ABI 0, this program has 1");
    plugin("newer", "-DABI=2");
    expect_broken("newer", "built for plugin ABI 2, this program has 1");
}

IN_FOLDER(payloads_that_are_too_small) {
    plugin("cart", "-DPAYLOAD=65536");
    expect_broken("cart", "payloads of at most 65536 bytes");
}

IN_FOLDER(missing_symbols) {
    plugin("mute", "-DSYMBOL=other");
    expect_broken("mute", "it exports no ddl_plugin_mute_v1");
    compile("extra.c", "x", "-E"); /* any file */
    shell(say("echo 'void ddl_all_reduce(void); void *f(void) { return (void *)ddl_all_reduce; }' > %s/u.c && "
              "cc -w -shared -fPIC -o %s/libddl-needy.so %s/u.c", folder, folder, folder));
    expect_broken("needy", "undefined symbol: ddl_all_reduce");
}

IN_FOLDER(a_table_that_is_too_small) {
    plugin("small", "-DSIZE=24");
    expect_broken("small", "its table says it has 24 bytes, fewer than the");
    plugin("stub", "-DTSIZE='offsetof(ddl_transport,progress)'");
    expect_broken("stub", "its transport lacks the required member progress");
    plugin("zero", "-DTSIZE=0");
    expect_broken("zero", "its transport lacks the required member open");
}

IN_FOLDER(a_required_member_that_is_null) {
    plugin("nosend", "-DSEND=0");
    expect_broken("nosend", "its transport lacks the required member send");
    plugin("empty", "-DOFFERS_NOTHING");
    expect_broken("empty", "neither a transport nor a device");
    plugin("jumbled", "-DFLAGS=0");
    expect_broken("jumbled", "does not promise order");
}

/* Optional members that the core calls where another one is there: all of a family, or none. */
IN_FOLDER(a_part_of_an_optional_family) {
    static const char *const natives[] = {"native_open", "native_close", "native_cost_ns", "native_start", "native_test",
                                          "native_cancel"};
    char name[20];
    for (int without = 0; without < 6; without++) {
        char more[300] = "";
        for (int i = 0; i < 6; i++) {
            snprintf(more + strlen(more), sizeof more - strlen(more), "%s%s%s", i != without ? "HAS(" : "",
                     i != without ? natives[i] : "", i != without ? ")" : "");
        }
        snprintf(name, sizeof name, "half%d", without);
        plugin(name, say("-DMORE='%s'", more));
        expect_broken(name, say("its transport lacks the member %s, but has others", natives[without]));
    }
    static const char *const pairs[][3] = {{"MORE", "memory_alloc", "memory_free"},
                                           {"MORE", "peek", "taken"},
                                           {"MORE", "reserve", "publish"},
                                           {"DEVICE", "host_alloc", "host_free"},
                                           {"DEVICE", "stream_make", "stream_free"},
                                           {"DEVICE", "gate_put", "gate_open"}};
    for (int i = 0; i < 12; i++) {
        const char *const *pair = pairs[i / 2];
        snprintf(name, sizeof name, "pair%d", i);
        plugin(name, say("-D%s='HAS(%s)'", pair[0], pair[1 + i % 2]));
        expect_broken(name, say("lacks the member %s, but has others", pair[2 - i % 2]));
    }
    plugin("whole", "-DMORE='HAS(memory_alloc) HAS(memory_free)' -DDEVICE='HAS(gate_put) HAS(gate_open)'");
    opened o = open_with("whole", NULL, folder, no_statics);
    CHECK_EQ(o.status, DDL_OK);
    end(&o);
}

/* Tables of a later minor version are longer, and old ones may end after the required members. */
IN_FOLDER(longer_and_shorter_tables_are_fine) {
    plugin("longer", "-DSIZE=4096 -DTSIZE=4096");
    plugin("shorter", "-DTSIZE='offsetof(ddl_transport,wait)'");
    opened o = open_with("longer,shorter", NULL, folder, no_statics);
    CHECK_EQ(o.status, DDL_OK);
    CHECK_EQ(o.sentence.text[0], 0);
    end(&o);
}

IN_FOLDER(another_name_in_the_table) {
    plugin("alias", "-DTABLE=real");
    expect_broken("alias", "its table is named \"real\", the file \"alias\"");
}

/* ---- whose it is ---- */

IN_FOLDER(a_file_that_anybody_may_write) {
    chmod(plugin("open", ""), 0666);
    expect_broken("open", "anybody may write this file; chmod o-w it");
}

IN_FOLDER(a_folder_that_anybody_may_write) {
    shell(say("mkdir %s/deep", folder));
    const char *path = say("%s", compile("deep/libddl-open.so", "open", ""));
    chmod(say("%s/deep", folder), 0777);
    opened o = open_with(path, NULL, NULL, no_statics);
    CHECK_EQ(o.status, DDL_ERR_PLUGIN);
    CHECK_STR(o.sentence.text, say("anybody may write its folder %s/deep", folder));
    end(&o);
    chmod(say("%s/deep", folder), 01777); /* sticky: strangers may still add a file */
    o = open_with(path, NULL, NULL, no_statics);
    CHECK_EQ(o.status, DDL_ERR_PLUGIN);
    end(&o);
    chmod(say("%s/deep", folder), 0755);
    chmod(folder, 0777); /* one above: somebody may put another deep/ in place of this */
    o = open_with(path, NULL, NULL, no_statics);
    CHECK_EQ(o.status, DDL_ERR_PLUGIN);
    CHECK_STR(o.sentence.text, say("anybody may write its folder %s;", folder));
    end(&o);
    chmod(folder, 01777); /* as /tmp is */
    o = open_with(path, NULL, NULL, no_statics);
    CHECK_EQ(o.status, DDL_OK);
    end(&o);
    /* A link does not launder. */
    chmod(folder, 0755);
    chmod(path, 0777);
    shell(say("mkdir %s/links && ln -s %s %s/links/libddl-open.so", folder, path, folder));
    o = open_with(NULL, "open", say("%s/links", folder), no_statics);
    CHECK_EQ(o.status, DDL_ERR_PLUGIN);
    CHECK_STR(o.sentence.text, "anybody may write this file");
    end(&o);
}

IN_FOLDER(a_file_of_somebody_else) {
    const char *path = plugin("foreign", "");
    if (geteuid() != 0 || chown(path, 12345, (gid_t)-1) != 0) {
        remove_folder();
        make_folder();
        SKIP("only root can give a file to somebody else");
    }
    expect_broken("foreign", "it belongs to uid 12345");
    CHECK_EQ(chown(path, 0, (gid_t)-1), 0);
    CHECK_EQ(chown(folder, 12345, (gid_t)-1), 0);
    expect_broken("foreign", "belongs to uid 12345, which is neither root nor this user");
}

/* ---- what is asked for in a wrong way ---- */

IN_FOLDER(relative_paths_are_refused) {
    char before[PATH_MAX];
    CHECK(getcwd(before, sizeof before) != NULL);
    plugin("near", "");
    CHECK_EQ(chdir(folder), 0);
    static const char *const wrong[] = {"./libddl-near.so", "../x/libddl-near.so", "sub/libddl-near.so"};
    for (size_t i = 0; i < DDL__COUNT_OF(wrong); i++) {
        opened o = open_with(wrong[i], NULL, NULL, no_statics);
        CHECK_EQ(o.status, DDL_ERR_PLUGIN);
        CHECK_STR(o.sentence.text, "relative");
        end(&o);
    }
    /* Neither the current folder, nor a relative one in the path. */
    opened o = open_with("near", NULL, NULL, no_statics);
    CHECK_EQ(o.status, DDL_ERR_PLUGIN);
    end(&o);
    o = open_with("near", NULL, ".", no_statics);
    CHECK_EQ(o.status, DDL_ERR_PLUGIN);
    CHECK_STR(o.sentence.text, "./libddl-near.so (its path is relative");
    end(&o);
    o = open_with(NULL, NULL, "plugins", no_statics);
    CHECK_EQ(o.status, DDL_OK);
    CHECK_STR(logged[DDL_LOG_WARN], "the folder \"plugins\" of DDL_PLUGIN_PATH is left out");
    end(&o);
    CHECK_EQ(chdir(before), 0);
}

IN_FOLDER(names_that_are_none) {
    static const char *const wrong[] = {"libddl-x.so", "Shm", "a b", "x;y", "-x", "."};
    for (size_t i = 0; i < DDL__COUNT_OF(wrong); i++) {
        opened o = open_with(wrong[i], NULL, folder, no_statics);
        CHECK_EQ(o.status, DDL_ERR_PLUGIN);
        CHECK_STR(o.sentence.text, "neither the name of a plugin");
        end(&o);
    }
    opened o = open_with(compile("other.so", "other", ""), NULL, NULL, no_statics);
    CHECK_EQ(o.status, DDL_ERR_PLUGIN);
    CHECK_STR(o.sentence.text, "it is not named libddl-NAME.so");
    end(&o);
    char longest[5000];
    memset(longest, 'a', sizeof longest);
    longest[sizeof longest - 1] = '\0';
    o = open_with(longest, NULL, folder, no_statics);
    CHECK_EQ(o.status, DDL_ERR_PLUGIN);
    end(&o);
    longest[0] = '/';
    longest[4090] = '\0';
    o = open_with(longest, NULL, folder, no_statics);
    CHECK_EQ(o.status, DDL_ERR_PLUGIN);
    end(&o);
    o = open_with(" ,, ,", "", longest, no_statics);
    CHECK_EQ(o.status, DDL_OK);
    end(&o);
}

/* Every allocation fails once: an error or a whole list, never a leak. */
IN_FOLDER(out_of_memory_is_clean) {
    plugin("alpha", "");
    plugin("beta", "-DABI=3");
    failing = (ddl_allocator){fail_alloc, fail_free, NULL};
    int failures = 0;
    for (int n = 0; n < 100; n++) {
        allocations_left = n;
        opened o = open_with("alpha", NULL, folder, no_statics);
        ddl_status status = o.status;
        CHECK(status == DDL_OK || status == DDL_ERR_NOMEM);
        CHECK(status != DDL_ERR_NOMEM || strlen(o.sentence.text) > 10);
        end(&o);
        failures += status == DDL_ERR_NOMEM;
        if (status == DDL_OK) {
            break;
        }
    }
    CHECK(failures > 1);
    memset(&failing, 0, sizeof failing);
}

/* Two contexts of one process load the same plugin; closing one leaves the other's table alone. */
IN_FOLDER(two_contexts_share_a_plugin) {
    plugin("alpha", "");
    opened a = open_with(NULL, NULL, folder, no_statics);
    ddl__base first = base;
    a.loader.base = &first;
    opened b = open_with(NULL, NULL, folder, no_statics);
    const ddl_plugin *table = ddl__loader_find(&b.loader, "alpha")->plugin;
    CHECK(ddl__loader_find(&a.loader, "alpha")->plugin == table);
    ddl__loader_close(&a.loader);
    end(&b);
    CHECK_EQ(table->name, "alpha"); /* still mapped: what opened is never closed */
}

/* libFuzzer target: everything that people and launchers say to a rank as text: the environment, ddl_config, and the
 * files that are read for it.
 * Input: lines NAME=value, of the environment, or in small letters of ddl_config; after a line "--" what every file
 * contains. nomem=3 fails the third allocation, mode=644 is the mode of files, nofile=1 says that there are none.
 * The texts of the kernel are fuzz_proc.
 * campaign: parser max_len=512 */
#include "fuzz.h"

#include <fcntl.h>
#include <sanitizer/asan_interface.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* Plain code: the time is for the code under test. */
#define FUZZ_PLAIN static __attribute__((no_sanitize("address", "undefined", "coverage")))

enum { LINES = 256, TEXT_MAX = 512 };

static char fuzz_text[TEXT_MAX + 2]; /* the lines, ended by zeros */
static struct {
    uint32_t run; /* free unless it is this one */
    const char *name, *value;
} fuzz_lines[LINES];
static uint32_t fuzz_runs;
static int fuzz_opens;
static size_t fuzz_file_bytes, fuzz_file_at;
static const uint8_t *fuzz_file;
static int64_t fuzz_live, fuzz_fail_in;

/* A name ends with a 0 or '='. */
FUZZ_PLAIN bool fuzz_same(const char *a, const char *b) {
    while (*a == *b && *a != 0 && *a != '=') {
        a++;
        b++;
    }
    return (*a == 0 || *a == '=') && (*b == 0 || *b == '=');
}

/* Where a name is, or would be. */
FUZZ_PLAIN size_t fuzz_slot(const char *name) {
    uint32_t hash = 2166136261u;
    for (const char *at = name; *at != 0 && *at != '='; at++) {
        hash = (hash ^ (uint8_t)*at) * 16777619u;
    }
    size_t slot = (hash ^ hash >> 15) % LINES;
    while (fuzz_lines[slot].run == fuzz_runs && !fuzz_same(fuzz_lines[slot].name, name)) {
        slot = (slot + 1) % LINES;
    }
    return slot;
}

FUZZ_PLAIN char *fuzz_getenv(const char *name) {
    size_t slot = fuzz_slot(name);
    return fuzz_lines[slot].run == fuzz_runs ? (char *)fuzz_lines[slot].value : NULL;
}

/* Lines become an environment; the first of a name counts. */
FUZZ_PLAIN void fuzz_environment(const uint8_t *data, size_t size) {
    char *name = fuzz_text, *equals = NULL;
    size = size < TEXT_MAX ? size : TEXT_MAX;
    fuzz_runs++;
    for (size_t i = 0; i <= size; i++) {
        fuzz_text[i] = i == size || data[i] == '\n' ? 0 : (char)data[i];
        if (fuzz_text[i] == '=' && equals == NULL) {
            equals = &fuzz_text[i];
        }
        if (fuzz_text[i] == 0) {
            size_t slot = equals != NULL ? fuzz_slot(name) : LINES;
            if (slot < LINES && fuzz_lines[slot].run != fuzz_runs) {
                fuzz_lines[slot].run = fuzz_runs;
                fuzz_lines[slot].name = name;
                fuzz_lines[slot].value = equals + 1;
            }
            name = &fuzz_text[i + 1];
            equals = NULL;
        }
    }
}

/* As strcmp, without the fuzzer's interest in each of the comparisons that find a row of a table. */
FUZZ_QUIET static int fuzz_strcmp(const char *a, const char *b) {
    while (*a == *b && *a != 0) {
        a++;
        b++;
    }
    return (uint8_t)*a - (uint8_t)*b;
}

FUZZ_QUIET static long long fuzz_number(const char *name) {
    const char *text = fuzz_getenv(name);
    return text != NULL ? strtoll(text, NULL, 0) : 0;
}

FUZZ_QUIET static int fuzz_open(void) {
    fuzz_file_at = 0;
    return ++fuzz_opens > 4 || fuzz_getenv("nofile") != NULL ? -1 : 4000;
}

FUZZ_QUIET static ssize_t fuzz_pread(void *out, size_t bytes, size_t at) {
    size_t have = at < fuzz_file_bytes ? fuzz_file_bytes - at : 0;
    bytes = bytes < have ? bytes : have;
    if (bytes > 0) {
        memcpy(out, fuzz_file + at, bytes);
    }
    return (ssize_t)bytes;
}

FUZZ_QUIET static ssize_t fuzz_read(void *out, size_t bytes) {
    ssize_t n = fuzz_pread(out, bytes, fuzz_file_at);
    fuzz_file_at += (size_t)n;
    return n;
}

FUZZ_QUIET static int fuzz_stat(struct stat *out) {
    const char *mode = fuzz_getenv("mode");
    memset(out, 0, sizeof *out);
    out->st_mode = S_IFREG | (mode != NULL ? (mode_t)strtol(mode, NULL, 8) & 0777 : 0600);
    out->st_uid = 1000; /* ours */
    return 0;
}

#define getenv(name) fuzz_getenv(name)
#undef strcmp
#define strcmp(a, b) fuzz_strcmp(a, b)
#define open(path, flags) fuzz_open()
#define read(fd, out, bytes) fuzz_read(out, bytes)
#define pread(fd, out, bytes, at) fuzz_pread(out, bytes, (size_t)(at))
#define fstat(fd, out) fuzz_stat(out)
#define stat(path, out) fuzz_stat(out)
#define fcntl(fd, what, flag) 0
#define close(fd) 0
#define geteuid() 1000
#pragma clang diagnostic ignored "-Wunused-value"
#include "src/settings/machine.h"
#define ddl__cores(set) (*(set) = 0, 2)
#include "src/settings.h"
#include "src/tune.h"

/* Blocks are not used again during a run; what is beside them and what was freed is poisoned. */
static _Alignas(16) char fuzz_arena[1 << 16];
static size_t fuzz_arena_used;

FUZZ_PLAIN void *fuzz_alloc(void *user, size_t bytes) {
    (void)user;
    if (fuzz_fail_in > 0 && --fuzz_fail_in == 0) {
        return NULL;
    }
    size_t whole = 16 + (bytes + 15) / 16 * 16;
    REQUIRE(bytes < sizeof fuzz_arena && whole <= sizeof fuzz_arena - fuzz_arena_used);
    char *block = fuzz_arena + fuzz_arena_used;
    fuzz_arena_used += whole;
    fuzz_live++;
    ASAN_POISON_MEMORY_REGION(block, whole);
    ASAN_UNPOISON_MEMORY_REGION(block + 16, bytes);
    return block + 16;
}

FUZZ_PLAIN void fuzz_free(void *user, void *memory) {
    (void)user;
    fuzz_live--;
    REQUIRE(!__asan_address_is_poisoned(memory)); /* not twice */
    size_t bytes; /* ddl__alloc writes it first */
    memcpy(&bytes, memory, sizeof bytes);
    ASAN_POISON_MEMORY_REGION(memory, bytes);
}

static ddl_config fuzz_config(void) {
    ddl_config c = {.world_size = (int32_t)fuzz_number("world_size"),
                    .rank = (int32_t)fuzz_number("rank"),
                    .rendezvous = fuzz_getenv("rendezvous"),
                    .job = fuzz_getenv("job"),
                    .port_range = fuzz_getenv("port_range"),
                    .transports = fuzz_getenv("transports"),
                    .algorithm = fuzz_getenv("algorithm"),
                    .secret = fuzz_getenv("secret"),
                    .timeout_ms = fuzz_number("timeout_ms"),
                    .init_timeout_ms = fuzz_number("init_timeout_ms"),
                    .stall_ms = fuzz_number("stall_ms"),
                    .progress_thread = (int32_t)fuzz_number("progress_thread"),
                    .log_level = (ddl_log_level)(fuzz_number("log_level") & 7),
                    .allocator = {fuzz_alloc, fuzz_free, NULL}};
    c.secret_bytes = c.secret != NULL ? strlen(c.secret) : 0;
    return c;
}

/* What is accepted is in range. */
static void fuzz_sound(const ddl__settings *s) {
    REQUIRE(s->launch.world >= 1 && s->launch.world <= DDL__WORLD_MAX);
    REQUIRE(s->launch.rank >= 0 && s->launch.rank < s->launch.world);
    REQUIRE(s->launch.local_world <= s->launch.world);
    REQUIRE(s->timeout_ms == -1 || (s->timeout_ms > 0 && s->timeout_ms < INT64_MAX / 1000000));
    REQUIRE(s->stall_ms == -1 || (s->stall_ms > 0 && s->stall_ms < INT64_MAX / 1000000));
    REQUIRE(s->init_timeout_ms > 0 && s->init_timeout_ms < INT64_MAX / 1000000);
    REQUIRE(s->port_first >= 0 && s->port_first <= s->port_last && s->port_last <= 65535);
    REQUIRE(s->cores >= 1 && strnlen(s->host_id, sizeof s->host_id) < sizeof s->host_id);
    REQUIRE(s->secret == NULL || (s->secret_bytes >= DDL__SECRET_MIN && s->secret_bytes <= DDL__SECRET_MAX));
    if (s->place.kind == DDL__MEET_TCP) {
        REQUIRE(s->place.host != NULL && s->place.host[0] != 0 && s->place.ports >= 1);
        REQUIRE(s->place.port >= 0 && s->place.port + s->place.ports - 1 <= 65535);
    }
    REQUIRE(s->place.kind != DDL__MEET_FILE || s->place.folder[0] == '/');
    REQUIRE(s->launch.world == 1 || s->place.kind != DDL__MEET_ALONE);
}

/* A text that is in the secret and nowhere else is in no sentence. */
static void fuzz_secret_kept(const uint8_t *data, size_t size, const char *sentence) {
    const uint8_t *first = memmem(data, size, "s3cr3t", 6);
    const char *secret = fuzz_getenv("DDL_SECRET");
    if (first == NULL || secret == NULL || strncmp(secret, "s3cr3t", 6) != 0) {
        return;
    }
    size_t rest = size - (size_t)(first + 1 - data);
    REQUIRE(memmem(first + 1, rest, "s3cr3t", 6) != NULL || strstr(sentence, "s3cr3t") == NULL);
}

FUZZ_QUIET static void fuzz_said(const uint8_t *data, size_t size) {
    const uint8_t *cut = memmem(data, size, "\n--\n", 4);
    fuzz_file = cut != NULL ? cut + 4 : data;
    fuzz_file_bytes = cut != NULL ? size - (size_t)(cut + 4 - data) : 0;
    fuzz_environment(data, cut != NULL ? (size_t)(cut - data) : size);
    fuzz_live = 0;
    fuzz_opens = 0;
    fuzz_arena_used = 0;
    fuzz_fail_in = fuzz_number("nomem");
}

static void fuzz_algorithms(const char *text) {
    ddl__tuning tuning = {.model = ddl__model_default}, before = tuning;
    ddl__sentence why = {0};
    if (ddl__tune_parse(&tuning, text, &why) < 0) {
        REQUIRE(memcmp(&tuning, &before, sizeof tuning) == 0);
        REQUIRE(why.text[0] != 0 && strnlen(why.text, sizeof why.text) < sizeof why.text);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    ddl__settings s;
    ddl__base base = {.rank = -1};
    ddl__sentence why = {0};
    fuzz_said(data, size);
    ddl_config config = fuzz_config();
    ddl_status status = ddl__settings_read(&config, &base, &s, &why);
    REQUIRE(strnlen(why.text, sizeof why.text) < sizeof why.text);
    fuzz_secret_kept(data, size, why.text);
    if (status == DDL_OK) {
        fuzz_sound(&s);
        if (s.algorithm != NULL) {
            fuzz_algorithms(s.algorithm);
        }
        ddl__settings_free(&base, &s);
    } else {
        REQUIRE(status < 0 && why.text[0] != 0);
    }
    REQUIRE(fuzz_live == 0);
    return 0;
}

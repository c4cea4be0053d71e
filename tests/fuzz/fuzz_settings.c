/* libFuzzer target: everything that people and launchers say to a rank as text: the environment, ddl_config, and the
 * files that are read for it (the secret, control groups, /proc).
 * Input: lines NAME=value, of the environment, or in small letters of ddl_config; after a line "--" what every file
 * contains. nomem=3 fails the third allocation, mode=644 is the mode of files, nofile=1 says that there are none. */
#include "fuzz.h"

#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static char fuzz_text[4200]; /* the lines, ended by zeros */
static size_t fuzz_text_bytes, fuzz_file_bytes, fuzz_file_at;
static const uint8_t *fuzz_file;
static int64_t fuzz_live, fuzz_fail_in;

FUZZ_QUIET static char *fuzz_getenv(const char *name) {
    size_t n = strlen(name);
    for (char *line = fuzz_text; line < fuzz_text + fuzz_text_bytes; line += strlen(line) + 1) {
        if (strncmp(line, name, n) == 0 && line[n] == '=') {
            return line + n + 1;
        }
    }
    return NULL;
}

FUZZ_QUIET static long long fuzz_number(const char *name) {
    const char *text = fuzz_getenv(name);
    return text != NULL ? strtoll(text, NULL, 0) : 0;
}

FUZZ_QUIET static int fuzz_open(void) {
    fuzz_file_at = 0;
    return fuzz_getenv("nofile") != NULL ? -1 : 4000;
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
#define open(path, flags) fuzz_open()
#define read(fd, out, bytes) fuzz_read(out, bytes)
#define pread(fd, out, bytes, at) fuzz_pread(out, bytes, (size_t)(at))
#define fstat(fd, out) fuzz_stat(out)
#define stat(path, out) fuzz_stat(out)
#define fcntl(fd, what, flag) 0
#define close(fd) 0
#define sched_getaffinity(pid, bytes, set) (-1)
#define sysconf(what) 2
#define geteuid() 1000
#pragma clang diagnostic ignored "-Wunused-value"
#include "src/settings.h"
#include "src/tune.h"

FUZZ_QUIET static void *fuzz_alloc(void *user, size_t bytes) {
    (void)user;
    if (fuzz_fail_in > 0 && --fuzz_fail_in == 0) {
        return NULL;
    }
    REQUIRE(bytes < 1 << 20);
    fuzz_live++;
    return malloc(bytes);
}

FUZZ_QUIET static void fuzz_free(void *user, void *memory) {
    (void)user;
    fuzz_live--;
    free(memory);
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

static void fuzz_lines(const uint8_t *data, size_t size) {
    const uint8_t *cut = memmem(data, size, "\n--\n", 4);
    fuzz_file = cut != NULL ? cut + 4 : data;
    fuzz_file_bytes = cut != NULL ? size - (size_t)(cut + 4 - data) : 0;
    fuzz_text_bytes = cut != NULL ? (size_t)(cut - data) : size;
    fuzz_text_bytes = fuzz_text_bytes < 4096 ? fuzz_text_bytes : 4096;
    memset(fuzz_text, 0, sizeof fuzz_text);
    for (size_t i = 0; i < fuzz_text_bytes; i++) {
        fuzz_text[i] = data[i] == '\n' ? 0 : (char)data[i];
    }
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
    fuzz_lines(data, size);
    fuzz_live = 0;
    fuzz_fail_in = fuzz_number("nomem");
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

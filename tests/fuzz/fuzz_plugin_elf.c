/* libFuzzer target: what is looked at in a plugin's file before it is opened. A file that passes has all its segments
 * inside, whatever it says of itself: dlopen maps them, and what lies behind the end of a file ends the process.
 * Input: the file; its last byte cuts some off what the size says it has.
 * campaign: parser max_len=1024 */
#include "fuzz.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static const uint8_t *fuzz_file;
static size_t fuzz_bytes;

/* As of a regular file. */
FUZZ_QUIET static ssize_t fuzz_pread(void *out, size_t bytes, off_t at) {
    if (at < 0) {
        return -1;
    }
    size_t have = (size_t)at < fuzz_bytes ? fuzz_bytes - (size_t)at : 0;
    bytes = bytes < have ? bytes : have;
    if (bytes > 0) {
        memcpy(out, fuzz_file + at, bytes);
    }
    return (ssize_t)bytes;
}

#define pread(fd, out, bytes, at) fuzz_pread(out, bytes, at)
#include "src/loader/check.h"

FUZZ_QUIET static void fuzz_inside(void) {
    Elf64_Ehdr head;
    REQUIRE(fuzz_bytes >= sizeof head);
    memcpy(&head, fuzz_file, sizeof head);
    for (size_t i = 0; i < head.e_phnum; i++) {
        Elf64_Phdr p;
        unsigned __int128 at = (unsigned __int128)head.e_phoff + i * sizeof p;
        REQUIRE(at + sizeof p <= fuzz_bytes);
        memcpy(&p, fuzz_file + (size_t)at, sizeof p);
        REQUIRE(p.p_type == PT_NULL || (unsigned __int128)p.p_offset + p.p_filesz <= fuzz_bytes);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char line[DDL__PLUGIN_REASON_BYTES], name[DDL__PLUGIN_NAME_BYTES], path[300];
    ddl__text reason = {line, sizeof line, 0};
    fuzz_file = data;
    fuzz_bytes = size > 0 && data[size - 1] < size ? size - data[size - 1] : size;
    if (ddl__plugin_check_elf(3, fuzz_bytes, &reason) == DDL__PLUGIN_USABLE) {
        fuzz_inside();
    } else {
        REQUIRE(reason.used > 0 && strnlen(line, sizeof line) < sizeof line);
    }
    size_t bytes = size < sizeof path - 1 ? size : sizeof path - 1;
    if (bytes > 0) {
        memcpy(path, data, bytes);
    }
    path[bytes] = 0;
    if (ddl__plugin_name_of(path, name)) {
        REQUIRE(strlen(name) < sizeof name && strchr(name, '/') == NULL && strstr(path, name) != NULL);
    }
    return 0;
}

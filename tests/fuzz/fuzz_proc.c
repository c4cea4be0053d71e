/* libFuzzer target: what the kernel tells as text: processes, quotas and limits of control groups, who listens on a port.
 * Input: byte 0 says which of them; then the text.
 * campaign: parser max_len=512 */
#include "fuzz.h"

#include "src/store/address.h"

/* Copies the text so that it ends where an array does. */
FUZZ_QUIET static char *fuzz_text(const uint8_t *data, size_t size) {
    static char room[513];
    size_t bytes = DDL__MIN(size, sizeof room - 1);
    char *text = room + sizeof room - 1 - bytes;
    if (bytes > 0) {
        memcpy(text, data, bytes);
    }
    return text;
}

static void fuzz_process(char *text) {
    ddl__process p;
    size_t bytes = strlen(text);
    if (ddl__process_parse(text, &p)) {
        REQUIRE(p.name > text && p.name + strlen(p.name) < text + bytes && p.name[-1] == '(' && p.state != 0);
    }
}

static void fuzz_quota(char *text) {
    int32_t cores = ddl__quota_parse(text, text + strcspn(text, " "));
    REQUIRE(cores >= 1);
}

static void fuzz_group(char *text) {
    char path[64];
    static const char *const controllers[2] = {",,", ",cpu,"};
    for (int i = 0; i < 2; i++) {
        if (ddl__cgroup_path(text, controllers[i], path, sizeof path)) {
            size_t bytes = strlen(path);
            REQUIRE(bytes < sizeof path && strchr(path, '\n') == NULL && strstr(text, path) != NULL);
        }
    }
}

/* Of a line limit, used, and the rest of memory.stat. */
static void fuzz_memory(char *text) {
    char *used = text + strcspn(text, " ");
    uint64_t left = ddl__memory_left_parse(text, used, used + strcspn(used, "\n"));
    REQUIRE(left == UINT64_MAX || left < (uint64_t)1 << 60);
}

static void fuzz_listener(char *text) {
    unsigned long inode = 0;
    unsigned uid = 0;
    if (ddl__listener_parse(text, 0x1F90, &inode, &uid)) {
        REQUIRE(strstr(text, "1F90") != NULL || strstr(text, "1f90") != NULL);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static void (*const parse[5])(char *) = {fuzz_process, fuzz_quota, fuzz_group, fuzz_listener, fuzz_memory};
    if (size > 0) {
        parse[data[0] & 4 ? 4 : data[0] & 3](fuzz_text(data + 1, size - 1));
    }
    return 0;
}

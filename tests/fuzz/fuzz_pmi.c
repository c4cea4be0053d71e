/* libFuzzer target: what a launcher answers: a line of PMI-1, a value of PMIx, and the word of rank 0 in either.
 * Input: byte 0, bits 0-2: which command the line answers; bits 3-4: the type of the PMIx value, and whether it is there;
 * then the line, to its end or its first zero.
 * campaign: parser max_len=700 */
#include "fuzz.h"

#include "src/store/launcher.h"

static const char *const answers[8] = {"response_to_init", "my_kvsname", "put_result", "barrier_out",
                                       "get_result", "get_result", "get_result", "get_result"};

/* The value of a word, by cutting the line at blanks. -1: there is none; else its length, of which at most cap - 1 are in
 * out. */
FUZZ_QUIET static int fuzz_plain_word(const char *line, const char *key, char *out, size_t cap) {
    size_t i = 0, wanted = strlen(key);
    while (line[i] != 0) {
        size_t end = i;
        while (line[end] != 0 && line[end] != ' ') {
            end++;
        }
        size_t equal = i;
        while (equal < end && line[equal] != '=') {
            equal++;
        }
        if (equal < end && equal - i == wanted && memcmp(line + i, key, wanted) == 0) {
            size_t bytes = end - equal - 1;
            memcpy(out, line + equal + 1, bytes < cap ? bytes : cap - 1);
            out[bytes < cap ? bytes : cap - 1] = 0;
            return (int)bytes;
        }
        i = line[end] == ' ' ? end + 1 : end;
    }
    return -1;
}

/* A word of rank 0 character by character; false: it is none. */
FUZZ_QUIET static bool fuzz_plain_rank0(const char *text, size_t *host_bytes, int *port, bool *secret) {
    if (memcmp(text, "ddl1/", strlen(text) < 5 ? strlen(text) + 1 : 5) != 0) {
        return false;
    }
    const char *at = text + 5;
    while (*at > ' ' || *at < 0) {
        if (*at == '/' || *at == 127) {
            break;
        }
        at++;
    }
    *host_bytes = (size_t)(at - text - 5);
    if (*at != '/' || *host_bytes == 0 || *host_bytes > 255) {
        return false;
    }
    int digits = 0;
    *port = 0;
    for (at++; *at >= '0' && *at <= '9'; at++, digits++) {
        *port = *port < 100000 ? *port * 10 + *at - '0' : *port;
    }
    if (*at != '/' || digits == 0 || digits > 7 || *port < 1 || *port > 65535) {
        return false;
    }
    at++;
    *secret = strcmp(at, "-") != 0;
    size_t hex = strspn(at, "0123456789abcdef");
    return !*secret || (hex == 64 && at[64] == 0);
}

static void fuzz_word(const char *text) {
    ddl__word word, again;
    char written[DDL__WORD_BYTES];
    size_t host_bytes = 0;
    int port = 0;
    bool secret = false, good = ddl__word_read(text, &word);
    REQUIRE(good == fuzz_plain_rank0(text, &host_bytes, &port, &secret));
    if (!good) {
        return;
    }
    REQUIRE(strlen(word.host) == host_bytes && memcmp(word.host, text + 5, host_bytes) == 0);
    REQUIRE(word.port == port && word.has_secret == secret);
    fuzz_clean(word.host, sizeof word.host);
    ddl__word_write(&word, written, sizeof written);
    REQUIRE(ddl__word_read(written, &again) && memcmp(&word, &again, sizeof word) == 0);
}

static void fuzz_line(const char *line, size_t bytes, const char *answer) {
    static ddl__pmi pmi;
    ddl__sentence why = {.text = ""};
    char value[DDL__WORD_BYTES], plain[DDL__WORD_BYTES] = "", rc[16] = "";
    memset(&pmi, 0, sizeof pmi);
    pmi.why = &why;
    pmi.by = "fuzz";
    memcpy(pmi.line, line, bytes + 1);
    bool right = fuzz_plain_word(line, "cmd", plain, sizeof plain) >= 0 && strcmp(plain, answer) == 0;
    int rc_bytes = fuzz_plain_word(line, "rc", rc, sizeof rc);
    right = right && (rc_bytes < 0 || rc_bytes >= (int)sizeof rc || strcmp(rc, "0") == 0);
    ddl_status status = ddl__pmi_check(&pmi, answer, "cmd=ask\n");
    REQUIRE((status == DDL_OK) == right && (right || status == DDL_ERR_CONFIG));
    if (!right) {
        for (char *at = why.text; *at != 0; at++) {
            *at = *at == '\n' ? ' ' : *at; /* of our own command */
        }
        fuzz_clean(why.text, sizeof why.text);
        return;
    }
    int length = fuzz_plain_word(line, "value", plain, sizeof plain);
    bool there = ddl__pmi_word(pmi.line, "value", value, sizeof value);
    REQUIRE(there == (length >= 0 && length < (int)sizeof value));
    if (there) {
        REQUIRE(strcmp(value, plain) == 0);
        fuzz_word(value);
    }
}

static void fuzz_pmix(const char *text, uint8_t how) {
    char line[1024], out[DDL__WORD_BYTES] = "untouched";
    ddl__pmix_value value = {.type = how == 0 ? DDL__PMIX_STRING : (uint16_t)how};
    snprintf(line, sizeof line, "%s", text);
    value.data.string = how == 3 ? NULL : line;
    bool good = ddl__pmix_take(how == 2 ? NULL : &value, out, sizeof out);
    REQUIRE(good == (how == 0 && strlen(line) < sizeof out)); /* how 3: its type is right, its text is not there */
    if (good) {
        REQUIRE(strcmp(out, text) == 0);
        fuzz_word(out);
    } else {
        REQUIRE(strcmp(out, "untouched") == 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static char line[1024];
    if (size < 1 || size - 1 >= sizeof line) {
        return 0;
    }
    memcpy(line, data + 1, size - 1);
    line[size - 1] = 0;
    size_t bytes = strlen(line);
    fuzz_line(line, bytes, answers[data[0] & 7]);
    fuzz_pmix(line, data[0] >> 3 & 3);
    return 0;
}

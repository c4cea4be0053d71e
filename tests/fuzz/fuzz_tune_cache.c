/* libFuzzer target: the file of DDL_TUNE_CACHE, a line at a time as it is read.
 * Input: a line; its bytes are also the key and the figures of a line that is written.
 * campaign: parser max_len=160 */
#include "fuzz.h"

#include "src/tune.h"

FUZZ_QUIET static void fuzz_figures_sound(const double figures[4]) {
    for (int i = 0; i < 4; i++) {
        REQUIRE(figures[i] >= DDL__FIGURE_MIN && figures[i] <= DDL__FIGURE_MAX);
    }
}

/* With any figures that are let in, a call finds an algorithm, cut into pieces that are in range. */
static void fuzz_choose(const double figures[4], uint64_t key) {
    ddl__tuning tuning = {.model = ddl__model_default};
    tuning.model.latency_s[0] = figures[0];
    tuning.model.s_per_byte[0] = figures[1];
    tuning.model.latency_s[1] = figures[2];
    tuning.model.s_per_byte[1] = figures[3];
    tuning.model.message_s = figures[0] / 2;
    ddl__plan_args args = {.kind = (ddl_kind)(DDL_BARRIER + key % (DDL_EXSCAN - DDL_BARRIER + 1)),
                           .size = (int32_t)(key >> 8 & 63) + 1,
                           .element_bytes = 4,
                           .count = (int64_t)(key >> 16 & 0xffffff),
                           .commutative = true,
                           .chunk_bytes = 1};
    ddl__choice choice = ddl__tune_choose(&tuning, &args);
    REQUIRE(choice.algo != NULL && choice.chunk_bytes > 0 && choice.seconds >= 0);
}

/* What is let in is written back so that it reads the same; the digits that are kept are those of noise. */
static void fuzz_again(uint64_t key, const double figures[4]) {
    char line[160], again[160];
    uint64_t read_key;
    double read[4];
    size_t bytes = ddl__model_write(line, sizeof line, key, figures);
    REQUIRE(bytes < sizeof line && ddl__model_parse(line, &read_key, read) && read_key == key);
    fuzz_figures_sound(read);
    for (int i = 0; i < 4; i++) {
        REQUIRE(read[i] >= figures[i] * (1 - 1e-8) && read[i] <= figures[i] * (1 + 1e-8));
    }
    REQUIRE(ddl__model_write(again, sizeof again, read_key, read) == bytes && memcmp(line, again, bytes) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static char line[161];
    fuzz_input in = {data, data + size};
    uint64_t key;
    double figures[4];
    size_t bytes = DDL__MIN(size, sizeof line - 1);
    char *text = line + sizeof line - 1 - bytes; /* ends where the array does */
    if (bytes > 0) {
        memcpy(text, data, bytes);
    }
    if (ddl__model_parse(text, &key, figures)) {
        fuzz_figures_sound(figures);
        fuzz_again(key, figures);
        fuzz_choose(figures, key);
    }
    key = fuzz_int(&in, 8);
    for (int i = 0; i < 4 && size > 32; i++) {
        uint64_t bits = fuzz_int(&in, 8);
        memcpy(&figures[i], &bits, sizeof bits);
        figures[i] = figures[i] >= DDL__FIGURE_MIN && figures[i] <= DDL__FIGURE_MAX ? figures[i] : 1e-6;
    }
    if (size > 32 && data[size - 1] == '#') {
        fuzz_again(key, figures);
    }
    return 0;
}

/* Joining: what other ranks say about themselves is read before it is used, whoever passed it on; measured figures are
 * kept in a file, and a damaged file is measured again.
 * tests/run: variants=asan timeout=60 */
#define DDL_IMPLEMENTATION
#include "world.h"

/* ---- the table of what all ranks are ---- */

enum { RANKS = 2 };

/* The table comes back bent to each rank. */
typedef struct bend {
    int line; /* whose */
    size_t at, bytes;
    const void *data;
    const char *text; /* of the sentence */
    ddl_status status;
} bend;

typedef struct meeting {
    pthread_barrier_t all;
    const bend *bend;
    unsigned char *table;
} meeting;

typedef struct member {
    meeting *in;
    int rank;
} member;

static int pass_on(void *user, const void *in, void *out, size_t bytes) {
    member *m = user;
    const bend *b = m->in->bend;
    memcpy(m->in->table + (size_t)m->rank * bytes, in, bytes);
    pthread_barrier_wait(&m->in->all);
    memcpy(out, m->in->table, RANKS * bytes);
    memcpy((unsigned char *)out + (size_t)b->line * bytes + b->at, b->data, b->bytes);
    return 0;
}

static void keep_sentence(void *user, ddl_log_level level, const char *line) {
    (void)level;
    snprintf(user, 2000, "%s", line);
}

static void *join(void *arg) {
    member *m = arg;
    const bend *b = m->in->bend;
    char said[2000] = "";
    ddl_config config = {.world_size = RANKS,
                         .rank = m->rank,
                         .exchange = pass_on,
                         .exchange_user = m,
                         .init_timeout_ms = 20000,
                         .log = keep_sentence,
                         .log_user = said,
                         .log_level = DDL_LOG_WARN};
    ddl_context *c = NULL;
    CHECK_STR(ddl_status_name(ddl_init(&config, &c)), ddl_status_name(b->status));
    CHECK(c == NULL);
    CHECK_STR(said, b->text);
    CHECK(strpbrk(said, "\33\n") == NULL);
    return NULL;
}

static void meet(const bend *b) {
    meeting in = {.bend = b, .table = calloc(RANKS, DDL__BLOB_BYTES)};
    member members[RANKS];
    pthread_t threads[RANKS];
    pthread_barrier_init(&in.all, NULL, RANKS);
    for (int r = 0; r < RANKS; r++) {
        members[r] = (member){&in, r};
        pthread_create(&threads[r], NULL, join, &members[r]);
    }
    for (int r = 0; r < RANKS; r++) {
        pthread_join(threads[r], NULL);
    }
    pthread_barrier_destroy(&in.all);
    free(in.table);
}

static char endless[DDL__BLOB_BYTES];

/* On each rank one of the two lines is its own, which came back from another. */
TEST(a_damaged_line_of_the_table_is_an_error) {
    enum { VERSION = 4, CORES = 12 }; /* where they are in a blob */
    static const int32_t none = 0, huge = INT32_MAX;
    memset(endless, 'A', sizeof endless);
    const bend bends[] = {
        {0, 0, 1, "x", "rank %d told about itself is damaged", DDL_ERR_CORRUPT},
        {0, DDL__BLOB_AT_HOST, 64, endless, "rank %d told about itself is damaged", DDL_ERR_CORRUPT},
        {0, DDL__BLOB_AT_HOST + 64, 32, endless, "rank %d told about itself is damaged", DDL_ERR_CORRUPT},
        {0, CORES, 4, &none, "rank %d told about itself is damaged", DDL_ERR_CORRUPT},
        {0, CORES, 4, &huge, "rank %d told about itself is damaged", DDL_ERR_CORRUPT},
        {0, VERSION, 4, &huge, "rank %d uses ddl", DDL_ERR_VERSION},
    };
    for (size_t i = 0; i < DDL__COUNT_OF(bends); i++) {
        for (int line = 0; line < RANKS; line++) {
            char text[100];
            bend b = bends[i];
            snprintf(text, sizeof text, "%s", b.text);
            char *number = strstr(text, "%d");
            memmove(number + 1, number + 2, strlen(number + 2) + 1);
            number[0] = (char)('0' + line);
            b.line = line;
            b.text = text;
            meet(&b);
        }
    }
}

/* ---- DDL_TUNE_CACHE ---- */

static char cache[100];

static void nothing(ddl_group *w, void *arg) {
    (void)arg;
    OK(ddl_barrier(w));
}

/* The file's lines after a job of two ranks. */
static int lines_after_a_job(void) {
    char line[200];
    int count = 0;
    world_threads(2, nothing, NULL);
    FILE *file = fopen(cache, "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        count++;
    }
    if (file != NULL) {
        fclose(file);
    }
    return count;
}

static void cache_write(const char *text) {
    FILE *file = fopen(cache, "w");
    CHECK(file != NULL && fputs(text, file) >= 0 && fclose(file) == 0);
}

TEST(figures_are_measured_once_and_kept) {
    snprintf(cache, sizeof cache, "/tmp/ddl-test-tune-%ld", (long)getpid());
    setenv("DDL_TUNE_CACHE", cache, 1);
    (void)unlink(cache);
    CHECK_EQ(lines_after_a_job(), 1);
    CHECK_EQ(lines_after_a_job(), 1);
    /* Lines before it that make no sense are passed over, and so are figures that are none. */
    char good[200], text[600];
    FILE *file = fopen(cache, "r");
    REQUIRE(file != NULL && fgets(good, sizeof good, file) != NULL);
    fclose(file);
    snprintf(text, sizeof text, "what is this\n%.16s nan 1 1 1\n%.16s 1e-320 1 1 1\n%s", good, good, good);
    cache_write(text);
    CHECK_EQ(lines_after_a_job(), 4);
    snprintf(text, sizeof text, "%.*s inf 1 1 1\n", (int)strcspn(good, " "), good);
    cache_write(text);
    CHECK_EQ(lines_after_a_job(), 2);
    CHECK_EQ(lines_after_a_job(), 2);
    unsetenv("DDL_TUNE_CACHE");
    (void)unlink(cache);
}

TEST(lines_of_figures_are_read_strictly) {
    static const char *const wrong[] = {"", "\n", "1", "1 1 1 1\n", "1 1 1 1 1 1\n", " 1 1 1 1 1\n", "-1 1 1 1 1\n",
                                        "0x1 1 1 1 1\n", "12345678123456781 1 1 1 1\n", "1 0 1 1 1\n",
                                        "1 -1 1 1 1\n", "1 1 nan 1 1\n", "1 1 1 inf 1\n", "1 1 1 1 1e-13\n",
                                        "1 1 1 1 1e8\n", "1,1,1,1,1\n", "1 1 1 1 1x\n"};
    uint64_t key;
    double f[4];
    for (size_t i = 0; i < DDL__COUNT_OF(wrong); i++) {
        CHECK(!ddl__model_parse(wrong[i], &key, f));
    }
    CHECK(ddl__model_parse("ff01 1e-12 1e7 0.5 2.5e-06\n", &key, f));
    CHECK_EQ(key, 0xff01);
    CHECK(f[0] == 1e-12 && f[1] == 1e7 && f[2] == 0.5 && f[3] == 2.5e-06);
}

/* ---- descriptors that the program has closed ---- */

/* What it prints goes nowhere, and not into what ddl has opened meanwhile. */
static void without_standard(int rank, int n, void *arg) {
    ddl_context *c = NULL;
    float ones[100];
    (void)rank;
    (void)arg;
    for (int fd = 0; fd <= 2; fd++) {
        close(fd);
    }
    REQUIRE(ddl_init(NULL, &c) == DDL_OK);
    for (int fd = 0; fd <= 2; fd++) {
        char path[40], at[100] = "";
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        CHECK(readlink(path, at, sizeof at - 1) > 0);
        CHECK_STR(at, "/dev/null");
    }
    for (int round = 0; round < 20; round++) {
        for (int i = 0; i < 100; i++) {
            ones[i] = 1;
        }
        CHECK_EQ(ddl_all_reduce(ddl_world(c), DDL_ARRAY(ones), DDL_ARRAY(ones), DDL_SUM), DDL_OK);
        CHECK(ones[99] > (float)n - 0.5f && ones[99] < (float)n + 0.5f);
        printf("a line of the program's\n");
        fflush(stdout);
        fprintf(stderr, "eight b\n");
    }
    CHECK_EQ(ddl_finalize(&c), DDL_OK);
}

TEST(closed_standard_descriptors_are_not_taken) { ranks_fork(3, without_standard, NULL, 40); }

/* Makes tests/fuzz/corpus/frames: four honest ranks, as threads, do something together, and what rank 1 called and what
 * reached it is written down as an input of fuzz_frames.
 *     clang -std=c11 -O1 -g -fsanitize=address -I. tests/fuzz/record_frames.c -o record -lpthread -ldl
 *     ./record tests/fuzz/corpus/frames
 * To be run again when the frames change; inputs with other names in that folder were found by fuzzing and stay. */
#define FUZZ_NO_MAIN 1
#include "fuzz_frames.c"

#include <pthread.h>
#include <stdio.h>

/* One call: of the ranks in mask, with the bytes of an operation. */
typedef struct call {
    unsigned mask;
    uint8_t op[12];
    size_t bytes;
} call;

typedef struct letter {
    struct letter *next;
    int32_t from;
    uint8_t header[DDL__FRAME_BYTES];
    size_t bytes;
    uint8_t payload[];
} letter;

static fuzz ranks[WORLD];
static letter *inbox[WORLD];
static pthread_mutex_t post = PTHREAD_MUTEX_INITIALIZER;
static const call *calls;
static size_t call_count;
static uint8_t tape[1 << 16]; /* of rank 1 */
static size_t tape_bytes;
static const char *folder;

static void tape_add(uint64_t value, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        REQUIRE(tape_bytes < sizeof tape);
        tape[tape_bytes++] = (uint8_t)(value >> (8 * i));
    }
}

static void record_route(fuzz *f, int32_t peer, const ddl_message *m) {
    letter *l = malloc(sizeof *l + m->payload_bytes);
    *l = (letter){.from = f->rank, .bytes = m->payload_bytes};
    memcpy(l->header, m->header, sizeof l->header);
    if (m->payload_bytes > 0) {
        memcpy(l->payload, m->payload, m->payload_bytes);
    }
    pthread_mutex_lock(&post);
    letter **end = &inbox[peer];
    while (*end != NULL) {
        end = &(*end)->next;
    }
    *end = l;
    pthread_mutex_unlock(&post);
}

/* As op_deliver reads it. Of long payloads only the length is kept. */
static void record_frame(const letter *l) {
    ddl__frame frame;
    REQUIRE(ddl__frame_read(l->header, &frame) == DDL_OK && l->bytes <= UINT16_MAX);
    bool pattern = l->bytes > 64;
    tape_add(OP_DELIVER, 1);
    tape_add((uint64_t)(l->from - (l->from > 1)) | (l->bytes > 1000 ? 4u : 0u) | (pattern ? 64u : 0u), 1);
    tape_add(l->bytes, 2);
    tape_add(frame.type, 1);
    tape_add(frame.flags, 2);
    tape_add(frame.group, 4);
    tape_add(frame.epoch, 4);
    tape_add(frame.sequence, 8);
    tape_add(frame.signature, 8);
    for (size_t i = 0; i < l->bytes && !pattern; i++) {
        tape_add(l->payload[i], 1);
    }
}

static int record_step(fuzz *f) {
    pthread_mutex_lock(&post);
    letter *l = inbox[f->rank];
    inbox[f->rank] = l != NULL ? l->next : NULL;
    pthread_mutex_unlock(&post);
    if (l == NULL) {
        usleep(20);
        return 1; /* the clock stands still */
    }
    if (f->rank == 1) {
        record_frame(l);
    }
    uint8_t *copy = malloc(l->bytes + 1); /* aligned as the payload would be */
    memcpy(copy, l->payload, l->bytes);
    REQUIRE(f->host->deliver(f->host, l->from, l->header, copy, l->bytes) == DDL_OK);
    free(copy);
    free(l);
    return 1;
}

static void *record_rank(void *arg) {
    fuzz *f = arg;
    for (size_t i = 0; i < call_count; i++) {
        const call *k = &calls[i];
        if ((k->mask >> f->rank & 1) == 0) {
            continue;
        }
        for (size_t b = 0; f->rank == 1 && b < k->bytes; b++) {
            tape_add(k->op[b], 1);
        }
        f->in = (fuzz_input){k->op + 1, k->op + k->bytes};
        fuzz_api_op(f, k->op[0]);
    }
    return NULL;
}

/* The tape alone does the same to a rank as the peers did. */
static void replay(const ddl_stats *then) {
    static fuzz f;
    ddl_stats now;
    memset(&f, 0, sizeof f);
    f.in = (fuzz_input){tape, tape + tape_bytes};
    f.step = fuzz_step;
    fuzz_budget = PAYLOAD_MAX;
    fuzz_world_make(&f, 1);
    fuzz_script(&f);
    REQUIRE(ddl_stats_get(f.c, &now) == DDL_OK && then->ops_completed > 0 && now.ops_failed == 0);
    REQUIRE(now.ops_completed == then->ops_completed && now.bytes_received == then->bytes_received);
    fuzz_world_end(&f);
}

static void record(const char *name, const call *list, size_t count) {
    pthread_t threads[WORLD];
    char path[512];
    calls = list;
    call_count = count;
    tape_bytes = 0;
    fuzz_clock_ns = 1000 * DDL__NS_PER_S;
    for (int32_t i = 0; i < WORLD; i++) {
        memset(&ranks[i], 0, sizeof ranks[i]);
        fuzz_world_make(&ranks[i], i);
        ranks[i].step = record_step;
        ranks[i].route = record_route;
    }
    for (int32_t i = 0; i < WORLD; i++) {
        pthread_create(&threads[i], NULL, record_rank, &ranks[i]);
    }
    for (int32_t i = 0; i < WORLD; i++) {
        pthread_join(threads[i], NULL);
    }
    ddl_stats stats;
    REQUIRE(ddl_stats_get(ranks[1].c, &stats) == DDL_OK);
    for (int32_t i = 0; i < WORLD; i++) {
        ranks[i].step = NULL;
        fuzz_world_end(&ranks[i]);
    }
    for (int32_t i = 0; i < WORLD; i++) {
        while (inbox[i] != NULL) {
            letter *l = inbox[i];
            inbox[i] = l->next;
            free(l);
        }
    }
    replay(&stats);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    REQUIRE(file != NULL && fwrite(tape, 1, tape_bytes, file) == tape_bytes && fclose(file) == 0);
    printf("%s: %zu bytes\n", path, tape_bytes);
}

#define CALL(mask, ...)                                                                                                \
    { mask, {__VA_ARGS__}, sizeof((uint8_t[]){__VA_ARGS__}) }
#define RECORD(name, ...)                                                                                              \
    do {                                                                                                               \
        const call list_[] = {__VA_ARGS__};                                                                            \
        record(name, list_, DDL__COUNT_OF(list_));                                                                     \
    } while (0)

/* Each algorithm, for the plain form of its operation and the v-form, where there is one. */
static void record_collectives(void) {
    for (uint8_t a = 0; a < DDL__COUNT_OF(ddl__algos); a++) {
        for (uint8_t kind = DDL_BARRIER; kind <= DDL_ALL_TO_ALLV; kind++) {
            char name[80];
            if (ddl__kind_base((ddl_kind)kind) != ddl__algos[a].kind) {
                continue;
            }
            snprintf(name, sizeof name, "%s_%s", ddl__kind_name((ddl_kind)kind), ddl__algos[a].name);
            for (char *at = name; *at != 0; at++) {
                *at = *at == ' ' || *at == '/' ? '_' : *at;
            }
            uint8_t how = (uint8_t)(a << 2), op = DDL_SUM;
            RECORD(name, CALL(15, OP_COLL, 0, kind, DDL_F32, op, 3, 40, 0, how), CALL(15, OP_WAIT, 0));
        }
    }
}

int main(int argc, char **argv) {
    REQUIRE(argc == 2);
    folder = argv[1];
    record_collectives();
    RECORD("all_reduce_long", CALL(15, OP_COLL, 0, DDL_ALL_REDUCE, DDL_I64, DDL_MAX, 0, 0, 0x1f, 1),
           CALL(15, OP_WAIT, 0));
    RECORD("user_op", CALL(15, OP_COLL, 0, DDL_ALL_REDUCE, DDL_F32, DDL_MAX_INDEX + 1, 0, 11, 0, 0),
           CALL(15, OP_WAIT, 0));
    RECORD("scaled", CALL(15, OP_COLL, 0, DDL_ALL_REDUCE, DDL_F32, DDL_MAX_INDEX + 2, 0, 11, 0, 0),
           CALL(15, OP_WAIT, 0));
    RECORD("group_of_three", CALL(11, OP_COLL, 1, DDL_ALL_REDUCE, DDL_F16, DDL_SUM, 0, 9, 0, 0),
           CALL(11, OP_WAIT, 0));
    RECORD("many", CALL(15, OP_MANY, 0, DDL_SUM, 5, 70), CALL(15, OP_WAIT, 0));
    RECORD("two_at_once", CALL(15, OP_COLL, 0, DDL_ALL_GATHER, DDL_U8, 0, 0, 5, 0, 0),
           CALL(15, OP_COLL, 0, DDL_SCAN, DDL_I32, DDL_SUM, 0, 5, 0, 0), CALL(15, OP_WAIT, 0), CALL(15, OP_WAIT, 1));
    RECORD("eager", CALL(2, OP_RECV, 0, 1, 2, DDL_F32, 8, 0), CALL(1, OP_SEND, 0, 2, 2, DDL_F32, 8, 0),
           CALL(3, OP_WAIT, 0));
    RECORD("unexpected", CALL(13, OP_SEND, 0, 2, 1, DDL_U8, 9, 0), CALL(13, OP_WAIT, 0), CALL(15, OP_BLOCK, 0, 0, 0),
           CALL(2, OP_RECV, 0, 1, 0, DDL_U8, 9, 0), CALL(2, OP_WAIT, 0), CALL(2, OP_RECV, 0, 4, 1, DDL_U8, 20, 0),
           CALL(2, OP_WAIT, 0), CALL(2, OP_BLOCK, 5, 0, 0));
    RECORD("rendezvous_in", CALL(2, OP_RECV, 0, 3, 1, DDL_F32, 0, 0x28), CALL(4, OP_SEND, 0, 2, 1, DDL_F32, 0, 0x28),
           CALL(6, OP_WAIT, 0));
    RECORD("rendezvous_out", CALL(2, OP_SEND, 0, 4, 1, DDL_F32, 0, 0x28), CALL(8, OP_RECV, 0, 2, 1, DDL_F32, 0, 0x28),
           CALL(10, OP_WAIT, 0));
    RECORD("barrier_agree", CALL(15, OP_BLOCK, 0, 0, 0), CALL(15, OP_BLOCK, 1, 0, 7), CALL(11, OP_BLOCK, 1, 1, 3));
    RECORD("shrink", CALL(15, OP_BLOCK, 2, 0, 0), CALL(15, OP_BLOCK, 7, 2, 5));
    RECORD("create", CALL(11, OP_BLOCK, 3, 0, 0), CALL(11, OP_BLOCK, 7, 2, 5), CALL(11, OP_GROUP, 1));
    RECORD("create_lead", CALL(6, OP_BLOCK, 3, 0, 1), CALL(6, OP_BLOCK, 0, 2, 5));
    RECORD("split", CALL(15, OP_BLOCK, 4, 0, 1), CALL(15, OP_BLOCK, 1, 2, 5));
    return 0;
}

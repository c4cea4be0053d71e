/* test_shm_copy: the copies of plugins/shm/copy.h, and the core's of what they left (src/p2p/copy.h), against a plain loop,
 * at every distance of source and destination within a page where one way ends and another begins, around every size
 * where it does; not a byte beside them is touched. */
#include "test.h"

#include "../src/p2p/copy.h"

#include "../plugins/shm/copy.h"

enum { MOST = 9000, GUARD = 128, PAGE = 4096 };

static _Alignas(4096) uint8_t source[MOST + 3 * PAGE], target[MOST + 3 * PAGE];

static void past(void *to, const void *from, uint64_t bytes) { shm_copy_past(to, from, bytes); }
static void over(void *to, const void *from, uint64_t bytes) { shm_copy_over(to, from, bytes, shm_copies_strings()); }
static void plain(void *to, const void *from, uint64_t bytes) { shm_memcpy(to, from, bytes); }

static void fresh(void *to, const void *from, uint64_t bytes) { ddl__copy_fresh(to, from, bytes); }

static int wrong_bytes(void (*copy)(void *, const void *, uint64_t), size_t to, size_t from, size_t bytes) {
    int wrong = 0;
    memset(target, 0xee, sizeof target);
    copy(target + to, source + from, bytes);
    for (size_t i = 0; i < GUARD; i++) {
        wrong += (target[to - 1 - i] != 0xee) + (target[to + bytes + i] != 0xee);
    }
    for (size_t i = 0; i < bytes; i++) {
        wrong += target[to + i] != source[from + i];
    }
    return wrong;
}

static void at_all_distances(void (*copy)(void *, const void *, uint64_t)) {
    static const size_t sizes[] = {0, 1, 63, 64, 65, 2047, 2048, 2049, 2111, 2112, 4096, 4097, 8191, MOST};
    for (size_t i = 0; i < sizeof source; i++) {
        source[i] = (uint8_t)(i * 7 + i / 251); /* never 0xee for long */
    }
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        for (size_t from = 0; from < 64; from += 9) {
            for (size_t distance = 0; distance < 70; distance++) {
                CHECK_EQ(wrong_bytes(copy, PAGE + from + distance, PAGE + from, sizes[s]), 0);
                CHECK_EQ(wrong_bytes(copy, PAGE + from, PAGE + from + distance, sizes[s]), 0);
            }
        }
    }
}

TEST(a_copy) { at_all_distances(plain); }

TEST(a_copy_past_the_caches) { at_all_distances(past); }

TEST(a_copy_over_lines_of_another_core) { at_all_distances(over); }

TEST(a_copy_of_what_a_peer_has_written) { at_all_distances(fresh); }

/* Beyond it the core's copy is memcpy. */
TEST(a_copy_of_the_largest_that_goes_by_lines) {
    enum { LARGEST = DDL__FRESH_MOST + 200 };
    uint8_t *from = malloc(LARGEST), *to = malloc(LARGEST + 1);
    for (size_t bytes = DDL__FRESH_MOST - 1; bytes <= DDL__FRESH_MOST + 65; bytes += 33) {
        for (size_t i = 0; i < LARGEST; i++) {
            from[i] = (uint8_t)(i * 7 + i / 251 + bytes);
        }
        memset(to, 0xee, LARGEST + 1);
        ddl__copy_fresh(to + 1, from, bytes);
        CHECK(memcmp(to + 1, from, bytes) == 0 && to[0] == 0xee && to[bytes + 1] == 0xee);
    }
    free(from);
    free(to);
}

TEST(where_strings_stumble) {
    static uint8_t *const page = source;
    CHECK(!shm_strings_stumble(page, page));
    CHECK(shm_strings_stumble(page + 1, page));
    CHECK(shm_strings_stumble(page + 16 + PAGE, page));
    CHECK(shm_strings_stumble(page + 16, page + PAGE));
    CHECK(shm_strings_stumble(page + 31, page));
    CHECK(!shm_strings_stumble(page + 32, page));
    CHECK(!shm_strings_stumble(page, page + 1));
}

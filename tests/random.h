/* random.h: bits for tests, the same in each run: xorshift64* (S. Vigna). */
#ifndef TEST_RANDOM_H
#define TEST_RANDOM_H

#include <stdint.h>

static uint64_t random_state = 88172645463325252u;
static uint64_t random_bits(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state * 2685821657736338717u;
}

#endif /* TEST_RANDOM_H */

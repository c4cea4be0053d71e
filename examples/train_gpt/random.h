/* random.h: random numbers that are a function of where they are used, not of how many were drawn before.
 *
 * A number is a hash of (seed, purpose, a, b). So a resumed run, or a run on another number of ranks, draws the same
 * ones. */
#ifndef RANDOM_H
#define RANDOM_H

#include <math.h>
#include <stdint.h>

enum random_purpose { RANDOM_WEIGHT = 1, RANDOM_WINDOW, RANDOM_SAMPLE };

/* splitmix64's finalizer (Steele, Lea and Flood 2014) applied to each word in turn. */
static uint64_t random_bits(uint64_t seed, enum random_purpose purpose, uint64_t a, uint64_t b) {
    const uint64_t words[4] = {seed, (uint64_t)purpose, a, b};
    uint64_t x = 0;
    for (int i = 0; i < 4; i++) {
        x += words[i] + 0x9e3779b97f4a7c15u;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        x ^= x >> 31;
    }
    return x;
}

/* In (0, 1): never 0, so that its logarithm is finite. */
static double random_unit(uint64_t seed, enum random_purpose purpose, uint64_t a, uint64_t b) {
    return ((double)(random_bits(seed, purpose, a, b) >> 11) + 0.5) * 0x1p-53;
}

/* Normal with deviation 1 (Box and Muller 1958). */
static double random_normal(uint64_t seed, enum random_purpose purpose, uint64_t a, uint64_t b) {
    double radius = sqrt(-2.0 * log(random_unit(seed, purpose, a, 2 * b)));
    return radius * cos(6.283185307179586 * random_unit(seed, purpose, a, 2 * b + 1));
}

#endif

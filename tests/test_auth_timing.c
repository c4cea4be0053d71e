/* How long a proof is looked at must not tell how much of it was right. Right and wrong ones by turns at random, timed,
 * and Welch's t of the two: |t| < 4.5 is the line that Reparaz, Balasch and Verbauwhede draw ("Dude, is my code constant
 * time?", DATE 2017). A comparison that stops at the first difference is measured the same way, and must be caught.
 * TEST_TORTURE takes 1,000,000 samples.
 * tests/run: variants=gcc timeout=120 libs=-lm */
#include "test.h"

#include "../src/wire/auth.h"

#include <math.h>

#define LINE 4.5
enum { BYTES = 32, REPEATS = 16, KEPT_PERCENT = 90, TRIES = 4 };

typedef int (*look_fn)(const uint8_t *expected, const uint8_t *proof);

typedef struct sample {
    double ns;
    int wrong;
} sample;

static ddl__auth conversation; /* with a MAC that is good behind the first 112 bytes */

static int by_ddl(const uint8_t *expected, const uint8_t *proof) { return ddl__ct_equal(expected, proof, BYTES); }

static int until_it_differs(const uint8_t *expected, const uint8_t *proof) {
    const volatile uint8_t *x = expected, *y = proof;
    for (int i = 0; i < BYTES; i++) {
        if (x[i] != y[i]) {
            return 0;
        }
    }
    return 1;
}

/* All that is done with a proof: the MAC is computed again, and compared. */
static int by_handshake(const uint8_t *expected, const uint8_t *proof) {
    (void)expected;
    memcpy(conversation.wire + 112, proof, BYTES);
    return ddl__auth_mac_ok(&conversation, &conversation.secret, "ddl1 server", 112);
}

static uint64_t draw(uint64_t *random) {
    *random = *random * 6364136223846793005u + 1442695040888963407u;
    return *random >> 33;
}

/* Both kinds take the same way through the same memory: a wrong proof is the right one with a mask over one byte. */
static void measure(look_fn volatile look, int repeats, const uint8_t *right, sample *out, long count) {
    static uint8_t proof[BYTES];
    uint64_t random = 20170327;
    volatile int sum = 0;
    for (long i = 0; i < count; i++) {
        uint8_t wrong = (uint8_t)(draw(&random) & 1), at = (uint8_t)(draw(&random) % 8);
        memcpy(proof, right, BYTES);
        proof[at] = (uint8_t)(proof[at] ^ (wrong * (1 + draw(&random) % 255)));
        uint64_t start = ddl__now_ns();
        for (int k = 0; k < repeats; k++) {
            sum += look(right, proof);
        }
        out[i].ns = (double)(ddl__now_ns() - start);
        out[i].wrong = wrong;
    }
}

static int by_time(const void *a, const void *b) {
    double x = ((const sample *)a)->ns, y = ((const sample *)b)->ns;
    return (x > y) - (x < y);
}

/* Of the fastest 90 %: what is longer was interrupted. */
static double welch_t(sample *s, long count) {
    double sum[2] = {0, 0}, squares[2] = {0, 0}, n[2] = {0, 0};
    qsort(s, (size_t)count, sizeof *s, by_time);
    for (long i = 0; i < count * KEPT_PERCENT / 100; i++) {
        sum[s[i].wrong] += s[i].ns;
        n[s[i].wrong]++;
    }
    double mean[2] = {sum[0] / n[0], sum[1] / n[1]}, error = 0;
    for (long i = 0; i < count * KEPT_PERCENT / 100; i++) {
        double off = s[i].ns - mean[s[i].wrong];
        squares[s[i].wrong] += off * off;
    }
    for (int k = 0; k < 2; k++) {
        error += squares[k] / (n[k] - 1) / n[k];
    }
    printf("  right %.1f ns, wrong %.1f ns", mean[0], mean[1]);
    return error > 0 ? (mean[0] - mean[1]) / sqrt(error) : mean[0] - mean[1] != 0 ? 1e9 : 0;
}

/* The smallest |t| of several tries: a leak is there each time, a hiccup of the machine is not. */
static double least_t(const char *name, look_fn look, int repeats, const uint8_t *right, long count) {
    sample *s = (sample *)malloc((size_t)count * sizeof *s);
    double least = 1e9;
    for (int i = 0; i < TRIES && least >= LINE; i++) {
        measure(look, repeats, right, s, count);
        double t = fabs(welch_t(s, count));
        printf(", |t| = %.2f: %s, %ld samples\n", t, name, count);
        least = t < least ? t : least;
    }
    free(s);
    return least;
}

TEST(a_proof_is_compared_in_one_time) {
    long count = getenv("TEST_TORTURE") != NULL ? 1000000 : 200000;
    uint8_t right[BYTES];
    ddl__hmac_key_init(&conversation.secret, "a secret of 24 bytes, or", 24);
    for (int i = 0; i < 112; i++) {
        conversation.wire[i] = (uint8_t)(i * 7);
    }
    ddl__auth_mac(&conversation, &conversation.secret, "ddl1 server", 112, right);
    uint8_t other[BYTES];
    memcpy(other, right, BYTES);
    CHECK_EQ(by_ddl(right, other) & until_it_differs(right, other) & by_handshake(right, other), 1);
    for (int i = 0; i < BYTES; i++) {
        other[i] ^= 0x40;
        CHECK_EQ(by_ddl(right, other) | until_it_differs(right, other) | by_handshake(right, other), 0);
        other[i] ^= 0x40;
    }
    CHECK(least_t("a comparison that stops", until_it_differs, REPEATS, right, count) > LINE);
    CHECK(least_t("ddl's comparison", by_ddl, REPEATS, right, count) < LINE);
    CHECK(least_t("the handshake's check of a MAC", by_handshake, 1, right, count) < LINE);
}

/* curve.h: what ssp.c and local_sgd.c measure, the loss over time of several ways to train, and how they draw it. */
#ifndef CURVE_H
#define CURVE_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <time.h>

enum { POINTS_MAX = 150 };

typedef struct curve {
    const char *name;
    double seconds[POINTS_MAX], loss[POINTS_MAX];
    int points;
    double reached_s; /* first time at or below the target; negative: never */
} curve;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double uniform(uint64_t *state) { /* splitmix64, -1 to 1 */
    uint64_t z = (*state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (double)((z ^ (z >> 31)) >> 11) / 4503599627370496.0 - 1;
}

/* What the models are to find for weight i. */
static float wanted(int i) { return i % 2 == 0 ? 1.0f : -1.0f; }

static double loss_of(const float *w, int weights) {
    double sum = 0;
    for (int i = 0; i < weights; i++) {
        sum += ((double)w[i] - (double)wanted(i)) * ((double)w[i] - (double)wanted(i));
    }
    return sum / weights;
}

static void curve_begin(curve *c) {
    c->points = 0;
    c->reached_s = -1;
}

static void curve_add(curve *c, double seconds, double loss, double target) {
    c->seconds[c->points] = seconds;
    c->loss[c->points] = loss;
    c->points++;
    c->reached_s = loss <= target && c->reached_s < 0 ? seconds : c->reached_s;
}

/* Loss on a logarithmic scale over time, one line for each of up to three curves. Returns 0 when the file is whole. */
static int curve_draw(const curve *curves, int count, const char *path) {
    static const char *const colours[] = {"#c0392b", "#2471a3", "#1e8449"};
    FILE *f = fopen(path, "w");
    double most = 0;
    for (int m = 0; m < count; m++) {
        most = fmax(most, curves[m].seconds[curves[m].points - 1]);
    }
    if (f == NULL) {
        return 1;
    }
    fprintf(f, "<svg xmlns='http://www.w3.org/2000/svg' width='640' height='400' font-family='sans-serif' "
               "font-size='12'>\n<rect width='640' height='400' fill='white'/>\n"
               "<path d='M60 20 V350 H620' fill='none' stroke='black'/>\n"
               "<text x='300' y='385'>seconds, 0 to %.2f</text>\n<text x='8' y='16'>loss</text>\n", most);
    for (int decade = 0; decade <= 3; decade++) {
        fprintf(f, "<text x='8' y='%d'>%g</text>\n", 24 + decade * 110, pow(10, -decade));
    }
    for (int m = 0; m < count; m++) {
        fprintf(f, "<text x='480' y='%d' fill='%s'>%s</text>\n<polyline fill='none' stroke='%s' points='", 40 + 18 * m,
                colours[m], curves[m].name, colours[m]);
        for (int i = 0; i < curves[m].points; i++) {
            fprintf(f, "%.1f,%.1f ", 60 + 560 * curves[m].seconds[i] / most,
                    20 - 110 * log10(fmax(curves[m].loss[i], 1e-3)));
        }
        fprintf(f, "'/>\n");
    }
    fprintf(f, "</svg>\n");
    return fclose(f);
}

#endif /* CURVE_H */

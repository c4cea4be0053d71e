/* The planners of the trainer, as pure functions: merging against all merges there are, cutting covers every byte once,
 * priority keeps its bound on what goes ahead of the first layer; the race between plans on machines that are noisy.
 * tests/run: variants=gcc,asan timeout=60 */
#include "test.h"

#include "../src/train/plan.h"
#include "../src/train/race.h"

static unsigned draw(unsigned *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void draw_layers(ddl__layer *layers, int count, unsigned *state) {
    double ready = 0;
    for (int i = 0; i < count; i++) {
        layers[i] = (ddl__layer){.bytes = (int64_t)(draw(state) % 5 == 0 ? draw(state) % 4000 : draw(state) % 200) * 64,
                                 .ready_s = ready,
                                 .apart = i > 0 && draw(state) % 7 == 0};
        ready += (double)(draw(state) % 1000) * 1e-6;
    }
}

/* When the last operation ends if operations begin where mask has a bit; negative: a merge that may not be. */
static double end_of(const ddl__layer *layers, int count, const ddl__line *line, unsigned mask) {
    double end = 0;
    for (int i = 0; i < count;) {
        int64_t bytes = 0;
        int j = i;
        do {
            if (j > i && layers[j].apart) {
                return -1;
            }
            bytes += layers[j++].bytes;
        } while (j < count && (mask >> j & 1) == 0);
        double begin = end > layers[j - 1].ready_s ? end : layers[j - 1].ready_s;
        end = begin + line->latency_s + line->seconds_per_byte * (double)bytes;
        i = j;
    }
    return end;
}

TEST(the_best_merge_is_the_best_of_all) {
    unsigned state = 7;
    for (int round = 0; round < 300; round++) {
        ddl__layer layers[12];
        double end[13];
        int32_t from[13];
        bool first[12];
        int count = 1 + round % 12;
        ddl__line line = {(double)(draw(&state) % 500) * 1e-6, (double)(1 + draw(&state) % 20) * 1e-9};
        draw_layers(layers, count, &state);
        double got = ddl__plan_merge(layers, count, &line, end, from, first), best = 1e9;
        unsigned chosen = 0;
        for (int i = 0; i < count; i++) {
            chosen |= (unsigned)first[i] << i;
        }
        for (unsigned mask = 1; mask < 1u << count; mask += 2) {
            double at = end_of(layers, count, &line, mask);
            best = at >= 0 && at < best ? at : best;
        }
        CHECK(first[0]);
        CHECK(got <= best * (1 + 1e-12) && got >= best * (1 - 1e-12));
        CHECK(end_of(layers, count, &line, chosen) >= 0);
        CHECK(end_of(layers, count, &line, chosen) <= best * (1 + 1e-12));
    }
}

/* The choice of codes loses as little as the best of all choices that end in time; where none does, it ends first. */
TEST(the_best_codes_are_the_best_of_all) {
    enum { MOST = 6, OFFERS = 4 };
    unsigned state = 5;
    ddl__front *fronts = malloc((MOST + 1 + OFFERS) * DDL__FRONT * sizeof *fronts);
    for (int round = 0; round < 400; round++) {
        double ready[MOST], now = 0, limit = (double)(draw(&state) % 4000) * 1e-6;
        ddl__bid offers[MOST * OFFERS];
        int32_t made[MOST + 1], chosen[MOST];
        int count = 1 + round % MOST;
        for (int i = 0; i < count; i++) {
            ready[i] = now += (double)(draw(&state) % 500) * 1e-6;
            for (int o = 0; o < OFFERS; o++) { /* any times and errors: a code may be worse than another in both */
                offers[i * OFFERS + o] = (ddl__bid){(double)(draw(&state) % 1000) * 1e-6, (double)(draw(&state) % 1000)};
            }
        }
        double got = ddl__plan_offers(ready, offers, count, OFFERS, limit, fronts, made, chosen);
        double best_end = 1e9, best_late_error = 1e9, best = 1e9, end = 0, error = 0;
        for (int i = 0; i < count; i++) {
            CHECK(chosen[i] >= 0 && chosen[i] < OFFERS);
            end = (end > ready[i] ? end : ready[i]) + offers[i * OFFERS + chosen[i]].time_s;
            error += offers[i * OFFERS + chosen[i]].error;
        }
        for (int code = 0; code < 1 << (2 * count); code++) {
            double at = 0, lost = 0;
            for (int i = 0; i < count; i++) {
                const ddl__bid *o = &offers[i * OFFERS + (code >> (2 * i) & 3)];
                at = (at > ready[i] ? at : ready[i]) + o->time_s;
                lost += o->error;
            }
            best = at <= limit && lost < best ? lost : best;
            best_late_error = at < best_end || (at == best_end && lost < best_late_error) ? lost : best_late_error;
            best_end = at < best_end ? at : best_end;
        }
        CHECK(got == error);
        CHECK(best < 1e9 ? error == best && end <= limit : end == best_end && error == best_late_error);
    }
    free(fronts);
}

/* Every byte of every range is in one piece, pieces are in order and no larger than asked, and cover what they touch. */
TEST(cutting_covers_every_byte_once) {
    unsigned state = 3;
    for (int round = 0; round < 300; round++) {
        static ddl__layer layers[40];
        static ddl__piece pieces[4000]; /* 40 layers of at most 256,000 bytes */
        bool first[40];
        int count = 1 + (int)(draw(&state) % 40);
        int64_t piece = 64 * (100 + (int64_t)(draw(&state) % 600));
        draw_layers(layers, count, &state);
        ddl__plan_fuse(layers, count, (int64_t)(draw(&state) % 20000), first);
        int made = ddl__plan_cut(layers, count, first, piece, pieces), at = 0;
        int64_t before[41] = {0};
        for (int i = 0; i < count; i++) {
            before[i + 1] = before[i] + layers[i].bytes;
        }
        CHECK(made <= 4000);
        int64_t byte = 0;
        for (int p = 0; p < made; p++) {
            const ddl__piece *x = &pieces[p];
            CHECK_EQ(before[x->first] + x->begin_bytes, byte);
            CHECK(x->bytes <= piece && x->first <= x->last && x->last < count);
            CHECK(x->first <= at && x->last + 1 >= at);
            for (int i = x->first + 1; i <= x->last; i++) {
                CHECK(!first[i]);
            }
            byte += x->bytes;
            CHECK(byte <= before[x->last + 1]);
            at = x->last + 1;
        }
        CHECK_EQ(byte, before[count]);
        CHECK_EQ(at, count);
    }
}

/* Whatever is ready before it: of what a piece of the first forward layer finds under way or started before it, there is
 * never more than the credit and one piece; and no piece is started while a more urgent one is ready. */
TEST(priority_keeps_its_bound) {
    unsigned state = 11;
    for (int round = 0; round < 300; round++) {
        static ddl__layer layers[30];
        static ddl__piece pieces[4000];
        static double started[4000], ended[4000];
        static int32_t order[4000];
        bool first[30];
        int count = 1 + (int)(draw(&state) % 30);
        int64_t piece = 16384 * (1 + (int64_t)(draw(&state) % 10)), credit = piece * (1 + (int64_t)(draw(&state) % 4));
        ddl__line line = {(double)(draw(&state) % 50) * 1e-6, (double)(1 + draw(&state) % 50) * 1e-9};
        draw_layers(layers, count, &state);
        for (int i = 0; i < count; i++) {
            layers[i].apart = false;
            first[i] = true;
        }
        int made = ddl__plan_cut(layers, count, first, piece, pieces);
        double end = ddl__plan_priority(layers, pieces, made, &line, credit, order, started, ended), last = 0;
        static int place[4000]; /* in the order, from 1 */
        memset(place, 0, sizeof place);
        for (int k = 0; k < made; k++) {
            CHECK(order[k] >= 0 && order[k] < made && place[order[k]] == 0);
            place[order[k]] = k + 1;
            CHECK(started[order[k]] >= last && started[order[k]] >= layers[pieces[order[k]].last].ready_s);
            last = started[order[k]];
        }
        CHECK(ended[order[made - 1]] == end);
        int front = made - 1; /* the first piece of the first forward layer */
        while (front > 0 && pieces[front - 1].first == count - 1) {
            front--;
        }
        double ready = layers[count - 1].ready_s;
        int64_t ahead = 0;
        for (int p = 0; p < made; p++) {
            ahead += place[p] < place[front] && ended[p] > ready ? pieces[p].bytes : 0;
            for (int q = 0; q < p; q++) { /* q comes earlier in backward, so is less urgent, unless of the same layer */
                CHECK(pieces[q].last == pieces[p].last || started[q] <= layers[pieces[p].last].ready_s ||
                      started[q] >= started[p]);
            }
        }
        CHECK(ahead <= credit + piece);
    }
}
/* ---- which plan is the fastest ---- */

static double evenly(unsigned *state) { return draw(state) / (double)(1 << 24); } /* from 0 to 1 */

/* About normal, of variance 1. */
static double normally(unsigned *state) {
    double sum = -6;
    for (int i = 0; i < 12; i++) {
        sum += evenly(state);
    }
    return sum;
}

/* A machine whose steps differ by `sigma`, of which a share are in bursts of other work, of 1 to 10 steps that take up to
 * twice as long. */
typedef struct noise {
    double sigma, bursts, slow;
    int left;
    unsigned state;
} noise;

static double noisy(noise *n, double seconds) {
    if (n->left == 0 && evenly(&n->state) < n->bursts / 5.5) {
        n->left = 1 + (int)(10 * evenly(&n->state));
        n->slow = 1 + evenly(&n->state);
    }
    double slow = n->left > 0 ? n->slow : 1, factor = slow * (1 + n->sigma * normally(&n->state));
    n->left -= n->left > 0;
    return seconds * (factor > 0.1 ? factor : 0.1);
}

/* One race between `count` plans, of which the best takes 1. The first step of a lap is slow, as on a machine. Returns
 * how long a step of the winner takes. */
static double race_once(noise *n, int count, int *out_steps) {
    double truth[DDL__RACERS], least = 1e9;
    ddl__race_score scores[DDL__RACERS];
    bool in[DDL__RACERS] = {false}, over = false;
    ddl__race r;
    for (int i = 0; i < count; i++) {
        double x = evenly(&n->state);
        truth[i] = 1 + 0.6 * x * x;
        least = truth[i] < least ? truth[i] : least;
        in[i] = true;
    }
    memset(&r, 0x55, sizeof r);
    ddl__race_begin(&r, in);
    for (*out_steps = 1; !over && *out_steps < 1000; (*out_steps)++) {
        double s = noisy(n, truth[r.racer]);
        if (ddl__race_step(&r, r.steps == 0 ? 1.5 * s : s) == DDL__RACE_CUT) {
            ddl__race_scores(&r, scores);
            over = ddl__race_cut(&r, scores);
        }
    }
    CHECK(over);
    return truth[r.racer] / least;
}

/* Of 11 plans whose steps take 1 to 1.6 times as long as the best one's. docs/training.md states these shares. */
TEST(the_race_is_won_by_one_of_the_fastest) {
    enum { RACES = 2000 };
    const struct {
        double sigma, bursts, within; /* share of winners that are at most 5 % slower than the best */
    } machines[] = {{0, 0, 1}, {0.05, 0, 0.98}, {0.05, 0.2, 0.96}, {0.1, 0.2, 0.9}};
    for (size_t m = 0; m < sizeof machines / sizeof *machines; m++) {
        noise n = {.sigma = machines[m].sigma, .bursts = machines[m].bursts, .state = 11};
        int near = 0, most = 0;
        for (int k = 0; k < RACES; k++) {
            int steps;
            near += race_once(&n, 11, &steps) <= 1.05;
            most = steps > most ? steps : most;
        }
        CHECK(near >= machines[m].within * RACES);
        CHECK(most <= (m == 0 ? 46 : 202)); /* where steps are alike a lap tells */
    }
}

TEST(a_race_of_one_and_of_two_ends) {
    noise n = {.sigma = 0.01, .state = 3};
    for (int count = 1; count <= 2; count++) {
        int steps;
        CHECK(race_once(&n, count, &steps) <= 1.05);
    }
}

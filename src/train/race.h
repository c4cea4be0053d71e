/* train, first part continued: which of several is the fastest, when a time says little because the machine does other
 * things, too. Pure: ranks that give the same times and scores choose the same one.
 *
 * Sequential halving (Karnin, Koren, Somekh, "Almost Optimal Exploration in Multi-Armed Bandits", ICML 2013): all are
 * timed a few times, the better half or less again, and so on, so that most of the time goes to telling apart the best.
 * They take turns in laps of a few steps, as a burst of other work lasts longer than a step. What others do only adds
 * to a time, so the score is the lower quartile: the least may be one lucky step, the median is often of a burst. Where
 * steps differ little a race is short: who is slower than the best one's median is out after any lap (successive
 * elimination: Even-Dar, Mannor, Mansour, JMLR 7, 2006). */
#ifndef DDL_TRAIN_RACE_H
#define DDL_TRAIN_RACE_H

#include "../base.h"

enum {
    DDL__RACERS = 12,
    DDL__RACE_LAPS = 10,
    DDL__LAP_STEPS = 4, /* the first is not timed: its memory is cold */
    DDL__RACE_TIMES = DDL__RACE_LAPS * (DDL__LAP_STEPS - 1)
};

/* How many are left after each lap, at most. */
static const int32_t ddl__race_keep[DDL__RACE_LAPS] = {DDL__RACERS, 6, 5, 4, 3, 3, 3, 2, 2, 1};

/* One whose score is worse than so many times the best one is out at once. */
#define DDL__RACE_BEHIND 1.25

typedef struct ddl__race_score {
    double quartile_s, median_s; /* 1e9: never timed */
} ddl__race_score;

typedef struct ddl__race {
    int32_t racer;                   /* whose step is next; at the end the winner */
    int32_t lap, steps;              /* steps: of this lap */
    bool in[DDL__RACERS];            /* may still win */
    int32_t timed[DDL__RACERS];      /* how many times it has */
    double time_s[DDL__RACERS][DDL__RACE_TIMES];
} ddl__race;

typedef enum ddl__race_turn {
    DDL__RACE_ON,  /* the same racer again */
    DDL__RACE_NEXT, /* another one: race->racer */
    DDL__RACE_CUT  /* ddl__race_cut is to be called */
} ddl__race_turn;

/* The next that is in, from `racer` on; DDL__RACERS: none. */
static int32_t ddl__race_from(const ddl__race *r, int32_t racer) {
    while (racer < DDL__RACERS && !r->in[racer]) {
        racer++;
    }
    return racer;
}

/* in: who takes part, at least one. */
static void ddl__race_begin(ddl__race *r, const bool *in) {
    *r = (ddl__race){0};
    memcpy(r->in, in, sizeof r->in);
    r->racer = ddl__race_from(r, 0);
}

/* After each step of r->racer. */
static ddl__race_turn ddl__race_step(ddl__race *r, double seconds) {
    int32_t *timed = &r->timed[r->racer];
    if (r->steps++ > 0 && *timed < DDL__RACE_TIMES) {
        r->time_s[r->racer][(*timed)++] = seconds;
    }
    if (r->steps < DDL__LAP_STEPS) {
        return DDL__RACE_ON;
    }
    r->steps = 0;
    r->racer = ddl__race_from(r, r->racer + 1);
    if (r->racer < DDL__RACERS) {
        return DDL__RACE_NEXT;
    }
    return DDL__RACE_CUT;
}

/* Sorts count times. */
static void ddl__race_sort(double *time_s, int32_t count) {
    for (int32_t i = 1; i < count; i++) {
        for (int32_t k = i; k > 0 && time_s[k] < time_s[k - 1]; k--) {
            double swap = time_s[k];
            time_s[k] = time_s[k - 1];
            time_s[k - 1] = swap;
        }
    }
}

/* Of count times, which it sorts. */
static ddl__race_score ddl__race_score_of(double *time_s, int32_t count) {
    ddl__race_sort(time_s, count);
    return count > 0 ? (ddl__race_score){time_s[(count - 1) / 4], time_s[count / 2]} : (ddl__race_score){1e9, 1e9};
}

/* Of each racer. To be averaged over ranks before ddl__race_cut. */
static void ddl__race_scores(ddl__race *r, ddl__race_score *out_scores) {
    for (int32_t i = 0; i < DDL__RACERS; i++) {
        out_scores[i] = ddl__race_score_of(r->time_s[i], r->timed[i]);
    }
}

/* Ends a lap. Returns whether the race is over: then r->racer has won. */
static bool ddl__race_cut(ddl__race *r, const ddl__race_score *scores) {
    int32_t left = 0, best = -1;
    for (int32_t i = 0; i < DDL__RACERS; i++) {
        best = r->in[i] && (best < 0 || scores[i].quartile_s < scores[best].quartile_s) ? i : best;
    }
    double most_s = DDL__MIN(scores[best].median_s, DDL__RACE_BEHIND * scores[best].quartile_s);
    for (int32_t i = 0; i < DDL__RACERS; i++) {
        int32_t better = 0;
        double own_s = scores[i].quartile_s;
        for (int32_t k = 0; k < DDL__RACERS; k++) {
            double other_s = scores[k].quartile_s;
            better += r->timed[k] == r->timed[best] && (other_s < own_s || (other_s <= own_s && k < i));
        }
        r->in[i] = r->in[i] && better < ddl__race_keep[r->lap] && (i == best || own_s <= most_s);
        left += r->in[i];
    }
    r->lap++;
    r->racer = left == 1 ? best : ddl__race_from(r, 0);
    return left == 1;
}

#endif /* DDL_TRAIN_RACE_H */

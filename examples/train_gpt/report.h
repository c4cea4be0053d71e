/* report.h: the progress line, loss.csv and loss.svg. Called on rank 0 only. */
#ifndef REPORT_H
#define REPORT_H

#include <math.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "checkpoint.h"

static double now_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- progress --------------------------------------------------------------------------------------------------- */

/* Mean loss of steps [from, to): the loss of one batch jumps about. */
static double mean_loss(const struct curve *c, size_t from, size_t to) {
    double sum = 0.0;
    for (size_t i = from; i < to; i++) {
        sum += (double)c->at[i].loss;
    }
    return sum / (double)(to - from);
}

/* Means over the last steps, so that the line is calm. */
static void recent_speed(const struct curve *c, double *out_tokens_per_second, double *out_comm_share) {
    size_t n = c->count < 20 ? c->count : 20;
    double tokens = 0.0, comm = 0.0;
    for (size_t i = c->count - n; i < c->count; i++) {
        tokens += (double)c->at[i].tokens_per_second / (double)n;
        comm += (double)c->at[i].comm_share / (double)n;
    }
    *out_tokens_per_second = tokens;
    *out_comm_share = comm;
}

/* Rewrites one line on a terminal, ten times a second at most; elsewhere prints about 30 lines in all. */
static void report_progress(const struct curve *c, size_t steps, double seconds_per_step) {
    static double last = -1.0;
    bool terminal = isatty(STDOUT_FILENO) == 1, final = c->count == steps;
    size_t every = steps < 30 ? 1 : steps / 30;
    double now = now_seconds(), tokens, comm;
    if (terminal ? now - last < 0.1 && !final : c->count % every != 0 && !final) {
        return;
    }
    last = now;
    recent_speed(c, &tokens, &comm);
    unsigned left = (unsigned)(seconds_per_step * (double)(steps - c->count) + 0.5);
    printf("%sstep %*zu/%zu  loss %.3f  %6.0f tokens/s  %4.1f %% waiting for ranks  %u:%02u left%s",
           terminal ? "\r" : "", (int)snprintf(NULL, 0, "%zu", steps), c->count, steps,
           mean_loss(c, c->count > 10 ? c->count - 10 : 0, c->count), tokens, 100.0 * comm, left / 60, left % 60,
           terminal && !final ? "\033[K"
           : terminal         ? "\033[K\n"
                              : "\n");
    fflush(stdout);
}

/* ---- loss.csv --------------------------------------------------------------------------------------------------- */

static bool write_csv(const struct curve *c, const char *folder) {
    static struct output o;
    if (!output_open(&o, folder, "loss.csv")) {
        return false;
    }
    output_print(&o,
                 "step,seconds,loss,held_out_loss,learning_rate,gradient_norm,tokens_per_second,communication_share\n");
    for (size_t i = 0; i < c->count; i++) {
        const struct point *p = &c->at[i];
        output_print(&o, "%llu,%.3f,%.6f,", (unsigned long long)p->step, p->seconds, (double)p->loss);
        if (!isnan(p->held_out)) {
            output_print(&o, "%.6f", (double)p->held_out);
        }
        output_print(&o, ",%.6g,%.4f,%.0f,%.4f\n", (double)p->lr, (double)p->norm, (double)p->tokens_per_second,
                     (double)p->comm_share);
    }
    return output_commit(&o);
}

/* ---- loss.svg --------------------------------------------------------------------------------------------------- */

/* The picture, in SVG's pixels: the plot's corner and size inside it. */
enum { SVG_WIDTH = 880, SVG_HEIGHT = 500, PLOT_X = 72, PLOT_Y = 84, PLOT_WIDTH = 776, PLOT_HEIGHT = 348 };

struct plot {
    double x_most, y_least, y_most, y_tick;
};

static double plot_x(const struct plot *p, double step) { return PLOT_X + PLOT_WIDTH * step / p->x_most; }

static double plot_y(const struct plot *p, double loss) {
    return PLOT_Y + PLOT_HEIGHT * (p->y_most - loss) / (p->y_most - p->y_least);
}

/* The largest of 1, 2, 5 times a power of ten that gives at least four ticks. */
static double tick_step(double span) {
    double unit = pow(10.0, floor(log10(span / 4.0)));
    return span / 4.0 >= 5.0 * unit ? 5.0 * unit : span / 4.0 >= 2.0 * unit ? 2.0 * unit : unit;
}

static struct plot plot_fit(const struct curve *c) {
    struct plot p = {fmax(1.0, (double)c->count), INFINITY, -INFINITY, 1.0};
    for (size_t i = 0; i < c->count; i++) {
        p.y_least = fmin(p.y_least, fmin((double)c->at[i].loss, (double)c->at[i].held_out)); /* fmin passes over NaN */
        p.y_most = fmax(p.y_most, fmax((double)c->at[i].loss, (double)c->at[i].held_out));
    }
    if (!(p.y_most - p.y_least > 1e-3)) {
        p.y_least = isfinite(p.y_least) ? p.y_least - 0.5 : 0.0;
        p.y_most = p.y_least + 1.0;
    }
    p.y_tick = tick_step(p.y_most - p.y_least);
    p.y_least = floor(p.y_least / p.y_tick) * p.y_tick;
    p.y_most = ceil(p.y_most / p.y_tick) * p.y_tick;
    return p;
}

static void draw_axes(struct output *o, const struct plot *p) {
    double tick = p->y_tick;
    output_print(o, "<g stroke=\"#e3e6ea\">\n");
    for (double y = p->y_least; y < p->y_most + tick / 2; y += tick) {
        output_print(o, "<path d=\"M%d %.1fh%d\"/>\n", PLOT_X, plot_y(p, y), PLOT_WIDTH);
    }
    output_print(o, "</g>\n<g fill=\"#57606a\" text-anchor=\"end\">\n");
    for (double y = p->y_least; y < p->y_most + tick / 2; y += tick) {
        output_print(o, "<text x=\"%d\" y=\"%.1f\">%.*f</text>\n", PLOT_X - 10, plot_y(p, y) + 4.5, tick < 0.1 ? 2 : 1,
                     y);
    }
    output_print(o, "</g>\n<g fill=\"#57606a\" text-anchor=\"middle\">\n");
    tick = fmax(1.0, tick_step(p->x_most));
    for (double x = 0.0; x <= p->x_most; x += tick) {
        output_print(o, "<path stroke=\"#57606a\" d=\"M%.1f %dv5\"/><text x=\"%.1f\" y=\"%d\">%.0f</text>\n",
                     plot_x(p, x), PLOT_Y + PLOT_HEIGHT, plot_x(p, x), PLOT_Y + PLOT_HEIGHT + 22, x);
    }
    output_print(o, "<text x=\"%d\" y=\"%d\">optimizer step</text>\n", PLOT_X + PLOT_WIDTH / 2,
                 PLOT_Y + PLOT_HEIGHT + 50);
    output_print(o, "<text transform=\"translate(22 %d) rotate(-90)\">cross-entropy (nats per byte)</text>\n</g>\n",
                 PLOT_Y + PLOT_HEIGHT / 2);
    output_print(o, "<path stroke=\"#57606a\" fill=\"none\" d=\"M%d %dv%dh%d\"/>\n", PLOT_X, PLOT_Y, PLOT_HEIGHT,
                 PLOT_WIDTH);
}

/* One batch's losses, or in bold their mean over steps on both sides, which does not lag behind. At most about 1,500
 * vertices, however long the run was. */
static void draw_loss(struct output *o, const struct plot *p, const struct curve *c, bool bold) {
    size_t stride = c->count / 1500 + 1, widest = 8 + c->count / 50;
    output_print(o, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"%s\" stroke-linejoin=\"round\" points=\"",
                 bold ? "#0b62c4" : "#a9cdf5", bold ? "2.2" : "1");
    for (size_t i = 0; i < c->count; i += stride) {
        size_t left = !bold ? 0 : i < widest ? i : widest, after = c->count - 1 - i;
        double y = mean_loss(c, i - left, i + (left < after ? left : after) + 1);
        output_print(o, "%.1f,%.1f ", plot_x(p, (double)c->at[i].step), plot_y(p, y));
    }
    output_print(o, "\"/>\n");
}

static void draw_held_out(struct output *o, const struct plot *p, const struct curve *c) {
    const struct point *last = NULL;
    output_print(o, "<g fill=\"#d1480f\" stroke=\"#fff\" stroke-width=\"1.5\">\n");
    for (size_t i = 0; i < c->count; i++) {
        if (!isnan(c->at[i].held_out)) {
            last = &c->at[i];
            output_print(o, "<circle r=\"5\" cx=\"%.1f\" cy=\"%.1f\"/>\n", plot_x(p, (double)last->step),
                         plot_y(p, (double)last->held_out));
        }
    }
    output_print(o, "</g>\n");
    if (last != NULL) {
        output_print(
            o, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\" font-weight=\"600\" fill=\"#d1480f\">%.2f</text>\n",
            plot_x(p, (double)last->step) - 4, plot_y(p, (double)last->held_out) - 12, (double)last->held_out);
    }
}

static void draw_legend(struct output *o) {
    int x = PLOT_X + PLOT_WIDTH - 330, y = PLOT_Y - 14;
    output_print(
        o, "<g fill=\"#24292f\"><path stroke=\"#a9cdf5\" d=\"M%d %dh22\"/><text x=\"%d\" y=\"%d\">one batch</text>", x,
        y - 4, x + 28, y);
    output_print(
        o, "<path stroke=\"#0b62c4\" stroke-width=\"2.2\" d=\"M%d %dh22\"/><text x=\"%d\" y=\"%d\">smoothed</text>",
        x + 120, y - 4, x + 148, y);
    output_print(o,
                 "<circle r=\"5\" fill=\"#d1480f\" cx=\"%d\" cy=\"%d\"/><text x=\"%d\" y=\"%d\">held out</text></g>\n",
                 x + 252, y - 4, x + 263, y);
}

static bool write_svg(const struct curve *c, const char *folder, const struct setup *s, size_t parameters, int ranks) {
    static struct output o;
    if (!output_open(&o, folder, "loss.svg")) {
        return false;
    }
    struct plot p = plot_fit(c);
    output_print(&o,
                 "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" "
                 "font-family=\"system-ui, sans-serif\" font-size=\"13\">\n<rect width=\"100%%\" height=\"100%%\" "
                 "fill=\"#fff\"/>\n",
                 SVG_WIDTH, SVG_HEIGHT, SVG_WIDTH, SVG_HEIGHT);
    output_print(&o,
                 "<text x=\"%d\" y=\"32\" font-size=\"19\" font-weight=\"600\" fill=\"#24292f\">Byte-level GPT, "
                 "trained data-parallel on %d rank%s</text>\n",
                 PLOT_X, ranks, ranks == 1 ? "" : "s");
    output_print(&o,
                 "<text x=\"%d\" y=\"53\" fill=\"#57606a\">%.2f million parameters, %llu layers, %llu channels, "
                 "context of %llu bytes, %llu sequences per step</text>\n",
                 PLOT_X, (double)parameters / 1e6, (unsigned long long)s->layers, (unsigned long long)s->dim,
                 (unsigned long long)s->context, (unsigned long long)s->sequences);
    draw_axes(&o, &p);
    draw_loss(&o, &p, c, false);
    draw_loss(&o, &p, c, true);
    draw_held_out(&o, &p, c);
    draw_legend(&o);
    output_print(&o, "</svg>\n");
    return output_commit(&o);
}

#endif

/* train_gpt.c: a small GPT that learns to write the text it is given, trained data-parallel with ddl.
 *
 * Build:  cc -O2 -std=c11 -D_GNU_SOURCE -I. -o train_gpt examples/train_gpt/train_gpt.c -lm -ldl -lpthread
 * Run:    ddlrun -n 2 ./train_gpt --fresh --steps 20 --sample 40
 * Prints: held-out loss
 *
 * This file is the training loop and holds every call of ddl. ddl_trainer does what makes it data-parallel: it sends
 * rank 0's parameters to all; as soon as backward says that a layer's gradient is final, its average over the ranks is on
 * its way, while backward goes on with the layer below; ddl_step waits for all and calls this program's own optimizer
 * (strategies that keep its state elsewhere, ZeRO-1 and stale servers, run the trainer's AdamW instead). The
 * parameters stay the same on all ranks, bit for bit, because the averaged gradient is. How gradients travel is
 * --strategy, and nothing else in this file changes with it. With --device cuda the same calls of kernels go to a GPU:
 * parameters and gradients are there, and the trainer orders its work on the kernels' stream. */
#define DDL_IMPLEMENTATION
#include "ddl.h"

#include <signal.h>

#include "adamw.h"
#include "checkpoint.h"
#include "cuda.h"
#include "options.h"
#include "report.h"
#include "text.h"

struct trainer {
    struct options options;
    const char *program; /* argv[0]: kernels of a GPU lie beside it */
    ddl_context *context;
    ddl_group *world;
    int32_t rank, size;
    struct text text;
    struct model model;
    struct adamw optimizer;
    struct curve curve;
    struct setup setup;
    uint8_t *bytes, *targets; /* (B, T) */
    ddl_trainer *sync;
    bool theirs; /* the optimizer is the trainer's: its state is shared out, or on servers */
    bool stale;  /* SSP and ASP: no rank waits for another in a step */
    ddl_status status; /* the first error of a gradient that could not be sent */
    size_t step;       /* that is under way, from 0 */
    double norm;       /* of its averaged gradient */
    double waiting;    /* seconds of this step inside ddl */
    bool save_failed;
};

static bool ddl_problem(const struct trainer *t, const char *what) {
    return problem("%s failed: %s", what, ddl_error(t->context));
}

/* True when `good` is true on every rank. What only one rank can see (its disk, its copy of the text) must not leave
 * the others waiting in the next collective for a rank that has gone. It is said here, while all ranks still live. */
static bool all_good(struct trainer *t, bool good) {
    double worst = good ? 1.0 : 0.0;
    if (!good) {
        problem_tell();
    }
    if (ddl_all_reduce_scalar(t->world, &worst, DDL_MIN) != DDL_OK) {
        return good ? ddl_problem(t, "Agreeing with the other ranks") : false;
    }
    return worst > 0.5 || (good ? problem("Another rank failed and says why.") : false);
}

/* ---- one step --------------------------------------------------------------------------------------------------- */

/* backward says that layers[index] is final: start to average its tensors. The other layers' backward runs meanwhile.
 * The trainer counts in forward's order, which is the reverse. */
static void start_average(void *user, size_t index) {
    struct trainer *t = user;
    const struct model *m = &t->model;
    double start = now_seconds();
    for (size_t i = 0; i < m->tensor_count; i++) {
        size_t at = m->tensors[i].first - m->layers[index].first; /* huge for a tensor of a layer before it */
        if (at < m->layers[index].count) {
            ddl_status status = ddl_grad_ready(t->sync, (int32_t)(m->tensor_count - 1 - i));
            t->status = t->status == DDL_OK ? status : t->status;
        }
    }
    t->waiting += now_seconds() - start;
}

/* ddl_step has put the averages where the gradients were. */
static int take_step(void *user, ddl_trainer *sync) {
    struct trainer *t = user;
    (void)sync;
    t->norm = adamw_step(&t->optimizer, &t->model, t->step);
    return cuda_good() ? 0 : 1;
}

/* The global batch is `size` times the local one, `accumulate` times; rank r takes sequences r*B ... r*B + B-1 of each
 * of these. */
static void read_batch(struct trainer *t, size_t step, size_t part) {
    size_t batch = t->options.batch, width = t->options.context;
    for (size_t i = 0; i < batch; i++) {
        uint64_t first = (part * (size_t)t->size + (size_t)t->rank) * batch;
        text_training(&t->text, t->options.seed, step, first + i, t->bytes + i * width, t->targets + i * width);
    }
}

/* One batch of this rank, forward and backward; its gradient is on its way. The spans are for DDL_TRACE: without it
 * they do nothing. */
static bool train_part(struct trainer *t, size_t part, double *loss) {
    read_batch(t, t->step, part);
    ddl_trace_begin(t->context, "forward");
    model_forward(&t->model, t->bytes);
    *loss += model_loss(&t->model, t->targets) / (double)t->options.accumulate;
    ddl_trace_end(t->context);
    ddl_trace_begin(t->context, "backward");
    model_backward(&t->model, t->bytes, start_average, t);
    ddl_trace_end(t->context);
    if (!cuda_good()) {
        return false;
    }
    bool last = part + 1 == t->options.accumulate;
    if (t->status != DDL_OK || (!last && ddl_step(t->sync) != DDL_OK)) {
        return ddl_problem(t, "Averaging the gradients");
    }
    return true;
}

/* One optimizer step; *out_loss is the mean over all ranks' sequences, of stale strategies over this rank's. */
static bool train_step(struct trainer *t, double *out_loss) {
    double loss = 0.0, rate = adamw_rate(&t->optimizer, t->step);
    /* Stale servers take a step of Adam for each rank's gradient, of a batch that is so much smaller: Adam's rate goes
     * with the square root of the batch (Malladi et al., arXiv 2205.10287). */
    if (t->theirs && ddl_trainer_set_rate(t->sync, t->stale ? rate / sqrt((double)t->size) : rate) != DDL_OK) {
        return ddl_problem(t, "Setting the learning rate");
    }
    for (size_t part = 0; part < t->options.accumulate; part++) {
        if (!train_part(t, part, &loss)) {
            return false;
        }
    }
    ddl_request *mean = NULL; /* not waited for before the step, or gradients that travel meanwhile would seem hidden */
    if (!t->stale &&
        ddl_iall_reduce(t->world, DDL_VIEW(&loss, 1), DDL_VIEW(&loss, 1), DDL_AVG, &mean) != DDL_OK) {
        return ddl_problem(t, "Averaging the loss");
    }
    ddl_trace_begin(t->context, "step");
    ddl_status status = ddl_step(t->sync);
    ddl_trace_end(t->context);
    double start = now_seconds();
    if (!t->stale && ddl_wait(&mean, NULL) != DDL_OK) {
        return ddl_problem(t, "Averaging the loss");
    }
    t->waiting += now_seconds() - start;
    if (!isfinite(loss)) {
        return problem(
            "The loss is not a number at step %zu; a smaller --lr may help. Checkpoints are left as they are.",
            t->step + 1);
    }
    if (status != DDL_OK) {
        return cuda_good() && ddl_problem(t, "Averaging the gradients");
    }
    ddl_trainer_stats stats = {0};
    ddl_trainer_stats_get(t->sync, &stats);
    t->waiting += stats.exposed_s;
    t->norm = t->theirs ? stats.norm : t->norm;
    *out_loss = loss;
    return true;
}

/* Mean loss on at most `most` windows of the held-out text, dealt out to the ranks like cards. */
static bool evaluate(struct trainer *t, size_t most, double *out_loss) {
    size_t held = text_held_windows(&t->text), count = held < most ? held : most, width = t->options.context,
           filled = 0;
    double sum = 0.0;
    for (size_t i = (size_t)t->rank; i < count; i += (size_t)t->size) {
        text_held(&t->text, i * held / count, t->bytes + filled * width, t->targets + filled * width);
        if (++filled == t->options.batch || i + (size_t)t->size >= count) {
            t->model.batch = filled;
            model_forward(&t->model, t->bytes);
            sum += model_loss(&t->model, t->targets) * (double)filled;
            filled = 0;
        }
    }
    t->model.batch = t->options.batch;
    if (!cuda_good()) {
        return false;
    }
    if (ddl_all_reduce_scalar(t->world, &sum, DDL_SUM) != DDL_OK) {
        return ddl_problem(t, "Adding up the held-out loss");
    }
    *out_loss = sum / (double)count;
    return true;
}

/* ---- files ------------------------------------------------------------------------------------------------------ */

/* A file that cannot be written is no reason to throw the run away: it is said at once, training goes on, and the exit
 * status tells it unless a later one succeeds. */
static void save(struct trainer *t, bool with_checkpoint) {
    if (t->rank != 0) {
        return;
    }
    if (with_checkpoint && t->options.cuda) {
        kernel->read(t->model.home, t->model.params, t->model.count);
        kernel->read(t->optimizer.home, t->optimizer.mean, 2 * t->model.count);
        with_checkpoint = cuda_good();
    }
    struct run run = {t->setup, &t->model, &t->optimizer, &t->curve};
    t->save_failed = (with_checkpoint && !checkpoint_save(&run, t->options.out)) ||
                     !write_csv(&t->curve, t->options.out) ||
                     !write_svg(&t->curve, t->options.out, &t->setup, t->model.count, t->size);
    if (t->save_failed) {
        fprintf(stderr, "%strain_gpt: %s\n", isatty(STDOUT_FILENO) == 1 ? "\n" : "", problem_text);
    }
}

/* Rank 0 only: the folder is there, and a run in it is not overwritten by accident. */
static bool prepare_folder(const struct options *o) {
    uint64_t steps[CHECKPOINT_LIST];
    if (!o->resume && mkdir(o->out, 0777) != 0 && errno != EEXIST) {
        return problem("The folder %s cannot be made: %s.", o->out, strerror(errno));
    }
    DIR *folder = opendir(o->out);
    if (folder == NULL) {
        return problem("The folder %s cannot be opened: %s.", o->out, strerror(errno));
    }
    closedir(folder);
    if (!o->resume && !o->fresh && checkpoint_list(o->out, steps) > 0) {
        return problem("%s holds the checkpoint of step %llu; go on from it with --resume, delete it with --fresh, "
                       "or name another --out.",
                       o->out, (unsigned long long)steps[0]);
    }
    return true;
}

static struct setup make_setup(const struct trainer *t) {
    const struct options *o = &t->options;
    return (struct setup){
        .layers = o->layers,
        .dim = o->dim,
        .heads = o->heads,
        .context = o->context,
        .seed = o->seed,
        .sequences = o->batch * o->accumulate * (size_t)t->size,
        .steps = o->steps,
        .warmup = o->warmup,
        .text_crc = crc32c(0, t->text.train.data, t->text.train.count),
        .lr = o->lr,
        .decay = o->decay,
        .clip = o->clip,
    };
}

/* Rank 0 reads; the others get its state over the network, so that no shared disk is needed. */
static bool resume(struct trainer *t) {
    struct run run = {t->setup, &t->model, &t->optimizer, &t->curve};
    bool good = t->rank != 0 || checkpoint_load(&run, t->options.out);
    if (good && t->rank == 0) {
        struct setup same = run.setup;
        same.step = t->setup.step;
        if (memcmp(&same, &t->setup, sizeof same) != 0) {
            fprintf(
                stderr,
                "train_gpt: The text, the batch, the seed or the schedule is not that of the checkpoint of step %llu; "
                "the run goes on, but not as it would have.\n",
                (unsigned long long)run.setup.step);
        }
        t->setup.step = run.setup.step;
        good = run.setup.step <= t->options.steps || problem("The checkpoint is of step %llu, beyond --steps %zu.",
                                                             (unsigned long long)run.setup.step, t->options.steps);
    }
    return all_good(t, good);
}

/* ---- the run ---------------------------------------------------------------------------------------------------- */

static bool same_text_everywhere(struct trainer *t) {
    double least = (double)t->setup.text_crc, most = least;
    if (ddl_all_reduce_scalar(t->world, &least, DDL_MIN) != DDL_OK ||
        ddl_all_reduce_scalar(t->world, &most, DDL_MAX) != DDL_OK) {
        return ddl_problem(t, "Comparing the texts");
    }
    return least == most || problem("The ranks read different texts; give every rank the same --data.");
}

/* What these kinds do not send now, error feedback sends some steps later: gradients come late and added up, which is
 * what momentum does to them (a delay is a momentum: Mitliagkas et al., arXiv 1605.09774). Momentum on top of it is too
 * much of it: docs/training.md has the figures. */
static bool compression_delays(const struct options *o) {
    static const char *const kinds[] = {"sign", "top-k", "random-k", "gtop-k", "power"};
    bool delays = false;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        delays = delays || strcmp(o->compress, kinds[i]) == 0;
    }
    return delays;
}

/* From here on parameters, gradients and moments are on the GPU. */
static bool move_to_gpu(struct trainer *t) {
    size_t count = t->model.count;
    float *params = cuda_floats(2 * count), *moments = params == NULL ? NULL : cuda_floats(2 * count);
    if (moments != NULL) {
        kernel->write(params, t->model.home, count);
        kernel->write(moments, t->optimizer.home, 2 * count);
        t->model.params = params;
        t->model.grads = params + count;
        t->optimizer.mean = moments;
        t->optimizer.square = moments + count;
    }
    return all_good(t, moments != NULL && cuda_good());
}

/* Everything before the first step: text, memory, folder, and the same state on every rank. */
static bool prepare(struct trainer *t) {
    const struct options *o = &t->options;
    bool good = (!o->cuda || cuda_open(t->context, t->program, o->batch * o->context)) &&
                text_load(&t->text, o->data, o->context) &&
                model_create(&t->model, (struct shape){o->layers, o->dim, o->heads, o->context}, o->batch) &&
                adamw_create(&t->optimizer, t->model.count) && curve_reserve(&t->curve, o->steps + 1) &&
                (t->rank != 0 || prepare_folder(o));
    t->bytes = malloc(2 * o->batch * o->context);
    t->targets = t->bytes == NULL ? NULL : t->bytes + o->batch * o->context;
    good = good && (t->bytes != NULL || problem("There is no memory for a batch."));
    if (!all_good(t, good)) {
        return false;
    }
    if (o->fresh && t->rank == 0) {
        checkpoint_prune(o->out, 0, 0); /* not before everything else is known to be right */
    }
    t->optimizer.lr = o->lr;
    t->optimizer.decay = o->decay;
    t->optimizer.clip = o->clip;
    t->optimizer.beta1 = o->beta1 >= 0.0 ? o->beta1 : compression_delays(o) ? 0.0 : 0.9;
    t->optimizer.warmup = o->warmup;
    t->optimizer.steps = o->steps;
    t->setup = make_setup(t);
    if (!same_text_everywhere(t)) {
        return false;
    }
    if (o->resume ? !resume(t) : (model_initialize(&t->model, o->seed), false)) {
        return false;
    }
    double step = (double)t->setup.step;
    if (ddl_broadcast(t->world, DDL_VIEW(&step, 1), 0) != DDL_OK ||
        ddl_broadcast(t->world, DDL_VIEW(t->model.params, t->model.count), 0) != DDL_OK ||
        ddl_broadcast(t->world, DDL_VIEW(t->optimizer.mean, 2 * t->model.count), 0) != DDL_OK) {
        return ddl_problem(t, "Sending rank 0's parameters to all");
    }
    t->setup.step = (uint64_t)step;
    return !o->cuda || move_to_gpu(t);
}

/* --compress, with error feedback throughout: what a code loses is added to the next gradient. */
static bool choose_compression(const struct options *o, ddl_compression *out) {
    static const char *const names[] = {"none", "f16",      "bf16",  "int8",     "qsgd",   "sign",
                                        "",     "top-k", "random-k", "gtop-k", "power", "adaptive"}; /* as numbered */
    for (int kind = 0; kind < (int)(sizeof names / sizeof *names); kind++) {
        if (*names[kind] != '\0' && strcmp(o->compress, names[kind]) == 0) {
            out->kind = (ddl_compression_kind)kind;
            out->error_feedback = kind != 0;
            out->ratio = o->ratio;
            out->rank = (int32_t)o->rank;
            return true;
        }
    }
    return problem("There is no compression \"%s\"; --help lists the kinds.", o->compress);
}

/* Matrices are compressed, vectors, which are small, go as they are. */
static bool add_tensors(struct trainer *t) {
    const struct model *m = &t->model;
    bool good = true;
    for (size_t i = m->tensor_count; good && i-- > 0;) {
        const struct tensor *x = &m->tensors[i];
        const int64_t shape[] = {(int64_t)x->rows, (int64_t)(x->count / x->rows)};
        ddl_trainer_options options = {.uncompressed = x->rows == 1, .no_decay = !x->decays};
        ddl_tensor param = ddl_tensor_nd(m->params + x->first, DDL_F32, 2, shape);
        ddl_tensor grad = ddl_tensor_nd(m->grads + x->first, DDL_F32, 2, shape);
        param.device = grad.device = cuda.device;
        good = ddl_trainer_add(t->sync, NULL, param, grad, &options, NULL) == DDL_OK;
    }
    return good && (cuda.device == DDL_HOST || ddl_trainer_set_stream(t->sync, cuda.gpu.stream) == DDL_OK);
}

/* The trainer's AdamW, for strategies that keep its state where this program's own cannot. Gradients of stale strategies
 * are not averaged, so that there is no norm to clip by. Checkpoints of this program hold its own optimizer's state. */
static bool choose_optimizer(struct trainer *t, ddl_trainer_config *config) {
    const struct options *o = &t->options;
    t->stale = config->sync == DDL_SYNC_SSP || config->sync == DDL_SYNC_ASP;
    t->theirs = t->stale || config->shard;
    if (config->dedicated) {
        return problem("--strategy %s has ranks that only serve, and all ranks of train_gpt train; take ASP.", o->strategy);
    }
    if (t->theirs && o->resume) {
        return problem("--strategy %s keeps the optimizer's state outside of checkpoints; leave --resume out.", o->strategy);
    }
    if (!t->theirs) {
        config->step = take_step;
        config->step_user = t;
        return true;
    }
    double beta1 = t->optimizer.beta1;
    config->optimizer = (ddl_optimizer){.kind = DDL_ADAMW, .learning_rate = o->lr, .beta1 = beta1 > 0.0 ? beta1 : -1.0,
                                        .beta2 = 0.99, .weight_decay = o->decay};
    config->clip_norm = t->stale ? 0.0 : o->clip;
    config->staleness = config->sync == DDL_SYNC_SSP ? (int32_t)o->staleness : 0;
    return true;
}

/* The strategy by its name, with what the options say otherwise. */
static bool prepare_sync(struct trainer *t) {
    const struct options *o = &t->options;
    ddl_trainer_config config;
    if (ddl_trainer_preset(o->strategy, &config) != DDL_OK) {
        return problem("There is no strategy \"%s\"; docs/training.md lists them.", o->strategy);
    }
    if (strcmp(o->compress, "none") != 0 && !choose_compression(o, &config.compression)) {
        return false;
    }
    if (!choose_optimizer(t, &config)) {
        return false;
    }
    config.overlap_forward = 0; /* this model's forward waits for all parameters at once */
    config.accumulate = (int32_t)o->accumulate;
    config.bucket_bytes = o->bucket > 0 ? (int64_t)o->bucket * 1024 : config.bucket_bytes;
    config.local_steps = o->local > 0 ? (int32_t)o->local : config.local_steps;
    bool good = ddl_trainer_create(t->world, &config, &t->sync) == DDL_OK && add_tensors(t);
    return (good && ddl_trainer_start(t->sync) == DDL_OK) || ddl_problem(t, "Preparing the strategy");
}

static bool due(size_t step, size_t every) { return every > 0 && step % every == 0; }

static bool train(struct trainer *t) {
    const struct options *o = &t->options;
    double begin = now_seconds(), before = t->curve.count > 0 ? t->curve.at[t->curve.count - 1].seconds : 0.0;
    size_t first = t->setup.step;
    for (size_t step = first; step < o->steps; step++) {
        double start = now_seconds(), loss = 0.0, held = NAN;
        t->waiting = 0.0;
        t->step = step;
        if (!train_step(t, &loss)) {
            return false;
        }
        double spent = now_seconds() - start;
        bool looks = due(step + 1, o->eval) || due(step + 1, o->save) || step + 1 == o->steps;
        if (looks && ddl_trainer_sync(t->sync) != DDL_OK) { /* local SGD: ranks are not alike between averages */
            return ddl_problem(t, "Averaging the parameters");
        }
        if ((due(step + 1, o->eval) && step + 1 < o->steps && !evaluate(t, 64, &held)) ||
            (step + 1 == o->steps && !evaluate(t, 1024, &held))) {
            return false;
        }
        double elapsed = now_seconds() - begin;
        t->setup.step = step + 1;
        if (t->rank == 0) {
            t->curve.at[t->curve.count++] = (struct point){
                step + 1,
                before + elapsed,
                (float)loss,
                (float)held,
                (float)adamw_rate(&t->optimizer, step),
                (float)((double)(o->batch * o->context * o->accumulate) * t->size / spent),
                (float)(t->waiting / spent),
                (float)t->norm,
            };
            report_progress(&t->curve, o->steps, elapsed / (double)(step + 1 - first));
        }
        if (due(step + 1, o->save) || step + 1 == o->steps) {
            save(t, !t->theirs);
        }
    }
    if (first == o->steps) {
        save(t, false);
    }
    return true;
}

/* ---- the sample ------------------------------------------------------------------------------------------------- */

/* Draws a byte from softmax(logits / temperature). */
static uint8_t draw(const float *logits, double temperature, double unit) {
    size_t best = 0;
    double weights[VOCAB], sum = 0.0;
    for (size_t i = 1; i < VOCAB; i++) {
        best = logits[i] > logits[best] ? i : best;
    }
    for (size_t i = 0; i < VOCAB; i++) {
        weights[i] = temperature > 0.0 ? exp((double)(logits[i] - logits[best]) / temperature) : i == best;
        sum += weights[i];
    }
    for (size_t i = 0; i < VOCAB; i++) {
        unit -= weights[i] / sum;
        if (unit < 0.0) {
            return (uint8_t)i;
        }
    }
    return (uint8_t)best;
}

/* Lets the model continue the prompt on rank 0. What is not plain text is printed as '?': half a UTF-8 letter upsets
 * terminals. */
static void write_sample(struct trainer *t) {
    const struct options *o = &t->options;
    size_t length = strlen(o->prompt), kept = length < o->context ? length : o->context;
    uint8_t *window = t->bytes;
    float logits[VOCAB] = {0};
    memset(window, 0, o->context);
    memcpy(window, o->prompt + length - kept, kept);
    t->model.batch = 1;
    printf("\n%s", o->prompt);
    for (size_t i = 0; i < o->sample; i++) {
        model_forward(&t->model, window);
        kernel->read(logits, t->model.logits + (kept - 1) * VOCAB, VOCAB);
        uint8_t next = draw(logits, o->temperature, random_unit(o->seed, RANDOM_SAMPLE, i, 0));
        if (kept == o->context) {
            memmove(window, window + 1, --kept);
        }
        window[kept++] = next;
        putchar((next >= 32 && next < 127) || next == '\n' || next == '\t' ? next : '?');
        if (next == '\n') {
            fflush(stdout);
        }
    }
    printf("\n");
}

static bool run(struct trainer *t) {
    signal(SIGXFSZ, SIG_IGN); /* a file size limit shall fail the write, not kill the run */
    const char *set = kernels_choose(getenv("TRAIN_GPT_KERNELS"));
    if (!prepare(t) || !prepare_sync(t)) {
        return false;
    }
    set = t->options.cuda ? "CUDA" : set;
    if (t->rank == 0) {
        printf("%.2f million parameters, %zu KB of text, %d rank%s x %zu sequences of %zu bytes, %s kernels\n",
               (double)t->model.count / 1e6, (t->text.train.count + t->text.held_out.count) / 1000, (int)t->size,
               t->size == 1 ? "" : "s", t->options.batch, t->options.context, set);
    }
    if (!train(t)) {
        return false;
    }
    if (t->rank == 0) {
        char line[512];
        ddl_trainer_stats stats = {0};
        ddl_trainer_describe(t->sync, line, sizeof line);
        ddl_trainer_stats_get(t->sync, &stats);
        printf("strategy %s: %s; it sent %lld bytes for gradients of %zu\n", t->options.strategy, line,
               (long long)stats.bytes, t->model.count * sizeof(float));
    }
    if (t->rank == 0 && t->curve.count > 0) {
        const struct point *last = &t->curve.at[t->curve.count - 1];
        printf("held-out loss %.3f nats per byte (%.2f bits) after %.0f s; curve in %s/loss.svg\n",
               (double)last->held_out, (double)last->held_out / 0.6931471805599453, last->seconds, t->options.out);
        if (t->options.sample > 0) {
            write_sample(t);
        }
    }
    if (fflush(stdout) != 0 || ferror(stdout)) {
        return problem("Standard output cannot be written: %s.", strerror(errno));
    }
    return cuda_good() && (!t->save_failed || problem("The last checkpoint or curve could not be saved; see above."));
}

int main(int argc, char **argv) {
    static struct trainer t;
    char why[512] = "";
    t.program = argv[0];
    bool good = parse_options(&t.options, argc, argv);
    if (good && t.options.help) {
        print_help();
        return fflush(stdout) != 0;
    }
    gpu_prepare();
    if (good && ddl_init(&(ddl_config){.error_text = why, .error_bytes = sizeof why}, &t.context) != DDL_OK) {
        good = problem("Joining the job failed: %s", why);
    }
    if (good) {
        t.world = ddl_world(t.context);
        t.rank = ddl_rank(t.world);
        t.size = ddl_size(t.world);
        good = run(&t);
    }
    if (!good) {
        problem_tell();
    }
    ddl_trainer_free(&t.sync);
    cuda_close();
    ddl_finalize(&t.context);
    text_free(&t.text);
    model_free(&t.model);
    free(t.optimizer.home);
    free(t.curve.at);
    free(t.bytes);
    return good ? 0 : 1;
}

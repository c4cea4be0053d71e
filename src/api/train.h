/* api: the trainer, a layer above groups that a training loop talks to. docs/training.md explains it. */
#ifndef DDL_API_TRAIN_H
#define DDL_API_TRAIN_H

#include "ps.h"

#ifdef __cplusplus
extern "C" {
#endif

/* >>trainer
 * A training loop says which gradient is final and which parameter it needs; a config says how the ranks of a group
 * keep their parameters the same.
 *
 *     ddl_trainer_config config = {.optimizer = {.kind = DDL_ADAMW, .learning_rate = 1e-3}};
 *     ddl_trainer_create(world, &config, &trainer);
 *     for (i = 0; i < layers; i++)                                    in the order of forward
 *         ddl_trainer_add(trainer, name[i], weight[i], gradient[i], NULL, NULL);
 *     ddl_trainer_start(trainer);                                     all begin with rank 0's parameters
 *     for (...) {
 *         forward();                                                  ddl_param_wait(trainer, i) where it overlaps
 *         for (i = layers - 1; i >= 0; i--) { backward(i); ddl_grad_ready(trainer, i); }
 *         ddl_step(trainer);
 *     }
 *
 * Parameters have the same bits on all ranks after each step (of local SGD: after each synchronisation). A trainer has
 * a group of its own, so that other operations on the caller's group may come at any time. One trainer is used by one
 * thread at a time. Operations run while the program computes when the context has a progress thread. */
typedef struct ddl_trainer ddl_trainer;
#define DDL_ALL (-1) /* as an index: all tensors */

typedef enum ddl_schedule {
    DDL_SCHEDULE_AUTO = 0,      /* merges small gradients and splits large ones: the fastest plan of those it tries */
    DDL_SCHEDULE_NONE = 1,      /* all gradients together, after backward */
    DDL_SCHEDULE_WAIT_FREE = 2, /* each gradient when it is ready (WFBP) */
    DDL_SCHEDULE_FUSED = 3,     /* buckets of bucket_bytes, each when it is full */
    DDL_SCHEDULE_MERGED = 4,    /* the best merge for measured latency, bandwidth and backward (MG-WFBP) */
    DDL_SCHEDULE_PRIORITY = 5   /* pieces, the next forward's first layers first (ByteScheduler) */
} ddl_schedule;

/* Where gradients are averaged and the optimizer runs. */
typedef enum ddl_architecture {
    DDL_ARCHITECTURE_ALL_REDUCE = 0, /* on every rank */
    DDL_ARCHITECTURE_PS = 1,         /* on parameter servers: gradients are pushed, parameters pulled */
    DDL_ARCHITECTURE_AUTO = 2        /* each f32 gradient by all-reduce, or over servers beside the ranks that average
                                        it: what the measured cost says, again while training; BSP */
} ddl_architecture;

/* The program's own optimizer: called in ddl_step, with the averaged gradients in the gradients' own memory, once for
 * all tensors. Not 0 ends the step, and ddl_step with DDL_ERR_STATE; the ranks are to return the same. */
typedef int (*ddl_trainer_fn)(void *user, ddl_trainer *trainer);

/* What differs for one tensor. All zero: nothing. */
typedef struct ddl_trainer_options {
    double rate_factor;          /* of the learning rate; 0: 1; below 0: the tensor is not trained */
    int32_t no_decay;            /* 1: no weight decay */
    int32_t uncompressed;        /* 1: it travels as it is, whatever the config says */
    ddl_compression compression; /* instead of the config's */
} ddl_trainer_options;

/* Decides for a tensor that is added, by its name, type and shape: *options are those that ddl_trainer_add was given.
 * The same on all ranks. It must not call ddl. */
typedef void (*ddl_trainer_choose_fn)(void *user, const char *name, const ddl_tensor *gradient,
                                      ddl_trainer_options *options);

/* All zero is BSP over all-reduce with SGD on schedule auto. */
typedef struct ddl_trainer_config {
    ddl_sync sync;
    ddl_schedule schedule;
    ddl_optimizer optimizer;
    ddl_compression compression; /* of gradients; BSP without shard, uneven, overlap_forward; PS: see docs */
    ddl_trainer_choose_fn choose; /* of each tensor; NULL: its options and this config say all */
    void *choose_user;
    ddl_trainer_fn step;         /* instead of optimizer */
    void *step_user;
    int32_t accumulate;      /* steps of the loop that make one step of the optimizer; default 1 */
    double clip_norm;        /* the averaged gradients' norm over all tensors is cut to this; 0: not */
    int32_t unchecked;       /* 1: gradients that are not finite are not looked for */
    int32_t shard;           /* 1: each rank keeps its part of the optimizer's state (ZeRO-1) */
    int32_t uneven;          /* 1: ranks may run out of data: see ddl_trainer_join_out */
    int32_t overlap_forward; /* 1: ddl_step does not wait (shard: for gradients alone); forward calls
                              ddl_param_wait for each parameter */
    int64_t bucket_bytes;    /* of DDL_SCHEDULE_FUSED; default 4 MiB */
    int64_t piece_bytes;     /* of DDL_SCHEDULE_PRIORITY; default 4 MiB */
    int64_t credit_bytes;    /* of DDL_SCHEDULE_PRIORITY: what may be under way; default 4 pieces */
    double latency_s;        /* of an operation, and its time per byte, for merged, priority and auto; */
    double seconds_per_byte; /* 0: measured */
    double exposed_s; /* of DDL_COMPRESS_ADAPTIVE: the communication of a step that may stay exposed; default 0 */
    int32_t replan_steps;    /* how often those look whether another plan is better; default 50, -1: never */
    int32_t local_steps;     /* of DDL_SYNC_LOCAL; default 8 */
    int64_t local_after;     /* the first so many steps are BSP (post-local SGD) */
    double outer_rate;       /* of DDL_SYNC_LOCAL, not 0: Nesterov's step on the averaged difference (DiLoCo: 0.7) */
    double outer_momentum;   /* default 0.9 where outer_rate is set; below 0: none */
    ddl_architecture architecture;
    int32_t servers;   /* of PS and AUTO; default: one beside each rank, or 1 that is dedicated */
    int32_t dedicated; /* 1: the last `servers` ranks only serve: they call ddl_trainer_serve */
    int32_t staleness; /* of DDL_SYNC_SSP: as in ddl_sync_config */
    int32_t staleness_max;
} ddl_trainer_config;

/* Fills *out_config for a strategy by the name that the field knows it by; the caller sets the optimizer. Names: see
 * docs/training.md, or ddl_trainer_preset_name. Errors: DDL_ERR_ARG. [any thread] */
DDL_API ddl_status ddl_trainer_preset(const char *name, ddl_trainer_config *out_config);
/* The name of preset index, from 0; NULL behind the last. [any thread] */
DDL_API const char *ddl_trainer_preset_name(int32_t index);

/* Makes a trainer for a group. Local. config NULL is all zero. Free with ddl_trainer_free. Errors: DDL_ERR_ARG (a
 * number out of range), DDL_ERR_UNSUPPORTED (what does not go together), DDL_ERR_NOMEM. [any thread] */
DDL_API ddl_status ddl_trainer_create(ddl_group *group, const ddl_trainer_config *config, ddl_trainer **out_trainer);
/* Registers a parameter and its gradient, in the order in which forward uses them. Both are f16, bf16, f32 or f64, of
 * one shape, contiguous, in memory that stays where it is until ddl_trainer_free: all tensors of a trainer in host
 * memory, or all on one device, where its work is done too. f16 and bf16 parameters get a copy that the optimizer works
 * on; f64 is trained in f64. name NULL: "tensor 7". out_index may be NULL. Errors: DDL_ERR_ARG, DDL_ERR_STATE (after
 * ddl_trainer_start), DDL_ERR_UNSUPPORTED (f64 compressed, or with outer_rate). [one thread] */
DDL_API ddl_status ddl_trainer_add(ddl_trainer *trainer, const char *name, ddl_tensor parameter, ddl_tensor gradient,
                                   const ddl_trainer_options *options, int32_t *out_index);
/* Ends registration: checks that all ranks have the same tensors and config, sends rank 0's parameters to all workers,
 * and compares checksums of what they then have. A dedicated server registers tensors of the same types and shapes,
 * wherever they are: they are left as they are. Every rank calls. Errors: DDL_ERR_MISMATCH (names the first tensor that
 * differs, and the ranks), and those of collectives. [one thread] */
DDL_API ddl_status ddl_trainer_start(ddl_trainer *trainer);
/* Serves the workers until all of them have freed their trainers or died. Blocks. For ranks of `dedicated`, instead of
 * the loop. Errors: DDL_ERR_ARG on another rank. [one thread] */
DDL_API ddl_status ddl_trainer_serve(ddl_trainer *trainer);
/* Frees a trainer and sets *trainer to NULL; NULL is fine. Parameters and gradients are the caller's. Local: operations
 * that are under way end; when other ranks go on they fail there. A server waits until nobody needs it. [one thread] */
DDL_API ddl_status ddl_trainer_free(ddl_trainer **trainer);

/* Says that a gradient (index, or DDL_ALL) is final in this step; it is copied, its memory may be used again. In any
 * order, another on each rank if it must be. Does not block. Errors: DDL_ERR_STATE (twice in a step, its parameter was
 * not waited for, not started), DDL_ERR_ARG (no such tensor), and those of operations that failed, which ddl_step says
 * if this call does not see them. [one thread] */
DDL_API ddl_status ddl_grad_ready(ddl_trainer *trainer, int32_t index);
/* Ends a step: waits for the averages, clips, updates the parameters. Of `accumulate` calls only the last does; with
 * overlap_forward ddl_param_wait does. Errors: DDL_ERR_STATE (a gradient is not ready: nothing has changed),
 * DDL_ERR_ARG (the average of a gradient is not finite: the sentence names tensor and rank; on all ranks parameters
 * stay as they were and the step is over), and those of collectives. [one thread] */
DDL_API ddl_status ddl_step(ddl_trainer *trainer);
/* Waits until a parameter (or DDL_ALL) has the last step's update. At once without overlap_forward. Errors: DDL_ERR_ARG
 * (no such tensor; or the average of its gradient is not finite: on all ranks this parameter stays as it was, though
 * others have changed, and the step goes on), and those of operations that failed. [one thread] */
DDL_API ddl_status ddl_param_wait(ddl_trainer *trainer, int32_t index);
/* Sets the learning rate from the next update on. The same on all ranks. Errors: DDL_ERR_ARG. [one thread] */
DDL_API ddl_status ddl_trainer_set_rate(ddl_trainer *trainer, double learning_rate);
/* Sets a number of the program's own, of at least 0, that checkpoints keep: the epoch, the place in the data. Where
 * ranks have set different ones the greatest is saved. Errors: DDL_ERR_ARG. [one thread] */
DDL_API ddl_status ddl_trainer_set_epoch(ddl_trainer *trainer, int64_t epoch);
/* Orders the trainer with work on a stream of the device that its tensors are on (a cudaStream_t), from the next call
 * on; NULL: no more. Then ddl_grad_ready returns at once, and the gradient is copied when the stream has come there;
 * ddl_step and ddl_param_wait still wait for the averages, but what is put on the stream after them finds the updates.
 * Without a stream gradients are computed before ddl_grad_ready, and each call waits for what it did on the device.
 * The stream outlives the trainer. Errors: DDL_ERR_STATE (no tensor was added, or they are in host memory; the stream
 * is being captured into a graph), and the device's: no stream of its. [one thread] */
DDL_API ddl_status ddl_trainer_set_stream(ddl_trainer *trainer, void *stream);
/* This rank has no more data: it goes on without contributing until all ranks have called this. All ranks call it at
 * the end; needs `uneven`. Averages are over the ranks that contribute. Batches that were accumulated, fewer than
 * `accumulate`, make a last step to which this rank gives their mean. Errors: DDL_ERR_STATE (some gradients of a batch
 * are ready and others are not, not `uneven`), and those of ddl_step. [one thread] */
DDL_API ddl_status ddl_trainer_join_out(ddl_trainer *trainer);
/* Changes sync, schedule, accumulate, clip_norm and their numbers between two steps, after local parameters (and then
 * the optimizer's state) have been averaged. An outer optimizer that is switched off leaves nothing behind. Every rank
 * calls, with the same config; its optimizer, step, compression, shard and uneven must be those of before, with shard
 * also schedule, bucket_bytes and whether it accumulates. Errors: as ddl_trainer_create, DDL_ERR_STATE (a step is under
 * way), DDL_ERR_MISMATCH; then nothing has changed. [one thread] */
DDL_API ddl_status ddl_trainer_switch(ddl_trainer *trainer, const ddl_trainer_config *config);
/* Writes parameters, the state of optimizer and compression, step and epoch to a new file in folder, on rank 0. Every
 * rank calls, between two steps. Local SGD synchronises first; the inner optimizer's state is then rank 0's. The file
 * is durable and whole when it appears; the one before it is kept, older ones are deleted. Errors: DDL_ERR_SYSTEM on
 * all ranks, with rank 0's reason (disk full; the folder has later checkpoints, of a run that was not loaded).
 * [one thread] */
DDL_API ddl_status ddl_trainer_save(ddl_trainer *trainer, const char *folder);
/* Takes the newest sound checkpoint of rank 0's folder to all ranks, of any number; every rank calls, between two
 * steps. *out_step (may be NULL): steps taken when it was saved, -1 when the folder has none; the epoch is then in
 * ddl_trainer_stats. Damaged files are passed over with a warning. On another number of ranks the residuals of
 * compressed gradients begin at zero, which the log says at level info. Errors: DDL_ERR_CORRUPT (all are; of servers
 * DDL_ERR_SYSTEM), DDL_ERR_MISMATCH (other tensors or another optimizer), DDL_ERR_SYSTEM (no such folder); then
 * nothing has changed. [one thread] */
DDL_API ddl_status ddl_trainer_load(ddl_trainer *trainer, const char *folder, int64_t *out_step);
/* Averages parameters now, when steps of local SGD have been taken since the last time. Every rank calls.
 * [one thread] */
DDL_API ddl_status ddl_trainer_sync(ddl_trainer *trainer);

typedef struct ddl_trainer_stats {
    int64_t steps;        /* of the optimizer, finished */
    double compute_s;     /* the last step, from the end of the one before: outside of the trainer, */
    double exposed_s;     /* waiting for communication, */
    double hidden_s;      /* communication while the program did something else */
    int64_t bytes;        /* of gradients or parameters that the last step handed to collectives */
    int32_t operations;   /* and in how many collectives */
    int32_t waits;        /* how often it had to wait */
    double norm;          /* of the averaged gradients before clipping; 0 when neither clipped nor checked */
    int32_t contributors; /* ranks in the last average */
    double latency_s, seconds_per_byte; /* of the model, 0 before it is known */
    int32_t replans;                    /* how often the plan changed since the start */
    int64_t not_finite;  /* steps without update (overlap_forward: of a parameter): a gradient was not finite */
    int64_t local_steps; /* taken since parameters were last averaged */
    int64_t epoch;       /* of ddl_trainer_set_epoch, or of the checkpoint that was loaded since; 0: of neither */
} ddl_trainer_stats;
/* Reads the figures of the last step. [one thread] */
DDL_API ddl_status ddl_trainer_stats_get(const ddl_trainer *trainer, ddl_trainer_stats *out_stats);
/* Says in a line or two what the trainer does: sync, schedule, operations, what is hidden. Returns the bytes that it
 * needed. [one thread] */
DDL_API size_t ddl_trainer_describe(const ddl_trainer *trainer, char *out_text, size_t bytes);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* DDL_API_TRAIN_H */

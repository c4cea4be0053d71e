/* api: parameter servers. docs/training.md explains them. */
#ifndef DDL_API_PS_H
#define DDL_API_PS_H

#include "../api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* >>ps
 * Parameter servers. Parameters (f32 and f64, each summed up and stepped in its type) live on servers, cut into pieces
 * that are spread evenly; workers push gradients and pull parameters, of the same type, servers run the optimizer.
 * Workers are ranks 0, 1, ... of the group:
 *
 *     servers beside workers   dedicated = 0   ranks 0 .. servers-1 serve on a thread of their own, all ranks work
 *     servers alone            dedicated = 1   the last `servers` ranks call ddl_ps_serve, the others work
 *
 * A worker's clock is the number of iterations it has finished; an update carries the clock at which it was pushed.
 *
 *     DDL_SYNC_BSP  a read at clock c sees all updates of clocks < c and no other. One of a parameter that this worker
 *                   has pushed in its clock waits for the whole clock and sees it, as ddl_ps_push_pull does. The server
 *                   adds the gradients of a clock in the order of ranks and takes one step: the same bits in every run
 *                   and over every number of servers
 *     DDL_SYNC_SSP  a read at clock c sees all updates of clocks < c - staleness, all of its own, and maybe newer ones
 *                   of others; no worker is ahead of the slowest by more (Ho et al., NIPS 2013). Each push is a step of
 *                   the optimizer. Staleness 0 is BSP
 *     DDL_SYNC_ASP  every push is a step as it comes; nobody waits
 *
 * A worker that dies or leaves counts no more; BSP fails with DDL_ERR_PEER when one dies. A server that dies fails
 * every call that needs it with DDL_ERR_PEER: load a checkpoint into new servers. Calls are [any thread]; those of one
 * worker on one parameter take effect in the order they were made. Free with ddl_ps_free, before ddl_finalize. */
typedef struct ddl_ps ddl_ps;
typedef enum ddl_sync {
    DDL_SYNC_BSP = 0,   /* each step with the average of all ranks' gradients */
    DDL_SYNC_LOCAL = 1, /* of the trainer: each rank steps alone; every local_steps steps parameters are averaged */
    DDL_SYNC_SSP = 2,   /* servers: as above */
    DDL_SYNC_ASP = 3
} ddl_sync;
typedef struct ddl_sync_config {
    ddl_sync mode;         /* default DDL_SYNC_BSP */
    int32_t staleness;     /* of SSP, in clocks; 0: the default, 3; -1: bound 0 */
    int32_t staleness_max; /* greater: the bound moves between the two by measured step times (DSSP, Zhao et al.,
                              ICDCS 2019), so that the fast wait least; 0: it does not */
} ddl_sync_config;
/* All zero = defaults. All ranks pass the same. */
typedef struct ddl_ps_config {
    int32_t servers;         /* default 1 */
    int32_t dedicated;       /* 1: the last ranks only serve */
    ddl_sync_config sync;
    ddl_optimizer optimizer; /* LARS and LAMB: without tables */
    ddl_op op;               /* DDL_AVG (default): a gradient counts as 1 / workers, or DDL_SUM: as it is */
    int64_t memory_bytes;    /* of one server: parameters, optimizer state, tables, and pushes and pulls under way,
                                which wait at the worker while there is no room, and are refused with
                                DDL_ERR_NOMEM when there will never be. 0: no bound */
    int64_t piece_bytes;     /* most of one message; default 1 MiB; LARS and LAMB: parameters are not cut */
    int32_t unchecked;       /* 1: gradients that are not finite are pushed as they are */
} ddl_ps_config;

/* Makes servers for count parameters; the values of rank 0 are the first. Contiguous f32 or f64, of the same lengths
 * and types on all ranks; ranks that only serve may pass NULL for data. Every rank of the group calls. Blocks. Errors:
 * DDL_ERR_ARG (servers, staleness, optimizer or types that cannot work), DDL_ERR_NOMEM (memory_bytes is too little: how
 * much is needed), DDL_ERR_MISMATCH (ranks differ). */
DDL_API ddl_status ddl_ps_create(ddl_group *group, const ddl_ps_config *config, const ddl_tensor *params, int32_t count,
                                 ddl_ps **out_ps);
/* Leaves (ddl_ps_leave), waits until this rank's server is needed by nobody, frees and sets *ps to NULL; NULL is fine.
 * Errors: DDL_ERR_STATE while requests are outstanding. */
DDL_API ddl_status ddl_ps_free(ddl_ps **ps);
/* Serves until every worker has left or died. Blocks. Errors: DDL_ERR_ARG on a rank that is no dedicated server. */
DDL_API ddl_status ddl_ps_serve(ddl_ps *ps);
/* Says that this worker has nothing more to push: the others go on without it. Its later calls are refused. */
DDL_API ddl_status ddl_ps_leave(ddl_ps *ps);

/* Pushes the gradient of a parameter. It is applied exactly once: one that ended with DDL_ERR_TIMEOUT may or may not
 * have been, and is pushed again with the same *sequence, before a newer one. sequence NULL, or *sequence 0: a new
 * push, which gets the next number. While the server has no room (memory_bytes) it waits: that is the back-pressure.
 * Errors: DDL_ERR_ARG (also: it is not finite, and nothing is pushed; a sum that overflows on a server is not looked
 * for), DDL_ERR_PEER, DDL_ERR_TIMEOUT, DDL_ERR_STATE (BSP, SSP: a parameter twice in one clock; or it is made again
 * after a newer one, and is left out if it was not applied before). */
DDL_API ddl_status ddl_ps_push(ddl_ps *ps, int32_t param, ddl_tensor grad, uint64_t *sequence);
DDL_API ddl_status ddl_ps_ipush(ddl_ps *ps, int32_t param, ddl_tensor grad, uint64_t *sequence,
                                ddl_request **out_request);
/* Pulls a parameter as the sync mode lets this worker's clock see it; waits until it may. */
DDL_API ddl_status ddl_ps_pull(ddl_ps *ps, int32_t param, ddl_tensor out);
DDL_API ddl_status ddl_ps_ipull(ddl_ps *ps, int32_t param, ddl_tensor out, ddl_request **out_request);
/* Pushes a gradient and pulls what the next clock may see. */
DDL_API ddl_status ddl_ps_push_pull(ddl_ps *ps, int32_t param, ddl_tensor grad, ddl_tensor out, uint64_t *sequence);
DDL_API ddl_status ddl_ps_ipush_pull(ddl_ps *ps, int32_t param, ddl_tensor grad, ddl_tensor out, uint64_t *sequence,
                                     ddl_request **out_request);
/* Ends an iteration: this worker's clock grows by one. Waits while it would be more than staleness + 1 ahead of the
 * slowest. A parameter that it did not push in that iteration is averaged over those who did. Errors: DDL_ERR_STATE
 * while another thread of this worker is in it. */
DDL_API ddl_status ddl_ps_clock(ddl_ps *ps);
/* Multiplies the learning rate of this worker's pushes from now on: a schedule. BSP takes that of the lowest rank. */
DDL_API ddl_status ddl_ps_rate(ddl_ps *ps, double factor);
/* Changes the sync mode, at a point where every worker calls it and none has requests outstanding. All clocks become
 * the greatest. Errors: DDL_ERR_ARG, DDL_ERR_MISMATCH (workers ask for different things), DDL_ERR_STATE (BSP: some have
 * pushed for a clock and others have not). */
DDL_API ddl_status ddl_ps_switch(ddl_ps *ps, const ddl_sync_config *sync);

typedef struct ddl_ps_info {
    int32_t worker, workers; /* this rank's number, -1: only serves; how many there are */
    int32_t server, servers;
    int64_t clock, slowest;  /* of this worker; of the slowest, as far as this rank knows */
    uint64_t sequence;       /* of the last push */
    /* of the server on this rank */
    uint64_t pushes_applied, pushes_repeated; /* repeated: known already, and not applied */
    uint64_t memory_bytes, memory_peak_bytes;
    int64_t elements;            /* of parameters, that it holds */
    uint64_t rows, rows_evicted; /* of tables */
} ddl_ps_info;
/* Reads clocks and counters. Does not block. */
DDL_API ddl_status ddl_ps_info_get(ddl_ps *ps, ddl_ps_info *out_info);

/* A sparse table: rows of f32 by 64-bit id, spread over the servers by a hash of the id. A row is made when it is first
 * pulled or pushed, with values that depend on seed, id and column alone. */
typedef struct ddl_ps_table_config {
    int32_t width;        /* values of a row */
    float uniform;        /* a new row is uniform in [-uniform, uniform); 0: zeros */
    uint64_t seed;
    int64_t rows;         /* most rows on one server; 0: as memory_bytes allows */
    int32_t evict;        /* 1: the row that was used least recently makes room, and is lost; 0: no room is an error */
    int32_t fixed;        /* 1: pushes make rows, pulls of unknown ids are refused */
} ddl_ps_table_config;
/* Makes a table; every worker calls, with the same config. *out_table is its number: 0, 1, ... Errors: DDL_ERR_ARG,
 * DDL_ERR_NOMEM (the rows that were asked for do not fit into memory_bytes), DDL_ERR_MISMATCH. */
DDL_API ddl_status ddl_ps_table_create(ddl_ps *ps, const ddl_ps_table_config *config, int32_t *out_table);
/* Pulls count rows into out (count * width). An id may come more than once. Errors: DDL_ERR_ARG (fixed: an unknown id,
 * which is named), DDL_ERR_NOMEM (no room for a row, without evict: names table, row and server). */
DDL_API ddl_status ddl_ps_pull_rows(ddl_ps *ps, int32_t table, const uint64_t *ids, int64_t count, ddl_tensor out);
/* Pushes gradients of count rows (count * width); those of one id are added up. sequence as in ddl_ps_push. Several
 * pushes may be made in one clock; a table counts as pushed when the worker calls ddl_ps_clock. A gradient is divided
 * by the number of workers (DDL_AVG). On DDL_ERR_NOMEM the rows of other messages (piece_bytes) are applied. */
DDL_API ddl_status ddl_ps_push_rows(ddl_ps *ps, int32_t table, const uint64_t *ids, int64_t count, ddl_tensor grads,
                                    uint64_t *sequence);

/* Writes parameters, optimizer state, clocks and tables into folder, one file for each server, checksummed, each
 * renamed when it is whole; the generation before is kept. Every worker calls, with no requests outstanding. The folder
 * is one that all servers share, of this job alone. Errors: DDL_ERR_SYSTEM (the earlier ones still stand),
 * DDL_ERR_STATE as ddl_ps_switch. */
DDL_API ddl_status ddl_ps_save(ddl_ps *ps, const char *folder);
/* Takes the newest generation that is whole and undamaged, written by any number of servers for the same parameters and
 * tables (make those first). Workers go on at their clocks; if their number is another, at the slowest. Every worker
 * calls. Errors: DDL_ERR_SYSTEM (there is none, and what is wrong with each), DDL_ERR_MISMATCH (another model's). */
DDL_API ddl_status ddl_ps_load(ddl_ps *ps, const char *folder);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* DDL_API_PS_H */

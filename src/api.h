/* api: what a program that uses ddl reads. Types and functions, documented here and nowhere else.
 * This room knows nothing of how any of it is done. */
#ifndef DDL_API_H
#define DDL_API_H

#include <stddef.h>
#include <stdint.h>

#define DDL_VERSION_MAJOR 0
#define DDL_VERSION_MINOR 1
#define DDL_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

#ifndef DDL_API
#ifdef DDL_STATIC
#define DDL_API static __attribute__((unused))
#else
#define DDL_API extern
#endif
#endif

/* >>status
 * Every call returns a ddl_status. 0 is success, positive is "not yet", negative is an error; the values never change.
 * The sentence that goes with an error (what was tried, with whom, what to do) is ddl_error(). */
#define DDL_STATUS_LIST(X)                                                                                             \
    X(DDL_OK, 0, "success")                                                                                            \
    X(DDL_IN_PROGRESS, 1, "not finished yet")                                                                          \
    X(DDL_ERR_ARG, -1, "an argument is wrong; nothing was changed")                                                    \
    X(DDL_ERR_NOMEM, -2, "out of memory")                                                                              \
    X(DDL_ERR_SYSTEM, -3, "the operating system refused a request")                                                    \
    X(DDL_ERR_STATE, -4, "the object is freed, finalized or busy")                                                     \
    X(DDL_ERR_TIMEOUT, -5, "the deadline passed")                                                                      \
    X(DDL_ERR_PEER, -6, "a rank is dead")                                                                              \
    X(DDL_ERR_MISMATCH, -7, "ranks called different operations")                                                       \
    X(DDL_ERR_AUTH, -8, "the peer could not prove that it belongs to this job")                                        \
    X(DDL_ERR_VERSION, -9, "the peer speaks another version")                                                          \
    X(DDL_ERR_CORRUPT, -10, "damaged bytes arrived")                                                                   \
    X(DDL_ERR_TRUNCATED, -11, "the message is larger than the buffer")                                                 \
    X(DDL_ERR_CANCELLED, -12, "the request was cancelled")                                                             \
    X(DDL_ERR_ABORTED, -13, "the job was aborted")                                                                     \
    X(DDL_ERR_FORK, -14, "the context belongs to the parent process")                                                  \
    X(DDL_ERR_QUORUM, -15, "too few ranks are left to go on")                                                          \
    X(DDL_ERR_PLUGIN, -16, "a plugin that was asked for cannot be used")                                               \
    X(DDL_ERR_CONFIG, -17, "the configuration or the environment is wrong")                                            \
    X(DDL_ERR_UNSUPPORTED, -18, "not supported here")                                                                  \
    X(DDL_ERR_INTERNAL, -19, "a bug in ddl")

typedef enum ddl_status {
#define DDL_STATUS_ENUM(name, value, text) name = value,
    DDL_STATUS_LIST(DDL_STATUS_ENUM)
#undef DDL_STATUS_ENUM
} ddl_status;

/* Names a status ("DDL_ERR_PEER"). Never NULL; unknown values give "DDL_?". [any thread] */
DDL_API const char *ddl_status_name(ddl_status status);
/* Says in a few words what a status means. Never NULL. [any thread] */
DDL_API const char *ddl_status_text(ddl_status status);

/* >>handles
 * Opaque. Who creates, frees. */
typedef struct ddl_context ddl_context; /* one member of one job: a process, or a thread that plays a rank */
typedef struct ddl_group ddl_group;     /* an ordered set of ranks that communicate with each other */
typedef struct ddl_request ddl_request; /* an operation that was started */

/* >>tensor
 * A tensor is a view by value: it owns nothing. strides are in elements; all zero means C-contiguous.
 *     float grad[1000];
 *     ddl_all_reduce(world, DDL_ARRAY(grad), DDL_ARRAY(grad), DDL_SUM); */
typedef enum ddl_dtype {
    DDL_DTYPE_NONE = 0,
    DDL_F16 = 1,
    DDL_BF16 = 2,
    DDL_F32 = 3,
    DDL_F64 = 4,
    DDL_I8 = 5,
    DDL_U8 = 6,
    DDL_I32 = 7,
    DDL_U32 = 8,
    DDL_I64 = 9,
    DDL_U64 = 10,
    DDL_BOOL = 11,    /* one byte, 0 or 1 */
    DDL_F32_I32 = 12, /* struct { float value; int32_t index; }    for DDL_MIN_INDEX and DDL_MAX_INDEX */
    DDL_F64_I64 = 13, /* struct { double value; int64_t index; } */
    DDL_I32_I32 = 14, /* struct { int32_t value; int32_t index; } */
    DDL_I64_I64 = 15, /* struct { int64_t value; int64_t index; } */
    DDL_E4M3 = 16,    /* 8-bit floats of the Open Compute Project (OFP8 1.0): up to 448, no infinity */
    DDL_E5M2 = 17     /* up to 57344, with infinities */
} ddl_dtype;

#define DDL_MAX_DIMS 8
#define DDL_HOST 0 /* the device number of ordinary memory; device plugins hand out 1, 2, ... */

typedef struct ddl_tensor {
    void *data;
    ddl_dtype dtype;
    int32_t device;
    int32_t ndim; /* 0 is one element */
    int64_t shape[DDL_MAX_DIMS];
    int64_t strides[DDL_MAX_DIMS];
} ddl_tensor;

/* Makes a view of count elements at data. [any thread] */
DDL_API ddl_tensor ddl_tensor_1d(const void *data, ddl_dtype dtype, int64_t count);
/* Makes a C-contiguous view of ndim <= DDL_MAX_DIMS dimensions; ndim out of range gives a view of dtype
 * DDL_DTYPE_NONE, which every operation refuses. [any thread] */
DDL_API ddl_tensor ddl_tensor_nd(const void *data, ddl_dtype dtype, int32_t ndim, const int64_t *shape);
/* Counts the elements of a view; -1 when its shape is not valid. [any thread] */
DDL_API int64_t ddl_tensor_count(const ddl_tensor *tensor);
/* Size of one element in bytes, 0 for an unknown type. [any thread] */
DDL_API size_t ddl_dtype_bytes(ddl_dtype dtype);
/* "f32"; "?" for an unknown type. [any thread] */
DDL_API const char *ddl_dtype_name(ddl_dtype dtype);
/* Allocates memory that peers can reach without a copy where a transport offers it, aligned to 64 bytes.
 * shape has ndim entries. Errors: DDL_ERR_ARG, DDL_ERR_NOMEM. Free with ddl_tensor_free. [any thread] */
DDL_API ddl_status ddl_tensor_alloc(ddl_context *context, ddl_dtype dtype, int32_t ndim, const int64_t *shape,
                                    ddl_tensor *out_tensor);
/* The same in the memory of a device, see ddl_device_count; aligned to 256 bytes. Errors besides: DDL_ERR_ARG for no
 * such device, DDL_ERR_UNSUPPORTED where no plugin brings devices; DDL_ERR_NOMEM: the device is full;
 * where memory was freed lately, which peers may still have mapped, that is found out after 2 s. [any thread] */
DDL_API ddl_status ddl_tensor_alloc_on(ddl_context *context, int32_t device, ddl_dtype dtype, int32_t ndim,
                                       const int64_t *shape, ddl_tensor *out_tensor);
/* Copies src to dst, which has the same type and number of elements; each may be strided, and on any device. Waits
 * until dst holds the data; of an error it may hold a part. Errors: DDL_ERR_ARG (not alike, they overlap: nothing is
 * written), DDL_ERR_NOMEM, DDL_ERR_SYSTEM; and DDL_ERR_TIMEOUT (timeout_ms), DDL_ERR_ABORTED, DDL_ERR_STATE (finalized
 * meanwhile), after which a device may still read and write its tensors for a while. [any thread] */
DDL_API ddl_status ddl_tensor_copy(ddl_context *context, ddl_tensor dst, ddl_tensor src);
/* Frees memory of ddl_tensor_alloc and ddl_tensor_alloc_on and zeroes *tensor. A zeroed tensor is skipped. Errors:
 * DDL_ERR_ARG when the memory is not ddl's (or was freed before); DDL_ERR_STATE when an operation that is under way
 * uses it: then nothing is freed, and the sentence names it. Before that it waits up to 50 ms for the operation, and
 * lets others progress. It does not see gradients that ddl_grad_ready or a push to parameter servers, as ddl_ps_push,
 * is just reading on another thread: not to be freed meanwhile. [any thread] */
DDL_API ddl_status ddl_tensor_free(ddl_context *context, ddl_tensor *tensor);

/* DDL_ARRAY(a): the tensor of a whole C array; type and count come from the array itself, so that a byte count
 * cannot be passed for an element count. A pointer does not compile. DDL_VIEW(p, count): count elements at p.
 * These macros are for C only. C++ has ddl_array(a) and ddl_view(p, count), at the end of the interface. */
#ifndef __cplusplus
#define DDL_DTYPE_OF(lvalue)                                                                                           \
    _Generic((lvalue),                                                                                                 \
        float: DDL_F32,                                                                                                \
        double: DDL_F64,                                                                                               \
        int8_t: DDL_I8,                                                                                                \
        uint8_t: DDL_U8,                                                                                               \
        int32_t: DDL_I32,                                                                                              \
        uint32_t: DDL_U32,                                                                                             \
        long: DDL_I64,                                                                                                 \
        unsigned long: DDL_U64,                                                                                        \
        long long: DDL_I64,                                                                                            \
        unsigned long long: DDL_U64,                                                                                   \
        _Bool: DDL_BOOL)
#define DDL_ARRAY(a)                                                                                                   \
    ddl_tensor_1d((a), DDL_DTYPE_OF((a)[0]),                                                                           \
                  (int64_t)(sizeof(a) / sizeof((a)[0])) +                                                              \
                      0 * (int64_t)sizeof(char[1 - 2 * !_Generic(&(a), __typeof__((a)[0]) **: 0, default: 1)]))
#define DDL_VIEW(p, count) ddl_tensor_1d((p), DDL_DTYPE_OF(*(p)), (int64_t)(count))
#endif

/* The public C struct of DLPack 0.x (https://dmlc.github.io/dlpack), declared here under our own names so that no
 * other header is needed; a DLTensor * may be cast to it. */
typedef struct ddl_dlpack {
    void *data;
    struct {
        int32_t type; /* 1 = kDLCPU, 2 = kDLCUDA, 3 = kDLCUDAHost */
        int32_t id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code; /* 0 int, 1 uint, 2 float, 4 bfloat, 6 bool, 10 float8_e4m3fn, 12 float8_e5m2 */
        uint8_t bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL = C-contiguous */
    uint64_t byte_offset;
} ddl_dlpack;

/* Devices are what plugins bring (libddl-cuda.so); without one there are none. They are numbered from 1, those of the
 * plugin "cuda" first: CUDA device i is number i + 1. A tensor on one (ddl_tensor.device) may be used in every
 * operation of this file but those of the trainer and of parameter servers, mixed with tensors in ordinary memory; what
 * a device or a transport cannot do by itself goes by way of pinned memory. Its elements must be ready, and must stay,
 * as those of ordinary tensors: wait for the device before the call. Each device is opened at its first use. Where
 * devices reach each other by a transport of their own, a collective runs there when a rank passes a tensor on one:
 * then each rank passes at least one such tensor, or the call is DDL_ERR_MISMATCH (a forced algorithm, DDL_ALGO,
 * avoids it). Between hosts the same holds from 64 KiB on. An empty tensor, a rank's part of a v-form, counts by its
 * `device`. all_reduce_many is one such call for each type of its tensors.
 * Counts the devices; 0 for NULL. [any thread] */
DDL_API int32_t ddl_device_count(ddl_context *context);
typedef struct ddl_device_info {
    const char *plugin; /* "cuda"; strings are valid until ddl_finalize */
    const char *about;
    int32_t index; /* among the plugin's devices, from 0 */
} ddl_device_info;
/* Tells of one device, and opens it. Errors: DDL_ERR_ARG, DDL_ERR_UNSUPPORTED, what its plugin says. [any thread] */
DDL_API ddl_status ddl_device_info_get(ddl_context *context, int32_t device, ddl_device_info *out_info);
/* Which device memory is on; DDL_HOST for ordinary memory. Errors: DDL_ERR_ARG: it was a device's and is
 * freed. [any thread] */
DDL_API ddl_status ddl_device_of(ddl_context *context, const void *pointer, int32_t *out_device);

/* Views a DLTensor. Nothing is copied; the memory stays its owner's. Errors: DDL_ERR_ARG (ndim, lanes),
 * DDL_ERR_UNSUPPORTED (a type or device that ddl has not). [any thread] */
DDL_API ddl_status ddl_tensor_from_dlpack(const ddl_dlpack *dlpack, ddl_tensor *out_tensor);
/* Shows a tensor as a DLTensor. out_dlpack points into *tensor, which must outlive it. Errors: DDL_ERR_ARG,
 * DDL_ERR_UNSUPPORTED (the value-index pairs). [any thread] */
DDL_API ddl_status ddl_tensor_to_dlpack(ddl_tensor *tensor, ddl_dlpack *out_dlpack);

/* >>op
 * Reductions. f16, bf16 and the 8-bit floats are added and multiplied in f32, and rounded to nearest even after each
 * step; integers wrap; AVG of integers truncates toward zero. AVG of f16, e4m3 and e5m2 is finite whenever the inputs
 * are: they are scaled down, by a power of two, before the sum. What is too large becomes infinite, and NaN in e4m3
 * (the conversion without saturation of OFP8): an overflow shows. Every NaN result has all bits set. */
typedef int32_t ddl_op;
enum {
    DDL_OP_NONE = 0,
    DDL_SUM = 1,
    DDL_PROD = 2,
    DDL_MIN = 3,
    DDL_MAX = 4,
    DDL_AVG = 5,
    DDL_BAND = 6,
    DDL_BOR = 7,
    DDL_BXOR = 8,
    DDL_LAND = 9,
    DDL_LOR = 10,
    DDL_LXOR = 11,
    DDL_MIN_INDEX = 12, /* pairs: the smaller value, of equals the smaller index */
    DDL_MAX_INDEX = 13
};
/* dst[i] = a[i] op b[i] for count elements; a is from the lower ranks. dst is a or b or neither. */
typedef void (*ddl_op_fn)(void *dst, const void *a, const void *b, int64_t count, ddl_dtype dtype, void *user);
/* Makes an op of a function. commutative == 0 keeps the order of ranks: x0 op x1 op ... (the op must be associative).
 * All ranks must create their ops in the same order. fn must not call ddl. Free with ddl_op_free. [any thread] */
DDL_API ddl_status ddl_op_create(ddl_context *context, ddl_op_fn fn, void *user, int commutative, ddl_op *out_op);
/* Makes sum(factor * x): each rank's input is multiplied by its own factor before the sum. [any thread] */
DDL_API ddl_status ddl_op_create_scaled_sum(ddl_context *context, double factor, ddl_op *out_op);
/* Frees a created op; operations in flight and persistent requests keep it alive. Errors: DDL_ERR_ARG. [any thread] */
DDL_API ddl_status ddl_op_free(ddl_context *context, ddl_op op);

/* >>context */
typedef enum ddl_log_level { DDL_LOG_NONE = 0, DDL_LOG_WARN = 1, DDL_LOG_INFO = 2, DDL_LOG_DEBUG = 3 } ddl_log_level;
/* Called with the context locked, by any of its threads: it must not call ddl. */
typedef void (*ddl_log_fn)(void *user, ddl_log_level level, const char *line);
/* All three or none. alloc returns memory aligned like malloc's or NULL. */
typedef struct ddl_allocator {
    void *(*alloc)(void *user, size_t bytes);
    void (*free)(void *user, void *memory);
    void *user;
} ddl_allocator;
/* Bring your own rendezvous: an all-gather of small blobs. in has bytes bytes, out has world_size * bytes, rank r's
 * blob goes to out + r * bytes. Every rank calls it with the same bytes. Returns 0, anything else fails ddl_init. */
typedef int (*ddl_exchange_fn)(void *user, const void *in, void *out, size_t bytes);

/* All zero = take it from the environment, else the default. Strings are copied. */
typedef struct ddl_config {
    int32_t world_size;      /* 0: rank and world_size come from the environment */
    int32_t rank;            /* 0 <= rank < world_size */
    const char *rendezvous;  /* "tcp://host:port" or "file:///shared/folder"; NULL: MASTER_ADDR and MASTER_PORT */
    ddl_exchange_fn exchange; /* instead of a rendezvous */
    void *exchange_user;
    const void *secret; /* >= 16 bytes that all ranks share; NULL: see DDL_SECRET_FILE */
    size_t secret_bytes;
    const char *job;            /* tells jobs on one host apart */
    const char *interface_name; /* "eth0": bind and advertise its address */
    const char *advertise;      /* an address that peers reach this rank at, when it is not the bound one */
    const char *port_range;     /* "20000-20100"; NULL: any free port */
    const char *transports;     /* "shm,tcp": which, in order of preference; NULL: all that load */
    const char *plugins;        /* names or absolute paths that must load, separated by commas */
    const char *algorithm;      /* "ring": see DDL_ALGO */
    int64_t timeout_ms;         /* deadline of an operation; default 300,000; -1: none */
    int64_t init_timeout_ms;    /* deadline of ddl_init; default 60,000 */
    int64_t stall_ms;           /* a wait this long is reported; default 10,000; -1: never */
    int32_t progress_thread;    /* 1: operations progress on a thread of the context's own */
    int32_t deterministic;      /* 1: reduce in rank order whatever the algorithm and transport */
    ddl_log_level log_level;    /* NONE: DDL_LOG, else warn */
    ddl_log_fn log;             /* NULL: stderr */
    void *log_user;
    ddl_allocator allocator;
    char *error_text; /* where ddl_init puts the sentence when it fails */
    size_t error_bytes;
} ddl_config;

/* Version as MAJOR * 10000 + MINOR * 100 + PATCH of the implementation that is linked. [any thread] */
DDL_API int32_t ddl_version(void);
/* 1 when this build has a feature: "tcp", "plugins", "trace", a plugin's name that is folded in. [any thread] */
DDL_API int32_t ddl_feature(const char *name);
/* Joins a job. config NULL reads the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, ...); with none set the
 * world is this process alone. Blocks until all ranks have come, at most init_timeout_ms. Errors: DDL_ERR_CONFIG,
 * DDL_ERR_AUTH, DDL_ERR_TIMEOUT (names the ranks that are missing), DDL_ERR_SYSTEM, DDL_ERR_NOMEM, DDL_ERR_PLUGIN.
 * On error *out_context is NULL and nothing is left behind. Closed descriptors 0 to 2 become /dev/null. [any thread] */
DDL_API ddl_status ddl_init(const ddl_config *config, ddl_context **out_context);
/* Joins a job that runs, instead of ddl_init, in place of a rank that is dead: that of RANK, with the job's WORLD_SIZE,
 * rendezvous and secret. The members admit it in ddl_group_grow; blocks until then, at most init_timeout_ms. *out_group
 * is the grown group, and this context's world: finalize frees it. Ranks that are not in it are dead to this process.
 * Errors: as of ddl_init; DDL_ERR_TIMEOUT when nobody admitted it, with the last reason. ddl_init does the same where
 * DDL_RESTARTED is set, as it is by ddlrun --restart. [any thread] */
DDL_API ddl_status ddl_join(const ddl_config *config, ddl_context **out_context, ddl_group **out_group);
/* 0 in a process that began the job; in one that joined it later more than in all that had joined before.
 * [any thread] */
DDL_API int32_t ddl_incarnation(const ddl_context *context);
/* Leaves the job and sets *context to NULL; NULL is fine. Says goodbye to peers and does not wait for what they do; it
 * may stay up to 500 ms until the last bytes have arrived there. Requests end with DDL_ERR_STATE in the threads that
 * wait for them, and are freed; groups that the caller created remain to be freed. A call of a trainer that another
 * thread is in ends first, and the program's own step in it, for at most timeout_ms; after stall_ms a warning names it.
 * Errors: DDL_ERR_STATE: called inside a call of a trainer (in the program's own step, or in a handler of atexit when
 * that step calls exit), where nothing changes and the job goes on, or a second time; DDL_ERR_TIMEOUT: a thread has not
 * come back from such a call, as when it ended in that step: the rank has left the job, but nothing is freed, and
 * *context stays, for ddl_error only. Any use of a handle of the context after this (a copy of the context, the world,
 * a group, a request) gives DDL_ERR_STATE and a sentence. That holds for the last 16 contexts of a process; with an
 * allocator of the program's own only until its last group is freed, for then all memory is given back. [one thread] */
DDL_API ddl_status ddl_finalize(ddl_context **context);
/* Ends the job: every operation of every rank returns DDL_ERR_ABORTED with reason (may be NULL). Local first, returns
 * at once. [any thread, any time] */
DDL_API ddl_status ddl_abort(ddl_context *context, const char *reason);
/* The group of all ranks. Owned by the context. NULL for NULL. [any thread] */
DDL_API ddl_group *ddl_world(ddl_context *context);
/* The sentence of the calling thread's last error in this context, of any thread's when it had none; "" when there was
 * none at all. Valid until the thread's next error; of more than 16 threads, the last 16 errors are kept. A call that
 * is given no context, group or request (NULL for it, a list without one; ddl_part, ddl_tensor_from_dlpack) has nowhere
 * to keep a sentence: its status says all, and ddl_error tells of an earlier error. [any thread] */
DDL_API const char *ddl_error(const ddl_context *context);
/* Writes the last collectives, 256 of each group, one line each, oldest first; returns the bytes it needed.
 * [any thread] */
DDL_API size_t ddl_flight_record(ddl_context *context, char *out_text, size_t bytes);
/* Marks what the program does ("step 12", "backward") on the timeline that DDL_TRACE asks for, until ddl_trace_end.
 * Spans nest, 16 deep; 23 bytes of the name are kept. Without DDL_TRACE nothing happens. Errors: ARG: name is NULL;
 * STATE: none is open. [any thread; spans of several threads at once mix] */
DDL_API ddl_status ddl_trace_begin(ddl_context *context, const char *name);
DDL_API ddl_status ddl_trace_end(ddl_context *context);
/* Lets operations progress without waiting for one. [any thread] */
DDL_API ddl_status ddl_progress(ddl_context *context);

/* What went over one transport. Collectives that it runs by itself are no messages: they are counted apart. */
typedef struct ddl_transport_stats {
    const char *name; /* "tcp"; valid until ddl_finalize. NULL: there is no such transport */
    uint64_t messages_sent, messages_received;
    uint64_t bytes_sent, bytes_received;
    uint64_t peers; /* ranks that are reached by it */
    uint64_t native_operations, native_bytes, native_ns; /* of what it ran, as for algorithms */
} ddl_transport_stats;
#define DDL_STATS_TRANSPORTS 8
/* What one algorithm did: the collectives of this rank that ended well, of all groups. */
typedef struct ddl_algorithm_stats {
    const char *name; /* "ring", as in DDL_ALGO; always valid. NULL: there is no such algorithm */
    uint64_t operations;
    uint64_t bytes;   /* elements of the call, in v-forms those of all ranks, times their size */
    uint64_t time_ns; /* from call to end; a native one that was over at its first look counts 0 */
} ddl_algorithm_stats;
#define DDL_STATS_ALGORITHMS 24
typedef struct ddl_stats {
    uint64_t ops_started, ops_completed, ops_failed;
    uint64_t ops_slow; /* took DDL_SLOW times their estimate, and over 1 ms, after the last arrival */
    uint64_t messages_sent, messages_received;
    uint64_t bytes_sent, bytes_received;
    uint64_t wait_ns;           /* time inside blocking waits, of those that were not over at once */
    uint64_t memory_bytes;      /* held by this context now, tensors of ddl_tensor_alloc excluded */
    uint64_t memory_peak_bytes; /* the most it ever held */
    uint64_t peers_connected;
    uint64_t strangers_refused; /* connections that could not prove that they belong here */
    uint64_t unexpected_bytes;  /* arrived, not asked for yet */
    uint64_t device_bytes_in, device_bytes_out; /* copied from devices, to devices, for operations */
    ddl_transport_stats transports[DDL_STATS_TRANSPORTS]; /* the messages and bytes above, by transport */
    ddl_algorithm_stats algorithms[DDL_STATS_ALGORITHMS]; /* by first use */
    int32_t slow_rank; /* of the others, the one that kept this rank waiting most; -1: none stands out */
    int32_t slow_link; /* the rank from which large messages come slowly, for links of that kind; -1: none does */
    uint64_t slow_link_usual_bytes_per_s; /* of links of that kind; ddl_rank_stats has its own */
} ddl_stats;
/* Reads the counters. [any thread] */
DDL_API ddl_status ddl_stats_get(ddl_context *context, ddl_stats *out_stats);
/* How often this rank found another one to be the last to arrive at a collective, of those that it hears from: all by
 * native collectives, some by messages, where a rank may be late because it waits itself. Of this rank itself: how
 * often all that it hears from were there before it. So the rank to blame is the one with the highest count of itself
 * that others find late. */
typedef struct ddl_rank_stats {
    uint64_t last;        /* collectives */
    uint64_t late_ns;     /* after this rank's call, of all of them together; 0 of this rank itself */
    uint64_t late_max_ns; /* the most of one */
    uint64_t large_messages; /* of 128 KiB to 1 MiB, that came from it in pieces */
    uint64_t bytes_per_s;    /* of the last 16 of these the median, from the header to the last byte */
} ddl_rank_stats;
/* Reads them of one rank of the world. Errors: DDL_ERR_ARG. [any thread] */
DDL_API ddl_status ddl_rank_stats_get(ddl_context *context, int32_t rank, ddl_rank_stats *out_stats);
/* Writes all of them as text, the latest ranks first; returns the bytes it needed. [any thread] */
DDL_API size_t ddl_stats_text(ddl_context *context, char *out_text, size_t bytes);

/* >>group
 * Ranks in a group are 0 .. size-1. Groups are independent: two may be used at once from different threads, with no
 * rule of order between them. Calls of collectives on one group come in the same order on all its ranks. */
/* [any thread] 's for all four; -1 or "" for NULL. */
DDL_API int32_t ddl_rank(const ddl_group *group);
DDL_API int32_t ddl_size(const ddl_group *group);
DDL_API const char *ddl_group_name(const ddl_group *group);
DDL_API ddl_context *ddl_group_context(const ddl_group *group);

/* Makes a group of ranks of parent, in the order given. Only the members call, all with the same list; others are not
 * involved. name may be NULL; 63 bytes of it are kept, control characters become '?'. Blocks. Threads may make groups
 * of one parent at once: those of equal lists need names that differ in what is kept, else they cannot be told apart.
 * Errors: DDL_ERR_ARG (not a member, a rank twice, out of range), DDL_ERR_MISMATCH (lists of one name differ, found
 * after a second when their lowest rank is the same; else and without an answer DDL_ERR_TIMEOUT). Free with
 * ddl_group_free. [any thread] */
DDL_API ddl_status ddl_group_create(ddl_group *parent, const int32_t *ranks, int32_t count, const char *name,
                                    ddl_group **out_group);
/* Splits: ranks that give the same colour form a group, ordered by key, then by rank. colour < 0 takes part and gets
 * NULL. Every rank of parent calls. Blocks. [any thread] */
DDL_API ddl_status ddl_group_split(ddl_group *parent, int32_t colour, int32_t key, ddl_group **out_group);
/* Duplicates a group: same ranks, its own messages. Every rank calls. Blocks. [any thread] */
DDL_API ddl_status ddl_group_duplicate(ddl_group *group, ddl_group **out_group);
/* Frees a group and sets *group to NULL. Local: does not wait for others. Errors: DDL_ERR_STATE while requests are
 * outstanding, DDL_ERR_ARG for the world. [any thread] */
DDL_API ddl_status ddl_group_free(ddl_group **group);
/* Translates count ranks of one group into ranks of another of the same context; DDL_NO_RANK where there is none.
 * [any thread] */
DDL_API ddl_status ddl_group_translate(const ddl_group *from, const int32_t *ranks, int32_t count, const ddl_group *to,
                                       int32_t *out_ranks);
/* Agrees on the AND of flag over the ranks that are alive, in spite of deaths: all survivors get the same *flag.
 * Returns DDL_ERR_PEER when a rank died that had not been agreed on as dead (the flag is valid then too).
 * [any thread] */
DDL_API ddl_status ddl_agree(ddl_group *group, int32_t *flag);
/* Makes the group of the survivors after DDL_ERR_PEER. Every survivor calls; they agree on who is left. A message of
 * the old group, begun before, that a rank which has called this (or ddl_group_grow) has not answered ends with
 * DDL_ERR_PEER and the death that was the reason, when it is waited for or tested: not all survivors need have noticed
 * it. A receive from any rank goes on: ddl_cancel ends it. Errors: DDL_ERR_QUORUM when not more than half of the group
 * is left. [any thread] */
DDL_API ddl_status ddl_group_shrink(ddl_group *group, ddl_group **out_group);
/* Takes new processes into a group: each that is in ddl_join for a rank of the world whose process is dead. Every
 * member that lives calls, with the same arguments. Waits until max_joiners have come (0: as many as ranks are dead),
 * at most timeout_ms (0: the group's timeout), and then takes those who are there; the whole call takes at most
 * timeout_ms and once the group's timeout. The grown group has the members that live and the newcomers, in order of
 * world rank; state is the program's to broadcast. The group itself, which may be broken, stays as it was; so it does
 * on error: DDL_ERR_TIMEOUT when nobody came or a member does not answer, DDL_ERR_STATE when nobody is dead,
 * DDL_ERR_QUORUM as above, DDL_ERR_UNSUPPORTED without a rendezvous by TCP whose host has a member, DDL_ERR_CONFIG or
 * DDL_ERR_SYSTEM when its port cannot be had. [any thread] */
DDL_API ddl_status ddl_group_grow(ddl_group *group, int32_t max_joiners, int64_t timeout_ms, ddl_group **out_group);

/* A member that is zero is left as it is. */
typedef struct ddl_group_options {
    int64_t timeout_ms;    /* to 366 days; -1: none */
    int64_t stall_ms;      /* to 366 days; -1: never */
    const char *algorithm; /* "ring", "auto"; or by operation: "all_reduce=ring,broadcast=tree" */
    int32_t deterministic; /* 1 on, -1 off */
} ddl_group_options;
/* Sets options of this rank's handle; algorithm and deterministic must be set alike on all ranks.
 * Errors: DDL_ERR_ARG for an unknown algorithm or a number out of range; then nothing is set. [any thread] */
DDL_API ddl_status ddl_group_set(ddl_group *group, const ddl_group_options *options);

/* Orders this rank's operations on a group on a stream of a device (CUDA: a cudaStream_t; the default stream is
 * (void *)1, cudaStreamLegacy): those that have tensors on devices begin, on this rank, when the stream comes to the
 * place of the call. The blocking forms return at once, and what is put on the stream later waits there until they are
 * over; only ddl_recv and ddl_send_recv with an out_info wait themselves. Nothing on the stream waits for the i-forms
 * but by ddl_stream_wait. Where an operation fails after its call has returned, the stream goes on, the result is not
 * there, a warning tells why, and a collective's group is broken. Starts the context's progress thread. stream NULL: as
 * before. While the stream is captured into a graph, a collective that devices run alone becomes a part of it, and its
 * call returns when all ranks have captured theirs (docs/cuda.md); other operations with tensors on devices are
 * DDL_ERR_UNSUPPORTED and change nothing. The stream must outlive what was ordered on it. Errors: DDL_ERR_ARG (no such
 * device, a stream of another one), DDL_ERR_UNSUPPORTED (its streams cannot wait), DDL_ERR_SYSTEM (no thread); then
 * nothing is set.
 * [any thread] */
DDL_API ddl_status ddl_group_stream(ddl_group *group, int32_t device, void *stream);

/* >>request
 * A request ends with the wait or test that reports it done, which frees it and sets *request to NULL. NULL requests
 * are skipped. Buffers belong to ddl until then. A call that fails sets what it would have returned, *out_request or
 * *out_group, to NULL (ddl_batch: all of out_requests). */
typedef struct ddl_info {
    int32_t source; /* of a receive: who sent it */
    int32_t tag;
    int64_t count; /* elements of the receiver's dtype that arrived */
    ddl_status status;
} ddl_info;
/* Waits for one request; its own deadline applies. out_info may be NULL. Returns the operation's status.
 * [any thread] */
DDL_API ddl_status ddl_wait(ddl_request **request, ddl_info *out_info);
/* DDL_IN_PROGRESS until it is done, then as ddl_wait. Does not block. [any thread] */
DDL_API ddl_status ddl_test(ddl_request **request, ddl_info *out_info);
/* Waits for all; returns the first error by index. out_infos (count entries) may be NULL. [any thread] */
DDL_API ddl_status ddl_wait_all(ddl_request **requests, int32_t count, ddl_info *out_infos);
/* Waits for any one; *out_index is which, -1 when all are NULL. [any thread] */
DDL_API ddl_status ddl_wait_any(ddl_request **requests, int32_t count, int32_t *out_index, ddl_info *out_info);
/* Waits until at least one is done and reports all that are: out_indices and out_infos have count entries.
 * *out_done is 0 when all are NULL. [any thread] */
DDL_API ddl_status ddl_wait_some(ddl_request **requests, int32_t count, int32_t *out_done, int32_t *out_indices,
                                 ddl_info *out_infos);
/* DDL_IN_PROGRESS until all are done, then as ddl_wait_all; frees none before. [any thread] */
DDL_API ddl_status ddl_test_all(ddl_request **requests, int32_t count, ddl_info *out_infos);
/* Cancels a receive that nothing has arrived for; it then ends with DDL_ERR_CANCELLED, which ddl_wait reports.
 * Errors: DDL_ERR_STATE when it is too late, DDL_ERR_ARG when it is not a receive. [any thread] */
DDL_API ddl_status ddl_cancel(ddl_request *request);
/* Ends a request in the order of its group's stream: what is put on the stream after this waits, on the device, until
 * the operation is over. Sets *request to NULL; does not block. Errors: DDL_ERR_STATE when the group has no stream,
 * DDL_ERR_ARG for a persistent request; what the operation returned if it is over. [any thread] */
DDL_API ddl_status ddl_stream_wait(ddl_request **request);
/* Frees a persistent request that is not running, or a finished one, and sets *request to NULL. Errors: DDL_ERR_STATE
 * while it runs. [any thread] */
DDL_API ddl_status ddl_request_free(ddl_request **request);

/* >>p2p
 * Messages between two ranks of a group are received in the order they were sent, per tag. 0 <= tag. */
#define DDL_ANY_SOURCE (-1)
#define DDL_ANY_TAG (-1)
#define DDL_NO_RANK (-2) /* as a peer: completes at once, moves nothing */

/* Sends to peer. Blocks until the tensor may be used again. Errors: DDL_ERR_ARG, DDL_ERR_PEER, DDL_ERR_TIMEOUT.
 * [any thread] */
DDL_API ddl_status ddl_send(ddl_group *group, ddl_tensor tensor, int32_t peer, int32_t tag);
/* Receives from peer or DDL_ANY_SOURCE. A shorter message is fine, out_info->count tells; a longer one is
 * DDL_ERR_TRUNCATED, names both sizes and stays to be received with a larger buffer. [any thread] */
DDL_API ddl_status ddl_recv(ddl_group *group, ddl_tensor tensor, int32_t peer, int32_t tag, ddl_info *out_info);
DDL_API ddl_status ddl_isend(ddl_group *group, ddl_tensor tensor, int32_t peer, int32_t tag, ddl_request **out_request);
DDL_API ddl_status ddl_irecv(ddl_group *group, ddl_tensor tensor, int32_t peer, int32_t tag, ddl_request **out_request);
/* Sends and receives at once; cannot deadlock on itself. The tensors must not overlap. [any thread] */
DDL_API ddl_status ddl_send_recv(ddl_group *group, ddl_tensor send, int32_t dest, int32_t send_tag, ddl_tensor recv,
                                 int32_t source, int32_t recv_tag, ddl_info *out_info);
/* Waits for a message that could be received; out_info->count is in bytes. The message stays. From DDL_ANY_SOURCE:
 * DDL_ERR_PEER once for each rank of the group that dies, and whenever all others are dead or gone. [any thread] */
DDL_API ddl_status ddl_probe(ddl_group *group, int32_t peer, int32_t tag, ddl_info *out_info);
/* The same without waiting: DDL_IN_PROGRESS when there is none. [any thread] */
DDL_API ddl_status ddl_iprobe(ddl_group *group, int32_t peer, int32_t tag, ddl_info *out_info);

typedef struct ddl_transfer {
    int32_t is_send;
    ddl_tensor tensor;
    int32_t peer;
    int32_t tag;
} ddl_transfer;
/* Starts many sends and receives at once: all or none. out_requests has count entries. [any thread] */
DDL_API ddl_status ddl_batch(ddl_group *group, const ddl_transfer *transfers, int32_t count,
                             ddl_request **out_requests);

/* >>coll
 * Every rank of the group calls, in the same order, with matching arguments: else DDL_ERR_MISMATCH on all, both calls
 * spelled out, buffers untouched. in == out in place, where it says so; other overlaps are DDL_ERR_ARG.
 * n is the group's size, count the elements of the smaller tensor. The result has the same bits on every rank.
 * The i-forms return a request, the others are the i-form and ddl_wait. All [any thread]. */
DDL_API ddl_status ddl_barrier(ddl_group *group);
/* tensor of root -> tensor of all. */
DDL_API ddl_status ddl_broadcast(ddl_group *group, ddl_tensor tensor, int32_t root);
/* in (count) of all -> out (count) of root; out is not looked at elsewhere. In place at root. */
DDL_API ddl_status ddl_reduce(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op, int32_t root);
/* in (count) of all -> out (count) of all. In place. */
DDL_API ddl_status ddl_all_reduce(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op);
/* The same for many tensors, of any types, as one operation; in place. They must not overlap; all ranks pass the same
 * types and counts in the same order. */
DDL_API ddl_status ddl_all_reduce_many(ddl_group *group, const ddl_tensor *tensors, int32_t tensor_count, ddl_op op);
/* One number of each rank in, the reduced number out. */
DDL_API ddl_status ddl_all_reduce_scalar(ddl_group *group, double *value, ddl_op op);
/* in (count) of all -> out (n * count) of root, by rank. In place at root: in is its own part of out. */
DDL_API ddl_status ddl_gather(ddl_group *group, ddl_tensor in, ddl_tensor out, int32_t root);
/* in (n * count) of root -> out (count) of all. In place at root: out is its own part of in. */
DDL_API ddl_status ddl_scatter(ddl_group *group, ddl_tensor in, ddl_tensor out, int32_t root);
/* in (count) of all -> out (n * count) of all. In place: in is the own part of out. */
DDL_API ddl_status ddl_all_gather(ddl_group *group, ddl_tensor in, ddl_tensor out);
/* in (n * count) of all -> out (count): part r reduced, for rank r. In place: out is the own part of in. */
DDL_API ddl_status ddl_reduce_scatter(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op);
/* in (n * count) -> out (n * count): part r goes to rank r, part r of out comes from rank r. In place when in ==
 * out. */
DDL_API ddl_status ddl_all_to_all(ddl_group *group, ddl_tensor in, ddl_tensor out);
/* in (count) of ranks 0 .. r -> out (count) of rank r. In place. */
DDL_API ddl_status ddl_scan(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op);
/* in (count) of ranks 0 .. r-1 -> out (count) of rank r; out of rank 0 is left as it is. In place. */
DDL_API ddl_status ddl_exscan(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op);

/* The v-forms: counts[r] elements belong to rank r, at element offsets[r]; offsets NULL = packed in rank order.
 * Arrays have n entries, are the same on every rank and are copied. */
DDL_API ddl_status ddl_gatherv(ddl_group *group, ddl_tensor in, ddl_tensor out, const int64_t *counts,
                               const int64_t *offsets, int32_t root);
DDL_API ddl_status ddl_scatterv(ddl_group *group, ddl_tensor in, ddl_tensor out, const int64_t *counts,
                                const int64_t *offsets, int32_t root);
DDL_API ddl_status ddl_all_gatherv(ddl_group *group, ddl_tensor in, ddl_tensor out, const int64_t *counts,
                                   const int64_t *offsets);
DDL_API ddl_status ddl_reduce_scatterv(ddl_group *group, ddl_tensor in, ddl_tensor out, const int64_t *counts,
                                       ddl_op op);
/* Here the arrays are each rank's own: send_counts[r] of this rank is recv_counts[this rank] of r. Only the two ranks
 * can see that these differ: one whose own parts had already ended has its DDL_OK and its output, and learns of it at
 * its next call on the group. */
DDL_API ddl_status ddl_all_to_allv(ddl_group *group, ddl_tensor in, const int64_t *send_counts,
                                   const int64_t *send_offsets, ddl_tensor out, const int64_t *recv_counts,
                                   const int64_t *recv_offsets);

DDL_API ddl_status ddl_ibarrier(ddl_group *group, ddl_request **out_request);
DDL_API ddl_status ddl_ibroadcast(ddl_group *group, ddl_tensor tensor, int32_t root, ddl_request **out_request);
DDL_API ddl_status ddl_ireduce(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op, int32_t root,
                               ddl_request **out_request);
DDL_API ddl_status ddl_iall_reduce(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op,
                                   ddl_request **out_request);
DDL_API ddl_status ddl_iall_reduce_many(ddl_group *group, const ddl_tensor *tensors, int32_t tensor_count, ddl_op op,
                                        ddl_request **out_request);
DDL_API ddl_status ddl_igather(ddl_group *group, ddl_tensor in, ddl_tensor out, int32_t root,
                               ddl_request **out_request);
DDL_API ddl_status ddl_iscatter(ddl_group *group, ddl_tensor in, ddl_tensor out, int32_t root,
                                ddl_request **out_request);
DDL_API ddl_status ddl_iall_gather(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_request **out_request);
DDL_API ddl_status ddl_ireduce_scatter(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op,
                                       ddl_request **out_request);
DDL_API ddl_status ddl_iall_to_all(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_request **out_request);
DDL_API ddl_status ddl_iscan(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op, ddl_request **out_request);
DDL_API ddl_status ddl_iexscan(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op, ddl_request **out_request);
DDL_API ddl_status ddl_igatherv(ddl_group *group, ddl_tensor in, ddl_tensor out, const int64_t *counts,
                                const int64_t *offsets, int32_t root, ddl_request **out_request);
DDL_API ddl_status ddl_iscatterv(ddl_group *group, ddl_tensor in, ddl_tensor out, const int64_t *counts,
                                 const int64_t *offsets, int32_t root, ddl_request **out_request);
DDL_API ddl_status ddl_iall_gatherv(ddl_group *group, ddl_tensor in, ddl_tensor out, const int64_t *counts,
                                    const int64_t *offsets, ddl_request **out_request);
DDL_API ddl_status ddl_ireduce_scatterv(ddl_group *group, ddl_tensor in, ddl_tensor out, const int64_t *counts,
                                        ddl_op op, ddl_request **out_request);
DDL_API ddl_status ddl_iall_to_allv(ddl_group *group, ddl_tensor in, const int64_t *send_counts,
                                    const int64_t *send_offsets, ddl_tensor out, const int64_t *recv_counts,
                                    const int64_t *recv_offsets, ddl_request **out_request);

/* >>collective
 * A collective as data: what the functions above fill in. For the persistent form and for ddl_estimate. */
typedef enum ddl_kind {
    DDL_KIND_NONE = 0,
    DDL_BARRIER = 1,
    DDL_BROADCAST = 2,
    DDL_REDUCE = 3,
    DDL_ALL_REDUCE = 4,
    DDL_GATHER = 5,
    DDL_SCATTER = 6,
    DDL_ALL_GATHER = 7,
    DDL_REDUCE_SCATTER = 8,
    DDL_ALL_TO_ALL = 9,
    DDL_SCAN = 10,
    DDL_EXSCAN = 11,
    DDL_GATHERV = 12,
    DDL_SCATTERV = 13,
    DDL_ALL_GATHERV = 14,
    DDL_REDUCE_SCATTERV = 15,
    DDL_ALL_TO_ALLV = 16
} ddl_kind;
typedef struct ddl_collective {
    ddl_kind kind;
    ddl_op op;
    int32_t root;
    ddl_tensor in; /* broadcast: the tensor is both in and out */
    ddl_tensor out;
    const int64_t *counts;  /* all_to_allv: of what is sent */
    const int64_t *offsets; /* NULL = packed */
    const int64_t *recv_counts;
    const int64_t *recv_offsets;
} ddl_collective;
/* Plans a collective once; start it as often as wanted on the same buffers with ddl_start, end each start with ddl_wait
 * or ddl_test (which keep the request), and free it with ddl_request_free. Local. [any thread] */
DDL_API ddl_status ddl_collective_init(ddl_group *group, const ddl_collective *collective, ddl_request **out_request);
/* Starts a persistent request. Errors: DDL_ERR_STATE while it runs. [any thread] */
DDL_API ddl_status ddl_start(ddl_request *request);

typedef struct ddl_estimate_info {
    double seconds;
    const char *algorithm; /* "ring" */
    const char *transport; /* "tcp" */
    double latency_s;      /* what the model used: time of an empty message, */
    double seconds_per_byte;
} ddl_estimate_info;
/* Says how long a collective should take and by which algorithm. Local. [any thread] */
DDL_API ddl_status ddl_estimate(ddl_group *group, const ddl_collective *collective, ddl_estimate_info *out_estimate);

/* Cuts count elements over parts with remainder: the first count % parts parts get one more. Part index starts at
 * *out_begin and has *out_count elements. Errors: DDL_ERR_ARG. [any thread] */
DDL_API ddl_status ddl_part(int64_t count, int32_t parts, int32_t index, int64_t *out_begin, int64_t *out_count);

/* >>optimizer
 * How parameters follow gradients, the same on a worker and on a server. All math is f32 (norms f64), without
 * fused multiply-add, so that every processor and every cut into shards gives the same bits. w: parameter, g: its
 * gradient, lr: learning_rate times the factor of a schedule, wd: weight_decay, t: step, from 1.
 *
 *     DDL_SGD         g += wd*w;  w -= lr*g
 *     DDL_MOMENTUM    g += wd*w;  m = momentum*m + g;  w -= lr*m          Polyak 1964, as in torch
 *     DDL_NESTEROV    g += wd*w;  m = momentum*m + g;  w -= lr*(g + momentum*m)    Sutskever et al. 2013
 *     DDL_ADAM        g += wd*w;  m = b1*m + (1-b1)*g;  v = b2*v + (1-b2)*g*g;
 *                     w -= lr * (m/(1-b1^t)) / (sqrt(v/(1-b2^t)) + epsilon)       Kingma, Ba, arXiv 1412.6980
 *     DDL_ADAMW       w *= 1 - lr*wd, then Adam with wd = 0               Loshchilov, Hutter, arXiv 1711.05101
 *     DDL_LARS        L = trust*|w| / (|g| + wd*|w|), 1 when a norm is 0;
 *                     m = momentum*m + lr*L*(g + wd*w);  w -= m           You et al., arXiv 1708.03888
 *     DDL_LAMB        m, v as Adam;  r = m^/(sqrt(v^) + epsilon) + wd*w;
 *                     w -= lr * trust*|w|/|r| * r, factor 1 when a norm is 0      You et al., arXiv 1904.00962
 *     DDL_OPTIMIZER_FN   the program's own function
 *
 * The norms |.| go over one whole tensor, however it is sharded. A NaN or infinity in g goes into w. */
typedef enum ddl_optimizer_kind {
    DDL_SGD = 0,
    DDL_MOMENTUM = 1,
    DDL_NESTEROV = 2,
    DDL_ADAM = 3,
    DDL_ADAMW = 4,
    DDL_LARS = 5,
    DDL_LAMB = 6,
    DDL_OPTIMIZER_FN = 7
} ddl_optimizer_kind;
/* One step on a part of a tensor: all of it, or the elements [offset, offset + count) that a rank or server holds. */
typedef struct ddl_optimizer_part {
    int64_t step;         /* from 1 */
    double learning_rate; /* of this step, the schedule's factor included */
    int32_t tensor;       /* its number, in order of registration */
    int64_t offset;       /* of the part in its tensor, in elements */
    int64_t count;
    float *param;
    const float *grad;
    float *state;        /* slot s of element i is state[s * state_stride + i]; zero before the first step */
    int64_t state_stride;
    ddl_dtype dtype;     /* DDL_F64: all three are arrays of double, to be cast; else of float */
} ddl_optimizer_part;
/* Must depend on nothing but the part, elementwise, or shards differ from the whole. Must not call ddl. */
typedef void (*ddl_optimizer_fn)(void *user, const ddl_optimizer_part *part);
/* All zero is SGD. A member that is 0 takes its default; one below 0 means "none" where so marked. */
typedef struct ddl_optimizer {
    ddl_optimizer_kind kind;
    double learning_rate; /* 0.01; Adam, AdamW, LAMB 0.001; LARS 0.1 */
    double momentum;      /* 0.9; below 0: none */
    double beta1;         /* 0.9; below 0: none */
    double beta2;         /* 0.999 */
    double epsilon;       /* 1e-8; LAMB 1e-6 */
    double weight_decay;  /* 0 */
    double trust;         /* LARS 0.001, LAMB 1 */
    ddl_optimizer_fn fn;  /* of DDL_OPTIMIZER_FN, with its argument and the floats of state it keeps per element */
    void *user;
    int32_t state_slots;
} ddl_optimizer;

/* >>compression
 * Gradients as fewer bytes, with error feedback: what a code loses is kept on the rank (the residual) and added to the
 * next gradient, so that nothing is lost for good, only late (Seide et al. 2014; Karimireddy et al., arXiv 1901.09847).
 * n: elements of the tensor. All ranks get the same average, bit for bit.
 *
 *     kind                   bytes per rank    what is sent
 *     DDL_COMPRESS_F16       2n                rounded to f16 (finite values stay finite) or bf16; added up in f32
 *     DDL_COMPRESS_BF16      2n
 *     DDL_COMPRESS_INT8      n                 512 values share a scale, the largest is 127; rounded to nearest
 *     DDL_COMPRESS_QSGD      n/2 or n          the same with levels steps (to 7: 4 bits), rounded up or down at random
 *                                              so that the mean is right; QSGD, arXiv 1610.02132, with the largest
 *                                              value as norm
 *     DDL_COMPRESS_SIGN      n/8               signs; 512 values share their mean magnitude; EF-signSGD, 1901.09847
 *     DDL_COMPRESS_MAJORITY  n/8               signs; the result is the sign of most ranks, 1 or -1; arXiv 1802.04434
 *     DDL_COMPRESS_TOP_K     8k                the k largest magnitudes and where they are; DGC, arXiv 1712.01887
 *     DDL_COMPRESS_RANDOM_K  4k                k values at places drawn from the seed, the same on all ranks
 *     DDL_COMPRESS_GTOP_K    8k                the k largest of the sum, merged in a tree; arXiv 1901.04359
 *     DDL_COMPRESS_POWER     4r(rows + cols)   a matrix of rank r by one power iteration; PowerSGD, arXiv 1905.13727.
 *                                              Tensors that it would not halve (vectors) go as they are
 *     DDL_COMPRESS_ADAPTIVE  4n or less        as it is, F16, INT8, SIGN or the 1 % of TOP_K, with error feedback: what
 *                                              has the least error in the time that backward hides; of trainers only
 *
 * A NaN or infinity arrives as one (a mixture of them in 512 signs as NaN; in POWER its whole row is NaN) and is not
 * kept in the residual; finite neighbours are unharmed. It is counted. */
typedef enum ddl_compression_kind {
    DDL_COMPRESS_NONE = 0,
    DDL_COMPRESS_F16 = 1,
    DDL_COMPRESS_BF16 = 2,
    DDL_COMPRESS_INT8 = 3,
    DDL_COMPRESS_QSGD = 4,
    DDL_COMPRESS_SIGN = 5,
    DDL_COMPRESS_MAJORITY = 6,
    DDL_COMPRESS_TOP_K = 7,
    DDL_COMPRESS_RANDOM_K = 8,
    DDL_COMPRESS_GTOP_K = 9,
    DDL_COMPRESS_POWER = 10,
    DDL_COMPRESS_ADAPTIVE = 11
} ddl_compression_kind;
/* All zero is no compression. The same on all ranks. A member that its kind does not use must be 0. */
typedef struct ddl_compression {
    ddl_compression_kind kind;
    double ratio;   /* of TOP_K, RANDOM_K, GTOP_K: the part of the elements that is sent; default 0.01 */
    int64_t k;      /* or their number, at most all of them */
    int32_t rank;   /* of POWER: r, 1 to 64; default 2 */
    int32_t levels; /* of QSGD: 1 to 127; default 7 */
    int32_t error_feedback; /* 1 on, -1 off; 0: off for F16, BF16, QSGD and MAJORITY, on for the others. SIGN, POWER and
                               the sparse kinds cannot do without; MAJORITY, which sends no magnitudes, has none */
    uint64_t seed; /* of QSGD, RANDOM_K and POWER: the same seed gives the same run */
} ddl_compression;

#ifdef __cplusplus
} /* extern "C" */

/* DDL_ARRAY and DDL_VIEW for C++. A type that has no ddl_dtype does not compile. */
template <class T> struct ddl_dtype_of;
#define DDL_DTYPE_CXX(type, value)                                                                                     \
    template <> struct ddl_dtype_of<type> {                                                                            \
        static constexpr ddl_dtype dtype = value;                                                                      \
    };
DDL_DTYPE_CXX(float, DDL_F32)
DDL_DTYPE_CXX(double, DDL_F64)
DDL_DTYPE_CXX(signed char, DDL_I8)
DDL_DTYPE_CXX(unsigned char, DDL_U8)
DDL_DTYPE_CXX(int, DDL_I32)
DDL_DTYPE_CXX(unsigned int, DDL_U32)
DDL_DTYPE_CXX(long, DDL_I64)
DDL_DTYPE_CXX(unsigned long, DDL_U64)
DDL_DTYPE_CXX(long long, DDL_I64)
DDL_DTYPE_CXX(unsigned long long, DDL_U64)
DDL_DTYPE_CXX(bool, DDL_BOOL)
#undef DDL_DTYPE_CXX
template <class T> inline ddl_tensor ddl_view(const T *p, int64_t count) {
    return ddl_tensor_1d(p, ddl_dtype_of<T>::dtype, count);
}
template <class T, size_t N> inline ddl_tensor ddl_array(const T (&a)[N]) {
    return ddl_view(a, static_cast<int64_t>(N));
}
#endif

#endif /* DDL_API_H */
